/* Communicators of NCCL. */

/* ....................................................................................................... NCCL ... */

#if defined(__CUDACC__) && defined(GMM_WITH_NCCL)

/* gmm_comm.processors: the multiprocessors that collectives of NCCL need, also those by windows and copy engines, as
   measured on an H200. */
enum { GMM__NCCL_PROCESSORS = 16 };

typedef struct gmm__nccl {
    gmm__comm_base comm_base;
    ncclComm_t comm;
    double timeout; /* seconds */
} gmm__nccl;

/* The status of an NCCL call. A non-blocking communicator may complete the call later; this function waits for that,
   except within a group. */
static gmm_status gmm__nccl_check(gmm__nccl *n, const char *call, ncclResult_t r) {
    const double begin = gmm__gtp_now();
    const struct timespec pause = {0, 20000};
    while (r == ncclInProgress && !n->comm_base.open && gmm__gtp_now() - begin < n->timeout) {
        (void)nanosleep(&pause, NULL);
        if (ncclCommGetAsyncError(n->comm, &r) != ncclSuccess) r = ncclInternalError;
    }
    if (r == ncclSuccess || (r == ncclInProgress && n->comm_base.open)) return GMM_OK;
    if (r == ncclInProgress) return gmm__comm_fail(&n->comm_base, call, "not done in time: a peer is missing");
    return gmm__comm_fail(&n->comm_base, call, ncclGetErrorString(r));
}
/* One NCCL call on the communicator's device; after a failure of the communicator NCCL is not called. */
#define GMM__NCCL(n, name, call) \
    int current; \
    gmm_status s = gmm__comm_poll(&(n)->comm_base, NULL); \
    if (s || gmm__cuda_enter((n)->comm_base.ctx, &current) != cudaSuccess) return s ? s : GMM_E_CUDA; \
    return s = gmm__nccl_check(n, name, call), (void)gmm__cuda_leave((n)->comm_base.ctx, name, current, cudaSuccess), s

static gmm_status gmm__nccl_group_begin(void *self, const char *what) {
    gmm__nccl *n = (gmm__nccl *)self;
    n->comm_base.what = what;
    GMM__NCCL(n, "ncclGroupStart", (n->comm_base.open = 1, ncclGroupStart()));
}
/* After a failed call NCCL's group stays open until give_up ends it. */
static gmm_status gmm__nccl_end_group(gmm__nccl *n) {
    GMM__NCCL(n, "ncclGroupEnd", (n->comm_base.open = 0, ncclGroupEnd()));
}
static gmm_status gmm__nccl_group_end(void *self) {
    gmm__nccl *n = (gmm__nccl *)self;
    const gmm_status s = gmm__nccl_end_group(n);
    n->comm_base.what = NULL;
    return s;
}
static gmm_status gmm__nccl_all_gather(void *self, const void *send, void *recv, size_t bytes, gmm_stream stream) {
    gmm__nccl *n = (gmm__nccl *)self;
    GMM__NCCL(n, "ncclAllGather", ncclAllGather(send, recv, bytes, ncclInt8, n->comm, stream));
}
static gmm_status gmm__nccl_reduce_scatter(void *self, const void *send, void *recv, size_t count, gmm_dtype dtype,
                                           gmm_stream stream) {
    gmm__nccl *n = (gmm__nccl *)self;
    const ncclDataType_t type = dtype == GMM_F32 ? ncclFloat32 : dtype == GMM_BF16 ? ncclBfloat16 : ncclFloat16;
    if (!gmm__comm_supports_sum(dtype))
        return gmm__comm_fail(&n->comm_base, "reduce_scatter", "dtype must be f32, bf16 or f16");
    GMM__NCCL(n, "ncclReduceScatter", ncclReduceScatter(send, recv, count, type, ncclSum, n->comm, stream));
}
#if NCCL_VERSION_CODE >= 22800
#define GMM__NCCL_ALL_TO_ALL ncclAlltoAll
#else
#define GMM__NCCL_ALL_TO_ALL gmm__nccl_send_recv
static ncclResult_t gmm__nccl_send_recv(const void *send, void *recv, size_t bytes, ncclDataType_t type,
                                        ncclComm_t comm, cudaStream_t stream) {
    int size = 0, i;
    ncclResult_t r = ncclCommCount(comm, &size), end;
    if (r == ncclSuccess) r = ncclGroupStart();
    if (r != ncclSuccess) return r;
    for (i = 0; i < size && r == ncclSuccess; i++) {
        r = ncclSend((const char *)send + (size_t)i * bytes, bytes, type, i, comm, stream);
        if (r == ncclSuccess) r = ncclRecv((char *)recv + (size_t)i * bytes, bytes, type, i, comm, stream);
    }
    end = ncclGroupEnd();
    return r == ncclSuccess ? end : r;
}
#endif
static gmm_status gmm__nccl_all_to_all(void *self, const void *send, void *recv, size_t bytes, gmm_stream stream) {
    gmm__nccl *n = (gmm__nccl *)self;
    GMM__NCCL(n, "ncclAlltoAll", GMM__NCCL_ALL_TO_ALL(send, recv, bytes, ncclInt8, n->comm, stream));
}
#undef GMM__NCCL_ALL_TO_ALL
static gmm_status gmm__nccl_all_reduce_max(void *self, float *values, size_t count, gmm_stream stream) {
    gmm__nccl *n = (gmm__nccl *)self;
    GMM__NCCL(n, "ncclAllReduce", ncclAllReduce(values, values, count, ncclFloat32, ncclMax, n->comm, stream));
}
#if NCCL_VERSION_CODE >= 22700
static gmm_status gmm__nccl_window_add(void *self, void *base, size_t bytes, void **window) {
    gmm__nccl *n = (gmm__nccl *)self;
    ncclWindow_t w = NULL;
    int current;
    gmm_status s = gmm__comm_poll(&n->comm_base, NULL);
    *window = NULL;
    if (s || gmm__cuda_enter(n->comm_base.ctx, &current) != cudaSuccess) return s ? s : GMM_E_CUDA;
    s = gmm__nccl_check(n, "ncclCommWindowRegister", ncclCommWindowRegister(n->comm, base, bytes, &w,
                                                                            NCCL_WIN_COLL_SYMMETRIC));
    *window = w;
    return gmm__cuda_leave(n->comm_base.ctx, "ncclCommWindowRegister", current, cudaSuccess), s;
}
static gmm_status gmm__nccl_window_remove(void *self, void *window) {
    gmm__nccl *n = (gmm__nccl *)self;
    GMM__NCCL(n, "ncclCommWindowDeregister", ncclCommWindowDeregister(n->comm, (ncclWindow_t)window));
}
#endif
static gmm_status gmm__nccl_poll(void *self, gmm_error *error) {
    gmm__nccl *n = (gmm__nccl *)self;
    ncclResult_t r = ncclSuccess;
    if (n->comm && !n->comm_base.error.text[0] && ncclCommGetAsyncError(n->comm, &r) == ncclSuccess &&
        r != ncclSuccess && r != ncclInProgress)
        (void)gmm__comm_fail(&n->comm_base, "NCCL", ncclGetLastError(n->comm));
    return gmm__comm_poll(&n->comm_base, error);
}
static void gmm__nccl_give_up(void *self, const char *why) {
    gmm__nccl *n = (gmm__nccl *)self;
    int current;
    if (n->comm_base.given_up) return;
    n->comm_base.given_up = 1;
    (void)gmm__comm_fail(&n->comm_base, "given up", why);
    if (gmm__cuda_enter(n->comm_base.ctx, &current) != cudaSuccess) return;
    if (n->comm_base.open) (void)ncclGroupEnd(); /* a failed call leaves its group open */
    n->comm_base.open = 0;
    (void)ncclCommAbort(n->comm);
    n->comm = NULL;
    (void)gmm__cuda_leave(n->comm_base.ctx, "ncclCommAbort", current, cudaSuccess);
}

GMMDEF gmm_status gmm_nccl_open(const gmm_nccl_config *config, gmm_comm *out, gmm_error *error) {
    static const char fn[] = "gmm_nccl_open";
    gmm_nccl_config c;
    gmm__nccl *n;
    int rank = 0, size = 0, device = 0;
    ncclResult_t r;
    gmm_status s;
    if (!out) return gmm__fail(error, GMM_E_NULL, "%s: out is NULL", fn);
    memset(out, 0, sizeof *out);
    if ((s = gmm__gtp_read(fn, "config", config, &c, sizeof c, error)) != GMM_OK) return s;
    if (!c.comm || !c.ctx)
        return gmm__fail(error, GMM_E_NULL, "%s: config->%s is NULL", fn, c.comm ? "ctx" : "comm");
    if (c.windows < 0 || c.windows > 1 || c.timeout_ms < 0 || c.reserved)
        return gmm__fail(error, GMM_E_ARG, "%s: windows %d, timeout_ms %d, reserved %d: must be 0 or 1, >= 0, and 0",
                         fn, c.windows, c.timeout_ms, c.reserved);
    r = ncclCommUserRank(c.comm, &rank);
    if (r == ncclSuccess) r = ncclCommCount(c.comm, &size);
    if (r == ncclSuccess) r = ncclCommCuDevice(c.comm, &device);
    if (r != ncclSuccess) return gmm__fail(error, GMM_E_COMM, "%s: %s", fn, ncclGetErrorString(r));
    if (c.ctx->config.space != GMM_SPACE_CUDA || c.ctx->config.device != device)
        return gmm__fail(error, GMM_E_ARG, "%s: ctx is of %s %d: must be of CUDA device %d, that of the "
                         "communicator", fn, c.ctx->config.space == GMM_SPACE_CUDA ? "CUDA device" : "the CPU, device",
                         c.ctx->config.device, device);
    n = (gmm__nccl *)gmm__comm_alloc(c.ctx, sizeof *n);
    if (!n) return gmm__fail(error, GMM_E_MEMORY, "%s: no memory", fn);
    n->comm_base.ctx = c.ctx;
    n->comm = c.comm;
    n->timeout = 1e-3 * (c.timeout_ms ? c.timeout_ms : 10000);
    out->rank = rank;
    out->size = size;
    out->processors = GMM__NCCL_PROCESSORS;
    out->self = n;
    out->group_begin = gmm__nccl_group_begin;
    out->group_end = gmm__nccl_group_end;
    out->all_gather = gmm__nccl_all_gather;
    out->reduce_scatter = gmm__nccl_reduce_scatter;
    out->all_to_all = gmm__nccl_all_to_all;
    out->all_reduce_max = gmm__nccl_all_reduce_max;
#if NCCL_VERSION_CODE >= 22700
    if (c.windows) {
        out->window_add = gmm__nccl_window_add;
        out->window_remove = gmm__nccl_window_remove;
    }
#endif
    out->poll = gmm__nccl_poll;
    out->give_up = gmm__nccl_give_up;
    return GMM_OK;
}

GMMDEF void gmm_nccl_close(gmm_comm *comm) {
    if (!comm || !comm->self) return;
    gmm__comm_free(((gmm__comm_base *)comm->self)->ctx, comm->self);
    memset(comm, 0, sizeof *comm);
}
#undef GMM__NCCL

#else /* GMM_WITH_NCCL */

GMMDEF gmm_status gmm_nccl_open(const gmm_nccl_config *config, gmm_comm *out, gmm_error *error) {
    (void)config;
    if (out) memset(out, 0, sizeof *out);
    return gmm__fail(error, GMM_E_BUILD, "gmm_nccl_open: compile with nvcc, and define GMM_WITH_NCCL where "
                     "GMM_IMPLEMENTATION is");
}
GMMDEF void gmm_nccl_close(gmm_comm *comm) { (void)comm; }

#endif /* GMM_WITH_NCCL */

