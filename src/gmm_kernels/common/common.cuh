/* A matrix of each group: group g is at table[g] or, without a table, at data + g stride. */
typedef struct gmm_kmat {
    void *data;
    void *const *table; /* in device memory */
    int64_t stride;     /* bytes between the matrices of two groups; 0: all groups share one matrix */
    int64_t ld;         /* elements */
    gmm_dtype dtype;    /* GMM_NONE = absent */
} gmm_kmat;

GMM__DEVICE char *gmm_kmat_data(const gmm_kmat *m, int64_t g) {
    return m->table ? (char *)m->table[g] : (char *)m->data + g * m->stride;
}
GMM__DEVICE int gmm_kmat_size(const gmm_kmat *m) { return m->dtype == GMM_F32 ? 4 : 2; }

/* Conversions of 16-bit formats by hardware instructions. They give the same bits as the codecs of gmm_quant.h, for
   NaN as well. */
GMM__DEVICE uint32_t gmm_pack2(gmm_dtype dtype, float low, float high) {
    return dtype == GMM_BF16 ? gmm_cvt_bf16x2(high, low) : gmm_cvt_f16x2(high, low);
}
GMM__DEVICE uint4 gmm_pack8(gmm_dtype dtype, const float v[8]) {
    return make_uint4(gmm_pack2(dtype, v[0], v[1]), gmm_pack2(dtype, v[2], v[3]), gmm_pack2(dtype, v[4], v[5]),
                      gmm_pack2(dtype, v[6], v[7]));
}
GMM__DEVICE float gmm_widen(gmm_dtype dtype, uint16_t bits) {
    float value = __uint_as_float((uint32_t)bits << 16);
    if (dtype != GMM_BF16) value = gmm_cvt_f32_f16(bits);
    return value;
}

/* Reads and writes up to 4 consecutive elements of a row. `count` is the number of elements left in the row; it may
   be above 4 or below 1. Elements beyond the row read as 0 and are not written. `vec4`: the address is aligned for
   one access of 4 elements. */
GMM__DEVICE void gmm_read4(gmm_dtype dtype, const char *src, int count, int vec4, float v[4]) {
    uint16_t h[4] = { 0, 0, 0, 0 };
    int i;
    if (dtype == GMM_F32) {
        float4 f = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (vec4 && count >= 4) f = *(const float4 *)src;
        else {
            if (count > 0) f.x = ((const float *)src)[0];
            if (count > 1) f.y = ((const float *)src)[1];
            if (count > 2) f.z = ((const float *)src)[2];
            if (count > 3) f.w = ((const float *)src)[3];
        }
        v[0] = f.x; v[1] = f.y; v[2] = f.z; v[3] = f.w;
        return;
    }
    if (vec4 && count >= 4) {
        const uint2 u = *(const uint2 *)src;
        h[0] = (uint16_t)u.x; h[1] = (uint16_t)(u.x >> 16); h[2] = (uint16_t)u.y; h[3] = (uint16_t)(u.y >> 16);
    } else {
#pragma unroll
        for (i = 0; i < 4; i++)
            if (i < count) h[i] = ((const uint16_t *)src)[i];
    }
#pragma unroll
    for (i = 0; i < 4; i++) v[i] = gmm_widen(dtype, h[i]);
}
GMM__DEVICE void gmm_write4(gmm_dtype dtype, char *dst, int count, int vec4, const float v[4]) {
    uint2 bits;
    int i;
    if (dtype == GMM_F32) {
        if (vec4 && count >= 4) *(float4 *)dst = make_float4(v[0], v[1], v[2], v[3]);
        else {
#pragma unroll
            for (i = 0; i < 4; i++)
                if (i < count) ((float *)dst)[i] = v[i];
        }
        return;
    }
    bits = make_uint2(gmm_pack2(dtype, v[0], v[1]), gmm_pack2(dtype, v[2], v[3]));
    if (vec4 && count >= 4) *(uint2 *)dst = bits;
    else {
        if (count > 0) ((uint16_t *)dst)[0] = (uint16_t)bits.x;
        if (count > 1) ((uint16_t *)dst)[1] = (uint16_t)(bits.x >> 16);
        if (count > 2) ((uint16_t *)dst)[2] = (uint16_t)bits.y;
        if (count > 3) ((uint16_t *)dst)[3] = (uint16_t)(bits.y >> 16);
    }
}
/* Whether groups of 4 elements in the rows of a matrix are aligned for one vector access. */
GMM__DEVICE int gmm_vec4_aligned(gmm_dtype dtype, const char *base, int64_t ld) {
    const uint64_t unit = dtype == GMM_F32 ? 16 : 8;
    return (((uint64_t)(uintptr_t)base | (uint64_t)ld * (unit / 4)) & (unit - 1)) == 0;
}

/* Advances *g to the group that contains index `i`, where ends are prefix sums: ends[g] <= i < ends[g + 1]; to `groups`
   if i >= ends[groups]. *g is at most that group before. All lanes of the warp call it, with equal arguments. */
GMM__DEVICE void gmm_find_group32(const int32_t *ends, int32_t groups, int64_t i, int32_t *g) {
    int passed;
    do {
        const int32_t next = *g + 1 + (int32_t)(threadIdx.x & 31);
        passed = __popc(__ballot_sync(0xFFFFFFFFu, next <= groups && (int64_t)ends[next] <= i));
        *g += passed;
    } while (passed == 32);
}
GMM__DEVICE void gmm_find_group64(const int64_t *ends, int32_t groups, int64_t i, int32_t *g) {
    int passed;
    do {
        const int32_t next = *g + 1 + (int32_t)(threadIdx.x & 31);
        passed = __popc(__ballot_sync(0xFFFFFFFFu, next <= groups && ends[next] <= i));
        *g += passed;
    } while (passed == 32);
}

/* Programmatic dependent launch (from compute capability 9.0 on): a kernel may be launched while the last CTAs of
   its predecessor in the stream still run, which hides the launch latency. A kernel calls one of these functions before
   it reads or writes device memory. Both wait until the predecessor has finished and its writes are visible.
   gmm_pdl_wait also lets the successor launch when all CTAs of this kernel have begun; gmm_pdl_wait_only when all have
   ended. The kernels of quantize/ and gmm_act_dprob call the latter: with gmm_pdl_wait, casts and the products behind
   them together take 2 to 3 us longer per cast. */
GMM__DEVICE void gmm_pdl_wait_only(void) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    gmm_griddepcontrol_wait();
#endif
}
GMM__DEVICE void gmm_pdl_wait(void) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    gmm_griddepcontrol_launch_dependents();
#endif
    gmm_pdl_wait_only();
}

/* Launches a kernel whose only parameter is the structure at `args`. */
static GMM__UNUSED cudaError_t gmm_launch(const void *kernel, dim3 grid, int threads, int32_t shared, const void *args,
                                          cudaStream_t stream) {
    void *params[1];
    params[0] = (void *)(uintptr_t)args;
    return cudaLaunchKernel(kernel, grid, dim3((unsigned)threads), params, (size_t)shared, stream);
}

/* KiB of shared memory that so many CTAs with `bytes` each take of a multiprocessor; CUDA adds 1 KiB to each CTA. */
#define GMM__SM_KIB(ctas, bytes) (((ctas) * ((bytes) + 1024) + 1023) / 1024)
enum { GMM_SM_SHARED_KIB = 228 }; /* the most shared memory of a multiprocessor of sm_90 and sm_100 */
/* Launches a kernel as gmm_launch does, or with `pdl` by programmatic dependent launch, for which the kernel calls
   gmm_pdl_wait or gmm_pdl_wait_only. `shared`: bytes of dynamic shared memory. sm_kib: GMM__SM_KIB of the CTAs that a
   multiprocessor holds, with the static shared memory that ptxas reports; the driver rounds it up to a size that the
   multiprocessor can have, and the rest of its 256 KiB is L1. 0: no preference. A kernel without one that is launched
   while its predecessor runs keeps the predecessor's division. Behind a product that is 28 KiB of L1, with which a cast
   takes 1.2 times as long. */
static GMM__UNUSED cudaError_t gmm_launch_pdl(const void *kernel, int pdl, dim3 grid, unsigned threads, size_t shared,
                                              int sm_kib, const void *args, cudaStream_t stream) {
    cudaLaunchConfig_t config = GMM_ZERO;
    cudaLaunchAttribute attribute;
    void *params[1];
    if (pdl && sm_kib) {
        const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                                       100 * sm_kib / GMM_SM_SHARED_KIB); /* percent */
        if (error != cudaSuccess) return error;
    }
    memset(&attribute, 0, sizeof attribute);
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    config.gridDim = grid;
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = shared;
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = pdl ? 1 : 0;
    params[0] = (void *)(uintptr_t)args;
    return cudaLaunchKernelExC(&config, kernel, params);
}

