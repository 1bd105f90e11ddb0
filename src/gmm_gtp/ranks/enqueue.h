/* --- Enqueuing, waiting, and error messages --- */

static gmm_status gmm__rank_fail(gmm__cpu_rank *r, gmm_status status, const char *format, ...) {
    char text[480];
    va_list list;
    va_start(list, format);
    (void)vsnprintf(text, sizeof text, format, list);
    va_end(list);
    return gmm__fail(&r->error, status, "%s", text);
}

/* The queue of a stream; that of stream NULL is queue 0. */
static gmm__rank_queue *gmm__rank_stream_queue(gmm__cpu_rank *r, gmm_stream stream) {
    return stream ? (gmm__rank_queue *)(void *)stream : r->queues[0];
}

/* Begins a call for a rank. On success the world's mutex is locked, until gmm__rank_end_call. */
static gmm_status gmm__rank_begin_call(gmm__cpu_rank *r) {
    if (!r) return GMM_E_NULL;
    (void)pthread_mutex_lock(&r->world->mutex);
    if (!r->given_up) return GMM_OK;
    (void)pthread_mutex_unlock(&r->world->mutex);
    return GMM_E_COMM;
}
/* Ends a call: runs the queued operations that are ready, or with config.seed a random number of them, and unlocks the
   mutex. */
static gmm_status gmm__rank_end_call(gmm__cpu_rank *r, gmm_status status) {
    gmm_ranks *w = r->world;
    if (!w->config.seed) {
        while (gmm__ranks_step(w)) { }
    } else if (gmm__ranks_random(w) % 4 == 0) {
        int n = (int)(gmm__ranks_random(w) % 6);
        while (n-- > 0 && gmm__ranks_step(w)) { }
    }
    if (!status && r->given_up) status = GMM_E_COMM;
    (void)pthread_cond_broadcast(&w->changed);
    (void)pthread_mutex_unlock(&w->mutex);
    return status;
}

/* Begins a call that needs the pointer `needed`, and whose only flag is GMM_EVENT_EXTERNAL. */
static gmm_status gmm__rank_check_call(gmm__cpu_rank *r, const char *fn, const char *argument, const void *needed,
                                       uint32_t flags) {
    const gmm_status s = gmm__rank_begin_call(r);
    if (s) return s;
    if (!needed) return gmm__rank_end_call(r, gmm__rank_fail(r, GMM_E_NULL, "%s: %s is NULL", fn, argument));
    if (!(flags & ~(uint32_t)GMM_EVENT_EXTERNAL)) return GMM_OK;
    return gmm__rank_end_call(r, gmm__rank_fail(r, GMM_E_ARG, "%s: flags 0x%x has unknown bits", fn, flags));
}

/* Writes a message about what the rank waits for. Returns the communicator whose collective hangs; NULL = none does. */
static gmm__group *gmm__rank_describe_hang(gmm__cpu_rank *r, char *text, size_t capacity) {
    int i;
    int32_t m;
    for (i = 0; i < GMM__RANK_QUEUES; i++) {
        gmm__rank_op *op = gmm__queue_head(r->queues[i]);
        gmm__group *g = op && op->kind == GMM__RANK_COLLECTIVE ? op->member->group : NULL;
        for (m = 0; g && m < g->size; m++)
            if (!gmm__group_find_op(g, m, NULL)) {
                (void)snprintf(text, capacity, "%s '%s', collective %llu of its communicator: rank %d of %d has not "
                               "joined within %d ms", gmm__coll_names[((const gmm__coll *)op->memory)->kind], op->name,
                               (unsigned long long)op->number, m, g->size,
                               r->world->config.timeout_ms);
                return g;
            }
    }
    (void)snprintf(text, capacity, "rank %d waits for what no stream is going to do (%d ms without progress)",
                   r->index, r->world->config.timeout_ms);
    return NULL;
}

/* Runs operations, and waits for those of other threads, until the queue is empty and the token is done (either may be
   NULL). The lock is held. */
static gmm_status gmm__rank_wait(gmm__cpu_rank *r, const gmm__rank_queue *q, const gmm__token *token) {
    gmm_ranks *w = r->world;
    uint64_t seen = r->progress;
    struct timespec limit;
    int limited = 0;
    while (!r->given_up && ((q && q->count > 0) || (token && !token->done))) {
        if (gmm__ranks_step(w)) {
            (void)pthread_cond_broadcast(&w->changed);
            continue;
        }
        if (!limited || seen != r->progress) {
            limit = gmm__gtp_time();
            limit.tv_sec += w->config.timeout_ms / 1000;
            limit.tv_nsec += w->config.timeout_ms % 1000 * 1000000L;
            if (limit.tv_nsec >= 1000000000L) {
                limit.tv_sec++;
                limit.tv_nsec -= 1000000000L;
            }
            limited = 1;
            seen = r->progress;
        }
        if (pthread_cond_timedwait(&w->changed, &w->mutex, &limit) != 0 && seen == r->progress) {
            const struct timespec now = gmm__gtp_time();
            if (now.tv_sec > limit.tv_sec || (now.tv_sec == limit.tv_sec && now.tv_nsec >= limit.tv_nsec)) {
                char text[400];
                gmm__group *g = gmm__rank_describe_hang(r, text, sizeof text);
                if (g) gmm__group_give_up(g, text);
                else gmm__rank_give_up(r, text);
                (void)pthread_cond_broadcast(&w->changed);
            }
        }
    }
    return r->given_up ? GMM_E_COMM : GMM_OK;
}

/* Enqueues an operation on a stream, or adds it to the graph of the capture that the stream belongs to. On stream NULL
   it is done on return. Owns op->memory and op->token from here on, also if it fails. The lock is held. */
static gmm_status gmm__rank_enqueue(gmm__cpu_rank *r, gmm_stream stream, gmm__rank_op *op) {
    gmm_ranks *w = r->world;
    gmm__rank_queue *q = gmm__rank_stream_queue(r, stream);
    if (q->graph) {
        gmm_ranks_graph *g = q->graph;
        int32_t i;
        for (i = 0; i < g->queue_count && r->queues[g->queues[i]]->captured_stream != q->index; i++) { }
        if (!gmm__ranks_grow(w, (void **)&g->ops[i], g->count[i], &g->capacity[i], sizeof *op)) {
            gmm__rank_op_free(w, op);
            return gmm__rank_fail(r, GMM_E_MEMORY, "no memory for a captured operation");
        }
        g->ops[i][g->count[i]++] = *op;
        return GMM_OK;
    }
    if (!r->host || memcmp(r->host->clock, r->queues[0]->clock, sizeof r->host->clock) != 0) {
        gmm__token *host = gmm__token_create(w);
        if (!host) {
            gmm__rank_op_free(w, op);
            return gmm__rank_fail(r, GMM_E_MEMORY, "no memory for the order of a queued operation");
        }
        memcpy(host->clock, r->queues[0]->clock, sizeof host->clock);
        gmm__token_release(w, r->host);
        r->host = host;
    }
    op->host = gmm__token_retain(r->host);
    if (q->count == q->capacity) { /* a ring, copied in order as it grows */
        const size_t capacity = q->capacity ? 2 * q->capacity : 32;
        gmm__rank_op *ops = (gmm__rank_op *)gmm__ranks_alloc(w, capacity * sizeof *ops);
        size_t i;
        if (!ops) {
            gmm__rank_op_free(w, op);
            return gmm__rank_fail(r, GMM_E_MEMORY, "no memory for a queued operation");
        }
        for (i = 0; i < q->count; i++) ops[i] = q->ops[(q->head + i) % q->capacity];
        gmm__ranks_free(w, q->ops);
        q->ops = ops;
        q->capacity = capacity;
        q->head = 0;
    }
    q->ops[(q->head + q->count++) % q->capacity] = *op;
    return q->index == 0 ? gmm__rank_wait(r, q, NULL) : GMM_OK;
}

