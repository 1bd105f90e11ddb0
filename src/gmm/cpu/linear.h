/* --- CPU engine: forward, dgrad, wgrad and bias gradient of grouped linear layers --- */

enum { GMM__PART_OFFSETS, GMM__PART_STARTS, GMM__PART_PADDED, GMM__PART_SCRATCH };

/* Arguments of the tasks of a linear operation. */
typedef struct gmm__cpu_linear {
    const gmm__call *call;
    const gmm__cpu_tile *tile;
    const int64_t *offsets; /* [G + 1] rows */
    const int64_t *starts;  /* [G + 1] row blocks before each group */
    const int64_t *padded;  /* [G + 1] rows before each group in padded copies */
    const float *bias_scale; /* bias gradient; NULL = ones */
    gmm__cpu_index dy_index; /* bias gradient */
    void *scratch;
    gmm__cpu_extent extent;
    int64_t col_blocks, row_blocks;
} gmm__cpu_linear;

/* The group g with starts[g] <= i < starts[g + 1]. */
static int64_t gmm__cpu_find_group(const int64_t *starts, int64_t groups, int64_t i) {
    int64_t low = 0, high = groups;
    while (high - low > 1) {
        const int64_t mid = low + (high - low) / 2;
        if (starts[mid] <= i) low = mid;
        else high = mid;
    }
    return low;
}

/* The operand in a role for group g: a quantized matrix from line first_line on, or floats from element (row, col) on,
   with k along the rows (along_rows) or along the columns. */
static gmm__cpu_operand gmm__cpu_operand_of(const gmm__cpu_linear *job, int role, int64_t g, int64_t first_line,
                                            int64_t row, int64_t col, int along_rows) {
    const gmm__call *call = job->call;
    const gmm_mat *m = &call->mat[role];
    const int weight = role == GMM__W;
    gmm__cpu_operand f;
    memset(&f, 0, sizeof f);
    f.dtype = m->dtype;
    f.first_line = first_line;
    f.quantized = m->scaling != GMM_SCALING_NONE;
    if (GMM__QUANTIZED(&f))
        f.view = gmm__qview_of(m, call->direction[role], !weight, g, weight ? 0 : job->offsets[g],
                               weight ? 0 : job->padded[g], weight ? call->out : job->offsets[g + 1] - job->offsets[g],
                               role == GMM__DY ? call->out : call->in);
    else {
        f.index = gmm__cpu_index_of(&call->d.linear, role);
        f.first_row = row;
        f.along_rows = along_rows;
        /* a matrix without rows may have no address */
        if (!f.index.at || f.index.rows) f.base = gmm__at(m, weight ? g : 0, f.index.at ? 0 : row, col);
        f.stride_i = along_rows ? 1 : m->ld;
        f.stride_k = along_rows ? m->ld : 1;
    }
    return f;
}

/* Reports the entries past the matrices of a call's indices. */
static void gmm__cpu_linear_faults(const gmm__call *call, int64_t live) {
    const gmm__cpu_index x = gmm__cpu_index_of(&call->d.linear, GMM__X_);
    const gmm__cpu_index dy = gmm__cpu_index_of(&call->d.linear, GMM__DY);
    gmm__cpu_index_faults(&x, live, call->groups.fault);
    gmm__cpu_index_faults(&dy, live, call->groups.fault);
}

/* One block of y or dx: rows of one group by columns of the output. */
static void gmm__cpu_rows_task(const void *arg, int64_t index, int32_t thread) {
    const gmm__cpu_linear *job = (const gmm__cpu_linear *)arg;
    const gmm__call *call = job->call;
    const gmm_linear *d = &call->d.linear;
    const int fwd = call->op == GMM_OP_LINEAR_FWD;
    const gmm_mat *bias = &call->mat[GMM__BIAS], *out = &call->mat[fwd ? GMM__Y : GMM__DX];
    const int64_t cols = fwd ? call->out : call->in, K = fwd ? call->in : call->out;
    const int64_t block = index / job->col_blocks, g = gmm__cpu_find_group(job->starts, call->groups.count, block);
    const int64_t r0 = job->offsets[g] + (block - job->starts[g]) * GMM__MC, remaining = job->offsets[g + 1] - r0;
    const int64_t m = gmm__min_i64(remaining, GMM__MC), c0 = (index % job->col_blocks) * GMM__NC;
    const int64_t n = gmm__min_i64(cols - c0, GMM__NC);
    const gmm__cpu_scratch s = gmm__cpu_scratch_at(job->scratch, job->extent, thread);
    float addend[GMM__NC], alpha = gmm__alpha(d, g);
    gmm__cpu_operand A, B;
    int64_t i;

    A = gmm__cpu_operand_of(job, fwd ? GMM__X_ : GMM__DY, g, r0 - job->offsets[g], r0, 0, 0);
    B = gmm__cpu_operand_of(job, GMM__W, g, c0, fwd ? c0 : 0, fwd ? 0 : c0, !fwd);
    gmm__cpu_block(job->tile, &s, &A, m, &B, n, K);
    if (bias->dtype != GMM_NONE) gmm__row_load(bias->dtype, gmm__at(bias, g, 0, c0), addend, n);
    if (GMM__QUANTIZED(&B)) alpha = 1.0f;
    for (i = 0; i < m && GMM__QUANTIZED(&B); i++)
        gmm__cpu_scale_row(s.c + i * GMM__NC, n, gmm__alpha(d, g), &A, i, &B);
    for (i = 0; i < m; i++) {
        float *const row = s.c + i * GMM__NC;
        gmm__cpu_scale_add_row(row, n, alpha, bias->dtype != GMM_NONE ? addend : NULL,
                               d->bias_scale ? d->bias_scale[r0 + i] : 1.0f);
        gmm__cpu_store_row(row, n, d->prob ? d->prob[r0 + i] : 1.0f, NULL, 0.0f, d->y_add ? 1.0f : 0.0f, out->dtype,
                           gmm__at(out, 0, r0 + i, c0));
    }
}

/* One block of dw: out features by in features of one group, summed over the group's rows. */
static void gmm__cpu_wgrad_task(const void *arg, int64_t index, int32_t thread) {
    const gmm__cpu_linear *job = (const gmm__cpu_linear *)arg;
    const gmm__call *call = job->call;
    const gmm_mat *x = &call->mat[GMM__X_], *dw = &call->mat[GMM__DW];
    const gmm_grad *grad = &call->grad[GMM__DW];
    const int64_t per_group = job->row_blocks * job->col_blocks, g = index / per_group;
    const int64_t n0 = index % per_group / job->col_blocks * GMM__MC, k0 = index % job->col_blocks * GMM__NC;
    const int64_t n = gmm__min_i64(call->out - n0, GMM__MC);
    const int64_t k = gmm__min_i64(call->in - k0, GMM__NC);
    const int64_t r0 = job->offsets[g], rows = job->offsets[g + 1] - r0;
    const gmm__cpu_scratch s = gmm__cpu_scratch_at(job->scratch, job->extent, thread);
    const float beta = gmm__grad_beta(grad, g);
    gmm__cpu_operand A, B;
    float alpha;
    int64_t i;

    if (grad->frozen && grad->frozen[g]) return;
    if (rows == 0 && beta == 1.0f) return; /* an empty group keeps all bits, also of -0.0 and NaN */
    A = gmm__cpu_operand_of(job, GMM__DY, g, n0, r0, n0, 1);
    B = gmm__cpu_operand_of(job, GMM__X_, g, k0, r0, k0, 1);
    /* the Hadamard transform mixes 16 rows, and leaves no zeros in the last block */
    gmm__cpu_block(job->tile, &s, &A, n, &B, k, x->hadamard ? gmm__round_up(rows, 16) : rows);
    /* an empty sum is +0, whatever the sign of alpha */
    alpha = rows ? gmm__alpha(&call->d.linear, g) : 1.0f;
    for (i = 0; i < n && rows && GMM__QUANTIZED(&B); i++) gmm__cpu_scale_row(s.c + i * GMM__NC, k, alpha, &A, i, &B);
    if (GMM__QUANTIZED(&B)) alpha = 1.0f;
    for (i = 0; i < n; i++)
        gmm__cpu_store_row(s.c + i * GMM__NC, k, alpha, NULL, 0.0f, beta, dw->dtype, gmm__at(dw, g, n0 + i, k0));
}

/* Tasks and work of a product of `rows` rows in `blocks` row blocks. Every block packs the weights; in wgrad every
   group stores its gradient. */
static int64_t gmm__cpu_product_tasks(const gmm__call *call, int64_t blocks) {
    const int fwd = call->op == GMM_OP_LINEAR_FWD;
    if (call->op == GMM_OP_LINEAR_WGRAD)
        return call->groups.count * gmm__ceil_div(call->out, GMM__MC) * gmm__ceil_div(call->in, GMM__NC);
    return blocks * gmm__ceil_div(fwd ? call->out : call->in, GMM__NC);
}
static double gmm__cpu_product_work(const gmm__call *call, int64_t rows, int64_t blocks) {
    const int64_t passes = call->op == GMM_OP_LINEAR_WGRAD ? call->groups.count : blocks;
    return (double)call->in * (double)call->out * ((double)passes + (double)rows / GMM__CPU_MULTIPLY_ADDS);
}

static int gmm__cpu_plan_product(const gmm__call *call, gmm__plan *plan) {
    const size_t groups = (size_t)call->groups.count + 1;
    const int64_t blocks = call->rows / GMM__MC + gmm__min_i64(call->groups.count, call->rows); /* at most */
    const int32_t level = call->ctx->cpu_level, threads = gmm__cpu_threads(call->ctx,
        gmm__cpu_product_tasks(call, blocks), gmm__cpu_product_work(call, call->rows, blocks));
    plan->kernel = level;
    plan->kernel_name = level == 3 ? "AVX-512" : level == 2 ? "AVX2" : "plain C";
    gmm__reserve(plan, GMM__PART_OFFSETS, groups * sizeof(int64_t));
    gmm__reserve(plan, GMM__PART_STARTS, groups * sizeof(int64_t));
    gmm__reserve(plan, GMM__PART_PADDED, groups * sizeof(int64_t));
    gmm__reserve(plan, GMM__PART_SCRATCH,
                 (size_t)threads * gmm__cpu_extent_bytes(gmm__cpu_extent_of(call, &gmm__cpu_tiles[level])));
    (void)snprintf(plan->note, sizeof plan->note, "up to %d thread%s", (int)threads, threads == 1 ? "" : "s");
    return 1;
}

static gmm_status gmm__cpu_launch_product(const gmm__plan *plan, gmm_stream stream) {
    const gmm__call *call = plan->call;
    const int64_t G = call->groups.count;
    int64_t *offsets = (int64_t *)gmm__region(plan, GMM__PART_OFFSETS);
    int64_t *starts = (int64_t *)gmm__region(plan, GMM__PART_STARTS);
    int64_t *padded = (int64_t *)gmm__region(plan, GMM__PART_PADDED);
    const int64_t live = gmm__cpu_offsets(&call->groups, offsets);
    gmm__cpu_linear job;
    int64_t blocks, g;

    (void)stream;
    job.call = call;
    job.tile = &gmm__cpu_tiles[plan->kernel];
    job.offsets = offsets;
    job.starts = starts;
    job.padded = padded;
    job.scratch = gmm__region(plan, GMM__PART_SCRATCH);
    job.extent = gmm__cpu_extent_of(call, job.tile);
    starts[0] = padded[0] = 0;
    for (g = 0; g < G; g++) {
        padded[g + 1] = padded[g] + gmm_group_rows(offsets[g + 1] - offsets[g]);
        starts[g + 1] = starts[g] + gmm__ceil_div(offsets[g + 1] - offsets[g], GMM__MC);
    }
    blocks = starts[G];
    gmm__cpu_linear_faults(call, live);
    if (call->op == GMM_OP_LINEAR_WGRAD) {
        job.row_blocks = gmm__ceil_div(call->out, GMM__MC);
        job.col_blocks = gmm__ceil_div(call->in, GMM__NC);
        gmm__cpu_for(call->ctx, gmm__cpu_product_tasks(call, blocks), gmm__cpu_product_work(call, live, blocks),
                     gmm__cpu_wgrad_task, &job);
    } else {
        const int64_t cols = call->op == GMM_OP_LINEAR_FWD ? call->out : call->in;
        job.row_blocks = blocks;
        job.col_blocks = gmm__ceil_div(cols, GMM__NC);
        gmm__cpu_for(call->ctx, gmm__cpu_product_tasks(call, blocks), gmm__cpu_product_work(call, live, blocks),
                     gmm__cpu_rows_task, &job);
        gmm__cpu_tail(&call->mat[call->op == GMM_OP_LINEAR_FWD ? GMM__Y : GMM__DX], call->groups.tail, live, call->rows,
                      cols);
    }
    return GMM_OK;
}

enum { GMM__CHUNK = 256 }; /* columns or rows of one task of a streaming operation */

/* Loads n elements of dy's row r from column c on, through the index if there is one. */
static void gmm__cpu_load_dy(const gmm__cpu_linear *job, int64_t r, int64_t c, float *dst, int64_t n) {
    const gmm_mat *dy = &job->call->mat[GMM__DY];
    const int64_t row = gmm__cpu_indexed_row(&job->dy_index, r);
    gmm__cpu_load(dy->dtype, row < 0 ? NULL : gmm__at(dy, 0, row, c), dst, n);
}

/* A chunk of columns of db of one group. */
static void gmm__cpu_bgrad_task(const void *arg, int64_t index, int32_t thread) {
    const gmm__cpu_linear *job = (const gmm__cpu_linear *)arg;
    const gmm__call *call = job->call;
    const gmm_mat *db = &call->mat[GMM__DB];
    const gmm_grad *grad = &call->grad[GMM__DB];
    const float *scale = job->bias_scale;
    const int64_t g = index / job->col_blocks, c0 = index % job->col_blocks * GMM__CHUNK;
    const int64_t n = gmm__min_i64(call->out - c0, GMM__CHUNK);
    const float beta = gmm__grad_beta(grad, g);
    float sum[GMM__CHUNK] = { 0 }, row[GMM__CHUNK];
    int64_t r, i;
    (void)thread;
    if (grad->frozen && grad->frozen[g]) return;
    if (job->offsets[g] == job->offsets[g + 1] && beta == 1.0f) return;
    for (r = job->offsets[g]; r < job->offsets[g + 1]; r++) {
        const float s = scale ? scale[r] : 1.0f;
        gmm__cpu_load_dy(job, r, c0, row, n);
        for (i = 0; i < n; i++) sum[i] += s * row[i];
    }
    gmm__cpu_store_row(sum, n, 1.0f, NULL, 0.0f, beta, db->dtype, gmm__at(db, g, 0, c0));
}

/* A chunk of rows of d_bias_scale. Sums accumulate in lanes, in an order that depends on N alone. */
static void gmm__cpu_bias_scale_task(const void *arg, int64_t index, int32_t thread) {
    const gmm__cpu_linear *job = (const gmm__cpu_linear *)arg;
    const gmm__call *call = job->call;
    const gmm_mat *bias = &call->mat[GMM__BIAS];
    float *out = call->d.linear.d_bias_scale;
    const int64_t G = call->groups.count, live = job->offsets[G], r1 = (index + 1) * GMM__CHUNK;
    int64_t r, c;
    (void)thread;
    for (r = index * GMM__CHUNK; r < r1 && r < live; r++) {
        const int64_t g = gmm__cpu_find_group(job->offsets, G, r);
        float lane[GMM__LANES] = { 0 }, row[GMM__CHUNK], b[GMM__CHUNK], sum;
        for (c = 0; c < call->out; c += GMM__CHUNK) {
            const int64_t n = gmm__min_i64(call->out - c, GMM__CHUNK);
            gmm__cpu_load_dy(job, r, c, row, n);
            gmm__row_load(bias->dtype, gmm__at(bias, g, 0, c), b, n);
            gmm__lanes_add(lane, row, b, n);
        }
        sum = gmm__lanes_sum(lane);
        out[r] = call->d.linear.d_bias_scale_add ? out[r] + sum : sum;
    }
}

/* db of a call from its dy; `linear` has bias_scale and dy_index. */
static void gmm__cpu_bgrad(const gmm__call *call, const int64_t *offsets, const gmm_linear *linear) {
    gmm__cpu_linear job;
    memset(&job, 0, sizeof job);
    job.call = call;
    job.offsets = offsets;
    job.bias_scale = linear->bias_scale;
    job.dy_index = gmm__cpu_index_of(linear, GMM__DY);
    job.col_blocks = gmm__ceil_div(call->out, GMM__CHUNK);
    gmm__cpu_for(call->ctx, call->groups.count * job.col_blocks,
                 (double)call->out * (double)(call->groups.count + offsets[call->groups.count]), gmm__cpu_bgrad_task,
                 &job);
}

static int gmm__cpu_plan_linear_bgrad(const gmm__call *call, gmm__plan *plan) {
    gmm__reserve(plan, GMM__PART_OFFSETS, ((size_t)call->groups.count + 1) * sizeof(int64_t));
    return 1;
}

static gmm_status gmm__cpu_launch_linear_bgrad(const gmm__plan *plan, gmm_stream stream) {
    const gmm__call *call = plan->call;
    int64_t *offsets = (int64_t *)gmm__region(plan, GMM__PART_OFFSETS);
    const int64_t live = gmm__cpu_offsets(&call->groups, offsets);
    gmm__cpu_linear job;
    int64_t r;
    (void)stream;
    memset(&job, 0, sizeof job);
    job.call = call;
    job.offsets = offsets;
    job.dy_index = gmm__cpu_index_of(&call->d.linear, GMM__DY);
    gmm__cpu_linear_faults(call, live);
    if (call->mat[GMM__DB].dtype != GMM_NONE) gmm__cpu_bgrad(call, offsets, &call->d.linear);
    if (call->d.linear.d_bias_scale) {
        gmm__cpu_for(call->ctx, gmm__ceil_div(live, GMM__CHUNK), (double)live * (double)call->out,
                     gmm__cpu_bias_scale_task, &job);
        if (call->groups.tail == GMM_TAIL_ZERO)
            for (r = live; r < call->rows; r++) call->d.linear.d_bias_scale[r] = 0.0f;
    }
    return GMM_OK;
}

