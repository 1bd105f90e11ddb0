/* ................................................................................................ Runtime: work ... */

static void gmm__gtp_give_up(gmm_gtp *g, const char *why) {
    int32_t i;
    for (i = 0; i < g->domain_count; i++) {
        gmm__gtp_domain *d = &g->domains[i];
        if (d->size == 1) continue;
        d->gather.give_up(d->gather.self, why);
        d->reduce.give_up(d->reduce.self, why);
    }
}

/* Around the calls of a communicator, so that an error names them. */
static void gmm__gtp_calls(gmm_gtp *g, const gmm__gtp_domain *d, const char *what) {
    g->calls = what;
    g->caller[0] = d->rank;
    g->caller[1] = d->size;
}

/* Ends the object's life: the text says what failed, for whom, and what the communicator knows. */
static gmm_status gmm__gtp_break(gmm_gtp *g, const char *fn, const char *name, gmm_status status) {
    char why[320] = "", text[460], calls[64] = "";
    int32_t i;
    for (i = 0; i < g->domain_count && !why[0]; i++) {
        gmm_comm *c[2];
        int k;
        c[0] = &g->domains[i].gather;
        c[1] = &g->domains[i].reduce;
        for (k = 0; k < 2 && !why[0] && g->domains[i].size > 1; k++) {
            gmm_error e = GMM_ZERO;
            if (c[k]->poll && c[k]->poll(c[k]->self, &e) != GMM_OK)
                (void)snprintf(why, sizeof why, "%.300s", e.text);
        }
    }
    if (!why[0]) (void)snprintf(why, sizeof why, "%.280s", gmm_last_error(g->config.ctx));
    g->broken = status;
    if (g->calls)
        (void)snprintf(calls, sizeof calls, "%s by rank %d of %d: ", g->calls, g->caller[0], g->caller[1]);
    (void)snprintf(text, sizeof text, "%s: '%.60s': %s%s%s%s", fn, name, calls, gmm_status_string(status),
                   why[0] ? ": " : "", why);
    (void)gmm__fail(&g->error, status, "%s", text);
    gmm__gtp_give_up(g, text);
    return status;
}

static gmm_status gmm__mark_create(gmm_gtp *g, gmm__mark *m) {
    gmm_status s = g->rt.event_create(g->rt.self, &m->inside);
    return s ? s : g->rt.event_create(g->rt.self, &m->outside);
}
static gmm_status gmm__mark_destroy(gmm_gtp *g, gmm__mark *m) {
    const gmm_status a = g->rt.event_destroy(g->rt.self, m->inside), b = g->rt.event_destroy(g->rt.self, m->outside);
    memset(m, 0, sizeof *m);
    return a ? a : b;
}
static gmm_status gmm__mark_record(gmm_gtp *g, gmm__mark *m, gmm_stream stream) {
    gmm_status s = GMM_OK;
    m->set = 1;
    m->waited = 0;
    m->recorder = stream;
    m->graph = g->graph;
    if (g->graph) s = g->rt.event_record(g->rt.self, m->inside, stream, 0);
    return s ? s : g->rt.event_record(g->rt.self, m->outside, stream, g->graph ? (uint32_t)GMM_EVENT_EXTERNAL : 0u);
}
static gmm_status gmm__mark_wait(gmm_gtp *g, gmm__mark *m, gmm_stream stream) {
    if (!m->set) return GMM_OK;
    if (m->graph == g->graph) { /* a stream need not wait for itself, nor twice */
        if (m->recorder == stream || (m->waited && m->waiter == stream)) return GMM_OK;
        m->waited = 1;
        m->waiter = stream;
        if (g->graph) return g->rt.stream_wait(g->rt.self, stream, m->inside, 0);
    }
    return g->rt.stream_wait(g->rt.self, stream, m->outside, g->graph ? (uint32_t)GMM_EVENT_EXTERNAL : 0u);
}

enum { GMM__GTP_GATHER, GMM__GTP_REDUCE };
static gmm_stream gmm__gtp_stream(const gmm__gtp_domain *d, int which) {
    return which == GMM__GTP_GATHER ? d->desc.gather_stream : d->desc.reduce_stream;
}
/* The domain's stream gets work: in a capture it joins that first. */
static gmm_status gmm__gtp_use_stream(gmm_gtp *g, gmm__gtp_domain *d, int which) {
    d->used[which] = 1;
    if (!g->graph || d->joined[which] == g->graph) return GMM_OK;
    d->joined[which] = g->graph;
    return g->rt.stream_wait(g->rt.self, gmm__gtp_stream(d, which), g->graph_begin, 0);
}

/* The next place of a ring, whose collective begins here on its stream: NULL in a capture, whose replay is looked after
   as a whole, or where there is none. */
static gmm_status gmm__watch_begin(gmm_gtp *g, gmm__gtp_domain *d, int which, gmm__watch **out) {
    gmm__watch *ring = d->watch[which], *w;
    const uint32_t at = d->next[which] % GMM__WATCHES;
    gmm_status s = GMM_OK;
    int32_t done = 1;
    *out = NULL;
    if (g->graph) return GMM_OK;
    while (d->oldest[which] != d->next[which] && done && !s) {
        s = g->rt.event_query(g->rt.self, ring[d->oldest[which] % GMM__WATCHES].end, &done);
        d->oldest[which] += done != 0;
    }
    if (s || d->next[which] - d->oldest[which] == GMM__WATCHES) return s;
    w = &ring[at];
    s = g->rt.event_record(g->rt.self, w->begin, gmm__gtp_stream(d, which), 0);
    if (!s) *out = w;
    return s;
}
static gmm_status gmm__watch_end(gmm_gtp *g, gmm__gtp_domain *d, int which, gmm__watch *w, const gmm_comm *comm,
                                 const char *what, const char *name) {
    if (!w) return GMM_OK;
    w->end = d->watch_end[which][d->next[which]++ % GMM__WATCHES];
    w->seen = 0;
    w->comm = comm;
    w->what = what;
    w->name = name;
    return g->rt.event_record(g->rt.self, w->end, gmm__gtp_stream(d, which), 0);
}

/* Makes every event; what has been made is destroyed by gmm_gtp_fini. */
static gmm_status gmm__gtp_events(gmm_gtp *g) {
    gmm_status s = g->rt.event_create(g->rt.self, &g->graph_begin);
    int32_t i;
    int k, n;
    for (i = 0; i < g->domain_count; i++)
        for (k = 0; k < 2; k++) {
            if (!s) s = g->rt.event_create(g->rt.self, &g->domains[i].fork[k]);
            if (!s) s = g->rt.event_create(g->rt.self, &g->domains[i].join[k]);
            for (n = 0; n < GMM__WATCHES && !s; n++) {
                s = g->rt.event_create(g->rt.self, &g->domains[i].watch[k][n].begin);
                if (!s) s = g->rt.event_create(g->rt.self, &g->domains[i].watch_end[k][n]);
            }
            if (!s) s = gmm__mark_create(g, &g->domains[i].staged[k]);
            if (!s && k) s = gmm__mark_create(g, &g->domains[i].cast);
        }
    for (i = 0; i < g->bundle_count; i++) {
        gmm__gtp_bundle *b = &g->bundles[i];
        if (!s) s = gmm__mark_create(g, &b->published);
        if (!s) s = gmm__mark_create(g, &b->done);
        if (!s) s = gmm__mark_create(g, &b->in_place);
    }
    for (i = 0; i < g->slot_count; i++) {
        if (!s) s = gmm__mark_create(g, &g->slots[i].ready);
        if (!s) s = gmm__mark_create(g, &g->slots[i].last_use);
    }
    for (i = 0; i < g->wslot_count && !s; i++) s = gmm__mark_create(g, &g->wslots[i].last_use);
    for (i = 0; i < g->config.graphs; i++) {
        if (!s) s = g->rt.event_create(g->rt.self, &g->graph_watch[i].begin);
        if (!s) s = g->rt.event_create(g->rt.self, &g->graph_end[i]);
    }
    return s;
}

GMMDEF gmm_status gmm_gtp_fini(gmm_gtp *gtp) {
    gmm_status s = GMM_OK;
    int32_t i;
    int k, n;
    if (!gtp || gtp->ended) return GMM_OK;
    gtp->ended = 1;
    gtp->live = 0;
#define GMM__DESTROY(event) do { \
        const gmm_status t = gtp->rt.event_destroy(gtp->rt.self, event); if (!s) s = t; } while (0)
#define GMM__UNMARK(mark) do { const gmm_status t = gmm__mark_destroy(gtp, &(mark)); if (!s) s = t; } while (0)
    GMM__DESTROY(gtp->graph_begin);
    for (i = 0; i < gtp->domain_count; i++) {
        gmm__gtp_domain *d = &gtp->domains[i];
        for (k = 0; k < 2; k++) {
            const gmm_comm *c = k ? &d->reduce : &d->gather;
            GMM__DESTROY(d->fork[k]);
            GMM__DESTROY(d->join[k]);
            GMM__UNMARK(d->staged[k]);
            if (k) GMM__UNMARK(d->cast);
            for (n = 0; n < GMM__WATCHES; n++) {
                GMM__DESTROY(d->watch[k][n].begin);
                GMM__DESTROY(d->watch_end[k][n]);
            }
            if (d->window[k] && !gtp->broken) {
                const gmm_status t = c->window_remove(c->self, d->window[k]);
                if (!s) s = t;
            }
        }
    }
    for (i = 0; i < gtp->bundle_count; i++) {
        GMM__UNMARK(gtp->bundles[i].published);
        GMM__UNMARK(gtp->bundles[i].done);
        GMM__UNMARK(gtp->bundles[i].in_place);
    }
    for (i = 0; i < gtp->slot_count; i++) {
        GMM__UNMARK(gtp->slots[i].ready);
        GMM__UNMARK(gtp->slots[i].last_use);
    }
    for (i = 0; i < gtp->wslot_count; i++) GMM__UNMARK(gtp->wslots[i].last_use);
    for (i = 0; i < gtp->config.graphs; i++) {
        GMM__DESTROY(gtp->graph_watch[i].begin);
        GMM__DESTROY(gtp->graph_end[i]);
    }
#undef GMM__DESTROY
#undef GMM__UNMARK
    return s;
}

/* Addresses that are known once the memory is. */
static void gmm__gtp_addresses(gmm_gtp *g) {
    int32_t i, k;
    int pass;
    for (i = 0; i < g->slot_count; i++) g->slots[i].base = g->domains[g->slots[i].domain].gather_base + g->slots[i].at;
    for (i = 0; i < g->wslot_count; i++)
        g->wslots[i].base = g->domains[g->wslots[i].domain].reduce_base + g->wslots[i].at;
    for (i = 0; i < g->bundle_count; i++) {
        const gmm__gtp_bundle *b = &g->bundles[i];
        for (k = 0; k < b->count; k++) {
            const gmm__gtp_weight *w = gmm__gtp_member(g, b, k);
            for (pass = 0; pass < GMM_GTP_PASSES; pass++) {
                const int d = gmm__gtp_class_direction(gmm__gtp_class(g, b, pass));
                const gmm__gtp_slot *s = b->slot[pass] >= 0 ? &g->slots[b->slot[pass]] : NULL;
                g->table[pass][b->first + k] = s ? s->base + w->route[d][GMM__GTP_DATA].at : w->desc.data[d];
                g->scales[pass][b->first + k] = s && w->route[d][GMM__GTP_SCALE].whole
                                                    ? (void *)(s->base + w->route[d][GMM__GTP_SCALE].at)
                                                    : w->desc.scale[d];
            }
            g->grads[b->first + k] = b->wslot >= 0 ? g->wslots[b->wslot].base + w->grad_at : NULL;
        }
    }
}

GMMDEF gmm_status gmm_gtp_bind(gmm_gtp *gtp, int32_t domain, void *gather, size_t gather_bytes, void *reduce,
                               size_t reduce_bytes) {
    static const char fn[] = "gmm_gtp_bind";
    gmm__gtp_domain *d;
    gmm_status s = GMM_OK;
    int32_t i;
    if (!gtp) return GMM_E_NULL;
    if (gtp->broken) return gtp->broken;
    if (!gtp->sealed || gtp->live || gtp->ended)
        return gmm__fail(&gtp->error, GMM_E_STATE, "%s: %s", fn, gtp->live ? "all memory is bound" : gtp->ended
                         ? "gmm_gtp_fini was called" : "seal it first");
    if (domain < 0 || domain >= gtp->domain_count || gtp->domains[domain].bound)
        return gmm__fail(&gtp->error, GMM_E_ARG, "%s: domain %d: must be one of %d that is not bound yet", fn,
                         domain, gtp->domain_count);
    d = &gtp->domains[domain];
    if (gather_bytes < d->gather_bytes || reduce_bytes < d->reduce_bytes)
        return gmm__fail(&gtp->error, GMM_E_WORKSPACE, "%s: domain %d: %llu and %llu bytes: gmm_gtp_memory_need asks "
                         "for %llu and %llu", fn, domain, (unsigned long long)gather_bytes,
                         (unsigned long long)reduce_bytes, (unsigned long long)d->gather_bytes,
                         (unsigned long long)d->reduce_bytes);
    if ((d->gather_bytes && !gather) || (d->reduce_bytes && !reduce))
        return gmm__fail(&gtp->error, GMM_E_NULL, "%s: domain %d: %s is NULL", fn, domain,
                         d->gather_bytes && !gather ? "gather" : "reduce");
    if (((uintptr_t)gather | (uintptr_t)reduce) % 256 != 0)
        return gmm__fail(&gtp->error, GMM_E_ALIGN, "%s: domain %d: %p and %p must be aligned to 256 bytes", fn,
                         domain, gather, reduce);
    d->gather_base = (char *)gather;
    d->reduce_base = (char *)reduce;
    if (d->size > 1 && d->gather.window_add && d->gather_bytes)
        s = d->gather.window_add(d->gather.self, gather, d->gather_bytes, &d->window[0]);
    if (!s && d->size > 1 && d->reduce.window_add && d->reduce_bytes)
        s = d->reduce.window_add(d->reduce.self, reduce, d->reduce_bytes, &d->window[1]);
    if (s) return gmm__gtp_break(gtp, fn, "windows", s);
    d->bound = 1;
    for (i = 0; i < gtp->domain_count; i++)
        if (!gtp->domains[i].bound) return GMM_OK;
    gmm__gtp_addresses(gtp);
    gtp->live = 1;
    s = gmm__gtp_events(gtp);
    if (s) {
        (void)gmm__gtp_break(gtp, fn, "events", s);
        (void)gmm_gtp_fini(gtp);
    }
    return s;
}

