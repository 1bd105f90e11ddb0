/* Functions that all communicators use: sums, time, errors, memory. */

/* Whether reduce_scatter supports the dtype. */
static GMM__UNUSED int gmm__comm_supports_sum(gmm_dtype dtype) {
    return dtype == GMM_F32 || dtype == GMM_BF16 || dtype == GMM_F16;
}

/* CLOCK_MONOTONIC does not change when the host's time is set. To wait by it needs POSIX.1-2001, which glibc does not
   declare with -std=c11, nor macOS: then the host's time is used, and to set it changes timeouts. */
#if defined(CLOCK_MONOTONIC) && defined(_POSIX_C_SOURCE) && _POSIX_C_SOURCE >= 200112L && !defined(__APPLE__)
#define GMM__HAS_MONOTONIC_CLOCK 1
#else
#define GMM__HAS_MONOTONIC_CLOCK 0
#endif
/* Time since some point in the past. */
static GMM__UNUSED struct timespec gmm__gtp_time(void) {
    struct timespec t;
#if GMM__HAS_MONOTONIC_CLOCK
    (void)clock_gettime(CLOCK_MONOTONIC, &t);
#else
    (void)timespec_get(&t, TIME_UTC);
#endif
    return t;
}
/* The same in seconds. */
static GMM__UNUSED double gmm__gtp_now(void) {
    const struct timespec t = gmm__gtp_time();
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* State common to NCCL communicators and peer copies: the first member of the structure that `self` points to. */
typedef struct gmm__comm_base {
    gmm_context *ctx;
    gmm_error error;    /* the first failure */
    const char *what;   /* name of the open group; NULL = none */
    int32_t given_up, open; /* 1: give_up was called; 1: a group is open */
} gmm__comm_base;

/* Stores the first failure of a communicator, which the functions behind it report from then on. */
static GMM__UNUSED gmm_status gmm__comm_fail(gmm__comm_base *base, const char *call, const char *text) {
    if (!base->error.text[0])
        (void)gmm__fail(&base->error, GMM_E_COMM, "%s%s%.60s%s: %.300s", call, base->what ? " of '" : "",
                        base->what ? base->what : "", base->what ? "'" : "", text);
    return GMM_E_COMM;
}
/* GMM_E_COMM once the communicator has failed or was given up; *error, which may be NULL, is the first failure. */
static GMM__UNUSED gmm_status gmm__comm_poll(const gmm__comm_base *base, gmm_error *error) {
    if (error) *error = base->error;
    return base->given_up || base->error.text[0] ? GMM_E_COMM : GMM_OK;
}
static GMM__UNUSED void *gmm__comm_alloc(gmm_context *ctx, size_t bytes) {
    const gmm_allocator *a = &ctx->config.allocator;
    void *p = a->alloc ? a->alloc(a->user, bytes) : GMM_MALLOC(bytes);
    return p ? memset(p, 0, bytes) : NULL;
}
static GMM__UNUSED void gmm__comm_free(gmm_context *ctx, void *p) {
    const gmm_allocator *a = &ctx->config.allocator;
    if (a->release) a->release(a->user, p);
    else GMM_FREE(p);
}

