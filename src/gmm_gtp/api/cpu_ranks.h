/* -------------------------------------------------------------------------------------------------- 7 CPU ranks --- */

/* Ranks of one process on the CPU: streams are queues, events are counters, communicators copy between the ranks'
   memory. With them a model trains without a GPU, and the order of work is tested: a seed determines which of the ready
   operations runs next, and the race checker reports any two accesses to the same memory, one of them a write, that no
   event, stream or wait of the host orders (vector clocks over the ranges of gmm_work, copies, fills and collectives).
   With one host thread the schedule is a function of the seed; with a thread per rank it also depends on the operating
   system. Stream NULL is the calling thread: its operations are done on return. A wait lasts at most timeout_ms without
   progress of its rank; then every rank of the communicator that hangs gets GMM_E_COMM, and its queued operations are
   discarded. Work runs on any thread that waits or enqueues.
   Needs GMM_WITH_CPU_RANKS where GMM_IMPLEMENTATION is defined, and POSIX threads; otherwise create is GMM_E_BUILD.
   Threads: different threads may call for different ranks at the same time, except gmm_ranks_destroy. */
typedef struct gmm_ranks gmm_ranks;
typedef struct gmm_ranks_graph gmm_ranks_graph;

typedef struct gmm_ranks_config {
    uint32_t struct_size;
    int32_t ranks;           /* 1 to 98 */
    uint64_t seed;           /* 0: operations run as early as possible; else in a random order of this seed, mostly
                                late */
    int32_t timeout_ms;      /* 0 = 10000 */
    int32_t check_races;     /* 1: the race checker is on */
    gmm_allocator allocator; /* for all memory of the ranks, at any call; zeroed = GMM_MALLOC */
} gmm_ranks_config;

/* Errors: GMM_E_NULL, GMM_E_ARG, GMM_E_VERSION, GMM_E_MEMORY, GMM_E_BUILD. *out is NULL after a failure. */
GMMDEF gmm_status gmm_ranks_create(const gmm_ranks_config *config, gmm_ranks **out, gmm_error *error);
/* Frees it with all streams and communicators; events and graphs must have been destroyed. NULL is allowed. */
GMMDEF void gmm_ranks_destroy(gmm_ranks *ranks);

/* The runtime of a rank; gmm_ranks_error gives the messages of its failures. A rank has at most 48 streams in its life,
   those of graphs included: a destroyed one counts, since the race checker knows it.
   Errors: GMM_E_NULL, GMM_E_ARG; the message is that of rank 0, none where `ranks` is NULL. */
GMMDEF gmm_status gmm_ranks_runtime(gmm_ranks *ranks, int32_t rank, gmm_runtime *out);

/* A communicator of `count` distinct ranks: out[i] is for members[i], whose rank in it is i. Sums are in fp32 in the
   order of ranks, rounded once. Where ranks differ in the call, size or group name (the name of a bundle) of a
   collective, all ranks get GMM_E_COMM and a message with both names, and no memory is written.
   Errors: GMM_E_NULL, GMM_E_ARG, GMM_E_MEMORY; the message is that of rank 0, none where `ranks` is NULL. */
GMMDEF gmm_status gmm_ranks_comms(gmm_ranks *ranks, const int32_t *members, int32_t count, gmm_comm *out);

/* Runs queued operations until none is ready.
   Errors: GMM_E_NULL; GMM_E_STATE (queued operations wait for something that was not enqueued: a deadlock, if all ranks
       have made their calls); GMM_E_COMM (a rank has failed). gmm_ranks_error gives the message. */
GMMDEF gmm_status gmm_ranks_run(gmm_ranks *ranks);

/* Message of the last failed call for a rank; "" before any. Valid until the next gmm_ranks_error for that rank. */
GMMDEF const char *gmm_ranks_error(gmm_ranks *ranks, int32_t rank);

/* Races found so far, and the text of the first; `text` may be NULL. Needs check_races. An access for whose record
   there was no memory counts as one, since its races are not found. */
GMMDEF int64_t gmm_ranks_races(gmm_ranks *ranks, const char **text);

/* Captures the work of a stream, and of streams that wait for its events, as queues that a launch replays. The rules
   are those of CUDA graphs: other streams join the capture by events and must be joined with its origin before the end;
   waits for events from outside need GMM_EVENT_EXTERNAL; a launch is one operation of its stream. A rank has one
   capture at a time.
   Errors: GMM_E_NULL, GMM_E_ARG (no such rank), GMM_E_CAPTURE, GMM_E_MEMORY. */
GMMDEF gmm_status gmm_ranks_capture_begin(gmm_ranks *ranks, int32_t rank, gmm_stream stream);
GMMDEF gmm_status gmm_ranks_capture_end(gmm_ranks *ranks, int32_t rank, gmm_stream stream, gmm_ranks_graph **out);
GMMDEF gmm_status gmm_ranks_launch(gmm_ranks_graph *graph, gmm_stream stream);
GMMDEF void gmm_ranks_graph_destroy(gmm_ranks_graph *graph); /* not while a launch is queued or runs */

