/* ..................................................................................... 14.5 Pad, GLU interleave ... */

/* The pad rule of recipes and dispatchers; checks and entry points of gmm_pad and gmm_unpad. */

GMMDEF int32_t gmm_pad_align(gmm_recipe_kind recipe, int32_t grouped_tensor) {
    if (grouped_tensor) return 256;
    switch (recipe) {
    case GMM_RECIPE_FP8_DELAYED:
    case GMM_RECIPE_FP8_CURRENT:
    case GMM_RECIPE_FP8_BLOCK: return 16;
    case GMM_RECIPE_MXFP8: return 32;
    case GMM_RECIPE_NVFP4: return 128;
    default: return 1;
    }
}

GMMDEF gmm_status gmm_pad_decide(const gmm_pad_in *in, int32_t *align, gmm_error *error) {
    int padded;
    if (!in) return gmm__fail(error, GMM_E_NULL, "gmm_pad_decide: in is NULL");
    if (!align) return gmm__fail(error, GMM_E_NULL, "gmm_pad_decide: align is NULL");
    if (in->recipe < GMM_RECIPE_NONE || in->recipe > GMM_RECIPE_NVFP4)
        return gmm__fail(error, GMM_E_CONFIG, "gmm_pad_decide: in.recipe: %d is no recipe", (int)in->recipe);
    if (in->dispatcher < GMM_DISPATCH_ALLTOALL || in->dispatcher > GMM_DISPATCH_NCCLEP)
        return gmm__fail(error, GMM_E_CONFIG, "gmm_pad_decide: in.dispatcher: %d is no dispatcher",
                         (int)in->dispatcher);
    /* router_padding alone does not make groups padded: with too few tokens the router cannot reach the multiple */
    padded = (in->router_padding && in->router_padding_done) || in->dispatcher == GMM_DISPATCH_HYBRIDEP ||
             in->dispatcher == GMM_DISPATCH_NCCLEP ||
             (in->dispatcher == GMM_DISPATCH_DEEPEP && in->grouped_tensor && in->permute_fusion);
    *align = padded ? 1 : gmm_pad_align(in->recipe, in->grouped_tensor);
    return GMM_OK;
}

/* Refuses a split whose padded sizes exceed padded_capacity, where gmm__split_is_status says so. */
static gmm_status gmm__check_padded(gmm__call *call) {
    const gmm_padding *d = &call->d.pad;
    int64_t begin = 0, padded = 0, end, g;
    uint32_t fault = 0;
    if (!gmm__split_is_status(call)) return GMM_OK;
    for (g = 0; g < call->groups.count; g++, begin = end) {
        int64_t size;
        end = gmm_split_end(begin, gmm__split_value(&call->groups, g), call->groups.form, call->rows, 0, &fault);
        size = gmm__round_up(end - begin, d->align);
        if (size > d->padded_capacity - padded)
            return gmm__refuse(call, GMM_E_SPLIT, "padded_capacity", "%lld cannot hold the groups up to %lld, which "
                               "take %lld rows", (long long)d->padded_capacity, (long long)g,
                               (long long)(padded + size));
        padded += size;
    }
    return GMM_OK;
}

/* Checks a pad or unpad call. call->in is the columns, call->rows the unpadded capacity. */
static gmm_status gmm__pad_prepare(gmm__call *call, gmm_context *ctx, gmm_op op, const char *function,
                                   const gmm_padding *padding, int query) {
    gmm_padding *d = &call->d.pad;
    gmm_status s = gmm__open(call, ctx, op, function, query);
    const int pad = op == GMM_OP_PAD;
    int64_t src_rows, dst_rows;
    if (s != GMM_OK || (s = gmm__read_descriptor(call, "padding", d, sizeof *d, padding)) != GMM_OK) return s;
    {
        gmm_groups g;
        gmm__peek_groups(d->groups, &g);
        (void)snprintf(call->shapes, sizeof call->shapes, "G=%d T=%lld R=%lld cols=%lld align=%d %s", g.count,
                       (long long)g.capacity, (long long)d->padded_capacity, (long long)d->cols, d->align,
                       gmm__peek_dtype(d->src));
    }
    if (op != GMM_OP_PAD && op != GMM_OP_UNPAD)
        return gmm__refuse(call, GMM_E_ARG, "op", "%d is neither pad (%d) nor unpad (%d)", (int)op, (int)GMM_OP_PAD,
                           (int)GMM_OP_UNPAD);
    if ((s = gmm__read_options(call, d->options)) != GMM_OK || (s = gmm__read_groups(call, d->groups)) != GMM_OK)
        return s;
    if (d->align < 1) return gmm__refuse(call, GMM_E_ARG, "align", "%d must be >= 1", d->align);
    if (d->cols < 1) return gmm__refuse(call, GMM_E_ARG, "cols", "%lld must be >= 1", (long long)d->cols);
    if (d->padded_capacity < 0)
        return gmm__refuse(call, GMM_E_ARG, "padded_capacity", "%lld must be >= 0", (long long)d->padded_capacity);
    if (!pad) d->sizes = NULL; /* which unpad does not write */
    if (d->sizes && d->padded_capacity > INT32_MAX)
        return gmm__refuse(call, GMM_E_ARG, "padded_capacity", "%lld must fit the int32 of sizes",
                           (long long)d->padded_capacity);
    call->in = call->out = d->cols;
    src_rows = pad ? call->rows : d->padded_capacity;
    dst_rows = pad ? d->padded_capacity : call->rows;
    if ((s = gmm__read_mat(call, GMM__X_, "src", d->src, 1, gmm__matrix(src_rows, d->cols), GMM__BYTES)) != GMM_OK ||
        (s = gmm__read_mat(call, GMM__Y, "dst", d->dst, 1, gmm__matrix(dst_rows, d->cols), GMM__BYTES)) != GMM_OK)
        return s;
    if (call->mat[GMM__Y].dtype != call->mat[GMM__X_].dtype)
        return gmm__refuse(call, GMM_E_DTYPE, "dst", "dtype %s must be that of %s.src, %s",
                           gmm_dtype_name(call->mat[GMM__Y].dtype), call->path,
                           gmm_dtype_name(call->mat[GMM__X_].dtype));
    if ((s = gmm__check_array(call, "src_prob", d->src_prob, d->dst_prob != NULL, src_rows)) != GMM_OK ||
        (s = gmm__check_output(call, "dst_prob", d->dst_prob, d->src_prob != NULL, dst_rows)) != GMM_OK)
        return s;
    if ((s = gmm__check_output(call, "sizes", d->sizes, 0, call->groups.count)) != GMM_OK) return s;
    return query ? GMM_OK : gmm__check_padded(call);
}

GMMDEF gmm_status gmm_pad_query(gmm_context *ctx, gmm_op op, const gmm_padding *padding, gmm_info *info) {
    gmm__call call;
    const gmm_status s = gmm__pad_prepare(&call, ctx, op, "gmm_pad_query", padding, 1);
    return s != GMM_OK ? s : gmm__serve(&call, info, NULL, 0, NULL);
}
GMMDEF gmm_status gmm_pad(gmm_context *ctx, const gmm_padding *padding, void *workspace, size_t workspace_bytes,
                          gmm_stream stream) {
    gmm__call call;
    const gmm_status s = gmm__pad_prepare(&call, ctx, GMM_OP_PAD, "gmm_pad", padding, 0);
    return s != GMM_OK ? s : gmm__serve(&call, NULL, workspace, workspace_bytes, stream);
}
GMMDEF gmm_status gmm_unpad(gmm_context *ctx, const gmm_padding *padding, void *workspace, size_t workspace_bytes,
                            gmm_stream stream) {
    gmm__call call;
    const gmm_status s = gmm__pad_prepare(&call, ctx, GMM_OP_UNPAD, "gmm_unpad", padding, 0);
    return s != GMM_OK ? s : gmm__serve(&call, NULL, workspace, workspace_bytes, stream);
}

