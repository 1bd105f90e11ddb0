/* Monitoring of collectives and replays for timeouts. */

/* Records the begin of a collective in the ring of its stream. *out is NULL if the ring is full, and in a capture,
   since gmm_gtp_poll monitors a replay as a whole. gmm__watch_end records the end and adds the entry to the ring. */
static gmm_status gmm__watch_begin(gmm_gtp *g, gmm__gtp_domain *d, int role, gmm__watch **out) {
    gmm__watch *ring = d->watch[role], *w;
    const uint32_t index = d->next[role] % GMM__MAX_WATCHES;
    gmm_status s = GMM_OK;
    int32_t done = 1;
    *out = NULL;
    if (g->graph) return GMM_OK;
    while (d->oldest[role] != d->next[role] && done && !s) {
        s = g->runtime.event_query(g->runtime.self, ring[d->oldest[role] % GMM__MAX_WATCHES].end, &done);
        d->oldest[role] += done != 0;
    }
    if (s || d->next[role] - d->oldest[role] == GMM__MAX_WATCHES) return s;
    w = &ring[index];
    s = g->runtime.event_record(g->runtime.self, w->begin, gmm__gtp_stream(d, role), 0);
    if (!s) *out = w;
    return s;
}
static gmm_status gmm__watch_end(gmm_gtp *g, gmm__gtp_domain *d, int role, gmm__watch *w, const gmm_comm *comm,
                                 const char *what, const char *name) {
    if (!w) return GMM_OK;
    w->end = d->watch_end[role][d->next[role]++ % GMM__MAX_WATCHES];
    w->begun = 0;
    w->comm = comm;
    w->what = what;
    w->name = name;
    return g->runtime.event_record(g->runtime.self, w->end, gmm__gtp_stream(d, role), 0);
}

/* Checks one collective or replay: clears `end` once it is done; GMM_E_COMM once it has run longer than the timeout. */
static gmm_status gmm__watch_check(gmm_gtp *g, gmm__watch *w, double now) {
    int32_t done = 0;
    gmm_status s;
    if (!w->end) return GMM_OK;
    s = g->runtime.event_query(g->runtime.self, w->end, &done);
    if (s || done) {
        w->end = NULL;
        return s;
    }
    if (!w->begun) {
        s = g->runtime.event_query(g->runtime.self, w->begin, &done);
        w->begun = done;
        w->begin_time = now;
        return s;
    }
    return now - w->begin_time > 1e-3 * (double)g->config.timeout_ms ? GMM_E_COMM : GMM_OK;
}

GMMDEF gmm_status gmm_gtp_poll(gmm_gtp *gtp) {
    static const char fn[] = "gmm_gtp_poll";
    const double now = gmm__gtp_now();
    gmm_status s = gmm__gtp_check_call(gtp, fn, GMM__GTP_NO_CAPTURE);
    gmm__watch *w = NULL;
    const char *name = "";
    char graph[24];
    int32_t i;
    if (s) return s;
    for (i = 0; i < gtp->domain_count; i++) {
        const gmm__gtp_domain *d = &gtp->domains[i];
        if (d->size > 1 && ((s = d->gather.poll(d->gather.self, NULL)) != GMM_OK ||
                            (s = d->reduce.poll(d->reduce.self, NULL)) != GMM_OK))
            return gmm__gtp_fail(gtp, fn, "communicator", s);
    }
    for (i = 0; i < 2 * gtp->domain_count && !s; i++) {
        gmm__gtp_domain *d = &gtp->domains[i / 2];
        const int role = i % 2;
        while (d->oldest[role] != d->next[role] && !s) {
            w = &d->watch[role][d->oldest[role] % GMM__MAX_WATCHES];
            s = gmm__watch_check(gtp, w, now);
            name = w->name;
            if (w->end) break;
            d->oldest[role]++;
        }
    }
    for (i = 0; i < gtp->graph_count && !s; i++) {
        s = gmm__watch_check(gtp, w = &gtp->graph_watch[i], now);
        (void)snprintf(graph, sizeof graph, "graph %d", i);
        name = graph;
    }
    if (s == GMM_E_COMM && w->end) { /* timeout: the message names the peer if the communicator knows it */
        gmm_error who = GMM_ZERO;
        char text[400];
        if (w->comm) (void)w->comm->poll(w->comm->self, &who);
        (void)snprintf(text, sizeof text, "%s of '%.60s' is not done after %d ms: %.200s", w->what, name,
                       gtp->config.timeout_ms, who.text[0] ? who.text : "a peer is missing");
        gmm__gtp_give_up(gtp, text);
        return gmm__gtp_fail(gtp, fn, name, s);
    }
    return s ? gmm__gtp_fail(gtp, fn, name, s) : GMM_OK;
}

