/* GMM__BODY_PRODUCT, continued: initialization of the barriers, and the kernel. */
#if GMM__TILES > 0
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
/* Initializes the mbarriers. One thread. */
GMM__DEVICE void GMM__PART(gmm_sm90_init_barriers_)(uint32_t stage_bars, uint32_t bars, uint32_t cluster_size) {
    uint32_t i;
#pragma unroll
    for (i = 0; i < GMM__CFG(stages); i++) {
        /* full: the producer, and the lanes of the scale loader or of the warps that gather */
        gmm_mbarrier_init(gmm_sm90_full(stage_bars, i),
                          1 + (GMM__CFG(b_format) ? 32 : 0) + 32 * GMM__CFG(gather_warps));
        /* empty: consumer warps of the CTAs that read the stage */
        gmm_mbarrier_init(gmm_sm90_empty(stage_bars, i), 4 * GMM__CFG(consumers) * cluster_size);
    }
#pragma unroll
    for (i = 0; i < GMM_SM90_TILE_RING; i++) gmm_mbarrier_init(gmm_sm90_tile_full(bars, i), 1);
    gmm_mbarrier_init(gmm_sm90_first_tile_planned(bars), 1);
    gmm_mbarrier_init(gmm_sm90_split_checked(bars), 1);
    /* readers of the ring: 8 consumer warps, the producer, 2 store warps or 4 gather warps, the scale loader */
#pragma unroll
    for (i = 0; i < GMM_SM90_TILE_BATCHES; i++)
        gmm_mbarrier_init(gmm_sm90_batch_empty(bars, i),
                          9 + (GMM__K_GROUPED ? 2 : 0) + GMM__CFG(gather_warps) + (GMM__CFG(b_format) ? 1 : 0));
#pragma unroll
    for (i = 0; i < 2; i++) /* the warps of a warp group */
        gmm_mbarrier_init(gmm_sm90_last_stage_full(bars, (int)i), 4);
    /* slots, at which wgrad alone arrives: the two lanes of a store warp; the four warps of a warp group */
#pragma unroll
    for (i = 0; i < GMM_SM90_STORE_SLOTS; i++) {
        gmm_mbarrier_init(gmm_sm90_store_empty(bars, i), GMM__K_GROUPED ? 2 : 1);
        gmm_mbarrier_init(gmm_sm90_store_full(bars, i), GMM__K_GROUPED ? 4 : 128);
    }
    gmm_fence_mbarrier_init();
}

#endif

static_assert((int)GMM__SM90_ROW(GMM__KERNEL_NAME, GMM__OP, GMM__TAG, GMM__TILE, first) >= 0,
              "GMM_SM90_KERNEL_LIST has the kernel with this tile");
#if GMM__TILES == 2
static_assert((int)GMM__SM90_ROW(GMM__KERNEL_NAME, GMM__OP, GMM__TAG, GMM__SECOND_TILE, second) >= 0,
              "GMM_SM90_KERNEL_LIST has the kernel with its second tile");
#endif
GMM__ROW_KERNEL GMM__SM90_BOUNDS GMM__KERNEL_NAME(const __grid_constant__ GMM__ARGS args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ __align__(1024) char gmm_shared[];
    GMM__SMEM *const smem = (GMM__SMEM *)gmm_shared;
    gmm_sm90_tile *const ring = smem->ring.tile;
    const uint32_t base = (uint32_t)__cvta_generic_to_shared(gmm_shared);
    const uint32_t stage_bars = GMM__SMEM_AT(stage_bars), bars = GMM__SMEM_AT(bars);
    const int warp = (int)threadIdx.x >> 5, lane = (int)threadIdx.x & 31;

    gmm_sm90_prefetch_params((const uint32_t *)&args.p, (int)(sizeof args - offsetof(gmm_sm90_args, p)), warp);
    if (threadIdx.x == 0) {
        GMM__PART(gmm_sm90_init_barriers_)(stage_bars, bars, gmm_cluster_nctarank());
        gmm_prefetch_tensormap(&args.a);
        if (!GMM__TA) gmm_prefetch_tensormap(&args.a16);
        gmm_prefetch_tensormap(&args.b);
    }
    gmm_cluster_arrive_relaxed(); /* gmm_fence_mbarrier_init is the release */
    if (warp != GMM__SCHEDULER_WARP) { /* the scheduler plans the first tile before it waits */
        gmm_cluster_wait_acquire();
        if (warp != GMM_SM90_PRODUCER_WARP) gmm_griddepcontrol_wait();
        gmm_griddepcontrol_launch_dependents();
    }

    if (warp >= GMM_SM90_CONSUMER_WARPS) {
        GMM__SETMAXNREG_DEC(GMM__CFG(other_regs));
        if (warp == GMM_SM90_PRODUCER_WARP) { /* nothing may follow, or ptxas gives up the thread's uniform registers */
            if (gmm_elect_one()) GMM__PART(gmm_sm90_load_stages_)(args, smem, base);
            return;
        }
        if (warp == GMM__SCHEDULER_WARP) GMM__PART(gmm_sm90_schedule_tiles_)(args, smem, base);
        if (warp == GMM_SM90_CHECK_WARP && gmm_sm90_plans_early(&args.p, args.tables, GMM__K_GROUPED))
            gmm_sm90_check_split(&args.groups, smem->ends, &smem->ring, bars);
        if (GMM__K_GROUPED && warp >= GMM_SM90_STORE_WARP && lane < 2) /* store warps: every other part of D */
            gmm_sm90_store_tiles(&args, ring, bars, (uint32_t)warp - GMM_SM90_STORE_WARP, GMM__SMEM_AT(slot));
        if (GMM__CFG(gather) && warp >= GMM_SM90_GATHER_WARP) {
            const gmm_sm90_pipeline pipe = { stage_bars, GMM__CFG(stages), GMM__CFG(stage_bytes), 0, 0 };
            gmm_sm90_gather_tiles(&args, ring, bars, pipe, base, GMM__CFG(a_offset),
                                  (uint32_t)warp - GMM_SM90_GATHER_WARP, GMM__CFG(m16));
        }
        if (GMM__CFG(b_format) && warp == GMM_SM90_SCALE_WARP) {
            const gmm_sm90_pipeline pipe = { stage_bars, GMM__CFG(stages), GMM__CFG(stage_bytes), 0, 0 };
            gmm_sm90_load_scales(&args, GMM__CFG(b_format), GMM__CFG(scale_width), base + GMM__CFG(scales_offset), pipe,
                                 ring, bars);
        }
    } else {
        GMM__SETMAXNREG_INC(GMM__CFG(consumer_regs));
#if GMM__TILES == 2
        gmm_sm90_wait_tile(bars, 0);
        if (*(const volatile int32_t *)&smem->ring.second_tile)
            GMM__SECOND_PART(gmm_sm90_consume_tiles_)(args, (GMM__SM90(smem, GMM__SECOND_TILE) *)gmm_shared, base);
        else
#endif
        GMM__PART(gmm_sm90_consume_tiles_)(args, smem, base);
    }
#endif
}
#endif
#undef GMM__DEFERRED
#undef GMM__DEFERRED_WORDS
#undef GMM__WORDS_PER_STORE
#undef GMM__DEFERRED_SLOTS
#undef GMM__SCHEDULER_WARP
#undef GMM__STORE_SLOT
#undef GMM__ZERO_INIT
#undef GMM__ROW_ALIGN
#undef GMM__SMALL_M
#undef GMM__HAS_N8
#undef GMM__ROWS_PER_STORE
#undef GMM__PARTS_PER_COLUMN
#undef GMM__K_GROUPED
#undef GMM__GLU
#undef GMM__DGLU
#undef GMM__WGMMA_OP
#undef GMM__COL_ALIGN
#undef GMM__TB
#undef GMM__TA
#undef GMM__MAX_CFG
#undef GMM__CFG_OF
#undef GMM__SECOND_CFG
#undef GMM__TILE_CHOICE
#undef GMM__SECOND_PART
#undef GMM__PART
#undef GMM__INSTANCE
#undef GMM__SMEM_AT
#undef GMM__SMEM
#undef GMM__CFG
#undef GMM__TILE
#undef GMM__SECOND_TILE
#undef GMM__KERNEL_NAME
#undef GMM__TILES
#undef GMM__OP
#undef GMM__TAG
#undef GMM__DTYPE
#undef GMM__ROW

