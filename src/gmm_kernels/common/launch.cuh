/* ............................................................................................... Launchers ... */

/* Number of CTAs that a persistent kernel starts. `tasks` is an upper bound of its tasks. An SM limit leaves
   the other multiprocessors to other kernels, so it allows one CTA for each multiprocessor. */
static GMM__UNUSED int32_t gmm__grid(int32_t processors, int32_t limit, int32_t blocks, int64_t tasks) {
    const int64_t max_blocks = limit > 0 ? (limit < processors ? limit : processors) : (int64_t)processors * blocks;
    return (int32_t)(tasks < 1 ? 1 : tasks < max_blocks ? tasks : max_blocks);
}

static GMM__UNUSED cudaError_t gmm_launch_copy(void *dst, const void *src, int64_t words, cudaStream_t stream) {
    gmm_copy_args args;
    void *params[1];
    cudaError_t e = cudaSuccess;
    int64_t i;
    params[0] = &args;
    for (i = 0; i < words && e == cudaSuccess; i += GMM_COPY_VALUES) {
        args.dst = (uint64_t *)dst + i;
        args.count = (int32_t)(words - i < GMM_COPY_VALUES ? words - i : (int64_t)GMM_COPY_VALUES);
        memcpy(args.values, (const uint64_t *)src + i, (size_t)args.count * 8);
        e = cudaLaunchKernel((const void *)gmm_copy_values, dim3(1), dim3(GMM_COPY_VALUES), params, 0, stream);
    }
    return e;
}

static GMM__UNUSED cudaError_t gmm_launch_offsets(const gmm_offsets_args *args, int pdl, cudaStream_t stream) {
    const int64_t warps = ((int64_t)args->groups.count + 31) / 32, max_warps = GMM_OFFSETS_THREADS / 32;
    const unsigned threads = 32 * (unsigned)(warps < 1 ? 1 : warps < max_warps ? warps : max_warps);
    return gmm_launch_pdl((const void *)gmm_split_offsets, pdl, 1, threads, 0, args, stream);
}

static GMM__UNUSED cudaError_t gmm_launch_gemm(int32_t kernel, int32_t grid, const gmm_gemm_args *args,
                                               cudaStream_t stream) {
    const gmm_gemm_kernel *row = &gmm_gemm_kernels[kernel];
    void *params[1];
    cudaError_t e = cudaSuccess;
    params[0] = (void *)(uintptr_t)args;
    if (row->shared > 48 * 1024)
        e = cudaFuncSetAttribute(row->function, cudaFuncAttributeMaxDynamicSharedMemorySize, row->shared);
    if (e == cudaSuccess)
        e = cudaLaunchKernel(row->function, dim3((unsigned)grid), dim3((unsigned)row->threads), params,
                             (size_t)row->shared, stream);
    return e;
}

static GMM__UNUSED cudaError_t gmm_launch_bgrad(gmm_dtype dtype, int32_t grid, const gmm_bgrad_args *args,
                                                cudaStream_t stream) {
    const gmm_bgrad_kernel *row = gmm_bgrad_kernels;
    void *params[1];
    cudaError_t e = cudaSuccess;
    params[0] = (void *)(uintptr_t)args;
    while (row->dtype != dtype) row++;
    if (args->db.dtype != GMM_NONE) {
        e = cudaLaunchKernel(row->partials, dim3((unsigned)grid), dim3(GMM_BGRAD_THREADS), params, 0, stream);
        if (e == cudaSuccess)
            e = cudaLaunchKernel((const void *)gmm_linear_bgrad_sum, dim3((unsigned)grid), dim3(GMM_BGRAD_THREADS),
                                 params, 0, stream);
    }
    if (e == cudaSuccess && args->d_bias_scale)
        e = cudaLaunchKernel(row->rows, dim3((unsigned)grid), dim3(GMM_BGRAD_THREADS), params, 0, stream);
    return e;
}


