/* --- Communicators --- */

/* Enqueues the calls of a group as one operation. */
static gmm_status gmm__member_flush(gmm__member *m) {
    gmm__cpu_rank *r = m->rank;
    const int captured = gmm__rank_stream_queue(r, m->stream)->graph != NULL;
    uint64_t *number;
    gmm__rank_op op;
    gmm_status s;
    if (!m->count) return GMM_OK;
    memset(&op, 0, sizeof op);
    op.kind = GMM__RANK_COLLECTIVE;
    op.name = m->what ? m->what : "collective";
    op.count = m->count;
    op.memory = m->parts;
    op.bytes = (size_t)m->count * sizeof *m->parts;
    op.member = m;
    m->parts = NULL;
    m->count = m->capacity = 0;
    if (captured && m->capture_serial != r->capture->serial) {
        m->capture_serial = r->capture->serial;
        m->captured = 0;
    }
    number = captured ? &m->captured : &m->enqueued; /* a launch adds those that were enqueued before it */
    op.number = (*number)++;
    s = gmm__rank_enqueue(r, m->stream, &op);
    if (s == GMM_E_MEMORY) --*number; /* it was not enqueued */
    return s;
}

static gmm_status gmm__member_add_call(void *self, gmm__coll part, gmm_stream stream) {
    gmm__member *m = (gmm__member *)self;
    const char *what = m->what ? m->what : "collective";
    gmm_status s = gmm__rank_begin_call(m->rank);
    if (s) return s;
    if (part.kind == GMM__COLL_REDUCE_SCATTER && !gmm__comm_supports_sum(part.dtype))
        return gmm__rank_end_call(m->rank,
                                  gmm__rank_fail(m->rank, GMM_E_DTYPE, "'%s': reduce_scatter of %s: must be f32, "
                                                 "bf16 or f16", what, gmm_dtype_name(part.dtype)));
    if (part.bytes && (!part.send || !part.recv))
        return gmm__rank_end_call(m->rank, gmm__rank_fail(m->rank, GMM_E_ARG, "'%s': %s of %llu bytes from %p to %p: "
                                                          "must not be NULL", what, gmm__coll_names[part.kind],
                                                          (unsigned long long)part.bytes, part.send, part.recv));
    if (m->count && m->stream != stream)
        return gmm__rank_end_call(m->rank, gmm__rank_fail(m->rank, GMM_E_ARG, "'%s': one group on two streams", what));
    if (m->count == m->capacity) {
        size_t capacity = (size_t)m->capacity;
        void *parts = m->parts;
        if (!gmm__ranks_grow(m->group->world, &parts, (size_t)m->count, &capacity, sizeof part))
            return gmm__rank_end_call(m->rank, gmm__rank_fail(m->rank, GMM_E_MEMORY, "'%s': no memory", what));
        m->parts = (gmm__coll *)parts;
        m->capacity = (int32_t)capacity;
    }
    m->parts[m->count++] = part;
    m->stream = stream;
    if (!m->open) s = gmm__member_flush(m);
    return gmm__rank_end_call(m->rank, s);
}
static gmm__coll gmm__coll_make(gmm__coll_kind kind, gmm_dtype dtype, const void *send, void *recv, size_t bytes) {
    gmm__coll p;
    memset(&p, 0, sizeof p);
    p.kind = kind;
    p.dtype = dtype;
    p.send = send;
    p.recv = recv;
    p.bytes = bytes;
    return p;
}

static gmm_status gmm__member_group_begin(void *self, const char *what) {
    gmm__member *m = (gmm__member *)self;
    const gmm_status s = gmm__rank_begin_call(m->rank);
    if (s) return s;
    m->open = 1;
    m->what = what;
    return gmm__rank_end_call(m->rank, GMM_OK);
}
static gmm_status gmm__member_group_end(void *self) {
    gmm__member *m = (gmm__member *)self;
    gmm_status s = gmm__rank_begin_call(m->rank);
    if (s) return s;
    m->open = 0;
    s = gmm__member_flush(m);
    m->what = NULL;
    return gmm__rank_end_call(m->rank, s);
}
static gmm_status gmm__member_all_gather(void *self, const void *send, void *recv, size_t bytes, gmm_stream stream) {
    return gmm__member_add_call(self, gmm__coll_make(GMM__COLL_ALL_GATHER, GMM_NONE, send, recv, bytes), stream);
}
static gmm_status gmm__member_reduce_scatter(void *self, const void *send, void *recv, size_t count, gmm_dtype dtype,
                                             gmm_stream stream) {
    const size_t bytes = count * (size_t)(gmm_dtype_bits(dtype) / 8);
    return gmm__member_add_call(self, gmm__coll_make(GMM__COLL_REDUCE_SCATTER, dtype, send, recv, bytes), stream);
}
static gmm_status gmm__member_all_to_all(void *self, const void *send, void *recv, size_t bytes, gmm_stream stream) {
    return gmm__member_add_call(self, gmm__coll_make(GMM__COLL_ALL_TO_ALL, GMM_NONE, send, recv, bytes), stream);
}
static gmm_status gmm__member_all_reduce_max(void *self, float *values, size_t count, gmm_stream stream) {
    return gmm__member_add_call(self, gmm__coll_make(GMM__COLL_ALL_REDUCE_MAX, GMM_F32, values, values,
                                                     count * sizeof *values), stream);
}
static gmm_status gmm__member_poll(void *self, gmm_error *error) {
    gmm__member *m = (gmm__member *)self;
    gmm_status s;
    (void)pthread_mutex_lock(&m->group->world->mutex);
    s = m->group->fault.status ? GMM_E_COMM : m->rank->given_up ? GMM_E_COMM : GMM_OK;
    if (s && error) *error = m->group->fault.status ? m->group->fault : m->rank->error;
    if (!s && error) { /* names a missing rank, for a caller that reports a timeout */
        const gmm__rank_op *op = gmm__group_find_op(m->group, m->index, NULL);
        int32_t i;
        memset(error, 0, sizeof *error);
        for (i = 0; op && i < m->group->size; i++)
            if (!gmm__group_find_op(m->group, i, NULL)) {
                (void)snprintf(error->text, sizeof error->text, "rank %d of %d has not joined", i,
                               m->group->size);
                break;
            }
    }
    (void)pthread_mutex_unlock(&m->group->world->mutex);
    return s;
}
static void gmm__member_give_up(void *self, const char *why) {
    gmm__member *m = (gmm__member *)self;
    (void)pthread_mutex_lock(&m->group->world->mutex);
    gmm__group_give_up(m->group, why);
    (void)pthread_cond_broadcast(&m->group->world->changed);
    (void)pthread_mutex_unlock(&m->group->world->mutex);
}

/* Checks the arguments of gmm_ranks_comms. The message of a failure is rank 0's. */
static gmm_status gmm__ranks_check_members(const gmm_ranks *ranks, const int32_t *members, int32_t count,
                                           const gmm_comm *out) {
    static const char fn[] = "gmm_ranks_comms";
    gmm__cpu_rank *r = ranks->rank;
    const int32_t last = ranks->config.ranks - 1;
    int32_t i, j;
    if (!members || !out) return gmm__rank_fail(r, GMM_E_NULL, "%s: %s is NULL", fn, members ? "out" : "members");
    if (count < 1 || count > last + 1)
        return gmm__rank_fail(r, GMM_E_ARG, "%s: count %d: must be 1 to %d, the number of ranks", fn, count, last + 1);
    for (i = 0; i < count; i++) {
        if (members[i] < 0 || members[i] > last)
            return gmm__rank_fail(r, GMM_E_ARG, "%s: members[%d] is %d: must be a rank, 0 to %d", fn, i, members[i],
                                  last);
        for (j = 0; j < i; j++)
            if (members[j] == members[i])
                return gmm__rank_fail(r, GMM_E_ARG, "%s: members[%d] and members[%d] are %d: must be distinct", fn, j,
                                      i, members[i]);
    }
    return GMM_OK;
}

/* Allocates a communicator of `count` members, not yet initialized. NULL: there is no memory. */
static gmm__group *gmm__ranks_add_group(gmm_ranks *ranks, int32_t count) {
    gmm__group *g = (gmm__group *)gmm__ranks_alloc(ranks, sizeof *g);
    if (g) g->members = (gmm__member *)gmm__ranks_alloc(ranks, (size_t)count * sizeof *g->members);
    if (!g || g->members) return g;
    gmm__ranks_free(ranks, g);
    return NULL;
}

GMMDEF gmm_status gmm_ranks_comms(gmm_ranks *ranks, const int32_t *members, int32_t count, gmm_comm *out) {
    gmm__group *g = NULL;
    gmm_status s;
    int32_t i;
    if (!ranks) return GMM_E_NULL;
    (void)pthread_mutex_lock(&ranks->mutex);
    s = gmm__ranks_check_members(ranks, members, count, out);
    if (s == GMM_OK) g = gmm__ranks_add_group(ranks, count);
    if (s == GMM_OK && !g) s = gmm__rank_fail(ranks->rank, GMM_E_MEMORY, "gmm_ranks_comms: no memory");
    if (s != GMM_OK) {
        (void)pthread_mutex_unlock(&ranks->mutex);
        return s;
    }
    g->world = ranks;
    g->size = count;
    g->next = ranks->groups;
    ranks->groups = g;
    for (i = 0; i < count; i++) {
        gmm_comm c;
        memset(&c, 0, sizeof c);
        g->members[i].group = g;
        g->members[i].rank = &ranks->rank[members[i]];
        g->members[i].index = i;
        c.rank = i;
        c.size = count;
        c.self = &g->members[i];
        c.group_begin = gmm__member_group_begin;
        c.group_end = gmm__member_group_end;
        c.all_gather = gmm__member_all_gather;
        c.reduce_scatter = gmm__member_reduce_scatter;
        c.all_to_all = gmm__member_all_to_all;
        c.all_reduce_max = gmm__member_all_reduce_max;
        c.poll = gmm__member_poll;
        c.give_up = gmm__member_give_up;
        out[i] = c;
    }
    (void)pthread_mutex_unlock(&ranks->mutex);
    return GMM_OK;
}

