/* --------------------------------------------------------------------------------------------------- 12 Runtime --- */

typedef struct CUevent_st *gmm_event; /* a cudaEvent_t; in a CPU context an object of this library */

enum { GMM_EVENT_EXTERNAL = 1u }; /* while capturing, the record or wait becomes a node of the graph, which records or
                                     waits for the event at every replay (cudaEventRecordExternal,
                                     cudaEventWaitExternal); otherwise no effect */

/* A range of memory that work accesses, for runtimes that check the order of accesses. */
typedef struct gmm_range {
    const void *data;
    size_t bytes;
    int32_t writes;   /* 1: written, perhaps read too; 0: only read */
    int32_t reserved; /* 0 */
} gmm_range;

/* Operations for a stream: `function` enqueues them. */
typedef struct gmm_work {
    uint32_t struct_size;
    int32_t range_count;
    const char *name;        /* for messages; outlives the work */
    gmm_status (*function)(const void *argument, gmm_stream stream);
    const void *argument;
    size_t argument_bytes;
    const gmm_range *ranges; /* all memory that the operations access; may be NULL for runtimes that do not check it */
} gmm_work;

/* Streams, events, copies and fills of one memory space, as a table of functions. gmm_runtime_of fills it for a
   context; a caller with its own kind of streams fills one itself. Every function takes `self` first.
   Order       Operations of one stream run in the order in which they were enqueued; events order streams. The host
               waits in stream_sync and event_sync only. On the CPU operations are done on return, and the only stream
               is NULL.
   Stream, graph: record, wait, copies, fills and run are enqueued and capturable; stream_sync on a capturing stream
               is GMM_E_CAPTURE and leaves the capture intact. Other functions do not take captured streams and events.
   Memory      Only the functions that create and destroy may allocate; on the CPU from the context's allocator.
   Errors: GMM_E_NULL, GMM_E_ARG (pitch below width, value outside 0 to 255, unknown flags, a stream that is not NULL on
               the CPU), GMM_E_OVERFLOW, GMM_E_VERSION (work->struct_size), GMM_E_MEMORY, GMM_E_CAPTURE, GMM_E_CUDA,
               with a message in gmm_last_error of the context.
   Threads     As the context; the table lives as long as the context does. */
typedef struct gmm_runtime {
    uint32_t struct_size;
    gmm_space space;
    void *self;
    /* A stream that does not synchronise with the default stream. `priority` 0 is the default, lower numbers are higher
       priorities, clamped to the device's range. */
    gmm_status (*stream_create)(void *self, int32_t priority, gmm_stream *out);
    gmm_status (*stream_destroy)(void *self, gmm_stream stream); /* enqueued work still runs; NULL is allowed */
    /* Work enqueued from now on starts after the event's last record; without a record it does not wait. */
    gmm_status (*stream_wait)(void *self, gmm_stream stream, gmm_event event, uint32_t flags);
    gmm_status (*stream_sync)(void *self, gmm_stream stream);
    gmm_status (*event_create)(void *self, gmm_event *out); /* without time stamps */
    gmm_status (*event_destroy)(void *self, gmm_event event); /* NULL is allowed */
    gmm_status (*event_record)(void *self, gmm_event event, gmm_stream stream, uint32_t flags);
    gmm_status (*event_query)(void *self, gmm_event event, int32_t *done); /* 1: last record complete, or no record */
    gmm_status (*event_sync)(void *self, gmm_event event);
    /* copy copies `bytes` bytes; copy2d `width` bytes of each of `height` rows, which are a pitch of bytes apart.
       Either side may be host memory. No overlap. */
    gmm_status (*copy)(void *self, void *dst, const void *src, size_t bytes, gmm_stream stream);
    gmm_status (*copy2d)(void *self, void *dst, size_t dst_pitch, const void *src, size_t src_pitch, size_t width,
                         size_t height, gmm_stream stream);
    /* Set bytes to `value`, 0 to 255. */
    gmm_status (*fill)(void *self, void *dst, int32_t value, size_t bytes, gmm_stream stream);
    gmm_status (*fill2d)(void *self, void *dst, size_t pitch, int32_t value, size_t width, size_t height,
                         gmm_stream stream);
    gmm_status (*is_capturing)(void *self, gmm_stream stream, int32_t *capturing);
    /* Calls work->function and returns its status. The runtime of a context calls it at once, with `stream`. A runtime
       whose streams are queues of its own copies the argument and calls the function later with stream NULL, perhaps on
       another thread: operations in it must use a context that is not used elsewhere at that time. */
    gmm_status (*run)(void *self, const gmm_work *work, gmm_stream stream);
} gmm_runtime;

/* The runtime of a context's memory space. out->struct_size 0 means the size in this header.
   Stream, graph: no effect on either. Errors: GMM_E_NULL, GMM_E_VERSION, GMM_E_ARG (struct_size). */
GMMDEF gmm_status gmm_runtime_of(gmm_context *ctx, gmm_runtime *out);

