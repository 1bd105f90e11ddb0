/* --- MX32 casts: stages of gmm_cast_mx32 --- */

/* Copies of both directions are stored in the order of the source, and stores of half lines of memory are slow. So a
   lane holds sixteen rows of sixteen bytes, and sixteen lanes write complete lines. A warp has 32 rows, that is a block
   of each column, by 16 w columns (w: elements in sixteen bytes), and needs no other warp:

       columns   0       16 w    32 w      columns   0   w   2 w               15 w  16 w
       rows  0   +-------+-------+         rows  0   +---+---+---+---      ---+-----+
                 | warp 0| warp 4|                   | 0 | 1 | 2 |     ...    |  15 |
            32   +-------+-------+             16    +---+---+---+---      ---+-----+
                 | warp 1| warp 5|                   |16 |17 |18 |     ...    |  31 |
                  ... to row 128                     +---+---+---+---      ---+-----+

   32 / w adjacent lanes share a block of a row, two lanes above one another a block of a column; each lane computes the
   scales of its part of the blocks. */
typedef struct gmm_cast_mx32 {
    float inverse; /* reciprocal of the dtype's largest value */
    int32_t e5m2;
} gmm_cast_mx32;

/* gmm_cast_tile_init for this tile. */
GMM__DEVICE gmm_cast_tile gmm_cast_mx32_tile_init(const gmm__quant_args *a, gmm_dtype source) {
    const int32_t lane = gmm__lane(), warp = gmm__warp(), width = gmm__elems16(source);
    gmm_cast_tile t = gmm_cast_tile_init(a, source);
    t.row0 = warp % 4 * 32 + 16 * (lane >> 4);
    t.col0 = warp / 4 * 16 * width + width * (lane & 15);
    return t;
}

/* Words of the maxima of sixteen rows: elements of 16 bits have two maxima per word. */
GMM__DEVICE int32_t gmm_cast_mx32_row_words(gmm_dtype source) { return source == GMM_F32 ? 16 : 8; }
/* Maxima of the lane's parts of its rows, with the sign of gmm__word_max_signed. */
GMM__DEVICE void gmm_cast_mx32_row_maxima(gmm_dtype source, const uint32_t x[16][4], uint32_t row[16]) {
    const int32_t rows_per_word = 16 / gmm_cast_mx32_row_words(source);
    int32_t i, k;
#pragma unroll
    for (i = 0; i < 16; i += rows_per_word) {
        uint32_t maximum = x[i][0], second;
#pragma unroll
        for (k = 1; k < 4; k++) maximum = gmm__word_max_signed(source, maximum, x[i][k]);
        if (rows_per_word == 2) {
            second = x[i + 1][0];
#pragma unroll
            for (k = 1; k < 4; k++) second = gmm__word_max_signed(source, second, x[i + 1][k]);
            maximum = gmm__word_max_signed(source, __byte_perm(maximum, second, 0x5410),
                                           __byte_perm(maximum, second, 0x7632));
        }
        row[i / rows_per_word] = maximum;
    }
}
/* Blocks of 32 x 32: the maximum of the lanes that share one. It replaces the maxima of rows that exist. */
GMM__DEVICE uint32_t gmm_cast_mx32_square_max(const gmm_cast_tile *t, uint32_t row[16]) {
    const int32_t words = gmm_cast_mx32_row_words(t->source), row_lanes = 32 / gmm__elems16(t->source);
    uint32_t maximum = row[0];
    int32_t i;
#pragma unroll
    for (i = 1; i < words; i++) maximum = gmm__word_max_signed(t->source, maximum, row[i]);
    if (t->source != GMM_F32) maximum = gmm__word_max_signed(t->source, maximum, __byte_perm(maximum, 0, 0x1032));
#pragma unroll
    for (i = 1; i < 32; i = i == row_lanes / 2 ? 16 : 2 * i)
        maximum = gmm__word_max_signed(t->source, maximum, __shfl_xor_sync(0xFFFFFFFFu, maximum, i));
    maximum = gmm__word_max(t->source, 0, maximum);
#pragma unroll
    for (i = 0; i < words; i++)
        if (t->source == GMM_F32) row[i] = i < t->valid_rows ? maximum : 0;
        else row[i] = 2 * i + 1 < t->valid_rows ? maximum : 2 * i < t->valid_rows ? maximum & 0xFFFFu : 0;
    return maximum;
}

/* gmm_mx_scale of the maxima in two words, two (F32) or four. */
GMM__DEVICE uint32_t gmm_cast_mx32_scales(gmm_dtype source, const uint32_t maxima[2], float inverse) {
    uint32_t bytes = 0;
    int32_t i;
#pragma unroll
    for (i = 0; i < 16 / gmm_cast_mx32_row_words(source) * 2; i++) {
        const uint32_t u = gmm_f32_bits(gmm__fmul(gmm__word_value(source, maxima, i), inverse));
        const uint32_t exponent = (u + 0x7FFFFFu) >> 23;
        bytes |= (u <= 0x400000u ? 0u : exponent < 254u ? exponent : 254u) << 8 * i;
    }
    return bytes;
}
/* gmm_e8m0_reciprocal of scale byte i of an array of words. */
GMM__DEVICE float gmm_cast_mx32_reciprocal(const uint32_t *scales4, int32_t i) {
    const uint32_t bits = (254u - ((scales4[i >> 2] >> 8 * (i & 3)) & 0xFFu)) << 23;
    return gmm_f32_from_bits(bits > 0x400000u ? bits : 0x400000u);
}

/* Scale bytes of the lane's part of the rows of its block, four rows or (F32) two. Each step of the exchange halves the
   rows of a lane, until it has two words. */
GMM__DEVICE uint32_t gmm_cast_mx32_row_scales(const gmm_cast_mx32 *c, gmm_dtype source, uint32_t row[16]) {
    const int32_t words = gmm_cast_mx32_row_words(source), lane_col = gmm__lane() & 15;
    int32_t i, k;
#pragma unroll
    for (k = words / 2; k >= 2; k >>= 1)
#pragma unroll
        for (i = 0; i < words / 2; i++)
            if (i < k) {
                const int32_t lane_stride = words / 2 / k, upper = lane_col & lane_stride;
                const uint32_t own = upper ? row[i + k] : row[i];
                const uint32_t other = __shfl_xor_sync(0xFFFFFFFFu, upper ? row[i] : row[i + k], lane_stride);
                row[i] = gmm__word_max_signed(source, own, other);
            }
    row[0] = gmm__word_max(source, 0, row[0]);
    row[1] = gmm__word_max(source, 0, row[1]);
    return gmm_cast_mx32_scales(source, row, c->inverse);
}
/* Stores the scales of rows. Bytes are transposed between lanes: scales of several rows become scales of four (F32:
   two) adjacent blocks of one row. */
GMM__DEVICE void gmm_cast_mx32_store_row_scales(const gmm_cast_tile *t, uint32_t lane_scales) {
    const gmm_mat *m = &t->a->rowwise;
    const int32_t lane_col = gmm__lane() & 15, along = (t->cols + 127) / 128 * 4;
    const int32_t block = (t->c0 + t->col0 - gmm__elems16(t->source) * lane_col) / 32;
    const int32_t row = t->row0 + 8 * (lane_col & 1) + 2 * (lane_col & 2) + (lane_col >> 1 & 2) + (lane_col >> 3);
    uint8_t *scale = gmm_cast_scales(t, 0, (int64_t)t->p.padded_row * along);
    uint32_t other;
    if (t->source != GMM_F32) {
        other = __shfl_xor_sync(0xFFFFFFFFu, lane_scales, 4);
        lane_scales = __byte_perm(lane_scales, other, lane_col & 4 ? 0x3726 : 0x5140);
    }
    other = __shfl_xor_sync(0xFFFFFFFFu, lane_scales, 8);
    if (t->source != GMM_F32) {
        lane_scales = __byte_perm(lane_scales, other, lane_col & 8 ? 0x3276 : 0x5410);
        gmm_cast_store_scales4(scale, m->scale_order, t->p.row, block, along, row, 0, lane_scales);
    } else if (block < along)
        *(uint16_t *)(void *)(scale + (m->scale_order == GMM_SCALES_SWIZZLED
                                       ? gmm_swizzle_offset(t->p.row + row, block, along)
                                       : (int64_t)(t->p.row + row) * along + block)) =
            (uint16_t)__byte_perm(lane_scales, other, lane_col & 8 ? 0x4415 : 0x4440);
}
/* Scale bytes of all sixteen rows, from the lanes of the block. With F32 those of four rows are spread over two lanes.
   */
GMM__DEVICE void gmm_cast_mx32_gather_row_scales(gmm_dtype source, uint32_t lane_scales, uint32_t scales4[4]) {
    const int32_t lane_col = gmm__lane() & 15;
    uint32_t other, other2;
    if (source == GMM_F32) {
        other = __shfl_xor_sync(0xFFFFFFFFu, lane_scales, 4);
        lane_scales = lane_col & 4 ? other | lane_scales << 16 : lane_scales | other << 16;
    }
    other = __shfl_xor_sync(0xFFFFFFFFu, lane_scales, 2);
    scales4[1] = lane_col & 2 ? lane_scales : other;
    scales4[0] = lane_col & 2 ? other : lane_scales;
    other = __shfl_xor_sync(0xFFFFFFFFu, scales4[0], 1);
    other2 = __shfl_xor_sync(0xFFFFFFFFu, scales4[1], 1);
    scales4[2] = lane_col & 1 ? scales4[0] : other;
    scales4[3] = lane_col & 1 ? scales4[1] : other2;
    scales4[0] = lane_col & 1 ? other : scales4[0];
    scales4[1] = lane_col & 1 ? other2 : scales4[1];
}

/* Scale bytes of the columns that the lane computes: its left half, or its right half in the lower lane. square_max:
   the maximum of the block of 32 x 32, if blocks are square. */
GMM__DEVICE uint32_t gmm_cast_mx32_col_scales(const gmm_cast_mx32 *c, const gmm_cast_tile *t, const uint32_t x[16][4],
                                              uint32_t square_max) {
    const int32_t lower = gmm__lane() >> 4;
    uint32_t maximum[4];
    int32_t i, k;
#pragma unroll
    for (k = 0; k < 4; k++) {
        maximum[k] = x[0][k];
#pragma unroll
        for (i = 1; i < 16; i++) maximum[k] = gmm__word_max_signed(t->source, maximum[k], x[i][k]);
    }
#pragma unroll
    for (k = 0; k < 2; k++) {
        const uint32_t own = lower ? maximum[k + 2] : maximum[k];
        uint32_t other = __shfl_xor_sync(0xFFFFFFFFu, lower ? maximum[k] : maximum[k + 2], 16);
        other = gmm__word_max(t->source, 0, gmm__word_max_signed(t->source, own, other));
        maximum[k] = t->a->format.square ? t->in_cols ? square_max : 0 : other;
    }
    return gmm_cast_mx32_scales(t->source, maximum, c->inverse);
}
/* Stores the scales of columns, and returns in scales4 those of all columns of the lane. */
GMM__DEVICE void gmm_cast_mx32_store_col_scales(const gmm_cast_tile *t, uint32_t lane_scales, uint32_t scales4[2]) {
    const gmm_mat *m = &t->a->columnwise;
    const int32_t lower = gmm__lane() >> 4, count = gmm__elems16(t->source) / 2;
    const int32_t padded_cols = (t->cols + 127) & ~127, along = (t->padded_rows + 127) / 128 * 4;
    const int32_t col = t->c0 + t->col0 + count * lower, block = (t->p.row + t->row0 - 16 * lower) / 32;
    uint8_t *scale = gmm_cast_scales(t, 1, (int64_t)(t->p.padded_row / 32) * padded_cols);
    uint32_t other;
    int32_t j;
    if (col < padded_cols && m->scale_order == GMM_SCALES_SWIZZLED) {
        scale += gmm_swizzle_offset(col, block, along);
#pragma unroll
        for (j = 0; j < count; j++) scale[16 * j] = (uint8_t)(lane_scales >> 8 * j);
    } else if (col < padded_cols) {
        scale += (int64_t)block * padded_cols + col;
        if (count == 4) gmm_st_global_b32(scale, lane_scales);
        else *(uint16_t *)(void *)scale = (uint16_t)lane_scales;
    }
    other = __shfl_xor_sync(0xFFFFFFFFu, lane_scales, 16);
    scales4[0] = lower ? other : lane_scales;
    scales4[1] = lower ? lane_scales : other;
    if (count == 2) scales4[0] |= scales4[1] << 16;
}

/* Encodes and stores the lane's part of the rowwise (copy 0) or columnwise copy (copy 1), whose scales are those of
   rows or of columns; codes are in the order of the source. */
GMM__DEVICE void gmm_cast_mx32_encode(const gmm_cast_mx32 *c, const gmm_cast_tile *t, int32_t copy,
                                      const uint32_t x[16][4], const uint32_t *scales4) {
    const gmm_mat *m = copy ? &t->a->columnwise : &t->a->rowwise;
    uint8_t *dst = gmm_cast_data(m, t->a->step[copy], t->p.unit) + (t->p.source_row + t->p.row + t->row0) * m->ld +
                   t->c0 + t->col0;
    int32_t i, j;
#pragma unroll
    for (i = 0; i < 16; i++, dst += m->ld) {
        float v[8];
#pragma unroll
        for (j = 0; j < gmm__elems16(t->source); j++)
            v[j] = gmm__fmul(gmm__word_value(t->source, x[i], j), gmm_cast_mx32_reciprocal(scales4, copy ? j : i));
        if (i >= t->valid_rows) continue;
        if (t->source == GMM_F32) gmm_st_global_b32(dst, gmm_encode_fp8x4(c->e5m2, v));
        else gmm_st_global_v2_b32(dst, gmm_encode_fp8x4(c->e5m2, v), gmm_encode_fp8x4(c->e5m2, v + 4));
    }
}
