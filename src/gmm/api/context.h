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
    GMM_LOG_WARN = 1,  /* gmm_create: why the build is slower than the machine allows (gmm_build_warning). An MLP or a
                          layer, once per context: delayed scaling without gmm_mlp_quant.scale */
    GMM_LOG_INFO = 2,  /* gmm_create: the device or processor that the context uses */
    GMM_LOG_TRACE = 3, /* every operation: the engine that serves it, and why others declined */
    GMM_LOG_LEVEL_MAX = 0x7fffffff
} gmm_log_level;

/* `write` is called on the calling thread for messages of `level` and below. `message` is valid until it returns. */
typedef struct gmm_log {
    void *user;
    gmm_log_level level;
    void (*write)(void *user, gmm_log_level level, const char *message);
} gmm_log;

typedef struct gmm_config {
    uint32_t struct_size;
    gmm_space space;
    int32_t device;        /* CUDA ordinal; 0 for the CPU */
    int32_t threads;       /* CPU engine: maximum threads of a call, for which workspaces are sized; small calls use
                              fewer, with the same bits. 0 = OpenMP's maximum; at most 4096. Without OpenMP calls
                              use one thread */
    gmm_engine engine;     /* default of gmm_options.engine for this context */
    int32_t cpu_level;     /* CPU engine: vector instructions: 0 = the best of the processor; 1 none, 2 AVX2, 3
                              AVX-512 */
    gmm_allocator allocator;
    gmm_log log;
    gmm_engine require_engine; /* gmm_create fails unless the context has this engine; AUTO: none is required */
    int32_t verify;            /* 1, for debugging: a call waits for its stream, and refuses what would set a fault
                                  bit: a faulty split or broken row_align promise (GMM_E_SPLIT), an index of permute
                                  or of gathered rows out of range (GMM_E_ARG), a weight's address that WGMMA cannot
                                  read (GMM_E_ALIGN); not rows that exceed a capacity of gmm_pad or gmm_permute_map,
                                  which are dropped. A GPU context waits again behind the launch: an error of the
                                  device is GMM_E_CUDA of the call that caused it. No effect while capturing */
} gmm_config;

/* Makes a context. `config` may be NULL: the CPU with all defaults. *out is NULL after a failure.
   Stream, graph: creates nothing on a stream; not while this thread captures. Captures of other threads go on, unless
       config.engine or require_engine is CUBLASLT: such a context opens cuBLASLt, and gmm_destroy closes it. Both wait
       for the device, which ends captures of all threads.
   Errors: GMM_E_NULL (out), GMM_E_VERSION (the caller's header and the implementation differ in version; a larger
       struct_size), GMM_E_ARG (field out of range), GMM_E_BUILD (CUDA in an implementation that a C compiler built, or
       that has no kernels for the device; a required engine that is not in this build), GMM_E_DEVICE (no such device, a
       device below compute capability 8.0, or one that the required engine does not run on; a cpu_level that the
       processor lacks), GMM_E_UNSUPPORTED (an engine of the other space), GMM_E_MEMORY, GMM_E_CUDA. */
GMMDEF gmm_status gmm__create(gmm_context **out, const gmm_config *config, uint32_t version, gmm_error *error);
static inline gmm_status gmm_create(gmm_context **out, const gmm_config *config, gmm_error *error) {
    return gmm__create(out, config, (uint32_t)GMM_VERSION_NUMBER, error);
}

/* How an implementation was built, and what a context of it runs on. */
typedef struct gmm_build {
    uint32_t struct_size;
    gmm_space space;
    int32_t optimised;   /* 1: the host compiler optimised, and nvcc compiled without -G */
    int32_t openmp;      /* 1: with OpenMP */
    int32_t threads;     /* gmm_config.threads */
    int32_t processors;  /* online processors of the host; 0 = unknown, or with OpenMP */
    int32_t capability;  /* GPU: 90 for compute capability 9.0 */
    int32_t sm90a;       /* GPU: 1: kernels for sm_90a are in the build */
    int32_t tensor_maps; /* GPU: 1: the driver has cuTensorMapEncodeTiled */
} gmm_build;

/* Describes the build of the implementation, and what the context runs on.  Stream, graph: none.
   Errors: GMM_E_NULL, GMM_E_VERSION, GMM_E_ARG (struct_size). */
GMMDEF gmm_status gmm_build_of(gmm_context *ctx, gmm_build *build);

/* Warning `i`, counted from 0, about a build that is slower than its machine allows, with the compiler options that
   remedy it; NULL past the last warning. gmm_create writes each once to the log at GMM_LOG_WARN. There is one for
       a GPU of compute capability 9.0 without the engine WGMMA
       an implementation compiled without optimisation, where the compiler reports it (gcc, clang, nvcc)
       a CPU context without OpenMP on more than four processors, unless gmm_config.threads is 1
   Pure. Errors: none; NULL or a larger struct_size gives NULL. */
GMMDEF const char *gmm_build_warning(const gmm_build *build, int32_t i);

/* Frees a context; NULL is allowed. Work that it enqueued may still run.
   Stream, graph: a context in which CUBLASLT is open waits for the device, which invalidates captures that are under
       way in any thread of the process. Other contexts disturb no capture. Errors: none. */
GMMDEF void gmm_destroy(gmm_context *ctx);

/* Message of the last failed call on this context; "" before any. Valid until the next failed call. Fields are named
   as members of the function's parameter: "gmm_linear_wgrad: linear.dw is NULL: linear_wgrad needs a destination (G=4
   T=29 K=17 N=23)".
   Stream, graph: no effect on either. Errors: none; ctx NULL gives "". */
GMMDEF const char *gmm_last_error(const gmm_context *ctx);

/* GMM_VERSION_NUMBER of the implementation that was linked. */
GMMDEF uint32_t gmm_version_number(void);

