/* Continues the #ifndef GMM__BODY of preface.cuh: each body is a branch, and the last one ends it. */
#elif !defined(GMM__ROW)
#error "gmm: a body needs GMM__ROW"

/* .............................................................................. Body: product on tensor cores ... */
#elif GMM__BODY == GMM__BODY_TENSOR
#define GMM__KERNEL_NAME GMM__COLUMN(1, GMM__ROW)
#define GMM__OP GMM__COLUMN(2, GMM__ROW)
#define GMM__TAG GMM__COLUMN(3, GMM__ROW)
#define GMM__TILE GMM__COLUMN(4, GMM__ROW)
#define GMM__CFG(name) (int)GMM__CAT(gmm_##name##_, GMM__TILE)
#define GMM__PART(part) GMM__CAT(GMM__CAT(GMM__CAT(GMM__CAT(GMM__CAT(part, GMM__OP), _), GMM__TAG), _), GMM__TILE)
#define GMM__TA (int)GMM__CAT(gmm_ta_, GMM__OP)
#define GMM__TB (int)GMM__CAT(gmm_tb_, GMM__OP)
#define GMM__K_GROUPED (int)GMM__CAT(gmm_k_grouped_, GMM__OP)
/* Columns of a warp, blocks of 16 rows and of 8 columns in them, and steps of 16 values of k in a stage. */
#define GMM__WN (GMM__CFG(bn) / GMM__CFG(wn))
#define GMM__MT (GMM__CFG(bm) / GMM__CFG(wm) / 16)
#define GMM__NT (GMM__WN / 8)
#define GMM__KT (GMM__CFG(bk) / 16)
/* Operands in a stage: bytes of their rows, of A, and of both. */
#define GMM__A_SHAPE gmm_stage_shape_of(GMM__TA, GMM__CFG(bm), GMM__CFG(bk), GMM__CFG(threads))
#define GMM__B_SHAPE gmm_stage_shape_of(GMM__TB, GMM__CFG(bn), GMM__CFG(bk), GMM__CFG(threads))
#define GMM__A_ROW_BYTES (2 * (GMM__TA ? GMM__CFG(bm) : GMM__CFG(bk)))
#define GMM__B_ROW_BYTES (2 * (GMM__TB ? GMM__CFG(bn) : GMM__CFG(bk)))
#define GMM__A_BYTES (2 * GMM__CFG(bm) * GMM__CFG(bk))
#define GMM__STAGE_BYTES (GMM__A_BYTES + 2 * GMM__CFG(bn) * GMM__CFG(bk))

/* Loads stage number q of a tile to `stage`. */
GMM__DEVICE void GMM__PART(gmm_tensor_load_stage_)(gmm_stage_loaders *load, char *stage, int q) {
    gmm_stage_load(&load->a, stage, q, GMM__A_SHAPE);
    gmm_stage_load(&load->b, stage + GMM__A_BYTES, q, GMM__B_SHAPE);
    gmm_cp_async_commit_group();
}

/* Loads the first stages of a tile. Returns how many stages it has; an empty group multiplies one stage of zeros. */
GMM__DEVICE int GMM__PART(gmm_tensor_load_first_)(const gmm_gemm_args *args, const gmm_gemm_tile *t,
                                                  gmm_stage_loaders *load, char *smem) {
    const int k_tiles = t->k > 0 ? (t->k + GMM__CFG(bk) - 1) / GMM__CFG(bk) : 1;
    int s;
    load->a = gmm_stage_loader_init(&args->a, 0, GMM__K_GROUPED ? t->row : t->row + t->m0, GMM__K_GROUPED ? t->m0 : 0,
                                    GMM__TA ? t->k : t->m - t->m0, GMM__TA ? t->m - t->m0 : t->k, GMM__A_SHAPE);
    load->b = gmm_stage_loader_init(&args->b, GMM__K_GROUPED ? 0 : t->g, GMM__K_GROUPED ? t->row : GMM__TB ? 0 : t->n0,
                                    GMM__TB ? t->n0 : 0, GMM__TB ? t->k : args->n - t->n0,
                                    GMM__TB ? args->n - t->n0 : t->k, GMM__B_SHAPE);
#pragma unroll
    for (s = 0; s < GMM__CFG(stages) - 1; s++) {
        if (s < k_tiles) GMM__PART(gmm_tensor_load_stage_)(load, smem + s * GMM__STAGE_BYTES, s);
        else gmm_cp_async_commit_group(); /* wait_group counts groups: one per stage, empty or not */
    }
    return k_tiles;
}

/* ldmatrix of K step s of the stage at `stage`: the warp's fragments of A and B. */
GMM__DEVICE void GMM__PART(gmm_tensor_load_fragments_)(const gmm_mma_warp *w, uint32_t stage, int s,
                                                       uint32_t a[GMM__MT][4], uint32_t b[GMM__NT / 2][4]) {
    int i, j;
#pragma unroll
    for (i = 0; i < GMM__MT; i++) gmm_mma_load_fragment(a[i], GMM__TA, stage, w->a, i, s, GMM__A_ROW_BYTES);
#pragma unroll
    for (j = 0; j < GMM__NT / 2; j++) gmm_mma_load_fragment(b[j], GMM__TB, stage, w->b, j, s, GMM__B_ROW_BYTES);
}

/* Adds the products of a K step to the sums of the warp's first `row_blocks` blocks of 16 rows. */
GMM__DEVICE void GMM__PART(gmm_tensor_multiply_)(float acc[GMM__MT][GMM__NT][4], const uint32_t a[GMM__MT][4],
                                                 const uint32_t b[GMM__NT / 2][4], int row_blocks) {
    int i, j;
#pragma unroll
    for (i = 0; i < GMM__MT; i++) {
        if (GMM__CFG(skip) && i >= row_blocks) continue;
#pragma unroll
        for (j = 0; j < GMM__NT; j++) GMM__CAT(gmm_mma_, GMM__TAG)(acc[i][j], a[i], &b[j / 2][j % 2 * 2]);
    }
}

/* Multiplies the stages of a tile, of which the first are on their way, and loads the others. */
GMM__DEVICE void GMM__PART(gmm_tensor_mainloop_)(const gmm_mma_warp *w, gmm_stage_loaders *load, char *smem,
                                                 int k_tiles, int row_blocks, float acc[GMM__MT][GMM__NT][4]) {
    enum { STAGES = GMM__CFG(stages), STAGE = GMM__STAGE_BYTES, KT = GMM__KT };
    const uint32_t shared = (uint32_t)__cvta_generic_to_shared(smem);
    uint32_t a[2][GMM__MT][4], b[2][GMM__NT / 2][4];
    int s, k_tile, read_offset = 0, write_offset = (STAGES - 1) * STAGE;
    GMM__CP_ASYNC_WAIT_GROUP(STAGES - 2);
    __syncthreads();
    GMM__PART(gmm_tensor_load_fragments_)(w, shared, 0, a[0], b[0]);
    for (k_tile = 0; k_tile < k_tiles; k_tile++) {
#pragma unroll
        for (s = 0; s < KT; s++) {
            /* fragments are loaded one K step ahead, also those of the next stage */
            if (s + 1 < KT)
                GMM__PART(gmm_tensor_load_fragments_)(w, shared + (uint32_t)read_offset, s + 1, a[(s + 1) & 1],
                                                      b[(s + 1) & 1]);
            else {
                read_offset = read_offset + STAGE == STAGES * STAGE ? 0 : read_offset + STAGE;
                GMM__CP_ASYNC_WAIT_GROUP(STAGES - 2);
                __syncthreads();
                if (k_tile + 1 < k_tiles)
                    GMM__PART(gmm_tensor_load_fragments_)(w, shared + (uint32_t)read_offset, 0, a[(s + 1) & 1],
                                                          b[(s + 1) & 1]);
            }
            if (s == 0) {
                if (k_tile + STAGES - 1 < k_tiles) {
                    GMM__PART(gmm_tensor_load_stage_)(load, smem + write_offset, k_tile + STAGES - 1);
                    write_offset = write_offset + STAGE == STAGES * STAGE ? 0 : write_offset + STAGE;
                } else gmm_cp_async_commit_group();
            }
            GMM__PART(gmm_tensor_multiply_)(acc, a[s & 1], b[s & 1], row_blocks);
        }
    }
}

/* The epilogue of a tile. `sums`: the warp's 8 rows of shared memory. */
GMM__DEVICE void GMM__PART(gmm_tensor_store_tile_)(const gmm_gemm_args *args, const gmm_gemm_tile *t,
                                                   const gmm_mma_warp *w, float *sums,
                                                   const float acc[GMM__MT][GMM__NT][4]) {
    enum { LD = GMM__CFG(store_ld), LANES = GMM__WN / 4 };
    const gmm_gemm_epilogue epilogue = gmm_gemm_epilogue_begin(args, GMM__K_GROUPED, t);
    const int lane = (int)threadIdx.x & 31;
    const int32_t col = t->n0 + w->n + lane % LANES * 4;
    float bias[4] = { 0.0f, 0.0f, 0.0f, 0.0f };
    int i, j, s;
    if (epilogue.bias) {
        const int size = gmm_kmat_size(&args->bias);
        gmm_read4(args->bias.dtype, epilogue.bias + (int64_t)col * size, args->n - col, epilogue.bias_vec4, bias);
    }
#pragma unroll 1
    for (i = 0; i < 2 * GMM__MT; i++) { /* 8 rows at a time; a loop, so that the store code is expanded once */
        const int32_t first_row = t->m0 + w->m + i * 8;
        if (first_row >= t->m) break;
#pragma unroll
        for (s = 0; s < 2 * GMM__MT; s++)
            if (s == i) {
#pragma unroll
                for (j = 0; j < GMM__NT; j++)
                    *(float2 *)&sums[(lane >> 2) * LD + j * 8 + (lane & 3) * 2] =
                        make_float2(acc[s / 2][j][s % 2 * 2], acc[s / 2][j][s % 2 * 2 + 1]);
            }
        __syncwarp();
        gmm_gemm_store_8_rows(args, &epilogue, t, first_row, t->n0 + w->n, 32 / LANES, sums, bias);
        __syncwarp();
    }
}

/* The 16-bit product on tensor cores (mma.sync), persistent: a CTA computes every gridDim.x-th tile. Operands are
   loaded by cp.async into a ring of STAGES stages; the fragments of the next K step are loaded while those of the
   present one are multiplied. Epilogue: accumulators pass through 8 rows of shared memory per warp, so that rows of D
   are stored by vector accesses, while the first stages of the next tile are in flight. */
GMM__ROW_KERNEL __launch_bounds__(GMM__CFG(threads), GMM__CFG(ctas))
GMM__KERNEL_NAME(const __grid_constant__ gmm_gemm_args args) {
    extern __shared__ __align__(1024) char gmm_shared[];
    const int warp = (int)threadIdx.x >> 5;
    const gmm_mma_warp w = gmm_mma_warp_init(warp / GMM__CFG(wn) * GMM__MT * 16, warp % GMM__CFG(wn) * GMM__WN, GMM__TA,
                                             GMM__TB, GMM__A_ROW_BYTES, GMM__B_ROW_BYTES, GMM__A_BYTES);
    float *const sums = (float *)(gmm_shared + GMM__CFG(stages) * GMM__STAGE_BYTES) + warp * 8 * GMM__CFG(store_ld);
    gmm_gemm_tile load_tile, mma_tile; /* the tile whose operands are loaded; the tile that is multiplied and stored */
    gmm_stage_loaders load;
    float acc[GMM__MT][GMM__NT][4];
    int64_t tile_index = blockIdx.x;
    int first_tile, i, j, h, row_blocks, k_tiles = 0;

    load_tile.g = mma_tile.g = 0;
    for (first_tile = 1;; first_tile = 0, tile_index += gridDim.x) {
        /* all stages have been read: the first stages of the next tile are loaded while the epilogue stores the
           previous tile */
        const int has_tile = gmm_gemm_next_tile(&args, GMM__K_GROUPED, GMM__CFG(bm), GMM__CFG(bn), &tile_index,
                                                &load_tile);
        if (has_tile) k_tiles = GMM__PART(gmm_tensor_load_first_)(&args, &load_tile, &load, gmm_shared);
        if (!first_tile) GMM__PART(gmm_tensor_store_tile_)(&args, &mma_tile, &w, sums, acc);
        if (!has_tile) break;

        mma_tile = load_tile;
        row_blocks = (mma_tile.m - mma_tile.m0 - w.m + 15) / 16; /* blocks of 16 rows that this warp has */
#pragma unroll
        for (i = 0; i < GMM__MT; i++)
#pragma unroll
            for (j = 0; j < GMM__NT; j++)
#pragma unroll
                for (h = 0; h < 4; h++) acc[i][j][h] = 0.0f;
        gmm_gemm_prefetch(&args, GMM__K_GROUPED, &mma_tile, GMM__CFG(bm), GMM__CFG(bn));
        GMM__PART(gmm_tensor_mainloop_)(&w, &load, gmm_shared, k_tiles, row_blocks, acc);
    }
    if (!GMM__K_GROUPED && args.zero_tail)
        gmm_gemm_zero_tail(&args.d, args.offsets[args.groups], args.capacity, args.n);
}
#undef GMM__A_SHAPE
#undef GMM__B_SHAPE
#undef GMM__A_ROW_BYTES
#undef GMM__B_ROW_BYTES
#undef GMM__A_BYTES
#undef GMM__STAGE_BYTES
#undef GMM__WN
#undef GMM__MT
#undef GMM__NT
#undef GMM__KT
#undef GMM__TA
#undef GMM__TB
#undef GMM__K_GROUPED
#undef GMM__PART
#undef GMM__CFG
#undef GMM__KERNEL_NAME
#undef GMM__OP
#undef GMM__TAG
#undef GMM__TILE
#undef GMM__ROW
