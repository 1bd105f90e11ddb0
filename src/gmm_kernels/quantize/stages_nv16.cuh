/* --- NV16 casts: stages of gmm_cast_nv16 and gmm_cast_nv16_hadamard --- */

/* Lanes hold the tile as drawn in vectors.cuh. Two lanes side by side have a block of a row, two above one another a
   block of a column; each computes the scales of half of the blocks of both. Scales are bytes, which index a table of
   all encode scales that the unit can have. */
typedef struct gmm_cast_nv16 {
    int32_t right, lower;   /* whether this is the right lane of a row's block; the lower lane of a column's block */
    const float *encodes;   /* table of the rowwise copy: encode scales by scale byte. Entry 127, whose byte is NaN in
                               E4M3 and no scale, is what a block's amax is multiplied by to get its scale: mult */
    const float *encodes_t; /* table of the columnwise copy */
    uint8_t *codes;         /* the tile's columnwise codes, in shared memory */
    uint8_t *scales;        /* [GMM_TILE][GMM_TILE_BLOCKS] their scales */
    int32_t row_along, col_along; /* scales of a row and of a column of the unit, with padding */
    int64_t row_pitch, col_pitch; /* bytes between rows and between columns of codes */
} gmm_cast_nv16;

/* Computes what all tiles of a strip have in common, outside of branches, where ptxas keeps it in uniform registers. */
GMM__DEVICE void gmm_cast_nv16_move(gmm_cast_nv16 *c, const gmm_cast_tile *t) {
    c->row_along = ((t->cols + 63) >> 6) * 4;
    c->col_along = ((t->padded_rows + 63) >> 6) * 4;
    c->row_pitch = t->a->rowwise.ld / 2;
    c->col_pitch = t->a->columnwise.ld / 2;
}

/* Computes the tables of the unit, one or with `separate_amax` two. */
GMM__DEVICE void gmm_cast_nv16_tables(const gmm_cast_tile *t, int32_t separate_amax, float (*encodes)[GMM_TILE]) {
    int32_t k;
    for (k = 0; k <= separate_amax; k++) {
        const gmm_nv_global g = gmm_nv_global_of(t->a->amax[k][t->p.unit], t->a->format.e4m3_256 ? 256.0f : 448.0f);
        const int32_t thread = gmm_tid_x();
        if (thread < GMM_TILE) encodes[k][thread] = thread < 127 ? gmm_nv_encode(&g, (uint8_t)thread) : g.mult;
    }
}

/* Maxima of the lane's parts of its rows; returns whether a value is NaN. hadamard: NaN then loses its sign. */
GMM__DEVICE uint32_t gmm_cast_nv16_row_maxima(gmm_dtype source, int32_t hadamard, uint32_t x[8][8], uint32_t row[8]) {
    uint32_t has_nan = 0;
    int32_t i, k;
#pragma unroll
    for (i = 0; i < 8; i++) {
        row[i] = 0;
#pragma unroll
        for (k = 0; k < gmm__words8(source); k++) row[i] = gmm__word_max_nan(source, row[i], x[i][k]);
        row[i] = gmm__word_fold(source, row[i]);
        has_nan = max(row[i], has_nan);
    }
    has_nan = has_nan > 0x7F800000u;
    if (has_nan) gmm_cast_row_maxima(source, x, row, 0, row);
#pragma unroll
    for (i = 0; i < 32 && hadamard && has_nan; i++) x[i / 4][i % 4] = gmm_hadamard_positive_nan(x[i / 4][i % 4]);
    return has_nan;
}
/* Blocks of 16 x 16: the maximum of the four lanes that share one. It replaces the maxima of rows; rows beyond the last
   one have no scales. */
GMM__DEVICE uint32_t gmm_cast_nv16_square_max(const gmm_cast_tile *t, uint32_t row[8]) {
    uint32_t maximum = 0;
    int32_t i;
#pragma unroll
    for (i = 0; i < 8; i++) maximum = max(maximum, row[i]);
    maximum = gmm__quant_block_max(maximum, 2);
    maximum = max(maximum, __shfl_xor_sync(0xFFFFFFFFu, maximum, 8));
#pragma unroll
    for (i = 0; i < 8; i++) row[i] = i < t->valid_rows ? maximum : 0;
    return maximum;
}
/* Maxima of the lane's half of the columns of its block, as words. */
GMM__DEVICE void gmm_cast_nv16_col_maxima(gmm_dtype source, int32_t lower, const uint32_t x[8][8], uint32_t col[8]) {
    const int32_t half = gmm__words8(source) / 2;
    int32_t k;
    gmm_cast_col_maxima(source, x, col);
#pragma unroll
    for (k = 0; k < half; k++) {
        const uint32_t sent = lower ? col[k] : col[k + half];
        col[k] = gmm__word_max(source, lower ? col[k + half] : col[k], __shfl_xor_sync(0xFFFFFFFFu, sent, 8));
    }
}

/* Scale bytes of four blocks. `check`: bit 7 of the first byte is set if a product may reach 7. */
GMM__DEVICE uint32_t gmm_cast_nv16_scale4(const float amax[4], const float *encodes, int check) {
    float v[4], maximum = 0.0f;
    uint32_t scales4;
    int32_t i;
    /* infinity saturates to the largest code as well */
#pragma unroll
    for (i = 0; i < 4; i++) v[i] = gmm__fmul(amax[i], encodes[127]);
    scales4 = gmm_encode_fp8x4(0, v);
#pragma unroll
    for (i = 0; i < 4 && check; i++) {
        const float m = gmm__fmul(amax[i], encodes[(scales4 >> 8 * i) & 0x7Fu]);
        maximum = m > maximum ? m : maximum;
    }
    /* A normal scale is rounded down by at most a 17th, so that its products stay below 6.4. Subnormal and saturated
       scales may be far less than what they are rounded from. */
    return check && !(maximum < 6.75f) ? scales4 | 0x80u : scales4;
}
/* Scale bytes of the lane's 8 lines, from its own four and those of the other lane of its blocks. */
GMM__DEVICE void gmm_cast_nv16_scale8(uint32_t lane_scales, int32_t second, int32_t lane_stride, uint32_t scales4[2]) {
    const uint32_t other = __shfl_xor_sync(0xFFFFFFFFu, lane_scales, lane_stride);
    scales4[0] = second ? other : lane_scales;
    scales4[1] = second ? lane_scales : other;
}
/* Encode scale of line i of the lane, from the scale bytes of its 8 lines. */
GMM__DEVICE float gmm_cast_nv16_encode_scale(const float *encodes, const uint32_t scales4[2], int32_t i) {
    return encodes[((i & 4 ? scales4[1] : scales4[0]) >> 8 * (i & 3)) & 0x7Fu];
}
/* Scale bytes of the lane's half of the rows of its block, and in scales4 of all 8. */
GMM__DEVICE uint32_t gmm_cast_nv16_row_scales(const gmm_cast_nv16 *c, const uint32_t row[8], int check,
                                              uint32_t scales4[2]) {
    uint32_t lane_scales;
    float amax[4];
    int32_t i;
#pragma unroll
    for (i = 0; i < 4; i++) {
        const uint32_t own = c->right ? row[i + 4] : row[i];
        amax[i] = gmm_f32_from_bits(max(own, __shfl_xor_sync(0xFFFFFFFFu, c->right ? row[i] : row[i + 4], 1)));
    }
    lane_scales = gmm_cast_nv16_scale4(amax, c->encodes, check);
    gmm_cast_nv16_scale8(lane_scales, c->right, 1, scales4);
    return lane_scales;
}
/* Stores the scales of rows. Bytes are transposed between lanes: each receives those of four adjacent blocks of a row.
   */
GMM__DEVICE void gmm_cast_nv16_store_row_scales(const gmm_cast_nv16 *c, const gmm_cast_tile *t, uint32_t lane_scales) {
    const int32_t lane_col = gmm__lane() & 7, along = c->row_along;
    uint8_t *dst = gmm_cast_scales(t, 0, (int64_t)t->p.padded_row * along);
    uint32_t other;
    lane_scales &= 0x7F7F7F7Fu;
    other = __shfl_xor_sync(0xFFFFFFFFu, lane_scales, 2);
    lane_scales = __byte_perm(lane_scales, other, lane_col & 2 ? 0x3715 : 0x6240);
    other = __shfl_xor_sync(0xFFFFFFFFu, lane_scales, 4);
    lane_scales = __byte_perm(lane_scales, other, lane_col & 4 ? 0x3276 : 0x5410);
    gmm_cast_store_scales4(dst, t->a->rowwise.scale_order, t->p.row, t->c0 / 16, along,
                           t->row0 + 4 * c->right + (lane_col >> 1), t->col0 >> 6 << 2, lane_scales);
}
/* Leaves the scales of the lane's half of its columns in shared memory. */
GMM__DEVICE void gmm_cast_nv16_leave_col_scales(const gmm_cast_nv16 *c, const gmm_cast_tile *t, uint32_t lane_scales) {
    int32_t j;
#pragma unroll
    for (j = 0; j < 4; j++)
        c->scales[(t->col0 + 4 * c->lower + j) * GMM_TILE_BLOCKS + (t->row0 >> 4)] = (uint8_t)(lane_scales >> 8 * j);
}

/* E2M1 codes of the lane's row or column number l. */
GMM__DEVICE uint32_t gmm_cast_nv16_encode_line(gmm_dtype source, const uint32_t x[8][8], int32_t columnwise, int32_t l,
                                               float encode_scale) {
    float v[8];
    gmm_cast_line(source, x, columnwise, l, v);
    return gmm_e2m1x8(v, encode_scale, 0);
}
/* Encodes the lane's part again by the scalar codec, from values in device memory, where one of them is NaN or a
   product may reach 7. Lines begin at dst, `pitch` bytes apart. */
GMM__DEVICE void gmm_cast_nv16_encode_scalar(const gmm_cast_tile *t, int32_t columnwise, const float *encodes,
                                             const uint32_t scales4[2], uint8_t *dst, int64_t pitch) {
    const int32_t lines = columnwise ? 8 : t->valid_rows;
    int32_t j, k;
#pragma unroll 1
    for (k = 0; k < 64 && k >> 3 < lines; k += 2) {
        const float encode_scale = gmm_cast_nv16_encode_scale(encodes, scales4, k >> 3);
        uint32_t byte = 0;
#pragma unroll 1
        for (j = 0; j < 2; j++) {
            const int32_t line = k >> 3, along = (k & 7) + j;
            float v;
            if (columnwise && !(along < t->valid_rows && t->in_cols)) continue;
            v = columnwise ? gmm_cast_reload(t, along, line) : gmm_cast_reload(t, line, along);
            byte |= (uint32_t)gmm_f32_to_e2m1(gmm__fmul(v, encode_scale)) << 4 * j;
        }
        dst[(k >> 3) * pitch + (k & 7) / 2] = (uint8_t)byte;
    }
}
/* Codes of a square block, which both copies hold. */
GMM__DEVICE void gmm_cast_nv16_encode_square(const gmm_cast_nv16 *c, const gmm_cast_tile *t, const uint32_t x[8][8],
                                             const uint32_t scales4[2], uint32_t square_codes[8]) {
    const float encode_scale = gmm_cast_nv16_encode_scale(c->encodes, scales4, 0);
    int32_t i;
#pragma unroll
    for (i = 0; i < 8; i++) square_codes[i] = gmm_cast_nv16_encode_line(t->source, x, 0, i, encode_scale);
}
/* Where the codes of the lane's first row begin. */
GMM__DEVICE uint8_t *gmm_cast_nv16_row_codes(const gmm_cast_nv16 *c, const gmm_cast_tile *t) {
    const gmm__quant_args *a = t->a;
    return gmm_cast_data(&a->rowwise, a->step[0], t->p.unit) + (t->c0 + t->col0) / 2 +
           (t->p.source_row + t->p.row + t->row0) * c->row_pitch;
}

/* Encodes and stores the lane's rows. square_codes: codes of both copies of square blocks, else NULL. */
GMM__DEVICE void gmm_cast_nv16_encode_rows(const gmm_cast_nv16 *c, const gmm_cast_tile *t, const uint32_t x[8][8],
                                           const uint32_t scales4[2], const uint32_t square_codes[8],
                                           uint32_t has_nan) {
    const int64_t pitch = c->row_pitch;
    uint8_t *dst = gmm_cast_nv16_row_codes(c, t);
    int32_t i;
#pragma unroll
    for (i = 0; i < 8; i++, dst += pitch) {
        const float encode_scale = gmm_cast_nv16_encode_scale(c->encodes, scales4, i);
        if (i < t->valid_rows) {
            uint32_t code = square_codes[i];
            if (!t->a->format.square) code = gmm_cast_nv16_encode_line(t->source, x, 0, i, encode_scale);
            gmm_st_global_b32(dst, code);
        }
    }
    if (has_nan | ((scales4[0] | scales4[1]) & 0x80u))
        gmm_cast_nv16_encode_scalar(t, 0, c->encodes, scales4, dst - 8 * pitch, pitch);
}
/* Encodes the lane's columns into shared memory, with their scales. square_max, square_codes: of square blocks. */
GMM__DEVICE void gmm_cast_nv16_encode_cols(const gmm_cast_nv16 *c, const gmm_cast_tile *t, const uint32_t x[8][8],
                                           uint32_t square_max, uint32_t square_codes[8], uint32_t has_nan) {
    const gmm_format *f = &t->a->format;
    uint8_t *smem = c->codes + gmm_cast_smem_column(GMM_CAST_NV16_COLUMN, t->col0) + t->row0 / 2;
    uint32_t col[8], scales4[2], lane_scales;
    float amax[4];
    int32_t j;
    gmm_cast_nv16_col_maxima(t->source, c->lower, x, col);
#pragma unroll
    for (j = 0; j < 4; j++)
        amax[j] = f->square ? gmm_f32_from_bits(t->in_cols ? square_max : 0) : gmm__word_value(t->source, col, j);
    lane_scales = gmm_cast_nv16_scale4(amax, c->encodes_t, 1);
    gmm_cast_nv16_scale8(lane_scales, c->lower, 8, scales4);
    if (f->square) gmm_e2m1_transpose8x8(square_codes);
#pragma unroll
    for (j = 0; j < 8; j++) {
        const float encode_scale = gmm_cast_nv16_encode_scale(c->encodes_t, scales4, j);
        uint32_t code = square_codes[j];
        if (!f->square) code = gmm_cast_nv16_encode_line(t->source, x, 1, j, encode_scale);
        *(uint32_t *)(void *)(smem + j * GMM_CAST_NV16_COLUMN) = code;
    }
    if (has_nan | ((scales4[0] | scales4[1]) & 0x80u))
        gmm_cast_nv16_encode_scalar(t, 1, c->encodes_t, scales4, smem, GMM_CAST_NV16_COLUMN);
    gmm_cast_nv16_leave_col_scales(c, t, lane_scales & 0x7F7F7F7Fu);
}

/* BF16 with Hadamard transform or stochastic rounding. Encodes and stores rows i and i + 4 at once: each of a block's
   two lanes draws the random bits of one row for both. */
GMM__DEVICE void gmm_cast_nv16_encode_rows_random(const gmm_cast_nv16 *c, const gmm_cast_tile *t,
                                                  const uint32_t x[8][8], const uint32_t scales4[2]) {
    const gmm__quant_args *a = t->a;
    const gmm_format *f = &a->format;
    const int64_t pitch = c->row_pitch, blocks_per_row = (t->cols + 15) >> 4;
    const int64_t block = (t->p.row + t->row0 + 4 * c->right) * blocks_per_row + ((t->c0 + t->col0) >> 4);
    uint8_t *dst = gmm_cast_nv16_row_codes(c, t);
    int32_t i, k;
#pragma unroll
    for (i = 0; i < 4; i++, dst += pitch) {
        uint32_t draw[4], random[2][2];
        if (f->stochastic) {
            gmm_draw_block(a->random[0], a->random[1], a->first_group + t->p.unit, block + i * blocks_per_row,
                           GMM_ROWWISE, draw);
#pragma unroll
            for (k = 0; k < 2; k++) {
                const uint32_t other = __shfl_xor_sync(0xFFFFFFFFu, c->right ? draw[k] : draw[k + 2], 1);
                random[0][k] = c->right ? other : draw[k];
                random[1][k] = c->right ? draw[k + 2] : other;
            }
        }
#pragma unroll
        for (k = 0; k < 2; k++) {
            const float encode_scale = gmm_cast_nv16_encode_scale(c->encodes, scales4, i + 4 * k);
            uint32_t code;
            float v[8];
            gmm_cast_line(GMM_BF16, x, 0, i + 4 * k, v);
            code = f->stochastic ? gmm_e2m1x8_random(v, encode_scale, random[k]) : gmm_e2m1x8(v, encode_scale, 1);
            if (t->in_cols && i + 4 * k < t->valid_rows) gmm_st_global_b32(dst + 4 * k * pitch, code);
        }
    }
}
/* The same for columns, into shared memory with their scales: two lanes above one another exchange halves, so that a
   block of a column lies in one lane, which transforms it. */
GMM__DEVICE void gmm_cast_nv16_encode_cols_hadamard(const gmm_cast_nv16 *c, const gmm_cast_tile *t, uint32_t x[8][8]) {
    const gmm__quant_args *a = t->a;
    const gmm_format *f = &a->format;
    uint8_t *smem = c->codes + gmm_cast_smem_column(GMM_CAST_NV16_COLUMN, t->col0) +
                    4 * c->lower * GMM_CAST_NV16_COLUMN + (t->row0 & ~15) / 2;
    uint32_t y[16][2], lane_scales = 0;
    int32_t i, j, k;
    if (f->hadamard) gmm_hadamard_flip_signs(x, (uint32_t)f->hadamard >> 8 * c->lower);
    gmm_hadamard_gather16(x, c->lower, y);
#pragma unroll
    for (j = 0; j < 4; j++) {
        uint32_t column[8], draw[4], dst[2], maximum = 0;
        float encode_scale, amax[4] = { 0.0f, 0.0f, 0.0f, 0.0f };
        gmm_hadamard_column16(y, j, f->hadamard, column);
#pragma unroll
        for (i = 0; i < 8; i++) maximum = gmm__word_max(GMM_BF16, maximum, column[i]);
        amax[0] = gmm_f32_from_bits(gmm__word_fold(GMM_BF16, maximum));
        k = (int32_t)gmm_cast_nv16_scale4(amax, c->encodes_t, 0);
        encode_scale = c->encodes_t[k];
        lane_scales |= (uint32_t)k << 8 * j;
        if (f->stochastic)
            gmm_draw_block(a->random[0], a->random[1], a->first_group + t->p.unit,
                           (int64_t)(t->c0 + t->col0 + 4 * c->lower + j) * ((t->p.rows + 15) >> 4) +
                           ((t->p.row + t->row0) >> 4), GMM_COLUMNWISE, draw);
#pragma unroll
        for (k = 0; k < 2; k++) {
            float v[8];
#pragma unroll
            for (i = 0; i < 8; i++) v[i] = gmm__word_value(GMM_BF16, column + 4 * k, i);
            dst[k] = f->stochastic ? gmm_e2m1x8_random(v, encode_scale, draw + 2 * k) : gmm_e2m1x8(v, encode_scale, 1);
        }
        *(uint2 *)(void *)(smem + j * GMM_CAST_NV16_COLUMN) = make_uint2(dst[0], dst[1]);
    }
    gmm_cast_nv16_leave_col_scales(c, t, lane_scales);
}

/* Stores the columns of a tile and their scales from shared memory. Two threads have the 8 scales of a column. All
   threads call it. */
GMM__DEVICE void gmm_cast_nv16_store_cols(const gmm_cast_nv16 *c, const gmm_cast_tile *t) {
    const int32_t thread = gmm_tid_x(); /* read here, so that it takes no register before */
    const int32_t col = thread >> 1, block0 = 4 * (thread & 1);
    const int64_t padded_cols = (t->cols + 127) & ~127;
    uint8_t *dst = gmm_cast_col_codes(t, thread, GMM_CAST_NV16_COLUMN, c->col_pitch);
    uint8_t *scales = gmm_cast_scales(t, 1, (int64_t)(t->p.padded_row / 16) * padded_cols);
    __syncthreads();
    gmm_cast_store_scales4(scales, t->a->columnwise.scale_order, t->c0, t->p.row / 16, c->col_along, col, block0,
                           *(const uint32_t *)(const void *)(c->scales + col * GMM_TILE_BLOCKS + block0));
    gmm_cast_store_cols(t, thread, GMM_CAST_NV16_COLUMN, c->codes, dst, c->col_pitch);
    __syncthreads();
}
