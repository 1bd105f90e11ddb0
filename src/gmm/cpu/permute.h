/* ...................................................................................... 14.8 Permute, unpermute ... */

/* The map is a counting sort of slots by expert. Chunks of slots count their slots per expert in parallel; prefix sums
   over chunks then give the first row of each chunk and expert. */
enum { GMM__MAP_NEXT, GMM__MAP_FAULT };

static double gmm__map_work(const gmm__call *call) { /* a slot takes about as long as 8 copies */
    return 8.0 * (double)call->d.permute.tokens * (double)call->d.permute.topk;
}
static int64_t gmm__map_chunks(const gmm__call *call) { /* one per thread */
    const int64_t slots = call->d.permute.tokens * call->d.permute.topk;
    return slots ? gmm__cpu_threads(call->ctx, slots, gmm__map_work(call)) : 0;
}
static void gmm__map_range(const gmm__call *call, int64_t c, int64_t *begin, int64_t *end) {
    const int64_t slots = call->d.permute.tokens * call->d.permute.topk;
    const int64_t chunk = gmm__ceil_div(slots, gmm__map_chunks(call));
    *begin = c * chunk < slots ? c * chunk : slots;
    *end = *begin + chunk < slots ? *begin + chunk : slots;
}

static void gmm__map_count(const void *arg, int64_t c, int32_t thread) {
    const gmm__plan *plan = (const gmm__plan *)arg;
    const gmm_permute *p = &plan->call->d.permute;
    int64_t *next = (int64_t *)gmm__region(plan, GMM__MAP_NEXT) + c * p->experts, slot, end;
    uint32_t fault = 0;
    (void)thread;
    memset(next, 0, (size_t)p->experts * sizeof *next);
    gmm__map_range(plan->call, c, &slot, &end);
    for (; slot < end; slot++) {
        const int32_t e = p->indices[slot];
        if (e >= 0 && e < p->experts) next[e]++;
        else if (e != -1) fault = (uint32_t)GMM_FAULT_INDEX;
    }
    ((uint32_t *)gmm__region(plan, GMM__MAP_FAULT))[c] = fault;
}

static void gmm__map_assign(const void *arg, int64_t c, int32_t thread) {
    const gmm__plan *plan = (const gmm__plan *)arg;
    const gmm_permute *p = &plan->call->d.permute;
    int64_t *next = (int64_t *)gmm__region(plan, GMM__MAP_NEXT) + c * p->experts, slot, end;
    (void)thread;
    gmm__map_range(plan->call, c, &slot, &end);
    for (; slot < end; slot++) {
        const int32_t e = p->indices[slot];
        int64_t row = e >= 0 && e < p->experts ? next[e]++ : -1;
        if (row >= p->capacity) row = -1;
        if (p->row_of) p->row_of[slot] = (int32_t)row;
        if (p->slot_of && row >= 0) p->slot_of[row] = (int32_t)slot;
    }
}

static int gmm__cpu_plan_permute_map(const gmm__call *call, gmm__plan *plan) {
    const size_t chunks = (size_t)gmm__map_chunks(call), experts = (size_t)call->d.permute.experts;
    gmm__reserve(plan, GMM__MAP_NEXT, chunks * experts * sizeof(int64_t));
    gmm__reserve(plan, GMM__MAP_FAULT, chunks * sizeof(uint32_t));
    return 1;
}

static gmm_status gmm__cpu_launch_permute_map(const gmm__plan *plan, gmm_stream stream) {
    const gmm__call *call = plan->call;
    const gmm_permute *p = &call->d.permute;
    const int64_t chunks = gmm__map_chunks(call);
    int64_t *next = (int64_t *)gmm__region(plan, GMM__MAP_NEXT), begin = 0, c, e;
    uint32_t fault = 0;
    (void)stream;
    gmm__cpu_for(call->ctx, chunks, gmm__map_work(call), gmm__map_count, plan);
    for (e = 0; e < p->experts; e++) {
        int64_t row = begin, end;
        for (c = 0; c < chunks; c++) {
            const int64_t count = next[c * p->experts + e];
            next[c * p->experts + e] = row;
            row += count;
        }
        end = gmm_split_end(begin, gmm__round_up(row - begin, p->align), GMM_SPLIT_SIZES, p->capacity, 0, &fault);
        if (p->sizes) p->sizes[e] = (int32_t)(end - begin);
        begin = end;
    }
    for (c = 0; c < chunks; c++) fault |= ((const uint32_t *)gmm__region(plan, GMM__MAP_FAULT))[c];
    if (p->slot_of) memset(p->slot_of, 0xFF, (size_t)p->capacity * sizeof *p->slot_of); /* -1 */
    gmm__cpu_for(call->ctx, chunks, gmm__map_work(call), gmm__map_assign, plan);
    if (fault && p->fault) *p->fault |= fault;
    return GMM_OK;
}

/* A parallel loop over rows or tokens, in chunks. */
typedef struct gmm__permute_job {
    const gmm__call *call;
    int64_t count, chunk; /* rows or tokens in all, and per task */
} gmm__permute_job;

static gmm_status gmm__permute_for(const gmm__call *call, int64_t count, gmm__task task) {
    gmm__permute_job job;
    job.call = call;
    job.count = count;
    job.chunk = 1 + 16384 / call->d.permute.hidden;
    gmm__cpu_for(call->ctx, gmm__ceil_div(count, job.chunk), (double)count * (double)call->d.permute.hidden, task,
                 &job);
    return GMM_OK;
}
static int64_t gmm__permute_range(const gmm__permute_job *job, int64_t c, int64_t *begin) {
    *begin = c * job->chunk;
    return *begin + job->chunk < job->count ? *begin + job->chunk : job->count;
}

/* Sets GMM_FAULT_INDEX if an entry of a map is outside of [-1, limit). Such entries are read as -1. */
static void gmm__map_check(const gmm__call *call, const int32_t *map, int64_t count, int64_t limit) {
    uint32_t *fault = call->d.permute.fault;
    int64_t i;
    int invalid = 0;
    if (!fault) return;
    for (i = 0; i < count; i++) invalid |= map[i] < -1 || map[i] >= limit;
    if (invalid) *fault |= (uint32_t)GMM_FAULT_INDEX;
}
static int64_t gmm__map_at(const int32_t *map, int64_t i, int64_t limit) {
    return map[i] >= 0 && map[i] < limit ? map[i] : -1;
}

/* Number of live rows, from sizes; checks their entries of slot_of. */
static int64_t gmm__permute_live(const gmm__call *call) {
    const gmm_permute *p = &call->d.permute;
    const int64_t live = gmm__cpu_offsets(&call->groups, NULL);
    gmm__map_check(call, p->slot_of, live, p->tokens * p->topk);
    return live;
}

/* acc += scale * row */
static void gmm__row_add(gmm_dtype dtype, const void *from, float scale, float *acc, int64_t n) {
    int64_t i;
    if (dtype == GMM_F32)
        for (i = 0; i < n; i++) acc[i] += scale * ((const float *)from)[i];
    else if (dtype == GMM_BF16)
        for (i = 0; i < n; i++) acc[i] += scale * gmm_bf16_to_f32(((const uint16_t *)from)[i]);
    else
        for (i = 0; i < n; i++) acc[i] += scale * gmm_f16_to_f32(((const uint16_t *)from)[i]);
}

/* Columns per step, whose fp32 sums stay in the L1 cache. A multiple of the lanes. */
enum { GMM__PERMUTE_COLUMNS = 512 };
static int64_t gmm__permute_columns(const gmm_permute *p, int64_t col) {
    return p->hidden - col < (int64_t)GMM__PERMUTE_COLUMNS ? p->hidden - col : (int64_t)GMM__PERMUTE_COLUMNS;
}

static void gmm__permute_fwd_rows(const void *arg, int64_t c, int32_t thread) {
    const gmm__permute_job *job = (const gmm__permute_job *)arg;
    const gmm_permute *p = &job->call->d.permute;
    const gmm_mat *x = &job->call->mat[GMM__X_], *rows = &job->call->mat[GMM__ROWS];
    const size_t bytes = (size_t)p->hidden * (size_t)(gmm_dtype_bits(x->dtype) / 8);
    int64_t r, end = gmm__permute_range(job, c, &r);
    (void)thread;
    for (; r < end; r++) {
        const int64_t slot = gmm__map_at(p->slot_of, r, p->tokens * p->topk);
        if (p->rows && slot < 0) memset(gmm__at(rows, 0, r, 0), 0, bytes);
        else if (p->rows) memcpy(gmm__at(rows, 0, r, 0), gmm__at(x, 0, slot / p->topk, 0), bytes);
        if (p->row_probs) p->row_probs[r] = slot < 0 ? 0.0f : p->probs[slot];
    }
}

static gmm_status gmm__cpu_launch_permute_fwd(const gmm__plan *plan, gmm_stream stream) {
    const gmm__call *call = plan->call;
    const gmm_permute *p = &call->d.permute;
    const int64_t live = gmm__permute_live(call);
    int64_t r;
    (void)stream;
    if (p->rows) gmm__cpu_tail(&call->mat[GMM__ROWS], p->tail, live, p->capacity, p->hidden);
    if (p->row_probs && p->tail == GMM_TAIL_ZERO)
        for (r = live; r < p->capacity; r++) p->row_probs[r] = 0.0f;
    return gmm__permute_for(call, live, gmm__permute_fwd_rows);
}

/* dst[t] = sum over the slots of token t of src[row], weighted by probs unless NULL */
static void gmm__permute_sum(const gmm__permute_job *job, int64_t c, const gmm_mat *src, const float *probs,
                             const gmm_mat *dst) {
    const gmm_permute *p = &job->call->d.permute;
    float acc[GMM__PERMUTE_COLUMNS];
    int64_t t, end = gmm__permute_range(job, c, &t), col;
    int32_t i;
    for (; t < end; t++)
        for (col = 0; col < p->hidden; col += GMM__PERMUTE_COLUMNS) {
            const int64_t n = gmm__permute_columns(p, col);
            memset(acc, 0, sizeof acc);
            for (i = 0; i < p->topk; i++) {
                const int64_t slot = t * p->topk + i, row = gmm__map_at(p->row_of, slot, p->capacity);
                if (row >= 0)
                    gmm__row_add(src->dtype, gmm__at(src, 0, row, col), probs ? probs[slot] : 1.0f, acc, n);
            }
            gmm__row_store(dst->dtype, gmm__at(dst, 0, t, col), acc, n);
        }
}

static void gmm__permute_bwd_tokens(const void *arg, int64_t c, int32_t thread) {
    const gmm__permute_job *job = (const gmm__permute_job *)arg;
    const gmm_permute *p = &job->call->d.permute;
    (void)thread;
    if (p->dx) gmm__permute_sum(job, c, &job->call->mat[GMM__DROWS], NULL, &job->call->mat[GMM__DX]);
    if (p->dprobs) {
        int64_t t, end = gmm__permute_range(job, c, &t), slot;
        for (slot = t * p->topk; slot < end * p->topk; slot++) {
            const int64_t row = gmm__map_at(p->row_of, slot, p->capacity);
            p->dprobs[slot] = row < 0 ? 0.0f : p->drow_probs[row];
        }
    }
}

static gmm_status gmm__cpu_launch_permute_bwd(const gmm__plan *plan, gmm_stream stream) {
    const gmm_permute *p = &plan->call->d.permute;
    (void)stream;
    gmm__map_check(plan->call, p->row_of, p->tokens * p->topk, p->capacity);
    return gmm__permute_for(plan->call, p->tokens, gmm__permute_bwd_tokens);
}

static void gmm__unpermute_fwd_tokens(const void *arg, int64_t c, int32_t thread) {
    const gmm__permute_job *job = (const gmm__permute_job *)arg;
    (void)thread;
    gmm__permute_sum(job, c, &job->call->mat[GMM__ROWS], job->call->d.permute.probs, &job->call->mat[GMM__OUT]);
}

static gmm_status gmm__cpu_launch_unpermute_fwd(const gmm__plan *plan, gmm_stream stream) {
    const gmm_permute *p = &plan->call->d.permute;
    (void)stream;
    gmm__map_check(plan->call, p->row_of, p->tokens * p->topk, p->capacity);
    return gmm__permute_for(plan->call, p->tokens, gmm__unpermute_fwd_tokens);
}

/* drows[r] = (probs) dout[token of r] */
static void gmm__unpermute_bwd_rows(const void *arg, int64_t c, int32_t thread) {
    const gmm__permute_job *job = (const gmm__permute_job *)arg;
    const gmm_permute *p = &job->call->d.permute;
    const gmm_mat *dout = &job->call->mat[GMM__DOUT], *drows = &job->call->mat[GMM__DROWS];
    const size_t bytes = (size_t)p->hidden * (size_t)(gmm_dtype_bits(drows->dtype) / 8);
    float acc[GMM__PERMUTE_COLUMNS];
    int64_t r, end = gmm__permute_range(job, c, &r), col, i;
    (void)thread;
    for (; r < end; r++) {
        const int64_t slot = gmm__map_at(p->slot_of, r, p->tokens * p->topk), t = slot / p->topk;
        if (slot < 0) memset(gmm__at(drows, 0, r, 0), 0, bytes);
        else if (!p->probs && dout->dtype == drows->dtype)
            memcpy(gmm__at(drows, 0, r, 0), gmm__at(dout, 0, t, 0), bytes);
        else
            for (col = 0; col < p->hidden; col += GMM__PERMUTE_COLUMNS) {
                const int64_t n = gmm__permute_columns(p, col);
                const float scale = p->probs ? p->probs[slot] : 1.0f;
                gmm__row_load(dout->dtype, gmm__at(dout, 0, t, col), acc, n);
                for (i = 0; i < n; i++) acc[i] *= scale;
                gmm__row_store(drows->dtype, gmm__at(drows, 0, r, col), acc, n);
            }
    }
}

/* dprobs[slot] = dout[token] . rows[row] */
static void gmm__unpermute_bwd_probs(const void *arg, int64_t c, int32_t thread) {
    const gmm__permute_job *job = (const gmm__permute_job *)arg;
    const gmm_permute *p = &job->call->d.permute;
    const gmm_mat *dout = &job->call->mat[GMM__DOUT], *rows = &job->call->mat[GMM__ROWS];
    float a[GMM__PERMUTE_COLUMNS], b[GMM__PERMUTE_COLUMNS], lane[GMM__LANES];
    int64_t t, end = gmm__permute_range(job, c, &t), slot, col;
    (void)thread;
    for (; t < end; t++)
        for (slot = t * p->topk; slot < (t + 1) * p->topk; slot++) {
            const int64_t row = gmm__map_at(p->row_of, slot, p->capacity);
            memset(lane, 0, sizeof lane);
            for (col = 0; row >= 0 && col < p->hidden; col += GMM__PERMUTE_COLUMNS) {
                const int64_t n = gmm__permute_columns(p, col);
                gmm__row_load(dout->dtype, gmm__at(dout, 0, t, col), a, n);
                gmm__row_load(rows->dtype, gmm__at(rows, 0, row, col), b, n);
                gmm__lanes_add(lane, a, b, n);
            }
            p->dprobs[slot] = gmm__lanes_sum(lane);
        }
}

static gmm_status gmm__cpu_launch_unpermute_bwd(const gmm__plan *plan, gmm_stream stream) {
    const gmm__call *call = plan->call;
    const gmm_permute *p = &call->d.permute;
    (void)stream;
    if (p->drows) {
        const int64_t live = gmm__permute_live(call);
        gmm__cpu_tail(&call->mat[GMM__DROWS], p->tail, live, p->capacity, p->hidden);
        (void)gmm__permute_for(call, live, gmm__unpermute_bwd_rows);
    }
    if (p->dprobs) {
        gmm__map_check(call, p->row_of, p->tokens * p->topk, p->capacity);
        (void)gmm__permute_for(call, p->tokens, gmm__unpermute_bwd_probs);
    }
    return GMM_OK;
}

