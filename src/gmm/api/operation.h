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

/* Whether an MLP, also within a layer, computes the activation in FC1's product of forward, from its rounded results,
   and the gradient of the activation in FC2's dgrad of backward. AUTO: where the plan's cost model expects that to be
   faster. Results have the bits of two launches.
       forward    WGMMA has it for gated activations: for F16 and BF16 without a recipe, ffn a multiple of 64, and
                  interleave 0, 8, 16, 32 or a multiple of 64; and for BF16 by the recipe FP8_BLOCK with E4M3 inputs and
                  weights of 128X128, where the product quantizes the activation too, ffn and interleave multiples of
                  128, and config.save PREACT, PREACT_E4M3 or NOTHING, also in inference
       backward   WGMMA has it for gated activations, F16 and BF16 without a recipe, ffn a multiple of 64, interleave 0
                  or a multiple of 8. By a recipe, and where nothing but the gradients of FC2 is wanted, `fuse` is not
                  looked at */
typedef enum gmm_fuse {
    GMM_FUSE_AUTO = 0,
    GMM_FUSE_NEVER = 1,
    GMM_FUSE_ALWAYS = 2,     /* GMM_E_UNSUPPORTED, with the reason, where no engine that the call may use has it */
    GMM_FUSE_MAX = 0x7fffffff
} gmm_fuse;

/* How a call is carried out. Descriptors point to it; NULL means all defaults. */
typedef struct gmm_options {
    uint32_t struct_size;
    gmm_engine engine;           /* demanded, GMM_E_UNSUPPORTED where it cannot serve the call. AUTO: gmm_config.engine
                                    is demanded; where that is AUTO too, the first engine that can serve the call */
    int32_t sm_limit;            /* GPU: maximum number of multiprocessors, 0 = all. Never changes results */
    int32_t allow_nondeterminism;/* 0 or 1; every engine is deterministic with either */
    int32_t allow_tf32;          /* 1: CUBLASLT may multiply F32 as TF32 */
    int32_t fp8_fast_accum;      /* 1: WGMMA may skip promotion in fwd and dgrad where scales are by tensor or row.
                                    Changes results */
    int32_t tile;                /* WGMMA, for measurements: 1, 2, ... demands that tile of those which can serve the
                                    product; where the device can choose between two by the split, that choice has a
                                    number of its own. 0 or a higher number: the tile expected to be fastest. Never
                                    changes results */
    int64_t workspace_limit;     /* bytes: WGMMA declines a product of MX32 or NV16 operands whose workspace, in which
                                    it converts them, is larger; AUTO then takes MMA. GPU engines copy no gathered
                                    rows to a larger workspace: forward and dgrad of WGMMA gather them without, other
                                    products are refused. 0 = no limit. Never changes results */
    gmm_fuse fuse;               /* mlp_fwd, mlp_bwd, moe_fwd, moe_bwd */
    int32_t reserved;            /* 0 */
} gmm_options;

/* The result of a query. */
typedef struct gmm_info {
    uint32_t struct_size;
    gmm_engine engine;       /* serves the call. An address that the query leaves NULL is assumed to be a multiple of 16
                                bytes; where the engine depends on that, the note says so. Under AUTO another engine
                                then serves a call with other addresses, in at most workspace_bytes; where the engine
                                was demanded, or no other has the operation, such a call is refused */
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
   the query of `op` takes, and is read as there: a gmm_linear for GMM_OP_LINEAR_FWD, a gmm_mlp for GMM_OP_MLP_WGRAD,
   which two queries take. Operations that have no query have no description (GMM_E_ARG).
   At most `bytes` are written, the terminating NUL included; text that does not fit is cut off.
   Stream, graph: no effect on either. Errors: those of the query; GMM_E_NULL (text, or no bytes). */
GMMDEF gmm_status gmm_describe(gmm_context *ctx, gmm_op op, const void *descriptor, char *text, size_t bytes);

/* offsets[g] = first row of group g, offsets[G] = number of live rows, clamped as gmm_groups describes.
   Shapes: offsets [G + 1] int64, context memory.
   Stream, graph: enqueued; capturable. Errors: GMM_E_NULL, GMM_E_ARG, GMM_E_ALIGN, GMM_E_DTYPE, GMM_E_SPLIT,
       GMM_E_VERSION, GMM_E_UNSUPPORTED, GMM_E_CAPTURE (host splits), GMM_E_CUDA. */
GMMDEF gmm_status gmm_offsets(gmm_context *ctx, const gmm_groups *groups, int64_t *offsets, gmm_stream stream);

