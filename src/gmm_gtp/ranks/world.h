/* --- Worlds of ranks: create, run, destroy --- */

GMMDEF gmm_status gmm_ranks_run(gmm_ranks *ranks) {
    gmm_status s = GMM_OK;
    int32_t i;
    int q;
    if (!ranks) return GMM_E_NULL;
    (void)pthread_mutex_lock(&ranks->mutex);
    while (gmm__ranks_step(ranks)) { }
    for (i = 0; i < ranks->config.ranks; i++) {
        gmm__cpu_rank *r = &ranks->rank[i];
        if (r->given_up) s = GMM_E_COMM;
        for (q = 0; q < GMM__RANK_QUEUES && !s; q++)
            if (r->queues[q] && r->queues[q]->count > 0) {
                char text[400];
                (void)gmm__rank_describe_hang(r, text, sizeof text);
                s = gmm__rank_fail(r, GMM_E_STATE, "gmm_ranks_run: stuck: %s", text);
            }
    }
    (void)pthread_cond_broadcast(&ranks->changed);
    (void)pthread_mutex_unlock(&ranks->mutex);
    return s;
}

GMMDEF const char *gmm_ranks_error(gmm_ranks *ranks, int32_t rank) {
    gmm__cpu_rank *r;
    if (!ranks || rank < 0 || rank >= ranks->config.ranks) return "";
    r = &ranks->rank[rank];
    (void)pthread_mutex_lock(&ranks->mutex); /* threads of other ranks may set the error */
    r->reported = r->error;
    (void)pthread_mutex_unlock(&ranks->mutex);
    return r->reported.text;
}

GMMDEF int64_t gmm_ranks_races(gmm_ranks *ranks, const char **text) {
    int64_t races;
    if (!ranks) return 0;
    (void)pthread_mutex_lock(&ranks->mutex);
    races = ranks->races;
    if (text) *text = ranks->race;
    (void)pthread_mutex_unlock(&ranks->mutex);
    return races;
}

GMMDEF void gmm_ranks_destroy(gmm_ranks *ranks) {
    int32_t i;
    int q;
    if (!ranks) return;
    for (i = 0; ranks->rank && i < ranks->config.ranks; i++) {
        gmm__cpu_rank *r = &ranks->rank[i];
        r->given_up = 0;
        gmm__rank_give_up(r, "");
        if (r->capture) gmm__graph_free(r->capture); /* a capture that was not ended */
        for (q = 0; q < GMM__RANK_QUEUES; q++) {
            if (r->queues[q]) gmm__ranks_free(ranks, r->queues[q]->ops);
            gmm__ranks_free(ranks, r->queues[q]);
        }
        gmm__token_release(ranks, r->host);
        gmm__ranks_free(ranks, r->accesses);
    }
    while (ranks->groups) {
        gmm__group *g = ranks->groups;
        ranks->groups = g->next;
        for (i = 0; i < g->size; i++) gmm__ranks_free(ranks, g->members[i].parts);
        gmm__ranks_free(ranks, g->members);
        gmm__ranks_free(ranks, g);
    }
    gmm__ranks_free(ranks, ranks->rank);
    (void)pthread_cond_destroy(&ranks->changed);
    (void)pthread_mutex_destroy(&ranks->mutex);
    {
        const gmm_allocator a = ranks->config.allocator;
        if (a.release) a.release(a.user, ranks);
        else GMM_FREE(ranks);
    }
}

/* Initializes a condition whose timed waits end by the clock of gmm__gtp_time. */
static void gmm__ranks_init_condition(pthread_cond_t *condition) {
#if GMM__HAS_MONOTONIC_CLOCK
    pthread_condattr_t attributes;
    (void)pthread_condattr_init(&attributes);
    (void)pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    (void)pthread_cond_init(condition, &attributes);
    (void)pthread_condattr_destroy(&attributes);
#else
    (void)pthread_cond_init(condition, NULL);
#endif
}

GMMDEF gmm_status gmm_ranks_create(const gmm_ranks_config *config, gmm_ranks **out, gmm_error *error) {
    static const char fn[] = "gmm_ranks_create";
    gmm_ranks_config c;
    gmm_ranks *w;
    gmm_status s;
    int32_t i;
    if (!out) return gmm__fail(error, GMM_E_NULL, "%s: out is NULL", fn);
    *out = NULL;
    s = gmm__gtp_read(fn, "config", config, &c, sizeof c, error);
    if (s) return s;
    if (c.ranks < 1 || c.ranks > GMM__MAX_CPU_RANKS || c.timeout_ms < 0)
        return gmm__fail(error, GMM_E_ARG, "%s: %d ranks, timeout_ms %d: must be 1 to %d, and >= 0", fn, c.ranks,
                         c.timeout_ms, (int)GMM__MAX_CPU_RANKS);
    if (!c.allocator.alloc != !c.allocator.release)
        return gmm__fail(error, GMM_E_ARG, "%s: allocator: both functions or none", fn);
    if (c.timeout_ms == 0) c.timeout_ms = 10000;
    w = (gmm_ranks *)(c.allocator.alloc ? c.allocator.alloc(c.allocator.user, sizeof *w) : GMM_MALLOC(sizeof *w));
    if (!w) return gmm__fail(error, GMM_E_MEMORY, "%s: no memory", fn);
    memset(w, 0, sizeof *w);
    w->config = c;
    w->random = c.seed;
    (void)pthread_mutex_init(&w->mutex, NULL);
    gmm__ranks_init_condition(&w->changed);
    w->rank = (gmm__cpu_rank *)gmm__ranks_alloc(w, (size_t)c.ranks * sizeof *w->rank);
    for (i = 0; w->rank && i < c.ranks; i++) {
        gmm__cpu_rank *r = &w->rank[i];
        r->world = w;
        r->index = i;
        r->queues[0] = (gmm__rank_queue *)gmm__ranks_alloc(w, sizeof *r->queues[0]);
        if (!r->queues[0]) break;
        r->queues[0]->rank = r;
        r->queues[0]->captured_stream = -1;
    }
    if (i < c.ranks) {
        gmm_ranks_destroy(w);
        return gmm__fail(error, GMM_E_MEMORY, "%s: no memory", fn);
    }
    *out = w;
    return GMM_OK;
}

#else /* GMM_WITH_CPU_RANKS */

GMMDEF gmm_status gmm_ranks_create(const gmm_ranks_config *config, gmm_ranks **out, gmm_error *error) {
    (void)config;
    if (out) *out = NULL;
    return gmm__fail(error, GMM_E_BUILD, "gmm_ranks_create: define GMM_WITH_CPU_RANKS where GMM_IMPLEMENTATION is");
}
GMMDEF void gmm_ranks_destroy(gmm_ranks *ranks) { (void)ranks; }
GMMDEF gmm_status gmm_ranks_runtime(gmm_ranks *ranks, int32_t rank, gmm_runtime *out) {
    (void)ranks, (void)rank, (void)out;
    return GMM_E_BUILD;
}
GMMDEF gmm_status gmm_ranks_comms(gmm_ranks *ranks, const int32_t *members, int32_t count, gmm_comm *out) {
    (void)ranks, (void)members, (void)count, (void)out;
    return GMM_E_BUILD;
}
GMMDEF gmm_status gmm_ranks_run(gmm_ranks *ranks) {
    (void)ranks;
    return GMM_E_BUILD;
}
GMMDEF const char *gmm_ranks_error(gmm_ranks *ranks, int32_t rank) {
    (void)ranks, (void)rank;
    return "";
}
GMMDEF int64_t gmm_ranks_races(gmm_ranks *ranks, const char **text) {
    (void)ranks, (void)text;
    return 0;
}
GMMDEF gmm_status gmm_ranks_capture_begin(gmm_ranks *ranks, int32_t rank, gmm_stream stream) {
    (void)ranks, (void)rank, (void)stream;
    return GMM_E_BUILD;
}
GMMDEF gmm_status gmm_ranks_capture_end(gmm_ranks *ranks, int32_t rank, gmm_stream stream, gmm_ranks_graph **out) {
    (void)ranks, (void)rank, (void)stream, (void)out;
    return GMM_E_BUILD;
}
GMMDEF gmm_status gmm_ranks_launch(gmm_ranks_graph *graph, gmm_stream stream) {
    (void)graph, (void)stream;
    return GMM_E_BUILD;
}
GMMDEF void gmm_ranks_graph_destroy(gmm_ranks_graph *graph) { (void)graph; }

#endif /* GMM_WITH_CPU_RANKS */

