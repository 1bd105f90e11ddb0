/* ............................................................... Body: product of quantized operands ... */
#elif GMM__BODY == 10

#ifndef GMM__ROW
#error "gmm: this body needs GMM__ROW"
#endif
#define GMM__KERNEL_NAME GMM__COLUMN(1, GMM__ROW)
#define GMM__OP GMM__COLUMN(2, GMM__ROW)
#define GMM__KIND GMM__COLUMN(3, GMM__ROW)

/* The GEMM of mma/body_tensor.cuh with quantized operands. Pipeline: codes of stage d + 2 are loaded into registers
   while those of stage d + 1 are dequantized into one of two shared buffers and stage d is multiplied from the
   other. Scales are loaded one stage earlier and stored in a ring of four slots. 8 warps, 2 along M and 4 along N. */
GMM__ROW_KERNEL __launch_bounds__(GMM_QGEMM_THREADS, 1) GMM__KERNEL_NAME(const __grid_constant__ gmm_qgemm_args args) {
    enum {
        TA = (int)GMM__CAT(gmm_qgemm_ta_, GMM__KIND), TB = (int)GMM__CAT(gmm_qgemm_tb_, GMM__KIND),
        BLOCK_SCALED = (int)GMM__CAT(gmm_qgemm_block_scaled_, GMM__KIND),
        RAGGED_K = (int)GMM__CAT(gmm_ragged_k_, GMM__OP),
        BM = GMM_QGEMM_TILE_M, BN = BLOCK_SCALED ? (int)gmm_qgemm_tile_n_1 : (int)gmm_qgemm_tile_n_0,
        MN = BM + BN, B_LOG2_MN64 = BLOCK_SCALED ? 1 : 2,
        WN = BN / 4, MT = 4, NT = WN / 8, KT = GMM_QGEMM_TILE_K / 16, /* 2 x 4 warps */
        /* of a row of a stage */
        A_ROW_BYTES = TA ? 2 * BM : 2 * GMM_QGEMM_TILE_K, B_ROW_BYTES = TB ? 2 * BN : 2 * GMM_QGEMM_TILE_K,
        A_BYTES = 2 * BM * GMM_QGEMM_TILE_K, STAGE = A_BYTES + 2 * BN * GMM_QGEMM_TILE_K,
        SLOT = BLOCK_SCALED ? (int)gmm_qgemm_slot_bytes_1 : (int)gmm_qgemm_slot_bytes_0, /* of scales */
        STORE_LD = WN + 8, STORE_LANES = WN / 4, STORE_ROWS = 32 / STORE_LANES
    };
    const gmm_dtype dtype = (gmm_dtype)GMM__CAT(gmm_qgemm_dtype_, GMM__KIND);
    extern __shared__ __align__(1024) char gmm_shared[];
    const uint32_t shared = (uint32_t)__cvta_generic_to_shared(gmm_shared);
    const int tid = (int)threadIdx.x, lane = tid & 31, warp = tid >> 5, warp_m = warp / 4 * 64, warp_n = warp % 4 * WN;
    const gmm_scaling scaling_a = args.a.scaling, scaling_b = args.b.scaling;
    const gmm_scaling scaling0 = tid < BM ? scaling_a : scaling_b;
    /* A holds 16-bit tokens, which are copied without conversion */
    const int a_is_16bit = !RAGGED_K && scaling_a == GMM_SCALING_NONE;
    const int has_scales = BLOCK_SCALED || scaling_b == GMM_SCALING_MX32 || scaling_b == GMM_SCALING_NV16;
    const int a_passes = a_is_16bit ? 0 : args.a.dtype == GMM_E2M1 ? 1 : 2;
    const int b_passes = (args.b.dtype == GMM_E2M1 ? 1 : 2) * (BN / 128);
    char *const slots = gmm_shared + 2 * STAGE;
    gmm_gemm_tile *const smem_tile = (gmm_gemm_tile *)(void *)(slots + 4 * SLOT);
    float *store_smem = (float *)(void *)gmm_shared + warp * 8 * STORE_LD;
    uint32_t a_offset, b_offset, a[2][4], b[NT / 2][4], scale_bits0, scale_bits1;
    uint4 codes_a[2], codes_b[BN / 64];
    gmm_gemm_tile tile;
    gmm_qgemm_operand operand_a, operand_b;
    /* thread t loads the scales of row t of A and B together and, of the wide tile, of row t + 256 */
    const uint8_t *first_scale0, *first_scale1;
    gmm_qgemm_scale_strides strides;
    float acc[MT][NT][4], sum[BLOCK_SCALED ? MT : 1][NT][4];
    int64_t tile_index = blockIdx.x;
    int i, j, h, r, s, k_tile, k_tiles;

    strides.block = strides.block4 = 0;
    if (TA)
        a_offset = gmm_swizzle((uint32_t)((lane & 7) + (lane >> 4) * 8), (uint32_t)(warp_m / 8 + (lane >> 3 & 1)),
                               A_ROW_BYTES);
    else a_offset = gmm_swizzle((uint32_t)(warp_m + (lane & 15)), (uint32_t)(lane >> 4), A_ROW_BYTES);
    if (TB) b_offset = gmm_swizzle((uint32_t)(lane & 15), (uint32_t)(warp_n / 8 + (lane >> 4)), B_ROW_BYTES);
    else
        b_offset = gmm_swizzle((uint32_t)(warp_n + (lane & 7) + (lane >> 4) * 8), (uint32_t)(lane >> 3 & 1),
                               B_ROW_BYTES);
    b_offset += A_BYTES;

/* ldmatrix of step s of the stage at `base`: fragments of 16 rows of A, and of all columns of B. */
#define GMM__LOAD_A(base, s, i) \
    if (TA) gmm_ldmatrix_x4_trans(a[(i) & 1], (base) + (a_offset ^ (uint32_t)((i) * 32)) + (s) * 16 * A_ROW_BYTES); \
    else gmm_ldmatrix_x4(a[(i) & 1], (base) + (a_offset ^ (uint32_t)((s) * 32)) + (i) * 16 * A_ROW_BYTES)
#define GMM__LOAD_B(base, s) \
    _Pragma("unroll") for (j = 0; j < NT / 2; j++) \
        if (TB) gmm_ldmatrix_x4_trans(b[j], (base) + (b_offset ^ (uint32_t)(j * 32)) + (s) * 16 * B_ROW_BYTES); \
        else gmm_ldmatrix_x4(b[j], (base) + (b_offset ^ (uint32_t)((s) * 32)) + j * 16 * B_ROW_BYTES)
/* Views of the operands of the tile's group. */
#define GMM__VIEWS \
    const int64_t start = (int64_t)args.p.tiles[tile.g] * GMM_QGEMM_TILE_M, rows = RAGGED_K ? tile.k : tile.m; \
    const gmm__qview view_a = gmm__qview_of(&args.a, args.a_along, 1, tile.g, tile.row, start, rows, args.a_cols); \
    const gmm__qview view_b = gmm__qview_of(&args.b, args.b_along, RAGGED_K, tile.g, RAGGED_K ? tile.row : 0, \
                                        RAGGED_K ? start : 0, RAGGED_K ? rows : args.b_rows, args.b_cols)
/* Stores the scales of stage q, which were loaded into registers before, and loads those of the next stage. */
#define GMM__STORE_SCALES(q) \
    gmm_qgemm_store_scales(dtype, BLOCK_SCALED, scaling0, scale_bits0, slots + ((q) & 3) * SLOT, tid, MN); \
    if (MN > 256 && tid < 128) \
        gmm_qgemm_store_scales(dtype, BLOCK_SCALED, scaling_b, scale_bits1, slots + ((q) & 3) * SLOT, tid + 256, MN); \
    GMM__LOAD_SCALES((q) + 1)
#define GMM__LOAD_SCALES(q) \
    scale_bits0 = gmm_qgemm_load_scales(first_scale0, \
                                        BLOCK_SCALED ? strides \
                                        : tid < BM   ? GMM__SCALE_STRIDES(a) \
                                                     : GMM__SCALE_STRIDES(b), \
                                        scaling0, q, k); \
    if (MN > 256 && tid < 128) \
        scale_bits1 = gmm_qgemm_load_scales(first_scale1, GMM__SCALE_STRIDES(b), scaling_b, q, k)
#define GMM__SCALE_STRIDES(x) gmm_qgemm_scale_strides_of(&args.x, GMM__CAT(gmm_qgemm_t##x##_, GMM__KIND), args.x##_cols)
/* Scales of stage t for the operand at byte `offset` of the stage; NULL: its elements are not scaled. */
#define GMM__ELEMENT_SCALES(t, offset) \
    (has_scales && !BLOCK_SCALED ? (const uint16_t *)(void *)(slots + ((t) & 3) * SLOT) + ((offset) ? BM : 0) : NULL)
/* Dequantizes chunk i of stage t into shared memory and loads the same chunk of the following stage into its
   registers. */
#define GMM__DEQUANTIZE_CHUNK(x, mn_major, log2_mn64, i, t, offset) \
    gmm_qgemm_dequantize_chunk(dtype, &args.x, mn_major, log2_mn64, i, codes_##x[i], \
                               gmm_shared + ((t) & 1) * STAGE + (offset), GMM__ELEMENT_SCALES(t, offset)); \
    codes_##x[i] = gmm_qgemm_load_chunk(&operand_##x, &args.x, mn_major, log2_mn64, i)

    for (tile.g = 0; gmm_gemm_next_tile(&args.p, RAGGED_K, BM, BN, &tile_index, &tile); tile_index += gridDim.x) {
        const int k = RAGGED_K ? (tile.k + args.k_round - 1) / args.k_round * args.k_round : tile.k;
        const int row_blocks = (tile.m - tile.m0 - warp_m + 15) / 16; /* blocks of 16 rows that this warp has */
        {
            GMM__VIEWS;
            operand_a = gmm_qgemm_operand_init(&args.a, &view_a, TA, 1, tile.row, tile.m0, tile.m, k);
            operand_b = gmm_qgemm_operand_init(&args.b, &view_b, TB, B_LOG2_MN64, 0, tile.n0, args.p.n, k);
            first_scale0 = tid < BM ? gmm_qgemm_first_scale(&view_a, scaling_a, tile.m0 + tid, tile.m)
                                    : gmm_qgemm_first_scale(&view_b, scaling_b, tile.n0 + tid - BM, args.p.n);
            first_scale1 = gmm_qgemm_first_scale(&view_b, scaling_b, tile.n0 + tid + 128, args.p.n);
            if (BLOCK_SCALED)
                strides = tid < BM ? gmm_qgemm_scale_strides_of(&args.a, TA, view_a.lines)
                                   : gmm_qgemm_scale_strides_of(&args.b, TB, view_b.lines);
        }
        /* an empty group multiplies one stage of zeros */
        k_tiles = k > 0 ? (k + GMM_QGEMM_TILE_K - 1) / GMM_QGEMM_TILE_K : 1;
#pragma unroll
        for (i = 0; i < 2; i++)
            if (i < a_passes) codes_a[i] = gmm_qgemm_load_chunk(&operand_a, &args.a, TA, 1, i);
#pragma unroll
        for (i = 0; i < BN / 64; i++)
            if (i < b_passes) codes_b[i] = gmm_qgemm_load_chunk(&operand_b, &args.b, TB, B_LOG2_MN64, i);
        if (has_scales) {
            scale_bits1 = 0;
            GMM__LOAD_SCALES(0);
            GMM__STORE_SCALES(0);
        }
        __syncthreads(); /* scales are stored, and the epilogue of the previous tile has finished with shared memory */
        if (tid == 0) *smem_tile = tile; /* in shared memory, so that it takes no registers in the mainloop */
        if (has_scales) {
            GMM__STORE_SCALES(1);
        }
        if (a_is_16bit) gmm_qgemm_copy_tokens(&operand_a, &args, &tile, gmm_shared);
        gmm_cp_async_commit_group();
        gmm_qgemm_operand_advance(&operand_a, &args.a, TA);
        gmm_qgemm_operand_advance(&operand_b, &args.b, TB);
#pragma unroll
        for (i = 0; i < 2; i++)
            if (i < a_passes) {
                GMM__DEQUANTIZE_CHUNK(a, TA, 1, i, 0, 0);
            }
#pragma unroll
        for (i = 0; i < BN / 64; i++)
            if (i < b_passes) {
                GMM__DEQUANTIZE_CHUNK(b, TB, B_LOG2_MN64, i, 0, A_BYTES);
            }
#pragma unroll
        for (i = 0; i < MT; i++)
#pragma unroll
            for (j = 0; j < NT; j++)
#pragma unroll
                for (h = 0; h < 4; h++) acc[i][j][h] = sum[BLOCK_SCALED ? i : 0][j][h] = 0.0f;
        gmm_gemm_prefetch(&args.p, RAGGED_K, &tile, BM, BN);

        for (k_tile = 0; k_tile < k_tiles; k_tile++) {
            const uint32_t base = shared + (uint32_t)((k_tile & 1) * STAGE);
            const int has_next = k_tile + 1 < k_tiles;
            GMM__CP_ASYNC_WAIT_GROUP(0);
            __syncthreads(); /* stage k_tile is complete, and the one before has been read */
            if (a_is_16bit && has_next)
                gmm_qgemm_copy_tokens(&operand_a, &args, smem_tile, gmm_shared + ((k_tile + 1) & 1) * STAGE);
            gmm_cp_async_commit_group();
            if (!a_is_16bit || has_next) gmm_qgemm_operand_advance(&operand_a, &args.a, TA);
            gmm_qgemm_operand_advance(&operand_b, &args.b, TB);
            if (has_scales) {
                GMM__STORE_SCALES(k_tile + 2);
            }
            GMM__LOAD_A(base, 0, 0);
            GMM__LOAD_B(base, 0);
#pragma unroll
            for (s = 0; s < KT; s++) { /* dequantization of the next stage is interleaved with the products */
#pragma unroll
                for (i = 0; i < MT; i++) {
                    if (i + 1 < MT) {
                        GMM__LOAD_A(base, s, i + 1);
                    }
                    if (i >= row_blocks) continue;
#pragma unroll
                    for (j = 0; j < NT; j++)
                        if (dtype == GMM_BF16) gmm_mma_bf16(acc[i][j], a[i & 1], &b[j / 2][j % 2 * 2]);
                        else gmm_mma_f16(acc[i][j], a[i & 1], &b[j / 2][j % 2 * 2]);
                }
                if (s + 1 < KT) {
                    GMM__LOAD_A(base, s + 1, 0);
                    GMM__LOAD_B(base, s + 1);
                }
                if (s < 2 && has_next && s < a_passes) {
                    GMM__DEQUANTIZE_CHUNK(a, TA, 1, s % 2, k_tile + 1, 0);
                }
                if (s < BN / 64 && has_next && s < b_passes) {
                    GMM__DEQUANTIZE_CHUNK(b, TB, B_LOG2_MN64, s % (BN / 64), k_tile + 1, A_BYTES);
                }
                if (BLOCK_SCALED && (s & 1) && (args.block == 32 || (s == KT - 1 && (k_tile & 1 || !has_next)))) {
                    const float *scale = (const float *)(void *)(slots + (k_tile & 3) * SLOT) +
                                         (args.block == 32 ? s / 2 * MN : 0);
                    const float ones[2] = { 1.0f, 1.0f }, *const col_scales = scale + BM + warp_n + (lane & 3) * 2;
#pragma unroll
                    for (i = 0; i < MT; i++) {
                        const float *const first = scale + warp_m + i * 16 + (lane >> 2);
                        float row_scales[2] = { first[0], first[8] };
                        const float lift[2] = { gmm__scale_lift(row_scales[0]), gmm__scale_lift(row_scales[1]) };
                        if (lift[0] == 1.0f && lift[1] == 1.0f) {
#pragma unroll
                            for (j = 0; j < NT; j++)
                                gmm_qgemm_promote(sum[BLOCK_SCALED ? i : 0][j], acc[i][j], row_scales,
                                                  col_scales + 8 * j, ones);
                        } else {
                            row_scales[0] *= 1.0f / lift[0];
                            row_scales[1] *= 1.0f / lift[1];
#pragma unroll
                            for (j = 0; j < NT; j++)
                                gmm_qgemm_promote(sum[BLOCK_SCALED ? i : 0][j], acc[i][j], row_scales,
                                                  col_scales + 8 * j, lift);
                        }
                    }
                }
            }
        }

        { /* epilogue: applies the scales that are constant along k, then stores as body 1 does */
            gmm_gemm_epilogue epilogue;
            __syncthreads(); /* all stages have been read: their memory is reused for the results */
            tile = *smem_tile;
            GMM__VIEWS;
            const float divisor = gmm__fmul(gmm_qgemm_outer_divisor(&view_a, scaling_a),
                                            gmm_qgemm_outer_divisor(&view_b, scaling_b));
            const float inverse = gmm__fdiv(1.0f, divisor);
            const int32_t col = tile.n0 + warp_n + lane % STORE_LANES * 4;
            const int empty = tile.k == 0; /* an empty sum is +0 */
            float bias[4] = { 0.0f, 0.0f, 0.0f, 0.0f }, col_scale[NT][2], alpha;
            int extreme; /* plain products of scales may leave the range of normal numbers */
            epilogue = gmm_gemm_epilogue_begin(&args.p, RAGGED_K, &tile);
            alpha = epilogue.alpha;
            epilogue.alpha = 1.0f;
            extreme = !gmm__scale_moderate(alpha);
#pragma unroll
            for (j = 0; j < NT; j++)
#pragma unroll
                for (h = 0; h < 2; h++) {
                    const int32_t n = tile.n0 + warp_n + j * 8 + (lane & 3) * 2 + h;
                    col_scale[j][h] = !empty && n < args.p.n ? gmm_qgemm_outer_scale(&view_b, scaling_b, n) : 1.0f;
                    extreme |= !gmm__scale_moderate(col_scale[j][h]);
                }
            extreme = __any_sync(0xFFFFFFFFu, extreme);
            if (epilogue.bias)
                gmm_read4(args.p.bias.dtype, epilogue.bias + (int64_t)col * gmm_kmat_size(&args.p.bias), args.p.n - col,
                          epilogue.bias_vec4, bias);
#pragma unroll 1
            for (i = 0; i < 2 * MT; i++) { /* 8 rows at a time; a loop, so that the store code is expanded once */
                const int32_t first_row = tile.m0 + warp_m + i * 8, row = first_row + lane / STORE_LANES;
                const int32_t frag_row = first_row + (lane >> 2);
                const float *src = store_smem + lane / STORE_LANES * STORE_LD + lane % STORE_LANES * 4;
                float row_scale = 1.0f;
                int in_smem; /* the accumulators are scaled one by one in shared memory */
                if (first_row >= tile.m) break;
                if (!empty && frag_row < tile.m) row_scale = gmm_qgemm_outer_scale(&view_a, scaling_a, frag_row);
                in_smem = extreme || __any_sync(0xFFFFFFFFu, !gmm__scale_moderate(row_scale));
                if (!empty && frag_row < tile.m) row_scale = gmm__fmul(alpha, row_scale);
#pragma unroll
                for (s = 0; s < 2 * MT; s++)
                    if (s == i) {
#pragma unroll
                        for (j = 0; j < NT; j++) {
                            const float *v = BLOCK_SCALED ? &sum[BLOCK_SCALED ? s / 2 : 0][j][s % 2 * 2]
                                                          : &acc[s / 2][j][s % 2 * 2];
                            const float scale0 =
                                in_smem ? 1.0f : gmm__fmul(gmm__fmul(row_scale, col_scale[j][0]), inverse);
                            const float scale1 =
                                in_smem ? 1.0f : gmm__fmul(gmm__fmul(row_scale, col_scale[j][1]), inverse);
                            *(float2 *)&store_smem[(lane >> 2) * STORE_LD + j * 8 + (lane & 3) * 2] =
                                make_float2(gmm__fmul(v[0], scale0), gmm__fmul(v[1], scale1));
                        }
                    }
                __syncwarp();
                if (in_smem) { /* rare; the views are recomputed, so that they take no registers elsewhere */
                    const gmm_gemm_tile tile = *smem_tile;
                    GMM__VIEWS;
#pragma unroll 1
                    for (r = lane; r < 8 * WN; r += 32) {
                        const int32_t m = first_row + r / WN, n = tile.n0 + warp_n + r % WN;
                        float *const v = &store_smem[r / WN * STORE_LD + r % WN];
                        if (m < tile.m && n < args.p.n)
                            *v = gmm__scale_sum(*v, alpha, gmm_qgemm_outer_scale(&view_a, scaling_a, m),
                                                gmm_qgemm_outer_scale(&view_b, scaling_b, n), inverse);
                    }
                    __syncwarp();
                }
                if (epilogue.vec4 && tile.m - first_row >= 8 && tile.n0 + warp_n + WN <= args.p.n) {
                    const int64_t pitch = args.p.d.ld * gmm_kmat_size(&args.p.d);
                    gmm_gemm_store_rows(&args.p, &epilogue,
                                        epilogue.d + row * pitch + (int64_t)col * gmm_kmat_size(&args.p.d),
                                        pitch * STORE_ROWS, row, STORE_ROWS, src, bias);
                } else {
#pragma unroll 1
                    for (r = 0; r < 8; r += STORE_ROWS) {
                        const float4 f = *(const float4 *)(const void *)(src + r * STORE_LD);
                        float v[4];
                        v[0] = f.x; v[1] = f.y; v[2] = f.z; v[3] = f.w;
                        if (row + r < tile.m && col < args.p.n)
                            gmm_gemm_store(&args.p, &epilogue, row + r, col, bias, v);
                    }
                }
                __syncwarp();
            }
        }
    }
    gmm_gemm_finish(&args.p, RAGGED_K, !RAGGED_K);
}
#undef GMM__LOAD_A
#undef GMM__LOAD_B
#undef GMM__VIEWS
#undef GMM__STORE_SCALES
#undef GMM__LOAD_SCALES
#undef GMM__SCALE_STRIDES
#undef GMM__DEQUANTIZE_CHUNK
#undef GMM__ELEMENT_SCALES
#undef GMM__KERNEL_NAME
#undef GMM__OP
#undef GMM__KIND
#undef GMM__ROW

