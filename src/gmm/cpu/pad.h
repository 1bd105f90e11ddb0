/* --- CPU engine: row i of a group moves from from[g] + i to to[g] + i, as far as the group reaches in `from` --- */

typedef struct gmm__pad_job {
    const gmm__call *call;
    const int64_t *from, *to; /* [G + 1] offsets of both splits, in the workspace */
    int64_t rows_per_task;
} gmm__pad_job;

static void gmm__pad_task(const void *arg, int64_t index, int32_t thread) {
    const gmm__pad_job *job = (const gmm__pad_job *)arg;
    const gmm__call *call = job->call;
    const gmm_padding *d = &call->d.pad;
    const gmm_mat *src = &call->mat[GMM__X_], *dst = &call->mat[GMM__Y];
    const size_t bytes = (size_t)(d->cols * (gmm_dtype_bits(src->dtype) / 8));
    const int64_t G = call->groups.count, begin = index * job->rows_per_task, left = job->to[G] - begin;
    const int64_t end = begin + (left < job->rows_per_task ? left : job->rows_per_task);
    int64_t g = gmm__cpu_find(job->to, G, begin), r;
    (void)thread;
    for (r = begin; r < end; r++) {
        int64_t i;
        while (job->to[g + 1] <= r) g++;
        i = r - job->to[g];
        if (i < job->from[g + 1] - job->from[g]) {
            memcpy(gmm__at(dst, 0, r, 0), gmm__at(src, 0, job->from[g] + i, 0), bytes);
            if (d->dst_prob) d->dst_prob[r] = d->src_prob[job->from[g] + i];
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
    int64_t *plain = (int64_t *)gmm__part(plan, 0), *padded = (int64_t *)gmm__part(plan, 1), g;
    gmm__pad_job job;
    (void)stream;
    (void)gmm__cpu_offsets(&call->groups, plain);
    padded[0] = 0;
    for (g = 0; g < G; g++) {
        const int64_t room = d->padded_capacity - padded[g];
        int64_t size = gmm__round_up(plain[g + 1] - plain[g], d->align);
        if (size > room) {
            size = room;
            if (call->groups.fault) *call->groups.fault |= (uint32_t)GMM_FAULT_CAPACITY;
        }
        padded[g + 1] = padded[g] + size;
        if (pad && d->sizes) d->sizes[g] = (int32_t)size;
    }
    job.call = call;
    job.from = pad ? plain : padded;
    job.to = pad ? padded : plain;
    job.rows_per_task = gmm__rows_per_task(d->cols);
    gmm__cpu_for(call->ctx, gmm__ceil_div(job.to[G], job.rows_per_task), (double)job.to[G] * (double)d->cols,
                 gmm__pad_task, &job);
    gmm__cpu_tail(dst, call->groups.tail, job.to[G], dst_rows, d->cols);
    if (d->dst_prob && call->groups.tail == GMM_TAIL_ZERO)
        memset(d->dst_prob + job.to[G], 0, (size_t)(dst_rows - job.to[G]) * sizeof *d->dst_prob);
    return GMM_OK;
}

static int gmm__cpu_plan_pad(const gmm__call *call, gmm__plan *plan) {
    gmm__reserve(plan, 0, ((size_t)call->groups.count + 1) * sizeof(int64_t));
    gmm__reserve(plan, 1, ((size_t)call->groups.count + 1) * sizeof(int64_t));
    return 1;
}

