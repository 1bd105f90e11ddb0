/* .............................................................................................. 14.4 Activation ... */

/* Presets and properties of activations; checks and entry points of gmm_act_fwd and gmm_act_bwd. */

GMMDEF gmm_act gmm_act_of(gmm_act_preset preset) {
    gmm_act a = GMM_ZERO;
    switch (preset) {
    case GMM_ACT_PRESET_SWIGLU: a.kind = GMM_ACT_SWIGLU; break;
    case GMM_ACT_PRESET_GPT_OSS:
        a.kind = GMM_ACT_SWIGLU;
        a.interleave = 1;
        a.limit = 7.0f;
        a.alpha = 1.702f;
        a.offset = 1.0f;
        break;
    case GMM_ACT_PRESET_KIMI_SITU:
        a.kind = GMM_ACT_SITUGLU;
        a.beta1 = 4.0f;
        a.beta2 = 25.0f;
        break;
    case GMM_ACT_PRESET_NEMOTRON: a.kind = GMM_ACT_RELU2; break;
    default: break;
    }
    return a;
}

/* A row of GMM_ACT_LIST: whether the activation is gated, and whether it takes alpha and the betas. The row of an
   unknown kind has the name NULL. */
typedef struct gmm__act_row {
    const char *name;
    gmm_gate gate;
    int gated, alpha, betas;
} gmm__act_row;

static gmm__act_row gmm__act_row_of(gmm_act_kind kind) {
    switch (kind) {
#define GMM__X(name, value, text, gate, gated, alpha, betas) \
    case name: { \
        const gmm__act_row row = { #text, gate, gated, alpha, betas }; \
        return row; \
    }
        GMM_ACT_LIST(GMM__X)
#undef GMM__X
    default: {
        const gmm__act_row row = { NULL, GMM_GATE_MAX, 0, 0, 0 };
        return row;
    }
    }
}

GMMDEF const char *gmm_act_name(gmm_act_kind kind) {
    const char *name = gmm__act_row_of(kind).name;
    return name ? name : "?";
}

GMMDEF int gmm_act_gated(gmm_act_kind kind) { return gmm__act_row_of(kind).gated; }

static int gmm__is_finite(float v) { return (gmm_f32_bits(v) & 0x7F800000u) != 0x7F800000u; }

/* Checks that the settings of an activation over `ffn` columns are consistent. If not, `rule` becomes a message that
   begins with `prefix` and the field's name: "act.limit: -1 must be 0 or finite and > 0". */
static gmm_status gmm__check_act(const gmm_act *act, int64_t ffn, const char *prefix, char *rule, size_t size) {
    const gmm__act_row row = gmm__act_row_of(act->kind);
    const double limit = (double)act->limit, alpha = (double)act->alpha, offset = (double)act->offset;
    const double beta1 = (double)act->beta1, beta2 = (double)act->beta2;
    uint32_t reserved = 0;
    size_t i;

    for (i = 0; i < sizeof act->reserved / sizeof act->reserved[0]; i++) reserved |= act->reserved[i];
    if (reserved) (void)snprintf(rule, size, "%sreserved: %u must be 0", prefix, reserved);
    else if (!row.name)
        (void)snprintf(rule, size, "%skind: %d is no activation", prefix, (int)act->kind);
    else if (act->interleave < 0)
        (void)snprintf(rule, size, "%sinterleave: %d must be >= 0", prefix, (int)act->interleave);
    else if (act->interleave && !row.gated)
        (void)snprintf(rule, size, "%sinterleave: %d must be 0, as %s is not gated", prefix, (int)act->interleave,
                       row.name);
    else if (act->interleave && ffn % act->interleave)
        (void)snprintf(rule, size, "%sinterleave: %d must divide ffn %lld", prefix, (int)act->interleave,
                       (long long)ffn);
    else if (!gmm__is_finite(act->limit) || limit < 0.0)
        (void)snprintf(rule, size, "%slimit: %g must be 0 or finite and > 0", prefix, limit);
    else if (!gmm__is_finite(act->alpha))
        (void)snprintf(rule, size, "%salpha: %g must be finite", prefix, alpha);
    else if (!row.alpha && alpha != 0.0 && alpha != 1.0)
        (void)snprintf(rule, size, "%salpha: %g must be 0 or 1, as %s takes no alpha", prefix, alpha, row.name);
    else if (!gmm__is_finite(act->offset))
        (void)snprintf(rule, size, "%soffset: %g must be finite", prefix, offset);
    else if (!row.gated && offset != 0.0)
        (void)snprintf(rule, size, "%soffset: %g must be 0, as %s is not gated", prefix, offset, row.name);
    else if (!gmm__is_finite(act->beta1) || beta1 < 0.0)
        (void)snprintf(rule, size, "%sbeta1: %g must be 0 or finite and > 0", prefix, beta1);
    else if (!gmm__is_finite(act->beta2) || beta2 < 0.0)
        (void)snprintf(rule, size, "%sbeta2: %g must be 0 or finite and > 0", prefix, beta2);
    else if (!row.betas && beta1 != 0.0)
        (void)snprintf(rule, size, "%sbeta1: %g must be 0, as %s takes no betas", prefix, beta1, row.name);
    else if (!row.betas && beta2 != 0.0)
        (void)snprintf(rule, size, "%sbeta2: %g must be 0, as %s takes no betas", prefix, beta2, row.name);
    else return GMM_OK;
    return GMM_E_CONFIG;
}

/* Checks an activation call. Sets call->act to the settings, call->out to ffn, and call->in to the columns of x. */
static gmm_status gmm__act_prepare(gmm__call *call, gmm_context *ctx, gmm_op op, const char *function,
                                   const gmm_activation *activation, int query) {
    gmm_activation *d = &call->d.act;
    gmm_status s = gmm__open(call, ctx, op, function, query);
    char rule[160];
    if (s != GMM_OK || (s = gmm__read_descriptor(call, "activation", d, sizeof *d, activation)) != GMM_OK) return s;
    {
        gmm_groups g;
        gmm_act a = GMM_ZERO;
        gmm__peek_groups(d->groups, &g);
        if (d->act) (void)gmm__copy_sized(&a, sizeof a, d->act);
        (void)snprintf(call->shapes, sizeof call->shapes, "G=%d T=%lld ffn=%lld %s %s", g.count,
                       (long long)g.capacity, (long long)d->ffn, gmm_act_name(a.kind), gmm__peek_dtype(d->x));
    }
    if (op != GMM_OP_ACT_FWD && op != GMM_OP_ACT_BWD)
        return gmm__refuse(call, GMM_E_ARG, "op", "%d is neither act_fwd (%d) nor act_bwd (%d)", (int)op,
                           (int)GMM_OP_ACT_FWD, (int)GMM_OP_ACT_BWD);
    if ((s = gmm__read_options(call, d->options)) != GMM_OK || (s = gmm__read_groups(call, d->groups)) != GMM_OK)
        return s;
    if (d->reserved) return gmm__refuse(call, GMM_E_ARG, "reserved", "%d must be 0", d->reserved);
    if (d->ffn < 1) return gmm__refuse(call, GMM_E_ARG, "ffn", "%lld must be >= 1", (long long)d->ffn);
    if ((s = gmm__read(call, "act", &call->act, sizeof call->act, d->act)) != GMM_OK) return s;
    if ((s = gmm__check_act(&call->act, d->ffn, "", rule, sizeof rule)) != GMM_OK)
        return gmm__refuse_member(call, s, "act", rule);
    if (d->ffn > INT64_MAX / 2)
        return gmm__refuse(call, GMM_E_OVERFLOW, "ffn", "%lld does not fit 64 bits twice", (long long)d->ffn);
    call->out = d->ffn;
    call->in = gmm_act_gated(call->act.kind) ? 2 * d->ffn : d->ffn;
    if ((s = gmm__read_mat(call, GMM__X_, "x", d->x, 1, gmm__matrix(call->rows, call->in), GMM__FLOATS)) != GMM_OK ||
        (s = gmm__read_mat(call, GMM__Y, "y", d->y, op == GMM_OP_ACT_FWD, gmm__matrix(call->rows, call->out),
                           GMM__FLOATS)) != GMM_OK ||
        (s = gmm__check_array(call, "prob", d->prob, 0, call->rows)) != GMM_OK)
        return s;
    if (op == GMM_OP_ACT_FWD) return GMM_OK;
    call->in_place = 1; /* engines read all that belongs to an element before they write any of it */
    if ((s = gmm__read_mat(call, GMM__DY, "dy", d->dy, 1, gmm__matrix(call->rows, call->out), GMM__FLOATS)) != GMM_OK ||
        (s = gmm__read_mat(call, GMM__DX, "dx", d->dx, 0, gmm__matrix(call->rows, call->in), GMM__FLOATS)) != GMM_OK ||
        (s = gmm__check_output(call, "dprob", d->dprob, 0, call->rows)) != GMM_OK)
        return s;
    if (!query && !d->dx && !d->dprob && !d->y)
        return gmm__refuse_that(call, GMM_E_NULL, "dx", "is NULL, and so are activation.dprob and activation.y: "
                                "nothing is asked for");
    return GMM_OK;
}

GMMDEF gmm_status gmm_act_query(gmm_context *ctx, gmm_op op, const gmm_activation *activation, gmm_info *info) {
    gmm__call call;
    const gmm_status s = gmm__act_prepare(&call, ctx, op, "gmm_act_query", activation, 1);
    return s != GMM_OK ? s : gmm__serve(&call, info, NULL, 0, NULL);
}
GMMDEF gmm_status gmm_act_fwd(gmm_context *ctx, const gmm_activation *activation, void *workspace,
                              size_t workspace_bytes, gmm_stream stream) {
    gmm__call call;
    const gmm_status s = gmm__act_prepare(&call, ctx, GMM_OP_ACT_FWD, "gmm_act_fwd", activation, 0);
    return s != GMM_OK ? s : gmm__serve(&call, NULL, workspace, workspace_bytes, stream);
}
GMMDEF gmm_status gmm_act_bwd(gmm_context *ctx, const gmm_activation *activation, void *workspace,
                              size_t workspace_bytes, gmm_stream stream) {
    gmm__call call;
    const gmm_status s = gmm__act_prepare(&call, ctx, GMM_OP_ACT_BWD, "gmm_act_bwd", activation, 0);
    return s != GMM_OK ? s : gmm__serve(&call, NULL, workspace, workspace_bytes, stream);
}

