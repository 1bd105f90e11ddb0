/* ------------------------------------------------------------------------------------------ 6 Communicators --- */

/* Collectives among the ranks of a group, as a table of functions; every function takes `self` first.
   Order       All ranks make the same calls in the same order. A call is enqueued on the stream and done when the
               stream comes to it: then what it received is complete, and what it sent may be overwritten.
   Groups      Calls between group_begin and group_end are one operation with distinct outputs. `what` names it in
               messages, is the same text on all ranks, and lives until it is done.
   Failure     GMM_E_COMM, from a call or from poll, which tells operation and peer. The communicator is then unusable.
   Threads     One at a time. */
typedef struct gmm_comm {
    uint32_t struct_size;
    int32_t rank, size;
    int32_t exchanges;    /* 1: all_to_all and a sum behind it are faster than reduce_scatter: GMM_GTP_REDUCE_AUTO */
    int32_t processors;   /* multiprocessors that its calls need beside a GEMM: see gmm_gtp_view.leave */
    int32_t reserved;
    void *self;
    gmm_status (*group_begin)(void *self, const char *what);
    gmm_status (*group_end)(void *self);
    /* recv [size][bytes]: what every rank sends, in the order of ranks. send may be its own place in recv. */
    gmm_status (*all_gather)(void *self, const void *send, void *recv, size_t bytes, gmm_stream stream);
    /* send [size][count], recv [count]: the sum over ranks of send's part `rank`. F32, BF16 or F16. recv may be its own
       part of send. */
    gmm_status (*reduce_scatter)(void *self, const void *send, void *recv, size_t count, gmm_dtype dtype,
                                 gmm_stream stream);
    /* send, recv [size][bytes]: part r goes to rank r, part r comes from rank r. Not in place. The part that a rank
       would send to itself stays in send; that of recv may be left as it is. */
    gmm_status (*all_to_all)(void *self, const void *send, void *recv, size_t bytes, gmm_stream stream);
    /* The largest of each value, in place: the amax of a tensor that several ranks share. */
    gmm_status (*all_reduce_max)(void *self, float *values, size_t count, gmm_stream stream);
    /* Registers memory that the group's calls will send from and receive into; collective. Both may be NULL. */
    gmm_status (*window_add)(void *self, void *base, size_t bytes, void **window);
    gmm_status (*window_remove)(void *self, void *window);
    /* GMM_OK while nothing is known to be wrong; `error` may be NULL. Does not wait. */
    gmm_status (*poll)(void *self, gmm_error *error);
    /* Gives up: operations under way end as soon as they can, later ones are refused. `why` is copied. */
    void (*give_up)(void *self, const char *why);
} gmm_comm;

