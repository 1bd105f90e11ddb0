/* --- CPU engine: rows are processed in fp32 buffers, GMM__ACT_CHUNK outputs at a time --- */

enum { GMM__ACT_CHUNK = 256 };

typedef struct gmm__act_job {
    const gmm__call *call;
    gmm_act_coef coef;
    int64_t live, rows_per_task;
    int gated;     /* 1: x and dx have columns of a gate and of values */
    int64_t block; /* GLU block; of halves, and without a gate, all outputs */
    int64_t chunk; /* outputs per step: a multiple of the lanes and of blocks up to GMM__LANES */
} gmm__act_job;

/* Converts elements [i, i + n) of a row to fp32, and back. */
static GMM__FORCE_INLINE void gmm__act_load(gmm_dtype dtype, const void *row, int64_t i, int64_t n, float *dst) {
    const uint16_t *half = (const uint16_t *)row + i;
    int64_t k;
    if (dtype == GMM_BF16) for (k = 0; k < n; k++) dst[k] = gmm_bf16_to_f32(half[k]);
    else if (dtype == GMM_F16) for (k = 0; k < n; k++) dst[k] = gmm_f16_to_f32(half[k]);
    else memcpy(dst, (const float *)row + i, (size_t)n * sizeof *dst);
}
static GMM__FORCE_INLINE void gmm__act_store(gmm_dtype dtype, void *row, int64_t i, int64_t n, const float *src) {
    uint16_t *half = (uint16_t *)row + i;
    int64_t k;
    if (dtype == GMM_BF16) for (k = 0; k < n; k++) half[k] = gmm_f32_to_bf16(src[k]);
    else if (dtype == GMM_F16) for (k = 0; k < n; k++) half[k] = gmm_f32_to_f16(src[k]);
    else memcpy((float *)row + i, src, (size_t)n * sizeof *src);
}

/* Splits blocks [a:B | b:B | ...] into a and b, and merges them. Inlined with constant B for common block sizes. */
static GMM__FORCE_INLINE void gmm__act_split(int64_t B, int64_t n, const float *interleaved, float *a, float *b) {
    int64_t k, t;
    for (k = 0; k < n / B; k++)
        for (t = 0; t < B; t++) {
            a[k * B + t] = interleaved[2 * k * B + t];
            b[k * B + t] = interleaved[2 * k * B + B + t];
        }
}
static GMM__FORCE_INLINE void gmm__act_merge(int64_t B, int64_t n, float *interleaved, const float *a, const float *b) {
    int64_t k, t;
    for (k = 0; k < n / B; k++)
        for (t = 0; t < B; t++) {
            interleaved[2 * k * B + t] = a[k * B + t];
            interleaved[2 * k * B + B + t] = b[k * B + t];
        }
}

/* Reads the pre-activations a, and b where `gated`, of outputs [j0, j0 + n). Blocks of up to GMM__LANES are
   converted together and split, larger ones one by one. Each conversion is written once, since it is inlined. */
static GMM__FORCE_INLINE void gmm__act_read(const gmm__act_job *job, const gmm_mat *x, const void *row, int64_t j0,
                                            int64_t n, float *a, float *b) {
    const int64_t B = job->block;
    if (job->gated && B <= GMM__LANES) {
        float interleaved[2 * GMM__ACT_CHUNK];
        gmm__act_load(x->dtype, row, 2 * j0, 2 * n, interleaved);
        switch (B) {
        case 1: gmm__act_split(1, n, interleaved, a, b); break;
        case 8: gmm__act_split(8, n, interleaved, a, b); break;
        case 16: gmm__act_split(16, n, interleaved, a, b); break;
        default: gmm__act_split(B, n, interleaved, a, b); break;
        }
    } else {
        int64_t i, count;
        int part;
        for (i = 0; i < n; i += count) {
            const int64_t remaining = B - (j0 + i) % B, column = gmm_glu_gate_column(j0 + i, B);
            count = remaining < n - i ? remaining : n - i;
            for (part = 0; part <= job->gated; part++)
                gmm__act_load(x->dtype, row, column + part * B, count, (part ? b : a) + i);
        }
    }
}
static GMM__FORCE_INLINE void gmm__act_write(const gmm__act_job *job, const gmm_mat *dx, void *row, int64_t j0,
                                             int64_t n, const float *a, const float *b) {
    const int64_t B = job->block;
    if (job->gated && B <= GMM__LANES) {
        float interleaved[2 * GMM__ACT_CHUNK];
        switch (B) {
        case 1: gmm__act_merge(1, n, interleaved, a, b); break;
        case 8: gmm__act_merge(8, n, interleaved, a, b); break;
        case 16: gmm__act_merge(16, n, interleaved, a, b); break;
        default: gmm__act_merge(B, n, interleaved, a, b); break;
        }
        gmm__act_store(dx->dtype, row, 2 * j0, 2 * n, interleaved);
    } else {
        int64_t i, count;
        int part;
        for (i = 0; i < n; i += count) {
            const int64_t remaining = B - (j0 + i) % B, column = gmm_glu_gate_column(j0 + i, B);
            count = remaining < n - i ? remaining : n - i;
            for (part = 0; part <= job->gated; part++)
                gmm__act_store(dx->dtype, row, column + part * B, count, (part ? b : a) + i);
        }
    }
}

/* One chunk of a row: pre-activations a and b, the activation f, and its derivatives df/da and df/db. */
typedef struct gmm__act_chunk {
    float a[GMM__ACT_CHUNK], b[GMM__ACT_CHUNK], f[GMM__ACT_CHUNK], fa[GMM__ACT_CHUNK], fb[GMM__ACT_CHUNK];
} gmm__act_chunk;

/* The first n elements of f, with derivatives or without. Each gate has its own loop, which then has no branch. */
static GMM__FORCE_INLINE void gmm__act_derivatives(gmm_gate gate, int gated, gmm_act_coef coef, int64_t n,
                                                   gmm__act_chunk *c) {
    int64_t i;
    for (i = 0; i < n; i++) c->f[i] = gmm_act_point(gate, gated, coef, c->a[i], c->b[i], &c->fa[i], &c->fb[i]);
}
static GMM__FORCE_INLINE void gmm__act_values(gmm_gate gate, int gated, gmm_act_coef coef, int64_t n,
                                              gmm__act_chunk *c) {
    float da, db;
    int64_t i;
    for (i = 0; i < n; i++) c->f[i] = gmm_act_point(gate, gated, coef, c->a[i], c->b[i], &da, &db);
}

/* Rows [begin, end), forward or backward. */
static GMM__FORCE_INLINE void gmm__act_rows(const gmm__act_job *job, int64_t begin, int64_t end) {
    const gmm__call *call = job->call;
    const gmm_activation *d = &call->d.act;
    const gmm_mat *x = &call->mat[GMM__X_], *y = &call->mat[GMM__Y], *dy = &call->mat[GMM__DY];
    const gmm_mat *dx = &call->mat[GMM__DX];
    const int backward = call->op == GMM_OP_ACT_BWD, derivatives = backward && dx->dtype != GMM_NONE;
    gmm__act_chunk c;
    float g[GMM__ACT_CHUNK], out[GMM__ACT_CHUNK];
    int64_t r, j, i;
    memset(c.b, 0, sizeof c.b);
    for (r = begin; r < end; r++) {
        const void *x_row = gmm__at(x, 0, r, 0), *dy_row = backward ? gmm__at(dy, 0, r, 0) : NULL;
        const float p = d->prob ? d->prob[r] : 1.0f;
        float sum[GMM__LANES] = GMM_ZERO;
        for (j = 0; j < call->out; j += job->chunk) {
            const int64_t remaining = call->out - j, n = remaining < job->chunk ? remaining : job->chunk;
            /* loops run over a multiple of the lanes, so that they vectorise without a remainder */
            const int64_t full = (n + GMM__LANES - 1) / GMM__LANES * GMM__LANES;
            gmm__act_read(job, x, x_row, j, n, c.a, c.b);
            for (i = n; i < full; i++) c.a[i] = c.b[i] = 0.0f;
            if (derivatives) {
                switch (call->act.kind) {
#define GMM__X(name, value, text, gate, gated, alpha, betas) \
                case name: gmm__act_derivatives(gate, gated, job->coef, full, &c); break;
                    GMM_ACT_LIST(GMM__X)
#undef GMM__X
                default: break;
                }
            } else {
                switch (call->act.kind) {
#define GMM__X(name, value, text, gate, gated, alpha, betas) \
                case name: gmm__act_values(gate, gated, job->coef, full, &c); break;
                    GMM_ACT_LIST(GMM__X)
#undef GMM__X
                default: break;
                }
            }
            if (backward) gmm__act_load(dy->dtype, dy_row, j, n, g); /* y may be dy */
            if (y->dtype != GMM_NONE) {
                for (i = 0; i < full; i++) out[i] = p * c.f[i];
                gmm__act_store(y->dtype, gmm__at(y, 0, r, 0), j, n, out);
            }
            if (!backward) continue;
            for (i = n; i < full; i++) g[i] = 0.0f;
            if (d->dprob)
                for (i = 0; i < full; i++) sum[i % GMM__LANES] += g[i] * c.f[i];
            if (derivatives) {
                for (i = 0; i < full; i++) {
                    c.a[i] = p * g[i] * c.fa[i];
                    c.b[i] = p * g[i] * c.fb[i];
                }
                gmm__act_write(job, dx, gmm__at(dx, 0, r, 0), j, n, c.a, c.b);
            }
        }
        if (backward && d->dprob) d->dprob[r] = gmm__lanes_sum(sum);
    }
}

/* The same loop compiled for each set of vector instructions. */
static void gmm__act_rows_plain(const gmm__act_job *job, int64_t begin, int64_t end) { gmm__act_rows(job, begin, end); }
#ifdef GMM__X86
__attribute__((target("avx2,fma"))) static void gmm__act_rows_avx2(const gmm__act_job *job, int64_t begin,
                                                                   int64_t end) {
    gmm__act_rows(job, begin, end);
}
__attribute__((target("avx512f"))) static void gmm__act_rows_avx512(const gmm__act_job *job, int64_t begin,
                                                                    int64_t end) {
    gmm__act_rows(job, begin, end);
}
#endif

static void gmm__act_task(const void *arg, int64_t index, int32_t thread) {
    const gmm__act_job *job = (const gmm__act_job *)arg;
    const int64_t begin = index * job->rows_per_task, remaining = job->live - begin;
    const int64_t end = begin + (remaining < job->rows_per_task ? remaining : job->rows_per_task);
    (void)thread;
#ifdef GMM__X86
    if (job->call->ctx->cpu_level == 3) {
        gmm__act_rows_avx512(job, begin, end);
        return;
    }
    if (job->call->ctx->cpu_level == 2) {
        gmm__act_rows_avx2(job, begin, end);
        return;
    }
#endif
    gmm__act_rows_plain(job, begin, end);
}

/* Rows of one task: about 16 Ki elements. */
static int64_t gmm__rows_per_task(int64_t cols) { return cols < 16384 ? 16384 / cols : 1; }

static gmm_status gmm__cpu_launch_act(const gmm__plan *plan, gmm_stream stream) {
    const gmm__call *call = plan->call;
    const gmm_activation *d = &call->d.act;
    const int backward = call->op == GMM_OP_ACT_BWD;
    gmm__act_job job;
    const int64_t B = call->act.interleave ? call->act.interleave : call->out;
    int64_t step = GMM__LANES;
    (void)stream;
    if (B <= GMM__LANES)
        while (step % B) step += GMM__LANES; /* at most 15 * 16 */
    job.call = call;
    job.coef = gmm_act_coefficients(&call->act);
    job.live = gmm__cpu_offsets(&call->groups, NULL);
    job.rows_per_task = gmm__rows_per_task(call->in);
    job.gated = call->in != call->out;
    job.block = B;
    job.chunk = GMM__ACT_CHUNK / step * step;
    gmm__cpu_for(call->ctx, gmm__ceil_div(job.live, job.rows_per_task), (double)job.live * (double)call->in,
                 gmm__act_task, &job);
    if (call->mat[GMM__Y].dtype != GMM_NONE)
        gmm__cpu_tail(&call->mat[GMM__Y], call->groups.tail, job.live, call->rows, call->out);
    if (backward && call->mat[GMM__DX].dtype != GMM_NONE)
        gmm__cpu_tail(&call->mat[GMM__DX], call->groups.tail, job.live, call->rows, call->in);
    if (backward && d->dprob && call->groups.tail == GMM_TAIL_ZERO)
        memset(d->dprob + job.live, 0, (size_t)(call->rows - job.live) * sizeof *d->dprob);
    return GMM_OK;
}

