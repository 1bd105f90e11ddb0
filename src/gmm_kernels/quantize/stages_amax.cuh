/* --- amaxes of vectorized sources: stages of gmm_amax --- */

/* Maxima of rows over the warp's 64 columns. partials: by half of the tile's columns. Each step of the exchange halves
   the rows of a lane, until lane 8 i + j has row j of lane row i. */
GMM__DEVICE void gmm_amax_rows(const gmm_cast_tile *t, const uint32_t x[8][8], uint32_t (*partials)[GMM_TILE]) {
    const int32_t lane = gmm__lane(), lane_col = lane & 7;
    uint32_t row[8];
    int32_t i, k;
    gmm_cast_row_maxima(t->source, x, row, 0, row);
#pragma unroll
    for (k = 4; k >= 1; k >>= 1)
#pragma unroll
        for (i = 0; i < k; i++) {
            const uint32_t own = lane_col & k ? row[i + k] : row[i];
            const uint32_t sent = lane_col & k ? row[i] : row[i + k];
            row[i] = max(own, __shfl_xor_sync(0xFFFFFFFFu, sent, k));
        }
    partials[t->col0 / GMM_CAST_WARP_COLS][t->row0 + lane_col] = row[0];
}
/* Maxima of columns over the warp's 32 rows. partials: by quarter of the tile's rows. */
GMM__DEVICE void gmm_amax_cols(const gmm_cast_tile *t, const uint32_t x[8][8], uint32_t (*partials)[GMM_TILE]) {
    const int32_t lane_row = gmm__lane() >> 3;
    uint32_t col[8];
    int32_t k;
    gmm_cast_col_maxima(t->source, x, col);
    gmm_cast_reduce_cols(t->source, col);
#pragma unroll
    for (k = 0; k < 8; k++)
        if (k / 2 == lane_row)
            partials[t->row0 / GMM_CAST_WARP_ROWS][t->col0 + k] = gmm_f32_bits(gmm__word_value(t->source, col, k));
}
/* Raises the amaxes of the tile's rows (threads 0 to 127) and columns (the others). All threads call it; they compute
   addresses before its barrier, while they would wait. */
GMM__DEVICE void gmm_amax_store_lines(const gmm_cast_tile *t, uint32_t (*partials)[4][GMM_TILE]) {
    const gmm__quant_args *a = t->a;
    const gmm_cast_strip *p = &t->p;
    const int32_t copy = threadIdx.x >= GMM_TILE, l = threadIdx.x & (GMM_TILE - 1);
    uint32_t *dst = copy ? (uint32_t *)a->col_amax + p->unit * a->cols + t->c0 + l
                         : (uint32_t *)a->row_amax + (a->grouped ? p->source_row : (int64_t)p->unit * p->rows) +
                               p->row + l;
    uint32_t maximum;
    int32_t i;
    __syncthreads();
    if (!(copy ? a->col_amax : a->row_amax) || l >= (copy ? t->cols - t->c0 : p->m)) return;
    maximum = partials[copy][0][l];
    for (i = 1; i < (copy ? 4 : 2); i++) maximum = max(maximum, partials[copy][i][l]);
    gmm_cast_raise_amax(dst, maximum);
}

/* Maximum of the warp's part of the tile, and in the instances with a transform (`hadamard`) of that. */
GMM__DEVICE void gmm_amax_unit(const gmm_cast_tile *t, int32_t hadamard, uint32_t x[8][8],
                               uint32_t (*warp_maxima)[GMM__QUANT_WARPS]) {
    const int32_t lower = gmm__lane() >> 3 & 1;
    const gmm_format *f = &t->a->format;
    uint32_t maximum = gmm_cast_warp_max(t->source, x);
    if (gmm__lane() == 0) warp_maxima[0][gmm__warp()] = maximum;
    if (!hadamard) return;
    if (f->hadamard && t->columnwise) {
        gmm_hadamard_flip_signs(x, (uint32_t)f->hadamard >> 8 * lower);
        maximum = __reduce_max_sync(0xFFFFFFFFu, gmm_hadamard_amax(x, lower));
    }
    if (gmm__lane() == 0) warp_maxima[1][gmm__warp()] = maximum;
}
/* Raises the amaxes of the unit, after a barrier: thread 0 that of the source, thread 1 that of the transform. */
GMM__DEVICE void gmm_amax_store_unit(const gmm_cast_tile *t, int32_t hadamard,
                                     uint32_t (*warp_maxima)[GMM__QUANT_WARPS]) {
    const int32_t thread = (int32_t)threadIdx.x;
    uint32_t maximum;
    int32_t i;
    if (thread > hadamard) return;
    maximum = warp_maxima[thread][0];
    for (i = 1; i < GMM__QUANT_WARPS; i++) maximum = max(maximum, warp_maxima[thread][i]);
    gmm_cast_raise_amax((uint32_t *)t->a->amax[thread] + t->p.unit, maximum);
}
