/* gmm.h - v0.1.0 - the experts of mixture-of-experts models: grouped linear, expert MLP, routing, on GPU and CPU - MIT
 * SPDX-License-Identifier: MIT
 *
 * Quick start (C11 or C++17; a .c unit holds the CPU engine, a .cu unit the CUDA engines too):
 *
 *     #define GMM_IMPLEMENTATION          // in exactly one .c or .cu file of the program
 *     #include "gmm.h"
 *
 *     gmm_context *ctx;                                         // y[r] = w[group of r] x[r]
 *     gmm_create(&ctx, NULL, NULL);                             // NULL: the CPU
 *     uint32_t fault = 0;                                       // what is wrong with the counts, as GMM_FAULT_* bits
 *     gmm_groups groups = GMM_ZERO;                             // 4 experts, their token counts in memory
 *     groups.count = 4; groups.capacity = 1024; groups.splits = counts; groups.dtype = GMM_I32; groups.fault = &fault;
 *     gmm_mat x = gmm_mat_packed(GMM_BF16, xs), w = gmm_mat_packed(GMM_BF16, ws), y = gmm_mat_packed(GMM_BF16, ys);
 *     gmm_linear lin = GMM_ZERO;
 *     lin.groups = &groups; lin.in_features = 512; lin.out_features = 2048; lin.x = &x; lin.w = &w; lin.y = &y;
 *     gmm_info info = GMM_ZERO;
 *     gmm_linear_query(ctx, GMM_OP_LINEAR_FWD, &lin, &info);    // info.workspace_bytes
 *     if (gmm_linear_fwd(ctx, &lin, workspace, info.workspace_bytes, NULL) != GMM_OK) puts(gmm_last_error(ctx));
 *     if (fault) puts("counts are negative, or exceed the capacity");
 *
 * CONTENTS
 *     1  Version, context, errors      6  Weight-gradient decisions     11  Quantization
 *     2  Operations, options, queries  7  Routing                       12  Runtime
 *     3  Grouped linear                8  Permute, unpermute, layer     13  Checkpoints
 *     4  Activation                    9  Pad, GLU interleave           14  Implementation
 *     5  Expert MLP                   10  Small operations              15  Implementation: checkpoints
 *                                                                       16  Licence
 *
 * CONFIGURATION (beside gmm_quant.h's; define where GMM_IMPLEMENTATION is)
 *     GMM_NO_CUBLASLT        under nvcc: leaves out the CUBLASLT engine, so that nothing links with -lcublasLt
 *     GMM_WITH_NVTX          an NVTX range, named by operation, engine and shapes, around what each call enqueues (an
 *                            MLP's has those of its steps inside); needs nvtx3/nvToolsExt.h of the CUDA toolkit
 *     GMM_MALLOC, GMM_FREE   host allocation of contexts where gmm_config has no allocator; both or none; default
 *                            malloc and free. Signatures: void *GMM_MALLOC(size_t), void GMM_FREE(void *)
 *
 * CONTRACTS OF EVERY OPERATION
 *     Shapes      Matrices are row-major. T is the capacity (rows of activation buffers), G the number of groups, K and
 *                 N the in and out features. A group has any number of rows >= 0; G, K and N are what the engine takes
 *                 (GPUs: below about 2^31).
 *     Splits      Group sizes may be in device memory. The host does not read them there, so that a captured graph can
 *                 be replayed with other sizes. Rows past their sum never influence a result and are kept or zeroed
 *                 (gmm_tail).
 *     Arithmetic  fp32 accumulation and one rounding at the store; bias, activation and probabilities in fp32.
 *     Order       The order in which an output element accumulates depends only on operation, dtypes, N, K and its own
 *                 group's rows: results are bitwise equal from run to run, for any thread count, and equal to the call
 *                 with that group alone. Different machines and engines may differ in the last bits. A query reports
 *                 the engine that serves a call.
 *     Memory      All memory is the caller's; operations allocate nothing. A query reports the bytes of the workspace,
 *                 which is aligned to 256 bytes. Its contents are undefined before and after a call, and calls ordered
 *                 on one stream may share it.
 *     Overlap     Unless a function allows it, memory that a call writes (outputs, workspace, fault word) shares no
 *                 byte with other memory that it reads or writes (operands at full capacity, splits, arrays, pointer
 *                 tables), and the matrices of one output share no byte with one another. Bytes between the rows of a
 *                 matrix are not part of it: x and y may be the columns [0, K) and [K, 2K) of one buffer with ld 2K.
 *                 An overlap of addresses that the host can read is GMM_E_ARG before anything is written. Addresses in
 *                 tables in device memory are not checked.
 *     Stream      The last argument. GPU contexts enqueue on it and return; every call can be captured in a CUDA graph.
 *                 CPU contexts take NULL and have completed the work on return.
 *     Errors      Everything that the host can check is checked before anything is launched or written. On failure a
 *                 status is returned, and gmm_last_error(ctx) names function, argument, value, rule and shapes. Faulty
 *                 values in device memory set bits in gmm_groups.fault, and the call stays within bounds; a CPU context
 *                 does the same where it is given a fault word, and otherwise refuses a faulty split: GMM_E_SPLIT.
 *     Threads     A context serves one thread at a time; contexts are independent and cheap. No global state.
 *
 * REVISIONS (full list: CHANGELOG.md)
 *     0.1.0  first version
 */
#ifndef GMM_MOE_GMM_H_INCLUDED
#define GMM_MOE_GMM_H_INCLUDED

#include "gmm_quant.h"

GMM_QUIET_BEGIN
#ifdef __cplusplus
extern "C" {
#endif

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
                              fewer, with the same bits. 0 = OpenMP's maximum. Without OpenMP calls use one thread */
    gmm_engine engine;     /* default of gmm_options.engine for this context */
    int32_t cpu_level;     /* CPU engine: vector instructions: 0 = the best of the processor; 1 none, 2 AVX2, 3
                              AVX-512 */
    gmm_allocator allocator;
    gmm_log log;
    gmm_engine require_engine; /* gmm_create fails unless the context has this engine; AUTO: none is required */
    int32_t verify;            /* 1, for debugging: a call waits for its stream, and refuses what would set a fault
                                  bit: a faulty split or broken row_align promise (GMM_E_SPLIT), an index of permute
                                  or of gathered rows out of range (GMM_E_ARG), a weight's address that WGMMA cannot
                                  read (GMM_E_ALIGN). A GPU context waits again behind the launch: an error of the
                                  device is GMM_E_CUDA of the call that caused it. No effect while capturing */
} gmm_config;

/* Makes a context. `config` may be NULL: the CPU with all defaults. *out is NULL after a failure.
   Stream, graph: creates nothing on a stream; not while this thread captures. Captures of other threads go on, unless
       config.engine or require_engine is CUBLASLT, which alone open cuBLASLt. To open and to close it waits for the
       device, which ends captures of all threads.
   Errors: GMM_E_NULL (out), GMM_E_VERSION (the caller's header and the implementation differ in version), GMM_E_ARG
       (field out of range), GMM_E_BUILD (CUDA in an implementation that a C compiler built, or that has no kernels for
       the device; a required engine that is not in this build), GMM_E_DEVICE (no such device, a device below compute
       capability 8.0, or one that the required engine does not run on), GMM_E_UNSUPPORTED (an engine of the other
       space), GMM_E_MEMORY, GMM_E_CUDA. */
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
    int32_t processors;  /* online processors of the host; 0 = unknown */
    int32_t capability;  /* GPU: 90 for compute capability 9.0 */
    int32_t sm90a;       /* GPU: 1: kernels for sm_90a are in the build */
    int32_t tensor_maps; /* GPU: 1: the driver has cuTensorMapEncodeTiled */
} gmm_build;

/* Warning `i`, counted from 0, about a build that is slower than its machine allows, with the compiler options that
   remedy it; NULL past the last warning. gmm_create writes each once to the log at GMM_LOG_WARN. There is one for
       a GPU of compute capability 9.0 without the engine WGMMA
       an implementation compiled without optimisation, where the compiler reports it (gcc, clang, nvcc)
       a CPU context without OpenMP on more than four processors, unless gmm_config.threads is 1
   Pure. Errors: none; NULL or a struct_size of another version gives NULL. */
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

/* ------------------------------------------------------------------------- 2 Operations, options, queries --- */

/* Every operation that an engine can serve. X(name, lower-case name); the order is that of the engine table. */
#define GMM_OP_LIST(X) \
    X(GMM_OP_QUANTIZE, quantize) \
    X(GMM_OP_DEQUANTIZE, dequantize) \
    X(GMM_OP_REQUANTIZE, requantize) \
    X(GMM_OP_SCALE_UPDATE, scale_update) \
    X(GMM_OP_TRANSPOSE, transpose) \
    X(GMM_OP_SHARD_CAST, shard_cast) \
    X(GMM_OP_OFFSETS, offsets) \
    X(GMM_OP_LINEAR_FWD, linear_fwd) \
    X(GMM_OP_LINEAR_DGRAD, linear_dgrad) \
    X(GMM_OP_LINEAR_WGRAD, linear_wgrad) \
    X(GMM_OP_LINEAR_BGRAD, linear_bgrad) \
    X(GMM_OP_ACT_FWD, act_fwd) \
    X(GMM_OP_ACT_BWD, act_bwd) \
    X(GMM_OP_MLP_FWD, mlp_fwd) \
    X(GMM_OP_MLP_BWD, mlp_bwd) \
    X(GMM_OP_MLP_WGRAD, mlp_wgrad) \
    X(GMM_OP_MOE_FWD, moe_fwd) \
    X(GMM_OP_MOE_BWD, moe_bwd) \
    X(GMM_OP_TOPK_FWD, topk_fwd) \
    X(GMM_OP_TOPK_BWD, topk_bwd) \
    X(GMM_OP_ROUTE_FROM_DENSE, route_from_dense) \
    X(GMM_OP_ROUTE_TO_DENSE, route_to_dense) \
    X(GMM_OP_EXPERT_BIAS, expert_bias) \
    X(GMM_OP_PERMUTE_MAP, permute_map) \
    X(GMM_OP_PERMUTE_FWD, permute_fwd) \
    X(GMM_OP_PERMUTE_BWD, permute_bwd) \
    X(GMM_OP_UNPERMUTE_FWD, unpermute_fwd) \
    X(GMM_OP_UNPERMUTE_BWD, unpermute_bwd) \
    X(GMM_OP_PAD, pad) \
    X(GMM_OP_UNPAD, unpad) \
    X(GMM_OP_GLU_INTERLEAVE, glu_interleave) \
    X(GMM_OP_ACCUMULATE, accumulate) \
    X(GMM_OP_CONVERT, convert)

typedef enum gmm_op {
#define GMM__X(name, text) name,
    GMM_OP_LIST(GMM__X)
#undef GMM__X
    GMM_OP_COUNT,
    GMM_OP_MAX = 0x7fffffff
} gmm_op;

/* Lower-case name of an operation or engine, "?" if unknown. Pure. */
GMMDEF const char *gmm_op_name(gmm_op op);
GMMDEF const char *gmm_engine_name(gmm_engine engine);

/* Whether an MLP's forward, also within a layer, computes the activation in FC1's product, from its rounded results.
   AUTO: where the plan's cost model expects that to be faster. Results have the bits of two launches. WGMMA has it for
   F16 and BF16 without a recipe, gated activations, ffn a multiple of 64, and interleave 0, 8, 16, 32 or a multiple of
   64. */
typedef enum gmm_fuse {
    GMM_FUSE_AUTO = 0,
    GMM_FUSE_NEVER = 1,
    GMM_FUSE_ALWAYS = 2,     /* GMM_E_UNSUPPORTED, with the reason, where no engine that the call may use has it */
    GMM_FUSE_MAX = 0x7fffffff
} gmm_fuse;

/* How a call is carried out. Descriptors point to it; NULL means all defaults. */
typedef struct gmm_options {
    uint32_t struct_size;
    gmm_engine engine;           /* AUTO: the context's default, else the first engine that can serve the call */
    int32_t sm_limit;            /* GPU: maximum number of multiprocessors, 0 = all. Never changes results */
    int32_t allow_nondeterminism;/* 0 or 1; every engine is deterministic with either */
    int32_t allow_tf32;          /* 1: CUBLASLT may multiply F32 as TF32 */
    int32_t fp8_fast_accum;      /* 1: WGMMA may skip promotion in fwd and dgrad where scales are by tensor or row.
                                    Changes results */
    int32_t tile;                /* WGMMA, for measurements: 1, 2, ... demands that tile of those which can serve the
                                    product; where the last two differ only in their use by the split, their number
                                    stands for both. 0 or a higher number: the tile expected to be fastest. Never
                                    changes results */
    int64_t workspace_limit;     /* bytes: WGMMA declines a product of MX32 or NV16 operands whose workspace, in which
                                    it converts them, is larger; AUTO then takes MMA. GPU engines copy no gathered
                                    rows to a larger workspace: forward and dgrad of WGMMA gather them without, other
                                    products are refused. 0 = no limit. Never changes results */
    gmm_fuse fuse;               /* mlp_fwd, moe_fwd */
    int32_t reserved;            /* 0 */
} gmm_options;

/* The result of a query. */
typedef struct gmm_info {
    uint32_t struct_size;
    gmm_engine engine;       /* serves the call. An address that the query leaves NULL is assumed to be a multiple of 16
                                bytes; where the engine depends on that, the note says so. A call with other addresses
                                is then served by another engine under AUTO, in at most workspace_bytes, and refused
                                where the engine was demanded or no other has the operation */
    size_t workspace_bytes;
    size_t saved_bytes;      /* MLP, layer: gmm_mlp.saved, gmm_moe.saved */
    size_t deferred_bytes;   /* MLP, layer: gmm_mlp.deferred, gmm_moe.deferred */
    int32_t in_align;        /* in and out features (MLP, layer: hidden, ffn and hidden_out) must be multiples of these;
                                1 unless operands are quantized */
    int32_t out_align;
    char note[192];          /* how the engine serves the call, on what that depends, and why preferred ones declined */
    size_t weight_cache_bytes; /* MLP, layer: gmm_mlp_quant.weight_cache; 0 where it caches nothing */
} gmm_info;

/* Writes how a call would be served, as text: lines that begin with the operation and say engine, kernel of a product,
   workspace, the note of gmm_info, and shapes. The first line is the call itself; below an MLP's or a layer's there is
   an indented one for each step that it is composed of, and below a layer's MLP those of the MLP. `descriptor` is what
   the query of `op` takes, and is read as there: a gmm_linear for GMM_OP_LINEAR_FWD. Operations that have no query have
   no description (GMM_E_ARG).
   At most `bytes` are written, the terminating NUL included; text that does not fit is cut off.
   Stream, graph: no effect on either. Errors: those of the query; GMM_E_NULL (text, or no bytes). */
GMMDEF gmm_status gmm_describe(gmm_context *ctx, gmm_op op, const void *descriptor, char *text, size_t bytes);

/* offsets[g] = first row of group g, offsets[G] = number of live rows, clamped as gmm_groups describes.
   Shapes: offsets [G + 1] int64, context memory.
   Stream, graph: enqueued; capturable. Errors: GMM_E_NULL, GMM_E_ARG, GMM_E_ALIGN, GMM_E_DTYPE, GMM_E_SPLIT,
       GMM_E_VERSION, GMM_E_UNSUPPORTED, GMM_E_CAPTURE (host splits), GMM_E_CUDA. */
GMMDEF gmm_status gmm_offsets(gmm_context *ctx, const gmm_groups *groups, int64_t *offsets, gmm_stream stream);

/* ------------------------------------------------------------------------------------------ 3 Grouped linear --- */

/* Destination of the gradient of a weight or bias. A NULL descriptor: the gradient is not wanted and not computed.
   main_grad 0 stores the gradient. main_grad 1 adds it, unless overwrite is 1. See gmm_wgrad_decide.
   An empty group stores zeros; where it would add, it keeps the destination's bits. */
typedef struct gmm_grad {
    uint32_t struct_size;
    int32_t main_grad;
    int32_t overwrite;
    int32_t reserved;      /* 0 */
    const gmm_mat *mat;    /* F32, BF16 or F16, per group; packed or table */
    const float *beta;     /* [G] context memory: dst = grad + beta dst per group, whatever main_grad and overwrite are.
                              0 does not read dst; 1 adds (an empty group keeps the bits). NULL = by main_grad and
                              overwrite */
    const uint8_t *frozen; /* [G] context memory: nonzero = the group's gradient is not computed, and dst keeps it */
} gmm_grad;

/* A grouped linear layer: y[r] = p_r (alpha_g w_g x[r] + bias_g s_r) for every row r of group g.
   Shapes: x, dx [T, K]; y, dy [T, N]; w, dw [G][N, K]; bias, db [G][N]; bias_scale s, d_bias_scale, prob p [T].
   Gathered rows: with x_index, x is [index_rows, K], and its row x_index[r] / index_div (rounded down) stands for x[r];
       dy_index does the same for dy. A negative entry stands for a row of zeros; so does an entry past index_rows,
       which also sets GMM_FAULT_INDEX in groups.fault. gmm_permute.slot_of with index_div = topk takes rows from tokens
       that were not permuted, with the bits of permuted copies. Gathered operands are floats. GPU engines copy the rows
       to the workspace first; in forward and dgrad WGMMA does not where its kernels gather them faster, or where
       options.workspace_limit forbids it. Whether an index is NULL tells a query whether rows are gathered.
   dtypes: x and w share F32, F16 or BF16, and so do dy and w, dy and x. y, dx, bias and gradients are F32, F16 or BF16.
   Quantized operands (bgrad takes none): each product reads the copies whose blocks run along its contraction: fwd x
       and w, dgrad dy and w.columnwise, wgrad x.columnwise and dy.columnwise (wgrad reads no other field of x and dy).
       TENSOR and ROW multiply one another; 1X128 multiplies 1X128 and 128X128; MX32 multiplies MX32, and NV16 NV16; a w
       of MX32 or NV16 also multiplies floats. An element of MX32 or NV16 is the exact product of code and scale; MX32
       is Inf from 2^128 on (on GPUs it is BF16, to whose grid values below 2^-126 are rounded). fp32 scales of blocks
       multiply the sum of each 128 elements along the contraction, other scales the whole sum. K and N must be
       multiples of gmm_info.in_align and out_align.
       Range: where the result is finite and normal, scales may be any finite numbers, whatever their products with one
       another and with alpha are, with two exceptions: the product of the scales of a block of x or dy and a block of
       w (wgrad: of dy and x) must be a normal number; and for two ROW operands on WGMMA the token scales (wgrad: those
       of dy) must be between 2^-90 and 2^70, and the other scales times alpha normal. CUBLASLT multiplies in the
       library's order.
   Batch invariance: on one engine a row of y or dx has the same bits however many rows its group has, and wherever it
   stands among them. Where a recipe scales a tensor as a whole, that holds for equal codes and scales.
   Aliasing: none.  Alignment: each base to its element; stores are faster to multiples of 16 bytes. The engine WGMMA
   needs every matrix and row of x, w and dy at multiples of 16 bytes; another engine serves operands that are not.
   Addresses of weights in tables in device memory, which the host cannot see, must be multiples of 16 bytes under WGMMA
   (else GMM_FAULT_ADDRESS). */
typedef struct gmm_linear {
    uint32_t struct_size;
    int32_t alpha_per_group; /* 1: alpha is [G], else [1] */
    int64_t in_features;     /* K >= 1 */
    int64_t out_features;    /* N >= 1 */
    const gmm_groups *groups;
    const gmm_options *options;
    const gmm_mat *x;
    const gmm_mat *w;
    const gmm_mat *bias;     /* NULL = none */
    const float *bias_scale;  /* fp32, context memory; NULL = ones */
    const float *alpha;      /* fp32, context memory; NULL = 1 */
    const gmm_mat *y;
    const gmm_mat *dy;
    const gmm_mat *dx;
    const gmm_grad *dw;
    const gmm_grad *db;
    float *d_bias_scale;      /* fp32: sum over n of dy[r][n] bias_g[n]; NULL = not wanted */
    int32_t d_bias_scale_add; /* 1: added to d_bias_scale instead of stored */
    int32_t y_add;           /* 1: fwd adds to y, dgrad to dx, instead of storing */
    const float *prob;       /* fp32, context memory: fwd and dgrad multiply rows of their result by it before they add
                                to the old value and round; NULL = ones. wgrad and bgrad refuse it */
    const int32_t *x_index;  /* [T], context memory: fwd and wgrad gather rows of x; NULL = they do not */
    const int32_t *dy_index; /* [T], context memory: dgrad, wgrad and bgrad gather rows of dy; NULL = they do not */
    int64_t index_rows;      /* with an index: rows of the matrices that it gathers from, 0 to 2^31 - 1 */
    int32_t index_div;       /* divisor of the entries of x_index and dy_index, >= 1; 0 = 1 */
    int32_t reserved;        /* 0 */
} gmm_linear;

/* Engine, workspace and feature alignment of one linear operation (GMM_OP_LINEAR_*). Addresses may still be NULL.
   Stream, graph: no effect on either. Errors: those of the operation, except about addresses and workspace. */
GMMDEF gmm_status gmm_linear_query(gmm_context *ctx, gmm_op op, const gmm_linear *linear, gmm_info *info);

/* y = p (alpha x w^T + bias s) (+ y). Needs x, w, y.
   Stream, graph: enqueued; capturable, and a replay may have other group sizes.
   Errors: GMM_E_NULL, GMM_E_ARG (also overlap), GMM_E_DTYPE, GMM_E_STRIDE, GMM_E_ALIGN, GMM_E_OVERFLOW, GMM_E_SPLIT
       (splits on the host, or of a CPU context without a fault word), GMM_E_WORKSPACE, GMM_E_VERSION,
       GMM_E_UNSUPPORTED, GMM_E_CAPTURE (host splits), GMM_E_CUDA. */
GMMDEF gmm_status gmm_linear_fwd(gmm_context *ctx, const gmm_linear *linear, void *workspace, size_t workspace_bytes,
                                 gmm_stream stream);

/* dx = p alpha dy w (+ dx). Needs dy, w, dx.  Stream, graph, errors: as gmm_linear_fwd. */
GMMDEF gmm_status gmm_linear_dgrad(gmm_context *ctx, const gmm_linear *linear, void *workspace, size_t workspace_bytes,
                                   gmm_stream stream);

/* dw_g = alpha_g dy_g^T x_g (+ beta dw_g), summed over the group's rows. Needs x, dy, dw.
   Stream, graph, errors: as gmm_linear_fwd. */
GMMDEF gmm_status gmm_linear_wgrad(gmm_context *ctx, const gmm_linear *linear, void *workspace, size_t workspace_bytes,
                                   gmm_stream stream);

/* db_g = sum over rows of s_r dy_r (+ beta db_g), and d_bias_scale. Needs dy, and db or (d_bias_scale and bias).
   Stream, graph, errors: as gmm_linear_fwd. */
GMMDEF gmm_status gmm_linear_bgrad(gmm_context *ctx, const gmm_linear *linear, void *workspace, size_t workspace_bytes,
                                   gmm_stream stream);

/* ---------------------------------------------------------------------------------------------- 4 Activation --- */

/* Named settings of models. X(name, value, lower-case name) */
typedef enum gmm_act_preset {
    GMM_ACT_PRESET_SWIGLU = 0,  /* Mixtral, Qwen, DeepSeek, OLMoE */
    GMM_ACT_PRESET_GPT_OSS = 1, /* SwiGLU, limit 7, alpha 1.702, offset 1, interleave 1 */
    GMM_ACT_PRESET_KIMI_SITU = 2, /* SiTU-GLU, betas 4 and 25 */
    GMM_ACT_PRESET_NEMOTRON = 3,  /* squared ReLU, not gated */
    GMM_ACT_PRESET_MAX = 0x7fffffff
} gmm_act_preset;

/* The settings of a preset. Pure. Errors: an unknown preset gives GMM_ACT_NONE. */
GMMDEF gmm_act gmm_act_of(gmm_act_preset preset);
GMMDEF const char *gmm_act_name(gmm_act_kind kind); /* "swiglu"; "?" if unknown */

/* 1 if the activation reads two values per output, 0 otherwise. Pure. */
GMMDEF int gmm_act_gated(gmm_act_kind kind);

/* A row-scaled activation: y[r][j] = p_r f(x[r]) over rows of all groups.
   Shapes: x, dx [T, ffn] or, gated, [T, 2 ffn] in the order of gmm_act.interleave; y, dy [T, ffn]; prob, dprob [T].
   dtypes: F32, F16, BF16, each operand its own; prob and dprob fp32.
   Aliasing: none, but in bwd dx may be x, and y may be dy, with the same address, ld and size of elements. */
typedef struct gmm_activation {
    uint32_t struct_size;
    int32_t reserved;        /* 0 */
    int64_t ffn;             /* >= 1 */
    const gmm_groups *groups;
    const gmm_options *options;
    const gmm_act *act;
    const gmm_mat *x;
    const float *prob;       /* NULL = ones */
    const gmm_mat *y;
    const gmm_mat *dy;
    const gmm_mat *dx;
    float *dprob;            /* sum over j of dy[r][j] f(x[r])_j; NULL = not wanted */
} gmm_activation;

/* Engine and workspace of GMM_OP_ACT_FWD or GMM_OP_ACT_BWD.  Stream, graph: none. Errors: as the operation. */
GMMDEF gmm_status gmm_act_query(gmm_context *ctx, gmm_op op, const gmm_activation *activation, gmm_info *info);

/* y = p f(x). Needs x, y.  Stream, graph: enqueued; capturable.
   Errors: as gmm_linear_fwd, and GMM_E_CONFIG for settings that contradict one another. */
GMMDEF gmm_status gmm_act_fwd(gmm_context *ctx, const gmm_activation *activation, void *workspace,
                              size_t workspace_bytes, gmm_stream stream);

/* dx = p dy df/dx, dprob, and y = p f(x). Needs x, dy and one of dx, dprob, y; outputs that are NULL are not computed.
   Stream, graph, errors: as gmm_act_fwd. */
GMMDEF gmm_status gmm_act_bwd(gmm_context *ctx, const gmm_activation *activation, void *workspace,
                              size_t workspace_bytes, gmm_stream stream);

/* ---------------------------------------------------------------------------------------------- 5 Expert MLP --- */

/* What fwd saves for bwd in gmm_mlp.saved. */
typedef enum gmm_save {
    GMM_SAVE_PREACT = 0,         /* FC1's output; the activation is computed again */
    GMM_SAVE_PREACT_AND_ACT = 1, /* FC1's output and FC2's input */
    GMM_SAVE_NOTHING = 2,        /* FC1 runs again in bwd */
    GMM_SAVE_QUANTIZED = 3,      /* FC1's output, and x and FC2's input quantized as bwd reads them: bwd casts neither,
                                    reads no x, and runs no activation forward. Needs a recipe that quantizes the input.
                                    All gradients have the bits of GMM_SAVE_PREACT */
    GMM_SAVE_PREACT_E4M3 = 4,    /* FC1's output as unscaled E4M3, saturated to +-448. bwd computes with these values:
                                    y and db2 have the bits of GMM_SAVE_PREACT, the other gradients do not */
    GMM_SAVE_QUANTIZED_E4M3 = 5, /* both: FC1's output as unscaled E4M3 and the copies of GMM_SAVE_QUANTIZED. y, db2 and
                                    dw2 have the bits of GMM_SAVE_PREACT */
    GMM_SAVE_MAX = 0x7fffffff
} gmm_save;

/* The token dispatcher, on which it depends who pads the groups (gmm_pad_decide). */
typedef enum gmm_dispatcher {
    GMM_DISPATCH_ALLTOALL = 0,
    GMM_DISPATCH_ALLGATHER = 1,
    GMM_DISPATCH_DEEPEP = 2,
    GMM_DISPATCH_HYBRIDEP = 3,
    GMM_DISPATCH_NCCLEP = 4,
    GMM_DISPATCHER_MAX = 0x7fffffff
} gmm_dispatcher;

/* The configuration of an expert MLP: y = act(x w1^T + b1) p w2^T + b2 (p). Fields below `save` describe the model
   around the MLP. Except for delay_wgrad and overlap_dispatch_wgrad they change nothing that is computed:
   gmm_mlp_validate and the operations refuse combinations that would train a wrong model. */
typedef struct gmm_mlp_config {
    uint32_t struct_size;
    int32_t bias1, bias2;           /* the linears have biases */
    int32_t prob;                   /* rows are weighted by a probability between activation and FC2 */
    int32_t prob_on_bias2;          /* b2 is weighted by it too, which equals weighting FC2's output */
    int64_t hidden;                 /* columns of x; >= 1 */
    int64_t ffn;                    /* columns of FC2's input; >= 1 */
    int64_t hidden_out;             /* columns of y; 0 = hidden */
    gmm_act act;
    gmm_save save;
    int32_t delay_wgrad;            /* bwd queues the weight gradients */
    int32_t overlap_dispatch_wgrad; /* the same, for overlapping dispatch with wgrad; excludes delay_wgrad */
    int32_t ddp_expects_delay;      /* 1: the data-parallel hooks wait for the queued gradients */
    int32_t ddp;                    /* 1: data-parallel hooks are installed */
    int32_t topk;                   /* experts per token; 0 = unknown */
    int32_t prob_on_input;          /* x was weighted by the probability already */
    int32_t etp_size;               /* expert tensor parallelism; 0 = 1 */
    int32_t source_interleave;      /* GLU block of the weights as loaded; halves: ffn; 0 = not stated */
    gmm_recipe_kind recipe;         /* the kind of gmm_mlp.quant's recipe; other than NONE it needs gmm_mlp.quant */
    int32_t router_padding;         /* the router rounds counts up for quantization */
    gmm_dispatcher dispatcher;
    int32_t act_input_fp8;          /* the activation's input is kept as unscaled E4M3, which `save` must say */
    int32_t act_recompute;          /* the activation is recomputed in bwd */
} gmm_mlp_config;

/* Checks a configuration; pure. Every operation on an MLP makes the same checks.
   Errors: GMM_E_CONFIG, and error->text begins with the field's name. The rules:
       hidden, ffn >= 1; hidden_out >= 0; enumerations in range; switches 0 or 1
       act.kind: any but GMM_ACT_NONE, the value in a zeroed act
       act: as gmm_act_fwd (interleave >= 0, a divisor of ffn, gated only; limit 0 or finite > 0; offset finite, gated
           only; alpha finite, and 0 or 1 where the activation has no alpha; betas 0 or finite > 0, SiTU only)
       source_interleave >= 0; where stated for a gated activation, it is the layout of act.interleave
       delay_wgrad and overlap_dispatch_wgrad exclude each other; with ddp, either needs ddp_expects_delay, and
           ddp_expects_delay needs one of them: otherwise hooks fire before the gradient is complete, or never
       prob_on_bias2 needs prob and bias2; prob_on_input needs topk 1 and excludes prob
       bias2 with prob and topk > 1 needs prob_on_bias2: unweighted biases would add up topk times
       bias1 or bias2 need etp_size 1: every rank would add them
       router_padding needs a quantized recipe, and not the all-gather dispatcher
       save = GMM_SAVE_QUANTIZED and GMM_SAVE_QUANTIZED_E4M3 need a quantized recipe
       act_input_fp8 needs save = GMM_SAVE_PREACT_E4M3 or GMM_SAVE_QUANTIZED_E4M3
       act_recompute excludes the values of save that keep the activation: GMM_SAVE_PREACT_AND_ACT, GMM_SAVE_QUANTIZED
           and GMM_SAVE_QUANTIZED_E4M3 */
GMMDEF gmm_status gmm_mlp_validate(const gmm_mlp_config *config, gmm_error *error);

/* Parameters of an MLP, for callbacks. */
typedef enum gmm_param {
    GMM_PARAM_W1 = 0, GMM_PARAM_B1 = 1, GMM_PARAM_W2 = 2, GMM_PARAM_B2 = 3, GMM_PARAM_MAX = 0x7fffffff
} gmm_param;

/* Callbacks, each NULL = none, called on the calling thread with the stream of the call.
   `ready` is called once per micro-batch for every parameter whose gradient is wanted, also where groups are empty,
   FC2's before FC1's, when the work that completes the gradient has been enqueued on `stream`, and before later work
   is: FC2's weight gradient is complete before FC1's backward is enqueued. Biases complete in bwd; weights in bwd or,
   delayed, in gmm_mlp_wgrad. Not called while capturing.
   `need` is called before a product that reads a weight is enqueued, behind all work before the product, for weights
   that are made available late (gathered over ranks, copied from host memory). fwd calls it for w1, then w2, with `op`
   GMM_OP_LINEAR_FWD; bwd for w1 with GMM_OP_LINEAR_FWD if FC1 runs again, for w2, then w1 with GMM_OP_LINEAR_DGRAD, for
   those of these products that run. Where the product multiplies a copy that was cast before (in bwd with a weight
   cache, or for FC1's second run), the matrix is not read, and `need` not called.
   It may enqueue work on `stream`, such as a wait, and set the matrix that gmm_mlp.w1 or w2 points to. With `need`, the
   weights' addresses (data, table, scale, scale_table, amax) are read behind it, not before, and may be NULL when the
   call or query begins; so may entries of tables. data or table, group_stride and GMM_MAT_TABLE_ON_HOST may be chosen
   late. All other fields, also those of the copy in `columnwise` that bwd reads, are read at the beginning and must
   remain: dtype, scaling, scale_order, hadamard, other flags, ld. Where ld is a multiple of 16 bytes, so must be the
   matrices' addresses, as a query assumes. What breaks this, or overlaps memory that the call writes, is refused, with
   GMM_E_CONFIG, GMM_E_ALIGN or as when it is given at the beginning.
   A status other than GMM_OK ends the call with this status; gmm_last_error names it. After a refusal behind the
   beginning, the work before it has been enqueued, outputs are undefined, and bwd has queued nothing.
   `need` is called while capturing too: what it enqueues becomes part of the graph, and the graph reads the addresses
   that it sets. No replay calls it. */
typedef struct gmm_grad_hooks {
    void *user;
    void (*ready)(void *user, gmm_param param, gmm_stream stream);
    gmm_status (*need)(void *user, gmm_param param, gmm_op op, gmm_stream stream);
} gmm_grad_hooks;

/* The queued weight gradients of both linears of one bwd; its contents are private to the library. */
typedef struct gmm_wgrad_entry {
    uint64_t opaque[192];
} gmm_wgrad_entry;

/* Caller-owned FIFO of delayed weight gradients, made by gmm_wgrad_queue_over. Callers may read `count`. Calls refuse
   capacity < 1, head outside [0, capacity) and count outside [0, capacity]. */
typedef struct gmm_wgrad_queue {
    gmm_wgrad_entry *entries;
    int32_t capacity, head, count, reserved;
} gmm_wgrad_queue;

/* An empty queue over caller memory of `capacity` entries. Pure. */
static inline gmm_wgrad_queue gmm_wgrad_queue_over(gmm_wgrad_entry *entries, int32_t capacity) {
    gmm_wgrad_queue q;
    q.entries = entries;
    q.capacity = capacity;
    q.head = q.count = q.reserved = 0;
    return q;
}

/* Operands that a recipe quantizes, in the order of their delayed-scaling slots: those of forward, then of backward. */
typedef enum gmm_mlp_slot {
    GMM_SLOT_X, GMM_SLOT_W1, GMM_SLOT_H, GMM_SLOT_W2, GMM_SLOT_DY, GMM_SLOT_DZ, GMM_SLOTS,
    GMM_SLOT_MAX = 0x7fffffff
} gmm_mlp_slot;

/* What the products of bwd multiply. Their results are rounded and added as ever. */
typedef enum gmm_backward_override {
    GMM_BACKWARD_BY_RECIPE = 0,
    GMM_BACKWARD_HIGH_PRECISION = 1, /* x, FC2's input, weights, dy and dz as they are, in the dtype of x */
    GMM_BACKWARD_DEQUANTIZED = 2,    /* the dequantized rowwise copies of x, FC2's input and weights, which are those
                                        that fwd multiplies, rounded to the dtype of x; dy and dz as they are */
    GMM_BACKWARD_OVERRIDE_MAX = 0x7fffffff
} gmm_backward_override;

/* How the products of an MLP are quantized: its operands (x, FC2's input h, w1, w2, dy and FC1's output gradient dz) in
   the format that the recipe has for their role, along the contraction of each product. A tensor that a call needs in
   both directions is read once and cast both ways, unless its format has an amax per row: dy and dz in bwd; x and h in
   fwd with GMM_SAVE_QUANTIZED, so that bwd does not cast them again; weights in fwd with a cache. Other copies are made
   by the call that reads them, in the workspace.
   Weights may already be quantized, in the recipe's dtype and scaling: fwd reads w1 and w2, bwd w1.columnwise and
   w2.columnwise (and w1 if FC1 runs again; with GMM_BACKWARD_DEQUANTIZED w1 and w2); results are bitwise the same.
   Nothing else changes with a recipe: intermediate values have the unquantized dtype, and bias gradients are computed
   from it.
   The cache of weights is memory of the caller. fwd casts w1 and w2 into it, unless the word `weight_skip` is nonzero
   when the work runs; bwd reads it and casts no weight. The library does not write the word: the caller sets it to 0
   for the first micro-batch after weights, recipe, delayed scales or shapes have changed, and to nonzero for those that
   follow. A captured graph reads the word at each replay. Results are bitwise those without a cache. */
typedef struct gmm_mlp_quant {
    uint32_t struct_size;
    int32_t reserved;        /* 0 */
    const gmm_recipe *recipe;/* its kind must be the configuration's. With hadamard, x, dy and the weights are BF16 in
                                every operation, though only weight gradients are transformed */
    const float *scale;      /* delayed: [GMM_SLOTS][G] quantization scales, context memory; NULL = ones, of which the
                                log warns once */
    float *amax;             /* delayed: [GMM_SLOTS][G], raised to the operands' amaxes (history[0]); NULL = not
                                wanted */
    const uint64_t *random;  /* stochastic: {seed, offset} of dy and of dz, context memory. A delayed weight gradient
                                that casts x in gmm_mlp_wgrad reads `scale` and raises `amax` there */
    void *weight_cache;      /* w1 and w2 quantized: fwd writes, bwd reads; 256-byte aligned. NULL = none. A weight that
                                the caller has quantized is read where it is */
    size_t weight_cache_bytes;  /* >= gmm_info.weight_cache_bytes */
    const int32_t *weight_skip; /* context memory: nonzero = the cache holds these weights. NULL = 0. Needs a cache */
    gmm_backward_override backward_override;
    int32_t reserved1;       /* 0 */
} gmm_mlp_quant;

/* Tensors of one MLP call.
   Shapes: x, dx [T, hidden]; w1 [G][2 ffn or ffn, hidden] and b1 [G][2 ffn or ffn], gated rows in the order of
       act.interleave (0: first the ffn gate rows, then the ffn rows that they multiply); w2 [G][hidden_out, ffn],
       b2 [G][hidden_out]; y, dy [T, hidden_out]; prob, dprob [T] fp32.
   Gathered rows (gmm_linear): with x_index, x is [index_rows, hidden], and its row x_index[r] / index_div stands for
       x[r]; dy_index does the same for dy. gmm_permute.slot_of with index_div = topk takes tokens and the gradients of
       combined tokens that were not permuted, with the bits of permuted copies. What a recipe quantizes is gathered by
       its cast (gmm_quantization.src_index). A queued weight gradient reads the indices in gmm_mlp_wgrad.
   dtypes: x, w1, w2 and dy share F32, F16 or BF16, which is also the dtype of saved values (with `quant`, weights may
       be quantized instead); the others are as in gmm_linear.  Aliasing: none. */
typedef struct gmm_mlp {
    uint32_t struct_size;
    int32_t reserved;       /* 0 */
    const gmm_mlp_config *config;
    const gmm_groups *groups;
    const gmm_options *options;
    const gmm_mat *x, *w1, *b1, *w2, *b2;
    const float *prob;
    const gmm_mat *y;
    void *saved;            /* fwd writes, bwd reads; 256-byte aligned; NULL in fwd = inference. With GMM_SAVE_NOTHING
                               neither accesses it, and it may be NULL, or any aligned address */
    size_t saved_bytes;
    const gmm_mat *dy, *dx; /* dx NULL = not wanted */
    const gmm_grad *dw1, *dw2, *db1, *db2; /* each NULL = not wanted */
    float *dprob;           /* with prob_on_bias2 it includes the bias's term; NULL = not wanted */
    void *deferred;         /* delayed: bwd stores wgrad operands, tables and arrays by group here for gmm_mlp_wgrad;
                               256-byte aligned */
    size_t deferred_bytes;
    gmm_wgrad_queue *queue; /* delayed: bwd appends an entry */
    const gmm_grad_hooks *hooks; /* NULL = none */
    const gmm_mlp_quant *quant;  /* NULL = operands are not quantized */
    const int32_t *x_index;  /* [T], context memory: rows of x are gathered; NULL = they are not */
    const int32_t *dy_index; /* [T], context memory: rows of dy are gathered in bwd; NULL = they are not */
    int64_t index_rows;      /* with an index: rows of the matrices that it gathers from, 0 to 2^31 - 1 */
    int32_t index_div;       /* divisor of the entries of x_index and dy_index, >= 1; 0 = 1 */
    int32_t reserved1;       /* 0 */
} gmm_mlp;

/* Engine, sizes and feature alignment of GMM_OP_MLP_FWD, GMM_OP_MLP_BWD or GMM_OP_MLP_WGRAD.  Stream, graph: none.
   Errors: those of the operation, except about addresses and buffers. */
GMMDEF gmm_status gmm_mlp_query(gmm_context *ctx, gmm_op op, const gmm_mlp *mlp, gmm_info *info);

/* One matrix in gmm_mlp.saved: row-major, rows of ld elements from `offset` on. */
typedef struct gmm_saved_part {
    const char *name;       /* "preact": FC1's output with its bias, columns as w1's rows; "act": FC2's input, times
                               prob; "x": the copy of x. A quantized one is followed by its scales, "preact_scale",
                               "x_scale" or "act_scale", and in NV16 by its amaxes, "x_amax" or "act_amax", in the
                               layout of gmm_quant.h. Never freed */
    gmm_dtype dtype;
    int32_t reserved;       /* 0 */
    int64_t rows, cols, ld; /* rows: the capacity; those past the split's sum are undefined. Of a copy as it is stored;
                               of scales and amaxes 1 row */
    int64_t offset, bytes;  /* bytes of elements; the offset is a multiple of 256 */
} gmm_saved_part;

typedef struct gmm_saved_layout {
    uint32_t struct_size;
    int32_t count;          /* parts that config.save saves, 0 to 8, in the order of their offsets */
    int64_t bytes;          /* gmm_info.saved_bytes */
    gmm_saved_part part[8]; /* zeros from `count` on */
} gmm_saved_layout;

/* The layout of `saved`, for checking an MLP stage by stage. It is the same for every engine, and for the descriptors
   of GMM_OP_MLP_FWD and GMM_OP_MLP_BWD.  Stream, graph: none.
   Errors: as gmm_mlp_query; GMM_E_NULL (layout). */
GMMDEF gmm_status gmm_mlp_saved_query(gmm_context *ctx, gmm_op op, const gmm_mlp *mlp, gmm_saved_layout *layout);

/* y of the MLP. Needs x, w1, w2, y and what the configuration names.  Stream, graph: enqueued; capturable.
   Errors: as gmm_linear_fwd, GMM_E_CONFIG (gmm_mlp_validate, hooks.need), the status of hooks.need. */
GMMDEF gmm_status gmm_mlp_fwd(gmm_context *ctx, const gmm_mlp *mlp, void *workspace, size_t workspace_bytes,
                              gmm_stream stream);

/* Those of dx, dw1, dw2, db1, db2 and dprob that are not NULL, from dy and saved (and x, w1, b1 as config.save
   needs).
   Intermediate results are rounded to the dtype of x: FC2's dgrad before the activation's backward and dprob read it,
   and FC1's output gradient before dx, dw1 and db1 read it. Results are those of gmm_linear_dgrad with a dx of this
   dtype, gmm_act_bwd and the other steps, called one after the other.
   Delayed weight gradients are recorded in `queue`. The matrices of x, dy, dw1 and dw2, the indices of gathered rows,
   `deferred`, the fault word, the arrays of `quant`, and `saved` if it has copies of x (GMM_SAVE_QUANTIZED) must remain
   unchanged until gmm_mlp_wgrad has run. Everything else may be freed or overwritten once the work of this call is
   done: the queue has copies of descriptors, recipe and hooks; `deferred` has h, dy and dz quantized (or h and dz
   themselves where products read those) and copies of splits, pointer tables, gmm_grad.beta and frozen. Host memory
   (descriptors and tables of GMM_MAT_TABLE_ON_HOST) may be freed on return.
   Stream, graph: enqueued; capturable. A captured call fills the queue once, when it is captured; no replay does.
   Errors: as gmm_mlp_fwd; GMM_E_STATE (queue full), GMM_E_ARG (fields of the queue). */
GMMDEF gmm_status gmm_mlp_bwd(gmm_context *ctx, const gmm_mlp *mlp, void *workspace, size_t workspace_bytes,
                              gmm_stream stream);

/* Computes the oldest queued weight gradients: FC2's, then FC1's, and fires their hooks. `options` as recorded.
   Stream, graph: enqueued; capturable.
   Errors: GMM_E_STATE (queue empty, or its first entry was not recorded), GMM_E_ARG (capacity, head or count out of
       range, overlap), GMM_E_NULL, GMM_E_WORKSPACE, GMM_E_ALIGN, GMM_E_CUDA; the entry then stays. */
GMMDEF gmm_status gmm_mlp_wgrad(gmm_context *ctx, gmm_wgrad_queue *queue, void *workspace, size_t workspace_bytes,
                                gmm_stream stream);

/* Calls the `ready` hooks that `op` (GMM_OP_MLP_BWD or GMM_OP_MLP_WGRAD) of this MLP calls outside of a capture; for
   callers who have launched a graph of the operation.  Stream, graph: passed to the hooks.
   Errors: those of gmm_mlp_query. */
GMMDEF gmm_status gmm_mlp_fire_hooks(gmm_context *ctx, gmm_op op, const gmm_mlp *mlp, gmm_stream stream);

/* -------------------------------------------------------------------------------- 6 Weight-gradient decisions --- */

/* How the gradient of one weight is to be handled by a data-parallel trainer. All fields are 0 or 1. */
typedef struct gmm_wgrad_in {
    uint8_t want;         /* the weight requires a gradient */
    uint8_t main_grad;    /* its target is main_grad rather than a gradient of its own */
    uint8_t overwrite;    /* overwrite_main_grad, or the first micro-batch; read when the work is enqueued */
    uint8_t delay;        /* delayed, or dispatch overlapped with wgrad */
    uint8_t ddp_flag;     /* the parameter carries grad_added_to_main_grad */
    uint8_t zero_dummy;   /* zero_out_wgrad: the placeholder must be zero */
} gmm_wgrad_in;

typedef struct gmm_wgrad_out {
    uint8_t row;          /* 0 to 14: row of the decision table */
    uint8_t run_now;      /* compute in the main backward */
    uint8_t enqueue;      /* record for the delayed pass */
    uint8_t beta_one;     /* add to the destination instead of storing */
    uint8_t return_real;  /* the main backward returns the gradient */
    uint8_t return_dummy; /* it returns a placeholder of the parameter's shape and dtype */
    uint8_t dummy_zero;   /* the placeholder is zero-filled */
    uint8_t set_flag;     /* grad_added_to_main_grad becomes true: owned, not necessarily ready */
    uint8_t hooks_after;  /* hooks fire after the delayed pass instead of after the main backward */
} gmm_wgrad_out;

/* The decision table; pure, total over the 64 inputs, and obeyed by the operations above.
   Errors: GMM_E_NULL, GMM_E_ARG (a field above 1). */
GMMDEF gmm_status gmm_wgrad_decide(const gmm_wgrad_in *in, gmm_wgrad_out *out, gmm_error *error);

/* ------------------------------------------------------------------------------------------------- 7 Routing --- */

typedef enum gmm_score { GMM_SCORE_SOFTMAX = 0, GMM_SCORE_SIGMOID = 1, GMM_SCORE_MAX = 0x7fffffff } gmm_score;

/* Top-k routing. The scores s[t] are the softmax or sigmoid of logits[t]. The k experts with the largest value v are
   chosen, of equal values the lower index (a NaN ranks last); indices are in falling order of v.
       v = s + expert_bias, or with `sinkhorn` the balanced assignment below
       with `groups`, only experts of the token's group_topk best groups are chosen: those with the largest sum of their
           group_sum largest v, of equal sums the lower index
       probs[t][i] = scale s[t][e_i]; if normalize, divided by the sum of s over the chosen experts (sigmoid: + 1e-20)
   Losses are sums over tokens in a fixed order, where c_e is the number of times that expert e was chosen, and q is s,
   for sigmoid divided by the token's sum of s over all experts:
       aux_loss = aux_coeff E / (topk T^2) sum_e c_e sum_t q[t][e]
       z_loss = z_coeff / T sum_t logsumexp(logits[t])^2
   With `sequences` = B > 1 aux_loss is the mean over the sequences of their own losses: T, c_e and the sum over t are a
   sequence's, whose counts are sequence_counts; bwd reads these instead of counts.
   Tokens of `padding` choose no expert: their indices are -1 and their probs 0, they are in no count, loss and T, and
   their dlogits are 0.
   Sinkhorn's iteration balances x[t][e] = exp(logits[t][e] - max_e logits[t][e]) by multipliers of rows and columns,
   from b[e] = 1 on: a[t] = 1 / (T (sum_e b[e] x[t][e] + 1e-8)), then b[e] = 1 / (E (sum_t a[t] x[t][e] + 1e-8)). It
   ends when the mean of |change of b[e]| is at most the tolerance, or after `sinkhorn` iterations; v = b x. Tokens with
   NaN are left out of the sums. On a GPU an iteration is three to five launches, also of those behind its end.
   Shapes: logits, dlogits [T, E]; expert_bias [E]; indices, probs, dprobs [T, topk]; counts, total_counts [E];
       sequence_counts [B, E]; offsets [E + 1]; padding [T]; T topk < 2^31. Where all scores of a denominator are 0, the
       quotient is 0; so are losses without tokens.
   dtypes: logits, dlogits F64, F32, F16, BF16, computed in fp32; indices int32; counts, offsets int32, total_counts
       int64; padding bytes; the rest fp32.  Aliasing: none. */
typedef struct gmm_route {
    uint32_t struct_size;
    int32_t experts;         /* E >= 1 */
    int64_t tokens;          /* T >= 0 */
    int32_t topk;            /* 1 to E */
    gmm_score score;
    int32_t normalize;
    float scale;             /* 0 = 1 */
    const gmm_options *options;
    const gmm_mat *logits;
    const float *expert_bias;/* selection only; NULL = none */
    int32_t *indices;        /* fwd writes, bwd reads */
    float *probs;            /* fwd writes */
    int32_t *counts;         /* tokens per expert; fwd writes, bwd reads if aux_coeff is not 0; else may be NULL */
    int32_t *offsets;        /* exclusive prefix sums of counts; NULL = not wanted */
    float aux_coeff, z_coeff;/* finite; 0 = the loss is 0 and has no gradient */
    float *aux_loss, *z_loss;/* one value each; NULL = not wanted */
    const float *dprobs;     /* bwd: gradient of probs; NULL = zeros */
    const float *dloss;      /* bwd: [2] gradients of aux_loss and z_loss; NULL = ones */
    const gmm_mat *dlogits;  /* bwd writes */
    int32_t groups;          /* a divisor of E: groups of consecutive experts; 0 or 1 = the choice is not limited */
    int32_t group_topk;      /* with groups: 1 to groups, and group_topk E / groups >= topk; else 0 */
    int32_t group_sum;       /* with groups: 1 to E / groups; 0 = topk / group_topk, which must be >= 1 */
    int32_t sinkhorn;        /* iterations at most; 0 = no balance. Excludes expert_bias */
    float sinkhorn_tolerance;/* finite, >= 0; 0 = 1e-4 */
    int32_t sequences;       /* B, a divisor of T; 0 = 1 */
    int32_t sequence_first;  /* 0: sequence b has tokens b T / B on; 1: token t is of sequence t mod B */
    int32_t reserved;        /* 0 */
    const uint8_t *padding;  /* nonzero = the token is padding; NULL = none is */
    int32_t *sequence_counts;/* with sequences > 1: as counts, by sequence; else NULL */
    int64_t *total_counts;   /* fwd adds the counts, over micro-batches for gmm_update_expert_bias; NULL = not wanted */
} gmm_route;

/* Engine and workspace of GMM_OP_TOPK_FWD or GMM_OP_TOPK_BWD.  Stream, graph: none. Errors: as the operation. */
GMMDEF gmm_status gmm_topk_query(gmm_context *ctx, gmm_op op, const gmm_route *route, gmm_info *info);

/* indices, probs, counts, offsets, losses. Needs logits, indices, probs.  Stream, graph: enqueued; capturable.
   Errors: as gmm_linear_fwd, GMM_E_CONFIG (fields that exclude each other). */
GMMDEF gmm_status gmm_topk_fwd(gmm_context *ctx, const gmm_route *route, void *workspace, size_t workspace_bytes,
                               gmm_stream stream);

/* dlogits from dprobs, dloss, logits, indices, counts. The choice of experts and expert_bias have no gradient.
   Stream, graph: enqueued; capturable. Errors: as gmm_topk_fwd. */
GMMDEF gmm_status gmm_topk_bwd(gmm_context *ctx, const gmm_route *route, void *workspace, size_t workspace_bytes,
                               gmm_stream stream);

/* A routing as slots (indices and probs, as gmm_route and gmm_permute have it) and as dense matrices: a map of bytes,
   nonzero where a token chose an expert, and values.
       to_dense     map[t][e] = 1 where an index of token t is e, else 0; values[t][e] = the sum of its probs there
       from_dense   with a map: indices are the experts of each row in rising order, -1 behind the last. Of more than
                    topk the first topk are taken. Without: indices are read.
                    probs[t][i] = values[t][e_i], 0 where the index is out of range; counts, offsets as in gmm_route
   The two are each other's backward: the gradient of `values` in to_dense becomes that of probs by from_dense without a
   map; the gradient of probs in from_dense becomes that of `values` by to_dense.
   Shapes: map, values [T, E]; indices, probs [T, topk]; counts [E]; offsets [E + 1]; T topk < 2^31.
   dtypes: map bytes; indices, counts, offsets int32; values, probs fp32.  Aliasing: none. */
typedef struct gmm_dense_route {
    uint32_t struct_size;
    int32_t experts;          /* E >= 1 */
    int64_t tokens;           /* T >= 0 */
    int32_t topk;             /* >= 1 */
    int32_t reserved;         /* 0 */
    const gmm_options *options;
    uint8_t *map;             /* to_dense writes, from_dense reads; NULL = not wanted, from_dense: none */
    float *values;            /* to_dense writes, from_dense reads; goes with probs */
    int32_t *indices;         /* to_dense reads; from_dense writes with a map, else reads */
    float *probs;             /* to_dense reads, from_dense writes; NULL = not wanted, as values */
    int32_t *counts, *offsets;/* from_dense with a map; NULL = not wanted; offsets need counts */
} gmm_dense_route;

/* Stream, graph: enqueued; capturable.
   Errors: GMM_E_NULL, GMM_E_ARG, GMM_E_ALIGN, GMM_E_VERSION, GMM_E_UNSUPPORTED, GMM_E_CUDA; GMM_E_CONFIG (an operand
       that the operation does not have). */
GMMDEF gmm_status gmm_route_to_dense(gmm_context *ctx, const gmm_dense_route *dense, gmm_stream stream);
GMMDEF gmm_status gmm_route_from_dense(gmm_context *ctx, const gmm_dense_route *dense, gmm_stream stream);

/* Balances experts without a loss: bias[e] rises by `rate` where fewer tokens than the mean over experts chose e, and
   falls by it where more did. total_counts become 0, for the next step. Where several ranks train on different tokens,
   their total_counts are added up first.
   Shapes: total_counts, bias [layers, E].  dtypes: int64, fp32. */
typedef struct gmm_expert_bias {
    uint32_t struct_size;
    int32_t experts;          /* E >= 1 */
    int32_t layers;           /* rows of the arrays; 0 = 1 */
    float rate;               /* finite, >= 0 */
    const gmm_options *options;
    int64_t *total_counts;
    float *bias;
} gmm_expert_bias;

/* Stream, graph: enqueued; capturable.
   Errors: GMM_E_NULL, GMM_E_ARG, GMM_E_ALIGN, GMM_E_VERSION, GMM_E_UNSUPPORTED, GMM_E_CUDA. */
GMMDEF gmm_status gmm_update_expert_bias(gmm_context *ctx, const gmm_expert_bias *update, gmm_stream stream);

/* -------------------------------------------------------------------------------------- 8 Permute, unpermute --- */

/* Permutes tokens to expert order and back. One descriptor serves five calls:
       call            reads                                            writes
       permute_map     indices                                          row_of, slot_of, sizes
       permute_fwd     slot_of, sizes, row_of, x, probs                 rows, row_probs: both, or one
       unpermute_fwd   row_of, rows, probs                              out
       unpermute_bwd   row_of, slot_of, sizes, dout, rows, probs        drows, dprobs
       permute_bwd     row_of, drows, drow_probs                        dx, dprobs
   The fields up to `sizes` describe one permutation and may stay set in all five calls. A call refuses operands behind
   them that are not in its row of this table (GMM_E_CONFIG).
   Slot i of token t (its i-th expert) is dropped where indices[t][i] is -1.
   Rows of one expert keep the order of their tokens (then of their slots); experts follow one another, each segment
   rounded up to `align` rows.
   Shapes: x, dx [T, H]; indices, probs, dprobs, row_of [T, topk]; slot_of [R]; rows, drows [R, H]; row_probs,
       drow_probs [R]; sizes [E]; out, dout [T, H]. R is the capacity.
   dtypes: indices, maps int32; sizes int32; probabilities fp32; matrices F32, F16, BF16, FP8 and U8 for permute_fwd
       (same dtype on both sides), F32, F16, BF16 each their own elsewhere. Sums are fp32, in slot order.
   Aliasing: none. */
typedef struct gmm_permute {
    uint32_t struct_size;
    int32_t experts;          /* E >= 1 */
    int64_t tokens;           /* T >= 0; T topk < 2^31 */
    int64_t capacity;         /* R >= 0, < 2^31: rows of permuted buffers; slots that do not fit are dropped (-1) */
    int64_t hidden;           /* H >= 1 */
    int32_t topk;             /* >= 1 */
    int32_t align;            /* 0 = 1 */
    gmm_tail tail;            /* permuted rows past the last segment */
    int32_t reserved;         /* 0 */
    const gmm_options *options;
    uint32_t *fault;          /* GMM_FAULT_INDEX, GMM_FAULT_CAPACITY; NULL = not wanted */
    const int32_t *indices;
    int32_t *row_of;          /* row of each slot, -1 = dropped */
    int32_t *slot_of;         /* slot t topk + i of each row, -1 = padding; map writes all R */
    int32_t *sizes;           /* rows of each expert, padding included: the splits of gmm_groups. Their sum never
                                 exceeds the capacity: the first expert that does not fit gets the remaining rows,
                                 which may be no multiple of align, and the experts after it get 0 */
    const gmm_mat *x;
    const float *probs;       /* NULL = none: fwd writes no row_probs, unpermute adds rows unweighted */
    const gmm_mat *rows;
    float *row_probs;         /* 0 in padding; NULL = not wanted */
    const gmm_mat *out;
    const gmm_mat *dout;
    const gmm_mat *drows;
    const float *drow_probs;
    const gmm_mat *dx;
    float *dprobs;            /* permute_bwd: from drow_probs; unpermute_bwd: from dout and rows. Dropped slots get 0 */
} gmm_permute;

/* Engine and workspace of GMM_OP_PERMUTE_* or GMM_OP_UNPERMUTE_*.  Stream, graph: none. Errors: as the operation. */
GMMDEF gmm_status gmm_permute_query(gmm_context *ctx, gmm_op op, const gmm_permute *permute, gmm_info *info);

/* row_of, slot_of and sizes from indices (any of the three outputs may be NULL).
   Stream, graph: enqueued; capturable. Errors: as gmm_linear_fwd, GMM_E_CONFIG (an operand of another call). */
GMMDEF gmm_status gmm_permute_map(gmm_context *ctx, const gmm_permute *permute, void *workspace,
                                  size_t workspace_bytes, gmm_stream stream);

/* rows[r] = x[token of r], row_probs[r] = probs[slot of r]; padding rows are zeros. Needs slot_of, sizes, x and rows;
   for row_probs alone neither x nor rows, where products gather the rows of x (gmm_linear.x_index).
   With row_of a GPU reads each token once instead of once per row; results depend on slot_of alone.
   Stream, graph: enqueued; capturable. Errors: as gmm_permute_map. */
GMMDEF gmm_status gmm_permute_fwd(gmm_context *ctx, const gmm_permute *permute, void *workspace,
                                  size_t workspace_bytes, gmm_stream stream);

/* dx[t] = sum over slots of drows[row]; dprobs from drow_probs. Needs row_of, and drows with dx or drow_probs with
   dprobs.  Stream, graph: enqueued; capturable. Errors: as gmm_permute_map. */
GMMDEF gmm_status gmm_permute_bwd(gmm_context *ctx, const gmm_permute *permute, void *workspace,
                                  size_t workspace_bytes, gmm_stream stream);

/* out[t] = sum over slots of (probs) rows[row]. Needs row_of, rows, out.
   Stream, graph: enqueued; capturable. Errors: as gmm_permute_map. */
GMMDEF gmm_status gmm_unpermute_fwd(gmm_context *ctx, const gmm_permute *permute, void *workspace,
                                    size_t workspace_bytes, gmm_stream stream);

/* drows[r] = (probs) dout[token of r], zeros in padding; dprobs = dout . rows. Needs dout, and slot_of and sizes with
   drows (row_of as in permute_fwd), or row_of and rows with dprobs.  Stream, graph: enqueued; capturable.
   Errors: as gmm_permute_map. */
GMMDEF gmm_status gmm_unpermute_bwd(gmm_context *ctx, const gmm_permute *permute, void *workspace,
                                    size_t workspace_bytes, gmm_stream stream);

/* ------------------------------------------------------------------------- 8.1 Mixture-of-experts layer --- */

/* A whole layer, from tokens to the sums of their experts' outputs, as one call forward and one backward:
       fwd   topk_fwd, permute_map, mlp_fwd on the rows of x, unpermute_fwd
       bwd   unpermute_bwd, mlp_bwd, permute_bwd, topk_bwd
   Results are bitwise those of these operations, called one after the other on the same engine, with the rows of x, y
   and their gradients in the dtype of x.
   Routing   route NULL: the caller gives indices and probs. Else the layer runs gmm_topk_fwd and gmm_topk_bwd on it.
             They write and read route.indices and probs, which the caller keeps from fwd to bwd. Experts, tokens and
             topk of the route are the layer's; route.options and dprobs must be NULL, since the layer passes its own.
   Rows      The rows of the experts lie as gmm_permute describes: dropped slots (-1), capacity, align. Casts of a
             recipe gather rows of x where they read them (gmm_quantization.src_index); products gather them
             (gmm_linear.x_index) in CPU contexts, with options.workspace_limit, and in a bwd that delays weight
             gradients. Else they are permuted in the workspace, and again in bwd where it reads them: in 16 bits, and
             where backward_override HIGH_PRECISION or a recipe that leaves x as it is has products read x. The same
             holds for rows of dout that have the dtype of x and are not weighted. Other rows of dout are permuted in
             the workspace, or in `deferred` where a queued weight gradient reads them. With save_rows 1 fwd permutes
             rows of x into saved on every engine, and bwd reads them there: R hidden elements more memory for a shorter
             bwd.
   probs     config.prob 1: they weight FC2's input in the MLP. 0: they weight the rows that the combine adds. The
             gradient of probs then needs these rows, and `saved` holds them: T topk rows of hidden_out columns, which
             the other choice does not save. probs NULL without a route: the combine adds rows as they are, which is
             what config.prob_on_input needs; with config.prob 0, NULL says so to a query too.
   mlp       has what belongs to the experts: config, w1, b1, w2, b2, dw1, dw2, db1, db2, queue, hooks, quant. The layer
             sets all other fields (groups, options, x, prob, y, saved, dy, dx, dprob, deferred, indices of rows), which
             must be 0. config.topk is the layer's, or 0.
   NULL      What is NULL is not wanted, nor computed. saved NULL in fwd is inference. bwd leaves out steps that only
             results need which are NULL: dx, dprobs, route.dlogits, gradients in mlp.
   Tokens that other ranks have sent lie by expert already, with a split instead of indices: gmm_mlp takes these.
   Shapes: x, dx [T, hidden]; out, dout [T, hidden_out]; indices, probs, dprobs [T, topk]; sizes [E]; weights: gmm_mlp.
   dtypes: x that of the weights, as in gmm_mlp; out, dout, dx F32, F16, BF16 each their own; indices, sizes int32;
       probs, dprobs fp32.  Aliasing: none. */
typedef struct gmm_moe {
    uint32_t struct_size;
    int32_t experts;          /* E >= 1: matrices of mlp.w1 and w2 */
    int64_t tokens;           /* T >= 0; T topk < 2^31 */
    int64_t capacity;         /* R < 2^31: rows of all experts. Slots that do not fit are dropped, and set
                                 GMM_FAULT_CAPACITY. 0 = as many as any routing needs: T topk, to which align adds at
                                 most align - 1 rows per expert */
    int32_t topk;             /* >= 1 */
    int32_t align;            /* rows of zeros fill up those of each expert to a multiple of it; 0 = 1 */
    const gmm_options *options; /* of every operation */
    const gmm_mlp *mlp;
    const gmm_route *route;   /* NULL: indices and probs are given */
    const int32_t *indices;   /* without route */
    const float *probs;       /* without route; NULL = none */
    float *dprobs;            /* bwd: gradient of probs or route.probs, 0 of dropped slots. NULL = not wanted; dlogits
                                 does not need it */
    const gmm_mat *x;
    const gmm_mat *out;       /* fwd writes */
    const gmm_mat *dout;      /* bwd reads */
    const gmm_mat *dx;        /* bwd writes; NULL = not wanted */
    int32_t *sizes;           /* rows of each expert, padding included: fwd writes, bwd reads. NULL = in saved or,
                                 for inference, the workspace */
    uint32_t *fault;          /* gmm_groups.fault; also GMM_FAULT_INDEX. NULL = not wanted */
    void *saved;              /* fwd writes, bwd reads; 256-byte aligned; NULL in fwd = inference */
    size_t saved_bytes;
    void *deferred;           /* bwd with delayed weight gradients: as gmm_mlp.deferred */
    size_t deferred_bytes;
    int32_t save_rows;        /* 1: saved has the permuted rows of x too. 0 is better with a recipe that quantizes x */
    int32_t reserved;         /* 0 */
} gmm_moe;

/* Engine, sizes and feature alignment of GMM_OP_MOE_FWD, GMM_OP_MOE_BWD, or GMM_OP_MLP_WGRAD: gmm_mlp_wgrad of what bwd
   queues. With saved NULL the workspace of GMM_OP_MOE_FWD suffices for training and inference, else for training.
   Stream, graph: none. Errors: those of the operation, except about addresses and buffers. */
GMMDEF gmm_status gmm_moe_query(gmm_context *ctx, gmm_op op, const gmm_moe *moe, gmm_info *info);

/* What gmm_moe.saved holds: "row_of" [T, topk], "slot_of" [R] and "sizes" [E] as in gmm_permute (sizes: where the
   caller has no array of them), "row_probs" [R] with config.prob, "y" where the combine weights rows, "x" [R, hidden]
   with save_rows; then the parts of the MLP, as gmm_saved_layout has them. */
typedef struct gmm_moe_layout {
    uint32_t struct_size;
    int32_t count;           /* parts, in the order of their offsets */
    int64_t bytes;           /* gmm_info.saved_bytes */
    gmm_saved_part part[16]; /* zeros from `count` on */
} gmm_moe_layout;

/* The layout of saved. It is the same for every engine, and for the descriptors of GMM_OP_MOE_FWD and GMM_OP_MOE_BWD.
   Stream, graph: none. Errors: as gmm_moe_query; GMM_E_NULL (layout). */
GMMDEF gmm_status gmm_moe_saved_query(gmm_context *ctx, gmm_op op, const gmm_moe *moe, gmm_moe_layout *layout);

/* out of the layer. Needs mlp, x, out, and route or indices (and probs with config.prob).
   Stream, graph: enqueued; capturable, and a replay may have other tokens and routings.
   Errors: as gmm_mlp_fwd and gmm_topk_fwd; GMM_E_CONFIG (fields that exclude each other, or that the layer sets). */
GMMDEF gmm_status gmm_moe_fwd(gmm_context *ctx, const gmm_moe *moe, void *workspace, size_t workspace_bytes,
                              gmm_stream stream);

/* Those of dx, dprobs, route.dlogits and the gradients in mlp that are not NULL. Needs dout, saved, and sizes if fwd
   has written them; x where gmm_mlp_bwd needs it, and for its dtype where weights are quantized; probs where they
   weight the combine; with dlogits what gmm_topk_bwd needs.
   With save_rows x is not read.
   Delayed weight gradients are recorded in mlp.queue, for gmm_mlp_wgrad. Until it has run, x, dout, saved, deferred,
   the matrices of dw1 and dw2, the fault word and the arrays of mlp.quant must remain unchanged. All else may be freed
   or overwritten as gmm_mlp_bwd says: the queue reads rows of x and dout by slot_of in saved, or permuted ones, of
   x in saved and of dout in deferred.
   Stream, graph: enqueued; capturable. A captured call fills the queue once, when it is captured; no replay does.
   Errors: as gmm_mlp_bwd and gmm_topk_bwd; GMM_E_CONFIG as gmm_moe_fwd. */
GMMDEF gmm_status gmm_moe_bwd(gmm_context *ctx, const gmm_moe *moe, void *workspace, size_t workspace_bytes,
                              gmm_stream stream);

/* Calls the `ready` hooks that `op` (GMM_OP_MOE_BWD, or GMM_OP_MLP_WGRAD of what it queues) calls outside of a capture;
   for callers who have launched a graph of the operation.  Stream, graph: passed to the hooks.
   Errors: those of gmm_moe_query; GMM_E_ARG (moe_fwd, which fires none). */
GMMDEF gmm_status gmm_moe_fire_hooks(gmm_context *ctx, gmm_op op, const gmm_moe *moe, gmm_stream stream);

/* ------------------------------------------------------------------------------------ 9 Pad, GLU interleave --- */

/* Multiple of rows to which the recipes of other libraries pad each group (1 = no padding): 256 for grouped-tensor
   kernels, else 32 for MXFP8, 128 for NVFP4, 16 for other FP8. This library needs no padding for any recipe. Pure. */
GMMDEF int32_t gmm_pad_align(gmm_recipe_kind recipe, int32_t grouped_tensor);

typedef struct gmm_pad_in {
    gmm_recipe_kind recipe;
    gmm_dispatcher dispatcher;
    int32_t grouped_tensor;       /* the experts use grouped-tensor kernels */
    int32_t router_padding;       /* the router was asked to round counts up */
    int32_t router_padding_done;  /* and every count is a multiple, which too few tokens make impossible */
    int32_t permute_fusion;       /* permutation is fused, by a kernel that pads */
} gmm_pad_in;

/* The multiple to which the expert MLP must pad. *align is 1 where it need not pad: the recipe does not ask for it, or
   rows arrive padded from the router (only if router_padding_done), from HybridEP or NCCL-EP, or from DeepEP's fused
   permute-and-pad with grouped tensors. Pure.
   Errors: GMM_E_NULL, GMM_E_CONFIG (unknown recipe or dispatcher). */
GMMDEF gmm_status gmm_pad_decide(const gmm_pad_in *in, int32_t *align, gmm_error *error);

/* Rounds every group up to `align` rows. Empty groups stay empty; new rows and their probabilities are zeros.
   Shapes: src [T, cols] in the order of `groups`; dst [R, cols]; src_prob [T], dst_prob [R]; sizes [G].
   dtypes: src and dst share any dtype of whole bytes.  Aliasing: none. */
typedef struct gmm_padding {
    uint32_t struct_size;
    int32_t align;            /* >= 1 */
    int64_t cols;             /* >= 1 */
    int64_t padded_capacity;  /* R; at least T + G (align - 1) always suffices */
    const gmm_groups *groups; /* the unpadded split; tail and fault apply to the destination */
    const gmm_options *options;
    const gmm_mat *src;       /* pad: [T, cols]; unpad: [R, cols] */
    const gmm_mat *dst;       /* pad: [R, cols]; unpad: [T, cols] */
    const float *src_prob;
    float *dst_prob;          /* both or none */
    int32_t *sizes;           /* pad: padded sizes; NULL = not wanted */
} gmm_padding;

/* Engine and workspace of GMM_OP_PAD or GMM_OP_UNPAD.  Stream, graph: none. Errors: as the operation. */
GMMDEF gmm_status gmm_pad_query(gmm_context *ctx, gmm_op op, const gmm_padding *padding, gmm_info *info);

/* Pads. Stream, graph: enqueued; capturable. Errors: as gmm_linear_fwd; a padded sum above R is GMM_FAULT_CAPACITY, or
   GMM_E_SPLIT where a faulty split is. */
GMMDEF gmm_status gmm_pad(gmm_context *ctx, const gmm_padding *padding, void *workspace, size_t workspace_bytes,
                          gmm_stream stream);

/* Removes the padding: the inverse of gmm_pad on the live rows.
   Stream, graph: enqueued; capturable. Errors: as gmm_pad. */
GMMDEF gmm_status gmm_unpad(gmm_context *ctx, const gmm_padding *padding, void *workspace, size_t workspace_bytes,
                            gmm_stream stream);

/* Permutes FC1's gate part a and linear part b between halves [a | b] and blocks [a:B | b:B | a:B ...].
   Shapes: by axis. GMM_GLU_ROWS permutes the rows of count matrices of [2 ffn, cols]: weights, biases (cols = 1, ld = 1
       and group_stride = 2 ffn). GMM_GLU_COLUMNS permutes the columns of one matrix of [count, 2 ffn]: activations.
   dtypes: src and dst share any dtype of whole bytes.  Aliasing: none, not in place. */
typedef enum gmm_glu_axis { GMM_GLU_ROWS = 0, GMM_GLU_COLUMNS = 1, GMM_GLU_AXIS_MAX = 0x7fffffff } gmm_glu_axis;

typedef struct gmm_glu {
    uint32_t struct_size;
    gmm_glu_axis axis;
    int32_t inverse;     /* 0: halves to blocks; 1: blocks to halves */
    int32_t block;       /* B >= 1, a divisor of ffn; B = ffn is the identity */
    int64_t ffn;         /* >= 1 */
    int64_t count;       /* matrices or rows, >= 0 */
    int64_t cols;        /* ROWS: columns of each matrix, >= 1; COLUMNS: not read */
    const gmm_options *options;
    const gmm_mat *src;  /* ROWS: packed or table; COLUMNS: packed */
    const gmm_mat *dst;
} gmm_glu;

/* Engine and workspace of GMM_OP_GLU_INTERLEAVE.  Stream, graph: none. Errors: as the operation. */
GMMDEF gmm_status gmm_glu_query(gmm_context *ctx, gmm_op op, const gmm_glu *glu, gmm_info *info);

/* Interleaves, or restores the halves.  Stream, graph: enqueued; capturable.
   Errors: as gmm_linear_fwd; GMM_E_CONFIG (block). */
GMMDEF gmm_status gmm_glu_interleave(gmm_context *ctx, const gmm_glu *glu, void *workspace, size_t workspace_bytes,
                                     gmm_stream stream);

/* ------------------------------------------------------------------------------------------ 10 Small operations --- */

/* y = beta y + scale (x_0 + x_1 + ... + x_{count - 1}), which reduces gradients into main_grad: in fp32, in this order,
   with one rounding at the store. beta 0 does not read y. A scale of 0 means 0, unlike other fields with a default.
   Shapes: x count matrices of [rows, cols], packed or a table; y [rows, cols].
   dtypes: x and y each F32, F16 or BF16.  Aliasing: y may be one of x, with the same dtype and ld; else none. */
typedef struct gmm_accumulation {
    uint32_t struct_size;
    int32_t count;           /* >= 1 */
    int64_t rows;            /* >= 0 */
    int64_t cols;            /* >= 1 */
    const gmm_options *options;
    const gmm_mat *x;        /* a table is in host memory (GMM_MAT_TABLE_ON_HOST) and is read during the call */
    const gmm_mat *y;
    float scale;
    float beta;
} gmm_accumulation;

/* Engine and workspace of GMM_OP_ACCUMULATE.  Stream, graph: none. Errors: as the operation. */
GMMDEF gmm_status gmm_accumulate_query(gmm_context *ctx, const gmm_accumulation *accumulation, gmm_info *info);

/* Accumulates. Stream, graph: enqueued; capturable; a graph holds scale, beta and the addresses of a table.
   Errors: as gmm_linear_fwd. */
GMMDEF gmm_status gmm_accumulate(gmm_context *ctx, const gmm_accumulation *accumulation, void *workspace,
                                 size_t workspace_bytes, gmm_stream stream);

/* dst = src, row by row, rounded once to another dtype where dtypes differ.
   Shapes: src, dst [rows, cols], each with its own ld.
   dtypes: F32, F16 and BF16 into one another; any dtype of whole bytes into itself, which keeps every bit.
   Aliasing: none. */
typedef struct gmm_conversion {
    uint32_t struct_size;
    int32_t reserved;        /* 0 */
    int64_t rows;            /* >= 0 */
    int64_t cols;            /* >= 1 */
    const gmm_options *options;
    const gmm_mat *src;
    const gmm_mat *dst;
} gmm_conversion;

/* Engine and workspace of GMM_OP_CONVERT.  Stream, graph: none. Errors: as the operation. */
GMMDEF gmm_status gmm_convert_query(gmm_context *ctx, const gmm_conversion *conversion, gmm_info *info);

/* Converts. Stream, graph: enqueued; capturable. Errors: as gmm_linear_fwd. */
GMMDEF gmm_status gmm_convert(gmm_context *ctx, const gmm_conversion *conversion, void *workspace,
                              size_t workspace_bytes, gmm_stream stream);

/* ------------------------------------------------------------------------------------------- 11 Quantization --- */

/* Formats, recipes, storage and the order of scales: gmm_quant.h, sections 6 to 8.
   Every operation here takes either activations, split over groups (`groups` set; count and rows 0), or `count`
   matrices of fixed extents, such as weights (groups NULL). Groups may have any number of rows: the columnwise copy of
   activations has padding inside its buffer, whose size is that of gmm_layout_of_groups; the copies of matrices have
   the size of gmm_layout_of. The bits of a group depend on its own rows alone, except where the caller reduces its
   amax. */

/* A quantized matrix over existing memory, in `format`. amax: NV16, and TENSOR where it is wanted. */
static inline gmm_mat gmm_mat_quantized(const gmm_format *format, gmm_direction direction, void *data, void *scale,
                                        float *amax) {
    gmm_mat m = GMM_ZERO;
    m.dtype = format->dtype;
    m.scaling = format->scaling;
    m.scale_order = format->order;
    if (format->row_amax) m.flags |= (uint32_t)GMM_MAT_ROW_AMAX;
    if (format->e4m3_256) m.flags |= (uint32_t)GMM_MAT_E4M3_256;
    m.hadamard = direction == GMM_COLUMNWISE ? format->hadamard : 0;
    m.data = data;
    m.scale = scale;
    m.amax = amax;
    return m;
}

/* Shapes: src [T, cols] or count x [rows, cols]; copies as laid out by gmm_quant.h section 6; scale [G]; db [G][cols].
   Gathered rows: with src_index, src is [index_rows, cols], and its row src_index[r] / index_div (rounded down) stands
       for row r, as gmm_linear.x_index says. db is that of the gathered rows. Needs groups; not for gmm_requantize.
   dtypes: src F32, F16 or BF16 (Hadamard: BF16), for gmm_requantize any quantized ROWWISE copy; copies as `format`.
   Values are multiplied by fp32 scales and rounded once; the arithmetic is gmm_quant.h's. amax ignores NaN.
   Aliasing: rowwise.amax and columnwise.amax may be one array, except in formats with a transform; else none. */
typedef struct gmm_quantization {
    uint32_t struct_size;
    int32_t count;            /* matrices, >= 1; 0 with groups */
    int64_t rows;             /* of each matrix; 0 with groups */
    int64_t cols;             /* >= 1 */
    const gmm_groups *groups; /* NULL: fixed extents. tail applies to the elements of copies that are not padded */
    const gmm_options *options;
    const gmm_format *format;
    gmm_quant_phase phase;
    int32_t first_group;      /* stochastic: the number of group 0 in gmm_draw_block, so that one group can be redone */
    const gmm_mat *src;
    const gmm_mat *rowwise;   /* NULL = not wanted. amax: TENSOR [G], only raised if delayed; NV16 [G] or [T] */
    const gmm_mat *columnwise;
    const gmm_grad *db;       /* column sums of src, as gmm_linear_bgrad makes them; with groups, without skip */
    const int32_t *skip;      /* context memory, read when the work runs: nonzero writes nothing. NULL = 0 */
    const float *scale;       /* delayed: quantization scales, fp32, context memory; NULL = ones */
    const uint64_t *random;   /* stochastic: {seed, offset}, context memory; the caller advances the offset */
    const int32_t *src_index; /* [T], context memory: rows of src are gathered; NULL = they are not */
    int64_t index_rows;       /* with src_index: rows of src, 0 to 2^31 - 1 */
    int32_t index_div;        /* divisor of the entries of src_index, >= 1; 0 = 1 */
    int32_t reserved;         /* 0 */
} gmm_quantization;

/* Engine and workspace of GMM_OP_QUANTIZE or GMM_OP_REQUANTIZE.  Stream, graph: none. Errors: as the operation. */
GMMDEF gmm_status gmm_quantize_query(gmm_context *ctx, gmm_op op, const gmm_quantization *quantization, gmm_info *info);

/* The rowwise and columnwise copies of src that are wanted, both from its own values. Padding of data and scales is
   zeroed, except in the last 16 rows of a group that a Hadamard transform mixes (gmm_quant.h section 6). Transformed
   matrices of fixed extents have a multiple of 16 rows. An empty group has scale 1 (TENSOR; delayed: its scale as any
   other) and amax 0.
   Stream, graph: enqueued; capturable, and a replay may have other group sizes, skip, scale and random.
   Errors: as gmm_linear_fwd, GMM_E_CONFIG (format, phase). */
GMMDEF gmm_status gmm_quantize(gmm_context *ctx, const gmm_quantization *quantization, void *workspace,
                               size_t workspace_bytes, gmm_stream stream);

/* Quantizes the values of a quantized ROWWISE matrix: a second, lossy rounding of code times scale in fp32.
   Stream, graph, errors: as gmm_quantize. */
GMMDEF gmm_status gmm_requantize(gmm_context *ctx, const gmm_quantization *quantization, void *workspace,
                                 size_t workspace_bytes, gmm_stream stream);

/* The columnwise copy of matrices from the rowwise one, without rounding: transposes the elements and the scales of
   their blocks, and copies the amaxes of NV16. For TENSOR, 128X128 and NV16 with square blocks, whose blocks are the
   same in both directions, so that only one copy need be stored and communicated. The result is bit for bit the
   columnwise copy that gmm_quantize makes; with four_over_six it has the rowwise copy's choice of each scale, which
   gmm_quantize makes for each direction by sums of errors in other order.
   Blocks of NV16 may be cut short by the last rows and columns, of which E2M1 has even numbers. src and dst may have
   different scale orders.
   Shapes: src, dst count x [rows, cols]. Elements of dst between `rows` and its ld are not written; padding of scales
       is zeroed.  Aliasing: of NV16, src.amax and dst.amax may be one array; else none. */
typedef struct gmm_transposition {
    uint32_t struct_size;
    int32_t count;            /* >= 1 */
    int64_t rows, cols;       /* >= 1 */
    const gmm_options *options;
    const gmm_mat *src;       /* ROWWISE */
    const gmm_mat *dst;       /* COLUMNWISE, of the same dtype and scaling */
    const gmm_format *format; /* by which src was quantized; NV16 needs it, others may leave it NULL */
} gmm_transposition;

/* Engine and workspace of GMM_OP_TRANSPOSE; none for one matrix.  Stream, graph: none. Errors: as the operation. */
GMMDEF gmm_status gmm_transpose_query(gmm_context *ctx, const gmm_transposition *transposition, gmm_info *info);

/* Transposes. Stream, graph: enqueued; capturable. Errors: as gmm_linear_fwd. */
GMMDEF gmm_status gmm_transpose(gmm_context *ctx, const gmm_transposition *transposition, void *workspace,
                                size_t workspace_bytes, gmm_stream stream);

/* dst = the values of a quantized matrix, never transposed: code times scale in fp32, one rounding at the store. A copy
   of Hadamard-transformed values gives the transformed values.
   Shapes: dst [T, cols] or count x [rows, cols].  dtypes: dst F32, F16 or BF16.  Aliasing: none. */
typedef struct gmm_dequantization {
    uint32_t struct_size;
    int32_t count;
    int64_t rows, cols;
    const gmm_groups *groups;
    const gmm_options *options;
    gmm_direction direction;  /* of src */
    int32_t reserved;         /* 0 */
    const gmm_mat *src;
    const gmm_mat *dst;
} gmm_dequantization;

/* Engine and workspace of GMM_OP_DEQUANTIZE.  Stream, graph: none. Errors: as the operation. */
GMMDEF gmm_status gmm_dequantize_query(gmm_context *ctx, const gmm_dequantization *dequantization, gmm_info *info);

/* Dequantizes. Stream, graph: enqueued; capturable. Errors: as gmm_linear_fwd. */
GMMDEF gmm_status gmm_dequantize(gmm_context *ctx, const gmm_dequantization *dequantization, void *workspace,
                                 size_t workspace_bytes, gmm_stream stream);

/* Updates the scales of delayed scaling, once per step and direction, for `slots` tensors (experts and operands) of one
   dtype, by gmm_delayed_scale. gmm_quantize has recorded the amaxes in history[0]. Both arrays together are the state
   of delayed scaling between steps: training resumed from a checkpoint of them is bitwise the same.
   Shapes: history [length] rows of slots, `stride` apart; scale [slots]; fp32, context memory, initially zeros and
       ones. */
typedef struct gmm_scale_update {
    uint32_t struct_size;
    int32_t slots;            /* >= 0 */
    int32_t history_length;   /* >= 1 */
    int32_t margin, most_recent; /* as in gmm_recipe */
    gmm_dtype dtype;          /* E4M3 or E5M2 */
    int64_t stride;           /* floats from row to row of the history; 0 = slots */
    const gmm_options *options;
    float *history;
    float *scale;
    void *user;
    /* Called first, on the calling thread: enqueues the reduction of history[0] to its maximum over ranks, in place.
       NULL = none. Ranks must hold the same experts in the same slots. */
    gmm_status (*reduce)(void *user, float *amax, int32_t slots, gmm_stream stream);
} gmm_scale_update;

/* Updates history and scale. No workspace.  Stream, graph: enqueued; capturable if the callback is.
   Errors: GMM_E_NULL, GMM_E_ARG, GMM_E_DTYPE, GMM_E_STRIDE, GMM_E_OVERFLOW, GMM_E_ALIGN, GMM_E_VERSION,
       GMM_E_UNSUPPORTED, GMM_E_CUDA; the callback's. */
GMMDEF gmm_status gmm_update_scales(gmm_context *ctx, const gmm_scale_update *update, gmm_stream stream);

/* Quantizes weights whose fp32 masters are sharded over ranks: this rank has elements [start, start + length) of
   `count` concatenated matrices (gmm_ckpt_shard_members gives its part of each). Every rank calls, with or without a
   shard:
       phase AMAX   writes the amaxes of the rank's elements, and zeros for blocks without any: gmm_shard_amaxes floats
                    in the same order on all ranks. The caller then reduces them to their maximum over ranks, in place
       phase CAST   writes all scales (and amaxes) of the copies, and the codes of the rank's own elements; other codes
                    keep their bits, also the other half of a byte of E2M1
   Delayed scaling needs no phase AMAX before CAST, which multiplies by `scale`; AMAX gives the amaxes for the history.
   The codes of all ranks together are the copies that gmm_quantize makes of the whole matrices, bit for bit. In a
   transposed columnwise copy the codes of a shard are not contiguous; where blocks are the same in both directions,
   gmm_transpose makes that copy of the gathered rowwise codes instead.
   Shapes: master [length], which may start and end within blocks and bytes; copies count x [rows, cols].
   dtypes: copies as `format`: TENSOR, 1X128, 128X128, MX32, NV16 without transform, stochastic rounding, choice of
       scales and amaxes per row. cols even.  Aliasing: rowwise.amax and columnwise.amax may be one array; else none. */
typedef struct gmm_sharding {
    uint32_t struct_size;
    int32_t count;            /* matrices, >= 1 */
    int64_t rows, cols;       /* of each, >= 1 */
    int64_t start, length;    /* of the shard; -1 and 0: none */
    const gmm_options *options;
    const gmm_format *format;
    gmm_dtype model;          /* dtype to which masters are rounded first: BF16 or F16; F32 = no rounding */
    gmm_quant_phase phase;    /* AMAX or CAST */
    const float *master;      /* NULL without a shard */
    float *amax;              /* delayed: phase CAST does not read it */
    const gmm_mat *rowwise;   /* NULL = not wanted. Phase AMAX reads which copies are wanted, and writes neither */
    const gmm_mat *columnwise;
    const float *scale;       /* delayed: [count]; NULL = ones */
} gmm_sharding;

/* Floats of gmm_sharding.amax; 0 where the format is not one of these, which gmm_shard_cast refuses. `columnwise`: with
   a columnwise copy. Pure. */
GMMDEF int64_t gmm_shard_amaxes(const gmm_format *format, int32_t count, int64_t rows, int64_t cols, int columnwise);

/* Runs one phase. No workspace.  Stream, graph: enqueued; capturable.
   Errors: as gmm_quantize; GMM_E_ARG (start, length), GMM_E_CONFIG (format, phase), GMM_E_NULL (master, amax). */
GMMDEF gmm_status gmm_shard_cast(gmm_context *ctx, const gmm_sharding *shard, gmm_stream stream);

/* --------------------------------------------------------------------------------------------------- 12 Runtime --- */

typedef struct CUevent_st *gmm_event; /* a cudaEvent_t; in a CPU context an object of this library */

enum { GMM_EVENT_EXTERNAL = 1u }; /* while capturing, the record or wait becomes a node of the graph, which records or
                                     waits for the event at every replay (cudaEventRecordExternal,
                                     cudaEventWaitExternal); otherwise no effect */

/* A range of memory that work accesses, for runtimes that check the order of accesses. */
typedef struct gmm_range {
    const void *data;
    size_t bytes;
    int32_t writes;   /* 1: written, perhaps read too; 0: only read */
    int32_t reserved; /* 0 */
} gmm_range;

/* Operations for a stream: `function` enqueues them. */
typedef struct gmm_work {
    uint32_t struct_size;
    int32_t range_count;
    const char *name;        /* for messages; outlives the work */
    gmm_status (*function)(const void *argument, gmm_stream stream);
    const void *argument;
    size_t argument_bytes;
    const gmm_range *ranges; /* all memory that the operations access; may be NULL for runtimes that do not check it */
} gmm_work;

/* Streams, events, copies and fills of one memory space, as a table of functions. gmm_runtime_of fills it for a
   context; a caller with its own kind of streams fills one itself. Every function takes `self` first.
   Order       Operations of one stream run in the order in which they were enqueued; events order streams. The host
               waits in stream_sync and event_sync only. On the CPU operations are done on return, and the only stream
               is NULL.
   Stream, graph: record, wait, copies, fills and run are enqueued and capturable; stream_sync on a capturing stream
               is GMM_E_CAPTURE and leaves the capture intact. Other functions do not take captured streams and events.
   Memory      Only the functions that create and destroy may allocate; on the CPU from the context's allocator.
   Errors: GMM_E_NULL, GMM_E_ARG (pitch below width, value above 255, unknown flags, a stream that is not NULL on the
               CPU), GMM_E_OVERFLOW, GMM_E_MEMORY, GMM_E_CAPTURE, GMM_E_CUDA, with a message in gmm_last_error of the
               context.
   Threads     As the context; the table lives as long as the context does. */
typedef struct gmm_runtime {
    uint32_t struct_size;
    gmm_space space;
    void *self;
    /* A stream that does not synchronise with the default stream. `priority` 0 is the default, lower numbers are higher
       priorities, clamped to the device's range. */
    gmm_status (*stream_create)(void *self, int32_t priority, gmm_stream *out);
    gmm_status (*stream_destroy)(void *self, gmm_stream stream); /* enqueued work still runs; NULL is allowed */
    /* Work enqueued from now on starts after the event's last record; without a record it does not wait. */
    gmm_status (*stream_wait)(void *self, gmm_stream stream, gmm_event event, uint32_t flags);
    gmm_status (*stream_sync)(void *self, gmm_stream stream);
    gmm_status (*event_create)(void *self, gmm_event *out); /* without time stamps */
    gmm_status (*event_destroy)(void *self, gmm_event event); /* NULL is allowed */
    gmm_status (*event_record)(void *self, gmm_event event, gmm_stream stream, uint32_t flags);
    gmm_status (*event_query)(void *self, gmm_event event, int32_t *done); /* 1: last record complete, or no record */
    gmm_status (*event_sync)(void *self, gmm_event event);
    /* Copies `width` bytes of each of `height` rows; either side may be host memory. No overlap. */
    gmm_status (*copy)(void *self, void *dst, const void *src, size_t bytes, gmm_stream stream);
    gmm_status (*copy2d)(void *self, void *dst, size_t dst_pitch, const void *src, size_t src_pitch, size_t width,
                         size_t height, gmm_stream stream);
    /* Sets bytes to `value`, 0 to 255. */
    gmm_status (*fill)(void *self, void *dst, int32_t value, size_t bytes, gmm_stream stream);
    gmm_status (*fill2d)(void *self, void *dst, size_t pitch, int32_t value, size_t width, size_t height,
                         gmm_stream stream);
    gmm_status (*is_capturing)(void *self, gmm_stream stream, int32_t *capturing);
    /* Calls work->function and returns its status. The runtime of a context calls it at once, with `stream`. A runtime
       whose streams are queues of its own copies the argument and calls the function later with stream NULL, perhaps on
       another thread: operations in it must use a context that is not used elsewhere at that time. */
    gmm_status (*run)(void *self, const gmm_work *work, gmm_stream stream);
} gmm_runtime;

/* The runtime of a context's memory space. out->struct_size 0 means the size in this header.
   Stream, graph: no effect on either. Errors: GMM_E_NULL, GMM_E_VERSION. */
GMMDEF gmm_status gmm_runtime_of(gmm_context *ctx, gmm_runtime *out);

/* ----------------------------------------------------------------------------------------------- 13 Checkpoints --- */

/* Converts the tensors of a checkpoint to those of a model: names, layouts, shards, dtypes. Host only; no context.

       gmm_ckpt_table    named tensors over storages (memory, or files behind callbacks)
       gmm_ckpt_scheme   how a family of checkpoints names and lays out its tensors
       gmm_ckpt_plan     strided moves from the source's tensors to the targets'

   The logical weight of a grouped linear is [experts][out][in], before expert parallelism (EP) and expert tensor
   parallelism (ETP) shard it; the `out` rows of a gated FC1 are its gate rows and then as many up rows. Each stored
   tensor is a box (a range of experts, rows and columns) of the logical weight, in the layout of its scheme. A plan
   intersects the boxes of the source with those of the target.
   Pure        Building a plan reads names, shapes and dtypes, never data. It reports every error that these can cause,
               with its reason and key, and changes nothing. Afterwards only input and output can fail.
   Exact       Every byte of a target is written once: gmm_ckpt_verify proves it from the moves. Every key of the source
               is used, kept, dropped by a rule, or named in an error.
   Memory      Tables and plans allocate from the allocator with which they were made (NULL: GMM_MALLOC); applying
               allocates nothing and uses the caller's scratch. Tables must outlive plans that read them.
   Threads     Tables and plans are not changed once they are complete: threads may share them, and apply disjoint
               ranges of moves at the same time. Hosts are little-endian.
   In functions below, `report` and `error` may be NULL. */

/* Why a checkpoint was refused. X(name, value, lower-case name, status) */
#define GMM_CKPT_REASON_LIST(X) \
    X(GMM_CKPT_FINE, 0, fine, GMM_OK) \
    X(GMM_CKPT_ARGUMENT, 1, argument, GMM_E_ARG) \
    X(GMM_CKPT_DUPLICATE_KEY, 2, duplicate_key, GMM_E_KEY) \
    X(GMM_CKPT_MISSING_INDEX, 3, missing_index, GMM_E_KEY) \
    X(GMM_CKPT_EXTRA_INDEX, 4, extra_index, GMM_E_KEY) \
    X(GMM_CKPT_EXTRA_KEY, 5, extra_key, GMM_E_KEY) \
    X(GMM_CKPT_AMBIGUOUS, 6, ambiguous, GMM_E_KEY) \
    X(GMM_CKPT_BOTH_LAYOUTS, 7, both_layouts, GMM_E_KEY) \
    X(GMM_CKPT_SHAPE, 8, shape, GMM_E_KEY) \
    X(GMM_CKPT_DTYPE, 9, dtype, GMM_E_DTYPE) \
    X(GMM_CKPT_NOT_DIVISIBLE, 10, not_divisible, GMM_E_CONFIG) \
    X(GMM_CKPT_GROUP_COUNT, 11, group_count, GMM_E_KEY) \
    X(GMM_CKPT_GLU_UNKNOWN, 12, glu_unknown, GMM_E_CONFIG) \
    X(GMM_CKPT_GLU_CONFLICT, 13, glu_conflict, GMM_E_CONFIG) \
    X(GMM_CKPT_SCALE_MISSING, 14, scale_missing, GMM_E_KEY) \
    X(GMM_CKPT_OVERFLOW, 15, overflow, GMM_E_OVERFLOW) \
    X(GMM_CKPT_NO_MEMORY, 16, no_memory, GMM_E_MEMORY)

typedef enum gmm_ckpt_reason {
#define GMM__X(name, value, text, status) name = value,
    GMM_CKPT_REASON_LIST(GMM__X)
#undef GMM__X
    GMM_CKPT_REASON_MAX = 0x7fffffff
} gmm_ckpt_reason;

/* Lower-case name of a reason, "?" if unknown. Pure. */
GMMDEF const char *gmm_ckpt_reason_name(gmm_ckpt_reason reason);

/* The result of a call; filled on success and on failure. */
typedef struct gmm_ckpt_report {
    gmm_error error;        /* status and sentence */
    gmm_ckpt_reason reason;
    char key[252];          /* the key concerned, truncated to fit; "" if none */
    int64_t matched;        /* source tensors that a linear used */
    int64_t kept, dropped;  /* other source tensors */
    int64_t missing;        /* tensors and whole layers that the source lacks; error.text lists them, as far as they
                               fit, as names with sets: "model.layers.{3,5-7}.mlp.experts.{0-3}.up_proj.weight" */
} gmm_ckpt_report;

enum { GMM_CKPT_RANK = 8, GMM_CKPT_LOOPS = 7 };

/* One named tensor, row-major and dense. In tables, arrays of these have no struct_size. */
typedef struct gmm_ckpt_tensor {
    const char *name;             /* NUL-terminated; tables hold copies */
    gmm_dtype dtype;              /* GMM_NONE: a type unknown here, whose bytes can be kept or dropped only */
    int32_t rank;                 /* 0 to GMM_CKPT_RANK */
    int64_t shape[GMM_CKPT_RANK]; /* >= 0; with E2M1, elements */
    int32_t storage;              /* of the table */
    int32_t reserved;             /* 0 */
    int64_t offset, bytes;        /* in the storage; bytes is shape times dtype size, and any number for GMM_NONE */
    int64_t tag;                  /* the caller's; copied to the target of a kept tensor */
} gmm_ckpt_tensor;

typedef struct gmm_ckpt_table gmm_ckpt_table;

/* An empty table. *out is NULL after a failure.  Errors: GMM_E_NULL, GMM_E_ARG (half an allocator), GMM_E_MEMORY. */
GMMDEF gmm_status gmm_ckpt_table_create(gmm_ckpt_table **out, const gmm_allocator *allocator, gmm_error *error);

/* Frees a table; NULL is allowed. */
GMMDEF void gmm_ckpt_table_destroy(gmm_ckpt_table *table);

/* Adds a storage of `bytes`: host memory at `base`, which must outlive the table, or with NULL one that
   gmm_ckpt_io.read reads.
   Errors: GMM_E_NULL, GMM_E_ARG (bytes < 0), GMM_E_MEMORY. */
GMMDEF gmm_status gmm_ckpt_table_add_storage(gmm_ckpt_table *table, const void *base, int64_t bytes, int32_t *storage,
                                             gmm_error *error);

/* Adds a tensor; tensors may share bytes. A failure leaves the table unchanged.  Errors (reason): GMM_E_NULL, GMM_E_ARG
   (argument: rank, storage, a negative extent, bytes that contradict shape and dtype, bytes outside of the storage),
   GMM_E_DTYPE (dtype), GMM_E_KEY (duplicate_key), GMM_E_OVERFLOW, GMM_E_MEMORY. */
GMMDEF gmm_status gmm_ckpt_table_add(gmm_ckpt_table *table, const gmm_ckpt_tensor *tensor, gmm_ckpt_report *report);

/* The tensors in the order in which they were added, valid until another is added. The index of a name, -1 if there is
   none. */
GMMDEF const gmm_ckpt_tensor *gmm_ckpt_table_tensors(const gmm_ckpt_table *table, int64_t *count);
GMMDEF int64_t gmm_ckpt_table_find(const gmm_ckpt_table *table, const char *name);

/* ---- Schemes: how checkpoints name and lay out the tensors of a layer. */

/* Linears of a layer. X(name, value, lower-case name, grouped over experts, rows cut by ETP, columns cut by ETP) */
#define GMM_CKPT_SLOT_LIST(X) \
    X(GMM_CKPT_FC1, 0, fc1, 1, 1, 0) \
    X(GMM_CKPT_FC2, 1, fc2, 1, 0, 1) \
    X(GMM_CKPT_ROUTER, 2, router, 0, 0, 0) \
    X(GMM_CKPT_ROUTER_CORRECTION, 3, router_correction, 0, 0, 0) \
    X(GMM_CKPT_SHARED_FC1, 4, shared_fc1, 0, 0, 0) \
    X(GMM_CKPT_SHARED_FC2, 5, shared_fc2, 0, 0, 0) \
    X(GMM_CKPT_SHARED_GATE, 6, shared_gate, 0, 0, 0)

typedef enum gmm_ckpt_slot {
#define GMM__X(name, value, text, grouped, rows, cols) name = value,
    GMM_CKPT_SLOT_LIST(GMM__X)
#undef GMM__X
    GMM_CKPT_SLOT_COUNT,
    GMM_CKPT_SLOT_ANY = 0x7ffffffe, /* in a row: any slot, of linears that have a path */
    GMM_CKPT_SLOT_MAX = 0x7fffffff
} gmm_ckpt_slot;

typedef enum gmm_ckpt_kind {
    GMM_CKPT_WEIGHT = 0,
    GMM_CKPT_BIAS = 1,
    GMM_CKPT_SCALE = 2,        /* of the weight's blocks */
    GMM_CKPT_TENSOR_SCALE = 3, /* one value that multiplies all scales of a matrix */
    GMM_CKPT_AMAX = 4,         /* one value: the largest absolute value of a matrix */
    GMM_CKPT_KIND_COUNT = 5,
    GMM_CKPT_KIND_MAX = 0x7fffffff
} gmm_ckpt_kind;

typedef enum gmm_ckpt_half {
    GMM_CKPT_BOTH = 0, /* gate and up rows in one tensor, or an ungated linear */
    GMM_CKPT_GATE = 1,
    GMM_CKPT_UP = 2,
    GMM_CKPT_HALF_MAX = 0x7fffffff
} gmm_ckpt_half;

/* How a tensor stores matrices of r x c: out x in, or in x out in a transposed row. */
typedef enum gmm_ckpt_form {
    GMM_CKPT_EACH = 0,    /* one expert: [r, c], a vector [r] */
    GMM_CKPT_STACKED = 1, /* all experts: [E, r, c] or [E r, c], vectors [E, r] or [E r] */
    GMM_CKPT_WIDE = 2,    /* all experts: the shape is [r, E c], the bytes are those of [E, r, c] */
    GMM_CKPT_TALL = 3,    /* all experts, as STACKED, but targets have the shape [E r, c] */
    GMM_CKPT_FORM_MAX = 0x7fffffff
} gmm_ckpt_form;

/* One kind of tensor in a scheme. Patterns consist of dotted segments; {p} at the front is the linear's path, {L} its
   layer and {e} the expert, both integers without leading zeros. */
typedef struct gmm_ckpt_row {
    const char *pattern;
    gmm_ckpt_slot slot;
    gmm_ckpt_kind kind;
    gmm_ckpt_half half;
    gmm_ckpt_form form;
    int32_t transposed;
    gmm_scaling scaling; /* 128X128: of weights that may be quantized in any format below, and of their scales, tensor
                            scales and amaxes. MX32: of gpt-oss's U8 blocks [..., r, c / 32, 16] and their scales. NONE:
                            of weights in 16 or 32 bits, which are quantized only if the linear has rows of scales */
} gmm_ckpt_row;

typedef struct gmm_ckpt_scheme {
    const char *name;
    const gmm_ckpt_row *rows;
    int32_t count;
    int32_t glu_known;    /* 1: BOTH rows have gate and up in blocks of glu_block (0 = halves); 0: the caller states
                             it */
    int32_t glu_block;
    int32_t global_index; /* 1: {e} counts the experts of all EP ranks; 0: those of the rank */
} gmm_ckpt_scheme;

/* A scheme of this library; NULL for an unknown name. gmm_ckpt_scheme_at enumerates them: NULL past the last. Pure.
       module       {p}.weight0.. or {p}.weight, and biases likewise, of linears that have a path
       megatron     Megatron's grouped linears, indexed or grouped, with router and shared experts
       sequential   Megatron's SequentialMLP
       legacy       Megatron's old GroupedMLP: weight1 [H, E 2F] (E F ungated), weight2 [E F, H]; reads [E, F, H] too
       mixtral, qwen2-moe, qwen3-moe (also OLMoE), deepseek-v3
       fused, fused-transposed   Hugging Face's stacked gate_up_proj [E, 2F, H] or [E, H, 2F]
       gpt-oss      interleaved by 1, biases, MXFP4 blocks or 16-bit [E, H, 2F]
   All but legacy, fused and fused-transposed have names of scales: see below. */
GMMDEF const gmm_ckpt_scheme *gmm_ckpt_scheme_of(const char *name);
GMMDEF const gmm_ckpt_scheme *gmm_ckpt_scheme_at(int32_t index);

/* ---- Quantized weights

   A plan finds the format of a linear's weights by the dtypes and shapes of weights and scales. R x C is the matrix of
   one expert in its tensor.
       format     weight                            scales
       128X128    E4M3, E5M2 [R, C]                 F32, BF16 [R/128, C/128]
       ROW        E4M3, E5M2 [R, C]                 F32, BF16 [R] or [R, 1]
       TENSOR     E4M3, E5M2 [R, C]                 F32, BF16 [], [1] or [1, 1]; an F32 amax may stand beside it
       MX32       E4M3, E5M2 [R, C] (MXFP8); U8 [R, C/2], E2M1 [R, C], gpt-oss's blocks (MXFP4)
                                                    E8M0, U8 [R, C/32]
       NV16       U8 [R, C/2], E2M1 [R, C]          E4M3 [R, C/16]; beside them an F32 tensor scale, an F32 amax, or
                                                    both, of shapes [], [1] or [1, 1] (NVFP4)
   Quotients are rounded up, except C/2. A byte has two 4-bit codes, the one of the even column in its low half; E2M1
   counts codes. Tensors of all experts have an extent of E in front, or E times the first extent where the shape has
   one. Several formats may fit small matrices: the first of the order above is taken, of those that are stacked as
   their weights first. A [1, 1] of at most 128 x 128 is 128X128.
   Bytes      Files hold what frameworks store: plain row-major scales of the rowwise copy, without the padding, the
              order and the swizzle of gmm_layout_of, which a caller makes after loading. Columnwise copies and the
              scales of activations are none of the weights' tensors: they are extra keys.
   Names      module, megatron and sequential put _scale_inv or _scale, _tensor_scale and _amax behind "weight", in
              front of an expert's index: weight_scale_inv3. mixtral, qwen2-moe, qwen3-moe and deepseek-v3 have
              weight_scale_inv or weight_scale, and weight_scale_2 for the tensor scale; no amax. Scales keep their
              name where the target's scheme has it. All multiply: a reciprocal, as compressed-tensors'
              weight_global_scale, is an extra key.
   Moves      With target.dtype NONE, codes and scales are copied: scales are stacked, split, cut, joined and
              interleaved as the rows and columns of their blocks. Scales of one value, of a row or of a matrix, go to
              every target that has a part of their block. Dequantizing is for all formats but NV16 (dtype); to
              dequantize several experts, weights and scales must both be EACH or both not EACH (shape).
   Refused    not_divisible, with the weight's key, the block and the row or column: a boundary of an ETP rank, of gate
              and up rows or of their blocks inside a block; a boundary of GTP at no multiple of its unit for the format
              (128 rows for 128X128, 32 for MX32, 16 for NV16, any for ROW and TENSOR); scales of one value that would
              have to be joined, of ETP ranks or of gate and up, unless equal_scales says that they are equal. GTP ranks
              share the scale of a matrix, and the first one's is read.
              scale_missing: scales of any expert or half, or an NV16 weight without tensor scale and amax.
              dtype, shape: scales that no format has, also where experts differ.
              both_layouts: scales under two names, or for all experts together and for each.
              extra_index, extra_key: scales of experts that are not declared, of weights that are not quantized, and
              kinds that the format lacks. */

/* ---- Plans */

/* One linear before sharding. Arrays of these have no struct_size. */
typedef struct gmm_ckpt_linear {
    gmm_ckpt_slot slot;
    int32_t gated;         /* FC1: out is 2F, gate rows and then up rows */
    const char *path;      /* {p}, "decoder.layers.3.mlp.experts.linear_fc1"; NULL = by layer */
    int64_t layer;         /* {L} */
    int64_t experts;       /* of all EP ranks; slots that are not grouped: 1 (0 means 1) */
    int64_t out, in;       /* in 0: the weight is a vector */
    int32_t bias;          /* 1: it has a bias; 0: keys of a bias are extra */
    int32_t grouped_weight, grouped_bias; /* targets, where the scheme has both forms: 1 STACKED, 0 EACH */
    int32_t spare;         /* ROUTER, ROUTER_CORRECTION: rows of `out` behind those of the layer's experts */
    gmm_scaling scaling;   /* set by gmm_ckpt_scan: the format of quantized weights. Plans ignore it */
} gmm_ckpt_linear;

/* The rows that a rank of generalized tensor parallelism (GTP) has of the local matrix of its EP and ETP rank: row0,
   valid_rows and shard_rows of gmm_gtp_plan. Rows outside of the matrix are an argument error; a boundary inside GTP's
   unit of a quantized weight, and gate and up rows in separate tensors, are not_divisible. */
typedef struct gmm_ckpt_cut {
    int64_t row0, rows;
    int64_t stored_rows; /* rows of the tensor; those past `rows` are written as zeros */
} gmm_ckpt_cut;

/* Coordinates of the rank whose shards a table contains or a target is. Sizes of 0 mean 1. */
typedef struct gmm_ckpt_rank {
    int32_t ep_rank, ep_size;
    int32_t etp_rank, etp_size;
    int32_t gtp_rank, gtp_size; /* sources: the weight's rows are those of the ranks in this order. Targets: see cuts */
} gmm_ckpt_rank;

/* A whole checkpoint, or the file of one rank. Arrays of these have no struct_size. */
typedef struct gmm_ckpt_part {
    const gmm_ckpt_table *table;
    gmm_ckpt_rank rank;
} gmm_ckpt_part;

/* The layout of gate and up rows in one tensor, if known: the block B in [gate:B | up:B | gate:B ...]. */
typedef struct gmm_ckpt_glu {
    int32_t known;
    int32_t block; /* 0 = halves */
} gmm_ckpt_glu;

/* What to do with extra keys, which no linear uses; scales of weights that are not quantized are extra too. */
typedef enum gmm_ckpt_extra {
    GMM_CKPT_EXTRA_REFUSE = 0,
    GMM_CKPT_EXTRA_KEEP = 1, /* they become targets of the same name, shape and bytes */
    GMM_CKPT_EXTRA_DROP = 2,
    GMM_CKPT_EXTRA_MAX = 0x7fffffff
} gmm_ckpt_extra;

/* How to read the source. Nothing is inferred beyond these rules.
   Keys       A key is matched segment by segment, without its wrapper segments: a state's prefix, the model's prefix, a
              row's pattern. Where linears have paths, a key belongs to the longest path with which its module ends.
   Prefix     All keys have the same model prefix: the stated one, which is empty or ends with a dot, and whose wrapper
              segments keys must have; else the empty one if any key has it; else the only one found (of several, keys
              are ambiguous). Keys with other prefixes are extra.
   Linears    The linears of a layer must agree: FC1 and FC2 in experts and features, a router's rows (less
              gmm_ckpt_linear.spare) with the experts. Every part has all experts of its rank, and every state that has
              any key has all linears.
   GLU        The GLU layout is that of the scheme, the stated one, or the one recorded in the file's metadata; where
              several are known they must agree. It may be unknown only where gate and up rows stay together and in
              place. */
typedef struct gmm_ckpt_source {
    uint32_t struct_size;
    int32_t part_count;            /* >= 1; bytes that several parts contain are read from the first */
    const gmm_ckpt_part *parts;
    const gmm_ckpt_scheme *scheme;
    const char *prefix;            /* "model." or ""; NULL = found by the rule above */
    const char *const *wrappers;   /* [wrapper_count] segments ignored in keys and paths, such as "module" */
    const char *const *states;     /* [state_count] prefixes of equal trees, such as "" and "optimizer.exp_avg."; NULL =
                                      "" alone. A state without any key is absent */
    int32_t wrapper_count, state_count;
    gmm_ckpt_glu stated, recorded;
    gmm_ckpt_extra extra;
    int32_t skip_missing;          /* 1: layers, linears and EACH experts that the source lacks are no targets, and a
                                      stack needs all of its experts; 0: they are errors */
    int32_t prefer_target;         /* 1: where EACH and STACKED are both present, the form of the target is read and the
                                      other dropped */
    int32_t drop_extra_state;      /* 1: keys with a segment `_extra_state` or, numbered, `_extra_state3` are dropped;
                                      0: they are extra. Their data is never read */
    int32_t equal_scales;          /* 1: where ETP's ranks, or gate and up, have a scale each of a block that the target
                                      has one scale for, these scales are equal, and the first is read; 0: an error */
} gmm_ckpt_source;

/* The tensors that the model needs. */
typedef struct gmm_ckpt_target {
    uint32_t struct_size;
    int32_t state_count;           /* 0: the source's states */
    const gmm_ckpt_scheme *scheme; /* NULL = the source's */
    const char *prefix;            /* NULL = the source's */
    const char *const *states;     /* one name for each of the source's */
    gmm_ckpt_rank rank;            /* gtp_rank and gtp_size are not read */
    const gmm_ckpt_cut *cuts;      /* [linears] GTP, of grouped weights; NULL = whole */
    int32_t glu_block;             /* of BOTH rows of FC1; 0 = the scheme's, or halves. Shared experts have halves in
                                      source and target, whatever is stated or recorded */
    gmm_dtype dtype, bias_dtype;   /* F32, F16, BF16: of experts, converted or dequantized. NONE: as in the source.
                                      States, routers and kept tensors keep the dtype of the source */
    int32_t views;                 /* 1: a target whose bytes are contiguous in the source becomes a view of it */
    int32_t drop_wrappers;         /* 0: a wrapper segment keeps its place where the target's name begins with the
                                      segments in front of it; keys of one linear with different wrappers are
                                      ambiguous. 1: names have no wrappers, also those of kept tensors */
    int32_t reserved;              /* 0 */
} gmm_ckpt_target;

typedef struct gmm_ckpt_plan gmm_ckpt_plan;

/* Finds the linears of a source whose patterns have layers, and their extents, for gmm_ckpt_plan_create.
   Experts     `experts` is their number in every layer; further rows of a router are then spare. 0: the number follows
               from names and shapes of FC1 and FC2 (two-dimensional tensors of all experts do not give it), and the
               router must have as many rows.
   Gated       Whether a BOTH row of FC1 is gated follows from FC2's in.
   Complete    Unless skip_missing is 1, layers are numbered from 0 without a gap (a layer is present if any key names
               it), and all layers of experts have the same linears: FC1, FC2, router, shared experts, biases.
   *linears is allocated from the allocator, and freed by gmm_ckpt_linears_release.
   Errors (reason): as gmm_ckpt_plan_create. */
GMMDEF gmm_status gmm_ckpt_scan(const gmm_ckpt_source *source, int64_t experts, gmm_ckpt_linear **linears,
                                int64_t *count, const gmm_allocator *allocator, gmm_ckpt_report *report);
/* Frees what gmm_ckpt_scan allocated, with the same allocator. */
GMMDEF void gmm_ckpt_linears_release(gmm_ckpt_linear *linears, const gmm_allocator *allocator);

/* Plans a conversion. *out is NULL after a failure.
   Errors (reason): GMM_E_NULL, GMM_E_VERSION, GMM_E_ARG (argument), GMM_E_KEY, GMM_E_CONFIG (not_divisible,
       glu_unknown, glu_conflict), GMM_E_DTYPE, GMM_E_OVERFLOW, GMM_E_MEMORY: see GMM_CKPT_REASON_LIST. */
GMMDEF gmm_status gmm_ckpt_plan_create(gmm_ckpt_plan **out, const gmm_ckpt_source *source,
                                       const gmm_ckpt_target *target, const gmm_ckpt_linear *linears, int64_t count,
                                       const gmm_allocator *allocator, gmm_ckpt_report *report);

/* How gmm_ckpt_normalize_* treat keys that are inconsistent or ambiguous. */
typedef enum gmm_ckpt_parity {
    GMM_CKPT_SAFE = 0,     /* as errors */
    GMM_CKPT_UPSTREAM = 1, /* as Megatron-LM does: keys that do not fit are copied unchanged, keys match by their last
                              characters, shapes are not checked against the declared ones, and a later module sees the
                              keys that an earlier one made. Errors here but not in Megatron-LM: two tensors of one name
                              (duplicate_key), and a stack of several dtypes (dtype) or shapes (shape) */
    GMM_CKPT_PARITY_MAX = 0x7fffffff
} gmm_ckpt_parity;

/* gmm_ckpt_normalize_hook is Megatron-LM's load hook of one module: it converts the module's parameters between indexed
   and grouped keys, as linear->grouped_weight and grouped_bias say. Keys are prefix, and then weight, weight0, bias...;
   linear->path is not read. SAFE requires a prefix that is empty or ends with a dot; UPSTREAM takes any.
   gmm_ckpt_normalize_map is its map for reloading fp32 masters: the same conversion for many modules by their paths,
   under one common prefix. The prefix is not an argument: where keys of two prefixes match, the caller must give longer
   paths. SAFE ignores the segments `module` and `_orig_mod` in matching, and keeps them in names; a key belongs to the
   longest path with which its module ends.
   The plan's targets are the whole new table, including unchanged tensors. Plans consist of views and copies.
   Scales     SAFE requires the scales of E4M3, E5M2 and E2M1 weights, also where the weights are only copied, and
              converts them into the form of the weights. UPSTREAM converts them together with weights that it stacks or
              splits, and leaves them where it leaves the weights: Megatron-LM holds a quantized stack as one object,
              whose members have their scales. They are then required, in the form and with the prefix of their weights,
              with dtypes and shapes of a format (scale_missing, both_layouts, ambiguous, dtype, shape,
              not_divisible). U8 weights are codes in SAFE where they have in / 2 columns, in UPSTREAM where they have
              scales.
   Errors (reason): as gmm_ckpt_plan_create. */
GMMDEF gmm_status gmm_ckpt_normalize_hook(gmm_ckpt_plan **out, const gmm_ckpt_table *table, const char *prefix,
                                          const gmm_ckpt_linear *linear, gmm_ckpt_parity parity,
                                          const gmm_allocator *allocator, gmm_ckpt_report *report);
GMMDEF gmm_status gmm_ckpt_normalize_map(gmm_ckpt_plan **out, const gmm_ckpt_table *table,
                                         const gmm_ckpt_linear *linears, int64_t count, gmm_ckpt_parity parity,
                                         const gmm_allocator *allocator, gmm_ckpt_report *report);

/* Frees a plan; NULL is allowed. */
GMMDEF void gmm_ckpt_plan_destroy(gmm_ckpt_plan *plan);

/* The targets. All have a place in storage 0, one after another at 64-byte boundaries; the bytes of views there are not
   written. Valid as long as the plan. */
GMMDEF const gmm_ckpt_table *gmm_ckpt_plan_targets(const gmm_ckpt_plan *plan);

typedef enum gmm_ckpt_move_kind {
    GMM_CKPT_VIEW = 0,    /* the whole target is the source from element src_at on: nothing is copied */
    GMM_CKPT_COPY = 1,
    GMM_CKPT_CONVERT = 2, /* between F32, F16 and BF16, rounded once */
    GMM_CKPT_DEQUANT = 3, /* element times the scale of its block in fp32, rounded once: 128X128, ROW, TENSOR, MX32 */
    GMM_CKPT_ZERO = 4,
    GMM_CKPT_MOVE_KIND_MAX = 0x7fffffff
} gmm_ckpt_move_kind;

/* One strided copy: for all 0 <= i_l < count[l]:
       dst[dst_at + sum i_l dst_step[l]] = src[src_at + sum i_l src_step[l]], in elements. dst_step decreases from loop
   to loop. */
typedef struct gmm_ckpt_move {
    gmm_ckpt_move_kind kind;
    gmm_scaling scaling;  /* DEQUANT */
    int32_t part, loops;  /* loops >= 1 */
    int32_t src, dst;     /* tensors of the part's table and of the targets; ZERO has no src (-1) */
    int32_t scale;        /* DEQUANT: tensor of the part's table, else -1 */
    int32_t reserved;
    int64_t src_at, dst_at;
    int64_t count[GMM_CKPT_LOOPS], src_step[GMM_CKPT_LOOPS], dst_step[GMM_CKPT_LOOPS];
} gmm_ckpt_move;

/* The moves, in the order of part, storage and offset of the bytes that they read. Valid as long as the plan. */
GMMDEF const gmm_ckpt_move *gmm_ckpt_plan_moves(const gmm_ckpt_plan *plan, int64_t *count);

/* Proves that `count` moves (NULL: the plan's own) read and write within bounds and write every byte of every target
   exactly once (of a partial plan: at most once), where views count as written.
   Errors: GMM_E_NULL, GMM_E_STATE (the moves do not; the message names the target), GMM_E_MEMORY. */
GMMDEF gmm_status gmm_ckpt_verify(const gmm_ckpt_plan *plan, const gmm_ckpt_move *moves, int64_t count,
                                  gmm_error *error);

/* A plan of the caller's own moves, which gmm_gtp_export and gmm_gtp_import use. Name, dtype, rank and shape of targets
   are read; their storage and offsets are those that any plan gives. Moves are copied, their loops merged where they
   are contiguous, and sorted. They may be COPY, CONVERT, DEQUANT and ZERO, and are checked as gmm_ckpt_verify does.
   partial 1: other processes may write some bytes of the targets, and gmm_ckpt_verify only checks that none is written
   twice. Of parts, only tables are read.
   Errors (reason): GMM_E_NULL, GMM_E_ARG (argument), GMM_E_KEY (duplicate_key), GMM_E_DTYPE, GMM_E_OVERFLOW,
       GMM_E_MEMORY; GMM_E_STATE (argument: what gmm_ckpt_verify finds). */
GMMDEF gmm_status gmm_ckpt_plan_of_moves(gmm_ckpt_plan **out, const gmm_ckpt_part *parts, int32_t part_count,
                                         const gmm_ckpt_tensor *targets, int64_t target_count,
                                         const gmm_ckpt_move *moves, int64_t count, int32_t partial,
                                         const gmm_allocator *allocator, gmm_ckpt_report *report);

typedef struct gmm_ckpt_cost {
    uint32_t struct_size;
    int32_t reserved;
    int64_t bytes_read, bytes_written; /* by all moves */
    int64_t target_bytes;  /* of storage 0 of the targets */
    int64_t scratch_min;   /* gmm_ckpt_run.scratch_bytes; more is faster */
    int64_t moves[5];      /* by kind */
} gmm_ckpt_cost;

enum { GMM_CKPT_SCRATCH = 64 << 20 }; /* recommended gmm_ckpt_run.scratch_bytes */

/* The cost of applying all moves. Pure.  Errors: GMM_E_NULL, GMM_E_VERSION. */
GMMDEF gmm_status gmm_ckpt_cost_of(const gmm_ckpt_plan *plan, gmm_ckpt_cost *cost, gmm_error *error);

/* Callbacks return 0, or anything else to fail the call with GMM_E_IO. Offsets are bytes. */
typedef struct gmm_ckpt_io {
    void *user;
    int (*read)(void *user, int32_t part, int32_t storage, int64_t offset, void *to, int64_t bytes);
    int (*write)(void *user, int64_t target, int64_t offset, const void *from, int64_t bytes); /* inside the target */
    void (*done)(void *user, int64_t target); /* after the last move of a target, where moves run in order; or NULL */
} gmm_ckpt_io;

typedef struct gmm_ckpt_run {
    uint32_t struct_size;
    int32_t reserved;
    gmm_ckpt_io io;
    void *memory;          /* host memory of target_bytes for storage 0; NULL = io.write */
    void *scratch;         /* host memory, used during the call only */
    size_t scratch_bytes;
    int64_t end;           /* the move to stop before; 0 = all */
} gmm_ckpt_run;

/* Applies the moves from *cursor on. *cursor is advanced to the next move that is not done, also by a call that fails,
   so that a later call can continue; applying a move twice gives the same bytes. Targets must not overlap the source's
   memory.
   Errors: GMM_E_NULL, GMM_E_VERSION, GMM_E_ARG (cursor or end out of range, overlap), GMM_E_WORKSPACE (scratch below
       scratch_min), GMM_E_IO. */
GMMDEF gmm_status gmm_ckpt_apply(const gmm_ckpt_plan *plan, const gmm_ckpt_run *run, int64_t *cursor, gmm_error *error);

/* ---- Small rules of Megatron-LM's checkpoints, as pure functions. */

/* Splits one tensor into those of E experts: a first extent of E is removed, and one that is a multiple of E is divided
   into equal chunks. `members` is the number of tensors in a quantized group, which must be E; 0 = a plain tensor.
   parts [E] get shape, offset and bytes, and the tensor's name.
   Errors (reason): GMM_E_NULL, GMM_E_ARG, GMM_E_KEY (group_count), GMM_E_CONFIG (not_divisible). */
GMMDEF gmm_status gmm_ckpt_split(const gmm_ckpt_tensor *tensor, int32_t members, int32_t experts,
                                 gmm_ckpt_tensor *parts, gmm_ckpt_report *report);

typedef struct gmm_ckpt_interval {
    int64_t shard_at;  /* where the intersection lies in the shard; -1 = there is none */
    int64_t member_at; /* and in the member; -1 = there is none */
    int64_t length;
} gmm_ckpt_interval;

/* Intersects a flat shard [start, start + length) with each of the consecutive members. Every member gets an entry, so
   that all ranks have equally many. start -1 with length 0: no shard.
   Errors: GMM_E_NULL, GMM_E_ARG (negative or missing start, shard past the end), GMM_E_OVERFLOW. */
GMMDEF gmm_status gmm_ckpt_shard_members(const int64_t *numel, int32_t members, int64_t start, int64_t length,
                                         gmm_ckpt_interval *out, gmm_error *error);

/* One expert's parameter in Megatron's sharded checkpoints. */
typedef struct gmm_ckpt_stored {
    uint32_t struct_size;
    int32_t singleton;      /* 1: a key per expert, 0: one key for all with an expert axis */
    const char *prefix;     /* "decoder.layers.0.mlp." */
    gmm_ckpt_slot slot;     /* FC1 or FC2 */
    gmm_ckpt_kind kind;     /* WEIGHT or BIAS */
    int32_t gated;
    gmm_ckpt_half half;     /* of a gated FC1: GATE or UP */
    int64_t experts_local, index; /* experts of the rank; the expert's index among them */
    int32_t ep_rank, ep_size, etp_rank, etp_size; /* sizes of 0 mean 1 */
} gmm_ckpt_stored;

typedef struct gmm_ckpt_place {
    int64_t expert, experts;  /* offset on the expert axis and its extent (singleton: the key has the expert instead) */
    int32_t axis;             /* axis of the matrix that is divided into fragments; -1 = none */
    int32_t fragment, fragments;
} gmm_ckpt_place;

/* Writes the key (NUL-terminated, into `room` bytes) and the place.
   Errors: GMM_E_NULL, GMM_E_VERSION, GMM_E_ARG (a field out of range), GMM_E_WORKSPACE (room). */
GMMDEF gmm_status gmm_ckpt_stored_key(const gmm_ckpt_stored *stored, char *key, size_t room, gmm_ckpt_place *place,
                                      gmm_error *error);

#ifdef __cplusplus
}
#endif
GMM_QUIET_END
#endif /* GMM_MOE_GMM_H_INCLUDED */

/* -------------------------------------------------------------------------------------------- 14 Implementation --- */

/* Opens the implementation: includes and configuration.

   Names of locals in all parts: d is the call's own copy of its descriptor, with the defaults filled in; s is a
   gmm_status, e a cudaError_t; m is a gmm_mat, g a group, G the number of groups; K and N are the input and output
   features of a linear layer, and T is the capacity in rows. */

#if defined(GMM_IMPLEMENTATION) && !defined(GMM__IMPLEMENTATION_DONE)
#define GMM__IMPLEMENTATION_DONE

#include "gmm_quant.h" /* its implementation, where the declarations alone came before GMM_IMPLEMENTATION */
#include <stdlib.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#elif defined(__unix__) || defined(__APPLE__)
#include <unistd.h> /* sysconf */
#endif

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define GMM__X86
#include <immintrin.h>
#endif

#if defined(GMM_MALLOC) != defined(GMM_FREE)
#error "gmm: define both of GMM_MALLOC and GMM_FREE, or none"
#endif
#ifndef GMM_MALLOC
#define GMM_MALLOC(bytes) malloc(bytes)
#define GMM_FREE(memory) free(memory)
#endif

#ifdef GMM_WITH_NVTX
#include <nvtx3/nvToolsExt.h>
#endif
#ifdef __CUDACC__
#include <cuda_runtime.h>
#ifndef GMM_NO_CUBLASLT
#define GMM__CUBLASLT
#include <cublasLt.h>
#endif
#endif

#ifdef __cplusplus
extern "C" {
#endif

#ifdef __CUDACC__
#include "gmm_kernels.cuh"
#endif

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
    GMM__BYTES = GMM__FLOATS | 1 << GMM_E4M3 | 1 << GMM_E5M2 | 1 << GMM_E8M0 | 1 << GMM_U8 | 1 << GMM_I32 | 1 << GMM_I64
};

#ifdef __CUDACC__
/* Makes the context's device current; *current is the device that gmm__cuda_leave makes current again. */
static GMM__UNUSED cudaError_t gmm__cuda_enter(const void *self, int *current) {
    const gmm_context *ctx = (const gmm_context *)self;
    cudaError_t e;
    *current = ctx->config.device;
    e = cudaGetDevice(current);
    return e == cudaSuccess && *current != ctx->config.device ? cudaSetDevice(ctx->config.device) : e;
}
/* Makes `current` the current device again, and returns e as a status. */
static GMM__UNUSED gmm_status gmm__cuda_leave(void *self, const char *function, int current, cudaError_t e) {
    gmm_context *ctx = (gmm_context *)self;
    if (current != ctx->config.device) (void)cudaSetDevice(current);
    if (e == cudaSuccess) return GMM_OK;
    (void)cudaGetLastError();
    return gmm__fail(&ctx->error, GMM_E_CUDA, "gmm_runtime.%s: %s", function, cudaGetErrorString(e));
}
#endif

#if GMM__HOLDS(0) /* the operations stand in one unit */

/* The structures that the implementation passes from checks to engines: checked calls, plans, engine rows. */

/* Operands of a call by role. Families of operations use the same roles for corresponding operands. */
enum gmm__role {
    GMM__X_, GMM__W, GMM__BIAS, GMM__Y, GMM__DY, GMM__DX, GMM__DW, GMM__DB, /* linear, activation, the MLP's FC1 */
    GMM__W2, GMM__BIAS2, GMM__DW2, GMM__DB2,                                /* the MLP's FC2 */
    GMM__ROLES
};

/* A set of bytes in up to two nested loops: a run of `width` bytes, repeated count[0] times at a distance of step[0]
   bytes (the rows of a matrix), and all that count[1] times at a distance of step[1] bytes (the matrices). `loops` is
   the number of loops in use, 0 to 2. */
typedef struct gmm__box {
    uint64_t address;
    int64_t width, count[2], step[2];
    int32_t loops;
} gmm__box;

/* Memory that a call reads or writes, for gmm__check_overlap: `count` boxes of one form, `stride` bytes apart or at the
   addresses of a table that the host can read. Each has `size` bytes, gaps included; all lie in [low, high). */
typedef struct gmm__span {
    char name[32];
    const char *part; /* of the operand: "" = its elements, ".scale" */
    int32_t writes;
    int64_t count, stride;
    void *const *table;
    gmm__box box;
    uint64_t size, low, high;
} gmm__span;

/* Tiles of which an MLP's steps need the prefix sums: of casts, of transposed dequantizations and of bias gradients. */
enum gmm__tile_kind { GMM__TILES_128, GMM__TILES_16, GMM__TILES_512, GMM__TILE_KINDS };

enum { GMM__SPANS = 96 }; /* more than any operation records */

/* The text that gmm_describe writes: `used` of `bytes`, without the terminating NUL. Lines are indented by `depth`, the
   number of operations that the described one is a step of. */
typedef struct gmm__text {
    char *data;
    size_t bytes, used;
    int depth;
} gmm__text;

/* A checked call: descriptors are copied, defaults are filled in, and absent operands have dtype GMM_NONE. Engines read
   this structure alone, never the caller's descriptors. The call of a query has the same shapes, dtypes and operands,
   but its addresses may be NULL. */
typedef struct gmm__call {
    gmm_context *ctx;
    gmm_op op;
    int query;            /* 1: the call asks for a plan alone, and is not launched */
    const char *function; /* for messages */
    const char *path;     /* for messages: the descriptor's parameter name; NULL = the call has no descriptor */
    char shapes[112];     /* for messages: "G=8 T=4096 K=1024 N=2048 bf16" */
    gmm_options options;
    gmm_groups groups;
    gmm_mat mat[GMM__ROLES];
    gmm_direction direction[GMM__ROLES]; /* of quantized operands */
    int32_t in_align, out_align;         /* alignment of in and out; 0 = 1 */
    gmm_grad grad[GMM__ROLES]; /* of GMM__DW, GMM__DB, GMM__DW2, GMM__DB2; beta resolved by gmm__grad_beta */
    int64_t rows, in, out;     /* capacity, K, N; MLP: hidden and hidden_out */
    gmm_mlp_quant quant;       /* MLP with a recipe */
    gmm_recipe recipe;         /* of that MLP; kind NONE = no recipe */
    int64_t units;             /* quantization: number of matrices of fixed extents; 0 = the groups of the split */
    gmm_format format;
    union {
        gmm_linear linear;
        gmm_activation act;
        gmm_mlp mlp;
        gmm_moe moe;
        gmm_route route;
        gmm_dense_route dense;
        gmm_expert_bias bias;
        gmm_permute permute;
        gmm_padding pad;
        gmm_glu glu;
        gmm_accumulation sum;
        gmm_conversion convert;
        gmm_quantization quant;
        gmm_dequantization dequant;
        gmm_scale_update update;
        gmm_transposition transposition;
        gmm_sharding shard;
    } d;                    /* the descriptor of the operation */
    gmm_act act;            /* activation, MLP, and a quantization with act_source */
    const gmm_activation *act_source; /* a quantization within an MLP: its source is y of this activation, which the
                               cast computes. mat[GMM__DY] holds the gate columns of its x. NULL = there is none */
    float *act_amax;        /* an activation within an MLP: [G], the amaxes of y (forward) or dx (backward), which it
                               writes. NULL = not wanted */
    const gmm_activation *product_act; /* FC1's product within an MLP: mat[GMM__Y] is x of this activation, whose y the
                               product computes and writes too. NULL = there is none */
    int drops_preact;       /* with product_act: mat[GMM__Y] need not be written */
    gmm_mlp_config config;  /* MLP, layer */
    gmm_saved_layout mlp_saved; /* layer: what its MLP saves */
    int32_t *split_tiles;   /* [GMM__TILE_KINDS][G + 1] prefix sums of the groups' tiles. GMM_OP_OFFSETS writes them
                               too; other operations read them, and in groups.splits the offsets that an earlier
                               operation on the stream has written with them. NULL = none */
    int32_t tile_kinds;     /* GMM_OP_OFFSETS: bits of gmm__tile_kind, the sums that are wanted */
    const void *input;      /* further memory that an operation reads or writes, documented where it is used */
    void *output;
    int in_place;           /* 1: an output may be one of the inputs (gmm__may_replace) */
    gmm__text *describes;   /* gmm_describe: gets a line for each step of this call. NULL = not wanted */
    int32_t spans;
    gmm__span span[GMM__SPANS];
} gmm__call;

/* How an engine serves a call: the result of its plan function, which is pure, and the input of its launch function. */
enum { GMM__PARTS = 11 };
typedef struct gmm__plan {
    const gmm__call *call;
    gmm_engine engine;
    int32_t kernel;              /* row of the engine's kernel table */
    const char *kernel_name;     /* of a product; NULL = not known before the launch */
    int32_t assumes_aligned;     /* 1: a query left open an address that must be a multiple of 16 bytes */
    int32_t grid[3], block, cluster;
    size_t shared_bytes;
    size_t workspace_bytes;
    size_t part[GMM__PARTS];     /* offsets of the workspace's regions */
    size_t saved_bytes, deferred_bytes, weight_cache_bytes;
    void *workspace;             /* set by gmm__serve_plan before the launch */
    char note[192];              /* how the engine serves the call, or why it declines */
} gmm__plan;

/* An operation of an engine; NULL functions: the engine does not have it. */
typedef struct gmm__engine_op {
    int (*plan)(const gmm__call *call, gmm__plan *plan); /* 1 = yes; 0 = no, with a note */
    gmm_status (*launch)(const gmm__plan *plan, gmm_stream stream);
} gmm__engine_op;

/* A row of the engine table (core/engines.h). */
typedef struct gmm__engine_row {
    gmm_engine engine;
    gmm_space space;
    int automatic;    /* AUTO may choose it */
    const unsigned char *honours; /* by gmm__field: 1 = it honours the optional field */
    gmm__engine_op ops[GMM_OP_COUNT];
} gmm__engine_row;

/* Whether a name is that of a field of the call's descriptor, rather than of an argument of the function. */
static GMM__UNUSED int gmm__is_field(const gmm__call *call, const char *name) {
    static const char *const arguments[] = { "op", "info", "layout", "text", "workspace", "workspace_bytes", "stream" };
    int field = call->path && strcmp(name, call->path);
    size_t i;
    for (i = 0; i < sizeof arguments / sizeof arguments[0]; i++) field = field && strcmp(name, arguments[i]);
    return field;
}

/* Reads descriptors into a gmm__call and checks them, formats the messages of refused calls, records the memory of a
   call for the overlap check, and lays out the workspace of a plan. A function named gmm__read_* copies a descriptor
   and fills in its defaults; one named gmm__check_* only checks. */

/* Fails a call: "gmm_linear_fwd: linear.w: <value and rule> (<shapes>)". `argument` is a field of the call's
   descriptor, whose name the message puts before it, or another argument of the function. The text follows after a
   colon, unless it is a predicate of the argument ("is NULL", "has both data and table"). */
static GMM__UNUSED gmm_status gmm__refuse(const gmm__call *call, gmm_status status, const char *argument,
                                          const char *format, ...) {
    static const char *const predicates[] = { "is ", "and ", "has ", "lacks ", "must ", "goes " };
    const int field = gmm__is_field(call, argument);
    int is_predicate = 0;
    char text[320];
    size_t i;
    va_list list;
    va_start(list, format);
    (void)vsnprintf(text, sizeof text, format, list);
    va_end(list);
    for (i = 0; i < sizeof predicates / sizeof predicates[0]; i++)
        is_predicate |= !strncmp(text, predicates[i], strlen(predicates[i]));
    return gmm__fail(&call->ctx->error, status, "%s: %s%s%s%s %s%s%s%s", call->function, field ? call->path : "",
                     field ? "." : "", argument, is_predicate ? "" : ":", text,
                     call->shapes[0] ? " (" : "", call->shapes, call->shapes[0] ? ")" : "");
}

/* Fails a call because of a member of `argument`. `rule` begins with the member's name: "limit: -1 must be". */
static GMM__UNUSED gmm_status gmm__refuse_member(const gmm__call *call, gmm_status status, const char *argument,
                                                 const char *rule) {
    char path[96];
    const size_t name = strcspn(rule, ":");
    (void)snprintf(path, sizeof path, "%s.%.*s", argument, (int)name, rule);
    return gmm__refuse(call, status, path, "%s", rule + name + strspn(rule + name, ": "));
}

/* Copies a descriptor of the caller, whose first member is struct_size; members that an older caller lacks become 0. */
static GMM__UNUSED gmm_status gmm__read(gmm__call *call, const char *argument, void *dst, size_t size,
                                        const void *src) {
    uint32_t struct_size;
    if (!src) return gmm__refuse(call, GMM_E_NULL, argument, "is NULL");
    memcpy(&struct_size, src, sizeof struct_size);
    if (struct_size && struct_size < 2 * sizeof struct_size)
        return gmm__refuse(call, GMM_E_ARG, argument, "struct_size %u is too small for any version", struct_size);
    if (!gmm__copy_sized(dst, size, src))
        return gmm__refuse(call, GMM_E_VERSION, argument, "struct_size %u is larger than the %u bytes of version %s",
                           struct_size, (unsigned)size, GMM_VERSION_STRING);
    memset(dst, 0, sizeof struct_size); /* the copy has this version's size */
    return GMM_OK;
}

/* Copies the call's descriptor, whose name becomes the path of fields in messages. */
static GMM__UNUSED gmm_status gmm__read_descriptor(gmm__call *call, const char *argument, void *dst, size_t size,
                                                   const void *src) {
    call->path = argument;
    return gmm__read(call, argument, dst, size, src);
}

/* Groups and dtype of operands for the messages of a call whose descriptors are not checked yet; zeros where they
   cannot be read. */
static void gmm__peek_groups(const gmm_groups *groups, gmm_groups *g) {
    memset(g, 0, sizeof *g);
    if (groups) (void)gmm__copy_sized(g, sizeof *g, groups);
}
static const char *gmm__peek_dtype(const gmm_mat *mat) {
    gmm_mat m = GMM_ZERO;
    if (mat) (void)gmm__copy_sized(&m, sizeof m, mat);
    return gmm_dtype_name(m.dtype);
}

/* Begins a call. Every member before `span` becomes 0; `span` is left as it is, since `spans` is its length. */
static GMM__UNUSED gmm_status gmm__open(gmm__call *call, gmm_context *ctx, gmm_op op, const char *function, int query) {
    memset(call, 0, offsetof(gmm__call, span));
    if (!ctx) return GMM_E_NULL;
    call->ctx = ctx;
    call->op = op;
    call->function = function;
    call->query = query;
    return GMM_OK;
}

/* Repeats a box `count` times at a distance of `step` bytes, which is at least its extent. */
static void gmm__box_repeat(gmm__box *b, int64_t count, int64_t step) {
    const int32_t outermost = b->loops - 1;
    if (count < 1) b->width = 0;
    if (count <= 1) return;
    if (b->loops == 0 && step == b->width) b->width *= count;
    else if (b->loops > 0 && step == b->count[outermost] * b->step[outermost]) b->count[outermost] *= count;
    else {
        b->count[b->loops] = count;
        b->step[b->loops++] = step;
    }
}
/* The address behind the last byte of a box. */
static uint64_t gmm__box_end(const gmm__box *b) {
    uint64_t end = b->address + (uint64_t)b->width;
    int32_t i;
    for (i = 0; i < b->loops; i++) end += (uint64_t)((b->count[i] - 1) * b->step[i]);
    return end;
}

/* The address of box i of a span, and the box of a span at an address. */
static uint64_t gmm__span_at(const gmm__span *s, int64_t i) {
    return s->table ? (uintptr_t)s->table[i] : s->box.address + (uint64_t)(i * s->stride);
}
static gmm__box gmm__span_box(const gmm__span *s, uint64_t address) {
    gmm__box box = s->box;
    box.address = address;
    return box;
}

/* Records memory of a call for gmm__check_overlap: `count` boxes, at the addresses of `table` or `stride` bytes
   apart. */
static void gmm__add_boxes(gmm__call *call, const char *name, const char *part, int writes, const gmm__box *box,
                           void *const *table, int64_t count, int64_t stride) {
    gmm__span *s = &call->span[call->spans];
    const size_t length = strlen(name), max_length = sizeof s->name - 1;
    int64_t i;
    if (call->query || box->width == 0 || count < 1 || (!table && !box->address) || call->spans == GMM__SPANS) return;
    call->spans++;
    memcpy(s->name, name, length < max_length ? length : max_length);
    s->name[length < max_length ? length : max_length] = 0;
    s->part = part;
    s->writes = writes;
    s->table = table;
    s->count = count;
    s->stride = stride;
    s->box = *box;
    s->size = gmm__box_end(box) - box->address;
    s->low = s->high = gmm__span_at(s, 0);
    for (i = 1; i < count; i++) {
        const uint64_t address = gmm__span_at(s, i);
        if (address < s->low) s->low = address;
        if (address > s->high) s->high = address;
    }
    s->high += s->size;
}
/* The box of `rows` rows of `width` bytes, `pitch` bytes apart. */
static gmm__box gmm__rows_box(const void *address, int64_t rows, int64_t width, int64_t pitch) {
    gmm__box box;
    memset(&box, 0, sizeof box);
    box.address = (uintptr_t)address;
    box.width = width;
    gmm__box_repeat(&box, rows, pitch);
    return box;
}

/* Records `bytes` consecutive bytes of a call for gmm__check_overlap. */
static GMM__UNUSED void gmm__add_span(gmm__call *call, const char *name, const char *part, int writes,
                                      const void *address, int64_t bytes) {
    const gmm__box box = gmm__rows_box(address, 1, bytes, bytes);
    gmm__add_boxes(call, name, part, writes, &box, NULL, 1, 0);
}

/* Whether an operation writes the matrices of a role. */
static int gmm__writes(gmm_op op, int role) {
    if (op == GMM_OP_UNPERMUTE_FWD) return role == GMM__W; /* out */
    if (op == GMM_OP_UNPERMUTE_BWD) return role == GMM__DY; /* drows */
    return role == GMM__Y || role == GMM__DX || role == GMM__DW || role == GMM__DB || role == GMM__DW2 ||
           role == GMM__DB2;
}

/* Records the elements ("") or the scales (".scale") of an operand: one box for each matrix, `stride` bytes apart or at
   the addresses of a table, which is recorded too. The host cannot read the addresses in a table in device memory. */
static void gmm__add_operand(gmm__call *call, int role, const char *name, const char *part, gmm__box box,
                             void *const *table, int64_t matrices, int64_t stride) {
    const int readable = call->ctx->config.space == GMM_SPACE_CPU ||
                     (call->mat[role].flags & (uint32_t)GMM_MAT_TABLE_ON_HOST);
    if (table)
        gmm__add_span(call, name, part[0] ? ".scale_table" : ".table", 0, table, matrices * (int64_t)sizeof *table);
    else if (call->op != GMM_OP_ACCUMULATE) { /* an accumulation may write y over one matrix of x: boxes stay apart */
        gmm__box_repeat(&box, matrices, stride);
        matrices = 1;
    }
    if (!table || readable)
        gmm__add_boxes(call, name, part, gmm__writes(call->op, role), &box, table, matrices, stride);
}

static GMM__UNUSED gmm_status gmm__read_options(gmm__call *call, const gmm_options *options) {
    gmm_status s;
    if (options && (s = gmm__read(call, "options", &call->options, sizeof call->options, options)) != GMM_OK) return s;
    if (call->options.engine == GMM_ENGINE_AUTO) call->options.engine = call->ctx->config.engine;
    if (call->options.engine < GMM_ENGINE_AUTO || call->options.engine > GMM_ENGINE_CUBLASLT)
        return gmm__refuse(call, GMM_E_ARG, "options.engine", "%d is no engine", (int)call->options.engine);
    {
        const gmm_options *o = &call->options;
        const struct { const char *name; int64_t value, most; } ranges[] = {
            { "options.sm_limit", o->sm_limit, INT32_MAX }, { "options.tile", o->tile, INT32_MAX },
            { "options.workspace_limit", o->workspace_limit, INT64_MAX },
            { "options.fuse", o->fuse, GMM_FUSE_ALWAYS }, { "options.reserved", o->reserved, 0 },
            { "options.allow_nondeterminism", o->allow_nondeterminism, 1 },
            { "options.allow_tf32", o->allow_tf32, 1 }, { "options.fp8_fast_accum", o->fp8_fast_accum, 1 },
        };
        size_t i;
        for (i = 0; i < sizeof ranges / sizeof ranges[0]; i++)
            if (ranges[i].value < 0 || ranges[i].value > ranges[i].most)
                return gmm__refuse(call, GMM_E_ARG, ranges[i].name, "%lld must be %s%lld", (long long)ranges[i].value,
                                   ranges[i].most ? "from 0 to " : "", (long long)ranges[i].most);
    }
    return GMM_OK;
}

/* The size or the end offset of group g, as the split has it. */
static int64_t gmm__split_value(const gmm_groups *groups, int64_t g) {
    const int64_t i = groups->form == GMM_SPLIT_OFFSETS ? g + 1 : g;
    return groups->dtype == GMM_I64 ? ((const int64_t *)groups->splits)[i] : ((const int32_t *)groups->splits)[i];
}

/* The fault of a split on the host whose offsets do not begin with 0; 0 = none. */
static uint32_t gmm__split_first_fault(const gmm_groups *groups) {
    int64_t first;
    if (groups->form != GMM_SPLIT_OFFSETS) return 0;
    first = groups->dtype == GMM_I64 ? ((const int64_t *)groups->splits)[0] : ((const int32_t *)groups->splits)[0];
    return first == 0 ? 0 : (uint32_t)GMM_FAULT_MONOTONIC;
}

/* Whether a faulty split makes the call fail with a status: the host can read the split, and either it is stated to be
   on the host or no fault word reports the fault. */
static int gmm__split_is_status(const gmm__call *call) {
    return call->groups.on_host || (call->ctx->config.space == GMM_SPACE_CPU && !call->groups.fault);
}
/* Refuses faults in part of a split: g->count groups, of which the first is group `first` of the call and begins at row
   *begin; that of the next part replaces *begin. row_align 0: the promise is not checked. */
static GMM__UNUSED gmm_status gmm__check_sizes(const gmm__call *call, const char *argument, const gmm_groups *g,
                                               int32_t row_align, int64_t first, int64_t *begin) {
    uint32_t fault = first == 0 ? gmm__split_first_fault(g) : 0;
    int64_t i;
    if (fault)
        return gmm__refuse(call, GMM_E_SPLIT, argument, "the first offset is %lld, not 0",
                           (long long)gmm__split_value(g, -1));
    for (i = 0; i < g->count; i++) {
        const int64_t start = *begin;
        char rule[64];
        *begin = gmm_split_end(start, gmm__split_value(g, i), g->form, g->capacity, row_align, &fault);
        if (!fault) continue;
        if (fault & (uint32_t)GMM_FAULT_NEGATIVE) (void)snprintf(rule, sizeof rule, "must be >= 0");
        else if (fault & (uint32_t)GMM_FAULT_MONOTONIC)
            (void)snprintf(rule, sizeof rule, "must be >= the offset before it, %lld", (long long)start);
        else if (fault & (uint32_t)GMM_FAULT_CAPACITY)
            (void)snprintf(rule, sizeof rule, "the sum exceeds the capacity %lld", (long long)g->capacity);
        else (void)snprintf(rule, sizeof rule, "breaks the promise row_align %d", row_align);
        return gmm__refuse(call, GMM_E_SPLIT, argument, "%s %lld of group %lld: %s",
                           g->form == GMM_SPLIT_OFFSETS ? "end offset" : "size", (long long)gmm__split_value(g, i),
                           (long long)(first + i), rule);
    }
    return GMM_OK;
}
/* Refuses a faulty split where gmm__split_is_status says so. Results are correct even where sizes break the promise of
   row_align; that fault is therefore refused only in splits that are stated to be on the host (core/verify.h). */
static GMM__UNUSED gmm_status gmm__check_split(gmm__call *call, const char *argument) {
    const gmm_groups *g = &call->groups;
    int64_t begin = 0;
    if (!gmm__split_is_status(call)) return GMM_OK;
    return gmm__check_sizes(call, argument, g, g->on_host ? g->row_align : 0, 0, &begin);
}

static GMM__UNUSED gmm_status gmm__read_groups(gmm__call *call, const gmm_groups *groups) {
    gmm_groups *g = &call->groups;
    gmm_status s = gmm__read(call, "groups", g, sizeof *g, groups);
    if (s != GMM_OK) return s;
    if (g->count < 1) return gmm__refuse(call, GMM_E_ARG, "groups.count", "%d must be >= 1", g->count);
    if (g->capacity < 0)
        return gmm__refuse(call, GMM_E_ARG, "groups.capacity", "%lld must be >= 0", (long long)g->capacity);
    if (g->dtype != GMM_I32 && g->dtype != GMM_I64)
        return gmm__refuse(call, GMM_E_DTYPE, "groups.dtype", "%s must be i32 or i64", gmm_dtype_name(g->dtype));
    if (g->form != GMM_SPLIT_SIZES && g->form != GMM_SPLIT_OFFSETS)
        return gmm__refuse(call, GMM_E_ARG, "groups.form", "%d is neither sizes (0) nor offsets (1)", (int)g->form);
    if (g->tail != GMM_TAIL_KEEP && g->tail != GMM_TAIL_ZERO)
        return gmm__refuse(call, GMM_E_ARG, "groups.tail", "%d is neither keep (0) nor zero (1)", (int)g->tail);
    if (g->row_align < 0)
        return gmm__refuse(call, GMM_E_ARG, "groups.row_align", "%d must be >= 0", g->row_align);
    if (g->rows_hint < 0)
        return gmm__refuse(call, GMM_E_ARG, "groups.rows_hint", "%lld must be >= 0", (long long)g->rows_hint);
    if (g->on_host & ~1) return gmm__refuse(call, GMM_E_ARG, "groups.on_host", "%d must be 0 or 1", g->on_host);
    if (g->reserved) return gmm__refuse(call, GMM_E_ARG, "groups.reserved", "%d must be 0", g->reserved);
    call->rows = g->capacity;
    if (call->query) return GMM_OK;
    if (!g->splits) return gmm__refuse(call, GMM_E_NULL, "groups.splits", "is NULL with %d groups", g->count);
    if ((uintptr_t)g->splits % (g->dtype == GMM_I64 ? 8 : 4))
        return gmm__refuse(call, GMM_E_ALIGN, "groups.splits", "%p is not aligned to an %s", g->splits,
                           gmm_dtype_name(g->dtype));
    if ((uintptr_t)g->fault % 4)
        return gmm__refuse(call, GMM_E_ALIGN, "groups.fault", "%p is not aligned to 4 bytes", (void *)g->fault);
    gmm__add_span(call, "groups.splits", "", 0, g->splits,
                  (g->count + (g->form == GMM_SPLIT_OFFSETS ? 1 : 0)) * (int64_t)(g->dtype == GMM_I64 ? 8 : 4));
    gmm__add_span(call, "groups.fault", "", 1, g->fault, (int64_t)sizeof *g->fault);
    return gmm__check_split(call, "groups.splits");
}

/* Extents that an operation expects of an operand: `matrices` matrices of rows x cols, packed or in a table. 0 matrices
   stand for a single one, which takes no table. */
typedef struct gmm__extents {
    int64_t matrices, rows, cols;
} gmm__extents;
static GMM__UNUSED gmm__extents gmm__matrices(int64_t matrices, int64_t rows, int64_t cols) {
    gmm__extents e;
    e.matrices = matrices;
    e.rows = rows;
    e.cols = cols;
    return e;
}
static GMM__UNUSED gmm__extents gmm__matrix(int64_t rows, int64_t cols) { return gmm__matrices(0, rows, cols); }

/* Reads an operand without scaling into call->mat[role] and checks it: its dtype against the set `dtypes`, strides,
   and outside of queries addresses and alignment. `mat` may be NULL where the operand is not required. */
static GMM__UNUSED gmm_status gmm__read_mat(gmm__call *call, int role, const char *argument, const gmm_mat *mat,
                                            int required, gmm__extents extents, uint32_t dtypes) {
    const int64_t matrices = extents.matrices, rows = extents.rows, cols = extents.cols;
    gmm_mat *m = &call->mat[role];
    gmm_status s;
    int64_t bytes, size;
    memset(m, 0, sizeof *m);
    if (!mat)
        return required ? gmm__refuse(call, GMM_E_NULL, argument, "is NULL: %s needs it", gmm_op_name(call->op))
                        : GMM_OK;
    if ((s = gmm__read(call, argument, m, sizeof *m, mat)) != GMM_OK) return s;
    if (m->dtype <= GMM_NONE || m->dtype > GMM_F64 || !(dtypes >> m->dtype & 1u))
        return gmm__refuse(call, GMM_E_DTYPE, argument, "dtype %s is not accepted here", gmm_dtype_name(m->dtype));
    if (m->scaling != GMM_SCALING_NONE)
        return gmm__refuse(call, GMM_E_DTYPE, argument, "scaling %s is not accepted here",
                           gmm_scaling_name(m->scaling));
    if (m->flags & ~(uint32_t)GMM_MAT_TABLE_ON_HOST)
        return gmm__refuse(call, GMM_E_ARG, argument, "flags 0x%x has bits that are unknown or of quantized operands",
                           m->flags);
    if (m->hadamard) return gmm__refuse(call, GMM_E_ARG, argument, "hadamard 0x%x must be 0", (unsigned)m->hadamard);
    if (m->ld == 0) m->ld = cols;
    if (m->ld < cols)
        return gmm__refuse(call, GMM_E_STRIDE, argument, "ld %lld must be >= the %lld columns", (long long)m->ld,
                           (long long)cols);
    if (!gmm__mul(rows, m->ld, &size) || !gmm__mul(size, 8, &bytes))
        return gmm__refuse(call, GMM_E_OVERFLOW, argument, "%lld rows of ld %lld do not fit 64 bits", (long long)rows,
                           (long long)m->ld);
    if (m->group_stride && (matrices == 0 || m->table))
        return gmm__refuse(call, GMM_E_STRIDE, argument, "group_stride %lld is for packed matrices, one per group",
                           (long long)m->group_stride);
    if (m->group_stride == 0 && matrices > 0 && !m->table) m->group_stride = size;
    if (m->group_stride && m->group_stride < (rows > 0 ? (rows - 1) * m->ld + cols : 0))
        return gmm__refuse(call, GMM_E_STRIDE, argument, "group_stride %lld must be >= %lld elements",
                           (long long)m->group_stride, (long long)((rows - 1) * m->ld + cols));
    if (matrices > 0 && (!gmm__mul(matrices, m->group_stride, &size) || !gmm__mul(size, 8, &bytes)))
        return gmm__refuse(call, GMM_E_OVERFLOW, argument, "%lld groups at stride %lld do not fit 64 bits",
                           (long long)matrices, (long long)m->group_stride);
    if (m->data && m->table) return gmm__refuse(call, GMM_E_ARG, argument, "has both data and table");
    if (m->table && matrices == 0)
        return gmm__refuse(call, GMM_E_ARG, argument, "is one matrix and takes data, not table");
    if (call->query) return GMM_OK;
    if (!m->data && !m->table && rows > 0)
        return gmm__refuse(call, GMM_E_NULL, argument, "has neither data nor table for %lld x %lld %s", (long long)rows,
                           (long long)cols, gmm_dtype_name(m->dtype));
    size = gmm_dtype_bits(m->dtype) / 8;
    if ((uintptr_t)m->data % (uintptr_t)size)
        return gmm__refuse(call, GMM_E_ALIGN, argument, "%p is not aligned to its %s elements", m->data,
                           gmm_dtype_name(m->dtype));
    if ((uintptr_t)m->table % sizeof(void *))
        return gmm__refuse(call, GMM_E_ALIGN, argument, "table %p is not aligned to pointers", (const void *)m->table);
    if (m->table && (call->ctx->config.space == GMM_SPACE_CPU || (m->flags & (uint32_t)GMM_MAT_TABLE_ON_HOST))) {
        int64_t g;
        for (g = 0; g < matrices; g++) {
            if (!m->table[g] && rows > 0)
                return gmm__refuse(call, GMM_E_NULL, argument, "table[%lld] is NULL", (long long)g);
            if ((uintptr_t)m->table[g] % (uintptr_t)size)
                return gmm__refuse(call, GMM_E_ALIGN, argument, "table[%lld] %p is not aligned to its %s elements",
                                   (long long)g, m->table[g], gmm_dtype_name(m->dtype));
        }
    }
    gmm__add_operand(call, role, argument, "", gmm__rows_box(m->data, rows, cols * size, m->ld * size), m->table,
                     matrices ? matrices : 1, m->group_stride * size);
    return GMM_OK;
}

/* Records the elements, scales and amaxes of a quantized operand for gmm__check_overlap. */
static void gmm__add_quant(gmm__call *call, int role, const char *name, gmm__extents extents, const gmm_layout *l) {
    const gmm_mat *m = &call->mat[role];
    const int64_t bits = gmm_dtype_bits(m->dtype), count = extents.matrices ? extents.matrices : 1;
    const int64_t amaxes = m->flags & (uint32_t)GMM_MAT_ROW_AMAX ? count * extents.rows
                           : extents.matrices ? extents.matrices : (int64_t)call->groups.count;
    const int transposes = call->op == GMM_OP_TRANSPOSE;
    const int writes_amax = call->op == GMM_OP_QUANTIZE || call->op == GMM_OP_REQUANTIZE ||
                            call->op == GMM_OP_SHARD_CAST || (transposes && m->scaling == GMM_SCALING_NV16);
    gmm__add_operand(call, role, name, "",
                     gmm__rows_box(m->data, l->data_rows, (l->data_cols * bits + 7) / 8, m->ld * bits / 8), m->table,
                     count, m->group_stride * bits / 8);
    gmm__add_operand(call, role, name, ".scale", gmm__rows_box(m->scale, 1, l->scale_bytes, l->scale_bytes),
                     m->scale_table, count, l->scale_bytes);
    /* The rowwise and the columnwise copy may share one amax array, except where the Hadamard transform changes the
       columnwise values. */
    if (role == (transposes ? GMM__Y : GMM__DX) && m->amax == call->mat[transposes ? GMM__DY : GMM__Y].amax &&
        !call->format.hadamard)
        return;
    gmm__add_span(call, name, ".amax", writes_amax && gmm__writes(call->op, role), m->amax,
                  amaxes * (int64_t)sizeof *m->amax);
}

/* Reads a quantized operand into call->mat[role] and checks it. A single matrix holds the rows of all groups, and its
   extents have the capacity of the groups as rows. */
static GMM__UNUSED gmm_status gmm__read_quant(gmm__call *call, int role, const char *argument, const gmm_mat *mat,
                                              gmm__extents extents, gmm_direction direction) {
    const int64_t matrices = extents.matrices, rows = extents.rows, cols = extents.cols;
    gmm_mat *m = &call->mat[role];
    gmm_layout l = GMM_ZERO;
    gmm_error error = GMM_ZERO;
    gmm_status s = gmm__read(call, argument, m, sizeof *m, mat);
    int64_t size, all, g;
    int nv, lacks_data;
    if (s != GMM_OK) return s;
    if (m->scaling == GMM_SCALING_NONE)
        return gmm__refuse(call, GMM_E_DTYPE, argument, "scaling none is not accepted here");
    s = matrices == 0 ? gmm_layout_of_groups(m->dtype, m->scaling, m->scale_order, direction, call->groups.count, rows,
                                             cols, &l, &error)
                      : gmm_layout_of(m->dtype, m->scaling, m->scale_order, direction, rows, cols, &l, &error);
    if (s != GMM_OK) return gmm__refuse(call, s, argument, "%s", error.text);
    call->direction[role] = direction;
    nv = m->scaling == GMM_SCALING_NV16;
    if (m->flags & ~(uint32_t)(GMM_MAT_TABLE_ON_HOST | GMM_MAT_ROW_AMAX | GMM_MAT_E4M3_256))
        return gmm__refuse(call, GMM_E_ARG, argument, "flags 0x%x has unknown bits", m->flags);
    if ((m->flags & (uint32_t)GMM_MAT_E4M3_256 && !nv) ||
        (m->flags & (uint32_t)GMM_MAT_ROW_AMAX && (!nv || direction != GMM_ROWWISE)))
        return gmm__refuse(call, GMM_E_ARG, argument, "flags 0x%x do not belong to a %s copy with scaling %s",
                           m->flags, direction == GMM_ROWWISE ? "rowwise" : "columnwise",
                           gmm_scaling_name(m->scaling));
    if (m->hadamard && (!nv || direction == GMM_ROWWISE || (m->hadamard & ~0xFFFF) != GMM_HADAMARD))
        return gmm__refuse(call, GMM_E_ARG, argument, "hadamard 0x%x must be 0, or GMM_HADAMARD and sign bits in a "
                           "columnwise nv16 copy", (unsigned)m->hadamard);
    if (m->ld == 0) m->ld = l.data_cols;
    if (m->ld < l.data_cols || (m->dtype == GMM_E2M1 && m->ld % 2))
        return gmm__refuse(call, GMM_E_STRIDE, argument, "ld %lld must be >= %lld%s", (long long)m->ld,
                           (long long)l.data_cols, m->dtype == GMM_E2M1 ? " and even" : "");
    if (!gmm__mul(l.data_rows, m->ld, &size))
        return gmm__refuse(call, GMM_E_OVERFLOW, argument, "%lld rows of ld %lld do not fit 64 bits",
                           (long long)l.data_rows, (long long)m->ld);
    if (m->group_stride && (matrices == 0 || m->table))
        return gmm__refuse(call, GMM_E_STRIDE, argument, "group_stride %lld is for packed matrices",
                           (long long)m->group_stride);
    if (m->group_stride == 0 && matrices > 0 && !m->table) m->group_stride = size;
    if (m->group_stride && (m->group_stride < (l.data_rows > 0 ? (l.data_rows - 1) * m->ld + l.data_cols : 0) ||
                            (m->dtype == GMM_E2M1 && m->group_stride % 2)))
        return gmm__refuse(call, GMM_E_STRIDE, argument, "group_stride %lld must be >= %lld elements%s",
                           (long long)m->group_stride, (long long)((l.data_rows - 1) * m->ld + l.data_cols),
                           m->dtype == GMM_E2M1 ? " and even" : "");
    if (matrices > 0 && (!gmm__mul(matrices, m->group_stride, &all) || !gmm__mul(matrices, l.scale_bytes, &all)))
        return gmm__refuse(call, GMM_E_OVERFLOW, argument, "%lld matrices at stride %lld do not fit 64 bits",
                           (long long)matrices, (long long)m->group_stride);
    if ((m->data && m->table) || (m->scale && m->scale_table))
        return gmm__refuse(call, GMM_E_ARG, argument, "has both an address and a table of elements or scales");
    if (matrices == 0 && (m->table || m->scale_table))
        return gmm__refuse(call, GMM_E_ARG, argument, "is one matrix and takes data and scale, not tables");
    if (call->query) return GMM_OK;
    if (!m->table != !m->scale_table)
        return gmm__refuse(call, GMM_E_ARG, argument, "table and scale_table come together");
    lacks_data = l.data_bytes > 0 && !m->data && !m->table;
    /* groups without rows have no data, but they have the scales of tensors and of columns */
    if (lacks_data || (l.scale_bytes > 0 && !m->scale && !m->scale_table))
        return gmm__refuse(call, GMM_E_NULL, argument, "lacks %s for %lld x %lld %s scaled %s",
                           lacks_data ? "data" : "scale", (long long)rows, (long long)cols, gmm_dtype_name(m->dtype),
                           gmm_scaling_name(m->scaling));
    if (l.scale_dtype == GMM_F32 && (uintptr_t)m->scale % 4)
        return gmm__refuse(call, GMM_E_ALIGN, argument, "scale %p is not aligned to 4 bytes", m->scale);
    if ((uintptr_t)m->table % sizeof(void *) || (uintptr_t)m->scale_table % sizeof(void *))
        return gmm__refuse(call, GMM_E_ALIGN, argument, "table %p or scale_table %p is not aligned to pointers",
                           (const void *)m->table, (const void *)m->scale_table);
    if (nv && !m->amax) return gmm__refuse(call, GMM_E_NULL, argument, "lacks amax, which nv16 multiplies by");
    if ((uintptr_t)m->amax % 4)
        return gmm__refuse(call, GMM_E_ALIGN, argument, "amax %p is not aligned to 4 bytes", (const void *)m->amax);
    if (m->table && (call->ctx->config.space == GMM_SPACE_CPU || (m->flags & (uint32_t)GMM_MAT_TABLE_ON_HOST)))
        for (g = 0; g < matrices; g++) {
            if (l.data_bytes > 0 && (!m->table[g] || !m->scale_table[g]))
                return gmm__refuse(call, GMM_E_NULL, argument, "table[%lld] or scale_table[%lld] is NULL", (long long)g,
                                   (long long)g);
            if (l.scale_dtype == GMM_F32 && (uintptr_t)m->scale_table[g] % 4)
                return gmm__refuse(call, GMM_E_ALIGN, argument, "scale_table[%lld] %p is not aligned to 4 bytes",
                                   (long long)g, m->scale_table[g]);
        }
    gmm__add_quant(call, role, argument, extents, &l);
    return GMM_OK;
}

/* Reads the destination of a gradient: one matrix per group. */
static GMM__UNUSED gmm_status gmm__read_grad(gmm__call *call, int role, const char *argument, const gmm_grad *grad,
                                             int required, int64_t rows, int64_t cols) {
    gmm_grad *g = &call->grad[role];
    gmm_status s;
    char name[32];
    memset(g, 0, sizeof *g);
    memset(&call->mat[role], 0, sizeof call->mat[role]);
    if (!grad)
        return required ? gmm__refuse(call, GMM_E_NULL, argument, "is NULL: %s needs a destination",
                                      gmm_op_name(call->op)) : GMM_OK;
    if ((s = gmm__read(call, argument, g, sizeof *g, grad)) != GMM_OK) return s;
    if ((g->main_grad | g->overwrite) & ~1)
        return gmm__refuse(call, GMM_E_ARG, argument, "main_grad %d and overwrite %d must be 0 or 1", g->main_grad,
                           g->overwrite);
    if (g->reserved) return gmm__refuse(call, GMM_E_ARG, argument, "reserved %d must be 0", g->reserved);
    if (!call->query && (uintptr_t)g->beta % 4)
        return gmm__refuse(call, GMM_E_ALIGN, argument, "beta %p is not aligned to 4 bytes", (const void *)g->beta);
    gmm__add_span(call, argument, ".beta", 0, g->beta, call->groups.count * (int64_t)sizeof *g->beta);
    gmm__add_span(call, argument, ".frozen", 0, g->frozen, call->groups.count);
    (void)snprintf(name, sizeof name, "%s.mat", argument);
    return gmm__read_mat(call, role, name, g->mat, 1, gmm__matrices(call->groups.count, rows, cols), GMM__FLOATS);
}

/* Checks an array of 4-byte values that a call reads. */
static GMM__UNUSED gmm_status gmm__check_array(gmm__call *call, const char *argument, const void *array, int required,
                                               int64_t count) {
    if (call->query) return GMM_OK;
    if (!array && required && count > 0)
        return gmm__refuse(call, GMM_E_NULL, argument, "is NULL for %lld values", (long long)count);
    if ((uintptr_t)array % 4) return gmm__refuse(call, GMM_E_ALIGN, argument, "%p is not aligned to 4 bytes", array);
    gmm__add_span(call, argument, "", 0, array, count * 4);
    return GMM_OK;
}
/* Checks an array of 4-byte values that a call writes. */
static GMM__UNUSED gmm_status gmm__check_output(gmm__call *call, const char *argument, const void *array, int required,
                                                int64_t count) {
    const int32_t before = call->spans;
    const gmm_status s = gmm__check_array(call, argument, array, required, count);
    if (call->spans > before) call->span[before].writes = 1;
    return s;
}

/* Address of element (row, col) of matrix g. Integer arithmetic, since a matrix without rows may be NULL. */
static GMM__UNUSED void *gmm__at(const gmm_mat *m, int64_t g, int64_t row, int64_t col) {
    const uintptr_t base = (uintptr_t)(m->table ? m->table[g] : m->data);
    const int64_t element = (m->table ? 0 : g * m->group_stride) + row * m->ld + col;
    return (void *)(base + (uintptr_t)(element * (gmm_dtype_bits(m->dtype) / 8)));
}

/* Appends a region to a plan's workspace. gmm__part gives its address once gmm__serve has set plan->workspace. */
static GMM__UNUSED void gmm__reserve(gmm__plan *plan, int part, size_t bytes) {
    plan->part[part] = plan->workspace_bytes;
    plan->workspace_bytes += gmm__round256(bytes);
}
static GMM__UNUSED void *gmm__part(const gmm__plan *plan, int part) {
    return (char *)plan->workspace + plan->part[part];
}

/* Returns 0 from a plan function, with the reason why the engine does not serve the call as the plan's note. */
static GMM__UNUSED int gmm__decline(gmm__plan *plan, const char *format, ...) {
    va_list list;
    va_start(list, format);
    (void)vsnprintf(plan->note, sizeof plan->note, format, list);
    va_end(list);
    return 0;
}

static GMM__UNUSED void gmm__log(const gmm_context *ctx, gmm_log_level level, const char *format, ...) {
    char text[512];
    va_list list;
    if (!ctx->config.log.write || level > ctx->config.log.level) return;
    va_start(list, format);
    (void)vsnprintf(text, sizeof text, format, list);
    va_end(list);
    ctx->config.log.write(ctx->config.log.user, level, text);
}

/* Whether `stream` is capturing a graph: then values on the host are those of the capture, not of a replay. */
static GMM__UNUSED int gmm__capturing(const gmm_context *ctx, gmm_stream stream) {
#ifdef __CUDACC__
    enum cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    if (ctx->config.space == GMM_SPACE_CUDA && cudaStreamIsCapturing(stream, &status) == cudaSuccess)
        return status != cudaStreamCaptureStatusNone;
#endif
    (void)ctx;
    (void)stream;
    return 0;
}

/* Defined behind the engine table, in core/engines.h: gmm__select chooses the engine of a checked call and fills in its
   plan; gmm__check_overlap refuses a call whose outputs overlap its other memory; gmm__serve selects, and then answers
   the query (call->query, into *info), or checks workspace and overlap and launches. */
static gmm_status gmm__select(gmm__call *call, gmm__plan *plan);
static void gmm__describe_plan(gmm__text *text, const gmm__plan *plan); /* core/describe.h */
static gmm_status gmm__check_overlap(gmm__call *call);
static gmm_status gmm__serve(gmm__call *call, gmm_info *info, void *workspace, size_t workspace_bytes,
                             gmm_stream stream);

/* .............................................................................................. 14.2 CPU engine ... */

/* Work is counted in elements that one thread converts or copies, about a nanosecond each. Every thread gets at least
   GMM__CPU_GRAIN of them: on a busy machine starting threads takes milliseconds. */
enum { GMM__CPU_GRAIN = 32768, GMM__CPU_MULTIPLY_ADDS = 64 }; /* multiply-adds that count as one element */

/* Number of threads for `count` tasks of `work` in all. It never decreases with either, so that a plan gets an upper
   bound from upper bounds of both. */
static GMM__UNUSED int32_t gmm__cpu_threads(const gmm_context *ctx, int64_t count, double work) {
    const int64_t max_threads = count < ctx->threads ? count : ctx->threads;
    const double useful_threads = work / GMM__CPU_GRAIN;
    if (max_threads <= 1 || useful_threads < 2.0) return 1;
    return useful_threads < (double)max_threads ? (int32_t)useful_threads : (int32_t)max_threads;
}

/* Runs task(arg, i, thread) for i in [0, count) on gmm__cpu_threads(ctx, count, work) threads, numbered from 0. Tasks
   are independent, so that results do not depend on the number of threads. The only use of OpenMP. */
typedef void (*gmm__task)(const void *arg, int64_t i, int32_t thread);
static GMM__UNUSED void gmm__cpu_for(const gmm_context *ctx, int64_t count, double work, gmm__task task,
                                     const void *arg) {
    const int32_t threads = gmm__cpu_threads(ctx, count, work);
    int64_t i;
#ifdef _OPENMP
    if (threads > 1) {
        _Pragma("omp parallel for schedule(dynamic) num_threads(threads)")
        for (i = 0; i < count; i++) task(arg, i, omp_get_thread_num());
        return;
    }
#endif
    (void)threads;
    for (i = 0; i < count; i++) task(arg, i, 0);
}

/* Converts the split to offsets [G + 1] (may be NULL), sets fault bits, and returns the number of live rows. */
static GMM__UNUSED int64_t gmm__cpu_offsets(const gmm_groups *groups, int64_t *offsets) {
    uint32_t fault = gmm__split_first_fault(groups);
    int64_t begin = 0, g;
    if (offsets) offsets[0] = 0;
    for (g = 0; g < groups->count; g++) {
        begin = gmm_split_end(begin, gmm__split_value(groups, g), groups->form, groups->capacity, groups->row_align,
                              &fault);
        if (offsets) offsets[g + 1] = begin;
    }
    if (fault && groups->fault) *groups->fault |= fault;
    return begin;
}

/* Converts n elements of a float dtype to fp32, and back. Each dtype has its own loop, which vectorises. */
static GMM__NOINLINE void gmm__row_load(gmm_dtype dtype, const void *src, float *dst, int64_t n) {
    int64_t i;
    if (dtype == GMM_F32) memcpy(dst, src, (size_t)n * sizeof *dst);
    else if (dtype == GMM_BF16)
        for (i = 0; i < n; i++) dst[i] = gmm_bf16_to_f32(((const uint16_t *)src)[i]);
    else
        for (i = 0; i < n; i++) dst[i] = gmm_f16_to_f32(((const uint16_t *)src)[i]);
}

static GMM__NOINLINE void gmm__row_store(gmm_dtype dtype, void *dst, const float *src, int64_t n) {
    int64_t i;
    if (dtype == GMM_F32) memcpy(dst, src, (size_t)n * sizeof *src);
    else if (dtype == GMM_BF16)
        for (i = 0; i < n; i++) ((uint16_t *)dst)[i] = gmm_f32_to_bf16(src[i]);
    else
        for (i = 0; i < n; i++) ((uint16_t *)dst)[i] = gmm_f32_to_f16(src[i]);
}

/* Dequantizes n elements of line l of a quantized matrix from element a on. Without `whole` it leaves out the scales
   that apply to whole sums (gmm__qview_factor). */
static GMM__NOINLINE void gmm__qview_load(const gmm__qview *v, int64_t l, int64_t a, int64_t n, int whole, float *dst) {
    const int64_t width = gmm_block_along(v->scaling) ? gmm_block_along(v->scaling) : v->along;
    const int fixed = !whole && v->scaling != GMM_SCALING_MX32 && v->scaling != GMM_SCALING_NV16;
    const uint8_t *src = v->data + (v->dtype == GMM_E2M1 ? 0 : v->apart ? l : l * v->ld);
    const int64_t step = v->apart ? v->ld : 1;
    int64_t i, end, first;
    if (v->dtype == GMM_E4M3)
        for (i = 0; i < n; i++) dst[i] = gmm_e4m3_to_f32(src[(a + i) * step]);
    else if (v->dtype == GMM_E5M2)
        for (i = 0; i < n; i++) dst[i] = gmm_e5m2_to_f32(src[(a + i) * step]);
    else
        for (i = 0; i < n; i++) dst[i] = gmm_e2m1_to_f32(gmm__qview_code(v, l, a + i));
    if (fixed) return;
    for (first = 0; first < n; first = end) {
        const int64_t j = (a + first) / width;
        const float scale = gmm__qview_factor(v, l, j, whole);
        end = gmm__min_i64((j + 1) * width - a, n);
        for (i = first; i < end; i++) dst[i] = gmm__qview_value(dst[i], scale);
    }
}

/* Sums accumulate in 16 lanes, which are then added pairwise: a fixed order that vectorises. */
enum { GMM__LANES = 16 };
static GMM__UNUSED float gmm__lanes_sum(float *lanes) {
    int half, i;
    for (half = GMM__LANES / 2; half > 0; half /= 2)
        for (i = 0; i < half; i++) lanes[i] += lanes[i + half];
    return lanes[0];
}

/* Adds a[i] * b[i] to the lanes; b NULL means ones. Every call but the last has n in multiples of the lanes. */
static GMM__UNUSED void gmm__lanes_add(float *lanes, const float *a, const float *b, int64_t n) {
    int64_t i, j;
    for (i = 0; i + GMM__LANES <= n; i += GMM__LANES)
        if (b) for (j = 0; j < GMM__LANES; j++) lanes[j] += a[i + j] * b[i + j];
        else for (j = 0; j < GMM__LANES; j++) lanes[j] += a[i + j];
    for (j = 0; i + j < n; j++) lanes[j] += b ? a[i + j] * b[i + j] : a[i + j];
}

/* Zeroes rows [begin, end) of a matrix if `tail` is GMM_TAIL_ZERO. */
static GMM__UNUSED void gmm__cpu_tail(const gmm_mat *m, gmm_tail tail, int64_t begin, int64_t end, int64_t cols) {
    int64_t r;
    if (tail != GMM_TAIL_ZERO) return;
    for (r = begin; r < end; r++) memset(gmm__at(m, 0, r, 0), 0, (size_t)(cols * (gmm_dtype_bits(m->dtype) / 8)));
}

/* The plan of operations that serve every call and need no workspace. */
static int gmm__plan_any(const gmm__call *call, gmm__plan *plan) {
    (void)call;
    (void)plan;
    return 1;
}
static gmm_status gmm__cpu_launch_offsets(const gmm__plan *plan, gmm_stream stream) {
    (void)stream;
    (void)gmm__cpu_offsets(&plan->call->groups, (int64_t *)plan->call->output);
    return GMM_OK;
}

/* .......................................................................................... 14.3 Grouped linear ... */

/* Checks and entry points of grouped linear layers. */

/* Reads an operand of a product: floats, or the quantized copy whose blocks run along the contraction. That is `mat`
   itself if the direction is rowwise, and mat->columnwise if it is columnwise. */
static gmm_status gmm__read_operand(gmm__call *call, int role, const char *argument, const gmm_mat *mat,
                                    gmm__extents extents, gmm_direction direction) {
    gmm_mat m;
    gmm_layout layout;
    gmm_error error = GMM_ZERO;
    char name[32];
    if (!mat || !gmm__copy_sized(&m, sizeof m, mat) || m.scaling == GMM_SCALING_NONE)
        return gmm__read_mat(call, role, argument, mat, 1, extents, GMM__FLOATS);
    if (direction == GMM_ROWWISE) return gmm__read_quant(call, role, argument, mat, extents, direction);
    if (gmm_layout_of(m.dtype, m.scaling, m.scale_order, direction, 0, 0, &layout, &error) != GMM_OK)
        return gmm__refuse(call, error.status, argument, "%s", error.text);
    (void)snprintf(name, sizeof name, "%s.columnwise", argument);
    if (!m.columnwise)
        return gmm__refuse(call, GMM_E_NULL, name, "is NULL; %s contracts along the rows, and so do its blocks",
                           gmm_op_name(call->op));
    return gmm__read_quant(call, role, name, m.columnwise, extents, direction);
}

/* Whether operands of these two scalings can be multiplied. Scalings per tensor and per row go together, in any
   combination. 1x128 goes with 1x128 and 128x128, but 128x128 not with itself, which no kernel multiplies. Every other
   scaling goes with itself alone. */
static int gmm__scalings_multiply(gmm_scaling a, gmm_scaling b) {
    switch (a) {
    case GMM_SCALING_TENSOR:
    case GMM_SCALING_ROW: return b == GMM_SCALING_TENSOR || b == GMM_SCALING_ROW;
    case GMM_SCALING_1X128: return b == GMM_SCALING_1X128 || b == GMM_SCALING_128X128;
    case GMM_SCALING_128X128: return b == GMM_SCALING_1X128;
    default: return a == b;
    }
}
/* Whether weights of this scaling can be multiplied with tokens that are not quantized. */
static int gmm__scaling_beside_floats(gmm_scaling s) { return s == GMM_SCALING_MX32 || s == GMM_SCALING_NV16; }

/* Checks that two operands can be multiplied: their scales must apply to the whole sum over the contraction, or to the
   sums of whole blocks. Sets the alignment of the features that the scalings require. */
static gmm_status gmm__check_operands(gmm__call *call, int first, const char *first_name, int second,
                                     const char *second_name) {
    const gmm_mat *a = &call->mat[first], *b = &call->mat[second];
    const int32_t align = gmm_feature_align(b->scaling); /* if a is quantized, so is b */
    const size_t used = strlen(call->shapes);
    (void)snprintf(call->shapes + used, sizeof call->shapes - used, " %s%s%s", gmm_dtype_name(a->dtype),
                   a->scaling == GMM_SCALING_NONE ? "" : " ",
                   a->scaling == GMM_SCALING_NONE ? "" : gmm_scaling_name(a->scaling));
    call->in_align = call->out_align = align;
    if (a->scaling == GMM_SCALING_NONE && b->scaling == GMM_SCALING_NONE)
        return a->dtype == b->dtype ? GMM_OK
                                    : gmm__refuse(call, GMM_E_DTYPE, second_name, "dtype %s must be that of %s.%s, %s",
                                                  gmm_dtype_name(b->dtype), call->path, first_name,
                                                  gmm_dtype_name(a->dtype));
    if (a->scaling == GMM_SCALING_NONE ? second != GMM__W || !gmm__scaling_beside_floats(b->scaling)
                                       : !gmm__scalings_multiply(a->scaling, b->scaling))
        return gmm__refuse(call, GMM_E_DTYPE, second_name, "%s scaled %s does not multiply %s.%s, %s scaled "
                           "%s", gmm_dtype_name(b->dtype), gmm_scaling_name(b->scaling), call->path, first_name,
                           gmm_dtype_name(a->dtype), gmm_scaling_name(a->scaling));
    if (a->hadamard != b->hadamard)
        return gmm__refuse(call, GMM_E_CONFIG, second_name, "hadamard 0x%x must be that of %s.%s, 0x%x",
                           (unsigned)b->hadamard, call->path, first_name, (unsigned)a->hadamard);
    if (call->in % align || call->out % align)
        return gmm__refuse(call, GMM_E_ARG, call->in % align ? "in_features" : "out_features", "%lld must be a "
                           "multiple of %d for scaling %s", (long long)(call->in % align ? call->in : call->out),
                           (int)align, gmm_scaling_name(b->scaling));
    return GMM_OK;
}

/* Whether an operand of a linear call is quantized. */
static GMM__UNUSED int gmm__quantized(const gmm__call *call) {
    return call->mat[GMM__X_].scaling != GMM_SCALING_NONE || call->mat[GMM__W].scaling != GMM_SCALING_NONE ||
           call->mat[GMM__DY].scaling != GMM_SCALING_NONE;
}

/* Checks what a linear layer or an MLP says of the indices of gathered rows. *div 0 becomes 1. */
static gmm_status gmm__check_indices(gmm__call *call, const int32_t *x_index, const int32_t *dy_index,
                                     int64_t index_rows, int32_t *div) {
    if (*div < 0) return gmm__refuse(call, GMM_E_ARG, "index_div", "%d must be >= 1, or 0 for 1", *div);
    if (*div == 0) *div = 1;
    if ((x_index || dy_index) && (index_rows < 0 || index_rows > INT32_MAX))
        return gmm__refuse(call, GMM_E_ARG, "index_rows", "%lld must be 0 to 2^31 - 1", (long long)index_rows);
    return GMM_OK;
}
/* Checks their memory, when the matrices have shown that the number of rows fits. */
static gmm_status gmm__check_index_arrays(gmm__call *call, const int32_t *x_index, const int32_t *dy_index) {
    const gmm_status s = gmm__check_array(call, "x_index", x_index, 0, call->rows);
    return s != GMM_OK ? s : gmm__check_array(call, "dy_index", dy_index, 0, call->rows);
}

/* Whether a gathered operand is quantized, which no engine multiplies. */
static int gmm__gathers_quantized(const gmm__call *call) {
    const gmm_linear *d = &call->d.linear;
    return (d->x_index && call->mat[GMM__X_].scaling != GMM_SCALING_NONE) ||
           (d->dy_index && call->mat[GMM__DY].scaling != GMM_SCALING_NONE);
}

/* Checks one linear operation. Only the operands that the operation uses are read. K is in_features, N out_features; x
   is [rows, K], y and dy are [rows, N], w and dw are [N, K] per group. */
static gmm_status gmm__linear_prepare(gmm__call *call, gmm_context *ctx, gmm_op op, const char *function,
                                      const gmm_linear *linear, int query) {
    gmm_linear *d = &call->d.linear;
    gmm_status s = gmm__open(call, ctx, op, function, query);
    const gmm_direction along_tokens = op == GMM_OP_LINEAR_WGRAD ? GMM_COLUMNWISE : GMM_ROWWISE;
    gmm__extents dx, y, x, dy; /* extents of the token matrices; rows of x and dy may be gathered from others */
    gmm_groups g;
    int64_t G, K, N;

    if (s != GMM_OK || (s = gmm__read_descriptor(call, "linear", d, sizeof *d, linear)) != GMM_OK) return s;
    K = call->in = d->in_features;
    N = call->out = d->out_features;
    gmm__peek_groups(d->groups, &g);
    (void)snprintf(call->shapes, sizeof call->shapes, "G=%d T=%lld K=%lld N=%lld", g.count, (long long)g.capacity,
                   (long long)K, (long long)N);
    if (op < GMM_OP_LINEAR_FWD || op > GMM_OP_LINEAR_BGRAD)
        return gmm__refuse(call, GMM_E_ARG, "op", "%d is no linear operation", (int)op);
    if ((s = gmm__read_options(call, d->options)) != GMM_OK || (s = gmm__read_groups(call, d->groups)) != GMM_OK)
        return s;
    G = call->groups.count;
    if ((d->alpha_per_group | d->y_add | d->d_bias_scale_add) & ~1)
        return gmm__refuse(call, GMM_E_ARG, "linear",
                           "alpha_per_group %d, y_add %d and d_bias_scale_add %d must be 0 or 1",
                           d->alpha_per_group, d->y_add, d->d_bias_scale_add);
    if (K < 1) return gmm__refuse(call, GMM_E_ARG, "in_features", "%lld must be >= 1", (long long)K);
    if (N < 1) return gmm__refuse(call, GMM_E_ARG, "out_features", "%lld must be >= 1", (long long)N);
    /* an index of an operand that the operation does not read is not looked at */
    if (op != GMM_OP_LINEAR_FWD && op != GMM_OP_LINEAR_WGRAD) d->x_index = NULL;
    if (op == GMM_OP_LINEAR_FWD) d->dy_index = NULL;
    if (d->reserved) return gmm__refuse(call, GMM_E_ARG, "reserved", "%d must be 0", d->reserved);
    if ((s = gmm__check_indices(call, d->x_index, d->dy_index, d->index_rows, &d->index_div)) != GMM_OK) return s;
    dx = gmm__matrix(call->rows, K);
    y = gmm__matrix(call->rows, N);
    x = d->x_index ? gmm__matrix(d->index_rows, K) : dx;
    dy = d->dy_index ? gmm__matrix(d->index_rows, N) : y;

    if ((op == GMM_OP_LINEAR_FWD || op == GMM_OP_LINEAR_WGRAD) &&
        (s = gmm__read_operand(call, GMM__X_, "x", d->x, x, along_tokens)) != GMM_OK)
        return s;
    if (op == GMM_OP_LINEAR_BGRAD) {
        if ((s = gmm__read_mat(call, GMM__DY, "dy", d->dy, 1, dy, GMM__FLOATS)) != GMM_OK) return s;
    } else if (op != GMM_OP_LINEAR_FWD) {
        if ((s = gmm__read_operand(call, GMM__DY, "dy", d->dy, dy, along_tokens)) != GMM_OK) return s;
    }
    if ((op == GMM_OP_LINEAR_FWD || op == GMM_OP_LINEAR_DGRAD) &&
        (s = gmm__read_operand(call, GMM__W, "w", d->w, gmm__matrices(G, N, K),
                               op == GMM_OP_LINEAR_FWD ? GMM_ROWWISE : GMM_COLUMNWISE)) != GMM_OK)
        return s;
    if (op == GMM_OP_LINEAR_FWD && (s = gmm__read_mat(call, GMM__Y, "y", d->y, 1, y, GMM__FLOATS)) != GMM_OK) return s;
    if (op == GMM_OP_LINEAR_DGRAD && (s = gmm__read_mat(call, GMM__DX, "dx", d->dx, 1, dx, GMM__FLOATS)) != GMM_OK)
        return s;
    if (op == GMM_OP_LINEAR_WGRAD && (s = gmm__read_grad(call, GMM__DW, "dw", d->dw, 1, N, K)) != GMM_OK) return s;
    if ((op == GMM_OP_LINEAR_FWD || op == GMM_OP_LINEAR_BGRAD) &&
        (s = gmm__read_mat(call, GMM__BIAS, "bias", d->bias, op == GMM_OP_LINEAR_BGRAD && d->d_bias_scale,
                           gmm__matrices(G, 1, N), GMM__FLOATS)) != GMM_OK)
        return s;
    if (op == GMM_OP_LINEAR_BGRAD) {
        if (!d->db && !d->d_bias_scale)
            return gmm__refuse(call, GMM_E_NULL, "db", "and linear.d_bias_scale are both NULL: nothing is wanted");
        if ((s = gmm__read_grad(call, GMM__DB, "db", d->db, 0, 1, N)) != GMM_OK) return s;
    }

    if (op == GMM_OP_LINEAR_BGRAD) {
        const size_t used = strlen(call->shapes);
        (void)snprintf(call->shapes + used, sizeof call->shapes - used, " %s",
                       gmm_dtype_name(call->mat[GMM__DY].dtype));
    } else {
        const int wgrad = op == GMM_OP_LINEAR_WGRAD, fwd = op == GMM_OP_LINEAR_FWD;
        if ((s = gmm__check_operands(call, fwd || wgrad ? GMM__X_ : GMM__DY, fwd || wgrad ? "x" : "dy",
                                    wgrad ? GMM__DY : GMM__W, wgrad ? "dy" : "w")) != GMM_OK)
            return s;
    }
    if (gmm__gathers_quantized(call))
        return gmm__refuse(call, GMM_E_UNSUPPORTED, d->x_index ? "x_index" : "dy_index",
                           "rows of quantized operands cannot be gathered: permute the codes and their scales");
    if ((s = gmm__check_array(call, "alpha", d->alpha, 0, d->alpha_per_group ? G : 1)) != GMM_OK ||
        (s = gmm__check_array(call, "bias_scale", d->bias_scale, 0, call->rows)) != GMM_OK ||
        (s = gmm__check_array(call, "prob", d->prob, 0, call->rows)) != GMM_OK ||
        (s = gmm__check_index_arrays(call, d->x_index, d->dy_index)) != GMM_OK)
        return s;
    if (d->prob && (op == GMM_OP_LINEAR_WGRAD || op == GMM_OP_LINEAR_BGRAD))
        return gmm__refuse(call, GMM_E_ARG, "prob", "must be NULL in %s: multiply the rows of dy by it before",
                           op == GMM_OP_LINEAR_WGRAD ? "wgrad" : "bgrad");
    return gmm__check_output(call, "d_bias_scale", d->d_bias_scale, 0, call->rows);
}

GMMDEF gmm_status gmm_linear_query(gmm_context *ctx, gmm_op op, const gmm_linear *linear, gmm_info *info) {
    gmm__call call;
    const gmm_status s = gmm__linear_prepare(&call, ctx, op, "gmm_linear_query", linear, 1);
    return s != GMM_OK ? s : gmm__serve(&call, info, NULL, 0, NULL);
}

static gmm_status gmm__linear_run(gmm_context *ctx, gmm_op op, const char *function, const gmm_linear *linear,
                                  void *workspace, size_t workspace_bytes, gmm_stream stream) {
    gmm__call call;
    const gmm_status s = gmm__linear_prepare(&call, ctx, op, function, linear, 0);
    return s != GMM_OK ? s : gmm__serve(&call, NULL, workspace, workspace_bytes, stream);
}

GMMDEF gmm_status gmm_linear_fwd(gmm_context *ctx, const gmm_linear *linear, void *workspace, size_t workspace_bytes,
                                 gmm_stream stream) {
    return gmm__linear_run(ctx, GMM_OP_LINEAR_FWD, "gmm_linear_fwd", linear, workspace, workspace_bytes, stream);
}
GMMDEF gmm_status gmm_linear_dgrad(gmm_context *ctx, const gmm_linear *linear, void *workspace, size_t workspace_bytes,
                                   gmm_stream stream) {
    return gmm__linear_run(ctx, GMM_OP_LINEAR_DGRAD, "gmm_linear_dgrad", linear, workspace, workspace_bytes, stream);
}
GMMDEF gmm_status gmm_linear_wgrad(gmm_context *ctx, const gmm_linear *linear, void *workspace, size_t workspace_bytes,
                                   gmm_stream stream) {
    return gmm__linear_run(ctx, GMM_OP_LINEAR_WGRAD, "gmm_linear_wgrad", linear, workspace, workspace_bytes, stream);
}
GMMDEF gmm_status gmm_linear_bgrad(gmm_context *ctx, const gmm_linear *linear, void *workspace, size_t workspace_bytes,
                                   gmm_stream stream) {
    return gmm__linear_run(ctx, GMM_OP_LINEAR_BGRAD, "gmm_linear_bgrad", linear, workspace, workspace_bytes, stream);
}

/* CPU GEMM: register tiles, packed panels, and one block of a product. */

/* beta of group g's gradient in dst = grad + beta dst. */
static float gmm__grad_beta(const gmm_grad *grad, int64_t g) {
    gmm_wgrad_in in = GMM_ZERO;
    gmm_wgrad_out out = GMM_ZERO;
    if (grad->beta) return grad->beta[g];
    in.want = 1;
    in.main_grad = (uint8_t)grad->main_grad;
    in.overwrite = (uint8_t)grad->overwrite;
    (void)gmm_wgrad_decide(&in, &out, NULL);
    return out.beta_one ? 1.0f : 0.0f;
}

static float gmm__alpha(const gmm_linear *d, int64_t g) {
    return d->alpha ? d->alpha[d->alpha_per_group ? g : 0] : 1.0f;
}

/* The loops over a tile are always unrolled, so that its accumulators are in registers at any optimisation level. */
#if defined(__CUDACC__) /* nvcc accepts neither pragma; it compiles host code at -O3, which unrolls */
#define GMM__UNROLL
#elif defined(__clang__)
#define GMM__UNROLL _Pragma("clang loop unroll(full)")
#elif defined(__GNUC__)
#define GMM__UNROLL _Pragma("GCC unroll 16")
#else
#define GMM__UNROLL
#endif

/* --- the register tile: c[mr][nr] += sum over k of a[k][mr] b[k][nr], accumulated in the order of k --- */

enum {
    GMM__MC = 240, GMM__NC = 512, GMM__KC = 256, /* cache block: panels of A and B and the block of C fit the L2 */
    GMM__MR_512 = 12, GMM__NR_512 = 32, GMM__MR = 6, GMM__NR = 16
};

static void gmm__tile_plain(int64_t kc, const float *a, const float *b, float *c, int64_t ldc) {
    int64_t k;
    int i, j;
    for (i = 0; i < GMM__MR; i++, c += ldc) {
        float acc[GMM__NR];
        for (j = 0; j < GMM__NR; j++) acc[j] = c[j];
        for (k = 0; k < kc; k++)
            for (j = 0; j < GMM__NR; j++) acc[j] += a[k * GMM__MR + i] * b[k * GMM__NR + j];
        for (j = 0; j < GMM__NR; j++) c[j] = acc[j];
    }
}

#ifdef GMM__X86
__attribute__((target("avx2,fma"))) static void gmm__tile_avx2(int64_t kc, const float *a, const float *b, float *c,
                                                                int64_t ldc) {
    __m256 acc[GMM__MR][2];
    int64_t k;
    int i;
    GMM__UNROLL
    for (i = 0; i < GMM__MR; i++) {
        acc[i][0] = _mm256_loadu_ps(c + i * ldc);
        acc[i][1] = _mm256_loadu_ps(c + i * ldc + 8);
    }
    for (k = 0; k < kc; k++, a += GMM__MR, b += GMM__NR) {
        const __m256 b0 = _mm256_loadu_ps(b), b1 = _mm256_loadu_ps(b + 8);
        GMM__UNROLL
        for (i = 0; i < GMM__MR; i++) {
            const __m256 ai = _mm256_broadcast_ss(a + i);
            acc[i][0] = _mm256_fmadd_ps(ai, b0, acc[i][0]);
            acc[i][1] = _mm256_fmadd_ps(ai, b1, acc[i][1]);
        }
    }
    GMM__UNROLL
    for (i = 0; i < GMM__MR; i++) {
        _mm256_storeu_ps(c + i * ldc, acc[i][0]);
        _mm256_storeu_ps(c + i * ldc + 8, acc[i][1]);
    }
}

__attribute__((target("avx512f"))) static void gmm__tile_avx512(int64_t kc, const float *a, const float *b, float *c,
                                                                 int64_t ldc) {
    __m512 acc[GMM__MR_512][2];
    int64_t k;
    int i;
    GMM__UNROLL
    for (i = 0; i < GMM__MR_512; i++) {
        acc[i][0] = _mm512_loadu_ps(c + i * ldc);
        acc[i][1] = _mm512_loadu_ps(c + i * ldc + 16);
    }
    for (k = 0; k < kc; k++, a += GMM__MR_512, b += GMM__NR_512) {
        const __m512 b0 = _mm512_loadu_ps(b), b1 = _mm512_loadu_ps(b + 16);
        GMM__UNROLL
        for (i = 0; i < GMM__MR_512; i++) {
            const __m512 ai = _mm512_set1_ps(a[i]);
            acc[i][0] = _mm512_fmadd_ps(ai, b0, acc[i][0]);
            acc[i][1] = _mm512_fmadd_ps(ai, b1, acc[i][1]);
        }
    }
    GMM__UNROLL
    for (i = 0; i < GMM__MR_512; i++) {
        _mm512_storeu_ps(c + i * ldc, acc[i][0]);
        _mm512_storeu_ps(c + i * ldc + 16, acc[i][1]);
    }
}
#endif

typedef struct gmm__cpu_tile {
    int mr, nr;
    void (*run)(int64_t kc, const float *a, const float *b, float *c, int64_t ldc);
} gmm__cpu_tile;

/* By gmm_context.cpu_level. */
static const gmm__cpu_tile gmm__cpu_tiles[] = {
    { GMM__MR, GMM__NR, gmm__tile_plain },
    { GMM__MR, GMM__NR, gmm__tile_plain },
#ifdef GMM__X86
    { GMM__MR, GMM__NR, gmm__tile_avx2 },
    { GMM__MR_512, GMM__NR_512, gmm__tile_avx512 },
#endif
};

/* --- one block of a product: C[m][n] = sum over k of A(i, k) B(j, k), C in fp32, ld GMM__NC --- */

/* Rows of a token matrix that are gathered: row r of the product is row at[r] / div of the matrix, or a row of zeros
   where the entry is negative or past the matrix. at NULL: row r is row r. */
typedef struct gmm__cpu_index {
    const int32_t *at;
    int64_t div, rows; /* divisor; rows of the matrix */
} gmm__cpu_index;

/* The index of the operand in a role of a linear call. */
static gmm__cpu_index gmm__cpu_index_of(const gmm_linear *d, int role) {
    gmm__cpu_index index;
    index.at = role == GMM__X_ ? d->x_index : role == GMM__DY ? d->dy_index : NULL;
    index.div = d->index_div;
    index.rows = d->index_rows;
    return index;
}
/* The row of the matrix that is row r of the product; -1: zeros. */
static int64_t gmm__cpu_indexed_row(const gmm__cpu_index *index, int64_t r) {
    int64_t row;
    if (!index->at) return r;
    if (index->at[r] < 0) return -1;
    row = index->at[r] / index->div;
    return row < index->rows ? row : -1;
}
/* Sets GMM_FAULT_INDEX if an entry of the first `live` rows is past the matrix. */
static void gmm__cpu_index_faults(const gmm__cpu_index *index, int64_t live, uint32_t *fault) {
    int64_t r;
    int past = 0;
    if (!index->at || !fault) return;
    for (r = 0; r < live; r++) past |= index->at[r] >= 0 && index->at[r] / index->div >= index->rows;
    if (past) *fault |= (uint32_t)GMM_FAULT_INDEX;
}

/* An operand A or B, in fp32 or 16 bits: element (i, k) is base[i * stride_i + k * stride_k], and one of the strides is
   1. Quantized: element k of line first_line + i of the view. With an index, the row of element (i, k) in the token
   matrix, which is i or k by `along_rows`, counts from first_row and is looked up. */
typedef struct gmm__cpu_operand {
    gmm_dtype dtype;
    int quantized, along_rows;
    const void *base;
    int64_t stride_i, stride_k;
    gmm__qview view;
    int64_t first_line, first_row;
    gmm__cpu_index index;
} gmm__cpu_operand;
/* A constant where the build has no quantized operands, so that their code is left out. */
#ifdef GMM_NO_QUANT
#define GMM__QUANTIZED(operand) ((void)(operand), 0)
#else
#define GMM__QUANTIZED(operand) (operand)->quantized
#endif

/* Address of element (i, k) of an operand of floats; NULL: it is in a row of zeros. */
static const char *gmm__cpu_element(const gmm__cpu_operand *f, int64_t i, int64_t k) {
    if (f->index.at) {
        const int64_t row = gmm__cpu_indexed_row(&f->index, f->first_row + (f->along_rows ? k : i));
        if (row < 0) return NULL;
        if (f->along_rows) k = row;
        else i = row;
    }
    return (const char *)f->base + (i * f->stride_i + k * f->stride_k) * (gmm_dtype_bits(f->dtype) / 8);
}

/* Loads n elements of a row; src NULL: zeros. */
static void gmm__cpu_load(gmm_dtype dtype, const void *src, float *dst, int64_t n) {
    if (src) gmm__row_load(dtype, src, dst, n);
    else memset(dst, 0, (size_t)n * sizeof *dst);
}

/* Writes rows row[0..n) as columns of a panel: panel[k * width + i] = row[i][k]. */
static void gmm__cpu_transpose(float row[][GMM__KC], int n, int64_t kc, int width, float *panel) {
    int64_t k = 0;
    int i;
#ifdef GMM__X86
    if (n == 4)
        for (; k + 4 <= kc; k += 4) {
            __m128 a = _mm_loadu_ps(row[0] + k), b = _mm_loadu_ps(row[1] + k), c = _mm_loadu_ps(row[2] + k),
                   d = _mm_loadu_ps(row[3] + k);
            _MM_TRANSPOSE4_PS(a, b, c, d);
            _mm_storeu_ps(panel + k * width, a);
            _mm_storeu_ps(panel + (k + 1) * width, b);
            _mm_storeu_ps(panel + (k + 2) * width, c);
            _mm_storeu_ps(panel + (k + 3) * width, d);
        }
#endif
    for (; k < kc; k++)
        for (i = 0; i < n; i++) panel[k * width + i] = row[i][k];
}

/* Packs `count` rows of an operand as panels [ceil(count / width)][kc][width] of fp32, and pads the last one with
   zeros. */
static void gmm__cpu_pack(const gmm__cpu_operand *f, int64_t count, int64_t k0, int64_t kc, int width, float *panel) {
    int64_t i0, k;
    for (i0 = 0; i0 < count; i0 += width, panel += kc * width) {
        const int rows = count - i0 < width ? (int)(count - i0) : width;
        int i;
        if (!GMM__QUANTIZED(f) && f->along_rows) {
            for (k = 0; k < kc; k++) {
                gmm__cpu_load(f->dtype, gmm__cpu_element(f, i0, k0 + k), panel + k * width, rows);
                for (i = rows; i < width; i++) panel[k * width + i] = 0.0f;
            }
        } else {
            float row[4][GMM__KC];
            for (i = 0; i < rows; i += 4) {
                const int n = rows - i < 4 ? rows - i : 4;
                int r;
                for (r = 0; r < n; r++)
                    if (GMM__QUANTIZED(f)) gmm__qview_load(&f->view, f->first_line + i0 + i + r, k0, kc, 0, row[r]);
                    else gmm__cpu_load(f->dtype, gmm__cpu_element(f, i0 + i + r, k0), row[r], kc);
                gmm__cpu_transpose(row, n, kc, width, panel + i);
            }
            for (i = rows; i < width; i++)
                for (k = 0; k < kc; k++) panel[k * width + i] = 0.0f;
        }
    }
}

/* One thread's panels of A and of B, and its block of C. */
typedef struct gmm__cpu_scratch { float *a, *b, *c; } gmm__cpu_scratch;

/* Number of floats of each of the three: an upper bound for a call, a multiple of a cache line. */
typedef struct gmm__cpu_extent { int64_t a, b, c; } gmm__cpu_extent;
static gmm__cpu_extent gmm__cpu_extent_of(const gmm__call *call, const gmm__cpu_tile *tile) {
    const int fwd = call->op == GMM_OP_LINEAR_FWD, wgrad = call->op == GMM_OP_LINEAR_WGRAD;
    const int64_t rows = gmm__min_i64(wgrad ? call->out : call->rows, GMM__MC);
    const int64_t m = gmm__round_up(rows, tile->mr);
    const int64_t n = gmm__round_up(gmm__min_i64(fwd ? call->out : call->in, GMM__NC), tile->nr);
    /* the Hadamard transform of wgrad's operands mixes 16 rows, and leaves no zeros in the last block */
    const int64_t max_k = wgrad ? gmm__round_up(gmm__min_i64(call->rows, GMM__KC), 16) : fwd ? call->in : call->out;
    const int64_t k = gmm__min_i64(max_k, GMM__KC);
    gmm__cpu_extent e;
    e.a = gmm__round_up(m * k, 16);
    e.b = gmm__round_up(k * n, 16);
    e.c = m * GMM__NC;
    return e;
}
static size_t gmm__cpu_extent_bytes(gmm__cpu_extent e) { return sizeof(float) * (size_t)(e.a + e.b + e.c); }
static gmm__cpu_scratch gmm__cpu_scratch_at(void *base, gmm__cpu_extent e, int32_t thread) {
    gmm__cpu_scratch s;
    s.a = (float *)(void *)((char *)base + (size_t)thread * gmm__cpu_extent_bytes(e));
    s.b = s.a + e.a;
    s.c = s.b + e.b;
    return s;
}

/* Rows [first, first + count) of an operand, packed as a panel. */
typedef struct gmm__cpu_panel {
    const gmm__cpu_operand *operand;
    int64_t first, count;
    const float *packed;
} gmm__cpu_panel;
static gmm__cpu_panel gmm__cpu_panel_of(const gmm__cpu_operand *operand, int64_t first, int64_t rows, int width,
                                        const float *packed) {
    gmm__cpu_panel p;
    p.operand = operand;
    p.first = first;
    p.count = gmm__min_i64(rows - first, width);
    p.packed = packed;
    return p;
}
static float gmm__cpu_panel_scale(const gmm__cpu_panel *p, int64_t row, int64_t k) {
    return gmm__qview_factor(&p->operand->view, p->operand->first_line + p->first + row, k / 128, 1);
}

/* Promotes a register tile of one block of 128 elements along k, which begins at k: its accumulators times the scales
   of A and of B are added to c. */
static void gmm__cpu_promote(const gmm__cpu_tile *tile, const gmm__cpu_panel *a, const gmm__cpu_panel *b, int64_t k,
                             int64_t kc, float *c) {
    float acc[GMM__MR_512 * GMM__NR_512] = { 0 }, scale_b[GMM__NR_512];
    int64_t i, j;
    tile->run(kc, a->packed, b->packed, acc, tile->nr);
    for (j = 0; j < b->count; j++) scale_b[j] = gmm__cpu_panel_scale(b, j, k);
    for (i = 0; i < a->count; i++) {
        const float scale = gmm__cpu_panel_scale(a, i, k), lift = gmm__scale_lift(scale);
        const float scale_a = scale * (1.0f / lift);
        for (j = 0; j < b->count; j++) c[i * GMM__NC + j] += acc[i * tile->nr + j] * scale_a * (scale_b[j] * lift);
    }
}

static void gmm__cpu_block(const gmm__cpu_tile *tile, const gmm__cpu_scratch *s, const gmm__cpu_operand *A, int64_t m,
                           const gmm__cpu_operand *B, int64_t n, int64_t K) {
    const int64_t mp = gmm__round_up(m, tile->mr), np = gmm__round_up(n, tile->nr);
    const int promote = GMM__QUANTIZED(A) && gmm_block_along(A->view.scaling) == 128;
    const int64_t step = promote ? 128 : GMM__KC;
    int64_t i, j, k;
    for (i = 0; i < mp; i++) memset(s->c + i * GMM__NC, 0, (size_t)np * sizeof(float));
    for (k = 0; k < K; k += step) {
        const int64_t kc = gmm__min_i64(K - k, step);
        gmm__cpu_pack(A, m, k, kc, tile->mr, s->a);
        gmm__cpu_pack(B, n, k, kc, tile->nr, s->b);
        for (j = 0; j < np; j += tile->nr)
            for (i = 0; i < mp; i += tile->mr) {
                const gmm__cpu_panel a = gmm__cpu_panel_of(A, i, m, tile->mr, s->a + i * kc);
                const gmm__cpu_panel b = gmm__cpu_panel_of(B, j, n, tile->nr, s->b + j * kc);
                float *c = s->c + i * GMM__NC + j;
                if (promote) gmm__cpu_promote(tile, &a, &b, k, kc, c);
                else tile->run(kc, a.packed, b.packed, c, GMM__NC);
            }
    }
}

/* The scale of line l that applies to whole sums: that of TENSOR or ROW, or the amax of NV16. */
static float gmm__cpu_outer_scale(const gmm__cpu_operand *f, int64_t l) {
    const gmm__qview *v = &f->view;
    if (!GMM__QUANTIZED(f)) return 1.0f;
    if (v->scaling == GMM_SCALING_NV16) return v->amax[v->per_line ? l : 0];
    return v->scaling == GMM_SCALING_TENSOR || v->scaling == GMM_SCALING_ROW ? gmm__qview_factor(v, l, 0, 1) : 1.0f;
}
/* Multiplies the accumulators of line i of A by alpha, the outer scales of A and B, and 1 / (6 e4m3_max) for each NV16
   operand. */
static void gmm__cpu_scale_row(float *acc, int64_t n, float alpha, const gmm__cpu_operand *A, int64_t i,
                               const gmm__cpu_operand *B) {
    const float a = GMM__QUANTIZED(A) && A->view.scaling == GMM_SCALING_NV16 ? 6.0f * A->view.e4m3_max : 1.0f;
    const float b = GMM__QUANTIZED(B) && B->view.scaling == GMM_SCALING_NV16 ? 6.0f * B->view.e4m3_max : 1.0f;
    const float outer = gmm__cpu_outer_scale(A, A->first_line + i), inverse = 1.0f / (a * b);
    const int moderate = gmm__scale_moderate(alpha) && gmm__scale_moderate(outer);
    const int by_line = GMM__QUANTIZED(B) && (B->view.scaling == GMM_SCALING_ROW || B->view.per_line);
    int64_t j;
    for (j = 0; j < n;) { /* consecutive columns with the same scale */
        const float column = gmm__cpu_outer_scale(B, B->first_line + j);
        const int64_t end = by_line ? j + 1 : n;
        if (moderate && gmm__scale_moderate(column))
            for (; j < end; j++) acc[j] *= alpha * outer * column * inverse;
        else
            for (; j < end; j++) acc[j] = gmm__scale_sum(acc[j], alpha, outer, column, inverse);
    }
}

/* acc = alpha acc + addend s over one row. `addend` may be NULL. */
static void gmm__cpu_scale_add_row(float *acc, int64_t n, float alpha, const float *addend, float s) {
    int64_t i;
    if (alpha != 1.0f)
        for (i = 0; i < n; i++) acc[i] *= alpha;
    if (addend)
        for (i = 0; i < n; i++) acc[i] += addend[i] * s;
}

/* dst = (alpha acc + addend s) + beta dst over one row; beta 0 does not read dst. `addend` may be NULL. */
static void gmm__cpu_store_row(float *acc, int64_t n, float alpha, const float *addend, float s, float beta,
                               gmm_dtype dtype, void *dst) {
    int64_t i;
    gmm__cpu_scale_add_row(acc, n, alpha, addend, s);
    if (beta != 0.0f) {
        float previous[GMM__NC];
        gmm__row_load(dtype, dst, previous, n);
        for (i = 0; i < n; i++) acc[i] += beta * previous[i];
    }
    gmm__row_store(dtype, dst, acc, n);
}

/* --- CPU engine: forward, dgrad, wgrad and bias gradient of grouped linear layers --- */

enum { GMM__PART_OFFSETS, GMM__PART_STARTS, GMM__PART_PADDED, GMM__PART_SCRATCH };

/* Arguments of the tasks of a linear operation. */
typedef struct gmm__cpu_linear {
    const gmm__call *call;
    const gmm__cpu_tile *tile;
    const int64_t *offsets; /* [G + 1] rows */
    const int64_t *starts;  /* [G + 1] row blocks before each group */
    const int64_t *padded;  /* [G + 1] rows before each group in padded copies */
    const float *bias_scale; /* bias gradient; NULL = ones */
    gmm__cpu_index dy_index; /* bias gradient */
    void *scratch;
    gmm__cpu_extent extent;
    int64_t col_blocks, row_blocks;
} gmm__cpu_linear;

/* The group g with starts[g] <= i < starts[g + 1]. */
static int64_t gmm__cpu_find_group(const int64_t *starts, int64_t groups, int64_t i) {
    int64_t low = 0, high = groups;
    while (high - low > 1) {
        const int64_t mid = low + (high - low) / 2;
        if (starts[mid] <= i) low = mid;
        else high = mid;
    }
    return low;
}

/* The operand in a role for group g: a quantized matrix from line first_line on, or floats from element (row, col) on,
   with k along the rows (along_rows) or along the columns. */
static gmm__cpu_operand gmm__cpu_operand_of(const gmm__cpu_linear *job, int role, int64_t g, int64_t first_line,
                                            int64_t row, int64_t col, int along_rows) {
    const gmm__call *call = job->call;
    const gmm_mat *m = &call->mat[role];
    const int weight = role == GMM__W;
    gmm__cpu_operand f;
    memset(&f, 0, sizeof f);
    f.dtype = m->dtype;
    f.first_line = first_line;
    f.quantized = m->scaling != GMM_SCALING_NONE;
    if (GMM__QUANTIZED(&f))
        f.view = gmm__qview_of(m, call->direction[role], !weight, g, weight ? 0 : job->offsets[g],
                               weight ? 0 : job->padded[g], weight ? call->out : job->offsets[g + 1] - job->offsets[g],
                               role == GMM__DY ? call->out : call->in);
    else {
        f.index = gmm__cpu_index_of(&call->d.linear, role);
        f.first_row = row;
        f.along_rows = along_rows;
        /* a matrix without rows may have no address */
        if (!f.index.at || f.index.rows) f.base = gmm__at(m, weight ? g : 0, f.index.at ? 0 : row, col);
        f.stride_i = along_rows ? 1 : m->ld;
        f.stride_k = along_rows ? m->ld : 1;
    }
    return f;
}

/* Reports the entries past the matrices of a call's indices. */
static void gmm__cpu_linear_faults(const gmm__call *call, int64_t live) {
    const gmm__cpu_index x = gmm__cpu_index_of(&call->d.linear, GMM__X_);
    const gmm__cpu_index dy = gmm__cpu_index_of(&call->d.linear, GMM__DY);
    gmm__cpu_index_faults(&x, live, call->groups.fault);
    gmm__cpu_index_faults(&dy, live, call->groups.fault);
}

/* One block of y or dx: rows of one group by columns of the output. */
static void gmm__cpu_rows_task(const void *arg, int64_t index, int32_t thread) {
    const gmm__cpu_linear *job = (const gmm__cpu_linear *)arg;
    const gmm__call *call = job->call;
    const gmm_linear *d = &call->d.linear;
    const int fwd = call->op == GMM_OP_LINEAR_FWD;
    const gmm_mat *bias = &call->mat[GMM__BIAS], *out = &call->mat[fwd ? GMM__Y : GMM__DX];
    const int64_t cols = fwd ? call->out : call->in, K = fwd ? call->in : call->out;
    const int64_t block = index / job->col_blocks, g = gmm__cpu_find_group(job->starts, call->groups.count, block);
    const int64_t r0 = job->offsets[g] + (block - job->starts[g]) * GMM__MC, remaining = job->offsets[g + 1] - r0;
    const int64_t m = gmm__min_i64(remaining, GMM__MC), c0 = (index % job->col_blocks) * GMM__NC;
    const int64_t n = gmm__min_i64(cols - c0, GMM__NC);
    const gmm__cpu_scratch s = gmm__cpu_scratch_at(job->scratch, job->extent, thread);
    float addend[GMM__NC], alpha = gmm__alpha(d, g);
    gmm__cpu_operand A, B;
    int64_t i;

    A = gmm__cpu_operand_of(job, fwd ? GMM__X_ : GMM__DY, g, r0 - job->offsets[g], r0, 0, 0);
    B = gmm__cpu_operand_of(job, GMM__W, g, c0, fwd ? c0 : 0, fwd ? 0 : c0, !fwd);
    gmm__cpu_block(job->tile, &s, &A, m, &B, n, K);
    if (bias->dtype != GMM_NONE) gmm__row_load(bias->dtype, gmm__at(bias, g, 0, c0), addend, n);
    if (GMM__QUANTIZED(&B)) alpha = 1.0f;
    for (i = 0; i < m && GMM__QUANTIZED(&B); i++)
        gmm__cpu_scale_row(s.c + i * GMM__NC, n, gmm__alpha(d, g), &A, i, &B);
    for (i = 0; i < m; i++) {
        float *const row = s.c + i * GMM__NC;
        gmm__cpu_scale_add_row(row, n, alpha, bias->dtype != GMM_NONE ? addend : NULL,
                               d->bias_scale ? d->bias_scale[r0 + i] : 1.0f);
        gmm__cpu_store_row(row, n, d->prob ? d->prob[r0 + i] : 1.0f, NULL, 0.0f, d->y_add ? 1.0f : 0.0f, out->dtype,
                           gmm__at(out, 0, r0 + i, c0));
    }
}

/* One block of dw: out features by in features of one group, summed over the group's rows. */
static void gmm__cpu_wgrad_task(const void *arg, int64_t index, int32_t thread) {
    const gmm__cpu_linear *job = (const gmm__cpu_linear *)arg;
    const gmm__call *call = job->call;
    const gmm_mat *x = &call->mat[GMM__X_], *dw = &call->mat[GMM__DW];
    const gmm_grad *grad = &call->grad[GMM__DW];
    const int64_t per_group = job->row_blocks * job->col_blocks, g = index / per_group;
    const int64_t n0 = index % per_group / job->col_blocks * GMM__MC, k0 = index % job->col_blocks * GMM__NC;
    const int64_t n = gmm__min_i64(call->out - n0, GMM__MC);
    const int64_t k = gmm__min_i64(call->in - k0, GMM__NC);
    const int64_t r0 = job->offsets[g], rows = job->offsets[g + 1] - r0;
    const gmm__cpu_scratch s = gmm__cpu_scratch_at(job->scratch, job->extent, thread);
    const float beta = gmm__grad_beta(grad, g);
    gmm__cpu_operand A, B;
    float alpha;
    int64_t i;

    if (grad->frozen && grad->frozen[g]) return;
    if (rows == 0 && beta == 1.0f) return; /* an empty group keeps all bits, also of -0.0 and NaN */
    A = gmm__cpu_operand_of(job, GMM__DY, g, n0, r0, n0, 1);
    B = gmm__cpu_operand_of(job, GMM__X_, g, k0, r0, k0, 1);
    /* the Hadamard transform mixes 16 rows, and leaves no zeros in the last block */
    gmm__cpu_block(job->tile, &s, &A, n, &B, k, x->hadamard ? gmm__round_up(rows, 16) : rows);
    /* an empty sum is +0, whatever the sign of alpha */
    alpha = rows ? gmm__alpha(&call->d.linear, g) : 1.0f;
    for (i = 0; i < n && rows && GMM__QUANTIZED(&B); i++) gmm__cpu_scale_row(s.c + i * GMM__NC, k, alpha, &A, i, &B);
    if (GMM__QUANTIZED(&B)) alpha = 1.0f;
    for (i = 0; i < n; i++)
        gmm__cpu_store_row(s.c + i * GMM__NC, k, alpha, NULL, 0.0f, beta, dw->dtype, gmm__at(dw, g, n0 + i, k0));
}

/* Tasks and work of a product of `rows` rows in `blocks` row blocks. Every block packs the weights; in wgrad every
   group stores its gradient. */
static int64_t gmm__cpu_product_tasks(const gmm__call *call, int64_t blocks) {
    const int fwd = call->op == GMM_OP_LINEAR_FWD;
    if (call->op == GMM_OP_LINEAR_WGRAD)
        return call->groups.count * gmm__ceil_div(call->out, GMM__MC) * gmm__ceil_div(call->in, GMM__NC);
    return blocks * gmm__ceil_div(fwd ? call->out : call->in, GMM__NC);
}
static double gmm__cpu_product_work(const gmm__call *call, int64_t rows, int64_t blocks) {
    const int64_t passes = call->op == GMM_OP_LINEAR_WGRAD ? call->groups.count : blocks;
    return (double)call->in * (double)call->out * ((double)passes + (double)rows / GMM__CPU_MULTIPLY_ADDS);
}

static int gmm__cpu_plan_product(const gmm__call *call, gmm__plan *plan) {
    const size_t groups = (size_t)call->groups.count + 1;
    const int64_t blocks = call->rows / GMM__MC + gmm__min_i64(call->groups.count, call->rows); /* at most */
    const int32_t level = call->ctx->cpu_level, threads = gmm__cpu_threads(call->ctx,
        gmm__cpu_product_tasks(call, blocks), gmm__cpu_product_work(call, call->rows, blocks));
    plan->kernel = level;
    plan->kernel_name = level == 3 ? "AVX-512" : level == 2 ? "AVX2" : "plain C";
    gmm__reserve(plan, GMM__PART_OFFSETS, groups * sizeof(int64_t));
    gmm__reserve(plan, GMM__PART_STARTS, groups * sizeof(int64_t));
    gmm__reserve(plan, GMM__PART_PADDED, groups * sizeof(int64_t));
    gmm__reserve(plan, GMM__PART_SCRATCH,
                 (size_t)threads * gmm__cpu_extent_bytes(gmm__cpu_extent_of(call, &gmm__cpu_tiles[level])));
    (void)snprintf(plan->note, sizeof plan->note, "up to %d thread%s", (int)threads, threads == 1 ? "" : "s");
    return 1;
}

static gmm_status gmm__cpu_launch_product(const gmm__plan *plan, gmm_stream stream) {
    const gmm__call *call = plan->call;
    const int64_t G = call->groups.count;
    int64_t *offsets = (int64_t *)gmm__part(plan, GMM__PART_OFFSETS);
    int64_t *starts = (int64_t *)gmm__part(plan, GMM__PART_STARTS);
    int64_t *padded = (int64_t *)gmm__part(plan, GMM__PART_PADDED);
    const int64_t live = gmm__cpu_offsets(&call->groups, offsets);
    gmm__cpu_linear job;
    int64_t blocks, g;

    (void)stream;
    job.call = call;
    job.tile = &gmm__cpu_tiles[plan->kernel];
    job.offsets = offsets;
    job.starts = starts;
    job.padded = padded;
    job.scratch = gmm__part(plan, GMM__PART_SCRATCH);
    job.extent = gmm__cpu_extent_of(call, job.tile);
    starts[0] = padded[0] = 0;
    for (g = 0; g < G; g++) {
        padded[g + 1] = padded[g] + gmm_group_rows(offsets[g + 1] - offsets[g]);
        starts[g + 1] = starts[g] + gmm__ceil_div(offsets[g + 1] - offsets[g], GMM__MC);
    }
    blocks = starts[G];
    gmm__cpu_linear_faults(call, live);
    if (call->op == GMM_OP_LINEAR_WGRAD) {
        job.row_blocks = gmm__ceil_div(call->out, GMM__MC);
        job.col_blocks = gmm__ceil_div(call->in, GMM__NC);
        gmm__cpu_for(call->ctx, gmm__cpu_product_tasks(call, blocks), gmm__cpu_product_work(call, live, blocks),
                     gmm__cpu_wgrad_task, &job);
    } else {
        const int64_t cols = call->op == GMM_OP_LINEAR_FWD ? call->out : call->in;
        job.row_blocks = blocks;
        job.col_blocks = gmm__ceil_div(cols, GMM__NC);
        gmm__cpu_for(call->ctx, gmm__cpu_product_tasks(call, blocks), gmm__cpu_product_work(call, live, blocks),
                     gmm__cpu_rows_task, &job);
        gmm__cpu_tail(&call->mat[call->op == GMM_OP_LINEAR_FWD ? GMM__Y : GMM__DX], call->groups.tail, live, call->rows,
                      cols);
    }
    return GMM_OK;
}

enum { GMM__CHUNK = 256 }; /* columns or rows of one task of a streaming operation */

/* Loads n elements of dy's row r from column c on, through the index if there is one. */
static void gmm__cpu_load_dy(const gmm__cpu_linear *job, int64_t r, int64_t c, float *dst, int64_t n) {
    const gmm_mat *dy = &job->call->mat[GMM__DY];
    const int64_t row = gmm__cpu_indexed_row(&job->dy_index, r);
    gmm__cpu_load(dy->dtype, row < 0 ? NULL : gmm__at(dy, 0, row, c), dst, n);
}

/* A chunk of columns of db of one group. */
static void gmm__cpu_bgrad_task(const void *arg, int64_t index, int32_t thread) {
    const gmm__cpu_linear *job = (const gmm__cpu_linear *)arg;
    const gmm__call *call = job->call;
    const gmm_mat *db = &call->mat[GMM__DB];
    const gmm_grad *grad = &call->grad[GMM__DB];
    const float *scale = job->bias_scale;
    const int64_t g = index / job->col_blocks, c0 = index % job->col_blocks * GMM__CHUNK;
    const int64_t n = gmm__min_i64(call->out - c0, GMM__CHUNK);
    const float beta = gmm__grad_beta(grad, g);
    float sum[GMM__CHUNK] = { 0 }, row[GMM__CHUNK];
    int64_t r, i;
    (void)thread;
    if (grad->frozen && grad->frozen[g]) return;
    if (job->offsets[g] == job->offsets[g + 1] && beta == 1.0f) return;
    for (r = job->offsets[g]; r < job->offsets[g + 1]; r++) {
        const float s = scale ? scale[r] : 1.0f;
        gmm__cpu_load_dy(job, r, c0, row, n);
        for (i = 0; i < n; i++) sum[i] += s * row[i];
    }
    gmm__cpu_store_row(sum, n, 1.0f, NULL, 0.0f, beta, db->dtype, gmm__at(db, g, 0, c0));
}

/* A chunk of rows of d_bias_scale. Sums accumulate in lanes, in an order that depends on N alone. */
static void gmm__cpu_bias_scale_task(const void *arg, int64_t index, int32_t thread) {
    const gmm__cpu_linear *job = (const gmm__cpu_linear *)arg;
    const gmm__call *call = job->call;
    const gmm_mat *bias = &call->mat[GMM__BIAS];
    float *out = call->d.linear.d_bias_scale;
    const int64_t G = call->groups.count, live = job->offsets[G], r1 = (index + 1) * GMM__CHUNK;
    int64_t r, c;
    (void)thread;
    for (r = index * GMM__CHUNK; r < r1 && r < live; r++) {
        const int64_t g = gmm__cpu_find_group(job->offsets, G, r);
        float lane[GMM__LANES] = { 0 }, row[GMM__CHUNK], b[GMM__CHUNK], sum;
        for (c = 0; c < call->out; c += GMM__CHUNK) {
            const int64_t n = gmm__min_i64(call->out - c, GMM__CHUNK);
            gmm__cpu_load_dy(job, r, c, row, n);
            gmm__row_load(bias->dtype, gmm__at(bias, g, 0, c), b, n);
            gmm__lanes_add(lane, row, b, n);
        }
        sum = gmm__lanes_sum(lane);
        out[r] = call->d.linear.d_bias_scale_add ? out[r] + sum : sum;
    }
}

/* db of a call from its dy; `linear` has bias_scale and dy_index. */
static void gmm__cpu_bgrad(const gmm__call *call, const int64_t *offsets, const gmm_linear *linear) {
    gmm__cpu_linear job;
    memset(&job, 0, sizeof job);
    job.call = call;
    job.offsets = offsets;
    job.bias_scale = linear->bias_scale;
    job.dy_index = gmm__cpu_index_of(linear, GMM__DY);
    job.col_blocks = gmm__ceil_div(call->out, GMM__CHUNK);
    gmm__cpu_for(call->ctx, call->groups.count * job.col_blocks,
                 (double)call->out * (double)(call->groups.count + offsets[call->groups.count]), gmm__cpu_bgrad_task,
                 &job);
}

static int gmm__cpu_plan_linear_bgrad(const gmm__call *call, gmm__plan *plan) {
    gmm__reserve(plan, GMM__PART_OFFSETS, ((size_t)call->groups.count + 1) * sizeof(int64_t));
    return 1;
}

static gmm_status gmm__cpu_launch_linear_bgrad(const gmm__plan *plan, gmm_stream stream) {
    const gmm__call *call = plan->call;
    int64_t *offsets = (int64_t *)gmm__part(plan, GMM__PART_OFFSETS);
    const int64_t live = gmm__cpu_offsets(&call->groups, offsets);
    gmm__cpu_linear job;
    int64_t r;
    (void)stream;
    memset(&job, 0, sizeof job);
    job.call = call;
    job.offsets = offsets;
    job.dy_index = gmm__cpu_index_of(&call->d.linear, GMM__DY);
    gmm__cpu_linear_faults(call, live);
    if (call->mat[GMM__DB].dtype != GMM_NONE) gmm__cpu_bgrad(call, offsets, &call->d.linear);
    if (call->d.linear.d_bias_scale) {
        gmm__cpu_for(call->ctx, gmm__ceil_div(live, GMM__CHUNK), (double)live * (double)call->out,
                     gmm__cpu_bias_scale_task, &job);
        if (call->groups.tail == GMM_TAIL_ZERO)
            for (r = live; r < call->rows; r++) call->d.linear.d_bias_scale[r] = 0.0f;
    }
    return GMM_OK;
}

/* .............................................................................................. 14.4 Activation ... */

/* Presets and properties of activations; checks and entry points of gmm_act_fwd and gmm_act_bwd. */

GMMDEF gmm_act gmm_act_of(gmm_act_preset preset) {
    gmm_act a = GMM_ZERO;
    switch (preset) {
    case GMM_ACT_PRESET_SWIGLU: a.kind = GMM_ACT_SWIGLU; break;
    case GMM_ACT_PRESET_GPT_OSS:
        a.kind = GMM_ACT_SWIGLU;
        a.interleave = 1;
        a.limit = 7.0f;
        a.alpha = 1.702f;
        a.offset = 1.0f;
        break;
    case GMM_ACT_PRESET_KIMI_SITU:
        a.kind = GMM_ACT_SITUGLU;
        a.beta1 = 4.0f;
        a.beta2 = 25.0f;
        break;
    case GMM_ACT_PRESET_NEMOTRON: a.kind = GMM_ACT_RELU2; break;
    default: break;
    }
    return a;
}

/* A row of GMM_ACT_LIST: whether the activation is gated, and whether it takes alpha and the betas. The row of an
   unknown kind has the name NULL. */
typedef struct gmm__act_row {
    const char *name;
    gmm_gate gate;
    int gated, alpha, betas;
} gmm__act_row;

static gmm__act_row gmm__act_row_of(gmm_act_kind kind) {
    switch (kind) {
#define GMM__X(name, value, text, gate, gated, alpha, betas) \
    case name: { \
        const gmm__act_row row = { #text, gate, gated, alpha, betas }; \
        return row; \
    }
        GMM_ACT_LIST(GMM__X)
#undef GMM__X
    default: {
        const gmm__act_row row = { NULL, GMM_GATE_MAX, 0, 0, 0 };
        return row;
    }
    }
}

GMMDEF const char *gmm_act_name(gmm_act_kind kind) {
    const char *name = gmm__act_row_of(kind).name;
    return name ? name : "?";
}

GMMDEF int gmm_act_gated(gmm_act_kind kind) { return gmm__act_row_of(kind).gated; }

static int gmm__is_finite(float v) { return (gmm_f32_bits(v) & 0x7F800000u) != 0x7F800000u; }

/* Checks that the settings of an activation over `ffn` columns are consistent. If not, `rule` becomes a message that
   begins with `prefix` and the field's name: "act.limit: -1 must be 0 or finite and > 0". */
static gmm_status gmm__check_act(const gmm_act *act, int64_t ffn, const char *prefix, char *rule, size_t size) {
    const gmm__act_row row = gmm__act_row_of(act->kind);
    const double limit = (double)act->limit, alpha = (double)act->alpha, offset = (double)act->offset;
    const double beta1 = (double)act->beta1, beta2 = (double)act->beta2;
    uint32_t reserved = 0;
    size_t i;

    for (i = 0; i < sizeof act->reserved / sizeof act->reserved[0]; i++) reserved |= act->reserved[i];
    if (reserved) (void)snprintf(rule, size, "%sreserved: %u must be 0", prefix, reserved);
    else if (!row.name)
        (void)snprintf(rule, size, "%skind: %d is no activation", prefix, (int)act->kind);
    else if (act->interleave < 0)
        (void)snprintf(rule, size, "%sinterleave: %d must be >= 0", prefix, (int)act->interleave);
    else if (act->interleave && !row.gated)
        (void)snprintf(rule, size, "%sinterleave: %d must be 0, as %s is not gated", prefix, (int)act->interleave,
                       row.name);
    else if (act->interleave && ffn % act->interleave)
        (void)snprintf(rule, size, "%sinterleave: %d must divide ffn %lld", prefix, (int)act->interleave,
                       (long long)ffn);
    else if (!gmm__is_finite(act->limit) || limit < 0.0)
        (void)snprintf(rule, size, "%slimit: %g must be 0 or finite and > 0", prefix, limit);
    else if (!gmm__is_finite(act->alpha))
        (void)snprintf(rule, size, "%salpha: %g must be finite", prefix, alpha);
    else if (!row.alpha && alpha != 0.0 && alpha != 1.0)
        (void)snprintf(rule, size, "%salpha: %g must be 0 or 1, as %s takes no alpha", prefix, alpha, row.name);
    else if (!gmm__is_finite(act->offset))
        (void)snprintf(rule, size, "%soffset: %g must be finite", prefix, offset);
    else if (!row.gated && offset != 0.0)
        (void)snprintf(rule, size, "%soffset: %g must be 0, as %s is not gated", prefix, offset, row.name);
    else if (!gmm__is_finite(act->beta1) || beta1 < 0.0)
        (void)snprintf(rule, size, "%sbeta1: %g must be 0 or finite and > 0", prefix, beta1);
    else if (!gmm__is_finite(act->beta2) || beta2 < 0.0)
        (void)snprintf(rule, size, "%sbeta2: %g must be 0 or finite and > 0", prefix, beta2);
    else if (!row.betas && beta1 != 0.0)
        (void)snprintf(rule, size, "%sbeta1: %g must be 0, as %s takes no betas", prefix, beta1, row.name);
    else if (!row.betas && beta2 != 0.0)
        (void)snprintf(rule, size, "%sbeta2: %g must be 0, as %s takes no betas", prefix, beta2, row.name);
    else return GMM_OK;
    return GMM_E_CONFIG;
}

/* Checks an activation call. Sets call->act to the settings, call->out to ffn, and call->in to the columns of x. */
static gmm_status gmm__act_prepare(gmm__call *call, gmm_context *ctx, gmm_op op, const char *function,
                                   const gmm_activation *activation, int query) {
    gmm_activation *d = &call->d.act;
    gmm_status s = gmm__open(call, ctx, op, function, query);
    char rule[160];
    if (s != GMM_OK || (s = gmm__read_descriptor(call, "activation", d, sizeof *d, activation)) != GMM_OK) return s;
    {
        gmm_groups g;
        gmm_act a = GMM_ZERO;
        gmm__peek_groups(d->groups, &g);
        if (d->act) (void)gmm__copy_sized(&a, sizeof a, d->act);
        (void)snprintf(call->shapes, sizeof call->shapes, "G=%d T=%lld ffn=%lld %s %s", g.count,
                       (long long)g.capacity, (long long)d->ffn, gmm_act_name(a.kind), gmm__peek_dtype(d->x));
    }
    if (op != GMM_OP_ACT_FWD && op != GMM_OP_ACT_BWD)
        return gmm__refuse(call, GMM_E_ARG, "op", "%d is neither act_fwd (%d) nor act_bwd (%d)", (int)op,
                           (int)GMM_OP_ACT_FWD, (int)GMM_OP_ACT_BWD);
    if ((s = gmm__read_options(call, d->options)) != GMM_OK || (s = gmm__read_groups(call, d->groups)) != GMM_OK)
        return s;
    if (d->reserved) return gmm__refuse(call, GMM_E_ARG, "reserved", "%d must be 0", d->reserved);
    if (d->ffn < 1) return gmm__refuse(call, GMM_E_ARG, "ffn", "%lld must be >= 1", (long long)d->ffn);
    if ((s = gmm__read(call, "act", &call->act, sizeof call->act, d->act)) != GMM_OK) return s;
    if ((s = gmm__check_act(&call->act, d->ffn, "", rule, sizeof rule)) != GMM_OK)
        return gmm__refuse_member(call, s, "act", rule);
    if (d->ffn > INT64_MAX / 2)
        return gmm__refuse(call, GMM_E_OVERFLOW, "ffn", "%lld does not fit 64 bits twice", (long long)d->ffn);
    call->out = d->ffn;
    call->in = gmm_act_gated(call->act.kind) ? 2 * d->ffn : d->ffn;
    if ((s = gmm__read_mat(call, GMM__X_, "x", d->x, 1, gmm__matrix(call->rows, call->in), GMM__FLOATS)) != GMM_OK ||
        (s = gmm__read_mat(call, GMM__Y, "y", d->y, op == GMM_OP_ACT_FWD, gmm__matrix(call->rows, call->out),
                           GMM__FLOATS)) != GMM_OK ||
        (s = gmm__check_array(call, "prob", d->prob, 0, call->rows)) != GMM_OK)
        return s;
    if (op == GMM_OP_ACT_FWD) return GMM_OK;
    call->in_place = 1; /* engines read all that belongs to an element before they write any of it */
    if ((s = gmm__read_mat(call, GMM__DY, "dy", d->dy, 1, gmm__matrix(call->rows, call->out), GMM__FLOATS)) != GMM_OK ||
        (s = gmm__read_mat(call, GMM__DX, "dx", d->dx, 0, gmm__matrix(call->rows, call->in), GMM__FLOATS)) != GMM_OK ||
        (s = gmm__check_output(call, "dprob", d->dprob, 0, call->rows)) != GMM_OK)
        return s;
    if (!query && !d->dx && !d->dprob && !d->y)
        return gmm__refuse(call, GMM_E_NULL, "dx", "is NULL, and so are activation.dprob and activation.y: "
                           "nothing is asked for");
    return GMM_OK;
}

GMMDEF gmm_status gmm_act_query(gmm_context *ctx, gmm_op op, const gmm_activation *activation, gmm_info *info) {
    gmm__call call;
    const gmm_status s = gmm__act_prepare(&call, ctx, op, "gmm_act_query", activation, 1);
    return s != GMM_OK ? s : gmm__serve(&call, info, NULL, 0, NULL);
}
GMMDEF gmm_status gmm_act_fwd(gmm_context *ctx, const gmm_activation *activation, void *workspace,
                              size_t workspace_bytes, gmm_stream stream) {
    gmm__call call;
    const gmm_status s = gmm__act_prepare(&call, ctx, GMM_OP_ACT_FWD, "gmm_act_fwd", activation, 0);
    return s != GMM_OK ? s : gmm__serve(&call, NULL, workspace, workspace_bytes, stream);
}
GMMDEF gmm_status gmm_act_bwd(gmm_context *ctx, const gmm_activation *activation, void *workspace,
                              size_t workspace_bytes, gmm_stream stream) {
    gmm__call call;
    const gmm_status s = gmm__act_prepare(&call, ctx, GMM_OP_ACT_BWD, "gmm_act_bwd", activation, 0);
    return s != GMM_OK ? s : gmm__serve(&call, NULL, workspace, workspace_bytes, stream);
}

/* --- CPU engine: rows are processed in fp32 buffers, GMM__ACT_CHUNK outputs at a time --- */

enum { GMM__ACT_CHUNK = 256, GMM__ACT_LANES = 16 };

typedef struct gmm__act_job {
    const gmm__call *call;
    gmm_act_coef coef;
    int64_t live, rows_per_task;
    int gated;     /* 1: x and dx have columns of a gate and of values */
    int64_t block; /* GLU block; of halves, and without a gate, all outputs */
    int64_t chunk; /* outputs per step: a multiple of the lanes and of blocks up to GMM__ACT_LANES */
} gmm__act_job;

/* Converts elements [i, i + n) of a row to fp32, and back. */
static GMM__FORCE_INLINE void gmm__act_load(gmm_dtype dtype, const void *row, int64_t i, int64_t n, float *dst) {
    const uint16_t *half = (const uint16_t *)row + i;
    int64_t k;
    if (dtype == GMM_BF16) for (k = 0; k < n; k++) dst[k] = gmm_bf16_to_f32(half[k]);
    else if (dtype == GMM_F16) for (k = 0; k < n; k++) dst[k] = gmm_f16_to_f32(half[k]);
    else memcpy(dst, (const float *)row + i, (size_t)n * sizeof *dst);
}
static GMM__FORCE_INLINE void gmm__act_store(gmm_dtype dtype, void *row, int64_t i, int64_t n, const float *src) {
    uint16_t *half = (uint16_t *)row + i;
    int64_t k;
    if (dtype == GMM_BF16) for (k = 0; k < n; k++) half[k] = gmm_f32_to_bf16(src[k]);
    else if (dtype == GMM_F16) for (k = 0; k < n; k++) half[k] = gmm_f32_to_f16(src[k]);
    else memcpy((float *)row + i, src, (size_t)n * sizeof *src);
}

/* Splits blocks [a:B | b:B | ...] into a and b, and merges them. Inlined with constant B for common block sizes. */
static GMM__FORCE_INLINE void gmm__act_split(int64_t B, int64_t n, const float *interleaved, float *a, float *b) {
    int64_t k, t;
    for (k = 0; k < n / B; k++)
        for (t = 0; t < B; t++) {
            a[k * B + t] = interleaved[2 * k * B + t];
            b[k * B + t] = interleaved[2 * k * B + B + t];
        }
}
static GMM__FORCE_INLINE void gmm__act_merge(int64_t B, int64_t n, float *interleaved, const float *a, const float *b) {
    int64_t k, t;
    for (k = 0; k < n / B; k++)
        for (t = 0; t < B; t++) {
            interleaved[2 * k * B + t] = a[k * B + t];
            interleaved[2 * k * B + B + t] = b[k * B + t];
        }
}

/* Reads the pre-activations a, and b where `gated`, of outputs [j0, j0 + n). Blocks of up to GMM__ACT_LANES are
   converted together and split, larger ones one by one. Each conversion is written once, since it is inlined. */
static GMM__FORCE_INLINE void gmm__act_read(const gmm__act_job *job, const gmm_mat *x, const void *row, int64_t j0,
                                            int64_t n, float *a, float *b) {
    const int64_t B = job->block;
    if (job->gated && B <= GMM__ACT_LANES) {
        float interleaved[2 * GMM__ACT_CHUNK];
        gmm__act_load(x->dtype, row, 2 * j0, 2 * n, interleaved);
        switch (B) {
        case 1: gmm__act_split(1, n, interleaved, a, b); break;
        case 8: gmm__act_split(8, n, interleaved, a, b); break;
        case 16: gmm__act_split(16, n, interleaved, a, b); break;
        default: gmm__act_split(B, n, interleaved, a, b); break;
        }
    } else {
        int64_t i, count;
        int part;
        for (i = 0; i < n; i += count) {
            const int64_t remaining = B - (j0 + i) % B, column = gmm_glu_gate_column(j0 + i, B);
            count = remaining < n - i ? remaining : n - i;
            for (part = 0; part <= job->gated; part++)
                gmm__act_load(x->dtype, row, column + part * B, count, (part ? b : a) + i);
        }
    }
}
static GMM__FORCE_INLINE void gmm__act_write(const gmm__act_job *job, const gmm_mat *dx, void *row, int64_t j0,
                                             int64_t n, const float *a, const float *b) {
    const int64_t B = job->block;
    if (job->gated && B <= GMM__ACT_LANES) {
        float interleaved[2 * GMM__ACT_CHUNK];
        switch (B) {
        case 1: gmm__act_merge(1, n, interleaved, a, b); break;
        case 8: gmm__act_merge(8, n, interleaved, a, b); break;
        case 16: gmm__act_merge(16, n, interleaved, a, b); break;
        default: gmm__act_merge(B, n, interleaved, a, b); break;
        }
        gmm__act_store(dx->dtype, row, 2 * j0, 2 * n, interleaved);
    } else {
        int64_t i, count;
        int part;
        for (i = 0; i < n; i += count) {
            const int64_t remaining = B - (j0 + i) % B, column = gmm_glu_gate_column(j0 + i, B);
            count = remaining < n - i ? remaining : n - i;
            for (part = 0; part <= job->gated; part++)
                gmm__act_store(dx->dtype, row, column + part * B, count, (part ? b : a) + i);
        }
    }
}

/* One chunk of a row: pre-activations a and b, the activation f, and its derivatives df/da and df/db. */
typedef struct gmm__act_chunk {
    float a[GMM__ACT_CHUNK], b[GMM__ACT_CHUNK], f[GMM__ACT_CHUNK], fa[GMM__ACT_CHUNK], fb[GMM__ACT_CHUNK];
} gmm__act_chunk;

/* The first n elements of f, with derivatives or without. Each gate has its own loop, which then has no branch. */
static GMM__FORCE_INLINE void gmm__act_derivatives(gmm_gate gate, int gated, gmm_act_coef coef, int64_t n,
                                                   gmm__act_chunk *c) {
    int64_t i;
    for (i = 0; i < n; i++) c->f[i] = gmm_act_point(gate, gated, coef, c->a[i], c->b[i], &c->fa[i], &c->fb[i]);
}
static GMM__FORCE_INLINE void gmm__act_values(gmm_gate gate, int gated, gmm_act_coef coef, int64_t n,
                                              gmm__act_chunk *c) {
    float da, db;
    int64_t i;
    for (i = 0; i < n; i++) c->f[i] = gmm_act_point(gate, gated, coef, c->a[i], c->b[i], &da, &db);
}

/* Rows [begin, end), forward or backward. */
static GMM__FORCE_INLINE void gmm__act_rows(const gmm__act_job *job, int64_t begin, int64_t end) {
    const gmm__call *call = job->call;
    const gmm_activation *d = &call->d.act;
    const gmm_mat *x = &call->mat[GMM__X_], *y = &call->mat[GMM__Y], *dy = &call->mat[GMM__DY];
    const gmm_mat *dx = &call->mat[GMM__DX];
    const int backward = call->op == GMM_OP_ACT_BWD, derivatives = backward && dx->dtype != GMM_NONE;
    gmm__act_chunk c;
    float g[GMM__ACT_CHUNK], out[GMM__ACT_CHUNK];
    int64_t r, j, i;
    memset(c.b, 0, sizeof c.b);
    for (r = begin; r < end; r++) {
        const void *x_row = gmm__at(x, 0, r, 0), *dy_row = backward ? gmm__at(dy, 0, r, 0) : NULL;
        const float p = d->prob ? d->prob[r] : 1.0f;
        float sum[GMM__ACT_LANES] = GMM_ZERO;
        for (j = 0; j < call->out; j += job->chunk) {
            const int64_t remaining = call->out - j, n = remaining < job->chunk ? remaining : job->chunk;
            /* loops run over a multiple of the lanes, so that they vectorise without a remainder */
            const int64_t full = (n + GMM__ACT_LANES - 1) / GMM__ACT_LANES * GMM__ACT_LANES;
            gmm__act_read(job, x, x_row, j, n, c.a, c.b);
            for (i = n; i < full; i++) c.a[i] = c.b[i] = 0.0f;
            if (derivatives) {
                switch (call->act.kind) {
#define GMM__X(name, value, text, gate, gated, alpha, betas) \
                case name: gmm__act_derivatives(gate, gated, job->coef, full, &c); break;
                    GMM_ACT_LIST(GMM__X)
#undef GMM__X
                default: break;
                }
            } else {
                switch (call->act.kind) {
#define GMM__X(name, value, text, gate, gated, alpha, betas) \
                case name: gmm__act_values(gate, gated, job->coef, full, &c); break;
                    GMM_ACT_LIST(GMM__X)
#undef GMM__X
                default: break;
                }
            }
            if (backward) gmm__act_load(dy->dtype, dy_row, j, n, g); /* y may be dy */
            if (y->dtype != GMM_NONE) {
                for (i = 0; i < full; i++) out[i] = p * c.f[i];
                gmm__act_store(y->dtype, gmm__at(y, 0, r, 0), j, n, out);
            }
            if (!backward) continue;
            for (i = n; i < full; i++) g[i] = 0.0f;
            if (d->dprob)
                for (i = 0; i < full; i++) sum[i % GMM__ACT_LANES] += g[i] * c.f[i];
            if (derivatives) {
                for (i = 0; i < full; i++) {
                    c.a[i] = p * g[i] * c.fa[i];
                    c.b[i] = p * g[i] * c.fb[i];
                }
                gmm__act_write(job, dx, gmm__at(dx, 0, r, 0), j, n, c.a, c.b);
            }
        }
        if (backward && d->dprob) {
            int64_t width;
            for (width = GMM__ACT_LANES / 2; width > 0; width /= 2)
                for (i = 0; i < width; i++) sum[i] += sum[i + width];
            d->dprob[r] = sum[0];
        }
    }
}

/* The same loop compiled for each set of vector instructions. */
static void gmm__act_rows_plain(const gmm__act_job *job, int64_t begin, int64_t end) { gmm__act_rows(job, begin, end); }
#ifdef GMM__X86
__attribute__((target("avx2,fma"))) static void gmm__act_rows_avx2(const gmm__act_job *job, int64_t begin,
                                                                   int64_t end) {
    gmm__act_rows(job, begin, end);
}
__attribute__((target("avx512f"))) static void gmm__act_rows_avx512(const gmm__act_job *job, int64_t begin,
                                                                    int64_t end) {
    gmm__act_rows(job, begin, end);
}
#endif

static void gmm__act_task(const void *arg, int64_t index, int32_t thread) {
    const gmm__act_job *job = (const gmm__act_job *)arg;
    const int64_t begin = index * job->rows_per_task, remaining = job->live - begin;
    const int64_t end = begin + (remaining < job->rows_per_task ? remaining : job->rows_per_task);
    (void)thread;
#ifdef GMM__X86
    if (job->call->ctx->cpu_level == 3) {
        gmm__act_rows_avx512(job, begin, end);
        return;
    }
    if (job->call->ctx->cpu_level == 2) {
        gmm__act_rows_avx2(job, begin, end);
        return;
    }
#endif
    gmm__act_rows_plain(job, begin, end);
}

/* Rows of one task: about 16 Ki elements. */
static int64_t gmm__rows_per_task(int64_t cols) { return cols < 16384 ? 16384 / cols : 1; }

static gmm_status gmm__cpu_launch_act(const gmm__plan *plan, gmm_stream stream) {
    const gmm__call *call = plan->call;
    const gmm_activation *d = &call->d.act;
    const int backward = call->op == GMM_OP_ACT_BWD;
    gmm__act_job job;
    const int64_t B = call->act.interleave ? call->act.interleave : call->out;
    int64_t step = GMM__ACT_LANES;
    (void)stream;
    if (B <= GMM__ACT_LANES)
        while (step % B) step += GMM__ACT_LANES; /* at most 15 * 16 */
    job.call = call;
    job.coef = gmm_act_coefficients(&call->act);
    job.live = gmm__cpu_offsets(&call->groups, NULL);
    job.rows_per_task = gmm__rows_per_task(call->in);
    job.gated = call->in != call->out;
    job.block = B;
    job.chunk = GMM__ACT_CHUNK / step * step;
    gmm__cpu_for(call->ctx, gmm__ceil_div(job.live, job.rows_per_task), (double)job.live * (double)call->in,
                 gmm__act_task, &job);
    if (call->mat[GMM__Y].dtype != GMM_NONE)
        gmm__cpu_tail(&call->mat[GMM__Y], call->groups.tail, job.live, call->rows, call->out);
    if (backward && call->mat[GMM__DX].dtype != GMM_NONE)
        gmm__cpu_tail(&call->mat[GMM__DX], call->groups.tail, job.live, call->rows, call->in);
    if (backward && d->dprob && call->groups.tail == GMM_TAIL_ZERO)
        memset(d->dprob + job.live, 0, (size_t)(call->rows - job.live) * sizeof *d->dprob);
    return GMM_OK;
}

/* ..................................................................................... 14.5 Pad, GLU interleave ... */

/* The pad rule of recipes and dispatchers; checks and entry points of gmm_pad and gmm_unpad. */

GMMDEF int32_t gmm_pad_align(gmm_recipe_kind recipe, int32_t grouped_tensor) {
    if (grouped_tensor) return 256;
    switch (recipe) {
    case GMM_RECIPE_FP8_DELAYED:
    case GMM_RECIPE_FP8_CURRENT:
    case GMM_RECIPE_FP8_BLOCK: return 16;
    case GMM_RECIPE_MXFP8: return 32;
    case GMM_RECIPE_NVFP4: return 128;
    default: return 1;
    }
}

GMMDEF gmm_status gmm_pad_decide(const gmm_pad_in *in, int32_t *align, gmm_error *error) {
    int padded;
    if (!in) return gmm__fail(error, GMM_E_NULL, "gmm_pad_decide: in is NULL");
    if (!align) return gmm__fail(error, GMM_E_NULL, "gmm_pad_decide: align is NULL");
    if (in->recipe < GMM_RECIPE_NONE || in->recipe > GMM_RECIPE_NVFP4)
        return gmm__fail(error, GMM_E_CONFIG, "gmm_pad_decide: in.recipe: %d is no recipe", (int)in->recipe);
    if (in->dispatcher < GMM_DISPATCH_ALLTOALL || in->dispatcher > GMM_DISPATCH_NCCLEP)
        return gmm__fail(error, GMM_E_CONFIG, "gmm_pad_decide: in.dispatcher: %d is no dispatcher",
                         (int)in->dispatcher);
    /* router_padding alone does not make groups padded: with too few tokens the router cannot reach the multiple */
    padded = (in->router_padding && in->router_padding_done) || in->dispatcher == GMM_DISPATCH_HYBRIDEP ||
             in->dispatcher == GMM_DISPATCH_NCCLEP ||
             (in->dispatcher == GMM_DISPATCH_DEEPEP && in->grouped_tensor && in->permute_fusion);
    *align = padded ? 1 : gmm_pad_align(in->recipe, in->grouped_tensor);
    return GMM_OK;
}

/* Refuses a split whose padded sizes exceed padded_capacity, where gmm__split_is_status says so. */
static gmm_status gmm__check_padded(gmm__call *call) {
    const gmm_padding *d = &call->d.pad;
    int64_t begin = 0, padded = 0, end, g;
    uint32_t fault = 0;
    if (!gmm__split_is_status(call)) return GMM_OK;
    for (g = 0; g < call->groups.count; g++, begin = end) {
        int64_t size;
        end = gmm_split_end(begin, gmm__split_value(&call->groups, g), call->groups.form, call->rows, 0, &fault);
        size = gmm__round_up(end - begin, d->align);
        if (size > d->padded_capacity - padded)
            return gmm__refuse(call, GMM_E_SPLIT, "padded_capacity", "%lld cannot hold the groups up to %lld, which "
                               "take %lld rows", (long long)d->padded_capacity, (long long)g,
                               (long long)(padded + size));
        padded += size;
    }
    return GMM_OK;
}

/* Checks a pad or unpad call. call->in is the columns, call->rows the unpadded capacity. */
static gmm_status gmm__pad_prepare(gmm__call *call, gmm_context *ctx, gmm_op op, const char *function,
                                   const gmm_padding *padding, int query) {
    gmm_padding *d = &call->d.pad;
    gmm_status s = gmm__open(call, ctx, op, function, query);
    const int pad = op == GMM_OP_PAD;
    int64_t src_rows, dst_rows;
    if (s != GMM_OK || (s = gmm__read_descriptor(call, "padding", d, sizeof *d, padding)) != GMM_OK) return s;
    {
        gmm_groups g;
        gmm__peek_groups(d->groups, &g);
        (void)snprintf(call->shapes, sizeof call->shapes, "G=%d T=%lld R=%lld cols=%lld align=%d %s", g.count,
                       (long long)g.capacity, (long long)d->padded_capacity, (long long)d->cols, d->align,
                       gmm__peek_dtype(d->src));
    }
    if (op != GMM_OP_PAD && op != GMM_OP_UNPAD)
        return gmm__refuse(call, GMM_E_ARG, "op", "%d is neither pad (%d) nor unpad (%d)", (int)op, (int)GMM_OP_PAD,
                           (int)GMM_OP_UNPAD);
    if ((s = gmm__read_options(call, d->options)) != GMM_OK || (s = gmm__read_groups(call, d->groups)) != GMM_OK)
        return s;
    if (d->align < 1) return gmm__refuse(call, GMM_E_ARG, "align", "%d must be >= 1", d->align);
    if (d->cols < 1) return gmm__refuse(call, GMM_E_ARG, "cols", "%lld must be >= 1", (long long)d->cols);
    if (d->padded_capacity < 0)
        return gmm__refuse(call, GMM_E_ARG, "padded_capacity", "%lld must be >= 0", (long long)d->padded_capacity);
    if (d->sizes && d->padded_capacity > INT32_MAX)
        return gmm__refuse(call, GMM_E_ARG, "padded_capacity", "%lld must fit the int32 of sizes",
                           (long long)d->padded_capacity);
    call->in = call->out = d->cols;
    src_rows = pad ? call->rows : d->padded_capacity;
    dst_rows = pad ? d->padded_capacity : call->rows;
    if ((s = gmm__read_mat(call, GMM__X_, "src", d->src, 1, gmm__matrix(src_rows, d->cols), GMM__BYTES)) != GMM_OK ||
        (s = gmm__read_mat(call, GMM__Y, "dst", d->dst, 1, gmm__matrix(dst_rows, d->cols), GMM__BYTES)) != GMM_OK)
        return s;
    if (call->mat[GMM__Y].dtype != call->mat[GMM__X_].dtype)
        return gmm__refuse(call, GMM_E_DTYPE, "dst", "dtype %s must be that of %s.src, %s",
                           gmm_dtype_name(call->mat[GMM__Y].dtype), call->path,
                           gmm_dtype_name(call->mat[GMM__X_].dtype));
    if ((s = gmm__check_array(call, "src_prob", d->src_prob, d->dst_prob != NULL, src_rows)) != GMM_OK ||
        (s = gmm__check_output(call, "dst_prob", d->dst_prob, d->src_prob != NULL, dst_rows)) != GMM_OK)
        return s;
    if ((s = gmm__check_output(call, "sizes", d->sizes, 0, call->groups.count)) != GMM_OK) return s;
    return query ? GMM_OK : gmm__check_padded(call);
}

GMMDEF gmm_status gmm_pad_query(gmm_context *ctx, gmm_op op, const gmm_padding *padding, gmm_info *info) {
    gmm__call call;
    const gmm_status s = gmm__pad_prepare(&call, ctx, op, "gmm_pad_query", padding, 1);
    return s != GMM_OK ? s : gmm__serve(&call, info, NULL, 0, NULL);
}
GMMDEF gmm_status gmm_pad(gmm_context *ctx, const gmm_padding *padding, void *workspace, size_t workspace_bytes,
                          gmm_stream stream) {
    gmm__call call;
    const gmm_status s = gmm__pad_prepare(&call, ctx, GMM_OP_PAD, "gmm_pad", padding, 0);
    return s != GMM_OK ? s : gmm__serve(&call, NULL, workspace, workspace_bytes, stream);
}
GMMDEF gmm_status gmm_unpad(gmm_context *ctx, const gmm_padding *padding, void *workspace, size_t workspace_bytes,
                            gmm_stream stream) {
    gmm__call call;
    const gmm_status s = gmm__pad_prepare(&call, ctx, GMM_OP_UNPAD, "gmm_unpad", padding, 0);
    return s != GMM_OK ? s : gmm__serve(&call, NULL, workspace, workspace_bytes, stream);
}

/* --- CPU engine: row i of group g is copied from src_offsets[g] + i to dst_offsets[g] + i; padding is zeroed --- */

typedef struct gmm__pad_job {
    const gmm__call *call;
    const int64_t *src_offsets, *dst_offsets; /* [G + 1] offsets of both splits, in the workspace */
    int64_t rows_per_task;
} gmm__pad_job;

static void gmm__pad_task(const void *arg, int64_t index, int32_t thread) {
    const gmm__pad_job *job = (const gmm__pad_job *)arg;
    const gmm__call *call = job->call;
    const gmm_padding *d = &call->d.pad;
    const gmm_mat *src = &call->mat[GMM__X_], *dst = &call->mat[GMM__Y];
    const size_t bytes = (size_t)(d->cols * (gmm_dtype_bits(src->dtype) / 8));
    const int64_t G = call->groups.count, begin = index * job->rows_per_task, remaining = job->dst_offsets[G] - begin;
    const int64_t end = begin + (remaining < job->rows_per_task ? remaining : job->rows_per_task);
    int64_t g = gmm__cpu_find_group(job->dst_offsets, G, begin), r;
    (void)thread;
    for (r = begin; r < end; r++) {
        int64_t i;
        while (job->dst_offsets[g + 1] <= r) g++;
        i = r - job->dst_offsets[g];
        if (i < job->src_offsets[g + 1] - job->src_offsets[g]) {
            memcpy(gmm__at(dst, 0, r, 0), gmm__at(src, 0, job->src_offsets[g] + i, 0), bytes);
            if (d->dst_prob) d->dst_prob[r] = d->src_prob[job->src_offsets[g] + i];
        } else {
            memset(gmm__at(dst, 0, r, 0), 0, bytes);
            if (d->dst_prob) d->dst_prob[r] = 0.0f;
        }
    }
}

static gmm_status gmm__cpu_launch_pad(const gmm__plan *plan, gmm_stream stream) {
    const gmm__call *call = plan->call;
    const gmm_padding *d = &call->d.pad;
    const gmm_mat *dst = &call->mat[GMM__Y];
    const int pad = call->op == GMM_OP_PAD;
    const int64_t G = call->groups.count, dst_rows = pad ? d->padded_capacity : call->rows;
    int64_t *unpadded = (int64_t *)gmm__part(plan, 0), *padded = (int64_t *)gmm__part(plan, 1), g;
    gmm__pad_job job;
    (void)stream;
    (void)gmm__cpu_offsets(&call->groups, unpadded);
    padded[0] = 0;
    for (g = 0; g < G; g++) {
        const int64_t remaining = d->padded_capacity - padded[g];
        int64_t size = gmm__round_up(unpadded[g + 1] - unpadded[g], d->align);
        if (size > remaining) {
            size = remaining;
            if (call->groups.fault) *call->groups.fault |= (uint32_t)GMM_FAULT_CAPACITY;
        }
        padded[g + 1] = padded[g] + size;
        if (pad && d->sizes) d->sizes[g] = (int32_t)size;
    }
    job.call = call;
    job.src_offsets = pad ? unpadded : padded;
    job.dst_offsets = pad ? padded : unpadded;
    job.rows_per_task = gmm__rows_per_task(d->cols);
    gmm__cpu_for(call->ctx, gmm__ceil_div(job.dst_offsets[G], job.rows_per_task),
                 (double)job.dst_offsets[G] * (double)d->cols, gmm__pad_task, &job);
    gmm__cpu_tail(dst, call->groups.tail, job.dst_offsets[G], dst_rows, d->cols);
    if (d->dst_prob && call->groups.tail == GMM_TAIL_ZERO)
        memset(d->dst_prob + job.dst_offsets[G], 0, (size_t)(dst_rows - job.dst_offsets[G]) * sizeof *d->dst_prob);
    return GMM_OK;
}

static int gmm__cpu_plan_pad(const gmm__call *call, gmm__plan *plan) {
    gmm__reserve(plan, 0, ((size_t)call->groups.count + 1) * sizeof(int64_t));
    gmm__reserve(plan, 1, ((size_t)call->groups.count + 1) * sizeof(int64_t));
    return 1;
}

/* --- GLU interleave: checks and entry points --- */

/* Reads an operand. With axis GMM_GLU_ROWS it is `count` matrices of [2 ffn, cols], with GMM_GLU_COLUMNS one matrix of
   [count, 2 ffn]. With count 0 it has no elements, and only its dtype, scaling and flags are checked. */
static gmm_status gmm__glu_read(gmm__call *call, int role, const char *argument, const gmm_mat *mat) {
    const gmm_glu *d = &call->d.glu;
    gmm_mat m;
    if (d->count > 0 && d->axis == GMM_GLU_ROWS)
        return gmm__read_mat(call, role, argument, mat, 1, gmm__matrices(d->count, 2 * d->ffn, d->cols), GMM__BYTES);
    if (d->count > 0 || !mat || !gmm__copy_sized(&m, sizeof m, mat))
        return gmm__read_mat(call, role, argument, mat, 1, gmm__matrix(d->count, 2 * d->ffn), GMM__BYTES);
    m.struct_size = 0;
    m.data = NULL;
    m.table = NULL;
    m.ld = m.group_stride = 0;
    return gmm__read_mat(call, role, argument, &m, 1, gmm__matrix(0, 1), GMM__BYTES);
}

static gmm_status gmm__glu_prepare(gmm__call *call, gmm_context *ctx, const char *function, const gmm_glu *glu,
                                   int query) {
    gmm_glu *d = &call->d.glu;
    gmm_status s = gmm__open(call, ctx, GMM_OP_GLU_INTERLEAVE, function, query);
    if (s != GMM_OK || (s = gmm__read_descriptor(call, "glu", d, sizeof *d, glu)) != GMM_OK) return s;
    (void)snprintf(call->shapes, sizeof call->shapes, "%s count=%lld ffn=%lld cols=%lld block=%d %s",
                   d->axis == GMM_GLU_COLUMNS ? "columns" : "rows", (long long)d->count, (long long)d->ffn,
                   (long long)d->cols, d->block, gmm__peek_dtype(d->src));
    if ((s = gmm__read_options(call, d->options)) != GMM_OK) return s;
    if (d->axis != GMM_GLU_ROWS && d->axis != GMM_GLU_COLUMNS)
        return gmm__refuse(call, GMM_E_ARG, "axis", "%d is neither rows (0) nor columns (1)", (int)d->axis);
    if (d->inverse & ~1) return gmm__refuse(call, GMM_E_ARG, "inverse", "%d must be 0 or 1", d->inverse);
    if (d->ffn < 1) return gmm__refuse(call, GMM_E_ARG, "ffn", "%lld must be >= 1", (long long)d->ffn);
    if (d->ffn > INT64_MAX / 2)
        return gmm__refuse(call, GMM_E_OVERFLOW, "ffn", "%lld does not fit 64 bits twice", (long long)d->ffn);
    if (d->count < 0) return gmm__refuse(call, GMM_E_ARG, "count", "%lld must be >= 0", (long long)d->count);
    if (d->axis == GMM_GLU_ROWS && d->cols < 1)
        return gmm__refuse(call, GMM_E_ARG, "cols", "%lld must be >= 1", (long long)d->cols);
    if (d->block < 1 || d->ffn % d->block)
        return gmm__refuse(call, GMM_E_CONFIG, "block", "%d must be >= 1 and divide ffn %lld", d->block,
                           (long long)d->ffn);
    if ((s = gmm__glu_read(call, GMM__X_, "src", d->src)) != GMM_OK ||
        (s = gmm__glu_read(call, GMM__Y, "dst", d->dst)) != GMM_OK)
        return s;
    if (call->mat[GMM__Y].dtype != call->mat[GMM__X_].dtype)
        return gmm__refuse(call, GMM_E_DTYPE, "dst", "dtype %s must be that of %s.src, %s",
                           gmm_dtype_name(call->mat[GMM__Y].dtype), call->path,
                           gmm_dtype_name(call->mat[GMM__X_].dtype));
    return GMM_OK;
}

GMMDEF gmm_status gmm_glu_query(gmm_context *ctx, gmm_op op, const gmm_glu *glu, gmm_info *info) {
    gmm__call call;
    const gmm_status s = gmm__glu_prepare(&call, ctx, "gmm_glu_query", glu, 1);
    if (s == GMM_OK && op != GMM_OP_GLU_INTERLEAVE)
        return gmm__refuse(&call, GMM_E_ARG, "op", "%d is not glu_interleave (%d)", (int)op,
                           (int)GMM_OP_GLU_INTERLEAVE);
    return s != GMM_OK ? s : gmm__serve(&call, info, NULL, 0, NULL);
}
GMMDEF gmm_status gmm_glu_interleave(gmm_context *ctx, const gmm_glu *glu, void *workspace, size_t workspace_bytes,
                                     gmm_stream stream) {
    gmm__call call;
    const gmm_status s = gmm__glu_prepare(&call, ctx, "gmm_glu_interleave", glu, 0);
    return s != GMM_OK ? s : gmm__serve(&call, NULL, workspace, workspace_bytes, stream);
}

/* CPU engine. Block k of a row or matrix begins at element k B in the blocked layout, and at (k mod 2) ffn + (k div 2)
   B in halves. */
static int64_t gmm__glu_block_offset(const gmm_glu *d, int64_t k, int blocked) {
    return blocked ? k * d->block : (k % 2) * d->ffn + (k / 2) * d->block;
}

/* Copies n elements of `size` bytes. Short copies are loops of constant size, which the compiler expands inline. */
static void gmm__glu_copy(char *dst, const char *src, int64_t n, int64_t size) {
    int64_t i;
    if (n * size >= 32) memcpy(dst, src, (size_t)(n * size));
    else if (size == 1) for (i = 0; i < n; i++) dst[i] = src[i];
    else if (size == 2) for (i = 0; i < n; i++) memcpy(dst + 2 * i, src + 2 * i, 2);
    else if (size == 4) for (i = 0; i < n; i++) memcpy(dst + 4 * i, src + 4 * i, 4);
    else for (i = 0; i < n; i++) memcpy(dst + 8 * i, src + 8 * i, 8);
}

typedef struct gmm__glu_job {
    const gmm__call *call;
    int64_t blocks;         /* per row (axis COLUMNS) or per matrix (axis ROWS) */
    int64_t units;          /* rows (axis COLUMNS), or blocks of all matrices (axis ROWS) */
    int64_t units_per_task;
} gmm__glu_job;

static void gmm__glu_task(const void *arg, int64_t index, int32_t thread) {
    const gmm__glu_job *job = (const gmm__glu_job *)arg;
    const gmm_glu *d = &job->call->d.glu;
    const gmm_mat *src = &job->call->mat[GMM__X_], *dst = &job->call->mat[GMM__Y];
    const int64_t size = gmm_dtype_bits(src->dtype) / 8, begin = index * job->units_per_task;
    const int64_t end = gmm__min_i64(begin + job->units_per_task, job->units);
    int64_t unit, k, i;
    (void)thread;
    for (unit = begin; unit < end; unit++) {
        if (d->axis == GMM_GLU_COLUMNS) {
            const char *src_row = (const char *)gmm__at(src, 0, unit, 0);
            char *dst_row = (char *)gmm__at(dst, 0, unit, 0);
            for (k = 0; k < job->blocks; k++) {
                const int64_t dst_offset = gmm__glu_block_offset(d, k, !d->inverse);
                const int64_t src_offset = gmm__glu_block_offset(d, k, d->inverse);
                gmm__glu_copy(dst_row + dst_offset * size, src_row + src_offset * size, d->block, size);
            }
        } else {
            const int64_t matrix = unit / job->blocks;
            const int64_t dst_offset = gmm__glu_block_offset(d, unit % job->blocks, !d->inverse);
            const int64_t src_offset = gmm__glu_block_offset(d, unit % job->blocks, d->inverse);
            const int dense = src->ld == d->cols && dst->ld == d->cols;
            const int64_t rows = dense ? 1 : d->block, n = dense ? d->block * d->cols : d->cols;
            for (i = 0; i < rows; i++)
                gmm__glu_copy((char *)gmm__at(dst, matrix, dst_offset + i, 0),
                              (const char *)gmm__at(src, matrix, src_offset + i, 0), n, size);
        }
    }
}

static gmm_status gmm__cpu_launch_glu_interleave(const gmm__plan *plan, gmm_stream stream) {
    const gmm_glu *d = &plan->call->d.glu;
    gmm__glu_job job;
    (void)stream;
    job.call = plan->call;
    job.blocks = 2 * (d->ffn / d->block);
    job.units = d->axis == GMM_GLU_COLUMNS ? d->count : d->count * job.blocks;
    job.units_per_task = gmm__rows_per_task(d->axis == GMM_GLU_COLUMNS ? 2 * d->ffn : d->block * d->cols);
    gmm__cpu_for(plan->call->ctx, gmm__ceil_div(job.units, job.units_per_task),
                 2.0 * (double)d->count * (double)d->ffn * (d->axis == GMM_GLU_COLUMNS ? 1.0 : (double)d->cols),
                 gmm__glu_task, &job);
    return GMM_OK;
}

/* .............................................................................................. 14.6 Expert MLP ... */

/* Decisions about a weight gradient (gmm_wgrad_decide), and the consistency of an MLP's configuration. */

GMMDEF gmm_status gmm_wgrad_decide(const gmm_wgrad_in *in, gmm_wgrad_out *out, gmm_error *error) {
    gmm_wgrad_out o;
    if (!in || !out) return gmm__fail(error, GMM_E_NULL, "gmm_wgrad_decide: %s is NULL", in ? "out" : "in");
    if ((in->want | in->main_grad | in->overwrite | in->delay | in->ddp_flag | in->zero_dummy) > 1)
        return gmm__fail(error, GMM_E_ARG, "gmm_wgrad_decide: in: want %d, main_grad %d, overwrite %d, delay %d, "
                         "ddp_flag %d, zero_dummy %d must all be 0 or 1", in->want, in->main_grad, in->overwrite,
                         in->delay, in->ddp_flag, in->zero_dummy);
    memset(&o, 0, sizeof o);
    if (in->want) {
        o.enqueue = in->delay;
        o.run_now = (uint8_t)!in->delay;
        o.hooks_after = in->delay;
        if (!in->main_grad) {
            o.row = (uint8_t)(1 + in->delay);
            o.return_real = (uint8_t)!in->delay;
        } else {
            o.beta_one = (uint8_t)!in->overwrite;
            o.return_dummy = o.set_flag = in->ddp_flag;
            o.dummy_zero = (uint8_t)(in->ddp_flag & in->zero_dummy);
            o.row = (uint8_t)(3 + 6 * in->delay + 3 * in->overwrite + in->ddp_flag + o.dummy_zero);
        }
    }
    *out = o;
    return GMM_OK;
}

GMMDEF gmm_status gmm_mlp_validate(const gmm_mlp_config *config, gmm_error *error) {
    gmm_mlp_config c;
    gmm_act act;
    char act_rule[160];
    int i, delayed, keeps_copies;
    if (!config) return gmm__fail(error, GMM_E_CONFIG, "config: is NULL");
    if (!gmm__copy_sized(&c, sizeof c, config))
        return gmm__fail(error, GMM_E_CONFIG, "struct_size: %u is larger than the %u bytes of version %s",
                         config->struct_size, (unsigned)sizeof c, GMM_VERSION_STRING);
    if (c.hidden < 1) return gmm__fail(error, GMM_E_CONFIG, "hidden: %lld must be >= 1", (long long)c.hidden);
    if (c.ffn < 1) return gmm__fail(error, GMM_E_CONFIG, "ffn: %lld must be >= 1", (long long)c.ffn);
    if (c.ffn > INT64_MAX / 2)
        return gmm__fail(error, GMM_E_CONFIG, "ffn: 2 x %lld does not fit 64 bits", (long long)c.ffn);
    if (c.hidden_out < 0)
        return gmm__fail(error, GMM_E_CONFIG, "hidden_out: %lld must be >= 0", (long long)c.hidden_out);
    {
        const struct { const char *name; int32_t value; } switches[] = {
            { "bias1", c.bias1 }, { "bias2", c.bias2 }, { "prob", c.prob }, { "prob_on_bias2", c.prob_on_bias2 },
            { "delay_wgrad", c.delay_wgrad }, { "overlap_dispatch_wgrad", c.overlap_dispatch_wgrad },
            { "ddp_expects_delay", c.ddp_expects_delay }, { "ddp", c.ddp }, { "prob_on_input", c.prob_on_input },
            { "router_padding", c.router_padding }, { "act_input_fp8", c.act_input_fp8 },
            { "act_recompute", c.act_recompute }
        };
        for (i = 0; i < (int)(sizeof switches / sizeof switches[0]); i++)
            if (switches[i].value & ~1)
                return gmm__fail(error, GMM_E_CONFIG, "%s: %d must be 0 or 1", switches[i].name,
                                 (int)switches[i].value);
    }
    {
        const struct { const char *name; int32_t value, count; } ranges[] = {
            { "save", (int32_t)c.save, GMM_SAVE_QUANTIZED_E4M3 + 1 },
            { "dispatcher", (int32_t)c.dispatcher, 5 },
            { "recipe", (int32_t)c.recipe, 6 }
        };
        for (i = 0; i < (int)(sizeof ranges / sizeof ranges[0]); i++)
            if (ranges[i].value < 0 || ranges[i].value >= ranges[i].count)
                return gmm__fail(error, GMM_E_CONFIG, "%s: %d must be 0 to %d", ranges[i].name, (int)ranges[i].value,
                                 (int)ranges[i].count - 1);
    }
    if (!gmm__copy_sized(&act, sizeof act, &c.act))
        return gmm__fail(error, GMM_E_CONFIG, "act.struct_size: %u is larger than the %u bytes of version %s",
                         c.act.struct_size, (unsigned)sizeof act, GMM_VERSION_STRING);
    if (gmm__check_act(&act, c.ffn, "act.", act_rule, sizeof act_rule) != GMM_OK)
        return gmm__fail(error, GMM_E_CONFIG, "%s", act_rule);
    if (act.kind == GMM_ACT_NONE)
        return gmm__fail(error, GMM_E_CONFIG, "act.kind: 0 is no activation, and an MLP needs one");
    if (c.source_interleave < 0)
        return gmm__fail(error, GMM_E_CONFIG, "source_interleave: %d must be >= 0", c.source_interleave);
    if (c.source_interleave && gmm_act_gated(act.kind) && c.source_interleave % c.ffn != act.interleave % c.ffn)
        return gmm__fail(error, GMM_E_CONFIG, "source_interleave: weights come with blocks of %d, the MLP reads them "
                         "with interleave %d: convert them with gmm_glu_interleave", c.source_interleave,
                         act.interleave);
    if (c.topk < 0) return gmm__fail(error, GMM_E_CONFIG, "topk: %d must be >= 0", c.topk);
    if (c.etp_size < 0) return gmm__fail(error, GMM_E_CONFIG, "etp_size: %d must be >= 0", c.etp_size);
    delayed = c.delay_wgrad || c.overlap_dispatch_wgrad;
    if (c.delay_wgrad && c.overlap_dispatch_wgrad)
        return gmm__fail(error, GMM_E_CONFIG, "overlap_dispatch_wgrad: 1 excludes delay_wgrad 1");
    if (c.ddp && delayed && !c.ddp_expects_delay)
        return gmm__fail(error, GMM_E_CONFIG, "ddp_expects_delay: 0 with delayed weight gradients: hooks would fire "
                         "before the gradient is there");
    if (c.ddp_expects_delay && !delayed)
        return gmm__fail(error, GMM_E_CONFIG, "ddp_expects_delay: 1 without delay_wgrad or overlap_dispatch_wgrad: "
                         "hooks would never fire");
    if (c.prob_on_bias2 && (!c.prob || !c.bias2))
        return gmm__fail(error, GMM_E_CONFIG, "prob_on_bias2: 1 needs prob 1 (is %d) and bias2 1 (is %d)", c.prob,
                         c.bias2);
    if (c.prob_on_input && c.topk != 1)
        return gmm__fail(error, GMM_E_CONFIG, "prob_on_input: 1 needs topk 1, not %d", c.topk);
    if (c.prob_on_input && c.prob)
        return gmm__fail(error, GMM_E_CONFIG, "prob_on_input: 1 excludes prob 1: rows would be weighted twice");
    if (c.bias2 && c.prob && c.topk > 1 && !c.prob_on_bias2)
        return gmm__fail(error, GMM_E_CONFIG, "prob_on_bias2: 0 with topk %d: unweighted biases would add up",
                         c.topk);
    if ((c.bias1 || c.bias2) && c.etp_size > 1)
        return gmm__fail(error, GMM_E_CONFIG, "etp_size: %d excludes biases: every rank would add them",
                         c.etp_size);
    if (c.router_padding && (c.recipe == GMM_RECIPE_NONE || c.dispatcher == GMM_DISPATCH_ALLGATHER))
        return gmm__fail(error, GMM_E_CONFIG, "router_padding: 1 needs a quantized recipe (is %d) and a dispatcher "
                         "other than all-gather (is %d)", (int)c.recipe, (int)c.dispatcher);
    keeps_copies = c.save == GMM_SAVE_QUANTIZED || c.save == GMM_SAVE_QUANTIZED_E4M3;
    if (keeps_copies && c.recipe == GMM_RECIPE_NONE)
        return gmm__fail(error, GMM_E_CONFIG, "save: %d keeps quantized operands and needs a recipe, which is none",
                         (int)c.save);
    if (c.act_input_fp8 && c.save != GMM_SAVE_PREACT_E4M3 && c.save != GMM_SAVE_QUANTIZED_E4M3)
        return gmm__fail(error, GMM_E_CONFIG, "act_input_fp8: 1 needs save %d or %d, which keep the activation's input "
                         "as E4M3, not %d", (int)GMM_SAVE_PREACT_E4M3, (int)GMM_SAVE_QUANTIZED_E4M3, (int)c.save);
    if (c.act_recompute && (c.save == GMM_SAVE_PREACT_AND_ACT || keeps_copies))
        return gmm__fail(error, GMM_E_CONFIG, "act_recompute: 1 excludes save %d, which keeps the activation",
                         (int)c.save);
    return GMM_OK;
}

/* Reads the descriptor and operands of an MLP call (gmm__mlp_prepare). */

/* Columns of FC1's output. */
static int64_t gmm__mlp_fc1_cols(const gmm__call *call) {
    return call->config.ffn * (gmm_act_gated(call->act.kind) ? 2 : 1);
}
/* Whether backward queues the weight gradients instead of computing them. */
static int gmm__mlp_delayed(const gmm__call *call) {
    return call->config.delay_wgrad || call->config.overlap_dispatch_wgrad;
}

/* Refuses an operand that is given although the configuration has none. */
static gmm_status gmm__mlp_check_configured(gmm__call *call, const char *argument, int given, int configured) {
    if (given && !configured)
        return gmm__refuse(call, GMM_E_CONFIG, argument, "is given, but the configuration has none");
    return GMM_OK;
}

/* Whether the weights' addresses are read behind hooks.need, not when the call begins. */
static int gmm__mlp_awaits(const gmm__call *call) { return call->d.mlp.hooks && call->d.mlp.hooks->need; }

/* The direction along which backward multiplies the copies of weights. */
static gmm_direction gmm__mlp_dgrad_direction(const gmm__call *call) {
    return call->quant.backward_override == GMM_BACKWARD_BY_RECIPE ? GMM_COLUMNWISE : GMM_ROWWISE;
}
/* The set of directions in which the products of a call read a weight. FC1 runs again in backward where forward has
   saved nothing. */
static int gmm__mlp_weight_directions(const gmm__call *call, int role) {
    const int fwd = call->op == GMM_OP_MLP_FWD;
    const int forward = fwd || (role == GMM__W && call->config.save == GMM_SAVE_NOTHING);
    const int dgrad = !fwd && (role == GMM__W2 || call->d.mlp.dx);
    return forward << GMM_ROWWISE | dgrad << (int)gmm__mlp_dgrad_direction(call);
}
/* Rows and columns of the matrices of a weight. */
static gmm__extents gmm__mlp_weight_extents(const gmm__call *call, int role) {
    const gmm_mlp_config *c = &call->config;
    return role == GMM__W ? gmm__matrices(call->groups.count, gmm__mlp_fc1_cols(call), c->hidden)
                          : gmm__matrices(call->groups.count, c->hidden_out, c->ffn);
}

/* Reads a weight: floats, or quantized as the recipe would quantize it. If the products of the call read it in no
   direction of the set, it may be NULL. */
static gmm_status gmm__mlp_read_weight(gmm__call *call, int role, int directions) {
    const char *const argument = role == GMM__W ? "w1" : "w2";
    const gmm_mat *const mat = role == GMM__W ? call->d.mlp.w1 : call->d.mlp.w2;
    const gmm__extents extents = gmm__mlp_weight_extents(call, role);
    const gmm_format *f = &call->recipe.weight;
    gmm_status s = GMM_OK;
    char name[32];
    gmm_mat m;
    int direction;
    const int bwd = call->op != GMM_OP_MLP_FWD;
    if (!mat || !gmm__copy_sized(&m, sizeof m, mat) || m.scaling == GMM_SCALING_NONE)
        return gmm__read_mat(call, role, argument, mat, directions != 0, extents, GMM__FLOATS);
    if (call->recipe.kind == GMM_RECIPE_NONE || m.dtype != f->dtype || m.scaling != f->scaling)
        return gmm__refuse(call, GMM_E_DTYPE, argument, "%s scaled %s: must be floats, or what mlp.quant.recipe "
                           "makes of weights, %s scaled %s", gmm_dtype_name(m.dtype), gmm_scaling_name(m.scaling),
                           gmm_dtype_name(f->dtype), gmm_scaling_name(f->scaling));
    if (bwd && call->quant.backward_override == GMM_BACKWARD_HIGH_PRECISION)
        return gmm__refuse(call, GMM_E_CONFIG, argument, "is quantized, but quant.backward_override %d multiplies "
                           "weights that are not", (int)call->quant.backward_override);
    (void)snprintf(name, sizeof name, "%s.columnwise", argument);
    for (direction = 0; direction < 2 && s == GMM_OK; direction++) {
        if (!(directions >> direction & 1)) continue;
        if (direction && !m.columnwise) return gmm__refuse(call, GMM_E_NULL, name, "is NULL");
        s = gmm__read_quant(call, role, direction ? name : argument, direction ? m.columnwise : mat, extents,
                            direction ? GMM_COLUMNWISE : GMM_ROWWISE);
        if (s == GMM_OK && (call->mat[role].dtype != f->dtype || call->mat[role].scaling != f->scaling))
            return gmm__refuse(call, GMM_E_DTYPE, direction ? name : argument,
                               "%s scaled %s: must be as the rowwise copy", gmm_dtype_name(call->mat[role].dtype),
                               gmm_scaling_name(call->mat[role].scaling));
    }
    call->mat[role] = m; /* both copies: each product selects the one whose blocks run along its contraction */
    call->mat[role].struct_size = 0;
    return s;
}
/* Reads a weight when the call begins. With hooks.need it is checked as by a query, which reads no addresses. */
static gmm_status gmm__mlp_read_first(gmm__call *call, int role) {
    const int query = call->query;
    gmm_status s;
    call->query = query || gmm__mlp_awaits(call);
    s = gmm__mlp_read_weight(call, role, gmm__mlp_weight_directions(call, role));
    call->query = query;
    return s;
}
/* Dtype of the operands that are not quantized, and of the intermediate matrices. */
static gmm_dtype gmm__mlp_dtype(const gmm__call *call) {
    const gmm_mat *w = &call->mat[GMM__W2];
    return w->scaling == GMM_SCALING_NONE ? w->dtype : call->mat[call->op == GMM_OP_MLP_FWD ? GMM__X_ : GMM__DY].dtype;
}

/* Every feature count is K of one product and N of another, so that the alignment of any quantized operand applies to
   all of them. */
static gmm_status gmm__mlp_check_features(gmm__call *call) {
    const gmm_mlp_config *c = &call->config;
    const struct { const char *name; int64_t value; } features[] = {
        { "config.hidden", c->hidden }, { "config.ffn", c->ffn }, { "config.hidden_out", c->hidden_out }
    };
    const int32_t weight = gmm_feature_align(call->recipe.weight.scaling);
    const int32_t input = gmm_feature_align(call->recipe.input.scaling), align = weight > input ? weight : input;
    int i;
    for (i = 0; i < 3; i++)
        if (features[i].value % align)
            return gmm__refuse(call, GMM_E_ARG, features[i].name, "%lld must be a multiple of %d for mlp.quant.recipe",
                               (long long)features[i].value, (int)align);
    call->in_align = call->out_align = align;
    return GMM_OK;
}

/* Checks the save policy and the fields of gmm_mlp.quant that are not arrays. */
static gmm_status gmm__mlp_check_policies(gmm__call *call) {
    const gmm_mlp_config *c = &call->config;
    const gmm_mlp_quant *q = &call->quant;
    if (q->reserved || q->reserved1)
        return gmm__refuse(call, GMM_E_ARG, q->reserved ? "quant.reserved" : "quant.reserved1", "%d must be 0",
                           q->reserved ? q->reserved : q->reserved1);
    if ((int)q->backward_override < 0 || (int)q->backward_override > GMM_BACKWARD_DEQUANTIZED)
        return gmm__refuse(call, GMM_E_ARG, "quant.backward_override", "%d must be 0 to %d",
                           (int)q->backward_override, (int)GMM_BACKWARD_DEQUANTIZED);
    if (q->weight_skip && !q->weight_cache)
        return gmm__refuse(call, GMM_E_CONFIG, "quant.weight_skip", "needs quant.weight_cache, which is NULL");
    if (c->save != GMM_SAVE_QUANTIZED && c->save != GMM_SAVE_QUANTIZED_E4M3) return GMM_OK;
    if (call->recipe.input.dtype == GMM_NONE)
        return gmm__refuse(call, GMM_E_CONFIG, "config.save", "%d keeps x and FC2's input quantized, but quant.recipe "
                           "leaves the input as it is", (int)c->save);
    if (q->backward_override == GMM_BACKWARD_HIGH_PRECISION)
        return gmm__refuse(call, GMM_E_CONFIG, "config.save", "%d keeps operands quantized, which "
                           "quant.backward_override %d does not read", (int)c->save, (int)q->backward_override);
    return GMM_OK;
}

/* Says once per context that delayed scaling has no scales: no call can tell whether ones are meant. */
static void gmm__mlp_warn_without_scales(const gmm__call *call) {
    gmm_context *ctx = call->ctx;
    if (call->recipe.kind != GMM_RECIPE_FP8_DELAYED || call->quant.scale || ctx->warned_without_scales) return;
    ctx->warned_without_scales = 1;
    gmm__log(ctx, GMM_LOG_WARN, "%s: mlp.quant.scale is NULL with recipe fp8-delayed: all scales are 1, by which "
             "small gradients are rounded to 0 (gmm_update_scales)", call->function);
}

/* Checks gmm_mlp.quant, and the operands against the formats of the recipe. The products check the same, but only after
   other work has been enqueued. A dtype that the Hadamard transform of weight gradients does not support is refused in
   every operation. */
static gmm_status gmm__mlp_check_quant(gmm__call *call) {
    const gmm_recipe *r = &call->recipe;
    const gmm_mlp *d = &call->d.mlp;
    const int fwd = call->op == GMM_OP_MLP_FWD;
    const int products = (d->dx || d->dw1 || d->dw2 || d->db1 || d->dprob) &&
                         call->quant.backward_override == GMM_BACKWARD_BY_RECIPE;
    const int64_t values = (int64_t)GMM_SLOTS * call->groups.count;
    gmm_status s = gmm__check_array(call, "quant.scale", call->quant.scale, 0, values);
    if (!call->query) gmm__mlp_warn_without_scales(call);
    if (s == GMM_OK) s = gmm__check_array(call, "quant.weight_skip", call->quant.weight_skip, 0, 1);
    if (r->input.hadamard && gmm__mlp_dtype(call) != GMM_BF16)
        return gmm__refuse(call, GMM_E_DTYPE, fwd ? "x" : "dy", "dtype %s must be bf16, since quant.recipe transforms "
                           "input and grad (hadamard)", gmm_dtype_name(gmm__mlp_dtype(call)));
    if (!call->query && !fwd && r->grad.stochastic && products &&
        (!call->quant.random || (uintptr_t)call->quant.random % 8))
        return gmm__refuse(call, call->quant.random ? GMM_E_ALIGN : GMM_E_NULL, "quant.random", "%p must be {seed, "
                           "offset} of dy and of dz, 8-byte aligned, for stochastic rounding",
                           (const void *)call->quant.random);
    if (r->grad.stochastic)
        gmm__add_span(call, "quant.random", "", 0, call->quant.random, 4 * (int64_t)sizeof *call->quant.random);
    return s != GMM_OK ? s : gmm__check_output(call, "quant.amax", call->quant.amax, 0, values);
}

/* Checks the indices of gathered rows. That of dy is not looked at in forward. */
static gmm_status gmm__mlp_check_indices(gmm__call *call) {
    gmm_mlp *d = &call->d.mlp;
    if (call->op == GMM_OP_MLP_FWD) d->dy_index = NULL;
    return gmm__check_indices(call, d->x_index, d->dy_index, d->index_rows, &d->index_div);
}

/* How gmm__mlp_prepare checks a call: for its launch; as a query, which reads no addresses; or as the MLP of a layer
   (core/moe.h), whose rows, probabilities, splits and indices are the layer's own and are checked as in a query,
   but the caller's weights, gradients and arrays as for a launch. */
enum gmm__mlp_checks { GMM__MLP_LAUNCH, GMM__MLP_QUERY, GMM__MLP_IN_LAYER };

/* Reads the matrices and arrays by row. */
static gmm_status gmm__mlp_read_rows(gmm__call *call) {
    const gmm_mlp *d = &call->d.mlp;
    const gmm_mlp_config *c = &call->config;
    const int fwd = call->op == GMM_OP_MLP_FWD;
    /* backward computes FC1 again where forward has saved nothing */
    const int recomputes = !fwd && c->save == GMM_SAVE_NOTHING;
    const int keeps_x = c->save == GMM_SAVE_QUANTIZED || c->save == GMM_SAVE_QUANTIZED_E4M3;
    const int64_t x_rows = d->x_index ? d->index_rows : call->rows, dy_rows = d->dy_index ? d->index_rows : call->rows;
    gmm_status s;
    if ((s = gmm__read_mat(call, GMM__X_, "x", d->x, fwd || recomputes || (d->dw1 && !keeps_x),
                           gmm__matrix(x_rows, c->hidden), GMM__FLOATS)) ||
        (s = gmm__check_array(call, "prob", d->prob, c->prob, call->rows)) ||
        (s = gmm__check_index_arrays(call, d->x_index, d->dy_index)))
        return s;
    if (fwd) return gmm__read_mat(call, GMM__Y, "y", d->y, 1, gmm__matrix(call->rows, call->out), GMM__FLOATS);
    if ((s = gmm__read_mat(call, GMM__DY, "dy", d->dy, 1, gmm__matrix(dy_rows, call->out), GMM__FLOATS)) ||
        (s = gmm__read_mat(call, GMM__DX, "dx", d->dx, 0, gmm__matrix(call->rows, c->hidden), GMM__FLOATS)))
        return s;
    return gmm__check_output(call, "dprob", d->dprob, 0, call->rows);
}

/* Reads weights, biases and the destinations of their gradients. */
static gmm_status gmm__mlp_read_params(gmm__call *call) {
    const gmm_mlp *d = &call->d.mlp;
    const gmm_mlp_config *c = &call->config;
    const int64_t G = call->groups.count, F1 = gmm__mlp_fc1_cols(call), out = call->out;
    const int fwd = call->op == GMM_OP_MLP_FWD, recomputes = !fwd && c->save == GMM_SAVE_NOTHING;
    gmm_status s;
    if ((s = gmm__mlp_read_first(call, GMM__W)) ||
        (s = gmm__read_mat(call, GMM__BIAS, "b1", d->b1, (fwd || recomputes) && c->bias1, gmm__matrices(G, 1, F1),
                           GMM__FLOATS)) ||
        (s = gmm__mlp_read_first(call, GMM__W2)) ||
        (s = gmm__read_mat(call, GMM__BIAS2, "b2", d->b2, c->bias2 && (fwd || (c->prob_on_bias2 && d->dprob)),
                           gmm__matrices(G, 1, out), GMM__FLOATS)))
        return s;
    if (fwd) return GMM_OK;
    if ((s = gmm__read_grad(call, GMM__DW, "dw1", d->dw1, 0, F1, c->hidden)) ||
        (s = gmm__read_grad(call, GMM__DW2, "dw2", d->dw2, 0, out, c->ffn)) ||
        (s = gmm__read_grad(call, GMM__DB, "db1", d->db1, 0, 1, F1)))
        return s;
    return gmm__read_grad(call, GMM__DB2, "db2", d->db2, 0, 1, out);
}

/* x, w1 and dy that are not quantized have one dtype. */
static gmm_status gmm__mlp_check_dtypes(gmm__call *call) {
    const int roles[] = { GMM__X_, GMM__W, GMM__DY };
    const char *names[] = { "x", "w1", "dy" };
    const gmm_dtype dtype = gmm__mlp_dtype(call);
    int i;
    for (i = 0; i < 3; i++)
        if (call->mat[roles[i]].dtype != GMM_NONE && call->mat[roles[i]].dtype != dtype &&
            call->mat[roles[i]].scaling == GMM_SCALING_NONE)
            return gmm__refuse(call, GMM_E_DTYPE, names[i], "dtype %s must be that of mlp.%s, %s",
                               gmm_dtype_name(call->mat[roles[i]].dtype),
                               call->mat[GMM__W2].scaling == GMM_SCALING_NONE ? "w2"
                               : call->op == GMM_OP_MLP_FWD ? "x" : "dy", gmm_dtype_name(dtype));
    return GMM_OK;
}

/* Checks an MLP call. call->in is hidden, call->out is hidden_out, and F1 the columns of FC1's output. */
static gmm_status gmm__mlp_prepare(gmm__call *call, gmm_context *ctx, gmm_op op, const char *function,
                                   const gmm_mlp *mlp, enum gmm__mlp_checks checks) {
    gmm_mlp *d = &call->d.mlp;
    gmm_mlp_config *c = &call->config;
    gmm_status s = gmm__open(call, ctx, op, function, checks == GMM__MLP_QUERY);
    const int query = checks == GMM__MLP_QUERY;
    int64_t elements, bytes;
    gmm_error error;
    gmm_groups g;

    if (s != GMM_OK || (s = gmm__read_descriptor(call, "mlp", d, sizeof *d, mlp)) != GMM_OK) return s;
    if (op < GMM_OP_MLP_FWD || op > GMM_OP_MLP_WGRAD)
        return gmm__refuse(call, GMM_E_ARG, "op", "%d is no MLP operation", (int)op);
    if (d->reserved || d->reserved1)
        return gmm__refuse(call, GMM_E_ARG, "reserved", "%d and reserved1 %d must be 0", d->reserved, d->reserved1);
    if ((s = gmm__read(call, "config", c, sizeof *c, d->config)) != GMM_OK) return s;
    if (c->hidden_out == 0) c->hidden_out = c->hidden;
    gmm__peek_groups(d->groups, &g);
    (void)snprintf(call->shapes, sizeof call->shapes, "G=%d T=%lld hidden=%lld ffn=%lld out=%lld %s", g.count,
                   (long long)g.capacity, (long long)c->hidden, (long long)c->ffn, (long long)c->hidden_out,
                   gmm_act_name(c->act.kind));
    if (gmm_mlp_validate(c, &error) != GMM_OK) return gmm__refuse_member(call, error.status, "config", error.text);
    (void)gmm__copy_sized(&call->act, sizeof call->act, &c->act);
    if (!d->quant && c->recipe != GMM_RECIPE_NONE)
        return gmm__refuse(call, GMM_E_CONFIG, "config.recipe", "%s needs quant, which is NULL: the products would not "
                           "be quantized", gmm_recipe_name(c->recipe));
    if (d->quant) {
        if ((s = gmm__read(call, "quant", &call->quant, sizeof call->quant, d->quant)) != GMM_OK ||
            (s = gmm__read(call, "quant.recipe", &call->recipe, sizeof call->recipe, call->quant.recipe)) != GMM_OK)
            return s;
        if ((s = gmm_recipe_validate(&call->recipe, &error)) != GMM_OK)
            return gmm__refuse_member(call, s, "quant.recipe", error.text);
        if (call->recipe.kind == GMM_RECIPE_NONE || call->recipe.kind != c->recipe)
            return gmm__refuse(call, GMM_E_CONFIG, "quant.recipe", "kind %s must be mlp.config.recipe, %s, and "
                               "not none", gmm_recipe_name(call->recipe.kind), gmm_recipe_name(c->recipe));
        if ((s = gmm__mlp_check_features(call)) != GMM_OK || (s = gmm__mlp_check_policies(call)) != GMM_OK) return s;
    }
    if ((s = gmm__read_options(call, d->options)) != GMM_OK) return s;
    call->query = checks != GMM__MLP_LAUNCH;
    s = gmm__read_groups(call, d->groups);
    call->query = query;
    if (s != GMM_OK) return s;
    call->in = c->hidden;
    call->out = c->hidden_out;
    if ((s = gmm__mlp_check_configured(call, "b1", d->b1 != NULL, c->bias1)) != GMM_OK ||
        (s = gmm__mlp_check_configured(call, "b2", d->b2 != NULL, c->bias2)) != GMM_OK ||
        (s = gmm__mlp_check_configured(call, "prob", d->prob != NULL, c->prob)) != GMM_OK ||
        (s = gmm__mlp_check_configured(call, "db1", d->db1 != NULL, c->bias1)) != GMM_OK ||
        (s = gmm__mlp_check_configured(call, "db2", d->db2 != NULL, c->bias2)) != GMM_OK ||
        (s = gmm__mlp_check_configured(call, "dprob", d->dprob != NULL, c->prob)) != GMM_OK)
        return s;

    if (!gmm__mul(call->rows, gmm__mlp_fc1_cols(call), &elements) || !gmm__mul(elements, 16, &bytes))
        return gmm__refuse(call, GMM_E_OVERFLOW, "config.ffn", "%lld rows of %lld columns do not fit 64 bits",
                           (long long)call->rows, (long long)gmm__mlp_fc1_cols(call));
    if ((s = gmm__mlp_check_indices(call)) != GMM_OK) return s;
    call->query = checks != GMM__MLP_LAUNCH;
    s = gmm__mlp_read_rows(call);
    call->query = query;
    if (s != GMM_OK || (s = gmm__mlp_read_params(call)) != GMM_OK || (s = gmm__mlp_check_dtypes(call)) != GMM_OK)
        return s;
    return gmm__mlp_check_quant(call);
}
/* What an MLP call is composed of. FC1 computes z from x, the activation h from z, and FC2 y from h; backward computes
   dh from dy, dz from dh, and dx from dz. Each of these operations, and each cast of an operand, is a step. */

/* Memory from which steps get blocks and to which they return them. Without an address, as in plans, it counts bytes. A
   plan and its launch take and return the same blocks in the same order, so that both have the same offsets. */
enum { GMM__MLP_BLOCKS = 32 }; /* more than are in use at once */
typedef struct gmm__mlp_arena {
    char *memory;
    size_t peak; /* the largest end of a block so far */
    int32_t count;
    struct { size_t at, bytes; int32_t owner; } block[GMM__MLP_BLOCKS]; /* in use, by offset */
} gmm__mlp_arena;

/* Owners of blocks: a copy of an operand, a dequantized operand, a matrix. */
enum gmm__mlp_owner {
    GMM__MLP_COPY,                                     /* + 2 slot + direction */
    GMM__MLP_DEQUANTIZED = GMM__MLP_COPY + 2 * GMM_SLOTS, /* + slot */
    GMM__MLP_SPLIT = GMM__MLP_DEQUANTIZED + GMM_SLOTS,
    GMM__MLP_Z, GMM__MLP_H, GMM__MLP_DH, GMM__MLP_DZ, GMM__MLP_AMAX, GMM__MLP_ARRAYS
};

static size_t gmm__mlp_top(const gmm__mlp_arena *arena) {
    return arena->count ? arena->block[arena->count - 1].at + arena->block[arena->count - 1].bytes : 0;
}
/* The first free bytes that suffice. */
static void *gmm__mlp_place(gmm__mlp_arena *arena, int32_t owner, int64_t bytes) {
    const size_t size = gmm__round256((size_t)bytes);
    size_t at = 0;
    int32_t i, j;
    for (i = 0; i < arena->count && arena->block[i].at - at < size; i++)
        at = arena->block[i].at + arena->block[i].bytes;
    if (size) {
        for (j = arena->count++; j > i; j--) arena->block[j] = arena->block[j - 1];
        arena->block[i].at = at;
        arena->block[i].bytes = size;
        arena->block[i].owner = owner;
        if (at + size > arena->peak) arena->peak = at + size;
    }
    return arena->memory ? arena->memory + at : NULL;
}
static void gmm__mlp_release(gmm__mlp_arena *arena, int32_t owner) {
    int32_t i, kept = 0;
    for (i = 0; i < arena->count; i++)
        if (arena->block[i].owner != owner) arena->block[kept++] = arena->block[i];
    arena->count = kept;
}

/* An operand of the products, and its copies in the formats of the recipe. */
typedef struct gmm__mlp_operand {
    const gmm_mat *source;  /* as the caller or an earlier step has it */
    const int32_t *index;   /* of gathered rows of the source; NULL: they are not gathered */
    int64_t rows, cols;     /* of each matrix; rows 0: a token matrix, which has the rows of the groups */
    gmm_format format[2];   /* of the copies by direction; dtype NONE: the recipe leaves the operand as it is */
    gmm_mat copy[2];        /* by direction; dtype NONE: absent */
    gmm_mat quantized;      /* what products read: a copy, with the columnwise one as its `columnwise` */
    gmm_mat dequantized;    /* the values of the rowwise copy */
} gmm__mlp_operand;

/* A step. Its workspace begins at `workspace`, behind all blocks in use. */
typedef struct gmm__mlp_step {
    gmm_op op;
    const void *descriptor; /* gmm_linear, gmm_activation, gmm_quantization or gmm_dequantization */
    const gmm_activation *act_source; /* gmm__call.act_source of a quantization */
    float *act_amax;        /* gmm__call.act_amax of an activation */
    const gmm_activation *product_act; /* gmm__call.product_act of FC1 */
    int drops_preact;       /* gmm__call.drops_preact */
    size_t workspace;
    int32_t completes;      /* 1: the gradient of `param` is complete behind this step */
    gmm_param param;
    int32_t awaits;         /* the slot of a weight for which hooks.need is called before this step; 0 = none */
    gmm_op awaits_op;       /* the product that reads it */
} gmm__mlp_step;

enum { GMM__MLP_CASTS = 12, GMM__MLP_DEQUANTIZATIONS = 5, GMM__MLP_STEPS = 32 }; /* more than any call has */

/* The steps of a call in their order, the same for its plan and its launch, and what they read and write. Descriptors
   point into this structure, which must therefore not be copied. */
typedef struct gmm__mlp_steps {
    const gmm__call *call;
    gmm_status status;  /* the first error of building the steps; the context has its message */
    gmm_dtype dtype;    /* of operands that are not quantized, and of intermediate matrices */
    gmm__mlp_arena workspace, deferred;
    gmm_groups groups;  /* the split as int64 offsets, computed once */
    gmm_options options;
    void *offsets;
    int32_t *tiles;     /* gmm__call.split_tiles of the steps */
    gmm__mlp_operand operand[GMM_SLOTS];
    int64_t index_rows; /* of operands with an index */
    int32_t index_div;
    gmm_mat weight[2];  /* w1 and w2; their addresses become known behind hooks.need if there is one */
    int32_t awaits;     /* gmm__mlp_step.awaits and awaits_op of the next step */
    gmm_op awaits_op;
    int joined;         /* forward: FC1's product computes the activation */
    gmm_mat z, h, dh, dz;
    gmm_mat gates;      /* the gate columns of z as a matrix */
    int amax_slots;     /* bits of the operands of which the activation takes amaxes, in `amax` [G]; `scaled` are
                           their copies by direction with these amaxes */
    float *amax;
    gmm_mat scaled[2];
    gmm_mat z_e4m3;     /* the pre-activation as GMM_SAVE_PREACT_E4M3 keeps it */
    gmm_format z_format;
    gmm_linear fc1, fc2, dgrad2, bgrad2, wgrad2, bgrad1, wgrad1, dgrad1;
    gmm_activation act;
    gmm_quantization cast[GMM__MLP_CASTS];
    gmm_dequantization dequantization[GMM__MLP_DEQUANTIZATIONS];
    gmm__mlp_step step[GMM__MLP_STEPS];
    int casts, dequantizations, count;
} gmm__mlp_steps;

/* --- what forward saves --- */

/* The formats of unscaled E4M3: the delayed format without scales multiplies by 1. */
static gmm_format gmm__mlp_unscaled_e4m3(void) {
    gmm_format f = GMM_ZERO;
    f.dtype = GMM_E4M3;
    f.scaling = GMM_SCALING_TENSOR;
    f.delayed = 1;
    return f;
}
/* The format that the recipe gives an operand's copy. Only rowwise copies have amaxes per row. */
static gmm_format gmm__mlp_format_of(const gmm_recipe *r, int slot, gmm_direction direction) {
    gmm_format f = slot == GMM_SLOT_X || slot == GMM_SLOT_H ? r->input
                   : slot == GMM_SLOT_W1 || slot == GMM_SLOT_W2 ? r->weight : r->grad;
    f.struct_size = 0;
    if (direction == GMM_COLUMNWISE) f.row_amax = 0;
    return f;
}
/* The direction of the copies of x and h that backward reads, which are those that forward can save. */
static gmm_direction gmm__mlp_backward_direction(const gmm__call *call) {
    return call->quant.backward_override == GMM_BACKWARD_DEQUANTIZED ? GMM_ROWWISE : GMM_COLUMNWISE;
}
/* Whether backward reads copies of x and h. */
static int gmm__mlp_backward_reads_copies(const gmm__call *call) {
    return call->recipe.kind != GMM_RECIPE_NONE && call->recipe.input.dtype != GMM_NONE &&
           call->quant.backward_override != GMM_BACKWARD_HIGH_PRECISION;
}
static int gmm__mlp_saves_copies(const gmm__call *call) {
    return call->config.save == GMM_SAVE_QUANTIZED || call->config.save == GMM_SAVE_QUANTIZED_E4M3;
}
static int gmm__mlp_saves_e4m3(const gmm__call *call) {
    return call->config.save == GMM_SAVE_PREACT_E4M3 || call->config.save == GMM_SAVE_QUANTIZED_E4M3;
}

/* Storage of a copy, for all groups. rows 0: a token matrix. */
static gmm_status gmm__mlp_layout(const gmm__call *call, const gmm_format *f, gmm_direction direction, int64_t rows,
                                  int64_t cols, gmm_layout *layout) {
    const int64_t G = call->groups.count;
    gmm_error error = GMM_ZERO;
    const gmm_status s = rows ? gmm_layout_of(f->dtype, f->scaling, f->order, direction, rows, cols, layout, &error)
                              : gmm_layout_of_groups(f->dtype, f->scaling, f->order, direction, call->groups.count,
                                                     call->groups.capacity, cols, layout, &error);
    if (s != GMM_OK) return gmm__fail(&call->ctx->error, s, "%s: %.400s", call->function, error.text);
    if (rows) {
        layout->data_bytes *= G;
        layout->scale_bytes *= G;
    }
    return GMM_OK;
}

/* gmm_mlp.saved: its layout, and where each matrix with its scales begins. */
enum { GMM__SAVED_PREACT, GMM__SAVED_X, GMM__SAVED_ACT, GMM__SAVED_MATRICES };
typedef struct gmm__mlp_saved {
    gmm_saved_layout layout;
    size_t at[GMM__SAVED_MATRICES];
} gmm__mlp_saved;

/* Describes a part of a saved layout that has `*bytes` bytes so far, and returns its offset. */
static int64_t gmm__save_part(gmm_saved_part *p, int64_t *bytes, const char *name, gmm_dtype dtype, int64_t rows,
                              int64_t cols) {
    p->name = name;
    p->dtype = dtype;
    p->rows = rows;
    p->cols = p->ld = cols;
    p->offset = *bytes;
    p->bytes = rows * cols * gmm_dtype_bits(dtype) / 8;
    *bytes += (int64_t)gmm__round256((size_t)p->bytes);
    return p->offset;
}
/* Writes a saved layout, of which `bytes` are this version's, for a caller that may have an older version. */
static gmm_status gmm__write_layout(gmm__call *call, void *layout, void *full, size_t bytes) {
    uint32_t size; /* struct_size is the first field of every layout */
    if (!layout) return gmm__refuse(call, GMM_E_NULL, "layout", "is NULL");
    memcpy(&size, layout, sizeof size);
    if (size > bytes)
        return gmm__refuse(call, GMM_E_VERSION, "layout", "struct_size %u is larger than the %u bytes of version %s",
                           size, (unsigned)bytes, GMM_VERSION_STRING);
    memcpy(full, &size, sizeof size);
    memcpy(layout, full, size ? size : bytes);
    return GMM_OK;
}
static void gmm__mlp_save_part(gmm_saved_layout *l, const char *name, gmm_dtype dtype, int64_t rows, int64_t cols) {
    (void)gmm__save_part(&l->part[l->count++], &l->bytes, name, dtype, rows, cols);
}
/* Adds a copy of a token matrix of `cols` columns, its scales, and its amaxes where the format has them. */
static void gmm__mlp_save_copy(const gmm__call *call, gmm__mlp_saved *saved, int matrix, const gmm_format *f,
                               gmm_direction direction, int64_t cols) {
    static const char *const names[GMM__SAVED_MATRICES][3] = { { "preact", "preact_scale", "" },
                                                               { "x", "x_scale", "x_amax" },
                                                               { "act", "act_scale", "act_amax" } };
    gmm_saved_layout *l = &saved->layout;
    gmm_layout layout;
    saved->at[matrix] = (size_t)l->bytes;
    if (gmm__mlp_layout(call, f, direction, 0, cols, &layout) != GMM_OK) return; /* the cast gives the message */
    gmm__mlp_save_part(l, names[matrix][0], f->dtype, layout.data_rows, layout.data_cols);
    gmm__mlp_save_part(l, names[matrix][1], layout.scale_dtype, 1,
                       layout.scale_bytes * 8 / gmm_dtype_bits(layout.scale_dtype));
    if (f->scaling == GMM_SCALING_NV16)
        gmm__mlp_save_part(l, names[matrix][2], GMM_F32, 1, f->row_amax ? call->rows : call->groups.count);
}
static gmm__mlp_saved gmm__mlp_saved_of(const gmm__call *call) {
    const gmm_mlp_config *c = &call->config;
    const int64_t F1 = gmm__mlp_fc1_cols(call);
    const gmm_direction direction = gmm__mlp_backward_direction(call);
    const gmm_format input = gmm__mlp_format_of(&call->recipe, GMM_SLOT_X, direction);
    const gmm_format e4m3 = gmm__mlp_unscaled_e4m3();
    gmm__mlp_saved s;
    memset(&s, 0, sizeof s);
    if (c->save == GMM_SAVE_NOTHING) return s;
    if (gmm__mlp_saves_e4m3(call)) gmm__mlp_save_copy(call, &s, GMM__SAVED_PREACT, &e4m3, GMM_ROWWISE, F1);
    else gmm__mlp_save_part(&s.layout, "preact", gmm__mlp_dtype(call), call->rows, F1);
    if (gmm__mlp_saves_copies(call)) {
        gmm__mlp_save_copy(call, &s, GMM__SAVED_X, &input, direction, c->hidden);
        gmm__mlp_save_copy(call, &s, GMM__SAVED_ACT, &input, direction, c->ffn);
    } else if (c->save == GMM_SAVE_PREACT_AND_ACT) {
        s.at[GMM__SAVED_ACT] = (size_t)s.layout.bytes;
        gmm__mlp_save_part(&s.layout, "act", gmm__mlp_dtype(call), call->rows, c->ffn);
    }
    return s;
}

/* --- descriptors --- */

/* The matrices that the backward of a call computes or reads in the dtype of x, and where. */
typedef struct gmm__mlp_gradients {
    int defer;   /* it queues the weight gradients */
    int dz, dh;
    int h;       /* h is read, and no copy of it is saved */
    int h_saved; /* it is read where forward has saved it */
    int z;
} gmm__mlp_gradients;
static gmm__mlp_gradients gmm__mlp_gradients_of(const gmm__call *call) {
    const gmm_mlp *d = &call->d.mlp;
    gmm__mlp_gradients n;
    n.defer = (gmm__mlp_delayed(call) || call->op == GMM_OP_MLP_WGRAD) && (d->dw1 || d->dw2);
    n.dz = d->dx || d->dw1 || d->db1;
    n.dh = n.dz || d->dprob;
    n.h = d->dw2 && !gmm__mlp_saves_copies(call);
    /* a queued weight gradient reads h after `saved` may have been overwritten */
    n.h_saved = n.h && call->config.save == GMM_SAVE_PREACT_AND_ACT &&
                (!n.defer || gmm__mlp_backward_reads_copies(call));
    n.z = n.dh || (n.h && !n.h_saved);
    return n;
}

static gmm_linear gmm__mlp_linear(const gmm__mlp_steps *steps, int64_t in, int64_t out) {
    gmm_linear l = GMM_ZERO;
    l.groups = &steps->groups;
    l.options = &steps->options;
    l.in_features = in;
    l.out_features = out;
    return l;
}

/* The index of an operand's rows for a step that reads `mat`: its source, rather than a copy, whose rows are not
   gathered. NULL: the step does not read the operand. */
static const int32_t *gmm__mlp_index_of(const gmm__mlp_steps *steps, int slot, const gmm_mat *mat) {
    const gmm__mlp_operand *o = &steps->operand[slot];
    return mat && mat == o->source ? o->index : NULL;
}
/* Gives a product of x and dy, of which it may have one alone, the indices of their gathered rows. */
static void gmm__mlp_gather(const gmm__mlp_steps *steps, gmm_linear *l, int x, int dy) {
    l->x_index = gmm__mlp_index_of(steps, x, l->x);
    l->dy_index = gmm__mlp_index_of(steps, dy, l->dy);
    l->index_rows = steps->index_rows;
    l->index_div = steps->index_div;
}

/* Begins the steps of a call. `offsets` and `tiles` hold its split. */
static void gmm__mlp_begin(gmm__mlp_steps *steps, const gmm__call *call, gmm_dtype dtype, void *offsets, void *tiles) {
    steps->call = call;
    steps->status = GMM_OK;
    steps->dtype = dtype;
    steps->options = call->options;
    steps->offsets = offsets;
    steps->tiles = (int32_t *)tiles;
    steps->groups = call->groups;
    steps->groups.splits = offsets;
    steps->groups.dtype = GMM_I64;
    steps->groups.form = GMM_SPLIT_OFFSETS;
    steps->groups.on_host = 0;
}

/* Fills in an operand without copies, or with those that the caller has made. */
static void gmm__mlp_fill_operand(gmm__mlp_steps *steps, int slot, const gmm_mat *source, int64_t rows, int64_t cols) {
    gmm__mlp_operand *o = &steps->operand[slot];
    int direction;
    o->source = source;
    o->rows = rows;
    o->cols = cols;
    for (direction = 0; direction < 2; direction++)
        o->format[direction] = gmm__mlp_format_of(&steps->call->recipe, slot, (gmm_direction)direction);
    if (source->scaling == GMM_SCALING_NONE) return;
    o->copy[GMM_ROWWISE] = *source;
    if (source->columnwise) o->copy[GMM_COLUMNWISE] = *source->columnwise;
}

/* Makes the addresses of a weight unknown: it becomes a table in host memory without entries, which in a plan takes
   the workspace that any addresses may take. */
static void gmm__mlp_forget_addresses(gmm_mat *m) {
    static void *const no_entries[1] = { NULL };
    m->data = m->scale = NULL;
    m->table = no_entries;
    m->scale_table = m->scaling == GMM_SCALING_NONE ? NULL : no_entries;
    m->group_stride = 0;
    m->flags |= (uint32_t)GMM_MAT_TABLE_ON_HOST;
}
/* Fills in a weight. */
static void gmm__mlp_fill_weight(gmm__mlp_steps *steps, int slot) {
    const gmm__call *call = steps->call;
    const int role = slot == GMM_SLOT_W1 ? GMM__W : GMM__W2, directions = gmm__mlp_weight_directions(call, role);
    const gmm__extents extents = gmm__mlp_weight_extents(call, role);
    gmm_mat *weight = &steps->weight[slot == GMM_SLOT_W2];
    int direction;
    *weight = call->mat[role];
    gmm__mlp_fill_operand(steps, slot, weight, extents.rows, extents.cols);
    if (!gmm__mlp_awaits(call) || !directions) return;
    if (weight->scaling == GMM_SCALING_NONE) gmm__mlp_forget_addresses(weight);
    else
        for (direction = 0; direction < 2; direction++)
            if (directions >> direction & 1) gmm__mlp_forget_addresses(&steps->operand[slot].copy[direction]);
}

/* Fills in the descriptors and operands of forward and backward. The addresses of z, h, dh and dz are set later. */
static void gmm__mlp_fill(gmm__mlp_steps *steps) {
    const gmm__call *call = steps->call;
    const gmm_mlp *d = &call->d.mlp;
    const gmm_mlp_config *c = &call->config;
    const int64_t F1 = gmm__mlp_fc1_cols(call);

    steps->z = gmm_mat_packed(steps->dtype, NULL);
    steps->h = steps->dh = steps->dz = steps->z;
    gmm__mlp_fill_operand(steps, GMM_SLOT_X, &call->mat[GMM__X_], 0, c->hidden);
    gmm__mlp_fill_weight(steps, GMM_SLOT_W1);
    gmm__mlp_fill_operand(steps, GMM_SLOT_H, &steps->h, 0, c->ffn);
    gmm__mlp_fill_weight(steps, GMM_SLOT_W2);
    gmm__mlp_fill_operand(steps, GMM_SLOT_DY, &call->mat[GMM__DY], 0, call->out);
    gmm__mlp_fill_operand(steps, GMM_SLOT_DZ, &steps->dz, 0, F1);
    steps->operand[GMM_SLOT_X].index = d->x_index;
    steps->operand[GMM_SLOT_DY].index = d->dy_index;
    steps->index_rows = d->index_rows;
    steps->index_div = d->index_div;

    steps->fc1 = gmm__mlp_linear(steps, c->hidden, F1);
    steps->fc1.bias = c->bias1 ? &call->mat[GMM__BIAS] : NULL;
    steps->fc1.y = &steps->z;

    steps->act.groups = &steps->groups;
    steps->act.options = &steps->options;
    steps->act.ffn = c->ffn;
    steps->act.act = &call->act;
    steps->act.x = &steps->z;
    steps->act.prob = d->prob;

    steps->fc2 = gmm__mlp_linear(steps, c->ffn, call->out);
    steps->fc2.bias = c->bias2 ? &call->mat[GMM__BIAS2] : NULL;
    steps->fc2.bias_scale = c->prob_on_bias2 ? d->prob : NULL;
    steps->fc2.y = &call->mat[GMM__Y];

    steps->dgrad2 = gmm__mlp_linear(steps, c->ffn, call->out);
    steps->dgrad2.dx = &steps->dh;

    steps->bgrad2 = gmm__mlp_linear(steps, c->ffn, call->out);
    steps->bgrad2.dy = &call->mat[GMM__DY];
    steps->bgrad2.bias_scale = c->prob_on_bias2 ? d->prob : NULL;
    steps->bgrad2.db = d->db2 ? &call->grad[GMM__DB2] : NULL;
    if (c->prob_on_bias2 && d->dprob) {
        steps->bgrad2.bias = &call->mat[GMM__BIAS2];
        steps->bgrad2.d_bias_scale = d->dprob;
        steps->bgrad2.d_bias_scale_add = 1;
    }

    steps->wgrad2 = gmm__mlp_linear(steps, c->ffn, call->out);
    steps->wgrad2.dw = &call->grad[GMM__DW2];

    steps->bgrad1 = gmm__mlp_linear(steps, c->hidden, F1);
    steps->bgrad1.dy = &steps->dz;
    steps->bgrad1.db = &call->grad[GMM__DB];

    steps->wgrad1 = gmm__mlp_linear(steps, c->hidden, F1);
    steps->wgrad1.dw = &call->grad[GMM__DW];

    steps->dgrad1 = gmm__mlp_linear(steps, c->hidden, F1);
    steps->dgrad1.dx = &call->mat[GMM__DX];

    gmm__mlp_gather(steps, &steps->bgrad2, GMM_SLOT_H, GMM_SLOT_DY);
}

/* --- the list of steps --- */

static void gmm__mlp_add_step(gmm__mlp_steps *steps, gmm_op op, const void *descriptor) {
    gmm__mlp_step *step = &steps->step[steps->count++];
    step->op = op;
    step->descriptor = descriptor;
    step->workspace = gmm__mlp_top(&steps->workspace);
    step->awaits = steps->awaits;
    step->awaits_op = steps->awaits_op;
    steps->awaits = 0;
}
/* Marks the next step as the first one that reads a weight for a product, unless the product reads a copy that was
   cast before. */
static void gmm__mlp_await_weight(gmm__mlp_steps *steps, int slot, gmm_op op) {
    const gmm__call *call = steps->call;
    const gmm__mlp_operand *o = &steps->operand[slot];
    const int dgrad = op == GMM_OP_LINEAR_DGRAD, direction = dgrad ? (int)gmm__mlp_dgrad_direction(call) : GMM_ROWWISE;
    const int casts = o->format[0].dtype != GMM_NONE && o->source->scaling == GMM_SCALING_NONE &&
                      !(dgrad && call->quant.backward_override == GMM_BACKWARD_HIGH_PRECISION);
    if (call->op != GMM_OP_MLP_FWD && casts && o->copy[direction].dtype != GMM_NONE) return;
    steps->awaits = slot;
    steps->awaits_op = op;
}
/* Adds a step behind which the gradient of a parameter is complete. */
static void gmm__mlp_add_gradient(gmm__mlp_steps *steps, gmm_op op, const gmm_linear *linear, gmm_param param) {
    gmm__mlp_add_step(steps, op, linear);
    steps->step[steps->count - 1].completes = 1;
    steps->step[steps->count - 1].param = param;
}

/* Raises *bytes to the workspace of one step, and notes in `plan` which engine serves it. Returns 0 if none does.
   `prepared` is the status of the step's checks; *last_error is restored if the step is declined. */
static int gmm__mlp_measure_step(gmm__call *step, gmm_status prepared, const gmm_error *last_error, size_t *bytes,
                                 gmm__plan *plan) {
    gmm__plan step_plan;
    if (prepared != GMM_OK || gmm__select(step, &step_plan) != GMM_OK) {
        (void)gmm__decline(plan, "%.180s", step->ctx->error.text);
        step->ctx->error = *last_error; /* a declined plan is no error: another engine may serve the call */
        return 0;
    }
    if (step_plan.workspace_bytes > *bytes) *bytes = step_plan.workspace_bytes;
    if (step->describes) gmm__describe_plan(step->describes, &step_plan);
    if (step_plan.engine != plan->engine)
        (void)snprintf(plan->note, sizeof plan->note, "products by %s%s", gmm_engine_name(step_plan.engine),
                       step_plan.assumes_aligned ? ", for addresses at multiples of 16 bytes" : "");
#ifdef __CUDACC__
    else if (step->options.engine == GMM_ENGINE_AUTO && step->ctx->wgmma_unavailable)
        (void)snprintf(plan->note, sizeof plan->note, "products by %s; wgmma %s", gmm_engine_name(step_plan.engine),
                       step->ctx->wgmma_unavailable);
#endif
    return 1;
}
/* Raises *bytes to the workspace of a linear step. Returns 0 if it is declined. */
static GMM__UNUSED int gmm__mlp_size_linear(const gmm__plan *plan, gmm_op op, const gmm_linear *l, size_t *bytes,
                                            gmm__plan *out) {
    gmm__call step;
    const gmm_error last_error = plan->call->ctx->error;
    const gmm_status s = gmm__linear_prepare(&step, plan->call->ctx, op, plan->call->function, l, 1);
    return gmm__mlp_measure_step(&step, s, &last_error, bytes, out);
}

/* Casts of an MLP's operands. A tensor that several products read is read once and cast in all directions that they
   need; the copies outlive the products that read them. */

/* The four sets of directions that a cast may have. */
enum { GMM__MLP_ROWWISE = 1 << GMM_ROWWISE, GMM__MLP_COLUMNWISE = 1 << GMM_COLUMNWISE, GMM__MLP_BOTH = 3 };

/* Whether an operand has copies: the recipe quantizes it, or the caller has. */
static int gmm__mlp_quantizes(const gmm__mlp_operand *o) { return o->format[0].dtype != GMM_NONE; }

/* Gives an operand a copy in an arena, unless it has one. A later cast writes the copy, or an earlier call has. Returns
   the direction as a set where the operand has no such copy yet. */
static int gmm__mlp_place_copy(gmm__mlp_steps *steps, int slot, gmm_direction direction, gmm__mlp_arena *arena) {
    const gmm__call *call = steps->call;
    const gmm_mlp_quant *quant = &call->quant;
    gmm__mlp_operand *o = &steps->operand[slot];
    const gmm_format *f = &o->format[direction];
    const int32_t owner = GMM__MLP_COPY + 2 * slot + (int32_t)direction;
    gmm_mat *m = &o->copy[direction];
    gmm_layout layout;
    gmm_status s;
    if (!gmm__mlp_quantizes(o) || m->dtype != GMM_NONE) return 0;
    s = gmm__mlp_layout(call, f, direction, o->rows, o->cols, &layout);
    if (s != GMM_OK) {
        if (steps->status == GMM_OK) steps->status = s;
        return 0;
    }
    *m = gmm_mat_quantized(f, direction, NULL, NULL, NULL);
    m->data = gmm__mlp_place(arena, owner, layout.data_bytes);
    m->scale = gmm__mlp_place(arena, owner, layout.scale_bytes);
    if (f->scaling == GMM_SCALING_NV16)
        m->amax = (float *)gmm__mlp_place(arena, owner, 4 * (f->row_amax ? call->groups.capacity
                                                                         : (int64_t)call->groups.count));
    else if (f->delayed && quant->amax) m->amax = quant->amax + (int64_t)slot * call->groups.count;
    return 1 << direction;
}

/* How the activation and the cast of its result, h in forward or dz in backward, share their work. */
enum gmm__mlp_join {
    GMM__MLP_SEPARATE,
    GMM__MLP_BY_AMAX, /* the activation takes the amaxes that the cast needs, while it stores the result */
    GMM__MLP_FUSED    /* the cast of h computes it from z, so that h is neither stored nor loaded */
};
/* The one place that decides it; `slot` is GMM_SLOT_H or GMM_SLOT_DZ. The kernels that compute h serve BF16 and aligned
   rows. */
static enum gmm__mlp_join gmm__mlp_join_of(const gmm__mlp_steps *steps, int slot) {
    const gmm__call *call = steps->call;
    const gmm_format *f = &steps->operand[slot].format[0];
    const int64_t ffn = call->config.ffn, block = call->act.interleave;
    const int aligned = ffn % 8 == 0 && (block <= 1 || block % 8 == 0) && ffn <= INT32_MAX / 2 &&
                        call->rows <= INT32_MAX / 2;
    if (call->ctx->config.space != GMM_SPACE_CUDA) return GMM__MLP_SEPARATE;
    if (f->scaling == GMM_SCALING_TENSOR && !f->delayed) return GMM__MLP_BY_AMAX;
    return slot == GMM_SLOT_H && steps->dtype == GMM_BF16 && aligned && call->config.save != GMM_SAVE_PREACT_AND_ACT &&
           (f->scaling == GMM_SCALING_TENSOR || f->scaling == GMM_SCALING_1X128) ? GMM__MLP_FUSED : GMM__MLP_SEPARATE;
}

/* Adds the activation whose result is the operand `slot`. If a cast follows that needs amaxes by group, the activation
   takes them. */
static void gmm__mlp_add_activation(gmm__mlp_steps *steps, gmm_op op, int slot, int casts) {
    const int takes_amax = casts && gmm__mlp_join_of(steps, slot) == GMM__MLP_BY_AMAX;
    if (takes_amax) {
        steps->amax_slots |= 1 << slot;
        steps->amax = (float *)gmm__mlp_place(&steps->workspace, GMM__MLP_AMAX,
                                              4 * (int64_t)steps->call->groups.count);
    }
    gmm__mlp_add_step(steps, op, &steps->act);
    if (takes_amax) steps->step[steps->count - 1].act_amax = steps->amax;
}
/* The copy as its cast writes it: with the amaxes that the activation has taken, if it has. */
static const gmm_mat *gmm__mlp_destination(gmm__mlp_steps *steps, int slot, int direction) {
    gmm_mat *m = &steps->scaled[direction];
    if (!(steps->amax_slots >> slot & 1)) return &steps->operand[slot].copy[direction];
    *m = steps->operand[slot].copy[direction];
    m->amax = steps->amax;
    return m;
}

/* Adds the quantization that writes the copies of a set of directions. Amaxes per row, which only a rowwise copy has,
   need a quantization of their own. */
static void gmm__mlp_cast(gmm__mlp_steps *steps, int slot, int directions, const int32_t *skip) {
    const gmm_mlp_quant *quant = &steps->call->quant;
    gmm__mlp_operand *o = &steps->operand[slot];
    gmm_quantization *d = NULL;
    int direction;
    for (direction = 0; direction < 2; direction++) {
        const gmm_format *f = &o->format[direction];
        if (!(directions & 1 << direction)) continue;
        if (!d || o->format[0].row_amax) {
            d = &steps->cast[steps->casts++];
            d->count = o->rows ? steps->call->groups.count : 0;
            d->rows = o->rows;
            d->cols = o->cols;
            d->groups = o->rows ? NULL : &steps->groups;
            d->options = &steps->options;
            d->format = f;
            d->src = o->source;
            d->src_index = o->index;
            d->index_rows = steps->index_rows;
            d->index_div = steps->index_div;
            d->skip = skip;
            if (steps->amax_slots >> slot & 1) d->phase = GMM_QUANT_CAST;
            if (f->delayed && quant->scale) d->scale = quant->scale + (int64_t)slot * steps->call->groups.count;
            if (f->stochastic && quant->random) d->random = quant->random + (slot == GMM_SLOT_DZ ? 2 : 0);
            gmm__mlp_add_step(steps, GMM_OP_QUANTIZE, d);
        }
        if (direction) d->columnwise = gmm__mlp_destination(steps, slot, direction);
        else d->rowwise = gmm__mlp_destination(steps, slot, direction);
    }
    if (d && steps->amax_slots >> slot & 1) { /* another cast would take amaxes itself */
        steps->amax_slots &= ~(1 << slot);
        gmm__mlp_release(&steps->workspace, GMM__MLP_AMAX);
    }
}

/* Returns the workspace of an operand's copies of a set of directions, and that of its dequantized values: no later
   step reads them. */
static void gmm__mlp_release_copies(gmm__mlp_steps *steps, int slot, int directions) {
    int direction;
    for (direction = 0; direction < 2; direction++)
        if (directions & 1 << direction) gmm__mlp_release(&steps->workspace, GMM__MLP_COPY + 2 * slot + direction);
    gmm__mlp_release(&steps->workspace, GMM__MLP_DEQUANTIZED + slot);
}

/* Makes those copies of a set of directions that the operand lacks, in the workspace. */
static void gmm__mlp_make_copies(gmm__mlp_steps *steps, int slot, int directions) {
    int direction, lacking = 0;
    for (direction = 0; direction < 2; direction++)
        if (directions & 1 << direction)
            lacking |= gmm__mlp_place_copy(steps, slot, (gmm_direction)direction, &steps->workspace);
    gmm__mlp_cast(steps, slot, lacking, NULL);
}

/* The operand as a product by the recipe reads it: its copies, or the source where the recipe leaves it as it is. */
static const gmm_mat *gmm__mlp_copies_of(gmm__mlp_steps *steps, int slot) {
    gmm__mlp_operand *o = &steps->operand[slot];
    const gmm_mat *copy = o->copy;
    if (!gmm__mlp_quantizes(o)) return o->source;
    o->quantized = copy[copy[GMM_ROWWISE].dtype == GMM_NONE];
    o->quantized.columnwise = copy[GMM_COLUMNWISE].dtype == GMM_NONE ? NULL : &copy[GMM_COLUMNWISE];
    return &o->quantized;
}

/* Adds the dequantization of a rowwise matrix into `dst`. */
static void gmm__mlp_dequantize(gmm__mlp_steps *steps, const gmm_mat *src, int64_t rows, int64_t cols,
                                const gmm_mat *dst) {
    gmm_dequantization *d = &steps->dequantization[steps->dequantizations++];
    d->count = rows ? steps->call->groups.count : 0;
    d->rows = rows;
    d->cols = cols;
    d->groups = rows ? NULL : &steps->groups;
    d->options = &steps->options;
    d->direction = GMM_ROWWISE;
    d->src = src;
    d->dst = dst;
    gmm__mlp_add_step(steps, GMM_OP_DEQUANTIZE, d);
}

/* The operand as a backward product reads it along `direction`. Adds the steps that this takes. */
static const gmm_mat *gmm__mlp_backward_operand(gmm__mlp_steps *steps, int slot, gmm_direction direction) {
    const gmm_backward_override override = steps->call->quant.backward_override;
    gmm__mlp_operand *o = &steps->operand[slot];
    if (!gmm__mlp_quantizes(o) || override == GMM_BACKWARD_HIGH_PRECISION) return o->source;
    if (override == GMM_BACKWARD_DEQUANTIZED) {
        const int64_t rows = o->rows ? o->rows * steps->call->groups.count : steps->call->groups.capacity;
        if (slot == GMM_SLOT_DY || slot == GMM_SLOT_DZ) return o->source; /* forward has no copy of them */
        gmm__mlp_make_copies(steps, slot, GMM__MLP_ROWWISE);
        o->dequantized = gmm_mat_packed(steps->dtype, gmm__mlp_place(&steps->workspace, GMM__MLP_DEQUANTIZED + slot,
                                                                     rows * o->cols *
                                                                         (gmm_dtype_bits(steps->dtype) / 8)));
        gmm__mlp_dequantize(steps, &o->copy[GMM_ROWWISE], o->rows, o->cols, &o->dequantized);
        return &o->dequantized;
    }
    gmm__mlp_make_copies(steps, slot, 1 << direction);
    return gmm__mlp_copies_of(steps, slot);
}

/* --- the cache of quantized weights --- */

/* Places the copies of both weights in the cache of the caller, and returns its bytes. Backward on dequantized values
   reads rowwise copies alone. */
static size_t gmm__mlp_place_weights(gmm__mlp_steps *steps, void *memory) {
    const int slots[2] = { GMM_SLOT_W1, GMM_SLOT_W2 };
    const int directions = steps->call->quant.backward_override == GMM_BACKWARD_BY_RECIPE ? 2 : 1;
    gmm__mlp_arena cache = GMM_ZERO;
    int i, direction;
    cache.memory = (char *)memory;
    for (i = 0; i < 2; i++)
        for (direction = 0; direction < directions; direction++)
            (void)gmm__mlp_place_copy(steps, slots[i], (gmm_direction)direction, &cache);
    return cache.peak;
}
/* Bytes of the cache that a call's weights need; 0 where they are not quantized here. */
static size_t gmm__mlp_cache_bytes(const gmm__call *call) {
    gmm__mlp_steps steps;
    const gmm_error last_error = call->ctx->error;
    size_t bytes;
    memset(&steps, 0, sizeof steps);
    gmm__mlp_begin(&steps, call, gmm__mlp_dtype(call), NULL, NULL);
    gmm__mlp_fill(&steps);
    bytes = gmm__mlp_place_weights(&steps, NULL);
    call->ctx->error = last_error;
    return steps.status == GMM_OK ? bytes : 0;
}
/* The steps of forward, backward and queued weight gradients: how they are listed, planned and enqueued. */

static gmm_status gmm__quantize_prepare(gmm__call *call, gmm_context *ctx, gmm_op op, const char *function,
                                        const gmm_quantization *quantization, int query);
static gmm_status gmm__dequantize_prepare(gmm__call *call, gmm_context *ctx, const char *function,
                                          const gmm_dequantization *dequantization, int query);

/* Places the split's offsets and tiles in an arena. Every call begins with them. */
static void gmm__mlp_place_split(gmm__mlp_steps *steps, const gmm__call *call, gmm__mlp_arena *arena) {
    const int64_t ends = call->groups.count + (int64_t)1;
    void *offsets = gmm__mlp_place(arena, GMM__MLP_SPLIT, ends * (int64_t)sizeof(int64_t));
    gmm__mlp_begin(steps, call, gmm__mlp_dtype(call), offsets,
                   gmm__mlp_place(arena, GMM__MLP_SPLIT, GMM__TILE_KINDS * ends * (int64_t)sizeof(int32_t)));
}
/* A packed matrix with the rows of the groups in an arena. */
static gmm_mat gmm__mlp_place_tokens(const gmm__mlp_steps *steps, int32_t owner, int64_t cols, gmm__mlp_arena *arena) {
    return gmm_mat_packed(steps->dtype, gmm__mlp_place(arena, owner, steps->call->rows * cols *
                                                                         (gmm_dtype_bits(steps->dtype) / 8)));
}

/* Describes the saved pre-activation in E4M3 at `memory`. */
static void gmm__mlp_place_e4m3(gmm__mlp_steps *steps, char *memory) {
    const gmm_format f = gmm__mlp_unscaled_e4m3();
    gmm__mlp_arena arena = GMM_ZERO;
    gmm_layout layout;
    const gmm_status s = gmm__mlp_layout(steps->call, &f, GMM_ROWWISE, 0, gmm__mlp_fc1_cols(steps->call), &layout);
    if (s != GMM_OK) {
        steps->status = s;
        return;
    }
    arena.memory = memory;
    steps->z_e4m3 = gmm_mat_quantized(&f, GMM_ROWWISE, NULL, NULL, NULL);
    steps->z_e4m3.data = gmm__mlp_place(&arena, GMM__MLP_Z, layout.data_bytes);
    steps->z_e4m3.scale = gmm__mlp_place(&arena, GMM__MLP_Z, layout.scale_bytes);
}
/* Adds the cast of the pre-activation to what is saved. */
static void gmm__mlp_cast_e4m3(gmm__mlp_steps *steps) {
    gmm_quantization *d = &steps->cast[steps->casts++];
    steps->z_format = gmm__mlp_unscaled_e4m3();
    d->cols = gmm__mlp_fc1_cols(steps->call);
    d->groups = &steps->groups;
    d->options = &steps->options;
    d->format = &steps->z_format;
    d->src = &steps->z;
    d->rowwise = &steps->z_e4m3;
    gmm__mlp_add_step(steps, GMM_OP_QUANTIZE, d);
}

/* Gives x or h the copy that forward saves and backward reads, at its place in gmm_mlp.saved. */
static int gmm__mlp_place_saved(gmm__mlp_steps *steps, int slot, size_t at) {
    gmm__mlp_arena arena = GMM_ZERO;
    arena.memory = steps->call->d.mlp.saved ? (char *)steps->call->d.mlp.saved + at : NULL;
    return gmm__mlp_place_copy(steps, slot, gmm__mlp_backward_direction(steps->call), &arena);
}

/* Forward's copies of x or h: that for the product, and with `saves` in the same pass that for backward. */
static void gmm__mlp_cast_forward(gmm__mlp_steps *steps, int slot, int saves, size_t at) {
    int directions = saves ? gmm__mlp_place_saved(steps, slot, at) : 0;
    directions |= gmm__mlp_place_copy(steps, slot, GMM_ROWWISE, &steps->workspace);
    gmm__mlp_cast(steps, slot, directions, NULL);
}
/* Forward's copy of a weight, or with a cache both copies in it, unless the word `weight_skip` says that they are
   there. */
static void gmm__mlp_cast_weight(gmm__mlp_steps *steps, int slot) {
    const gmm_mlp_quant *quant = &steps->call->quant;
    const gmm__mlp_operand *o = &steps->operand[slot];
    int direction, directions = 0;
    gmm__mlp_await_weight(steps, slot, GMM_OP_LINEAR_FWD);
    if (!quant->weight_cache) gmm__mlp_make_copies(steps, slot, GMM__MLP_ROWWISE);
    else if (o->source->scaling == GMM_SCALING_NONE && gmm__mlp_quantizes(o)) {
        for (direction = 0; direction < 2; direction++)
            directions |= (o->copy[direction].dtype != GMM_NONE) << direction;
        gmm__mlp_cast(steps, slot, directions, quant->weight_skip);
    }
}

/* Fills in what FC1 or FC2 of forward reads. */
static void gmm__mlp_fill_forward(gmm__mlp_steps *steps, gmm_linear *linear, int x, int w) {
    linear->x = gmm__mlp_copies_of(steps, x);
    linear->w = gmm__mlp_copies_of(steps, w);
    gmm__mlp_gather(steps, linear, x, GMM_SLOT_DY);
}
/* Adds FC1 or FC2 of forward. */
static void gmm__mlp_add_forward(gmm__mlp_steps *steps, gmm_linear *linear, int x, int w) {
    gmm__mlp_fill_forward(steps, linear, x, w);
    gmm__mlp_add_step(steps, GMM_OP_LINEAR_FWD, linear);
}

static gmm_status gmm__mlp_prepare_step(const gmm__mlp_steps *steps, const gmm__mlp_step *step, int query,
                                        gmm__call *call);
/* Whether some engine's FC1 may compute the activation unless the caller forbids it. */
static int gmm__mlp_may_join(const gmm__call *call) {
    return call->ctx->config.space == GMM_SPACE_CUDA && call->recipe.kind == GMM_RECIPE_NONE;
}
/* Whether FC1's product computes the activation too: an engine's plan for it says so. Where the caller demands it and
   no engine does, steps->status becomes the reason. */
static int gmm__mlp_joins_product(gmm__mlp_steps *steps, int drops_preact) {
    const gmm__call *call = steps->call;
    const gmm_error last_error = call->ctx->error;
    const gmm_fuse fuse = call->options.fuse;
    gmm__mlp_step step;
    gmm__call product;
    gmm__plan plan;
    gmm_status s;
    if (fuse == GMM_FUSE_NEVER || (fuse == GMM_FUSE_AUTO && !gmm__mlp_may_join(call))) return 0;
    memset(&step, 0, sizeof step);
    step.op = GMM_OP_LINEAR_FWD;
    step.descriptor = &steps->fc1;
    step.product_act = &steps->act;
    step.drops_preact = drops_preact;
    gmm__mlp_fill_forward(steps, &steps->fc1, GMM_SLOT_X, GMM_SLOT_W1);
    /* Checked as a query, since z has no address in a plan. Selected as the call, so that the alignment of x and w1
       counts, unless hooks.need sets w1 later. */
    s = gmm__mlp_prepare_step(steps, &step, 1, &product);
    product.query = call->query || gmm__mlp_awaits(call);
    product.describes = NULL;
    if (s == GMM_OK) s = gmm__select(&product, &plan);
    if (s == GMM_OK) return 1;
    if (fuse == GMM_FUSE_ALWAYS) steps->status = s;
    else call->ctx->error = last_error; /* a declined plan is no error */
    return 0;
}

/* Places h, in gmm_mlp.saved where it is kept, and makes it the result of the activation. */
static void gmm__mlp_place_h(gmm__mlp_steps *steps, const gmm__mlp_saved *saved) {
    const gmm__call *call = steps->call;
    char *memory = (char *)call->d.mlp.saved;
    steps->h = gmm__mlp_place_tokens(steps, GMM__MLP_H, call->config.ffn, &steps->workspace);
    if (memory && call->config.save == GMM_SAVE_PREACT_AND_ACT) steps->h.data = memory + saved->at[GMM__SAVED_ACT];
    steps->act.y = &steps->h;
}

/* Adds the activation and the casts of h. */
static void gmm__mlp_add_act_fwd(gmm__mlp_steps *steps, int saves, const gmm__mlp_saved *saved) {
    if (gmm__mlp_join_of(steps, GMM_SLOT_H) == GMM__MLP_FUSED) {
        steps->gates = steps->z;
        steps->gates.ld = gmm__mlp_fc1_cols(steps->call);
        steps->operand[GMM_SLOT_H].source = &steps->gates;
        gmm__mlp_cast_forward(steps, GMM_SLOT_H, saves, saved->at[GMM__SAVED_ACT]);
        steps->step[steps->count - 1].act_source = &steps->act;
        gmm__mlp_release(&steps->workspace, GMM__MLP_Z);
        return;
    }
    gmm__mlp_place_h(steps, saved);
    gmm__mlp_add_activation(steps, GMM_OP_ACT_FWD, GMM_SLOT_H, 1);
    gmm__mlp_release(&steps->workspace, GMM__MLP_Z);
    gmm__mlp_cast_forward(steps, GMM_SLOT_H, saves, saved->at[GMM__SAVED_ACT]);
}

/* Lists the steps of forward over a workspace. Inference keeps z and h in the workspace, training in gmm_mlp.saved; a
   query cannot tell the two apart, and reserves the workspace for both. */
static gmm_status gmm__mlp_build_fwd(gmm__mlp_steps *steps, const gmm__call *call, void *workspace) {
    const gmm__mlp_saved saved = gmm__mlp_saved_of(call);
    const int saves = call->query || call->d.mlp.saved, copies = saves && gmm__mlp_saves_copies(call);
    const int e4m3 = saves && gmm__mlp_saves_e4m3(call);
    const int drops_preact = !saves || call->config.save == GMM_SAVE_NOTHING;
    char *memory = (char *)call->d.mlp.saved;
    memset(steps, 0, sizeof *steps);
    steps->workspace.memory = (char *)workspace;
    gmm__mlp_place_split(steps, call, &steps->workspace);
    gmm__mlp_fill(steps);
    if (call->quant.weight_cache) (void)gmm__mlp_place_weights(steps, call->quant.weight_cache);

    steps->z = gmm__mlp_place_tokens(steps, GMM__MLP_Z, gmm__mlp_fc1_cols(call), &steps->workspace);
    if (memory && call->config.save != GMM_SAVE_NOTHING && !e4m3) steps->z.data = memory;
    gmm__mlp_cast_forward(steps, GMM_SLOT_X, copies, saved.at[GMM__SAVED_X]);
    gmm__mlp_cast_weight(steps, GMM_SLOT_W1);
    steps->joined = gmm__mlp_joins_product(steps, drops_preact);
    if (steps->joined) gmm__mlp_place_h(steps, &saved);
    gmm__mlp_add_forward(steps, &steps->fc1, GMM_SLOT_X, GMM_SLOT_W1);
    if (steps->joined) {
        steps->step[steps->count - 1].product_act = &steps->act;
        steps->step[steps->count - 1].drops_preact = drops_preact;
    }
    gmm__mlp_release_copies(steps, GMM_SLOT_X, GMM__MLP_BOTH);
    gmm__mlp_release_copies(steps, GMM_SLOT_W1, GMM__MLP_BOTH);
    if (e4m3) {
        gmm__mlp_place_e4m3(steps, memory);
        gmm__mlp_cast_e4m3(steps);
    }
    if (steps->joined) gmm__mlp_release(&steps->workspace, GMM__MLP_Z);
    else gmm__mlp_add_act_fwd(steps, copies, &saved);
    gmm__mlp_cast_weight(steps, GMM_SLOT_W2);
    gmm__mlp_add_forward(steps, &steps->fc2, GMM_SLOT_H, GMM_SLOT_W2);
    return steps->status;
}

/* Adds the product of a backward: dgrad reads dy and w, wgrad x and dy. No later step reads the same copies. */
static void gmm__mlp_add_dgrad(gmm__mlp_steps *steps, gmm_linear *linear, int dy, int w) {
    linear->dy = gmm__mlp_backward_operand(steps, dy, GMM_ROWWISE);
    gmm__mlp_await_weight(steps, w, GMM_OP_LINEAR_DGRAD);
    linear->w = gmm__mlp_backward_operand(steps, w, GMM_COLUMNWISE);
    gmm__mlp_gather(steps, linear, GMM_SLOT_X, dy);
    gmm__mlp_add_step(steps, GMM_OP_LINEAR_DGRAD, linear);
    gmm__mlp_release_copies(steps, dy, GMM__MLP_ROWWISE);
    gmm__mlp_release_copies(steps, w, GMM__MLP_BOTH);
}
static void gmm__mlp_add_wgrad(gmm__mlp_steps *steps, gmm_linear *linear, int x, int dy, gmm_param param) {
    linear->x = gmm__mlp_backward_operand(steps, x, GMM_COLUMNWISE);
    linear->dy = gmm__mlp_backward_operand(steps, dy, GMM_COLUMNWISE);
    gmm__mlp_gather(steps, linear, x, dy);
    gmm__mlp_add_gradient(steps, GMM_OP_LINEAR_WGRAD, linear, param);
    gmm__mlp_release_copies(steps, x, GMM__MLP_BOTH);
    gmm__mlp_release_copies(steps, dy, GMM__MLP_COLUMNWISE);
}

/* Casts an output gradient in one pass for its dgrad and its wgrad. A queued wgrad reads its copy in gmm_mlp.deferred
   later. */
static void gmm__mlp_cast_gradient(gmm__mlp_steps *steps, int slot, int dgrad, int wgrad, int defer) {
    int directions = 0;
    if (steps->call->quant.backward_override != GMM_BACKWARD_BY_RECIPE) return;
    if (wgrad) /* lives longer than the other copy, which is therefore behind it */
        directions |= gmm__mlp_place_copy(steps, slot, GMM_COLUMNWISE, defer ? &steps->deferred : &steps->workspace);
    if (dgrad) directions |= gmm__mlp_place_copy(steps, slot, GMM_ROWWISE, &steps->workspace);
    gmm__mlp_cast(steps, slot, directions, NULL);
}

/* What a queued weight gradient reads of an operand: the copy in gmm_mlp.deferred or in `saved`, or the source and
   *index, that of its gathered rows. Without a saved copy, that of x is one for FC1's second run, in the workspace. */
static gmm_mat gmm__mlp_queued_operand(const gmm__mlp_steps *steps, int slot, const int32_t **index) {
    const gmm__mlp_operand *o = &steps->operand[slot];
    const gmm_mat *copy = &o->copy[gmm__mlp_backward_direction(steps->call)];
    const int remains = slot != GMM_SLOT_X || gmm__mlp_saves_copies(steps->call);
    const gmm_mat *read = copy->dtype != GMM_NONE && remains &&
                                  steps->call->quant.backward_override != GMM_BACKWARD_HIGH_PRECISION
                              ? copy : o->source;
    gmm_mat m = *read;
    m.columnwise = NULL;
    *index = gmm__mlp_index_of(steps, slot, read);
    return m;
}

/* Finds the matrices that forward has saved, and places those that backward computes before it reads dy. */
static void gmm__mlp_place_bwd(gmm__mlp_steps *steps, const gmm__mlp_gradients *need) {
    const gmm__call *call = steps->call;
    const gmm__mlp_saved saved = gmm__mlp_saved_of(call);
    char *memory = (char *)call->d.mlp.saved;
    if (need->z && (call->config.save == GMM_SAVE_NOTHING || gmm__mlp_saves_e4m3(call)))
        steps->z = gmm__mlp_place_tokens(steps, GMM__MLP_Z, gmm__mlp_fc1_cols(call), &steps->workspace);
    else steps->z.data = memory;
    if (need->h_saved) steps->h.data = memory ? memory + saved.at[GMM__SAVED_ACT] : NULL;
    if (gmm__mlp_saves_copies(call)) {
        (void)gmm__mlp_place_saved(steps, GMM_SLOT_X, saved.at[GMM__SAVED_X]);
        (void)gmm__mlp_place_saved(steps, GMM_SLOT_H, saved.at[GMM__SAVED_ACT]);
    }
    if (call->quant.weight_cache) (void)gmm__mlp_place_weights(steps, call->quant.weight_cache);
}

/* Adds the steps that compute z again, or its values in the dtype of x. FC1's operands are cast in both directions
   where FC1's gradients read them too. */
static void gmm__mlp_add_preact(gmm__mlp_steps *steps, const gmm__mlp_gradients *need) {
    const gmm__call *call = steps->call;
    const gmm_mlp *d = &call->d.mlp;
    const int both = call->quant.backward_override == GMM_BACKWARD_BY_RECIPE;
    const int x_again = both && d->dw1 && !need->defer, w_again = both && d->dx;
    if (gmm__mlp_saves_e4m3(call)) {
        gmm__mlp_place_e4m3(steps, (char *)d->saved);
        gmm__mlp_dequantize(steps, &steps->z_e4m3, 0, gmm__mlp_fc1_cols(call), &steps->z);
    } else if (call->config.save == GMM_SAVE_NOTHING) {
        gmm__mlp_make_copies(steps, GMM_SLOT_X, x_again ? GMM__MLP_BOTH : GMM__MLP_ROWWISE);
        gmm__mlp_await_weight(steps, GMM_SLOT_W1, GMM_OP_LINEAR_FWD);
        gmm__mlp_make_copies(steps, GMM_SLOT_W1, w_again ? GMM__MLP_BOTH : GMM__MLP_ROWWISE);
        gmm__mlp_add_forward(steps, &steps->fc1, GMM_SLOT_X, GMM_SLOT_W1);
        if (both) { /* with an override the rowwise copies are dequantized later */
            gmm__mlp_release_copies(steps, GMM_SLOT_X, GMM__MLP_ROWWISE);
            gmm__mlp_release_copies(steps, GMM_SLOT_W1, GMM__MLP_ROWWISE);
        }
    }
}

/* Whether the activation of backward computes h, and where: in `deferred` where a queued weight gradient reads it. dh,
   which no later step reads, is in the same memory. */
static int gmm__mlp_computes_h(const gmm__mlp_gradients *need) { return need->h && !need->h_saved; }
static gmm_mat gmm__mlp_place_dh(gmm__mlp_steps *steps, const gmm__mlp_gradients *need) {
    const gmm__call *call = steps->call;
    const int queued = gmm__mlp_computes_h(need) && need->defer && !gmm__mlp_backward_reads_copies(call);
    return gmm__mlp_place_tokens(steps, gmm__mlp_computes_h(need) ? GMM__MLP_H : GMM__MLP_DH, call->config.ffn,
                                 queued ? &steps->deferred : &steps->workspace);
}

/* Adds the activation: its gradient dz, h for FC2's weight gradient, or both. dz takes the place of a z in the
   workspace, and h that of dh. Queued weight gradients read dz and h in `deferred`, unless they read copies. */
static void gmm__mlp_add_act(gmm__mlp_steps *steps, const gmm__mlp_gradients *need) {
    const gmm__call *call = steps->call;
    const gmm_mlp *d = &call->d.mlp;
    const int saves_z = call->config.save != GMM_SAVE_NOTHING && !gmm__mlp_saves_e4m3(call);
    const int dz_copied = call->quant.backward_override == GMM_BACKWARD_BY_RECIPE &&
                          gmm__mlp_quantizes(&steps->operand[GMM_SLOT_DZ]);
    const int dz_queued = need->defer && d->dw1 && !dz_copied, in_place = need->dz && !saves_z && !dz_queued;
    const int computes_h = gmm__mlp_computes_h(need);
    if (in_place) steps->dz = steps->z;
    else if (need->dz)
        steps->dz = gmm__mlp_place_tokens(steps, GMM__MLP_DZ, gmm__mlp_fc1_cols(call),
                                          dz_queued ? &steps->deferred : &steps->workspace);
    if (computes_h) steps->h = need->dh ? steps->dh : gmm__mlp_place_dh(steps, need);
    steps->act.dy = &steps->dh;
    steps->act.dx = need->dz ? &steps->dz : NULL;
    steps->act.dprob = d->dprob;
    steps->act.y = computes_h ? &steps->h : NULL;
    if (need->dh) gmm__mlp_add_activation(steps, GMM_OP_ACT_BWD, GMM_SLOT_DZ, dz_copied && (d->dx || d->dw1));
    else if (computes_h) gmm__mlp_add_step(steps, GMM_OP_ACT_FWD, &steps->act);
    if (!in_place) gmm__mlp_release(&steps->workspace, GMM__MLP_Z);
    gmm__mlp_release(&steps->workspace, GMM__MLP_DH);
}

/* Lists the steps of backward. `deferred`: gmm_mlp.deferred. Blocks of the workspace are returned behind the last step
   that reads them, so that later ones get the same bytes. */
static gmm_status gmm__mlp_build_bwd(gmm__mlp_steps *steps, const gmm__call *call, void *workspace, void *deferred) {
    const gmm_mlp *d = &call->d.mlp;
    const gmm__mlp_gradients need = gmm__mlp_gradients_of(call);
    const int dw1 = d->dw1 && !need.defer, dw2 = d->dw2 && !need.defer;
    const gmm_direction queued = gmm__mlp_backward_direction(call);
    memset(steps, 0, sizeof *steps);
    steps->workspace.memory = (char *)workspace;
    steps->deferred.memory = (char *)deferred;
    gmm__mlp_place_split(steps, call, need.defer ? &steps->deferred : &steps->workspace);
    gmm__mlp_fill(steps);
    gmm__mlp_place_bwd(steps, &need);
    if (need.z) gmm__mlp_add_preact(steps, &need);

    if (need.dh) steps->dh = gmm__mlp_place_dh(steps, &need);
    gmm__mlp_cast_gradient(steps, GMM_SLOT_DY, need.dh, d->dw2 != NULL, need.defer);
    if (need.dh) gmm__mlp_add_dgrad(steps, &steps->dgrad2, GMM_SLOT_DY, GMM_SLOT_W2);
    gmm__mlp_add_act(steps, &need);
    if (dw2) gmm__mlp_add_wgrad(steps, &steps->wgrad2, GMM_SLOT_H, GMM_SLOT_DY, GMM_PARAM_W2);
    else if (d->dw2 && gmm__mlp_backward_reads_copies(call))
        gmm__mlp_cast(steps, GMM_SLOT_H, gmm__mlp_place_copy(steps, GMM_SLOT_H, queued, &steps->deferred), NULL);
    gmm__mlp_release(&steps->workspace, GMM__MLP_H);
    if (d->db2) gmm__mlp_add_gradient(steps, GMM_OP_LINEAR_BGRAD, &steps->bgrad2, GMM_PARAM_B2);
    else if (steps->bgrad2.d_bias_scale) gmm__mlp_add_step(steps, GMM_OP_LINEAR_BGRAD, &steps->bgrad2);

    if (d->dx || d->dw1) gmm__mlp_cast_gradient(steps, GMM_SLOT_DZ, d->dx != NULL, d->dw1 != NULL, need.defer);
    if (dw1) gmm__mlp_add_wgrad(steps, &steps->wgrad1, GMM_SLOT_X, GMM_SLOT_DZ, GMM_PARAM_W1);
    if (d->db1) gmm__mlp_add_gradient(steps, GMM_OP_LINEAR_BGRAD, &steps->bgrad1, GMM_PARAM_B1);
    if (d->dx) gmm__mlp_add_dgrad(steps, &steps->dgrad1, GMM_SLOT_DZ, GMM_SLOT_W1);
    return steps->status;
}

/* A queued weight gradient: `source` has its operands, of which those of quantized formats are copies. Index 0 is
   FC2's, 1 is FC1's. */
typedef struct gmm__mlp_queued {
    gmm_dtype dtype; /* of operands that are not quantized */
    int32_t *tiles;
    int64_t in[2], out[2];
    gmm_mat x[2], dy[2];
    const int32_t *x_index[2], *dy_index[2]; /* of gathered rows */
    int64_t index_rows;
    int32_t index_div;
} gmm__mlp_queued;

/* Lists the steps of weight gradient i. The split of the call is in offsets already. */
static gmm_status gmm__mlp_build_wgrad(gmm__mlp_steps *steps, const gmm__call *call, const gmm__mlp_queued *q, int i,
                                       const gmm_grad *dw, void *workspace) {
    const int slots[2][2] = { { GMM_SLOT_H, GMM_SLOT_DY }, { GMM_SLOT_X, GMM_SLOT_DZ } };
    const gmm_mat *source[2];
    const int64_t cols[2] = { q->in[i], q->out[i] };
    int k;
    source[0] = &q->x[i];
    source[1] = &q->dy[i];
    memset(steps, 0, sizeof *steps);
    steps->workspace.memory = (char *)workspace;
    gmm__mlp_begin(steps, call, q->dtype, (void *)(uintptr_t)call->groups.splits, q->tiles);
    for (k = 0; k < 2; k++) {
        gmm__mlp_operand *o = &steps->operand[slots[i][k]];
        gmm__mlp_fill_operand(steps, slots[i][k], source[k], 0, cols[k]);
        o->index = k ? q->dy_index[i] : q->x_index[i];
        if (source[k]->scaling == GMM_SCALING_NONE) continue;
        memset(o->copy, 0, sizeof o->copy);
        o->copy[gmm__mlp_backward_direction(call)] = *source[k];
    }
    steps->wgrad2 = gmm__mlp_linear(steps, q->in[i], q->out[i]);
    steps->wgrad2.dw = dw;
    steps->index_rows = q->index_rows;
    steps->index_div = q->index_div;
    gmm__mlp_add_wgrad(steps, &steps->wgrad2, slots[i][0], slots[i][1], i ? GMM_PARAM_W1 : GMM_PARAM_W2);
    return steps->status;
}

/* Checks the call of a step. */
static gmm_status gmm__mlp_prepare_step(const gmm__mlp_steps *steps, const gmm__mlp_step *step, int query,
                                        gmm__call *call) {
    gmm_context *ctx = steps->call->ctx;
    const char *function = steps->call->function;
    gmm_status s;
    if (step->op == GMM_OP_QUANTIZE)
        s = gmm__quantize_prepare(call, ctx, step->op, function, (const gmm_quantization *)step->descriptor, query);
    else if (step->op == GMM_OP_DEQUANTIZE)
        s = gmm__dequantize_prepare(call, ctx, function, (const gmm_dequantization *)step->descriptor, query);
    else if (step->op == GMM_OP_ACT_FWD || step->op == GMM_OP_ACT_BWD)
        s = gmm__act_prepare(call, ctx, step->op, function, (const gmm_activation *)step->descriptor, query);
    else s = gmm__linear_prepare(call, ctx, step->op, function, (const gmm_linear *)step->descriptor, query);
    call->split_tiles = steps->tiles;
    call->act_amax = step->act_amax;
    call->act_source = step->act_source;
    call->product_act = step->product_act;
    call->drops_preact = step->drops_preact;
    call->describes = steps->call->describes;
    if (step->act_source) call->act = *step->act_source->act;
    if (step->product_act) call->act = *step->product_act->act;
    return s;
}

/* Raises plan->workspace_bytes to what the steps take. `built` is the status of listing them. Returns 0 if an engine
   or the listing declines. */
static int gmm__mlp_plan_steps(const gmm__mlp_steps *steps, gmm_status built, gmm__plan *plan) {
    gmm_context *ctx = plan->call->ctx;
    const gmm_error last_error = ctx->error;
    size_t bytes = steps->workspace.peak;
    int i;
    if (built != GMM_OK) return gmm__decline(plan, "%.180s", ctx->error.text);
    for (i = 0; i < steps->count; i++) {
        gmm__call call;
        size_t step_bytes = 0;
        const gmm_status s = gmm__mlp_prepare_step(steps, &steps->step[i], 1, &call);
        if (!gmm__mlp_measure_step(&call, s, &last_error, &step_bytes, plan)) return 0;
        if (steps->step[i].workspace + step_bytes > bytes) bytes = steps->step[i].workspace + step_bytes;
    }
    if (bytes > plan->workspace_bytes) plan->workspace_bytes = bytes;
    return 1;
}

/* Calls the hook for the gradient of a parameter. While a graph is captured nothing is computed, and therefore no hook
   is called. */
static void gmm__mlp_call_hook(const gmm_context *ctx, const gmm_grad_hooks *hooks, gmm_param param,
                               gmm_stream stream) {
    if (hooks && hooks->ready && !gmm__capturing(ctx, stream)) hooks->ready(hooks->user, param, stream);
}

/* Checks a matrix that hooks.need has set against the one with which the call began. */
static gmm_status gmm__mlp_check_late(const gmm__call *call, const char *name, const gmm_mat *was, const gmm_mat *m) {
    const uint32_t flags = ~(uint32_t)GMM_MAT_TABLE_ON_HOST;
    const struct { const char *name; int64_t was, is; } fields[] = {
        { "dtype", was->dtype, m->dtype },
        { "scaling", was->scaling, m->scaling },
        { "scale_order", was->scale_order, m->scale_order },
        { "hadamard", was->hadamard, m->hadamard },
        { "flags", was->flags & flags, m->flags & flags },
        { "ld", was->ld, m->ld },
    };
    const int64_t bits = gmm_dtype_bits(m->dtype);
    const int readable = call->ctx->config.space == GMM_SPACE_CPU || (m->flags & (uint32_t)GMM_MAT_TABLE_ON_HOST);
    const void *address = m->data;
    int32_t g;
    size_t i;
    for (i = 0; i < sizeof fields / sizeof fields[0]; i++)
        if (fields[i].was != fields[i].is)
            return gmm__refuse(call, GMM_E_CONFIG, name, "%s %lld must be %lld, as when the call began: hooks.need may "
                               "set addresses and group_stride alone", fields[i].name, (long long)fields[i].is,
                               (long long)fields[i].was);
    if (m->ld * bits % 128) return GMM_OK;
    if (m->data && m->group_stride * bits % 128)
        return gmm__refuse(call, GMM_E_ALIGN, name, "group_stride %lld, set by hooks.need, must be a multiple of 16 "
                           "bytes as ld %lld is", (long long)m->group_stride, (long long)m->ld);
    for (g = 0; m->table && readable && g < call->groups.count && (uintptr_t)address % 16 == 0; g++)
        address = m->table[g];
    if ((uintptr_t)address % 16)
        return gmm__refuse(call, GMM_E_ALIGN, name, "%p, set by hooks.need, must be a multiple of 16 bytes as ld %lld "
                           "is", address, (long long)m->ld);
    return GMM_OK;
}

/* Calls hooks.need for the weight of a step, and reads the addresses that it has set. */
static gmm_status gmm__mlp_take_weight(gmm__mlp_steps *steps, const gmm__mlp_step *step, gmm_stream stream) {
    const int second = step->awaits == GMM_SLOT_W2, role = second ? GMM__W2 : GMM__W;
    const char *const names[2] = { second ? "w2" : "w1", second ? "w2.columnwise" : "w1.columnwise" };
    const gmm_grad_hooks *hooks = steps->call->d.mlp.hooks;
    const int dgrad = step->awaits_op == GMM_OP_LINEAR_DGRAD;
    const gmm_direction direction = dgrad ? gmm__mlp_dgrad_direction(steps->call) : GMM_ROWWISE;
    gmm__mlp_operand *o = &steps->operand[step->awaits];
    const int plain = o->source->scaling == GMM_SCALING_NONE; /* both directions read the one matrix */
    const char *const name = names[plain ? GMM_ROWWISE : direction];
    gmm_mat *mat = plain ? &steps->weight[second] : &o->copy[direction], was = *mat;
    gmm__call late = *steps->call;
    gmm_status s = hooks->need(hooks->user, second ? GMM_PARAM_W2 : GMM_PARAM_W1, step->awaits_op, stream);
    if (s != GMM_OK)
        return gmm__refuse(&late, s, "hooks.need", "status %d (%s) for %s of %s", (int)s, gmm_status_name(s), names[0],
                           gmm_op_name(step->awaits_op));
    if ((s = gmm__mlp_read_weight(&late, role, 1 << direction)) != GMM_OK) return s;
    if (late.mat[role].scaling != o->source->scaling)
        return gmm__mlp_check_late(&late, names[0], &was, &late.mat[role]);
    if (!plain) { /* a query reads both matrices again, to fill in their ld */
        const gmm__extents extents = gmm__mlp_weight_extents(&late, role);
        gmm_mat now = late.mat[role];
        if (direction == GMM_COLUMNWISE) (void)gmm__copy_sized(&now, sizeof now, late.mat[role].columnwise);
        late.query = 1;
        if ((s = gmm__read_quant(&late, role, name, &was, extents, direction)) != GMM_OK) return s;
        was = late.mat[role];
        if ((s = gmm__read_quant(&late, role, name, &now, extents, direction)) != GMM_OK) return s;
        late.query = 0;
    }
    s = gmm__mlp_check_late(&late, name, &was, &late.mat[role]);
    if (s != GMM_OK || (s = gmm__check_overlap(&late)) != GMM_OK) return s;
    *mat = late.mat[role];
    if (mat->scaling != GMM_SCALING_NONE) {
        mat->columnwise = NULL;
        (void)gmm__mlp_copies_of(steps, step->awaits);
    }
    return GMM_OK;
}

/* The kinds of tiles whose prefix sums the steps read: casts and dequantizations, among which are those of products of
   MX32 and NV16 tokens, and bias gradients. Queued weight gradients read them later. */
static int32_t gmm__mlp_tile_kinds(const gmm__mlp_steps *steps) {
    const int queues = steps->deferred.count > 0;
    int32_t kinds = queues ? 1 << GMM__TILES_128 | 1 << GMM__TILES_16 : 0;
    int i;
    for (i = 0; i < steps->count; i++) {
        const gmm__mlp_step *step = &steps->step[i];
        if (step->op == GMM_OP_QUANTIZE || step->op == GMM_OP_DEQUANTIZE) kinds |= 1 << GMM__TILES_128;
        else if (step->op == GMM_OP_LINEAR_BGRAD) kinds |= 1 << GMM__TILES_512;
        else if (step->op != GMM_OP_ACT_FWD && step->op != GMM_OP_ACT_BWD) {
            const gmm_linear *l = (const gmm_linear *)step->descriptor;
            const gmm_scaling scaling = l->dy ? l->dy->scaling : l->x->scaling;
            if (scaling == GMM_SCALING_MX32 || scaling == GMM_SCALING_NV16)
                kinds |= 1 << GMM__TILES_128 | 1 << GMM__TILES_16;
        }
    }
    return kinds;
}

/* Enqueues the computation of the call's split as int64 offsets and tiles, which all steps read. */
static gmm_status gmm__mlp_run_split(const gmm__mlp_steps *steps, const gmm__plan *plan, gmm_stream stream) {
    gmm__call step = *steps->call;
    step.op = GMM_OP_OFFSETS;
    step.query = 0;
    step.options.engine = plan->engine;
    step.output = steps->offsets;
    step.split_tiles = steps->tiles;
    step.tile_kinds = gmm__mlp_tile_kinds(steps);
    step.spans = 0; /* overlap was checked with the call */
    return gmm__serve(&step, NULL, NULL, 0, stream);
}

/* Enqueues the steps, each behind what must outlive it in the workspace of the plan. */
static gmm_status gmm__mlp_run_steps(gmm__mlp_steps *steps, const gmm__plan *plan, const gmm_grad_hooks *hooks,
                                     gmm_stream stream) {
    gmm_status s = GMM_OK;
    int i;
    for (i = 0; i < steps->count && s == GMM_OK; i++) {
        const gmm__mlp_step *step = &steps->step[i];
        gmm__call call;
        if (step->awaits && hooks && hooks->need) s = gmm__mlp_take_weight(steps, step, stream);
        if (s == GMM_OK) s = gmm__mlp_prepare_step(steps, step, 0, &call);
        if (s == GMM_OK)
            s = gmm__serve(&call, NULL, plan->workspace ? (char *)plan->workspace + step->workspace : NULL,
                           plan->workspace_bytes - step->workspace, stream);
        if (s == GMM_OK && step->completes) gmm__mlp_call_hook(call.ctx, hooks, step->param, stream);
    }
    return s;
}
/* Plans, launches and entry points of the MLP, which is composed of steps, and the queue of delayed weight gradients.
   The engines CPU and MMA share these functions; each step selects an engine of its own. */

static int gmm__compose_plan_mlp_fwd(const gmm__call *call, gmm__plan *plan) {
    gmm__mlp_steps steps;
    const gmm_status built = gmm__mlp_build_fwd(&steps, call, NULL);
    plan->saved_bytes = (size_t)gmm__mlp_saved_of(call).layout.bytes;
    plan->weight_cache_bytes = gmm__mlp_cache_bytes(call);
    if (!gmm__mlp_plan_steps(&steps, built, plan)) return 0;
    if (call->query && call->options.fuse == GMM_FUSE_AUTO && gmm__mlp_may_join(call)) {
        /* a query covers both: the call may decide otherwise by its addresses and by whether it saves */
        const gmm_error last_error = call->ctx->error;
        gmm__call other = *call;
        other.describes = NULL;
        other.options.fuse = steps.joined ? GMM_FUSE_NEVER : GMM_FUSE_ALWAYS;
        if (gmm__mlp_build_fwd(&steps, &other, NULL) == GMM_OK) return gmm__mlp_plan_steps(&steps, GMM_OK, plan);
        call->ctx->error = last_error;
    }
    return 1;
}

static gmm_status gmm__compose_launch_mlp_fwd(const gmm__plan *plan, gmm_stream stream) {
    gmm__mlp_steps steps;
    gmm_status s = gmm__mlp_build_fwd(&steps, plan->call, plan->workspace);
    if (s == GMM_OK) s = gmm__mlp_run_split(&steps, plan, stream);
    return s == GMM_OK ? gmm__mlp_run_steps(&steps, plan, plan->call->d.mlp.hooks, stream) : s;
}

/* The contents of gmm_wgrad_entry: the weight gradients of one backward, FC2's first. It points to the caller's
   matrices, fault word and arrays of gmm_mlp_quant, but to none of its descriptors and arrays by group. */
typedef struct gmm__wgrad_record {
    gmm_groups groups;
    gmm_options options;
    gmm_grad_hooks hooks;
    gmm__mlp_queued operands;
    gmm_mat dw[2];
    gmm_grad grad[2];
    gmm_recipe recipe;
    gmm_mlp_quant quant;
    int32_t pending[2]; /* 1: wanted and not computed yet */
    int32_t tag;        /* GMM__WGRAD_TAG while queued */
} gmm__wgrad_record;

enum { GMM__WGRAD_TAG = 0x6772616D };

typedef char gmm__wgrad_record_fits[sizeof(gmm__wgrad_record) <= sizeof(gmm_wgrad_entry) ? 1 : -1];

static gmm_status gmm__convert_prepare(gmm__call *call, gmm_context *ctx, const char *function,
                                       const gmm_conversion *conversion, int query);
#ifdef __CUDACC__
static gmm_status gmm__cuda_status(const gmm__call *call, cudaError_t e);
#endif

/* Enqueues a copy of the caller's bytes to memory of the context's space. `host`: the source is host memory that may be
   freed on return. */
static gmm_status gmm__mlp_copy(const gmm__call *call, const void *src_data, int host, void *dst_data, size_t bytes,
                                gmm_stream stream) {
    const gmm_mat src = gmm_mat_packed(GMM_U8, src_data), dst = gmm_mat_packed(GMM_U8, dst_data);
    gmm_conversion d = GMM_ZERO;
    gmm__call step;
    gmm_status s;
#ifdef __CUDACC__ /* the bytes are passed as arguments of a kernel, which the launch copies */
    if (host && call->ctx->config.space == GMM_SPACE_CUDA)
        return gmm__cuda_status(call, gmm_launch_copy(dst_data, src_data, (int64_t)(bytes / 8), stream));
#else
    (void)host;
#endif
    d.rows = 1;
    d.cols = (int64_t)bytes;
    d.options = &call->options;
    d.src = &src;
    d.dst = &dst;
    s = gmm__convert_prepare(&step, call->ctx, call->function, &d, 0);
    return s != GMM_OK ? s : gmm__serve(&step, NULL, NULL, 0, stream);
}

/* Copies the arrays by group of a gradient's destination, and makes the record's descriptors point to the copies. */
static gmm_status gmm__mlp_copy_arrays(const gmm__call *call, char *arrays, gmm_mat *dw, gmm_grad *grad,
                                       gmm_stream stream) {
    const size_t G = (size_t)call->groups.count;
    char *beta = arrays + G * sizeof(void *), *frozen = beta + G * sizeof(float);
    gmm_status s = GMM_OK;
    if (dw->table) {
        s = gmm__mlp_copy(call, dw->table, (dw->flags & (uint32_t)GMM_MAT_TABLE_ON_HOST) != 0, arrays,
                          G * sizeof(void *), stream);
        dw->table = (void *const *)arrays;
        dw->flags &= ~(uint32_t)GMM_MAT_TABLE_ON_HOST;
    }
    if (s == GMM_OK && grad->beta) {
        s = gmm__mlp_copy(call, grad->beta, 0, beta, G * sizeof(float), stream);
        grad->beta = (const float *)beta;
    }
    if (s == GMM_OK && grad->frozen) {
        s = gmm__mlp_copy(call, grad->frozen, 0, frozen, G, stream);
        grad->frozen = (const uint8_t *)frozen;
    }
    return s;
}

/* Bytes of the arrays by group of one gradient's destination: addresses, betas and frozen flags. */
static int64_t gmm__mlp_array_bytes(const gmm__call *call) {
    return call->groups.count * (int64_t)(sizeof(void *) + sizeof(float) + 1);
}

/* What the queue keeps of a backward's operands. */
static gmm__mlp_queued gmm__mlp_queue_of(const gmm__mlp_steps *steps) {
    const gmm_linear *linear[2];
    const int slots[2][2] = { { GMM_SLOT_H, GMM_SLOT_DY }, { GMM_SLOT_X, GMM_SLOT_DZ } };
    gmm__mlp_queued q;
    int i;
    linear[0] = &steps->wgrad2;
    linear[1] = &steps->wgrad1;
    memset(&q, 0, sizeof q);
    q.dtype = steps->dtype;
    q.tiles = steps->tiles;
    for (i = 0; i < 2; i++) {
        q.in[i] = linear[i]->in_features;
        q.out[i] = linear[i]->out_features;
        q.x[i] = gmm__mlp_queued_operand(steps, slots[i][0], &q.x_index[i]);
        q.dy[i] = gmm__mlp_queued_operand(steps, slots[i][1], &q.dy_index[i]);
    }
    q.index_rows = steps->index_rows;
    q.index_div = steps->index_div;
    return q;
}

/* Appends the weight gradients of a backward to the queue of the caller. */
static gmm_status gmm__mlp_record(gmm__mlp_steps *steps, gmm_stream stream) {
    const gmm__call *call = steps->call;
    const gmm_mlp *d = &call->d.mlp;
    gmm_wgrad_queue *q = d->queue;
    const int roles[2] = { GMM__DW2, GMM__DW };
    gmm__wgrad_record r;
    int i;
    memset(&r, 0, sizeof r);
    r.tag = GMM__WGRAD_TAG;
    r.groups = steps->groups;
    r.options = steps->options;
    if (d->hooks) r.hooks = *d->hooks;
    r.recipe = call->recipe;
    r.quant = call->quant;
    r.quant.recipe = NULL;
    r.operands = gmm__mlp_queue_of(steps);
    r.pending[0] = d->dw2 != NULL;
    r.pending[1] = d->dw1 != NULL;
    for (i = 0; i < 2; i++) {
        char *arrays = (char *)gmm__mlp_place(&steps->deferred, GMM__MLP_ARRAYS, gmm__mlp_array_bytes(call));
        gmm_status s;
        if (!r.pending[i]) continue;
        r.dw[i] = call->mat[roles[i]];
        r.grad[i] = call->grad[roles[i]];
        r.dw[i].columnwise = r.grad[i].mat = NULL;
        s = gmm__mlp_copy_arrays(call, arrays, &r.dw[i], &r.grad[i], stream);
        if (s != GMM_OK) return s;
    }
    memcpy(&q->entries[(q->head + q->count) % q->capacity], &r, sizeof r);
    q->count++;
    return GMM_OK;
}

static int gmm__compose_plan_mlp_bwd(const gmm__call *call, gmm__plan *plan) {
    gmm__mlp_steps steps;
    const gmm_status built = gmm__mlp_build_bwd(&steps, call, NULL, NULL);
    if (gmm__mlp_gradients_of(call).defer) {
        (void)gmm__mlp_place(&steps.deferred, GMM__MLP_ARRAYS, gmm__mlp_array_bytes(call));
        (void)gmm__mlp_place(&steps.deferred, GMM__MLP_ARRAYS, gmm__mlp_array_bytes(call));
    }
    plan->saved_bytes = (size_t)gmm__mlp_saved_of(call).layout.bytes;
    plan->deferred_bytes = steps.deferred.peak;
    plan->weight_cache_bytes = gmm__mlp_cache_bytes(call);
    return gmm__mlp_plan_steps(&steps, built, plan);
}

static gmm_status gmm__compose_launch_mlp_bwd(const gmm__plan *plan, gmm_stream stream) {
    const gmm__call *call = plan->call;
    gmm__mlp_steps steps;
    gmm_status s = gmm__mlp_build_bwd(&steps, call, plan->workspace, call->d.mlp.deferred);
    if (s == GMM_OK) s = gmm__mlp_run_split(&steps, plan, stream);
    if (s == GMM_OK) s = gmm__mlp_run_steps(&steps, plan, call->d.mlp.hooks, stream);
    return s == GMM_OK && gmm__mlp_gradients_of(call).defer ? gmm__mlp_record(&steps, stream) : s;
}

/* Plans the weight gradients of a record, which call->input and call->output point to. They are NULL in a query, which
   plans those that a backward of the MLP's own descriptor would queue. */
static int gmm__compose_plan_mlp_wgrad(const gmm__call *call, gmm__plan *plan) {
    const gmm__wgrad_record *r = (const gmm__wgrad_record *)call->input;
    gmm__mlp_steps steps;
    gmm__mlp_queued q;
    int i;
    if (!r) {
        const gmm_status built = gmm__mlp_build_bwd(&steps, call, NULL, NULL);
        if (built != GMM_OK) return gmm__decline(plan, "%.180s", call->ctx->error.text);
        q = gmm__mlp_queue_of(&steps);
    }
    for (i = 0; i < 2; i++) {
        const gmm_grad *dw = r ? &r->grad[i] : &call->grad[i ? GMM__DW : GMM__DW2];
        gmm_status built;
        if (r ? !r->pending[i] : !(i ? call->d.mlp.dw1 : call->d.mlp.dw2)) continue;
        built = gmm__mlp_build_wgrad(&steps, call, r ? &r->operands : &q, i, dw, NULL);
        if (!gmm__mlp_plan_steps(&steps, built, plan)) return 0;
    }
    return 1;
}

static gmm_status gmm__compose_launch_mlp_wgrad(const gmm__plan *plan, gmm_stream stream) {
    gmm__wgrad_record *r = (gmm__wgrad_record *)plan->call->output;
    int i;
    for (i = 0; i < 2; i++) {
        gmm__mlp_steps steps;
        gmm_status s;
        if (!r->pending[i]) continue;
        s = gmm__mlp_build_wgrad(&steps, plan->call, &r->operands, i, &r->grad[i], plan->workspace);
        if (s == GMM_OK) s = gmm__mlp_run_steps(&steps, plan, &r->hooks, stream);
        if (s != GMM_OK) return s;
        r->pending[i] = 0; /* if the other gradient fails, the next call does not add this one again */
    }
    return GMM_OK;
}

/* Checks gmm_mlp.saved or gmm_mlp.deferred against the `need` bytes of the plan. */
static gmm_status gmm__mlp_buffer(gmm__call *call, const char *name, int writes, const void *memory, size_t bytes,
                                  size_t need) {
    if (!memory && need > 0)
        return gmm__refuse(call, GMM_E_NULL, name, "is NULL for %llu bytes, which the query states",
                           (unsigned long long)need);
    if (bytes < need)
        return gmm__refuse(call, GMM_E_WORKSPACE, name, "has %llu bytes and must have >= %llu, which the query states",
                           (unsigned long long)bytes, (unsigned long long)need);
    if ((uintptr_t)memory % GMM__WORKSPACE_ALIGN)
        return gmm__refuse(call, GMM_E_ALIGN, name, "%p is not aligned to %d bytes", memory, (int)GMM__WORKSPACE_ALIGN);
    gmm__add_span(call, name, "", writes, memory, (int64_t)need);
    return GMM_OK;
}

/* Checks the cache of quantized weights, which forward writes and backward reads, if there is one. */
static gmm_status gmm__mlp_cache_buffer(gmm__call *call, int writes, size_t need) {
    const gmm_mlp_quant *q = &call->quant;
    return q->weight_cache ? gmm__mlp_buffer(call, "quant.weight_cache", writes, q->weight_cache,
                                             q->weight_cache_bytes, need)
                           : GMM_OK;
}

/* Checks the fields of the queue, which the caller may have set. */
static gmm_status gmm__mlp_check_queue(gmm__call *call, const gmm_wgrad_queue *q) {
    if (!q || !q->entries) return gmm__refuse(call, GMM_E_NULL, "queue", "is NULL or has no entries");
    if ((uintptr_t)q->entries % sizeof q->entries->opaque[0])
        return gmm__refuse(call, GMM_E_ALIGN, "queue.entries", "%p is not aligned to %d bytes", (void *)q->entries,
                           (int)sizeof q->entries->opaque[0]);
    if (q->capacity < 1) return gmm__refuse(call, GMM_E_ARG, "queue.capacity", "%d must be >= 1", (int)q->capacity);
    if (q->head < 0 || q->head >= q->capacity)
        return gmm__refuse(call, GMM_E_ARG, "queue.head", "%d must be >= 0 and below the capacity %d", (int)q->head,
                           (int)q->capacity);
    if (q->count < 0 || q->count > q->capacity)
        return gmm__refuse(call, GMM_E_ARG, "queue.count", "%d must be >= 0 and at most the capacity %d",
                           (int)q->count, (int)q->capacity);
    if (q->reserved) return gmm__refuse(call, GMM_E_ARG, "queue.reserved", "%d must be 0", (int)q->reserved);
    return GMM_OK;
}

GMMDEF gmm_status gmm_mlp_query(gmm_context *ctx, gmm_op op, const gmm_mlp *mlp, gmm_info *info) {
    gmm__call call;
    const gmm_status s = gmm__mlp_prepare(&call, ctx, op, "gmm_mlp_query", mlp, GMM__MLP_QUERY);
    return s != GMM_OK ? s : gmm__serve(&call, info, NULL, 0, NULL);
}

GMMDEF gmm_status gmm_mlp_saved_query(gmm_context *ctx, gmm_op op, const gmm_mlp *mlp, gmm_saved_layout *layout) {
    gmm__call call;
    const gmm_status s = gmm__mlp_prepare(&call, ctx, op, "gmm_mlp_saved_query", mlp, GMM__MLP_QUERY);
    gmm_saved_layout full;
    if (s != GMM_OK) return s;
    full = gmm__mlp_saved_of(&call).layout;
    return gmm__write_layout(&call, layout, &full, sizeof full);
}

/* Checks the caller's buffers of forward or backward against what the plan needs. */
static gmm_status gmm__mlp_check_buffers(gmm__call *call, const gmm__plan *plan) {
    const gmm_mlp *d = &call->d.mlp;
    const int fwd = call->op == GMM_OP_MLP_FWD;
    gmm_status s = GMM_OK;
    if (!fwd || d->saved) s = gmm__mlp_buffer(call, "saved", fwd, d->saved, d->saved_bytes, plan->saved_bytes);
    if (s == GMM_OK && !fwd)
        s = gmm__mlp_buffer(call, "deferred", 1, d->deferred, d->deferred_bytes, plan->deferred_bytes);
    return s != GMM_OK ? s : gmm__mlp_cache_buffer(call, fwd, plan->weight_cache_bytes);
}
/* Checks that the queue takes the weight gradients of a backward that delays them. */
static gmm_status gmm__mlp_check_append(gmm__call *call) {
    const gmm_wgrad_queue *q = call->d.mlp.queue;
    gmm_status s;
    if (!gmm__mlp_gradients_of(call).defer) return GMM_OK;
    if ((s = gmm__mlp_check_queue(call, q)) != GMM_OK) return s;
    if (q->count < q->capacity) return GMM_OK;
    return gmm__refuse(call, GMM_E_STATE, "queue", "is full with %d of %d entries", q->count, q->capacity);
}

/* gmm__serve of a call whose plan gmm__select has made (core/engines.h). */
static gmm_status gmm__serve_plan(gmm__call *call, gmm__plan *plan, void *workspace, size_t workspace_bytes,
                                  gmm_stream stream);

GMMDEF gmm_status gmm_mlp_fwd(gmm_context *ctx, const gmm_mlp *mlp, void *workspace, size_t workspace_bytes,
                              gmm_stream stream) {
    gmm__call call;
    gmm__plan plan;
    gmm_status s = gmm__mlp_prepare(&call, ctx, GMM_OP_MLP_FWD, "gmm_mlp_fwd", mlp, GMM__MLP_LAUNCH);
    if (s != GMM_OK || (s = gmm__select(&call, &plan)) != GMM_OK ||
        (s = gmm__mlp_check_buffers(&call, &plan)) != GMM_OK)
        return s;
    return gmm__serve_plan(&call, &plan, workspace, workspace_bytes, stream);
}

GMMDEF gmm_status gmm_mlp_bwd(gmm_context *ctx, const gmm_mlp *mlp, void *workspace, size_t workspace_bytes,
                              gmm_stream stream) {
    gmm__call call;
    gmm__plan plan;
    gmm_status s = gmm__mlp_prepare(&call, ctx, GMM_OP_MLP_BWD, "gmm_mlp_bwd", mlp, GMM__MLP_LAUNCH);
    if (s != GMM_OK || (s = gmm__select(&call, &plan)) != GMM_OK ||
        (s = gmm__mlp_check_buffers(&call, &plan)) != GMM_OK || (s = gmm__mlp_check_append(&call)) != GMM_OK)
        return s;
    return gmm__serve_plan(&call, &plan, workspace, workspace_bytes, stream);
}

/* Reads an operand of a queued weight gradient: floats, or a quantized copy. */
static gmm_status gmm__mlp_read_queued(gmm__call *call, int role, const char *name, const gmm_mat *m, int64_t rows,
                                       int64_t cols) {
    const gmm__extents extents = gmm__matrix(rows, cols);
    return m->scaling == GMM_SCALING_NONE
               ? gmm__read_mat(call, role, name, m, 1, extents, GMM__FLOATS)
               : gmm__read_quant(call, role, name, m, extents, gmm__mlp_backward_direction(call));
}

/* Records the memory of both weight gradients of a record for the overlap check, which thus finds an overlap before the
   first gradient is computed. */
static gmm_status gmm__mlp_read_record(gmm__call *call, gmm__wgrad_record *r) {
    static const char *const names[2] = { "dw2", "dw1" };
    const int roles[2] = { GMM__DW2, GMM__DW };
    gmm__mlp_queued *q = &r->operands;
    gmm_status s;
    int i;
    gmm__add_span(call, "groups.splits", "", 0, r->groups.splits, (r->groups.count + (int64_t)1) * 8);
    gmm__add_span(call, "groups.fault", "", 1, r->groups.fault, (int64_t)sizeof *r->groups.fault);
    for (i = 0; i < 2; i++) {
        if (!r->pending[i]) continue;
        r->grad[i].mat = &r->dw[i];
        if ((s = gmm__check_indices(call, q->x_index[i], q->dy_index[i], q->index_rows, &q->index_div)) != GMM_OK ||
            (s = gmm__mlp_read_queued(call, GMM__X_, "x", &q->x[i], q->x_index[i] ? q->index_rows : call->rows,
                                      q->in[i])) != GMM_OK ||
            (s = gmm__mlp_read_queued(call, GMM__DY, "dy", &q->dy[i], q->dy_index[i] ? q->index_rows : call->rows,
                                      q->out[i])) != GMM_OK ||
            (s = gmm__check_index_arrays(call, q->x_index[i], q->dy_index[i])) != GMM_OK ||
            (s = gmm__read_grad(call, roles[i], names[i], &r->grad[i], 1, q->out[i], q->in[i])) != GMM_OK)
            return s;
    }
    return GMM_OK;
}

GMMDEF gmm_status gmm_mlp_wgrad(gmm_context *ctx, gmm_wgrad_queue *queue, void *workspace, size_t workspace_bytes,
                                gmm_stream stream) {
    gmm__call call;
    gmm__wgrad_record record;
    gmm_status s = gmm__open(&call, ctx, GMM_OP_MLP_WGRAD, "gmm_mlp_wgrad", 0);
    if (s != GMM_OK || (s = gmm__mlp_check_queue(&call, queue)) != GMM_OK) return s;
    if (queue->count < 1)
        return gmm__refuse(&call, GMM_E_STATE, "queue", "is empty (%d of %d entries)", queue->count,
                           queue->capacity);
    memcpy(&record, &queue->entries[queue->head], sizeof record);
    if (record.tag != GMM__WGRAD_TAG)
        return gmm__refuse(&call, GMM_E_STATE, "queue.entries", "[%d] holds nothing that gmm_mlp_bwd recorded, yet is "
                           "the first of %d", queue->head, queue->count);
    call.options = record.options;
    call.groups = record.groups;
    call.recipe = record.recipe;
    call.quant = record.quant;
    call.rows = record.groups.capacity;
    call.input = call.output = &record;
    (void)snprintf(call.shapes, sizeof call.shapes, "G=%d T=%lld", record.groups.count, (long long)call.rows);
    if ((s = gmm__mlp_read_record(&call, &record)) != GMM_OK) return s;
    if ((s = gmm__serve(&call, NULL, workspace, workspace_bytes, stream)) != GMM_OK) {
        memcpy(&queue->entries[queue->head], &record, sizeof record);
        return s;
    }
    memset(&queue->entries[queue->head], 0, sizeof queue->entries[queue->head]);
    queue->head = (queue->head + 1) % queue->capacity;
    queue->count--;
    return GMM_OK;
}

/* Calls the `ready` hooks of backward, or of queued weight gradients. */
static void gmm__mlp_fire(const gmm__call *call, gmm_op op, gmm_stream stream) {
    const gmm_mlp *d = &call->d.mlp;
    const int bwd = op == GMM_OP_MLP_BWD, weights_complete = bwd != gmm__mlp_delayed(call);
    if (weights_complete && d->dw2) gmm__mlp_call_hook(call->ctx, d->hooks, GMM_PARAM_W2, stream);
    if (bwd && d->db2) gmm__mlp_call_hook(call->ctx, d->hooks, GMM_PARAM_B2, stream);
    if (weights_complete && d->dw1) gmm__mlp_call_hook(call->ctx, d->hooks, GMM_PARAM_W1, stream);
    if (bwd && d->db1) gmm__mlp_call_hook(call->ctx, d->hooks, GMM_PARAM_B1, stream);
}

GMMDEF gmm_status gmm_mlp_fire_hooks(gmm_context *ctx, gmm_op op, const gmm_mlp *mlp, gmm_stream stream) {
    gmm__call call;
    const gmm_status s = gmm__mlp_prepare(&call, ctx, op, "gmm_mlp_fire_hooks", mlp, GMM__MLP_QUERY);
    if (s != GMM_OK) return s;
    if (op == GMM_OP_MLP_FWD) return gmm__refuse(&call, GMM_E_ARG, "op", "%s fires no hooks", gmm_op_name(op));
    gmm__mlp_fire(&call, op, stream);
    return GMM_OK;
}
/* ................................................................................................. 14.7 Routing ... */

/* CPU engine: top-k routing, forward and backward, with its losses; dense routings; the update of expert biases; also
   the heap that sorts candidates. */

static float gmm__row_dot(const float *a, const float *b, int64_t n) {
    float lane[GMM__LANES];
    memset(lane, 0, sizeof lane);
    gmm__lanes_add(lane, a, b, n);
    return gmm__lanes_sum(lane);
}
static float gmm__row_sum(const float *a, int64_t n) { return gmm__row_dot(a, NULL, n); }

/* Natural logarithm of a normal positive number, within 2 ulp, without libm: x = 2^e (1 + f) with 1 + f between
   sqrt(1/2) and sqrt(2), and log(1 + f) = 2 atanh(f / (2 + f)). */
GMM__HD float gmm__ln(float x) {
    const uint32_t bits = gmm_f32_bits(x);
    const int32_t e = (int32_t)((bits - 0x3F3504F3u) >> 23), exponent = e > 255 ? e - 512 : e;
    const float f = gmm_f32_from_bits(bits - ((uint32_t)exponent << 23)) - 1.0f;
    const float s = f / (2.0f + f), z = s * s;
    const float series = z * (0.333333333f + z * (0.2f + z * (0.142857143f + z * 0.111111111f)));
    if (!(x < 3.4e38f)) return x; /* infinity, NaN */
    return (float)exponent * 0.693359375f + (2.0f * (s + s * series) - (float)exponent * 2.12194440e-4f);
}

/* Softmax of a row into s; returns its logsumexp. */
static float gmm__softmax(const float *logits, float *s, int64_t n) {
    float largest = logits[0], sum;
    int64_t i;
    for (i = 1; i < n; i++) largest = logits[i] > largest || largest != largest ? logits[i] : largest;
    for (i = 0; i < n; i++) s[i] = gmm_exp(logits[i] - largest);
    sum = gmm__row_sum(s, n);
    for (i = 0; i < n; i++) s[i] /= sum;
    return largest + gmm__ln(sum);
}

/* A candidate as an integer that is larger for a better candidate: the value in the high half (NaN is the lowest),
   ~expert in the low half, so that of equal values the lower index is better. */
static uint64_t gmm__candidate(float value, int64_t expert) {
    const uint32_t u = gmm_f32_bits(value);
    const uint32_t order = value != value ? 0u : u & 0x80000000u ? ~u : u | 0x80000000u;
    return (uint64_t)order << 32 | (uint64_t)~(uint32_t)expert;
}
static int32_t gmm__candidate_expert(uint64_t candidate) { return (int32_t)~(uint32_t)candidate; }

/* Restores a min-heap after element i was increased. */
static void gmm__heap_sift_down(uint64_t *heap, int64_t count, int64_t i) {
    const uint64_t key = heap[i];
    int64_t child;
    while ((child = 2 * i + 1) < count) {
        if (child + 1 < count && heap[child + 1] < heap[child]) child++;
        if (heap[child] >= key) break;
        heap[i] = heap[child];
        i = child;
    }
    heap[i] = key;
}

/* Sorts a min-heap into descending order. */
static void gmm__heap_sort(uint64_t *heap, int64_t count) {
    int64_t i;
    for (i = count - 1; i > 0; i--) {
        const uint64_t least = heap[0];
        heap[0] = heap[i];
        heap[i] = least;
        gmm__heap_sift_down(heap, i, 0);
    }
}

/* The experts [first, last) join the k best candidates so far, of which there are `count`; they are a min-heap once
   there are k. Returns the new count. */
static int64_t gmm__topk_add(const float *value, int64_t first, int64_t last, uint64_t *best, int64_t count,
                             int64_t k) {
    int64_t e, i;
    for (e = first; e < last; e++) {
        const uint64_t candidate = gmm__candidate(value[e], e);
        if (count < k) {
            best[count++] = candidate;
            for (i = k / 2; count == k && i-- > 0;) gmm__heap_sift_down(best, k, i);
        } else if (candidate > best[0]) {
            best[0] = candidate;
            gmm__heap_sift_down(best, k, 0);
        }
    }
    return count;
}

/* The group_topk groups with the largest sums of their group_sum largest values, as candidates in descending order. */
static void gmm__topk_groups(const gmm_route *r, const float *value, uint64_t *best, uint64_t *groups) {
    const int64_t members = r->experts / r->groups;
    float *sums = (float *)(void *)(groups + r->group_topk);
    int64_t g, i;
    for (g = 0; g < r->groups; g++) {
        (void)gmm__topk_add(value, g * members, (g + 1) * members, best, 0, r->group_sum);
        gmm__heap_sort(best, r->group_sum);
        sums[g] = 0.0f;
        for (i = 0; i < r->group_sum; i++) sums[g] += value[gmm__candidate_expert(best[i])];
    }
    (void)gmm__topk_add(sums, 0, r->groups, groups, 0, r->group_topk);
    gmm__heap_sort(groups, r->group_topk);
}

/* The k experts with the largest values, in descending order. */
static void gmm__topk_choose(const gmm_route *r, const float *value, uint64_t *best, uint64_t *groups) {
    const int64_t members = r->groups > 1 ? r->experts / r->groups : r->experts;
    int64_t count = 0, i;
    if (r->groups > 1) gmm__topk_groups(r, value, best, groups);
    for (i = 0; i < (r->groups > 1 ? r->group_topk : 1); i++) {
        const int64_t first = r->groups > 1 ? gmm__candidate_expert(groups[i]) * members : 0;
        count = gmm__topk_add(value, first, first + members, best, count, r->topk);
    }
    gmm__heap_sort(best, r->topk);
}

/* Tokens are divided into chunks by T and the sequences alone; a chunk has tokens of one sequence. Each chunk has its
   own counts and sums, which are added in the order of the chunks, so that losses do not depend on the number of
   threads. */
static int64_t gmm__topk_chunk(int64_t tokens) {
    const int64_t chunk = gmm__ceil_div(tokens, 256);
    return chunk < 16 ? 16 : chunk;
}
typedef struct gmm__topk_range {
    int64_t sequence, begin, end; /* the tokens [begin, end) of a sequence */
} gmm__topk_range;
static int64_t gmm__topk_chunks_per_sequence(const gmm_route *r) {
    return gmm__ceil_div(r->tokens / r->sequences, gmm__topk_chunk(r->tokens));
}
static int64_t gmm__topk_chunks(const gmm_route *r) { return r->sequences * gmm__topk_chunks_per_sequence(r); }
static gmm__topk_range gmm__topk_range_of(const gmm_route *r, int64_t c) {
    const int64_t per_sequence = gmm__topk_chunks_per_sequence(r), chunk = gmm__topk_chunk(r->tokens);
    const int64_t length = r->tokens / r->sequences;
    gmm__topk_range range;
    range.sequence = c / per_sequence;
    range.begin = c % per_sequence * chunk;
    range.end = range.begin + chunk < length ? range.begin + chunk : length;
    return range;
}
/* Token i of a sequence. */
static int64_t gmm__topk_token(const gmm_route *r, int64_t sequence, int64_t i) {
    return r->sequence_first ? i * r->sequences + sequence : sequence * (r->tokens / r->sequences) + i;
}

enum { /* regions of the workspace */
    GMM__TOPK_SCRATCH, GMM__TOPK_COUNTS, GMM__TOPK_SUMS, GMM__TOPK_Z,
    GMM__TOPK_VALID,   /* [sequences + 1] int64: tokens that are no padding, of each sequence and of all */
    GMM__TOPK_MULTIPLIERS, /* [E] float: Sinkhorn's multipliers of experts */
    GMM__TOPK_TOTAL    /* [E] int32: counts */
};

/* The buffers of one thread, each for one token. softmax is score itself where that is a softmax. */
typedef struct gmm__topk_rows {
    float *logits, *score, *softmax, *weight;
    uint64_t *best, *groups;
} gmm__topk_rows;

/* An exponential takes about as long as four copies. */
static double gmm__topk_work(const gmm_route *r) { return 4.0 * (double)r->tokens * (double)r->experts; }
static size_t gmm__topk_row_bytes(const gmm_route *r) { return (size_t)gmm__round_up(r->experts, 16) * sizeof(float); }
/* `best` holds topk or group_sum candidates; behind it are candidates and sums of groups. */
static int64_t gmm__topk_candidates(const gmm_route *r) {
    return gmm__round_up(r->topk > r->group_sum ? r->topk : r->group_sum, 8);
}
static size_t gmm__topk_thread_bytes(const gmm_route *r) {
    const int64_t groups = r->groups > 1 ? gmm__round_up(r->group_topk + r->groups, 8) : 0;
    return 4 * gmm__topk_row_bytes(r) + (size_t)(gmm__topk_candidates(r) + groups) * sizeof(uint64_t);
}

/* Bytes of the buffers of all threads of a call. */
static size_t gmm__topk_scratch(const gmm__call *call) {
    const gmm_route *r = &call->d.route;
    return (size_t)gmm__cpu_threads(call->ctx, gmm__topk_chunks(r), gmm__topk_work(r)) * gmm__topk_thread_bytes(r);
}

/* A thread's buffers, with the logits of token t in fp32. */
static void gmm__topk_load(const gmm__plan *plan, int64_t t, int32_t thread, gmm__topk_rows *rows) {
    const gmm__call *call = plan->call;
    const gmm_route *r = &call->d.route;
    const gmm_mat *m = &call->mat[GMM__X_];
    const int64_t n = gmm__round_up(r->experts, 16);
    int64_t e;
    rows->logits = (float *)(void *)((char *)gmm__part(plan, GMM__TOPK_SCRATCH) +
                                     (size_t)thread * gmm__topk_thread_bytes(r));
    rows->score = rows->logits + n;
    rows->softmax = r->score == GMM_SCORE_SOFTMAX ? rows->score : rows->logits + 2 * n;
    rows->weight = rows->logits + 3 * n;
    rows->best = (uint64_t *)(void *)(rows->logits + 4 * n);
    rows->groups = rows->best + gmm__topk_candidates(r);
    if (m->dtype == GMM_F64)
        for (e = 0; e < r->experts; e++) rows->logits[e] = (float)((const double *)gmm__at(m, 0, t, 0))[e];
    else gmm__row_load(m->dtype, gmm__at(m, 0, t, 0), rows->logits, r->experts);
}

/* Computes the scores of token t. Returns their logsumexp where a softmax is computed, else 0. */
static float gmm__topk_scores(const gmm__plan *plan, int64_t t, int32_t thread, gmm__topk_rows *rows) {
    const gmm_route *r = &plan->call->d.route;
    float lse = 0.0f;
    int64_t e;
    gmm__topk_load(plan, t, thread, rows);
    if (r->score == GMM_SCORE_SOFTMAX || r->z_coeff != 0.0f)
        lse = gmm__softmax(rows->logits, rows->softmax, r->experts);
    if (r->score == GMM_SCORE_SIGMOID)
        for (e = 0; e < r->experts; e++) rows->score[e] = gmm_sigmoid(rows->logits[e]);
    return lse;
}

/* x[e] = exp(logits[e] - their largest) of Sinkhorn's iteration. */
static void gmm__topk_exponentials(const float *logits, float *x, int64_t n) {
    float largest = logits[0];
    int64_t e;
    for (e = 1; e < n; e++) largest = logits[e] > largest || largest != largest ? logits[e] : largest;
    for (e = 0; e < n; e++) x[e] = gmm_exp(logits[e] - largest);
}
/* The values by which experts are chosen, in rows->weight. */
static void gmm__topk_values(const gmm__plan *plan, gmm__topk_rows *rows) {
    const gmm_route *r = &plan->call->d.route;
    const float *multipliers = (const float *)gmm__part(plan, GMM__TOPK_MULTIPLIERS);
    float *value = rows->weight;
    int64_t e;
    if (r->sinkhorn) {
        gmm__topk_exponentials(rows->logits, value, r->experts);
        for (e = 0; e < r->experts; e++) value[e] *= multipliers[e];
    } else
        for (e = 0; e < r->experts; e++) value[e] = rows->score[e] + (r->expert_bias ? r->expert_bias[e] : 0.0f);
}

/* Divisor of the chosen scores, whose sum is `chosen`. */
static float gmm__topk_divisor(const gmm_route *r, float chosen) {
    return !r->normalize ? 1.0f : r->score == GMM_SCORE_SIGMOID ? chosen + 1e-20f : chosen;
}
/* part / sum; 0 where the sum of all scores underflows to 0. */
static float gmm__quotient(float part, float sum) { return sum == 0.0f ? 0.0f : part / sum; }

/* Counts the tokens that are no padding. */
static void gmm__topk_count_valid(const gmm__plan *plan) {
    const gmm_route *r = &plan->call->d.route;
    int64_t *valid = (int64_t *)gmm__part(plan, GMM__TOPK_VALID), b, i;
    valid[r->sequences] = 0;
    for (b = 0; b < r->sequences; b++) {
        valid[b] = r->padding ? 0 : r->tokens / r->sequences;
        for (i = 0; r->padding && i < r->tokens / r->sequences; i++)
            valid[b] += !r->padding[gmm__topk_token(r, b, i)];
        valid[r->sequences] += valid[b];
    }
}
/* What a sequence's sum of count times score contributes to aux_loss, and what a squared logsumexp does to z_loss. */
static double gmm__topk_aux_factor(const gmm__plan *plan, int64_t sequence) {
    const gmm_route *r = &plan->call->d.route;
    const double n = (double)((const int64_t *)gmm__part(plan, GMM__TOPK_VALID))[sequence];
    return n == 0.0 ? 0.0 : r->aux_coeff * (double)r->experts / (r->topk * n * n) / r->sequences;
}
static double gmm__topk_z_factor(const gmm__plan *plan) {
    const gmm_route *r = &plan->call->d.route;
    const double n = (double)((const int64_t *)gmm__part(plan, GMM__TOPK_VALID))[r->sequences];
    return n == 0.0 ? 0.0 : r->z_coeff / n;
}

/* Adds up the columns of one iteration over the tokens of a chunk. */
static void gmm__sinkhorn_chunk(const void *arg, int64_t c, int32_t thread) {
    const gmm__plan *plan = (const gmm__plan *)arg;
    const gmm_route *r = &plan->call->d.route;
    const gmm__topk_range range = gmm__topk_range_of(r, c);
    const float inverse_rows = 1.0f / (float)((const int64_t *)gmm__part(plan, GMM__TOPK_VALID))[r->sequences];
    const float *multipliers = (const float *)gmm__part(plan, GMM__TOPK_MULTIPLIERS);
    float *sums = (float *)gmm__part(plan, GMM__TOPK_SUMS) + c * r->experts;
    int64_t i, e;
    memset(sums, 0, (size_t)r->experts * sizeof *sums);
    for (i = range.begin; i < range.end; i++) {
        const int64_t t = gmm__topk_token(r, range.sequence, i);
        gmm__topk_rows rows;
        float sum, multiplier;
        if (r->padding && r->padding[t]) continue;
        gmm__topk_load(plan, t, thread, &rows);
        gmm__topk_exponentials(rows.logits, rows.weight, r->experts);
        sum = gmm__row_dot(rows.weight, multipliers, r->experts);
        if (sum != sum) continue;
        multiplier = inverse_rows / (sum + 1e-8f);
        for (e = 0; e < r->experts; e++) sums[e] += multiplier * rows.weight[e];
    }
}
static void gmm__sinkhorn(const gmm__plan *plan) {
    const gmm_route *r = &plan->call->d.route;
    const float *sums = (const float *)gmm__part(plan, GMM__TOPK_SUMS);
    float *multipliers = (float *)gmm__part(plan, GMM__TOPK_MULTIPLIERS);
    const int64_t chunks = gmm__topk_chunks(r);
    float change = 2.0f * r->sinkhorn_tolerance;
    int64_t c, e;
    int32_t i;
    for (e = 0; e < r->experts; e++) multipliers[e] = 1.0f;
    for (i = 0; i < r->sinkhorn && change > r->sinkhorn_tolerance; i++) {
        double changes = 0.0;
        gmm__cpu_for(plan->call->ctx, chunks, gmm__topk_work(r), gmm__sinkhorn_chunk, plan);
        for (e = 0; e < r->experts; e++) {
            const float last = multipliers[e];
            double sum = 0.0;
            for (c = 0; c < chunks; c++) sum += sums[c * r->experts + e];
            multipliers[e] = 1.0f / (float)r->experts / ((float)sum + 1e-8f);
            changes += last > multipliers[e] ? last - multipliers[e] : multipliers[e] - last;
        }
        change = (float)(changes / r->experts);
    }
}

static void gmm__topk_fwd_chunk(const void *arg, int64_t c, int32_t thread) {
    const gmm__plan *plan = (const gmm__plan *)arg;
    const gmm_route *r = &plan->call->d.route;
    const gmm__topk_range range = gmm__topk_range_of(r, c);
    int32_t *counts = (int32_t *)gmm__part(plan, GMM__TOPK_COUNTS) + c * r->experts;
    float *score_sums = r->aux_coeff != 0.0f ? (float *)gmm__part(plan, GMM__TOPK_SUMS) + c * r->experts : NULL;
    float z = 0.0f;
    int64_t n, e;
    int32_t i;
    memset(counts, 0, (size_t)r->experts * sizeof *counts);
    if (score_sums) memset(score_sums, 0, (size_t)r->experts * sizeof *score_sums);
    for (n = range.begin; n < range.end; n++) {
        const int64_t t = gmm__topk_token(r, range.sequence, n);
        gmm__topk_rows rows;
        float *probs = r->probs + t * r->topk, chosen = 0.0f, divisor, lse;
        int32_t *indices = r->indices + t * r->topk;
        if (r->padding && r->padding[t]) {
            for (i = 0; i < r->topk; i++) indices[i] = -1;
            memset(probs, 0, (size_t)r->topk * sizeof *probs);
            continue;
        }
        lse = gmm__topk_scores(plan, t, thread, &rows);
        gmm__topk_values(plan, &rows);
        gmm__topk_choose(r, rows.weight, rows.best, rows.groups);
        for (i = 0; i < r->topk; i++) {
            indices[i] = gmm__candidate_expert(rows.best[i]);
            probs[i] = rows.score[indices[i]];
            chosen += probs[i];
            counts[indices[i]]++;
        }
        divisor = gmm__topk_divisor(r, chosen);
        for (i = 0; i < r->topk; i++) probs[i] = r->scale * gmm__quotient(probs[i], divisor);
        if (score_sums) {
            const float all = r->score == GMM_SCORE_SIGMOID ? gmm__row_sum(rows.score, r->experts) : 1.0f;
            for (e = 0; e < r->experts; e++) score_sums[e] += gmm__quotient(rows.score[e], all);
        }
        z += lse * lse;
    }
    ((float *)gmm__part(plan, GMM__TOPK_Z))[c] = z;
}

static int gmm__cpu_plan_topk_fwd(const gmm__call *call, gmm__plan *plan) {
    const gmm_route *r = &call->d.route;
    const size_t chunks = (size_t)gmm__topk_chunks(r), sums = r->aux_coeff != 0.0f || r->sinkhorn;
    gmm__reserve(plan, GMM__TOPK_SCRATCH, gmm__topk_scratch(call));
    gmm__reserve(plan, GMM__TOPK_COUNTS, chunks * (size_t)r->experts * sizeof(int32_t));
    gmm__reserve(plan, GMM__TOPK_SUMS, sums * chunks * (size_t)r->experts * sizeof(float));
    gmm__reserve(plan, GMM__TOPK_Z, chunks * sizeof(float));
    gmm__reserve(plan, GMM__TOPK_VALID, ((size_t)r->sequences + 1) * sizeof(int64_t));
    gmm__reserve(plan, GMM__TOPK_MULTIPLIERS, r->sinkhorn ? gmm__topk_row_bytes(r) : 0);
    gmm__reserve(plan, GMM__TOPK_TOTAL, (size_t)r->experts * sizeof(int32_t));
    return 1;
}

/* Counts of a sequence, which are added to those of the batch in `total`, and its auxiliary loss. */
static double gmm__topk_finish_sequence(const gmm__plan *plan, int64_t sequence, int32_t *total) {
    const gmm_route *r = &plan->call->d.route;
    const int32_t *counts = (const int32_t *)gmm__part(plan, GMM__TOPK_COUNTS);
    const float *score_sums = (const float *)gmm__part(plan, GMM__TOPK_SUMS);
    const int64_t per_sequence = gmm__topk_chunks_per_sequence(r), first = sequence * per_sequence;
    double aux = 0.0;
    int64_t c, e;
    for (e = 0; e < r->experts; e++) {
        int32_t count = 0;
        double sum = 0.0;
        for (c = first; c < first + per_sequence; c++) {
            count += counts[c * r->experts + e];
            if (r->aux_coeff != 0.0f) sum += score_sums[c * r->experts + e];
        }
        aux += count * sum;
        if (r->sequence_counts) r->sequence_counts[sequence * r->experts + e] = count;
        total[e] += count;
    }
    return aux;
}

static gmm_status gmm__cpu_launch_topk_fwd(const gmm__plan *plan, gmm_stream stream) {
    const gmm_route *r = &plan->call->d.route;
    const int64_t chunks = gmm__topk_chunks(r);
    int32_t *total = r->counts ? r->counts : (int32_t *)gmm__part(plan, GMM__TOPK_TOTAL), first = 0;
    double aux = 0.0, z = 0.0;
    int64_t c, b, e;
    (void)stream;
    gmm__topk_count_valid(plan);
    if (r->sinkhorn) gmm__sinkhorn(plan);
    gmm__cpu_for(plan->call->ctx, chunks, gmm__topk_work(r), gmm__topk_fwd_chunk, plan);
    memset(total, 0, (size_t)r->experts * sizeof *total);
    for (b = 0; b < r->sequences; b++)
        aux += gmm__topk_aux_factor(plan, b) * gmm__topk_finish_sequence(plan, b, total);
    for (e = 0; e < r->experts; e++) {
        if (r->offsets) r->offsets[e] = first;
        if (r->total_counts) r->total_counts[e] += total[e];
        first += total[e];
    }
    if (r->offsets) r->offsets[r->experts] = first;
    for (c = 0; c < chunks; c++) z += ((const float *)gmm__part(plan, GMM__TOPK_Z))[c];
    if (r->aux_loss) *r->aux_loss = (float)aux;
    if (r->z_loss) *r->z_loss = (float)(gmm__topk_z_factor(plan) * z);
    return GMM_OK;
}

/* Stores the gradient of token t's logits. */
static void gmm__topk_store(const gmm__call *call, int64_t t, const float *w) {
    const gmm_mat *m = &call->mat[GMM__DX];
    const int64_t experts = call->d.route.experts;
    int64_t e;
    if (m->dtype == GMM_F64)
        for (e = 0; e < experts; e++) ((double *)gmm__at(m, 0, t, 0))[e] = w[e];
    else gmm__row_store(m->dtype, gmm__at(m, 0, t, 0), w, experts);
}

/* Computes w[e] = score[e] * (gradient of score[e]) rather than the gradient itself: it contains scores only as
   quotients score / sum, which do not overflow where scores are small. */
static void gmm__topk_bwd_chunk(const void *arg, int64_t c, int32_t thread) {
    const gmm__plan *plan = (const gmm__plan *)arg;
    const gmm_route *r = &plan->call->d.route;
    const gmm__topk_range range = gmm__topk_range_of(r, c);
    /* Without the auxiliary loss sequence_counts may be NULL. */
    const int32_t *counts = r->aux_coeff == 0.0f ? NULL :
                            r->sequences > 1 ? r->sequence_counts + range.sequence * r->experts : r->counts;
    const float daux = (float)(gmm__topk_aux_factor(plan, range.sequence) *
                               (r->dloss && r->aux_coeff != 0.0f ? r->dloss[0] : 1.0f));
    const float dz = (float)(2.0 * gmm__topk_z_factor(plan) *
                             (r->dloss && r->z_coeff != 0.0f ? r->dloss[1] : 1.0f));
    int64_t n, e;
    int32_t i;
    for (n = range.begin; n < range.end; n++) {
        const int64_t t = gmm__topk_token(r, range.sequence, n);
        gmm__topk_rows rows;
        const float lse = gmm__topk_scores(plan, t, thread, &rows);
        float *w = rows.weight;
        const float *s = rows.score;
        if (r->padding && r->padding[t]) {
            memset(w, 0, (size_t)r->experts * sizeof *w);
            gmm__topk_store(plan->call, t, w);
            continue;
        }
        memset(w, 0, (size_t)r->experts * sizeof *w);
        if (r->dprobs) {
            const float *g = r->dprobs + t * r->topk;
            const int32_t *indices = r->indices + t * r->topk;
            float chosen = 0.0f, divisor, mean = 0.0f;
            for (i = 0; i < r->topk; i++)
                if (indices[i] >= 0 && indices[i] < r->experts) chosen += s[indices[i]];
            divisor = gmm__topk_divisor(r, chosen);
            for (i = 0; r->normalize && i < r->topk; i++)
                if (indices[i] >= 0 && indices[i] < r->experts) mean += g[i] * gmm__quotient(s[indices[i]], divisor);
            for (i = 0; i < r->topk; i++)
                if (indices[i] >= 0 && indices[i] < r->experts)
                    w[indices[i]] += r->scale * gmm__quotient(s[indices[i]], divisor) * (g[i] - mean);
        }
        if (r->aux_coeff != 0.0f) {
            float all = 1.0f, mean = 0.0f;
            if (r->score == GMM_SCORE_SIGMOID) {
                all = gmm__row_sum(s, r->experts);
                for (e = 0; e < r->experts; e++) mean += daux * (float)counts[e] * gmm__quotient(s[e], all);
            }
            for (e = 0; e < r->experts; e++) w[e] += gmm__quotient(s[e], all) * (daux * (float)counts[e] - mean);
        }
        if (r->score == GMM_SCORE_SOFTMAX) {
            const float sum = gmm__row_sum(w, r->experts);
            for (e = 0; e < r->experts; e++) w[e] -= s[e] * sum;
        } else {
            for (e = 0; e < r->experts; e++) {
                float complement; /* 1 - s */
                (void)gmm_sigmoid_rest(rows.logits[e], &complement);
                w[e] *= complement;
            }
        }
        if (r->z_coeff != 0.0f)
            for (e = 0; e < r->experts; e++) w[e] += dz * lse * rows.softmax[e];
        gmm__topk_store(plan->call, t, w);
    }
}

static int gmm__cpu_plan_topk_bwd(const gmm__call *call, gmm__plan *plan) {
    gmm__reserve(plan, GMM__TOPK_SCRATCH, gmm__topk_scratch(call));
    gmm__reserve(plan, GMM__TOPK_VALID, ((size_t)call->d.route.sequences + 1) * sizeof(int64_t));
    return 1;
}

static gmm_status gmm__cpu_launch_topk_bwd(const gmm__plan *plan, gmm_stream stream) {
    const gmm_route *r = &plan->call->d.route;
    (void)stream;
    gmm__topk_count_valid(plan);
    gmm__cpu_for(plan->call->ctx, gmm__topk_chunks(r), gmm__topk_work(r), gmm__topk_bwd_chunk, plan);
    return GMM_OK;
}

/* --- dense routings, expert bias --- */

enum { GMM__DENSE_CHUNK = 64 }; /* tokens of a task */

static void gmm__dense_chunk(const void *arg, int64_t c, int32_t thread) {
    const gmm__call *call = (const gmm__call *)arg;
    const gmm_dense_route *d = &call->d.dense;
    const int64_t begin = c * GMM__DENSE_CHUNK, last = begin + GMM__DENSE_CHUNK;
    const int64_t E = d->experts, end = last < d->tokens ? last : d->tokens;
    int64_t t, e;
    int32_t i;
    (void)thread;
    for (t = begin; t < end; t++) {
        uint8_t *map = d->map ? d->map + t * E : NULL;
        float *values = d->values ? d->values + t * E : NULL, *probs = d->probs ? d->probs + t * d->topk : NULL;
        int32_t *indices = d->indices + t * d->topk;
        if (call->op == GMM_OP_ROUTE_TO_DENSE) {
            if (map) memset(map, 0, (size_t)E);
            if (values) memset(values, 0, (size_t)E * sizeof *values);
            for (i = 0; i < d->topk; i++) {
                if (indices[i] < 0 || indices[i] >= E) continue;
                if (map) map[indices[i]] = 1;
                if (values) values[indices[i]] += probs[i];
            }
            continue;
        }
        if (map) {
            for (e = 0, i = 0; e < E && i < d->topk; e++)
                if (map[e]) indices[i++] = (int32_t)e;
            for (; i < d->topk; i++) indices[i] = -1;
        }
        for (i = 0; values && i < d->topk; i++)
            probs[i] = indices[i] < 0 || indices[i] >= E ? 0.0f : values[indices[i]];
    }
}
static gmm_status gmm__cpu_launch_dense(const gmm__plan *plan, gmm_stream stream) {
    const gmm_dense_route *d = &plan->call->d.dense;
    int32_t first = 0;
    int64_t i, e;
    (void)stream;
    gmm__cpu_for(plan->call->ctx, gmm__ceil_div(d->tokens, GMM__DENSE_CHUNK), (double)d->tokens * (double)d->experts,
                 gmm__dense_chunk, plan->call);
    if (!d->counts) return GMM_OK;
    memset(d->counts, 0, (size_t)d->experts * sizeof *d->counts);
    for (i = 0; i < d->tokens * d->topk; i++)
        if (d->indices[i] >= 0) d->counts[d->indices[i]]++;
    for (e = 0; d->offsets && e < d->experts; first += d->counts[e++]) d->offsets[e] = first;
    if (d->offsets) d->offsets[d->experts] = first;
    return GMM_OK;
}

static gmm_status gmm__cpu_launch_expert_bias(const gmm__plan *plan, gmm_stream stream) {
    const gmm_expert_bias *d = &plan->call->d.bias;
    int64_t l, e;
    (void)stream;
    for (l = 0; l < d->layers; l++) {
        int64_t *counts = d->total_counts + l * d->experts, sum = 0;
        float *bias = d->bias + l * d->experts;
        for (e = 0; e < d->experts; e++) sum += counts[e];
        for (e = 0; e < d->experts; e++) {
            const int64_t above = counts[e] * d->experts; /* compared with the sum: no mean is rounded */
            bias[e] += above < sum ? d->rate : above > sum ? -d->rate : 0.0f;
            counts[e] = 0;
        }
    }
    return GMM_OK;
}

/* Checks and entry points of gmm_topk_fwd and gmm_topk_bwd. */

/* Checks an array of `count` elements of `bytes` bytes each. */
static gmm_status gmm__check_elements(gmm__call *call, const char *argument, const void *array, int required,
                                      int writes, int64_t count, int64_t bytes) {
    if (call->query) return GMM_OK;
    if (!array && required && count > 0)
        return gmm__refuse(call, GMM_E_NULL, argument, "is NULL for %lld values", (long long)count);
    if ((uintptr_t)array % (uintptr_t)bytes)
        return gmm__refuse(call, GMM_E_ALIGN, argument, "%p is not aligned to %lld bytes", array, (long long)bytes);
    gmm__add_span(call, argument, "", writes, array, count * bytes);
    return GMM_OK;
}

/* Checks experts, tokens and topk, and computes the number of slots. */
static gmm_status gmm__check_slots(const gmm__call *call, int32_t experts, int64_t tokens, int32_t topk,
                                   int64_t *slots) {
    int64_t elements;
    if (experts < 1) return gmm__refuse(call, GMM_E_ARG, "experts", "%d must be >= 1", experts);
    if (tokens < 0) return gmm__refuse(call, GMM_E_ARG, "tokens", "%lld must be >= 0", (long long)tokens);
    if (topk < 1) return gmm__refuse(call, GMM_E_ARG, "topk", "%d must be >= 1", topk);
    if (!gmm__mul(tokens, topk, slots) || *slots > INT32_MAX)
        return gmm__refuse(call, GMM_E_ARG, "tokens", "%lld times topk %d must be < 2^31, counts are int32",
                           (long long)tokens, topk);
    if (!gmm__mul(tokens, experts, &elements) || !gmm__mul(elements, 8, &elements))
        return gmm__refuse(call, GMM_E_OVERFLOW, "tokens", "%lld rows of %d experts do not fit 64 bits",
                           (long long)tokens, experts);
    return GMM_OK;
}

/* Checks the fields of the choice of experts, and sets their defaults. */
static gmm_status gmm__read_choice(const gmm__call *call, gmm_route *r) {
    const int32_t members = r->groups > 1 ? r->experts / r->groups : r->experts;
    if (r->groups < 0 || (r->groups > 1 && r->experts % r->groups))
        return gmm__refuse(call, GMM_E_ARG, "groups", "%d must be 0 or a divisor of the %d experts", r->groups,
                           r->experts);
    if (r->groups <= 1 && (r->group_topk || r->group_sum))
        return gmm__refuse(call, GMM_E_CONFIG, r->group_topk ? "group_topk" : "group_sum", "%d must be 0 with groups "
                           "%d", r->group_topk ? r->group_topk : r->group_sum, r->groups);
    if (r->groups > 1) {
        if (r->group_topk < 1 || r->group_topk > r->groups || (int64_t)r->group_topk * members < r->topk)
            return gmm__refuse(call, GMM_E_ARG, "group_topk", "%d must be 1 to the %d groups, which have %d experts "
                               "each, and topk %d of them are chosen", r->group_topk, r->groups, members, r->topk);
        if (r->group_sum < 0 || r->group_sum > members || (!r->group_sum && r->topk < r->group_topk))
            return gmm__refuse(call, GMM_E_ARG, "group_sum", "%d must be 1 to the %d experts of a group, or 0 for topk "
                               "%d divided by group_topk %d, if that is >= 1", r->group_sum, members, r->topk,
                               r->group_topk);
        if (!r->group_sum) r->group_sum = r->topk / r->group_topk;
    }
    if (r->sinkhorn < 0) return gmm__refuse(call, GMM_E_ARG, "sinkhorn", "%d must be >= 0", r->sinkhorn);
    if (r->sinkhorn && r->expert_bias)
        return gmm__refuse(call, GMM_E_CONFIG, "sinkhorn", "%d excludes expert_bias, which is given", r->sinkhorn);
    if (!gmm__is_finite(r->sinkhorn_tolerance) || r->sinkhorn_tolerance < 0.0f)
        return gmm__refuse(call, GMM_E_ARG, "sinkhorn_tolerance", "%g must be finite and >= 0",
                           (double)r->sinkhorn_tolerance);
    if (r->sinkhorn_tolerance == 0.0f) r->sinkhorn_tolerance = 1e-4f;
    return GMM_OK;
}

/* Checks the fields of sequences and padding. */
static gmm_status gmm__read_sequences(gmm__call *call, gmm_route *r) {
    const int reads = call->op == GMM_OP_TOPK_BWD && r->aux_coeff != 0.0f;
    gmm_status s;
    if (r->sequences == 0) r->sequences = 1;
    if (r->sequences < 0 || r->tokens % r->sequences)
        return gmm__refuse(call, GMM_E_ARG, "sequences", "%d must be 0 or a divisor of the %lld tokens", r->sequences,
                           (long long)r->tokens);
    if (r->sequence_first & ~1)
        return gmm__refuse(call, GMM_E_ARG, "sequence_first", "%d must be 0 or 1", r->sequence_first);
    if (r->reserved) return gmm__refuse(call, GMM_E_ARG, "reserved", "%d must be 0", r->reserved);
    if (r->sequences == 1 && r->sequence_counts)
        return gmm__refuse(call, GMM_E_CONFIG, "sequence_counts", "is given, but sequences %d are those of counts",
                           r->sequences);
    s = gmm__check_elements(call, "padding", r->padding, 0, 0, r->tokens, 1);
    if (s == GMM_OK)
        s = gmm__check_elements(call, "sequence_counts", r->sequence_counts, reads && r->sequences > 1,
                                call->op == GMM_OP_TOPK_FWD, (int64_t)r->sequences * r->experts,
                                (int64_t)sizeof *r->sequence_counts);
    return s;
}

/* Reads the descriptor and operands of a routing call. A slot is one of the topk choices of a token. */
static gmm_status gmm__read_route(gmm__call *call, const gmm_route *route) {
    gmm_route *r = &call->d.route;
    const int bwd = call->op == GMM_OP_TOPK_BWD;
    const uint32_t dtypes = GMM__FLOATS | 1u << GMM_F64;
    int64_t slots = 0;
    gmm_status s = gmm__read_descriptor(call, "route", r, sizeof *r, route);
    if (s != GMM_OK) return s;
    (void)snprintf(call->shapes, sizeof call->shapes, "T=%lld E=%d k=%d %s", (long long)r->tokens, r->experts,
                   r->topk, gmm__peek_dtype(r->logits));
    if ((s = gmm__read_options(call, r->options)) != GMM_OK) return s;
    if (r->experts >= 1 && (r->topk < 1 || r->topk > r->experts))
        return gmm__refuse(call, GMM_E_ARG, "topk", "%d must be 1 to %d", r->topk, r->experts);
    if ((s = gmm__check_slots(call, r->experts, r->tokens, r->topk, &slots)) != GMM_OK) return s;
    if (r->score != GMM_SCORE_SOFTMAX && r->score != GMM_SCORE_SIGMOID)
        return gmm__refuse(call, GMM_E_ARG, "score", "%d is neither softmax (0) nor sigmoid (1)", (int)r->score);
    if (r->normalize & ~1) return gmm__refuse(call, GMM_E_ARG, "normalize", "%d must be 0 or 1", r->normalize);
    if (!gmm__is_finite(r->scale)) return gmm__refuse(call, GMM_E_ARG, "scale", "%g must be finite", (double)r->scale);
    if (!gmm__is_finite(r->aux_coeff))
        return gmm__refuse(call, GMM_E_ARG, "aux_coeff", "%g must be finite", (double)r->aux_coeff);
    if (!gmm__is_finite(r->z_coeff))
        return gmm__refuse(call, GMM_E_ARG, "z_coeff", "%g must be finite", (double)r->z_coeff);
    if (r->scale == 0.0f) r->scale = 1.0f;
    if ((s = gmm__read_choice(call, r)) != GMM_OK || (s = gmm__read_sequences(call, r)) != GMM_OK) return s;
    s = gmm__read_mat(call, GMM__X_, "logits", r->logits, 1, gmm__matrix(r->tokens, r->experts), dtypes);
    if (s != GMM_OK) return s;
    if (bwd) {
        s = gmm__read_mat(call, GMM__DX, "dlogits", r->dlogits, 1, gmm__matrix(r->tokens, r->experts), dtypes);
        if (s != GMM_OK || (s = gmm__check_array(call, "dprobs", r->dprobs, 0, slots)) != GMM_OK ||
            (s = gmm__check_array(call, "indices", r->indices, r->dprobs != NULL, slots)) != GMM_OK ||
            (s = gmm__check_array(call, "counts", r->counts, r->aux_coeff != 0.0f && r->sequences == 1,
                                  r->experts)) != GMM_OK)
            return s;
        return gmm__check_array(call, "dloss", r->dloss, 0, 2);
    }
    if ((s = gmm__check_array(call, "expert_bias", r->expert_bias, 0, r->experts)) != GMM_OK ||
        (s = gmm__check_output(call, "indices", r->indices, 1, slots)) != GMM_OK ||
        (s = gmm__check_output(call, "probs", r->probs, 1, slots)) != GMM_OK ||
        (s = gmm__check_output(call, "counts", r->counts, 0, r->experts)) != GMM_OK ||
        (s = gmm__check_output(call, "offsets", r->offsets, 0, (int64_t)r->experts + 1)) != GMM_OK ||
        (s = gmm__check_elements(call, "total_counts", r->total_counts, 0, 1, r->experts,
                                 (int64_t)sizeof *r->total_counts)) != GMM_OK ||
        (s = gmm__check_output(call, "aux_loss", r->aux_loss, 0, 1)) != GMM_OK)
        return s;
    return gmm__check_output(call, "z_loss", r->z_loss, 0, 1);
}

static gmm_status gmm__topk_prepare(gmm__call *call, gmm_context *ctx, gmm_op op, const char *function,
                                    const gmm_route *route, int query) {
    const gmm_status s = gmm__open(call, ctx, op, function, query);
    if (s != GMM_OK) return s;
    if (op != GMM_OP_TOPK_FWD && op != GMM_OP_TOPK_BWD)
        return gmm__refuse(call, GMM_E_ARG, "op", "%s is neither topk_fwd nor topk_bwd", gmm_op_name(op));
    return gmm__read_route(call, route);
}

GMMDEF gmm_status gmm_topk_query(gmm_context *ctx, gmm_op op, const gmm_route *route, gmm_info *info) {
    gmm__call call;
    const gmm_status s = gmm__topk_prepare(&call, ctx, op, "gmm_topk_query", route, 1);
    return s != GMM_OK ? s : gmm__serve(&call, info, NULL, 0, NULL);
}
GMMDEF gmm_status gmm_topk_fwd(gmm_context *ctx, const gmm_route *route, void *workspace, size_t workspace_bytes,
                               gmm_stream stream) {
    gmm__call call;
    const gmm_status s = gmm__topk_prepare(&call, ctx, GMM_OP_TOPK_FWD, "gmm_topk_fwd", route, 0);
    return s != GMM_OK ? s : gmm__serve(&call, NULL, workspace, workspace_bytes, stream);
}
GMMDEF gmm_status gmm_topk_bwd(gmm_context *ctx, const gmm_route *route, void *workspace, size_t workspace_bytes,
                               gmm_stream stream) {
    gmm__call call;
    const gmm_status s = gmm__topk_prepare(&call, ctx, GMM_OP_TOPK_BWD, "gmm_topk_bwd", route, 0);
    return s != GMM_OK ? s : gmm__serve(&call, NULL, workspace, workspace_bytes, stream);
}

/* --- dense routing, expert bias --- */

static gmm_status gmm__dense_run(gmm_context *ctx, gmm_op op, const char *function, const gmm_dense_route *dense,
                                 gmm_stream stream) {
    gmm__call call;
    gmm_dense_route *d = &call.d.dense;
    const int to = op == GMM_OP_ROUTE_TO_DENSE;
    int64_t slots, elements;
    int reads; /* indices are read */
    gmm_status s = gmm__open(&call, ctx, op, function, 0);
    if (s != GMM_OK || (s = gmm__read_descriptor(&call, "dense", d, sizeof *d, dense)) != GMM_OK) return s;
    (void)snprintf(call.shapes, sizeof call.shapes, "T=%lld E=%d k=%d", (long long)d->tokens, d->experts, d->topk);
    if ((s = gmm__read_options(&call, d->options)) != GMM_OK ||
        (s = gmm__check_slots(&call, d->experts, d->tokens, d->topk, &slots)) != GMM_OK)
        return s;
    elements = d->tokens * d->experts;
    reads = to || !d->map;
    if (d->reserved) return gmm__refuse(&call, GMM_E_ARG, "reserved", "%d must be 0", d->reserved);
    if (!d->values != !d->probs)
        return gmm__refuse(&call, GMM_E_CONFIG, d->values ? "values" : "probs", "is given without %s",
                           d->values ? "probs" : "values");
    if (reads && (d->counts || d->offsets))
        return gmm__refuse(&call, GMM_E_CONFIG, d->counts ? "counts" : "offsets", "is given, but no map to count in");
    if (d->offsets && !d->counts) return gmm__refuse(&call, GMM_E_CONFIG, "offsets", "is given without counts");
    if ((s = gmm__check_elements(&call, "map", d->map, 0, to, elements, 1)) != GMM_OK ||
        (s = gmm__check_elements(&call, "values", d->values, 0, to, elements, 4)) != GMM_OK ||
        (s = gmm__check_elements(&call, "indices", d->indices, 1, !reads, slots, 4)) != GMM_OK ||
        (s = gmm__check_elements(&call, "probs", d->probs, 0, !to, slots, 4)) != GMM_OK ||
        (s = gmm__check_output(&call, "counts", d->counts, 0, d->experts)) != GMM_OK ||
        (s = gmm__check_output(&call, "offsets", d->offsets, 0, (int64_t)d->experts + 1)) != GMM_OK)
        return s;
    return gmm__serve(&call, NULL, NULL, 0, stream);
}
GMMDEF gmm_status gmm_route_to_dense(gmm_context *ctx, const gmm_dense_route *dense, gmm_stream stream) {
    return gmm__dense_run(ctx, GMM_OP_ROUTE_TO_DENSE, "gmm_route_to_dense", dense, stream);
}
GMMDEF gmm_status gmm_route_from_dense(gmm_context *ctx, const gmm_dense_route *dense, gmm_stream stream) {
    return gmm__dense_run(ctx, GMM_OP_ROUTE_FROM_DENSE, "gmm_route_from_dense", dense, stream);
}

GMMDEF gmm_status gmm_update_expert_bias(gmm_context *ctx, const gmm_expert_bias *update, gmm_stream stream) {
    gmm__call call;
    gmm_expert_bias *d = &call.d.bias;
    int64_t elements;
    gmm_status s = gmm__open(&call, ctx, GMM_OP_EXPERT_BIAS, "gmm_update_expert_bias", 0);
    if (s != GMM_OK || (s = gmm__read_descriptor(&call, "update", d, sizeof *d, update)) != GMM_OK ||
        (s = gmm__read_options(&call, d->options)) != GMM_OK)
        return s;
    if (d->layers == 0) d->layers = 1;
    if (d->experts < 1) return gmm__refuse(&call, GMM_E_ARG, "experts", "%d must be >= 1", d->experts);
    if (d->layers < 1) return gmm__refuse(&call, GMM_E_ARG, "layers", "%d must be >= 0", d->layers);
    if (!gmm__is_finite(d->rate) || d->rate < 0.0f)
        return gmm__refuse(&call, GMM_E_ARG, "rate", "%g must be finite and >= 0", (double)d->rate);
    elements = (int64_t)d->layers * d->experts;
    if ((s = gmm__check_elements(&call, "total_counts", d->total_counts, 1, 1, elements, 8)) != GMM_OK ||
        (s = gmm__check_elements(&call, "bias", d->bias, 1, 1, elements, 4)) != GMM_OK)
        return s;
    return gmm__serve(&call, NULL, NULL, 0, stream);
}

/* ...................................................................................... 14.8 Permute, unpermute ... */

/* Operands of the permutation among the roles. */
enum { GMM__OUT = GMM__W, GMM__DOUT = GMM__W2, GMM__ROWS = GMM__Y, GMM__DROWS = GMM__DY };

/* The map is a counting sort of slots by expert. Chunks of slots count their slots per expert in parallel; prefix sums
   over chunks then give the first row of each chunk and expert. */
enum { GMM__MAP_NEXT, GMM__MAP_FAULT };

static double gmm__map_work(const gmm__call *call) { /* a slot takes about as long as 8 copies */
    return 8.0 * (double)call->d.permute.tokens * (double)call->d.permute.topk;
}
static int64_t gmm__map_chunks(const gmm__call *call) { /* one per thread */
    const int64_t slots = call->d.permute.tokens * call->d.permute.topk;
    return slots ? gmm__cpu_threads(call->ctx, slots, gmm__map_work(call)) : 0;
}
static void gmm__map_range(const gmm__call *call, int64_t c, int64_t *begin, int64_t *end) {
    const int64_t slots = call->d.permute.tokens * call->d.permute.topk;
    const int64_t chunk = gmm__ceil_div(slots, gmm__map_chunks(call));
    *begin = c * chunk < slots ? c * chunk : slots;
    *end = *begin + chunk < slots ? *begin + chunk : slots;
}

static void gmm__map_count(const void *arg, int64_t c, int32_t thread) {
    const gmm__plan *plan = (const gmm__plan *)arg;
    const gmm_permute *p = &plan->call->d.permute;
    int64_t *next = (int64_t *)gmm__part(plan, GMM__MAP_NEXT) + c * p->experts, slot, end;
    uint32_t fault = 0;
    (void)thread;
    memset(next, 0, (size_t)p->experts * sizeof *next);
    gmm__map_range(plan->call, c, &slot, &end);
    for (; slot < end; slot++) {
        const int32_t e = p->indices[slot];
        if (e >= 0 && e < p->experts) next[e]++;
        else if (e != -1) fault = (uint32_t)GMM_FAULT_INDEX;
    }
    ((uint32_t *)gmm__part(plan, GMM__MAP_FAULT))[c] = fault;
}

static void gmm__map_assign(const void *arg, int64_t c, int32_t thread) {
    const gmm__plan *plan = (const gmm__plan *)arg;
    const gmm_permute *p = &plan->call->d.permute;
    int64_t *next = (int64_t *)gmm__part(plan, GMM__MAP_NEXT) + c * p->experts, slot, end;
    (void)thread;
    gmm__map_range(plan->call, c, &slot, &end);
    for (; slot < end; slot++) {
        const int32_t e = p->indices[slot];
        int64_t row = e >= 0 && e < p->experts ? next[e]++ : -1;
        if (row >= p->capacity) row = -1;
        if (p->row_of) p->row_of[slot] = (int32_t)row;
        if (p->slot_of && row >= 0) p->slot_of[row] = (int32_t)slot;
    }
}

static int gmm__cpu_plan_permute_map(const gmm__call *call, gmm__plan *plan) {
    const size_t chunks = (size_t)gmm__map_chunks(call), experts = (size_t)call->d.permute.experts;
    gmm__reserve(plan, GMM__MAP_NEXT, chunks * experts * sizeof(int64_t));
    gmm__reserve(plan, GMM__MAP_FAULT, chunks * sizeof(uint32_t));
    return 1;
}

static gmm_status gmm__cpu_launch_permute_map(const gmm__plan *plan, gmm_stream stream) {
    const gmm__call *call = plan->call;
    const gmm_permute *p = &call->d.permute;
    const int64_t chunks = gmm__map_chunks(call);
    int64_t *next = (int64_t *)gmm__part(plan, GMM__MAP_NEXT), begin = 0, c, e;
    uint32_t fault = 0;
    (void)stream;
    gmm__cpu_for(call->ctx, chunks, gmm__map_work(call), gmm__map_count, plan);
    for (e = 0; e < p->experts; e++) {
        int64_t row = begin, end;
        for (c = 0; c < chunks; c++) {
            const int64_t count = next[c * p->experts + e];
            next[c * p->experts + e] = row;
            row += count;
        }
        end = gmm_split_end(begin, gmm__round_up(row - begin, p->align), GMM_SPLIT_SIZES, p->capacity, 0, &fault);
        if (p->sizes) p->sizes[e] = (int32_t)(end - begin);
        begin = end;
    }
    for (c = 0; c < chunks; c++) fault |= ((const uint32_t *)gmm__part(plan, GMM__MAP_FAULT))[c];
    if (p->slot_of) memset(p->slot_of, 0xFF, (size_t)p->capacity * sizeof *p->slot_of); /* -1 */
    gmm__cpu_for(call->ctx, chunks, gmm__map_work(call), gmm__map_assign, plan);
    if (fault && p->fault) *p->fault |= fault;
    return GMM_OK;
}

/* A parallel loop over rows or tokens, in chunks. */
typedef struct gmm__permute_job {
    const gmm__call *call;
    int64_t count, chunk; /* rows or tokens in all, and per task */
} gmm__permute_job;

static gmm_status gmm__permute_for(const gmm__call *call, int64_t count, gmm__task task) {
    gmm__permute_job job;
    job.call = call;
    job.count = count;
    job.chunk = 1 + 16384 / call->d.permute.hidden;
    gmm__cpu_for(call->ctx, gmm__ceil_div(count, job.chunk), (double)count * (double)call->d.permute.hidden, task,
                 &job);
    return GMM_OK;
}
static int64_t gmm__permute_range(const gmm__permute_job *job, int64_t c, int64_t *begin) {
    *begin = c * job->chunk;
    return *begin + job->chunk < job->count ? *begin + job->chunk : job->count;
}

/* Sets GMM_FAULT_INDEX if an entry of a map is outside of [-1, limit). Such entries are read as -1. */
static void gmm__map_check(const gmm__call *call, const int32_t *map, int64_t count, int64_t limit) {
    uint32_t *fault = call->d.permute.fault;
    int64_t i;
    int invalid = 0;
    if (!fault) return;
    for (i = 0; i < count; i++) invalid |= map[i] < -1 || map[i] >= limit;
    if (invalid) *fault |= (uint32_t)GMM_FAULT_INDEX;
}
static int64_t gmm__map_at(const int32_t *map, int64_t i, int64_t limit) {
    return map[i] >= 0 && map[i] < limit ? map[i] : -1;
}

/* Number of live rows, from sizes; checks their entries of slot_of. */
static int64_t gmm__permute_live(const gmm__call *call) {
    const gmm_permute *p = &call->d.permute;
    const int64_t live = gmm__cpu_offsets(&call->groups, NULL);
    gmm__map_check(call, p->slot_of, live, p->tokens * p->topk);
    return live;
}

/* acc += scale * row */
static void gmm__row_add(gmm_dtype dtype, const void *from, float scale, float *acc, int64_t n) {
    int64_t i;
    if (dtype == GMM_F32)
        for (i = 0; i < n; i++) acc[i] += scale * ((const float *)from)[i];
    else if (dtype == GMM_BF16)
        for (i = 0; i < n; i++) acc[i] += scale * gmm_bf16_to_f32(((const uint16_t *)from)[i]);
    else
        for (i = 0; i < n; i++) acc[i] += scale * gmm_f16_to_f32(((const uint16_t *)from)[i]);
}

/* Columns per step, whose fp32 sums stay in the L1 cache. A multiple of the lanes. */
enum { GMM__PERMUTE_COLUMNS = 512 };
static int64_t gmm__permute_columns(const gmm_permute *p, int64_t col) {
    return p->hidden - col < (int64_t)GMM__PERMUTE_COLUMNS ? p->hidden - col : (int64_t)GMM__PERMUTE_COLUMNS;
}

static void gmm__permute_fwd_rows(const void *arg, int64_t c, int32_t thread) {
    const gmm__permute_job *job = (const gmm__permute_job *)arg;
    const gmm_permute *p = &job->call->d.permute;
    const gmm_mat *x = &job->call->mat[GMM__X_], *rows = &job->call->mat[GMM__ROWS];
    const size_t bytes = (size_t)p->hidden * (size_t)(gmm_dtype_bits(x->dtype) / 8);
    int64_t r, end = gmm__permute_range(job, c, &r);
    (void)thread;
    for (; r < end; r++) {
        const int64_t slot = gmm__map_at(p->slot_of, r, p->tokens * p->topk);
        if (p->rows && slot < 0) memset(gmm__at(rows, 0, r, 0), 0, bytes);
        else if (p->rows) memcpy(gmm__at(rows, 0, r, 0), gmm__at(x, 0, slot / p->topk, 0), bytes);
        if (p->row_probs) p->row_probs[r] = slot < 0 ? 0.0f : p->probs[slot];
    }
}

static gmm_status gmm__cpu_launch_permute_fwd(const gmm__plan *plan, gmm_stream stream) {
    const gmm__call *call = plan->call;
    const gmm_permute *p = &call->d.permute;
    const int64_t live = gmm__permute_live(call);
    int64_t r;
    (void)stream;
    if (p->rows) gmm__cpu_tail(&call->mat[GMM__ROWS], p->tail, live, p->capacity, p->hidden);
    if (p->row_probs && p->tail == GMM_TAIL_ZERO)
        for (r = live; r < p->capacity; r++) p->row_probs[r] = 0.0f;
    return gmm__permute_for(call, live, gmm__permute_fwd_rows);
}

/* dst[t] = sum over the slots of token t of src[row], weighted by probs unless NULL */
static void gmm__permute_sum(const gmm__permute_job *job, int64_t c, const gmm_mat *src, const float *probs,
                             const gmm_mat *dst) {
    const gmm_permute *p = &job->call->d.permute;
    float acc[GMM__PERMUTE_COLUMNS];
    int64_t t, end = gmm__permute_range(job, c, &t), col;
    int32_t i;
    for (; t < end; t++)
        for (col = 0; col < p->hidden; col += GMM__PERMUTE_COLUMNS) {
            const int64_t n = gmm__permute_columns(p, col);
            memset(acc, 0, sizeof acc);
            for (i = 0; i < p->topk; i++) {
                const int64_t slot = t * p->topk + i, row = gmm__map_at(p->row_of, slot, p->capacity);
                if (row >= 0)
                    gmm__row_add(src->dtype, gmm__at(src, 0, row, col), probs ? probs[slot] : 1.0f, acc, n);
            }
            gmm__row_store(dst->dtype, gmm__at(dst, 0, t, col), acc, n);
        }
}

static void gmm__permute_bwd_tokens(const void *arg, int64_t c, int32_t thread) {
    const gmm__permute_job *job = (const gmm__permute_job *)arg;
    const gmm_permute *p = &job->call->d.permute;
    (void)thread;
    if (p->dx) gmm__permute_sum(job, c, &job->call->mat[GMM__DROWS], NULL, &job->call->mat[GMM__DX]);
    if (p->dprobs) {
        int64_t t, end = gmm__permute_range(job, c, &t), slot;
        for (slot = t * p->topk; slot < end * p->topk; slot++) {
            const int64_t row = gmm__map_at(p->row_of, slot, p->capacity);
            p->dprobs[slot] = row < 0 ? 0.0f : p->drow_probs[row];
        }
    }
}

static gmm_status gmm__cpu_launch_permute_bwd(const gmm__plan *plan, gmm_stream stream) {
    const gmm_permute *p = &plan->call->d.permute;
    (void)stream;
    gmm__map_check(plan->call, p->row_of, p->tokens * p->topk, p->capacity);
    return gmm__permute_for(plan->call, p->tokens, gmm__permute_bwd_tokens);
}

static void gmm__unpermute_fwd_tokens(const void *arg, int64_t c, int32_t thread) {
    const gmm__permute_job *job = (const gmm__permute_job *)arg;
    (void)thread;
    gmm__permute_sum(job, c, &job->call->mat[GMM__ROWS], job->call->d.permute.probs, &job->call->mat[GMM__OUT]);
}

static gmm_status gmm__cpu_launch_unpermute_fwd(const gmm__plan *plan, gmm_stream stream) {
    const gmm_permute *p = &plan->call->d.permute;
    (void)stream;
    gmm__map_check(plan->call, p->row_of, p->tokens * p->topk, p->capacity);
    return gmm__permute_for(plan->call, p->tokens, gmm__unpermute_fwd_tokens);
}

/* drows[r] = (probs) dout[token of r] */
static void gmm__unpermute_bwd_rows(const void *arg, int64_t c, int32_t thread) {
    const gmm__permute_job *job = (const gmm__permute_job *)arg;
    const gmm_permute *p = &job->call->d.permute;
    const gmm_mat *dout = &job->call->mat[GMM__DOUT], *drows = &job->call->mat[GMM__DROWS];
    const size_t bytes = (size_t)p->hidden * (size_t)(gmm_dtype_bits(drows->dtype) / 8);
    float acc[GMM__PERMUTE_COLUMNS];
    int64_t r, end = gmm__permute_range(job, c, &r), col, i;
    (void)thread;
    for (; r < end; r++) {
        const int64_t slot = gmm__map_at(p->slot_of, r, p->tokens * p->topk), t = slot / p->topk;
        if (slot < 0) memset(gmm__at(drows, 0, r, 0), 0, bytes);
        else if (!p->probs && dout->dtype == drows->dtype)
            memcpy(gmm__at(drows, 0, r, 0), gmm__at(dout, 0, t, 0), bytes);
        else
            for (col = 0; col < p->hidden; col += GMM__PERMUTE_COLUMNS) {
                const int64_t n = gmm__permute_columns(p, col);
                const float scale = p->probs ? p->probs[slot] : 1.0f;
                gmm__row_load(dout->dtype, gmm__at(dout, 0, t, col), acc, n);
                for (i = 0; i < n; i++) acc[i] *= scale;
                gmm__row_store(drows->dtype, gmm__at(drows, 0, r, col), acc, n);
            }
    }
}

/* dprobs[slot] = dout[token] . rows[row] */
static void gmm__unpermute_bwd_probs(const void *arg, int64_t c, int32_t thread) {
    const gmm__permute_job *job = (const gmm__permute_job *)arg;
    const gmm_permute *p = &job->call->d.permute;
    const gmm_mat *dout = &job->call->mat[GMM__DOUT], *rows = &job->call->mat[GMM__ROWS];
    float a[GMM__PERMUTE_COLUMNS], b[GMM__PERMUTE_COLUMNS], lane[GMM__LANES];
    int64_t t, end = gmm__permute_range(job, c, &t), slot, col;
    (void)thread;
    for (; t < end; t++)
        for (slot = t * p->topk; slot < (t + 1) * p->topk; slot++) {
            const int64_t row = gmm__map_at(p->row_of, slot, p->capacity);
            memset(lane, 0, sizeof lane);
            for (col = 0; row >= 0 && col < p->hidden; col += GMM__PERMUTE_COLUMNS) {
                const int64_t n = gmm__permute_columns(p, col);
                gmm__row_load(dout->dtype, gmm__at(dout, 0, t, col), a, n);
                gmm__row_load(rows->dtype, gmm__at(rows, 0, row, col), b, n);
                gmm__lanes_add(lane, a, b, n);
            }
            p->dprobs[slot] = gmm__lanes_sum(lane);
        }
}

static gmm_status gmm__cpu_launch_unpermute_bwd(const gmm__plan *plan, gmm_stream stream) {
    const gmm__call *call = plan->call;
    const gmm_permute *p = &call->d.permute;
    (void)stream;
    if (p->drows) {
        const int64_t live = gmm__permute_live(call);
        gmm__cpu_tail(&call->mat[GMM__DROWS], p->tail, live, p->capacity, p->hidden);
        (void)gmm__permute_for(call, live, gmm__unpermute_bwd_rows);
    }
    if (p->dprobs) {
        gmm__map_check(call, p->row_of, p->tokens * p->topk, p->capacity);
        (void)gmm__permute_for(call, p->tokens, gmm__unpermute_bwd_probs);
    }
    return GMM_OK;
}

/* Checks and entry points of gmm_permute_map, gmm_permute_fwd, gmm_permute_bwd, gmm_unpermute_fwd and
   gmm_unpermute_bwd. The roles GMM__ROWS, GMM__DROWS, GMM__OUT and GMM__DOUT are defined in cpu/permute.h. */

/* Checks what the five calls have in common, and describes the rows of each expert as a group of call->groups. */
static gmm_status gmm__read_permute(gmm__call *call, const gmm_permute *permute) {
    gmm_permute *p = &call->d.permute;
    int64_t slots;
    gmm_status s = gmm__read_descriptor(call, "permute", p, sizeof *p, permute);
    if (s != GMM_OK) return s;
    (void)snprintf(call->shapes, sizeof call->shapes, "T=%lld E=%d k=%d R=%lld H=%lld", (long long)p->tokens,
                   p->experts, p->topk, (long long)p->capacity, (long long)p->hidden);
    if ((s = gmm__read_options(call, p->options)) != GMM_OK) return s;
    if (p->experts < 1) return gmm__refuse(call, GMM_E_ARG, "experts", "%d must be >= 1", p->experts);
    if (p->tokens < 0) return gmm__refuse(call, GMM_E_ARG, "tokens", "%lld must be >= 0", (long long)p->tokens);
    if (p->topk < 1) return gmm__refuse(call, GMM_E_ARG, "topk", "%d must be >= 1", p->topk);
    if (!gmm__mul(p->tokens, p->topk, &slots) || slots > INT32_MAX)
        return gmm__refuse(call, GMM_E_ARG, "tokens", "%lld times topk %d must be < 2^31", (long long)p->tokens,
                           p->topk);
    if (p->capacity < 0 || p->capacity > INT32_MAX)
        return gmm__refuse(call, GMM_E_ARG, "capacity", "%lld must be >= 0 and < 2^31", (long long)p->capacity);
    if (p->hidden < 1) return gmm__refuse(call, GMM_E_ARG, "hidden", "%lld must be >= 1", (long long)p->hidden);
    if (p->align < 0) return gmm__refuse(call, GMM_E_ARG, "align", "%d must be >= 0", p->align);
    if (p->tail != GMM_TAIL_KEEP && p->tail != GMM_TAIL_ZERO)
        return gmm__refuse(call, GMM_E_ARG, "tail", "%d is neither keep (0) nor zero (1)", (int)p->tail);
    if (p->reserved) return gmm__refuse(call, GMM_E_ARG, "reserved", "%d must be 0", p->reserved);
    if (p->align == 0) p->align = 1;
    call->groups.count = p->experts;
    call->groups.capacity = p->capacity;
    call->groups.splits = p->sizes;
    call->groups.dtype = GMM_I32;
    call->groups.tail = p->tail;
    call->groups.fault = p->fault;
    call->rows = p->capacity;
    return gmm__check_output(call, "fault", p->fault, 0, 1);
}

/* Reads a matrix of `rows` x hidden. */
static gmm_status gmm__permute_mat(gmm__call *call, int role, const char *argument, const gmm_mat *mat, int64_t rows,
                                   uint32_t dtypes) {
    return gmm__read_mat(call, role, argument, mat, 1, gmm__matrix(rows, call->d.permute.hidden), dtypes);
}

/* Refuses an operand that belongs to another of the five operations: the caller has called the wrong one. */
static gmm_status gmm__refuse_foreign_operands(gmm__call *call) {
    enum { FWD = 1, BWD = 2, UNPERMUTE_FWD = 4, UNPERMUTE_BWD = 8 };
    static const gmm_op ops[] = { GMM_OP_PERMUTE_FWD, GMM_OP_PERMUTE_BWD, GMM_OP_UNPERMUTE_FWD, GMM_OP_UNPERMUTE_BWD };
    const gmm_permute *p = &call->d.permute;
    const struct { const char *name; const void *address; int calls; } operands[] = {
        { "x", p->x, FWD }, { "probs", p->probs, FWD | UNPERMUTE_FWD | UNPERMUTE_BWD },
        { "rows", p->rows, FWD | UNPERMUTE_FWD | UNPERMUTE_BWD }, { "row_probs", p->row_probs, FWD },
        { "out", p->out, UNPERMUTE_FWD }, { "dout", p->dout, UNPERMUTE_BWD },
        { "drows", p->drows, BWD | UNPERMUTE_BWD }, { "drow_probs", p->drow_probs, BWD }, { "dx", p->dx, BWD },
        { "dprobs", p->dprobs, BWD | UNPERMUTE_BWD }
    };
    size_t i, k, length;
    int call_bit = 0;
    char calls_text[80];
    for (k = 0; k < sizeof ops / sizeof ops[0]; k++)
        if (ops[k] == call->op) call_bit = 1 << k;
    for (i = 0; i < sizeof operands / sizeof operands[0]; i++) {
        if (!operands[i].address || operands[i].calls & call_bit) continue;
        for (k = length = 0; k < sizeof ops / sizeof ops[0]; k++)
            if (operands[i].calls >> k & 1)
                length += (size_t)snprintf(calls_text + length, sizeof calls_text - length, "%s%s", length ? ", " : "",
                                           gmm_op_name(ops[k]));
        return gmm__refuse(call, GMM_E_CONFIG, operands[i].name, "is set and must be NULL: %s neither reads nor writes "
                           "it, only %s", gmm_op_name(call->op), calls_text);
    }
    return GMM_OK;
}

/* Reads the operands of one of the five calls. An optional output that is given requires its inputs. */
static gmm_status gmm__read_permute_operands(gmm__call *call) {
    const gmm_permute *p = &call->d.permute;
    const int64_t slots = p->tokens * p->topk;
    const uint32_t dtypes = (uint32_t)GMM__FLOATS | 1u << GMM_E4M3 | 1u << GMM_E5M2 | 1u << GMM_U8;
    gmm_status s = GMM_OK;
    switch (call->op) {
    case GMM_OP_PERMUTE_MAP:
        if ((s = gmm__check_array(call, "indices", p->indices, 1, slots)) != GMM_OK ||
            (s = gmm__check_output(call, "row_of", p->row_of, 0, slots)) != GMM_OK ||
            (s = gmm__check_output(call, "slot_of", p->slot_of, 0, p->capacity)) != GMM_OK)
            return s;
        return gmm__check_output(call, "sizes", p->sizes, 0, p->experts);
    case GMM_OP_PERMUTE_FWD:
        if ((p->x || p->rows || !p->row_probs) && /* row_probs may be asked for alone */
            ((s = gmm__permute_mat(call, GMM__X_, "x", p->x, p->tokens, dtypes)) != GMM_OK ||
             (s = gmm__permute_mat(call, GMM__ROWS, "rows", p->rows, p->capacity, dtypes)) != GMM_OK))
            return s;
        if (call->mat[GMM__X_].dtype != call->mat[GMM__ROWS].dtype)
            return gmm__refuse(call, GMM_E_DTYPE, "rows", "dtype %s must be that of permute.x, %s",
                               gmm_dtype_name(call->mat[GMM__ROWS].dtype), gmm_dtype_name(call->mat[GMM__X_].dtype));
        if ((s = gmm__check_array(call, "slot_of", p->slot_of, 1, p->capacity)) != GMM_OK ||
            (s = gmm__check_array(call, "row_of", p->row_of, 0, slots)) != GMM_OK ||
            (s = gmm__check_array(call, "sizes", p->sizes, 1, p->experts)) != GMM_OK ||
            (s = gmm__check_output(call, "row_probs", p->row_probs, 0, p->capacity)) != GMM_OK)
            return s;
        return gmm__check_array(call, "probs", p->probs, p->row_probs != NULL, slots);
    case GMM_OP_PERMUTE_BWD:
        if (!p->dx && !p->dprobs && !call->query)
            return gmm__refuse(call, GMM_E_NULL, "dx", "is NULL, and so is permute.dprobs: nothing is asked for");
        if (p->dx && ((s = gmm__permute_mat(call, GMM__DX, "dx", p->dx, p->tokens, GMM__FLOATS)) != GMM_OK ||
                      (s = gmm__permute_mat(call, GMM__DROWS, "drows", p->drows, p->capacity, GMM__FLOATS)) != GMM_OK))
            return s;
        if ((s = gmm__check_array(call, "row_of", p->row_of, 1, slots)) != GMM_OK ||
            (s = gmm__check_output(call, "dprobs", p->dprobs, 0, slots)) != GMM_OK)
            return s;
        return gmm__check_array(call, "drow_probs", p->drow_probs, p->dprobs != NULL, p->capacity);
    case GMM_OP_UNPERMUTE_FWD:
        if ((s = gmm__permute_mat(call, GMM__ROWS, "rows", p->rows, p->capacity, GMM__FLOATS)) != GMM_OK ||
            (s = gmm__permute_mat(call, GMM__OUT, "out", p->out, p->tokens, GMM__FLOATS)) != GMM_OK ||
            (s = gmm__check_array(call, "row_of", p->row_of, 1, slots)) != GMM_OK)
            return s;
        return gmm__check_array(call, "probs", p->probs, 0, slots);
    case GMM_OP_UNPERMUTE_BWD:
        if (!p->drows && !p->dprobs && !call->query)
            return gmm__refuse(call, GMM_E_NULL, "drows", "is NULL, and so is permute.dprobs: nothing is asked for");
        if ((s = gmm__permute_mat(call, GMM__DOUT, "dout", p->dout, p->tokens, GMM__FLOATS)) != GMM_OK) return s;
        if (p->drows &&
            ((s = gmm__permute_mat(call, GMM__DROWS, "drows", p->drows, p->capacity, GMM__FLOATS)) != GMM_OK ||
             (s = gmm__check_array(call, "slot_of", p->slot_of, 1, p->capacity)) != GMM_OK ||
             (s = gmm__check_array(call, "row_of", p->row_of, 0, slots)) != GMM_OK ||
             (s = gmm__check_array(call, "sizes", p->sizes, 1, p->experts)) != GMM_OK))
            return s;
        if (p->dprobs &&
            ((s = gmm__permute_mat(call, GMM__ROWS, "rows", p->rows, p->capacity, GMM__FLOATS)) != GMM_OK ||
             (s = gmm__check_array(call, "row_of", p->row_of, 1, slots)) != GMM_OK ||
             (s = gmm__check_output(call, "dprobs", p->dprobs, 1, slots)) != GMM_OK))
            return s;
        return gmm__check_array(call, "probs", p->probs, 0, slots);
    default: return gmm__refuse(call, GMM_E_ARG, "op", "%s is no permutation", gmm_op_name(call->op));
    }
}

static gmm_status gmm__permute_prepare(gmm__call *call, gmm_context *ctx, gmm_op op, const char *function,
                                       const gmm_permute *permute, int query) {
    gmm_status s = gmm__open(call, ctx, op, function, query);
    if (s != GMM_OK || (s = gmm__read_permute(call, permute)) != GMM_OK ||
        (s = gmm__read_permute_operands(call)) != GMM_OK || (s = gmm__refuse_foreign_operands(call)) != GMM_OK)
        return s;
    if (query || (op != GMM_OP_PERMUTE_FWD && (op != GMM_OP_UNPERMUTE_BWD || !permute->drows))) return GMM_OK;
    return gmm__check_split(call, "sizes");
}

static gmm_status gmm__permute_run(gmm_context *ctx, gmm_op op, const char *function, const gmm_permute *permute,
                                   void *workspace, size_t workspace_bytes, gmm_stream stream) {
    gmm__call call;
    const gmm_status s = gmm__permute_prepare(&call, ctx, op, function, permute, 0);
    return s != GMM_OK ? s : gmm__serve(&call, NULL, workspace, workspace_bytes, stream);
}

GMMDEF gmm_status gmm_permute_query(gmm_context *ctx, gmm_op op, const gmm_permute *permute, gmm_info *info) {
    gmm__call call;
    const gmm_status s = gmm__permute_prepare(&call, ctx, op, "gmm_permute_query", permute, 1);
    return s != GMM_OK ? s : gmm__serve(&call, info, NULL, 0, NULL);
}

GMMDEF gmm_status gmm_permute_map(gmm_context *ctx, const gmm_permute *permute, void *workspace,
                                  size_t workspace_bytes, gmm_stream stream) {
    return gmm__permute_run(ctx, GMM_OP_PERMUTE_MAP, "gmm_permute_map", permute, workspace, workspace_bytes, stream);
}

GMMDEF gmm_status gmm_permute_fwd(gmm_context *ctx, const gmm_permute *permute, void *workspace,
                                  size_t workspace_bytes, gmm_stream stream) {
    return gmm__permute_run(ctx, GMM_OP_PERMUTE_FWD, "gmm_permute_fwd", permute, workspace, workspace_bytes, stream);
}

GMMDEF gmm_status gmm_permute_bwd(gmm_context *ctx, const gmm_permute *permute, void *workspace,
                                  size_t workspace_bytes, gmm_stream stream) {
    return gmm__permute_run(ctx, GMM_OP_PERMUTE_BWD, "gmm_permute_bwd", permute, workspace, workspace_bytes, stream);
}

GMMDEF gmm_status gmm_unpermute_fwd(gmm_context *ctx, const gmm_permute *permute, void *workspace,
                                    size_t workspace_bytes, gmm_stream stream) {
    return gmm__permute_run(ctx, GMM_OP_UNPERMUTE_FWD, "gmm_unpermute_fwd", permute, workspace, workspace_bytes,
                            stream);
}

GMMDEF gmm_status gmm_unpermute_bwd(gmm_context *ctx, const gmm_permute *permute, void *workspace,
                                    size_t workspace_bytes, gmm_stream stream) {
    return gmm__permute_run(ctx, GMM_OP_UNPERMUTE_BWD, "gmm_unpermute_bwd", permute, workspace, workspace_bytes,
                            stream);
}

/* Reads the descriptor and operands of a layer call (gmm__moe_prepare). The caller's fields are checked here before
   anything is launched; what the layer passes from one operation to the next is checked with each operation. */

/* What a call of the layer asks for. */
typedef struct gmm__moe_wants {
    int weights_rows; /* the MLP weights FC2's input by probs */
    int weights_sum;  /* the combine weights rows of y by probs, and saves them */
    int saves_x;      /* rows of x are permuted into saved */
    int permutes;     /* rows of x are permuted instead of gathered by products or casts */
    int gathers_dy;   /* backward gathers rows of dout */
    int dprobs;       /* the gradient of probs is computed */
    int mlp;          /* the MLP's backward runs */
    int x;            /* the call reads gmm_moe.x */
} gmm__moe_wants;

/* Dtype of x, which is that of the MLP's rows. */
static gmm_dtype gmm__moe_dtype(const gmm__call *call) {
    const gmm_mat *w = &call->mat[GMM__W2];
    return w->scaling == GMM_SCALING_NONE ? w->dtype : call->mat[GMM__X_].dtype;
}

/* Whether backward queues weight gradients. */
static int gmm__moe_queues(const gmm__call *call) {
    return call->op == GMM_OP_MOE_BWD && (call->config.delay_wgrad || call->config.overlap_dispatch_wgrad);
}
/* Whether the call casts rows of x (input 1) or of dout (input 0) by its recipe, and its products read the copies. */
static int gmm__moe_casts(const gmm__call *call, int input) {
    const gmm_backward_override override = call->quant.backward_override;
    const int by_recipe = call->op == GMM_OP_MOE_FWD || override == GMM_BACKWARD_BY_RECIPE ||
                          (input && override == GMM_BACKWARD_DEQUANTIZED);
    return call->recipe.kind != GMM_RECIPE_NONE && by_recipe &&
           (input ? call->recipe.input.dtype : call->recipe.grad.dtype) != GMM_NONE;
}
/* Whether rows of x (input 1) or of dout (input 0) are permuted though products could gather them: on GPUs, where
   several products read them and one permutation is faster than to gather in each (KERNELS.md). A limit of the
   workspace, or weight gradients that are queued and would keep the rows, speak against it. What a recipe quantizes is
   read by one cast instead, which gathers it. */
static int gmm__moe_prefers_rows(const gmm__call *call, int input) {
    return call->ctx->config.space == GMM_SPACE_CUDA && !gmm__moe_casts(call, input) &&
           !call->options.workspace_limit && !gmm__moe_queues(call);
}
/* The caller's descriptors of MLP and route, which gmm__moe_read_parts has checked. */
static gmm_mlp gmm__moe_mlp(const gmm__call *call) {
    gmm_mlp m = GMM_ZERO;
    (void)gmm__copy_sized(&m, sizeof m, call->d.moe.mlp);
    m.struct_size = 0;
    return m;
}
static gmm_route gmm__moe_route(const gmm__call *call) {
    gmm_route r = GMM_ZERO;
    if (call->d.moe.route) (void)gmm__copy_sized(&r, sizeof r, call->d.moe.route);
    r.struct_size = 0;
    return r;
}

static gmm__moe_wants gmm__moe_wants_of(const gmm__call *call) {
    const gmm_moe *d = &call->d.moe;
    const gmm_mlp_config *c = &call->config;
    const gmm_mlp m = gmm__moe_mlp(call);
    const gmm_route r = gmm__moe_route(call);
    const int fwd = call->op == GMM_OP_MOE_FWD;
    const int keeps_x = c->save == GMM_SAVE_QUANTIZED || c->save == GMM_SAVE_QUANTIZED_E4M3;
    gmm__moe_wants w;
    w.weights_rows = c->prob;
    w.weights_sum = !c->prob && (d->probs || d->route);
    w.saves_x = d->save_rows;
    w.permutes = w.saves_x || gmm__moe_prefers_rows(call, 1);
    w.dprobs = !fwd && (d->dprobs || r.dlogits);
    w.mlp = !fwd && (d->dx || m.dw1 || m.dw2 || m.db1 || m.db2 || (w.dprobs && w.weights_rows));
    w.x = fwd || (w.mlp && !w.saves_x && (c->save == GMM_SAVE_NOTHING || (m.dw1 && !keeps_x)));
    w.gathers_dy = w.mlp && !gmm__moe_prefers_rows(call, 0) && !w.weights_sum &&
                   call->mat[GMM__DY].dtype == gmm__moe_dtype(call);
    return w;
}

/* Refuses a field of gmm_mlp that the layer sets. */
static gmm_status gmm__moe_refuse_owned(gmm__call *call, const gmm_mlp *m) {
    const struct { const char *name; int set; } owned[] = {
        { "mlp.groups", m->groups != NULL }, { "mlp.options", m->options != NULL }, { "mlp.x", m->x != NULL },
        { "mlp.prob", m->prob != NULL }, { "mlp.y", m->y != NULL }, { "mlp.saved", m->saved || m->saved_bytes },
        { "mlp.dy", m->dy != NULL }, { "mlp.dx", m->dx != NULL }, { "mlp.dprob", m->dprob != NULL },
        { "mlp.deferred", m->deferred || m->deferred_bytes }, { "mlp.x_index", m->x_index != NULL },
        { "mlp.dy_index", m->dy_index != NULL }, { "mlp.index_rows", m->index_rows != 0 },
        { "mlp.index_div", m->index_div != 0 }
    };
    size_t i;
    for (i = 0; i < sizeof owned / sizeof owned[0]; i++)
        if (owned[i].set)
            return gmm__refuse(call, GMM_E_CONFIG, owned[i].name, "is set and must be 0: the layer passes rows, "
                               "probabilities, groups, options and buffers to its MLP itself");
    return GMM_OK;
}

/* Checks a route against the layer. */
static gmm_status gmm__moe_check_route(gmm__call *call) {
    const gmm_moe *d = &call->d.moe;
    gmm_route r = GMM_ZERO;
    gmm_status s = gmm__read(call, "route", &r, sizeof r, d->route);
    const struct { const char *name; int64_t value, layer; } equal[] = {
        { "route.experts", r.experts, d->experts }, { "route.tokens", r.tokens, d->tokens },
        { "route.topk", r.topk, d->topk }
    };
    int i;
    if (s != GMM_OK) return s;
    for (i = 0; i < 3; i++)
        if (equal[i].value != equal[i].layer)
            return gmm__refuse(call, GMM_E_ARG, equal[i].name, "%lld must be that of the layer, %lld",
                               (long long)equal[i].value, (long long)equal[i].layer);
    if (r.options || r.dprobs)
        return gmm__refuse(call, GMM_E_CONFIG, r.options ? "route.options" : "route.dprobs",
                           "is set and must be NULL: the layer passes its own");
    if (d->indices || d->probs)
        return gmm__refuse(call, GMM_E_CONFIG, d->indices ? "indices" : "probs", "is set beside route, which has them");
    if (call->config.prob_on_input)
        return gmm__refuse(call, GMM_E_CONFIG, "mlp.config.prob_on_input", "1 excludes route: x cannot be weighted "
                           "before it is routed");
    return GMM_OK;
}

/* Reads the sizes of the layer, and describes the rows of each expert as a group. */
static gmm_status gmm__moe_read_sizes(gmm__call *call) {
    gmm_moe *d = &call->d.moe;
    int64_t slots, filled;
    gmm_status s = gmm__check_slots(call, d->experts, d->tokens, d->topk, &slots);
    if (s != GMM_OK) return s;
    if (d->align < 0) return gmm__refuse(call, GMM_E_ARG, "align", "%d must be >= 0", d->align);
    if ((d->save_rows & ~1) || d->reserved)
        return gmm__refuse(call, GMM_E_ARG, "save_rows", "%d must be 0 or 1, and reserved %d must be 0", d->save_rows,
                           d->reserved);
    if (d->align == 0) d->align = 1;
    if (d->capacity == 0) {
        filled = slots < d->experts ? slots : d->experts; /* experts that may have rows of zeros */
        d->capacity = gmm__round_up(slots + filled * (d->align - 1), d->align);
    }
    if (d->capacity < 0 || d->capacity > INT32_MAX)
        return gmm__refuse(call, GMM_E_ARG, "capacity", "%lld must be >= 0 and < 2^31", (long long)d->capacity);
    call->groups.count = d->experts;
    call->groups.capacity = d->capacity;
    call->groups.fault = d->fault;
    call->rows = d->capacity;
    return GMM_OK;
}

/* Reads the configuration and the caller's descriptors of MLP and route. */
static gmm_status gmm__moe_read_parts(gmm__call *call) {
    const gmm_moe *d = &call->d.moe;
    gmm_mlp_config *c = &call->config;
    gmm_error error;
    gmm_mlp m;
    gmm_status s;
    if ((s = gmm__read(call, "mlp", &m, sizeof m, d->mlp)) != GMM_OK ||
        (s = gmm__moe_refuse_owned(call, &m)) != GMM_OK ||
        (s = gmm__read(call, "mlp.config", c, sizeof *c, m.config)) != GMM_OK)
        return s;
    if (c->topk && c->topk != d->topk)
        return gmm__refuse(call, GMM_E_ARG, "mlp.config.topk", "%d must be that of the layer, %d, or 0", c->topk,
                           d->topk);
    c->topk = d->topk;
    if (c->hidden_out == 0) c->hidden_out = c->hidden;
    if (gmm_mlp_validate(c, &error) != GMM_OK)
        return gmm__refuse_member(call, error.status, "mlp.config", error.text);
    call->in = c->hidden;
    call->out = c->hidden_out;
    if (d->route && (s = gmm__moe_check_route(call)) != GMM_OK) return s;
    if (!d->route && !d->probs) {
        if (d->dprobs && !c->prob) /* with config.prob 1 backward reads the probabilities of rows in saved */
            return gmm__refuse(call, GMM_E_CONFIG, "dprobs", "is given, but neither probs nor route");
    } else if (c->prob_on_input)
        return gmm__refuse(call, GMM_E_CONFIG, "probs", "must be NULL: with mlp.config.prob_on_input 1 x has been "
                           "weighted by them");
    /* the recipe says what casts gather, w2 what dtype rows have; the MLP's checks read both again */
    if (m.quant && gmm__copy_sized(&call->quant, sizeof call->quant, m.quant) && call->quant.recipe)
        (void)gmm__copy_sized(&call->recipe, sizeof call->recipe, call->quant.recipe);
    return gmm__read(call, "mlp.w2", &call->mat[GMM__W2], sizeof call->mat[GMM__W2], m.w2);
}

/* Reads a matrix of the caller. Where it is not `required` only its dtype and strides are read. */
static gmm_status gmm__moe_read_mat(gmm__call *call, int role, const char *name, const gmm_mat *mat, int required,
                                    int64_t cols) {
    const int query = call->query;
    gmm_status s;
    call->query = query || !required;
    s = gmm__read_mat(call, role, name, mat, required, gmm__matrix(call->d.moe.tokens, cols), GMM__FLOATS);
    call->query = query;
    return s;
}

/* Reads the layer's own operands. */
static gmm_status gmm__moe_read_operands(gmm__call *call) {
    const gmm_moe *d = &call->d.moe;
    const int64_t slots = d->tokens * d->topk;
    const int fwd = call->op == GMM_OP_MOE_FWD, scaled = call->mat[GMM__W2].scaling != GMM_SCALING_NONE;
    const gmm__moe_wants w = gmm__moe_wants_of(call);
    gmm_status s;
    if (scaled && !d->x) return gmm__refuse(call, GMM_E_NULL, "x", "is NULL: weights are quantized, and its dtype is "
                                            "that of what was saved");
    if ((s = gmm__moe_read_mat(call, GMM__X_, "x", d->x, w.x, call->in)) != GMM_OK) return s;
    if (d->x && !scaled && call->mat[GMM__X_].dtype != call->mat[GMM__W2].dtype)
        return gmm__refuse(call, GMM_E_DTYPE, "x", "dtype %s must be that of moe.mlp.w2, %s",
                           gmm_dtype_name(call->mat[GMM__X_].dtype), gmm_dtype_name(call->mat[GMM__W2].dtype));
    if (fwd) {
        if ((s = gmm__moe_read_mat(call, GMM__Y, "out", d->out, 1, call->out)) != GMM_OK ||
            (!d->route && (s = gmm__check_array(call, "indices", d->indices, 1, slots)) != GMM_OK))
            return s;
    } else if ((s = gmm__moe_read_mat(call, GMM__DY, "dout", d->dout, 1, call->out)) != GMM_OK ||
               (d->dx && (s = gmm__moe_read_mat(call, GMM__DX, "dx", d->dx, 1, call->in)) != GMM_OK) ||
               (s = gmm__check_output(call, "dprobs", d->dprobs, 0, slots)) != GMM_OK)
        return s;
    if (!d->route && (fwd || w.weights_sum) &&
        (s = gmm__check_array(call, "probs", d->probs, w.weights_rows, slots)) != GMM_OK)
        return s;
    if (fwd) s = gmm__check_output(call, "sizes", d->sizes, 0, d->experts);
    else s = gmm__check_array(call, "sizes", d->sizes, 0, d->experts);
    return s != GMM_OK ? s : gmm__check_output(call, "fault", d->fault, 0, 1);
}

/* Adds the memory of a checked operation of the layer to that of the layer, under the name of its descriptor. */
static void gmm__moe_adopt_spans(gmm__call *call, const char *name, const gmm__call *part) {
    int32_t i;
    for (i = 0; i < part->spans && call->spans < GMM__SPANS; i++) {
        gmm__span *s = &call->span[call->spans++];
        *s = part->span[i];
        (void)snprintf(s->name, sizeof s->name, "%.7s.%.23s", name, part->span[i].name);
    }
}
/* Names the layer's descriptor in the message of one of its operations: "gmm_moe_fwd: mlp.w1" becomes "gmm_moe_fwd:
   moe.mlp.w1". Returns the status. */
static gmm_status gmm__moe_adopt_error(const gmm__call *call, gmm_status s) {
    gmm_error *e = &call->ctx->error;
    const size_t at = strlen(call->function) + 2;
    char text[sizeof e->text];
    if (s == GMM_OK || strlen(e->text) < at || (strncmp(e->text + at, "mlp", 3) && strncmp(e->text + at, "route", 5)))
        return s;
    memcpy(text, e->text, sizeof text);
    (void)snprintf(e->text, sizeof e->text, "%.*smoe.%s", (int)at, text, text + at);
    return s;
}
/* The steps of a layer call, each an operation of the library: which there are, and what they read and write. */

/* Owners of blocks of a layer's memory (gmm__mlp_arena). */
enum gmm__moe_owner { GMM__MOE_MAPS, GMM__MOE_X, GMM__MOE_Y, GMM__MOE_DY, GMM__MOE_DX, GMM__MOE_PROBS };

typedef struct gmm__moe_step {
    gmm_op op;
    const void *descriptor; /* gmm_route, gmm_permute or gmm_mlp */
    size_t workspace;       /* where the step's begins, behind all blocks in use */
} gmm__moe_step;

enum { GMM__MOE_STEPS = 5 };

/* The steps of a call in their order, the same for its plan and its launch. Descriptors point into this structure,
   which must therefore not be copied. */
typedef struct gmm__moe_steps {
    const gmm__call *call;
    gmm__moe_wants wants;
    gmm__mlp_arena workspace, deferred;
    gmm_dtype dtype;      /* of rows */
    gmm_route route;
    gmm_permute map, dispatch, combine;
    gmm_groups groups;
    gmm_mlp_config config;
    gmm_mlp mlp;
    gmm_mat x, y, dy, dx; /* rows of the MLP, as many as the capacity */
    int32_t *row_of, *slot_of, *sizes;
    float *row_probs;
    const float *probs;   /* of slots */
    gmm__moe_step step[GMM__MOE_STEPS];
    int count;
} gmm__moe_steps;

/* Memory that a plan counts with instead of the caller's. Descriptors tell what is wanted by addresses that are not
   NULL; a plan reads none of them. */
static char *gmm__moe_planned(void) { return (char *)(uintptr_t)GMM__WORKSPACE_ALIGN; }

/* Offsets in gmm_moe.saved: of the layer's parts, and of the MLP's behind them. */
typedef struct gmm__moe_saved {
    gmm_moe_layout layout;
    int64_t row_of, slot_of, sizes, row_probs, y, x, mlp;
} gmm__moe_saved;

static int64_t gmm__moe_save_part(gmm_moe_layout *l, const char *name, gmm_dtype dtype, int64_t rows, int64_t cols) {
    return gmm__save_part(&l->part[l->count++], &l->bytes, name, dtype, rows, cols);
}
static gmm__moe_saved gmm__moe_saved_of(const gmm__call *call) {
    const gmm_moe *d = &call->d.moe;
    const gmm__moe_wants w = gmm__moe_wants_of(call);
    gmm__moe_saved s;
    memset(&s, 0, sizeof s);
    s.row_of = gmm__moe_save_part(&s.layout, "row_of", GMM_I32, d->tokens, d->topk);
    s.slot_of = gmm__moe_save_part(&s.layout, "slot_of", GMM_I32, 1, call->rows);
    s.sizes = gmm__moe_save_part(&s.layout, "sizes", GMM_I32, 1, d->experts);
    if (w.weights_rows) s.row_probs = gmm__moe_save_part(&s.layout, "row_probs", GMM_F32, 1, call->rows);
    if (w.weights_sum) s.y = gmm__moe_save_part(&s.layout, "y", gmm__moe_dtype(call), call->rows, call->out);
    if (w.saves_x) s.x = gmm__moe_save_part(&s.layout, "x", gmm__moe_dtype(call), call->rows, call->in);
    s.mlp = s.layout.bytes;
    return s;
}

static void gmm__moe_add_step(gmm__moe_steps *steps, gmm_op op, const void *descriptor) {
    gmm__moe_step *step = &steps->step[steps->count++];
    step->op = op;
    step->descriptor = descriptor;
    step->workspace = gmm__mlp_top(&steps->workspace);
}
/* Rows of the MLP in an arena. */
static gmm_mat gmm__moe_place_rows(const gmm__moe_steps *steps, int32_t owner, int64_t cols, gmm__mlp_arena *arena) {
    const int64_t bytes = steps->call->rows * cols * (gmm_dtype_bits(steps->dtype) / 8);
    return gmm_mat_packed(steps->dtype, gmm__mlp_place(arena, owner, bytes));
}

/* Finds the maps in `saved`, or places them in the workspace. */
static void gmm__moe_place_maps(gmm__moe_steps *steps, const gmm__moe_saved *at, char *saved) {
    const gmm_moe *d = &steps->call->d.moe;
    const int64_t R = steps->call->rows;
    gmm__mlp_arena *arena = &steps->workspace;
    if (saved) {
        steps->row_of = (int32_t *)(saved + at->row_of);
        steps->slot_of = (int32_t *)(saved + at->slot_of);
        steps->sizes = (int32_t *)(saved + at->sizes);
        steps->row_probs = (float *)(saved + at->row_probs);
    } else {
        steps->row_of = (int32_t *)gmm__mlp_place(arena, GMM__MOE_MAPS, 4 * d->tokens * d->topk);
        steps->slot_of = (int32_t *)gmm__mlp_place(arena, GMM__MOE_MAPS, 4 * R);
        steps->sizes = (int32_t *)gmm__mlp_place(arena, GMM__MOE_MAPS, 4 * (int64_t)d->experts);
        steps->row_probs = (float *)gmm__mlp_place(arena, GMM__MOE_MAPS, steps->wants.weights_rows ? 4 * R : 0);
    }
    if (d->sizes) steps->sizes = d->sizes;
}

/* Fills in the descriptors of all steps but for what single steps read and write. */
static void gmm__moe_fill(gmm__moe_steps *steps, const gmm__moe_saved *at, char *saved) {
    const gmm__call *call = steps->call;
    const gmm_moe *d = &call->d.moe;
    gmm_permute *p = &steps->map;
    const int64_t slots = d->tokens * d->topk;
    steps->route = gmm__moe_route(call);
    steps->route.options = &call->options;
    steps->probs = d->route ? steps->route.probs : d->probs;

    p->experts = d->experts;
    p->tokens = d->tokens;
    p->capacity = call->rows;
    p->hidden = call->in;
    p->topk = d->topk;
    p->align = d->align;
    p->options = &call->options;
    p->fault = d->fault;
    p->indices = d->route ? steps->route.indices : d->indices;
    p->row_of = steps->row_of;
    p->slot_of = steps->slot_of;
    p->sizes = steps->sizes;
    steps->dispatch = steps->combine = *p;
    steps->combine.hidden = call->out;

    steps->groups.count = d->experts;
    steps->groups.capacity = call->rows;
    steps->groups.splits = steps->sizes;
    steps->groups.dtype = GMM_I32;
    /* otherwise the last expert that fits may have rows up to the capacity */
    steps->groups.row_align = call->rows % d->align ? 0 : d->align;
    steps->groups.rows_hint = slots < call->rows ? slots : 0;
    steps->groups.fault = d->fault;

    steps->config = call->config;
    steps->mlp = gmm__moe_mlp(call);
    steps->mlp.config = &steps->config;
    steps->mlp.groups = &steps->groups;
    steps->mlp.options = &call->options;
    steps->mlp.prob = steps->wants.weights_rows ? steps->row_probs : NULL;
    steps->mlp.index_rows = d->tokens;
    steps->mlp.index_div = d->topk;
    if (saved) {
        steps->mlp.saved = saved + at->mlp;
        steps->mlp.saved_bytes = d->saved_bytes > (size_t)at->mlp ? d->saved_bytes - (size_t)at->mlp : 0;
    }
}

/* Adds the permutation of x into the saved rows or, where those are NULL, into the workspace; or that of its
   probabilities alone where the MLP gathers the rows. */
static void gmm__moe_add_dispatch(gmm__moe_steps *steps, int probs, char *saved_rows) {
    const gmm__call *call = steps->call;
    gmm_permute *p = &steps->dispatch;
    if (steps->wants.permutes) {
        steps->x = saved_rows ? gmm_mat_packed(steps->dtype, saved_rows)
                              : gmm__moe_place_rows(steps, GMM__MOE_X, call->in, &steps->workspace);
        steps->mlp.x = &steps->x;
        p->x = &call->mat[GMM__X_];
        p->rows = &steps->x;
    } else {
        steps->mlp.x = &call->mat[GMM__X_];
        steps->mlp.x_index = steps->slot_of;
    }
    if (probs) {
        p->probs = steps->probs ? steps->probs : (const float *)gmm__moe_planned(); /* a query may leave it open */
        p->row_probs = steps->row_probs;
    }
    if (p->rows || p->row_probs) gmm__moe_add_step(steps, GMM_OP_PERMUTE_FWD, p);
}

/* Lists the steps of forward. `saved`: gmm_moe.saved; NULL = inference. */
static void gmm__moe_build_fwd(gmm__moe_steps *steps, const gmm__moe_saved *at, char *saved) {
    const gmm__call *call = steps->call;
    gmm__moe_place_maps(steps, at, saved);
    gmm__moe_fill(steps, at, saved);
    if (call->d.moe.route) gmm__moe_add_step(steps, GMM_OP_TOPK_FWD, &steps->route);
    gmm__moe_add_step(steps, GMM_OP_PERMUTE_MAP, &steps->map);
    if (saved && steps->wants.weights_sum) steps->y = gmm_mat_packed(steps->dtype, saved + at->y);
    else steps->y = gmm__moe_place_rows(steps, GMM__MOE_Y, call->out, &steps->workspace);
    gmm__moe_add_dispatch(steps, steps->wants.weights_rows, saved && steps->wants.saves_x ? saved + at->x : NULL);
    steps->mlp.y = &steps->y;
    gmm__moe_add_step(steps, GMM_OP_MLP_FWD, &steps->mlp);
    gmm__mlp_release(&steps->workspace, GMM__MOE_X);
    steps->combine.rows = &steps->y;
    steps->combine.out = &call->mat[GMM__Y];
    steps->combine.probs = steps->wants.weights_sum ? steps->probs : NULL;
    gmm__moe_add_step(steps, GMM_OP_UNPERMUTE_FWD, &steps->combine);
}

/* Lists the steps of backward. Permuted rows of dout that a queued weight gradient reads are in gmm_moe.deferred; it
   reads rows of x by their index, or those in saved. */
static void gmm__moe_build_bwd(gmm__moe_steps *steps, const gmm__moe_saved *at, char *saved) {
    const gmm__call *call = steps->call;
    const gmm_moe *d = &call->d.moe;
    const gmm__moe_wants *w = &steps->wants;
    gmm_mlp *m = &steps->mlp;
    float *dprobs = d->dprobs, *drow_probs = NULL;
    gmm__moe_place_maps(steps, at, saved);
    gmm__moe_fill(steps, at, saved);
    if (w->dprobs && !dprobs)
        dprobs = (float *)gmm__mlp_place(&steps->workspace, GMM__MOE_PROBS, 4 * d->tokens * d->topk);
    if (w->dprobs && w->weights_rows)
        drow_probs = (float *)gmm__mlp_place(&steps->workspace, GMM__MOE_PROBS, 4 * call->rows);
    if (d->dx) steps->dx = gmm__moe_place_rows(steps, GMM__MOE_DX, call->in, &steps->workspace);

    steps->combine.dout = &call->mat[GMM__DY];
    if (w->gathers_dy) {
        m->dy = &call->mat[GMM__DY];
        m->dy_index = steps->slot_of;
    } else if (w->mlp) {
        const int queues_dy = gmm__moe_queues(call) && m->dw2 && !gmm__moe_casts(call, 0); /* else a copy */
        steps->dy = gmm__moe_place_rows(steps, GMM__MOE_DY, call->out,
                                        queues_dy ? &steps->deferred : &steps->workspace);
        m->dy = steps->combine.drows = &steps->dy;
    }
    if (w->weights_sum) steps->combine.probs = steps->probs;
    if (w->weights_sum && w->dprobs) {
        steps->y = gmm_mat_packed(steps->dtype, saved + at->y);
        steps->combine.rows = &steps->y;
        steps->combine.dprobs = dprobs;
    }
    if (steps->combine.drows || steps->combine.dprobs)
        gmm__moe_add_step(steps, GMM_OP_UNPERMUTE_BWD, &steps->combine);
    if (w->mlp) {
        if (w->x) gmm__moe_add_dispatch(steps, 0, NULL);
        if (w->saves_x) {
            steps->x = gmm_mat_packed(steps->dtype, saved + at->x);
            m->x = &steps->x;
        }
        m->dx = d->dx ? &steps->dx : NULL;
        m->dprob = drow_probs;
        gmm__moe_add_step(steps, GMM_OP_MLP_BWD, m);
    }
    gmm__mlp_release(&steps->workspace, GMM__MOE_X);
    gmm__mlp_release(&steps->workspace, GMM__MOE_DY);

    steps->map.indices = NULL;
    if (d->dx) {
        steps->map.drows = &steps->dx;
        steps->map.dx = &call->mat[GMM__DX];
    }
    if (drow_probs) {
        steps->map.drow_probs = drow_probs;
        steps->map.dprobs = dprobs;
    }
    if (steps->map.dx || drow_probs) gmm__moe_add_step(steps, GMM_OP_PERMUTE_BWD, &steps->map);
    steps->route.dprobs = w->dprobs ? dprobs : NULL;
    if (steps->route.dlogits) gmm__moe_add_step(steps, GMM_OP_TOPK_BWD, &steps->route);
}

/* Lists the steps of a call over its workspace and gmm_moe.deferred; gmm__moe_planned() for a plan. */
static void gmm__moe_build(gmm__moe_steps *steps, const gmm__call *call, char *workspace, char *deferred) {
    const gmm__moe_saved at = gmm__moe_saved_of(call);
    const int fwd = call->op == GMM_OP_MOE_FWD;
    char *saved = (char *)call->d.moe.saved;
    memset(steps, 0, sizeof *steps);
    steps->call = call;
    steps->wants = gmm__moe_wants_of(call);
    steps->dtype = gmm__moe_dtype(call);
    steps->workspace.memory = workspace;
    steps->deferred.memory = deferred;
    if (fwd) gmm__moe_build_fwd(steps, &at, saved);
    else gmm__moe_build_bwd(steps, &at, saved ? saved : gmm__moe_planned());
    if (fwd || !deferred) return;
    steps->mlp.deferred = deferred + steps->deferred.peak;
    steps->mlp.deferred_bytes = call->d.moe.deferred_bytes > steps->deferred.peak
                                    ? call->d.moe.deferred_bytes - steps->deferred.peak : 0;
}

/* Checks the call of a step. */
static gmm_status gmm__moe_prepare_step(const gmm__moe_steps *steps, int i, int query, gmm__call *call) {
    gmm_context *ctx = steps->call->ctx;
    const char *function = steps->call->function;
    const gmm__moe_step *step = &steps->step[i];
    switch (step->op) {
    case GMM_OP_TOPK_FWD: case GMM_OP_TOPK_BWD:
        return gmm__topk_prepare(call, ctx, step->op, function, (const gmm_route *)step->descriptor, query);
    case GMM_OP_MLP_FWD: case GMM_OP_MLP_BWD:
        return gmm__mlp_prepare(call, ctx, step->op, function, (const gmm_mlp *)step->descriptor,
                                query ? GMM__MLP_QUERY : GMM__MLP_LAUNCH);
    default:
        return gmm__permute_prepare(call, ctx, step->op, function, (const gmm_permute *)step->descriptor, query);
    }
}
/* Plan, launch and entry points of the layer, which is composed of operations. The engines CPU and MMA have these
   functions in common; each operation selects an engine of its own. */

/* Gives the MLP's descriptor the matrices that a backward does not read, so that it can be checked. */
static void gmm__moe_complete(gmm__moe_steps *steps) {
    if (!steps->mlp.x) {
        steps->x = gmm_mat_packed(steps->dtype, NULL);
        steps->mlp.x = &steps->x;
    }
    if (!steps->mlp.dy) {
        steps->dy = gmm_mat_packed(steps->dtype, NULL);
        steps->mlp.dy = &steps->dy;
    }
}

/* Checks the caller's descriptors of route and MLP as those of the operations that read them. *mlp becomes the checked
   call of the MLP, also where the layer does not run it. */
static gmm_status gmm__moe_check_parts(gmm__call *call, gmm__call *mlp) {
    const gmm_moe *d = &call->d.moe;
    const int fwd = call->op == GMM_OP_MOE_FWD;
    const gmm_op op = fwd ? GMM_OP_MLP_FWD : GMM_OP_MLP_BWD;
    gmm__moe_steps steps;
    gmm_status s;
    gmm__moe_build(&steps, call, gmm__moe_planned(), gmm__moe_planned());
    if (d->route && (fwd || steps.route.dlogits)) {
        gmm__call route;
        steps.route.dprobs = NULL; /* the layer's own memory */
        s = gmm__topk_prepare(&route, call->ctx, fwd ? GMM_OP_TOPK_FWD : GMM_OP_TOPK_BWD, call->function, &steps.route,
                              call->query);
        if (s != GMM_OK) return gmm__moe_adopt_error(call, s);
        gmm__moe_adopt_spans(call, "route", &route);
    }
    if (!fwd && !call->query && d->route) { /* what a backward without dlogits reads too */
        const int64_t slots = d->tokens * d->topk;
        const int reads_probs = steps.wants.weights_sum && (steps.wants.mlp || steps.wants.dprobs);
        s = gmm__check_array(call, "route.probs", steps.route.probs, reads_probs, slots);
        if (s == GMM_OK)
            s = gmm__check_array(call, "route.indices", steps.route.indices, steps.route.dlogits != NULL, slots);
        if (s != GMM_OK) return s;
    }
    gmm__moe_complete(&steps);
    s = gmm__mlp_prepare(mlp, call->ctx, op, call->function, &steps.mlp,
                         call->query ? GMM__MLP_QUERY : GMM__MLP_IN_LAYER);
    if (s == GMM_OK && !fwd && !call->query && steps.wants.mlp) s = gmm__mlp_check_append(mlp);
    if (s != GMM_OK) return gmm__moe_adopt_error(call, s);
    gmm__moe_adopt_spans(call, "mlp", mlp);
    call->quant = mlp->quant;
    call->recipe = mlp->recipe;
    call->in_align = mlp->in_align;
    call->out_align = mlp->out_align;
    call->mlp_saved = gmm__mlp_saved_of(mlp).layout;
    return GMM_OK;
}

/* Checks a layer call. call->in is hidden, call->out hidden_out, call->rows the capacity. */
static gmm_status gmm__moe_prepare_parts(gmm__call *call, gmm_context *ctx, gmm_op op, const char *function,
                                         const gmm_moe *moe, int query, gmm__call *mlp) {
    gmm_moe *d = &call->d.moe;
    gmm_status s = gmm__open(call, ctx, op, function, query);
    if (s != GMM_OK || (s = gmm__read_descriptor(call, "moe", d, sizeof *d, moe)) != GMM_OK) return s;
    if (op != GMM_OP_MOE_FWD && op != GMM_OP_MOE_BWD)
        return gmm__refuse(call, GMM_E_ARG, "op", "%s is neither moe_fwd nor moe_bwd", gmm_op_name(op));
    (void)snprintf(call->shapes, sizeof call->shapes, "T=%lld E=%d k=%d R=%lld", (long long)d->tokens, d->experts,
                   d->topk, (long long)d->capacity);
    if ((s = gmm__read_options(call, d->options)) != GMM_OK || (s = gmm__moe_read_sizes(call)) != GMM_OK ||
        (s = gmm__moe_read_parts(call)) != GMM_OK)
        return s;
    (void)snprintf(call->shapes, sizeof call->shapes, "T=%lld E=%d k=%d R=%lld hidden=%lld ffn=%lld out=%lld",
                   (long long)d->tokens, d->experts, d->topk, (long long)d->capacity, (long long)call->in,
                   (long long)call->config.ffn, (long long)call->out);
    if ((s = gmm__moe_read_operands(call)) != GMM_OK) return s;
    return gmm__moe_check_parts(call, mlp);
}
static gmm_status gmm__moe_prepare(gmm__call *call, gmm_context *ctx, gmm_op op, const char *function,
                                   const gmm_moe *moe, int query) {
    gmm__call mlp;
    return gmm__moe_prepare_parts(call, ctx, op, function, moe, query, &mlp);
}

/* Raises the plan's bytes to what step i takes. Returns 0 if no engine serves it. */
static int gmm__moe_plan_step(const gmm__moe_steps *steps, int i, gmm__plan *plan) {
    gmm_context *ctx = plan->call->ctx;
    const gmm_error last_error = ctx->error;
    gmm__text *text = plan->call->describes;
    gmm__call step;
    gmm__plan step_plan;
    const size_t before = steps->step[i].workspace;
    const gmm_status s = gmm__moe_prepare_step(steps, i, 1, &step);
    if (s != GMM_OK || gmm__select(&step, &step_plan) != GMM_OK) {
        (void)gmm__decline(plan, "%.180s", ctx->error.text);
        ctx->error = last_error;
        return 0;
    }
    if (before + step_plan.workspace_bytes > plan->workspace_bytes)
        plan->workspace_bytes = before + step_plan.workspace_bytes;
    if (text) gmm__describe_plan(text, &step_plan);
    if (step.op != GMM_OP_MLP_FWD && step.op != GMM_OP_MLP_BWD) return 1;
    plan->deferred_bytes += step_plan.deferred_bytes;
    plan->weight_cache_bytes = step_plan.weight_cache_bytes;
    memcpy(plan->note, step_plan.note, sizeof plan->note);
    if (!text) return 1;
    step.describes = text; /* planning is pure: the second plan writes the lines of the MLP's steps */
    text->depth++;
    (void)gmm__select(&step, &step_plan);
    text->depth--;
    return 1;
}

static int gmm__compose_plan_moe(const gmm__call *call, gmm__plan *plan) {
    gmm__moe_steps steps;
    int i;
    gmm__moe_build(&steps, call, gmm__moe_planned(), gmm__moe_planned());
    plan->workspace_bytes = steps.workspace.peak;
    plan->saved_bytes = (size_t)(gmm__moe_saved_of(call).mlp + call->mlp_saved.bytes);
    plan->deferred_bytes = steps.deferred.peak;
    for (i = 0; i < steps.count; i++)
        if (!gmm__moe_plan_step(&steps, i, plan)) return 0;
    return 1;
}

/* Whether a span is memory that the layer writes and its MLP does not: neither one of the MLP's own, nor a buffer of
   the layer in which the MLP has its part. */
static int gmm__moe_writes_alone(const gmm__span *span) {
    static const char *const shared[] = { "saved", "deferred", "workspace", "sizes", "fault" };
    size_t k;
    for (k = 0; k < sizeof shared / sizeof shared[0]; k++)
        if (!strcmp(span->name, shared[k])) return 0;
    return span->writes && strncmp(span->name, "mlp.", 4) != 0;
}
/* Adds such memory to the call of the MLP: weights that hooks.need sets must not overlap it. */
static gmm_status gmm__moe_add_outputs(const gmm__call *layer, gmm__call *call) {
    gmm__plan plan;
    gmm_status s = gmm__select(call, &plan);
    int32_t i;
    if (s != GMM_OK || (s = gmm__mlp_check_buffers(call, &plan)) != GMM_OK) return s;
    for (i = 0; i < layer->spans; i++)
        if (call->spans < GMM__SPANS && gmm__moe_writes_alone(&layer->span[i]))
            call->span[call->spans++] = layer->span[i];
    return GMM_OK;
}

static gmm_status gmm__compose_launch_moe(const gmm__plan *plan, gmm_stream stream) {
    const gmm__call *layer = plan->call;
    gmm__moe_steps steps;
    gmm_status s = GMM_OK;
    int i;
    gmm__moe_build(&steps, layer, (char *)plan->workspace, (char *)layer->d.moe.deferred);
    for (i = 0; i < steps.count && s == GMM_OK; i++) {
        const size_t at = steps.step[i].workspace;
        gmm__call call;
        s = gmm__moe_prepare_step(&steps, i, 0, &call);
        if (s == GMM_OK && steps.step[i].descriptor == &steps.mlp && gmm__mlp_awaits(&call))
            s = gmm__moe_add_outputs(layer, &call);
        if (s == GMM_OK)
            s = gmm__serve(&call, NULL, plan->workspace ? (char *)plan->workspace + at : NULL,
                           plan->workspace_bytes - at, stream);
    }
    return gmm__moe_adopt_error(layer, s);
}

GMMDEF gmm_status gmm_moe_query(gmm_context *ctx, gmm_op op, const gmm_moe *moe, gmm_info *info) {
    const int queued = op == GMM_OP_MLP_WGRAD;
    gmm__call call, mlp;
    gmm__moe_steps steps;
    gmm_status s = gmm__moe_prepare_parts(&call, ctx, queued ? GMM_OP_MOE_BWD : op, "gmm_moe_query", moe, 1, &mlp);
    if (s != GMM_OK) return s;
    if (!queued) return gmm__serve(&call, info, NULL, 0, NULL);
    gmm__moe_build(&steps, &call, gmm__moe_planned(), gmm__moe_planned());
    gmm__moe_complete(&steps);
    s = gmm__mlp_prepare(&mlp, ctx, op, "gmm_moe_query", &steps.mlp, GMM__MLP_QUERY);
    return gmm__moe_adopt_error(&call, s != GMM_OK ? s : gmm__serve(&mlp, info, NULL, 0, NULL));
}

GMMDEF gmm_status gmm_moe_saved_query(gmm_context *ctx, gmm_op op, const gmm_moe *moe, gmm_moe_layout *layout) {
    gmm__call call;
    const gmm_status s = gmm__moe_prepare(&call, ctx, op, "gmm_moe_saved_query", moe, 1);
    gmm_moe_layout full;
    int64_t begin;
    int32_t i;
    if (s != GMM_OK) return s;
    full = gmm__moe_saved_of(&call).layout;
    begin = full.bytes;
    for (i = 0; i < call.mlp_saved.count; i++) {
        full.part[full.count] = call.mlp_saved.part[i];
        full.part[full.count++].offset += begin;
    }
    full.bytes += call.mlp_saved.bytes;
    return gmm__write_layout(&call, layout, &full, sizeof full);
}

/* Checks the caller's buffers, and launches. */
static gmm_status gmm__moe_run(gmm_context *ctx, gmm_op op, const char *function, const gmm_moe *moe, void *workspace,
                               size_t workspace_bytes, gmm_stream stream) {
    const int fwd = op == GMM_OP_MOE_FWD;
    gmm__call call;
    gmm__plan plan;
    const gmm_moe *d = &call.d.moe;
    gmm_status s = gmm__moe_prepare(&call, ctx, op, function, moe, 0);
    if (s != GMM_OK || (s = gmm__select(&call, &plan)) != GMM_OK) return s;
    if (!fwd || d->saved) s = gmm__mlp_buffer(&call, "saved", fwd, d->saved, d->saved_bytes, plan.saved_bytes);
    if (s == GMM_OK && !fwd)
        s = gmm__mlp_buffer(&call, "deferred", 1, d->deferred, d->deferred_bytes, plan.deferred_bytes);
    if (s == GMM_OK && call.quant.weight_cache)
        s = gmm__mlp_buffer(&call, "mlp.quant.weight_cache", fwd, call.quant.weight_cache,
                            call.quant.weight_cache_bytes, plan.weight_cache_bytes);
    return s != GMM_OK ? s : gmm__serve_plan(&call, &plan, workspace, workspace_bytes, stream);
}

GMMDEF gmm_status gmm_moe_fwd(gmm_context *ctx, const gmm_moe *moe, void *workspace, size_t workspace_bytes,
                              gmm_stream stream) {
    return gmm__moe_run(ctx, GMM_OP_MOE_FWD, "gmm_moe_fwd", moe, workspace, workspace_bytes, stream);
}

GMMDEF gmm_status gmm_moe_bwd(gmm_context *ctx, const gmm_moe *moe, void *workspace, size_t workspace_bytes,
                              gmm_stream stream) {
    return gmm__moe_run(ctx, GMM_OP_MOE_BWD, "gmm_moe_bwd", moe, workspace, workspace_bytes, stream);
}

GMMDEF gmm_status gmm_moe_fire_hooks(gmm_context *ctx, gmm_op op, const gmm_moe *moe, gmm_stream stream) {
    const int queued = op == GMM_OP_MLP_WGRAD;
    gmm__call call, mlp;
    const gmm_status s = gmm__moe_prepare_parts(&call, ctx, queued ? GMM_OP_MOE_BWD : op, "gmm_moe_fire_hooks", moe, 1,
                                                &mlp);
    if (s != GMM_OK) return s;
    if (op == GMM_OP_MOE_FWD) return gmm__refuse(&call, GMM_E_ARG, "op", "%s fires no hooks", gmm_op_name(op));
    gmm__mlp_fire(&mlp, queued ? GMM_OP_MLP_WGRAD : GMM_OP_MLP_BWD, stream);
    return GMM_OK;
}
/* ..................................................................................... 14.9 Accumulate, convert ... */

/* Checks and entry points of sums (gmm_accumulate) and conversions (gmm_convert). */

/* Checks the extents of a sum or a conversion. */
static gmm_status gmm__read_small_extents(gmm__call *call, int64_t rows, int64_t cols) {
    if (rows < 0) return gmm__refuse(call, GMM_E_ARG, "rows", "%lld must be >= 0", (long long)rows);
    if (cols < 1) return gmm__refuse(call, GMM_E_ARG, "cols", "%lld must be >= 1", (long long)cols);
    call->rows = rows;
    call->in = call->out = cols;
    return GMM_OK;
}

static gmm_status gmm__accumulate_prepare(gmm__call *call, gmm_context *ctx, const char *function,
                                          const gmm_accumulation *accumulation, int query) {
    gmm_accumulation *d = &call->d.sum;
    gmm_status s = gmm__open(call, ctx, GMM_OP_ACCUMULATE, function, query);
    if (s != GMM_OK || (s = gmm__read_descriptor(call, "accumulation", d, sizeof *d, accumulation)) != GMM_OK) return s;
    (void)snprintf(call->shapes, sizeof call->shapes, "%d of %lld x %lld %s", d->count, (long long)d->rows,
                   (long long)d->cols, gmm__peek_dtype(d->x));
    if ((s = gmm__read_options(call, d->options)) != GMM_OK) return s;
    if (d->count < 1) return gmm__refuse(call, GMM_E_ARG, "count", "%d must be >= 1", d->count);
    if ((s = gmm__read_small_extents(call, d->rows, d->cols)) != GMM_OK) return s;
    if (d->x) { /* the launch reads the addresses of the addends on the host */
        gmm_mat m;
        if (gmm__copy_sized(&m, sizeof m, d->x) && m.table && ctx->config.space == GMM_SPACE_CUDA &&
            !(m.flags & (uint32_t)GMM_MAT_TABLE_ON_HOST))
            return gmm__refuse(call, GMM_E_ARG, "x", "table must stand on the host (GMM_MAT_TABLE_ON_HOST)");
    }
    s = gmm__read_mat(call, GMM__X_, "x", d->x, 1, gmm__matrices(d->count, d->rows, d->cols), GMM__FLOATS);
    if (s != GMM_OK) return s;
    s = gmm__read_mat(call, GMM__Y, "y", d->y, 1, gmm__matrix(d->rows, d->cols), GMM__FLOATS);
    call->in_place = call->mat[GMM__X_].dtype == call->mat[GMM__Y].dtype;
    return s;
}

GMMDEF gmm_status gmm_accumulate_query(gmm_context *ctx, const gmm_accumulation *accumulation, gmm_info *info) {
    gmm__call call;
    const gmm_status s = gmm__accumulate_prepare(&call, ctx, "gmm_accumulate_query", accumulation, 1);
    return s != GMM_OK ? s : gmm__serve(&call, info, NULL, 0, NULL);
}
GMMDEF gmm_status gmm_accumulate(gmm_context *ctx, const gmm_accumulation *accumulation, void *workspace,
                                 size_t workspace_bytes, gmm_stream stream) {
    gmm__call call;
    const gmm_status s = gmm__accumulate_prepare(&call, ctx, "gmm_accumulate", accumulation, 0);
    return s != GMM_OK ? s : gmm__serve(&call, NULL, workspace, workspace_bytes, stream);
}

static gmm_status gmm__convert_prepare(gmm__call *call, gmm_context *ctx, const char *function,
                                       const gmm_conversion *conversion, int query) {
    gmm_conversion *d = &call->d.convert;
    gmm_dtype src, dst;
    gmm_status s = gmm__open(call, ctx, GMM_OP_CONVERT, function, query);
    if (s != GMM_OK || (s = gmm__read_descriptor(call, "conversion", d, sizeof *d, conversion)) != GMM_OK) return s;
    (void)snprintf(call->shapes, sizeof call->shapes, "%lld x %lld %s", (long long)d->rows, (long long)d->cols,
                   gmm__peek_dtype(d->src));
    if ((s = gmm__read_options(call, d->options)) != GMM_OK) return s;
    if (d->reserved) return gmm__refuse(call, GMM_E_ARG, "reserved", "%d must be 0", d->reserved);
    if ((s = gmm__read_small_extents(call, d->rows, d->cols)) != GMM_OK ||
        (s = gmm__read_mat(call, GMM__X_, "src", d->src, 1, gmm__matrix(d->rows, d->cols), GMM__BYTES)) != GMM_OK ||
        (s = gmm__read_mat(call, GMM__Y, "dst", d->dst, 1, gmm__matrix(d->rows, d->cols), GMM__BYTES)) != GMM_OK)
        return s;
    src = call->mat[GMM__X_].dtype;
    dst = call->mat[GMM__Y].dtype;
    if (src != dst && !(GMM__FLOATS >> src & GMM__FLOATS >> dst & 1))
        return gmm__refuse(call, GMM_E_DTYPE, "dst", "dtype %s cannot be made of %s: only f32, f16 and bf16 convert",
                           gmm_dtype_name(dst), gmm_dtype_name(src));
    return GMM_OK;
}

GMMDEF gmm_status gmm_convert_query(gmm_context *ctx, const gmm_conversion *conversion, gmm_info *info) {
    gmm__call call;
    const gmm_status s = gmm__convert_prepare(&call, ctx, "gmm_convert_query", conversion, 1);
    return s != GMM_OK ? s : gmm__serve(&call, info, NULL, 0, NULL);
}
GMMDEF gmm_status gmm_convert(gmm_context *ctx, const gmm_conversion *conversion, void *workspace,
                              size_t workspace_bytes, gmm_stream stream) {
    gmm__call call;
    const gmm_status s = gmm__convert_prepare(&call, ctx, "gmm_convert", conversion, 0);
    return s != GMM_OK ? s : gmm__serve(&call, NULL, workspace, workspace_bytes, stream);
}

/* CPU engine. A task is several rows, or a part of a long row. It converts GMM__SMALL_PIECE elements at a time to fp32
   on the stack. */
enum { GMM__SMALL_PIECE = 1024, GMM__SMALL_TASK = 16 * GMM__SMALL_PIECE };

static int64_t gmm__small_tasks_per_row(const gmm__call *call) { return gmm__ceil_div(call->in, GMM__SMALL_TASK); }
static void gmm__small_for(const gmm__call *call, gmm__task task) {
    const int64_t blocks = gmm__ceil_div(call->rows, gmm__rows_per_task(call->in));
    gmm__cpu_for(call->ctx, blocks * gmm__small_tasks_per_row(call), (double)call->rows * (double)call->in, task, call);
}

/* Rows [row, row_end) and columns [col, col_end) of a task. */
typedef struct gmm__small_range {
    int64_t row, row_end, col, col_end;
} gmm__small_range;
static gmm__small_range gmm__small_range_of(const gmm__call *call, int64_t task) {
    const int64_t tasks_per_row = gmm__small_tasks_per_row(call), rows = gmm__rows_per_task(call->in);
    gmm__small_range p;
    p.row = task / tasks_per_row * rows;
    p.row_end = call->rows - p.row < rows ? call->rows : p.row + rows;
    p.col = task % tasks_per_row * GMM__SMALL_TASK;
    p.col_end = call->in - p.col < GMM__SMALL_TASK ? call->in : p.col + GMM__SMALL_TASK;
    return p;
}

static void gmm__accumulate_task(const void *arg, int64_t task, int32_t thread) {
    const gmm__call *call = (const gmm__call *)arg;
    const gmm_accumulation *d = &call->d.sum;
    const gmm_mat *x = &call->mat[GMM__X_], *y = &call->mat[GMM__Y];
    const gmm__small_range p = gmm__small_range_of(call, task);
    float sum[GMM__SMALL_PIECE], addend[GMM__SMALL_PIECE];
    int64_t row, col, n, i, j;
    (void)thread;
    for (row = p.row; row < p.row_end; row++)
        for (col = p.col; col < p.col_end; col += n) {
            n = p.col_end - col < GMM__SMALL_PIECE ? p.col_end - col : (int64_t)GMM__SMALL_PIECE;
            gmm__row_load(x->dtype, gmm__at(x, 0, row, col), sum, n);
            for (j = 1; j < d->count; j++) {
                gmm__row_load(x->dtype, gmm__at(x, j, row, col), addend, n);
                for (i = 0; i < n; i++) sum[i] += addend[i];
            }
            for (i = 0; i < n; i++) sum[i] *= d->scale;
            if (d->beta != 0.0f) {
                gmm__row_load(y->dtype, gmm__at(y, 0, row, col), addend, n);
                for (i = 0; i < n; i++) addend[i] *= d->beta; /* a separate loop, so that products are rounded */
                for (i = 0; i < n; i++) sum[i] += addend[i];
            }
            gmm__row_store(y->dtype, gmm__at(y, 0, row, col), sum, n);
        }
}

static gmm_status gmm__cpu_launch_accumulate(const gmm__plan *plan, gmm_stream stream) {
    (void)stream;
    gmm__small_for(plan->call, gmm__accumulate_task);
    return GMM_OK;
}

static void gmm__convert_task(const void *arg, int64_t task, int32_t thread) {
    const gmm__call *call = (const gmm__call *)arg;
    const gmm_mat *src = &call->mat[GMM__X_], *dst = &call->mat[GMM__Y];
    const int64_t size = gmm_dtype_bits(src->dtype) / 8;
    const gmm__small_range p = gmm__small_range_of(call, task);
    float piece[GMM__SMALL_PIECE];
    int64_t row, col, n;
    (void)thread;
    for (row = p.row; row < p.row_end; row++) {
        if (src->dtype == dst->dtype) {
            memcpy(gmm__at(dst, 0, row, p.col), gmm__at(src, 0, row, p.col), (size_t)((p.col_end - p.col) * size));
            continue;
        }
        for (col = p.col; col < p.col_end; col += n) {
            n = p.col_end - col < GMM__SMALL_PIECE ? p.col_end - col : (int64_t)GMM__SMALL_PIECE;
            gmm__row_load(src->dtype, gmm__at(src, 0, row, col), piece, n);
            gmm__row_store(dst->dtype, gmm__at(dst, 0, row, col), piece, n);
        }
    }
}

static gmm_status gmm__cpu_launch_convert(const gmm__plan *plan, gmm_stream stream) {
    (void)stream;
    gmm__small_for(plan->call, gmm__convert_task);
    return GMM_OK;
}

/* ........................................................................................... 14.10 Quantization ... */

/* Checks and entry points of quantization: gmm_quantize, gmm_requantize, gmm_dequantize, gmm_transpose,
   gmm_update_scales and gmm_shard_cast. They use the roles GMM__DY for the source, GMM__Y for the rowwise copy or the
   destination, and GMM__DX for the columnwise copy. */

/* Reads the units of a quantizing call, which are the groups of a split or matrices of fixed extents. Each unit has
   scales and amaxes of its own. */
static gmm_status gmm__read_units(gmm__call *call, const gmm_groups *groups, int32_t count, int64_t rows,
                                  int64_t cols) {
    int64_t elements;
    gmm_groups g;
    gmm__peek_groups(groups, &g);
    if (groups)
        (void)snprintf(call->shapes, sizeof call->shapes, "G=%d T=%lld cols=%lld", g.count, (long long)g.capacity,
                       (long long)cols);
    else
        (void)snprintf(call->shapes, sizeof call->shapes, "%d of %lld x %lld", count, (long long)rows,
                       (long long)cols);
    if (cols < 1) return gmm__refuse(call, GMM_E_ARG, "cols", "%lld must be >= 1", (long long)cols);
    call->in = call->out = cols;
    if (groups && (count || rows))
        return gmm__refuse(call, GMM_E_ARG, "count", "%d and rows %lld must be 0 with groups", count,
                           (long long)rows);
    if (groups) return gmm__read_groups(call, groups);
    if (count < 1) return gmm__refuse(call, GMM_E_ARG, "count", "%d must be >= 1 without groups", count);
    if (rows < 1) return gmm__refuse(call, GMM_E_ARG, "rows", "%lld must be >= 1 without groups", (long long)rows);
    if (rows > INT64_MAX - GMM_GROUP_ROWS || !gmm__mul(gmm_group_rows(rows), count, &elements))
        return gmm__refuse(call, GMM_E_OVERFLOW, "rows", "%d matrices of %lld rows do not fit 64 bits", count,
                           (long long)rows);
    call->rows = rows;
    call->units = count;
    return GMM_OK;
}
static int gmm__grouped(const gmm__call *call) { return call->units == 0; }
static int64_t gmm__units(const gmm__call *call) { return gmm__grouped(call) ? call->groups.count : call->units; }
/* Extents of a quantizing call's operands: one matrix with the rows of all groups, or the matrices of fixed extents. */
static gmm__extents gmm__unit_extents(const gmm__call *call) {
    return gmm__matrices(call->units, call->rows, call->in);
}
/* Upper bound on the number of strips; a strip is GMM_TILE rows of a unit. */
static GMM__UNUSED int64_t gmm__strips(const gmm__call *call) {
    return gmm__grouped(call) ? gmm_padded_capacity(call->groups.count, call->rows) / GMM_TILE
                              : call->units * gmm__ceil_div(call->rows, GMM_TILE);
}

/* Checks that a quantized operand has the call's format. */
static gmm_status gmm__check_copy(const gmm__call *call, int role, const char *argument, gmm_direction direction) {
    const gmm_mat expected = gmm_mat_quantized(&call->format, direction, NULL, NULL, NULL);
    const gmm_mat *mat = &call->mat[role];
    if (mat->dtype != expected.dtype || mat->scaling != expected.scaling || mat->scale_order != expected.scale_order)
        return gmm__refuse(call, GMM_E_DTYPE, argument, "%s %s order %d must be the format's %s %s order %d",
                           gmm_dtype_name(mat->dtype), gmm_scaling_name(mat->scaling), (int)mat->scale_order,
                           gmm_dtype_name(expected.dtype), gmm_scaling_name(expected.scaling),
                           (int)expected.scale_order);
    if ((mat->flags & ~(uint32_t)GMM_MAT_TABLE_ON_HOST) != expected.flags || mat->hadamard != expected.hadamard)
        return gmm__refuse(call, GMM_E_CONFIG, argument, "flags 0x%x and hadamard 0x%x must be the format's 0x%x and "
                           "0x%x", (unsigned)mat->flags, (unsigned)mat->hadamard, expected.flags,
                           (unsigned)expected.hadamard);
    return GMM_OK;
}
/* Reads a quantized destination, and checks that it has the call's format. */
static gmm_status gmm__read_copy(gmm__call *call, int role, const char *argument, const gmm_mat *mat,
                                 gmm_direction direction) {
    gmm_status s;
    if (!mat) {
        memset(&call->mat[role], 0, sizeof call->mat[role]);
        return GMM_OK;
    }
    s = gmm__read_quant(call, role, argument, mat, gmm__unit_extents(call), direction);
    return s != GMM_OK ? s : gmm__check_copy(call, role, argument, direction);
}

/* Checks a quantize or requantize call. by_group: each group has one amax, so that amax and cast can be two phases. */
static gmm_status gmm__quantize_prepare(gmm__call *call, gmm_context *ctx, gmm_op op, const char *function,
                                        const gmm_quantization *quantization, int query) {
    gmm_quantization *d = &call->d.quant;
    gmm_format *f = &call->format;
    gmm_status s = gmm__open(call, ctx, op, function, query);
    gmm_error error = GMM_ZERO;
    gmm__extents src;
    int by_group;
    if (s != GMM_OK || (s = gmm__read_descriptor(call, "quantization", d, sizeof *d, quantization)) != GMM_OK) return s;
    if (op != GMM_OP_QUANTIZE && op != GMM_OP_REQUANTIZE)
        return gmm__refuse(call, GMM_E_ARG, "op", "%d is no quantizing operation", (int)op);
    if ((s = gmm__read_options(call, d->options)) != GMM_OK ||
        (s = gmm__read_units(call, d->groups, d->count, d->rows, d->cols)) != GMM_OK ||
        (s = gmm__read(call, "format", f, sizeof *f, d->format)) != GMM_OK)
        return s;
    if ((s = gmm_format_validate(f, &error)) != GMM_OK) return gmm__refuse_member(call, s, "format", error.text);
    if (f->dtype == GMM_NONE) return gmm__refuse(call, GMM_E_CONFIG, "format.dtype", "none asks for no copy");
    by_group = (f->scaling == GMM_SCALING_TENSOR && !f->delayed) ||
               (f->scaling == GMM_SCALING_NV16 && !f->row_amax);
    if (d->phase < GMM_QUANT_ALL || d->phase > GMM_QUANT_CAST || (d->phase != GMM_QUANT_ALL && !by_group))
        return gmm__refuse(call, GMM_E_CONFIG, "phase", "%d must be 0, or 1 or 2 with scaling tensor (not delayed) or "
                           "nv16 by group", (int)d->phase);
    if (d->first_group < 0 || (d->first_group && !f->stochastic))
        return gmm__refuse(call, GMM_E_ARG, "first_group", "%d must be 0, or above with stochastic rounding",
                           d->first_group);
    if (f->stochastic && (int64_t)d->first_group + gmm__units(call) > (int64_t)1 << 24)
        return gmm__refuse(call, GMM_E_OVERFLOW, "first_group", "%d and %lld groups from there exceed the 2^24 that "
                           "gmm_draw_block tells apart", d->first_group, (long long)gmm__units(call));
    if (!d->rowwise && !d->columnwise)
        return gmm__refuse(call, GMM_E_NULL, "rowwise", "and %s.columnwise are both NULL: nothing is wanted",
                           call->path);
    if (f->row_amax && d->columnwise)
        return gmm__refuse(call, GMM_E_CONFIG, "columnwise", "must be NULL with row_amax");
    if (d->reserved) return gmm__refuse(call, GMM_E_ARG, "reserved", "%d must be 0", d->reserved);
    if (d->src_index && (!gmm__grouped(call) || op == GMM_OP_REQUANTIZE))
        return gmm__refuse(call, GMM_E_CONFIG, "src_index", "goes with groups and gmm_quantize");
    if ((s = gmm__check_indices(call, d->src_index, NULL, d->index_rows, &d->index_div)) != GMM_OK) return s;
    src = d->src_index ? gmm__matrix(d->index_rows, call->in) : gmm__unit_extents(call);
    if (op == GMM_OP_REQUANTIZE) s = gmm__read_quant(call, GMM__DY, "src", d->src, src, GMM_ROWWISE);
    else s = gmm__read_mat(call, GMM__DY, "src", d->src, 1, src, GMM__FLOATS);
    if (s != GMM_OK || (s = gmm__read_copy(call, GMM__Y, "rowwise", d->rowwise, GMM_ROWWISE)) != GMM_OK ||
        (s = gmm__read_copy(call, GMM__DX, "columnwise", d->columnwise, GMM_COLUMNWISE)) != GMM_OK)
        return s;
    if (f->stochastic && ((d->rowwise && call->rows * gmm__ceil_div(call->in, 16) > (int64_t)1 << 40) ||
                          (d->columnwise && call->in * gmm__ceil_div(call->rows, 16) > (int64_t)1 << 40)))
        return gmm__refuse(call, GMM_E_OVERFLOW, "rows", "%lld x %lld are more than the 2^40 blocks of 16 that "
                           "gmm_draw_block tells apart", (long long)call->rows, (long long)call->in);
    if (f->hadamard && d->columnwise && call->mat[GMM__DY].dtype != GMM_BF16)
        return gmm__refuse(call, GMM_E_DTYPE, "src", "dtype %s must be bf16, which the Hadamard transform wants",
                           gmm_dtype_name(call->mat[GMM__DY].dtype));
    if (f->hadamard && d->columnwise && !gmm__grouped(call) && call->rows % 16)
        return gmm__refuse(call, GMM_E_ARG, "rows", "%lld of %lld x %lld matrices must be a multiple of 16: the "
                           "Hadamard transform of the columnwise copy mixes 16 rows, and a copy of fixed extents has "
                           "no padding", (long long)call->rows, (long long)call->rows, (long long)call->in);
    if (d->db) {
        if (!gmm__grouped(call) || op == GMM_OP_REQUANTIZE || d->phase == GMM_QUANT_AMAX || d->skip)
            return gmm__refuse(call, GMM_E_CONFIG, "db", "goes with groups and gmm_quantize, and with neither phase "
                               "amax nor skip");
        if ((s = gmm__read_grad(call, GMM__DB, "db", d->db, 1, 1, call->in)) != GMM_OK) return s;
    }
    if (!query && d->phase != GMM_QUANT_ALL && f->scaling == GMM_SCALING_TENSOR &&
        ((d->rowwise && !call->mat[GMM__Y].amax) || (d->columnwise && !call->mat[GMM__DX].amax)))
        return gmm__refuse(call, GMM_E_NULL, d->rowwise && !call->mat[GMM__Y].amax ? "rowwise" : "columnwise",
                           "lacks amax, which phase %d is about", (int)d->phase);
    if (!query && f->stochastic && (!d->random || (uintptr_t)d->random % 8))
        return gmm__refuse(call, d->random ? GMM_E_ALIGN : GMM_E_NULL, "random", "%p must be {seed, offset}, 8-byte "
                           "aligned, for stochastic rounding", (const void *)d->random);
    if (f->stochastic) gmm__add_span(call, "random", "", 0, d->random, 2 * (int64_t)sizeof *d->random);
    if ((s = gmm__check_array(call, "skip", d->skip, 0, 1)) != GMM_OK ||
        (s = gmm__check_array(call, "src_index", d->src_index, 0, call->rows)) != GMM_OK)
        return s;
    return gmm__check_array(call, "scale", d->scale, 0, gmm__units(call));
}

GMMDEF gmm_status gmm_quantize_query(gmm_context *ctx, gmm_op op, const gmm_quantization *quantization,
                                     gmm_info *info) {
    gmm__call call;
    const gmm_status s = gmm__quantize_prepare(&call, ctx, op, "gmm_quantize_query", quantization, 1);
    return s != GMM_OK ? s : gmm__serve(&call, info, NULL, 0, NULL);
}
GMMDEF gmm_status gmm_quantize(gmm_context *ctx, const gmm_quantization *quantization, void *workspace,
                               size_t workspace_bytes, gmm_stream stream) {
    gmm__call call;
    const gmm_status s = gmm__quantize_prepare(&call, ctx, GMM_OP_QUANTIZE, "gmm_quantize", quantization, 0);
    return s != GMM_OK ? s : gmm__serve(&call, NULL, workspace, workspace_bytes, stream);
}
GMMDEF gmm_status gmm_requantize(gmm_context *ctx, const gmm_quantization *quantization, void *workspace,
                                 size_t workspace_bytes, gmm_stream stream) {
    gmm__call call;
    const gmm_status s = gmm__quantize_prepare(&call, ctx, GMM_OP_REQUANTIZE, "gmm_requantize", quantization, 0);
    return s != GMM_OK ? s : gmm__serve(&call, NULL, workspace, workspace_bytes, stream);
}

static gmm_status gmm__dequantize_prepare(gmm__call *call, gmm_context *ctx, const char *function,
                                          const gmm_dequantization *dequantization, int query) {
    gmm_dequantization *d = &call->d.dequant;
    gmm_status s = gmm__open(call, ctx, GMM_OP_DEQUANTIZE, function, query);
    if (s != GMM_OK || (s = gmm__read_descriptor(call, "dequantization", d, sizeof *d, dequantization)) != GMM_OK ||
        (s = gmm__read_options(call, d->options)) != GMM_OK ||
        (s = gmm__read_units(call, d->groups, d->count, d->rows, d->cols)) != GMM_OK)
        return s;
    if (d->direction != GMM_ROWWISE && d->direction != GMM_COLUMNWISE)
        return gmm__refuse(call, GMM_E_ARG, "direction", "%d is neither rowwise (0) nor columnwise (1)",
                           (int)d->direction);
    if (d->reserved) return gmm__refuse(call, GMM_E_ARG, "reserved", "%d must be 0", d->reserved);
    s = gmm__read_quant(call, GMM__DY, "src", d->src, gmm__unit_extents(call), d->direction);
    if (s != GMM_OK) return s;
    return gmm__read_mat(call, GMM__Y, "dst", d->dst, 1, gmm__unit_extents(call), GMM__FLOATS);
}

GMMDEF gmm_status gmm_dequantize_query(gmm_context *ctx, const gmm_dequantization *dequantization, gmm_info *info) {
    gmm__call call;
    const gmm_status s = gmm__dequantize_prepare(&call, ctx, "gmm_dequantize_query", dequantization, 1);
    return s != GMM_OK ? s : gmm__serve(&call, info, NULL, 0, NULL);
}
GMMDEF gmm_status gmm_dequantize(gmm_context *ctx, const gmm_dequantization *dequantization, void *workspace,
                                 size_t workspace_bytes, gmm_stream stream) {
    gmm__call call;
    const gmm_status s = gmm__dequantize_prepare(&call, ctx, "gmm_dequantize", dequantization, 0);
    return s != GMM_OK ? s : gmm__serve(&call, NULL, workspace, workspace_bytes, stream);
}

/* Reads the format of a transposition's source, which shows whether blocks of NV16 are square. */
static gmm_status gmm__transpose_format(gmm__call *call, const gmm_format *format) {
    const int nv = call->mat[GMM__DY].scaling == GMM_SCALING_NV16;
    gmm_format *f = &call->format;
    gmm_error error = GMM_ZERO;
    gmm_status s;
    if (!format)
        return nv ? gmm__refuse(call, GMM_E_NULL, "format", "is NULL: with nv16 it must be that of src, with square "
                                "blocks")
                  : GMM_OK;
    if ((s = gmm__read(call, "format", f, sizeof *f, format)) != GMM_OK) return s;
    if ((s = gmm_format_validate(f, &error)) != GMM_OK) return gmm__refuse_member(call, s, "format", error.text);
    if (nv && f->scaling == GMM_SCALING_NV16 && !f->square)
        return gmm__refuse(call, GMM_E_CONFIG, "format", "square 0 must be 1: a transposed copy of blocks of 1 x 16 "
                           "has other blocks, so that gmm_quantize or gmm_requantize has to make it");
    return gmm__check_copy(call, GMM__DY, "src", GMM_ROWWISE);
}
static gmm_status gmm__transpose_prepare(gmm__call *call, gmm_context *ctx, const char *function,
                                         const gmm_transposition *transposition, int query) {
    gmm_transposition *d = &call->d.transposition;
    const gmm_mat *src = &call->mat[GMM__DY], *dst = &call->mat[GMM__Y];
    gmm_status s = gmm__open(call, ctx, GMM_OP_TRANSPOSE, function, query);
    if (s != GMM_OK || (s = gmm__read_descriptor(call, "transposition", d, sizeof *d, transposition)) != GMM_OK ||
        (s = gmm__read_options(call, d->options)) != GMM_OK ||
        (s = gmm__read_units(call, NULL, d->count, d->rows, d->cols)) != GMM_OK ||
        (s = gmm__read_quant(call, GMM__DY, "src", d->src, gmm__unit_extents(call), GMM_ROWWISE)) != GMM_OK)
        return s;
    if (src->scaling != GMM_SCALING_TENSOR && src->scaling != GMM_SCALING_128X128 && src->scaling != GMM_SCALING_NV16)
        return gmm__refuse(call, GMM_E_DTYPE, "src", "scaling %s: must be tensor, 128x128 or nv16 with square blocks, "
                           "whose blocks are the same both ways", gmm_scaling_name(src->scaling));
    if ((s = gmm__transpose_format(call, d->format)) != GMM_OK) return s;
    s = gmm__read_quant(call, GMM__Y, "dst", d->dst, gmm__unit_extents(call), GMM_COLUMNWISE);
    if (s == GMM_OK && (dst->dtype != src->dtype || dst->scaling != src->scaling))
        return gmm__refuse(call, GMM_E_DTYPE, "dst", "%s scaled %s must be as transposition.src, %s scaled %s",
                           gmm_dtype_name(dst->dtype), gmm_scaling_name(dst->scaling), gmm_dtype_name(src->dtype),
                           gmm_scaling_name(src->scaling));
    if (s == GMM_OK && (((dst->flags ^ src->flags) & (uint32_t)GMM_MAT_E4M3_256) || dst->hadamard))
        return gmm__refuse(call, GMM_E_CONFIG, "dst", "flags 0x%x and hadamard 0x%x must be as transposition.src, 0x%x "
                           "and 0: values are neither scaled anew nor transformed", (unsigned)dst->flags,
                           (unsigned)dst->hadamard, (unsigned)src->flags);
    return s;
}

GMMDEF gmm_status gmm_transpose_query(gmm_context *ctx, const gmm_transposition *transposition, gmm_info *info) {
    gmm__call call;
    const gmm_status s = gmm__transpose_prepare(&call, ctx, "gmm_transpose_query", transposition, 1);
    return s != GMM_OK ? s : gmm__serve(&call, info, NULL, 0, NULL);
}
GMMDEF gmm_status gmm_transpose(gmm_context *ctx, const gmm_transposition *transposition, void *workspace,
                                size_t workspace_bytes, gmm_stream stream) {
    gmm__call call;
    const gmm_status s = gmm__transpose_prepare(&call, ctx, "gmm_transpose", transposition, 0);
    return s != GMM_OK ? s : gmm__serve(&call, NULL, workspace, workspace_bytes, stream);
}

GMMDEF gmm_status gmm_update_scales(gmm_context *ctx, const gmm_scale_update *update, gmm_stream stream) {
    gmm__call call;
    gmm__plan plan;
    gmm_scale_update *d = &call.d.update;
    int64_t floats, bytes;
    gmm_status s = gmm__open(&call, ctx, GMM_OP_SCALE_UPDATE, "gmm_update_scales", 0);
    if (s != GMM_OK || (s = gmm__read_descriptor(&call, "update", d, sizeof *d, update)) != GMM_OK ||
        (s = gmm__read_options(&call, d->options)) != GMM_OK)
        return s;
    if (d->slots < 0) return gmm__refuse(&call, GMM_E_ARG, "slots", "%d must be >= 0", d->slots);
    if (d->stride == 0) d->stride = d->slots;
    if (d->stride < d->slots)
        return gmm__refuse(&call, GMM_E_STRIDE, "stride", "%lld must be >= the %d slots", (long long)d->stride,
                           d->slots);
    if (d->history_length < 1)
        return gmm__refuse(&call, GMM_E_ARG, "history_length", "%d must be >= 1", d->history_length);
    if (!gmm__mul(d->history_length, d->stride, &floats) || !gmm__mul(floats, (int64_t)sizeof(float), &bytes))
        return gmm__refuse(&call, GMM_E_OVERFLOW, "stride", "%lld times the history_length %d does not fit 64 bits",
                           (long long)d->stride, d->history_length);
    if (d->margin < 0 || d->margin > 63)
        return gmm__refuse(&call, GMM_E_ARG, "margin", "%d must be 0 to 63", d->margin);
    if (d->most_recent & ~1)
        return gmm__refuse(&call, GMM_E_ARG, "most_recent", "%d must be 0 or 1", d->most_recent);
    if (d->dtype != GMM_E4M3 && d->dtype != GMM_E5M2)
        return gmm__refuse(&call, GMM_E_DTYPE, "dtype", "%s must be e4m3 or e5m2", gmm_dtype_name(d->dtype));
    if ((s = gmm__check_output(&call, "history", d->history, d->slots > 0,
                               (d->history_length - 1) * d->stride + d->slots)) != GMM_OK ||
        (s = gmm__check_output(&call, "scale", d->scale, 1, d->slots)) != GMM_OK ||
        (s = gmm__check_overlap(&call)) != GMM_OK || (s = gmm__select(&call, &plan)) != GMM_OK)
        return s;
    if (d->reduce && (s = d->reduce(d->user, d->history, d->slots, stream)) != GMM_OK)
        return gmm__refuse(&call, s, "reduce", "gave %s", gmm_status_name(s));
    return gmm__serve(&call, NULL, NULL, 0, stream);
}

/* Whether gmm_shard_cast can write shards in a format. */
static int gmm__shard_supports(const gmm_format *f) {
    return f->scaling != GMM_SCALING_NONE && f->scaling != GMM_SCALING_ROW && !f->hadamard && !f->stochastic &&
           !f->four_over_six && !f->row_amax;
}
GMMDEF int64_t gmm_shard_amaxes(const gmm_format *format, int32_t count, int64_t rows, int64_t cols, int columnwise) {
    gmm_format f;
    if (!format || !gmm__copy_sized(&f, sizeof f, format) || gmm_format_validate(&f, NULL) != GMM_OK ||
        !gmm__shard_supports(&f) || count < 1 || rows < 1 || cols < 1)
        return 0;
    return (f.scaling == GMM_SCALING_NV16 ? count : 0) + gmm__shard_blocks(&f, count, rows, cols, 0) +
           (columnwise && gmm__shard_separate(&f) ? gmm__shard_blocks(&f, count, rows, cols, 1) : 0);
}

GMMDEF gmm_status gmm_shard_cast(gmm_context *ctx, const gmm_sharding *shard, gmm_stream stream) {
    static const char *const names[2] = { "rowwise", "columnwise" };
    gmm__call call;
    gmm_sharding *d = &call.d.shard;
    gmm_format *f = &call.format;
    gmm_error error = GMM_ZERO;
    gmm_status s = gmm__open(&call, ctx, GMM_OP_SHARD_CAST, "gmm_shard_cast", 0);
    int64_t elements;
    int k;
    if (s != GMM_OK || (s = gmm__read_descriptor(&call, "shard", d, sizeof *d, shard)) != GMM_OK ||
        (s = gmm__read_options(&call, d->options)) != GMM_OK ||
        (s = gmm__read_units(&call, NULL, d->count, d->rows, d->cols)) != GMM_OK ||
        (s = gmm__read(&call, "format", f, sizeof *f, d->format)) != GMM_OK)
        return s;
    if ((s = gmm_format_validate(f, &error)) != GMM_OK) return gmm__refuse_member(&call, s, "format", error.text);
    if (!gmm__shard_supports(f))
        return gmm__refuse(&call, GMM_E_CONFIG, "format", "%s: must be tensor, 1x128, 128x128, mx32 or nv16, without "
                           "transform, stochastic rounding, choice of scales and amaxes per row",
                           gmm_scaling_name(f->scaling));
    if (d->model != GMM_F32 && d->model != GMM_BF16 && d->model != GMM_F16)
        return gmm__refuse(&call, GMM_E_DTYPE, "model", "%s must be f32, f16 or bf16", gmm_dtype_name(d->model));
    if (d->phase != GMM_QUANT_AMAX && d->phase != GMM_QUANT_CAST)
        return gmm__refuse(&call, GMM_E_CONFIG, "phase", "%d must be 1 or 2", (int)d->phase);
    if (d->cols % 2) return gmm__refuse(&call, GMM_E_ARG, "cols", "%lld must be even", (long long)d->cols);
    if (!gmm__mul(d->rows, d->cols, &elements) || !gmm__mul(elements, d->count, &elements) || elements > INT64_MAX / 8)
        return gmm__refuse(&call, GMM_E_OVERFLOW, "rows", "%d matrices of %lld x %lld do not fit 64 bits",
                           d->count, (long long)d->rows, (long long)d->cols);
    if (d->length < 0 || d->start < (d->length ? 0 : -1) || d->start > elements - d->length)
        return gmm__refuse(&call, GMM_E_ARG, "start", "%lld and length %lld must lie in the %lld elements; -1 and 0 "
                           "without a shard", (long long)d->start, (long long)d->length, (long long)elements);
    if (!d->rowwise && !d->columnwise)
        return gmm__refuse(&call, GMM_E_NULL, "rowwise", "and %s.columnwise are both NULL: nothing is wanted",
                           call.path);
    for (k = 0; k < 2; k++) {
        const gmm_mat *m = k ? d->columnwise : d->rowwise;
        s = gmm__read_copy(&call, k ? GMM__DX : GMM__Y, names[k], m, k ? GMM_COLUMNWISE : GMM_ROWWISE);
        if (s != GMM_OK) return s;
        if (m && ctx->config.space != GMM_SPACE_CPU &&
            (call.mat[k ? GMM__DX : GMM__Y].flags & (uint32_t)GMM_MAT_TABLE_ON_HOST))
            return gmm__refuse(&call, GMM_E_CONFIG, names[k], "table must be device memory here");
    }
    elements = gmm_shard_amaxes(f, d->count, d->rows, d->cols, d->columnwise != NULL);
    if ((s = gmm__check_array(&call, "master", d->master, d->length > 0, d->length)) != GMM_OK ||
        (s = d->phase == GMM_QUANT_AMAX ? gmm__check_output(&call, "amax", d->amax, 1, elements)
                                        : gmm__check_array(&call, "amax", d->amax, !f->delayed, elements)) != GMM_OK ||
        (s = gmm__check_array(&call, "scale", d->scale, 0, d->count)) != GMM_OK)
        return s;
    return gmm__serve(&call, NULL, NULL, 0, stream);
}
/* The arguments of the shard cast of a checked call, for the CPU engine and the kernels. */
static GMM__UNUSED gmm__shard_args gmm__shard_of(const gmm__call *call) {
    const gmm_sharding *d = &call->d.shard;
    gmm__shard_args a;
    memset(&a, 0, sizeof a);
    a.format = call->format;
    a.model = d->model;
    a.count = d->count;
    a.rows = d->rows;
    a.cols = d->cols;
    a.start = d->length ? d->start : 0;
    a.length = d->length;
    a.master = d->master;
    a.scale = d->scale;
    a.amax = d->amax;
    a.copy[0] = call->mat[GMM__Y];
    a.copy[1] = call->mat[GMM__DX];
    return a;
}
/* Number of amaxes of a shard cast. */
static GMM__UNUSED int64_t gmm__shard_floats(const gmm__shard_args *a) {
    return gmm_shard_amaxes(&a->format, (int32_t)a->count, a->rows, a->cols, a->copy[1].dtype != GMM_NONE);
}

#ifndef GMM_NO_QUANT
/* --- CPU engine: tiles of 128 rows of one group or matrix by 128 columns --- */

enum {
    GMM__QUANT_OFFSETS, GMM__QUANT_STARTS, /* [units + 1] rows of the source, and padded rows */
    GMM__QUANT_AMAX,                       /* [2][units]: of the rowwise and of the columnwise copy */
    GMM__QUANT_STRIPS,                     /* [2][strips]: the same by strip */
    GMM__QUANT_LINES, GMM__QUANT_COLUMNS,  /* amax of each row (ROW, row_amax) and of each column (ROW) */
    GMM__QUANT_SCRATCH
};

typedef struct gmm__quant_scratch {
    float x[GMM_TILE * GMM_TILE], xt[GMM_TILE * GMM_TILE];
    uint32_t scale[GMM_TILE * GMM_TILE_BLOCKS];
    uint8_t code[GMM_TILE * GMM_TILE];
} gmm__quant_scratch;

typedef struct gmm__quant_job {
    const gmm__call *call;
    const int64_t *offsets, *starts;
    float *amax[2], *strips[2], *row_amax, *col_amax;
    gmm__quant_scratch *scratch;
    int64_t units, strip_count, col_tiles;
    gmm__cpu_index index; /* of gathered rows of the source */
} gmm__quant_job;

/* A strip of a unit (a group or a matrix) of `rows` rows: its rows [row, row + m), at most GMM_TILE. */
typedef struct gmm__strip { int64_t unit, row, m, rows; } gmm__strip;

static gmm__strip gmm__strip_of(const gmm__quant_job *job, int64_t index) {
    gmm__strip s;
    s.unit = gmm__cpu_find_group(job->starts, job->units, index * GMM_TILE);
    s.row = index * GMM_TILE - job->starts[s.unit];
    s.rows = job->offsets[s.unit + 1] - job->offsets[s.unit];
    s.m = gmm__min_i64(s.rows - s.row, GMM_TILE);
    return s;
}
/* View of unit u of a quantized matrix. */
static gmm__qview gmm__quant_view(const gmm__quant_job *job, const gmm_mat *m, gmm_direction direction, int64_t u) {
    const int grouped = gmm__grouped(job->call);
    return gmm__qview_of(m, direction, grouped, u, grouped ? job->offsets[u] : 0, grouped ? job->starts[u] : 0,
                         job->offsets[u + 1] - job->offsets[u], job->call->in);
}

/* n elements of a row of a unit as fp32; a quantized source is dequantized. */
static void gmm__quant_load(const gmm__quant_job *job, const gmm__strip *s, int64_t row, int64_t col, int64_t n,
                            float *dst) {
    const gmm_mat *m = &job->call->mat[GMM__DY];
    const int grouped = gmm__grouped(job->call);
    if (m->scaling == GMM_SCALING_NONE) {
        const int64_t at = gmm__cpu_indexed_row(&job->index, (grouped ? job->offsets[s->unit] : 0) + row);
        if (at < 0) memset(dst, 0, (size_t)n * sizeof *dst);
        else gmm__row_load(m->dtype, gmm__at(m, grouped ? 0 : s->unit, at, col), dst, n);
    } else {
        const gmm__qview v = gmm__quant_view(job, m, GMM_ROWWISE, s->unit);
        gmm__qview_load(&v, row, col, n, 1, dst);
    }
}

/* Loads a tile of a strip, with zeros past the ends of the strip and of the columns. */
static void gmm__quant_tile_load(const gmm__quant_job *job, const gmm__strip *s, int64_t col, int64_t n, float *x) {
    int64_t r;
    memset(x, 0, sizeof(float) * GMM_TILE * GMM_TILE);
    for (r = 0; r < s->m; r++) gmm__quant_load(job, s, s->row + r, col, n, x + r * GMM_TILE);
}
/* Transposes a tile, and applies the Hadamard transform of the columnwise copy. */
static void gmm__quant_tile_transpose(const gmm_format *f, const float *x, int64_t n, float *xt) {
    int64_t r, c;
    for (c = 0; c < n; c++) {
        for (r = 0; r < GMM_TILE; r++) xt[c * GMM_TILE + r] = x[r * GMM_TILE + c];
        if (f->hadamard)
            for (r = 0; r < GMM_TILE; r += 16) gmm_hadamard16(xt + c * GMM_TILE + r, (uint32_t)f->hadamard & 0xFFFFu);
    }
}
static uint32_t gmm__quant_amax(const float *x, int64_t n, uint32_t amax) {
    int64_t i;
    for (i = 0; i < n; i++) amax = gmm_amax_bits(amax, x[i]);
    return amax;
}

/* Amaxes of a strip for both copies, and of its rows. */
static void gmm__quant_strip_amax(const void *arg, int64_t index, int32_t thread) {
    const gmm__quant_job *job = (const gmm__quant_job *)arg;
    const gmm__call *call = job->call;
    const gmm_format *f = &call->format;
    const gmm__strip s = gmm__strip_of(job, index);
    gmm__quant_scratch *w = &job->scratch[thread];
    uint32_t row_amax[GMM_TILE] = { 0 }, all = 0, columnwise_amax = 0;
    int64_t r, c0;
    for (c0 = 0; c0 < call->in; c0 += GMM_TILE) {
        const int64_t n = gmm__min_i64(call->in - c0, GMM_TILE);
        gmm__quant_tile_load(job, &s, c0, n, w->x);
        for (r = 0; r < s.m; r++) row_amax[r] = gmm__quant_amax(w->x + r * GMM_TILE, n, row_amax[r]);
        if (f->hadamard && call->mat[GMM__DX].dtype != GMM_NONE) {
            gmm__quant_tile_transpose(f, w->x, n, w->xt);
            columnwise_amax = gmm__quant_amax(w->xt, n * GMM_TILE, columnwise_amax);
        }
    }
    for (r = 0; r < s.m; r++) {
        if (row_amax[r] > all) all = row_amax[r];
        if (job->row_amax)
            job->row_amax[(gmm__grouped(call) ? job->offsets[s.unit] : s.unit * s.rows) + s.row + r] =
                gmm_f32_from_bits(row_amax[r]);
    }
    job->strips[0][index] = gmm_f32_from_bits(all);
    job->strips[1][index] = gmm_f32_from_bits(f->hadamard ? columnwise_amax : all);
}

/* Amax of up to 128 columns of one unit. */
static void gmm__quant_column_amax(const void *arg, int64_t index, int32_t thread) {
    const gmm__quant_job *job = (const gmm__quant_job *)arg;
    const int64_t u = index / job->col_tiles, c0 = index % job->col_tiles * GMM_TILE;
    const int64_t n = gmm__min_i64(job->call->in - c0, GMM_TILE), rows = job->offsets[u + 1] - job->offsets[u];
    uint32_t amax[GMM_TILE] = { 0 };
    float x[GMM_TILE];
    gmm__strip s;
    int64_t r, c;
    (void)thread;
    s.unit = u;
    for (r = 0; r < rows; r++) {
        gmm__quant_load(job, &s, r, c0, n, x);
        for (c = 0; c < n; c++) amax[c] = gmm_amax_bits(amax[c], x[c]);
    }
    for (c = 0; c < n; c++) job->col_amax[u * job->call->in + c0 + c] = gmm_f32_from_bits(amax[c]);
}

/* Stores the codes of a tile at line l0 and element a0, and the scales of its blocks with their padding. */
static void gmm__quant_store(const gmm__qview *v, int64_t l0, int64_t a0, int64_t lines, int64_t data_lines,
                             int64_t along, const gmm__quant_scratch *w) {
    const int width = gmm_block_along(v->scaling);
    int64_t l, a, j;
    for (l = 0; l < data_lines && !v->apart; l++) {
        const uint8_t *code = w->code + l * GMM_TILE;
        uint8_t *dst = v->data + (v->dtype == GMM_E2M1 ? ((l0 + l) * v->ld + a0) / 2 : (l0 + l) * v->ld + a0);
        if (v->dtype != GMM_E2M1) memcpy(dst, code, (size_t)along);
        else for (a = 0; a < along; a += 2) dst[a / 2] = (uint8_t)(code[a] | code[a + 1] << 4);
    }
    for (a = 0; a < along && v->apart; a++) {
        uint8_t *dst = v->data + (v->dtype == GMM_E2M1 ? ((a0 + a) * v->ld + l0) / 2 : (a0 + a) * v->ld + l0);
        if (v->dtype != GMM_E2M1) for (l = 0; l < lines; l++) dst[l] = w->code[l * GMM_TILE + a];
        else
            for (l = 0; l < lines; l += 2)
                dst[l / 2] = (uint8_t)(w->code[l * GMM_TILE + a] | w->code[(l + 1) * GMM_TILE + a] << 4);
    }
    if (width == 128) {
        float *scale = (float *)(void *)v->scale;
        if (v->scaling == GMM_SCALING_128X128) {
            const int64_t first = a0 / 128, used = gmm__ceil_div(v->along, 128), end = gmm__round_up(used, 4);
            scale[gmm__qview_scale(v, l0, first)] = gmm_f32_from_bits(w->scale[0]);
            if (first + 1 == used)
                for (j = used; j < end; j++) scale[gmm__qview_scale(v, l0, j)] = 0.0f;
        } else
            for (l = 0; l < gmm__min_i64(GMM_TILE, gmm__round_up(v->lines, 4) - l0); l++)
                scale[gmm__qview_scale(v, l0 + l, a0 / 128)] =
                    l < lines ? gmm_f32_from_bits(w->scale[l * GMM_TILE_BLOCKS]) : 0.0f;
    } else if (width) {
        const int64_t first = a0 / width, used = gmm__ceil_div(v->along, width), end = gmm__round_up(used, 4);
        for (l = 0; l < GMM_TILE; l++)
            for (j = 0; j < gmm__min_i64(GMM_TILE / width, end - first); j++)
                v->scale[gmm__qview_scale(v, l0 + l, first + j)] =
                    l < lines && first + j < used ? (uint8_t)w->scale[l * GMM_TILE_BLOCKS + j] : (uint8_t)0;
    }
}

/* Loads one tile and quantizes it along its rows, its columns or both. */
static void gmm__quant_task(const void *arg, int64_t index, int32_t thread) {
    const gmm__quant_job *job = (const gmm__quant_job *)arg;
    const gmm__call *call = job->call;
    const gmm_format *f = &call->format;
    const gmm_quantization *d = &call->d.quant;
    const gmm_mat *rowwise = &call->mat[GMM__Y], *columnwise = &call->mat[GMM__DX];
    const int grouped = gmm__grouped(call), width = gmm_block_along(f->scaling);
    const gmm__strip s = gmm__strip_of(job, index / job->col_tiles);
    const int64_t c0 = index % job->col_tiles * GMM_TILE, n = gmm__min_i64(call->in - c0, GMM_TILE);
    gmm__quant_scratch *w = &job->scratch[thread];
    gmm_tile t = GMM_ZERO;

    gmm__quant_tile_load(job, &s, c0, n, w->x);
    t.format = f;
    t.source = call->mat[GMM__DY].scaling == GMM_SCALING_NONE ? call->mat[GMM__DY].dtype : GMM_F32;
    t.scale = d->scale ? d->scale[s.unit] : 1.0f;
    t.group = d->first_group + s.unit;
    if (f->stochastic) {
        t.seed = d->random[0];
        t.offset = d->random[1];
    }
    if (rowwise->dtype != GMM_NONE) {
        const gmm__qview v = gmm__quant_view(job, rowwise, GMM_ROWWISE, s.unit);
        memset(w->code, 0, sizeof w->code);
        memset(w->scale, 0, sizeof w->scale);
        t.direction = GMM_ROWWISE;
        t.lines = (int)s.m;
        t.along = (int)n;
        t.x = w->x;
        t.amax_per_line = job->row_amax != NULL;
        t.amax = job->row_amax ? job->row_amax + (grouped ? job->offsets[s.unit] : s.unit * s.rows) + s.row
                            : job->amax[0] + s.unit;
        t.blocks_per_line = width ? gmm__ceil_div(call->in, width) : 1;
        t.first_block = s.row * t.blocks_per_line + (width ? c0 / width : 0);
        gmm_quantize_tile(&t, w->code, w->scale);
        gmm__quant_store(&v, s.row, c0, s.m, s.m, n, w);
        if (f->scaling == GMM_SCALING_ROW && c0 == 0) {
            int64_t r;
            for (r = 0; r < s.m; r++)
                ((float *)(void *)v.scale)[s.row + r] = gmm_f32_from_bits(w->scale[r * GMM_TILE_BLOCKS]);
        }
    }
    if (columnwise->dtype != GMM_NONE) {
        const gmm__qview v = gmm__quant_view(job, columnwise, GMM_COLUMNWISE, s.unit);
        /* a padded copy has whole tiles: rows past the group are zeros, or mixed with its last rows by the transform */
        const int64_t along = grouped ? (int64_t)GMM_TILE : s.m;
        memset(w->code, 0, sizeof w->code);
        memset(w->scale, 0, sizeof w->scale);
        gmm__quant_tile_transpose(f, w->x, n, w->xt);
        t.direction = GMM_COLUMNWISE;
        t.lines = (int)n;
        t.along = (int)along;
        t.x = w->xt;
        t.amax_per_line = job->col_amax != NULL;
        t.amax = job->col_amax ? job->col_amax + s.unit * call->in + c0 : job->amax[1] + s.unit;
        t.blocks_per_line = width ? gmm__ceil_div(s.rows, width) : 1;
        t.first_block = c0 * t.blocks_per_line + (width ? s.row / width : 0);
        gmm_quantize_tile(&t, w->code, w->scale);
        gmm__quant_store(&v, c0, s.row, n, n, v.apart ? s.m : along, w);
    }
}

/* Work of a call over `rows` rows in `strips` strips, all of whose rows a padded columnwise copy has. Quantizing an
   element takes about as long as four copies. */
static double gmm__quant_work(const gmm__call *call, int64_t rows, int64_t strips) {
    const int padded = gmm__grouped(call) && call->mat[GMM__DX].dtype != GMM_NONE;
    return 4.0 * (double)call->in * (padded ? (double)strips * GMM_TILE : (double)rows);
}
/* Bytes of scratch for all threads of a call. */
static size_t gmm__quant_scratch_bytes(const gmm__call *call) {
    const int64_t strips = gmm__strips(call), tiles = strips * gmm__ceil_div(call->in, GMM_TILE);
    const int64_t rows = gmm__grouped(call) ? call->rows : call->units * call->rows;
    return (size_t)gmm__cpu_threads(call->ctx, tiles, gmm__quant_work(call, rows, strips)) * sizeof(gmm__quant_scratch);
}

static int gmm__cpu_plan_quantize(const gmm__call *call, gmm__plan *plan) {
    const gmm_format *f = &call->format;
    const size_t units = (size_t)gmm__units(call), strips = (size_t)gmm__strips(call);
    const size_t rows = (size_t)(gmm__grouped(call) ? call->rows : call->units * call->rows);
    const int by_row = f->scaling == GMM_SCALING_ROW;
    gmm__reserve(plan, GMM__QUANT_OFFSETS, (units + 1) * sizeof(int64_t));
    gmm__reserve(plan, GMM__QUANT_STARTS, (units + 1) * sizeof(int64_t));
    gmm__reserve(plan, GMM__QUANT_AMAX, 2 * units * sizeof(float));
    gmm__reserve(plan, GMM__QUANT_STRIPS, 2 * strips * sizeof(float));
    gmm__reserve(plan, GMM__QUANT_LINES, by_row || f->row_amax ? rows * sizeof(float) : 0);
    gmm__reserve(plan, GMM__QUANT_COLUMNS, by_row ? units * (size_t)call->in * sizeof(float) : 0);
    gmm__reserve(plan, GMM__QUANT_SCRATCH, gmm__quant_scratch_bytes(call));
    return 1;
}

/* Computes the offsets of units in rows of the source and in padded rows. Returns the live rows of a split. */
static int64_t gmm__quant_offsets(const gmm__call *call, int64_t *offsets, int64_t *starts) {
    const int64_t units = gmm__units(call);
    int64_t u, live = 0;
    if (gmm__grouped(call)) live = gmm__cpu_offsets(&call->groups, offsets);
    else for (u = 0; u <= units; u++) offsets[u] = u * call->rows;
    starts[0] = 0;
    for (u = 0; u < units; u++) starts[u + 1] = starts[u] + gmm_group_rows(offsets[u + 1] - offsets[u]);
    return live;
}

/* Zeroes the elements of an unpadded copy past the live rows. */
static void gmm__quant_tail(const gmm_mat *m, int64_t live, int64_t rows, int64_t cols) {
    int64_t r;
    for (r = live; r < rows; r++)
        if (m->dtype == GMM_E2M1) memset((char *)m->data + r * m->ld / 2, 0, (size_t)(cols / 2));
        else memset((char *)m->data + r * m->ld, 0, (size_t)cols);
}

static gmm_status gmm__cpu_launch_quantize(const gmm__plan *plan, gmm_stream stream) {
    const gmm__call *call = plan->call;
    const gmm_quantization *d = &call->d.quant;
    const gmm_format *f = &call->format;
    const gmm_mat *copy[2];
    gmm_linear source = GMM_ZERO; /* index of the gathered rows, for the cast and the bias gradient */
    int64_t *offsets = (int64_t *)gmm__part(plan, GMM__QUANT_OFFSETS);
    int64_t *starts = (int64_t *)gmm__part(plan, GMM__QUANT_STARTS);
    const int by_row = f->scaling == GMM_SCALING_ROW, tensor = f->scaling == GMM_SCALING_TENSOR;
    const int global = tensor || (f->scaling == GMM_SCALING_NV16 && !f->row_amax);
    gmm__quant_job job;
    double work;
    int64_t live, u, i;
    int k;

    (void)stream;
    if (d->skip && *d->skip) return GMM_OK;
    copy[0] = &call->mat[GMM__Y];
    copy[1] = &call->mat[GMM__DX];
    live = gmm__quant_offsets(call, offsets, starts);
    source.dy_index = d->src_index;
    source.index_rows = d->index_rows;
    source.index_div = d->index_div;
    memset(&job, 0, sizeof job);
    job.call = call;
    job.units = gmm__units(call);
    job.offsets = offsets;
    job.starts = starts;
    job.strip_count = starts[job.units] / GMM_TILE;
    job.col_tiles = gmm__ceil_div(call->in, GMM_TILE);
    job.index = gmm__cpu_index_of(&source, GMM__DY);
    gmm__cpu_index_faults(&job.index, live, call->groups.fault);
    job.scratch = (gmm__quant_scratch *)gmm__part(plan, GMM__QUANT_SCRATCH);
    work = gmm__quant_work(call, offsets[job.units], job.strip_count);
    for (k = 0; k < 2; k++) {
        job.amax[k] = (float *)gmm__part(plan, GMM__QUANT_AMAX) + k * job.units;
        job.strips[k] = (float *)gmm__part(plan, GMM__QUANT_STRIPS) + k * gmm__strips(call);
    }
    if (by_row || f->row_amax) job.row_amax = (float *)gmm__part(plan, GMM__QUANT_LINES);
    if (by_row && copy[1]->dtype != GMM_NONE) job.col_amax = (float *)gmm__part(plan, GMM__QUANT_COLUMNS);

    if (d->phase == GMM_QUANT_CAST) {
        for (k = 0; k < 2; k++)
            if (copy[k]->dtype != GMM_NONE) memcpy(job.amax[k], copy[k]->amax, (size_t)job.units * sizeof(float));
        if (tensor && copy[0]->dtype != GMM_NONE) memcpy(job.amax[1], job.amax[0], (size_t)job.units * sizeof(float));
    } else if ((global && !(f->delayed && !copy[0]->amax && !copy[1]->amax)) || job.row_amax) {
        gmm__cpu_for(call->ctx, job.strip_count, work, gmm__quant_strip_amax, &job);
        for (k = 0; k < 2; k++)
            for (u = 0; u < job.units; u++) {
                uint32_t amax = 0;
                for (i = starts[u] / GMM_TILE; i < starts[u + 1] / GMM_TILE; i++)
                    amax = gmm_amax_bits(amax, job.strips[k][i]);
                if (f->delayed && copy[k]->amax) amax = gmm_amax_bits(amax, copy[k]->amax[u]);
                job.amax[k][u] = gmm_f32_from_bits(amax);
                if (global && copy[k]->dtype != GMM_NONE && copy[k]->amax) copy[k]->amax[u] = job.amax[k][u];
            }
        if (f->row_amax && copy[0]->dtype != GMM_NONE)
            memcpy(copy[0]->amax, job.row_amax, (size_t)(gmm__grouped(call) ? live : job.units * call->rows) *
                   sizeof(float));
        if (job.col_amax) gmm__cpu_for(call->ctx, job.units * job.col_tiles, work, gmm__quant_column_amax, &job);
        if (d->phase == GMM_QUANT_AMAX) return GMM_OK;
    }
    for (k = 0; k < 2 && tensor; k++)
        for (u = 0; u < job.units && copy[k]->dtype != GMM_NONE; u++) {
            const gmm__qview v = gmm__quant_view(&job, copy[k], k ? GMM_COLUMNWISE : GMM_ROWWISE, u);
            const float scale = f->delayed ? d->scale ? d->scale[u] : 1.0f
                                           : gmm_scale_from_amax(job.amax[k][u], gmm_dtype_largest(f->dtype),
                                                                 gmm_dtype_largest(GMM_F32), f->eps, f->pow2);
            *(float *)(void *)v.scale = gmm_scale_inverse(scale);
        }
    for (i = 0; job.col_amax && i < job.units * call->in; i++) {
        const gmm__qview v = gmm__quant_view(&job, copy[1], GMM_COLUMNWISE, i / call->in);
        ((float *)(void *)v.scale)[i % call->in] = gmm_scale_inverse(gmm_scale_from_amax(
            job.col_amax[i], gmm_dtype_largest(f->dtype), gmm_dtype_largest(GMM_F32), f->eps, f->pow2));
    }
    gmm__cpu_for(call->ctx, job.strip_count * job.col_tiles, work, gmm__quant_task, &job);
    if (gmm__grouped(call) && call->groups.tail == GMM_TAIL_ZERO)
        for (k = 0; k < 2; k++)
            if (copy[k]->dtype != GMM_NONE && (k == 0 || f->scaling == GMM_SCALING_MX32))
                gmm__quant_tail(copy[k], live, call->rows, call->in);
    if (d->db) gmm__cpu_bgrad(call, offsets, &source);
    return GMM_OK;
}

/* Dequantizes one tile. A columnwise copy is transposed in the scratch. */
static void gmm__dequant_task(const void *arg, int64_t index, int32_t thread) {
    const gmm__quant_job *job = (const gmm__quant_job *)arg;
    const gmm__call *call = job->call;
    const gmm_direction direction = call->d.dequant.direction;
    const gmm_mat *dst = &call->mat[GMM__Y];
    const gmm__strip s = gmm__strip_of(job, index / job->col_tiles);
    const int64_t c0 = index % job->col_tiles * GMM_TILE, n = gmm__min_i64(call->in - c0, GMM_TILE);
    const gmm__qview v = gmm__quant_view(job, &call->mat[GMM__DY], direction, s.unit);
    gmm__quant_scratch *w = &job->scratch[thread];
    const int grouped = gmm__grouped(call);
    int64_t r, c;
    if (direction == GMM_ROWWISE)
        for (r = 0; r < s.m; r++) gmm__qview_load(&v, s.row + r, c0, n, 1, w->x + r * GMM_TILE);
    else {
        for (c = 0; c < n; c++) gmm__qview_load(&v, c0 + c, s.row, s.m, 1, w->xt + c * GMM_TILE);
        for (r = 0; r < s.m; r++)
            for (c = 0; c < n; c++) w->x[r * GMM_TILE + c] = w->xt[c * GMM_TILE + r];
    }
    for (r = 0; r < s.m; r++)
        gmm__row_store(dst->dtype, gmm__at(dst, grouped ? 0 : s.unit,
                                           (grouped ? job->offsets[s.unit] : 0) + s.row + r, c0),
                       w->x + r * GMM_TILE, n);
}

static int gmm__cpu_plan_dequantize(const gmm__call *call, gmm__plan *plan) {
    const size_t units = (size_t)gmm__units(call);
    gmm__reserve(plan, GMM__QUANT_OFFSETS, (units + 1) * sizeof(int64_t));
    gmm__reserve(plan, GMM__QUANT_STARTS, (units + 1) * sizeof(int64_t));
    gmm__reserve(plan, GMM__QUANT_SCRATCH, gmm__quant_scratch_bytes(call));
    return 1;
}
static gmm_status gmm__cpu_launch_dequantize(const gmm__plan *plan, gmm_stream stream) {
    const gmm__call *call = plan->call;
    int64_t *offsets = (int64_t *)gmm__part(plan, GMM__QUANT_OFFSETS);
    int64_t *starts = (int64_t *)gmm__part(plan, GMM__QUANT_STARTS);
    const int64_t live = gmm__quant_offsets(call, offsets, starts);
    gmm__quant_job job;
    (void)stream;
    memset(&job, 0, sizeof job);
    job.call = call;
    job.units = gmm__units(call);
    job.offsets = offsets;
    job.starts = starts;
    job.col_tiles = gmm__ceil_div(call->in, GMM_TILE);
    job.scratch = (gmm__quant_scratch *)gmm__part(plan, GMM__QUANT_SCRATCH);
    gmm__cpu_for(call->ctx, starts[job.units] / GMM_TILE * job.col_tiles,
                 gmm__quant_work(call, offsets[job.units], starts[job.units] / GMM_TILE), gmm__dequant_task, &job);
    if (gmm__grouped(call)) gmm__cpu_tail(&call->mat[GMM__Y], call->groups.tail, live, call->rows, call->in);
    return GMM_OK;
}

/* Transposes a tile of 128 x 128 in squares that stay in the L1 cache. */
static void gmm__transpose_task(const void *arg, int64_t index, int32_t thread) {
    enum { SIDE = 32 };
    const gmm__call *call = (const gmm__call *)arg;
    const int64_t row_tiles = gmm__ceil_div(call->rows, GMM_TILE), col_tiles = gmm__ceil_div(call->in, GMM_TILE);
    const int64_t u = index / (row_tiles * col_tiles), i = index / col_tiles % row_tiles, j = index % col_tiles;
    const gmm__qview src = gmm__qview_of(&call->mat[GMM__DY], GMM_ROWWISE, 0, u, 0, 0, call->rows, call->in);
    const gmm__qview dst = gmm__qview_of(&call->mat[GMM__Y], GMM_COLUMNWISE, 0, u, 0, 0, call->rows, call->in);
    const int64_t r1 = gmm__min_i64(call->rows, (i + 1) * GMM_TILE), c1 = gmm__min_i64(call->in, (j + 1) * GMM_TILE);
    int64_t r0, c0, r, c;
    (void)thread;
    for (r0 = i * GMM_TILE; r0 < r1; r0 += SIDE)
        for (c0 = j * GMM_TILE; c0 < c1; c0 += SIDE)
            for (c = c0; c < gmm__min_i64(c1, c0 + SIDE); c++) {
                const int64_t end = gmm__min_i64(r1, r0 + SIDE);
                if (src.dtype == GMM_E2M1) /* rows are even: each line of the copy consists of whole bytes */
                    for (r = r0; r < end; r += 2)
                        dst.data[(c * dst.ld + r) / 2] =
                            (uint8_t)(gmm_nibble(src.data, r * src.ld + c) |
                                      gmm_nibble(src.data, (r + 1) * src.ld + c) << 4);
                else
                    for (r = r0; r < end; r++) dst.data[c * dst.ld + r] = src.data[r * src.ld + c];
            }
    if (src.scaling == GMM_SCALING_NV16) gmm__qview_transpose_nv16_scales(&src, &dst, i, j, 0, 1);
    else gmm__qview_transpose_scale(&src, &dst, i, j);
}
static gmm_status gmm__cpu_launch_transpose(const gmm__plan *plan, gmm_stream stream) {
    const gmm__call *call = plan->call;
    (void)stream;
    gmm__cpu_for(call->ctx, call->units * gmm__ceil_div(call->rows, GMM_TILE) * gmm__ceil_div(call->in, GMM_TILE),
                 (double)call->units * (double)call->rows * (double)call->in, gmm__transpose_task, call);
    return GMM_OK;
}

static gmm_status gmm__cpu_launch_scale_update(const gmm__plan *plan, gmm_stream stream) {
    const gmm_scale_update *d = &plan->call->d.update;
    int32_t i;
    (void)stream;
    for (i = 0; i < d->slots; i++)
        d->scale[i] = gmm_delayed_scale(d->history + i, d->stride, d->history_length, gmm_dtype_largest(d->dtype),
                                        d->margin, d->most_recent, 0.0f, d->scale[i]);
    return GMM_OK;
}

static gmm_status gmm__cpu_launch_shard_cast(const gmm__plan *plan, gmm_stream stream) {
    const gmm__shard_args a = gmm__shard_of(plan->call);
    const int nv = a.format.scaling == GMM_SCALING_NV16;
    int64_t i, end, lines, blocks;
    int k;
    (void)stream;
    if (plan->call->d.shard.phase == GMM_QUANT_AMAX) {
        memset(a.amax, 0, (size_t)gmm__shard_floats(&a) * sizeof(float));
        for (i = 0; i < a.length; i++) {
            const int64_t e = a.start + i, member = e / (a.rows * a.cols), row = e / a.cols % a.rows, col = e % a.cols;
            const float v = gmm__shard_value(&a, i);
            for (k = 0; k < 2 + nv; k++)
                if (k == 2 || a.copy[k].dtype != GMM_NONE) {
                    float *dst = &a.amax[k == 2 ? member : gmm__shard_amax_at(&a, k, member, row, col)];
                    *dst = gmm_f32_from_bits(gmm_amax_bits(gmm_f32_bits(*dst), v));
                }
        }
        return GMM_OK;
    }
    for (k = 0; k < 2; k++) {
        if (a.copy[k].dtype == GMM_NONE) continue;
        gmm__shard_scales(&a, k, &lines, &blocks);
        for (i = 0; i < a.count * lines * blocks; i++) gmm__shard_store_scale(&a, k, i);
        gmm__shard_parts(&a, k, &i, &end);
        for (; i < end; i++) gmm__shard_store_part(&a, k, i);
    }
    return GMM_OK;
}
#endif /* GMM_NO_QUANT */

/* ............................................................................. 14.11 MMA engine: grouped linear ... */

#ifdef __CUDACC__

/* Plans and launches of the MMA engine's linear layers. The WGMMA engine uses the same workspace regions, offsets and
   arguments; the other CUDA parts use gmm__cuda_status and gmm__mma_enqueue_offsets. */

/* Regions of the workspace. */
enum {
    GMM__MMA_OFFSETS,         /* [G + 1] int64: row offsets of the groups */
    GMM__MMA_TILES,           /* [G + 1] int32: prefix sums of the groups' tiles */
    GMM__MMA_MATRIX_TABLE,    /* [G] device copies of host tables: addresses of w, dw or db */
    GMM__MMA_BIAS_TABLE,      /* [G] addresses of biases */
    GMM__MMA_SCALE_TABLE,     /* [G] addresses of the weights' scales */
    GMM__MMA_BGRAD_PARTIALS,  /* [chunks, out] float: partial sums of the bias gradient */
    GMM__COPY_A,              /* copies of operands: gathered rows; WGMMA: quantized ones as 16-bit elements */
    GMM__COPY_B,
    GMM__WGMMA_ALPHA,         /* [2][G] float: two scales of each group's accumulators, applied in this order */
    GMM__WGMMA_TILES16,       /* [G + 1] int32: prefix sums of the groups' blocks of 16 rows, for transposed tokens */
    GMM__WGMMA_OFFSETS16,     /* [G + 1] int64: row offsets of groups padded to multiples of 16 rows */
    GMM__WGMMA_GROUP_TABLES = GMM__MMA_BGRAD_PARTIALS /* group tables of each CTA; no operation needs both regions */
};

/* The status of a call whose last CUDA function returned e. */
static gmm_status gmm__cuda_status(const gmm__call *call, cudaError_t e) {
    if (e == cudaSuccess) return GMM_OK;
    (void)cudaGetLastError(); /* clears the error, so that the next call does not report it */
    return gmm__fail(&call->ctx->error, GMM_E_CUDA, "%s: %s", call->function, cudaGetErrorString(e));
}

/* Reserves the regions of offsets and tiles, and the region for the device copy of a table in host memory. */
static void gmm__mma_reserve_groups(const gmm__call *call, gmm__plan *plan) {
    const size_t groups = (size_t)call->groups.count;
    gmm__reserve(plan, GMM__MMA_OFFSETS, (groups + 1) * sizeof(int64_t));
    gmm__reserve(plan, GMM__MMA_TILES, (groups + 1) * sizeof(int32_t));
}
static void gmm__mma_reserve_table(const gmm__call *call, gmm__plan *plan, int role, int region) {
    if (call->mat[role].dtype != GMM_NONE && (call->mat[role].flags & (uint32_t)GMM_MAT_TABLE_ON_HOST))
        gmm__reserve(plan, region, (size_t)call->groups.count * sizeof(void *));
}

/* Whether a call's kernels use programmatic dependent launch. With options.sm_limit they do not: CTAs of the dependent
   kernel would wait on the multiprocessors that the caller keeps free for other kernels. */
static int gmm__mma_pdl(const gmm__call *call) { return call->ctx->device.pdl && call->options.sm_limit == 0; }

/* Enqueues the computation of a call's row offsets, and of the prefix sums of its tiles, to the addresses in `args`.
   Offsets of a split on the host are computed here and copied to the device; a kernel computes all others. */
static gmm_status gmm__mma_enqueue_split(const gmm__call *call, gmm_offsets_args *args, gmm_stream stream) {
    args->groups = call->groups;
    if (call->groups.on_host) { /* the argument checks have validated them */
        const int64_t words = (int64_t)call->groups.count + 1;
        enum cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
        int64_t values[GMM_COPY_VALUES], first = 0, end = 0, i;
        uint32_t fault = 0;
        cudaError_t e = cudaStreamIsCapturing(stream, &capture);
        if (e == cudaSuccess && capture != cudaStreamCaptureStatusNone)
            return gmm__refuse(call, GMM_E_CAPTURE, "groups.on_host", "host sizes cannot be captured, since every "
                               "replay would use them; pass device sizes");
        for (; first < words && e == cudaSuccess; first += GMM_COPY_VALUES) {
            const int64_t count = words - first < GMM_COPY_VALUES ? words - first : (int64_t)GMM_COPY_VALUES;
            for (i = 0; i < count; i++) {
                if (first + i > 0)
                    end = gmm_split_end(end, gmm__split_value(&call->groups, first + i - 1), call->groups.form,
                                        call->groups.capacity, call->groups.row_align, &fault);
                values[i] = end;
            }
            e = gmm_launch_copy(args->offsets + first, values, count, stream);
        }
        if (e != cudaSuccess || (!args->tiles[0] && !args->tiles[1] && !args->tiles[2]))
            return gmm__cuda_status(call, e);
        args->groups.splits = args->offsets; /* the kernel reads these offsets, and writes them back unchanged */
        args->groups.form = GMM_SPLIT_OFFSETS;
        args->groups.dtype = GMM_I64;
        args->groups.row_align = 0;
    }
    return gmm__cuda_status(call, gmm_launch_offsets(args, gmm__mma_pdl(call), stream));
}

/* The same with the prefix sums of tiles of `tile_rows` rows alone, unless `tiles` is NULL. */
static gmm_status gmm__mma_enqueue_offsets(const gmm__call *call, int64_t *offsets, int32_t *tiles, int32_t tile_rows,
                                           gmm_stream stream) {
    gmm_offsets_args args;
    memset(&args, 0, sizeof args);
    args.offsets = offsets;
    args.tiles[0] = tiles;
    args.tile_rows[0] = tile_rows;
    return gmm__mma_enqueue_split(call, &args, stream);
}

/* Rows of a tile by gmm__tile_kind. */
static const int32_t gmm__tile_rows[GMM__TILE_KINDS] = { GMM_TILE, 16, GMM_BGRAD_ROWS };
typedef char gmm__tile_kinds_fit[(int)GMM__TILE_KINDS == (int)GMM_OFFSETS_TILES ? 1 : -1];

/* The offsets of a call's groups and the prefix sums of their tiles. */
typedef struct gmm__mma_split {
    const int64_t *offsets;
    const int32_t *tiles[GMM__TILE_KINDS];
} gmm__mma_split;

/* An MLP computes the split once for all of its steps; for other calls this enqueues its computation into the
   workspace, with the prefix sums of one kind of tile, and for transposed dequantizations with those of 16 rows, to
   `tiles16`. */
static gmm_status gmm__mma_split_of(const gmm__plan *plan, enum gmm__tile_kind kind, int32_t *tiles16,
                                    gmm__mma_split *split, gmm_stream stream) {
    const gmm__call *call = plan->call;
    gmm_offsets_args args;
    int k;
    memset(split, 0, sizeof *split);
    if (call->split_tiles) {
        split->offsets = (const int64_t *)call->groups.splits;
        for (k = 0; k < GMM__TILE_KINDS; k++)
            split->tiles[k] = call->split_tiles + k * (call->groups.count + (int64_t)1);
        return GMM_OK;
    }
    memset(&args, 0, sizeof args);
    args.offsets = (int64_t *)gmm__part(plan, GMM__MMA_OFFSETS);
    args.tiles[kind] = (int32_t *)gmm__part(plan, GMM__MMA_TILES);
    if (tiles16) args.tiles[GMM__TILES_16] = tiles16;
    memcpy(args.tile_rows, gmm__tile_rows, sizeof args.tile_rows);
    split->offsets = args.offsets;
    for (k = 0; k < GMM__TILE_KINDS; k++) split->tiles[k] = args.tiles[k];
    return gmm__mma_enqueue_split(call, &args, stream);
}

/* Describes an operand to kernels; `per_group`: it has one matrix per group. A host table is copied to `region` of the
   workspace. */
static cudaError_t gmm__mma_operand(const gmm__plan *plan, int role, int per_group, int region, gmm_kmat *out,
                                    gmm_stream stream) {
    const gmm_mat *m = &plan->call->mat[role];
    memset(out, 0, sizeof *out);
    out->dtype = m->dtype;
    out->data = m->data;
    out->table = m->table;
    out->ld = m->ld;
    out->stride = per_group ? m->group_stride * (gmm_dtype_bits(m->dtype) / 8) : 0;
    if (m->dtype == GMM_NONE || !m->table || !(m->flags & (uint32_t)GMM_MAT_TABLE_ON_HOST)) return cudaSuccess;
    out->table = (void *const *)gmm__part(plan, region);
    return gmm_launch_copy(gmm__part(plan, region), m->table, plan->call->groups.count, stream);
}

/* The beta of a gradient's destination as far as the host knows it: 0 or 1, without the array of betas by group. */
static float gmm__mma_beta(const gmm_grad *grad) {
    gmm_grad g = *grad;
    g.beta = NULL; /* device memory: the kernels read it */
    return gmm__grad_beta(&g, 0);
}

static gmm_status gmm__mma_launch_offsets(const gmm__plan *plan, gmm_stream stream) {
    const gmm__call *call = plan->call;
    gmm_offsets_args args;
    int k;
    memset(&args, 0, sizeof args);
    args.offsets = (int64_t *)call->output;
    for (k = 0; k < GMM__TILE_KINDS; k++)
        if (call->tile_kinds >> k & 1) args.tiles[k] = call->split_tiles + k * (call->groups.count + (int64_t)1);
    memcpy(args.tile_rows, gmm__tile_rows, sizeof args.tile_rows);
    return gmm__mma_enqueue_split(call, &args, stream);
}

/* Roles of the operands of the product D = A B^T, which has M rows, N columns and the contraction K: fwd multiplies x
   by w, dgrad dy by w, wgrad dy by x. */
static int gmm__mma_role_a(gmm_gemm_op op) { return op == gmm_gemm_fwd ? GMM__X_ : GMM__DY; }
static int gmm__mma_role_b(gmm_gemm_op op) { return op == gmm_gemm_wgrad ? GMM__X_ : GMM__W; }

/* The index of an operand whose rows are gathered, else NULL. */
static const int32_t *gmm__index_of(const gmm__call *call, int role) {
    return role == GMM__X_ ? call->d.linear.x_index : role == GMM__DY ? call->d.linear.dy_index : NULL;
}
static gmm_row_index gmm__row_index(const gmm__call *call, int role) {
    gmm_row_index index;
    index.at = gmm__index_of(call, role);
    index.fault = call->groups.fault;
    index.div = call->d.linear.index_div;
    index.rows = (int32_t)call->d.linear.index_rows;
    return index;
}
/* Bytes from row to row of an operand's gathered copy in the workspace; 0: the rows are not gathered. */
static int64_t gmm__copy_pitch(const gmm__call *call, int role) {
    const int64_t cols = role == GMM__X_ ? call->in : call->out, size = gmm_dtype_bits(call->mat[role].dtype) / 8;
    return gmm__index_of(call, role) ? (cols * size + 15) / 16 * 16 : 0;
}
/* Reserves the copies of gathered operands, the last regions of a plan, and says so in the note. Declines what
   options.workspace_limit forbids. */
static int gmm__mma_plan_gather(const gmm__call *call, gmm__plan *plan, gmm_gemm_op op) {
    const int64_t pitch_a = gmm__copy_pitch(call, gmm__mma_role_a(op));
    const int64_t pitch_b = gmm__copy_pitch(call, gmm__mma_role_b(op));
    const size_t used = strlen(plan->note);
    int64_t bytes;
    if (pitch_a + pitch_b == 0) return 1;
    if (!gmm__mul(call->rows, pitch_a + pitch_b, &bytes))
        return gmm__decline(plan, "copies no %lld rows of %lld bytes", (long long)call->rows,
                            (long long)(pitch_a + pitch_b));
    plan->grid[1] = gmm__grid(call->ctx->device.processors, call->options.sm_limit, 8, INT32_MAX);
    gmm__reserve(plan, GMM__COPY_A, (size_t)(call->rows * pitch_a));
    gmm__reserve(plan, GMM__COPY_B, (size_t)(call->rows * pitch_b));
    if (call->options.workspace_limit && plan->workspace_bytes > (uint64_t)call->options.workspace_limit)
        return gmm__decline(plan, "needs %lld bytes of workspace to gather rows, not options.workspace_limit %lld",
                            (long long)plan->workspace_bytes, (long long)call->options.workspace_limit);
    (void)snprintf(plan->note + used, sizeof plan->note - used, ", rows gathered in %lld MiB of workspace",
                   (long long)(bytes >> 20));
    return 1;
}
/* Enqueues the copies of gathered operands, and makes `args` address them. `groups` has its splits on the device. */
static cudaError_t gmm__mma_gather(const gmm__plan *plan, gmm_gemm_op op, gmm_gemm_args *args, const gmm_groups *groups,
                                   gmm_stream stream) {
    const gmm__call *call = plan->call;
    cudaError_t e = cudaSuccess;
    int operand;
    for (operand = 0; operand < 2 && e == cudaSuccess; operand++) {
        const int role = operand ? gmm__mma_role_b(op) : gmm__mma_role_a(op);
        const int64_t pitch = gmm__copy_pitch(call, role), size = gmm_dtype_bits(call->mat[role].dtype) / 8;
        gmm_kmat *m = operand ? &args->b : &args->a;
        gmm_gather_args copy;
        if (!pitch) continue;
        memset(&copy, 0, sizeof copy);
        copy.src = (const char *)m->data;
        copy.dst = (char *)gmm__part(plan, operand ? GMM__COPY_B : GMM__COPY_A);
        copy.ld = m->ld * size;
        copy.pitch = pitch;
        copy.bytes = (role == GMM__X_ ? call->in : call->out) * size;
        copy.index = gmm__row_index(call, role);
        copy.groups = *groups;
        e = gmm_launch_gather(plan->grid[1], &copy, stream);
        m->data = copy.dst;
        m->ld = pitch / size;
    }
    return e;
}

#ifndef GMM_NO_QUANT
/* Declines operands whose scaling the MMA kernels do not read or write: every one that is not listed here. */
static int gmm__mma_takes_scalings(const gmm__call *call, gmm__plan *plan) {
    int i;
    for (i = 0; i < GMM__ROLES; i++) {
        const gmm_mat *m = &call->mat[i];
        if (m->dtype == GMM_NONE) continue;
        switch (m->scaling) {
        case GMM_SCALING_NONE:
        case GMM_SCALING_TENSOR:
        case GMM_SCALING_ROW:
        case GMM_SCALING_1X128:
        case GMM_SCALING_128X128:
        case GMM_SCALING_MX32:
        case GMM_SCALING_NV16: break;
        default: return gmm__decline(plan, "has no kernel for scaling %s", gmm_scaling_name(m->scaling));
        }
    }
    return 1;
}

/* Plans a product of quantized operands: kernel, grid, workspace. */
static int gmm__mma_plan_quantized(const gmm__call *call, gmm__plan *plan, gmm_gemm_op op) {
    const int role_a = gmm__mma_role_a(op), role_b = gmm__mma_role_b(op);
    const gmm_mat *a = &call->mat[role_a], *b = &call->mat[role_b];
    const int64_t m = op == gmm_gemm_wgrad ? call->out : call->rows, n = op == gmm_gemm_fwd ? call->out : call->in;
    const int64_t max_extent = INT32_MAX / 16;
    const int64_t max_tiles = op == gmm_gemm_wgrad ? call->groups.count * gmm__ceil_div(m, GMM_QGEMM_TILE_M)
                                                   : call->rows / GMM_QGEMM_TILE_M + call->groups.count;
    const int mx = b->scaling == GMM_SCALING_MX32, f16 = a->dtype == GMM_F16;
    /* columns of the kernel table: whether scales multiply the partial sums of blocks, and the dtype that mma reads */
    const int block_scaled = gmm_block_along(b->scaling) == 128 || (mx && f16);
    const gmm_dtype dtype = block_scaled || f16 || !gmm_block_along(b->scaling) ? GMM_F16 : GMM_BF16;
    const int32_t processors = call->ctx->device.processors;
    int64_t tiles_n;
    int32_t i;
    if (!gmm__mma_takes_scalings(call, plan)) return 0;
    if (a->dtype == GMM_F32) return gmm__decline(plan, "multiplies f32 by no quantized weights");
    if (call->rows > max_extent || call->in > max_extent || call->out > max_extent)
        return gmm__decline(plan, "takes at most %lld rows and features of quantized operands", (long long)max_extent);
    plan->kernel = -1;
    for (i = 0; i < GMM_QGEMM_KERNELS; i++) {
        const gmm_qgemm_kernel *k = &gmm_qgemm_kernels[i];
        if (k->op == op && k->dtype == dtype && k->parts == block_scaled &&
            k->a == (a->scaling == GMM_SCALING_MX32 && call->direction[role_a] == GMM_COLUMNWISE) &&
            k->b == (mx && call->direction[role_b] == GMM_COLUMNWISE))
            plan->kernel = i;
    }
    if (plan->kernel < 0)
        return gmm__decline(plan, "has no kernel for %s %s times %s %s", gmm_dtype_name(a->dtype),
                            gmm_scaling_name(a->scaling), gmm_dtype_name(b->dtype), gmm_scaling_name(b->scaling));
    plan->kernel_name = gmm_qgemm_kernels[plan->kernel].name;
    tiles_n = gmm__ceil_div(n, gmm_qgemm_kernels[plan->kernel].tile_cols);
    if (max_tiles > INT32_MAX / tiles_n) return gmm__decline(plan, "has no kernel for so many tiles");
    plan->grid[0] = gmm__grid(processors, call->options.sm_limit, 1, max_tiles * tiles_n);
    gmm__mma_reserve_groups(call, plan);
    gmm__mma_reserve_table(call, plan, op == gmm_gemm_wgrad ? GMM__DW : GMM__W, GMM__MMA_MATRIX_TABLE);
    if (op != gmm_gemm_wgrad) gmm__mma_reserve_table(call, plan, GMM__W, GMM__MMA_SCALE_TABLE);
    if (op == gmm_gemm_fwd) gmm__mma_reserve_table(call, plan, GMM__BIAS, GMM__MMA_BIAS_TABLE);
    (void)snprintf(plan->note, sizeof plan->note, "%s by %s as %s, tile %d x %d, %d blocks", gmm_dtype_name(a->dtype),
                   gmm_dtype_name(b->dtype), gmm_dtype_name(dtype), (int)GMM_QGEMM_TILE_M,
                   (int)gmm_qgemm_kernels[plan->kernel].tile_cols, plan->grid[0]);
    return gmm__mma_plan_gather(call, plan, op);
}
#endif /* GMM_NO_QUANT */

/* Plans a product. Of the kernels, which all give the same bits, it chooses the one whose waves of tiles are estimated
   to cost least if all groups have the average size. */
static int gmm__mma_plan_product(const gmm__call *call, gmm__plan *plan, gmm_gemm_op op) {
    const int64_t G = call->groups.count, max_extent = INT32_MAX - 1024;
    const int64_t m = op == gmm_gemm_wgrad ? call->out : call->rows;
    const int64_t n = op == gmm_gemm_fwd ? call->out : call->in;
    const int64_t rows = call->groups.rows_hint > 0 && call->groups.rows_hint < call->rows ? call->groups.rows_hint
                                                                                            : call->rows;
    const gmm_dtype dtype = call->mat[op == gmm_gemm_dgrad ? GMM__DY : GMM__X_].dtype;
    const int32_t processors = call->ctx->device.processors;
    const int32_t shared = call->ctx->device.shared;
    double best = 0.0;
    int32_t i;
#ifndef GMM_NO_QUANT
    if (gmm__quantized(call)) return gmm__mma_plan_quantized(call, plan, op);
#endif
    if (call->rows > max_extent || call->in > max_extent || call->out > max_extent)
        return gmm__decline(plan, "takes at most %lld rows and features", (long long)max_extent);
    plan->kernel = -1;
    for (i = 0; i < GMM_GEMM_KERNELS; i++) {
        const gmm_gemm_kernel *k = &gmm_gemm_kernels[i];
        const int64_t tiles_n = gmm__ceil_div(n, k->tile_cols), per_group = gmm__ceil_div(m, k->tile_rows);
        const int64_t max_tiles = op == gmm_gemm_wgrad ? G * per_group : call->rows / k->tile_rows + G;
        const int64_t tiles = op == gmm_gemm_wgrad ? max_tiles
                                                   : G * gmm__ceil_div(gmm__ceil_div(rows, G), k->tile_rows);
        double cost;
        if (k->op != op || k->dtype != dtype || k->shared > shared) continue;
        if (max_tiles > max_extent / tiles_n) continue;
        /* waves times the cost of a tile: its area for the products, 64 times its edges for loading the operands */
        cost = (double)gmm__ceil_div(tiles * tiles_n, (int64_t)processors * k->blocks) * k->blocks *
               ((double)k->tile_rows * k->tile_cols + 64.0 * (k->tile_rows + k->tile_cols));
        if (plan->kernel >= 0 && cost >= best) continue;
        best = cost;
        plan->kernel = i;
        plan->kernel_name = k->name;
        plan->grid[0] = gmm__grid(processors, call->options.sm_limit, k->blocks, max_tiles * tiles_n);
    }
    if (plan->kernel < 0) return gmm__decline(plan, "has no kernel for so many tiles of %s", gmm_dtype_name(dtype));
    gmm__mma_reserve_groups(call, plan);
    gmm__mma_reserve_table(call, plan, op == gmm_gemm_wgrad ? GMM__DW : GMM__W, GMM__MMA_MATRIX_TABLE);
    if (op == gmm_gemm_fwd) gmm__mma_reserve_table(call, plan, GMM__BIAS, GMM__MMA_BIAS_TABLE);
    (void)snprintf(plan->note, sizeof plan->note, "tile %d x %d, %d blocks",
                   (int)gmm_gemm_kernels[plan->kernel].tile_rows, (int)gmm_gemm_kernels[plan->kernel].tile_cols,
                   plan->grid[0]);
    return gmm__mma_plan_gather(call, plan, op);
}

/* Fills in the arguments of a product except offsets and tiles, and enqueues the copies of host tables. M, N and K of
   wgrad are out_features, in_features and the rows of a group, which the kernel reads from the offsets. */
static gmm_status gmm__mma_product_args(const gmm__plan *plan, gmm_gemm_op op, gmm_gemm_args *args, gmm_stream stream) {
    const gmm__call *call = plan->call;
    const gmm_linear *d = &call->d.linear;
    const int fwd = op == gmm_gemm_fwd, wgrad = op == gmm_gemm_wgrad;
    cudaError_t e = gmm__mma_operand(plan, gmm__mma_role_a(op), 0, 0, &args->a, stream);
    if (e == cudaSuccess)
        e = gmm__mma_operand(plan, gmm__mma_role_b(op), !wgrad, GMM__MMA_MATRIX_TABLE, &args->b, stream);
    if (e == cudaSuccess)
        e = gmm__mma_operand(plan, fwd ? GMM__Y : wgrad ? GMM__DW : GMM__DX, wgrad, GMM__MMA_MATRIX_TABLE, &args->d,
                             stream);
    if (e == cudaSuccess && fwd) e = gmm__mma_operand(plan, GMM__BIAS, 1, GMM__MMA_BIAS_TABLE, &args->bias, stream);
    args->groups = call->groups.count;
    args->capacity = call->rows;
    args->m = (int32_t)(wgrad ? call->out : call->rows);
    args->n = (int32_t)(fwd ? call->out : call->in);
    args->k = (int32_t)(fwd ? call->in : call->out);
    args->alpha = d->alpha;
    args->alpha_per_group = d->alpha_per_group;
    args->zero_tail = call->groups.tail == GMM_TAIL_ZERO;
    if (fwd) args->bias_scale = d->bias_scale;
    args->prob = d->prob;
    args->beta_all = d->y_add ? 1.0f : 0.0f;
    if (wgrad) {
        args->beta = call->grad[GMM__DW].beta;
        args->frozen = call->grad[GMM__DW].frozen;
        args->beta_all = gmm__mma_beta(&call->grad[GMM__DW]);
    }
    return gmm__cuda_status(call, e);
}

#ifndef GMM_NO_QUANT
/* Launches a product of quantized operands; `p` holds the arguments that products of floats have too, and the device
   table of the weights. */
static gmm_status gmm__mma_launch_quantized(const gmm__plan *plan, gmm_gemm_op op, const gmm_gemm_args *p,
                                            gmm_stream stream) {
    const gmm__call *call = plan->call;
    const int role_a = gmm__mma_role_a(op), role_b = gmm__mma_role_b(op), fwd = op == gmm_gemm_fwd;
    gmm_qgemm_args args;
    cudaError_t e = cudaSuccess;
    memset(&args, 0, sizeof args);
    args.p = *p;
    args.a = call->mat[role_a];
    if (gmm__index_of(call, role_a)) { /* the copy of gathered floats */
        args.a.data = p->a.data;
        args.a.ld = p->a.ld;
    }
    args.b = call->mat[role_b];
    args.b.table = p->b.table;
    args.a_along = call->direction[role_a];
    args.b_along = call->direction[role_b];
    args.a_cols = (int32_t)(fwd ? call->in : call->out);
    args.b_cols = (int32_t)call->in;
    args.b_rows = (int32_t)call->out;
    args.k_round = args.b.hadamard && op == gmm_gemm_wgrad ? 16 : 1;
    args.block = args.b.scaling == GMM_SCALING_MX32 ? 32 : 128;
    if (args.b.scale_table && (args.b.flags & (uint32_t)GMM_MAT_TABLE_ON_HOST)) {
        args.b.scale_table = (void *const *)gmm__part(plan, GMM__MMA_SCALE_TABLE);
        e = gmm_launch_copy(gmm__part(plan, GMM__MMA_SCALE_TABLE), call->mat[role_b].scale_table, call->groups.count,
                            stream);
    }
    if (e == cudaSuccess) e = gmm_launch_qgemm(plan->kernel, plan->grid[0], &args, stream);
    return gmm__cuda_status(call, e);
}
#endif /* GMM_NO_QUANT */

/* Enqueues the offsets, the copies of host tables and the product. */
static gmm_status gmm__mma_launch_product(const gmm__plan *plan, gmm_gemm_op op, gmm_stream stream) {
    const gmm__call *call = plan->call;
    int32_t tile_rows;
    gmm_gemm_args args;
    gmm_groups groups;
    gmm_status s;

    tile_rows = gmm__quantized(call) ? (int32_t)GMM_QGEMM_TILE_M : gmm_gemm_kernels[plan->kernel].tile_rows;
    memset(&args, 0, sizeof args);
    args.offsets = (const int64_t *)gmm__part(plan, GMM__MMA_OFFSETS);
    args.tiles = (const int32_t *)gmm__part(plan, GMM__MMA_TILES);
    s = gmm__mma_enqueue_offsets(call, (int64_t *)gmm__part(plan, GMM__MMA_OFFSETS),
                                 (int32_t *)gmm__part(plan, GMM__MMA_TILES), tile_rows, stream);
    if (s != GMM_OK || (s = gmm__mma_product_args(plan, op, &args, stream)) != GMM_OK) return s;
    groups = call->groups;
    groups.splits = args.offsets;
    groups.form = GMM_SPLIT_OFFSETS;
    groups.dtype = GMM_I64;
    groups.on_host = groups.row_align = 0;
    if ((s = gmm__cuda_status(call, gmm__mma_gather(plan, op, &args, &groups, stream))) != GMM_OK) return s;
#ifndef GMM_NO_QUANT
    if (gmm__quantized(call)) return gmm__mma_launch_quantized(plan, op, &args, stream);
#endif
    return gmm__cuda_status(call, gmm_launch_gemm(plan->kernel, plan->grid[0], &args, stream));
}

static int gmm__mma_plan_linear_fwd(const gmm__call *call, gmm__plan *plan) {
    return gmm__mma_plan_product(call, plan, gmm_gemm_fwd);
}
static int gmm__mma_plan_linear_dgrad(const gmm__call *call, gmm__plan *plan) {
    return gmm__mma_plan_product(call, plan, gmm_gemm_dgrad);
}
static int gmm__mma_plan_linear_wgrad(const gmm__call *call, gmm__plan *plan) {
    return gmm__mma_plan_product(call, plan, gmm_gemm_wgrad);
}
static gmm_status gmm__mma_launch_linear_fwd(const gmm__plan *plan, gmm_stream stream) {
    return gmm__mma_launch_product(plan, gmm_gemm_fwd, stream);
}
static gmm_status gmm__mma_launch_linear_dgrad(const gmm__plan *plan, gmm_stream stream) {
    return gmm__mma_launch_product(plan, gmm_gemm_dgrad, stream);
}
static gmm_status gmm__mma_launch_linear_wgrad(const gmm__plan *plan, gmm_stream stream) {
    return gmm__mma_launch_product(plan, gmm_gemm_wgrad, stream);
}

static int gmm__mma_plan_linear_bgrad(const gmm__call *call, gmm__plan *plan) {
    const int64_t n = call->out, max_extent = INT32_MAX - 1024;
    const int64_t chunks = call->rows / GMM_BGRAD_ROWS + call->groups.count;
    const int32_t processors = call->ctx->device.processors;
    int64_t size;
    if (call->rows > max_extent || n > max_extent || chunks > max_extent ||
        !gmm__mul(chunks, n * (int64_t)sizeof(float), &size))
        return gmm__decline(plan, "takes at most %lld rows and features", (long long)max_extent);
    plan->grid[0] = gmm__grid(processors, call->options.sm_limit, 8, INT32_MAX);
    gmm__mma_reserve_groups(call, plan);
    gmm__mma_reserve_table(call, plan, GMM__DB, GMM__MMA_MATRIX_TABLE);
    gmm__mma_reserve_table(call, plan, GMM__BIAS, GMM__MMA_BIAS_TABLE);
    if (call->mat[GMM__DB].dtype != GMM_NONE) gmm__reserve(plan, GMM__MMA_BGRAD_PARTIALS, (size_t)size);
    return 1;
}

static gmm_status gmm__mma_launch_linear_bgrad(const gmm__plan *plan, gmm_stream stream) {
    const gmm__call *call = plan->call;
    const gmm_linear *d = &call->d.linear;
    gmm__mma_split split;
    gmm_bgrad_args args;
    gmm_status s;
    cudaError_t e;

    memset(&args, 0, sizeof args);
    s = gmm__mma_split_of(plan, GMM__TILES_512, NULL, &split, stream);
    args.offsets = split.offsets;
    args.tiles = split.tiles[GMM__TILES_512];
    if (s != GMM_OK) return s;
    e = gmm__mma_operand(plan, GMM__DY, 0, 0, &args.dy, stream);
    if (e == cudaSuccess) e = gmm__mma_operand(plan, GMM__DB, 1, GMM__MMA_MATRIX_TABLE, &args.db, stream);
    if (e == cudaSuccess) e = gmm__mma_operand(plan, GMM__BIAS, 1, GMM__MMA_BIAS_TABLE, &args.bias, stream);
    if (e != cudaSuccess) return gmm__cuda_status(call, e);

    if (args.db.dtype != GMM_NONE) {
        args.partials = (float *)gmm__part(plan, GMM__MMA_BGRAD_PARTIALS);
        args.beta = call->grad[GMM__DB].beta;
        args.frozen = call->grad[GMM__DB].frozen;
        args.beta_all = gmm__mma_beta(&call->grad[GMM__DB]);
    }
    args.groups = call->groups.count;
    args.n = (int32_t)call->out;
    args.capacity = call->rows;
    args.bias_scale = d->bias_scale;
    args.dy_index = gmm__row_index(call, GMM__DY);
    args.d_bias_scale = d->d_bias_scale;
    args.row_add = d->d_bias_scale_add;
    args.zero_tail = call->groups.tail == GMM_TAIL_ZERO;
    return gmm__cuda_status(call, gmm_launch_bgrad(args.dy.dtype, plan->grid[0], &args, stream));
}

#endif /* __CUDACC__ */

/* .................................................... 14.12 MMA engine: activation, routing, rows, gated layout ... */

#ifdef __CUDACC__

/* Plans and launches of the MMA engine's activation, routing, permute, pad and gated layout. */

/* Regions of the workspace, by family of operations. E is the number of experts. */
enum {
    GMM__SPLIT_OFFSETS, /* activation, pad: [G + 1] int64 row offsets */
    GMM__SPLIT_BLOCKS   /* pad: [G + 1] int32 prefix sums of the groups' blocks of `align` rows */
};
enum {
    GMM__ROUTE_COUNTS,  /* [E] int32: tokens per expert */
    GMM__ROUTE_LOSSES,  /* float: partial sums of the losses, before that of Sinkhorn's columns */
    GMM__ROUTE_SCRATCH, /* float: E values and those of groups for each warp, where shared memory does not hold them */
    GMM__ROUTE_SEQUENCES, /* [sequences][E] int32: counts by sequence */
    GMM__ROUTE_VALID,   /* [sequences] int32: tokens that are no padding */
    GMM__ROUTE_MULTIPLIERS  /* [E + 1] float: Sinkhorn's multipliers of experts, and whether they have converged */
};
enum {
    GMM__SORT_COUNTS, /* permute_map: [E][chunks] int32 slots of an expert in a chunk */
    GMM__SORT_STARTS  /* permute_map: [E] int64 first row of an expert */
};
enum { GMM__GLU_SRC_TABLE, GMM__GLU_DST_TABLE }; /* [count] addresses: device copies of host tables */
enum { GMM__ACCUMULATE_SUM };                    /* [rows, cols] float: sum of the addends of earlier launches */

/* Launch limits of a kernel of which `blocks` CTAs fit a multiprocessor. */
static gmm__launch_limits gmm__mma_launch_limits(const gmm__call *call, int32_t blocks) {
    const int32_t processors = call->ctx->device.processors;
    gmm__launch_limits limits;
    limits.max_ctas = gmm__grid(processors, call->options.sm_limit, blocks, INT32_MAX);
    limits.pdl = gmm__mma_pdl(call);
    limits.sm_limit = call->options.sm_limit;
    return limits;
}
/* Launch limits of elementwise kernels, and of kernels that stream rows. */
static gmm__launch_limits gmm__mma_elementwise_limits(const gmm__call *call) {
    return gmm__mma_launch_limits(call, GMM__ELEM_PER_SM);
}
static gmm__launch_limits gmm__mma_streaming_limits(const gmm__call *call) {
    return gmm__mma_launch_limits(call, GMM__ELEM_STREAM_PER_SM);
}

/* An operand as kernels address it. vec: its rows begin at multiples of 16 bytes and admit vector accesses. */
static gmm__view gmm__mma_view(const gmm__call *call, int role) {
    const gmm_mat *m = &call->mat[role];
    gmm__view v;
    v.data = m->dtype == GMM_NONE ? NULL : m->data;
    v.ld = m->ld;
    v.dtype = m->dtype;
    v.vec = (((uintptr_t)m->data | (uintptr_t)(m->ld * (gmm_dtype_bits(m->dtype) / 8))) & 15) == 0;
    return v;
}

static void gmm__mma_reserve_split(const gmm__call *call, gmm__plan *plan, int region) {
    gmm__reserve(plan, region, ((size_t)call->groups.count + 1) * sizeof(int64_t));
}
/* The row offsets of a call's groups: those that an MLP has computed for all of its steps, or those whose computation
   this enqueues. */
static gmm_status gmm__mma_row_offsets(const gmm__plan *plan, const int64_t **offsets, gmm_stream stream) {
    int64_t *own = (int64_t *)gmm__part(plan, GMM__SPLIT_OFFSETS);
    *offsets = plan->call->split_tiles ? (const int64_t *)plan->call->groups.splits : own;
    return plan->call->split_tiles ? GMM_OK : gmm__mma_enqueue_offsets(plan->call, own, NULL, 1, stream);
}

/* --- activation --- */

/* Columns of a block of the gate and linear columns; 0: halves, of which a block of all ffn columns is one. */
static int32_t gmm__mma_act_interleave(int32_t interleave, int64_t ffn) { return interleave == ffn ? 0 : interleave; }

static int gmm__mma_plan_act(const gmm__call *call, gmm__plan *plan) {
    if (call->rows > INT32_MAX || call->in > INT32_MAX - 1024)
        return gmm__decline(plan, "takes at most %d rows and columns", INT32_MAX - 1024);
    gmm__mma_reserve_split(call, plan, GMM__SPLIT_OFFSETS);
    return 1;
}

static gmm_status gmm__mma_launch_act(const gmm__plan *plan, gmm_stream stream) {
    const gmm__call *call = plan->call;
    const gmm_activation *d = &call->d.act;
    const int forward = call->op == GMM_OP_ACT_FWD;
    const int64_t *offsets;
    const gmm_status s = gmm__mma_row_offsets(plan, &offsets, stream);
    cudaError_t e = cudaSuccess;
    gmm__launch_limits limits;
    gmm__act_args a;
    if (s != GMM_OK) return s;
    memset(&a, 0, sizeof a);
    a.valid_rows = offsets + call->groups.count;
    a.rows = call->rows;
    a.ffn = (int32_t)call->out;
    a.interleave = gmm__mma_act_interleave(call->act.interleave, call->out);
    a.tail_zero = call->groups.tail == GMM_TAIL_ZERO;
    a.gated = gmm_act_gated(call->act.kind);
    a.kind = call->act.kind;
    a.coef = gmm_act_coefficients(&call->act);
    a.prob = d->prob;
    a.x = gmm__mma_view(call, GMM__X_);
    a.y = gmm__mma_view(call, GMM__Y);
    if (!forward) {
        a.dy = gmm__mma_view(call, GMM__DY);
        a.dx = gmm__mma_view(call, GMM__DX);
        a.dprob = d->dprob;
    }
    a.groups = call->groups.count;
    a.amax = (uint32_t *)(void *)call->act_amax;
    if (a.amax) e = cudaMemsetAsync(a.amax, 0, (size_t)a.groups * sizeof *a.amax, stream);
    if (e != cudaSuccess) return gmm__cuda_status(call, e);
    limits = gmm__mma_launch_limits(call, a.amax ? GMM__ELEM_AMAX_PER_SM : GMM__ELEM_STREAM_PER_SM);
    return gmm__cuda_status(call, forward ? gmm__k_act_fwd(&a, limits, stream) : gmm__k_act_bwd(&a, limits, stream));
}

/* --- routing --- */

static gmm__route_args gmm__mma_route_args(const gmm__plan *plan) {
    const gmm__call *call = plan->call;
    const gmm_route *r = &call->d.route;
    /* with padding the kernels divide by the numbers of tokens */
    const double tokens = r->tokens > 0 && !r->padding ? (double)r->tokens : 1.0;
    const double length = r->padding ? 1.0 : tokens / r->sequences;
    gmm__route_args a;
    memset(&a, 0, sizeof a);
    a.logits = gmm__mma_view(call, GMM__X_);
    a.tokens = r->tokens;
    a.experts = r->experts;
    a.topk = r->topk;
    a.sigmoid = r->score == GMM_SCORE_SIGMOID;
    a.normalize = r->normalize;
    a.scale = r->scale;
    a.aux = (float)((double)r->aux_coeff * r->experts / (r->topk * length * length) / r->sequences);
    a.z = (float)(r->z_coeff / tokens);
    a.indices = r->indices;
    a.scratch = (float *)gmm__part(plan, GMM__ROUTE_SCRATCH);
    a.groups = r->groups > 1 ? r->groups : 1;
    a.group_topk = r->group_topk;
    a.group_sum = r->group_sum;
    a.sequences = r->sequences;
    a.sequence_first = r->sequence_first;
    a.sequence_counts = r->sequence_counts;
    a.padding = r->padding;
    a.valid = r->padding ? (int32_t *)gmm__part(plan, GMM__ROUTE_VALID) : NULL;
    return a;
}

/* Whether a loss is requested and its coefficient is not 0. A query counts every loss as requested. */
static int gmm__mma_has_route_losses(const gmm__call *call) {
    const gmm_route *r = &call->d.route;
    if (call->query) return r->aux_coeff != 0.0f || r->z_coeff != 0.0f;
    return (r->aux_loss && r->aux_coeff != 0.0f) || (r->z_loss && r->z_coeff != 0.0f);
}

/* Reserves what forward and backward need. */
static void gmm__mma_reserve_route(const gmm__call *call, gmm__plan *plan) {
    const gmm_route *r = &call->d.route;
    const int32_t floats = gmm__route_floats(r->experts, r->groups);
    gmm__reserve(plan, GMM__ROUTE_SCRATCH,
                 gmm__route_scratch_bytes(r->tokens, floats, gmm__mma_elementwise_limits(call).max_ctas));
    gmm__reserve(plan, GMM__ROUTE_VALID, (size_t)r->sequences * sizeof(int32_t));
}

static int gmm__mma_plan_topk_fwd(const gmm__call *call, gmm__plan *plan) {
    const gmm_route *r = &call->d.route;
    const int losses = gmm__mma_has_route_losses(call);
    const size_t losses_bytes = losses ? gmm__route_sums_bytes(r->tokens, r->experts, r->sequences) : 0;
    const size_t sinkhorn_bytes = r->sinkhorn ? gmm__route_sums_bytes(r->tokens, r->experts, 1) : 0;
    gmm__reserve(plan, GMM__ROUTE_COUNTS, (size_t)r->experts * sizeof(int32_t));
    gmm__reserve(plan, GMM__ROUTE_LOSSES, losses_bytes > sinkhorn_bytes ? losses_bytes : sinkhorn_bytes);
    gmm__reserve(plan, GMM__ROUTE_SEQUENCES,
                 r->sequences > 1 && losses ? (size_t)r->sequences * (size_t)r->experts * sizeof(int32_t) : 0);
    gmm__reserve(plan, GMM__ROUTE_MULTIPLIERS, r->sinkhorn ? ((size_t)r->experts + 1) * sizeof(float) : 0);
    gmm__mma_reserve_route(call, plan);
    return 1;
}
static gmm_status gmm__mma_launch_topk_fwd(const gmm__plan *plan, gmm_stream stream) {
    const gmm__call *call = plan->call;
    const gmm_route *r = &call->d.route;
    const int losses = gmm__mma_has_route_losses(call);
    gmm__route_args a = gmm__mma_route_args(plan);
    a.expert_bias = r->expert_bias;
    a.probs = r->probs;
    a.counts = r->counts ? r->counts : (int32_t *)gmm__part(plan, GMM__ROUTE_COUNTS);
    a.offsets = r->offsets;
    a.aux_loss = r->aux_loss;
    a.z_loss = r->z_loss;
    a.total_counts = r->total_counts;
    a.iterations = r->sinkhorn;
    a.tolerance = r->sinkhorn_tolerance;
    a.multipliers = r->sinkhorn ? (float *)gmm__part(plan, GMM__ROUTE_MULTIPLIERS) : NULL;
    if (losses || r->sinkhorn) a.sums = (float *)gmm__part(plan, GMM__ROUTE_LOSSES);
    if (losses && r->sequences > 1 && !a.sequence_counts)
        a.sequence_counts = (int32_t *)gmm__part(plan, GMM__ROUTE_SEQUENCES);
    return gmm__cuda_status(call, gmm__k_topk_fwd(&a, losses, gmm__mma_elementwise_limits(call), stream));
}

static int gmm__mma_plan_topk_bwd(const gmm__call *call, gmm__plan *plan) {
    gmm__mma_reserve_route(call, plan);
    return 1;
}
static gmm_status gmm__mma_launch_topk_bwd(const gmm__plan *plan, gmm_stream stream) {
    const gmm__call *call = plan->call;
    gmm__route_args a = gmm__mma_route_args(plan);
    a.dlogits = gmm__mma_view(call, GMM__DX);
    a.counts = call->d.route.counts;
    a.dprobs = call->d.route.dprobs;
    a.dloss = call->d.route.dloss;
    return gmm__cuda_status(call, gmm__k_topk_bwd(&a, gmm__mma_elementwise_limits(call), stream));
}

static gmm_status gmm__mma_launch_dense(const gmm__plan *plan, gmm_stream stream) {
    const gmm__call *call = plan->call;
    const gmm_dense_route *d = &call->d.dense;
    gmm__dense_args a;
    a.tokens = d->tokens;
    a.experts = d->experts;
    a.topk = d->topk;
    a.to_dense = call->op == GMM_OP_ROUTE_TO_DENSE;
    a.map = d->map;
    a.values = d->values;
    a.probs = d->probs;
    a.indices = d->indices;
    a.counts = d->counts;
    return gmm__cuda_status(call, gmm__k_route_dense(&a, d->offsets, gmm__mma_elementwise_limits(call), stream));
}

static gmm_status gmm__mma_launch_expert_bias(const gmm__plan *plan, gmm_stream stream) {
    const gmm__call *call = plan->call;
    const gmm_expert_bias *d = &call->d.bias;
    gmm__bias_args a;
    a.total_counts = d->total_counts;
    a.bias = d->bias;
    a.rate = d->rate;
    a.experts = d->experts;
    a.layers = d->layers;
    return gmm__cuda_status(call, gmm__k_expert_bias(&a, gmm__mma_elementwise_limits(call), stream));
}

/* --- permute, unpermute --- */

static int gmm__mma_plan_permute_map(const gmm__call *call, gmm__plan *plan) {
    const gmm_permute *p = &call->d.permute;
    gmm__reserve(plan, GMM__SORT_COUNTS, gmm__map_counts_bytes(p->tokens * p->topk, p->experts));
    gmm__reserve(plan, GMM__SORT_STARTS, (size_t)p->experts * sizeof(int64_t));
    return 1;
}
static gmm_status gmm__mma_launch_permute_map(const gmm__plan *plan, gmm_stream stream) {
    const gmm__call *call = plan->call;
    const gmm_permute *p = &call->d.permute;
    gmm__map_args a;
    memset(&a, 0, sizeof a);
    a.indices = p->indices;
    a.slots = p->tokens * p->topk;
    a.capacity = p->capacity;
    a.experts = p->experts;
    a.align = p->align;
    a.row_of = p->row_of;
    a.slot_of = p->slot_of;
    a.sizes = p->sizes;
    a.fault = p->fault;
    a.counts = (int32_t *)gmm__part(plan, GMM__SORT_COUNTS);
    a.starts = (int64_t *)gmm__part(plan, GMM__SORT_STARTS);
    return gmm__cuda_status(call, gmm__k_permute_map(&a, gmm__mma_elementwise_limits(call), stream));
}

static gmm__permute_args gmm__mma_permute_args(const gmm__call *call, int src, int dst) {
    const gmm_permute *p = &call->d.permute;
    gmm__permute_args a;
    memset(&a, 0, sizeof a);
    a.src = gmm__mma_view(call, src);
    a.dst = gmm__mma_view(call, dst);
    a.tokens = p->tokens;
    a.capacity = p->capacity;
    a.hidden = p->hidden;
    a.topk = p->topk;
    a.experts = p->experts;
    a.tail_zero = p->tail == GMM_TAIL_ZERO;
    a.row_of = p->row_of;
    a.slot_of = p->slot_of;
    a.sizes = p->sizes;
    a.fault = p->fault;
    return a;
}

static int gmm__mma_plan_permute(const gmm__call *call, gmm__plan *plan) {
    if (call->d.permute.hidden > INT32_MAX - 1024)
        return gmm__decline(plan, "takes at most %d columns", INT32_MAX - 1024);
    return 1;
}
static gmm_status gmm__mma_launch_permute_fwd(const gmm__plan *plan, gmm_stream stream) {
    const gmm__call *call = plan->call;
    gmm__permute_args a = gmm__mma_permute_args(call, GMM__X_, GMM__ROWS);
    a.probs = call->d.permute.probs;
    a.row_probs = call->d.permute.row_probs;
    if (!call->d.permute.rows)
        return gmm__cuda_status(call, gmm__k_gather_row_probs(&a, gmm__mma_elementwise_limits(call), stream));
    return gmm__cuda_status(call, gmm__k_permute_rows(&a, gmm__mma_streaming_limits(call), stream));
}

static gmm_status gmm__mma_launch_permute_bwd(const gmm__plan *plan, gmm_stream stream) {
    const gmm__call *call = plan->call;
    gmm__permute_args a = gmm__mma_permute_args(call, GMM__DROWS, GMM__DX);
    cudaError_t e = cudaSuccess;
    if (call->d.permute.dx) e = gmm__k_unpermute_fwd(&a, gmm__mma_elementwise_limits(call), stream);
    a.row_probs_in = call->d.permute.drow_probs;
    a.dprobs = call->d.permute.dprobs;
    if (e == cudaSuccess && a.dprobs) e = gmm__k_gather_probs(&a, gmm__mma_elementwise_limits(call), stream);
    return gmm__cuda_status(call, e);
}

static gmm_status gmm__mma_launch_unpermute_fwd(const gmm__plan *plan, gmm_stream stream) {
    const gmm__call *call = plan->call;
    gmm__permute_args a = gmm__mma_permute_args(call, GMM__ROWS, GMM__OUT);
    a.probs = call->d.permute.probs;
    return gmm__cuda_status(call, gmm__k_unpermute_fwd(&a, gmm__mma_elementwise_limits(call), stream));
}

static gmm_status gmm__mma_launch_unpermute_bwd(const gmm__plan *plan, gmm_stream stream) {
    const gmm__call *call = plan->call;
    const gmm_permute *p = &call->d.permute;
    cudaError_t e = cudaSuccess;
    if (p->drows) {
        gmm__permute_args a = gmm__mma_permute_args(call, GMM__DOUT, GMM__DROWS);
        a.probs = p->probs;
        if (!a.probs && a.src.dtype == a.dst.dtype)
            e = gmm__k_permute_rows(&a, gmm__mma_streaming_limits(call), stream);
        else
            e = gmm__k_unpermute_bwd(&a, gmm__mma_elementwise_limits(call), stream);
    }
    if (e == cudaSuccess && p->dprobs) {
        gmm__permute_args a = gmm__mma_permute_args(call, GMM__DOUT, GMM__ROWS);
        a.dprobs = p->dprobs;
        e = gmm__k_unpermute_dots(&a, gmm__mma_elementwise_limits(call), stream);
    }
    return gmm__cuda_status(call, e);
}

/* --- pad, unpad --- */

static int gmm__mma_plan_pad(const gmm__call *call, gmm__plan *plan) {
    if (call->rows > INT32_MAX || call->d.pad.padded_capacity > INT32_MAX)
        return gmm__decline(plan, "takes at most %d rows", INT32_MAX);
    gmm__mma_reserve_split(call, plan, GMM__SPLIT_OFFSETS);
    gmm__reserve(plan, GMM__SPLIT_BLOCKS, ((size_t)call->groups.count + 1) * sizeof(int32_t));
    return 1;
}

static gmm_status gmm__mma_launch_pad(const gmm__plan *plan, gmm_stream stream) {
    const gmm__call *call = plan->call;
    const gmm_padding *d = &call->d.pad;
    int64_t *offsets = (int64_t *)gmm__part(plan, GMM__SPLIT_OFFSETS);
    int32_t *blocks = (int32_t *)gmm__part(plan, GMM__SPLIT_BLOCKS);
    const gmm_status s = gmm__mma_enqueue_offsets(call, offsets, blocks, d->align, stream);
    gmm__pad_args a;
    if (s != GMM_OK) return s;
    memset(&a, 0, sizeof a);
    a.pad = call->op == GMM_OP_PAD;
    a.src = gmm__mma_view(call, GMM__X_);
    a.dst = gmm__mma_view(call, GMM__Y);
    a.rows = a.pad ? d->padded_capacity : call->rows;
    a.cols = d->cols;
    a.offsets = offsets;
    a.blocks = blocks;
    a.groups = call->groups.count;
    a.align = d->align;
    a.capacity = d->padded_capacity;
    a.src_prob = d->src_prob;
    a.dst_prob = d->dst_prob;
    a.tail_zero = call->groups.tail == GMM_TAIL_ZERO;
    a.sizes = a.pad ? d->sizes : NULL;
    a.fault = call->groups.fault;
    return gmm__cuda_status(call, gmm__k_pad(&a, gmm__mma_streaming_limits(call), stream));
}

/* --- GLU interleave --- */

static int gmm__mma_plan_glu_interleave(const gmm__call *call, gmm__plan *plan) {
    const int role[2] = { GMM__X_, GMM__Y }, region[2] = { GMM__GLU_SRC_TABLE, GMM__GLU_DST_TABLE };
    const gmm_glu *d = &call->d.glu;
    const int64_t max_ffn = INT32_MAX / 16; /* 2 ffn elements of at most 8 bytes: offsets in bytes fit 32 bits */
    int i;
    if (d->ffn > max_ffn || d->count > (d->axis == GMM_GLU_ROWS ? INT32_MAX / (2 * d->ffn) : INT32_MAX))
        return gmm__decline(plan, "takes at most %lld pairs, and %d rows in all", (long long)max_ffn, INT32_MAX);
    for (i = 0; i < 2; i++)
        if (call->mat[role[i]].flags & (uint32_t)GMM_MAT_TABLE_ON_HOST)
            gmm__reserve(plan, region[i], (size_t)call->d.glu.count * sizeof(void *));
    return 1;
}

/* Sets *table to a table in device memory; a host table is copied to the workspace. */
static cudaError_t gmm__mma_device_table(const gmm__plan *plan, int role, int region, void *const **table,
                                         gmm_stream stream) {
    const gmm_mat *m = &plan->call->mat[role];
    *table = m->table;
    if (!m->table || !(m->flags & (uint32_t)GMM_MAT_TABLE_ON_HOST)) return cudaSuccess;
    *table = (void *const *)gmm__part(plan, region);
    return gmm_launch_copy(gmm__part(plan, region), m->table, plan->call->d.glu.count, stream);
}

static gmm_status gmm__mma_launch_glu_interleave(const gmm__plan *plan, gmm_stream stream) {
    const gmm__call *call = plan->call;
    const gmm_glu *d = &call->d.glu;
    const gmm__launch_limits limits = gmm__mma_streaming_limits(call);
    gmm__glu_args a;
    cudaError_t e;
    memset(&a, 0, sizeof a);
    a.src = gmm__mma_view(call, GMM__X_);
    a.dst = gmm__mma_view(call, GMM__Y);
    a.src_stride = call->mat[GMM__X_].group_stride;
    a.dst_stride = call->mat[GMM__Y].group_stride;
    a.count = d->count;
    a.ffn = d->ffn;
    a.cols = d->cols;
    a.block = d->block;
    a.inverse = d->inverse;
    if (d->axis == GMM_GLU_COLUMNS) return gmm__cuda_status(call, gmm__k_glu_columns(&a, limits, stream));
    e = gmm__mma_device_table(plan, GMM__X_, GMM__GLU_SRC_TABLE, &a.src_table, stream);
    if (e == cudaSuccess) e = gmm__mma_device_table(plan, GMM__Y, GMM__GLU_DST_TABLE, &a.dst_table, stream);
    if (e == cudaSuccess) e = gmm__k_glu_rows(&a, limits, stream);
    return gmm__cuda_status(call, e);
}

/* --- accumulate, convert: plans and launches of the MMA engine --- */

static int gmm__mma_plan_convert(const gmm__call *call, gmm__plan *plan) {
    return call->rows <= INT32_MAX ? 1 : gmm__decline(plan, "takes at most %d rows", INT32_MAX);
}
/* A launch reads at most GMM__ELEM_ADDENDS addends; with more of them, the fp32 sum stays in the workspace between
   launches. */
static int gmm__mma_plan_accumulate(const gmm__call *call, gmm__plan *plan) {
    if (call->d.sum.count > GMM__ELEM_ADDENDS)
        gmm__reserve(plan, GMM__ACCUMULATE_SUM, (size_t)call->rows * (size_t)call->in * sizeof(float));
    return gmm__mma_plan_convert(call, plan);
}

static gmm_status gmm__mma_launch_accumulate(const gmm__plan *plan, gmm_stream stream) {
    const gmm__call *call = plan->call;
    const gmm_accumulation *d = &call->d.sum;
    cudaError_t e = cudaSuccess;
    gmm__accumulate_args a;
    gmm__view sum;
    int32_t first, j;
    memset(&a, 0, sizeof a);
    memset(&sum, 0, sizeof sum);
    sum.ld = call->in;
    sum.dtype = GMM_F32;
    sum.vec = call->in % 4 == 0;
    a.rows = call->rows;
    a.cols = call->in;
    for (first = 0; first < d->count && e == cudaSuccess; first += a.count) {
        const int last = d->count - first <= GMM__ELEM_ADDENDS;
        a.count = last ? d->count - first : (int32_t)GMM__ELEM_ADDENDS;
        a.x = gmm__mma_view(call, GMM__X_);
        for (j = 0; j < a.count; j++) { /* tables of addends are in host memory */
            a.addends[j] = (const char *)gmm__at(&call->mat[GMM__X_], first + j, 0, 0);
            a.x.vec &= ((uintptr_t)a.addends[j] & 15) == 0;
        }
        if (d->count > GMM__ELEM_ADDENDS) sum.data = gmm__part(plan, GMM__ACCUMULATE_SUM);
        if (first > 0) a.start = sum;
        a.y = last ? gmm__mma_view(call, GMM__Y) : sum;
        a.scale = last ? d->scale : 1.0f;
        a.beta = last ? d->beta : 0.0f;
        e = gmm__k_accumulate(&a, gmm__mma_streaming_limits(call), stream);
    }
    return gmm__cuda_status(call, e);
}

static gmm_status gmm__mma_launch_convert(const gmm__plan *plan, gmm_stream stream) {
    const gmm__call *call = plan->call;
    gmm__convert_args a;
    memset(&a, 0, sizeof a);
    a.src = gmm__mma_view(call, GMM__X_);
    a.dst = gmm__mma_view(call, GMM__Y);
    a.rows = call->rows;
    a.cols = call->in;
    return gmm__cuda_status(call, gmm__k_convert(&a, gmm__mma_streaming_limits(call), stream));
}

#ifndef GMM_NO_QUANT
/* --- quantization: plans and launches of the MMA engine --- */

/* Regions of the workspace, behind GMM__MMA_OFFSETS and GMM__MMA_TILES. */
enum {
    GMM__MMA_QUANT_AMAX = 2, /* float: the amaxes that gmm__mma_quant_amax_count counts */
    GMM__MMA_QUANT_TABLES,   /* device copies of host tables: per operand, addresses of data and of scales */
    GMM__MMA_QUANT_BGRAD     /* workspace of the bias gradient (quantization.db) */
};

/* Number of amaxes in the workspace. counts[0]: one per unit for each of the two copies; counts[1]: one per row;
   counts[2]: one per column and unit. */
static size_t gmm__mma_quant_amax_count(const gmm__call *call, size_t counts[3]) {
    const gmm_format *f = &call->format;
    const size_t units = (size_t)gmm__units(call);
    const size_t rows = (size_t)(gmm__grouped(call) ? call->rows : call->units * call->rows);
    const int by_row = f->scaling == GMM_SCALING_ROW;
    counts[0] = 2 * units;
    counts[1] = by_row || f->row_amax ? rows : 0;
    counts[2] = by_row && call->mat[GMM__DX].dtype != GMM_NONE ? units * (size_t)call->in : 0;
    return counts[0] + counts[1] + counts[2];
}
/* Describes the bias gradient of a quantization call (quantization.db) as a linear layer. */
static gmm_linear gmm__mma_quant_bgrad(const gmm__call *call, gmm_options *options, gmm_grad *grad) {
    gmm_linear l = GMM_ZERO;
    *options = call->options;
    options->engine = GMM_ENGINE_MMA;
    *grad = call->grad[GMM__DB];
    grad->mat = &call->mat[GMM__DB];
    l.groups = &call->groups;
    l.options = options;
    l.in_features = 1;
    l.out_features = call->in;
    l.dy = &call->mat[GMM__DY];
    l.dy_index = call->d.quant.src_index;
    l.index_rows = call->d.quant.index_rows;
    l.index_div = call->d.quant.index_div;
    l.db = grad;
    return l;
}

/* Checks the limits of the kernels, and reserves offsets and strips of the units. */
static int gmm__mma_plan_quant_units(const gmm__call *call, gmm__plan *plan) {
    const size_t units = (size_t)gmm__units(call);
    if (!gmm__mma_takes_scalings(call, plan)) return 0;
    if (gmm__strips(call) > INT32_MAX / GMM_TILE || gmm__units(call) > INT32_MAX - 1)
        return gmm__decline(plan, "takes at most %lld padded rows", (long long)INT32_MAX);
    gmm__reserve(plan, GMM__MMA_OFFSETS, (units + 1) * sizeof(int64_t));
    gmm__reserve(plan, GMM__MMA_TILES, (units + 1) * sizeof(int32_t));
    return 1;
}
static int gmm__mma_plan_quantize(const gmm__call *call, gmm__plan *plan) {
    const gmm_quantization *d = &call->d.quant;
    size_t counts[3], bgrad_bytes = 0;
    if (!gmm__mma_plan_quant_units(call, plan)) return 0;
    gmm__reserve(plan, GMM__MMA_QUANT_AMAX, gmm__mma_quant_amax_count(call, counts) * sizeof(float));
    gmm__reserve(plan, GMM__MMA_QUANT_TABLES, gmm__grouped(call) ? 0 : 6 * (size_t)call->units * sizeof(void *));
    if (d->db) {
        gmm_options options;
        gmm_grad grad;
        const gmm_linear l = gmm__mma_quant_bgrad(call, &options, &grad);
        if (!gmm__mlp_size_linear(plan, GMM_OP_LINEAR_BGRAD, &l, &bgrad_bytes, plan)) return 0;
    }
    gmm__reserve(plan, GMM__MMA_QUANT_BGRAD, bgrad_bytes);
    return 1;
}

/* Describes an operand with its tables in device memory. Host tables are copied to the tables `slot` (data) and
   slot + 1 (scales) of `region`. */
static cudaError_t gmm__mma_quant_operand(const gmm__plan *plan, int region, int role, int slot, gmm_mat *out,
                                          gmm_stream stream) {
    const gmm_mat *m = &plan->call->mat[role];
    void **table = (void **)gmm__part(plan, region) + slot * plan->call->units;
    cudaError_t e = cudaSuccess;
    *out = *m;
    if (m->dtype == GMM_NONE || !m->table || !(m->flags & (uint32_t)GMM_MAT_TABLE_ON_HOST)) return e;
    out->table = (void *const *)table;
    e = gmm_launch_copy(table, m->table, plan->call->units, stream);
    if (!m->scale_table || e != cudaSuccess) return e;
    out->scale_table = (void *const *)(table + plan->call->units);
    return gmm_launch_copy(table + plan->call->units, m->scale_table, plan->call->units, stream);
}

/* Zeroes the rows of a matrix behind the last group: `bytes` bytes each, `pitch` bytes apart. */
static cudaError_t gmm__mma_zero_quant_tail(const gmm__plan *plan, const int64_t *offsets, const gmm_mat *m,
                                            int64_t bytes, int64_t pitch, const int32_t *skip, gmm_stream stream) {
    gmm__quant_tail_args t;
    memset(&t, 0, sizeof t);
    t.data = (uint8_t *)m->data;
    t.pitch = pitch;
    t.bytes = bytes;
    t.rows = plan->call->rows;
    t.valid_rows = offsets + plan->call->groups.count;
    t.skip = skip;
    return gmm__k_quantize_tail(&t, stream);
}

/* Decides whether the vectorized kernels serve the call, and fills in their arguments (see gmm__quant_args). */
static void gmm__mma_quant_vectorized(const gmm__call *call, gmm__quant_args *a) {
    const gmm_format *f = &call->format;
    const int transformed = f->hadamard && a->columnwise.dtype != GMM_NONE;
    /* the instances with GMM__HADAMARD transform, and round stochastically */
    const int hadamard_instance = transformed || f->stochastic;
    const gmm_mat *mat[3];
    uint64_t misaligned = (uint64_t)a->cols % 8; /* not 0: some address, pitch or extent does not admit vectors */
    int k;
    mat[0] = &a->rowwise;
    mat[1] = &a->columnwise;
    mat[2] = &a->src;
    for (k = 0; k < 3; k++) {
        const gmm_mat *m = mat[k];
        const int64_t bits = gmm_dtype_bits(m->dtype);
        /* one access: eight elements of a row, or 16 bytes of a transposed copy or of the source */
        const int64_t access_bytes = k == 2 || (k == 1 && f->scaling != GMM_SCALING_MX32) ? 16 : bits;
        if (m->dtype == GMM_NONE) continue;
        a->step[k] = a->grouped ? 0 : m->group_stride * bits / 8;
        if (k < 2 && !a->grouped)
            a->scale_step[k] = gmm__scale_count(m->scaling, k ? a->cols : a->rows, k ? a->rows : a->cols) *
                               (f->scaling == GMM_SCALING_MX32 || f->scaling == GMM_SCALING_NV16 ? 1 : 4);
        else if (k < 2 && f->scaling == GMM_SCALING_TENSOR) a->scale_step[k] = 4;
        misaligned |= (uint64_t)(m->table != NULL) | ((uintptr_t)m->data & (uint64_t)(access_bytes - 1)) |
                      ((uint64_t)(m->ld * bits / 8) & (uint64_t)(access_bytes - 1)) |
                      ((uint64_t)a->step[k] & (uint64_t)(access_bytes - 1)) |
                      (uint64_t)(m->scaling != GMM_SCALING_NONE && k == 2) | ((uintptr_t)m->scale & 3);
        if (k == 1 && !a->grouped && f->scaling != GMM_SCALING_MX32)
            misaligned |= (uint64_t)a->rows % (f->dtype == GMM_E2M1 ? 32 : 16);
    }
    a->vectorized = !misaligned && a->cols <= INT32_MAX / 2 && a->rows <= INT32_MAX / 2 && !f->four_over_six &&
                    !f->row_amax && !(hadamard_instance && a->src.dtype != GMM_BF16) &&
                    !(f->dtype == GMM_E2M1 && f->scaling == GMM_SCALING_MX32);
    if (!a->vectorized) return;
    a->vectorized += hadamard_instance; /* 2: the GMM__HADAMARD instances serve */
    a->groups = call->groups;
    a->warp_split = a->grouped && call->groups.count <= 32 && !call->groups.on_host &&
                    call->groups.tail == GMM_TAIL_KEEP;
    a->record = f->delayed && a->phase != GMM_QUANT_AMAX && (a->rowwise.amax || a->columnwise.amax);
    a->backward = f->scaling == GMM_SCALING_ROW || f->scaling == GMM_SCALING_NV16 ||
                  (f->scaling == GMM_SCALING_TENSOR && !f->delayed);
    if (a->phase == GMM_QUANT_ALL && !transformed) a->amax[1] = a->amax[0]; /* both copies have the same values */
    if (a->phase != GMM_QUANT_CAST) return;
    a->amax[0] = a->rowwise.dtype != GMM_NONE ? a->rowwise.amax : a->columnwise.amax;
    a->amax[1] = a->columnwise.dtype != GMM_NONE && f->scaling == GMM_SCALING_NV16 ? a->columnwise.amax : a->amax[0];
}

/* Describes the activation whose result is the source. */
static gmm__act_source gmm__mma_act_source(const gmm__call *call) {
    gmm__act_source act;
    memset(&act, 0, sizeof act);
    if (!call->act_source) return act;
    act.kind = call->act.kind;
    act.coef = gmm_act_coefficients(&call->act);
    act.gated = gmm_act_gated(call->act.kind);
    act.interleave = gmm__mma_act_interleave(call->act.interleave, call->in);
    act.layout = gmm__k_act_layout(act.gated, act.interleave);
    act.linear = act.layout == GMM__GLU_PAIRS ? 8 : act.interleave ? act.interleave : (int32_t)call->in;
    act.prob = call->act_source->prob;
    return act;
}

/* Enqueues offsets, amaxes, casts, zeros behind the last group, and the bias gradient. */
static gmm_status gmm__mma_launch_quantize(const gmm__plan *plan, gmm_stream stream) {
    const gmm__call *call = plan->call;
    const gmm_quantization *d = &call->d.quant;
    const gmm_format *f = &call->format;
    const int32_t processors = call->ctx->device.processors;
    const int tensor_amax = (f->scaling == GMM_SCALING_TENSOR && !f->delayed) ||
                            (f->scaling == GMM_SCALING_NV16 && !f->row_amax);
    const int records_amax = f->delayed && (call->mat[GMM__Y].amax || call->mat[GMM__DX].amax);
    size_t counts[3], floats = gmm__mma_quant_amax_count(call, counts);
    float *amax = (float *)gmm__part(plan, GMM__MMA_QUANT_AMAX);
    gmm__quant_args a;
    cudaError_t e;
    int k;

    memset(&a, 0, sizeof a);
    a.format = *f;
    a.grouped = gmm__grouped(call);
    a.phase = d->phase;
    a.first_group = d->first_group;
    a.units = gmm__units(call);
    a.rows = call->rows;
    a.cols = call->in;
    a.col_tiles = gmm__ceil_div(call->in, GMM_TILE);
    a.amax[0] = amax;
    a.amax[1] = amax + a.units;
    if (counts[1]) a.lines = amax + counts[0];
    if (counts[2]) a.columns = amax + counts[0] + counts[1];
    a.scale = d->scale;
    a.skip = d->skip;
    a.random = d->random;
    a.index.at = d->src_index;
    a.index.fault = call->groups.fault;
    a.index.div = d->index_div;
    a.index.rows = (int32_t)d->index_rows;
    e = gmm__mma_quant_operand(plan, GMM__MMA_QUANT_TABLES, GMM__DY, 0, &a.src, stream);
    if (e == cudaSuccess) e = gmm__mma_quant_operand(plan, GMM__MMA_QUANT_TABLES, GMM__Y, 2, &a.rowwise, stream);
    if (e == cudaSuccess) e = gmm__mma_quant_operand(plan, GMM__MMA_QUANT_TABLES, GMM__DX, 4, &a.columnwise, stream);
    a.act = gmm__mma_act_source(call);
    gmm__mma_quant_vectorized(call, &a);
    if (e == cudaSuccess && call->act_source && !a.vectorized) e = cudaErrorInvalidValue; /* gmm__mlp_join_of errs */
    if (e == cudaSuccess && a.grouped && !a.warp_split) {
        gmm__mma_split split;
        const gmm_status s = gmm__mma_split_of(plan, GMM__TILES_128, NULL, &split, stream);
        if (s != GMM_OK) return s;
        a.offsets = split.offsets;
        a.tiles = split.tiles[GMM__TILES_128];
    }
    if (e == cudaSuccess && d->phase != GMM_QUANT_CAST && (tensor_amax || records_amax || a.lines))
        e = cudaMemsetAsync(amax, 0, floats * sizeof(float), stream);
    if (e != cudaSuccess) return gmm__cuda_status(call, e);
    a.source = a.src.scaling == GMM_SCALING_NONE ? a.src.dtype : GMM_F32;
    e = gmm__k_quantize(&a, d->phase != GMM_QUANT_CAST && (tensor_amax || (records_amax && !a.record) || a.lines),
                        d->phase != GMM_QUANT_AMAX, gmm__strips(call),
                        gmm__grid(processors, call->options.sm_limit, GMM__QUANT_PER_SM, INT32_MAX),
                        gmm__mma_streaming_limits(call).max_ctas, stream);
    for (k = 0; k < 2 && a.grouped && call->groups.tail == GMM_TAIL_ZERO && d->phase != GMM_QUANT_AMAX; k++) {
        const gmm_mat *m = &call->mat[k ? GMM__DX : GMM__Y];
        const int64_t bits = gmm_dtype_bits(m->dtype);
        if (m->dtype == GMM_NONE || (k && f->scaling != GMM_SCALING_MX32) || e != cudaSuccess) continue;
        e = gmm__mma_zero_quant_tail(plan, a.offsets, m, call->in * bits / 8, m->ld * bits / 8, d->skip, stream);
    }
    if (e == cudaSuccess && d->db) {
        gmm_options options;
        gmm_grad grad;
        const gmm_linear l = gmm__mma_quant_bgrad(call, &options, &grad);
        return gmm__linear_run(call->ctx, GMM_OP_LINEAR_BGRAD, call->function, &l,
                               gmm__part(plan, GMM__MMA_QUANT_BGRAD),
                               plan->workspace_bytes - plan->part[GMM__MMA_QUANT_BGRAD], stream);
    }
    return gmm__cuda_status(call, e);
}

static int gmm__mma_plan_dequantize(const gmm__call *call, gmm__plan *plan) {
    if (!gmm__mma_plan_quant_units(call, plan)) return 0;
    gmm__reserve(plan, GMM__MMA_QUANT_TABLES, gmm__grouped(call) ? 0 : 3 * (size_t)call->units * sizeof(void *));
    return 1;
}
static gmm_status gmm__mma_launch_dequantize(const gmm__plan *plan, gmm_stream stream) {
    const gmm__call *call = plan->call;
    const int32_t processors = call->ctx->device.processors;
    const gmm_mat *dst = &call->mat[GMM__Y];
    gmm__dequant_args a;
    cudaError_t e;
    memset(&a, 0, sizeof a);
    a.direction = call->d.dequant.direction;
    a.grouped = gmm__grouped(call);
    a.units = gmm__units(call);
    a.rows = call->rows;
    a.cols = call->in;
    a.col_tiles = gmm__ceil_div(call->in, GMM_TILE);
    if (a.grouped) {
        gmm__mma_split split;
        const gmm_status s = gmm__mma_split_of(plan, GMM__TILES_128, NULL, &split, stream);
        if (s != GMM_OK) return s;
        a.offsets = split.offsets;
        a.tiles = split.tiles[GMM__TILES_128];
    }
    e = gmm__mma_quant_operand(plan, GMM__MMA_QUANT_TABLES, GMM__DY, 0, &a.src, stream);
    if (e == cudaSuccess) e = gmm__mma_quant_operand(plan, GMM__MMA_QUANT_TABLES, GMM__Y, 2, &a.dst, stream);
    if (e == cudaSuccess)
        e = gmm__k_dequantize(&a, gmm__strips(call) * a.col_tiles,
                              gmm__grid(processors, call->options.sm_limit, GMM__QUANT_PER_SM, INT32_MAX), stream);
    if (e == cudaSuccess && a.grouped && call->groups.tail == GMM_TAIL_ZERO) {
        const int64_t size = gmm_dtype_bits(dst->dtype) / 8;
        e = gmm__mma_zero_quant_tail(plan, a.offsets, dst, call->in * size, dst->ld * size, NULL, stream);
    }
    return gmm__cuda_status(call, e);
}

/* One matrix needs no workspace: the only address of its host table is passed to the kernel. */
static int gmm__mma_plan_transpose(const gmm__call *call, gmm__plan *plan) {
    gmm__reserve(plan, GMM__MMA_QUANT_TABLES, call->units > 1 ? 4 * (size_t)call->units * sizeof(void *) : 0);
    return 1;
}
static cudaError_t gmm__mma_transpose_operand(const gmm__plan *plan, int role, int slot, gmm_mat *out,
                                              gmm_stream stream) {
    const gmm_mat *m = &plan->call->mat[role];
    if (plan->call->units > 1 || !m->table || !(m->flags & (uint32_t)GMM_MAT_TABLE_ON_HOST))
        return gmm__mma_quant_operand(plan, GMM__MMA_QUANT_TABLES, role, slot, out, stream);
    *out = *m;
    out->data = m->table[0];
    out->scale = m->scale_table[0];
    out->table = out->scale_table = NULL;
    return cudaSuccess;
}
static gmm_status gmm__mma_launch_transpose(const gmm__plan *plan, gmm_stream stream) {
    const gmm__call *call = plan->call;
    const int32_t processors = call->ctx->device.processors;
    gmm__transpose_args a;
    cudaError_t e;
    memset(&a, 0, sizeof a);
    a.units = gmm__units(call);
    a.rows = call->rows;
    a.cols = call->in;
    e = gmm__mma_transpose_operand(plan, GMM__DY, 0, &a.src, stream);
    if (e == cudaSuccess) e = gmm__mma_transpose_operand(plan, GMM__Y, 2, &a.dst, stream);
    if (e == cudaSuccess)
        e = gmm__k_transpose(&a, gmm__grid(processors, call->options.sm_limit, GMM__TRANSPOSE_PER_SM, INT32_MAX),
                             stream);
    return gmm__cuda_status(call, e);
}

static gmm_status gmm__mma_launch_scale_update(const gmm__plan *plan, gmm_stream stream) {
    const gmm_scale_update *d = &plan->call->d.update;
    gmm__update_args a;
    memset(&a, 0, sizeof a);
    a.history = d->history;
    a.scale = d->scale;
    a.slots = d->slots;
    a.stride = d->stride;
    a.length = d->history_length;
    a.margin = d->margin;
    a.most_recent = d->most_recent;
    a.qmax = gmm_dtype_largest(d->dtype);
    return gmm__cuda_status(plan->call, gmm__k_update_scales(&a, stream));
}

static gmm_status gmm__mma_launch_shard_cast(const gmm__plan *plan, gmm_stream stream) {
    const gmm__shard_args a = gmm__shard_of(plan->call);
    const int amax = plan->call->d.shard.phase == GMM_QUANT_AMAX;
    cudaError_t e = cudaSuccess;
    if (amax) e = cudaMemsetAsync(a.amax, 0, (size_t)gmm__shard_floats(&a) * sizeof(float), stream);
    if (e == cudaSuccess) e = gmm__k_shard_cast(&a, amax, gmm__mma_streaming_limits(plan->call).max_ctas, stream);
    return gmm__cuda_status(plan->call, e);
}

#endif /* GMM_NO_QUANT */
#endif /* __CUDACC__ */

/* ........................................................................ 14.13 CUBLASLT engine: grouped linear ... */

#ifdef GMM__CUBLASLT

/* The CUBLASLT engine: one cublasLtMatmul per group, for host sizes. It is the reference for the other engines.
   cuBLASLt's matrices are column-major; a row-major matrix is described as the column-major matrix that is its
   transpose, so that the engine computes D^T: its operand a is w, or x in wgrad, and b is x or dy. The algorithm of a
   group depends on that group alone, never on the rows before it, and reduces in fp32 in a fixed order: results are
   deterministic and do not depend on the other groups. */

enum { GMM__LT_BETA, GMM__LT_WORKSPACE }; /* regions of the workspace: a float, and the workspace of cuBLASLt */
enum { GMM__LT_WORKSPACE_BYTES = 32 << 20 };

/* One group's product as cuBLASLt describes it. Descriptors live on the stack: nothing is allocated. */
typedef struct gmm__lt_problem {
    cublasLtMatmulDescOpaque_t desc;
    cublasLtMatrixLayoutOpaque_t a_layout, b_layout, d_layout;
    const void *a, *b, *bias;
    void *d;
    uint32_t align_a, align_b, align_d, align_bias; /* bytes */
} gmm__lt_problem;

static cudaDataType_t gmm__lt_data_type(gmm_dtype dtype) {
    return dtype == GMM_BF16 ? CUDA_R_16BF : dtype == GMM_F16 ? CUDA_R_16F : CUDA_R_32F;
}

/* Common alignment of an address and a row pitch, at most 16 bytes. No algorithm gains from more, and the limit makes
   the choice independent of the rows before a group. */
static uint32_t gmm__lt_alignment(const void *address, int64_t row_bytes) {
    const uint64_t bits = (uintptr_t)address | (uint64_t)row_bytes | 16u;
    return (uint32_t)(bits & (~bits + 1u));
}

static gmm_status gmm__lt_status(const gmm__call *call, cublasStatus_t status) {
    if (status == CUBLAS_STATUS_SUCCESS) return GMM_OK;
    return gmm__fail(&call->ctx->error, GMM_E_CUDA, "%s: cuBLASLt: %s (%s)", call->function,
                     cublasLtGetStatusString(status), call->shapes);
}

/* Creates the handle on the context's device. gmm_create does so only where its configuration names the engine:
   cuBLASLt waits for the device when a handle is made or destroyed, which ends captures of other threads. */
static int gmm__lt_open(gmm_context *ctx) {
    int current = 0;
    cudaError_t e = gmm__cuda_enter(ctx, &current);
    if (e != cudaSuccess || cublasLtCreate(&ctx->lt.handle) != CUBLAS_STATUS_SUCCESS) ctx->lt.handle = NULL;
    if (current != ctx->config.device) (void)cudaSetDevice(current);
    (void)cudaGetLastError();
    return ctx->lt.handle != NULL;
}
static void gmm__lt_close(gmm_context *ctx) {
    if (ctx->lt.handle) (void)cublasLtDestroy(ctx->lt.handle);
}

/* Roles of the operands a, b and the result d of an operation. */
static int gmm__lt_role_a(gmm_op op) { return op == GMM_OP_LINEAR_WGRAD ? GMM__X_ : GMM__W; }
static int gmm__lt_role_b(gmm_op op) { return op == GMM_OP_LINEAR_FWD ? GMM__X_ : GMM__DY; }
static int gmm__lt_role_d(gmm_op op) {
    return op == GMM_OP_LINEAR_FWD ? GMM__Y : op == GMM_OP_LINEAR_DGRAD ? GMM__DX : GMM__DW;
}

static cublasStatus_t gmm__lt_layout(cublasLtMatrixLayoutOpaque_t *layout, const gmm_mat *m, int64_t rows,
                                     int64_t cols) {
    return cublasLtMatrixLayoutInit(layout, gmm__lt_data_type(m->dtype), (uint64_t)cols, (uint64_t)rows, m->ld);
}

/* Describes the product of group g with rows [row, row + rows), rows > 0. The caller sets the bias pointer before
   launch. */
static cublasStatus_t gmm__lt_describe_group(const gmm__call *call, int64_t g, int64_t row, int64_t rows,
                                             gmm__lt_problem *p) {
    const gmm_op op = call->op;
    const int wgrad = op == GMM_OP_LINEAR_WGRAD;
    const gmm_mat *a = &call->mat[gmm__lt_role_a(op)], *b = &call->mat[gmm__lt_role_b(op)];
    const gmm_mat *d = &call->mat[gmm__lt_role_d(op)], *bias = &call->mat[GMM__BIAS];
    const int32_t trans_a = op == GMM_OP_LINEAR_FWD ? CUBLAS_OP_T : CUBLAS_OP_N;
    const int32_t trans_b = wgrad ? CUBLAS_OP_T : CUBLAS_OP_N;
    const int32_t mode = call->d.linear.alpha ? CUBLASLT_POINTER_MODE_DEVICE : CUBLASLT_POINTER_MODE_HOST;
    const uint32_t epilogue = CUBLASLT_EPILOGUE_BIAS;
    const int tf32 = a->dtype == GMM_F32 && call->options.allow_tf32;
    cublasStatus_t s;

    memset(p, 0, sizeof *p);
    p->a = gmm__at(a, wgrad ? 0 : g, wgrad ? row : 0, 0);
    p->b = gmm__at(b, 0, row, 0);
    p->d = gmm__at(d, wgrad ? g : 0, wgrad ? 0 : row, 0);
    p->align_a = gmm__lt_alignment(p->a, a->ld * (gmm_dtype_bits(a->dtype) / 8));
    p->align_b = gmm__lt_alignment(p->b, b->ld * (gmm_dtype_bits(b->dtype) / 8));
    p->align_d = gmm__lt_alignment(p->d, d->ld * (gmm_dtype_bits(d->dtype) / 8));
    s = cublasLtMatmulDescInit(&p->desc, tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F, CUDA_R_32F);
    if (!s) s = cublasLtMatmulDescSetAttribute(&p->desc, CUBLASLT_MATMUL_DESC_TRANSA, &trans_a, sizeof trans_a);
    if (!s) s = cublasLtMatmulDescSetAttribute(&p->desc, CUBLASLT_MATMUL_DESC_TRANSB, &trans_b, sizeof trans_b);
    if (!s) s = cublasLtMatmulDescSetAttribute(&p->desc, CUBLASLT_MATMUL_DESC_POINTER_MODE, &mode, sizeof mode);
    if (!s) s = gmm__lt_layout(&p->a_layout, a, wgrad ? rows : call->out, call->in);
    if (!s) s = gmm__lt_layout(&p->b_layout, b, rows, op == GMM_OP_LINEAR_FWD ? call->in : call->out);
    if (!s)
        s = gmm__lt_layout(&p->d_layout, d, wgrad ? call->out : rows, op == GMM_OP_LINEAR_FWD ? call->out : call->in);
    if (s || bias->dtype == GMM_NONE) return s;
    p->bias = gmm__at(bias, g, 0, 0);
    p->align_bias = gmm__lt_alignment(p->bias, 0);
    return cublasLtMatmulDescSetAttribute(&p->desc, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue, sizeof epilogue);
}

static cublasStatus_t gmm__lt_set_bias(gmm__lt_problem *p, const void *bias) {
    if (!p->bias) return CUBLAS_STATUS_SUCCESS;
    return cublasLtMatmulDescSetAttribute(&p->desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias, sizeof bias);
}

/* Queries the heuristic for the algorithm of a product. Partial sums are reduced in fp32 only, so that the store rounds
   once. The bias pointer is a value with the alignment of the bias; the heuristic does not dereference it. */
static cublasStatus_t gmm__lt_query_heuristic(gmm_context *ctx, gmm__lt_problem *p, cublasLtMatmulAlgo_t *algo) {
    cublasLtMatmulPreferenceOpaque_t pref;
    cublasLtMatmulHeuristicResult_t result;
    const uint64_t max_bytes = GMM__LT_WORKSPACE_BYTES;
    const uint32_t reduction = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    const cublasLtMatmulPreferenceAttributes_t attributes[4] = {
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES
    };
    uint32_t align[4];
    cublasStatus_t s;
    int found = 0, i;
    align[0] = p->align_a;
    align[1] = p->align_b;
    align[2] = align[3] = p->align_d;
    s = gmm__lt_set_bias(p, (const void *)(uintptr_t)p->align_bias);
    if (!s) s = cublasLtMatmulPreferenceInit(&pref);
    if (!s)
        s = cublasLtMatmulPreferenceSetAttribute(&pref, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &max_bytes,
                                                 sizeof max_bytes);
    if (!s)
        s = cublasLtMatmulPreferenceSetAttribute(&pref, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &reduction,
                                                 sizeof reduction);
    for (i = 0; i < 4 && !s; i++)
        s = cublasLtMatmulPreferenceSetAttribute(&pref, attributes[i], &align[i], sizeof align[i]);
    memset(&result, 0, sizeof result);
    if (!s)
        s = cublasLtMatmulAlgoGetHeuristic(ctx->lt.handle, &p->desc, &p->a_layout, &p->b_layout, &p->d_layout,
                                           &p->d_layout, &pref, 1, &result, &found);
    if (!s) s = found > 0 ? result.state : CUBLAS_STATUS_NOT_SUPPORTED;
    *algo = result.algo;
    return s;
}

/* Algorithm for `rows` rows of a described group: from a direct-mapped cache, or from the heuristic. */
static cublasStatus_t gmm__lt_find_algorithm(const gmm__call *call, int64_t rows, gmm__lt_problem *p,
                                             const cublasLtMatmulAlgo_t **algo) {
    const gmm_mat *d = &call->mat[gmm__lt_role_d(call->op)], *a = &call->mat[gmm__lt_role_a(call->op)];
    gmm__lt_choice *choice;
    int64_t key[GMM__LT_KEY];
    uint64_t hash = 0;
    cublasStatus_t s;
    int i;
    key[0] = (int64_t)call->op + 1; /* 0 marks an empty entry */
    key[1] = (int64_t)a->dtype << 8 | (int64_t)d->dtype;
    key[2] = (call->d.linear.alpha ? 1 : 0) | (call->options.allow_tf32 ? 2 : 0) | (int64_t)p->align_bias << 2;
    key[3] = (int64_t)p->align_a << 16 | (int64_t)p->align_b << 8 | (int64_t)p->align_d;
    key[4] = rows;
    key[5] = call->in;
    key[6] = call->out;
    key[7] = a->ld;
    key[8] = call->mat[gmm__lt_role_b(call->op)].ld;
    key[9] = d->ld;
    for (i = 0; i < GMM__LT_KEY; i++) {
        hash = (hash ^ (uint64_t)key[i]) * 0x9E3779B97F4A7C15u;
        hash ^= hash >> 32;
    }
    choice = &call->ctx->lt.cache[hash % GMM__LT_CACHE];
    *algo = &choice->algo;
    if (!memcmp(choice->key, key, sizeof key)) return CUBLAS_STATUS_SUCCESS;
    choice->key[0] = 0; /* the entry is empty until the heuristic has succeeded */
    s = gmm__lt_query_heuristic(call->ctx, p, &choice->algo);
    if (s == CUBLAS_STATUS_SUCCESS) memcpy(choice->key, key, sizeof key);
    return s;
}

static int gmm__lt_plan_product(const gmm__call *call, gmm__plan *plan) {
    const gmm_op op = call->op;
    const gmm_mat *a = &call->mat[gmm__lt_role_a(op)], *d = &call->mat[gmm__lt_role_d(op)];
    const gmm_mat *bias = &call->mat[GMM__BIAS];
    const gmm_mat *table = op == GMM_OP_LINEAR_WGRAD ? d : a; /* the operand with one matrix per group */
    if (!call->ctx->lt.handle)
        return gmm__decline(plan, "is not open in this context: name it in gmm_config.engine or require_engine");
    if (!call->groups.on_host) return gmm__decline(plan, "needs host sizes (groups.on_host)");
    if (call->rows > INT32_MAX || call->in > INT32_MAX || call->out > INT32_MAX)
        return gmm__decline(plan, "takes at most %lld rows and features", (long long)INT32_MAX);
    if ((table->table && !(table->flags & (uint32_t)GMM_MAT_TABLE_ON_HOST)) ||
        (bias->table && !(bias->flags & (uint32_t)GMM_MAT_TABLE_ON_HOST)))
        return gmm__decline(plan, "needs pointer tables on the host");
    if (d->dtype != a->dtype && d->dtype != GMM_F32)
        return gmm__decline(plan, "makes no %s from %s", gmm_dtype_name(d->dtype), gmm_dtype_name(a->dtype));
    if (bias->dtype != GMM_NONE && (a->dtype != GMM_F32 || bias->dtype != GMM_F32)) /* 16-bit sums are rounded first */
        return gmm__decline(plan, "adds no bias of %s to products of %s", gmm_dtype_name(bias->dtype),
                            gmm_dtype_name(a->dtype));
    gmm__reserve(plan, GMM__LT_BETA, sizeof(uint64_t)); /* reserved always, since a query may have no alpha yet */
    gmm__reserve(plan, GMM__LT_WORKSPACE, (size_t)GMM__LT_WORKSPACE_BYTES);
    (void)snprintf(plan->note, sizeof plan->note, "one product per group%s; refused where the library has no algorithm "
                   "for a group's rows and addresses",
                   a->dtype != GMM_F32 ? "" : call->options.allow_tf32 ? ", as TF32" : ", in fp32");
    return 1;
}

/* Zeroes rows of a matrix. */
static cudaError_t gmm__lt_zero_rows(const gmm_mat *m, void *address, int64_t rows, int64_t cols, gmm_stream stream) {
    const size_t size = (size_t)gmm_dtype_bits(m->dtype) / 8;
    if (rows <= 0) return cudaSuccess;
    return cudaMemset2DAsync(address, (size_t)m->ld * size, 0, (size_t)cols * size, (size_t)rows, stream);
}

static gmm_status gmm__lt_launch_product(const gmm__plan *plan, gmm_stream stream) {
    const gmm__call *call = plan->call;
    const gmm_linear *l = &call->d.linear;
    const int wgrad = call->op == GMM_OP_LINEAR_WGRAD;
    const gmm_mat *d = &call->mat[gmm__lt_role_d(call->op)];
    const int64_t cols = call->op == GMM_OP_LINEAR_FWD ? call->out : call->in;
    const float one = 1.0f, beta = wgrad ? gmm__mma_beta(&call->grad[GMM__DW]) : l->y_add ? 1.0f : 0.0f;
    const float *beta_address = l->alpha ? (const float *)gmm__part(plan, GMM__LT_BETA) : &beta;
    const cublasLtMatmulAlgo_t *algo = NULL;
    gmm__lt_problem p;
    cudaError_t e = cudaSuccess;
    cublasStatus_t s;
    int64_t begin, end = 0, g;
    uint32_t fault = 0;
    int pass;

    if (gmm__capturing(call->ctx, stream))
        return gmm__refuse(call, GMM_E_CAPTURE, "groups.on_host", "host sizes cannot be captured, since every replay "
                           "would use them, and cublaslt serves no others");
    /* pass 0 finds the algorithms of all groups, so that a refused call has enqueued nothing; pass 1 launches */
    for (pass = 0; pass < 2; pass++) {
        if (pass == 1 && l->alpha) { /* alpha is in device memory, so beta must be too */
            uint64_t word = 0;
            memcpy(&word, &beta, sizeof beta);
            e = gmm_launch_copy(gmm__part(plan, GMM__LT_BETA), &word, 1, stream);
        }
        for (g = 0, end = 0; g < call->groups.count && e == cudaSuccess; g++) {
            begin = end;
            end = gmm_split_end(begin, gmm__split_value(&call->groups, g), call->groups.form, call->groups.capacity,
                                call->groups.row_align, &fault);
            if (begin == end) {
                if (pass == 1 && wgrad && beta == 0.0f)
                    e = gmm__lt_zero_rows(d, gmm__at(d, g, 0, 0), call->out, cols, stream);
                continue;
            }
            s = gmm__lt_describe_group(call, g, begin, end - begin, &p);
            if (s == CUBLAS_STATUS_SUCCESS) s = gmm__lt_find_algorithm(call, end - begin, &p, &algo);
            if (s == CUBLAS_STATUS_NOT_SUPPORTED)
                return gmm__refuse(call, GMM_E_UNSUPPORTED, "options.engine", "cublaslt has no algorithm for the %lld "
                                   "rows of group %lld", (long long)(end - begin), (long long)g);
            if (s == CUBLAS_STATUS_SUCCESS && pass == 1) s = gmm__lt_set_bias(&p, p.bias);
            if (s == CUBLAS_STATUS_SUCCESS && pass == 1)
                s = cublasLtMatmul(call->ctx->lt.handle, &p.desc,
                                   l->alpha ? l->alpha + (l->alpha_per_group ? g : 0) : &one, p.a, &p.a_layout, p.b,
                                   &p.b_layout, beta_address, p.d, &p.d_layout, p.d, &p.d_layout, algo,
                                   gmm__part(plan, GMM__LT_WORKSPACE), (size_t)GMM__LT_WORKSPACE_BYTES, stream);
            if (s != CUBLAS_STATUS_SUCCESS) return gmm__lt_status(call, s);
        }
    }
    if (e == cudaSuccess && !wgrad && call->groups.tail == GMM_TAIL_ZERO && end < call->rows)
        e = gmm__lt_zero_rows(d, gmm__at(d, 0, end, 0), call->rows - end, cols, stream);
    return gmm__cuda_status(call, e);
}

#endif /* GMM__CUBLASLT */

/* Which kernel serves a product of the WGMMA engine: the price of each, and the choice of the least. */

#ifdef __CUDACC__

/* Constants of the price models below, fitted on one H200. They order the kernels by speed and never change a result.
   "Step" is one k_tile of a tile: 64 elements of the contraction, FP8 128. "m16" and "m64" are rows in units of 16 and
   64; "n128" are columns in units of 128. A clock is one of the multiprocessor. */
static const double gmm__wgmma_margin = 0.99;              /* share of the lowest cost below which a later one wins */
/* 16-bit operands: a step takes the clocks of its products or of its shared-memory traffic, whichever are more. */
static const double gmm__wgmma_mma_m16 = 64.0;             /* clocks per step, n128 and m16: wgmma */
static const double gmm__wgmma_packed_step = 1000.0;       /* clocks per step: instructions that dequantize B */
static const double gmm__wgmma_packed_m16 = 36.0;          /* clocks per step and m16, with packed B */
static const double gmm__wgmma_smem_b = 256.0;             /* clocks per step and n128: shared-memory traffic of B */
static const double gmm__wgmma_smem_a = 16.0;              /* clocks per step and m16, cooperative: traffic of A */
static const double gmm__wgmma_smem_a_n128 = 32.0;         /* clocks per step, m16 and n128, cooperative */
static const double gmm__wgmma_smem_a_pingpong = 43.4;     /* clocks per step and m16, ping-pong: traffic of A */
static const double gmm__wgmma_gather_m16 = 45.0;          /* clocks per step and m16: cp.async of gathered rows of A */
/* Slowdowns multiply the clocks of the mainloop. In ping-pong tiles few columns share a row of A, so that its traffic
   slows down tall tiles and long contractions. Groups are seldom equal, and the last tile of a group is lower. */
static const double gmm__wgmma_deferred_slowdown = 1.04;   /* tiles with a deferred store */
static const double gmm__wgmma_narrow_slowdown = 1.05;     /* cooperative tiles of 128 columns, few rows per group */
static const double gmm__wgmma_low_slowdown = 0.95;        /* ping-pong tiles below gmm__wgmma_low_m16 */
static const double gmm__wgmma_low_m16 = 10.5;             /* m16 */
static const double gmm__wgmma_k_tiles_scale = 2500.0;     /* k_tiles that raise the ping-pong slowdown by 1 */
/* Store of a tile: hidden behind the mainloop of the next tile, or exposed. */
static const double gmm__wgmma_store_deferred = 20.0;      /* clocks per m16 and n128, 16 bits: deferred store */
static const double gmm__wgmma_store_cooperative = 195.0;  /* clocks per m16 and n128, 16 bits */
static const double gmm__wgmma_store_pingpong = 500.0;     /* clocks per m16 and n128, 16 bits */
static const double gmm__wgmma_store_f32 = 2200.0;         /* clocks per m16 and n128, fp32 */
static const double gmm__wgmma_store_f32_block = 3200.0;   /* the same, divided by the blocks of a store slot */
static const double gmm__wgmma_store_exposed = 0.5;        /* ping-pong: share of the store that bounds a tile */
static const double gmm__wgmma_fixed_cooperative = 400.0;  /* clocks per tile */
static const double gmm__wgmma_fixed_pingpong = 200.0;     /* clocks per tile */
/* Activations. In the epilogue of glu they are not hidden: stores of h and arithmetic slow the mainloop down. */
static const double gmm__wgmma_glu_m16 = 510.0;            /* clocks per m16 of a glu product */
static const double gmm__wgmma_glu_alone_m16 = 310.0;      /* the same where D is not stored */
static const double gmm__wgmma_act_rate = 2600.0;          /* bytes per clock: a kernel for the activation */
static const double gmm__wgmma_act_fixed = 4000.0;         /* clocks: its launch */
static const double gmm__wgmma_shared_sm_slowdown = 1.2;   /* of tiles where two CTAs share a multiprocessor */
/* Memory traffic of the whole product. */
static const double gmm__wgmma_dequantize_rate = 400.0;    /* elements per clock: weights to 16 bits in the workspace */
static const double gmm__wgmma_copy_rate = 1900.0;         /* bytes per clock: gathered rows to the workspace */
static const double gmm__wgmma_weight_rate = 26.0;         /* bytes per clock and multiprocessor: weights from memory */
static const double gmm__wgmma_column_bytes = 128.0;       /* bytes of one column of a stage */
static const double gmm__wgmma_latency_bytes = 11000.0;    /* bytes in flight at which the weight rate is halved */
/* wgrad: TMA transfers D while wgmma runs, through the same memory system; the shorter of the two is partly hidden.
   Fitted to 56 measurements each of accumulation into fp32 and of 16-bit results. */
static const double gmm__wgmma_wgrad_store_f32 = 880.0;    /* clocks per m16: D is read, added to and written */
static const double gmm__wgmma_wgrad_store_half = 208.0;   /* clocks per m16, 16 bits */
static const double gmm__wgmma_wgrad_tall_slowdown = 1.05; /* of the store of tiles above 8 m16 */
static const double gmm__wgmma_wgrad_mainloop = 1.14;      /* slowdown of the mainloop */
static const double gmm__wgmma_wgrad_pack = 80.0;          /* clocks per m16: accumulators to 16 bits */
static const double gmm__wgmma_wgrad_exposed = 0.4;        /* share of the shorter of the two that is not hidden */
/* FP8 */
static const double gmm__wgmma_fp8_mma_column = 2.0;       /* clocks per step, column and m64: wgmma */
static const double gmm__wgmma_fp8_one_slowdown = 1.5;     /* one consumer alone: nothing overlaps its waits */
static const double gmm__wgmma_fp8_one_m64 = 1.5;          /* m64 below which a tile has one consumer */
static const double gmm__wgmma_fp8_three_slowdown = 1.2;   /* tiles of three consumers */
static const double gmm__wgmma_fp8_two_slowdown = 1.3;     /* other tiles */
static const double gmm__wgmma_fp8_load_column = 7.0;      /* clocks per step and column: weights from device memory */
static const double gmm__wgmma_fp8_fixed = 2000.0;         /* clocks per tile */
static const double gmm__wgmma_fp8_prefetch_limit = 230e3; /* clocks of a product below which prefetch pays */
enum {
    GMM__WGMMA_CHOICE_ROWS = 256,  /* rows per group from which the device chooses between the tiles of a kernel */
    GMM__WGMMA_NARROW_ROWS = 2048  /* rows per group below which gmm__wgmma_narrow_slowdown applies */
};

/* Average rows per group: groups.rows_hint, or else the capacity, divided by the number of groups. */
static int64_t gmm__wgmma_rows_per_group(const gmm__call *call) {
    const int64_t hint = call->groups.rows_hint > 0 && call->groups.rows_hint < call->rows ? call->groups.rows_hint
                                                                                            : call->rows;
    return gmm__ceil_div(hint, call->groups.count);
}

/* A product as the price models see it. Groups have equal sizes there. */
typedef struct gmm__wgmma_shape {
    gmm_gemm_op op;
    int64_t groups, rows, m, n; /* rows per group; extents of D per group */
    int64_t contraction;
    int64_t copied;             /* bytes per row of the copies of gathered rows */
    double weight_elements;
    int32_t processors;
    int gathers;                /* A has an index by which gather warps can load it */
    int f32, drops_d;           /* D is fp32; a glu product does not store D */
} gmm__wgmma_shape;

static gmm__wgmma_shape gmm__wgmma_shape_of(const gmm__call *call, gmm_gemm_op op, int32_t processors) {
    const int role_a = gmm__mma_role_a(op);
    const int role_d = op == gmm_gemm_fwd ? GMM__Y : op == gmm_gemm_dgrad ? GMM__DX : GMM__DW;
    gmm__wgmma_shape s;
    s.op = op;
    s.groups = call->groups.count;
    s.rows = gmm__wgmma_rows_per_group(call);
    s.m = op == gmm_gemm_wgrad ? call->out : s.rows;
    if (s.m < 1) s.m = 1;
    s.n = op == gmm_gemm_fwd ? call->out : call->in;
    s.contraction = op == gmm_gemm_wgrad ? s.rows : op == gmm_gemm_fwd ? call->in : call->out;
    s.copied = gmm__copy_pitch(call, role_a) + gmm__copy_pitch(call, gmm__mma_role_b(op));
    s.weight_elements = (double)(s.groups * call->in) * (double)call->out;
    s.processors = processors;
    /* a gather warp counts rows in units of 16 bytes */
    s.gathers = gmm__index_of(call, role_a) &&
                (uint64_t)call->mat[role_a].ld / 8 * (uint64_t)call->d.linear.index_rows >> 32 == 0;
    s.f32 = call->mat[role_d].dtype == GMM_F32;
    s.drops_d = call->drops_preact;
    return s;
}

/* How tiles of a kernel cover D. */
typedef struct gmm__wgmma_tiling {
    int64_t tiles_m, tiles_n; /* tiles of a group along the rows and the columns of D */
    int64_t waves;            /* tiles that the busiest CTA computes */
} gmm__wgmma_tiling;

/* Tiles of tile_m x tile_n on `ctas` CTAs. narrows: where a group fits one tile, tiles are narrowed until the last wave
   is full (gmm_sm90_tiles_n): as many columns of tiles as all waves can hold, an even number. */
static gmm__wgmma_tiling gmm__wgmma_tiling_of(const gmm__wgmma_shape *s, int64_t tile_m, int64_t tile_n, int64_t ctas,
                                              int narrows) {
    gmm__wgmma_tiling t;
    int64_t filling;
    t.tiles_m = gmm__ceil_div(s->m, tile_m);
    t.tiles_n = gmm__ceil_div(s->n, tile_n);
    t.waves = gmm__ceil_div(s->groups * t.tiles_m * t.tiles_n, ctas);
    filling = t.waves * s->processors / s->groups / 2 * 2;
    if (narrows && t.tiles_m == 1 && filling > t.tiles_n) t.tiles_n = filling;
    return t;
}

/* Clocks of a step of a tile with m16 blocks of 16 rows. */
static double gmm__wgmma_step_clocks(const gmm_sm90_kernel *k, double m16) {
    const double n128 = k->tile_n / 128.0;
    const double mma = k->b_format ? gmm__wgmma_packed_step + gmm__wgmma_packed_m16 * m16
                                   : gmm__wgmma_mma_m16 * n128 * m16;
    const double smem_a = k->consumers == 2 ? gmm__wgmma_smem_a + gmm__wgmma_smem_a_n128 * n128
                                            : gmm__wgmma_smem_a_pingpong;
    const double smem = gmm__wgmma_smem_b * n128 + smem_a * m16 + (k->gather ? gmm__wgmma_gather_m16 * m16 : 0.0);
    return mma > smem ? mma : smem;
}

/* Clocks of a tile of wgrad: a mainloop of k_tiles steps of `step` clocks, and the store of m16 blocks of 16 rows. */
static double gmm__wgmma_wgrad_tile_clocks(const gmm_sm90_kernel *k, double k_tiles, double step, double m16, int f32) {
    const double store = m16 * (f32 ? gmm__wgmma_wgrad_store_f32 : gmm__wgmma_wgrad_store_half) *
                         (k->m16 > 8 ? gmm__wgmma_wgrad_tall_slowdown : 1.0);
    const double mainloop = gmm__wgmma_wgrad_mainloop * k_tiles * step + (f32 ? 0.0 : gmm__wgmma_wgrad_pack * m16);
    return mainloop > store ? mainloop + gmm__wgmma_wgrad_exposed * store : store + gmm__wgmma_wgrad_exposed * mainloop;
}

/* What multiplies the clocks of a mainloop of forward or dgrad. */
static double gmm__wgmma_slowdown(const gmm_sm90_kernel *k, const gmm__wgmma_shape *s, double k_tiles, double m16) {
    if (k->consumers != 2) /* ping-pong */
        return (m16 < gmm__wgmma_low_m16 ? gmm__wgmma_low_slowdown : 1.0) + k_tiles / gmm__wgmma_k_tiles_scale;
    if (k->deferred) return gmm__wgmma_deferred_slowdown;
    return k->tile_n == 128 && s->rows < GMM__WGMMA_NARROW_ROWS ? gmm__wgmma_narrow_slowdown : 1.0;
}
/* Clocks of storing a tile of forward or dgrad. */
static double gmm__wgmma_store_clocks(const gmm_sm90_kernel *k, const gmm__wgmma_shape *s, double m16) {
    const double half = k->deferred          ? gmm__wgmma_store_deferred
                        : k->consumers == 2 ? gmm__wgmma_store_cooperative : gmm__wgmma_store_pingpong;
    return k->tile_n / 128.0 * m16 *
           (s->f32 ? gmm__wgmma_store_f32 + gmm__wgmma_store_f32_block / k->store_blocks : half);
}
/* Clocks of a tile. Consumers of a cooperative tile store it together; of ping-pong tiles one is stored while the other
   is multiplied, so that a part of the store bounds it. */
static double gmm__wgmma_tile_clocks(const gmm_sm90_kernel *k, const gmm__wgmma_shape *s, double m16) {
    const double k_tiles = (double)gmm__ceil_div(s->contraction, 64), step = gmm__wgmma_step_clocks(k, m16);
    const double mainloop = k_tiles * step * gmm__wgmma_slowdown(k, s, k_tiles, m16);
    const double store = gmm__wgmma_store_clocks(k, s, m16), exposed = gmm__wgmma_store_exposed * store;
    const double glu = s->drops_d ? gmm__wgmma_glu_alone_m16 : gmm__wgmma_glu_m16;
    if (s->op == gmm_gemm_wgrad) return gmm__wgmma_wgrad_tile_clocks(k, k_tiles, step, m16, s->f32);
    if (k->consumers == 2) return mainloop + store + gmm__wgmma_fixed_cooperative;
    return (mainloop > exposed ? mainloop : exposed) + gmm__wgmma_fixed_pingpong +
           (k->op == gmm_gemm_glu ? glu * m16 : 0.0);
}
/* Clocks of reading all weights from memory, whose rate grows with the bytes in flight. */
static double gmm__wgmma_weight_clocks(const gmm_sm90_kernel *k, const gmm__wgmma_shape *s,
                                       const gmm__wgmma_tiling *t) {
    const double in_flight = gmm__wgmma_column_bytes * k->stages * (double)s->n / (double)t->tiles_n;
    return 2.0 * s->weight_elements / (gmm__wgmma_weight_rate * s->processors) *
           (1.0 + gmm__wgmma_latency_bytes / in_flight);
}
/* The price of a kernel with tiles of at most max_m16 blocks of 16 rows: the waves of its tiles times the clocks of a
   tile, and what copies of operands take before; or the clocks of reading all weights if they are more. b_format: of
   the weights, which other kernels do not read. */
static double gmm__wgmma_cost(const gmm_sm90_kernel *k, const gmm__wgmma_shape *s, int32_t b_format, int32_t max_m16) {
    const gmm__wgmma_tiling t = gmm__wgmma_tiling_of(s, 16 * max_m16, k->tile_n, s->processors * k->ctas_per_sm, 1);
    const double m16 = (double)gmm__ceil_div(s->m, 16) / (double)t.tiles_m;
    const double tiles = (double)t.waves * gmm__wgmma_tile_clocks(k, s, m16) *
                         (k->ctas_per_sm > 1 ? gmm__wgmma_shared_sm_slowdown : 1.0);
    const double dequantize = b_format && !k->b_format ? s->weight_elements / gmm__wgmma_dequantize_rate : 0.0;
    const double copy = k->gather ? 0.0 : (double)(s->rows * s->groups * s->copied) / gmm__wgmma_copy_rate;
    const double compute = tiles + dequantize + copy;
    const double weights = s->op == gmm_gemm_wgrad || b_format ? 0.0 : gmm__wgmma_weight_clocks(k, s, &t);
    return compute > weights ? compute : weights;
}

/* Index of the kernel for operation `kernel_op` that is estimated to be fastest, or -1. All kernels give the same bits.
   Where a kernel has two tiles (rows of tile_choice 1 and 2), the device chooses between them by the group sizes,
   unless groups are so small that memory bandwidth bounds them. Packed weights are read by kernels of `b_format`; for
   other kernels the cost of their conversion is added.
   Where rows are gathered, kernels that do it themselves are among the choice, and to the cost of others that of a copy
   is added; without `copies` they are left out. *least becomes the cost of the choice. */
static int32_t gmm__wgmma_choose(const gmm__call *call, gmm_gemm_op op, gmm_gemm_op kernel_op, gmm_dtype dtype,
                                 int32_t b_format, int32_t processors, int copies, double *least) {
    const gmm__wgmma_shape s = gmm__wgmma_shape_of(call, op, processors);
    int32_t choice = -1, index = 0, i, max_m16;
    for (i = 0; i < GMM_SM90_KERNELS; i++) {
        const gmm_sm90_kernel *k = &gmm_sm90_kernels[i];
        /* the device may choose heights from min_m16 to k->m16 blocks of 16 rows; tiles of wgrad have one height */
        const int32_t min_m16 = op == gmm_gemm_wgrad ? k->m16 : k->m16 / 2 + 1;
        if (k->op != kernel_op || k->dtype != dtype || (k->b_format && k->b_format != b_format) ||
            (k->gather && !s.gathers) || (!k->gather && s.copied && !copies))
            continue;
        if (++index == call->options.tile) return i;
        if (k->tile_choice == 2) {
            if (s.rows >= GMM__WGMMA_CHOICE_ROWS && choice >= 0 && gmm_sm90_kernels[choice].function == k->function)
                choice = i;
            continue;
        }
        for (max_m16 = k->m16; max_m16 >= min_m16; max_m16--) {
            const double cost = gmm__wgmma_cost(k, &s, b_format, max_m16);
            if (choice >= 0 && cost >= gmm__wgmma_margin * *least) continue;
            *least = cost;
            choice = i;
        }
    }
    return choice;
}

/* Writes the tile of a kernel for plan->note, or the two tiles (tile_choice 1 and 2) between which the device
   chooses. */
static const char *gmm__wgmma_tile_note(int32_t kernel, char text[64]) {
    const gmm_sm90_kernel *k = &gmm_sm90_kernels[kernel], *first = gmm_sm90_kernels;
    if (k->tile_choice == 2) {
        while (first->function != k->function || first->tile_choice != 1) first++;
        (void)snprintf(text, 64, "tile %d x %d or %d x %d, by the split", (int)first->m16 * 16, (int)first->tile_n,
                       (int)k->m16 * 16, (int)k->tile_n);
    } else
        (void)snprintf(text, 64, "tile %d x %d", (int)k->m16 * 16, (int)k->tile_n);
    return text;
}

/* The operation of the kernels that serves an operation of the API. */
static gmm_gemm_op gmm__wgmma_op(gmm_op op) {
    return op == GMM_OP_LINEAR_FWD ? gmm_gemm_fwd : op == GMM_OP_LINEAR_DGRAD ? gmm_gemm_dgrad : gmm_gemm_wgrad;
}

#ifndef GMM_NO_QUANT
/* The price of an FP8 kernel. A step takes the clocks of its products or, where few rows share the weights, those of
   loading them: *loads becomes 1. */
static double gmm__wgmma_fp8_cost(const gmm_fp8_kernel *k, const gmm__wgmma_shape *s, int *loads) {
    const gmm__wgmma_tiling t = gmm__wgmma_tiling_of(s, GMM_FP8_BLOCK_ROWS * k->consumers, k->tile_n, s->processors,
                                                     s->op != gmm_gemm_wgrad && k->tile_n == 192);
    const double k_tiles = (double)gmm__ceil_div(s->contraction, 128);
    const double m64 = (double)gmm__ceil_div(s->m, GMM_FP8_BLOCK_ROWS) / (double)t.tiles_m;
    const double cols = (double)s->n / (double)t.tiles_n;
    const double mma = gmm__wgmma_fp8_mma_column * k->tile_n * m64 *
                       (m64 < gmm__wgmma_fp8_one_m64 ? gmm__wgmma_fp8_one_slowdown
                        : k->consumers == 3 ? gmm__wgmma_fp8_three_slowdown : gmm__wgmma_fp8_two_slowdown);
    /* one tile of each column loads the weights from memory; the other tiles_m - 1 find them in the L2 */
    const double load = gmm__wgmma_fp8_load_column * cols / (double)t.tiles_m;
    *loads = mma < load;
    return (double)t.waves * (k_tiles * (mma > load ? mma : load) + gmm__wgmma_fp8_fixed);
}

/* Index of the FP8 kernel that is estimated to be fastest, or -1. All kernels that promote their partial sums to fp32
   give the same bits. */
static int32_t gmm__wgmma_choose_fp8(const gmm__call *call, gmm_gemm_op op, gmm_dtype dtype, int32_t scaling,
                                     int32_t processors) {
    const gmm__wgmma_shape s = gmm__wgmma_shape_of(call, op, processors);
    double least = 0.0;
    int32_t choice = -1, index = 0, i;
    for (i = 0; i < GMM_FP8_KERNELS; i++) {
        const gmm_fp8_kernel *k = &gmm_fp8_kernels[i];
        int loads, prefetch;
        const double cost = gmm__wgmma_fp8_cost(k, &s, &loads);
        if (k->dtype != dtype || k->scaling != scaling) continue;
        if (++index == call->options.tile) return i;
        /* The tile 192 x 128 has two instances. The one with prefetch of the first tile saves 4 us per launch, and is
           up to 4% slower in long products. */
        prefetch = op != gmm_gemm_wgrad && (cost < gmm__wgmma_fp8_prefetch_limit || loads);
        if (k->consumers == 3 && k->prefetch_tile != prefetch) continue;
        if (choice >= 0 && cost >= gmm__wgmma_margin * least) continue;
        least = cost;
        choice = i;
    }
    return choice;
}
#endif /* GMM_NO_QUANT */

#endif /* __CUDACC__ */

/* The gated activation in FC1's product of an MLP: when the WGMMA engine takes it, and how its kernel gets it. */

#ifdef __CUDACC__

/* Whether a glu product serves call->product_act and, unless the caller demands it, whether it is expected to be faster
   than the product and the activation. `copies` as in gmm__wgmma_choose. */
static int gmm__wgmma_serves_glu(const gmm__call *call, gmm__plan *plan, int copies) {
    const gmm_mat *z = &call->mat[GMM__Y];
    const int64_t ffn = call->out / 2, block = call->act.interleave;
    const int32_t processors = call->ctx->device.processors;
    double joined = 0.0, product = 0.0, act;
    if (!gmm_act_gated(call->act.kind)) return gmm__decline(plan, "joins no act that is not gated");
    if (ffn % 64) return gmm__decline(plan, "joins no act of ffn %lld", (long long)ffn);
    if (block % 64 && block != 8 && block != 16 && block != 32)
        return gmm__decline(plan, "joins no act of interleave %lld", (long long)block);
    if (z->dtype != call->mat[GMM__X_].dtype || z->ld % 8 || (uintptr_t)z->data % 16)
        return gmm__decline(plan, "joins an act to z of x's dtype at multiples of 16 bytes alone");
    if (call->options.fuse == GMM_FUSE_ALWAYS) return 1;
    if (call->options.tile) return gmm__decline(plan, "joins no act where options.tile demands a tile");
    /* bytes: 2 ffn columns are read and ffn written, 2 bytes each */
    act = (double)(gmm__wgmma_rows_per_group(call) * call->groups.count * 6 * ffn) / gmm__wgmma_act_rate +
          gmm__wgmma_act_fixed;
    if (gmm__wgmma_choose(call, gmm_gemm_fwd, gmm_gemm_fwd, z->dtype, 0, processors, copies, &product) >= 0 &&
        gmm__wgmma_choose(call, gmm_gemm_fwd, gmm_gemm_glu, z->dtype, 0, processors, copies, &joined) >= 0 &&
        joined >= gmm__wgmma_margin * (product + act))
        return gmm__decline(plan, "expects the act to be faster alone");
    return 1;
}

/* Describes the activation of a glu product to its kernel, and enqueues zeros behind the last group of its result. */
static cudaError_t gmm__wgmma_glu_args(const gmm__plan *plan, gmm_sm90_args *args, cudaStream_t stream) {
    const gmm__call *call = plan->call;
    gmm_sm90_glu *glu = &args->glu;
    gmm_tail_args tail;
    glu->h = args->p.d;
    glu->h.data = call->product_act->y->data;
    glu->h.ld = call->out / 2; /* y is packed */
    glu->prob = call->product_act->prob;
    glu->kind = call->act.kind;
    glu->coef = gmm_act_coefficients(&call->act);
    glu->block = call->act.interleave ? call->act.interleave : args->p.n / 2;
    glu->drops_d = call->drops_preact;
    if (!args->p.zero_tail) return cudaSuccess;
    memset(&tail, 0, sizeof tail);
    tail.d = glu->h;
    tail.groups = args->groups;
    tail.n = args->p.n / 2;
    return gmm_launch_tail(plan->grid[0], &tail, stream);
}

#endif /* __CUDACC__ */
/* ........................................................................... 14.14 WGMMA engine: grouped linear ... */

/* The WGMMA engine's grouped linear layers: availability, alignment rules, choice of the kernel, plans, launches. */

/* Reason why the engine is unavailable; NULL: it is available. */
static const char *gmm__wgmma_unavailable(const gmm_build *build) {
    if (build->capability != 90) return "needs compute capability 9.0";
    if (!build->sm90a) return "is not in this build: compile for sm_90a (-gencode arch=compute_90a,code=sm_90a)";
    return build->tensor_maps ? NULL : "needs a driver with cuTensorMapEncodeTiled";
}

/* Whether the rows of an operand begin at multiples of 16 bytes, as TMA requires; declines the call if not. A query
   assumes aligned addresses where it has none. Addresses in device tables are checked by the kernel, which sets a fault
   bit. */
static GMM__UNUSED int gmm__wgmma_check_alignment(const gmm__call *call, int role, const char *name, gmm__plan *plan) {
    const gmm_mat *m = &call->mat[role];
    const int64_t alignment = 128 / gmm_dtype_bits(m->dtype);
    const int host_table = (m->flags & (uint32_t)GMM_MAT_TABLE_ON_HOST) != 0;
    int64_t g;
    if (m->ld % alignment)
        return gmm__decline(plan, "needs rows of %s at multiples of 16 bytes, not ld %lld", name, (long long)m->ld);
    if (call->groups.count > 1 && m->group_stride % alignment)
        return gmm__decline(plan, "needs matrices of %s at multiples of 16 bytes, not group_stride %lld", name,
                            (long long)m->group_stride);
    if ((uintptr_t)m->data % 16) return gmm__decline(plan, "needs %s at a multiple of 16 bytes, not %p", name, m->data);
    if (call->query && !m->data && (!m->table || host_table)) plan->assumes_aligned = 1;
    for (g = 0; m->table && host_table && !call->query && g < call->groups.count; g++)
        if ((uintptr_t)m->table[g] % 16)
            return gmm__decline(plan, "needs %s at multiples of 16 bytes, not table[%lld] %p", name, (long long)g,
                                m->table[g]);
    return 1;
}

#ifdef __CUDACC__

/* The engine multiplies 16-bit operands and FP8 by TMA and wgmma. MX32 and NV16 are dequantized to 16 bits, by the GEMM
   kernel in registers or by a kernel before it in the workspace. The kernels read device splits without offsets in the
   workspace; host splits and host tables are copied to the regions of the MMA engine, which serves unaligned calls. A
   query without addresses reports the larger workspace of the two engines. "Packed" weights are quantized weights that
   the GEMM kernel itself dequantizes. */

/* Looks for the sm_90a code and the driver's tensor map encoder once per context, and records both in `build`. */
static void gmm__wgmma_open(gmm_context *ctx, gmm_build *build) {
    enum cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
    void *encode = NULL;
    int current = 0, built = 0;
    cudaError_t e = cudaGetDevice(&current);
    if (e == cudaSuccess) e = cudaSetDevice(ctx->config.device);
    if (e == cudaSuccess) {
        built = gmm_sm90_present();
        e = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &encode, 12000, cudaEnableDefault, &result);
        (void)cudaSetDevice(current);
    }
    (void)cudaGetLastError();
    ctx->wgmma_encode = (PFN_cuTensorMapEncodeTiled_v12000)encode;
    build->sm90a = (int32_t)(built != 0);
    build->tensor_maps = (int32_t)(e == cudaSuccess && result == cudaDriverEntryPointSuccess && encode != NULL);
    ctx->wgmma_unavailable = gmm__wgmma_unavailable(build);
}

#ifndef GMM_NO_QUANT
/* Plans an FP8 product. Partial sums are promoted to fp32 every 128 elements of the contraction. They are not promoted
   where no scale varies along the contraction and options.fp8_fast_accum is set; wgrad promotes always, which is no
   slower there. */
static int gmm__wgmma_plan_fp8(const gmm__call *call, gmm__plan *plan, gmm_gemm_op op) {
    const int role_a = gmm__mma_role_a(op), role_b = gmm__mma_role_b(op), wgrad = op == gmm_gemm_wgrad;
    const gmm_mat *a = &call->mat[role_a], *b = &call->mat[role_b];
    const int64_t G = call->groups.count, m = wgrad ? call->out : call->rows;
    const int64_t n = op == gmm_gemm_fwd ? call->out : call->in, max_extent = INT32_MAX - 1024;
    const int32_t processors = call->ctx->device.processors;
    const int block_scaled = gmm_block_along(b->scaling) == 128;
    const int32_t scaling = block_scaled ? (b->scaling == GMM_SCALING_1X128 ? GMM_FP8_1D1D : GMM_FP8_1D2D)
                            : call->options.fp8_fast_accum && !wgrad ? GMM_FP8_FAST : GMM_FP8_1D2D;
    const gmm_fp8_kernel *k;
    int64_t tiles;
    plan->kernel = gmm__wgmma_choose_fp8(call, op, a->dtype, scaling, processors);
    if (plan->kernel < 0 || b->dtype != GMM_E4M3 || a->scaling == GMM_SCALING_128X128 ||
        (gmm_block_along(b->scaling) != 128 && gmm_block_along(b->scaling) != 0))
        return gmm__decline(plan, "has no kernel for %s %s times %s %s", gmm_dtype_name(a->dtype),
                            gmm_scaling_name(a->scaling), gmm_dtype_name(b->dtype), gmm_scaling_name(b->scaling));
    k = &gmm_fp8_kernels[plan->kernel];
    plan->kernel_name = k->name;
    if (call->rows > GMM_SM90_RAGGED_ROWS || call->in > max_extent || call->out > max_extent)
        return gmm__decline(plan, "takes at most %d rows and %lld features", (int)GMM_SM90_RAGGED_ROWS,
                            (long long)max_extent);
    tiles = wgrad ? G * gmm__ceil_div(m, GMM_FP8_BLOCK_ROWS) : m / GMM_FP8_BLOCK_ROWS + G;
    if (tiles > max_extent / gmm__ceil_div(n, k->tile_n)) return gmm__decline(plan, "takes no so many tiles");
    if (!gmm__wgmma_check_alignment(call, role_a, op == gmm_gemm_fwd ? "x" : "dy", plan) ||
        !gmm__wgmma_check_alignment(call, role_b, wgrad ? "x" : "w", plan))
        return 0;
    plan->grid[0] = gmm__grid(processors, call->options.sm_limit, 1, INT32_MAX);
    if (plan->grid[0] > 1) plan->grid[0] -= plan->grid[0] % 2; /* clusters of two CTAs */
    if (G > k->smem_groups) gmm__reserve(plan, GMM__WGMMA_GROUP_TABLES, (size_t)plan->grid[0] * gmm_fp8_table_bytes(G));
    gmm__mma_reserve_groups(call, plan);
    gmm__mma_reserve_table(call, plan, wgrad ? GMM__DW : GMM__W, GMM__MMA_MATRIX_TABLE);
    if (!wgrad) gmm__mma_reserve_table(call, plan, GMM__W, GMM__MMA_SCALE_TABLE);
    if (op == gmm_gemm_fwd) gmm__mma_reserve_table(call, plan, GMM__BIAS, GMM__MMA_BIAS_TABLE);
    (void)snprintf(plan->note, sizeof plan->note, "%s by %s, %s, tile %d x %d, %d blocks", gmm_dtype_name(a->dtype),
                   gmm_dtype_name(b->dtype), scaling == GMM_FP8_FAST ? "fast accumulation" : "promoted every 128",
                   GMM_FP8_BLOCK_ROWS * k->consumers, (int)k->tile_n, plan->grid[0]);
    return 1;
}
#endif /* GMM_NO_QUANT */

/* Plans a product of 16-bit operands: kernel, grid, workspace. `kernel_op` is the operation of the kernel, which
   differs from `op` in dgrad with transposed weights: that runs as fwd. `b_format` is the format of packed weights that
   kernels may read, or 0. copies: gathered rows may be copied to the workspace. */
static int gmm__wgmma_plan_tiles(const gmm__call *call, gmm__plan *plan, gmm_gemm_op op, gmm_gemm_op kernel_op,
                                 gmm_dtype dtype, int32_t b_format, int copies) {
    const int fwd = op == gmm_gemm_fwd, wgrad = op == gmm_gemm_wgrad;
    const int a = gmm__mma_role_a(op), b = gmm__mma_role_b(op), d = fwd ? GMM__Y : wgrad ? GMM__DW : GMM__DX;
    const int64_t G = call->groups.count, m = wgrad ? call->out : call->rows, n = fwd ? call->out : call->in;
    const int64_t max_extent = INT32_MAX - 1024;
    const int32_t processors = call->ctx->device.processors;
    const gmm_sm90_kernel *k;
    double cost = 0.0;
    int64_t tiles;
    if (call->mat[d].dtype != GMM_F32 && call->mat[d].dtype != dtype)
        return gmm__decline(plan, "makes no %s from %s", gmm_dtype_name(call->mat[d].dtype), gmm_dtype_name(dtype));
    if (call->rows > GMM_SM90_RAGGED_ROWS || call->in > max_extent || call->out > max_extent)
        return gmm__decline(plan, "takes at most %d rows and %lld features", (int)GMM_SM90_RAGGED_ROWS,
                            (long long)max_extent);
    if (call->mat[a].ld > max_extent || call->mat[b].ld > max_extent || call->mat[d].ld > max_extent)
        return gmm__decline(plan, "takes ld up to %lld", (long long)max_extent);
    plan->kernel = gmm__wgmma_choose(call, op, kernel_op, dtype, b_format, processors, copies, &cost);
    if (plan->kernel < 0)
        return gmm__decline(plan, copies ? "has no kernel for these types"
                                         : "has no kernel that gathers rows itself, as options.workspace_limit asks");
    k = &gmm_sm90_kernels[plan->kernel];
    plan->kernel_name = k->name;
    /* an upper bound, since the device may choose tiles of little more than half the height */
    tiles = wgrad ? G * gmm__ceil_div(m, 16 * k->m16) : m / (8 * k->m16) + G;
    if (tiles > max_extent / gmm__ceil_div(n, k->tile_n)) return gmm__decline(plan, "takes no so many tiles");
    plan->grid[0] = gmm__grid(processors, call->options.sm_limit, k->ctas_per_sm, INT32_MAX);
    if (plan->grid[0] > 1) plan->grid[0] -= plan->grid[0] % 2; /* clusters of two CTAs */
    if (G > k->smem_groups)
        gmm__reserve(plan, GMM__WGMMA_GROUP_TABLES, (size_t)plan->grid[0] * gmm_sm90_table_bytes(G));
    gmm__mma_reserve_groups(call, plan);
    gmm__mma_reserve_table(call, plan, wgrad ? GMM__DW : GMM__W, GMM__MMA_MATRIX_TABLE);
    if (fwd) gmm__mma_reserve_table(call, plan, GMM__BIAS, GMM__MMA_BIAS_TABLE);
    return 1;
}

#ifndef GMM_NO_QUANT
/* Whether operands are MX32 or NV16, which are dequantized to 16 bits before they are multiplied. */
static int gmm__wgmma_dequantizes(const gmm__call *call, gmm_gemm_op op) {
    const gmm_scaling scaling = call->mat[gmm__mma_role_b(op)].scaling;
    return scaling == GMM_SCALING_MX32 || scaling == GMM_SCALING_NV16;
}
/* Whether tokens are transposed while they are dequantized. That is wgrad of NV16, whose columnwise copies are stored
   as lines along the tokens, the contraction of wgrad. Each group is then padded to a multiple of 16 rows. */
static int gmm__wgmma_transposes(const gmm__call *call, gmm_gemm_op op) {
    return op == gmm_gemm_wgrad && call->mat[GMM__X_].scaling == GMM_SCALING_NV16;
}
/* Format (b_format) of packed weights that kernels can read: the lines run along the contraction, and pitch and stride
   suit TMA; 0 = none. Addresses are checked by the plan, so that a query without addresses reports the same
   workspace. */
static int32_t gmm__wgmma_packed_format(const gmm__call *call, gmm_gemm_op op) {
    const gmm_mat *b = &call->mat[gmm__mma_role_b(op)];
    const int64_t alignment = 128 / gmm_dtype_bits(b->dtype);
    const int mx = b->scaling == GMM_SCALING_MX32;
    if (op == gmm_gemm_wgrad || (op == gmm_gemm_dgrad && mx) || b->dtype == GMM_E5M2 || b->ld % alignment ||
        (call->groups.count > 1 && b->group_stride % alignment))
        return 0;
    return !mx ? gmm_sm90_b_format_nv4 : b->dtype == GMM_E2M1 ? gmm_sm90_b_format_mx4 : gmm_sm90_b_format_mx8;
}
/* Rows and columns of operand 0 (A) or 1 (B) after dequantization into the workspace; 0 rows if it is not quantized. */
static int64_t gmm__wgmma_dequantized_rows(const gmm__call *call, gmm_gemm_op op, int operand, int64_t *cols) {
    const int64_t G = call->groups.count;
    const int role = operand ? gmm__mma_role_b(op) : gmm__mma_role_a(op);
    const int weight = role == GMM__W;
    const int transposed = call->mat[role].scaling == GMM_SCALING_NV16 && call->direction[role] == GMM_COLUMNWISE;
    *cols = weight ? (transposed ? call->out : call->in) : role == GMM__X_ ? call->in : call->out;
    if (call->mat[role].scaling == GMM_SCALING_NONE) return 0;
    return weight ? G * (transposed ? call->in : call->out)
                  : call->rows + (gmm__wgmma_transposes(call, op) ? 15 * G : 0);
}

/* Plans a product of MX32 or NV16 operands: the product of 16-bit operands, and the regions for its dequantized
   operands. */
static int gmm__wgmma_plan_dequantized(const gmm__call *call, gmm__plan *plan, gmm_gemm_op op) {
    const gmm_mat *a = &call->mat[gmm__mma_role_a(op)], *b = &call->mat[gmm__mma_role_b(op)];
    const int64_t G = call->groups.count;
    const int nv = b->scaling == GMM_SCALING_NV16;
    const gmm_dtype out = call->mat[op == gmm_gemm_fwd ? GMM__Y : op == gmm_gemm_wgrad ? GMM__DW : GMM__DX].dtype;
    const gmm_dtype dtype = a->scaling == GMM_SCALING_NONE ? a->dtype : nv && out == GMM_F16 ? GMM_F16 : GMM_BF16;
    int64_t blocks = 0, elements = 0; /* CTAs of the dequantizing kernel; 16-bit elements that it writes */
    char tile[64];
    int operand;
    if (gmm__index_of(call, gmm__mma_role_a(op))) return gmm__decline(plan, "gathers no rows beside quantized weights");
    if (a->dtype == GMM_F32 || (a->dtype == GMM_F16 && !nv))
        return gmm__decline(plan, "multiplies no %s by %s weights", gmm_dtype_name(a->dtype),
                            gmm_scaling_name(b->scaling));
    if (!gmm__wgmma_plan_tiles(call, plan, op, op == gmm_gemm_dgrad && nv ? gmm_gemm_fwd : op, dtype,
                               gmm__wgmma_packed_format(call, op), 1))
        return 0;
    if (a->scaling == GMM_SCALING_NONE &&
        !gmm__wgmma_check_alignment(call, gmm__mma_role_a(op), op == gmm_gemm_fwd ? "x" : "dy", plan))
        return 0;
    if (gmm_sm90_kernels[plan->kernel].b_format && !gmm__wgmma_check_alignment(call, gmm__mma_role_b(op), "w", plan))
        return 0;
    for (operand = 0; operand < 2; operand++) {
        int64_t cols;
        const int64_t rows = operand && gmm_sm90_kernels[plan->kernel].b_format
                                 ? 0 : gmm__wgmma_dequantized_rows(call, op, operand, &cols);
        if (!rows) continue;
        if (rows + G * GMM_GROUP_ROWS > INT32_MAX / gmm__ceil_div(cols, 64))
            return gmm__decline(plan, "converts no so many rows");
        blocks += gmm__ceil_div(rows + G * GMM_GROUP_ROWS, 32) * gmm__ceil_div(cols, GMM_EXPAND_SPAN);
        elements += rows * cols;
        gmm__reserve(plan, operand ? GMM__COPY_B : GMM__COPY_A, (size_t)(rows * cols) * 2);
    }
    if (nv) gmm__reserve(plan, GMM__WGMMA_ALPHA, 2 * (size_t)G * sizeof(float));
    if (gmm__wgmma_transposes(call, op)) {
        gmm__reserve(plan, GMM__WGMMA_TILES16, (size_t)(G + 1) * sizeof(int32_t));
        gmm__reserve(plan, GMM__WGMMA_OFFSETS16, (size_t)(G + 1) * sizeof(int64_t));
    }
    if (op != gmm_gemm_wgrad) gmm__mma_reserve_table(call, plan, GMM__W, GMM__MMA_SCALE_TABLE);
    if (call->options.workspace_limit && plan->workspace_bytes > (uint64_t)call->options.workspace_limit)
        return gmm__decline(plan, "needs %lld bytes of workspace, not options.workspace_limit %lld",
                            (long long)plan->workspace_bytes, (long long)call->options.workspace_limit);
    plan->grid[1] = gmm__grid(call->ctx->device.processors, call->options.sm_limit, 64, blocks);
    (void)snprintf(plan->note, sizeof plan->note, "%s by %s as %s in %lld MiB of workspace, %s, %d blocks",
                   gmm_dtype_name(a->dtype), gmm_dtype_name(b->dtype), gmm_dtype_name(dtype),
                   (long long)(elements >> 19), gmm__wgmma_tile_note(plan->kernel, tile), plan->grid[0]);
    return 1;
}
#endif /* GMM_NO_QUANT */

static int gmm__wgmma_plan_product(const gmm__call *call, gmm__plan *plan) {
    const gmm_gemm_op op = gmm__wgmma_op(call->op), kernel_op = call->product_act ? gmm_gemm_glu : op;
    const int role_a = gmm__mma_role_a(op), role_b = gmm__mma_role_b(op);
    const gmm_dtype dtype = call->mat[role_a].dtype;
    char tile[64];
    int copies, gathers;
    if (call->ctx->wgmma_unavailable) return gmm__decline(plan, "%s", call->ctx->wgmma_unavailable);
#ifndef GMM_NO_QUANT
    if (call->product_act && gmm__quantized(call))
        return gmm__decline(plan, "joins no act to quantized operands");
    if (gmm__wgmma_dequantizes(call, op)) return gmm__wgmma_plan_dequantized(call, plan, op);
    if (gmm__quantized(call)) return gmm__wgmma_plan_fp8(call, plan, op);
#endif
    if (dtype != GMM_BF16 && dtype != GMM_F16) return gmm__decline(plan, "multiplies no %s", gmm_dtype_name(dtype));
    for (copies = 1; copies >= 0; copies--) { /* without copies where options.workspace_limit forbids them */
        plan->workspace_bytes = 0;
        if ((call->product_act && !gmm__wgmma_serves_glu(call, plan, copies)) ||
            !gmm__wgmma_plan_tiles(call, plan, op, kernel_op, dtype, 0, copies) ||
            !gmm__wgmma_check_alignment(call, role_a, op == gmm_gemm_fwd ? "x" : "dy", plan) ||
            !gmm__wgmma_check_alignment(call, role_b, op == gmm_gemm_wgrad ? "x" : "w", plan))
            return 0;
        gathers = gmm_sm90_kernels[plan->kernel].gather;
        (void)snprintf(plan->note, sizeof plan->note, "%s, %d blocks%s%s", gmm__wgmma_tile_note(plan->kernel, tile),
                       plan->grid[0], gathers ? ", which gather rows" : "",
                       call->product_act ? ", with the activation" : "");
        if (gathers || gmm__mma_plan_gather(call, plan, op)) return 1;
    }
    return 0;
}

#ifndef GMM_NO_QUANT
/* Launches an FP8 product; `product` holds the split and every argument except the scales. */
static gmm_status gmm__wgmma_launch_fp8(const gmm__plan *plan, const gmm_sm90_args *product, gmm_stream stream) {
    const gmm__call *call = plan->call;
    const gmm_gemm_op op = gmm__wgmma_op(call->op);
    const int role_b = gmm__mma_role_b(op);
    const gmm_fp8_kernel *k = &gmm_fp8_kernels[plan->kernel];
    gmm_fp8_args args;
    cudaError_t e = cudaSuccess;
    memset(&args, 0, sizeof args);
    args.p = product->p;
    args.groups = product->groups;
    args.a_scale = call->mat[gmm__mma_role_a(op)];
    args.b_scale = call->mat[role_b];
    args.b_scale.table = product->p.b.table;
    args.wgrad = op == gmm_gemm_wgrad;
    args.b_columnwise = op == gmm_gemm_dgrad;
    if (call->groups.count > k->smem_groups) args.tables = (int32_t *)gmm__part(plan, GMM__WGMMA_GROUP_TABLES);
    if (args.b_scale.scale_table && (args.b_scale.flags & (uint32_t)GMM_MAT_TABLE_ON_HOST)) {
        args.b_scale.scale_table = (void *const *)gmm__part(plan, GMM__MMA_SCALE_TABLE);
        e = gmm_launch_copy(gmm__part(plan, GMM__MMA_SCALE_TABLE), call->mat[role_b].scale_table, call->groups.count,
                            stream);
    }
    if (e == cudaSuccess) e = gmm_launch_fp8(call->ctx->wgmma_encode, plan->kernel, plan->grid[0], &args, stream);
    return gmm__cuda_status(call, e);
}

/* Enqueues the dequantization of a product's operands to the workspace, and makes `product` address the results. Packed
   weights are described to the GEMM kernel instead. Where tokens are dequantized, the split of `product` consists of
   row offsets, those of `split`. NV16 has a scale for the whole tensor besides those of its blocks: it becomes part of
   alpha. */
static gmm_status gmm__wgmma_dequantize(const gmm__plan *plan, const gmm__mma_split *split, gmm_sm90_args *product,
                                        gmm_stream stream) {
    const gmm__call *call = plan->call;
    const gmm_gemm_op op = gmm__wgmma_op(call->op);
    const int transposes = gmm__wgmma_transposes(call, op);
    const int64_t G = call->groups.count;
    gmm_expand_args args;
    cudaError_t e = cudaSuccess;
    int operand;
    memset(&args, 0, sizeof args);
    args.dtype = gmm_sm90_kernels[plan->kernel].dtype;
    args.groups = call->groups.count;
    args.offsets = (const int64_t *)product->groups.splits;
    args.tiles = split->tiles[GMM__TILES_128];
    for (operand = 0; operand < 2; operand++) {
        const int role = operand ? gmm__mma_role_b(op) : gmm__mma_role_a(op);
        gmm_expand_operand *s = &args.operand[operand];
        gmm_kmat *m = operand ? &product->p.b : &product->p.a;
        int64_t cols;
        if (call->mat[role].scaling == GMM_SCALING_NONE) continue;
        (void)gmm__wgmma_dequantized_rows(call, op, operand, &cols);
        s->src = call->mat[role];
        s->src.table = m->table;
        if (role == GMM__W && s->src.scale_table && (s->src.flags & (uint32_t)GMM_MAT_TABLE_ON_HOST)) {
            s->src.scale_table = (void *const *)gmm__part(plan, GMM__MMA_SCALE_TABLE);
            e = gmm_launch_copy(gmm__part(plan, GMM__MMA_SCALE_TABLE), call->mat[role].scale_table, G, stream);
            if (e != cudaSuccess) return gmm__cuda_status(call, e);
        }
        if (operand && gmm_sm90_kernels[plan->kernel].b_format) { /* packed weights */
            product->codes = s->src;
            product->along = call->direction[role];
            product->rows = (int32_t)call->out;
            product->cols = (int32_t)call->in;
            m->stride = s->src.group_stride * gmm_dtype_bits(s->src.dtype) / 8;
            s->src.dtype = GMM_NONE;
            continue;
        }
        s->dst = (uint16_t *)gmm__part(plan, operand ? GMM__COPY_B : GMM__COPY_A);
        s->direction = call->direction[role];
        s->grouped = role != GMM__W;
        s->rows = (int32_t)(role == GMM__W ? call->out : call->rows);
        s->cols = (int32_t)(role == GMM__DY ? call->out : call->in);
        m->dtype = args.dtype;
        m->data = s->dst;
        m->table = NULL;
        m->ld = cols;
        m->stride = role == GMM__W ? call->in * call->out * 2 : 0;
    }
    if (call->mat[gmm__mma_role_b(op)].scaling == GMM_SCALING_NV16) {
        args.alpha = product->p.alpha;
        args.alpha_per_group = product->p.alpha_per_group;
        args.factor = (float *)gmm__part(plan, GMM__WGMMA_ALPHA);
        product->p.alpha = args.factor;
        product->alpha2 = args.factor + G;
        product->p.alpha_per_group = 1;
    }
    if (transposes) {
        args.units = split->tiles[GMM__TILES_16];
        args.ends = (int64_t *)gmm__part(plan, GMM__WGMMA_OFFSETS16);
        product->groups.splits = args.ends;
        product->groups.capacity = product->p.capacity = call->rows + 15 * G;
    }
    if (args.operand[0].src.dtype == GMM_NONE && args.operand[1].src.dtype == GMM_NONE && !args.factor) return GMM_OK;
    return gmm__cuda_status(call, gmm_launch_expand(transposes, plan->grid[1], call->options.sm_limit > 0,
                                                    gmm__mma_pdl(call), &args, stream));
}
#endif /* GMM_NO_QUANT */

/* Enqueues the offsets of a host split, zeros behind the last group of all results, the dequantization, and the
   product. */
static gmm_status gmm__wgmma_launch_product(const gmm__plan *plan, gmm_stream stream) {
    const gmm__call *call = plan->call;
    const gmm_gemm_op op = gmm__wgmma_op(call->op);
    const int wgrad = op == gmm_gemm_wgrad;
#ifdef GMM_NO_QUANT
    const int fp8 = 0, quantized_tokens = 0;
#else
    const int dequantizes = gmm__wgmma_dequantizes(call, op), fp8 = gmm__quantized(call) && !dequantizes;
    const int quantized_tokens = dequantizes && call->mat[gmm__mma_role_a(op)].scaling != GMM_SCALING_NONE;
#endif
    gmm__mma_split split;
    int32_t *tiles16 = NULL;
    gmm_sm90_args args;
    gmm_status s = GMM_OK;
    cudaError_t e = cudaSuccess;

    memset(&args, 0, sizeof args);
    memset(&split, 0, sizeof split);
    args.groups = call->groups;
    if (call->groups.on_host || quantized_tokens) {
#ifndef GMM_NO_QUANT
        if (dequantizes && gmm__wgmma_transposes(call, op)) tiles16 = (int32_t *)gmm__part(plan, GMM__WGMMA_TILES16);
#endif
        if (quantized_tokens) s = gmm__mma_split_of(plan, GMM__TILES_128, tiles16, &split, stream);
        else {
            int64_t *offsets = (int64_t *)gmm__part(plan, GMM__MMA_OFFSETS);
            s = gmm__mma_enqueue_offsets(call, offsets, NULL, 1, stream);
            split.offsets = offsets;
        }
        if (s != GMM_OK) return s;
        args.groups.splits = split.offsets;
        args.groups.form = GMM_SPLIT_OFFSETS;
        args.groups.dtype = GMM_I64;
        args.groups.on_host = args.groups.row_align = 0;
    }
    if ((s = gmm__mma_product_args(plan, op, &args.p, stream)) != GMM_OK) return s;
    if (args.p.zero_tail && !wgrad) {
        gmm_tail_args tail;
        tail.d = args.p.d;
        tail.groups = args.groups;
        tail.n = args.p.n;
        e = gmm_launch_tail(plan->grid[0], &tail, stream);
        if (e != cudaSuccess) return gmm__cuda_status(call, e);
    }
#ifndef GMM_NO_QUANT
    if (dequantizes && (s = gmm__wgmma_dequantize(plan, &split, &args, stream)) != GMM_OK) return s;
#endif
    if (call->product_act) e = gmm__wgmma_glu_args(plan, &args, stream);
    if (e != cudaSuccess) return gmm__cuda_status(call, e);
    args.index = gmm__row_index(call, gmm__mma_role_a(op));
    if (!fp8 && !gmm_sm90_kernels[plan->kernel].gather)
        e = gmm__mma_gather(plan, op, &args.p, &args.groups, stream);
    if (e != cudaSuccess) return gmm__cuda_status(call, e);
    if (!args.p.a.data) args.p.a.data = plan->workspace; /* gathered from no rows; a tensor map needs an address */
    if (call->rows == 0) { /* token matrices without rows may have no address, but a tensor map needs one */
        args.p.a.data = plan->workspace;
        if (wgrad) args.p.b.data = plan->workspace;
        else args.p.d.data = plan->workspace;
    }
#ifndef GMM_NO_QUANT
    if (fp8) return gmm__wgmma_launch_fp8(plan, &args, stream);
#endif
    if (call->groups.count > gmm_sm90_kernels[plan->kernel].smem_groups)
        args.tables = (int32_t *)gmm__part(plan, GMM__WGMMA_GROUP_TABLES);
    return gmm__cuda_status(call, gmm_launch_sm90(call->ctx->wgmma_encode, plan->kernel, plan->grid[0], &args, stream));
}

#endif /* __CUDACC__ */

/* ................................................................................................ 14.15 Runtime ... */

/* Checks that the functions of the CPU and of the CUDA runtime have in common; each function begins with one of them.
   `function` and `argument` are names for messages; `needed` is the argument that must not be NULL. */
static gmm_status gmm__rt_open(void *self, const char *function, gmm_stream stream, const void *needed,
                               const char *argument) {
    gmm_context *ctx = (gmm_context *)self;
    if (!ctx) return GMM_E_NULL;
    if (!needed) return gmm__fail(&ctx->error, GMM_E_NULL, "gmm_runtime.%s: %s is NULL", function, argument);
    if (ctx->config.space == GMM_SPACE_CPU && stream)
        return gmm__fail(&ctx->error, GMM_E_ARG, "gmm_runtime.%s: stream: %p must be NULL in a CPU context", function,
                         (void *)stream);
    return GMM_OK;
}

static gmm_status gmm__rt_open_flags(void *self, const char *function, gmm_stream stream, gmm_event event,
                                     uint32_t flags) {
    const gmm_status s = gmm__rt_open(self, function, stream, event, "event");
    if (s != GMM_OK || !(flags & ~(uint32_t)GMM_EVENT_EXTERNAL)) return s;
    return gmm__fail(&((gmm_context *)self)->error, GMM_E_ARG, "gmm_runtime.%s: flags 0x%x has unknown bits", function,
                     flags);
}

/* Checks the source or destination of a copy or fill of `height` rows. An empty copy may have any address and pitch. */
static gmm_status gmm__rt_open_rows(void *self, const char *function, gmm_stream stream, const char *argument,
                                    const void *memory, size_t pitch, size_t width, size_t height) {
    gmm_context *ctx = (gmm_context *)self;
    const gmm_status s = gmm__rt_open(self, function, stream, width && height ? memory : self, argument);
    if (s != GMM_OK || !width || !height) return s;
    if (pitch < width)
        return gmm__fail(&ctx->error, GMM_E_ARG, "gmm_runtime.%s: pitch of %s: %llu must be >= width %llu", function,
                         argument, (unsigned long long)pitch, (unsigned long long)width);
    if (pitch > SIZE_MAX / height)
        return gmm__fail(&ctx->error, GMM_E_OVERFLOW, "gmm_runtime.%s: %llu rows of pitch %llu of %s do not fit size_t",
                         function, (unsigned long long)height, (unsigned long long)pitch, argument);
    return GMM_OK;
}

/* A copy of `height` rows of `width` bytes; the pitches are the distances between rows, in bytes. */
typedef struct gmm__rt_copy {
    void *dst;
    size_t dst_pitch;
    const void *src;
    size_t src_pitch, width, height;
} gmm__rt_copy;

static gmm_status gmm__rt_open_copy(void *self, const char *function, const gmm__rt_copy *c, gmm_stream stream) {
    const gmm_status s = gmm__rt_open_rows(self, function, stream, "dst", c->dst, c->dst_pitch, c->width, c->height);
    if (s != GMM_OK) return s;
    return gmm__rt_open_rows(self, function, stream, "src", c->src, c->src_pitch, c->width, c->height);
}

static gmm_status gmm__rt_open_fill(void *self, const char *function, void *dst, size_t pitch, int32_t value,
                                    size_t width, size_t height, gmm_stream stream) {
    const gmm_status s = gmm__rt_open_rows(self, function, stream, "dst", dst, pitch, width, height);
    if (s != GMM_OK || (value >= 0 && value <= 255)) return s;
    return gmm__fail(&((gmm_context *)self)->error, GMM_E_ARG, "gmm_runtime.%s: value %d must be 0 to 255", function,
                     value);
}

/* gmm_runtime.run of both rows: calls the work's function on the host, which enqueues the work. */
static gmm_status gmm__rt_run(void *self, const gmm_work *work, gmm_stream stream) {
    const gmm_status s = gmm__rt_open(self, "run", stream, work, "work");
    if (s != GMM_OK) return s;
    if (!work->function)
        return gmm__fail(&((gmm_context *)self)->error, GMM_E_NULL, "gmm_runtime.run: work->function is NULL");
    return work->function(work->argument, stream);
}

/* --- The CPU row of the runtime table. Its only stream, NULL, runs work when it is enqueued; work that an event
   records is therefore complete, and an event contains nothing but its context. --- */

typedef struct gmm__cpu_event {
    gmm_context *ctx;
} gmm__cpu_event;

static gmm_status gmm__cpu_rt_event(void *self, const char *function, gmm_stream stream, gmm_event event,
                                    uint32_t flags, gmm__cpu_event **out) {
    gmm_context *ctx = (gmm_context *)self;
    const gmm_status s = gmm__rt_open_flags(self, function, stream, event, flags);
    if (s != GMM_OK) return s;
    *out = (gmm__cpu_event *)(void *)event;
    if ((*out)->ctx != ctx)
        return gmm__fail(&ctx->error, GMM_E_ARG, "gmm_runtime.%s: event: %p is not of this context", function,
                         (void *)event);
    return GMM_OK;
}

static gmm_status gmm__cpu_rt_stream_create(void *self, int32_t priority, gmm_stream *out) {
    const gmm_status s = gmm__rt_open(self, "stream_create", NULL, out, "out");
    (void)priority;
    if (s == GMM_OK) *out = NULL;
    return s;
}
static gmm_status gmm__cpu_rt_stream_destroy(void *self, gmm_stream stream) {
    return gmm__rt_open(self, "stream_destroy", stream, self, "self");
}
static gmm_status gmm__cpu_rt_stream_wait(void *self, gmm_stream stream, gmm_event event, uint32_t flags) {
    gmm__cpu_event *e;
    return gmm__cpu_rt_event(self, "stream_wait", stream, event, flags, &e);
}
static gmm_status gmm__cpu_rt_stream_sync(void *self, gmm_stream stream) {
    return gmm__rt_open(self, "stream_sync", stream, self, "self");
}

static gmm_status gmm__cpu_rt_event_create(void *self, gmm_event *out) {
    gmm_context *ctx = (gmm_context *)self;
    const gmm_status s = gmm__rt_open(self, "event_create", NULL, out, "out");
    const gmm_allocator *a;
    gmm__cpu_event *e;
    if (s != GMM_OK) return s;
    *out = NULL;
    a = &ctx->config.allocator;
    e = (gmm__cpu_event *)(a->alloc ? a->alloc(a->user, sizeof *e) : GMM_MALLOC(sizeof *e));
    if (!e)
        return gmm__fail(&ctx->error, GMM_E_MEMORY, "gmm_runtime.event_create: no memory for an event of %u bytes",
                         (unsigned)sizeof *e);
    e->ctx = ctx;
    *out = (gmm_event)(void *)e;
    return GMM_OK;
}
static gmm_status gmm__cpu_rt_event_destroy(void *self, gmm_event event) {
    const gmm_allocator *a;
    gmm__cpu_event *e;
    gmm_status s = gmm__rt_open(self, "event_destroy", NULL, self, "self");
    if (s != GMM_OK || !event) return s;
    if ((s = gmm__cpu_rt_event(self, "event_destroy", NULL, event, 0, &e)) != GMM_OK) return s;
    a = &e->ctx->config.allocator;
    if (a->release) a->release(a->user, e);
    else GMM_FREE(e);
    return GMM_OK;
}
static gmm_status gmm__cpu_rt_event_record(void *self, gmm_event event, gmm_stream stream, uint32_t flags) {
    gmm__cpu_event *e;
    return gmm__cpu_rt_event(self, "event_record", stream, event, flags, &e);
}
static gmm_status gmm__cpu_rt_event_query(void *self, gmm_event event, int32_t *done) {
    gmm__cpu_event *e;
    const gmm_status s = gmm__rt_open(self, "event_query", NULL, done, "done");
    if (s != GMM_OK) return s;
    *done = 1;
    return gmm__cpu_rt_event(self, "event_query", NULL, event, 0, &e);
}
static gmm_status gmm__cpu_rt_event_sync(void *self, gmm_event event) {
    gmm__cpu_event *e;
    return gmm__cpu_rt_event(self, "event_sync", NULL, event, 0, &e);
}

static gmm_status gmm__cpu_rt_copy2d(void *self, void *dst, size_t dst_pitch, const void *src, size_t src_pitch,
                                     size_t width, size_t height, gmm_stream stream) {
    const gmm__rt_copy copy = { dst, dst_pitch, src, src_pitch, width, height };
    const gmm_status s = gmm__rt_open_copy(self, "copy2d", &copy, stream);
    size_t i;
    if (s != GMM_OK || !width) return s;
    for (i = 0; i < height; i++) memcpy((char *)dst + i * dst_pitch, (const char *)src + i * src_pitch, width);
    return GMM_OK;
}
static gmm_status gmm__cpu_rt_copy(void *self, void *dst, const void *src, size_t bytes, gmm_stream stream) {
    const gmm__rt_copy copy = { dst, bytes, src, bytes, bytes, 1 };
    const gmm_status s = gmm__rt_open_copy(self, "copy", &copy, stream);
    if (s == GMM_OK && bytes) memcpy(dst, src, bytes);
    return s;
}
static gmm_status gmm__cpu_rt_fill2d(void *self, void *dst, size_t pitch, int32_t value, size_t width, size_t height,
                                     gmm_stream stream) {
    const gmm_status s = gmm__rt_open_fill(self, "fill2d", dst, pitch, value, width, height, stream);
    size_t i;
    if (s != GMM_OK || !width) return s;
    for (i = 0; i < height; i++) memset((char *)dst + i * pitch, value, width);
    return GMM_OK;
}
static gmm_status gmm__cpu_rt_fill(void *self, void *dst, int32_t value, size_t bytes, gmm_stream stream) {
    const gmm_status s = gmm__rt_open_fill(self, "fill", dst, bytes, value, bytes, 1, stream);
    if (s == GMM_OK && bytes) memset(dst, value, bytes);
    return s;
}
static gmm_status gmm__cpu_rt_is_capturing(void *self, gmm_stream stream, int32_t *capturing) {
    const gmm_status s = gmm__rt_open(self, "is_capturing", stream, capturing, "capturing");
    if (s == GMM_OK) *capturing = 0;
    return s;
}

/* --- The CUDA row of the runtime table. Each function makes its CUDA call on the context's device, and then makes the
   device current again that was current before. --- */

#ifdef __CUDACC__

/* Makes one CUDA call on the context's device and returns its status; ends a function after its checks. */
#define GMM__DEVICE_CALL(function, call) \
    int current; \
    cudaError_t e = gmm__cuda_enter(self, &current); \
    if (e == cudaSuccess) e = (call); \
    return gmm__cuda_leave(self, function, current, e)

static gmm_status gmm__cuda_rt_stream_create(void *self, int32_t priority, gmm_stream *out) {
    const gmm_status s = gmm__rt_open(self, "stream_create", NULL, out, "out");
    if (s != GMM_OK) return s;
    *out = NULL;
    GMM__DEVICE_CALL("stream_create", cudaStreamCreateWithPriority(out, cudaStreamNonBlocking, priority));
}
static gmm_status gmm__cuda_rt_stream_destroy(void *self, gmm_stream stream) {
    const gmm_status s = gmm__rt_open(self, "stream_destroy", stream, self, "self");
    if (s != GMM_OK || !stream) return s;
    GMM__DEVICE_CALL("stream_destroy", cudaStreamDestroy(stream));
}
static gmm_status gmm__cuda_rt_stream_wait(void *self, gmm_stream stream, gmm_event event, uint32_t flags) {
    const gmm_status s = gmm__rt_open_flags(self, "stream_wait", stream, event, flags);
    /* GMM_EVENT_EXTERNAL makes a node of the graph in a capture, and means nothing outside of one */
    const int node = s == GMM_OK && flags && gmm__capturing((const gmm_context *)self, stream);
    if (s != GMM_OK) return s;
    GMM__DEVICE_CALL("stream_wait",
                     cudaStreamWaitEvent(stream, event, node ? cudaEventWaitExternal : cudaEventWaitDefault));
}
static gmm_status gmm__cuda_rt_stream_sync(void *self, gmm_stream stream) {
    gmm_context *ctx = (gmm_context *)self;
    const gmm_status s = gmm__rt_open(self, "stream_sync", stream, self, "self");
    if (s != GMM_OK) return s;
    if (gmm__capturing(ctx, stream))
        return gmm__fail(&ctx->error, GMM_E_CAPTURE, "gmm_runtime.stream_sync: stream: %p is capturing",
                         (void *)stream);
    GMM__DEVICE_CALL("stream_sync", cudaStreamSynchronize(stream));
}

static gmm_status gmm__cuda_rt_event_create(void *self, gmm_event *out) {
    const gmm_status s = gmm__rt_open(self, "event_create", NULL, out, "out");
    if (s != GMM_OK) return s;
    *out = NULL;
    GMM__DEVICE_CALL("event_create", cudaEventCreateWithFlags(out, cudaEventDisableTiming));
}
static gmm_status gmm__cuda_rt_event_destroy(void *self, gmm_event event) {
    const gmm_status s = gmm__rt_open(self, "event_destroy", NULL, self, "self");
    if (s != GMM_OK || !event) return s;
    GMM__DEVICE_CALL("event_destroy", cudaEventDestroy(event));
}
static gmm_status gmm__cuda_rt_event_record(void *self, gmm_event event, gmm_stream stream, uint32_t flags) {
    const gmm_status s = gmm__rt_open_flags(self, "event_record", stream, event, flags);
    const int node = s == GMM_OK && flags && gmm__capturing((const gmm_context *)self, stream);
    if (s != GMM_OK) return s;
    GMM__DEVICE_CALL("event_record", cudaEventRecordWithFlags(event, stream,
                                                              node ? cudaEventRecordExternal
                                                                   : cudaEventRecordDefault));
}
static gmm_status gmm__cuda_rt_event_query(void *self, gmm_event event, int32_t *done) {
    gmm_status s = gmm__rt_open(self, "event_query", NULL, done, "done");
    int current;
    cudaError_t e;
    if (s != GMM_OK || (s = gmm__rt_open(self, "event_query", NULL, event, "event")) != GMM_OK) return s;
    e = gmm__cuda_enter(self, &current);
    if (e == cudaSuccess) e = cudaEventQuery(event);
    *done = e == cudaSuccess;
    if (e == cudaErrorNotReady) {
        (void)cudaGetLastError(); /* the event is not complete: no error */
        e = cudaSuccess;
    }
    return gmm__cuda_leave(self, "event_query", current, e);
}
static gmm_status gmm__cuda_rt_event_sync(void *self, gmm_event event) {
    const gmm_status s = gmm__rt_open(self, "event_sync", NULL, event, "event");
    if (s != GMM_OK) return s;
    GMM__DEVICE_CALL("event_sync", cudaEventSynchronize(event));
}

/* Rows without gaps are copied as one row, since cudaMemcpy2DAsync limits the pitch. */
static gmm_status gmm__cuda_rt_copy2d(void *self, void *dst, size_t dst_pitch, const void *src, size_t src_pitch,
                                      size_t width, size_t height, gmm_stream stream) {
    const gmm__rt_copy copy = { dst, dst_pitch, src, src_pitch, width, height };
    const gmm_status s = gmm__rt_open_copy(self, "copy2d", &copy, stream);
    const int dense = height == 1 || (dst_pitch == width && src_pitch == width);
    if (s != GMM_OK || !width || !height) return s;
    GMM__DEVICE_CALL("copy2d", dense ? cudaMemcpyAsync(dst, src, width * height, cudaMemcpyDefault, stream)
                                   : cudaMemcpy2DAsync(dst, dst_pitch, src, src_pitch, width, height, cudaMemcpyDefault,
                                                       stream));
}
static gmm_status gmm__cuda_rt_copy(void *self, void *dst, const void *src, size_t bytes, gmm_stream stream) {
    const gmm__rt_copy copy = { dst, bytes, src, bytes, bytes, 1 };
    const gmm_status s = gmm__rt_open_copy(self, "copy", &copy, stream);
    if (s != GMM_OK || !bytes) return s;
    GMM__DEVICE_CALL("copy", cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDefault, stream));
}
static gmm_status gmm__cuda_rt_fill2d(void *self, void *dst, size_t pitch, int32_t value, size_t width, size_t height,
                                      gmm_stream stream) {
    const gmm_status s = gmm__rt_open_fill(self, "fill2d", dst, pitch, value, width, height, stream);
    if (s != GMM_OK || !width || !height) return s;
    GMM__DEVICE_CALL("fill2d", height == 1 || pitch == width
                                 ? cudaMemsetAsync(dst, value, width * height, stream)
                                 : cudaMemset2DAsync(dst, pitch, value, width, height, stream));
}
static gmm_status gmm__cuda_rt_fill(void *self, void *dst, int32_t value, size_t bytes, gmm_stream stream) {
    const gmm_status s = gmm__rt_open_fill(self, "fill", dst, bytes, value, bytes, 1, stream);
    if (s != GMM_OK || !bytes) return s;
    GMM__DEVICE_CALL("fill", cudaMemsetAsync(dst, value, bytes, stream));
}
static gmm_status gmm__cuda_rt_is_capturing(void *self, gmm_stream stream, int32_t *capturing) {
    enum cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    const gmm_status s = gmm__rt_open(self, "is_capturing", stream, capturing, "capturing");
    int current;
    cudaError_t e;
    if (s != GMM_OK) return s;
    e = gmm__cuda_enter(self, &current);
    if (e == cudaSuccess) e = cudaStreamIsCapturing(stream, &status);
    *capturing = status != cudaStreamCaptureStatusNone;
    return gmm__cuda_leave(self, "is_capturing", current, e);
}

#undef GMM__DEVICE_CALL
#endif /* __CUDACC__ */

/* The runtime table: one row of functions per memory space, in the order of gmm_space. gmm_runtime_of copies a row to
   the caller. */
#define GMM__RT(row, entry) gmm__##row##_rt_##entry
static const gmm_runtime gmm__runtimes[] = {
    { 0, GMM_SPACE_CPU, NULL,
      GMM__RT(cpu, stream_create), GMM__RT(cpu, stream_destroy), GMM__RT(cpu, stream_wait), GMM__RT(cpu, stream_sync),
      GMM__RT(cpu, event_create), GMM__RT(cpu, event_destroy), GMM__RT(cpu, event_record), GMM__RT(cpu, event_query),
      GMM__RT(cpu, event_sync), GMM__RT(cpu, copy), GMM__RT(cpu, copy2d), GMM__RT(cpu, fill), GMM__RT(cpu, fill2d),
      GMM__RT(cpu, is_capturing), gmm__rt_run },
#ifdef __CUDACC__
    { 0, GMM_SPACE_CUDA, NULL,
      GMM__RT(cuda, stream_create), GMM__RT(cuda, stream_destroy), GMM__RT(cuda, stream_wait),
      GMM__RT(cuda, stream_sync), GMM__RT(cuda, event_create), GMM__RT(cuda, event_destroy),
      GMM__RT(cuda, event_record), GMM__RT(cuda, event_query), GMM__RT(cuda, event_sync), GMM__RT(cuda, copy),
      GMM__RT(cuda, copy2d), GMM__RT(cuda, fill), GMM__RT(cuda, fill2d), GMM__RT(cuda, is_capturing),
      gmm__rt_run },
#endif
};
#undef GMM__RT

GMMDEF gmm_status gmm_runtime_of(gmm_context *ctx, gmm_runtime *out) {
    gmm_runtime full;
    uint32_t size;
    if (!ctx) return GMM_E_NULL;
    if (!out) return gmm__fail(&ctx->error, GMM_E_NULL, "gmm_runtime_of: out is NULL");
    size = out->struct_size;
    if (size > sizeof full)
        return gmm__fail(&ctx->error, GMM_E_VERSION, "gmm_runtime_of: out: struct_size %u is larger than the %u bytes "
                         "of version %s", size, (unsigned)sizeof full, GMM_VERSION_STRING);
    full = gmm__runtimes[ctx->config.space];
    full.struct_size = size;
    full.self = ctx;
    memcpy(out, &full, size ? size : sizeof full);
    return GMM_OK;
}

/* .............................................................................. 14.16 Optional fields of calls ... */

/* The optional fields, options and flags of calls, one per row. A row gives the operations whose descriptors have the
   field (a range of GMM_OP_LIST), the condition under which a call uses it, and for each engine 1 if it honours the
   field. gmm__select_from declines an engine that does not honour a field which the call uses, so that no engine
   silently ignores one. Whoever adds a field to a descriptor adds a row here, with 1 for the engines that implement it.
   Also 1     permissions (allow_*, fp8_fast_accum) and settings of one engine (tile, workspace_limit), which other
              engines may ignore; on the CPU engine sm_limit and groups.rows_hint, which never change results. CUBLASLT
              has 0 for sm_limit: with fewer multiprocessors cuBLASLt may choose algorithms with other bits.
   No row     required operands, and the results that an operation exists for, of which a call may want only some
              (linear.db, activation.dx, gradients of an MLP, route.counts, row_of, slot_of, sizes, dx and drows of
              permute, rowwise and columnwise of quantization). An engine is in the engine table for an operation only
              if it computes all of these.
   X(field, first operation, last operation, condition, CPU, WGMMA, MMA, CUBLASLT, name in messages) */
#define GMM__FIELD_LIST(X) \
    X(QUANTIZED, LINEAR_FWD, LINEAR_WGRAD, gmm__quantized(call), 1, 1, 1, 0, "quantized operands") \
    X(ALPHA, LINEAR_FWD, LINEAR_WGRAD, linear->alpha, 1, 1, 1, 1, "linear.alpha") \
    X(ALPHA_PER_GROUP, LINEAR_FWD, LINEAR_WGRAD, linear->alpha && linear->alpha_per_group, 1, 1, 1, 1, \
      "linear.alpha_per_group") \
    X(BIAS, LINEAR_FWD, LINEAR_FWD, call->mat[GMM__BIAS].dtype != GMM_NONE, 1, 1, 1, 1, "linear.bias") \
    X(BIAS_SCALE, LINEAR_FWD, LINEAR_BGRAD, \
      linear->bias_scale && (call->mat[GMM__BIAS].dtype != GMM_NONE || call->op == GMM_OP_LINEAR_BGRAD), 1, 1, 1, 0, \
      "linear.bias_scale") \
    X(D_BIAS_SCALE, LINEAR_BGRAD, LINEAR_BGRAD, linear->d_bias_scale, 1, 0, 1, 0, "linear.d_bias_scale") \
    X(D_BIAS_SCALE_ADD, LINEAR_BGRAD, LINEAR_BGRAD, linear->d_bias_scale && linear->d_bias_scale_add, 1, 0, 1, 0, \
      "linear.d_bias_scale_add") \
    X(LINEAR_PROB, LINEAR_FWD, LINEAR_DGRAD, linear->prob, 1, 1, 1, 0, "linear.prob") \
    X(INDEX, LINEAR_FWD, LINEAR_BGRAD, linear->x_index || linear->dy_index, 1, 1, 1, 0, "linear.x_index, dy_index") \
    X(Y_ADD, LINEAR_FWD, LINEAR_DGRAD, linear->y_add, 1, 1, 1, 1, "linear.y_add") \
    X(MAIN_GRAD, QUANTIZE, CONVERT, gmm__any_grad(call, GMM__GRAD_MAIN), 1, 1, 1, 1, "grad.main_grad") \
    X(GRAD_BETA, QUANTIZE, CONVERT, gmm__any_grad(call, GMM__GRAD_BETA), 1, 1, 1, 0, "grad.beta") \
    X(GRAD_FROZEN, QUANTIZE, CONVERT, gmm__any_grad(call, GMM__GRAD_FROZEN), 1, 1, 1, 0, "grad.frozen") \
    X(GROUPS_TAIL, QUANTIZE, CONVERT, call->groups.tail != GMM_TAIL_KEEP, 1, 1, 1, 1, "groups.tail") \
    X(GROUPS_FAULT, QUANTIZE, CONVERT, call->groups.fault, 1, 1, 1, 1, "groups.fault") \
    X(GROUPS_HINT, QUANTIZE, CONVERT, call->groups.rows_hint, 1, 1, 1, 1, "groups.rows_hint") \
    X(ROW_AMAX, QUANTIZE, CONVERT, gmm__any_row_amax(call), 1, 0, 1, 0, "GMM_MAT_ROW_AMAX") \
    X(SM_LIMIT, QUANTIZE, CONVERT, call->options.sm_limit, 1, 1, 1, 0, "options.sm_limit") \
    X(NONDETERMINISM, QUANTIZE, CONVERT, call->options.allow_nondeterminism, 1, 1, 1, 1, \
      "options.allow_nondeterminism") \
    X(TF32, QUANTIZE, CONVERT, call->options.allow_tf32, 1, 1, 1, 1, "options.allow_tf32") \
    X(FAST_ACCUM, QUANTIZE, CONVERT, call->options.fp8_fast_accum, 1, 1, 1, 1, "options.fp8_fast_accum") \
    X(TILE, QUANTIZE, CONVERT, call->options.tile, 1, 1, 1, 1, "options.tile") \
    X(WORKSPACE_LIMIT, QUANTIZE, CONVERT, call->options.workspace_limit, 1, 1, 1, 1, "options.workspace_limit") \
    X(ACT_PROB, ACT_FWD, ACT_BWD, call->d.act.prob, 1, 0, 1, 0, "activation.prob") \
    X(ACT_DPROB, ACT_BWD, ACT_BWD, call->d.act.dprob, 1, 0, 1, 0, "activation.dprob") \
    X(ACT_Y, ACT_BWD, ACT_BWD, call->d.act.y, 1, 0, 1, 0, "activation.y") \
    X(ACT_INTERLEAVE, ACT_FWD, MLP_WGRAD, call->act.interleave, 1, 0, 1, 0, "act.interleave") \
    X(ACT_LIMIT, ACT_FWD, MLP_WGRAD, call->act.limit != 0.0f, 1, 0, 1, 0, "act.limit") \
    X(ACT_ALPHA, ACT_FWD, MLP_WGRAD, call->act.alpha != 0.0f, 1, 0, 1, 0, "act.alpha") \
    X(ACT_OFFSET, ACT_FWD, MLP_WGRAD, call->act.offset != 0.0f, 1, 0, 1, 0, "act.offset") \
    X(ACT_BETAS, ACT_FWD, MLP_WGRAD, call->act.beta1 != 0.0f || call->act.beta2 != 0.0f, 1, 0, 1, 0, "act.beta1") \
    X(MLP_PROB, MLP_FWD, MLP_BWD, call->d.mlp.prob, 1, 0, 1, 0, "mlp.prob") \
    X(MLP_DPROB, MLP_BWD, MLP_BWD, call->d.mlp.dprob, 1, 0, 1, 0, "mlp.dprob") \
    X(MLP_SAVED, MLP_FWD, MLP_FWD, call->d.mlp.saved, 1, 0, 1, 0, "mlp.saved") \
    X(MLP_HOOKS, MLP_FWD, MLP_WGRAD, call->d.mlp.hooks, 1, 0, 1, 0, "mlp.hooks") \
    X(MLP_INDEX, MLP_FWD, MLP_BWD, call->d.mlp.x_index || call->d.mlp.dy_index, 1, 0, 1, 0, "mlp.x_index, dy_index") \
    X(MLP_QUANT, MLP_FWD, MLP_WGRAD, call->d.mlp.quant, 1, 0, 1, 0, "mlp.quant") \
    X(MOE_ALIGN, MOE_FWD, MOE_BWD, call->d.moe.align > 1, 1, 0, 1, 0, "moe.align") \
    X(MOE_ROUTE, MOE_FWD, MOE_BWD, call->d.moe.route, 1, 0, 1, 0, "moe.route") \
    X(MOE_PROBS, MOE_FWD, MOE_BWD, call->d.moe.probs, 1, 0, 1, 0, "moe.probs") \
    X(MOE_DPROBS, MOE_BWD, MOE_BWD, call->d.moe.dprobs, 1, 0, 1, 0, "moe.dprobs") \
    X(MOE_SIZES, MOE_FWD, MOE_BWD, call->d.moe.sizes, 1, 0, 1, 0, "moe.sizes") \
    X(MOE_SAVED, MOE_FWD, MOE_FWD, call->d.moe.saved, 1, 0, 1, 0, "moe.saved") \
    X(MOE_SAVE_ROWS, MOE_FWD, MOE_BWD, call->d.moe.save_rows, 1, 0, 1, 0, "moe.save_rows") \
    X(EXPERT_BIAS, TOPK_FWD, TOPK_BWD, call->d.route.expert_bias, 1, 0, 1, 0, "route.expert_bias") \
    X(NORMALIZE, TOPK_FWD, TOPK_BWD, call->d.route.normalize, 1, 0, 1, 0, "route.normalize") \
    X(ROUTE_SCALE, TOPK_FWD, TOPK_BWD, call->d.route.scale != 0.0f, 1, 0, 1, 0, "route.scale") \
    X(ROUTE_OFFSETS, TOPK_FWD, TOPK_FWD, call->d.route.offsets, 1, 0, 1, 0, "route.offsets") \
    X(AUX_LOSS, TOPK_FWD, TOPK_BWD, call->d.route.aux_coeff != 0.0f, 1, 0, 1, 0, "route.aux_coeff") \
    X(Z_LOSS, TOPK_FWD, TOPK_BWD, call->d.route.z_coeff != 0.0f, 1, 0, 1, 0, "route.z_coeff") \
    X(DLOSS, TOPK_BWD, TOPK_BWD, call->d.route.dloss, 1, 0, 1, 0, "route.dloss") \
    X(ROUTE_GROUPS, TOPK_FWD, TOPK_BWD, call->d.route.groups > 1, 1, 0, 1, 0, "route.groups") \
    X(SINKHORN, TOPK_FWD, TOPK_BWD, call->d.route.sinkhorn, 1, 0, 1, 0, "route.sinkhorn") \
    X(SEQUENCES, TOPK_FWD, TOPK_BWD, call->d.route.sequences > 1, 1, 0, 1, 0, "route.sequences") \
    X(PADDING, TOPK_FWD, TOPK_BWD, call->d.route.padding, 1, 0, 1, 0, "route.padding") \
    X(TOTAL_COUNTS, TOPK_FWD, TOPK_FWD, call->d.route.total_counts, 1, 0, 1, 0, "route.total_counts") \
    X(PERMUTE_ALIGN, PERMUTE_MAP, UNPERMUTE_BWD, call->d.permute.align > 1, 1, 0, 1, 0, "permute.align") \
    X(PERMUTE_TAIL, PERMUTE_MAP, UNPERMUTE_BWD, call->d.permute.tail != GMM_TAIL_KEEP, 1, 0, 1, 0, "permute.tail") \
    X(PERMUTE_FAULT, PERMUTE_MAP, UNPERMUTE_BWD, call->d.permute.fault, 1, 0, 1, 0, "permute.fault") \
    X(PERMUTE_PROBS, PERMUTE_FWD, UNPERMUTE_BWD, call->d.permute.probs, 1, 0, 1, 0, "permute.probs") \
    X(PERMUTE_ROW_PROBS, PERMUTE_FWD, PERMUTE_FWD, call->d.permute.row_probs, 1, 0, 1, 0, "permute.row_probs") \
    X(PERMUTE_DPROBS, PERMUTE_BWD, UNPERMUTE_BWD, call->d.permute.dprobs, 1, 0, 1, 0, "permute.dprobs") \
    X(PAD_PROB, PAD, UNPAD, call->d.pad.src_prob, 1, 0, 1, 0, "padding.src_prob") \
    X(PAD_SIZES, PAD, PAD, call->d.pad.sizes, 1, 0, 1, 0, "padding.sizes") \
    X(SUM_SCALE, ACCUMULATE, ACCUMULATE, call->d.sum.scale != 1.0f, 1, 0, 1, 0, "accumulation.scale") \
    X(SUM_BETA, ACCUMULATE, ACCUMULATE, call->d.sum.beta != 0.0f, 1, 0, 1, 0, "accumulation.beta") \
    X(POW2, QUANTIZE, SHARD_CAST, call->format.pow2, 1, 0, 1, 0, "format.pow2") \
    X(SQUARE, QUANTIZE, SHARD_CAST, call->format.square, 1, 0, 1, 0, "format.square") \
    X(HADAMARD, QUANTIZE, SHARD_CAST, call->format.hadamard, 1, 0, 1, 0, "format.hadamard") \
    X(STOCHASTIC, QUANTIZE, SHARD_CAST, call->format.stochastic, 1, 0, 1, 0, "format.stochastic") \
    X(FOUR_OVER_SIX, QUANTIZE, SHARD_CAST, call->format.four_over_six, 1, 0, 1, 0, "format.four_over_six") \
    X(E4M3_256, QUANTIZE, SHARD_CAST, call->format.e4m3_256, 1, 0, 1, 0, "format.e4m3_256") \
    X(EPS, QUANTIZE, SHARD_CAST, call->format.eps != 0.0f, 1, 0, 1, 0, "format.eps") \
    X(DELAYED, QUANTIZE, SHARD_CAST, call->format.delayed, 1, 0, 1, 0, "format.delayed") \
    X(QUANT_PHASE, QUANTIZE, REQUANTIZE, gmm__casts(call->op) && call->d.quant.phase != GMM_QUANT_ALL, 1, 0, 1, 0, \
      "quantization.phase") \
    X(QUANT_DB, QUANTIZE, REQUANTIZE, gmm__casts(call->op) && call->d.quant.db, 1, 0, 1, 0, "quantization.db") \
    X(QUANT_SKIP, QUANTIZE, REQUANTIZE, gmm__casts(call->op) && call->d.quant.skip, 1, 0, 1, 0, "quantization.skip") \
    X(QUANT_INDEX, QUANTIZE, REQUANTIZE, gmm__casts(call->op) && call->d.quant.src_index, 1, 0, 1, 0, \
      "quantization.src_index") \
    X(ACT_CAST, QUANTIZE, ACT_BWD, call->act_source || call->act_amax, 0, 0, 1, 0, "a cast joined to an activation") \
    X(PRODUCT_ACT, LINEAR_FWD, LINEAR_FWD, call->product_act, 0, 1, 0, 0, "an act joined to its product") \
    X(MOST_RECENT, SCALE_UPDATE, SCALE_UPDATE, call->d.update.most_recent, 1, 0, 1, 0, "update.most_recent")

enum gmm__field {
#define GMM__X(field, first, last, condition, cpu, wgmma, mma, cublaslt, name) GMM__FIELD_##field,
    GMM__FIELD_LIST(GMM__X)
#undef GMM__X
    GMM__FIELDS
};

/* The engines' columns of the list, for the engine table. */
#define GMM__X(field, first, last, condition, cpu, wgmma, mma, cublaslt, name) cpu,
static const unsigned char gmm__honours_cpu[] = { GMM__FIELD_LIST(GMM__X) };
#undef GMM__X
#if defined(__CUDACC__)
#define GMM__X(field, first, last, condition, cpu, wgmma, mma, cublaslt, name) wgmma,
static const unsigned char gmm__honours_wgmma[] = { GMM__FIELD_LIST(GMM__X) };
#undef GMM__X
#endif
#if defined(__CUDACC__) && defined(GMM__ELEM_DONE)
#define GMM__X(field, first, last, condition, cpu, wgmma, mma, cublaslt, name) mma,
static const unsigned char gmm__honours_mma[] = { GMM__FIELD_LIST(GMM__X) };
#undef GMM__X
#endif
#ifdef GMM__CUBLASLT
#define GMM__X(field, first, last, condition, cpu, wgmma, mma, cublaslt, name) cublaslt,
static const unsigned char gmm__honours_cublaslt[] = { GMM__FIELD_LIST(GMM__X) };
#undef GMM__X
#endif

static const char *gmm__field_name(int field) {
    static const char *const names[] = {
#define GMM__X(field, first, last, condition, cpu, wgmma, mma, cublaslt, name) name,
        GMM__FIELD_LIST(GMM__X)
#undef GMM__X
    };
    return names[field];
}

/* Whether a gradient destination of the call has a property. */
enum gmm__grad_property { GMM__GRAD_MAIN, GMM__GRAD_BETA, GMM__GRAD_FROZEN };
static int gmm__any_grad(const gmm__call *call, enum gmm__grad_property property) {
    int role;
    for (role = 0; role < GMM__ROLES; role++) {
        const gmm_grad *g = &call->grad[role];
        if (property == GMM__GRAD_MAIN ? g->main_grad : property == GMM__GRAD_BETA ? !!g->beta : !!g->frozen) return 1;
    }
    return 0;
}

/* Whether an operand of the call has a global amax per row (GMM_MAT_ROW_AMAX). */
static int gmm__any_row_amax(const gmm__call *call) {
    uint32_t flags = 0;
    int role;
    for (role = 0; role < GMM__ROLES; role++) flags |= call->mat[role].flags;
    return (flags & (uint32_t)GMM_MAT_ROW_AMAX) != 0;
}

/* Whether gmm__call.d is a gmm_quantization. */
static int gmm__casts(gmm_op op) { return op == GMM_OP_QUANTIZE || op == GMM_OP_REQUANTIZE; }

/* The first optional field of GMM__FIELD_LIST that a checked call uses and an engine does not honour; -1 if there is
   none. The conditions of the list read `call` and `linear`. */
static int gmm__missing_field(const gmm__call *call, const unsigned char *honours) {
    const gmm_linear *linear = &call->d.linear;
    const gmm_op op = call->op;
#define GMM__X(field, first, last, condition, cpu, wgmma, mma, cublaslt, name) \
    if (!honours[GMM__FIELD_##field] && op >= GMM_OP_##first && op <= GMM_OP_##last && (condition)) \
        return GMM__FIELD_##field;
    GMM__FIELD_LIST(GMM__X)
#undef GMM__X
    return -1;
}

/* The text of gmm_describe: a line for the plan of the call, and one for each plan that it is composed of. */

static void gmm__text_add(gmm__text *text, const char *format, ...) {
    va_list list;
    int length;
    va_start(list, format);
    length = vsnprintf(text->data + text->used, text->bytes - text->used, format, list);
    va_end(list);
    if (length < 0) return;
    text->used += (size_t)length < text->bytes - text->used ? (size_t)length : text->bytes - text->used - 1;
}

static void gmm__describe_plan(gmm__text *text, const gmm__plan *plan) {
    const gmm__call *call = plan->call;
    gmm__text_add(text, "%*s%s: engine %s", 2 * text->depth, "", gmm_op_name(call->op), gmm_engine_name(plan->engine));
    if (plan->kernel_name) gmm__text_add(text, ", kernel %s", plan->kernel_name);
    gmm__text_add(text, ", workspace %llu bytes", (unsigned long long)plan->workspace_bytes);
    if (plan->saved_bytes) gmm__text_add(text, ", saved %llu bytes", (unsigned long long)plan->saved_bytes);
    if (plan->note[0]) gmm__text_add(text, "; %s", plan->note);
    if (call->shapes[0]) gmm__text_add(text, " (%s)", call->shapes);
    gmm__text_add(text, "\n");
}

/* Checks the descriptor of an operation that has a query, as the query does. */
static gmm_status gmm__prepare_query(gmm__call *call, gmm_context *ctx, gmm_op op, const char *function,
                                     const void *d) {
    gmm_status s;
    switch (op) {
    case GMM_OP_QUANTIZE: case GMM_OP_REQUANTIZE:
        return gmm__quantize_prepare(call, ctx, op, function, (const gmm_quantization *)d, 1);
    case GMM_OP_DEQUANTIZE:
        return gmm__dequantize_prepare(call, ctx, function, (const gmm_dequantization *)d, 1);
    case GMM_OP_TRANSPOSE: return gmm__transpose_prepare(call, ctx, function, (const gmm_transposition *)d, 1);
    case GMM_OP_LINEAR_FWD: case GMM_OP_LINEAR_DGRAD: case GMM_OP_LINEAR_WGRAD: case GMM_OP_LINEAR_BGRAD:
        return gmm__linear_prepare(call, ctx, op, function, (const gmm_linear *)d, 1);
    case GMM_OP_ACT_FWD: case GMM_OP_ACT_BWD:
        return gmm__act_prepare(call, ctx, op, function, (const gmm_activation *)d, 1);
    case GMM_OP_MLP_FWD: case GMM_OP_MLP_BWD: case GMM_OP_MLP_WGRAD:
        return gmm__mlp_prepare(call, ctx, op, function, (const gmm_mlp *)d, GMM__MLP_QUERY);
    case GMM_OP_MOE_FWD: case GMM_OP_MOE_BWD:
        return gmm__moe_prepare(call, ctx, op, function, (const gmm_moe *)d, 1);
    case GMM_OP_TOPK_FWD: case GMM_OP_TOPK_BWD:
        return gmm__topk_prepare(call, ctx, op, function, (const gmm_route *)d, 1);
    case GMM_OP_PERMUTE_MAP: case GMM_OP_PERMUTE_FWD: case GMM_OP_PERMUTE_BWD: case GMM_OP_UNPERMUTE_FWD:
    case GMM_OP_UNPERMUTE_BWD:
        return gmm__permute_prepare(call, ctx, op, function, (const gmm_permute *)d, 1);
    case GMM_OP_PAD: case GMM_OP_UNPAD:
        return gmm__pad_prepare(call, ctx, op, function, (const gmm_padding *)d, 1);
    case GMM_OP_GLU_INTERLEAVE: return gmm__glu_prepare(call, ctx, function, (const gmm_glu *)d, 1);
    case GMM_OP_ACCUMULATE: return gmm__accumulate_prepare(call, ctx, function, (const gmm_accumulation *)d, 1);
    case GMM_OP_CONVERT: return gmm__convert_prepare(call, ctx, function, (const gmm_conversion *)d, 1);
    default:
        s = gmm__open(call, ctx, op, function, 1);
        return s != GMM_OK ? s : gmm__refuse(call, GMM_E_ARG, "op", "%d (%s) has no query", (int)op, gmm_op_name(op));
    }
}

GMMDEF gmm_status gmm_describe(gmm_context *ctx, gmm_op op, const void *descriptor, char *text, size_t bytes) {
    gmm__call call;
    gmm__plan plan;
    gmm__text t;
    gmm_status s = gmm__prepare_query(&call, ctx, op, "gmm_describe", descriptor);
    if (s != GMM_OK) return s;
    if (!text || bytes < 1) return gmm__refuse(&call, GMM_E_NULL, "text", "is NULL or has no bytes");
    if ((s = gmm__select(&call, &plan)) != GMM_OK) return s;
    t.data = text;
    t.bytes = bytes;
    t.used = 0;
    t.depth = 0;
    gmm__describe_plan(&t, &plan);
    t.depth = 1;
    call.describes = &t; /* planning is pure: the second plan is the first, and writes the lines of the steps */
    return gmm__select(&call, &plan);
}

/* gmm_config.verify: checks of values in the context's memory before a launch, and of errors of the device behind it.
   Allocates nothing: values are read in parts. */

enum { GMM__VERIFY_PART = 256 }; /* values that are read at a time */

/* Copies `bytes` of the context's memory to the host, behind the work of the stream; 0 bytes: waits for it. */
static gmm_status gmm__fetch(const gmm__call *call, void *to, const void *from, size_t bytes, gmm_stream stream) {
#ifdef __CUDACC__
    if (call->ctx->config.space == GMM_SPACE_CUDA) {
        int current;
        cudaError_t e = gmm__cuda_enter(call->ctx, &current);
        if (e == cudaSuccess && bytes > 0) e = cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream);
        if (e == cudaSuccess) e = cudaStreamSynchronize(stream);
        if (current != call->ctx->config.device) (void)cudaSetDevice(current);
        return gmm__cuda_status(call, e);
    }
#endif
    (void)call;
    (void)stream;
    if (bytes > 0) memcpy(to, from, bytes);
    return GMM_OK;
}

static int gmm__is_permutation(const gmm__call *call) {
    return call->op >= GMM_OP_PERMUTE_MAP && call->op <= GMM_OP_UNPERMUTE_BWD;
}

/* A split in the context's memory, as gmm__check_split checks one on the host. *live becomes its sum. */
static gmm_status gmm__verify_split(const gmm__call *call, int64_t *live, gmm_stream stream) {
    const gmm_groups *g = &call->groups;
    const size_t size = g->dtype == GMM_I64 ? 8 : 4, more = g->form == GMM_SPLIT_OFFSETS;
    const char *name = gmm__is_permutation(call) ? "sizes" : "groups.splits";
    int64_t values[GMM__VERIFY_PART + 1], first;
    *live = 0;
    for (first = 0; first < g->count; first += GMM__VERIFY_PART) {
        gmm_groups part = *g;
        gmm_status s;
        if (part.count - first > GMM__VERIFY_PART) part.count = GMM__VERIFY_PART;
        else part.count -= (int32_t)first;
        part.splits = values;
        s = gmm__fetch(call, values, (const char *)g->splits + (size_t)first * size, ((size_t)part.count + more) * size,
                       stream);
        if (s == GMM_OK) s = gmm__check_sizes(call, name, &part, g->row_align, first, live);
        if (s != GMM_OK) return s;
    }
    return GMM_OK;
}

/* `count` values of a map, each of which must be an index below `limit` or, for no row, -1 or with `any_negative` any
   negative value. */
static gmm_status gmm__verify_values(const gmm__call *call, const char *name, const int32_t *map, int64_t count,
                                     int64_t limit, int any_negative, gmm_stream stream) {
    int32_t values[GMM__VERIFY_PART];
    int64_t first, i;
    for (first = 0; map && first < count; first += GMM__VERIFY_PART) {
        const int64_t n = count - first < GMM__VERIFY_PART ? count - first : (int64_t)GMM__VERIFY_PART;
        const gmm_status s = gmm__fetch(call, values, map + first, (size_t)n * sizeof *map, stream);
        if (s != GMM_OK) return s;
        for (i = 0; i < n; i++)
            if ((values[i] < -1 && !any_negative) || values[i] >= limit)
                return gmm__refuse(call, GMM_E_ARG, name, "[%lld] is %d: must be %s, or >= 0 and below %lld",
                                   (long long)(first + i), values[i], any_negative ? "negative" : "-1",
                                   (long long)limit);
    }
    return GMM_OK;
}
static gmm_status gmm__verify_map(const gmm__call *call, const char *name, const int32_t *map, int64_t count,
                                  int64_t limit, gmm_stream stream) {
    return gmm__verify_values(call, name, map, count, limit, 0, stream);
}
/* What a permutation reads: indices; or the sizes, slot_of of the live rows, and row_of. */
static gmm_status gmm__verify_permute(const gmm__call *call, gmm_stream stream) {
    const gmm_permute *d = &call->d.permute;
    const int64_t slots = d->tokens * d->topk;
    const gmm_op op = call->op;
    gmm_status s = GMM_OK;
    int64_t live;
    if (op == GMM_OP_PERMUTE_MAP) return gmm__verify_map(call, "indices", d->indices, slots, d->experts, stream);
    if (op == GMM_OP_PERMUTE_FWD || (op == GMM_OP_UNPERMUTE_BWD && d->drows)) {
        s = gmm__verify_split(call, &live, stream);
        if (s == GMM_OK) s = gmm__verify_map(call, "slot_of", d->slot_of, live, slots, stream);
    }
    if (s != GMM_OK || op == GMM_OP_PERMUTE_FWD) return s;
    return gmm__verify_map(call, "row_of", d->row_of, slots, d->capacity, stream);
}

/* Entries of an index of gathered rows, of the rows of all groups. limit: the first entry past the matrix. */
static gmm_status gmm__verify_index(const gmm__call *call, const char *name, const int32_t *index, int64_t limit,
                                    gmm_stream stream) {
    int64_t live;
    gmm_status s;
    if (!index) return GMM_OK;
    s = gmm__verify_split(call, &live, stream); /* also of a split on the host, which is not verified before */
    return s == GMM_OK ? gmm__verify_values(call, name, index, live, limit, 1, stream) : s;
}
static gmm_status gmm__verify_indices(const gmm__call *call, gmm_stream stream) {
    const gmm_linear *l = &call->d.linear; /* these are of other operations too, which do not read them */
    const gmm_mlp *m = &call->d.mlp;
    const gmm_quantization *q = &call->d.quant;
    const int linear = call->op >= GMM_OP_LINEAR_FWD && call->op <= GMM_OP_LINEAR_BGRAD;
    const int mlp = call->op == GMM_OP_MLP_FWD || call->op == GMM_OP_MLP_BWD;
    const int64_t limit = mlp ? m->index_rows * m->index_div : linear ? l->index_rows * l->index_div : 0;
    gmm_status s;
    if (call->op == GMM_OP_QUANTIZE)
        return gmm__verify_index(call, "src_index", q->src_index, q->index_rows * q->index_div, stream);
    if (!linear && !mlp) return GMM_OK;
    s = gmm__verify_index(call, "x_index", mlp ? m->x_index : l->x_index, limit, stream);
    return s != GMM_OK ? s
                       : gmm__verify_index(call, "dy_index", mlp ? m->dy_index : l->dy_index, limit, stream);
}

/* Addresses in a table of weights in device memory, which the kernels of WGMMA read by TMA. */
static gmm_status gmm__verify_table(const gmm__call *call, int role, const char *name, gmm_stream stream) {
    const gmm_mat *m = &call->mat[role];
    void *values[GMM__VERIFY_PART];
    int64_t first, i;
    if (!m->table || (m->flags & (uint32_t)GMM_MAT_TABLE_ON_HOST)) return GMM_OK;
    for (first = 0; first < call->groups.count; first += GMM__VERIFY_PART) {
        const int64_t rest = call->groups.count - first, n = rest < GMM__VERIFY_PART ? rest : (int64_t)GMM__VERIFY_PART;
        const gmm_status s = gmm__fetch(call, values, m->table + first, (size_t)n * sizeof *values, stream);
        if (s != GMM_OK) return s;
        for (i = 0; i < n; i++)
            if ((uintptr_t)values[i] % 16)
                return gmm__refuse(call, GMM_E_ALIGN, name, "[%lld] is %p: engine wgmma needs a multiple of 16 bytes",
                                   (long long)(first + i), values[i]);
    }
    return GMM_OK;
}

/* Refuses a planned call that would set a fault bit. Splits on the host have been checked. */
static gmm_status gmm__verify(const gmm__plan *plan, gmm_stream stream) {
    const gmm__call *call = plan->call;
    gmm_status s = GMM_OK;
    int64_t live = 0;
    if (!call->ctx->config.verify || gmm__capturing(call->ctx, stream)) return GMM_OK;
    if (gmm__is_permutation(call)) s = gmm__verify_permute(call, stream);
    else if (call->groups.splits && !call->groups.on_host) s = gmm__verify_split(call, &live, stream);
    if (call->op == GMM_OP_MOE_FWD && !call->d.moe.route) /* a router's indices are in range */
        s = gmm__verify_map(call, "indices", call->d.moe.indices, call->d.moe.tokens * call->d.moe.topk,
                            call->d.moe.experts, stream);
    if (s == GMM_OK) s = gmm__verify_indices(call, stream);
    if (s == GMM_OK && plan->engine == GMM_ENGINE_WGMMA && call->op != GMM_OP_LINEAR_WGRAD)
        s = gmm__verify_table(call, GMM__W, "w.table", stream);
    return s;
}

/* Waits for the work of a call, and reports what the device says. */
static gmm_status gmm__verify_launch(const gmm__plan *plan, gmm_stream stream) {
    const gmm_context *ctx = plan->call->ctx;
    return ctx->config.verify && !gmm__capturing(ctx, stream) ? gmm__fetch(plan->call, NULL, NULL, 0, stream) : GMM_OK;
}

/* ......................................................................... 14.17 Engine table, public functions ... */

/* One row per engine, in the order in which AUTO tries them; the columns follow GMM_OP_LIST. GMM__OP names a plan and a
   launch function of one operation, GMM__OP_BY a plan that several operations share, GMM__OP_ANY an operation that the
   engine serves without a plan of its own, GMM__QUANT_OP one that GMM_NO_QUANT leaves out. */
#define GMM__OP(engine, op) GMM__OP_BY(engine, op, op)
#define GMM__OP_BY(engine, plan, op) { gmm__##engine##_plan_##plan, gmm__##engine##_launch_##op }
#define GMM__OP_ANY(engine, op) { gmm__plan_any, gmm__##engine##_launch_##op }
#define GMM__NO_OP { NULL, NULL }
#ifdef GMM_NO_QUANT
#define GMM__QUANT_OP(...) GMM__NO_OP
#else
#define GMM__QUANT_OP(...) __VA_ARGS__
#endif
static const gmm__engine_row gmm__engines[] = {
    { GMM_ENGINE_CPU, GMM_SPACE_CPU, 1, gmm__honours_cpu, {
        GMM__QUANT_OP(GMM__OP(cpu, quantize)), GMM__QUANT_OP(GMM__OP(cpu, dequantize)),
        GMM__QUANT_OP(GMM__OP(cpu, quantize)), /* requantize */
        GMM__QUANT_OP(GMM__OP_ANY(cpu, scale_update)), GMM__QUANT_OP(GMM__OP_ANY(cpu, transpose)),
        GMM__QUANT_OP(GMM__OP_ANY(cpu, shard_cast)),
        GMM__OP_ANY(cpu, offsets),
        GMM__OP(cpu, product), /* linear_fwd */
        GMM__OP(cpu, product), /* linear_dgrad */
        GMM__OP(cpu, product), /* linear_wgrad */
        GMM__OP(cpu, linear_bgrad),
        GMM__OP_ANY(cpu, act), GMM__OP_ANY(cpu, act), /* fwd, bwd */
        GMM__OP(compose, mlp_fwd), GMM__OP(compose, mlp_bwd), GMM__OP(compose, mlp_wgrad),
        GMM__OP(compose, moe), GMM__OP(compose, moe), /* fwd, bwd */
        GMM__OP(cpu, topk_fwd), GMM__OP(cpu, topk_bwd),
        GMM__OP_ANY(cpu, dense), GMM__OP_ANY(cpu, dense), GMM__OP_ANY(cpu, expert_bias), /* from, to */
        GMM__OP(cpu, permute_map), GMM__OP_ANY(cpu, permute_fwd), GMM__OP_ANY(cpu, permute_bwd),
        GMM__OP_ANY(cpu, unpermute_fwd), GMM__OP_ANY(cpu, unpermute_bwd),
        GMM__OP(cpu, pad), GMM__OP(cpu, pad), /* pad, unpad */
        GMM__OP_ANY(cpu, glu_interleave),
        GMM__OP_ANY(cpu, accumulate), GMM__OP_ANY(cpu, convert)
    } },
#ifdef __CUDACC__
    { GMM_ENGINE_WGMMA, GMM_SPACE_CUDA, 1, gmm__honours_wgmma, {
        GMM__NO_OP, /* quantize */
        GMM__NO_OP, /* dequantize */
        GMM__NO_OP, /* requantize */
        GMM__NO_OP, /* scale_update */
        GMM__NO_OP, /* transpose */
        GMM__NO_OP, /* shard_cast */
        GMM__NO_OP, /* offsets */
        GMM__OP(wgmma, product), /* linear_fwd */
        GMM__OP(wgmma, product), /* linear_dgrad */
        GMM__OP(wgmma, product), /* linear_wgrad */
        GMM__NO_OP               /* linear_bgrad and all that follow: absent members are zeros too */
    } },
#endif
#if defined(__CUDACC__) && defined(GMM__ELEM_DONE)
    { GMM_ENGINE_MMA, GMM_SPACE_CUDA, 1, gmm__honours_mma, {
        GMM__QUANT_OP(GMM__OP(mma, quantize)), GMM__QUANT_OP(GMM__OP(mma, dequantize)),
        GMM__QUANT_OP(GMM__OP(mma, quantize)), /* requantize */
        GMM__QUANT_OP(GMM__OP_ANY(mma, scale_update)), GMM__QUANT_OP(GMM__OP(mma, transpose)),
        GMM__QUANT_OP(GMM__OP_ANY(mma, shard_cast)),
        GMM__OP_ANY(mma, offsets),
        GMM__OP(mma, linear_fwd), GMM__OP(mma, linear_dgrad), GMM__OP(mma, linear_wgrad), GMM__OP(mma, linear_bgrad),
        GMM__OP(mma, act), GMM__OP(mma, act), /* fwd, bwd */
        GMM__OP(compose, mlp_fwd), GMM__OP(compose, mlp_bwd), GMM__OP(compose, mlp_wgrad),
        GMM__OP(compose, moe), GMM__OP(compose, moe), /* fwd, bwd */
        GMM__OP(mma, topk_fwd), GMM__OP(mma, topk_bwd),
        GMM__OP_ANY(mma, dense), GMM__OP_ANY(mma, dense), GMM__OP_ANY(mma, expert_bias), /* from, to */
        GMM__OP(mma, permute_map), GMM__OP_BY(mma, permute, permute_fwd), GMM__OP_BY(mma, permute, permute_bwd),
        GMM__OP_BY(mma, permute, unpermute_fwd), GMM__OP_BY(mma, permute, unpermute_bwd),
        GMM__OP(mma, pad), GMM__OP(mma, pad), /* pad, unpad */
        GMM__OP(mma, glu_interleave),
        GMM__OP(mma, accumulate), GMM__OP(mma, convert)
    } },
#endif
#ifdef GMM__CUBLASLT
    { GMM_ENGINE_CUBLASLT, GMM_SPACE_CUDA, 0, gmm__honours_cublaslt, {
        GMM__NO_OP, /* quantize */
        GMM__NO_OP, /* dequantize */
        GMM__NO_OP, /* requantize */
        GMM__NO_OP, /* scale_update */
        GMM__NO_OP, /* transpose */
        GMM__NO_OP, /* shard_cast */
        GMM__NO_OP, /* offsets */
        GMM__OP(lt, product), /* linear_fwd */
        GMM__OP(lt, product), /* linear_dgrad */
        GMM__OP(lt, product), /* linear_wgrad */
        GMM__NO_OP            /* linear_bgrad and all that follow: absent members are zeros too */
    } },
#endif
};
#undef GMM__OP
#undef GMM__OP_BY
#undef GMM__OP_ANY
#undef GMM__QUANT_OP
#undef GMM__NO_OP

/* --- overlap: memory that a call writes shares no byte with its other memory --- */

/* Whether any row i of a and any row j of b, which have the same pitch, have a byte in common. */
static int gmm__rows_overlap(const gmm__box *a, const gmm__box *b) {
    const int64_t pitch = a->step[0], distance = (int64_t)(b->address - a->address);
    const int64_t lower = distance - a->width, upper = distance + b->width - 1; /* lower < (i - j) pitch <= upper */
    int64_t low = lower / pitch - (lower % pitch < 0) + 1, high = upper / pitch - (upper % pitch < 0);
    if (low < 1 - b->count[0]) low = 1 - b->count[0];
    if (high > a->count[0] - 1) high = a->count[0] - 1;
    return low <= high;
}

/* Whether two boxes have a byte in common. The answer is exact. Of the box with the outermost loop of larger step, only
   the iterations that may reach the other box are visited. */
static int gmm__boxes_overlap(gmm__box a, gmm__box b) {
    const uint64_t end = gmm__box_end(&b);
    uint64_t size, step, start = a.address;
    int64_t i, count;
    if (gmm__box_end(&a) <= b.address || end <= a.address) return 0;
    if (a.loops + b.loops == 0) return 1;
    if (a.loops == 1 && b.loops == 1 && a.step[0] == b.step[0]) return gmm__rows_overlap(&a, &b);
    if (a.loops == 0 || (b.loops > 0 && b.step[b.loops - 1] > a.step[a.loops - 1])) return gmm__boxes_overlap(b, a);
    a.loops--;
    count = a.count[a.loops];
    step = (uint64_t)a.step[a.loops];
    size = gmm__box_end(&a) - start;
    i = start + size <= b.address ? (int64_t)((b.address - start - size) / step) + 1 : 0;
    for (; i < count && start + (uint64_t)i * step < end; i++) {
        a.address = start + (uint64_t)i * step;
        if (gmm__boxes_overlap(a, b)) return 1;
    }
    return 0;
}

/* Writes the addresses of a span's boxes from index `first` on, at most GMM__SORTED of them, in ascending order, and
   returns their number. Most tables are in this order already. The heap of routing sorts in descending order, and
   therefore gets the complements. */
enum { GMM__SORTED = 1024 };
static int64_t gmm__span_sorted(const gmm__span *s, int64_t first, uint64_t *addresses) {
    const int64_t n = s->count - first < GMM__SORTED ? s->count - first : (int64_t)GMM__SORTED;
    int64_t i;
    int sorted = 1;
    for (i = 0; i < n; i++) {
        addresses[i] = gmm__span_at(s, first + i);
        sorted &= i == 0 || addresses[i - 1] <= addresses[i];
    }
    if (sorted) return n;
    for (i = 0; i < n; i++) addresses[i] = ~addresses[i];
    for (i = n / 2; i-- > 0;) gmm__heap_sift_down(addresses, n, i);
    gmm__heap_sort(addresses, n);
    for (i = 0; i < n; i++) addresses[i] = ~addresses[i];
    return n;
}

/* Finds two boxes that overlap, one from each ascending list of addresses; both may be the same list. The boxes of a
   list have one size, so that their ends ascend too. */
static int gmm__sorted_overlap(const gmm__span *a, const uint64_t *x, int64_t n, const gmm__span *b, const uint64_t *y,
                               int64_t m, uint64_t overlap[2]) {
    int64_t i, j, first = 0;
    if (x[n - 1] + a->size <= y[0] || y[m - 1] + b->size <= x[0]) return 0;
    for (i = 0; i < n; i++) {
        while (first < m && y[first] + b->size <= x[i]) first++;
        for (j = x == y ? i + 1 : first; j < m && y[j] < x[i] + a->size; j++) {
            overlap[0] = x[i];
            overlap[1] = y[j];
            if (gmm__boxes_overlap(gmm__span_box(a, x[i]), gmm__span_box(b, y[j]))) return 1;
        }
    }
    return 0;
}

/* Whether two boxes differ in their addresses alone. */
static int gmm__same_form(const gmm__box *a, const gmm__box *b) {
    int32_t i;
    if (a->width != b->width || a->loops != b->loops) return 0;
    for (i = 0; i < a->loops; i++)
        if (a->count[i] != b->count[i] || a->step[i] != b->step[i]) return 0;
    return 1;
}

/* Finds two boxes that overlap, one from each span, or two of one span (a == b). It allocates nothing. Two tables of n
   ascending addresses take O(n) steps, unsorted ones O(n log n); with more than GMM__SORTED addresses, n / GMM__SORTED
   times as many. */
static int gmm__tables_overlap(const gmm__span *a, const gmm__span *b, uint64_t overlap[2]) {
    uint64_t x[GMM__SORTED], y[GMM__SORTED];
    int64_t i, j, n, m;
    for (i = 0; i < a->count; i += GMM__SORTED) {
        n = gmm__span_sorted(a, i, x);
        if (a == b && gmm__sorted_overlap(a, x, n, a, x, n, overlap)) return 1;
        for (j = a == b ? i + GMM__SORTED : 0; j < b->count; j += GMM__SORTED) {
            m = gmm__span_sorted(b, j, y);
            if (gmm__sorted_overlap(a, x, n, b, y, m, overlap)) return 1;
        }
    }
    return 0;
}
/* Finds two boxes that overlap, one from each of two spans, and writes their addresses to `overlap`. With in_place, two
   boxes at the same address and of the same form are allowed. */
static int gmm__spans_overlap(const gmm__span *a, const gmm__span *b, int in_place, uint64_t overlap[2]) {
    int64_t i, j;
    if (a->high <= b->low || b->high <= a->low) return 0;
    if (a->count > 1 && b->count > 1) return gmm__tables_overlap(a, b, overlap);
    for (i = 0; i < a->count; i++)
        for (j = 0; j < b->count; j++) {
            overlap[0] = gmm__span_at(a, i);
            overlap[1] = gmm__span_at(b, j);
            if (overlap[0] + a->size <= overlap[1] || overlap[1] + b->size <= overlap[0] ||
                (in_place && overlap[0] == overlap[1] && gmm__same_form(&a->box, &b->box)))
                continue;
            if (gmm__boxes_overlap(gmm__span_box(a, overlap[0]), gmm__span_box(b, overlap[1]))) return 1;
        }
    return 0;
}

/* Writes the name of the memory at an address: "dw.table[3]". `repeated`: its second entry in the table. */
static void gmm__span_name(const gmm__span *s, uint64_t address, int repeated, char *text, size_t size) {
    int64_t i = 0;
    if (!s->table) {
        (void)snprintf(text, size, "%s%s", s->name, s->part);
        return;
    }
    for (; i < s->count && (gmm__span_at(s, i) != address || repeated); i++)
        if (gmm__span_at(s, i) == address) repeated = 0;
    (void)snprintf(text, size, "%s%s[%lld]", s->name, s->part[0] ? ".scale_table" : ".table", (long long)i);
}

/* Whether the contract lets the output `a` be the input `b`, at the same address and with the same strides. */
static int gmm__may_replace(const gmm__call *call, const gmm__span *a, const gmm__span *b) {
    if (!call->in_place || b->writes) return 0;
    return call->op != GMM_OP_ACT_BWD || (!strcmp(a->name, "dx") && !strcmp(b->name, "x")) ||
           (!strcmp(a->name, "y") && !strcmp(b->name, "dy"));
}
/* Refuses a call that writes a span which overlaps another one, or itself; a pair of written spans is compared once. */
static gmm_status gmm__check_overlap(gmm__call *call) {
    int32_t i, j;
    for (i = 0; i < call->spans; i++)
        for (j = 0; j < call->spans; j++) {
            const gmm__span *a = &call->span[i], *b = &call->span[j];
            uint64_t overlap[2];
            char first[72], second[72];
            if (!a->writes || (b->writes && j < i) || (i == j && a->count == 1) ||
                !gmm__spans_overlap(a, b, gmm__may_replace(call, a, b), overlap))
                continue;
            gmm__span_name(a, overlap[0], 0, first, sizeof first);
            gmm__span_name(b, overlap[1], i == j && overlap[0] == overlap[1], second, sizeof second);
            return gmm__refuse(call, GMM_E_ARG, first, "%p overlaps %s%s%s, %p: what is written must share no byte "
                               "with other memory of the call", (void *)overlap[0],
                               gmm__is_field(call, second) ? call->path : "",
                               gmm__is_field(call, second) ? "." : "", second, (void *)overlap[1]);
        }
    return GMM_OK;
}

/* Appends to a plan's note, truncated to fit. */
static void gmm__note(gmm__plan *plan, const char *format, ...) {
    const size_t length = strlen(plan->note);
    va_list list;
    va_start(list, format);
    (void)vsnprintf(plan->note + length, sizeof plan->note - length, format, list);
    va_end(list);
}

/* Whether AUTO tries an engine for a call. */
static int gmm__automatic(const gmm__engine_row *row, const gmm__call *call) {
    return row->automatic && row->space == call->ctx->config.space && row->ops[call->op].plan;
}

/* Makes the plan of an engine for a call. Returns 0 if the engine declines it, for the reason in the note: of several
   fields that the engine does not honour, the note names the first one of GMM__FIELD_LIST. */
static int gmm__plan_row(const gmm__engine_row *row, const gmm__call *call, gmm__plan *plan) {
    int field;
    memset(plan, 0, sizeof *plan);
    plan->call = call;
    plan->engine = row->engine;
    if (row->space != call->ctx->config.space) return gmm__decline(plan, "serves another memory space");
    if (!row->ops[call->op].plan) return gmm__decline(plan, "does not have this operation");
    if ((field = gmm__missing_field(call, row->honours)) < 0) return row->ops[call->op].plan(call, plan);
    return gmm__decline(plan, "does not honour %s", gmm__field_name(field));
}

/* Completes the plan by rows[i] of a query without addresses. The note states the alignment that the plan assumes, and
   the workspace is enlarged for the engine that AUTO tries next, which serves calls with other addresses. */
static void gmm__cover_unaligned(const gmm__engine_row *rows, size_t count, size_t i, const gmm__call *call,
                                 gmm__plan *plan) {
    gmm__plan other;
    while (call->options.engine == GMM_ENGINE_AUTO && ++i < count) {
        if (!gmm__automatic(&rows[i], call)) continue;
        if (!gmm__plan_row(&rows[i], call, &other)) continue;
        if (other.workspace_bytes > plan->workspace_bytes) plan->workspace_bytes = other.workspace_bytes;
        if (other.assumes_aligned) continue;
        gmm__note(plan, "; for addresses at multiples of 16 bytes, else %s", gmm_engine_name(other.engine));
        return;
    }
    gmm__note(plan, "; only for addresses at multiples of 16 bytes");
}

/* gmm__select over the given engine table. Engines that declined the call are named in the note of the one that serves
   it, or in the message if none does. */
static gmm_status gmm__select_from(const gmm__engine_row *rows, size_t count, gmm__call *call, gmm__plan *plan) {
    const gmm_engine demanded = call->options.engine;
    char reasons[160] = "";
    size_t i, length = 0;
    for (i = 0; i < count; i++) {
        const gmm__engine_row *row = &rows[i];
        if (demanded != GMM_ENGINE_AUTO ? row->engine != demanded : !gmm__automatic(row, call)) continue;
        if (gmm__plan_row(row, call, plan)) {
            if (plan->assumes_aligned) gmm__cover_unaligned(rows, count, i, call, plan);
            if (reasons[0]) gmm__note(plan, "%s%s", plan->note[0] ? "; " : "", reasons);
            return GMM_OK;
        }
        length += (size_t)snprintf(reasons + length, sizeof reasons - length, "%s%s %.120s", length ? "; " : "",
                                   gmm_engine_name(row->engine), plan->note);
        if (length >= sizeof reasons) length = sizeof reasons - 1;
    }
    return gmm__refuse(call, GMM_E_UNSUPPORTED, "options.engine", "%s cannot serve %s: %s", gmm_engine_name(demanded),
                       gmm_op_name(call->op),
                       reasons[0] ? reasons
                       : demanded == GMM_ENGINE_AUTO ? "no engine of this build has it"
                                                     : "this build does not hold that engine");
}

/* Refuses a call that needs what GMM_NO_QUANT or GMM_NO_F16 left out of the build. */
static gmm_status gmm__check_build(const gmm__call *call) {
    gmm_status s = GMM_OK;
#ifdef GMM_NO_QUANT
    const int casts = call->op >= GMM_OP_QUANTIZE && call->op <= GMM_OP_SHARD_CAST;
    const int linear = call->op >= GMM_OP_LINEAR_FWD && call->op <= GMM_OP_LINEAR_WGRAD;
    if (casts || (linear && gmm__quantized(call)) || call->recipe.kind != GMM_RECIPE_NONE)
        s = gmm__refuse(call, GMM_E_BUILD, call->path, "FP8, MX and NV formats are left out of this build "
                        "(GMM_NO_QUANT)");
#endif
#ifdef GMM_NO_F16
    int role;
    for (role = 0; role < GMM__ROLES && call->ctx->config.space == GMM_SPACE_CUDA; role++)
        if (call->mat[role].dtype == GMM_F16)
            s = gmm__refuse(call, GMM_E_BUILD, call->path, "kernels for f16 are left out of this build (GMM_NO_F16)");
#endif
    (void)call;
    return s;
}

static gmm_status gmm__select(gmm__call *call, gmm__plan *plan) {
    const gmm_status s = gmm__check_build(call);
    if (s != GMM_OK) return s;
    return gmm__select_from(gmm__engines, sizeof gmm__engines / sizeof gmm__engines[0], call, plan);
}

/* Begin and end of the range in which a call enqueues its work, for profilers. */
static void gmm__range_begin(const gmm__plan *plan) {
#ifdef GMM_WITH_NVTX
    const gmm__call *call = plan->call;
    char name[192];
    (void)snprintf(name, sizeof name, "gmm %s %s%s%s%s", gmm_op_name(call->op), gmm_engine_name(plan->engine),
                   call->shapes[0] ? " (" : "", call->shapes, call->shapes[0] ? ")" : "");
    (void)nvtxRangePushA(name);
#else
    (void)plan;
#endif
}
static void gmm__range_end(void) {
#ifdef GMM_WITH_NVTX
    (void)nvtxRangePop();
#endif
}

static gmm_status gmm__launch_on(const gmm__plan *plan, gmm_stream stream) {
    gmm_status s = GMM_E_UNSUPPORTED;
    size_t i = 0;
    while (i < sizeof gmm__engines / sizeof gmm__engines[0] && gmm__engines[i].engine != plan->engine) i++;
    if (i == sizeof gmm__engines / sizeof gmm__engines[0]) return s;
    gmm__range_begin(plan);
    s = gmm__engines[i].ops[plan->call->op].launch(plan, stream);
    gmm__range_end();
    return s;
}

/* Launches on the context's device, and restores the current device. */
static gmm_status gmm__launch(const gmm__plan *plan, gmm_stream stream) {
#ifdef __CUDACC__
    const gmm_context *ctx = plan->call->ctx;
    if (ctx->config.space == GMM_SPACE_CUDA) {
        int current = 0;
        cudaError_t e = cudaGetDevice(&current);
        gmm_status s;
        if (e == cudaSuccess && current != ctx->config.device) e = cudaSetDevice(ctx->config.device);
        if (e != cudaSuccess) return gmm__cuda_status(plan->call, e);
        s = gmm__launch_on(plan, stream);
        if (current != ctx->config.device) (void)cudaSetDevice(current);
        return s;
    }
#endif
    return gmm__launch_on(plan, stream);
}

/* Checks workspace and overlap of a planned call, and launches it. */
static gmm_status gmm__serve_plan(gmm__call *call, gmm__plan *plan, void *workspace, size_t workspace_bytes,
                                  gmm_stream stream) {
    gmm_status s;
    if (workspace_bytes < plan->workspace_bytes)
        return gmm__refuse(call, GMM_E_WORKSPACE, "workspace_bytes", "%llu must be >= %llu, which the query states",
                           (unsigned long long)workspace_bytes, (unsigned long long)plan->workspace_bytes);
    if (!workspace && plan->workspace_bytes > 0)
        return gmm__refuse(call, GMM_E_NULL, "workspace", "is NULL for %llu bytes, which the query states",
                           (unsigned long long)plan->workspace_bytes);
    if ((uintptr_t)workspace % GMM__WORKSPACE_ALIGN && plan->workspace_bytes > 0)
        return gmm__refuse(call, GMM_E_ALIGN, "workspace", "%p is not aligned to %d bytes", workspace,
                           (int)GMM__WORKSPACE_ALIGN);
    if (call->ctx->config.space == GMM_SPACE_CPU && stream)
        return gmm__refuse(call, GMM_E_ARG, "stream", "%p must be NULL in a CPU context", (void *)stream);
    gmm__add_span(call, "workspace", "", 1, workspace, (int64_t)plan->workspace_bytes);
    plan->workspace = workspace;
    if ((s = gmm__check_overlap(call)) != GMM_OK || (s = gmm__verify(plan, stream)) != GMM_OK) return s;
    gmm__log(call->ctx, GMM_LOG_TRACE, "%s: served by %s%s%s%s%s%s", call->function, gmm_engine_name(plan->engine),
             plan->note[0] ? ": " : "", plan->note, call->shapes[0] ? " (" : "", call->shapes,
             call->shapes[0] ? ")" : "");
    s = gmm__launch(plan, stream);
    return s != GMM_OK ? s : gmm__verify_launch(plan, stream);
}

static gmm_status gmm__serve(gmm__call *call, gmm_info *info, void *workspace, size_t workspace_bytes,
                             gmm_stream stream) {
    gmm__plan plan;
    gmm_info full = GMM_ZERO;
    gmm_status s;
    uint32_t size;
    if (!call->query) {
        s = gmm__select(call, &plan);
        return s != GMM_OK ? s : gmm__serve_plan(call, &plan, workspace, workspace_bytes, stream);
    }
    if (!info) return gmm__refuse(call, GMM_E_NULL, "info", "is NULL");
    if (info->struct_size > sizeof *info)
        return gmm__refuse(call, GMM_E_VERSION, "info", "struct_size %u is larger than the %u bytes of version %s",
                           info->struct_size, (unsigned)sizeof *info, GMM_VERSION_STRING);
    if ((s = gmm__select(call, &plan)) != GMM_OK) return s;
    full.struct_size = size = info->struct_size;
    full.engine = plan.engine;
    full.workspace_bytes = plan.workspace_bytes;
    full.saved_bytes = plan.saved_bytes;
    full.deferred_bytes = plan.deferred_bytes;
    full.weight_cache_bytes = plan.weight_cache_bytes;
    full.in_align = call->in_align ? call->in_align : 1;
    full.out_align = call->out_align ? call->out_align : 1;
    memcpy(full.note, plan.note, sizeof full.note);
    memcpy(info, &full, size ? size : sizeof full);
    return GMM_OK;
}

GMMDEF gmm_status gmm_offsets(gmm_context *ctx, const gmm_groups *groups, int64_t *offsets, gmm_stream stream) {
    gmm__call call;
    gmm_groups g;
    gmm_status s = gmm__open(&call, ctx, GMM_OP_OFFSETS, "gmm_offsets", 0);
    if (s != GMM_OK) return s;
    gmm__peek_groups(groups, &g);
    (void)snprintf(call.shapes, sizeof call.shapes, "G=%d T=%lld", g.count, (long long)g.capacity);
    if ((s = gmm__read_options(&call, NULL)) != GMM_OK || (s = gmm__read_groups(&call, groups)) != GMM_OK) return s;
    if (!offsets) return gmm__refuse(&call, GMM_E_NULL, "offsets", "is NULL");
    if ((uintptr_t)offsets % 8)
        return gmm__refuse(&call, GMM_E_ALIGN, "offsets", "%p is not aligned to 8 bytes", (void *)offsets);
    call.output = offsets;
    gmm__add_span(&call, "offsets", "", 1, offsets, (call.groups.count + (int64_t)1) * (int64_t)sizeof *offsets);
    return gmm__serve(&call, NULL, NULL, 0, stream);
}

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
    gmm_build build;
    gmm_status s;
    int32_t threads = 1, i;
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
    if (c.space == GMM_SPACE_CUDA && (s = gmm__cuda_probe(&c, &device, error)) != GMM_OK) return s;
#else
    if (c.space == GMM_SPACE_CUDA)
        return gmm__fail(error, GMM_E_BUILD, "gmm_create: config.space: CUDA %d asked, but this build holds the CPU "
                         "engine alone; compile the implementation with nvcc", c.device);
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
    gmm__describe_build(&c, &build);
#ifdef __CUDACC__
    if (c.space == GMM_SPACE_CUDA && (s = gmm__open_engines(ctx, &build, error)) != GMM_OK) {
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
    for (i = 0; gmm_build_warning(&build, i); i++)
        gmm__log(ctx, GMM_LOG_WARN, "gmm %s: %s", GMM_VERSION_STRING, gmm_build_warning(&build, i));
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

/* ------------------------------------------------------------------------------- 15 Implementation: checkpoints --- */

#if defined(GMM_IMPLEMENTATION) && !defined(GMM__CKPT_IMPLEMENTATION_DONE) && GMM__HOLDS(1)
#define GMM__CKPT_IMPLEMENTATION_DONE

#ifdef __cplusplus
extern "C" {
#endif

/* ....................................................................................... 15.1 Memory, reports ... */

static void *gmm__ck_malloc(void *user, size_t bytes) { (void)user; return GMM_MALLOC(bytes); }
static void gmm__ck_free(void *user, void *memory) { (void)user; GMM_FREE(memory); }

static gmm_allocator gmm__ck_allocator(const gmm_allocator *caller) {
    gmm_allocator a;
    a.user = NULL;
    a.alloc = gmm__ck_malloc;
    a.release = gmm__ck_free;
    return caller && caller->alloc ? *caller : a;
}

/* A block of an arena, whose memory is all released together. */
typedef struct gmm__ck_arena_block {
    struct gmm__ck_arena_block *next;
    size_t used, capacity, align;
} gmm__ck_arena_block;

typedef struct gmm__ck_arena {
    gmm_allocator allocator;
    gmm__ck_arena_block *top;
} gmm__ck_arena;

enum { GMM__CK_BLOCK_BYTES = 1 << 16 };

/* Allocates zeroed memory for `count` elements; NULL without memory. */
static void *gmm__ck_alloc(gmm__ck_arena *arena, int64_t count, size_t size) {
    gmm__ck_arena_block *b = arena->top;
    int64_t bytes_needed = 0;
    size_t bytes, capacity;
    char *memory;
    if (!gmm__mul(count, (int64_t)size, &bytes_needed) || bytes_needed > INT64_MAX / 2 ||
        (uint64_t)bytes_needed > SIZE_MAX / 2)
        return NULL;
    bytes = ((size_t)bytes_needed + 15) / 16 * 16;
    if (!b || bytes > b->capacity - b->used) {
        capacity = bytes > GMM__CK_BLOCK_BYTES / 4 ? bytes : (size_t)GMM__CK_BLOCK_BYTES;
        b = (gmm__ck_arena_block *)arena->allocator.alloc(arena->allocator.user, sizeof *b + capacity);
        if (!b) return NULL;
        b->used = 0;
        b->capacity = capacity;
        if (arena->top && capacity == bytes) { /* a block of its own; the block with free bytes stays on top */
            b->next = arena->top->next;
            arena->top->next = b;
        } else {
            b->next = arena->top;
            arena->top = b;
        }
    }
    memory = (char *)(b + 1) + b->used;
    b->used += bytes;
    return memset(memory, 0, bytes);
}

static void gmm__ck_arena_release(gmm__ck_arena *arena) {
    while (arena->top) {
        gmm__ck_arena_block *next = arena->top->next;
        arena->allocator.release(arena->allocator.user, arena->top);
        arena->top = next;
    }
}

/* Reserves capacity for one more element; the old array stays in the arena. Returns 0 without memory. */
static int gmm__ck_reserve(gmm__ck_arena *arena, void **array, int64_t count, int64_t *capacity, size_t size) {
    void *grown;
    if (count < *capacity) return 1;
    grown = gmm__ck_alloc(arena, *capacity ? *capacity * 2 : 64, size);
    if (!grown) return 0;
    if (count) memcpy(grown, *array, (size_t)count * size);
    *array = grown;
    *capacity = *capacity ? *capacity * 2 : 64;
    return 1;
}

static char *gmm__ck_copy_text(gmm__ck_arena *arena, const char *text, size_t length) {
    char *copy = (char *)gmm__ck_alloc(arena, (int64_t)length + 1, 1);
    if (copy) memcpy(copy, text, length);
    return copy;
}

GMMDEF const char *gmm_ckpt_reason_name(gmm_ckpt_reason reason) {
    switch (reason) {
#define GMM__X(name, value, text, status) case name: return #text;
        GMM_CKPT_REASON_LIST(GMM__X)
#undef GMM__X
    default: return "?";
    }
}

static gmm_status gmm__ck_status(gmm_ckpt_reason reason) {
    switch (reason) {
#define GMM__X(name, value, text, status) case name: return status;
        GMM_CKPT_REASON_LIST(GMM__X)
#undef GMM__X
    default: return GMM_E_ARG;
    }
}

/* Copies as many whole UTF-8 characters as fit. */
static void gmm__ck_truncate(char *dst, size_t capacity, const char *src) {
    size_t n = strlen(src);
    if (n >= capacity) {
        n = capacity - 1;
        while (n && ((unsigned char)src[n] & 0xC0u) == 0x80u) n--;
    }
    memcpy(dst, src, n);
    dst[n] = 0;
}

static gmm_status gmm__ck_vfail(gmm_ckpt_report *report, gmm_ckpt_reason reason, const char *key, const char *fn,
                                const char *format, va_list list) {
    const gmm_status status = gmm__ck_status(reason);
    if (report) {
        char what[400], shown[252];
        (void)vsnprintf(what, sizeof what, format, list);
        gmm__ck_truncate(shown, key && strlen(key) >= 100 ? 97 : 101, key ? key : "");
        report->reason = reason;
        gmm__ck_truncate(report->key, sizeof report->key, key ? key : "");
        (void)gmm__fail(&report->error, status, "%s: %s%s%s%s%s", fn, key ? "\"" : "", shown,
                        key && strlen(key) >= 100 ? "..." : "", key ? "\": " : "", what);
    }
    return status;
}

static gmm_status gmm__ck_fail(gmm_ckpt_report *report, gmm_ckpt_reason reason, const char *key, const char *fn,
                               const char *format, ...) {
    va_list list;
    gmm_status status;
    va_start(list, format);
    status = gmm__ck_vfail(report, reason, key, fn, format, list);
    va_end(list);
    return status;
}

static void gmm__ck_reset_report(gmm_ckpt_report *report) {
    if (report) memset(report, 0, sizeof *report);
}

/* ................................................................................................. 15.2 Tables ... */
/* Tables of named tensors over storages, with a hash of names. */

typedef struct gmm__ck_storage {
    const char *base;
    int64_t bytes;
} gmm__ck_storage;

struct gmm_ckpt_table {
    gmm__ck_arena arena;
    gmm_ckpt_tensor *tensors;
    gmm__ck_storage *storages;
    int64_t count, capacity, storage_count, storage_capacity;
    int32_t *slots; /* open addressing: index + 1 of a tensor, 0 = free */
    int64_t slot_count;
    size_t longest; /* length of the longest name */
};

static uint64_t gmm__ck_hash(const char *text, size_t length, uint64_t h) {
    size_t i;
    for (i = 0; i < length; i++) h = (h ^ (unsigned char)text[i]) * 0x100000001B3u;
    h ^= h >> 29;
    h *= 0x9E3779B97F4A7C15u;
    return h ^ h >> 32;
}

/* Bytes of the unit that a copy moves: one element; one byte of packed elements and of unknown dtypes. */
static int64_t gmm__ck_unit_bytes(gmm_dtype dtype) {
    const int32_t bits = gmm_dtype_bits(dtype);
    return bits < 8 ? 1 : bits / 8;
}

static int64_t gmm__ck_unit_count(const gmm_ckpt_tensor *t) { return t->bytes / gmm__ck_unit_bytes(t->dtype); }

/* Computes the bytes of a tensor from its shape and dtype. Returns 0 where they overflow or are no whole number. */
static int gmm__ck_tensor_bytes(const gmm_ckpt_tensor *t, int64_t *bytes) {
    int64_t elements = 1, bits = 0;
    int32_t d;
    for (d = 0; d < t->rank; d++)
        if (t->shape[d] == 0) {
            *bytes = 0;
            return 1;
        }
    for (d = 0; d < t->rank; d++)
        if (!gmm__mul(elements, t->shape[d], &elements)) return 0;
    if (!gmm__mul(elements, gmm_dtype_bits(t->dtype), &bits)) return 0;
    *bytes = bits / 8;
    return bits % 8 == 0;
}

GMMDEF gmm_status gmm_ckpt_table_create(gmm_ckpt_table **out, const gmm_allocator *allocator, gmm_error *error) {
    gmm_ckpt_table *t;
    gmm_allocator a;
    if (!out) return gmm__fail(error, GMM_E_NULL, "gmm_ckpt_table_create: out is NULL");
    *out = NULL;
    if (allocator && !allocator->alloc != !allocator->release)
        return gmm__fail(error, GMM_E_ARG,
                         "gmm_ckpt_table_create: allocator: 1 of 2 functions is set; set both or none");
    a = gmm__ck_allocator(allocator);
    t = (gmm_ckpt_table *)a.alloc(a.user, sizeof *t);
    if (!t) return gmm__fail(error, GMM_E_MEMORY, "gmm_ckpt_table_create: no memory");
    memset(t, 0, sizeof *t);
    t->arena.allocator = a;
    *out = t;
    return GMM_OK;
}

GMMDEF void gmm_ckpt_table_destroy(gmm_ckpt_table *table) {
    gmm_allocator a;
    if (!table) return;
    a = table->arena.allocator;
    gmm__ck_arena_release(&table->arena);
    a.release(a.user, table);
}

GMMDEF gmm_status gmm_ckpt_table_add_storage(gmm_ckpt_table *table, const void *base, int64_t bytes, int32_t *storage,
                                             gmm_error *error) {
    static const char fn[] = "gmm_ckpt_table_add_storage";
    void *array;
    if (!table || !storage) return gmm__fail(error, GMM_E_NULL, "%s: %s is NULL", fn, table ? "storage" : "table");
    if (bytes < 0) return gmm__fail(error, GMM_E_ARG, "%s: bytes is %lld: must be >= 0", fn, (long long)bytes);
    if (table->storage_count == INT32_MAX) return gmm__fail(error, GMM_E_ARG, "%s: 2^31 - 1 storages are the most", fn);
    array = table->storages;
    if (!gmm__ck_reserve(&table->arena, &array, table->storage_count, &table->storage_capacity,
                         sizeof *table->storages))
        return gmm__fail(error, GMM_E_MEMORY, "%s: no memory", fn);
    table->storages = (gmm__ck_storage *)array;
    table->storages[table->storage_count].base = (const char *)base;
    table->storages[table->storage_count].bytes = bytes;
    *storage = (int32_t)table->storage_count++;
    return GMM_OK;
}

/* The hash slot of a name: the one that holds it, or the free one that it would be stored in. */
static int64_t gmm__ck_hash_slot(const gmm_ckpt_table *t, const char *name, size_t length) {
    int64_t i = (int64_t)(gmm__ck_hash(name, length, 0) & (uint64_t)(t->slot_count - 1));
    for (; t->slots[i]; i = (i + 1) & (t->slot_count - 1))
        if (!strcmp(t->tensors[t->slots[i] - 1].name, name)) break;
    return i;
}

static int gmm__ck_rehash(gmm_ckpt_table *t) {
    const int64_t count = t->slot_count ? t->slot_count * 2 : 128;
    int32_t *slots = (int32_t *)gmm__ck_alloc(&t->arena, count, sizeof *slots);
    int64_t i;
    if (!slots) return 0;
    t->slots = slots;
    t->slot_count = count;
    for (i = 0; i < t->count; i++)
        slots[gmm__ck_hash_slot(t, t->tensors[i].name, strlen(t->tensors[i].name))] = (int32_t)(i + 1);
    return 1;
}

static gmm_status gmm__ck_add_tensor(gmm_ckpt_table *t, const gmm_ckpt_tensor *tensor, const char *fn,
                                     gmm_ckpt_report *report) {
    const char *name = tensor->name;
    int64_t bytes = 0, slot, d;
    void *array = t->tensors;
    size_t length;
    char *copy;
    if (!name) return gmm__ck_fail(report, GMM_CKPT_ARGUMENT, NULL, fn, "tensor.name is NULL");
    if (tensor->rank < 0 || tensor->rank > GMM_CKPT_RANK)
        return gmm__ck_fail(report, GMM_CKPT_ARGUMENT, name, fn, "rank %d must be 0 to %d", (int)tensor->rank,
                            (int)GMM_CKPT_RANK);
    for (d = 0; d < tensor->rank; d++)
        if (tensor->shape[d] < 0)
            return gmm__ck_fail(report, GMM_CKPT_ARGUMENT, name, fn, "extent %d is %lld: must be >= 0", (int)d,
                                (long long)tensor->shape[d]);
    if (tensor->dtype < GMM_NONE || tensor->dtype > GMM_I64)
        return gmm__ck_fail(report, GMM_CKPT_DTYPE, name, fn, "%d is no dtype", (int)tensor->dtype);
    if (tensor->dtype != GMM_NONE && !gmm__ck_tensor_bytes(tensor, &bytes))
        return gmm__ck_fail(report, GMM_CKPT_OVERFLOW, name, fn, "its shape of %s makes no 63-bit number of bytes",
                            gmm_dtype_name(tensor->dtype));
    if (tensor->dtype != GMM_NONE && bytes != tensor->bytes)
        return gmm__ck_fail(report, GMM_CKPT_ARGUMENT, name, fn, "it has %lld bytes, but its shape of %s makes %lld",
                            (long long)tensor->bytes, gmm_dtype_name(tensor->dtype), (long long)bytes);
    if (tensor->storage < 0 || tensor->storage >= t->storage_count)
        return gmm__ck_fail(report, GMM_CKPT_ARGUMENT, name, fn, "storage %d is none of the table's %lld",
                            (int)tensor->storage, (long long)t->storage_count);
    if (tensor->offset < 0 || tensor->bytes < 0 || tensor->bytes > t->storages[tensor->storage].bytes ||
        tensor->offset > t->storages[tensor->storage].bytes - tensor->bytes)
        return gmm__ck_fail(report, GMM_CKPT_ARGUMENT, name, fn, "%lld bytes at %lld leave the storage of %lld",
                            (long long)tensor->bytes, (long long)tensor->offset,
                            (long long)t->storages[tensor->storage].bytes);
    if (t->count == INT32_MAX - 1) return gmm__ck_fail(report, GMM_CKPT_OVERFLOW, name, fn, "too many tensors");
    length = strlen(name);
    if (2 * (t->count + 1) > t->slot_count && !gmm__ck_rehash(t))
        return gmm__ck_fail(report, GMM_CKPT_NO_MEMORY, name, fn, "no memory");
    slot = gmm__ck_hash_slot(t, name, length);
    if (t->slots[slot]) return gmm__ck_fail(report, GMM_CKPT_DUPLICATE_KEY, name, fn, "the name is taken already");
    copy = gmm__ck_copy_text(&t->arena, name, length);
    if (!copy || !gmm__ck_reserve(&t->arena, &array, t->count, &t->capacity, sizeof *t->tensors))
        return gmm__ck_fail(report, GMM_CKPT_NO_MEMORY, name, fn, "no memory");
    t->tensors = (gmm_ckpt_tensor *)array;
    t->tensors[t->count] = *tensor;
    t->tensors[t->count].name = copy;
    t->slots[slot] = (int32_t)++t->count;
    if (length > t->longest) t->longest = length;
    return GMM_OK;
}

GMMDEF gmm_status gmm_ckpt_table_add(gmm_ckpt_table *table, const gmm_ckpt_tensor *tensor, gmm_ckpt_report *report) {
    static const char fn[] = "gmm_ckpt_table_add";
    gmm__ck_reset_report(report);
    if (!table || !tensor) {
        if (report) {
            report->reason = GMM_CKPT_ARGUMENT;
            (void)gmm__fail(&report->error, GMM_E_NULL, "%s: %s is NULL", fn, table ? "tensor" : "table");
        }
        return GMM_E_NULL;
    }
    return gmm__ck_add_tensor(table, tensor, fn, report);
}

GMMDEF const gmm_ckpt_tensor *gmm_ckpt_table_tensors(const gmm_ckpt_table *table, int64_t *count) {
    if (count) *count = table ? table->count : 0;
    return table ? table->tensors : NULL;
}

GMMDEF int64_t gmm_ckpt_table_find(const gmm_ckpt_table *table, const char *name) {
    if (!table || !name || !table->slot_count) return -1;
    return (int64_t)table->slots[gmm__ck_hash_slot(table, name, strlen(name))] - 1;
}

/* ................................................................................................ 15.3 Schemes ... */
/* The schemes of this library: patterns, slots, forms and scalings of each family of checkpoints. */

#define GMM__CK_L "decoder.layers.{L}.mlp."
#define GMM__CK_H "model.layers.{L}."
#define GMM__CK_ROW(pattern, slot, kind, half, form, transposed, scaling) \
    {pattern, slot, kind, half, form, transposed, GMM_SCALING_##scaling}
#define GMM__CK_PLAIN(pattern, slot, kind) \
    {pattern, slot, kind, GMM_CKPT_BOTH, GMM_CKPT_EACH, 0, GMM_SCALING_NONE}

/* A weight, its bias and its scales in one form; `front` and `e` stand around the words of the names. */
#define GMM__CK_SCALE_LIST(front, e, slot, form) \
    GMM__CK_ROW(front "weight_scale_inv" e, slot, GMM_CKPT_SCALE, GMM_CKPT_BOTH, form, 0, 128X128), \
    GMM__CK_ROW(front "weight_scale" e, slot, GMM_CKPT_SCALE, GMM_CKPT_BOTH, form, 0, 128X128), \
    GMM__CK_ROW(front "weight_tensor_scale" e, slot, GMM_CKPT_TENSOR_SCALE, GMM_CKPT_BOTH, form, 0, 128X128), \
    GMM__CK_ROW(front "weight_amax" e, slot, GMM_CKPT_AMAX, GMM_CKPT_BOTH, form, 0, 128X128)
#define GMM__CK_LINEAR_LIST(front, e, slot, form) \
    GMM__CK_ROW(front "weight" e, slot, GMM_CKPT_WEIGHT, GMM_CKPT_BOTH, form, 0, 128X128), \
    GMM__CK_ROW(front "bias" e, slot, GMM_CKPT_BIAS, GMM_CKPT_BOTH, form, 0, NONE), \
    GMM__CK_SCALE_LIST(front, e, slot, form)

static const gmm_ckpt_row gmm__ck_module[] = {
    GMM__CK_LINEAR_LIST("{p}.", "{e}", GMM_CKPT_SLOT_ANY, GMM_CKPT_EACH),
    GMM__CK_LINEAR_LIST("{p}.", "", GMM_CKPT_SLOT_ANY, GMM_CKPT_STACKED),
};

/* Router and shared experts, which every Megatron scheme has. */
#define GMM__CK_MEGATRON_LIST \
    GMM__CK_PLAIN(GMM__CK_L "router.weight", GMM_CKPT_ROUTER, GMM_CKPT_WEIGHT), \
    GMM__CK_PLAIN(GMM__CK_L "router.bias", GMM_CKPT_ROUTER, GMM_CKPT_BIAS), \
    GMM__CK_PLAIN(GMM__CK_L "router.expert_bias", GMM_CKPT_ROUTER_CORRECTION, GMM_CKPT_WEIGHT), \
    GMM__CK_PLAIN(GMM__CK_L "shared_experts.linear_fc1.weight", GMM_CKPT_SHARED_FC1, GMM_CKPT_WEIGHT), \
    GMM__CK_SCALE_LIST(GMM__CK_L "shared_experts.linear_fc1.", "", GMM_CKPT_SHARED_FC1, GMM_CKPT_EACH), \
    GMM__CK_PLAIN(GMM__CK_L "shared_experts.linear_fc2.weight", GMM_CKPT_SHARED_FC2, GMM_CKPT_WEIGHT), \
    GMM__CK_SCALE_LIST(GMM__CK_L "shared_experts.linear_fc2.", "", GMM_CKPT_SHARED_FC2, GMM_CKPT_EACH), \
    GMM__CK_PLAIN(GMM__CK_L "shared_experts.gate_weight", GMM_CKPT_SHARED_GATE, GMM_CKPT_WEIGHT)

static const gmm_ckpt_row gmm__ck_megatron[] = {
    GMM__CK_LINEAR_LIST(GMM__CK_L "experts.linear_fc1.", "{e}", GMM_CKPT_FC1, GMM_CKPT_EACH),
    GMM__CK_LINEAR_LIST(GMM__CK_L "experts.linear_fc1.", "", GMM_CKPT_FC1, GMM_CKPT_STACKED),
    GMM__CK_LINEAR_LIST(GMM__CK_L "experts.linear_fc2.", "{e}", GMM_CKPT_FC2, GMM_CKPT_EACH),
    GMM__CK_LINEAR_LIST(GMM__CK_L "experts.linear_fc2.", "", GMM_CKPT_FC2, GMM_CKPT_STACKED),
    GMM__CK_MEGATRON_LIST,
};

static const gmm_ckpt_row gmm__ck_sequential[] = {
    GMM__CK_LINEAR_LIST(GMM__CK_L "experts.local_experts.{e}.linear_fc1.", "", GMM_CKPT_FC1, GMM_CKPT_EACH),
    GMM__CK_LINEAR_LIST(GMM__CK_L "experts.local_experts.{e}.linear_fc2.", "", GMM_CKPT_FC2, GMM_CKPT_EACH),
    GMM__CK_MEGATRON_LIST,
};

static const gmm_ckpt_row gmm__ck_legacy[] = { /* [E, in, out], declared as matrices of hidden rows or columns */
    GMM__CK_ROW(GMM__CK_L "experts.weight1", GMM_CKPT_FC1, GMM_CKPT_WEIGHT, GMM_CKPT_BOTH, GMM_CKPT_WIDE, 1, NONE),
    GMM__CK_ROW(GMM__CK_L "experts.weight2", GMM_CKPT_FC2, GMM_CKPT_WEIGHT, GMM_CKPT_BOTH, GMM_CKPT_TALL, 1, NONE),
    GMM__CK_MEGATRON_LIST,
};

/* A weight as Hugging Face's models name it, with the scales of each format: weight_scale_inv of 128x128 blocks and of
   one value, weight_scale of all others, and weight_scale_2 beside those of NV16. Every expert's gate, up and down
   weights are separate tensors. */
#define GMM__CK_EACH(pattern, slot, kind, half) \
    GMM__CK_ROW(GMM__CK_H pattern, slot, kind, half, GMM_CKPT_EACH, 0, 128X128)
#define GMM__CK_WEIGHT_LIST(pattern, slot, half) \
    GMM__CK_EACH(pattern, slot, GMM_CKPT_WEIGHT, half), \
    GMM__CK_EACH(pattern "_scale_inv", slot, GMM_CKPT_SCALE, half), \
    GMM__CK_EACH(pattern "_scale", slot, GMM_CKPT_SCALE, half), \
    GMM__CK_EACH(pattern "_scale_2", slot, GMM_CKPT_TENSOR_SCALE, half)

static const gmm_ckpt_row gmm__ck_mixtral[] = {
    GMM__CK_WEIGHT_LIST("block_sparse_moe.experts.{e}.w1.weight", GMM_CKPT_FC1, GMM_CKPT_GATE),
    GMM__CK_WEIGHT_LIST("block_sparse_moe.experts.{e}.w3.weight", GMM_CKPT_FC1, GMM_CKPT_UP),
    GMM__CK_WEIGHT_LIST("block_sparse_moe.experts.{e}.w2.weight", GMM_CKPT_FC2, GMM_CKPT_BOTH),
    GMM__CK_PLAIN(GMM__CK_H "block_sparse_moe.gate.weight", GMM_CKPT_ROUTER, GMM_CKPT_WEIGHT),
};

#define GMM__CK_QWEN_LIST \
    GMM__CK_WEIGHT_LIST("mlp.experts.{e}.gate_proj.weight", GMM_CKPT_FC1, GMM_CKPT_GATE), \
    GMM__CK_WEIGHT_LIST("mlp.experts.{e}.up_proj.weight", GMM_CKPT_FC1, GMM_CKPT_UP), \
    GMM__CK_WEIGHT_LIST("mlp.experts.{e}.down_proj.weight", GMM_CKPT_FC2, GMM_CKPT_BOTH), \
    GMM__CK_PLAIN(GMM__CK_H "mlp.gate.weight", GMM_CKPT_ROUTER, GMM_CKPT_WEIGHT)

static const gmm_ckpt_row gmm__ck_qwen3[] = {
    GMM__CK_QWEN_LIST,
};

static const gmm_ckpt_row gmm__ck_qwen2[] = {
    GMM__CK_QWEN_LIST,
    GMM__CK_WEIGHT_LIST("mlp.shared_expert.gate_proj.weight", GMM_CKPT_SHARED_FC1, GMM_CKPT_GATE),
    GMM__CK_WEIGHT_LIST("mlp.shared_expert.up_proj.weight", GMM_CKPT_SHARED_FC1, GMM_CKPT_UP),
    GMM__CK_WEIGHT_LIST("mlp.shared_expert.down_proj.weight", GMM_CKPT_SHARED_FC2, GMM_CKPT_BOTH),
    GMM__CK_PLAIN(GMM__CK_H "mlp.shared_expert_gate.weight", GMM_CKPT_SHARED_GATE, GMM_CKPT_WEIGHT),
};

static const gmm_ckpt_row gmm__ck_deepseek[] = {
    GMM__CK_QWEN_LIST,
    GMM__CK_PLAIN(GMM__CK_H "mlp.gate.e_score_correction_bias", GMM_CKPT_ROUTER_CORRECTION, GMM_CKPT_WEIGHT),
    GMM__CK_WEIGHT_LIST("mlp.shared_experts.gate_proj.weight", GMM_CKPT_SHARED_FC1, GMM_CKPT_GATE),
    GMM__CK_WEIGHT_LIST("mlp.shared_experts.up_proj.weight", GMM_CKPT_SHARED_FC1, GMM_CKPT_UP),
    GMM__CK_WEIGHT_LIST("mlp.shared_experts.down_proj.weight", GMM_CKPT_SHARED_FC2, GMM_CKPT_BOTH),
};

#define GMM__CK_STACK(pattern, slot, kind, transposed, scaling) \
    GMM__CK_ROW(GMM__CK_H "mlp." pattern, slot, kind, GMM_CKPT_BOTH, GMM_CKPT_STACKED, transposed, scaling)

static const gmm_ckpt_row gmm__ck_fused[] = {
    GMM__CK_STACK("experts.gate_up_proj", GMM_CKPT_FC1, GMM_CKPT_WEIGHT, 0, NONE),
    GMM__CK_STACK("experts.down_proj", GMM_CKPT_FC2, GMM_CKPT_WEIGHT, 0, NONE),
    GMM__CK_PLAIN(GMM__CK_H "mlp.gate.weight", GMM_CKPT_ROUTER, GMM_CKPT_WEIGHT),
};

static const gmm_ckpt_row gmm__ck_fused_transposed[] = {
    GMM__CK_STACK("experts.gate_up_proj", GMM_CKPT_FC1, GMM_CKPT_WEIGHT, 1, NONE),
    GMM__CK_STACK("experts.down_proj", GMM_CKPT_FC2, GMM_CKPT_WEIGHT, 1, NONE),
    GMM__CK_PLAIN(GMM__CK_H "mlp.gate.weight", GMM_CKPT_ROUTER, GMM_CKPT_WEIGHT),
};

static const gmm_ckpt_row gmm__ck_gpt_oss[] = {
    GMM__CK_STACK("experts.gate_up_proj", GMM_CKPT_FC1, GMM_CKPT_WEIGHT, 1, NONE),
    GMM__CK_STACK("experts.gate_up_proj_blocks", GMM_CKPT_FC1, GMM_CKPT_WEIGHT, 0, MX32),
    GMM__CK_STACK("experts.gate_up_proj_scales", GMM_CKPT_FC1, GMM_CKPT_SCALE, 0, MX32),
    GMM__CK_STACK("experts.gate_up_proj_bias", GMM_CKPT_FC1, GMM_CKPT_BIAS, 0, NONE),
    GMM__CK_STACK("experts.down_proj", GMM_CKPT_FC2, GMM_CKPT_WEIGHT, 1, NONE),
    GMM__CK_STACK("experts.down_proj_blocks", GMM_CKPT_FC2, GMM_CKPT_WEIGHT, 0, MX32),
    GMM__CK_STACK("experts.down_proj_scales", GMM_CKPT_FC2, GMM_CKPT_SCALE, 0, MX32),
    GMM__CK_STACK("experts.down_proj_bias", GMM_CKPT_FC2, GMM_CKPT_BIAS, 0, NONE),
    GMM__CK_PLAIN(GMM__CK_H "mlp.router.weight", GMM_CKPT_ROUTER, GMM_CKPT_WEIGHT),
    GMM__CK_PLAIN(GMM__CK_H "mlp.router.bias", GMM_CKPT_ROUTER, GMM_CKPT_BIAS),
};

#define GMM__CK_SCHEME(name, rows, glu_known, glu_block, global_index) \
    {name, rows, (int32_t)(sizeof rows / sizeof rows[0]), glu_known, glu_block, global_index}

static const gmm_ckpt_scheme gmm__ck_schemes[] = {
    GMM__CK_SCHEME("module", gmm__ck_module, 0, 0, 0),
    GMM__CK_SCHEME("megatron", gmm__ck_megatron, 0, 0, 0),
    GMM__CK_SCHEME("sequential", gmm__ck_sequential, 0, 0, 0),
    GMM__CK_SCHEME("legacy", gmm__ck_legacy, 0, 0, 0),
    GMM__CK_SCHEME("mixtral", gmm__ck_mixtral, 0, 0, 1),
    GMM__CK_SCHEME("qwen2-moe", gmm__ck_qwen2, 0, 0, 1),
    GMM__CK_SCHEME("qwen3-moe", gmm__ck_qwen3, 0, 0, 1),
    GMM__CK_SCHEME("deepseek-v3", gmm__ck_deepseek, 0, 0, 1),
    GMM__CK_SCHEME("fused", gmm__ck_fused, 1, 0, 1),
    GMM__CK_SCHEME("fused-transposed", gmm__ck_fused_transposed, 1, 0, 1),
    GMM__CK_SCHEME("gpt-oss", gmm__ck_gpt_oss, 1, 1, 1),
};

#undef GMM__CK_L
#undef GMM__CK_H
#undef GMM__CK_ROW
#undef GMM__CK_PLAIN
#undef GMM__CK_MEGATRON_LIST
#undef GMM__CK_SCALE_LIST
#undef GMM__CK_LINEAR_LIST
#undef GMM__CK_EACH
#undef GMM__CK_QWEN_LIST
#undef GMM__CK_WEIGHT_LIST
#undef GMM__CK_STACK
#undef GMM__CK_SCHEME

GMMDEF const gmm_ckpt_scheme *gmm_ckpt_scheme_at(int32_t index) {
    const int32_t count = (int32_t)(sizeof gmm__ck_schemes / sizeof gmm__ck_schemes[0]);
    return index >= 0 && index < count ? &gmm__ck_schemes[index] : NULL;
}

GMMDEF const gmm_ckpt_scheme *gmm_ckpt_scheme_of(const char *name) {
    int32_t i;
    for (i = 0; name && gmm_ckpt_scheme_at(i); i++)
        if (!strcmp(gmm__ck_schemes[i].name, name)) return &gmm__ck_schemes[i];
    return NULL;
}

/* Formats of quantized weights: the dtypes of codes and scales, and the format that the tensors of a source have. */

enum {
    GMM__CK_CODES_8 = 1 << GMM_E4M3 | 1 << GMM_E5M2,
    GMM__CK_CODES_4 = 1 << GMM_U8 | 1 << GMM_E2M1,
    GMM__CK_FLOAT_SCALES = 1 << GMM_F32 | 1 << GMM_BF16,
    GMM__CK_BYTE_SCALES = 1 << GMM_E8M0 | 1 << GMM_U8
};

/* Sets of dtypes and kinds are bits. The blocks of a scaling are those of GMM_SCALING_LIST. */
typedef struct gmm__ck_format {
    gmm_scaling scaling;
    uint32_t codes, scales;      /* dtypes */
    int32_t packed;              /* 1: codes of 4 bits, two per byte */
    int32_t gtp_rows;            /* GTP's recipe unit: its shards begin at multiples of these rows */
    uint32_t beside;             /* kinds that may stand beside the scales */
    int32_t needs_beside;        /* 1: one of them must */
    int32_t dequantized;         /* 1: moves can dequantize it */
} gmm__ck_format;

/* Where the dtypes of several formats are those of a source, the first whose shape fits is its format. */
static const gmm__ck_format gmm__ck_formats[] = {
    {GMM_SCALING_128X128, GMM__CK_CODES_8, GMM__CK_FLOAT_SCALES, 0, 128, 0, 0, 1},
    {GMM_SCALING_ROW, GMM__CK_CODES_8, GMM__CK_FLOAT_SCALES, 0, 1, 0, 0, 1},
    {GMM_SCALING_TENSOR, GMM__CK_CODES_8, GMM__CK_FLOAT_SCALES, 0, 1, 1 << GMM_CKPT_AMAX, 0, 1},
    {GMM_SCALING_MX32, GMM__CK_CODES_8, GMM__CK_BYTE_SCALES, 0, 32, 0, 0, 1},
    {GMM_SCALING_MX32, GMM__CK_CODES_4, GMM__CK_BYTE_SCALES, 1, 32, 0, 0, 1},
    {GMM_SCALING_NV16, GMM__CK_CODES_4, 1 << GMM_E4M3, 1, 16, 1 << GMM_CKPT_TENSOR_SCALE | 1 << GMM_CKPT_AMAX, 1, 0},
};

/* Rows and columns of a scaling's block; 0 = the whole extent. */
static void gmm__ck_block_of(gmm_scaling scaling, int64_t *rows, int64_t *cols) {
    static const int16_t blocks[][2] = {
#define GMM__X(name, value, text, dtype, rows, cols) {rows, cols},
        GMM_SCALING_LIST(GMM__X)
#undef GMM__X
    };
    *rows = blocks[scaling][0];
    *cols = blocks[scaling][1];
}

/* The format that moves can dequantize by these dtypes, or NULL. */
static const gmm__ck_format *gmm__ck_format_of(gmm_scaling scaling, gmm_dtype codes, gmm_dtype scales) {
    size_t i;
    for (i = 0; i < sizeof gmm__ck_formats / sizeof gmm__ck_formats[0]; i++) {
        const gmm__ck_format *f = &gmm__ck_formats[i];
        if (f->scaling == scaling && f->dequantized && f->codes >> codes & 1 && f->scales >> scales & 1) return f;
    }
    return NULL;
}

/* The row of scales of a row of codes. */
static int64_t gmm__ck_scale_line(gmm_scaling scaling, int64_t row) {
    int64_t block_rows, block_cols;
    gmm__ck_block_of(scaling, &block_rows, &block_cols);
    return block_rows ? row / block_rows : 0;
}

/* Rows and columns of the scales of a matrix. */
static void gmm__ck_scale_extents(gmm_scaling scaling, int64_t rows, int64_t cols, int64_t *scale_rows,
                                  int64_t *scale_cols) {
    int64_t block_rows, block_cols;
    gmm__ck_block_of(scaling, &block_rows, &block_cols);
    *scale_rows = block_rows ? gmm__ceil_div(rows, block_rows) : 1;
    *scale_cols = block_cols ? gmm__ceil_div(cols, block_cols) : 1;
}

/* Whether a dtype holds two codes per byte; quantized tensors alone have such bytes. */
static int gmm__ck_is_packed(gmm_dtype dtype) { return GMM__CK_CODES_4 >> dtype & 1; }

/* Rows and columns of a quantized tensor's matrices, and of their scales. Blocks of MX32 with an extent of 16 bytes
   are matrices of one block per row, which have the same scales one after another. */
static void gmm__ck_scale_shape(const gmm_ckpt_tensor *t, gmm_scaling scaling, int64_t *rows, int64_t *cols,
                                int64_t *scale_rows, int64_t *scale_cols) {
    *rows = t->rank > 1 ? t->shape[t->rank - 2] : 1;
    *cols = t->shape[t->rank - 1] * (t->dtype == GMM_U8 ? 2 : 1);
    gmm__ck_scale_extents(scaling, *rows, *cols, scale_rows, scale_cols);
}

/* Dimensions of one matrix as a row stores it, given those of its elements: 0 for one value, 1 for a vector, 2. */
static int32_t gmm__ck_dimensions(const gmm_ckpt_row *row, int32_t dims) {
    return dims == 2 && row->scaling == GMM_SCALING_MX32 && row->kind == GMM_CKPT_WEIGHT ? 3 : dims;
}

/* The shapes that a row allows for matrices of rows x cols, as targets have it first; returns how many. */
static int gmm__ck_row_shapes(const gmm_ckpt_row *row, int64_t experts, int64_t rows, int64_t cols, int32_t dims,
                              int64_t shape[2][GMM_CKPT_RANK], int32_t rank[2]) {
    const int32_t n = gmm__ck_dimensions(row, dims);
    const int stacked = row->form == GMM_CKPT_STACKED || row->form == GMM_CKPT_TALL;
    int64_t matrix[3];
    int32_t i, d;
    matrix[0] = n == 2 && row->transposed ? cols : rows;
    matrix[1] = n == 3 ? cols / 32 : row->transposed ? rows : cols;
    matrix[2] = 16;
    for (i = 0; i < 2; i++) {
        const int split = stacked && (n == 0 || i == (row->form == GMM_CKPT_TALL)); /* an extent of experts alone */
        rank[i] = 0;
        if (split) shape[i][rank[i]++] = experts;
        for (d = 0; d < n; d++) shape[i][rank[i]++] = matrix[d];
        if (stacked && !split) shape[i][0] *= experts;
    }
    if (row->form == GMM_CKPT_WIDE) shape[0][n - 1] *= experts;
    return stacked ? 2 : 1;
}

/* The first of a row's shapes that a tensor has, -1 if it has none of them. */
static int gmm__ck_shape_index(const gmm_ckpt_row *row, const gmm_ckpt_tensor *t, int64_t experts, int64_t rows,
                               int64_t cols, int32_t dims) {
    int64_t shape[2][GMM_CKPT_RANK];
    int32_t rank[2], d;
    const int n = gmm__ck_row_shapes(row, experts, rows, cols, dims, shape, rank);
    int i;
    for (i = 0; i < n; i++) {
        int equal = rank[i] == t->rank;
        for (d = 0; equal && d < rank[i]; d++) equal = shape[i][d] == t->shape[d];
        if (equal) return i;
    }
    return -1;
}

/* The least dimensions that the scales of one matrix are stored with; `dims` of the matrix at most. */
static int32_t gmm__ck_least_dims(gmm_scaling scaling, int32_t dims) {
    int64_t rows, cols;
    gmm__ck_block_of(scaling, &rows, &cols);
    return cols ? dims : rows ? 1 : 0;
}

/* A stored weight and its scales, for finding their format. */
typedef struct gmm__ck_quantized {
    const gmm_ckpt_row *row;              /* of the scales */
    const gmm_ckpt_tensor *codes, *scale;
    int64_t experts;                      /* of one scale tensor, where it holds all */
    int64_t rows, cols;                   /* elements of one expert's matrix in the tensor */
    int32_t dims, packed;                 /* of the codes */
    int alike;                            /* 1: codes of several experts stand one below another; 0: they do not */
} gmm__ck_quantized;

/* The format, and in *dims how the scales of a matrix are stored. Scales that are stacked as their codes win. NULL:
   none; *dtypes are then the scales' dtypes of all formats that such codes can have, and `shapes` what their shapes
   would be. */
static const gmm__ck_format *gmm__ck_find_format(const gmm__ck_quantized *q, int32_t *dims, uint32_t *dtypes,
                                                 char *shapes, size_t capacity) {
    const int32_t formats = (int32_t)(sizeof gmm__ck_formats / sizeof gmm__ck_formats[0]);
    size_t n = 0;
    int32_t i;
    *dtypes = 0;
    *shapes = 0;
    for (i = 0; i < 2 * formats; i++) { /* scales that are stacked alike, then all */
        const gmm__ck_format *f = &gmm__ck_formats[i % formats];
        int64_t rows, cols;
        if (!(f->codes >> q->codes->dtype & 1) || f->packed != q->packed) continue;
        *dtypes |= f->scales;
        if (!(f->scales >> q->scale->dtype & 1)) continue;
        gmm__ck_scale_extents(f->scaling, q->rows, q->cols, &rows, &cols);
        for (*dims = gmm__ck_least_dims(f->scaling, q->dims); *dims <= q->dims; ++*dims) {
            const int found = gmm__ck_shape_index(q->row, q->scale, q->experts, rows, cols, *dims);
            if (found >= 0 && (i >= formats || !*dims || found == q->alike)) return f;
        }
        if (i < formats && n + 48 < capacity)
            n += (size_t)snprintf(shapes + n, capacity - n, "%s%lld x %lld (%s)", n ? ", " : "", (long long)rows,
                                  (long long)cols, gmm_scaling_name(f->scaling));
    }
    return NULL;
}

/* Writes the names of a set of dtypes, as "e8m0, u8". */
static const char *gmm__ck_dtype_names(uint32_t set, char *text, size_t capacity) {
    size_t n = 0;
    int32_t d;
    *text = 0;
    for (d = 0; d <= GMM_I64; d++)
        if (set >> d & 1 && n + 8 < capacity)
            n += (size_t)snprintf(text + n, capacity - n, "%s%s", n ? ", " : "", gmm_dtype_name((gmm_dtype)d));
    return text;
}
/* .................................................................................... 15.4 Keys to linears ... */
/* Parses the keys of the source, matches them to linears, and composes the names of targets. */

/* A source tensor whose key matches a row of the scheme for a linear. */
typedef struct gmm__ck_match {
    int64_t linear, expert; /* expert as the name counts it; 0 for STACKED and WIDE */
    int32_t state, row, part, tensor;
    int32_t prefix_class;   /* 0 = empty or stated, 1 = the first other prefix found, 2 = a second other prefix */
    gmm_ckpt_kind kind;
} gmm__ck_match;

typedef struct gmm__ck_memory_range { const char *begin, *end; } gmm__ck_memory_range;

struct gmm_ckpt_plan {
    gmm__ck_arena arena;
    gmm_ckpt_table *targets;
    gmm_ckpt_part *parts;
    gmm_ckpt_move *moves;
    int64_t *last_move;  /* [targets] the last move into each; -1 = none */
    gmm__ck_memory_range *source_ranges; /* the source's memory, ascending and disjoint */
    int64_t count, source_range_count;
    int32_t part_count, partial;
    gmm_ckpt_cost cost;
};

/* Tensors that the source lacks of one linear and row: experts first to last of a part, as names count them. row -1: a
   layer without any key. */
typedef struct gmm__ck_missing_range {
    int64_t layer, first, last; /* layer: of linears by path, their index */
    int32_t linear, row, state, part;
} gmm__ck_missing_range;

/* How a source tensor is used. PLAIN_SCALE: scales of a weight that is not quantized, treated as extra like UNUSED. */
enum gmm__ck_tensor_use { GMM__CK_UNUSED, GMM__CK_USED, GMM__CK_DROPPED, GMM__CK_PLAIN_SCALE };

typedef struct gmm__ck_builder {
    gmm__ck_arena arena;
    const char *fn;
    gmm_ckpt_report *report;
    gmm_ckpt_source source;
    gmm_ckpt_target target;
    gmm_ckpt_part *parts;        /* sizes of 0 are 1 */
    const char *const *states;   /* [source.state_count] */
    gmm_ckpt_linear *linears;    /* copies; canonical paths */
    int64_t linear_count, linear_capacity;
    int32_t *slots;              /* hash of linears: index + 1 */
    int64_t slot_count;
    int scan;                    /* 1: unknown (slot, layer) pairs become linears */
    gmm__ck_match *matches;
    int64_t match_count, match_capacity;
    uint8_t *state_present;      /* [source.state_count] states that have a match */
    gmm__ck_missing_range *missing_ranges;
    int64_t missing_range_count, missing_range_capacity, missing; /* missing: tensors and layers */
    /* scan: a router with more rows than experts have keys; 0 rows = none */
    int64_t extra_router_layer, extra_router_rows;
    const char *source_prefix;   /* prefix of the source's keys */
    const char *target_prefix;   /* of the target's names */
    const char *other_prefixes[2];       /* canonical prefixes 1 and 2 */
    const char *other_keys[2];
    char *key_buffer;            /* holds one key without wrapper segments */
    uint8_t **uses;              /* [parts][tensors] gmm__ck_tensor_use */
    gmm_ckpt_table *targets;
    int64_t target_end;          /* end of the targets in storage 0 */
    gmm_ckpt_move *moves;
    int64_t move_count, move_capacity;
} gmm__ck_builder;

static gmm_status gmm__ck_refuse(gmm__ck_builder *b, gmm_ckpt_reason reason, const char *key, const char *format, ...) {
    va_list list;
    gmm_status status;
    va_start(list, format);
    status = gmm__ck_vfail(b->report, reason, key, b->fn, format, list);
    va_end(list);
    return status;
}

/* Whether the call is gmm_ckpt_normalize_map, where linears are named by paths alone and no prefix can be stated. */
static int gmm__ck_is_map(const gmm__ck_builder *b) { return !strcmp(b->fn, "gmm_ckpt_normalize_map"); }

static gmm_status gmm__ck_no_memory(gmm__ck_builder *b) {
    return gmm__ck_refuse(b, GMM_CKPT_NO_MEMORY, NULL, "no memory");
}

/* Parses an integer of at most 9 digits without leading zeros, and moves *text to the character after it. */
static int gmm__ck_parse_number(const char **text, int64_t *value) {
    const char *p = *text;
    int64_t v = 0;
    if (*p < '0' || *p > '9' || (*p == '0' && p[1] >= '0' && p[1] <= '9')) return 0;
    for (; *p >= '0' && *p <= '9'; p++) {
        if (p - *text >= 9) return 0;
        v = v * 10 + (*p - '0');
    }
    *text = p;
    *value = v;
    return 1;
}

/* Whether the whole text matches the pattern; reads its layer and expert. */
static int gmm__ck_match_pattern(const char *pattern, const char *text, int64_t *layer, int64_t *expert) {
    while (*pattern) {
        if (*pattern == '{') {
            if (!gmm__ck_parse_number(&text, pattern[1] == 'L' ? layer : expert)) return 0;
            pattern += 3;
        } else if (*pattern++ != *text++) {
            return 0;
        }
    }
    return *text == 0;
}

static int gmm__ck_is_wrapper(const gmm_ckpt_source *source, const char *segment, size_t length) {
    int32_t w;
    for (w = 0; w < source->wrapper_count; w++)
        if (strlen(source->wrappers[w]) == length && !memcmp(source->wrappers[w], segment, length)) return 1;
    return 0;
}

/* Copies a key without its wrapper segments; `dst` may be the key itself. Returns the length. */
static size_t gmm__ck_strip_wrappers(const gmm_ckpt_source *source, const char *key, char *dst) {
    size_t n = 0;
    for (;;) {
        const size_t length = strcspn(key, ".");
        const int wrapper = gmm__ck_is_wrapper(source, key, length);
        if (!wrapper) {
            memmove(dst + n, key, length);
            n += length;
        }
        if (!key[length]) break;
        if (!wrapper) dst[n++] = '.';
        key += length + 1;
    }
    dst[n] = 0;
    return n;
}

/* The same for a key without its state's prefix; wrapper segments of the stated model prefix stay. */
static size_t gmm__ck_strip_key_wrappers(const gmm_ckpt_source *source, const char *key, char *dst) {
    const size_t n = source->prefix ? strlen(source->prefix) : 0;
    if (!n || strncmp(key, source->prefix, n)) return gmm__ck_strip_wrappers(source, key, dst);
    memcpy(dst, source->prefix, n);
    return n + gmm__ck_strip_wrappers(source, key + n, dst + n);
}

/* Finds the first wrapper segment from *text on, its length, and how many segments precede it; NULL if there is none.
   *text moves to the segment after it. */
static const char *gmm__ck_next_wrapper(const gmm_ckpt_source *source, const char **text, size_t *length,
                                        int *follows) {
    for (*follows = 0; **text; ++*follows) {
        const char *segment = *text;
        *length = strcspn(segment, ".");
        *text += *length + (segment[*length] == '.');
        if (gmm__ck_is_wrapper(source, segment, *length)) return segment;
    }
    return NULL;
}

/* Whether two keys have the same wrapper segments at the same positions. */
static int gmm__ck_same_wrappers(const gmm_ckpt_source *source, const char *a, const char *b) {
    for (;;) {
        size_t n = 0, m = 0;
        int i, k;
        const char *x = gmm__ck_next_wrapper(source, &a, &n, &i), *y = gmm__ck_next_wrapper(source, &b, &m, &k);
        if (!x && !y) return 1;
        if (!x || !y || i != k || n != m || memcmp(x, y, n)) return 0;
    }
}

/* Builds `state` followed by `name`, with each wrapper segment of `key` inserted while the segments before it equal
   those of the name. Any two numbers compare equal, because they are a layer or an expert. */
static char *gmm__ck_wrapped_name(gmm__ck_builder *b, const char *key, const char *state, const char *name) {
    static const char digits[] = "0123456789";
    const size_t capacity = strlen(state) + strlen(key) + strlen(name) + 2;
    char *wrapped = (char *)gmm__ck_alloc(&b->arena, (int64_t)capacity, 1);
    size_t n = strlen(state);
    if (!wrapped) return NULL;
    memcpy(wrapped, state, n);
    for (;;) {
        const size_t k = strcspn(key, "."), m = strcspn(name, ".");
        const int equal = (k == m && !memcmp(key, name, k)) ||
                         (k && m && strspn(key, digits) == k && strspn(name, digits) == m);
        const char *source = equal ? name : key;
        if (!key[k] || (equal ? !name[m] : !gmm__ck_is_wrapper(&b->source, key, k))) break;
        memcpy(wrapped + n, source, (equal ? m : k) + 1);
        n += (equal ? m : k) + 1;
        key += k + 1;
        if (equal) name += m + 1;
    }
    memcpy(wrapped + n, name, strlen(name) + 1);
    return wrapped;
}

/* The state of a key, -1 = none, and the length of its prefix: the longest wins. */
static int32_t gmm__ck_find_state(const gmm__ck_builder *b, const char *name, size_t *length) {
    int32_t s, found = -1;
    *length = 0;
    for (s = 0; s < b->source.state_count; s++) {
        const size_t n = strlen(b->states[s]);
        if ((found >= 0 && n <= *length) || strncmp(name, b->states[s], n)) continue;
        *length = n;
        found = s;
    }
    return found;
}

static uint64_t gmm__ck_linear_hash(const char *path, size_t length, gmm_ckpt_slot slot, int64_t layer) {
    return path ? gmm__ck_hash(path, length, 1) : gmm__ck_hash((const char *)&layer, sizeof layer, (uint64_t)slot + 2);
}

/* Index of a linear, by path or by slot and layer; -1 if there is none. *slot_index is its slot in the hash table. */
static int64_t gmm__ck_find_linear(const gmm__ck_builder *b, const char *path, size_t length, gmm_ckpt_slot slot,
                                   int64_t layer, int64_t *slot_index) {
    int64_t i = (int64_t)(gmm__ck_linear_hash(path, length, slot, layer) & (uint64_t)(b->slot_count - 1));
    for (; b->slots[i]; i = (i + 1) & (b->slot_count - 1)) {
        const gmm_ckpt_linear *l = &b->linears[b->slots[i] - 1];
        if (path ? l->path && strlen(l->path) == length && !memcmp(l->path, path, length)
                 : !l->path && l->slot == slot && l->layer == layer) {
            *slot_index = i;
            return b->slots[i] - 1;
        }
    }
    *slot_index = i;
    return -1;
}

static gmm_status gmm__ck_add_linear(gmm__ck_builder *b, const gmm_ckpt_linear *linear) {
    void *array = b->linears;
    int64_t slot_index = 0, i;
    if (2 * (b->linear_count + 1) > b->slot_count) {
        b->slot_count = b->slot_count ? b->slot_count * 2 : 64;
        b->slots = (int32_t *)gmm__ck_alloc(&b->arena, b->slot_count, sizeof *b->slots);
        if (!b->slots) return gmm__ck_no_memory(b);
        for (i = 0; i < b->linear_count; i++) {
            const gmm_ckpt_linear *l = &b->linears[i];
            (void)gmm__ck_find_linear(b, l->path, l->path ? strlen(l->path) : 0, l->slot, l->layer, &slot_index);
            b->slots[slot_index] = (int32_t)(i + 1);
        }
    }
    if (gmm__ck_find_linear(b, linear->path, linear->path ? strlen(linear->path) : 0, linear->slot, linear->layer,
                            &slot_index) >= 0)
        return gmm__ck_refuse(b, GMM_CKPT_ARGUMENT, linear->path, "linears: the same path, or slot %d of layer %lld, "
                              "stands twice", (int)linear->slot, (long long)linear->layer);
    if (b->linear_count == INT32_MAX - 1) return gmm__ck_refuse(b, GMM_CKPT_OVERFLOW, NULL, "linears: too many");
    if (!gmm__ck_reserve(&b->arena, &array, b->linear_count, &b->linear_capacity, sizeof *b->linears))
        return gmm__ck_no_memory(b);
    b->linears = (gmm_ckpt_linear *)array;
    b->linears[b->linear_count] = *linear;
    b->slots[slot_index] = (int32_t)++b->linear_count;
    return GMM_OK;
}

/* Finds the linear of a canonical key whose end matches a row's pattern. *start is where the prefix ends.
   Returns -1 if there is none. */
static int64_t gmm__ck_match_row(gmm__ck_builder *b, const gmm_ckpt_row *row, const char *key, size_t length,
                                 int64_t *expert, size_t *start, gmm_status *status) {
    const int has_path = !strncmp(row->pattern, "{p}.", 4);
    const char *tail = row->pattern + (has_path ? 4 : 0);
    const size_t stated = b->source.prefix ? strlen(b->source.prefix) : 0;
    int64_t layer = -1, linear, slot_index = 0;
    size_t i, begin = length;
    int dots = 0;
    for (i = 0; tail[i]; i++) dots += tail[i] == '.';
    for (; begin && (key[begin - 1] != '.' || dots--); begin--) {}
    *expert = 0;
    if (!gmm__ck_match_pattern(tail, key + begin, &layer, expert)) return -1;
    if (b->source.prefix && (length < stated || memcmp(key, b->source.prefix, stated))) return -1;
    if (!has_path) {
        gmm_ckpt_linear fresh = GMM_ZERO;
        *start = begin;
        if (b->source.prefix && begin != stated) return -1;
        linear = b->slot_count ? gmm__ck_find_linear(b, NULL, 0, row->slot, layer, &slot_index) : -1;
        if (linear >= 0 || !b->scan) return linear;
        fresh.slot = row->slot;
        fresh.layer = layer;
        *status = gmm__ck_add_linear(b, &fresh);
        return *status ? -1 : b->linear_count - 1;
    }
    if (!b->slot_count || begin < stated) return -1;
    if (b->source.prefix) {
        *start = stated;
        return gmm__ck_find_linear(b, key + stated, begin > stated ? begin - 1 - stated : 0, GMM_CKPT_SLOT_ANY, 0,
                                   &slot_index);
    }
    for (i = 0; i < begin; i++) { /* the longest path wins */
        if (i && key[i - 1] != '.') continue;
        linear = gmm__ck_find_linear(b, key + i, begin - 1 - i, GMM_CKPT_SLOT_ANY, 0, &slot_index);
        *start = i;
        if (linear >= 0) return linear;
    }
    return -1;
}

static int gmm__ck_compare_matches(const void *a, const void *b) {
    const gmm__ck_match *x = (const gmm__ck_match *)a, *y = (const gmm__ck_match *)b;
    if (x->linear != y->linear) return x->linear < y->linear ? -1 : 1;
    if (x->state != y->state) return x->state < y->state ? -1 : 1;
    if (x->kind != y->kind) return x->kind < y->kind ? -1 : 1;
    if (x->row != y->row) return x->row < y->row ? -1 : 1;
    if (x->part != y->part) return x->part < y->part ? -1 : 1;
    if (x->expert != y->expert) return x->expert < y->expert ? -1 : 1;
    return x->tensor < y->tensor ? -1 : x->tensor > y->tensor;
}

/* Matches all keys: fills the sorted matches, the source's prefix, and how each tensor is used. */
static gmm_status gmm__ck_read_keys(gmm__ck_builder *b) {
    const gmm_ckpt_scheme *scheme = b->source.scheme;
    size_t longest = 0;
    int64_t i, n = 0;
    int32_t p, r, empty = 0;
    for (p = 0; p < b->source.part_count; p++)
        if (b->parts[p].table->longest > longest) longest = b->parts[p].table->longest;
    b->key_buffer = (char *)gmm__ck_alloc(&b->arena, (int64_t)longest + 1, 1);
    b->uses = (uint8_t **)gmm__ck_alloc(&b->arena, b->source.part_count, sizeof *b->uses);
    if (!b->key_buffer || !b->uses) return gmm__ck_no_memory(b);
    for (p = 0; p < b->source.part_count; p++) {
        const gmm_ckpt_table *table = b->parts[p].table;
        b->uses[p] = (uint8_t *)gmm__ck_alloc(&b->arena, table->count + 1, 1);
        if (!b->uses[p]) return gmm__ck_no_memory(b);
        for (i = 0; i < table->count; i++) {
            const char *name = table->tensors[i].name;
            size_t state_length = 0, start = 0, length;
            gmm_status status = GMM_OK;
            gmm__ck_match h;
            void *array = b->matches;
            memset(&h, 0, sizeof h);
            h.linear = -1;
            h.state = gmm__ck_find_state(b, name, &state_length);
            if (h.state < 0) continue;
            length = gmm__ck_strip_key_wrappers(&b->source, name + state_length, b->key_buffer);
            for (r = 0; r < scheme->count && h.linear < 0; r++) {
                h.linear = gmm__ck_match_row(b, &scheme->rows[r], b->key_buffer, length, &h.expert, &start, &status);
                if (status) return status;
                h.row = r;
            }
            if (h.linear < 0) continue;
            h.kind = scheme->rows[h.row].kind;
            h.part = p;
            h.tensor = (int32_t)i;
            if (h.kind == GMM_CKPT_BIAS && !b->scan && !b->linears[h.linear].bias) continue;
            if (!b->source.prefix && start) {
                for (h.prefix_class = 1; h.prefix_class < 3; h.prefix_class++) {
                    const char *other_prefix = b->other_prefixes[h.prefix_class - 1];
                    if (!other_prefix) {
                        other_prefix = gmm__ck_copy_text(&b->arena, b->key_buffer, start);
                        if (!other_prefix) return gmm__ck_no_memory(b);
                        b->other_prefixes[h.prefix_class - 1] = other_prefix;
                        b->other_keys[h.prefix_class - 1] = name;
                    }
                    if ((strlen(other_prefix) == start && !memcmp(other_prefix, b->key_buffer, start)) ||
                        h.prefix_class == 2)
                        break;
                }
            } else {
                empty = 1;
            }
            if (!gmm__ck_reserve(&b->arena, &array, b->match_count, &b->match_capacity, sizeof *b->matches))
                return gmm__ck_no_memory(b);
            b->matches = (gmm__ck_match *)array;
            b->matches[b->match_count++] = h;
        }
    }
    if (!empty && b->other_prefixes[1])
        return gmm__ck_refuse(b, GMM_CKPT_AMBIGUOUS, b->other_keys[1], "its prefix \"%.80s\" and \"%.80s\" are two: "
                              "%s", b->other_prefixes[1], b->other_prefixes[0],
                                  gmm__ck_is_map(b) ? "give linears longer paths"
                                                                               : "state the prefix");
    b->source_prefix = b->source.prefix ? b->source.prefix : !empty && b->other_prefixes[0] ? b->other_prefixes[0] : "";
    b->target_prefix = b->target.prefix ? b->target.prefix : b->source_prefix;
    for (i = 0; i < b->match_count; i++) { /* only matches with the chosen prefix remain */
        const gmm__ck_match h = b->matches[i];
        if (h.prefix_class != (empty ? 0 : 1)) continue;
        b->uses[h.part][h.tensor] = GMM__CK_USED;
        b->matches[n++] = h;
    }
    b->match_count = n;
    b->state_present = (uint8_t *)gmm__ck_alloc(&b->arena, b->source.state_count, 1);
    if (!b->state_present) return gmm__ck_no_memory(b);
    for (i = 0; i < n; i++) b->state_present[b->matches[i].state] = 1;
    if (n) qsort(b->matches, (size_t)n, sizeof *b->matches, gmm__ck_compare_matches);
    return GMM_OK;
}

/* A match's key without its state's prefix. */
static const char *gmm__ck_match_key(const gmm__ck_builder *b, const gmm__ck_match *h) {
    return b->parts[h->part].table->tensors[h->tensor].name + strlen(b->states[h->state]);
}

/* The name that a row gives, with {L} and {e} as these texts. */
static char *gmm__ck_expand_pattern(gmm__ck_builder *b, const gmm_ckpt_row *row, const char *prefix,
                                    const gmm_ckpt_linear *l, const char *layer, const char *expert) {
    const char *path = l && l->path ? l->path : "", *p = row->pattern;
    const size_t capacity = strlen(prefix) + strlen(p) + strlen(path) + strlen(layer) + strlen(expert) + 1;
    char *name = (char *)gmm__ck_alloc(&b->arena, (int64_t)capacity, 1);
    size_t n = strlen(prefix);
    if (!name) return NULL;
    memcpy(name, prefix, n);
    while (*p) {
        const char *piece = p[1] == 'L' ? layer : p[1] == 'p' ? path : expert;
        if (*p != '{') {
            name[n++] = *p++;
            continue;
        }
        memcpy(name + n, piece, strlen(piece));
        n += strlen(piece);
        p += 3;
        if (!*piece && *p == '.') p++; /* an empty path has no dot */
    }
    name[n] = 0;
    return name;
}

/* The name of a target: STATE WRAPPERS PREFIX pattern. `key` is a key of the linear in the source, without
   its state's prefix. */
static char *gmm__ck_target_name(gmm__ck_builder *b, const gmm_ckpt_row *row, const char *state,
                                 const gmm_ckpt_linear *l, int64_t expert, const char *key) {
    char layer[24], number[24], *name;
    (void)snprintf(layer, sizeof layer, "%lld", (long long)l->layer);
    (void)snprintf(number, sizeof number, "%lld", (long long)expert);
    name = gmm__ck_expand_pattern(b, row, b->target_prefix, l, layer, number);
    if (name && b->target.drop_wrappers) {
        (void)gmm__ck_strip_wrappers(&b->source, name, name);
        key = "";
    }
    return name ? gmm__ck_wrapped_name(b, key, state, name) : NULL;
}

/* The name that a missing key of the source would have, with the wrapper segments of the first key that exists. */
static char *gmm__ck_missing_name(gmm__ck_builder *b, const gmm_ckpt_row *row, int32_t state, const gmm_ckpt_linear *l,
                                  const char *layer, const char *expert) {
    const char *key = b->match_count ? gmm__ck_match_key(b, b->matches) : "";
    char *name = gmm__ck_expand_pattern(b, row, b->source_prefix, l, layer, expert);
    return name ? gmm__ck_wrapped_name(b, key, b->states[state], name) : NULL;
}

/* ................................................................................... 15.5 Boxes of a weight ... */
/* Shards of a logical array as boxes of halves, rows and columns, and the strided moves between two boxes. */

/* The logical array of one linear, state and kind: [experts][halves][f][k]; gate and up are halves. */
typedef struct gmm__ck_array {
    const gmm_ckpt_linear *linear;
    const char *state;
    gmm_ckpt_kind kind;
    int64_t experts, halves, f, k;
    int32_t grouped, rows_sharded, cols_sharded; /* grouped: EP distributes experts; sharded: by ETP */
    int32_t gtp_sharded;                         /* GTP can shard the rows */
    int32_t dims;                                /* of a matrix as it is stored: 2, 1 for a vector, 0 for one value */
    int32_t single;                              /* 1: one value of the whole matrix, in which gate and up are one */
    int32_t etp_part;                            /* >= 0: the ETP rank whose parts alone are read; -1 = all */
} gmm__ck_array;

static gmm__ck_array gmm__ck_make_array(const gmm_ckpt_linear *l, gmm_ckpt_kind kind) {
    static const int8_t rules[][3] = {
#define GMM__X(name, value, text, grouped, rows, cols) {grouped, rows, cols},
        GMM_CKPT_SLOT_LIST(GMM__X)
#undef GMM__X
    };
    gmm__ck_array x;
    memset(&x, 0, sizeof x);
    x.linear = l;
    x.kind = kind;
    x.experts = l->experts;
    x.halves = l->gated ? 2 : 1;
    x.f = l->out / x.halves;
    x.k = l->in && kind != GMM_CKPT_BIAS ? l->in : 1;
    x.dims = l->in == 0 || kind == GMM_CKPT_BIAS ? 1 : 2;
    x.etp_part = -1;
    x.grouped = rules[l->slot][0];
    x.gtp_sharded = x.grouped && kind != GMM_CKPT_BIAS;
    x.rows_sharded = rules[l->slot][1];
    x.cols_sharded = kind == GMM_CKPT_BIAS ? 0 : rules[l->slot][2];
    return x;
}

/* The rows and columns of its array that a stored matrix holds, and the strides of its elements in its tensor. With
   both halves in it, row (h, i) of the matrix is (i / block) 2 block + i % block + h block. */
typedef struct gmm__ck_shard {
    int32_t part, tensor, scale;
    gmm_scaling scaling;
    gmm_dtype dtype;
    int64_t expert0, experts;   /* first expert, and how many the tensor holds */
    int64_t half0, halves;
    int64_t f0, f, k0, k;
    int64_t block;
    int64_t row0, rows;         /* stored rows of the matrix [row0, row0 + rows) */
    int64_t expert_step, row_step, col_step; /* elements */
} gmm__ck_shard;

/* A range of halves and a range of rows in each half. */
typedef struct gmm__ck_box { int64_t h0, h1, f0, f1; } gmm__ck_box;

/* Writes the rows of a shard as boxes, and returns their number, at most 5: part of a first group of gate and up
   blocks, whole groups, part of a last one. */
static int gmm__ck_row_boxes(const gmm__ck_shard *p, gmm__ck_box *box) {
    int64_t a = p->row0, end = p->row0 + p->rows;
    int n = 0;
    for (; a < end; n++) {
        const int64_t group = p->halves * p->block, within = a % group, base = a / group * p->block;
        int64_t length;
        if (within == 0 && end - a >= group) { /* whole groups */
            length = (end - a) / group;
            box[n].h0 = 0;
            box[n].h1 = p->halves;
            box[n].f0 = base;
            box[n].f1 = base + length * p->block;
            length *= group;
        } else {
            const int64_t h = within / p->block, t = within % p->block;
            length = gmm__min_i64(p->block - t, end - a);
            box[n].h0 = h;
            box[n].h1 = h + 1;
            box[n].f0 = base + t;
            box[n].f1 = base + t + length;
        }
        box[n].h0 += p->half0;
        box[n].h1 += p->half0;
        box[n].f0 += p->f0;
        box[n].f1 += p->f0;
        a += length;
    }
    return n;
}

/* Offset in the shard's tensor, in elements, of element (expert e, half h, row f, column k) of the whole array. */
static int64_t gmm__ck_element_offset(const gmm__ck_shard *p, int64_t e, int64_t h, int64_t f, int64_t k) {
    const int64_t i = f - p->f0;
    const int64_t row = i / p->block * p->block * p->halves + i % p->block + (h - p->half0) * p->block;
    return (e - p->expert0) * p->expert_step + (row - p->row0) * p->row_step + (k - p->k0) * p->col_step;
}

/* The block size where rows f0 to f1 do not have one constant stride; 0 if they do. */
static int64_t gmm__ck_row_block(const gmm__ck_shard *p, int64_t f0, int64_t f1) {
    if (p->halves == 1 || p->block == 1 || (f0 - p->f0) / p->block == (f1 - 1 - p->f0) / p->block) return 0;
    return p->block;
}

/* Stored rows from f to f + df: df a multiple of the block, or both rows in one. */
static int64_t gmm__ck_row_distance(const gmm__ck_shard *p, int64_t df, int even) {
    return p->halves == 2 && (p->block == 1 || !even) ? 2 * df : df;
}

/* Removes loops of count 1, sorts loops by falling dst_step, and merges neighbours that form one loop. */
static void gmm__ck_simplify_loops(gmm_ckpt_move *m) {
    int n = 0, i, j;
    for (i = 0; i < m->loops; i++) {
        if (m->count[i] == 1) continue;
        for (j = n++; j > 0 && m->dst_step[j - 1] < m->dst_step[i]; j--) {}
        if (j < n - 1 || i != n - 1) {
            const int64_t c = m->count[i], s = m->src_step[i], d = m->dst_step[i];
            int k;
            for (k = n - 1; k > j; k--) {
                m->count[k] = m->count[k - 1];
                m->src_step[k] = m->src_step[k - 1];
                m->dst_step[k] = m->dst_step[k - 1];
            }
            m->count[j] = c;
            m->src_step[j] = s;
            m->dst_step[j] = d;
        }
    }
    for (i = n - 1; i > 0; i--) {
        if (m->src_step[i - 1] != m->count[i] * m->src_step[i] || m->dst_step[i - 1] != m->count[i] * m->dst_step[i])
            continue;
        m->count[i - 1] *= m->count[i];
        m->src_step[i - 1] = m->src_step[i];
        m->dst_step[i - 1] = m->dst_step[i];
        for (j = i; j + 1 < n; j++) {
            m->count[j] = m->count[j + 1];
            m->src_step[j] = m->src_step[j + 1];
            m->dst_step[j] = m->dst_step[j + 1];
        }
        n--;
    }
    if (n == 0) {
        m->count[0] = 1;
        m->src_step[0] = m->dst_step[0] = 1;
        n = 1;
    }
    for (i = n; i < GMM_CKPT_LOOPS; i++) m->count[i] = m->src_step[i] = m->dst_step[i] = 0;
    m->loops = n;
}

static void gmm__ck_add_loop(gmm_ckpt_move *m, int64_t count, int64_t src_step, int64_t dst_step) {
    m->count[m->loops] = count;
    m->src_step[m->loops] = src_step;
    m->dst_step[m->loops++] = dst_step;
}

static gmm_status gmm__ck_add_move(gmm__ck_builder *b, gmm_ckpt_move *m) {
    void *array = b->moves;
    gmm__ck_simplify_loops(m);
    if (!gmm__ck_reserve(&b->arena, &array, b->move_count, &b->move_capacity, sizeof *b->moves))
        return gmm__ck_no_memory(b);
    b->moves = (gmm_ckpt_move *)array;
    b->moves[b->move_count++] = *m;
    return GMM_OK;
}

/* The intersection of two shards in one expert. */
typedef struct gmm__ck_overlap {
    const gmm__ck_shard *src, *dst;
    gmm_ckpt_move_kind kind;
    int64_t expert, h0, h1, k0, k1;
} gmm__ck_overlap;

/* Adds the moves of rows f0 to f1 of the halves, `repeat` times at a distance of `period`, which is a multiple of
   both blocks. sb and db are the blocks of source and destination. The range is divided until it begins and ends at
   multiples of the coarser block and the finer block divides it; one move with strided loops then suffices. */
static gmm_status gmm__ck_move_rows(gmm__ck_builder *b, const gmm__ck_overlap *o, int64_t f0, int64_t f1,
                                    int64_t repeat, int64_t period) {
    const gmm__ck_shard *s = o->src, *d = o->dst;
    const int64_t sb = gmm__ck_row_block(s, f0, f1), db = gmm__ck_row_block(d, f0, f1);
    const int64_t coarse = sb > db ? sb : db, fine = sb && db ? (sb < db ? sb : db) : 0;
    gmm_ckpt_move m = GMM_ZERO;
    if (coarse) { /* blocks start at multiples of their size behind the first row of the shard */
        const int64_t first = coarse == sb ? s->f0 : d->f0;
        const int64_t up = gmm__min_i64(first + gmm__round_up(f0 - first, coarse), f1);
        const int64_t aligned = first + (f1 - first) / coarse * coarse;
        int64_t lcm = fine, f;
        gmm_status status = GMM_OK;
        if (f0 < up) status = gmm__ck_move_rows(b, o, f0, up, repeat, period);
        if (!status && f0 < up && up < f1) return gmm__ck_move_rows(b, o, up, f1, repeat, period);
        if (status || f0 < up) return status;
        if (aligned < f1) {
            status = gmm__ck_move_rows(b, o, f0, aligned, repeat, period);
            return status ? status : gmm__ck_move_rows(b, o, aligned, f1, repeat, period);
        }
        while (fine && lcm % coarse) lcm += fine;
        if (fine && lcm != coarse) { /* neither block divides the other */
            if (repeat == 1 && f1 - f0 > lcm && (f1 - f0) % lcm == 0)
                return gmm__ck_move_rows(b, o, f0, f0 + lcm, (f1 - f0) / lcm, lcm);
            for (f = f0; !status && f < f1; f += coarse)
                status = gmm__ck_move_rows(b, o, f, f + coarse, repeat, period);
            return status;
        }
    }
    m.kind = o->kind;
    m.scaling = o->kind == GMM_CKPT_DEQUANT ? s->scaling : GMM_SCALING_NONE;
    m.part = s->part;
    m.src = s->tensor;
    m.dst = d->tensor;
    m.scale = o->kind == GMM_CKPT_DEQUANT ? s->scale : -1;
    m.src_at = gmm__ck_element_offset(s, o->expert, o->h0, f0, o->k0);
    m.dst_at = gmm__ck_element_offset(d, o->expert, o->h0, f0, o->k0);
    gmm__ck_add_loop(&m, o->h1 - o->h0, s->block * s->row_step, d->block * d->row_step);
    gmm__ck_add_loop(&m, repeat, 2 * period * s->row_step, 2 * period * d->row_step);
    if (coarse) {
        gmm__ck_add_loop(&m, (f1 - f0) / coarse, gmm__ck_row_distance(s, coarse, !sb) * s->row_step,
                         gmm__ck_row_distance(d, coarse, !db) * d->row_step);
        if (fine)
            gmm__ck_add_loop(&m, coarse / fine, gmm__ck_row_distance(s, fine, sb == coarse && sb != fine) * s->row_step,
                             gmm__ck_row_distance(d, fine, db == coarse && db != fine) * d->row_step);
    }
    gmm__ck_add_loop(&m, fine ? fine : coarse ? coarse : f1 - f0, gmm__ck_row_distance(s, 1, 1) * s->row_step,
                     gmm__ck_row_distance(d, 1, 1) * d->row_step);
    gmm__ck_add_loop(&m, o->k1 - o->k0, s->col_step, d->col_step);
    return gmm__ck_add_move(b, &m);
}

/* ............................................................................................ 15.6 One array ... */
/* Finds and describes the stored tensors of one logical array. */

/* The source tensors that match one row for an array: [parts][experts of a part]; -1 = none. */
typedef struct gmm__ck_row_tensors {
    const gmm_ckpt_row *row;
    int32_t *tensor;
} gmm__ck_row_tensors;

/* "[4, 8]" */
static void gmm__ck_shape_text(char *text, size_t capacity, int32_t rank, const int64_t *shape) {
    size_t n = 0;
    int32_t d;
    for (d = 0; d < rank && n + 24 < capacity; d++)
        n += (size_t)snprintf(text + n, capacity - n, "%s%lld", d ? ", " : "[", (long long)shape[d]);
    (void)snprintf(text + n, capacity - n, rank ? "]" : "[]");
}

/* Checks a tensor's shape. *rows < 0 is read from it. */
static gmm_status gmm__ck_check_shape(gmm__ck_builder *b, const gmm_ckpt_row *row, const gmm_ckpt_tensor *t,
                                      int64_t experts, int64_t *rows, int64_t cols, int32_t dims) {
    int64_t shape[2][GMM_CKPT_RANK], r = *rows;
    int32_t rank[2], d;
    char actual[160], expected[160];
    if (r < 0) {
        const int split = t->rank > gmm__ck_dimensions(row, dims), transposed = row->transposed && dims == 2;
        d = split + transposed;
        r = d < t->rank ? t->shape[d] : 0;
        if (!split && (row->form == GMM_CKPT_WIDE ? transposed : row->form != GMM_CKPT_EACH && !transposed))
            r /= experts;
    }
    if (gmm__ck_shape_index(row, t, experts, r, cols, dims) >= 0) {
        *rows = r;
        return GMM_OK;
    }
    (void)gmm__ck_row_shapes(row, experts, r, cols, dims, shape, rank);
    gmm__ck_shape_text(actual, sizeof actual, t->rank, t->shape);
    gmm__ck_shape_text(expected, sizeof expected, rank[0], shape[0]);
    return gmm__ck_refuse(b, GMM_CKPT_SHAPE, t->name, "its shape %s is not %s, as %lld x %lld of %lld experts%s ask",
                          actual, expected, (long long)r, (long long)cols, (long long)experts,
                          row->transposed ? ", transposed," : "");
}

/* Whether the array is read from a part; it is not where an earlier part holds the same data. */
static int gmm__ck_part_is_read(const gmm__ck_builder *b, const gmm__ck_array *x, int32_t part) {
    const gmm_ckpt_rank *r = &b->parts[part].rank;
    const int etp = x->rows_sharded || x->cols_sharded || x->etp_part >= 0;
    int32_t p;
    if (x->etp_part >= 0 && r->etp_rank != x->etp_part) return 0;
    for (p = 0; p < part; p++) {
        const gmm_ckpt_rank *q = &b->parts[p].rank;
        if ((!x->grouped || q->ep_rank == r->ep_rank) && (!etp || q->etp_rank == r->etp_rank) &&
            (!x->gtp_sharded || q->gtp_rank == r->gtp_rank))
            return 0;
    }
    return 1;
}

static int64_t gmm__ck_part_experts(const gmm__ck_builder *b, const gmm__ck_array *x) {
    return x->grouped ? x->experts / b->parts[0].rank.ep_size : 1;
}

/* Sorts the matches of one linear, state and kind by half. */
static gmm_status gmm__ck_group_matches(gmm__ck_builder *b, const gmm__ck_array *x, gmm__ck_match *matches,
                                        int64_t count, int32_t grouped, gmm__ck_row_tensors holder[3]) {
    const gmm_ckpt_row *rows = b->source.scheme->rows;
    const int64_t part_experts = gmm__ck_part_experts(b, x);
    int64_t i, k;
    memset(holder, 0, 3 * sizeof *holder);
    for (i = 0; i < count; i++) {
        const gmm_ckpt_row *row = &rows[matches[i].row];
        gmm__ck_row_tensors *h = &holder[row->half];
        const gmm_ckpt_tensor *t = &b->parts[matches[i].part].table->tensors[matches[i].tensor];
        const int64_t base = b->source.scheme->global_index ? b->parts[matches[i].part].rank.ep_rank * part_experts : 0;
        int64_t index;
        if (h->row && h->row != row && b->source.prefer_target &&
            (h->row->form == GMM_CKPT_EACH) != (row->form == GMM_CKPT_EACH)) {
            const int fresh = (row->form != GMM_CKPT_EACH) == (grouped != 0);
            for (k = fresh ? 0 : i; k < (fresh ? i : count); k++) /* rows come sorted */
                if (fresh ? rows[matches[k].row].half == row->half : matches[k].row == matches[i].row)
                    b->uses[matches[k].part][matches[k].tensor] = GMM__CK_DROPPED;
            if (!fresh) continue;
            h->row = NULL;
        }
        if (b->uses[matches[i].part][matches[i].tensor] == GMM__CK_DROPPED) continue;
        if ((h->row && h->row != row) || (row->half == GMM_CKPT_BOTH ? holder[GMM_CKPT_GATE].row ||
                                          holder[GMM_CKPT_UP].row : holder[GMM_CKPT_BOTH].row != NULL))
            return gmm__ck_refuse(b, GMM_CKPT_BOTH_LAYOUTS, t->name, "its %s are there in another layout too",
                                  x->kind < GMM_CKPT_SCALE ? "weights" : "scales");
        if (!h->row) {
            h->row = row;
            h->tensor = (int32_t *)gmm__ck_alloc(&b->arena, b->source.part_count * part_experts, sizeof *h->tensor);
            if (!h->tensor) return gmm__ck_no_memory(b);
            for (k = 0; k < b->source.part_count * part_experts; k++) h->tensor[k] = -1;
        }
        index = row->form == GMM_CKPT_EACH && x->grouped ? matches[i].expert - base : 0;
        if (index < 0 || index >= part_experts)
            return gmm__ck_refuse(b, GMM_CKPT_EXTRA_INDEX, t->name, "expert %lld is none of the declared %lld",
                                  (long long)matches[i].expert, (long long)part_experts);
        index += matches[i].part * part_experts;
        if (h->tensor[index] >= 0)
            return gmm__ck_refuse(b, GMM_CKPT_AMBIGUOUS, t->name, "\"%.100s\" names the same tensor",
                                  b->parts[matches[i].part].table->tensors[h->tensor[index]].name);
        h->tensor[index] = matches[i].tensor;
    }
    return GMM_OK;
}

static gmm_status gmm__ck_refuse_missing_tensor(gmm__ck_builder *b, const gmm__ck_array *x, const gmm_ckpt_row *row,
                                                int32_t state, int64_t expert) {
    char layer[24], number[24];
    const char *name;
    (void)snprintf(layer, sizeof layer, "%lld", (long long)x->linear->layer);
    (void)snprintf(number, sizeof number, "%lld", (long long)expert);
    name = gmm__ck_missing_name(b, row, state, x->linear, layer, number);
    if (!name) return gmm__ck_no_memory(b);
    if (x->kind < GMM_CKPT_SCALE) return gmm__ck_refuse(b, GMM_CKPT_MISSING_INDEX, name, "the source lacks it");
    return gmm__ck_refuse(b, GMM_CKPT_SCALE_MISSING, name, "the source lacks these scales of a quantized weight");
}

/* Whether GTP shards the rows of the array's matrices in the source. */
static int gmm__ck_is_gtp_sharded(const gmm__ck_builder *b, const gmm__ck_array *x) {
    return x->gtp_sharded && b->parts[0].rank.gtp_size > 1;
}

/* How one array is transferred from the source to the targets. */
typedef struct gmm__ck_transfer {
    gmm__ck_row_tensors *weight, *scale; /* scale: block scales to dequantize with; NULL = none */
    const gmm__ck_row_tensors *presence; /* what skip_missing is decided by: `weight`; for scales, their weight */
    const char *key;                     /* a key of the linear in the source, without its state's prefix */
    int64_t src_block, dst_block;        /* rows of one gate or up block; 0 = halves */
    gmm_dtype dtype;                     /* of the targets; GMM_NONE = the source's */
    int32_t state, grouped, blocks;      /* grouped: STACKED targets preferred; blocks: the target's row is MX32 */
    int64_t shape_cols;                  /* columns of the whole array as the source's shapes count them */
    int32_t column_codes;                /* columns that the target's shapes count for one of the array: 1, 2 codes */
    const gmm_ckpt_cut *cut;             /* rows of a GTP rank, or NULL */
    int64_t cut_unit;                    /* rows of the weight per row of the array */
    const gmm__ck_format *format;        /* of quantized weights, or NULL */
    const char *codes;                   /* name of the first quantized weight */
    int32_t scale_dims;                  /* dimensions of the scales of one matrix */
    uint32_t dtypes;                     /* of the source; 0 = any */
} gmm__ck_transfer;

/* Describes the stored tensor of the source that holds one half of one expert in one part. */
static gmm_status gmm__ck_source_shard(gmm__ck_builder *b, const gmm__ck_array *x, const gmm__ck_transfer *g, int half,
                                       int32_t part, int64_t expert, gmm__ck_shard *p) {
    const gmm__ck_row_tensors *h = &g->weight[half];
    const gmm_ckpt_rank *rank = &b->parts[part].rank;
    const int64_t part_experts = gmm__ck_part_experts(b, x);
    const int64_t local = h->row->form == GMM_CKPT_EACH ? expert % part_experts : 0; /* index within the part */
    const gmm_ckpt_tensor *t;
    int64_t rows, stored = -1, full, shape_cols = g->shape_cols;
    gmm_status status;
    int32_t i = h->tensor[part * part_experts + local], q;
    memset(p, 0, sizeof *p);
    if (i < 0)
        return gmm__ck_refuse_missing_tensor(
            b, x, h->row, g->state, local + (b->source.scheme->global_index ? rank->ep_rank * part_experts : 0));
    t = &b->parts[part].table->tensors[i];
    if (gmm_dtype_bits(t->dtype) < 8 && !(g->format && g->format->packed))
        return gmm__ck_refuse(b, GMM_CKPT_DTYPE, t->name, "a weight's dtype must have whole bytes");
    if (g->dtypes && !(g->dtypes >> t->dtype & 1)) {
        char dtypes[64];
        return gmm__ck_refuse(b, GMM_CKPT_DTYPE, t->name, "scales of %s must be %s, not %s",
                              gmm_scaling_name(g->format->scaling),
                              gmm__ck_dtype_names(g->dtypes, dtypes, sizeof dtypes), gmm_dtype_name(t->dtype));
    }
    p->part = part;
    p->tensor = i;
    p->scale = -1;
    p->dtype = t->dtype;
    p->f = x->rows_sharded ? x->f / rank->etp_size : x->f;
    p->f0 = x->rows_sharded ? rank->etp_rank * p->f : 0;
    p->k = x->cols_sharded ? x->k / rank->etp_size : x->k;
    p->k0 = x->cols_sharded ? rank->etp_rank * p->k : 0;
    p->half0 = half == GMM_CKPT_UP && !x->single ? 1 : 0;
    p->halves = half == GMM_CKPT_BOTH ? x->halves : 1;
    p->block = p->halves == 2 && g->src_block ? g->src_block : p->f;
    p->experts = h->row->form == GMM_CKPT_EACH ? 1 : part_experts;
    p->expert0 = (x->grouped ? rank->ep_rank * part_experts : 0) + local;
    full = p->f * p->halves;
    rows = gmm__ck_is_gtp_sharded(b, x) ? -1 : full;
    if (x->cols_sharded) shape_cols /= rank->etp_size;
    status = gmm__ck_check_shape(b, h->row, t, part_experts, &rows, shape_cols, x->dims);
    if (status) return status;
    p->rows = stored = rows;
    /* A rank's rows follow those of lower ranks; rows past the matrix's end are padding. */
    if (gmm__ck_is_gtp_sharded(b, x)) {
        int64_t sum = 0;
        for (q = 0; q < b->source.part_count; q++) {
            const gmm_ckpt_rank *other_rank = &b->parts[q].rank;
            int64_t r = -1;
            if (other_rank->ep_rank != rank->ep_rank || other_rank->etp_rank != rank->etp_rank) continue;
            i = h->tensor[q * part_experts + local];
            if (i < 0)
                return gmm__ck_refuse_missing_tensor(
                    b, x, h->row, g->state,
                    local + (b->source.scheme->global_index ? rank->ep_rank * part_experts : 0));
            status = gmm__ck_check_shape(b, h->row, &b->parts[q].table->tensors[i], part_experts, &r, shape_cols,
                                         x->dims);
            if (status) return status;
            if (other_rank->gtp_rank < rank->gtp_rank) p->row0 += r;
            sum += r;
        }
        if (sum < full || (sum > full && sum != stored * rank->gtp_size))
            return gmm__ck_refuse(b, GMM_CKPT_SHAPE, t->name, "the %d GTP ranks hold %lld rows together, not %lld",
                                  (int)rank->gtp_size, (long long)sum, (long long)full);
        p->row0 = gmm__min_i64(p->row0, full);
        p->rows = gmm__min_i64(stored, full - p->row0);
    }
    p->row_step = h->row->transposed ? 1 : p->k;
    p->col_step = h->row->transposed ? stored : 1;
    p->expert_step = stored * p->k;
    return GMM_OK;
}

/* Adds the moves for the intersection of a source shard and a target shard in one expert. */
static gmm_status gmm__ck_move_overlap(gmm__ck_builder *b, const gmm__ck_shard *src, const gmm__ck_shard *dst,
                                       gmm_ckpt_move_kind kind, int64_t expert) {
    gmm__ck_box sb[5], db[5];
    const int sn = gmm__ck_row_boxes(src, sb), dn = gmm__ck_row_boxes(dst, db);
    gmm__ck_overlap o;
    int i, j;
    o.src = src;
    o.dst = dst;
    o.kind = kind;
    o.expert = expert;
    o.k0 = src->k0 > dst->k0 ? src->k0 : dst->k0;
    o.k1 = gmm__min_i64(src->k0 + src->k, dst->k0 + dst->k);
    for (i = 0; i < dn; i++)
        for (j = 0; j < sn; j++) {
            const int64_t f0 = sb[j].f0 > db[i].f0 ? sb[j].f0 : db[i].f0, f1 = gmm__min_i64(sb[j].f1, db[i].f1);
            gmm_status status;
            o.h0 = sb[j].h0 > db[i].h0 ? sb[j].h0 : db[i].h0;
            o.h1 = gmm__min_i64(sb[j].h1, db[i].h1);
            if (f0 >= f1 || o.h0 >= o.h1 || o.k0 >= o.k1) continue;
            status = gmm__ck_move_rows(b, &o, f0, f1, 1, 0);
            if (status) return status;
        }
    return GMM_OK;
}

/* Merges the moves of the last expert, [second, ...), into those of the experts before it, [first, second), as one more
   iteration of an outer loop, which has `experts` iterations so far. Returns 1 if that was possible. */
static int gmm__ck_merge_expert_moves(gmm__ck_builder *b, int64_t first, int64_t second, int64_t experts) {
    const int64_t n = second - first;
    int64_t i;
    int pass;
    if (n == 0 || b->move_count - second != n) return 0;
    for (pass = 0; pass < 2; pass++)
        for (i = 0; i < n; i++) {
            gmm_ckpt_move *m = &b->moves[first + i], e = b->moves[second + i];
            const int outer = experts > 1;
            const int64_t src = e.src_at - m->src_at, dst = e.dst_at - m->dst_at;
            int l;
            if (pass == 1) {
                if (!outer) {
                    for (l = m->loops++; l > 0; l--) {
                        m->count[l] = m->count[l - 1];
                        m->src_step[l] = m->src_step[l - 1];
                        m->dst_step[l] = m->dst_step[l - 1];
                    }
                    m->count[0] = 1;
                    m->src_step[0] = src;
                    m->dst_step[0] = dst;
                }
                m->count[0]++;
                continue;
            }
            if (m->kind != e.kind || m->part != e.part || m->src != e.src || m->dst != e.dst || m->scale != e.scale ||
                m->loops != e.loops + outer || (!outer && m->loops == GMM_CKPT_LOOPS) || src <= 0 || dst <= 0)
                return 0;
            if (outer && (src != m->count[0] * m->src_step[0] || dst != m->count[0] * m->dst_step[0])) return 0;
            for (l = 0; l < e.loops; l++)
                if (m->count[l + outer] != e.count[l] || m->src_step[l + outer] != e.src_step[l] ||
                    m->dst_step[l + outer] != e.dst_step[l])
                    return 0;
        }
    b->move_count = second;
    return 1;
}

static int64_t gmm__ck_move_elements(const gmm_ckpt_move *m) {
    int64_t n = 1;
    int l;
    for (l = 0; l < m->loops; l++) n *= m->count[l];
    return n;
}

/* Plans the target tensors of one logical array: their names, shapes and moves, and which of them become views. */

/* Adds a target tensor behind those that exist, at a multiple of 64 bytes; *index is its index in the table. */
static gmm_status gmm__ck_add_target(gmm__ck_builder *b, gmm_ckpt_tensor *t, int32_t *index) {
    gmm_status status;
    t->storage = 0;
    t->offset = b->target_end;
    if (t->bytes > INT64_MAX / 2 - b->target_end)
        return gmm__ck_refuse(b, GMM_CKPT_OVERFLOW, t->name, "the targets exceed 2^62 bytes");
    status = gmm__ck_add_tensor(b->targets, t, b->fn, b->report);
    if (status) return status;
    b->target_end = gmm__round_up(b->target_end + t->bytes, 64);
    *index = (int32_t)(b->targets->count - 1);
    return GMM_OK;
}

/* Writes the first rank without a part of the source, as "EP 1, ETP 0, GTP 2"; "" if every rank has one. */
static void gmm__ck_missing_rank(const gmm__ck_builder *b, char *text, size_t capacity) {
    const gmm_ckpt_rank size = b->parts[0].rank;
    int64_t index, all = (int64_t)size.ep_size * size.etp_size;
    *text = 0;
    if (!gmm__mul(all, size.gtp_size, &all)) return;
    for (index = 0; index < all && index <= b->source.part_count; index++) {
        const int32_t gtp = (int32_t)(index % size.gtp_size), etp = (int32_t)(index / size.gtp_size % size.etp_size);
        const int32_t ep = (int32_t)(index / size.gtp_size / size.etp_size);
        int32_t p;
        for (p = 0; p < b->source.part_count; p++) {
            const gmm_ckpt_rank *r = &b->parts[p].rank;
            if (r->ep_rank == ep && r->etp_rank == etp && r->gtp_rank == gtp) break;
        }
        if (p < b->source.part_count) continue;
        (void)snprintf(text, capacity, " (EP %d, ETP %d, GTP %d)", (int)ep, (int)etp, (int)gtp);
        return;
    }
}

/* Checks that the moves from `first` on write the whole target, and makes it a view where that is allowed and possible.
   */
static gmm_status gmm__ck_finish_target(gmm__ck_builder *b, int32_t target, int64_t first) {
    const gmm_ckpt_tensor *t = &b->targets->tensors[target];
    const int64_t unit = gmm__ck_unit_bytes(t->dtype), units = gmm__ck_unit_count(t);
    int64_t sum = 0, begin = 0, i;
    int view = b->target.views;
    gmm_ckpt_move view_move = GMM_ZERO;
    for (i = first; i < b->move_count; i++) {
        const gmm_ckpt_move *m = &b->moves[i];
        const gmm_ckpt_tensor *s = m->src >= 0 ? &b->parts[m->part].table->tensors[m->src] : NULL;
        int64_t position;
        sum += gmm__ck_move_elements(m);
        view = view && s && m->kind == GMM_CKPT_COPY && m->loops == 1 && m->src_step[0] == 1 && m->dst_step[0] == 1;
        if (!view) continue;
        position = s->offset + (m->src_at - m->dst_at) * unit;
        if (i == first) {
            view_move = *m;
            begin = position;
        } else {
            view = m->part == view_move.part && position == begin &&
                   s->storage == b->parts[m->part].table->tensors[view_move.src].storage;
            if (m->dst_at < view_move.dst_at) view_move = *m;
        }
    }
    if (sum != units) {
        char rank[80];
        gmm__ck_missing_rank(b, rank, sizeof rank);
        return gmm__ck_refuse(b, GMM_CKPT_MISSING_INDEX, t->name, "the source holds %lld of its %lld elements: a "
                              "rank's part is missing%s", (long long)sum, (long long)units, rank);
    }
    if (view && units) {
        view_move.kind = GMM_CKPT_VIEW;
        view_move.count[0] = units;
        b->moves[first] = view_move;
        b->move_count = first + 1;
    }
    return GMM_OK;
}

/* What stands behind "weight" in a pattern, without the expert: "_scale_inv". */
static size_t gmm__ck_suffix(const char *pattern, const char **suffix) {
    const char *next;
    for (*suffix = strstr(pattern, "weight"); *suffix && (next = strstr(*suffix + 6, "weight")) != NULL;)
        *suffix = next;
    if (*suffix) *suffix += 6;
    return *suffix ? strcspn(*suffix, "{") : 0;
}

static int gmm__ck_same_suffix(const gmm_ckpt_row *a, const gmm_ckpt_row *b) {
    const char *x, *y;
    const size_t n = gmm__ck_suffix(a->pattern, &x);
    return gmm__ck_suffix(b->pattern, &y) == n && x && y && !memcmp(x, y, n);
}

/* The target's row for a kind and half. Where EACH and STACKED are there, `grouped` decides; of several names of
   scales, that of `like`, a row of the source, or else the first. */
static const gmm_ckpt_row *gmm__ck_target_row(const gmm__ck_builder *b, const gmm__ck_array *x, int half, int grouped,
                                              int blocks, const gmm_ckpt_row *like) {
    const gmm_ckpt_scheme *scheme = b->target.scheme;
    const gmm_ckpt_row *found = NULL;
    int best = -1;
    int32_t i;
    for (i = 0; i < scheme->count; i++) {
        const gmm_ckpt_row *r = &scheme->rows[i];
        int score;
        if (r->kind != x->kind || (int)r->half != half || (r->scaling == GMM_SCALING_MX32) != blocks) continue;
        if (r->slot != x->linear->slot && (r->slot != GMM_CKPT_SLOT_ANY || !x->linear->path)) continue;
        score = 2 * ((r->form != GMM_CKPT_EACH) == (grouped != 0)) + (like && gmm__ck_same_suffix(r, like));
        if (score > best) found = r;
        if (score > best) best = score;
    }
    return found;
}

/* Of the source tensors that a target half of one expert needs: 0 = all exist, 1 = none, 2 = some. */
static int gmm__ck_missing_state(const gmm__ck_builder *b, const gmm__ck_array *x, const gmm__ck_transfer *g, int half,
                                 int64_t e) {
    const int64_t part_experts = gmm__ck_part_experts(b, x);
    int64_t found = 0, needed = 0;
    int32_t p;
    int s;
    for (p = 0; p < b->source.part_count; p++) {
        if ((x->grouped && e / part_experts != b->parts[p].rank.ep_rank) || !gmm__ck_part_is_read(b, x, p)) continue;
        for (s = 0; s < 3; s++) {
            const gmm__ck_row_tensors *h = &g->presence[s];
            if (!h->row || (half != GMM_CKPT_BOTH && s != GMM_CKPT_BOTH && s != half)) continue;
            needed++;
            found += h->tensor[p * part_experts + (h->row->form == GMM_CKPT_EACH ? e % part_experts : 0)] >= 0;
        }
    }
    return !found ? 1 : found < needed ? 2 : 0;
}

/* Whether skip_missing omits a target. Scales of it that the source has are then dropped. */
static int gmm__ck_skip_target(gmm__ck_builder *b, const gmm__ck_array *x, const gmm__ck_transfer *g, int half,
                               int64_t e, int64_t end) {
    const int64_t part_experts = gmm__ck_part_experts(b, x), first = e;
    int32_t p;
    int s;
    if (!b->source.skip_missing) return 0;
    for (; e < end; e++)
        if (gmm__ck_missing_state(b, x, g, half, e) != 1) return 0;
    for (e = first; e < end; e++)
        for (p = 0; p < b->source.part_count; p++)
            for (s = 0; s < 3; s++) {
                const gmm__ck_row_tensors *h = &g->weight[s];
                int32_t t;
                if (!h->row || h->row->form != GMM_CKPT_EACH ||
                    (x->grouped && e / part_experts != b->parts[p].rank.ep_rank) ||
                    (half != GMM_CKPT_BOTH && s != GMM_CKPT_BOTH && s != half))
                    continue;
                t = h->tensor[p * part_experts + e % part_experts];
                if (t >= 0) b->uses[p][t] = GMM__CK_DROPPED;
            }
    return 1;
}

/* Describes the rows and columns that the target's rank stores of one half. *stored counts its rows with padding. */
static gmm_status gmm__ck_target_shard(gmm__ck_builder *b, const gmm__ck_array *x, const gmm__ck_transfer *g, int half,
                                       const gmm_ckpt_row *row, gmm__ck_shard *d, int64_t *stored) {
    const gmm_ckpt_rank *rank = &b->target.rank;
    const int cut = g->cut && x->gtp_sharded;
    memset(d, 0, sizeof *d);
    d->f = x->rows_sharded ? x->f / rank->etp_size : x->f;
    d->f0 = x->rows_sharded ? rank->etp_rank * d->f : 0;
    d->k = x->cols_sharded ? x->k / rank->etp_size : x->k;
    d->k0 = x->cols_sharded ? rank->etp_rank * d->k : 0;
    d->half0 = half == GMM_CKPT_UP && !x->single ? 1 : 0;
    d->halves = half == GMM_CKPT_BOTH ? x->halves : 1;
    d->block = d->halves == 2 && g->dst_block ? g->dst_block : d->f;
    d->rows = *stored = d->f * d->halves;
    if (cut) {
        const int64_t row0 = g->cut->row0, rows = g->cut->rows, stored_rows = g->cut->stored_rows;
        if (row0 < 0 || rows < 0 || stored_rows < rows || row0 > d->rows * g->cut_unit ||
            rows > d->rows * g->cut_unit - row0)
            return gmm__ck_refuse(b, GMM_CKPT_ARGUMENT, NULL, "cuts: row0 %lld, rows %lld, stored_rows %lld: must be "
                                  ">= 0, end in the %lld rows there are, and store no fewer than rows",
                                  (long long)row0, (long long)rows, (long long)stored_rows,
                                  (long long)(d->rows * g->cut_unit));
        if (half != GMM_CKPT_BOTH)
            return gmm__ck_refuse(b, GMM_CKPT_NOT_DIVISIBLE, NULL, "cuts: row0 %lld, rows %lld, stored_rows %lld: must "
                                  "be of gate and up in one tensor", (long long)row0, (long long)rows,
                                  (long long)stored_rows);
        d->row0 = row0 / g->cut_unit; /* gmm__ck_check_cut lets boundaries fall between blocks alone */
        d->rows = gmm__ceil_div(rows, g->cut_unit);
        *stored = gmm__ceil_div(stored_rows, g->cut_unit);
    }
    d->row_step = row->transposed ? 1 : d->k;
    d->col_step = row->transposed ? *stored : 1;
    d->expert_step = *stored * d->k;
    return GMM_OK;
}

/* Finds and checks the scales that dequantize a shard of the source. */
static gmm_status gmm__ck_source_scales(gmm__ck_builder *b, const gmm__ck_array *x, const gmm__ck_transfer *g, int half,
                                        int32_t part, int64_t expert, gmm__ck_shard *src) {
    const int64_t part_experts = gmm__ck_part_experts(b, x);
    const gmm__ck_row_tensors *h = &g->scale[half];
    const gmm_scaling scaling = g->format->scaling;
    const gmm_ckpt_tensor *t;
    const int64_t rows = src->expert_step / src->k;
    const int64_t local = h->row && h->row->form == GMM_CKPT_EACH ? expert % part_experts : 0;
    const int32_t index = h->row ? h->tensor[part * part_experts + local] : -1;
    int64_t block_rows, block_cols, scale_rows, scale_cols;
    char dtypes[64];
    gmm_status status;
    if (index < 0)
        return gmm__ck_refuse(b, GMM_CKPT_SCALE_MISSING,
                              b->parts[part].table->tensors[src->tensor].name, "its scales are missing");
    if (part_experts > 1 &&
        (h->row->form == GMM_CKPT_EACH) != (g->weight[half].row->form == GMM_CKPT_EACH))
        return gmm__ck_refuse(b, GMM_CKPT_SHAPE, b->parts[part].table->tensors[index].name, "scales of %s "
                              "cannot dequantize weights of %s: keep them quantized, or give both "
                              "alike", h->row->form == GMM_CKPT_EACH ? "one expert" : "all experts",
                              h->row->form == GMM_CKPT_EACH ? "all experts" : "one expert");
    t = &b->parts[part].table->tensors[src->tensor];
    gmm__ck_block_of(scaling, &block_rows, &block_cols);
    if ((block_rows ? rows % block_rows : 1) && src->experts > 1 && t->rank == 2) /* a block would span two experts */
        return gmm__ck_refuse(b, GMM_CKPT_SHAPE, t->name, "%lld experts of %lld rows one below another cannot be "
                              "dequantized in blocks of %s: give it an extent of experts", (long long)src->experts,
                              (long long)rows, gmm_scaling_name(scaling));
    t = &b->parts[part].table->tensors[index];
    gmm__ck_scale_extents(scaling, rows, src->k, &scale_rows, &scale_cols);
    status = gmm__ck_check_shape(b, h->row, t, part_experts, &scale_rows, scale_cols, g->scale_dims);
    if (status) return status;
    if (!(g->format->scales >> t->dtype & 1))
        return gmm__ck_refuse(b, GMM_CKPT_DTYPE, t->name, "scales of %s must be %s, not %s", gmm_scaling_name(scaling),
                              gmm__ck_dtype_names(g->format->scales, dtypes, sizeof dtypes), gmm_dtype_name(t->dtype));
    src->scale = index;
    src->scaling = scaling;
    return GMM_OK;
}

/* Adds the target tensor whose first expert is that of the shard. */
static gmm_status gmm__ck_add_half_target(gmm__ck_builder *b, const gmm__ck_array *x, const gmm__ck_transfer *g,
                                          const gmm_ckpt_row *row, int64_t expert_index, gmm_ckpt_tensor *t,
                                          gmm__ck_shard *d) {
    const char *state = b->target.state_count ? b->target.states[g->state] : b->states[g->state];
    const int64_t part_experts = gmm__ck_part_experts(b, x);
    gmm_status status;
    int64_t i;
    int half;
    t->name = gmm__ck_target_name(b, row, state, x->linear, expert_index, g->key);
    if (!t->name) return gmm__ck_no_memory(b);
    t->dtype = g->dtype;
    if (t->dtype == GMM_NONE) { /* that of the first source tensor */
        for (half = 0; half < 3 && !g->weight[half].row; half++) {}
        for (i = 0; t->dtype == GMM_NONE && i < b->source.part_count * part_experts; i++)
            if (g->weight[half].tensor[i] >= 0)
                t->dtype = b->parts[i / part_experts].table->tensors[g->weight[half].tensor[i]].dtype;
    }
    if (!gmm__ck_tensor_bytes(t, &t->bytes))
        return gmm__ck_refuse(b, GMM_CKPT_OVERFLOW, t->name, "its bytes do not fit 63 bits");
    status = gmm__ck_add_target(b, t, &d->tensor);
    d->dtype = t->dtype;
    return status;
}

/* The half of the source that has the one value of a target's half: the same; else BOTH for GATE and UP, and GATE for
   BOTH. */
static int gmm__ck_single_half(const gmm__ck_transfer *g, int half) {
    return g->weight[half].row ? half : half == GMM_CKPT_BOTH ? GMM_CKPT_GATE : GMM_CKPT_BOTH;
}

/* Adds the moves of one expert from every part of the source into the shard of a target, which holds `target_half`. */
static gmm_status gmm__ck_move_expert(gmm__ck_builder *b, const gmm__ck_array *x, const gmm__ck_transfer *g,
                                      int target_half, const gmm__ck_shard *d, int64_t expert) {
    const int64_t part_experts = gmm__ck_part_experts(b, x);
    int32_t p;
    int half;
    for (p = 0; p < b->source.part_count; p++) {
        if (x->grouped && expert / part_experts != b->parts[p].rank.ep_rank) continue;
        if (!gmm__ck_part_is_read(b, x, p)) continue;
        for (half = 0; half < 3; half++) {
            gmm_ckpt_move_kind kind = GMM_CKPT_COPY;
            gmm__ck_shard src;
            gmm_status status;
            if (!g->weight[half].row || (x->single && half != gmm__ck_single_half(g, target_half))) continue;
            status = gmm__ck_source_shard(b, x, g, half, p, expert, &src);
            if (status) return status;
            if (g->scale && g->format->codes >> src.dtype & 1) {
                status = gmm__ck_source_scales(b, x, g, half, p, expert, &src);
                if (status) return status;
                kind = GMM_CKPT_DEQUANT;
            } else if (src.dtype != d->dtype) {
                const int floats = (GMM__FLOATS >> src.dtype & 1) && (GMM__FLOATS >> d->dtype & 1);
                if (!floats || g->dtype == GMM_NONE)
                    return gmm__ck_refuse(b, GMM_CKPT_DTYPE, b->parts[p].table->tensors[src.tensor].name,
                                          "%s cannot become %s%s", gmm_dtype_name(src.dtype), gmm_dtype_name(d->dtype),
                                          floats ? " unless a dtype is asked for" : "");
                kind = GMM_CKPT_CONVERT;
            }
            status = gmm__ck_move_overlap(b, &src, d, kind, expert);
            if (status) return status;
        }
    }
    return GMM_OK;
}

/* Adds the move that writes zeros into the padding rows of one expert. */
static gmm_status gmm__ck_zero_padding(gmm__ck_builder *b, const gmm__ck_shard *d, int64_t expert, int64_t stored) {
    gmm_ckpt_move m = GMM_ZERO;
    if (stored <= d->rows) return GMM_OK;
    m.kind = GMM_CKPT_ZERO;
    m.src = m.scale = -1;
    m.dst = d->tensor;
    m.dst_at = (expert - d->expert0) * d->expert_step + d->rows * d->row_step;
    gmm__ck_add_loop(&m, stored - d->rows, 0, d->row_step);
    gmm__ck_add_loop(&m, d->k, 0, d->col_step);
    return gmm__ck_add_move(b, &m);
}

/* Plans all target tensors of one half. */
static gmm_status gmm__ck_plan_half(gmm__ck_builder *b, const gmm__ck_array *x, const gmm__ck_transfer *g, int half,
                                    const gmm_ckpt_row *row) {
    const gmm_ckpt_rank *rank = &b->target.rank;
    const int64_t rank_experts = x->grouped ? x->experts / rank->ep_size : 1;
    const int64_t expert0 = x->grouped ? rank->ep_rank * rank_experts : 0;
    const int stacked = row->form != GMM_CKPT_EACH;
    int64_t e, i, first = b->move_count, group = first, merged = 0, stored = 0, shape[2][GMM_CKPT_RANK], columns;
    int32_t ranks[2];
    gmm__ck_shard d;
    gmm_status status = gmm__ck_target_shard(b, x, g, half, row, &d, &stored);
    if (status) return status;
    columns = d.k * g->column_codes;
    (void)gmm__ck_row_shapes(row, stacked ? rank_experts : 1, stored, columns, x->dims, shape, ranks);
    if (stacked && gmm__ck_skip_target(b, x, g, half, expert0, expert0 + rank_experts)) return GMM_OK;
    for (e = expert0; e < expert0 + rank_experts; e++) {
        int64_t before;
        if (!stacked && gmm__ck_skip_target(b, x, g, half, e, e + 1)) continue;
        if (!stacked || e == expert0) {
            gmm_ckpt_tensor t = GMM_ZERO;
            t.rank = ranks[0];
            memcpy(t.shape, shape[0], sizeof t.shape);
            d.expert0 = e;
            status = gmm__ck_add_half_target(b, x, g, row, b->target.scheme->global_index ? e : e - expert0, &t, &d);
            if (status) return status;
            first = group = b->move_count;
            merged = 0;
        }
        before = b->move_count;
        status = gmm__ck_move_expert(b, x, g, half, &d, e);
        if (!status) status = gmm__ck_zero_padding(b, &d, e, stored);
        if (status) return status;
        if (merged && gmm__ck_merge_expert_moves(b, group, before, merged)) {
            merged++;
        } else {
            group = before;
            merged = 1;
        }
        if (!stacked || e == expert0 + rank_experts - 1) {
            for (i = first; i < b->move_count; i++) gmm__ck_simplify_loops(&b->moves[i]);
            status = gmm__ck_finish_target(b, d.tensor, first);
            if (status) return status;
        }
    }
    return GMM_OK;
}

/* Plans all target tensors of an array. */
static gmm_status gmm__ck_plan_array(gmm__ck_builder *b, const gmm__ck_array *x, const gmm__ck_transfer *g) {
    static const char *const kinds[] = {"weight", "bias", "scales", "tensor scale", "amax"};
    const gmm_ckpt_row *rows[3];
    gmm_status status;
    int half;
    for (half = 0; half < 3; half++) {
        int like = gmm__ck_single_half(g, half);
        if (!g->weight[like].row) like = g->weight[GMM_CKPT_BOTH].row ? GMM_CKPT_BOTH : GMM_CKPT_GATE;
        rows[half] = gmm__ck_target_row(b, x, half, g->grouped, g->blocks, g->weight[like].row);
    }
    if (rows[GMM_CKPT_BOTH]) return gmm__ck_plan_half(b, x, g, GMM_CKPT_BOTH, rows[GMM_CKPT_BOTH]);
    if (!rows[GMM_CKPT_GATE] || !rows[GMM_CKPT_UP] || !x->linear->gated) {
        char slot[48];
        (void)snprintf(slot, sizeof slot, "slot %d of layer %lld", (int)x->linear->slot, (long long)x->linear->layer);
        return gmm__ck_refuse(b, GMM_CKPT_EXTRA_KEY, x->linear->path ? x->linear->path : slot, "the scheme %s has no "
                              "name for its %s", b->target.scheme->name, kinds[x->kind]);
    }
    status = gmm__ck_plan_half(b, x, g, GMM_CKPT_GATE, rows[GMM_CKPT_GATE]);
    return status ? status : gmm__ck_plan_half(b, x, g, GMM_CKPT_UP, rows[GMM_CKPT_UP]);
}
/* .............................................................................................. 15.7 Building ... */
/* Checks that the linears of a layer agree, and reports the tensors that the source lacks. */

static int gmm__ck_find_row(const gmm_ckpt_scheme *scheme, const gmm_ckpt_linear *l, gmm_ckpt_kind kind,
                            const gmm_ckpt_row **row) {
    int32_t i;
    for (i = 0; i < scheme->count; i++) {
        const gmm_ckpt_row *r = &scheme->rows[i];
        if (r->kind != kind || (r->slot != l->slot && (r->slot != GMM_CKPT_SLOT_ANY || !l->path))) continue;
        *row = r;
        return 1;
    }
    return 0;
}

static const char *gmm__ck_slot_name(gmm_ckpt_slot slot) {
    static const char *const names[] = {
#define GMM__X(name, value, text, grouped, rows, cols) #text,
        GMM_CKPT_SLOT_LIST(GMM__X)
#undef GMM__X
    };
    return slot >= 0 && slot < GMM_CKPT_SLOT_COUNT ? names[slot] : "?";
}

static int64_t gmm__ck_find_slot(const gmm__ck_builder *b, gmm_ckpt_slot slot, int64_t layer) {
    int64_t slot_index = 0;
    return b->slot_count ? gmm__ck_find_linear(b, NULL, 0, slot, layer, &slot_index) : -1;
}

/* Name of the first tensor that the source has of a linear, or NULL. */
static const char *gmm__ck_first_key(const gmm__ck_builder *b, int64_t linear) {
    int64_t i;
    for (i = 0; i < b->match_count && b->matches[i].linear != linear; i++) {}
    return i < b->match_count ? b->parts[b->matches[i].part].table->tensors[b->matches[i].tensor].name : NULL;
}

/* Checks one linear against the second of its pair: fc1 or shared_fc1 against fc2 or shared_fc2. */
static gmm_status gmm__ck_check_pair(gmm__ck_builder *b, int64_t first, int64_t second) {
    const gmm_ckpt_linear *l = &b->linears[first], *m = &b->linears[second];
    const char *a = gmm__ck_slot_name(l->slot), *c = gmm__ck_slot_name(m->slot);
    const char *key = gmm__ck_first_key(b, second);
    if (l->experts != m->experts)
        return gmm__ck_refuse(b, GMM_CKPT_SHAPE, key, "layer %lld: %s has %lld experts, %s %lld",
                              (long long)l->layer, c, (long long)m->experts, a, (long long)l->experts);
    if (!l->in || !m->in) return GMM_OK; /* vectors */
    if (l->in != m->out)
        return gmm__ck_refuse(b, GMM_CKPT_SHAPE, key, "layer %lld: %s gives %lld features, %s takes %lld",
                              (long long)l->layer, c, (long long)m->out, a, (long long)l->in);
    if (l->out / (l->gated ? 2 : 1) != m->in)
        return gmm__ck_refuse(b, GMM_CKPT_SHAPE, key, "layer %lld: %s takes %lld features, %s%s gives %lld",
                              (long long)l->layer, c, (long long)m->in, l->gated ? "gated " : "", a,
                              (long long)l->out);
    return GMM_OK;
}

/* Checks that the linears of each layer agree in experts and features. */
static gmm_status gmm__ck_check_layers(gmm__ck_builder *b) {
    int64_t i;
    for (i = 0; i < b->linear_count; i++) {
        const gmm_ckpt_linear *l = &b->linears[i];
        gmm_status status = GMM_OK;
        int64_t second;
        if (l->path || !l->out) continue;
        if (l->slot == GMM_CKPT_FC1 || l->slot == GMM_CKPT_SHARED_FC1) {
            second = gmm__ck_find_slot(b, l->slot == GMM_CKPT_FC1 ? GMM_CKPT_FC2 : GMM_CKPT_SHARED_FC2, l->layer);
            if (second >= 0 && b->linears[second].out) status = gmm__ck_check_pair(b, i, second);
        }
        if (status) return status;
        if (l->slot != GMM_CKPT_ROUTER && l->slot != GMM_CKPT_ROUTER_CORRECTION) continue;
        second = gmm__ck_find_slot(b, GMM_CKPT_FC1, l->layer);
        if (second < 0 || !b->linears[second].out) second = gmm__ck_find_slot(b, GMM_CKPT_FC2, l->layer);
        if (second < 0 || !b->linears[second].out || l->out - l->spare == b->linears[second].experts) continue;
        return gmm__ck_refuse(b, GMM_CKPT_SHAPE, gmm__ck_first_key(b, i), "layer %lld: %s has %lld rows%s, %s %lld "
                              "experts%s", (long long)l->layer, gmm__ck_slot_name(l->slot), (long long)l->out,
                              l->spare ? ", some of them spare" : "", gmm__ck_slot_name(b->linears[second].slot),
                              (long long)b->linears[second].experts,
                              l->out > b->linears[second].experts ? ": state their number if the other rows are spare"
                                                                 : "");
    }
    return GMM_OK;
}

/* Records that the source lacks experts [first, last] of a row; row -1: layers. */
static gmm_status gmm__ck_add_missing(gmm__ck_builder *b, int64_t linear, int32_t row, int32_t state, int32_t part,
                                      int64_t first, int64_t last) {
    const gmm_ckpt_linear *l = row < 0 ? NULL : &b->linears[linear];
    void *array = b->missing_ranges;
    gmm__ck_missing_range m;
    memset(&m, 0, sizeof m);
    m.linear = (int32_t)linear;
    m.layer = l && !l->path ? l->layer : linear;
    m.row = row;
    m.state = state;
    m.part = part;
    m.first = first;
    m.last = last;
    if (!gmm__ck_reserve(&b->arena, &array, b->missing_range_count, &b->missing_range_capacity,
                         sizeof *b->missing_ranges))
        return gmm__ck_no_memory(b);
    b->missing_ranges = (gmm__ck_missing_range *)array;
    b->missing_ranges[b->missing_range_count++] = m;
    b->missing += last - first + 1;
    return GMM_OK;
}

/* Records the tensors of one row that parts lack, given its matches. */
static gmm_status gmm__ck_find_missing_tensors(gmm__ck_builder *b, const gmm__ck_array *x, int64_t linear, int32_t row,
                                               int32_t state, const gmm__ck_match *matches, int64_t count) {
    const int several = b->source.scheme->rows[row].form == GMM_CKPT_EACH && x->grouped;
    const int64_t part_experts = several ? gmm__ck_part_experts(b, x) : 1;
    int64_t match = 0;
    int32_t p;
    for (p = 0; p < b->source.part_count; p++) {
        const int64_t base = several && b->source.scheme->global_index ? b->parts[p].rank.ep_rank * part_experts : 0;
        int64_t next = base;
        const int reads = gmm__ck_part_is_read(b, x, p);
        gmm_status status = GMM_OK;
        for (; match < count && matches[match].part == p; match++) {
            const int64_t e = several ? matches[match].expert : 0;
            if (reads && !status && e > next && next < base + part_experts)
                status = gmm__ck_add_missing(b, linear, row, state, p, next, gmm__min_i64(e, base + part_experts) - 1);
            if (e >= next) next = e + 1;
        }
        if (reads && !status && next < base + part_experts)
            status = gmm__ck_add_missing(b, linear, row, state, p, next, base + part_experts - 1);
        if (status) return status;
    }
    return GMM_OK;
}

/* The row that is assumed for a linear without any key: its form and scaling follow those of other weights. */
static const gmm_ckpt_row *gmm__ck_default_row(const gmm__ck_builder *b, const gmm_ckpt_linear *l, gmm_ckpt_kind kind) {
    const gmm_ckpt_scheme *scheme = b->source.scheme;
    const gmm_ckpt_row *similar = NULL, *best = NULL;
    int best_score = -1;
    int64_t i;
    int32_t r;
    for (i = 0; i < b->match_count && !similar; i++) {
        const gmm_ckpt_row *row = &scheme->rows[b->matches[i].row];
        if (row->kind == GMM_CKPT_WEIGHT && (row->slot <= GMM_CKPT_FC2 || row->slot == GMM_CKPT_SLOT_ANY))
            similar = row;
    }
    for (r = 0; r < scheme->count; r++) {
        const gmm_ckpt_row *row = &scheme->rows[r];
        int score;
        if (row->kind != kind || (row->slot != l->slot && (row->slot != GMM_CKPT_SLOT_ANY || !l->path))) continue;
        score = !similar ? 0 : 2 * ((row->form == GMM_CKPT_EACH) == (similar->form == GMM_CKPT_EACH)) +
                           (row->scaling == similar->scaling);
        if (score > best_score) best = row;
        if (score > best_score) best_score = score;
    }
    return best;
}

/* Records what the source lacks of one linear in one state. Where several rows match one half, nothing is recorded:
   gmm__ck_group_matches reports it. */
static gmm_status gmm__ck_find_missing_rows(gmm__ck_builder *b, int64_t index, int32_t state,
                                            const gmm__ck_match *matches, int64_t count) {
    const gmm_ckpt_scheme *scheme = b->source.scheme;
    const gmm_ckpt_linear *l = &b->linears[index];
    int kind, half;
    for (kind = GMM_CKPT_WEIGHT; kind <= (l->bias ? GMM_CKPT_BIAS : GMM_CKPT_WEIGHT); kind++) {
        const gmm__ck_array x = gmm__ck_make_array(l, (gmm_ckpt_kind)kind);
        int64_t begin[3] = {0, 0, 0}, end[3] = {0, 0, 0}, i;
        int32_t rows[3] = {-1, -1, -1}, r;
        const gmm_ckpt_row *like = NULL;
        int doubtful = x.grouped && x.experts % b->parts[0].rank.ep_size;
        for (i = 0; i < count; i++) {
            const gmm_ckpt_row *row = &scheme->rows[matches[i].row];
            if ((int)matches[i].kind != kind) continue;
            doubtful |= rows[row->half] >= 0 && rows[row->half] != matches[i].row;
            if (rows[row->half] < 0) begin[row->half] = i;
            rows[row->half] = matches[i].row;
            end[row->half] = i + 1;
            if (!like) like = row;
        }
        if (doubtful || (rows[GMM_CKPT_BOTH] >= 0 && (rows[GMM_CKPT_GATE] >= 0 || rows[GMM_CKPT_UP] >= 0))) continue;
        if (!like) like = gmm__ck_default_row(b, l, (gmm_ckpt_kind)kind);
        for (r = 0; like && rows[GMM_CKPT_BOTH] < 0 && r < scheme->count; r++) { /* the other half, or all */
            const gmm_ckpt_row *row = &scheme->rows[r];
            if ((int)row->kind != kind || (row->slot != l->slot && (row->slot != GMM_CKPT_SLOT_ANY || !l->path)))
                continue;
            if (row->form == like->form && row->scaling == like->scaling && rows[row->half] < 0 &&
                (row->half == GMM_CKPT_BOTH) == (like->half == GMM_CKPT_BOTH))
                rows[row->half] = r;
        }
        for (half = 0; half < 3; half++) {
            gmm_status status = GMM_OK;
            if (rows[half] >= 0)
                status = gmm__ck_find_missing_tensors(b, &x, index, rows[half], state,
                                                      matches ? matches + begin[half] : NULL,
                                              end[half] - begin[half]);
            if (status) return status;
        }
    }
    return GMM_OK;
}

/* Orders missing ranges so that those of one row, state and part are neighbours. */
static int gmm__ck_compare_missing(const void *a, const void *b) {
    const gmm__ck_missing_range *x = (const gmm__ck_missing_range *)a, *y = (const gmm__ck_missing_range *)b;
    if (x->state != y->state) return x->state < y->state ? -1 : 1;
    if (x->row != y->row) return x->row < y->row ? -1 : 1;
    if (x->part != y->part) return x->part < y->part ? -1 : 1;
    if (x->layer != y->layer) return x->layer < y->layer ? -1 : 1;
    return x->first < y->first ? -1 : x->first > y->first;
}

/* Appends a range of numbers to a text that starts with "{", as in "{3,5-7}". */
static void gmm__ck_add_numbers(char *text, size_t capacity, int64_t first, int64_t last) {
    const size_t n = strlen(text);
    if (n + 48 > capacity) {
        if (text[n - 1] != '.') memcpy(text + n, ",...", 5);
        return;
    }
    (void)snprintf(text + n, capacity - n, first == last ? "%s%lld" : "%s%lld-%lld", n > 1 ? "," : "", (long long)first,
                   (long long)last);
}

static const char *gmm__ck_end_numbers(char *text) {
    const size_t n = strlen(text);
    if (!strpbrk(text, ",-")) return text + 1;
    memcpy(text + n, "}", 2);
    return text;
}

enum { GMM__CK_SET_CHARS = 120 };

/* Names the missing ranges from *position on that differ in layer only by one pattern with number sets. *position moves
   past them. */
static char *gmm__ck_missing_set_name(gmm__ck_builder *b, const gmm_ckpt_row *layer_row, int64_t *position,
                                      int64_t *tensors) {
    const gmm__ck_missing_range *m = &b->missing_ranges[*position], *next = m,
        *end = b->missing_ranges + b->missing_range_count;
    const gmm_ckpt_row *row = m->row < 0 ? layer_row : &b->source.scheme->rows[m->row];
    const gmm_ckpt_rank *rank = &b->parts[m->part].rank, *size = &b->parts[0].rank;
    const gmm_ckpt_linear *l = m->row < 0 ? NULL : &b->linears[m->linear];
    char layers[GMM__CK_SET_CHARS] = "{", experts[GMM__CK_SET_CHARS] = "{", *name, *text;
    int64_t n = 0, i, from_layer = m->layer, to_layer = m->layer;
    *tensors = 0;
    for (; m + n < end && m[n].layer == m->layer && m[n].row == m->row && m[n].state == m->state &&
         m[n].part == m->part; n++)
        gmm__ck_add_numbers(experts, sizeof experts, m[n].first, m[n].last);
    for (;;) {
        for (i = 0; i < n; i++) *tensors += next[i].last - next[i].first + 1;
        next += n;
        for (i = 0; i < n && next + i < end && next[i].first == m[i].first && next[i].last == m[i].last &&
             next[i].layer == next->layer && next[i].row == m->row && next[i].state == m->state &&
             next[i].part == m->part; i++) {}
        if (i < n || (l && l->path) || (next + n < end && next[n].layer == next->layer && next[n].row == m->row &&
                                        next[n].state == m->state && next[n].part == m->part))
            break;
        if (next->layer != to_layer + 1) {
            gmm__ck_add_numbers(layers, sizeof layers, from_layer, to_layer);
            from_layer = next->layer;
        }
        to_layer = next->layer;
    }
    gmm__ck_add_numbers(layers, sizeof layers, from_layer, to_layer);
    *position = next - b->missing_ranges;
    name = gmm__ck_missing_name(b, row, m->state, l, gmm__ck_end_numbers(layers), gmm__ck_end_numbers(experts));
    if (!name || b->source.part_count == 1) return name;
    text = (char *)gmm__ck_alloc(&b->arena, (int64_t)strlen(name) + 64, 1);
    if (!text) return NULL;
    n = snprintf(text, strlen(name) + 64, "%s", name);
    if (size->ep_size > 1) n += snprintf(text + n, 20, " of EP %d", (int)rank->ep_rank);
    if (size->etp_size > 1) n += snprintf(text + n, 20, " of ETP %d", (int)rank->etp_rank);
    if (size->gtp_size > 1) (void)snprintf(text + n, 20, " of GTP %d", (int)rank->gtp_rank);
    return text;
}

/* Fails with the list of missing tensors, unless skip_missing allows them. */
static gmm_status gmm__ck_refuse_incomplete(gmm__ck_builder *b, const gmm_ckpt_row *layer_row) {
    char text[340] = "", hint[100] = "", layer[24], expert[24], *name;
    int64_t position = 0, listed = 0, tensors = 0;
    const gmm__ck_missing_range *m = b->missing_ranges;
    size_t n = 0;
    if (b->report) b->report->missing = b->missing;
    if (!b->missing_range_count || b->source.skip_missing) return GMM_OK;
    if (!b->report) return GMM_E_KEY;
    qsort(b->missing_ranges, (size_t)b->missing_range_count, sizeof *b->missing_ranges, gmm__ck_compare_missing);
    while (position < b->missing_range_count) {
        name = gmm__ck_missing_set_name(b, layer_row, &position, &tensors);
        if (!name) return gmm__ck_no_memory(b);
        if (n && n + strlen(name) > sizeof text - 60) break;
        gmm__ck_truncate(text + n, sizeof text - 60 - n, n ? ", " : "");
        n += strlen(text + n);
        gmm__ck_truncate(text + n, sizeof text - 56 - n, name);
        n += strlen(text + n);
        listed += tensors;
    }
    if (listed < b->missing)
        (void)snprintf(text + n, sizeof text - n, ", and %lld more", (long long)(b->missing - listed));
    (void)snprintf(layer, sizeof layer, "%lld", (long long)m->layer);
    (void)snprintf(expert, sizeof expert, "%lld", (long long)m->first);
    name = gmm__ck_missing_name(b, m->row < 0 ? layer_row : &b->source.scheme->rows[m->row], m->state,
                               m->row < 0 ? NULL : &b->linears[m->linear], layer, expert);
    if (!name) return gmm__ck_no_memory(b);
    b->report->reason = GMM_CKPT_MISSING_INDEX;
    gmm__ck_truncate(b->report->key, sizeof b->report->key, name);
    if (b->extra_router_rows)
        (void)snprintf(hint, sizeof hint, " (layer %lld routes to %lld: if some rows are spare, state the experts)",
                       (long long)b->extra_router_layer, (long long)b->extra_router_rows);
    return gmm__fail(&b->report->error, GMM_E_KEY, "%s: the source lacks %s%s", b->fn, text, hint);
}

/* Records what the source lacks of all linears. */
static gmm_status gmm__ck_find_missing(gmm__ck_builder *b) {
    int64_t match = 0, i;
    int32_t s;
    for (i = 0; i < b->linear_count; i++)
        for (s = 0; s < b->source.state_count; s++) {
            const int64_t begin = match;
            gmm_status status;
            while (match < b->match_count && b->matches[match].linear == i && b->matches[match].state == s) match++;
            if (!b->state_present[s] && s > 0) continue;
            status = gmm__ck_find_missing_rows(b, i, s, b->matches ? b->matches + begin : NULL, match - begin);
            if (status) return status;
        }
    return GMM_OK;
}

/* Checks the extents of one linear and plans it in one state. */

static gmm_status gmm__ck_check_multiple(gmm__ck_builder *b, const gmm_ckpt_linear *l, int64_t extent, int64_t by,
                                         const char *what, const char *unit) {
    if (by > 0 && extent % by == 0) return GMM_OK;
    return gmm__ck_refuse(b, GMM_CKPT_NOT_DIVISIBLE, l->path, "slot %d of layer %lld: %s %lld is no multiple of %s "
                          "%lld", (int)l->slot, (long long)l->layer, what, (long long)extent, unit, (long long)by);
}

/* Determines the block sizes of gate and up rows of a gated FC1 in source and target. */
static gmm_status gmm__ck_glu_blocks(gmm__ck_builder *b, const gmm_ckpt_linear *l, const gmm__ck_row_tensors *weight,
                                     int64_t *src_block, int64_t *dst_block) {
    const gmm_ckpt_source *s = &b->source;
    const gmm_ckpt_target *t = &b->target;
    gmm_ckpt_glu known = s->stated.known ? s->stated : s->recorded;
    const char *key = l->path;
    const gmm_ckpt_linear *x = l;
    gmm__ck_array probe;
    *src_block = 0;
    *dst_block = t->scheme->glu_known ? t->scheme->glu_block : t->glu_block;
    if (l->slot != GMM_CKPT_FC1) *dst_block = 0;
    if (l->slot != GMM_CKPT_FC1 || !l->gated) return GMM_OK;
    if (s->stated.known && s->recorded.known && s->stated.block != s->recorded.block)
        return gmm__ck_refuse(b, GMM_CKPT_GLU_CONFLICT, key, "gate and up rows: blocks of %d are stated, blocks of %d "
                              "recorded (0 = halves)", (int)s->stated.block, (int)s->recorded.block);
    if (t->scheme->glu_known && t->glu_block && t->glu_block != t->scheme->glu_block)
        return gmm__ck_refuse(b, GMM_CKPT_GLU_CONFLICT, key, "gate and up rows: blocks of %d are wanted, the scheme %s "
                              "has %d (0 = halves)", (int)t->glu_block, t->scheme->name, (int)t->scheme->glu_block);
    if (!weight[GMM_CKPT_BOTH].row) return GMM_OK; /* gate and up are separate tensors */
    if (s->scheme->glu_known) {
        if (known.known && known.block != s->scheme->glu_block)
            return gmm__ck_refuse(b, GMM_CKPT_GLU_CONFLICT, key, "gate and up rows: blocks of %d are stated or "
                                  "recorded, the scheme %s has %d (0 = halves)", known.block, s->scheme->name,
                                  (int)s->scheme->glu_block);
        known.known = 1;
        known.block = s->scheme->glu_block;
    }
    if (known.block < 0)
        return gmm__ck_refuse(b, GMM_CKPT_NOT_DIVISIBLE, key, "gate and up rows: blocks of %d", known.block);
    memset(&probe, 0, sizeof probe);
    probe.linear = x;
    if (!known.known && (*dst_block || b->parts[0].rank.etp_size > 1 || t->rank.etp_size > 1 ||
                         !gmm__ck_target_row(b, &probe, GMM_CKPT_BOTH, 0, 0, NULL)))
        return gmm__ck_refuse(b, GMM_CKPT_GLU_UNKNOWN, key, "gate and up rows of layer %lld would move, but nothing "
                              "says whether the source has them as halves or in blocks: state it",
                              (long long)l->layer);
    *src_block = known.block;
    return GMM_OK;
}

/* The elements of a row of an array's matrices in one part. */
static int64_t gmm__ck_part_cols(const gmm__ck_builder *b, const gmm__ck_array *x) {
    return x->cols_sharded ? x->k / b->parts[0].rank.etp_size : x->k;
}

/* Whether a weight's tensor holds codes: FP8, or two 4-bit codes per byte. */
static int gmm__ck_holds_codes(const gmm_ckpt_row *row, const gmm_ckpt_tensor *t, int64_t cols) {
    if (GMM__CK_CODES_8 >> t->dtype & 1 || t->dtype == GMM_E2M1 || row->scaling == GMM_SCALING_MX32) return 1;
    return t->dtype == GMM_U8 && t->rank > 1 && t->shape[t->rank - 1] == cols / 2 && cols % 2 == 0;
}

/* Marks scales whose weights are not quantized: they are extra. */
static void gmm__ck_mark_plain_scales(gmm__ck_builder *b, const gmm__ck_array *x, const gmm__ck_row_tensors *weight,
                                      const gmm__ck_row_tensors *scale) {
    const int64_t part_experts = gmm__ck_part_experts(b, x), cols = gmm__ck_part_cols(b, x);
    int64_t i, e;
    int h;
    for (h = 0; h < 3; h++)
        for (i = 0; weight[h].row && scale[h].row && i < b->source.part_count * part_experts; i++) {
            const int64_t part = i / part_experts, first = scale[h].row->form == GMM_CKPT_EACH ? i % part_experts : 0;
            const int64_t end = scale[h].row->form == GMM_CKPT_EACH ? first + 1 : part_experts;
            int plain = 0, quantized = 0;
            for (e = first; e < end; e++) {
                const int32_t t =
                    weight[h].tensor[part * part_experts + (weight[h].row->form == GMM_CKPT_EACH ? e : 0)];
                plain |= t >= 0;
                quantized |= t >= 0 && gmm__ck_holds_codes(weight[h].row, &b->parts[part].table->tensors[t], cols);
            }
            if (plain && !quantized && scale[h].tensor[i] >= 0)
                b->uses[part][scale[h].tensor[i]] = GMM__CK_PLAIN_SCALE;
        }
}

/* Marks all scales of one kind, which the weight's format does not have: they are extra. */
static void gmm__ck_mark_foreign_scales(gmm__ck_builder *b, const gmm__ck_array *x, const gmm__ck_row_tensors *scale) {
    const int64_t part_experts = gmm__ck_part_experts(b, x);
    int64_t i;
    int h;
    for (h = 0; h < 3; h++)
        for (i = 0; scale[h].row && i < b->source.part_count * part_experts; i++)
            if (scale[h].tensor[i] >= 0) b->uses[i / part_experts][scale[h].tensor[i]] = GMM__CK_PLAIN_SCALE;
}

/* Checks that all keys of a linear in one state have the same wrapper segments, unless names lose them. */
static gmm_status gmm__ck_check_wrappers(gmm__ck_builder *b, const gmm__ck_match *matches, int64_t count) {
    int64_t i;
    for (i = 0; i < count && !b->target.drop_wrappers; i++)
        if (!gmm__ck_same_wrappers(&b->source, gmm__ck_match_key(b, &matches[i]), gmm__ck_match_key(b, &matches[0])))
            return gmm__ck_refuse(b, GMM_CKPT_AMBIGUOUS,
                                  b->parts[matches[i].part].table->tensors[matches[i].tensor].name,
                                  "its wrapper segments are not those of \"%.100s\"%s",
                                  gmm__ck_match_key(b, &matches[0]),
                                  gmm__ck_is_map(b) ? "" : ": target.drop_wrappers leaves them out");
    return GMM_OK;
}

/* Checks that gate and up tensors are both there, and belong to a gated linear. */
static gmm_status gmm__ck_check_halves(gmm__ck_builder *b, const gmm__ck_array *x, const gmm__ck_row_tensors *weight) {
    if (!weight[GMM_CKPT_GATE].row != !weight[GMM_CKPT_UP].row) {
        const int half = weight[GMM_CKPT_GATE].row ? GMM_CKPT_GATE : GMM_CKPT_UP;
        const gmm_ckpt_tensor *t;
        int64_t i;
        for (i = 0; weight[half].tensor[i] < 0; i++) {}
        t = &b->parts[i / gmm__ck_part_experts(b, x)].table->tensors[weight[half].tensor[i]];
        return gmm__ck_refuse(b, GMM_CKPT_MISSING_INDEX, t->name, "the source lacks the other of gate and up");
    }
    if (weight[GMM_CKPT_GATE].row && !x->linear->gated)
        return gmm__ck_refuse(b, GMM_CKPT_ARGUMENT, x->linear->path,
                              "linears: gated is 0, but the source has gate and up");
    return GMM_OK;
}

/* The ETP size of the source's or the target's ranks; 1 where ETP does not shard the array. */
static int64_t gmm__ck_etp_size(const gmm__ck_array *x, const gmm_ckpt_rank *rank) {
    return x->rows_sharded || x->cols_sharded ? rank->etp_size : 1;
}

/* Checks that EP, ETP and the blocks of gate and up rows divide a weight on both sides. */
static gmm_status gmm__ck_check_extents(gmm__ck_builder *b, const gmm__ck_array *x, const gmm__ck_transfer *g) {
    const gmm_ckpt_linear *l = x->linear;
    const gmm_ckpt_rank *ranks[2];
    const int64_t blocks[2] = {g->src_block, x->halves == 2 ? g->dst_block : 0};
    gmm_status status = GMM_OK;
    int i;
    ranks[0] = &b->parts[0].rank;
    ranks[1] = &b->target.rank;
    for (i = 0; !status && x->grouped && i < 2; i++)
        status = gmm__ck_check_multiple(b, l, x->experts, ranks[i]->ep_size, "experts", "EP");
    for (i = 0; !status && i < 2; i++)
        status = gmm__ck_check_multiple(b, l, x->rows_sharded ? x->f : x->k, gmm__ck_etp_size(x, ranks[i]),
                                        "the cut extent", "ETP");
    for (i = 0; !status && i < 2; i++)
        if (blocks[i])
            status = gmm__ck_check_multiple(b, l, x->f / (x->rows_sharded ? gmm__ck_etp_size(x, ranks[i]) : 1),
                                            blocks[i], "a rank's gate rows",
                                            i ? "the target's block" : "the source's block");
    return status;
}

/* The first stored weight that holds codes; NULL = none. *half and *index say where it stands in `weight`. */
static const gmm_ckpt_tensor *gmm__ck_first_codes(const gmm__ck_builder *b, const gmm__ck_array *x,
                                                  const gmm__ck_row_tensors *weight, int *half, int64_t *index) {
    const int64_t part_experts = gmm__ck_part_experts(b, x), cols = gmm__ck_part_cols(b, x);
    for (*index = 0; *index < b->source.part_count * part_experts; ++*index)
        for (*half = 0; *half < 3; ++*half) {
            const gmm__ck_row_tensors *h = &weight[*half];
            const gmm_ckpt_tensor *t;
            if (!h->row || h->tensor[*index] < 0) continue;
            t = &b->parts[*index / part_experts].table->tensors[h->tensor[*index]];
            if (gmm__ck_holds_codes(h->row, t, cols)) return t;
        }
    return NULL;
}

/* The scales of the linear in one state, by kind from GMM_CKPT_SCALE on, and half. */
typedef struct gmm__ck_scales { gmm__ck_row_tensors of[GMM_CKPT_KIND_COUNT][3]; } gmm__ck_scales;

/* Finds the format of the quantized weight `codes`, which is weight[half].tensor[index], from the first of its
   scales. */
static gmm_status gmm__ck_read_format(gmm__ck_builder *b, const gmm__ck_array *x, gmm__ck_transfer *g,
                                      const gmm__ck_scales *scales, const gmm_ckpt_tensor *codes, int half,
                                      int64_t index) {
    const gmm__ck_row_tensors *h = &scales->of[GMM_CKPT_SCALE][half];
    const gmm_ckpt_row *row = g->weight[half].row;
    const int64_t part_experts = gmm__ck_part_experts(b, x), part = index / part_experts;
    const gmm_ckpt_rank *rank = &b->parts[part].rank;
    gmm__ck_quantized q;
    uint32_t dtypes;
    int kind, beside = 0;
    char shapes[200], names[64];
    int32_t s;
    if (!h->row) return gmm__ck_refuse(b, GMM_CKPT_SCALE_MISSING, codes->name, "the source lacks its scales");
    s = h->tensor[part * part_experts + (h->row->form == GMM_CKPT_EACH ? index % part_experts : 0)];
    if (s < 0) return gmm__ck_refuse(b, GMM_CKPT_SCALE_MISSING, codes->name, "its scales are missing");
    memset(&q, 0, sizeof q);
    q.row = h->row;
    q.codes = codes;
    q.scale = &b->parts[part].table->tensors[s];
    q.experts = part_experts;
    q.packed = gmm__ck_is_packed(codes->dtype);
    q.dims = x->dims;
    q.alike = row->form != GMM_CKPT_EACH && h->row->form != GMM_CKPT_EACH &&
              codes->rank == gmm__ck_dimensions(row, x->dims);
    q.cols = gmm__ck_part_cols(b, x);
    q.rows = x->f / (x->rows_sharded ? rank->etp_size : 1) * (half == GMM_CKPT_BOTH ? x->halves : 1);
    if (gmm__ck_is_gtp_sharded(b, x)) { /* the rows of one rank */
        const int32_t dims = gmm__ck_dimensions(row, x->dims);
        const int own = row->form == GMM_CKPT_EACH || codes->rank > dims;
        q.rows = codes->rank < dims ? 0 : codes->shape[codes->rank - dims] / (own ? 1 : part_experts);
    }
    g->format = gmm__ck_find_format(&q, &g->scale_dims, &dtypes, shapes, sizeof shapes);
    if (!g->format && !(dtypes >> q.scale->dtype & 1))
        return gmm__ck_refuse(b, GMM_CKPT_DTYPE, q.scale->name, "scales of %s codes must be %s, not %s",
                              gmm_dtype_name(codes->dtype), gmm__ck_dtype_names(dtypes, names, sizeof names),
                              gmm_dtype_name(q.scale->dtype));
    if (!g->format) {
        char actual[160];
        gmm__ck_shape_text(actual, sizeof actual, q.scale->rank, q.scale->shape);
        return gmm__ck_refuse(b, GMM_CKPT_SHAPE, q.scale->name, "its shape %s is not that of the %s scales of %lld x "
                              "%lld codes%s: %s", actual, gmm_dtype_name(q.scale->dtype), (long long)q.rows,
                              (long long)q.cols, h->row->form == GMM_CKPT_EACH ? "" : " of each expert", shapes);
    }
    for (kind = GMM_CKPT_TENSOR_SCALE; kind < GMM_CKPT_KIND_COUNT; kind++) {
        const gmm__ck_row_tensors *of = scales->of[kind];
        if (g->format->beside >> kind & 1) beside |= of[0].row || of[1].row || of[2].row;
        else gmm__ck_mark_foreign_scales(b, x, of);
    }
    if (g->format->needs_beside && !beside)
        return gmm__ck_refuse(b, GMM_CKPT_SCALE_MISSING, codes->name, "the source lacks its tensor scale or amax: %s "
                              "has one beside its scales", gmm_scaling_name(g->format->scaling));
    return GMM_OK;
}

/* Refuses a boundary at row or column `at` of `extent` that is no multiple of `block`. `unit` > 0 is GTP's. */
static gmm_status gmm__ck_check_boundary(gmm__ck_builder *b, const gmm__ck_transfer *g, const char *what,
                                         const char *line, int64_t at, int64_t block, int64_t extent, int64_t unit) {
    const int64_t first = block ? at / block * block : 0;
    char rule[100] = "";
    if (at >= extent || at <= 0 || (block && at % block == 0)) return GMM_OK;
    if (unit)
        (void)snprintf(rule, sizeof rule, ": GTP's unit of %s is %lld rows", gmm_scaling_name(g->format->scaling),
                       (long long)unit);
    return gmm__ck_refuse(b, GMM_CKPT_NOT_DIVISIBLE, g->codes, "%s, %s %lld, cuts the block of %ss %lld to %lld (%s)%s",
                          what, line, (long long)at, line, (long long)first,
                          (long long)gmm__min_i64(first + (block ? block : extent), extent) - 1,
                          gmm_scaling_name(g->format->scaling), rule);
}

/* Checks that GTP's boundaries fall between blocks, in the source and in the target. */
static gmm_status gmm__ck_check_cut(gmm__ck_builder *b, const gmm__ck_array *x, const gmm__ck_transfer *g) {
    const int64_t unit = g->format->gtp_rows, part_experts = gmm__ck_part_experts(b, x);
    const int64_t rows = x->f * x->halves / (x->rows_sharded ? b->target.rank.etp_size : 1);
    const int64_t src_rows = x->f * x->halves / (x->rows_sharded ? b->parts[0].rank.etp_size : 1);
    gmm_status status = GMM_OK;
    char what[80];
    int32_t p;
    if (g->cut && x->gtp_sharded) {
        status = gmm__ck_check_boundary(b, g, "cuts: row0", "row", g->cut->row0, unit, rows, unit);
        if (!status && g->cut->rows <= INT64_MAX - gmm__min_i64(g->cut->row0, rows))
            status = gmm__ck_check_boundary(b, g, "cuts: row0 + rows", "row", g->cut->row0 + g->cut->rows, unit, rows,
                                            unit);
    }
    for (p = 0; !status && gmm__ck_is_gtp_sharded(b, x) && p < b->source.part_count; p++) {
        const gmm_ckpt_rank *rank = &b->parts[p].rank;
        const int half = g->weight[GMM_CKPT_BOTH].row ? GMM_CKPT_BOTH : GMM_CKPT_GATE;
        gmm__ck_shard shard;
        if (g->weight[half].tensor[p * part_experts] < 0) continue;
        status = gmm__ck_source_shard(b, x, g, half, p, rank->ep_rank * part_experts, &shard);
        (void)snprintf(what, sizeof what, "the start of the source's GTP rank %d", (int)rank->gtp_rank);
        if (!status) status = gmm__ck_check_boundary(b, g, what, "row", shard.row0, unit, src_rows, unit);
    }
    return status;
}

/* Checks that no boundary cuts a block: those of ranks, of gate and up rows, and of their blocks. */
static gmm_status gmm__ck_check_blocks(gmm__ck_builder *b, const gmm__ck_array *x, const gmm__ck_transfer *g) {
    const gmm_ckpt_rank *ranks[2];
    const int64_t glu[2] = {g->src_block, g->dst_block};
    const int fused = x->halves == 2 && (g->weight[GMM_CKPT_BOTH].row ||
                                         gmm__ck_target_row(b, x, GMM_CKPT_BOTH, 0, g->blocks, NULL));
    int64_t br, bc;
    gmm_status status = GMM_OK;
    char what[100];
    int i;
    gmm__ck_block_of(g->format->scaling, &br, &bc);
    ranks[0] = &b->parts[0].rank;
    ranks[1] = &b->target.rank;
    for (i = 0; !status && i < 2; i++) {
        const char *side = i ? "target" : "source";
        const int64_t etp = x->rows_sharded || x->cols_sharded ? ranks[i]->etp_size : 1;
        (void)snprintf(what, sizeof what, "the end of the %s's ETP rank 0 of %lld", side, (long long)etp);
        if (etp > 1 && x->rows_sharded && br)
            status = gmm__ck_check_boundary(b, g, what, "row", x->f / etp, br, x->f, 0);
        if (!status && etp > 1 && x->cols_sharded && bc)
            status = gmm__ck_check_boundary(b, g, what, "column", x->k / etp, bc, x->k, 0);
        (void)snprintf(what, sizeof what, "the end of the %s's first block of gate rows", side);
        if (!status && x->halves == 2 && glu[i] && br)
            status = gmm__ck_check_boundary(b, g, what, "row", glu[i], br, 2 * x->f, 0);
    }
    if (!status && fused && br)
        status = gmm__ck_check_boundary(b, g, "the end of the gate rows", "row", x->f, br, 2 * x->f, 0);
    return status ? status : gmm__ck_check_cut(b, x, g);
}

/* The ETP rank whose scales a target takes where ETP cuts weights inside blocks, as it does within a row or a matrix.
   Several ranks of the source may have one each. */
static gmm_status gmm__ck_choose_etp(gmm__ck_builder *b, const gmm__ck_array *x, const gmm__ck_transfer *g,
                                     int32_t *part) {
    const int64_t from = b->parts[0].rank.etp_size, to = b->target.rank.etp_size, rank = b->target.rank.etp_rank;
    const int64_t first = rank * from / to, last = gmm__ceil_div((rank + 1) * from, to) - 1;
    *part = (int32_t)first;
    if (first == last || b->source.equal_scales) return GMM_OK;
    return gmm__ck_refuse(b, GMM_CKPT_NOT_DIVISIBLE, g->codes, "the source's ETP rank %lld begins at %s %lld inside a "
                          "block (%s), and every rank has a scale of the block: state equal_scales if they are equal",
                          (long long)first + 1, x->cols_sharded ? "column" : "row",
                          (long long)((first + 1) * ((x->cols_sharded ? x->k : x->f) / from)),
                          gmm_scaling_name(g->format->scaling));
}

/* The dimensions with which single values of matrices are stored: those of the first tensor, less the experts'. */
static int32_t gmm__ck_single_dims(const gmm__ck_builder *b, const gmm__ck_array *x,
                                   const gmm__ck_row_tensors *tensors) {
    const int64_t count = b->source.part_count * gmm__ck_part_experts(b, x);
    int64_t i;
    int h;
    for (h = 0; h < 3; h++)
        for (i = 0; tensors[h].row && i < count; i++)
            if (tensors[h].tensor[i] >= 0) {
                const int32_t part = (int32_t)(i / gmm__ck_part_experts(b, x));
                const int32_t rank = b->parts[part].table->tensors[tensors[h].tensor[i]].rank;
                const int32_t dims = rank - (tensors[h].row->form != GMM_CKPT_EACH ? 1 : 0);
                return dims < 0 ? 0 : dims > 2 ? 2 : dims;
            }
    return 1;
}

/* Plans the scales of one kind; `x` and `g` are of their weights. */
static gmm_status gmm__ck_plan_scales(gmm__ck_builder *b, gmm__ck_array x, gmm__ck_transfer g, gmm_ckpt_kind kind,
                                      gmm__ck_row_tensors *tensors) {
    int64_t br = 0, bc = 0;
    int half;
    gmm_status status = GMM_OK;
    if (kind == GMM_CKPT_SCALE) gmm__ck_block_of(g.format->scaling, &br, &bc);
    for (half = 0; half < 3; half++)
        if (g.weight[half].row && !tensors[half].row)
            return gmm__ck_refuse(b, GMM_CKPT_SCALE_MISSING, g.codes, "the source has %s of one of gate and up alone",
                                  kind == GMM_CKPT_SCALE ? "scales" : kind == GMM_CKPT_AMAX ? "an amax"
                                                                                            : "a tensor scale");
    if ((x.rows_sharded && !br) || (x.cols_sharded && !bc)) status = gmm__ck_choose_etp(b, &x, &g, &x.etp_part);
    if (status) return status;
    x.kind = kind;
    x.dims = g.scale_dims;
    x.f = br ? gmm__ceil_div(x.f, br) : 1;
    x.k = bc ? gmm__ceil_div(x.k, bc) : 1;
    x.rows_sharded &= br != 0;
    x.cols_sharded &= bc != 0;
    g.weight = tensors;
    g.dtypes = g.format->scales;
    g.column_codes = 1;
    g.shape_cols = x.k;
    g.src_block /= br ? br : 1;
    g.dst_block /= br ? br : 1;
    g.cut_unit = br;
    if (!br) {
        x.single = 1;
        x.halves = 1;
        x.gtp_sharded = 0;
    }
    if (kind != GMM_CKPT_SCALE) {
        g.dtypes = 1u << GMM_F32;
        x.dims = gmm__ck_single_dims(b, &x, tensors);
    }
    if (!status && x.single && tensors[GMM_CKPT_GATE].row && !b->source.equal_scales &&
        gmm__ck_target_row(b, &x, GMM_CKPT_BOTH, g.grouped, g.blocks, NULL))
        status = gmm__ck_refuse(b, GMM_CKPT_NOT_DIVISIBLE, g.codes, "the gate rows end at row %lld inside a block (%s) "
                                "of the target, and gate and up have a scale each: state equal_scales if they are "
                                "equal", (long long)(x.linear->out / 2), gmm_scaling_name(g.format->scaling));
    return status ? status : gmm__ck_plan_array(b, &x, &g);
}

/* Plans quantized weights that stay quantized, and then their scales. */
static gmm_status gmm__ck_plan_quantized(gmm__ck_builder *b, gmm__ck_array x, gmm__ck_transfer g,
                                         gmm__ck_scales *scales) {
    gmm__ck_array codes;
    gmm_status status;
    int kind;
    if (x.halves == 2 && g.weight[GMM_CKPT_BOTH].row && g.src_block == g.dst_block &&
        gmm__ck_target_row(b, &x, GMM_CKPT_BOTH, g.grouped, g.blocks, NULL) &&
        !(x.rows_sharded && (b->parts[0].rank.etp_size > 1 || b->target.rank.etp_size > 1))) {
        x.halves = 1; /* gate and up rows keep their order: blocks may span their boundary */
        x.f *= 2;
        g.src_block = g.dst_block = 0;
    }
    status = gmm__ck_check_blocks(b, &x, &g);
    if (status) return status;
    codes = x;
    if (g.format->packed) codes.k /= 2; /* bytes */
    status = gmm__ck_plan_array(b, &codes, &g);
    for (kind = GMM_CKPT_SCALE; !status && kind < GMM_CKPT_KIND_COUNT; kind++) {
        gmm__ck_row_tensors *of = scales->of[kind];
        if (kind != GMM_CKPT_SCALE && (!(g.format->beside >> kind & 1) || (!of[0].row && !of[1].row && !of[2].row)))
            continue;
        status = gmm__ck_plan_scales(b, x, g, (gmm_ckpt_kind)kind, of);
    }
    return status;
}

/* Plans the biases of one linear in one state; `g` is the transfer of its weights, with the dtype of biases. */
static gmm_status gmm__ck_plan_bias(gmm__ck_builder *b, const gmm_ckpt_linear *l, gmm__ck_transfer g,
                                    gmm__ck_match *matches, int64_t count) {
    const gmm__ck_array x = gmm__ck_make_array(l, GMM_CKPT_BIAS);
    const gmm_ckpt_row *row = NULL;
    gmm__ck_row_tensors bias[3];
    gmm_status status;
    if (count == 0 && b->source.skip_missing) return GMM_OK;
    if (count == 0) {
        if (!gmm__ck_find_row(b->source.scheme, l, GMM_CKPT_BIAS, &row))
            return gmm__ck_refuse(b, GMM_CKPT_ARGUMENT, l->path, "linears: bias is 1, but the scheme %s has none",
                                  b->source.scheme->name);
        return gmm__ck_refuse_missing_tensor(b, &x, row, g.state, 0);
    }
    status = gmm__ck_group_matches(b, &x, matches, count, l->grouped_bias, bias);
    if (status) return status;
    g.weight = bias;
    g.presence = bias;
    g.scale = NULL;
    g.format = NULL;
    g.cut = NULL;
    g.blocks = 0;
    g.column_codes = 1;
    g.grouped = l->grouped_bias;
    g.shape_cols = 1;
    return gmm__ck_plan_array(b, &x, &g);
}

/* Sorts the scales of one linear and state by kind and half, finds the format of its weights and completes the transfer
   of the weights. */
static gmm_status gmm__ck_plan_weights(gmm__ck_builder *b, gmm__ck_array *x, gmm__ck_transfer *g,
                                       gmm__ck_match *matches, const int64_t *n) {
    const gmm_ckpt_row *row = NULL;
    const gmm_ckpt_tensor *codes;
    gmm__ck_scales scales;
    gmm__ck_match *next = matches + n[GMM_CKPT_WEIGHT] + n[GMM_CKPT_BIAS];
    int64_t index = 0;
    int half = 0, kind;
    gmm_status status = GMM_OK;
    memset(&scales, 0, sizeof scales);
    for (kind = GMM_CKPT_SCALE; !status && kind < GMM_CKPT_KIND_COUNT; next += n[kind++]) {
        x->kind = (gmm_ckpt_kind)kind;
        status = gmm__ck_group_matches(b, x, next, n[kind], g->grouped, scales.of[kind]);
        gmm__ck_mark_plain_scales(b, x, g->weight, scales.of[kind]);
    }
    x->kind = GMM_CKPT_WEIGHT;
    if (status) return status;
    codes = gmm__ck_first_codes(b, x, g->weight, &half, &index);
    if (!codes || !gmm__ck_find_row(b->source.scheme, x->linear, GMM_CKPT_SCALE, &row))
        return gmm__ck_plan_array(b, x, g);
    g->codes = codes->name;
    g->blocks = g->weight[half].row->scaling == GMM_SCALING_MX32;
    if (gmm__ck_is_packed(codes->dtype) && gmm__ck_part_cols(b, x) % (g->blocks ? 32 : 2))
        return gmm__ck_refuse(b, GMM_CKPT_NOT_DIVISIBLE, codes->name, "its rows of %lld codes are no whole %s",
                              (long long)gmm__ck_part_cols(b, x), g->blocks ? "blocks of 32" : "bytes of 2");
    if (codes->dtype == GMM_U8 && !g->blocks) g->shape_cols = x->k / 2;
    status = gmm__ck_read_format(b, x, g, &scales, codes, half, index);
    if (status) return status;
    if (g->dtype == GMM_NONE) {
        if (codes->dtype != GMM_U8 && g->format->packed) g->column_codes = 2;
        if (g->blocks) g->column_codes = 2;
        return gmm__ck_plan_quantized(b, *x, *g, &scales);
    }
    if (!g->format->dequantized)
        return gmm__ck_refuse(b, GMM_CKPT_DTYPE, codes->name, "codes of %s cannot become %s here: keep them quantized",
                              gmm_scaling_name(g->format->scaling), gmm_dtype_name(g->dtype));
    g->scale = scales.of[GMM_CKPT_SCALE];
    g->blocks = 0;
    return gmm__ck_plan_array(b, x, g);
}

/* Plans one linear in one state. */
static gmm_status gmm__ck_plan_state(gmm__ck_builder *b, int64_t index, int32_t state, gmm__ck_match *matches,
                                     int64_t count) {
    const gmm_ckpt_linear *l = &b->linears[index];
    const int converted = state == 0 && l->slot != GMM_CKPT_ROUTER && l->slot != GMM_CKPT_ROUTER_CORRECTION &&
                          l->slot != GMM_CKPT_SHARED_GATE;
    const gmm_ckpt_row *row = NULL;
    gmm__ck_row_tensors weight[3];
    gmm__ck_transfer g;
    gmm__ck_array x = gmm__ck_make_array(l, GMM_CKPT_WEIGHT);
    int64_t n[GMM_CKPT_KIND_COUNT], i;
    gmm_status status = gmm__ck_check_wrappers(b, matches, count);
    if (status) return status;
    memset(&g, 0, sizeof g);
    memset(n, 0, sizeof n);
    for (i = 0; i < count; i++) n[matches[i].kind]++;
    if (count) g.key = gmm__ck_match_key(b, &matches[0]);
    else if (b->source.skip_missing) return GMM_OK;
    if (n[GMM_CKPT_WEIGHT] == 0) {
        if (!gmm__ck_find_row(b->source.scheme, l, GMM_CKPT_WEIGHT, &row))
            return gmm__ck_refuse(b, GMM_CKPT_ARGUMENT, l->path, "linears: the scheme %s has no slot %d",
                                  b->source.scheme->name, (int)l->slot);
        return gmm__ck_refuse_missing_tensor(b, &x, row, state, 0);
    }
    status = gmm__ck_group_matches(b, &x, matches, n[GMM_CKPT_WEIGHT], l->grouped_weight, weight);
    if (!status) status = gmm__ck_check_halves(b, &x, weight);
    if (!status) status = gmm__ck_glu_blocks(b, l, weight, &g.src_block, &g.dst_block);
    if (!status) status = gmm__ck_check_extents(b, &x, &g);
    if (status) return status;
    g.weight = weight;
    g.presence = weight;
    g.state = state;
    g.grouped = l->grouped_weight;
    g.shape_cols = x.k;
    g.column_codes = 1;
    g.cut = b->target.cuts ? &b->target.cuts[index] : NULL;
    g.cut_unit = 1;
    if (converted) g.dtype = b->target.dtype;
    status = gmm__ck_plan_weights(b, &x, &g, matches, n);
    if (status || !l->bias) return status;
    g.dtype = converted ? b->target.bias_dtype : GMM_NONE;
    return gmm__ck_plan_bias(b, l, g, matches + n[GMM_CKPT_WEIGHT], n[GMM_CKPT_BIAS]);
}

static gmm_status gmm__ck_plan_linears(gmm__ck_builder *b) {
    int64_t match = 0, i;
    int32_t s;
    for (i = 0; i < b->linear_count; i++) {
        int64_t end = match;
        while (end < b->match_count && b->matches[end].linear == i) end++;
        if (match == end && b->source.skip_missing) continue;
        for (s = 0; s < b->source.state_count; s++) {
            const int64_t begin = match;
            gmm_status status;
            while (match < end && b->matches[match].state == s) match++;
            if (!b->state_present[s] && s > 0) continue;
            status = gmm__ck_plan_state(b, i, s, begin < match ? b->matches + begin : NULL, match - begin);
            if (status) return status;
        }
    }
    return GMM_OK;
}

/* Builds a plan: descriptors, extra tensors, the order of moves, and the cost. */

/* Whether a segment is "_extra_state" or "_extra_state12": a pickle, or with further segments a tensor from one. */
static int gmm__ck_extra_state(const char *name) {
    const char *segment, *dot;
    int64_t number;
    for (; name; name = dot ? dot + 1 : NULL) {
        dot = strchr(name, '.');
        if (strncmp(name, "_extra_state", 12)) continue;
        segment = name + 12;
        if (*segment && segment != dot && !gmm__ck_parse_number(&segment, &number)) continue;
        if (!*segment || segment == dot) return 1;
    }
    return 0;
}

/* Adds a copy of consecutive units of one source tensor. */
static gmm_status gmm__ck_plan_copy(gmm__ck_builder *b, int32_t part, int32_t src, int64_t src_at, int32_t dst,
                                    int64_t dst_at, int64_t units) {
    gmm_ckpt_move m = GMM_ZERO;
    if (units == 0) return GMM_OK;
    m.kind = GMM_CKPT_COPY;
    m.part = part;
    m.src = src;
    m.dst = dst;
    m.scale = -1;
    m.src_at = src_at;
    m.dst_at = dst_at;
    gmm__ck_add_loop(&m, units, 1, 1);
    return gmm__ck_add_move(b, &m);
}

/* Keeps, drops or refuses the tensors that no linear uses. */
static gmm_status gmm__ck_plan_extra(gmm__ck_builder *b) {
    const int64_t before = b->targets->count;
    int64_t i;
    int32_t p;
    for (p = 0; p < b->source.part_count; p++) {
        const gmm_ckpt_table *table = b->parts[p].table;
        for (i = 0; i < table->count; i++) {
            gmm_ckpt_tensor t = table->tensors[i];
            const int64_t first = b->move_count;
            int64_t twin;
            int32_t target = -1;
            gmm_status status;
            if (b->uses[p][i] == GMM__CK_USED) {
                if (b->report) b->report->matched++;
                continue;
            }
            if (b->uses[p][i] == GMM__CK_DROPPED || (b->source.drop_extra_state && gmm__ck_extra_state(t.name)) ||
                b->source.extra == GMM_CKPT_EXTRA_DROP) {
                if (b->report) b->report->dropped++;
                continue;
            }
            if (b->source.extra == GMM_CKPT_EXTRA_REFUSE)
                return gmm__ck_refuse(b, GMM_CKPT_EXTRA_KEY, t.name, b->uses[p][i] == GMM__CK_PLAIN_SCALE
                                      ? "its weight is not quantized, or not in a format with such scales"
                                      : "no linear uses it");
            if (b->target.drop_wrappers) {
                char *name = (char *)gmm__ck_alloc(&b->arena, (int64_t)strlen(t.name) + 1, 1);
                size_t n;
                if (!name) return gmm__ck_no_memory(b);
                (void)gmm__ck_find_state(b, t.name, &n);
                memcpy(name, t.name, n);
                (void)gmm__ck_strip_wrappers(&b->source, t.name + n, name + n);
                t.name = name;
            }
            twin = gmm_ckpt_table_find(b->targets, t.name);
            if (twin >= before) { /* several ranks hold the same tensor */
                const gmm_ckpt_tensor *k = &b->targets->tensors[twin];
                if (k->dtype == t.dtype && k->rank == t.rank && k->bytes == t.bytes &&
                    !memcmp(k->shape, t.shape, (size_t)t.rank * sizeof t.shape[0]))
                    continue;
                return gmm__ck_refuse(b, GMM_CKPT_SHAPE, t.name, "parts of the source have it in different shapes");
            }
            if (b->report) b->report->kept++;
            status = gmm__ck_add_target(b, &t, &target);
            if (!status) status = gmm__ck_plan_copy(b, p, (int32_t)i, 0, target, 0, gmm__ck_unit_count(&t));
            if (!status) status = gmm__ck_finish_target(b, target, first);
            if (status) return status;
        }
    }
    return GMM_OK;
}

typedef struct gmm__ck_order { int64_t offset, index; int32_t part, storage; } gmm__ck_order;

static int gmm__ck_compare_order(const void *a, const void *b) {
    const gmm__ck_order *x = (const gmm__ck_order *)a, *y = (const gmm__ck_order *)b;
    if (x->part != y->part) return x->part < y->part ? -1 : 1;
    if (x->storage != y->storage) return x->storage < y->storage ? -1 : 1;
    if (x->offset != y->offset) return x->offset < y->offset ? -1 : 1;
    return x->index < y->index ? -1 : x->index > y->index;
}

static int gmm__ck_compare_ranges(const void *a, const void *b) {
    const uintptr_t x = (uintptr_t)((const gmm__ck_memory_range *)a)->begin,
        y = (uintptr_t)((const gmm__ck_memory_range *)b)->begin;
    return x < y ? -1 : x > y;
}

/* What dequantizing reads beside the codes: the bytes of the scales of one row of blocks, the least at once, and of
   the scales of `codes` codes. */
static int64_t gmm__ck_scale_row_bytes(const gmm_ckpt_plan *plan, const gmm_ckpt_move *m, int64_t codes,
                                       int64_t *all_bytes) {
    const gmm_ckpt_table *table = plan->parts[m->part].table;
    const int64_t unit = gmm__ck_unit_bytes(table->tensors[m->scale].dtype);
    int64_t rows, cols, scale_rows, scale_cols, block_rows, block_cols, block;
    gmm__ck_scale_shape(&table->tensors[m->src], m->scaling, &rows, &cols, &scale_rows, &scale_cols);
    gmm__ck_block_of(m->scaling, &block_rows, &block_cols);
    if (!gmm__mul(block_rows ? block_rows : rows, block_cols ? block_cols : cols, &block) || block < 1) block = 1;
    *all_bytes = gmm__ceil_div(codes, block) * unit;
    return scale_cols * unit;
}

enum { GMM__CK_SCRATCH_MIN = 64 };

/* Copies the sorted moves into the plan and computes its cost and source ranges. */
static gmm_status gmm__ck_build_plan(gmm__ck_builder *b, gmm_ckpt_plan *plan) {
    gmm__ck_order *order = (gmm__ck_order *)gmm__ck_alloc(&b->arena, b->move_count, sizeof *order);
    int64_t i, s, n = 0;
    int32_t p;
    plan->count = b->move_count;
    plan->part_count = b->source.part_count;
    plan->moves = (gmm_ckpt_move *)gmm__ck_alloc(&plan->arena, b->move_count, sizeof *plan->moves);
    plan->last_move = (int64_t *)gmm__ck_alloc(&plan->arena, b->targets->count, sizeof *plan->last_move);
    plan->parts = (gmm_ckpt_part *)gmm__ck_alloc(&plan->arena, b->source.part_count, sizeof *plan->parts);
    for (p = 0; p < b->source.part_count; p++) n += b->parts[p].table->storage_count;
    plan->source_ranges = (gmm__ck_memory_range *)gmm__ck_alloc(&plan->arena, n, sizeof *plan->source_ranges);
    if (!order || !plan->moves || !plan->last_move || !plan->parts || !plan->source_ranges) return gmm__ck_no_memory(b);
    memcpy(plan->parts, b->parts, (size_t)b->source.part_count * sizeof *plan->parts);
    for (i = 0; i < b->move_count; i++) {
        const gmm_ckpt_move *m = &b->moves[i];
        order[i].index = i;
        order[i].part = m->part;
        if (m->src < 0) continue;
        order[i].storage = b->parts[m->part].table->tensors[m->src].storage;
        order[i].offset = b->parts[m->part].table->tensors[m->src].offset +
                      m->src_at * gmm__ck_unit_bytes(b->parts[m->part].table->tensors[m->src].dtype);
    }
    if (b->move_count) qsort(order, (size_t)b->move_count, sizeof *order, gmm__ck_compare_order);
    for (i = 0; i < b->targets->count; i++) plan->last_move[i] = -1;
    plan->cost.target_bytes = b->target_end;
    plan->cost.scratch_min = GMM__CK_SCRATCH_MIN;
    for (i = 0; i < b->move_count; i++) {
        const gmm_ckpt_move *m = &plan->moves[i];
        const int64_t units = gmm__ck_move_elements(&b->moves[order[i].index]);
        plan->moves[i] = b->moves[order[i].index];
        plan->last_move[m->dst] = i;
        plan->cost.moves[m->kind]++;
        if (m->kind == GMM_CKPT_VIEW) continue;
        plan->cost.bytes_written += units * gmm__ck_unit_bytes(b->targets->tensors[m->dst].dtype);
        if (m->kind == GMM_CKPT_ZERO) continue;
        if (m->kind == GMM_CKPT_DEQUANT) {
            int64_t scale_bytes;
            const int64_t row = gmm__ck_scale_row_bytes(plan, m, units, &scale_bytes);
            const int packed = gmm__ck_is_packed(plan->parts[m->part].table->tensors[m->src].dtype);
            if (8 * 3 * row + GMM__CK_SCRATCH_MIN > plan->cost.scratch_min)
                plan->cost.scratch_min = 8 * 3 * row + GMM__CK_SCRATCH_MIN;
            plan->cost.bytes_read += (packed ? units / 2 : units) + scale_bytes;
        } else {
            plan->cost.bytes_read += units * gmm__ck_unit_bytes(b->parts[m->part].table->tensors[m->src].dtype);
        }
    }
    for (p = 0; p < b->source.part_count; p++)
        for (s = 0; s < b->parts[p].table->storage_count; s++) {
            const gmm__ck_storage *storage = &b->parts[p].table->storages[s];
            if (!storage->base || !storage->bytes) continue;
            plan->source_ranges[plan->source_range_count].begin = storage->base;
            plan->source_ranges[plan->source_range_count++].end = storage->base + storage->bytes;
        }
    if (plan->source_range_count) {
        qsort(plan->source_ranges, (size_t)plan->source_range_count, sizeof *plan->source_ranges,
              gmm__ck_compare_ranges);
        for (i = 1, n = 1; i < plan->source_range_count; i++) {
            gmm__ck_memory_range *last = &plan->source_ranges[n - 1];
            const gmm__ck_memory_range *next = &plan->source_ranges[i];
            if ((uintptr_t)next->begin > (uintptr_t)last->end) plan->source_ranges[n++] = *next;
            else if ((uintptr_t)next->end > (uintptr_t)last->end) last->end = next->end;
        }
        plan->source_range_count = n;
    }
    return GMM_OK;
}

/* Reads and checks the source's and target's descriptors, and fills in defaults. */
static gmm_status gmm__ck_read_descriptors(gmm__ck_builder *b, const gmm_ckpt_source *source,
                                           const gmm_ckpt_target *target) {
    static const char *const all = "";
    const void *descriptors[2];
    void *copies[2];
    size_t sizes[2];
    int32_t i, p, q;
    descriptors[0] = source;
    descriptors[1] = target;
    copies[0] = &b->source;
    copies[1] = &b->target;
    sizes[0] = sizeof b->source;
    sizes[1] = sizeof b->target;
    for (i = 0; i < 2; i++) {
        uint32_t size;
        memcpy(&size, descriptors[i], sizeof size);
        if (size && size < 2 * sizeof size)
            return gmm__ck_refuse(b, GMM_CKPT_ARGUMENT, NULL, "%s: struct_size %u is too small for any version",
                                  i ? "target" : "source", size);
        if (!gmm__copy_sized(copies[i], sizes[i], descriptors[i])) {
            (void)gmm__ck_refuse(b, GMM_CKPT_ARGUMENT, NULL,
                                 "%s: struct_size %u is larger than the %u bytes of version %s",
                                 i ? "target" : "source", size, (unsigned)sizes[i], GMM_VERSION_STRING);
            if (b->report) b->report->error.status = GMM_E_VERSION;
            return GMM_E_VERSION;
        }
    }
    if (!b->source.scheme || !b->source.parts || b->source.part_count < 1 || b->source.wrapper_count < 0 ||
        b->source.state_count < 0 || (b->source.wrapper_count && !b->source.wrappers) ||
        (b->source.state_count && !b->source.states))
        return gmm__ck_refuse(b, GMM_CKPT_ARGUMENT, NULL,
                              "source: scheme, %d parts, %d wrappers or %d states are NULL or out of range",
                              b->source.part_count, b->source.wrapper_count, b->source.state_count);
    if (b->source.prefix && *b->source.prefix && b->source.prefix[strlen(b->source.prefix) - 1] != '.')
        return gmm__ck_refuse(b, GMM_CKPT_ARGUMENT, NULL, "prefix is \"%.100s\": must be empty or end with a dot",
                              b->source.prefix);
    if (b->source.extra < GMM_CKPT_EXTRA_REFUSE || b->source.extra > GMM_CKPT_EXTRA_DROP)
        return gmm__ck_refuse(b, GMM_CKPT_ARGUMENT, NULL, "source.extra is %d: must be a gmm_ckpt_extra",
                              (int)b->source.extra);
    if (!b->target.scheme) b->target.scheme = b->source.scheme;
    b->states = b->source.states;
    if (!b->source.states || !b->source.state_count) {
        const char **state = (const char **)gmm__ck_alloc(&b->arena, 1, sizeof *state);
        if (!state) return gmm__ck_no_memory(b);
        state[0] = all;
        b->states = state;
        b->source.state_count = 1;
    }
    if (b->target.state_count && (b->target.state_count != b->source.state_count || !b->target.states))
        return gmm__ck_refuse(b, GMM_CKPT_ARGUMENT, NULL, "target.state_count is %d: must be 0 or the source's %d",
                              b->target.state_count, b->source.state_count);
    for (i = 0; i < 2; i++) {
        const gmm_dtype d = i ? b->target.bias_dtype : b->target.dtype;
        if (d != GMM_NONE && (d < GMM_NONE || d > GMM_I64 || !(GMM__FLOATS >> d & 1)))
            return gmm__ck_refuse(b, GMM_CKPT_DTYPE, NULL, "target.%s is %s: must be none, f32, f16 or bf16",
                                  i ? "bias_dtype" : "dtype", gmm_dtype_name(d));
    }
    if (b->target.glu_block < 0)
        return gmm__ck_refuse(b, GMM_CKPT_NOT_DIVISIBLE, NULL, "target.glu_block is %d: must be >= 0",
                              b->target.glu_block);
    b->parts = (gmm_ckpt_part *)gmm__ck_alloc(&b->arena, b->source.part_count, sizeof *b->parts);
    if (!b->parts) return gmm__ck_no_memory(b);
    memcpy(b->parts, b->source.parts, (size_t)b->source.part_count * sizeof *b->parts);
    for (p = -1; p < b->source.part_count; p++) {
        gmm_ckpt_rank *r = p < 0 ? &b->target.rank : &b->parts[p].rank;
        if (p < 0) r->gtp_rank = r->gtp_size = 0;
        if (r->ep_size == 0) r->ep_size = 1;
        if (r->etp_size == 0) r->etp_size = 1;
        if (r->gtp_size == 0) r->gtp_size = 1;
        if (r->ep_rank < 0 || r->ep_rank >= r->ep_size || r->etp_rank < 0 || r->etp_rank >= r->etp_size ||
            r->gtp_rank < 0 || r->gtp_rank >= r->gtp_size)
            return gmm__ck_refuse(b, GMM_CKPT_ARGUMENT, NULL, "%s: EP %d/%d, ETP %d/%d, GTP %d/%d: ranks must lie in "
                                  "[0, size)", p < 0 ? "target.rank" : "parts", r->ep_rank, r->ep_size,
                                  r->etp_rank, r->etp_size, r->gtp_rank, r->gtp_size);
        if (p >= 0 && !b->parts[p].table)
            return gmm__ck_refuse(b, GMM_CKPT_ARGUMENT, NULL, "parts[%d].table is NULL", p);
        if (p < 0) continue;
        if (r->ep_size != b->parts[0].rank.ep_size || r->etp_size != b->parts[0].rank.etp_size ||
            r->gtp_size != b->parts[0].rank.gtp_size)
            return gmm__ck_refuse(b, GMM_CKPT_ARGUMENT, NULL, "parts[%d] has other sizes of EP, ETP or GTP than "
                                  "parts[0]", p);
        for (q = 0; q < p; q++)
            if (!memcmp(r, &b->parts[q].rank, sizeof *r))
                return gmm__ck_refuse(b, GMM_CKPT_ARGUMENT, NULL, "parts[%d] and parts[%d] are the same rank", q,
                                      p);
    }
    return GMM_OK;
}

/* Checks and copies the linears of the caller. */
static gmm_status gmm__ck_add_linears(gmm__ck_builder *b, const gmm_ckpt_linear *linears, int64_t count) {
    int64_t i;
    for (i = 0; i < count; i++) {
        gmm_ckpt_linear l = linears[i];
        int64_t elements = 0;
        gmm_status status;
        if (l.slot < GMM_CKPT_FC1 || l.slot >= GMM_CKPT_SLOT_COUNT)
            return gmm__ck_refuse(b, GMM_CKPT_ARGUMENT, l.path, "linears[%lld].slot is %d: must be a slot",
                                  (long long)i, (int)l.slot);
        if (l.experts == 0) l.experts = 1;
        if (l.experts < 1 || l.out < 1 || l.in < 0 || (l.gated && l.out % 2))
            return gmm__ck_refuse(b, GMM_CKPT_ARGUMENT, l.path, "linears[%lld]: %lld experts of %lld x %lld%s: extents "
                                  "must be >= 1 (in: 0 is a vector), gated out even", (long long)i,
                                  (long long)l.experts, (long long)l.out, (long long)l.in, l.gated ? ", gated" : "");
        if (!gmm__mul(l.experts, l.out, &elements) || !gmm__mul(elements, l.in ? l.in : 1, &elements) ||
            !gmm__mul(elements, 8, &elements))
            return gmm__ck_refuse(b, GMM_CKPT_OVERFLOW, l.path, "linears[%lld]: %lld x %lld x %lld do not fit 63 bits",
                                  (long long)i, (long long)l.experts, (long long)l.out, (long long)l.in);
        if (l.path) {
            char *path = (char *)gmm__ck_alloc(&b->arena, (int64_t)strlen(l.path) + 1, 1);
            if (!path) return gmm__ck_no_memory(b);
            if (!gmm__ck_strip_wrappers(&b->source, l.path, path) && !b->source.prefix)
                return gmm__ck_refuse(b, GMM_CKPT_ARGUMENT, NULL, "linears[%lld].path is \"%.60s\", empty without "
                                      "wrapper segments: any key would do%s", (long long)i, l.path,
                                      gmm__ck_is_map(b) ? "" : "; state the prefix");
            l.path = path;
        }
        status = gmm__ck_add_linear(b, &l);
        if (status) return status;
    }
    return GMM_OK;
}

static gmm_status gmm__ck_builder_init(gmm__ck_builder *b, const char *fn, gmm_ckpt_plan **out,
                                       const gmm_allocator *allocator, gmm_ckpt_report *report) {
    gmm_allocator a;
    gmm_status status;
    int32_t storage;
    memset(b, 0, sizeof *b);
    gmm__ck_reset_report(report);
    b->fn = fn;
    b->report = report;
    if (allocator && !allocator->alloc != !allocator->release)
        return gmm__ck_refuse(b, GMM_CKPT_ARGUMENT, NULL, "allocator: 1 of 2 functions is set; set both or none");
    a = gmm__ck_allocator(allocator);
    b->arena.allocator = a;
    if (!out) return GMM_OK; /* a scan */
    *out = (gmm_ckpt_plan *)a.alloc(a.user, sizeof **out);
    if (!*out) return gmm__ck_no_memory(b);
    memset(*out, 0, sizeof **out);
    (*out)->arena.allocator = a;
    status = gmm_ckpt_table_create(&(*out)->targets, &a, NULL);
    if (!status) status = gmm_ckpt_table_add_storage((*out)->targets, NULL, INT64_MAX, &storage, NULL);
    if (status) return gmm__ck_no_memory(b);
    b->targets = (*out)->targets;
    return GMM_OK;
}

static gmm_status gmm__ck_builder_release(gmm__ck_builder *b, gmm_ckpt_plan **out, gmm_status status) {
    gmm__ck_arena_release(&b->arena);
    if (status && out) {
        gmm_ckpt_plan_destroy(*out);
        *out = NULL;
    }
    return status;
}

static gmm_status gmm__ck_fail_null(const char *fn, const char *what, gmm_ckpt_report *report) {
    gmm__ck_reset_report(report);
    if (report) report->reason = GMM_CKPT_ARGUMENT;
    return gmm__fail(report ? &report->error : NULL, GMM_E_NULL, "%s: %s is NULL", fn, what);
}

static gmm_status gmm__ck_create(const char *fn, gmm_ckpt_plan **out, const gmm_ckpt_source *source,
                                 const gmm_ckpt_target *target, const gmm_ckpt_linear *linears, int64_t count,
                                 const gmm_allocator *allocator, gmm_ckpt_report *report) {
    gmm__ck_builder b;
    gmm_status status;
    if (!out) return gmm__ck_fail_null(fn, "out", report);
    *out = NULL;
    if (!source || !target || (!linears && count))
        return gmm__ck_fail_null(fn, !source ? "source" : !target ? "target" : "linears", report);
    status = gmm__ck_builder_init(&b, fn, out, allocator, report);
    if (!status) status = gmm__ck_read_descriptors(&b, source, target);
    if (!status && count < 0) status = gmm__ck_refuse(&b, GMM_CKPT_ARGUMENT, NULL, "count is %lld", (long long)count);
    if (!status) status = gmm__ck_add_linears(&b, linears, count);
    if (!status) status = gmm__ck_read_keys(&b);
    if (!status) status = gmm__ck_check_layers(&b);
    if (!status) status = gmm__ck_find_missing(&b);
    if (!status) status = gmm__ck_refuse_incomplete(&b, NULL);
    if (!status) status = gmm__ck_plan_linears(&b);
    if (!status) status = gmm__ck_plan_extra(&b);
    if (!status) status = gmm__ck_build_plan(&b, *out);
    return gmm__ck_builder_release(&b, out, status);
}

GMMDEF gmm_status gmm_ckpt_plan_create(gmm_ckpt_plan **out, const gmm_ckpt_source *source,
                                       const gmm_ckpt_target *target, const gmm_ckpt_linear *linears, int64_t count,
                                       const gmm_allocator *allocator, gmm_ckpt_report *report) {
    return gmm__ck_create("gmm_ckpt_plan_create", out, source, target, linears, count, allocator, report);
}

GMMDEF void gmm_ckpt_plan_destroy(gmm_ckpt_plan *plan) {
    gmm_allocator a;
    if (!plan) return;
    a = plan->arena.allocator;
    gmm_ckpt_table_destroy(plan->targets);
    gmm__ck_arena_release(&plan->arena);
    a.release(a.user, plan);
}

GMMDEF const gmm_ckpt_table *gmm_ckpt_plan_targets(const gmm_ckpt_plan *plan) { return plan ? plan->targets : NULL; }

GMMDEF const gmm_ckpt_move *gmm_ckpt_plan_moves(const gmm_ckpt_plan *plan, int64_t *count) {
    if (count) *count = plan ? plan->count : 0;
    return plan ? plan->moves : NULL;
}

static int gmm__ck_compare_i64(const void *a, const void *b) {
    const int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return x < y ? -1 : x > y;
}

/* Finds the linears of a table and their extents. */

static int gmm__ck_compare_linears(const void *a, const void *b) {
    const gmm_ckpt_linear *x = (const gmm_ckpt_linear *)a, *y = (const gmm_ckpt_linear *)b;
    if (x->layer != y->layer) return x->layer < y->layer ? -1 : 1;
    return x->slot < y->slot ? -1 : x->slot > y->slot;
}

/* Whether a tensor of all experts has an extent for them. */
static int gmm__ck_has_expert_extent(const gmm_ckpt_row *row, const gmm_ckpt_tensor *t) {
    return (row->form == GMM_CKPT_STACKED || row->form == GMM_CKPT_TALL) && t->rank > gmm__ck_dimensions(row, 2);
}

/* The number of experts that names or shapes of a linear imply; 0 = they imply none. */
static int64_t gmm__ck_count_experts(const gmm__ck_builder *b, const gmm__ck_match *matches, int64_t count) {
    const int64_t ranks = b->parts[0].rank.ep_size;
    int64_t experts = 0, i;
    for (i = 0; i < count; i++) {
        const gmm_ckpt_row *row = &b->source.scheme->rows[matches[i].row];
        const gmm_ckpt_tensor *t = &b->parts[matches[i].part].table->tensors[matches[i].tensor];
        int64_t n = 0;
        if (row->form == GMM_CKPT_EACH) n = (matches[i].expert + 1) * (b->source.scheme->global_index ? 1 : ranks);
        else if (row->kind != GMM_CKPT_WEIGHT || !gmm__ck_has_expert_extent(row, t) ||
                 !gmm__mul(t->shape[0], ranks, &n))
            n = 0;
        if (n > experts) experts = n;
    }
    return experts;
}

/* The experts of a layer: as stated, or as the names and shapes of its linears imply (linears[].experts). Where each
   expert has a tensor of its own, a router may have rows for more experts than have keys. */
static int64_t gmm__ck_layer_experts(gmm__ck_builder *b, const gmm_ckpt_linear *l, const gmm_ckpt_row *row,
                                     const gmm_ckpt_tensor *t, int64_t stated) {
    const int64_t partner = gmm__ck_find_slot(b, l->slot == GMM_CKPT_FC1 ? GMM_CKPT_FC2 : GMM_CKPT_FC1, l->layer);
    const int64_t router = gmm__ck_find_slot(b, GMM_CKPT_ROUTER, l->layer);
    int64_t n = l->experts;
    if (stated) return stated;
    if (gmm__ck_has_expert_extent(row, t)) return n;
    if (partner >= 0 && b->linears[partner].experts > n) n = b->linears[partner].experts;
    if (row->form != GMM_CKPT_EACH || router < 0 || b->linears[router].out <= n) return n;
    if (!b->extra_router_rows) b->extra_router_layer = l->layer;
    if (!b->extra_router_rows) b->extra_router_rows = b->linears[router].out;
    return b->linears[router].out;
}

/* Sets the scaling of a linear from its first weight `t` and the first of its scales, where their format is known. */
static void gmm__ck_scan_format(const gmm__ck_builder *b, gmm_ckpt_linear *l, const gmm_ckpt_row *row,
                                const gmm_ckpt_tensor *t, const gmm__ck_match *scale, int64_t experts) {
    const int32_t own = gmm__ck_has_expert_extent(row, t) ? 1 : 0;
    const gmm__ck_format *format;
    gmm__ck_quantized q;
    int32_t dims;
    uint32_t dtypes;
    char shapes[200];
    if (t->rank - own < 1 || t->rank - own > 2) return;
    memset(&q, 0, sizeof q);
    q.row = &b->source.scheme->rows[scale->row];
    q.codes = t;
    q.scale = &b->parts[scale->part].table->tensors[scale->tensor];
    q.experts = experts;
    q.packed = gmm__ck_is_packed(t->dtype);
    q.dims = t->rank - own;
    q.alike = row->form != GMM_CKPT_EACH && q.row->form != GMM_CKPT_EACH && !own;
    q.rows = own || row->form == GMM_CKPT_EACH ? t->shape[own] : t->shape[0] / experts;
    q.cols = q.dims == 1 ? 1 : t->shape[own + 1] * (t->dtype == GMM_U8 ? 2 : 1);
    format = gmm__ck_find_format(&q, &dims, &dtypes, shapes, sizeof shapes);
    if (format) l->scaling = format->scaling;
}

/* Extents of one linear from the shapes of its first tensors. */
static gmm_status gmm__ck_scan_linear(gmm__ck_builder *b, gmm_ckpt_linear *l, const gmm__ck_match *matches,
                                      int64_t count, int64_t experts) {
    const int32_t ep_size = b->parts[0].rank.ep_size;
    const int grouped = l->slot == GMM_CKPT_FC1 || l->slot == GMM_CKPT_FC2;
    const gmm_ckpt_row *row = NULL;
    const gmm_ckpt_tensor *t = NULL;
    const gmm__ck_match *match = NULL;
    int64_t i, m[2] = {0, 0}, rank_experts;
    int32_t expert_dims, matrix_rank;
    const gmm__ck_match *scale = NULL;
    int mx, scaled = 0;
    for (i = 0; i < count; i++) {
        const gmm_ckpt_row *r = &b->source.scheme->rows[matches[i].row];
        const gmm_ckpt_tensor *o = &b->parts[matches[i].part].table->tensors[matches[i].tensor];
        if (matches[i].kind == GMM_CKPT_BIAS) l->bias = 1;
        scaled |= matches[i].kind >= GMM_CKPT_SCALE;
        if (matches[i].kind == GMM_CKPT_SCALE && match && !scale && r->half == row->half &&
            matches[i].state == match->state && matches[i].part == match->part)
            scale = &matches[i];
        if (matches[i].kind != GMM_CKPT_WEIGHT) continue;
        if (!row) {
            match = &matches[i];
            row = r;
            t = o;
        }
        l->gated |= r->half != GMM_CKPT_BOTH;
        if (r->scaling == GMM_SCALING_MX32) l->scaling = GMM_SCALING_MX32;
        else if (GMM__CK_CODES_8 >> o->dtype & 1 && gmm__ck_find_row(b->source.scheme, l, GMM_CKPT_SCALE, &r))
            l->scaling = GMM_SCALING_128X128; /* unless the scales are of another format */
    }
    if (!row) return GMM_OK; /* There is only a bias: the weight is missing. */
    l->experts = grouped ? gmm__ck_layer_experts(b, l, row, t, experts) : 1;
    if (l->experts < 1 || (grouped && l->experts % ep_size))
        return gmm__ck_refuse(b, GMM_CKPT_ARGUMENT, t->name, "no shape or name tells the number of experts: state it");
    rank_experts = l->experts / (grouped ? ep_size : 1);
    expert_dims = gmm__ck_has_expert_extent(row, t) ? 1 : 0;
    matrix_rank = t->rank - expert_dims;
    mx = row->scaling == GMM_SCALING_MX32;
    if (scale && !mx) gmm__ck_scan_format(b, l, row, t, scale, rank_experts);
    if (matrix_rank != (mx ? 3 : 2) && !(matrix_rank == 1 && row->form == GMM_CKPT_EACH))
        return gmm__ck_refuse(b, GMM_CKPT_SHAPE, t->name, "%d dimensions are none of its scheme", (int)t->rank);
    m[0] = t->shape[expert_dims];
    m[1] = matrix_rank == 1 ? 0 : t->shape[expert_dims + 1];
    if (mx) m[1] *= 32;
    else if (t->dtype == GMM_U8 && scaled) m[1] *= 2; /* two codes per byte */
    if (!expert_dims && row->form != GMM_CKPT_EACH) {
        const int wide = row->form == GMM_CKPT_WIDE;
        if (m[wide] % rank_experts)
            return gmm__ck_refuse(b, GMM_CKPT_SHAPE, t->name, "extent %lld is no multiple of the %lld experts",
                                  (long long)m[wide], (long long)rank_experts);
        m[wide] /= rank_experts;
    }
    l->out = m[row->transposed ? 1 : 0];
    l->in = m[row->transposed ? 0 : 1];
    if (grouped && b->parts[0].rank.gtp_size > 1) { /* rows are the sum over GTP ranks */
        const gmm_ckpt_rank *rank = &b->parts[match->part].rank;
        int32_t found = 0;
        l->out = 0;
        for (i = 0; i < count; i++) {
            const gmm_ckpt_rank *other_rank = &b->parts[matches[i].part].rank;
            const gmm_ckpt_tensor *o = &b->parts[matches[i].part].table->tensors[matches[i].tensor];
            const int32_t d = o->rank - (row->transposed ? 1 : 2);
            if (matches[i].kind != GMM_CKPT_WEIGHT || matches[i].state != match->state || d < 0 ||
                matches[i].row != match->row ||
                other_rank->ep_rank != rank->ep_rank || other_rank->etp_rank != rank->etp_rank ||
                    matches[i].expert != match->expert)
                continue;
            l->out += o->shape[d];
            found++;
        }
        if (found != rank->gtp_size)
            return gmm__ck_refuse(b, GMM_CKPT_MISSING_INDEX, t->name, "%d of %d GTP ranks have it", found,
                                  (int)rank->gtp_size);
    }
    if (l->slot == GMM_CKPT_FC1) l->out *= b->parts[0].rank.etp_size;
    if (l->slot == GMM_CKPT_FC2) l->in *= b->parts[0].rank.etp_size;
    if (row->half != GMM_CKPT_BOTH) l->out *= 2;
    if (l->out < 1)
        return gmm__ck_refuse(b, GMM_CKPT_SHAPE, t->name, "it has no rows");
    return GMM_OK;
}

/* Extents of all linears, and which FC1 are gated. */
static gmm_status gmm__ck_scan_extents(gmm__ck_builder *b, int64_t experts) {
    int64_t i, match, pass;
    gmm_status status = GMM_OK;
    for (pass = 0; pass < 3; pass++) /* the experts that names imply, then routers, which may have rows for more */
        for (i = 0, match = 0; i < b->linear_count; i++) {
            gmm_ckpt_linear *l = &b->linears[i];
            const int grouped = l->slot == GMM_CKPT_FC1 || l->slot == GMM_CKPT_FC2;
            const int64_t begin = match;
            while (match < b->match_count && b->matches[match].linear == i) match++;
            if (pass == 0 && grouped) l->experts = gmm__ck_count_experts(b, b->matches + begin, match - begin);
            if (pass != (grouped ? 2 : 1)) continue;
            status = gmm__ck_scan_linear(b, l, b->matches + begin, match - begin, experts);
            if (status) return status;
        }
    for (i = 0; i < b->linear_count; i++) {
        gmm_ckpt_linear *l = &b->linears[i];
        const int shared = l->slot == GMM_CKPT_SHARED_FC1;
        const int64_t fc1 = gmm__ck_find_slot(b, GMM_CKPT_FC1, l->layer);
        const int64_t fc2 = gmm__ck_find_slot(b, shared ? GMM_CKPT_SHARED_FC2 : GMM_CKPT_FC2, l->layer);
        if (experts && (l->slot == GMM_CKPT_ROUTER || l->slot == GMM_CKPT_ROUTER_CORRECTION) && l->out > experts &&
            (fc1 >= 0 || fc2 >= 0))
            l->spare = (int32_t)gmm__min_i64(l->out - experts, INT32_MAX);
        if ((l->slot != GMM_CKPT_FC1 && !shared) || l->gated || !l->out || fc2 < 0 || !b->linears[fc2].out) continue;
        l->gated = l->out == 2 * b->linears[fc2].in;
        if (!l->gated && l->out != b->linears[fc2].in)
            return gmm__ck_refuse(b, GMM_CKPT_SHAPE, gmm__ck_first_key(b, i), "layer %lld: %s's out %lld is neither "
                                  "once nor twice the in of its second linear, so nothing says whether it is gated",
                                  (long long)l->layer, shared ? "shared_fc1" : "fc1", (long long)l->out);
    }
    return GMM_OK;
}

/* Records the layers without a key, from 0 to the last layer with one. `head` is the text before {L}. */
static gmm_status gmm__ck_scan_layers(gmm__ck_builder *b, const char *head) {
    const size_t prefix = strlen(b->source_prefix), length = strlen(head);
    int64_t *layers = NULL, count = 0, capacity = 0, next = 0, i;
    gmm_status status = GMM_OK;
    int32_t p;
    for (p = 0; p < b->source.part_count; p++)
        for (i = 0; i < b->parts[p].table->count; i++) {
            const char *key = b->parts[p].table->tensors[i].name, *layer_text;
            void *array = layers;
            size_t skipped;
            int64_t layer;
            if (gmm__ck_find_state(b, key, &skipped) < 0) continue;
            (void)gmm__ck_strip_key_wrappers(&b->source, key + skipped, b->key_buffer);
            if (strncmp(b->key_buffer, b->source_prefix, prefix) ||
                strncmp(b->key_buffer + prefix, head, length)) continue;
            layer_text = b->key_buffer + prefix + length;
            if (!gmm__ck_parse_number(&layer_text, &layer) || (*layer_text && *layer_text != '.') ||
                (count && layers[count - 1] == layer)) continue;
            if (!gmm__ck_reserve(&b->arena, &array, count, &capacity, sizeof *layers)) return gmm__ck_no_memory(b);
            layers = (int64_t *)array;
            layers[count++] = layer;
        }
    if (count) qsort(layers, (size_t)count, sizeof *layers, gmm__ck_compare_i64);
    for (i = 0; !status && i < count; i++) {
        if (layers[i] > next) status = gmm__ck_add_missing(b, 0, -1, 0, 0, next, layers[i] - 1);
        next = layers[i] + 1;
    }
    return status;
}

/* Gives every layer the linears and biases that any layer of experts has; those without a key are then missing. */
static gmm_status gmm__ck_scan_members(gmm__ck_builder *b) {
    int bias[GMM_CKPT_SLOT_COUNT], slot_present[GMM_CKPT_SLOT_COUNT], slot;
    const int64_t count = b->linear_count;
    int64_t i;
    memset(bias, 0, sizeof bias);
    memset(slot_present, 0, sizeof slot_present);
    slot_present[GMM_CKPT_FC1] = slot_present[GMM_CKPT_FC2] = 1;
    for (i = 0; i < count; i++) {
        slot_present[b->linears[i].slot] = 1;
        bias[b->linears[i].slot] |= b->linears[i].bias;
    }
    slot_present[GMM_CKPT_SHARED_FC1] = slot_present[GMM_CKPT_SHARED_FC2] =
        slot_present[GMM_CKPT_SHARED_FC1] | slot_present[GMM_CKPT_SHARED_FC2];
    for (i = 0; i < count; i++) {
        const int64_t layer = b->linears[i].layer, router = gmm__ck_find_slot(b, GMM_CKPT_ROUTER, layer);
        const int64_t fc1 = gmm__ck_find_slot(b, GMM_CKPT_FC1, layer), fc2 = gmm__ck_find_slot(b, GMM_CKPT_FC2, layer);
        for (slot = 0; slot < GMM_CKPT_SLOT_COUNT; slot++) {
            const gmm_ckpt_row *row = NULL;
            gmm_ckpt_linear missing = GMM_ZERO;
            gmm_status status;
            if (!slot_present[slot] || gmm__ck_find_slot(b, (gmm_ckpt_slot)slot, layer) >= 0) continue;
            missing.slot = (gmm_ckpt_slot)slot;
            missing.layer = layer;
            missing.experts = 1;
            if (slot == GMM_CKPT_FC1 || slot == GMM_CKPT_FC2)
                missing.experts = fc1 >= 0 ? b->linears[fc1].experts : fc2 >= 0 ? b->linears[fc2].experts
                              : router >= 0 ? b->linears[router].out : 1;
            if (!gmm__ck_find_row(b->source.scheme, &missing, GMM_CKPT_WEIGHT, &row)) continue;
            status = gmm__ck_add_linear(b, &missing);
            if (status) return status;
        }
    }
    for (i = 0; i < b->linear_count; i++) b->linears[i].bias |= bias[b->linears[i].slot];
    return GMM_OK;
}

/* Refuses a source that lacks layers, linears or experts. */
static gmm_status gmm__ck_scan_missing(gmm__ck_builder *b) {
    const int64_t count = b->linear_count;
    gmm_ckpt_row layer = GMM_ZERO;
    gmm_status status = GMM_OK;
    int32_t r;
    for (r = 0; r < b->source.scheme->count && !layer.pattern; r++) {
        const char *pattern = b->source.scheme->rows[r].pattern, *placeholder = strstr(pattern, "{L}");
        char *head;
        if (!placeholder) continue;
        head = (char *)gmm__ck_alloc(&b->arena, placeholder - pattern + 4, 1);
        if (!head) return gmm__ck_no_memory(b);
        memcpy(head, pattern, (size_t)(placeholder - pattern));
        status = gmm__ck_scan_layers(b, head);
        memcpy(head + (placeholder - pattern), "{e}", 4); /* missing layers are stored like missing experts */
        layer.pattern = head;
    }
    if (!status && !b->source.skip_missing) status = gmm__ck_scan_members(b);
    if (!status) status = gmm__ck_find_missing(b);
    if (!status) status = gmm__ck_refuse_incomplete(b, &layer);
    b->linear_count = count;
    return status;
}

GMMDEF gmm_status gmm_ckpt_scan(const gmm_ckpt_source *source, int64_t experts, gmm_ckpt_linear **linears,
                                int64_t *count, const gmm_allocator *allocator, gmm_ckpt_report *report) {
    static const char fn[] = "gmm_ckpt_scan";
    const gmm_ckpt_target nothing = GMM_ZERO;
    gmm__ck_builder b;
    gmm_status status;
    int64_t i, remaining;
    if (!source || !linears || !count)
        return gmm__ck_fail_null(fn, !source ? "source" : !linears ? "linears" : "count", report);
    *linears = NULL;
    *count = 0;
    status = gmm__ck_builder_init(&b, fn, NULL, allocator, report);
    b.scan = 1;
    if (!status) status = gmm__ck_read_descriptors(&b, source, &nothing);
    if (!status && (experts < 0 || experts > INT32_MAX))
        status = gmm__ck_refuse(&b, GMM_CKPT_ARGUMENT, NULL, "experts is %lld", (long long)experts);
    if (!status) status = gmm__ck_read_keys(&b);
    if (!status) status = gmm__ck_scan_extents(&b, experts);
    if (!status) status = gmm__ck_check_layers(&b);
    if (!status && b.linear_count) status = gmm__ck_scan_missing(&b);
    for (i = remaining = 0; !status && i < b.linear_count; i++) /* linears without a weight are removed */
        if (b.linears[i].out) b.linears[remaining++] = b.linears[i];
    if (!status) b.linear_count = remaining;
    if (!status && b.linear_count) {
        qsort(b.linears, (size_t)b.linear_count, sizeof *b.linears, gmm__ck_compare_linears);
        *linears = (gmm_ckpt_linear *)b.arena.allocator.alloc(b.arena.allocator.user,
                                                             (size_t)b.linear_count * sizeof **linears);
        if (!*linears) status = gmm__ck_no_memory(&b);
    }
    if (!status && b.linear_count) {
        memcpy(*linears, b.linears, (size_t)b.linear_count * sizeof **linears);
        *count = b.linear_count;
    }
    return gmm__ck_builder_release(&b, NULL, status);
}

GMMDEF void gmm_ckpt_linears_release(gmm_ckpt_linear *linears, const gmm_allocator *allocator) {
    const gmm_allocator a = gmm__ck_allocator(allocator);
    if (linears) a.release(a.user, linears);
}

/* ............................................................... 15.8 Megatron-LM's normalizers and small rules ... */
/* Megatron-LM's key normalizers, and its rules for splits, shards and stored keys. */

GMMDEF gmm_status gmm_ckpt_split(const gmm_ckpt_tensor *tensor, int32_t members, int32_t experts,
                                 gmm_ckpt_tensor *parts, gmm_ckpt_report *report) {
    static const char fn[] = "gmm_ckpt_split";
    gmm_ckpt_tensor part;
    int32_t e, d;
    char shape[160];
    if (!tensor || !parts) return gmm__ck_fail_null(fn, tensor ? "parts" : "tensor", report);
    gmm__ck_reset_report(report);
    if (tensor->rank < 0 || tensor->rank > GMM_CKPT_RANK || experts < 1 || members < 0)
        return gmm__ck_fail(report, GMM_CKPT_ARGUMENT, tensor->name, fn,
                            "rank %d, %d members, %d experts: out of range", (int)tensor->rank, members, experts);
    if (members && members != experts)
        return gmm__ck_fail(report, GMM_CKPT_GROUP_COUNT, tensor->name, fn, "it has %d groups, %d experts are expected",
                            members, experts);
    gmm__ck_shape_text(shape, sizeof shape, tensor->rank, tensor->shape);
    if (tensor->rank == 0 || tensor->shape[0] % experts || tensor->bytes % experts)
        return gmm__ck_fail(report, GMM_CKPT_NOT_DIVISIBLE, tensor->name, fn, "shape %s does not split into %d experts",
                            shape, experts);
    part = *tensor;
    part.bytes = tensor->bytes / experts;
    if (tensor->shape[0] == experts) {
        part.rank--;
        for (d = 0; d < part.rank; d++) part.shape[d] = tensor->shape[d + 1];
        part.shape[part.rank] = 0;
    } else {
        part.shape[0] /= experts;
    }
    for (e = 0; e < experts; e++) {
        parts[e] = part;
        parts[e].offset = tensor->offset + e * part.bytes;
    }
    return GMM_OK;
}

/* Keys as Megatron-LM's rules change them: first those of the table, then the keys that stacking and splitting made. A
   key that was stacked or split is marked replaced. The bytes of a key are its runs, concatenated. */
typedef struct gmm__ck_key_run { int64_t at, units; int32_t src; } gmm__ck_key_run;
typedef struct gmm__ck_key_entry {
    gmm_ckpt_tensor tensor;
    gmm__ck_key_run *runs;
    int64_t count;
    int replaced;
} gmm__ck_key_entry;

typedef struct gmm__ck_key_list {
    gmm__ck_key_entry *entries;
    int64_t count, capacity;
} gmm__ck_key_list;

/* The keys of one parameter of one module. */
typedef struct gmm__ck_key_group {
    int64_t grouped, grouped_count; /* entry, and how many match */
    int64_t *index;                 /* [experts] entries */
    int32_t *index_count;           /* [experts] */
    int32_t any, one, all;          /* whether any index has keys, and any or every one has exactly one */
} gmm__ck_key_group;

/* Adds a key and allocates its runs; NULL without memory. */
static gmm__ck_key_entry *gmm__ck_add_entry(gmm__ck_builder *b, gmm__ck_key_list *keys, const gmm_ckpt_tensor *tensor,
                                            int64_t runs) {
    void *array = keys->entries;
    gmm__ck_key_entry *e;
    if (!gmm__ck_reserve(&b->arena, &array, keys->count, &keys->capacity, sizeof *keys->entries)) return NULL;
    keys->entries = (gmm__ck_key_entry *)array;
    e = &keys->entries[keys->count];
    memset(e, 0, sizeof *e);
    e->tensor = *tensor;
    e->runs = (gmm__ck_key_run *)gmm__ck_alloc(&b->arena, runs, sizeof *e->runs);
    if (!e->runs) return NULL;
    keys->count++;
    return e;
}

/* "weight12": the length before the digits and the index; -1 where no index stands at the end. */
static size_t gmm__ck_split_index(const char *name, int64_t *index) {
    const size_t length = strlen(name);
    size_t first_digit = length;
    const char *digits;
    while (first_digit && name[first_digit - 1] >= '0' && name[first_digit - 1] <= '9') first_digit--;
    while (name[first_digit] == '0' && name[first_digit + 1]) first_digit++; /* "weight01" is "weight0" and 1 */
    digits = name + first_digit;
    if (gmm__ck_parse_number(&digits, index)) return first_digit;
    *index = -1;
    return length;
}

/* Stacks the keys of all experts into one of this name. */
static gmm_status gmm__ck_stack_keys(gmm__ck_builder *b, gmm__ck_key_list *keys, const gmm__ck_key_group *f,
                                     int64_t experts, const char *name) {
    const gmm_ckpt_tensor first = keys->entries[f->index[0]].tensor;
    gmm_ckpt_tensor t = first;
    gmm__ck_key_entry *stack;
    int64_t e, runs = 0;
    if (first.rank == GMM_CKPT_RANK)
        return gmm__ck_refuse(b, GMM_CKPT_SHAPE, first.name, "a stack of it would have %d dimensions", first.rank + 1);
    for (e = t.rank++; e > 0; e--) t.shape[e] = t.shape[e - 1];
    t.shape[0] = experts;
    t.name = name;
    if (!gmm__mul(first.bytes, experts, &t.bytes))
        return gmm__ck_refuse(b, GMM_CKPT_OVERFLOW, first.name, "a stack of it does not fit 63 bits");
    for (e = 0; e < experts; e++) {
        const gmm_ckpt_tensor *s = &keys->entries[f->index[e]].tensor;
        if (s->dtype != first.dtype)
            return gmm__ck_refuse(b, GMM_CKPT_DTYPE, s->name, "it is %s, the first of the stack %s",
                                  gmm_dtype_name(s->dtype), gmm_dtype_name(first.dtype));
        if (s->rank != first.rank || s->bytes != first.bytes ||
            memcmp(s->shape, first.shape, (size_t)s->rank * sizeof s->shape[0]))
            return gmm__ck_refuse(b, GMM_CKPT_SHAPE, s->name, "the first of the stack has another shape");
        runs += keys->entries[f->index[e]].count;
    }
    stack = gmm__ck_add_entry(b, keys, &t, runs);
    if (!stack) return gmm__ck_no_memory(b);
    for (e = 0; e < experts; e++) {
        gmm__ck_key_entry *member = &keys->entries[f->index[e]];
        memcpy(stack->runs + stack->count, member->runs, (size_t)member->count * sizeof *member->runs);
        stack->count += member->count;
        member->replaced = 1;
    }
    return GMM_OK;
}

/* Splits the grouped key into one key per expert, named `name` and its index. */
static gmm_status gmm__ck_split_key(gmm__ck_builder *b, gmm__ck_key_list *keys, const gmm__ck_key_group *f,
                                    int64_t experts, const char *name, size_t length) {
    const gmm__ck_key_entry grouped = keys->entries[f->grouped];
    gmm_ckpt_tensor *parts = (gmm_ckpt_tensor *)gmm__ck_alloc(&b->arena, experts, sizeof *parts);
    int64_t e, run = 0, run_offset = 0;
    gmm_status status;
    if (!parts) return gmm__ck_no_memory(b);
    status = gmm_ckpt_split(&grouped.tensor, 0, (int32_t)experts, parts, b->report);
    if (status) return status;
    keys->entries[f->grouped].replaced = 1;
    for (e = 0; e < experts; e++) {
        int64_t remaining = gmm__ck_unit_count(&parts[e]);
        char *name_copy = (char *)gmm__ck_alloc(&b->arena, (int64_t)length + 24, 1);
        gmm__ck_key_entry *member;
        if (!name_copy) return gmm__ck_no_memory(b);
        (void)snprintf(name_copy, length + 24, "%s%lld", name, (long long)e);
        parts[e].name = name_copy;
        member = gmm__ck_add_entry(b, keys, &parts[e], grouped.count);
        if (!member) return gmm__ck_no_memory(b);
        while (remaining > 0) {
            gmm__ck_key_run *piece = &member->runs[member->count++];
            *piece = grouped.runs[run];
            piece->at += run_offset;
            piece->units = gmm__min_i64(remaining, piece->units - run_offset);
            run_offset += piece->units;
            remaining -= piece->units;
            if (run_offset == grouped.runs[run].units) {
                run_offset = 0;
                run++;
            }
        }
    }
    return GMM_OK;
}

/* Finds the keys of one parameter: `stem`, and `stem` with an index. Keys are equal to them where `exact` is 1, or else
   end with them. */
static gmm_status gmm__ck_find_group(gmm__ck_builder *b, const gmm__ck_key_list *keys, int64_t experts,
                                     const char *stem, int exact, gmm__ck_key_group *f) {
    const size_t stem_length = strlen(stem);
    int64_t i, e;
    memset(f, 0, sizeof *f);
    f->index = (int64_t *)gmm__ck_alloc(&b->arena, experts, sizeof *f->index);
    f->index_count = (int32_t *)gmm__ck_alloc(&b->arena, experts, sizeof *f->index_count);
    if (!f->index || !f->index_count) return gmm__ck_no_memory(b);
    for (i = 0; i < keys->count; i++) {
        const char *key = keys->entries[i].tensor.name;
        size_t length = strlen(key);
        int64_t index = -1;
        if (keys->entries[i].replaced) continue;
        if (length >= stem_length && !strcmp(key + length - stem_length, stem) && (!exact || length == stem_length)) {
            f->grouped = i;
            f->grouped_count++;
        }
        length = gmm__ck_split_index(key, &index);
        if (index < 0 || index >= experts || length < stem_length || (exact && length != stem_length) ||
            memcmp(key + length - stem_length, stem, stem_length))
            continue;
        f->index[index] = i;
        f->index_count[index]++;
    }
    f->all = 1;
    for (e = 0; e < experts; e++) {
        f->any |= f->index_count[e] > 0;
        f->one |= f->index_count[e] == 1;
        f->all &= f->index_count[e] == 1;
    }
    return GMM_OK;
}

/* Stacks or splits the keys of one group. `name` is the stacked key's. */
static gmm_status gmm__ck_convert_group(gmm__ck_builder *b, gmm__ck_key_list *keys, const gmm__ck_key_group *f,
                                        int64_t experts, const char *name, int32_t grouped) {
    return grouped ? gmm__ck_stack_keys(b, keys, f, experts, name)
                   : gmm__ck_split_key(b, keys, f, experts, name, strlen(name));
}

/* One expert's tensor of a group; fails where the stacked tensor does not split. */
static gmm_status gmm__ck_group_member(gmm__ck_builder *b, const gmm__ck_key_list *keys, const gmm__ck_key_group *f,
                                       int64_t experts, int32_t grouped, gmm_ckpt_tensor *member) {
    gmm_ckpt_tensor *parts;
    gmm_status status;
    *member = keys->entries[grouped ? f->index[0] : f->grouped].tensor;
    if (grouped) return GMM_OK;
    parts = (gmm_ckpt_tensor *)gmm__ck_alloc(&b->arena, experts, sizeof *parts);
    if (!parts) return gmm__ck_no_memory(b);
    status = gmm_ckpt_split(member, 0, (int32_t)experts, parts, b->report);
    *member = parts[0];
    return status;
}

/* Finds the format of one expert's codes from one expert's scales. */
static gmm_status gmm__ck_upstream_format(gmm__ck_builder *b, const gmm_ckpt_row *row, const gmm_ckpt_tensor *codes,
                                          const gmm_ckpt_tensor *scale, const gmm__ck_format **format) {
    gmm__ck_quantized q;
    int32_t dims;
    uint32_t dtypes;
    char shapes[200], names[64], actual[160];
    memset(&q, 0, sizeof q);
    q.row = row;
    q.codes = codes;
    q.scale = scale;
    q.experts = 1;
    q.packed = gmm__ck_is_packed(codes->dtype);
    q.dims = codes->rank;
    if (codes->rank != 1 && codes->rank != 2)
        return gmm__ck_refuse(b, GMM_CKPT_SHAPE, codes->name, "an expert's codes of %d dimensions are no matrix with "
                              "scales", (int)codes->rank);
    q.rows = codes->shape[0];
    q.cols = codes->rank == 1 ? 1 : codes->shape[1] * (codes->dtype == GMM_U8 ? 2 : 1);
    *format = gmm__ck_find_format(&q, &dims, &dtypes, shapes, sizeof shapes);
    if (*format) return GMM_OK;
    if (!(dtypes >> scale->dtype & 1))
        return gmm__ck_refuse(b, GMM_CKPT_DTYPE, scale->name, "scales of %s codes must be %s, not %s",
                              gmm_dtype_name(codes->dtype), gmm__ck_dtype_names(dtypes, names, sizeof names),
                              gmm_dtype_name(scale->dtype));
    gmm__ck_shape_text(actual, sizeof actual, scale->rank, scale->shape);
    return gmm__ck_refuse(b, GMM_CKPT_SHAPE, scale->name, "an expert's shape %s is not that of the %s scales of %lld x "
                          "%lld codes: %s", actual, gmm_dtype_name(scale->dtype), (long long)q.rows, (long long)q.cols,
                          shapes);
}

/* Checks that the scales of one kind have the layout that their weights are converted from. `stem` is their stacked
   key. *present tells whether there are any. */
static gmm_status gmm__ck_check_group(gmm__ck_builder *b, const gmm__ck_key_group *f, int64_t experts,
                                      const char *stem, int32_t grouped, int *present) {
    const size_t capacity = strlen(stem) + 24;
    int64_t e;
    char *name;
    *present = f->any || f->grouped_count;
    if (!*present || (grouped ? f->all && !f->grouped_count : f->grouped_count == 1 && !f->any)) return GMM_OK;
    if (f->grouped_count && f->any)
        return gmm__ck_refuse(b, GMM_CKPT_BOTH_LAYOUTS, stem, "scales are there for all experts together and for each");
    if (grouped == (f->grouped_count > 0))
        return gmm__ck_refuse(b, GMM_CKPT_SCALE_MISSING, stem, "the weights are %s, these scales are %s: both must be "
                              "alike", grouped ? "of one expert each" : "of all experts",
                              grouped ? "of all experts" : "of one expert each");
    for (e = 0; e < experts && f->index_count[e] == 1; e++) {}
    name = (char *)gmm__ck_alloc(&b->arena, (int64_t)capacity, 1);
    if (!name) return gmm__ck_no_memory(b);
    (void)snprintf(name, capacity, "%s%lld", stem, (long long)e);
    return gmm__ck_refuse(b, f->index_count[e] ? GMM_CKPT_AMBIGUOUS : GMM_CKPT_SCALE_MISSING, name,
                          "the source has it %s", f->index_count[e] ? "several times" : "not, the other experts' "
                                                                                        "scales are there");
}

/* Converts the scales of quantized weights as the weights: `weight` is the stacked key of the weights, `codes` one
   expert's tensor. A quantized stack of Megatron-LM is one object, whose members have their scales. */
static gmm_status gmm__ck_convert_scales(gmm__ck_builder *b, gmm__ck_key_list *keys, int64_t experts,
                                         const char *weight, const gmm_ckpt_tensor *codes, int32_t grouped) {
    static const char front[] = "{p}.weight";
    const int32_t count = (int32_t)(sizeof gmm__ck_module / sizeof gmm__ck_module[0]);
    const gmm__ck_format *format = NULL;
    const gmm_ckpt_row *each;
    int32_t r;
    int beside = 0;
    for (r = 0; r < count; r++) { /* scales stand before the kinds beside them */
        const gmm_ckpt_row *row = &gmm__ck_module[r];
        gmm__ck_key_group f;
        gmm_ckpt_tensor member;
        gmm_status status;
        int64_t elements = 1;
        int32_t d;
        int present = 0;
        char *stem;
        if (row->form == GMM_CKPT_EACH || row->kind < GMM_CKPT_SCALE) continue;
        stem = (char *)gmm__ck_alloc(&b->arena, (int64_t)(strlen(weight) + strlen(row->pattern)), 1);
        if (!stem) return gmm__ck_no_memory(b);
        memcpy(stem, weight, strlen(weight));
        memcpy(stem + strlen(weight), row->pattern + sizeof front - 1, strlen(row->pattern) - (sizeof front - 1));
        for (each = gmm__ck_module; each->kind != row->kind || !gmm__ck_same_suffix(each, row); each++) {}
        if (row->kind != GMM_CKPT_SCALE && format && !(format->beside >> row->kind & 1)) continue;
        status = gmm__ck_find_group(b, keys, experts, stem, 1, &f);
        if (!status && row->kind != GMM_CKPT_SCALE && !format && (f.any || f.grouped_count))
            return gmm__ck_refuse(b, GMM_CKPT_SCALE_MISSING, codes->name, "the source lacks its scales");
        if (!status) status = gmm__ck_check_group(b, &f, experts, stem, grouped, &present);
        if (status) return status;
        if (!present) continue;
        if (row->kind == GMM_CKPT_SCALE && format)
            return gmm__ck_refuse(b, GMM_CKPT_BOTH_LAYOUTS, stem, "its scales are there under another name too");
        status = gmm__ck_group_member(b, keys, &f, experts, grouped, &member);
        if (status) return status;
        if (row->kind == GMM_CKPT_SCALE) status = gmm__ck_upstream_format(b, each, codes, &member, &format);
        for (d = 0; d < member.rank; d++) elements = member.shape[d] == 1 ? elements : 0;
        if (row->kind != GMM_CKPT_SCALE && (member.dtype != GMM_F32 || !elements))
            return gmm__ck_refuse(b, elements ? GMM_CKPT_DTYPE : GMM_CKPT_SHAPE, member.name, "it must have one f32 "
                                  "for each expert, not %s", elements ? gmm_dtype_name(member.dtype) : "more");
        if (!status) status = gmm__ck_convert_group(b, keys, &f, experts, stem, grouped);
        if (status) return status;
        beside |= row->kind != GMM_CKPT_SCALE;
    }
    if (!format && codes->dtype != GMM_U8)
        return gmm__ck_refuse(b, GMM_CKPT_SCALE_MISSING, codes->name, "the source lacks its scales");
    if (format && format->needs_beside && !beside)
        return gmm__ck_refuse(b, GMM_CKPT_SCALE_MISSING, codes->name, "the source lacks its tensor scale or amax: %s "
                              "has one beside its scales", gmm_scaling_name(format->scaling));
    return GMM_OK;
}

/* Replaces keys of one parameter as upstream does, and the scales of weights. `stem` is what keys are, or end with,
   before the index. */
static gmm_status gmm__ck_convert_upstream(gmm__ck_builder *b, gmm__ck_key_list *keys, const gmm_ckpt_linear *l,
                                           const char *stem, int exact, int bias) {
    const int32_t grouped = bias ? l->grouped_bias : l->grouped_weight;
    const size_t stem_length = strlen(stem);
    gmm__ck_key_group f;
    gmm_ckpt_tensor codes;
    const char *first;
    char *name;
    size_t prefix;
    gmm_status status = gmm__ck_find_group(b, keys, l->experts, stem, exact, &f);
    if (status) return status;
    if (grouped ? f.grouped_count || !f.all : f.one || f.grouped_count != 1) return GMM_OK;
    first = keys->entries[grouped ? f.index[0] : f.grouped].tensor.name;
    prefix = strlen(first) - stem_length - (grouped ? 1 : 0); /* index 0 is one digit */
    name = (char *)gmm__ck_alloc(&b->arena, (int64_t)(prefix + stem_length + 1), 1);
    if (!name) return gmm__ck_no_memory(b);
    memcpy(name, first, prefix);
    memcpy(name + prefix, stem, stem_length);
    status = gmm__ck_group_member(b, keys, &f, l->experts, grouped, &codes);
    if (!status) status = gmm__ck_convert_group(b, keys, &f, l->experts, name, grouped);
    if (status || bias || !((GMM__CK_CODES_8 | GMM__CK_CODES_4) >> codes.dtype & 1)) return status;
    return gmm__ck_convert_scales(b, keys, l->experts, name, &codes, grouped);
}

/* All keys of the table, each one run. */
static gmm_status gmm__ck_list_keys(gmm__ck_builder *b, gmm__ck_key_list *keys) {
    const gmm_ckpt_table *table = b->parts[0].table;
    int64_t i;
    b->uses = (uint8_t **)gmm__ck_alloc(&b->arena, 1, sizeof *b->uses);
    if (b->uses) b->uses[0] = (uint8_t *)gmm__ck_alloc(&b->arena, table->count + 1, 1);
    if (!b->uses || !b->uses[0]) return gmm__ck_no_memory(b);
    for (i = 0; i < table->count; i++) {
        gmm__ck_key_entry *e = gmm__ck_add_entry(b, keys, &table->tensors[i], 1);
        if (!e) return gmm__ck_no_memory(b);
        e->count = 1;
        e->runs->src = (int32_t)i;
        e->runs->units = gmm__ck_unit_count(&e->tensor);
    }
    return GMM_OK;
}

/* Plans the targets of the keys that stacking and splitting made. */
static gmm_status gmm__ck_plan_keys(gmm__ck_builder *b, const gmm__ck_key_list *keys) {
    int64_t i, r;
    for (i = 0; i < keys->count; i++) {
        const gmm__ck_key_entry *e = &keys->entries[i];
        const int64_t first = b->move_count;
        gmm_ckpt_tensor t = e->tensor;
        int64_t offset = 0;
        int32_t target = -1;
        gmm_status status;
        if (i < b->parts[0].table->count) b->uses[0][i] = e->replaced ? GMM__CK_USED : GMM__CK_UNUSED;
        if (i < b->parts[0].table->count || e->replaced) continue;
        status = gmm__ck_add_target(b, &t, &target);
        for (r = 0; !status && r < e->count; r++) {
            status = gmm__ck_plan_copy(b, 0, e->runs[r].src, e->runs[r].at, target, offset, e->runs[r].units);
            offset += e->runs[r].units;
        }
        if (!status) status = gmm__ck_finish_target(b, target, first);
        if (status) return status;
    }
    return GMM_OK;
}

/* Arguments in which the two normalizers differ. */
typedef struct gmm__ck_normalize_args {
    const char *fn;
    const gmm_ckpt_table *table;
    const char *prefix;             /* of the hook's module; NULL = linears have paths */
    const gmm_ckpt_linear *linears; /* [count] */
    int64_t count;
    gmm_ckpt_parity parity;
} gmm__ck_normalize_args;

/* Plans the normalized table of both functions. */
static gmm_status gmm__ck_normalize(gmm_ckpt_plan **out, const gmm__ck_normalize_args *args,
                                    const gmm_allocator *allocator, gmm_ckpt_report *report) {
    static const char *const module[] = {"module", "_orig_mod"};
    static const char *const names[] = {"weight", "bias"};
    gmm_ckpt_source source = GMM_ZERO;
    gmm_ckpt_target target = GMM_ZERO;
    gmm_ckpt_part part = GMM_ZERO;
    gmm__ck_key_list keys;
    gmm__ck_builder b;
    gmm_status status;
    const char *prefix = args->prefix;
    int64_t i;
    int kind;
    memset(&keys, 0, sizeof keys);
    part.table = args->table;
    source.parts = &part;
    source.part_count = 1;
    source.scheme = gmm_ckpt_scheme_of("module");
    source.prefix = prefix;
    source.wrappers = module;
    source.wrapper_count = prefix ? 0 : 2;
    source.extra = GMM_CKPT_EXTRA_KEEP;
    target.views = 1;
    if (args->parity != GMM_CKPT_UPSTREAM)
        return gmm__ck_create(args->fn, out, &source, &target, args->linears, args->count, allocator, report);
    status = gmm__ck_builder_init(&b, args->fn, out, allocator, report);
    if (!status) status = gmm__ck_read_descriptors(&b, &source, &target);
    if (!status) status = gmm__ck_list_keys(&b, &keys);
    for (i = 0; !status && i < args->count; i++) {
        const gmm_ckpt_linear *l = &args->linears[i];
        const char *path = prefix ? prefix : l->path ? l->path : "";
        char *stem;
        if (l->experts < 1 || l->experts > INT32_MAX) {
            status = gmm__ck_refuse(&b, GMM_CKPT_ARGUMENT, l->path, "linears[%lld].experts is %lld", (long long)i,
                                    (long long)l->experts);
            break;
        }
        while (!prefix && !strncmp(path, "module.", 7)) path += 7;
        stem = (char *)gmm__ck_alloc(&b.arena, (int64_t)strlen(path) + 16, 1);
        if (!stem) status = gmm__ck_no_memory(&b);
        for (kind = 0; !status && kind < (l->bias ? 2 : 1); kind++) {
            (void)snprintf(stem, strlen(path) + 16, "%s%s%s", path, prefix || !*path ? "" : ".", names[kind]);
            status = gmm__ck_convert_upstream(&b, &keys, l, stem, prefix != NULL, kind);
        }
    }
    if (!status) status = gmm__ck_plan_keys(&b, &keys);
    if (!status) status = gmm__ck_plan_extra(&b);
    if (!status) status = gmm__ck_build_plan(&b, *out);
    return gmm__ck_builder_release(&b, out, status);
}

GMMDEF gmm_status gmm_ckpt_normalize_hook(gmm_ckpt_plan **out, const gmm_ckpt_table *table, const char *prefix,
                                          const gmm_ckpt_linear *linear, gmm_ckpt_parity parity,
                                          const gmm_allocator *allocator, gmm_ckpt_report *report) {
    static const char fn[] = "gmm_ckpt_normalize_hook";
    gmm__ck_normalize_args args;
    gmm_ckpt_linear l;
    if (out) *out = NULL;
    if (!out || !table || !prefix || !linear)
        return gmm__ck_fail_null(fn, !out ? "out" : !table ? "table" : !prefix ? "prefix" : "linear", report);
    l = *linear;
    l.path = "";
    args.fn = fn;
    args.table = table;
    args.prefix = prefix;
    args.linears = &l;
    args.count = 1;
    args.parity = parity;
    return gmm__ck_normalize(out, &args, allocator, report);
}

GMMDEF gmm_status gmm_ckpt_normalize_map(gmm_ckpt_plan **out, const gmm_ckpt_table *table,
                                         const gmm_ckpt_linear *linears, int64_t count, gmm_ckpt_parity parity,
                                         const gmm_allocator *allocator, gmm_ckpt_report *report) {
    static const char fn[] = "gmm_ckpt_normalize_map";
    gmm__ck_normalize_args args;
    int64_t i;
    if (out) *out = NULL;
    if (!out || !table || (!linears && count))
        return gmm__ck_fail_null(fn, !out ? "out" : !table ? "table" : "linears", report);
    for (i = 0; i < count; i++)
        if (!linears[i].path) return gmm__ck_fail_null(fn, "linears: a path", report);
    args.fn = fn;
    args.table = table;
    args.prefix = NULL;
    args.linears = linears;
    args.count = count;
    args.parity = parity;
    return gmm__ck_normalize(out, &args, allocator, report);
}

GMMDEF gmm_status gmm_ckpt_shard_members(const int64_t *numel, int32_t members, int64_t start, int64_t length,
                                         gmm_ckpt_interval *out, gmm_error *error) {
    static const char fn[] = "gmm_ckpt_shard_members";
    int64_t total = 0, member_begin = 0;
    int32_t i;
    if (!out || (!numel && members > 0)) return gmm__fail(error, GMM_E_NULL, "%s: %s is NULL", fn,
                                                          out ? "numel" : "out");
    if (members < 0) return gmm__fail(error, GMM_E_ARG, "%s: members is %d: must be >= 0", fn, members);
    for (i = 0; i < members; i++) {
        if (numel[i] < 0)
            return gmm__fail(error, GMM_E_ARG, "%s: numel[%d] is %lld: must be >= 0", fn, i, (long long)numel[i]);
        if (numel[i] > INT64_MAX - total)
            return gmm__fail(error, GMM_E_OVERFLOW, "%s: the members do not fit 63 bits", fn);
        total += numel[i];
    }
    if (length < 0 || start < -1 || (start == -1 && length))
        return gmm__fail(error, GMM_E_ARG, "%s: start %lld, length %lld: must be >= 0, or -1 and 0 for no shard", fn,
                         (long long)start, (long long)length);
    if (start > total || length > total - (start < 0 ? 0 : start))
        return gmm__fail(error, GMM_E_ARG, "%s: the shard of %lld at %lld passes the end of %lld elements", fn,
                         (long long)length, (long long)start, (long long)total);
    for (i = 0; i < members; i++) {
        const int64_t begin = start > member_begin ? start : member_begin;
        const int64_t end = gmm__min_i64(start + length, member_begin + numel[i]);
        const int empty = start < 0 || begin >= end;
        out[i].shard_at = empty ? -1 : begin - start;
        out[i].member_at = empty ? -1 : begin - member_begin;
        out[i].length = empty ? 0 : end - begin;
        member_begin += numel[i];
    }
    return GMM_OK;
}

GMMDEF gmm_status gmm_ckpt_stored_key(const gmm_ckpt_stored *stored, char *key, size_t room, gmm_ckpt_place *place,
                                      gmm_error *error) {
    static const char fn[] = "gmm_ckpt_stored_key";
    gmm_ckpt_stored s;
    gmm_ckpt_place result = GMM_ZERO;
    char number[32];
    int n;
    if (!stored || !key || !place)
        return gmm__fail(error, GMM_E_NULL, "%s: %s is NULL", fn, !stored ? "stored" : !key ? "key" : "place");
    if (!gmm__copy_sized(&s, sizeof s, stored))
        return gmm__fail(error, GMM_E_VERSION, "%s: stored: struct_size %u is larger than the %u bytes of version %s",
                         fn,
                         stored->struct_size, (unsigned)sizeof s, GMM_VERSION_STRING);
    if (s.ep_size == 0) s.ep_size = 1;
    if (s.etp_size == 0) s.etp_size = 1;
    if (!s.prefix || (s.slot != GMM_CKPT_FC1 && s.slot != GMM_CKPT_FC2) ||
        (s.kind != GMM_CKPT_WEIGHT && s.kind != GMM_CKPT_BIAS) || s.experts_local < 1 || s.index < 0 ||
        s.index >= s.experts_local || s.ep_rank < 0 || s.ep_rank >= s.ep_size || s.etp_rank < 0 ||
        s.etp_rank >= s.etp_size || s.experts_local > INT64_MAX / s.ep_size || s.half < GMM_CKPT_BOTH ||
        s.half > GMM_CKPT_UP || (s.half != GMM_CKPT_BOTH) != (s.slot == GMM_CKPT_FC1 && s.gated))
        return gmm__fail(error, GMM_E_ARG,
                         "%s: slot %d, kind %d, half %d, expert %lld of %lld, EP %d/%d, ETP %d/%d: out of range, or a "
                         "gated FC1 without its half", fn, (int)s.slot, (int)s.kind, (int)s.half, (long long)s.index,
                         (long long)s.experts_local, s.ep_rank, s.ep_size, s.etp_rank, s.etp_size);
    result.expert = s.ep_rank * s.experts_local + s.index;
    result.experts = s.ep_size * s.experts_local;
    result.axis = s.slot == GMM_CKPT_FC1 ? 0 : s.kind == GMM_CKPT_WEIGHT ? 1 : -1;
    result.fragment = result.axis < 0 ? 0 : s.etp_rank + (s.half == GMM_CKPT_UP && !s.singleton ? s.etp_size : 0);
    result.fragments = result.axis < 0 ? 1 : s.etp_size * (s.half != GMM_CKPT_BOTH && !s.singleton ? 2 : 1);
    (void)snprintf(number, sizeof number, "%lld.", (long long)result.expert);
    n = snprintf(key, room, "%sexperts.experts.%slinear_fc%d.%s%s", s.prefix, s.singleton ? number : "",
                 s.slot == GMM_CKPT_FC1 ? 1 : 2, s.kind == GMM_CKPT_WEIGHT ? "weight" : "bias",
                 !s.singleton || s.half == GMM_CKPT_BOTH ? "" : s.half == GMM_CKPT_GATE ? "_w" : "_v");
    if (n < 0 || (size_t)n >= room)
        return gmm__fail(error, GMM_E_WORKSPACE, "%s: room is %llu: the key takes %d bytes", fn,
                         (unsigned long long)room, n + 1);
    *place = result;
    return GMM_OK;
}

/* .............................................................................................. 15.9 Verifying ... */
/* Verifies the moves of a plan, and makes plans of given moves. */

/* A set of elements as nested strided loops, outermost first. */
typedef struct gmm__ck_element_set {
    int64_t offset, count[GMM_CKPT_LOOPS], step[GMM_CKPT_LOOPS];
    int32_t loops;
} gmm__ck_element_set;

/* Distance from the first to the last element, plus one. */
static int64_t gmm__ck_set_span(const gmm__ck_element_set *s) {
    int64_t n = 1;
    int32_t l;
    for (l = 0; l < s->loops; l++) n += (s->count[l] - 1) * s->step[l];
    return n;
}

/* Whether two sets share no element; neither holds an element twice. The outermost loop with the larger step is
   expanded; where both steps are equal, the inner loops are compared modulo that step. */
static int gmm__ck_disjoint(const gmm__ck_element_set *a, const gmm__ck_element_set *b) {
    const int64_t ah = gmm__ck_set_span(a), bh = gmm__ck_set_span(b);
    if (a->offset + ah <= b->offset || b->offset + bh <= a->offset) return 1;
    if (a->loops == 0 || (b->loops && b->step[0] > a->step[0])) {
        if (b->loops == 0) return 0; /* both are one element, the same */
        return gmm__ck_disjoint(b, a);
    }
    if (a->step[0] == 1 && (b->loops == 0 || b->step[0] == 1)) return 0; /* two runs */
    {
        gmm__ck_element_set inner = *a, other = *b;
        const int64_t step = a->step[0];
        int64_t i;
        int32_t l;
        inner.loops--;
        for (l = 0; l < inner.loops; l++) {
            inner.count[l] = a->count[l + 1];
            inner.step[l] = a->step[l + 1];
        }
        if (b->loops && b->step[0] == step) { /* equal outer steps: compare the inner loops modulo the step */
            const int64_t shift = (b->offset - a->offset) / step - ((b->offset - a->offset) % step < 0);
            other.loops--;
            for (l = 0; l < other.loops; l++) {
                other.count[l] = b->count[l + 1];
                other.step[l] = b->step[l + 1];
            }
            other.offset = b->offset - shift * step; /* in [a->offset, a->offset + step) */
            /* iteration i of b overlaps iteration i + shift of a, or the one after it */
            if (shift > -b->count[0] && shift < a->count[0] && !gmm__ck_disjoint(&inner, &other)) return 0;
            other.offset -= step;
            return shift + 1 <= -b->count[0] || shift + 1 >= a->count[0] || gmm__ck_disjoint(&inner, &other);
        }
        { /* only the iterations whose span overlaps b */
            int64_t low = b->offset - a->offset - gmm__ck_set_span(&inner) + 1, high = b->offset + bh - 1 - a->offset;
            low = low <= 0 ? 0 : low / step;
            high = high < 0 ? -1 : high / step;
            if (high >= a->count[0]) high = a->count[0] - 1;
            for (i = low; i <= high; i++) {
                inner.offset = a->offset + i * step;
                if (!gmm__ck_disjoint(&inner, b)) return 0;
            }
        }
        return 1;
    }
}

static gmm__ck_element_set gmm__ck_write_set(const gmm_ckpt_move *m) {
    gmm__ck_element_set s;
    int l;
    memset(&s, 0, sizeof s);
    s.offset = m->dst_at;
    for (l = 0; l < m->loops; l++) {
        if (m->count[l] == 1) continue;
        s.count[s.loops] = m->count[l];
        s.step[s.loops++] = m->dst_step[l];
    }
    return s;
}

/* Number of elements that a move may read of its source tensor, 4-bit elements counted singly. A view may extend past
   the tensor, up to the end of its storage. */
static int64_t gmm__ck_readable_elements(const gmm_ckpt_plan *plan, const gmm_ckpt_move *m) {
    const gmm_ckpt_table *table = plan->parts[m->part].table;
    const gmm_ckpt_tensor *t = &table->tensors[m->src];
    if (m->kind == GMM_CKPT_VIEW) return (table->storages[t->storage].bytes - t->offset) / gmm__ck_unit_bytes(t->dtype);
    return gmm__ck_unit_count(t) * (m->kind == GMM_CKPT_DEQUANT && gmm__ck_is_packed(t->dtype) ? 2 : 1);
}

/* Checks one move alone: indices, bounds, dtypes, and that it writes no element twice. NULL, or the fault. */
static const char *gmm__ck_move_fault(const gmm_ckpt_plan *plan, const gmm_ckpt_move *m) {
    const gmm_ckpt_tensor *d, *s = NULL;
    int64_t src = m->src_at, dst = m->dst_at, inner = 1;
    int l;
    if (m->dst < 0 || m->dst >= plan->targets->count) return "no such target";
    if (m->loops < 1 || m->loops > GMM_CKPT_LOOPS) return "loops out of range";
    if (m->kind < GMM_CKPT_VIEW || m->kind > GMM_CKPT_ZERO) return "no such kind";
    if (m->part < 0 || m->part >= plan->part_count) return "no such part";
    if (m->kind != GMM_CKPT_ZERO && (m->src < 0 || m->src >= plan->parts[m->part].table->count))
        return "no such source";
    if (m->kind == GMM_CKPT_DEQUANT && (m->scale < 0 || m->scale >= plan->parts[m->part].table->count))
        return "no such scale";
    d = &plan->targets->tensors[m->dst];
    if (m->src >= 0 && m->kind != GMM_CKPT_ZERO) s = &plan->parts[m->part].table->tensors[m->src];
    if (m->src_at < 0 || m->dst_at < 0) return "a negative offset";
    for (l = m->loops - 1; l >= 0; l--) {
        int64_t step = 0;
        if (m->count[l] < 1 || m->src_step[l] < 0 || m->dst_step[l] < 0) return "a count or step out of range";
        if (m->count[l] > 1 && m->dst_step[l] < inner) return "it writes an element twice";
        if (!gmm__mul(m->count[l] - 1, m->src_step[l], &step) || src > INT64_MAX - step) return "an offset overflows";
        src += step;
        if (!gmm__mul(m->count[l] - 1, m->dst_step[l], &step) || dst > INT64_MAX - step) return "an offset overflows";
        dst += step;
        inner += step;
    }
    if (dst >= gmm__ck_unit_count(d)) return "it writes past the target's end";
    if (!s) return NULL;
    if (src >= gmm__ck_readable_elements(plan, m)) return "it reads past the source's end";
    if ((m->kind == GMM_CKPT_COPY || m->kind == GMM_CKPT_VIEW) &&
        gmm__ck_unit_bytes(s->dtype) != gmm__ck_unit_bytes(d->dtype))
        return "it copies elements of another size";
    if (m->kind == GMM_CKPT_CONVERT && !(GMM__FLOATS >> s->dtype & 1 && GMM__FLOATS >> d->dtype & 1))
        return "it converts what is no float";
    if (m->kind == GMM_CKPT_DEQUANT) {
        const gmm_ckpt_tensor *sc = &plan->parts[m->part].table->tensors[m->scale];
        int64_t rows, cols, scale_rows, scale_cols;
        if (!(GMM__FLOATS >> d->dtype & 1)) return "it dequantizes into no float";
        if (s->rank < 2 || !gmm__ck_format_of(m->scaling, s->dtype, sc->dtype)) return "no such blocks";
        gmm__ck_scale_shape(s, m->scaling, &rows, &cols, &scale_rows, &scale_cols);
        src = src / cols / rows * scale_rows + gmm__ck_scale_line(m->scaling, src / cols % rows) + 1;
        if (src * scale_cols > gmm__ck_unit_count(sc)) return "it reads past the scales' end";
    }
    return NULL;
}

static int gmm__ck_compare_writes(const void *a, const void *b) {
    const gmm__ck_order *x = (const gmm__ck_order *)a, *y = (const gmm__ck_order *)b;
    if (x->part != y->part) return x->part < y->part ? -1 : 1;
    return x->offset < y->offset ? -1 : x->offset > y->offset;
}

GMMDEF gmm_status gmm_ckpt_verify(const gmm_ckpt_plan *plan, const gmm_ckpt_move *moves, int64_t count,
                                  gmm_error *error) {
    static const char fn[] = "gmm_ckpt_verify";
    gmm__ck_arena arena;
    gmm__ck_order *order;
    int64_t i, next = 0;
    int32_t t;
    gmm_status status = GMM_OK;
    if (!plan) return gmm__fail(error, GMM_E_NULL, "%s: plan is NULL", fn);
    if (!moves) {
        moves = plan->moves;
        count = plan->count;
    }
    arena.allocator = plan->arena.allocator;
    arena.top = NULL;
    order = (gmm__ck_order *)gmm__ck_alloc(&arena, count, sizeof *order);
    if (!order) return gmm__fail(error, GMM_E_MEMORY, "%s: no memory for %lld moves", fn, (long long)count);
    for (i = 0; !status && i < count; i++) {
        const char *fault = gmm__ck_move_fault(plan, &moves[i]);
        order[i].part = moves[i].dst; /* sorted by target, then by where the writing begins */
        order[i].offset = moves[i].dst_at;
        order[i].index = i;
        if (fault)
            status = gmm__fail(error, GMM_E_STATE, "%s: moves[%lld]: %s (target %.160s)", fn, (long long)i, fault,
                               moves[i].dst >= 0 && moves[i].dst < plan->targets->count
                                   ? plan->targets->tensors[moves[i].dst].name : "?");
    }
    if (!status && count) qsort(order, (size_t)count, sizeof *order, gmm__ck_compare_writes);
    for (t = 0; !status && t < plan->targets->count; t++) {
        const gmm_ckpt_tensor *d = &plan->targets->tensors[t];
        const int64_t begin = next;
        int64_t sum = 0, j;
        for (; next < count && order[next].part == t; next++) {
            const gmm_ckpt_move *m = &moves[order[next].index];
            const gmm__ck_element_set written = gmm__ck_write_set(m);
            const int64_t n = gmm__ck_move_elements(m);
            if (n > gmm__ck_unit_count(d) - sum) {
                status = gmm__fail(error, GMM_E_STATE, "%s: target %.160s: more is written than its %lld elements", fn,
                                   d->name, (long long)gmm__ck_unit_count(d));
                break;
            }
            sum += n;
            /* replaced by the end of all writes up to here */
            order[next].offset = written.offset + gmm__ck_set_span(&written);
            if (next > begin && order[next - 1].offset > order[next].offset)
                order[next].offset = order[next - 1].offset;
            for (j = next - 1; !status && j >= begin && order[j].offset > written.offset; j--) {
                const gmm__ck_element_set other = gmm__ck_write_set(&moves[order[j].index]);
                if (!gmm__ck_disjoint(&written, &other))
                    status = gmm__fail(error, GMM_E_STATE, "%s: target %.160s: moves[%lld] and moves[%lld] write the "
                                       "same element", fn, d->name, (long long)order[j].index,
                                       (long long)order[next].index);
            }
            if (status) break;
        }
        if (!status && sum != gmm__ck_unit_count(d) && !plan->partial)
            status = gmm__fail(error, GMM_E_STATE, "%s: target %.160s: %lld of its %lld elements are written", fn,
                               d->name, (long long)sum, (long long)gmm__ck_unit_count(d));
    }
    gmm__ck_arena_release(&arena);
    return status;
}

GMMDEF gmm_status gmm_ckpt_plan_of_moves(gmm_ckpt_plan **out, const gmm_ckpt_part *parts, int32_t part_count,
                                         const gmm_ckpt_tensor *targets, int64_t target_count,
                                         const gmm_ckpt_move *moves, int64_t count, int32_t partial,
                                         const gmm_allocator *allocator, gmm_ckpt_report *report) {
    static const char fn[] = "gmm_ckpt_plan_of_moves";
    gmm__ck_builder b;
    gmm_error error = GMM_ZERO;
    gmm_status status;
    int64_t i;
    if (!out) return gmm__ck_fail_null(fn, "out", report);
    *out = NULL;
    if (!parts || (!targets && target_count) || (!moves && count))
        return gmm__ck_fail_null(fn, !parts ? "parts" : !targets && target_count ? "targets" : "moves", report);
    status = gmm__ck_builder_init(&b, fn, out, allocator, report);
    if (!status && (part_count < 1 || target_count < 0 || count < 0 || partial < 0 || partial > 1))
        status = gmm__ck_refuse(&b, GMM_CKPT_ARGUMENT, NULL, "%d parts, %lld targets, %lld moves, partial %d: must be "
                                ">= 1, >= 0, >= 0, and 0 or 1", part_count, (long long)target_count,
                                (long long)count, partial);
    for (i = 0; !status && i < part_count; i++)
        if (!parts[i].table)
            status = gmm__ck_refuse(&b, GMM_CKPT_ARGUMENT, NULL, "parts[%lld].table is NULL", (long long)i);
    if (!status) {
        b.source.part_count = part_count;
        b.parts = (gmm_ckpt_part *)gmm__ck_alloc(&b.arena, part_count, sizeof *b.parts);
        if (!b.parts) status = gmm__ck_no_memory(&b);
        else memcpy(b.parts, parts, (size_t)part_count * sizeof *parts);
    }
    for (i = 0; !status && i < target_count; i++) {
        gmm_ckpt_tensor t = targets[i];
        int32_t index;
        if (t.rank < 0 || t.rank > GMM_CKPT_RANK || t.dtype <= GMM_NONE || t.dtype > GMM_I64)
            status = gmm__ck_refuse(&b, GMM_CKPT_ARGUMENT, t.name, "targets[%lld]: rank %d, dtype %d: must be 0 to %d, "
                                    "and a dtype", (long long)i, t.rank, (int)t.dtype, (int)GMM_CKPT_RANK);
        else if (!gmm__ck_tensor_bytes(&t, &t.bytes))
            status = gmm__ck_refuse(&b, GMM_CKPT_OVERFLOW, t.name, "its bytes do not fit 63 bits");
        else status = gmm__ck_add_target(&b, &t, &index);
    }
    if (!status) { /* gmm__ck_move_fault reads these; loops are checked before they are simplified */
        (*out)->parts = b.parts;
        (*out)->part_count = part_count;
        (*out)->partial = partial;
    }
    for (i = 0; !status && i < count; i++) {
        gmm_ckpt_move m = moves[i];
        const char *fault = m.kind == GMM_CKPT_VIEW ? "a view" : m.loops < 1 || m.loops > GMM_CKPT_LOOPS
                          ? "loops out of range" : NULL;
        int32_t l;
        for (l = 0; !fault && l < m.loops; l++)
            if (m.count[l] < 1 || m.src_step[l] < 0 || m.dst_step[l] < 0) fault = "a count or step out of range";
        if (m.kind == GMM_CKPT_ZERO) m.src = m.scale = -1;
        if (!fault) gmm__ck_simplify_loops(&m);
        if (!fault) fault = gmm__ck_move_fault(*out, &m);
        if (fault) {
            status = gmm__ck_refuse(&b, GMM_CKPT_ARGUMENT, NULL, "moves[%lld]: %s", (long long)i, fault);
            if (report) report->error.status = GMM_E_STATE;
            status = GMM_E_STATE;
        } else status = gmm__ck_add_move(&b, &m);
    }
    if (!status) status = gmm__ck_build_plan(&b, *out);
    if (!status) {
        status = gmm_ckpt_verify(*out, NULL, 0, &error);
        if (status) {
            (void)gmm__ck_refuse(&b, GMM_CKPT_ARGUMENT, NULL, "%.400s", error.text);
            if (report) report->error.status = status;
        }
    }
    return gmm__ck_builder_release(&b, out, status);
}

GMMDEF gmm_status gmm_ckpt_cost_of(const gmm_ckpt_plan *plan, gmm_ckpt_cost *cost, gmm_error *error) {
    uint32_t size;
    if (!plan || !cost) return gmm__fail(error, GMM_E_NULL, "gmm_ckpt_cost_of: %s is NULL", plan ? "cost" : "plan");
    size = cost->struct_size;
    if (size > sizeof *cost || (size && size < 2 * sizeof size))
        return gmm__fail(error, GMM_E_VERSION,
                         "gmm_ckpt_cost_of: cost: struct_size %u is not one of a version up to %s", size,
                         GMM_VERSION_STRING);
    memcpy(cost, &plan->cost, size ? size : sizeof *cost);
    cost->struct_size = size;
    return GMM_OK;
}

/* ............................................................................................... 15.10 Applying ... */
/* Applies the moves of a plan to memory or through callbacks. */

static float gmm__ck_load_float(gmm_dtype dtype, const char *src) { /* any alignment */
    uint32_t bits = 0;
    memcpy(&bits, src, dtype == GMM_F32 ? 4 : 2);
    return dtype == GMM_F32 ? gmm_f32_from_bits(bits) : dtype == GMM_BF16 ? gmm_bf16_to_f32((uint16_t)bits)
                                                                       : gmm_f16_to_f32((uint16_t)bits);
}

static void gmm__ck_store_float(gmm_dtype dtype, char *dst, float value) {
    const uint32_t w = gmm_f32_bits(value);
    const uint16_t h = dtype == GMM_BF16 ? gmm_f32_to_bf16(value) : gmm_f32_to_f16(value);
    if (dtype == GMM_F32) memcpy(dst, &w, 4);
    else memcpy(dst, &h, 2);
}

/* One tile of a move. Strides and steps count elements. */
typedef struct gmm__ck_tile_args {
    const gmm_ckpt_move *move;
    gmm_dtype src_dtype, dst_dtype;
    int64_t src_unit, dst_unit;                   /* bytes of an element */
    int64_t count[GMM_CKPT_LOOPS], dst_step[GMM_CKPT_LOOPS];
    const char *src;                              /* address of element src_base */
    char *dst;                                    /* address of the first element */
    const char *scale;                            /* address of scale scale_base */
    int64_t src_base, scale_base;
    /* DEQUANT */
    int64_t rows, cols, scale_rows, scale_cols;   /* extents of a matrix and of its scales */
    int64_t block_rows, block_cols;               /* 0 = the whole extent */
    int64_t scale_unit;                           /* bytes of a scale */
    gmm_dtype scale_dtype;
    int32_t packed;                               /* 1: two codes per byte */
} gmm__ck_tile_args;

/* Value of element i of a quantized tensor. */
static float gmm__ck_dequant(const gmm__ck_tile_args *t, int64_t i) {
    const int64_t row = i / t->cols, col = i % t->cols;
    const int64_t matrix = row / t->rows, r = row % t->rows;
    const int64_t s = (matrix * t->scale_rows + (t->block_rows ? r / t->block_rows : 0)) * t->scale_cols +
                      (t->block_cols ? col / t->block_cols : 0) - t->scale_base;
    const float scale = t->scale_unit == 1 ? gmm_e8m0_to_f32((uint8_t)t->scale[s])
                                           : gmm__ck_load_float(t->scale_dtype, t->scale + s * t->scale_unit);
    if (t->packed) {
        const uint32_t byte = (uint8_t)t->src[i / 2 - t->src_base / 2]; /* two elements, the even one in the low half */
        return gmm_e2m1_to_f32((uint8_t)(i % 2 ? byte >> 4 : byte & 15u)) * scale;
    }
    return (t->src_dtype == GMM_E5M2 ? gmm_e5m2_to_f32 : gmm_e4m3_to_f32)((uint8_t)t->src[i - t->src_base]) * scale;
}

/* Moves n elements of an innermost loop, from source element `src` to destination element `dst`. */
static void gmm__ck_move_run(const gmm__ck_tile_args *t, int64_t src, int64_t dst, int64_t n, int64_t src_step,
                             int64_t dst_step) {
    const char *s = t->src + (src - t->src_base) * t->src_unit;
    char *d = t->dst + dst * t->dst_unit;
    int64_t i;
    switch (t->move->kind) {
    case GMM_CKPT_COPY:
        if (src_step == 1 && dst_step == 1) {
            memcpy(d, s, (size_t)(n * t->dst_unit));
            return;
        }
        switch (t->dst_unit) { /* constant sizes become single instructions */
        case 1: for (i = 0; i < n; i++) d[i * dst_step] = s[i * src_step]; return;
        case 2: for (i = 0; i < n; i++) memcpy(d + i * dst_step * 2, s + i * src_step * 2, 2); return;
        case 4: for (i = 0; i < n; i++) memcpy(d + i * dst_step * 4, s + i * src_step * 4, 4); return;
        default: for (i = 0; i < n; i++) memcpy(d + i * dst_step * 8, s + i * src_step * 8, 8); return;
        }
    case GMM_CKPT_CONVERT:
        for (i = 0; i < n; i++)
            gmm__ck_store_float(t->dst_dtype, d + i * dst_step * t->dst_unit,
                                gmm__ck_load_float(t->src_dtype, s + i * src_step * t->src_unit));
        return;
    default:
        for (i = 0; i < n; i++)
            gmm__ck_store_float(t->dst_dtype, d + i * dst_step * t->dst_unit, gmm__ck_dequant(t, src + i * src_step));
        return;
    }
}

/* Moves a tile, from source element `src` to the start of the destination. Where the source's step is smaller in the
   last loop but one than in the last, these two loops run in square tiles, so that both sides stay in the cache. */
static void gmm__ck_move_tile(const gmm__ck_tile_args *t, int64_t src) {
    enum { TILE = 32 };
    const gmm_ckpt_move *m = t->move;
    const int n = m->loops, y = n - 2, x = n - 1;
    const int transposed = n > 1 && m->src_step[n - 1] > m->src_step[n > 1 ? n - 2 : 0];
    const int outer = n - (transposed ? 2 : 1);
    const int gather = transposed && m->kind == GMM_CKPT_COPY && m->src_step[y < 0 ? 0 : y] == 1;
    char square[TILE * (TILE + 8) * 8];
    gmm__ck_tile_args gathered = *t;
    int64_t index[GMM_CKPT_LOOPS] = {0}, i, a, b;
    int l;
    gathered.src = square;
    gathered.src_base = 0;
    do {
        int64_t src0 = src, dst0 = 0;
        for (l = 0; l < outer; l++) {
            src0 += index[l] * m->src_step[l];
            dst0 += index[l] * t->dst_step[l];
        }
        if (!transposed) gmm__ck_move_run(t, src0, dst0, t->count[x], m->src_step[x], t->dst_step[x]);
        for (a = 0; transposed && a < t->count[y]; a += TILE)
            for (b = 0; b < t->count[x]; b += TILE) {
                const int64_t rows = gmm__min_i64(TILE, t->count[y] - a), cols = gmm__min_i64(TILE, t->count[x] - b);
                const int64_t first = src0 + a * m->src_step[y] + b * m->src_step[x];
                if (gather) /* copies source rows, whose stride may map all of them to one cache set */
                    for (i = 0; i < cols; i++)
                        memcpy(square + i * (TILE + 8) * t->src_unit,
                               t->src + (first + i * m->src_step[x] - t->src_base) * t->src_unit,
                               (size_t)(rows * t->src_unit));
                for (i = 0; i < rows; i++) {
                    const int64_t d = dst0 + (a + i) * t->dst_step[y] + b * t->dst_step[x];
                    if (gather) gmm__ck_move_run(&gathered, i, d, cols, TILE + 8, t->dst_step[x]);
                    else gmm__ck_move_run(t, first + i * m->src_step[y], d, cols, m->src_step[x], t->dst_step[x]);
                }
            }
        for (l = outer - 1; l >= 0 && ++index[l] == t->count[l]; l--) index[l] = 0;
    } while (l >= 0);
}

/* One call of gmm_ckpt_apply. */
typedef struct gmm__ck_apply_call {
    const gmm_ckpt_plan *plan;
    const gmm_ckpt_run *run;
    gmm_error *error;
} gmm__ck_apply_call;

static const char gmm__ck_apply_name[] = "gmm_ckpt_apply";

static gmm_status gmm__ck_read(const gmm__ck_apply_call *c, const gmm_ckpt_move *m, const gmm_ckpt_tensor *t,
                               int64_t offset, void *dst, int64_t bytes) {
    const int code = c->run->io.read(c->run->io.user, m->part, t->storage, t->offset + offset, dst, bytes);
    if (!code) return GMM_OK;
    return gmm__fail(c->error, GMM_E_IO,
                     "%s: io.read gave %d for %lld bytes at %lld of \"%.160s\" (part %d, storage %d)",
                     gmm__ck_apply_name, code, (long long)bytes, (long long)offset, t->name, (int)m->part,
                     (int)t->storage);
}

static gmm_status gmm__ck_write(const gmm__ck_apply_call *c, const gmm_ckpt_move *m, int64_t offset, const void *src,
                                int64_t bytes) {
    const int code = c->run->io.write(c->run->io.user, m->dst, offset, src, bytes);
    if (!code) return GMM_OK;
    return gmm__fail(c->error, GMM_E_IO, "%s: io.write gave %d for %lld bytes at %lld of \"%.160s\"",
                     gmm__ck_apply_name, code, (long long)bytes, (long long)offset,
                     c->plan->targets->tensors[m->dst].name);
}

/* Bytes that a contiguous copy reads or writes at a time; span from which the iterations of a sparse loop are read one
   by one. */
enum { GMM__CK_CHUNK_BYTES = 4 << 20, GMM__CK_GAP_BYTES = 4096 };

/* Applies a move that copies contiguous bytes, or writes contiguous zeros. */
static gmm_status gmm__ck_apply_contiguous(const gmm__ck_apply_call *c, const gmm_ckpt_move *m, const char *src_memory,
                                           char *dst_memory) {
    const gmm_ckpt_tensor *s = m->kind == GMM_CKPT_ZERO ? NULL : &c->plan->parts[m->part].table->tensors[m->src];
    const int64_t unit = gmm__ck_unit_bytes(c->plan->targets->tensors[m->dst].dtype), bytes = m->count[0] * unit;
    const int64_t chunk = gmm__min_i64((int64_t)(c->run->scratch_bytes < GMM__CK_CHUNK_BYTES ? c->run->scratch_bytes
                                                                                      : (size_t)GMM__CK_CHUNK_BYTES),
                                                                                          bytes);
    const int64_t src = m->src_at * unit, dst = m->dst_at * unit;
    int64_t done, n;
    gmm_status status = GMM_OK;
    if (dst_memory && !s) {
        memset(dst_memory + dst, 0, (size_t)bytes);
        return GMM_OK;
    }
    if (dst_memory && src_memory) {
        memcpy(dst_memory + dst, src_memory + src, (size_t)bytes);
        return GMM_OK;
    }
    if (dst_memory) return gmm__ck_read(c, m, s, src, dst_memory + dst, bytes);
    if (!s) memset(c->run->scratch, 0, (size_t)chunk);
    for (done = 0; !status && done < bytes; done += n) {
        n = gmm__min_i64(chunk, bytes - done);
        if (s && !src_memory) status = gmm__ck_read(c, m, s, src + done, c->run->scratch, n);
        if (!status)
            status = gmm__ck_write(c, m, dst + done,
                                   src_memory ? src_memory + src + done : (const char *)c->run->scratch, n);
    }
    return status;
}

/* Chooses the iterations of each loop in a tile, beginning with the loop of the smallest step. A tile spans at most
   `in` source elements and has at most `out` elements. It does not span iterations of a sparse loop (dense > 0). */
static void gmm__ck_choose_tile(const gmm_ckpt_move *m, const int64_t *step, int64_t in, int64_t out, int64_t dense,
                                int64_t *tile) {
    int64_t span = 1, volume = 1;
    int l, k, done[GMM_CKPT_LOOPS] = {0};
    for (l = 0; l < m->loops; l++) tile[l] = 1;
    for (k = 0; k < m->loops; k++) {
        int64_t n, by_in;
        int best = -1;
        for (l = 0; l < m->loops; l++)
            if (!done[l] && (best < 0 || step[l] < step[best])) best = l;
        done[best] = 1;
        if (dense && span >= dense && m->src_step[best] > 2 * span) break;
        by_in = m->src_step[best] ? 1 + (in - span) / m->src_step[best] : m->count[best];
        n = gmm__min_i64(m->count[best], gmm__min_i64(by_in, out / volume));
        tile[best] = n;
        span += (n - 1) * m->src_step[best];
        volume *= n;
        if (n < m->count[best]) break;
    }
}

/* Length, in rows, of a run of elements that overlaps at most `scales` rows of scales of blocks of `block` rows; 0 = of
   whole matrices. A run as long as n - 1 rows overlaps n of them, and with that at most n rows of scales, or
   3 + n / block + n / rows of them. */
static int64_t gmm__ck_scaled_rows(int64_t scales, int64_t rows, int64_t block) {
    const int64_t least = gmm__min_i64(rows, block ? block : 1 << 20); /* the product below fits 63 bits */
    const int64_t rows_of_scales = scales > 3 ? 1 + (scales - 3) * least / 2 : 0;
    return (rows_of_scales > scales ? rows_of_scales : scales) - 1;
}

/* Writes zeros in several contiguous runs. */
static gmm_status gmm__ck_apply_zeros(const gmm__ck_apply_call *c, const gmm_ckpt_move *m, char *dst_memory) {
    const int last = m->loops - 1, contiguous = m->dst_step[last] == 1;
    const int outer = contiguous ? last : m->loops;
    int64_t index[GMM_CKPT_LOOPS] = {0};
    gmm_ckpt_move run = *m;
    int l;
    run.loops = 1;
    run.count[0] = contiguous ? m->count[last] : 1;
    run.dst_step[0] = 1;
    do {
        gmm_status status;
        run.dst_at = m->dst_at;
        for (l = 0; l < outer; l++) run.dst_at += index[l] * m->dst_step[l];
        status = gmm__ck_apply_contiguous(c, &run, NULL, dst_memory);
        if (status) return status;
        for (l = outer - 1; l >= 0 && ++index[l] == m->count[l]; l--) index[l] = 0;
    } while (l >= 0);
    return GMM_OK;
}

/* How a move is applied in tiles: the addresses of its tensors, and of the parts of the scratch that stand in for those
   which are not in memory. */
typedef struct gmm__ck_tiling {
    const gmm__ck_apply_call *call;
    const gmm_ckpt_move *move;
    const gmm_ckpt_tensor *src, *scale;               /* scale: NULL unless the move dequantizes */
    const char *src_memory, *scale_memory;            /* NULL: read by io.read */
    char *dst_memory;                                 /* NULL: written by io.write */
    char *src_scratch, *scale_scratch, *dst_scratch;
    int64_t count[GMM_CKPT_LOOPS];                    /* iterations of each loop in a tile */
    gmm__ck_tile_args tile;                           /* of the present tile */
} gmm__ck_tiling;

static const char *gmm__ck_tensor_memory(const gmm_ckpt_table *table, const gmm_ckpt_tensor *t) {
    const char *base = table->storages[t->storage].base;
    return base ? base + t->offset : NULL;
}

/* Divides the scratch among scales, source and destination, and chooses the tile that fits. */
static void gmm__ck_choose_tiling(const gmm__ck_apply_call *c, const gmm_ckpt_move *m, char *dst_memory,
                                  gmm__ck_tiling *g) {
    const gmm_ckpt_table *table = c->plan->parts[m->part].table;
    gmm__ck_tile_args *t = &g->tile;
    int64_t in_limit = INT64_MAX / 4, out_limit = INT64_MAX / 4; /* elements */
    int64_t scratch_bytes = (int64_t)c->run->scratch_bytes, scale_bytes = 0, area_bytes;
    char *scratch = (char *)c->run->scratch;
    memset(g, 0, sizeof *g);
    g->call = c;
    g->move = m;
    g->src = &table->tensors[m->src];
    g->src_memory = gmm__ck_tensor_memory(table, g->src);
    g->dst_memory = dst_memory;
    t->move = m;
    t->src_dtype = g->src->dtype;
    t->dst_dtype = c->plan->targets->tensors[m->dst].dtype;
    t->src_unit = gmm__ck_unit_bytes(t->src_dtype);
    t->dst_unit = gmm__ck_unit_bytes(t->dst_dtype);
    if (m->kind == GMM_CKPT_DEQUANT) {
        gmm__ck_scale_shape(g->src, m->scaling, &t->rows, &t->cols, &t->scale_rows, &t->scale_cols);
        gmm__ck_block_of(m->scaling, &t->block_rows, &t->block_cols);
        g->scale = &table->tensors[m->scale];
        t->packed = gmm__ck_is_packed(t->src_dtype);
        t->scale_dtype = g->scale->dtype;
        t->scale_unit = gmm__ck_unit_bytes(t->scale_dtype);
        g->scale_memory = gmm__ck_tensor_memory(table, g->scale);
        if (!g->scale_memory) { /* an eighth of the scratch holds the scales of a tile */
            scale_bytes = scratch_bytes / 8;
            in_limit = gmm__ck_scaled_rows(scale_bytes / (t->scale_cols * t->scale_unit), t->rows, t->block_rows);
            if (!gmm__mul(in_limit, t->cols, &in_limit)) in_limit = INT64_MAX / 4;
        }
    }
    area_bytes = scratch_bytes - scale_bytes;
    if (!g->dst_memory && !g->src_memory) area_bytes /= 2; /* source and destination have half of the rest each */
    g->scale_scratch = scratch;
    g->src_scratch = scratch ? scratch + scale_bytes : NULL; /* all tensors may be in memory, without a scratch */
    g->dst_scratch = g->src_memory || !scratch ? g->src_scratch : g->src_scratch + area_bytes;
    if (!g->src_memory) in_limit = gmm__min_i64(in_limit, t->packed ? (area_bytes - 1) * 2
                                                                            : area_bytes / t->src_unit);
    if (!g->dst_memory) out_limit = area_bytes / t->dst_unit;
    gmm__ck_choose_tile(m, g->src_memory ? m->dst_step : m->src_step, in_limit, out_limit,
                        g->src_memory ? 0 : GMM__CK_GAP_BYTES / t->src_unit, g->count);
}

/* Makes source elements [src, src + span) and their scales readable: in memory, or read into the scratch. */
static gmm_status gmm__ck_read_tile(gmm__ck_tiling *g, int64_t src, int64_t span) {
    gmm__ck_tile_args *t = &g->tile;
    gmm_status status = GMM_OK;
    t->src = g->src_memory;
    t->src_base = 0;
    if (!g->src_memory) {
        const int64_t first = t->packed ? src / 2 : src * t->src_unit;
        const int64_t end = t->packed ? (src + span + 1) / 2 : (src + span) * t->src_unit;
        status = gmm__ck_read(g->call, g->move, g->src, first, g->src_scratch, end - first);
        t->src = g->src_scratch;
        t->src_base = t->packed ? first * 2 : src;
    }
    t->scale = g->scale_memory;
    if (g->scale && !g->scale_memory && !status) {
        const int64_t row0 = src / t->cols, row1 = (src + span - 1) / t->cols;
        const int64_t first = row0 / t->rows * t->scale_rows + gmm__ck_scale_line(g->move->scaling, row0 % t->rows);
        const int64_t end = row1 / t->rows * t->scale_rows + gmm__ck_scale_line(g->move->scaling, row1 % t->rows) + 1;
        t->scale_base = first * t->scale_cols;
        status = gmm__ck_read(g->call, g->move, g->scale, t->scale_base * t->scale_unit, g->scale_scratch,
                              (end - first) * t->scale_cols * t->scale_unit);
        t->scale = g->scale_scratch;
    }
    return status;
}

/* Writes the tile in the scratch, which is dense, to destination element `dst` on, as contiguous runs. */
static gmm_status gmm__ck_write_tile(const gmm__ck_tiling *g, int64_t dst) {
    const gmm_ckpt_move *m = g->move;
    const gmm__ck_tile_args *t = &g->tile;
    int64_t run = 1, runs = 1, i;
    int outer = m->loops, l;
    gmm_status status = GMM_OK;
    for (; outer > 0 && m->dst_step[outer - 1] == run; outer--) run *= t->count[outer - 1];
    for (l = 0; l < outer; l++) runs *= t->count[l];
    for (i = 0; !status && i < runs; i++) {
        int64_t offset = dst, remaining = i;
        for (l = outer - 1; l >= 0; l--) {
            offset += remaining % t->count[l] * m->dst_step[l];
            remaining /= t->count[l];
        }
        status = gmm__ck_write(g->call, m, offset * t->dst_unit, g->dst_scratch + i * run * t->dst_unit,
                               run * t->dst_unit);
    }
    return status;
}

static gmm_status gmm__ck_apply_tiles(gmm__ck_tiling *g) {
    const gmm_ckpt_move *m = g->move;
    gmm__ck_tile_args *t = &g->tile;
    int64_t index[GMM_CKPT_LOOPS] = {0};
    int l;
    do {
        int64_t src = m->src_at, dst = m->dst_at, span = 1, dense = 1;
        gmm_status status;
        for (l = 0; l < m->loops; l++) {
            t->count[l] = gmm__min_i64(g->count[l], m->count[l] - index[l]);
            src += index[l] * m->src_step[l];
            dst += index[l] * m->dst_step[l];
            span += (t->count[l] - 1) * m->src_step[l];
        }
        for (l = m->loops - 1; l >= 0; l--) {
            t->dst_step[l] = g->dst_memory ? m->dst_step[l] : dense;
            dense *= t->count[l];
        }
        status = gmm__ck_read_tile(g, src, span);
        if (status) return status;
        t->dst = g->dst_memory ? g->dst_memory + dst * t->dst_unit : g->dst_scratch;
        gmm__ck_move_tile(t, src);
        if (!g->dst_memory) status = gmm__ck_write_tile(g, dst);
        if (status) return status;
        for (l = m->loops - 1; l >= 0; l--) {
            index[l] += t->count[l];
            if (index[l] < m->count[l]) break;
            index[l] = 0;
        }
    } while (l >= 0);
    return GMM_OK;
}

static gmm_status gmm__ck_apply_move(const gmm__ck_apply_call *c, const gmm_ckpt_move *m) {
    const gmm_ckpt_table *table = c->plan->parts[m->part].table;
    const gmm_ckpt_tensor *src = m->kind == GMM_CKPT_ZERO ? NULL : &table->tensors[m->src];
    char *dst_memory = c->run->memory ? (char *)c->run->memory + c->plan->targets->tensors[m->dst].offset : NULL;
    gmm__ck_tiling tiling;
    if (m->kind == GMM_CKPT_VIEW) return GMM_OK;
    if ((m->kind == GMM_CKPT_COPY || m->kind == GMM_CKPT_ZERO) && m->loops == 1 && m->dst_step[0] == 1 &&
        (!src || m->src_step[0] == 1))
        return gmm__ck_apply_contiguous(c, m, src ? gmm__ck_tensor_memory(table, src) : NULL, dst_memory);
    if (!src) return gmm__ck_apply_zeros(c, m, dst_memory);
    gmm__ck_choose_tiling(c, m, dst_memory, &tiling);
    return gmm__ck_apply_tiles(&tiling);
}

GMMDEF gmm_status gmm_ckpt_apply(const gmm_ckpt_plan *plan, const gmm_ckpt_run *run, int64_t *cursor,
                                 gmm_error *error) {
    gmm__ck_apply_call c;
    gmm_ckpt_run r = GMM_ZERO;
    const char *fn = gmm__ck_apply_name;
    int64_t i;
    int reads = 0;
    if (!plan || !run || !cursor)
        return gmm__fail(error, GMM_E_NULL, "%s: %s is NULL", fn, !plan ? "plan" : !run ? "run" : "cursor");
    if (!gmm__copy_sized(&r, sizeof r, run))
        return gmm__fail(error, GMM_E_VERSION, "%s: run: struct_size %u is larger than the %u bytes of version %s", fn,
                         run->struct_size, (unsigned)sizeof r, GMM_VERSION_STRING);
    if (r.end == 0) r.end = plan->count;
    if (r.end < 0 || r.end > plan->count || *cursor < 0 || *cursor > r.end)
        return gmm__fail(error, GMM_E_ARG, "%s: cursor %lld, end %lld: must be ordered in [0, %lld]", fn,
                         (long long)*cursor, (long long)r.end, (long long)plan->count);
    for (i = *cursor; i < r.end; i++) {
        const gmm_ckpt_move *m = &plan->moves[i];
        const gmm_ckpt_table *table = plan->parts[m->part].table;
        if (m->kind == GMM_CKPT_VIEW || m->kind == GMM_CKPT_ZERO) continue;
        reads |= !table->storages[table->tensors[m->src].storage].base ||
                 (m->scale >= 0 && !table->storages[table->tensors[m->scale].storage].base);
    }
    if ((reads && !r.io.read) || (!r.memory && !r.io.write && plan->cost.bytes_written))
        return gmm__fail(error, GMM_E_NULL, "%s: %s is NULL", fn,
                         reads && !r.io.read ? "io.read, with storages that are not in memory,"
                                             : "io.write, without memory,");
    if ((!r.memory || reads) && plan->cost.bytes_written &&
        (!r.scratch || r.scratch_bytes < (size_t)plan->cost.scratch_min))
        return gmm__fail(error, r.scratch ? GMM_E_WORKSPACE : GMM_E_NULL, "%s: scratch of %llu bytes: at least %lld "
                         "are needed", fn, (unsigned long long)r.scratch_bytes, (long long)plan->cost.scratch_min);
    if (r.memory && plan->cost.bytes_written) {
        const uintptr_t begin = (uintptr_t)r.memory, end = begin + (uintptr_t)plan->cost.target_bytes;
        for (i = 0; i < plan->source_range_count; i++)
            if ((uintptr_t)plan->source_ranges[i].begin < end && begin < (uintptr_t)plan->source_ranges[i].end)
                return gmm__fail(error, GMM_E_ARG, "%s: memory %p overlaps a storage of the source", fn, r.memory);
    }
    c.plan = plan;
    c.run = &r;
    c.error = error;
    for (; *cursor < r.end; ++*cursor) {
        const gmm_ckpt_move *m = &plan->moves[*cursor];
        const gmm_status status = gmm__ck_apply_move(&c, m);
        if (status) return status;
        if (r.io.done && plan->last_move[m->dst] == *cursor) r.io.done(r.io.user, m->dst);
    }
    return GMM_OK;
}

#ifdef __cplusplus
}
#endif
#endif /* GMM_IMPLEMENTATION */
/* --------------------------------------------------------------------------------------------------- 16 Licence ---
 * MIT License, text in the file LICENSE of the repository and below.
 *
 * Permission is hereby granted, free of charge, to any person obtaining a copy of this software and associated
 * documentation files (the "Software"), to deal in the Software without restriction, including without limitation the
 * rights to use, copy, modify, merge, publish, distribute, sublicense, and/or sell copies of the Software, and to
 * permit persons to whom the Software is furnished to do so, subject to the following conditions: The above copyright
 * notice and this permission notice shall be included in all copies or substantial portions of the Software.
 *
 * THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR IMPLIED, INCLUDING BUT NOT LIMITED TO THE
 * WARRANTIES OF MERCHANTABILITY, FITNESS FOR A PARTICULAR PURPOSE AND NONINFRINGEMENT. IN NO EVENT SHALL THE AUTHORS
 * OR COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR
 * OTHERWISE, ARISING FROM, OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE SOFTWARE.
 */
