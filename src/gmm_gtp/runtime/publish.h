/* Publication of new shards: gathers that are enqueued later wait for them, and gathered copies are outdated. */

/* Checks an array of weight ids. */
static gmm_status gmm__gtp_check_weights(gmm_gtp *g, const char *fn, const int32_t *weights, int32_t count) {
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
static gmm_status gmm__gtp_record_publish(gmm_gtp *g, const int32_t *weights, int32_t count, gmm_stream stream) {
    gmm_status s = GMM_OK;
    int32_t i, k;
    for (i = 0; i < count && !s; i++) {
        gmm__gtp_bundle *b = &g->bundles[g->weights[weights[i]].bundle];
        for (k = 0; k < i && g->weights[weights[k]].bundle != g->weights[weights[i]].bundle; k++) { }
        if (k < i) continue; /* once per bundle */
        gmm__gtp_hash(g, 6, (int32_t)(b - g->bundles), 0);
        /* other weights of the bundle may have been published on other streams */
        if (b->published.recorded) s = gmm__gtp_event_wait(g, &b->published, stream);
        if (!s) s = gmm__gtp_event_record(g, &b->published, stream);
        b->version++;
    }
    return s;
}

GMMDEF gmm_status gmm_gtp_publish(gmm_gtp *gtp, const int32_t *weights, int32_t count, gmm_stream stream) {
    static const char fn[] = "gmm_gtp_publish";
    gmm_status s = gmm__gtp_check_call(gtp, fn, GMM__GTP_IN_CALLBACK | GMM__GTP_NO_CAPTURE);
    if (!s) s = gmm__gtp_check_weights(gtp, fn, weights, count);
    if (s) return s;
    s = gmm__gtp_record_publish(gtp, weights, count, stream);
    return s ? gmm__gtp_fail(gtp, fn, "shards", s) : GMM_OK;
}

