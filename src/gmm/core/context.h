/* Names of operations and engines, and the life of a context: checks of gmm_config, probes of processor and device,
   warnings about the build, creation and destruction. Ends the implementation of gmm.h. */

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

/* The highest gmm_config.cpu_level that this processor supports. */
static int32_t gmm__cpu_best_level(void) {
#ifdef GMM__X86
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f")) return 3;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return 2;
#endif
    return 1;
}

#ifdef __CUDACC__
/* Checks that a device exists and that this build holds kernels for it, and describes it in *device. */
static gmm_status gmm__cuda_probe(const gmm_config *c, gmm__device *device, gmm_error *error) {
    struct cudaFuncAttributes attributes;
    int count = 0, major = 0, minor = 0, processors = 0, shared = 0;
    cudaError_t e = cudaGetDeviceCount(&count);
    if (e != cudaSuccess) {
        count = 0;
        (void)cudaGetLastError(); /* clears the error, which the message below reports */
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
    device->capability = major * 10 + minor;
    device->processors = processors;
    device->shared = shared;
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
    device->pdl = attributes.ptxVersion >= 90; /* griddepcontrol needs kernels compiled for compute capability 9.0 */
    return GMM_OK;
}
#endif

/* Describes the build, without its device. */
static void gmm__describe_build(const gmm_config *c, gmm_build *build) {
    memset(build, 0, sizeof *build);
    build->space = c->space;
    build->threads = c->threads;
#if !(defined(__GNUC__) || defined(__clang__)) || (defined(__OPTIMIZE__) && !defined(__CUDACC_DEBUG__))
    build->optimised = 1;
#endif
#ifdef _OPENMP
    build->openmp = 1;
#elif defined(_SC_NPROCESSORS_ONLN)
    build->processors = (int32_t)sysconf(_SC_NPROCESSORS_ONLN);
#endif
}

GMMDEF const char *gmm_build_warning(const gmm_build *build, int32_t i) {
    const char *texts[3] = { NULL, NULL, NULL };
    int32_t count = 0;
    gmm_build b;
    if (!build || !gmm__copy_sized(&b, sizeof b, build)) return NULL;
    if (b.space == GMM_SPACE_CUDA && b.capability == 90 && gmm__wgmma_unavailable(&b))
        texts[count++] = b.sm90a ? "engine wgmma needs a driver with cuTensorMapEncodeTiled; engine mma serves its "
                                   "products, more slowly"
                                 : "engine wgmma is not in this build, and engine mma serves its products, more "
                                   "slowly: compile for sm_90a (-gencode arch=compute_90a,code=sm_90a)";
    if (!b.optimised)
        texts[count++] = "the implementation was compiled without optimisation: compile it with -O3, and without -G";
    if (b.space == GMM_SPACE_CPU && !b.openmp && b.processors > 4 && b.threads != 1)
        texts[count++] = "the implementation was compiled without OpenMP and uses one processor: compile it with "
                         "-fopenmp (nvcc: -Xcompiler=-fopenmp)";
    return i >= 0 && i < count ? texts[i] : NULL;
}

/* Checks that a context of this space can have this engine. */
static gmm_status gmm__check_engine(gmm_space space, gmm_engine engine, const char *field, gmm_error *error) {
    if (engine < GMM_ENGINE_AUTO || engine > GMM_ENGINE_CUBLASLT)
        return gmm__fail(error, GMM_E_ARG, "gmm_create: %s: %d is no engine", field, (int)engine);
    if (engine != GMM_ENGINE_AUTO && (engine == GMM_ENGINE_CPU) != (space == GMM_SPACE_CPU))
        return gmm__fail(error, GMM_E_UNSUPPORTED, "gmm_create: %s: %s needs a %s context, space %d", field,
                         gmm_engine_name(engine), space == GMM_SPACE_CPU ? "GPU" : "CPU",
                         space == GMM_SPACE_CPU ? 1 : 0);
    return GMM_OK;
}

#ifdef __CUDACC__
/* Opens the engines of a GPU context, and fails if the required one is missing. */
static gmm_status gmm__open_engines(gmm_context *ctx, gmm_build *build, gmm_error *error) {
    const gmm_engine engine = ctx->config.require_engine;
    const char *lacks = NULL;
    gmm_status status = GMM_E_DEVICE;
    build->capability = ctx->device.capability;
    gmm__wgmma_open(ctx, build);
    if (engine == GMM_ENGINE_WGMMA) {
        lacks = ctx->wgmma_unavailable;
        if (build->capability == 90 && !build->sm90a) status = GMM_E_BUILD;
    }
#ifdef GMM__CUBLASLT
    if ((engine == GMM_ENGINE_CUBLASLT || ctx->config.engine == GMM_ENGINE_CUBLASLT) && !gmm__lt_open(ctx) &&
        engine == GMM_ENGINE_CUBLASLT)
        lacks = "could not be opened on this device";
#else
    if (engine == GMM_ENGINE_CUBLASLT) {
        lacks = "is not in this build: compile without GMM_NO_CUBLASLT";
        status = GMM_E_BUILD;
    }
#endif
    if (!lacks) return GMM_OK;
    return gmm__fail(error, status, "gmm_create: config.require_engine: %s %s; device %d has compute capability %d.%d",
                     gmm_engine_name(engine), lacks, ctx->config.device, build->capability / 10,
                     build->capability % 10);
}
#endif

GMMDEF gmm_status gmm__create(gmm_context **out, const gmm_config *config, uint32_t version, gmm_error *error) {
    gmm_config c = GMM_ZERO;
    gmm_context *ctx;
    gmm__device device = GMM_ZERO;
    gmm_status s;
    char rule[96];
    int32_t threads = 1, i;
    const int32_t level = gmm__cpu_best_level();

    if (!out) return gmm__fail(error, GMM_E_NULL, "gmm_create: out is NULL");
    *out = NULL;
    if (version != (uint32_t)GMM_VERSION_NUMBER)
        return gmm__fail(error, GMM_E_VERSION, "gmm_create: the caller's header is version %u, the implementation's %u",
                         version, (unsigned)GMM_VERSION_NUMBER);
    if (config && (s = gmm__read_sized(&c, sizeof c, config, rule)) != GMM_OK)
        return gmm__fail(error, s, "gmm_create: config: %s", rule);
    if (c.space != GMM_SPACE_CPU && c.space != GMM_SPACE_CUDA)
        return gmm__fail(error, GMM_E_ARG, "gmm_create: config.space: %d is neither CPU (0) nor CUDA (1)",
                         (int)c.space);
#ifdef __CUDACC__
    if (c.space == GMM_SPACE_CUDA && (s = gmm__cuda_probe(&c, &device, error)) != GMM_OK) return s;
#else
    if (c.space == GMM_SPACE_CUDA)
        return gmm__fail(error, GMM_E_BUILD, "gmm_create: config.space: 1 (CUDA), config.device: %d, but this build "
                         "holds the CPU engine alone: compile the implementation with nvcc", c.device);
#endif
    if (c.space == GMM_SPACE_CPU && c.device != 0)
        return gmm__fail(error, GMM_E_ARG, "gmm_create: config.device: %d must be 0 for the CPU", c.device);
    if ((s = gmm__check_engine(c.space, c.engine, "config.engine", error)) != GMM_OK ||
        (s = gmm__check_engine(c.space, c.require_engine, "config.require_engine", error)) != GMM_OK)
        return s;
    if (c.threads < 0 || c.threads > 4096)
        return gmm__fail(error, GMM_E_ARG, "gmm_create: config.threads: %d must be 0 to 4096", c.threads);
    if (c.cpu_level < 0 || c.cpu_level > 3)
        return gmm__fail(error, GMM_E_ARG, "gmm_create: config.cpu_level: %d must be 0 to 3", c.cpu_level);
    if (c.cpu_level > level)
        return gmm__fail(error, GMM_E_DEVICE, "gmm_create: config.cpu_level: %d asked, this processor reaches %d",
                         c.cpu_level, (int)level);
    if (c.verify & ~1) return gmm__fail(error, GMM_E_ARG, "gmm_create: config.verify: %d must be 0 or 1", c.verify);
    if (!c.allocator.alloc != !c.allocator.release)
        return gmm__fail(error, GMM_E_ARG, "gmm_create: config.allocator: 1 of 2 functions is set; set both or none");
    if (c.log.level < GMM_LOG_NONE || c.log.level > GMM_LOG_TRACE)
        return gmm__fail(error, GMM_E_ARG, "gmm_create: config.log.level: %d must be 0 to 3", (int)c.log.level);

#ifdef _OPENMP
    threads = c.threads ? c.threads : omp_get_max_threads();
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
    gmm__describe_build(&c, &ctx->build);
#ifdef __CUDACC__
    if (c.space == GMM_SPACE_CUDA && (s = gmm__open_engines(ctx, &ctx->build, error)) != GMM_OK) {
        gmm_destroy(ctx);
        return s;
    }
#endif
    *out = ctx;
#ifdef __CUDACC__
    if (c.space == GMM_SPACE_CUDA)
        gmm__log(ctx, GMM_LOG_INFO, "gmm %s: CUDA device %d, compute capability %d.%d%s%s", GMM_VERSION_STRING,
                 c.device, device.capability / 10, device.capability % 10,
                 ctx->wgmma_unavailable ? "; wgmma " : ", wgmma",
                 ctx->wgmma_unavailable ? ctx->wgmma_unavailable : "");
#endif
    if (c.space == GMM_SPACE_CPU)
        gmm__log(ctx, GMM_LOG_INFO, "gmm %s: CPU engine, %d thread%s, %s", GMM_VERSION_STRING, threads,
                 threads == 1 ? "" : "s", ctx->cpu_level == 3 ? "AVX-512" : ctx->cpu_level == 2 ? "AVX2" : "plain C");
    for (i = 0; gmm_build_warning(&ctx->build, i); i++)
        gmm__log(ctx, GMM_LOG_WARN, "gmm %s: %s", GMM_VERSION_STRING, gmm_build_warning(&ctx->build, i));
    return GMM_OK;
}

GMMDEF gmm_status gmm_build_of(gmm_context *ctx, gmm_build *build) {
    gmm_build full;
    gmm_status s;
    char rule[96];
    if (!ctx) return GMM_E_NULL;
    if (!build) return gmm__fail(&ctx->error, GMM_E_NULL, "gmm_build_of: build is NULL");
    if ((s = gmm__check_size(build->struct_size, sizeof full, rule)) != GMM_OK)
        return gmm__fail(&ctx->error, s, "gmm_build_of: %s", rule);
    full = ctx->build;
    full.struct_size = build->struct_size;
    memcpy(build, &full, full.struct_size ? full.struct_size : sizeof full);
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

#endif /* GMM__HOLDS(0) */

#ifdef __cplusplus
}
#endif
#endif /* GMM_IMPLEMENTATION */

