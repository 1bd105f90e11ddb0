/* .................................................................................................... CPU ranks ... */

#ifdef GMM_WITH_CPU_RANKS

enum { GMM__RANK_QUEUES = 49 }; /* streams of a rank, NULL and graphs' included */

/* What one record of an event stands for. Waits keep the token that was the newest when they were given. */
typedef struct gmm__token {
    int32_t users, done;
    uint32_t clock[GMM__RANK_QUEUES];
} gmm__token;

typedef struct gmm__rank_event {
    struct gmm__cpu_rank *rank;
    gmm__token *last;       /* of the last record outside of captures, or through a node; NULL = none */
    uint64_t capture;       /* that of the last plain record, if it was in one; 0 = none */
    int32_t mark;           /* its number there */
} gmm__rank_event;

typedef enum gmm__rank_kind {
    GMM__RANK_WORK, GMM__RANK_RECORD, GMM__RANK_WAIT, GMM__RANK_COLLECTIVE, GMM__RANK_LAUNCH
} gmm__rank_kind;

typedef enum gmm__coll_kind { GMM__COLL_GATHER, GMM__COLL_SCATTER, GMM__COLL_EXCHANGE, GMM__COLL_MAX } gmm__coll_kind;

/* One call of a collective; `bytes` of a rank's part. */
typedef struct gmm__coll {
    gmm__coll_kind kind;
    gmm_dtype dtype;
    const void *send;
    void *recv;
    size_t bytes;
} gmm__coll;

typedef struct gmm__rank_op {
    gmm__rank_kind kind;
    int32_t count;          /* ranges, or parts */
    const char *name;
    gmm__token *host;       /* what the enqueuing thread had seen */
    void *memory;           /* ranges and argument, or parts, or a gmm__replay */
    size_t bytes;           /* of memory */
    gmm_status (*function)(const void *argument, gmm_stream stream);
    gmm__token *token;      /* RECORD, WAIT */
    gmm__rank_event *event; /* in graphs: the event of a node; NULL = token number `mark` of the graph */
    int32_t mark;
    int32_t started;        /* LAUNCH */
    struct gmm__member *member; /* COLLECTIVE */
    uint64_t number;        /* of the collective in its communicator */
    gmm_ranks_graph *graph;
} gmm__rank_op;

typedef struct gmm__rank_queue {
    struct gmm__cpu_rank *rank;
    int32_t index, mirrors; /* mirrors: the stream that this queue of a graph stands for; -1 = it is a stream */
    gmm_ranks_graph *graph; /* the capture that the stream is in */
    int32_t slow;           /* of late, drawn last */
    gmm__rank_op *ops;
    size_t head, count, room;
    uint32_t clock[GMM__RANK_QUEUES];
} gmm__rank_queue;

/* An access as the checker remembers it. */
typedef struct gmm__rank_access {
    uintptr_t begin, end;
    int32_t queue, writes;
    uint32_t time;
    const char *name;
} gmm__rank_access;

typedef struct gmm__cpu_rank {
    struct gmm_ranks *world;
    int32_t index, given_up;
    uint64_t captures;      /* begun so far */
    gmm__rank_queue *queues[GMM__RANK_QUEUES];
    gmm_ranks_graph *capture;
    gmm__token *host;       /* snapshot of queue 0's clock for what is enqueued */
    uint64_t progress;      /* operations done */
    gmm__rank_access *accesses;
    size_t access_count, access_room;
    gmm_error error;
    gmm_error told;         /* what gmm_ranks_error copied last */
} gmm__cpu_rank;

/* A communicator, and one rank's end of it. */
typedef struct gmm__group {
    struct gmm_ranks *world;
    struct gmm__group *next;
    int32_t size;
    uint64_t done;          /* collectives so far */
    struct gmm__member *members;
    gmm_error fault;
} gmm__group;

typedef struct gmm__member {
    gmm__group *group;
    gmm__cpu_rank *rank;
    int32_t index, open;
    uint64_t given;         /* collectives enqueued */
    const char *what;
    gmm_stream stream;
    gmm__coll *parts;       /* of the open group */
    int32_t count, room;
} gmm__member;

struct gmm_ranks_graph {
    gmm__cpu_rank *rank;
    gmm_stream origin;
    uint64_t serial;
    int32_t marks;          /* plain records in it */
    int32_t running;
    int32_t queue_count;
    int32_t queues[GMM__RANK_QUEUES];    /* queues of the rank that replay; the origin's first */
    gmm__rank_op *ops[GMM__RANK_QUEUES]; /* the template of each */
    size_t count[GMM__RANK_QUEUES], room[GMM__RANK_QUEUES];
};

/* The operations of one launch, until it starts. */
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
    int64_t races;
    char race[400];
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
/* Room for one more element; 0 if there is no memory. */
static int gmm__ranks_grow(gmm_ranks *w, void **items, size_t count, size_t *room, size_t size) {
    const size_t more = *room ? 2 * *room : 16;
    void *p;
    if (count < *room) return 1;
    p = gmm__ranks_alloc(w, more * size);
    if (!p) return 0;
    if (count) memcpy(p, *items, count * size);
    gmm__ranks_free(w, *items);
    *items = p;
    *room = more;
    return 1;
}

static uint64_t gmm__ranks_draw(gmm_ranks *w) { /* splitmix64 */
    uint64_t z = w->random += 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

static gmm__token *gmm__token_keep(gmm__token *t) {
    if (t) t->users++;
    return t;
}
static void gmm__token_drop(gmm_ranks *w, gmm__token *t) {
    if (t && --t->users == 0) gmm__ranks_free(w, t);
}
static gmm__token *gmm__token_new(gmm_ranks *w) {
    gmm__token *t = (gmm__token *)gmm__ranks_alloc(w, sizeof *t);
    if (t) t->users = 1;
    return t;
}
static void gmm__clock_join(uint32_t *clock, const uint32_t *other) {
    int i;
    for (i = 0; i < GMM__RANK_QUEUES; i++)
        if (other[i] > clock[i]) clock[i] = other[i];
}

