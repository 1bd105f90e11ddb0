/* ........................................................................................ Body: bias gradient ... */
#elif GMM__BODY == GMM__BODY_BGRAD
#define GMM__PARTIALS_KERNEL_NAME GMM__COLUMN(1, GMM__ROW)
#define GMM__ROWS_KERNEL_NAME GMM__COLUMN(2, GMM__ROW)
#define GMM__DTYPE GMM__COLUMN(3, GMM__ROW)
#define GMM__GATHERED GMM__COLUMN(4, GMM__ROW)

/* partials[strip][n] = sum over the rows of a strip of s[r] dy[r][n]. A CTA processes GMM_BGRAD_COLS columns of a
   strip: 64 threads cover the columns, 4 each, and each of ROW_GROUPS groups of 64 threads sums 32 rows. */
GMM__KERNEL __launch_bounds__(GMM_BGRAD_THREADS)
GMM__PARTIALS_KERNEL_NAME(const __grid_constant__ gmm_bgrad_args args) {
    enum { ROW_GROUPS = GMM_BGRAD_THREADS / 64, ROWS = GMM_TILE / ROW_GROUPS, SIZE = GMM__DTYPE == GMM_F32 ? 4 : 2 };
    __shared__ float sums[ROW_GROUPS][GMM_BGRAD_COLS];
    gmm_pdl_wait();
    const int tid = (int)threadIdx.x, row_group = tid / 64;
    const uint32_t blocks = (uint32_t)(args.n + GMM_BGRAD_COLS - 1) / GMM_BGRAD_COLS;
    const int64_t count = (int64_t)args.tiles[args.groups] * blocks;
    const char *dy = (const char *)args.dy.data;
    const int vec4 = gmm_vec4_aligned(GMM__DTYPE, dy, args.dy.ld);
    int32_t g = 0;
    int64_t index;
    for (index = blockIdx.x; index < count; index += gridDim.x) {
        const uint32_t strip = (uint32_t)(index / blocks);
        const int32_t first = (int32_t)(index % blocks) * GMM_BGRAD_COLS, col = first + tid % 64 * 4;
        float sum[ROWS / 8][4];
        int64_t row, end;
        int i, j, r;
        gmm_find_group32(args.tiles, args.groups, strip, &g);
        row = args.offsets[g] + (int64_t)(strip - (uint32_t)args.tiles[g]) * GMM_TILE + row_group * ROWS;
        end = args.offsets[g + 1];
#pragma unroll
        for (j = 0; j < ROWS / 8; j++) {
#pragma unroll
            for (i = 0; i < 4; i++) sum[j][i] = 0.0f;
#pragma unroll
            for (r = 0; r < 8; r++, row++) {
                const int64_t at = GMM__GATHERED && row < end ? gmm_indexed_row(&args.dy_index, row) : row;
                const float s = args.bias_scale && row < end ? args.bias_scale[row] : 1.0f;
                float v[4];
                gmm_read4(GMM__DTYPE, dy + (at * args.dy.ld + col) * SIZE, row < end && at >= 0 ? args.n - col : 0,
                          vec4, v);
#pragma unroll
                for (i = 0; i < 4; i++) sum[j][i] = __fmaf_rn(s, v[i], sum[j][i]);
            }
        }
#pragma unroll
        for (i = 0; i < 4; i++)
            sums[row_group][tid % 64 * 4 + i] =
                __fadd_rn(__fadd_rn(sum[0][i], sum[1][i]), __fadd_rn(sum[2][i], sum[3][i]));
        __syncthreads();
        if (first + tid < args.n)
            args.partials[(int64_t)strip * args.n + first + tid] =
                __fadd_rn(__fadd_rn(sums[0][tid], sums[1][tid]), __fadd_rn(sums[2][tid], sums[3][tid]));
        __syncthreads();
    }
    if (GMM__GATHERED)
        gmm_report_index_faults(&args.dy_index, (int64_t)blockIdx.x * blockDim.x + threadIdx.x,
                                args.offsets[args.groups], (int64_t)gridDim.x * blockDim.x);
}

/* d_bias_scale[r] = sum over n of dy[r][n] bias_g[n], added to its old value if d_bias_scale_add is 1. One warp per
   row. */
GMM__KERNEL __launch_bounds__(GMM_BGRAD_THREADS)
GMM__ROWS_KERNEL_NAME(const __grid_constant__ gmm_bgrad_args args) {
    enum { WARPS = GMM_BGRAD_THREADS / 32, SIZE = GMM__DTYPE == GMM_F32 ? 4 : 2 };
    gmm_pdl_wait();
    const int lane = (int)threadIdx.x & 31;
    const int64_t valid_rows = args.offsets[args.groups], end = args.zero_tail ? args.capacity : valid_rows;
    const char *dy = (const char *)args.dy.data;
    const int vec4 = gmm_vec4_aligned(GMM__DTYPE, dy, args.dy.ld);
    int32_t g = 0;
    int64_t row;
    for (row = (int64_t)blockIdx.x * WARPS + (threadIdx.x >> 5); row < end; row += (int64_t)gridDim.x * WARPS) {
        float sum = 0.0f;
        if (row < valid_rows) {
            const int64_t at = GMM__GATHERED ? gmm_indexed_row(&args.dy_index, row) : row;
            const char *bias;
            int bias_vec4, i;
            int32_t col;
            gmm_find_group64(args.offsets, args.groups, row, &g);
            bias = gmm_kmat_data(&args.bias, g);
            bias_vec4 = gmm_vec4_aligned(args.bias.dtype, bias, 4);
            for (col = lane * 4; col < args.n; col += 128) {
                float v[4], w[4];
                gmm_read4(GMM__DTYPE, dy + (at * args.dy.ld + col) * SIZE, GMM__GATHERED && at < 0 ? 0 : args.n - col,
                          vec4, v);
                gmm_read4(args.bias.dtype, bias + (int64_t)col * gmm_kmat_size(&args.bias), args.n - col, bias_vec4,
                          w);
#pragma unroll
                for (i = 0; i < 4; i++) sum = __fmaf_rn(v[i], w[i], sum);
            }
#pragma unroll
            for (i = 16; i > 0; i /= 2) sum = __fadd_rn(sum, __shfl_xor_sync(0xFFFFFFFFu, sum, i));
        }
        if (lane == 0)
            args.d_bias_scale[row] =
                row < valid_rows && args.d_bias_scale_add ? __fadd_rn(args.d_bias_scale[row], sum) : sum;
    }
    if (GMM__GATHERED)
        gmm_report_index_faults(&args.dy_index, (int64_t)blockIdx.x * blockDim.x + threadIdx.x, valid_rows,
                                (int64_t)gridDim.x * blockDim.x);
}
#undef GMM__PARTIALS_KERNEL_NAME
#undef GMM__ROWS_KERNEL_NAME
#undef GMM__DTYPE
#undef GMM__GATHERED
#undef GMM__ROW

