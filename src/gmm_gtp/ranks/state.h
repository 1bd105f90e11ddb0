/* CPU ranks: streams, tokens of events, vector clocks, communicators and their memory. One thread or several drive the
   ranks; one mutex of the world protects everything here. An operation is queued on a stream, and runs when it is the
   head of its queue and ready.

   A vector clock has an entry per queue of the rank: the number of operations of that queue that are ordered before
   the present one. The race checker reports two accesses of which neither is ordered before the other. */

/* .................................................................................................... CPU ranks ... */

#ifdef GMM_WITH_CPU_RANKS

enum {
    GMM__MAX_CPU_RANKS = 98,
    GMM__RANK_QUEUES = 49,       /* most streams of a rank, stream NULL and those of graphs included */
    GMM__MAX_READY_QUEUES = 128  /* queues among which an operation is drawn: those of the first ranks that are ready */
};

/* One record of an event. A wait retains the token of the record that was the last one when the wait was enqueued. */
typedef struct gmm__token {
    int32_t references;
    int32_t done;           /* 1: the record has run, */
    uint32_t clock[GMM__RANK_QUEUES];
} gmm__token;

typedef struct gmm__rank_event {
    struct gmm__cpu_rank *rank;
    gmm__token *last;       /* of the last record outside of captures, or by a node of a graph; NULL = none */
    uint64_t capture;       /* serial of the capture that contains the last plain record; 0 = none */
    int32_t record_index;   /* of that record in the capture */
} gmm__rank_event;

typedef enum gmm__rank_kind {
    GMM__RANK_WORK, GMM__RANK_RECORD, GMM__RANK_WAIT, GMM__RANK_COLLECTIVE, GMM__RANK_LAUNCH
} gmm__rank_kind;

typedef enum gmm__coll_kind { GMM__COLL_ALL_GATHER, GMM__COLL_REDUCE_SCATTER, GMM__COLL_ALL_TO_ALL,
                             GMM__COLL_ALL_REDUCE_MAX } gmm__coll_kind;

/* One call of a collective; `bytes` is the size of one rank's part. */
typedef struct gmm__coll {
    gmm__coll_kind kind;
    gmm_dtype dtype;
    const void *send;
    void *recv;
    size_t bytes;
} gmm__coll;

/* A queued or captured operation. */
typedef struct gmm__rank_op {
    gmm__rank_kind kind;
    int32_t count;          /* of ranges, or of collective calls */
    const char *name;
    gmm__token *host;       /* clock of the enqueuing thread */
    void *memory;           /* ranges and argument, or collective calls, or a gmm__replay */
    size_t bytes;           /* of memory */
    gmm_status (*function)(const void *argument, gmm_stream stream);
    gmm__token *token;      /* RECORD, WAIT */
    gmm__rank_event *event; /* graphs: the event of an external node; NULL = a record of the graph itself, */
    int32_t record_index;   /* with this index */
    int32_t started;        /* LAUNCH: 1 = its operations are in the queues of the graph */
    struct gmm__member *member; /* COLLECTIVE */
    uint64_t number;        /* of the collective in its communicator */
    gmm_ranks_graph *graph;
} gmm__rank_op;

/* The operations of a stream, or of a stream that a graph replays. */
typedef struct gmm__rank_queue {
    struct gmm__cpu_rank *rank;
    int32_t index;
    int32_t captured_stream; /* queues of a graph: index of the stream whose work they replay; -1 = a stream */
    gmm_ranks_graph *graph; /* the capture that the stream belongs to */
    int32_t delayed;        /* 1: its operations are drawn last */
    gmm__rank_op *ops;
    size_t head, count, capacity; /* of the ring `ops` */
    uint32_t clock[GMM__RANK_QUEUES];
} gmm__rank_queue;

/* An access to memory that the race checker has recorded. */
typedef struct gmm__rank_access {
    uintptr_t begin, end;
    int32_t queue, writes;
    uint32_t time;          /* entry of its queue in the clock of the access */
    const char *name;
} gmm__rank_access;

typedef struct gmm__cpu_rank {
    struct gmm_ranks *world;
    int32_t index, given_up;
    uint64_t captures;      /* captures begun */
    gmm__rank_queue *queues[GMM__RANK_QUEUES];
    gmm_ranks_graph *capture; /* the capture under way; NULL = none */
    gmm__token *host;       /* copy of the clock of queue 0, for operations being enqueued */
    uint64_t progress;      /* operations done */
    gmm__rank_access *accesses;
    size_t access_count, access_capacity;
    gmm_error error;
    gmm_error reported;     /* the copy that gmm_ranks_error returned last */
} gmm__cpu_rank;

/* A communicator: the group is common to its ranks, and a member is the part of one rank. */
typedef struct gmm__group {
    struct gmm_ranks *world;
    struct gmm__group *next;
    int32_t size;
    uint64_t done;          /* collectives completed */
    struct gmm__member *members;
    gmm_error fault;        /* the failure that ended its use; status GMM_OK = none */
} gmm__group;

typedef struct gmm__member {
    gmm__group *group;
    gmm__cpu_rank *rank;
    int32_t index, open;
    uint64_t enqueued;      /* collectives enqueued */
    uint64_t captured;      /* collectives in the capture with this serial number, in the order of the calls */
    uint64_t capture_serial;
    const char *what;
    gmm_stream stream;
    gmm__coll *parts;       /* calls of the open group */
    int32_t count, capacity;
} gmm__member;

struct gmm_ranks_graph {
    gmm__cpu_rank *rank;
    gmm_stream origin;
    uint64_t serial;
    int32_t record_count;   /* plain records */
    int32_t running;        /* 1: a launch has started and is not done */
    int32_t queue_count;
    int32_t queues[GMM__RANK_QUEUES];    /* queues that replay the streams; the origin's is first */
    gmm__rank_op *ops[GMM__RANK_QUEUES]; /* their operations, which each launch copies */
    size_t count[GMM__RANK_QUEUES], capacity[GMM__RANK_QUEUES];
};

/* The operations of a launch that has not started. */
typedef struct gmm__replay {
    gmm__rank_op *ops[GMM__RANK_QUEUES];
    size_t count[GMM__RANK_QUEUES];
} gmm__replay;

struct gmm_ranks {
    gmm_ranks_config config;
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    uint64_t random;
    gmm__cpu_rank *rank;
    gmm__group *groups;
    int64_t races;          /* number of races found */
    char race[400];         /* description of the first one */
};

static void *gmm__ranks_alloc(gmm_ranks *w, size_t bytes) {
    void *p = w->config.allocator.alloc ? w->config.allocator.alloc(w->config.allocator.user, bytes)
                                        : GMM_MALLOC(bytes);
    if (p) memset(p, 0, bytes);
    return p;
}
static void gmm__ranks_free(gmm_ranks *w, void *p) {
    if (!p) return;
    if (w->config.allocator.release) w->config.allocator.release(w->config.allocator.user, p);
    else GMM_FREE(p);
}
/* Grows an array to hold one more element; 0 = no memory. */
static int gmm__ranks_grow(gmm_ranks *w, void **items, size_t count, size_t *capacity, size_t size) {
    const size_t new_capacity = *capacity ? 2 * *capacity : 16;
    void *p;
    if (count < *capacity) return 1;
    p = gmm__ranks_alloc(w, new_capacity * size);
    if (!p) return 0;
    if (count) memcpy(p, *items, count * size);
    gmm__ranks_free(w, *items);
    *items = p;
    *capacity = new_capacity;
    return 1;
}

static uint64_t gmm__ranks_random(gmm_ranks *w) { /* splitmix64 */
    uint64_t z = w->random += 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

static gmm__token *gmm__token_retain(gmm__token *t) {
    if (t) t->references++;
    return t;
}
static void gmm__token_release(gmm_ranks *w, gmm__token *t) {
    if (t && --t->references == 0) gmm__ranks_free(w, t);
}
static gmm__token *gmm__token_create(gmm_ranks *w) {
    gmm__token *t = (gmm__token *)gmm__ranks_alloc(w, sizeof *t);
    if (t) t->references = 1;
    return t;
}
static void gmm__clock_merge(uint32_t *clock, const uint32_t *other) {
    int i;
    for (i = 0; i < GMM__RANK_QUEUES; i++)
        if (other[i] > clock[i]) clock[i] = other[i];
}

