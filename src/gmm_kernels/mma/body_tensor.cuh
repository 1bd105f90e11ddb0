/* .............................................................................. Body: product on tensor cores ... */
#elif GMM__BODY == 1

#ifndef GMM__ROW
#error "gmm: this body needs GMM__ROW"
#endif
#define GMM__KERNEL_NAME GMM__COLUMN(1, GMM__ROW)
#define GMM__OP GMM__COLUMN(2, GMM__ROW)
#define GMM__TAG GMM__COLUMN(3, GMM__ROW)
#define GMM__TILE GMM__COLUMN(4, GMM__ROW)
#define GMM__GATHERED GMM__COLUMN(5, GMM__ROW)
#define GMM__CFG(name) (int)GMM__CAT(gmm_##name##_, GMM__TILE)

/* The 16-bit product on tensor cores (mma.sync), persistent: a CTA computes every gridDim.x-th tile. Operands are
   loaded by cp.async into a ring of STAGES stages; the fragments of the next K step are loaded while those of the
   present one are multiplied. Epilogue: accumulators pass through 8 rows of shared memory per warp, so that rows of D
   are stored by vector accesses, while the first stages of the next tile are in flight. */
GMM__ROW_KERNEL __launch_bounds__(GMM__CFG(threads), GMM__CFG(ctas))
GMM__KERNEL_NAME(const __grid_constant__ gmm_gemm_args args) {
    enum {
        TA = (int)GMM__CAT(gmm_ta_, GMM__OP), TB = (int)GMM__CAT(gmm_tb_, GMM__OP),
        RAGGED_K = (int)GMM__CAT(gmm_ragged_k_, GMM__OP),
        BM = GMM__CFG(bm), BN = GMM__CFG(bn), BK = GMM__CFG(bk), STAGES = GMM__CFG(stages), THREADS = GMM__CFG(threads),
        WARPS_N = GMM__CFG(wn), WM = BM / GMM__CFG(wm), WN = BN / WARPS_N, MT = WM / 16, NT = WN / 8, KT = BK / 16,
        A_ROW_BYTES = TA ? 2 * BM : 2 * BK, B_ROW_BYTES = TB ? 2 * BN : 2 * BK, /* of a row of a stage */
        A_BYTES = 2 * BM * BK, B_BYTES = 2 * BN * BK, STAGE = A_BYTES + B_BYTES,
        STORE_LD = GMM__CFG(store_ld), STORE_LANES = WN / 4, STORE_ROWS = 32 / STORE_LANES
    };
    const gmm_stage_shape a_shape = { A_ROW_BYTES, BM, TA ? BK : 0, TA ? 0 : BK, THREADS * 16 / A_ROW_BYTES,
                                      BM * BK / 8 / THREADS, GMM__GATHERED ? &args.a_index : NULL };
    const gmm_stage_shape b_shape = { B_ROW_BYTES, BN, TB ? BK : 0, TB ? 0 : BK, THREADS * 16 / B_ROW_BYTES,
                                      BN * BK / 8 / THREADS, GMM__GATHERED && RAGGED_K ? &args.b_index : NULL };
    extern __shared__ __align__(1024) char gmm_shared[];
    const uint32_t shared = (uint32_t)__cvta_generic_to_shared(gmm_shared);
    const int lane = (int)threadIdx.x & 31, warp = (int)threadIdx.x >> 5;
    const int warp_m = warp / WARPS_N * WM, warp_n = warp % WARPS_N * WN;
    float *store_smem = (float *)(gmm_shared + STAGES * STAGE) + warp * 8 * STORE_LD;
    uint32_t a_offset, b_offset; /* offset of this lane's row of the first 8 x 8 blocks in a stage */
    gmm_gemm_tile load_tile, mma_tile; /* the tile whose operands are loaded; the tile that is multiplied and stored */
    gmm_stage_loader load_a, load_b;
    float acc[MT][NT][4];
    uint32_t a[2][MT][4], b[2][NT / 2][4];
    int64_t tile_index = blockIdx.x;
    int first_tile, i, j, h, r, s, k_tile, k_tiles = 0, row_blocks, read_offset, write_offset;

    /* Order of the four 8 x 8 blocks of an ldmatrix. A: (m, k), (m + 8, k), (m, k + 8), (m + 8, k + 8). B: (n, k),
       (n, k + 8), (n + 8, k), (n + 8, k + 8). */
    if (TA)
        a_offset = gmm_swizzle((uint32_t)((lane & 7) + (lane >> 4) * 8), (uint32_t)(warp_m / 8 + (lane >> 3 & 1)),
                               A_ROW_BYTES);
    else a_offset = gmm_swizzle((uint32_t)(warp_m + (lane & 15)), (uint32_t)(lane >> 4), A_ROW_BYTES);
    if (TB) b_offset = gmm_swizzle((uint32_t)(lane & 15), (uint32_t)(warp_n / 8 + (lane >> 4)), B_ROW_BYTES);
    else
        b_offset = gmm_swizzle((uint32_t)(warp_n + (lane & 7) + (lane >> 4) * 8), (uint32_t)(lane >> 3 & 1),
                               B_ROW_BYTES);
    b_offset += A_BYTES;

/* Loads stage number q of the tile to byte `offset` of shared memory. */
#define GMM__LOAD_STAGE(q, offset) \
    gmm_stage_load(&load_a, gmm_shared + (offset), q, a_shape); \
    gmm_stage_load(&load_b, gmm_shared + (offset) + A_BYTES, q, b_shape); \
    gmm_cp_async_commit_group()
/* ldmatrix of K step s of the stage at `base`: the warp's fragments of A and B. */
#define GMM__LOAD_A(frag, base, s) \
    _Pragma("unroll") for (i = 0; i < MT; i++) \
        if (TA) gmm_ldmatrix_x4_trans((frag)[i], (base) + (a_offset ^ (uint32_t)(i * 32)) + (s) * 16 * A_ROW_BYTES); \
        else gmm_ldmatrix_x4((frag)[i], (base) + (a_offset ^ (uint32_t)((s) * 32)) + i * 16 * A_ROW_BYTES)
#define GMM__LOAD_B(frag, base, s) \
    _Pragma("unroll") for (j = 0; j < NT / 2; j++) \
        if (TB) gmm_ldmatrix_x4_trans((frag)[j], (base) + (b_offset ^ (uint32_t)(j * 32)) + (s) * 16 * B_ROW_BYTES); \
        else gmm_ldmatrix_x4((frag)[j], (base) + (b_offset ^ (uint32_t)((s) * 32)) + j * 16 * B_ROW_BYTES)

    load_tile.g = mma_tile.g = 0;
    for (first_tile = 1;; first_tile = 0, tile_index += gridDim.x) {
        /* all stages have been read: the first stages of the next tile are loaded while the epilogue stores the
           previous tile */
        const int has_tile = gmm_gemm_next_tile(&args, RAGGED_K, BM, BN, &tile_index, &load_tile);
        if (has_tile) {
            load_a = gmm_stage_loader_init(&args.a, 0, RAGGED_K ? load_tile.row : load_tile.row + load_tile.m0,
                                           RAGGED_K ? load_tile.m0 : 0, TA ? load_tile.k : load_tile.m - load_tile.m0,
                                           TA ? load_tile.m - load_tile.m0 : load_tile.k, a_shape);
            load_b = gmm_stage_loader_init(&args.b, RAGGED_K ? 0 : load_tile.g,
                                           RAGGED_K ? load_tile.row : TB ? 0 : load_tile.n0, TB ? load_tile.n0 : 0,
                                           TB ? load_tile.k : args.n - load_tile.n0,
                                           TB ? args.n - load_tile.n0 : load_tile.k, b_shape);
            /* an empty group multiplies one stage of zeros */
            k_tiles = load_tile.k > 0 ? (load_tile.k + BK - 1) / BK : 1;
#pragma unroll
            for (s = 0; s < STAGES - 1; s++) {
                if (s < k_tiles) {
                    GMM__LOAD_STAGE(s, s * STAGE);
                } else gmm_cp_async_commit_group(); /* wait_group counts groups: one per stage, empty or not */
            }
        }
        if (!first_tile) { /* epilogue */
            const gmm_gemm_epilogue epilogue = gmm_gemm_epilogue_begin(&args, RAGGED_K, &mma_tile);
            const int32_t col = mma_tile.n0 + warp_n + lane % STORE_LANES * 4;
            float bias[4] = { 0.0f, 0.0f, 0.0f, 0.0f };
            if (epilogue.bias) {
                const int size = gmm_kmat_size(&args.bias);
                gmm_read4(args.bias.dtype, epilogue.bias + (int64_t)col * size, args.n - col, epilogue.bias_vec4, bias);
            }
#pragma unroll 1
            for (i = 0; i < 2 * MT; i++) { /* 8 rows at a time; a loop, so that the store code is expanded once */
                const int32_t first_row = mma_tile.m0 + warp_m + i * 8, row = first_row + lane / STORE_LANES;
                const float *src = store_smem + lane / STORE_LANES * STORE_LD + lane % STORE_LANES * 4;
                if (first_row >= mma_tile.m) break;
#pragma unroll
                for (s = 0; s < 2 * MT; s++)
                    if (s == i) {
#pragma unroll
                        for (j = 0; j < NT; j++)
                            *(float2 *)&store_smem[(lane >> 2) * STORE_LD + j * 8 + (lane & 3) * 2] =
                                make_float2(acc[s / 2][j][s % 2 * 2], acc[s / 2][j][s % 2 * 2 + 1]);
                    }
                __syncwarp();
                if (epilogue.vec4 && mma_tile.m - first_row >= 8 && mma_tile.n0 + warp_n + WN <= args.n) {
                    const int64_t pitch = args.d.ld * gmm_kmat_size(&args.d);
                    gmm_gemm_store_rows(&args, &epilogue,
                                        epilogue.d + row * pitch + (int64_t)col * gmm_kmat_size(&args.d),
                                        pitch * STORE_ROWS, row, STORE_ROWS, src, bias);
                } else {
#pragma unroll 1
                    for (r = 0; r < 8; r += STORE_ROWS) {
                        const float4 f = *(const float4 *)(src + r * STORE_LD);
                        float v[4];
                        v[0] = f.x; v[1] = f.y; v[2] = f.z; v[3] = f.w;
                        if (row + r < mma_tile.m && col < args.n)
                            gmm_gemm_store(&args, &epilogue, row + r, col, bias, v);
                    }
                }
                __syncwarp();
            }
        }
        if (!has_tile) break;

        mma_tile = load_tile;
        row_blocks = (mma_tile.m - mma_tile.m0 - warp_m + 15) / 16; /* blocks of 16 rows that this warp has */
        read_offset = 0;
        write_offset = (STAGES - 1) * STAGE;
#pragma unroll
        for (i = 0; i < MT; i++)
#pragma unroll
            for (j = 0; j < NT; j++)
#pragma unroll
                for (h = 0; h < 4; h++) acc[i][j][h] = 0.0f;
        gmm_gemm_prefetch(&args, RAGGED_K, &mma_tile, BM, BN);
        GMM__CP_ASYNC_WAIT_GROUP(STAGES - 2);
        __syncthreads();
        GMM__LOAD_A(a[0], shared, 0);
        GMM__LOAD_B(b[0], shared, 0);
        for (k_tile = 0; k_tile < k_tiles; k_tile++) {
#pragma unroll
            for (s = 0; s < KT; s++) {
                /* fragments are loaded one K step ahead, also those of the next stage */
                if (s + 1 < KT) {
                    GMM__LOAD_A(a[(s + 1) & 1], shared + (uint32_t)read_offset, s + 1);
                    GMM__LOAD_B(b[(s + 1) & 1], shared + (uint32_t)read_offset, s + 1);
                } else {
                    read_offset = read_offset + STAGE == STAGES * STAGE ? 0 : read_offset + STAGE;
                    GMM__CP_ASYNC_WAIT_GROUP(STAGES - 2);
                    __syncthreads();
                    if (k_tile + 1 < k_tiles) {
                        GMM__LOAD_A(a[(s + 1) & 1], shared + (uint32_t)read_offset, 0);
                        GMM__LOAD_B(b[(s + 1) & 1], shared + (uint32_t)read_offset, 0);
                    }
                }
                if (s == 0) {
                    if (k_tile + STAGES - 1 < k_tiles) {
                        GMM__LOAD_STAGE(k_tile + STAGES - 1, write_offset);
                        write_offset = write_offset + STAGE == STAGES * STAGE ? 0 : write_offset + STAGE;
                    } else gmm_cp_async_commit_group();
                }
#pragma unroll
                for (i = 0; i < MT; i++) {
                    if (GMM__CFG(skip) && i >= row_blocks) continue;
#pragma unroll
                    for (j = 0; j < NT; j++)
                        GMM__CAT(gmm_mma_, GMM__TAG)(acc[i][j], a[s & 1][i], &b[s & 1][j / 2][j % 2 * 2]);
                }
            }
        }
    }
    gmm_gemm_finish(&args, RAGGED_K, GMM__GATHERED);
}
#undef GMM__LOAD_STAGE
#undef GMM__LOAD_A
#undef GMM__LOAD_B
#undef GMM__CFG
#undef GMM__KERNEL_NAME
#undef GMM__OP
#undef GMM__TAG
#undef GMM__TILE
#undef GMM__GATHERED
#undef GMM__ROW

