/* ................................................................................................ Peer copies ... */

#ifdef __CUDACC__

enum {
    GMM__PEERS_MOST = 64,       /* ranks */
    GMM__PEERS_WINDOWS = 16,
    GMM__PEERS_BOX = 1024,      /* values of all_reduce_max at a time */
    GMM__PEERS_BLOCK = 2 << 20, /* bytes that an allocation shares with no other: IPC opens whole blocks */
    GMM__PEERS_PUSHES = 64,     /* of an operation that are enqueued together */
    GMM__PEERS_CAME = 0, GMM__PEERS_DONE = 1, GMM__PEERS_GONE = 2, GMM__PEERS_WORDS = 3
};

/* Device memory of every rank that a communicator reaches. */
typedef struct gmm__peers_window {
    char *base[GMM__PEERS_MOST];
    void *opened[GMM__PEERS_MOST]; /* to be closed */
    size_t bytes;
} gmm__peers_window;

/* What all_gather and all_to_all send: the whole, or the part of each rank, to one place in everybody's window. */
typedef struct gmm__peers_push {
    const char *from;
    const gmm__peers_window *window;
    size_t at, bytes;
    int32_t parts, reserved;
} gmm__peers_push;

/* A rank's own memory begins with words [CAME, DONE, GONE][rank] that its peers set to 1; its stream sets the first two
   back to 0. Its box comes behind, [rank][GMM__PEERS_BOX] values. An operation: tell the peers that this rank has come,
   wait until they have; copy into their windows; tell them that it is done, wait until they are. A word is set again
   only in the operation after the one in which it was set back, so that words need no count, and a graph may be
   replayed. */
typedef struct gmm__peers {
    gmm__wire wire;
    gmm_peers_config config;
    PFN_cuStreamBatchMemOp_v11070 batch;
    PFN_cuMemGetAddressRange_v3020 range;
    gmm__peers_window own, windows[GMM__PEERS_WINDOWS];
    gmm_stream side;            /* copies within the device, beside those to peers */
    gmm_stream aid;             /* for when a peer is missing; of a priority that few use, so that it shares no queue of
                                   the device with a stream that waits */
    uint32_t *seen;             /* [CAME, DONE, GONE][rank] page-locked */
    cudaEvent_t fork, join, last;
    gmm_stream stream;          /* of the open operation */
    int32_t begun, pushes, told, reserved; /* told: by a peer that has given up, as all were */
    gmm__peers_push push[GMM__PEERS_PUSHES]; /* not enqueued yet */
} gmm__peers;

/* What a rank tells of its window. */
typedef struct gmm__peers_offer {
    cudaIpcMemHandle_t handle;
    size_t offset, bytes;
    char *base;
    int32_t device, reserved;
} gmm__peers_offer;

static uint32_t *gmm__peers_word(const gmm__peers *p, int32_t owner, int kind, int32_t writer) {
    return (uint32_t *)(void *)p->own.base[owner] + kind * p->config.size + writer;
}
static float *gmm__peers_box(const gmm__peers *p, int32_t owner, int32_t writer) {
    return (float *)(void *)(p->own.base[owner] + 1024) + (size_t)writer * GMM__PEERS_BOX;
}
static size_t gmm__peers_bytes(int32_t size) { return 1024 + (size_t)size * GMM__PEERS_BOX * sizeof(float); }

static gmm_status gmm__peers_cuda(gmm__peers *p, const char *call, cudaError_t e) {
    if (e == cudaSuccess) return GMM_OK;
    (void)cudaGetLastError();
    return gmm__wire_fail(&p->wire, call, cudaGetErrorString(e));
}

/* Says something to all peers, and waits until they have said it. */
static gmm_status gmm__peers_meet(gmm__peers *p, int kind, gmm_stream stream) {
    CUstreamBatchMemOpParams op[3 * GMM__PEERS_MOST];
    const int32_t size = p->config.size, rank = p->config.rank;
    unsigned n = 0;
    int32_t i, step;
    memset(op, 0, sizeof op);
    for (step = 0; step < 3; step++)
        for (i = 1; i < size; i++, n++) {
            const int32_t peer = (rank + i) % size;
            uint32_t *word = step == 0 ? gmm__peers_word(p, peer, kind, rank) : gmm__peers_word(p, rank, kind, peer);
            if (step == 1) {
                op[n].waitValue.operation = CU_STREAM_MEM_OP_WAIT_VALUE_32;
                op[n].waitValue.address = (CUdeviceptr)(uintptr_t)word;
                op[n].waitValue.value = 1;
                op[n].waitValue.flags = CU_STREAM_WAIT_VALUE_EQ;
            } else {
                op[n].writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_32;
                op[n].writeValue.address = (CUdeviceptr)(uintptr_t)word;
                op[n].writeValue.value = step == 0;
                op[n].writeValue.flags = CU_STREAM_WRITE_VALUE_DEFAULT;
            }
        }
    return n == 0 || p->batch(stream, n, op, 0) == CUDA_SUCCESS /* a batch of none may be refused */
               ? GMM_OK : gmm__wire_fail(&p->wire, "cuStreamBatchMemOp", "the driver refuses it");
}

/* The first call of an operation. */
static gmm_status gmm__peers_start(gmm__peers *p, gmm_stream stream) {
    if (p->begun && p->stream != stream) return gmm__wire_fail(&p->wire, "peer copies", "one group on two streams");
    if (p->begun) return GMM_OK;
    p->begun = 1;
    p->stream = stream;
    return gmm__peers_meet(p, GMM__PEERS_CAME, stream);
}

/* Bytes from an address to the end of its allocation; 0 = not known. */
static size_t gmm__peers_room(const gmm__peers *p, const void *at) {
    CUdeviceptr start = 0;
    size_t bytes = 0;
    if (p->range(&start, &bytes, (CUdeviceptr)(uintptr_t)at) != CUDA_SUCCESS) return 0;
    return (size_t)(start + bytes - (CUdeviceptr)(uintptr_t)at);
}
/* How many pushes from q on, of n, are one two-dimensional copy: alike, and evenly spaced in one allocation on either
   side. */
static int32_t gmm__peers_run(const gmm__peers *p, const gmm__peers_push *q, int32_t n) {
    const uintptr_t step = n > 1 ? (uintptr_t)q[1].from - (uintptr_t)q->from : 0;
    const size_t pitch = n > 1 ? q[1].at - q->at : 0, whole = q->bytes * (size_t)p->config.size;
    size_t from, to;
    int32_t k = 1;
    if (step < q->bytes || pitch < q->bytes || step > 0x7fffffffu || pitch > 0x7fffffffu) return 1;
    from = gmm__peers_room(p, q->from);
    to = gmm__peers_room(p, q->window->base[p->config.rank] + q->at);
    while (k < n && q[k].bytes == q->bytes && q[k].parts == q->parts && q[k].window == q->window &&
           (uintptr_t)q[k].from - (uintptr_t)q[k - 1].from == step && q[k].at - q[k - 1].at == pitch &&
           (size_t)k * step + (q->parts ? whole : q->bytes) <= from && (size_t)k * pitch + whole <= to)
        k++;
    return k;
}
/* Enqueues what is to be sent, rank by rank: few large copies after one another fill the links, which many small ones
   do not, nor copies to several ranks at a time. All begin with another one. */
static cudaError_t gmm__peers_flush(gmm__peers *p) {
    const int32_t size = p->config.size, rank = p->config.rank;
    cudaError_t e = cudaSuccess;
    int32_t i, k, n, forked = 0;
    for (i = 0; i < size && e == cudaSuccess; i++)
        for (k = 0; k < p->pushes && e == cudaSuccess; k += n) {
            const gmm__peers_push *q = &p->push[k];
            const int32_t peer = (rank + i) % size;
            const char *from = q->from + (q->parts ? (size_t)peer * q->bytes : 0);
            char *to = q->window->base[peer] + q->at + (size_t)rank * q->bytes;
            n = i == 0 ? 1 : gmm__peers_run(p, q, p->pushes - k);
            if (i == 0 && (q->parts || to == from)) continue;
            if (i == 0 && !forked) {
                e = cudaEventRecord(p->fork, p->stream);
                if (e == cudaSuccess) e = cudaStreamWaitEvent(p->side, p->fork, 0);
                forked = 1;
            }
            if (e != cudaSuccess) break;
            e = n == 1 ? cudaMemcpyAsync(to, from, q->bytes, cudaMemcpyDeviceToDevice, i == 0 ? p->side : p->stream)
                       : cudaMemcpy2DAsync(to, q[1].at - q->at, from, (size_t)(q[1].from - q->from), q->bytes,
                                           (size_t)n, cudaMemcpyDeviceToDevice, p->stream);
        }
    p->pushes = 0;
    if (e == cudaSuccess && forked) e = cudaEventRecord(p->join, p->side);
    if (e == cudaSuccess && forked) e = cudaStreamWaitEvent(p->stream, p->join, 0);
    return e;
}
static gmm_status gmm__peers_finish(gmm__peers *p) {
    enum cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    gmm_status s;
    if (!p->begun) return GMM_OK;
    p->begun = 0;
    s = gmm__peers_cuda(p, "peer copies", gmm__peers_flush(p));
    if (!s) s = gmm__peers_meet(p, GMM__PEERS_DONE, p->stream);
    if (!s) s = gmm__peers_cuda(p, "peer copies", cudaStreamIsCapturing(p->stream, &status));
    if (!s && status == cudaStreamCaptureStatusNone)
        s = gmm__peers_cuda(p, "peer copies", cudaEventRecord(p->last, p->stream));
    return s;
}

/* A call: begins the operation, and ends it where no group is open. */
typedef gmm_status gmm__peers_part(gmm__peers *p, const void *send, void *recv, size_t size, gmm_dtype dtype,
                                   gmm_stream stream);
static gmm_status gmm__peers_call(void *self, gmm__peers_part *part, const void *send, void *recv, size_t size,
                                  gmm_dtype dtype, gmm_stream stream) {
    gmm__peers *p = (gmm__peers *)self;
    int current;
    gmm_status s = gmm__wire_poll(&p->wire, NULL);
    if (s) return s;
    if (gmm__cuda_enter(p->wire.ctx, &current) != cudaSuccess) return GMM_E_CUDA;
    s = gmm__peers_start(p, stream);
    if (!s) s = part(p, send, recv, size, dtype, stream);
    if (!s && !p->wire.open) s = gmm__peers_finish(p);
    return gmm__cuda_leave(p->wire.ctx, "peers", current, cudaSuccess), s;
}

/* The same place in the windows of all ranks; window NULL: in none. */
typedef struct gmm__peers_place {
    const gmm__peers_window *window;
    size_t at;
} gmm__peers_place;
static gmm__peers_place gmm__peers_find(const gmm__peers *p, const void *memory, size_t bytes) {
    gmm__peers_place place = {NULL, 0};
    int i;
    for (i = 0; i < GMM__PEERS_WINDOWS && !place.window; i++) {
        const gmm__peers_window *w = &p->windows[i];
        const uintptr_t base = (uintptr_t)w->base[p->config.rank], at = (uintptr_t)memory;
        if (!w->bytes || at < base || at - base > w->bytes || bytes > w->bytes - (at - base)) continue;
        place.window = w;
        place.at = at - base;
    }
    return place;
}

/* Sends `bytes` of send to every rank r, at recv's own place there: all of it, to itself too; or its part r, to the
   others. */
static gmm_status gmm__peers_send(gmm__peers *p, const char *call, const void *send, void *recv, size_t bytes,
                                  int parts) {
    const gmm__peers_place to = gmm__peers_find(p, recv, bytes * (size_t)p->config.size);
    gmm__peers_push *q;
    if (!to.window) return gmm__wire_fail(&p->wire, call, "recv lies in no window");
    if (bytes == 0) return GMM_OK;
    if (p->pushes == GMM__PEERS_PUSHES) {
        const gmm_status s = gmm__peers_cuda(p, call, gmm__peers_flush(p));
        if (s) return s;
    }
    q = &p->push[p->pushes++];
    q->from = (const char *)send;
    q->window = to.window;
    q->at = to.at;
    q->bytes = bytes;
    q->parts = parts;
    return GMM_OK;
}
static gmm_status gmm__peers_gather_part(gmm__peers *p, const void *send, void *recv, size_t bytes, gmm_dtype dtype,
                                         gmm_stream stream) {
    (void)dtype, (void)stream;
    return gmm__peers_send(p, "all_gather", send, recv, bytes, 0);
}
static gmm_status gmm__peers_exchange_part(gmm__peers *p, const void *send, void *recv, size_t bytes, gmm_dtype dtype,
                                           gmm_stream stream) {
    (void)dtype, (void)stream;
    return gmm__peers_send(p, "all_to_all", send, recv, bytes, 1);
}
/* The sum over what the peers send, read from their windows. */
static gmm_status gmm__peers_scatter_part(gmm__peers *p, const void *send, void *recv, size_t count, gmm_dtype dtype,
                                          gmm_stream stream) {
    const size_t bytes = count * (size_t)(gmm_dtype_bits(dtype) / 8);
    const gmm__peers_place from = gmm__peers_find(p, send, bytes * (size_t)p->config.size);
    void *addends[GMM__PEERS_MOST];
    gmm_accumulation d;
    gmm_mat x, y;
    int32_t i;
    if (!from.window) return gmm__wire_fail(&p->wire, "reduce_scatter", "send lies in no window");
    if (count == 0) return GMM_OK;
    for (i = 0; i < p->config.size; i++)
        addends[i] = from.window->base[i] + from.at + (size_t)p->config.rank * bytes;
    memset(&d, 0, sizeof d);
    d.count = p->config.size;
    for (d.cols = 1; d.cols < 4096 && count % (size_t)(2 * d.cols) == 0; d.cols *= 2) { }
    d.rows = (int64_t)count / d.cols;
    d.scale = 1.0f;
    x = gmm_mat_table(dtype, addends, (uint32_t)GMM_MAT_TABLE_ON_HOST);
    y = gmm_mat_packed(dtype, recv);
    d.x = &x;
    d.y = &y;
    return gmm_accumulate(p->wire.ctx, &d, NULL, 0, stream)
               ? gmm__wire_fail(&p->wire, "reduce_scatter", gmm_last_error(p->wire.ctx)) : GMM_OK;
}
/* values = the largest of each and what lies in the box. */
static __global__ void gmm_peers_max(float *values, const float *box, int size, int rank, int count) {
    const int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    int r;
    float most;
    if (i >= count) return;
    most = values[i];
    for (r = 0; r < size; r++) {
        const float v = r == rank ? most : box[(size_t)r * GMM__PEERS_BOX + i];
        most = v > most || v != v ? v : most;
    }
    values[i] = most;
}
static gmm_status gmm__peers_max_part(gmm__peers *p, const void *send, void *recv, size_t count, gmm_dtype dtype,
                                      gmm_stream stream) {
    const int32_t size = p->config.size, rank = p->config.rank;
    float *values = (float *)recv;
    cudaError_t e = cudaSuccess;
    gmm_status s = GMM_OK;
    size_t at;
    int32_t i;
    (void)send, (void)dtype;
    for (at = 0; at < count && !s; at += GMM__PEERS_BOX) {
        const int n = count - at < GMM__PEERS_BOX ? (int)(count - at) : (int)GMM__PEERS_BOX;
        if (at > 0) s = gmm__peers_start(p, stream);
        for (i = 1; i < size && e == cudaSuccess; i++)
            e = cudaMemcpyAsync(gmm__peers_box(p, (rank + i) % size, rank), values + at, (size_t)n * sizeof *values,
                                cudaMemcpyDeviceToDevice, stream);
        if (!s) s = gmm__peers_cuda(p, "all_reduce_max", e);
        if (!s) s = gmm__peers_finish(p); /* the box is full */
        if (s) break;
        gmm_peers_max<<<(n + 127) / 128, 128, 0, stream>>>(values + at, gmm__peers_box(p, rank, 0), size, rank, n);
        s = gmm__peers_cuda(p, "all_reduce_max", cudaGetLastError());
    }
    return s;
}

static gmm_status gmm__peers_gather(void *self, const void *send, void *recv, size_t bytes, gmm_stream stream) {
    return gmm__peers_call(self, gmm__peers_gather_part, send, recv, bytes, GMM_NONE, stream);
}
static gmm_status gmm__peers_exchange(void *self, const void *send, void *recv, size_t bytes, gmm_stream stream) {
    return gmm__peers_call(self, gmm__peers_exchange_part, send, recv, bytes, GMM_NONE, stream);
}
static gmm_status gmm__peers_scatter(void *self, const void *send, void *recv, size_t count, gmm_dtype dtype,
                                     gmm_stream stream) {
    return gmm__peers_call(self, gmm__peers_scatter_part, send, recv, count, dtype, stream);
}
static gmm_status gmm__peers_max(void *self, float *values, size_t count, gmm_stream stream) {
    return count ? gmm__peers_call(self, gmm__peers_max_part, NULL, values, count, GMM_F32, stream) : GMM_OK;
}
static gmm_status gmm__peers_begin(void *self, const char *what) {
    gmm__peers *p = (gmm__peers *)self;
    p->wire.what = what;
    p->wire.open = 1;
    return gmm__wire_poll(&p->wire, NULL);
}
static gmm_status gmm__peers_end(void *self) {
    gmm__peers *p = (gmm__peers *)self;
    int current;
    gmm_status s = gmm__wire_poll(&p->wire, NULL);
    p->wire.open = 0;
    if (s) return s;
    if (gmm__cuda_enter(p->wire.ctx, &current) != cudaSuccess) return GMM_E_CUDA;
    s = gmm__peers_finish(p);
    return gmm__cuda_leave(p->wire.ctx, "peers", current, cudaSuccess), s;
}

