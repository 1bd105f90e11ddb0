/* ..................................................................................... 14.9 Accumulate, convert ... */

/* Checks and entry points of sums (gmm_accumulate) and conversions (gmm_convert). */

/* Checks the extents of a sum or a conversion. */
static gmm_status gmm__read_small_extents(gmm__call *call, int64_t rows, int64_t cols) {
    if (rows < 0) return gmm__refuse(call, GMM_E_ARG, "rows", "%lld must be >= 0", (long long)rows);
    if (cols < 1) return gmm__refuse(call, GMM_E_ARG, "cols", "%lld must be >= 1", (long long)cols);
    call->rows = rows;
    call->in = call->out = cols;
    return GMM_OK;
}

static gmm_status gmm__accumulate_prepare(gmm__call *call, gmm_context *ctx, const char *function,
                                          const gmm_accumulation *accumulation, int query) {
    gmm_accumulation *d = &call->d.sum;
    gmm_status s = gmm__open(call, ctx, GMM_OP_ACCUMULATE, function, query);
    if (s != GMM_OK || (s = gmm__read_descriptor(call, "accumulation", d, sizeof *d, accumulation)) != GMM_OK) return s;
    (void)snprintf(call->shapes, sizeof call->shapes, "%d of %lld x %lld %s", d->count, (long long)d->rows,
                   (long long)d->cols, gmm__peek_dtype(d->x));
    if ((s = gmm__read_options(call, d->options)) != GMM_OK) return s;
    if (d->count < 1) return gmm__refuse(call, GMM_E_ARG, "count", "%d must be >= 1", d->count);
    if ((s = gmm__read_small_extents(call, d->rows, d->cols)) != GMM_OK) return s;
    if (d->x) { /* the launch reads the addresses of the addends on the host */
        gmm_mat m;
        if (gmm__copy_sized(&m, sizeof m, d->x) && m.table && ctx->config.space == GMM_SPACE_CUDA &&
            !(m.flags & (uint32_t)GMM_MAT_TABLE_ON_HOST))
            return gmm__refuse(call, GMM_E_ARG, "x", "table must stand on the host (GMM_MAT_TABLE_ON_HOST)");
    }
    s = gmm__read_mat(call, GMM__X_, "x", d->x, 1, gmm__matrices(d->count, d->rows, d->cols), GMM__FLOATS);
    if (s != GMM_OK) return s;
    s = gmm__read_mat(call, GMM__Y, "y", d->y, 1, gmm__matrix(d->rows, d->cols), GMM__FLOATS);
    call->in_place = call->mat[GMM__X_].dtype == call->mat[GMM__Y].dtype;
    return s;
}

GMMDEF gmm_status gmm_accumulate_query(gmm_context *ctx, const gmm_accumulation *accumulation, gmm_info *info) {
    gmm__call call;
    const gmm_status s = gmm__accumulate_prepare(&call, ctx, "gmm_accumulate_query", accumulation, 1);
    return s != GMM_OK ? s : gmm__serve(&call, info, NULL, 0, NULL);
}
GMMDEF gmm_status gmm_accumulate(gmm_context *ctx, const gmm_accumulation *accumulation, void *workspace,
                                 size_t workspace_bytes, gmm_stream stream) {
    gmm__call call;
    const gmm_status s = gmm__accumulate_prepare(&call, ctx, "gmm_accumulate", accumulation, 0);
    return s != GMM_OK ? s : gmm__serve(&call, NULL, workspace, workspace_bytes, stream);
}

static gmm_status gmm__convert_prepare(gmm__call *call, gmm_context *ctx, const char *function,
                                       const gmm_conversion *conversion, int query) {
    gmm_conversion *d = &call->d.convert;
    gmm_dtype src, dst;
    gmm_status s = gmm__open(call, ctx, GMM_OP_CONVERT, function, query);
    if (s != GMM_OK || (s = gmm__read_descriptor(call, "conversion", d, sizeof *d, conversion)) != GMM_OK) return s;
    (void)snprintf(call->shapes, sizeof call->shapes, "%lld x %lld %s", (long long)d->rows, (long long)d->cols,
                   gmm__peek_dtype(d->src));
    if ((s = gmm__read_options(call, d->options)) != GMM_OK) return s;
    if (d->reserved) return gmm__refuse(call, GMM_E_ARG, "reserved", "%d must be 0", d->reserved);
    if ((s = gmm__read_small_extents(call, d->rows, d->cols)) != GMM_OK ||
        (s = gmm__read_mat(call, GMM__X_, "src", d->src, 1, gmm__matrix(d->rows, d->cols), GMM__BYTES)) != GMM_OK ||
        (s = gmm__read_mat(call, GMM__Y, "dst", d->dst, 1, gmm__matrix(d->rows, d->cols), GMM__BYTES)) != GMM_OK)
        return s;
    src = call->mat[GMM__X_].dtype;
    dst = call->mat[GMM__Y].dtype;
    if (src != dst && !(GMM__FLOATS >> src & GMM__FLOATS >> dst & 1))
        return gmm__refuse(call, GMM_E_DTYPE, "dst", "dtype %s cannot be made of %s: only f32, f16 and bf16 convert",
                           gmm_dtype_name(dst), gmm_dtype_name(src));
    return GMM_OK;
}

GMMDEF gmm_status gmm_convert_query(gmm_context *ctx, const gmm_conversion *conversion, gmm_info *info) {
    gmm__call call;
    const gmm_status s = gmm__convert_prepare(&call, ctx, "gmm_convert_query", conversion, 1);
    return s != GMM_OK ? s : gmm__serve(&call, info, NULL, 0, NULL);
}
GMMDEF gmm_status gmm_convert(gmm_context *ctx, const gmm_conversion *conversion, void *workspace,
                              size_t workspace_bytes, gmm_stream stream) {
    gmm__call call;
    const gmm_status s = gmm__convert_prepare(&call, ctx, "gmm_convert", conversion, 0);
    return s != GMM_OK ? s : gmm__serve(&call, NULL, workspace, workspace_bytes, stream);
}

