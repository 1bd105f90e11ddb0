/* ------------------------------------------------------------------------- 8.1 Mixture-of-experts layer --- */

/* A whole layer, from tokens to their combined outputs, as one call forward and one backward:
       fwd   topk_fwd, permute_map, mlp_fwd on the rows of x, unpermute_fwd
       bwd   unpermute_bwd, mlp_bwd, permute_bwd, topk_bwd
   Results are bitwise those of these operations called one after the other by the same engine, with rows, y and their
   gradients in the dtype of x.
   Routing   `route` NULL: the caller has indices and probs. Else the layer runs gmm_topk_fwd and gmm_topk_bwd on it, and
             reads route.indices and probs, which both calls need; bwd needs them unchanged. The route's experts, tokens
             and topk are the layer's; its options and dprobs, which the layer passes, must be NULL.
   Rows      Rows of experts follow one another as gmm_permute describes: dropped slots (-1), capacity, align. Without a
             recipe nothing is permuted: products gather rows of x (gmm_linear.x_index), and rows of dout too where its
             dtype is that of x and the combine has no probs. With a recipe rows of x are permuted before they are
             quantized, in fwd, and in bwd where it reads them.
   probs     mlp.config.prob 1: they weight FC2's input in the MLP. 0: they weight the rows that the combine adds; dprobs
             then needs these rows, so that `saved` has them too: T topk rows of hidden_out columns that the other choice
             does not save. probs NULL without a route: rows are added unweighted; this is what config.prob_on_input 1
             needs. In a query without a route, probs NULL says so only with config.prob 0.
   mlp       holds what belongs to the experts: config, w1, b1, w2, b2, dw1, dw2, db1, db2, queue, hooks, quant. Its other
             fields are the layer's and must be 0: groups, options, x, prob, y, saved, dy, dx, dprob, deferred, indices.
             config.topk must be 0 or the layer's.
   NULL      What is not wanted is not computed. `saved` NULL in fwd is inference; in bwd, of dx, dprobs, route.dlogits
             and the gradients in `mlp` those that are NULL are left out with the steps that only they need.
   Tokens that were dispatched from other ranks already lie by expert, with splits instead of indices: gmm_mlp takes them.
   Shapes: x, dx [T, hidden]; out, dout [T, hidden_out]; indices, probs, dprobs [T, topk]; sizes [E]. Weights: gmm_mlp.
   dtypes: x that of the weights (gmm_mlp); out, dout, dx F32, F16, BF16 each their own; indices, sizes int32, probs,
       dprobs fp32.  Aliasing: none. */
typedef struct gmm_moe {
    uint32_t struct_size;
    int32_t experts;          /* E >= 1: matrices of mlp.w1 and w2 */
    int64_t tokens;           /* T >= 0; T topk < 2^31 */
    int64_t capacity;         /* R < 2^31: rows of all experts; slots that do not fit are dropped, and set
                                 GMM_FAULT_CAPACITY. 0 = as many as any routing needs: T topk, and with align E (align - 1)
                                 or T topk (align - 1) more, whichever is less, rounded up to a multiple of it */
    int32_t topk;             /* >= 1 */
    int32_t align;            /* rows of zeros fill up each expert's to a multiple of it; 0 = 1 */
    const gmm_options *options; /* of every operation */
    const gmm_mlp *mlp;
    const gmm_route *route;   /* NULL: indices and probs are given */
    const int32_t *indices;   /* without route */
    const float *probs;       /* without route; NULL = none */
    float *dprobs;            /* bwd: gradient of probs, dropped slots get 0; with a route of route.probs, for the caller's
                                 use: dlogits does not need it. NULL = not wanted */
    const gmm_mat *x;
    const gmm_mat *out;       /* fwd writes */
    const gmm_mat *dout;      /* bwd reads */
    const gmm_mat *dx;        /* bwd writes; NULL = not wanted */
    int32_t *sizes;           /* rows of each expert, padding included: fwd writes, bwd reads. NULL = in `saved` */
    uint32_t *fault;          /* gmm_groups.fault, and GMM_FAULT_INDEX for indices out of range; NULL = not wanted */
    void *saved;              /* fwd writes, bwd reads; 256-byte aligned; NULL in fwd = inference */
    size_t saved_bytes;
    void *deferred;           /* bwd with delayed weight gradients: as gmm_mlp.deferred */
    size_t deferred_bytes;
} gmm_moe;

/* Engine, sizes and feature alignment of GMM_OP_MOE_FWD, GMM_OP_MOE_BWD, or GMM_OP_MLP_WGRAD for the weight gradients
   that bwd has queued. Whether `saved` is NULL does not matter, but that a fwd with it may take less workspace.
   Stream, graph: none. Errors: those of the operation, except about addresses and buffers. */
GMMDEF gmm_status gmm_moe_query(gmm_context *ctx, gmm_op op, const gmm_moe *moe, gmm_info *info);

/* What gmm_moe.saved holds, as gmm_saved_layout has it for an MLP: "row_of" [T, topk], "slot_of" and "row_probs" [R] and
   "sizes" [E] as in gmm_permute (sizes: unless the caller has given an array), "y": the rows that the combine adds where
   it weights them. Behind them the parts of the MLP. */
typedef struct gmm_moe_layout {
    uint32_t struct_size;
    int32_t count;           /* parts, in the order of their offsets */
    int64_t bytes;           /* gmm_info.saved_bytes */
    gmm_saved_part part[16]; /* zeros from `count` on */
} gmm_moe_layout;

/* The layout of `saved`. It is the same for every engine, and for the descriptors of GMM_OP_MOE_FWD and GMM_OP_MOE_BWD.
   Stream, graph: none. Errors: as gmm_moe_query; GMM_E_NULL (layout). */
GMMDEF gmm_status gmm_moe_saved_query(gmm_context *ctx, gmm_op op, const gmm_moe *moe, gmm_moe_layout *layout);

/* out of the layer. Needs mlp, x, out, and route or indices (and probs with config.prob).
   Stream, graph: enqueued; capturable, and a replay may have other tokens and routings.
   Errors: as gmm_mlp_fwd and gmm_topk_fwd; GMM_E_CONFIG (fields that exclude each other, or are not the caller's). */
GMMDEF gmm_status gmm_moe_fwd(gmm_context *ctx, const gmm_moe *moe, void *workspace, size_t workspace_bytes,
                              gmm_stream stream);

/* Those of dx, dprobs, route.dlogits and the gradients in `mlp` that are not NULL, from dout and saved. Needs dout, saved,
   sizes if fwd wrote them; x where gmm_mlp_bwd would read it; probs with config.prob 0; the route with route.dlogits.
   Delayed weight gradients are recorded in mlp.queue, for gmm_mlp_wgrad. Until it has run, x, dout, saved, deferred, dw1,
   dw2, the fault word and the arrays of mlp.quant must remain unchanged; rows that were permuted are in `deferred`.
   Everything else may be freed as gmm_mlp_bwd says.  Stream, graph: enqueued; capturable, as gmm_mlp_bwd.
   Errors: as gmm_mlp_bwd and gmm_topk_bwd; GMM_E_CONFIG as gmm_moe_fwd. */
GMMDEF gmm_status gmm_moe_bwd(gmm_context *ctx, const gmm_moe *moe, void *workspace, size_t workspace_bytes,
                              gmm_stream stream);

/* Calls the `ready` hooks that `op` (GMM_OP_MOE_BWD, or GMM_OP_MLP_WGRAD for what it has queued) calls outside of a
   capture; for callers who have launched a graph of the operation.  Stream, graph: passed to the hooks.
   Errors: those of gmm_moe_query. */
GMMDEF gmm_status gmm_moe_fire_hooks(gmm_context *ctx, gmm_op op, const gmm_moe *moe, gmm_stream stream);

