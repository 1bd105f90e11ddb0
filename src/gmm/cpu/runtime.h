/* --- The CPU row of the runtime table. Its only stream, NULL, runs work when it is enqueued; work that an event
   records is therefore complete, and an event contains nothing but its context. --- */

typedef struct gmm__cpu_event {
    gmm_context *ctx;
} gmm__cpu_event;

static gmm_status gmm__cpu_rt_event(void *self, const char *function, gmm_stream stream, gmm_event event,
                                    uint32_t flags, gmm__cpu_event **out) {
    gmm_context *ctx = (gmm_context *)self;
    const gmm_status s = gmm__rt_open_flags(self, function, stream, event, flags);
    if (s != GMM_OK) return s;
    *out = (gmm__cpu_event *)(void *)event;
    if ((*out)->ctx != ctx)
        return gmm__fail(&ctx->error, GMM_E_ARG, "gmm_runtime.%s: event: %p is not of this context", function,
                         (void *)event);
    return GMM_OK;
}

static gmm_status gmm__cpu_rt_stream_create(void *self, int32_t priority, gmm_stream *out) {
    const gmm_status s = gmm__rt_open(self, "stream_create", NULL, out, "out");
    (void)priority;
    if (s == GMM_OK) *out = NULL;
    return s;
}
static gmm_status gmm__cpu_rt_stream_destroy(void *self, gmm_stream stream) {
    return gmm__rt_open(self, "stream_destroy", stream, self, "self");
}
static gmm_status gmm__cpu_rt_stream_wait(void *self, gmm_stream stream, gmm_event event, uint32_t flags) {
    gmm__cpu_event *e;
    return gmm__cpu_rt_event(self, "stream_wait", stream, event, flags, &e);
}
static gmm_status gmm__cpu_rt_stream_sync(void *self, gmm_stream stream) {
    return gmm__rt_open(self, "stream_sync", stream, self, "self");
}

static gmm_status gmm__cpu_rt_event_create(void *self, gmm_event *out) {
    gmm_context *ctx = (gmm_context *)self;
    const gmm_status s = gmm__rt_open(self, "event_create", NULL, out, "out");
    const gmm_allocator *a;
    gmm__cpu_event *e;
    if (s != GMM_OK) return s;
    *out = NULL;
    a = &ctx->config.allocator;
    e = (gmm__cpu_event *)(a->alloc ? a->alloc(a->user, sizeof *e) : GMM_MALLOC(sizeof *e));
    if (!e)
        return gmm__fail(&ctx->error, GMM_E_MEMORY, "gmm_runtime.event_create: no memory for an event of %u bytes",
                         (unsigned)sizeof *e);
    e->ctx = ctx;
    *out = (gmm_event)(void *)e;
    return GMM_OK;
}
static gmm_status gmm__cpu_rt_event_destroy(void *self, gmm_event event) {
    const gmm_allocator *a;
    gmm__cpu_event *e;
    gmm_status s = gmm__rt_open(self, "event_destroy", NULL, self, "self");
    if (s != GMM_OK || !event) return s;
    if ((s = gmm__cpu_rt_event(self, "event_destroy", NULL, event, 0, &e)) != GMM_OK) return s;
    a = &e->ctx->config.allocator;
    if (a->release) a->release(a->user, e);
    else GMM_FREE(e);
    return GMM_OK;
}
static gmm_status gmm__cpu_rt_event_record(void *self, gmm_event event, gmm_stream stream, uint32_t flags) {
    gmm__cpu_event *e;
    return gmm__cpu_rt_event(self, "event_record", stream, event, flags, &e);
}
static gmm_status gmm__cpu_rt_event_query(void *self, gmm_event event, int32_t *done) {
    gmm__cpu_event *e;
    const gmm_status s = gmm__rt_open(self, "event_query", NULL, done, "done");
    if (s != GMM_OK) return s;
    *done = 1;
    return gmm__cpu_rt_event(self, "event_query", NULL, event, 0, &e);
}
static gmm_status gmm__cpu_rt_event_sync(void *self, gmm_event event) {
    gmm__cpu_event *e;
    return gmm__cpu_rt_event(self, "event_sync", NULL, event, 0, &e);
}

static gmm_status gmm__cpu_rt_copy2d(void *self, void *dst, size_t dst_pitch, const void *src, size_t src_pitch,
                                     size_t width, size_t height, gmm_stream stream) {
    const gmm__rt_copy copy = { dst, dst_pitch, src, src_pitch, width, height };
    const gmm_status s = gmm__rt_open_copy(self, "copy2d", &copy, stream);
    size_t i;
    if (s != GMM_OK || !width) return s;
    for (i = 0; i < height; i++) memcpy((char *)dst + i * dst_pitch, (const char *)src + i * src_pitch, width);
    return GMM_OK;
}
static gmm_status gmm__cpu_rt_copy(void *self, void *dst, const void *src, size_t bytes, gmm_stream stream) {
    const gmm__rt_copy copy = { dst, bytes, src, bytes, bytes, 1 };
    const gmm_status s = gmm__rt_open_copy(self, "copy", &copy, stream);
    if (s == GMM_OK && bytes) memcpy(dst, src, bytes);
    return s;
}
static gmm_status gmm__cpu_rt_fill2d(void *self, void *dst, size_t pitch, int32_t value, size_t width, size_t height,
                                     gmm_stream stream) {
    const gmm_status s = gmm__rt_open_fill(self, "fill2d", dst, pitch, value, width, height, stream);
    size_t i;
    if (s != GMM_OK || !width) return s;
    for (i = 0; i < height; i++) memset((char *)dst + i * pitch, value, width);
    return GMM_OK;
}
static gmm_status gmm__cpu_rt_fill(void *self, void *dst, int32_t value, size_t bytes, gmm_stream stream) {
    const gmm_status s = gmm__rt_open_fill(self, "fill", dst, bytes, value, bytes, 1, stream);
    if (s == GMM_OK && bytes) memset(dst, value, bytes);
    return s;
}
static gmm_status gmm__cpu_rt_is_capturing(void *self, gmm_stream stream, int32_t *capturing) {
    const gmm_status s = gmm__rt_open(self, "is_capturing", stream, capturing, "capturing");
    if (s == GMM_OK) *capturing = 0;
    return s;
}

