/* Opens a call that works on a bundle; `name` is what it does. */
enum { GMM__GTP_IN_CALLBACK = 1, GMM__GTP_NO_CAPTURE = 2 };
static gmm_status gmm__gtp_open_call(gmm_gtp *g, const char *fn, int32_t allowed) {
    if (!g) return GMM_E_NULL;
    if (g->broken) return g->broken;
    if (!g->live) return gmm__fail(&g->error, GMM_E_STATE, "%s: seal the object and bind its memory first", fn);
    if (g->calling_back && !(allowed & GMM__GTP_IN_CALLBACK))
        return gmm__fail(&g->error, GMM_E_STATE, "%s: not from a callback", fn);
    if (g->graph && (allowed & GMM__GTP_NO_CAPTURE))
        return gmm__fail(&g->error, GMM_E_CAPTURE, "%s: not while graph %d is captured", fn, g->graph - 1);
    return GMM_OK;
}
static gmm_status gmm__gtp_open_bundle(gmm_gtp *g, const char *fn, int32_t bundle) {
    gmm_status s = gmm__gtp_open_call(g, fn, 0);
    if (s) return s;
    if (bundle < 0 || bundle >= g->bundle_count)
        return gmm__fail(&g->error, GMM_E_ARG, "%s: bundle %d: there are %d", fn, bundle, g->bundle_count);
    if (g->graph && !g->bundles[bundle].captured)
        return gmm__fail(&g->error, GMM_E_CAPTURE, "%s: '%s' is in no captured chain, graph %d is captured", fn,
                         g->bundles[bundle].name, g->graph - 1);
    return GMM_OK;
}
static gmm_status gmm__gtp_open_pass(gmm_gtp *g, const char *fn, int32_t bundle, gmm_gtp_pass pass) {
    const gmm_status s = gmm__gtp_open_bundle(g, fn, bundle);
    if (s) return s;
    if (pass < GMM_GTP_FORWARD || pass > GMM_GTP_RECOMPUTE)
        return gmm__fail(&g->error, GMM_E_ARG, "%s: '%s': pass is %d: must be a gmm_gtp_pass", fn,
                         g->bundles[bundle].name, (int)pass);
    if (pass == GMM_GTP_RECOMPUTE && g->bundles[bundle].chain[pass] < 0)
        return gmm__fail(&g->error, GMM_E_STATE, "%s: '%s' is in no recompute chain", fn, g->bundles[bundle].name);
    return GMM_OK;
}
static void gmm__gtp_hash(gmm_gtp *g, int call, int32_t bundle, int what) {
    const uint64_t word = ((uint64_t)(uint32_t)bundle << 16) | (uint64_t)(uint32_t)(call * 16 + what);
    g->stats.calls = (g->stats.calls ^ word) * 1099511628211u + 1;
}

/* Whether the slot has these weights, for who asks now: what a graph gathers is there in its replays alone, and what
   was gathered outside may not be; a graph hands on what it has prefetched for the next. */
static int gmm__gtp_has(const gmm_gtp *g, const gmm__gtp_slot *s, int32_t bundle) {
    const gmm__gtp_bundle *b = &g->bundles[bundle];
    if (s->bundle != bundle || s->version != b->version) return 0;
    return s->graph == g->graph || (s->graph && g->graph && s->pending);
}

static void gmm__gtp_ask(gmm_gtp *g, gmm__gtp_bundle *b) {
    if (b->asked) return;
    b->asked = 1;
    if (g->graph) g->graph_use[(g->graph - 1) * g->bundle_count + (b - g->bundles)] |= GMM__GRAPH_NEEDS;
    else if (g->config.hooks.need && !g->dry) {
        g->calling_back = 1;
        g->config.hooks.need(g->config.hooks.user, g, g->members + b->first, b->count);
        g->calling_back = 0;
    }
}

/* Bytes of `size` per weight, from where each weight has them to places one behind the other: one copy where the
   sources follow one another too. */
static gmm_status gmm__gtp_copy_values(gmm_gtp *g, const gmm__gtp_bundle *b, char *dst, size_t size, int scale,
                                       gmm_stream stream) {
    gmm_status s = GMM_OK;
    int32_t i, n;
    for (i = 0; i < b->count && !s; i += n) {
        const gmm_gtp_weight *first = &gmm__gtp_member(g, b, i)->desc;
        const char *src = (const char *)(scale ? first->scale[GMM_ROWWISE] : first->amax);
        for (n = 1; i + n < b->count; n++) {
            const gmm_gtp_weight *w = &gmm__gtp_member(g, b, i + n)->desc;
            if ((const char *)(scale ? w->scale[GMM_ROWWISE] : w->amax) != src + (size_t)n * size) break;
        }
        s = g->rt.copy(g->rt.self, dst + (size_t)i * size, src, (size_t)n * size, stream);
    }
    return s;
}

/* The collective: every part of one direction of a bundle to its place in the slot, or in the stage. All codes, then
   all scales: neighbours that lie evenly may go together. */
static gmm_status gmm__gtp_send(gmm_gtp *g, const gmm__gtp_bundle *b, int dir, int all_staged, char *slot, char *stage,
                                gmm_stream stream) {
    const gmm__gtp_domain *d = &g->domains[b->domain];
    const gmm_comm *c = &d->gather;
    int32_t i, part;
    gmm_status s;
    gmm__gtp_calls(g, d, "all_gather");
    s = c->group_begin(c->self, b->name);
    for (part = GMM__GTP_DATA; part <= GMM__GTP_SCALE; part++)
        for (i = 0; i < b->count; i++) {
            const gmm__gtp_weight *w = gmm__gtp_member(g, b, i);
            const gmm__route *to = &w->route[dir][part];
            if (s || !to->send) continue;
            s = c->all_gather(c->self, part == GMM__GTP_DATA ? w->desc.data[dir] : w->desc.scale[dir],
                              all_staged || to->staged ? stage + to->stage : slot + to->at, to->send, stream);
            g->stats.gathered_bytes += (int64_t)to->send * (d->size - 1);
        }
    if (!s) s = c->group_end(c->self);
    if (!s) g->calls = NULL;
    return s;
}

/* Puts what has arrived where it stays, straight: ranks side by side, zeros behind them. */
static gmm_status gmm__gtp_settle(gmm_gtp *g, const gmm__gtp_bundle *b, int dir, char *slot, const char *stage,
                                  gmm_stream stream) {
    const int32_t size = g->domains[b->domain].size;
    gmm_runtime *rt = &g->rt;
    gmm_status s = GMM_OK;
    int32_t i, part, r;
    for (i = 0; i < b->count; i++)
        for (part = GMM__GTP_DATA; part <= GMM__GTP_SCALE; part++) {
            const gmm__route *to = &gmm__gtp_member(g, b, i)->route[dir][part];
            const size_t rows = to->staged ? to->height * to->dst_pitch : to->send * (size_t)size;
            char *dst = slot + to->at;
            if (!to->send) continue;
            for (r = 0; r < size && to->staged && !s; r++) {
                const size_t at = (size_t)r * to->width, left = at < to->limit ? to->limit - at : 0;
                if (left)
                    s = rt->copy2d(rt->self, dst + at, to->dst_pitch, stage + to->stage + (size_t)r * to->send,
                                   to->src_pitch, left < to->width ? left : to->width, to->height, stream);
            }
            if (!s && to->staged && to->limit < to->dst_pitch)
                s = rt->fill2d(rt->self, dst + to->limit, to->dst_pitch, 0, to->dst_pitch - to->limit, to->height,
                               stream);
            if (!s && rows < to->whole) s = rt->fill(rt->self, dst + rows, 0, to->whole - rows, stream);
        }
    return s;
}

/* Makes the columnwise copies in a slot of rowwise ones: of a slot, of the stage, or (both NULL) of the shards. */
static gmm_status gmm__gtp_transpose(gmm_gtp *g, const gmm__gtp_bundle *b, char *slot, const char *row,
                                     const char *stage, gmm_stream stream) {
    gmm_status s = GMM_OK;
    int32_t i;
    for (i = 0; i < b->count && !s; i++) {
        const gmm__gtp_weight *w = gmm__gtp_member(g, b, i);
        const gmm__route *data = w->route[GMM_ROWWISE], *scale = data + 1, *to = w->route[GMM_COLUMNWISE];
        const size_t local = (size_t)w->plan.local_rows, pitch = (size_t)w->plan.padded_rows;
        const int tensor = w->shard.scaling == GMM_SCALING_TENSOR;
        gmm__gtp_turn t;
        gmm_range ranges[4];
        gmm_work work;
        memset(&t, 0, sizeof t);
        memset(&work, 0, sizeof work);
        memset(ranges, 0, sizeof ranges);
        t.ctx = g->config.ctx;
        t.d.count = 1;
        t.d.rows = w->plan.local_rows;
        t.d.cols = w->plan.local_cols;
        t.src.dtype = t.dst.dtype = w->shard.dtype;
        t.src.scaling = t.dst.scaling = w->shard.scaling;
        t.src.data = row ? (void *)(uintptr_t)(row + data->at) : stage ? (void *)(uintptr_t)(stage + data->stage)
                                                                        : w->desc.data[GMM_ROWWISE];
        t.src.scale = row ? (void *)(uintptr_t)(row + scale->at)
                          : stage && !tensor ? (void *)(uintptr_t)(stage + scale->stage) : w->desc.scale[GMM_ROWWISE];
        t.dst.data = slot + to[GMM__GTP_DATA].at;
        t.dst.scale = slot + to[GMM__GTP_SCALE].at;
        t.dst.ld = w->plan.padded_rows;
        ranges[0].data = t.src.data;
        ranges[0].bytes = local * (size_t)w->plan.local_cols;
        ranges[1].data = t.src.scale;
        ranges[1].bytes = tensor ? sizeof(float) : scale->even;
        ranges[2].data = t.dst.data;
        ranges[2].bytes = pitch * (size_t)w->plan.local_cols;
        ranges[3].data = t.dst.scale;
        ranges[3].bytes = to[GMM__GTP_SCALE].whole;
        ranges[2].writes = ranges[3].writes = 1;
        work.name = "transpose";
        work.function = gmm__gtp_turn_run;
        work.argument = &t;
        work.argument_bytes = sizeof t;
        work.ranges = ranges;
        work.range_count = 4;
        s = g->rt.run(g->rt.self, &work, stream);
        if (!s && local < pitch)
            s = g->rt.fill2d(g->rt.self, (char *)t.dst.data + local, pitch, 0, pitch - local,
                             (size_t)w->plan.local_cols, stream);
    }
    return s;
}

/* `stream` has read what the mark stands for the last use of: one event then stands for all readers. */
static gmm_status gmm__gtp_was_read(gmm_gtp *g, gmm__mark *mark, int *read, gmm_stream *reader, gmm_stream stream) {
    gmm_status s = GMM_OK;
    if (*read && *reader != stream) s = gmm__mark_wait(g, mark, stream);
    if (!s) s = gmm__mark_record(g, mark, stream);
    *read = 1;
    *reader = stream;
    return s;
}

/* Gathers a bundle into its slot. With one rank, `stream` transposes the shards. */
static gmm_status gmm__gtp_gather(gmm_gtp *g, int32_t bundle, gmm_gtp_pass pass, gmm_stream stream) {
    gmm__gtp_bundle *b = &g->bundles[bundle];
    gmm__gtp_domain *d = &g->domains[b->domain];
    gmm__gtp_slot *slot = &g->slots[b->slot[pass]], *row = NULL;
    const gmm__gtp_weight *first = gmm__gtp_member(g, b, 0);
    const int dir = gmm__gtp_class_direction(slot->kind);
    const int turn = first->transposed && dir == GMM_COLUMNWISE, several = d->size > 1;
    const int staged = several && (turn || first->route[dir][0].staged || first->route[dir][1].staged);
    char *stage = d->gather_base + d->stage_at[b->captured];
    gmm__watch *watch = NULL;
    gmm_status s = GMM_OK;
    if (several) {
        stream = d->desc.gather_stream;
        s = gmm__gtp_use_stream(g, d, GMM__GTP_GATHER);
        if (turn && gmm__gtp_has(g, &g->slots[b->slot[GMM_GTP_FORWARD]], bundle))
            row = &g->slots[b->slot[GMM_GTP_FORWARD]];
    }
    if (g->graph) g->graph_use[(g->graph - 1) * g->bundle_count + bundle] |= GMM__GRAPH_READS;
    else if (!s) s = gmm__mark_wait(g, &b->published, stream);
    if (!s) s = gmm__mark_wait(g, &slot->last_use, stream);
    if (!s && slot->ready.graph != g->graph) s = gmm__mark_wait(g, &slot->ready, stream);
    if (!s && row) s = gmm__mark_wait(g, &row->ready, stream);
    if (!s && staged && !row) s = gmm__mark_wait(g, &d->staged[b->captured], stream);
    slot->bundle = bundle;
    slot->version = b->version;
    slot->graph = g->graph;
    slot->pending = slot->read = 0;
    if (!s && several) s = gmm__watch_begin(g, d, GMM__GTP_GATHER, &watch);
    if (!s && several && !row) s = gmm__gtp_send(g, b, turn ? (int)GMM_ROWWISE : dir, turn, slot->base, stage, stream);
    if (!s && !turn) s = gmm__gtp_settle(g, b, dir, slot->base, stage, stream);
    if (!s && turn)
        s = gmm__gtp_transpose(g, b, slot->base, row ? row->base : NULL, several && !row ? stage : NULL, stream);
    if (!s && !turn && first->shard.scaling == GMM_SCALING_TENSOR)
        s = gmm__gtp_copy_values(g, b, slot->base + first->route[dir][GMM__GTP_SCALE].at, sizeof(float), 1, stream);
    if (!s && first->shard.scaling == GMM_SCALING_NV16 && first->desc.amax)
        s = gmm__gtp_copy_values(g, b, slot->base + b->amax_at[dir], sizeof(float), 0, stream);
    if (!s && staged && !row) s = gmm__mark_record(g, &d->staged[b->captured], stream);
    if (!s) s = gmm__mark_record(g, &slot->ready, stream);
    if (!s) s = gmm__watch_end(g, d, GMM__GTP_GATHER, watch, &d->gather, "all_gather", b->name);
    if (!s && row) s = gmm__mark_record(g, &row->ready, stream); /* for a gather into it that is not on this stream */
    if (!s && !several) s = gmm__gtp_was_read(g, &b->in_place, &b->in_place.set, &b->reader, stream);
    g->stats.gathers++;
    g->stats.transposed += row || !several;
    return s;
}

/* Gathers a bundle for later, unless it is there or its slot is in use. */
static gmm_status gmm__gtp_gather_ahead(gmm_gtp *g, int32_t bundle, gmm_gtp_pass pass) {
    gmm__gtp_bundle *b = &g->bundles[bundle];
    gmm__gtp_slot *slot;
    if (b->slot[pass] < 0 || g->domains[b->domain].size == 1) return GMM_OK;
    slot = &g->slots[b->slot[pass]];
    if (slot->holders && slot->bundle != bundle) {
        g->stats.busy++;
        return GMM_OK;
    }
    if (pass == GMM_GTP_FORWARD) gmm__gtp_ask(g, b);
    if (gmm__gtp_has(g, slot, bundle)) {
        if (!slot->pending) slot->pending = 2;
        return GMM_OK;
    }
    if (slot->holders || (slot->pending && slot->bundle >= 0 && slot->bundle != bundle &&
                          gmm__gtp_has(g, slot, slot->bundle))) {
        g->stats.busy++;
        return GMM_OK;
    }
    g->stats.outdated += slot->pending == 1;
    g->stats.prefetches++;
    {
        const gmm_status s = gmm__gtp_gather(g, bundle, pass, NULL);
        slot->pending = 1;
        return s;
    }
}

/* The bundles that come after this one. */
static gmm_status gmm__gtp_gather_followers(gmm_gtp *g, const gmm__gtp_bundle *b, gmm_gtp_pass pass) {
    const int32_t chain = b->chain[pass], ahead = chain < 0 ? 0 : g->chains[chain].prefetch;
    gmm_status s = GMM_OK;
    int32_t k;
    for (k = 1; k <= ahead && !s; k++) {
        gmm_gtp_pass then = pass;
        const gmm__gtp_bundle *x = gmm__gtp_behind(g, chain, b->place[pass], k, &then);
        if (!x) break;
        s = gmm__gtp_gather_ahead(g, (int32_t)(x - g->bundles), then);
    }
    return s;
}

/* The operand of a bundle, over addresses that stand in a table. */
static gmm_gtp_view gmm__gtp_view_of(gmm_gtp *g, const gmm__gtp_bundle *b, gmm_dtype dtype, gmm_scaling scaling,
                                     void *const *data, void *const *scales, int packed, int64_t stride, int64_t ld) {
    const gmm__gtp_weight *w = gmm__gtp_member(g, b, 0);
    gmm_gtp_view v = GMM_ZERO;
    v.count = b->count;
    v.rows = w->plan.local_rows;
    v.cols = w->plan.local_cols;
    v.version = b->version;
    v.slot = -1;
    v.mat.dtype = dtype;
    v.mat.scaling = scaling;
    v.mat.ld = ld;
    if (packed) {
        v.mat.data = data[0];
        v.mat.group_stride = b->count > 1 ? stride : 0;
        v.mat.scale = scaling == GMM_SCALING_NONE ? NULL : scales[0];
    } else {
        v.mat.table = data;
        v.mat.scale_table = scaling == GMM_SCALING_NONE ? NULL : scales;
        v.mat.flags = (uint32_t)GMM_MAT_TABLE_ON_HOST;
    }
    v.mat.amax = w->desc.amax;
    return v;
}
static gmm_gtp_view gmm__gtp_view_pass(gmm_gtp *g, gmm__gtp_bundle *b, gmm_gtp_pass pass) {
    const gmm__gtp_weight *w = gmm__gtp_member(g, b, 0);
    const int dir = gmm__gtp_class_direction(gmm__gtp_class(g, b, pass)), slot = b->slot[pass];
    void *const *data = g->table[pass] + b->first;
    const gmm__route *scale = &w->route[dir][GMM__GTP_SCALE];
    const int packed = b->count == 1 || (slot >= 0 && b->uniform && scale->whole == scale->even);
    const int64_t bits = gmm_dtype_bits(w->shard.dtype);
    gmm_gtp_view v = gmm__gtp_view_of(g, b, w->shard.dtype, w->shard.scaling, data, g->scales[pass] + b->first, packed,
                                      (int64_t)gmm__round256(w->route[dir][GMM__GTP_DATA].whole) * 8 / bits,
                                      slot >= 0 ? w->ld[dir] : 0);
    if (w->format.e4m3_256) v.mat.flags |= (uint32_t)GMM_MAT_E4M3_256;
    if (slot >= 0 && w->shard.scaling == GMM_SCALING_NV16 && w->desc.amax)
        v.mat.amax = (float *)(void *)(g->slots[slot].base + b->amax_at[dir]);
    v.slot = slot;
    if (dir == GMM_COLUMNWISE) { /* what asks for a rowwise copy is refused */
        b->columnwise = v.mat;
        v.mat.data = v.mat.scale = NULL;
        v.mat.table = v.mat.scale_table = NULL;
        v.mat.amax = NULL;
        v.mat.flags = 0;
        v.mat.ld = v.mat.group_stride = 0;
        v.mat.columnwise = &b->columnwise;
    }
    return v;
}

/* What a GEMM of the bundle has beside it: the gather of its followers, and behind forward the reductions, whose sums
   are kernels of the runtime's own. A kernel that finds every multiprocessor taken waits until the GEMM ends. */
enum { GMM__GTP_SUM_PROCESSORS = 16 };
static int32_t gmm__gtp_leave(const gmm_gtp *g, const gmm__gtp_bundle *b, gmm_gtp_pass pass) {
    const gmm__gtp_domain *d = &g->domains[b->domain];
    const int32_t chain = b->chain[pass];
    int32_t most = 0;
    if (d->size == 1) return 0;
    if (chain >= 0 && g->chains[chain].prefetch > 0) most = d->gather.processors;
    if (pass != GMM_GTP_FORWARD && d->reduce.processors > most) most = d->reduce.processors;
    if (pass != GMM_GTP_FORWARD && most < GMM__GTP_SUM_PROCESSORS) most = GMM__GTP_SUM_PROCESSORS;
    return most;
}

GMMDEF gmm_status gmm_gtp_acquire(gmm_gtp *gtp, int32_t bundle, gmm_gtp_pass pass, gmm_stream stream,
                                  gmm_gtp_view *view) {
    static const char fn[] = "gmm_gtp_acquire";
    gmm__gtp_bundle *b;
    gmm__gtp_slot *slot;
    gmm_gtp_view v;
    size_t known;
    gmm_status s = gmm__gtp_open_pass(gtp, fn, bundle, pass);
    if (s) return s;
    known = gmm__gtp_known(fn, "view", view, sizeof *view, &s, &gtp->error);
    if (s) return s;
    b = &gtp->bundles[bundle];
    slot = b->slot[pass] >= 0 ? &gtp->slots[b->slot[pass]] : NULL;
    if (b->held >> pass & 1u)
        return gmm__fail(&gtp->error, GMM_E_STATE, "%s: '%s' is acquired already for pass %d", fn, b->name, (int)pass);
    if (slot && slot->holders && slot->bundle != bundle)
        return gmm__fail(&gtp->error, GMM_E_STATE, "%s: '%s': its slot holds '%s', which is not released: release it, "
                         "or raise gmm_gtp_chain.held", fn, b->name, gtp->bundles[slot->bundle].name);
    if (slot && slot->holders && !gmm__gtp_has(gtp, slot, bundle))
        return gmm__fail(&gtp->error, GMM_E_STATE, "%s: '%s' was published while another pass holds it", fn, b->name);
    gmm__gtp_hash(gtp, 1, bundle, (int)pass);
    if (pass == GMM_GTP_FORWARD) gmm__gtp_ask(gtp, b);
    b->asked = pass == GMM_GTP_FORWARD ? 0 : b->asked;
    gtp->stats.acquires++;
    if (!slot) {
        gtp->stats.resident++;
        if (gtp->graph) gtp->graph_use[(gtp->graph - 1) * gtp->bundle_count + bundle] |= GMM__GRAPH_READS;
        else s = gmm__mark_wait(gtp, &b->published, stream);
    } else {
        if (gmm__gtp_has(gtp, slot, bundle)) {
            if (slot->pending == 1) gtp->stats.prefetched++;
            else gtp->stats.resident++;
        } else {
            gtp->stats.exposed++;
            gtp->stats.outdated += slot->pending == 1;
            s = gmm__gtp_gather(gtp, bundle, pass, stream);
        }
        if (!s) s = gmm__mark_wait(gtp, &slot->ready, stream);
        slot->pending = 0;
        slot->graph = gtp->graph;
        slot->holders |= 1u << pass;
    }
    b->held |= 1u << pass;
    if (!s) s = gmm__gtp_gather_followers(gtp, b, pass);
    if (s) return gmm__gtp_break(gtp, fn, b->name, s);
    v = gmm__gtp_view_pass(gtp, b, pass);
    v.leave = gmm__gtp_leave(gtp, b, pass);
    v.struct_size = view->struct_size;
    memcpy(view, &v, known);
    return GMM_OK;
}

GMMDEF gmm_status gmm_gtp_release(gmm_gtp *gtp, int32_t bundle, gmm_gtp_pass pass, gmm_stream stream) {
    static const char fn[] = "gmm_gtp_release";
    gmm__gtp_bundle *b;
    gmm__gtp_slot *slot;
    gmm_status s = gmm__gtp_open_pass(gtp, fn, bundle, pass);
    if (s) return s;
    b = &gtp->bundles[bundle];
    if (!(b->held >> pass & 1u))
        return gmm__fail(&gtp->error, GMM_E_STATE, "%s: '%s' is not acquired for pass %d", fn, b->name, (int)pass);
    slot = b->slot[pass] >= 0 ? &gtp->slots[b->slot[pass]] : NULL;
    s = slot ? gmm__gtp_was_read(gtp, &slot->last_use, &slot->read, &slot->reader, stream)
             : gmm__gtp_was_read(gtp, &b->in_place, &b->in_place.set, &b->reader, stream);
    b->held &= ~(1u << pass);
    if (slot) slot->holders &= ~(1u << pass);
    return s ? gmm__gtp_break(gtp, fn, b->name, s) : GMM_OK;
}

GMMDEF gmm_status gmm_gtp_prefetch(gmm_gtp *gtp, int32_t bundle, gmm_gtp_pass pass) {
    static const char fn[] = "gmm_gtp_prefetch";
    gmm_status s = gmm__gtp_open_pass(gtp, fn, bundle, pass);
    if (s) return s;
    gmm__gtp_hash(gtp, 2, bundle, (int)pass);
    s = gmm__gtp_gather_ahead(gtp, bundle, pass);
    return s ? gmm__gtp_break(gtp, fn, gtp->bundles[bundle].name, s) : GMM_OK;
}

GMMDEF gmm_status gmm_gtp_follow(gmm_gtp *gtp, int32_t chain, int32_t next) {
    if (!gtp) return GMM_E_NULL;
    if (gtp->broken) return gtp->broken;
    if (chain < 0 || chain >= gtp->chain_count || next < -1 || next >= gtp->chain_count)
        return gmm__fail(&gtp->error, GMM_E_ARG, "gmm_gtp_follow: chain %d, next %d: there are %d", chain,
                         next, gtp->chain_count);
    if (next >= 0 && gtp->chains[next].captured != gtp->chains[chain].captured)
        return gmm__fail(&gtp->error, GMM_E_CAPTURE, "gmm_gtp_follow: chain %d is %scaptured, chain %d is not alike",
                         chain, gtp->chains[chain].captured ? "" : "not ", next);
    gtp->chains[chain].next = next;
    return GMM_OK;
}

/* Checks a list of weights. */
static gmm_status gmm__gtp_list(gmm_gtp *g, const char *fn, const int32_t *weights, int32_t count) {
    int32_t i;
    if (!weights || count < 0)
        return gmm__fail(&g->error, weights ? GMM_E_ARG : GMM_E_NULL, "%s: weights is %s, count %d", fn,
                         weights ? "given" : "NULL", count);
    for (i = 0; i < count; i++)
        if (weights[i] < 0 || weights[i] >= g->weight_count)
            return gmm__fail(&g->error, GMM_E_ARG, "%s: weights[%d] is %d: there are %d", fn, i, (int)weights[i],
                             g->weight_count);
    return GMM_OK;
}
static gmm_status gmm__gtp_published(gmm_gtp *g, const int32_t *weights, int32_t count, gmm_stream stream) {
    gmm_status s = GMM_OK;
    int32_t i, k;
    for (i = 0; i < count && !s; i++) {
        gmm__gtp_bundle *b = &g->bundles[g->weights[weights[i]].bundle];
        for (k = 0; k < i && g->weights[weights[k]].bundle != g->weights[weights[i]].bundle; k++) { }
        if (k < i) continue; /* a bundle is published once */
        if (b->published.set) s = gmm__mark_wait(g, &b->published, stream); /* of other weights, on other streams */
        if (!s) s = gmm__mark_record(g, &b->published, stream);
        b->version++;
    }
    return s;
}

GMMDEF gmm_status gmm_gtp_publish(gmm_gtp *gtp, const int32_t *weights, int32_t count, gmm_stream stream) {
    static const char fn[] = "gmm_gtp_publish";
    gmm_status s = gmm__gtp_open_call(gtp, fn, GMM__GTP_IN_CALLBACK | GMM__GTP_NO_CAPTURE);
    if (!s) s = gmm__gtp_list(gtp, fn, weights, count);
    if (s) return s;
    s = gmm__gtp_published(gtp, weights, count, stream);
    return s ? gmm__gtp_break(gtp, fn, "shards", s) : GMM_OK;
}

