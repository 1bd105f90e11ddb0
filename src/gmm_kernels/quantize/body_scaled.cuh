/* ==================================================================== Bodies per source and scaling: vectorized === */

#elif GMM__BODY == GMM__BODY_SCALED
#define GMM__KERNEL_NAME GMM__COLUMN(1, GMM__ROW)
#define GMM__SOURCE ((gmm_dtype)GMM__CAT(gmm__static_dtype_, GMM__COLUMN(2, GMM__ROW)))
#define GMM__SCALING GMM__COLUMN(3, GMM__ROW)
#define GMM__SOURCE_OF GMM__COLUMN(4, GMM__ROW)
#define GMM__ACT (GMM__SOURCE_OF == GMM__CAST_OF_ACT)
#define GMM__GRADIENT (GMM__SOURCE_OF == GMM__CAST_OF_GRADIENT)

/* FP8 with fp32 scales (GMM__SCALING) in both directions from a tile of 128 x 128 that is loaded once. This variant
   serves aligned rows at the speed of memory; gmm_quantize serves the rest.

       load, encode   warp w: rows 32 (w % 4), columns 64 (w / 4) on; lane l: 8 rows from 8 (l / 8), 8 columns from
                      8 (l % 8) on of its warp's part (drawn in vectors.cuh)
       scales         thread r < 128: row r; thread 128 + c: column c

   GMM__ACT, GMM__GRADIENT: the source is computed (act_source.cuh); of a gradient a CTA has the tile of the gate
   columns and then that of the linear columns.
   TENSOR: load, scale of the unit, rows, columns. ROW: load, scales from given amaxes, rows, columns. 1X128 and
   128X128: load, maxima of the warps' parts, scales from them, rows, columns. */
GMM__ROW_KERNEL __launch_bounds__(GMM__QUANT_THREADS, GMM__SOURCE == GMM_F32 || GMM__GRADIENT ? 2 : 3)
GMM__KERNEL_NAME(const __grid_constant__ gmm__quant_args a) {
    __shared__ gmm_cast_fp8_scales smem_scales[2];
    __shared__ float smem_sums[GMM_CAST_SUM_PARTS * GMM_TILE];
    /* columnwise codes; with GMM__ACT first the lanes' slots of the activation, which all lanes have read by then */
    __shared__ __align__(16) uint8_t smem_codes[GMM__GRADIENT ? 16 : GMM__ACT ? GMM_CAST_ACT_SLOTS
                                                                              : GMM_CAST_FP8_CODES];
    extern __shared__ float gmm__quant_shared[]; /* GMM__GRADIENT: the slots, and codes in place of the first half */
    uint8_t *const codes = GMM__GRADIENT ? (uint8_t *)gmm__quant_shared : smem_codes;
    gmm_cast_tile t = gmm_cast_tile_init(&a, GMM__SOURCE);
    const int32_t thread = (int32_t)threadIdx.x, e5m2 = a.format.dtype == GMM_E5M2;
    const int sums = !GMM__ACT && GMM__SCALING != GMM_SCALING_128X128 && a.sums; /* 128X128 serves weights alone */
    const gmm_cast_fp8 c = { GMM__SCALING, GMM__SOURCE_OF, smem_scales, codes,
                             gmm_dtype_largest(e5m2 ? GMM_E5M2 : GMM_E4M3), e5m2 };
    if (gmm__quant_wait_skips(a.skip)) return;
    gmm_warp_split split = gmm_cast_split(&a);
    int32_t strip;
    if (GMM__SCALING == GMM_SCALING_TENSOR || GMM__SCALING == GMM_SCALING_ROW)
        gmm__quant_scales(&a, ((int64_t)blockIdx.y * gridDim.x + blockIdx.x) * GMM__QUANT_THREADS + thread,
                          (int64_t)gridDim.x * gridDim.y * GMM__QUANT_THREADS, 0);
    for (strip = (int32_t)blockIdx.y; strip < split.total; strip += (int32_t)gridDim.y) {
        uint32_t x[8][8];
        gmm_cast_tile_move(&t, &split, strip, 1);
        if (GMM__GRADIENT) {
            const int32_t h0 = t.c0;
            int32_t linear;
            gmm_cast_compute_gradient(&t, codes);
#pragma unroll 1
            for (linear = 0; linear <= a.act.gated; linear++) {
                if (linear) __syncthreads();
                gmm_cast_load_gradient(&t, h0, linear, codes, x);
                gmm_cast_fp8_tile(&c, &t, x, sums, smem_sums);
            }
        } else {
            if (GMM__ACT) gmm_cast_load_act(&t, codes, x);
            else gmm_cast_load(&t, 0, x);
            gmm_cast_fp8_tile(&c, &t, x, sums, smem_sums);
        }
        if (strip + (int32_t)gridDim.y >= split.total) break;
        __syncthreads();
        /* again, so that it takes no registers in the rest of the loop */
        if (GMM__ACT || GMM__GRADIENT) split = gmm_cast_split(&a);
    }
}

#undef GMM__KERNEL_NAME
#undef GMM__SOURCE
#undef GMM__SCALING
#undef GMM__ACT
#undef GMM__GRADIENT
#undef GMM__SOURCE_OF
#undef GMM__ROW

