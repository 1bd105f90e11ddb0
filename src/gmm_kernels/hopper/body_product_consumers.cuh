/* GMM__BODY_PRODUCT, continued: the consumer warp groups. */
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
/* Multiplies a tile: the mainloop for its rows, which are a constant of wgmma. */
GMM__DEVICE void GMM__PART(gmm_sm90_multiply_)(const gmm_sm90_tile *t, const volatile int32_t *small_m,
                                               float acc[GMM__CFG(wgmma_m)][8 * GMM__CFG(m16)],
                                               const gmm_sm90_operands *operands, uint32_t last_stage_full,
                                               gmm_sm90_pipeline *pipe, gmm_sm90_store_state *store,
                                               const uint32_t deferred[GMM__DEFERRED_WORDS]) {
    int j, u;
#pragma unroll
    for (j = 0; j < (GMM__ZERO_INIT ? 0 : GMM__CFG(wgmma_m)); j++)
#pragma unroll
        for (u = 0; u < 8 * GMM__CFG(m16); u++) acc[j][u] = 0.0f;
    switch (GMM__K_GROUPED ? (t->rows + 63) / 64 * 8 : gmm_sm90_wgmma_n8(t->rows)) {
#define GMM__MAINLOOP(n8, small_m) \
    GMM__PART(gmm_sm90_mainloop_)(n8, small_m, acc, operands, last_stage_full, pipe, store, deferred)
#define GMM__PACKED_MAINLOOP(m16) \
    gmm_sm90_packed_mainloop(GMM__CFG(b_format), m16, acc[0], operands->k_tiles, operands->packed_at, \
                             operands->scales_at, operands->desc_a, pipe)
/* in branches that are never reached, the arguments fall back to a size that the accumulators have */
#define GMM__X(n8, u, n, b, a, c) \
        case n8: \
            if (n8 <= 2 * GMM__CFG(m16) && GMM__CFG(b_format)) { \
                GMM__PACKED_MAINLOOP(n8 <= 2 * GMM__CFG(m16) ? (n8 + 1) / 2 : 1); \
            } else if (GMM__HAS_N8(n8) && 8 * n8 <= GMM__SMALL_M(GMM__CFG(tile_n)) && *small_m) \
                GMM__MAINLOOP(GMM__HAS_N8(n8) ? n8 : 2, 1); \
            else if (GMM__HAS_N8(n8)) GMM__MAINLOOP(GMM__HAS_N8(n8) ? n8 : 2, 0); \
            break;
    GMM_WGMMA_LIST(GMM__X)
#undef GMM__X
#undef GMM__PACKED_MAINLOOP
#undef GMM__MAINLOOP
    default: break;
    }
#pragma unroll
    for (j = 0; j < GMM__CFG(wgmma_m); j++)
#pragma unroll
        for (u = 0; u < 8 * GMM__CFG(m16); u++) GMM__PIN_F32(acc[j][u]);
}

/* Skips a tile of which the warp group has no columns: releases its stages unread, and in wgrad keeps the order of the
   tiles' stores. `first`: of the CTA. */
GMM__DEVICE void GMM__PART(gmm_sm90_skip_tile_)(uint32_t k_tiles, uint32_t bars, int wg, int first,
                                                gmm_sm90_pipeline *pipe) {
    gmm_sm90_skip_stages(k_tiles, pipe);
    if (GMM__CFG(consumers) == 1 && (threadIdx.x & 31) == 0) gmm_mbarrier_arrive(gmm_sm90_last_stage_full(bars, wg));
    if (GMM__K_GROUPED) {
        if (!first) gmm_order_wait(wg);
        gmm_order_arrive(wg ^ 1);
    }
}

/* A consumer warp group: mainloop, then epilogue, for every tile of the ring. */
GMM__DEVICE void GMM__PART(gmm_sm90_consume_tiles_)(const GMM__ARGS &args, GMM__SMEM *smem, const uint32_t base) {
    const gmm_sm90_tile *const ring = smem->ring.tile;
    const uint32_t stage_bars = GMM__SMEM_AT(stage_bars), bars = GMM__SMEM_AT(bars);
    const int lane = (int)threadIdx.x & 31, w = (int)threadIdx.x >> 5 & 3;
    const int size = gmm_kmat_size(&args.p.d);
    const int64_t pitch = args.p.d.ld * size;
    float acc[GMM__CFG(wgmma_m)][8 * GMM__CFG(m16)];
    gmm_sm90_pipeline pipe = { stage_bars, GMM__CFG(stages), GMM__CFG(stage_bytes), 1, 0 };
    gmm_sm90_store_state store = { &args, ring, 0, smem->slot[0], 0, 0 };
    uint32_t tile_index = 0, deferred[GMM__DEFERRED_WORDS];
    int u;
#pragma unroll
    for (u = 0; u < GMM__DEFERRED_WORDS; u++) deferred[u] = 0;
    for (;; tile_index++) {
        const gmm_sm90_tile *const t = &ring[tile_index % GMM_SM90_TILE_RING];
        /* recomputed for every tile: a value that lived on would take a register from the epilogue */
        const int wg = __shfl_sync(0xFFFFFFFFu, gmm_tid_x() >> 7, 0);
        /* first column of the warp group in the tile */
        const int col0 = GMM__CFG(consumers) == 1 ? 0 : 64 * GMM__CFG(wgmma_m) * wg;
        uint32_t stage0 = base;
        gmm_sm90_operands operands;
        gmm_sm90_output out;
        store.tile = &ring[(tile_index - 1) % GMM_SM90_TILE_RING];
        store.wg = wg;
        store.slots = GMM__STORE_SLOT(wg, store.part);
        __syncwarp();
        /* a deferred store still reads the previous tile */
        if (lane == 0) gmm_sm90_release_batch(bars, tile_index - (GMM__DEFERRED != 0));
        gmm_sm90_wait_tile(bars, tile_index);
        if (GMM__DEFERRED && store.pending > 0 && t->row_blocks == 0 && args.d_by_tma)
            GMM__PART(gmm_sm90_store_last_)(&store, base, deferred);
        while (GMM__DEFERRED && store.pending > 0 && t->cols <= col0) /* no mainloop follows that could store them */
            GMM__PART(gmm_sm90_store_deferred_)(&store, deferred);
        if (t->row_blocks == 0) {
            if (GMM__K_GROUPED && tile_index > 0 && (int)(tile_index & 1) == wg) gmm_order_wait(wg);
            break;
        }
        operands.k_tiles = gmm_sm90_k_tiles(t->k);
        pipe.cluster_size = gmm_cluster_nctarank(); /* re-read, for the same reason */
        if (GMM__CFG(consumers) == 1 && (int)(tile_index & 1) != wg) { /* a tile of the other warp group */
            pipe.iter += operands.k_tiles;
            if (GMM__K_GROUPED) store.part += gmm_sm90_d_parts(t, size);
            continue;
        }
        /* A parity only distinguishes a phase from the previous one, and this warp group has not waited for the stages
           of the other one's tile: it must wait until the last of them is full. */
        if (GMM__CFG(consumers) == 1 && tile_index > 0)
            gmm_mbarrier_wait(gmm_sm90_last_stage_full(bars, wg ^ 1), (tile_index - 1) / 2 & 1);
        if (t->cols <= col0) {
            GMM__PART(gmm_sm90_skip_tile_)(operands.k_tiles, bars, wg, tile_index == 0, &pipe);
            continue;
        }
        /* the pinned value keeps the compiler from computing the descriptors before the loop, for the same reason */
        if (!GMM__CFG(b_format)) GMM__PIN_U32(stage0);
        operands.desc_b = gmm_wgmma_desc(stage0 + 128 * col0, GMM__TB);
        operands.desc_a = gmm_wgmma_desc(stage0 + GMM__CFG(a_offset), GMM__TA);
        operands.packed_at = base + GMM__CFG(box_width) * (uint32_t)(col0 + 16 * w); /* in bytes, as packed maps */
        operands.scales_at = base + GMM__CFG(scales_offset) + 4 * (uint32_t)(col0 + 16 * w);
        GMM__PART(gmm_sm90_multiply_)(t, &smem->ring.small_m, acc, &operands, gmm_sm90_last_stage_full(bars, wg),
                                      &pipe, &store, deferred);
        while (GMM__DEFERRED && store.pending > 0)
            GMM__PART(gmm_sm90_store_deferred_)(&store, deferred);
#pragma unroll
        for (u = 0; u < GMM__DEFERRED_WORDS; u++) deferred[u] = 0; /* ends the live range of the stored words */
        out.tile = t;
        out.wg = wg;
        out.col0 = col0;
        out.size = size;
        out.pitch = pitch;
        out.slots = store.slots;
        out.slots_at = GMM__SMEM_AT(slot);
        out.bars = bars;
        GMM__PART(gmm_sm90_store_tile_)(&args, &out, tile_index == 0, &store, deferred, acc);
    }
    if (GMM__DEFERRED && (threadIdx.x & 127) == 0) GMM__BULK_WAIT_GROUP(0);
}
#endif
