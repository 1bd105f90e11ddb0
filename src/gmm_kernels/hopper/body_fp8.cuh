/* ================================================================================== Body: FP8 product on Hopper === */

#elif GMM__BODY == 11
#ifndef GMM__ROW
#error "gmm: this body needs GMM__ROW"
#endif
#define GMM__KERNEL_NAME GMM__COLUMN(1, GMM__ROW)
#define GMM__TAG GMM__COLUMN(2, GMM__ROW)
#define GMM__SCALED GMM__COLUMN(3, GMM__ROW)
#define GMM__FAST GMM__COLUMN(4, GMM__ROW)
#define GMM__TILE GMM__COLUMN(5, GMM__ROW)
#define GMM__CFG(name) (int)GMM__FP8(name, GMM__TILE)
#define GMM__PART(part) GMM__CAT(GMM__CAT(GMM__CAT(GMM__CAT(GMM__CAT(part, GMM__TAG), _), GMM__SCALED), _), GMM__TILE)
#define GMM__KIND (int)GMM__CAT(gmm_fp8_scaling_, GMM__SCALED)
/* The struct in shared memory, and the address of a member; base: of the struct. The scales of stages follow it. */
#define GMM__SMEM GMM__FP8(tile_smem, GMM__TILE)
#define GMM__SMEM_AT(member) (base + GMM__OFFSET(GMM__SMEM, member))
#define GMM__STAGE_SCALES GMM__PART(gmm_fp8_stage_scales_)
#define GMM__STAGE_SCALE_BYTES (int)sizeof(GMM__STAGE_SCALES)
#define GMM__ROW_SCALE_BYTES (int)offsetof(GMM__STAGE_SCALES, col)
#define GMM__LINE_SCALES GMM__FP8(line_scales, GMM__TILE)
/* Alignment of a tile's first column: a tile of 192 columns may begin in the middle of a block of 128. */
#define GMM__STEP (GMM__CFG(tile_n) == 128 ? 128 : 64)
#define GMM__ACC (GMM__CFG(tile_n) / 2)       /* accumulators per thread: 64 rows by the tile's columns */
#define GMM__WGMMA(op) GMM__CAT(GMM__CAT(GMM__CAT(gmm_wgmma_, GMM__TAG), _), op)

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
/* Issues the wgmmas of stage `stage`: 64 rows by the tile's columns. Scaled sums start at 0 in every stage. */
GMM__DEVICE void GMM__PART(gmm_fp8_issue_stage_)(float *acc, uint32_t desc_a, uint32_t desc_b, uint32_t stage) {
    const uint32_t a = desc_a + stage * (GMM__CFG(stage_bytes) >> 4), b = desc_b + stage * (GMM__CFG(stage_bytes) >> 4);
    int kk;
    gmm_wgmma_fence();
#pragma unroll
    for (kk = 0; kk < 4; kk++)
        if (GMM__KIND == GMM_FP8_FAST || kk > 0)
            GMM__WGMMA(add)(GMM__CFG(tile_n) / 8, acc, gmm_wgmma_desc_k_major(a + kk * (32 >> 4)),
                            gmm_wgmma_desc_k_major(b + kk * (32 >> 4)));
        else GMM__WGMMA(set)(GMM__CFG(tile_n) / 8, acc, gmm_wgmma_desc_k_major(a), gmm_wgmma_desc_k_major(b));
    gmm_wgmma_commit();
}

/* Mainloop of a consumer: accumulates `k_tiles` stages. desc_a, desc_b: low words of the descriptors of its rows and of
   the tile's columns in stage 0. row_scales_at: the scale of the thread's first row in stage 0, or 0 where all scales
   are 1. n0_at_64: the second block of 128 columns begins at the tile's column 64, else at column 128. order: the
   consumer's number, 0 or 1, where two consumers alternate between wgmma and promotion; else -1. */
GMM__DEVICE void GMM__PART(gmm_fp8_mainloop_)(float acc[GMM__ACC], uint32_t k_tiles, uint32_t desc_a, uint32_t desc_b,
                                              uint32_t row_scales_at, int n0_at_64, int order,
                                              gmm_sm90_pipeline *pipe) {
    const uint32_t lane = threadIdx.x & 31, end = pipe->iter + k_tiles;
    uint32_t k = pipe->iter, s;
#if GMM__FAST
    (void)row_scales_at;
    (void)n0_at_64;
    (void)order;
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
    if (lane < pipe->cluster_size)
        gmm_mbarrier_arrive_remote(gmm_sm90_empty(pipe->bars, (k - 1) % GMM__CFG(stages)), lane);
#else
    const uint32_t column_scales_at = pipe->bars - (int)offsetof(GMM__SMEM, stage_bars) + (int)sizeof(GMM__SMEM) +
                                      GMM__ROW_SCALE_BYTES + (GMM__KIND == GMM_FP8_1D1D ? lane % 4 * 16 : 0);
    float partial[GMM__ACC];
    int u, e;
#pragma unroll 1
    for (; k != end; k++) {
        float scales[GMM__CFG(tile_n) == 128 ? 1 : 3][2], b_scales[4][4];
        float a_scales[2] = { 1.0f, 1.0f }, block_scales[2] = { 1.0f, 1.0f };
        s = __shfl_sync(0xFFFFFFFFu, k % GMM__CFG(stages), 0);
        gmm_mbarrier_wait(gmm_sm90_full(pipe->bars, s), k / GMM__CFG(stages) & 1);
        if (GMM__KIND == GMM_FP8_1D1D && order >= 0) gmm_order_barrier(order, 1);
        GMM__PART(gmm_fp8_issue_stage_)(partial, desc_a, desc_b, s);
        /* one group is in flight: without this ptxas moves the scale loads between the wgmmas, which serializes them */
        GMM__WGMMA_WAIT(1);
        if (row_scales_at) {
            a_scales[0] = gmm_ld_shared_f32(row_scales_at + s * GMM__STAGE_SCALE_BYTES);
            a_scales[1] = gmm_ld_shared_f32(row_scales_at + s * GMM__STAGE_SCALE_BYTES + 32);
            if (GMM__KIND == GMM_FP8_1D2D)
                gmm_ld_shared_v2_f32(column_scales_at + s * GMM__STAGE_SCALE_BYTES, block_scales);
        }
        if (GMM__KIND == GMM_FP8_1D1D) {
#pragma unroll
            for (u = 0; u < 4; u++)
                gmm_ld_shared_v4_f32(column_scales_at + s * GMM__STAGE_SCALE_BYTES + 64 * u, b_scales[u]);
        }
#pragma unroll
        for (e = 0; e < 2; e++) {
            scales[0][e] = GMM__KIND == GMM_FP8_1D2D ? __fmul_rn(a_scales[e], block_scales[0]) : a_scales[e];
            if (GMM__CFG(tile_n) != 128) {
                scales[GMM__CFG(tile_n) / 64 - 1][e] =
                    GMM__KIND == GMM_FP8_1D2D ? __fmul_rn(a_scales[e], block_scales[1]) : a_scales[e];
                scales[GMM__CFG(tile_n) / 128][e] = n0_at_64 ? scales[GMM__CFG(tile_n) / 64 - 1][e] : scales[0][e];
            }
        }
        GMM__WGMMA_WAIT(0);
        if (GMM__KIND == GMM_FP8_1D1D && order >= 0) gmm_order_barrier(order ^ 1, 0);
#pragma unroll
        for (u = 0; u < GMM__ACC; u++) GMM__PIN_F32(partial[u]);
        if (GMM__KIND != GMM_FP8_1D1D) { /* all lanes have read the stage's scales */
            __syncwarp();
            if (lane < pipe->cluster_size) gmm_mbarrier_arrive_remote(gmm_sm90_empty(pipe->bars, s), lane);
        }
#pragma unroll
        for (u = 0; u < GMM__ACC / 8; u++) { /* 16 columns */
#pragma unroll
            for (e = 0; e < 8; e++) {
                const float row = scales[GMM__CFG(tile_n) == 128 || GMM__KIND == GMM_FP8_1D1D ? 0 : u / 4][e / 2 % 2];
                acc[8 * u + e] = __fmaf_rn(partial[8 * u + e],
                                           GMM__KIND == GMM_FP8_1D2D
                                               ? row : __fmul_rn(row, b_scales[u % 4][e / 4 * 2 + e % 2]),
                                           acc[8 * u + e]);
            }
            if (GMM__KIND == GMM_FP8_1D1D && u + 4 < GMM__ACC / 8)
                gmm_ld_shared_v4_f32(column_scales_at + s * GMM__STAGE_SCALE_BYTES + 64 * (u + 4), b_scales[u % 4]);
        }
        if (GMM__KIND == GMM_FP8_1D1D) {
            __syncwarp();
            if (lane < pipe->cluster_size) gmm_mbarrier_arrive_remote(gmm_sm90_empty(pipe->bars, s), lane);
        }
    }
#endif
    pipe->iter = end;
}
#endif
