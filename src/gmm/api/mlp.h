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
   around the MLP. Except for delay_wgrad, overlap_dispatch_wgrad and overwrite_saved they change nothing that is done:
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
    int32_t overwrite_saved;        /* 1: bwd may overwrite gmm_mlp.saved, so that it cannot run twice on what fwd
                                       saved. Where it stores FC1's output gradient in 16 or 32 bits (on GPUs with FP8
                                       recipes it may not), its workspace is smaller by the size of that gradient */
} gmm_mlp_config;

/* Checks a configuration; pure. Every operation on an MLP makes the same checks.
   Errors: GMM_E_CONFIG, and error->text begins with the field's name; GMM_E_NULL; GMM_E_VERSION, GMM_E_ARG
       (struct_size). The rules:
       hidden, ffn >= 1, and 2 ffn fits 64 bits; hidden_out, topk, etp_size >= 0; enumerations in range; switches 0 or 1
       act.kind: any but GMM_ACT_NONE, the value in a zeroed act
       act: as gmm_act_fwd (interleave >= 0, a divisor of ffn, gated only; limit 0 or finite > 0; offset finite, gated
           only; alpha finite, and 0 or 1 where the activation has no alpha; betas 0 or finite > 0, SiTU only)
       source_interleave: 0 or a divisor of ffn; where stated for a gated activation, the layout of act.interleave
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
   `ready` is called once per micro-batch for every parameter whose gradient is wanted, even if groups are empty. It is
   called as soon as the work that completes the gradient has been enqueued on `stream`: FC2's before FC1's, and FC2's
   weight gradient before FC1's backward is enqueued. Biases complete in bwd; weights in bwd or, delayed, in
   gmm_mlp_wgrad. Not called while capturing.
   `need` is for weights that are made available late (gathered over ranks, copied from host memory). It is called just
   before a product that reads a weight is enqueued. fwd calls it for w1, then w2, with `op` GMM_OP_LINEAR_FWD; bwd for
   w1 with GMM_OP_LINEAR_FWD if FC1 runs again, then for w2 and w1 with GMM_OP_LINEAR_DGRAD, if these products run.
   Where a product multiplies a copy that was cast before (in bwd with a weight cache, or for FC1's second run), the
   matrix is not read, and `need` not called.
   It may enqueue work on `stream`, such as a wait, and set the matrix that gmm_mlp.w1 or w2 points to. With `need`, the
   weights' addresses (data, table, scale, scale_table, amax) are read after it was called, not before, and may be NULL
   when the call or query begins; so may entries of tables. It may also choose between data and table, and set
   group_stride and GMM_MAT_TABLE_ON_HOST. All other fields are read when the call begins and must remain, also those of
   the copy in `columnwise` that bwd reads: dtype, scaling, scale_order, hadamard, other flags, ld (else GMM_E_CONFIG).
   Where ld is a multiple of 16 bytes, the matrices' addresses and group_stride must be so too, since a query assumes it
   (else GMM_E_ALIGN). Other errors are those of a weight that is given when the call begins.
   A status of `need` other than GMM_OK ends the call with this status; gmm_last_error names it. When `need`, or what it
   has set, ends a call, earlier work has been enqueued, outputs are undefined, and bwd has queued nothing.
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
   capacity < 1, head outside [0, capacity), count outside [0, capacity] and reserved other than 0 (GMM_E_ARG), and
   entries at no multiple of 8 bytes (GMM_E_ALIGN). */
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
   for the first micro-batch after weights, recipe, backward_override, delayed scales or shapes have changed, and to
   nonzero for those that follow. A captured graph reads the word at each replay. Results are bitwise those without a
   cache. */
typedef struct gmm_mlp_quant {
    uint32_t struct_size;
    int32_t reserved;        /* 0 */
    const gmm_recipe *recipe;/* its kind must be the configuration's. With hadamard, x, dy and the weights are BF16 in
                                every operation, though only weight gradients are transformed */
    const float *scale;      /* delayed: [GMM_SLOTS][G] quantization scales, context memory; NULL = ones, of which the
                                log warns once */
    float *amax;             /* delayed: [GMM_SLOTS][G], context memory, raised to the operands' amaxes (history[0]);
                                NULL = not wanted. A delayed weight gradient that casts x in gmm_mlp_wgrad reads `scale`
                                and raises `amax` there */
    const uint64_t *random;  /* stochastic: [2][2], context memory: {seed, offset} of dy, then of dz */
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
       be quantized instead); the others are as in gmm_linear.
   Aliasing: none, but unless weight gradients are delayed, dx may be x or dy, at the same address and with the same
       strides: bwd writes it when it has read them. */
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
                               neither accesses it, and it may be NULL, or any aligned address. With
                               config.overwrite_saved its part "preact" is undefined behind bwd */
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

/* Engine, sizes and feature alignment of GMM_OP_MLP_FWD, GMM_OP_MLP_BWD or GMM_OP_MLP_WGRAD. With saved NULL the
   workspace of GMM_OP_MLP_FWD suffices for training and inference, else for training.  Stream, graph: none.
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

/* y of the MLP. Needs x, w1, w2, y, and b1, b2 and prob where the configuration has them; else these are NULL, and so
   are db1, db2 and dprob (GMM_E_CONFIG).  Stream, graph: enqueued; capturable.
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

/* Computes the oldest queued weight gradients: FC2's, then FC1's, and fires their hooks. `options` as recorded. The
   context is that of gmm_mlp_bwd, or another one of its space and device.
   Stream, graph: enqueued; capturable.
   Errors: GMM_E_STATE (queue empty, or its first entry not recorded, or in another space or on another device),
       GMM_E_ARG (capacity, head or count out of range, overlap), GMM_E_NULL, GMM_E_WORKSPACE, GMM_E_ALIGN,
       GMM_E_CUDA; the entry then stays. */
GMMDEF gmm_status gmm_mlp_wgrad(gmm_context *ctx, gmm_wgrad_queue *queue, void *workspace, size_t workspace_bytes,
                                gmm_stream stream);

/* Calls the `ready` hooks that `op` (GMM_OP_MLP_BWD or GMM_OP_MLP_WGRAD) of this MLP calls outside of a capture; for
   callers who have launched a graph of the operation.  Stream, graph: passed to the hooks.
   Errors: those of gmm_mlp_query; GMM_E_ARG (op). */
GMMDEF gmm_status gmm_mlp_fire_hooks(gmm_context *ctx, gmm_op op, const gmm_mlp *mlp, gmm_stream stream);

