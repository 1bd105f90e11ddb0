/* Reads the descriptor and operands of an MLP call (gmm__mlp_prepare). */

/* Columns of FC1's output, of an MLP or a layer. */
static int64_t gmm__mlp_fc1_cols(const gmm__call *call) {
    return call->config.ffn * (gmm_act_gated(call->config.act.kind) ? 2 : 1);
}

/* Refuses an operand that is given although config.`field` is 0. */
static gmm_status gmm__mlp_check_configured(gmm__call *call, const char *argument, int given, const char *field,
                                            int configured) {
    if (given && !configured)
        return gmm__refuse_that(call, GMM_E_CONFIG, argument, "must be NULL: config.%s is 0", field);
    return GMM_OK;
}

/* Whether hooks.need sets the weights' addresses, which are then read behind it instead of when the call begins. */
static int gmm__mlp_has_need_hook(const gmm__call *call) { return call->d.mlp.hooks && call->d.mlp.hooks->need; }

/* The direction along which backward multiplies the copies of weights. */
static gmm_direction gmm__mlp_dgrad_direction(const gmm__call *call) {
    return call->quant.backward_override == GMM_BACKWARD_BY_RECIPE ? GMM_COLUMNWISE : GMM_ROWWISE;
}
/* The set of directions in which the products of a call read a weight. FC1 runs again in backward where forward has
   saved nothing. */
static int gmm__mlp_weight_directions(const gmm__call *call, int role) {
    const int fwd = call->op == GMM_OP_MLP_FWD;
    const int forward = fwd || (role == GMM__W && call->config.save == GMM_SAVE_NOTHING);
    const int dgrad = !fwd && (role == GMM__W2 || call->d.mlp.dx);
    return forward << GMM_ROWWISE | dgrad << (int)gmm__mlp_dgrad_direction(call);
}
/* Rows and columns of the matrices of a weight. */
static gmm__extents gmm__mlp_weight_extents(const gmm__call *call, int role) {
    const gmm_mlp_config *c = &call->config;
    return role == GMM__W ? gmm__matrices(call->groups.count, gmm__mlp_fc1_cols(call), c->hidden)
                          : gmm__matrices(call->groups.count, c->hidden_out, c->ffn);
}

/* Reads a weight: floats, or quantized as the recipe would quantize it. If the products of the call read it in no
   direction of the set, it may be NULL. */
static gmm_status gmm__mlp_read_weight(gmm__call *call, int role, int directions) {
    const char *const argument = role == GMM__W ? "w1" : "w2";
    const gmm_mat *const mat = role == GMM__W ? call->d.mlp.w1 : call->d.mlp.w2;
    const gmm__extents extents = gmm__mlp_weight_extents(call, role);
    const gmm_format *f = &call->recipe.weight;
    gmm_status s = GMM_OK;
    char name[32];
    gmm_mat m;
    int direction;
    const int bwd = call->op != GMM_OP_MLP_FWD;
    if (!mat || !gmm__copy_sized(&m, sizeof m, mat) || m.scaling == GMM_SCALING_NONE)
        return gmm__read_mat(call, role, argument, mat, directions != 0, extents, GMM__FLOATS);
    if (call->recipe.kind == GMM_RECIPE_NONE || m.dtype != f->dtype || m.scaling != f->scaling)
        return gmm__refuse(call, GMM_E_DTYPE, argument, "%s scaled %s: must be floats, or what mlp.quant.recipe "
                           "makes of weights, %s scaled %s", gmm_dtype_name(m.dtype), gmm_scaling_name(m.scaling),
                           gmm_dtype_name(f->dtype), gmm_scaling_name(f->scaling));
    if (bwd && call->quant.backward_override == GMM_BACKWARD_HIGH_PRECISION)
        return gmm__refuse_that(call, GMM_E_CONFIG, argument, "is quantized, but quant.backward_override %d multiplies "
                                "weights that are not", (int)call->quant.backward_override);
    (void)snprintf(name, sizeof name, "%s.columnwise", argument);
    for (direction = 0; direction < 2 && s == GMM_OK; direction++) {
        if (!(directions >> direction & 1)) continue;
        if (direction && !m.columnwise)
            return gmm__refuse_that(call, GMM_E_NULL, name, "is NULL, and %s multiplies this copy of a quantized "
                                    "weight", gmm_op_name(call->op));
        s = gmm__read_quant(call, role, direction ? name : argument, direction ? m.columnwise : mat, extents,
                            direction ? GMM_COLUMNWISE : GMM_ROWWISE);
        if (s == GMM_OK && (call->mat[role].dtype != f->dtype || call->mat[role].scaling != f->scaling))
            return gmm__refuse(call, GMM_E_DTYPE, direction ? name : argument,
                               "%s scaled %s: must be as the rowwise copy", gmm_dtype_name(call->mat[role].dtype),
                               gmm_scaling_name(call->mat[role].scaling));
    }
    call->mat[role] = m; /* both copies: each product selects the one whose blocks run along its contraction */
    call->mat[role].struct_size = 0;
    return s;
}
/* Reads a weight when the call begins. With hooks.need it is checked as by a query, which reads no addresses. */
static gmm_status gmm__mlp_read_weight_at_begin(gmm__call *call, int role) {
    const int query = call->query;
    gmm_status s;
    call->query = query || gmm__mlp_has_need_hook(call);
    s = gmm__mlp_read_weight(call, role, gmm__mlp_weight_directions(call, role));
    call->query = query;
    return s;
}
/* Dtype of the operands that are not quantized and of the intermediate matrices, of an MLP or a layer: that of w2, or
   where w2 is quantized that of the token matrix which every such call reads. */
static gmm_dtype gmm__mlp_dtype(const gmm__call *call) {
    const gmm_mat *w = &call->mat[GMM__W2];
    const int bwd = call->op == GMM_OP_MLP_BWD || call->op == GMM_OP_MLP_WGRAD;
    return w->scaling == GMM_SCALING_NONE ? w->dtype : call->mat[bwd ? GMM__DY : GMM__X_].dtype;
}

/* Every feature count is K of one product and N of another, so that the alignment of any quantized operand applies to
   all of them. */
static gmm_status gmm__mlp_check_features(gmm__call *call) {
    const gmm_mlp_config *c = &call->config;
    const struct { const char *name; int64_t value; } features[] = {
        { "config.hidden", c->hidden }, { "config.ffn", c->ffn }, { "config.hidden_out", c->hidden_out }
    };
    const int32_t weight = gmm_feature_align(call->recipe.weight.scaling);
    const int32_t input = gmm_feature_align(call->recipe.input.scaling), align = weight > input ? weight : input;
    int i;
    for (i = 0; i < 3; i++)
        if (features[i].value % align)
            return gmm__refuse(call, GMM_E_ARG, features[i].name, "%lld must be a multiple of %d by the recipe %s",
                               (long long)features[i].value, (int)align, gmm_recipe_name(call->recipe.kind));
    call->in_align = call->out_align = align;
    return GMM_OK;
}

/* Checks the save policy and the fields of gmm_mlp.quant that are not arrays. */
static gmm_status gmm__mlp_check_policies(gmm__call *call) {
    const gmm_mlp_config *c = &call->config;
    const gmm_mlp_quant *q = &call->quant;
    if (q->reserved || q->reserved1)
        return gmm__refuse(call, GMM_E_ARG, q->reserved ? "quant.reserved" : "quant.reserved1", "%d must be 0",
                           q->reserved ? q->reserved : q->reserved1);
    if ((int)q->backward_override < 0 || (int)q->backward_override > GMM_BACKWARD_DEQUANTIZED)
        return gmm__refuse(call, GMM_E_ARG, "quant.backward_override", "%d must be 0 to %d",
                           (int)q->backward_override, (int)GMM_BACKWARD_DEQUANTIZED);
    if (q->weight_skip && !q->weight_cache)
        return gmm__refuse_that(call, GMM_E_CONFIG, "quant.weight_skip", "needs quant.weight_cache, which is NULL: a "
                                    "query without both gives its bytes");
    if (!gmm__saves_copies(c)) return GMM_OK;
    if (call->recipe.input.dtype == GMM_NONE)
        return gmm__refuse(call, GMM_E_CONFIG, "config.save", "%d keeps x and FC2's input quantized, but quant.recipe "
                           "leaves the input as it is", (int)c->save);
    if (q->backward_override == GMM_BACKWARD_HIGH_PRECISION)
        return gmm__refuse(call, GMM_E_CONFIG, "config.save", "%d keeps operands quantized, which "
                           "quant.backward_override %d does not read", (int)c->save, (int)q->backward_override);
    return GMM_OK;
}

/* Says once per context that delayed scaling has no scales: no call can tell whether ones are meant. */
static void gmm__mlp_warn_without_scales(const gmm__call *call) {
    gmm_context *ctx = call->ctx;
    if (call->recipe.kind != GMM_RECIPE_FP8_DELAYED || call->quant.scale || ctx->warned_without_scales) return;
    ctx->warned_without_scales = 1;
    gmm__log(ctx, GMM_LOG_WARN, "%s: mlp.quant.scale is NULL with recipe fp8-delayed: all scales are 1, by which "
             "small gradients are rounded to 0 (gmm_update_scales)", call->function);
}

/* Checks gmm_mlp.quant, and the operands against the formats of the recipe. The products check the same, but only after
   other work has been enqueued. A dtype that the Hadamard transform of weight gradients does not support is refused in
   every operation. */
static gmm_status gmm__mlp_check_quant(gmm__call *call) {
    const gmm_recipe *r = &call->recipe;
    const gmm_mlp *d = &call->d.mlp;
    const int fwd = call->op == GMM_OP_MLP_FWD;
    const int products = (d->dx || d->dw1 || d->dw2 || d->db1 || d->dprob) &&
                         call->quant.backward_override == GMM_BACKWARD_BY_RECIPE;
    const int64_t values = (int64_t)GMM_SLOTS * call->groups.count;
    gmm_status s = gmm__check_array(call, "quant.scale", call->quant.scale, 0, values);
    if (!call->query) gmm__mlp_warn_without_scales(call);
    if (s == GMM_OK) s = gmm__check_array(call, "quant.weight_skip", call->quant.weight_skip, 0, 1);
    if (r->input.hadamard && gmm__mlp_dtype(call) != GMM_BF16)
        return gmm__refuse(call, GMM_E_DTYPE, fwd ? "x" : "dy", "dtype %s must be bf16, since quant.recipe transforms "
                           "input and grad (hadamard)", gmm_dtype_name(gmm__mlp_dtype(call)));
    if (!call->query && !fwd && r->grad.stochastic && products &&
        (!call->quant.random || (uintptr_t)call->quant.random % 8))
        return gmm__refuse(call, call->quant.random ? GMM_E_ALIGN : GMM_E_NULL, "quant.random", "%p must be {seed, "
                           "offset} of dy and of dz, 8-byte aligned, for stochastic rounding",
                           (const void *)call->quant.random);
    if (r->grad.stochastic)
        gmm__add_span(call, "quant.random", "", 0, call->quant.random, 4 * (int64_t)sizeof *call->quant.random);
    return s != GMM_OK ? s : gmm__check_output(call, "quant.amax", call->quant.amax, 0, values);
}

/* Checks the indices of gathered rows. That of dy is not looked at in forward. */
static gmm_status gmm__mlp_check_indices(gmm__call *call) {
    gmm_mlp *d = &call->d.mlp;
    if (call->op == GMM_OP_MLP_FWD) d->dy_index = NULL;
    return gmm__check_indices(call, d->x_index, d->dy_index, d->index_rows, &d->index_div);
}

/* How gmm__mlp_prepare checks a call: for its launch; as a query, which reads no addresses; or as the MLP of a layer
   (core/moe.h), whose rows, probabilities, splits and indices are the layer's own and are checked as in a query,
   but the caller's weights, gradients and arrays as for a launch. */
enum gmm__mlp_checks { GMM__MLP_LAUNCH, GMM__MLP_QUERY, GMM__MLP_IN_LAYER };

/* Reads the matrices and arrays by row. */
static gmm_status gmm__mlp_read_rows(gmm__call *call) {
    const gmm_mlp *d = &call->d.mlp;
    const gmm_mlp_config *c = &call->config;
    const int fwd = call->op == GMM_OP_MLP_FWD;
    /* backward computes FC1 again where forward has saved nothing */
    const int recomputes = !fwd && c->save == GMM_SAVE_NOTHING;
    const int64_t x_rows = d->x_index ? d->index_rows : call->rows, dy_rows = d->dy_index ? d->index_rows : call->rows;
    gmm_status s;
    if ((s = gmm__read_mat(call, GMM__X_, "x", d->x, fwd || recomputes || (d->dw1 && !gmm__saves_copies(c)),
                           gmm__matrix(x_rows, c->hidden), GMM__FLOATS)) ||
        (s = gmm__check_array(call, "prob", d->prob, c->prob, call->rows)) ||
        (s = gmm__check_index_arrays(call, d->x_index, d->dy_index)))
        return s;
    if (fwd) return gmm__read_mat(call, GMM__Y, "y", d->y, 1, gmm__matrix(call->rows, call->out), GMM__FLOATS);
    if ((s = gmm__read_mat(call, GMM__DY, "dy", d->dy, 1, gmm__matrix(dy_rows, call->out), GMM__FLOATS)) ||
        (s = gmm__read_mat(call, GMM__DX, "dx", d->dx, 0, gmm__matrix(call->rows, c->hidden), GMM__FLOATS)))
        return s;
    return gmm__check_output(call, "dprob", d->dprob, 0, call->rows);
}

/* Reads weights, biases and the destinations of their gradients. */
static gmm_status gmm__mlp_read_params(gmm__call *call) {
    const gmm_mlp *d = &call->d.mlp;
    const gmm_mlp_config *c = &call->config;
    const int64_t G = call->groups.count, F1 = gmm__mlp_fc1_cols(call), out = call->out;
    const int fwd = call->op == GMM_OP_MLP_FWD, recomputes = !fwd && c->save == GMM_SAVE_NOTHING;
    gmm_status s;
    if ((s = gmm__mlp_read_weight_at_begin(call, GMM__W)) ||
        (s = gmm__read_mat(call, GMM__BIAS, "b1", d->b1, (fwd || recomputes) && c->bias1, gmm__matrices(G, 1, F1),
                           GMM__FLOATS)) ||
        (s = gmm__mlp_read_weight_at_begin(call, GMM__W2)) ||
        (s = gmm__read_mat(call, GMM__BIAS2, "b2", d->b2, c->bias2 && (fwd || (c->prob_on_bias2 && d->dprob)),
                           gmm__matrices(G, 1, out), GMM__FLOATS)))
        return s;
    if (fwd) return GMM_OK;
    if ((s = gmm__read_grad(call, GMM__DW, "dw1", d->dw1, 0, F1, c->hidden)) ||
        (s = gmm__read_grad(call, GMM__DW2, "dw2", d->dw2, 0, out, c->ffn)) ||
        (s = gmm__read_grad(call, GMM__DB, "db1", d->db1, 0, 1, F1)))
        return s;
    return gmm__read_grad(call, GMM__DB2, "db2", d->db2, 0, 1, out);
}

/* x, w1 and dy that are not quantized have one dtype. */
static gmm_status gmm__mlp_check_dtypes(gmm__call *call) {
    const int roles[] = { GMM__X_, GMM__W, GMM__DY };
    const char *names[] = { "x", "w1", "dy" };
    const gmm_dtype dtype = gmm__mlp_dtype(call);
    int i;
    for (i = 0; i < 3; i++)
        if (call->mat[roles[i]].dtype != GMM_NONE && call->mat[roles[i]].dtype != dtype &&
            call->mat[roles[i]].scaling == GMM_SCALING_NONE)
            return gmm__refuse(call, GMM_E_DTYPE, names[i], "dtype %s must be that of mlp.%s, %s",
                               gmm_dtype_name(call->mat[roles[i]].dtype),
                               call->mat[GMM__W2].scaling == GMM_SCALING_NONE ? "w2"
                               : call->op == GMM_OP_MLP_FWD ? "x" : "dy", gmm_dtype_name(dtype));
    return GMM_OK;
}

/* Checks an MLP call. call->in is hidden, call->out is hidden_out, and F1 the columns of FC1's output. */
static gmm_status gmm__mlp_prepare(gmm__call *call, gmm_context *ctx, gmm_op op, const char *function,
                                   const gmm_mlp *mlp, enum gmm__mlp_checks checks) {
    gmm_mlp *d = &call->d.mlp;
    gmm_mlp_config *c = &call->config;
    gmm_status s = gmm__open(call, ctx, op, function, checks == GMM__MLP_QUERY);
    const int query = checks == GMM__MLP_QUERY;
    int64_t elements, bytes;
    int k;
    gmm_error error;
    gmm_groups g;

    if (s != GMM_OK || (s = gmm__read_descriptor(call, "mlp", d, sizeof *d, mlp)) != GMM_OK) return s;
    if (op < GMM_OP_MLP_FWD || op > GMM_OP_MLP_WGRAD)
        return gmm__refuse(call, GMM_E_ARG, "op", "%d (%s) must be mlp_fwd, mlp_bwd or mlp_wgrad", (int)op,
                           gmm_op_name(op));
    if (d->reserved || d->reserved1)
        return gmm__refuse(call, GMM_E_ARG, "reserved", "%d and reserved1 %d must be 0", d->reserved, d->reserved1);
    if ((s = gmm__read(call, "config", c, sizeof *c, d->config)) != GMM_OK) return s;
    if (c->hidden_out == 0) c->hidden_out = c->hidden;
    gmm__peek_groups(d->groups, &g);
    (void)snprintf(call->shapes, sizeof call->shapes, "G=%d T=%lld hidden=%lld ffn=%lld out=%lld %s", g.count,
                   (long long)g.capacity, (long long)c->hidden, (long long)c->ffn, (long long)c->hidden_out,
                   gmm_act_name(c->act.kind));
    if (gmm_mlp_validate(c, &error) != GMM_OK) return gmm__refuse_member(call, error.status, "config", error.text);
    (void)gmm__copy_sized(&call->act, sizeof call->act, &c->act);
    if (!d->quant && c->recipe != GMM_RECIPE_NONE)
        return gmm__refuse(call, GMM_E_CONFIG, "config.recipe", "%s needs quant, which is NULL: the products would not "
                           "be quantized", gmm_recipe_name(c->recipe));
    if (d->quant) {
        if ((s = gmm__read(call, "quant", &call->quant, sizeof call->quant, d->quant)) != GMM_OK ||
            (s = gmm__read(call, "quant.recipe", &call->recipe, sizeof call->recipe, call->quant.recipe)) != GMM_OK)
            return s;
        if ((s = gmm_recipe_validate(&call->recipe, &error)) != GMM_OK)
            return gmm__refuse_member(call, s, "quant.recipe", error.text);
        gmm__complete_recipe(&call->recipe);
        if (call->recipe.kind != c->recipe)
            return gmm__refuse_that(call, GMM_E_CONFIG, "config.recipe", "is %s, but the kind of quant.recipe is %s: "
                                    "they must be equal", gmm_recipe_name(c->recipe),
                                    gmm_recipe_name(call->recipe.kind));
        if (c->recipe == GMM_RECIPE_NONE)
            return gmm__refuse_that(call, GMM_E_CONFIG, "quant", "must be NULL: config.recipe is none");
        if ((s = gmm__mlp_check_features(call)) != GMM_OK || (s = gmm__mlp_check_policies(call)) != GMM_OK) return s;
    }
    if ((s = gmm__read_options(call, d->options)) != GMM_OK) return s;
    call->query = checks != GMM__MLP_LAUNCH;
    s = gmm__read_groups(call, d->groups);
    call->query = query;
    if (s != GMM_OK) return s;
    call->in = c->hidden;
    call->out = c->hidden_out;
    if ((s = gmm__mlp_check_configured(call, "b1", d->b1 != NULL, "bias1", c->bias1)) != GMM_OK ||
        (s = gmm__mlp_check_configured(call, "b2", d->b2 != NULL, "bias2", c->bias2)) != GMM_OK ||
        (s = gmm__mlp_check_configured(call, "prob", d->prob != NULL, "prob", c->prob)) != GMM_OK ||
        (s = gmm__mlp_check_configured(call, "db1", d->db1 != NULL, "bias1", c->bias1)) != GMM_OK ||
        (s = gmm__mlp_check_configured(call, "db2", d->db2 != NULL, "bias2", c->bias2)) != GMM_OK ||
        (s = gmm__mlp_check_configured(call, "dprob", d->dprob != NULL, "prob", c->prob)) != GMM_OK)
        return s;

    if (!gmm__mul(call->rows, gmm__mlp_fc1_cols(call), &elements) || !gmm__mul(elements, 16, &bytes))
        return gmm__refuse(call, GMM_E_OVERFLOW, "config.ffn", "%lld rows of %lld columns do not fit 64 bits",
                           (long long)call->rows, (long long)gmm__mlp_fc1_cols(call));
    for (k = 0; k < 2; k++) { /* a table of weights has no group_stride, by which gmm__read_mat would find this */
        const gmm__extents w = gmm__mlp_weight_extents(call, k ? GMM__W2 : GMM__W);
        if (!gmm__mul(w.rows, w.cols, &bytes) || !gmm__mul(bytes, w.matrices, &bytes) || !gmm__mul(bytes, 16, &bytes))
            return gmm__refuse(call, GMM_E_OVERFLOW, k ? "w2" : "w1", "%lld matrices of %lld x %lld do not fit 64 bits",
                               (long long)w.matrices, (long long)w.rows, (long long)w.cols);
    }
    if ((s = gmm__mlp_check_indices(call)) != GMM_OK) return s;
    call->query = checks != GMM__MLP_LAUNCH;
    s = gmm__mlp_read_rows(call);
    call->query = query;
    if (s != GMM_OK || (s = gmm__mlp_read_params(call)) != GMM_OK || (s = gmm__mlp_check_dtypes(call)) != GMM_OK)
        return s;
    /* dx is written by the last step, which reads neither x nor dy; a queued weight gradient reads them later */
    call->in_place = op == GMM_OP_MLP_BWD && !gmm__delays(&call->config);
    return gmm__mlp_check_quant(call);
}
