/* =========================================================================== Bodies per source: vectorized MX32 === */

#elif GMM__BODY == GMM__BODY_MX
#define GMM__KERNEL_NAME GMM__COLUMN(1, GMM__ROW)
#define GMM__SOURCE ((gmm_dtype)GMM__CAT(gmm__static_dtype_, GMM__COLUMN(2, GMM__ROW)))

/* MX32 in both directions from one load; warps synchronize for column sums alone. This variant serves aligned rows;
   gmm_quantize serves the rest, and E2M1. w: elements in 16 bytes of the source.

       load, encode   warp i: rows 32 (i % 4), columns 16 w (i / 4) on; lane l: 16 rows from 16 (l / 16), w columns from
                      w (l % 16) on of its warp's part (drawn in stages_mx32.cuh)
       block scales   of rows: 32 / w adjacent lanes, w / 2 rows each; of columns: lanes l and l ^ 16, w / 2
                      columns each */
GMM__ROW_KERNEL __launch_bounds__(GMM__QUANT_THREADS, 2)
GMM__KERNEL_NAME(const __grid_constant__ gmm__quant_args a) {
    gmm_cast_tile t = gmm_cast_mx32_tile_init(&a, GMM__SOURCE);
    enum { COLS = 32 * (GMM__SOURCE == GMM_F32 ? 4 : 8) }; /* of a tile */
    __shared__ float smem_sums[GMM_CAST_SUM_PARTS * COLS];
    const int32_t e5m2 = a.format.dtype == GMM_E5M2;
    const gmm_cast_mx32 c = { gmm_f32_from_bits(e5m2 ? 0x37924925u /* 1 / 57344 */ : 0x3B124925u /* 1 / 448 */),
                              e5m2 };
    int32_t strip;
    if (gmm__quant_wait_skips(a.skip)) return;
    for (strip = (int32_t)blockIdx.y;; strip += (int32_t)gridDim.y) {
        /* recomputed for each strip, so that it takes no registers in the loop body */
        const gmm_warp_split split = gmm_cast_split(&a);
        uint32_t x[16][4], row[16], square_max = 0, lane_scales = 0, scales4[4];
        if (strip >= split.total) break;
        gmm_cast_tile_move(&t, &split, strip, gmm__elems16(GMM__SOURCE) / 4);
        gmm_cast_load_rows(&t, 1, 16, 4, 4, x[0]);
        if (a.sums) {
            gmm_cast_column_sums(&t, 16, COLS / 32, 4, x[0], COLS, smem_sums);
            __syncthreads();
            gmm_cast_store_sums(&t, COLS, smem_sums);
            __syncthreads();
        }
        if (t.rowwise || a.format.square) {
            gmm_cast_mx32_row_maxima(GMM__SOURCE, x, row);
            if (a.format.square) square_max = gmm_cast_mx32_square_max(&t, row);
            lane_scales = gmm_cast_mx32_row_scales(&c, GMM__SOURCE, row);
        }
        if (t.rowwise) {
            gmm_cast_mx32_store_row_scales(&t, lane_scales);
            gmm_cast_mx32_gather_row_scales(GMM__SOURCE, lane_scales, scales4);
            if (t.in_cols) gmm_cast_mx32_encode(&c, &t, 0, x, scales4);
        }
        if (t.columnwise) {
            gmm_cast_mx32_store_col_scales(&t, gmm_cast_mx32_col_scales(&c, &t, x, square_max), scales4);
            if (t.in_cols) gmm_cast_mx32_encode(&c, &t, 1, x, scales4);
        }
    }
}

#undef GMM__KERNEL_NAME
#undef GMM__SOURCE
#undef GMM__ROW

#else
#error "gmm: GMM__BODY is none of the values GMM__BODY_*"
#endif
