/* Dry runs, captures, replays, statistics. */

/* .............................................................................................. Runtime: graphs ... */

/* Checks that the caller holds no view and no gradient buffer, of bundles in captured chains alone (`captured`) or of
   all. */
static gmm_status gmm__gtp_check_unused(gmm_gtp *g, const char *fn, int captured) {
    int32_t i;
    for (i = 0; i < g->bundle_count; i++) {
        const gmm__gtp_bundle *b = &g->bundles[i];
        const int open = b->wgrad_slot >= 0 && g->wgrad_slots[b->wgrad_slot].writer == i;
        if ((b->acquired || open) && (b->captured || !captured))
            return gmm__fail(&g->error, GMM_E_STATE, "%s: '%s' is %s", fn, b->name,
                             open ? "not submitted" : "held: release it");
    }
    return GMM_OK;
}

GMMDEF gmm_status gmm_gtp_dry_run(gmm_gtp *gtp, int32_t on) {
    static const char fn[] = "gmm_gtp_dry_run";
    int32_t i;
    gmm_status s = gmm__gtp_check_call(gtp, fn, GMM__GTP_NO_CAPTURE);
    if (s) return s;
    if (on == gtp->dry_run || on < 0 || on > 1)
        return gmm__fail(&gtp->error, GMM_E_STATE, "%s: on is %d: a dry run is %s", fn, on,
                         gtp->dry_run ? "under way" : "not under way");
    if (!on && (s = gmm__gtp_check_unused(gtp, fn, 0)) != GMM_OK) return s;
    gtp->dry_run = on;
    for (i = 0; i < gtp->bundle_count && !on; i++)
        gtp->bundles[i].publish_requested = 0; /* a dry run makes no callback */
    return GMM_OK;
}

GMMDEF gmm_status gmm_gtp_capture_begin(gmm_gtp *gtp, gmm_stream stream, int32_t *graph) {
    static const char fn[] = "gmm_gtp_capture_begin";
    int32_t capturing = 0, i;
    gmm_status s = gmm__gtp_check_call(gtp, fn, 0);
    if (s) return s;
    if (!graph) return gmm__fail(&gtp->error, GMM_E_NULL, "%s: graph is NULL", fn);
    if (gtp->graph)
        return gmm__fail(&gtp->error, GMM_E_STATE, "%s: graph %d is being captured", fn, gtp->graph - 1);
    if (gtp->dry_run) return gmm__fail(&gtp->error, GMM_E_STATE, "%s: a dry run is under way", fn);
    if (gtp->graph_count == gtp->config.graphs)
        return gmm__fail(&gtp->error, GMM_E_WORKSPACE, "%s: config->graphs is %d: no room for more", fn,
                         gtp->config.graphs);
    s = gtp->runtime.is_capturing(gtp->runtime.self, stream, &capturing);
    if (s) return gmm__gtp_fail(gtp, fn, "stream", s);
    if (!capturing) return gmm__fail(&gtp->error, GMM_E_CAPTURE, "%s: the stream is not capturing", fn);
    if ((s = gmm__gtp_check_unused(gtp, fn, 1)) != GMM_OK) return s;
    gmm__gtp_hash(gtp, 8, gtp->graph_count, 0);
    gtp->graph = ++gtp->graph_count;
    gtp->graph_stream = stream;
    for (i = 0; i < gtp->bundle_count; i++)
        if (gtp->bundles[i].captured) gtp->bundles[i].publish_requested = 0;
    s = gtp->runtime.event_record(gtp->runtime.self, gtp->graph_begin, stream, 0);
    if (s) return gmm__gtp_fail(gtp, fn, "graph", s);
    *graph = gtp->graph - 1;
    return GMM_OK;
}

GMMDEF gmm_status gmm_gtp_capture_end(gmm_gtp *gtp, gmm_stream stream) {
    static const char fn[] = "gmm_gtp_capture_end";
    int32_t i;
    int k;
    gmm_status s = gmm__gtp_check_call(gtp, fn, 0);
    if (s) return s;
    if (!gtp->graph || gtp->graph_stream != stream)
        return gmm__fail(&gtp->error, GMM_E_STATE, "%s: no capture began on this stream", fn);
    if ((s = gmm__gtp_check_unused(gtp, fn, 1)) != GMM_OK) return s;
    gmm__gtp_hash(gtp, 8, gtp->graph - 1, 1);
    for (i = 0; i < gtp->domain_count; i++)
        for (k = 0; k < 2 && !s; k++) s = gmm__gtp_join_stream(gtp, &gtp->domains[i], k, stream);
    for (i = 0; i < gtp->bundle_count; i++)
        if (gtp->bundles[i].captured) gtp->bundles[i].publish_requested = 0;
    gtp->graph = 0;
    return s ? gmm__gtp_fail(gtp, fn, "graph", s) : GMM_OK;
}

/* Makes `stream`, on which a graph is replayed, wait for the work of a domain's stream: the replay uses the same
   communicator, stage and receive buffer on a stream of its own. Roles that have a communicator in common have one
   stream. */
static gmm_status gmm__gtp_hand_over(gmm_gtp *g, int32_t domain, int role, gmm_stream stream) {
    gmm_status s = GMM_OK;
    int32_t i;
    for (i = 0; i < 2 * g->domain_count && !s; i++) {
        gmm__gtp_domain *d = &g->domains[i / 2];
        if (gmm__gtp_stream(d, i % 2) != gmm__gtp_stream(&g->domains[domain], role)) continue;
        s = gmm__gtp_join_stream(g, d, i % 2, stream);
        d->used[i % 2] = 0;
    }
    return s;
}

GMMDEF gmm_status gmm_gtp_pre_replay(gmm_gtp *gtp, int32_t graph, gmm_stream stream) {
    static const char fn[] = "gmm_gtp_pre_replay";
    int32_t i;
    gmm_status s = gmm__gtp_check_call(gtp, fn, GMM__GTP_NO_CAPTURE);
    if (s) return s;
    if (graph < 0 || graph >= gtp->graph_count)
        return gmm__fail(&gtp->error, GMM_E_ARG, "%s: graph %d: there are %d", fn, graph, gtp->graph_count);
    if ((s = gmm__gtp_check_unused(gtp, fn, 1)) != GMM_OK) return s;
    gmm__gtp_hash(gtp, 8, graph, 2);
    for (i = 0; i < gtp->slot_count; i++) /* the replay may overwrite weights that were gathered outside of graphs */
        if (gtp->slots[i].captured && gtp->slots[i].graph == 0) gtp->slots[i].bundle = -1;
    for (i = 0; i < gtp->bundle_count && !s; i++) {
        gmm__gtp_bundle *b = &gtp->bundles[i];
        const int use = *gmm__gtp_graph_usage(gtp, graph, i);
        if (use & GMM__GRAPH_NEEDS && (s = gmm__gtp_request_publish(gtp, b)) != GMM_OK) return s;
        b->publish_requested = use & GMM__GRAPH_NEEDS ? 0 : b->publish_requested;
        if (use & (GMM__GRAPH_NEEDS | GMM__GRAPH_READS)) s = gmm__gtp_event_wait(gtp, &b->published, stream);
        if (!s && use & GMM__GRAPH_READS) s = gmm__gtp_hand_over(gtp, b->domain, GMM__GTP_GATHER, stream);
        if (!s && use & GMM__GRAPH_REDUCES) s = gmm__gtp_hand_over(gtp, b->domain, GMM__GTP_REDUCE, stream);
    }
    if (!s) s = gmm__gtp_fence_replays(gtp, stream);
    gtp->graph_watch[graph].end = NULL;
    if (!s) s = gtp->runtime.event_record(gtp->runtime.self, gtp->graph_watch[graph].begin, stream, 0);
    return s ? gmm__gtp_fail(gtp, fn, "graph", s) : GMM_OK;
}

GMMDEF gmm_status gmm_gtp_post_replay(gmm_gtp *gtp, int32_t graph, gmm_stream stream) {
    static const char fn[] = "gmm_gtp_post_replay";
    int32_t i;
    gmm_status s = gmm__gtp_check_call(gtp, fn, GMM__GTP_NO_CAPTURE);
    if (s) return s;
    if (graph < 0 || graph >= gtp->graph_count)
        return gmm__fail(&gtp->error, GMM_E_ARG, "%s: graph %d: there are %d", fn, graph, gtp->graph_count);
    s = gtp->runtime.event_record(gtp->runtime.self, gtp->graph_end[graph], stream, 0);
    if (s) return gmm__gtp_fail(gtp, fn, "graph", s);
    gtp->graph_watch[graph].end = gtp->graph_end[graph];
    gtp->graph_watch[graph].begun = 0;
    gtp->graph_watch[graph].what = "replay";
    gtp->graph_watch[graph].replayed = 1;
    gtp->graph_watch[graph].stream = stream;
    for (i = 0; i < gtp->bundle_count && gtp->config.hooks.ready && !gtp->dry_run && !gtp->failed; i++) {
        const gmm__gtp_bundle *b = &gtp->bundles[i];
        if (!(*gmm__gtp_graph_usage(gtp, graph, i) & GMM__GRAPH_REDUCES)) continue;
        gtp->in_callback = 1;
        gtp->config.hooks.ready(gtp->config.hooks.user, gtp, gtp->members + b->first, b->count, stream);
        gtp->in_callback = 0;
    }
    return gtp->failed; /* by a hook */
}

GMMDEF gmm_status gmm_gtp_statistics_of(const gmm_gtp *gtp, gmm_gtp_statistics *out) {
    gmm_status s = GMM_OK;
    gmm_gtp_statistics full;
    size_t common;
    if (!gtp) return GMM_E_NULL;
    common = gmm__gtp_common_size("gmm_gtp_statistics_of", "out", out, sizeof *out, &s, NULL);
    if (s) return s;
    full = gtp->stats;
    full.struct_size = out->struct_size;
    memcpy(out, &full, common);
    return GMM_OK;
}

