/* --------------------------------------------------------------------------------------------------- 12 Runtime --- */

typedef struct CUevent_st *gmm_event; /* a cudaEvent_t; in a CPU context an object of this library */

enum { GMM_EVENT_EXTERNAL = 1u }; /* while capturing, the record or wait becomes a node of the graph and meets the event
                                     outside of it at every replay; otherwise it changes nothing */

/* Memory that work reads, or writes; for runtimes that check the order of accesses. */
typedef struct gmm_range {
    const void *data;
    size_t bytes;
    int32_t writes;   /* 1: written, maybe read too */
    int32_t reserved; /* 0 */
} gmm_range;

/* Operations for a stream, as a function that gives them to it. */
typedef struct gmm_work {
    uint32_t struct_size;
    int32_t range_count;
    const char *name;        /* for messages; outlives the work */
    gmm_status (*function)(const void *argument, gmm_stream stream);
    const void *argument;
    size_t argument_bytes;
    const gmm_range *ranges; /* all that the operations touch; may be NULL where nobody checks */
} gmm_work;

/* Streams, events, copies and fills of one memory space, as a table of functions: gmm_runtime_of fills it for a
   context, and whoever brings streams of his own fills one himself. Every function takes `self` first.
   Order       What is given to one stream is done in that order; events order streams. The host waits in stream_sync
               and event_sync only. On the CPU everything is done on return, and the one stream is NULL.
   Stream, graph: record, wait, copies, fills and run are enqueued and capturable; stream_sync on a capturing stream
               is GMM_E_CAPTURE and leaves the capture intact. The rest is not for captured streams and events.
   Memory      create and destroy alone may allocate: on the CPU from the context's allocator.
   Errors: GMM_E_NULL, GMM_E_ARG (pitch below width, value above 255, unknown flags, a stream that is not NULL on the
               CPU), GMM_E_OVERFLOW, GMM_E_MEMORY, GMM_E_CAPTURE, GMM_E_CUDA; gmm_last_error of the context tells more.
   Threads     As the context; the table lives as long as the context does. */
typedef struct gmm_runtime {
    uint32_t struct_size;
    gmm_space space;
    void *self;
    /* A stream that waits for no other. `priority` 0 is usual, smaller is more urgent; cut to what the device has. */
    gmm_status (*stream_create)(void *self, int32_t priority, gmm_stream *out);
    gmm_status (*stream_destroy)(void *self, gmm_stream stream); /* what it was given is still done; NULL is allowed */
    /* What the stream is given from now on starts after the event's last record; at once if there was none. */
    gmm_status (*stream_wait)(void *self, gmm_stream stream, gmm_event event, uint32_t flags);
    gmm_status (*stream_sync)(void *self, gmm_stream stream);
    gmm_status (*event_create)(void *self, gmm_event *out); /* without time stamps */
    gmm_status (*event_destroy)(void *self, gmm_event event); /* NULL is allowed */
    gmm_status (*event_record)(void *self, gmm_event event, gmm_stream stream, uint32_t flags);
    gmm_status (*event_query)(void *self, gmm_event event, int32_t *done); /* 1: last record reached, or none */
    gmm_status (*event_sync)(void *self, gmm_event event);
    /* Copies `width` bytes of each of `height` rows; either side may be host memory. No overlap. */
    gmm_status (*copy)(void *self, void *dst, const void *src, size_t bytes, gmm_stream stream);
    gmm_status (*copy2d)(void *self, void *dst, size_t dst_pitch, const void *src, size_t src_pitch, size_t width,
                         size_t height, gmm_stream stream);
    /* Sets bytes to `value`, 0 to 255. */
    gmm_status (*fill)(void *self, void *dst, int32_t value, size_t bytes, gmm_stream stream);
    gmm_status (*fill2d)(void *self, void *dst, size_t pitch, int32_t value, size_t width, size_t height,
                         gmm_stream stream);
    gmm_status (*is_capturing)(void *self, gmm_stream stream, int32_t *capturing);
    /* Has work->function called, and hands on its status. The runtimes of contexts call it at once, with `stream`. One
       whose streams are queues of its own copies the argument and calls the function with stream NULL when its turn
       comes, maybe on another thread, so operations in it take a context that nobody else uses at that time. */
    gmm_status (*run)(void *self, const gmm_work *work, gmm_stream stream);
} gmm_runtime;

/* The runtime of a context's memory space. out->struct_size 0 means this header's.
   Stream, graph: no effect on either. Errors: GMM_E_NULL, GMM_E_VERSION. */
GMMDEF gmm_status gmm_runtime_of(gmm_context *ctx, gmm_runtime *out);

