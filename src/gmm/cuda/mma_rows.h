/* .................................................... 14.12 MMA engine: activation, routing, rows, gated layout ... */

#ifdef __CUDACC__

/* Plans and launches of the MMA engine's activation, routing, permute, pad and gated layout. */

/* Regions of the workspace, by family of operations. E is the number of experts. Activations have GMM__ROW_OFFSETS, and
   pad and unpad GMM__TILE_SUMS besides, of blocks of `align` rows. */
enum {
    GMM__ROUTE_COUNTS,  /* [E] int32: tokens per expert */
    GMM__ROUTE_LOSSES,  /* float: partial sums of the losses, before that of Sinkhorn's columns */
    GMM__ROUTE_SCRATCH, /* float: E values and those of groups for each warp, where shared memory does not hold them */
    GMM__ROUTE_SEQUENCES, /* [sequences][E] int32: counts by sequence */
    GMM__ROUTE_VALID,   /* [sequences] int32: tokens that are no padding */
    GMM__ROUTE_MULTIPLIERS  /* [E + 1] float: Sinkhorn's multipliers of experts, and whether they have converged */
};
enum {
    GMM__SORT_COUNTS, /* permute_map: [E][chunks] int32 slots of an expert in a chunk */
    GMM__SORT_STARTS  /* permute_map: [E] int64 first row of an expert */
};
enum { GMM__GLU_SRC_TABLE, GMM__GLU_DST_TABLE }; /* [count] addresses: device copies of host tables */

/* Launch limits of a kernel of which `blocks` CTAs fit a multiprocessor. */
static gmm__launch_limits gmm__mma_launch_limits(const gmm__call *call, int32_t blocks) {
    const int32_t processors = call->ctx->device.processors;
    gmm__launch_limits limits;
    limits.max_ctas = gmm__grid(processors, call->options.sm_limit, blocks, INT32_MAX);
    limits.pdl = gmm__cuda_pdl(call);
    limits.sm_limit = call->options.sm_limit;
    return limits;
}
/* Launch limits of elementwise kernels, and of kernels that stream rows. */
static gmm__launch_limits gmm__mma_elementwise_limits(const gmm__call *call) {
    return gmm__mma_launch_limits(call, GMM__ELEM_PER_SM);
}
static gmm__launch_limits gmm__mma_streaming_limits(const gmm__call *call) {
    return gmm__mma_launch_limits(call, GMM__ELEM_STREAM_PER_SM);
}

/* An operand as kernels address it. vec: its rows begin at multiples of 16 bytes and admit vector accesses. */
static gmm__view gmm__mma_view(const gmm__call *call, int role) {
    const gmm_mat *m = &call->mat[role];
    gmm__view v;
    v.data = m->dtype == GMM_NONE ? NULL : m->data;
    v.ld = m->ld;
    v.dtype = m->dtype;
    v.vec = (((uintptr_t)m->data | (uintptr_t)(m->ld * (gmm_dtype_bits(m->dtype) / 8))) & 15) == 0;
    return v;
}

/* The row offsets of a call's groups: those that an MLP has computed for all of its steps, or those whose computation
   this enqueues. */
static gmm_status gmm__mma_row_offsets(const gmm__plan *plan, const int64_t **offsets, gmm_stream stream) {
    int64_t *own = (int64_t *)gmm__region(plan, GMM__ROW_OFFSETS);
    *offsets = plan->call->split_tiles ? (const int64_t *)plan->call->groups.splits : own;
    return plan->call->split_tiles ? GMM_OK : gmm__cuda_enqueue_offsets(plan->call, own, NULL, 1, stream);
}

/* --- activation --- */

/* Columns of a block of the gate and linear columns; 0: halves, of which a block of all ffn columns is one. */
static int32_t gmm__mma_act_interleave(int32_t interleave, int64_t ffn) { return interleave == ffn ? 0 : interleave; }

static int gmm__mma_plan_act(const gmm__call *call, gmm__plan *plan) {
    if (call->rows > INT32_MAX || call->in > GMM__MAX_EXTENT)
        return gmm__decline(plan, "takes at most %d rows and %d columns", INT32_MAX, (int)GMM__MAX_EXTENT);
    gmm__reserve(plan, GMM__ROW_OFFSETS, ((size_t)call->groups.count + 1) * sizeof(int64_t));
    return 1;
}

static gmm_status gmm__mma_launch_act(const gmm__plan *plan, gmm_stream stream) {
    const gmm__call *call = plan->call;
    const gmm_activation *d = &call->d.act;
    const int forward = call->op == GMM_OP_ACT_FWD;
    const int64_t *offsets;
    const gmm_status s = gmm__mma_row_offsets(plan, &offsets, stream);
    cudaError_t e = cudaSuccess;
    gmm__launch_limits limits;
    gmm__act_args a;
    if (s != GMM_OK) return s;
    memset(&a, 0, sizeof a);
    a.valid_rows = offsets + call->groups.count;
    a.rows = call->rows;
    a.ffn = (int32_t)call->out;
    a.interleave = gmm__mma_act_interleave(call->act.interleave, call->out);
    a.tail_zero = call->groups.tail == GMM_TAIL_ZERO;
    a.gated = gmm_act_gated(call->act.kind);
    a.kind = call->act.kind;
    a.coef = gmm_act_coefficients(&call->act);
    a.prob = d->prob;
    a.x = gmm__mma_view(call, GMM__X_);
    a.y = gmm__mma_view(call, GMM__Y);
    if (!forward) {
        a.dy = gmm__mma_view(call, GMM__DY);
        a.dx = gmm__mma_view(call, GMM__DX);
        a.dprob = d->dprob;
    }
    a.groups = call->groups.count;
    a.amax = (uint32_t *)(void *)call->fused.act_amax;
    if (a.amax) e = gmm_launch_fill(a.amax, 0, a.groups, call->options.sm_limit, gmm__cuda_pdl(call), stream);
    if (e != cudaSuccess) return gmm__cuda_status(call, e);
    limits = gmm__mma_launch_limits(call, a.amax ? GMM__ELEM_AMAX_PER_SM : GMM__ELEM_STREAM_PER_SM);
    return gmm__cuda_status(call, forward ? gmm__k_act_fwd(&a, limits, stream) : gmm__k_act_bwd(&a, limits, stream));
}

/* --- routing --- */

static gmm__route_args gmm__mma_route_args(const gmm__plan *plan) {
    const gmm__call *call = plan->call;
    const gmm_route *r = &call->d.route;
    /* with padding the kernels divide by the numbers of tokens */
    const double tokens = r->tokens > 0 && !r->padding ? (double)r->tokens : 1.0;
    const double length = r->padding ? 1.0 : tokens / r->sequences;
    gmm__route_args a;
    memset(&a, 0, sizeof a);
    a.logits = gmm__mma_view(call, GMM__X_);
    a.tokens = r->tokens;
    a.experts = r->experts;
    a.topk = r->topk;
    a.sigmoid = r->score == GMM_SCORE_SIGMOID;
    a.normalize = r->normalize;
    a.scale = r->scale;
    a.aux = (float)((double)r->aux_coeff * r->experts / (r->topk * length * length) / r->sequences);
    a.z = (float)(r->z_coeff / tokens);
    a.indices = r->indices;
    a.scratch = (float *)gmm__region(plan, GMM__ROUTE_SCRATCH);
    a.groups = r->groups > 1 ? r->groups : 1;
    a.group_topk = r->group_topk;
    a.group_sum = r->group_sum;
    a.sequences = r->sequences;
    a.sequence_first = r->sequence_first;
    a.sequence_counts = r->sequence_counts;
    a.padding = r->padding;
    a.valid = r->padding ? (int32_t *)gmm__region(plan, GMM__ROUTE_VALID) : NULL;
    return a;
}

/* Whether a loss is requested and its coefficient is not 0. A query counts every loss as requested. */
static int gmm__mma_has_route_losses(const gmm__call *call) {
    const gmm_route *r = &call->d.route;
    if (call->query) return r->aux_coeff != 0.0f || r->z_coeff != 0.0f;
    return (r->aux_loss && r->aux_coeff != 0.0f) || (r->z_loss && r->z_coeff != 0.0f);
}

/* Reserves what forward and backward need. */
static void gmm__mma_reserve_route(const gmm__call *call, gmm__plan *plan) {
    const gmm_route *r = &call->d.route;
    gmm__reserve(plan, GMM__ROUTE_SCRATCH, gmm__route_scratch_bytes(r->tokens, r->experts, r->groups,
                                                                    gmm__mma_elementwise_limits(call).max_ctas));
    gmm__reserve(plan, GMM__ROUTE_VALID, (size_t)r->sequences * sizeof(int32_t));
}

static int gmm__mma_plan_topk_fwd(const gmm__call *call, gmm__plan *plan) {
    const gmm_route *r = &call->d.route;
    const int losses = gmm__mma_has_route_losses(call);
    const size_t losses_bytes = losses ? gmm__route_sums_bytes(r->tokens, r->experts, r->sequences) : 0;
    const size_t sinkhorn_bytes = r->sinkhorn ? gmm__route_sums_bytes(r->tokens, r->experts, 1) : 0;
    gmm__reserve(plan, GMM__ROUTE_COUNTS, (size_t)r->experts * sizeof(int32_t));
    gmm__reserve(plan, GMM__ROUTE_LOSSES, losses_bytes > sinkhorn_bytes ? losses_bytes : sinkhorn_bytes);
    gmm__reserve(plan, GMM__ROUTE_SEQUENCES,
                 r->sequences > 1 && losses ? (size_t)r->sequences * (size_t)r->experts * sizeof(int32_t) : 0);
    gmm__reserve(plan, GMM__ROUTE_MULTIPLIERS, r->sinkhorn ? ((size_t)r->experts + 1) * sizeof(float) : 0);
    gmm__mma_reserve_route(call, plan);
    return 1;
}
static gmm_status gmm__mma_launch_topk_fwd(const gmm__plan *plan, gmm_stream stream) {
    const gmm__call *call = plan->call;
    const gmm_route *r = &call->d.route;
    const int losses = gmm__mma_has_route_losses(call);
    gmm__route_args a = gmm__mma_route_args(plan);
    a.expert_bias = r->expert_bias;
    a.probs = r->probs;
    a.counts = r->counts ? r->counts : (int32_t *)gmm__region(plan, GMM__ROUTE_COUNTS);
    a.offsets = r->offsets;
    a.aux_loss = r->aux_loss;
    a.z_loss = r->z_loss;
    a.total_counts = r->total_counts;
    a.iterations = r->sinkhorn;
    a.tolerance = r->sinkhorn_tolerance;
    a.multipliers = r->sinkhorn ? (float *)gmm__region(plan, GMM__ROUTE_MULTIPLIERS) : NULL;
    if (losses || r->sinkhorn) a.sums = (float *)gmm__region(plan, GMM__ROUTE_LOSSES);
    if (losses && r->sequences > 1 && !a.sequence_counts)
        a.sequence_counts = (int32_t *)gmm__region(plan, GMM__ROUTE_SEQUENCES);
    return gmm__cuda_status(call, gmm__k_topk_fwd(&a, losses, gmm__mma_elementwise_limits(call), stream));
}

static int gmm__mma_plan_topk_bwd(const gmm__call *call, gmm__plan *plan) {
    gmm__mma_reserve_route(call, plan);
    return 1;
}
static gmm_status gmm__mma_launch_topk_bwd(const gmm__plan *plan, gmm_stream stream) {
    const gmm__call *call = plan->call;
    gmm__route_args a = gmm__mma_route_args(plan);
    a.dlogits = gmm__mma_view(call, GMM__DX);
    a.counts = call->d.route.counts;
    a.dprobs = call->d.route.dprobs;
    a.dloss = call->d.route.dloss;
    return gmm__cuda_status(call, gmm__k_topk_bwd(&a, gmm__mma_elementwise_limits(call), stream));
}

static gmm_status gmm__mma_launch_dense(const gmm__plan *plan, gmm_stream stream) {
    const gmm__call *call = plan->call;
    const gmm_dense_route *d = &call->d.dense;
    gmm__dense_args a;
    a.tokens = d->tokens;
    a.experts = d->experts;
    a.topk = d->topk;
    a.to_dense = call->op == GMM_OP_ROUTE_TO_DENSE;
    a.map = d->map;
    a.values = d->values;
    a.probs = d->probs;
    a.indices = d->indices;
    a.counts = d->counts;
    return gmm__cuda_status(call, gmm__k_route_dense(&a, d->offsets, gmm__mma_elementwise_limits(call), stream));
}

static gmm_status gmm__mma_launch_expert_bias(const gmm__plan *plan, gmm_stream stream) {
    const gmm__call *call = plan->call;
    const gmm_expert_bias *d = &call->d.bias;
    gmm__bias_args a;
    a.total_counts = d->total_counts;
    a.bias = d->bias;
    a.rate = d->rate;
    a.experts = d->experts;
    a.layers = d->layers;
    return gmm__cuda_status(call, gmm__k_expert_bias(&a, gmm__mma_elementwise_limits(call), stream));
}

/* --- permute, unpermute --- */

static int gmm__mma_plan_permute_map(const gmm__call *call, gmm__plan *plan) {
    const gmm_permute *p = &call->d.permute;
    gmm__reserve(plan, GMM__SORT_COUNTS, gmm__map_counts_bytes(p->tokens * p->topk, p->experts));
    gmm__reserve(plan, GMM__SORT_STARTS, (size_t)p->experts * sizeof(int64_t));
    return 1;
}
static gmm_status gmm__mma_launch_permute_map(const gmm__plan *plan, gmm_stream stream) {
    const gmm__call *call = plan->call;
    const gmm_permute *p = &call->d.permute;
    gmm__map_args a;
    memset(&a, 0, sizeof a);
    a.indices = p->indices;
    a.slots = p->tokens * p->topk;
    a.capacity = p->capacity;
    a.experts = p->experts;
    a.align = p->align;
    a.row_of = p->row_of;
    a.slot_of = p->slot_of;
    a.sizes = p->sizes;
    a.fault = p->fault;
    a.counts = (int32_t *)gmm__region(plan, GMM__SORT_COUNTS);
    a.starts = (int64_t *)gmm__region(plan, GMM__SORT_STARTS);
    return gmm__cuda_status(call, gmm__k_permute_map(&a, gmm__mma_elementwise_limits(call), stream));
}

static gmm__permute_args gmm__mma_permute_args(const gmm__call *call, int src, int dst) {
    const gmm_permute *p = &call->d.permute;
    gmm__permute_args a;
    memset(&a, 0, sizeof a);
    a.src = gmm__mma_view(call, src);
    a.dst = gmm__mma_view(call, dst);
    a.tokens = p->tokens;
    a.capacity = p->capacity;
    a.hidden = p->hidden;
    a.topk = p->topk;
    a.experts = p->experts;
    a.tail_zero = p->tail == GMM_TAIL_ZERO;
    a.row_of = p->row_of;
    a.slot_of = p->slot_of;
    a.sizes = p->sizes;
    a.fault = p->fault;
    return a;
}

static int gmm__mma_plan_permute(const gmm__call *call, gmm__plan *plan) {
    if (call->d.permute.hidden > GMM__MAX_EXTENT)
        return gmm__decline(plan, "takes at most %d columns", (int)GMM__MAX_EXTENT);
    return 1;
}
static gmm_status gmm__mma_launch_permute_fwd(const gmm__plan *plan, gmm_stream stream) {
    const gmm__call *call = plan->call;
    gmm__permute_args a = gmm__mma_permute_args(call, GMM__X_, GMM__ROWS);
    a.probs = call->d.permute.probs;
    a.row_probs = call->d.permute.row_probs;
    if (!call->d.permute.rows)
        return gmm__cuda_status(call, gmm__k_gather_row_probs(&a, gmm__mma_elementwise_limits(call), stream));
    return gmm__cuda_status(call, gmm__k_permute_rows(&a, gmm__mma_streaming_limits(call), stream));
}

static gmm_status gmm__mma_launch_permute_bwd(const gmm__plan *plan, gmm_stream stream) {
    const gmm__call *call = plan->call;
    gmm__permute_args a = gmm__mma_permute_args(call, GMM__DROWS, GMM__DX);
    cudaError_t e = cudaSuccess;
    if (call->d.permute.dx) e = gmm__k_unpermute_fwd(&a, gmm__mma_elementwise_limits(call), stream);
    a.row_probs_in = call->d.permute.drow_probs;
    a.dprobs = call->d.permute.dprobs;
    if (e == cudaSuccess && a.dprobs) e = gmm__k_gather_probs(&a, gmm__mma_elementwise_limits(call), stream);
    return gmm__cuda_status(call, e);
}

static gmm_status gmm__mma_launch_unpermute_fwd(const gmm__plan *plan, gmm_stream stream) {
    const gmm__call *call = plan->call;
    gmm__permute_args a = gmm__mma_permute_args(call, GMM__ROWS, GMM__OUT);
    a.probs = call->d.permute.probs;
    return gmm__cuda_status(call, gmm__k_unpermute_fwd(&a, gmm__mma_elementwise_limits(call), stream));
}

static gmm_status gmm__mma_launch_unpermute_bwd(const gmm__plan *plan, gmm_stream stream) {
    const gmm__call *call = plan->call;
    const gmm_permute *p = &call->d.permute;
    cudaError_t e = cudaSuccess;
    if (p->drows) {
        gmm__permute_args a = gmm__mma_permute_args(call, GMM__DOUT, GMM__DROWS);
        a.probs = p->probs;
        if (!a.probs && a.src.dtype == a.dst.dtype)
            e = gmm__k_permute_rows(&a, gmm__mma_streaming_limits(call), stream);
        else
            e = gmm__k_unpermute_bwd(&a, gmm__mma_elementwise_limits(call), stream);
    }
    if (e == cudaSuccess && p->dprobs) {
        gmm__permute_args a = gmm__mma_permute_args(call, GMM__DOUT, GMM__ROWS);
        a.dprobs = p->dprobs;
        e = gmm__k_unpermute_dots(&a, gmm__mma_elementwise_limits(call), stream);
    }
    return gmm__cuda_status(call, e);
}

/* --- pad, unpad --- */

static int gmm__mma_plan_pad(const gmm__call *call, gmm__plan *plan) {
    if (call->rows > INT32_MAX || call->d.pad.padded_capacity > INT32_MAX)
        return gmm__decline(plan, "takes at most %d rows", INT32_MAX);
    gmm__cuda_reserve_split(plan, call->groups.count);
    return 1;
}

static gmm_status gmm__mma_launch_pad(const gmm__plan *plan, gmm_stream stream) {
    const gmm__call *call = plan->call;
    const gmm_padding *d = &call->d.pad;
    int64_t *offsets = (int64_t *)gmm__region(plan, GMM__ROW_OFFSETS);
    int32_t *blocks = (int32_t *)gmm__region(plan, GMM__TILE_SUMS);
    const gmm_status s = gmm__cuda_enqueue_offsets(call, offsets, blocks, d->align, stream);
    gmm__pad_args a;
    if (s != GMM_OK) return s;
    memset(&a, 0, sizeof a);
    a.pad = call->op == GMM_OP_PAD;
    a.src = gmm__mma_view(call, GMM__X_);
    a.dst = gmm__mma_view(call, GMM__Y);
    a.rows = a.pad ? d->padded_capacity : call->rows;
    a.cols = d->cols;
    a.offsets = offsets;
    a.blocks = blocks;
    a.groups = call->groups.count;
    a.align = d->align;
    a.capacity = d->padded_capacity;
    a.src_prob = d->src_prob;
    a.dst_prob = d->dst_prob;
    a.tail_zero = call->groups.tail == GMM_TAIL_ZERO;
    a.sizes = a.pad ? d->sizes : NULL;
    a.fault = call->groups.fault;
    return gmm__cuda_status(call, gmm__k_pad(&a, gmm__mma_streaming_limits(call), stream));
}

/* --- GLU interleave --- */

static int gmm__mma_plan_glu_interleave(const gmm__call *call, gmm__plan *plan) {
    const int role[2] = { GMM__X_, GMM__Y }, region[2] = { GMM__GLU_SRC_TABLE, GMM__GLU_DST_TABLE };
    const gmm_glu *d = &call->d.glu;
    const int64_t max_ffn = INT32_MAX / 16; /* 2 ffn elements of at most 8 bytes: offsets in bytes fit 32 bits */
    int i;
    if (d->ffn > max_ffn || d->count > (d->axis == GMM_GLU_ROWS ? INT32_MAX / (2 * d->ffn) : INT32_MAX))
        return gmm__decline(plan, "takes at most %lld pairs, and %d rows in all", (long long)max_ffn, INT32_MAX);
    for (i = 0; i < 2; i++)
        if (call->mat[role[i]].flags & (uint32_t)GMM_MAT_TABLE_ON_HOST)
            gmm__reserve(plan, region[i], (size_t)call->d.glu.count * sizeof(void *));
    return 1;
}

static gmm_status gmm__mma_launch_glu_interleave(const gmm__plan *plan, gmm_stream stream) {
    const gmm__call *call = plan->call;
    const gmm_glu *d = &call->d.glu;
    const gmm__launch_limits limits = gmm__mma_streaming_limits(call);
    gmm__glu_args a;
    const gmm_mat *src = &call->mat[GMM__X_], *dst = &call->mat[GMM__Y];
    cudaError_t e;
    memset(&a, 0, sizeof a);
    a.src = gmm__mma_view(call, GMM__X_);
    a.dst = gmm__mma_view(call, GMM__Y);
    a.src_stride = src->group_stride;
    a.dst_stride = dst->group_stride;
    a.count = d->count;
    a.ffn = d->ffn;
    a.cols = d->cols;
    a.block = d->block;
    a.inverse = d->inverse;
    if (d->axis == GMM_GLU_COLUMNS) return gmm__cuda_status(call, gmm__k_glu_columns(&a, limits, stream));
    e = gmm__cuda_device_table(plan, src, src->table, d->count, GMM__GLU_SRC_TABLE, &a.src_table, stream);
    if (e == cudaSuccess)
        e = gmm__cuda_device_table(plan, dst, dst->table, d->count, GMM__GLU_DST_TABLE, &a.dst_table, stream);
    if (e == cudaSuccess) e = gmm__k_glu_rows(&a, limits, stream);
    return gmm__cuda_status(call, e);
}

#endif /* __CUDACC__ */
