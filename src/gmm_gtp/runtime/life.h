/* Binding of memory, creation of events, destruction of the object. */

/* Creates all events; gmm_gtp_fini destroys those that were created. */
static gmm_status gmm__gtp_create_events(gmm_gtp *g) {
    gmm_status s = g->runtime.event_create(g->runtime.self, &g->graph_begin);
    int32_t i;
    int k, n;
    for (i = 0; i < g->domain_count; i++)
        for (k = 0; k < 2; k++) {
            if (!s) s = g->runtime.event_create(g->runtime.self, &g->domains[i].fork[k]);
            if (!s) s = g->runtime.event_create(g->runtime.self, &g->domains[i].join[k]);
            for (n = 0; n < GMM__MAX_WATCHES && !s; n++) {
                s = g->runtime.event_create(g->runtime.self, &g->domains[i].watch[k][n].begin);
                if (!s) s = g->runtime.event_create(g->runtime.self, &g->domains[i].watch_end[k][n]);
            }
            if (!s) s = gmm__gtp_event_create(g, &g->domains[i].staged[k]);
            if (!s && k) s = gmm__gtp_event_create(g, &g->domains[i].cast);
        }
    for (i = 0; i < g->bundle_count; i++) {
        gmm__gtp_bundle *b = &g->bundles[i];
        if (!s) s = gmm__gtp_event_create(g, &b->published);
        if (!s) s = gmm__gtp_event_create(g, &b->done);
        if (!s) s = gmm__gtp_event_create(g, &b->in_place);
    }
    for (i = 0; i < g->slot_count; i++) {
        if (!s) s = gmm__gtp_event_create(g, &g->slots[i].ready);
        if (!s) s = gmm__gtp_event_create(g, &g->slots[i].last_use);
    }
    for (i = 0; i < g->wgrad_slot_count && !s; i++) s = gmm__gtp_event_create(g, &g->wgrad_slots[i].last_use);
    for (i = 0; i < g->config.graphs; i++) {
        if (!s) s = g->runtime.event_create(g->runtime.self, &g->graph_watch[i].begin);
        if (!s) s = g->runtime.event_create(g->runtime.self, &g->graph_end[i]);
    }
    return s;
}

GMMDEF gmm_status gmm_gtp_fini(gmm_gtp *gtp) {
    gmm_status s = GMM_OK;
    int32_t i;
    int k, n;
    if (!gtp || gtp->finished) return GMM_OK;
    gtp->finished = 1;
    gtp->active = 0;
#define GMM__DESTROY(event) do { \
        const gmm_status t = gtp->runtime.event_destroy(gtp->runtime.self, event); if (!s) s = t; } while (0)
#define GMM__DESTROY_PAIR(pair) do { \
        const gmm_status t = gmm__gtp_event_destroy(gtp, &(pair)); if (!s) s = t; } while (0)
    GMM__DESTROY(gtp->graph_begin);
    for (i = 0; i < gtp->domain_count; i++) {
        gmm__gtp_domain *d = &gtp->domains[i];
        for (k = 0; k < 2; k++) {
            const gmm_comm *c = k ? &d->reduce : &d->gather;
            GMM__DESTROY(d->fork[k]);
            GMM__DESTROY(d->join[k]);
            GMM__DESTROY_PAIR(d->staged[k]);
            if (k) GMM__DESTROY_PAIR(d->cast);
            for (n = 0; n < GMM__MAX_WATCHES; n++) {
                GMM__DESTROY(d->watch[k][n].begin);
                GMM__DESTROY(d->watch_end[k][n]);
            }
            if (d->window[k] && !gtp->failed) {
                const gmm_status t = c->window_remove(c->self, d->window[k]);
                if (!s) s = t;
            }
        }
    }
    for (i = 0; i < gtp->bundle_count; i++) {
        GMM__DESTROY_PAIR(gtp->bundles[i].published);
        GMM__DESTROY_PAIR(gtp->bundles[i].done);
        GMM__DESTROY_PAIR(gtp->bundles[i].in_place);
    }
    for (i = 0; i < gtp->slot_count; i++) {
        GMM__DESTROY_PAIR(gtp->slots[i].ready);
        GMM__DESTROY_PAIR(gtp->slots[i].last_use);
    }
    for (i = 0; i < gtp->wgrad_slot_count; i++) GMM__DESTROY_PAIR(gtp->wgrad_slots[i].last_use);
    for (i = 0; i < gtp->config.graphs; i++) {
        GMM__DESTROY(gtp->graph_watch[i].begin);
        GMM__DESTROY(gtp->graph_end[i]);
    }
#undef GMM__DESTROY
#undef GMM__DESTROY_PAIR
    return s;
}

/* Sets the addresses of slots and tables once all memory is bound. */
static void gmm__gtp_set_addresses(gmm_gtp *g) {
    int32_t i, k;
    int pass;
    for (i = 0; i < g->slot_count; i++)
        g->slots[i].base = g->domains[g->slots[i].domain].gather_base + g->slots[i].offset;
    for (i = 0; i < g->wgrad_slot_count; i++)
        g->wgrad_slots[i].base = g->domains[g->wgrad_slots[i].domain].reduce_base + g->wgrad_slots[i].offset;
    for (i = 0; i < g->bundle_count; i++) {
        const gmm__gtp_bundle *b = &g->bundles[i];
        for (k = 0; k < b->count; k++) {
            const gmm__gtp_weight *w = gmm__gtp_member(g, b, k);
            for (pass = 0; pass < GMM_GTP_PASSES; pass++) {
                const int d = gmm__slot_direction(gmm__slot_kind(g, b, pass));
                const gmm__gtp_slot *s = b->slot[pass] >= 0 ? &g->slots[b->slot[pass]] : NULL;
                g->table[pass][b->first + k] = s ? s->base + w->layout[d][GMM__GTP_DATA].offset : w->desc.data[d];
                g->scales[pass][b->first + k] = s && w->layout[d][GMM__GTP_SCALE].gathered_bytes
                                                    ? (void *)(s->base + w->layout[d][GMM__GTP_SCALE].offset)
                                                    : w->desc.scale[d];
            }
            g->grads[b->first + k] = b->wgrad_slot >= 0 ? g->wgrad_slots[b->wgrad_slot].base + w->grad_offset : NULL;
        }
    }
}

/* Refuses blocks of a domain that share bytes with each other, or with those of a domain that is bound. */
static gmm_status gmm__gtp_check_disjoint(gmm_gtp *g, const char *fn, int32_t domain, const void *gather,
                                          const void *reduce) {
    static const char *const names[2] = {"gather", "reduce"};
    const gmm__gtp_domain *d = &g->domains[domain];
    const uintptr_t own[2] = {(uintptr_t)gather, (uintptr_t)reduce};
    const size_t own_bytes[2] = {d->gather_bytes, d->reduce_bytes};
    int32_t i;
    int k, n;
    for (i = 0; i < g->domain_count; i++) {
        const gmm__gtp_domain *x = &g->domains[i];
        const uintptr_t base[2] = {i == domain ? own[0] : (uintptr_t)x->gather_base,
                                   i == domain ? own[1] : (uintptr_t)x->reduce_base};
        const size_t bytes[2] = {x->gather_bytes, x->reduce_bytes};
        for (k = 0; k < 2 && (i == domain || x->bound); k++)
            for (n = 0; n < 2; n++)
                if ((i != domain || k < n) && own[k] < base[n] + bytes[n] && base[n] < own[k] + own_bytes[k])
                    return gmm__fail(&g->error, GMM_E_ARG, "%s: domain %d: %s at %p, %llu bytes, overlaps %s of domain "
                                     "%d at %p", fn, domain, names[k], (void *)own[k],
                                     (unsigned long long)own_bytes[k], names[n], i, (void *)base[n]);
    }
    return GMM_OK;
}

GMMDEF gmm_status gmm_gtp_bind(gmm_gtp *gtp, int32_t domain, void *gather, size_t gather_bytes, void *reduce,
                               size_t reduce_bytes) {
    static const char fn[] = "gmm_gtp_bind";
    gmm__gtp_domain *d;
    gmm_status s = GMM_OK;
    int32_t i;
    if (!gtp) return GMM_E_NULL;
    if (gtp->failed) return gtp->failed;
    if (!gtp->sealed || gtp->active || gtp->finished)
        return gmm__fail(&gtp->error, GMM_E_STATE, "%s: %s", fn, gtp->active ? "all memory is bound" : gtp->finished
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
    if ((s = gmm__gtp_check_disjoint(gtp, fn, domain, gather, reduce)) != GMM_OK) return s;
    d->gather_base = (char *)gather;
    d->reduce_base = (char *)reduce;
    if (d->size > 1 && d->gather.window_add && d->gather_bytes)
        s = d->gather.window_add(d->gather.self, gather, d->gather_bytes, &d->window[0]);
    if (!s && d->size > 1 && d->reduce.window_add && d->reduce_bytes)
        s = d->reduce.window_add(d->reduce.self, reduce, d->reduce_bytes, &d->window[1]);
    if (s) return gmm__gtp_fail(gtp, fn, "windows", s);
    d->bound = 1;
    for (i = 0; i < gtp->domain_count; i++)
        if (!gtp->domains[i].bound) return GMM_OK;
    gmm__gtp_set_addresses(gtp);
    gtp->active = 1;
    s = gmm__gtp_create_events(gtp);
    if (s) {
        (void)gmm__gtp_fail(gtp, fn, "events", s);
        (void)gmm_gtp_fini(gtp);
    }
    return s;
}

