/* --- CPU engine: row i of group g is copied from src_offsets[g] + i to dst_offsets[g] + i; padding is zeroed --- */

typedef struct gmm__pad_job {
    const gmm__call *call;
    const int64_t *src_offsets, *dst_offsets; /* [G + 1] offsets of both splits, in the workspace */
    int64_t rows_per_task;
} gmm__pad_job;

static void gmm__pad_task(const void *arg, int64_t index, int32_t thread) {
    const gmm__pad_job *job = (const gmm__pad_job *)arg;
    const gmm__call *call = job->call;
    const gmm_padding *d = &call->d.pad;
    const gmm_mat *src = &call->mat[GMM__X_], *dst = &call->mat[GMM__Y];
    const size_t bytes = (size_t)(d->cols * (gmm_dtype_bits(src->dtype) / 8));
    const int64_t G = call->groups.count, begin = index * job->rows_per_task, remaining = job->dst_offsets[G] - begin;
    const int64_t end = begin + (remaining < job->rows_per_task ? remaining : job->rows_per_task);
    int64_t g = gmm__cpu_find_group(job->dst_offsets, G, begin), r;
    (void)thread;
    for (r = begin; r < end; r++) {
        int64_t i;
        while (job->dst_offsets[g + 1] <= r) g++;
        i = r - job->dst_offsets[g];
        if (i < job->src_offsets[g + 1] - job->src_offsets[g]) {
            memcpy(gmm__at(dst, 0, r, 0), gmm__at(src, 0, job->src_offsets[g] + i, 0), bytes);
            if (d->dst_prob) d->dst_prob[r] = d->src_prob[job->src_offsets[g] + i];
        } else {
            memset(gmm__at(dst, 0, r, 0), 0, bytes);
            if (d->dst_prob) d->dst_prob[r] = 0.0f;
        }
    }
}

static gmm_status gmm__cpu_launch_pad(const gmm__plan *plan, gmm_stream stream) {
    const gmm__call *call = plan->call;
    const gmm_padding *d = &call->d.pad;
    const gmm_mat *dst = &call->mat[GMM__Y];
    const int pad = call->op == GMM_OP_PAD;
    const int64_t G = call->groups.count, dst_rows = pad ? d->padded_capacity : call->rows;
    int64_t *unpadded = (int64_t *)gmm__region(plan, 0), *padded = (int64_t *)gmm__region(plan, 1), g;
    gmm__pad_job job;
    (void)stream;
    (void)gmm__cpu_offsets(&call->groups, unpadded);
    padded[0] = 0;
    for (g = 0; g < G; g++) {
        const int64_t remaining = d->padded_capacity - padded[g];
        int64_t size = gmm__round_up(unpadded[g + 1] - unpadded[g], d->align);
        if (size > remaining) {
            size = remaining;
            if (call->groups.fault) *call->groups.fault |= (uint32_t)GMM_FAULT_CAPACITY;
        }
        padded[g + 1] = padded[g] + size;
        if (pad && d->sizes) d->sizes[g] = (int32_t)size;
    }
    job.call = call;
    job.src_offsets = pad ? unpadded : padded;
    job.dst_offsets = pad ? padded : unpadded;
    job.rows_per_task = gmm__rows_per_task(d->cols);
    gmm__cpu_for(call->ctx, gmm__ceil_div(job.dst_offsets[G], job.rows_per_task),
                 (double)job.dst_offsets[G] * (double)d->cols, gmm__pad_task, &job);
    gmm__cpu_tail(dst, call->groups.tail, job.dst_offsets[G], dst_rows, d->cols);
    if (d->dst_prob && call->groups.tail == GMM_TAIL_ZERO)
        memset(d->dst_prob + job.dst_offsets[G], 0, (size_t)(dst_rows - job.dst_offsets[G]) * sizeof *d->dst_prob);
    return GMM_OK;
}

static int gmm__cpu_plan_pad(const gmm__call *call, gmm__plan *plan) {
    gmm__reserve(plan, 0, ((size_t)call->groups.count + 1) * sizeof(int64_t));
    gmm__reserve(plan, 1, ((size_t)call->groups.count + 1) * sizeof(int64_t));
    return 1;
}

