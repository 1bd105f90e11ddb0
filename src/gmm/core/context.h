GMMDEF const char *gmm_op_name(gmm_op op) {
    switch (op) {
#define GMM__X(name, text) case name: return #text;
        GMM_OP_LIST(GMM__X)
#undef GMM__X
    default: return "?";
    }
}

GMMDEF const char *gmm_engine_name(gmm_engine engine) {
    switch (engine) {
#define GMM__X(name, value, text) case name: return #text;
        GMM_ENGINE_LIST(GMM__X)
#undef GMM__X
    default: return "?";
    }
}

GMMDEF uint32_t gmm_version_number(void) { return (uint32_t)GMM_VERSION_NUMBER; }

GMMDEF const char *gmm_last_error(const gmm_context *ctx) { return ctx ? ctx->error.text : ""; }

static int32_t gmm__cpu_best_level(void) {
#ifdef GMM__X86
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f")) return 3;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return 2;
#endif
    return 1;
}

#ifdef __CUDACC__
/* Whether a device is there and runs this build's kernels. */
static gmm_status gmm__cuda_probe(const gmm_config *c, gmm__device *device, gmm_error *error) {
    struct cudaFuncAttributes attributes;
    int count = 0, major = 0, minor = 0, processors = 0, shared = 0;
    cudaError_t e = cudaGetDeviceCount(&count);
    if (e != cudaSuccess) {
        count = 0;
        (void)cudaGetLastError(); /* reported here, so it is not found again by the next call */
    }
    if (c->device < 0 || c->device >= count)
        return gmm__fail(error, GMM_E_DEVICE, "gmm_create: config.device: %d asked, %d CUDA device%s found%s%s",
                         (int)c->device, count, count == 1 ? "" : "s", e == cudaSuccess ? "" : ": ",
                         e == cudaSuccess ? "" : cudaGetErrorString(e));
    e = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, c->device);
    if (e == cudaSuccess) e = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, c->device);
    if (e == cudaSuccess) e = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, c->device);
    if (e == cudaSuccess) e = cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, c->device);
    if (e != cudaSuccess) return gmm__fail(error, GMM_E_CUDA, "gmm_create: %s", cudaGetErrorString(e));
    device->capability = (int32_t)(major * 10 + minor);
    device->processors = (int32_t)processors;
    device->shared = (int32_t)shared;
    if (device->capability < 80)
        return gmm__fail(error, GMM_E_DEVICE, "gmm_create: config.device: %d has compute capability %d.%d; the kernels "
                         "need 8.0", (int)c->device, major, minor);
    {
        int current = 0;
        e = cudaGetDevice(&current);
        if (e == cudaSuccess) e = cudaSetDevice(c->device);
        if (e == cudaSuccess) e = cudaFuncGetAttributes(&attributes, (const void *)gmm_copy_values);
        (void)cudaSetDevice(current);
        if (e != cudaSuccess) (void)cudaGetLastError();
    }
    if (e != cudaSuccess)
        return gmm__fail(error, GMM_E_BUILD, "gmm_create: config.device: %d has compute capability %d.%d, and this "
                         "build holds no kernel for it: %s", (int)c->device, major, minor, cudaGetErrorString(e));
    device->early = attributes.ptxVersion >= 90; /* kernels that were compiled for less cannot wait */
    return GMM_OK;
}
#endif

GMMDEF gmm_status gmm__create(gmm_context **out, const gmm_config *config, uint32_t version, gmm_error *error) {
    gmm_config c = GMM_ZERO;
    gmm_context *ctx;
    gmm__device device = GMM_ZERO;
    int32_t threads = 1;
    const int32_t level = gmm__cpu_best_level();

    if (!out) return gmm__fail(error, GMM_E_NULL, "gmm_create: out is NULL");
    *out = NULL;
    if (version != (uint32_t)GMM_VERSION_NUMBER)
        return gmm__fail(error, GMM_E_VERSION, "gmm_create: the caller's header is version %u, the implementation's %u",
                         version, (unsigned)GMM_VERSION_NUMBER);
    if (config && config->struct_size && config->struct_size < 2 * sizeof config->struct_size)
        return gmm__fail(error, GMM_E_ARG, "gmm_create: config: struct_size %u is too small for any version",
                         config->struct_size);
    if (config && !gmm__copy_sized(&c, sizeof c, config))
        return gmm__fail(error, GMM_E_VERSION, "gmm_create: config: struct_size %u is larger than the %u bytes of "
                         "version %s", config->struct_size, (unsigned)sizeof c, GMM_VERSION_STRING);
    if (c.space != GMM_SPACE_CPU && c.space != GMM_SPACE_CUDA)
        return gmm__fail(error, GMM_E_ARG, "gmm_create: config.space: %d is neither CPU (0) nor CUDA (1)",
                         (int)c.space);
#ifdef __CUDACC__
    if (c.space == GMM_SPACE_CUDA) {
        const gmm_status s = gmm__cuda_probe(&c, &device, error);
        if (s != GMM_OK) return s;
    }
#else
    if (c.space == GMM_SPACE_CUDA)
        return gmm__fail(error, GMM_E_BUILD, "gmm_create: config.space: CUDA %d asked, but this build holds the CPU "
                         "engine alone; compile the implementation with nvcc", (int)c.device);
#endif
    if (c.space == GMM_SPACE_CPU && c.device != 0)
        return gmm__fail(error, GMM_E_ARG, "gmm_create: config.device: %d must be 0 for the CPU", (int)c.device);
    if (c.engine < GMM_ENGINE_AUTO || c.engine > GMM_ENGINE_CUBLASLT)
        return gmm__fail(error, GMM_E_ARG, "gmm_create: config.engine: %d is no engine", (int)c.engine);
    if (c.engine != GMM_ENGINE_AUTO && (c.engine == GMM_ENGINE_CPU) != (c.space == GMM_SPACE_CPU))
        return gmm__fail(error, GMM_E_UNSUPPORTED, "gmm_create: config.engine: %s needs a %s context, space %d",
                         gmm_engine_name(c.engine), c.space == GMM_SPACE_CPU ? "GPU" : "CPU",
                         c.space == GMM_SPACE_CPU ? 1 : 0);
    if (c.threads < 0 || c.threads > 4096)
        return gmm__fail(error, GMM_E_ARG, "gmm_create: config.threads: %d must be 0 to 4096", (int)c.threads);
    if (c.cpu_level < 0 || c.cpu_level > 3)
        return gmm__fail(error, GMM_E_ARG, "gmm_create: config.cpu_level: %d must be 0 to 3", (int)c.cpu_level);
    if (c.cpu_level > level)
        return gmm__fail(error, GMM_E_DEVICE, "gmm_create: config.cpu_level: %d asked, this processor reaches %d",
                         (int)c.cpu_level, (int)level);
    if (!c.allocator.alloc != !c.allocator.release)
        return gmm__fail(error, GMM_E_ARG, "gmm_create: config.allocator: 1 of 2 functions is set; set both or none");
    if (c.log.level < GMM_LOG_NONE || c.log.level > GMM_LOG_TRACE)
        return gmm__fail(error, GMM_E_ARG, "gmm_create: config.log.level: %d must be 0 to 3", (int)c.log.level);

#ifdef _OPENMP
    threads = c.threads ? c.threads : (int32_t)omp_get_max_threads();
#endif
    ctx = (gmm_context *)(c.allocator.alloc ? c.allocator.alloc(c.allocator.user, sizeof *ctx)
                                            : GMM_MALLOC(sizeof *ctx));
    if (!ctx)
        return gmm__fail(error, GMM_E_MEMORY, "gmm_create: no memory for a context of %u bytes", (unsigned)sizeof *ctx);
    memset(ctx, 0, sizeof *ctx);
    ctx->config = c;
    ctx->threads = threads;
    ctx->cpu_level = c.cpu_level ? c.cpu_level : level;
    ctx->device = device;
#ifdef __CUDACC__
    if (c.space == GMM_SPACE_CUDA) gmm__wgmma_open(ctx);
#endif
#ifdef GMM__CUBLASLT
    if (c.space == GMM_SPACE_CUDA) gmm__lt_open(ctx);
#endif
    *out = ctx;
#ifdef __CUDACC__
    if (c.space == GMM_SPACE_CUDA)
        gmm__log(ctx, GMM_LOG_INFO, "gmm %s: CUDA device %d, compute capability %d.%d%s%s", GMM_VERSION_STRING,
                 (int)c.device, (int)device.capability / 10, (int)device.capability % 10,
                 ctx->wgmma_lacks ? "; wgmma " : ", wgmma",
                 ctx->wgmma_lacks ? ctx->wgmma_lacks : "");
#endif
    if (c.space == GMM_SPACE_CPU)
        gmm__log(ctx, GMM_LOG_INFO, "gmm %s: CPU engine, %d thread%s, %s", GMM_VERSION_STRING, (int)threads,
             threads == 1 ? "" : "s", ctx->cpu_level == 3 ? "AVX-512" : ctx->cpu_level == 2 ? "AVX2" : "plain C");
    return GMM_OK;
}

GMMDEF void gmm_destroy(gmm_context *ctx) {
    gmm_allocator a;
    if (!ctx) return;
#ifdef GMM__CUBLASLT
    gmm__lt_close(ctx);
#endif
    a = ctx->config.allocator;
    if (a.release) a.release(a.user, ctx);
    else GMM_FREE(ctx);
}

#undef GMM__X86
#undef GMM__CUBLASLT
#undef GMM__UNROLL

#ifdef __cplusplus
}
#endif
#endif /* GMM_IMPLEMENTATION */

