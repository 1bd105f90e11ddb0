/* CPU engine. Run k of a row or matrix is B elements at k B in blocks, and at (k mod 2) ffn + (k div 2) B in halves. */
static int64_t gmm__glu_run(const gmm_glu *d, int64_t k, int blocks) {
    return blocks ? k * d->block : (k % 2) * d->ffn + (k / 2) * d->block;
}

/* n elements of a constant size; the short ones without a call of memcpy. */
static void gmm__glu_copy(char *to, const char *from, int64_t n, int64_t size) {
    int64_t i;
    if (n * size >= 32) memcpy(to, from, (size_t)(n * size));
    else if (size == 1) for (i = 0; i < n; i++) to[i] = from[i];
    else if (size == 2) for (i = 0; i < n; i++) memcpy(to + 2 * i, from + 2 * i, 2);
    else if (size == 4) for (i = 0; i < n; i++) memcpy(to + 4 * i, from + 4 * i, 4);
    else for (i = 0; i < n; i++) memcpy(to + 8 * i, from + 8 * i, 8);
}

typedef struct gmm__glu_job {
    const gmm__call *call;
    int64_t runs;  /* per row (columns) or matrix (rows) */
    int64_t items; /* rows (columns) or runs of all matrices (rows) */
    int64_t items_per_task;
} gmm__glu_job;

static void gmm__glu_task(const void *arg, int64_t index, int32_t thread) {
    const gmm__glu_job *job = (const gmm__glu_job *)arg;
    const gmm_glu *d = &job->call->d.glu;
    const gmm_mat *src = &job->call->mat[GMM__X_], *dst = &job->call->mat[GMM__Y];
    const int64_t size = gmm_dtype_bits(src->dtype) / 8, begin = index * job->items_per_task, left = job->items - begin;
    const int64_t end = begin + (left < job->items_per_task ? left : job->items_per_task);
    int64_t item, k, i;
    (void)thread;
    for (item = begin; item < end; item++) {
        if (d->axis == GMM_GLU_COLUMNS) {
            const char *from = (const char *)gmm__at(src, 0, item, 0);
            char *to = (char *)gmm__at(dst, 0, item, 0);
            for (k = 0; k < job->runs; k++)
                gmm__glu_copy(to + gmm__glu_run(d, k, !d->inverse) * size, from + gmm__glu_run(d, k, d->inverse) * size,
                              d->block, size);
        } else {
            const int64_t matrix = item / job->runs;
            const int64_t to = gmm__glu_run(d, item % job->runs, !d->inverse);
            const int64_t from = gmm__glu_run(d, item % job->runs, d->inverse);
            const int dense = src->ld == d->cols && dst->ld == d->cols;
            const int64_t rows = dense ? 1 : d->block, n = dense ? d->block * d->cols : d->cols;
            for (i = 0; i < rows; i++)
                gmm__glu_copy((char *)gmm__at(dst, matrix, to + i, 0),
                              (const char *)gmm__at(src, matrix, from + i, 0), n, size);
        }
    }
}

static gmm_status gmm__cpu_launch_glu_interleave(const gmm__plan *plan, gmm_stream stream) {
    const gmm_glu *d = &plan->call->d.glu;
    gmm__glu_job job;
    (void)stream;
    job.call = plan->call;
    job.runs = 2 * (d->ffn / d->block);
    job.items = d->axis == GMM_GLU_COLUMNS ? d->count : d->count * job.runs;
    job.items_per_task = gmm__rows_per_task(d->axis == GMM_GLU_COLUMNS ? 2 * d->ffn : d->block * d->cols);
    gmm__cpu_for(plan->call->ctx, gmm__ceil_div(job.items, job.items_per_task),
                 2.0 * (double)d->count * (double)d->ffn * (d->axis == GMM_GLU_COLUMNS ? 1.0 : (double)d->cols),
                 gmm__glu_task, &job);
    return GMM_OK;
}

