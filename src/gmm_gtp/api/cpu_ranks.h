/* -------------------------------------------------------------------------------------------------- 7 CPU ranks --- */

/* Ranks in one process, on the CPU: streams are queues, events are counters, communicators copy between the ranks'
   memory. They train without a GPU, and they prove an order of work: which of the operations that could run next runs
   is drawn from a seed, and the checker reports every two accesses to one place, one of them a write, that no event,
   stream or wait of the host orders (vector clocks over the ranges of gmm_work, copies, fills and collectives).
   Driven by one thread, a schedule is a function of the seed. With a thread per rank it is also one of the system.
   Stream NULL is the calling thread: what it is given is done on return, and a wait waits, at most timeout_ms without
   progress of the own rank; then every rank of the communicator that hangs gets GMM_E_COMM, and nothing that is still
   queued there is done. Work runs on whichever thread waits or enqueues.
   Needs GMM_WITH_CPU_RANKS where GMM_IMPLEMENTATION is, and threads of POSIX; otherwise create is GMM_E_BUILD.
   Threads: calls for different ranks may come from different threads; all but gmm_ranks_destroy. */
typedef struct gmm_ranks gmm_ranks;
typedef struct gmm_ranks_graph gmm_ranks_graph;

typedef struct gmm_ranks_config {
    uint32_t struct_size;
    int32_t ranks;           /* 1 to 98 */
    uint64_t seed;           /* 0: operations run as soon as they can; else in an order drawn from it, mostly late */
    int32_t timeout_ms;      /* 0 = 10000 */
    int32_t check_races;     /* 1: every access is checked */
    gmm_allocator allocator; /* of all that the ranks need, whenever they need it; none = GMM_MALLOC */
} gmm_ranks_config;

/* Errors: GMM_E_NULL, GMM_E_ARG, GMM_E_VERSION, GMM_E_MEMORY, GMM_E_BUILD. *out is NULL after a failure. */
GMMDEF gmm_status gmm_ranks_create(const gmm_ranks_config *config, gmm_ranks **out, gmm_error *error);
/* Frees it with all streams and communicators; events and graphs must have been destroyed. NULL is allowed. */
GMMDEF void gmm_ranks_destroy(gmm_ranks *ranks);

/* The runtime of a rank; gmm_ranks_error tells why its functions fail. Up to 48 streams, graphs' streams included.
   Errors: GMM_E_NULL, GMM_E_ARG. */
GMMDEF gmm_status gmm_ranks_runtime(gmm_ranks *ranks, int32_t rank, gmm_runtime *out);

/* A communicator among `count` distinct ranks: out[i] is that of members[i], whose number in it is i. Sums are in fp32
   in the order of ranks, rounded once. Where ranks come to a collective with other calls, sizes or names of groups
   (which are the names of bundles), all ranks get GMM_E_COMM and a message with both names, and no memory is touched.
   Errors: GMM_E_NULL, GMM_E_ARG, GMM_E_MEMORY. */
GMMDEF gmm_status gmm_ranks_comms(gmm_ranks *ranks, const int32_t *members, int32_t count, gmm_comm *out);

/* Runs what is queued until nothing can run.
   Errors: GMM_E_NULL; GMM_E_STATE (something is left that waits for what nobody has given: a deadlock, where all ranks
       are through); GMM_E_COMM (a rank was given up). gmm_ranks_error tells more. */
GMMDEF gmm_status gmm_ranks_run(gmm_ranks *ranks);

/* What the last failing call for a rank said; "" before any. A copy, which lasts until the next call for that rank. */
GMMDEF const char *gmm_ranks_error(gmm_ranks *ranks, int32_t rank);

/* Races found so far, and the text of the first; `text` may be NULL. Needs check_races. */
GMMDEF int64_t gmm_ranks_races(gmm_ranks *ranks, const char **text);

/* Captures what a stream is given, and what streams are given that wait for its events, as queues that a launch
   replays: the counterpart of a CUDA graph, with its rules (other streams join by events and must be joined back; an
   event from outside is waited for as a node only; a graph is one node of the launching stream). One capture of a rank
   at a time.
   Errors: GMM_E_NULL, GMM_E_CAPTURE, GMM_E_MEMORY. */
GMMDEF gmm_status gmm_ranks_capture_begin(gmm_ranks *ranks, int32_t rank, gmm_stream stream);
GMMDEF gmm_status gmm_ranks_capture_end(gmm_ranks *ranks, int32_t rank, gmm_stream stream, gmm_ranks_graph **out);
GMMDEF gmm_status gmm_ranks_launch(gmm_ranks_graph *graph, gmm_stream stream);
GMMDEF void gmm_ranks_graph_destroy(gmm_ranks_graph *graph); /* not while it runs */

