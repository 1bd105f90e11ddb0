#if GMM__HOLDS(0) && !defined(GMM_NO_QUANT)
/* The kernels of the casts. A call is served by the first row that fits it; scaling NONE fits every format. */
typedef struct gmm_quantize_kernel {
    gmm_dtype dtype;            /* of the source */
    gmm_scaling scaling;
    gmm__vectorized vectorized; /* at most that of the arguments */
    gmm__cast_source source;
    int32_t smem;               /* bytes of dynamic shared memory of a vectorized cast */
    int32_t sm_kib;             /* of the cast, as gmm_launch_pdl takes it; of the dtype with most CTAs */
    const void *amax, *cast;
} gmm_quantize_kernel;
/* X(dtype, tag, scaling, vectorized, sm_kib, kernel of the amaxes, of the cast), to whose names the tag is added */
#define GMM__CASTS(X, dtype, tag) \
    X(dtype, tag, TENSOR, GMM__VECTORIZED, GMM__SM_KIB(3, 23808), gmm_amax, gmm_cast_tensor) \
    X(dtype, tag, ROW, GMM__VECTORIZED, GMM__SM_KIB(3, 23808), gmm_amax, gmm_cast_row) \
    X(dtype, tag, 1X128, GMM__VECTORIZED, GMM__SM_KIB(3, 23808), gmm_amax, gmm_cast_1x128) \
    X(dtype, tag, 128X128, GMM__VECTORIZED, GMM__SM_KIB(3, 21760), gmm_amax, gmm_cast_128x128) \
    X(dtype, tag, MX32, GMM__VECTORIZED, GMM__SM_KIB(2, 4096), gmm_amax, gmm_cast_mx32) \
    X(dtype, tag, NV16, GMM__VECTORIZED, GMM__SM_KIB(3, 12544), gmm_amax, gmm_cast_nv16) \
    X(dtype, tag, NONE, GMM__VECTORIZED_NO, 0, gmm_quantize_amax, gmm_quantize)
#define GMM_QUANTIZE_KERNEL_LIST(X) \
    X(GMM_BF16, bf16, NV16, GMM__VECTORIZED_HADAMARD, GMM__SM_KIB(2, 12544), gmm_amax_hadamard, \
      gmm_cast_nv16_hadamard) \
    GMM__CASTS(X, GMM_BF16, bf16) GMM__IF_F16(GMM__CASTS(X, GMM_F16, f16)) GMM__CASTS(X, GMM_F32, f32)
#define GMM__X(dtype, tag, scaling, vectorized, sm_kib, amax, cast) \
    GMM__DECLARE_KERNEL(amax##_##tag, gmm__quant_args) GMM__DECLARE_KERNEL(cast##_##tag, gmm__quant_args)
GMM_QUANTIZE_KERNEL_LIST(GMM__X)
GMM__DECLARE_KERNEL(gmm_cast_act_tensor_bf16, gmm__quant_args)
GMM__DECLARE_KERNEL(gmm_cast_act_1x128_bf16, gmm__quant_args)
GMM__DECLARE_KERNEL(gmm_cast_gradient_tensor_bf16, gmm__quant_args)
GMM__DECLARE_KERNEL(gmm_cast_gradient_1x128_bf16, gmm__quant_args)
#undef GMM__X
#define GMM__X(dtype, tag, scaling, vectorized, sm_kib, amax, cast) \
    { dtype, GMM_SCALING_##scaling, vectorized, GMM__CAST_OF_MATRIX, 0, sm_kib, (const void *)amax##_##tag, \
      (const void *)cast##_##tag },
static const gmm_quantize_kernel gmm_quantize_kernels[] = {
    { GMM_BF16, GMM_SCALING_TENSOR, GMM__VECTORIZED, GMM__CAST_OF_ACT, 0, GMM__SM_KIB(3, 37888), NULL,
      (const void *)gmm_cast_act_tensor_bf16 },
    { GMM_BF16, GMM_SCALING_1X128, GMM__VECTORIZED, GMM__CAST_OF_ACT, 0, GMM__SM_KIB(3, 37888), NULL,
      (const void *)gmm_cast_act_1x128_bf16 },
    { GMM_BF16, GMM_SCALING_TENSOR, GMM__VECTORIZED, GMM__CAST_OF_GRADIENT, GMM_CAST_GRADIENT_SLOTS,
      GMM__SM_KIB(2, GMM_CAST_GRADIENT_SLOTS + 7184), NULL, (const void *)gmm_cast_gradient_tensor_bf16 },
    { GMM_BF16, GMM_SCALING_1X128, GMM__VECTORIZED, GMM__CAST_OF_GRADIENT, GMM_CAST_GRADIENT_SLOTS,
      GMM__SM_KIB(2, GMM_CAST_GRADIENT_SLOTS + 7184), NULL, (const void *)gmm_cast_gradient_1x128_bf16 },
    GMM_QUANTIZE_KERNEL_LIST(GMM__X)
};
#undef GMM__X

/* Grid of a vectorized kernel: tiles along the columns by strips, `max_blocks` CTAs at most. */
static GMM__UNUSED dim3 gmm_cast_grid(int64_t col_tiles, int64_t strips, int64_t max_blocks) {
    const int64_t max_rows = max_blocks / col_tiles < 65535 ? max_blocks / col_tiles : 65535;
    const int64_t y = strips < max_rows ? strips : max_rows;
    return dim3((unsigned)col_tiles, (unsigned)(y < 1 ? 1 : y));
}

/* CTAs of a persistent kernel. */
static GMM__UNUSED dim3 gmm__quant_grid(int64_t tile_count, int64_t max_blocks) {
    return dim3((unsigned)(tile_count < 1 ? 1 : tile_count < max_blocks ? tile_count : max_blocks));
}

/* Launches a kernel that calls gmm_pdl_wait_only, with `smem` bytes of dynamic shared memory; sm_kib, args as
   gmm_launch_pdl takes them. */
static GMM__UNUSED cudaError_t gmm__quant_launch(const void *kernel, int pdl, dim3 grid, int32_t smem, int32_t sm_kib,
                                                 const void *args, cudaStream_t stream) {
    cudaError_t error = cudaSuccess;
    if (smem)
        error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, GMM__QUANT_SHARED_BYTES);
    if (error != cudaSuccess) return error;
    return gmm_launch_pdl(kernel, pdl, grid, GMM__QUANT_THREADS, (size_t)smem, sm_kib, args, stream);
}

/* Launches what a cast needs: the kernel of amaxes (`amax`), that of scales, the cast itself (`cast`).
   `max_blocks`: CTAs of persistent kernels. limits.max_ctas: of those that process tiles in the order of addresses. */
static GMM__UNUSED cudaError_t gmm_launch_quantize(const gmm__quant_args *a, int amax, int cast, int64_t strips,
                                                   int64_t max_blocks, gmm__launch_limits limits, cudaStream_t stream) {
    const gmm_quantize_kernel *row = gmm_quantize_kernels;
    const gmm_dtype dtype = a->src.scaling == GMM_SCALING_NONE ? a->src.dtype : GMM_F32;
    const int mn_major = a->columnwise.dtype != GMM_NONE && a->format.scaling == GMM_SCALING_MX32;
    const int errors = a->format.square && a->format.four_over_six;
    const int32_t any_smem = a->vectorized ? 0 : mn_major || errors ? GMM__QUANT_SHARED_BYTES : GMM__QUANT_TILE_BYTES;
    const int mx_tiles = a->format.scaling == GMM_SCALING_MX32 && dtype != GMM_F32;
    const int64_t tiles_per_block = mx_tiles || a->format.scaling == GMM_SCALING_NV16 ? (int64_t)GMM_CAST_TILES : 1;
    dim3 grid = gmm__quant_grid(strips * a->col_tiles, max_blocks), cast_grid = grid;
    cudaError_t error = cudaSuccess;
    gmm__quant_args forward = *a;
    if (a->vectorized) {
        grid = gmm_cast_grid(a->col_tiles, strips, limits.max_ctas);
        cast_grid = gmm_cast_grid((a->col_tiles + tiles_per_block - 1) / tiles_per_block, strips, limits.max_ctas);
    }
    while (row->dtype != dtype || row->vectorized > a->vectorized || row->source != a->act.source ||
           (row->scaling != GMM_SCALING_NONE && row->scaling != a->format.scaling))
        row++;
    forward.backward = 0;
    if (amax)
        error = gmm__quant_launch(row->amax, limits.pdl, grid, a->vectorized ? 0 : GMM__QUANT_TILE_BYTES,
                                  a->vectorized ? GMM__SM_KIB(4, 4160) : 0, &forward, stream);
    if (error == cudaSuccess && (!a->vectorized || !cast))
        error = gmm__quant_launch((const void *)gmm_quantize_scales, limits.pdl, gmm__quant_grid(max_blocks, 64), 0, 0,
                                  &forward, stream);
    if (error != cudaSuccess || !cast) return error;
    return gmm__quant_launch(row->cast, limits.pdl, cast_grid, row->smem + any_smem, row->sm_kib, a, stream);
}
static GMM__UNUSED cudaError_t gmm_launch_dequantize(const gmm__dequant_args *a, int64_t tile_count,
                                                     gmm__launch_limits limits, cudaStream_t stream) {
    return gmm__quant_launch((const void *)gmm_dequantize_tiles, limits.pdl,
                             gmm__quant_grid(tile_count, limits.max_ctas), GMM__QUANT_TILE_BYTES,
                             GMM__SM_KIB(GMM__QUANT_PER_SM, GMM__QUANT_TILE_BYTES), a, stream);
}

static GMM__UNUSED cudaError_t gmm_launch_transpose(const gmm__transpose_args *a, gmm__launch_limits limits,
                                                    cudaStream_t stream) {
    const int64_t tile_count = a->units * gmm__ceil_div(a->rows, GMM_TILE) * gmm__ceil_div(a->cols, GMM_TILE);
    return gmm__quant_launch(a->src.dtype == GMM_E2M1 ? (const void *)gmm_transpose_e2m1_tiles
                                                      : (const void *)gmm_transpose_tiles,
                             limits.pdl, gmm__quant_grid(tile_count, limits.max_ctas), 0,
                             GMM__SM_KIB(GMM__TRANSPOSE_PER_SM, 16896), a, stream);
}

static GMM__UNUSED cudaError_t gmm_launch_shard_cast(const gmm__shard_args *a, int amax, gmm__launch_limits limits,
                                                     cudaStream_t stream) {
    const int64_t work = a->count * a->rows * a->cols / GMM__QUANT_THREADS + 1;
    return gmm__quant_launch(amax ? (const void *)gmm_shard_amax : (const void *)gmm_shard_codes, limits.pdl,
                             gmm__quant_grid(work, limits.max_ctas), 0, GMM__SM_KIB(8, 0), a, stream);
}

static GMM__UNUSED cudaError_t gmm_launch_quantize_tail(const gmm__quant_tail_args *a, gmm__launch_limits limits,
                                                        cudaStream_t stream) {
    return gmm__quant_launch((const void *)gmm_quantize_tail, limits.pdl, gmm__quant_grid(256, limits.max_ctas), 0,
                             GMM__SM_KIB(8, 0), a, stream);
}

static GMM__UNUSED cudaError_t gmm_launch_update_scales(const gmm__update_args *a, int pdl, cudaStream_t stream) {
    const int64_t blocks = ((int64_t)a->slots + GMM__QUANT_THREADS - 1) / GMM__QUANT_THREADS;
    if (blocks == 0) return cudaSuccess;
    return gmm__quant_launch((const void *)gmm_update_scale_slots, pdl, dim3((unsigned)blocks), 0, 0, a, stream);
}
#endif /* GMM__HOLDS(0), GMM_NO_QUANT */

