/* ............................................................... Body: product of quantized operands ... */
#elif GMM__BODY == 10

#if !defined(GMM__OP) || !defined(GMM__KIND)
#error "gmm: this body needs GMM__OP and GMM__KIND"
#endif
#define GMM__NAME GMM__CAT(GMM__CAT(GMM__CAT(gmm_linear_, GMM__OP), _quant_), GMM__KIND)

GMM__KERNEL __launch_bounds__(GMM_Q_THREADS, 1) GMM__NAME(const __grid_constant__ gmm_qgemm_args args) {
    enum {
        TA = (int)GMM__CAT(gmm_qa_, GMM__KIND), TB = (int)GMM__CAT(gmm_qb_, GMM__KIND),
        PARTS = (int)GMM__CAT(gmm_qparts_, GMM__KIND), RAGGED_K = (int)GMM__CAT(gmm_ragged_k_, GMM__OP),
        BM = GMM_Q_ROWS, BN = PARTS ? (int)gmm_q_cols_1 : (int)gmm_q_cols_0, LINES = BM + BN, BWIDE = PARTS ? 1 : 2,
        WN = BN / 4, MT = 4, NT = WN / 8, KT = GMM_Q_DEPTH / 16, /* 2 x 4 warps */
        A_LINE = TA ? 2 * BM : 2 * GMM_Q_DEPTH, B_LINE = TB ? 2 * BN : 2 * GMM_Q_DEPTH, /* bytes */
        A_BYTES = 2 * BM * GMM_Q_DEPTH, STAGE = A_BYTES + 2 * BN * GMM_Q_DEPTH,
        SLOT = PARTS ? (int)gmm_q_slot_1 : (int)gmm_q_slot_0, OUT_LD = WN + 8, OUT_LANES = WN / 4,
        OUT_ROWS = 32 / OUT_LANES
    };
    const gmm_dtype dtype = (gmm_dtype)GMM__CAT(gmm_qdtype_, GMM__KIND);
    extern __shared__ __align__(1024) char gmm_shared[];
    const uint32_t shared = (uint32_t)__cvta_generic_to_shared(gmm_shared);
    const int tid = (int)threadIdx.x, lane = tid & 31, warp = tid >> 5, warp_m = warp / 4 * 64, warp_n = warp % 4 * WN;
    const gmm_scaling sa = args.a.scaling, sb = args.b.scaling, s0 = tid < BM ? sa : sb;
    const int tokens = !RAGGED_K && sa == GMM_SCALING_NONE; /* A needs nothing but to travel */
    const int scaled = PARTS || sb == GMM_SCALING_MX32 || sb == GMM_SCALING_NV16;
    const int a_passes = tokens ? 0 : args.a.dtype == GMM_E2M1 ? 1 : 2;
    const int b_passes = (args.b.dtype == GMM_E2M1 ? 1 : 2) * (BN / 128);
    char *const slots = gmm_shared + 2 * STAGE;
    gmm_gemm_tile *const kept = (gmm_gemm_tile *)(void *)(slots + 4 * SLOT);
    float *out = (float *)(void *)gmm_shared + warp * 8 * OUT_LD;
    uint32_t a_at, b_at, a[2][4], b[NT / 2][4], next0, next1;
    uint4 ra[2], rb[BN / 64];
    gmm_gemm_tile tile;
    gmm_qside qa, qb;
    const uint8_t *line0, *line1;
    gmm_qsteps steps;
    float acc[MT][NT][4], sum[PARTS ? MT : 1][NT][4];
    int64_t at = blockIdx.x;
    int i, j, h, d, s, depth;

    steps.block = steps.four = 0;
    if (TA)
        a_at = gmm_swizzle((uint32_t)((lane & 7) + (lane >> 4) * 8), (uint32_t)(warp_m / 8 + (lane >> 3 & 1)), A_LINE);
    else a_at = gmm_swizzle((uint32_t)(warp_m + (lane & 15)), (uint32_t)(lane >> 4), A_LINE);
    if (TB) b_at = gmm_swizzle((uint32_t)(lane & 15), (uint32_t)(warp_n / 8 + (lane >> 4)), B_LINE);
    else b_at = gmm_swizzle((uint32_t)(warp_n + (lane & 7) + (lane >> 4) * 8), (uint32_t)(lane >> 3 & 1), B_LINE);
    b_at += A_BYTES;

/* Fragments of step s of the stage at `base`: of 16 rows, and of all columns. */
#define GMM__LOAD_A(base, s, i) \
    if (TA) gmm_ldmatrix_x4_trans(a[(i) & 1], (base) + (a_at ^ (uint32_t)((i) * 32)) + (s) * 16 * A_LINE); \
    else gmm_ldmatrix_x4(a[(i) & 1], (base) + (a_at ^ (uint32_t)((s) * 32)) + (i) * 16 * A_LINE)
#define GMM__LOAD_B(base, s) \
    _Pragma("unroll") for (j = 0; j < NT / 2; j++) \
        if (TB) gmm_ldmatrix_x4_trans(b[j], (base) + (b_at ^ (uint32_t)(j * 32)) + (s) * 16 * B_LINE); \
        else gmm_ldmatrix_x4(b[j], (base) + (b_at ^ (uint32_t)((s) * 32)) + j * 16 * B_LINE)
/* The operands of the tile's group. */
#define GMM__VIEWS \
    const int64_t start = (int64_t)args.p.tiles[tile.g] * GMM_Q_ROWS, rows = RAGGED_K ? tile.k : tile.m; \
    const gmm__qview va = gmm__qview_of(&args.a, args.a_along, 1, tile.g, tile.row, start, rows, args.a_cols); \
    const gmm__qview vb = gmm__qview_of(&args.b, args.b_along, RAGGED_K, tile.g, RAGGED_K ? tile.row : 0, \
                                        RAGGED_K ? start : 0, RAGGED_K ? rows : args.b_rows, args.b_cols)
/* Scales of stage q, asked for before, are kept; the next ones are asked for. */
#define GMM__KEEP(q) \
    gmm_q_keep(dtype, PARTS, s0, next0, slots + ((q) & 3) * SLOT, tid, LINES); \
    if (LINES > 256 && tid < 128) gmm_q_keep(dtype, PARTS, sb, next1, slots + ((q) & 3) * SLOT, tid + 256, LINES); \
    GMM__PEEK((q) + 1)
#define GMM__PEEK(q) \
    next0 = gmm_q_peek(line0, PARTS ? steps : tid < BM ? GMM__STEPS(a) : GMM__STEPS(b), s0, q, k); \
    if (LINES > 256 && tid < 128) next1 = gmm_q_peek(line1, GMM__STEPS(b), sb, q, k)
#define GMM__STEPS(x) gmm_q_steps(&args.x, GMM__CAT(gmm_q##x##_, GMM__KIND), args.x##_cols)
/* Chunk i of stage t becomes elements; its successor is asked for. */
#define GMM__EXPAND(x, apart, wide, i, t, first) \
    gmm_q_expand(dtype, &args.x, apart, wide, i, r##x[i], gmm_shared + ((t) & 1) * STAGE + (first), \
                 scaled && !PARTS ? (const uint16_t *)(void *)(slots + ((t) & 3) * SLOT) + ((first) ? BM : 0) : NULL, \
                 LINES); \
    r##x[i] = gmm_q_fetch(&q##x, &args.x, apart, wide, i)

    for (tile.g = 0; gmm_gemm_next_tile(&args.p, RAGGED_K, BM, BN, &at, &tile); at += gridDim.x) {
        const int k = RAGGED_K ? (tile.k + args.k_round - 1) / args.k_round * args.k_round : tile.k;
        const int blocks = (tile.m - tile.m0 - warp_m + 15) / 16; /* of 16 rows that this warp has */
        {
            GMM__VIEWS;
            gmm_q_open(&qa, &args.a, &va, TA, 1, tile.row, tile.m0, tile.m, k);
            gmm_q_open(&qb, &args.b, &vb, TB, BWIDE, 0, tile.n0, args.p.n, k);
            line0 = tid < BM ? gmm_q_line(&va, sa, tile.m0 + tid, tile.m)
                             : gmm_q_line(&vb, sb, tile.n0 + tid - BM, args.p.n);
            line1 = gmm_q_line(&vb, sb, tile.n0 + tid + 128, args.p.n);
            if (PARTS)
                steps = tid < BM ? gmm_q_steps(&args.a, TA, va.lines) : gmm_q_steps(&args.b, TB, vb.lines);
        }
        depth = k > 0 ? (k + GMM_Q_DEPTH - 1) / GMM_Q_DEPTH : 1; /* an empty group multiplies one stage of zeros */
#pragma unroll
        for (i = 0; i < 2; i++)
            if (i < a_passes) ra[i] = gmm_q_fetch(&qa, &args.a, TA, 1, i);
#pragma unroll
        for (i = 0; i < BN / 64; i++)
            if (i < b_passes) rb[i] = gmm_q_fetch(&qb, &args.b, TB, BWIDE, i);
        if (scaled) {
            next1 = 0;
            GMM__PEEK(0);
            GMM__KEEP(0);
        }
        __syncthreads(); /* scales are there, and results of the tile before have left */
        if (tid == 0) *kept = tile; /* not in registers while products are made */
        if (scaled) {
            GMM__KEEP(1);
        }
        if (tokens) gmm_q_bring(&qa, &args.a, gmm_shared);
        gmm_cp_async_commit_group();
        gmm_q_advance(&qa, &args.a, TA);
        gmm_q_advance(&qb, &args.b, TB);
#pragma unroll
        for (i = 0; i < 2; i++)
            if (i < a_passes) {
                GMM__EXPAND(a, TA, 1, i, 0, 0);
            }
#pragma unroll
        for (i = 0; i < BN / 64; i++)
            if (i < b_passes) {
                GMM__EXPAND(b, TB, BWIDE, i, 0, A_BYTES);
            }
#pragma unroll
        for (i = 0; i < MT; i++)
#pragma unroll
            for (j = 0; j < NT; j++)
#pragma unroll
                for (h = 0; h < 4; h++) acc[i][j][h] = sum[PARTS ? i : 0][j][h] = 0.0f;
        gmm_gemm_prefetch(&args.p, RAGGED_K, &tile, BM, BN);

        for (d = 0; d < depth; d++) {
            const uint32_t base = shared + (uint32_t)((d & 1) * STAGE);
            const int more = d + 1 < depth;
            GMM__CP_ASYNC_WAIT_GROUP(0);
            __syncthreads(); /* stage d is there, and d - 1 has been read */
            if (tokens && more) gmm_q_bring(&qa, &args.a, gmm_shared + ((d + 1) & 1) * STAGE);
            gmm_cp_async_commit_group();
            if (!tokens || more) gmm_q_advance(&qa, &args.a, TA);
            gmm_q_advance(&qb, &args.b, TB);
            if (scaled) {
                GMM__KEEP(d + 2);
            }
            GMM__LOAD_A(base, 0, 0);
            GMM__LOAD_B(base, 0);
#pragma unroll
            for (s = 0; s < KT; s++) { /* between products, a part of the next stage is made */
#pragma unroll
                for (i = 0; i < MT; i++) {
                    if (i + 1 < MT) {
                        GMM__LOAD_A(base, s, i + 1);
                    }
                    if (i >= blocks) continue;
#pragma unroll
                    for (j = 0; j < NT; j++)
                        if (dtype == GMM_BF16) gmm_mma_bf16(acc[i][j], a[i & 1], &b[j / 2][j % 2 * 2]);
                        else gmm_mma_f16(acc[i][j], a[i & 1], &b[j / 2][j % 2 * 2]);
                }
                if (s + 1 < KT) {
                    GMM__LOAD_A(base, s + 1, 0);
                    GMM__LOAD_B(base, s + 1);
                }
                if (s < 2 && more && s < a_passes) {
                    GMM__EXPAND(a, TA, 1, s % 2, d + 1, 0);
                }
                if (s < BN / 64 && more && s < b_passes) {
                    GMM__EXPAND(b, TB, BWIDE, s % (BN / 64), d + 1, A_BYTES);
                }
                if (PARTS && (s & 1) && (args.block == 32 || (s == KT - 1 && (d & 1 || !more)))) {
                    const float *scale = (const float *)(void *)(slots + (d & 3) * SLOT) +
                                         (args.block == 32 ? s / 2 * LINES : 0);
#pragma unroll
                    for (i = 0; i < MT; i++)
#pragma unroll
                        for (j = 0; j < NT; j++)
#pragma unroll
                            for (h = 0; h < 4; h++) {
                                const float x = scale[warp_m + i * 16 + (lane >> 2) + h / 2 * 8];
                                const float y = scale[BM + warp_n + j * 8 + (lane & 3) * 2 + h % 2];
                                sum[PARTS ? i : 0][j][h] = __fmaf_rn(__fmul_rn(acc[i][j][h], x), y,
                                                                     sum[PARTS ? i : 0][j][h]);
                                acc[i][j][h] = 0.0f;
                            }
                }
            }
        }

        { /* what is outside of the sums; then they leave as those of plain products do */
            gmm_gemm_out o;
            __syncthreads(); /* elements have been read: results stand there now */
            tile = *kept;
            GMM__VIEWS;
            const float share = gmm__fdiv(1.0f, gmm__fmul(gmm_q_largest(&va, sa), gmm_q_largest(&vb, sb)));
            const int32_t col = tile.n0 + warp_n + lane % OUT_LANES * 4;
            const int empty = tile.k == 0; /* an empty sum is +0 */
            float bias[4] = { 0.0f, 0.0f, 0.0f, 0.0f }, over[NT][2], alpha;
            o = gmm_gemm_epilogue_begin(&args.p, RAGGED_K, &tile);
            alpha = o.alpha;
            o.alpha = 1.0f;
#pragma unroll
            for (j = 0; j < NT; j++)
#pragma unroll
                for (h = 0; h < 2; h++) {
                    const int32_t n = tile.n0 + warp_n + j * 8 + (lane & 3) * 2 + h;
                    over[j][h] = !empty && n < args.p.n ? gmm_q_outer(&vb, sb, n) : 1.0f;
                }
            if (o.bias)
                gmm_read4(args.p.bias.dtype, o.bias + (int64_t)col * gmm_kmat_size(&args.p.bias), args.p.n - col,
                          o.bias_whole, bias);
#pragma unroll 1
            for (i = 0; i < 2 * MT; i++) { /* 8 rows at a time, so that one copy of the code that stores is enough */
                const int32_t first_row = tile.m0 + warp_m + i * 8, row = first_row + lane / OUT_LANES;
                const int32_t mine = first_row + (lane >> 2);
                const float *from = out + lane / OUT_LANES * OUT_LD + lane % OUT_LANES * 4;
                float outer = 1.0f;
                if (first_row >= tile.m) break;
                if (!empty && mine < tile.m) outer = gmm__fmul(alpha, gmm_q_outer(&va, sa, mine));
#pragma unroll
                for (s = 0; s < 2 * MT; s++)
                    if (s == i) {
#pragma unroll
                        for (j = 0; j < NT; j++) {
                            const float *v = PARTS ? &sum[PARTS ? s / 2 : 0][j][s % 2 * 2] : &acc[s / 2][j][s % 2 * 2];
                            *(float2 *)&out[(lane >> 2) * OUT_LD + j * 8 + (lane & 3) * 2] = make_float2(
                                gmm__fmul(v[0], gmm__fmul(gmm__fmul(outer, over[j][0]), share)),
                                gmm__fmul(v[1], gmm__fmul(gmm__fmul(outer, over[j][1]), share)));
                        }
                    }
                __syncwarp();
                if (o.whole && tile.m - first_row >= 8 && tile.n0 + warp_n + WN <= args.p.n) {
                    const int64_t pitch = args.p.d.ld * gmm_kmat_size(&args.p.d);
                    gmm_gemm_store_rows(&args.p, &o, 8 / OUT_ROWS,
                                        o.d + row * pitch + (int64_t)col * gmm_kmat_size(&args.p.d), pitch * OUT_ROWS,
                                        o.row_scale ? o.row_scale + row : NULL, OUT_ROWS, from, OUT_ROWS * OUT_LD,
                                        bias);
                } else {
#pragma unroll 1
                    for (d = 0; d < 8; d += OUT_ROWS) {
                        const float4 f = *(const float4 *)(const void *)(from + d * OUT_LD);
                        float v[4];
                        v[0] = f.x; v[1] = f.y; v[2] = f.z; v[3] = f.w;
                        if (row + d < tile.m && col < args.p.n) gmm_gemm_store(&args.p, &o, row + d, col, bias, v);
                    }
                }
                __syncwarp();
            }
        }
    }
    if (!RAGGED_K && args.p.zero_tail)
        gmm_gemm_tail(&args.p.d, args.p.offsets[args.p.groups], args.p.capacity, args.p.n);
}
#undef GMM__LOAD_A
#undef GMM__LOAD_B
#undef GMM__VIEWS
#undef GMM__KEEP
#undef GMM__PEEK
#undef GMM__STEPS
#undef GMM__EXPAND
#undef GMM__NAME
#undef GMM__KIND

