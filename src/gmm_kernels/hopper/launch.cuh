/* Host side of the 16-bit Hopper products: the table of instances, tensor maps, the launcher. */

#if GMM__HOLDS(0)
typedef struct gmm_sm90_kernel {
    gmm_gemm_op op;
    int32_t tb; /* whether B is stored as [k][n] */
    gmm_dtype dtype;
    int32_t consumers, tile_n, m16, stages, store_blocks, smem_bytes, b_format, ctas_per_sm, deferred, gather,
            threads;
    int32_t tile_choice; /* gmm_sm90_tile_choice */
    const void *function;
    const char *name;
} gmm_sm90_kernel;

#define GMM__X(op, dtype, tag, tile, choice, kernel) GMM__DECLARE_KERNEL(kernel, gmm_sm90_args)
GMM_SM90_KERNEL_LIST(GMM__X)
#undef GMM__X
static const gmm_sm90_kernel gmm_sm90_kernels[] = {
#define GMM__X(op, dtype, tag, tile, choice, kernel) \
    { gmm_gemm_##op, gmm_tb_##op, dtype, GMM__SM90(consumers, tile), GMM__SM90(tile_n, tile), GMM__SM90(m16, tile), \
      GMM__SM90(stages, tile), GMM__SM90(store_blocks, tile), GMM__SM90(smem_bytes, tile), \
      GMM__SM90(b_format, tile), GMM__SM90(ctas_per_sm, tile), GMM__SM90(deferred, tile), \
      GMM__SM90(gather, tile), GMM__SM90(threads, tile), \
      gmm_sm90_tile_##choice, (const void *)kernel, #kernel },
    GMM_SM90_KERNEL_LIST(GMM__X)
#undef GMM__X
};
enum { GMM_SM90_KERNELS = (int)(sizeof gmm_sm90_kernels / sizeof gmm_sm90_kernels[0]) };

/* Encodes one tensor map of any element type: boxes of 128 bytes by `box_lines` lines. Unused strides are 16. L2
   promotion of 128 bytes is faster for weights. */
static GMM__UNUSED int gmm_sm90_map(PFN_cuTensorMapEncodeTiled_v12000 encode, CUtensorMap *map, gmm_dtype dtype,
                                    void *base, const cuuint64_t dims[4], const cuuint64_t strides[3],
                                    int32_t box_lines, int weights) {
    const CUtensorMapDataType type = dtype == GMM_F32 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
                                   : gmm_dtype_bits(dtype) == 16 ? CU_TENSOR_MAP_DATA_TYPE_UINT16
                                                                 : CU_TENSOR_MAP_DATA_TYPE_UINT8;
    const CUtensorMapL2promotion promotion = weights ? CU_TENSOR_MAP_L2_PROMOTION_L2_128B
                                                     : CU_TENSOR_MAP_L2_PROMOTION_L2_256B;
    const cuuint32_t one[4] = { 1, 1, 1, 1 };
    cuuint32_t box[4] = { 0, 0, 1, 1 };
    box[0] = (cuuint32_t)(1024 / gmm_dtype_bits(dtype));
    box[1] = (cuuint32_t)box_lines;
    return encode(map, type, 4, base, dims, strides, box, one, CU_TENSOR_MAP_INTERLEAVE_NONE,
                  CU_TENSOR_MAP_SWIZZLE_128B, promotion, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}
/* Rows of a token matrix, as a ragged map (see "Ragged maps" in tables.cuh). Its last two dimensions only have to be
   large. */
static GMM__UNUSED int gmm_sm90_map_tokens(PFN_cuTensorMapEncodeTiled_v12000 encode, CUtensorMap *map,
                                           const gmm_kmat *m, int64_t features, int32_t box_lines) {
    const cuuint64_t pitch = (cuuint64_t)(m->ld * gmm_dtype_bits(m->dtype) / 8);
    cuuint64_t dims[4] = { 0, GMM_SM90_RAGGED_ROWS, 0x7FFF0000, 0x7FFF0000 }, strides[3];
    dims[0] = (cuuint64_t)features;
    strides[0] = strides[1] = pitch;
    strides[2] = ((cuuint64_t)1 << 34) - pitch;
    return gmm_sm90_map(encode, map, m->dtype, m->data, dims, strides, box_lines, 0);
}
/* A matrix of each group, at any address: the last two coordinates are its address (gmm_sm90_map_offset).
   `weights`: weights, else D. */
static GMM__UNUSED int gmm_sm90_map_matrix(PFN_cuTensorMapEncodeTiled_v12000 encode, CUtensorMap *map,
                                           const gmm_kmat *m, int64_t features, int64_t lines, int32_t box_lines,
                                           int weights) {
    cuuint64_t dims[4] = { 0, 0, GMM_SM90_MAP_STEPS, 0x7FFFFFFF }, strides[3] = { 0, 16, 16 * GMM_SM90_MAP_STEPS };
    dims[0] = (cuuint64_t)features;
    dims[1] = (cuuint64_t)lines;
    strides[0] = (cuuint64_t)(m->ld * gmm_dtype_bits(m->dtype) / 8);
    return gmm_sm90_map(encode, map, m->dtype, (void *)(uintptr_t)GMM_SM90_MAP_BASE, dims, strides, box_lines, weights);
}

/* A matrix of packed weights at any address: boxes of 64 codes by `box_lines` lines; FP8 swizzled by 64 bytes. */
static GMM__UNUSED int gmm_sm90_map_packed_weights(PFN_cuTensorMapEncodeTiled_v12000 encode, CUtensorMap *map,
                                                   const gmm_mat *m, int64_t features, int64_t lines,
                                                   int32_t box_lines) {
    const cuuint32_t one[4] = { 1, 1, 1, 1 }, fp4 = m->dtype == GMM_E2M1;
    const cuuint64_t strides[3] = { (cuuint64_t)(fp4 ? m->ld / 2 : m->ld), 16, 16 * GMM_SM90_MAP_STEPS };
    cuuint64_t dims[4] = { 0, 0, GMM_SM90_MAP_STEPS, 0x7FFFFFFF };
    cuuint32_t box[4] = { 0, 0, 1, 1 };
    dims[0] = (cuuint64_t)(fp4 ? features / 2 : features);
    dims[1] = (cuuint64_t)lines;
    box[0] = fp4 ? 32 : 64;
    box[1] = (cuuint32_t)box_lines;
    return encode(map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 4, (void *)(uintptr_t)GMM_SM90_MAP_BASE, dims, strides, box, one,
                  CU_TENSOR_MAP_INTERLEAVE_NONE, fp4 ? CU_TENSOR_MAP_SWIZZLE_NONE : CU_TENSOR_MAP_SWIZZLE_64B,
                  CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

/* Whether this build has sm_90a code for the current device: kernels without it have the launch bounds of an empty
   kernel. */
static GMM__UNUSED int gmm_sm90_present(void) {
    struct cudaFuncAttributes a;
    const int present = cudaFuncGetAttributes(&a, gmm_sm90_kernels[0].function) == cudaSuccess &&
                      a.maxThreadsPerBlock == gmm_sm90_kernels[0].threads;
    (void)cudaGetLastError();
    return present;
}

/* Launches a kernel of the Hopper products with at most `blocks` CTAs, as clusters of two CTAs where there is more than
   one. */
static GMM__UNUSED cudaError_t gmm_launch_clusters(const void *kernel, int32_t blocks, int threads, int32_t smem_bytes,
                                                   void *args, cudaStream_t stream) {
    const int cluster = blocks > 1 ? 2 : 1;
    cudaLaunchConfig_t config = GMM_ZERO;
    cudaLaunchAttribute attributes[2];
    void *params[1];
    cudaError_t error;
    int device = 0, sms = 0;
    memset(attributes, 0, sizeof attributes);
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim.x = (unsigned)cluster;
    attributes[0].val.clusterDim.y = attributes[0].val.clusterDim.z = 1;
    attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[1].val.programmaticStreamSerializationAllowed = 1;
    config.gridDim = dim3((unsigned)(blocks / cluster * cluster));
    config.blockDim = dim3((unsigned)threads);
    config.dynamicSmemBytes = (size_t)smem_bytes;
    config.stream = stream;
    config.attrs = attributes;
    /* With an SM limit this launch waits for the end of its predecessor. Otherwise its CTAs would occupy, beside the
       predecessor's, the multiprocessors that the limit leaves to others. */
    error = cudaGetDevice(&device);
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
    config.numAttrs = blocks < sms / cluster * cluster ? 1 : 2;
    params[0] = args;
    if (error == cudaSuccess)
        error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes);
    return error == cudaSuccess ? cudaLaunchKernelExC(&config, kernel, params) : error;
}

/* Encodes the tensor maps and launches the kernel with at most `blocks` CTAs. `args` is complete but for the
   maps; operands and their rows are 16-byte aligned. */
static GMM__UNUSED cudaError_t gmm_launch_sm90(PFN_cuTensorMapEncodeTiled_v12000 encode, int32_t kernel, int32_t blocks,
                                               gmm_sm90_args *args, cudaStream_t stream) {
    const gmm_sm90_kernel *row = &gmm_sm90_kernels[kernel];
    const gmm_gemm_args *p = &args->p;
    int mapped;
    args->d_by_tma = row->deferred && p->d.dtype != GMM_F32 && gmm_sm90_tma_stores(p->d.data, p->d.ld, p->n, 2);
    if (row->op == gmm_gemm_wgrad)
        mapped = gmm_sm90_map_tokens(encode, &args->a, &p->a, p->m, 64) &&
                 gmm_sm90_map_tokens(encode, &args->b, &p->b, p->n, 64) &&
                 (p->d.ld * (p->d.dtype == GMM_F32 ? 4 : 2) % 16 != 0 || /* else the consumers store D themselves */
                  gmm_sm90_map_matrix(encode, &args->d, &p->d, p->n, p->m, 64, 0));
    else if (row->b_format != gmm_sm90_b_format_plain)
        mapped = gmm_sm90_map_packed_weights(encode, &args->b, &args->codes, p->k, p->n, 64);
    else if (!row->tb)
        mapped = gmm_sm90_map_matrix(encode, &args->b, &p->b, p->k, p->n, 64, 1);
    else
        mapped = gmm_sm90_map_matrix(encode, &args->b, &p->b, p->n, p->k, 64, 1);
    if (row->op != gmm_gemm_wgrad)
        mapped = mapped && gmm_sm90_map_tokens(encode, &args->a, &p->a, p->k, 64) &&
                 gmm_sm90_map_tokens(encode, &args->a16, &p->a, p->k, 16) &&
                 (!args->d_by_tma || gmm_sm90_map_tokens(encode, &args->d, &p->d, p->n, 16 * row->deferred));
    if (!mapped) return cudaErrorInvalidValue;
    args->tile_choice = row->tile_choice;
    return gmm_launch_clusters(row->function, blocks, row->threads, row->smem_bytes, args, stream);
}
#endif /* GMM__HOLDS(0) */

