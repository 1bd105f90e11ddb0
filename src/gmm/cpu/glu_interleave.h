/* CPU engine. Block k of a row or matrix begins at element k B in the blocked layout, and at (k mod 2) ffn + (k div 2)
   B in halves. */
static int64_t gmm__glu_block_offset(const gmm_glu *d, int64_t k, int blocked) {
    return blocked ? k * d->block : (k % 2) * d->ffn + (k / 2) * d->block;
}

/* Copies n elements of `size` bytes. Short copies are loops of constant size, which the compiler expands inline. */
static void gmm__glu_copy(char *dst, const char *src, int64_t n, int64_t size) {
    int64_t i;
    if (n * size >= 32) memcpy(dst, src, (size_t)(n * size));
    else if (size == 1) for (i = 0; i < n; i++) dst[i] = src[i];
    else if (size == 2) for (i = 0; i < n; i++) memcpy(dst + 2 * i, src + 2 * i, 2);
    else if (size == 4) for (i = 0; i < n; i++) memcpy(dst + 4 * i, src + 4 * i, 4);
    else for (i = 0; i < n; i++) memcpy(dst + 8 * i, src + 8 * i, 8);
}

typedef struct gmm__glu_job {
    const gmm__call *call;
    int64_t blocks;         /* per row (axis COLUMNS) or per matrix (axis ROWS) */
    int64_t units;          /* rows (axis COLUMNS), or blocks of all matrices (axis ROWS) */
    int64_t units_per_task;
} gmm__glu_job;

static void gmm__glu_task(const void *arg, int64_t index, int32_t thread) {
    const gmm__glu_job *job = (const gmm__glu_job *)arg;
    const gmm_glu *d = &job->call->d.glu;
    const gmm_mat *src = &job->call->mat[GMM__X_], *dst = &job->call->mat[GMM__Y];
    const int64_t size = gmm_dtype_bits(src->dtype) / 8, begin = index * job->units_per_task;
    const int64_t end = gmm__min_i64(begin + job->units_per_task, job->units);
    int64_t unit, k, i;
    (void)thread;
    for (unit = begin; unit < end; unit++) {
        if (d->axis == GMM_GLU_COLUMNS) {
            const char *src_row = (const char *)gmm__at(src, 0, unit, 0);
            char *dst_row = (char *)gmm__at(dst, 0, unit, 0);
            for (k = 0; k < job->blocks; k++) {
                const int64_t dst_offset = gmm__glu_block_offset(d, k, !d->inverse);
                const int64_t src_offset = gmm__glu_block_offset(d, k, d->inverse);
                gmm__glu_copy(dst_row + dst_offset * size, src_row + src_offset * size, d->block, size);
            }
        } else {
            const int64_t matrix = unit / job->blocks;
            const int64_t dst_offset = gmm__glu_block_offset(d, unit % job->blocks, !d->inverse);
            const int64_t src_offset = gmm__glu_block_offset(d, unit % job->blocks, d->inverse);
            const int dense = src->ld == d->cols && dst->ld == d->cols;
            const int64_t rows = dense ? 1 : d->block, n = dense ? d->block * d->cols : d->cols;
            for (i = 0; i < rows; i++)
                gmm__glu_copy((char *)gmm__at(dst, matrix, dst_offset + i, 0),
                              (const char *)gmm__at(src, matrix, src_offset + i, 0), n, size);
        }
    }
}

static gmm_status gmm__cpu_launch_glu_interleave(const gmm__plan *plan, gmm_stream stream) {
    const gmm_glu *d = &plan->call->d.glu;
    gmm__glu_job job;
    (void)stream;
    if (d->count == 0) return GMM_OK; /* then products of the other extents may not fit 64 bits */
    job.call = plan->call;
    job.blocks = 2 * (d->ffn / d->block);
    job.units = d->axis == GMM_GLU_COLUMNS ? d->count : d->count * job.blocks;
    job.units_per_task = gmm__rows_per_task(d->axis == GMM_GLU_COLUMNS ? 2 * d->ffn : d->block * d->cols);
    gmm__cpu_for(plan->call->ctx, gmm__ceil_div(job.units, job.units_per_task),
                 2.0 * (double)d->count * (double)d->ffn * (d->axis == GMM_GLU_COLUMNS ? 1.0 : (double)d->cols),
                 gmm__glu_task, &job);
    return GMM_OK;
}

