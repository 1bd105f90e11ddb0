/* ........................................................................................... 14.10 Quantization ... */

/* Checks and entry points of quantization: gmm_quantize, gmm_requantize, gmm_dequantize, gmm_transpose,
   gmm_update_scales and gmm_shard_cast. GMM__ROWWISE_COPY is also the role of a destination. */

/* Reads the units of a quantizing call, which are the groups of a split or matrices of fixed extents. Each unit has
   scales and amaxes of its own. */
static gmm_status gmm__read_units(gmm__call *call, const gmm_groups *groups, int32_t count, int64_t rows,
                                  int64_t cols) {
    int64_t elements;
    gmm_groups g;
    gmm__peek_groups(groups, &g);
    if (groups)
        (void)snprintf(call->shapes, sizeof call->shapes, "G=%d T=%lld cols=%lld", g.count, (long long)g.capacity,
                       (long long)cols);
    else
        (void)snprintf(call->shapes, sizeof call->shapes, "%d of %lld x %lld", count, (long long)rows,
                       (long long)cols);
    if (cols < 1) return gmm__refuse(call, GMM_E_ARG, "cols", "%lld must be >= 1", (long long)cols);
    call->in = call->out = cols;
    if (groups && (count || rows))
        return gmm__refuse(call, GMM_E_ARG, "count", "%d and rows %lld must be 0 with groups", count,
                           (long long)rows);
    if (groups) return gmm__read_groups(call, groups);
    if (count < 1) return gmm__refuse(call, GMM_E_ARG, "count", "%d must be >= 1 without groups", count);
    if (rows < 1) return gmm__refuse(call, GMM_E_ARG, "rows", "%lld must be >= 1 without groups", (long long)rows);
    if (rows > INT64_MAX - GMM_GROUP_ROWS || !gmm__mul(gmm_group_rows(rows), count, &elements))
        return gmm__refuse(call, GMM_E_OVERFLOW, "rows", "%d matrices of %lld rows do not fit 64 bits", count,
                           (long long)rows);
    call->rows = rows;
    call->units = count;
    return GMM_OK;
}
static int gmm__grouped(const gmm__call *call) { return call->units == 0; }
static int64_t gmm__units(const gmm__call *call) { return gmm__grouped(call) ? call->groups.count : call->units; }
/* Extents of a quantizing call's operands: one matrix with the rows of all groups, or the matrices of fixed extents. */
static gmm__extents gmm__unit_extents(const gmm__call *call) {
    return gmm__matrices(call->units, call->rows, call->in);
}
/* Upper bound on the number of strips; a strip is GMM_TILE rows of a unit. */
static GMM__UNUSED int64_t gmm__strips(const gmm__call *call) {
    return gmm__grouped(call) ? gmm__group_strips(&call->groups) : call->units * gmm__ceil_div(call->rows, GMM_TILE);
}

/* Checks that a quantized operand has the call's format. */
static gmm_status gmm__check_copy(const gmm__call *call, int role, const char *argument, gmm_direction direction) {
    const gmm_mat expected = gmm_mat_quantized(&call->format, direction, NULL, NULL, NULL);
    const gmm_mat *mat = &call->mat[role];
    if (mat->dtype != expected.dtype || mat->scaling != expected.scaling || mat->scale_order != expected.scale_order)
        return gmm__refuse(call, GMM_E_DTYPE, argument, "%s %s order %d must be the format's %s %s order %d",
                           gmm_dtype_name(mat->dtype), gmm_scaling_name(mat->scaling), (int)mat->scale_order,
                           gmm_dtype_name(expected.dtype), gmm_scaling_name(expected.scaling),
                           (int)expected.scale_order);
    if ((mat->flags & ~(uint32_t)GMM_MAT_TABLE_ON_HOST) != expected.flags || mat->hadamard != expected.hadamard)
        return gmm__refuse(call, GMM_E_CONFIG, argument, "flags 0x%x and hadamard 0x%x must be the format's 0x%x and "
                           "0x%x", (unsigned)mat->flags, (unsigned)mat->hadamard, expected.flags,
                           (unsigned)expected.hadamard);
    return GMM_OK;
}
/* Reads a quantized destination, and checks that it has the call's format. */
static gmm_status gmm__read_copy(gmm__call *call, int role, const char *argument, const gmm_mat *mat,
                                 gmm_direction direction) {
    gmm_status s;
    if (!mat) {
        memset(&call->mat[role], 0, sizeof call->mat[role]);
        return GMM_OK;
    }
    s = gmm__read_quant(call, role, argument, mat, gmm__unit_extents(call), direction);
    return s != GMM_OK ? s : gmm__check_copy(call, role, argument, direction);
}

/* Whether each unit has one amax, from which its scale is computed, so that amax and cast can be two phases. */
static int gmm__amax_by_unit(const gmm_format *f) {
    return (f->scaling == GMM_SCALING_TENSOR && !f->delayed) || (f->scaling == GMM_SCALING_NV16 && !f->row_amax);
}

/* Checks a quantize or requantize call. */
static gmm_status gmm__quantize_prepare(gmm__call *call, gmm_context *ctx, gmm_op op, const char *function,
                                        const gmm_quantization *quantization, int query) {
    gmm_quantization *d = &call->d.quant;
    gmm_format *f = &call->format;
    gmm_status s = gmm__open(call, ctx, op, function, query);
    gmm_error error = GMM_ZERO;
    gmm__extents src;
    if (s != GMM_OK || (s = gmm__read_descriptor(call, "quantization", d, sizeof *d, quantization)) != GMM_OK) return s;
    if (op != GMM_OP_QUANTIZE && op != GMM_OP_REQUANTIZE)
        return gmm__refuse(call, GMM_E_ARG, "op", "%d (%s) must be quantize or requantize", (int)op,
                           gmm_op_name(op));
    if ((s = gmm__read_options(call, d->options)) != GMM_OK ||
        (s = gmm__read_units(call, d->groups, d->count, d->rows, d->cols)) != GMM_OK ||
        (s = gmm__read(call, "format", f, sizeof *f, d->format)) != GMM_OK)
        return s;
    if ((s = gmm_format_validate(f, &error)) != GMM_OK) return gmm__refuse_member(call, s, "format", error.text);
    if (f->dtype == GMM_NONE) return gmm__refuse(call, GMM_E_CONFIG, "format.dtype", "none asks for no copy");
    if (d->phase < GMM_QUANT_ALL || d->phase > GMM_QUANT_CAST || (d->phase != GMM_QUANT_ALL && !gmm__amax_by_unit(f)))
        return gmm__refuse(call, GMM_E_CONFIG, "phase", "%d must be 0, or 1 or 2 with scaling tensor (not delayed) or "
                           "nv16 by group", (int)d->phase);
    if (d->first_group < 0 || (d->first_group && !f->stochastic))
        return gmm__refuse(call, GMM_E_ARG, "first_group", "%d must be 0, or above with stochastic rounding",
                           d->first_group);
    if (f->stochastic && (int64_t)d->first_group + gmm__units(call) > (int64_t)1 << 24)
        return gmm__refuse(call, GMM_E_OVERFLOW, "first_group", "%d and %lld groups from there exceed the 2^24 that "
                           "gmm_draw_block tells apart", d->first_group, (long long)gmm__units(call));
    if (!d->rowwise && !d->columnwise)
        return gmm__refuse_that(call, GMM_E_NULL, "rowwise", "and %s.columnwise are both NULL: nothing is wanted",
                                call->path);
    if (f->row_amax && d->columnwise)
        return gmm__refuse_that(call, GMM_E_CONFIG, "columnwise", "must be NULL with row_amax");
    if (d->reserved) return gmm__refuse(call, GMM_E_ARG, "reserved", "%d must be 0", d->reserved);
    if (d->src_index && (!gmm__grouped(call) || op == GMM_OP_REQUANTIZE))
        return gmm__refuse_that(call, GMM_E_CONFIG, "src_index", "goes with groups and gmm_quantize");
    if ((s = gmm__check_indices(call, d->src_index, NULL, d->index_rows, &d->index_div)) != GMM_OK) return s;
    src = d->src_index ? gmm__matrix(d->index_rows, call->in) : gmm__unit_extents(call);
    if (op == GMM_OP_REQUANTIZE) s = gmm__read_quant(call, GMM__SOURCE, "src", d->src, src, GMM_ROWWISE);
    else s = gmm__read_mat(call, GMM__SOURCE, "src", d->src, 1, src, GMM__FLOATS);
    if (s != GMM_OK || (s = gmm__read_copy(call, GMM__ROWWISE_COPY, "rowwise", d->rowwise, GMM_ROWWISE)) != GMM_OK ||
        (s = gmm__read_copy(call, GMM__COLUMNWISE_COPY, "columnwise", d->columnwise, GMM_COLUMNWISE)) != GMM_OK)
        return s;
    if (f->stochastic && ((d->rowwise && call->rows * gmm__ceil_div(call->in, 16) > (int64_t)1 << 40) ||
                          (d->columnwise && call->in * gmm__ceil_div(call->rows, 16) > (int64_t)1 << 40)))
        return gmm__refuse(call, GMM_E_OVERFLOW, "rows", "%lld x %lld are more than the 2^40 blocks of 16 that "
                           "gmm_draw_block tells apart", (long long)call->rows, (long long)call->in);
    if (f->hadamard && d->columnwise && call->mat[GMM__SOURCE].dtype != GMM_BF16)
        return gmm__refuse(call, GMM_E_DTYPE, "src", "dtype %s must be bf16, which the Hadamard transform wants",
                           gmm_dtype_name(call->mat[GMM__SOURCE].dtype));
    if (f->hadamard && d->columnwise && !gmm__grouped(call) && call->rows % 16)
        return gmm__refuse(call, GMM_E_ARG, "rows", "%lld of %lld x %lld matrices must be a multiple of 16: the "
                           "Hadamard transform of the columnwise copy mixes 16 rows, and a copy of fixed extents has "
                           "no padding", (long long)call->rows, (long long)call->rows, (long long)call->in);
    if (d->db) {
        if (!gmm__grouped(call) || op == GMM_OP_REQUANTIZE || d->phase == GMM_QUANT_AMAX || d->skip)
            return gmm__refuse_that(call, GMM_E_CONFIG, "db", "goes with groups and gmm_quantize, and with neither "
                                    "phase amax nor skip");
        if ((s = gmm__read_grad(call, GMM__DB, "db", d->db, 1, 1, call->in)) != GMM_OK) return s;
    }
    if (!query && d->phase != GMM_QUANT_ALL && f->scaling == GMM_SCALING_TENSOR &&
        ((d->rowwise && !call->mat[GMM__ROWWISE_COPY].amax) ||
         (d->columnwise && !call->mat[GMM__COLUMNWISE_COPY].amax)))
        return gmm__refuse_that(call, GMM_E_NULL,
                                d->rowwise && !call->mat[GMM__ROWWISE_COPY].amax ? "rowwise" : "columnwise",
                                "lacks amax, which phase %d is about", (int)d->phase);
    if (!query && f->stochastic && (!d->random || (uintptr_t)d->random % 8))
        return gmm__refuse(call, d->random ? GMM_E_ALIGN : GMM_E_NULL, "random", "%p must be {seed, offset}, 8-byte "
                           "aligned, for stochastic rounding", (const void *)d->random);
    if (f->stochastic) gmm__add_span(call, "random", "", 0, d->random, 2 * (int64_t)sizeof *d->random);
    if ((s = gmm__check_array(call, "skip", d->skip, 0, 1)) != GMM_OK ||
        (s = gmm__check_array(call, "src_index", d->src_index, 0, call->rows)) != GMM_OK)
        return s;
    return gmm__check_array(call, "scale", d->scale, 0, gmm__units(call));
}

GMMDEF gmm_status gmm_quantize_query(gmm_context *ctx, gmm_op op, const gmm_quantization *quantization,
                                     gmm_info *info) {
    gmm__call call;
    const gmm_status s = gmm__quantize_prepare(&call, ctx, op, "gmm_quantize_query", quantization, 1);
    return s != GMM_OK ? s : gmm__serve(&call, info, NULL, 0, NULL);
}
GMMDEF gmm_status gmm_quantize(gmm_context *ctx, const gmm_quantization *quantization, void *workspace,
                               size_t workspace_bytes, gmm_stream stream) {
    gmm__call call;
    const gmm_status s = gmm__quantize_prepare(&call, ctx, GMM_OP_QUANTIZE, "gmm_quantize", quantization, 0);
    return s != GMM_OK ? s : gmm__serve(&call, NULL, workspace, workspace_bytes, stream);
}
GMMDEF gmm_status gmm_requantize(gmm_context *ctx, const gmm_quantization *quantization, void *workspace,
                                 size_t workspace_bytes, gmm_stream stream) {
    gmm__call call;
    const gmm_status s = gmm__quantize_prepare(&call, ctx, GMM_OP_REQUANTIZE, "gmm_requantize", quantization, 0);
    return s != GMM_OK ? s : gmm__serve(&call, NULL, workspace, workspace_bytes, stream);
}

static gmm_status gmm__dequantize_prepare(gmm__call *call, gmm_context *ctx, const char *function,
                                          const gmm_dequantization *dequantization, int query) {
    gmm_dequantization *d = &call->d.dequant;
    gmm_status s = gmm__open(call, ctx, GMM_OP_DEQUANTIZE, function, query);
    if (s != GMM_OK || (s = gmm__read_descriptor(call, "dequantization", d, sizeof *d, dequantization)) != GMM_OK ||
        (s = gmm__read_options(call, d->options)) != GMM_OK ||
        (s = gmm__read_units(call, d->groups, d->count, d->rows, d->cols)) != GMM_OK)
        return s;
    if (d->direction != GMM_ROWWISE && d->direction != GMM_COLUMNWISE)
        return gmm__refuse(call, GMM_E_ARG, "direction", "%d is neither rowwise (0) nor columnwise (1)",
                           (int)d->direction);
    if (d->reserved) return gmm__refuse(call, GMM_E_ARG, "reserved", "%d must be 0", d->reserved);
    s = gmm__read_quant(call, GMM__SOURCE, "src", d->src, gmm__unit_extents(call), d->direction);
    if (s != GMM_OK) return s;
    return gmm__read_mat(call, GMM__ROWWISE_COPY, "dst", d->dst, 1, gmm__unit_extents(call), GMM__FLOATS);
}

GMMDEF gmm_status gmm_dequantize_query(gmm_context *ctx, const gmm_dequantization *dequantization, gmm_info *info) {
    gmm__call call;
    const gmm_status s = gmm__dequantize_prepare(&call, ctx, "gmm_dequantize_query", dequantization, 1);
    return s != GMM_OK ? s : gmm__serve(&call, info, NULL, 0, NULL);
}
GMMDEF gmm_status gmm_dequantize(gmm_context *ctx, const gmm_dequantization *dequantization, void *workspace,
                                 size_t workspace_bytes, gmm_stream stream) {
    gmm__call call;
    const gmm_status s = gmm__dequantize_prepare(&call, ctx, "gmm_dequantize", dequantization, 0);
    return s != GMM_OK ? s : gmm__serve(&call, NULL, workspace, workspace_bytes, stream);
}

/* Reads the format of a transposition's source, which shows whether blocks of NV16 are square. */
static gmm_status gmm__transpose_format(gmm__call *call, const gmm_format *format) {
    const int nv = call->mat[GMM__SOURCE].scaling == GMM_SCALING_NV16;
    gmm_format *f = &call->format;
    gmm_error error = GMM_ZERO;
    gmm_status s;
    if (!format)
        return nv ? gmm__refuse_that(call, GMM_E_NULL, "format", "is NULL: with nv16 it must be that of src, with "
                                     "square blocks")
                  : GMM_OK;
    if ((s = gmm__read(call, "format", f, sizeof *f, format)) != GMM_OK) return s;
    if ((s = gmm_format_validate(f, &error)) != GMM_OK) return gmm__refuse_member(call, s, "format", error.text);
    if (nv && f->scaling == GMM_SCALING_NV16 && !f->square)
        return gmm__refuse(call, GMM_E_CONFIG, "format", "square 0 must be 1: a transposed copy of blocks of 1 x 16 "
                           "has other blocks, so that gmm_quantize or gmm_requantize has to make it");
    return gmm__check_copy(call, GMM__SOURCE, "src", GMM_ROWWISE);
}
static gmm_status gmm__transpose_prepare(gmm__call *call, gmm_context *ctx, const char *function,
                                         const gmm_transposition *transposition, int query) {
    gmm_transposition *d = &call->d.transposition;
    const gmm_mat *src = &call->mat[GMM__SOURCE], *dst = &call->mat[GMM__ROWWISE_COPY];
    gmm_status s = gmm__open(call, ctx, GMM_OP_TRANSPOSE, function, query);
    if (s != GMM_OK || (s = gmm__read_descriptor(call, "transposition", d, sizeof *d, transposition)) != GMM_OK ||
        (s = gmm__read_options(call, d->options)) != GMM_OK ||
        (s = gmm__read_units(call, NULL, d->count, d->rows, d->cols)) != GMM_OK ||
        (s = gmm__read_quant(call, GMM__SOURCE, "src", d->src, gmm__unit_extents(call), GMM_ROWWISE)) != GMM_OK)
        return s;
    if (src->scaling != GMM_SCALING_TENSOR && src->scaling != GMM_SCALING_128X128 && src->scaling != GMM_SCALING_NV16)
        return gmm__refuse(call, GMM_E_DTYPE, "src", "scaling %s: must be tensor, 128x128 or nv16 with square blocks, "
                           "whose blocks are the same both ways", gmm_scaling_name(src->scaling));
    if ((s = gmm__transpose_format(call, d->format)) != GMM_OK) return s;
    s = gmm__read_quant(call, GMM__ROWWISE_COPY, "dst", d->dst, gmm__unit_extents(call), GMM_COLUMNWISE);
    if (s == GMM_OK && (dst->dtype != src->dtype || dst->scaling != src->scaling))
        return gmm__refuse(call, GMM_E_DTYPE, "dst", "%s scaled %s must be as transposition.src, %s scaled %s",
                           gmm_dtype_name(dst->dtype), gmm_scaling_name(dst->scaling), gmm_dtype_name(src->dtype),
                           gmm_scaling_name(src->scaling));
    if (s == GMM_OK && (((dst->flags ^ src->flags) & (uint32_t)GMM_MAT_E4M3_256) || dst->hadamard))
        return gmm__refuse(call, GMM_E_CONFIG, "dst", "flags 0x%x and hadamard 0x%x must be as transposition.src, 0x%x "
                           "and 0: values are neither scaled anew nor transformed", (unsigned)dst->flags,
                           (unsigned)dst->hadamard, (unsigned)src->flags);
    return s;
}

GMMDEF gmm_status gmm_transpose_query(gmm_context *ctx, const gmm_transposition *transposition, gmm_info *info) {
    gmm__call call;
    const gmm_status s = gmm__transpose_prepare(&call, ctx, "gmm_transpose_query", transposition, 1);
    return s != GMM_OK ? s : gmm__serve(&call, info, NULL, 0, NULL);
}
GMMDEF gmm_status gmm_transpose(gmm_context *ctx, const gmm_transposition *transposition, void *workspace,
                                size_t workspace_bytes, gmm_stream stream) {
    gmm__call call;
    const gmm_status s = gmm__transpose_prepare(&call, ctx, "gmm_transpose", transposition, 0);
    return s != GMM_OK ? s : gmm__serve(&call, NULL, workspace, workspace_bytes, stream);
}

GMMDEF gmm_status gmm_update_scales(gmm_context *ctx, const gmm_scale_update *update, gmm_stream stream) {
    gmm__call call;
    gmm__plan plan;
    gmm_scale_update *d = &call.d.update;
    int64_t floats, bytes;
    gmm_status s = gmm__open(&call, ctx, GMM_OP_SCALE_UPDATE, "gmm_update_scales", 0);
    if (s != GMM_OK || (s = gmm__read_descriptor(&call, "update", d, sizeof *d, update)) != GMM_OK ||
        (s = gmm__read_options(&call, d->options)) != GMM_OK)
        return s;
    if (d->slots < 0) return gmm__refuse(&call, GMM_E_ARG, "slots", "%d must be >= 0", d->slots);
    if (d->stride == 0) d->stride = d->slots;
    if (d->stride < d->slots)
        return gmm__refuse(&call, GMM_E_STRIDE, "stride", "%lld must be >= the %d slots", (long long)d->stride,
                           d->slots);
    if (d->history_length < 1)
        return gmm__refuse(&call, GMM_E_ARG, "history_length", "%d must be >= 1", d->history_length);
    if (!gmm__mul(d->history_length, d->stride, &floats) || !gmm__mul(floats, (int64_t)sizeof(float), &bytes))
        return gmm__refuse(&call, GMM_E_OVERFLOW, "stride", "%lld times the history_length %d does not fit 64 bits",
                           (long long)d->stride, d->history_length);
    if (d->margin < 0 || d->margin > 63)
        return gmm__refuse(&call, GMM_E_ARG, "margin", "%d must be 0 to 63", d->margin);
    if (d->most_recent & ~1)
        return gmm__refuse(&call, GMM_E_ARG, "most_recent", "%d must be 0 or 1", d->most_recent);
    if (d->dtype != GMM_E4M3 && d->dtype != GMM_E5M2)
        return gmm__refuse(&call, GMM_E_DTYPE, "dtype", "%s must be e4m3 or e5m2", gmm_dtype_name(d->dtype));
    if ((s = gmm__check_output(&call, "history", d->history, d->slots > 0,
                               (d->history_length - 1) * d->stride + d->slots)) != GMM_OK ||
        (s = gmm__check_output(&call, "scale", d->scale, 1, d->slots)) != GMM_OK ||
        (s = gmm__check_stream(&call, stream)) != GMM_OK || (s = gmm__check_overlap(&call)) != GMM_OK ||
        (s = gmm__select(&call, &plan)) != GMM_OK)
        return s;
    if (d->reduce && (s = d->reduce(d->user, d->history, d->slots, stream)) != GMM_OK)
        return gmm__refuse_that(&call, s, "reduce", "has given %s", gmm_status_name(s));
    return gmm__serve(&call, NULL, NULL, 0, stream);
}

/* Whether gmm_shard_cast can write shards in a format. */
static int gmm__shard_supports(const gmm_format *f) {
    return f->scaling != GMM_SCALING_NONE && f->scaling != GMM_SCALING_ROW && !f->hadamard && !f->stochastic &&
           !f->four_over_six && !f->row_amax;
}
GMMDEF int64_t gmm_shard_amaxes(const gmm_format *format, int32_t count, int64_t rows, int64_t cols, int columnwise) {
    gmm_format f;
    if (!format || !gmm__copy_sized(&f, sizeof f, format) || gmm_format_validate(&f, NULL) != GMM_OK ||
        !gmm__shard_supports(&f) || count < 1 || rows < 1 || cols < 1)
        return 0;
    return (f.scaling == GMM_SCALING_NV16 ? count : 0) + gmm__shard_blocks(&f, count, rows, cols, 0) +
           (columnwise && gmm__shard_separate(&f) ? gmm__shard_blocks(&f, count, rows, cols, 1) : 0);
}

GMMDEF gmm_status gmm_shard_cast(gmm_context *ctx, const gmm_sharding *shard, gmm_stream stream) {
    static const char *const names[2] = { "rowwise", "columnwise" };
    static const int roles[2] = { GMM__ROWWISE_COPY, GMM__COLUMNWISE_COPY };
    gmm__call call;
    gmm_sharding *d = &call.d.shard;
    gmm_format *f = &call.format;
    gmm_error error = GMM_ZERO;
    gmm_status s = gmm__open(&call, ctx, GMM_OP_SHARD_CAST, "gmm_shard_cast", 0);
    int64_t elements;
    int k;
    if (s != GMM_OK || (s = gmm__read_descriptor(&call, "shard", d, sizeof *d, shard)) != GMM_OK ||
        (s = gmm__read_options(&call, d->options)) != GMM_OK ||
        (s = gmm__read_units(&call, NULL, d->count, d->rows, d->cols)) != GMM_OK ||
        (s = gmm__read(&call, "format", f, sizeof *f, d->format)) != GMM_OK)
        return s;
    if ((s = gmm_format_validate(f, &error)) != GMM_OK) return gmm__refuse_member(&call, s, "format", error.text);
    if (!gmm__shard_supports(f))
        return gmm__refuse(&call, GMM_E_CONFIG, "format", "%s: must be tensor, 1x128, 128x128, mx32 or nv16, without "
                           "transform, stochastic rounding, choice of scales and amaxes per row",
                           gmm_scaling_name(f->scaling));
    if (d->model != GMM_F32 && d->model != GMM_BF16 && d->model != GMM_F16)
        return gmm__refuse(&call, GMM_E_DTYPE, "model", "%s must be f32, f16 or bf16", gmm_dtype_name(d->model));
    if (d->phase != GMM_QUANT_AMAX && d->phase != GMM_QUANT_CAST)
        return gmm__refuse(&call, GMM_E_CONFIG, "phase", "%d must be 1 or 2", (int)d->phase);
    if (d->cols % 2) return gmm__refuse(&call, GMM_E_ARG, "cols", "%lld must be even", (long long)d->cols);
    if (!gmm__mul(d->rows, d->cols, &elements) || !gmm__mul(elements, d->count, &elements) || elements > INT64_MAX / 8)
        return gmm__refuse(&call, GMM_E_OVERFLOW, "rows", "%d matrices of %lld x %lld do not fit 64 bits",
                           d->count, (long long)d->rows, (long long)d->cols);
    if (d->length < 0 || d->start < (d->length ? 0 : -1) || d->start > elements - d->length)
        return gmm__refuse(&call, GMM_E_ARG, "start", "%lld and length %lld must lie in the %lld elements; -1 and 0 "
                           "without a shard", (long long)d->start, (long long)d->length, (long long)elements);
    if (!d->rowwise && !d->columnwise)
        return gmm__refuse_that(&call, GMM_E_NULL, "rowwise", "and %s.columnwise are both NULL: nothing is wanted",
                                call.path);
    for (k = 0; k < 2; k++) {
        const gmm_mat *m = k ? d->columnwise : d->rowwise;
        s = gmm__read_copy(&call, roles[k], names[k], m, k ? GMM_COLUMNWISE : GMM_ROWWISE);
        if (s != GMM_OK) return s;
        if (m && ctx->config.space != GMM_SPACE_CPU &&
            (call.mat[roles[k]].flags & (uint32_t)GMM_MAT_TABLE_ON_HOST))
            return gmm__refuse(&call, GMM_E_CONFIG, names[k], "table must be device memory here");
    }
    elements = gmm_shard_amaxes(f, d->count, d->rows, d->cols, d->columnwise != NULL);
    if ((s = gmm__check_array(&call, "master", d->master, d->length > 0, d->length)) != GMM_OK ||
        (s = d->phase == GMM_QUANT_AMAX ? gmm__check_output(&call, "amax", d->amax, 1, elements)
                                        : gmm__check_array(&call, "amax", d->amax, !f->delayed, elements)) != GMM_OK ||
        (s = gmm__check_array(&call, "scale", d->scale, 0, d->count)) != GMM_OK)
        return s;
    return gmm__serve(&call, NULL, NULL, 0, stream);
}
/* The arguments of the shard cast of a checked call, for the CPU engine and the kernels. */
static GMM__UNUSED gmm__shard_args gmm__shard_of(const gmm__call *call) {
    const gmm_sharding *d = &call->d.shard;
    gmm__shard_args a;
    memset(&a, 0, sizeof a);
    a.format = call->format;
    a.model = d->model;
    a.count = d->count;
    a.rows = d->rows;
    a.cols = d->cols;
    a.start = d->length ? d->start : 0;
    a.length = d->length;
    a.master = d->master;
    a.scale = d->scale;
    a.amax = d->amax;
    a.copy[0] = call->mat[GMM__ROWWISE_COPY];
    a.copy[1] = call->mat[GMM__COLUMNWISE_COPY];
    return a;
}
/* Number of amaxes of a shard cast. */
static GMM__UNUSED int64_t gmm__shard_floats(const gmm__shard_args *a) {
    return gmm_shard_amaxes(&a->format, (int32_t)a->count, a->rows, a->cols, a->copy[1].dtype != GMM_NONE);
}

