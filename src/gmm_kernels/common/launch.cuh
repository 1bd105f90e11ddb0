/* ............................................................................................... Launchers ... */

#if GMM__HOLDS(0)
/* Number of CTAs that a persistent kernel starts. `tasks` is an upper bound of its tasks; sm_limit is
   options.sm_limit, 0 without one. A limit leaves the other multiprocessors to other kernels: since CTAs go where there
   is space, only as many may start as the limit counts. */
static GMM__UNUSED int32_t gmm__grid(int32_t processors, int32_t sm_limit, int32_t ctas_per_sm, int64_t tasks) {
    const int64_t limit = sm_limit < processors ? sm_limit : processors;
    const int64_t max_ctas = sm_limit > 0 ? limit : (int64_t)processors * ctas_per_sm;
    return (int32_t)(tasks < 1 ? 1 : tasks < max_ctas ? tasks : max_ctas);
}

/* Writes `words` 64-bit words of the host to device memory, by kernel parameters (gmm_copy_values). */
static GMM__UNUSED cudaError_t gmm_launch_copy(void *dst, const void *src, int64_t words, cudaStream_t stream) {
    gmm_copy_args args;
    cudaError_t error = cudaSuccess;
    int64_t i;
    for (i = 0; i < words && error == cudaSuccess; i += GMM_COPY_VALUES) {
        args.dst = (uint64_t *)dst + i;
        args.count = (int32_t)(words - i < GMM_COPY_VALUES ? words - i : (int64_t)GMM_COPY_VALUES);
        memcpy(args.values, (const uint64_t *)src + i, (size_t)args.count * 8);
        error = gmm_launch((const void *)gmm_copy_values, dim3(1), GMM_COPY_VALUES, 0, &args, stream);
    }
    return error;
}

/* Sets `count` 32-bit words of device memory to one value (gmm_fill_words). */
static GMM__UNUSED cudaError_t gmm_launch_fill(void *words, uint32_t value, int64_t count, int32_t sm_limit, int pdl,
                                               cudaStream_t stream) {
    const gmm_fill_args args = { (uint32_t *)words, count, value };
    const int32_t ctas = gmm__grid(GMM_FILL_CTAS, sm_limit, 1, (count - 1) / GMM_FILL_THREADS + 1);
    if (count <= 0) return cudaSuccess;
    return gmm_launch_pdl((const void *)gmm_fill_words, pdl, (unsigned)ctas, GMM_FILL_THREADS, 0, 0, &args, stream);
}

/* Launches the split reader as one CTA, with a thread per group up to its limit. */
static GMM__UNUSED cudaError_t gmm_launch_offsets(const gmm_offsets_args *args, int pdl, cudaStream_t stream) {
    const int64_t warps = ((int64_t)args->groups.count + 31) / 32, max_warps = GMM_OFFSETS_THREADS / 32;
    const unsigned threads = 32 * (unsigned)(warps < 1 ? 1 : warps < max_warps ? warps : max_warps);
    return gmm_launch_pdl((const void *)gmm_split_offsets, pdl, 1, threads, 0, 0, args, stream);
}

/* Launches a row of gmm_gemm_kernels. More than 48 KiB of dynamic shared memory need the attribute. */
static GMM__UNUSED cudaError_t gmm_launch_gemm(int32_t kernel, int32_t grid, const gmm_gemm_args *args,
                                               cudaStream_t stream) {
    const gmm_gemm_kernel *row = &gmm_gemm_kernels[kernel];
    cudaError_t error = cudaSuccess;
    if (row->shared > 48 * 1024)
        error = cudaFuncSetAttribute(row->function, cudaFuncAttributeMaxDynamicSharedMemorySize, row->shared);
    if (error != cudaSuccess) return error;
    return gmm_launch(row->function, dim3((unsigned)grid), row->threads, row->shared, args, stream);
}

/* Launches the kernels of a bias gradient: partial sums unless they are there, their sum where db is wanted, and the
   gradient of bias_scale. */
enum { GMM_BGRAD_PER_SM = 8 }; /* CTAs of a multiprocessor */
static GMM__UNUSED cudaError_t gmm_launch_bgrad(gmm_dtype dtype, int32_t grid, int pdl, const gmm_bgrad_args *args,
                                                cudaStream_t stream) {
    const gmm_bgrad_kernel *row = gmm_bgrad_kernels;
    const dim3 blocks((unsigned)grid);
    cudaError_t error = cudaSuccess;
    while (row->dtype != dtype || row->gathered != (args->dy_index.at != NULL)) row++;
    if (args->partials && !args->has_partials)
        error = gmm_launch_pdl(row->partials, pdl, blocks, GMM_BGRAD_THREADS, 0, GMM__SM_KIB(GMM_BGRAD_PER_SM, 4096),
                               args, stream);
    if (error == cudaSuccess && args->db.dtype != GMM_NONE)
        error = gmm_launch_pdl((const void *)gmm_linear_bgrad_sum, pdl, blocks, GMM_BGRAD_THREADS, 0,
                               GMM__SM_KIB(GMM_BGRAD_PER_SM, 0), args, stream);
    if (error == cudaSuccess && args->d_bias_scale)
        error = gmm_launch_pdl(row->rows, pdl, blocks, GMM_BGRAD_THREADS, 0, GMM__SM_KIB(GMM_BGRAD_PER_SM, 0), args,
                               stream);
    return error;
}
#endif /* GMM__HOLDS(0) */

