/* Checks and entry points of gmm_topk_fwd and gmm_topk_bwd. */

/* Checks experts, tokens and topk, and computes the number of slots. */
static gmm_status gmm__check_slots(const gmm__call *call, int32_t experts, int64_t tokens, int32_t topk,
                                   int64_t *slots) {
    int64_t elements;
    if (experts < 1) return gmm__refuse(call, GMM_E_ARG, "experts", "%d must be >= 1", experts);
    if (tokens < 0) return gmm__refuse(call, GMM_E_ARG, "tokens", "%lld must be >= 0", (long long)tokens);
    if (topk < 1) return gmm__refuse(call, GMM_E_ARG, "topk", "%d must be >= 1", topk);
    if (!gmm__mul(tokens, topk, slots) || *slots > INT32_MAX)
        return gmm__refuse(call, GMM_E_ARG, "tokens", "%lld times topk %d must be < 2^31, counts are int32",
                           (long long)tokens, topk);
    if (!gmm__mul(tokens, experts, &elements) || !gmm__mul(elements, 8, &elements))
        return gmm__refuse(call, GMM_E_OVERFLOW, "tokens", "%lld rows of %d experts do not fit 64 bits",
                           (long long)tokens, experts);
    return GMM_OK;
}

/* Checks the fields of the choice of experts, and sets their defaults. */
static gmm_status gmm__read_choice(const gmm__call *call, gmm_route *r) {
    const int32_t members = r->groups > 1 ? r->experts / r->groups : r->experts;
    if (r->groups < 0 || (r->groups > 1 && r->experts % r->groups))
        return gmm__refuse(call, GMM_E_ARG, "groups", "%d must be 0 or a divisor of the %d experts", r->groups,
                           r->experts);
    if (r->groups <= 1 && (r->group_topk || r->group_sum))
        return gmm__refuse(call, GMM_E_CONFIG, r->group_topk ? "group_topk" : "group_sum", "%d must be 0 with groups "
                           "%d", r->group_topk ? r->group_topk : r->group_sum, r->groups);
    if (r->groups > 1) {
        if (r->group_topk < 1 || r->group_topk > r->groups || (int64_t)r->group_topk * members < r->topk)
            return gmm__refuse(call, GMM_E_ARG, "group_topk", "%d must be 1 to the %d groups, which have %d experts "
                               "each, and topk %d of them are chosen", r->group_topk, r->groups, members, r->topk);
        if (r->group_sum < 0 || r->group_sum > members || (!r->group_sum && r->topk < r->group_topk))
            return gmm__refuse(call, GMM_E_ARG, "group_sum", "%d must be 1 to the %d experts of a group, or 0 for topk "
                               "%d divided by group_topk %d, if that is >= 1", r->group_sum, members, r->topk,
                               r->group_topk);
        if (!r->group_sum) r->group_sum = r->topk / r->group_topk;
    }
    if (r->sinkhorn < 0) return gmm__refuse(call, GMM_E_ARG, "sinkhorn", "%d must be >= 0", r->sinkhorn);
    if (r->sinkhorn && r->expert_bias)
        return gmm__refuse(call, GMM_E_CONFIG, "sinkhorn", "%d excludes expert_bias, which is given", r->sinkhorn);
    if (!gmm__is_finite(r->sinkhorn_tolerance) || r->sinkhorn_tolerance < 0.0f)
        return gmm__refuse(call, GMM_E_ARG, "sinkhorn_tolerance", "%g must be finite and >= 0",
                           (double)r->sinkhorn_tolerance);
    if (r->sinkhorn_tolerance == 0.0f) r->sinkhorn_tolerance = 1e-4f;
    return GMM_OK;
}

/* Checks the fields of sequences and padding. */
static gmm_status gmm__read_sequences(gmm__call *call, gmm_route *r) {
    const int reads = call->op == GMM_OP_TOPK_BWD && r->aux_coeff != 0.0f;
    gmm_status s;
    if (r->sequences == 0) r->sequences = 1;
    if (r->sequences < 0 || r->tokens % r->sequences)
        return gmm__refuse(call, GMM_E_ARG, "sequences", "%d must be 0 or a divisor of the %lld tokens", r->sequences,
                           (long long)r->tokens);
    if (r->sequence_first & ~1)
        return gmm__refuse(call, GMM_E_ARG, "sequence_first", "%d must be 0 or 1", r->sequence_first);
    if (r->reserved) return gmm__refuse(call, GMM_E_ARG, "reserved", "%d must be 0", r->reserved);
    if (r->sequences == 1 && r->sequence_counts)
        return gmm__refuse_that(call, GMM_E_CONFIG, "sequence_counts", "must be NULL with sequences %d: counts holds "
                                "the counts of a single sequence", r->sequences);
    s = gmm__check_elements(call, "padding", r->padding, 0, 0, r->tokens, 1);
    if (s == GMM_OK)
        s = gmm__check_elements(call, "sequence_counts", r->sequence_counts, reads && r->sequences > 1,
                                call->op == GMM_OP_TOPK_FWD, (int64_t)r->sequences * r->experts,
                                (int64_t)sizeof *r->sequence_counts);
    return s;
}

/* Reads the descriptor and operands of a routing call. A slot is one of the topk choices of a token. */
static gmm_status gmm__read_route(gmm__call *call, const gmm_route *route) {
    gmm_route *r = &call->d.route;
    const int bwd = call->op == GMM_OP_TOPK_BWD;
    const uint32_t dtypes = GMM__FLOATS | 1u << GMM_F64;
    int64_t slots = 0;
    gmm_status s = gmm__read_descriptor(call, "route", r, sizeof *r, route);
    if (s != GMM_OK) return s;
    (void)snprintf(call->shapes, sizeof call->shapes, "T=%lld E=%d k=%d %s", (long long)r->tokens, r->experts,
                   r->topk, gmm__peek_dtype(r->logits));
    if ((s = gmm__read_options(call, r->options)) != GMM_OK) return s;
    if (r->experts >= 1 && (r->topk < 1 || r->topk > r->experts))
        return gmm__refuse(call, GMM_E_ARG, "topk", "%d must be 1 to %d", r->topk, r->experts);
    if ((s = gmm__check_slots(call, r->experts, r->tokens, r->topk, &slots)) != GMM_OK) return s;
    if (r->score != GMM_SCORE_SOFTMAX && r->score != GMM_SCORE_SIGMOID)
        return gmm__refuse(call, GMM_E_ARG, "score", "%d is neither softmax (0) nor sigmoid (1)", (int)r->score);
    if (r->normalize & ~1) return gmm__refuse(call, GMM_E_ARG, "normalize", "%d must be 0 or 1", r->normalize);
    if (!gmm__is_finite(r->scale)) return gmm__refuse(call, GMM_E_ARG, "scale", "%g must be finite", (double)r->scale);
    if (!gmm__is_finite(r->aux_coeff))
        return gmm__refuse(call, GMM_E_ARG, "aux_coeff", "%g must be finite", (double)r->aux_coeff);
    if (!gmm__is_finite(r->z_coeff))
        return gmm__refuse(call, GMM_E_ARG, "z_coeff", "%g must be finite", (double)r->z_coeff);
    if (r->scale == 0.0f) r->scale = 1.0f;
    if ((s = gmm__read_choice(call, r)) != GMM_OK || (s = gmm__read_sequences(call, r)) != GMM_OK) return s;
    s = gmm__read_mat(call, GMM__X_, "logits", r->logits, 1, gmm__matrix(r->tokens, r->experts), dtypes);
    if (s != GMM_OK) return s;
    if (bwd) {
        s = gmm__read_mat(call, GMM__DX, "dlogits", r->dlogits, 1, gmm__matrix(r->tokens, r->experts), dtypes);
        if (s != GMM_OK || (s = gmm__check_array(call, "dprobs", r->dprobs, 0, slots)) != GMM_OK ||
            (s = gmm__check_array(call, "indices", r->indices, r->dprobs != NULL, slots)) != GMM_OK ||
            (s = gmm__check_array(call, "counts", r->counts, r->aux_coeff != 0.0f && r->sequences == 1,
                                  r->experts)) != GMM_OK)
            return s;
        return gmm__check_array(call, "dloss", r->dloss, 0, 2);
    }
    if ((s = gmm__check_array(call, "expert_bias", r->expert_bias, 0, r->experts)) != GMM_OK ||
        (s = gmm__check_output(call, "indices", r->indices, 1, slots)) != GMM_OK ||
        (s = gmm__check_output(call, "probs", r->probs, 1, slots)) != GMM_OK ||
        (s = gmm__check_output(call, "counts", r->counts, 0, r->experts)) != GMM_OK ||
        (s = gmm__check_output(call, "offsets", r->offsets, 0, (int64_t)r->experts + 1)) != GMM_OK ||
        (s = gmm__check_elements(call, "total_counts", r->total_counts, 0, 1, r->experts,
                                 (int64_t)sizeof *r->total_counts)) != GMM_OK ||
        (s = gmm__check_output(call, "aux_loss", r->aux_loss, 0, 1)) != GMM_OK)
        return s;
    return gmm__check_output(call, "z_loss", r->z_loss, 0, 1);
}

static gmm_status gmm__topk_prepare(gmm__call *call, gmm_context *ctx, gmm_op op, const char *function,
                                    const gmm_route *route, int query) {
    const gmm_status s = gmm__open(call, ctx, op, function, query);
    if (s != GMM_OK) return s;
    if (op != GMM_OP_TOPK_FWD && op != GMM_OP_TOPK_BWD)
        return gmm__refuse(call, GMM_E_ARG, "op", "%s is neither topk_fwd nor topk_bwd", gmm_op_name(op));
    return gmm__read_route(call, route);
}

GMMDEF gmm_status gmm_topk_query(gmm_context *ctx, gmm_op op, const gmm_route *route, gmm_info *info) {
    gmm__call call;
    const gmm_status s = gmm__topk_prepare(&call, ctx, op, "gmm_topk_query", route, 1);
    return s != GMM_OK ? s : gmm__serve(&call, info, NULL, 0, NULL);
}
GMMDEF gmm_status gmm_topk_fwd(gmm_context *ctx, const gmm_route *route, void *workspace, size_t workspace_bytes,
                               gmm_stream stream) {
    gmm__call call;
    const gmm_status s = gmm__topk_prepare(&call, ctx, GMM_OP_TOPK_FWD, "gmm_topk_fwd", route, 0);
    return s != GMM_OK ? s : gmm__serve(&call, NULL, workspace, workspace_bytes, stream);
}
GMMDEF gmm_status gmm_topk_bwd(gmm_context *ctx, const gmm_route *route, void *workspace, size_t workspace_bytes,
                               gmm_stream stream) {
    gmm__call call;
    const gmm_status s = gmm__topk_prepare(&call, ctx, GMM_OP_TOPK_BWD, "gmm_topk_bwd", route, 0);
    return s != GMM_OK ? s : gmm__serve(&call, NULL, workspace, workspace_bytes, stream);
}

/* --- dense routing, expert bias --- */

static gmm_status gmm__dense_run(gmm_context *ctx, gmm_op op, const char *function, const gmm_dense_route *dense,
                                 gmm_stream stream) {
    gmm__call call;
    gmm_dense_route *d = &call.d.dense;
    const int to = op == GMM_OP_ROUTE_TO_DENSE;
    int64_t slots, elements;
    int reads; /* indices are read */
    gmm_status s = gmm__open(&call, ctx, op, function, 0);
    if (s != GMM_OK || (s = gmm__read_descriptor(&call, "dense", d, sizeof *d, dense)) != GMM_OK) return s;
    (void)snprintf(call.shapes, sizeof call.shapes, "T=%lld E=%d k=%d", (long long)d->tokens, d->experts, d->topk);
    if ((s = gmm__read_options(&call, d->options)) != GMM_OK ||
        (s = gmm__check_slots(&call, d->experts, d->tokens, d->topk, &slots)) != GMM_OK)
        return s;
    elements = d->tokens * d->experts;
    reads = to || !d->map;
    if (d->reserved) return gmm__refuse(&call, GMM_E_ARG, "reserved", "%d must be 0", d->reserved);
    if (!d->values != !d->probs)
        return gmm__refuse_that(&call, GMM_E_CONFIG, d->values ? "values" : "probs", "is given without %s",
                                d->values ? "probs" : "values");
    if (reads && (d->counts || d->offsets))
        return gmm__refuse_that(&call, GMM_E_CONFIG, d->counts ? "counts" : "offsets", "%s",
                                to ? "must be NULL: gmm_route_to_dense counts nothing"
                                   : "must be NULL without map: gmm_route_from_dense counts the tokens of the map");
    if (d->offsets && !d->counts) return gmm__refuse_that(&call, GMM_E_CONFIG, "offsets", "is given without counts");
    if (!d->map && !d->values)
        return gmm__refuse_that(&call, GMM_E_NULL, "map", "is NULL, and so is dense.values: nothing is asked for");
    if ((s = gmm__check_elements(&call, "map", d->map, 0, to, elements, 1)) != GMM_OK ||
        (s = gmm__check_elements(&call, "values", d->values, 0, to, elements, 4)) != GMM_OK ||
        (s = gmm__check_elements(&call, "indices", d->indices, 1, !reads, slots, 4)) != GMM_OK ||
        (s = gmm__check_elements(&call, "probs", d->probs, 0, !to, slots, 4)) != GMM_OK ||
        (s = gmm__check_output(&call, "counts", d->counts, 0, d->experts)) != GMM_OK ||
        (s = gmm__check_output(&call, "offsets", d->offsets, 0, (int64_t)d->experts + 1)) != GMM_OK)
        return s;
    return gmm__serve(&call, NULL, NULL, 0, stream);
}
GMMDEF gmm_status gmm_route_to_dense(gmm_context *ctx, const gmm_dense_route *dense, gmm_stream stream) {
    return gmm__dense_run(ctx, GMM_OP_ROUTE_TO_DENSE, "gmm_route_to_dense", dense, stream);
}
GMMDEF gmm_status gmm_route_from_dense(gmm_context *ctx, const gmm_dense_route *dense, gmm_stream stream) {
    return gmm__dense_run(ctx, GMM_OP_ROUTE_FROM_DENSE, "gmm_route_from_dense", dense, stream);
}

GMMDEF gmm_status gmm_update_expert_bias(gmm_context *ctx, const gmm_expert_bias *update, gmm_stream stream) {
    gmm__call call;
    gmm_expert_bias *d = &call.d.bias;
    int64_t elements;
    gmm_status s = gmm__open(&call, ctx, GMM_OP_EXPERT_BIAS, "gmm_update_expert_bias", 0);
    if (s != GMM_OK || (s = gmm__read_descriptor(&call, "update", d, sizeof *d, update)) != GMM_OK ||
        (s = gmm__read_options(&call, d->options)) != GMM_OK)
        return s;
    if (d->layers == 0) d->layers = 1;
    if (d->experts < 1) return gmm__refuse(&call, GMM_E_ARG, "experts", "%d must be >= 1", d->experts);
    if (d->layers < 1) return gmm__refuse(&call, GMM_E_ARG, "layers", "%d must be >= 0", d->layers);
    if (!gmm__is_finite(d->rate) || d->rate < 0.0f)
        return gmm__refuse(&call, GMM_E_ARG, "rate", "%g must be finite and >= 0", (double)d->rate);
    elements = (int64_t)d->layers * d->experts;
    if ((s = gmm__check_elements(&call, "total_counts", d->total_counts, 1, 1, elements, 8)) != GMM_OK ||
        (s = gmm__check_elements(&call, "bias", d->bias, 1, 1, elements, 4)) != GMM_OK)
        return s;
    return gmm__serve(&call, NULL, NULL, 0, stream);
}

