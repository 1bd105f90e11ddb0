/* Reads descriptors into a gmm__call and checks them, formats the messages of refused calls, and lays out the workspace
   of a plan. A function named gmm__read_* copies a descriptor and fills in its defaults. One named gmm__check_* refuses
   what breaks a rule; it may record memory for gmm__check_overlap, and store in the call what it derives. */

/* Writes the message of a failed call: "gmm_linear_fwd: linear.w: <text> (<shapes>)". `argument` is a field of the
   call's descriptor, whose name the message puts before it, or another argument of the function; `colon` follows it. */
static GMM__UNUSED void gmm__write_refusal(const gmm__call *call, gmm_status status, const char *argument,
                                           const char *colon, const char *format, va_list list) {
    const int field = gmm__is_field(call, argument);
    char text[320];
    (void)vsnprintf(text, sizeof text, format, list);
    (void)gmm__fail(&call->ctx->error, status, "%s: %s%s%s%s %s%s%s%s", call->function, field ? call->path : "",
                    field ? "." : "", argument, colon, text, call->shapes[0] ? " (" : "", call->shapes,
                    call->shapes[0] ? ")" : "");
}
/* Fails a call for the value of an argument and the rule that it breaks: "linear.in_features: 0 must be >= 1". */
static GMM__UNUSED gmm_status gmm__refuse(const gmm__call *call, gmm_status status, const char *argument,
                                          const char *format, ...) {
    va_list list;
    va_start(list, format);
    gmm__write_refusal(call, status, argument, ":", format, list);
    va_end(list);
    return status;
}
/* Fails a call by a predicate of the argument, which no colon separates: "linear.w is NULL". */
static GMM__UNUSED gmm_status gmm__refuse_that(const gmm__call *call, gmm_status status, const char *argument,
                                               const char *format, ...) {
    va_list list;
    va_start(list, format);
    gmm__write_refusal(call, status, argument, "", format, list);
    va_end(list);
    return status;
}

/* Fails a call because of a member of `argument`. `rule` begins with the member's name: "limit: -1 must be". A colon
   follows it, or a space where the member is a struct_size. */
static GMM__UNUSED gmm_status gmm__refuse_member(const gmm__call *call, gmm_status status, const char *argument,
                                                 const char *rule) {
    char path[96];
    const size_t name = strcspn(rule, ": ");
    (void)snprintf(path, sizeof path, "%s.%.*s", argument, (int)name, rule);
    return gmm__refuse(call, status, path, "%s", rule + name + strspn(rule + name, ": "));
}

/* Copies a descriptor of the caller, whose first member is struct_size; members that an older caller lacks become 0. */
static GMM__UNUSED gmm_status gmm__read(gmm__call *call, const char *argument, void *dst, size_t size,
                                        const void *src) {
    char rule[96];
    gmm_status s;
    if (!src) return gmm__refuse_that(call, GMM_E_NULL, argument, "is NULL");
    if ((s = gmm__read_sized(dst, size, src, rule)) != GMM_OK) return gmm__refuse(call, s, argument, "%s", rule);
    memset(dst, 0, sizeof(uint32_t)); /* the struct_size of the copy is this version's */
    return GMM_OK;
}

/* Copies the call's descriptor, whose name becomes the path of fields in messages. */
static GMM__UNUSED gmm_status gmm__read_descriptor(gmm__call *call, const char *argument, void *dst, size_t size,
                                                   const void *src) {
    call->path = argument;
    return gmm__read(call, argument, dst, size, src);
}

/* Groups and dtype of operands for the messages of a call whose descriptors are not checked yet; zeros where they
   cannot be read. */
static void gmm__peek_groups(const gmm_groups *groups, gmm_groups *g) {
    memset(g, 0, sizeof *g);
    if (groups) (void)gmm__copy_sized(g, sizeof *g, groups);
}
static const char *gmm__peek_dtype(const gmm_mat *mat) {
    gmm_mat m = GMM_ZERO;
    if (mat) (void)gmm__copy_sized(&m, sizeof m, mat);
    return gmm_dtype_name(m.dtype);
}

/* Begins a call. Every member before `span` becomes 0; `span` is left as it is, since `spans` is its length. */
static GMM__UNUSED gmm_status gmm__open(gmm__call *call, gmm_context *ctx, gmm_op op, const char *function, int query) {
    memset(call, 0, offsetof(gmm__call, span));
    if (!ctx) return GMM_E_NULL;
    call->ctx = ctx;
    call->op = op;
    call->function = function;
    call->query = query;
    return GMM_OK;
}

static GMM__UNUSED gmm_status gmm__read_options(gmm__call *call, const gmm_options *options) {
    gmm_status s;
    if (options && (s = gmm__read(call, "options", &call->options, sizeof call->options, options)) != GMM_OK) return s;
    call->engine_by_context = call->options.engine == GMM_ENGINE_AUTO;
    if (call->engine_by_context) call->options.engine = call->ctx->config.engine;
    if (call->options.engine < GMM_ENGINE_AUTO || call->options.engine > GMM_ENGINE_CUBLASLT)
        return gmm__refuse(call, GMM_E_ARG, "options.engine", "%d is no engine", (int)call->options.engine);
    {
        const gmm_options *o = &call->options;
        const struct { const char *name; int64_t value, most; } ranges[] = {
            { "options.sm_limit", o->sm_limit, INT32_MAX }, { "options.tile", o->tile, INT32_MAX },
            { "options.workspace_limit", o->workspace_limit, INT64_MAX },
            { "options.fuse", o->fuse, GMM_FUSE_ALWAYS }, { "options.reserved", o->reserved, 0 },
            { "options.allow_nondeterminism", o->allow_nondeterminism, 1 },
            { "options.allow_tf32", o->allow_tf32, 1 }, { "options.fp8_fast_accum", o->fp8_fast_accum, 1 },
        };
        size_t i;
        for (i = 0; i < sizeof ranges / sizeof ranges[0]; i++)
            if (ranges[i].value < 0 || ranges[i].value > ranges[i].most)
                return gmm__refuse(call, GMM_E_ARG, ranges[i].name, "%lld must be %s%lld", (long long)ranges[i].value,
                                   ranges[i].most ? "from 0 to " : "", (long long)ranges[i].most);
    }
    return GMM_OK;
}

/* The size or the end offset of group g, as the split has it. */
static int64_t gmm__split_value(const gmm_groups *groups, int64_t g) {
    const int64_t i = groups->form == GMM_SPLIT_OFFSETS ? g + 1 : g;
    return groups->dtype == GMM_I64 ? ((const int64_t *)groups->splits)[i] : ((const int32_t *)groups->splits)[i];
}

/* The fault of a split on the host whose offsets do not begin with 0; 0 = none. */
static uint32_t gmm__split_first_fault(const gmm_groups *groups) {
    int64_t first;
    if (groups->form != GMM_SPLIT_OFFSETS) return 0;
    first = groups->dtype == GMM_I64 ? ((const int64_t *)groups->splits)[0] : ((const int32_t *)groups->splits)[0];
    return first == 0 ? 0 : (uint32_t)GMM_FAULT_MONOTONIC;
}

/* Whether a faulty split makes the call fail with a status: the host can read the split, and either it is stated to be
   on the host or no fault word reports the fault. */
static int gmm__split_is_status(const gmm__call *call) {
    return call->groups.on_host || (call->ctx->config.space == GMM_SPACE_CPU && !call->groups.fault);
}
/* Refuses faults in part of a split: g->count groups, of which the first is group `first` of the call and begins at row
   *begin; that of the next part replaces *begin. row_align 0: the promise is not checked. */
static GMM__UNUSED gmm_status gmm__check_sizes(const gmm__call *call, const char *argument, const gmm_groups *g,
                                               int32_t row_align, int64_t first, int64_t *begin) {
    uint32_t fault = first == 0 ? gmm__split_first_fault(g) : 0;
    int64_t i;
    if (fault)
        return gmm__refuse(call, GMM_E_SPLIT, argument, "the first offset is %lld, not 0",
                           (long long)gmm__split_value(g, -1));
    for (i = 0; i < g->count; i++) {
        const int64_t start = *begin;
        char rule[64];
        *begin = gmm_split_end(start, gmm__split_value(g, i), g->form, g->capacity, row_align, &fault);
        if (!fault) continue;
        if (fault & (uint32_t)GMM_FAULT_NEGATIVE) (void)snprintf(rule, sizeof rule, "must be >= 0");
        else if (fault & (uint32_t)GMM_FAULT_MONOTONIC)
            (void)snprintf(rule, sizeof rule, "must be >= the offset before it, %lld", (long long)start);
        else if (fault & (uint32_t)GMM_FAULT_CAPACITY)
            (void)snprintf(rule, sizeof rule, "the sum exceeds the capacity %lld", (long long)g->capacity);
        else (void)snprintf(rule, sizeof rule, "breaks the promise row_align %d", row_align);
        return gmm__refuse(call, GMM_E_SPLIT, argument, "%s %lld of group %lld: %s",
                           g->form == GMM_SPLIT_OFFSETS ? "end offset" : "size", (long long)gmm__split_value(g, i),
                           (long long)(first + i), rule);
    }
    return GMM_OK;
}
/* Refuses a faulty split where gmm__split_is_status says so. Results are correct even where sizes break the promise of
   row_align; that fault is therefore refused only in splits that are stated to be on the host (core/verify.h). */
static GMM__UNUSED gmm_status gmm__check_split(gmm__call *call, const char *argument) {
    const gmm_groups *g = &call->groups;
    int64_t begin = 0;
    if (!gmm__split_is_status(call)) return GMM_OK;
    return gmm__check_sizes(call, argument, g, g->on_host ? g->row_align : 0, 0, &begin);
}

static GMM__UNUSED gmm_status gmm__read_groups(gmm__call *call, const gmm_groups *groups) {
    gmm_groups *g = &call->groups;
    gmm_status s = gmm__read(call, "groups", g, sizeof *g, groups);
    if (s != GMM_OK) return s;
    if (g->count < 1) return gmm__refuse(call, GMM_E_ARG, "groups.count", "%d must be >= 1", g->count);
    if (g->capacity < 0)
        return gmm__refuse(call, GMM_E_ARG, "groups.capacity", "%lld must be >= 0", (long long)g->capacity);
    if (g->dtype != GMM_I32 && g->dtype != GMM_I64)
        return gmm__refuse(call, GMM_E_DTYPE, "groups.dtype", "%s%s must be i32 or i64", gmm_dtype_name(g->dtype),
                           g->dtype == GMM_NONE ? " (0)" : "");
    if (g->form != GMM_SPLIT_SIZES && g->form != GMM_SPLIT_OFFSETS)
        return gmm__refuse(call, GMM_E_ARG, "groups.form", "%d is neither sizes (0) nor offsets (1)", (int)g->form);
    if (g->tail != GMM_TAIL_KEEP && g->tail != GMM_TAIL_ZERO)
        return gmm__refuse(call, GMM_E_ARG, "groups.tail", "%d is neither keep (0) nor zero (1)", (int)g->tail);
    if (g->row_align < 0)
        return gmm__refuse(call, GMM_E_ARG, "groups.row_align", "%d must be >= 0", g->row_align);
    if (g->rows_hint < 0)
        return gmm__refuse(call, GMM_E_ARG, "groups.rows_hint", "%lld must be >= 0", (long long)g->rows_hint);
    if (g->on_host & ~1) return gmm__refuse(call, GMM_E_ARG, "groups.on_host", "%d must be 0 or 1", g->on_host);
    if (g->reserved) return gmm__refuse(call, GMM_E_ARG, "groups.reserved", "%d must be 0", g->reserved);
    call->rows = g->capacity;
    if (call->query) return GMM_OK;
    if (!g->splits) return gmm__refuse_that(call, GMM_E_NULL, "groups.splits", "is NULL with %d groups", g->count);
    if ((uintptr_t)g->splits % (g->dtype == GMM_I64 ? 8 : 4))
        return gmm__refuse(call, GMM_E_ALIGN, "groups.splits", "%p is not aligned to an %s", g->splits,
                           gmm_dtype_name(g->dtype));
    if ((uintptr_t)g->fault % 4)
        return gmm__refuse(call, GMM_E_ALIGN, "groups.fault", "%p is not aligned to 4 bytes", (void *)g->fault);
    gmm__add_span(call, "groups.splits", "", 0, g->splits,
                  ((int64_t)g->count + (g->form == GMM_SPLIT_OFFSETS)) * (g->dtype == GMM_I64 ? 8 : 4));
    gmm__add_span(call, "groups.fault", "", 1, g->fault, (int64_t)sizeof *g->fault);
    return gmm__check_split(call, "groups.splits");
}

/* Extents that an operation expects of an operand: `matrices` matrices of rows x cols, packed or in a table. 0 matrices
   stand for a single one, which takes no table. */
typedef struct gmm__extents {
    int64_t matrices, rows, cols;
} gmm__extents;
static GMM__UNUSED gmm__extents gmm__matrices(int64_t matrices, int64_t rows, int64_t cols) {
    gmm__extents e;
    e.matrices = matrices;
    e.rows = rows;
    e.cols = cols;
    return e;
}
static GMM__UNUSED gmm__extents gmm__matrix(int64_t rows, int64_t cols) { return gmm__matrices(0, rows, cols); }

/* Refuses a dtype that is not in the set `dtypes`, whose names the message has. */
static GMM__UNUSED gmm_status gmm__refuse_dtype(const gmm__call *call, const char *argument, const gmm_mat *m,
                                                uint32_t dtypes) {
    /* a quantized operand may be meant, whose scaling was not set */
    const int unscaled = dtypes == (uint32_t)GMM__FLOATS && m->scaling == GMM_SCALING_NONE &&
                         m->dtype >= GMM_E4M3 && m->dtype <= GMM_E2M1;
    char names[96] = "";
    size_t length = 0;
    int k;
    for (k = GMM_F32; k <= GMM_F64; k++) {
        if (!(dtypes >> k & 1u)) continue;
        length += (size_t)snprintf(names + length, sizeof names - length, "%s%s",
                                   length == 0 ? "" : dtypes >> k == 1u ? " or " : ", ", gmm_dtype_name((gmm_dtype)k));
    }
    return gmm__refuse(call, GMM_E_DTYPE, argument, "dtype %s%s must be %s", gmm_dtype_name(m->dtype),
                       m->dtype == GMM_NONE ? " (0)" : unscaled ? " with scaling none (0)" : "", names);
}

/* Reads an operand without scaling into call->mat[role] and checks it: its dtype against the set `dtypes`, strides,
   and outside of queries addresses and alignment. `mat` may be NULL where the operand is not required. */
static GMM__UNUSED gmm_status gmm__read_mat(gmm__call *call, int role, const char *argument, const gmm_mat *mat,
                                            int required, gmm__extents extents, uint32_t dtypes) {
    const int64_t matrices = extents.matrices, rows = extents.rows, cols = extents.cols;
    gmm_mat *m = &call->mat[role];
    gmm_status s;
    int64_t bytes, size, least;
    memset(m, 0, sizeof *m);
    if (!mat)
        return required ? gmm__refuse_that(call, GMM_E_NULL, argument, "is NULL: %s needs it", gmm_op_name(call->op))
                        : GMM_OK;
    if ((s = gmm__read(call, argument, m, sizeof *m, mat)) != GMM_OK) return s;
    if (m->dtype <= GMM_NONE || m->dtype > GMM_F64 || !(dtypes >> m->dtype & 1u))
        return gmm__refuse_dtype(call, argument, m, dtypes);
    if (m->scaling != GMM_SCALING_NONE)
        return gmm__refuse(call, GMM_E_DTYPE, argument, "scaling %s must be none (0): this operand is not quantized",
                           gmm_scaling_name(m->scaling));
    if (m->flags & ~(uint32_t)GMM_MAT_TABLE_ON_HOST)
        return gmm__refuse(call, GMM_E_ARG, argument, "flags 0x%x has bits that are unknown or of quantized operands",
                           m->flags);
    if (m->hadamard) return gmm__refuse(call, GMM_E_ARG, argument, "hadamard 0x%x must be 0", (unsigned)m->hadamard);
    if (m->ld == 0) m->ld = cols;
    if (m->ld < cols)
        return gmm__refuse(call, GMM_E_STRIDE, argument, "ld %lld must be >= the %lld columns", (long long)m->ld,
                           (long long)cols);
    if (!gmm__mul(m->ld, 8, &bytes) || !gmm__mul(rows, m->ld, &size) || !gmm__mul(size, 8, &bytes))
        return gmm__refuse(call, GMM_E_OVERFLOW, argument, "%lld rows of ld %lld do not fit 64 bits", (long long)rows,
                           (long long)m->ld);
    if (m->group_stride && (matrices == 0 || m->table))
        return gmm__refuse(call, GMM_E_STRIDE, argument, "group_stride %lld is for packed matrices, one per group",
                           (long long)m->group_stride);
    if (m->group_stride == 0 && matrices > 0 && !m->table) m->group_stride = size;
    least = rows > 0 ? (rows - 1) * m->ld + cols : 0;
    if (m->group_stride && m->group_stride < least)
        return gmm__refuse(call, GMM_E_STRIDE, argument, "group_stride %lld must be >= %lld elements",
                           (long long)m->group_stride, (long long)least);
    if (matrices > 0 && (!gmm__mul(matrices, m->group_stride, &size) || !gmm__mul(size, 8, &bytes)))
        return gmm__refuse(call, GMM_E_OVERFLOW, argument, "%lld groups at stride %lld do not fit 64 bits",
                           (long long)matrices, (long long)m->group_stride);
    if (m->data && m->table) return gmm__refuse_that(call, GMM_E_ARG, argument, "has both data and table");
    if (m->table && matrices == 0)
        return gmm__refuse_that(call, GMM_E_ARG, argument, "is one matrix and takes data, not table");
    if (call->query) return GMM_OK;
    if (!m->data && !m->table && rows > 0)
        return gmm__refuse_that(call, GMM_E_NULL, argument, "has neither data nor table for %lld x %lld %s",
                                (long long)rows, (long long)cols, gmm_dtype_name(m->dtype));
    size = gmm_dtype_bits(m->dtype) / 8;
    if ((uintptr_t)m->data % (uintptr_t)size)
        return gmm__refuse(call, GMM_E_ALIGN, argument, "%p is not aligned to its %s elements", m->data,
                           gmm_dtype_name(m->dtype));
    if ((uintptr_t)m->table % sizeof(void *))
        return gmm__refuse(call, GMM_E_ALIGN, argument, "table %p is not aligned to pointers", (const void *)m->table);
    if (m->table && (call->ctx->config.space == GMM_SPACE_CPU || (m->flags & (uint32_t)GMM_MAT_TABLE_ON_HOST))) {
        int64_t g;
        for (g = 0; g < matrices; g++) {
            if (!m->table[g] && rows > 0)
                return gmm__refuse(call, GMM_E_NULL, argument, "table[%lld] is NULL", (long long)g);
            if ((uintptr_t)m->table[g] % (uintptr_t)size)
                return gmm__refuse(call, GMM_E_ALIGN, argument, "table[%lld] %p is not aligned to its %s elements",
                                   (long long)g, m->table[g], gmm_dtype_name(m->dtype));
        }
    }
    gmm__add_operand(call, role, argument, "", gmm__rows_box(m->data, rows, cols * size, m->ld * size), m->table,
                     matrices ? matrices : 1, m->group_stride * size);
    return GMM_OK;
}

/* Records the elements, scales and amaxes of a quantized operand for gmm__check_overlap. */
static void gmm__add_quant(gmm__call *call, int role, const char *name, gmm__extents extents, const gmm_layout *l) {
    const gmm_mat *m = &call->mat[role];
    const int64_t bits = gmm_dtype_bits(m->dtype), count = extents.matrices ? extents.matrices : 1;
    const int64_t amaxes = m->flags & (uint32_t)GMM_MAT_ROW_AMAX ? count * extents.rows
                           : extents.matrices ? extents.matrices : (int64_t)call->groups.count;
    const int transposes = call->op == GMM_OP_TRANSPOSE;
    const int writes_amax = call->op == GMM_OP_QUANTIZE || call->op == GMM_OP_REQUANTIZE ||
                            call->op == GMM_OP_SHARD_CAST || (transposes && m->scaling == GMM_SCALING_NV16);
    gmm__add_operand(call, role, name, "",
                     gmm__rows_box(m->data, l->data_rows, (l->data_cols * bits + 7) / 8, m->ld * bits / 8), m->table,
                     count, m->group_stride * bits / 8);
    gmm__add_operand(call, role, name, ".scale", gmm__rows_box(m->scale, 1, l->scale_bytes, l->scale_bytes),
                     m->scale_table, count, l->scale_bytes);
    /* The rowwise and the columnwise copy may share one amax array, except where the Hadamard transform changes the
       columnwise values. */
    if (role == (transposes ? GMM__ROWWISE_COPY : GMM__COLUMNWISE_COPY) &&
        m->amax == call->mat[transposes ? GMM__SOURCE : GMM__ROWWISE_COPY].amax &&
        !call->format.hadamard)
        return;
    gmm__add_span(call, name, ".amax", writes_amax && gmm__writes(call->op, role), m->amax,
                  amaxes * (int64_t)sizeof *m->amax);
}

/* Reads a quantized operand into call->mat[role] and checks it. A single matrix holds the rows of all groups, and its
   extents have the capacity of the groups as rows. */
static GMM__UNUSED gmm_status gmm__read_quant(gmm__call *call, int role, const char *argument, const gmm_mat *mat,
                                              gmm__extents extents, gmm_direction direction) {
    const int64_t matrices = extents.matrices, rows = extents.rows, cols = extents.cols;
    gmm_mat *m = &call->mat[role];
    gmm_layout l = GMM_ZERO;
    gmm_error error = GMM_ZERO;
    gmm_status s = gmm__read(call, argument, m, sizeof *m, mat);
    int64_t size, all, least, g;
    int nv, lacks_data;
    if (s != GMM_OK) return s;
    if (m->scaling == GMM_SCALING_NONE)
        return gmm__refuse(call, GMM_E_DTYPE, argument, "scaling none (0): a quantized operand needs another");
    s = matrices == 0 ? gmm_layout_of_groups(m->dtype, m->scaling, m->scale_order, direction, call->groups.count, rows,
                                             cols, &l, &error)
                      : gmm_layout_of(m->dtype, m->scaling, m->scale_order, direction, rows, cols, &l, &error);
    if (s != GMM_OK) return gmm__refuse(call, s, argument, "%s", error.text);
    call->direction[role] = direction;
    nv = m->scaling == GMM_SCALING_NV16;
    if (m->flags & ~(uint32_t)(GMM_MAT_TABLE_ON_HOST | GMM_MAT_ROW_AMAX | GMM_MAT_E4M3_256))
        return gmm__refuse(call, GMM_E_ARG, argument, "flags 0x%x has unknown bits", m->flags);
    if ((m->flags & (uint32_t)GMM_MAT_E4M3_256 && !nv) ||
        (m->flags & (uint32_t)GMM_MAT_ROW_AMAX && (!nv || direction != GMM_ROWWISE)))
        return gmm__refuse(call, GMM_E_ARG, argument, "flags 0x%x do not belong to a %s copy with scaling %s",
                           m->flags, direction == GMM_ROWWISE ? "rowwise" : "columnwise",
                           gmm_scaling_name(m->scaling));
    if (m->hadamard && (!nv || direction == GMM_ROWWISE || (m->hadamard & ~0xFFFF) != GMM_HADAMARD))
        return gmm__refuse(call, GMM_E_ARG, argument, "hadamard 0x%x must be 0, or GMM_HADAMARD and sign bits in a "
                           "columnwise nv16 copy", (unsigned)m->hadamard);
    if (m->ld == 0) m->ld = l.data_cols;
    if (m->ld < l.data_cols || (m->dtype == GMM_E2M1 && m->ld % 2))
        return gmm__refuse(call, GMM_E_STRIDE, argument, "ld %lld must be >= %lld%s", (long long)m->ld,
                           (long long)l.data_cols, m->dtype == GMM_E2M1 ? " and even" : "");
    if (!gmm__mul(m->ld, 8, &all) || !gmm__mul(l.data_rows, m->ld, &size) || !gmm__mul(size, 8, &all))
        return gmm__refuse(call, GMM_E_OVERFLOW, argument, "%lld rows of ld %lld do not fit 64 bits",
                           (long long)l.data_rows, (long long)m->ld);
    if (m->group_stride && (matrices == 0 || m->table))
        return gmm__refuse(call, GMM_E_STRIDE, argument, "group_stride %lld is for packed matrices",
                           (long long)m->group_stride);
    if (m->group_stride == 0 && matrices > 0 && !m->table) m->group_stride = size;
    least = l.data_rows > 0 ? (l.data_rows - 1) * m->ld + l.data_cols : 0;
    if (m->group_stride && (m->group_stride < least || (m->dtype == GMM_E2M1 && m->group_stride % 2)))
        return gmm__refuse(call, GMM_E_STRIDE, argument, "group_stride %lld must be >= %lld elements%s",
                           (long long)m->group_stride, (long long)least, m->dtype == GMM_E2M1 ? " and even" : "");
    if (matrices > 0 && (!gmm__mul(matrices, m->group_stride, &all) || !gmm__mul(all, 8, &all) ||
                         !gmm__mul(matrices, l.scale_bytes, &all)))
        return gmm__refuse(call, GMM_E_OVERFLOW, argument, "%lld matrices at stride %lld do not fit 64 bits",
                           (long long)matrices, (long long)m->group_stride);
    if ((m->data && m->table) || (m->scale && m->scale_table))
        return gmm__refuse_that(call, GMM_E_ARG, argument, "has both an address and a table of elements or scales");
    if (matrices == 0 && (m->table || m->scale_table))
        return gmm__refuse_that(call, GMM_E_ARG, argument, "is one matrix and takes data and scale, not tables");
    if (call->query) return GMM_OK;
    if (!m->table != !m->scale_table)
        return gmm__refuse(call, GMM_E_ARG, argument, "table and scale_table come together");
    lacks_data = l.data_bytes > 0 && !m->data && !m->table;
    /* groups without rows have no data, but they have the scales of tensors and of columns */
    if (lacks_data || (l.scale_bytes > 0 && !m->scale && !m->scale_table))
        return gmm__refuse_that(call, GMM_E_NULL, argument, "lacks %s for %lld x %lld %s scaled %s",
                                lacks_data ? "data" : "scale", (long long)rows, (long long)cols,
                                gmm_dtype_name(m->dtype), gmm_scaling_name(m->scaling));
    if (l.scale_dtype == GMM_F32 && (uintptr_t)m->scale % 4)
        return gmm__refuse(call, GMM_E_ALIGN, argument, "scale %p is not aligned to 4 bytes", m->scale);
    if ((uintptr_t)m->table % sizeof(void *) || (uintptr_t)m->scale_table % sizeof(void *))
        return gmm__refuse(call, GMM_E_ALIGN, argument, "table %p or scale_table %p is not aligned to pointers",
                           (const void *)m->table, (const void *)m->scale_table);
    if (nv && !m->amax && (rows > 0 || !(m->flags & (uint32_t)GMM_MAT_ROW_AMAX)))
        return gmm__refuse_that(call, GMM_E_NULL, argument, "lacks amax, which nv16 multiplies by");
    if ((uintptr_t)m->amax % 4)
        return gmm__refuse(call, GMM_E_ALIGN, argument, "amax %p is not aligned to 4 bytes", (const void *)m->amax);
    if (m->table && (call->ctx->config.space == GMM_SPACE_CPU || (m->flags & (uint32_t)GMM_MAT_TABLE_ON_HOST)))
        for (g = 0; g < matrices; g++) {
            if (l.data_bytes > 0 && (!m->table[g] || !m->scale_table[g]))
                return gmm__refuse(call, GMM_E_NULL, argument, "table[%lld] or scale_table[%lld] is NULL", (long long)g,
                                   (long long)g);
            if (l.scale_dtype == GMM_F32 && (uintptr_t)m->scale_table[g] % 4)
                return gmm__refuse(call, GMM_E_ALIGN, argument, "scale_table[%lld] %p is not aligned to 4 bytes",
                                   (long long)g, m->scale_table[g]);
        }
    gmm__add_quant(call, role, argument, extents, &l);
    return GMM_OK;
}

/* Reads the destination of a gradient: one matrix per group. */
static GMM__UNUSED gmm_status gmm__read_grad(gmm__call *call, int role, const char *argument, const gmm_grad *grad,
                                             int required, int64_t rows, int64_t cols) {
    gmm_grad *g = &call->grad[role];
    gmm_status s;
    char name[32];
    memset(g, 0, sizeof *g);
    memset(&call->mat[role], 0, sizeof call->mat[role]);
    if (!grad)
        return required ? gmm__refuse_that(call, GMM_E_NULL, argument, "is NULL: %s needs a destination",
                                           gmm_op_name(call->op)) : GMM_OK;
    if ((s = gmm__read(call, argument, g, sizeof *g, grad)) != GMM_OK) return s;
    if ((g->main_grad | g->overwrite) & ~1)
        return gmm__refuse(call, GMM_E_ARG, argument, "main_grad %d and overwrite %d must be 0 or 1", g->main_grad,
                           g->overwrite);
    if (g->reserved) return gmm__refuse(call, GMM_E_ARG, argument, "reserved %d must be 0", g->reserved);
    if (!call->query && (uintptr_t)g->beta % 4)
        return gmm__refuse(call, GMM_E_ALIGN, argument, "beta %p is not aligned to 4 bytes", (const void *)g->beta);
    gmm__add_span(call, argument, ".beta", 0, g->beta, call->groups.count * (int64_t)sizeof *g->beta);
    gmm__add_span(call, argument, ".frozen", 0, g->frozen, call->groups.count);
    (void)snprintf(name, sizeof name, "%s.mat", argument);
    return gmm__read_mat(call, role, name, g->mat, 1, gmm__matrices(call->groups.count, rows, cols), GMM__FLOATS);
}

/* Checks an array of `count` elements of `bytes` bytes each. */
static GMM__UNUSED gmm_status gmm__check_elements(gmm__call *call, const char *argument, const void *array,
                                                  int required, int writes, int64_t count, int64_t bytes) {
    int64_t size;
    if (array && !gmm__mul(count, bytes, &size))
        return gmm__refuse(call, GMM_E_OVERFLOW, argument, "%lld values do not fit 64 bits", (long long)count);
    if (call->query) return GMM_OK;
    if (!array && required && count > 0)
        return gmm__refuse_that(call, GMM_E_NULL, argument, "is NULL for %lld values", (long long)count);
    if ((uintptr_t)array % (uintptr_t)bytes)
        return gmm__refuse(call, GMM_E_ALIGN, argument, "%p is not aligned to %lld bytes", array, (long long)bytes);
    if (array) gmm__add_span(call, argument, "", writes, array, size);
    return GMM_OK;
}
/* Checks an array of 4-byte values that a call reads, or one that it writes. */
static GMM__UNUSED gmm_status gmm__check_array(gmm__call *call, const char *argument, const void *array, int required,
                                               int64_t count) {
    return gmm__check_elements(call, argument, array, required, 0, count, 4);
}
static GMM__UNUSED gmm_status gmm__check_output(gmm__call *call, const char *argument, const void *array, int required,
                                                int64_t count) {
    return gmm__check_elements(call, argument, array, required, 1, count, 4);
}

/* Checks the stream of a call. */
static GMM__UNUSED gmm_status gmm__check_stream(const gmm__call *call, gmm_stream stream) {
    if (call->ctx->config.space == GMM_SPACE_CPU && stream)
        return gmm__refuse(call, GMM_E_ARG, "stream", "%p must be NULL in a CPU context", (void *)stream);
    return GMM_OK;
}

/* Address of element (row, col) of matrix g. Integer arithmetic, since a matrix without rows may be NULL. */
static GMM__UNUSED void *gmm__at(const gmm_mat *m, int64_t g, int64_t row, int64_t col) {
    const uintptr_t base = (uintptr_t)(m->table ? m->table[g] : m->data);
    const int64_t element = (m->table ? 0 : g * m->group_stride) + row * m->ld + col;
    return (void *)(base + (uintptr_t)(element * (gmm_dtype_bits(m->dtype) / 8)));
}

/* The strips of GMM_TILE rows of all groups, at most; a strip is within a group. */
static GMM__UNUSED int64_t gmm__group_strips(const gmm_groups *groups) {
    return gmm_padded_capacity(groups->count, groups->capacity) / GMM_TILE;
}

/* An aligned address, not NULL, for memory that only a launch has: descriptors say by addresses what is wanted, and a
   plan reads and writes none of them. */
static char *gmm__placeholder(void) { return (char *)(uintptr_t)GMM__WORKSPACE_ALIGN; }

/* Appends a region of the workspace to a plan. Each engine numbers the regions of an operation by an enum of its own;
   gmm__region gives a region's address once gmm__serve_plan has set plan->workspace. */
static GMM__UNUSED void gmm__reserve(gmm__plan *plan, int region, size_t bytes) {
    plan->region[region] = plan->workspace_bytes;
    plan->workspace_bytes += gmm__round256(bytes);
}
static GMM__UNUSED void *gmm__region(const gmm__plan *plan, int region) {
    return (char *)plan->workspace + plan->region[region];
}

/* The plan of operations that serve every call and need no workspace. */
static int gmm__plan_any(const gmm__call *call, gmm__plan *plan) {
    (void)call;
    (void)plan;
    return 1;
}
/* Returns 0 from a plan function, with the reason why the engine does not serve the call as the plan's note. */
static GMM__UNUSED int gmm__decline(gmm__plan *plan, const char *format, ...) {
    va_list list;
    va_start(list, format);
    (void)vsnprintf(plan->note, sizeof plan->note, format, list);
    va_end(list);
    return 0;
}

static GMM__UNUSED void gmm__log(const gmm_context *ctx, gmm_log_level level, const char *format, ...) {
    char text[512];
    va_list list;
    if (!ctx->config.log.write || level > ctx->config.log.level) return;
    va_start(list, format);
    (void)vsnprintf(text, sizeof text, format, list);
    va_end(list);
    ctx->config.log.write(ctx->config.log.user, level, text);
}

/* Whether `stream` is capturing a graph: then values on the host are those of the capture, not of a replay. */
static GMM__UNUSED int gmm__capturing(const gmm_context *ctx, gmm_stream stream) {
#ifdef __CUDACC__
    enum cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    if (ctx->config.space == GMM_SPACE_CUDA && cudaStreamIsCapturing(stream, &status) == cudaSuccess)
        return status != cudaStreamCaptureStatusNone;
#endif
    (void)ctx;
    (void)stream;
    return 0;
}

/* Defined behind the engine table, in core/engines.h: gmm__prepare checks the descriptor of any operation that has a
   query, by the function gmm__*_prepare of its part; gmm__select chooses the engine of a checked call and fills in its
   plan; gmm__check_overlap refuses a call whose outputs overlap its other memory; gmm__serve selects, and then answers
   the query (call->query, into *info), or checks workspace and overlap and launches. */
static gmm_status gmm__prepare(gmm__call *call, gmm_context *ctx, gmm_op op, const char *function, const void *d,
                               int query);
static gmm_status gmm__select(gmm__call *call, gmm__plan *plan);
static void gmm__describe_plan(gmm__text *text, const gmm__plan *plan); /* core/describe.h */
static gmm_status gmm__check_overlap(gmm__call *call);
static gmm_status gmm__serve(gmm__call *call, gmm_info *info, void *workspace, size_t workspace_bytes,
                             gmm_stream stream);

