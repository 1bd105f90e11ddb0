
/* Body 11, continued: the kernel. Its warp roles, barriers and shared memory: above gmm_fp8_args. */
GMM__ROW_KERNEL GMM__FP8_BOUNDS GMM__KERNEL_NAME(const __grid_constant__ gmm_fp8_args args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ __align__(1024) char gmm_shared[];
    enum { PRODUCER_WARP = 4 * GMM__CFG(consumers), SCALE_WARP, SCHEDULER_WARP, STORE_WARP };
    GMM__SMEM *const smem = (GMM__SMEM *)gmm_shared;
    gmm_fp8_tile *const ring = smem->ring;
    const uint32_t base = (uint32_t)__cvta_generic_to_shared(gmm_shared);
    const uint32_t stage_bars = GMM__SMEM_AT(stage_bars), bars = GMM__SMEM_AT(bars);
    const uint32_t slot_bars = GMM__SMEM_AT(slot_bars), prediction = base + GMM__CFG(prediction_offset);
    const uint32_t stage_scales_at = base + (uint32_t)sizeof(GMM__SMEM);
    const int warp = (int)threadIdx.x >> 5, lane = (int)threadIdx.x & 31;
    const int prefetch_tile = GMM__CFG(prefetch_tile) && !args.wgrad && args.p.groups <= 32 * GMM_FP8_LANE_GROUPS;
    const int scaled = !GMM__FAST && args.a_scale.scaling == GMM_SCALING_1X128; /* A has a scale per 128 elements */
    uint32_t cluster, cta_rank, i;
    cluster = gmm_cluster_nctarank();
    cta_rank = gmm_cluster_ctarank();
    /* line scales that the call does not have stay 1 */
    for (i = threadIdx.x; i < sizeof smem->line_scales / sizeof(float); i += blockDim.x)
        ((float *)smem->line_scales)[i] = 1.0f;
    if (threadIdx.x == 0) {
#pragma unroll
        for (i = 0; i < GMM__CFG(stages); i++) {
            gmm_mbarrier_init(gmm_sm90_full(stage_bars, i), 1 + (scaled ? (int)GMM__FP8(loader_arrivals, GMM__SCALED) : 0));
            gmm_mbarrier_init(gmm_sm90_empty(stage_bars, i), 4 * GMM__CFG(consumers) * cluster);
        }
#pragma unroll
        for (i = 0; i < GMM_SM90_TILE_RING; i++) gmm_mbarrier_init(gmm_fp8_tile_full(bars, i), 1);
#pragma unroll
        for (i = 0; i < GMM_SM90_TILE_RING; i++) gmm_mbarrier_init(gmm_fp8_tile_empty(bars, i), 1);
#pragma unroll
        for (i = 0; i < GMM__CFG(consumers); i++) {
            gmm_mbarrier_init(gmm_sm90_slot_empty(slot_bars, i), GMM__CFG(store_boxes));
            gmm_mbarrier_init(gmm_sm90_slot_full(slot_bars, i), 128);
        }
        if (GMM__CFG(prefetch_tile)) {
            gmm_mbarrier_init(prediction + GMM__OFFSET(gmm_fp8_prediction, full), 1);
            gmm_mbarrier_init(prediction + GMM__OFFSET(gmm_fp8_prediction, peer_full), 1);
        }
        gmm_fence_mbarrier_init();
        gmm_prefetch_tensormap(&args.a);
        gmm_prefetch_tensormap(&args.b);
    }
    gmm_cluster_arrive_release();
    if (!prefetch_tile || warp != SCHEDULER_WARP) gmm_cluster_wait_acquire();
    if (warp != SCHEDULER_WARP && !(prefetch_tile && warp == PRODUCER_WARP)) gmm_griddepcontrol_wait();
    gmm_griddepcontrol_launch_dependents();

    if (warp >= PRODUCER_WARP) {
        GMM__SETMAXNREG_DEC(GMM__CFG(producer_regs));
        if (warp == SCHEDULER_WARP) {
            /* the scheduler warp, which is at most half a ring ahead of the producer */
            int32_t *const ends = args.tables ? args.tables + (int64_t)blockIdx.x * 3 * (args.p.groups + 1)
                                              : smem->ends;
            int32_t *const work_ends = ends + args.p.groups + 1, *const starts = work_ends + args.p.groups + 1;
            const int32_t stride = (int32_t)(gridDim.x / cluster);
            const int raster_n = GMM__CFG(tile_n) == 128;
            gmm_sm90_scheduler s = { &args.p, ends, work_ends, starts, 0, raster_n, 0, GMM__CFG(consumers), 0,
                                     GMM_FP8_BLOCK_ROWS, GMM_FP8_BLOCK_ROWS, GMM__STEP };
            int mispredicted = 0, unresolved = prefetch_tile;
            int32_t work = (int32_t)(blockIdx.x / cluster), speculative;
            uint32_t tile_index = 0;
            gmm_fp8_tile f;
            /* The split is read before griddepcontrol.wait, and again after it. Before the wait only shared memory may
               be written. */
            if (prefetch_tile) {
#pragma unroll 1
                for (speculative = 1; speculative >= 0; speculative--) {
                    int32_t tiles_n;
                    if (args.p.groups <= 32) tiles_n = gmm_fp8_plan_tiles(&args, &s, 1, !speculative, GMM__CFG(tile_n));
                    else tiles_n = gmm_fp8_plan_tiles(&args, &s, GMM_FP8_LANE_GROUPS, !speculative, GMM__CFG(tile_n));
                    if (tiles_n) s.tiles_n = tiles_n;
                    if (!speculative) break;
                    gmm_fp8_predict_first_tile(&args, &s, gmm_sm90_this_cta(), &f);
                    gmm_cluster_wait_acquire(); /* the barriers are initialised */
                    if (lane == 0) {
                        ring[GMM_SM90_TILE_RING - 1] = f;
                        /* the producer loads its operands right after the wait */
                        gmm_mbarrier_arrive(prediction + GMM__OFFSET(gmm_fp8_prediction, full));
                    }
                    __syncwarp();
                    gmm_griddepcontrol_wait();
                }
            } else {
                speculative = !args.tables && (!args.wgrad || !(args.p.frozen || args.p.beta));
                for (; speculative >= 0; speculative--) {
                    if (!speculative) gmm_griddepcontrol_wait();
                    if (s.tiles_n && gmm_sm90_split_unchanged(&args.groups, ends)) break;
                    {
                        const gmm_sm90_split_stats stats = gmm_sm90_read_split(&args.groups, ends);
                        s.tiles_n = (args.p.n + GMM__CFG(tile_n) - 1) / GMM__CFG(tile_n);
                        if (!args.wgrad)
                            s.tiles_n = gmm_sm90_tiles_n(&args.p, s.tiles_n, GMM__STEP,
                                                         GMM_FP8_BLOCK_ROWS * GMM__CFG(consumers),
                                                         (int32_t)gmm_cluster_nctarank(), stats);
                    }
                    s.k_grouped = args.wgrad;
                    gmm_sm90_count_work(&s, (int32_t)gmm_cluster_nctarank());
                    gmm_fp8_padded_starts(args.p.groups, ends, starts);
                }
            }
            f.t.g = 0;
            for (;; work += stride, tile_index++) {
                const uint32_t oldest = tile_index - GMM_SM90_TILE_RING / 2;
                int32_t next_work = work;
                f.t.row_blocks = 0; /* ends the ring */
                if (unresolved && tile_index > 0 && next_work >= work_ends[args.p.groups]) {
                    int peer_mispredicted = 0;
                    unresolved = 0;
                    if (gmm_cluster_nctarank() > 1) {
                        gmm_mbarrier_wait(prediction + GMM__OFFSET(gmm_fp8_prediction, peer_full), 0);
                        peer_mispredicted = *(volatile const int32_t *)(gmm_shared + GMM__CFG(prediction_offset) +
                            GMM__OFFSET(gmm_fp8_prediction, peer_mispredicted));
                    }
                    if (mispredicted || peer_mispredicted) { /* one more tile for the CTAs of the cluster */
                        gmm_fp8_empty_tile(&args, &f);
                        if (mispredicted) next_work = (int32_t)(blockIdx.x / cluster);
                    }
                }
                if (next_work < work_ends[args.p.groups]) {
                    gmm_find_group32(work_ends, args.p.groups, next_work, &f.t.g);
                    {
                        int rotated;
                        s.k_grouped = args.wgrad;
                        rotated = args.wgrad && stride % (work_ends[f.t.g + 1] - work_ends[f.t.g]) == 0;
                        s.col_align = args.wgrad ? GMM__CFG(tile_n) : GMM__STEP;
                        gmm_sm90_schedule_tile(&s, raster_n, next_work, rotated, gmm_sm90_this_cta(), &f.t);
                    }
                    f.padded_row = starts[f.t.g];
                    gmm_fp8_plan_store(&args, &f);
                    if (prefetch_tile && !unresolved) f.t.multicast = 0;
                }
                if (prefetch_tile && tile_index == 0) {
                    const gmm_fp8_tile *const first = &ring[GMM_SM90_TILE_RING - 1];
                    if (f.t.row_blocks == 0) gmm_fp8_empty_tile(&args, &f);
                    mispredicted = !gmm_fp8_same_tile(&f, first);
                    __syncwarp();
                    if (mispredicted) gmm_fp8_empty_tile(&args, &f); /* the result of the predicted tile is discarded */
                    if (lane == 0 && gmm_cluster_nctarank() > 1)
                        gmm_fp8_send_mispredict(prediction, mispredicted);
                }
                if (tile_index >= GMM_SM90_TILE_RING / 2)
                    gmm_mbarrier_wait(gmm_fp8_tile_empty(bars, oldest), oldest / GMM_SM90_TILE_RING & 1);
                if (lane == 0) {
                    ring[tile_index % GMM_SM90_TILE_RING] = f;
                    if (gmm_fp8_has_outer_scale(&args))
                        gmm_fp8_plan_outer_scale(&args, &ring[tile_index % GMM_SM90_TILE_RING]);
                    gmm_mbarrier_arrive(gmm_fp8_tile_full(bars, tile_index));
                }
                if (f.t.row_blocks == 0) break;
            }
            if (blockIdx.x == 0) gmm_sm90_report_faults(&args.groups, &args.p, ends);
        } else if (warp == PRODUCER_WARP) {
            /* producer warp: each lane loads one TMA box of every stage */
            uint32_t iter = 0, tile_index = 0;
            for (;; tile_index++) {
                uint32_t bytes, offset, k_tiles;
                int32_t b_boxes, index, x, y, end, wrap;
                const CUtensorMap *map;
                int active, multicast;
                const int first = prefetch_tile && tile_index == 0;
                const gmm_fp8_tile *const f = gmm_fp8_wait_tile(ring, bars, prediction, tile_index, first);
                if (f->t.row_blocks == 0) break;
                if (lane == 0) gmm_mbarrier_arrive(gmm_fp8_tile_empty(bars, tile_index));
                /* the kernel before may write the table of weights */
                if (first && args.p.b.table) gmm_griddepcontrol_wait();
                k_tiles = gmm_fp8_k_tiles(f->t.k);
                b_boxes = (f->t.cols + 63) / 64;
                bytes = (uint32_t)(b_boxes + f->t.row_blocks) * 8192;
                active = lane < b_boxes + f->t.row_blocks;
                if (f->t.cols <= 0 || f->t.k == 0) active = 0, bytes = 0;
                x = args.wgrad ? f->padded_row : 0;
                end = wrap = 0;
                if (lane < b_boxes) {
                    index = lane;
                    multicast = f->t.multicast == 1;
                    map = &args.b;
                    offset = 8192 * index;
                    y = f->t.n0 + 64 * index;
                    if (!args.wgrad) {
                        const uint64_t from = (uint64_t)(uintptr_t)gmm_kmat_data(&args.p.b, f->t.g) - GMM_SM90_MAP_BASE;
                        end = (int32_t)(from >> 4 & 0x3FFF);
                        wrap = (int32_t)(from >> 18);
                    }
                } else {
                    index = lane - b_boxes;
                    multicast = f->t.multicast == 2;
                    map = &args.a;
                    offset = GMM__CFG(a_offset) + 8192 * index;
                    y = f->t.m0 + 64 * index;
                    if (!args.wgrad) {
                        y += GMM_SM90_RAGGED_ROWS - (f->t.end - f->t.row);
                        end = f->t.end;
                        wrap = GMM_SM90_RAGGED_ROWS;
                    }
                }
                if (multicast && (index & 1) != (int)cta_rank) active = 0;
                if (first) /* its operands: the box is computed before it */
                    GMM__GRIDDEPCONTROL_WAIT_WITH(offset, y, end, wrap, active, bytes, k_tiles);
                for (; k_tiles > 0; k_tiles--, iter++) {
                    const uint32_t s = iter % GMM__CFG(stages), full = gmm_sm90_full(stage_bars, s);
                    gmm_mbarrier_wait(gmm_sm90_empty(stage_bars, s), (iter / GMM__CFG(stages) & 1) ^ 1);
                    if (lane == 0) gmm_mbarrier_arrive_expect_tx(full, bytes);
                    if (active)
                        gmm_tma_load(base + s * GMM__CFG(stage_bytes) + offset, map, full, multicast, x, y, end, wrap);
                    x += 128;
                }
            }
            /* Shared memory must exist until the other CTA of the cluster has arrived at these barriers for the last
               time. Its multicast data has arrived before, and the scheduler has waited for its prediction. */
#pragma unroll 1
            for (i = 0; i < GMM__CFG(stages); i++, iter++)
                gmm_mbarrier_wait(gmm_sm90_empty(stage_bars, iter % GMM__CFG(stages)),
                                  (iter / GMM__CFG(stages) & 1) ^ 1);
        } else if (warp == SCALE_WARP && scaled) {
#if GMM__IS_1D1D
            GMM__PART(gmm_fp8_load_scales_1d1d_)(&args, ring, bars, stage_bars, stage_scales_at);
#else
            /* the scale loader */
            uint32_t iter = 0, tile_index = 0;
            int32_t x;
            for (;; tile_index++) {
                const gmm_fp8_tile *const f = gmm_fp8_wait_tile(ring, bars, prediction, tile_index,
                                                                prefetch_tile && tile_index == 0);
                const float *rows, *cols;
                int64_t step, block;
                uint32_t k_tiles;
                int32_t rows_left, cols_left, columns_to_128, next_row, next_col;
                if (f->t.row_blocks == 0) break;
                k_tiles = gmm_fp8_k_tiles(f->t.k);
                rows_left = f->t.k > 0 && f->t.cols > 0 ? f->t.rows - lane : 0;
                cols_left = f->t.k > 0 ? f->t.cols - lane : 0;
                rows = gmm_fp8_scales_a(&args, f, &step) + f->t.m0 + lane;
                next_row = (int32_t)step;
                cols = gmm_fp8_scales_b(&args, f, &step, &block);
                next_col = (int32_t)step;
                /* lane 1: scale of the columns past the next multiple of 128, if the tile reaches it */
                columns_to_128 = 128 - f->t.n0 % 128;
                cols += (f->t.n0 / 128 + (lane == 1 && f->t.cols > columns_to_128)) * block;
                for (; k_tiles > 0; k_tiles--, iter++) {
                    const uint32_t s = iter % GMM__CFG(stages), full = gmm_sm90_full(stage_bars, s);
                    const uint32_t stage_scales = stage_scales_at + s * GMM__STAGE_SCALE_BYTES;
                    gmm_mbarrier_wait(gmm_sm90_empty(stage_bars, s), (iter / GMM__CFG(stages) & 1) ^ 1);
#pragma unroll
                    for (x = 0; x < 2 * GMM__CFG(consumers); x++)
                        gmm_cp_async_f32(stage_scales + 4 * (uint32_t)lane + 128 * x, rows + 32 * x,
                                         32 * x < rows_left);
                    if (lane < 2)
                        gmm_cp_async_f32(stage_scales + GMM__ROW_SCALE_BYTES + 4 * (uint32_t)lane, cols, cols_left > 0);
                    gmm_cp_async_mbarrier_arrive(full);
                    rows += next_row;
                    cols += next_col;
                }
            }
            gmm_cp_async_wait_all();
#endif
        } else if (warp == STORE_WARP && lane < GMM__CFG(consumers) * GMM__CFG(store_boxes))
            gmm_fp8_store_tiles(&args, GMM__CFG(store_boxes), ring, bars, slot_bars, GMM__SMEM_AT(slot));
    } else {
        float acc[GMM__ACC];
        gmm_sm90_pipeline pipe = { stage_bars, GMM__CFG(stages), GMM__CFG(stage_bytes), cluster, 0 };
        uint32_t tile_index = 0, part = 0;
        int u, x, e;
        if (GMM__KIND == GMM_FP8_1D1D && threadIdx.x >= 128) gmm_order_barrier(0, 0); /* consumer 0 begins */
        GMM__SETMAXNREG_INC(GMM__CFG(consumer_regs));
        for (;; tile_index++) {
            const int first = prefetch_tile && tile_index == 0;
            const gmm_fp8_tile *f = &ring[first ? GMM_SM90_TILE_RING - 1 : tile_index % GMM_SM90_TILE_RING];
            const gmm_sm90_tile *t = &f->t;
            /* recomputed for every tile, so that the mainloop has their registers */
            const int wg = __shfl_sync(0xFFFFFFFFu, gmm_tid_x() >> 7, 0);
            const uint32_t desc_a = (uint32_t)gmm_wgmma_desc(base + GMM__CFG(a_offset) + 8192 * wg, 0);
            const uint32_t desc_b = (uint32_t)gmm_wgmma_desc(base, 0);
            uint32_t slot;
            int rows, tid, row, d_flags, box_cols;
            float outer_scale;
            /* all lanes have read the previous tile before one of them releases its stages, and with them its entry of
               the ring */
            __syncwarp();
            gmm_mbarrier_wait(first ? prediction + GMM__OFFSET(gmm_fp8_prediction, full)
                                    : gmm_fp8_tile_full(bars, tile_index), tile_index / GMM_SM90_TILE_RING & 1);
            if (t->row_blocks == 0) break;
            if (t->cols <= 0 || t->row_blocks <= wg || t->k == 0) { /* nothing to multiply: releases the stages */
                uint32_t k_tiles = gmm_fp8_k_tiles(t->k);
                for (; k_tiles > 0; k_tiles--, pipe.iter++) {
                    const uint32_t s = pipe.iter % GMM__CFG(stages);
                    gmm_mbarrier_wait(gmm_sm90_full(stage_bars, s), pipe.iter / GMM__CFG(stages) & 1);
                    if ((threadIdx.x & 31) < cluster)
                        gmm_mbarrier_arrive_remote(gmm_sm90_empty(stage_bars, s), threadIdx.x & 31);
                }
                __syncwarp();
                if (t->cols <= 0 || t->row_blocks <= wg) { /* nothing to store either */
                    gmm_mbarrier_wait(gmm_sm90_slot_empty(slot_bars, wg), part++ & 1);
                    gmm_mbarrier_arrive(gmm_sm90_slot_full(slot_bars, wg));
                    continue;
                }
            }
            tid = gmm_tid_x() & 127;
            if (args.a_scale.scaling == GMM_SCALING_ROW && tid < 64)
                gmm_cp_async_f32(GMM__SMEM_AT(line_scales) + GMM__CFG(line_scale_bytes) * wg + 4 * tid,
                                 (const float *)args.a_scale.scale + t->m0 + 64 * wg + tid +
                                     (args.wgrad ? (int64_t)t->g * args.p.m : t->row),
                                 64 * wg + tid < t->rows);
            if (args.b_scale.scaling == GMM_SCALING_ROW)
#pragma unroll 1
                for (x = tid; x < GMM__CFG(tile_n); x += 128)
                    gmm_cp_async_f32(GMM__SMEM_AT(line_scales) + GMM__CFG(line_scale_bytes) * wg +
                                         GMM__OFFSET(GMM__LINE_SCALES, col) + 4 * x,
                                     (args.b_scale.scale_table
                                          ? (const float *)args.b_scale.scale_table[t->g]
                                          : (const float *)args.b_scale.scale + (int64_t)t->g * args.p.n) + t->n0 + x,
                                     x < t->cols);
#pragma unroll
            for (u = 0; u < GMM__ACC; u++) acc[u] = 0.0f;
            if (t->k > 0) {
                tid = gmm_tid_x();
                row = 64 * wg + (tid >> 5 & 3) * 16 + (tid & 31) / 4;
#if GMM__IS_1D1D
                GMM__PART(gmm_fp8_mainloop_1d1d_)(acc, gmm_fp8_k_tiles(t->k), desc_a, desc_b,
                                                  stage_scales_at + 4 * (uint32_t)row,
                                                  t->row_blocks > 1 ? wg : -1, &pipe);
#else
                GMM__PART(gmm_fp8_mainloop_)(acc, gmm_fp8_k_tiles(t->k), desc_a, desc_b,
                                             scaled ? stage_scales_at + 4 * (uint32_t)row : 0,
                                             t->n0 % 128 != 0, &pipe);
#endif
            }
#pragma unroll
            for (u = 0; u < GMM__ACC; u++) GMM__PIN_F32(acc[u]);
            if (prefetch_tile && tile_index == 0) { /* the scheduler has read the split again meanwhile */
                gmm_mbarrier_wait(gmm_fp8_tile_full(bars, 0), 0);
                f = ring;
                t = &f->t;
                if (t->cols <= 0) {
                    gmm_cp_async_wait_all();
                    gmm_mbarrier_wait(gmm_sm90_slot_empty(slot_bars, wg), part++ & 1);
                    gmm_mbarrier_arrive(gmm_sm90_slot_full(slot_bars, wg));
                    continue;
                }
            }
            tid = gmm_tid_x() & 127;
            row = tid / 32 * 16 + tid % 32 / 4; /* row of the consumer's 64; the thread's second row is 8 further */
            rows = t->rows - 64 * wg;
            outer_scale = f->outer_scale;
            d_flags = f->d_flags;
            { /* epilogue: scales of tensors and lines, bias */
                const uint32_t scales = GMM__SMEM_AT(line_scales) + GMM__CFG(line_scale_bytes) * wg;
                const int second_exponent = d_flags >> GMM_FP8_SECOND_SCALE_SHIFT;
                const int by_line = args.a_scale.scaling == GMM_SCALING_ROW || args.b_scale.scaling == GMM_SCALING_ROW;
                if (by_line || second_exponent) { /* line scales that the call does not have are 1 */
                    const float second = gmm_f32_from_bits((uint32_t)(second_exponent ? second_exponent : 127) << 23);
                    gmm_cp_async_wait_all();
                    gmm_fp8_consumer_sync(wg);
                    const float scale0 = GMM__CFG(lines) ? gmm_ld_shared_f32(scales + 4 * row) * second : second;
                    const float scale1 = GMM__CFG(lines) ? gmm_ld_shared_f32(scales + 4 * row + 32) * second : second;
#pragma unroll
                    for (u = 0; u < GMM__ACC; u += 4) {
                        float col_scales[2];
                        if (GMM__CFG(lines))
                            gmm_ld_shared_v2_f32(scales + GMM__OFFSET(GMM__LINE_SCALES, col) + 8 * u + tid % 4 * 8,
                                                 col_scales);
                        else col_scales[0] = col_scales[1] = 1.0f;
                        col_scales[0] = __fmul_rn(outer_scale, col_scales[0]);
                        col_scales[1] = __fmul_rn(outer_scale, col_scales[1]);
                        acc[u] = __fmul_rn(__fmul_rn(acc[u], scale0), col_scales[0]);
                        acc[u + 1] = __fmul_rn(__fmul_rn(acc[u + 1], scale0), col_scales[1]);
                        acc[u + 2] = __fmul_rn(__fmul_rn(acc[u + 2], scale1), col_scales[0]);
                        acc[u + 3] = __fmul_rn(__fmul_rn(acc[u + 3], scale1), col_scales[1]);
                    }
                    if (by_line) gmm_fp8_consumer_sync(wg); /* the next tile's scales overwrite these */
                } else if (outer_scale != 1.0f) {
#pragma unroll
                    for (u = 0; u < GMM__ACC; u++) acc[u] = __fmul_rn(acc[u], outer_scale);
                }
                if (!args.wgrad && args.p.bias.dtype != GMM_NONE) {
                    const char *const bias = gmm_kmat_data(&args.p.bias, t->g);
                    const float *const bias_scale = args.p.bias_scale + t->row + t->m0 + 64 * wg;
                    const int scaled_rows = args.p.bias_scale ? rows : 0, bytes = gmm_kmat_size(&args.p.bias);
                    const int cols = t->cols;
                    const float s0 = row < scaled_rows ? bias_scale[row] : 1.0f;
                    const float s1 = row + 8 < scaled_rows ? bias_scale[row + 8] : 1.0f;
#pragma unroll
                    for (u = 0; u < GMM__ACC; u += 4) {
                        const int c = gmm_wgmma_acc_n(tid % 32, u);
                        const int count = cols - c > 2 ? 2 : cols - c;
                        float v[4];
                        GMM__PIN_MEMORY(); /* keeps the loads from moving up, where registers are short */
                        gmm_read4(args.p.bias.dtype, bias + (int64_t)(t->n0 + c) * bytes, count, 0, v);
                        acc[u] = __fmaf_rn(v[0], s0, acc[u]);
                        acc[u + 1] = __fmaf_rn(v[1], s0, acc[u + 1]);
                        acc[u + 2] = __fmaf_rn(v[0], s1, acc[u + 2]);
                        acc[u + 3] = __fmaf_rn(v[1], s1, acc[u + 3]);
                    }
                }
            }
            /* accumulators to the store slot, as 16-bit elements or fp32, and from there to D */
            slot = GMM__SMEM_AT(slot) + GMM__CFG(slot_bytes) * wg;
            box_cols = d_flags & GMM_FP8_D_16BIT ? 64 : 32; /* columns of a 128-byte box */
#pragma unroll
            for (i = 0; i < GMM__CFG(tile_n) / 32; i += GMM__CFG(store_boxes)) { /* first box of this part */
                const int c0 = (int)i * box_cols;
                if (c0 >= t->cols || c0 >= GMM__CFG(tile_n)) break;
                gmm_mbarrier_wait(gmm_sm90_slot_empty(slot_bars, wg), part++ & 1);
                if (d_flags & GMM_FP8_D_16BIT) {
                    const gmm_dtype dtype = args.p.d.dtype;
                    const uint32_t st_at = slot + (tid / 32 * 16 + tid % 16) * 128;
#pragma unroll
                    for (u = 0; u < 4 * GMM__CFG(store_boxes); u++) { /* 16 columns */
                        const float *const v = &acc[32 * i + 8 * u < GMM__ACC ? 32 * i + 8 * u : 0];
                        if (32 * i + 8 * u >= GMM__ACC) break;
                        gmm_stmatrix_x4(st_at + u / 4 * 8192 + (((u % 4 * 2 + tid % 32 / 16) ^ (tid % 8)) << 4),
                                        gmm_pack2(dtype, v[0], v[1]), gmm_pack2(dtype, v[2], v[3]),
                                        gmm_pack2(dtype, v[4], v[5]), gmm_pack2(dtype, v[6], v[7]));
                    }
                } else {
                    /* odd rows write the halves of a box in the other order, which avoids bank conflicts */
                    const int swapped = row % 2;
                    const uint32_t st_at = slot + row * 128 + tid % 2 * 8;
                    const int loaded = (d_flags & GMM_FP8_D_LOAD) && (i == 0 || !(d_flags & GMM_FP8_D_REDUCE));
                    const float beta = loaded ? gmm_gemm_beta(&args.p, t->g) : 0.0f;
#pragma unroll
                    for (x = 0; x < GMM__CFG(store_boxes); x++) {
                        const float *const v = &acc[16 * (i + x)];
                        float w[16], old[16];
#pragma unroll
                        for (u = 0; u < 16; u++) w[u] = swapped ? v[(u + 8) % 16] : v[u];
                        if (loaded) {
#pragma unroll
                            for (u = 0; u < 16; u += 2)
                                gmm_ld_shared_v2_f32(st_at + x * 8192 + u % 4 * 512 +
                                                     (((u / 4 * 2 + tid % 4 / 2) ^ (row % 8) ^ (4 * swapped)) << 4),
                                                     old + u);
#pragma unroll
                            for (u = 0; u < 16; u++) w[u] = __fmaf_rn(beta, old[u], w[u]);
                        }
#pragma unroll
                        for (u = 0; u < 16; u += 2) /* 8 columns of the thread's two rows: four accumulators */
                            gmm_st_shared_v2_f32(st_at + x * 8192 + u % 4 * 512 +
                                                 (((u / 4 * 2 + tid % 4 / 2) ^ (row % 8) ^ (4 * swapped)) << 4),
                                                 w[u], w[u + 1]);
                    }
                }
                if (!(d_flags & GMM_FP8_D_TMA)) { /* stored by the threads: 16 bytes of a row each */
                    gmm_fp8_consumer_sync(wg);
                    const char *const slot_data = gmm_shared + offsetof(GMM__SMEM, slot) + GMM__CFG(slot_bytes) * wg;
                    const int size = gmm_kmat_size(&args.p.d);
                    const int64_t pitch = args.p.d.ld * size;
                    const float beta = gmm_gemm_beta(&args.p, t->g);
                    char *const d = gmm_kmat_data(&args.p.d, t->g) +
                                    (t->m0 + 64 * wg + (args.wgrad ? 0 : (int64_t)t->row)) * pitch;
                    const int aligned = (((uint32_t)(uintptr_t)d | (uint32_t)pitch) & (size == 2 ? 7 : 15)) == 0;
#pragma unroll 1
                    for (x = tid; x < 512 * GMM__CFG(store_boxes); x += 128) {
                        const int box_row = x / 8 % 64, c = c0 + x / 512 * box_cols + x % 8 * (box_cols / 8);
                        const int cols_left = t->cols - c;
                        const char *const from = slot_data + x / 512 * 8192 + box_row * 128 +
                                                 (((x % 8) ^ (box_row % 8)) << 4);
                        char *const to = d + box_row * pitch + (int64_t)(t->n0 + c) * size;
                        if (box_row >= rows) continue;
                        if (d_flags & GMM_FP8_D_16BIT) {
                            for (e = 0; e < 8 && e < cols_left; e++)
                                ((uint16_t *)to)[e] = ((const uint16_t *)from)[e];
                        } else {
                            const float4 values = *(const float4 *)from;
                            float v[4], stored[4];
                            v[0] = values.x; v[1] = values.y; v[2] = values.z; v[3] = values.w;
                            if (beta != 0.0f) {
                                gmm_read4(args.p.d.dtype, to, cols_left, aligned, stored);
#pragma unroll
                                for (e = 0; e < 4; e++) v[e] = __fmaf_rn(beta, stored[e], v[e]);
                            }
                            gmm_write4(args.p.d.dtype, to, cols_left, aligned, v);
                        }
                    }
                }
                gmm_fence_proxy_async();
                gmm_mbarrier_arrive(gmm_sm90_slot_full(slot_bars, wg));
            }
        }
    }
#endif
}
#undef GMM__WGMMA
#undef GMM__ACC
#undef GMM__STEP
#undef GMM__LINE_SCALES
#undef GMM__STAGE_SCALE_BYTES
#undef GMM__ROW_SCALE_BYTES
#undef GMM__STAGE_SCALES
#undef GMM__SMEM_AT
#undef GMM__SMEM
#undef GMM__KIND
#undef GMM__PART
#undef GMM__CFG
#undef GMM__TILE
#undef GMM__SCALED
#undef GMM__FAST
#undef GMM__IS_1D1D
#undef GMM__KERNEL_NAME
#undef GMM__TAG
#undef GMM__ROW


