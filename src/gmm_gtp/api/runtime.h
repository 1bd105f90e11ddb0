/* --------------------------------------------------------------------------------------------------- 10 Runtime --- */

/* The GTP runtime: all-gathers weights ahead of their use, and reduces gradients while the compute continues.
   Weights are declared and grouped into bundles (gathered and reduced together, such as a layer's local experts).
   Chains list the bundles in the order in which a pass reads them, so that the next ones are gathered meanwhile. Call
   seal, query the memory, bind it; then, per step and bundle:

       acquire(forward) ... GEMM ... release        a view of the gathered weights, valid between the two
       acquire(backward) ... dgrad ... release
       wgrad ... GEMM ... submit                    a buffer for the unsharded gradient, which is reduced into main_grad
       fence ... optimizer ... publish              main_grad is complete; new shards are declared

   Order       Every call enqueues and returns (with CPU ranks and stream NULL it may wait). All ranks make the same
               calls in the same order, also a rank without tokens. Gathers run on the domain's gather stream,
               reductions and their sums on its reduce stream, the caller's work on the streams that it passes.
   Buffers     Gathered weights and gradients are in slots. Every slot has an event of its last use, for which the next
               stream that uses it waits: any order of calls, number of slots and sharing of streams is correct. The
               content of a slot is identified by bundle, direction and version: a gather that is still valid is reused,
               an outdated one never. After bind, addresses depend on bundle and pass alone.
   Streams     Their handles tell them apart: a stream that was passed to a call is not destroyed before
               gmm_gtp_fini, unless the host has waited for it.
   Shards      Before it writes shards, a stream waits for the gathers that read them (fence); afterwards the caller
               publishes them.
   Formats     Quantized shards are gathered as elements and scales. They are quantized once, before they are published
               (gmm_gtp_quantize), in the directions that the format stores; the pass alone determines which direction
               is gathered. Gathered weights are bitwise those that one rank would have quantized from the unsharded
               matrix.
   g = 1       No communicator is called: views are the shards. Gradients go through the same buffers, since scale and
               accumulation are the same. TENSOR and 128X128 are transposed for backward on the caller's stream.
   Graphs      Between capture_begin and capture_end only acquire, release, prefetch, view_part, wgrad, wgrad_part,
               submit, fence and follow may be called. Chains declare beforehand which bundles are captured. A graph
               uses the slot contents of the graph before it only where that one has prefetched them; such graphs are
               replayed in the order of their capture. Communication of replays and of calls outside of graphs is
               serialized.
   Errors      Everything that can be checked is checked before anything is enqueued, and such an error leaves the state
               unchanged. After a later failure, such as one of a communicator, the object is unusable: every later call
               but fini, memory_need, statistics_of and last_error returns the same status, nothing more is enqueued,
               and give_up of its communicators is called.
               gmm_gtp_last_error names the operation and the rank.
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

/* Callbacks. Reductions of token counts, losses and expert load are the caller's: their group includes the GTP peers,
   which see different tokens (gmm_grid_group_of). */
typedef struct gmm_gtp_hooks {
    void *user;
    /* The shards of these weights are about to be read for a forward: the caller publishes them now if it has not yet.
       Once per bundle and forward; for a graph from gmm_gtp_pre_replay. While another pass holds a bundle it must not
       be published: the acquire that called this would fail. NULL = not wanted. */
    void (*need)(void *user, gmm_gtp *gtp, const int32_t *weights, int32_t count);
    /* The sum into main_grad of these weights, a whole bundle, has been enqueued: later work on `stream` reads its
       result. Once per submit; for a graph from gmm_gtp_post_replay. NULL = not wanted. */
    void (*ready)(void *user, gmm_gtp *gtp, const int32_t *weights, int32_t count, gmm_stream stream);
} gmm_gtp_hooks;

typedef struct gmm_gtp_config {
    uint32_t struct_size;
    int32_t domains, weights, bundles, chains, graphs; /* maximum numbers of declarations: at most 2^20 of each, and
                                   4096 graphs; domains 0 = 1 */
    int32_t timeout_ms;         /* of a collective that has begun, see gmm_gtp_poll; 0 = 10000 */
    gmm_context *ctx;           /* for sums and quantization; with CPU ranks not shared with other code */
    const gmm_runtime *runtime; /* copied; NULL = that of ctx. It may lack stream_create, stream_destroy, stream_sync
                                   and event_sync */
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

/* The ranks among which weights are sharded, and the streams of their communication. Dense and expert weights are two
   domains with groups of different sizes. Gathers and reductions run concurrently only with two communicators: one
   communicator is called on one stream, also by several domains. */
typedef struct gmm_gtp_domain {
    uint32_t struct_size;
    gmm_dtype wire;             /* of reductions and gradient buffers: F32 or BF16; NONE = F32 */
    const gmm_comm *gather;     /* copied; NULL = one rank */
    const gmm_comm *reduce;     /* copied; NULL = gather's; reduce_stream is then gather_stream or NULL */
    gmm_stream gather_stream, reduce_stream;
    gmm_gtp_reduction reduction;
    int32_t wgrad_slots;        /* gradient buffers of one size, at most one per bundle; 0 = 2 */
    int32_t synchronous;        /* 1: submit makes the caller's stream wait for the sum, for measuring the overlap */
    int32_t reserved;
} gmm_gtp_domain;

typedef struct gmm_gtp_weight {
    uint32_t struct_size;
    int32_t expert;             /* index in its bundle; 0 in a bundle of one weight */
    const char *name;           /* for messages; valid as long as the object */
    const gmm_shard *shard;     /* copied; its group is the domain's */
    void *data[2];              /* the shard by gmm_direction, as gmm_gtp_plan sizes it; [COLUMNWISE] NULL where the
                                   plan has 0 bytes. Padding rows are zeros */
    void *scale[2];             /* its scales, COMPACT; TENSOR: one value in [ROWWISE], the same on all ranks */
    float *amax;                /* NV16: global amax, the same on all ranks; those of a bundle are contiguous, in the
                                   order of experts. TENSOR, not delayed: gmm_gtp_quantize writes it; views do not
                                   contain it; may be NULL */
    void *main_grad;            /* [shard_rows, local_cols], dense; NULL = frozen, on all ranks alike */
    gmm_dtype main_grad_dtype;  /* F32 or BF16 */
    int32_t reserved;
    const gmm_format *format;   /* of the shards that gmm_gtp_quantize writes, copied; NULL = the caller writes them.
                                   Scales in COMPACT order; not stochastic, hadamard or row_amax, whose bits would
                                   depend on the boundaries of shards */
} gmm_gtp_weight;

typedef struct gmm_gtp_chain {
    uint32_t struct_size;
    gmm_gtp_pass pass;
    const int32_t *bundles;     /* [count] in the order of the pass; a bundle is in one chain of a pass at most */
    int32_t count;              /* >= 1 */
    int32_t prefetch;           /* bundles gathered ahead, 0 to 3 */
    int32_t held;               /* bundles that the caller holds at a time; 0 = 1 */
    int32_t captured;           /* 1: for graphs; may also run outside of captures before, to warm up */
    int32_t together;           /* bundles of one domain that one group call gathers, 0 to 8; 0 = 1. Positions 0 to
                                   together - 1 of the chain are one call, the next `together` the next. All chains
                                   take the largest together - 1 more slots of each kind, and this one a stage for
                                   `together` bundles */
    int32_t reserved;           /* 0 */
} gmm_gtp_chain;

/* Matrices of a bundle in the order of expert indices: packed if all have one shape and equal distances, otherwise a
   host table of addresses that stays valid. `mat` is ready for gmm_linear.w, gmm_mlp.w1 or w2, or gmm_grad.mat: its
   rows are the logical ones, with padding behind them. In backward a quantized mat has only its columnwise copy, in
   mat.columnwise, which dgrad reads: gathered in formats that store one (1X128, MX32, NV16), for TENSOR and 128X128 a
   transpose of the rowwise one. Scales of TENSOR and amaxes of NV16 have the values that they had when the bundle
   was gathered. In a table of several shapes mat.ld is that of the first matrix; gmm_gtp_view_part gives those of
   one shape as an operand of their own, such as the FC1 of all experts, followed by their FC2, for an MLP. */
typedef struct gmm_gtp_view {
    uint32_t struct_size;
    int32_t count;
    gmm_mat mat;
    int64_t rows, cols;         /* of the first matrix */
    int64_t version;            /* how often its shards were published */
    int32_t slot;               /* the buffer; -1 = the shards themselves */
    int32_t leave;              /* multiprocessors that a GEMM over the view should leave to concurrent gathers and
                                   reductions: gmm_options.sm_limit = the GPU's number less this. 0 = none */
} gmm_gtp_view;

typedef enum gmm_gtp_add { GMM_GTP_ADD = 0, GMM_GTP_SET = 1, GMM_GTP_ADD_MAX = 0x7fffffff } gmm_gtp_add;

typedef struct gmm_gtp_gradient {
    uint32_t struct_size;
    float scale;                /* main_grad = scale * sum (+ main_grad), in fp32; 0 means 0, not a default */
    gmm_gtp_add add;
    int32_t zero;               /* 1: this rank had no tokens and its gradient is zero; gmm_gtp_wgrad was not called */
    const gmm_mat *from;        /* the gradient, [count] matrices of rows x cols in F32, BF16 or F16, instead of the
                                   buffer of gmm_gtp_wgrad; not written. NULL = the buffer. A table is on the host */
} gmm_gtp_gradient;

/* Bytes of a domain's two memory blocks, one for the windows of each communicator. Aligned to 256. The first contains
   the gather slots, the stage that receives parts which are then copied side by side or transposed, and the workspace
   of gmm_gtp_quantize. */
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
    int64_t prefetched;         /* acquires whose weights a prefetch had gathered */
    int64_t resident;           /* acquires whose weights were in the slot from an earlier acquire, or g = 1 */
    int64_t exposed;            /* acquires that gathered */
    int64_t gathers;            /* prefetches and exposed */
    int64_t prefetches;
    int64_t outdated;           /* prefetches discarded because newer shards were published; those that an acquire of
                                   another bundle discards, out of the chain's order, are not counted */
    int64_t busy;               /* prefetches skipped because the slot was in use */
    int64_t transposed;         /* gathers that transposed a resident rowwise copy (g = 1: the shard) */
    int64_t submits;
    int64_t gathered_bytes, reduced_bytes; /* that other ranks sent here */
    uint64_t calls;             /* hash of the calls so far that all ranks make alike: acquire, prefetch, submit,
                                   publish, quantize, amax, follow, captures and replays */
} gmm_gtp_statistics;

/* Bytes of the object for a configuration, and the object in memory aligned to 16 bytes.
   Errors: GMM_E_NULL (also: a runtime that lacks a function), GMM_E_VERSION, GMM_E_ARG, GMM_E_CONFIG (ctx and runtime
       are of two memory spaces), GMM_E_WORKSPACE, GMM_E_ALIGN. */
GMMDEF gmm_status gmm_gtp_query(const gmm_gtp_config *config, size_t *bytes, gmm_error *error);
GMMDEF gmm_status gmm_gtp_init(void *memory, size_t bytes, const gmm_gtp_config *config, gmm_gtp **out,
                               gmm_error *error);
/* Ends the use of memory, events and windows; work must be done. NULL is allowed.  Errors: those of the runtime. */
GMMDEF gmm_status gmm_gtp_fini(gmm_gtp *gtp);
/* Message of the last failed call; "" before any. */
GMMDEF const char *gmm_gtp_last_error(const gmm_gtp *gtp);

/* Declarations; ids count from 0, and an id must exist before it is used. Descriptors are copied.
   The weights of a bundle may be listed in any order: their expert indices must be 0 to count - 1, each once, and they
   share dtype and scaling; quantized ones of one shape also the unit. Every weight is in one bundle. A bundle's name is
   the same on all ranks; CPU ranks distinguish bundles of one size by it. NULL is "bundle".
   Errors: GMM_E_NULL, GMM_E_VERSION, GMM_E_ARG, GMM_E_DTYPE, GMM_E_ALIGN, as gmm_gtp_plan; GMM_E_CONFIG (also: one
       communicator on several streams; a bundle in two chains of a pass, or in captured and other chains; bundles of
       several domains gathered together); GMM_E_WORKSPACE (more than configured); GMM_E_STATE (sealed). */
GMMDEF gmm_status gmm_gtp_add_domain(gmm_gtp *gtp, const gmm_gtp_domain *domain, int32_t *id);
GMMDEF gmm_status gmm_gtp_add_weight(gmm_gtp *gtp, const gmm_gtp_weight *weight, int32_t *id);
GMMDEF gmm_status gmm_gtp_add_bundle(gmm_gtp *gtp, int32_t domain, const int32_t *weights, int32_t count,
                                     const char *name, int32_t *id);
GMMDEF gmm_status gmm_gtp_add_chain(gmm_gtp *gtp, const gmm_gtp_chain *chain, int32_t *id);

/* gmm_gtp_seal ends the declarations and lays out the memory. gmm_gtp_memory_need gives the bytes of a domain.
   gmm_gtp_bind sets its memory; where the communicators register windows it is collective, and all ranks bind the same
   blocks of the domain. Bytes of 0 take NULL. The blocks of all domains share no bytes with each other, with shards or
   with main_grads.
   Errors: GMM_E_STATE, GMM_E_CONFIG (a weight in no bundle), GMM_E_OVERFLOW (buffers whose bytes do not fit 64 bits),
       those of gmm_accumulate_query and gmm_quantize_query, GMM_E_WORKSPACE, GMM_E_ALIGN, GMM_E_ARG (also: blocks
       overlap), GMM_E_NULL, GMM_E_VERSION, GMM_E_COMM, those of the runtime. */
GMMDEF gmm_status gmm_gtp_seal(gmm_gtp *gtp);
GMMDEF gmm_status gmm_gtp_memory_need(gmm_gtp *gtp, int32_t domain, gmm_gtp_need *need);
GMMDEF gmm_status gmm_gtp_bind(gmm_gtp *gtp, int32_t domain, void *gather, size_t gather_bytes, void *reduce,
                               size_t reduce_bytes);

/* Declares the chain that runs after a chain: the first bundles of `next` are gathered while the last ones of `chain`
   are computed, such as those of backward after forward, or of forward after backward within a step. -1 = none, the
   default: use it before an optimizer step, whose new shards would make the gather useless. gmm_gtp_seal sizes slots by
   the calls made until then, the same on all ranks: a forward chain that follows itself, as in inference or while a
   pipeline fills, takes count % (held + prefetch) more slots than held + prefetch, if it has as many bundles. A first
   bundle that shares its slot with a last one is not gathered ahead.
   Errors: GMM_E_ARG, GMM_E_CAPTURE. */
GMMDEF gmm_status gmm_gtp_follow(gmm_gtp *gtp, int32_t chain, int32_t next);

/* Declares that the work enqueued on `stream` so far has written the shards of these weights. Gathers wait for it.
   Errors: GMM_E_NULL, GMM_E_ARG, GMM_E_STATE, GMM_E_CAPTURE, those of the runtime. */
GMMDEF gmm_status gmm_gtp_publish(gmm_gtp *gtp, const int32_t *weights, int32_t count, gmm_stream stream);

/* Quantizes the rows of shards in a wider dtype, and publishes the shards: waits for gathers as gmm_gtp_fence does,
   computes the amaxes of tensors that need one (TENSOR unless delayed, NV16) over all ranks of the domain in one packed
   reduction, and writes elements, scales and amax in every direction that the plan stores. Weights without a scaling
   are converted. Collective: all ranks pass the same weights in the same order. For any number of ranks the bits are
   those of quantizing the unsharded matrix.
   Shapes: from [count] matrices [shard_rows, local_cols], dense, padding rows zeros. */
typedef struct gmm_gtp_quantization {
    uint32_t struct_size;
    gmm_dtype dtype;            /* of the rows: F32, F16 or BF16 */
    const void *const *from;    /* [count] addresses, on the host */
    const float *scale;         /* [count] delayed: quantization scales, in the context's memory; NULL = ones */
    float *amax;                /* [count] delayed: raised to the maximum over all ranks, in the context's memory; NULL
                                   = not wanted */
    const gmm_comm *also;       /* further ranks that share the amaxes, such as tensor-parallel ones; NULL = none. It is
                                   called on the domain's gather stream, or on `stream` where a domain has one rank.
                                   gmm_gtp_poll does not monitor it. If a call of it fails, the object fails, and its
                                   give_up is called too */
} gmm_gtp_quantization;

/* Errors: as gmm_gtp_publish; GMM_E_NULL, GMM_E_VERSION, GMM_E_ARG, GMM_E_DTYPE, GMM_E_ALIGN, GMM_E_CONFIG (a
       quantized weight without a format), GMM_E_COMM. */
GMMDEF gmm_status gmm_gtp_quantize(gmm_gtp *gtp, const int32_t *weights, int32_t count,
                                   const gmm_gtp_quantization *quantization, gmm_stream stream);

/* Gathers a bundle before it is acquired, as chains do; for the first bundles after an optimizer step. Does nothing
   while its slot is in use.  Errors: as gmm_gtp_acquire. */
GMMDEF gmm_status gmm_gtp_prefetch(gmm_gtp *gtp, int32_t bundle, gmm_gtp_pass pass);

/* The gathered weights of a bundle: `stream` waits until they are complete, and they stay valid until the release,
   which declares that only work enqueued on `stream` so far reads them. The next bundles of the chain are gathered
   ahead.
   Errors: GMM_E_ARG, GMM_E_NULL, GMM_E_VERSION; GMM_E_STATE (not bound; acquired twice, released without; the slot
       holds another bundle that the caller has not released); GMM_E_CAPTURE (a bundle of chains that are not captured);
       GMM_E_COMM, those of the runtime. */
GMMDEF gmm_status gmm_gtp_acquire(gmm_gtp *gtp, int32_t bundle, gmm_gtp_pass pass, gmm_stream stream,
                                  gmm_gtp_view *view);
GMMDEF gmm_status gmm_gtp_release(gmm_gtp *gtp, int32_t bundle, gmm_gtp_pass pass, gmm_stream stream);

/* The matrices first to first + count - 1 of an acquired bundle, which have one shape, in a view of their own that is
   valid until the release, or until another part of that pass that begins with the same matrix. Enqueues nothing.
   Errors: as gmm_gtp_acquire; GMM_E_STATE (not acquired), GMM_E_CONFIG (several shapes). */
GMMDEF gmm_status gmm_gtp_view_part(gmm_gtp *gtp, int32_t bundle, gmm_gtp_pass pass, int32_t first, int32_t count,
                                    gmm_gtp_view *part);

/* A buffer for the gradient of a bundle, in the wire dtype, that `stream` may write. Its rows are the logical ones, all
   of which must be written; the padding behind them is zero and must remain zero. It is the caller's until submit.
   Errors: as gmm_gtp_acquire; GMM_E_STATE (frozen; called twice before submit; in use by another bundle: too few slots,
       in a graph or outside). */
GMMDEF gmm_status gmm_gtp_wgrad(gmm_gtp *gtp, int32_t bundle, gmm_stream stream, gmm_gtp_view *view);
/* The gradients first to first + count - 1 of the bundle, of one shape, between gmm_gtp_wgrad and gmm_gtp_submit.
   Errors: as gmm_gtp_view_part. */
GMMDEF gmm_status gmm_gtp_wgrad_part(gmm_gtp *gtp, int32_t bundle, int32_t first, int32_t count, gmm_gtp_view *part);

/* Reduces a gradient, which work enqueued on `stream` computes, into main_grad on the reduce stream. It may be called
   at any time after the GEMM was enqueued, as with delayed weight gradients, and any number of times for a bundle.
   Collective: a rank without tokens calls it too.
   Errors: as gmm_gtp_acquire; GMM_E_STATE (gmm_gtp_wgrad was not called; or it was, with zero or from),
       GMM_E_DTYPE, GMM_E_STRIDE, GMM_E_OVERFLOW, GMM_E_ALIGN. */
GMMDEF gmm_status gmm_gtp_submit(gmm_gtp *gtp, int32_t bundle, const gmm_gtp_gradient *gradient, gmm_stream stream);

enum { GMM_GTP_GATHERS = 1u, GMM_GTP_GRADIENTS = 2u, GMM_GTP_ALL = 3u };

/* Makes `stream` wait: GMM_GTP_GATHERS for all gathers so far, so that shards may be written; GMM_GTP_GRADIENTS for all
   submitted gradients, so that every main_grad is complete. Either also makes it wait for the replays that
   gmm_gtp_post_replay has reported on other streams.
   Errors: GMM_E_ARG, GMM_E_STATE, those of the runtime. */
GMMDEF gmm_status gmm_gtp_fence(gmm_gtp *gtp, uint32_t what, gmm_stream stream);

/* Raises each value to its maximum over a domain's ranks, in the order of `stream`: for packed per-tensor amaxes, once
   a step. Other ranks that share the tensor (DP) use all_reduce_max of their own communicator.
   Errors: as gmm_gtp_acquire; GMM_E_ALIGN, GMM_E_CAPTURE (in a capture). */
GMMDEF gmm_status gmm_gtp_amax(gmm_gtp *gtp, int32_t domain, float *values, int32_t count, gmm_stream stream);

/* Checks the collectives in flight (up to 256 of a stream), without waiting for them: GMM_E_COMM if one has run longer
   than timeout_ms, counted from the first poll that finds it begun, or a communicator reports a failure. Call it
   repeatedly while the host waits for a stream.
   Errors: GMM_E_COMM, GMM_E_STATE, GMM_E_CAPTURE, those of the runtime. */
GMMDEF gmm_status gmm_gtp_poll(gmm_gtp *gtp);

/* Begins (on 1) or ends a dry run, to warm up before a capture: everything runs, but main_grad is not changed and no
   callback is called. Ending it while a view is held or a gradient not submitted is GMM_E_STATE.
   Errors: GMM_E_STATE, GMM_E_CAPTURE. */
GMMDEF gmm_status gmm_gtp_dry_run(gmm_gtp *gtp, int32_t on);

/* Captures the following calls on `stream`, which has begun capturing; the domains' streams join the capture when they
   are first used, and are joined back at the end. Graphs get ids from 0. When a capture begins or ends, and before a
   replay, the caller holds no view of a bundle in captured chains, and has submitted its gradients. Before a replay,
   gmm_gtp_pre_replay makes `stream` wait for newly published shards and for gathers and reductions outside of graphs,
   and calls hooks.need for the shards that the graph reads; after it, gmm_gtp_post_replay calls hooks.ready for its
   gradients, and later gathers and reductions wait for the replay. Neither may be left out, and no other call is made
   between the two.
   Errors: GMM_E_STATE (nested; a view is held, or a gradient not submitted), GMM_E_CAPTURE (stream not capturing),
       GMM_E_WORKSPACE (more graphs than configured), GMM_E_NULL, GMM_E_ARG, those of the runtime. */
GMMDEF gmm_status gmm_gtp_capture_begin(gmm_gtp *gtp, gmm_stream stream, int32_t *graph);
GMMDEF gmm_status gmm_gtp_capture_end(gmm_gtp *gtp, gmm_stream stream);
GMMDEF gmm_status gmm_gtp_pre_replay(gmm_gtp *gtp, int32_t graph, gmm_stream stream);
GMMDEF gmm_status gmm_gtp_post_replay(gmm_gtp *gtp, int32_t graph, gmm_stream stream);

/* The counts so far. Errors: GMM_E_NULL, GMM_E_VERSION, GMM_E_ARG (struct_size). */
GMMDEF gmm_status gmm_gtp_statistics_of(const gmm_gtp *gtp, gmm_gtp_statistics *out);

