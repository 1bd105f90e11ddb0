/* ------------------------------------------------------------------------------ 1 Version, context, errors --- */

typedef struct gmm_context gmm_context;
typedef struct CUstream_st *gmm_stream; /* a cudaStream_t */

typedef enum gmm_space { GMM_SPACE_CPU = 0, GMM_SPACE_CUDA = 1, GMM_SPACE_MAX = 0x7fffffff } gmm_space;

/* Rows of the engine table. X(name, value, lower-case name) */
#define GMM_ENGINE_LIST(X) \
    X(GMM_ENGINE_AUTO, 0, auto) \
    X(GMM_ENGINE_CPU, 1, cpu) \
    X(GMM_ENGINE_MMA, 2, mma) \
    X(GMM_ENGINE_WGMMA, 3, wgmma) \
    X(GMM_ENGINE_CUBLASLT, 4, cublaslt)

typedef enum gmm_engine {
#define GMM__X(name, value, text) name = value,
    GMM_ENGINE_LIST(GMM__X)
#undef GMM__X
    GMM_ENGINE_MAX = 0x7fffffff
} gmm_engine;

/* Host memory of contexts. Either both functions are set, or none. `alloc` returns memory aligned for any type. */
typedef struct gmm_allocator {
    void *user;
    void *(*alloc)(void *user, size_t bytes);
    void (*release)(void *user, void *memory);
} gmm_allocator;

typedef enum gmm_log_level {
    GMM_LOG_NONE = 0,
    GMM_LOG_WARN = 1,  /* contexts: what their build lacks for the speed of their machine (gmm_build_warning) */
    GMM_LOG_INFO = 2,  /* contexts: what they run on */
    GMM_LOG_TRACE = 3, /* every operation: the engine that serves it, and why others declined */
    GMM_LOG_LEVEL_MAX = 0x7fffffff
} gmm_log_level;

/* Called on the calling thread, for messages of `level` and below. `message` lives until the return. */
typedef struct gmm_log {
    void *user;
    gmm_log_level level;
    void (*write)(void *user, gmm_log_level level, const char *message);
} gmm_log;

typedef struct gmm_config {
    uint32_t struct_size;
    gmm_space space;
    int32_t device;        /* CUDA ordinal; 0 for the CPU */
    int32_t threads;       /* CPU engine: the most that a call takes, and workspace is for; small calls take fewer, with
                              the same bits. 0 = as many as OpenMP gives; without OpenMP 1 is used */
    gmm_engine engine;     /* default of gmm_options.engine for this context */
    int32_t cpu_level;     /* CPU engine: 0 = best vector code that the processor has; 1 plain, 2 AVX2, 3 AVX-512 */
    gmm_allocator allocator;
    gmm_log log;
    gmm_engine require_engine; /* gmm_create fails where the context would not have it; AUTO: none is required */
} gmm_config;

/* Makes a context. `config` may be NULL: the CPU with all defaults. *out is NULL after a failure.
   Stream, graph: creates nothing on a stream; not while capturing.
   Errors: GMM_E_NULL (out), GMM_E_VERSION (header versions mixed), GMM_E_ARG (field out of range), GMM_E_BUILD (a GPU
       asked of a unit that a C compiler built, or of a build without kernels for it; a required engine that is not in
       this build), GMM_E_DEVICE (no such device, or too old; no device for a required engine), GMM_E_UNSUPPORTED (an
       engine of the other space), GMM_E_MEMORY, GMM_E_CUDA. */
GMMDEF gmm_status gmm__create(gmm_context **out, const gmm_config *config, uint32_t version, gmm_error *error);
static inline gmm_status gmm_create(gmm_context **out, const gmm_config *config, gmm_error *error) {
    return gmm__create(out, config, (uint32_t)GMM_VERSION_NUMBER, error);
}

/* How an implementation was built, and what a context of it runs on. */
typedef struct gmm_build {
    uint32_t struct_size;
    gmm_space space;
    int32_t optimised;   /* 1: by the compiler of the host, and nvcc was not told -G */
    int32_t openmp;      /* 1: with OpenMP */
    int32_t threads;     /* gmm_config.threads */
    int32_t processors;  /* of the host that are online; 0 = unknown */
    int32_t capability;  /* GPU: 90 for compute capability 9.0 */
    int32_t sm90a;       /* GPU: 1: kernels for sm_90a are in the build */
    int32_t tensor_maps; /* GPU: 1: the driver has cuTensorMapEncodeTiled */
} gmm_build;

/* What makes contexts of such a build slower than their machine: text `i` from 0, which says what to compile with; NULL
   from the first `i` on that there is nothing to say for. gmm_create writes each once to the log at GMM_LOG_WARN:
       a GPU of compute capability 9.0 without the engine WGMMA
       an implementation compiled without optimisation, where the compiler tells (gcc, clang, nvcc)
       a CPU context without OpenMP on more than four processors, unless gmm_config.threads is 1
   Pure. Errors: none; NULL or a struct_size of another version gives NULL. */
GMMDEF const char *gmm_build_warning(const gmm_build *build, int32_t i);

/* Frees a context; NULL is allowed. Work that it enqueued may still run.
   Stream, graph: a GPU context's destruction may wait for the device (cuBLASLt). Errors: none. */
GMMDEF void gmm_destroy(gmm_context *ctx);

/* What the last failing call on this context said; "" before any. Lives until the next failing call. A field is named
   behind the descriptor's name in the declaration: "gmm_linear_wgrad: linear.dw is NULL: linear_wgrad needs a
   destination (G=4 T=29 K=17 N=23)".
   Stream, graph: no effect on either. Errors: none; ctx NULL gives "". */
GMMDEF const char *gmm_last_error(const gmm_context *ctx);

/* GMM_VERSION_NUMBER of the implementation that was linked. */
GMMDEF uint32_t gmm_version_number(void);

