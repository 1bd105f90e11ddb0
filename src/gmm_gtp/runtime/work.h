/* Work that the runtime enqueues by gmm_runtime.run: sums of gradients, casts of shards, transposes. Each has a
   structure of arguments with pointers into itself. gmm_runtime.run may copy the structure, so that a *_run function
   links the pointers of its own copy. */

/* ................................................................................................ Runtime: work ... */

/* Weight i of a bundle. */
static gmm__gtp_weight *gmm__gtp_member(gmm_gtp *g, const gmm__gtp_bundle *b, int32_t i) {
    return &g->weights[g->members[b->first + i]];
}

/* Arguments of the sum of one weight's gradient into its main_grad. `part`: the parts of all ranks after an all-to-all;
   that of this rank is still in the gradient buffer. */
typedef struct gmm__gtp_sum {
    gmm_context *ctx;
    gmm_accumulation d;
    gmm_options options;
    gmm_mat x, y;
    void *workspace;
    size_t workspace_bytes;
    void *part[GMM__MAX_EXCHANGE_RANKS];
} gmm__gtp_sum;

static gmm__gtp_sum gmm__gtp_sum_make(gmm_gtp *g, const gmm__gtp_domain *d, const gmm__gtp_weight *w) {
    gmm__gtp_sum s;
    memset(&s, 0, sizeof s);
    s.ctx = g->config.ctx;
    s.d.count = d->size > 1 && d->desc.reduction == GMM_GTP_REDUCE_EXCHANGE ? d->size : 1;
    s.d.rows = w->plan.shard_rows;
    s.d.cols = w->plan.local_cols;
    s.x = gmm_mat_packed(d->desc.wire, NULL);
    s.y = gmm_mat_packed(w->desc.main_grad_dtype, w->desc.main_grad);
    return s;
}
/* Sets the pointers into the structure itself, after each copy of it. */
static void gmm__gtp_sum_link(gmm__gtp_sum *s) {
    if (s->d.count > 1) s->x = gmm_mat_table(s->x.dtype, s->part, (uint32_t)GMM_MAT_TABLE_ON_HOST);
    s->d.options = &s->options;
    s->d.x = &s->x;
    s->d.y = &s->y;
}
static gmm_status gmm__gtp_sum_run(const void *argument, gmm_stream stream) {
    gmm__gtp_sum s = *(const gmm__gtp_sum *)argument;
    gmm__gtp_sum_link(&s);
    return gmm_accumulate(s.ctx, &s.d, s.workspace, s.workspace_bytes, stream);
}

/* Arguments of the cast or quantization of one weight's shard. */
typedef struct gmm__gtp_cast {
    gmm_context *ctx;
    gmm_quantization d;
    gmm_conversion plain;      /* for a weight without scaling */
    gmm_format format;
    gmm_mat src, copy[2];
    int32_t stored[2]; /* 1: the plan stores the direction */
    void *workspace;
    size_t workspace_bytes;
} gmm__gtp_cast;

static gmm__gtp_cast gmm__gtp_cast_make(gmm_gtp *g, const gmm__gtp_weight *w, gmm_dtype dtype, const void *source) {
    gmm__gtp_cast c;
    int d;
    memset(&c, 0, sizeof c);
    c.ctx = g->config.ctx;
    c.src = gmm_mat_packed(dtype, source);
    c.format = w->format;
    c.d.count = 1;
    c.d.rows = c.plain.rows = w->plan.shard_rows;
    c.d.cols = c.plain.cols = w->plan.local_cols;
    for (d = GMM_ROWWISE; d <= GMM_COLUMNWISE; d++) {
        c.stored[d] = w->plan.shard_data_bytes[d] > 0;
        c.copy[d] = gmm_mat_quantized(&c.format, (gmm_direction)d, w->desc.data[d], w->desc.scale[d], NULL);
    }
    if (w->shard.scaling == GMM_SCALING_NONE) c.copy[GMM_ROWWISE] = gmm_mat_packed(w->shard.dtype, w->desc.data[0]);
    return c;
}
/* Sets the pointers into the structure itself, after each copy of it. */
static void gmm__gtp_cast_link(gmm__gtp_cast *c) {
    c->d.format = &c->format;
    c->d.src = c->plain.src = &c->src;
    c->d.rowwise = c->stored[GMM_ROWWISE] ? &c->copy[GMM_ROWWISE] : NULL;
    c->d.columnwise = c->stored[GMM_COLUMNWISE] ? &c->copy[GMM_COLUMNWISE] : NULL;
    c->plain.dst = &c->copy[GMM_ROWWISE];
}
static gmm_status gmm__gtp_cast_run(const void *argument, gmm_stream stream) {
    gmm__gtp_cast c = *(const gmm__gtp_cast *)argument;
    gmm__gtp_cast_link(&c);
    if (c.format.dtype == GMM_NONE) return gmm_convert(c.ctx, &c.plain, NULL, 0, stream);
    return gmm_quantize(c.ctx, &c.d, c.workspace, c.workspace_bytes, stream);
}
/* Whether the scale of the weight depends on the amax of the whole tensor. */
static int gmm__gtp_needs_amax(const gmm__gtp_weight *w) {
    return w->format.dtype != GMM_NONE && (w->shard.scaling == GMM_SCALING_NV16 ||
                                           (w->shard.scaling == GMM_SCALING_TENSOR && !w->format.delayed));
}

/* Arguments of the transpose of one weight's rowwise copy. */
typedef struct gmm__gtp_transposition {
    gmm_context *ctx;
    gmm_transposition d;
    gmm_mat src, dst;
} gmm__gtp_transposition;
static gmm_status gmm__gtp_transposition_run(const void *argument, gmm_stream stream) {
    gmm__gtp_transposition t = *(const gmm__gtp_transposition *)argument;
    t.d.src = &t.src;
    t.d.dst = &t.dst;
    return gmm_transpose(t.ctx, &t.d, NULL, 0, stream);
}

