
/* Offset of a member of a struct in shared memory, where addresses have 32 bits. */
#define GMM__OFFSET(type, member) ((uint32_t)offsetof(type, member))

/* Named barriers of a CTA. CONSUMER + i joins the 128 threads of consumer warp group i. ORDER + i makes warp group i
   wait until the other one arrives: in wgrad before it stores a tile, since slots are used in the order of tiles; in
   FP8 1d1d before it issues the products of a stage, so that one warp group multiplies while the other promotes. Id 3
   is CONSUMER + 2 in tiles with three consumers, and ORDER + 0 in tiles with two; no kernel uses both. */
enum {
    GMM_BAR_CTA = 0,      /* __syncthreads */
    GMM_BAR_CONSUMER = 1, /* + warp group: 1 to 3 */
    GMM_BAR_ORDER = 3     /* + warp group: 3 and 4 */
};

/* Joins the threads of a consumer warp group. */
GMM__DEVICE void gmm_consumer_sync(int wg) {
    if (wg) GMM__BAR_SYNC((int)GMM_BAR_CONSUMER + 1, 128);
    else GMM__BAR_SYNC((int)GMM_BAR_CONSUMER, 128);
}
/* The same where there are up to three of them. */
GMM__DEVICE void gmm_fp8_consumer_sync(int wg) { gmm_bar_sync_128(GMM_BAR_CONSUMER + wg); }
/* The order barrier of warp group `wg`: that warp group waits for the other one to arrive. */
GMM__DEVICE void gmm_order_wait(int wg) { gmm_bar_sync_256(GMM_BAR_ORDER + wg); }
GMM__DEVICE void gmm_order_arrive(int wg) { gmm_bar_arrive_256(GMM_BAR_ORDER + wg); }

/* mbarriers lie in shared memory, where code addresses them as 32-bit numbers. Stage: its operands have landed (full),
   all warps that read it are done (empty). */
typedef struct gmm_sm90_stage_barriers {
    uint64_t full, empty;
} gmm_sm90_stage_barriers;
/* Store slot: a consumer warp group may write it (empty), it has been written (full). */
typedef struct gmm_sm90_slot_barriers {
    uint64_t empty, full;
} gmm_sm90_slot_barriers;
/* Barriers of the 16-bit products besides those of stages, which depend on no tile. */
typedef struct gmm_sm90_barriers {
    uint64_t first_tile_planned;                 /* the early plan: the first tile, and the ends of the groups */
    uint64_t split_checked;                      /* the split has been compared with the early plan */
    uint64_t tile_full[GMM_SM90_TILE_RING];      /* an entry of the tile ring has been written */
    uint64_t batch_empty[GMM_SM90_TILE_BATCHES]; /* all readers of the ring have released a batch of entries */
    uint64_t last_stage_full[2];                 /* ping-pong: the last stage of the tile of warp group i is full */
    gmm_sm90_slot_barriers slot[GMM_SM90_STORE_SLOTS];
} gmm_sm90_barriers;
enum {
    GMM_SM90_MBARRIER_BYTES = sizeof(uint64_t),
    GMM_SM90_STAGE_BARRIERS_BYTES = sizeof(gmm_sm90_stage_barriers),
    GMM_SM90_SLOT_BARRIERS_BYTES = sizeof(gmm_sm90_slot_barriers)
};

/* Addresses of barriers. stage_bars: of stage 0; slot_bars: of slot 0; bars: of the gmm_sm90_barriers. */
GMM__DEVICE uint32_t gmm_sm90_full(uint32_t stage_bars, uint32_t s) {
    return stage_bars + s * GMM_SM90_STAGE_BARRIERS_BYTES + GMM__OFFSET(gmm_sm90_stage_barriers, full);
}
GMM__DEVICE uint32_t gmm_sm90_empty(uint32_t stage_bars, uint32_t s) {
    return stage_bars + s * GMM_SM90_STAGE_BARRIERS_BYTES + GMM__OFFSET(gmm_sm90_stage_barriers, empty);
}
GMM__DEVICE uint32_t gmm_sm90_slot_empty(uint32_t slot_bars, uint32_t slot) {
    return slot_bars + slot * GMM_SM90_SLOT_BARRIERS_BYTES + GMM__OFFSET(gmm_sm90_slot_barriers, empty);
}
GMM__DEVICE uint32_t gmm_sm90_slot_full(uint32_t slot_bars, uint32_t slot) {
    return slot_bars + slot * GMM_SM90_SLOT_BARRIERS_BYTES + GMM__OFFSET(gmm_sm90_slot_barriers, full);
}
/* Those of the slot of part number `part` of D in wgrad, which takes the slots one after the other. */
GMM__DEVICE uint32_t gmm_sm90_store_empty(uint32_t bars, uint32_t part) {
    return gmm_sm90_slot_empty(bars + GMM__OFFSET(gmm_sm90_barriers, slot), part % GMM_SM90_STORE_SLOTS);
}
GMM__DEVICE uint32_t gmm_sm90_store_full(uint32_t bars, uint32_t part) {
    return gmm_sm90_slot_full(bars + GMM__OFFSET(gmm_sm90_barriers, slot), part % GMM_SM90_STORE_SLOTS);
}
GMM__DEVICE uint32_t gmm_sm90_first_tile_planned(uint32_t bars) {
    return bars + GMM__OFFSET(gmm_sm90_barriers, first_tile_planned);
}
GMM__DEVICE uint32_t gmm_sm90_split_checked(uint32_t bars) {
    return bars + GMM__OFFSET(gmm_sm90_barriers, split_checked);
}
GMM__DEVICE uint32_t gmm_sm90_tile_full(uint32_t bars, uint32_t tile_index) {
    return bars + GMM__OFFSET(gmm_sm90_barriers, tile_full) +
           GMM_SM90_MBARRIER_BYTES * (tile_index % GMM_SM90_TILE_RING);
}
GMM__DEVICE uint32_t gmm_sm90_batch_empty(uint32_t bars, uint32_t batch) {
    return bars + GMM__OFFSET(gmm_sm90_barriers, batch_empty) +
           GMM_SM90_MBARRIER_BYTES * (batch % GMM_SM90_TILE_BATCHES);
}
GMM__DEVICE uint32_t gmm_sm90_last_stage_full(uint32_t bars, int wg) {
    return bars + GMM__OFFSET(gmm_sm90_barriers, last_stage_full) + GMM_SM90_MBARRIER_BYTES * (uint32_t)wg;
}

/* Waits until entry `tile_index` of the tile ring has been written. */
GMM__DEVICE void gmm_sm90_wait_tile(uint32_t bars, uint32_t tile_index) {
    gmm_mbarrier_wait(gmm_sm90_tile_full(bars, tile_index), tile_index / GMM_SM90_TILE_RING & 1);
}
/* Releases the batch of the tile ring that this warp has read, if tile number `tile` opens the next one. */
GMM__DEVICE void gmm_sm90_release_batch(uint32_t bars, uint32_t tile) {
    if (tile > 0 && tile % GMM_SM90_TILE_BATCH == 0)
        gmm_mbarrier_arrive(gmm_sm90_batch_empty(bars, tile / GMM_SM90_TILE_BATCH - 1));
}

/* The pipeline of stages as one warp sees it. Stage number n lies in stage n % stages of shared memory, whose full
   barrier then completes phase n / stages. */
typedef struct gmm_sm90_pipeline {
    uint32_t bars;         /* barriers of stage 0 */
    uint32_t stages, stage_bytes;
    uint32_t cluster_size; /* a consumer warp releases a stage at the empty barrier of each CTA of the cluster */
    uint32_t iter;         /* number of the next stage */
} gmm_sm90_pipeline;

/* Where a consumer warp of packed weights stands in the pipeline: the stage in shared memory, and the parity of the
   phase that its full barrier completes next. The empty barrier completes the phase of the other parity before that. */
typedef struct gmm_sm90_stage {
    uint32_t index, phase;
} gmm_sm90_stage;
/* That of stage number `iter`. */
GMM__DEVICE gmm_sm90_stage gmm_sm90_stage_at(uint32_t iter, uint32_t stages) {
    gmm_sm90_stage s;
    s.index = iter % stages;
    s.phase = iter / stages & 1;
    return s;
}
GMM__DEVICE void gmm_sm90_stage_advance(gmm_sm90_stage *s, uint32_t stages) {
    if (++s->index == stages) {
        s->index = 0;
        s->phase ^= 1;
    }
}
GMM__DEVICE void gmm_sm90_wait_full(uint32_t stage_bars, gmm_sm90_stage s) {
    gmm_mbarrier_wait(gmm_sm90_full(stage_bars, s.index), s.phase);
}
/* A consumer warp releases stage `index` in each CTA of the cluster: lane i at the empty barrier of CTA i. All lanes
   have waited for the stage and read it: a wgmma instruction or __syncwarp precedes the call. */
GMM__DEVICE void gmm_sm90_release_stage(const gmm_sm90_pipeline *pipe, uint32_t index) {
    const uint32_t lane = threadIdx.x & 31;
    if (lane < pipe->cluster_size) gmm_mbarrier_arrive_remote(gmm_sm90_empty(pipe->bars, index), lane);
}
/* Releases the stages of a tile of which the warp multiplies nothing, unread. */
GMM__DEVICE void gmm_sm90_skip_stages(uint32_t k_tiles, gmm_sm90_pipeline *pipe) {
    for (; k_tiles > 0; k_tiles--, pipe->iter++) {
        const uint32_t s = pipe->iter % pipe->stages;
        gmm_mbarrier_wait(gmm_sm90_full(pipe->bars, s), pipe->iter / pipe->stages & 1);
        __syncwarp(); /* a lane's arrival is that of the warp */
        gmm_sm90_release_stage(pipe, s);
    }
}
