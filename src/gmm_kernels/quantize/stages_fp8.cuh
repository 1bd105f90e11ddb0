/* --- FP8 casts with fp32 scales: stages of gmm_cast_tensor, _row, _1x128 and _128x128 --- */

/* Strides between the scales of rows and of columns in shared memory; odd, so that they fall into different banks. */
enum {
    GMM_CAST_ROW_STEP = 3, /* maxima of a row: two halves, one per warp; the scale replaces the first */
    GMM_CAST_COL_STEP = 5  /* maxima of a column: four quarters */
};
typedef float gmm_cast_fp8_scales[GMM_CAST_COL_STEP * GMM_TILE];
typedef struct gmm_cast_fp8 {
    gmm_scaling scaling;         /* a constant of the kernel's instance, as `source` is */
    gmm__cast_source source;
    gmm_cast_fp8_scales *scales; /* [2]: of rows and of columns */
    uint8_t *codes;              /* the tile's columnwise codes */
    float qmax;                  /* largest value of the dtype */
    int32_t e5m2;
} gmm_cast_fp8;

/* 128X128, and TENSOR with delayed scaling: the amax of each warp's part of the tile. */
GMM__DEVICE uint32_t gmm_cast_fp8_warp_amax(const gmm_cast_fp8 *c, const gmm_cast_tile *t, const uint32_t x[8][8]) {
    const uint32_t maximum = gmm_cast_warp_max(t->source, x);
    if (gmm__lane() == 0) c->scales[0][gmm__warp()] = gmm_f32_from_bits(maximum);
    return maximum;
}
/* TENSOR, delayed scaling: the tile's amax raises those of the copies, after all stores and a barrier. */
GMM__DEVICE void gmm_cast_fp8_record_amax(const gmm_cast_fp8 *c, const gmm_cast_tile *t, uint32_t maximum) {
    const int32_t thread = (int32_t)threadIdx.x;
    uint32_t *dst = (uint32_t *)(thread ? t->a->columnwise.amax : t->a->rowwise.amax);
    int32_t i;
    if (thread >= 2) return;
    for (i = 0; i < GMM__QUANT_WARPS; i++) maximum = max(maximum, gmm_f32_bits(c->scales[0][i]));
    if ((thread ? t->columnwise : t->rowwise) && dst) gmm_cast_raise_amax(dst + t->p.unit, maximum);
}

/* ROW: scales of the tile's rows and columns from amaxes in device memory. Threads 0 to 127 have a row each, the others
   a column. The scales of columns are stored by gmm__quant_scales. */
GMM__DEVICE void gmm_cast_fp8_line_scales(const gmm_cast_fp8 *c, const gmm_cast_tile *t) {
    const gmm__quant_args *a = t->a;
    const gmm_cast_strip *p = &t->p;
    const int32_t thread = (int32_t)threadIdx.x;
    if (thread < GMM_TILE && t->rowwise) {
        const int64_t row = (a->grouped ? p->source_row : (int64_t)p->unit * p->rows) + p->row + thread;
        const float scale = gmm__quant_scale(a, c->qmax, 0, thread < p->m ? a->row_amax[row] : 0.0f);
        c->scales[0][thread * GMM_CAST_ROW_STEP] = scale;
        if (t->c0 == 0 && thread < p->m)
            ((float *)(void *)gmm_cast_scales(t, 0, 0))[(a->grouped ? p->source_row : 0) + p->row + thread] =
                gmm_scale_inverse(scale);
    }
    if (thread >= GMM_TILE && t->columnwise) {
        const int32_t col = thread - GMM_TILE;
        c->scales[1][col * GMM_CAST_COL_STEP] = gmm__quant_scale(
            a, c->qmax, 0, col < t->end - t->c0 ? a->col_amax[p->unit * a->cols + t->c0 + col] : 0.0f);
    }
}

/* 1X128: maxima of the warp's parts of rows and columns. */
GMM__DEVICE void gmm_cast_fp8_line_maxima(const gmm_cast_fp8 *c, const gmm_cast_tile *t, const uint32_t x[8][8]) {
    uint32_t row[8], col[8];
    int32_t i;
    gmm_cast_row_maxima(t->source, x, row, t->source != GMM_F32, col); /* F32 sources would spill registers */
    if (t->rowwise) {
#pragma unroll
        for (i = 0; i < 8; i++) {
            const uint32_t bits = gmm__quant_block_max(row[i], 8);
            if ((gmm__lane() & 7) == 0)
                c->scales[0][(t->row0 + i) * GMM_CAST_ROW_STEP + (t->col0 >> 6)] = gmm_f32_from_bits(bits);
        }
    }
    if (t->columnwise) {
        if (t->source == GMM_F32) gmm_cast_col_maxima(t->source, x, col);
        gmm_cast_reduce_cols(t->source, col);
        if (gmm__lane() >> 3 == 0)
#pragma unroll
            for (i = 0; i < 8; i++)
                c->scales[1][(t->col0 + i) * GMM_CAST_COL_STEP + (t->row0 >> 5)] = gmm__word_value(t->source, col, i);
    }
}
/* 1X128: scales from maxima, after a barrier. Threads 0 to 127 have a row each, the others a column; padding of the
   scales is 0. */
GMM__DEVICE void gmm_cast_fp8_1x128_scales(const gmm_cast_fp8 *c, const gmm_cast_tile *t) {
    const gmm__quant_args *a = t->a;
    const gmm_cast_strip *p = &t->p;
    const int32_t thread = (int32_t)threadIdx.x, copy = thread >= GMM_TILE, l = thread & (GMM_TILE - 1);
    const int32_t valid_line = l < (copy ? t->end - t->c0 : p->m);
    const gmm_mat *m = copy ? &a->columnwise : &a->rowwise;
    if (m->dtype != GMM_NONE) {
        const int64_t lines = copy ? (a->cols + 3) & ~(int64_t)3 : (int64_t)((t->padded_rows + 3) & ~3);
        const int64_t line = (copy ? t->c0 : p->row) + l, block = (copy ? p->row : t->c0) >> 7;
        uint8_t *dst = gmm_cast_scales(t, copy, (int64_t)(copy ? p->padded_row >> 7 : p->padded_row) *
                                                    (copy ? lines : (a->cols + 127) >> 7) * 4);
        float *smem = c->scales[copy] + l * (copy ? GMM_CAST_COL_STEP : GMM_CAST_ROW_STEP);
        uint32_t maximum = 0;
        float scale;
        int32_t i;
        for (i = 0; i < (copy ? 4 : 2); i++) maximum = max(maximum, gmm_f32_bits(smem[i]));
        scale = gmm__quant_scale(a, c->qmax, 1, gmm_f32_from_bits(maximum));
        smem[0] = scale;
        if (line < lines) ((float *)(void *)dst)[block * lines + line] = valid_line ? gmm_scale_inverse(scale) : 0.0f;
    }
}

/* 128X128: the scale of the tile from maxima, after a barrier. The padding is behind the last block of a line. */
GMM__DEVICE float gmm_cast_fp8_128x128_scale(const gmm_cast_fp8 *c, const gmm_cast_tile *t) {
    const gmm__quant_args *a = t->a;
    const gmm_cast_strip *p = &t->p;
    const int32_t thread = (int32_t)threadIdx.x;
    uint32_t maximum = 0;
    float scale;
    int32_t k;
    for (k = 0; k < GMM__QUANT_WARPS; k++) maximum = max(maximum, gmm_f32_bits(c->scales[0][k]));
    scale = gmm__quant_scale(a, c->qmax, 1, gmm_f32_from_bits(maximum));
    for (k = 0; k < 2; k++) {
        const int32_t line = (int32_t)(k ? t->c0 : p->row) / 128, block = (int32_t)(k ? p->row : t->c0) / 128;
        const int32_t blocks = (int32_t)(((k ? p->rows : a->cols) + 127) / 128);
        const int32_t padded_blocks = (blocks + 3) & ~3;
        const int32_t stores = thread == 0 || (block == blocks - 1 && block + thread < padded_blocks);
        uint8_t *dst = gmm_cast_scales(t, k, 0);
        if ((k ? t->columnwise : t->rowwise) && stores)
            ((float *)(void *)dst)[(int64_t)line * padded_blocks + block + thread] =
                thread == 0 ? gmm_scale_inverse(scale) : 0.0f;
    }
    return scale;
}

/* Elements of the lane's row or column number l times their scale. line_scales: of ROW and 1X128, the scale of the
   lane's line number 0; tile_scale: of TENSOR and 128X128. */
GMM__DEVICE void gmm_cast_fp8_products(const gmm_cast_fp8 *c, const gmm_cast_tile *t, const uint32_t x[8][8],
                                       int32_t columnwise, int32_t l, const float *line_scales, float tile_scale,
                                       float v[8]) {
    const int32_t by_line = c->scaling == GMM_SCALING_ROW || c->scaling == GMM_SCALING_1X128;
    const float scale = by_line ? line_scales[l * (columnwise ? GMM_CAST_COL_STEP : GMM_CAST_ROW_STEP)] : tile_scale;
    int32_t i;
    gmm_cast_line(t->source, x, columnwise, l, v);
#pragma unroll
    for (i = 0; i < 8; i++) v[i] = gmm__fmul(v[i], scale);
}
/* Encodes and stores the lane's rows. */
GMM__DEVICE void gmm_cast_fp8_encode_rows(const gmm_cast_fp8 *c, const gmm_cast_tile *t, const uint32_t x[8][8],
                                          float tile_scale) {
    const gmm__quant_args *a = t->a;
    const float *scales = c->scales[0] + t->row0 * GMM_CAST_ROW_STEP;
    uint8_t *dst = gmm_cast_data(&a->rowwise, a->step[0], t->p.unit) +
                   (t->p.source_row + t->p.row + t->row0) * a->rowwise.ld + t->c0 + t->col0;
    int32_t i;
#pragma unroll
    for (i = 0; i < 8; i++, dst += a->rowwise.ld) {
        float v[8];
        gmm_cast_fp8_products(c, t, x, 0, i, scales, tile_scale, v);
        if (i < t->valid_rows)
            gmm_st_global_v2_b32(dst, gmm_encode_fp8x4(c->e5m2, v), gmm_encode_fp8x4(c->e5m2, v + 4));
    }
}
/* Encodes the lane's columns into shared memory; after a barrier the CTA stores the tile's columns. */
GMM__DEVICE void gmm_cast_fp8_encode_cols(const gmm_cast_fp8 *c, const gmm_cast_tile *t, const uint32_t x[8][8],
                                          float tile_scale) {
    const int32_t thread = (int32_t)threadIdx.x, bytes = GMM_CAST_FP8_COLUMN;
    const float *scales = c->scales[1] + t->col0 * GMM_CAST_COL_STEP;
    uint8_t *dst = gmm_cast_col_codes(t, thread, bytes, t->a->columnwise.ld);
    uint8_t *smem = c->codes + gmm_cast_smem_column(bytes, t->col0) + t->row0;
    int32_t j;
#pragma unroll
    for (j = 0; j < 8; j++) {
        float v[8];
        gmm_cast_fp8_products(c, t, x, 1, j, scales, tile_scale, v);
        *(uint2 *)(void *)(smem + j * bytes) = make_uint2(gmm_encode_fp8x4(c->e5m2, v),
                                                          gmm_encode_fp8x4(c->e5m2, v + 4));
    }
    __syncthreads();
    gmm_cast_store_cols(t, thread, bytes, c->codes, dst, t->a->columnwise.ld);
}

/* Casts a tile that the lanes have loaded to x. Lanes that have computed it may still read it from c->codes.
   sums: whether column sums are wanted; smem_sums: [GMM_CAST_SUM_PARTS][GMM_TILE] for them. */
GMM__DEVICE void gmm_cast_fp8_tile(const gmm_cast_fp8 *c, const gmm_cast_tile *t, const uint32_t x[8][8],
                                   const int sums, float *smem_sums) {
    const gmm__quant_args *a = t->a;
    float tile_scale = 1.0f;
    uint32_t amax = 0;
    if (sums) gmm_cast_column_sums(t, 8, 8, 8, x[0], GMM_TILE, smem_sums);
    if (c->scaling == GMM_SCALING_TENSOR) {
        tile_scale = c->source != GMM__CAST_OF_ACT && !a->format.delayed
                         ? gmm__quant_scale(a, c->qmax, 0, a->amax[0][t->p.unit])
                     : a->scale         ? a->scale[t->p.unit] : 1.0f;
        if (a->record) amax = gmm_cast_fp8_warp_amax(c, t, x);
        if (c->source != GMM__CAST_OF_MATRIX || sums) __syncthreads(); /* a barrier follows maxima of lines anyway */
    } else {
        if (c->scaling == GMM_SCALING_ROW) gmm_cast_fp8_line_scales(c, t);
        if (c->scaling == GMM_SCALING_1X128) gmm_cast_fp8_line_maxima(c, t, x);
        if (c->scaling == GMM_SCALING_128X128) gmm_cast_fp8_warp_amax(c, t, x);
        __syncthreads();
    }
    if (sums) gmm_cast_store_sums(t, GMM_TILE, smem_sums);
    if (c->scaling == GMM_SCALING_128X128) tile_scale = gmm_cast_fp8_128x128_scale(c, t);
    if (c->scaling == GMM_SCALING_1X128) {
        gmm_cast_fp8_1x128_scales(c, t);
        __syncthreads();
    }
    if (t->rowwise && t->in_cols) gmm_cast_fp8_encode_rows(c, t, x, tile_scale);
    if (t->columnwise) gmm_cast_fp8_encode_cols(c, t, x, tile_scale);
    if (c->scaling == GMM_SCALING_TENSOR && a->record) {
        __syncthreads();
        gmm_cast_fp8_record_amax(c, t, amax);
    }
}
