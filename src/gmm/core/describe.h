/* The text of gmm_describe: a line for the plan of the call, and one for each plan that it is composed of. */

static void gmm__text_add(gmm__text *text, const char *format, ...) {
    va_list list;
    int length;
    va_start(list, format);
    length = vsnprintf(text->data + text->used, text->bytes - text->used, format, list);
    va_end(list);
    if (length < 0) return;
    text->used += (size_t)length < text->bytes - text->used ? (size_t)length : text->bytes - text->used - 1;
}

static void gmm__describe_plan(gmm__text *text, const gmm__plan *plan) {
    const gmm__call *call = plan->call;
    gmm__text_add(text, "%*s%s: engine %s", 2 * text->depth, "", gmm_op_name(call->op), gmm_engine_name(plan->engine));
    if (plan->kernel_name) gmm__text_add(text, ", kernel %s", plan->kernel_name);
    gmm__text_add(text, ", workspace %llu bytes", (unsigned long long)plan->workspace_bytes);
    if (plan->saved_bytes) gmm__text_add(text, ", saved %llu bytes", (unsigned long long)plan->saved_bytes);
    if (plan->note[0]) gmm__text_add(text, "; %s", plan->note);
    if (call->shapes[0]) gmm__text_add(text, " (%s)", call->shapes);
    gmm__text_add(text, "\n");
}

/* Checks the descriptor of an operation that has a query, as the query does. */
static gmm_status gmm__prepare_query(gmm__call *call, gmm_context *ctx, gmm_op op, const char *function,
                                     const void *d) {
    gmm_status s;
    switch (op) {
    case GMM_OP_QUANTIZE: case GMM_OP_REQUANTIZE:
        return gmm__quantize_prepare(call, ctx, op, function, (const gmm_quantization *)d, 1);
    case GMM_OP_DEQUANTIZE:
        return gmm__dequantize_prepare(call, ctx, function, (const gmm_dequantization *)d, 1);
    case GMM_OP_TRANSPOSE: return gmm__transpose_prepare(call, ctx, function, (const gmm_transposition *)d, 1);
    case GMM_OP_LINEAR_FWD: case GMM_OP_LINEAR_DGRAD: case GMM_OP_LINEAR_WGRAD: case GMM_OP_LINEAR_BGRAD:
        return gmm__linear_prepare(call, ctx, op, function, (const gmm_linear *)d, 1);
    case GMM_OP_ACT_FWD: case GMM_OP_ACT_BWD:
        return gmm__act_prepare(call, ctx, op, function, (const gmm_activation *)d, 1);
    case GMM_OP_MLP_FWD: case GMM_OP_MLP_BWD: case GMM_OP_MLP_WGRAD:
        return gmm__mlp_prepare(call, ctx, op, function, (const gmm_mlp *)d, GMM__MLP_QUERY);
    case GMM_OP_MOE_FWD: case GMM_OP_MOE_BWD:
        return gmm__moe_prepare(call, ctx, op, function, (const gmm_moe *)d, 1);
    case GMM_OP_TOPK_FWD: case GMM_OP_TOPK_BWD:
        return gmm__topk_prepare(call, ctx, op, function, (const gmm_route *)d, 1);
    case GMM_OP_PERMUTE_MAP: case GMM_OP_PERMUTE_FWD: case GMM_OP_PERMUTE_BWD: case GMM_OP_UNPERMUTE_FWD:
    case GMM_OP_UNPERMUTE_BWD:
        return gmm__permute_prepare(call, ctx, op, function, (const gmm_permute *)d, 1);
    case GMM_OP_PAD: case GMM_OP_UNPAD:
        return gmm__pad_prepare(call, ctx, op, function, (const gmm_padding *)d, 1);
    case GMM_OP_GLU_INTERLEAVE: return gmm__glu_prepare(call, ctx, function, (const gmm_glu *)d, 1);
    case GMM_OP_ACCUMULATE: return gmm__accumulate_prepare(call, ctx, function, (const gmm_accumulation *)d, 1);
    case GMM_OP_CONVERT: return gmm__convert_prepare(call, ctx, function, (const gmm_conversion *)d, 1);
    default:
        s = gmm__open(call, ctx, op, function, 1);
        return s != GMM_OK ? s : gmm__refuse(call, GMM_E_ARG, "op", "%d (%s) has no query", (int)op, gmm_op_name(op));
    }
}

GMMDEF gmm_status gmm_describe(gmm_context *ctx, gmm_op op, const void *descriptor, char *text, size_t bytes) {
    gmm__call call;
    gmm__plan plan;
    gmm__text t;
    gmm_status s = gmm__prepare_query(&call, ctx, op, "gmm_describe", descriptor);
    if (s != GMM_OK) return s;
    if (!text || bytes < 1) return gmm__refuse(&call, GMM_E_NULL, "text", "is NULL or has no bytes");
    if ((s = gmm__select(&call, &plan)) != GMM_OK) return s;
    t.data = text;
    t.bytes = bytes;
    t.used = 0;
    t.depth = 0;
    gmm__describe_plan(&t, &plan);
    t.depth = 1;
    call.describes = &t; /* planning is pure: the second plan is the first, and writes the lines of the steps */
    return gmm__select(&call, &plan);
}

