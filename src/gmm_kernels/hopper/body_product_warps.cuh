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
        !gmm_sm90_plan_balance(s, stats, args.tables ? 0 : (int32_t)GMM__CFG(smem_groups),
                               gmm_sm90_d_stages(&args.p), (gmm_sm90_balance *)(void *)smem->work_ends, smem->ends))
        gmm_sm90_count_work(s, (int32_t)gmm_cluster_nctarank());
    s->g = 0;
}

/* The scheduler warp writes batches of tiles to the ring, one tile per lane. Its first pass is speculative: it plans
   the first tile from the split as read before griddepcontrol.wait. The second pass reads the split again and plans
   anew if it has changed. Before the wait the plan may read the split alone, which is compared after it, and write
   shared memory alone: so neither tables in the workspace, nor frozen and beta, which gmm_sm90_has_work reads in
   wgrad. */
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
    int speculative = !args.tables && (!GMM__K_GROUPED || !(args.p.frozen || args.p.beta));
    uint32_t tile_index;
    for (tile_index = 0;; tile_index += (uint32_t)batch) {
        const int32_t stride = (int32_t)(gridDim.x / cluster_size);
        gmm_sm90_tile *const tile = &ring[(tile_index + (uint32_t)lane) % GMM_SM90_TILE_RING];
        int unchanged = 0;
        batch = tile_index == 0 ? 1 : tile_index == 1 ? GMM_SM90_TILE_BATCH - 1 : GMM_SM90_TILE_BATCH;
        if (tile_index == 0) {
            if (!speculative) {
                gmm_cluster_wait_acquire();
                gmm_griddepcontrol_wait();
            }
            unchanged = !speculative && s.max_blocks && gmm_sm90_split_unchanged(&args.groups, ends);
            if (!unchanged) GMM__PART(gmm_sm90_plan_split_)(args, smem, &s);
        }
        if (!unchanged) {
            int32_t work = gmm_sm90_work_number(blockIdx.x, cluster_size, tile_index, stride), lane_work = 0, n;
            if (tile_index >= GMM_SM90_TILE_RING)
                gmm_mbarrier_wait(gmm_sm90_batch_empty(bars, tile_index / GMM_SM90_TILE_BATCH),
                                  (tile_index / GMM_SM90_TILE_RING & 1) ^ 1);
            for (n = 0; n < batch; n++, work += stride) {
                int32_t in_group = 0;
                if (GMM__K_GROUPED && s.balanced)
                    s.g = gmm_sm90_balanced_tile(balance, smem->ends, &args.p, (int32_t)tile_index + n, &in_group);
                else {
                    gmm_find_group32(work_ends, args.p.groups, work, &s.g);
                    if (s.g < args.p.groups) in_group = work - work_ends[s.g];
                }
                if (lane == n) lane_work = in_group, tile->g = s.g;
            }
            if (lane < batch) {
                tile->k = tile->cols = tile->row_blocks = 0; /* ends the ring */
                if (tile->g < args.p.groups) {
                    const int balanced = GMM__K_GROUPED && s.balanced;
                    const int32_t group_work = balanced ? 0 : work_ends[tile->g + 1] - work_ends[tile->g];
                    const int rotation =
                        !GMM__K_GROUPED ? GMM_SM90_ROTATE_TILES
                                        : gmm_sm90_wgrad_rotation(stride, group_work,
                                                                  gmm_sm90_tile_count(args.p.m, 16, GMM__CFG(m16)));
                    gmm_sm90_schedule_tile(&s, GMM__CFG_OF(*second_tile, tile_n) == 128, group_work, lane_work,
                                           rotation, gmm_sm90_this_cta(), tile);
                }
            }
            __syncwarp();
        }
        if (speculative) speculative = batch = 0; /* publishes nothing; the next pass begins at tile 0 again */
        else {
            if (lane < batch) gmm_mbarrier_arrive(gmm_sm90_tile_full(bars, tile_index + (uint32_t)lane));
            if (__any_sync(0xFFFFFFFFu, lane < batch && tile->row_blocks == 0)) break;
        }
    }
    if (blockIdx.x == 0) gmm_sm90_report_faults(&args.groups, &args.p, ends);
}

/* The producer warp: each lane loads one TMA box of every stage. Kernels of cooperative tiles begin with a warm-up tile
   without rows: it loads no operand, but brings code and parameters into the caches. */
GMM__DEVICE void GMM__PART(gmm_sm90_load_stages_)(const GMM__ARGS &args, GMM__SMEM *smem, uint32_t base) {
    const gmm_sm90_tile *const ring = smem->ring.tile;
    const int32_t *const second_tile = &smem->ring.second_tile, *const small_m = &smem->ring.small_m;
    const uint32_t stage_bars = GMM__SMEM_AT(stage_bars), bars = GMM__SMEM_AT(bars);
    const uint32_t cta_rank = gmm_cluster_ctarank();
    const int lane = (int)threadIdx.x & 31;
    const uint32_t b_block_bytes = GMM__CFG(b_block_bytes);
    uint32_t iter = 0, tile_index, i;
    int warmup = GMM__CFG(consumers) == 2;
    if (!warmup) gmm_griddepcontrol_wait();
    for (tile_index = 0;; tile_index += !warmup, warmup = 0) {
        const gmm_sm90_tile *const t = warmup ? &smem->ring.warmup : &ring[tile_index % GMM_SM90_TILE_RING];
        gmm_sm90_operand_layout layout = { GMM__K_GROUPED, GMM__TA, GMM__TB, 0, b_block_bytes, GMM__CFG(gather),
                                           GMM__GLU ? args.glu.block : 0 };
        gmm_sm90_box box;
        uint32_t k_tiles, bytes, stage_bytes, stages_at_once, second;
        __syncwarp();
        if (!warmup) {
            if (lane == 0) gmm_sm90_release_batch(bars, tile_index);
            gmm_sm90_wait_tile(bars, tile_index);
            if (t->row_blocks == 0) break;
        }
        k_tiles = gmm_sm90_k_tiles(t->k);
        stage_bytes = (uint32_t)GMM__CFG_OF(!warmup && *second_tile, stage_bytes);
        bytes = GMM__CFG(gather) ? 0 : GMM__TA ? (uint32_t)(t->row_blocks + 3) / 4 * 8192
                                               : (uint32_t)t->row_blocks * 2048;
        bytes += (uint32_t)gmm_sm90_b_boxes(t) * b_block_bytes;
        if (t->cols <= 0) bytes = 0;
        stages_at_once = GMM__SMALL_M(GMM__CFG_OF(!warmup && *second_tile, tile_n)) && !warmup && *small_m ? 2 : 1;
        /* neighbouring lanes load the same lines of two stages */
        second = (uint32_t)lane & (stages_at_once - 1);
        layout.tile_n = GMM__CFG_OF(!warmup && *second_tile, tile_n);
        if (warmup && args.p.b.table) gmm_griddepcontrol_wait(); /* an earlier kernel may write the table */
        gmm_sm90_assign_box(&args, layout, t, lane >> (stages_at_once - 1), cta_rank, &box);
        if (second) box.x += 64;
        if (warmup) {
            GMM__USE_BOX(box, bytes);
            gmm_griddepcontrol_wait();
            continue;
        }
        for (; k_tiles > 0; k_tiles -= stages_at_once, iter += stages_at_once) {
            const uint32_t k_iter = iter + second, s = k_iter % GMM__CFG(stages);
            const uint32_t full = gmm_sm90_full(stage_bars, s);
            if (k_tiles < stages_at_once) stages_at_once = 1; /* the last stage is alone */
            if (second < stages_at_once) {
                gmm_mbarrier_wait(gmm_sm90_empty(stage_bars, s), (k_iter / GMM__CFG(stages) & 1) ^ 1);
                if (lane == (int)second) gmm_mbarrier_arrive_expect_tx(full, bytes);
            } else box.active = 0;
            __syncwarp();
            if (box.active)
                gmm_tma_load(base + s * stage_bytes + box.offset, box.map, full, box.multicast, box.x, box.y,
                             box.end, box.wrap);
            if (box.is_b ? GMM__TB : GMM__TA) box.y += 64;
            else box.x += (box.is_b ? GMM__CFG(box_width) : 64) * (int32_t)stages_at_once;
        }
    }
    /* shared memory must exist until the other CTA of the cluster has arrived at these barriers for the last
       time */
    for (i = 0; i < GMM__CFG(stages); i++, iter++)
        gmm_mbarrier_wait(gmm_sm90_empty(stage_bars, iter % GMM__CFG(stages)),
                          (iter / GMM__CFG(stages) & 1) ^ 1);
}
#endif
