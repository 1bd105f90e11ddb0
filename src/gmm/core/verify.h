/* gmm_config.verify: checks of values in the context's memory before a launch, and of errors of the device behind it.
   Allocates nothing: values are read in parts. */

enum { GMM__VERIFY_PART = 256 }; /* values that are read at a time */

/* Copies `bytes` of the context's memory to the host, behind the work of the stream; 0 bytes: waits for it. */
static gmm_status gmm__fetch(const gmm__call *call, void *to, const void *from, size_t bytes, gmm_stream stream) {
#ifdef __CUDACC__
    if (call->ctx->config.space == GMM_SPACE_CUDA) {
        int current;
        cudaError_t e = gmm__cuda_enter(call->ctx, &current);
        if (e == cudaSuccess && bytes > 0) e = cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream);
        if (e == cudaSuccess) e = cudaStreamSynchronize(stream);
        gmm__cuda_restore(call->ctx, current);
        return gmm__cuda_status(call, e);
    }
#endif
    (void)call;
    (void)stream;
    if (bytes > 0) memcpy(to, from, bytes);
    return GMM_OK;
}

static int gmm__is_permutation(const gmm__call *call) {
    return call->op >= GMM_OP_PERMUTE_MAP && call->op <= GMM_OP_UNPERMUTE_BWD;
}

/* A split in the context's memory, as gmm__check_split checks one on the host. *live becomes its sum. */
static gmm_status gmm__verify_split(const gmm__call *call, int64_t *live, gmm_stream stream) {
    const gmm_groups *g = &call->groups;
    const size_t size = g->dtype == GMM_I64 ? 8 : 4, more = g->form == GMM_SPLIT_OFFSETS;
    const char *name = gmm__is_permutation(call) ? "sizes" : "groups.splits";
    int64_t values[GMM__VERIFY_PART + 1], first;
    *live = 0;
    for (first = 0; first < g->count; first += GMM__VERIFY_PART) {
        gmm_groups part = *g;
        gmm_status s;
        if (part.count - first > GMM__VERIFY_PART) part.count = GMM__VERIFY_PART;
        else part.count -= (int32_t)first;
        part.splits = values;
        s = gmm__fetch(call, values, (const char *)g->splits + (size_t)first * size, ((size_t)part.count + more) * size,
                       stream);
        if (s == GMM_OK) s = gmm__check_sizes(call, name, &part, g->row_align, first, live);
        if (s != GMM_OK) return s;
    }
    return GMM_OK;
}

/* `count` values of a map, each of which must be an index below `limit` or, for no row, -1 or with `any_negative` any
   negative value. */
static gmm_status gmm__verify_values(const gmm__call *call, const char *name, const int32_t *map, int64_t count,
                                     int64_t limit, int any_negative, gmm_stream stream) {
    int32_t values[GMM__VERIFY_PART];
    int64_t first, i;
    for (first = 0; map && first < count; first += GMM__VERIFY_PART) {
        const int64_t n = count - first < GMM__VERIFY_PART ? count - first : (int64_t)GMM__VERIFY_PART;
        const gmm_status s = gmm__fetch(call, values, map + first, (size_t)n * sizeof *map, stream);
        if (s != GMM_OK) return s;
        for (i = 0; i < n; i++)
            if ((values[i] < -1 && !any_negative) || values[i] >= limit)
                return gmm__refuse(call, GMM_E_ARG, name, "[%lld] is %d: must be %s %lld", (long long)(first + i),
                                   values[i], any_negative ? "negative, or below index_rows times index_div,"
                                                           : "-1, or >= 0 and below", (long long)limit);
    }
    return GMM_OK;
}
static gmm_status gmm__verify_map(const gmm__call *call, const char *name, const int32_t *map, int64_t count,
                                  int64_t limit, gmm_stream stream) {
    return gmm__verify_values(call, name, map, count, limit, 0, stream);
}
/* What a permutation reads: indices; or the sizes, slot_of of the live rows, and row_of. */
static gmm_status gmm__verify_permute(const gmm__call *call, gmm_stream stream) {
    const gmm_permute *d = &call->d.permute;
    const int64_t slots = d->tokens * d->topk;
    const gmm_op op = call->op;
    gmm_status s = GMM_OK;
    int64_t live;
    if (op == GMM_OP_PERMUTE_MAP) return gmm__verify_map(call, "indices", d->indices, slots, d->experts, stream);
    if (op == GMM_OP_PERMUTE_FWD || (op == GMM_OP_UNPERMUTE_BWD && d->drows)) {
        s = gmm__verify_split(call, &live, stream);
        if (s == GMM_OK) s = gmm__verify_map(call, "slot_of", d->slot_of, live, slots, stream);
    }
    if (s != GMM_OK || op == GMM_OP_PERMUTE_FWD) return s;
    return gmm__verify_map(call, "row_of", d->row_of, slots, d->capacity, stream);
}

/* Entries of an index of gathered rows, of the rows of all groups; rows, div: index_rows and index_div, which are not
   checked where there is no index. */
static gmm_status gmm__verify_index(const gmm__call *call, const char *name, const int32_t *index, int64_t rows,
                                    int64_t div, gmm_stream stream) {
    int64_t live;
    gmm_status s;
    if (!index) return GMM_OK;
    s = gmm__verify_split(call, &live, stream); /* also of a split on the host, which is not verified before */
    return s == GMM_OK ? gmm__verify_values(call, name, index, live, rows * div, 1, stream) : s;
}
static gmm_status gmm__verify_indices(const gmm__call *call, gmm_stream stream) {
    const gmm_linear *l = &call->d.linear; /* these are of other operations too, which do not read them */
    const gmm_mlp *m = &call->d.mlp;
    const gmm_quantization *q = &call->d.quant;
    const int linear = call->op >= GMM_OP_LINEAR_FWD && call->op <= GMM_OP_LINEAR_BGRAD;
    const int mlp = call->op == GMM_OP_MLP_FWD || call->op == GMM_OP_MLP_BWD;
    const int64_t rows = mlp ? m->index_rows : linear ? l->index_rows : 0;
    const int64_t div = mlp ? m->index_div : linear ? l->index_div : 1;
    gmm_status s;
    if (call->op == GMM_OP_QUANTIZE)
        return gmm__verify_index(call, "src_index", q->src_index, q->index_rows, q->index_div, stream);
    if (!linear && !mlp) return GMM_OK;
    s = gmm__verify_index(call, "x_index", mlp ? m->x_index : l->x_index, rows, div, stream);
    return s != GMM_OK ? s
                       : gmm__verify_index(call, "dy_index", mlp ? m->dy_index : l->dy_index, rows, div, stream);
}

/* Addresses in a table of weights in device memory, which the kernels of WGMMA read by TMA. */
static gmm_status gmm__verify_table(const gmm__call *call, int role, const char *name, gmm_stream stream) {
    const gmm_mat *m = &call->mat[role];
    void *values[GMM__VERIFY_PART];
    int64_t first, i;
    if (!m->table || (m->flags & (uint32_t)GMM_MAT_TABLE_ON_HOST)) return GMM_OK;
    for (first = 0; first < call->groups.count; first += GMM__VERIFY_PART) {
        const int64_t rest = call->groups.count - first, n = rest < GMM__VERIFY_PART ? rest : (int64_t)GMM__VERIFY_PART;
        const gmm_status s = gmm__fetch(call, values, m->table + first, (size_t)n * sizeof *values, stream);
        if (s != GMM_OK) return s;
        for (i = 0; i < n; i++)
            if ((uintptr_t)values[i] % 16)
                return gmm__refuse(call, GMM_E_ALIGN, name, "[%lld] is %p: engine wgmma needs a multiple of 16 bytes",
                                   (long long)(first + i), values[i]);
    }
    return GMM_OK;
}

/* Refuses a planned call that would set a fault bit. Splits on the host have been checked. */
static gmm_status gmm__verify(const gmm__plan *plan, gmm_stream stream) {
    const gmm__call *call = plan->call;
    gmm_status s = GMM_OK;
    int64_t live = 0;
    if (!call->ctx->config.verify || gmm__capturing(call->ctx, stream)) return GMM_OK;
    if (gmm__is_permutation(call)) s = gmm__verify_permute(call, stream);
    else if (call->groups.splits && !call->groups.on_host) s = gmm__verify_split(call, &live, stream);
    if (call->op == GMM_OP_MOE_FWD && !call->d.moe.route) /* a router's indices are in range */
        s = gmm__verify_map(call, "indices", call->d.moe.indices, call->d.moe.tokens * call->d.moe.topk,
                            call->d.moe.experts, stream);
    if (s == GMM_OK) s = gmm__verify_indices(call, stream);
    if (s == GMM_OK && plan->engine == GMM_ENGINE_WGMMA && call->op != GMM_OP_LINEAR_WGRAD)
        s = gmm__verify_table(call, GMM__W, "w.table", stream);
    return s;
}

/* Waits for the work of a call, and reports what the device says. */
static gmm_status gmm__verify_launch(const gmm__plan *plan, gmm_stream stream) {
    const gmm_context *ctx = plan->call->ctx;
    return ctx->config.verify && !gmm__capturing(ctx, stream) ? gmm__fetch(plan->call, NULL, NULL, 0, stream) : GMM_OK;
}

