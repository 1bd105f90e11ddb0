GMMDEF gmm_status gmm_gtp_wgrad(gmm_gtp *gtp, int32_t bundle, gmm_stream stream, gmm_gtp_view *view) {
    static const char fn[] = "gmm_gtp_wgrad";
    gmm__gtp_bundle *b;
    gmm__wgrad_slot *slot;
    gmm_gtp_view v;
    gmm_dtype wire;
    int32_t i;
    size_t known;
    gmm_status s = gmm__gtp_open_bundle(gtp, fn, bundle);
    if (s) return s;
    known = gmm__gtp_known(fn, "view", view, sizeof *view, &s, &gtp->error);
    if (s) return s;
    b = &gtp->bundles[bundle];
    if (b->wslot < 0) return gmm__fail(&gtp->error, GMM_E_STATE, "%s: '%s' is frozen", fn, b->name);
    slot = &gtp->wslots[b->wslot];
    if (slot->writer == bundle)
        return gmm__fail(&gtp->error, GMM_E_STATE, "%s: '%s' has a buffer already: submit it first", fn, b->name);
    if (slot->writer >= 0)
        return gmm__fail(&gtp->error, gtp->graph ? GMM_E_CAPTURE : GMM_E_STATE, "%s: '%s': its buffer is that of '%s', "
                         "which is not submitted: raise gmm_gtp_domain.wgrad_slots", fn, b->name,
                         gtp->bundles[slot->writer].name);
    wire = gtp->domains[b->domain].desc.wire;
    s = gmm__mark_wait(gtp, &slot->last_use, stream);
    for (i = 0; i < b->count && !s; i++) {
        const gmm__gtp_weight *w = gmm__gtp_member(gtp, b, i);
        const size_t row = (size_t)w->plan.local_cols * (size_t)gmm_dtype_bits(wire) / 8;
        if (w->plan.pad > 0)
            s = gtp->rt.fill(gtp->rt.self, slot->base + w->grad_at + (size_t)w->plan.local_rows * row, 0,
                             (size_t)w->plan.pad * row, stream);
    }
    slot->writer = bundle;
    if (s) return gmm__gtp_break(gtp, fn, b->name, s);
    v = gmm__gtp_view_of(gtp, b, wire, GMM_SCALING_NONE, gtp->grads + b->first, NULL, b->count == 1 || b->uniform,
                         b->count > 1 ? (int64_t)gmm__gtp_member(gtp, b, 1)->grad_at * 8 / gmm_dtype_bits(wire) : 0, 0);
    v.mat.amax = NULL;
    v.slot = b->wslot;
    v.leave = gmm__gtp_leave(gtp, b, GMM_GTP_BACKWARD);
    v.struct_size = view->struct_size;
    memcpy(view, &v, known);
    return GMM_OK;
}

/* A gradient from elsewhere, or none at all, put into the buffer. */
typedef struct gmm__gtp_take {
    gmm_context *ctx;
    gmm_conversion d;
    gmm_mat src, dst;
} gmm__gtp_take;
static gmm_status gmm__gtp_take_run(const void *argument, gmm_stream stream) {
    gmm__gtp_take t = *(const gmm__gtp_take *)argument;
    t.d.src = &t.src;
    t.d.dst = &t.dst;
    return gmm_convert(t.ctx, &t.d, NULL, 0, stream);
}
static gmm_status gmm__gtp_fill_gradient(gmm_gtp *g, const gmm__gtp_bundle *b, const gmm_mat *from,
                                         gmm_stream stream) {
    const gmm__wgrad_slot *slot = &g->wslots[b->wslot];
    const gmm_dtype wire = g->domains[b->domain].desc.wire;
    int32_t i;
    gmm_status s = GMM_OK;
    if (!from) return g->rt.fill(g->rt.self, slot->base, 0, slot->bytes, stream);
    for (i = 0; i < b->count && !s; i++) {
        const gmm__gtp_weight *w = gmm__gtp_member(g, b, i);
        const int64_t ld = from->ld ? from->ld : w->plan.local_cols;
        const int64_t stride = from->group_stride ? from->group_stride : w->plan.local_rows * ld;
        const int64_t size = gmm_dtype_bits(from->dtype) / 8;
        gmm_range ranges[2];
        gmm_work work;
        gmm__gtp_take take;
        memset(&take, 0, sizeof take);
        memset(&work, 0, sizeof work);
        memset(ranges, 0, sizeof ranges);
        take.ctx = g->config.ctx;
        take.d.rows = w->plan.local_rows;
        take.d.cols = w->plan.local_cols;
        take.src = gmm_mat_packed(from->dtype, from->table ? from->table[i]
                                                           : (const char *)from->data + i * stride * size);
        take.src.ld = ld;
        take.dst = gmm_mat_packed(wire, slot->base + w->grad_at);
        ranges[0].data = take.src.data;
        ranges[0].bytes = (size_t)(((w->plan.local_rows - 1) * ld + w->plan.local_cols) * size);
        ranges[1].data = take.dst.data;
        ranges[1].bytes = (size_t)(w->plan.local_rows * w->plan.local_cols * gmm_dtype_bits(wire) / 8);
        ranges[1].writes = 1;
        work.name = "take gradient";
        work.function = gmm__gtp_take_run;
        work.argument = &take;
        work.argument_bytes = sizeof take;
        work.ranges = ranges;
        work.range_count = 2;
        s = g->rt.run(g->rt.self, &work, stream);
    }
    return s;
}

/* Multiprocessors that the sum of a weight takes: those that the GEMMs of the backward chain leave, 0 = all behind its
   last one, and where gmm_accumulate needs all to keep up: main_grad not fp32, or not in whole vectors. */
static int32_t gmm__gtp_sums_take(gmm_gtp *g, const gmm__gtp_bundle *b, const gmm__gtp_weight *w) {
    gmm_gtp_pass pass = GMM_GTP_FORWARD;
    const int32_t chain = b->chain[GMM_GTP_BACKWARD];
    const int64_t part = w->plan.shard_rows * w->plan.local_cols;
    if (g->domains[b->domain].size == 1 || w->desc.main_grad_dtype != GMM_F32 || part % 8 ||
        (uintptr_t)w->desc.main_grad % 16)
        return 0;
    if (chain < 0 || !gmm__gtp_behind(g, chain, b->place[GMM_GTP_BACKWARD], 1, &pass)) return 0;
    return pass == GMM_GTP_BACKWARD ? GMM__GTP_SUM_PROCESSORS : 0;
}
/* Everything of a submit that the reduce stream does. */
static gmm_status gmm__gtp_reduce(gmm_gtp *g, int32_t bundle, float scale, gmm_gtp_add add) {
    gmm__gtp_bundle *b = &g->bundles[bundle];
    gmm__gtp_domain *d = &g->domains[b->domain];
    gmm__wgrad_slot *slot = &g->wslots[b->wslot];
    const gmm_stream stream = d->desc.reduce_stream;
    const gmm_comm *c = &d->reduce;
    const int exchange = d->desc.reduction == GMM_GTP_REDUCE_EXCHANGE;
    const size_t size = (size_t)gmm_dtype_bits(d->desc.wire) / 8;
    int32_t i;
    gmm__watch *watch = NULL;
    gmm_status s = gmm__watch_begin(g, d, GMM__GTP_REDUCE, &watch);
    if (!s) gmm__gtp_calls(g, d, exchange ? "all_to_all" : "reduce_scatter");
    if (!s && d->size > 1) s = c->group_begin(c->self, b->name);
    for (i = 0; i < b->count && d->size > 1 && !s; i++) {
        const gmm__gtp_weight *w = gmm__gtp_member(g, b, i);
        const size_t part = (size_t)w->plan.shard_rows * (size_t)w->plan.local_cols;
        char *send = slot->base + w->grad_at;
        if (!w->desc.main_grad) continue;
        g->stats.reduced_bytes += (int64_t)(part * size) * (d->size - 1);
        s = exchange ? c->all_to_all(c->self, send, d->reduce_base + d->recv_at + w->grad_at, part * size, stream)
                     : c->reduce_scatter(c->self, send, send + (size_t)d->rank * part * size, part, d->desc.wire,
                                         stream);
    }
    if (!s && d->size > 1) s = c->group_end(c->self);
    if (!s) g->calls = NULL;
    for (i = 0; i < b->count && !s && !g->dry; i++) {
        const gmm__gtp_weight *w = gmm__gtp_member(g, b, i);
        const size_t part = (size_t)w->plan.shard_rows * (size_t)w->plan.local_cols;
        gmm__gtp_sum sum = gmm__gtp_sum_of(g, d, w);
        char *own = slot->base + w->grad_at + (size_t)d->rank * part * size, *from = d->reduce_base + d->recv_at;
        gmm_range ranges[5];
        gmm_work work;
        int32_t r;
        if (!w->desc.main_grad) continue;
        memset(&work, 0, sizeof work);
        memset(ranges, 0, sizeof ranges);
        from += w->grad_at;
        for (r = 0; r < sum.d.count && sum.d.count > 1; r++)
            sum.part[r] = r == d->rank ? own : from + (size_t)r * part * size;
        sum.x.data = own;
        sum.options.sm_limit = gmm__gtp_sums_take(g, b, w);
        sum.d.scale = scale;
        sum.d.beta = add == GMM_GTP_SET ? 0.0f : 1.0f;
        sum.workspace = d->reduce_base + d->work_at;
        sum.workspace_bytes = d->work_bytes;
        ranges[0].data = own;
        ranges[0].bytes = part * size;
        ranges[1].data = w->desc.main_grad;
        ranges[1].bytes = part * (size_t)gmm_dtype_bits(w->desc.main_grad_dtype) / 8;
        ranges[1].writes = 1;
        ranges[2].data = sum.workspace;
        ranges[2].bytes = d->work_bytes;
        ranges[2].writes = 1;
        if (sum.d.count > 1) {
            ranges[3].data = from;
            ranges[3].bytes = (size_t)d->rank * part * size;
            ranges[4].data = from + (size_t)(d->rank + 1) * part * size;
            ranges[4].bytes = (size_t)(d->size - 1 - d->rank) * part * size;
        }
        work.name = "add to main_grad";
        work.function = gmm__gtp_sum_run;
        work.argument = &sum;
        work.argument_bytes = sizeof sum;
        work.ranges = ranges;
        work.range_count = sum.d.count > 1 ? 5 : 3;
        s = g->rt.run(g->rt.self, &work, stream);
    }
    if (!s) s = gmm__mark_record(g, &slot->last_use, stream);
    if (!s) s = gmm__mark_record(g, &b->done, stream);
    return s ? s : gmm__watch_end(g, d, GMM__GTP_REDUCE, watch, d->size > 1 ? c : NULL,
                                  exchange ? "all_to_all" : "reduce_scatter", b->name);
}

GMMDEF gmm_status gmm_gtp_submit(gmm_gtp *gtp, int32_t bundle, const gmm_gtp_gradient *gradient, gmm_stream stream) {
    static const char fn[] = "gmm_gtp_submit";
    gmm_gtp_gradient in;
    gmm_mat from = GMM_ZERO;
    gmm__gtp_bundle *b;
    gmm__gtp_domain *d;
    gmm__wgrad_slot *slot;
    int32_t i;
    gmm_status s = gmm__gtp_open_bundle(gtp, fn, bundle);
    if (!s) s = gmm__gtp_open(fn, "gradient", gradient, &in, sizeof in, &gtp->error);
    if (!s && in.from) s = gmm__gtp_open(fn, "gradient->from", in.from, &from, sizeof from, &gtp->error);
    if (s) return s;
    b = &gtp->bundles[bundle];
    d = &gtp->domains[b->domain];
    if (b->wslot < 0) return gmm__fail(&gtp->error, GMM_E_STATE, "%s: '%s' is frozen", fn, b->name);
    slot = &gtp->wslots[b->wslot];
    if ((in.add != GMM_GTP_ADD && in.add != GMM_GTP_SET) || in.zero < 0 || in.zero > 1 || (in.zero && in.from))
        return gmm__fail(&gtp->error, GMM_E_ARG, "%s: '%s': add %d, zero %d, from %s: must be a gmm_gtp_add, 0 or 1, "
                         "not both", fn, b->name, (int)in.add, in.zero, in.from ? "given" : "NULL");
    if (in.zero || in.from) {
        if (slot->writer >= 0)
            return gmm__fail(&gtp->error, GMM_E_STATE, "%s: '%s': its buffer is in use by '%s', which is not submitted",
                             fn, b->name, gtp->bundles[slot->writer].name);
    } else if (slot->writer != bundle)
        return gmm__fail(&gtp->error, GMM_E_STATE, "%s: '%s': no buffer was asked for", fn, b->name);
    if (in.from) {
        if ((from.dtype != GMM_F32 && from.dtype != GMM_BF16 && from.dtype != GMM_F16) || from.scaling)
            return gmm__fail(&gtp->error, GMM_E_DTYPE, "%s: '%s': from is %s: must be f32, bf16 or f16", fn, b->name,
                             gmm_dtype_name(from.dtype));
        if (!from.data == !from.table)
            return gmm__fail(&gtp->error, GMM_E_NULL, "%s: '%s': from has %s", fn, b->name,
                             from.data ? "data and a table" : "neither data nor a table");
        for (i = 0; i < b->count; i++) {
            const gmm_shard_plan *p = &gmm__gtp_member(gtp, b, i)->plan;
            if (from.table && !from.table[i])
                return gmm__fail(&gtp->error, GMM_E_NULL, "%s: '%s': from->table[%d] is NULL", fn, b->name, i);
            if ((from.ld && from.ld < p->local_cols) || (from.data && b->count > 1 && !b->uniform))
                return gmm__fail(&gtp->error, GMM_E_STRIDE, "%s: '%s': from: ld %lld is below %lld columns, or packed "
                                 "with different shapes", fn, b->name, (long long)from.ld, (long long)p->local_cols);
            if (from.data && b->count > 1 && from.group_stride &&
                from.group_stride < (p->local_rows - 1) * (from.ld ? from.ld : p->local_cols) + p->local_cols)
                return gmm__fail(&gtp->error, GMM_E_STRIDE, "%s: '%s': from: group_stride %lld is less than a matrix",
                                 fn, b->name, (long long)from.group_stride);
            if ((uintptr_t)(from.table ? from.table[i] : from.data) % (uintptr_t)(gmm_dtype_bits(from.dtype) / 8))
                return gmm__fail(&gtp->error, GMM_E_ALIGN, "%s: '%s': from: %p is not aligned to its %s elements", fn,
                                 b->name, from.table ? from.table[i] : from.data, gmm_dtype_name(from.dtype));
        }
    }
    gmm__gtp_hash(gtp, 3, bundle, (int)in.add);
    gtp->stats.submits++;
    if (in.zero || in.from) {
        gmm_gtp_view unused = GMM_ZERO;
        if ((s = gmm_gtp_wgrad(gtp, bundle, stream, &unused)) != GMM_OK) return s;
        s = gmm__gtp_fill_gradient(gtp, b, in.from ? &from : NULL, stream);
    }
    if (!s) s = gmm__gtp_use_stream(gtp, d, GMM__GTP_REDUCE);
    if (!s) s = gtp->rt.event_record(gtp->rt.self, d->fork[GMM__GTP_REDUCE], stream, 0);
    if (!s) s = gtp->rt.stream_wait(gtp->rt.self, d->desc.reduce_stream, d->fork[GMM__GTP_REDUCE], 0);
    if (!s) s = gmm__gtp_reduce(gtp, bundle, in.scale, in.add);
    slot->writer = -1;
    if (!s && d->desc.synchronous) s = gmm__mark_wait(gtp, &b->done, stream);
    if (s) return gmm__gtp_break(gtp, fn, b->name, s);
    if (gtp->dry) return GMM_OK;
    if (gtp->graph) gtp->graph_use[(gtp->graph - 1) * gtp->bundle_count + bundle] |= GMM__GRAPH_ADDS;
    else if (gtp->config.hooks.ready) {
        gtp->calling_back = 1;
        gtp->config.hooks.ready(gtp->config.hooks.user, gtp, gtp->members + b->first, b->count, d->desc.reduce_stream);
        gtp->calling_back = 0;
    }
    return GMM_OK;
}

/* `stream` waits for what a domain's stream was given; in a capture, for what it was given there. */
static gmm_status gmm__gtp_join(gmm_gtp *g, gmm__gtp_domain *d, int which, gmm_stream stream) {
    gmm_status s;
    if (!d->used[which] || (g->graph && d->joined[which] != g->graph)) return GMM_OK;
    s = g->rt.event_record(g->rt.self, d->join[which], gmm__gtp_stream(d, which), 0);
    return s ? s : g->rt.stream_wait(g->rt.self, stream, d->join[which], 0);
}

/* `stream` waits for replays on other streams: each is over as a whole. */
static gmm_status gmm__gtp_fence_replays(gmm_gtp *g, gmm_stream stream) {
    gmm_status s = GMM_OK;
    int32_t i;
    for (i = 0; i < g->graph_count && !s && !g->graph; i++)
        if (g->graph_watch[i].replayed && g->graph_watch[i].stream != stream)
            s = g->rt.stream_wait(g->rt.self, stream, g->graph_end[i], 0);
    return s;
}

/* `stream` waits for all reads of shards. */
static gmm_status gmm__gtp_fence_gathers(gmm_gtp *g, gmm_stream stream) {
    gmm_status s = gmm__gtp_fence_replays(g, stream);
    int32_t i;
    for (i = 0; i < g->domain_count && !s; i++) s = gmm__gtp_join(g, &g->domains[i], GMM__GTP_GATHER, stream);
    for (i = 0; i < g->bundle_count && !s; i++) {
        gmm__gtp_bundle *b = &g->bundles[i];
        b->asked = 0; /* the shards may change from here on */
        if (!g->graph || b->in_place.graph == g->graph)
            s = gmm__mark_wait(g, &b->in_place, stream); /* shards that were read as they are */
    }
    return s;
}

GMMDEF gmm_status gmm_gtp_fence(gmm_gtp *gtp, uint32_t what, gmm_stream stream) {
    static const char fn[] = "gmm_gtp_fence";
    int32_t i;
    gmm_status s = gmm__gtp_open_call(gtp, fn, 0);
    if (s) return s;
    if (what == 0 || (what & ~(uint32_t)GMM_GTP_ALL))
        return gmm__fail(&gtp->error, GMM_E_ARG, "%s: what is 0x%x: must be an OR of GMM_GTP_GATHERS and GRADIENTS", fn,
                         what);
    for (i = 0; i < gtp->domain_count && !s && (what & (uint32_t)GMM_GTP_GRADIENTS); i++)
        s = gmm__gtp_join(gtp, &gtp->domains[i], GMM__GTP_REDUCE, stream);
    if (!s) s = what & (uint32_t)GMM_GTP_GATHERS ? gmm__gtp_fence_gathers(gtp, stream)
                                                 : gmm__gtp_fence_replays(gtp, stream);
    return s ? gmm__gtp_break(gtp, fn, "all domains", s) : GMM_OK;
}

