/* Plans, launches and entry points of the MLP, which is composed of linear and activation steps, and the queue of
   delayed weight gradients. The engines CPU and MMA share these functions; each step selects an engine of its own. */

static int gmm__compose_plan_mlp_fwd(const gmm__call *call, gmm__plan *plan) {
    const gmm__mlp_buffers b = gmm__mlp_measure(call);
    gmm__mlp_steps steps;
    size_t step_bytes = 0;
    gmm__mlp_fill(&steps, plan, NULL, NULL, NULL, NULL, NULL);
    steps.act.y = &steps.h;
    if (!gmm__mlp_size_product(plan, GMM_OP_LINEAR_FWD, 1, &steps.fc1, &step_bytes, plan) ||
        !gmm__mlp_size_act(plan, GMM_OP_ACT_FWD, &steps.act, &step_bytes, plan) ||
        !gmm__mlp_size_product(plan, GMM_OP_LINEAR_FWD, 2, &steps.fc2, &step_bytes, plan))
        return 0;
    gmm__reserve(plan, GMM__PART_MLP_OFFSETS, b.offsets_bytes);
    /* inference keeps z and h in the workspace, training in gmm_mlp.saved; a query cannot tell the two apart */
    gmm__reserve(plan, GMM__PART_MLP_Z, b.z_bytes);
    gmm__reserve(plan, GMM__PART_MLP_H, b.h_bytes);
    gmm__reserve(plan, GMM__PART_MLP_STEP, step_bytes);
    plan->saved_bytes = b.saved_bytes;
    return 1;
}

/* Enqueues the computation of the call's split as int64 offsets, which all steps read. */
static gmm_status gmm__mlp_offsets(const gmm__plan *plan, void *offsets, gmm_stream stream) {
    gmm__call step = *plan->call;
    step.op = GMM_OP_OFFSETS;
    step.query = 0;
    step.options.engine = plan->engine;
    step.output = offsets;
    step.spans = 0; /* overlap was checked with the call */
    return gmm__serve(&step, NULL, NULL, 0, stream);
}
/* Enqueues a linear step: quantizations and product with a recipe, else the linear operation alone. */
static gmm_status gmm__mlp_step(const gmm__plan *plan, gmm_op op, int layer, const gmm_linear *l, gmm_stream stream) {
    const gmm__call *call = plan->call;
    const gmm__mlp_quantization quantization = gmm__mlp_quantization_of(call);
    const gmm__mlp_product product = gmm__mlp_product_of(call, &quantization, op, layer, l);
    void *workspace = gmm__part(plan, GMM__PART_MLP_STEP);
    const size_t bytes = plan->workspace_bytes - plan->part[GMM__PART_MLP_STEP];
    return quantization.recipe.kind != GMM_RECIPE_NONE && op != GMM_OP_LINEAR_BGRAD
               ? gmm__mlp_run_product(&product, workspace, bytes, stream)
               : gmm__linear_run(call->ctx, op, call->function, l, workspace, bytes, stream);
}
/* Enqueues the cast of a layer's gradient in both directions, where its two products share the copies. */
static gmm_status gmm__mlp_cast_once(const gmm__plan *plan, int layer, gmm__mlp_steps *steps, gmm_stream stream) {
    gmm__call step;
    gmm_status s;
    if (!gmm__mlp_casts_once(plan->call, layer)) return GMM_OK;
    s = gmm__mlp_share_copies(plan->call, layer, steps, gmm__part(plan, GMM__PART_MLP_COPIES), 0, &step);
    return s != GMM_OK ? s : gmm__serve(&step, NULL, gmm__part(plan, GMM__PART_MLP_STEP),
                                        plan->workspace_bytes - plan->part[GMM__PART_MLP_STEP], stream);
}
static gmm_status gmm__mlp_act_step(const gmm__plan *plan, gmm_op op, const gmm_activation *a, gmm_stream stream) {
    gmm__call step;
    const gmm_status s = gmm__act_prepare(&step, plan->call->ctx, op, plan->call->function, a, 0);
    return s != GMM_OK ? s : gmm__serve(&step, NULL, gmm__part(plan, GMM__PART_MLP_STEP),
                                        plan->workspace_bytes - plan->part[GMM__PART_MLP_STEP], stream);
}

static gmm_status gmm__compose_launch_mlp_fwd(const gmm__plan *plan, gmm_stream stream) {
    const gmm__call *call = plan->call;
    const gmm__mlp_buffers b = gmm__mlp_measure(call);
    const gmm_save save = call->config.save;
    char *saved = (char *)call->d.mlp.saved;
    void *offsets = gmm__part(plan, GMM__PART_MLP_OFFSETS);
    void *z = saved && save != GMM_SAVE_NOTHING ? saved : gmm__part(plan, GMM__PART_MLP_Z);
    void *h = saved && save == GMM_SAVE_PREACT_AND_ACT ? saved + b.saved_h : gmm__part(plan, GMM__PART_MLP_H);
    gmm__mlp_steps steps;
    gmm_status s;
    gmm__mlp_fill(&steps, plan, offsets, z, h, NULL, NULL);
    steps.act.y = &steps.h;
    if ((s = gmm__mlp_offsets(plan, offsets, stream)) != GMM_OK) return s;
    if ((s = gmm__mlp_step(plan, GMM_OP_LINEAR_FWD, 1, &steps.fc1, stream)) != GMM_OK) return s;
    if ((s = gmm__mlp_act_step(plan, GMM_OP_ACT_FWD, &steps.act, stream)) != GMM_OK) return s;
    return gmm__mlp_step(plan, GMM_OP_LINEAR_FWD, 2, &steps.fc2, stream);
}

static int gmm__compose_plan_mlp_bwd(const gmm__call *call, gmm__plan *plan) {
    const gmm_mlp *d = &call->d.mlp;
    const gmm_mlp_config *c = &call->config;
    const gmm__mlp_buffers b = gmm__mlp_measure(call);
    const gmm__mlp_gradients need = gmm__mlp_gradients_of(call);
    gmm__mlp_steps steps;
    size_t step_bytes = 0, copies_bytes = 0;
    gmm__mlp_fill(&steps, plan, NULL, NULL, NULL, NULL, NULL);
    if (!gmm__mlp_size_copies(plan, 2, &steps, &copies_bytes, &step_bytes) ||
        !gmm__mlp_size_copies(plan, 1, &steps, &copies_bytes, &step_bytes))
        return 0;
    steps.act.dy = &steps.dh;
    steps.act.dx = need.dz ? &steps.dz : NULL;
    steps.act.dprob = d->dprob;
    steps.act.y = &steps.h;
    if ((need.z && c->save == GMM_SAVE_NOTHING &&
         !gmm__mlp_size_product(plan, GMM_OP_LINEAR_FWD, 1, &steps.fc1, &step_bytes, plan)) ||
        (need.dh && !gmm__mlp_size_product(plan, GMM_OP_LINEAR_DGRAD, 2, &steps.dgrad2, &step_bytes, plan)) ||
        (need.dh && !gmm__mlp_size_act(plan, GMM_OP_ACT_BWD, &steps.act, &step_bytes, plan)) ||
        (need.h && !need.dh && !gmm__mlp_size_act(plan, GMM_OP_ACT_FWD, &steps.act, &step_bytes, plan)) ||
        ((d->db2 || steps.bgrad2.d_bias_scale) &&
         !gmm__mlp_size_linear(plan, GMM_OP_LINEAR_BGRAD, &steps.bgrad2, &step_bytes, plan)) ||
        (d->db1 && !gmm__mlp_size_linear(plan, GMM_OP_LINEAR_BGRAD, &steps.bgrad1, &step_bytes, plan)) ||
        (d->dw2 && !gmm__mlp_size_product(plan, GMM_OP_LINEAR_WGRAD, 2, &steps.wgrad2, &step_bytes, plan)) ||
        (d->dw1 && !gmm__mlp_size_product(plan, GMM_OP_LINEAR_WGRAD, 1, &steps.wgrad1, &step_bytes, plan)) ||
        (d->dx && !gmm__mlp_size_product(plan, GMM_OP_LINEAR_DGRAD, 1, &steps.dgrad1, &step_bytes, plan)))
        return 0;
    gmm__reserve(plan, GMM__PART_MLP_OFFSETS, b.offsets_bytes);
    gmm__reserve(plan, GMM__PART_MLP_Z, need.z && c->save == GMM_SAVE_NOTHING ? b.z_bytes : 0);
    gmm__reserve(plan, GMM__PART_MLP_H, need.h && !need.defer ? b.h_bytes : 0);
    gmm__reserve(plan, GMM__PART_MLP_DH, need.dh ? b.h_bytes : 0);
    gmm__reserve(plan, GMM__PART_MLP_DZ, need.dz && !need.defer ? b.z_bytes : 0);
    gmm__reserve(plan, GMM__PART_MLP_COPIES, copies_bytes);
    gmm__reserve(plan, GMM__PART_MLP_STEP, step_bytes);
    plan->saved_bytes = b.saved_bytes;
    plan->deferred_bytes = need.defer ? b.deferred_arrays + 2 * b.arrays_bytes : 0;
    return 1;
}

/* The contents of gmm_wgrad_entry: the weight gradients of one backward, FC2's first. It points to the caller's
   matrices, fault word and arrays of gmm_mlp_quant, but to none of its descriptors and arrays by group. */
typedef struct gmm__wgrad_record {
    gmm_groups groups;
    gmm_options options;
    gmm_grad_hooks hooks;
    int64_t in[2], out[2];
    gmm_mat x[2], dy[2], dw[2];
    gmm_grad grad[2];
    gmm__mlp_quantization quantization;
    int32_t pending[2]; /* 1: wanted and not computed yet */
    int32_t tag;        /* GMM__WGRAD_TAG while queued */
} gmm__wgrad_record;

enum { GMM__WGRAD_TAG = 0x6772616D };

typedef char gmm__wgrad_record_fits[sizeof(gmm__wgrad_record) <= sizeof(gmm_wgrad_entry) ? 1 : -1];

/* Calls the hook for the gradient of a parameter if it is `complete`. While a graph is captured nothing is computed,
   and therefore no hook is called. */
static void gmm__mlp_call_hook(const gmm_context *ctx, const gmm_grad_hooks *hooks, gmm_param param, int complete,
                               gmm_stream stream) {
    if (complete && hooks && hooks->ready && !gmm__capturing(ctx, stream)) hooks->ready(hooks->user, param, stream);
}

static gmm_status gmm__convert_prepare(gmm__call *call, gmm_context *ctx, const char *function,
                                       const gmm_conversion *conversion, int query);
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
    s = gmm__convert_prepare(&step, call->ctx, call->function, &d, 0);
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

/* Appends the weight gradients of a backward to the queue of the caller. */
static gmm_status gmm__mlp_record(const gmm__mlp_steps *steps, const gmm__call *call, gmm_stream stream) {
    const gmm_mlp *d = &call->d.mlp;
    const gmm__mlp_buffers b = gmm__mlp_measure(call);
    gmm_wgrad_queue *q = d->queue;
    const gmm_linear *wgrads[2];
    const int roles[2] = { GMM__DW2, GMM__DW };
    gmm__wgrad_record r;
    int i;
    wgrads[0] = &steps->wgrad2;
    wgrads[1] = &steps->wgrad1;
    memset(&r, 0, sizeof r);
    r.tag = GMM__WGRAD_TAG;
    r.groups = steps->groups;
    r.options = steps->options;
    if (d->hooks) r.hooks = *d->hooks;
    r.quantization = gmm__mlp_quantization_of(call);
    r.quantization.quant.recipe = NULL;
    r.pending[0] = d->dw2 != NULL;
    r.pending[1] = d->dw1 != NULL;
    for (i = 0; i < 2; i++) {
        gmm_status s;
        if (!r.pending[i]) continue;
        r.in[i] = wgrads[i]->in_features;
        r.out[i] = wgrads[i]->out_features;
        r.x[i] = *wgrads[i]->x;
        r.dy[i] = *wgrads[i]->dy;
        r.dw[i] = call->mat[roles[i]];
        r.grad[i] = call->grad[roles[i]];
        r.x[i].columnwise = r.dy[i].columnwise = r.dw[i].columnwise = r.grad[i].mat = NULL;
        s = gmm__mlp_copy_arrays(call, (char *)d->deferred + b.deferred_arrays + (size_t)i * b.arrays_bytes, &r.dw[i],
                                 &r.grad[i], stream);
        if (s != GMM_OK) return s;
    }
    memcpy(&q->entries[(q->head + q->count) % q->capacity], &r, sizeof r);
    q->count++;
    return GMM_OK;
}

static gmm_status gmm__compose_launch_mlp_bwd(const gmm__plan *plan, gmm_stream stream) {
    const gmm__call *call = plan->call;
    const gmm_mlp *d = &call->d.mlp;
    const gmm_mlp_config *c = &call->config;
    const gmm__mlp_buffers b = gmm__mlp_measure(call);
    const gmm__mlp_gradients need = gmm__mlp_gradients_of(call);
    char *saved = (char *)d->saved, *deferred = (char *)d->deferred;
    const int h_saved = c->save == GMM_SAVE_PREACT_AND_ACT && !need.defer;
    void *offsets = need.defer ? deferred : (char *)gmm__part(plan, GMM__PART_MLP_OFFSETS);
    void *z = c->save == GMM_SAVE_NOTHING ? gmm__part(plan, GMM__PART_MLP_Z) : saved;
    void *h = need.defer ? deferred + b.deferred_h
                         : h_saved ? saved + b.saved_h : (char *)gmm__part(plan, GMM__PART_MLP_H);
    void *dz = need.defer ? deferred + b.deferred_dz : (char *)gmm__part(plan, GMM__PART_MLP_DZ);
    gmm__mlp_steps steps;
    gmm_status s;

    gmm__mlp_fill(&steps, plan, offsets, z, h, gmm__part(plan, GMM__PART_MLP_DH), dz);
    steps.act.dy = &steps.dh;
    steps.act.dx = need.dz ? &steps.dz : NULL;
    steps.act.dprob = d->dprob;
    steps.act.y = need.h && !h_saved ? &steps.h : NULL;
    if ((s = gmm__mlp_offsets(plan, offsets, stream)) != GMM_OK) return s;
    if (need.z && c->save == GMM_SAVE_NOTHING &&
        (s = gmm__mlp_step(plan, GMM_OP_LINEAR_FWD, 1, &steps.fc1, stream)) != GMM_OK)
        return s;
    if ((s = gmm__mlp_cast_once(plan, 2, &steps, stream)) != GMM_OK) return s;
    if (need.dh) {
        if ((s = gmm__mlp_step(plan, GMM_OP_LINEAR_DGRAD, 2, &steps.dgrad2, stream)) != GMM_OK) return s;
        if ((s = gmm__mlp_act_step(plan, GMM_OP_ACT_BWD, &steps.act, stream)) != GMM_OK) return s;
    } else if (steps.act.y) {
        if ((s = gmm__mlp_act_step(plan, GMM_OP_ACT_FWD, &steps.act, stream)) != GMM_OK) return s;
    }
    if (d->dw2 && !need.defer && (s = gmm__mlp_step(plan, GMM_OP_LINEAR_WGRAD, 2, &steps.wgrad2, stream)) != GMM_OK)
        return s;
    gmm__mlp_call_hook(call->ctx, d->hooks, GMM_PARAM_W2, d->dw2 && !need.defer, stream);
    if ((d->db2 || steps.bgrad2.d_bias_scale) &&
        (s = gmm__mlp_step(plan, GMM_OP_LINEAR_BGRAD, 2, &steps.bgrad2, stream)) != GMM_OK)
        return s;
    gmm__mlp_call_hook(call->ctx, d->hooks, GMM_PARAM_B2, d->db2 != NULL, stream);
    if ((s = gmm__mlp_cast_once(plan, 1, &steps, stream)) != GMM_OK) return s; /* FC2's copies are read no more */
    if (d->dw1 && !need.defer && (s = gmm__mlp_step(plan, GMM_OP_LINEAR_WGRAD, 1, &steps.wgrad1, stream)) != GMM_OK)
        return s;
    gmm__mlp_call_hook(call->ctx, d->hooks, GMM_PARAM_W1, d->dw1 && !need.defer, stream);
    if (d->db1 && (s = gmm__mlp_step(plan, GMM_OP_LINEAR_BGRAD, 1, &steps.bgrad1, stream)) != GMM_OK) return s;
    gmm__mlp_call_hook(call->ctx, d->hooks, GMM_PARAM_B1, d->db1 != NULL, stream);
    if (d->dx && (s = gmm__mlp_step(plan, GMM_OP_LINEAR_DGRAD, 1, &steps.dgrad1, stream)) != GMM_OK) return s;
    return need.defer ? gmm__mlp_record(&steps, call, stream) : GMM_OK;
}

/* Weight gradient i of a record (0 is FC2's, 1 is FC1's) as a linear descriptor, and as a product of quantized
   operands. Both point into the record. */
static gmm_linear gmm__mlp_recorded_linear(gmm__wgrad_record *r, int i) {
    gmm_linear l = GMM_ZERO;
    r->grad[i].mat = &r->dw[i];
    l.groups = &r->groups;
    l.options = &r->options;
    l.in_features = r->in[i];
    l.out_features = r->out[i];
    l.x = &r->x[i];
    l.dy = &r->dy[i];
    l.dw = &r->grad[i];
    return l;
}
static gmm__mlp_product gmm__mlp_recorded_product(const gmm__call *call, const gmm__wgrad_record *r, int i,
                                                  const gmm_linear *l) {
    return gmm__mlp_product_of(call, &r->quantization, GMM_OP_LINEAR_WGRAD, 2 - i, l);
}

/* Plans the weight gradients of a record, which call->input and call->output point to. They are NULL in a query, which
   plans those of the MLP's own descriptor. */
static int gmm__compose_plan_mlp_wgrad(const gmm__call *call, gmm__plan *plan) {
    size_t step_bytes = 0;
    int i;
    if (call->input) {
        gmm__wgrad_record r = *(const gmm__wgrad_record *)call->input;
        gmm__mlp_product product;
        gmm_linear l;
        for (i = 0; i < 2; i++) {
            if (!r.pending[i]) continue;
            l = gmm__mlp_recorded_linear(&r, i);
            product = gmm__mlp_recorded_product(call, &r, i, &l);
            if (r.quantization.recipe.kind == GMM_RECIPE_NONE) {
                if (!gmm__mlp_size_linear(plan, GMM_OP_LINEAR_WGRAD, &l, &step_bytes, plan)) return 0;
            } else if (gmm__mlp_measure_product(&product, &step_bytes) != GMM_OK)
                return gmm__decline(plan, "%.180s", call->ctx->error.text);
        }
    } else {
        gmm__mlp_steps steps;
        gmm__mlp_fill(&steps, plan, NULL, NULL, NULL, NULL, NULL);
        const gmm_mlp *d = &call->d.mlp;
        if ((d->dw2 && !gmm__mlp_size_product(plan, GMM_OP_LINEAR_WGRAD, 2, &steps.wgrad2, &step_bytes, plan)) ||
            (d->dw1 && !gmm__mlp_size_product(plan, GMM_OP_LINEAR_WGRAD, 1, &steps.wgrad1, &step_bytes, plan)))
            return 0;
    }
    memset(plan->part, 0, sizeof plan->part);
    plan->workspace_bytes = step_bytes;
    return 1;
}

static gmm_status gmm__compose_launch_mlp_wgrad(const gmm__plan *plan, gmm_stream stream) {
    const gmm_param params[2] = { GMM_PARAM_W2, GMM_PARAM_W1 };
    const gmm__call *call = plan->call;
    gmm__wgrad_record *r = (gmm__wgrad_record *)plan->call->output;
    int i;
    for (i = 0; i < 2; i++) {
        gmm__mlp_product product;
        gmm_linear l;
        gmm_status s;
        if (!r->pending[i]) continue;
        l = gmm__mlp_recorded_linear(r, i);
        product = gmm__mlp_recorded_product(call, r, i, &l);
        s = r->quantization.recipe.kind == GMM_RECIPE_NONE
                ? gmm__linear_run(call->ctx, GMM_OP_LINEAR_WGRAD, call->function, &l, plan->workspace,
                                  plan->workspace_bytes, stream)
                : gmm__mlp_run_product(&product, plan->workspace, plan->workspace_bytes, stream);
        if (s != GMM_OK) return s;
        r->pending[i] = 0; /* if the other gradient fails, the next call does not add this one again */
        gmm__mlp_call_hook(call->ctx, &r->hooks, params[i], 1, stream);
    }
    return GMM_OK;
}

/* Checks gmm_mlp.saved or gmm_mlp.deferred against the `need` bytes of the plan. */
static gmm_status gmm__mlp_buffer(gmm__call *call, const char *name, int writes, const void *memory, size_t bytes,
                                  size_t need) {
    if (!memory && need > 0)
        return gmm__refuse(call, GMM_E_NULL, name, "is NULL for %llu bytes", (unsigned long long)need);
    if (bytes < need)
        return gmm__refuse(call, GMM_E_WORKSPACE, name, "has %llu bytes and must have >= %llu",
                           (unsigned long long)bytes, (unsigned long long)need);
    if ((uintptr_t)memory % GMM__WORKSPACE_ALIGN)
        return gmm__refuse(call, GMM_E_ALIGN, name, "%p is not aligned to %d bytes", memory, (int)GMM__WORKSPACE_ALIGN);
    gmm__add_span(call, name, "", writes, memory, (int64_t)need);
    return GMM_OK;
}

/* Checks the fields of the queue, which the caller may have set. */
static gmm_status gmm__mlp_check_queue(gmm__call *call, const gmm_wgrad_queue *q) {
    if (!q || !q->entries) return gmm__refuse(call, GMM_E_NULL, "queue", "is NULL or has no entries");
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
    const gmm_status s = gmm__mlp_prepare(&call, ctx, op, "gmm_mlp_query", mlp, 1);
    return s != GMM_OK ? s : gmm__serve(&call, info, NULL, 0, NULL);
}

GMMDEF gmm_status gmm_mlp_saved_query(gmm_context *ctx, gmm_op op, const gmm_mlp *mlp, gmm_saved_layout *layout) {
    gmm__call call;
    const gmm_status s = gmm__mlp_prepare(&call, ctx, op, "gmm_mlp_saved_query", mlp, 1);
    gmm_saved_layout full;
    uint32_t size;
    if (s != GMM_OK) return s;
    if (!layout) return gmm__refuse(&call, GMM_E_NULL, "layout", "is NULL");
    size = layout->struct_size;
    if (size > sizeof full)
        return gmm__refuse(&call, GMM_E_VERSION, "layout", "struct_size %u is larger than the %u bytes of version %s",
                           size, (unsigned)sizeof full, GMM_VERSION_STRING);
    full = gmm__mlp_saved(&call);
    full.struct_size = size;
    memcpy(layout, &full, size ? size : sizeof full);
    return GMM_OK;
}

GMMDEF gmm_status gmm_mlp_fwd(gmm_context *ctx, const gmm_mlp *mlp, void *workspace, size_t workspace_bytes,
                              gmm_stream stream) {
    gmm__call call;
    gmm__plan plan;
    gmm_status s = gmm__mlp_prepare(&call, ctx, GMM_OP_MLP_FWD, "gmm_mlp_fwd", mlp, 0);
    if (s != GMM_OK || (s = gmm__select(&call, &plan)) != GMM_OK) return s;
    if (call.d.mlp.saved &&
        (s = gmm__mlp_buffer(&call, "saved", 1, call.d.mlp.saved, call.d.mlp.saved_bytes, plan.saved_bytes)) != GMM_OK)
        return s;
    return gmm__serve(&call, NULL, workspace, workspace_bytes, stream);
}

GMMDEF gmm_status gmm_mlp_bwd(gmm_context *ctx, const gmm_mlp *mlp, void *workspace, size_t workspace_bytes,
                              gmm_stream stream) {
    gmm__call call;
    gmm__plan plan;
    gmm_status s = gmm__mlp_prepare(&call, ctx, GMM_OP_MLP_BWD, "gmm_mlp_bwd", mlp, 0);
    const gmm_mlp *d = &call.d.mlp;
    if (s != GMM_OK || (s = gmm__select(&call, &plan)) != GMM_OK) return s;
    if ((s = gmm__mlp_buffer(&call, "saved", 0, d->saved, d->saved_bytes, plan.saved_bytes)) != GMM_OK ||
        (s = gmm__mlp_buffer(&call, "deferred", 1, d->deferred, d->deferred_bytes, plan.deferred_bytes)) != GMM_OK)
        return s;
    if (gmm__mlp_gradients_of(&call).defer) {
        if ((s = gmm__mlp_check_queue(&call, d->queue)) != GMM_OK) return s;
        if (d->queue->count >= d->queue->capacity)
            return gmm__refuse(&call, GMM_E_STATE, "queue", "is full with %d of %d entries", d->queue->count,
                               d->queue->capacity);
    }
    return gmm__serve(&call, NULL, workspace, workspace_bytes, stream);
}

/* Records the memory of both weight gradients of a record for the overlap check, which thus finds an overlap before the
   first gradient is computed. */
static gmm_status gmm__mlp_read_record(gmm__call *call, gmm__wgrad_record *r) {
    static const char *const names[2] = { "dw2", "dw1" };
    const int roles[2] = { GMM__DW2, GMM__DW };
    gmm_linear l;
    gmm_status s;
    int i;
    gmm__add_span(call, "groups.splits", "", 0, r->groups.splits, (r->groups.count + (int64_t)1) * 8);
    gmm__add_span(call, "groups.fault", "", 1, r->groups.fault, (int64_t)sizeof *r->groups.fault);
    for (i = 0; i < 2; i++) {
        if (!r->pending[i]) continue;
        l = gmm__mlp_recorded_linear(r, i);
        s = gmm__read_mat(call, GMM__X_, "x", l.x, 1, gmm__matrix(call->rows, l.in_features), GMM__FLOATS);
        if (s == GMM_OK)
            s = gmm__read_mat(call, GMM__DY, "dy", l.dy, 1, gmm__matrix(call->rows, l.out_features), GMM__FLOATS);
        if (s != GMM_OK ||
            (s = gmm__read_grad(call, roles[i], names[i], l.dw, 1, l.out_features, l.in_features)) != GMM_OK)
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
        return gmm__refuse(&call, GMM_E_STATE, "queue", "is empty (%d of %d entries)", queue->count,
                           queue->capacity);
    memcpy(&record, &queue->entries[queue->head], sizeof record);
    if (record.tag != GMM__WGRAD_TAG)
        return gmm__refuse(&call, GMM_E_STATE, "queue.entries", "[%d] holds nothing that gmm_mlp_bwd recorded, yet is "
                           "the first of %d", queue->head, queue->count);
    call.options = record.options;
    call.groups = record.groups;
    call.rows = record.groups.capacity;
    call.input = call.output = &record;
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

GMMDEF gmm_status gmm_mlp_fire_hooks(gmm_context *ctx, gmm_op op, const gmm_mlp *mlp, gmm_stream stream) {
    gmm__call call;
    gmm_status s = gmm__mlp_prepare(&call, ctx, op, "gmm_mlp_fire_hooks", mlp, 1);
    const gmm_mlp *d = &call.d.mlp;
    int weights_complete;
    if (s != GMM_OK) return s;
    if (op == GMM_OP_MLP_FWD) return gmm__refuse(&call, GMM_E_ARG, "op", "%s fires no hooks", gmm_op_name(op));
    weights_complete = (op == GMM_OP_MLP_WGRAD) == gmm__mlp_delayed(&call);
    gmm__mlp_call_hook(ctx, d->hooks, GMM_PARAM_W2, weights_complete && d->dw2, stream);
    gmm__mlp_call_hook(ctx, d->hooks, GMM_PARAM_B2, op == GMM_OP_MLP_BWD && d->db2, stream);
    gmm__mlp_call_hook(ctx, d->hooks, GMM_PARAM_W1, weights_complete && d->dw1, stream);
    gmm__mlp_call_hook(ctx, d->hooks, GMM_PARAM_B1, op == GMM_OP_MLP_BWD && d->db1, stream);
    return GMM_OK;
}

