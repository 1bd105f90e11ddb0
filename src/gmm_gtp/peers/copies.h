/* Collectives by copies between the GPUs of one host: flags, copies, collectives. In all_gather, all_to_all
   and all_reduce_max a rank writes into the memory of its peers; in reduce_scatter it reads theirs. */

/* ................................................................................................ Peer copies ... */

#ifdef __CUDACC__

enum {
    GMM__PEERS_MAX_RANKS = 64,
    GMM__PEERS_MAX_WINDOWS = 16,
    GMM__PEERS_STAGED_VALUES = 1024, /* values that all_reduce_max reduces at a time */
    GMM__PEERS_MIN_BYTES = 2 << 20,  /* smaller allocations share a block, and CUDA IPC opens whole blocks */
    GMM__PEERS_MAX_PUSHES = 64,      /* of an operation, enqueued together */
    /* kinds of flags: the rank has reached the operation; its copies are done; it has given up; number of kinds */
    GMM__PEERS_READY = 0, GMM__PEERS_DONE = 1, GMM__PEERS_ABORTED = 2, GMM__PEERS_FLAGS = 3
};

/* A window: device memory that every rank has allocated, and its addresses in this process. */
typedef struct gmm__peers_window {
    char *base[GMM__PEERS_MAX_RANKS];
    void *opened[GMM__PEERS_MAX_RANKS]; /* the IPC mappings that this rank must close; NULL = none */
    size_t bytes;
} gmm__peers_window;

/* The copies of one all_gather or all_to_all to the same offset of a window on all ranks. all_gather copies `bytes` of
   `source` to every rank. all_to_all (`parts` = 1) copies part r of `source`, of `bytes` bytes, to rank r. */
typedef struct gmm__peers_push {
    const char *source;
    const gmm__peers_window *window;
    size_t offset, bytes;
    int32_t parts, reserved;
} gmm__peers_push;

/* The state of a communicator. A rank's own memory begins with flags [READY, DONE, ABORTED][rank]. Peers set them to 1;
   the rank's own stream resets READY and DONE to 0. Behind them, at byte 1024, is the staging buffer of all_reduce_max,
   [rank][GMM__PEERS_STAGED_VALUES] values. An operation is a barrier on READY, the copies into the windows of the
   peers, and a barrier on DONE. A peer sets a flag again only in a later operation, after a barrier that follows the
   reset. Flags therefore need no counter, and graphs that contain operations can be replayed. */
typedef struct gmm__peers {
    gmm__comm_base comm_base;
    gmm_peers_config config;
    PFN_cuStreamBatchMemOp_v11070 batch_mem_op;
    PFN_cuMemGetAddressRange_v3020 address_range;
    gmm__peers_window own, windows[GMM__PEERS_MAX_WINDOWS];
    gmm_stream copy_stream;     /* for copies within the device, concurrent with those to peers */
    gmm_stream control_stream;  /* for poll and give_up; of a priority that few streams use, so that it shares no
                                   hardware queue with a stream that waits for a peer */
    uint32_t *host_flags;       /* [READY, DONE, ABORTED][rank]: copy in page-locked memory, for poll */
    cudaEvent_t fork, join;     /* between the operation's stream and copy_stream */
    cudaEvent_t last;           /* end of the last operation outside of captures */
    gmm_stream stream;          /* of the active operation */
    int32_t active;             /* 1: between the barriers of an operation */
    int32_t push_count;         /* pushes of the operation that are not enqueued yet */
    int32_t notified, reserved; /* notified: a peer has called give_up and set the ABORTED flags of all ranks */
    gmm__peers_push pushes[GMM__PEERS_MAX_PUSHES];
} gmm__peers;

/* What a rank tells its peers about its memory of a window: an IPC handle between processes, else the address. */
typedef struct gmm__peers_handle {
    cudaIpcMemHandle_t handle;
    size_t offset, bytes;
    char *base;
    int32_t device, reserved;
} gmm__peers_handle;

/* The flag of a kind in the memory of rank `owner` that rank `writer` sets. */
static uint32_t *gmm__peers_flag(const gmm__peers *p, int32_t owner, int kind, int32_t writer) {
    return (uint32_t *)(void *)p->own.base[owner] + kind * p->config.size + writer;
}
/* The staged values of rank `writer` in the memory of rank `owner`. */
static float *gmm__peers_staging(const gmm__peers *p, int32_t owner, int32_t writer) {
    return (float *)(void *)(p->own.base[owner] + 1024) + (size_t)writer * GMM__PEERS_STAGED_VALUES;
}
static size_t gmm__peers_own_bytes(int32_t size) {
    return 1024 + (size_t)size * GMM__PEERS_STAGED_VALUES * sizeof(float);
}

static gmm_status gmm__peers_cuda(gmm__peers *p, const char *call, cudaError_t e) {
    if (e == cudaSuccess) return GMM_OK;
    (void)cudaGetLastError();
    return gmm__comm_fail(&p->comm_base, call, cudaGetErrorString(e));
}

/* Enqueues a barrier, in three steps over all peers: sets this rank's flag in their memory, waits for their flags in
   the own memory, and resets those. */
static gmm_status gmm__peers_barrier(gmm__peers *p, int kind, gmm_stream stream) {
    CUstreamBatchMemOpParams op[3 * GMM__PEERS_MAX_RANKS];
    const int32_t size = p->config.size, rank = p->config.rank;
    unsigned n = 0;
    int32_t i, step;
    memset(op, 0, sizeof op);
    for (step = 0; step < 3; step++)
        for (i = 1; i < size; i++, n++) {
            const int32_t peer = (rank + i) % size;
            uint32_t *flag = step == 0 ? gmm__peers_flag(p, peer, kind, rank) : gmm__peers_flag(p, rank, kind, peer);
            if (step == 1) {
                op[n].waitValue.operation = CU_STREAM_MEM_OP_WAIT_VALUE_32;
                op[n].waitValue.address = (CUdeviceptr)(uintptr_t)flag;
                op[n].waitValue.value = 1;
                op[n].waitValue.flags = CU_STREAM_WAIT_VALUE_EQ;
            } else {
                op[n].writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_32;
                op[n].writeValue.address = (CUdeviceptr)(uintptr_t)flag;
                op[n].writeValue.value = step == 0;
                op[n].writeValue.flags = CU_STREAM_WRITE_VALUE_DEFAULT;
            }
        }
    return n == 0 || p->batch_mem_op(stream, n, op, 0) == CUDA_SUCCESS /* an empty batch may be refused */
               ? GMM_OK : gmm__comm_fail(&p->comm_base, "cuStreamBatchMemOp", "the driver refuses it");
}

/* Begins an operation, unless one is active on the same stream. */
static gmm_status gmm__peers_begin_op(gmm__peers *p, gmm_stream stream) {
    if (p->active && p->stream != stream)
        return gmm__comm_fail(&p->comm_base, "peer copies", "one group on two streams");
    if (p->active) return GMM_OK;
    p->active = 1;
    p->stream = stream;
    return gmm__peers_barrier(p, GMM__PEERS_READY, stream);
}

/* Bytes from an address to the end of its allocation; 0 = unknown. */
static size_t gmm__peers_remaining_bytes(const gmm__peers *p, const void *address) {
    CUdeviceptr start = 0;
    size_t bytes = 0;
    if (p->address_range(&start, &bytes, (CUdeviceptr)(uintptr_t)address) != CUDA_SUCCESS) return 0;
    return (size_t)(start + bytes - (CUdeviceptr)(uintptr_t)address);
}
/* Number of pushes, of the n from q on, that one 2D copy to a peer can do together: they are equal in size and kind,
   and equally spaced within one allocation on either side. */
static int32_t gmm__peers_count_2d(const gmm__peers *p, const gmm__peers_push *q, int32_t n) {
    const uintptr_t step = n > 1 ? (uintptr_t)q[1].source - (uintptr_t)q->source : 0;
    const size_t pitch = n > 1 ? q[1].offset - q->offset : 0, whole = q->bytes * (size_t)p->config.size;
    size_t source_bytes, window_bytes;
    int32_t k = 1;
    if (step < q->bytes || pitch < q->bytes || step > 0x7fffffffu || pitch > 0x7fffffffu) return 1;
    source_bytes = gmm__peers_remaining_bytes(p, q->source);
    window_bytes = gmm__peers_remaining_bytes(p, q->window->base[p->config.rank] + q->offset);
    while (k < n && q[k].bytes == q->bytes && q[k].parts == q->parts && q[k].window == q->window &&
           (uintptr_t)q[k].source - (uintptr_t)q[k - 1].source == step && q[k].offset - q[k - 1].offset == pitch &&
           (size_t)k * step + (q->parts ? whole : q->bytes) <= source_bytes &&
           (size_t)k * pitch + whole <= window_bytes)
        k++;
    return k;
}
/* Enqueues the pushes, peer by peer, each rank beginning with a different peer. Few large copies, one after the other,
   saturate the links; many small ones do not, nor do concurrent copies to several ranks. i = 0 is this rank itself,
   whose copies run on copy_stream. */
static cudaError_t gmm__peers_flush(gmm__peers *p) {
    const int32_t size = p->config.size, rank = p->config.rank;
    cudaError_t e = cudaSuccess;
    int32_t i, k, n, forked = 0;
    for (i = 0; i < size && e == cudaSuccess; i++)
        for (k = 0; k < p->push_count && e == cudaSuccess; k += n) {
            const gmm__peers_push *q = &p->pushes[k];
            const int32_t peer = (rank + i) % size;
            const char *src = q->source + (q->parts ? (size_t)peer * q->bytes : 0);
            char *dst = q->window->base[peer] + q->offset + (size_t)rank * q->bytes;
            n = i == 0 ? 1 : gmm__peers_count_2d(p, q, p->push_count - k);
            if (i == 0 && (q->parts || dst == src)) continue;
            if (i == 0 && !forked) {
                e = cudaEventRecord(p->fork, p->stream);
                if (e == cudaSuccess) e = cudaStreamWaitEvent(p->copy_stream, p->fork, 0);
                forked = 1;
            }
            if (e != cudaSuccess) break;
            e = n == 1 ? cudaMemcpyAsync(dst, src, q->bytes, cudaMemcpyDeviceToDevice,
                                         i == 0 ? p->copy_stream : p->stream)
                       : cudaMemcpy2DAsync(dst, q[1].offset - q->offset, src, (size_t)(q[1].source - q->source),
                                           q->bytes, (size_t)n, cudaMemcpyDeviceToDevice, p->stream);
        }
    p->push_count = 0;
    if (e == cudaSuccess && forked) e = cudaEventRecord(p->join, p->copy_stream);
    if (e == cudaSuccess && forked) e = cudaStreamWaitEvent(p->stream, p->join, 0);
    return e;
}
/* Ends the active operation: its pushes and the barrier on DONE. */
static gmm_status gmm__peers_end_op(gmm__peers *p) {
    enum cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    gmm_status s;
    if (!p->active) return GMM_OK;
    p->active = 0;
    s = gmm__peers_cuda(p, "peer copies", gmm__peers_flush(p));
    if (!s) s = gmm__peers_barrier(p, GMM__PEERS_DONE, p->stream);
    if (!s) s = gmm__peers_cuda(p, "peer copies", cudaStreamIsCapturing(p->stream, &status));
    if (!s && status == cudaStreamCaptureStatusNone)
        s = gmm__peers_cuda(p, "peer copies", cudaEventRecord(p->last, p->stream));
    return s;
}

/* A collective call: it begins an operation if none is active, and ends it unless a group is open. */
typedef gmm_status gmm__peers_collective(gmm__peers *p, const void *send, void *recv, size_t size, gmm_dtype dtype,
                                         gmm_stream stream);
static gmm_status gmm__peers_call(void *self, gmm__peers_collective *collective, const void *send, void *recv,
                                  size_t size, gmm_dtype dtype, gmm_stream stream) {
    gmm__peers *p = (gmm__peers *)self;
    int current;
    gmm_status s = gmm__comm_poll(&p->comm_base, NULL);
    if (s) return s;
    if (gmm__cuda_enter(p->comm_base.ctx, &current) != cudaSuccess) return GMM_E_CUDA;
    s = gmm__peers_begin_op(p, stream);
    if (!s) s = collective(p, send, recv, size, dtype, stream);
    if (!s && !p->comm_base.open) s = gmm__peers_end_op(p);
    return gmm__cuda_leave(p->comm_base.ctx, "peers", current, cudaSuccess), s;
}

/* An offset in a window, the same on all ranks; window NULL = in no window. */
typedef struct gmm__peers_location {
    const gmm__peers_window *window;
    size_t offset;
} gmm__peers_location;
static gmm__peers_location gmm__peers_find_window(const gmm__peers *p, const void *memory, size_t bytes) {
    gmm__peers_location location = {NULL, 0};
    int i;
    for (i = 0; i < GMM__PEERS_MAX_WINDOWS && !location.window; i++) {
        const gmm__peers_window *w = &p->windows[i];
        const uintptr_t base = (uintptr_t)w->base[p->config.rank], address = (uintptr_t)memory;
        if (!w->bytes || address < base || address - base > w->bytes || bytes > w->bytes - (address - base)) continue;
        location.window = w;
        location.offset = address - base;
    }
    return location;
}

static gmm_status gmm__peers_no_window(gmm__peers *p, const char *call, const char *name, const void *memory,
                                       size_t bytes) {
    char text[96];
    (void)snprintf(text, sizeof text, "%s at %p, %zu bytes: lies in no window", name, memory, bytes);
    return gmm__comm_fail(&p->comm_base, call, text);
}
/* Adds a push to the offset of `recv` in the window of every rank: `bytes` of `send`, to this rank too, or part r of
   `send` to every other rank r (`parts`). */
static gmm_status gmm__peers_add_push(gmm__peers *p, const char *call, const void *send, void *recv, size_t bytes,
                                      int parts) {
    const gmm__peers_location target = gmm__peers_find_window(p, recv, bytes * (size_t)p->config.size);
    gmm__peers_push *q;
    if (!target.window) return gmm__peers_no_window(p, call, "recv", recv, bytes * (size_t)p->config.size);
    if (bytes == 0) return GMM_OK;
    if (p->push_count == GMM__PEERS_MAX_PUSHES) {
        const gmm_status s = gmm__peers_cuda(p, call, gmm__peers_flush(p));
        if (s) return s;
    }
    q = &p->pushes[p->push_count++];
    q->source = (const char *)send;
    q->window = target.window;
    q->offset = target.offset;
    q->bytes = bytes;
    q->parts = parts;
    return GMM_OK;
}
static gmm_status gmm__peers_push_all_gather(gmm__peers *p, const void *send, void *recv, size_t bytes, gmm_dtype dtype,
                                             gmm_stream stream) {
    (void)dtype, (void)stream;
    return gmm__peers_add_push(p, "all_gather", send, recv, bytes, 0);
}
static gmm_status gmm__peers_push_all_to_all(gmm__peers *p, const void *send, void *recv, size_t bytes, gmm_dtype dtype,
                                             gmm_stream stream) {
    (void)dtype, (void)stream;
    return gmm__peers_add_push(p, "all_to_all", send, recv, bytes, 1);
}
/* reduce_scatter: this rank reads its part from the window of every rank, and sums the parts. */
static gmm_status gmm__peers_sum_windows(gmm__peers *p, const void *send, void *recv, size_t count, gmm_dtype dtype,
                                         gmm_stream stream) {
    const size_t bytes = count * (size_t)(gmm_dtype_bits(dtype) / 8);
    const gmm__peers_location source = gmm__peers_find_window(p, send, bytes * (size_t)p->config.size);
    void *addends[GMM__PEERS_MAX_RANKS];
    gmm_accumulation d;
    gmm_mat x, y;
    int32_t i;
    if (!source.window)
        return gmm__peers_no_window(p, "reduce_scatter", "send", send, bytes * (size_t)p->config.size);
    if (count == 0) return GMM_OK;
    for (i = 0; i < p->config.size; i++)
        addends[i] = source.window->base[i] + source.offset + (size_t)p->config.rank * bytes;
    memset(&d, 0, sizeof d);
    d.count = p->config.size;
    /* rows of the largest power of two that divides count, at most 4096 */
    for (d.cols = 1; d.cols < 4096 && count % (size_t)(2 * d.cols) == 0; d.cols *= 2) { }
    d.rows = (int64_t)count / d.cols;
    d.scale = 1.0f;
    x = gmm_mat_table(dtype, addends, (uint32_t)GMM_MAT_TABLE_ON_HOST);
    y = gmm_mat_packed(dtype, recv);
    d.x = &x;
    d.y = &y;
    return gmm_accumulate(p->comm_base.ctx, &d, NULL, 0, stream)
               ? gmm__comm_fail(&p->comm_base, "reduce_scatter", gmm_last_error(p->comm_base.ctx)) : GMM_OK;
}
/* Raises each value to the largest of those that the peers have copied into the staging buffer; NaN wins. */
static __global__ void gmm_peers_max(float *values, const float *staging, int size, int rank, int count) {
    const int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    int r;
    float largest;
    if (i >= count) return;
    largest = values[i];
    for (r = 0; r < size; r++) {
        const float v = r == rank ? largest : staging[(size_t)r * GMM__PEERS_STAGED_VALUES + i];
        largest = v > largest || v != v ? v : largest;
    }
    values[i] = largest;
}
/* all_reduce_max: in rounds of GMM__PEERS_STAGED_VALUES values, each an operation of its own. */
static gmm_status gmm__peers_reduce_max(gmm__peers *p, const void *send, void *recv, size_t count, gmm_dtype dtype,
                                        gmm_stream stream) {
    const int32_t size = p->config.size, rank = p->config.rank;
    float *values = (float *)recv;
    cudaError_t e = cudaSuccess;
    gmm_status s = GMM_OK;
    size_t first;
    int32_t i;
    (void)send, (void)dtype;
    for (first = 0; first < count && !s; first += GMM__PEERS_STAGED_VALUES) {
        const int n = count - first < GMM__PEERS_STAGED_VALUES ? (int)(count - first) : (int)GMM__PEERS_STAGED_VALUES;
        if (first > 0) s = gmm__peers_begin_op(p, stream);
        for (i = 1; i < size && e == cudaSuccess; i++)
            e = cudaMemcpyAsync(gmm__peers_staging(p, (rank + i) % size, rank), values + first,
                                (size_t)n * sizeof *values, cudaMemcpyDeviceToDevice, stream);
        if (!s) s = gmm__peers_cuda(p, "all_reduce_max", e);
        if (!s) s = gmm__peers_end_op(p); /* the peers have copied their values */
        if (s) break;
        gmm_peers_max<<<(n + 127) / 128, 128, 0, stream>>>(values + first, gmm__peers_staging(p, rank, 0), size,
                                                           rank, n);
        s = gmm__peers_cuda(p, "all_reduce_max", cudaGetLastError());
    }
    return s;
}

static gmm_status gmm__peers_all_gather(void *self, const void *send, void *recv, size_t bytes, gmm_stream stream) {
    return gmm__peers_call(self, gmm__peers_push_all_gather, send, recv, bytes, GMM_NONE, stream);
}
static gmm_status gmm__peers_all_to_all(void *self, const void *send, void *recv, size_t bytes, gmm_stream stream) {
    return gmm__peers_call(self, gmm__peers_push_all_to_all, send, recv, bytes, GMM_NONE, stream);
}
static gmm_status gmm__peers_reduce_scatter(void *self, const void *send, void *recv, size_t count, gmm_dtype dtype,
                                            gmm_stream stream) {
    return gmm__peers_call(self, gmm__peers_sum_windows, send, recv, count, dtype, stream);
}
static gmm_status gmm__peers_all_reduce_max(void *self, float *values, size_t count, gmm_stream stream) {
    return count ? gmm__peers_call(self, gmm__peers_reduce_max, NULL, values, count, GMM_F32, stream) : GMM_OK;
}
static gmm_status gmm__peers_group_begin(void *self, const char *what) {
    gmm__peers *p = (gmm__peers *)self;
    p->comm_base.what = what;
    p->comm_base.open = 1;
    return gmm__comm_poll(&p->comm_base, NULL);
}
static gmm_status gmm__peers_group_end(void *self) {
    gmm__peers *p = (gmm__peers *)self;
    int current;
    gmm_status s = gmm__comm_poll(&p->comm_base, NULL);
    p->comm_base.open = 0;
    if (!s && gmm__cuda_enter(p->comm_base.ctx, &current) != cudaSuccess) s = GMM_E_CUDA;
    else if (!s) {
        s = gmm__peers_end_op(p);
        (void)gmm__cuda_leave(p->comm_base.ctx, "peers", current, cudaSuccess);
    }
    p->comm_base.what = NULL;
    return s;
}

