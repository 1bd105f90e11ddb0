/* Structures of the GTP runtime object.

   A bundle is gathered into a slot of its domain's gather block. Slots are of a kind: rowwise copies, columnwise
   copies, or rowwise copies for recomputation; bundles that no chain uses at the same time share a slot. The stage
   is a buffer behind the slots, for gathers whose bytes must be rearranged or transposed before they are in the
   slot. Gradients of a bundle are computed in a gradient slot of the reduce block. Slots, stages and gradient slots
   of bundles in captured chains are separate from those of the others, since replays of a graph use fixed addresses. */

/* ....................................................................................... Runtime: structures ... */

/* An event that streams wait for, inside and outside of captures. A record in a capture records two CUDA events:
   `captured_event` for waits in the same graph, and by an external node `external_event` for all other waits. A record
   outside of captures records `external_event` alone. */
typedef struct gmm__gtp_event {
    gmm_event captured_event, external_event;
    int32_t graph;              /* graph of the last record, counted from 1; 0 = outside of captures */
    int32_t recorded;           /* 1 after the first record */
    int32_t waited;             /* 1: stream `waiter` has waited since the last record, and need not wait again */
    gmm_stream recorder, waiter;
} gmm__gtp_event;

/* A collective or a replay that gmm_gtp_poll monitors. The collectives of a stream are stored in a ring. They run in
   order, so that only the oldest one that is not done can hang. A collective that finds the ring full is not
   monitored. */
enum { GMM__MAX_WATCHES = 256, GMM__MAX_EXCHANGE_RANKS = 256 };
typedef struct gmm__watch {
    gmm_event begin;
    gmm_event end;              /* NULL = nothing to monitor */
    int32_t begun;              /* 1: a poll has found that it has begun */
    double begin_time;          /* time of that poll in seconds, from which the timeout counts */
    const gmm_comm *comm;       /* NULL = a graph */
    const char *what, *name;    /* for messages: the collective, the bundle; of a graph `what` alone */
    int32_t replayed;           /* graphs: 1 = gmm_gtp_post_replay was called, */
    gmm_stream stream;          /* last with this stream */
} gmm__watch;

/* Layout of one buffer that is gathered from the shards of all ranks. Where the gathered buffer is the shards' bytes
   one after the other in the order of ranks, they are received in place. Otherwise they are received in the stage
   (`staged`), and one 2D copy per rank places their columns side by side. */
typedef struct gmm__gather_layout {
    size_t send_bytes;           /* bytes of a rank's shard; 0 = not sent */
    size_t gathered_bytes;
    size_t offset;               /* in the slot */
    size_t stage_offset;         /* in the stage: of a staged buffer, or of a rowwise copy that will be transposed */
    size_t group_bytes;          /* bytes between the weights of a bundle that an operation expects */
    int32_t staged, reserved;
    size_t width, height, src_pitch, dst_pitch; /* of the 2D copy of a rank */
    size_t valid_width;          /* bytes of a destination row that ranks fill; zeros follow */
} gmm__gather_layout;

enum { GMM__SLOT_ROWWISE, GMM__SLOT_COLUMNWISE, GMM__SLOT_RECOMPUTE, GMM__SLOT_KINDS }; /* RECOMPUTE: rowwise copies */
enum { GMM__GTP_DATA, GMM__GTP_SCALE };

typedef struct gmm__gtp_weight {
    gmm_gtp_weight desc;
    gmm_shard shard;
    gmm_shard_plan plan;
    gmm_format format;           /* dtype NONE = none */
    gmm__gather_layout layout[2][2]; /* [direction][DATA, SCALE] */
    int64_t ld[2];               /* of a gathered copy; 0 = the default */
    int32_t bundle;              /* -1 = none yet */
    int32_t transposed;          /* 1: the columnwise copy is a transpose of the rowwise one */
    size_t grad_offset;          /* in the gradient buffer */
    gmm_mat columnwise;          /* the target of mat.columnwise in backward parts that begin with this weight */
} gmm__gtp_weight;

/* A buffer for the gathered weights of a bundle. */
typedef struct gmm__gtp_slot {
    char *base;
    size_t offset, bytes;        /* in the domain's gather block */
    int32_t domain, kind, captured;
    int32_t bundle;              /* whose weights the slot contains; -1 = none */
    int32_t graph;               /* the graph that gathered them, counted from 1; 0 = outside of captures */
    int32_t pending;             /* not 0: prefetched and not acquired yet; 1 = gathered, 2 = was resident already */
    uint32_t acquired;           /* a bit per pass: acquired, and not released yet */
    int32_t read;                /* 1: read since it was gathered, */
    gmm_stream reader;           /* last on this stream */
    int64_t version;             /* of the bundle's weights in the slot */
    gmm__gtp_event ready;        /* the gather into the slot is done */
    gmm__gtp_event last_use;     /* all reads up to the last release are done */
} gmm__gtp_slot;

/* A buffer for the gradients of a bundle. */
typedef struct gmm__wgrad_slot {
    char *base;
    size_t offset, bytes;        /* in the domain's reduce block */
    int32_t domain, captured;
    int32_t writer;              /* bundle between gmm_gtp_wgrad and gmm_gtp_submit; -1 = none */
    gmm__gtp_event last_use;
} gmm__wgrad_slot;

typedef struct gmm__gtp_bundle {
    const char *name;
    int32_t domain, first, count;  /* members[first .. first + count) */
    int32_t trainable;             /* number of weights with a main_grad */
    int32_t captured;              /* 1: its chains are captured */
    int32_t publish_requested;     /* 1: hooks.need was called for the next forward */
    int32_t slot[GMM_GTP_PASSES];  /* -1 = none: the shards are read in place */
    int32_t chain[GMM_GTP_PASSES], position[GMM_GTP_PASSES]; /* -1 = none */
    int32_t wgrad_slot;            /* -1 = frozen */
    uint32_t acquired;             /* a bit per pass: acquired, and not released yet */
    int64_t version;               /* number of publications */
    gmm_mat columnwise;            /* the target of mat.columnwise in backward views */
    size_t amax_offset[2];         /* NV16: amaxes in a slot, by direction */
    size_t slot_bytes[GMM__SLOT_KINDS], grad_bytes;
    size_t stage_bytes[2];         /* of the stage, by direction */
    size_t stage_offset[GMM_GTP_PASSES]; /* of a gather, in the stage: bundles gathered together use parts of it */
    gmm__gtp_event published;      /* the shards have been written */
    gmm__gtp_event done;           /* the gradients have been added to main_grad */
    gmm__gtp_event in_place;       /* all reads of the shards themselves are done, */
    gmm_stream reader;             /* the last of them on this stream */
} gmm__gtp_bundle;

typedef struct gmm__gtp_chain {
    gmm_gtp_pass pass;
    int32_t first, count;          /* chain_bundles[first .. first + count) */
    int32_t prefetch, held, captured, next, together;
} gmm__gtp_chain;

/* Arrays of two are indexed by GMM__GTP_GATHER and GMM__GTP_REDUCE, those of the stage (stage_offset, stage_bytes,
   staged) by whether the bundle is in captured chains. */
typedef struct gmm__gtp_domain {
    gmm_gtp_domain desc;
    gmm_comm gather, reduce;     /* with one rank no function of theirs is called */
    int32_t size, rank, bound;
    int32_t joined_graph[2];     /* the last capture that the stream joined, counted from 1 */
    int32_t used[2];             /* 1: the stream was given work outside of captures since the last replay that uses it,
                                    so that fences and replays have to wait for it */
    size_t gather_bytes, reduce_bytes, recv_offset, workspace_offset, workspace_bytes;
    size_t stage_offset[2], stage_bytes[2];
    gmm__gtp_event staged[2];    /* the last gather that used the stage is done; the next one waits for that */
    size_t amax_offset, cast_offset, cast_bytes; /* gmm_gtp_quantize: amaxes of the domain's weights, workspace */
    gmm__gtp_event cast;         /* the last gmm_gtp_quantize has used these */
    char *gather_base, *reduce_base;
    void *window[2];
    gmm_event fork[2], join[2];
    gmm__watch watch[2][GMM__MAX_WATCHES];
    gmm_event watch_end[2][GMM__MAX_WATCHES];
    uint32_t oldest[2], next[2]; /* of the rings: counters that are taken modulo the ring's size */
} gmm__gtp_domain;

enum { GMM__GTP_GATHER, GMM__GTP_REDUCE };
static gmm_stream gmm__gtp_stream(const gmm__gtp_domain *d, int role) {
    return role == GMM__GTP_GATHER ? d->desc.gather_stream : d->desc.reduce_stream;
}

/* How a graph uses a bundle: it needs newly published shards (hooks.need), reads shards, reduces gradients. */
enum { GMM__GRAPH_NEEDS = 1, GMM__GRAPH_READS = 2, GMM__GRAPH_REDUCES = 4 };

struct gmm_gtp {
    gmm_gtp_config config;
    gmm_runtime runtime;
    gmm_error error;
    gmm_status failed;           /* the failure that ended the object's use; GMM_OK = none */
    const char *collective;      /* the one being called, by rank caller[0] of caller[1]; NULL = none */
    const gmm_comm *further;     /* gmm_gtp_quantization.also while it is being called; else NULL */
    int32_t caller[2];
    int32_t sealed, active, finished, in_callback, dry_run; /* active: the memory of all domains is bound */
    int32_t domain_count, weight_count, bundle_count, chain_count, graph_count, member_count, chain_bundle_count;
    int32_t slot_count, wgrad_slot_count;
    int32_t graph;               /* the graph being captured, counted from 1; 0 = none */
    gmm_stream graph_stream;     /* the stream on which that capture began */
    gmm_event graph_begin;       /* recorded there, for streams that join the capture */
    gmm__gtp_domain *domains;
    gmm__gtp_weight *weights;
    gmm__gtp_bundle *bundles;
    gmm__gtp_chain *chains;
    gmm__gtp_slot *slots;        /* [3 bundles] */
    gmm__wgrad_slot *wgrad_slots; /* [bundles] */
    gmm__watch *graph_watch;     /* [graphs] */
    gmm_event *graph_end;        /* [graphs] */
    int32_t *members, *chain_bundles; /* [weights], [3 bundles] */
    /* addresses that views refer to, [weights] in the order of members: of data, scales and gradients */
    void **table[GMM_GTP_PASSES], **scales[GMM_GTP_PASSES], **grads;
    unsigned char *graph_usage;  /* [graphs][bundles] */
    gmm_gtp_statistics stats;
};

