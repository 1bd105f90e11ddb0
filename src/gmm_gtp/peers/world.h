/* Windows, failures, opening and closing of communicators of peer copies. */

/* Finds a peer that has given up, and for the message of a timeout the only peer whose READY flag is not set. That peer
   has not reached the operation; of two ranks it may also not have finished its copies, since READY flags are reset
   before these. It waits for its copy of the flags at most 0.1 s, since a stream of the device may wait for ever. */
static gmm_status gmm__peers_poll(void *self, gmm_error *error) {
    gmm__peers *p = (gmm__peers *)self;
    gmm_status s = gmm__comm_poll(&p->comm_base, error);
    const double begin = gmm__gtp_now();
    const int32_t size = p->config.size, rank = p->config.rank;
    int32_t i, missing = -1, aborted = -1, current, missing_count = 0;
    char text[96];
    cudaError_t e;
    if (s || size == 1 || gmm__cuda_enter(p->comm_base.ctx, &current) != cudaSuccess) return s;
    e = cudaMemcpyAsync(p->host_flags, gmm__peers_flag(p, rank, GMM__PEERS_READY, 0),
                        (size_t)(GMM__PEERS_FLAGS * size) * sizeof *p->host_flags, cudaMemcpyDeviceToHost,
                        p->control_stream);
    if (e == cudaSuccess)
        while ((e = cudaStreamQuery(p->control_stream)) == cudaErrorNotReady && gmm__gtp_now() - begin < 0.1) { }
    for (i = 0; i < size && e == cudaSuccess; i++) {
        if (i != rank && p->host_flags[GMM__PEERS_ABORTED * size + i]) aborted = i;
        if (i != rank && !p->host_flags[GMM__PEERS_READY * size + i]) missing = i, missing_count++;
    }
    if (aborted >= 0) {
        (void)snprintf(text, sizeof text, "rank %d of %d has given up: what came since is void", aborted, size);
        s = gmm__comm_fail(&p->comm_base, "peer copies", text);
        p->notified = 1;
        (void)gmm__comm_poll(&p->comm_base, error);
    } else if (missing_count == 1 && error && cudaEventQuery(p->last) == cudaErrorNotReady) {
        /* the message of a timeout contains this text; s stays GMM_OK */
        (void)snprintf(error->text, sizeof error->text, "rank %d of %d has not joined%s", missing, size,
                       size == 2 ? ", or not finished" : "");
    }
    (void)cudaGetLastError();
    return gmm__cuda_leave(p->comm_base.ctx, "peers", current, cudaSuccess), s;
}
/* Sets the flags again and again for `nanoseconds`, so that streams that wait for a peer, or begin to wait in that
   time, continue. */
static __global__ void gmm_peers_release(volatile uint32_t *flags, int count, unsigned long long nanoseconds) {
    const unsigned long long begin = gmm__ptx_globaltimer();
    do {
        if ((int)threadIdx.x < count) flags[threadIdx.x] = 1;
        __nanosleep(1000);
    } while (gmm__ptx_globaltimer() - begin < nanoseconds);
}
/* Ends the use of the communicator: tells all ranks, unless a peer has done so (`notified`), and releases the streams
   of this rank that wait for a peer. */
static void gmm__peers_give_up(void *self, const char *why) {
    gmm__peers *p = (gmm__peers *)self;
    CUstreamBatchMemOpParams op[GMM__PEERS_MAX_RANKS];
    const int32_t size = p->config.size, rank = p->config.rank;
    int32_t i;
    int current;
    if (p->comm_base.given_up) return;
    p->comm_base.given_up = 1;
    (void)gmm__comm_fail(&p->comm_base, "given up", why);
    if (gmm__cuda_enter(p->comm_base.ctx, &current) != cudaSuccess) return;
    memset(op, 0, sizeof op);
    for (i = 0; i < size; i++) { /* the rank's own flag is the last write of the batch */
        uint32_t *flag = gmm__peers_flag(p, (rank + 1 + i) % size, GMM__PEERS_ABORTED, rank);
        op[i].writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_32;
        op[i].writeValue.address = (CUdeviceptr)(uintptr_t)flag;
        op[i].writeValue.value = 1;
        op[i].writeValue.flags = CU_STREAM_WRITE_VALUE_DEFAULT;
    }
    if (!p->notified) (void)p->batch_mem_op(p->control_stream, (unsigned)size, op, 0);
    gmm_peers_release<<<1, GMM__PEERS_ABORTED * GMM__PEERS_MAX_RANKS, 0, p->control_stream>>>(
        gmm__peers_flag(p, rank, GMM__PEERS_READY, 0), GMM__PEERS_ABORTED * size, 3000000000ull);
    (void)cudaGetLastError();
    (void)gmm__cuda_leave(p->comm_base.ctx, "peers", current, cudaSuccess);
}

/* Closes the mappings of a window. */
static void gmm__peers_close_window(gmm__peers *p, gmm__peers_window *w) {
    int32_t i;
    for (i = 0; i < p->config.size; i++)
        if (w->opened[i]) (void)cudaIpcCloseMemHandle(w->opened[i]);
    memset(w, 0, sizeof *w);
}
/* Exchanges whether the call has failed on a rank; if so, it fails on all. `failure` is the reason on this rank, or
   NULL. */
static gmm_status gmm__peers_check_ranks(gmm__peers *p, const char *call, const char *failure) {
    char own = failure != NULL, all[GMM__PEERS_MAX_RANKS], text[64];
    int32_t i;
    if (p->config.exchange(p->config.user, &own, all, 1) != GMM_OK)
        return gmm__comm_fail(&p->comm_base, call, failure ? failure : "the exchange failed");
    if (failure) return gmm__comm_fail(&p->comm_base, call, failure);
    for (i = 0; i < p->config.size && !all[i]; i++) { }
    if (i == p->config.size) return GMM_OK;
    (void)snprintf(text, sizeof text, "it failed on rank %d of %d", i, p->config.size);
    return gmm__comm_fail(&p->comm_base, call, text);
}
/* Exchanges the addresses of a window and maps those of the peers. All ranks call it, also those that have failed
   before: they pass the reason as `failure`, and w may then be NULL. */
static gmm_status gmm__peers_open_window(gmm__peers *p, gmm__peers_window *w, void *base, size_t bytes,
                                         const char *failure) {
    static const char call[] = "window";
    gmm__peers_handle own, all[GMM__PEERS_MAX_RANKS];
    cudaError_t e = cudaSuccess;
    char text[96];
    gmm_status s;
    int32_t i;
    memset(&own, 0, sizeof own);
    own.base = (char *)base;
    own.bytes = bytes;
    own.device = p->comm_base.ctx->config.device;
    if (p->config.processes && !failure) {
        CUdeviceptr start = 0;
        e = cudaIpcGetMemHandle(&own.handle, base);
        if (e == cudaSuccess && p->address_range(&start, NULL, (CUdeviceptr)(uintptr_t)base) != CUDA_SUCCESS)
            e = cudaErrorInvalidValue;
        own.offset = (uintptr_t)base - (uintptr_t)start;
        if (e != cudaSuccess) failure = cudaGetErrorString(e);
    }
    s = gmm__peers_check_ranks(p, call, failure);
    if (!s && p->config.exchange(p->config.user, &own, all, sizeof own) != GMM_OK)
        s = gmm__comm_fail(&p->comm_base, call, "the exchange failed");
    if (s) return s;
    for (i = 0; i < p->config.size && !failure; i++) {
        if (all[i].bytes != bytes) {
            (void)snprintf(text, sizeof text, "%zu bytes, rank %d has %zu: must be of equal size", bytes, i,
                           all[i].bytes);
            failure = text;
        }
        else w->base[i] = all[i].base;
        if (failure || i == p->config.rank) continue;
        if (p->config.processes) {
            e = cudaIpcOpenMemHandle(&w->opened[i], all[i].handle, cudaIpcMemLazyEnablePeerAccess);
            if (e == cudaSuccess) w->base[i] = (char *)w->opened[i] + all[i].offset;
        } else if (all[i].device == own.device) {
            (void)snprintf(text, sizeof text, "ranks %d and %d of %d are threads on GPU %d: only processes may share "
                           "one", p->config.rank, i, p->config.size, own.device);
            failure = text;
        } else {
            e = cudaDeviceEnablePeerAccess(all[i].device, 0);
            if (e == cudaErrorPeerAccessAlreadyEnabled) e = cudaSuccess;
            (void)cudaGetLastError();
        }
        if (e != cudaSuccess) failure = cudaGetErrorString(e);
    }
    w->bytes = bytes;
    s = gmm__peers_check_ranks(p, call, failure);
    if (!s) return GMM_OK;
    gmm__peers_close_window(p, w);
    (void)cudaGetLastError();
    (void)gmm__peers_check_ranks(p, call, NULL); /* owners may free the memory once all ranks have closed it */
    return s;
}
static gmm_status gmm__peers_window_add(void *self, void *base, size_t bytes, void **window) {
    gmm__peers *p = (gmm__peers *)self;
    gmm__peers_window *w = NULL;
    const char *failure = gmm__comm_poll(&p->comm_base, NULL) != GMM_OK ? "the communicator has failed" : NULL;
    int i, current = 0;
    const int entered = gmm__cuda_enter(p->comm_base.ctx, &current) == cudaSuccess;
    gmm_status s;
    *window = NULL;
    for (i = 0; i < GMM__PEERS_MAX_WINDOWS && !w; i++)
        if (!p->windows[i].bytes) w = &p->windows[i];
    if (!failure && !entered) failure = gmm_last_error(p->comm_base.ctx);
    if (!failure && !w) failure = "there are 16 already";
    s = gmm__peers_open_window(p, w, base, bytes, failure);
    if (!s) *window = w;
    if (entered) (void)gmm__cuda_leave(p->comm_base.ctx, "window", current, cudaSuccess);
    return s;
}
static gmm_status gmm__peers_window_remove(void *self, void *window) {
    gmm__peers *p = (gmm__peers *)self;
    char own = 0, all[GMM__PEERS_MAX_RANKS];
    int current;
    const int entered = gmm__cuda_enter(p->comm_base.ctx, &current) == cudaSuccess;
    if (entered) gmm__peers_close_window(p, (gmm__peers_window *)window);
    if (entered) (void)gmm__cuda_leave(p->comm_base.ctx, "window", current, cudaSuccess);
    /* owners may free the memory once all ranks have closed it */
    if (p->config.exchange(p->config.user, &own, all, 1) != GMM_OK)
        return gmm__comm_fail(&p->comm_base, "window", "the exchange failed");
    return entered ? GMM_OK : GMM_E_CUDA;
}

static void gmm__peers_free(gmm__peers *p) {
    int current, i;
    if (gmm__cuda_enter(p->comm_base.ctx, &current) == cudaSuccess) {
        char *own = p->own.base[p->config.rank];
        for (i = 0; i < GMM__PEERS_MAX_WINDOWS; i++) gmm__peers_close_window(p, &p->windows[i]);
        gmm__peers_close_window(p, &p->own);
        if (own) (void)cudaFree(own);
        if (p->copy_stream) (void)cudaStreamDestroy(p->copy_stream);
        if (p->join) (void)cudaEventDestroy(p->join);
        if (p->control_stream) (void)cudaStreamDestroy(p->control_stream);
        if (p->host_flags) (void)cudaFreeHost(p->host_flags);
        if (p->fork) (void)cudaEventDestroy(p->fork);
        if (p->last) (void)cudaEventDestroy(p->last);
        (void)cudaGetLastError();
        (void)gmm__cuda_leave(p->comm_base.ctx, "peers", current, cudaSuccess);
    }
    gmm__comm_free(p->comm_base.ctx, p);
}

/* Reports a failure before the first exchange to the peers, which may already wait in it. */
static gmm_status gmm__peers_fail_open(const gmm_peers_config *c, gmm_status status) {
    char own = 1, all[GMM__PEERS_MAX_RANKS];
    if (c->exchange && c->size >= 1 && c->size <= GMM__PEERS_MAX_RANKS && c->rank >= 0 && c->rank < c->size)
        (void)c->exchange(c->user, &own, all, 1);
    return status;
}
GMMDEF gmm_status gmm_peers_open(const gmm_peers_config *config, gmm_comm *out, gmm_error *error) {
    static const char fn[] = "gmm_peers_open";
    enum cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
    gmm_peers_config c;
    gmm__peers *p;
    void *batch = NULL, *range = NULL, *own = NULL, *host_flags = NULL;
    size_t bytes;
    int current, low = 0, high = 0;
    cudaError_t e;
    gmm_status s;
    if (!out) return gmm__fail(error, GMM_E_NULL, "%s: out is NULL", fn);
    memset(out, 0, sizeof *out);
    if ((s = gmm__gtp_read(fn, "config", config, &c, sizeof c, error)) != GMM_OK) return s;
    if (!c.ctx || !c.exchange)
        return gmm__peers_fail_open(&c, gmm__fail(error, GMM_E_NULL, "%s: config->%s is NULL", fn,
                                                  c.ctx ? "exchange" : "ctx"));
    if (c.size < 1 || c.size > GMM__PEERS_MAX_RANKS || c.rank < 0 || c.rank >= c.size || c.processes < 0 ||
        c.processes > 1 || c.ctx->config.space != GMM_SPACE_CUDA)
        return gmm__peers_fail_open(&c, gmm__fail(
            error, GMM_E_ARG, "%s: rank %d of %d, processes %d, ctx on %s: must be a rank of 1 to %d, 0 or 1, and on a "
            "GPU", fn, c.rank, c.size, c.processes,
            c.ctx->config.space == GMM_SPACE_CUDA ? "a GPU" : "the CPU", (int)GMM__PEERS_MAX_RANKS));
    p = (gmm__peers *)gmm__comm_alloc(c.ctx, sizeof *p);
    if (!p) return gmm__peers_fail_open(&c, gmm__fail(error, GMM_E_MEMORY, "%s: no memory", fn));
    p->comm_base.ctx = c.ctx;
    p->config = c;
    e = gmm__cuda_enter(c.ctx, &current);
    if (e != cudaSuccess) {
        gmm__comm_free(c.ctx, p);
        return gmm__peers_fail_open(&c, gmm__fail(error, GMM_E_CUDA, "%s: %s", fn, cudaGetErrorString(e)));
    }
    e = cudaGetDriverEntryPointByVersion("cuStreamBatchMemOp", &batch, 11070, cudaEnableDefault, &found);
    p->batch_mem_op = (PFN_cuStreamBatchMemOp_v11070)batch;
    if (e == cudaSuccess && (found != cudaDriverEntryPointSuccess || !batch)) e = cudaErrorNotSupported;
    if (e == cudaSuccess)
        e = cudaGetDriverEntryPointByVersion("cuMemGetAddressRange", &range, 3020, cudaEnableDefault, &found);
    p->address_range = (PFN_cuMemGetAddressRange_v3020)range;
    if (e == cudaSuccess && (found != cudaDriverEntryPointSuccess || !range)) e = cudaErrorNotSupported;
    if (e == cudaSuccess) e = cudaStreamCreateWithFlags(&p->copy_stream, cudaStreamNonBlocking);
    if (e == cudaSuccess) e = cudaDeviceGetStreamPriorityRange(&low, &high);
    if (e == cudaSuccess) e = cudaStreamCreateWithPriority(&p->control_stream, cudaStreamNonBlocking, (low + high) / 2);
    if (e == cudaSuccess) e = cudaEventCreateWithFlags(&p->fork, cudaEventDisableTiming);
    if (e == cudaSuccess) e = cudaEventCreateWithFlags(&p->join, cudaEventDisableTiming);
    if (e == cudaSuccess) e = cudaEventCreateWithFlags(&p->last, cudaEventDisableTiming);
    bytes = gmm__peers_own_bytes(c.size);
    if (bytes < GMM__PEERS_MIN_BYTES) bytes = GMM__PEERS_MIN_BYTES;
    if (e == cudaSuccess)
        e = cudaMallocHost(&host_flags, GMM__PEERS_FLAGS * GMM__PEERS_MAX_RANKS * sizeof *p->host_flags);
    if (e == cudaSuccess) e = cudaMalloc(&own, bytes);
    if (e == cudaSuccess) e = cudaMemset(own, 0, bytes);
    p->host_flags = (uint32_t *)host_flags;
    if (e == cudaSuccess) {
        /* Launches both kernels, so that they are loaded here: later, loading may wait for the device while a stream of
           it waits for a peer. */
        gmm_peers_release<<<1, GMM__PEERS_ABORTED * GMM__PEERS_MAX_RANKS, 0, p->control_stream>>>((uint32_t *)own, 0,
                                                                                                  0);
        gmm_peers_max<<<1, 1, 0, p->control_stream>>>((float *)own, (const float *)own, 0, 0, 0);
        e = cudaGetLastError();
    }
    if (e == cudaSuccess) e = cudaDeviceSynchronize(); /* the flags are 0 before a peer writes them */
    s = gmm__peers_open_window(p, &p->own, own, bytes, e != cudaSuccess ? cudaGetErrorString(e) : NULL);
    (void)gmm__cuda_leave(c.ctx, fn, current, cudaSuccess);
    if (e != cudaSuccess || s) {
        s = e != cudaSuccess ? gmm__fail(error, GMM_E_CUDA, "%s: %s", fn, cudaGetErrorString(e))
                             : gmm__fail(error, s, "%s: %.400s", fn, p->comm_base.error.text);
        p->own.base[c.rank] = (char *)own;
        gmm__peers_free(p);
        return s;
    }
    out->rank = c.rank;
    out->size = c.size;
    out->exchanges = 1;
    out->self = p;
    out->group_begin = gmm__peers_group_begin;
    out->group_end = gmm__peers_group_end;
    out->all_gather = gmm__peers_all_gather;
    out->reduce_scatter = gmm__peers_reduce_scatter;
    out->all_to_all = gmm__peers_all_to_all;
    out->all_reduce_max = gmm__peers_all_reduce_max;
    out->window_add = gmm__peers_window_add;
    out->window_remove = gmm__peers_window_remove;
    out->poll = gmm__peers_poll;
    out->give_up = gmm__peers_give_up;
    return GMM_OK;
}
GMMDEF void gmm_peers_close(gmm_comm *comm) {
    if (!comm || !comm->self) return;
    gmm__peers_free((gmm__peers *)comm->self);
    memset(comm, 0, sizeof *comm);
}

#else /* __CUDACC__ */

GMMDEF gmm_status gmm_peers_open(const gmm_peers_config *config, gmm_comm *out, gmm_error *error) {
    (void)config;
    if (out) memset(out, 0, sizeof *out);
    return gmm__fail(error, GMM_E_BUILD, "gmm_peers_open: this build holds the CPU engine alone: compile with nvcc");
}
GMMDEF void gmm_peers_close(gmm_comm *comm) { (void)comm; }

#endif /* __CUDACC__ */

