#elif GMM__BODY == GMM__BODY_PRODUCT
#define GMM__KERNEL_NAME GMM__COLUMN(1, GMM__ROW)
#define GMM__OP GMM__COLUMN(2, GMM__ROW)
#define GMM__TAG GMM__COLUMN(3, GMM__ROW)
#define GMM__DTYPE GMM__COLUMN(4, GMM__ROW)
#define GMM__TILE GMM__COLUMN(5, GMM__ROW)
#define GMM__TILES GMM__COLUMN(6, GMM__ROW)
#define GMM__SECOND_TILE GMM__COLUMN(7, GMM__ROW)
#define GMM__CFG(name) (int)GMM__SM90(name, GMM__TILE)
#define GMM__SMEM GMM__SM90(smem, GMM__TILE)          /* the struct in shared memory */
#define GMM__SMEM_AT(member) (base + GMM__OFFSET(GMM__SMEM, member)) /* address of a member; base: of the struct */
#define GMM__INSTANCE(part) GMM__CAT(GMM__CAT(GMM__CAT(GMM__CAT(part, GMM__OP), _), GMM__TAG), _)
#define GMM__PART(part) GMM__CAT(GMM__INSTANCE(part), GMM__TILE)
/* A kernel with two tiles calls the functions of both; those of the second tile are defined by a row before, which
   defines no kernel. */
#if GMM__TILES == 2
#define GMM__SECOND_PART(part) GMM__CAT(GMM__INSTANCE(part), GMM__SECOND_TILE)
#define GMM__TILE_CHOICE args.tile_choice
#define GMM__SECOND_CFG(name) (int)GMM__SM90(name, GMM__SECOND_TILE)
#define GMM__CFG_OF(second_tile, name) ((second_tile) ? GMM__SECOND_CFG(name) : GMM__CFG(name))
static_assert(GMM__CFG(m16) / 4 + 1 + GMM__SECOND_CFG(m16) / 4 + 1 <= 8, "gmm_sm90_choose_tile: candidates of a warp");
#else
#define GMM__TILE_CHOICE gmm_sm90_tile_first
#define GMM__SECOND_CFG(name) 0
#define GMM__CFG_OF(second_tile, name) ((void)(second_tile), GMM__CFG(name))
#endif
#define GMM__MAX_CFG(name) (GMM__SECOND_CFG(name) > GMM__CFG(name) ? GMM__SECOND_CFG(name) : GMM__CFG(name))
#define GMM__TA GMM__CAT(gmm_ta_, GMM__OP)
#define GMM__TB GMM__CAT(gmm_tb_, GMM__OP)
#define GMM__K_GROUPED GMM__CAT(gmm_k_grouped_, GMM__OP)
#define GMM__GLU GMM__CAT(GMM__IS_GLU_, GMM__OP)
#define GMM__DGLU GMM__CAT(GMM__IS_DGLU_, GMM__OP)
#if GMM__GLU
#define GMM__WGMMA_OP fwd /* whose operands glu has */
#elif GMM__DGLU
#define GMM__WGMMA_OP dgrad
#else
#define GMM__WGMMA_OP GMM__OP
#endif
/* Tiles begin at multiples of so many columns. */
#define GMM__COL_ALIGN (GMM__K_GROUPED ? GMM__CFG(tile_n) : GMM__GLU ? 128 : 64)
/* Parts in which gmm_sm90_store_any stores a tile: rows of fp32 accumulators that a store slot holds at once, and the
   number of parts in 64 columns. */
#define GMM__ROWS_PER_STORE (GMM__CFG(store_blocks) >= 4 && GMM__CFG(wgmma_m) * GMM__CFG(m16) < 24 ? 32 : 16)
#define GMM__PARTS_PER_COLUMN ((16 * GMM__CFG(m16) + GMM__ROWS_PER_STORE - 1) / GMM__ROWS_PER_STORE)

/* Deferred store: the 32-bit words of 16-bit D that stay in a thread's registers, the words of them that are stored at
   once, and the slots of a warp group for these. */
#define GMM__DEFERRED GMM__CFG(deferred)
#define GMM__DEFERRED_WORDS (GMM__DEFERRED ? 4 * GMM__CFG(m16) : 1)
#define GMM__WORDS_PER_STORE (GMM__DEFERRED ? 4 * GMM__CFG(deferred) : 1)
#define GMM__DEFERRED_SLOTS (GMM__DEFERRED ? 2 * GMM__CFG(store_blocks) / GMM__CFG(deferred) : 2)
/* Whether the first wgmma of a tile overwrites the accumulators (scale_d = 0); else they are zeroed before. */
#define GMM__ZERO_INIT (GMM__DEFERRED || GMM__K_GROUPED)
/* Tiles begin at multiples of so many rows. GMM__HAS_N8: whether tiles need wgmma's N = 8 n8. */
#define GMM__ROW_ALIGN (GMM__K_GROUPED ? 64 : 8)
#define GMM__HAS_N8(n8) ((n8) <= 2 * GMM__CFG(m16) && (!GMM__K_GROUPED || (n8) % 8 == 0))
/* Small-M mode: the most rows of a tile with which the loads of weights bound forward, or 0. A stage has 128
   bytes of each line of the weights; device memory delivers 256 contiguous bytes faster, so two stages are requested at
   a time, and each is released as soon as it is multiplied. Above 64 rows products take time as well, and the mode pays
   only where groups are nearly equal (plan_split in body_product_warps.cuh). */
#define GMM__SMALL_M(tile_n) \
    (!GMM__K_GROUPED && !GMM__TB && !GMM__CFG(b_format) && !GMM__CFG(gather) && GMM__CFG(consumers) == 2 && \
             (tile_n) == 256 \
         ? GMM_SM90_SMALL_M : 0)
/* The store slots of a consumer warp group; in wgrad the slot of a part, whichever warp group writes it. */
#define GMM__STORE_SLOT(wg, nth) \
    ((char *)smem + GMM__OFFSET(GMM__SMEM, slot) + \
     GMM__CFG(slot_bytes) * (GMM__K_GROUPED ? (int)((nth) % GMM_SM90_STORE_SLOTS) : 2 * (wg)))
#define GMM__SCHEDULER_WARP (GMM__CFG(b_format) ? GMM_SM90_PACKED_SCHEDULER_WARP : GMM_SM90_SCHEDULER_WARP)

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
/* Stores the next rows of a tile, whose 16-bit D is pending in the registers `words`, through one of the warp group's
   slots, by TMA where it may store D (args->d_by_tma). The slots of a warp group rotate: TMA must have read a slot one
   stage before it is written again, three stages after its store with four slots, one with two. Words are selected by
   predicates: an index into them would put them into local memory, and moving them down would need as many registers
   again. */
GMM__DEVICE void GMM__PART(gmm_sm90_store_deferred_)(gmm_sm90_store_state *store,
                                                     const uint32_t words[GMM__DEFERRED_WORDS]) {
    const gmm_sm90_args *const args = store->args;
    const gmm_sm90_tile *const t = store->tile;
    const int wg = store->wg;
    const int tid = gmm_tid_x() & 127, lane = tid & 31, w = tid >> 5, row = 16 * (t->row_blocks - store->pending);
    char *const slot = store->slots + store->part % GMM__DEFERRED_SLOTS * (512 * GMM__WORDS_PER_STORE);
    const uint32_t slot_at = (uint32_t)__cvta_generic_to_shared(slot);
    const uint32_t st_at = gmm_wgmma_stmatrix_at(slot_at, 128, w, lane);
    const gmm_kmat *const d = &args->p.d;
    int x, e;
#pragma unroll
    for (x = 0; x + 3 < GMM__DEFERRED_WORDS; x += 4)
        gmm_stmatrix_x4_trans_if(x / GMM__WORDS_PER_STORE * GMM__CFG(deferred) == row / 16,
                                 st_at + x % GMM__WORDS_PER_STORE * 512, words[x], words[x + 1], words[x + 2],
                                 words[x + 3]);
    gmm_fence_proxy_async();
    if (tid == 0) /* the next slot may be overwritten */
        GMM__BULK_WAIT_GROUP_READ(GMM__DEFERRED_SLOTS - 2);
    gmm_consumer_sync(wg);
    if (args->d_by_tma) {
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

/* Stores the CTA's last tile at once, where TMA may store D (args->d_by_tma). All of it is pending in the registers
   `words`. No stage follows in either CTA of the cluster, and no other warp group reads this one's columns of B, which
   therefore serve as slots: 64 rows of D in each stage. base: of shared memory. */
GMM__DEVICE void GMM__PART(gmm_sm90_store_last_)(gmm_sm90_store_state *store, uint32_t base,
                                                 const uint32_t words[GMM__DEFERRED_WORDS]) {
    const gmm_sm90_tile *const t = store->tile;
    const int wg = store->wg, lane = gmm_tid_x() & 31, w = gmm_tid_x() >> 5 & 3;
    const uint32_t slots_at = base + GMM_SM90_BOX_BYTES * (uint32_t)wg;
    const uint32_t st_at = gmm_wgmma_stmatrix_at(slots_at, 128, w, lane);
    int u;
    static_assert(GMM__CFG(m16) <= 4 * GMM__CFG(stages), "the stages hold the rows of a tile of D");
    gmm_consumer_sync(wg); /* all warps have multiplied the last stage */
#pragma unroll
    for (u = 0; u < GMM__DEFERRED_WORDS / 4; u++)
        gmm_stmatrix_x4_trans_if(u < t->row_blocks, st_at + u / 4 * GMM__CFG(stage_bytes) + u % 4 * 2048, words[4 * u],
                                 words[4 * u + 1], words[4 * u + 2], words[4 * u + 3]);
    gmm_fence_proxy_async();
    gmm_consumer_sync(wg);
    if (lane == 0) { /* each warp requests every fourth TMA box */
#pragma unroll 1
        for (u = GMM__CFG(deferred) * w; u < t->row_blocks; u += 4 * GMM__CFG(deferred))
            gmm_tma_store(&store->args->d, slots_at + u / 4 * GMM__CFG(stage_bytes) + u % 4 * 2048, 0, t->n0 + 64 * wg,
                          GMM_SM90_RAGGED_ROWS - t->rows + 16 * u, t->row + t->m0 + t->rows, GMM_SM90_RAGGED_ROWS);
        gmm_bulk_commit_group();
        GMM__BULK_WAIT_GROUP(0);
    }
    store->pending = 0;
}

/* Mainloop of a consumer warp group: accumulates the stages of a tile of 8 n8 rows, and meanwhile stores the previous
   tile (deferred store). last_stage_full: mbarrier at which this warp group of a ping-pong tile arrives when its last
   stage is full. small_m: a stage is released when it is multiplied, else one stage after it, so that wgmma never
   pauses. */
GMM__DEVICE void GMM__PART(gmm_sm90_mainloop_)(const int n8, const int small_m,
                                               float acc[GMM__CFG(wgmma_m)][8 * GMM__CFG(m16)],
                                               const gmm_sm90_operands *operands, uint32_t last_stage_full,
                                               gmm_sm90_pipeline *pipe, gmm_sm90_store_state *store,
                                               const uint32_t deferred[GMM__DEFERRED_WORDS]) {
    const uint32_t lane = threadIdx.x & 31;
    uint32_t k, s = pipe->iter % GMM__CFG(stages), parity = pipe->iter / GMM__CFG(stages) & 1, prev_stage = 0;
    int kk, j;
#pragma unroll 1
    for (k = 0;; k++) {
        const uint64_t b = operands->desc_b + s * (GMM__CFG(stage_bytes) >> 4);
        const uint64_t a = operands->desc_a + s * (GMM__CFG(stage_bytes) >> 4);
        gmm_mbarrier_wait(gmm_sm90_full(pipe->bars, s), parity);
        if (GMM__CFG(gather)) gmm_fence_proxy_async(); /* wgmma reads what cp.async has written */
        if (GMM__CFG(consumers) == 1 && k == operands->k_tiles - 1 && lane == 0) gmm_mbarrier_arrive(last_stage_full);
        gmm_wgmma_fence();
        /* a step of 16 k: 16 rows of 128 bytes of an MN-major operand, else 32 bytes of each row */
#pragma unroll
        for (kk = 0; kk < 4; kk++)
#pragma unroll
            for (j = 0; j < GMM__CFG(wgmma_m); j++)
                GMM__CAT(GMM__CAT(GMM__CAT(gmm_wgmma_, GMM__TAG), _), GMM__WGMMA_OP)(
                    n8, acc[j], b + j * (8192 >> 4) + kk * ((GMM__TB ? 2048 : 32) >> 4),
                    a + kk * ((GMM__TA ? 2048 : 32) >> 4), !GMM__ZERO_INIT || k > 0 || kk > 0);
        gmm_wgmma_commit();
        if (small_m) GMM__WGMMA_WAIT(0);
        else GMM__WGMMA_WAIT(1);
        if (small_m || k > 0) gmm_sm90_release_stage(pipe, small_m ? s : prev_stage);
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
    if (!small_m) gmm_sm90_release_stage(pipe, prev_stage);
    pipe->iter += operands->k_tiles;
}
#endif
