/* --- vectorized casts: the common shapes and alignments, at the speed of memory --- */

/* A CTA processes tiles of 128 x 128, a warp 32 rows by 64 columns: lane 8 i + j holds rows 8 i to 8 i + 7 and
   columns 8 j to 8 j + 7 in registers, in memory format. A block of 16 or 32 along a row or a column spans 2 or 4
   lanes, and a lane has 8 codes of every line of a copy. Columnwise codes are transposed in shared memory. MX32,
   whose copies are both stored in the order of the source, has sixteen rows of sixteen bytes per lane, so that sixteen
   lanes write complete lines of memory; stores of half lines are slower. */
enum {
    GMM__VEC_WARP_ROWS = 32, GMM__VEC_WARP_COLS = 64,
    /* bytes of a column of FP8 codes in shared memory; 16 bytes of padding follow every eight columns */
    GMM__VEC_COLUMN = GMM_TILE,
    GMM__VEC_CODES = GMM_TILE * GMM__VEC_COLUMN + GMM_TILE / 8 * 16,
    /* tiles of a strip that a CTA processes (NV16, and MX32 from 16-bit sources) */
    GMM__VEC_TILES = 2,
    GMM__NV_COLUMN = GMM_TILE / 2, /* the same for E2M1 codes */
    GMM__NV_CODES = GMM_TILE * GMM__NV_COLUMN + GMM_TILE / 8 * 16
};

/* Sign bits of eight values, at bit 3 of each nibble. */
GMM__DEVICE uint32_t gmm__vec_signs(const float v[8]) {
    const uint32_t odd = __byte_perm(__byte_perm(gmm_f32_bits(v[1]), gmm_f32_bits(v[3]), 0x0073),
                                     __byte_perm(gmm_f32_bits(v[5]), gmm_f32_bits(v[7]), 0x0073), 0x5410);
    const uint32_t even = __byte_perm(__byte_perm(gmm_f32_bits(v[0]), gmm_f32_bits(v[2]), 0x0073),
                                      __byte_perm(gmm_f32_bits(v[4]), gmm_f32_bits(v[6]), 0x0073), 0x5410);
    return (odd & 0x80808080u) | ((even >> 4) & 0x08080808u);
}
/* |v encode_scale|; saturate: 6 if it is larger or NaN. */
GMM__DEVICE float gmm__vec_product(float v, float encode_scale, int saturate) {
    const float m = gmm_mul_abs_f32(v, encode_scale);
    return saturate ? gmm_min_6_f32(m) : m;
}
/* E2M1 codes of eight values times |encode_scale|. The code of an absolute value m is 2 m up to 2, m + 2 up to 4, and
   m / 2 + 4 up to 6, each rounded to even once by an addition to 2^23; the smallest of the three is the right one.
   Products either saturate at 6 (`saturate`), or none of them may be NaN or reach 7. */
GMM__DEVICE uint32_t gmm__vec_e2m1x8(const float v[8], float encode_scale, int saturate) {
    uint32_t codes = 0;
    int32_t j;
#pragma unroll
    for (j = 7; j >= 0; j--) {
        uint32_t low, middle, high;
        gmm_e2m1_candidates(gmm__vec_product(v[j], encode_scale, saturate), &low, &middle, &high);
        low = low < middle ? low : middle;
        codes = codes * 16 + (low < high ? low : high);
    }
    codes -= 0xFB000000u; /* 0x4B000000 times 1 + 16 + ... + 16^7 */
    return codes | gmm__vec_signs(v);
}
/* The same with stochastic rounding as in gmm_f32_to_e2m1_random; element j uses byte j % 4 of word j / 4. A product
   is increased by a random fraction of the E2M1 step and truncated: multiplied by 2^-126, bits 22 and up are the
   code. */
GMM__DEVICE uint32_t gmm__vec_e2m1x8_random(const float v[8], float encode_scale, const uint32_t random[2]) {
    uint32_t codes = 0;
    int32_t j;
#pragma unroll
    for (j = 7; j >= 0; j--) {
        const float m = gmm__vec_product(v[j], encode_scale, 1);
        /* 128 plus the byte times 2^-8; twice the step, 1, 2 or 4, is the exponent of m from 1 on */
        const float fraction = gmm_f32_from_bits(__byte_perm(random[j / 4], 0x43000000u, 0x7404 | (j & 3) << 4));
        const uint32_t bits = gmm_e2m1_add_fraction(m, fraction);
        codes = codes * 16 + (bits >> 22);
    }
    return codes | gmm__vec_signs(v);
}
/* Transposes an 8 x 8 matrix of nibbles: nibble j of word i becomes nibble i of word j. */
GMM__DEVICE void gmm__vec_transpose_nibbles(uint32_t w[8]) {
    int32_t i;
#pragma unroll
    for (i = 0; i < 8; i += 2) {
        const uint32_t low = (w[i] & 0x0F0F0F0Fu) | ((w[i + 1] << 4) & 0xF0F0F0F0u);
        w[i + 1] = ((w[i] >> 4) & 0x0F0F0F0Fu) | (w[i + 1] & 0xF0F0F0F0u);
        w[i] = low;
    }
#pragma unroll
    for (i = 0; i < 8; i++)
        if (!(i & 2)) {
            const uint32_t low = __byte_perm(w[i], w[i + 2], 0x6240);
            w[i + 2] = __byte_perm(w[i], w[i + 2], 0x7351);
            w[i] = low;
        }
#pragma unroll
    for (i = 0; i < 4; i++) {
        const uint32_t low = __byte_perm(w[i], w[i + 4], 0x5410);
        w[i + 4] = __byte_perm(w[i], w[i + 4], 0x7632);
        w[i] = low;
    }
}

/* Number of strips of a call, and the split if warps compute it. All threads call it. */
GMM__DEVICE gmm_warp_split gmm__vec_split(const gmm__quant_args *a) {
    gmm_warp_split w = { 0, 0, 0, 0 };
    if (a->warp_split) return gmm_warp_split_scan(&a->groups, GMM_TILE, threadIdx.x < 32 && blockIdx.x == 0 &&
                                                  blockIdx.y == 0);
    w.total = (int32_t)gmm__quant_strips(a->grouped, a->tiles, a->units, a->rows);
    return w;
}
/* Strip number `index`, with the fields of gmm__quant_strip. *c0: first column of the `cta_tiles` tiles that the CTA
   processes of it. */
typedef struct gmm__vec_strip { int32_t unit, row, m, rows, source_row, padded_row; } gmm__vec_strip;
GMM__DEVICE gmm__vec_strip gmm__vec_strip_of(const gmm__quant_args *a, const gmm_warp_split *w, int32_t index,
                                             int32_t cta_tiles, int32_t *c0) {
    const int32_t tile = a->backward ? (int32_t)(gridDim.x - 1u - blockIdx.x) : (int32_t)blockIdx.x;
    const int32_t strip = a->backward ? w->total - 1 - index : index;
    gmm__vec_strip p;
    *c0 = tile * cta_tiles * GMM_TILE;
    if (a->warp_split) {
        const int32_t g = __popc(__ballot_sync(0xFFFFFFFFu, w->tiles <= strip));
        const int32_t group_first = w->tiles - (w->rows + GMM_TILE - 1) / GMM_TILE;
        const int32_t first_strip = __shfl_sync(0xFFFFFFFFu, group_first, g);
        const int32_t rows = __shfl_sync(0xFFFFFFFFu, w->rows, g);
        p.unit = g;
        p.source_row = __shfl_sync(0xFFFFFFFFu, w->begin, g);
        p.rows = rows;
        p.padded_row = first_strip * GMM_TILE;
        p.row = (strip - first_strip) * GMM_TILE;
        p.m = rows - p.row < GMM_TILE ? rows - p.row : (int32_t)GMM_TILE;
    } else {
        const gmm__quant_strip strip64 = gmm__quant_strip_of(a->grouped, a->tiles, a->offsets, a->units, a->rows,
                                                             strip);
        p.unit = (int32_t)strip64.unit;
        p.row = (int32_t)strip64.row;
        p.m = (int32_t)strip64.m;
        p.rows = (int32_t)strip64.rows;
        p.source_row = (int32_t)strip64.source_row;
        p.padded_row = (int32_t)strip64.padded_row;
    }
    return p;
}
GMM__DEVICE uint8_t *gmm__vec_data(const gmm_mat *m, int64_t step, int64_t unit) {
    return m->table ? (uint8_t *)m->table[unit] : (uint8_t *)m->data + unit * step;
}
GMM__DEVICE uint8_t *gmm__vec_scales(const gmm_mat *m, int64_t step, int64_t unit) {
    return m->scale_table ? (uint8_t *)m->scale_table[unit] : (uint8_t *)m->scale + unit * step;
}
/* Loads a lane's part of a tile, eight rows of eight columns; zeros beyond the last row or column. */
GMM__DEVICE void gmm__vec_load(gmm_dtype source, const gmm__quant_args *a, const gmm__vec_strip *p, int32_t row0,
                               int32_t col0, int32_t c0, int32_t n, uint32_t x[8][8]) {
    const int64_t size = gmm__words8(source) / 2, pitch = a->src.ld * size;
    const uint8_t *src = gmm__vec_data(&a->src, a->step[2], p->unit) + (p->source_row + p->row + row0) * pitch +
                          (c0 + col0) * size;
    const int32_t rows = col0 < n ? p->m - row0 : 0;
    int32_t i, k;
#pragma unroll
    for (i = 0; i < 8; i++, src += pitch)
#pragma unroll
        for (k = 0; k < gmm__words8(source); k += 4) {
            uint4 v = make_uint4(0u, 0u, 0u, 0u);
            if (i < rows) v = __ldg((const uint4 *)(const void *)(src + 4 * k));
            x[i][k] = v.x;
            x[i][k + 1] = v.y;
            x[i][k + 2] = v.z;
            x[i][k + 3] = v.w;
        }
}

/* Loads sixteen rows of sixteen bytes from column `col` of the matrix on; zeros beyond the last row or column. */
GMM__DEVICE void gmm__vec_load16(gmm_dtype source, const gmm__quant_args *a, const gmm__vec_strip *p, int32_t row0,
                                 int32_t col, uint32_t x[16][4]) {
    const int64_t size = 16 / gmm__elems16(source), pitch = a->src.ld * size;
    const uint8_t *src = gmm__vec_data(&a->src, a->step[2], p->unit) + (p->source_row + p->row + row0) * pitch +
                          col * size;
    const int32_t rows = col < (int32_t)a->cols ? p->m - row0 : 0;
    int32_t i;
#pragma unroll
    for (i = 0; i < 16; i++, src += pitch) {
        uint4 v = make_uint4(0u, 0u, 0u, 0u);
        if (i < rows) v = __ldg((const uint4 *)(const void *)src);
        x[i][0] = v.x;
        x[i][1] = v.y;
        x[i][2] = v.z;
        x[i][3] = v.w;
    }
}

/* Word `word` of the maxima of sixteen rows that all have the maximum `maximum`; rows beyond the last one have 0. */
GMM__DEVICE uint32_t gmm__vec_uniform_max(gmm_dtype source, uint32_t maximum, int32_t word, int32_t rows) {
    if (source == GMM_F32) return word < rows ? maximum : 0;
    return 2 * word + 1 < rows ? maximum : 2 * word < rows ? maximum & 0xFFFFu : 0;
}

/* Reads one element of a tile from device memory. */
GMM__DEVICE float gmm__vec_reload(gmm_dtype source, const gmm__quant_args *a, const gmm__vec_strip *p, int32_t row,
                                  int32_t col) {
    return gmm_load(source, gmm__vec_data(&a->src, a->step[2], p->unit),
                    (p->source_row + p->row + row) * a->src.ld + col);
}

/* Stores the FP8 codes of `count` values (four or eight) of a row. */
GMM__DEVICE void gmm__vec_store_codes(uint8_t *dst, int32_t e5m2, const float *v, int32_t count) {
    if (count == 8) gmm_st_global_v2_b32(dst, gmm__quant_fp8x4(e5m2, v), gmm__quant_fp8x4(e5m2, v + 4));
    else gmm_st_global_b32(dst, gmm__quant_fp8x4(e5m2, v));
}
/* gmm_mx_scale of two amaxes that are not NaN, the second in the next byte. `inverse`: reciprocal of the dtype's
   largest value. */
GMM__DEVICE uint32_t gmm__vec_mx_scale2(float first, float second, float inverse) {
    const float amax[2] = { first, second };
    uint32_t bytes = 0;
    int32_t i;
#pragma unroll
    for (i = 0; i < 2; i++) {
        const uint32_t u = gmm_f32_bits(gmm__fmul(amax[i], inverse)), exponent = (u + 0x7FFFFFu) >> 23;
        bytes |= (u <= 0x400000u ? 0u : exponent < 254u ? exponent : 254u) << 8 * i;
    }
    return bytes;
}
/* gmm_e8m0_reciprocal of scale byte i of an array of words. */
GMM__DEVICE float gmm__vec_mx_reciprocal(const uint32_t *scales4, int32_t i) {
    const uint32_t bits = (254u - ((scales4[i >> 2] >> 8 * (i & 3)) & 0xFFu)) << 23;
    return gmm_f32_from_bits(bits > 0x400000u ? bits : 0x400000u);
}

/* Stores four scale bytes of line l of a tile, the first of block `tile_block` of the tile. `dst`: scales of the copy,
   where the tile starts with line `line` and block `block` and a line has `along` scales. */
GMM__DEVICE void gmm__vec_store_scales4(uint8_t *dst, gmm_scale_order order, int32_t line, int32_t block, int32_t along,
                                        int32_t l, int32_t tile_block, uint32_t scales4) {
    if (order == GMM_SCALES_SWIZZLED)
        dst += (int64_t)line * along + block * 128 + tile_block * 128 + (l & 31) * 16 + (l >> 5) * 4;
    else dst += (int64_t)line * along + block + (l * along + tile_block);
    if (block + tile_block < along) gmm_st_global_b32(dst, scales4);
}

/* NV16 scale bytes of four blocks. `check`: bit 7 of the first byte is set if a product may reach 7. */
GMM__DEVICE uint32_t gmm__vec_nv_scale4(const float amax[4], const float *encodes, int check) {
    float v[4], maximum = 0.0f;
    uint32_t scales4;
    int32_t i;
    /* infinity saturates to the largest code as well */
#pragma unroll
    for (i = 0; i < 4; i++) v[i] = gmm__fmul(amax[i], encodes[127]);
    scales4 = gmm__quant_fp8x4(0, v);
#pragma unroll
    for (i = 0; i < 4 && check; i++) {
        const float m = gmm__fmul(amax[i], encodes[(scales4 >> 8 * i) & 0x7Fu]);
        maximum = m > maximum ? m : maximum;
    }
    return check && !(maximum < 6.75f) ? scales4 | 0x80u : scales4;
}
/* Encode scale of block i of eight, whose scale bytes are in two words. */
GMM__DEVICE float gmm__vec_nv_encode(const float *encodes, const uint32_t scales4[2], int32_t i) {
    return encodes[((i & 4 ? scales4[1] : scales4[0]) >> 8 * (i & 3)) & 0x7Fu];
}

/* BF16: clears the sign of NaN. */
GMM__DEVICE uint32_t gmm__vec_positive_nan(uint32_t w) {
    if ((w & 0x7FFFu) > 0x7F80u) w &= 0xFFFF7FFFu;
    if ((w & 0x7FFF0000u) > 0x7F800000u) w &= 0x7FFFFFFFu;
    return w;
}
/* BF16: flips the signs of rows selected by bits of `signs`. gmm__vec_gather16 then exchanges words between the two
   lanes of 16 rows, so that 8 rows by 8 columns become 16 rows by 4 columns: the left columns in the upper lane, the
   right ones in the lower lane. */
GMM__DEVICE void gmm__vec_flip_signs(uint32_t x[8][8], uint32_t signs) {
    int32_t i, k;
#pragma unroll
    for (i = 0; i < 8; i++) {
        const uint32_t flip = ((signs >> i) & 1u) * 0x80008000u;
#pragma unroll
        for (k = 0; k < 4; k++) x[i][k] ^= flip;
    }
}
GMM__DEVICE void gmm__vec_gather16(const uint32_t x[8][8], int32_t lower, uint32_t dst[16][2]) {
    int32_t i, k;
#pragma unroll
    for (i = 0; i < 8; i++)
#pragma unroll
        for (k = 0; k < 2; k++) {
            const uint32_t received = __shfl_xor_sync(0xFFFFFFFFu, lower ? x[i][k] : x[i][k + 2], 8);
            dst[i][k] = lower ? received : x[i][k];
            dst[i + 8][k] = lower ? x[i][k + 2] : received;
        }
}
/* Stages of strides 1 to `last` of Hadamard transforms of 2 last values each. */
GMM__DEVICE void gmm__vec_hadamard_stages(float *v, int32_t count, int32_t last) {
    int32_t i, stride;
#pragma unroll
    for (stride = 1; stride <= last; stride *= 2)
#pragma unroll
        for (i = 0; i < count; i++)
            if (!(i & stride)) {
                const float a = v[i], b = v[i + stride];
                v[i] = gmm__fadd(a, b);
                v[i + stride] = gmm__fadd(a, gmm_f32_from_bits(gmm_f32_bits(b) ^ 0x80000000u));
            }
}
/* Column j of a lane's four columns as words of two rows, Hadamard-transformed without the signs of rows if
   `hadamard`. NaN loses its sign. */
GMM__DEVICE void gmm__vec_column16(const uint32_t x[16][2], int32_t j, int32_t hadamard, uint32_t dst[8]) {
    float v[16];
    int32_t i;
#pragma unroll
    for (i = 0; i < 16; i++) v[i] = gmm__word_value(GMM_BF16, x[i], j);
    if (hadamard) {
        gmm__vec_hadamard_stages(v, 16, 8);
#pragma unroll
        for (i = 0; i < 16; i++) v[i] = gmm__fmul(v[i], 0.25f);
    }
#pragma unroll
    for (i = 0; i < 8; i++)
        dst[i] = gmm_cvt_bf16x2(v[2 * i + 1], v[2 * i]);
}
/* Largest absolute value of the transforms of this lane's and its neighbour's blocks of 16, as bits of an fp32
   rounded to BF16. The last stage takes |a| + |b|, the larger of |a + b| and |a - b|, so that it needs no order. */
GMM__DEVICE uint32_t gmm__vec_hadamard_amax(const uint32_t x[8][8], int32_t lower) {
    float maximum = 0.0f;
    uint32_t bits;
    int32_t i, k, half;
#pragma unroll
    for (k = 0; k < 2; k++) {
        uint32_t own[8], received[8];
#pragma unroll
        for (i = 0; i < 8; i++) {
            received[i] = __shfl_xor_sync(0xFFFFFFFFu, lower ? x[i][k] : x[i][k + 2], 8);
            own[i] = lower ? x[i][k + 2] : x[i][k];
        }
#pragma unroll
        for (half = 0; half < 2; half++) {
            float a[8], b[8];
#pragma unroll
            for (i = 0; i < 8; i++) {
                a[i] = gmm__word_value(GMM_BF16, &own[i], half);
                b[i] = gmm__word_value(GMM_BF16, &received[i], half);
            }
            gmm__vec_hadamard_stages(a, 8, 4);
            gmm__vec_hadamard_stages(b, 8, 4);
#pragma unroll
            for (i = 0; i < 8; i++)
                maximum = gmm_max_sum_abs_f32(maximum, a[i], b[i]);
        }
    }
    bits = gmm_f32_to_bf16(gmm__fmul(maximum, 0.25f));
    return bits << 16;
}

