/* GMM__BODY_PRODUCT, continued: the scheduler warp and the producer warp. */
#if GMM__TILES > 0 && defined(__CUDA_ARCH_FEAT_SM90_ALL)
/* Reads the split, chooses the tile for it, and writes the tables of groups. */
GMM__DEVICE void GMM__PART(gmm_sm90_plan_split_)(const GMM__ARGS &args, GMM__SMEM *smem, gmm_sm90_scheduler *s) {
    const gmm_sm90_tile_shape shape = { GMM__CFG(tile_n), GMM__CFG(m16) };
    const gmm_sm90_tile_shape second_shape = { GMM__SECOND_CFG(tile_n), GMM__SECOND_CFG(m16) };
    const gmm_sm90_split_stats stats = gmm_sm90_read_split(&args.groups, s->ends);
    /* no group has more than 64 rows; or none has more than 128, and the mean of those with rows is at least 3/4 of the
       largest */
    if ((threadIdx.x & 31) == 0)
        smem->ring.small_m = stats.max_rows <= GMM_SM90_SMALL_M / 2 ||
                             (stats.max_rows <= GMM_SM90_SMALL_M &&
                              4 * s->ends[args.p.groups] >= 3 * stats.max_rows * stats.nonempty);
    s->max_blocks = GMM__K_GROUPED ? GMM__CFG(m16)
                                   : gmm_sm90_choose_tile(s, stats, GMM__TILE_CHOICE,
                                                          GMM__CFG(consumers) == 2 && !GMM__CFG(b_format), shape,
                                                          second_shape, &smem->ring.second_tile);
    __syncwarp();
    /* divisions by constants: a division by a variable would delay the first tile */
    s->tiles_n = GMM__CFG_OF(smem->ring.second_tile, tile_n) == 256   ? (args.p.n + 255) / 256
                 : GMM__CFG_OF(smem->ring.second_tile, tile_n) == 128 ? (args.p.n + 127) / 128
                                                                   : (args.p.n + GMM__CFG(tile_n) - 1) /
                                                                         GMM__CFG(tile_n);
    if (!GMM__K_GROUPED)
        s->tiles_n = gmm_sm90_tiles_n(&args.p, s->tiles_n, GMM__COL_ALIGN, 16 * s->max_blocks,
                                      (int32_t)gmm_cluster_nctarank(), stats);
    s->cluster_along_n = GMM__CFG_OF(smem->ring.second_tile, tile_n) == 128;
    if (!GMM__K_GROUPED ||
        !gmm_sm90_plan_balance(s, stats, args.tables ? 0 : (int32_t)GMM_SM90_SMEM_GROUPS,
                               gmm_sm90_d_stages(&args.p), (gmm_sm90_balance *)(void *)smem->work_ends, smem->ends))
        gmm_sm90_count_work(s, (int32_t)gmm_cluster_nctarank());
    s->g = 0;
}

/* The scheduler warp writes batches of tiles to the ring, one tile per lane. Its first pass is early where that is
   allowed: it plans the first tile by the split as read before griddepcontrol.wait. If the split is the same after it,
   gmm_sm90_check_split publishes that tile; else the second pass plans anew. */
GMM__DEVICE void GMM__PART(gmm_sm90_schedule_tiles_)(const GMM__ARGS &args, GMM__SMEM *smem, uint32_t base) {
    gmm_sm90_tile *const ring = smem->ring.tile;
    const int32_t *const second_tile = &smem->ring.second_tile;
    const uint32_t bars = GMM__SMEM_AT(bars), cluster_size = gmm_cluster_nctarank();
    const int lane = (int)threadIdx.x & 31;
    int32_t *const ends = args.tables ? args.tables + (int64_t)blockIdx.x * 2 * (args.p.groups + 1) : smem->ends;
    int32_t *const work_ends = ends + args.p.groups + 1;
    gmm_sm90_balance *const balance = (gmm_sm90_balance *)(void *)smem->work_ends;
    gmm_sm90_scheduler s = { &args.p, ends, work_ends, /* padded_starts */ NULL, /* k_grouped */ GMM__K_GROUPED,
                             /* cluster_along_n, tiles_n, max_blocks, odd_tiles, g, balanced */ 0, 0, 0, 0, 0, 0,
                             /* block_rows */ 16, /* row_align */ GMM__ROW_ALIGN,
                             /* col_align */ GMM__COL_ALIGN };
    int32_t batch;
    int early = gmm_sm90_plans_early(&args.p, args.tables, GMM__K_GROUPED);
    uint32_t tile_index;
    if (!early) gmm_cluster_wait_acquire();
    for (tile_index = 0;; tile_index += (uint32_t)batch) {
        const int32_t stride = (int32_t)(gridDim.x >> (cluster_size - 1));
        gmm_sm90_tile *const tile = &ring[(tile_index + (uint32_t)lane) % GMM_SM90_TILE_RING];
        int unchanged = 0;
        batch = tile_index == 0 ? 1 : tile_index == 1 ? GMM_SM90_TILE_BATCH - 1 : GMM_SM90_TILE_BATCH;
        if (tile_index == 0) {
            if (!early) {
                if (s.max_blocks > 0) { /* has been planned early */
                    gmm_mbarrier_wait(gmm_sm90_split_checked(bars), 0);
                    unchanged = !*(volatile int32_t *)&smem->ring.planned_late;
                } else if (lane == 0) smem->ring.planned_late = 1;
                gmm_griddepcontrol_wait();
            }
            if (!unchanged) GMM__PART(gmm_sm90_plan_split_)(args, smem, &s);
        }
        if (!unchanged) {
            int32_t work = gmm_sm90_work_number(blockIdx.x, cluster_size, tile_index, stride), lane_work = -1, n;
            gmm_sm90_tile f = GMM_ZERO;
            if (tile_index >= GMM_SM90_TILE_RING)
                gmm_mbarrier_wait(gmm_sm90_batch_empty(bars, tile_index / GMM_SM90_TILE_BATCH),
                                  (tile_index / GMM_SM90_TILE_RING & 1) ^ 1);
            for (n = 0; n < batch; n++, work += stride) {
                int32_t in_group = -1; /* number of the tile in its group; -1: there is none */
                if (GMM__K_GROUPED && s.balanced)
                    s.g = gmm_sm90_balanced_tile(balance, smem->ends, &args.p, (int32_t)tile_index + n, &in_group);
                else {
                    gmm_find_group32(work_ends, args.p.groups, work, &s.g);
                    if (s.g < args.p.groups) in_group = work - work_ends[s.g];
                }
                if (lane == n && in_group >= 0) lane_work = in_group, f.g = s.g;
            }
            if (lane < batch) {
                if (lane_work >= 0) { /* else all is 0, which ends the ring */
                    const int balanced = GMM__K_GROUPED && s.balanced;
                    const int32_t group_work = balanced ? 0 : work_ends[f.g + 1] - work_ends[f.g];
                    const int rotation =
                        !GMM__K_GROUPED ? GMM_SM90_ROTATE_TILES
                                        : gmm_sm90_wgrad_rotation(stride, group_work,
                                                                  gmm_sm90_tile_count(args.p.m, 16, GMM__CFG(m16)));
                    gmm_sm90_schedule_tile(&s, GMM__CFG_OF(*second_tile, tile_n) == 128, group_work, lane_work,
                                           rotation, gmm_sm90_this_cta(), &f);
                }
                *tile = f;
            }
            __syncwarp();
        }
        if (early) {
            gmm_cluster_wait_acquire(); /* the barriers are initialised */
            if (lane == 0) gmm_mbarrier_arrive(gmm_sm90_first_tile_planned(bars));
            early = batch = 0; /* the next pass begins at tile 0 again */
        } else {
            if (lane < batch && !unchanged) gmm_mbarrier_arrive(gmm_sm90_tile_full(bars, tile_index + (uint32_t)lane));
            if (__any_sync(0xFFFFFFFFu, lane < batch && tile->row_blocks == 0)) break;
        }
    }
    if (blockIdx.x == 0) gmm_sm90_report_faults(&args.groups, &args.p, ends);
}

/* Waits until stage number `iter` is empty, and lets its full barrier count `bytes`. */
GMM__DEVICE gmm_sm90_load GMM__PART(gmm_sm90_begin_stage_)(uint32_t base, uint32_t iter, uint32_t bytes, int32_t k,
                                                           uint32_t stage_bytes) {
    const uint32_t stage_bars = GMM__SMEM_AT(stage_bars), s = iter % GMM__CFG(stages);
    const gmm_sm90_load stage = { base + s * stage_bytes, gmm_sm90_full(stage_bars, s), k };
    gmm_mbarrier_wait(gmm_sm90_empty(stage_bars, s), (iter / GMM__CFG(stages) & 1) ^ 1);
    gmm_mbarrier_arrive_expect_tx(stage.full, bytes);
    return stage;
}

/* The producer, one thread: coordinates pass to TMA without a loop over lanes. What it loads of the first tile is
   determined before griddepcontrol.wait where that tile is planned early. While it reads the tile, the scheduler may
   already write it anew; then planned_late is set, and everything is determined again. */
GMM__DEVICE void GMM__PART(gmm_sm90_load_stages_)(const GMM__ARGS &args, GMM__SMEM *smem, uint32_t base) {
    enum { A_BOXES = (GMM__MAX_CFG(m16) + (GMM__TA ? 3 : 0)) / 4, B_BOXES = GMM__MAX_CFG(tile_n) / 64 };
    const gmm_sm90_tile *const ring = smem->ring.tile;
    const volatile int32_t *const second_tile = &smem->ring.second_tile, *const small_m = &smem->ring.small_m,
                                 *const planned_late = &smem->ring.planned_late;
    const uint32_t stage_bars = GMM__SMEM_AT(stage_bars), bars = GMM__SMEM_AT(bars);
    const uint32_t of_cta = gmm_cluster_ctarank() ? 0xAAAAAAAAu : 0x55555555u; /* its half of a multicast operand */
    const int32_t glu_block = GMM__GLU ? args.glu.block : 0;
    gmm_sm90_operand a = { GMM__TA, GMM_SM90_BOX_BYTES, 0, 64, 0, 0, 0, 0, 0, 0, 0 };
    gmm_sm90_operand b = { GMM__TB, GMM__CFG(b_block_bytes), glu_block, max(glu_block, 64), 0, 0, 0, 0, 0, 0, 0 };
    uint32_t iter = 0, k_tiles = 0, bytes = 0, stage_bytes = 0, a_offset = 0, tile_index, i;
    int early = gmm_sm90_plans_early(&args.p, args.tables, GMM__K_GROUPED), two_at_once = 0;
    int32_t k = 0;
    if (!early) gmm_griddepcontrol_wait();
    for (tile_index = 0;; tile_index += !early, early = 0) {
        const gmm_sm90_tile *const t = &ring[tile_index % GMM_SM90_TILE_RING];
        if (early) gmm_mbarrier_wait(gmm_sm90_first_tile_planned(bars), 0);
        else {
            gmm_sm90_release_batch(bars, tile_index);
            gmm_sm90_wait_tile(bars, tile_index);
            if (t->row_blocks == 0) break;
        }
        if (early || tile_index > 0 || *planned_late) {
            k_tiles = gmm_sm90_k_tiles(t->k);
            k = GMM__K_GROUPED ? GMM_SM90_RAGGED_ROWS - t->k : 0;
            stage_bytes = (uint32_t)GMM__CFG_OF(*second_tile, stage_bytes);
            a_offset = (uint32_t)GMM__CFG_OF(*second_tile, a_offset);
            bytes = GMM__CFG(gather) ? 0 : GMM__TA ? (uint32_t)(t->row_blocks + 3) / 4 * 8192
                                                   : (uint32_t)t->row_blocks * 2048;
            bytes += (uint32_t)gmm_sm90_b_boxes(t) * GMM__CFG(b_block_bytes);
            if (t->cols <= 0) bytes = 0;
            two_at_once = GMM__SMALL_M(GMM__CFG_OF(*second_tile, tile_n)) && *small_m;
            if (early && args.p.b.table) gmm_griddepcontrol_wait(); /* an earlier kernel may write the table */
            gmm_sm90_assign_a(t, GMM__K_GROUPED, of_cta, &a);
            gmm_sm90_assign_b(&args.p, t, GMM__K_GROUPED, of_cta, &b);
        }
        if (early) {
            gmm_griddepcontrol_wait();
            continue;
        }
        for (; GMM__SMALL_M(GMM__MAX_CFG(tile_n)) && two_at_once && k_tiles > 1; k_tiles -= 2, iter += 2, k += 128) {
            gmm_sm90_load stages[2];
#pragma unroll
            for (i = 0; i < 2; i++)
                stages[i] = GMM__PART(gmm_sm90_begin_stage_)(base, iter + i, bytes, k + 64 * (int32_t)i, stage_bytes);
            gmm_sm90_load_operand_twice(&b, &args.b, 64, stages);
#pragma unroll
            for (i = 0; i < 2; i++) stages[i].at += a_offset;
            gmm_sm90_load_operand_twice(&a, &args.a, 64, stages);
            gmm_sm90_load_operand_twice(&a, &args.a16, 16, stages);
        }
        for (; k_tiles > 0; k_tiles--, iter++, k += 64) {
            gmm_sm90_load stage = GMM__PART(gmm_sm90_begin_stage_)(base, iter, bytes, k, stage_bytes);
            if (GMM__CFG(b_format)) stage.k = k / 64 * GMM__CFG(box_width);
            gmm_sm90_load_operand(&b, &args.b, 64, B_BOXES, &stage);
            if (GMM__CFG(gather)) continue; /* gather warps load A */
            stage.k = k;
            stage.at += a_offset;
            gmm_sm90_load_operand(&a, &args.a, 64, A_BOXES, &stage);
            if (!GMM__TA) gmm_sm90_load_operand(&a, &args.a16, 16, 3, &stage);
        }
    }
    /* shared memory must exist until the other CTA of the cluster has arrived at these barriers for the last
       time */
    for (i = 0; i < GMM__CFG(stages); i++, iter++)
        gmm_mbarrier_wait(gmm_sm90_empty(stage_bars, iter % GMM__CFG(stages)),
                          (iter / GMM__CFG(stages) & 1) ^ 1);
}
#endif
