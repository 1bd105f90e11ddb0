/* --- Captures and their graphs --- */

static void gmm__graph_free(gmm_ranks_graph *g) {
    gmm_ranks *w = g->rank->world;
    int32_t i;
    for (i = 0; i < g->queue_count; i++) {
        size_t j;
        for (j = 0; j < g->count[i]; j++) gmm__rank_op_free(w, &g->ops[i][j]);
        gmm__ranks_free(w, g->ops[i]);
        /* its index is not reused, since the race checker has it */
        g->rank->queues[g->queues[i]]->captured_stream = GMM__RANK_QUEUES;
    }
    gmm__ranks_free(w, g);
}

/* Finds a stream of the capture that is not joined with the origin: a stream is joined up to the last of its records
   that a joined operation of another stream waits for. Returns its index among the queues; 0 = all are joined. */
static int32_t gmm__graph_find_unjoined(const gmm_ranks_graph *g) {
    size_t joined[GMM__RANK_QUEUES] = {0};
    int32_t i, k, changed = 1;
    size_t j, n;
    joined[0] = g->count[0];
    while (changed)
        for (changed = 0, i = 0; i < g->queue_count; i++)
            for (j = joined[i]; j < g->count[i]; j++) {
                const gmm__rank_op *record = &g->ops[i][j];
                if (record->kind != GMM__RANK_RECORD || record->event) continue;
                for (k = 0; k < g->queue_count; k++)
                    for (n = 0; n < joined[k]; n++) {
                        const gmm__rank_op *wait = &g->ops[k][n];
                        if (wait->kind != GMM__RANK_WAIT || wait->event || wait->record_index != record->record_index)
                            continue;
                        if (joined[i] < j + 1) changed = 1;
                        joined[i] = joined[i] < j + 1 ? j + 1 : joined[i];
                    }
            }
    for (i = 1; i < g->queue_count; i++)
        for (j = joined[i]; j < g->count[i]; j++)
            if (g->ops[i][j].kind != GMM__RANK_WAIT && (g->ops[i][j].kind != GMM__RANK_RECORD || g->ops[i][j].event))
                return i;
    return 0;
}

GMMDEF gmm_status gmm_ranks_capture_begin(gmm_ranks *ranks, int32_t rank, gmm_stream stream) {
    gmm__cpu_rank *r = ranks && rank >= 0 && rank < ranks->config.ranks ? &ranks->rank[rank] : NULL;
    gmm_status s = ranks && !r ? GMM_E_ARG : gmm__rank_begin_call(r);
    if (s) return s;
    if (r->capture || !stream)
        s = gmm__rank_fail(r, GMM_E_CAPTURE, stream ? "capture_begin: rank %d is capturing already" : "capture_begin: "
                           "stream NULL of rank %d cannot be captured", rank);
    else if (!(r->capture = (gmm_ranks_graph *)gmm__ranks_alloc(ranks, sizeof *r->capture)))
        s = gmm__rank_fail(r, GMM_E_MEMORY, "capture_begin: no memory");
    else {
        r->capture->rank = r;
        r->capture->origin = stream;
        r->capture->serial = ++r->captures;
        s = gmm__graph_join(r, r->capture, gmm__rank_stream_queue(r, stream));
        if (s) {
            gmm__ranks_free(ranks, r->capture);
            r->capture = NULL;
        }
    }
    return gmm__rank_end_call(r, s);
}

GMMDEF gmm_status gmm_ranks_capture_end(gmm_ranks *ranks, int32_t rank, gmm_stream stream, gmm_ranks_graph **out) {
    gmm__cpu_rank *r = ranks && rank >= 0 && rank < ranks->config.ranks ? &ranks->rank[rank] : NULL;
    gmm_ranks_graph *g;
    gmm_status s = ranks && !r ? GMM_E_ARG : gmm__rank_check_call(r, "capture_end", "out", out, 0);
    int32_t i;
    if (s) return s;
    *out = NULL;
    g = r->capture;
    if (!g || g->origin != stream)
        return gmm__rank_end_call(r, gmm__rank_fail(r, GMM_E_CAPTURE, "capture_end: not the stream of a capture"));
    for (i = 0; i < GMM__RANK_QUEUES; i++)
        if (r->queues[i] && r->queues[i]->graph == g) r->queues[i]->graph = NULL;
    r->capture = NULL;
    i = gmm__graph_find_unjoined(g);
    if (i) {
        s = gmm__rank_fail(r, GMM_E_CAPTURE, "capture_end: what stream %d was given has not been joined back",
                           r->queues[g->queues[i]]->captured_stream);
        gmm__graph_free(g);
    } else *out = g;
    return gmm__rank_end_call(r, s);
}

/* Copies a captured operation for one launch; 0 = no memory. External waits wait for the last record before the launch.
   */
static int gmm__graph_copy_op(gmm_ranks_graph *g, gmm__token **tokens, const gmm__rank_op *src, gmm__rank_op *op) {
    gmm_ranks *w = g->rank->world;
    *op = *src;
    op->memory = NULL;
    if (src->kind == GMM__RANK_WAIT) {
        op->token = gmm__token_retain(src->event ? src->event->last : tokens[src->record_index]);
        /* the event was never recorded */
        if (!op->token && (op->token = gmm__token_create(w)) != NULL) op->token->done = 1;
        return op->token != NULL;
    }
    if (src->kind == GMM__RANK_RECORD) {
        op->token = src->event ? gmm__token_create(w) : gmm__token_retain(tokens[src->record_index]);
        return op->token != NULL;
    }
    op->memory = gmm__ranks_alloc(w, src->bytes);
    if (op->memory) memcpy(op->memory, src->memory, src->bytes);
    return op->memory != NULL;
}

GMMDEF gmm_status gmm_ranks_launch(gmm_ranks_graph *graph, gmm_stream stream) {
    gmm__cpu_rank *r = graph ? graph->rank : NULL;
    gmm_ranks *w;
    gmm__rank_op op;
    gmm__replay *replay;
    gmm__token **tokens;
    gmm_status s = gmm__rank_begin_call(r);
    int32_t i;
    size_t j;
    int fits;
    if (s) return s;
    if (gmm__rank_stream_queue(r, stream)->graph)
        return gmm__rank_end_call(r, gmm__rank_fail(r, GMM_E_CAPTURE, "launch: the stream is capturing"));
    w = r->world;
    memset(&op, 0, sizeof op);
    op.kind = GMM__RANK_LAUNCH;
    op.name = "launch";
    op.graph = graph;
    op.memory = replay = (gmm__replay *)gmm__ranks_alloc(w, sizeof *replay);
    tokens = (gmm__token **)gmm__ranks_alloc(w, ((size_t)graph->record_count + 1) * sizeof *tokens);
    fits = replay && tokens;
    for (i = 0; fits && i < graph->record_count; i++) fits = (tokens[i] = gmm__token_create(w)) != NULL;
    for (i = 0; fits && i < graph->queue_count; i++) {
        replay->ops[i] = (gmm__rank_op *)gmm__ranks_alloc(w, (graph->count[i] + 1) * sizeof op);
        fits = replay->ops[i] != NULL;
        for (j = 0; fits && j < graph->count[i]; j++) {
            fits = gmm__graph_copy_op(graph, tokens, &graph->ops[i][j], &replay->ops[i][j]);
            replay->count[i] = j + 1;
        }
    }
    /* from here on nothing fails, and events take the records of this launch */
    for (i = 0; fits && i < graph->queue_count; i++)
        for (j = 0; j < graph->count[i]; j++) {
            gmm__rank_op *to = &replay->ops[i][j];
            if (to->kind == GMM__RANK_COLLECTIVE) to->number += to->member->enqueued;
            if (to->kind != GMM__RANK_RECORD || !to->event) continue;
            gmm__token_release(w, to->event->last);
            to->event->last = gmm__token_retain(to->token);
        }
    for (i = 0; fits && i < graph->queue_count; i++)
        for (j = 0; j < graph->count[i]; j++)
            if (replay->ops[i][j].kind == GMM__RANK_COLLECTIVE) replay->ops[i][j].member->enqueued++;
    for (i = 0; tokens && i < graph->record_count; i++) gmm__token_release(w, tokens[i]);
    gmm__ranks_free(w, tokens);
    if (!fits) {
        gmm__rank_op_free(w, &op);
        s = gmm__rank_fail(r, GMM_E_MEMORY, "launch: no memory");
    } else s = gmm__rank_enqueue(r, stream, &op);
    return gmm__rank_end_call(r, s);
}

GMMDEF void gmm_ranks_graph_destroy(gmm_ranks_graph *graph) {
    if (!graph) return;
    {
        gmm_ranks *w = graph->rank->world;
        (void)pthread_mutex_lock(&w->mutex);
        gmm__graph_free(graph);
        (void)pthread_mutex_unlock(&w->mutex);
    }
}

