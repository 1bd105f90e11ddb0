/* --------------------------------------------------------------------------------------------------- 10 Runtime --- */

/* The GTP runtime: all-gathers weights ahead of their use, and reduces gradients while the compute continues.
   Weights are declared, bound into bundles (gathered and reduced together, such as a layer's local experts) and named
   in chains (the order in which a pass reads its bundles, so that the next can be gathered meanwhile). Seal, ask for
   the memory, bind it; then, per step and bundle:

       acquire(forward) ... GEMM ... release        a view of the gathered weights, valid between the two
       acquire(backward) ... dgrad ... release
       wgrad ... GEMM ... submit                    a buffer for the whole gradient, then its reduction into main_grad
       fence ... optimizer ... publish              main_grad is complete; the shards are new

   Order       Every call enqueues and returns (with CPU ranks and stream NULL it may wait). All ranks make the same
               calls in the same order, also a rank without tokens. Gathers run on the domain's gather stream,
               reductions and their sums on its reduce stream, the caller's work on the streams that it passes.
   Buffers     Gathered weights and gradients live in slots. Every slot has an event of its last use, for which the next
               user's stream waits: correct for any order of calls, number of slots, or sharing of streams. The content
               of a slot is identified by bundle, direction and version, so that a gather that is still valid is used
               again, and an outdated one never. After bind, addresses depend on bundle and pass alone.
   Shards      Before it writes shards, a stream waits for the gathers that read them (fence); afterwards the caller
               publishes them.
   Formats     Elements and scales of quantized shards move as they are: quantized once, where they are published
               (gmm_gtp_quantize), in the directions that the format stores; which one is gathered is a matter of the
               pass alone. What arrives is what one rank would have made of the whole matrix, bit for bit, and is put
               where it stays in one step.
   g = 1       No communicator is called: views are the shards. Gradients go through the same buffers, since scale and
               accumulation are the same. TENSOR and 128X128 are transposed for backward on the caller's stream.
   Graphs      Between capture_begin and capture_end acquire, release, wgrad, submit and fence may be called, nothing
               else; chains say beforehand which bundles are captured. Content of slots passes from one graph to the
               next only if it was prefetched for it; graphs are then replayed in the order of their capture.
   Errors      What can be checked is checked before anything is enqueued, and state stays as it was. After
               a later failure, such as one of a communicator, the object is unusable: every later call returns the same
               status, nothing more is enqueued, and give_up of its communicators is called. gmm_gtp_last_error names
               the operation and the rank.
   Threads     One at a time. Allocates nothing itself: memory is the caller's, events are the runtime's (at bind).
   Callbacks   May call gmm_gtp_publish, nothing else. */
typedef struct gmm_gtp gmm_gtp;

typedef enum gmm_gtp_pass {
    GMM_GTP_FORWARD = 0,
    GMM_GTP_BACKWARD = 1,
    GMM_GTP_RECOMPUTE = 2, /* forward again inside backward: has its own rowwise buffers, does not call hooks.need */
    GMM_GTP_PASSES = 3,
    GMM_GTP_PASS_MAX = 0x7fffffff
} gmm_gtp_pass;

/* Data groups: whatever counts tokens, losses or expert load goes over ranks that see different tokens, GTP peers
   included; see gmm_grid_group_of. */
typedef struct gmm_gtp_hooks {
    void *user;
    /* The shards of these weights are about to be read for a forward: publish them now if they are not yet. Once per
       bundle and forward; for a graph from gmm_gtp_pre_replay. NULL = not wanted. */
    void (*need)(void *user, gmm_gtp *gtp, const int32_t *weights, int32_t count);
    /* main_grad of these weights, a whole bundle, has had its sum: work on `stream` from here on sees it. Once per
       submit; for a graph from gmm_gtp_post_replay. NULL = not wanted. */
    void (*ready)(void *user, gmm_gtp *gtp, const int32_t *weights, int32_t count, gmm_stream stream);
} gmm_gtp_hooks;

typedef struct gmm_gtp_config {
    uint32_t struct_size;
    int32_t domains, weights, bundles, chains, graphs; /* maximum numbers of declarations; domains 0 = 1 */
    int32_t timeout_ms;         /* of a collective that has begun, see gmm_gtp_poll; 0 = 10000 */
    gmm_context *ctx;           /* for sums and quantization; with CPU ranks not shared with other code */
    const gmm_runtime *runtime; /* copied; NULL = that of ctx */
    gmm_gtp_hooks hooks;
} gmm_gtp_config;

/* How gradients are reduced. Either way their sum is scaled and added in fp32. */
typedef enum gmm_gtp_reduction {
    GMM_GTP_REDUCE_AUTO = 0,   /* EXCHANGE where the communicator says so; else SCATTER with an fp32 wire or at most
                                  two ranks, else EXCHANGE */
    GMM_GTP_REDUCE_SCATTER = 1, /* the communicator adds; with a bf16 wire its sum is rounded to bf16 */
    GMM_GTP_REDUCE_EXCHANGE = 2, /* all_to_all of the parts, which are then added in fp32 in the order of ranks; at most
                                    256 ranks */
    GMM_GTP_REDUCTION_MAX = 0x7fffffff
} gmm_gtp_reduction;

/* Ranks that share shards, and the streams of their traffic. Dense and expert weights are two domains with groups of
   different sizes. Gathers and reductions run side by side only with two communicators. */
typedef struct gmm_gtp_domain {
    uint32_t struct_size;
    gmm_dtype wire;             /* of reductions and gradient buffers: F32 or BF16; NONE = F32 */
    const gmm_comm *gather;     /* copied; NULL = one rank */
    const gmm_comm *reduce;     /* copied; NULL = gather's */
    gmm_stream gather_stream, reduce_stream;
    gmm_gtp_reduction reduction;
    int32_t wgrad_slots;        /* gradient buffers of one size, at most one per bundle; 0 = 2 */
    int32_t synchronous;        /* 1: submit makes the caller's stream wait for the sum (for comparison) */
    int32_t reserved;
} gmm_gtp_domain;

typedef struct gmm_gtp_weight {
    uint32_t struct_size;
    int32_t expert;             /* place in its bundle, 0 for a weight of its own */
    const char *name;           /* for messages; lives as long as the object */
    const gmm_shard *shard;     /* copied; its group is the domain's */
    void *data[2];              /* the shard by gmm_direction, as gmm_gtp_plan sizes it; [COLUMNWISE] NULL where the
                                   plan has 0 bytes. Padding rows are zeros */
    void *scale[2];             /* its scales, COMPACT; TENSOR: one value in [ROWWISE], the same on all ranks */
    float *amax;                /* NV16: global amax, the same on all ranks; those of a bundle stand one behind the
                                   other in the order of experts. TENSOR: where gmm_gtp_quantize leaves it, or NULL */
    void *main_grad;            /* [shard_rows, local_cols], dense; NULL = frozen, on all ranks alike */
    gmm_dtype main_grad_dtype;  /* F32 or BF16 */
    int32_t reserved;
    const gmm_format *format;   /* how gmm_gtp_quantize makes a quantized shard, copied; NULL = the caller makes it.
                                   Scales in COMPACT order; not stochastic, hadamard or row_amax, whose bits would
                                   depend on where shards end */
} gmm_gtp_weight;

typedef struct gmm_gtp_chain {
    uint32_t struct_size;
    gmm_gtp_pass pass;
    const int32_t *bundles;     /* [count] in the order of the pass; a bundle is in one chain of a pass at most */
    int32_t count;              /* >= 1 */
    int32_t prefetch;           /* bundles gathered ahead, 0 to 3 */
    int32_t held;               /* bundles that the caller holds at a time; 0 = 1 */
    int32_t captured;           /* 1: for graphs; may be run without one before, to warm up */
} gmm_gtp_chain;

/* Matrices of a bundle in the order of expert indices: a packed operand if all have one shape and lie evenly,
   otherwise a host table of addresses that stays as it is. `mat` goes into gmm_linear.w, gmm_mlp.w1 or w2, or
   gmm_grad.mat as it is: rows are logical, padding lies behind them. In backward a quantized mat has its columnwise
   copy alone, in mat.columnwise, which dgrad reads: of formats that store one (1X128, MX32, NV16) the gathered one, of
   TENSOR and 128X128 a transpose of the rowwise one, made here. Scales and amaxes of tensors are those that were there
   when the bundle was gathered. A table of several shapes is for calls with one matrix each: its mat.ld is that of the
   first; the columnwise copies of the others, but for MX32, have the padded_rows of their plans. */
typedef struct gmm_gtp_view {
    uint32_t struct_size;
    int32_t count;
    gmm_mat mat;
    int64_t rows, cols;         /* of the first matrix */
    int64_t version;            /* how often its shards were published */
    int32_t slot;               /* the buffer; -1 = the shards themselves */
    int32_t leave;              /* multiprocessors that a GEMM over the view should leave to the gathers and reductions
                                   beside it: gmm_options.sm_limit = the GPU's less these. 0 = it may have all */
} gmm_gtp_view;

typedef enum gmm_gtp_add { GMM_GTP_ADD = 0, GMM_GTP_SET = 1, GMM_GTP_ADD_MAX = 0x7fffffff } gmm_gtp_add;

typedef struct gmm_gtp_gradient {
    uint32_t struct_size;
    float scale;                /* main_grad = scale * sum (+ main_grad), in fp32; taken as it is, 0 means 0 */
    gmm_gtp_add add;
    int32_t zero;               /* 1: this rank had no tokens, its gradient is zero; no buffer was asked for */
    const gmm_mat *from;        /* the gradient, [count] matrices of rows x cols in F32, BF16 or F16, instead of the
                                   buffer of gmm_gtp_wgrad; not written. NULL = the buffer. A table is on the host */
} gmm_gtp_gradient;

/* Bytes of a domain's two memory blocks, for windows of the two communicators. Aligned to 256. The first holds the
   gather slots, a stage in which the parts of ranks arrive where they must be put side by side or transposed, and what
   gmm_gtp_quantize needs. */
typedef struct gmm_gtp_need {
    uint32_t struct_size;
    int32_t gather_slots, wgrad_slots;
    int32_t reserved;
    size_t gather_bytes, reduce_bytes;
} gmm_gtp_need;

/* Counts since init; the same on every rank. acquires = prefetched + resident + exposed. */
typedef struct gmm_gtp_statistics {
    uint32_t struct_size;
    int32_t reserved;
    int64_t acquires;
    int64_t prefetched;         /* found what a prefetch had gathered */
    int64_t resident;           /* found it still there from an earlier acquire, or g = 1 */
    int64_t exposed;            /* had to gather */
    int64_t gathers;            /* prefetches and exposed */
    int64_t prefetches;
    int64_t outdated;           /* prefetches discarded because newer shards were published */
    int64_t busy;               /* prefetches skipped because the slot was in use */
    int64_t transposed;         /* gathers that transposed a resident rowwise copy (g = 1: the shard) */
    int64_t submits;
    int64_t gathered_bytes, reduced_bytes; /* that other ranks sent here */
    uint64_t calls;             /* hash over all calls so far that ranks must make alike */
} gmm_gtp_statistics;

/* Bytes of the object for a configuration, and the object in memory aligned to 16 bytes.
   Errors: GMM_E_NULL, GMM_E_VERSION, GMM_E_ARG, GMM_E_WORKSPACE, GMM_E_ALIGN, GMM_E_OVERFLOW. */
GMMDEF gmm_status gmm_gtp_query(const gmm_gtp_config *config, size_t *bytes, gmm_error *error);
GMMDEF gmm_status gmm_gtp_init(void *memory, size_t bytes, const gmm_gtp_config *config, gmm_gtp **out,
                               gmm_error *error);
/* Ends the use of memory, events and windows; work must be done. NULL is allowed.  Errors: those of the runtime. */
GMMDEF gmm_status gmm_gtp_fini(gmm_gtp *gtp);
/* Message of the last failed call; "" before any. */
GMMDEF const char *gmm_gtp_last_error(const gmm_gtp *gtp);

/* Declarations, in any order that names what exists; ids count from 0. Descriptors are copied.
   A bundle takes its weights in any order: their expert indices must be 0 to count - 1, each once, and they share dtype
   and scaling; quantized ones of one shape also the unit. Every weight is in one bundle. A bundle's name is the same on
   all ranks; by it CPU ranks tell bundles of one size apart. NULL is "bundle".
   Errors: GMM_E_NULL, GMM_E_VERSION, GMM_E_ARG, GMM_E_DTYPE, GMM_E_CONFIG, GMM_E_ALIGN, as gmm_gtp_plan;
       GMM_E_WORKSPACE (more than configured); GMM_E_STATE (sealed). */
GMMDEF gmm_status gmm_gtp_add_domain(gmm_gtp *gtp, const gmm_gtp_domain *domain, int32_t *id);
GMMDEF gmm_status gmm_gtp_add_weight(gmm_gtp *gtp, const gmm_gtp_weight *weight, int32_t *id);
GMMDEF gmm_status gmm_gtp_add_bundle(gmm_gtp *gtp, int32_t domain, const int32_t *weights, int32_t count,
                                     const char *name, int32_t *id);
GMMDEF gmm_status gmm_gtp_add_chain(gmm_gtp *gtp, const gmm_gtp_chain *chain, int32_t *id);

/* Ends the declarations and lays out the memory; then the bytes of a domain; then its memory, which must be the same
   blocks of it on all ranks if the communicators register windows (collective). Bytes of 0 take NULL.
   Errors: GMM_E_STATE, GMM_E_CONFIG (a weight in no bundle; a chain that mixes), GMM_E_WORKSPACE, GMM_E_ALIGN,
       GMM_E_ARG, GMM_E_NULL, GMM_E_VERSION, GMM_E_COMM, those of the runtime. */
GMMDEF gmm_status gmm_gtp_seal(gmm_gtp *gtp);
GMMDEF gmm_status gmm_gtp_memory_need(gmm_gtp *gtp, int32_t domain, gmm_gtp_need *need);
GMMDEF gmm_status gmm_gtp_bind(gmm_gtp *gtp, int32_t domain, void *gather, size_t gather_bytes, void *reduce,
                               size_t reduce_bytes);

/* What comes after a chain: the head of `next` is gathered while the tail of `chain` is computed. Backward after
   forward, forward after backward within a step; -1 = nothing, the default: before an optimizer step, whose new shards
   would make the gather useless. Seal counts what follows by then, on all ranks alike: a forward chain that follows
   itself, as in inference or where a pipeline fills, takes more slots than held + prefetch, by what its count leaves
   over when divided by that. A head that shares its slot with the tail is not gathered ahead.
   Errors: GMM_E_ARG, GMM_E_CAPTURE. */
GMMDEF gmm_status gmm_gtp_follow(gmm_gtp *gtp, int32_t chain, int32_t next);

/* Declares that the work enqueued on `stream` so far has written the shards of these weights. Gathers wait for it.
   Errors: GMM_E_NULL, GMM_E_ARG, GMM_E_STATE, GMM_E_CAPTURE, those of the runtime. */
GMMDEF gmm_status gmm_gtp_publish(gmm_gtp *gtp, const int32_t *weights, int32_t count, gmm_stream stream);

/* Makes quantized shards of rows in a wider dtype, and publishes them: waits for gathers as gmm_gtp_fence does, finds
   the amax of tensors that have one (TENSOR unless delayed, NV16) over all ranks of the domain in one packed reduction,
   and writes elements, scales and amax in every direction that the plan stores. Weights without a scaling are
   converted. Collective: all ranks name the same weights in the same order. The bits are those that one rank would make
   of the whole matrix, whatever the number of ranks.
   Shapes: from [count] matrices [shard_rows, local_cols], dense, padding rows zeros. */
typedef struct gmm_gtp_quantization {
    uint32_t struct_size;
    gmm_dtype dtype;            /* of the rows: F32, F16 or BF16 */
    const void *const *from;    /* [count] addresses, on the host */
    const float *scale;         /* [count] delayed: quantization scales, in the context's memory; NULL = ones */
    float *amax;                /* [count] delayed: raised to what any rank sees, in the context's memory; NULL = not
                                   wanted */
    const gmm_comm *also;       /* further ranks that share the amaxes, such as tensor-parallel ones; NULL = none. It is
                                   called on the domain's gather stream, or on `stream` where a domain has one rank,
                                   which gmm_gtp_poll does not monitor */
} gmm_gtp_quantization;

/* Errors: as gmm_gtp_publish; GMM_E_NULL, GMM_E_VERSION, GMM_E_DTYPE, GMM_E_ALIGN, GMM_E_CONFIG (a quantized weight
       without a format), GMM_E_COMM. */
GMMDEF gmm_status gmm_gtp_quantize(gmm_gtp *gtp, const int32_t *weights, int32_t count,
                                   const gmm_gtp_quantization *quantization, gmm_stream stream);

/* Gathers a bundle before it is asked for, as chains do: the head of the first chain behind an optimizer step. Does
   nothing while its slot is in use.  Errors: as gmm_gtp_acquire. */
GMMDEF gmm_status gmm_gtp_prefetch(gmm_gtp *gtp, int32_t bundle, gmm_gtp_pass pass);

/* The gathered weights of a bundle: `stream` waits until they are complete, and they stay valid until the release,
   which declares that the work enqueued on `stream` so far has read them. The next bundles of the chain are gathered
   ahead.
   Errors: GMM_E_ARG, GMM_E_NULL, GMM_E_VERSION; GMM_E_STATE (not bound; acquired twice, released without; the slot
       holds another bundle that the caller has not released); GMM_E_CAPTURE (a bundle of chains that are not captured);
       GMM_E_COMM, those of the runtime. */
GMMDEF gmm_status gmm_gtp_acquire(gmm_gtp *gtp, int32_t bundle, gmm_gtp_pass pass, gmm_stream stream,
                                  gmm_gtp_view *view);
GMMDEF gmm_status gmm_gtp_release(gmm_gtp *gtp, int32_t bundle, gmm_gtp_pass pass, gmm_stream stream);

/* A buffer for the gradient of a bundle, in the wire dtype, that `stream` may write; its rows are logical, every one of
   them must be written, and the padding behind them is zero and must stay so. It is the caller's until submit.
   Errors: as gmm_gtp_acquire; GMM_E_STATE (frozen; asked twice before submit; in use by another bundle: too few slots,
       in a graph or without). */
GMMDEF gmm_status gmm_gtp_wgrad(gmm_gtp *gtp, int32_t bundle, gmm_stream stream, gmm_gtp_view *view);

/* Reduces a gradient that `stream` was given into main_grad, on the reduce stream. May come any time after the GEMM, as
   delayed weight gradients do, and any number of times for a bundle. Collective: a rank without tokens calls it too.
   Errors: as gmm_gtp_acquire; GMM_E_STATE (no buffer was asked for), GMM_E_DTYPE, GMM_E_STRIDE, GMM_E_ALIGN. */
GMMDEF gmm_status gmm_gtp_submit(gmm_gtp *gtp, int32_t bundle, const gmm_gtp_gradient *gradient, gmm_stream stream);

enum { GMM_GTP_GATHERS = 1u, GMM_GTP_GRADIENTS = 2u, GMM_GTP_ALL = 3u };

/* `stream` waits: for all gathers so far, so that shards may be written; for all submitted gradients, so that every
   main_grad is complete; either way for replays that post_replay has seen on other streams.
   Errors: GMM_E_ARG, GMM_E_STATE, those of the runtime. */
GMMDEF gmm_status gmm_gtp_fence(gmm_gtp *gtp, uint32_t what, gmm_stream stream);

/* Raises each value to the largest over a domain's ranks, in the order of `stream`: per-tensor amax, packed, once a
   step. Ranks that share the tensor otherwise (DP) go through their own communicator's all_reduce_max.
   Errors: as gmm_gtp_acquire. */
GMMDEF gmm_status gmm_gtp_amax(gmm_gtp *gtp, int32_t domain, float *values, int32_t count, gmm_stream stream);

/* Checks the collectives in flight (up to 256 of a stream), without waiting: GMM_E_COMM once one that has begun is not
   done after timeout_ms, or a communicator reports a failure. Call it repeatedly while the host waits for a stream.
   Errors: GMM_E_COMM, GMM_E_STATE, those of the runtime. */
GMMDEF gmm_status gmm_gtp_poll(gmm_gtp *gtp);

/* Dry run, to warm up before a capture: everything runs, but main_grad stays as it is and no callback is made. Ending
   it is GMM_E_STATE if a view is still held or a gradient not submitted, which it then forgets.
   Errors: GMM_E_STATE, GMM_E_CAPTURE. */
GMMDEF gmm_status gmm_gtp_dry_run(gmm_gtp *gtp, int32_t on);

/* A capture of what follows on `stream`, which has begun capturing; the object's own streams join it when they are
   first used, and are joined back at the end. Graphs get ids from 0. Before a replay pre_replay makes `stream` wait for
   shards published since and asks for those that the graph reads; behind it post_replay reports its gradients.
   Errors: GMM_E_STATE (nested; captured slots in use), GMM_E_CAPTURE (stream not capturing), GMM_E_WORKSPACE (more
       graphs than configured), GMM_E_ARG, those of the runtime. */
GMMDEF gmm_status gmm_gtp_capture_begin(gmm_gtp *gtp, gmm_stream stream, int32_t *graph);
GMMDEF gmm_status gmm_gtp_capture_end(gmm_gtp *gtp, gmm_stream stream);
GMMDEF gmm_status gmm_gtp_pre_replay(gmm_gtp *gtp, int32_t graph, gmm_stream stream);
GMMDEF gmm_status gmm_gtp_post_replay(gmm_gtp *gtp, int32_t graph, gmm_stream stream);

/* The counts so far. Errors: GMM_E_NULL, GMM_E_VERSION. */
GMMDEF gmm_status gmm_gtp_statistics_of(const gmm_gtp *gtp, gmm_gtp_statistics *out);

