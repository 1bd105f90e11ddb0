/* ------------------------------------------------------------------------------------------ 6 Communicators --- */

/* Collectives among the ranks of a group, as a table of functions; every function takes `self` first.
   Order       All ranks make the same calls in the same order. A call is enqueued on the stream. Later work on the
               stream may read what the call received and overwrite what it sent. Calls on several streams run one
               after the other: the caller orders the streams with events.
   Groups      Calls between group_begin and group_end are one operation, on one stream, with distinct outputs. Groups
               do not nest. `what` names it in messages, is the same text on all ranks, and stays valid until the
               operation is done.
   Failure     A call returns GMM_E_COMM, or another status if it has enqueued nothing (GMM_E_ARG, GMM_E_DTYPE,
               GMM_E_MEMORY, GMM_E_CUDA); the ranks no longer agree then, so give_up is called. poll returns
               GMM_E_COMM, and its message names operation and peer. The communicator is then unusable.
   Threads     One at a time. */
typedef struct gmm_comm {
    uint32_t struct_size;
    int32_t rank, size;
    int32_t exchanges;    /* 1: all_to_all and a sum are faster than reduce_scatter; see GMM_GTP_REDUCE_AUTO */
    int32_t processors;   /* multiprocessors for its calls while a GEMM runs; see gmm_gtp_view.leave */
    int32_t reserved;
    void *self;
    gmm_status (*group_begin)(void *self, const char *what);
    gmm_status (*group_end)(void *self);
    /* recv [size][bytes]: what every rank sends, in the order of ranks. In place: send = recv + rank * bytes. */
    gmm_status (*all_gather)(void *self, const void *send, void *recv, size_t bytes, gmm_stream stream);
    /* send [size][count], recv [count]: the sum of part `rank` of send over all ranks. F32, BF16 or F16. In place: recv
       is part `rank` of send. */
    gmm_status (*reduce_scatter)(void *self, const void *send, void *recv, size_t count, gmm_dtype dtype,
                                 gmm_stream stream);
    /* send, recv [size][bytes]: part r goes to rank r, part r comes from rank r. Not in place. The part of the
       rank itself need not be copied: it is valid in send, and undefined in recv. */
    gmm_status (*all_to_all)(void *self, const void *send, void *recv, size_t bytes, gmm_stream stream);
    /* The maximum of each value over the ranks, in place: the amax of a tensor that several ranks share. */
    gmm_status (*all_reduce_max)(void *self, float *values, size_t count, gmm_stream stream);
    /* Registers memory that later calls send from and receive into; collective. Both functions may be NULL. */
    gmm_status (*window_add)(void *self, void *base, size_t bytes, void **window);
    gmm_status (*window_remove)(void *self, void *window);
    /* GMM_OK unless a failure is known; `error` may be NULL. Does not wait for collectives; that of peer copies
       waits at most 0.1 s for a copy of their flags. */
    gmm_status (*poll)(void *self, gmm_error *error);
    /* Aborts: operations in flight end as soon as possible, later ones are refused. `why` is copied into messages. */
    void (*give_up)(void *self, const char *why);
} gmm_comm;

