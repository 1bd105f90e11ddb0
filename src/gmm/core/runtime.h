/* ................................................................................................ 14.15 Runtime ... */

/* Checks that the functions of the CPU and of the CUDA runtime have in common; each function begins with one of them.
   `function` and `argument` are names for messages; `needed` is the argument that must not be NULL. */
static gmm_status gmm__rt_open(void *self, const char *function, gmm_stream stream, const void *needed,
                               const char *argument) {
    gmm_context *ctx = (gmm_context *)self;
    if (!ctx) return GMM_E_NULL;
    if (!needed) return gmm__fail(&ctx->error, GMM_E_NULL, "gmm_runtime.%s: %s is NULL", function, argument);
    if (ctx->config.space == GMM_SPACE_CPU && stream)
        return gmm__fail(&ctx->error, GMM_E_ARG, "gmm_runtime.%s: stream: %p must be NULL in a CPU context", function,
                         (void *)stream);
    return GMM_OK;
}

static gmm_status gmm__rt_open_flags(void *self, const char *function, gmm_stream stream, gmm_event event,
                                     uint32_t flags) {
    const gmm_status s = gmm__rt_open(self, function, stream, event, "event");
    if (s != GMM_OK || !(flags & ~(uint32_t)GMM_EVENT_EXTERNAL)) return s;
    return gmm__fail(&((gmm_context *)self)->error, GMM_E_ARG, "gmm_runtime.%s: flags 0x%x has unknown bits", function,
                     flags);
}

/* Checks the source or destination of a copy or fill of `height` rows. An empty copy may have any address and pitch. */
static gmm_status gmm__rt_open_rows(void *self, const char *function, gmm_stream stream, const char *argument,
                                    const void *memory, size_t pitch, size_t width, size_t height) {
    gmm_context *ctx = (gmm_context *)self;
    const gmm_status s = gmm__rt_open(self, function, stream, width && height ? memory : self, argument);
    if (s != GMM_OK || !width || !height) return s;
    if (pitch < width)
        return gmm__fail(&ctx->error, GMM_E_ARG, "gmm_runtime.%s: pitch of %s: %llu must be >= width %llu", function,
                         argument, (unsigned long long)pitch, (unsigned long long)width);
    if (pitch > SIZE_MAX / height)
        return gmm__fail(&ctx->error, GMM_E_OVERFLOW, "gmm_runtime.%s: %llu rows of pitch %llu of %s do not fit size_t",
                         function, (unsigned long long)height, (unsigned long long)pitch, argument);
    return GMM_OK;
}

/* A copy of `height` rows of `width` bytes; the pitches are the distances between rows, in bytes. */
typedef struct gmm__rt_copy {
    void *dst;
    size_t dst_pitch;
    const void *src;
    size_t src_pitch, width, height;
} gmm__rt_copy;

static gmm_status gmm__rt_open_copy(void *self, const char *function, const gmm__rt_copy *c, gmm_stream stream) {
    const gmm_status s = gmm__rt_open_rows(self, function, stream, "dst", c->dst, c->dst_pitch, c->width, c->height);
    if (s != GMM_OK) return s;
    return gmm__rt_open_rows(self, function, stream, "src", c->src, c->src_pitch, c->width, c->height);
}

static gmm_status gmm__rt_open_fill(void *self, const char *function, void *dst, size_t pitch, int32_t value,
                                    size_t width, size_t height, gmm_stream stream) {
    const gmm_status s = gmm__rt_open_rows(self, function, stream, "dst", dst, pitch, width, height);
    if (s != GMM_OK || (value >= 0 && value <= 255)) return s;
    return gmm__fail(&((gmm_context *)self)->error, GMM_E_ARG, "gmm_runtime.%s: value %d must be 0 to 255", function,
                     value);
}

/* gmm_runtime.run of both rows: calls the work's function on the host, which enqueues the work. */
static gmm_status gmm__rt_run(void *self, const gmm_work *work, gmm_stream stream) {
    gmm_context *ctx = (gmm_context *)self;
    gmm_status s = gmm__rt_open(self, "run", stream, work, "work");
    gmm_work w;
    char rule[96];
    if (s != GMM_OK) return s;
    if ((s = gmm__read_sized(&w, sizeof w, work, rule)) != GMM_OK)
        return gmm__fail(&ctx->error, s, "gmm_runtime.run: work: %s", rule);
    if (!w.function) return gmm__fail(&ctx->error, GMM_E_NULL, "gmm_runtime.run: work->function is NULL");
    return w.function(w.argument, stream);
}

