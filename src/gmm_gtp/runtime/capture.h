/* One watched collective: over, or for how long. */
static gmm_status gmm__watch_look(gmm_gtp *g, gmm__watch *w, double now) {
    int32_t done = 0;
    gmm_status s;
    if (!w->end) return GMM_OK;
    s = g->rt.event_query(g->rt.self, w->end, &done);
    if (s || done) {
        w->end = NULL;
        return s;
    }
    if (!w->seen) {
        s = g->rt.event_query(g->rt.self, w->begin, &done);
        w->seen = done;
        w->since = now;
        return s;
    }
    return now - w->since > 1e-3 * (double)g->config.timeout_ms ? GMM_E_COMM : GMM_OK;
}

GMMDEF gmm_status gmm_gtp_poll(gmm_gtp *gtp) {
    static const char fn[] = "gmm_gtp_poll";
    const double now = gmm__gtp_now();
    gmm_status s = gmm__gtp_open_call(gtp, fn, GMM__GTP_NO_CAPTURE);
    gmm__watch *w = NULL;
    int32_t i;
    if (s) return s;
    for (i = 0; i < gtp->domain_count; i++) {
        const gmm__gtp_domain *d = &gtp->domains[i];
        if (d->size > 1 && ((s = d->gather.poll(d->gather.self, NULL)) != GMM_OK ||
                            (s = d->reduce.poll(d->reduce.self, NULL)) != GMM_OK))
            return gmm__gtp_break(gtp, fn, "communicator", s);
    }
    for (i = 0; i < 2 * gtp->domain_count && !s; i++) {
        gmm__gtp_domain *d = &gtp->domains[i / 2];
        const int which = i % 2;
        while (d->oldest[which] != d->next[which] && !s) {
            w = &d->watch[which][d->oldest[which] % GMM__WATCHES];
            s = gmm__watch_look(gtp, w, now);
            if (w->end) break;
            d->oldest[which]++;
        }
    }
    for (i = 0; i < gtp->graph_count && !s; i++) s = gmm__watch_look(gtp, w = &gtp->graph_watch[i], now);
    if (s == GMM_E_COMM && w->end) { /* over time: say so to all, with the peer if the communicator knows */
        gmm_error who = GMM_ZERO;
        char text[400];
        if (w->comm) (void)w->comm->poll(w->comm->self, &who);
        (void)snprintf(text, sizeof text, "%s of '%.60s' is not done after %d ms: %.200s", w->what, w->name,
                       gtp->config.timeout_ms, who.text[0] ? who.text : "a peer is missing");
        gmm__gtp_give_up(gtp, text);
        return gmm__gtp_break(gtp, fn, w->name, s);
    }
    return s ? gmm__gtp_break(gtp, fn, w ? w->name : "", s) : GMM_OK;
}

/* .............................................................................................. Runtime: graphs ... */

GMMDEF gmm_status gmm_gtp_dry_run(gmm_gtp *gtp, int32_t on) {
    static const char fn[] = "gmm_gtp_dry_run";
    const char *left = NULL, *what = "";
    int32_t i;
    gmm_status s = gmm__gtp_open_call(gtp, fn, GMM__GTP_NO_CAPTURE);
    if (s) return s;
    if (on == gtp->dry || on < 0 || on > 1)
        return gmm__fail(&gtp->error, GMM_E_STATE, "%s: on is %d: a dry run is %s", fn, on,
                         gtp->dry ? "under way" : "not under way");
    gtp->dry = on;
    for (i = 0; i < gtp->bundle_count && !on; i++) {
        gmm__gtp_bundle *b = &gtp->bundles[i];
        if (b->held) left = b->name, what = "still held";
        b->held = 0;
        b->asked = 0; /* nobody was */
    }
    for (i = 0; i < gtp->slot_count && !on; i++) gtp->slots[i].holders = 0;
    for (i = 0; i < gtp->wslot_count && !on; i++) {
        if (gtp->wslots[i].writer >= 0) left = gtp->bundles[gtp->wslots[i].writer].name, what = "not submitted";
        gtp->wslots[i].writer = -1;
    }
    return left ? gmm__fail(&gtp->error, GMM_E_STATE, "%s: '%s' was %s", fn, left, what) : GMM_OK;
}

GMMDEF gmm_status gmm_gtp_capture_begin(gmm_gtp *gtp, gmm_stream stream, int32_t *graph) {
    static const char fn[] = "gmm_gtp_capture_begin";
    int32_t capturing = 0, i;
    gmm_status s = gmm__gtp_open_call(gtp, fn, 0);
    if (s) return s;
    if (!graph) return gmm__fail(&gtp->error, GMM_E_NULL, "%s: graph is NULL", fn);
    if (gtp->graph) return gmm__fail(&gtp->error, GMM_E_STATE, "%s: graph %d is being captured", fn,
                                     gtp->graph - 1);
    if (gtp->dry) return gmm__fail(&gtp->error, GMM_E_STATE, "%s: a dry run is under way", fn);
    if (gtp->graph_count == gtp->config.graphs)
        return gmm__fail(&gtp->error, GMM_E_WORKSPACE, "%s: config->graphs is %d: no room for more", fn,
                         gtp->config.graphs);
    s = gtp->rt.is_capturing(gtp->rt.self, stream, &capturing);
    if (s) return gmm__gtp_break(gtp, fn, "stream", s);
    if (!capturing) return gmm__fail(&gtp->error, GMM_E_CAPTURE, "%s: the stream is not capturing", fn);
    for (i = 0; i < gtp->slot_count; i++)
        if (gtp->slots[i].captured && gtp->slots[i].holders && gtp->slots[i].graph == 0)
            return gmm__fail(&gtp->error, GMM_E_STATE, "%s: '%s' is held since before the capture", fn,
                             gtp->bundles[gtp->slots[i].bundle].name);
    gtp->graph = ++gtp->graph_count;
    gtp->graph_stream = stream;
    for (i = 0; i < gtp->bundle_count; i++)
        if (gtp->bundles[i].captured) gtp->bundles[i].asked = 0;
    s = gtp->rt.event_record(gtp->rt.self, gtp->graph_begin, stream, 0);
    if (s) return gmm__gtp_break(gtp, fn, "graph", s);
    *graph = gtp->graph - 1;
    return GMM_OK;
}

GMMDEF gmm_status gmm_gtp_capture_end(gmm_gtp *gtp, gmm_stream stream) {
    static const char fn[] = "gmm_gtp_capture_end";
    int32_t i;
    int k;
    gmm_status s = gmm__gtp_open_call(gtp, fn, 0);
    if (s) return s;
    if (!gtp->graph || gtp->graph_stream != stream)
        return gmm__fail(&gtp->error, GMM_E_STATE, "%s: no capture began on this stream", fn);
    for (i = 0; i < gtp->domain_count; i++)
        for (k = 0; k < 2 && !s; k++) s = gmm__gtp_join(gtp, &gtp->domains[i], k, stream);
    for (i = 0; i < gtp->bundle_count; i++)
        if (gtp->bundles[i].captured) gtp->bundles[i].asked = 0;
    gtp->graph = 0;
    return s ? gmm__gtp_break(gtp, fn, "graph", s) : GMM_OK;
}

GMMDEF gmm_status gmm_gtp_pre_replay(gmm_gtp *gtp, int32_t graph, gmm_stream stream) {
    static const char fn[] = "gmm_gtp_pre_replay";
    int32_t i;
    gmm_status s = gmm__gtp_open_call(gtp, fn, GMM__GTP_NO_CAPTURE);
    if (s) return s;
    if (graph < 0 || graph >= gtp->graph_count)
        return gmm__fail(&gtp->error, GMM_E_ARG, "%s: graph %d: there are %d", fn, graph, gtp->graph_count);
    for (i = 0; i < gtp->slot_count; i++)
        if (gtp->slots[i].captured && gtp->slots[i].graph == 0 && gtp->slots[i].holders)
            return gmm__fail(&gtp->error, GMM_E_STATE, "%s: '%s' is held, and graph %d may write its slot", fn,
                             gtp->bundles[gtp->slots[i].bundle].name, graph);
    for (i = 0; i < gtp->slot_count; i++) /* what was gathered outside of graphs will be gone */
        if (gtp->slots[i].captured && gtp->slots[i].graph == 0) gtp->slots[i].bundle = -1;
    for (i = 0; i < gtp->bundle_count && !s; i++) {
        gmm__gtp_bundle *b = &gtp->bundles[i];
        const int use = gtp->graph_use[graph * gtp->bundle_count + i];
        if (use & GMM__GRAPH_NEEDS) gmm__gtp_ask(gtp, b);
        b->asked = use & GMM__GRAPH_NEEDS ? 0 : b->asked;
        if (use & (GMM__GRAPH_NEEDS | GMM__GRAPH_READS)) s = gmm__mark_wait(gtp, &b->published, stream);
    }
    gtp->graph_watch[graph].end = NULL;
    if (!s) s = gtp->rt.event_record(gtp->rt.self, gtp->graph_watch[graph].begin, stream, 0);
    return s ? gmm__gtp_break(gtp, fn, "graph", s) : GMM_OK;
}

GMMDEF gmm_status gmm_gtp_post_replay(gmm_gtp *gtp, int32_t graph, gmm_stream stream) {
    static const char fn[] = "gmm_gtp_post_replay";
    int32_t i;
    gmm_status s = gmm__gtp_open_call(gtp, fn, GMM__GTP_NO_CAPTURE);
    if (s) return s;
    if (graph < 0 || graph >= gtp->graph_count)
        return gmm__fail(&gtp->error, GMM_E_ARG, "%s: graph %d: there are %d", fn, graph, gtp->graph_count);
    s = gtp->rt.event_record(gtp->rt.self, gtp->graph_end[graph], stream, 0);
    if (s) return gmm__gtp_break(gtp, fn, "graph", s);
    gtp->graph_watch[graph].end = gtp->graph_end[graph];
    gtp->graph_watch[graph].seen = 0;
    gtp->graph_watch[graph].what = "replay";
    gtp->graph_watch[graph].name = "graph";
    gtp->graph_watch[graph].replayed = 1;
    gtp->graph_watch[graph].stream = stream;
    for (i = 0; i < gtp->bundle_count && gtp->config.hooks.ready && !gtp->dry; i++) {
        const gmm__gtp_bundle *b = &gtp->bundles[i];
        if (!(gtp->graph_use[graph * gtp->bundle_count + i] & GMM__GRAPH_ADDS)) continue;
        gtp->calling_back = 1;
        gtp->config.hooks.ready(gtp->config.hooks.user, gtp, gtp->members + b->first, b->count, stream);
        gtp->calling_back = 0;
    }
    return GMM_OK;
}

GMMDEF gmm_status gmm_gtp_statistics_of(const gmm_gtp *gtp, gmm_gtp_statistics *out) {
    gmm_status s = GMM_OK;
    gmm_gtp_statistics full;
    size_t known;
    if (!gtp) return GMM_E_NULL;
    known = gmm__gtp_known("gmm_gtp_statistics_of", "out", out, sizeof *out, &s, NULL);
    if (s) return s;
    full = gtp->stats;
    full.struct_size = out->struct_size;
    memcpy(out, &full, known);
    return GMM_OK;
}

