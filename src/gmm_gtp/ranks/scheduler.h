/* --- The race checker, failures, and the scheduler of queued operations --- */

/* Reports a race between an access of the queue's present operation and an earlier one, and records the access. */
static void gmm__ranks_check_access(gmm__rank_queue *q, const char *name, const void *data, size_t bytes, int writes) {
    gmm__cpu_rank *r = q->rank;
    gmm_ranks *w = r->world;
    gmm__rank_access access;
    size_t i, count = 0;
    if (!w->config.check_races || bytes == 0) return;
    access.begin = (uintptr_t)data;
    access.end = access.begin + bytes;
    access.queue = q->index;
    access.writes = writes;
    access.time = q->clock[q->index];
    access.name = name;
    for (i = 0; i < r->access_count; i++) {
        const gmm__rank_access a = r->accesses[i];
        const int overlap = a.begin < access.end && access.begin < a.end;
        const int ordered = a.time <= q->clock[a.queue];
        const int covered = overlap && access.begin <= a.begin && a.end <= access.end;
        if (overlap && !ordered && (a.writes || writes) && w->races++ == 0)
            (void)snprintf(w->race, sizeof w->race, "rank %d: '%s' on stream %d %s %llu bytes at %p that '%s' on "
                           "stream %d %s, and nothing orders the two", r->index, name, q->index,
                           writes ? "writes" : "reads", (unsigned long long)bytes, (void *)access.begin,
                           a.name, (int)a.queue, a.writes ? "writes" : "reads");
        /* `a` is dropped: an access ordered behind `access` is ordered behind `a` too */
        if (covered && ordered && (writes || !a.writes)) continue;
        r->accesses[count++] = a;
    }
    r->access_count = count;
    if (gmm__ranks_grow(w, (void **)&r->accesses, r->access_count, &r->access_capacity, sizeof access))
        r->accesses[r->access_count++] = access;
    else if (w->races++ == 0) /* a race with it would not be found */
        (void)snprintf(w->race, sizeof w->race, "rank %d: no memory to record what '%s' accesses", r->index, name);
}

/* --- Failures --- */

static void gmm__rank_op_free(gmm_ranks *w, gmm__rank_op *op) {
    if (op->kind == GMM__RANK_LAUNCH && op->memory) { /* of a launch that has not started */
        gmm__replay *replay = (gmm__replay *)op->memory;
        int i;
        for (i = 0; i < GMM__RANK_QUEUES; i++) {
            size_t j;
            for (j = 0; j < replay->count[i]; j++) gmm__rank_op_free(w, &replay->ops[i][j]);
            gmm__ranks_free(w, replay->ops[i]);
        }
    }
    gmm__token_release(w, op->host);
    gmm__token_release(w, op->token);
    gmm__ranks_free(w, op->memory);
    memset(op, 0, sizeof *op);
}

static void gmm__rank_give_up(gmm__cpu_rank *r, const char *text) {
    int i;
    if (r->given_up) return;
    r->given_up = 1;
    (void)gmm__fail(&r->error, GMM_E_COMM, "%s", text);
    for (i = 0; i < GMM__RANK_QUEUES; i++) {
        gmm__rank_queue *q = r->queues[i];
        if (!q) continue;
        while (q->count > 0) {
            if (q->ops[q->head].kind == GMM__RANK_LAUNCH) q->ops[q->head].graph->running = 0;
            gmm__rank_op_free(r->world, &q->ops[q->head]);
            q->head = (q->head + 1) % q->capacity;
            q->count--;
        }
    }
}
static void gmm__group_give_up(gmm__group *g, const char *text) {
    int32_t i;
    if (g->fault.status) return;
    (void)gmm__fail(&g->fault, GMM_E_COMM, "%s", text);
    for (i = 0; i < g->size; i++) gmm__rank_give_up(g->members[i].rank, g->fault.text);
}

/* --- Scheduling --- */

static gmm__rank_op *gmm__queue_head(gmm__rank_queue *q) {
    return q && q->count > 0 ? &q->ops[q->head] : NULL;
}

/* The operation of a rank that is the group's next collective, if it is the head of a queue, which goes to *queue. */
static gmm__rank_op *gmm__group_find_op(gmm__group *g, int32_t member, gmm__rank_queue **queue) {
    gmm__cpu_rank *r = g->members[member].rank;
    int i;
    for (i = 0; i < GMM__RANK_QUEUES; i++) {
        gmm__rank_op *op = gmm__queue_head(r->queues[i]);
        if (op && op->kind == GMM__RANK_COLLECTIVE && op->member->group == g && op->number == g->done) {
            if (queue) *queue = r->queues[i];
            return op;
        }
    }
    return NULL;
}

/* Whether the head of a queue can run. */
static int gmm__rank_is_ready(gmm__rank_queue *q) {
    gmm__rank_op *op = gmm__queue_head(q);
    int32_t i;
    if (!op) return 0;
    switch (op->kind) {
    case GMM__RANK_WAIT: return op->token->done;
    case GMM__RANK_COLLECTIVE:
        for (i = 0; i < op->member->group->size; i++)
            if (!gmm__group_find_op(op->member->group, i, NULL)) return 0;
        return 1;
    case GMM__RANK_LAUNCH:
        if (!op->started) return !op->graph->running;
        for (i = 0; op->started && i < op->graph->queue_count; i++)
            if (q->rank->queues[op->graph->queues[i]]->count > 0) return 0;
        return 1;
    default: return 1;
    }
}

/* Advances the clock of a queue for its next operation, which is ordered behind the work that the enqueuing thread had
   waited for. */
static void gmm__rank_start(gmm__rank_queue *q, const gmm__rank_op *op) {
    if (op->host) gmm__clock_merge(q->clock, op->host->clock);
    q->clock[q->index]++;
}
static void gmm__rank_pop(gmm__rank_queue *q) {
    gmm__rank_op_free(q->rank->world, &q->ops[q->head]);
    q->head = (q->head + 1) % q->capacity;
    q->count--;
    q->rank->progress++;
}

static const char *const gmm__coll_names[] = {"all_gather", "reduce_scatter", "all_to_all", "all_reduce_max"};

/* Runs call `which` of a group's collective: p[rank][which]. `bytes` and `count` are those of one rank's part. */
static void gmm__coll_run(const gmm__group *g, gmm__coll **p, int32_t which) {
    const gmm__coll *first = &p[0][which];
    const size_t bytes = first->bytes;
    const int64_t count = (int64_t)(bytes / (size_t)(gmm_dtype_bits(first->dtype) / 8 + (first->dtype == GMM_NONE)));
    int32_t to, from;
    int64_t i;
    for (to = 0; to < g->size; to++) {
        char *recv = (char *)p[to][which].recv;
        if (first->kind == GMM__COLL_ALL_GATHER || first->kind == GMM__COLL_ALL_TO_ALL) {
            for (from = 0; from < g->size; from++) {
                const char *send = (const char *)p[from][which].send;
                if (first->kind == GMM__COLL_ALL_TO_ALL) send += (size_t)to * bytes;
                if (bytes) memmove(recv + (size_t)from * bytes, send, bytes);
            }
        } else if (first->kind == GMM__COLL_REDUCE_SCATTER) {
            for (i = 0; i < count; i++) {
                float sum = 0.0f;
                for (from = 0; from < g->size; from++) {
                    const float x = gmm_load(first->dtype, p[from][which].send, (int64_t)to * count + i);
                    sum = from ? sum + x : x;
                }
                gmm_store(first->dtype, recv, i, sum);
            }
        } else if (to == 0) {
            for (i = 0; i < count; i++) {
                float largest = ((const float *)p[0][which].send)[i];
                for (from = 1; from < g->size; from++) {
                    const float x = ((const float *)p[from][which].send)[i];
                    if (x > largest || x != x) largest = x;
                }
                for (from = 0; from < g->size; from++) ((float *)p[from][which].recv)[i] = largest;
            }
        }
    }
}

/* Runs the collective that is the head of a queue on every rank, after a check that the ranks made the same calls. */
static void gmm__group_run(gmm__group *g) {
    gmm__coll *parts[GMM__MAX_CPU_RANKS];
    gmm__rank_queue *queue[GMM__MAX_CPU_RANKS];
    gmm__rank_op *first = gmm__group_find_op(g, 0, &queue[0]);
    int32_t i, j;
    parts[0] = (gmm__coll *)first->memory;
    for (i = 1; i < g->size; i++) {
        const gmm__rank_op *op = gmm__group_find_op(g, i, &queue[i]);
        const int alike = op->count == first->count && !strcmp(op->name, first->name);
        parts[i] = (gmm__coll *)op->memory;
        for (j = 0; j < first->count && alike; j++)
            if (parts[i][j].kind != parts[0][j].kind || parts[i][j].bytes != parts[0][j].bytes ||
                parts[i][j].dtype != parts[0][j].dtype)
                break;
        if (j < first->count || !alike) {
            char text[400];
            j = j < first->count ? j : 0;
            (void)snprintf(text, sizeof text, "collective %llu: rank 0 waits for '%.60s' (%d calls, %s of %llu bytes) "
                           "and rank %d for '%.60s' (%d calls, %s of %llu bytes): all ranks must make the same calls "
                           "for the same bundles in the same order", (unsigned long long)g->done, first->name,
                           first->count, gmm__coll_names[parts[0][j].kind], (unsigned long long)parts[0][j].bytes,
                           i, op->name, (int)op->count, gmm__coll_names[parts[i][j].kind],
                           (unsigned long long)parts[i][j].bytes);
            gmm__group_give_up(g, text);
            return;
        }
    }
    for (i = 0; i < g->size; i++) {
        gmm__rank_start(queue[i], gmm__queue_head(queue[i]));
        for (j = 0; j < first->count; j++) {
            const gmm__coll *p = &parts[i][j];
            const size_t all = p->bytes * (size_t)g->size;
            const int sends_parts = p->kind == GMM__COLL_REDUCE_SCATTER || p->kind == GMM__COLL_ALL_TO_ALL;
            const int receives_parts = p->kind == GMM__COLL_ALL_GATHER || p->kind == GMM__COLL_ALL_TO_ALL;
            gmm__ranks_check_access(queue[i], first->name, p->send, sends_parts ? all : p->bytes, 0);
            gmm__ranks_check_access(queue[i], first->name, p->recv, receives_parts ? all : p->bytes, 1);
        }
    }
    for (j = 0; j < first->count; j++) gmm__coll_run(g, parts, j);
    g->done++;
    for (i = 0; i < g->size; i++) gmm__rank_pop(queue[i]);
}

/* Moves the operations of a launch to the queues of its graph. */
static void gmm__graph_start(gmm__rank_queue *q, gmm__rank_op *op) {
    gmm__cpu_rank *r = q->rank;
    gmm__replay *replay = (gmm__replay *)op->memory;
    int32_t i;
    for (i = 0; i < op->graph->queue_count; i++) {
        gmm__rank_queue *queue = r->queues[op->graph->queues[i]];
        gmm__clock_merge(queue->clock, q->clock);
        gmm__ranks_free(r->world, queue->ops);
        queue->ops = replay->ops[i];
        queue->count = queue->capacity = replay->count[i];
        queue->head = 0;
    }
    gmm__ranks_free(r->world, replay);
    op->memory = NULL;
    op->started = op->graph->running = 1;
}

static void gmm__rank_run(gmm__rank_queue *q) {
    gmm__rank_op *op = gmm__queue_head(q);
    gmm__cpu_rank *r = q->rank;
    int32_t i;
    switch (op->kind) {
    case GMM__RANK_WORK: {
        const gmm_range *ranges = (const gmm_range *)op->memory;
        gmm_status s;
        gmm__rank_start(q, op);
        for (i = 0; i < op->count; i++)
            gmm__ranks_check_access(q, op->name, ranges[i].data, ranges[i].bytes, ranges[i].writes);
        s = op->function((const char *)op->memory + (size_t)op->count * sizeof *ranges, NULL);
        if (s) {
            char text[300];
            (void)snprintf(text, sizeof text, "rank %d: '%s' failed with %s", r->index, op->name,
                           gmm_status_name(s));
            gmm__rank_give_up(r, text);
            return;
        }
        break;
    }
    case GMM__RANK_RECORD:
        gmm__rank_start(q, op);
        memcpy(op->token->clock, q->clock, sizeof q->clock);
        op->token->done = 1;
        break;
    case GMM__RANK_WAIT:
        gmm__rank_start(q, op);
        gmm__clock_merge(q->clock, op->token->clock);
        break;
    case GMM__RANK_COLLECTIVE: gmm__group_run(op->member->group); return;
    default: /* LAUNCH: runs twice, first to start, and again once the queues of the graph are empty */
        if (!op->started) {
            gmm__rank_start(q, op);
            gmm__graph_start(q, op);
            return;
        }
        for (i = 0; i < op->graph->queue_count; i++)
            gmm__clock_merge(q->clock, r->queues[op->graph->queues[i]]->clock);
        op->graph->running = 0;
        break;
    }
    gmm__rank_pop(q);
}

/* Runs one operation, drawn from those that are ready, if possible from a queue that is not delayed. Returns 0 if none
   is ready. */
static int gmm__ranks_step(gmm_ranks *w) {
    gmm__rank_queue *ready[GMM__MAX_READY_QUEUES], *drawn = NULL;
    int count = 0, prompt = 0, i;
    int32_t r;
    /* with probability 1/24, draw again which queues are delayed */
    if (w->config.seed && gmm__ranks_random(w) % 24 == 0)
        for (r = 0; r < w->config.ranks; r++)
            for (i = 0; i < GMM__RANK_QUEUES; i++)
                if (w->rank[r].queues[i]) w->rank[r].queues[i]->delayed = gmm__ranks_random(w) % 3 == 0;
    for (r = 0; r < w->config.ranks; r++)
        for (i = 0; i < GMM__RANK_QUEUES && count < GMM__MAX_READY_QUEUES; i++) {
            gmm__rank_queue *q = w->rank[r].queues[i];
            if (!q || !gmm__queue_head(q) || !gmm__rank_is_ready(q)) continue;
            if (!w->config.seed) {
                gmm__rank_run(q);
                return 1;
            }
            ready[count++] = q;
            prompt += !q->delayed;
        }
    if (!count) return 0;
    {
        int nth = (int)(gmm__ranks_random(w) % (uint64_t)(prompt ? prompt : count));
        for (i = 0; i < count && !drawn; i++)
            if ((!prompt || !ready[i]->delayed) && nth-- == 0) drawn = ready[i];
    }
    gmm__rank_run(drawn);
    return 1;
}

