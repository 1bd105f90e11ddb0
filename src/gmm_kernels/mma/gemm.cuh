/* ............................................................................................. Grouped products ... */

/* Operations: X(tag, A is stored as [k][m], B is stored as [k][n], k-grouped). glu is the forward product of an MLP's
   FC1 whose epilogue computes the gated activation besides, and dglu the dgrad of its FC2 whose epilogue computes the
   gradient of that activation instead of storing D. Both have Hopper kernels alone. */
#define GMM_GEMM_OP_LIST(X) \
    X(fwd, 0, 0, 0) \
    X(dgrad, 0, 1, 0) \
    X(wgrad, 1, 1, 1) \
    X(glu, 0, 0, 0) \
    X(dglu, 0, 1, 0)

/* Tiles: X(tag, M, N, K, stages, warps along M, warps along N, CTAs per multiprocessor, skip). With skip 1, blocks of
   16 rows beyond the group's last row are not multiplied, which pays where groups have fewer rows than a tile. All
   tiles accumulate an element in the same order, so results do not depend on the tile. */
#define GMM_MMA_TILE_LIST(X) \
    X(128x256, 128, 256, 64, 3, 2, 4, 1, 0) \
    X(64x128, 64, 128, 32, 6, 1, 4, 2, 1)

/* Instances: X(op, dtype, precision, tile, kernel); the includes below follow the same list. The names
   of GEMM kernels are explained above GMM_SM90_KERNEL_LIST. */
#define GMM_MMA_KERNEL_LIST(X) \
    X(fwd, GMM_BF16, bf16, 128x256, gmm_gemm_fwd_bf16_128x256x64_mma) \
    X(fwd, GMM_BF16, bf16, 64x128, gmm_gemm_fwd_bf16_64x128x32_mma) \
    GMM__IF_F16(X(fwd, GMM_F16, f16, 128x256, gmm_gemm_fwd_f16_128x256x64_mma)) \
    GMM__IF_F16(X(fwd, GMM_F16, f16, 64x128, gmm_gemm_fwd_f16_64x128x32_mma)) \
    X(dgrad, GMM_BF16, bf16, 128x256, gmm_gemm_dgrad_bf16_128x256x64_mma) \
    X(dgrad, GMM_BF16, bf16, 64x128, gmm_gemm_dgrad_bf16_64x128x32_mma) \
    GMM__IF_F16(X(dgrad, GMM_F16, f16, 128x256, gmm_gemm_dgrad_f16_128x256x64_mma)) \
    GMM__IF_F16(X(dgrad, GMM_F16, f16, 64x128, gmm_gemm_dgrad_f16_64x128x32_mma)) \
    X(wgrad, GMM_BF16, bf16, 128x256, gmm_gemm_wgrad_bf16_128x256x64_mma) \
    X(wgrad, GMM_BF16, bf16, 64x128, gmm_gemm_wgrad_bf16_64x128x32_mma) \
    GMM__IF_F16(X(wgrad, GMM_F16, f16, 128x256, gmm_gemm_wgrad_f16_128x256x64_mma)) \
    GMM__IF_F16(X(wgrad, GMM_F16, f16, 64x128, gmm_gemm_wgrad_f16_64x128x32_mma))

#define GMM__X(tag, ta, tb, grouped) GMM__CAT(gmm_ta_, tag) = ta, GMM__CAT(gmm_tb_, tag) = tb, \
    GMM__CAT(gmm_k_grouped_, tag) = grouped,
enum { GMM_GEMM_OP_LIST(GMM__X) gmm_gemm_ops_end };
#undef GMM__X
#define GMM__X(tag, ta, tb, grouped) GMM__CAT(gmm_gemm_, tag),
typedef enum gmm_gemm_op { GMM_GEMM_OP_LIST(GMM__X) gmm_gemm_op_count } gmm_gemm_op;
#undef GMM__X
#define GMM__X(tag, bm, bn, bk, st, wm, wn, ctas, skip) GMM__CAT(gmm_bm_, tag) = bm, GMM__CAT(gmm_bn_, tag) = bn, \
    GMM__CAT(gmm_bk_, tag) = bk, GMM__CAT(gmm_stages_, tag) = st, GMM__CAT(gmm_wm_, tag) = wm, \
    GMM__CAT(gmm_wn_, tag) = wn, GMM__CAT(gmm_ctas_, tag) = ctas, GMM__CAT(gmm_skip_, tag) = skip,
enum { GMM_MMA_TILE_LIST(GMM__X) gmm_mma_tiles_end };
#undef GMM__X
#define GMM__X(tag, bm, bn, bk, st, wm, wn, ctas, skip) GMM__CAT(gmm_tile_, tag),
typedef enum gmm_mma_tile { GMM_MMA_TILE_LIST(GMM__X) gmm_tile_count } gmm_mma_tile;
#undef GMM__X
/* Rules of tiles. gmm_stage_load adds steps of rows to a swizzled offset, which is right for multiples of 8 rows.
   gmm_mma_load_fragment adds blocks to it by XOR, which is an addition where a warp's extent is a power of two.
   Fragments alternate between two buffers from one stage to the next. gmm_gemm_store_rows holds at most 64 columns of a
   warp. */
#define GMM__X(tag, bm, bn, bk, st, wm, wn, ctas, skip) \
    static_assert(32 * (wm) * (wn) % (bm) == 0 && 32 * (wm) * (wn) % (bn) == 0 && 32 * (wm) * (wn) % (bk) == 0, \
                  "tile " #tag ": a CTA loads a multiple of 8 rows of a stage at once"); \
    static_assert((bm) / (wm) % 16 == 0 && ((bm) / (wm) & ((bm) / (wm) - 1)) == 0 && (bk) % 32 == 0, \
                  "tile " #tag ": a warp's rows are a power of two from 16 on, a stage's K steps of 16 even"); \
    static_assert((bn) / (wn) == 16 || (bn) / (wn) == 32 || (bn) / (wn) == 64, \
                  "tile " #tag ": a warp has 16, 32 or 64 columns");
GMM_MMA_TILE_LIST(GMM__X)
#undef GMM__X

/* Shared memory: the stages, then 8 rows of fp32 results per warp for the epilogue. The large tile just fits the 163
   KiB of compute capability 8.0. */
#define GMM__X(tag, bm, bn, bk, st, wm, wn, ctas, skip) \
    GMM__CAT(gmm_store_ld_, tag) = (bn) / (wn) + 8, GMM__CAT(gmm_threads_, tag) = 32 * (wm) * (wn), \
    GMM__CAT(gmm_shared_, tag) = 2 * (st) * (bk) * ((bm) + (bn)) + 4 * 8 * ((bn) / (wn) + 8) * (wm) * (wn),
enum { GMM_MMA_TILE_LIST(GMM__X) gmm_mma_shared_end };
#undef GMM__X

/* A work tile. */
typedef struct gmm_gemm_tile {
    int32_t g, m0, n0, m, k; /* group, first row and column in the group, extents of the group */
    int64_t row;             /* first row of the group in the token matrices */
} gmm_gemm_tile;

/* Rasterization of a group's tiles: along M first, in bands of 8 tiles, so that concurrent tiles read the same operands
   from the L2. */
GMM__DEVICE void gmm_tile_rasterize(uint32_t i, uint32_t tiles_m, uint32_t tiles_n, int bm, int bn, gmm_gemm_tile *t) {
    const uint32_t band = i / (8 * tiles_n), first = band * 8, remaining = tiles_m - first;
    const uint32_t height = remaining < 8 ? remaining : 8;
    i -= first * tiles_n;
    t->m0 = (int32_t)(first + i % height) * bm;
    t->n0 = (int32_t)(i / height) * bn;
}

/* beta of group g. */
GMM__DEVICE float gmm_gemm_beta(const gmm_gemm_args *args, int32_t g) {
    return args->beta ? args->beta[g] : args->beta_all;
}

/* Advances *tile_index to the first tile of this CTA's sequence, at or after it, that has work, and describes the tile
   in *t. Returns 0 where there is none. Whole warp. Tile numbers fit 32 bits. */
GMM__DEVICE int gmm_gemm_next_tile(const gmm_gemm_args *args, int k_grouped, int bm, int bn, int64_t *tile_index,
                                   gmm_gemm_tile *t) {
    const uint32_t tiles_n = (uint32_t)(args->n + bn - 1) / (uint32_t)bn;
    const int32_t G = args->groups;
    if (!k_grouped) {
        uint32_t row_tile;
        if (*tile_index >= (int64_t)args->tiles[G] * tiles_n) return 0;
        row_tile = (uint32_t)*tile_index / tiles_n;
        gmm_find_group32(args->tiles, G, row_tile, &t->g);
        t->row = args->offsets[t->g];
        t->m = (int32_t)(args->offsets[t->g + 1] - t->row);
        t->k = args->k;
        row_tile = (uint32_t)args->tiles[t->g]; /* the group's first */
        gmm_tile_rasterize((uint32_t)*tile_index - row_tile * tiles_n, (uint32_t)args->tiles[t->g + 1] - row_tile,
                           tiles_n, bm, bn, t);
    } else {
        const uint32_t tiles_m = (uint32_t)(args->m + bm - 1) / (uint32_t)bm, group_tiles = tiles_m * tiles_n;
        int32_t rows;
        for (;;) {
            if (*tile_index >= (int64_t)group_tiles * G) return 0;
            t->g = (int32_t)((uint32_t)*tile_index / group_tiles);
            t->row = args->offsets[t->g];
            rows = (int32_t)(args->offsets[t->g + 1] - t->row);
            if (!(args->frozen && args->frozen[t->g]) && !(rows == 0 && gmm_gemm_beta(args, t->g) == 1.0f)) break;
            { /* skip to the first tile of this CTA in the next group */
                const uint32_t skip = (uint32_t)((int64_t)(t->g + 1) * group_tiles - *tile_index);
                *tile_index += (int64_t)((skip + gridDim.x - 1) / gridDim.x) * gridDim.x;
            }
        }
        t->m = args->m;
        t->k = rows;
        gmm_tile_rasterize((uint32_t)*tile_index - (uint32_t)t->g * group_tiles, tiles_m, tiles_n, bm, bn, t);
    }
    return 1;
}

/* Arguments of the epilogue that are constant over a tile. */
typedef struct gmm_gemm_epilogue {
    char *d;                                       /* first row of the group in D */
    gmm_epilogue_values values[gmm_epilogue_steps]; /* of the steps, from the group's first row */
    int present[gmm_epilogue_steps];               /* whether the call has the step */
    const char *bias;                              /* of the group, or NULL */
    float alpha, beta;
    int vec4, bias_vec4;
} gmm_gemm_epilogue;

GMM__DEVICE gmm_gemm_epilogue gmm_gemm_epilogue_begin(const gmm_gemm_args *args, int k_grouped,
                                                      const gmm_gemm_tile *t) {
    gmm_gemm_epilogue epilogue;
    epilogue.d = gmm_kmat_data(&args->d, t->g) + (k_grouped ? 0 : t->row * args->d.ld * gmm_kmat_size(&args->d));
    epilogue.vec4 = gmm_vec4_aligned(args->d.dtype, epilogue.d, args->d.ld);
    epilogue.bias = !k_grouped && args->bias.dtype != GMM_NONE ? gmm_kmat_data(&args->bias, t->g) : NULL;
    epilogue.bias_vec4 = gmm_vec4_aligned(args->bias.dtype, epilogue.bias, 4);
#define GMM__X(name, rows, cols) \
    epilogue.present[GMM_EPILOGUE_##name] = !k_grouped && gmm_epilogue_##name##_present(args); \
    epilogue.values[GMM_EPILOGUE_##name] = gmm_epilogue_##name##_values(args, t->g, t->row);
    GMM_EPILOGUE_STEP_LIST(GMM__X)
#undef GMM__X
    /* an empty sum is +0 whatever alpha is */
    epilogue.alpha = args->alpha && t->k > 0 ? args->alpha[args->alpha_per_group ? t->g : 0] : 1.0f;
    epilogue.beta = gmm_gemm_beta(args, t->g);
    return epilogue;
}

#define GMM__X(name, rows, cols) \
    static_assert(!(cols) || GMM_EPILOGUE_##name == GMM_EPILOGUE_bias, \
                  #name ": the portable products have values of columns for the bias alone");
GMM_EPILOGUE_STEP_LIST(GMM__X)
#undef GMM__X
/* Applies an epilogue step to four elements of a row of the group. `bias`: values of their columns, which no other step
   has. */
GMM__DEVICE void gmm_gemm_apply_step(const gmm_epilogue_step step, const gmm_gemm_epilogue *o, int32_t row,
                                     const float bias[4], float v[4]) {
    const float *const rows = o->values[step].rows;
    const float value = rows ? rows[row] : 1.0f;
    int i;
#pragma unroll
    for (i = 0; i < 4; i++) v[i] = gmm_epilogue_apply(step, v[i], value, bias[i]);
}
GMM__DEVICE void gmm_gemm_apply_steps(const gmm_gemm_epilogue *o, int32_t row, const float bias[4], float v[4]) {
#define GMM__X(name, rows, cols) \
    if (o->present[GMM_EPILOGUE_##name]) gmm_gemm_apply_step(GMM_EPILOGUE_##name, o, row, bias, v);
    GMM_EPILOGUE_STEP_LIST(GMM__X)
#undef GMM__X
}

/* Epilogue of four accumulators of one row: scales, adds bias and beta D, rounds once and stores. `bias` holds the
   biases of the columns. The operations are explicit intrinsics, so that the compiler contracts them equally at
   every place of expansion. */
GMM__DEVICE void gmm_gemm_store(const gmm_gemm_args *args, const gmm_gemm_epilogue *o, int32_t row, int32_t col,
                                const float bias[4], float v[4]) {
    char *dst = o->d + ((int64_t)row * args->d.ld + col) * gmm_kmat_size(&args->d);
    const int count = args->n - col;
    int i;
#pragma unroll
    for (i = 0; i < 4; i++) v[i] = __fmul_rn(v[i], o->alpha);
    gmm_gemm_apply_steps(o, row, bias, v);
    if (o->beta != 0.0f) {
        float old[4];
        gmm_read4(args->d.dtype, dst, count, o->vec4, old);
#pragma unroll
        for (i = 0; i < 4; i++) v[i] = __fmaf_rn(o->beta, old[i], v[i]);
    }
    gmm_write4(args->d.dtype, dst, count, o->vec4, v);
}

/* The same for every row_step-th of 8 rows, which are complete and aligned for vector access: all loads are issued
   before the first store. `row_step` (2 to 8) is also the number of rows that a warp stores at once, so a row has 4 *
   (32 / row_step) columns and takes 8 more floats in shared memory. `src`: the thread's first row there, number `row`
   of the group. `dst`: the same row of D; `dst_stride`: bytes to the next one. */
GMM__DEVICE void gmm_gemm_store_rows(const gmm_gemm_args *args, const gmm_gemm_epilogue *o, char *dst,
                                     int64_t dst_stride, int32_t row, int row_step, const float *src,
                                     const float bias[4]) {
    const int f32 = args->d.dtype == GMM_F32, rows = 8 / row_step;
    const int src_stride = row_step * (4 * (32 / row_step) + 8);
    float v[4][4];
    uint4 old_bits[4];
    int r, i;
    if (o->beta != 0.0f) {
#pragma unroll
        for (r = 0; r < rows; r++)
            if (f32) old_bits[r] = *(const uint4 *)(dst + r * dst_stride);
            else *(uint2 *)&old_bits[r] = *(const uint2 *)(dst + r * dst_stride);
    }
#pragma unroll
    for (r = 0; r < rows; r++) {
        const float4 f = *(const float4 *)(src + r * src_stride);
        v[r][0] = __fmul_rn(f.x, o->alpha);
        v[r][1] = __fmul_rn(f.y, o->alpha);
        v[r][2] = __fmul_rn(f.z, o->alpha);
        v[r][3] = __fmul_rn(f.w, o->alpha);
    }
#pragma unroll
    for (r = 0; r < rows; r++) gmm_gemm_apply_steps(o, row + r * row_step, bias, v[r]);
    if (o->beta != 0.0f) {
#pragma unroll
        for (r = 0; r < rows; r++) {
            float old[4];
            if (f32) {
                old[0] = __uint_as_float(old_bits[r].x); old[1] = __uint_as_float(old_bits[r].y);
                old[2] = __uint_as_float(old_bits[r].z); old[3] = __uint_as_float(old_bits[r].w);
            } else {
                old[0] = gmm_widen(args->d.dtype, (uint16_t)old_bits[r].x);
                old[1] = gmm_widen(args->d.dtype, (uint16_t)(old_bits[r].x >> 16));
                old[2] = gmm_widen(args->d.dtype, (uint16_t)old_bits[r].y);
                old[3] = gmm_widen(args->d.dtype, (uint16_t)(old_bits[r].y >> 16));
            }
#pragma unroll
            for (i = 0; i < 4; i++) v[r][i] = __fmaf_rn(o->beta, old[i], v[r][i]);
        }
    }
#pragma unroll
    for (r = 0; r < rows; r++)
        if (f32) *(float4 *)(dst + r * dst_stride) = make_float4(v[r][0], v[r][1], v[r][2], v[r][3]);
        else *(uint2 *)(dst + r * dst_stride) = make_uint2(gmm_pack2(args->d.dtype, v[r][0], v[r][1]),
                                                           gmm_pack2(args->d.dtype, v[r][2], v[r][3]));
}

/* Stores 8 rows of the tile, from `first_row` and `first_col` of the group on, whose sums a warp holds in shared memory
   at `sums`, with the pitch that gmm_gemm_store_rows names; rows and columns beyond the tile are left out. */
GMM__DEVICE void gmm_gemm_store_8_rows(const gmm_gemm_args *args, const gmm_gemm_epilogue *o, const gmm_gemm_tile *t,
                                       int32_t first_row, int32_t first_col, int row_step, const float *sums,
                                       const float bias[4]) {
    const int lanes = 32 / row_step, lane = (int)threadIdx.x & 31, ld = 4 * lanes + 8;
    const int32_t row = first_row + lane / lanes, col = first_col + lane % lanes * 4;
    const float *src = sums + lane / lanes * ld + lane % lanes * 4;
    int r;
    if (o->vec4 && t->m - first_row >= 8 && first_col + 4 * lanes <= args->n) {
        const int64_t pitch = args->d.ld * gmm_kmat_size(&args->d);
        gmm_gemm_store_rows(args, o, o->d + row * pitch + (int64_t)col * gmm_kmat_size(&args->d), pitch * row_step, row,
                            row_step, src, bias);
    } else {
#pragma unroll 1
        for (r = 0; r < 8; r += row_step) {
            const float4 f = *(const float4 *)(const void *)(src + r * ld);
            float v[4];
            v[0] = f.x; v[1] = f.y; v[2] = f.z; v[3] = f.w;
            if (row + r < t->m && col < args->n) gmm_gemm_store(args, o, row + r, col, bias, v);
        }
    }
}

/* Prefetches the tile's part of D into the L2 if the epilogue will read it. */
GMM__DEVICE void gmm_gemm_prefetch(const gmm_gemm_args *args, int k_grouped, const gmm_gemm_tile *t, int bm, int bn) {
    const int size = gmm_kmat_size(&args->d), row_lines = bn * size / 128; /* 128-byte lines of the cache */
    const char *d;
    int i;
    if (gmm_gemm_beta(args, t->g) == 0.0f) return;
    d = gmm_kmat_data(&args->d, t->g) + (k_grouped ? 0 : t->row * args->d.ld * size);
    for (i = (int)threadIdx.x; i < bm * row_lines; i += (int)blockDim.x) {
        const int32_t row = t->m0 + i / row_lines, col = t->n0 + i % row_lines * (128 / size);
        if (row < t->m && col < args->n)
            gmm_prefetch_global_l2(d + ((int64_t)row * args->d.ld + col) * size);
    }
}

/* Zeroes rows [first_row, capacity) of D, one warp per row. */
GMM__DEVICE void gmm_gemm_zero_tail(const gmm_kmat *d, int64_t first_row, int64_t capacity, int32_t n) {
    const int64_t warps = (int64_t)gridDim.x * (blockDim.x >> 5);
    const int64_t warp = (int64_t)blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5);
    const float zero[4] = { 0.0f, 0.0f, 0.0f, 0.0f };
    const int size = gmm_kmat_size(d), vec4 = gmm_vec4_aligned(d->dtype, (const char *)d->data, d->ld);
    int64_t r;
    int32_t c;
    for (r = first_row + warp; r < capacity; r += warps)
        for (c = 4 * (int32_t)(threadIdx.x & 31); c < n; c += 128)
            gmm_write4(d->dtype, (char *)d->data + (r * d->ld + c) * size, n - c, vec4, zero);
}

