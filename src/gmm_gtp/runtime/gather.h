/* Gathers of bundles into slots, ahead of their use or when they are acquired. */

/* Whether the slot contains the current weights of a bundle for the work that is being enqueued. Weights that a
   graph gathers are in the slot during its replays only, and weights that were gathered outside of captures may be
   gone when a graph is replayed. A graph may use weights that an earlier graph has prefetched for it. */
static int gmm__gtp_slot_valid(const gmm_gtp *g, const gmm__gtp_slot *s, int32_t bundle) {
    const gmm__gtp_bundle *b = &g->bundles[bundle];
    if (s->bundle != bundle || s->version != b->version) return 0;
    return s->graph == g->graph || (s->graph && g->graph && s->pending);
}

/* Whether the slot contains weights that were prefetched, and have been published again since. */
static int gmm__gtp_is_outdated(const gmm_gtp *g, const gmm__gtp_slot *s) {
    return s->pending == 1 && s->bundle >= 0 && s->version != g->bundles[s->bundle].version;
}

/* How a graph uses a bundle (GMM__GRAPH_*). */
static unsigned char *gmm__gtp_graph_usage(gmm_gtp *g, int32_t graph, int32_t bundle) {
    return &g->graph_usage[(size_t)graph * (size_t)g->bundle_count + (size_t)bundle];
}

/* Asks the caller, once per forward, to publish the weights of a bundle: calls hooks.need, or in a capture notes that
   gmm_gtp_pre_replay has to. Returns the failure of a gmm_gtp_publish that the hook has called. */
static gmm_status gmm__gtp_request_publish(gmm_gtp *g, gmm__gtp_bundle *b) {
    if (b->publish_requested) return GMM_OK;
    b->publish_requested = 1;
    if (g->graph) *gmm__gtp_graph_usage(g, g->graph - 1, (int32_t)(b - g->bundles)) |= GMM__GRAPH_NEEDS;
    else if (g->config.hooks.need && !g->dry_run) {
        g->in_callback = 1;
        g->config.hooks.need(g->config.hooks.user, g, g->members + b->first, b->count);
        g->in_callback = 0;
    }
    return g->failed;
}

/* Copies a value of `size` bytes of each weight to consecutive addresses: its tensor scale (`scale` = 1) or its amax.
   Values at consecutive addresses are copied together. */
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
        s = g->runtime.copy(g->runtime.self, dst + (size_t)i * size, src, (size_t)n * size, stream);
    }
    return s;
}

/* A gather of a bundle into its slot for a pass. */
typedef struct gmm__gtp_gathering {
    gmm__gtp_bundle *bundle;
    gmm__gtp_slot *slot, *row; /* row: the slot with the rowwise copy that is transposed; NULL = none */
    char *stage;
    int dir, transpose;        /* direction of the slot; 1: its copy is a transpose of the rowwise one */
    int staged;                /* 1: the gather uses the stage */
} gmm__gtp_gathering;

/* All-gathers the data and scales of bundles in one group call, to their slots, or to the stage where they are staged
   or transposed behind it. All data are sent before all scales, since peer copies merge consecutive calls with equal
   spacing into one 2D copy. */
static gmm_status gmm__gtp_all_gather(gmm_gtp *g, const gmm__gtp_gathering *list, int32_t count, gmm_stream stream) {
    const gmm__gtp_domain *d = &g->domains[list->bundle->domain];
    const gmm_comm *c = &d->gather;
    int32_t i, k, part, sends = 0;
    gmm_status s = GMM_OK;
    for (k = 0; k < count; k++) sends += !list[k].row;
    if (sends == 0) return GMM_OK;
    gmm__gtp_set_collective(g, d, "all_gather");
    s = c->group_begin(c->self, list->bundle->name);
    for (part = GMM__GTP_DATA; part <= GMM__GTP_SCALE; part++)
        for (k = 0; k < count; k++) {
            const gmm__gtp_gathering *x = &list[k];
            const int dir = x->transpose ? (int)GMM_ROWWISE : x->dir;
            for (i = 0; i < x->bundle->count && !x->row && !s; i++) {
                const gmm__gtp_weight *w = gmm__gtp_member(g, x->bundle, i);
                const gmm__gather_layout *l = &w->layout[dir][part];
                if (!l->send_bytes) continue;
                s = c->all_gather(c->self, part == GMM__GTP_DATA ? w->desc.data[dir] : w->desc.scale[dir],
                                  x->transpose || l->staged ? x->stage + l->stage_offset : x->slot->base + l->offset,
                                  l->send_bytes, stream);
                g->stats.gathered_bytes += (int64_t)l->send_bytes * (d->size - 1);
            }
        }
    if (!s) s = c->group_end(c->self);
    if (!s) g->collective = NULL;
    return s;
}

/* Copies the columns of all ranks from the stage to the slot, and zeros the bytes behind them and behind buffers that
   were received in place. */
static gmm_status gmm__gtp_unpack(gmm_gtp *g, const gmm__gtp_bundle *b, int dir, char *slot, const char *stage,
                                  gmm_stream stream) {
    const int32_t size = g->domains[b->domain].size;
    gmm_runtime *rt = &g->runtime;
    gmm_status s = GMM_OK;
    int32_t i, part, r;
    for (i = 0; i < b->count; i++)
        for (part = GMM__GTP_DATA; part <= GMM__GTP_SCALE; part++) {
            const gmm__gather_layout *l = &gmm__gtp_member(g, b, i)->layout[dir][part];
            const size_t rows = l->staged ? l->height * l->dst_pitch : l->send_bytes * (size_t)size;
            char *dst = slot + l->offset;
            if (!l->send_bytes) continue;
            for (r = 0; r < size && l->staged && !s; r++) {
                const size_t offset = (size_t)r * l->width;
                const size_t rest = offset < l->valid_width ? l->valid_width - offset : 0;
                if (rest)
                    s = rt->copy2d(rt->self, dst + offset, l->dst_pitch,
                                   stage + l->stage_offset + (size_t)r * l->send_bytes, l->src_pitch,
                                   rest < l->width ? rest : l->width, l->height, stream);
            }
            if (!s && l->staged && l->valid_width < l->dst_pitch)
                s = rt->fill2d(rt->self, dst + l->valid_width, l->dst_pitch, 0, l->dst_pitch - l->valid_width,
                               l->height, stream);
            if (!s && rows < l->gathered_bytes) s = rt->fill(rt->self, dst + rows, 0, l->gathered_bytes - rows, stream);
        }
    return s;
}

/* Transposes rowwise copies to columnwise copies in `slot`. The rowwise copies are those of another slot (`row`), or
   those in the stage, or with both NULL the shards themselves. */
static gmm_status gmm__gtp_transpose(gmm_gtp *g, const gmm__gtp_bundle *b, char *slot, const char *row,
                                     const char *stage, gmm_stream stream) {
    gmm_status s = GMM_OK;
    int32_t i;
    for (i = 0; i < b->count && !s; i++) {
        const gmm__gtp_weight *w = gmm__gtp_member(g, b, i);
        const gmm__gather_layout *data = w->layout[GMM_ROWWISE], *scale = data + 1, *to = w->layout[GMM_COLUMNWISE];
        const size_t local = (size_t)w->plan.local_rows, pitch = (size_t)w->plan.padded_rows;
        const int tensor = w->shard.scaling == GMM_SCALING_TENSOR;
        gmm__gtp_transposition t;
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
        t.src.data = w->desc.data[GMM_ROWWISE];
        t.src.scale = w->desc.scale[GMM_ROWWISE];
        if (row) {
            t.src.data = (void *)(uintptr_t)(row + data->offset);
            t.src.scale = (void *)(uintptr_t)(row + scale->offset);
        } else if (stage) {
            t.src.data = (void *)(uintptr_t)(stage + data->stage_offset);
            if (!tensor) t.src.scale = (void *)(uintptr_t)(stage + scale->stage_offset);
        }
        t.dst.data = slot + to[GMM__GTP_DATA].offset;
        t.dst.scale = slot + to[GMM__GTP_SCALE].offset;
        t.dst.ld = w->plan.padded_rows;
        ranges[0].data = t.src.data;
        ranges[0].bytes = local * (size_t)w->plan.local_cols;
        ranges[1].data = t.src.scale;
        ranges[1].bytes = tensor ? sizeof(float) : scale->group_bytes;
        ranges[2].data = t.dst.data;
        ranges[2].bytes = pitch * (size_t)w->plan.local_cols;
        ranges[3].data = t.dst.scale;
        ranges[3].bytes = to[GMM__GTP_SCALE].gathered_bytes;
        ranges[2].writes = ranges[3].writes = 1;
        work.name = "transpose";
        work.function = gmm__gtp_transposition_run;
        work.argument = &t;
        work.argument_bytes = sizeof t;
        work.ranges = ranges;
        work.range_count = 4;
        s = g->runtime.run(g->runtime.self, &work, stream);
        if (!s && local < pitch)
            s = g->runtime.fill2d(g->runtime.self, (char *)t.dst.data + local, pitch, 0, pitch - local,
                                  (size_t)w->plan.local_cols, stream);
    }
    return s;
}

/* Records that `stream` has read a buffer. It first waits for the last reader, so that the event covers all readers. */
static gmm_status gmm__gtp_record_read(gmm_gtp *g, gmm__gtp_event *last_use, int *read, gmm_stream *reader,
                                       gmm_stream stream) {
    gmm_status s = GMM_OK;
    if (*read && *reader != stream) s = gmm__gtp_event_wait(g, last_use, stream);
    if (!s) s = gmm__gtp_event_record(g, last_use, stream);
    *read = 1;
    *reader = stream;
    return s;
}

/* Begins the gather of a bundle: makes `stream` wait for the shards, the slot and the stage, and assigns the
   slot. */
static gmm_status gmm__gtp_gather_begin(gmm_gtp *g, int32_t bundle, gmm_gtp_pass pass, gmm_stream stream,
                                        gmm__gtp_gathering *x) {
    gmm__gtp_bundle *b = &g->bundles[bundle];
    gmm__gtp_domain *d = &g->domains[b->domain];
    gmm__gtp_slot *slot = &g->slots[b->slot[pass]];
    const gmm__gtp_weight *first = gmm__gtp_member(g, b, 0);
    const int sharded = d->size > 1;
    gmm_status s = GMM_OK;
    x->bundle = b;
    x->slot = slot;
    x->row = NULL;
    x->stage = d->gather_base + d->stage_offset[b->captured] + b->stage_offset[pass];
    x->dir = gmm__slot_direction(slot->kind);
    x->transpose = first->transposed && x->dir == GMM_COLUMNWISE;
    if (sharded && x->transpose && gmm__gtp_slot_valid(g, &g->slots[b->slot[GMM_GTP_FORWARD]], bundle))
        x->row = &g->slots[b->slot[GMM_GTP_FORWARD]];
    x->staged = sharded && !x->row &&
                (x->transpose || first->layout[x->dir][0].staged || first->layout[x->dir][1].staged);
    if (g->graph) *gmm__gtp_graph_usage(g, g->graph - 1, bundle) |= GMM__GRAPH_READS;
    else s = gmm__gtp_event_wait(g, &b->published, stream);
    if (!s) s = gmm__gtp_event_wait(g, &slot->last_use, stream);
    if (!s && slot->ready.graph != g->graph) s = gmm__gtp_event_wait(g, &slot->ready, stream);
    if (!s && x->row) s = gmm__gtp_event_wait(g, &x->row->ready, stream);
    if (!s && x->staged) s = gmm__gtp_event_wait(g, &d->staged[b->captured], stream);
    slot->bundle = bundle;
    slot->version = b->version;
    slot->graph = g->graph;
    slot->pending = slot->read = 0;
    return s;
}
/* Ends the gather of a bundle, whose bytes have been received: moves them to their places, or transposes them. */
static gmm_status gmm__gtp_gather_end(gmm_gtp *g, const gmm__gtp_gathering *x, gmm_stream stream) {
    gmm__gtp_bundle *b = x->bundle;
    gmm__gtp_domain *d = &g->domains[b->domain];
    const gmm__gtp_weight *first = gmm__gtp_member(g, b, 0);
    const int sharded = d->size > 1;
    gmm_status s = x->transpose ? gmm__gtp_transpose(g, b, x->slot->base, x->row ? x->row->base : NULL,
                                                     sharded && !x->row ? x->stage : NULL, stream)
                                : gmm__gtp_unpack(g, b, x->dir, x->slot->base, x->stage, stream);
    if (!s && !x->transpose && first->shard.scaling == GMM_SCALING_TENSOR)
        s = gmm__gtp_copy_values(g, b, x->slot->base + first->layout[x->dir][GMM__GTP_SCALE].offset, sizeof(float), 1,
                                 stream);
    if (!s && first->shard.scaling == GMM_SCALING_NV16 && first->desc.amax)
        s = gmm__gtp_copy_values(g, b, x->slot->base + b->amax_offset[x->dir], sizeof(float), 0, stream);
    if (!s && x->staged) s = gmm__gtp_event_record(g, &d->staged[b->captured], stream);
    if (!s) s = gmm__gtp_event_record(g, &x->slot->ready, stream);
    /* records `ready` of the forward slot again, so that the next gather into it waits for the transpose */
    if (!s && x->row) s = gmm__gtp_event_record(g, &x->row->ready, stream);
    if (!s && !sharded) s = gmm__gtp_record_read(g, &b->in_place, &b->in_place.recorded, &b->reader, stream);
    g->stats.gathers++;
    g->stats.transposed += x->row || !sharded;
    return s;
}

/* Gathers bundles of one domain into their slots for a pass, in one group call on the gather stream. A columnwise copy
   that shards do not store is transposed from the rowwise copy of the forward slot if that is valid, else from shards
   gathered in the stage. With one rank the shards are transposed, on `stream`. */
static gmm_status gmm__gtp_gather(gmm_gtp *g, const int32_t *bundles, int32_t count, gmm_gtp_pass pass,
                                  gmm_stream stream) {
    gmm__gtp_domain *d = &g->domains[g->bundles[bundles[0]].domain];
    const int sharded = d->size > 1;
    gmm__gtp_gathering list[GMM__GTP_MAX_TOGETHER];
    gmm__watch *watch = NULL;
    gmm_status s = GMM_OK;
    int32_t k;
    if (sharded) {
        stream = d->desc.gather_stream;
        s = gmm__gtp_prepare_stream(g, d, GMM__GTP_GATHER);
    }
    for (k = 0; k < count && !s; k++) s = gmm__gtp_gather_begin(g, bundles[k], pass, stream, &list[k]);
    if (!s && sharded) s = gmm__watch_begin(g, d, GMM__GTP_GATHER, &watch);
    if (!s && sharded) s = gmm__gtp_all_gather(g, list, count, stream);
    for (k = 0; k < count && !s; k++) s = gmm__gtp_gather_end(g, &list[k], stream);
    return s ? s : gmm__watch_end(g, d, GMM__GTP_GATHER, watch, &d->gather, "all_gather", list->bundle->name);
}

/* Begins to gather a bundle ahead of its acquire: counts it, and marks a slot that holds it already. Returns 1 if it
   must be gathered: it is not resident, its slot is not in use, and the caller's hook has not failed (g->failed). */
static int gmm__gtp_begin_prefetch(gmm_gtp *g, int32_t bundle, gmm_gtp_pass pass) {
    gmm__gtp_bundle *b = &g->bundles[bundle];
    gmm__gtp_slot *slot;
    if (b->slot[pass] < 0 || g->domains[b->domain].size == 1) return 0;
    slot = &g->slots[b->slot[pass]];
    if (slot->acquired && slot->bundle != bundle) {
        g->stats.busy++;
        return 0;
    }
    if (pass == GMM_GTP_FORWARD && gmm__gtp_request_publish(g, b) != GMM_OK) return 0;
    if (gmm__gtp_slot_valid(g, slot, bundle)) {
        if (!slot->pending) slot->pending = 2;
        return 0;
    }
    if (slot->acquired || (slot->pending && slot->bundle >= 0 && slot->bundle != bundle &&
                           gmm__gtp_slot_valid(g, slot, slot->bundle))) {
        g->stats.busy++;
        return 0;
    }
    g->stats.outdated += gmm__gtp_is_outdated(g, slot);
    g->stats.prefetches++;
    return 1;
}
/* Gathers a bundle, and in the same group call those that follow it in its chain up to the next multiple of `together`,
   unless they are resident or their slots are in use. */
static gmm_status gmm__gtp_gather_together(gmm_gtp *g, int32_t bundle, gmm_gtp_pass pass, gmm_stream stream) {
    const gmm__gtp_bundle *b = &g->bundles[bundle];
    const gmm__gtp_chain *c = b->chain[pass] < 0 ? NULL : &g->chains[b->chain[pass]];
    int32_t list[GMM__GTP_MAX_TOGETHER], count = 1, i;
    gmm_status s;
    list[0] = bundle;
    for (i = b->position[pass] + 1; c && i < c->count && i % c->together; i++) {
        const int32_t next = g->chain_bundles[c->first + i];
        /* gmm_gtp_seal gives each a slot of its own */
        if (gmm__gtp_begin_prefetch(g, next, pass)) list[count++] = next;
    }
    if (g->failed) return g->failed;
    s = gmm__gtp_gather(g, list, count, pass, stream);
    for (i = 1; i < count; i++) g->slots[g->bundles[list[i]].slot[pass]].pending = 1;
    return s;
}
/* Gathers a bundle ahead of its acquire, unless it is resident or its slot is in use. */
static gmm_status gmm__gtp_prefetch_bundle(gmm_gtp *g, int32_t bundle, gmm_gtp_pass pass) {
    gmm_status s;
    if (!gmm__gtp_begin_prefetch(g, bundle, pass)) return g->failed;
    s = gmm__gtp_gather_together(g, bundle, pass, NULL);
    g->slots[g->bundles[bundle].slot[pass]].pending = 1;
    return s;
}

/* Gathers the bundles that follow in the chain, as many as its `prefetch` says. */
static gmm_status gmm__gtp_prefetch_successors(gmm_gtp *g, const gmm__gtp_bundle *b, gmm_gtp_pass pass) {
    const int32_t chain = b->chain[pass], count = chain < 0 ? 0 : g->chains[chain].prefetch;
    gmm_status s = GMM_OK;
    int32_t k;
    for (k = 1; k <= count && !s; k++) {
        gmm_gtp_pass next_pass = pass;
        const gmm__gtp_bundle *x = gmm__gtp_successor(g, chain, b->position[pass], k, &next_pass);
        if (!x) break;
        s = gmm__gtp_prefetch_bundle(g, (int32_t)(x - g->bundles), next_pass);
    }
    return s;
}

