/* ================================================================================== Body: FP8 product on Hopper === */

#elif GMM__BODY == GMM__BODY_FP8
#define GMM__KERNEL_NAME GMM__COLUMN(1, GMM__ROW)
#define GMM__TAG GMM__COLUMN(2, GMM__ROW)
#define GMM__SCALING GMM__COLUMN(3, GMM__ROW)
#define GMM__TILE GMM__COLUMN(4, GMM__ROW)
#define GMM__TILES GMM__COLUMN(5, GMM__ROW)
#define GMM__SECOND_TILE GMM__COLUMN(6, GMM__ROW)
#define GMM__IS_FAST GMM__CAT(GMM__FP8_IS_FAST_, GMM__SCALING)
#define GMM__IS_1D1D GMM__CAT(GMM__FP8_IS_1D1D_, GMM__SCALING)
#define GMM__CFG(name) (int)GMM__FP8(name, GMM__TILE)
#define GMM__INSTANCE(part) GMM__CAT(GMM__CAT(GMM__CAT(GMM__CAT(part, GMM__TAG), _), GMM__SCALING), _)
#define GMM__PART(part) GMM__CAT(GMM__INSTANCE(part), GMM__TILE)
/* A kernel with two tiles calls the functions of both; those of the second tile are defined by a row before, which
   defines no kernel. */
#if GMM__TILES == 2
#define GMM__SECOND_PART(part) GMM__CAT(GMM__INSTANCE(part), GMM__SECOND_TILE)
#define GMM__SECOND_SMEM GMM__FP8(tile_smem, GMM__SECOND_TILE)
#define GMM__IDLE_CONSUMERS (GMM__CFG(consumers) - (int)GMM__FP8(consumers, GMM__SECOND_TILE)) /* in the second tile */
#define GMM__CFG_OF(second_tile, name) ((second_tile) ? (int)GMM__FP8(name, GMM__SECOND_TILE) : GMM__CFG(name))
#else
#define GMM__CFG_OF(second_tile, name) ((void)(second_tile), GMM__CFG(name))
#endif
#define GMM__SCALING_VALUE (int)GMM__CAT(gmm_fp8_scaling_, GMM__SCALING)
/* The struct in shared memory, and the address of a member; base: of the struct. The scales of stages follow it. */
#define GMM__SMEM GMM__FP8(tile_smem, GMM__TILE)
#define GMM__SMEM_AT(member) (base + GMM__OFFSET(GMM__SMEM, member))
#define GMM__STAGE_SCALES GMM__PART(gmm_fp8_stage_scales_)
#define GMM__STAGE_SCALE_BYTES (int)sizeof(GMM__STAGE_SCALES)
#define GMM__ROW_SCALE_BYTES (int)offsetof(GMM__STAGE_SCALES, col)
#define GMM__LINE_SCALES GMM__FP8(line_scales, GMM__TILE)
/* Tiles of fwd and dgrad begin at multiples of so many columns: one of 192 columns may begin in the middle of a block
   of 128. Those of wgrad begin at multiples of their width. */
#define GMM__COL_ALIGN(tile_n) ((tile_n) == 128 ? 128 : 64)
#define GMM__ACC (GMM__CFG(tile_n) / 2)       /* accumulators per thread: 64 rows by the tile's columns */
#define GMM__PASSES (1 + GMM__CFG(glu))       /* over the contraction, per tile */
#define GMM__WGMMA(op) GMM__CAT(GMM__CAT(GMM__CAT(gmm_wgmma_, GMM__TAG), _), op)

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
/* Issues wgmma number `kk` of a stage's four: 64 rows by the tile's columns. Scaled sums start at 0 in every stage. */
GMM__DEVICE void GMM__PART(gmm_fp8_issue_)(float *acc, uint32_t desc_a, uint32_t desc_b, const int kk) {
    const uint64_t a = gmm_wgmma_desc_k_major(desc_a + kk * (32 >> 4));
    const uint64_t b = gmm_wgmma_desc_k_major(desc_b + kk * (32 >> 4));
    if (GMM__SCALING_VALUE == GMM_FP8_FAST || kk > 0) GMM__WGMMA(add)(GMM__CFG(tile_n) / 8, acc, a, b);
    else GMM__WGMMA(set)(GMM__CFG(tile_n) / 8, acc, a, b);
}
/* Moves on by a stage. */
GMM__DEVICE void GMM__PART(gmm_fp8_advance_)(gmm_fp8_pipeline *pipe) {
    gmm_fp8_next_stage(pipe, GMM__CFG(stages), GMM__CFG(stage_bytes), GMM__STAGE_SCALE_BYTES);
}
/* Releases the stages of a tile of which the consumer multiplies nothing, unread. */
GMM__DEVICE void GMM__PART(gmm_fp8_skip_stages_)(uint32_t k_tiles, gmm_fp8_pipeline *pipe) {
#pragma unroll 1
    for (; k_tiles > 0; k_tiles--) {
        gmm_fp8_wait_stage(pipe);
        __syncwarp(); /* a lane's arrival is that of the warp */
        gmm_fp8_release_stage(pipe, pipe->empty);
        GMM__PART(gmm_fp8_advance_)(pipe);
    }
}

#if GMM__IS_1D1D
/* Scales of a stage that a lane of the scale loader holds: of every 32nd row and column of the tile. */
#define GMM__LANE_ROWS (2 * GMM__CFG(consumers))
#define GMM__LANE_COLS (GMM__CFG(tile_n) / 32)
typedef struct GMM__PART(gmm_fp8_lane_scales_) {
    float row[GMM__LANE_ROWS], col[GMM__LANE_COLS];
} GMM__PART(gmm_fp8_lane_scales_);
/* Reads them, and 0 behind the last row and column. */
GMM__DEVICE void GMM__PART(gmm_fp8_read_scales_)(GMM__PART(gmm_fp8_lane_scales_) *v, const float *rows,
                                                 const float *cols, int32_t rows_left, int32_t cols_left) {
    int x;
#pragma unroll
    for (x = 0; x < GMM__LANE_ROWS; x++) v->row[x] = 32 * x < rows_left ? rows[32 * x] : 0.0f;
#pragma unroll
    for (x = 0; x < GMM__LANE_COLS; x++) v->col[x] = 32 * x < cols_left ? cols[32 * x] : 0.0f;
}
/* Passes those of stage number `iter` to the consumers, when its memory is free. */
GMM__DEVICE void GMM__PART(gmm_fp8_write_scales_)(const GMM__PART(gmm_fp8_lane_scales_) *v, uint32_t iter,
                                                  uint32_t stage_bars, uint32_t stage_scales_at) {
    const uint32_t lane = threadIdx.x & 31, s = iter % GMM__CFG(stages);
    const uint32_t to = stage_scales_at + s * GMM__STAGE_SCALE_BYTES;
    int x;
    gmm_mbarrier_wait(gmm_sm90_empty(stage_bars, s), (iter / GMM__CFG(stages) & 1) ^ 1);
#pragma unroll
    for (x = 0; x < GMM__LANE_ROWS; x++) gmm_st_shared_f32(to + 4 * lane + 128 * x, v->row[x]);
#pragma unroll
    for (x = 0; x < GMM__LANE_COLS; x++)
        gmm_fp8_store_column_scale(to + GMM__ROW_SCALE_BYTES + 16 * lane + 512 * x, v->col[x]);
    gmm_fence_proxy_async();
    __syncwarp();
    if (lane == 0) gmm_mbarrier_arrive(gmm_sm90_full(stage_bars, s));
}
/* The scale loader of 1d1d. A stage takes less time than a load from memory, so the scales of two stages are on their
   way to registers while those of one pass to the consumers. */
GMM__DEVICE void GMM__PART(gmm_fp8_load_scales_1d1d_)(const gmm_fp8_args *args, const gmm_fp8_tile *ring,
                                                      uint32_t bars, uint32_t stage_bars, uint32_t stage_scales_at) {
    uint32_t iter = 0, tile_index = 0;
    for (;; tile_index++) {
        const gmm_fp8_tile *const f = gmm_fp8_wait_tile(ring, bars, 0, tile_index, 0);
        const int32_t lane = (int32_t)(threadIdx.x & 31);
        GMM__PART(gmm_fp8_lane_scales_) v[2];
        const float *rows, *cols;
        int64_t step, block;
        int32_t rows_left, cols_left, next_row, next_col, k_tiles, k, i;
        if (f->t.row_blocks == 0) break;
        k_tiles = (int32_t)gmm_fp8_k_tiles(f->t.k);
        rows_left = f->t.k > 0 && f->t.cols > 0 ? f->t.rows - lane : 0;
        cols_left = f->t.k > 0 ? f->t.cols - lane : 0;
        rows = gmm_fp8_scales_a(args, f, &step) + f->t.m0 + lane;
        next_row = (int32_t)step;
        cols = gmm_fp8_scales_b(args, 1, f, &step, &block) + f->t.n0 + lane;
        next_col = (int32_t)step;
#pragma unroll 1
        for (k = -2; k < k_tiles; k += 2) {
#pragma unroll
            for (i = 0; i < 2; i++) {
                if (k + i >= k_tiles) break;
                if (k >= 0) GMM__PART(gmm_fp8_write_scales_)(&v[i], iter++, stage_bars, stage_scales_at);
                if (k + i + 2 >= k_tiles) continue;
                GMM__PART(gmm_fp8_read_scales_)(&v[i], rows, cols, rows_left, cols_left);
                rows += next_row;
                cols += next_col;
            }
        }
    }
}
#undef GMM__LANE_ROWS
#undef GMM__LANE_COLS

/* Multiplies a stage in 1d1d, where every element of its sum has a scale of its own, and adds the scaled sum to acc.
   The tensor cores multiply the scales, since threads would read them from shared memory, whose port the products
   need. Of two consumers each issues the products of a stage after the other has issued its own, so that one's
   additions and the other's products run side by side.
   first: a constant, of the tile. *is_full: whether the stage is known to be full, then whether the next one is. */
GMM__DEVICE void GMM__PART(gmm_fp8_multiply_stage_)(float acc[GMM__ACC], float partial[GMM__ACC], const int first,
                                                    const gmm_fp8_consumer_tile *tile, int wg, gmm_fp8_pipeline *pipe,
                                                    int *is_full, gmm_fp8_store *store) {
    const uint32_t empty = pipe->empty;
    const uint64_t desc_scales = gmm_wgmma_desc_blocks(pipe->column_scales, GMM_FP8_SCALE_BLOCK_BYTES, 0);
    const int alternates = tile->row_blocks > 1;
    float of_rows[2], scales[GMM__ACC];
    uint32_t rows[4];
    int u;
    if (!*is_full) gmm_fp8_wait_stage(pipe);
    if (alternates) gmm_order_wait(wg);
    gmm_wgmma_fence();
#pragma unroll
    for (u = 0; u < 4; u++) GMM__PART(gmm_fp8_issue_)(partial, pipe->desc_a, pipe->desc_b, u);
    gmm_wgmma_commit();
    of_rows[0] = gmm_ld_shared_f32(pipe->row_scales);
    of_rows[1] = gmm_ld_shared_f32(pipe->row_scales + 32);
    gmm_fp8_scale_fragment(of_rows, rows);
    gmm_wgmma_fence();
    gmm_wgmma_rs_bf16(GMM__CFG(tile_n) / 16, scales, rows, desc_scales, 0);
    gmm_wgmma_commit();
    if (alternates) gmm_order_arrive(wg ^ 1);
    if (first) gmm_fp8_pass_slot(store);
    GMM__PART(gmm_fp8_advance_)(pipe);
    GMM__WGMMA_WAIT(0);
    __syncwarp();
    gmm_fp8_release_stage(pipe, empty);
    *is_full = gmm_fp8_test_stage(pipe);
#pragma unroll
    for (u = 0; u < GMM__ACC; u++) {
        GMM__PIN_F32(partial[u]);
        GMM__PIN_F32(scales[u]);
        acc[u] = __fmaf_rn(partial[u], scales[u], first ? 0.0f : acc[u]);
    }
}
#elif !GMM__IS_FAST

/* Multiplies a stage and adds the sum, times its scales, to acc. Scales are multiplied between the first and the second
   product: the gap that this makes is the one with which three consumers are fastest (KERNELS.md, "FP8: the promoted
   mainloop"). first: a constant, of the tile. *is_full: whether the stage is known to be full, then whether the next
   one is. */
GMM__DEVICE void GMM__PART(gmm_fp8_multiply_stage_)(float acc[GMM__ACC], float partial[GMM__ACC], const int first,
                                                    const gmm_fp8_consumer_tile *tile, int wg, gmm_fp8_pipeline *pipe,
                                                    int *is_full, gmm_fp8_store *store) {
    const uint32_t empty = pipe->empty;
    /* The second block of 128 columns begins at the tile's column 64, else at column 128. */
    const int n0_at_64 = tile->n0 % 128 != 0;
    /* scales[b]: of columns 64 b and those behind them. A tile of 128 columns has one block of 128. Of 192 columns, the
       first 64 are in the first block, the last 64 in the second, those between in the second if n0_at_64. */
    float a_scales[2], block_scales[2], scales[GMM__CFG(tile_n) == 128 ? 1 : 3][2];
    int u, e;
    (void)wg;
    if (!*is_full) gmm_fp8_wait_stage(pipe);
    a_scales[0] = gmm_ld_shared_f32(pipe->row_scales);
    a_scales[1] = gmm_ld_shared_f32(pipe->row_scales + 32);
    gmm_ld_shared_v2_f32(pipe->column_scales, block_scales);
    gmm_wgmma_fence();
    GMM__PART(gmm_fp8_issue_)(partial, pipe->desc_a, pipe->desc_b, 0);
#pragma unroll
    for (u = 0; u < (GMM__CFG(tile_n) == 128 ? 1 : 3); u++)
#pragma unroll
        for (e = 0; e < 2; e++) {
            const int second_block = u == 2 || (u == 1 && n0_at_64);
            scales[u][e] = __fmul_rn(a_scales[e], second_block ? block_scales[1] : block_scales[0]);
            GMM__PIN_F32(scales[u][e]);
        }
#pragma unroll
    for (u = 1; u < 4; u++) GMM__PART(gmm_fp8_issue_)(partial, pipe->desc_a, pipe->desc_b, u);
    gmm_wgmma_commit();
    if (first) gmm_fp8_pass_slot(store);
    GMM__PART(gmm_fp8_advance_)(pipe);
    GMM__WGMMA_WAIT(0);
#pragma unroll
    for (u = 0; u < GMM__ACC; u++) GMM__PIN_F32(partial[u]);
    __syncwarp(); /* all lanes have read the stage's scales */
    gmm_fp8_release_stage(pipe, empty);
    *is_full = gmm_fp8_test_stage(pipe);
#pragma unroll
    for (u = 0; u < GMM__ACC / 8; u++) { /* 16 columns */
#pragma unroll
        for (e = 0; e < 8; e++) {
            const float scale = scales[GMM__CFG(tile_n) == 128 ? 0 : u / 4][e / 2 % 2];
            acc[8 * u + e] = __fmaf_rn(partial[8 * u + e], scale, first ? 0.0f : acc[8 * u + e]);
        }
    }
}
#endif

/* Mainloop of a consumer: multiplies the tile's stages, at least one. acc is set. */
#if GMM__IS_FAST
GMM__DEVICE void GMM__PART(gmm_fp8_mainloop_)(float acc[GMM__ACC], const gmm_fp8_consumer_tile *tile, int wg,
                                              gmm_fp8_pipeline *pipe, gmm_fp8_store *store) {
    const uint32_t k_tiles = gmm_fp8_k_tiles(tile->k);
    uint32_t k, previous_empty = 0; /* of the stage before */
    int is_full = 0, u;
    (void)wg;
#pragma unroll
    for (u = 0; u < GMM__ACC; u++) acc[u] = 0.0f;
#pragma unroll 1
    for (k = 0; k < k_tiles; k++) {
        if (!is_full) gmm_fp8_wait_stage(pipe);
        gmm_wgmma_fence();
#pragma unroll
        for (u = 0; u < 4; u++) GMM__PART(gmm_fp8_issue_)(acc, pipe->desc_a, pipe->desc_b, u);
        gmm_wgmma_commit();
        GMM__WGMMA_WAIT(1);
        if (k == 0) gmm_fp8_pass_slot(store);
        else gmm_fp8_release_stage(pipe, previous_empty);
        previous_empty = pipe->empty;
        GMM__PART(gmm_fp8_advance_)(pipe);
        is_full = gmm_fp8_test_stage(pipe);
    }
    GMM__WGMMA_WAIT(0);
    gmm_fp8_release_stage(pipe, previous_empty);
}
#else
GMM__DEVICE void GMM__PART(gmm_fp8_mainloop_)(float acc[GMM__ACC], const gmm_fp8_consumer_tile *tile, int wg,
                                              gmm_fp8_pipeline *pipe, gmm_fp8_store *store) {
    uint32_t k_tiles = gmm_fp8_k_tiles(tile->k);
    float partial[GMM__ACC];
    int is_full = 0, u;
#pragma unroll
    for (u = 0; u < GMM__ACC; u++) GMM__UNDEFINED_F32(partial[u]);
    GMM__PART(gmm_fp8_multiply_stage_)(acc, partial, 1, tile, wg, pipe, &is_full, store);
#pragma unroll 1
    while (--k_tiles > 0)
        GMM__PART(gmm_fp8_multiply_stage_)(acc, partial, 0, tile, wg, pipe, &is_full, store);
}
#endif
#endif
