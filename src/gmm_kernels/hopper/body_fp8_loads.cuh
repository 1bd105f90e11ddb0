
/* GMM__BODY_FP8, continued: the warps that load operands and scales. */
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
/* Whether A has a scale per 128 elements along the contraction, so that stages have scales. */
GMM__DEVICE int GMM__PART(gmm_fp8_has_stage_scales_)(const gmm_fp8_args *args) {
    return !GMM__IS_FAST && args->a_scale.scaling == GMM_SCALING_1X128;
}

/* The producer, one thread: the coordinates of a box pass to TMA without a loop over lanes. */
GMM__DEVICE void GMM__PART(gmm_fp8_load_stages_)(const gmm_fp8_args *args, const GMM__SMEM *smem, uint32_t base) {
    const gmm_fp8_tile *const ring = smem->ring;
    const uint32_t stage_bars = GMM__SMEM_AT(stage_bars), bars = GMM__SMEM_AT(bars);
    const uint32_t prediction = base + GMM__CFG(prediction_offset);
    const uint32_t of_cta = gmm_cluster_ctarank() ? 0xAAAAAAAAu : 0x55555555u; /* its half of a multicast operand */
    const int predicts = GMM__PART(gmm_fp8_predicts_)(args);
    gmm_fp8_operand a = { &args->a, 0, 0, 0, 0, 0 }, b = { &args->b, 0, 0, 0, 0, 0 };
    uint32_t iter = 0, tile_index = 0, i;
    for (;; tile_index++) {
        const int predicted = predicts && tile_index == 0;
        const gmm_fp8_tile *const f = gmm_fp8_wait_tile(ring, bars, prediction, tile_index, predicted);
        uint32_t bytes, k_tiles;
        int32_t x;
        if (f->t.row_blocks == 0) break;
        gmm_mbarrier_arrive(gmm_fp8_tile_begun(bars, tile_index));
        /* the kernel before may write the table of weights */
        if (predicted && args->p.b.table) gmm_griddepcontrol_wait();
        k_tiles = gmm_fp8_k_tiles(f->t.k);
        x = args->wgrad ? f->padded_row : 0;
        a.y = f->t.m0;
        b.y = GMM__CFG(glu) ? gmm_fp8_glu_column(args, f->t.n0, 0) : f->t.n0;
        if (!args->wgrad) {
            const uint64_t map_offset = gmm_sm90_map_offset(gmm_kmat_data(&args->p.b, f->t.g));
            a.y += GMM_SM90_RAGGED_ROWS - (f->t.end - f->t.row);
            a.end = f->t.end;
            a.wrap = GMM_SM90_RAGGED_ROWS;
            b.end = gmm_sm90_map_z(map_offset);
            b.wrap = gmm_sm90_map_w(map_offset);
        }
        a.mask = b.mask = 0;
        if (f->t.cols > 0 && f->t.k > 0) {
            a.mask = (1u << f->t.row_blocks) - 1;
            b.mask = (1u << gmm_sm90_b_boxes(&f->t)) - 1;
        }
        bytes = (uint32_t)(__popc(a.mask) + __popc(b.mask)) * GMM_SM90_BOX_BYTES; /* what the other CTA loads too */
        a.multicast = f->t.multicast == GMM_SM90_MULTICAST_A;
        b.multicast = f->t.multicast == GMM_SM90_MULTICAST_B;
        if (a.multicast) a.mask &= of_cta;
        if (b.multicast) b.mask &= of_cta;
        if (predicted) /* what is loaded is an operand of the wait, so that the compiler computes it before */
            GMM__GRIDDEPCONTROL_WAIT_WITH(a.y, a.end, b.y, b.end, b.wrap, a.mask, b.mask);
        for (k_tiles *= GMM__PASSES; k_tiles > 0; k_tiles--, iter++) {
            const uint32_t s = iter % GMM__CFG(stages), full = gmm_sm90_full(stage_bars, s);
            const uint32_t stage = base + s * GMM__CFG(stage_bytes);
            gmm_mbarrier_wait(gmm_sm90_empty(stage_bars, s), (iter / GMM__CFG(stages) & 1) ^ 1);
            gmm_mbarrier_arrive_expect_tx(full, bytes);
            gmm_fp8_load_operand(&a, GMM__CFG(consumers), stage + GMM__CFG(a_offset), full, x);
            gmm_fp8_load_operand(&b, GMM__CFG(tile_n) / 64, stage, full, x);
            x += 128;
            if (GMM__CFG(glu) && k_tiles == gmm_fp8_k_tiles(f->t.k) + 1) { /* the second pass follows */
                x = 0;
                b.y += args->glu.block;
            }
        }
    }
    /* Shared memory must exist until the other CTA of the cluster has arrived at these barriers for the last
       time. Its multicast data has arrived before, and the scheduler has waited for its prediction. */
#pragma unroll 1
    for (i = 0; i < GMM__CFG(stages); i++, iter++)
        gmm_mbarrier_wait(gmm_sm90_empty(stage_bars, iter % GMM__CFG(stages)),
                          (iter / GMM__CFG(stages) & 1) ^ 1);
}

#if !GMM__IS_1D1D
/* The scale loader. */
GMM__DEVICE void GMM__PART(gmm_fp8_load_scales_)(const gmm_fp8_args *args, const GMM__SMEM *smem, uint32_t base) {
    const gmm_fp8_tile *const ring = smem->ring;
    const uint32_t stage_bars = GMM__SMEM_AT(stage_bars), bars = GMM__SMEM_AT(bars);
    const uint32_t prediction = base + GMM__CFG(prediction_offset);
    const uint32_t stage_scales_at = base + (uint32_t)sizeof(GMM__SMEM);
    const int lane = (int)threadIdx.x & 31, predicts = GMM__PART(gmm_fp8_predicts_)(args);
    uint32_t iter = 0, tile_index = 0;
    int32_t x;
    for (;; tile_index++) {
        const gmm_fp8_tile *const f = gmm_fp8_wait_tile(ring, bars, prediction, tile_index,
                                                        predicts && tile_index == 0);
        const float *rows, *cols;
        int64_t step, block;
        uint32_t k_tiles;
        int32_t rows_left, cols_left, columns_to_128, next_row, next_col, n0;
        if (f->t.row_blocks == 0) break;
        k_tiles = gmm_fp8_k_tiles(f->t.k);
        rows_left = f->t.k > 0 && f->t.cols > 0 ? f->t.rows - lane : 0;
        cols_left = f->t.k > 0 ? f->t.cols - lane : 0;
        rows = gmm_fp8_scales_a(args, f, &step) + f->t.m0 + lane;
        next_row = (int32_t)step;
        cols = gmm_fp8_scales_b(args, GMM__PASSES, f, &step, &block);
        next_col = (int32_t)step;
        /* lane 1: scale of the columns past the next multiple of 128, if the tile reaches it */
        columns_to_128 = 128 - f->t.n0 % 128;
        n0 = GMM__CFG(glu) ? gmm_fp8_glu_column(args, f->t.n0, 0) : f->t.n0;
        cols += (n0 / 128 + (lane == 1 && f->t.cols > columns_to_128)) * block;
        for (k_tiles *= GMM__PASSES; k_tiles > 0; k_tiles--, iter++) {
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
            if (GMM__CFG(glu) && k_tiles == gmm_fp8_k_tiles(f->t.k) + 1) { /* the second pass follows */
                rows -= (int64_t)(k_tiles - 1) * next_row;
                cols += args->glu.block / 128 * block - (int64_t)(k_tiles - 1) * next_col;
            }
        }
    }
    gmm_cp_async_wait_all();
}
#endif
#endif
