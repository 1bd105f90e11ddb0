/* .......................................................................................... 14.3 Grouped linear ... */

/* Checks and entry points of grouped linear layers. */

/* Reads an operand of a product: floats, or the quantized copy whose blocks run along the contraction. That is `mat`
   itself if the direction is rowwise, and mat->columnwise if it is columnwise. */
static gmm_status gmm__read_operand(gmm__call *call, int role, const char *argument, const gmm_mat *mat,
                                    gmm__extents extents, gmm_direction direction) {
    gmm_mat m;
    gmm_layout layout;
    gmm_error error = GMM_ZERO;
    char name[32];
    if (!mat || !gmm__copy_sized(&m, sizeof m, mat) || m.scaling == GMM_SCALING_NONE)
        return gmm__read_mat(call, role, argument, mat, 1, extents, GMM__FLOATS);
    if (direction == GMM_ROWWISE) return gmm__read_quant(call, role, argument, mat, extents, direction);
    if (gmm_layout_of(m.dtype, m.scaling, m.scale_order, direction, 0, 0, &layout, &error) != GMM_OK)
        return gmm__refuse(call, error.status, argument, "%s", error.text);
    (void)snprintf(name, sizeof name, "%s.columnwise", argument);
    if (!m.columnwise)
        return gmm__refuse_that(call, GMM_E_NULL, name, "is NULL; %s contracts along the rows, and so do its blocks",
                                gmm_op_name(call->op));
    return gmm__read_quant(call, role, name, m.columnwise, extents, direction);
}

/* Whether operands of these two scalings can be multiplied. Scalings per tensor and per row go together, in any
   combination. 1x128 goes with 1x128 and 128x128, but 128x128 not with itself, which no kernel multiplies. Every other
   scaling goes with itself alone. */
static int gmm__scalings_multiply(gmm_scaling a, gmm_scaling b) {
    switch (a) {
    case GMM_SCALING_TENSOR:
    case GMM_SCALING_ROW: return b == GMM_SCALING_TENSOR || b == GMM_SCALING_ROW;
    case GMM_SCALING_1X128: return b == GMM_SCALING_1X128 || b == GMM_SCALING_128X128;
    case GMM_SCALING_128X128: return b == GMM_SCALING_1X128;
    default: return a == b;
    }
}
/* Whether weights of this scaling can be multiplied with tokens that are not quantized. */
static int gmm__scaling_beside_floats(gmm_scaling s) { return s == GMM_SCALING_MX32 || s == GMM_SCALING_NV16; }

/* beta of group g's gradient in dst = grad + beta dst. */
static float gmm__grad_beta(const gmm_grad *grad, int64_t g) {
    gmm_wgrad_in in = GMM_ZERO;
    gmm_wgrad_out out = GMM_ZERO;
    if (grad->beta) return grad->beta[g];
    in.want = 1;
    in.main_grad = (uint8_t)grad->main_grad;
    in.overwrite = (uint8_t)grad->overwrite;
    (void)gmm_wgrad_decide(&in, &out, NULL);
    return out.beta_one ? 1.0f : 0.0f;
}

/* The name in messages of an operand that a product multiplies: of the copy that it reads. */
static void gmm__operand_name(const gmm__call *call, int role, const char *field, char name[32]) {
    const int columnwise = call->mat[role].scaling != GMM_SCALING_NONE && call->direction[role] == GMM_COLUMNWISE;
    (void)snprintf(name, 32, "%s%s", field, columnwise ? ".columnwise" : "");
}
/* Checks that two operands can be multiplied: their scales must apply to the whole sum over the contraction, or to the
   sums of whole blocks. Sets the alignment of the features that the scalings require. */
static gmm_status gmm__check_operands(gmm__call *call, int first, const char *first_field, int second,
                                      const char *second_field) {
    char first_name[32], second_name[32];
    const gmm_mat *a = &call->mat[first], *b = &call->mat[second];
    const int32_t align = gmm_feature_align(b->scaling); /* if a is quantized, so is b */
    const size_t used = strlen(call->shapes);
    gmm__operand_name(call, first, first_field, first_name);
    gmm__operand_name(call, second, second_field, second_name);
    (void)snprintf(call->shapes + used, sizeof call->shapes - used, " %s%s%s", gmm_dtype_name(a->dtype),
                   a->scaling == GMM_SCALING_NONE ? "" : " ",
                   a->scaling == GMM_SCALING_NONE ? "" : gmm_scaling_name(a->scaling));
    call->in_align = call->out_align = align;
    if (a->scaling == GMM_SCALING_NONE && b->scaling == GMM_SCALING_NONE)
        return a->dtype == b->dtype ? GMM_OK
                                    : gmm__refuse(call, GMM_E_DTYPE, second_name, "dtype %s must be that of %s.%s, %s",
                                                  gmm_dtype_name(b->dtype), call->path, first_name,
                                                  gmm_dtype_name(a->dtype));
    if (a->scaling == GMM_SCALING_NONE ? second != GMM__W || !gmm__scaling_beside_floats(b->scaling)
                                       : !gmm__scalings_multiply(a->scaling, b->scaling))
        return gmm__refuse(call, GMM_E_DTYPE, second_name, "%s scaled %s does not multiply %s.%s, %s scaled "
                           "%s", gmm_dtype_name(b->dtype), gmm_scaling_name(b->scaling), call->path, first_name,
                           gmm_dtype_name(a->dtype), gmm_scaling_name(a->scaling));
    if (a->hadamard != b->hadamard)
        return gmm__refuse(call, GMM_E_CONFIG, second_name, "hadamard 0x%x must be that of %s.%s, 0x%x",
                           (unsigned)b->hadamard, call->path, first_name, (unsigned)a->hadamard);
    if (call->in % align || call->out % align)
        return gmm__refuse(call, GMM_E_ARG, call->in % align ? "in_features" : "out_features", "%lld must be a "
                           "multiple of %d for scaling %s", (long long)(call->in % align ? call->in : call->out),
                           (int)align, gmm_scaling_name(b->scaling));
    return GMM_OK;
}

/* Whether an operand of a linear call is quantized. */
static GMM__UNUSED int gmm__quantized(const gmm__call *call) {
    return call->mat[GMM__X_].scaling != GMM_SCALING_NONE || call->mat[GMM__W].scaling != GMM_SCALING_NONE ||
           call->mat[GMM__DY].scaling != GMM_SCALING_NONE;
}

/* Checks what a linear layer or an MLP says of the indices of gathered rows. *div 0 becomes 1. */
static gmm_status gmm__check_indices(gmm__call *call, const int32_t *x_index, const int32_t *dy_index,
                                     int64_t index_rows, int32_t *div) {
    if (*div < 0) return gmm__refuse(call, GMM_E_ARG, "index_div", "%d must be >= 1, or 0 for 1", *div);
    if (*div == 0) *div = 1;
    if ((x_index || dy_index) && (index_rows < 0 || index_rows > INT32_MAX))
        return gmm__refuse(call, GMM_E_ARG, "index_rows", "%lld must be 0 to 2^31 - 1", (long long)index_rows);
    return GMM_OK;
}
/* Checks their memory, when the matrices have shown that the number of rows fits. */
static gmm_status gmm__check_index_arrays(gmm__call *call, const int32_t *x_index, const int32_t *dy_index) {
    const gmm_status s = gmm__check_array(call, "x_index", x_index, 0, call->rows);
    return s != GMM_OK ? s : gmm__check_array(call, "dy_index", dy_index, 0, call->rows);
}

/* Whether a gathered operand is quantized, which no engine multiplies. */
static int gmm__gathers_quantized(const gmm__call *call) {
    const gmm_linear *d = &call->d.linear;
    return (d->x_index && call->mat[GMM__X_].scaling != GMM_SCALING_NONE) ||
           (d->dy_index && call->mat[GMM__DY].scaling != GMM_SCALING_NONE);
}

/* Checks one linear operation. Only what the operation uses is read. K is in_features, N out_features; x
   is [rows, K], y and dy are [rows, N], w and dw are [N, K] per group. */
static gmm_status gmm__linear_prepare(gmm__call *call, gmm_context *ctx, gmm_op op, const char *function,
                                      const gmm_linear *linear, int query) {
    gmm_linear *d = &call->d.linear;
    gmm_status s = gmm__open(call, ctx, op, function, query);
    const gmm_direction along_tokens = op == GMM_OP_LINEAR_WGRAD ? GMM_COLUMNWISE : GMM_ROWWISE;
    gmm__extents dx, y, x, dy; /* extents of the token matrices; rows of x and dy may be gathered from others */
    gmm_groups g;
    int64_t G, K, N;

    if (s != GMM_OK || (s = gmm__read_descriptor(call, "linear", d, sizeof *d, linear)) != GMM_OK) return s;
    K = call->in = d->in_features;
    N = call->out = d->out_features;
    gmm__peek_groups(d->groups, &g);
    (void)snprintf(call->shapes, sizeof call->shapes, "G=%d T=%lld K=%lld N=%lld", g.count, (long long)g.capacity,
                   (long long)K, (long long)N);
    if (op < GMM_OP_LINEAR_FWD || op > GMM_OP_LINEAR_BGRAD)
        return gmm__refuse(call, GMM_E_ARG, "op", "%d (%s) must be linear_fwd, linear_dgrad, linear_wgrad or "
                           "linear_bgrad", (int)op, gmm_op_name(op));
    if ((s = gmm__read_options(call, d->options)) != GMM_OK || (s = gmm__read_groups(call, d->groups)) != GMM_OK)
        return s;
    G = call->groups.count;
    if ((d->alpha_per_group | d->y_add | d->d_bias_scale_add) & ~1)
        return gmm__refuse(call, GMM_E_ARG, "linear",
                           "alpha_per_group %d, y_add %d and d_bias_scale_add %d must be 0 or 1",
                           d->alpha_per_group, d->y_add, d->d_bias_scale_add);
    if (K < 1) return gmm__refuse(call, GMM_E_ARG, "in_features", "%lld must be >= 1", (long long)K);
    if (N < 1) return gmm__refuse(call, GMM_E_ARG, "out_features", "%lld must be >= 1", (long long)N);
    /* what the operation does not use is not looked at */
    if (op != GMM_OP_LINEAR_FWD && op != GMM_OP_LINEAR_WGRAD) d->x_index = NULL;
    if (op == GMM_OP_LINEAR_FWD) d->dy_index = NULL;
    if (op != GMM_OP_LINEAR_FWD && op != GMM_OP_LINEAR_BGRAD) d->bias_scale = NULL;
    if (op == GMM_OP_LINEAR_BGRAD) d->alpha = NULL;
    else d->d_bias_scale = NULL;
    if (op == GMM_OP_LINEAR_BGRAD && !d->d_bias_scale) d->bias = NULL;
    if (d->reserved) return gmm__refuse(call, GMM_E_ARG, "reserved", "%d must be 0", d->reserved);
    if ((s = gmm__check_indices(call, d->x_index, d->dy_index, d->index_rows, &d->index_div)) != GMM_OK) return s;
    dx = gmm__matrix(call->rows, K);
    y = gmm__matrix(call->rows, N);
    x = d->x_index ? gmm__matrix(d->index_rows, K) : dx;
    dy = d->dy_index ? gmm__matrix(d->index_rows, N) : y;

    if ((op == GMM_OP_LINEAR_FWD || op == GMM_OP_LINEAR_WGRAD) &&
        (s = gmm__read_operand(call, GMM__X_, "x", d->x, x, along_tokens)) != GMM_OK)
        return s;
    if (op == GMM_OP_LINEAR_BGRAD) {
        if ((s = gmm__read_mat(call, GMM__DY, "dy", d->dy, 1, dy, GMM__FLOATS)) != GMM_OK) return s;
    } else if (op != GMM_OP_LINEAR_FWD) {
        if ((s = gmm__read_operand(call, GMM__DY, "dy", d->dy, dy, along_tokens)) != GMM_OK) return s;
    }
    if ((op == GMM_OP_LINEAR_FWD || op == GMM_OP_LINEAR_DGRAD) &&
        (s = gmm__read_operand(call, GMM__W, "w", d->w, gmm__matrices(G, N, K),
                               op == GMM_OP_LINEAR_FWD ? GMM_ROWWISE : GMM_COLUMNWISE)) != GMM_OK)
        return s;
    if (op == GMM_OP_LINEAR_FWD && (s = gmm__read_mat(call, GMM__Y, "y", d->y, 1, y, GMM__FLOATS)) != GMM_OK) return s;
    if (op == GMM_OP_LINEAR_DGRAD && (s = gmm__read_mat(call, GMM__DX, "dx", d->dx, 1, dx, GMM__FLOATS)) != GMM_OK)
        return s;
    if (op == GMM_OP_LINEAR_WGRAD && (s = gmm__read_grad(call, GMM__DW, "dw", d->dw, 1, N, K)) != GMM_OK) return s;
    if ((op == GMM_OP_LINEAR_FWD || op == GMM_OP_LINEAR_BGRAD) &&
        (s = gmm__read_mat(call, GMM__BIAS, "bias", d->bias, op == GMM_OP_LINEAR_BGRAD && d->d_bias_scale,
                           gmm__matrices(G, 1, N), GMM__FLOATS)) != GMM_OK)
        return s;
    if (op == GMM_OP_LINEAR_BGRAD) {
        if (!d->db && !d->d_bias_scale)
            return gmm__refuse_that(call, GMM_E_NULL, "db", "and linear.d_bias_scale are both NULL: nothing is wanted");
        if ((s = gmm__read_grad(call, GMM__DB, "db", d->db, 0, 1, N)) != GMM_OK) return s;
    }

    if (op == GMM_OP_LINEAR_BGRAD) {
        const size_t used = strlen(call->shapes);
        (void)snprintf(call->shapes + used, sizeof call->shapes - used, " %s",
                       gmm_dtype_name(call->mat[GMM__DY].dtype));
    } else {
        const int wgrad = op == GMM_OP_LINEAR_WGRAD, fwd = op == GMM_OP_LINEAR_FWD;
        if ((s = gmm__check_operands(call, fwd || wgrad ? GMM__X_ : GMM__DY, fwd || wgrad ? "x" : "dy",
                                     wgrad ? GMM__DY : GMM__W, wgrad ? "dy" : "w")) != GMM_OK)
            return s;
    }
    if (gmm__gathers_quantized(call))
        return gmm__refuse(call, GMM_E_UNSUPPORTED, d->x_index ? "x_index" : "dy_index",
                           "rows of quantized operands cannot be gathered: permute the codes and their scales");
    if ((s = gmm__check_array(call, "alpha", d->alpha, 0, d->alpha_per_group ? G : 1)) != GMM_OK ||
        (s = gmm__check_array(call, "bias_scale", d->bias_scale, 0, call->rows)) != GMM_OK ||
        (s = gmm__check_array(call, "prob", d->prob, 0, call->rows)) != GMM_OK ||
        (s = gmm__check_index_arrays(call, d->x_index, d->dy_index)) != GMM_OK)
        return s;
    if (d->prob && (op == GMM_OP_LINEAR_WGRAD || op == GMM_OP_LINEAR_BGRAD))
        return gmm__refuse_that(call, GMM_E_ARG, "prob", "must be NULL in %s: multiply the rows of dy by it before",
                                op == GMM_OP_LINEAR_WGRAD ? "wgrad" : "bgrad");
    return gmm__check_output(call, "d_bias_scale", d->d_bias_scale, 0, call->rows);
}

GMMDEF gmm_status gmm_linear_query(gmm_context *ctx, gmm_op op, const gmm_linear *linear, gmm_info *info) {
    gmm__call call;
    const gmm_status s = gmm__linear_prepare(&call, ctx, op, "gmm_linear_query", linear, 1);
    return s != GMM_OK ? s : gmm__serve(&call, info, NULL, 0, NULL);
}

static gmm_status gmm__linear_run(gmm_context *ctx, gmm_op op, const char *function, const gmm_linear *linear,
                                  void *workspace, size_t workspace_bytes, gmm_stream stream) {
    gmm__call call;
    const gmm_status s = gmm__linear_prepare(&call, ctx, op, function, linear, 0);
    return s != GMM_OK ? s : gmm__serve(&call, NULL, workspace, workspace_bytes, stream);
}

GMMDEF gmm_status gmm_linear_fwd(gmm_context *ctx, const gmm_linear *linear, void *workspace, size_t workspace_bytes,
                                 gmm_stream stream) {
    return gmm__linear_run(ctx, GMM_OP_LINEAR_FWD, "gmm_linear_fwd", linear, workspace, workspace_bytes, stream);
}
GMMDEF gmm_status gmm_linear_dgrad(gmm_context *ctx, const gmm_linear *linear, void *workspace, size_t workspace_bytes,
                                   gmm_stream stream) {
    return gmm__linear_run(ctx, GMM_OP_LINEAR_DGRAD, "gmm_linear_dgrad", linear, workspace, workspace_bytes, stream);
}
GMMDEF gmm_status gmm_linear_wgrad(gmm_context *ctx, const gmm_linear *linear, void *workspace, size_t workspace_bytes,
                                   gmm_stream stream) {
    return gmm__linear_run(ctx, GMM_OP_LINEAR_WGRAD, "gmm_linear_wgrad", linear, workspace, workspace_bytes, stream);
}
GMMDEF gmm_status gmm_linear_bgrad(gmm_context *ctx, const gmm_linear *linear, void *workspace, size_t workspace_bytes,
                                   gmm_stream stream) {
    return gmm__linear_run(ctx, GMM_OP_LINEAR_BGRAD, "gmm_linear_bgrad", linear, workspace, workspace_bytes, stream);
}

