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
             recipe gather rows of x where they read them (gmm_quantization.src_index). Products read x itself
             without a recipe, with one that leaves x as it is, and in bwd with backward_override HIGH_PRECISION. They
             gather its rows (gmm_linear.x_index) in CPU contexts, with options.workspace_limit, in a bwd that delays
             weight gradients, and in a fwd without a recipe where the plan expects that to be faster. Else each pass
             that reads the rows permutes them in the workspace. The same holds for rows of dout in bwd that have the
             dtype of x and are not weighted. Other rows of dout are permuted in the workspace, or in `deferred` where a
             queued weight gradient reads them. With save_rows 1 fwd permutes rows of x into saved on every engine, and
             bwd reads them there: R x hidden elements more memory for a shorter bwd.
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
                                 GMM_FAULT_CAPACITY. 0 = enough for any routing: T topk; with align, align - 1 more for
                                 each expert that can have rows, rounded up to a multiple of align */
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
    void *saved;              /* fwd writes, bwd reads; 256-byte aligned; NULL in fwd = inference. With
                                 mlp.config.overwrite_saved its part "preact" is undefined behind bwd */
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
   or overwritten as gmm_mlp_bwd says. gmm_mlp_wgrad gathers rows of x and dout by slot_of, which is in saved; where
   they were permuted, it reads the permuted rows of x in saved and those of dout in deferred.
   Stream, graph: enqueued; capturable. A captured call fills the queue once, when it is captured; no replay does.
   Errors: as gmm_mlp_bwd and gmm_topk_bwd; GMM_E_CONFIG as gmm_moe_fwd. */
GMMDEF gmm_status gmm_moe_bwd(gmm_context *ctx, const gmm_moe *moe, void *workspace, size_t workspace_bytes,
                              gmm_stream stream);

/* Calls the `ready` hooks that `op` (GMM_OP_MOE_BWD, or GMM_OP_MLP_WGRAD of what it queues) calls outside of a capture;
   for callers who have launched a graph of the operation.  Stream, graph: passed to the hooks.
   Errors: those of gmm_moe_query; GMM_E_ARG (moe_fwd, which fires none). */
GMMDEF gmm_status gmm_moe_fire_hooks(gmm_context *ctx, gmm_op op, const gmm_moe *moe, gmm_stream stream);

