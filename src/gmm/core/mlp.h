/* Plans, launches and entry points of the MLP, which is composed of steps, and the queue of delayed weight gradients.
   The engines CPU and MMA share these functions; each step selects an engine of its own. */

/* A query covers every way in which the call may decide: by its addresses, whether FC1's product computes the
   activation, and where the query has no `saved`, whether it trains or infers. What it describes is the first of these:
   training where it may train, and the activation by prices. */
static int gmm__compose_plan_mlp_fwd(const gmm__call *call, gmm__plan *plan) {
    const int trains_or_infers = call->query && !call->d.mlp.saved;
    const int two_choices = call->query && call->options.fuse == GMM_FUSE_AUTO && gmm__mlp_may_fuse_act(call);
    int fuses = 0, infers, other_choice;
    plan->saved_bytes = (size_t)gmm__mlp_saved_of(call).layout.bytes;
    plan->weight_cache_bytes = gmm__mlp_cache_bytes(call);
    for (infers = 0; infers <= trains_or_infers; infers++)
        for (other_choice = 0; other_choice <= two_choices; other_choice++) {
            const int first = !infers && !other_choice;
            const gmm_error last_error = call->ctx->error;
            gmm__call variant = *call;
            gmm__mlp_steps steps;
            gmm_status built;
            if (!first) variant.describes = NULL;
            if (other_choice) variant.options.fuse = fuses ? GMM_FUSE_NEVER : GMM_FUSE_ALWAYS;
            if (!infers && trains_or_infers) variant.d.mlp.saved = gmm__placeholder();
            built = gmm__mlp_build_fwd(&steps, &variant, NULL);
            if (!other_choice) fuses = steps.fuses_act;
            if (!first && built != GMM_OK) call->ctx->error = last_error;
            else if (!gmm__mlp_plan_steps(&steps, built, plan)) return 0;
        }
    return 1;
}

static gmm_status gmm__compose_launch_mlp_fwd(const gmm__plan *plan, gmm_stream stream) {
    gmm__mlp_steps steps;
    gmm_status s = gmm__mlp_build_fwd(&steps, plan->call, plan->workspace);
    if (s == GMM_OK) s = gmm__mlp_run_split(&steps, plan, stream);
    return s == GMM_OK ? gmm__mlp_run_steps(&steps, plan, plan->call->d.mlp.hooks, stream) : s;
}

/* The contents of gmm_wgrad_entry: the weight gradients of one backward, FC2's first. It points to the caller's
   matrices, fault word and arrays of gmm_mlp_quant, but to none of its descriptors and arrays by group. */
typedef struct gmm__wgrad_record {
    gmm_groups groups;
    gmm_options options;
    gmm_grad_hooks hooks;
    gmm__mlp_queued operands;
    gmm_mat dw[2];
    gmm_grad grad[2];
    gmm_recipe recipe;
    gmm_mlp_quant quant;
    int32_t pending[2]; /* 1: wanted and not computed yet */
    gmm_space space;    /* of the context, and its device: where the operands are */
    int32_t device;
    int32_t tag;        /* GMM__WGRAD_TAG while queued */
} gmm__wgrad_record;

enum { GMM__WGRAD_TAG = 0x6772616D };

typedef char gmm__wgrad_record_fits[sizeof(gmm__wgrad_record) <= sizeof(gmm_wgrad_entry) ? 1 : -1];

#ifdef __CUDACC__
static gmm_status gmm__cuda_status(const gmm__call *call, cudaError_t e);
#endif

/* Enqueues a copy of the caller's bytes to memory of the context's space. `host`: the source is host memory that may be
   freed on return. */
static gmm_status gmm__mlp_copy(const gmm__call *call, const void *src_data, int host, void *dst_data, size_t bytes,
                                gmm_stream stream) {
    const gmm_mat src = gmm_mat_packed(GMM_U8, src_data), dst = gmm_mat_packed(GMM_U8, dst_data);
    gmm_conversion d = GMM_ZERO;
    gmm__call step;
    gmm_status s;
#ifdef __CUDACC__ /* the bytes are passed as arguments of a kernel, which the launch copies */
    if (host && call->ctx->config.space == GMM_SPACE_CUDA)
        return gmm__cuda_status(call, gmm_launch_copy(dst_data, src_data, (int64_t)(bytes / 8), stream));
#else
    (void)host;
#endif
    d.rows = 1;
    d.cols = (int64_t)bytes;
    d.options = &call->options;
    d.src = &src;
    d.dst = &dst;
    s = gmm__prepare(&step, call->ctx, GMM_OP_CONVERT, call->function, &d, 0);
    return s != GMM_OK ? s : gmm__serve(&step, NULL, NULL, 0, stream);
}

/* Copies the arrays by group of a gradient's destination, and makes the record's descriptors point to the copies. */
static gmm_status gmm__mlp_copy_arrays(const gmm__call *call, char *arrays, gmm_mat *dw, gmm_grad *grad,
                                       gmm_stream stream) {
    const size_t G = (size_t)call->groups.count;
    char *beta = arrays + G * sizeof(void *), *frozen = beta + G * sizeof(float);
    gmm_status s = GMM_OK;
    if (dw->table) {
        s = gmm__mlp_copy(call, dw->table, (dw->flags & (uint32_t)GMM_MAT_TABLE_ON_HOST) != 0, arrays,
                          G * sizeof(void *), stream);
        dw->table = (void *const *)arrays;
        dw->flags &= ~(uint32_t)GMM_MAT_TABLE_ON_HOST;
    }
    if (s == GMM_OK && grad->beta) {
        s = gmm__mlp_copy(call, grad->beta, 0, beta, G * sizeof(float), stream);
        grad->beta = (const float *)beta;
    }
    if (s == GMM_OK && grad->frozen) {
        s = gmm__mlp_copy(call, grad->frozen, 0, frozen, G, stream);
        grad->frozen = (const uint8_t *)frozen;
    }
    return s;
}

/* Bytes of the arrays by group of one gradient's destination: addresses, betas and frozen flags. */
static int64_t gmm__mlp_array_bytes(const gmm__call *call) {
    return call->groups.count * (int64_t)(sizeof(void *) + sizeof(float) + 1);
}

/* What the queue keeps of a backward's operands. */
static gmm__mlp_queued gmm__mlp_queued_of(const gmm__mlp_steps *steps) {
    const gmm_linear *linear[2];
    const int slots[2][2] = { { GMM_SLOT_H, GMM_SLOT_DY }, { GMM_SLOT_X, GMM_SLOT_DZ } };
    gmm__mlp_queued q;
    int i;
    linear[0] = &steps->wgrad2;
    linear[1] = &steps->wgrad1;
    memset(&q, 0, sizeof q);
    q.dtype = steps->dtype;
    q.tiles = steps->tiles;
    for (i = 0; i < 2; i++) {
        q.in[i] = linear[i]->in_features;
        q.out[i] = linear[i]->out_features;
        q.x[i] = gmm__mlp_queued_operand(steps, slots[i][0], &q.x_index[i]);
        q.dy[i] = gmm__mlp_queued_operand(steps, slots[i][1], &q.dy_index[i]);
    }
    q.index_rows = steps->index_rows;
    q.index_div = steps->index_div;
    return q;
}

/* Appends the weight gradients of a backward to the queue of the caller. */
static gmm_status gmm__mlp_append_wgrads(gmm__mlp_steps *steps, gmm_stream stream) {
    const gmm__call *call = steps->call;
    const gmm_mlp *d = &call->d.mlp;
    gmm_wgrad_queue *q = d->queue;
    const int roles[2] = { GMM__DW2, GMM__DW };
    gmm__wgrad_record r;
    int i;
    memset(&r, 0, sizeof r);
    r.tag = GMM__WGRAD_TAG;
    r.space = call->ctx->config.space;
    r.device = call->ctx->config.device;
    r.groups = steps->groups;
    r.options = steps->options;
    if (d->hooks) r.hooks = *d->hooks;
    r.recipe = call->recipe;
    r.quant = call->quant;
    r.quant.recipe = NULL;
    r.operands = gmm__mlp_queued_of(steps);
    r.pending[0] = d->dw2 != NULL;
    r.pending[1] = d->dw1 != NULL;
    for (i = 0; i < 2; i++) {
        char *arrays = (char *)gmm__arena_alloc(&steps->deferred, GMM__MLP_ARRAYS, gmm__mlp_array_bytes(call));
        gmm_status s;
        if (!r.pending[i]) continue;
        r.dw[i] = call->mat[roles[i]];
        r.grad[i] = call->grad[roles[i]];
        r.dw[i].columnwise = r.grad[i].mat = NULL;
        s = gmm__mlp_copy_arrays(call, arrays, &r.dw[i], &r.grad[i], stream);
        if (s != GMM_OK) return s;
    }
    memcpy(&q->entries[((int64_t)q->head + q->count) % q->capacity], &r, sizeof r);
    q->count++;
    return GMM_OK;
}

/* A query covers both ways in which the call may decide whether FC2's dgrad computes the activation's gradient. The
   choice by prices is described, the other one only adds to workspace_bytes. Both have the same matrices in
   gmm_mlp.deferred. */
static int gmm__compose_plan_mlp_bwd(const gmm__call *call, gmm__plan *plan) {
    const int two_choices = call->query && call->options.fuse == GMM_FUSE_AUTO && gmm__mlp_may_fuse_act(call);
    const gmm_error last_error = call->ctx->error;
    gmm__mlp_steps steps;
    gmm_status built = gmm__mlp_build_bwd(&steps, call, NULL, NULL);
    if (gmm__mlp_wants_of(call).defer) {
        (void)gmm__arena_alloc(&steps.deferred, GMM__MLP_ARRAYS, gmm__mlp_array_bytes(call));
        (void)gmm__arena_alloc(&steps.deferred, GMM__MLP_ARRAYS, gmm__mlp_array_bytes(call));
    }
    plan->saved_bytes = (size_t)gmm__mlp_saved_of(call).layout.bytes;
    plan->deferred_bytes = steps.deferred.peak;
    plan->weight_cache_bytes = gmm__mlp_cache_bytes(call);
    if (!gmm__mlp_plan_steps(&steps, built, plan)) return 0;
    if (two_choices) {
        gmm__call variant = *call;
        variant.describes = NULL;
        variant.options.fuse = steps.fuses_act ? GMM_FUSE_NEVER : GMM_FUSE_ALWAYS;
        built = gmm__mlp_build_bwd(&steps, &variant, NULL, NULL);
        if (built == GMM_OK) return gmm__mlp_plan_steps(&steps, built, plan);
        call->ctx->error = last_error;
    }
    return 1;
}

static gmm_status gmm__compose_launch_mlp_bwd(const gmm__plan *plan, gmm_stream stream) {
    const gmm__call *call = plan->call;
    gmm__mlp_steps steps;
    gmm_status s = gmm__mlp_build_bwd(&steps, call, plan->workspace, call->d.mlp.deferred);
    if (s == GMM_OK) s = gmm__mlp_run_split(&steps, plan, stream);
    if (s == GMM_OK) s = gmm__mlp_run_steps(&steps, plan, call->d.mlp.hooks, stream);
    return s == GMM_OK && gmm__mlp_wants_of(call).defer ? gmm__mlp_append_wgrads(&steps, stream) : s;
}

/* Plans the weight gradients of the record that call->output points to. A query has none, and plans those that a
   backward of the MLP's own descriptor would queue. */
static int gmm__compose_plan_mlp_wgrad(const gmm__call *call, gmm__plan *plan) {
    const gmm__wgrad_record *r = (const gmm__wgrad_record *)call->output;
    gmm__mlp_steps steps;
    gmm__mlp_queued q;
    int i;
    if (!r) {
        const gmm_status built = gmm__mlp_build_bwd(&steps, call, NULL, NULL);
        if (built != GMM_OK) return gmm__decline(plan, "%.180s", call->ctx->error.text);
        q = gmm__mlp_queued_of(&steps);
    }
    for (i = 0; i < 2; i++) {
        const gmm_grad *dw = r ? &r->grad[i] : &call->grad[i ? GMM__DW : GMM__DW2];
        gmm_status built;
        if (r ? !r->pending[i] : !(i ? call->d.mlp.dw1 : call->d.mlp.dw2)) continue;
        built = gmm__mlp_build_wgrad(&steps, call, r ? &r->operands : &q, i, dw, NULL);
        if (!gmm__mlp_plan_steps(&steps, built, plan)) return 0;
    }
    return 1;
}

static gmm_status gmm__compose_launch_mlp_wgrad(const gmm__plan *plan, gmm_stream stream) {
    gmm__wgrad_record *r = (gmm__wgrad_record *)plan->call->output;
    int i;
    for (i = 0; i < 2; i++) {
        gmm__mlp_steps steps;
        gmm_status s;
        if (!r->pending[i]) continue;
        s = gmm__mlp_build_wgrad(&steps, plan->call, &r->operands, i, &r->grad[i], plan->workspace);
        if (s == GMM_OK) s = gmm__mlp_run_steps(&steps, plan, &r->hooks, stream);
        if (s != GMM_OK) return s;
        r->pending[i] = 0; /* if the other gradient fails, the next call does not add this one again */
    }
    return GMM_OK;
}

/* Checks a buffer of the caller, which must have `need` bytes by the plan. */
static gmm_status gmm__check_buffer(gmm__call *call, const char *name, int writes, const void *memory, size_t bytes,
                                    size_t need) {
    if (!memory && need > 0)
        return gmm__refuse_that(call, GMM_E_NULL, name, "is NULL for %llu bytes, which the query states",
                                (unsigned long long)need);
    if (bytes < need)
        return gmm__refuse_that(call, GMM_E_WORKSPACE, name, "has %llu bytes and must have >= %llu, which the query "
                                "states", (unsigned long long)bytes, (unsigned long long)need);
    if ((uintptr_t)memory % GMM__WORKSPACE_ALIGN)
        return gmm__refuse(call, GMM_E_ALIGN, name, "%p is not aligned to %d bytes", memory, (int)GMM__WORKSPACE_ALIGN);
    gmm__add_span(call, name, "", writes, memory, (int64_t)need);
    return GMM_OK;
}

/* Checks the caller's buffers of forward or backward, of an MLP or a layer, against what the plan needs. `cache` is the
   name of the weight cache, which forward writes and backward reads. */
static gmm_status gmm__check_buffers(gmm__call *call, const gmm__plan *plan, const void *saved, size_t saved_bytes,
                                     const void *deferred, size_t deferred_bytes, const char *cache) {
    const int fwd = call->op == GMM_OP_MLP_FWD || call->op == GMM_OP_MOE_FWD;
    const gmm_mlp_quant *q = &call->quant;
    gmm_status s = GMM_OK;
    if (!fwd || saved)
        s = gmm__check_buffer(call, "saved", fwd || call->config.overwrite_saved, saved, saved_bytes,
                              plan->saved_bytes);
    if (s == GMM_OK && !fwd)
        s = gmm__check_buffer(call, "deferred", 1, deferred, deferred_bytes, plan->deferred_bytes);
    if (s == GMM_OK && q->weight_cache)
        s = gmm__check_buffer(call, cache, fwd, q->weight_cache, q->weight_cache_bytes, plan->weight_cache_bytes);
    return s;
}
static gmm_status gmm__mlp_check_buffers(gmm__call *call, const gmm__plan *plan) {
    const gmm_mlp *d = &call->d.mlp;
    return gmm__check_buffers(call, plan, d->saved, d->saved_bytes, d->deferred, d->deferred_bytes,
                              "quant.weight_cache");
}

/* Checks the fields of the queue, which the caller may have set. */
static gmm_status gmm__mlp_check_queue(gmm__call *call, const gmm_wgrad_queue *q) {
    if (!q || !q->entries) return gmm__refuse_that(call, GMM_E_NULL, "queue", "is NULL or has no entries");
    if ((uintptr_t)q->entries % sizeof q->entries->opaque[0])
        return gmm__refuse(call, GMM_E_ALIGN, "queue.entries", "%p is not aligned to %d bytes", (void *)q->entries,
                           (int)sizeof q->entries->opaque[0]);
    if (q->capacity < 1) return gmm__refuse(call, GMM_E_ARG, "queue.capacity", "%d must be >= 1", (int)q->capacity);
    if (q->head < 0 || q->head >= q->capacity)
        return gmm__refuse(call, GMM_E_ARG, "queue.head", "%d must be >= 0 and below the capacity %d", (int)q->head,
                           (int)q->capacity);
    if (q->count < 0 || q->count > q->capacity)
        return gmm__refuse(call, GMM_E_ARG, "queue.count", "%d must be >= 0 and at most the capacity %d",
                           (int)q->count, (int)q->capacity);
    if (q->reserved) return gmm__refuse(call, GMM_E_ARG, "queue.reserved", "%d must be 0", (int)q->reserved);
    return GMM_OK;
}

GMMDEF gmm_status gmm_mlp_query(gmm_context *ctx, gmm_op op, const gmm_mlp *mlp, gmm_info *info) {
    gmm__call call;
    const gmm_status s = gmm__mlp_prepare(&call, ctx, op, "gmm_mlp_query", mlp, GMM__MLP_QUERY);
    return s != GMM_OK ? s : gmm__serve(&call, info, NULL, 0, NULL);
}

GMMDEF gmm_status gmm_mlp_saved_query(gmm_context *ctx, gmm_op op, const gmm_mlp *mlp, gmm_saved_layout *layout) {
    gmm__call call;
    const gmm_status s = gmm__mlp_prepare(&call, ctx, op, "gmm_mlp_saved_query", mlp, GMM__MLP_QUERY);
    gmm_saved_layout full;
    if (s != GMM_OK) return s;
    full = gmm__mlp_saved_of(&call).layout;
    return gmm__write_layout(&call, layout, &full, sizeof full);
}

/* Checks that the queue takes the weight gradients of a backward that delays them. */
static gmm_status gmm__mlp_check_append(gmm__call *call) {
    const gmm_wgrad_queue *q = call->d.mlp.queue;
    gmm_status s;
    if (!gmm__mlp_wants_of(call).defer) return GMM_OK;
    if ((s = gmm__mlp_check_queue(call, q)) != GMM_OK) return s;
    if (q->count < q->capacity) return GMM_OK;
    return gmm__refuse_that(call, GMM_E_STATE, "queue", "is full with %d of %d entries", q->count, q->capacity);
}

/* gmm__serve of a call whose plan gmm__select has made (core/engines.h). */
static gmm_status gmm__serve_plan(gmm__call *call, gmm__plan *plan, void *workspace, size_t workspace_bytes,
                                  gmm_stream stream);

GMMDEF gmm_status gmm_mlp_fwd(gmm_context *ctx, const gmm_mlp *mlp, void *workspace, size_t workspace_bytes,
                              gmm_stream stream) {
    gmm__call call;
    gmm__plan plan;
    gmm_status s = gmm__mlp_prepare(&call, ctx, GMM_OP_MLP_FWD, "gmm_mlp_fwd", mlp, GMM__MLP_LAUNCH);
    if (s != GMM_OK || (s = gmm__select(&call, &plan)) != GMM_OK ||
        (s = gmm__mlp_check_buffers(&call, &plan)) != GMM_OK)
        return s;
    return gmm__serve_plan(&call, &plan, workspace, workspace_bytes, stream);
}

GMMDEF gmm_status gmm_mlp_bwd(gmm_context *ctx, const gmm_mlp *mlp, void *workspace, size_t workspace_bytes,
                              gmm_stream stream) {
    gmm__call call;
    gmm__plan plan;
    gmm_status s = gmm__mlp_prepare(&call, ctx, GMM_OP_MLP_BWD, "gmm_mlp_bwd", mlp, GMM__MLP_LAUNCH);
    if (s != GMM_OK || (s = gmm__select(&call, &plan)) != GMM_OK ||
        (s = gmm__mlp_check_buffers(&call, &plan)) != GMM_OK || (s = gmm__mlp_check_append(&call)) != GMM_OK)
        return s;
    return gmm__serve_plan(&call, &plan, workspace, workspace_bytes, stream);
}

/* Reads an operand of a queued weight gradient: floats, or a quantized copy. */
static gmm_status gmm__mlp_read_queued(gmm__call *call, int role, const char *name, const gmm_mat *m, int64_t rows,
                                       int64_t cols) {
    const gmm__extents extents = gmm__matrix(rows, cols);
    return m->scaling == GMM_SCALING_NONE
               ? gmm__read_mat(call, role, name, m, 1, extents, GMM__FLOATS)
               : gmm__read_quant(call, role, name, m, extents, gmm__mlp_backward_direction(call));
}

/* Records the memory of both weight gradients of a record for the overlap check, which thus finds an overlap before the
   first gradient is computed. Their casts by delayed scaling read quant.scale and raise quant.amax. The latter is
   recorded as read, since a queued copy may have its amax there. */
static gmm_status gmm__mlp_read_record(gmm__call *call, gmm__wgrad_record *r) {
    static const char *const names[2] = { "dw2", "dw1" };
    static const char *const operands[2][2] = { { "h", "dy" }, { "x", "dz" } };
    const int roles[2] = { GMM__DW2, GMM__DW };
    gmm__mlp_queued *q = &r->operands;
    const int64_t scale_bytes = 4 * (int64_t)GMM_SLOTS * r->groups.count;
    gmm_status s;
    int i;
    gmm__add_span(call, "quant.scale", "", 0, r->quant.scale, scale_bytes);
    gmm__add_span(call, "quant.amax", "", 0, r->quant.amax, scale_bytes);
    gmm__add_span(call, "deferred", "", 0, r->groups.splits, (r->groups.count + (int64_t)1) * 8);
    gmm__add_span(call, "groups.fault", "", 1, r->groups.fault, (int64_t)sizeof *r->groups.fault);
    for (i = 0; i < 2; i++) {
        const int64_t x_rows = q->x_index[i] ? q->index_rows : call->rows;
        const int64_t dy_rows = q->dy_index[i] ? q->index_rows : call->rows;
        if (!r->pending[i]) continue;
        r->grad[i].mat = &r->dw[i];
        if ((s = gmm__check_indices(call, q->x_index[i], q->dy_index[i], q->index_rows, &q->index_div)) != GMM_OK ||
            (s = gmm__mlp_read_queued(call, GMM__X_, operands[i][0], &q->x[i], x_rows, q->in[i])) != GMM_OK ||
            (s = gmm__mlp_read_queued(call, GMM__DY, operands[i][1], &q->dy[i], dy_rows, q->out[i])) != GMM_OK ||
            (s = gmm__check_index_arrays(call, q->x_index[i], q->dy_index[i])) != GMM_OK ||
            (s = gmm__read_grad(call, roles[i], names[i], &r->grad[i], 1, q->out[i], q->in[i])) != GMM_OK)
            return s;
    }
    return GMM_OK;
}

GMMDEF gmm_status gmm_mlp_wgrad(gmm_context *ctx, gmm_wgrad_queue *queue, void *workspace, size_t workspace_bytes,
                                gmm_stream stream) {
    gmm__call call;
    gmm__wgrad_record record;
    gmm_status s = gmm__open(&call, ctx, GMM_OP_MLP_WGRAD, "gmm_mlp_wgrad", 0);
    if (s != GMM_OK || (s = gmm__mlp_check_queue(&call, queue)) != GMM_OK) return s;
    if (queue->count < 1)
        return gmm__refuse_that(&call, GMM_E_STATE, "queue", "is empty (%d of %d entries)", queue->count,
                                queue->capacity);
    memcpy(&record, &queue->entries[queue->head], sizeof record);
    if (record.tag != GMM__WGRAD_TAG)
        return gmm__refuse(&call, GMM_E_STATE, "queue.entries", "[%d] holds nothing that gmm_mlp_bwd recorded, yet is "
                           "the first of %d", queue->head, queue->count);
    if (record.space != ctx->config.space || record.device != ctx->config.device)
        return gmm__refuse(&call, GMM_E_STATE, "queue.entries", "[%d] was recorded in space %d on device %d, not in "
                           "this context's, %d and %d", queue->head, (int)record.space, record.device,
                           (int)ctx->config.space, ctx->config.device);
    call.options = record.options;
    call.groups = record.groups;
    call.recipe = record.recipe;
    call.quant = record.quant;
    call.rows = record.groups.capacity;
    call.output = &record;
    (void)snprintf(call.shapes, sizeof call.shapes, "G=%d T=%lld", record.groups.count, (long long)call.rows);
    if ((s = gmm__mlp_read_record(&call, &record)) != GMM_OK) return s;
    if ((s = gmm__serve(&call, NULL, workspace, workspace_bytes, stream)) != GMM_OK) {
        memcpy(&queue->entries[queue->head], &record, sizeof record);
        return s;
    }
    memset(&queue->entries[queue->head], 0, sizeof queue->entries[queue->head]);
    queue->head = (queue->head + 1) % queue->capacity;
    queue->count--;
    return GMM_OK;
}

/* Calls the `ready` hooks of backward, or of queued weight gradients. */
static void gmm__mlp_call_ready_hooks(const gmm__call *call, gmm_op op, gmm_stream stream) {
    const gmm_mlp *d = &call->d.mlp;
    const int bwd = op == GMM_OP_MLP_BWD, weights_complete = bwd != gmm__delays(&call->config);
    if (weights_complete && d->dw2) gmm__mlp_call_ready_hook(call->ctx, d->hooks, GMM_PARAM_W2, stream);
    if (bwd && d->db2) gmm__mlp_call_ready_hook(call->ctx, d->hooks, GMM_PARAM_B2, stream);
    if (weights_complete && d->dw1) gmm__mlp_call_ready_hook(call->ctx, d->hooks, GMM_PARAM_W1, stream);
    if (bwd && d->db1) gmm__mlp_call_ready_hook(call->ctx, d->hooks, GMM_PARAM_B1, stream);
}

GMMDEF gmm_status gmm_mlp_fire_hooks(gmm_context *ctx, gmm_op op, const gmm_mlp *mlp, gmm_stream stream) {
    gmm__call call;
    const gmm_status s = gmm__mlp_prepare(&call, ctx, op, "gmm_mlp_fire_hooks", mlp, GMM__MLP_QUERY);
    if (s != GMM_OK) return s;
    if (op == GMM_OP_MLP_FWD) return gmm__refuse(&call, GMM_E_ARG, "op", "%s fires no hooks", gmm_op_name(op));
    gmm__mlp_call_ready_hooks(&call, op, stream);
    return GMM_OK;
}
