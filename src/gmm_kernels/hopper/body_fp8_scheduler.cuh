
/* GMM__BODY_FP8, continued: the scheduler warp. */
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
/* Whether the CTA's first tile is predicted, and loaded and multiplied while the scheduler checks the split. */
GMM__DEVICE int GMM__PART(gmm_fp8_predicts_)(const gmm_fp8_args *args) {
    return GMM__CFG(predicts_first_tile) && !args->wgrad && !args->tables;
}

#if GMM__TILES > 0
#if GMM__TILES == 2
/* Chooses the kernel's tile for the split that s->ends describe. */
GMM__DEVICE void GMM__PART(gmm_fp8_choose_tile_)(const gmm_fp8_args *args, GMM__SMEM *smem, gmm_sm90_scheduler *s,
                                                 gmm_sm90_split_stats stats) {
    int second = args->tile_choice;
    if (second == gmm_sm90_tile_by_split) /* wgrad takes the first tile */
        second = !args->wgrad && gmm_fp8_tile_price(s, stats, GMM__CFG_OF(1, consumers), GMM__CFG_OF(1, tile_n)) <
                                 gmm_fp8_tile_price(s, stats, GMM__CFG(consumers), GMM__CFG(tile_n));
    s->max_blocks = GMM__CFG_OF(second, consumers);
    s->col_align = GMM__COL_ALIGN(GMM__CFG_OF(second, tile_n));
    s->cluster_along_n = GMM__CFG_OF(second, tile_n) == 128;
    if ((threadIdx.x & 31) == 0) smem->bars.second_tile = second;
    __syncwarp();
}
#endif

/* Reads the split and writes the tables of groups by which the scheduler `s` chooses tiles. */
GMM__DEVICE void GMM__PART(gmm_fp8_plan_split_)(const gmm_fp8_args *args, GMM__SMEM *smem, gmm_sm90_scheduler *s) {
    const gmm_sm90_split_stats stats = gmm_sm90_read_split(&args->groups, s->ends);
#if GMM__TILES == 2
    GMM__PART(gmm_fp8_choose_tile_)(args, smem, s, stats);
#endif
    /* divisions by constants: a division by a variable would delay the first tile */
    s->tiles_n = GMM__CFG_OF(smem->bars.second_tile, tile_n) == 128 ? (args->p.n + 127) / 128
                                                                    : (args->p.n + 191) / 192;
    if (!args->wgrad)
        s->tiles_n = gmm_sm90_tiles_n(&args->p, s->tiles_n, s->col_align, GMM_FP8_BLOCK_ROWS * s->max_blocks,
                                      (int32_t)gmm_cluster_nctarank(), stats);
    s->k_grouped = args->wgrad;
    if (GMM__CFG(predicts_first_tile) || !args->wgrad ||
        !gmm_sm90_plan_balance(s, stats, args->tables ? 0 : (int32_t)GMM_SM90_SMEM_GROUPS,
                               2 * gmm_sm90_d_stages(&args->p), (gmm_sm90_balance *)(void *)smem->work_ends,
                               smem->ends))
        gmm_sm90_count_work(s, (int32_t)gmm_cluster_nctarank());
    gmm_fp8_padded_starts(args->p.groups, s->ends, s->padded_starts);
}

/* Plans the split before griddepcontrol.wait where that is allowed, and after the wait unless the early plan still
   holds. */
GMM__DEVICE void GMM__PART(gmm_fp8_plan_split_twice_)(const gmm_fp8_args *args, GMM__SMEM *smem, uint32_t base,
                                                      gmm_sm90_scheduler *s) {
    const int predicts = GMM__PART(gmm_fp8_predicts_)(args);
    int32_t early = gmm_sm90_plans_early(&args->p, args->tables, args->wgrad);
#pragma unroll 1
    for (; early >= 0; early--) {
        if (!early) {
            gmm_griddepcontrol_wait();
            if (s->tiles_n && gmm_sm90_split_unchanged(&args->groups, s->ends)) break;
        }
        GMM__PART(gmm_fp8_plan_split_)(args, smem, s);
        if (predicts && early) {
            gmm_fp8_tile f;
            gmm_fp8_predict_first_tile(args, s, gmm_sm90_this_cta(), &f);
            gmm_cluster_wait_acquire(); /* the barriers are initialised */
            if ((threadIdx.x & 31) == 0) {
                smem->ring[GMM_SM90_TILE_RING - 1] = f;
                /* the producer loads its operands right after the wait */
                gmm_mbarrier_arrive(base + GMM__CFG(prediction_offset) + GMM__OFFSET(gmm_fp8_prediction, full));
            }
            __syncwarp();
        }
    }
}

/* The scheduler warp chooses the CTA's tiles one by one. It is at most half a ring ahead of the producer. */
GMM__DEVICE void GMM__PART(gmm_fp8_schedule_tiles_)(const gmm_fp8_args *args, GMM__SMEM *smem, uint32_t base) {
    gmm_fp8_tile *const ring = smem->ring;
    const uint32_t bars = GMM__SMEM_AT(bars), prediction = base + GMM__CFG(prediction_offset);
    const uint32_t cluster = gmm_cluster_nctarank();
    const int lane = (int)threadIdx.x & 31, predicts = GMM__PART(gmm_fp8_predicts_)(args);
    int32_t *const ends = args->tables ? args->tables + (int64_t)blockIdx.x * 3 * (args->p.groups + 1)
                                      : smem->ends;
    int32_t *const work_ends = args->tables ? ends + args->p.groups + 1 : smem->work_ends;
    int32_t *const starts = args->tables ? work_ends + args->p.groups + 1 : smem->padded_starts;
    gmm_sm90_balance *const balance = (gmm_sm90_balance *)(void *)smem->work_ends;
    const int32_t stride = (int32_t)(gridDim.x >> (cluster - 1));
    /* of the first tile; gmm_fp8_choose_tile_ overwrites what depends on the tile */
    gmm_sm90_scheduler s = { &args->p, ends, work_ends, /* padded_starts */ starts, /* k_grouped */ 0,
                             /* cluster_along_n */ GMM__CFG(tile_n) == 128, /* tiles_n */ 0,
                             /* max_blocks */ GMM__CFG(consumers), /* odd_tiles, g, balanced */ 0, 0, 0,
                             /* block_rows */ GMM_FP8_BLOCK_ROWS, /* row_align */ GMM_FP8_BLOCK_ROWS,
                             /* col_align */ GMM__COL_ALIGN(GMM__CFG(tile_n)) };
    /* unresolved: this CTA does not know yet whether a CTA of its cluster repeats its first tile */
    int mispredicted = 0, unresolved = predicts;
    int32_t work = (int32_t)(blockIdx.x >> (cluster - 1));
    uint32_t tile_index = 0;
    gmm_fp8_tile f;
    GMM__PART(gmm_fp8_plan_split_twice_)(args, smem, base, &s);
    if (GMM__TILES == 2) { /* no other warp touches the slots before the first tile is in the ring */
        if (lane == 0)
            gmm_fp8_init_slots(GMM__SMEM_AT(slot_bars), GMM__CFG_OF(smem->bars.second_tile, consumers),
                               GMM__CFG_OF(smem->bars.second_tile, store_boxes));
        __syncwarp();
    }
    f.t.g = 0;
    for (;; work += stride, tile_index++) {
        const uint32_t oldest = tile_index - GMM_SM90_TILE_RING / 2;
        int32_t next_work = work;
        f.t.row_blocks = 0; /* ends the ring */
        int32_t in_group = -1, group_work = 0; /* number of the tile in its group; -1: there is none */
        /* Behind the last tile. If this CTA mispredicted, it repeats its first tile; if only its peer did, it takes an
           empty tile, so that both pass equally many stages. */
        if (unresolved && tile_index > 0 && next_work >= work_ends[args->p.groups]) {
            int peer_mispredicted = 0;
            unresolved = 0;
            if (gmm_cluster_nctarank() > 1) {
                gmm_mbarrier_wait(prediction + GMM__OFFSET(gmm_fp8_prediction, peer_full), 0);
                peer_mispredicted = *(volatile const int32_t *)((const char *)smem + GMM__CFG(prediction_offset) +
                    GMM__OFFSET(gmm_fp8_prediction, peer_mispredicted));
            }
            if (mispredicted || peer_mispredicted) { /* one more tile for the CTAs of the cluster */
                gmm_fp8_empty_tile(args, &f);
                if (mispredicted) next_work = (int32_t)(blockIdx.x >> (cluster - 1));
            }
        }
        if (!GMM__CFG(predicts_first_tile) && s.balanced)
            f.t.g = gmm_sm90_balanced_tile(balance, smem->ends, &args->p, (int32_t)tile_index, &in_group);
        else if (next_work < work_ends[args->p.groups]) {
            gmm_find_group32(work_ends, args->p.groups, next_work, &f.t.g);
            in_group = next_work - work_ends[f.t.g];
            group_work = work_ends[f.t.g + 1] - work_ends[f.t.g];
        }
        if (in_group >= 0) { /* what follows from the arguments and the tile is set anew, and takes no registers */
            s.k_grouped = args->wgrad;
            s.col_align = args->wgrad ? GMM__CFG_OF(smem->bars.second_tile, tile_n)
                                      : GMM__COL_ALIGN(GMM__CFG_OF(smem->bars.second_tile, tile_n));
            gmm_sm90_schedule_tile(&s, GMM__CFG_OF(smem->bars.second_tile, tile_n) == 128, group_work, in_group,
                                   !args->wgrad ? 0
                                                : gmm_sm90_wgrad_rotation(stride, group_work,
                                                                          gmm_sm90_tile_count(args->p.m, s.block_rows,
                                                                                              s.max_blocks)),
                                   gmm_sm90_this_cta(), &f.t);
            f.padded_row = starts[f.t.g];
            gmm_fp8_plan_store(args, &f);
            if (GMM__CFG(glu) && args->glu.drops_d) f.d_flags &= ~GMM_FP8_D_TMA;
            /* a repeated tile: the peer loads no half of a multicast operand */
            if (predicts && !unresolved) f.t.multicast = GMM_SM90_MULTICAST_NONE;
        }
        if (predicts && tile_index == 0) {
            const gmm_fp8_tile *const predicted = &ring[GMM_SM90_TILE_RING - 1];
            if (f.t.row_blocks == 0) gmm_fp8_empty_tile(args, &f);
            mispredicted = !gmm_fp8_same_tile(&f, predicted);
            __syncwarp();
            if (mispredicted) gmm_fp8_empty_tile(args, &f); /* the result of the predicted tile is discarded */
            if (lane == 0 && gmm_cluster_nctarank() > 1)
                gmm_fp8_send_mispredict(prediction, mispredicted);
        }
        if (tile_index >= GMM_SM90_TILE_RING / 2)
            gmm_mbarrier_wait(gmm_fp8_tile_begun(bars, oldest), oldest / GMM_SM90_TILE_RING & 1);
        if (lane == 0) {
            ring[tile_index % GMM_SM90_TILE_RING] = f;
            if (gmm_fp8_has_outer_scale(args))
                gmm_fp8_plan_outer_scale(args, &ring[tile_index % GMM_SM90_TILE_RING]);
            gmm_mbarrier_arrive(gmm_fp8_tile_full(bars, tile_index));
        }
        if (f.t.row_blocks == 0) break;
    }
    if (blockIdx.x == 0) gmm_sm90_report_faults(&args->groups, &args->p, ends);
}
#endif
#endif
