/* Gradients of a bundle: gmm_gtp_wgrad gives their buffer, gmm_gtp_submit reduces them over the ranks and adds them to
   main_grad. */

/* The view of `count` gradients of a bundle from `first` on. */
static gmm_gtp_view gmm__gtp_view_wgrad(gmm_gtp *g, const gmm__gtp_bundle *b, int32_t first, int32_t count) {
    const gmm_dtype wire = g->domains[b->domain].desc.wire;
    gmm__gtp_operand o;
    gmm_gtp_view v;
    memset(&o, 0, sizeof o);
    o.dtype = wire;
    o.scaling = GMM_SCALING_NONE;
    o.data = g->grads + b->first + first;
    o.packed = gmm__gtp_uniform(g, b, first, count);
    if (count > 1)
        o.group_stride = (int64_t)(gmm__gtp_member(g, b, first + 1)->grad_offset -
                                   gmm__gtp_member(g, b, first)->grad_offset) * 8 / gmm_dtype_bits(wire);
    v = gmm__gtp_make_view(g, b, first, count, &o);
    v.slot = b->wgrad_slot;
    v.leave = gmm__gtp_reserved_processors(g, b, GMM_GTP_BACKWARD);
    return v;
}
GMMDEF gmm_status gmm_gtp_wgrad(gmm_gtp *gtp, int32_t bundle, gmm_stream stream, gmm_gtp_view *view) {
    static const char fn[] = "gmm_gtp_wgrad";
    gmm__gtp_bundle *b;
    gmm__wgrad_slot *slot;
    gmm_gtp_view v;
    gmm_dtype wire;
    int32_t i;
    size_t common;
    gmm_status s = gmm__gtp_check_bundle(gtp, fn, bundle);
    if (s) return s;
    common = gmm__gtp_common_size(fn, "view", view, sizeof *view, &s, &gtp->error);
    if (s) return s;
    b = &gtp->bundles[bundle];
    if (b->wgrad_slot < 0) return gmm__fail(&gtp->error, GMM_E_STATE, "%s: '%s' is frozen", fn, b->name);
    slot = &gtp->wgrad_slots[b->wgrad_slot];
    if (slot->writer == bundle)
        return gmm__fail(&gtp->error, GMM_E_STATE, "%s: '%s' has a buffer already: submit it first", fn, b->name);
    if (slot->writer >= 0)
        return gmm__fail(&gtp->error, GMM_E_STATE, "%s: '%s': its buffer is that of '%s', which is not submitted: "
                         "raise gmm_gtp_domain.wgrad_slots", fn, b->name, gtp->bundles[slot->writer].name);
    wire = gtp->domains[b->domain].desc.wire;
    s = gmm__gtp_event_wait(gtp, &slot->last_use, stream);
    for (i = 0; i < b->count && !s; i++) {
        const gmm__gtp_weight *w = gmm__gtp_member(gtp, b, i);
        const size_t row = (size_t)w->plan.local_cols * (size_t)gmm_dtype_bits(wire) / 8;
        if (w->plan.pad > 0)
            s = gtp->runtime.fill(gtp->runtime.self, slot->base + w->grad_offset + (size_t)w->plan.local_rows * row, 0,
                                  (size_t)w->plan.pad * row, stream);
    }
    slot->writer = bundle;
    if (s) return gmm__gtp_fail(gtp, fn, b->name, s);
    v = gmm__gtp_view_wgrad(gtp, b, 0, b->count);
    v.struct_size = view->struct_size;
    memcpy(view, &v, common);
    return GMM_OK;
}

GMMDEF gmm_status gmm_gtp_wgrad_part(gmm_gtp *gtp, int32_t bundle, int32_t first, int32_t count, gmm_gtp_view *part) {
    static const char fn[] = "gmm_gtp_wgrad_part";
    const gmm__gtp_bundle *b;
    gmm_gtp_view v;
    size_t common;
    gmm_status s = gmm__gtp_check_bundle(gtp, fn, bundle);
    if (s) return s;
    common = gmm__gtp_common_size(fn, "part", part, sizeof *part, &s, &gtp->error);
    if (!s) s = gmm__gtp_check_part(gtp, fn, bundle, first, count);
    if (s) return s;
    b = &gtp->bundles[bundle];
    if (b->wgrad_slot < 0 || gtp->wgrad_slots[b->wgrad_slot].writer != bundle)
        return gmm__fail(&gtp->error, GMM_E_STATE, "%s: '%s' has no buffer: call gmm_gtp_wgrad first", fn, b->name);
    v = gmm__gtp_view_wgrad(gtp, b, first, count);
    v.struct_size = part->struct_size;
    memcpy(part, &v, common);
    return GMM_OK;
}

/* Arguments of the copy of a gradient of the caller into the gradient buffer. */
typedef struct gmm__gtp_conversion {
    gmm_context *ctx;
    gmm_conversion d;
    gmm_mat src, dst;
} gmm__gtp_conversion;
static gmm_status gmm__gtp_conversion_run(const void *argument, gmm_stream stream) {
    gmm__gtp_conversion t = *(const gmm__gtp_conversion *)argument;
    t.d.src = &t.src;
    t.d.dst = &t.dst;
    return gmm_convert(t.ctx, &t.d, NULL, 0, stream);
}

/* Checks a gradient of the caller. */
static gmm_status gmm__gtp_check_gradient(gmm_gtp *g, const char *fn, const gmm__gtp_bundle *b, const gmm_mat *source) {
    int32_t i;
    if ((source->dtype != GMM_F32 && source->dtype != GMM_BF16 && source->dtype != GMM_F16) || source->scaling)
        return gmm__fail(&g->error, GMM_E_DTYPE, "%s: '%s': from is %s, scaling %s: must be f32, bf16 or f16, and none",
                         fn, b->name, gmm_dtype_name(source->dtype), gmm_scaling_name(source->scaling));
    if (!source->data == !source->table)
        return gmm__fail(&g->error, GMM_E_NULL, "%s: '%s': from has %s", fn, b->name,
                         source->data ? "data and a table" : "neither data nor a table");
    for (i = 0; i < b->count; i++) {
        const gmm_shard_plan *p = &gmm__gtp_member(g, b, i)->plan;
        const int64_t ld = source->ld ? source->ld : p->local_cols;
        const int packed = source->data && b->count > 1;
        const int64_t stride = packed ? source->group_stride : 0;
        void *const data = source->table ? source->table[i] : source->data;
        int64_t matrix, elements, bytes;
        if (!data) return gmm__fail(&g->error, GMM_E_NULL, "%s: '%s': from->table[%d] is NULL", fn, b->name, i);
        if (ld < p->local_cols || (packed && !gmm__gtp_uniform(g, b, 0, b->count)))
            return gmm__fail(&g->error, GMM_E_STRIDE, "%s: '%s': from: ld %lld is below %lld columns, or packed with "
                             "different shapes", fn, b->name, (long long)ld, (long long)p->local_cols);
        if (!gmm__mul(p->local_rows, ld, &matrix) ||
            !gmm__mul(packed ? b->count : 1, stride > matrix ? stride : matrix, &elements) ||
            !gmm__mul(elements, 8, &bytes))
            return gmm__fail(&g->error, GMM_E_OVERFLOW, "%s: '%s': from: %d matrices of %lld rows, ld %lld, "
                             "group_stride %lld do not fit 64 bits", fn, b->name, b->count, (long long)p->local_rows,
                             (long long)ld, (long long)stride);
        if (stride && stride < (p->local_rows - 1) * ld + p->local_cols)
            return gmm__fail(&g->error, GMM_E_STRIDE, "%s: '%s': from: group_stride %lld is less than a matrix", fn,
                             b->name, (long long)stride);
        if ((uintptr_t)data % (uintptr_t)(gmm_dtype_bits(source->dtype) / 8))
            return gmm__fail(&g->error, GMM_E_ALIGN, "%s: '%s': from: %p is not aligned to its %s elements", fn,
                             b->name, data, gmm_dtype_name(source->dtype));
    }
    return GMM_OK;
}

/* Copies the gradient of a bundle into its buffer; NULL = zeros. */
static gmm_status gmm__gtp_copy_gradient(gmm_gtp *g, const gmm__gtp_bundle *b, const gmm_mat *source,
                                         gmm_stream stream) {
    const gmm__wgrad_slot *slot = &g->wgrad_slots[b->wgrad_slot];
    const gmm_dtype wire = g->domains[b->domain].desc.wire;
    int32_t i;
    gmm_status s = GMM_OK;
    if (!source) return g->runtime.fill(g->runtime.self, slot->base, 0, slot->bytes, stream);
    for (i = 0; i < b->count && !s; i++) {
        const gmm__gtp_weight *w = gmm__gtp_member(g, b, i);
        const int64_t ld = source->ld ? source->ld : w->plan.local_cols;
        const int64_t stride = source->group_stride ? source->group_stride : w->plan.local_rows * ld;
        const int64_t size = gmm_dtype_bits(source->dtype) / 8;
        gmm_range ranges[2];
        gmm_work work;
        gmm__gtp_conversion c;
        memset(&c, 0, sizeof c);
        memset(&work, 0, sizeof work);
        memset(ranges, 0, sizeof ranges);
        c.ctx = g->config.ctx;
        c.d.rows = w->plan.local_rows;
        c.d.cols = w->plan.local_cols;
        c.src = gmm_mat_packed(source->dtype, source->table ? source->table[i]
                                                            : (const char *)source->data + i * stride * size);
        c.src.ld = ld;
        c.dst = gmm_mat_packed(wire, slot->base + w->grad_offset);
        ranges[0].data = c.src.data;
        ranges[0].bytes = (size_t)(((w->plan.local_rows - 1) * ld + w->plan.local_cols) * size);
        ranges[1].data = c.dst.data;
        ranges[1].bytes = (size_t)(w->plan.local_rows * w->plan.local_cols * gmm_dtype_bits(wire) / 8);
        ranges[1].writes = 1;
        work.name = "take gradient";
        work.function = gmm__gtp_conversion_run;
        work.argument = &c;
        work.argument_bytes = sizeof c;
        work.ranges = ranges;
        work.range_count = 2;
        s = g->runtime.run(g->runtime.self, &work, stream);
    }
    return s;
}

/* Multiprocessors for the sum of a weight: as many as the GEMMs of the backward chain leave free, or 0 = all. It is 0
   for the last bundle of the chain, behind which no GEMM runs, and where main_grad is not fp32 or does not admit vector
   accesses, so that gmm_accumulate would be too slow on few of them. */
static int32_t gmm__gtp_sum_processors(gmm_gtp *g, const gmm__gtp_bundle *b, const gmm__gtp_weight *w) {
    gmm_gtp_pass pass = GMM_GTP_FORWARD;
    const int32_t chain = b->chain[GMM_GTP_BACKWARD];
    const int64_t elements = w->plan.shard_rows * w->plan.local_cols;
    if (g->domains[b->domain].size == 1 || w->desc.main_grad_dtype != GMM_F32 || elements % 8 ||
        (uintptr_t)w->desc.main_grad % 16)
        return 0;
    if (chain < 0 || !gmm__gtp_successor(g, chain, b->position[GMM_GTP_BACKWARD], 1, &pass)) return 0;
    return pass == GMM_GTP_BACKWARD ? GMM__GTP_SUM_PROCESSORS : 0;
}

/* Enqueues the reduction of a bundle and its sums into main_grad on the reduce stream. */
static gmm_status gmm__gtp_reduce_bundle(gmm_gtp *g, int32_t bundle, float scale, gmm_gtp_add add) {
    gmm__gtp_bundle *b = &g->bundles[bundle];
    gmm__gtp_domain *d = &g->domains[b->domain];
    gmm__wgrad_slot *slot = &g->wgrad_slots[b->wgrad_slot];
    const gmm_stream stream = d->desc.reduce_stream;
    const gmm_comm *c = &d->reduce;
    const int exchange = d->desc.reduction == GMM_GTP_REDUCE_EXCHANGE;
    const size_t size = (size_t)gmm_dtype_bits(d->desc.wire) / 8;
    int32_t i;
    gmm__watch *watch = NULL;
    gmm_status s = d->size > 1 ? gmm__watch_begin(g, d, GMM__GTP_REDUCE, &watch) : GMM_OK;
    if (!s) gmm__gtp_set_collective(g, d, exchange ? "all_to_all" : "reduce_scatter");
    if (!s && d->size > 1) s = c->group_begin(c->self, b->name);
    for (i = 0; i < b->count && d->size > 1 && !s; i++) {
        const gmm__gtp_weight *w = gmm__gtp_member(g, b, i);
        const size_t elements = (size_t)w->plan.shard_rows * (size_t)w->plan.local_cols;
        char *send = slot->base + w->grad_offset;
        if (!w->desc.main_grad) continue;
        g->stats.reduced_bytes += (int64_t)(elements * size) * (d->size - 1);
        s = exchange ? c->all_to_all(c->self, send, d->reduce_base + d->recv_offset + w->grad_offset, elements * size,
                                     stream)
                     : c->reduce_scatter(c->self, send, send + (size_t)d->rank * elements * size, elements,
                                         d->desc.wire, stream);
    }
    if (!s && d->size > 1) s = c->group_end(c->self);
    if (!s) g->collective = NULL;
    for (i = 0; i < b->count && !s && !g->dry_run; i++) {
        const gmm__gtp_weight *w = gmm__gtp_member(g, b, i);
        const size_t elements = (size_t)w->plan.shard_rows * (size_t)w->plan.local_cols;
        gmm__gtp_sum sum = gmm__gtp_sum_make(g, d, w);
        char *own_part = slot->base + w->grad_offset + (size_t)d->rank * elements * size;
        char *received = d->reduce_base + d->recv_offset;
        gmm_range ranges[5];
        gmm_work work;
        int32_t r;
        if (!w->desc.main_grad) continue;
        memset(&work, 0, sizeof work);
        memset(ranges, 0, sizeof ranges);
        received += w->grad_offset;
        for (r = 0; r < sum.d.count && sum.d.count > 1; r++)
            sum.part[r] = r == d->rank ? own_part : received + (size_t)r * elements * size;
        sum.x.data = own_part;
        sum.options.sm_limit = gmm__gtp_sum_processors(g, b, w);
        sum.d.scale = scale;
        sum.d.beta = add == GMM_GTP_SET ? 0.0f : 1.0f;
        sum.workspace = d->reduce_base + d->workspace_offset;
        sum.workspace_bytes = d->workspace_bytes;
        ranges[0].data = own_part;
        ranges[0].bytes = elements * size;
        ranges[1].data = w->desc.main_grad;
        ranges[1].bytes = elements * (size_t)gmm_dtype_bits(w->desc.main_grad_dtype) / 8;
        ranges[1].writes = 1;
        ranges[2].data = sum.workspace;
        ranges[2].bytes = d->workspace_bytes;
        ranges[2].writes = 1;
        if (sum.d.count > 1) {
            ranges[3].data = received;
            ranges[3].bytes = (size_t)d->rank * elements * size;
            ranges[4].data = received + (size_t)(d->rank + 1) * elements * size;
            ranges[4].bytes = (size_t)(d->size - 1 - d->rank) * elements * size;
        }
        work.name = "add to main_grad";
        work.function = gmm__gtp_sum_run;
        work.argument = &sum;
        work.argument_bytes = sizeof sum;
        work.ranges = ranges;
        work.range_count = sum.d.count > 1 ? 5 : 3;
        s = g->runtime.run(g->runtime.self, &work, stream);
    }
    if (!s) s = gmm__gtp_event_record(g, &slot->last_use, stream);
    if (!s) s = gmm__gtp_event_record(g, &b->done, stream);
    return s ? s : gmm__watch_end(g, d, GMM__GTP_REDUCE, watch, c, exchange ? "all_to_all" : "reduce_scatter",
                                  b->name);
}

GMMDEF gmm_status gmm_gtp_submit(gmm_gtp *gtp, int32_t bundle, const gmm_gtp_gradient *gradient, gmm_stream stream) {
    static const char fn[] = "gmm_gtp_submit";
    gmm_gtp_gradient in;
    gmm_mat source = GMM_ZERO;
    gmm__gtp_bundle *b;
    gmm__gtp_domain *d;
    gmm__wgrad_slot *slot;
    gmm_status s = gmm__gtp_check_bundle(gtp, fn, bundle);
    if (!s) s = gmm__gtp_read(fn, "gradient", gradient, &in, sizeof in, &gtp->error);
    if (!s && in.from) s = gmm__gtp_read(fn, "gradient->from", in.from, &source, sizeof source, &gtp->error);
    if (s) return s;
    b = &gtp->bundles[bundle];
    d = &gtp->domains[b->domain];
    if (b->wgrad_slot < 0) return gmm__fail(&gtp->error, GMM_E_STATE, "%s: '%s' is frozen", fn, b->name);
    slot = &gtp->wgrad_slots[b->wgrad_slot];
    if ((in.add != GMM_GTP_ADD && in.add != GMM_GTP_SET) || in.zero < 0 || in.zero > 1 || (in.zero && in.from))
        return gmm__fail(&gtp->error, GMM_E_ARG, "%s: '%s': add %d, zero %d, from %s: must be a gmm_gtp_add, 0 or 1, "
                         "not both", fn, b->name, (int)in.add, in.zero, in.from ? "given" : "NULL");
    if (in.zero || in.from) {
        if (slot->writer >= 0)
            return gmm__fail(&gtp->error, GMM_E_STATE, "%s: '%s': its buffer is in use by '%s', which is not submitted",
                             fn, b->name, gtp->bundles[slot->writer].name);
    } else if (slot->writer != bundle)
        return gmm__fail(&gtp->error, GMM_E_STATE, "%s: '%s': no buffer was asked for", fn, b->name);
    if (in.from && (s = gmm__gtp_check_gradient(gtp, fn, b, &source)) != GMM_OK) return s;
    gmm__gtp_hash(gtp, 3, bundle, (int)in.add);
    gtp->stats.submits++;
    if (in.zero || in.from) {
        gmm_gtp_view unused = GMM_ZERO;
        if ((s = gmm_gtp_wgrad(gtp, bundle, stream, &unused)) != GMM_OK) return s;
        s = gmm__gtp_copy_gradient(gtp, b, in.from ? &source : NULL, stream);
    }
    if (!s) s = gmm__gtp_prepare_stream(gtp, d, GMM__GTP_REDUCE);
    if (!s) s = gtp->runtime.event_record(gtp->runtime.self, d->fork[GMM__GTP_REDUCE], stream, 0);
    if (!s) s = gtp->runtime.stream_wait(gtp->runtime.self, d->desc.reduce_stream, d->fork[GMM__GTP_REDUCE], 0);
    if (!s) s = gmm__gtp_reduce_bundle(gtp, bundle, in.scale, in.add);
    slot->writer = -1;
    if (!s && d->desc.synchronous) s = gmm__gtp_event_wait(gtp, &b->done, stream);
    if (s) return gmm__gtp_fail(gtp, fn, b->name, s);
    if (gtp->dry_run) return GMM_OK;
    if (gtp->graph) *gmm__gtp_graph_usage(gtp, gtp->graph - 1, bundle) |= GMM__GRAPH_REDUCES;
    else if (gtp->config.hooks.ready) {
        gtp->in_callback = 1;
        gtp->config.hooks.ready(gtp->config.hooks.user, gtp, gtp->members + b->first, b->count, d->desc.reduce_stream);
        gtp->in_callback = 0;
    }
    return gtp->failed; /* by the hook */
}

