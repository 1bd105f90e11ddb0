/* Plan, launch and entry points of the layer, which is composed of operations. The engines CPU and MMA have these
   functions in common; each operation selects an engine of its own. */

/* Gives the MLP's descriptor the matrices that a backward does not read, so that it can be checked. */
static void gmm__moe_complete(gmm__moe_steps *steps) {
    if (!steps->mlp.x) {
        steps->x = gmm_mat_packed(steps->dtype, NULL);
        steps->mlp.x = &steps->x;
    }
    if (!steps->mlp.dy) {
        steps->dy = gmm_mat_packed(steps->dtype, NULL);
        steps->mlp.dy = &steps->dy;
    }
}

/* Chooses whether forward permutes rows of x or, where its plan copies none before, FC1's product gathers them. The
   plan is for any addresses of x and w1, so that a query without addresses chooses as the launch does; an x that is not
   at a multiple of 16 bytes is then multiplied by MMA, which copies its rows. It does not count
   that FC1's product may compute the activation too where rows are permuted: where it gathers, that is no faster, and
   takes memory for the rows. */
static void gmm__moe_choose_rows(gmm__call *call) {
    const gmm_error last_error = call->ctx->error;
    const gmm_mat *const w1 = gmm__moe_mlp(call).w1;
    gmm__moe_steps steps;
    gmm_linear fc1 = GMM_ZERO;
    gmm_mat x = call->mat[GMM__X_], w, z;
    gmm__call product;
    gmm__plan plan;
    if (call->op != GMM_OP_MOE_FWD || call->d.moe.save_rows || !gmm__moe_prefers_permuting(call, GMM__X_) ||
        call->recipe.kind != GMM_RECIPE_NONE || /* WGMMA gathers no rows beside quantized weights, */
        call->options.fuse == GMM_FUSE_ALWAYS)  /* nor in a product that computes the activation */
        return;
    if (!w1 || !gmm__copy_sized(&w, sizeof w, w1)) return; /* the MLP's checks refuse it */
    call->layer_gathers = 1;
    gmm__moe_build(&steps, call, gmm__placeholder(), gmm__placeholder());
    z = gmm_mat_packed(steps.dtype, NULL);
    fc1.groups = steps.mlp.groups;
    fc1.options = steps.mlp.options;
    fc1.in_features = call->in;
    fc1.out_features = gmm__mlp_fc1_cols(call);
    x.data = w.data = NULL;
    fc1.x = &x;
    fc1.x_index = steps.mlp.x_index;
    fc1.index_rows = steps.mlp.index_rows;
    fc1.index_div = steps.mlp.index_div;
    fc1.w = &w;
    fc1.y = &z;
    if (gmm__linear_prepare(&product, call->ctx, GMM_OP_LINEAR_FWD, call->function, &fc1, 1) != GMM_OK ||
        gmm__select(&product, &plan) != GMM_OK || plan.copies_rows)
        call->layer_gathers = 0;
    call->ctx->error = last_error;
}

/* Checks the caller's descriptors of route and MLP as those of the operations that read them. *mlp becomes the checked
   call of the MLP, also where the layer does not run it. */
static gmm_status gmm__moe_check_parts(gmm__call *call, gmm__call *mlp) {
    const gmm_moe *d = &call->d.moe;
    const int fwd = call->op == GMM_OP_MOE_FWD;
    const gmm_op op = fwd ? GMM_OP_MLP_FWD : GMM_OP_MLP_BWD;
    gmm__moe_steps steps;
    gmm_status s;
    gmm__moe_choose_rows(call);
    gmm__moe_build(&steps, call, gmm__placeholder(), gmm__placeholder());
    if (d->route && (fwd || steps.route.dlogits)) {
        gmm__call route;
        steps.route.dprobs = NULL; /* the layer's own memory */
        s = gmm__topk_prepare(&route, call->ctx, fwd ? GMM_OP_TOPK_FWD : GMM_OP_TOPK_BWD, call->function, &steps.route,
                              call->query);
        if (s != GMM_OK) return gmm__moe_adopt_error(call, s);
        gmm__moe_adopt_spans(call, "route", &route);
    }
    if (!fwd && !call->query && d->route) { /* what a backward without dlogits reads too */
        const int64_t slots = d->tokens * d->topk;
        const int reads_probs = steps.wants.weights_sum && (steps.wants.mlp || steps.wants.dprobs);
        s = gmm__check_array(call, "route.probs", steps.route.probs, reads_probs, slots);
        if (s == GMM_OK)
            s = gmm__check_array(call, "route.indices", steps.route.indices, steps.route.dlogits != NULL, slots);
        if (s != GMM_OK) return s;
    }
    gmm__moe_complete(&steps);
    s = gmm__mlp_prepare(mlp, call->ctx, op, call->function, &steps.mlp,
                         call->query ? GMM__MLP_QUERY : GMM__MLP_IN_LAYER);
    if (s == GMM_OK && !fwd && !call->query && steps.wants.mlp) s = gmm__mlp_check_append(mlp);
    if (s != GMM_OK) return gmm__moe_adopt_error(call, s);
    gmm__moe_adopt_spans(call, "mlp", mlp);
    call->quant = mlp->quant;
    call->recipe = mlp->recipe;
    call->in_align = mlp->in_align;
    call->out_align = mlp->out_align;
    call->mlp_saved = gmm__mlp_saved_of(mlp).layout;
    return GMM_OK;
}

/* Checks a layer call. call->in is hidden, call->out hidden_out, call->rows the capacity. */
static gmm_status gmm__moe_prepare_parts(gmm__call *call, gmm_context *ctx, gmm_op op, const char *function,
                                         const gmm_moe *moe, int query, gmm__call *mlp) {
    gmm_moe *d = &call->d.moe;
    gmm_status s = gmm__open(call, ctx, op, function, query);
    if (s != GMM_OK || (s = gmm__read_descriptor(call, "moe", d, sizeof *d, moe)) != GMM_OK) return s;
    if (op != GMM_OP_MOE_FWD && op != GMM_OP_MOE_BWD)
        return gmm__refuse(call, GMM_E_ARG, "op", "%s is neither moe_fwd nor moe_bwd", gmm_op_name(op));
    (void)snprintf(call->shapes, sizeof call->shapes, "T=%lld E=%d k=%d R=%lld", (long long)d->tokens, d->experts,
                   d->topk, (long long)d->capacity);
    if ((s = gmm__read_options(call, d->options)) != GMM_OK || (s = gmm__moe_read_sizes(call)) != GMM_OK ||
        (s = gmm__moe_read_parts(call)) != GMM_OK)
        return s;
    (void)snprintf(call->shapes, sizeof call->shapes, "T=%lld E=%d k=%d R=%lld hidden=%lld ffn=%lld out=%lld",
                   (long long)d->tokens, d->experts, d->topk, (long long)d->capacity, (long long)call->in,
                   (long long)call->config.ffn, (long long)call->out);
    if ((s = gmm__moe_read_operands(call)) != GMM_OK) return s;
    return gmm__moe_check_parts(call, mlp);
}
static gmm_status gmm__moe_prepare(gmm__call *call, gmm_context *ctx, gmm_op op, const char *function,
                                   const gmm_moe *moe, int query) {
    gmm__call mlp;
    return gmm__moe_prepare_parts(call, ctx, op, function, moe, query, &mlp);
}

/* Raises the plan's bytes to what step i takes. Returns 0 if no engine serves it. */
static int gmm__moe_plan_step(const gmm__moe_steps *steps, int i, gmm__plan *plan) {
    gmm_context *ctx = plan->call->ctx;
    const gmm_error last_error = ctx->error;
    gmm__text *text = plan->call->describes;
    gmm__call step;
    gmm__plan step_plan;
    const gmm__moe_step *row = &steps->step[i];
    const gmm_status s = gmm__prepare(&step, ctx, row->op, plan->call->function, row->descriptor, 1);
    if (!gmm__plan_step(&step, s, &last_error, &step_plan, plan)) return 0;
    if (row->workspace + step_plan.workspace_bytes > plan->workspace_bytes)
        plan->workspace_bytes = row->workspace + step_plan.workspace_bytes;
    if (text) gmm__describe_plan(text, &step_plan);
    if (step.op != GMM_OP_MLP_FWD && step.op != GMM_OP_MLP_BWD) return 1;
    plan->deferred_bytes += step_plan.deferred_bytes;
    plan->weight_cache_bytes = step_plan.weight_cache_bytes;
    memcpy(plan->note, step_plan.note, sizeof plan->note);
    if (!text) return 1;
    step.describes = text; /* planning is pure: the second plan writes the lines of the MLP's steps */
    text->depth++;
    (void)gmm__select(&step, &step_plan);
    text->depth--;
    return 1;
}

static int gmm__compose_plan_moe(const gmm__call *call, gmm__plan *plan) {
    gmm__moe_steps steps;
    int i;
    gmm__moe_build(&steps, call, gmm__placeholder(), gmm__placeholder());
    plan->workspace_bytes = steps.workspace.peak;
    plan->saved_bytes = (size_t)(gmm__moe_saved_of(call).mlp + call->mlp_saved.bytes);
    plan->deferred_bytes = steps.deferred.peak;
    for (i = 0; i < steps.count; i++)
        if (!gmm__moe_plan_step(&steps, i, plan)) return 0;
    return 1;
}

/* Whether a span is memory that the layer writes and its MLP does not: neither one of the MLP's own, nor a buffer of
   the layer in which the MLP has its part. */
static int gmm__moe_writes_alone(const gmm__span *span) {
    static const char *const shared[] = { "saved", "deferred", "workspace", "sizes", "fault" };
    size_t k;
    for (k = 0; k < sizeof shared / sizeof shared[0]; k++)
        if (!strcmp(span->name, shared[k])) return 0;
    return span->writes && strncmp(span->name, "mlp.", 4) != 0;
}
/* Adds such memory to the call of the MLP: weights that hooks.need sets must not overlap it. */
static gmm_status gmm__moe_add_outputs(const gmm__call *layer, gmm__call *call) {
    gmm__plan plan;
    gmm_status s = gmm__select(call, &plan);
    int32_t i;
    if (s != GMM_OK || (s = gmm__mlp_check_buffers(call, &plan)) != GMM_OK) return s;
    for (i = 0; i < layer->spans; i++)
        if (call->spans < GMM__SPANS && gmm__moe_writes_alone(&layer->span[i]))
            call->span[call->spans++] = layer->span[i];
    return GMM_OK;
}

static gmm_status gmm__compose_launch_moe(const gmm__plan *plan, gmm_stream stream) {
    const gmm__call *layer = plan->call;
    gmm__moe_steps steps;
    gmm_status s = GMM_OK;
    int i;
    gmm__moe_build(&steps, layer, (char *)plan->workspace, (char *)layer->d.moe.deferred);
    for (i = 0; i < steps.count && s == GMM_OK; i++) {
        const gmm__moe_step *step = &steps.step[i];
        gmm__call call;
        s = gmm__prepare(&call, layer->ctx, step->op, layer->function, step->descriptor, 0);
        if (s == GMM_OK && step->descriptor == &steps.mlp && gmm__mlp_has_need_hook(&call))
            s = gmm__moe_add_outputs(layer, &call);
        if (s == GMM_OK) s = gmm__serve_step(&call, plan, step->workspace, stream);
    }
    return gmm__moe_adopt_error(layer, s);
}

GMMDEF gmm_status gmm_moe_query(gmm_context *ctx, gmm_op op, const gmm_moe *moe, gmm_info *info) {
    const int queued = op == GMM_OP_MLP_WGRAD;
    gmm__call call, mlp;
    gmm__moe_steps steps;
    gmm_status s = gmm__moe_prepare_parts(&call, ctx, queued ? GMM_OP_MOE_BWD : op, "gmm_moe_query", moe, 1, &mlp);
    if (s != GMM_OK) return s;
    if (!queued) return gmm__serve(&call, info, NULL, 0, NULL);
    gmm__moe_build(&steps, &call, gmm__placeholder(), gmm__placeholder());
    gmm__moe_complete(&steps);
    s = gmm__mlp_prepare(&mlp, ctx, op, "gmm_moe_query", &steps.mlp, GMM__MLP_QUERY);
    return gmm__moe_adopt_error(&call, s != GMM_OK ? s : gmm__serve(&mlp, info, NULL, 0, NULL));
}

GMMDEF gmm_status gmm_moe_saved_query(gmm_context *ctx, gmm_op op, const gmm_moe *moe, gmm_moe_layout *layout) {
    gmm__call call;
    const gmm_status s = gmm__moe_prepare(&call, ctx, op, "gmm_moe_saved_query", moe, 1);
    gmm_moe_layout full;
    int64_t begin;
    int32_t i;
    if (s != GMM_OK) return s;
    full = gmm__moe_saved_of(&call).layout;
    begin = full.bytes;
    for (i = 0; i < call.mlp_saved.count; i++) {
        full.part[full.count] = call.mlp_saved.part[i];
        full.part[full.count++].offset += begin;
    }
    full.bytes += call.mlp_saved.bytes;
    return gmm__write_layout(&call, layout, &full, sizeof full);
}

/* Checks the caller's buffers, and launches. */
static gmm_status gmm__moe_run(gmm_context *ctx, gmm_op op, const char *function, const gmm_moe *moe, void *workspace,
                               size_t workspace_bytes, gmm_stream stream) {
    gmm__call call;
    gmm__plan plan;
    const gmm_moe *d = &call.d.moe;
    gmm_status s = gmm__moe_prepare(&call, ctx, op, function, moe, 0);
    if (s != GMM_OK || (s = gmm__select(&call, &plan)) != GMM_OK) return s;
    s = gmm__check_buffers(&call, &plan, d->saved, d->saved_bytes, d->deferred, d->deferred_bytes,
                           "mlp.quant.weight_cache");
    return s != GMM_OK ? s : gmm__serve_plan(&call, &plan, workspace, workspace_bytes, stream);
}

GMMDEF gmm_status gmm_moe_fwd(gmm_context *ctx, const gmm_moe *moe, void *workspace, size_t workspace_bytes,
                              gmm_stream stream) {
    return gmm__moe_run(ctx, GMM_OP_MOE_FWD, "gmm_moe_fwd", moe, workspace, workspace_bytes, stream);
}

GMMDEF gmm_status gmm_moe_bwd(gmm_context *ctx, const gmm_moe *moe, void *workspace, size_t workspace_bytes,
                              gmm_stream stream) {
    return gmm__moe_run(ctx, GMM_OP_MOE_BWD, "gmm_moe_bwd", moe, workspace, workspace_bytes, stream);
}

GMMDEF gmm_status gmm_moe_fire_hooks(gmm_context *ctx, gmm_op op, const gmm_moe *moe, gmm_stream stream) {
    const int queued = op == GMM_OP_MLP_WGRAD;
    gmm__call call, mlp;
    const gmm_status s = gmm__moe_prepare_parts(&call, ctx, queued ? GMM_OP_MOE_BWD : op, "gmm_moe_fire_hooks", moe, 1,
                                                &mlp);
    if (s != GMM_OK) return s;
    if (op == GMM_OP_MOE_FWD) return gmm__refuse(&call, GMM_E_ARG, "op", "%s fires no hooks", gmm_op_name(op));
    gmm__mlp_call_ready_hooks(&mlp, queued ? GMM_OP_MLP_WGRAD : GMM_OP_MLP_BWD, stream);
    return GMM_OK;
}
