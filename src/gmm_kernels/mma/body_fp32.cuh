/* ......................................................................................... Body: fp32 product ... */
#elif GMM__BODY == GMM__BODY_FP32
#define GMM__KERNEL_NAME GMM__COLUMN(1, GMM__ROW)
#define GMM__OP GMM__COLUMN(2, GMM__ROW)

/* D = A B^T in fp32 on the CUDA cores: every element is accumulated by FMAs in the order of k. A CTA of 256 threads
   computes 128 x 128 elements; a thread has 8 x 8 of them, in rows ty and ty + 64 and columns tx and tx + 64, four
   each. Two buffers of 16 values of k: the loads of the next stage are in flight while the present one is
   multiplied. */
GMM__ROW_KERNEL __launch_bounds__(gmm_threads_f32, 1)
GMM__KERNEL_NAME(const __grid_constant__ gmm_gemm_args args) {
    enum {
        TA = (int)GMM__CAT(gmm_ta_, GMM__OP), TB = (int)GMM__CAT(gmm_tb_, GMM__OP),
        K_GROUPED = (int)GMM__CAT(gmm_k_grouped_, GMM__OP),
        BM = gmm_bm_f32, BN = gmm_bn_f32, BK = gmm_bk_f32, LD = gmm_ld_f32
    };
    __shared__ __align__(16) float as[2][BK * LD], bs[2][BK * LD]; /* [k][m], [k][n] */
    const int tid = (int)threadIdx.x, ty = tid / 16 * 4, tx = tid % 16 * 4;
    gmm_gemm_tile tile;
    int64_t tile_index;

    tile.g = 0;
    for (tile_index = blockIdx.x; gmm_gemm_next_tile(&args, K_GROUPED, BM, BN, &tile_index, &tile);
         tile_index += gridDim.x) {
        const char *a = gmm_kmat_data(&args.a, 0) + 4 * (tile.row * args.a.ld + (TA ? tile.m0 : tile.m0 * args.a.ld));
        const char *b = gmm_kmat_data(&args.b, K_GROUPED ? 0 : tile.g) +
                        4 * ((K_GROUPED ? tile.row * args.b.ld : 0) + (TB ? tile.n0 : tile.n0 * args.b.ld));
        const int vec4_a = gmm_vec4_aligned(GMM_F32, a, args.a.ld), vec4_b = gmm_vec4_aligned(GMM_F32, b, args.b.ld);
        const int m = tile.m - tile.m0, n = args.n - tile.n0;
        float acc[8][8], va[2][4], vb[2][4];
        int i, j, k, k0, buffer = 0;
#pragma unroll
        for (i = 0; i < 8; i++)
#pragma unroll
            for (j = 0; j < 8; j++) acc[i][j] = 0.0f;

        k0 = 0;
        gmm_f32_load_stage(TA, a, vec4_a, args.a.ld, m, k0, tile.k, va);
        gmm_f32_load_stage(TB, b, vec4_b, args.b.ld, n, k0, tile.k, vb);
        gmm_f32_store_stage(TA, as[0], va);
        gmm_f32_store_stage(TB, bs[0], vb);
        __syncthreads();
        for (k0 = BK;; k0 += BK) {
            const int last = k0 >= tile.k;
            if (!last) {
                gmm_f32_load_stage(TA, a, vec4_a, args.a.ld, m, k0, tile.k, va);
                gmm_f32_load_stage(TB, b, vec4_b, args.b.ld, n, k0, tile.k, vb);
            }
#pragma unroll
            for (k = 0; k < BK; k++) {
                float x[8], y[8];
                *(float4 *)&x[0] = *(const float4 *)&as[buffer][k * LD + ty];
                *(float4 *)&x[4] = *(const float4 *)&as[buffer][k * LD + ty + 64];
                *(float4 *)&y[0] = *(const float4 *)&bs[buffer][k * LD + tx];
                *(float4 *)&y[4] = *(const float4 *)&bs[buffer][k * LD + tx + 64];
#pragma unroll
                for (i = 0; i < 8; i++)
#pragma unroll
                    for (j = 0; j < 8; j++) acc[i][j] = __fmaf_rn(x[i], y[j], acc[i][j]);
            }
            if (last) break;
            buffer ^= 1;
            gmm_f32_store_stage(TA, as[buffer], va);
            gmm_f32_store_stage(TB, bs[buffer], vb);
            __syncthreads();
        }
        __syncthreads(); /* the next tile overwrites the first buffer */
        {
            const gmm_gemm_epilogue epilogue = gmm_gemm_epilogue_begin(&args, K_GROUPED, &tile);
#pragma unroll
            for (j = 0; j < 8; j += 4) {
                const int32_t col = tile.n0 + tx + (j ? 64 : 0);
                float bias[4] = { 0.0f, 0.0f, 0.0f, 0.0f };
                if (epilogue.bias) {
                    const int size = gmm_kmat_size(&args.bias);
                    gmm_read4(args.bias.dtype, epilogue.bias + (int64_t)col * size, args.n - col, epilogue.bias_vec4,
                              bias);
                }
#pragma unroll
                for (i = 0; i < 8; i++) {
                    const int32_t row = tile.m0 + ty + i % 4 + (i < 4 ? 0 : 64);
                    if (row < tile.m && col < args.n) gmm_gemm_store(&args, &epilogue, row, col, bias, &acc[i][j]);
                }
            }
        }
    }
    if (!K_GROUPED && args.zero_tail) gmm_gemm_zero_tail(&args.d, args.offsets[args.groups], args.capacity, args.n);
}
#undef GMM__KERNEL_NAME
#undef GMM__OP
#undef GMM__ROW

