/* Errors, and events of the runtime on streams inside and outside of captures. */

/* ...................................................................................... Runtime: errors, events ... */

/* Tells the communicators of all domains, and the further one of a call that has failed, that this rank will call no
   further collective. */
static void gmm__gtp_give_up(gmm_gtp *g, const char *why) {
    int32_t i;
    for (i = 0; i < g->domain_count; i++) {
        gmm__gtp_domain *d = &g->domains[i];
        if (d->size == 1) continue;
        d->gather.give_up(d->gather.self, why);
        d->reduce.give_up(d->reduce.self, why);
    }
    if (g->further && g->further->give_up) g->further->give_up(g->further->self, why);
}

/* Records the collective that is being called, so that an error message names it. */
static void gmm__gtp_set_collective(gmm_gtp *g, const gmm__gtp_domain *d, const char *what) {
    g->collective = what;
    g->caller[0] = d->rank;
    g->caller[1] = d->size;
}

/* Ends the use of the object after a failure: the message names the call, the bundle, and what the communicator
   reports. */
static gmm_status gmm__gtp_fail(gmm_gtp *g, const char *fn, const char *name, gmm_status status) {
    char why[320] = "", text[460], calls[64] = "";
    int32_t i;
    if (g->failed) return g->failed; /* by a hook: its failure is the first */
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
    if (!why[0] && g->further && g->further->poll) {
        gmm_error e = GMM_ZERO;
        if (g->further->poll(g->further->self, &e) != GMM_OK) (void)snprintf(why, sizeof why, "%.300s", e.text);
    }
    if (!why[0]) (void)snprintf(why, sizeof why, "%.280s", gmm_last_error(g->config.ctx));
    g->failed = status;
    if (g->collective)
        (void)snprintf(calls, sizeof calls, "%s by rank %d of %d: ", g->collective, g->caller[0], g->caller[1]);
    (void)snprintf(text, sizeof text, "%s: '%.60s': %s%s%s%s", fn, name, calls, gmm_status_string(status),
                   why[0] ? ": " : "", why);
    (void)gmm__fail(&g->error, status, "%s", text);
    gmm__gtp_give_up(g, text);
    return status;
}

static gmm_status gmm__gtp_event_create(gmm_gtp *g, gmm__gtp_event *m) {
    gmm_status s = g->runtime.event_create(g->runtime.self, &m->captured_event);
    return s ? s : g->runtime.event_create(g->runtime.self, &m->external_event);
}
static gmm_status gmm__gtp_event_destroy(gmm_gtp *g, gmm__gtp_event *m) {
    const gmm_status captured = g->runtime.event_destroy(g->runtime.self, m->captured_event);
    const gmm_status external = g->runtime.event_destroy(g->runtime.self, m->external_event);
    memset(m, 0, sizeof *m);
    return captured ? captured : external;
}
static gmm_status gmm__gtp_event_record(gmm_gtp *g, gmm__gtp_event *m, gmm_stream stream) {
    gmm_status s = GMM_OK;
    m->recorded = 1;
    m->waited = 0;
    m->recorder = stream;
    m->graph = g->graph;
    if (g->graph) s = g->runtime.event_record(g->runtime.self, m->captured_event, stream, 0);
    return s ? s : g->runtime.event_record(g->runtime.self, m->external_event, stream,
                                           g->graph ? (uint32_t)GMM_EVENT_EXTERNAL : 0u);
}
static gmm_status gmm__gtp_event_wait(gmm_gtp *g, gmm__gtp_event *m, gmm_stream stream) {
    if (!m->recorded) return GMM_OK;
    if (m->graph == g->graph) { /* a stream need not wait for its own record, nor wait twice */
        if (m->recorder == stream || (m->waited && m->waiter == stream)) return GMM_OK;
        m->waited = 1;
        m->waiter = stream;
        if (g->graph) return g->runtime.stream_wait(g->runtime.self, stream, m->captured_event, 0);
    }
    return g->runtime.stream_wait(g->runtime.self, stream, m->external_event,
                                  g->graph ? (uint32_t)GMM_EVENT_EXTERNAL : 0u);
}

/* Makes `stream` wait for the ends of replays on other streams. */
static gmm_status gmm__gtp_fence_replays(gmm_gtp *g, gmm_stream stream) {
    gmm_status s = GMM_OK;
    int32_t i;
    for (i = 0; i < g->graph_count && !s && !g->graph; i++)
        if (g->graph_watch[i].replayed && g->graph_watch[i].stream != stream)
            s = g->runtime.stream_wait(g->runtime.self, stream, g->graph_end[i], 0);
    return s;
}

/* Prepares a stream of the domain for work: it first makes the stream join the capture, or outside of captures wait for
   the replays so far. */
static gmm_status gmm__gtp_prepare_stream(gmm_gtp *g, gmm__gtp_domain *d, int role) {
    const int32_t used = d->used[role];
    if (!g->graph) {
        d->used[role] = 1;
        return used ? GMM_OK : gmm__gtp_fence_replays(g, gmm__gtp_stream(d, role));
    }
    if (d->joined_graph[role] == g->graph) return GMM_OK;
    d->joined_graph[role] = g->graph;
    return g->runtime.stream_wait(g->runtime.self, gmm__gtp_stream(d, role), g->graph_begin, 0);
}

