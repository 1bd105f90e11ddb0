#elif GMM__BODY == 9
#ifndef GMM__ROW
#error "gmm: this body needs GMM__ROW"
#endif
#define GMM__KERNEL_NAME GMM__COLUMN(1, GMM__ROW)
#define GMM__OP GMM__COLUMN(2, GMM__ROW)
#define GMM__TAG GMM__COLUMN(3, GMM__ROW)
#define GMM__DTYPE GMM__COLUMN(4, GMM__ROW)
#define GMM__TILE GMM__COLUMN(5, GMM__ROW)
#define GMM__TILES GMM__COLUMN(6, GMM__ROW)
#define GMM__ALT_TILE GMM__COLUMN(7, GMM__ROW)
#define GMM__CFG(name) (int)GMM__SM90(name, GMM__TILE)
#define GMM__SMEM GMM__SM90(smem, GMM__TILE)          /* the struct in shared memory */
#define GMM__SMEM_AT(member) (base + GMM__OFFSET(GMM__SMEM, member)) /* address of a member; base: of the struct */
#define GMM__INSTANCE(part) GMM__CAT(GMM__CAT(GMM__CAT(GMM__CAT(part, GMM__OP), _), GMM__TAG), _)
#define GMM__PART(part) GMM__CAT(GMM__INSTANCE(part), GMM__TILE)
/* A kernel with two tiles calls the functions of both; those of the other tile are defined by a row before, which
   defines no kernel. */
#if GMM__TILES == 2
#define GMM__ALT_PART(part) GMM__CAT(GMM__INSTANCE(part), GMM__ALT_TILE)
#define GMM__TILE_CHOICE args.tile
#define GMM__ALT_CFG(name) (int)GMM__SM90(name, GMM__ALT_TILE)
#define GMM__CFG_OF(second, name) ((second) ? GMM__ALT_CFG(name) : GMM__CFG(name))
#else
#define GMM__TILE_CHOICE 0
#define GMM__ALT_CFG(name) 0
#define GMM__CFG_OF(second, name) ((void)(second), GMM__CFG(name))
#endif
#define GMM__TA GMM__CAT(gmm_ta_, GMM__OP)
#define GMM__TB GMM__CAT(gmm_tb_, GMM__OP)
#define GMM__K_GROUPED GMM__CAT(gmm_ragged_k_, GMM__OP)
/* Rows of fp32 accumulators that a store slot holds at once. */
#define GMM__ROWS_PER_STORE (GMM__CFG(store_blocks) >= 4 && GMM__CFG(wgmma_m) * GMM__CFG(m16) < 24 ? 32 : 16)

/* Deferred store: the 32-bit words of 16-bit D that stay in a thread's registers, the words of them that are stored at
   once, and the slots of a warp group for these. An instance with an epilogue has no registers left for them. */
#ifdef GMM__EPILOGUE
#define GMM__DEFERRED 0
#else
#define GMM__DEFERRED GMM__CFG(deferred)
#endif
#define GMM__DEFERRED_WORDS (GMM__DEFERRED ? 4 * GMM__CFG(m16) : 1)
#define GMM__WORDS_PER_STORE (GMM__DEFERRED ? 4 * GMM__CFG(deferred) : 1)
#define GMM__STORE_SLOTS (GMM__DEFERRED ? 2 * GMM__CFG(store_blocks) / GMM__CFG(deferred) : 2)
/* Whether the first wgmma of a tile overwrites the accumulators (scale_d = 0); else they are zeroed before. */
#define GMM__ZERO_INIT (GMM__DEFERRED || GMM__K_GROUPED)
/* Tiles begin at multiples of GMM__STEP rows. GMM__HAS_N8: whether tiles need wgmma's N = 8 n8. */
#define GMM__STEP (GMM__K_GROUPED ? 64 : 8)
#define GMM__HAS_N8(n8) ((n8) <= 2 * GMM__CFG(m16) && (!GMM__K_GROUPED || (n8) % 8 == 0))
/* Small-M mode: the most rows of a tile with which the loads of weights bound forward, or 0. A stage has 128
   bytes of each line of the weights; device memory delivers 256 contiguous bytes faster, so two stages are requested at
   a time, and each is released as soon as it is multiplied. Above 64 rows products take time as well, and the mode pays
   only where groups are nearly equal (small_m in body_product_kernel.cuh). */
#define GMM__SMALL_M(tile_n) \
    (!GMM__K_GROUPED && !GMM__TB && !GMM__CFG(tile_b) && GMM__CFG(consumers) == 2 && (tile_n) == 256 \
         ? GMM_SM90_SMALL_M : 0)
/* The store slots of a consumer warp group; in wgrad the slot of a part, whichever warp group writes it. */
#define GMM__STORE_SLOT(wg, nth) \
    ((char *)smem + GMM__OFFSET(GMM__SMEM, slot) + \
     GMM__CFG(slot_bytes) * (GMM__K_GROUPED ? (int)((nth) % GMM_SM90_STORE_SLOTS) : 2 * (wg)))
#define GMM__SCHEDULER_WARP (GMM__CFG(tile_b) ? GMM_SM90_PACKED_SCHEDULER_WARP : GMM_SM90_SCHEDULER_WARP)

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
/* Stores the next rows of a tile, whose 16-bit D is pending in the registers `words`, through one of the warp group's
   slots: by TMA where rows are 16-byte aligned. A slot is reused after 3 stages, so that no warp stalls on it. Words
   are selected by predicates: an index into them would put them into local memory, and moving them down would need as
   many registers again. */
GMM__DEVICE void GMM__PART(gmm_sm90_store_deferred_)(gmm_sm90_deferred *store,
                                                     const uint32_t words[GMM__DEFERRED_WORDS]) {
    const gmm_sm90_args *const args = store->args;
    const gmm_sm90_tile *const t = store->tile;
    const int wg = store->wg;
    const int tid = gmm_tid_x() & 127, lane = tid & 31, w = tid >> 5, row = 16 * (t->row_blocks - store->pending);
    char *const slot = store->slots + store->part % GMM__STORE_SLOTS * (512 * GMM__WORDS_PER_STORE);
    const uint32_t slot_at = (uint32_t)__cvta_generic_to_shared(slot);
    const uint32_t st_at = slot_at + (lane / 16 * 8 + lane % 8) * 128 + (((2 * w + lane / 8 % 2) ^ (lane % 8)) << 4);
    const gmm_kmat *const d = &args->p.d;
    int x, e;
#pragma unroll
    for (x = 0; x + 3 < GMM__DEFERRED_WORDS; x += 4)
        gmm_stmatrix_x4_trans_if(x / GMM__WORDS_PER_STORE * GMM__CFG(deferred) == row / 16,
                                 st_at + x % GMM__WORDS_PER_STORE * 512, words[x], words[x + 1], words[x + 2],
                                 words[x + 3]);
    gmm_fence_proxy_async();
    if (tid == 0) /* the next slot may be overwritten */
        GMM__BULK_WAIT_GROUP_READ(GMM__STORE_SLOTS - 2);
    gmm_consumer_sync(wg);
    if ((((uint64_t)(uintptr_t)d->data | (uint64_t)(d->ld * 2)) & 15) == 0) {
        if (tid == 0) {
            gmm_tma_store(&args->d, slot_at, 0, t->n0 + 64 * wg, GMM_SM90_RAGGED_ROWS - t->rows + row,
                          t->row + t->m0 + t->rows, GMM_SM90_RAGGED_ROWS);
            gmm_bulk_commit_group();
        }
    } else {
        const int c = 64 * wg + 8 * (tid % 8);
        char *to = (char *)d->data + (((int64_t)t->row + t->m0 + row + tid / 8) * d->ld + t->n0 + c) * 2;
#pragma unroll 1
        for (x = tid / 8; x < 4 * GMM__WORDS_PER_STORE && row + x < t->rows; x += 16, to += 32 * d->ld)
#pragma unroll 1
            for (e = 0; e < 8 && c + e < t->cols; e++)
                ((uint16_t *)to)[e] = ((const uint16_t *)(slot + x * 128 + (((tid % 8) ^ (x & 7)) << 4)))[e];
    }
    store->pending -= GMM__CFG(deferred);
    store->part++;
}

/* Mainloop of a consumer warp group: accumulates the stages of a tile of 8 n8 rows, and meanwhile stores the previous
   tile (deferred store). `order`: mbarrier at which this warp group of a ping-pong tile arrives when its last stage is
   full. small_m: a stage is released when it is multiplied, else one stage after it, so that wgmma never pauses. */
GMM__DEVICE void GMM__PART(gmm_sm90_mainloop_)(const int n8, const int small_m,
                                               float acc[GMM__CFG(wgmma_m)][8 * GMM__CFG(m16)],
                                               const gmm_sm90_operands *operands, uint32_t order,
                                               gmm_sm90_pipeline *pipe, gmm_sm90_deferred *store,
                                               const uint32_t deferred[GMM__DEFERRED_WORDS]) {
    const uint32_t lane = threadIdx.x & 31;
    uint32_t k, s = pipe->iter % GMM__CFG(stages), parity = pipe->iter / GMM__CFG(stages) & 1, prev_stage = 0;
    int kk, j;
#pragma unroll 1
    for (k = 0;; k++) {
        const uint64_t b = operands->desc_b + s * (GMM__CFG(stage_bytes) >> 4);
        const uint64_t a = operands->desc_a + s * (GMM__CFG(stage_bytes) >> 4);
        gmm_mbarrier_wait(gmm_sm90_full(pipe->bars, s), parity);
        if (GMM__CFG(consumers) == 1 && k == operands->k_tiles - 1 && lane == 0) gmm_mbarrier_arrive(order);
        gmm_wgmma_fence();
#pragma unroll
        for (kk = 0; kk < 4; kk++)
#pragma unroll
            for (j = 0; j < GMM__CFG(wgmma_m); j++)
                GMM__CAT(GMM__CAT(GMM__CAT(gmm_wgmma_, GMM__TAG), _), GMM__OP)(
                    n8, acc[j], b + j * (8192 >> 4) + kk * ((GMM__TB ? 2048 : 32) >> 4),
                    a + kk * ((GMM__TA ? 2048 : 32) >> 4), !GMM__ZERO_INIT || k > 0 || kk > 0);
        gmm_wgmma_commit();
        if (small_m) GMM__WGMMA_WAIT(0);
        else GMM__WGMMA_WAIT(1);
        if ((small_m || k > 0) && lane < pipe->cluster_size)
            gmm_mbarrier_arrive_remote(gmm_sm90_empty(pipe->bars, small_m ? s : prev_stage), lane);
        if (GMM__DEFERRED && store->pending > 0)
            GMM__PART(gmm_sm90_store_deferred_)(store, deferred);
        prev_stage = s;
        if (k + 1 == operands->k_tiles) break;
        if (++s == GMM__CFG(stages)) {
            s = 0;
            parity ^= 1;
        }
    }
    GMM__WGMMA_WAIT(0);
    if (!small_m && lane < pipe->cluster_size)
        gmm_mbarrier_arrive_remote(gmm_sm90_empty(pipe->bars, prev_stage), lane);
    pipe->iter += operands->k_tiles;
}

/* A consumer warp group: mainloop, then epilogue, for every tile of the ring. */
GMM__DEVICE void GMM__PART(gmm_sm90_consume_tiles_)(const GMM__ARGS &args, GMM__SMEM *smem, const uint32_t base) {
    const gmm_sm90_tile *const ring = smem->ring.tile;
    const uint32_t stage_bars = GMM__SMEM_AT(stage_bars), bars = GMM__SMEM_AT(bars);
    const int lane = (int)threadIdx.x & 31, warp = (int)threadIdx.x >> 5;
    const int w = warp & 3;
    const int tid = (int)threadIdx.x & 127;
    const int size = gmm_kmat_size(&args.p.d);
    const int64_t pitch = args.p.d.ld * size;
    float acc[GMM__CFG(wgmma_m)][8 * GMM__CFG(m16)];
    const volatile int32_t *const small_m = &smem->ring.small_m;
    gmm_sm90_pipeline pipe = { stage_bars, GMM__CFG(stages), GMM__CFG(stage_bytes), 1, 0 };
    gmm_sm90_deferred store = { &args, ring, 0, smem->slot[0], 0, 0 };
    uint32_t tile_index = 0, deferred[GMM__DEFERRED_WORDS];
    int j, u, e, x;
#pragma unroll
    for (u = 0; u < GMM__DEFERRED_WORDS; u++) deferred[u] = 0;
    for (;; tile_index++) {
        const gmm_sm90_tile *const t = &ring[tile_index % GMM_SM90_TILE_RING];
        /* recomputed for every tile: a value that lived on would take a register from the epilogue */
        const int wg = __shfl_sync(0xFFFFFFFFu, gmm_tid_x() >> 7, 0);
        char *const slots = GMM__STORE_SLOT(wg, store.part);
        /* first column of the warp group in the tile */
        const int col0 = GMM__CFG(consumers) == 1 ? 0 : 64 * GMM__CFG(wgmma_m) * wg;
        /* packed weights: the warp's codes and scales in stage 0 */
        const uint32_t packed_at = base + GMM__CFG(box) * (uint32_t)(col0 + 16 * w);
        const uint32_t scales_at = base + GMM__CFG(scales_offset) + 4 * (uint32_t)(col0 + 16 * w);
        uint32_t stage0 = base;
        gmm_sm90_operands operands;
        store.tile = &ring[(tile_index - 1) % GMM_SM90_TILE_RING];
        store.wg = wg;
        store.slots = slots;
        __syncwarp();
        /* a deferred store still reads the previous tile */
        if (lane == 0) gmm_sm90_release_batch(bars, tile_index - (GMM__DEFERRED != 0));
        gmm_sm90_wait_tile(bars, tile_index);
        while (GMM__DEFERRED && store.pending > 0 && t->cols <= col0) /* no mainloop follows that could store them */
            GMM__PART(gmm_sm90_store_deferred_)(&store, deferred);
        if (t->row_blocks == 0) {
            if (GMM__K_GROUPED && tile_index > 0 && (int)(tile_index & 1) == wg) gmm_order_barrier(wg, 1);
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
            gmm_mbarrier_wait(gmm_sm90_order(bars, wg ^ 1), (tile_index - 1) / 2 & 1);
        if (t->cols <= col0) { /* this warp group has no columns: it releases the stages unread */
            for (; operands.k_tiles > 0; operands.k_tiles--, pipe.iter++) {
                const uint32_t s = pipe.iter % GMM__CFG(stages);
                gmm_mbarrier_wait(gmm_sm90_full(stage_bars, s), pipe.iter / GMM__CFG(stages) & 1);
                if (lane < (int)pipe.cluster_size)
                    gmm_mbarrier_arrive_remote(gmm_sm90_empty(stage_bars, s), (uint32_t)lane);
            }
            if (GMM__CFG(consumers) == 1 && lane == 0) gmm_mbarrier_arrive(gmm_sm90_order(bars, wg));
            if (GMM__K_GROUPED) { /* it stores nothing, but keeps the order of the tiles' stores */
                if (tile_index > 0) gmm_order_barrier(wg, 1);
                gmm_order_barrier(wg ^ 1, 0);
            }
            continue;
        }
        /* the pinned value keeps the compiler from computing the descriptors before the loop, for the same reason */
        if (!GMM__CFG(tile_b)) GMM__PIN_U32(stage0);
        operands.desc_b = gmm_wgmma_desc(stage0 + 128 * col0, GMM__TB);
        operands.desc_a = gmm_wgmma_desc(stage0 + GMM__CFG(a_offset), GMM__TA);
#pragma unroll
        for (j = 0; j < (GMM__ZERO_INIT ? 0 : GMM__CFG(wgmma_m)); j++)
#pragma unroll
            for (u = 0; u < 8 * GMM__CFG(m16); u++) acc[j][u] = 0.0f;
        switch (GMM__K_GROUPED ? (t->rows + 63) / 64 * 8 : gmm_sm90_wgmma_n8(t->rows)) {
#define GMM__MAINLOOP(n8, small_m) \
    GMM__PART(gmm_sm90_mainloop_)(n8, small_m, acc, &operands, gmm_sm90_order(bars, wg), &pipe, &store, deferred)
#define GMM__PACKED_MAINLOOP(m16) \
    gmm_sm90_packed_mainloop(GMM__CFG(tile_b), m16, acc[0], operands.k_tiles, packed_at, scales_at, operands.desc_a, \
                             &pipe)
/* in branches that are never reached, the arguments fall back to a size that the accumulators have */
#define GMM__X(n8, u, n, b, a, c) \
        case n8: \
            if (n8 <= 2 * GMM__CFG(m16) && GMM__CFG(tile_b)) { \
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
        while (GMM__DEFERRED && store.pending > 0)
            GMM__PART(gmm_sm90_store_deferred_)(&store, deferred);
#pragma unroll
        for (u = 0; u < GMM__DEFERRED_WORDS; u++) deferred[u] = 0; /* ends the live range of the stored words */
        { /* epilogue: accumulators to D, transposed through shared memory */
            const char *const bias = GMM__K_GROUPED || args.p.bias.dtype == GMM_NONE
                                         ? NULL : gmm_kmat_data(&args.p.bias, t->g);
            const int row_blocks = t->row_blocks, rows = t->rows;
#pragma unroll 1
            for (x = 0; x < 2; x++) {
                const float *const factors = x ? args.alpha2 : args.p.alpha;
                const float alpha = factors && t->k > 0 ? factors[args.p.alpha_per_group ? t->g : 0] : 1.0f;
                if (alpha != 1.0f) {
#pragma unroll
                    for (j = 0; j < GMM__CFG(wgmma_m); j++)
#pragma unroll
                        for (u = 0; u < 8 * GMM__CFG(m16); u++) acc[j][u] = __fmul_rn(acc[j][u], alpha);
                }
            }
            if (bias) {
                const float *const bias_scale = args.p.bias_scale ? args.p.bias_scale + t->row + t->m0 : NULL;
                /* bias of the thread's first column and of the one 8 further; scales of rows: one row per lane */
                float bias0[GMM__CFG(wgmma_m)][4], bias8[GMM__CFG(wgmma_m)][4], bias_scales[GMM__CFG(m16) / 2 + 1];
#pragma unroll
                for (x = 0; x < (GMM__CFG(m16) + 1) / 2; x++)
                    bias_scales[x] = bias_scale && 32 * x + lane < rows ? bias_scale[32 * x + lane] : 1.0f;
#pragma unroll
                for (j = 0; j < GMM__CFG(wgmma_m); j++) {
                    const int c = t->n0 + col0 + 64 * j + gmm_wgmma_acc_m(w, lane, 0);
                    const int bytes = gmm_kmat_size(&args.p.bias);
                    gmm_read4(args.p.bias.dtype, bias + (int64_t)c * bytes, c < args.p.n, 0, bias0[j]);
                    gmm_read4(args.p.bias.dtype, bias + (int64_t)(c + 8) * bytes, c + 8 < args.p.n, 0, bias8[j]);
                }
#pragma unroll
                for (u = 0; u < 8 * GMM__CFG(m16); u += 4) {
                    const float scale0 = __shfl_sync(0xFFFFFFFFu, bias_scales[u / 16], gmm_wgmma_acc_n(lane, u % 16));
                    const float scale1 = __shfl_sync(0xFFFFFFFFu, bias_scales[u / 16],
                                                     gmm_wgmma_acc_n(lane, u % 16) + 1);
#pragma unroll
                    for (j = 0; j < GMM__CFG(wgmma_m); j++) {
                        acc[j][u] = __fmaf_rn(bias0[j][0], scale0, acc[j][u]);
                        acc[j][u + 1] = __fmaf_rn(bias0[j][0], scale1, acc[j][u + 1]);
                        acc[j][u + 2] = __fmaf_rn(bias8[j][0], scale0, acc[j][u + 2]);
                        acc[j][u + 3] = __fmaf_rn(bias8[j][0], scale1, acc[j][u + 3]);
                    }
                }
            }
            const float beta = gmm_gemm_beta(&args.p, t->g);
            const int by_tma = GMM__K_GROUPED && gmm_sm90_d_by_tma(&args.p, t->g, beta);
            char *const d = gmm_kmat_data(&args.p.d, t->g) + (t->m0 + (GMM__K_GROUPED ? 0 : (int64_t)t->row)) * pitch;
            const int aligned = (((uint64_t)(uintptr_t)d | (uint64_t)pitch) & 15) == 0;
            if (GMM__K_GROUPED && tile_index > 0) gmm_order_barrier(wg, 1); /* slots are used in the order of tiles */
            if (by_tma && size == 2) { /* 16-bit D by TMA: slots hold its boxes */
                const int tid = gmm_tid_x() & 127, lane = tid & 31, w = tid >> 5;
                const uint32_t st_at = GMM__SMEM_AT(slot) + (lane / 16 * 8 + lane % 8) * 128 +
                                       (((2 * w + lane / 8 % 2) ^ (lane % 8)) << 4);
#pragma unroll
                for (u = 0; u < GMM__CFG(m16); u++) {
                    if (u % 4 == 0) { /* rows past the end of D stay in the slot */
                        if (u >= row_blocks) break;
                        gmm_sm90_acquire_slot(bars, store.part);
                    }
#pragma unroll
                    for (j = 0; j < GMM__CFG(wgmma_m); j++) {
                        const float *const f = &acc[j][8 * u];
                        gmm_stmatrix_x4_trans(st_at + store.part % GMM_SM90_STORE_SLOTS * GMM__CFG(slot_bytes) +
                                                  j * 8192 + u % 4 * 2048,
                                              gmm_pack2(GMM__DTYPE, f[0], f[1]), gmm_pack2(GMM__DTYPE, f[2], f[3]),
                                              gmm_pack2(GMM__DTYPE, f[4], f[5]), gmm_pack2(GMM__DTYPE, f[6], f[7]));
                    }
                    if (u % 4 == 3) gmm_sm90_commit_slot(bars, store.part++);
                }
            } else if (GMM__DEFERRED && size == 2 && beta == 0.0f) {
                /* deferred store: pending until the next tile's mainloop */
#pragma unroll
                for (u = 0; u < GMM__DEFERRED_WORDS; u++)
                    deferred[u] = gmm_pack2(GMM__DTYPE, acc[0][2 * u], acc[0][2 * u + 1]);
                store.pending = row_blocks;
            } else if (!GMM__K_GROUPED && !GMM__DEFERRED && size == 2 && beta == 0.0f) {
                /* 16-bit D, stored by the threads: slots hold [row][column] */
                /* recomputed, so that the mainloop has their registers */
                const int tid = gmm_tid_x() & 127, lane = tid & 31, w = tid >> 5;
                const int row_bytes = 128 * GMM__CFG(wgmma_m);
                const int chunk = tid % (8 * GMM__CFG(wgmma_m)), slot_row = tid / (8 * GMM__CFG(wgmma_m));
                const int cols_left = t->cols - col0 - 8 * chunk;
                const int vectorized = aligned && (t->cols - col0 >= 64 * GMM__CFG(wgmma_m) ||
                                                   (t->cols - col0) % 8 == 0);
                const int rows_left = cols_left > 0 ? rows - slot_row : 0;
                const uint32_t st_at = (uint32_t)__cvta_generic_to_shared(slots) +
                                       (lane / 16 * 8 + lane % 8) * row_bytes +
                                       (((2 * w + lane / 8 % 2) ^ (lane % 8)) << 4);
                const char *const ld_at = slots + slot_row * row_bytes + ((chunk ^ (slot_row & 7)) << 4);
                char *to = d + slot_row * pitch + (t->n0 + col0 + 8 * chunk) * 2;
#pragma unroll
                for (u = 0; u < GMM__CFG(m16); u += GMM__CFG(store_blocks) / GMM__CFG(wgmma_m)) {
                    const int slot = (store.part & 1) * GMM__CFG(slot_bytes);
                    uint4 v[GMM__CFG(store_blocks)];
                    if (u >= row_blocks) break;
                    store.part++;
#pragma unroll
                    for (x = 0; x < GMM__CFG(store_blocks) / GMM__CFG(wgmma_m); x++)
#pragma unroll
                        for (j = 0; j < GMM__CFG(wgmma_m); j++)
                            if (u + x < GMM__CFG(m16)) {
                                const float *const f = &acc[j][8 * (u + x)];
                                gmm_stmatrix_x4_trans(st_at + slot + x * 16 * row_bytes + 128 * j,
                                                      gmm_pack2(GMM__DTYPE, f[0], f[1]),
                                                      gmm_pack2(GMM__DTYPE, f[2], f[3]),
                                                      gmm_pack2(GMM__DTYPE, f[4], f[5]),
                                                      gmm_pack2(GMM__DTYPE, f[6], f[7]));
                            }
                    gmm_consumer_sync(wg);
#ifdef GMM__EPILOGUE /* of an instance: reads the rows of D in the slot, and returns whether D is stored too */
                    if (!GMM__EPILOGUE(&args, t, slots + slot, row_bytes, 16 * u,
                                       GMM__CFG(store_blocks) * 2048 / row_bytes, col0))
                        continue;
#endif
                    if (vectorized) {
#pragma unroll
                        for (x = 0; x < GMM__CFG(store_blocks); x++) v[x] = *(const uint4 *)(ld_at + slot + x * 2048);
#pragma unroll
                        for (x = 0; x < GMM__CFG(store_blocks); x++, to += 16 / GMM__CFG(wgmma_m) * pitch)
                            if (16 * u + 16 / GMM__CFG(wgmma_m) * x < rows_left) *(uint4 *)to = v[x];
                    } else {
#pragma unroll 1
                        for (x = 0; x < GMM__CFG(store_blocks); x++, to += 16 / GMM__CFG(wgmma_m) * pitch)
#pragma unroll 1
                            for (e = 0; e < 8 && e < cols_left && 16 * u + 16 / GMM__CFG(wgmma_m) * x < rows_left; e++)
                                ((uint16_t *)to)[e] = ((const uint16_t *)(ld_at + slot + x * 2048))[e];
                    }
                }
            } else if (by_tma) { /* fp32 D by TMA: slots hold its boxes */
                const int tid = gmm_tid_x() & 127, lane = tid & 31, w = tid >> 5;
                /* address of the element of column lane / 4 and row 2 (lane % 4); the swizzle makes steps of 8 columns
                   and of 1 row an XOR of this address */
                const uint32_t to = GMM__SMEM_AT(slot) + w / 2 * 8192 + lane % 4 * 256 + lane / 4 % 4 * 4 +
                                    (((w % 2 * 4 + lane / 16) ^ (lane % 4 * 2)) << 4);
#pragma unroll
                for (j = 0; j < GMM__CFG(wgmma_m); j++) {
                    if (col0 + 64 * j >= t->cols) break;
#pragma unroll
                    for (u = 0; u < 2 * GMM__CFG(m16); u++) {
                        const uint32_t slot_offset = store.part % GMM_SM90_STORE_SLOTS * GMM__CFG(slot_bytes) +
                                                     u % 8 * 1024;
                        float old[4];
                        if (u % 8 == 0) {
                            if (u >= 2 * row_blocks) break;
                            gmm_sm90_acquire_slot(bars, store.part);
                        }
                        if (beta != 0.0f) {
#pragma unroll
                            for (e = 0; e < 4; e++)
                                old[e] = gmm_ld_shared_f32((to ^ (e / 2 * 32 + e % 2 * 144)) + slot_offset);
#pragma unroll
                            for (e = 0; e < 4; e++) acc[j][4 * u + e] = __fmaf_rn(beta, old[e], acc[j][4 * u + e]);
                        }
#pragma unroll
                        for (e = 0; e < 4; e++)
                            gmm_st_shared_f32((to ^ (e / 2 * 32 + e % 2 * 144)) + slot_offset, acc[j][4 * u + e]);
                        if (u % 8 == 7) gmm_sm90_commit_slot(bars, store.part++);
                    }
                }
            } else { /* D of any dtype or alignment: slots hold fp32 accumulators */
                /* alternates between two slots, since the last one may still be read */
                uint32_t next_part = store.part;
                if (GMM__DEFERRED) { /* waits for deferred stores that still read the slots */
                    if (tid == 0) GMM__BULK_WAIT_GROUP_READ(0);
                    gmm_consumer_sync(wg);
                }
                if (GMM__K_GROUPED) gmm_sm90_acquire_slot(bars, store.part);
#pragma unroll
                for (j = 0; j < GMM__CFG(wgmma_m); j++) {
                    const int c0 = col0 + 64 * j;
                    const int vectorized = aligned && t->cols - c0 >= 64;
                    const int column4 = w * 4 + lane / 16; /* the thread's columns in units of 4 */
                    const int rows_left = rows - tid / 16;
                    char *const st_at = slots + lane % 4 * 512 + lane / 4 % 4 * 4;
                    char *to = d + tid / 16 * pitch + (t->n0 + c0 + 4 * (tid % 16)) * size;
#pragma unroll
                    for (u = 0; u < GMM__CFG(m16); u += GMM__ROWS_PER_STORE / 16) {
                        const int slot = (next_part & 1) * (GMM__CFG(slot_bytes) >> GMM__K_GROUPED);
                        const char *const ld_at = slots + slot + tid / 16 * 256 +
                                                  (((tid % 16) ^ (tid / 32 % 4 * 2)) << 4);
                        uint4 old[GMM__ROWS_PER_STORE / 8]; /* old D: all loads are issued first */
                        if (u >= row_blocks || c0 >= t->cols) break;
                        next_part++;
#pragma unroll
                        for (x = 0; x < GMM__ROWS_PER_STORE / 8; x++) {
                            old[x] = make_uint4(0, 0, 0, 0);
                            if (vectorized && beta != 0.0f && !GMM__K_GROUPED && 16 * u + 8 * x < rows_left)
                                old[x] = gmm_sm90_d_load4(size, to + 8 * x * pitch);
                        }
#pragma unroll
                        for (x = 0; x < GMM__ROWS_PER_STORE / 16; x++)
                            if (u + x < GMM__CFG(m16)) {
#pragma unroll
                                for (e = 0; e < 8; e++)
                                    *(float *)(st_at + slot + x * 4096 + e / 4 * 2048 + e % 2 * 256 +
                                               (((column4 + e / 2 % 2 * 2) ^ (lane % 4 * 2)) << 4)) =
                                        acc[j][8 * (u + x) + e];
                            }
                        gmm_consumer_sync(wg);
                        if (vectorized) {
#pragma unroll
                            for (x = 0; x < GMM__ROWS_PER_STORE / 8; x++, to += 8 * pitch) {
                                const float4 f = *(const float4 *)(ld_at + x * 2048);
                                float v[4];
                                v[0] = f.x; v[1] = f.y; v[2] = f.z; v[3] = f.w;
                                if (GMM__K_GROUPED && beta != 0.0f && 16 * u + 8 * x < rows_left)
                                    old[x] = gmm_sm90_d_load4(size, to);
                                if (beta != 0.0f)
#pragma unroll
                                    for (e = 0; e < 4; e++)
                                        v[e] = __fmaf_rn(beta, gmm_sm90_d_value(args.p.d.dtype, &old[x], e), v[e]);
                                if (16 * u + 8 * x < rows_left) gmm_write4(args.p.d.dtype, to, 4, 1, v);
                            }
                        } else {
#pragma unroll 1
                            for (x = 0; x < GMM__ROWS_PER_STORE / 8; x++, to += 8 * pitch)
#pragma unroll 1
                                for (e = 0; e < 4 && e < t->cols - c0 - 4 * (tid % 16) && 16 * u + 8 * x < rows_left;
                                     e++) {
                                    float v[4], stored[4];
                                    v[0] = ((const float *)(ld_at + x * 2048))[e];
                                    gmm_read4(args.p.d.dtype, to + e * size, beta != 0.0f, 0, stored);
                                    if (beta != 0.0f) v[0] = __fmaf_rn(beta, stored[0], v[0]);
                                    gmm_write4(args.p.d.dtype, to + e * size, 1, 0, v);
                                }
                        }
                    }
                }
                if (GMM__K_GROUPED)
                    for (next_part = gmm_sm90_d_parts(t, size); next_part > 0; next_part--, store.part++) {
                        gmm_sm90_acquire_slot(bars, store.part);
                        gmm_sm90_commit_slot(bars, store.part);
                    }
                else store.part = next_part;
            }
            if (GMM__K_GROUPED) gmm_order_barrier(wg ^ 1, 0);
        }
    }
    if (GMM__DEFERRED && tid == 0) GMM__BULK_WAIT_GROUP(0);
}
#endif

