/* ................................................................................ Grouped products, quantized ... */

/* The same products where both operands are quantized, or the weights alone. The blocks of both run along K; "mn" are
   the rows of A (M) or of B (N). While a stage is multiplied, the codes of the next stage are dequantized into
   16-bit elements in shared memory, once per tile, and the codes behind them are in flight. Where scales are applied:
       MX32, NV16      to the elements, in BF16, where code times scale is exact: for MX32 with scales of 2^-124 to
         2^119, and with others unless the element leaves the range of BF16; NV16 also in F16, where tokens are F16
       1X128, 128X128  to the partial sum of every 128 elements along the contraction
       MX32 beside F16 tokens  to the partial sum of every 32 elements
       others          to the complete sum in the epilogue, as well as NV16's amax
   Codes without scales are multiplied as F16, which represents all FP8 values exactly. */
typedef struct gmm_qgemm_args {
    gmm_gemm_args p;               /* without a and b */
    gmm_mat a, b;                  /* quantized operands, or for a 16-bit tokens; tables in device memory */
    gmm_direction a_along, b_along;
    int32_t a_cols, b_rows, b_cols; /* columns of the matrices that were quantized; rows of the weights */
    /* 16 for Hadamard-transformed copies, where a transform spreads the last rows over a block of 16; else 1 */
    int32_t k_round;
    int32_t block;                 /* elements along the contraction whose partial sum is scaled (block-scaled kinds) */
} gmm_qgemm_args;

/* Kinds of products: X(tag, A is stored as [k][m], B is stored as [k][n], block-scaled sums, dtype of the elements).
   Columnwise MX32 is stored so. */
#define GMM_QUANT_KIND_LIST(X) \
    X(bf16, 0, 0, 0, GMM_BF16) \
    X(bf16_nn, 0, 1, 0, GMM_BF16) \
    X(bf16_tn, 1, 1, 0, GMM_BF16) \
    X(f16, 0, 0, 0, GMM_F16) \
    X(f16_block_scaled, 0, 0, 1, GMM_F16) \
    X(f16_block_scaled_nn, 0, 1, 1, GMM_F16)

/* Instances: X(op, kind, kernel); the includes below define the kernels. fwd and dgrad use the same kernel where both
   have a kind: lines of either copy of the weights run along K then. */
#define GMM_QUANT_KERNEL_LIST(X) \
    X(fwd, bf16, gmm_gemm_quant_bf16_128x256x64_mma) \
    X(fwd, f16, gmm_gemm_quant_f16_128x256x64_mma) \
    X(fwd, f16_block_scaled, gmm_gemm_quant_f16_128x128x64_block_scaled_mma) \
    X(dgrad, bf16, gmm_gemm_quant_bf16_128x256x64_mma) \
    X(dgrad, bf16_nn, gmm_gemm_dgrad_quant_bf16_128x256x64_nn_mma) \
    X(dgrad, f16, gmm_gemm_quant_f16_128x256x64_mma) \
    X(dgrad, f16_block_scaled, gmm_gemm_quant_f16_128x128x64_block_scaled_mma) \
    X(dgrad, f16_block_scaled_nn, gmm_gemm_dgrad_quant_f16_128x128x64_block_scaled_nn_mma) \
    X(wgrad, bf16, gmm_gemm_wgrad_quant_bf16_128x256x64_mma) \
    X(wgrad, bf16_tn, gmm_gemm_wgrad_quant_bf16_128x256x64_tn_mma) \
    X(wgrad, f16, gmm_gemm_wgrad_quant_f16_128x256x64_mma) \
    X(wgrad, f16_block_scaled, gmm_gemm_wgrad_quant_f16_128x128x64_block_scaled_mma)

#define GMM__X(tag, ta, tb, block_scaled, dtype) GMM__CAT(gmm_qgemm_ta_, tag) = ta, GMM__CAT(gmm_qgemm_tb_, tag) = tb, \
    GMM__CAT(gmm_qgemm_block_scaled_, tag) = block_scaled, GMM__CAT(gmm_qgemm_dtype_, tag) = dtype,
enum { GMM_QUANT_KIND_LIST(GMM__X) gmm_quant_kinds_end };
#undef GMM__X

/* A tile has 128 rows, like the granularity of groups in columnwise copies, and 256 columns, or 128 for block-scaled
   sums. A stage has 64 values of k. Shared memory: elements of two stages, A before B, which the epilogue reuses;
   scales of four stages; the work tile. */
enum {
    GMM_QGEMM_TILE_M = 128,
    GMM_QGEMM_TILE_K = 64,
    GMM_QGEMM_THREADS = 256,
    /* names end in _0 for one sum over the contraction, in _1 for block-scaled sums */
    gmm_qgemm_tile_n_0 = 256,
    gmm_qgemm_tile_n_1 = 128,
    gmm_qgemm_slot_bytes_0 = 8 * (GMM_QGEMM_TILE_M + gmm_qgemm_tile_n_0),
    gmm_qgemm_slot_bytes_1 = 8 * (GMM_QGEMM_TILE_M + gmm_qgemm_tile_n_1),
    gmm_qgemm_smem_bytes_0 = 4 * GMM_QGEMM_TILE_K * (GMM_QGEMM_TILE_M + gmm_qgemm_tile_n_0) +
                             4 * gmm_qgemm_slot_bytes_0 + (int)sizeof(gmm_gemm_tile),
    gmm_qgemm_smem_bytes_1 = 4 * GMM_QGEMM_TILE_K * (GMM_QGEMM_TILE_M + gmm_qgemm_tile_n_1) +
                             4 * gmm_qgemm_slot_bytes_1 + (int)sizeof(gmm_gemm_tile)
};

/* Products of two pairs of 16-bit elements, each rounded once; subnormal results are not flushed to 0. */
GMM__DEVICE uint32_t gmm_mul_16bit_x2(gmm_dtype dtype, uint32_t a, uint32_t b) {
    return dtype == GMM_BF16 ? gmm_mul_bf16x2(a, b) : gmm_mul_f16x2(a, b);
}

/* Converts four FP8 codes to `dtype`: exponent and mantissa bits are shifted into place, and one multiplication
   corrects the exponent bias. */
GMM__DEVICE void gmm_fp8_to_16bit_x4(gmm_dtype dtype, gmm_dtype format, uint32_t codes, uint32_t dst[2]) {
    const int e4m3 = format == GMM_E4M3, is_f16 = dtype == GMM_F16;
    const uint32_t a = gmm_prmt(codes, 0u, 0x1404u), b = gmm_prmt(codes, 0u, 0x3424u);
    const int shift = is_f16 ? 1 : e4m3 ? 4 : 3;
    const uint32_t field = is_f16 ? 0x3F803F80u : e4m3 ? 0x07F007F0u : 0x0FE00FE0u;
    const uint32_t exponent_scale = is_f16 ? 0x5C005C00u : e4m3 ? 0x7B807B80u : 0x77807780u; /* 2^8; 2^120; 2^112 */
    /* codes of NaN and infinity */
    const uint32_t nonfinite = ((codes & 0x7F7F7F7Fu) + (e4m3 ? 0x01010101u : 0x04040404u)) & 0x80808080u;
    if (is_f16 && !e4m3) {
        dst[0] = a;
        dst[1] = b;
        return;
    }
#if __CUDA_ARCH__ >= 890
    if (is_f16) {
        gmm_cvt_f16x2_e4m3x2(codes, dst);
        return;
    }
#endif
    dst[0] = (a & 0x80008000u) | (a >> shift & field);
    dst[1] = (b & 0x80008000u) | (b >> shift & field);
    if (nonfinite) {
        const uint32_t bits = e4m3 ? 0x7FFF7FFFu : 0x7F807F80u;
        dst[0] |= gmm_prmt(nonfinite, 0u, 0x9988u) & bits;
        dst[1] |= gmm_prmt(nonfinite, 0u, 0xBBAAu) & bits;
    }
    dst[0] = gmm_mul_16bit_x2(dtype, dst[0], exponent_scale);
    dst[1] = gmm_mul_16bit_x2(dtype, dst[1], exponent_scale);
}
/* Converts eight E2M1 codes; each code is first moved to the upper byte of its element. */
GMM__DEVICE void gmm_fp4_to_16bit_x8(gmm_dtype dtype, uint32_t codes, uint32_t dst[4]) {
    const uint32_t exponent_scale = dtype == GMM_F16 ? 0x74007400u : 0x7E807E80u; /* 2^14; 2^126 */
    const uint32_t even_codes = codes << 4, field = dtype == GMM_F16 ? 0x0E000E00u : 0x01C001C0u;
    uint32_t i;
#pragma unroll
    for (i = 0; i < 4; i++) {
        const uint32_t z = gmm_prmt(even_codes, codes, 0x4400u + 0x1111u * i);
        dst[i] = gmm_mul_16bit_x2(dtype, (z & 0x80008000u) | (z >> (dtype == GMM_F16 ? 3 : 6) & field), exponent_scale);
    }
}

/* A thread's part of one operand of a tile: chunks of 16 bytes, at equal distances of rows. A stage holds 64 columns of
   an operand that is stored as [mn][k], or 64 rows of one that is stored as [k][mn] (`mn_major`). */
typedef struct gmm_qgemm_operand {
    const char *src;     /* first chunk of the thread in the next stage */
    int32_t rows, bytes; /* rows of memory, and bytes of a row, from there on */
    int32_t aligned;     /* chunks are aligned to 16 bytes */
} gmm_qgemm_operand;

/* log2 of the chunks in a row of a stage. `log2_mn64`: log2 of the tile's mn in units of 64. */
GMM__DEVICE int gmm_qgemm_chunk_shift(const gmm_mat *m, int mn_major, int log2_mn64) {
    return (m->scaling == GMM_SCALING_NONE ? 3 : m->dtype == GMM_E2M1 ? 1 : 2) + (mn_major ? log2_mn64 : 0);
}
/* Bits of an element as stored. */
GMM__DEVICE int gmm_qgemm_element_bits(const gmm_mat *m) {
    return m->scaling == GMM_SCALING_NONE ? 16 : m->dtype == GMM_E2M1 ? 4 : 8;
}

/* The operand's first stage, from mn0 on, of a group with extents mn and k. `row`: first row of the group in the token
   matrix. */
GMM__DEVICE gmm_qgemm_operand gmm_qgemm_operand_init(const gmm_mat *m, const gmm__qview *view, int mn_major,
                                                     int log2_mn64, int64_t row, int32_t mn0, int32_t mn, int32_t k) {
    gmm_qgemm_operand s;
    const int bits = gmm_qgemm_element_bits(m), shift = gmm_qgemm_chunk_shift(m, mn_major, log2_mn64);
    const int64_t pitch = m->ld * bits / 8;
    const char *base = bits == 16 ? (const char *)m->data + row * pitch : (const char *)view->data;
    const int32_t first = (int32_t)threadIdx.x >> shift, chunk = (int32_t)threadIdx.x & ((1 << shift) - 1);
    s.aligned = (((uint64_t)(uintptr_t)base | (uint64_t)pitch) & 15) == 0;
    s.src = base + 16 * chunk + (mn_major ? first * pitch + (int64_t)mn0 * bits / 8 : (mn0 + first) * pitch);
    s.rows = (mn_major ? k : mn - mn0) - first;
    s.bytes = (int32_t)(((int64_t)(mn_major ? mn - mn0 : k) * bits + 7) / 8) - 16 * chunk;
    return s;
}
/* Advances to the next stage. */
GMM__DEVICE void gmm_qgemm_operand_advance(gmm_qgemm_operand *s, const gmm_mat *m, int mn_major) {
    const int bits = gmm_qgemm_element_bits(m);
    if (mn_major) s->rows -= GMM_QGEMM_TILE_K;
    else s->bytes -= GMM_QGEMM_TILE_K * bits / 8;
    s->src += mn_major ? GMM_QGEMM_TILE_K * (m->ld * bits / 8) : GMM_QGEMM_TILE_K * bits / 8;
}
/* Address of the thread's chunk i, and the number of its bytes that exist. */
GMM__DEVICE int gmm_qgemm_chunk_bytes(const gmm_qgemm_operand *s, const gmm_mat *m, int mn_major, int log2_mn64, int i,
                                      const char **src) {
    const int32_t row_offset = i * (GMM_QGEMM_THREADS >> gmm_qgemm_chunk_shift(m, mn_major, log2_mn64));
    *src = s->src + row_offset * (m->ld * gmm_qgemm_element_bits(m) / 8);
    return row_offset >= s->rows || s->bytes < 0 ? 0 : s->bytes < 16 ? s->bytes : 16;
}
GMM__DEVICE uint4 gmm_qgemm_load_chunk(const gmm_qgemm_operand *s, const gmm_mat *m, int mn_major, int log2_mn64,
                                       int i) {
    const char *src;
    const int count = gmm_qgemm_chunk_bytes(s, m, mn_major, log2_mn64, i, &src);
    uint4 v = make_uint4(0u, 0u, 0u, 0u);
    int e;
    if (count == 16 && s->aligned) return *(const uint4 *)(const void *)src;
#pragma unroll 1
    for (e = count - 1; e >= 0; e--) {
        v.w = __funnelshift_l(v.z, v.w, 8);
        v.z = __funnelshift_l(v.y, v.z, 8);
        v.y = __funnelshift_l(v.x, v.y, 8);
        v.x = v.x << 8 | (uint32_t)(uint8_t)src[e];
    }
    return v;
}
/* Copies 16-bit tokens to the stage without conversion. */
GMM__DEVICE void gmm_qgemm_copy_tokens(const gmm_qgemm_operand *s, const gmm_mat *m, char *dst) {
    const char *src;
    int i, e;
#pragma unroll 1
    for (i = 0; i < GMM_QGEMM_TILE_M / 32; i++) {
        const int count = gmm_qgemm_chunk_bytes(s, m, 0, 1, i, &src);
        char *smem = dst + gmm_swizzle(threadIdx.x / 8 + 32 * i, threadIdx.x % 8, 2 * GMM_QGEMM_TILE_K);
        if (s->aligned) gmm_cp_async_16_zfill((uint32_t)__cvta_generic_to_shared(smem), src, count);
        else
#pragma unroll 1
            for (e = 0; e < 16; e++) smem[e] = e < count ? src[e] : (char)0;
    }
}

/* Leading dimension of a stage's scales that are applied to elements. Block-scaled kinds have none, so the tile is the
   wide one. */
enum { GMM_QGEMM_SCALE_LD = GMM_QGEMM_TILE_M + gmm_qgemm_tile_n_0 };

/* Converts chunk i of codes to elements at `dst`. With `scales` each element is multiplied by the scale of its block;
   scales are elements, [block][GMM_QGEMM_SCALE_LD]. */
GMM__DEVICE void gmm_qgemm_dequantize_chunk(gmm_dtype dtype, const gmm_mat *m, int mn_major, int log2_mn64, int i,
                                            uint4 codes, char *dst, const uint16_t *scales) {
    const int fp4 = m->dtype == GMM_E2M1, shift = gmm_qgemm_chunk_shift(m, mn_major, log2_mn64);
    const uint32_t row = (threadIdx.x >> shift) + (uint32_t)(i * (GMM_QGEMM_THREADS >> shift));
    const uint32_t chunk = threadIdx.x & ((1u << shift) - 1);
    const uint32_t w[4] = { codes.x, codes.y, codes.z, codes.w };
    const int two_blocks = fp4 && m->scaling == GMM_SCALING_NV16; /* else a chunk is one block or part of one */
    uint32_t scale_pair[2] = { 0u, 0u };
    int e, j;
    if (scales && !mn_major) {
        const uint16_t *scale = scales + (fp4 ? two_blocks ? 2 * chunk : chunk : chunk / 2) * GMM_QGEMM_SCALE_LD + row;
        scale_pair[0] = scale[0] * 0x00010001u;
        scale_pair[1] = two_blocks ? scale[GMM_QGEMM_SCALE_LD] * 0x00010001u : scale_pair[0];
    }
#pragma unroll
    for (e = 0; e < 4; e++) { /* vectors of 8 elements of the row */
        const uint32_t vec8 = chunk * (fp4 ? 4 : 2) + e;
        uint32_t v[4];
        if (!fp4 && e >= 2) break;
        if (fp4) gmm_fp4_to_16bit_x8(dtype, w[e], v);
        else {
            gmm_fp8_to_16bit_x4(dtype, m->dtype, w[2 * e & 3], v);
            gmm_fp8_to_16bit_x4(dtype, m->dtype, w[(2 * e + 1) & 3], v + 2);
        }
        if (scales && mn_major) {
            const uint4 x = *(const uint4 *)(const void *)&scales[row / 32 * GMM_QGEMM_SCALE_LD + 8 * vec8];
            v[0] = gmm_mul_16bit_x2(dtype, v[0], x.x);
            v[1] = gmm_mul_16bit_x2(dtype, v[1], x.y);
            v[2] = gmm_mul_16bit_x2(dtype, v[2], x.z);
            v[3] = gmm_mul_16bit_x2(dtype, v[3], x.w);
        } else if (scales)
#pragma unroll
            for (j = 0; j < 4; j++) v[j] = gmm_mul_16bit_x2(dtype, v[j], scale_pair[e / 2]);
        *(uint4 *)(void *)(dst + gmm_swizzle(row, vec8, mn_major ? 128u << log2_mn64 : 2 * GMM_QGEMM_TILE_K)) =
            make_uint4(v[0], v[1], v[2], v[3]);
    }
}

/* Strides of the scales along k, in bytes: from block to block within four blocks, and from four blocks to the next
   four. They fit 32 bits, since gmm__mma_plan_quantized limits extents. */
typedef struct gmm_qgemm_scale_strides {
    int32_t block, block4;
} gmm_qgemm_scale_strides;

/* Strides for a group whose scales are laid out for the extent `mn`. */
GMM__DEVICE gmm_qgemm_scale_strides gmm_qgemm_scale_strides_of(const gmm_mat *m, int mn_major, int64_t mn) {
    const int swizzled = m->scale_order == GMM_SCALES_SWIZZLED;
    gmm_qgemm_scale_strides t;
    t.block = m->scaling == GMM_SCALING_1X128 ? 4 * (int32_t)gmm__round_up(mn, 4)
              : m->scaling == GMM_SCALING_128X128 ? 4
              : mn_major && !swizzled ? (int32_t)gmm__round_up(mn, 128) : 1;
    t.block4 = swizzled ? 512 : 4 * t.block;
    return t;
}
/* Address of the first scale of row i of A or B, one thread per row; NULL without scales and beyond the last row. */
GMM__DEVICE const uint8_t *gmm_qgemm_first_scale(const gmm__qview *v, gmm_scaling scaling, int32_t i, int32_t mn) {
    const int32_t width = gmm_block_along(scaling);
    return width && i < mn ? v->scale + gmm__qview_scale(v, i, 0) * (width == 128 ? 4 : 1) : NULL;
}
/* Loads the scales of a row of A or B in stage q: the bytes of its blocks, the first in the lowest bits, or the fp32
   scale of a block of 128. `first_scale`: of the row; NULL: no scales. Zeros beyond k and without scales. */
GMM__DEVICE uint32_t gmm_qgemm_load_scales(const uint8_t *first_scale, gmm_qgemm_scale_strides t, gmm_scaling scaling,
                                           int q, int32_t k) {
    const int count = scaling == GMM_SCALING_NV16 ? 4 : scaling == GMM_SCALING_MX32 ? 2 : 1;
    const int32_t first = count == 1 ? q / 2 : count * q;
    const uint8_t *src = first_scale + (first >> 2) * (int64_t)t.block4 + (first & 3) * t.block;
    uint32_t bits = 0;
    int i;
    if (!first_scale || q * GMM_QGEMM_TILE_K >= k) return 0u;
    if (count == 1) return *(const uint32_t *)(const void *)src;
#pragma unroll
    for (i = 0; i < 4; i++)
        if (i < count && q * GMM_QGEMM_TILE_K + i * (GMM_QGEMM_TILE_K / count) < k)
            bits |= (uint32_t)src[i * t.block] << (8 * i);
    return bits;
}
/* Stores the loaded scales of row `index` of A or B into `slot`, [block][ld]: in the dtype of the elements or, for
   block-scaled sums, as fp32, where unquantized tokens have the scale 1. */
GMM__DEVICE void gmm_qgemm_store_scales(gmm_dtype dtype, int block_scaled, gmm_scaling scaling, uint32_t bits,
                                        char *slot, int index, int ld) {
    const int mx = scaling == GMM_SCALING_MX32;
    if (block_scaled) {
        float *dst = (float *)(void *)slot + index;
        dst[0] = scaling == GMM_SCALING_NONE ? 1.0f : mx ? gmm_e8m0_to_f32((uint8_t)bits) : __uint_as_float(bits);
        dst[ld] = mx ? gmm_e8m0_to_f32((uint8_t)(bits >> 8)) : 1.0f;
    } else {
        uint16_t *dst = (uint16_t *)(void *)slot + index;
        uint32_t v[2];
        if (mx) { /* E8M0 as BF16 */
            v[0] = bits & 0xFFu;
            v[1] = bits >> 8;
            dst[0] = (uint16_t)(v[0] == 0 ? 0x0040u : v[0] == 255 ? 0x7FFFu : v[0] << 7);
            dst[ld] = (uint16_t)(v[1] == 0 ? 0x0040u : v[1] == 255 ? 0x7FFFu : v[1] << 7);
        } else {
            gmm_fp8_to_16bit_x4(dtype, GMM_E4M3, bits, v);
            dst[0] = (uint16_t)v[0];
            dst[ld] = (uint16_t)(v[0] >> 16);
            dst[2 * ld] = (uint16_t)v[1];
            dst[3 * ld] = (uint16_t)(v[1] >> 16);
        }
    }
}

/* The scale of row i of A or B that is constant along k, to be divided by gmm_qgemm_outer_divisor: for NV16 the amax
   over 6 e4m3_max, for other scalings over 1. */
GMM__DEVICE float gmm_qgemm_outer_scale(const gmm__qview *v, gmm_scaling scaling, int32_t i) {
    if (scaling == GMM_SCALING_NV16) return v->amax[v->per_line ? i : 0];
    return scaling == GMM_SCALING_TENSOR || scaling == GMM_SCALING_ROW ? gmm__qview_factor(v, i, 0, 1) : 1.0f;
}
GMM__DEVICE float gmm_qgemm_outer_divisor(const gmm__qview *v, gmm_scaling scaling) {
    return scaling == GMM_SCALING_NV16 ? 6.0f * v->e4m3_max : 1.0f;
}

/* Views of the operands of a tile's group. */
typedef struct gmm_qgemm_views { gmm__qview a, b; } gmm_qgemm_views;
GMM__DEVICE gmm_qgemm_views gmm_qgemm_views_of(const gmm_qgemm_args *args, int k_grouped, const gmm_gemm_tile *t) {
    const int64_t start = (int64_t)args->p.tiles[t->g] * GMM_QGEMM_TILE_M, rows = k_grouped ? t->k : t->m;
    gmm_qgemm_views v;
    v.a = gmm__qview_of(&args->a, args->a_along, 1, t->g, t->row, start, rows, args->a_cols);
    v.b = gmm__qview_of(&args->b, args->b_along, k_grouped, t->g, k_grouped ? t->row : 0, k_grouped ? start : 0,
                        k_grouped ? rows : args->b_rows, args->b_cols);
    return v;
}

/* The scales of a tile's stages as a thread loads them: thread t those of row t of A and B together and, of the wide
   tile, of row t + 256. Of block-scaled kinds the group's strides are `strides`; those of others follow from the
   matrices. */
typedef struct gmm_qgemm_scales {
    const uint8_t *first[2];
    uint32_t bits[2]; /* of the stage that is stored next */
    gmm_qgemm_scale_strides strides;
} gmm_qgemm_scales;

/* Adds a block's four partial sums, times the scales of their two rows and two columns of D, to `sum`. `lift`: powers
   of two by which the rows' scales were divided and the columns' scales are multiplied (gmm__scale_lift). */
GMM__DEVICE void gmm_qgemm_promote(float sum[4], float partial[4], const float row_scales[2], const float col_scales[2],
                                   const float lift[2]) {
    int h;
#pragma unroll
    for (h = 0; h < 4; h++) {
        sum[h] = __fmaf_rn(__fmul_rn(partial[h], row_scales[h / 2]), col_scales[h % 2] * lift[h / 2], sum[h]);
        partial[h] = 0.0f;
    }
}

#ifndef GMM_NO_QUANT
#define GMM__BODY GMM__BODY_QUANTIZED
/* kernel, operation (dgrad is m-grouped as fwd is), kind */
#if GMM__HOLDS(1)
#define GMM__ROW (gmm_gemm_quant_bf16_128x256x64_mma, fwd, bf16)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_gemm_quant_f16_128x256x64_mma, fwd, f16)
#include GMM_KERNELS_FILE
#endif
#if GMM__HOLDS(7)
#define GMM__ROW (gmm_gemm_dgrad_quant_bf16_128x256x64_nn_mma, dgrad, bf16_nn)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_gemm_dgrad_quant_f16_128x128x64_block_scaled_nn_mma, dgrad, f16_block_scaled_nn)
#include GMM_KERNELS_FILE
#endif
#if GMM__HOLDS(6)
#define GMM__ROW (gmm_gemm_quant_f16_128x128x64_block_scaled_mma, fwd, f16_block_scaled)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_gemm_wgrad_quant_bf16_128x256x64_mma, wgrad, bf16)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_gemm_wgrad_quant_bf16_128x256x64_tn_mma, wgrad, bf16_tn)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_gemm_wgrad_quant_f16_128x256x64_mma, wgrad, f16)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_gemm_wgrad_quant_f16_128x128x64_block_scaled_mma, wgrad, f16_block_scaled)
#include GMM_KERNELS_FILE
#endif
#undef GMM__BODY

/* One row per kernel. */
typedef struct gmm_qgemm_kernel {
    gmm_gemm_op op;
    int32_t mn_major_a, mn_major_b, block_scaled; /* of the kind */
    int32_t tile_cols, shared;
    gmm_dtype dtype;
    const void *function;
    const char *name;
} gmm_qgemm_kernel;

#if GMM__HOLDS(0)
#define GMM__X(op, kind, kernel) GMM__DECLARE_KERNEL(kernel, gmm_qgemm_args)
GMM_QUANT_KERNEL_LIST(GMM__X)
#undef GMM__X
static const gmm_qgemm_kernel gmm_qgemm_kernels[] = {
#define GMM__X(op, kind, kernel) \
    { GMM__CAT(gmm_gemm_, op), GMM__CAT(gmm_qgemm_ta_, kind), GMM__CAT(gmm_qgemm_tb_, kind), \
      GMM__CAT(gmm_qgemm_block_scaled_, kind), \
      GMM__CAT(gmm_qgemm_block_scaled_, kind) ? gmm_qgemm_tile_n_1 : gmm_qgemm_tile_n_0, \
      GMM__CAT(gmm_qgemm_block_scaled_, kind) ? gmm_qgemm_smem_bytes_1 : gmm_qgemm_smem_bytes_0, \
      (gmm_dtype)GMM__CAT(gmm_qgemm_dtype_, kind), (const void *)kernel, #kernel },
    GMM_QUANT_KERNEL_LIST(GMM__X)
#undef GMM__X
};
enum { GMM_QGEMM_KERNELS = (int)(sizeof gmm_qgemm_kernels / sizeof gmm_qgemm_kernels[0]) };

static GMM__UNUSED cudaError_t gmm_launch_qgemm(int32_t kernel, int32_t grid, const gmm_qgemm_args *args,
                                                cudaStream_t stream) {
    const gmm_qgemm_kernel *row = &gmm_qgemm_kernels[kernel];
    const cudaError_t error = cudaFuncSetAttribute(row->function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                   row->shared);
    if (error != cudaSuccess) return error;
    return gmm_launch(row->function, dim3((unsigned)grid), GMM_QGEMM_THREADS, row->shared, args, stream);
}
#endif /* GMM__HOLDS(0) */
#endif /* GMM_NO_QUANT */

