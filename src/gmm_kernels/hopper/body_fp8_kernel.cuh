
/* GMM__BODY_FP8, continued: the kernel. Its warp roles, barriers and shared memory: above gmm_fp8_args. */
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
/* A consumer warp group: mainloop and epilogue, pass by pass. idle_consumers: of the kernel, for which consumer 0
   releases stages. */
GMM__DEVICE void GMM__PART(gmm_fp8_consume_tiles_)(const gmm_fp8_args *args, const GMM__SMEM *smem, uint32_t base,
                                                   const int idle_consumers) {
    const gmm_fp8_tile *const ring = smem->ring;
    const uint32_t bars = GMM__SMEM_AT(bars), prediction = base + GMM__CFG(prediction_offset);
    const uint32_t stage_scales_at = base + (uint32_t)sizeof(GMM__SMEM);
    const int predicts = GMM__PART(gmm_fp8_predicts_)(args), tid = gmm_tid_x();
    const int wg = __shfl_sync(0xFFFFFFFFu, tid >> 7, 0);
    int by_line = args->a_scale.scaling == GMM_SCALING_ROW || args->b_scale.scaling == GMM_SCALING_ROW;
    int has_steps = !args->wgrad && gmm_epilogue_steps_present(&args->p);
    const uint32_t row = 64 * wg + (tid >> 5 & 3) * 16 + (tid & 31) / 4;
    gmm_fp8_pipeline pipe = gmm_fp8_begin_pipeline(base + GMM__CFG(a_offset) + 8192 * wg, base,
                                                   GMM__SMEM_AT(stage_bars), stage_scales_at + 4 * row,
                                                   stage_scales_at + GMM__ROW_SCALE_BYTES,
                                                   wg == 0 ? idle_consumers : 0);
    gmm_fp8_store store = { 0, 0 };
    gmm_fp8_consumer_tile tile = gmm_fp8_read_tile(gmm_fp8_wait_tile(ring, bars, prediction, 0, predicts)), next;
    uint32_t tile_index = 0;
    float acc[GMM__ACC];
    int pass = 0, u;
    GMM__PIN_U32(by_line); /* words, since the mainloop needs the predicates */
    GMM__PIN_U32(has_steps);
    for (;; pass = (pass + 1) % GMM__PASSES, tile_index += pass == 0, tile = next) {
        int present = tile.cols > 0 && tile.row_blocks > wg;
        /* All lanes have read the previous tile's entry before one of them releases stages of this tile, by which the
           producer begins further tiles and the scheduler overwrites entries (fp8_plan.cuh). */
        __syncwarp();
        if (tile.row_blocks == 0) break;
        if (!present || tile.k == 0) {
            gmm_fp8_pass_slot(&store);
            GMM__PART(gmm_fp8_skip_stages_)(gmm_fp8_k_tiles(tile.k), &pipe);
        }
        if (present) {
            if (by_line) GMM__PART(gmm_fp8_request_line_scales_)(args, &tile.f->t, base, wg);
            if (tile.k > 0) GMM__PART(gmm_fp8_mainloop_)(acc, &tile, wg, &pipe, &store);
            else
#pragma unroll
                for (u = 0; u < GMM__ACC; u++) {
                    acc[u] = 0.0f;
                    GMM__PIN_F32(acc[u]); /* else the compiler zeroes ahead of the branch */
                }
            if (predicts && tile_index == 0 && pass == 0) { /* the scheduler has read the split again meanwhile */
                tile = gmm_fp8_read_tile(gmm_fp8_wait_tile(ring, bars, prediction, 0, 0));
                present = tile.cols > 0;
                if (!present) gmm_cp_async_wait_all();
            }
        }
        /* read here, so that the next tile begins without a wait for its entry */
        next = tile;
        if (pass == GMM__PASSES - 1)
            next = gmm_fp8_read_tile(gmm_fp8_wait_tile(ring, bars, prediction, tile_index + 1, 0));
        if (!present) {
            if (pass == 0) GMM__PART(gmm_fp8_skip_slot_)(base, wg, &store);
            continue;
        }
        GMM__PART(gmm_fp8_scale_accumulators_)(&tile, by_line, base, wg, acc);
        if (has_steps) GMM__PART(gmm_fp8_apply_steps_)(args, &tile.f->t, pass, wg, acc);
        if (!GMM__CFG(glu)) GMM__PART(gmm_fp8_store_accumulators_)(args, &tile, smem, base, wg, acc, &store);
        else if (pass == 0) GMM__PART(gmm_fp8_keep_gate_)(base, wg, acc, &store);
        else GMM__PART(gmm_fp8_store_glu_)(args, tile.f, smem, base, wg, acc, &store);
    }
    gmm_fp8_pass_slot(&store);
}

/* Producer, scale loader and store warp. role: number of the warp behind the consumers. */
GMM__DEVICE void GMM__PART(gmm_fp8_move_tiles_)(const gmm_fp8_args *args, const GMM__SMEM *smem, uint32_t base,
                                                int role) {
    const uint32_t bars = GMM__SMEM_AT(bars);
    if (role == GMM_FP8_PRODUCER_WARP) {
        if (gmm_elect_one()) GMM__PART(gmm_fp8_load_stages_)(args, smem, base);
    } else if (role == GMM_FP8_SCALE_WARP)
#if GMM__IS_1D1D
        GMM__PART(gmm_fp8_load_scales_1d1d_)(args, smem->ring, bars, GMM__SMEM_AT(stage_bars),
                                             base + (uint32_t)sizeof(GMM__SMEM));
#else
        GMM__PART(gmm_fp8_load_scales_)(args, smem, base);
#endif
    else if (role == GMM_FP8_STORE_WARP && ((int)threadIdx.x & 31) < GMM__CFG(consumers) * GMM__CFG(store_boxes))
        gmm_fp8_store_tiles(args, GMM__CFG(store_boxes), GMM__PASSES, smem->ring, bars, GMM__SMEM_AT(slot_bars),
                            GMM__SMEM_AT(slot));
}

#if GMM__TILES > 0
/* Initialises the barriers with their arrivals per phase, and scales that the call may not have. The barriers of slots
   depend on the tile: where a kernel has two, the scheduler initialises them behind its choice. */
GMM__DEVICE void GMM__PART(gmm_fp8_init_)(const gmm_fp8_args *args, GMM__SMEM *smem, uint32_t base) {
    const uint32_t stage_bars = GMM__SMEM_AT(stage_bars), bars = GMM__SMEM_AT(bars);
    const uint32_t slot_bars = GMM__SMEM_AT(slot_bars), prediction = base + GMM__CFG(prediction_offset);
    const uint32_t loader_arrivals = GMM__PART(gmm_fp8_has_stage_scales_)(args)
                                     ? (int)GMM__FP8(loader_arrivals, GMM__SCALING) : 0;
    const uint32_t consumer_warps = 4 * GMM__CFG(consumers) * gmm_cluster_nctarank();
    uint32_t i;
    /* Scales that the call does not have stay 1: those of lines, and those of stages, which follow the struct. Those of
       a second tile lie within them, since they begin at the same place and its struct is smaller. */
    const uint32_t scale_bytes = sizeof(GMM__SMEM) - offsetof(GMM__SMEM, line_scales) +
                                 (GMM__SCALING_VALUE == GMM_FP8_FAST || loader_arrivals
                                      ? 0 : GMM__CFG(stages) * GMM__STAGE_SCALE_BYTES);
    for (i = threadIdx.x; i < scale_bytes / 4; i += blockDim.x)
        ((float *)((char *)smem + offsetof(GMM__SMEM, line_scales)))[i] = 1.0f;
    if (threadIdx.x != 0) return;
#pragma unroll
    for (i = 0; i < GMM__CFG(stages); i++) {
        gmm_mbarrier_init(gmm_sm90_full(stage_bars, i), 1 + loader_arrivals);
        gmm_mbarrier_init(gmm_sm90_empty(stage_bars, i), consumer_warps);
    }
#pragma unroll
    for (i = 0; i < GMM_SM90_TILE_RING; i++) gmm_mbarrier_init(gmm_fp8_tile_full(bars, i), 1);
#pragma unroll
    for (i = 0; i < GMM_SM90_TILE_RING; i++) gmm_mbarrier_init(gmm_fp8_tile_begun(bars, i), 1);
    if (GMM__TILES == 1) gmm_fp8_init_slots(slot_bars, GMM__CFG(consumers), GMM__CFG(store_boxes));
    if (GMM__CFG(predicts_first_tile)) {
        gmm_mbarrier_init(prediction + GMM__OFFSET(gmm_fp8_prediction, full), 1);
        gmm_mbarrier_init(prediction + GMM__OFFSET(gmm_fp8_prediction, peer_full), 1);
    }
    gmm_fence_mbarrier_init();
    gmm_prefetch_tensormap(&args->a);
    gmm_prefetch_tensormap(&args->b);
}
#endif
#endif

#if GMM__TILES > 0
GMM__ROW_KERNEL GMM__FP8_BOUNDS GMM__KERNEL_NAME(const __grid_constant__ gmm_fp8_args args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ __align__(1024) char gmm_shared[];
    GMM__SMEM *const smem = (GMM__SMEM *)gmm_shared;
    const uint32_t base = (uint32_t)__cvta_generic_to_shared(gmm_shared);
    const int role = ((int)threadIdx.x >> 5) - 4 * GMM__CFG(consumers), predicts = GMM__PART(gmm_fp8_predicts_)(&args);
    GMM__PART(gmm_fp8_init_)(&args, smem, base);
    gmm_cluster_arrive_release();
    if (!predicts || role != GMM_FP8_SCHEDULER_WARP) gmm_cluster_wait_acquire();
    if (role != GMM_FP8_SCHEDULER_WARP && !(predicts && role == GMM_FP8_PRODUCER_WARP)) gmm_griddepcontrol_wait();
    gmm_griddepcontrol_launch_dependents();

    if (role < 0) {
#if GMM__TILES == 2
        /* keeps addresses and wgmma descriptors in uniform registers; without it stages take 1% longer */
        const uint32_t base_of_consumers = __shfl_sync(0xFFFFFFFFu, base, 0);
        if (gmm_fp8_wait_choice(&smem->bars, GMM__SMEM_AT(bars))) {
            if (role >= -4 * GMM__IDLE_CONSUMERS) { /* the others cannot begin before they have its registers */
                GMM__SETMAXNREG_DEC((int)GMM_FP8_IDLE_REGS);
                return;
            }
            GMM__SETMAXNREG_INC(GMM__CFG_OF(1, consumer_regs));
            GMM__SECOND_PART(gmm_fp8_consume_tiles_)(&args, (GMM__SECOND_SMEM *)gmm_shared, base_of_consumers,
                                                     GMM__IDLE_CONSUMERS);
            return;
        }
#else
        const uint32_t base_of_consumers = base;
#endif
        if (GMM__SCALING_VALUE == GMM_FP8_1D1D && threadIdx.x >= 128) gmm_order_arrive(0); /* consumer 0 begins */
        GMM__SETMAXNREG_INC(GMM__CFG(consumer_regs));
        GMM__PART(gmm_fp8_consume_tiles_)(&args, smem, base_of_consumers, 0);
        return;
    }
    GMM__SETMAXNREG_DEC(GMM__CFG(other_regs));
    if (role == GMM_FP8_SCALE_WARP && !GMM__PART(gmm_fp8_has_stage_scales_)(&args)) return;
    if (role == GMM_FP8_SCHEDULER_WARP) GMM__PART(gmm_fp8_schedule_tiles_)(&args, smem, base);
#if GMM__TILES == 2
    else if (gmm_fp8_wait_choice(&smem->bars, GMM__SMEM_AT(bars)))
        GMM__SECOND_PART(gmm_fp8_move_tiles_)(&args, (GMM__SECOND_SMEM *)gmm_shared, base, role);
#endif
    else GMM__PART(gmm_fp8_move_tiles_)(&args, smem, base, role);
#endif
}
#endif
#undef GMM__WGMMA
#undef GMM__PASSES
#undef GMM__ACC
#undef GMM__COL_ALIGN
#undef GMM__LINE_SCALES
#undef GMM__STAGE_SCALE_BYTES
#undef GMM__ROW_SCALE_BYTES
#undef GMM__STAGE_SCALES
#undef GMM__SMEM_AT
#undef GMM__SMEM
#undef GMM__SCALING_VALUE
#undef GMM__CFG_OF
#undef GMM__IDLE_CONSUMERS
#undef GMM__SECOND_SMEM
#undef GMM__SECOND_PART
#undef GMM__PART
#undef GMM__INSTANCE
#undef GMM__CFG
#undef GMM__TILE
#undef GMM__TILES
#undef GMM__SECOND_TILE
#undef GMM__SCALING
#undef GMM__IS_FAST
#undef GMM__IS_1D1D
#undef GMM__KERNEL_NAME
#undef GMM__TAG
#undef GMM__ROW

