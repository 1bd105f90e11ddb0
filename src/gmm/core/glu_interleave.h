/* --- GLU interleave: checks and entry points --- */

/* Reads an operand. With axis GMM_GLU_ROWS it is `count` matrices of [2 ffn, cols], with GMM_GLU_COLUMNS one matrix of
   [count, 2 ffn]. With count 0 it has no elements, and only its dtype, scaling and flags are checked. */
static gmm_status gmm__glu_read(gmm__call *call, int role, const char *argument, const gmm_mat *mat) {
    const gmm_glu *d = &call->d.glu;
    gmm_mat m;
    if (d->count > 0 && d->axis == GMM_GLU_ROWS)
        return gmm__read_mat(call, role, argument, mat, 1, gmm__matrices(d->count, 2 * d->ffn, d->cols), GMM__BYTES);
    if (d->count > 0 || !mat || !gmm__copy_sized(&m, sizeof m, mat))
        return gmm__read_mat(call, role, argument, mat, 1, gmm__matrix(d->count, 2 * d->ffn), GMM__BYTES);
    m.struct_size = 0;
    m.data = NULL;
    m.table = NULL;
    m.ld = m.group_stride = 0;
    return gmm__read_mat(call, role, argument, &m, 1, gmm__matrix(0, 1), GMM__BYTES);
}

static gmm_status gmm__glu_prepare(gmm__call *call, gmm_context *ctx, const char *function, const gmm_glu *glu,
                                   int query) {
    gmm_glu *d = &call->d.glu;
    gmm_status s = gmm__open(call, ctx, GMM_OP_GLU_INTERLEAVE, function, query);
    if (s != GMM_OK || (s = gmm__read_descriptor(call, "glu", d, sizeof *d, glu)) != GMM_OK) return s;
    (void)snprintf(call->shapes, sizeof call->shapes, "%s count=%lld ffn=%lld cols=%lld block=%d %s",
                   d->axis == GMM_GLU_COLUMNS ? "columns" : "rows", (long long)d->count, (long long)d->ffn,
                   (long long)d->cols, d->block, gmm__peek_dtype(d->src));
    if ((s = gmm__read_options(call, d->options)) != GMM_OK) return s;
    if (d->axis != GMM_GLU_ROWS && d->axis != GMM_GLU_COLUMNS)
        return gmm__refuse(call, GMM_E_ARG, "axis", "%d is neither rows (0) nor columns (1)", (int)d->axis);
    if (d->inverse & ~1) return gmm__refuse(call, GMM_E_ARG, "inverse", "%d must be 0 or 1", d->inverse);
    if (d->ffn < 1) return gmm__refuse(call, GMM_E_ARG, "ffn", "%lld must be >= 1", (long long)d->ffn);
    if (d->ffn > INT64_MAX / 2)
        return gmm__refuse(call, GMM_E_OVERFLOW, "ffn", "%lld does not fit 64 bits twice", (long long)d->ffn);
    if (d->count < 0) return gmm__refuse(call, GMM_E_ARG, "count", "%lld must be >= 0", (long long)d->count);
    if (d->axis == GMM_GLU_ROWS && d->cols < 1)
        return gmm__refuse(call, GMM_E_ARG, "cols", "%lld must be >= 1", (long long)d->cols);
    if (d->block < 1 || d->ffn % d->block)
        return gmm__refuse(call, GMM_E_CONFIG, "block", "%d must be >= 1 and divide ffn %lld", d->block,
                           (long long)d->ffn);
    if ((s = gmm__glu_read(call, GMM__X_, "src", d->src)) != GMM_OK ||
        (s = gmm__glu_read(call, GMM__Y, "dst", d->dst)) != GMM_OK)
        return s;
    if (call->mat[GMM__Y].dtype != call->mat[GMM__X_].dtype)
        return gmm__refuse(call, GMM_E_DTYPE, "dst", "dtype %s must be that of %s.src, %s",
                           gmm_dtype_name(call->mat[GMM__Y].dtype), call->path,
                           gmm_dtype_name(call->mat[GMM__X_].dtype));
    return GMM_OK;
}

GMMDEF gmm_status gmm_glu_query(gmm_context *ctx, gmm_op op, const gmm_glu *glu, gmm_info *info) {
    gmm__call call;
    gmm_status s = gmm__open(&call, ctx, GMM_OP_GLU_INTERLEAVE, "gmm_glu_query", 1);
    if (s == GMM_OK && op != GMM_OP_GLU_INTERLEAVE)
        return gmm__refuse(&call, GMM_E_ARG, "op", "%d is not glu_interleave (%d)", (int)op,
                           (int)GMM_OP_GLU_INTERLEAVE);
    if (s == GMM_OK) s = gmm__glu_prepare(&call, ctx, "gmm_glu_query", glu, 1);
    return s != GMM_OK ? s : gmm__serve(&call, info, NULL, 0, NULL);
}
GMMDEF gmm_status gmm_glu_interleave(gmm_context *ctx, const gmm_glu *glu, void *workspace, size_t workspace_bytes,
                                     gmm_stream stream) {
    gmm__call call;
    const gmm_status s = gmm__glu_prepare(&call, ctx, "gmm_glu_interleave", glu, 0);
    return s != GMM_OK ? s : gmm__serve(&call, NULL, workspace, workspace_bytes, stream);
}

