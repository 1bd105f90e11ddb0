/* --- The runtime table of a rank: streams, events, copies, work --- */

static gmm_status gmm__ranks_stream_create(void *self, int32_t priority, gmm_stream *out) {
    gmm__cpu_rank *r = (gmm__cpu_rank *)self;
    gmm_status s = gmm__rank_check_call(r, "stream_create", "out", out, 0);
    int i;
    (void)priority;
    if (s) return s;
    for (i = 1; i < GMM__RANK_QUEUES && r->queues[i]; i++) { }
    if (i == GMM__RANK_QUEUES)
        s = gmm__rank_fail(r, GMM_E_MEMORY, "stream_create: a rank has at most %d streams", i - 1);
    else if (!(r->queues[i] = (gmm__rank_queue *)gmm__ranks_alloc(r->world, sizeof(gmm__rank_queue))))
        s = gmm__rank_fail(r, GMM_E_MEMORY, "stream_create: no memory");
    else {
        r->queues[i]->rank = r;
        r->queues[i]->index = i;
        r->queues[i]->captured_stream = -1;
        *out = (gmm_stream)(void *)r->queues[i];
    }
    return gmm__rank_end_call(r, s);
}

/* The queue of a destroyed stream stays allocated, since the race checker identifies its accesses by its index. */
static gmm_status gmm__ranks_stream_sync(void *self, gmm_stream stream) {
    gmm__cpu_rank *r = (gmm__cpu_rank *)self;
    gmm_status s = gmm__rank_begin_call(r);
    gmm__rank_queue *q;
    if (s) return s;
    q = gmm__rank_stream_queue(r, stream);
    if (q->graph) s = gmm__rank_fail(r, GMM_E_CAPTURE, "stream_sync: stream %d is capturing", q->index);
    else s = gmm__rank_wait(r, q, NULL);
    if (!s) gmm__clock_merge(r->queues[0]->clock, q->clock);
    return gmm__rank_end_call(r, s);
}
static gmm_status gmm__ranks_stream_destroy(void *self, gmm_stream stream) {
    return stream ? gmm__ranks_stream_sync(self, stream) : GMM_OK;
}

static gmm_status gmm__ranks_event_create(void *self, gmm_event *out) {
    gmm__cpu_rank *r = (gmm__cpu_rank *)self;
    gmm__rank_event *e;
    gmm_status s = gmm__rank_check_call(r, "event_create", "out", out, 0);
    if (s) return s;
    e = (gmm__rank_event *)gmm__ranks_alloc(r->world, sizeof *e);
    if (!e) s = gmm__rank_fail(r, GMM_E_MEMORY, "event_create: no memory");
    else e->rank = r;
    *out = (gmm_event)(void *)e;
    return gmm__rank_end_call(r, s);
}
static gmm_status gmm__ranks_event_destroy(void *self, gmm_event event) {
    gmm__cpu_rank *r = (gmm__cpu_rank *)self;
    gmm__rank_event *e = (gmm__rank_event *)(void *)event;
    if (!r) return GMM_E_NULL;
    if (!e) return GMM_OK;
    (void)pthread_mutex_lock(&r->world->mutex);
    gmm__token_release(r->world, e->last);
    gmm__ranks_free(r->world, e);
    (void)pthread_mutex_unlock(&r->world->mutex);
    return GMM_OK;
}

static gmm_status gmm__ranks_event_record(void *self, gmm_event event, gmm_stream stream, uint32_t flags) {
    gmm__cpu_rank *r = (gmm__cpu_rank *)self;
    gmm__rank_event *e = (gmm__rank_event *)(void *)event;
    gmm__rank_queue *q;
    gmm__rank_op op;
    gmm_status s = gmm__rank_check_call(r, "event_record", "event", e, flags);
    if (s) return s;
    q = gmm__rank_stream_queue(r, stream);
    memset(&op, 0, sizeof op);
    op.kind = GMM__RANK_RECORD;
    op.name = "record";
    if (q->graph) {
        if (flags & (uint32_t)GMM_EVENT_EXTERNAL) op.event = e;
        else op.record_index = q->graph->record_count;
        s = gmm__rank_enqueue(r, stream, &op);
        if (!s && !op.event) {
            e->capture = q->graph->serial;
            e->record_index = q->graph->record_count++;
        }
        return gmm__rank_end_call(r, s);
    }
    op.token = gmm__token_create(r->world);
    if (!op.token) s = gmm__rank_fail(r, GMM_E_MEMORY, "event_record: no memory");
    else {
        gmm__token *token = gmm__token_retain(op.token);
        s = gmm__rank_enqueue(r, stream, &op);
        if (s != GMM_E_MEMORY) { /* after GMM_E_MEMORY the event is unchanged */
            gmm__token *previous = e->last;
            e->last = token;
            e->capture = 0;
            token = previous;
        }
        gmm__token_release(r->world, token);
    }
    return gmm__rank_end_call(r, s);
}

/* Adds a stream to a capture, with a queue that replays its work. */
static gmm_status gmm__graph_join(gmm__cpu_rank *r, gmm_ranks_graph *g, gmm__rank_queue *q) {
    int i;
    for (i = 1; i < GMM__RANK_QUEUES && r->queues[i]; i++) { }
    if (i == GMM__RANK_QUEUES) return gmm__rank_fail(r, GMM_E_MEMORY, "capture: more than %d streams", i - 1);
    r->queues[i] = (gmm__rank_queue *)gmm__ranks_alloc(r->world, sizeof *q);
    if (!r->queues[i]) return gmm__rank_fail(r, GMM_E_MEMORY, "capture: no memory");
    r->queues[i]->rank = r;
    r->queues[i]->index = i;
    r->queues[i]->captured_stream = q->index;
    q->graph = g;
    g->queues[g->queue_count++] = i;
    return GMM_OK;
}

static gmm_status gmm__ranks_stream_wait(void *self, gmm_stream stream, gmm_event event, uint32_t flags) {
    gmm__cpu_rank *r = (gmm__cpu_rank *)self;
    gmm__rank_event *e = (gmm__rank_event *)(void *)event;
    gmm__rank_queue *q;
    gmm__rank_op op;
    gmm_status s = gmm__rank_check_call(r, "stream_wait", "event", e, flags);
    if (s) return s;
    q = gmm__rank_stream_queue(r, stream);
    memset(&op, 0, sizeof op);
    op.kind = GMM__RANK_WAIT;
    op.name = "wait";
    if (q->graph && (flags & (uint32_t)GMM_EVENT_EXTERNAL)) {
        op.event = e;
        s = gmm__rank_enqueue(r, stream, &op);
    } else if (r->capture && e->capture == r->capture->serial) {
        if (!q->graph) s = gmm__graph_join(r, r->capture, q);
        op.record_index = e->record_index;
        if (!s) s = gmm__rank_enqueue(r, stream, &op);
    } else if (q->graph || e->capture) {
        s = gmm__rank_fail(r, GMM_E_CAPTURE, q->graph ? "stream_wait: captured stream %d waits for an event from "
                           "outside without GMM_EVENT_EXTERNAL" : "stream_wait: stream %d waits for an event that a "
                           "capture has recorded", q->index);
    } else if (e->last) {
        op.token = gmm__token_retain(e->last);
        s = gmm__rank_enqueue(r, stream, &op);
    }
    return gmm__rank_end_call(r, s);
}

static gmm_status gmm__ranks_event_query(void *self, gmm_event event, int32_t *done) {
    gmm__cpu_rank *r = (gmm__cpu_rank *)self;
    const gmm__rank_event *e = (const gmm__rank_event *)(const void *)event;
    const gmm_status s = gmm__rank_check_call(r, "event_query", e ? "done" : "event", e ? done : NULL, 0);
    if (s) return s;
    *done = !e->last || e->last->done;
    return gmm__rank_end_call(r, GMM_OK);
}
static gmm_status gmm__ranks_event_sync(void *self, gmm_event event) {
    gmm__cpu_rank *r = (gmm__cpu_rank *)self;
    const gmm__rank_event *e = (const gmm__rank_event *)(const void *)event;
    gmm_status s = gmm__rank_check_call(r, "event_sync", "event", e, 0);
    if (s) return s;
    if (e->last) s = gmm__rank_wait(r, NULL, e->last);
    if (!s && e->last) gmm__clock_merge(r->queues[0]->clock, e->last->clock);
    return gmm__rank_end_call(r, s);
}

static gmm_status gmm__ranks_run_work(void *self, const gmm_work *work, gmm_stream stream) {
    gmm__cpu_rank *r = (gmm__cpu_rank *)self;
    const int complete = work && work->function;
    gmm_status s = gmm__rank_check_call(r, "run", work ? "work->function" : "work", complete ? work : NULL, 0);
    gmm__rank_op op;
    size_t ranges;
    if (s) return s;
    if (work->range_count < 0 || (work->argument_bytes && !work->argument))
        return gmm__rank_end_call(r, gmm__rank_fail(
            r, work->range_count < 0 ? GMM_E_ARG : GMM_E_NULL, "run: range_count is %d, argument %p with %llu bytes: "
            "must be >= 0, and not NULL", work->range_count, work->argument, (unsigned long long)work->argument_bytes));
    ranges = work->ranges ? (size_t)work->range_count * sizeof *work->ranges : 0;
    memset(&op, 0, sizeof op);
    op.kind = GMM__RANK_WORK;
    op.name = work->name ? work->name : "work";
    op.count = work->ranges ? work->range_count : 0;
    op.bytes = ranges + work->argument_bytes + 1;
    op.function = work->function;
    /* stream NULL runs it here, without the lock */
    if (gmm__rank_stream_queue(r, stream)->index == 0 && !r->queues[0]->graph) {
        int32_t i;
        gmm__rank_start(r->queues[0], &op);
        for (i = 0; i < op.count; i++)
            gmm__ranks_check_access(r->queues[0], op.name, work->ranges[i].data, work->ranges[i].bytes,
                                    work->ranges[i].writes);
        s = gmm__rank_end_call(r, GMM_OK);
        return s ? s : work->function(work->argument, NULL);
    }
    op.memory = gmm__ranks_alloc(r->world, op.bytes);
    if (!op.memory) s = gmm__rank_fail(r, GMM_E_MEMORY, "'%s': no memory", op.name);
    else {
        if (ranges) memcpy(op.memory, work->ranges, ranges);
        if (work->argument_bytes)
            memcpy((char *)op.memory + ranges, work->argument, work->argument_bytes);
        s = gmm__rank_enqueue(r, stream, &op);
    }
    return gmm__rank_end_call(r, s);
}

/* Arguments of a copy or fill, which is enqueued as work. */
typedef struct gmm__rank_copy {
    void *dst;
    const void *src;
    size_t dst_pitch, src_pitch, width, height;
    int32_t value, fill; /* fill: 1 = set to `value`, src is NULL */
} gmm__rank_copy;

static gmm_status gmm__rank_copy_run(const void *argument, gmm_stream stream) {
    const gmm__rank_copy *m = (const gmm__rank_copy *)argument;
    size_t i;
    (void)stream;
    for (i = 0; i < m->height && m->width; i++) {
        char *dst = (char *)m->dst + i * m->dst_pitch;
        if (!m->fill) memcpy(dst, (const char *)m->src + i * m->src_pitch, m->width);
        else memset(dst, (int)m->value, m->width);
    }
    return GMM_OK;
}
static gmm_status gmm__rank_copy_enqueue(void *self, gmm__rank_copy m, gmm_stream stream) {
    gmm__cpu_rank *r = (gmm__cpu_rank *)self;
    const int empty = !m.width || !m.height, missing = !empty && (!m.dst || (!m.fill && !m.src));
    gmm_work work;
    gmm_range ranges[2];
    memset(&work, 0, sizeof work);
    memset(ranges, 0, sizeof ranges);
    work.name = m.fill ? "fill" : "copy";
    if (missing || m.value < 0 || m.value > 255 ||
        (!empty && (m.dst_pitch < m.width || (!m.fill && m.src_pitch < m.width)))) {
        const gmm_status s = gmm__rank_begin_call(r);
        return s ? s : gmm__rank_end_call(r, gmm__rank_fail(
            r, missing ? GMM_E_NULL : GMM_E_ARG, "%s: dst %p, src %p, pitches %llu and %llu, width %llu, value %d: "
            "must not be NULL, >= width, and 0 to 255", work.name, m.dst, m.src, (unsigned long long)m.dst_pitch,
            (unsigned long long)m.src_pitch, (unsigned long long)m.width, m.value));
    }
    if (empty) return GMM_OK;
    if (m.dst_pitch > SIZE_MAX / m.height || m.src_pitch > SIZE_MAX / m.height) {
        const gmm_status s = gmm__rank_begin_call(r);
        return s ? s : gmm__rank_end_call(r, gmm__rank_fail(
            r, GMM_E_OVERFLOW, "%s: %llu rows of pitches %llu and %llu do not fit size_t", work.name,
            (unsigned long long)m.height, (unsigned long long)m.dst_pitch, (unsigned long long)m.src_pitch));
    }
    ranges[0].data = m.dst;
    ranges[0].bytes = (m.height - 1) * m.dst_pitch + m.width;
    ranges[0].writes = 1;
    ranges[1].data = m.src;
    ranges[1].bytes = (m.height - 1) * m.src_pitch + m.width;
    work.function = gmm__rank_copy_run;
    work.argument = &m;
    work.argument_bytes = sizeof m;
    work.ranges = ranges;
    work.range_count = m.fill ? 1 : 2;
    return gmm__ranks_run_work(self, &work, stream);
}
static gmm_status gmm__ranks_copy2d(void *self, void *dst, size_t dst_pitch, const void *src, size_t src_pitch,
                                    size_t width, size_t height, gmm_stream stream) {
    gmm__rank_copy m;
    m.dst = dst;
    m.src = src;
    m.dst_pitch = dst_pitch;
    m.src_pitch = src_pitch;
    m.width = width;
    m.height = height;
    m.value = m.fill = 0;
    return gmm__rank_copy_enqueue(self, m, stream);
}
static gmm_status gmm__ranks_copy(void *self, void *dst, const void *src, size_t bytes, gmm_stream stream) {
    return gmm__ranks_copy2d(self, dst, bytes, src, bytes, bytes, 1, stream);
}
static gmm_status gmm__ranks_fill2d(void *self, void *dst, size_t pitch, int32_t value, size_t width, size_t height,
                                    gmm_stream stream) {
    gmm__rank_copy m;
    m.dst = dst;
    m.src = NULL;
    m.dst_pitch = pitch;
    m.src_pitch = 0;
    m.width = width;
    m.height = height;
    m.value = value;
    m.fill = 1;
    return gmm__rank_copy_enqueue(self, m, stream);
}
static gmm_status gmm__ranks_fill(void *self, void *dst, int32_t value, size_t bytes, gmm_stream stream) {
    return gmm__ranks_fill2d(self, dst, bytes, value, bytes, 1, stream);
}
static gmm_status gmm__ranks_is_capturing(void *self, gmm_stream stream, int32_t *capturing) {
    gmm__cpu_rank *r = (gmm__cpu_rank *)self;
    const gmm_status s = gmm__rank_check_call(r, "is_capturing", "capturing", capturing, 0);
    if (s) return s;
    *capturing = gmm__rank_stream_queue(r, stream)->graph != NULL;
    return gmm__rank_end_call(r, GMM_OK);
}

GMMDEF gmm_status gmm_ranks_runtime(gmm_ranks *ranks, int32_t rank, gmm_runtime *out) {
    static const gmm_runtime table = {
        0, GMM_SPACE_CPU, NULL, gmm__ranks_stream_create, gmm__ranks_stream_destroy, gmm__ranks_stream_wait,
        gmm__ranks_stream_sync, gmm__ranks_event_create, gmm__ranks_event_destroy, gmm__ranks_event_record,
        gmm__ranks_event_query, gmm__ranks_event_sync, gmm__ranks_copy, gmm__ranks_copy2d, gmm__ranks_fill,
        gmm__ranks_fill2d, gmm__ranks_is_capturing, gmm__ranks_run_work};
    if (!ranks) return GMM_E_NULL;
    if (!out || rank < 0 || rank >= ranks->config.ranks) {
        gmm_status s;
        (void)pthread_mutex_lock(&ranks->mutex);
        s = out ? gmm__rank_fail(ranks->rank, GMM_E_ARG, "gmm_ranks_runtime: rank %d: must be 0 to %d", rank,
                                 ranks->config.ranks - 1)
                : gmm__rank_fail(ranks->rank, GMM_E_NULL, "gmm_ranks_runtime: out is NULL");
        (void)pthread_mutex_unlock(&ranks->mutex);
        return s;
    }
    *out = table;
    out->self = &ranks->rank[rank];
    return GMM_OK;
}

