/* =========================================================================== Bodies per source: vectorized NV16 === */

#elif GMM__BODY == GMM__BODY_NV
#define GMM__KERNEL_NAME GMM__COLUMN(1, GMM__ROW)
#define GMM__SOURCE ((gmm_dtype)GMM__CAT(gmm__static_dtype_, GMM__COLUMN(2, GMM__ROW)))
#define GMM__HADAMARD GMM__COLUMN(3, GMM__ROW)

/* NV16 in both directions from tiles of 128 x 128 that are loaded once, GMM_CAST_TILES of them side by side per CTA.
   GMM__HADAMARD (BF16): the columnwise copy is transformed, or codes are rounded stochastically; a block of a column
   then lies in one lane. This variant serves aligned rows; gmm_quantize serves the rest, and scales chosen by error.

       load, encode   warp w: rows 32 (w % 4), columns 64 (w / 4) on; lane l: 8 rows from 8 (l / 8), 8 columns from
                      8 (l % 8) on of its warp's part (drawn in vectors.cuh)
       block scales   of rows: lanes l and l ^ 1, four rows each; of columns: lanes l and l ^ 8, four columns each
       columns stored thread t: 16 bytes number t % 4 of columns t / 4, t / 4 + 64 */
GMM__ROW_KERNEL __launch_bounds__(GMM__QUANT_THREADS, GMM__SOURCE == GMM_F32 || GMM__HADAMARD ? 2 : 3)
GMM__KERNEL_NAME(const __grid_constant__ gmm__quant_args a) {
    __shared__ float encodes[2][GMM_TILE];
    __shared__ float smem_sums[GMM_CAST_SUM_PARTS * GMM_TILE];
    __shared__ __align__(16) uint8_t codes[GMM_CAST_NV16_CODES];
    __shared__ __align__(16) uint8_t scales[GMM_TILE * GMM_TILE_BLOCKS];
    gmm_cast_tile t = gmm_cast_tile_init(&a, GMM__SOURCE);
    const int32_t separate_amax = t.columnwise && a.amax[1] != a.amax[0];
    gmm_cast_nv16 c = { gmm__lane() & 1, gmm__lane() >> 3 & 1, encodes[0], encodes[separate_amax], codes, scales,
                        0, 0, 0, 0 };
    int32_t strip;
    if (gmm__quant_wait_skips(a.skip)) return;
    gmm__quant_scales(&a, ((int64_t)blockIdx.y * gridDim.x + blockIdx.x) * GMM__QUANT_THREADS + threadIdx.x,
                      (int64_t)gridDim.x * gridDim.y * GMM__QUANT_THREADS, 0);
    for (strip = (int32_t)blockIdx.y;; strip += (int32_t)gridDim.y) {
        /* recomputed for each strip, so that it takes no registers in the loop body */
        const gmm_warp_split split = gmm_cast_split(&a);
        uint32_t x[8][8];
        int32_t end;
        if (strip >= split.total) break;
        gmm_cast_tile_move(&t, &split, strip, GMM_CAST_TILES);
        gmm_cast_nv16_move(&c, &t);
        end = t.cols - t.c0 < GMM_CAST_TILES * GMM_TILE ? t.cols : t.c0 + GMM_CAST_TILES * GMM_TILE;
        gmm_cast_load(&t, 1, x);
        gmm_cast_nv16_tables(&t, separate_amax, encodes);
        __syncthreads();
        for (; t.c0 < end; t.c0 += GMM_TILE) {
            uint32_t row[8], scales4[2], square_codes[8], lane_scales, has_nan = 0, square_max = 0;
            gmm_cast_tile next = t;
            const int32_t square = !GMM__HADAMARD && a.format.square;
            gmm_cast_tile_at(&t, t.c0);
            if (a.sums) {
                gmm_cast_column_sums(&t, 8, 8, 8, x[0], GMM_TILE, smem_sums);
                __syncthreads();
                gmm_cast_store_sums(&t, GMM_TILE, smem_sums);
                __syncthreads();
            }
            if (t.rowwise || !GMM__HADAMARD) {
                has_nan = gmm_cast_nv16_row_maxima(GMM__SOURCE, GMM__HADAMARD, x, row);
                if (square) square_max = gmm_cast_nv16_square_max(&t, row);
                lane_scales = gmm_cast_nv16_row_scales(&c, row, !GMM__HADAMARD, scales4);
                if (square) gmm_cast_nv16_encode_square(&c, &t, x, scales4, square_codes);
                if (t.rowwise) gmm_cast_nv16_store_row_scales(&c, &t, lane_scales);
                if (t.rowwise && GMM__HADAMARD) gmm_cast_nv16_encode_rows_random(&c, &t, x, scales4);
                else if (t.rowwise && t.in_cols) gmm_cast_nv16_encode_rows(&c, &t, x, scales4, square_codes, has_nan);
            }
            if (t.columnwise && GMM__HADAMARD) gmm_cast_nv16_encode_cols_hadamard(&c, &t, x);
            else if (t.columnwise) gmm_cast_nv16_encode_cols(&c, &t, x, square_max, square_codes, has_nan);
            gmm_cast_tile_at(&next, t.c0 + GMM_TILE);
            if (next.c0 < end) gmm_cast_load(&next, 1, x); /* while codes are stored */
            if (t.columnwise) gmm_cast_nv16_store_cols(&c, &t);
        }
        __syncthreads();
    }
}

#undef GMM__KERNEL_NAME
#undef GMM__SOURCE
#undef GMM__HADAMARD
#undef GMM__ROW

