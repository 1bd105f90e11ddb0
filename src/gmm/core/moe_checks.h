/* Reads the descriptor and operands of a layer call (gmm__moe_prepare). The caller's fields are checked here before
   anything is launched; what the layer passes from one operation to the next is checked with each operation. */

/* What a call of the layer asks for. */
typedef struct gmm__moe_wants {
    int weights_rows; /* the MLP weights FC2's input by probs */
    int weights_sum;  /* the combine weights rows of y by probs, and saves them */
    int saves_x;      /* rows of x are permuted into saved */
    int permutes;     /* rows of x are permuted instead of gathered by products or casts */
    int gathers_dy;   /* backward gathers rows of dout */
    int dprobs;       /* the gradient of probs is computed */
    int mlp;          /* the MLP's backward runs */
    int x;            /* the call reads gmm_moe.x */
} gmm__moe_wants;

/* Whether backward queues weight gradients. */
static int gmm__moe_queues(const gmm__call *call) {
    return call->op == GMM_OP_MOE_BWD && gmm__delays(&call->config);
}
/* Whether the call casts rows of x (role GMM__X_) or of dout (GMM__DY) by its recipe, and its products read the
   copies. */
static int gmm__moe_casts(const gmm__call *call, int role) {
    const int input = role == GMM__X_;
    const gmm_backward_override override = call->quant.backward_override;
    const int by_recipe = call->op == GMM_OP_MOE_FWD || override == GMM_BACKWARD_BY_RECIPE ||
                          (input && override == GMM_BACKWARD_DEQUANTIZED);
    return call->recipe.kind != GMM_RECIPE_NONE && by_recipe &&
           (input ? call->recipe.input.dtype : call->recipe.grad.dtype) != GMM_NONE;
}
/* Whether rows of x (role GMM__X_) or of dout (GMM__DY) are permuted though products could gather them: on GPUs, where
   several products of backward read them and one permutation is faster than to gather in each (KERNELS.md), and where
   the product of forward would copy them (gmm__moe_choose_rows). A limit of the workspace, or weight gradients that are
   queued and would keep the rows, speak against it. What a recipe quantizes is read by one cast instead, which gathers
   it. */
static int gmm__moe_prefers_permuting(const gmm__call *call, int role) {
    return call->ctx->config.space == GMM_SPACE_CUDA && !gmm__moe_casts(call, role) && !call->layer_gathers &&
           !call->options.workspace_limit && !gmm__moe_queues(call);
}
/* The caller's descriptors of MLP and route, which gmm__moe_read_parts has checked. */
static gmm_mlp gmm__moe_mlp(const gmm__call *call) {
    gmm_mlp m = GMM_ZERO;
    (void)gmm__copy_sized(&m, sizeof m, call->d.moe.mlp);
    m.struct_size = 0;
    return m;
}
static gmm_route gmm__moe_route(const gmm__call *call) {
    gmm_route r = GMM_ZERO;
    if (call->d.moe.route) (void)gmm__copy_sized(&r, sizeof r, call->d.moe.route);
    r.struct_size = 0;
    return r;
}

static gmm__moe_wants gmm__moe_wants_of(const gmm__call *call) {
    const gmm_moe *d = &call->d.moe;
    const gmm_mlp_config *c = &call->config;
    const gmm_mlp m = gmm__moe_mlp(call);
    const gmm_route r = gmm__moe_route(call);
    const int fwd = call->op == GMM_OP_MOE_FWD;
    gmm__moe_wants w;
    w.weights_rows = c->prob;
    w.weights_sum = !c->prob && (d->probs || d->route);
    w.saves_x = d->save_rows;
    w.permutes = w.saves_x || gmm__moe_prefers_permuting(call, GMM__X_);
    w.dprobs = !fwd && (d->dprobs || r.dlogits);
    w.mlp = !fwd && (d->dx || m.dw1 || m.dw2 || m.db1 || m.db2 || (w.dprobs && w.weights_rows));
    w.x = fwd || (w.mlp && !w.saves_x && (c->save == GMM_SAVE_NOTHING || (m.dw1 && !gmm__saves_copies(c))));
    w.gathers_dy = w.mlp && !gmm__moe_prefers_permuting(call, GMM__DY) && !w.weights_sum &&
                   call->mat[GMM__DY].dtype == gmm__mlp_dtype(call);
    return w;
}

/* Refuses a field of gmm_mlp that the layer sets. */
static gmm_status gmm__moe_refuse_owned(gmm__call *call, const gmm_mlp *m) {
    const struct { const char *name; int set; } owned[] = {
        { "mlp.groups", m->groups != NULL }, { "mlp.options", m->options != NULL }, { "mlp.x", m->x != NULL },
        { "mlp.prob", m->prob != NULL }, { "mlp.y", m->y != NULL }, { "mlp.saved", m->saved || m->saved_bytes },
        { "mlp.dy", m->dy != NULL }, { "mlp.dx", m->dx != NULL }, { "mlp.dprob", m->dprob != NULL },
        { "mlp.deferred", m->deferred || m->deferred_bytes }, { "mlp.x_index", m->x_index != NULL },
        { "mlp.dy_index", m->dy_index != NULL }, { "mlp.index_rows", m->index_rows != 0 },
        { "mlp.index_div", m->index_div != 0 }
    };
    size_t i;
    for (i = 0; i < sizeof owned / sizeof owned[0]; i++)
        if (owned[i].set)
            return gmm__refuse_that(call, GMM_E_CONFIG, owned[i].name, "is set and must be 0: the layer passes rows, "
                                    "probabilities, groups, options and buffers to its MLP itself");
    return GMM_OK;
}

/* Checks a route against the layer. */
static gmm_status gmm__moe_check_route(gmm__call *call) {
    const gmm_moe *d = &call->d.moe;
    gmm_route r = GMM_ZERO;
    gmm_status s = gmm__read(call, "route", &r, sizeof r, d->route);
    const struct { const char *name; int64_t value, layer; } equal[] = {
        { "route.experts", r.experts, d->experts }, { "route.tokens", r.tokens, d->tokens },
        { "route.topk", r.topk, d->topk }
    };
    int i;
    if (s != GMM_OK) return s;
    for (i = 0; i < 3; i++)
        if (equal[i].value != equal[i].layer)
            return gmm__refuse(call, GMM_E_ARG, equal[i].name, "%lld must be that of the layer, %lld",
                               (long long)equal[i].value, (long long)equal[i].layer);
    if (r.options || r.dprobs)
        return gmm__refuse_that(call, GMM_E_CONFIG, r.options ? "route.options" : "route.dprobs",
                                "is set and must be NULL: the layer passes its own");
    if (d->indices || d->probs)
        return gmm__refuse_that(call, GMM_E_CONFIG, d->indices ? "indices" : "probs", "is set beside route, which has "
                                "them");
    if (call->config.prob_on_input)
        return gmm__refuse(call, GMM_E_CONFIG, "mlp.config.prob_on_input", "1 excludes route: x cannot be weighted "
                           "before it is routed");
    return GMM_OK;
}

/* Reads the sizes of the layer, and describes the rows of each expert as a group. */
static gmm_status gmm__moe_read_sizes(gmm__call *call) {
    gmm_moe *d = &call->d.moe;
    int64_t slots, filled;
    gmm_status s = gmm__check_slots(call, d->experts, d->tokens, d->topk, &slots);
    if (s != GMM_OK) return s;
    if (d->align < 0) return gmm__refuse(call, GMM_E_ARG, "align", "%d must be >= 0", d->align);
    if ((d->save_rows & ~1) || d->reserved)
        return gmm__refuse(call, GMM_E_ARG, "save_rows", "%d must be 0 or 1, and reserved %d must be 0", d->save_rows,
                           d->reserved);
    if (d->align == 0) d->align = 1;
    if (d->capacity == 0) {
        filled = slots < d->experts ? slots : d->experts; /* experts that may have rows of zeros */
        d->capacity = gmm__round_up(slots + filled * (d->align - 1), d->align);
    }
    if (d->capacity < 0 || d->capacity > INT32_MAX)
        return gmm__refuse(call, GMM_E_ARG, "capacity", "%lld must be >= 0 and < 2^31", (long long)d->capacity);
    call->groups.count = d->experts;
    call->groups.capacity = d->capacity;
    call->groups.fault = d->fault;
    call->rows = d->capacity;
    return GMM_OK;
}

/* The steps of a layer multiply rows by columns before the checks of its MLP do. */
static gmm_status gmm__moe_check_rows(gmm__call *call) {
    const int64_t widest = call->in > call->out ? call->in : call->out;
    int64_t bytes;
    if (gmm__mul(call->rows, widest, &bytes) && gmm__mul(bytes, 16, &bytes)) return GMM_OK;
    return gmm__refuse(call, GMM_E_OVERFLOW, call->in > call->out ? "mlp.config.hidden" : "mlp.config.hidden_out",
                       "%lld rows of %lld columns do not fit 64 bits", (long long)call->rows, (long long)widest);
}

/* Reads the configuration and the caller's descriptors of MLP and route. */
static gmm_status gmm__moe_read_parts(gmm__call *call) {
    const gmm_moe *d = &call->d.moe;
    gmm_mlp_config *c = &call->config;
    gmm_error error;
    gmm_mlp m;
    gmm_status s;
    if ((s = gmm__read(call, "mlp", &m, sizeof m, d->mlp)) != GMM_OK ||
        (s = gmm__moe_refuse_owned(call, &m)) != GMM_OK ||
        (s = gmm__read(call, "mlp.config", c, sizeof *c, m.config)) != GMM_OK)
        return s;
    if (c->topk && c->topk != d->topk)
        return gmm__refuse(call, GMM_E_ARG, "mlp.config.topk", "%d must be that of the layer, %d, or 0", c->topk,
                           d->topk);
    c->topk = d->topk;
    if (c->hidden_out == 0) c->hidden_out = c->hidden;
    if (gmm_mlp_validate(c, &error) != GMM_OK)
        return gmm__refuse_member(call, error.status, "mlp.config", error.text);
    call->in = c->hidden;
    call->out = c->hidden_out;
    if ((s = gmm__moe_check_rows(call)) != GMM_OK || (d->route && (s = gmm__moe_check_route(call)) != GMM_OK)) return s;
    if (!d->route && !d->probs) {
        if (d->dprobs && !c->prob) /* with config.prob 1 backward reads the probabilities of rows in saved */
            return gmm__refuse_that(call, GMM_E_CONFIG, "dprobs", "is given, but neither probs nor route");
    } else if (c->prob_on_input)
        return gmm__refuse_that(call, GMM_E_CONFIG, "probs", "must be NULL: with mlp.config.prob_on_input 1 x has been "
                                "weighted by them");
    /* the recipe says what casts gather, w2 what dtype rows have; the MLP's checks read both again */
    if (m.quant && gmm__copy_sized(&call->quant, sizeof call->quant, m.quant) && call->quant.recipe)
        (void)gmm__copy_sized(&call->recipe, sizeof call->recipe, call->quant.recipe);
    return gmm__read(call, "mlp.w2", &call->mat[GMM__W2], sizeof call->mat[GMM__W2], m.w2);
}

/* Reads a matrix of the caller. Where it is not `required` only its dtype and strides are read. */
static gmm_status gmm__moe_read_mat(gmm__call *call, int role, const char *name, const gmm_mat *mat, int required,
                                    int64_t cols) {
    const int query = call->query;
    gmm_status s;
    call->query = query || !required;
    s = gmm__read_mat(call, role, name, mat, required, gmm__matrix(call->d.moe.tokens, cols), GMM__FLOATS);
    call->query = query;
    return s;
}

/* Reads the layer's own operands. */
static gmm_status gmm__moe_read_operands(gmm__call *call) {
    const gmm_moe *d = &call->d.moe;
    const int64_t slots = d->tokens * d->topk;
    const int fwd = call->op == GMM_OP_MOE_FWD, scaled = call->mat[GMM__W2].scaling != GMM_SCALING_NONE;
    const gmm__moe_wants w = gmm__moe_wants_of(call);
    gmm_status s;
    if (scaled && !d->x)
        return gmm__refuse_that(call, GMM_E_NULL, "x", "is NULL: weights are quantized, and its dtype is that of what "
                                "was saved");
    if ((s = gmm__moe_read_mat(call, GMM__X_, "x", d->x, w.x, call->in)) != GMM_OK) return s;
    if (d->x && !scaled && call->mat[GMM__X_].dtype != call->mat[GMM__W2].dtype)
        return gmm__refuse(call, GMM_E_DTYPE, "x", "dtype %s must be that of moe.mlp.w2, %s",
                           gmm_dtype_name(call->mat[GMM__X_].dtype), gmm_dtype_name(call->mat[GMM__W2].dtype));
    if (fwd) {
        if (!d->route && !d->indices && slots > 0 && !call->query)
            return gmm__refuse_that(call, GMM_E_NULL, "indices", "is NULL, and so is route: one of them gives the "
                                    "experts of %lld slots", (long long)slots);
        if ((s = gmm__moe_read_mat(call, GMM__Y, "out", d->out, 1, call->out)) != GMM_OK ||
            (!d->route && (s = gmm__check_array(call, "indices", d->indices, 1, slots)) != GMM_OK))
            return s;
    } else if ((s = gmm__moe_read_mat(call, GMM__DY, "dout", d->dout, 1, call->out)) != GMM_OK ||
               (d->dx && (s = gmm__moe_read_mat(call, GMM__DX, "dx", d->dx, 1, call->in)) != GMM_OK) ||
               (s = gmm__check_output(call, "dprobs", d->dprobs, 0, slots)) != GMM_OK)
        return s;
    if (!d->route && (fwd || w.weights_sum) &&
        (s = gmm__check_array(call, "probs", d->probs, w.weights_rows, slots)) != GMM_OK)
        return s;
    if (fwd) s = gmm__check_output(call, "sizes", d->sizes, 0, d->experts);
    else s = gmm__check_array(call, "sizes", d->sizes, 0, d->experts);
    return s != GMM_OK ? s : gmm__check_output(call, "fault", d->fault, 0, 1);
}

/* Adds the memory of a checked operation of the layer to that of the layer, under the name of its descriptor. */
static void gmm__moe_adopt_spans(gmm__call *call, const char *name, const gmm__call *part) {
    int32_t i;
    for (i = 0; i < part->spans && call->spans < GMM__SPANS; i++) {
        gmm__span *s = &call->span[call->spans++];
        *s = part->span[i];
        (void)snprintf(s->name, sizeof s->name, "%.7s.%.23s", name, part->span[i].name);
    }
}
/* Names the layer's descriptor in the message of one of its operations: "gmm_moe_fwd: mlp.w1" becomes "gmm_moe_fwd:
   moe.mlp.w1". Returns the status. */
static gmm_status gmm__moe_adopt_error(const gmm__call *call, gmm_status s) {
    gmm_error *e = &call->ctx->error;
    const size_t at = strlen(call->function) + 2;
    char text[sizeof e->text];
    if (s == GMM_OK || strlen(e->text) < at || (strncmp(e->text + at, "mlp", 3) && strncmp(e->text + at, "route", 5)))
        return s;
    memcpy(text, e->text, sizeof text);
    (void)snprintf(e->text, sizeof e->text, "%.*smoe.%s", (int)at, text, text + at);
    return s;
}
