/* The steps of an MLP call: how they are planned and enqueued. */

/* Checks the call of a step. */
static gmm_status gmm__mlp_prepare_step(const gmm__mlp_steps *steps, const gmm__mlp_step *step, int query,
                                        gmm__call *call) {
    const gmm__call *mlp = steps->call;
    const gmm_status s = gmm__prepare(call, mlp->ctx, step->op, mlp->function, step->descriptor, query);
    call->split_tiles = steps->tiles;
    call->fused = step->fused;
    call->describes = mlp->describes;
    if (step->fused.act_source) call->act = *step->fused.act_source->act;
    if (step->fused.product_act) call->act = *step->fused.product_act->act;
    return s;
}

/* Raises plan->workspace_bytes to what the steps take. `built` is the status of listing them. Returns 0 if an engine
   or the listing declines. */
static int gmm__mlp_plan_steps(const gmm__mlp_steps *steps, gmm_status built, gmm__plan *plan) {
    gmm_context *ctx = plan->call->ctx;
    const gmm_error last_error = ctx->error;
    size_t bytes = steps->workspace.peak;
    int i;
    if (built != GMM_OK) return gmm__decline(plan, "%.180s", ctx->error.text);
    for (i = 0; i < steps->count; i++) {
        gmm__call call;
        size_t step_bytes = 0;
        const gmm_status s = gmm__mlp_prepare_step(steps, &steps->step[i], 1, &call);
        if (!gmm__mlp_measure_step(&call, s, &last_error, &step_bytes, plan)) return 0;
        if (steps->step[i].workspace + step_bytes > bytes) bytes = steps->step[i].workspace + step_bytes;
    }
    if (bytes > plan->workspace_bytes) plan->workspace_bytes = bytes;
    return 1;
}

/* Calls the hook for the gradient of a parameter. While a graph is captured nothing is computed, and therefore no hook
   is called. */
static void gmm__mlp_call_ready_hook(const gmm_context *ctx, const gmm_grad_hooks *hooks, gmm_param param,
                                     gmm_stream stream) {
    if (hooks && hooks->ready && !gmm__capturing(ctx, stream)) hooks->ready(hooks->user, param, stream);
}

/* Checks a matrix that hooks.need has set against the one with which the call began. */
static gmm_status gmm__mlp_check_set_weight(const gmm__call *call, const char *name, const gmm_mat *was,
                                            const gmm_mat *m) {
    const uint32_t flags = ~(uint32_t)GMM_MAT_TABLE_ON_HOST;
    const struct { const char *name; int64_t was, is; } fields[] = {
        { "dtype", was->dtype, m->dtype },
        { "scaling", was->scaling, m->scaling },
        { "scale_order", was->scale_order, m->scale_order },
        { "hadamard", was->hadamard, m->hadamard },
        { "flags", was->flags & flags, m->flags & flags },
        { "ld", was->ld, m->ld },
    };
    const int64_t bits = gmm_dtype_bits(m->dtype);
    const int readable = call->ctx->config.space == GMM_SPACE_CPU || (m->flags & (uint32_t)GMM_MAT_TABLE_ON_HOST);
    const void *address = m->data;
    int32_t g;
    size_t i;
    for (i = 0; i < sizeof fields / sizeof fields[0]; i++)
        if (fields[i].was != fields[i].is)
            return gmm__refuse(call, GMM_E_CONFIG, name, "%s %lld must be %lld, as when the call began: hooks.need may "
                               "set addresses and group_stride alone", fields[i].name, (long long)fields[i].is,
                               (long long)fields[i].was);
    if (m->ld * bits % 128) return GMM_OK;
    if (m->data && m->group_stride * bits % 128)
        return gmm__refuse(call, GMM_E_ALIGN, name, "group_stride %lld, set by hooks.need, must be a multiple of 16 "
                           "bytes as ld %lld is", (long long)m->group_stride, (long long)m->ld);
    for (g = 0; m->table && readable && g < call->groups.count && (uintptr_t)address % 16 == 0; g++)
        address = m->table[g];
    if ((uintptr_t)address % 16)
        return gmm__refuse(call, GMM_E_ALIGN, name, "%p, set by hooks.need, must be a multiple of 16 bytes as ld %lld "
                           "is", address, (long long)m->ld);
    return GMM_OK;
}

/* Calls hooks.need for the weight of a step, and reads the addresses that it has set: those of the copy that the step's
   product reads, where the weight is quantized. `again` is the call, whose weight is read and checked again. */
static gmm_status gmm__mlp_call_need_hook(gmm__mlp_steps *steps, const gmm__mlp_step *step, gmm_stream stream) {
    const int second = step->need_slot == GMM_SLOT_W2, role = second ? GMM__W2 : GMM__W;
    const char *const names[2] = { second ? "w2" : "w1", second ? "w2.columnwise" : "w1.columnwise" };
    const gmm_grad_hooks *hooks = steps->call->d.mlp.hooks;
    const int dgrad = step->need_op == GMM_OP_LINEAR_DGRAD;
    const gmm_direction direction = dgrad ? gmm__mlp_dgrad_direction(steps->call) : GMM_ROWWISE;
    gmm__mlp_operand *o = &steps->operand[step->need_slot];
    const int plain = o->source->scaling == GMM_SCALING_NONE; /* both directions read the one matrix */
    const char *const name = names[plain ? GMM_ROWWISE : direction];
    gmm_mat *mat = plain ? &steps->weight[second] : &o->copy[direction], was = *mat;
    gmm__call again = *steps->call;
    gmm_status s = hooks->need(hooks->user, second ? GMM_PARAM_W2 : GMM_PARAM_W1, step->need_op, stream);
    if (s != GMM_OK)
        return gmm__refuse(&again, s, "hooks.need", "status %d (%s) for %s of %s", (int)s, gmm_status_name(s), names[0],
                           gmm_op_name(step->need_op));
    if ((s = gmm__mlp_read_weight(&again, role, 1 << direction)) != GMM_OK) return s;
    if (again.mat[role].scaling != o->source->scaling)
        return gmm__mlp_check_set_weight(&again, names[0], &was, &again.mat[role]);
    if (!plain) { /* a query reads both matrices again, to fill in their ld */
        const gmm__extents extents = gmm__mlp_weight_extents(&again, role);
        gmm_mat now = again.mat[role];
        if (direction == GMM_COLUMNWISE) (void)gmm__copy_sized(&now, sizeof now, again.mat[role].columnwise);
        again.query = 1;
        if ((s = gmm__read_quant(&again, role, name, &was, extents, direction)) != GMM_OK) return s;
        was = again.mat[role];
        if ((s = gmm__read_quant(&again, role, name, &now, extents, direction)) != GMM_OK) return s;
        again.query = 0;
    }
    s = gmm__mlp_check_set_weight(&again, name, &was, &again.mat[role]);
    if (s != GMM_OK || (s = gmm__check_overlap(&again)) != GMM_OK) return s;
    *mat = again.mat[role];
    if (mat->scaling != GMM_SCALING_NONE) {
        mat->columnwise = NULL;
        (void)gmm__mlp_copies_of(steps, step->need_slot);
    }
    return GMM_OK;
}

/* The kinds of tiles whose prefix sums the steps read: casts and dequantizations, among which are those of products of
   MX32 and NV16 tokens, and bias gradients. Queued weight gradients read them later. */
static int32_t gmm__mlp_tile_kinds(const gmm__mlp_steps *steps) {
    const int queues = steps->deferred.count > 0;
    int32_t kinds = queues ? 1 << GMM__TILES_128 | 1 << GMM__TILES_16 : 0;
    int i;
    for (i = 0; i < steps->count; i++) {
        const gmm__mlp_step *step = &steps->step[i];
        if (step->op == GMM_OP_QUANTIZE || step->op == GMM_OP_DEQUANTIZE || step->op == GMM_OP_LINEAR_BGRAD)
            kinds |= 1 << GMM__TILES_128;
        else if (step->op != GMM_OP_ACT_FWD && step->op != GMM_OP_ACT_BWD) {
            const gmm_linear *l = (const gmm_linear *)step->descriptor;
            const gmm_scaling scaling = l->dy ? l->dy->scaling : l->x->scaling;
            if (scaling == GMM_SCALING_MX32 || scaling == GMM_SCALING_NV16)
                kinds |= 1 << GMM__TILES_128 | 1 << GMM__TILES_16;
        }
    }
    return kinds;
}

/* Enqueues the computation of the call's split as int64 offsets and tiles, which all steps read. */
static gmm_status gmm__mlp_run_split(const gmm__mlp_steps *steps, const gmm__plan *plan, gmm_stream stream) {
    gmm__call step = *steps->call;
    step.op = GMM_OP_OFFSETS;
    step.query = 0;
    step.options.engine = plan->engine;
    step.output = steps->offsets;
    step.split_tiles = steps->tiles;
    step.tile_kinds = gmm__mlp_tile_kinds(steps);
    step.spans = 0; /* overlap was checked with the call */
    return gmm__serve(&step, NULL, NULL, 0, stream);
}

/* Serves the call of a step, whose workspace begins `at` bytes behind the beginning of the plan's. */
static gmm_status gmm__serve_step(gmm__call *step, const gmm__plan *plan, size_t at, gmm_stream stream) {
    return gmm__serve(step, NULL, plan->workspace ? (char *)plan->workspace + at : NULL, plan->workspace_bytes - at,
                      stream);
}

/* Enqueues the steps, each behind what must outlive it in the workspace of the plan. */
static gmm_status gmm__mlp_run_steps(gmm__mlp_steps *steps, const gmm__plan *plan, const gmm_grad_hooks *hooks,
                                     gmm_stream stream) {
    gmm_status s = GMM_OK;
    int i;
    for (i = 0; i < steps->count && s == GMM_OK; i++) {
        const gmm__mlp_step *step = &steps->step[i];
        gmm__call call;
        if (step->need_slot && hooks && hooks->need) s = gmm__mlp_call_need_hook(steps, step, stream);
        if (s == GMM_OK) s = gmm__mlp_prepare_step(steps, step, 0, &call);
        if (s == GMM_OK) s = gmm__serve_step(&call, plan, step->workspace, stream);
        if (s == GMM_OK && step->completes) gmm__mlp_call_ready_hook(call.ctx, hooks, step->param, stream);
    }
    return s;
}
