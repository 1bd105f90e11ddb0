/* ============================================================================== Bodies per source: quantization === */

#elif GMM__BODY == GMM__BODY_QUANTIZE_AMAX
#define GMM__KERNEL_NAME GMM__COLUMN(1, GMM__ROW)
#define GMM__TAG GMM__COLUMN(2, GMM__ROW)
#define GMM__NAME(stem) GMM__CAT(stem##_, GMM__TAG)
#define GMM__STATIC_DTYPE ((gmm_dtype)GMM__NAME(gmm__static_dtype))

/* Loads a tile of a strip into shared memory (unless x is NULL), with zeros beyond the last row and column, and
   returns the lane's amax of it. With `row_amaxes` it raises the amaxes of rows. A quantized source is dequantized to
   F32. */
GMM__DEVICE uint32_t GMM__NAME(gmm__quant_load)(const gmm__quant_args *a, const gmm__quant_strip *p, int64_t c0,
                                                int32_t n, int32_t row_amaxes, float *x) {
    const int32_t lane = gmm__lane(), count = n - 4 * lane;
    const int64_t size = GMM__STATIC_DTYPE == GMM_F32 ? 4 : 2;
    uint32_t *row_amax = (uint32_t *)a->row_amax + (a->grouped ? p->source_row : p->unit * p->rows) + p->row;
    uint32_t amax = 0;
    int32_t r;
    if (GMM__STATIC_DTYPE == GMM_F32 && a->src.scaling != GMM_SCALING_NONE) {
        const gmm__qview v = gmm__quant_copy(&a->src, GMM_ROWWISE, a->grouped, p, a->cols);
        const int32_t width = gmm_block_along(v.scaling);
        for (r = gmm__warp(); r < GMM_TILE; r += GMM__QUANT_WARPS) {
            float u[4];
            int32_t j;
            for (j = 0; j < 4; j++) {
                const int64_t c = c0 + 4 * lane + j, l = p->row + r;
                u[j] = 0.0f;
                if (r < p->m && j < count)
                    u[j] = gmm__qview_value(gmm_decode_small(v.dtype, gmm__qview_code(&v, l, c)),
                                            gmm__qview_factor(&v, l, width ? c / width : 0, 1));
            }
            amax = gmm__quant_row_amax(amax, u, row_amaxes && r < p->m ? row_amax + r : NULL);
            if (x) gmm__quant_store_row(x, r, u);
        }
    } else {
        const char *base = a->src.table ? (const char *)a->src.table[p->unit]
                                        : (const char *)a->src.data +
                                              (a->grouped ? 0 : p->unit * a->src.group_stride) * size;
        const int64_t first = p->source_row + p->row;
        const char *src = base + ((a->index.at ? 0 : first) * a->src.ld + c0) * size;
        const int32_t vec4 = gmm_vec4_aligned(GMM__STATIC_DTYPE, src, a->src.ld);
#pragma unroll 4
        for (r = gmm__warp(); r < GMM_TILE; r += GMM__QUANT_WARPS) {
            float u[4] = { 0.0f, 0.0f, 0.0f, 0.0f };
            const int32_t row = a->index.at && r < p->m ? gmm_checked_row(&a->index, first + r) : r;
            if (r < p->m && row >= 0 && count > 0)
                gmm_read4(GMM__STATIC_DTYPE, src + (row * a->src.ld + 4 * lane) * size, count, vec4, u);
            amax = gmm__quant_row_amax(amax, u, row_amaxes && r < p->m ? row_amax + r : NULL);
            if (x) gmm__quant_store_row(x, r, u);
        }
    }
    return amax;
}

/* Amaxes of units, rows and columns: atomic maxima on the bits of absolute values, so the result does not depend on
   the order. The destinations start at 0. A CTA processes one 128 x 128 tile at a time: warp w rows w, w + 8, ..., then
   columns w, w + 8, ...; lane l elements 4 l to 4 l + 3 of each. */
GMM__ROW_KERNEL __launch_bounds__(GMM__QUANT_THREADS, GMM__QUANT_PER_SM)
GMM__KERNEL_NAME(const __grid_constant__ gmm__quant_args a) {
    extern __shared__ float gmm__quant_shared[];
    if (gmm__quant_wait_skips(a.skip)) return;
    const int64_t tile_count = gmm__quant_strips(a.grouped, a.tiles, a.units, a.rows) * a.col_tiles;
    const int32_t transformed = a.format.hadamard && a.columnwise.dtype != GMM_NONE, lane = gmm__lane();
    int64_t tile_index;
    for (tile_index = blockIdx.x; tile_index < tile_count; tile_index += gridDim.x) {
        const gmm__quant_strip p = gmm__quant_strip_of(a.grouped, a.tiles, a.offsets, a.units, a.rows,
                                                       tile_index / a.col_tiles);
        const int64_t c0 = tile_index % a.col_tiles * GMM_TILE;
        const int32_t n = gmm__quant_extent(a.cols, c0);
        uint32_t amax[2] = { 0, 0 };
        int32_t l;
        amax[0] = GMM__NAME(gmm__quant_load)(&a, &p, c0, n, a.row_amax != NULL,
                                             transformed || a.col_amax ? gmm__quant_shared : NULL);
        __syncthreads();
        for (l = gmm__warp(); l < n && (transformed || a.col_amax); l += GMM__QUANT_WARPS) {
            float v[4];
            uint32_t bits;
            gmm__quant_load_col(gmm__quant_shared, l, transformed ? a.format.hadamard : 0, v);
            bits = gmm__quant_amax4(v);
            amax[1] = bits > amax[1] ? bits : amax[1];
            if (a.col_amax) {
                bits = __reduce_max_sync(0xFFFFFFFFu, bits);
                if (lane == 0) atomicMax((uint32_t *)a.col_amax + p.unit * a.cols + c0 + l, bits);
            }
        }
        amax[0] = __reduce_max_sync(0xFFFFFFFFu, amax[0]);
        amax[1] = __reduce_max_sync(0xFFFFFFFFu, amax[1]);
        if (lane == 0) atomicMax((uint32_t *)a.amax[0] + p.unit, amax[0]);
        if (lane == 0 && transformed) atomicMax((uint32_t *)a.amax[1] + p.unit, amax[1]);
        __syncthreads();
    }
}

#undef GMM__STATIC_DTYPE
#undef GMM__NAME
#undef GMM__KERNEL_NAME
#undef GMM__TAG
#undef GMM__ROW

/* ================================================================================= Bodies per source and format === */

#elif GMM__BODY == GMM__BODY_QUANTIZE
#define GMM__KERNEL_NAME GMM__COLUMN(1, GMM__ROW)
#define GMM__TAG GMM__COLUMN(2, GMM__ROW)
#define GMM__NAME(stem) GMM__CAT(stem##_, GMM__TAG)

/* Any format and shape, both copies of a 128 x 128 tile that is loaded into shared memory once: load, then for each
   copy amax, scale and codes line by line. Warp w has lines w, w + 8, ... of a copy, that is rows or columns, lane l
   elements 4 l to 4 l + 3 of each; a block lies in 4 (NV16), 8 (MX32) or 32 lanes. */
GMM__ROW_KERNEL __launch_bounds__(GMM__QUANT_THREADS, 2)
GMM__KERNEL_NAME(const __grid_constant__ gmm__quant_args a) {
    extern __shared__ float gmm__quant_shared[];
    __shared__ uint32_t square[2 * GMM__QUANT_SQUARES]; /* amaxes of square blocks, then their chosen scales */
    uint8_t *codes = (uint8_t *)gmm__quant_shared + GMM__QUANT_TILE_BYTES;
    if (gmm__quant_wait_skips(a.skip)) return;
    const int64_t tile_count = gmm__quant_strips(a.grouped, a.tiles, a.units, a.rows) * a.col_tiles;
    const int32_t width = gmm_block_along(a.format.scaling);
    int64_t tile_index;
    for (tile_index = blockIdx.x; tile_index < tile_count; tile_index += gridDim.x) {
        const gmm__quant_strip p = gmm__quant_strip_of(a.grouped, a.tiles, a.offsets, a.units, a.rows,
                                                       tile_index / a.col_tiles);
        const int64_t c0 = tile_index % a.col_tiles * GMM_TILE;
        const int32_t n = gmm__quant_extent(a.cols, c0);
        gmm__quant_copy_tile s;
        (void)GMM__NAME(gmm__quant_load)(&a, &p, c0, n, 0, gmm__quant_shared);
        __syncthreads();
        s.scale = a.format.delayed && a.scale ? a.scale[p.unit] : 1.0f;
        s.group = a.first_group + p.unit;
        if (a.rowwise.dtype != GMM_NONE) {
            s.view = gmm__quant_copy(&a.rowwise, GMM_ROWWISE, a.grouped, &p, a.cols);
            s.line0 = p.row;
            s.along0 = c0;
            s.lines = (int32_t)p.m;
            s.along = n;
            s.per_line = a.row_amax != NULL;
            s.amax = a.row_amax ? a.row_amax + (a.grouped ? p.source_row : p.unit * p.rows) + p.row
                                : a.amax[0] + p.unit;
            s.blocks_per_line = width ? gmm__ceil_div(a.cols, width) : 1;
            s.first_block = p.row * s.blocks_per_line + (width ? c0 / width : 0);
            gmm__quant_copy_tile_lines(&a, &s, gmm__quant_shared, square, codes);
            __syncthreads();
        }
        if (a.columnwise.dtype != GMM_NONE) {
            s.view = gmm__quant_copy(&a.columnwise, GMM_COLUMNWISE, a.grouped, &p, a.cols);
            s.line0 = c0;
            s.along0 = p.row;
            s.lines = n;
            s.along = a.grouped && !s.view.mn_major ? GMM_TILE : (int32_t)p.m;
            s.per_line = a.col_amax != NULL;
            s.amax = a.col_amax ? a.col_amax + p.unit * a.cols + c0 : a.amax[1] + p.unit;
            s.blocks_per_line = width ? gmm__ceil_div(p.rows, width) : 1;
            s.first_block = c0 * s.blocks_per_line + (width ? p.row / width : 0);
            gmm__quant_copy_tile_lines(&a, &s, gmm__quant_shared, square, codes);
            __syncthreads();
        }
    }
}

#undef GMM__NAME
#undef GMM__KERNEL_NAME
#undef GMM__TAG
#undef GMM__ROW

