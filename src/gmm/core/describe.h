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

GMMDEF gmm_status gmm_describe(gmm_context *ctx, gmm_op op, const void *descriptor, char *text, size_t bytes) {
    gmm__call call;
    gmm__plan plan;
    gmm__text t;
    gmm_status s = gmm__prepare(&call, ctx, op, "gmm_describe", descriptor, 1);
    if (s != GMM_OK) return s;
    if (!text || bytes < 1) return gmm__refuse_that(&call, GMM_E_NULL, "text", "is NULL or has no bytes");
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

