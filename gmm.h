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
 *     gmm_groups groups = GMM_ZERO;                             // 4 experts, their token counts in memory
 *     groups.count = 4; groups.capacity = 1024; groups.splits = counts; groups.dtype = GMM_I32;
 *     gmm_mat x = gmm_mat_packed(GMM_BF16, xs), w = gmm_mat_packed(GMM_BF16, ws), y = gmm_mat_packed(GMM_BF16, ys);
 *     gmm_linear lin = GMM_ZERO;
 *     lin.groups = &groups; lin.in_features = 512; lin.out_features = 2048; lin.x = &x; lin.w = &w; lin.y = &y;
 *     gmm_info info = GMM_ZERO;
 *     gmm_linear_query(ctx, GMM_OP_LINEAR_FWD, &lin, &info);    // info.workspace_bytes
 *     gmm_linear_fwd(ctx, &lin, workspace, info.workspace_bytes, NULL);
 *
 * CONTENTS
 *     1  Version, context, errors      6  Weight-gradient decisions     11  Runtime
 *     2  Operations, options, queries  7  Routing                       12  Implementation
 *     3  Grouped linear                8  Permute, unpermute            13  Licence
 *     4  Activation                    9  Pad, GLU interleave
 *     5  Expert MLP                   10  Small operations
 *
 * CONFIGURATION (beside gmm_quant.h's; define where GMM_IMPLEMENTATION is)
 *     GMM_NO_CUBLASLT        under nvcc: leaves out the CUBLASLT engine, so that nothing links with -lcublasLt
 *     GMM_MALLOC, GMM_FREE   host allocation of contexts where gmm_config has no allocator; both or none; default
 *                            malloc and free. Signatures: void *GMM_MALLOC(size_t), void GMM_FREE(void *)
 *     GMM_ASSERT             internal consistency checks; default: none
 *
 * WHAT EVERY OPERATION KEEPS
 *     Shapes      Matrices are row-major. T is the capacity (rows of activation buffers), G the number of groups, K and
 *                 N the in and out features. Any row count >= 0 per group, any G, K, N.
 *     Splits      Group sizes may live on the device; the host reads none of them, so a captured graph can be replayed
 *                 with other sizes. Rows past their sum never influence a result and are kept or zeroed (gmm_tail).
 *     Arithmetic  fp32 accumulation and one rounding at the store; bias, activation and probabilities in fp32.
 *     Order       The order in which an output element accumulates depends only on operation, dtypes, N, K and its own
 *                 group's rows: results are bitwise equal from run to run, for any thread count, and equal to the call
 *                 with that group alone. Different machines and engines may differ in the last bits; which engine
 *                 serves a call, a query tells.
 *     Memory      The caller's: gmm_*_query tells the workspace's bytes. It is aligned to 256 bytes, its contents are
 *                 undefined before and after, and calls ordered on one stream may share it. Nothing is allocated.
 *                 Outputs must not overlap inputs, workspace or one another unless a function says so; the pointers of
 *                 one output table must be distinct.
 *     Stream      The last argument. GPU contexts enqueue on it and return; every call can be captured in a CUDA graph.
 *                 CPU contexts take NULL and are done on return.
 *     Errors      What the host can check is checked before anything is launched or written; then a status is returned
 *                 and gmm_last_error(ctx) names function, argument, value, rule and shapes. Faulty device-resident
 *                 values set bits in gmm_groups.fault, and the call stays in bounds.
 *     Threads     A context serves one thread at a time; contexts are independent and cheap. No global state.
 *
 * REVISIONS (full list: CHANGELOG.md)
 *     0.1.0  first version
 */
#ifndef GMM_MOE_GMM_H_INCLUDED
#define GMM_MOE_GMM_H_INCLUDED

#include "gmm_quant.h"

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
    GMM_LOG_WARN = 1,  /* a request was served otherwise than asked */
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
    int32_t threads;       /* CPU engine: 0 = as many as OpenMP gives; without OpenMP 1 is used */
    gmm_engine engine;     /* default of gmm_options.engine for this context */
    int32_t cpu_level;     /* CPU engine: 0 = best vector code that the processor has; 1 plain, 2 AVX2, 3 AVX-512 */
    gmm_allocator allocator;
    gmm_log log;
} gmm_config;

/* Makes a context. `config` may be NULL: the CPU with all defaults. *out is NULL after a failure.
   Stream, graph: creates nothing on a stream; not while capturing.
   Errors: GMM_E_NULL (out), GMM_E_VERSION (header versions mixed), GMM_E_ARG (field out of range), GMM_E_BUILD (a GPU
       asked of a unit that a C compiler built, or of a build without kernels for it), GMM_E_DEVICE (no such device, or
       too old), GMM_E_UNSUPPORTED (an engine of the other space), GMM_E_MEMORY, GMM_E_CUDA. */
GMMDEF gmm_status gmm__create(gmm_context **out, const gmm_config *config, uint32_t version, gmm_error *error);
static inline gmm_status gmm_create(gmm_context **out, const gmm_config *config, gmm_error *error) {
    return gmm__create(out, config, (uint32_t)GMM_VERSION_NUMBER, error);
}

/* Frees a context; NULL is allowed. Work that it enqueued may still run.
   Stream, graph: a GPU context's destruction may wait for the device (cuBLASLt). Errors: none. */
GMMDEF void gmm_destroy(gmm_context *ctx);

/* What the last failing call on this context said; "" before any. Lives until the next failing call.
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
    X(GMM_OP_TOPK_FWD, topk_fwd) \
    X(GMM_OP_TOPK_BWD, topk_bwd) \
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

/* How a call is carried out. Descriptors take a pointer; NULL means all defaults. */
typedef struct gmm_options {
    uint32_t struct_size;
    gmm_engine engine;           /* AUTO: the context's default, else the best engine whose plan says yes */
    int32_t sm_limit;            /* GPU: multiprocessors to use, 0 = all. Never changes results */
    int32_t allow_nondeterminism;/* 1: floating-point atomics may be used */
    int32_t allow_tf32;          /* 1: CUBLASLT may multiply F32 as TF32 */
    int32_t fp8_fast_accum;      /* 1: FP8 products may skip promotion */
} gmm_options;

/* What a query tells. */
typedef struct gmm_info {
    uint32_t struct_size;
    gmm_engine engine;       /* that will serve the call */
    size_t workspace_bytes;
    size_t saved_bytes;      /* MLP: gmm_mlp.saved */
    size_t deferred_bytes;   /* MLP: gmm_mlp.deferred */
    int32_t in_align;        /* in and out features must be multiples of these (1 but for block formats) */
    int32_t out_align;
    char note[192];          /* how the engine serves it, and why better ones declined */
} gmm_info;

/* offsets[g] = first row of group g, offsets[G] = number of live rows, clamped as gmm_groups says.
   Shapes: offsets [G + 1] int64, context memory.
   Stream, graph: enqueued; capturable. Errors: GMM_E_NULL, GMM_E_ARG, GMM_E_ALIGN, GMM_E_DTYPE, GMM_E_SPLIT,
       GMM_E_VERSION, GMM_E_UNSUPPORTED, GMM_E_CAPTURE (host splits), GMM_E_CUDA. */
GMMDEF gmm_status gmm_offsets(gmm_context *ctx, const gmm_groups *groups, int64_t *offsets, gmm_stream stream);

/* ------------------------------------------------------------------------------------------ 3 Grouped linear --- */

/* Where the gradient of a weight or bias goes. The descriptor pointer being NULL means: not wanted, not computed.
   own gradient (main_grad 0): stored. main_grad 1: added, unless overwrite is 1. See gmm_wgrad_decide.
   An empty group stores zeros, or leaves the destination's bits alone where it would add. */
typedef struct gmm_grad {
    uint32_t struct_size;
    int32_t main_grad;
    int32_t overwrite;
    int32_t reserved;      /* 0 */
    const gmm_mat *mat;    /* F32, BF16 or F16, per group; packed or table */
    const float *beta;     /* [G] context memory: replaces the above per group: dst = grad + beta dst. 0 never reads,
                              1 adds (bits kept for an empty group). NULL = by main_grad and overwrite */
    const uint8_t *frozen; /* [G] context memory: nonzero = the group's gradient is not computed and not touched */
} gmm_grad;

/* A grouped linear layer: y[r] = alpha_g w_g x[r] + bias_g s_r for every row r of group g.
   Shapes: x, dx [T, K]; y, dy [T, N]; w, dw [G][N, K]; bias, db [G][N]; row_scale s, d_row_scale [T].
   dtypes: x and w share F32, F16 or BF16, and so do dy and w, dy and x. y, dx, bias and gradients are F32, F16 or BF16.
   Aliasing: none.  Alignment: each base to its element; results leave faster at multiples of 16 bytes. The engine WGMMA
   needs every matrix and row of x, w and dy at multiples of 16 bytes; what breaks this another engine serves, but for
   addresses of weights in tables in device memory, which the host cannot see: these must be multiples of 16 (else
   GMM_FAULT_ADDRESS). */
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
    const float *row_scale;  /* fp32, context memory; NULL = ones */
    const float *alpha;      /* fp32, context memory; NULL = 1 */
    const gmm_mat *y;
    const gmm_mat *dy;
    const gmm_mat *dx;
    const gmm_grad *dw;
    const gmm_grad *db;
    float *d_row_scale;      /* fp32: sum over n of dy[r][n] bias_g[n]; NULL = not wanted */
    int32_t d_row_scale_add; /* 1: added to what is there */
    int32_t y_add;           /* 1: fwd adds to y, dgrad to dx, instead of storing */
} gmm_linear;

/* Engine, workspace and demands of one linear operation (GMM_OP_LINEAR_*). Pointers to data may still be NULL.
   Stream, graph: no effect on either. Errors: as the operation, but for those about addresses and workspace. */
GMMDEF gmm_status gmm_linear_query(gmm_context *ctx, gmm_op op, const gmm_linear *linear, gmm_info *info);

/* y = alpha x w^T (+ bias s) (+ y). Needs x, w, y.
   Stream, graph: enqueued; capturable, replay with other sizes is right.
   Errors: GMM_E_NULL, GMM_E_ARG, GMM_E_DTYPE, GMM_E_STRIDE, GMM_E_ALIGN, GMM_E_OVERFLOW, GMM_E_SPLIT (host splits),
       GMM_E_WORKSPACE, GMM_E_VERSION, GMM_E_UNSUPPORTED, GMM_E_CAPTURE (host splits), GMM_E_CUDA. */
GMMDEF gmm_status gmm_linear_fwd(gmm_context *ctx, const gmm_linear *linear, void *workspace, size_t workspace_bytes,
                                 gmm_stream stream);

/* dx = alpha dy w (+ dx). Needs dy, w, dx.  Stream, graph, errors: as gmm_linear_fwd. */
GMMDEF gmm_status gmm_linear_dgrad(gmm_context *ctx, const gmm_linear *linear, void *workspace, size_t workspace_bytes,
                                   gmm_stream stream);

/* dw_g = alpha_g dy_g^T x_g (+ beta dw_g), summed over the group's rows. Needs x, dy, dw.
   Stream, graph, errors: as gmm_linear_fwd. */
GMMDEF gmm_status gmm_linear_wgrad(gmm_context *ctx, const gmm_linear *linear, void *workspace, size_t workspace_bytes,
                                   gmm_stream stream);

/* db_g = sum over rows of s_r dy_r (+ beta db_g), and d_row_scale. Needs dy, and db or (d_row_scale and bias).
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

/* The settings a preset names. Pure. Errors: an unknown preset gives GMM_ACT_NONE. */
GMMDEF gmm_act gmm_act_of(gmm_act_preset preset);
GMMDEF const char *gmm_act_name(gmm_act_kind kind); /* "swiglu"; "?" if unknown */

/* 1 if the activation reads two values per output, 0 otherwise. Pure. */
GMMDEF int gmm_act_gated(gmm_act_kind kind);

/* A row-scaled activation: y[r][j] = p_r f(x[r]) over rows of all groups.
   Shapes: x, dx [T, ffn] or, gated, [T, 2 ffn] in the order of gmm_act.interleave; y, dy [T, ffn]; prob, dprob [T].
   dtypes: F32, F16, BF16, each operand its own; prob and dprob fp32.  Aliasing: none. */
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

/* dx = p dy df/dx, dprob, and y = p f(x) again. Needs x, dy and one of dx, dprob, y; what is NULL is not computed.
   Stream, graph, errors: as gmm_act_fwd. */
GMMDEF gmm_status gmm_act_bwd(gmm_context *ctx, const gmm_activation *activation, void *workspace,
                              size_t workspace_bytes, gmm_stream stream);

/* ---------------------------------------------------------------------------------------------- 5 Expert MLP --- */

/* What fwd keeps for bwd, in gmm_mlp.saved. */
typedef enum gmm_save {
    GMM_SAVE_PREACT = 0,         /* FC1's output; the activation is computed again */
    GMM_SAVE_PREACT_AND_ACT = 1, /* FC1's output and FC2's input */
    GMM_SAVE_NOTHING = 2,        /* FC1 runs again in bwd */
    GMM_SAVE_MAX = 0x7fffffff
} gmm_save;

/* How tokens reach the experts; decides who pads (gmm_pad_decide). */
typedef enum gmm_dispatcher {
    GMM_DISPATCH_ALLTOALL = 0,
    GMM_DISPATCH_ALLGATHER = 1,
    GMM_DISPATCH_DEEPEP = 2,
    GMM_DISPATCH_HYBRIDEP = 3,
    GMM_DISPATCH_NCCLEP = 4,
    GMM_DISPATCHER_MAX = 0x7fffffff
} gmm_dispatcher;

/* The configuration of an expert MLP: y = act(x w1^T + b1) p w2^T + b2 (p). Fields below `save` describe the model
   around the MLP; they change no result and exist so that gmm_mlp_validate can refuse what would train wrong. */
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
    int32_t overlap_dispatch_wgrad; /* the same, asked for by the overlap of dispatch with wgrad; excludes the former */
    int32_t ddp_expects_delay;      /* 1: the data-parallel hooks wait for the queued gradients */
    int32_t ddp;                    /* 1: data-parallel hooks are installed */
    int32_t topk;                   /* experts per token; 0 = unknown */
    int32_t prob_on_input;          /* x was weighted by the probability already */
    int32_t etp_size;               /* expert tensor parallelism; 0 = 1 */
    int32_t source_interleave;      /* GLU block of the weights as loaded; halves: ffn; 0 = not stated */
    gmm_recipe_kind recipe;
    int32_t router_padding;         /* the router rounds counts up for quantization */
    gmm_dispatcher dispatcher;
    int32_t act_input_fp8;          /* the activation's input is kept as unscaled E4M3 */
    int32_t act_recompute;          /* the activation is recomputed in bwd */
} gmm_mlp_config;

/* One call that checks a configuration; pure. Every operation on an MLP makes it too.
   Errors: GMM_E_CONFIG, and error->text opens with the field's name. The rules:
       hidden, ffn >= 1; hidden_out >= 0; enumerations in range; switches 0 or 1
       act: as gmm_act_fwd (interleave >= 0, a divisor of ffn, gated only; limit 0 or finite > 0; offset finite, gated
           only; alpha finite, and not 0 or 1 only where a sigmoid takes it; betas 0 or finite > 0, SiTU only)
       source_interleave >= 0 and, where stated for a gated activation, the layout that act.interleave reads
       delay_wgrad and overlap_dispatch_wgrad exclude each other; with ddp, either needs ddp_expects_delay, and
           ddp_expects_delay needs either: otherwise hooks fire before, or never after, the gradient
       prob_on_bias2 needs prob and bias2; prob_on_input needs topk 1 and excludes prob
       bias2 with prob and topk > 1 needs prob_on_bias2: unweighted biases would add up topk times
       bias1 or bias2 need etp_size 1: every rank would add them
       router_padding needs a quantized recipe, and not the all-gather dispatcher
       act_input_fp8 needs SwiGLU without limit and offset
       act_recompute excludes save = GMM_SAVE_PREACT_AND_ACT */
GMMDEF gmm_status gmm_mlp_validate(const gmm_mlp_config *config, gmm_error *error);

/* Parameters of an MLP, as callbacks name them. */
typedef enum gmm_param {
    GMM_PARAM_W1 = 0, GMM_PARAM_B1 = 1, GMM_PARAM_W2 = 2, GMM_PARAM_B2 = 3, GMM_PARAM_MAX = 0x7fffffff
} gmm_param;

/* Gradient callbacks: once per parameter and micro-batch for every parameter whose gradient is wanted, empty groups or
   not, FC2's before FC1's, on the calling thread, when the work that completes the gradient has been enqueued on
   `stream`. Biases complete in bwd; weights in bwd or, delayed, in gmm_mlp_wgrad. Not fired while capturing. */
typedef struct gmm_grad_hooks {
    void *user;
    void (*ready)(void *user, gmm_param param, gmm_stream stream);
} gmm_grad_hooks;

/* One queued weight gradient of both linears; its fields are the library's. */
typedef struct gmm_wgrad_entry {
    uint64_t opaque[192];
} gmm_wgrad_entry;

/* Caller-owned FIFO of delayed weight gradients. Make it with gmm_wgrad_queue_over; `count` may be read. */
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

/* Tensors of one MLP call.
   Shapes: x, dx [T, hidden]; w1 [G][2 ffn or ffn, hidden] and b1 [G][2 ffn or ffn], gated rows in the order of
       act.interleave; w2 [G][hidden_out, ffn], b2 [G][hidden_out]; y, dy [T, hidden_out]; prob, dprob [T] fp32.
   dtypes: x, w1, w2, dy share F32, F16 or BF16, which is also the dtype of what is saved; the rest is free as in
       gmm_linear.  Aliasing: none. */
typedef struct gmm_mlp {
    uint32_t struct_size;
    int32_t reserved;       /* 0 */
    const gmm_mlp_config *config;
    const gmm_groups *groups;
    const gmm_options *options;
    const gmm_mat *x, *w1, *b1, *w2, *b2;
    const float *prob;
    const gmm_mat *y;
    void *saved;            /* fwd writes, bwd reads; 256-byte aligned; NULL in fwd = inference */
    size_t saved_bytes;
    const gmm_mat *dy, *dx; /* dx NULL = not wanted */
    const gmm_grad *dw1, *dw2, *db1, *db2; /* each NULL = not wanted */
    float *dprob;           /* with prob_on_bias2 it includes the bias's term; NULL = not wanted */
    void *deferred;         /* delayed: bwd keeps wgrad operands here until gmm_mlp_wgrad; 256-byte aligned */
    size_t deferred_bytes;
    gmm_wgrad_queue *queue; /* delayed: where bwd records them */
    const gmm_grad_hooks *hooks; /* NULL = none */
} gmm_mlp;

/* Engine and sizes of GMM_OP_MLP_FWD, GMM_OP_MLP_BWD or GMM_OP_MLP_WGRAD.  Stream, graph: none.
   Errors: as the operation, but for those about addresses and buffers. */
GMMDEF gmm_status gmm_mlp_query(gmm_context *ctx, gmm_op op, const gmm_mlp *mlp, gmm_info *info);

/* y of the MLP. Needs x, w1, w2, y and what the configuration names.  Stream, graph: enqueued; capturable.
   Errors: as gmm_linear_fwd, GMM_E_CONFIG (gmm_mlp_validate). */
GMMDEF gmm_status gmm_mlp_fwd(gmm_context *ctx, const gmm_mlp *mlp, void *workspace, size_t workspace_bytes,
                              gmm_stream stream);

/* The wanted ones of dx, dw1, dw2, db1, db2, dprob from dy, saved (and x, w1, b1 as the save policy needs). Delayed
   weight gradients are recorded in `queue` with everything they need: x, dy, `deferred`, the destinations and the fault
   word must stay as they are until gmm_mlp_wgrad has run; the splits need not.
   Stream, graph: enqueued; capturable. A captured call fills the queue once, when it is captured; no replay does.
   Errors: as gmm_mlp_fwd; GMM_E_STATE (queue full). */
GMMDEF gmm_status gmm_mlp_bwd(gmm_context *ctx, const gmm_mlp *mlp, void *workspace, size_t workspace_bytes,
                              gmm_stream stream);

/* Computes the oldest queued weight gradients: FC2's, then FC1's, and fires their hooks. `options` as recorded.
   Stream, graph: enqueued; capturable.
   Errors: GMM_E_STATE (queue empty), GMM_E_NULL, GMM_E_WORKSPACE, GMM_E_ALIGN, GMM_E_CUDA; the entry then stays. */
GMMDEF gmm_status gmm_mlp_wgrad(gmm_context *ctx, gmm_wgrad_queue *queue, void *workspace, size_t workspace_bytes,
                                gmm_stream stream);

/* Fires the hooks that `op` (GMM_OP_MLP_BWD or GMM_OP_MLP_WGRAD) of this MLP fires: to be called after a graph that
   holds the operation was launched.  Stream, graph: handed to the hooks. Errors: those of gmm_mlp_query. */
GMMDEF gmm_status gmm_mlp_fire_hooks(gmm_context *ctx, gmm_op op, const gmm_mlp *mlp, gmm_stream stream);

/* -------------------------------------------------------------------------------- 6 Weight-gradient decisions --- */

/* What becomes of one weight's gradient, as data-parallel trainers expect it. All fields are 0 or 1. */
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

/* Top-k routing. scores s[t] = softmax or sigmoid of logits[t]; the k experts with the largest s + expert_bias are
   chosen, the lower index at equal values (a NaN score ranks last); indices in falling order of that value.
       probs[t][i] = scale s[t][e_i] (/ (sum over the chosen of s + 1e-20 for sigmoid) if normalize)
   Losses, added up over tokens in a fixed order, with c_e the number of times expert e was chosen and q = s, divided
   for sigmoid by the row's sum over all experts:
       aux_loss = aux_coeff E / (topk T^2) sum_e c_e sum_t q[t][e]
       z_loss = z_coeff / T sum_t logsumexp(logits[t])^2
   Shapes: logits, dlogits [T, E]; expert_bias [E]; indices, probs, dprobs [T, topk]; counts [E]; offsets [E + 1];
       T topk < 2^31. Where all scores of a denominator are 0, the quotient is 0.
   dtypes: logits, dlogits F32, F16, BF16; indices int32; counts, offsets int32; the rest fp32.  Aliasing: none. */
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
    int32_t *offsets;        /* their exclusive prefix sums; NULL = not wanted */
    float aux_coeff, z_coeff;/* 0 = no such loss and no such gradient; finite */
    float *aux_loss, *z_loss;/* one value each; NULL = not wanted */
    const float *dprobs;     /* bwd: gradient of probs; NULL = zeros */
    const float *dloss;      /* bwd: [2] gradients of aux_loss and z_loss; NULL = ones */
    const gmm_mat *dlogits;  /* bwd writes */
} gmm_route;

/* Engine and workspace of GMM_OP_TOPK_FWD or GMM_OP_TOPK_BWD.  Stream, graph: none. Errors: as the operation. */
GMMDEF gmm_status gmm_topk_query(gmm_context *ctx, gmm_op op, const gmm_route *route, gmm_info *info);

/* indices, probs, counts, offsets, losses. Needs logits, indices, probs.  Stream, graph: enqueued; capturable.
   Errors: as gmm_linear_fwd. */
GMMDEF gmm_status gmm_topk_fwd(gmm_context *ctx, const gmm_route *route, void *workspace, size_t workspace_bytes,
                               gmm_stream stream);

/* dlogits from dprobs, dloss, logits, indices, counts. The choice itself has no gradient, nor has expert_bias.
   Stream, graph: enqueued; capturable. Errors: as gmm_linear_fwd. */
GMMDEF gmm_status gmm_topk_bwd(gmm_context *ctx, const gmm_route *route, void *workspace, size_t workspace_bytes,
                               gmm_stream stream);

/* -------------------------------------------------------------------------------------- 8 Permute, unpermute --- */

/* Moves tokens to expert order and back. Slot i of token t (its i-th expert) is dropped where indices[t][i] is -1.
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
    int64_t capacity;         /* R >= 0, < 2^31: rows of permuted buffers; what does not fit is dropped (-1) */
    int64_t hidden;           /* H >= 1 */
    int32_t topk;             /* >= 1 */
    int32_t align;            /* 0 = 1 */
    gmm_tail tail;            /* permuted rows past the last segment */
    int32_t reserved;         /* 0 */
    const gmm_options *options;
    uint32_t *fault;          /* GMM_FAULT_INDEX, GMM_FAULT_CAPACITY; NULL = not wanted */
    const int32_t *indices;
    int32_t *row_of;          /* row of each slot, -1 = dropped; map writes, the others read */
    int32_t *slot_of;         /* slot t topk + i of each row, -1 = padding; map writes all R, the others read */
    int32_t *sizes;           /* rows of each expert, padding included; map writes: the splits of gmm_groups */
    const gmm_mat *x;         /* permute_fwd reads */
    const float *probs;       /* permute_fwd, unpermute read; NULL = none */
    const gmm_mat *rows;      /* permute_fwd writes, unpermute reads */
    float *row_probs;         /* permute_fwd writes (0 in padding); NULL = not wanted */
    const gmm_mat *out;       /* unpermute_fwd writes */
    const gmm_mat *dout;      /* unpermute_bwd reads */
    const gmm_mat *drows;     /* permute_bwd reads, unpermute_bwd writes */
    const float *drow_probs;  /* permute_bwd reads */
    const gmm_mat *dx;        /* permute_bwd writes */
    float *dprobs;            /* permute_bwd: from drow_probs; unpermute_bwd: from dout and rows. Dropped slots get 0 */
} gmm_permute;

/* Engine and workspace of GMM_OP_PERMUTE_* or GMM_OP_UNPERMUTE_*.  Stream, graph: none. Errors: as the operation. */
GMMDEF gmm_status gmm_permute_query(gmm_context *ctx, gmm_op op, const gmm_permute *permute, gmm_info *info);

/* row_of, slot_of and sizes from indices (any of the three outputs may be NULL).
   Stream, graph: enqueued; capturable. Errors: as gmm_linear_fwd. */
GMMDEF gmm_status gmm_permute_map(gmm_context *ctx, const gmm_permute *permute, void *workspace,
                                  size_t workspace_bytes, gmm_stream stream);

/* rows[r] = x[token of r], row_probs[r] = probs[slot of r]; padding rows are zeros. Needs slot_of, sizes, x, rows.
   row_of, if there, spares a GPU reading a token once for each of its rows; the results are those of slot_of, whatever
   it holds.  Stream, graph: enqueued; capturable. Errors: as gmm_linear_fwd. */
GMMDEF gmm_status gmm_permute_fwd(gmm_context *ctx, const gmm_permute *permute, void *workspace,
                                  size_t workspace_bytes, gmm_stream stream);

/* dx[t] = sum over slots of drows[row]; dprobs from drow_probs. Needs row_of, and drows with dx or drow_probs with
   dprobs.  Stream, graph: enqueued; capturable. Errors: as gmm_linear_fwd. */
GMMDEF gmm_status gmm_permute_bwd(gmm_context *ctx, const gmm_permute *permute, void *workspace,
                                  size_t workspace_bytes, gmm_stream stream);

/* out[t] = sum over slots of (probs) rows[row]. Needs row_of, rows, out.
   Stream, graph: enqueued; capturable. Errors: as gmm_linear_fwd. */
GMMDEF gmm_status gmm_unpermute_fwd(gmm_context *ctx, const gmm_permute *permute, void *workspace,
                                    size_t workspace_bytes, gmm_stream stream);

/* drows[r] = (probs) dout[token of r], zeros in padding; dprobs = dout . rows. Needs dout, and slot_of and sizes with
   drows (row_of as in permute_fwd), or row_of and rows with dprobs.  Stream, graph: enqueued; capturable.
   Errors: as gmm_linear_fwd. */
GMMDEF gmm_status gmm_unpermute_bwd(gmm_context *ctx, const gmm_permute *permute, void *workspace,
                                    size_t workspace_bytes, gmm_stream stream);

/* ------------------------------------------------------------------------------------ 9 Pad, GLU interleave --- */

/* Rows that recipes of other libraries want each group rounded up to (1 = none): 256 for grouped-tensor kernels, 32
   MXFP8, 128 NVFP4, 16 other FP8. This library needs no padding for any recipe. Pure. */
GMMDEF int32_t gmm_pad_align(gmm_recipe_kind recipe, int32_t grouped_tensor);

typedef struct gmm_pad_in {
    gmm_recipe_kind recipe;
    gmm_dispatcher dispatcher;
    int32_t grouped_tensor;       /* the experts use grouped-tensor kernels */
    int32_t router_padding;       /* the router was asked to round counts up */
    int32_t router_padding_done;  /* and every count really is a multiple (it cannot always be reached) */
    int32_t permute_fusion;       /* permutation is fused, by a kernel that pads */
} gmm_pad_in;

/* Whether the expert MLP must pad, and to what. *align is 1 where it need not: no recipe asks for it, or rows already
   come padded: by the router (only if router_padding_done), by HybridEP or NCCL-EP, or by DeepEP's fused
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

/* Pads. Stream, graph: enqueued; capturable. Errors: as gmm_linear_fwd; a padded sum above R is GMM_FAULT_CAPACITY. */
GMMDEF gmm_status gmm_pad(gmm_context *ctx, const gmm_padding *padding, void *workspace, size_t workspace_bytes,
                          gmm_stream stream);

/* Takes the padding out again: the inverse of gmm_pad on the live rows.
   Stream, graph: enqueued; capturable. Errors: as gmm_pad. */
GMMDEF gmm_status gmm_unpad(gmm_context *ctx, const gmm_padding *padding, void *workspace, size_t workspace_bytes,
                            gmm_stream stream);

/* Moves FC1's gate and linear parts between halves [a | b] and blocks [a:B | b:B | a:B ...].
   Shapes: by axis. GMM_GLU_ROWS: count matrices of [2 ffn, cols], the rows move: weights, biases (cols = 1, ld = 1 and
       group_stride = 2 ffn). GMM_GLU_COLUMNS: one matrix of [count, 2 ffn], the columns move: activations.
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

/* Interleaves, or back. Stream, graph: enqueued; capturable. Errors: as gmm_linear_fwd; GMM_E_CONFIG (block). */
GMMDEF gmm_status gmm_glu_interleave(gmm_context *ctx, const gmm_glu *glu, void *workspace, size_t workspace_bytes,
                                     gmm_stream stream);

/* ------------------------------------------------------------------------------------------ 10 Small operations --- */

/* y = beta y + scale (x_0 + x_1 + ... + x_{count - 1}): what reduces gradients into main_grad. fp32 in this order, one
   rounding at the store. beta 0 never reads y; scale and beta are taken as they are, so a scale of 0 means 0.
   Shapes: x count matrices of [rows, cols], packed or a table; y [rows, cols].
   dtypes: x and y each F32, F16 or BF16.  Aliasing: none but y with itself. */
typedef struct gmm_accumulation {
    uint32_t struct_size;
    int32_t count;           /* >= 1 */
    int64_t rows;            /* >= 0 */
    int64_t cols;            /* >= 1 */
    const gmm_options *options;
    const gmm_mat *x;        /* a table stands on the host (GMM_MAT_TABLE_ON_HOST) and is read during the call */
    const gmm_mat *y;
    float scale;
    float beta;
} gmm_accumulation;

/* Engine and workspace of GMM_OP_ACCUMULATE.  Stream, graph: none. Errors: as the operation. */
GMMDEF gmm_status gmm_accumulate_query(gmm_context *ctx, const gmm_accumulation *accumulation, gmm_info *info);

/* Accumulates. Stream, graph: enqueued; capturable, with scale, beta and a table's addresses as they are now.
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

/* --------------------------------------------------------------------------------------------------- 11 Runtime --- */

typedef struct CUevent_st *gmm_event; /* a cudaEvent_t; in a CPU context an object of this library */

enum { GMM_EVENT_EXTERNAL = 1u }; /* while capturing, the record or wait becomes a node of the graph and meets the event
                                     outside of it at every replay; otherwise it changes nothing */

/* Memory that work reads, or writes; for runtimes that check the order of accesses. */
typedef struct gmm_range {
    const void *data;
    size_t bytes;
    int32_t writes;   /* 1: written, maybe read too */
    int32_t reserved; /* 0 */
} gmm_range;

/* Operations for a stream, as a function that gives them to it. */
typedef struct gmm_work {
    uint32_t struct_size;
    int32_t range_count;
    const char *name;        /* for messages; outlives the work */
    gmm_status (*function)(const void *argument, gmm_stream stream);
    const void *argument;
    size_t argument_bytes;
    const gmm_range *ranges; /* all that the operations touch; may be NULL where nobody checks */
} gmm_work;

/* Streams, events, copies and fills of one memory space, as a table of functions: gmm_runtime_of fills it for a
   context, and whoever brings streams of his own fills one himself. Every function takes `self` first.
   Order       What is given to one stream is done in that order; events order streams. The host waits in stream_sync
               and event_sync only. On the CPU everything is done on return, and the one stream is NULL.
   Stream, graph: record, wait, copies, fills and run are enqueued and capturable; stream_sync on a capturing stream
               is GMM_E_CAPTURE and leaves the capture intact. The rest is not for captured streams and events.
   Memory      create and destroy alone may allocate: on the CPU from the context's allocator.
   Errors: GMM_E_NULL, GMM_E_ARG (pitch below width, value above 255, unknown flags, a stream that is not NULL on the
               CPU), GMM_E_OVERFLOW, GMM_E_MEMORY, GMM_E_CAPTURE, GMM_E_CUDA; gmm_last_error of the context tells more.
   Threads     As the context; the table lives as long as the context does. */
typedef struct gmm_runtime {
    uint32_t struct_size;
    gmm_space space;
    void *self;
    /* A stream that waits for no other. `priority` 0 is usual, smaller is more urgent; cut to what the device has. */
    gmm_status (*stream_create)(void *self, int32_t priority, gmm_stream *out);
    gmm_status (*stream_destroy)(void *self, gmm_stream stream); /* what it was given is still done; NULL is allowed */
    /* What the stream is given from now on starts after the event's last record; at once if there was none. */
    gmm_status (*stream_wait)(void *self, gmm_stream stream, gmm_event event, uint32_t flags);
    gmm_status (*stream_sync)(void *self, gmm_stream stream);
    gmm_status (*event_create)(void *self, gmm_event *out); /* without time stamps */
    gmm_status (*event_destroy)(void *self, gmm_event event); /* NULL is allowed */
    gmm_status (*event_record)(void *self, gmm_event event, gmm_stream stream, uint32_t flags);
    gmm_status (*event_query)(void *self, gmm_event event, int32_t *done); /* 1: last record reached, or none */
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
    /* Has work->function called, and hands on its status. The runtimes of contexts call it at once, with `stream`. One
       whose streams are queues of its own copies the argument and calls the function with stream NULL when its turn
       comes, maybe on another thread, so operations in it take a context that nobody else uses at that time. */
    gmm_status (*run)(void *self, const gmm_work *work, gmm_stream stream);
} gmm_runtime;

/* The runtime of a context's memory space. out->struct_size 0 means this header's.
   Stream, graph: no effect on either. Errors: GMM_E_NULL, GMM_E_VERSION. */
GMMDEF gmm_status gmm_runtime_of(gmm_context *ctx, gmm_runtime *out);

#ifdef __cplusplus
}
#endif
#endif /* GMM_MOE_GMM_H_INCLUDED */

/* -------------------------------------------------------------------------------------------- 12 Implementation --- */

#if defined(GMM_IMPLEMENTATION) && !defined(GMM__IMPLEMENTATION_DONE)
#define GMM__IMPLEMENTATION_DONE

#include <stdlib.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
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
#ifndef GMM_ASSERT
#define GMM_ASSERT(condition) ((void)0)
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

#if defined(__CUDACC__) && !defined(GMM__GEMM_DONE)
#include "gmm_kernels.cuh"
#endif

/* ......................................................................................... 12.1 Context, checks ... */

enum { GMM__WORKSPACE_ALIGN = 256 };

#ifdef GMM__CUBLASLT
/* CUBLASLT engine: cuBLASLt's handle, and algorithms by a hash of what their choice depends on. */
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

struct gmm_context {
    gmm_config config;
    gmm_error error;
    int32_t threads;   /* CPU engine */
    int32_t cpu_level; /* 1 plain, 2 AVX2, 3 AVX-512 */
    int32_t capability;/* CUDA: 90 for compute capability 9.0 */
#ifdef __CUDACC__
    PFN_cuTensorMapEncodeTiled_v12000 wgmma_encode; /* WGMMA engine: the driver's function that makes tensor maps */
    const char *wgmma_lacks;                        /* why it serves nothing; NULL = it does */
#endif
#ifdef GMM__CUBLASLT
    gmm__lt lt;
#endif
};

/* Operands of a call by role. Families share roles, so that checks and engines read alike. */
enum gmm__role {
    GMM__X_, GMM__W, GMM__BIAS, GMM__Y, GMM__DY, GMM__DX, GMM__DW, GMM__DB, /* linear, activation, and the MLP's FC1 */
    GMM__W2, GMM__BIAS2, GMM__DW2, GMM__DB2,                                /* the MLP's FC2 */
    GMM__ROLES
};

/* A checked call: every descriptor copied, defaults filled in, absent operands with dtype GMM_NONE. Engines read only
   this. A call made for a query has the same shapes, dtypes and presence, but addresses that may be NULL. */
typedef struct gmm__call {
    gmm_context *ctx;
    gmm_op op;
    int query;
    const char *function; /* for messages */
    char shapes[112];
    gmm_options options;
    gmm_groups groups;
    gmm_mat mat[GMM__ROLES];
    gmm_grad grad[GMM__ROLES]; /* of GMM__DW, GMM__DB, GMM__DW2, GMM__DB2; beta resolved by gmm__grad_beta */
    int64_t rows, in, out;     /* capacity, K, N; MLP: hidden and hidden_out */
    union {
        gmm_linear linear;
        gmm_activation act;
        gmm_mlp mlp;
        gmm_route route;
        gmm_permute permute;
        gmm_padding pad;
        gmm_glu glu;
        gmm_accumulation sum;
        gmm_conversion convert;
    } d;
    gmm_act act;            /* activation and MLP */
    gmm_mlp_config config;  /* MLP */
    const void *input;      /* what else an operation reads and writes: named where it is used */
    void *output;
} gmm__call;

/* How an engine serves a call: made by its pure plan function, carried out by its launch function. */
enum { GMM__PARTS = 8 };
typedef struct gmm__plan {
    const gmm__call *call;
    gmm_engine engine;
    int32_t kernel;              /* row of the engine's kernel table */
    int32_t grid[3], block, cluster;
    size_t shared_bytes;
    size_t workspace_bytes;
    size_t part[GMM__PARTS];     /* offsets of the workspace's regions */
    size_t saved_bytes, deferred_bytes;
    void *workspace;             /* set before launch */
    char note[192];              /* why not, or how */
} gmm__plan;

typedef struct gmm__engine_op {
    int (*plan)(const gmm__call *call, gmm__plan *plan); /* 1 = yes; 0 = no, with a note */
    gmm_status (*launch)(const gmm__plan *plan, gmm_stream stream);
} gmm__engine_op;

typedef struct gmm__engine_row {
    gmm_engine engine;
    gmm_space space;
    int automatic; /* AUTO may choose it */
    gmm__engine_op ops[GMM_OP_COUNT];
} gmm__engine_row;

/* Fails a call: "gmm_linear_fwd: w: <what is wrong> (<shapes>)". */
static GMM__UNUSED gmm_status gmm__refuse(gmm__call *call, gmm_status status, const char *argument, const char *format,
                                          ...) {
    char what[320];
    va_list list;
    va_start(list, format);
    (void)vsnprintf(what, sizeof what, format, list);
    va_end(list);
    return gmm__fail(&call->ctx->error, status, "%s: %s: %s%s%s%s", call->function, argument, what,
                     call->shapes[0] ? " (" : "", call->shapes, call->shapes[0] ? ")" : "");
}

/* Copies a descriptor that opens with struct_size. Returns 0 if the caller's is newer than this version. */
static int gmm__copy_sized(void *to, size_t size, const void *from) {
    uint32_t given;
    memcpy(&given, from, sizeof given);
    if (given > size) return 0;
    memset(to, 0, size);
    memcpy(to, from, given ? given : size);
    return 1;
}

static GMM__UNUSED gmm_status gmm__read(gmm__call *call, const char *argument, void *to, size_t size,
                                        const void *from) {
    uint32_t given;
    if (!from) return gmm__refuse(call, GMM_E_NULL, argument, "is NULL");
    memcpy(&given, from, sizeof given);
    if (given && given < 2 * sizeof given)
        return gmm__refuse(call, GMM_E_ARG, argument, "struct_size %u is too small for any version", given);
    if (!gmm__copy_sized(to, size, from))
        return gmm__refuse(call, GMM_E_VERSION, argument, "struct_size %u is larger than the %u bytes of version %s",
                           given, (unsigned)size, GMM_VERSION_STRING);
    memset(to, 0, sizeof given); /* the copy has this version's size */
    return GMM_OK;
}

/* Opens a call: context, function name, options. */
static GMM__UNUSED gmm_status gmm__open(gmm__call *call, gmm_context *ctx, gmm_op op, const char *function, int query) {
    memset(call, 0, sizeof *call);
    if (!ctx) return GMM_E_NULL;
    call->ctx = ctx;
    call->op = op;
    call->function = function;
    call->query = query;
    return GMM_OK;
}

static GMM__UNUSED gmm_status gmm__read_options(gmm__call *call, const gmm_options *options) {
    gmm_status s = GMM_OK;
    if (options && (s = gmm__read(call, "options", &call->options, sizeof call->options, options)) != GMM_OK) return s;
    if (call->options.engine == GMM_ENGINE_AUTO) call->options.engine = call->ctx->config.engine;
    if (call->options.engine < GMM_ENGINE_AUTO || call->options.engine > GMM_ENGINE_CUBLASLT)
        return gmm__refuse(call, GMM_E_ARG, "options.engine", "%d is no engine", (int)call->options.engine);
    {
        const gmm_options *o = &call->options;
        if ((o->allow_nondeterminism | o->allow_tf32 | o->fp8_fast_accum) & ~1)
            return gmm__refuse(call, GMM_E_ARG, "options", "allow_nondeterminism %d, allow_tf32 %d and fp8_fast_accum "
                               "%d must be 0 or 1", (int)o->allow_nondeterminism, (int)o->allow_tf32,
                               (int)o->fp8_fast_accum);
    }
    if (call->options.sm_limit < 0)
        return gmm__refuse(call, GMM_E_ARG, "options.sm_limit", "%d must be >= 0", (int)call->options.sm_limit);
    return GMM_OK;
}

/* The split's value behind group g: its size or its end offset. */
static int64_t gmm__split_value(const gmm_groups *groups, int64_t g) {
    const int64_t i = groups->form == GMM_SPLIT_OFFSETS ? g + 1 : g;
    return groups->dtype == GMM_I64 ? ((const int64_t *)groups->splits)[i] : ((const int32_t *)groups->splits)[i];
}

static uint32_t gmm__split_first(const gmm_groups *groups) {
    int64_t first;
    if (groups->form != GMM_SPLIT_OFFSETS) return 0;
    first = groups->dtype == GMM_I64 ? ((const int64_t *)groups->splits)[0] : ((const int32_t *)groups->splits)[0];
    return first == 0 ? 0 : (uint32_t)GMM_FAULT_MONOTONIC;
}

static GMM__UNUSED gmm_status gmm__read_groups(gmm__call *call, const gmm_groups *groups) {
    gmm_groups *g = &call->groups;
    gmm_status s = gmm__read(call, "groups", g, sizeof *g, groups);
    if (s != GMM_OK) return s;
    if (g->count < 1) return gmm__refuse(call, GMM_E_ARG, "groups.count", "%d must be >= 1", (int)g->count);
    if (g->capacity < 0)
        return gmm__refuse(call, GMM_E_ARG, "groups.capacity", "%lld must be >= 0", (long long)g->capacity);
    if (g->dtype != GMM_I32 && g->dtype != GMM_I64)
        return gmm__refuse(call, GMM_E_DTYPE, "groups.dtype", "%s must be i32 or i64", gmm_dtype_name(g->dtype));
    if (g->form != GMM_SPLIT_SIZES && g->form != GMM_SPLIT_OFFSETS)
        return gmm__refuse(call, GMM_E_ARG, "groups.form", "%d is neither sizes (0) nor offsets (1)", (int)g->form);
    if (g->tail != GMM_TAIL_KEEP && g->tail != GMM_TAIL_ZERO)
        return gmm__refuse(call, GMM_E_ARG, "groups.tail", "%d is neither keep (0) nor zero (1)", (int)g->tail);
    if (g->row_align < 0)
        return gmm__refuse(call, GMM_E_ARG, "groups.row_align", "%d must be >= 0", (int)g->row_align);
    if (g->rows_hint < 0)
        return gmm__refuse(call, GMM_E_ARG, "groups.rows_hint", "%lld must be >= 0", (long long)g->rows_hint);
    if (g->on_host & ~1) return gmm__refuse(call, GMM_E_ARG, "groups.on_host", "%d must be 0 or 1", (int)g->on_host);
    if (g->reserved) return gmm__refuse(call, GMM_E_ARG, "groups.reserved", "%d must be 0", (int)g->reserved);
    call->rows = g->capacity;
    if (call->query) return GMM_OK;
    if (!g->splits) return gmm__refuse(call, GMM_E_NULL, "groups.splits", "is NULL with %d groups", (int)g->count);
    if ((uintptr_t)g->splits % (g->dtype == GMM_I64 ? 8 : 4))
        return gmm__refuse(call, GMM_E_ALIGN, "groups.splits", "%p is not aligned to an %s", g->splits,
                           gmm_dtype_name(g->dtype));
    if ((uintptr_t)g->fault % 4)
        return gmm__refuse(call, GMM_E_ALIGN, "groups.fault", "%p is not aligned to 4 bytes", (void *)g->fault);
    if (g->on_host) { /* the host can check these, so it does */
        uint32_t fault = gmm__split_first(g);
        int64_t begin = 0, i;
        if (fault)
            return gmm__refuse(call, GMM_E_SPLIT, "groups.splits", "the first offset is %lld, not 0",
                               (long long)gmm__split_value(g, -1));
        for (i = 0; i < g->count; i++) {
            const int64_t start = begin;
            char rule[64];
            begin = gmm_split_end(begin, gmm__split_value(g, i), g->form, g->capacity, g->row_align, &fault);
            if (!fault) continue;
            if (fault & (uint32_t)GMM_FAULT_NEGATIVE) (void)snprintf(rule, sizeof rule, "must be >= 0");
            else if (fault & (uint32_t)GMM_FAULT_MONOTONIC)
                (void)snprintf(rule, sizeof rule, "must be >= the offset before it, %lld", (long long)start);
            else if (fault & (uint32_t)GMM_FAULT_CAPACITY)
                (void)snprintf(rule, sizeof rule, "the sum exceeds the capacity %lld", (long long)g->capacity);
            else (void)snprintf(rule, sizeof rule, "breaks the promise row_align %d", (int)g->row_align);
            return gmm__refuse(call, GMM_E_SPLIT, "groups.splits", "%s %lld of group %lld: %s",
                               g->form == GMM_SPLIT_OFFSETS ? "end offset" : "size",
                               (long long)gmm__split_value(g, i), (long long)i, rule);
        }
    }
    return GMM_OK;
}

/* Sets of dtypes an operand may have. */
enum {
    GMM__FLOATS = 1 << GMM_F32 | 1 << GMM_F16 | 1 << GMM_BF16,
    GMM__BYTES = GMM__FLOATS | 1 << GMM_E4M3 | 1 << GMM_E5M2 | 1 << GMM_E8M0 | 1 << GMM_U8 | 1 << GMM_I32 | 1 << GMM_I64
};

/* Reads one operand of `matrices` matrices (0: one matrix, which has no table) of rows x cols and checks all that can
   be checked; mat may be NULL if the operand is optional. */
static GMM__UNUSED gmm_status gmm__read_mat(gmm__call *call, int role, const char *argument, const gmm_mat *mat,
                                            int required, int64_t matrices, int64_t rows, int64_t cols,
                                            uint32_t dtypes) {
    gmm_mat *m = &call->mat[role];
    gmm_status s;
    int64_t bytes, size;
    memset(m, 0, sizeof *m);
    if (!mat) return required ? gmm__refuse(call, GMM_E_NULL, argument, "is NULL") : GMM_OK;
    if ((s = gmm__read(call, argument, m, sizeof *m, mat)) != GMM_OK) return s;
    if (m->dtype <= GMM_NONE || m->dtype > GMM_I64 || !(dtypes >> m->dtype & 1u))
        return gmm__refuse(call, GMM_E_DTYPE, argument, "dtype %s is not accepted here", gmm_dtype_name(m->dtype));
    if (m->scaling != GMM_SCALING_NONE)
        return gmm__refuse(call, GMM_E_DTYPE, argument, "scaling %s is not accepted here",
                           gmm_scaling_name(m->scaling));
    if (m->flags & ~(uint32_t)(GMM_MAT_TABLE_ON_HOST | GMM_MAT_ROW_AMAX))
        return gmm__refuse(call, GMM_E_ARG, argument, "flags 0x%x has unknown bits", (unsigned)m->flags);
    if (m->reserved) return gmm__refuse(call, GMM_E_ARG, argument, "reserved %d must be 0", (int)m->reserved);
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
    return GMM_OK;
}

/* Reads a gradient destination: one matrix per group. */
static GMM__UNUSED gmm_status gmm__read_grad(gmm__call *call, int role, const char *argument, const gmm_grad *grad,
                                             int required, int64_t rows, int64_t cols) {
    gmm_grad *g = &call->grad[role];
    gmm_status s;
    memset(g, 0, sizeof *g);
    memset(&call->mat[role], 0, sizeof call->mat[role]);
    if (!grad) return required ? gmm__refuse(call, GMM_E_NULL, argument, "is NULL") : GMM_OK;
    if ((s = gmm__read(call, argument, g, sizeof *g, grad)) != GMM_OK) return s;
    if ((g->main_grad | g->overwrite) & ~1)
        return gmm__refuse(call, GMM_E_ARG, argument, "main_grad %d and overwrite %d must be 0 or 1", (int)g->main_grad,
                           (int)g->overwrite);
    if (g->reserved) return gmm__refuse(call, GMM_E_ARG, argument, "reserved %d must be 0", (int)g->reserved);
    if (!call->query && (uintptr_t)g->beta % 4)
        return gmm__refuse(call, GMM_E_ALIGN, argument, "beta %p is not aligned to 4 bytes", (const void *)g->beta);
    return gmm__read_mat(call, role, argument, g->mat, 1, call->groups.count, rows, cols, GMM__FLOATS);
}

/* An array of 4-byte values that a call reads or writes. */
static GMM__UNUSED gmm_status gmm__check_array(gmm__call *call, const char *argument, const void *array, int required,
                                               int64_t count) {
    if (call->query) return GMM_OK;
    if (!array && required && count > 0)
        return gmm__refuse(call, GMM_E_NULL, argument, "is NULL for %lld values", (long long)count);
    if ((uintptr_t)array % 4) return gmm__refuse(call, GMM_E_ALIGN, argument, "%p is not aligned to 4 bytes", array);
    return GMM_OK;
}

/* Address of element (row, col) of group g. */
static GMM__UNUSED void *gmm__at(const gmm_mat *m, int64_t g, int64_t row, int64_t col) {
    const int64_t size = gmm_dtype_bits(m->dtype) / 8;
    char *base = m->table ? (char *)m->table[g] : (char *)m->data + (m->data ? g * m->group_stride * size : 0);
    return base + (row * m->ld + col) * size;
}

/* Adds a region to a plan's workspace and remembers where it starts. */
static GMM__UNUSED void gmm__reserve(gmm__plan *plan, int part, size_t bytes) {
    plan->part[part] = plan->workspace_bytes;
    plan->workspace_bytes += (bytes + GMM__WORKSPACE_ALIGN - 1) / GMM__WORKSPACE_ALIGN * GMM__WORKSPACE_ALIGN;
}
static GMM__UNUSED void *gmm__part(const gmm__plan *plan, int part) {
    return (char *)plan->workspace + plan->part[part];
}

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

/* Whether `stream` is capturing a graph: then nothing on the host may stand for what a replay does. */
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

/* Chooses the engine of a checked call, and answers its query or launches it. Defined behind the engine table. */
static gmm_status gmm__select(gmm__call *call, gmm__plan *plan);
static gmm_status gmm__serve(gmm__call *call, gmm_info *info, void *workspace, size_t workspace_bytes,
                             gmm_stream stream);

/* .............................................................................................. 12.2 CPU engine ... */

/* Runs task(arg, i, thread) for i in [0, count) on the context's threads; thread < ctx->threads. Tasks are independent,
   so results do not depend on the number of threads. The only place that knows OpenMP. */
typedef void (*gmm__task)(const void *arg, int64_t i, int32_t thread);
static GMM__UNUSED void gmm__cpu_for(const gmm_context *ctx, int64_t count, gmm__task task, const void *arg) {
    int64_t i;
#ifdef _OPENMP
    if (ctx->threads > 1 && count > 1) {
        _Pragma("omp parallel for schedule(dynamic) num_threads(ctx->threads)")
        for (i = 0; i < count; i++) task(arg, i, (int32_t)omp_get_thread_num());
        return;
    }
#else
    (void)ctx;
#endif
    for (i = 0; i < count; i++) task(arg, i, 0);
}

/* Reads the split into offsets [G + 1] (may be NULL), sets fault bits, and returns the number of live rows. */
static GMM__UNUSED int64_t gmm__cpu_offsets(const gmm_groups *groups, int64_t *offsets) {
    uint32_t fault = gmm__split_first(groups);
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

/* Rows as fp32, whatever their dtype: one plain loop per dtype, so that each vectorises. */
static GMM__UNUSED void gmm__row_load(gmm_dtype dtype, const void *from, float *to, int64_t n) {
    int64_t i;
    if (dtype == GMM_F32) memcpy(to, from, (size_t)n * sizeof *to);
    else if (dtype == GMM_BF16)
        for (i = 0; i < n; i++) to[i] = gmm_bf16_to_f32(((const uint16_t *)from)[i]);
    else
        for (i = 0; i < n; i++) to[i] = gmm_f16_to_f32(((const uint16_t *)from)[i]);
}

static GMM__UNUSED void gmm__row_store(gmm_dtype dtype, void *to, const float *from, int64_t n) {
    int64_t i;
    if (dtype == GMM_F32) memcpy(to, from, (size_t)n * sizeof *from);
    else if (dtype == GMM_BF16)
        for (i = 0; i < n; i++) ((uint16_t *)to)[i] = gmm_f32_to_bf16(from[i]);
    else
        for (i = 0; i < n; i++) ((uint16_t *)to)[i] = gmm_f32_to_f16(from[i]);
}

/* Sums run in 16 lanes, which are then folded in halves: a fixed order that vector units like. */
enum { GMM__LANES = 16 };
static GMM__UNUSED float gmm__lanes_fold(float *lane) {
    int half, i;
    for (half = GMM__LANES / 2; half > 0; half /= 2)
        for (i = 0; i < half; i++) lane[i] += lane[i + half];
    return lane[0];
}

/* Adds a[i] * b[i] to the lanes; b NULL means ones. n starts at a multiple of the lanes. */
static GMM__UNUSED void gmm__lanes_add(float *lane, const float *a, const float *b, int64_t n) {
    int64_t i, j;
    for (i = 0; i + GMM__LANES <= n; i += GMM__LANES)
        if (b) for (j = 0; j < GMM__LANES; j++) lane[j] += a[i + j] * b[i + j];
        else for (j = 0; j < GMM__LANES; j++) lane[j] += a[i + j];
    for (j = 0; i + j < n; j++) lane[j] += b ? a[i + j] * b[i + j] : a[i + j];
}

/* Zeroes rows [begin, end) of a matrix where the caller asked for zero tails. */
static GMM__UNUSED void gmm__cpu_tail(const gmm_mat *m, gmm_tail tail, int64_t begin, int64_t end, int64_t cols) {
    int64_t r;
    if (tail != GMM_TAIL_ZERO) return;
    for (r = begin; r < end; r++) memset(gmm__at(m, 0, r, 0), 0, (size_t)(cols * (gmm_dtype_bits(m->dtype) / 8)));
}

static int gmm__cpu_plan_offsets(const gmm__call *call, gmm__plan *plan) {
    (void)call;
    (void)plan;
    return 1;
}
static gmm_status gmm__cpu_launch_offsets(const gmm__plan *plan, gmm_stream stream) {
    (void)stream;
    (void)gmm__cpu_offsets(&plan->call->groups, (int64_t *)plan->call->output);
    return GMM_OK;
}

/* .......................................................................................... 12.3 Grouped linear ... */

/* Checks one linear operation. Only the operands that the operation uses are read. */
static gmm_status gmm__linear_prepare(gmm__call *call, gmm_context *ctx, gmm_op op, const char *function,
                                      const gmm_linear *linear, int query) {
    gmm_linear *d = &call->d.linear;
    gmm_status s = gmm__open(call, ctx, op, function, query);
    int64_t G, K, N;
    gmm_dtype dtype;

    if (s != GMM_OK || (s = gmm__read(call, "linear", d, sizeof *d, linear)) != GMM_OK) return s;
    if (op < GMM_OP_LINEAR_FWD || op > GMM_OP_LINEAR_BGRAD)
        return gmm__refuse(call, GMM_E_ARG, "op", "%d is no linear operation", (int)op);
    if ((s = gmm__read_options(call, d->options)) != GMM_OK || (s = gmm__read_groups(call, d->groups)) != GMM_OK)
        return s;
    G = call->groups.count;
    K = call->in = d->in_features;
    N = call->out = d->out_features;
    (void)snprintf(call->shapes, sizeof call->shapes, "G=%lld T=%lld K=%lld N=%lld", (long long)G,
                   (long long)call->rows, (long long)K, (long long)N);
    if ((d->alpha_per_group | d->y_add | d->d_row_scale_add) & ~1)
        return gmm__refuse(call, GMM_E_ARG, "linear", "alpha_per_group %d, y_add %d and d_row_scale_add %d must be 0 "
                           "or 1",
                           (int)d->alpha_per_group, (int)d->y_add, (int)d->d_row_scale_add);
    if (K < 1) return gmm__refuse(call, GMM_E_ARG, "in_features", "%lld must be >= 1", (long long)K);
    if (N < 1) return gmm__refuse(call, GMM_E_ARG, "out_features", "%lld must be >= 1", (long long)N);

    if (op == GMM_OP_LINEAR_FWD || op == GMM_OP_LINEAR_WGRAD)
        if ((s = gmm__read_mat(call, GMM__X_, "x", d->x, 1, 0, call->rows, K, GMM__FLOATS)) != GMM_OK) return s;
    if (op != GMM_OP_LINEAR_FWD)
        if ((s = gmm__read_mat(call, GMM__DY, "dy", d->dy, 1, 0, call->rows, N, GMM__FLOATS)) != GMM_OK) return s;
    if (op == GMM_OP_LINEAR_FWD || op == GMM_OP_LINEAR_DGRAD)
        if ((s = gmm__read_mat(call, GMM__W, "w", d->w, 1, G, N, K, GMM__FLOATS)) != GMM_OK) return s;
    if (op == GMM_OP_LINEAR_FWD)
        if ((s = gmm__read_mat(call, GMM__Y, "y", d->y, 1, 0, call->rows, N, GMM__FLOATS)) != GMM_OK) return s;
    if (op == GMM_OP_LINEAR_DGRAD)
        if ((s = gmm__read_mat(call, GMM__DX, "dx", d->dx, 1, 0, call->rows, K, GMM__FLOATS)) != GMM_OK) return s;
    if (op == GMM_OP_LINEAR_WGRAD)
        if ((s = gmm__read_grad(call, GMM__DW, "dw", d->dw, 1, N, K)) != GMM_OK) return s;
    if (op == GMM_OP_LINEAR_FWD || op == GMM_OP_LINEAR_BGRAD)
        if ((s = gmm__read_mat(call, GMM__BIAS, "bias", d->bias, op == GMM_OP_LINEAR_BGRAD && d->d_row_scale, G, 1, N,
                               GMM__FLOATS)) != GMM_OK)
            return s;
    if (op == GMM_OP_LINEAR_BGRAD) {
        if (!d->db && !d->d_row_scale)
            return gmm__refuse(call, GMM_E_NULL, "db", "and d_row_scale are both NULL: nothing is wanted");
        if ((s = gmm__read_grad(call, GMM__DB, "db", d->db, 0, 1, N)) != GMM_OK) return s;
    }

    /* the two factors of a product share their dtype */
    dtype = call->mat[op == GMM_OP_LINEAR_FWD || op == GMM_OP_LINEAR_WGRAD ? GMM__X_ : GMM__DY].dtype;
    if ((op == GMM_OP_LINEAR_FWD || op == GMM_OP_LINEAR_DGRAD) && call->mat[GMM__W].dtype != dtype)
        return gmm__refuse(call, GMM_E_DTYPE, "w", "dtype %s must be that of %s, %s",
                           gmm_dtype_name(call->mat[GMM__W].dtype), op == GMM_OP_LINEAR_FWD ? "x" : "dy",
                           gmm_dtype_name(dtype));
    if (op == GMM_OP_LINEAR_WGRAD && call->mat[GMM__DY].dtype != dtype)
        return gmm__refuse(call, GMM_E_DTYPE, "dy", "dtype %s must be that of x, %s",
                           gmm_dtype_name(call->mat[GMM__DY].dtype), gmm_dtype_name(dtype));
    if ((s = gmm__check_array(call, "alpha", d->alpha, 0, 1)) != GMM_OK ||
        (s = gmm__check_array(call, "row_scale", d->row_scale, 0, call->rows)) != GMM_OK ||
        (s = gmm__check_array(call, "d_row_scale", d->d_row_scale, 0, call->rows)) != GMM_OK)
        return s;
    {
        const size_t used = strlen(call->shapes);
        (void)snprintf(call->shapes + used, sizeof call->shapes - used, " %s", gmm_dtype_name(dtype));
    }
    return GMM_OK;
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

/* What a gradient of group g does to its destination: beta of dst = grad + beta dst. */
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

/* The accumulators of a tile are registers only if its loops are unrolled, at any optimisation level. */
#if defined(__CUDACC__) /* nvcc knows neither spelling; its host passes run at -O3, which unrolls */
#define GMM__UNROLL
#elif defined(__clang__)
#define GMM__UNROLL _Pragma("clang loop unroll(full)")
#elif defined(__GNUC__)
#define GMM__UNROLL _Pragma("GCC unroll 16")
#else
#define GMM__UNROLL
#endif

/* --- the register tile: c[mr][nr] += sum over k of a[k][mr] b[k][nr], one chain per element in the order of k --- */

enum {
    GMM__MC = 240, GMM__NC = 512, GMM__KC = 256, /* cache block: A and C and B panels stay in the L2 */
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

/* A factor: element (i, k) stands at base + i * stride_i + k * stride_k elements; one of the strides is 1. */
typedef struct gmm__cpu_factor {
    gmm_dtype dtype;
    const void *base;
    int64_t stride_i, stride_k;
} gmm__cpu_factor;

/* Writes rows row[0..n) as columns of a panel: to[k * width + i] = row[i][k]. */
static void gmm__cpu_transpose(float row[][GMM__KC], int n, int64_t kc, int width, float *to) {
    int64_t k = 0;
    int i;
#ifdef GMM__X86
    if (n == 4)
        for (; k + 4 <= kc; k += 4) {
            __m128 a = _mm_loadu_ps(row[0] + k), b = _mm_loadu_ps(row[1] + k), c = _mm_loadu_ps(row[2] + k),
                   d = _mm_loadu_ps(row[3] + k);
            _MM_TRANSPOSE4_PS(a, b, c, d);
            _mm_storeu_ps(to + k * width, a);
            _mm_storeu_ps(to + (k + 1) * width, b);
            _mm_storeu_ps(to + (k + 2) * width, c);
            _mm_storeu_ps(to + (k + 3) * width, d);
        }
#endif
    for (; k < kc; k++)
        for (i = 0; i < n; i++) to[k * width + i] = row[i][k];
}

/* Packs `count` rows of a factor as panels [ceil(count / width)][kc][width] of fp32, missing rows as zeros. */
static void gmm__cpu_pack(const gmm__cpu_factor *f, int64_t count, int64_t k0, int64_t kc, int width, float *to) {
    const int64_t size = gmm_dtype_bits(f->dtype) / 8;
    int64_t i0, k;
    for (i0 = 0; i0 < count; i0 += width, to += kc * width) {
        const int live = count - i0 < width ? (int)(count - i0) : width;
        const char *from = (const char *)f->base + (i0 * f->stride_i + k0 * f->stride_k) * size;
        int i;
        if (f->stride_i == 1) {
            for (k = 0; k < kc; k++, from += f->stride_k * size) {
                gmm__row_load(f->dtype, from, to + k * width, live);
                for (i = live; i < width; i++) to[k * width + i] = 0.0f;
            }
        } else {
            float row[4][GMM__KC];
            for (i = 0; i < live; i += 4) {
                const int n = live - i < 4 ? live - i : 4;
                int r;
                for (r = 0; r < n; r++, from += f->stride_i * size) gmm__row_load(f->dtype, from, row[r], kc);
                gmm__cpu_transpose(row, n, kc, width, to + i);
            }
            for (i = live; i < width; i++)
                for (k = 0; k < kc; k++) to[k * width + i] = 0.0f;
        }
    }
}

typedef struct gmm__cpu_scratch { float *a, *b, *c; } gmm__cpu_scratch;

static size_t gmm__cpu_scratch_bytes(void) {
    return sizeof(float) * (GMM__MC * GMM__KC + GMM__KC * GMM__NC + GMM__MC * GMM__NC);
}
static gmm__cpu_scratch gmm__cpu_scratch_at(void *base, int32_t thread) {
    gmm__cpu_scratch s;
    s.a = (float *)((char *)base + (size_t)thread * gmm__cpu_scratch_bytes());
    s.b = s.a + GMM__MC * GMM__KC;
    s.c = s.b + GMM__KC * GMM__NC;
    return s;
}

static void gmm__cpu_block(const gmm__cpu_tile *tile, const gmm__cpu_scratch *s, const gmm__cpu_factor *A, int64_t m,
                           const gmm__cpu_factor *B, int64_t n, int64_t K) {
    const int64_t mp = gmm__round_up(m, tile->mr), np = gmm__round_up(n, tile->nr);
    int64_t i, j, k;
    for (i = 0; i < mp; i++) memset(s->c + i * GMM__NC, 0, (size_t)np * sizeof(float));
    for (k = 0; k < K; k += GMM__KC) {
        const int64_t kc = gmm__min_i64(K - k, GMM__KC);
        gmm__cpu_pack(A, m, k, kc, tile->mr, s->a);
        gmm__cpu_pack(B, n, k, kc, tile->nr, s->b);
        for (j = 0; j < np; j += tile->nr)
            for (i = 0; i < mp; i += tile->mr)
                tile->run(kc, s->a + i * kc, s->b + j * kc, s->c + i * GMM__NC + j, GMM__NC);
    }
}

/* dst = (alpha acc + addend s) + beta dst over one row; beta 0 does not read dst. `addend` may be NULL. */
static void gmm__cpu_finish_row(float *acc, int64_t n, float alpha, const float *addend, float s, float beta,
                                gmm_dtype dtype, void *dst) {
    int64_t i;
    if (alpha != 1.0f)
        for (i = 0; i < n; i++) acc[i] *= alpha;
    if (addend)
        for (i = 0; i < n; i++) acc[i] += addend[i] * s;
    if (beta != 0.0f) {
        float old[GMM__NC];
        gmm__row_load(dtype, dst, old, n);
        for (i = 0; i < n; i++) acc[i] += beta * old[i];
    }
    gmm__row_store(dtype, dst, acc, n);
}

/* --- the four operations --- */

enum { GMM__PART_OFFSETS, GMM__PART_STARTS, GMM__PART_SCRATCH };

/* Everything a task of a linear operation reads. */
typedef struct gmm__cpu_linear {
    const gmm__call *call;
    const gmm__cpu_tile *tile;
    const int64_t *offsets; /* [G + 1] rows */
    const int64_t *starts;  /* [G + 1] row blocks before each group */
    void *scratch;
    int64_t col_blocks, row_blocks;
} gmm__cpu_linear;

/* The group g with starts[g] <= i < starts[g + 1]. */
static int64_t gmm__cpu_find(const int64_t *starts, int64_t groups, int64_t i) {
    int64_t low = 0, high = groups;
    while (high - low > 1) {
        const int64_t mid = low + (high - low) / 2;
        if (starts[mid] <= i) low = mid;
        else high = mid;
    }
    return low;
}

/* One block of y or dx: rows of one group by columns of the output. */
static void gmm__cpu_rows_task(const void *arg, int64_t index, int32_t thread) {
    const gmm__cpu_linear *job = (const gmm__cpu_linear *)arg;
    const gmm__call *call = job->call;
    const gmm_linear *d = &call->d.linear;
    const int fwd = call->op == GMM_OP_LINEAR_FWD;
    const gmm_mat *in = &call->mat[fwd ? GMM__X_ : GMM__DY], *w = &call->mat[GMM__W], *bias = &call->mat[GMM__BIAS];
    const gmm_mat *out = &call->mat[fwd ? GMM__Y : GMM__DX];
    const int64_t cols = fwd ? call->out : call->in, K = fwd ? call->in : call->out;
    const int64_t block = index / job->col_blocks, g = gmm__cpu_find(job->starts, call->groups.count, block);
    const int64_t r0 = job->offsets[g] + (block - job->starts[g]) * GMM__MC, left = job->offsets[g + 1] - r0;
    const int64_t m = gmm__min_i64(left, GMM__MC), c0 = (index % job->col_blocks) * GMM__NC;
    const int64_t n = gmm__min_i64(cols - c0, GMM__NC);
    const gmm__cpu_scratch s = gmm__cpu_scratch_at(job->scratch, thread);
    float addend[GMM__NC];
    gmm__cpu_factor A, B;
    int64_t i;

    A.dtype = B.dtype = in->dtype;
    A.base = gmm__at(in, 0, r0, 0);
    A.stride_i = in->ld;
    A.stride_k = 1;
    B.base = fwd ? gmm__at(w, g, c0, 0) : gmm__at(w, g, 0, c0);
    B.stride_i = fwd ? w->ld : 1;
    B.stride_k = fwd ? 1 : w->ld;
    gmm__cpu_block(job->tile, &s, &A, m, &B, n, K);
    if (bias->dtype != GMM_NONE) gmm__row_load(bias->dtype, gmm__at(bias, g, 0, c0), addend, n);
    for (i = 0; i < m; i++)
        gmm__cpu_finish_row(s.c + i * GMM__NC, n, gmm__alpha(d, g), bias->dtype != GMM_NONE ? addend : NULL,
                            d->row_scale ? d->row_scale[r0 + i] : 1.0f, d->y_add ? 1.0f : 0.0f, out->dtype,
                            gmm__at(out, 0, r0 + i, c0));
}

/* One block of dw: out features by in features of one group, summed over the group's rows. */
static void gmm__cpu_wgrad_task(const void *arg, int64_t index, int32_t thread) {
    const gmm__cpu_linear *job = (const gmm__cpu_linear *)arg;
    const gmm__call *call = job->call;
    const gmm_mat *x = &call->mat[GMM__X_], *dy = &call->mat[GMM__DY], *dw = &call->mat[GMM__DW];
    const gmm_grad *grad = &call->grad[GMM__DW];
    const int64_t per_group = job->row_blocks * job->col_blocks, g = index / per_group;
    const int64_t n0 = index % per_group / job->col_blocks * GMM__MC, k0 = index % job->col_blocks * GMM__NC;
    const int64_t n = gmm__min_i64(call->out - n0, GMM__MC);
    const int64_t k = gmm__min_i64(call->in - k0, GMM__NC);
    const int64_t r0 = job->offsets[g], rows = job->offsets[g + 1] - r0;
    const gmm__cpu_scratch s = gmm__cpu_scratch_at(job->scratch, thread);
    const float beta = gmm__grad_beta(grad, g);
    gmm__cpu_factor A, B;
    float alpha;
    int64_t i;

    if (grad->frozen && grad->frozen[g]) return;
    if (rows == 0 && beta == 1.0f) return; /* adding nothing keeps the bits, -0.0 and NaN included */
    A.dtype = B.dtype = x->dtype;
    A.base = gmm__at(dy, 0, r0, n0);
    A.stride_k = dy->ld;
    B.base = gmm__at(x, 0, r0, k0);
    B.stride_k = x->ld;
    A.stride_i = B.stride_i = 1;
    gmm__cpu_block(job->tile, &s, &A, n, &B, k, rows);
    /* an empty sum is +0, whatever the sign of alpha */
    alpha = rows ? gmm__alpha(&call->d.linear, g) : 1.0f;
    for (i = 0; i < n; i++)
        gmm__cpu_finish_row(s.c + i * GMM__NC, k, alpha, NULL, 0.0f, beta, dw->dtype, gmm__at(dw, g, n0 + i, k0));
}

static int gmm__cpu_plan_product(const gmm__call *call, gmm__plan *plan) {
    const size_t groups = (size_t)call->groups.count + 1;
    plan->kernel = call->ctx->cpu_level;
    gmm__reserve(plan, GMM__PART_OFFSETS, groups * sizeof(int64_t));
    gmm__reserve(plan, GMM__PART_STARTS, groups * sizeof(int64_t));
    gmm__reserve(plan, GMM__PART_SCRATCH, (size_t)call->ctx->threads * gmm__cpu_scratch_bytes());
    return 1;
}

static gmm_status gmm__cpu_launch_product(const gmm__plan *plan, gmm_stream stream) {
    const gmm__call *call = plan->call;
    const int64_t G = call->groups.count;
    int64_t *offsets = (int64_t *)gmm__part(plan, GMM__PART_OFFSETS);
    int64_t *starts = (int64_t *)gmm__part(plan, GMM__PART_STARTS);
    const int64_t live = gmm__cpu_offsets(&call->groups, offsets);
    gmm__cpu_linear job;
    int64_t g;

    (void)stream;
    job.call = call;
    job.tile = &gmm__cpu_tiles[plan->kernel];
    job.offsets = offsets;
    job.starts = starts;
    job.scratch = gmm__part(plan, GMM__PART_SCRATCH);
    if (call->op == GMM_OP_LINEAR_WGRAD) {
        job.row_blocks = gmm__ceil_div(call->out, GMM__MC);
        job.col_blocks = gmm__ceil_div(call->in, GMM__NC);
        gmm__cpu_for(call->ctx, G * job.row_blocks * job.col_blocks, gmm__cpu_wgrad_task, &job);
    } else {
        const int64_t cols = call->op == GMM_OP_LINEAR_FWD ? call->out : call->in;
        starts[0] = 0;
        for (g = 0; g < G; g++) starts[g + 1] = starts[g] + gmm__ceil_div(offsets[g + 1] - offsets[g], GMM__MC);
        job.row_blocks = starts[G];
        job.col_blocks = gmm__ceil_div(cols, GMM__NC);
        gmm__cpu_for(call->ctx, job.row_blocks * job.col_blocks, gmm__cpu_rows_task, &job);
        gmm__cpu_tail(&call->mat[call->op == GMM_OP_LINEAR_FWD ? GMM__Y : GMM__DX], call->groups.tail, live, call->rows,
                      cols);
    }
    return GMM_OK;
}

enum { GMM__CHUNK = 256 }; /* columns or rows of one task of a streaming operation */

/* A chunk of columns of one group's db. */
static void gmm__cpu_bgrad_task(const void *arg, int64_t index, int32_t thread) {
    const gmm__cpu_linear *job = (const gmm__cpu_linear *)arg;
    const gmm__call *call = job->call;
    const gmm_mat *dy = &call->mat[GMM__DY], *db = &call->mat[GMM__DB];
    const gmm_grad *grad = &call->grad[GMM__DB];
    const float *scale = call->d.linear.row_scale;
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
        gmm__row_load(dy->dtype, gmm__at(dy, 0, r, c0), row, n);
        for (i = 0; i < n; i++) sum[i] += s * row[i];
    }
    gmm__cpu_finish_row(sum, n, 1.0f, NULL, 0.0f, beta, db->dtype, gmm__at(db, g, 0, c0));
}

/* A chunk of rows of d_row_scale. Each row sums in lanes, an order that N alone decides. */
static void gmm__cpu_row_scale_task(const void *arg, int64_t index, int32_t thread) {
    const gmm__cpu_linear *job = (const gmm__cpu_linear *)arg;
    const gmm__call *call = job->call;
    const gmm_mat *dy = &call->mat[GMM__DY], *bias = &call->mat[GMM__BIAS];
    float *out = call->d.linear.d_row_scale;
    const int64_t G = call->groups.count, live = job->offsets[G], r1 = (index + 1) * GMM__CHUNK;
    int64_t r, c;
    (void)thread;
    for (r = index * GMM__CHUNK; r < r1 && r < live; r++) {
        const int64_t g = gmm__cpu_find(job->offsets, G, r);
        float lane[GMM__LANES] = { 0 }, row[GMM__CHUNK], b[GMM__CHUNK], sum;
        for (c = 0; c < call->out; c += GMM__CHUNK) {
            const int64_t n = gmm__min_i64(call->out - c, GMM__CHUNK);
            gmm__row_load(dy->dtype, gmm__at(dy, 0, r, c), row, n);
            gmm__row_load(bias->dtype, gmm__at(bias, g, 0, c), b, n);
            gmm__lanes_add(lane, row, b, n);
        }
        sum = gmm__lanes_fold(lane);
        out[r] = call->d.linear.d_row_scale_add ? out[r] + sum : sum;
    }
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
    job.col_blocks = gmm__ceil_div(call->out, GMM__CHUNK);
    if (call->mat[GMM__DB].dtype != GMM_NONE)
        gmm__cpu_for(call->ctx, call->groups.count * job.col_blocks, gmm__cpu_bgrad_task, &job);
    if (call->d.linear.d_row_scale) {
        gmm__cpu_for(call->ctx, gmm__ceil_div(live, GMM__CHUNK), gmm__cpu_row_scale_task, &job);
        if (call->groups.tail == GMM_TAIL_ZERO)
            for (r = live; r < call->rows; r++) call->d.linear.d_row_scale[r] = 0.0f;
    }
    return GMM_OK;
}

/* .............................................................................................. 12.4 Activation ... */

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
    case GMM_ACT_PRESET_NEMOTRON: a.kind = GMM_ACT_SRELU; break;
    default: break;
    }
    return a;
}

GMMDEF const char *gmm_act_name(gmm_act_kind kind) {
    switch (kind) {
#define GMM__X(name, value, text, gate, gated) case name: return #text;
        GMM_ACT_LIST(GMM__X)
#undef GMM__X
    default: return "?";
    }
}

GMMDEF int gmm_act_gated(gmm_act_kind kind) {
    switch (kind) {
#define GMM__X(name, value, text, gate, gated) case name: return gated;
        GMM_ACT_LIST(GMM__X)
#undef GMM__X
    default: return 0;
    }
}

static gmm_gate gmm__act_gate(gmm_act_kind kind) {
    switch (kind) {
#define GMM__X(name, value, text, gate, gated) case name: return gate;
        GMM_ACT_LIST(GMM__X)
#undef GMM__X
    default: return GMM_GATE_MAX;
    }
}

static int gmm__is_finite(float v) { return (gmm_f32_bits(v) & 0x7F800000u) != 0x7F800000u; }

/* Checks that the settings of an activation over `ffn` columns agree with one another. If not, `rule` opens with the
   field's name behind `prefix`: "act.limit: -1 must be 0 or finite and > 0". */
static gmm_status gmm__check_act(const gmm_act *act, int64_t ffn, const char *prefix, char *rule, size_t size) {
    const char *name = gmm_act_name(act->kind);
    const int gated = gmm_act_gated(act->kind);
    const gmm_gate gate = gmm__act_gate(act->kind);
    const int sigmoid = gate != GMM_GATE_RELU && gate != GMM_GATE_SRELU && gate != GMM_GATE_MAX;
    const double limit = (double)act->limit, alpha = (double)act->alpha, offset = (double)act->offset;
    const double beta1 = (double)act->beta1, beta2 = (double)act->beta2;
    uint32_t reserved = 0;
    size_t i;

    for (i = 0; i < sizeof act->reserved / sizeof act->reserved[0]; i++) reserved |= act->reserved[i];
    if (reserved) (void)snprintf(rule, size, "%sreserved: %u must be 0", prefix, (unsigned)reserved);
    else if (act->kind < GMM_ACT_NONE || act->kind > GMM_ACT_SITUGLU)
        (void)snprintf(rule, size, "%skind: %d is no activation", prefix, (int)act->kind);
    else if (act->interleave < 0)
        (void)snprintf(rule, size, "%sinterleave: %d must be >= 0", prefix, (int)act->interleave);
    else if (act->interleave && !gated)
        (void)snprintf(rule, size, "%sinterleave: %d must be 0, as %s is not gated", prefix, (int)act->interleave,
                       name);
    else if (act->interleave && ffn % act->interleave)
        (void)snprintf(rule, size, "%sinterleave: %d must divide ffn %lld", prefix, (int)act->interleave,
                       (long long)ffn);
    else if (!gmm__is_finite(act->limit) || limit < 0.0)
        (void)snprintf(rule, size, "%slimit: %g must be 0 or finite and > 0", prefix, limit);
    else if (!gmm__is_finite(act->alpha))
        (void)snprintf(rule, size, "%salpha: %g must be finite", prefix, alpha);
    else if (!sigmoid && alpha != 0.0 && alpha != 1.0)
        (void)snprintf(rule, size, "%salpha: %g must be 0 or 1, as %s has no sigmoid", prefix, alpha, name);
    else if (!gmm__is_finite(act->offset))
        (void)snprintf(rule, size, "%soffset: %g must be finite", prefix, offset);
    else if (!gated && offset != 0.0)
        (void)snprintf(rule, size, "%soffset: %g must be 0, as %s is not gated", prefix, offset, name);
    else if (!gmm__is_finite(act->beta1) || beta1 < 0.0)
        (void)snprintf(rule, size, "%sbeta1: %g must be 0 or finite and > 0", prefix, beta1);
    else if (!gmm__is_finite(act->beta2) || beta2 < 0.0)
        (void)snprintf(rule, size, "%sbeta2: %g must be 0 or finite and > 0", prefix, beta2);
    else if (gate != GMM_GATE_SITU && beta1 != 0.0)
        (void)snprintf(rule, size, "%sbeta1: %g must be 0 for %s; only situglu takes it", prefix, beta1, name);
    else if (gate != GMM_GATE_SITU && beta2 != 0.0)
        (void)snprintf(rule, size, "%sbeta2: %g must be 0 for %s; only situglu takes it", prefix, beta2, name);
    else return GMM_OK;
    return GMM_E_CONFIG;
}

/* What messages say about a call before its descriptors are checked: zeros and none where they cannot be read. */
static void gmm__peek_groups(const gmm_groups *groups, gmm_groups *g) {
    memset(g, 0, sizeof *g);
    if (groups) (void)gmm__copy_sized(g, sizeof *g, groups);
}
static const char *gmm__peek_dtype(const gmm_mat *mat) {
    gmm_mat m = GMM_ZERO;
    if (mat) (void)gmm__copy_sized(&m, sizeof m, mat);
    return gmm_dtype_name(m.dtype);
}

/* Checks an activation call. Afterwards call->act holds the settings, call->out is ffn, call->in the columns of x. */
static gmm_status gmm__act_prepare(gmm__call *call, gmm_context *ctx, gmm_op op, const char *function,
                                   const gmm_activation *activation, int query) {
    gmm_activation *d = &call->d.act;
    gmm_status s = gmm__open(call, ctx, op, function, query);
    char rule[160];
    if (s != GMM_OK || (s = gmm__read(call, "activation", d, sizeof *d, activation)) != GMM_OK) return s;
    {
        gmm_groups g;
        gmm_act a = GMM_ZERO;
        gmm__peek_groups(d->groups, &g);
        if (d->act) (void)gmm__copy_sized(&a, sizeof a, d->act);
        (void)snprintf(call->shapes, sizeof call->shapes, "G=%d T=%lld ffn=%lld %s %s", (int)g.count,
                       (long long)g.capacity, (long long)d->ffn, gmm_act_name(a.kind), gmm__peek_dtype(d->x));
    }
    if (op != GMM_OP_ACT_FWD && op != GMM_OP_ACT_BWD)
        return gmm__refuse(call, GMM_E_ARG, "op", "%d is neither act_fwd (%d) nor act_bwd (%d)", (int)op,
                           (int)GMM_OP_ACT_FWD, (int)GMM_OP_ACT_BWD);
    if ((s = gmm__read_options(call, d->options)) != GMM_OK || (s = gmm__read_groups(call, d->groups)) != GMM_OK)
        return s;
    if (d->reserved) return gmm__refuse(call, GMM_E_ARG, "reserved", "%d must be 0", (int)d->reserved);
    if (d->ffn < 1) return gmm__refuse(call, GMM_E_ARG, "ffn", "%lld must be >= 1", (long long)d->ffn);
    if ((s = gmm__read(call, "act", &call->act, sizeof call->act, d->act)) != GMM_OK) return s;
    if ((s = gmm__check_act(&call->act, d->ffn, "act.", rule, sizeof rule)) != GMM_OK)
        return gmm__fail(&ctx->error, s, "%s: %s (%s)", function, rule, call->shapes);
    if (d->ffn > INT64_MAX / 2)
        return gmm__refuse(call, GMM_E_OVERFLOW, "ffn", "%lld does not fit 64 bits twice", (long long)d->ffn);
    call->out = d->ffn;
    call->in = gmm_act_gated(call->act.kind) ? 2 * d->ffn : d->ffn;
    if ((s = gmm__read_mat(call, GMM__X_, "x", d->x, 1, 0, call->rows, call->in, GMM__FLOATS)) != GMM_OK ||
        (s = gmm__read_mat(call, GMM__Y, "y", d->y, op == GMM_OP_ACT_FWD, 0, call->rows, call->out, GMM__FLOATS)) !=
            GMM_OK ||
        (s = gmm__check_array(call, "prob", d->prob, 0, call->rows)) != GMM_OK)
        return s;
    if (op == GMM_OP_ACT_FWD) return GMM_OK;
    if ((s = gmm__read_mat(call, GMM__DY, "dy", d->dy, 1, 0, call->rows, call->out, GMM__FLOATS)) != GMM_OK ||
        (s = gmm__read_mat(call, GMM__DX, "dx", d->dx, 0, 0, call->rows, call->in, GMM__FLOATS)) != GMM_OK ||
        (s = gmm__check_array(call, "dprob", d->dprob, 0, call->rows)) != GMM_OK)
        return s;
    if (!query && !d->dx && !d->dprob && !d->y)
        return gmm__refuse(call, GMM_E_NULL, "dx", "is NULL, and so are dprob and y: nothing is asked for");
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

/* --- CPU engine: a row goes through fp32 buffers, GMM__ACT_CHUNK outputs at a time --- */

enum { GMM__ACT_CHUNK = 256, GMM__ACT_LANES = 16 };

typedef struct gmm__act_job {
    const gmm__call *call;
    gmm_act_coef coef;
    int64_t live, rows_per_task;
    int64_t block; /* GLU block, 0 = halves */
    int64_t chunk; /* outputs per step: a multiple of the lanes and, for small blocks, of the block */
} gmm__act_job;

/* Elements i to i + n of a row as fp32, and back. */
static GMM__FORCE_INLINE void gmm__act_load(gmm_dtype dtype, const void *row, int64_t i, int64_t n, float *to) {
    const uint16_t *half = (const uint16_t *)row + i;
    int64_t k;
    if (dtype == GMM_BF16) for (k = 0; k < n; k++) to[k] = gmm_bf16_to_f32(half[k]);
    else if (dtype == GMM_F16) for (k = 0; k < n; k++) to[k] = gmm_f16_to_f32(half[k]);
    else memcpy(to, (const float *)row + i, (size_t)n * sizeof *to);
}
static GMM__FORCE_INLINE void gmm__act_store(gmm_dtype dtype, void *row, int64_t i, int64_t n, const float *from) {
    uint16_t *half = (uint16_t *)row + i;
    int64_t k;
    if (dtype == GMM_BF16) for (k = 0; k < n; k++) half[k] = gmm_f32_to_bf16(from[k]);
    else if (dtype == GMM_F16) for (k = 0; k < n; k++) half[k] = gmm_f32_to_f16(from[k]);
    else memcpy((float *)row + i, from, (size_t)n * sizeof *from);
}

/* Blocks [a:B | b:B | ...] in `mixed` to and from a and b. Called with constant B for the frequent ones. */
static GMM__FORCE_INLINE void gmm__act_split(int64_t B, int64_t n, const float *mixed, float *a, float *b) {
    int64_t k, t;
    for (k = 0; k < n / B; k++)
        for (t = 0; t < B; t++) {
            a[k * B + t] = mixed[2 * k * B + t];
            b[k * B + t] = mixed[2 * k * B + B + t];
        }
}
static GMM__FORCE_INLINE void gmm__act_merge(int64_t B, int64_t n, float *mixed, const float *a, const float *b) {
    int64_t k, t;
    for (k = 0; k < n / B; k++)
        for (t = 0; t < B; t++) {
            mixed[2 * k * B + t] = a[k * B + t];
            mixed[2 * k * B + B + t] = b[k * B + t];
        }
}

/* Outputs j0 to j0 + n of the pre-activation, as a and b. Small blocks are converted in one piece, large ones one by
   one. */
static GMM__FORCE_INLINE void gmm__act_read(const gmm__act_job *job, const gmm_mat *x, const void *row, int64_t j0,
                                            int64_t n, float *a, float *b) {
    const int64_t B = job->block, ffn = job->call->out;
    if (job->call->in == ffn) gmm__act_load(x->dtype, row, j0, n, a);
    else if (B == 0) {
        gmm__act_load(x->dtype, row, j0, n, a);
        gmm__act_load(x->dtype, row, ffn + j0, n, b);
    } else if (B <= GMM__ACT_LANES) {
        float mixed[2 * GMM__ACT_CHUNK];
        gmm__act_load(x->dtype, row, 2 * j0, 2 * n, mixed);
        switch (B) {
        case 1: gmm__act_split(1, n, mixed, a, b); break;
        case 8: gmm__act_split(8, n, mixed, a, b); break;
        case 16: gmm__act_split(16, n, mixed, a, b); break;
        default: gmm__act_split(B, n, mixed, a, b); break;
        }
    } else {
        int64_t i, run;
        for (i = 0; i < n; i += run) {
            const int64_t left = B - (j0 + i) % B, column = gmm_glu_gate_column(j0 + i, B);
            run = left < n - i ? left : n - i;
            gmm__act_load(x->dtype, row, column, run, a + i);
            gmm__act_load(x->dtype, row, column + B, run, b + i);
        }
    }
}
static GMM__FORCE_INLINE void gmm__act_write(const gmm__act_job *job, const gmm_mat *dx, void *row, int64_t j0,
                                             int64_t n, const float *a, const float *b) {
    const int64_t B = job->block, ffn = job->call->out;
    if (job->call->in == ffn) gmm__act_store(dx->dtype, row, j0, n, a);
    else if (B == 0) {
        gmm__act_store(dx->dtype, row, j0, n, a);
        gmm__act_store(dx->dtype, row, ffn + j0, n, b);
    } else if (B <= GMM__ACT_LANES) {
        float mixed[2 * GMM__ACT_CHUNK];
        switch (B) {
        case 1: gmm__act_merge(1, n, mixed, a, b); break;
        case 8: gmm__act_merge(8, n, mixed, a, b); break;
        case 16: gmm__act_merge(16, n, mixed, a, b); break;
        default: gmm__act_merge(B, n, mixed, a, b); break;
        }
        gmm__act_store(dx->dtype, row, 2 * j0, 2 * n, mixed);
    } else {
        int64_t i, run;
        for (i = 0; i < n; i += run) {
            const int64_t left = B - (j0 + i) % B, column = gmm_glu_gate_column(j0 + i, B);
            run = left < n - i ? left : n - i;
            gmm__act_store(dx->dtype, row, column, run, a + i);
            gmm__act_store(dx->dtype, row, column + B, run, b + i);
        }
    }
}

/* f, df/da and df/db of n pre-activations, and f alone: one loop per gate, so that each has no branch. */
static GMM__FORCE_INLINE void gmm__act_slopes(gmm_gate gate, int gated, gmm_act_coef c, int64_t n, const float *a,
                                              const float *b, float *f, float *fa, float *fb) {
    int64_t i;
    for (i = 0; i < n; i++) f[i] = gmm_act_point(gate, gated, c, a[i], b[i], &fa[i], &fb[i]);
}
static GMM__FORCE_INLINE void gmm__act_values(gmm_gate gate, int gated, gmm_act_coef c, int64_t n, const float *a,
                                              const float *b, float *f) {
    float da, db;
    int64_t i;
    for (i = 0; i < n; i++) f[i] = gmm_act_point(gate, gated, c, a[i], b[i], &da, &db);
}

/* Rows [begin, end), forward or backward. */
static GMM__FORCE_INLINE void gmm__act_rows(const gmm__act_job *job, int64_t begin, int64_t end) {
    const gmm__call *call = job->call;
    const gmm_activation *d = &call->d.act;
    const gmm_mat *x = &call->mat[GMM__X_], *y = &call->mat[GMM__Y], *dy = &call->mat[GMM__DY];
    const gmm_mat *dx = &call->mat[GMM__DX];
    const int backward = call->op == GMM_OP_ACT_BWD, slopes = backward && dx->dtype != GMM_NONE;
    float a[GMM__ACT_CHUNK], b[GMM__ACT_CHUNK], f[GMM__ACT_CHUNK], fa[GMM__ACT_CHUNK], fb[GMM__ACT_CHUNK];
    float g[GMM__ACT_CHUNK], out[GMM__ACT_CHUNK];
    int64_t r, j, i;
    memset(b, 0, sizeof b);
    for (r = begin; r < end; r++) {
        const void *x_row = gmm__at(x, 0, r, 0), *dy_row = backward ? gmm__at(dy, 0, r, 0) : NULL;
        const float p = d->prob ? d->prob[r] : 1.0f;
        float sum[GMM__ACT_LANES] = GMM_ZERO;
        for (j = 0; j < call->out; j += job->chunk) {
            const int64_t left = call->out - j, n = left < job->chunk ? left : job->chunk;
            const int64_t full = (n + GMM__ACT_LANES - 1) / GMM__ACT_LANES * GMM__ACT_LANES; /* whole vectors */
            gmm__act_read(job, x, x_row, j, n, a, b);
            for (i = n; i < full; i++) a[i] = b[i] = 0.0f;
            if (slopes) {
                switch (call->act.kind) {
#define GMM__X(name, value, text, gate, gated) \
                case name: gmm__act_slopes(gate, gated, job->coef, full, a, b, f, fa, fb); break;
                    GMM_ACT_LIST(GMM__X)
#undef GMM__X
                default: break;
                }
            } else {
                switch (call->act.kind) {
#define GMM__X(name, value, text, gate, gated) \
                case name: gmm__act_values(gate, gated, job->coef, full, a, b, f); break;
                    GMM_ACT_LIST(GMM__X)
#undef GMM__X
                default: break;
                }
            }
            if (y->dtype != GMM_NONE) {
                for (i = 0; i < full; i++) out[i] = p * f[i];
                gmm__act_store(y->dtype, gmm__at(y, 0, r, 0), j, n, out);
            }
            if (!backward) continue;
            gmm__act_load(dy->dtype, dy_row, j, n, g);
            for (i = n; i < full; i++) g[i] = 0.0f;
            if (d->dprob)
                for (i = 0; i < full; i++) sum[i % GMM__ACT_LANES] += g[i] * f[i];
            if (slopes) {
                for (i = 0; i < full; i++) {
                    a[i] = p * g[i] * fa[i];
                    b[i] = p * g[i] * fb[i];
                }
                gmm__act_write(job, dx, gmm__at(dx, 0, r, 0), j, n, a, b);
            }
        }
        if (backward && d->dprob) {
            int64_t w;
            for (w = GMM__ACT_LANES / 2; w > 0; w /= 2)
                for (i = 0; i < w; i++) sum[i] += sum[i + w];
            d->dprob[r] = sum[0];
        }
    }
}

/* The same for every set of vector instructions. */
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
    const int64_t begin = index * job->rows_per_task, left = job->live - begin;
    const int64_t end = begin + (left < job->rows_per_task ? left : job->rows_per_task);
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

/* Rows that make one task: enough for about 16 Ki elements of `cols` per row. */
static int64_t gmm__rows_per_task(int64_t cols) { return cols < 16384 ? 16384 / cols : 1; }

static gmm_status gmm__cpu_launch_act(const gmm__plan *plan) {
    const gmm__call *call = plan->call;
    const gmm_activation *d = &call->d.act;
    const int backward = call->op == GMM_OP_ACT_BWD;
    gmm__act_job job;
    int64_t B = call->act.interleave, step = GMM__ACT_LANES;
    if (B == call->out) B = 0;
    if (B > 0 && B <= GMM__ACT_LANES)
        while (step % B) step += GMM__ACT_LANES; /* at most 15 * 16 */
    job.call = call;
    job.coef = gmm_act_coefficients(&call->act);
    job.live = gmm__cpu_offsets(&call->groups, NULL);
    job.rows_per_task = gmm__rows_per_task(call->in);
    job.block = B;
    job.chunk = GMM__ACT_CHUNK / step * step;
    gmm__cpu_for(call->ctx, gmm__ceil_div(job.live, job.rows_per_task), gmm__act_task, &job);
    if (call->mat[GMM__Y].dtype != GMM_NONE)
        gmm__cpu_tail(&call->mat[GMM__Y], call->groups.tail, job.live, call->rows, call->out);
    if (backward && call->mat[GMM__DX].dtype != GMM_NONE)
        gmm__cpu_tail(&call->mat[GMM__DX], call->groups.tail, job.live, call->rows, call->in);
    if (backward && d->dprob && call->groups.tail == GMM_TAIL_ZERO)
        memset(d->dprob + job.live, 0, (size_t)(call->rows - job.live) * sizeof *d->dprob);
    return GMM_OK;
}

static int gmm__cpu_plan_act_fwd(const gmm__call *call, gmm__plan *plan) {
    (void)call;
    (void)plan;
    return 1;
}
static int gmm__cpu_plan_act_bwd(const gmm__call *call, gmm__plan *plan) { return gmm__cpu_plan_act_fwd(call, plan); }
static gmm_status gmm__cpu_launch_act_fwd(const gmm__plan *plan, gmm_stream stream) {
    (void)stream;
    return gmm__cpu_launch_act(plan);
}
static gmm_status gmm__cpu_launch_act_bwd(const gmm__plan *plan, gmm_stream stream) {
    (void)stream;
    return gmm__cpu_launch_act(plan);
}

/* ..................................................................................... 12.5 Pad, GLU interleave ... */

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
        return gmm__fail(error, GMM_E_CONFIG, "gmm_pad_decide: recipe: %d is no recipe", (int)in->recipe);
    if (in->dispatcher < GMM_DISPATCH_ALLTOALL || in->dispatcher > GMM_DISPATCH_NCCLEP)
        return gmm__fail(error, GMM_E_CONFIG, "gmm_pad_decide: dispatcher: %d is no dispatcher", (int)in->dispatcher);
    /* asking the router to pad is not enough: with few tokens it cannot reach the multiple, so its result counts */
    padded = (in->router_padding && in->router_padding_done) || in->dispatcher == GMM_DISPATCH_HYBRIDEP ||
             in->dispatcher == GMM_DISPATCH_NCCLEP ||
             (in->dispatcher == GMM_DISPATCH_DEEPEP && in->grouped_tensor && in->permute_fusion);
    *align = padded ? 1 : gmm_pad_align(in->recipe, in->grouped_tensor);
    return GMM_OK;
}

/* Checks a pad or unpad call. call->in is the columns, call->rows the unpadded capacity. */
static gmm_status gmm__pad_prepare(gmm__call *call, gmm_context *ctx, gmm_op op, const char *function,
                                   const gmm_padding *padding, int query) {
    gmm_padding *d = &call->d.pad;
    gmm_status s = gmm__open(call, ctx, op, function, query);
    const int pad = op == GMM_OP_PAD;
    int64_t src_rows, dst_rows;
    if (s != GMM_OK || (s = gmm__read(call, "padding", d, sizeof *d, padding)) != GMM_OK) return s;
    {
        gmm_groups g;
        gmm__peek_groups(d->groups, &g);
        (void)snprintf(call->shapes, sizeof call->shapes, "G=%d T=%lld R=%lld cols=%lld align=%d %s", (int)g.count,
                       (long long)g.capacity, (long long)d->padded_capacity, (long long)d->cols, (int)d->align,
                       gmm__peek_dtype(d->src));
    }
    if (op != GMM_OP_PAD && op != GMM_OP_UNPAD)
        return gmm__refuse(call, GMM_E_ARG, "op", "%d is neither pad (%d) nor unpad (%d)", (int)op, (int)GMM_OP_PAD,
                           (int)GMM_OP_UNPAD);
    if ((s = gmm__read_options(call, d->options)) != GMM_OK || (s = gmm__read_groups(call, d->groups)) != GMM_OK)
        return s;
    if (d->align < 1) return gmm__refuse(call, GMM_E_ARG, "align", "%d must be >= 1", (int)d->align);
    if (d->cols < 1) return gmm__refuse(call, GMM_E_ARG, "cols", "%lld must be >= 1", (long long)d->cols);
    if (d->padded_capacity < 0)
        return gmm__refuse(call, GMM_E_ARG, "padded_capacity", "%lld must be >= 0", (long long)d->padded_capacity);
    if (d->sizes && d->padded_capacity > INT32_MAX)
        return gmm__refuse(call, GMM_E_ARG, "padded_capacity", "%lld must fit the int32 of sizes",
                           (long long)d->padded_capacity);
    call->in = call->out = d->cols;
    src_rows = pad ? call->rows : d->padded_capacity;
    dst_rows = pad ? d->padded_capacity : call->rows;
    if ((s = gmm__read_mat(call, GMM__X_, "src", d->src, 1, 0, src_rows, d->cols, GMM__BYTES)) != GMM_OK ||
        (s = gmm__read_mat(call, GMM__Y, "dst", d->dst, 1, 0, dst_rows, d->cols, GMM__BYTES)) != GMM_OK)
        return s;
    if (call->mat[GMM__Y].dtype != call->mat[GMM__X_].dtype)
        return gmm__refuse(call, GMM_E_DTYPE, "dst", "dtype %s must be that of src, %s",
                           gmm_dtype_name(call->mat[GMM__Y].dtype), gmm_dtype_name(call->mat[GMM__X_].dtype));
    if ((s = gmm__check_array(call, "src_prob", d->src_prob, d->dst_prob != NULL, src_rows)) != GMM_OK ||
        (s = gmm__check_array(call, "dst_prob", d->dst_prob, d->src_prob != NULL, dst_rows)) != GMM_OK)
        return s;
    return gmm__check_array(call, "sizes", d->sizes, 0, call->groups.count);
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

/* --- CPU engine: row i of a group moves from from[g] + i to to[g] + i, as far as the group reaches in `from` --- */

typedef struct gmm__pad_job {
    const gmm__call *call;
    const int64_t *from, *to; /* [G + 1] offsets of both splits, in the workspace */
    int64_t rows_per_task;
} gmm__pad_job;

static void gmm__pad_task(const void *arg, int64_t index, int32_t thread) {
    const gmm__pad_job *job = (const gmm__pad_job *)arg;
    const gmm__call *call = job->call;
    const gmm_padding *d = &call->d.pad;
    const gmm_mat *src = &call->mat[GMM__X_], *dst = &call->mat[GMM__Y];
    const size_t bytes = (size_t)(d->cols * (gmm_dtype_bits(src->dtype) / 8));
    const int64_t G = call->groups.count, begin = index * job->rows_per_task, left = job->to[G] - begin;
    const int64_t end = begin + (left < job->rows_per_task ? left : job->rows_per_task);
    int64_t g = gmm__cpu_find(job->to, G, begin), r;
    (void)thread;
    for (r = begin; r < end; r++) {
        int64_t i;
        while (job->to[g + 1] <= r) g++;
        i = r - job->to[g];
        if (i < job->from[g + 1] - job->from[g]) {
            memcpy(gmm__at(dst, 0, r, 0), gmm__at(src, 0, job->from[g] + i, 0), bytes);
            if (d->dst_prob) d->dst_prob[r] = d->src_prob[job->from[g] + i];
        } else {
            memset(gmm__at(dst, 0, r, 0), 0, bytes);
            if (d->dst_prob) d->dst_prob[r] = 0.0f;
        }
    }
}

static gmm_status gmm__cpu_launch_padding(const gmm__plan *plan) {
    const gmm__call *call = plan->call;
    const gmm_padding *d = &call->d.pad;
    const gmm_mat *dst = &call->mat[GMM__Y];
    const int pad = call->op == GMM_OP_PAD;
    const int64_t G = call->groups.count, dst_rows = pad ? d->padded_capacity : call->rows;
    int64_t *plain = (int64_t *)gmm__part(plan, 0), *padded = (int64_t *)gmm__part(plan, 1), g;
    gmm__pad_job job;
    (void)gmm__cpu_offsets(&call->groups, plain);
    padded[0] = 0;
    for (g = 0; g < G; g++) {
        const int64_t room = d->padded_capacity - padded[g];
        int64_t size = gmm__round_up(plain[g + 1] - plain[g], d->align);
        if (size > room) {
            size = room;
            if (call->groups.fault) *call->groups.fault |= (uint32_t)GMM_FAULT_CAPACITY;
        }
        padded[g + 1] = padded[g] + size;
        if (pad && d->sizes) d->sizes[g] = (int32_t)size;
    }
    job.call = call;
    job.from = pad ? plain : padded;
    job.to = pad ? padded : plain;
    job.rows_per_task = gmm__rows_per_task(d->cols);
    gmm__cpu_for(call->ctx, gmm__ceil_div(job.to[G], job.rows_per_task), gmm__pad_task, &job);
    gmm__cpu_tail(dst, call->groups.tail, job.to[G], dst_rows, d->cols);
    if (d->dst_prob && call->groups.tail == GMM_TAIL_ZERO)
        memset(d->dst_prob + job.to[G], 0, (size_t)(dst_rows - job.to[G]) * sizeof *d->dst_prob);
    return GMM_OK;
}

static int gmm__cpu_plan_pad(const gmm__call *call, gmm__plan *plan) {
    gmm__reserve(plan, 0, ((size_t)call->groups.count + 1) * sizeof(int64_t));
    gmm__reserve(plan, 1, ((size_t)call->groups.count + 1) * sizeof(int64_t));
    return 1;
}
static int gmm__cpu_plan_unpad(const gmm__call *call, gmm__plan *plan) { return gmm__cpu_plan_pad(call, plan); }
static gmm_status gmm__cpu_launch_pad(const gmm__plan *plan, gmm_stream stream) {
    (void)stream;
    return gmm__cpu_launch_padding(plan);
}
static gmm_status gmm__cpu_launch_unpad(const gmm__plan *plan, gmm_stream stream) {
    (void)stream;
    return gmm__cpu_launch_padding(plan);
}

/* --- GLU interleave --- */

/* One operand: `count` matrices of [2 ffn, cols], or one of [count, 2 ffn]. With count 0 there is nothing to point at,
   so only the form of the operand is checked. */
static gmm_status gmm__glu_read(gmm__call *call, int role, const char *argument, const gmm_mat *mat) {
    const gmm_glu *d = &call->d.glu;
    gmm_mat m;
    if (d->count > 0 && d->axis == GMM_GLU_ROWS)
        return gmm__read_mat(call, role, argument, mat, 1, d->count, 2 * d->ffn, d->cols, GMM__BYTES);
    if (d->count > 0 || !mat || !gmm__copy_sized(&m, sizeof m, mat))
        return gmm__read_mat(call, role, argument, mat, 1, 0, d->count, 2 * d->ffn, GMM__BYTES);
    m.struct_size = 0;
    m.data = NULL;
    m.table = NULL;
    m.ld = m.group_stride = 0;
    return gmm__read_mat(call, role, argument, &m, 1, 0, 0, 1, GMM__BYTES);
}

static gmm_status gmm__glu_prepare(gmm__call *call, gmm_context *ctx, const char *function, const gmm_glu *glu,
                                   int query) {
    gmm_glu *d = &call->d.glu;
    gmm_status s = gmm__open(call, ctx, GMM_OP_GLU_INTERLEAVE, function, query);
    if (s != GMM_OK || (s = gmm__read(call, "glu", d, sizeof *d, glu)) != GMM_OK) return s;
    (void)snprintf(call->shapes, sizeof call->shapes, "%s count=%lld ffn=%lld cols=%lld block=%d %s",
                   d->axis == GMM_GLU_COLUMNS ? "columns" : "rows", (long long)d->count, (long long)d->ffn,
                   (long long)d->cols, (int)d->block, gmm__peek_dtype(d->src));
    if ((s = gmm__read_options(call, d->options)) != GMM_OK) return s;
    if (d->axis != GMM_GLU_ROWS && d->axis != GMM_GLU_COLUMNS)
        return gmm__refuse(call, GMM_E_ARG, "axis", "%d is neither rows (0) nor columns (1)", (int)d->axis);
    if (d->inverse & ~1) return gmm__refuse(call, GMM_E_ARG, "inverse", "%d must be 0 or 1", (int)d->inverse);
    if (d->ffn < 1) return gmm__refuse(call, GMM_E_ARG, "ffn", "%lld must be >= 1", (long long)d->ffn);
    if (d->ffn > INT64_MAX / 2)
        return gmm__refuse(call, GMM_E_OVERFLOW, "ffn", "%lld does not fit 64 bits twice", (long long)d->ffn);
    if (d->count < 0) return gmm__refuse(call, GMM_E_ARG, "count", "%lld must be >= 0", (long long)d->count);
    if (d->axis == GMM_GLU_ROWS && d->cols < 1)
        return gmm__refuse(call, GMM_E_ARG, "cols", "%lld must be >= 1", (long long)d->cols);
    if (d->block < 1 || d->ffn % d->block)
        return gmm__refuse(call, GMM_E_CONFIG, "block", "%d must be >= 1 and divide ffn %lld", (int)d->block,
                           (long long)d->ffn);
    if ((s = gmm__glu_read(call, GMM__X_, "src", d->src)) != GMM_OK ||
        (s = gmm__glu_read(call, GMM__Y, "dst", d->dst)) != GMM_OK)
        return s;
    if (call->mat[GMM__Y].dtype != call->mat[GMM__X_].dtype)
        return gmm__refuse(call, GMM_E_DTYPE, "dst", "dtype %s must be that of src, %s",
                           gmm_dtype_name(call->mat[GMM__Y].dtype), gmm_dtype_name(call->mat[GMM__X_].dtype));
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

/* CPU engine. Run k of a row or matrix is B elements at k B in blocks, and at (k mod 2) ffn + (k div 2) B in halves. */
static int64_t gmm__glu_run(const gmm_glu *d, int64_t k, int blocks) {
    return blocks ? k * d->block : (k % 2) * d->ffn + (k / 2) * d->block;
}

/* n elements of a constant size; the short ones without a call of memcpy. */
static void gmm__glu_copy(char *to, const char *from, int64_t n, int64_t size) {
    int64_t i;
    if (n * size >= 32) memcpy(to, from, (size_t)(n * size));
    else if (size == 1) for (i = 0; i < n; i++) to[i] = from[i];
    else if (size == 2) for (i = 0; i < n; i++) memcpy(to + 2 * i, from + 2 * i, 2);
    else if (size == 4) for (i = 0; i < n; i++) memcpy(to + 4 * i, from + 4 * i, 4);
    else for (i = 0; i < n; i++) memcpy(to + 8 * i, from + 8 * i, 8);
}

typedef struct gmm__glu_job {
    const gmm__call *call;
    int64_t runs;  /* per row (columns) or matrix (rows) */
    int64_t items; /* rows (columns) or runs of all matrices (rows) */
    int64_t items_per_task;
} gmm__glu_job;

static void gmm__glu_task(const void *arg, int64_t index, int32_t thread) {
    const gmm__glu_job *job = (const gmm__glu_job *)arg;
    const gmm_glu *d = &job->call->d.glu;
    const gmm_mat *src = &job->call->mat[GMM__X_], *dst = &job->call->mat[GMM__Y];
    const int64_t size = gmm_dtype_bits(src->dtype) / 8, begin = index * job->items_per_task, left = job->items - begin;
    const int64_t end = begin + (left < job->items_per_task ? left : job->items_per_task);
    int64_t item, k, i;
    (void)thread;
    for (item = begin; item < end; item++) {
        if (d->axis == GMM_GLU_COLUMNS) {
            const char *from = (const char *)gmm__at(src, 0, item, 0);
            char *to = (char *)gmm__at(dst, 0, item, 0);
            for (k = 0; k < job->runs; k++)
                gmm__glu_copy(to + gmm__glu_run(d, k, !d->inverse) * size, from + gmm__glu_run(d, k, d->inverse) * size,
                              d->block, size);
        } else {
            const int64_t matrix = item / job->runs;
            const int64_t to = gmm__glu_run(d, item % job->runs, !d->inverse);
            const int64_t from = gmm__glu_run(d, item % job->runs, d->inverse);
            const int dense = src->ld == d->cols && dst->ld == d->cols;
            const int64_t rows = dense ? 1 : d->block, n = dense ? d->block * d->cols : d->cols;
            for (i = 0; i < rows; i++)
                gmm__glu_copy((char *)gmm__at(dst, matrix, to + i, 0),
                              (const char *)gmm__at(src, matrix, from + i, 0), n, size);
        }
    }
}

static int gmm__cpu_plan_glu_interleave(const gmm__call *call, gmm__plan *plan) {
    (void)call;
    (void)plan;
    return 1;
}
static gmm_status gmm__cpu_launch_glu_interleave(const gmm__plan *plan, gmm_stream stream) {
    const gmm_glu *d = &plan->call->d.glu;
    gmm__glu_job job;
    (void)stream;
    job.call = plan->call;
    job.runs = 2 * (d->ffn / d->block);
    job.items = d->axis == GMM_GLU_COLUMNS ? d->count : d->count * job.runs;
    job.items_per_task = gmm__rows_per_task(d->axis == GMM_GLU_COLUMNS ? 2 * d->ffn : d->block * d->cols);
    gmm__cpu_for(plan->call->ctx, gmm__ceil_div(job.items, job.items_per_task), gmm__glu_task, &job);
    return GMM_OK;
}

/* .............................................................................................. 12.6 Expert MLP ... */

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
    int i, delayed;
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
            { "save", (int32_t)c.save, 3 },
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
    if (c.source_interleave < 0)
        return gmm__fail(error, GMM_E_CONFIG, "source_interleave: %d must be >= 0", (int)c.source_interleave);
    if (c.source_interleave && gmm_act_gated(act.kind) && c.source_interleave % c.ffn != act.interleave % c.ffn)
        return gmm__fail(error, GMM_E_CONFIG, "source_interleave: weights come with blocks of %d, the MLP reads them "
                         "with interleave %d: convert them with gmm_glu_interleave", (int)c.source_interleave,
                         (int)act.interleave);
    if (c.topk < 0) return gmm__fail(error, GMM_E_CONFIG, "topk: %d must be >= 0", (int)c.topk);
    if (c.etp_size < 0) return gmm__fail(error, GMM_E_CONFIG, "etp_size: %d must be >= 0", (int)c.etp_size);
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
        return gmm__fail(error, GMM_E_CONFIG, "prob_on_bias2: 1 needs prob 1 (is %d) and bias2 1 (is %d)", (int)c.prob,
                         (int)c.bias2);
    if (c.prob_on_input && c.topk != 1)
        return gmm__fail(error, GMM_E_CONFIG, "prob_on_input: 1 needs topk 1, not %d", (int)c.topk);
    if (c.prob_on_input && c.prob)
        return gmm__fail(error, GMM_E_CONFIG, "prob_on_input: 1 excludes prob 1: rows would be weighted twice");
    if (c.bias2 && c.prob && c.topk > 1 && !c.prob_on_bias2)
        return gmm__fail(error, GMM_E_CONFIG, "prob_on_bias2: 0 with topk %d: unweighted biases would add up",
                         (int)c.topk);
    if ((c.bias1 || c.bias2) && c.etp_size > 1)
        return gmm__fail(error, GMM_E_CONFIG, "etp_size: %d excludes biases: every rank would add them",
                         (int)c.etp_size);
    if (c.router_padding && (c.recipe == GMM_RECIPE_NONE || c.dispatcher == GMM_DISPATCH_ALLGATHER))
        return gmm__fail(error, GMM_E_CONFIG, "router_padding: 1 needs a quantized recipe (is %d) and a dispatcher "
                         "other than all-gather (is %d)", (int)c.recipe, (int)c.dispatcher);
    if (c.act_input_fp8 && (act.kind != GMM_ACT_SWIGLU || act.limit != 0.0f || act.offset != 0.0f))
        return gmm__fail(error, GMM_E_CONFIG, "act_input_fp8: 1 needs swiglu without limit and offset, not %s",
                         gmm_act_name(act.kind));
    if (c.act_recompute && c.save == GMM_SAVE_PREACT_AND_ACT)
        return gmm__fail(error, GMM_E_CONFIG, "act_recompute: 1 excludes save %d, which keeps the activation",
                         (int)c.save);
    return GMM_OK;
}

/* Columns of FC1's output. */
static int64_t gmm__mlp_fc1_cols(const gmm__call *call) {
    return call->config.ffn * (gmm_act_gated(call->act.kind) ? 2 : 1);
}
static int gmm__mlp_delayed(const gmm__call *call) {
    return call->config.delay_wgrad || call->config.overlap_dispatch_wgrad;
}

/* Refuses an operand that the configuration does not have. */
static gmm_status gmm__mlp_match(gmm__call *call, const char *argument, int given, int configured) {
    if (given && !configured)
        return gmm__refuse(call, GMM_E_CONFIG, argument, "is given, but the configuration has none");
    return GMM_OK;
}

static gmm_status gmm__mlp_prepare(gmm__call *call, gmm_context *ctx, gmm_op op, const char *function,
                                   const gmm_mlp *mlp, int query) {
    gmm_mlp *d = &call->d.mlp;
    gmm_mlp_config *c = &call->config;
    gmm_status s = gmm__open(call, ctx, op, function, query);
    const int fwd = op == GMM_OP_MLP_FWD;
    int64_t G, F1, out, elements, bytes;
    int again;
    gmm_error error;

    if (s != GMM_OK || (s = gmm__read(call, "mlp", d, sizeof *d, mlp)) != GMM_OK) return s;
    if (op < GMM_OP_MLP_FWD || op > GMM_OP_MLP_WGRAD)
        return gmm__refuse(call, GMM_E_ARG, "op", "%d is no MLP operation", (int)op);
    if (d->reserved) return gmm__refuse(call, GMM_E_ARG, "mlp.reserved", "%d must be 0", (int)d->reserved);
    if ((s = gmm__read(call, "config", c, sizeof *c, d->config)) != GMM_OK) return s;
    if (gmm_mlp_validate(c, &error) != GMM_OK) return gmm__refuse(call, error.status, "config", "%s", error.text);
    (void)gmm__copy_sized(&call->act, sizeof call->act, &c->act);
    if (c->hidden_out == 0) c->hidden_out = c->hidden;
    if ((s = gmm__read_options(call, d->options)) != GMM_OK || (s = gmm__read_groups(call, d->groups)) != GMM_OK)
        return s;
    G = call->groups.count;
    F1 = gmm__mlp_fc1_cols(call);
    call->in = c->hidden;
    call->out = out = c->hidden_out;
    (void)snprintf(call->shapes, sizeof call->shapes, "G=%lld T=%lld hidden=%lld ffn=%lld out=%lld %s", (long long)G,
                   (long long)call->rows, (long long)c->hidden, (long long)c->ffn, (long long)out,
                   gmm_act_name(call->act.kind));
    if ((s = gmm__mlp_match(call, "b1", d->b1 != NULL, c->bias1)) != GMM_OK ||
        (s = gmm__mlp_match(call, "b2", d->b2 != NULL, c->bias2)) != GMM_OK ||
        (s = gmm__mlp_match(call, "prob", d->prob != NULL, c->prob)) != GMM_OK ||
        (s = gmm__mlp_match(call, "db1", d->db1 != NULL, c->bias1)) != GMM_OK ||
        (s = gmm__mlp_match(call, "db2", d->db2 != NULL, c->bias2)) != GMM_OK ||
        (s = gmm__mlp_match(call, "dprob", d->dprob != NULL, c->prob)) != GMM_OK)
        return s;

    if (!gmm__mul(call->rows, F1, &elements) || !gmm__mul(elements, 16, &bytes))
        return gmm__refuse(call, GMM_E_OVERFLOW, "config.ffn", "%lld rows of %lld columns do not fit 64 bits",
                           (long long)call->rows, (long long)F1);
    /* bwd runs FC1 again where fwd kept nothing */
    again = !fwd && c->save == GMM_SAVE_NOTHING;
    if ((s = gmm__read_mat(call, GMM__X_, "x", d->x, fwd || again || d->dw1, 0, call->rows, c->hidden, GMM__FLOATS)) ||
        (s = gmm__read_mat(call, GMM__W, "w1", d->w1, fwd || again || d->dx, G, F1, c->hidden, GMM__FLOATS)) ||
        (s = gmm__read_mat(call, GMM__BIAS, "b1", d->b1, (fwd || again) && c->bias1, G, 1, F1, GMM__FLOATS)) ||
        (s = gmm__read_mat(call, GMM__W2, "w2", d->w2, 1, G, out, c->ffn, GMM__FLOATS)) ||
        (s = gmm__read_mat(call, GMM__BIAS2, "b2", d->b2, c->bias2 && (fwd || (c->prob_on_bias2 && d->dprob)), G, 1,
                           out, GMM__FLOATS)) ||
        (s = gmm__check_array(call, "prob", d->prob, c->prob, call->rows)))
        return s;
    if (fwd) {
        if ((s = gmm__read_mat(call, GMM__Y, "y", d->y, 1, 0, call->rows, out, GMM__FLOATS)) != GMM_OK) return s;
    } else {
        if ((s = gmm__read_mat(call, GMM__DY, "dy", d->dy, 1, 0, call->rows, out, GMM__FLOATS)) ||
            (s = gmm__read_mat(call, GMM__DX, "dx", d->dx, 0, 0, call->rows, c->hidden, GMM__FLOATS)) ||
            (s = gmm__read_grad(call, GMM__DW, "dw1", d->dw1, 0, F1, c->hidden)) ||
            (s = gmm__read_grad(call, GMM__DW2, "dw2", d->dw2, 0, out, c->ffn)) ||
            (s = gmm__read_grad(call, GMM__DB, "db1", d->db1, 0, 1, F1)) ||
            (s = gmm__read_grad(call, GMM__DB2, "db2", d->db2, 0, 1, out)) ||
            (s = gmm__check_array(call, "dprob", d->dprob, 0, call->rows)))
            return s;
    }
    {
        const int roles[] = { GMM__X_, GMM__W, GMM__DY };
        const char *names[] = { "x", "w1", "dy" };
        int i;
        for (i = 0; i < 3; i++)
            if (call->mat[roles[i]].dtype != GMM_NONE && call->mat[roles[i]].dtype != call->mat[GMM__W2].dtype)
                return gmm__refuse(call, GMM_E_DTYPE, names[i], "dtype %s must be that of w2, %s",
                                   gmm_dtype_name(call->mat[roles[i]].dtype), gmm_dtype_name(call->mat[GMM__W2].dtype));
    }
    return GMM_OK;
}

/* Which of an MLP's matrices a plan places where. Workspace parts; `saved` and `deferred` hold their own. */
enum { GMM__PART_MLP_OFFSETS, GMM__PART_MLP_Z, GMM__PART_MLP_H, GMM__PART_MLP_DH, GMM__PART_MLP_DZ, GMM__PART_MLP_SUB };

typedef struct gmm__mlp_buffers {
    size_t z_bytes, h_bytes, offsets_bytes;       /* of one such matrix, rounded up */
    size_t saved_h, deferred_dz, deferred_h;      /* offsets */
} gmm__mlp_buffers;

static size_t gmm__round256(size_t bytes) {
    return (bytes + GMM__WORKSPACE_ALIGN - 1) / GMM__WORKSPACE_ALIGN * GMM__WORKSPACE_ALIGN;
}

static gmm__mlp_buffers gmm__mlp_measure(const gmm__call *call) {
    const size_t row = (size_t)call->rows * (size_t)(gmm_dtype_bits(call->mat[GMM__W2].dtype) / 8);
    gmm__mlp_buffers b;
    b.z_bytes = gmm__round256(row * (size_t)gmm__mlp_fc1_cols(call));
    b.h_bytes = gmm__round256(row * (size_t)call->config.ffn);
    b.offsets_bytes = gmm__round256(((size_t)call->groups.count + 1) * sizeof(int64_t));
    b.saved_h = b.z_bytes;
    b.deferred_dz = b.offsets_bytes;
    b.deferred_h = b.deferred_dz + b.z_bytes;
    return b;
}

/* What the backward of this call computes. */
typedef struct gmm__mlp_need { int dz, dh, h, z, defer; } gmm__mlp_need;
static gmm__mlp_need gmm__mlp_needs(const gmm__call *call) {
    const gmm_mlp *d = &call->d.mlp;
    gmm__mlp_need n;
    n.defer = gmm__mlp_delayed(call) && (d->dw1 || d->dw2);
    n.dz = d->dx || d->dw1 || d->db1;
    n.dh = n.dz || d->dprob;
    n.h = d->dw2 != NULL;
    n.z = n.dh || (n.h && (n.defer || call->config.save != GMM_SAVE_PREACT_AND_ACT));
    return n;
}

/* Descriptors of the operations that an MLP is composed of. One structure, so that plan and launch agree. */
typedef struct gmm__mlp_steps {
    gmm_groups groups; /* the split as int64 offsets, computed once */
    gmm_options options;
    gmm_mat z, h, dh, dz, x, w1, w2, b1, b2, y, dy, dx;
    gmm_linear fc1, fc2, dgrad2, bgrad2, wgrad2, bgrad1, wgrad1, dgrad1;
    gmm_activation act;
} gmm__mlp_steps;

static gmm_linear gmm__mlp_linear(const gmm__mlp_steps *t, int64_t in, int64_t out) {
    gmm_linear l = GMM_ZERO;
    l.groups = &t->groups;
    l.options = &t->options;
    l.in_features = in;
    l.out_features = out;
    return l;
}

/* Fills the steps over the given memory (all of which is NULL for a query). */
static void gmm__mlp_fill(gmm__mlp_steps *t, const gmm__plan *plan, void *offsets, void *z, void *h, void *dh,
                          void *dz) {
    const gmm__call *call = plan->call;
    const gmm_mlp *d = &call->d.mlp;
    const gmm_mlp_config *c = &call->config;
    const gmm_dtype dtype = call->mat[GMM__W2].dtype;
    const int64_t F1 = gmm__mlp_fc1_cols(call);

    memset(t, 0, sizeof *t);
    t->options = call->options;
    t->groups = call->groups;
    t->groups.splits = offsets;
    t->groups.dtype = GMM_I64;
    t->groups.form = GMM_SPLIT_OFFSETS;
    t->groups.on_host = 0;
    t->z = gmm_mat_packed(dtype, z);
    t->h = gmm_mat_packed(dtype, h);
    t->dh = gmm_mat_packed(dtype, dh);
    t->dz = gmm_mat_packed(dtype, dz);

    t->fc1 = gmm__mlp_linear(t, c->hidden, F1);
    t->fc1.x = &call->mat[GMM__X_];
    t->fc1.w = &call->mat[GMM__W];
    t->fc1.bias = c->bias1 ? &call->mat[GMM__BIAS] : NULL;
    t->fc1.y = &t->z;

    t->act.groups = &t->groups;
    t->act.options = &t->options;
    t->act.ffn = c->ffn;
    t->act.act = &call->act;
    t->act.x = &t->z;
    t->act.prob = d->prob;

    t->fc2 = gmm__mlp_linear(t, c->ffn, call->out);
    t->fc2.x = &t->h;
    t->fc2.w = &call->mat[GMM__W2];
    t->fc2.bias = c->bias2 ? &call->mat[GMM__BIAS2] : NULL;
    t->fc2.row_scale = c->prob_on_bias2 ? d->prob : NULL;
    t->fc2.y = &call->mat[GMM__Y];

    t->dgrad2 = gmm__mlp_linear(t, c->ffn, call->out);
    t->dgrad2.dy = &call->mat[GMM__DY];
    t->dgrad2.w = &call->mat[GMM__W2];
    t->dgrad2.dx = &t->dh;

    t->bgrad2 = gmm__mlp_linear(t, c->ffn, call->out);
    t->bgrad2.dy = &call->mat[GMM__DY];
    t->bgrad2.row_scale = c->prob_on_bias2 ? d->prob : NULL;
    t->bgrad2.db = d->db2 ? &call->grad[GMM__DB2] : NULL;
    if (c->prob_on_bias2 && d->dprob) {
        t->bgrad2.bias = &call->mat[GMM__BIAS2];
        t->bgrad2.d_row_scale = d->dprob;
        t->bgrad2.d_row_scale_add = 1;
    }

    t->wgrad2 = gmm__mlp_linear(t, c->ffn, call->out);
    t->wgrad2.x = &t->h;
    t->wgrad2.dy = &call->mat[GMM__DY];
    t->wgrad2.dw = &call->grad[GMM__DW2];

    t->bgrad1 = gmm__mlp_linear(t, c->hidden, F1);
    t->bgrad1.dy = &t->dz;
    t->bgrad1.db = &call->grad[GMM__DB];

    t->wgrad1 = gmm__mlp_linear(t, c->hidden, F1);
    t->wgrad1.x = &call->mat[GMM__X_];
    t->wgrad1.dy = &t->dz;
    t->wgrad1.dw = &call->grad[GMM__DW];

    t->dgrad1 = gmm__mlp_linear(t, c->hidden, F1);
    t->dgrad1.dy = &t->dz;
    t->dgrad1.w = &call->mat[GMM__W];
    t->dgrad1.dx = &call->mat[GMM__DX];
}

/* Raises *bytes to the workspace of one step. Returns 0 if the engine declines it. */
static int gmm__mlp_size(gmm__call *step, gmm_status prepared, const gmm_error *before, size_t *bytes,
                         gmm__plan *plan) {
    gmm__plan sub;
    if (prepared != GMM_OK || gmm__select(step, &sub) != GMM_OK) {
        (void)gmm__decline(plan, "%.180s", step->ctx->error.text);
        step->ctx->error = *before; /* a plan that says no is no error of the context yet */
        return 0;
    }
    if (sub.workspace_bytes > *bytes) *bytes = sub.workspace_bytes;
    if (sub.engine != plan->engine)
        (void)snprintf(plan->note, sizeof plan->note, "products by %s", gmm_engine_name(sub.engine));
    return 1;
}
static int gmm__mlp_size_linear(const gmm__plan *plan, gmm_op op, const gmm_linear *l, size_t *bytes, gmm__plan *out) {
    gmm__call step;
    const gmm_error before = plan->call->ctx->error;
    const gmm_status s = gmm__linear_prepare(&step, plan->call->ctx, op, plan->call->function, l, 1);
    return gmm__mlp_size(&step, s, &before, bytes, out);
}
static int gmm__mlp_size_act(const gmm__plan *plan, gmm_op op, const gmm_activation *a, size_t *bytes, gmm__plan *out) {
    gmm__call step;
    const gmm_error before = plan->call->ctx->error;
    const gmm_status s = gmm__act_prepare(&step, plan->call->ctx, op, plan->call->function, a, 1);
    return gmm__mlp_size(&step, s, &before, bytes, out);
}

static int gmm__compose_plan_mlp_fwd(const gmm__call *call, gmm__plan *plan) {
    const gmm_mlp_config *c = &call->config;
    const gmm__mlp_buffers b = gmm__mlp_measure(call);
    gmm__mlp_steps t;
    size_t sub = 0;
    gmm__mlp_fill(&t, plan, NULL, NULL, NULL, NULL, NULL);
    t.act.y = &t.h;
    if (!gmm__mlp_size_linear(plan, GMM_OP_LINEAR_FWD, &t.fc1, &sub, plan) ||
        !gmm__mlp_size_act(plan, GMM_OP_ACT_FWD, &t.act, &sub, plan) ||
        !gmm__mlp_size_linear(plan, GMM_OP_LINEAR_FWD, &t.fc2, &sub, plan))
        return 0;
    gmm__reserve(plan, GMM__PART_MLP_OFFSETS, b.offsets_bytes);
    gmm__reserve(plan, GMM__PART_MLP_Z, b.z_bytes); /* inference uses both; a query cannot tell it from training */
    gmm__reserve(plan, GMM__PART_MLP_H, b.h_bytes);
    gmm__reserve(plan, GMM__PART_MLP_SUB, sub);
    plan->saved_bytes = c->save == GMM_SAVE_NOTHING ? 0 : b.z_bytes;
    if (c->save == GMM_SAVE_PREACT_AND_ACT) plan->saved_bytes += b.h_bytes;
    return 1;
}

/* The split of the call as int64 offsets. */
static gmm_status gmm__mlp_offsets(const gmm__plan *plan, void *offsets, gmm_stream stream) {
    gmm__call step = *plan->call;
    step.op = GMM_OP_OFFSETS;
    step.query = 0;
    step.options.engine = plan->engine;
    step.output = offsets;
    return gmm__serve(&step, NULL, NULL, 0, stream);
}
static gmm_status gmm__mlp_step(const gmm__plan *plan, gmm_op op, const gmm_linear *l, gmm_stream stream) {
    return gmm__linear_run(plan->call->ctx, op, plan->call->function, l, gmm__part(plan, GMM__PART_MLP_SUB),
                           plan->workspace_bytes - plan->part[GMM__PART_MLP_SUB], stream);
}
static gmm_status gmm__mlp_act_step(const gmm__plan *plan, gmm_op op, const gmm_activation *a, gmm_stream stream) {
    gmm__call step;
    const gmm_status s = gmm__act_prepare(&step, plan->call->ctx, op, plan->call->function, a, 0);
    return s != GMM_OK ? s : gmm__serve(&step, NULL, gmm__part(plan, GMM__PART_MLP_SUB),
                                        plan->workspace_bytes - plan->part[GMM__PART_MLP_SUB], stream);
}

static gmm_status gmm__compose_launch_mlp_fwd(const gmm__plan *plan, gmm_stream stream) {
    const gmm__call *call = plan->call;
    const gmm__mlp_buffers b = gmm__mlp_measure(call);
    const gmm_save save = call->config.save;
    char *saved = (char *)call->d.mlp.saved;
    void *offsets = gmm__part(plan, GMM__PART_MLP_OFFSETS);
    void *z = saved && save != GMM_SAVE_NOTHING ? saved : gmm__part(plan, GMM__PART_MLP_Z);
    void *h = saved && save == GMM_SAVE_PREACT_AND_ACT ? saved + b.saved_h : gmm__part(plan, GMM__PART_MLP_H);
    gmm__mlp_steps t;
    gmm_status s;
    gmm__mlp_fill(&t, plan, offsets, z, h, NULL, NULL);
    t.act.y = &t.h;
    if ((s = gmm__mlp_offsets(plan, offsets, stream)) != GMM_OK) return s;
    if ((s = gmm__mlp_step(plan, GMM_OP_LINEAR_FWD, &t.fc1, stream)) != GMM_OK) return s;
    if ((s = gmm__mlp_act_step(plan, GMM_OP_ACT_FWD, &t.act, stream)) != GMM_OK) return s;
    return gmm__mlp_step(plan, GMM_OP_LINEAR_FWD, &t.fc2, stream);
}

static int gmm__compose_plan_mlp_bwd(const gmm__call *call, gmm__plan *plan) {
    const gmm_mlp *d = &call->d.mlp;
    const gmm_mlp_config *c = &call->config;
    const gmm__mlp_buffers b = gmm__mlp_measure(call);
    const gmm__mlp_need need = gmm__mlp_needs(call);
    gmm__mlp_steps t;
    size_t sub = 0;
    gmm__mlp_fill(&t, plan, NULL, NULL, NULL, NULL, NULL);
    t.act.dy = &t.dh;
    t.act.dx = need.dz ? &t.dz : NULL;
    t.act.dprob = d->dprob;
    t.act.y = &t.h;
    if ((need.z && c->save == GMM_SAVE_NOTHING && !gmm__mlp_size_linear(plan, GMM_OP_LINEAR_FWD, &t.fc1, &sub, plan)) ||
        (need.dh && !gmm__mlp_size_linear(plan, GMM_OP_LINEAR_DGRAD, &t.dgrad2, &sub, plan)) ||
        (need.dh && !gmm__mlp_size_act(plan, GMM_OP_ACT_BWD, &t.act, &sub, plan)) ||
        (need.h && !need.dh && !gmm__mlp_size_act(plan, GMM_OP_ACT_FWD, &t.act, &sub, plan)) ||
        ((d->db2 || t.bgrad2.d_row_scale) && !gmm__mlp_size_linear(plan, GMM_OP_LINEAR_BGRAD, &t.bgrad2, &sub, plan)) ||
        (d->db1 && !gmm__mlp_size_linear(plan, GMM_OP_LINEAR_BGRAD, &t.bgrad1, &sub, plan)) ||
        (d->dw2 && !gmm__mlp_size_linear(plan, GMM_OP_LINEAR_WGRAD, &t.wgrad2, &sub, plan)) ||
        (d->dw1 && !gmm__mlp_size_linear(plan, GMM_OP_LINEAR_WGRAD, &t.wgrad1, &sub, plan)) ||
        (d->dx && !gmm__mlp_size_linear(plan, GMM_OP_LINEAR_DGRAD, &t.dgrad1, &sub, plan)))
        return 0;
    gmm__reserve(plan, GMM__PART_MLP_OFFSETS, b.offsets_bytes);
    gmm__reserve(plan, GMM__PART_MLP_Z, need.z && c->save == GMM_SAVE_NOTHING ? b.z_bytes : 0);
    gmm__reserve(plan, GMM__PART_MLP_H, need.h && !need.defer ? b.h_bytes : 0);
    gmm__reserve(plan, GMM__PART_MLP_DH, need.dh ? b.h_bytes : 0);
    gmm__reserve(plan, GMM__PART_MLP_DZ, need.dz && !need.defer ? b.z_bytes : 0);
    gmm__reserve(plan, GMM__PART_MLP_SUB, sub);
    plan->saved_bytes = c->save == GMM_SAVE_NOTHING ? 0 : b.z_bytes;
    if (c->save == GMM_SAVE_PREACT_AND_ACT) plan->saved_bytes += b.h_bytes;
    plan->deferred_bytes = need.defer ? b.deferred_h + b.h_bytes : 0;
    return 1;
}

/* A queued pair of weight gradients, FC2's first. Kept inside gmm_wgrad_entry. */
typedef struct gmm__wgrad_record {
    gmm_groups groups;
    gmm_options options;
    gmm_grad_hooks hooks;
    int64_t in[2], out[2];
    gmm_mat x[2], dy[2], dw[2];
    gmm_grad grad[2];
    int32_t wanted[2];
} gmm__wgrad_record;

typedef char gmm__wgrad_record_fits[sizeof(gmm__wgrad_record) <= sizeof(gmm_wgrad_entry) ? 1 : -1];

static void gmm__mlp_fire(const gmm_context *ctx, const gmm_grad_hooks *hooks, gmm_param param, int wanted,
                          gmm_stream stream) {
    if (wanted && hooks && hooks->ready && !gmm__capturing(ctx, stream)) hooks->ready(hooks->user, param, stream);
}

static void gmm__mlp_record(const gmm__mlp_steps *t, const gmm__call *call) {
    const gmm_mlp *d = &call->d.mlp;
    gmm_wgrad_queue *q = d->queue;
    const gmm_linear *steps[2];
    const int roles[2] = { GMM__DW2, GMM__DW };
    gmm__wgrad_record r;
    int i;
    steps[0] = &t->wgrad2;
    steps[1] = &t->wgrad1;
    memset(&r, 0, sizeof r);
    r.groups = t->groups;
    r.options = t->options;
    if (d->hooks) r.hooks = *d->hooks;
    r.wanted[0] = d->dw2 != NULL;
    r.wanted[1] = d->dw1 != NULL;
    for (i = 0; i < 2; i++) {
        if (!r.wanted[i]) continue;
        r.in[i] = steps[i]->in_features;
        r.out[i] = steps[i]->out_features;
        r.x[i] = *steps[i]->x;
        r.dy[i] = *steps[i]->dy;
        r.dw[i] = call->mat[roles[i]];
        r.grad[i] = call->grad[roles[i]];
    }
    memcpy(&q->entries[(q->head + q->count) % q->capacity], &r, sizeof r);
    q->count++;
}

static gmm_status gmm__compose_launch_mlp_bwd(const gmm__plan *plan, gmm_stream stream) {
    const gmm__call *call = plan->call;
    const gmm_mlp *d = &call->d.mlp;
    const gmm_mlp_config *c = &call->config;
    const gmm__mlp_buffers b = gmm__mlp_measure(call);
    const gmm__mlp_need need = gmm__mlp_needs(call);
    char *saved = (char *)d->saved, *deferred = (char *)d->deferred;
    const int h_saved = c->save == GMM_SAVE_PREACT_AND_ACT && !need.defer;
    void *offsets = need.defer ? deferred : (char *)gmm__part(plan, GMM__PART_MLP_OFFSETS);
    void *z = c->save == GMM_SAVE_NOTHING ? gmm__part(plan, GMM__PART_MLP_Z) : saved;
    void *h = need.defer ? deferred + b.deferred_h
                         : h_saved ? saved + b.saved_h : (char *)gmm__part(plan, GMM__PART_MLP_H);
    void *dz = need.defer ? deferred + b.deferred_dz : (char *)gmm__part(plan, GMM__PART_MLP_DZ);
    gmm__mlp_steps t;
    gmm_status s;

    gmm__mlp_fill(&t, plan, offsets, z, h, gmm__part(plan, GMM__PART_MLP_DH), dz);
    t.act.dy = &t.dh;
    t.act.dx = need.dz ? &t.dz : NULL;
    t.act.dprob = d->dprob;
    t.act.y = need.h && !h_saved ? &t.h : NULL;
    if ((s = gmm__mlp_offsets(plan, offsets, stream)) != GMM_OK) return s;
    if (need.z && c->save == GMM_SAVE_NOTHING)
        if ((s = gmm__mlp_step(plan, GMM_OP_LINEAR_FWD, &t.fc1, stream)) != GMM_OK) return s;
    if (need.dh) {
        if ((s = gmm__mlp_step(plan, GMM_OP_LINEAR_DGRAD, &t.dgrad2, stream)) != GMM_OK) return s;
        if ((s = gmm__mlp_act_step(plan, GMM_OP_ACT_BWD, &t.act, stream)) != GMM_OK) return s;
    } else if (t.act.y)
        if ((s = gmm__mlp_act_step(plan, GMM_OP_ACT_FWD, &t.act, stream)) != GMM_OK) return s;
    if (d->dw2 && !need.defer)
        if ((s = gmm__mlp_step(plan, GMM_OP_LINEAR_WGRAD, &t.wgrad2, stream)) != GMM_OK) return s;
    gmm__mlp_fire(call->ctx, d->hooks, GMM_PARAM_W2, d->dw2 && !need.defer, stream);
    if (d->db2 || t.bgrad2.d_row_scale)
        if ((s = gmm__mlp_step(plan, GMM_OP_LINEAR_BGRAD, &t.bgrad2, stream)) != GMM_OK) return s;
    gmm__mlp_fire(call->ctx, d->hooks, GMM_PARAM_B2, d->db2 != NULL, stream);
    if (d->dw1 && !need.defer)
        if ((s = gmm__mlp_step(plan, GMM_OP_LINEAR_WGRAD, &t.wgrad1, stream)) != GMM_OK) return s;
    gmm__mlp_fire(call->ctx, d->hooks, GMM_PARAM_W1, d->dw1 && !need.defer, stream);
    if (d->db1)
        if ((s = gmm__mlp_step(plan, GMM_OP_LINEAR_BGRAD, &t.bgrad1, stream)) != GMM_OK) return s;
    gmm__mlp_fire(call->ctx, d->hooks, GMM_PARAM_B1, d->db1 != NULL, stream);
    if (d->dx)
        if ((s = gmm__mlp_step(plan, GMM_OP_LINEAR_DGRAD, &t.dgrad1, stream)) != GMM_OK) return s;
    if (need.defer) gmm__mlp_record(&t, call);
    return GMM_OK;
}

/* The linear wgrad of part i of a record. */
static void gmm__mlp_replay(gmm__wgrad_record *r, int i, gmm_linear *l) {
    memset(l, 0, sizeof *l);
    r->grad[i].mat = &r->dw[i];
    l->groups = &r->groups;
    l->options = &r->options;
    l->in_features = r->in[i];
    l->out_features = r->out[i];
    l->x = &r->x[i];
    l->dy = &r->dy[i];
    l->dw = &r->grad[i];
}

/* call->input, output: the record; NULL for a query, which sizes from the MLP's descriptor instead. */
static int gmm__compose_plan_mlp_wgrad(const gmm__call *call, gmm__plan *plan) {
    size_t sub = 0;
    int i;
    if (call->input) {
        gmm__wgrad_record r = *(const gmm__wgrad_record *)call->input;
        gmm_linear l;
        for (i = 0; i < 2; i++) {
            if (!r.wanted[i]) continue;
            gmm__mlp_replay(&r, i, &l);
            if (!gmm__mlp_size_linear(plan, GMM_OP_LINEAR_WGRAD, &l, &sub, plan)) return 0;
        }
    } else {
        gmm__mlp_steps t;
        gmm__mlp_fill(&t, plan, NULL, NULL, NULL, NULL, NULL);
        if ((call->d.mlp.dw2 && !gmm__mlp_size_linear(plan, GMM_OP_LINEAR_WGRAD, &t.wgrad2, &sub, plan)) ||
            (call->d.mlp.dw1 && !gmm__mlp_size_linear(plan, GMM_OP_LINEAR_WGRAD, &t.wgrad1, &sub, plan)))
            return 0;
    }
    memset(plan->part, 0, sizeof plan->part);
    plan->workspace_bytes = sub;
    return 1;
}

static gmm_status gmm__compose_launch_mlp_wgrad(const gmm__plan *plan, gmm_stream stream) {
    const gmm_param params[2] = { GMM_PARAM_W2, GMM_PARAM_W1 };
    gmm__wgrad_record *r = (gmm__wgrad_record *)plan->call->output;
    int i;
    for (i = 0; i < 2; i++) {
        gmm_linear l;
        gmm_status s;
        if (!r->wanted[i]) continue;
        gmm__mlp_replay(r, i, &l);
        s = gmm__linear_run(plan->call->ctx, GMM_OP_LINEAR_WGRAD, plan->call->function, &l, plan->workspace,
                            plan->workspace_bytes, stream);
        if (s != GMM_OK) return s;
        r->wanted[i] = 0; /* should the other one fail, a second try leaves this one alone */
        gmm__mlp_fire(plan->call->ctx, &r->hooks, params[i], 1, stream);
    }
    return GMM_OK;
}

/* A buffer beside the workspace that the plan has sized. */
static gmm_status gmm__mlp_buffer(gmm__call *call, const char *name, const void *memory, size_t bytes, size_t need) {
    if (!memory && need > 0)
        return gmm__refuse(call, GMM_E_NULL, name, "is NULL for %llu bytes", (unsigned long long)need);
    if (bytes < need)
        return gmm__refuse(call, GMM_E_WORKSPACE, name, "has %llu bytes and must have >= %llu",
                           (unsigned long long)bytes, (unsigned long long)need);
    if ((uintptr_t)memory % GMM__WORKSPACE_ALIGN)
        return gmm__refuse(call, GMM_E_ALIGN, name, "%p is not aligned to %d bytes", memory, (int)GMM__WORKSPACE_ALIGN);
    return GMM_OK;
}

GMMDEF gmm_status gmm_mlp_query(gmm_context *ctx, gmm_op op, const gmm_mlp *mlp, gmm_info *info) {
    gmm__call call;
    const gmm_status s = gmm__mlp_prepare(&call, ctx, op, "gmm_mlp_query", mlp, 1);
    return s != GMM_OK ? s : gmm__serve(&call, info, NULL, 0, NULL);
}

GMMDEF gmm_status gmm_mlp_fwd(gmm_context *ctx, const gmm_mlp *mlp, void *workspace, size_t workspace_bytes,
                              gmm_stream stream) {
    gmm__call call;
    gmm__plan plan;
    gmm_status s = gmm__mlp_prepare(&call, ctx, GMM_OP_MLP_FWD, "gmm_mlp_fwd", mlp, 0);
    if (s != GMM_OK || (s = gmm__select(&call, &plan)) != GMM_OK) return s;
    if (call.d.mlp.saved &&
        (s = gmm__mlp_buffer(&call, "saved", call.d.mlp.saved, call.d.mlp.saved_bytes, plan.saved_bytes)) != GMM_OK)
        return s;
    return gmm__serve(&call, NULL, workspace, workspace_bytes, stream);
}

GMMDEF gmm_status gmm_mlp_bwd(gmm_context *ctx, const gmm_mlp *mlp, void *workspace, size_t workspace_bytes,
                              gmm_stream stream) {
    gmm__call call;
    gmm__plan plan;
    gmm_status s = gmm__mlp_prepare(&call, ctx, GMM_OP_MLP_BWD, "gmm_mlp_bwd", mlp, 0);
    const gmm_mlp *d = &call.d.mlp;
    if (s != GMM_OK || (s = gmm__select(&call, &plan)) != GMM_OK) return s;
    if ((s = gmm__mlp_buffer(&call, "saved", d->saved, d->saved_bytes, plan.saved_bytes)) != GMM_OK ||
        (s = gmm__mlp_buffer(&call, "deferred", d->deferred, d->deferred_bytes, plan.deferred_bytes)) != GMM_OK)
        return s;
    if (gmm__mlp_needs(&call).defer) {
        if (!d->queue || !d->queue->entries)
            return gmm__refuse(&call, GMM_E_NULL, "queue", "is NULL or has no entries, but weight gradients are "
                               "delayed");
        if (d->queue->count >= d->queue->capacity)
            return gmm__refuse(&call, GMM_E_STATE, "queue", "is full with %d of %d entries", (int)d->queue->count,
                               (int)d->queue->capacity);
    }
    return gmm__serve(&call, NULL, workspace, workspace_bytes, stream);
}

GMMDEF gmm_status gmm_mlp_wgrad(gmm_context *ctx, gmm_wgrad_queue *queue, void *workspace, size_t workspace_bytes,
                                gmm_stream stream) {
    gmm__call call;
    gmm__wgrad_record record;
    gmm_status s = gmm__open(&call, ctx, GMM_OP_MLP_WGRAD, "gmm_mlp_wgrad", 0);
    if (s != GMM_OK) return s;
    if (!queue || !queue->entries) return gmm__refuse(&call, GMM_E_NULL, "queue", "is NULL or has no entries");
    if (queue->count < 1)
        return gmm__refuse(&call, GMM_E_STATE, "queue", "is empty (%d of %d entries)", (int)queue->count,
                           (int)queue->capacity);
    memcpy(&record, &queue->entries[queue->head], sizeof record);
    call.options = record.options;
    call.groups = record.groups;
    call.rows = record.groups.capacity;
    call.input = call.output = &record;
    (void)snprintf(call.shapes, sizeof call.shapes, "G=%d T=%lld", (int)record.groups.count, (long long)call.rows);
    if ((s = gmm__serve(&call, NULL, workspace, workspace_bytes, stream)) != GMM_OK) {
        memcpy(&queue->entries[queue->head], &record, sizeof record);
        return s;
    }
    queue->head = (queue->head + 1) % queue->capacity;
    queue->count--;
    return GMM_OK;
}

GMMDEF gmm_status gmm_mlp_fire_hooks(gmm_context *ctx, gmm_op op, const gmm_mlp *mlp, gmm_stream stream) {
    gmm__call call;
    gmm_status s = gmm__mlp_prepare(&call, ctx, op, "gmm_mlp_fire_hooks", mlp, 1);
    const gmm_mlp *d = &call.d.mlp;
    int now;
    if (s != GMM_OK) return s;
    if (op == GMM_OP_MLP_FWD) return gmm__refuse(&call, GMM_E_ARG, "op", "%s fires no hooks", gmm_op_name(op));
    now = (op == GMM_OP_MLP_WGRAD) == gmm__mlp_delayed(&call); /* weights complete in this operation */
    gmm__mlp_fire(ctx, d->hooks, GMM_PARAM_W2, now && d->dw2, stream);
    gmm__mlp_fire(ctx, d->hooks, GMM_PARAM_B2, op == GMM_OP_MLP_BWD && d->db2, stream);
    gmm__mlp_fire(ctx, d->hooks, GMM_PARAM_W1, now && d->dw1, stream);
    gmm__mlp_fire(ctx, d->hooks, GMM_PARAM_B1, op == GMM_OP_MLP_BWD && d->db1, stream);
    return GMM_OK;
}

/* ................................................................................................. 12.7 Routing ... */

static float gmm__row_dot(const float *a, const float *b, int64_t n) {
    float lane[GMM__LANES];
    memset(lane, 0, sizeof lane);
    gmm__lanes_add(lane, a, b, n);
    return gmm__lanes_fold(lane);
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
    float top = logits[0], sum;
    int64_t i;
    for (i = 1; i < n; i++) top = logits[i] > top || top != top ? logits[i] : top;
    for (i = 0; i < n; i++) s[i] = gmm_exp(logits[i] - top);
    sum = gmm__row_sum(s, n);
    for (i = 0; i < n; i++) s[i] /= sum;
    return top + gmm__ln(sum);
}

/* A candidate as an integer that orders like its rank: the value above (every NaN lowest), ~expert below, so that at
   equal values the lower index is larger. */
static uint64_t gmm__candidate(float value, int64_t expert) {
    const uint32_t u = gmm_f32_bits(value);
    const uint32_t order = value != value ? 0u : u & 0x80000000u ? ~u : u | 0x80000000u;
    return (uint64_t)order << 32 | (uint64_t)(uint32_t)~(uint32_t)expert;
}
static int32_t gmm__candidate_expert(uint64_t candidate) { return (int32_t)~(uint32_t)candidate; }

/* Restores a heap whose least element is at 0, after element i grew. */
static void gmm__heap_down(uint64_t *heap, int64_t count, int64_t i) {
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

/* The k candidates of the largest score + bias, in falling order. */
static void gmm__choose(const float *score, const float *bias, int64_t experts, uint64_t *best, int64_t k) {
    int64_t e, i;
    for (e = 0; e < k; e++) best[e] = gmm__candidate(score[e] + (bias ? bias[e] : 0.0f), e);
    for (i = k / 2; i-- > 0;) gmm__heap_down(best, k, i);
    for (; e < experts; e++) {
        const uint64_t candidate = gmm__candidate(score[e] + (bias ? bias[e] : 0.0f), e);
        if (candidate <= best[0]) continue;
        best[0] = candidate;
        gmm__heap_down(best, k, 0);
    }
    for (i = k - 1; i > 0; i--) {
        const uint64_t least = best[0];
        best[0] = best[i];
        best[i] = least;
        gmm__heap_down(best, i, 0);
    }
}

/* Tokens are worked on in chunks that depend on T alone. Each chunk has its own counts and sums, which are added up in
   the order of the chunks: losses do not depend on the threads. */
static int64_t gmm__topk_chunk(int64_t tokens) {
    const int64_t chunk = gmm__ceil_div(tokens, 256);
    return chunk < 16 ? 16 : chunk;
}

enum { GMM__TOPK_SCRATCH, GMM__TOPK_COUNTS, GMM__TOPK_SUMS, GMM__TOPK_Z }; /* regions of the workspace */

/* One thread's rows: logits, scores, weights or a second softmax, candidates. */
typedef struct gmm__topk_rows {
    float *logits, *score, *soft, *weight;
    uint64_t *best;
} gmm__topk_rows;

static size_t gmm__topk_row_bytes(const gmm_route *r) { return (size_t)gmm__round_up(r->experts, 16) * sizeof(float); }
static size_t gmm__topk_thread_bytes(const gmm_route *r) {
    return 4 * gmm__topk_row_bytes(r) + (size_t)gmm__round_up(r->topk, 8) * sizeof(uint64_t);
}

/* Scores of token t in `rows`. Returns logsumexp where the softmax was needed, else 0. */
static float gmm__topk_scores(const gmm__plan *plan, int64_t t, int32_t thread, gmm__topk_rows *rows) {
    const gmm__call *call = plan->call;
    const gmm_route *r = &call->d.route;
    const gmm_mat *m = &call->mat[GMM__X_];
    const int64_t n = gmm__round_up(r->experts, 16);
    float lse = 0.0f;
    int64_t e;
    rows->logits = (float *)(void *)((char *)gmm__part(plan, GMM__TOPK_SCRATCH) +
                                     (size_t)thread * gmm__topk_thread_bytes(r));
    rows->score = rows->logits + n;
    rows->soft = r->score == GMM_SCORE_SOFTMAX ? rows->score : rows->logits + 2 * n;
    rows->weight = rows->logits + 3 * n;
    rows->best = (uint64_t *)(void *)(rows->logits + 4 * n);
    gmm__row_load(m->dtype, gmm__at(m, 0, t, 0), rows->logits, r->experts);
    if (r->score == GMM_SCORE_SOFTMAX || r->z_coeff != 0.0f)
        lse = gmm__softmax(rows->logits, rows->soft, r->experts);
    if (r->score == GMM_SCORE_SIGMOID)
        for (e = 0; e < r->experts; e++) rows->score[e] = gmm_sigmoid(rows->logits[e]);
    return lse;
}

/* What the chosen scores are divided by. */
static float gmm__topk_divisor(const gmm_route *r, float chosen) {
    return !r->normalize ? 1.0f : r->score == GMM_SCORE_SIGMOID ? chosen + 1e-20f : chosen;
}
/* Scores so small that their sum is 0 in fp32 share nothing out. */
static float gmm__share(float part, float sum) { return sum == 0.0f ? 0.0f : part / sum; }

static void gmm__topk_fwd_chunk(const void *arg, int64_t c, int32_t thread) {
    const gmm__plan *plan = (const gmm__plan *)arg;
    const gmm_route *r = &plan->call->d.route;
    const int64_t chunk = gmm__topk_chunk(r->tokens), begin = c * chunk;
    const int64_t end = begin + chunk < r->tokens ? begin + chunk : r->tokens;
    int32_t *counts = (int32_t *)gmm__part(plan, GMM__TOPK_COUNTS) + c * r->experts;
    float *sums = r->aux_coeff != 0.0f ? (float *)gmm__part(plan, GMM__TOPK_SUMS) + c * r->experts : NULL;
    float z = 0.0f;
    int64_t t, e;
    int32_t i;
    memset(counts, 0, (size_t)r->experts * sizeof *counts);
    if (sums) memset(sums, 0, (size_t)r->experts * sizeof *sums);
    for (t = begin; t < end; t++) {
        gmm__topk_rows rows;
        const float lse = gmm__topk_scores(plan, t, thread, &rows);
        float *probs = r->probs + t * r->topk, chosen = 0.0f, divisor;
        int32_t *indices = r->indices + t * r->topk;
        gmm__choose(rows.score, r->expert_bias, r->experts, rows.best, r->topk);
        for (i = 0; i < r->topk; i++) {
            indices[i] = gmm__candidate_expert(rows.best[i]);
            probs[i] = rows.score[indices[i]];
            chosen += probs[i];
            counts[indices[i]]++;
        }
        divisor = gmm__topk_divisor(r, chosen);
        for (i = 0; i < r->topk; i++) probs[i] = r->scale * gmm__share(probs[i], divisor);
        if (sums) {
            const float all = r->score == GMM_SCORE_SIGMOID ? gmm__row_sum(rows.score, r->experts) : 1.0f;
            for (e = 0; e < r->experts; e++) sums[e] += gmm__share(rows.score[e], all);
        }
        z += lse * lse;
    }
    ((float *)gmm__part(plan, GMM__TOPK_Z))[c] = z;
}

static int gmm__cpu_plan_topk_fwd(const gmm__call *call, gmm__plan *plan) {
    const gmm_route *r = &call->d.route;
    const size_t chunks = (size_t)gmm__ceil_div(r->tokens, gmm__topk_chunk(r->tokens));
    gmm__reserve(plan, GMM__TOPK_SCRATCH, (size_t)call->ctx->threads * gmm__topk_thread_bytes(r));
    gmm__reserve(plan, GMM__TOPK_COUNTS, chunks * (size_t)r->experts * sizeof(int32_t));
    gmm__reserve(plan, GMM__TOPK_SUMS, r->aux_coeff != 0.0f ? chunks * (size_t)r->experts * sizeof(float) : 0);
    gmm__reserve(plan, GMM__TOPK_Z, chunks * sizeof(float));
    return 1;
}

static gmm_status gmm__cpu_launch_topk_fwd(const gmm__plan *plan, gmm_stream stream) {
    const gmm_route *r = &plan->call->d.route;
    const int64_t experts = r->experts, chunks = gmm__ceil_div(r->tokens, gmm__topk_chunk(r->tokens));
    const int32_t *counts = (const int32_t *)gmm__part(plan, GMM__TOPK_COUNTS);
    const float *sums = (const float *)gmm__part(plan, GMM__TOPK_SUMS);
    const double tokens = (double)r->tokens;
    double aux = 0.0, z = 0.0;
    int64_t c, e;
    int32_t first = 0;
    (void)stream;
    gmm__cpu_for(plan->call->ctx, chunks, gmm__topk_fwd_chunk, plan);
    for (e = 0; e < experts; e++) {
        int32_t count = 0;
        double sum = 0.0;
        for (c = 0; c < chunks; c++) {
            count += counts[c * experts + e];
            if (r->aux_coeff != 0.0f) sum += sums[c * experts + e];
        }
        aux += count * sum;
        if (r->counts) r->counts[e] = count;
        if (r->offsets) r->offsets[e] = first;
        first += count;
    }
    if (r->offsets) r->offsets[experts] = first;
    for (c = 0; c < chunks; c++) z += ((const float *)gmm__part(plan, GMM__TOPK_Z))[c];
    if (r->aux_loss)
        *r->aux_loss = r->tokens ? (float)(r->aux_coeff * (double)experts / (r->topk * tokens * tokens) * aux) : 0.0f;
    if (r->z_loss) *r->z_loss = r->tokens ? (float)(r->z_coeff / tokens * z) : 0.0f;
    return GMM_OK;
}

/* Gradients run through w[e] = score[e] * (gradient of score[e]): no quotient of small numbers is left in it, since
   every score in a denominator meets one in a numerator. */
static void gmm__topk_bwd_chunk(const void *arg, int64_t c, int32_t thread) {
    const gmm__plan *plan = (const gmm__plan *)arg;
    const gmm_route *r = &plan->call->d.route;
    const gmm_mat *dlogits = &plan->call->mat[GMM__DX];
    const int64_t chunk = gmm__topk_chunk(r->tokens), begin = c * chunk;
    const int64_t end = begin + chunk < r->tokens ? begin + chunk : r->tokens;
    const double tokens = (double)r->tokens;
    const float daux = (float)((double)r->aux_coeff * r->experts / (r->topk * tokens * tokens) *
                               (r->dloss && r->aux_coeff != 0.0f ? r->dloss[0] : 1.0f));
    const float dz = (float)(2.0 * r->z_coeff / tokens * (r->dloss && r->z_coeff != 0.0f ? r->dloss[1] : 1.0f));
    int64_t t, e;
    int32_t i;
    for (t = begin; t < end; t++) {
        gmm__topk_rows rows;
        const float lse = gmm__topk_scores(plan, t, thread, &rows);
        float *w = rows.weight;
        const float *s = rows.score;
        memset(w, 0, (size_t)r->experts * sizeof *w);
        if (r->dprobs) {
            const float *g = r->dprobs + t * r->topk;
            const int32_t *indices = r->indices + t * r->topk;
            float chosen = 0.0f, divisor, mean = 0.0f;
            for (i = 0; i < r->topk; i++)
                if (indices[i] >= 0 && indices[i] < r->experts) chosen += s[indices[i]];
            divisor = gmm__topk_divisor(r, chosen);
            for (i = 0; r->normalize && i < r->topk; i++)
                if (indices[i] >= 0 && indices[i] < r->experts) mean += g[i] * gmm__share(s[indices[i]], divisor);
            for (i = 0; i < r->topk; i++)
                if (indices[i] >= 0 && indices[i] < r->experts)
                    w[indices[i]] += r->scale * gmm__share(s[indices[i]], divisor) * (g[i] - mean);
        }
        if (r->aux_coeff != 0.0f) {
            float all = 1.0f, mean = 0.0f;
            if (r->score == GMM_SCORE_SIGMOID) {
                all = gmm__row_sum(s, r->experts);
                for (e = 0; e < r->experts; e++) mean += daux * (float)r->counts[e] * gmm__share(s[e], all);
            }
            for (e = 0; e < r->experts; e++) w[e] += gmm__share(s[e], all) * (daux * (float)r->counts[e] - mean);
        }
        if (r->score == GMM_SCORE_SOFTMAX) {
            const float sum = gmm__row_sum(w, r->experts);
            for (e = 0; e < r->experts; e++) w[e] -= s[e] * sum;
        } else {
            for (e = 0; e < r->experts; e++) {
                float rest; /* 1 - s */
                (void)gmm_sigmoid_rest(rows.logits[e], &rest);
                w[e] *= rest;
            }
        }
        if (r->z_coeff != 0.0f)
            for (e = 0; e < r->experts; e++) w[e] += dz * lse * rows.soft[e];
        gmm__row_store(dlogits->dtype, gmm__at(dlogits, 0, t, 0), w, r->experts);
    }
}

static int gmm__cpu_plan_topk_bwd(const gmm__call *call, gmm__plan *plan) {
    gmm__reserve(plan, GMM__TOPK_SCRATCH, (size_t)call->ctx->threads * gmm__topk_thread_bytes(&call->d.route));
    return 1;
}

static gmm_status gmm__cpu_launch_topk_bwd(const gmm__plan *plan, gmm_stream stream) {
    const int64_t tokens = plan->call->d.route.tokens;
    (void)stream;
    gmm__cpu_for(plan->call->ctx, gmm__ceil_div(tokens, gmm__topk_chunk(tokens)), gmm__topk_bwd_chunk, plan);
    return GMM_OK;
}

static int gmm__finite(float x) { return (gmm_f32_bits(x) & 0x7F800000u) != 0x7F800000u; }

static gmm_status gmm__read_route(gmm__call *call, const gmm_route *route) {
    gmm_route *r = &call->d.route;
    const int bwd = call->op == GMM_OP_TOPK_BWD;
    int64_t slots;
    gmm_status s = gmm__read(call, "route", r, sizeof *r, route);
    if (s != GMM_OK || (s = gmm__read_options(call, r->options)) != GMM_OK) return s;
    (void)snprintf(call->shapes, sizeof call->shapes, "T=%lld E=%d k=%d", (long long)r->tokens, (int)r->experts,
                   (int)r->topk);
    if (r->experts < 1) return gmm__refuse(call, GMM_E_ARG, "experts", "%d must be >= 1", (int)r->experts);
    if (r->tokens < 0) return gmm__refuse(call, GMM_E_ARG, "tokens", "%lld must be >= 0", (long long)r->tokens);
    if (r->topk < 1 || r->topk > r->experts)
        return gmm__refuse(call, GMM_E_ARG, "topk", "%d must be 1 to %d", (int)r->topk, (int)r->experts);
    if (!gmm__mul(r->tokens, r->topk, &slots) || slots > INT32_MAX)
        return gmm__refuse(call, GMM_E_ARG, "tokens", "%lld times topk %d must be < 2^31, counts are int32",
                           (long long)r->tokens, (int)r->topk);
    if (r->score != GMM_SCORE_SOFTMAX && r->score != GMM_SCORE_SIGMOID)
        return gmm__refuse(call, GMM_E_ARG, "score", "%d is neither softmax (0) nor sigmoid (1)", (int)r->score);
    if (r->normalize & ~1) return gmm__refuse(call, GMM_E_ARG, "normalize", "%d must be 0 or 1", (int)r->normalize);
    if (!gmm__finite(r->scale)) return gmm__refuse(call, GMM_E_ARG, "scale", "%g must be finite", (double)r->scale);
    if (!gmm__finite(r->aux_coeff))
        return gmm__refuse(call, GMM_E_ARG, "aux_coeff", "%g must be finite", (double)r->aux_coeff);
    if (!gmm__finite(r->z_coeff))
        return gmm__refuse(call, GMM_E_ARG, "z_coeff", "%g must be finite", (double)r->z_coeff);
    if (r->scale == 0.0f) r->scale = 1.0f;
    if ((s = gmm__read_mat(call, GMM__X_, "logits", r->logits, 1, 0, r->tokens, r->experts, GMM__FLOATS)) != GMM_OK)
        return s;
    (void)snprintf(call->shapes, sizeof call->shapes, "T=%lld E=%d k=%d %s", (long long)r->tokens, (int)r->experts,
                   (int)r->topk, gmm_dtype_name(call->mat[GMM__X_].dtype));
    if (bwd) {
        s = gmm__read_mat(call, GMM__DX, "dlogits", r->dlogits, 1, 0, r->tokens, r->experts, GMM__FLOATS);
        if (s != GMM_OK || (s = gmm__check_array(call, "dprobs", r->dprobs, 0, slots)) != GMM_OK ||
            (s = gmm__check_array(call, "indices", r->indices, r->dprobs != NULL, slots)) != GMM_OK ||
            (s = gmm__check_array(call, "counts", r->counts, r->aux_coeff != 0.0f, r->experts)) != GMM_OK)
            return s;
        return gmm__check_array(call, "dloss", r->dloss, 0, 2);
    }
    if ((s = gmm__check_array(call, "expert_bias", r->expert_bias, 0, r->experts)) != GMM_OK ||
        (s = gmm__check_array(call, "indices", r->indices, 1, slots)) != GMM_OK ||
        (s = gmm__check_array(call, "probs", r->probs, 1, slots)) != GMM_OK ||
        (s = gmm__check_array(call, "counts", r->counts, 0, r->experts)) != GMM_OK ||
        (s = gmm__check_array(call, "offsets", r->offsets, 0, (int64_t)r->experts + 1)) != GMM_OK ||
        (s = gmm__check_array(call, "aux_loss", r->aux_loss, 0, 1)) != GMM_OK)
        return s;
    return gmm__check_array(call, "z_loss", r->z_loss, 0, 1);
}

static gmm_status gmm__topk(gmm_context *ctx, gmm_op op, const char *function, const gmm_route *route, int query,
                            gmm_info *info, void *workspace, size_t workspace_bytes, gmm_stream stream) {
    gmm__call call;
    gmm_status s = gmm__open(&call, ctx, op, function, query);
    if (s != GMM_OK) return s;
    if (op != GMM_OP_TOPK_FWD && op != GMM_OP_TOPK_BWD)
        return gmm__refuse(&call, GMM_E_ARG, "op", "%s is neither topk_fwd nor topk_bwd", gmm_op_name(op));
    if ((s = gmm__read_route(&call, route)) != GMM_OK) return s;
    return gmm__serve(&call, info, workspace, workspace_bytes, stream);
}

GMMDEF gmm_status gmm_topk_query(gmm_context *ctx, gmm_op op, const gmm_route *route, gmm_info *info) {
    return gmm__topk(ctx, op, "gmm_topk_query", route, 1, info, NULL, 0, NULL);
}

GMMDEF gmm_status gmm_topk_fwd(gmm_context *ctx, const gmm_route *route, void *workspace, size_t workspace_bytes,
                               gmm_stream stream) {
    return gmm__topk(ctx, GMM_OP_TOPK_FWD, "gmm_topk_fwd", route, 0, NULL, workspace, workspace_bytes, stream);
}

GMMDEF gmm_status gmm_topk_bwd(gmm_context *ctx, const gmm_route *route, void *workspace, size_t workspace_bytes,
                               gmm_stream stream) {
    return gmm__topk(ctx, GMM_OP_TOPK_BWD, "gmm_topk_bwd", route, 0, NULL, workspace, workspace_bytes, stream);
}

/* ...................................................................................... 12.8 Permute, unpermute ... */

/* Operands of the permutation among the roles. */
enum { GMM__OUT = GMM__W, GMM__DOUT = GMM__W2, GMM__ROWS = GMM__Y, GMM__DROWS = GMM__DY };

/* Every slot gets the row behind those of the slots before it that chose the same expert: a counting sort. Chunks of
   slots count by themselves, then each knows where its rows of each expert start. */
enum { GMM__MAP_NEXT, GMM__MAP_FAULT, GMM__MAP_SLOTS = 4096 };

static int64_t gmm__map_chunks(const gmm__call *call) {
    const int64_t chunks = gmm__ceil_div(call->d.permute.tokens * call->d.permute.topk, GMM__MAP_SLOTS);
    return chunks < call->ctx->threads ? chunks : call->ctx->threads;
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

static void gmm__map_place(const void *arg, int64_t c, int32_t thread) {
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
    gmm__cpu_for(call->ctx, chunks, gmm__map_count, plan);
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
    gmm__cpu_for(call->ctx, chunks, gmm__map_place, plan);
    if (fault && p->fault) *p->fault |= fault;
    return GMM_OK;
}

/* A launch over rows or tokens: tasks of a few rows each. */
typedef struct gmm__move {
    const gmm__call *call;
    int64_t count, chunk; /* rows or tokens in all, and per task */
} gmm__move;

static gmm_status gmm__move_all(const gmm__call *call, int64_t count, gmm__task task) {
    gmm__move move;
    move.call = call;
    move.count = count;
    move.chunk = 1 + 16384 / call->d.permute.hidden;
    gmm__cpu_for(call->ctx, gmm__ceil_div(count, move.chunk), task, &move);
    return GMM_OK;
}
static int64_t gmm__move_range(const gmm__move *move, int64_t c, int64_t *begin) {
    *begin = c * move->chunk;
    return *begin + move->chunk < move->count ? *begin + move->chunk : move->count;
}

/* Entries of a map outside [-1, limit) count as -1, and are told. */
static void gmm__map_check(const gmm__call *call, const int32_t *map, int64_t count, int64_t limit) {
    uint32_t *fault = call->d.permute.fault;
    int64_t i;
    int bad = 0;
    if (!fault) return;
    for (i = 0; i < count; i++) bad |= map[i] < -1 || map[i] >= limit;
    if (bad) *fault |= (uint32_t)GMM_FAULT_INDEX;
}
static int64_t gmm__map_at(const int32_t *map, int64_t i, int64_t limit) {
    return map[i] >= 0 && map[i] < limit ? map[i] : -1;
}

/* Live rows, from sizes; checks slot_of in front of them. */
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

/* Columns worked on at once: their fp32 sums stay in the first-level cache. A multiple of the lanes. */
enum { GMM__COLUMNS = 512 };
static int64_t gmm__columns(const gmm_permute *p, int64_t col) {
    return p->hidden - col < (int64_t)GMM__COLUMNS ? p->hidden - col : (int64_t)GMM__COLUMNS;
}

static void gmm__permute_rows(const void *arg, int64_t c, int32_t thread) {
    const gmm__move *move = (const gmm__move *)arg;
    const gmm_permute *p = &move->call->d.permute;
    const gmm_mat *x = &move->call->mat[GMM__X_], *rows = &move->call->mat[GMM__ROWS];
    const size_t bytes = (size_t)p->hidden * (size_t)(gmm_dtype_bits(x->dtype) / 8);
    int64_t r, end = gmm__move_range(move, c, &r);
    (void)thread;
    for (; r < end; r++) {
        const int64_t slot = gmm__map_at(p->slot_of, r, p->tokens * p->topk);
        if (slot < 0) memset(gmm__at(rows, 0, r, 0), 0, bytes);
        else memcpy(gmm__at(rows, 0, r, 0), gmm__at(x, 0, slot / p->topk, 0), bytes);
        if (p->row_probs) p->row_probs[r] = slot < 0 ? 0.0f : p->probs[slot];
    }
}

static int gmm__cpu_plan_permute_fwd(const gmm__call *call, gmm__plan *plan) {
    (void)call;
    (void)plan;
    return 1;
}

static gmm_status gmm__cpu_launch_permute_fwd(const gmm__plan *plan, gmm_stream stream) {
    const gmm__call *call = plan->call;
    const gmm_permute *p = &call->d.permute;
    const int64_t live = gmm__permute_live(call);
    int64_t r;
    (void)stream;
    gmm__cpu_tail(&call->mat[GMM__ROWS], p->tail, live, p->capacity, p->hidden);
    if (p->row_probs && p->tail == GMM_TAIL_ZERO)
        for (r = live; r < p->capacity; r++) p->row_probs[r] = 0.0f;
    return gmm__move_all(call, live, gmm__permute_rows);
}

/* to[t] = sum over the slots of token t of (probs) from[row] */
static void gmm__gather_sum(const gmm__move *move, int64_t c, const gmm_mat *from, const float *probs,
                            const gmm_mat *to) {
    const gmm_permute *p = &move->call->d.permute;
    float acc[GMM__COLUMNS];
    int64_t t, end = gmm__move_range(move, c, &t), col;
    int32_t i;
    for (; t < end; t++)
        for (col = 0; col < p->hidden; col += GMM__COLUMNS) {
            const int64_t n = gmm__columns(p, col);
            memset(acc, 0, sizeof acc);
            for (i = 0; i < p->topk; i++) {
                const int64_t slot = t * p->topk + i, row = gmm__map_at(p->row_of, slot, p->capacity);
                if (row >= 0)
                    gmm__row_add(from->dtype, gmm__at(from, 0, row, col), probs ? probs[slot] : 1.0f, acc, n);
            }
            gmm__row_store(to->dtype, gmm__at(to, 0, t, col), acc, n);
        }
}

static void gmm__permute_back(const void *arg, int64_t c, int32_t thread) {
    const gmm__move *move = (const gmm__move *)arg;
    const gmm_permute *p = &move->call->d.permute;
    (void)thread;
    if (p->dx) gmm__gather_sum(move, c, &move->call->mat[GMM__DROWS], NULL, &move->call->mat[GMM__DX]);
    if (p->dprobs) {
        int64_t t, end = gmm__move_range(move, c, &t), slot;
        for (slot = t * p->topk; slot < end * p->topk; slot++) {
            const int64_t row = gmm__map_at(p->row_of, slot, p->capacity);
            p->dprobs[slot] = row < 0 ? 0.0f : p->drow_probs[row];
        }
    }
}

static int gmm__cpu_plan_permute_bwd(const gmm__call *call, gmm__plan *plan) {
    return gmm__cpu_plan_permute_fwd(call, plan);
}

static gmm_status gmm__cpu_launch_permute_bwd(const gmm__plan *plan, gmm_stream stream) {
    const gmm_permute *p = &plan->call->d.permute;
    (void)stream;
    gmm__map_check(plan->call, p->row_of, p->tokens * p->topk, p->capacity);
    return gmm__move_all(plan->call, p->tokens, gmm__permute_back);
}

static void gmm__unpermute_tokens(const void *arg, int64_t c, int32_t thread) {
    const gmm__move *move = (const gmm__move *)arg;
    (void)thread;
    gmm__gather_sum(move, c, &move->call->mat[GMM__ROWS], move->call->d.permute.probs, &move->call->mat[GMM__OUT]);
}

static int gmm__cpu_plan_unpermute_fwd(const gmm__call *call, gmm__plan *plan) {
    return gmm__cpu_plan_permute_fwd(call, plan);
}

static gmm_status gmm__cpu_launch_unpermute_fwd(const gmm__plan *plan, gmm_stream stream) {
    const gmm_permute *p = &plan->call->d.permute;
    (void)stream;
    gmm__map_check(plan->call, p->row_of, p->tokens * p->topk, p->capacity);
    return gmm__move_all(plan->call, p->tokens, gmm__unpermute_tokens);
}

/* drows[r] = (probs) dout[token of r] */
static void gmm__unpermute_rows_back(const void *arg, int64_t c, int32_t thread) {
    const gmm__move *move = (const gmm__move *)arg;
    const gmm_permute *p = &move->call->d.permute;
    const gmm_mat *dout = &move->call->mat[GMM__DOUT], *drows = &move->call->mat[GMM__DROWS];
    const size_t bytes = (size_t)p->hidden * (size_t)(gmm_dtype_bits(drows->dtype) / 8);
    float acc[GMM__COLUMNS];
    int64_t r, end = gmm__move_range(move, c, &r), col, i;
    (void)thread;
    for (; r < end; r++) {
        const int64_t slot = gmm__map_at(p->slot_of, r, p->tokens * p->topk), t = slot / p->topk;
        if (slot < 0) memset(gmm__at(drows, 0, r, 0), 0, bytes);
        else if (!p->probs && dout->dtype == drows->dtype)
            memcpy(gmm__at(drows, 0, r, 0), gmm__at(dout, 0, t, 0), bytes);
        else
            for (col = 0; col < p->hidden; col += GMM__COLUMNS) {
                const int64_t n = gmm__columns(p, col);
                const float scale = p->probs ? p->probs[slot] : 1.0f;
                gmm__row_load(dout->dtype, gmm__at(dout, 0, t, col), acc, n);
                for (i = 0; i < n; i++) acc[i] *= scale;
                gmm__row_store(drows->dtype, gmm__at(drows, 0, r, col), acc, n);
            }
    }
}

/* dprobs[slot] = dout[token] . rows[row] */
static void gmm__unpermute_probs_back(const void *arg, int64_t c, int32_t thread) {
    const gmm__move *move = (const gmm__move *)arg;
    const gmm_permute *p = &move->call->d.permute;
    const gmm_mat *dout = &move->call->mat[GMM__DOUT], *rows = &move->call->mat[GMM__ROWS];
    float a[GMM__COLUMNS], b[GMM__COLUMNS], lane[GMM__LANES];
    int64_t t, end = gmm__move_range(move, c, &t), slot, col;
    (void)thread;
    for (; t < end; t++)
        for (slot = t * p->topk; slot < (t + 1) * p->topk; slot++) {
            const int64_t row = gmm__map_at(p->row_of, slot, p->capacity);
            memset(lane, 0, sizeof lane);
            for (col = 0; row >= 0 && col < p->hidden; col += GMM__COLUMNS) {
                const int64_t n = gmm__columns(p, col);
                gmm__row_load(dout->dtype, gmm__at(dout, 0, t, col), a, n);
                gmm__row_load(rows->dtype, gmm__at(rows, 0, row, col), b, n);
                gmm__lanes_add(lane, a, b, n);
            }
            p->dprobs[slot] = gmm__lanes_fold(lane);
        }
}

static int gmm__cpu_plan_unpermute_bwd(const gmm__call *call, gmm__plan *plan) {
    return gmm__cpu_plan_permute_fwd(call, plan);
}

static gmm_status gmm__cpu_launch_unpermute_bwd(const gmm__plan *plan, gmm_stream stream) {
    const gmm__call *call = plan->call;
    const gmm_permute *p = &call->d.permute;
    (void)stream;
    if (p->drows) {
        const int64_t live = gmm__permute_live(call);
        gmm__cpu_tail(&call->mat[GMM__DROWS], p->tail, live, p->capacity, p->hidden);
        (void)gmm__move_all(call, live, gmm__unpermute_rows_back);
    }
    if (p->dprobs) {
        gmm__map_check(call, p->row_of, p->tokens * p->topk, p->capacity);
        (void)gmm__move_all(call, p->tokens, gmm__unpermute_probs_back);
    }
    return GMM_OK;
}

/* The checks that all five share, and the segments as groups. */
static gmm_status gmm__read_permute(gmm__call *call, const gmm_permute *permute) {
    gmm_permute *p = &call->d.permute;
    int64_t slots;
    gmm_status s = gmm__read(call, "permute", p, sizeof *p, permute);
    if (s != GMM_OK || (s = gmm__read_options(call, p->options)) != GMM_OK) return s;
    (void)snprintf(call->shapes, sizeof call->shapes, "T=%lld E=%d k=%d R=%lld H=%lld", (long long)p->tokens,
                   (int)p->experts, (int)p->topk, (long long)p->capacity, (long long)p->hidden);
    if (p->experts < 1) return gmm__refuse(call, GMM_E_ARG, "experts", "%d must be >= 1", (int)p->experts);
    if (p->tokens < 0) return gmm__refuse(call, GMM_E_ARG, "tokens", "%lld must be >= 0", (long long)p->tokens);
    if (p->topk < 1) return gmm__refuse(call, GMM_E_ARG, "topk", "%d must be >= 1", (int)p->topk);
    if (!gmm__mul(p->tokens, p->topk, &slots) || slots > INT32_MAX)
        return gmm__refuse(call, GMM_E_ARG, "tokens", "%lld times topk %d must be < 2^31", (long long)p->tokens,
                           (int)p->topk);
    if (p->capacity < 0 || p->capacity > INT32_MAX)
        return gmm__refuse(call, GMM_E_ARG, "capacity", "%lld must be >= 0 and < 2^31", (long long)p->capacity);
    if (p->hidden < 1) return gmm__refuse(call, GMM_E_ARG, "hidden", "%lld must be >= 1", (long long)p->hidden);
    if (p->align < 0) return gmm__refuse(call, GMM_E_ARG, "align", "%d must be >= 0", (int)p->align);
    if (p->tail != GMM_TAIL_KEEP && p->tail != GMM_TAIL_ZERO)
        return gmm__refuse(call, GMM_E_ARG, "tail", "%d is neither keep (0) nor zero (1)", (int)p->tail);
    if (p->reserved) return gmm__refuse(call, GMM_E_ARG, "reserved", "%d must be 0", (int)p->reserved);
    if (p->align == 0) p->align = 1;
    call->groups.count = p->experts;
    call->groups.capacity = p->capacity;
    call->groups.splits = p->sizes;
    call->groups.dtype = GMM_I32;
    call->groups.tail = p->tail;
    call->groups.fault = p->fault;
    call->rows = p->capacity;
    return gmm__check_array(call, "fault", p->fault, 0, 1);
}

static gmm_status gmm__permute_mat(gmm__call *call, int role, const char *argument, const gmm_mat *mat, int64_t rows,
                                   uint32_t dtypes) {
    return gmm__read_mat(call, role, argument, mat, 1, 0, rows, call->d.permute.hidden, dtypes);
}

/* What one of the five needs: an output that is given needs its inputs. */
static gmm_status gmm__read_permute_operands(gmm__call *call) {
    const gmm_permute *p = &call->d.permute;
    const int64_t slots = p->tokens * p->topk;
    const uint32_t plain = (uint32_t)GMM__FLOATS | 1u << GMM_E4M3 | 1u << GMM_E5M2 | 1u << GMM_U8;
    gmm_status s = GMM_OK;
    switch (call->op) {
    case GMM_OP_PERMUTE_MAP:
        if ((s = gmm__check_array(call, "indices", p->indices, 1, slots)) != GMM_OK ||
            (s = gmm__check_array(call, "row_of", p->row_of, 0, slots)) != GMM_OK ||
            (s = gmm__check_array(call, "slot_of", p->slot_of, 0, p->capacity)) != GMM_OK)
            return s;
        return gmm__check_array(call, "sizes", p->sizes, 0, p->experts);
    case GMM_OP_PERMUTE_FWD:
        if ((s = gmm__permute_mat(call, GMM__X_, "x", p->x, p->tokens, plain)) != GMM_OK ||
            (s = gmm__permute_mat(call, GMM__ROWS, "rows", p->rows, p->capacity, plain)) != GMM_OK)
            return s;
        if (call->mat[GMM__X_].dtype != call->mat[GMM__ROWS].dtype)
            return gmm__refuse(call, GMM_E_DTYPE, "rows", "dtype %s must be that of x, %s",
                               gmm_dtype_name(call->mat[GMM__ROWS].dtype), gmm_dtype_name(call->mat[GMM__X_].dtype));
        if ((s = gmm__check_array(call, "slot_of", p->slot_of, 1, p->capacity)) != GMM_OK ||
            (s = gmm__check_array(call, "row_of", p->row_of, 0, slots)) != GMM_OK ||
            (s = gmm__check_array(call, "sizes", p->sizes, 1, p->experts)) != GMM_OK ||
            (s = gmm__check_array(call, "row_probs", p->row_probs, 0, p->capacity)) != GMM_OK)
            return s;
        return gmm__check_array(call, "probs", p->probs, p->row_probs != NULL, slots);
    case GMM_OP_PERMUTE_BWD:
        if (!p->dx && !p->dprobs && !call->query)
            return gmm__refuse(call, GMM_E_NULL, "dx", "is NULL and dprobs is, too: nothing is asked for");
        if (p->dx && ((s = gmm__permute_mat(call, GMM__DX, "dx", p->dx, p->tokens, GMM__FLOATS)) != GMM_OK ||
                      (s = gmm__permute_mat(call, GMM__DROWS, "drows", p->drows, p->capacity, GMM__FLOATS)) != GMM_OK))
            return s;
        if ((s = gmm__check_array(call, "row_of", p->row_of, 1, slots)) != GMM_OK ||
            (s = gmm__check_array(call, "dprobs", p->dprobs, 0, slots)) != GMM_OK)
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
            return gmm__refuse(call, GMM_E_NULL, "drows", "is NULL and dprobs is, too: nothing is asked for");
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
             (s = gmm__check_array(call, "dprobs", p->dprobs, 1, slots)) != GMM_OK))
            return s;
        return gmm__check_array(call, "probs", p->probs, 0, slots);
    default: return gmm__refuse(call, GMM_E_ARG, "op", "%s is no permutation", gmm_op_name(call->op));
    }
}

static gmm_status gmm__permute(gmm_context *ctx, gmm_op op, const char *function, const gmm_permute *permute, int query,
                               gmm_info *info, void *workspace, size_t workspace_bytes, gmm_stream stream) {
    gmm__call call;
    gmm_status s = gmm__open(&call, ctx, op, function, query);
    if (s != GMM_OK || (s = gmm__read_permute(&call, permute)) != GMM_OK ||
        (s = gmm__read_permute_operands(&call)) != GMM_OK)
        return s;
    return gmm__serve(&call, info, workspace, workspace_bytes, stream);
}

GMMDEF gmm_status gmm_permute_query(gmm_context *ctx, gmm_op op, const gmm_permute *permute, gmm_info *info) {
    return gmm__permute(ctx, op, "gmm_permute_query", permute, 1, info, NULL, 0, NULL);
}

GMMDEF gmm_status gmm_permute_map(gmm_context *ctx, const gmm_permute *permute, void *workspace,
                                  size_t workspace_bytes, gmm_stream stream) {
    return gmm__permute(ctx, GMM_OP_PERMUTE_MAP, "gmm_permute_map", permute, 0, NULL, workspace, workspace_bytes,
                        stream);
}

GMMDEF gmm_status gmm_permute_fwd(gmm_context *ctx, const gmm_permute *permute, void *workspace,
                                  size_t workspace_bytes, gmm_stream stream) {
    return gmm__permute(ctx, GMM_OP_PERMUTE_FWD, "gmm_permute_fwd", permute, 0, NULL, workspace, workspace_bytes,
                        stream);
}

GMMDEF gmm_status gmm_permute_bwd(gmm_context *ctx, const gmm_permute *permute, void *workspace,
                                  size_t workspace_bytes, gmm_stream stream) {
    return gmm__permute(ctx, GMM_OP_PERMUTE_BWD, "gmm_permute_bwd", permute, 0, NULL, workspace, workspace_bytes,
                        stream);
}

GMMDEF gmm_status gmm_unpermute_fwd(gmm_context *ctx, const gmm_permute *permute, void *workspace,
                                    size_t workspace_bytes, gmm_stream stream) {
    return gmm__permute(ctx, GMM_OP_UNPERMUTE_FWD, "gmm_unpermute_fwd", permute, 0, NULL, workspace, workspace_bytes,
                        stream);
}

GMMDEF gmm_status gmm_unpermute_bwd(gmm_context *ctx, const gmm_permute *permute, void *workspace,
                                    size_t workspace_bytes, gmm_stream stream) {
    return gmm__permute(ctx, GMM_OP_UNPERMUTE_BWD, "gmm_unpermute_bwd", permute, 0, NULL, workspace, workspace_bytes,
                        stream);
}

/* ..................................................................................... 12.9 Accumulate, convert ... */

/* The extents that both operations share, named in messages. */
static gmm_status gmm__small_extents(gmm__call *call, int64_t rows, int64_t cols) {
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
    if (s != GMM_OK || (s = gmm__read(call, "accumulation", d, sizeof *d, accumulation)) != GMM_OK) return s;
    (void)snprintf(call->shapes, sizeof call->shapes, "%d of %lld x %lld %s", (int)d->count, (long long)d->rows,
                   (long long)d->cols, gmm__peek_dtype(d->x));
    if ((s = gmm__read_options(call, d->options)) != GMM_OK) return s;
    if (d->count < 1) return gmm__refuse(call, GMM_E_ARG, "count", "%d must be >= 1", (int)d->count);
    if ((s = gmm__small_extents(call, d->rows, d->cols)) != GMM_OK) return s;
    if (d->x) { /* looked at before the addresses in the table are */
        gmm_mat m;
        if (gmm__copy_sized(&m, sizeof m, d->x) && m.table && ctx->config.space == GMM_SPACE_CUDA &&
            !(m.flags & (uint32_t)GMM_MAT_TABLE_ON_HOST))
            return gmm__refuse(call, GMM_E_ARG, "x", "table must stand on the host (GMM_MAT_TABLE_ON_HOST)");
    }
    if ((s = gmm__read_mat(call, GMM__X_, "x", d->x, 1, d->count, d->rows, d->cols, GMM__FLOATS)) != GMM_OK) return s;
    return gmm__read_mat(call, GMM__Y, "y", d->y, 1, 0, d->rows, d->cols, GMM__FLOATS);
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
    if (s != GMM_OK || (s = gmm__read(call, "conversion", d, sizeof *d, conversion)) != GMM_OK) return s;
    (void)snprintf(call->shapes, sizeof call->shapes, "%lld x %lld %s", (long long)d->rows, (long long)d->cols,
                   gmm__peek_dtype(d->src));
    if ((s = gmm__read_options(call, d->options)) != GMM_OK) return s;
    if (d->reserved) return gmm__refuse(call, GMM_E_ARG, "reserved", "%d must be 0", (int)d->reserved);
    if ((s = gmm__small_extents(call, d->rows, d->cols)) != GMM_OK ||
        (s = gmm__read_mat(call, GMM__X_, "src", d->src, 1, 0, d->rows, d->cols, GMM__BYTES)) != GMM_OK ||
        (s = gmm__read_mat(call, GMM__Y, "dst", d->dst, 1, 0, d->rows, d->cols, GMM__BYTES)) != GMM_OK)
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

/* CPU engine. A task is a few whole rows, or a piece of a long one; a piece fits the stack as fp32. */
enum { GMM__SMALL_PIECE = 1024, GMM__SMALL_TASK = 16 * GMM__SMALL_PIECE };

static int64_t gmm__small_tasks_per_row(const gmm__call *call) { return gmm__ceil_div(call->in, GMM__SMALL_TASK); }
static void gmm__small_for(const gmm__call *call, gmm__task task) {
    const int64_t blocks = gmm__ceil_div(call->rows, gmm__rows_per_task(call->in));
    gmm__cpu_for(call->ctx, blocks * gmm__small_tasks_per_row(call), task, call);
}

/* Rows [row, row_end) and columns [col, col_end) of a task. */
typedef struct gmm__small_part {
    int64_t row, row_end, col, col_end;
} gmm__small_part;
static gmm__small_part gmm__small_part_of(const gmm__call *call, int64_t task) {
    const int64_t across = gmm__small_tasks_per_row(call), rows = gmm__rows_per_task(call->in);
    gmm__small_part p;
    p.row = task / across * rows;
    p.row_end = call->rows - p.row < rows ? call->rows : p.row + rows;
    p.col = task % across * GMM__SMALL_TASK;
    p.col_end = call->in - p.col < GMM__SMALL_TASK ? call->in : p.col + GMM__SMALL_TASK;
    return p;
}

static void gmm__accumulate_task(const void *arg, int64_t task, int32_t thread) {
    const gmm__call *call = (const gmm__call *)arg;
    const gmm_accumulation *d = &call->d.sum;
    const gmm_mat *x = &call->mat[GMM__X_], *y = &call->mat[GMM__Y];
    const gmm__small_part p = gmm__small_part_of(call, task);
    float sum[GMM__SMALL_PIECE], other[GMM__SMALL_PIECE];
    int64_t row, col, n, i, j;
    (void)thread;
    for (row = p.row; row < p.row_end; row++)
        for (col = p.col; col < p.col_end; col += n) {
            n = p.col_end - col < GMM__SMALL_PIECE ? p.col_end - col : (int64_t)GMM__SMALL_PIECE;
            gmm__row_load(x->dtype, gmm__at(x, 0, row, col), sum, n);
            for (j = 1; j < d->count; j++) {
                gmm__row_load(x->dtype, gmm__at(x, j, row, col), other, n);
                for (i = 0; i < n; i++) sum[i] += other[i];
            }
            for (i = 0; i < n; i++) sum[i] *= d->scale;
            if (d->beta != 0.0f) {
                gmm__row_load(y->dtype, gmm__at(y, 0, row, col), other, n);
                for (i = 0; i < n; i++) other[i] *= d->beta; /* a loop of its own: every product is rounded */
                for (i = 0; i < n; i++) sum[i] += other[i];
            }
            gmm__row_store(y->dtype, gmm__at(y, 0, row, col), sum, n);
        }
}

static int gmm__cpu_plan_accumulate(const gmm__call *call, gmm__plan *plan) {
    (void)call;
    (void)plan;
    return 1;
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
    const gmm__small_part p = gmm__small_part_of(call, task);
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

static int gmm__cpu_plan_convert(const gmm__call *call, gmm__plan *plan) {
    return gmm__cpu_plan_accumulate(call, plan);
}
static gmm_status gmm__cpu_launch_convert(const gmm__plan *plan, gmm_stream stream) {
    (void)stream;
    gmm__small_for(plan->call, gmm__convert_task);
    return GMM_OK;
}

/* ............................................................................. 12.10 MMA engine: grouped linear ... */

#ifdef __CUDACC__

/* Regions of the workspace. */
enum {
    GMM__MMA_OFFSETS, /* [G + 1] int64 */
    GMM__MMA_TILES,   /* [G + 1] int32 */
    GMM__MMA_TABLE,   /* [G] addresses each: tables that stood on the host */
    GMM__MMA_TABLE2,
    GMM__MMA_PIECES   /* bias gradient; the WGMMA engine's tables of many groups */
};

static gmm_status gmm__cuda_status(const gmm__call *call, cudaError_t e) {
    if (e == cudaSuccess) return GMM_OK;
    (void)cudaGetLastError(); /* reported here, so it is not found again by the next call */
    return gmm__fail(&call->ctx->error, GMM_E_CUDA, "%s: %s", call->function, cudaGetErrorString(e));
}

static int32_t gmm__cuda_attribute(const gmm_context *ctx, enum cudaDeviceAttr which) {
    int value = 0;
    return cudaDeviceGetAttribute(&value, which, ctx->config.device) == cudaSuccess ? (int32_t)value : 0;
}

/* Room for the offsets, and for a table that stands on the host. */
static void gmm__mma_reserve_groups(const gmm__call *call, gmm__plan *plan) {
    const size_t groups = (size_t)call->groups.count;
    gmm__reserve(plan, GMM__MMA_OFFSETS, (groups + 1) * sizeof(int64_t));
    gmm__reserve(plan, GMM__MMA_TILES, (groups + 1) * sizeof(int32_t));
}
static void gmm__mma_reserve_table(const gmm__call *call, gmm__plan *plan, int role, int part) {
    if (call->mat[role].dtype != GMM_NONE && (call->mat[role].flags & (uint32_t)GMM_MAT_TABLE_ON_HOST))
        gmm__reserve(plan, part, (size_t)call->groups.count * sizeof(void *));
}

/* Enqueues the offsets and tiles of a call. */
static gmm_status gmm__mma_offsets(const gmm__call *call, int64_t *offsets, int32_t *tiles, int32_t tile_rows,
                                   gmm_stream stream) {
    gmm_offsets_args args;
    memset(&args, 0, sizeof args);
    args.groups = call->groups;
    args.offsets = offsets;
    args.tiles = tiles;
    args.tile_rows = tile_rows;
    if (call->groups.on_host) { /* their offsets are known, and right: checked with the arguments */
        const int64_t words = (int64_t)call->groups.count + 1;
        enum cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
        int64_t values[GMM_COPY_VALUES], first = 0, end = 0, i;
        uint32_t fault = 0;
        cudaError_t e = cudaStreamIsCapturing(stream, &capture);
        if (e == cudaSuccess && capture != cudaStreamCaptureStatusNone)
            return gmm__fail(&call->ctx->error, GMM_E_CAPTURE, "%s: groups.on_host: host sizes cannot be captured, "
                             "since every replay would use them; pass device sizes%s%s%s", call->function,
                             call->shapes[0] ? " (" : "", call->shapes, call->shapes[0] ? ")" : "");
        for (; first < words && e == cudaSuccess; first += GMM_COPY_VALUES) {
            const int64_t count = words - first < GMM_COPY_VALUES ? words - first : (int64_t)GMM_COPY_VALUES;
            for (i = 0; i < count; i++) {
                if (first + i > 0)
                    end = gmm_split_end(end, gmm__split_value(&call->groups, first + i - 1), call->groups.form,
                                        call->groups.capacity, call->groups.row_align, &fault);
                values[i] = end;
            }
            e = gmm_launch_copy(offsets + first, values, count, stream);
        }
        if (e != cudaSuccess || !tiles) return gmm__cuda_status(call, e);
        args.groups.splits = offsets; /* the kernel writes back what it reads */
        args.groups.form = GMM_SPLIT_OFFSETS;
        args.groups.dtype = GMM_I64;
        args.groups.row_align = 0;
    }
    return gmm__cuda_status(call, gmm_launch_offsets(&args, stream));
}

/* A call's operand as kernels address it. A host table is copied to `part` of the workspace. */
static cudaError_t gmm__mma_operand(const gmm__plan *plan, int role, int per_group, int part, gmm_kmat *out,
                                    gmm_stream stream) {
    const gmm_mat *m = &plan->call->mat[role];
    memset(out, 0, sizeof *out);
    out->dtype = m->dtype;
    out->data = m->data;
    out->table = m->table;
    out->ld = m->ld;
    out->stride = per_group ? m->group_stride * (gmm_dtype_bits(m->dtype) / 8) : 0;
    if (m->dtype == GMM_NONE || !m->table || !(m->flags & (uint32_t)GMM_MAT_TABLE_ON_HOST)) return cudaSuccess;
    out->table = (void *const *)gmm__part(plan, part);
    return gmm_launch_copy(gmm__part(plan, part), m->table, plan->call->groups.count, stream);
}

static float gmm__mma_beta(const gmm_grad *grad) {
    gmm_grad g = *grad;
    g.beta = NULL; /* device memory: the kernels read it */
    return gmm__grad_beta(&g, 0);
}

static int gmm__mma_plan_offsets(const gmm__call *call, gmm__plan *plan) {
    (void)call;
    (void)plan;
    return 1;
}
static gmm_status gmm__mma_launch_offsets(const gmm__plan *plan, gmm_stream stream) {
    return gmm__mma_offsets(plan->call, (int64_t *)plan->call->output, NULL, 1, stream);
}

/* Chooses the kernel of a product: the one whose tiles take the fewest rounds of multiprocessor time, from what is
   known on the host. Every kernel gives the same bits. */
static int gmm__mma_plan_product(const gmm__call *call, gmm__plan *plan, gmm_gemm_op op) {
    const int64_t G = call->groups.count, huge = INT32_MAX - 1024;
    const int64_t m = op == gmm_gemm_wgrad ? call->out : call->rows;
    const int64_t n = op == gmm_gemm_fwd ? call->out : call->in;
    const int64_t hint = call->groups.rows_hint > 0 && call->groups.rows_hint < call->rows ? call->groups.rows_hint
                                                                                            : call->rows;
    const gmm_dtype dtype = call->mat[op == gmm_gemm_dgrad ? GMM__DY : GMM__X_].dtype;
    const int32_t processors = gmm__cuda_attribute(call->ctx, cudaDevAttrMultiProcessorCount);
    const int32_t shared = gmm__cuda_attribute(call->ctx, cudaDevAttrMaxSharedMemoryPerBlockOptin);
    double best = 0.0;
    int32_t i;
    if (call->rows > huge || call->in > huge || call->out > huge)
        return gmm__decline(plan, "takes at most %lld rows and features", (long long)huge);
    plan->kernel = -1;
    for (i = 0; i < GMM_GEMM_KERNELS; i++) {
        const gmm_gemm_kernel *k = &gmm_gemm_kernels[i];
        const int64_t tiles_n = gmm__ceil_div(n, k->tile_cols), per_group = gmm__ceil_div(m, k->tile_rows);
        const int64_t bound = op == gmm_gemm_wgrad ? G * per_group : call->rows / k->tile_rows + G;
        const int64_t likely = op == gmm_gemm_wgrad ? bound : G * gmm__ceil_div(gmm__ceil_div(hint, G), k->tile_rows);
        double rounds;
        if (k->op != op || k->dtype != dtype || k->shared > shared) continue;
        if (bound > huge / tiles_n) continue;
        /* a tile costs its area plus its edges, which stand for moving the operands; more blocks share a processor */
        rounds = (double)gmm__ceil_div(likely * tiles_n, (int64_t)processors * k->blocks) * k->blocks *
                 ((double)k->tile_rows * k->tile_cols + 64.0 * (k->tile_rows + k->tile_cols));
        if (plan->kernel >= 0 && rounds >= best) continue;
        best = rounds;
        plan->kernel = i;
        plan->grid[0] = gmm__grid(processors, call->options.sm_limit, k->blocks, bound * tiles_n);
    }
    if (plan->kernel < 0) return gmm__decline(plan, "has no kernel for so many tiles of %s", gmm_dtype_name(dtype));
    gmm__mma_reserve_groups(call, plan);
    gmm__mma_reserve_table(call, plan, op == gmm_gemm_wgrad ? GMM__DW : GMM__W, GMM__MMA_TABLE);
    if (op == gmm_gemm_fwd) gmm__mma_reserve_table(call, plan, GMM__BIAS, GMM__MMA_TABLE2);
    (void)snprintf(plan->note, sizeof plan->note, "tile %d x %d, %d blocks",
                   (int)gmm_gemm_kernels[plan->kernel].tile_rows, (int)gmm_gemm_kernels[plan->kernel].tile_cols,
                   (int)plan->grid[0]);
    return 1;
}

/* The arguments of a product but for offsets and tiles; copies tables that stand on the host. */
static gmm_status gmm__mma_product_args(const gmm__plan *plan, gmm_gemm_op op, gmm_gemm_args *args, gmm_stream stream) {
    const gmm__call *call = plan->call;
    const gmm_linear *d = &call->d.linear;
    const int fwd = op == gmm_gemm_fwd, wgrad = op == gmm_gemm_wgrad;
    cudaError_t e = gmm__mma_operand(plan, fwd ? GMM__X_ : GMM__DY, 0, 0, &args->a, stream);
    if (e == cudaSuccess)
        e = gmm__mma_operand(plan, wgrad ? GMM__X_ : GMM__W, !wgrad, GMM__MMA_TABLE, &args->b, stream);
    if (e == cudaSuccess)
        e = gmm__mma_operand(plan, fwd ? GMM__Y : wgrad ? GMM__DW : GMM__DX, wgrad, GMM__MMA_TABLE, &args->d, stream);
    if (e == cudaSuccess && fwd) e = gmm__mma_operand(plan, GMM__BIAS, 1, GMM__MMA_TABLE2, &args->bias, stream);
    args->groups = call->groups.count;
    args->capacity = call->rows;
    args->m = (int32_t)(wgrad ? call->out : call->rows);
    args->n = (int32_t)(fwd ? call->out : call->in);
    args->k = (int32_t)(fwd ? call->in : call->out);
    args->alpha = d->alpha;
    args->alpha_per_group = d->alpha_per_group;
    args->zero_tail = call->groups.tail == GMM_TAIL_ZERO;
    if (fwd) args->row_scale = d->row_scale;
    args->beta_all = d->y_add ? 1.0f : 0.0f;
    if (wgrad) {
        args->beta = call->grad[GMM__DW].beta;
        args->frozen = call->grad[GMM__DW].frozen;
        args->beta_all = gmm__mma_beta(&call->grad[GMM__DW]);
    }
    return gmm__cuda_status(call, e);
}

static gmm_status gmm__mma_launch_product(const gmm__plan *plan, gmm_gemm_op op, gmm_stream stream) {
    const gmm__call *call = plan->call;
    gmm_gemm_args args;
    gmm_status s;

    memset(&args, 0, sizeof args);
    args.offsets = (const int64_t *)gmm__part(plan, GMM__MMA_OFFSETS);
    args.tiles = (const int32_t *)gmm__part(plan, GMM__MMA_TILES);
    s = gmm__mma_offsets(call, (int64_t *)gmm__part(plan, GMM__MMA_OFFSETS),
                         (int32_t *)gmm__part(plan, GMM__MMA_TILES), gmm_gemm_kernels[plan->kernel].tile_rows,
                         stream);
    if (s != GMM_OK || (s = gmm__mma_product_args(plan, op, &args, stream)) != GMM_OK) return s;
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
    const int64_t N = call->out, pieces = call->rows / GMM_BGRAD_ROWS + call->groups.count, huge = INT32_MAX - 1024;
    const int32_t processors = gmm__cuda_attribute(call->ctx, cudaDevAttrMultiProcessorCount);
    int64_t size;
    if (call->rows > huge || N > huge || pieces > huge || !gmm__mul(pieces, N * (int64_t)sizeof(float), &size))
        return gmm__decline(plan, "takes at most %lld rows and features", (long long)huge);
    plan->grid[0] = gmm__grid(processors, call->options.sm_limit, 8, INT32_MAX);
    gmm__mma_reserve_groups(call, plan);
    gmm__mma_reserve_table(call, plan, GMM__DB, GMM__MMA_TABLE);
    gmm__mma_reserve_table(call, plan, GMM__BIAS, GMM__MMA_TABLE2);
    if (call->mat[GMM__DB].dtype != GMM_NONE) gmm__reserve(plan, GMM__MMA_PIECES, (size_t)size);
    return 1;
}

static gmm_status gmm__mma_launch_linear_bgrad(const gmm__plan *plan, gmm_stream stream) {
    const gmm__call *call = plan->call;
    const gmm_linear *d = &call->d.linear;
    gmm_bgrad_args args;
    gmm_status s;
    cudaError_t e;

    memset(&args, 0, sizeof args);
    args.offsets = (const int64_t *)gmm__part(plan, GMM__MMA_OFFSETS);
    args.tiles = (const int32_t *)gmm__part(plan, GMM__MMA_TILES);
    s = gmm__mma_offsets(call, (int64_t *)gmm__part(plan, GMM__MMA_OFFSETS),
                         (int32_t *)gmm__part(plan, GMM__MMA_TILES), GMM_BGRAD_ROWS, stream);
    if (s != GMM_OK) return s;
    e = gmm__mma_operand(plan, GMM__DY, 0, 0, &args.dy, stream);
    if (e == cudaSuccess) e = gmm__mma_operand(plan, GMM__DB, 1, GMM__MMA_TABLE, &args.db, stream);
    if (e == cudaSuccess) e = gmm__mma_operand(plan, GMM__BIAS, 1, GMM__MMA_TABLE2, &args.bias, stream);
    if (e != cudaSuccess) return gmm__cuda_status(call, e);

    if (args.db.dtype != GMM_NONE) {
        args.pieces = (float *)gmm__part(plan, GMM__MMA_PIECES);
        args.beta = call->grad[GMM__DB].beta;
        args.frozen = call->grad[GMM__DB].frozen;
        args.beta_all = gmm__mma_beta(&call->grad[GMM__DB]);
    }
    args.groups = call->groups.count;
    args.n = (int32_t)call->out;
    args.capacity = call->rows;
    args.row_scale = d->row_scale;
    args.d_row_scale = d->d_row_scale;
    args.row_add = d->d_row_scale_add;
    args.zero_tail = call->groups.tail == GMM_TAIL_ZERO;
    return gmm__cuda_status(call, gmm_launch_bgrad(args.dy.dtype, plan->grid[0], &args, stream));
}

#endif /* __CUDACC__ */

/* .................................................... 12.11 MMA engine: activation, routing, rows, gated layout ... */

#ifdef __CUDACC__

/* Regions of the workspace, by family of operations. */
enum { GMM__SPLIT_PLAIN, GMM__SPLIT_PADDED };                 /* [G + 1] offsets, int64; padding: blocks, int32 */
enum { GMM__ROUTE_COUNTS, GMM__ROUTE_SUMS, GMM__ROUTE_SCRATCH }; /* [E] int32; partial losses; rows of experts */
enum { GMM__SORT_COUNTS, GMM__SORT_STARTS };                  /* [E][chunks] int32; [E] int64 */
enum { GMM__GLU_SRC, GMM__GLU_DST };                          /* [count] addresses: tables that stood on the host */
enum { GMM__SMALL_SUM };                                      /* [rows, cols] fp32: addends summed up */

/* Blocks that kernels may start. */
static int64_t gmm__mma_blocks(const gmm__call *call) {
    const int32_t processors = gmm__cuda_attribute(call->ctx, cudaDevAttrMultiProcessorCount);
    return gmm__grid(processors, call->options.sm_limit, GMM__ELEM_PER_SM, INT32_MAX);
}

/* The same for kernels that stream rows. */
static int64_t gmm__mma_stream(const gmm__call *call) {
    const int32_t processors = gmm__cuda_attribute(call->ctx, cudaDevAttrMultiProcessorCount);
    return gmm__grid(processors, call->options.sm_limit, GMM__ELEM_STREAM, INT32_MAX);
}

static gmm__view gmm__mma_view(const gmm__call *call, int role) {
    const gmm_mat *m = &call->mat[role];
    gmm__view v;
    v.data = m->dtype == GMM_NONE ? NULL : m->data;
    v.ld = m->ld;
    v.dtype = m->dtype;
    v.vec = (((uintptr_t)m->data | (uintptr_t)(m->ld * (gmm_dtype_bits(m->dtype) / 8))) & 15) == 0;
    return v;
}

static void gmm__mma_reserve_split(const gmm__call *call, gmm__plan *plan, int part) {
    gmm__reserve(plan, part, ((size_t)call->groups.count + 1) * sizeof(int64_t));
}
static gmm_status gmm__mma_read_split(const gmm__plan *plan, gmm_stream stream) {
    return gmm__mma_offsets(plan->call, (int64_t *)gmm__part(plan, GMM__SPLIT_PLAIN), NULL, 1, stream);
}

/* --- activation --- */

static int gmm__mma_plan_act_fwd(const gmm__call *call, gmm__plan *plan) {
    if (call->rows > INT32_MAX || call->in > INT32_MAX - 1024)
        return gmm__decline(plan, "takes at most %d rows and columns", (int)(INT32_MAX - 1024));
    gmm__mma_reserve_split(call, plan, GMM__SPLIT_PLAIN);
    return 1;
}
static int gmm__mma_plan_act_bwd(const gmm__call *call, gmm__plan *plan) { return gmm__mma_plan_act_fwd(call, plan); }

static gmm_status gmm__mma_launch_act(const gmm__plan *plan, gmm_stream stream) {
    const gmm__call *call = plan->call;
    const gmm_activation *d = &call->d.act;
    const int forward = call->op == GMM_OP_ACT_FWD;
    const gmm_status s = gmm__mma_read_split(plan, stream);
    gmm__act_args a;
    if (s != GMM_OK) return s;
    memset(&a, 0, sizeof a);
    a.live = (const int64_t *)gmm__part(plan, GMM__SPLIT_PLAIN) + call->groups.count;
    a.rows = call->rows;
    a.ffn = (int32_t)call->out;
    a.interleave = call->act.interleave == call->out ? 0 : call->act.interleave; /* one block is the halves */
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
    return gmm__cuda_status(call, forward ? gmm__k_act_fwd(&a, gmm__mma_stream(call), stream)
                                          : gmm__k_act_bwd(&a, gmm__mma_stream(call), stream));
}
static gmm_status gmm__mma_launch_act_fwd(const gmm__plan *plan, gmm_stream stream) {
    return gmm__mma_launch_act(plan, stream);
}
static gmm_status gmm__mma_launch_act_bwd(const gmm__plan *plan, gmm_stream stream) {
    return gmm__mma_launch_act(plan, stream);
}

/* --- routing --- */

static gmm__route_args gmm__mma_route(const gmm__plan *plan) {
    const gmm__call *call = plan->call;
    const gmm_route *r = &call->d.route;
    const double tokens = r->tokens > 0 ? (double)r->tokens : 1.0;
    gmm__route_args a;
    memset(&a, 0, sizeof a);
    a.logits = gmm__mma_view(call, GMM__X_);
    a.tokens = r->tokens;
    a.experts = r->experts;
    a.topk = r->topk;
    a.sigmoid = r->score == GMM_SCORE_SIGMOID;
    a.normalize = r->normalize;
    a.scale = r->scale;
    a.aux = (float)((double)r->aux_coeff * r->experts / (r->topk * tokens * tokens));
    a.z = (float)(r->z_coeff / tokens);
    a.indices = r->indices;
    a.scratch = (float *)gmm__part(plan, GMM__ROUTE_SCRATCH);
    return a;
}

/* Losses that are asked for and not zero by their coefficient. */
static int gmm__mma_route_losses(const gmm__call *call) {
    const gmm_route *r = &call->d.route;
    if (call->query) return r->aux_coeff != 0.0f || r->z_coeff != 0.0f;
    return (r->aux_loss && r->aux_coeff != 0.0f) || (r->z_loss && r->z_coeff != 0.0f);
}

static int gmm__mma_plan_topk_fwd(const gmm__call *call, gmm__plan *plan) {
    const gmm_route *r = &call->d.route;
    gmm__reserve(plan, GMM__ROUTE_COUNTS, (size_t)r->experts * sizeof(int32_t));
    gmm__reserve(plan, GMM__ROUTE_SUMS,
                 gmm__mma_route_losses(call) ? gmm__route_sums_bytes(r->tokens, r->experts) : 0);
    gmm__reserve(plan, GMM__ROUTE_SCRATCH, gmm__route_scratch_bytes(r->tokens, r->experts, gmm__mma_blocks(call)));
    return 1;
}
static gmm_status gmm__mma_launch_topk_fwd(const gmm__plan *plan, gmm_stream stream) {
    const gmm__call *call = plan->call;
    const gmm_route *r = &call->d.route;
    gmm__route_args a = gmm__mma_route(plan);
    a.expert_bias = r->expert_bias;
    a.probs = r->probs;
    a.counts = r->counts ? r->counts : (int32_t *)gmm__part(plan, GMM__ROUTE_COUNTS);
    a.offsets = r->offsets;
    a.aux_loss = r->aux_loss;
    a.z_loss = r->z_loss;
    if (gmm__mma_route_losses(call)) a.sums = (float *)gmm__part(plan, GMM__ROUTE_SUMS);
    return gmm__cuda_status(call, gmm__k_topk_fwd(&a, gmm__mma_blocks(call), stream));
}

static int gmm__mma_plan_topk_bwd(const gmm__call *call, gmm__plan *plan) {
    const gmm_route *r = &call->d.route;
    gmm__reserve(plan, GMM__ROUTE_SCRATCH, gmm__route_scratch_bytes(r->tokens, r->experts, gmm__mma_blocks(call)));
    return 1;
}
static gmm_status gmm__mma_launch_topk_bwd(const gmm__plan *plan, gmm_stream stream) {
    const gmm__call *call = plan->call;
    gmm__route_args a = gmm__mma_route(plan);
    a.dlogits = gmm__mma_view(call, GMM__DX);
    a.counts = call->d.route.counts;
    a.dprobs = call->d.route.dprobs;
    a.dloss = call->d.route.dloss;
    return gmm__cuda_status(call, gmm__k_topk_bwd(&a, gmm__mma_blocks(call), stream));
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
    return gmm__cuda_status(call, gmm__k_permute_map(&a, gmm__mma_blocks(call), stream));
}

static gmm__permute_args gmm__mma_permute(const gmm__call *call, int src, int dst) {
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

static int gmm__mma_plan_permute_fwd(const gmm__call *call, gmm__plan *plan) {
    if (call->d.permute.hidden > INT32_MAX - 1024)
        return gmm__decline(plan, "takes at most %d columns", (int)(INT32_MAX - 1024));
    return 1;
}
static gmm_status gmm__mma_launch_permute_fwd(const gmm__plan *plan, gmm_stream stream) {
    const gmm__call *call = plan->call;
    gmm__permute_args a = gmm__mma_permute(call, GMM__X_, GMM__ROWS);
    a.probs = call->d.permute.probs;
    a.row_probs = call->d.permute.row_probs;
    return gmm__cuda_status(call, gmm__k_permute_rows(&a, gmm__mma_stream(call), stream));
}

static int gmm__mma_plan_permute_bwd(const gmm__call *call, gmm__plan *plan) {
    return gmm__mma_plan_permute_fwd(call, plan);
}
static gmm_status gmm__mma_launch_permute_bwd(const gmm__plan *plan, gmm_stream stream) {
    const gmm__call *call = plan->call;
    gmm__permute_args a = gmm__mma_permute(call, GMM__DROWS, GMM__DX);
    cudaError_t e = cudaSuccess;
    if (call->d.permute.dx) e = gmm__k_unpermute_fwd(&a, gmm__mma_blocks(call), stream);
    a.row_probs_in = call->d.permute.drow_probs;
    a.dprobs = call->d.permute.dprobs;
    if (e == cudaSuccess && a.dprobs) e = gmm__k_gather_probs(&a, gmm__mma_blocks(call), stream);
    return gmm__cuda_status(call, e);
}

static int gmm__mma_plan_unpermute_fwd(const gmm__call *call, gmm__plan *plan) {
    return gmm__mma_plan_permute_fwd(call, plan);
}
static gmm_status gmm__mma_launch_unpermute_fwd(const gmm__plan *plan, gmm_stream stream) {
    const gmm__call *call = plan->call;
    gmm__permute_args a = gmm__mma_permute(call, GMM__ROWS, GMM__OUT);
    a.probs = call->d.permute.probs;
    return gmm__cuda_status(call, gmm__k_unpermute_fwd(&a, gmm__mma_blocks(call), stream));
}

static int gmm__mma_plan_unpermute_bwd(const gmm__call *call, gmm__plan *plan) {
    return gmm__mma_plan_permute_fwd(call, plan);
}
static gmm_status gmm__mma_launch_unpermute_bwd(const gmm__plan *plan, gmm_stream stream) {
    const gmm__call *call = plan->call;
    const gmm_permute *p = &call->d.permute;
    cudaError_t e = cudaSuccess;
    if (p->drows) {
        gmm__permute_args a = gmm__mma_permute(call, GMM__DOUT, GMM__DROWS);
        a.probs = p->probs;
        if (!a.probs && a.src.dtype == a.dst.dtype) e = gmm__k_permute_rows(&a, gmm__mma_stream(call), stream);
        else e = gmm__k_unpermute_bwd(&a, gmm__mma_blocks(call), stream);
    }
    if (e == cudaSuccess && p->dprobs) {
        gmm__permute_args a = gmm__mma_permute(call, GMM__DOUT, GMM__ROWS);
        a.dprobs = p->dprobs;
        e = gmm__k_unpermute_dots(&a, gmm__mma_blocks(call), stream);
    }
    return gmm__cuda_status(call, e);
}

/* --- pad, unpad --- */

static int gmm__mma_plan_pad(const gmm__call *call, gmm__plan *plan) {
    if (call->rows > INT32_MAX || call->d.pad.padded_capacity > INT32_MAX)
        return gmm__decline(plan, "takes at most %d rows", (int)INT32_MAX);
    gmm__mma_reserve_split(call, plan, GMM__SPLIT_PLAIN);
    gmm__reserve(plan, GMM__SPLIT_PADDED, ((size_t)call->groups.count + 1) * sizeof(int32_t));
    return 1;
}
static int gmm__mma_plan_unpad(const gmm__call *call, gmm__plan *plan) { return gmm__mma_plan_pad(call, plan); }

static gmm_status gmm__mma_launch_padding(const gmm__plan *plan, gmm_stream stream) {
    const gmm__call *call = plan->call;
    const gmm_padding *d = &call->d.pad;
    int64_t *offsets = (int64_t *)gmm__part(plan, GMM__SPLIT_PLAIN);
    int32_t *blocks = (int32_t *)gmm__part(plan, GMM__SPLIT_PADDED);
    const gmm_status s = gmm__mma_offsets(call, offsets, blocks, d->align, stream);
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
    return gmm__cuda_status(call, gmm__k_pad(&a, gmm__mma_stream(call), stream));
}
static gmm_status gmm__mma_launch_pad(const gmm__plan *plan, gmm_stream stream) {
    return gmm__mma_launch_padding(plan, stream);
}
static gmm_status gmm__mma_launch_unpad(const gmm__plan *plan, gmm_stream stream) {
    return gmm__mma_launch_padding(plan, stream);
}

/* --- GLU interleave --- */

static int gmm__mma_plan_glu_interleave(const gmm__call *call, gmm__plan *plan) {
    const int role[2] = { GMM__X_, GMM__Y }, part[2] = { GMM__GLU_SRC, GMM__GLU_DST };
    const gmm_glu *d = &call->d.glu;
    const int64_t most = INT32_MAX / 16; /* 2 ffn rows or columns of 8 bytes in 32 bits */
    int i;
    if (d->ffn > most || d->count > (d->axis == GMM_GLU_ROWS ? INT32_MAX / (2 * d->ffn) : INT32_MAX))
        return gmm__decline(plan, "takes at most %lld pairs, and %d rows in all", (long long)most, (int)INT32_MAX);
    for (i = 0; i < 2; i++)
        if (call->mat[role[i]].flags & (uint32_t)GMM_MAT_TABLE_ON_HOST)
            gmm__reserve(plan, part[i], (size_t)call->d.glu.count * sizeof(void *));
    return 1;
}

/* A table in device memory; one on the host is copied to the workspace. */
static cudaError_t gmm__mma_device_table(const gmm__plan *plan, int role, int part, void *const **table,
                                         gmm_stream stream) {
    const gmm_mat *m = &plan->call->mat[role];
    *table = m->table;
    if (!m->table || !(m->flags & (uint32_t)GMM_MAT_TABLE_ON_HOST)) return cudaSuccess;
    *table = (void *const *)gmm__part(plan, part);
    return gmm_launch_copy(gmm__part(plan, part), m->table, plan->call->d.glu.count, stream);
}

static gmm_status gmm__mma_launch_glu_interleave(const gmm__plan *plan, gmm_stream stream) {
    const gmm__call *call = plan->call;
    const gmm_glu *d = &call->d.glu;
    const int64_t most = gmm__mma_stream(call);
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
    if (d->axis == GMM_GLU_COLUMNS) return gmm__cuda_status(call, gmm__k_glu_columns(&a, most, stream));
    e = gmm__mma_device_table(plan, GMM__X_, GMM__GLU_SRC, &a.src_table, stream);
    if (e == cudaSuccess) e = gmm__mma_device_table(plan, GMM__Y, GMM__GLU_DST, &a.dst_table, stream);
    if (e == cudaSuccess) e = gmm__k_glu_rows(&a, most, stream);
    return gmm__cuda_status(call, e);
}

/* --- accumulate, convert --- */

static int gmm__mma_plan_convert(const gmm__call *call, gmm__plan *plan) {
    return call->rows <= INT32_MAX ? 1 : gmm__decline(plan, "takes at most %d rows", (int)INT32_MAX);
}
/* More addends than one launch takes: the fp32 sum goes from launch to launch through the workspace. */
static int gmm__mma_plan_accumulate(const gmm__call *call, gmm__plan *plan) {
    if (call->d.sum.count > GMM__ELEM_ADDENDS)
        gmm__reserve(plan, GMM__SMALL_SUM, (size_t)call->rows * (size_t)call->in * sizeof(float));
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
        for (j = 0; j < a.count; j++) { /* a table stands on the host */
            a.addends[j] = (const char *)gmm__at(&call->mat[GMM__X_], first + j, 0, 0);
            a.x.vec &= ((uintptr_t)a.addends[j] & 15) == 0;
        }
        if (d->count > GMM__ELEM_ADDENDS) sum.data = gmm__part(plan, GMM__SMALL_SUM);
        if (first > 0) a.start = sum;
        a.y = last ? gmm__mma_view(call, GMM__Y) : sum;
        a.scale = last ? d->scale : 1.0f;
        a.beta = last ? d->beta : 0.0f;
        e = gmm__k_accumulate(&a, gmm__mma_stream(call), stream);
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
    return gmm__cuda_status(call, gmm__k_convert(&a, gmm__mma_stream(call), stream));
}

#endif /* __CUDACC__ */

/* ........................................................................ 12.12 CUBLASLT engine: grouped linear ... */

#ifdef GMM__CUBLASLT

/* One cublasLtMatmul per group, for calls whose sizes the host knows: what the other engines are compared with.
   Row-major matrices are described as their column-major transposes. Algorithms are chosen by what belongs to one
   group, never by the rows before it, and reduce in fp32 in a fixed order: results are deterministic and do not depend
   on the other groups. */

enum { GMM__LT_BETA, GMM__LT_SCRATCH }; /* regions of the workspace */
enum { GMM__LT_SCRATCH_BYTES = 32 << 20 };

/* One group's product as cuBLASLt describes it. Descriptors live on the stack: nothing is allocated. */
typedef struct gmm__lt_problem {
    cublasLtMatmulDescOpaque_t desc;
    cublasLtMatrixLayoutOpaque_t a_layout, b_layout, d_layout;
    const void *a, *b, *bias;
    void *d;
    uint32_t align_a, align_b, align_d, align_bias; /* bytes */
} gmm__lt_problem;

static cudaDataType_t gmm__lt_type(gmm_dtype dtype) {
    return dtype == GMM_BF16 ? CUDA_R_16BF : dtype == GMM_F16 ? CUDA_R_16F : CUDA_R_32F;
}

/* What an address and the step between rows are surely multiples of, at most 16 bytes: no more is of use, and so rows
   before a group change nothing. */
static uint32_t gmm__lt_align(const void *at, int64_t row_bytes) {
    const uint64_t bits = (uint64_t)(uintptr_t)at | (uint64_t)row_bytes | 16u;
    return (uint32_t)(bits & (~bits + 1u));
}

static gmm_status gmm__lt_status(const gmm__call *call, cublasStatus_t status) {
    if (status == CUBLAS_STATUS_SUCCESS) return GMM_OK;
    return gmm__fail(&call->ctx->error, GMM_E_CUDA, "%s: cuBLASLt: %s (%s)", call->function,
                     cublasLtGetStatusString(status), call->shapes);
}

/* The handle of a context, on its device; without one the engine declines. */
static void gmm__lt_open(gmm_context *ctx) {
    int current = 0;
    cudaError_t e = cudaGetDevice(&current);
    if (e == cudaSuccess) e = cudaSetDevice(ctx->config.device);
    if (e != cudaSuccess || cublasLtCreate(&ctx->lt.handle) != CUBLAS_STATUS_SUCCESS) ctx->lt.handle = NULL;
    (void)cudaSetDevice(current);
    (void)cudaGetLastError();
}
static void gmm__lt_close(gmm_context *ctx) {
    if (ctx->lt.handle) (void)cublasLtDestroy(ctx->lt.handle);
}

/* Roles of the factors a, b and the result d of an operation. */
static int gmm__lt_a(gmm_op op) { return op == GMM_OP_LINEAR_WGRAD ? GMM__X_ : GMM__W; }
static int gmm__lt_b(gmm_op op) { return op == GMM_OP_LINEAR_FWD ? GMM__X_ : GMM__DY; }
static int gmm__lt_d(gmm_op op) {
    return op == GMM_OP_LINEAR_FWD ? GMM__Y : op == GMM_OP_LINEAR_DGRAD ? GMM__DX : GMM__DW;
}

static cublasStatus_t gmm__lt_layout(cublasLtMatrixLayoutOpaque_t *layout, const gmm_mat *m, int64_t rows,
                                     int64_t cols) {
    return cublasLtMatrixLayoutInit(layout, gmm__lt_type(m->dtype), (uint64_t)cols, (uint64_t)rows, m->ld);
}

/* Describes group g, whose rows [row, row + rows) are not none. The bias pointer is set when it is known to stay. */
static cublasStatus_t gmm__lt_describe(const gmm__call *call, int64_t g, int64_t row, int64_t rows,
                                       gmm__lt_problem *p) {
    const gmm_op op = call->op;
    const int wgrad = op == GMM_OP_LINEAR_WGRAD;
    const gmm_mat *a = &call->mat[gmm__lt_a(op)], *b = &call->mat[gmm__lt_b(op)], *d = &call->mat[gmm__lt_d(op)];
    const gmm_mat *bias = &call->mat[GMM__BIAS];
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
    p->align_a = gmm__lt_align(p->a, a->ld * (gmm_dtype_bits(a->dtype) / 8));
    p->align_b = gmm__lt_align(p->b, b->ld * (gmm_dtype_bits(b->dtype) / 8));
    p->align_d = gmm__lt_align(p->d, d->ld * (gmm_dtype_bits(d->dtype) / 8));
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
    p->align_bias = gmm__lt_align(p->bias, 0);
    return cublasLtMatmulDescSetAttribute(&p->desc, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue, sizeof epilogue);
}

static cublasStatus_t gmm__lt_set_bias(gmm__lt_problem *p, const void *bias) {
    if (!p->bias) return CUBLAS_STATUS_SUCCESS;
    return cublasLtMatmulDescSetAttribute(&p->desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias, sizeof bias);
}

/* Asks cuBLASLt for the algorithm of a product. Partial sums may be reduced in fp32 only, so that the store rounds
   once; the bias pointer, which is not followed, stands for its alignment. */
static cublasStatus_t gmm__lt_ask(gmm_context *ctx, gmm__lt_problem *p, cublasLtMatmulAlgo_t *algo) {
    cublasLtMatmulPreferenceOpaque_t pref;
    cublasLtMatmulHeuristicResult_t result;
    const uint64_t scratch = GMM__LT_SCRATCH_BYTES;
    const uint32_t reduction = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    const cublasLtMatmulPreferenceAttributes_t which[4] = {
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
    if (!s) s = cublasLtMatmulPreferenceSetAttribute(&pref, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &scratch,
                                                     sizeof scratch);
    if (!s) s = cublasLtMatmulPreferenceSetAttribute(&pref, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &reduction,
                                                     sizeof reduction);
    for (i = 0; i < 4 && !s; i++) s = cublasLtMatmulPreferenceSetAttribute(&pref, which[i], &align[i], sizeof align[i]);
    memset(&result, 0, sizeof result);
    if (!s) s = cublasLtMatmulAlgoGetHeuristic(ctx->lt.handle, &p->desc, &p->a_layout, &p->b_layout, &p->d_layout,
                                               &p->d_layout, &pref, 1, &result, &found);
    if (!s) s = found > 0 ? result.state : CUBLAS_STATUS_NOT_SUPPORTED;
    *algo = result.algo;
    return s;
}

/* The algorithm for `rows` rows of a described group: from the cache, whose entries newer shapes overwrite. */
static cublasStatus_t gmm__lt_choose(const gmm__call *call, int64_t rows, gmm__lt_problem *p,
                                     const cublasLtMatmulAlgo_t **algo) {
    const gmm_mat *d = &call->mat[gmm__lt_d(call->op)], *a = &call->mat[gmm__lt_a(call->op)];
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
    key[8] = call->mat[gmm__lt_b(call->op)].ld;
    key[9] = d->ld;
    for (i = 0; i < GMM__LT_KEY; i++) {
        hash = (hash ^ (uint64_t)key[i]) * 0x9E3779B97F4A7C15u;
        hash ^= hash >> 32;
    }
    choice = &call->ctx->lt.cache[hash % GMM__LT_CACHE];
    *algo = &choice->algo;
    if (!memcmp(choice->key, key, sizeof key)) return CUBLAS_STATUS_SUCCESS;
    choice->key[0] = 0;
    s = gmm__lt_ask(call->ctx, p, &choice->algo);
    if (s == CUBLAS_STATUS_SUCCESS) memcpy(choice->key, key, sizeof key);
    return s;
}

static int gmm__lt_plan_product(const gmm__call *call, gmm__plan *plan) {
    const gmm_op op = call->op;
    const gmm_mat *a = &call->mat[gmm__lt_a(op)], *d = &call->mat[gmm__lt_d(op)], *bias = &call->mat[GMM__BIAS];
    const gmm_mat *table = op == GMM_OP_LINEAR_WGRAD ? d : a;
    if (!call->ctx->lt.handle) return gmm__decline(plan, "could not be opened on this device");
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
    if (bias->dtype != GMM_NONE && call->d.linear.row_scale) return gmm__decline(plan, "scales no bias by row");
    if (op == GMM_OP_LINEAR_WGRAD && call->grad[GMM__DW].beta) return gmm__decline(plan, "takes no beta per group");
    if (op == GMM_OP_LINEAR_WGRAD && call->grad[GMM__DW].frozen) return gmm__decline(plan, "takes no frozen groups");
    if (call->options.sm_limit)
        return gmm__decline(plan, "cannot keep sm_limit %d without other results", (int)call->options.sm_limit);
    if (call->d.linear.alpha) gmm__reserve(plan, GMM__LT_BETA, sizeof(uint64_t));
    gmm__reserve(plan, GMM__LT_SCRATCH, (size_t)GMM__LT_SCRATCH_BYTES);
    (void)snprintf(plan->note, sizeof plan->note, "one product per group%s",
                   a->dtype != GMM_F32 ? "" : call->options.allow_tf32 ? ", as TF32" : ", in fp32");
    return 1;
}

/* Zeroes a row-major part of a matrix. */
static cudaError_t gmm__lt_zero(const gmm_mat *m, void *at, int64_t rows, int64_t cols, gmm_stream stream) {
    const size_t size = (size_t)gmm_dtype_bits(m->dtype) / 8;
    if (rows <= 0) return cudaSuccess;
    return cudaMemset2DAsync(at, (size_t)m->ld * size, 0, (size_t)cols * size, (size_t)rows, stream);
}

static gmm_status gmm__lt_launch_product(const gmm__plan *plan, gmm_stream stream) {
    const gmm__call *call = plan->call;
    const gmm_linear *l = &call->d.linear;
    const int wgrad = call->op == GMM_OP_LINEAR_WGRAD;
    const gmm_mat *d = &call->mat[gmm__lt_d(call->op)];
    const int64_t cols = call->op == GMM_OP_LINEAR_FWD ? call->out : call->in;
    const float one = 1.0f, beta = wgrad ? gmm__mma_beta(&call->grad[GMM__DW]) : l->y_add ? 1.0f : 0.0f;
    const float *beta_at = l->alpha ? (const float *)gmm__part(plan, GMM__LT_BETA) : &beta;
    const cublasLtMatmulAlgo_t *algo = NULL;
    gmm__lt_problem p;
    cudaError_t e = cudaSuccess;
    cublasStatus_t s;
    int64_t begin, end = 0, g;
    uint32_t fault = 0;
    int pass;

    if (gmm__capturing(call->ctx, stream))
        return gmm__fail(&call->ctx->error, GMM_E_CAPTURE, "%s: groups.on_host: host sizes cannot be captured, since "
                         "every replay would use them, and cublaslt serves no others (%s)", call->function,
                         call->shapes);
    /* the first pass finds what cannot be served before anything is launched */
    for (pass = 0; pass < 2; pass++) {
        if (pass == 1 && l->alpha) { /* alpha stands in device memory, and beta must stand there too */
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
                    e = gmm__lt_zero(d, gmm__at(d, g, 0, 0), call->out, cols, stream);
                continue;
            }
            s = gmm__lt_describe(call, g, begin, end - begin, &p);
            if (s == CUBLAS_STATUS_SUCCESS) s = gmm__lt_choose(call, end - begin, &p, &algo);
            if (s == CUBLAS_STATUS_NOT_SUPPORTED)
                return gmm__fail(&call->ctx->error, GMM_E_UNSUPPORTED, "%s: options.engine: cublaslt has no algorithm "
                                 "for the %lld rows of group %lld (%s)", call->function, (long long)(end - begin),
                                 (long long)g, call->shapes);
            if (s == CUBLAS_STATUS_SUCCESS && pass == 1) s = gmm__lt_set_bias(&p, p.bias);
            if (s == CUBLAS_STATUS_SUCCESS && pass == 1)
                s = cublasLtMatmul(call->ctx->lt.handle, &p.desc,
                                   l->alpha ? l->alpha + (l->alpha_per_group ? g : 0) : &one, p.a, &p.a_layout, p.b,
                                   &p.b_layout, beta_at, p.d, &p.d_layout, p.d, &p.d_layout, algo,
                                   gmm__part(plan, GMM__LT_SCRATCH), (size_t)GMM__LT_SCRATCH_BYTES, stream);
            if (s != CUBLAS_STATUS_SUCCESS) return gmm__lt_status(call, s);
        }
    }
    if (e == cudaSuccess && !wgrad && call->groups.tail == GMM_TAIL_ZERO && end < call->rows)
        e = gmm__lt_zero(d, gmm__at(d, 0, end, 0), call->rows - end, cols, stream);
    return gmm__cuda_status(call, e);
}

#endif /* GMM__CUBLASLT */

/* ........................................................................... 12.13 WGMMA engine: grouped linear ... */

#ifdef __CUDACC__

/* The products of 16-bit matrices by TMA and wgmma. The kernels read the split themselves and use no workspace but for
   what stands on the host; it is laid out as the MMA engine's, which serves a call of unsuited addresses in the same
   bytes. So a query may leave addresses open. */

/* What the engine needs, looked for once per context. */
static void gmm__wgmma_open(gmm_context *ctx) {
    enum cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
    void *encode = NULL;
    int current = 0, built = 0;
    cudaError_t e = cudaGetDevice(&current);
    if (e == cudaSuccess) e = cudaSetDevice(ctx->config.device);
    if (e == cudaSuccess) {
        built = gmm_sm90_present();
        e = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &encode, 12000, cudaEnableDefault, &found);
        (void)cudaSetDevice(current);
    }
    (void)cudaGetLastError();
    ctx->wgmma_encode = (PFN_cuTensorMapEncodeTiled_v12000)encode;
    if (ctx->capability != 90) ctx->wgmma_lacks = "needs compute capability 9.0";
    else if (!built) ctx->wgmma_lacks = "is not in this build: compile for sm_90a";
    else if (e != cudaSuccess || found != cudaDriverEntryPointSuccess || !encode)
        ctx->wgmma_lacks = "needs a driver with cuTensorMapEncodeTiled";
}

/* Whether rows of an operand begin where TMA takes them. Of tables on the device the kernel tells by a fault bit. */
static int gmm__wgmma_takes(const gmm__call *call, int role, const char *name, gmm__plan *plan) {
    const gmm_mat *m = &call->mat[role];
    int64_t g;
    if (m->ld % 8)
        return gmm__decline(plan, "needs rows of %s at multiples of 16 bytes, not ld %lld", name, (long long)m->ld);
    if (call->groups.count > 1 && m->group_stride % 8)
        return gmm__decline(plan, "needs matrices of %s at multiples of 16 bytes, not group_stride %lld", name,
                            (long long)m->group_stride);
    if ((uintptr_t)m->data % 16)
        return gmm__decline(plan, "needs %s at a multiple of 16 bytes, not %p", name, m->data);
    for (g = 0; m->table && (m->flags & (uint32_t)GMM_MAT_TABLE_ON_HOST) && !call->query && g < call->groups.count; g++)
        if ((uintptr_t)m->table[g] % 16)
            return gmm__decline(plan, "needs %s at multiples of 16 bytes, not table[%lld] %p", name, (long long)g,
                                m->table[g]);
    return 1;
}

/* The kernel that is likely to be fastest for groups of equal size, or -1. All kernels give the same bits. A stage
   costs the clocks of its products or of its shared memory, whichever are more; a tile also costs its way out. */
static int32_t gmm__wgmma_choose(const gmm__call *call, gmm_gemm_op op, gmm_dtype dtype, int32_t processors) {
    const int64_t G = call->groups.count, n = op == gmm_gemm_fwd ? call->out : call->in;
    const int64_t hint = call->groups.rows_hint > 0 && call->groups.rows_hint < call->rows ? call->groups.rows_hint
                                                                                            : call->rows;
    const int64_t rows = gmm__ceil_div(hint, G), m = op == gmm_gemm_wgrad ? call->out : rows;
    const int64_t depths = gmm__ceil_div(op == gmm_gemm_wgrad ? rows : op == gmm_gemm_fwd ? call->in : call->out, 64);
    const int f32 = call->mat[op == gmm_gemm_fwd ? GMM__Y : op == gmm_gemm_dgrad ? GMM__DX : GMM__DW].dtype == GMM_F32;
    double best = 0.0;
    int32_t choice = -1, i, u;
    for (i = 0; i < GMM_SM90_KERNELS; i++) {
        const gmm_sm90_kernel *k = &gmm_sm90_kernels[i];
        if (k->op != op || k->dtype != dtype) continue;
        for (u = k->units; u > k->units / 2; u--) { /* the heights that the device chooses among */
            const int64_t tiles = gmm__ceil_div(m > 0 ? m : 1, 16 * u);
            const double height = (double)gmm__ceil_div(m > 0 ? m : 1, 16) / (double)tiles, wide = k->cols / 128.0;
            const double multiply = 64.0 * wide * height, move = 256.0 * wide + (16.0 + 32.0 * wide) * height;
            const double out = 400.0 + wide * height * (f32 ? 40.0 * height : 160.0); /* fp32 waits for memory */
            const double cost = (double)gmm__ceil_div(G * tiles * gmm__ceil_div(n, k->cols), processors) *
                                ((double)depths * (multiply > move ? multiply : move) + out);
            if (choice >= 0 && cost >= 0.99 * best) continue;
            best = cost;
            choice = i;
            if (op == gmm_gemm_wgrad) break; /* the tallest tile */
        }
    }
    return choice;
}

static gmm_gemm_op gmm__wgmma_op(gmm_op op) {
    return op == GMM_OP_LINEAR_FWD ? gmm_gemm_fwd : op == GMM_OP_LINEAR_DGRAD ? gmm_gemm_dgrad : gmm_gemm_wgrad;
}

static int gmm__wgmma_plan_product(const gmm__call *call, gmm__plan *plan) {
    const gmm_gemm_op op = gmm__wgmma_op(call->op);
    const int fwd = op == gmm_gemm_fwd, wgrad = op == gmm_gemm_wgrad;
    const int a = fwd ? GMM__X_ : GMM__DY, b = wgrad ? GMM__X_ : GMM__W, d = fwd ? GMM__Y : wgrad ? GMM__DW : GMM__DX;
    const int64_t G = call->groups.count, m = wgrad ? call->out : call->rows, n = fwd ? call->out : call->in;
    const int64_t huge = INT32_MAX - 1024;
    const gmm_dtype dtype = call->mat[a].dtype;
    const int32_t processors = gmm__cuda_attribute(call->ctx, cudaDevAttrMultiProcessorCount);
    const gmm_sm90_kernel *k;
    int64_t tiles;
    if (call->ctx->wgmma_lacks) return gmm__decline(plan, "%s", call->ctx->wgmma_lacks);
    if (dtype != GMM_BF16 && dtype != GMM_F16) return gmm__decline(plan, "multiplies no %s", gmm_dtype_name(dtype));
    if (call->mat[d].dtype != GMM_F32 && call->mat[d].dtype != dtype)
        return gmm__decline(plan, "makes no %s from %s", gmm_dtype_name(call->mat[d].dtype), gmm_dtype_name(dtype));
    if (call->rows > GMM_SM90_RAGGED || call->in > huge || call->out > huge)
        return gmm__decline(plan, "takes at most %d rows and %lld features", (int)GMM_SM90_RAGGED, (long long)huge);
    if (call->mat[a].ld > huge || call->mat[b].ld > huge || call->mat[d].ld > huge)
        return gmm__decline(plan, "takes ld up to %lld", (long long)huge);
    plan->kernel = gmm__wgmma_choose(call, op, dtype, processors);
    if (plan->kernel < 0) return gmm__decline(plan, "has no kernel for these types");
    k = &gmm_sm90_kernels[plan->kernel];
    /* where the device chooses, tiles have more than half the height */
    tiles = wgrad ? G * gmm__ceil_div(m, 16 * k->units) : m / (8 * k->units) + G;
    if (tiles > huge / gmm__ceil_div(n, k->cols)) return gmm__decline(plan, "takes no so many tiles");
    if (!gmm__wgmma_takes(call, a, fwd ? "x" : "dy", plan) || !gmm__wgmma_takes(call, b, wgrad ? "x" : "w", plan))
        return 0;
    plan->grid[0] = gmm__grid(processors, call->options.sm_limit, 1, INT32_MAX);
    if (plan->grid[0] > 1) plan->grid[0] -= plan->grid[0] % 2; /* pairs of blocks share operands */
    if (G > k->groups) gmm__reserve(plan, GMM__MMA_PIECES, (size_t)plan->grid[0] * gmm_sm90_table_bytes(G));
    gmm__mma_reserve_groups(call, plan);
    gmm__mma_reserve_table(call, plan, wgrad ? GMM__DW : GMM__W, GMM__MMA_TABLE);
    if (fwd) gmm__mma_reserve_table(call, plan, GMM__BIAS, GMM__MMA_TABLE2);
    (void)snprintf(plan->note, sizeof plan->note, "tile %d x %d, %d blocks", (int)k->units * 16, (int)k->cols,
                   (int)plan->grid[0]);
    return 1;
}

static gmm_status gmm__wgmma_launch_product(const gmm__plan *plan, gmm_stream stream) {
    const gmm__call *call = plan->call;
    const int wgrad = call->op == GMM_OP_LINEAR_WGRAD;
    gmm_sm90_args args;
    gmm_status s;
    cudaError_t e = cudaSuccess;

    memset(&args, 0, sizeof args);
    args.groups = call->groups;
    if (call->groups.on_host) {
        int64_t *offsets = (int64_t *)gmm__part(plan, GMM__MMA_OFFSETS);
        if ((s = gmm__mma_offsets(call, offsets, NULL, 1, stream)) != GMM_OK) return s;
        args.groups.splits = offsets;
        args.groups.form = GMM_SPLIT_OFFSETS;
        args.groups.dtype = GMM_I64;
        args.groups.on_host = args.groups.row_align = 0;
    }
    if ((s = gmm__mma_product_args(plan, gmm__wgmma_op(call->op), &args.p, stream)) != GMM_OK) return s;
    if (call->rows == 0) { /* token matrices may have no address then, and maps need one */
        args.p.a.data = plan->workspace;
        if (wgrad) args.p.b.data = plan->workspace;
        else args.p.d.data = plan->workspace;
    }
    args.units_max = wgrad ? gmm_sm90_kernels[plan->kernel].units : 0;
    if (call->groups.count > gmm_sm90_kernels[plan->kernel].groups)
        args.tables = (int32_t *)gmm__part(plan, GMM__MMA_PIECES);
    if (args.p.zero_tail && !wgrad) {
        gmm_tail_args tail;
        tail.d = args.p.d;
        tail.groups = args.groups;
        tail.n = args.p.n;
        e = gmm_launch_tail(plan->grid[0], &tail, stream);
    }
    if (e == cudaSuccess) e = gmm_launch_sm90(call->ctx->wgmma_encode, plan->kernel, plan->grid[0], &args, stream);
    return gmm__cuda_status(call, e);
}

#endif /* __CUDACC__ */

/* ................................................................................................ 12.14 Runtime ... */

/* What a function of the table starts with: its context, and the checks that both rows share. */
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
                     (unsigned)flags);
}

/* One side of a copy or fill of `height` rows; nothing of it is looked at where no byte is touched. */
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

static gmm_status gmm__rt_open_copy(void *self, const char *function, void *dst, size_t dst_pitch, const void *src,
                                    size_t src_pitch, size_t width, size_t height, gmm_stream stream) {
    const gmm_status s = gmm__rt_open_rows(self, function, stream, "dst", dst, dst_pitch, width, height);
    return s != GMM_OK ? s : gmm__rt_open_rows(self, function, stream, "src", src, src_pitch, width, height);
}

static gmm_status gmm__rt_open_fill(void *self, const char *function, void *dst, size_t pitch, int32_t value,
                                    size_t width, size_t height, gmm_stream stream) {
    const gmm_status s = gmm__rt_open_rows(self, function, stream, "dst", dst, pitch, width, height);
    if (s != GMM_OK || (value >= 0 && value <= 255)) return s;
    return gmm__fail(&((gmm_context *)self)->error, GMM_E_ARG, "gmm_runtime.%s: value %d must be 0 to 255", function,
                     (int)value);
}

static gmm_status gmm__rt_run(void *self, const gmm_work *work, gmm_stream stream) {
    const gmm_status s = gmm__rt_open(self, "run", stream, work, "work");
    if (s != GMM_OK) return s;
    if (!work->function)
        return gmm__fail(&((gmm_context *)self)->error, GMM_E_NULL, "gmm_runtime.run: work->function is NULL");
    return work->function(work->argument, stream);
}

/* --- CPU: one stream, whose work is done when it is given. What an event records is reached at once, so all that it
   holds is whose it is. --- */

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
    const gmm_status s = gmm__rt_open_copy(self, "copy2d", dst, dst_pitch, src, src_pitch, width, height, stream);
    size_t i;
    if (s != GMM_OK || !width) return s;
    for (i = 0; i < height; i++) memcpy((char *)dst + i * dst_pitch, (const char *)src + i * src_pitch, width);
    return GMM_OK;
}
static gmm_status gmm__cpu_rt_copy(void *self, void *dst, const void *src, size_t bytes, gmm_stream stream) {
    const gmm_status s = gmm__rt_open_copy(self, "copy", dst, bytes, src, bytes, bytes, 1, stream);
    if (s == GMM_OK && bytes) memcpy(dst, src, bytes);
    return s;
}
static gmm_status gmm__cpu_rt_fill2d(void *self, void *dst, size_t pitch, int32_t value, size_t width, size_t height,
                                     gmm_stream stream) {
    const gmm_status s = gmm__rt_open_fill(self, "fill2d", dst, pitch, value, width, height, stream);
    size_t i;
    if (s != GMM_OK || !width) return s;
    for (i = 0; i < height; i++) memset((char *)dst + i * pitch, (int)value, width);
    return GMM_OK;
}
static gmm_status gmm__cpu_rt_fill(void *self, void *dst, int32_t value, size_t bytes, gmm_stream stream) {
    const gmm_status s = gmm__rt_open_fill(self, "fill", dst, bytes, value, bytes, 1, stream);
    if (s == GMM_OK && bytes) memset(dst, (int)value, bytes);
    return s;
}
static gmm_status gmm__cpu_rt_is_capturing(void *self, gmm_stream stream, int32_t *capturing) {
    const gmm_status s = gmm__rt_open(self, "is_capturing", stream, capturing, "capturing");
    if (s == GMM_OK) *capturing = 0;
    return s;
}

/* --- CUDA: calls on the context's device, after which the device that was current before is current again. --- */

#ifdef __CUDACC__

static cudaError_t gmm__cuda_enter(const void *self, int *current) {
    const gmm_context *ctx = (const gmm_context *)self;
    cudaError_t e;
    *current = ctx->config.device;
    e = cudaGetDevice(current);
    return e == cudaSuccess && *current != ctx->config.device ? cudaSetDevice(ctx->config.device) : e;
}
static gmm_status gmm__cuda_leave(void *self, const char *function, int current, cudaError_t e) {
    gmm_context *ctx = (gmm_context *)self;
    if (current != ctx->config.device) (void)cudaSetDevice(current);
    if (e == cudaSuccess) return GMM_OK;
    (void)cudaGetLastError();
    return gmm__fail(&ctx->error, GMM_E_CUDA, "gmm_runtime.%s: %s", function, cudaGetErrorString(e));
}

/* Carries out one call on the context's device: the end of a function whose checks have passed. */
#define GMM__ON_DEVICE(function, call) \
    int current; \
    cudaError_t e = gmm__cuda_enter(self, &current); \
    if (e == cudaSuccess) e = (call); \
    return gmm__cuda_leave(self, function, current, e)

static gmm_status gmm__cuda_rt_stream_create(void *self, int32_t priority, gmm_stream *out) {
    const gmm_status s = gmm__rt_open(self, "stream_create", NULL, out, "out");
    if (s != GMM_OK) return s;
    *out = NULL;
    GMM__ON_DEVICE("stream_create", cudaStreamCreateWithPriority(out, cudaStreamNonBlocking, (int)priority));
}
static gmm_status gmm__cuda_rt_stream_destroy(void *self, gmm_stream stream) {
    const gmm_status s = gmm__rt_open(self, "stream_destroy", stream, self, "self");
    if (s != GMM_OK || !stream) return s;
    GMM__ON_DEVICE("stream_destroy", cudaStreamDestroy(stream));
}
static gmm_status gmm__cuda_rt_stream_wait(void *self, gmm_stream stream, gmm_event event, uint32_t flags) {
    const gmm_status s = gmm__rt_open_flags(self, "stream_wait", stream, event, flags);
    const int node = s == GMM_OK && flags && gmm__capturing((const gmm_context *)self, stream);
    if (s != GMM_OK) return s;
    GMM__ON_DEVICE("stream_wait", cudaStreamWaitEvent(stream, event, node ? cudaEventWaitExternal
                                                                          : cudaEventWaitDefault));
}
static gmm_status gmm__cuda_rt_stream_sync(void *self, gmm_stream stream) {
    gmm_context *ctx = (gmm_context *)self;
    const gmm_status s = gmm__rt_open(self, "stream_sync", stream, self, "self");
    if (s != GMM_OK) return s;
    if (gmm__capturing(ctx, stream))
        return gmm__fail(&ctx->error, GMM_E_CAPTURE, "gmm_runtime.stream_sync: stream: %p is capturing",
                         (void *)stream);
    GMM__ON_DEVICE("stream_sync", cudaStreamSynchronize(stream));
}

static gmm_status gmm__cuda_rt_event_create(void *self, gmm_event *out) {
    const gmm_status s = gmm__rt_open(self, "event_create", NULL, out, "out");
    if (s != GMM_OK) return s;
    *out = NULL;
    GMM__ON_DEVICE("event_create", cudaEventCreateWithFlags(out, cudaEventDisableTiming));
}
static gmm_status gmm__cuda_rt_event_destroy(void *self, gmm_event event) {
    const gmm_status s = gmm__rt_open(self, "event_destroy", NULL, self, "self");
    if (s != GMM_OK || !event) return s;
    GMM__ON_DEVICE("event_destroy", cudaEventDestroy(event));
}
static gmm_status gmm__cuda_rt_event_record(void *self, gmm_event event, gmm_stream stream, uint32_t flags) {
    const gmm_status s = gmm__rt_open_flags(self, "event_record", stream, event, flags);
    const int node = s == GMM_OK && flags && gmm__capturing((const gmm_context *)self, stream);
    if (s != GMM_OK) return s;
    GMM__ON_DEVICE("event_record", cudaEventRecordWithFlags(event, stream, node ? cudaEventRecordExternal
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
        (void)cudaGetLastError(); /* an answer, not an error */
        e = cudaSuccess;
    }
    return gmm__cuda_leave(self, "event_query", current, e);
}
static gmm_status gmm__cuda_rt_event_sync(void *self, gmm_event event) {
    const gmm_status s = gmm__rt_open(self, "event_sync", NULL, event, "event");
    if (s != GMM_OK) return s;
    GMM__ON_DEVICE("event_sync", cudaEventSynchronize(event));
}

/* Rows without gaps are one row: 2-D calls limit the pitch. */
static gmm_status gmm__cuda_rt_copy2d(void *self, void *dst, size_t dst_pitch, const void *src, size_t src_pitch,
                                      size_t width, size_t height, gmm_stream stream) {
    const gmm_status s = gmm__rt_open_copy(self, "copy2d", dst, dst_pitch, src, src_pitch, width, height, stream);
    const int dense = height == 1 || (dst_pitch == width && src_pitch == width);
    if (s != GMM_OK || !width || !height) return s;
    GMM__ON_DEVICE("copy2d", dense ? cudaMemcpyAsync(dst, src, width * height, cudaMemcpyDefault, stream)
                                   : cudaMemcpy2DAsync(dst, dst_pitch, src, src_pitch, width, height, cudaMemcpyDefault,
                                                       stream));
}
static gmm_status gmm__cuda_rt_copy(void *self, void *dst, const void *src, size_t bytes, gmm_stream stream) {
    const gmm_status s = gmm__rt_open_copy(self, "copy", dst, bytes, src, bytes, bytes, 1, stream);
    if (s != GMM_OK || !bytes) return s;
    GMM__ON_DEVICE("copy", cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDefault, stream));
}
static gmm_status gmm__cuda_rt_fill2d(void *self, void *dst, size_t pitch, int32_t value, size_t width, size_t height,
                                      gmm_stream stream) {
    const gmm_status s = gmm__rt_open_fill(self, "fill2d", dst, pitch, value, width, height, stream);
    if (s != GMM_OK || !width || !height) return s;
    GMM__ON_DEVICE("fill2d", height == 1 || pitch == width
                                 ? cudaMemsetAsync(dst, (int)value, width * height, stream)
                                 : cudaMemset2DAsync(dst, pitch, (int)value, width, height, stream));
}
static gmm_status gmm__cuda_rt_fill(void *self, void *dst, int32_t value, size_t bytes, gmm_stream stream) {
    const gmm_status s = gmm__rt_open_fill(self, "fill", dst, bytes, value, bytes, 1, stream);
    if (s != GMM_OK || !bytes) return s;
    GMM__ON_DEVICE("fill", cudaMemsetAsync(dst, (int)value, bytes, stream));
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

#undef GMM__ON_DEVICE
#endif /* __CUDACC__ */

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

/* ......................................................................... 12.15 Engine table, public functions ... */

/* One row per engine, in the order in which AUTO asks; the columns follow GMM_OP_LIST. */
#define GMM__OP(engine, op) { gmm__##engine##_plan_##op, gmm__##engine##_launch_##op }
#define GMM__NO_OP { NULL, NULL }
static const gmm__engine_row gmm__engines[] = {
    { GMM_ENGINE_CPU, GMM_SPACE_CPU, 1, {
        GMM__NO_OP, /* quantize */
        GMM__NO_OP, /* dequantize */
        GMM__NO_OP, /* requantize */
        GMM__NO_OP, /* scale_update */
        GMM__OP(cpu, offsets),
        GMM__OP(cpu, product), /* linear_fwd */
        GMM__OP(cpu, product), /* linear_dgrad */
        GMM__OP(cpu, product), /* linear_wgrad */
        GMM__OP(cpu, linear_bgrad),
        GMM__OP(cpu, act_fwd), GMM__OP(cpu, act_bwd),
        GMM__OP(compose, mlp_fwd), GMM__OP(compose, mlp_bwd), GMM__OP(compose, mlp_wgrad),
        GMM__OP(cpu, topk_fwd), GMM__OP(cpu, topk_bwd),
        GMM__OP(cpu, permute_map), GMM__OP(cpu, permute_fwd), GMM__OP(cpu, permute_bwd),
        GMM__OP(cpu, unpermute_fwd), GMM__OP(cpu, unpermute_bwd),
        GMM__OP(cpu, pad), GMM__OP(cpu, unpad),
        GMM__OP(cpu, glu_interleave),
        GMM__OP(cpu, accumulate), GMM__OP(cpu, convert)
    } },
#ifdef __CUDACC__
    { GMM_ENGINE_WGMMA, GMM_SPACE_CUDA, 1, {
        GMM__NO_OP, /* quantize */
        GMM__NO_OP, /* dequantize */
        GMM__NO_OP, /* requantize */
        GMM__NO_OP, /* scale_update */
        GMM__NO_OP, /* offsets */
        GMM__OP(wgmma, product), /* linear_fwd */
        GMM__OP(wgmma, product), /* linear_dgrad */
        GMM__OP(wgmma, product), /* linear_wgrad; no other operations */
        GMM__NO_OP
    } },
#endif
#if defined(__CUDACC__) && defined(GMM__ELEM_DONE)
    { GMM_ENGINE_MMA, GMM_SPACE_CUDA, 1, {
        GMM__NO_OP, /* quantize */
        GMM__NO_OP, /* dequantize */
        GMM__NO_OP, /* requantize */
        GMM__NO_OP, /* scale_update */
        GMM__OP(mma, offsets),
        GMM__OP(mma, linear_fwd), GMM__OP(mma, linear_dgrad), GMM__OP(mma, linear_wgrad), GMM__OP(mma, linear_bgrad),
        GMM__OP(mma, act_fwd), GMM__OP(mma, act_bwd),
        GMM__OP(compose, mlp_fwd), GMM__OP(compose, mlp_bwd), GMM__OP(compose, mlp_wgrad),
        GMM__OP(mma, topk_fwd), GMM__OP(mma, topk_bwd),
        GMM__OP(mma, permute_map), GMM__OP(mma, permute_fwd), GMM__OP(mma, permute_bwd),
        GMM__OP(mma, unpermute_fwd), GMM__OP(mma, unpermute_bwd),
        GMM__OP(mma, pad), GMM__OP(mma, unpad),
        GMM__OP(mma, glu_interleave),
        GMM__OP(mma, accumulate), GMM__OP(mma, convert)
    } },
#endif
#ifdef GMM__CUBLASLT
    { GMM_ENGINE_CUBLASLT, GMM_SPACE_CUDA, 0, {
        GMM__NO_OP, /* quantize */
        GMM__NO_OP, /* dequantize */
        GMM__NO_OP, /* requantize */
        GMM__NO_OP, /* scale_update */
        GMM__NO_OP, /* offsets */
        GMM__OP(lt, product), /* linear_fwd */
        GMM__OP(lt, product), /* linear_dgrad */
        GMM__OP(lt, product), /* linear_wgrad; no other operations */
        GMM__NO_OP
    } },
#endif
};
#undef GMM__OP
#undef GMM__NO_OP

static gmm_status gmm__select(gmm__call *call, gmm__plan *plan) {
    const gmm_engine wanted = call->options.engine;
    char declined[160] = "";
    size_t i, used = 0;
    for (i = 0; i < sizeof gmm__engines / sizeof gmm__engines[0]; i++) {
        const gmm__engine_row *row = &gmm__engines[i];
        const char *why;
        if (wanted != GMM_ENGINE_AUTO ? row->engine != wanted : !row->automatic) continue;
        if (wanted == GMM_ENGINE_AUTO && (row->space != call->ctx->config.space || !row->ops[call->op].plan)) continue;
        memset(plan, 0, sizeof *plan);
        plan->call = call;
        plan->engine = row->engine;
        if (row->space != call->ctx->config.space) why = "serves another memory space";
        else if (!row->ops[call->op].plan) why = "does not have this operation";
        else if (row->ops[call->op].plan(call, plan)) {
            const size_t own = strlen(plan->note), room = sizeof plan->note - own;
            if (declined[0] && room > 3)
                (void)snprintf(plan->note + own, room, "%s%.*s", own ? "; " : "", (int)(room - 3), declined);
            return GMM_OK;
        } else why = plan->note;
        used += (size_t)snprintf(declined + used, sizeof declined - used, "%s%s %.120s", used ? "; " : "",
                                 gmm_engine_name(row->engine), why);
        if (used >= sizeof declined) used = sizeof declined - 1;
    }
    return gmm__refuse(call, GMM_E_UNSUPPORTED, "options.engine", "%s cannot serve %s: %s", gmm_engine_name(wanted),
                       gmm_op_name(call->op), declined[0] ? declined : wanted == GMM_ENGINE_AUTO
                       ? "no engine of this build has it" : "this build does not hold that engine");
}

static gmm_status gmm__launch_on(const gmm__plan *plan, gmm_stream stream) {
    size_t i;
    for (i = 0; i < sizeof gmm__engines / sizeof gmm__engines[0]; i++)
        if (gmm__engines[i].engine == plan->engine) return gmm__engines[i].ops[plan->call->op].launch(plan, stream);
    return GMM_E_UNSUPPORTED;
}

/* Launches on the context's device, whichever is current, and leaves that one current. */
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

static gmm_status gmm__serve(gmm__call *call, gmm_info *info, void *workspace, size_t workspace_bytes,
                             gmm_stream stream) {
    gmm__plan plan;
    gmm_status s;
    if (call->query && !info) return gmm__refuse(call, GMM_E_NULL, "info", "is NULL");
    if (call->query && info->struct_size > sizeof *info)
        return gmm__refuse(call, GMM_E_VERSION, "info", "struct_size %u is larger than the %u bytes of version %s",
                           info->struct_size, (unsigned)sizeof *info, GMM_VERSION_STRING);
    if ((s = gmm__select(call, &plan)) != GMM_OK) return s;
    if (call->query) {
        gmm_info full = GMM_ZERO;
        const uint32_t size = info->struct_size;
        full.struct_size = size;
        full.engine = plan.engine;
        full.workspace_bytes = plan.workspace_bytes;
        full.saved_bytes = plan.saved_bytes;
        full.deferred_bytes = plan.deferred_bytes;
        full.in_align = full.out_align = 1;
        memcpy(full.note, plan.note, sizeof full.note);
        memcpy(info, &full, size ? size : sizeof full);
        return GMM_OK;
    }
    if (workspace_bytes < plan.workspace_bytes)
        return gmm__refuse(call, GMM_E_WORKSPACE, "workspace_bytes", "%llu must be >= %llu",
                           (unsigned long long)workspace_bytes, (unsigned long long)plan.workspace_bytes);
    if (!workspace && plan.workspace_bytes > 0)
        return gmm__refuse(call, GMM_E_NULL, "workspace", "is NULL for %llu bytes",
                           (unsigned long long)plan.workspace_bytes);
    if ((uintptr_t)workspace % GMM__WORKSPACE_ALIGN && plan.workspace_bytes > 0)
        return gmm__refuse(call, GMM_E_ALIGN, "workspace", "%p is not aligned to %d bytes", workspace,
                           (int)GMM__WORKSPACE_ALIGN);
    if (call->ctx->config.space == GMM_SPACE_CPU && stream)
        return gmm__refuse(call, GMM_E_ARG, "stream", "%p must be NULL in a CPU context", (void *)stream);
    plan.workspace = workspace;
    gmm__log(call->ctx, GMM_LOG_TRACE, "%s: served by %s%s%s%s%s%s", call->function, gmm_engine_name(plan.engine),
             plan.note[0] ? ": " : "", plan.note, call->shapes[0] ? " (" : "", call->shapes,
             call->shapes[0] ? ")" : "");
    return gmm__launch(&plan, stream);
}

GMMDEF gmm_status gmm_offsets(gmm_context *ctx, const gmm_groups *groups, int64_t *offsets, gmm_stream stream) {
    gmm__call call;
    gmm_status s = gmm__open(&call, ctx, GMM_OP_OFFSETS, "gmm_offsets", 0);
    if (s != GMM_OK || (s = gmm__read_options(&call, NULL)) != GMM_OK ||
        (s = gmm__read_groups(&call, groups)) != GMM_OK)
        return s;
    if (!offsets) return gmm__refuse(&call, GMM_E_NULL, "offsets", "is NULL");
    if ((uintptr_t)offsets % 8)
        return gmm__refuse(&call, GMM_E_ALIGN, "offsets", "%p is not aligned to 8 bytes", (void *)offsets);
    call.output = offsets;
    return gmm__serve(&call, NULL, NULL, 0, stream);
}

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
static gmm_status gmm__cuda_probe(const gmm_config *c, int32_t *capability, gmm_error *error) {
    struct cudaFuncAttributes attributes;
    int count = 0, major = 0, minor = 0;
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
    if (e != cudaSuccess) return gmm__fail(error, GMM_E_CUDA, "gmm_create: %s", cudaGetErrorString(e));
    *capability = (int32_t)(major * 10 + minor);
    if (*capability < 80)
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
    return GMM_OK;
}
#endif

GMMDEF gmm_status gmm__create(gmm_context **out, const gmm_config *config, uint32_t version, gmm_error *error) {
    gmm_config c = GMM_ZERO;
    gmm_context *ctx;
    int32_t threads = 1, capability = 0;
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
        const gmm_status s = gmm__cuda_probe(&c, &capability, error);
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
    ctx->capability = capability;
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
                 (int)c.device, (int)capability / 10, (int)capability % 10, ctx->wgmma_lacks ? "; wgmma " : ", wgmma",
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
/* --------------------------------------------------------------------------------------------------- 13 Licence ---
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
