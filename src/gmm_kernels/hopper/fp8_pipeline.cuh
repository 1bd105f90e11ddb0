/* ............................................................ Grouped FP8 products: the pipeline of a consumer ... */

/* Where a consumer warp stands in the pipeline: what it needs of the next stage. It is computed while the products of
   the stage before run, so that the first product of a stage waits for the full barrier alone. */
typedef struct gmm_fp8_pipeline {
    uint32_t stage, parity;             /* number of the next stage in shared memory; parity of its phase */
    uint32_t desc_a, desc_b;            /* low words of descriptors: of the consumer's rows, of the tile's columns */
    uint32_t full;                      /* its full barrier */
    uint32_t empty;                     /* its empty barrier, in the CTA of the cluster at which this lane arrives */
    uint32_t row_scales, column_scales; /* its scales: of the thread's first row; of the tile's columns */
    int arrives;                        /* this lane arrives at empty barriers */
} gmm_fp8_pipeline;

/* That of the first stage. Addresses are those of stage 0. idle: consumers for which this one arrives too. */
GMM__DEVICE gmm_fp8_pipeline gmm_fp8_begin_pipeline(uint32_t a, uint32_t b, uint32_t stage_bars, uint32_t row_scales,
                                                    uint32_t column_scales, const int idle) {
    const uint32_t lane = (uint32_t)gmm_tid_x() & 31, ctas = gmm_cluster_nctarank();
    const uint32_t empty = gmm_mapa(gmm_sm90_empty(stage_bars, 0), lane & (ctas - 1));
    const gmm_fp8_pipeline p = { 0, 0, (uint32_t)gmm_wgmma_desc(a, 0), (uint32_t)gmm_wgmma_desc(b, 0),
                                 gmm_sm90_full(stage_bars, 0), empty, row_scales, column_scales, lane < ctas << idle };
    return p;
}
/* Waits until the next stage is full; gmm_fp8_test_stage says, without waiting, whether it is. */
GMM__DEVICE void gmm_fp8_wait_stage(const gmm_fp8_pipeline *p) { gmm_mbarrier_wait(p->full, p->parity); }
GMM__DEVICE int gmm_fp8_test_stage(const gmm_fp8_pipeline *p) { return gmm_mbarrier_test(p->full, p->parity); }
/* Releases the stage with this empty barrier to the producers of the cluster's CTAs. Whole warp, which has read the
   stage. */
GMM__DEVICE void gmm_fp8_release_stage(const gmm_fp8_pipeline *p, uint32_t empty) {
    if (p->arrives) gmm_mbarrier_arrive_mapped(empty);
}
/* Moves on by a stage. The sizes are constants, of the tile. */
GMM__DEVICE void gmm_fp8_next_stage(gmm_fp8_pipeline *p, const int stages, const int stage_bytes,
                                    const int scale_bytes) {
    const int wraps = ++p->stage == (uint32_t)stages;
    const uint32_t desc = (uint32_t)(wraps ? (1 - stages) * (stage_bytes >> 4) : stage_bytes >> 4);
    const uint32_t bars = (uint32_t)(wraps ? 1 - stages : 1) * (uint32_t)sizeof(gmm_sm90_stage_barriers);
    const uint32_t scales = (uint32_t)(wraps ? (1 - stages) * scale_bytes : scale_bytes);
    p->stage = wraps ? 0 : p->stage;
    p->parity ^= (uint32_t)wraps;
    p->desc_a += desc;
    p->desc_b += desc;
    p->full += bars;
    p->empty += bars;
    p->row_scales += scales;
    p->column_scales += scales;
}

/* How far a consumer has stored D. The last part that it has written may still have to be passed to the store warp:
   that is done behind the first products of its next tile, before it waits for the slot again, before it skips a tile,
   and at the end. */
typedef struct gmm_fp8_store {
    uint32_t parts;        /* parts of D that it has written to its slot */
    uint32_t pending_full; /* the slot's full barrier while the last of them has not been passed on, else 0 */
} gmm_fp8_store;
/* Passes a written slot to the store warp. Called behind the first products of a tile, so that these run while the
   fence waits for the writes. */
GMM__DEVICE void gmm_fp8_pass_slot(gmm_fp8_store *store) {
    if (!store->pending_full) return;
    gmm_fence_proxy_async();
    gmm_mbarrier_arrive(store->pending_full);
    store->pending_full = 0;
}
/* Waits until the slot of consumer `wg` may be written, for its next part. */
GMM__DEVICE void gmm_fp8_wait_slot(gmm_fp8_store *store, uint32_t slot_bars, int wg) {
    gmm_fp8_pass_slot(store);
    gmm_mbarrier_wait(gmm_sm90_slot_empty(slot_bars, (uint32_t)wg), store->parts++ & 1);
    store->pending_full = gmm_sm90_slot_full(slot_bars, (uint32_t)wg);
}

/* What a consumer reads of a tile's entry in the ring. */
typedef struct gmm_fp8_consumer_tile {
    const gmm_fp8_tile *f; /* for the epilogue; valid until the tile has been stored */
    int32_t row_blocks, k, n0, cols, d_flags;
    float outer_scale;
} gmm_fp8_consumer_tile;
GMM__DEVICE gmm_fp8_consumer_tile gmm_fp8_read_tile(const gmm_fp8_tile *f) {
    const gmm_fp8_consumer_tile tile = { f, f->t.row_blocks, f->t.k, f->t.n0, f->t.cols, f->d_flags, f->outer_scale };
    return tile;
}

/* Initialises the barriers of store slots with their arrivals per phase. store_lanes: that store a slot, a TMA box
   each. One thread. */
GMM__DEVICE void gmm_fp8_init_slots(uint32_t slot_bars, int consumers, int store_lanes) {
    int i;
    for (i = 0; i < consumers; i++) {
        gmm_mbarrier_init(gmm_sm90_slot_empty(slot_bars, (uint32_t)i), (uint32_t)store_lanes);
        gmm_mbarrier_init(gmm_sm90_slot_full(slot_bars, (uint32_t)i), 128);
    }
    gmm_fence_mbarrier_init();
}

/* Waits until the scheduler has chosen one of the kernel's two tiles. Returns whether it is the second. The vote makes
   the answer uniform for the compiler, which would else keep no wgmma descriptor in uniform registers. Whole warp. */
GMM__DEVICE int gmm_fp8_wait_choice(const gmm_fp8_barriers *barriers, uint32_t bars) {
    gmm_mbarrier_wait(gmm_fp8_tile_full(bars, 0), 0);
    return __any_sync(0xFFFFFFFFu, *(const volatile int32_t *)&barriers->second_tile);
}
