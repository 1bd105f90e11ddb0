
/* GMM__BODY_FP8, continued: the epilogue of a consumer warp group. Threads hold accumulators as gmm_wgmma_acc_m and
   gmm_wgmma_acc_n say; the first row of a thread is `row` of the warp group's 64, its second one is 8 further. */
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
/* Requests the scales per line of the tile's rows and columns; gmm_fp8_scale_accumulators_ waits for them. */
GMM__DEVICE void GMM__PART(gmm_fp8_request_line_scales_)(const gmm_fp8_args *args, const gmm_sm90_tile *t,
                                                         uint32_t base, int wg) {
    const uint32_t scales = GMM__SMEM_AT(line_scales) + GMM__CFG(line_scale_bytes) * wg;
    const int tid = gmm_tid_x() & 127;
    int x;
    if (args->a_scale.scaling == GMM_SCALING_ROW && tid < 64)
        gmm_cp_async_f32(scales + 4 * tid,
                         (const float *)args->a_scale.scale + t->m0 + 64 * wg + tid +
                             (args->wgrad ? (int64_t)t->g * args->p.m : t->row),
                         64 * wg + tid < t->rows);
    if (args->b_scale.scaling == GMM_SCALING_ROW)
#pragma unroll 1
        for (x = tid; x < GMM__CFG(tile_n); x += 128)
            gmm_cp_async_f32(scales + GMM__OFFSET(GMM__LINE_SCALES, col) + 4 * x,
                             (args->b_scale.scale_table
                                  ? (const float *)args->b_scale.scale_table[t->g]
                                  : (const float *)args->b_scale.scale + (int64_t)t->g * args->p.n) + t->n0 + x,
                             x < t->cols);
}

/* Multiplies the accumulators by the outer scale and, where by_line is set, by scales per line. */
GMM__DEVICE void GMM__PART(gmm_fp8_scale_accumulators_)(const gmm_fp8_consumer_tile *tile, int by_line, uint32_t base,
                                                        int wg, float acc[GMM__ACC]) {
    const uint32_t scales = GMM__SMEM_AT(line_scales) + GMM__CFG(line_scale_bytes) * wg;
    const int tid = gmm_tid_x() & 127, row = tid / 32 * 16 + tid % 32 / 4;
    const int second_exponent = tile->d_flags >> GMM_FP8_SECOND_SCALE_SHIFT;
    const float outer_scale = tile->outer_scale;
    int u;
    if (by_line || second_exponent) { /* line scales that the call does not have are 1 */
        const float second = gmm_f32_from_bits((uint32_t)(second_exponent ? second_exponent : 127) << 23);
        float scale0 = second, scale1 = second;
        gmm_cp_async_wait_all();
        gmm_fp8_consumer_sync(wg);
        if (GMM__CFG(lines)) {
            scale0 *= gmm_ld_shared_f32(scales + 4 * row);
            scale1 *= gmm_ld_shared_f32(scales + 4 * row + 32);
        }
#pragma unroll
        for (u = 0; u < GMM__ACC; u += 4) {
            float col_scales[2] = { 1.0f, 1.0f };
            if (GMM__CFG(lines))
                gmm_ld_shared_v2_f32(scales + GMM__OFFSET(GMM__LINE_SCALES, col) + 8 * u + tid % 4 * 8, col_scales);
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
}

/* Applies an epilogue step to the accumulators of a pass. */
GMM__DEVICE void GMM__PART(gmm_fp8_apply_step_)(const gmm_epilogue_step step, const gmm_fp8_args *args,
                                                const gmm_sm90_tile *t, int pass, int wg, float acc[GMM__ACC]) {
    const gmm_epilogue_values values = gmm_epilogue_values_of(step, &args->p, t->g, (int64_t)t->row + t->m0 + 64 * wg);
    const int tid = gmm_tid_x() & 127, row = tid / 32 * 16 + tid % 32 / 4, cols = t->cols;
    const int rows = values.rows ? t->rows - 64 * wg : 0, bytes = values.cols_dtype == GMM_F32 ? 4 : 2;
    const float row0 = row < rows ? values.rows[row] : 1.0f, row8 = row + 8 < rows ? values.rows[row + 8] : 1.0f;
    int u;
#pragma unroll
    for (u = 0; u < GMM__ACC; u += 4) {
        const int c = gmm_wgmma_acc_n(tid % 32, u);
        const int count = cols - c > 2 ? 2 : cols - c;
        float v[4] = { 1.0f, 1.0f, 1.0f, 1.0f };
        if (gmm_epilogue_reads_cols(step)) {
            GMM__PIN_MEMORY(); /* keeps the loads from moving up, where registers are short */
            gmm_read4(values.cols_dtype, values.cols +
                          (int64_t)((GMM__CFG(glu) ? gmm_fp8_glu_column(args, t->n0, pass) : t->n0) + c) * bytes,
                      count, 0, v);
        }
        acc[u] = gmm_epilogue_apply(step, acc[u], row0, v[0]);
        acc[u + 1] = gmm_epilogue_apply(step, acc[u + 1], row0, v[1]);
        acc[u + 2] = gmm_epilogue_apply(step, acc[u + 2], row8, v[0]);
        acc[u + 3] = gmm_epilogue_apply(step, acc[u + 3], row8, v[1]);
    }
}

/* Applies those that the call has. */
GMM__DEVICE void GMM__PART(gmm_fp8_apply_steps_)(const gmm_fp8_args *args, const gmm_sm90_tile *t, int pass, int wg,
                                                 float acc[GMM__ACC]) {
#define GMM__X(name, rows, cols) \
    if (gmm_epilogue_present(GMM_EPILOGUE_##name, &args->p)) \
        GMM__PART(gmm_fp8_apply_step_)(GMM_EPILOGUE_##name, args, t, pass, wg, acc);
    GMM_EPILOGUE_STEP_LIST(GMM__X)
#undef GMM__X
}

/* Writes TMA boxes of D from number `first` on, as many as a slot holds, to the slot at `slot`: as 16-bit elements. */
GMM__DEVICE void GMM__PART(gmm_fp8_write_slot_16_)(gmm_dtype dtype, uint32_t slot, const int first,
                                                   const float acc[GMM__ACC]) {
    const int tid = gmm_tid_x() & 127;
    const uint32_t to = slot + (tid / 32 * 16 + tid % 16) * 128;
    int u;
#pragma unroll
    for (u = 0; u < 4 * GMM__CFG(store_boxes); u++) { /* 16 columns */
        const float *const v = &acc[32 * first + 8 * u < GMM__ACC ? 32 * first + 8 * u : 0];
        if (32 * first + 8 * u >= GMM__ACC) break;
        gmm_stmatrix_x4(to + u / 4 * 8192 + (((u % 4 * 2 + tid % 32 / 16) ^ (tid % 8)) << 4),
                        gmm_pack2(dtype, v[0], v[1]), gmm_pack2(dtype, v[2], v[3]),
                        gmm_pack2(dtype, v[4], v[5]), gmm_pack2(dtype, v[6], v[7]));
    }
}
/* The same as fp32, added to `beta` times what the slot holds where D has been loaded. Odd rows write the halves of
   128 bytes in the other order, which avoids bank conflicts. */
GMM__DEVICE void GMM__PART(gmm_fp8_write_slot_f32_)(uint32_t slot, const int first, int loaded, float beta,
                                                    const float acc[GMM__ACC]) {
    const int tid = gmm_tid_x() & 127, row = tid / 32 * 16 + tid % 32 / 4, swapped = row % 2;
    const uint32_t to = slot + row * 128 + tid % 2 * 8;
    int u, x;
#pragma unroll
    for (x = 0; x < GMM__CFG(store_boxes); x++) {
        const float *const v = &acc[16 * (first + x)];
        float w[16], old[16];
#pragma unroll
        for (u = 0; u < 16; u++) w[u] = swapped ? v[(u + 8) % 16] : v[u];
        if (loaded) {
#pragma unroll
            for (u = 0; u < 16; u += 2)
                gmm_ld_shared_v2_f32(to + x * 8192 + u % 4 * 512 +
                                         (((u / 4 * 2 + tid % 4 / 2) ^ (row % 8) ^ (4 * swapped)) << 4),
                                     old + u);
#pragma unroll
            for (u = 0; u < 16; u++) w[u] = __fmaf_rn(beta, old[u], w[u]);
        }
#pragma unroll
        for (u = 0; u < 16; u += 2) /* 8 columns of the thread's two rows: four accumulators */
            gmm_st_shared_v2_f32(to + x * 8192 + u % 4 * 512 +
                                     (((u / 4 * 2 + tid % 4 / 2) ^ (row % 8) ^ (4 * swapped)) << 4),
                                 w[u], w[u + 1]);
    }
}

/* Stores the slot, whose first column is c0 of the tile, to a D that TMA cannot write: each thread has 16 bytes of a
   row. slot: of the warp group. */
GMM__DEVICE void GMM__PART(gmm_fp8_store_slot_)(const gmm_fp8_args *args, const gmm_fp8_tile *f, const char *slot,
                                                int c0, int wg) {
    const gmm_sm90_tile *const t = &f->t;
    const int size = gmm_kmat_size(&args->p.d), box_cols = f->d_flags & GMM_FP8_D_16BIT ? 64 : 32;
    const int64_t pitch = args->p.d.ld * size;
    const float beta = gmm_gemm_beta(&args->p, t->g);
    char *const d = gmm_kmat_data(&args->p.d, t->g) + (t->m0 + 64 * wg + (args->wgrad ? 0 : (int64_t)t->row)) * pitch;
    const int aligned = (((uint32_t)(uintptr_t)d | (uint32_t)pitch) & (size == 2 ? 7 : 15)) == 0;
    int x, e;
    gmm_fp8_consumer_sync(wg);
#pragma unroll 1
    for (x = gmm_tid_x() & 127; x < 512 * GMM__CFG(store_boxes); x += 128) {
        const int box_row = x / 8 % 64, c = c0 + x / 512 * box_cols + x % 8 * (box_cols / 8);
        const int cols_left = t->cols - c;
        const char *const from = slot + x / 512 * 8192 + box_row * 128 + (((x % 8) ^ (box_row % 8)) << 4);
        char *const to = d + box_row * pitch + (int64_t)(t->n0 + c) * size;
        if (box_row >= t->rows - 64 * wg) continue;
        if (f->d_flags & GMM_FP8_D_16BIT) {
            for (e = 0; e < 8 && e < cols_left; e++) ((uint16_t *)to)[e] = ((const uint16_t *)from)[e];
        } else {
            const float4 values = *(const float4 *)from;
            float v[4], stored[4];
            v[0] = values.x; v[1] = values.y; v[2] = values.z; v[3] = values.w;
            if (beta != 0.0f) {
                gmm_read4(args->p.d.dtype, to, cols_left, aligned, stored);
#pragma unroll
                for (e = 0; e < 4; e++) v[e] = __fmaf_rn(beta, stored[e], v[e]);
            }
            gmm_write4(args->p.d.dtype, to, cols_left, aligned, v);
        }
    }
}

/* Stores the accumulators: part by part to the store slot, from which the store warp moves them to D by TMA. The last
   part of 16-bit D is written, but not passed on yet (gmm_fp8_store). */
GMM__DEVICE void GMM__PART(gmm_fp8_store_accumulators_)(const gmm_fp8_args *args, const gmm_fp8_consumer_tile *tile,
                                                        const GMM__SMEM *smem, uint32_t base, int wg,
                                                        const float acc[GMM__ACC], gmm_fp8_store *store) {
    const uint32_t slot = GMM__SMEM_AT(slot) + GMM__CFG(slot_bytes) * wg;
    const int d_flags = tile->d_flags, box_cols = d_flags & GMM_FP8_D_16BIT ? 64 : 32; /* columns of 128 bytes */
    int i;
#pragma unroll
    for (i = 0; i < GMM__CFG(tile_n) / 32; i += GMM__CFG(store_boxes)) { /* first TMA box of a part */
        const int c0 = i * box_cols;
        if (c0 >= tile->cols || c0 >= GMM__CFG(tile_n)) break;
        gmm_fp8_wait_slot(store, GMM__SMEM_AT(slot_bars), wg);
        if (d_flags & GMM_FP8_D_16BIT) { /* the dtype is a constant, since a predicate would double the conversions */
            if (args->p.d.dtype == GMM_BF16) GMM__PART(gmm_fp8_write_slot_16_)(GMM_BF16, slot, i, acc);
            else GMM__PART(gmm_fp8_write_slot_16_)(GMM_F16, slot, i, acc);
        } else {
            const int loaded = (d_flags & GMM_FP8_D_LOAD) && (i == 0 || !(d_flags & GMM_FP8_D_REDUCE));
            GMM__PART(gmm_fp8_write_slot_f32_)(slot, i, loaded, loaded ? gmm_gemm_beta(&args->p, tile->f->t.g) : 0.0f,
                                               acc);
        }
        if (!(d_flags & GMM_FP8_D_TMA))
            GMM__PART(gmm_fp8_store_slot_)(args, tile->f, (const char *)smem->slot[wg], c0, wg);
    }
    /* stores of fp32 take longer than the mainloop where groups have few rows: they begin at once */
    if (!(d_flags & GMM_FP8_D_16BIT)) gmm_fp8_pass_slot(store);
}
/* Completes one phase of the slot's barriers for a tile without rows or columns of this warp group, since the store
   warp waits for at least one part per tile. */
GMM__DEVICE void GMM__PART(gmm_fp8_skip_slot_)(uint32_t base, int wg, gmm_fp8_store *store) {
    gmm_fp8_wait_slot(store, GMM__SMEM_AT(slot_bars), wg);
    gmm_fp8_pass_slot(store);
}
#endif
