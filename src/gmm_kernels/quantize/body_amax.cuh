/* ======================================================================== Bodies per source: vectorized amaxes === */

#elif GMM__BODY == GMM__BODY_AMAX
#define GMM__KERNEL_NAME GMM__COLUMN(1, GMM__ROW)
#define GMM__SOURCE ((gmm_dtype)GMM__CAT(gmm__static_dtype_, GMM__COLUMN(2, GMM__ROW)))
#define GMM__HADAMARD GMM__COLUMN(3, GMM__ROW)

/* The same amaxes as gmm_quantize_amax, for sources whose rows are aligned vectors: either of units, or of rows and
   columns. A CTA processes tiles of 128 x 128; GMM__HADAMARD (BF16) also computes the amax of the transformed
   columnwise copy. Atomic maxima on the bits of absolute values make the result independent of the order.

       load           warp w: rows 32 (w % 4), columns 64 (w / 4) on; lane l: 8 rows from 8 (l / 8), 8 columns from
                      8 (l % 8) on of its warp's part (drawn in vectors.cuh)
       amaxes         of lines: thread r < 128: row r; thread 128 + c: column c. Of units: thread 0 that of the source,
                      thread 1 that of its transform */
GMM__ROW_KERNEL __launch_bounds__(GMM__QUANT_THREADS, GMM__HADAMARD ? 3 : GMM__SOURCE == GMM_F32 ? 2 : 4)
GMM__KERNEL_NAME(const __grid_constant__ gmm__quant_args a) {
    __shared__ uint32_t shared_max[2][GMM__QUANT_WARPS]; /* of the source, and of the transformed source */
    __shared__ uint32_t partials[2][4][GMM_TILE]; /* partial maxima: rows by halves, columns by quarters of the tile */
    gmm_cast_tile t = gmm_cast_tile_init(&a, GMM__SOURCE);
    if (gmm__quant_wait_skips(a.skip)) return;
    const gmm_warp_split split = gmm_cast_split(&a);
    int32_t strip;
    for (strip = (int32_t)blockIdx.y; strip < split.total; strip += (int32_t)gridDim.y) {
        uint32_t x[8][8];
        gmm_cast_tile_move(&t, &split, strip, 1);
        gmm_cast_load(&t, 0, x);
        if (!GMM__HADAMARD && (a.row_amax || a.col_amax)) { /* amaxes of units are not needed then */
            if (a.row_amax) gmm_amax_rows(&t, x, partials[0]);
            if (a.col_amax) gmm_amax_cols(&t, x, partials[1]);
            gmm_amax_store_lines(&t, partials);
        } else {
            gmm_amax_unit(&t, GMM__HADAMARD, x, shared_max);
            __syncthreads();
            gmm_amax_store_unit(&t, GMM__HADAMARD, shared_max);
        }
        if (strip + (int32_t)gridDim.y < split.total) __syncthreads();
    }
}

#undef GMM__KERNEL_NAME
#undef GMM__SOURCE
#undef GMM__HADAMARD
#undef GMM__ROW

