/* Looks for who is gone or missing without a wait that could itself go on for ever. */
static gmm_status gmm__peers_poll(void *self, gmm_error *error) {
    gmm__peers *p = (gmm__peers *)self;
    gmm_status s = gmm__wire_poll(&p->wire, error);
    const double begin = gmm__gtp_now();
    const int32_t size = p->config.size, rank = p->config.rank;
    int32_t i, missing = -1, gone = -1, current, n = 0;
    char text[96];
    cudaError_t e;
    if (s || size == 1 || gmm__cuda_enter(p->wire.ctx, &current) != cudaSuccess) return s;
    e = cudaMemcpyAsync(p->seen, gmm__peers_word(p, rank, GMM__PEERS_CAME, 0),
                        (size_t)(GMM__PEERS_WORDS * size) * sizeof *p->seen, cudaMemcpyDeviceToHost, p->aid);
    if (e == cudaSuccess)
        while ((e = cudaStreamQuery(p->aid)) == cudaErrorNotReady && gmm__gtp_now() - begin < 0.1) { }
    for (i = 0; i < size && e == cudaSuccess; i++) {
        if (i != rank && p->seen[GMM__PEERS_GONE * size + i]) gone = i;
        if (i != rank && !p->seen[GMM__PEERS_CAME * size + i]) missing = i, n++;
    }
    if (gone >= 0) {
        (void)snprintf(text, sizeof text, "rank %d of %d has given up: what came since is void", gone, size);
        s = gmm__wire_fail(&p->wire, "peer copies", text);
        p->told = 1;
        (void)gmm__wire_poll(&p->wire, error);
    } else if (n == 1 && error && cudaEventQuery(p->last) == cudaErrorNotReady) /* for whoever finds it too long */
        (void)snprintf(error->text, sizeof error->text, "rank %d of %d has not joined", missing, size);
    (void)cudaGetLastError();
    return gmm__cuda_leave(p->wire.ctx, "peers", current, cudaSuccess), s;
}
/* Lets go the streams that wait for a peer, and those that come to such a wait within a while. */
static __global__ void gmm_peers_release(volatile uint32_t *words, int count, unsigned long long nanoseconds) {
    unsigned long long begin, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
    do {
        if ((int)threadIdx.x < count) words[threadIdx.x] = 1;
        __nanosleep(1000);
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    } while (now - begin < nanoseconds);
}
static void gmm__peers_give_up(void *self, const char *why) {
    gmm__peers *p = (gmm__peers *)self;
    CUstreamBatchMemOpParams op[GMM__PEERS_MOST];
    const int32_t size = p->config.size, rank = p->config.rank;
    int32_t i;
    int current;
    if (p->wire.given_up) return;
    p->wire.given_up = 1;
    (void)gmm__wire_fail(&p->wire, "given up", why);
    if (gmm__cuda_enter(p->wire.ctx, &current) != cudaSuccess) return;
    memset(op, 0, sizeof op);
    for (i = 0; i < size; i++) { /* its own word comes last, behind the fence of that write */
        uint32_t *word = gmm__peers_word(p, (rank + 1 + i) % size, GMM__PEERS_GONE, rank);
        op[i].writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_32;
        op[i].writeValue.address = (CUdeviceptr)(uintptr_t)word;
        op[i].writeValue.value = 1;
        op[i].writeValue.flags = CU_STREAM_WRITE_VALUE_DEFAULT;
    }
    if (!p->told) (void)p->batch(p->aid, (unsigned)size, op, 0);
    gmm_peers_release<<<1, GMM__PEERS_GONE * GMM__PEERS_MOST, 0, p->aid>>>(
        gmm__peers_word(p, rank, GMM__PEERS_CAME, 0), GMM__PEERS_GONE * size, 3000000000ull);
    (void)cudaGetLastError();
    (void)gmm__cuda_leave(p->wire.ctx, "peers", current, cudaSuccess);
}

/* Lets the peers have a window, and gets theirs. */
static void gmm__peers_shut(gmm__peers *p, gmm__peers_window *w) {
    int32_t i;
    for (i = 0; i < p->config.size; i++)
        if (w->opened[i]) (void)cudaIpcCloseMemHandle(w->opened[i]);
    memset(w, 0, sizeof *w);
}
/* Whether all ranks are well so far: what fails on one fails on all. */
static gmm_status gmm__peers_agree(gmm__peers *p, const char *call, const char *bad) {
    char mine = bad != NULL, all[GMM__PEERS_MOST], text[64];
    int32_t i;
    if (p->config.exchange(p->config.user, &mine, all, 1) != GMM_OK)
        return gmm__wire_fail(&p->wire, call, bad ? bad : "the exchange failed");
    if (bad) return gmm__wire_fail(&p->wire, call, bad);
    for (i = 0; i < p->config.size && !all[i]; i++) { }
    if (i == p->config.size) return GMM_OK;
    (void)snprintf(text, sizeof text, "it failed on rank %d of %d", i, p->config.size);
    return gmm__wire_fail(&p->wire, call, text);
}
/* `bad`: why this rank has none; w may be NULL then. */
static gmm_status gmm__peers_share(gmm__peers *p, gmm__peers_window *w, void *base, size_t bytes, const char *bad) {
    static const char call[] = "window";
    gmm__peers_offer mine, all[GMM__PEERS_MOST];
    cudaError_t e = cudaSuccess;
    gmm_status s;
    int32_t i;
    memset(&mine, 0, sizeof mine);
    mine.base = (char *)base;
    mine.bytes = bytes;
    mine.device = p->wire.ctx->config.device;
    if (p->config.processes && !bad) {
        CUdeviceptr start = 0;
        e = cudaIpcGetMemHandle(&mine.handle, base);
        if (e == cudaSuccess && p->range(&start, NULL, (CUdeviceptr)(uintptr_t)base) != CUDA_SUCCESS)
            e = cudaErrorInvalidValue;
        mine.offset = (uintptr_t)base - (uintptr_t)start;
        if (e != cudaSuccess) bad = cudaGetErrorString(e);
    }
    s = gmm__peers_agree(p, call, bad);
    if (!s && p->config.exchange(p->config.user, &mine, all, sizeof mine) != GMM_OK)
        s = gmm__wire_fail(&p->wire, call, "the exchange failed");
    if (s) return s;
    for (i = 0; i < p->config.size && !bad; i++) {
        if (all[i].bytes != bytes) bad = "that of a peer has another size";
        else w->base[i] = all[i].base;
        if (bad || i == p->config.rank) continue;
        if (p->config.processes) {
            e = cudaIpcOpenMemHandle(&w->opened[i], all[i].handle, cudaIpcMemLazyEnablePeerAccess);
            if (e == cudaSuccess) w->base[i] = (char *)w->opened[i] + all[i].offset;
        } else if (all[i].device != mine.device) {
            e = cudaDeviceEnablePeerAccess(all[i].device, 0);
            if (e == cudaErrorPeerAccessAlreadyEnabled) e = cudaSuccess;
            (void)cudaGetLastError();
        }
        if (e != cudaSuccess) bad = cudaGetErrorString(e);
    }
    w->bytes = bytes;
    s = gmm__peers_agree(p, call, bad);
    if (!s) return GMM_OK;
    gmm__peers_shut(p, w);
    (void)cudaGetLastError();
    (void)gmm__peers_agree(p, call, NULL); /* nobody has it open any more: it may be freed */
    return s;
}
static gmm_status gmm__peers_window_add(void *self, void *base, size_t bytes, void **window) {
    gmm__peers *p = (gmm__peers *)self;
    gmm__peers_window *w = NULL;
    const char *bad = gmm__wire_poll(&p->wire, NULL) != GMM_OK ? "the communicator has failed" : NULL;
    int i, current = 0;
    const int entered = gmm__cuda_enter(p->wire.ctx, &current) == cudaSuccess;
    gmm_status s;
    *window = NULL;
    for (i = 0; i < GMM__PEERS_WINDOWS && !w; i++)
        if (!p->windows[i].bytes) w = &p->windows[i];
    if (!bad && !entered) bad = gmm_last_error(p->wire.ctx);
    if (!bad && !w) bad = "there are 16 already";
    s = gmm__peers_share(p, w, base, bytes, bad);
    if (!s) *window = w;
    if (entered) (void)gmm__cuda_leave(p->wire.ctx, "window", current, cudaSuccess);
    return s;
}
static gmm_status gmm__peers_window_remove(void *self, void *window) {
    gmm__peers *p = (gmm__peers *)self;
    char mine = 0, all[GMM__PEERS_MOST];
    int current;
    const int entered = gmm__cuda_enter(p->wire.ctx, &current) == cudaSuccess;
    if (entered) gmm__peers_shut(p, (gmm__peers_window *)window);
    if (entered) (void)gmm__cuda_leave(p->wire.ctx, "window", current, cudaSuccess);
    if (p->config.exchange(p->config.user, &mine, all, 1) != GMM_OK) /* the owner may free it now */
        return gmm__wire_fail(&p->wire, "window", "the exchange failed");
    return entered ? GMM_OK : GMM_E_CUDA;
}

static void gmm__peers_free(gmm__peers *p) {
    int current, i;
    if (gmm__cuda_enter(p->wire.ctx, &current) == cudaSuccess) {
        char *own = p->own.base[p->config.rank];
        for (i = 0; i < GMM__PEERS_WINDOWS; i++) gmm__peers_shut(p, &p->windows[i]);
        gmm__peers_shut(p, &p->own);
        if (own) (void)cudaFree(own);
        if (p->side) (void)cudaStreamDestroy(p->side);
        if (p->join) (void)cudaEventDestroy(p->join);
        if (p->aid) (void)cudaStreamDestroy(p->aid);
        if (p->seen) (void)cudaFreeHost(p->seen);
        if (p->fork) (void)cudaEventDestroy(p->fork);
        if (p->last) (void)cudaEventDestroy(p->last);
        (void)cudaGetLastError();
        (void)gmm__cuda_leave(p->wire.ctx, "peers", current, cudaSuccess);
    }
    gmm__wire_free(p->wire.ctx, p);
}

/* Tells the others, who may have begun to wait, that this rank has failed before it came to them. */
static gmm_status gmm__peers_refuse(const gmm_peers_config *c, gmm_status status) {
    char mine = 1, all[GMM__PEERS_MOST];
    if (c->exchange && c->size >= 1 && c->size <= GMM__PEERS_MOST && c->rank >= 0 && c->rank < c->size)
        (void)c->exchange(c->user, &mine, all, 1);
    return status;
}
GMMDEF gmm_status gmm_peers_open(const gmm_peers_config *config, gmm_comm *out, gmm_error *error) {
    static const char fn[] = "gmm_peers_open";
    enum cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
    gmm_peers_config c;
    gmm__peers *p;
    void *batch = NULL, *range = NULL, *own = NULL, *seen = NULL;
    size_t bytes;
    int current, low = 0, high = 0;
    cudaError_t e;
    gmm_status s;
    if (!out) return gmm__fail(error, GMM_E_NULL, "%s: out is NULL", fn);
    memset(out, 0, sizeof *out);
    if ((s = gmm__gtp_open(fn, "config", config, &c, sizeof c, error)) != GMM_OK) return s;
    if (!c.ctx || !c.exchange)
        return gmm__peers_refuse(&c, gmm__fail(error, GMM_E_NULL, "%s: config->%s is NULL", fn,
                                               c.ctx ? "exchange" : "ctx"));
    if (c.size < 1 || c.size > GMM__PEERS_MOST || c.rank < 0 || c.rank >= c.size || c.processes < 0 ||
        c.processes > 1 || c.ctx->config.space != GMM_SPACE_CUDA)
        return gmm__peers_refuse(&c, gmm__fail(
            error, GMM_E_ARG, "%s: rank %d of %d, processes %d, ctx on %s: must be a rank of 1 to %d, 0 or 1, and on a "
            "GPU", fn, c.rank, c.size, c.processes,
            c.ctx->config.space == GMM_SPACE_CUDA ? "a GPU" : "the CPU", (int)GMM__PEERS_MOST));
    p = (gmm__peers *)gmm__wire_alloc(c.ctx, sizeof *p);
    if (!p) return gmm__peers_refuse(&c, gmm__fail(error, GMM_E_MEMORY, "%s: no memory", fn));
    p->wire.ctx = c.ctx;
    p->config = c;
    e = gmm__cuda_enter(c.ctx, &current);
    if (e != cudaSuccess) {
        gmm__wire_free(c.ctx, p);
        return gmm__peers_refuse(&c, gmm__fail(error, GMM_E_CUDA, "%s: %s", fn, cudaGetErrorString(e)));
    }
    e = cudaGetDriverEntryPointByVersion("cuStreamBatchMemOp", &batch, 11070, cudaEnableDefault, &found);
    p->batch = (PFN_cuStreamBatchMemOp_v11070)batch;
    if (e == cudaSuccess && (found != cudaDriverEntryPointSuccess || !batch)) e = cudaErrorNotSupported;
    if (e == cudaSuccess)
        e = cudaGetDriverEntryPointByVersion("cuMemGetAddressRange", &range, 3020, cudaEnableDefault, &found);
    p->range = (PFN_cuMemGetAddressRange_v3020)range;
    if (e == cudaSuccess && (found != cudaDriverEntryPointSuccess || !range)) e = cudaErrorNotSupported;
    if (e == cudaSuccess) e = cudaStreamCreateWithFlags(&p->side, cudaStreamNonBlocking);
    if (e == cudaSuccess) e = cudaDeviceGetStreamPriorityRange(&low, &high);
    if (e == cudaSuccess) e = cudaStreamCreateWithPriority(&p->aid, cudaStreamNonBlocking, (low + high) / 2);
    if (e == cudaSuccess) e = cudaEventCreateWithFlags(&p->fork, cudaEventDisableTiming);
    if (e == cudaSuccess) e = cudaEventCreateWithFlags(&p->join, cudaEventDisableTiming);
    if (e == cudaSuccess) e = cudaEventCreateWithFlags(&p->last, cudaEventDisableTiming);
    bytes = gmm__peers_bytes(c.size);
    if (bytes < GMM__PEERS_BLOCK) bytes = GMM__PEERS_BLOCK;
    if (e == cudaSuccess) e = cudaMallocHost(&seen, GMM__PEERS_WORDS * GMM__PEERS_MOST * sizeof *p->seen);
    if (e == cudaSuccess) e = cudaMalloc(&own, bytes);
    if (e == cudaSuccess) e = cudaMemset(own, 0, bytes);
    p->seen = (uint32_t *)seen;
    if (e == cudaSuccess) { /* loaded now: that may wait for the device, which then waits for a peer */
        gmm_peers_release<<<1, GMM__PEERS_GONE * GMM__PEERS_MOST, 0, p->aid>>>((uint32_t *)own, 0, 0);
        gmm_peers_max<<<1, 1, 0, p->aid>>>((float *)own, (const float *)own, 0, 0, 0);
        e = cudaGetLastError();
    }
    if (e == cudaSuccess) e = cudaDeviceSynchronize(); /* before a peer writes there */
    s = gmm__peers_share(p, &p->own, own, bytes, e != cudaSuccess ? cudaGetErrorString(e) : NULL);
    (void)gmm__cuda_leave(c.ctx, fn, current, cudaSuccess);
    if (e != cudaSuccess || s) {
        s = e != cudaSuccess ? gmm__fail(error, GMM_E_CUDA, "%s: %s", fn, cudaGetErrorString(e))
                             : gmm__fail(error, s, "%s: %.400s", fn, p->wire.error.text);
        p->own.base[c.rank] = (char *)own;
        gmm__peers_free(p);
        return s;
    }
    out->rank = c.rank;
    out->size = c.size;
    out->exchanges = 1;
    out->self = p;
    out->group_begin = gmm__peers_begin;
    out->group_end = gmm__peers_end;
    out->all_gather = gmm__peers_gather;
    out->reduce_scatter = gmm__peers_scatter;
    out->all_to_all = gmm__peers_exchange;
    out->all_reduce_max = gmm__peers_max;
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

