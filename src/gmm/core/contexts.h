/* ......................................................................................... 14.1 Context, checks ... */

/* Contexts, and what else every unit of a split implementation reads. */

enum { GMM__WORKSPACE_ALIGN = 256 }; /* bytes: of the workspace, and of each region in it */

#ifdef GMM__CUBLASLT
/* CUBLASLT engine: cuBLASLt's handle, and a cache of algorithms, indexed by a hash of the key that determines them. */
enum { GMM__LT_KEY = 10, GMM__LT_CACHE = 128 };
typedef struct gmm__lt_choice {
    int64_t key[GMM__LT_KEY];
    cublasLtMatmulAlgo_t algo;
} gmm__lt_choice;
typedef struct gmm__lt {
    cublasLtHandle_t handle;
    gmm__lt_choice cache[GMM__LT_CACHE];
} gmm__lt;
#endif

/* The device of a CUDA context; zeros in a CPU context. */
typedef struct gmm__device {
    int32_t capability; /* 90 for compute capability 9.0 */
    int32_t pdl;        /* programmatic dependent launch: kernels may start before their predecessor has ended */
    int32_t processors, shared; /* multiprocessors; maximum bytes of shared memory of a block */
} gmm__device;

struct gmm_context {
    gmm_config config;
    gmm_error error;
    int32_t threads;   /* CPU engine: number of threads */
    int32_t cpu_level; /* CPU engine: 1 plain C, 2 AVX2, 3 AVX-512 */
    int32_t warned_without_scales; /* 1: gmm__mlp_warn_without_scales has written its line */
    gmm__device device;
    gmm_build build;
#ifdef __CUDACC__
    PFN_cuTensorMapEncodeTiled_v12000 wgmma_encode; /* WGMMA engine: the driver's function that makes tensor maps */
    const char *wgmma_unavailable; /* the reason why the engine declines every call; NULL = it is available */
#endif
#ifdef GMM__CUBLASLT
    gmm__lt lt;
#endif
};

/* Rounds bytes up to the alignment of workspace regions. */
static GMM__UNUSED size_t gmm__round256(size_t bytes) {
    return (bytes + GMM__WORKSPACE_ALIGN - 1) / GMM__WORKSPACE_ALIGN * GMM__WORKSPACE_ALIGN;
}

/* Sets of dtypes that an operand may have. */
enum {
    GMM__FLOATS = 1 << GMM_F32 | 1 << GMM_F16 | 1 << GMM_BF16,
    GMM__BYTES = GMM__FLOATS | 1 << GMM_E4M3 | 1 << GMM_E5M2 | 1 << GMM_E8M0 | 1 << GMM_U8 | 1 << GMM_I32 |
                 1 << GMM_I64 | 1 << GMM_F64
};

#ifdef __CUDACC__
/* Makes the context's device current; *current is the device that gmm__cuda_restore makes current again. */
static GMM__UNUSED cudaError_t gmm__cuda_enter(const void *self, int *current) {
    const gmm_context *ctx = (const gmm_context *)self;
    cudaError_t e;
    *current = ctx->config.device;
    e = cudaGetDevice(current);
    return e == cudaSuccess && *current != ctx->config.device ? cudaSetDevice(ctx->config.device) : e;
}
static GMM__UNUSED void gmm__cuda_restore(const gmm_context *ctx, int current) {
    if (current != ctx->config.device) (void)cudaSetDevice(current);
}
/* The same for a function of the runtime table, which returns e as a status. */
static GMM__UNUSED gmm_status gmm__cuda_leave(void *self, const char *function, int current, cudaError_t e) {
    gmm_context *ctx = (gmm_context *)self;
    gmm__cuda_restore(ctx, current);
    if (e == cudaSuccess) return GMM_OK;
    (void)cudaGetLastError();
    return gmm__fail(&ctx->error, GMM_E_CUDA, "gmm_runtime.%s: %s", function, cudaGetErrorString(e));
}
#endif

