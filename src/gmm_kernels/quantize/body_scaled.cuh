/* ==================================================================== Bodies per source and scaling: vectorized === */

#elif GMM__BODY == GMM__BODY_SCALED
#define GMM__KERNEL_NAME GMM__COLUMN(1, GMM__ROW)
#define GMM__SOURCE ((gmm_dtype)GMM__CAT(gmm__static_dtype_, GMM__COLUMN(2, GMM__ROW)))
#define GMM__SCALING GMM__COLUMN(3, GMM__ROW)
#define GMM__ACT GMM__COLUMN(4, GMM__ROW)

/* FP8 with fp32 scales (GMM__SCALING) in both directions from a tile of 128 x 128 that is loaded once. This variant
   serves aligned rows at the speed of memory; gmm_quantize serves the rest.

       load, encode   warp w: rows 32 (w % 4), columns 64 (w / 4) on; lane l: 8 rows from 8 (l / 8), 8 columns from
                      8 (l % 8) on of its warp's part (drawn in vectors.cuh)
       scales         thread r < 128: row r; thread 128 + c: column c

   GMM__ACT: the source is an activation of the matrix that is loaded (act_source.cuh).
   TENSOR: load, scale of the unit, rows, columns. ROW: load, scales from given amaxes, rows, columns. 1X128 and
   128X128: load, maxima of the warps' parts, scales from them, rows, columns. */
GMM__ROW_KERNEL __launch_bounds__(GMM__QUANT_THREADS, GMM__SOURCE == GMM_F32 ? 2 : 3)
GMM__KERNEL_NAME(const __grid_constant__ gmm__quant_args a) {
    __shared__ gmm_cast_fp8_scales smem_scales[2];
    __shared__ float smem_sums[GMM_CAST_SUM_PARTS * GMM_TILE];
    /* columnwise codes; with GMM__ACT first the lanes' slots of the activation, which all lanes have read by then */
    __shared__ __align__(16) uint8_t codes[GMM__ACT ? GMM_CAST_ACT_SLOTS : GMM_CAST_FP8_CODES];
    gmm_cast_tile t = gmm_cast_tile_init(&a, GMM__SOURCE);
    const int32_t thread = (int32_t)threadIdx.x, e5m2 = a.format.dtype == GMM_E5M2;
    const int sums = !GMM__ACT && GMM__SCALING != GMM_SCALING_128X128 && a.sums; /* 128X128 serves weights alone */
    const gmm_cast_fp8 c = { GMM__SCALING, smem_scales, codes, gmm_dtype_largest(e5m2 ? GMM_E5M2 : GMM_E4M3), e5m2 };
    if (gmm__quant_wait_skips(a.skip)) return;
    gmm_warp_split split = gmm_cast_split(&a);
    int32_t strip;
    if (GMM__SCALING == GMM_SCALING_TENSOR || GMM__SCALING == GMM_SCALING_ROW)
        gmm__quant_scales(&a, ((int64_t)blockIdx.y * gridDim.x + blockIdx.x) * GMM__QUANT_THREADS + thread,
                          (int64_t)gridDim.x * gridDim.y * GMM__QUANT_THREADS, 0);
    for (strip = (int32_t)blockIdx.y; strip < split.total; strip += (int32_t)gridDim.y) {
        uint32_t x[8][8], amax = 0;
        float tile_scale = 1.0f;
        gmm_cast_tile_move(&t, &split, strip, 1);
        if (GMM__ACT) gmm_cast_load_act(&t, codes, x);
        else gmm_cast_load(&t, 0, x);
        if (sums) gmm_cast_column_sums(&t, 8, 8, 8, x[0], GMM_TILE, smem_sums);
        if (GMM__SCALING == GMM_SCALING_TENSOR) {
            tile_scale = !GMM__ACT && !a.format.delayed ? gmm__quant_scale(&a, c.qmax, 0, a.amax[0][t.p.unit])
                         : a.scale         ? a.scale[t.p.unit] : 1.0f;
            if (a.record) amax = gmm_cast_fp8_warp_amax(&c, &t, x);
            if (GMM__ACT || sums) __syncthreads(); /* where there are maxima of lines, a barrier follows them */
        } else {
            if (GMM__SCALING == GMM_SCALING_ROW) gmm_cast_fp8_line_scales(&c, &t);
            if (GMM__SCALING == GMM_SCALING_1X128) gmm_cast_fp8_line_maxima(&c, &t, x);
            if (GMM__SCALING == GMM_SCALING_128X128) gmm_cast_fp8_warp_amax(&c, &t, x);
            __syncthreads();
        }
        if (sums) gmm_cast_store_sums(&t, GMM_TILE, smem_sums);
        if (GMM__SCALING == GMM_SCALING_128X128) tile_scale = gmm_cast_fp8_128x128_scale(&c, &t);
        if (GMM__SCALING == GMM_SCALING_1X128) {
            gmm_cast_fp8_1x128_scales(&c, &t);
            __syncthreads();
        }
        if (t.rowwise && t.in_cols) gmm_cast_fp8_encode_rows(&c, &t, x, tile_scale);
        if (t.columnwise) gmm_cast_fp8_encode_cols(&c, &t, x, tile_scale);
        if (GMM__SCALING == GMM_SCALING_TENSOR && a.record) {
            __syncthreads();
            gmm_cast_fp8_record_amax(&c, &t, amax);
        }
        if (strip + (int32_t)gridDim.y >= split.total) break;
        __syncthreads();
        if (GMM__ACT) split = gmm_cast_split(&a); /* again, so that it takes no registers in the rest of the loop */
    }
}

#undef GMM__KERNEL_NAME
#undef GMM__SOURCE
#undef GMM__SCALING
#undef GMM__ACT
#undef GMM__ROW

