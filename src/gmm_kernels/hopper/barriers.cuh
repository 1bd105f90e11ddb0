/* Named barriers of a CTA. 0 is __syncthreads; 1 and 2 join the 128 threads of consumer warp group 0 and 1 (FP8: 1, 2
   and 3); 3 and 4 order the two warp groups. */
enum { GMM_BAR_CONSUMER = 1, GMM_BAR_ORDER = 3 };

/* Joins the threads of a consumer warp group. */
GMM__DEVICE void gmm_consumer_sync(int wg) {
    if (wg) GMM__BAR_SYNC((int)GMM_BAR_CONSUMER + 1, 128);
    else GMM__BAR_SYNC((int)GMM_BAR_CONSUMER, 128);
}
/* The same where there are up to three of them. */
GMM__DEVICE void gmm_fp8_consumer_sync(int wg) { gmm_bar_sync_128(GMM_BAR_CONSUMER + wg); }
/* Order barrier of warp group `wg`. With `wait` 1 that warp group blocks until the other one has arrived (`wait` 0). */
GMM__DEVICE void gmm_order_barrier(int wg, int wait) {
    if (wait) gmm_bar_sync_256(GMM_BAR_ORDER + wg);
    else gmm_bar_arrive_256(GMM_BAR_ORDER + wg);
}

/* mbarriers take 8 bytes. Stage s has two, one after the other: full (its operands have landed) and empty (all warps
   that read it are done). */
GMM__DEVICE uint32_t gmm_sm90_full(uint32_t stage_bars, uint32_t s) { return stage_bars + s * 16; }
GMM__DEVICE uint32_t gmm_sm90_empty(uint32_t stage_bars, uint32_t s) { return stage_bars + s * 16 + 8; }
/* Those of the store slot of part `part` of D, which takes the four slots one after the other: store_empty (a consumer
   warp group may write the slot) and store_full (it has been written). */
GMM__DEVICE uint32_t gmm_sm90_store_empty(uint32_t slot_bars, uint32_t part) { return slot_bars + part % 4 * 16; }
GMM__DEVICE uint32_t gmm_sm90_store_full(uint32_t slot_bars, uint32_t part) { return slot_bars + part % 4 * 16 + 8; }

/* The pipeline of stages as one warp sees it. Stage number n lies in stage n % stages of shared memory, whose full
   barrier then completes phase n / stages. */
typedef struct gmm_sm90_pipeline {
    uint32_t bars;         /* full barrier of stage 0 */
    uint32_t stages, stage_bytes;
    uint32_t cluster_size; /* a consumer warp releases a stage at the empty barrier of each CTA of the cluster */
    uint32_t iter;         /* number of the next stage */
} gmm_sm90_pipeline;
