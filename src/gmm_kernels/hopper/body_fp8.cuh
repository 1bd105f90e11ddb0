/* ================================================================================== Body: FP8 product on Hopper === */

#elif GMM__BODY == 11
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
/* Issues the wgmmas of stage `stage`: 64 rows by the tile's columns. Scaled sums start at 0 in every stage. With 1d2d
   it returns the thread's lane: to read it takes the time between the first and the second product with which three
   consumers are fastest (KERNELS.md, "Sensitive loop"). */
GMM__DEVICE uint32_t GMM__PART(gmm_fp8_issue_stage_)(float *acc, uint32_t desc_a, uint32_t desc_b, uint32_t stage) {
    const uint32_t a = desc_a + stage * (GMM__CFG(stage_bytes) >> 4), b = desc_b + stage * (GMM__CFG(stage_bytes) >> 4);
    uint32_t lane = 0;
    int kk;
    gmm_wgmma_fence();
#pragma unroll
    for (kk = 0; kk < 4; kk++) {
        if (GMM__SCALING_VALUE == GMM_FP8_FAST || kk > 0)
            GMM__WGMMA(add)(GMM__CFG(tile_n) / 8, acc, gmm_wgmma_desc_k_major(a + kk * (32 >> 4)),
                            gmm_wgmma_desc_k_major(b + kk * (32 >> 4)));
        else GMM__WGMMA(set)(GMM__CFG(tile_n) / 8, acc, gmm_wgmma_desc_k_major(a), gmm_wgmma_desc_k_major(b));
        if (GMM__SCALING_VALUE == GMM_FP8_1D2D && kk == 0) lane = (uint32_t)gmm_tid_x() & 31;
    }
    gmm_wgmma_commit();
    return lane;
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

/* Mainloop of a consumer in 1d1d, where every element of a stage's sum has a scale of its own: gmm_fp8_mainloop_ with
   products of scales by the tensor cores in place of scales that threads read from shared memory, whose port the
   products need. order_wg: this consumer's number where two alternate, else -1. Each of two issues the products of a
   stage after the other has issued its own, so that one's additions and the other's products run side by side. */
GMM__DEVICE void GMM__PART(gmm_fp8_mainloop_1d1d_)(float acc[GMM__ACC], uint32_t k_tiles, uint32_t desc_a,
                                                   uint32_t desc_b, uint32_t row_scales_at, int order_wg,
                                                   gmm_sm90_pipeline *pipe) {
    const uint32_t end = pipe->iter + k_tiles;
    const uint32_t column_scales_at = pipe->bars - (int)offsetof(GMM__SMEM, stage_bars) + (int)sizeof(GMM__SMEM) +
                                      GMM__ROW_SCALE_BYTES;
    const uint64_t desc_scales = gmm_wgmma_desc_blocks(column_scales_at, GMM_FP8_SCALE_BLOCK_BYTES, 0);
    uint32_t k = pipe->iter, s;
    float partial[GMM__ACC], scales[GMM__ACC];
    int u;
#pragma unroll 1
    for (; k != end; k++) {
        float of_rows[2];
        uint32_t rows[4];
        s = __shfl_sync(0xFFFFFFFFu, k % GMM__CFG(stages), 0);
        gmm_mbarrier_wait(gmm_sm90_full(pipe->bars, s), k / GMM__CFG(stages) & 1);
        if (order_wg >= 0) gmm_order_wait(order_wg);
        GMM__PART(gmm_fp8_issue_stage_)(partial, desc_a, desc_b, s);
        of_rows[0] = gmm_ld_shared_f32(row_scales_at + s * GMM__STAGE_SCALE_BYTES);
        of_rows[1] = gmm_ld_shared_f32(row_scales_at + s * GMM__STAGE_SCALE_BYTES + 32);
        gmm_fp8_scale_fragment(of_rows, rows);
        gmm_wgmma_fence();
        gmm_wgmma_rs_bf16(GMM__CFG(tile_n) / 16, scales, rows, desc_scales + s * (GMM__STAGE_SCALE_BYTES >> 4), 0);
        gmm_wgmma_commit();
        if (order_wg >= 0) gmm_order_arrive(order_wg ^ 1);
        GMM__WGMMA_WAIT(0);
        __syncwarp();
        gmm_sm90_release_stage(pipe, s);
#pragma unroll
        for (u = 0; u < GMM__ACC; u++) {
            GMM__PIN_F32(partial[u]);
            GMM__PIN_F32(scales[u]);
            acc[u] = __fmaf_rn(partial[u], scales[u], acc[u]);
        }
    }
    pipe->iter = end;
}
#else

/* Mainloop of a consumer: accumulates `k_tiles` stages. desc_a, desc_b: low words of the descriptors of its rows and of
   the tile's columns in stage 0. row_scales_at: the scale of the thread's first row in stage 0, or 0 where all scales
   are 1. n0_at_64: the second block of 128 columns begins at the tile's column 64, else at column 128. arrivals: see
   gmm_fp8_release_stage. */
GMM__DEVICE void GMM__PART(gmm_fp8_mainloop_)(float acc[GMM__ACC], uint32_t k_tiles, uint32_t desc_a, uint32_t desc_b,
                                              uint32_t row_scales_at, int n0_at_64, uint32_t arrivals,
                                              gmm_sm90_pipeline *pipe) {
    const uint32_t end = pipe->iter + k_tiles;
    uint32_t k = pipe->iter, s;
#if GMM__IS_FAST
    const uint32_t lane = threadIdx.x & 31;
    (void)arrivals;
    (void)row_scales_at;
    (void)n0_at_64;
#pragma unroll 1
    for (; k != end; k++) {
        s = __shfl_sync(0xFFFFFFFFu, k % GMM__CFG(stages), 0);
        gmm_mbarrier_wait(gmm_sm90_full(pipe->bars, s), k / GMM__CFG(stages) & 1);
        GMM__PART(gmm_fp8_issue_stage_)(acc, desc_a, desc_b, s);
        GMM__WGMMA_WAIT(1);
        if (k != pipe->iter && lane < pipe->cluster_size)
            gmm_mbarrier_arrive_remote(gmm_sm90_empty(pipe->bars, (k - 1) % GMM__CFG(stages)), lane);
    }
    GMM__WGMMA_WAIT(0);
    gmm_sm90_release_stage(pipe, (k - 1) % GMM__CFG(stages));
#else
    const uint32_t column_scales_at = pipe->bars - (int)offsetof(GMM__SMEM, stage_bars) + (int)sizeof(GMM__SMEM) +
                                      GMM__ROW_SCALE_BYTES;
    float partial[GMM__ACC];
    uint32_t lane;
    int u, e;
#pragma unroll 1
    for (; k != end; k++) {
        float scales[GMM__CFG(tile_n) == 128 ? 1 : 3][2];
        float a_scales[2] = { 1.0f, 1.0f }, block_scales[2] = { 1.0f, 1.0f };
        s = __shfl_sync(0xFFFFFFFFu, k % GMM__CFG(stages), 0);
        gmm_mbarrier_wait(gmm_sm90_full(pipe->bars, s), k / GMM__CFG(stages) & 1);
        lane = GMM__PART(gmm_fp8_issue_stage_)(partial, desc_a, desc_b, s);
        /* one group is in flight: without this ptxas moves the scale loads between the wgmmas, which serializes them */
        GMM__WGMMA_WAIT(1);
        if (row_scales_at) {
            a_scales[0] = gmm_ld_shared_f32(row_scales_at + s * GMM__STAGE_SCALE_BYTES);
            a_scales[1] = gmm_ld_shared_f32(row_scales_at + s * GMM__STAGE_SCALE_BYTES + 32);
            gmm_ld_shared_v2_f32(column_scales_at + s * GMM__STAGE_SCALE_BYTES, block_scales);
        }
        /* scales[b]: of columns 64 b and those behind them. A tile of 128 columns has one block of 128. Of 192 columns,
           the first 64 are in the first block, the last 64 in the second, those between in the second if n0_at_64. */
#pragma unroll
        for (e = 0; e < 2; e++) {
            scales[0][e] = __fmul_rn(a_scales[e], block_scales[0]);
            if (GMM__CFG(tile_n) != 128) {
                scales[GMM__CFG(tile_n) / 64 - 1][e] = __fmul_rn(a_scales[e], block_scales[1]);
                scales[GMM__CFG(tile_n) / 128][e] = n0_at_64 ? scales[GMM__CFG(tile_n) / 64 - 1][e] : scales[0][e];
            }
        }
        GMM__WGMMA_WAIT(0);
#pragma unroll
        for (u = 0; u < GMM__ACC; u++) GMM__PIN_F32(partial[u]);
        __syncwarp(); /* all lanes have read the stage's scales */
        gmm_fp8_release_stage(pipe, s, lane, arrivals);
#pragma unroll
        for (u = 0; u < GMM__ACC / 8; u++) { /* 16 columns */
#pragma unroll
            for (e = 0; e < 8; e++) {
                const float scale = scales[GMM__CFG(tile_n) == 128 ? 0 : u / 4][e / 2 % 2];
                acc[8 * u + e] = __fmaf_rn(partial[8 * u + e], scale, acc[8 * u + e]);
            }
        }
    }
#endif
    pipe->iter = end;
}
#endif
#endif
