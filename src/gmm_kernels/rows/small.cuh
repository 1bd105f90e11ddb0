/* ....................................................................................... Accumulate and convert ... */

#if GMM__HOLDS(0)
/* y = beta y + scale (start + x_0 + x_1 + ...). A task is two spans of a row, so that at least two loads are in
   flight. */
GMM__KERNEL __launch_bounds__(GMM__ELEM_BLOCK, 6) gmm_accumulate_rows(const __grid_constant__ gmm__accumulate_args a) {
    gmm_pdl_wait();
    const int wide = a.x.dtype == GMM_F32 || a.y.dtype == GMM_F32;
    gmm__grid_loop loop = gmm__grid_loop_begin((a.cols - 1) / (2 * GMM__ELEM_SPAN) + 1, 1);
    for (; loop.row < a.rows; gmm__grid_loop_next(&loop)) {
        gmm__raw8 r[2];
        gmm__lane_cols cols[2];
        float sum[2][8], v[8];
        int32_t i, j, k;
#pragma unroll
        for (j = 0; j < 2; j++) {
            cols[j] = gmm__lane_cols_of(wide, (int32_t)(2 * loop.part) + j, (int32_t)a.cols);
            if (a.start.data && cols[j].n[0] > 0) {
                r[j] = gmm__load8(GMM_NONE, &a.start, loop.row, &cols[j]);
                gmm__decode8(GMM_F32, &a.start, &r[j], sum[j]);
            }
        }
        for (i = 0; i < a.count; i++) {
            gmm__view x = a.x;
            x.data = (void *)(uintptr_t)a.addends[i];
#pragma unroll
            for (j = 0; j < 2; j++)
                if (cols[j].n[0] > 0) r[j] = gmm__load8(GMM_NONE, &x, loop.row, &cols[j]);
#pragma unroll
            for (j = 0; j < 2; j++)
                if (cols[j].n[0] > 0) {
                    gmm__decode8(GMM_NONE, &x, &r[j], v);
#pragma unroll
                    for (k = 0; k < 8; k++) sum[j][k] = i > 0 || a.start.data ? gmm_add_rn_f32(sum[j][k], v[k]) : v[k];
                }
        }
#pragma unroll
        for (j = 0; j < 2; j++)
            if (cols[j].n[0] > 0) {
#pragma unroll
                for (k = 0; k < 8; k++) sum[j][k] = gmm_mul_rn_f32(a.scale, sum[j][k]);
                if (a.beta != 0.0f) {
                    r[j] = gmm__load8(GMM_NONE, &a.y, loop.row, &cols[j]);
                    gmm__decode8(GMM_NONE, &a.y, &r[j], v);
#pragma unroll
                    for (k = 0; k < 8; k++) sum[j][k] = gmm_add_rn_f32(gmm_mul_rn_f32(a.beta, v[k]), sum[j][k]);
                }
                gmm__store8(GMM_NONE, &a.y, loop.row, &cols[j], sum[j]);
            }
    }
}

/* Adds 16 bytes of each of n addends. n is a constant, so that all loads are in flight at once. The addends are not
   read again (streaming loads). */
GMM__DEVICE void gmm__add_addends(int wide, int n, const gmm__accumulate_args *a, int32_t first, int64_t index,
                                  float *sum) {
    uint4 v[4];
    int k, c;
#pragma unroll
    for (k = 0; k < n; k++) v[k] = __ldcs((const uint4 *)(const void *)a->addends[first + k] + index);
#pragma unroll
    for (k = 0; k < n; k++) {
        const uint32_t w[4] = {v[k].x, v[k].y, v[k].z, v[k].w};
#pragma unroll
        for (c = 0; c < (wide ? 4 : 8); c++) {
            const float x = __uint_as_float(wide ? w[c & 3] : c & 1 ? w[c / 2] & 0xFFFF0000u : w[c / 2] << 16);
            sum[c] = first + k > 0 ? gmm_add_rn_f32(sum[c], x) : x;
        }
    }
}
/* The same sum for one row of aligned vectors, F32 or BF16 into F32, on few SMs: a CTA occupies one and has
   enough loads in flight for it, so that the other SMs are left to a concurrent GEMM. */
GMM__DEVICE void gmm__accumulate_sm_limited(int wide, const gmm__accumulate_args *a) {
    const int y_vectors = wide ? 1 : 2; /* vectors of y that a thread processes at a time */
    const int64_t count = a->cols / (4 * y_vectors), step = (int64_t)gridDim.x * GMM__SUM_BLOCK;
    int64_t index;
    for (index = (int64_t)blockIdx.x * GMM__SUM_BLOCK + threadIdx.x; index < count; index += step) {
        float4 *const y = (float4 *)a->y.data + index * y_vectors;
        float4 y_old[2];
        float sum[8];
        int32_t i;
        int j;
#pragma unroll
        for (j = 0; j < y_vectors; j++) y_old[j] = a->beta != 0.0f ? __ldcs(y + j) : make_float4(0, 0, 0, 0);
        for (i = 0; i + 4 <= a->count; i += 4) gmm__add_addends(wide, 4, a, i, index, sum);
        if (a->count & 2) gmm__add_addends(wide, 2, a, i, index, sum), i += 2;
        if (a->count & 1) gmm__add_addends(wide, 1, a, i, index, sum);
#pragma unroll
        for (j = 0; j < 4 * y_vectors; j++) sum[j] = gmm_mul_rn_f32(a->scale, sum[j]);
#pragma unroll
        for (j = 0; j < y_vectors && a->beta != 0.0f; j++) {
            sum[4 * j] = gmm_add_rn_f32(gmm_mul_rn_f32(a->beta, y_old[j].x), sum[4 * j]);
            sum[4 * j + 1] = gmm_add_rn_f32(gmm_mul_rn_f32(a->beta, y_old[j].y), sum[4 * j + 1]);
            sum[4 * j + 2] = gmm_add_rn_f32(gmm_mul_rn_f32(a->beta, y_old[j].z), sum[4 * j + 2]);
            sum[4 * j + 3] = gmm_add_rn_f32(gmm_mul_rn_f32(a->beta, y_old[j].w), sum[4 * j + 3]);
        }
#pragma unroll
        for (j = 0; j < y_vectors; j++)
            __stcs(y + j, make_float4(sum[4 * j], sum[4 * j + 1], sum[4 * j + 2], sum[4 * j + 3]));
    }
}
GMM__KERNEL __launch_bounds__(GMM__SUM_BLOCK, 1)
gmm_accumulate_sm_limited_f32(const __grid_constant__ gmm__accumulate_args a) {
    gmm_pdl_wait();
    gmm__accumulate_sm_limited(1, &a);
}
GMM__KERNEL __launch_bounds__(GMM__SUM_BLOCK, 1)
gmm_accumulate_sm_limited_bf16(const __grid_constant__ gmm__accumulate_args a) {
    gmm_pdl_wait();
    gmm__accumulate_sm_limited(0, &a);
}

/* dst = src converted to another float dtype. A task is two spans of a row. */
GMM__KERNEL __launch_bounds__(GMM__ELEM_BLOCK, 8) gmm_convert_rows(const __grid_constant__ gmm__convert_args a) {
    gmm_pdl_wait();
    const int wide = a.src.dtype == GMM_F32 || a.dst.dtype == GMM_F32;
    gmm__grid_loop loop = gmm__grid_loop_begin((a.cols - 1) / (2 * GMM__ELEM_SPAN) + 1, 1);
    for (; loop.row < a.rows; gmm__grid_loop_next(&loop)) {
        gmm__raw8 x[2];
        gmm__lane_cols cols[2];
        int32_t j;
#pragma unroll
        for (j = 0; j < 2; j++) {
            cols[j] = gmm__lane_cols_of(wide, (int32_t)(2 * loop.part) + j, (int32_t)a.cols);
            if (cols[j].n[0] > 0) x[j] = gmm__load8(GMM_NONE, &a.src, loop.row, &cols[j]);
        }
#pragma unroll
        for (j = 0; j < 2; j++)
            if (cols[j].n[0] > 0) {
                float v[8];
                gmm__decode8(GMM_NONE, &a.src, &x[j], v);
                gmm__store8(GMM_NONE, &a.dst, loop.row, &cols[j], v);
            }
    }
}
#endif /* GMM__HOLDS(0) */

