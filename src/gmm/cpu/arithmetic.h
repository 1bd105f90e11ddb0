/* CPU engine. A task is several rows, or a part of a long row. It converts GMM__SMALL_PIECE elements at a time to fp32
   on the stack. */
enum { GMM__SMALL_PIECE = 1024, GMM__SMALL_TASK = 16 * GMM__SMALL_PIECE };

static int64_t gmm__small_tasks_per_row(const gmm__call *call) { return gmm__ceil_div(call->in, GMM__SMALL_TASK); }
static void gmm__small_for(const gmm__call *call, gmm__task task) {
    const int64_t blocks = gmm__ceil_div(call->rows, gmm__rows_per_task(call->in));
    gmm__cpu_for(call->ctx, blocks * gmm__small_tasks_per_row(call), (double)call->rows * (double)call->in, task, call);
}

/* Rows [row, row_end) and columns [col, col_end) of a task. */
typedef struct gmm__small_range {
    int64_t row, row_end, col, col_end;
} gmm__small_range;
static gmm__small_range gmm__small_range_of(const gmm__call *call, int64_t task) {
    const int64_t tasks_per_row = gmm__small_tasks_per_row(call), rows = gmm__rows_per_task(call->in);
    gmm__small_range p;
    p.row = task / tasks_per_row * rows;
    p.row_end = call->rows - p.row < rows ? call->rows : p.row + rows;
    p.col = task % tasks_per_row * GMM__SMALL_TASK;
    p.col_end = call->in - p.col < GMM__SMALL_TASK ? call->in : p.col + GMM__SMALL_TASK;
    return p;
}

static void gmm__accumulate_task(const void *arg, int64_t task, int32_t thread) {
    const gmm__call *call = (const gmm__call *)arg;
    const gmm_accumulation *d = &call->d.sum;
    const gmm_mat *x = &call->mat[GMM__X_], *y = &call->mat[GMM__Y];
    const gmm__small_range p = gmm__small_range_of(call, task);
    float sum[GMM__SMALL_PIECE], addend[GMM__SMALL_PIECE];
    int64_t row, col, n, i, j;
    (void)thread;
    for (row = p.row; row < p.row_end; row++)
        for (col = p.col; col < p.col_end; col += n) {
            n = p.col_end - col < GMM__SMALL_PIECE ? p.col_end - col : (int64_t)GMM__SMALL_PIECE;
            gmm__row_load(x->dtype, gmm__at(x, 0, row, col), sum, n);
            for (j = 1; j < d->count; j++) {
                gmm__row_load(x->dtype, gmm__at(x, j, row, col), addend, n);
                for (i = 0; i < n; i++) sum[i] += addend[i];
            }
            for (i = 0; i < n; i++) sum[i] *= d->scale;
            if (d->beta != 0.0f) {
                gmm__row_load(y->dtype, gmm__at(y, 0, row, col), addend, n);
                for (i = 0; i < n; i++) addend[i] *= d->beta; /* a separate loop, so that products are rounded */
                for (i = 0; i < n; i++) sum[i] += addend[i];
            }
            gmm__row_store(y->dtype, gmm__at(y, 0, row, col), sum, n);
        }
}

static gmm_status gmm__cpu_launch_accumulate(const gmm__plan *plan, gmm_stream stream) {
    (void)stream;
    gmm__small_for(plan->call, gmm__accumulate_task);
    return GMM_OK;
}

static void gmm__convert_task(const void *arg, int64_t task, int32_t thread) {
    const gmm__call *call = (const gmm__call *)arg;
    const gmm_mat *src = &call->mat[GMM__X_], *dst = &call->mat[GMM__Y];
    const int64_t size = gmm_dtype_bits(src->dtype) / 8;
    const gmm__small_range p = gmm__small_range_of(call, task);
    float piece[GMM__SMALL_PIECE];
    int64_t row, col, n;
    (void)thread;
    for (row = p.row; row < p.row_end; row++) {
        if (src->dtype == dst->dtype) {
            memcpy(gmm__at(dst, 0, row, p.col), gmm__at(src, 0, row, p.col), (size_t)((p.col_end - p.col) * size));
            continue;
        }
        for (col = p.col; col < p.col_end; col += n) {
            n = p.col_end - col < GMM__SMALL_PIECE ? p.col_end - col : (int64_t)GMM__SMALL_PIECE;
            gmm__row_load(src->dtype, gmm__at(src, 0, row, col), piece, n);
            gmm__row_store(dst->dtype, gmm__at(dst, 0, row, col), piece, n);
        }
    }
}

static gmm_status gmm__cpu_launch_convert(const gmm__plan *plan, gmm_stream stream) {
    (void)stream;
    gmm__small_for(plan->call, gmm__convert_task);
    return GMM_OK;
}

