/* Checks and entry points of gmm_topk_fwd and gmm_topk_bwd. */

/* Reads the descriptor and operands of a routing call. A slot is one of the topk choices of a token. */
static gmm_status gmm__read_route(gmm__call *call, const gmm_route *route) {
    gmm_route *r = &call->d.route;
    const int bwd = call->op == GMM_OP_TOPK_BWD;
    int64_t slots;
    gmm_status s = gmm__read_descriptor(call, "route", r, sizeof *r, route);
    if (s != GMM_OK) return s;
    (void)snprintf(call->shapes, sizeof call->shapes, "T=%lld E=%d k=%d %s", (long long)r->tokens, r->experts,
                   r->topk, gmm__peek_dtype(r->logits));
    if ((s = gmm__read_options(call, r->options)) != GMM_OK) return s;
    if (r->experts < 1) return gmm__refuse(call, GMM_E_ARG, "experts", "%d must be >= 1", r->experts);
    if (r->tokens < 0) return gmm__refuse(call, GMM_E_ARG, "tokens", "%lld must be >= 0", (long long)r->tokens);
    if (r->topk < 1 || r->topk > r->experts)
        return gmm__refuse(call, GMM_E_ARG, "topk", "%d must be 1 to %d", r->topk, r->experts);
    if (!gmm__mul(r->tokens, r->topk, &slots) || slots > INT32_MAX)
        return gmm__refuse(call, GMM_E_ARG, "tokens", "%lld times topk %d must be < 2^31, counts are int32",
                           (long long)r->tokens, r->topk);
    if (r->score != GMM_SCORE_SOFTMAX && r->score != GMM_SCORE_SIGMOID)
        return gmm__refuse(call, GMM_E_ARG, "score", "%d is neither softmax (0) nor sigmoid (1)", (int)r->score);
    if (r->normalize & ~1) return gmm__refuse(call, GMM_E_ARG, "normalize", "%d must be 0 or 1", r->normalize);
    if (!gmm__is_finite(r->scale)) return gmm__refuse(call, GMM_E_ARG, "scale", "%g must be finite", (double)r->scale);
    if (!gmm__is_finite(r->aux_coeff))
        return gmm__refuse(call, GMM_E_ARG, "aux_coeff", "%g must be finite", (double)r->aux_coeff);
    if (!gmm__is_finite(r->z_coeff))
        return gmm__refuse(call, GMM_E_ARG, "z_coeff", "%g must be finite", (double)r->z_coeff);
    if (r->scale == 0.0f) r->scale = 1.0f;
    s = gmm__read_mat(call, GMM__X_, "logits", r->logits, 1, gmm__matrix(r->tokens, r->experts), GMM__FLOATS);
    if (s != GMM_OK) return s;
    if (bwd) {
        s = gmm__read_mat(call, GMM__DX, "dlogits", r->dlogits, 1, gmm__matrix(r->tokens, r->experts), GMM__FLOATS);
        if (s != GMM_OK || (s = gmm__check_array(call, "dprobs", r->dprobs, 0, slots)) != GMM_OK ||
            (s = gmm__check_array(call, "indices", r->indices, r->dprobs != NULL, slots)) != GMM_OK ||
            (s = gmm__check_array(call, "counts", r->counts, r->aux_coeff != 0.0f, r->experts)) != GMM_OK)
            return s;
        return gmm__check_array(call, "dloss", r->dloss, 0, 2);
    }
    if ((s = gmm__check_array(call, "expert_bias", r->expert_bias, 0, r->experts)) != GMM_OK ||
        (s = gmm__check_output(call, "indices", r->indices, 1, slots)) != GMM_OK ||
        (s = gmm__check_output(call, "probs", r->probs, 1, slots)) != GMM_OK ||
        (s = gmm__check_output(call, "counts", r->counts, 0, r->experts)) != GMM_OK ||
        (s = gmm__check_output(call, "offsets", r->offsets, 0, (int64_t)r->experts + 1)) != GMM_OK ||
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

