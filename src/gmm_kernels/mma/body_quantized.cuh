
/* ............................................................... Body: product of quantized operands ... */
#elif GMM__BODY == GMM__BODY_QUANTIZED
#define GMM__KERNEL_NAME GMM__COLUMN(1, GMM__ROW)
#define GMM__OP GMM__COLUMN(2, GMM__ROW)
#define GMM__KIND GMM__COLUMN(3, GMM__ROW)
#define GMM__PART(part) GMM__CAT(GMM__CAT(GMM__CAT(part, GMM__OP), _), GMM__KIND)
#define GMM__TA (int)GMM__CAT(gmm_qgemm_ta_, GMM__KIND)
#define GMM__TB (int)GMM__CAT(gmm_qgemm_tb_, GMM__KIND)
#define GMM__BLOCK_SCALED (int)GMM__CAT(gmm_qgemm_block_scaled_, GMM__KIND)
#define GMM__DTYPE (gmm_dtype)GMM__CAT(gmm_qgemm_dtype_, GMM__KIND)
#define GMM__K_GROUPED (int)GMM__CAT(gmm_k_grouped_, GMM__OP)
/* The tile's columns, its rows of A and B together, and log2 of its columns in units of 64. */
#define GMM__BN (GMM__BLOCK_SCALED ? (int)gmm_qgemm_tile_n_1 : (int)gmm_qgemm_tile_n_0)
#define GMM__MN (GMM_QGEMM_TILE_M + GMM__BN)
#define GMM__B_LOG2_MN64 (GMM__BLOCK_SCALED ? 1 : 2)
/* Of a warp, 2 x 4 of which have a tile: columns, blocks of 16 rows and of 8 columns; steps of 16 values of k in a
   stage; blocks of rows whose sums are promoted. */
#define GMM__WN (GMM__BN / 4)
#define GMM__MT 4
#define GMM__NT (GMM__WN / 8)
#define GMM__KT (GMM_QGEMM_TILE_K / 16)
#define GMM__SUM_MT (GMM__BLOCK_SCALED ? GMM__MT : 1)
/* Bytes of elements in a stage: of a row of A and of B, of A, of both. Bytes of a stage's scales. */
#define GMM__A_ROW_BYTES (2 * (GMM__TA ? GMM_QGEMM_TILE_M : GMM_QGEMM_TILE_K))
#define GMM__B_ROW_BYTES (2 * (GMM__TB ? GMM__BN : GMM_QGEMM_TILE_K))
#define GMM__A_BYTES (2 * GMM_QGEMM_TILE_M * GMM_QGEMM_TILE_K)
#define GMM__STAGE_BYTES (GMM__A_BYTES + 2 * GMM__BN * GMM_QGEMM_TILE_K)
#define GMM__SLOT_BYTES (GMM__BLOCK_SCALED ? (int)gmm_qgemm_slot_bytes_1 : (int)gmm_qgemm_slot_bytes_0)
/* Whether A holds 16-bit tokens, which are copied without conversion; whether scales are applied in the mainloop. */
#define GMM__A_IS_16BIT(args) (!GMM__K_GROUPED && (args)->a.scaling == GMM_SCALING_NONE)
#define GMM__HAS_SCALES(args) \
    (GMM__BLOCK_SCALED || (args)->b.scaling == GMM_SCALING_MX32 || (args)->b.scaling == GMM_SCALING_NV16)
/* Chunks of codes that a thread has in a stage. */
#define GMM__A_CHUNKS(args) (GMM__A_IS_16BIT(args) ? 0 : (args)->a.dtype == GMM_E2M1 ? 1 : 2)
#define GMM__B_CHUNKS(args) (((args)->b.dtype == GMM_E2M1 ? 1 : 2) * (GMM__BN / 128))

/* What a thread loads of a tile's operands. Its codes, those of the stage that is dequantized next, have a struct of
   their own: in one with the rest, an instance spills registers. */
typedef struct GMM__PART(gmm_qgemm_codes_) { uint4 a[2], b[GMM__BN / 64]; } GMM__PART(gmm_qgemm_codes_);
typedef struct GMM__PART(gmm_qgemm_loads_) {
    gmm_qgemm_operand a, b;
    gmm_qgemm_scales scales;
    char *smem, *slots; /* elements of two stages; scales of four */
    int k, k_tiles;
} GMM__PART(gmm_qgemm_loads_);

/* Loads the scales of stage q. */
GMM__DEVICE void GMM__PART(gmm_qgemm_load_scales_)(const gmm_qgemm_args *args, GMM__PART(gmm_qgemm_loads_) *load,
                                                   int q) {
    const int tid = (int)threadIdx.x;
    gmm_qgemm_scales *const t = &load->scales;
    t->bits[0] = gmm_qgemm_load_scales(
        t->first[0],
        GMM__BLOCK_SCALED        ? t->strides
        : tid < GMM_QGEMM_TILE_M ? gmm_qgemm_scale_strides_of(&args->a, GMM__TA, args->a_cols)
                                 : gmm_qgemm_scale_strides_of(&args->b, GMM__TB, args->b_cols),
        tid < GMM_QGEMM_TILE_M ? args->a.scaling : args->b.scaling, q, load->k);
    if (GMM__MN > 256 && tid < 128)
        t->bits[1] = gmm_qgemm_load_scales(t->first[1], gmm_qgemm_scale_strides_of(&args->b, GMM__TB, args->b_cols),
                                           args->b.scaling, q, load->k);
}
/* Stores the scales of stage q, which were loaded before, and loads those of the next stage. */
GMM__DEVICE void GMM__PART(gmm_qgemm_store_scales_)(const gmm_qgemm_args *args, GMM__PART(gmm_qgemm_loads_) *load,
                                                    int q) {
    const int tid = (int)threadIdx.x;
    char *const slot = load->slots + (q & 3) * GMM__SLOT_BYTES;
    gmm_qgemm_store_scales(GMM__DTYPE, GMM__BLOCK_SCALED, tid < GMM_QGEMM_TILE_M ? args->a.scaling : args->b.scaling,
                           load->scales.bits[0], slot, tid, GMM__MN);
    if (GMM__MN > 256 && tid < 128)
        gmm_qgemm_store_scales(GMM__DTYPE, GMM__BLOCK_SCALED, args->b.scaling, load->scales.bits[1], slot, tid + 256,
                               GMM__MN);
    GMM__PART(gmm_qgemm_load_scales_)(args, load, q + 1);
}

/* Dequantizes chunk i of A or B in stage q to shared memory and loads the same chunk of the following stage into its
   registers. Scales that are not applied to elements are NULL. */
GMM__DEVICE void GMM__PART(gmm_qgemm_dequantize_a_)(const gmm_qgemm_args *args, const GMM__PART(gmm_qgemm_loads_) *load,
                                                    GMM__PART(gmm_qgemm_codes_) *codes, int i, int q) {
    gmm_qgemm_dequantize_chunk(GMM__DTYPE, &args->a, GMM__TA, 1, i, codes->a[i],
                               load->smem + (q & 1) * GMM__STAGE_BYTES,
                               GMM__HAS_SCALES(args) && !GMM__BLOCK_SCALED
                                   ? (const uint16_t *)(void *)(load->slots + (q & 3) * GMM__SLOT_BYTES) : NULL);
    codes->a[i] = gmm_qgemm_load_chunk(&load->a, &args->a, GMM__TA, 1, i);
}
GMM__DEVICE void GMM__PART(gmm_qgemm_dequantize_b_)(const gmm_qgemm_args *args, const GMM__PART(gmm_qgemm_loads_) *load,
                                                    GMM__PART(gmm_qgemm_codes_) *codes, int i, int q) {
    gmm_qgemm_dequantize_chunk(
        GMM__DTYPE, &args->b, GMM__TB, GMM__B_LOG2_MN64, i, codes->b[i],
        load->smem + (q & 1) * GMM__STAGE_BYTES + GMM__A_BYTES,
        GMM__HAS_SCALES(args) && !GMM__BLOCK_SCALED
            ? (const uint16_t *)(void *)(load->slots + (q & 3) * GMM__SLOT_BYTES) + GMM_QGEMM_TILE_M : NULL);
    codes->b[i] = gmm_qgemm_load_chunk(&load->b, &args->b, GMM__TB, GMM__B_LOG2_MN64, i);
}

/* Begins a tile: the thread's part of its operands and scales. */
GMM__DEVICE void GMM__PART(gmm_qgemm_loads_begin_)(const gmm_qgemm_args *args, GMM__PART(gmm_qgemm_loads_) *load,
                                                   const gmm_gemm_tile *t) {
    const int tid = (int)threadIdx.x;
    const int k = GMM__K_GROUPED ? (t->k + args->k_round - 1) / args->k_round * args->k_round : t->k;
    const gmm_qgemm_views v = gmm_qgemm_views_of(args, GMM__K_GROUPED, t);
    gmm_qgemm_scales *const s = &load->scales;
    load->k = k;
    load->a = gmm_qgemm_operand_init(&args->a, &v.a, GMM__TA, 1, t->row, t->m0, t->m, k);
    load->b = gmm_qgemm_operand_init(&args->b, &v.b, GMM__TB, GMM__B_LOG2_MN64, 0, t->n0, args->p.n, k);
    s->first[0] = tid < GMM_QGEMM_TILE_M
                      ? gmm_qgemm_first_scale(&v.a, args->a.scaling, t->m0 + tid, t->m)
                      : gmm_qgemm_first_scale(&v.b, args->b.scaling, t->n0 + tid - GMM_QGEMM_TILE_M, args->p.n);
    s->first[1] = gmm_qgemm_first_scale(&v.b, args->b.scaling, t->n0 + tid + 128, args->p.n);
    if (GMM__BLOCK_SCALED)
        s->strides = tid < GMM_QGEMM_TILE_M ? gmm_qgemm_scale_strides_of(&args->a, GMM__TA, v.a.lines)
                                            : gmm_qgemm_scale_strides_of(&args->b, GMM__TB, v.b.lines);
    /* an empty group multiplies one stage of zeros */
    load->k_tiles = k > 0 ? (k + GMM_QGEMM_TILE_K - 1) / GMM_QGEMM_TILE_K : 1;
}

/* Dequantizes a tile's first stage, and leaves the scales and codes of the next ones on their way. */
GMM__DEVICE void GMM__PART(gmm_qgemm_load_first_)(const gmm_qgemm_args *args, GMM__PART(gmm_qgemm_loads_) *load,
                                                  GMM__PART(gmm_qgemm_codes_) *codes, const gmm_gemm_tile *t,
                                                  gmm_gemm_tile *smem_tile) {
    const int chunks_a = GMM__A_CHUNKS(args), chunks_b = GMM__B_CHUNKS(args);
    int i;
#pragma unroll
    for (i = 0; i < 2; i++)
        if (i < chunks_a) codes->a[i] = gmm_qgemm_load_chunk(&load->a, &args->a, GMM__TA, 1, i);
#pragma unroll
    for (i = 0; i < GMM__BN / 64; i++)
        if (i < chunks_b) codes->b[i] = gmm_qgemm_load_chunk(&load->b, &args->b, GMM__TB, GMM__B_LOG2_MN64, i);
    if (GMM__HAS_SCALES(args)) {
        load->scales.bits[1] = 0;
        GMM__PART(gmm_qgemm_load_scales_)(args, load, 0);
        GMM__PART(gmm_qgemm_store_scales_)(args, load, 0);
    }
    __syncthreads(); /* scales are stored, and the epilogue of the previous tile has finished with shared memory */
    if (threadIdx.x == 0) *smem_tile = *t; /* in shared memory, so that it takes no registers in the mainloop */
    if (GMM__HAS_SCALES(args)) GMM__PART(gmm_qgemm_store_scales_)(args, load, 1);
    if (GMM__A_IS_16BIT(args)) gmm_qgemm_copy_tokens(&load->a, &args->a, load->smem);
    gmm_cp_async_commit_group();
    gmm_qgemm_operand_advance(&load->a, &args->a, GMM__TA);
    gmm_qgemm_operand_advance(&load->b, &args->b, GMM__TB);
#pragma unroll
    for (i = 0; i < 2; i++)
        if (i < chunks_a) GMM__PART(gmm_qgemm_dequantize_a_)(args, load, codes, i, 0);
#pragma unroll
    for (i = 0; i < GMM__BN / 64; i++)
        if (i < chunks_b) GMM__PART(gmm_qgemm_dequantize_b_)(args, load, codes, i, 0);
}

/* Adds the sums of a block to `sum`, times the scales at `scale`, and zeroes them. */
GMM__DEVICE void GMM__PART(gmm_qgemm_promote_)(const gmm_mma_warp *w, const float *scale,
                                               float acc[GMM__MT][GMM__NT][4], float sum[GMM__SUM_MT][GMM__NT][4]) {
    const int lane = (int)threadIdx.x & 31;
    const float ones[2] = { 1.0f, 1.0f }, *const col_scales = scale + GMM_QGEMM_TILE_M + w->n + (lane & 3) * 2;
    int i, j;
#pragma unroll
    for (i = 0; i < GMM__MT; i++) {
        const float *const first = scale + w->m + i * 16 + (lane >> 2);
        float row_scales[2] = { first[0], first[8] };
        const float lift[2] = { gmm__scale_lift(row_scales[0]), gmm__scale_lift(row_scales[1]) };
        if (lift[0] == 1.0f && lift[1] == 1.0f) {
#pragma unroll
            for (j = 0; j < GMM__NT; j++)
                gmm_qgemm_promote(sum[GMM__BLOCK_SCALED ? i : 0][j], acc[i][j], row_scales, col_scales + 8 * j, ones);
        } else {
            row_scales[0] *= 1.0f / lift[0];
            row_scales[1] *= 1.0f / lift[1];
#pragma unroll
            for (j = 0; j < GMM__NT; j++)
                gmm_qgemm_promote(sum[GMM__BLOCK_SCALED ? i : 0][j], acc[i][j], row_scales, col_scales + 8 * j, lift);
        }
    }
}

/* Adds the products of step s of the stage at `stage` to the sums of the warp's first `row_blocks` blocks of 16 rows.
   The fragments of the step's first block of A and of B are loaded; those of the next blocks are, one ahead. */
GMM__DEVICE void GMM__PART(gmm_qgemm_multiply_)(const gmm_mma_warp *w, uint32_t stage, int s, int row_blocks,
                                                uint32_t a[2][4], const uint32_t b[GMM__NT / 2][4],
                                                float acc[GMM__MT][GMM__NT][4]) {
    int i, j;
#pragma unroll
    for (i = 0; i < GMM__MT; i++) {
        if (i + 1 < GMM__MT)
            gmm_mma_load_fragment(a[(i + 1) & 1], GMM__TA, stage, w->a, i + 1, s, GMM__A_ROW_BYTES);
        if (i >= row_blocks) continue;
#pragma unroll
        for (j = 0; j < GMM__NT; j++)
            if (GMM__DTYPE == GMM_BF16) gmm_mma_bf16(acc[i][j], a[i & 1], &b[j / 2][j % 2 * 2]);
            else gmm_mma_f16(acc[i][j], a[i & 1], &b[j / 2][j % 2 * 2]);
    }
}
GMM__DEVICE void GMM__PART(gmm_qgemm_load_fragments_)(const gmm_mma_warp *w, uint32_t stage, int s, uint32_t a[2][4],
                                                      uint32_t b[GMM__NT / 2][4]) {
    int j;
    gmm_mma_load_fragment(a[0], GMM__TA, stage, w->a, 0, s, GMM__A_ROW_BYTES);
#pragma unroll
    for (j = 0; j < GMM__NT / 2; j++) gmm_mma_load_fragment(b[j], GMM__TB, stage, w->b, j, s, GMM__B_ROW_BYTES);
}

/* Multiplies the stages of a tile, of which the first is dequantized; the dequantization of the next one is interleaved
   with the products. */
GMM__DEVICE void GMM__PART(gmm_qgemm_mainloop_)(const gmm_qgemm_args *args, GMM__PART(gmm_qgemm_loads_) *load,
                                                GMM__PART(gmm_qgemm_codes_) *codes, const gmm_mma_warp *w,
                                                int row_blocks, float acc[GMM__MT][GMM__NT][4],
                                                float sum[GMM__SUM_MT][GMM__NT][4]) {
    const int chunks_a = GMM__A_CHUNKS(args), chunks_b = GMM__B_CHUNKS(args);
    uint32_t a[2][4], b[GMM__NT / 2][4];
    int k_tile, s;
    for (k_tile = 0; k_tile < load->k_tiles; k_tile++) {
        const uint32_t stage = (uint32_t)__cvta_generic_to_shared(load->smem) +
                               (uint32_t)((k_tile & 1) * GMM__STAGE_BYTES);
        const int has_next = k_tile + 1 < load->k_tiles;
        GMM__CP_ASYNC_WAIT_GROUP(0);
        __syncthreads(); /* stage k_tile is complete, and the one before has been read */
        if (GMM__A_IS_16BIT(args) && has_next)
            gmm_qgemm_copy_tokens(&load->a, &args->a, load->smem + ((k_tile + 1) & 1) * GMM__STAGE_BYTES);
        gmm_cp_async_commit_group();
        if (!GMM__A_IS_16BIT(args) || has_next) gmm_qgemm_operand_advance(&load->a, &args->a, GMM__TA);
        gmm_qgemm_operand_advance(&load->b, &args->b, GMM__TB);
        if (GMM__HAS_SCALES(args)) GMM__PART(gmm_qgemm_store_scales_)(args, load, k_tile + 2);
        GMM__PART(gmm_qgemm_load_fragments_)(w, stage, 0, a, b);
#pragma unroll
        for (s = 0; s < GMM__KT; s++) {
            GMM__PART(gmm_qgemm_multiply_)(w, stage, s, row_blocks, a, b, acc);
            if (s + 1 < GMM__KT) GMM__PART(gmm_qgemm_load_fragments_)(w, stage, s + 1, a, b);
            if (s < 2 && has_next && s < chunks_a)
                GMM__PART(gmm_qgemm_dequantize_a_)(args, load, codes, s % 2, k_tile + 1);
            if (s < GMM__BN / 64 && has_next && s < chunks_b)
                GMM__PART(gmm_qgemm_dequantize_b_)(args, load, codes, s % (GMM__BN / 64), k_tile + 1);
            if (GMM__BLOCK_SCALED && (s & 1) &&
                (args->block == 32 || (s == GMM__KT - 1 && (k_tile & 1 || !has_next))))
                GMM__PART(gmm_qgemm_promote_)(
                    w, (const float *)(void *)(load->slots + (k_tile & 3) * GMM__SLOT_BYTES) +
                           (args->block == 32 ? s / 2 * GMM__MN : 0), acc, sum);
        }
    }
}

/* The scales of a tile that are constant along k. */
typedef struct GMM__PART(gmm_qgemm_outer_) {
    float col[GMM__NT][2]; /* of the thread's columns */
    float alpha, inverse;  /* inverse: of the product of the operands' divisors */
    int empty;             /* an empty sum is +0 */
    int extreme;           /* plain products of scales may leave the range of normal numbers */
} GMM__PART(gmm_qgemm_outer_);
GMM__DEVICE void GMM__PART(gmm_qgemm_outer_begin_)(const gmm_qgemm_args *args, const gmm_qgemm_views *v,
                                                   const gmm_gemm_tile *t, int first_col, float alpha,
                                                   GMM__PART(gmm_qgemm_outer_) *o) {
    const int lane = (int)threadIdx.x & 31;
    const float divisor = gmm__fmul(gmm_qgemm_outer_divisor(&v->a, args->a.scaling),
                                    gmm_qgemm_outer_divisor(&v->b, args->b.scaling));
    int j, h;
    o->inverse = gmm__fdiv(1.0f, divisor);
    o->alpha = alpha;
    o->empty = t->k == 0;
    o->extreme = !gmm__scale_moderate(alpha);
#pragma unroll
    for (j = 0; j < GMM__NT; j++)
#pragma unroll
        for (h = 0; h < 2; h++) {
            const int32_t n = first_col + j * 8 + (lane & 3) * 2 + h;
            o->col[j][h] = !o->empty && n < args->p.n ? gmm_qgemm_outer_scale(&v->b, args->b.scaling, n) : 1.0f;
            o->extreme |= !gmm__scale_moderate(o->col[j][h]);
        }
    o->extreme = __any_sync(0xFFFFFFFFu, o->extreme);
}

/* Stores rows 8 i to 8 i + 7 of the warp's sums to shared memory at `sums`, scaled unless in_smem, which says that they
   are scaled there. row_scale: of the thread's row. */
GMM__DEVICE void GMM__PART(gmm_qgemm_write_rows_)(const GMM__PART(gmm_qgemm_outer_) *o, int i, int in_smem,
                                                  float row_scale, float *sums,
                                                  const float acc[GMM__MT][GMM__NT][4],
                                                  const float sum[GMM__SUM_MT][GMM__NT][4]) {
    const int lane = (int)threadIdx.x & 31;
    int s, j;
#pragma unroll
    for (s = 0; s < 2 * GMM__MT; s++)
        if (s == i) {
#pragma unroll
            for (j = 0; j < GMM__NT; j++) {
                const float *v = GMM__BLOCK_SCALED ? &sum[GMM__BLOCK_SCALED ? s / 2 : 0][j][s % 2 * 2]
                                                   : &acc[s / 2][j][s % 2 * 2];
                const float scale0 = in_smem ? 1.0f : gmm__fmul(gmm__fmul(row_scale, o->col[j][0]), o->inverse);
                const float scale1 = in_smem ? 1.0f : gmm__fmul(gmm__fmul(row_scale, o->col[j][1]), o->inverse);
                *(float2 *)&sums[(lane >> 2) * (GMM__WN + 8) + j * 8 + (lane & 3) * 2] =
                    make_float2(gmm__fmul(v[0], scale0), gmm__fmul(v[1], scale1));
            }
        }
    __syncwarp();
}
/* Scales 8 rows in shared memory one by one, which is rare: the tile and the views are read anew, so that they take no
   registers elsewhere. */
GMM__DEVICE void GMM__PART(gmm_qgemm_scale_rows_)(const gmm_qgemm_args *args, const gmm_gemm_tile *smem_tile,
                                                  const GMM__PART(gmm_qgemm_outer_) *o, int first_row, int first_col,
                                                  float *sums) {
    const gmm_gemm_tile t = *smem_tile;
    const gmm_qgemm_views v = gmm_qgemm_views_of(args, GMM__K_GROUPED, &t);
    int r;
#pragma unroll 1
    for (r = (int)threadIdx.x & 31; r < 8 * GMM__WN; r += 32) {
        const int32_t m = first_row + r / GMM__WN, n = first_col + r % GMM__WN;
        float *const f = &sums[r / GMM__WN * (GMM__WN + 8) + r % GMM__WN];
        if (m < t.m && n < args->p.n)
            *f = gmm__scale_sum(*f, o->alpha, gmm_qgemm_outer_scale(&v.a, args->a.scaling, m),
                                gmm_qgemm_outer_scale(&v.b, args->b.scaling, n), o->inverse);
    }
    __syncwarp();
}

/* The epilogue of a tile: applies the scales that are constant along k, then stores as mma/body_tensor.cuh does. */
GMM__DEVICE void GMM__PART(gmm_qgemm_store_tile_)(const gmm_qgemm_args *args, const gmm_gemm_tile *smem_tile,
                                                  const gmm_mma_warp *w, float *sums,
                                                  const float acc[GMM__MT][GMM__NT][4],
                                                  const float sum[GMM__SUM_MT][GMM__NT][4]) {
    const gmm_gemm_tile tile = *smem_tile;
    const gmm_qgemm_views v = gmm_qgemm_views_of(args, GMM__K_GROUPED, &tile);
    const int lane = (int)threadIdx.x & 31;
    const int32_t first_col = tile.n0 + w->n, col = first_col + lane % (GMM__WN / 4) * 4;
    gmm_gemm_epilogue epilogue = gmm_gemm_epilogue_begin(&args->p, GMM__K_GROUPED, &tile);
    GMM__PART(gmm_qgemm_outer_) outer;
    float bias[4] = { 0.0f, 0.0f, 0.0f, 0.0f };
    int i;
    GMM__PART(gmm_qgemm_outer_begin_)(args, &v, &tile, first_col, epilogue.alpha, &outer);
    epilogue.alpha = 1.0f;
    if (epilogue.bias)
        gmm_read4(args->p.bias.dtype, epilogue.bias + (int64_t)col * gmm_kmat_size(&args->p.bias), args->p.n - col,
                  epilogue.bias_vec4, bias);
#pragma unroll 1
    for (i = 0; i < 2 * GMM__MT; i++) { /* 8 rows at a time; a loop, so that the store code is expanded once */
        const int32_t first_row = tile.m0 + w->m + i * 8, frag_row = first_row + (lane >> 2);
        float row_scale = 1.0f;
        int in_smem; /* the accumulators are scaled one by one in shared memory */
        if (first_row >= tile.m) break;
        if (!outer.empty && frag_row < tile.m) row_scale = gmm_qgemm_outer_scale(&v.a, args->a.scaling, frag_row);
        in_smem = outer.extreme || __any_sync(0xFFFFFFFFu, !gmm__scale_moderate(row_scale));
        if (!outer.empty && frag_row < tile.m) row_scale = gmm__fmul(outer.alpha, row_scale);
        GMM__PART(gmm_qgemm_write_rows_)(&outer, i, in_smem, row_scale, sums, acc, sum);
        if (in_smem) GMM__PART(gmm_qgemm_scale_rows_)(args, smem_tile, &outer, first_row, first_col, sums);
        gmm_gemm_store_8_rows(&args->p, &epilogue, &tile, first_row, first_col, 128 / GMM__WN, sums, bias);
        __syncwarp();
    }
}

/* The GEMM of mma/body_tensor.cuh with quantized operands. Pipeline: codes of stage d + 2 are loaded into registers
   while those of stage d + 1 are dequantized into one of two shared buffers and stage d is multiplied from the
   other. Scales are loaded one stage earlier and stored in a ring of four slots. 8 warps, 2 along M and 4 along N. */
GMM__ROW_KERNEL __launch_bounds__(GMM_QGEMM_THREADS, 1) GMM__KERNEL_NAME(const __grid_constant__ gmm_qgemm_args args) {
    extern __shared__ __align__(1024) char gmm_shared[];
    const int warp = (int)threadIdx.x >> 5;
    const gmm_mma_warp w = gmm_mma_warp_init(warp / 4 * 64, warp % 4 * GMM__WN, GMM__TA, GMM__TB, GMM__A_ROW_BYTES,
                                             GMM__B_ROW_BYTES, GMM__A_BYTES);
    float *const sums = (float *)(void *)gmm_shared + warp * 8 * (GMM__WN + 8); /* the warp's, where stages were */
    gmm_gemm_tile *const smem_tile =
        (gmm_gemm_tile *)(void *)(gmm_shared + 2 * GMM__STAGE_BYTES + 4 * GMM__SLOT_BYTES);
    GMM__PART(gmm_qgemm_loads_) load;
    GMM__PART(gmm_qgemm_codes_) codes;
    gmm_gemm_tile tile;
    float acc[GMM__MT][GMM__NT][4], sum[GMM__SUM_MT][GMM__NT][4];
    int64_t tile_index = blockIdx.x;
    int i, j, h, row_blocks;

    load.smem = gmm_shared;
    load.slots = gmm_shared + 2 * GMM__STAGE_BYTES;
    load.scales.strides.block = load.scales.strides.block4 = 0;
    for (tile.g = 0;
         gmm_gemm_next_tile(&args.p, GMM__K_GROUPED, GMM_QGEMM_TILE_M, GMM__BN, &tile_index, &tile);
         tile_index += gridDim.x) {
        row_blocks = (tile.m - tile.m0 - w.m + 15) / 16; /* blocks of 16 rows that this warp has */
        GMM__PART(gmm_qgemm_loads_begin_)(&args, &load, &tile);
        GMM__PART(gmm_qgemm_load_first_)(&args, &load, &codes, &tile, smem_tile);
#pragma unroll
        for (i = 0; i < GMM__MT; i++)
#pragma unroll
            for (j = 0; j < GMM__NT; j++)
#pragma unroll
                for (h = 0; h < 4; h++) acc[i][j][h] = sum[GMM__BLOCK_SCALED ? i : 0][j][h] = 0.0f;
        gmm_gemm_prefetch(&args.p, GMM__K_GROUPED, &tile, GMM_QGEMM_TILE_M, GMM__BN);
        GMM__PART(gmm_qgemm_mainloop_)(&args, &load, &codes, &w, row_blocks, acc, sum);
        __syncthreads(); /* all stages have been read: their memory is reused for the results */
        GMM__PART(gmm_qgemm_store_tile_)(&args, smem_tile, &w, sums, acc, sum);
    }
    if (!GMM__K_GROUPED && args.p.zero_tail)
        gmm_gemm_zero_tail(&args.p.d, args.p.offsets[args.p.groups], args.p.capacity, args.p.n);
}
#undef GMM__A_IS_16BIT
#undef GMM__HAS_SCALES
#undef GMM__A_CHUNKS
#undef GMM__B_CHUNKS
#undef GMM__BN
#undef GMM__MN
#undef GMM__B_LOG2_MN64
#undef GMM__WN
#undef GMM__MT
#undef GMM__NT
#undef GMM__KT
#undef GMM__SUM_MT
#undef GMM__A_ROW_BYTES
#undef GMM__B_ROW_BYTES
#undef GMM__A_BYTES
#undef GMM__STAGE_BYTES
#undef GMM__SLOT_BYTES
#undef GMM__TA
#undef GMM__TB
#undef GMM__BLOCK_SCALED
#undef GMM__DTYPE
#undef GMM__K_GROUPED
#undef GMM__PART
#undef GMM__KERNEL_NAME
#undef GMM__OP
#undef GMM__KIND
#undef GMM__ROW
