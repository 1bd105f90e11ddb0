/* ....................................................................................... Runtime: what it holds ... */

/* A point on a stream that others wait for. In a capture it is an event inside of the graph for the graph itself, and a
   node that records one outside for everybody else. */
typedef struct gmm__mark {
    gmm_event inside, outside;
    int32_t graph; /* in which it was recorded, counted from 1; 0 = in none */
    int32_t set;
    int32_t waited;             /* `waiter` has waited since: once is enough */
    gmm_stream recorder, waiter;
} gmm__mark;

/* A collective that gmm_gtp_poll looks after. Those of a stream stand in a ring, in which the oldest that is not done
   is the one that may hang; what does not fit while so many are under way is not looked after. */
enum { GMM__WATCHES = 256, GMM__GTP_PARTS = 256 }; /* parts: ranks that exchange */
typedef struct gmm__watch {
    gmm_event begin;
    gmm_event end;      /* NULL = nothing to look after */
    int32_t seen;       /* it has been seen to have begun, */
    double since;       /* at this time */
    const gmm_comm *comm; /* NULL: a graph */
    const char *what, *name;
    int32_t replayed;   /* of a graph: behind post_replay, on this stream */
    gmm_stream stream;
} gmm__watch;

/* How the shards of one buffer become its gathered form: sent bytes one behind the other are it already, or they are
   staged, and every rank's columns are put side by side, as far as the whole reaches. */
typedef struct gmm__route {
    size_t send, whole;          /* bytes of a rank (0 = not sent), of the gathered buffer */
    size_t at, stage;            /* offsets in the slot, in the stage; of a transposed weight's rowwise copy, too */
    size_t even;                 /* bytes that an operation expects from matrix to matrix */
    int32_t staged, reserved;
    size_t width, limit, height, src_pitch, dst_pitch; /* limit: bytes of a row that ranks fill */
} gmm__route;

enum { GMM__GTP_ROW, GMM__GTP_COL, GMM__GTP_REC, GMM__GTP_CLASSES }; /* what slots hold; REC: rowwise, of recompute */
enum { GMM__GTP_DATA, GMM__GTP_SCALE };

typedef struct gmm__gtp_weight {
    gmm_gtp_weight desc;
    gmm_shard shard;
    gmm_shard_plan plan;
    gmm_format format;           /* dtype NONE = none */
    gmm__route route[2][2];      /* [direction][DATA, SCALE] */
    int64_t ld[2];               /* of a gathered copy; 0 = the default */
    int32_t bundle;              /* -1 = none yet */
    int32_t transposed;          /* the columnwise copy is made of the rowwise one */
    size_t grad_at;              /* offset in the gradient buffer */
} gmm__gtp_weight;

typedef struct gmm__gtp_slot {
    char *base;
    size_t at, bytes;            /* in the domain's block */
    int32_t domain, kind, captured;
    int32_t bundle;              /* whose content; -1 = none */
    int32_t graph;               /* that gathered it; 0 = none, eager */
    int32_t pending;             /* wanted by a prefetch, not yet acquired: 1 = gathered for it, 2 = was there */
    uint32_t holders;            /* a bit per pass */
    int32_t read;                /* since it was gathered, */
    gmm_stream reader;           /* last on this stream */
    int64_t version;
    gmm__mark ready, last_use;
} gmm__gtp_slot;

typedef struct gmm__wgrad_slot {
    char *base;
    size_t at, bytes;
    int32_t domain, captured, writer; /* writer: bundle that has it; -1 = none */
    gmm__mark last_use;
} gmm__wgrad_slot;

typedef struct gmm__gtp_bundle {
    const char *name;
    int32_t domain, first, count;  /* members[first .. first + count) */
    int32_t uniform, trainable, captured;
    int32_t asked;                 /* its owner has been asked to publish for the coming forward */
    int32_t slot[GMM_GTP_PASSES];  /* -1 = in place, or none */
    int32_t chain[GMM_GTP_PASSES], place[GMM_GTP_PASSES]; /* -1 = none */
    int32_t wslot;
    uint32_t held;                 /* a bit per pass */
    int64_t version;
    gmm_mat columnwise;            /* what views of backward point to */
    size_t amax_at[2];             /* NV16: offset in a slot, by direction */
    size_t slot_bytes[GMM__GTP_CLASSES], grad_bytes;
    gmm__mark published, done, in_place; /* in_place: the last release of unsharded weights */
    gmm_stream reader;
} gmm__gtp_bundle;

typedef struct gmm__gtp_chain {
    gmm_gtp_pass pass;
    int32_t first, count, prefetch, held, captured, next;
} gmm__gtp_chain;

typedef struct gmm__gtp_domain {
    gmm_gtp_domain desc;
    gmm_comm gather, reduce;     /* size 1: no function is called */
    int32_t size, rank, bound;
    int32_t joined[2];           /* the capture that the streams have joined, counted from 1 */
    int32_t used[2];             /* a fence has something to wait for */
    size_t gather_bytes, reduce_bytes, recv_at, work_at, work_bytes;
    size_t stage_at[2], stage_bytes[2]; /* outside of graphs, and in them: gathers follow one another there */
    gmm__mark staged[2];
    size_t amax_at, cast_at, cast_bytes; /* of gmm_gtp_quantize: amaxes of the domain's weights, workspace */
    gmm__mark cast;
    char *gather_base, *reduce_base;
    void *window[2];
    gmm_event fork[2], join[2];
    gmm__watch watch[2][GMM__WATCHES];
    gmm_event watch_end[2][GMM__WATCHES];
    uint32_t oldest[2], next[2]; /* of the rings, counted on */
} gmm__gtp_domain;

enum { GMM__GRAPH_NEEDS = 1, GMM__GRAPH_READS = 2, GMM__GRAPH_ADDS = 4 }; /* what a graph does with a bundle */

struct gmm_gtp {
    gmm_gtp_config config;
    gmm_runtime rt;
    gmm_error error;
    gmm_status broken;
    const char *calls;           /* the collective that is being called, by rank caller[0] of caller[1]; NULL = none */
    int32_t caller[2];
    int32_t sealed, live, ended, calling_back, dry; /* live: all memory is bound */
    int32_t domain_count, weight_count, bundle_count, chain_count, graph_count, member_count, link_count;
    int32_t slot_count, wslot_count;
    int32_t graph;               /* the capture under way, counted from 1; 0 = none */
    gmm_stream graph_stream;
    gmm_event graph_begin;
    gmm__gtp_domain *domains;
    gmm__gtp_weight *weights;
    gmm__gtp_bundle *bundles;
    gmm__gtp_chain *chains;
    gmm__gtp_slot *slots;        /* [3 bundles] */
    gmm__wgrad_slot *wslots;     /* [bundles] */
    gmm__watch *graph_watch;     /* [graphs] */
    gmm_event *graph_end;        /* [graphs] */
    int32_t *members, *links;    /* [weights], [3 bundles] */
    void **table[GMM_GTP_PASSES], **scales[GMM_GTP_PASSES], **grads; /* [weights] in the order of members */
    unsigned char *graph_use;    /* [graphs][bundles] */
    gmm_gtp_statistics stats;
};


