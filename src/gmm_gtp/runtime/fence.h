/* Waits of streams for gathers, reductions and replays. */

/* Makes `stream` wait for the work of a domain's stream; in a capture, for its captured work. */
static gmm_status gmm__gtp_join_stream(gmm_gtp *g, gmm__gtp_domain *d, int role, gmm_stream stream) {
    gmm_status s;
    if (g->graph ? d->joined_graph[role] != g->graph : !d->used[role]) return GMM_OK;
    s = g->runtime.event_record(g->runtime.self, d->join[role], gmm__gtp_stream(d, role), 0);
    return s ? s : g->runtime.stream_wait(g->runtime.self, stream, d->join[role], 0);
}

/* Makes `stream` wait for all reads of shards, so that it may write them. */
static gmm_status gmm__gtp_fence_gathers(gmm_gtp *g, gmm_stream stream) {
    gmm_status s = gmm__gtp_fence_replays(g, stream);
    int32_t i;
    for (i = 0; i < g->domain_count && !s; i++) s = gmm__gtp_join_stream(g, &g->domains[i], GMM__GTP_GATHER, stream);
    for (i = 0; i < g->bundle_count && !s; i++) {
        gmm__gtp_bundle *b = &g->bundles[i];
        b->publish_requested = 0; /* the shards may change behind the fence */
        if (!g->graph || b->in_place.graph == g->graph)
            s = gmm__gtp_event_wait(g, &b->in_place, stream); /* reads of the shards themselves */
    }
    return s;
}

GMMDEF gmm_status gmm_gtp_fence(gmm_gtp *gtp, uint32_t what, gmm_stream stream) {
    static const char fn[] = "gmm_gtp_fence";
    int32_t i;
    gmm_status s = gmm__gtp_check_call(gtp, fn, 0);
    if (s) return s;
    if (what == 0 || (what & ~(uint32_t)GMM_GTP_ALL))
        return gmm__fail(&gtp->error, GMM_E_ARG, "%s: what is 0x%x: must be an OR of GMM_GTP_GATHERS and GRADIENTS", fn,
                         what);
    for (i = 0; i < gtp->domain_count && !s && (what & (uint32_t)GMM_GTP_GRADIENTS); i++)
        s = gmm__gtp_join_stream(gtp, &gtp->domains[i], GMM__GTP_REDUCE, stream);
    if (!s) s = what & (uint32_t)GMM_GTP_GATHERS ? gmm__gtp_fence_gathers(gtp, stream)
                                                 : gmm__gtp_fence_replays(gtp, stream);
    return s ? gmm__gtp_fail(gtp, fn, "all domains", s) : GMM_OK;
}

