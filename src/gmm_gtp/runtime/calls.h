/* Checks at the beginning of public calls, and the hash of calls that must be the same on all ranks. */

/* Flags of gmm__gtp_check_call: the call is also allowed in a callback; it is allowed only outside of captures. */
enum { GMM__GTP_IN_CALLBACK = 1, GMM__GTP_NO_CAPTURE = 2 };
static gmm_status gmm__gtp_check_call(gmm_gtp *g, const char *fn, int32_t allowed) {
    if (!g) return GMM_E_NULL;
    if (g->failed) return g->failed;
    if (!g->active)
        return gmm__fail(&g->error, GMM_E_STATE, "%s: %s", fn,
                         g->finished ? "gmm_gtp_fini was called" : "seal the object and bind its memory first");
    if (g->in_callback && !(allowed & GMM__GTP_IN_CALLBACK))
        return gmm__fail(&g->error, GMM_E_STATE, "%s: not from a callback", fn);
    if (g->graph && (allowed & GMM__GTP_NO_CAPTURE))
        return gmm__fail(&g->error, GMM_E_CAPTURE, "%s: not while graph %d is captured", fn, g->graph - 1);
    return GMM_OK;
}
/* Checks a call that names a bundle, and one that names a bundle and a pass. */
static gmm_status gmm__gtp_check_bundle(gmm_gtp *g, const char *fn, int32_t bundle) {
    gmm_status s = gmm__gtp_check_call(g, fn, 0);
    if (s) return s;
    if (bundle < 0 || bundle >= g->bundle_count)
        return gmm__fail(&g->error, GMM_E_ARG, "%s: bundle %d: there are %d", fn, bundle, g->bundle_count);
    if (g->graph && !g->bundles[bundle].captured)
        return gmm__fail(&g->error, GMM_E_CAPTURE, "%s: '%s' is in no captured chain, graph %d is captured", fn,
                         g->bundles[bundle].name, g->graph - 1);
    return GMM_OK;
}
static gmm_status gmm__gtp_check_pass(gmm_gtp *g, const char *fn, int32_t bundle, gmm_gtp_pass pass) {
    const gmm_status s = gmm__gtp_check_bundle(g, fn, bundle);
    if (s) return s;
    if (pass < GMM_GTP_FORWARD || pass > GMM_GTP_RECOMPUTE)
        return gmm__fail(&g->error, GMM_E_ARG, "%s: '%s': pass is %d: must be a gmm_gtp_pass", fn,
                         g->bundles[bundle].name, (int)pass);
    if (pass == GMM_GTP_RECOMPUTE && g->bundles[bundle].chain[pass] < 0)
        return gmm__fail(&g->error, GMM_E_STATE, "%s: '%s' is in no recompute chain", fn, g->bundles[bundle].name);
    return GMM_OK;
}
/* Mixes a call into gmm_gtp_statistics.calls, by which callers compare the order of calls among ranks. `call` numbers
   the function. */
static void gmm__gtp_hash(gmm_gtp *g, int call, int32_t bundle, int what) {
    const uint64_t word = ((uint64_t)(uint32_t)bundle << 16) | (uint64_t)(uint32_t)(call * 16 + what);
    g->stats.calls = (g->stats.calls ^ word) * 1099511628211u + 1;
}

