/* ......................................................................... 14.17 Engine table, public functions ... */

/* One row per engine, in the order in which AUTO tries them; the columns follow GMM_OP_LIST: what a comment behind a
   column names is the operation, where the functions have another name. GMM__OP names a plan and a
   launch function of one operation, GMM__OP_BY a plan that several operations share, GMM__OP_ANY an operation that the
   engine serves without a plan of its own, GMM__QUANT_OP one that GMM_NO_QUANT leaves out. */
#define GMM__OP(engine, op) GMM__OP_BY(engine, op, op)
#define GMM__OP_BY(engine, plan, op) { gmm__##engine##_plan_##plan, gmm__##engine##_launch_##op }
#define GMM__OP_ANY(engine, op) { gmm__plan_any, gmm__##engine##_launch_##op }
#define GMM__NO_OP { NULL, NULL }
#ifdef GMM_NO_QUANT
#define GMM__QUANT_OP(...) GMM__NO_OP
#else
#define GMM__QUANT_OP(...) __VA_ARGS__
#endif
static const gmm__engine_row gmm__engines[] = {
    { GMM_ENGINE_CPU, GMM_SPACE_CPU, 1, gmm__honours_cpu, {
        GMM__QUANT_OP(GMM__OP(cpu, quantize)), GMM__QUANT_OP(GMM__OP(cpu, dequantize)),
        GMM__QUANT_OP(GMM__OP(cpu, quantize)), /* requantize */
        GMM__QUANT_OP(GMM__OP_ANY(cpu, scale_update)), GMM__QUANT_OP(GMM__OP_ANY(cpu, transpose)),
        GMM__QUANT_OP(GMM__OP_ANY(cpu, shard_cast)),
        GMM__OP_ANY(cpu, offsets),
        GMM__OP(cpu, product), /* linear_fwd */
        GMM__OP(cpu, product), /* linear_dgrad */
        GMM__OP(cpu, product), /* linear_wgrad */
        GMM__OP(cpu, linear_bgrad),
        GMM__OP_ANY(cpu, act), GMM__OP_ANY(cpu, act), /* fwd, bwd */
        GMM__OP(compose, mlp_fwd), GMM__OP(compose, mlp_bwd), GMM__OP(compose, mlp_wgrad),
        GMM__OP(compose, moe), GMM__OP(compose, moe), /* fwd, bwd */
        GMM__OP(cpu, topk_fwd), GMM__OP(cpu, topk_bwd),
        GMM__OP_ANY(cpu, dense), GMM__OP_ANY(cpu, dense), GMM__OP_ANY(cpu, expert_bias), /* from, to */
        GMM__OP(cpu, permute_map), GMM__OP_ANY(cpu, permute_fwd), GMM__OP_ANY(cpu, permute_bwd),
        GMM__OP_ANY(cpu, unpermute_fwd), GMM__OP_ANY(cpu, unpermute_bwd),
        GMM__OP(cpu, pad), GMM__OP(cpu, pad), /* pad, unpad */
        GMM__OP_ANY(cpu, glu_interleave),
        GMM__OP_ANY(cpu, accumulate), GMM__OP_ANY(cpu, convert)
    } },
#ifdef __CUDACC__
    { GMM_ENGINE_WGMMA, GMM_SPACE_CUDA, 1, gmm__honours_wgmma, {
        GMM__NO_OP, /* quantize */
        GMM__NO_OP, /* dequantize */
        GMM__NO_OP, /* requantize */
        GMM__NO_OP, /* scale_update */
        GMM__NO_OP, /* transpose */
        GMM__NO_OP, /* shard_cast */
        GMM__NO_OP, /* offsets */
        GMM__OP(wgmma, product), /* linear_fwd */
        GMM__OP(wgmma, product), /* linear_dgrad */
        GMM__OP(wgmma, product), /* linear_wgrad */
        GMM__NO_OP               /* linear_bgrad and all that follow: absent members are zeros too */
    } },
#endif
#if defined(__CUDACC__) && defined(GMM__ELEM_DONE)
    { GMM_ENGINE_MMA, GMM_SPACE_CUDA, 1, gmm__honours_mma, {
        GMM__QUANT_OP(GMM__OP(mma, quantize)), GMM__QUANT_OP(GMM__OP(mma, dequantize)),
        GMM__QUANT_OP(GMM__OP(mma, quantize)), /* requantize */
        GMM__QUANT_OP(GMM__OP_ANY(mma, scale_update)), GMM__QUANT_OP(GMM__OP(mma, transpose)),
        GMM__QUANT_OP(GMM__OP_ANY(mma, shard_cast)),
        GMM__OP_ANY(mma, offsets),
        GMM__OP(mma, linear_fwd), GMM__OP(mma, linear_dgrad), GMM__OP(mma, linear_wgrad), GMM__OP(mma, linear_bgrad),
        GMM__OP(mma, act), GMM__OP(mma, act), /* fwd, bwd */
        GMM__OP(compose, mlp_fwd), GMM__OP(compose, mlp_bwd), GMM__OP(compose, mlp_wgrad),
        GMM__OP(compose, moe), GMM__OP(compose, moe), /* fwd, bwd */
        GMM__OP(mma, topk_fwd), GMM__OP(mma, topk_bwd),
        GMM__OP_ANY(mma, dense), GMM__OP_ANY(mma, dense), GMM__OP_ANY(mma, expert_bias), /* from, to */
        GMM__OP(mma, permute_map), GMM__OP_BY(mma, permute, permute_fwd), GMM__OP_BY(mma, permute, permute_bwd),
        GMM__OP_BY(mma, permute, unpermute_fwd), GMM__OP_BY(mma, permute, unpermute_bwd),
        GMM__OP(mma, pad), GMM__OP(mma, pad), /* pad, unpad */
        GMM__OP(mma, glu_interleave),
        GMM__OP(mma, accumulate), GMM__OP(mma, convert)
    } },
#endif
#ifdef GMM__CUBLASLT
    { GMM_ENGINE_CUBLASLT, GMM_SPACE_CUDA, 0, gmm__honours_cublaslt, {
        GMM__NO_OP, /* quantize */
        GMM__NO_OP, /* dequantize */
        GMM__NO_OP, /* requantize */
        GMM__NO_OP, /* scale_update */
        GMM__NO_OP, /* transpose */
        GMM__NO_OP, /* shard_cast */
        GMM__NO_OP, /* offsets */
        GMM__OP(lt, product), /* linear_fwd */
        GMM__OP(lt, product), /* linear_dgrad */
        GMM__OP(lt, product), /* linear_wgrad */
        GMM__NO_OP            /* linear_bgrad and all that follow: absent members are zeros too */
    } },
#endif
};
#undef GMM__OP
#undef GMM__OP_BY
#undef GMM__OP_ANY
#undef GMM__QUANT_OP
#undef GMM__NO_OP

/* --- overlap: memory that a call writes shares no byte with its other memory --- */

/* Whether any row i of a and any row j of b, which have the same pitch, have a byte in common. */
static int gmm__rows_overlap(const gmm__box *a, const gmm__box *b) {
    const int64_t pitch = a->step[0], distance = (int64_t)(b->address - a->address);
    const int64_t lower = distance - a->width, upper = distance + b->width - 1; /* lower < (i - j) pitch <= upper */
    int64_t low = lower / pitch - (lower % pitch < 0) + 1, high = upper / pitch - (upper % pitch < 0);
    if (low < 1 - b->count[0]) low = 1 - b->count[0];
    if (high > a->count[0] - 1) high = a->count[0] - 1;
    return low <= high;
}

/* Whether two boxes have a byte in common. The answer is exact. Of the box with the outermost loop of larger step, only
   the iterations that may reach the other box are visited. */
static int gmm__boxes_overlap(gmm__box a, gmm__box b) {
    const uint64_t end = gmm__box_end(&b);
    uint64_t size, step, start = a.address;
    int64_t i, count;
    if (gmm__box_end(&a) <= b.address || end <= a.address) return 0;
    if (a.loops + b.loops == 0) return 1;
    if (a.loops == 1 && b.loops == 1 && a.step[0] == b.step[0]) return gmm__rows_overlap(&a, &b);
    if (a.loops == 0 || (b.loops > 0 && b.step[b.loops - 1] > a.step[a.loops - 1])) return gmm__boxes_overlap(b, a);
    a.loops--;
    count = a.count[a.loops];
    step = (uint64_t)a.step[a.loops];
    size = gmm__box_end(&a) - start;
    i = start + size <= b.address ? (int64_t)((b.address - start - size) / step) + 1 : 0;
    for (; i < count && start + (uint64_t)i * step < end; i++) {
        a.address = start + (uint64_t)i * step;
        if (gmm__boxes_overlap(a, b)) return 1;
    }
    return 0;
}

/* Writes the addresses of a span's boxes from index `first` on, at most GMM__SORTED of them, in ascending order, and
   returns their number. Most tables are in this order already. The heap of routing sorts in descending order, and
   therefore gets the complements. */
enum { GMM__SORTED = 1024 };
static int64_t gmm__span_sorted(const gmm__span *s, int64_t first, uint64_t *addresses) {
    const int64_t n = s->count - first < GMM__SORTED ? s->count - first : (int64_t)GMM__SORTED;
    int64_t i;
    int sorted = 1;
    for (i = 0; i < n; i++) {
        addresses[i] = gmm__span_at(s, first + i);
        sorted &= i == 0 || addresses[i - 1] <= addresses[i];
    }
    if (sorted) return n;
    for (i = 0; i < n; i++) addresses[i] = ~addresses[i];
    for (i = n / 2; i-- > 0;) gmm__heap_sift_down(addresses, n, i);
    gmm__heap_sort(addresses, n);
    for (i = 0; i < n; i++) addresses[i] = ~addresses[i];
    return n;
}

/* Finds two boxes that overlap, one from each ascending list of addresses; both may be the same list. The boxes of a
   list have one size, so that their ends ascend too. */
static int gmm__sorted_overlap(const gmm__span *a, const uint64_t *x, int64_t n, const gmm__span *b, const uint64_t *y,
                               int64_t m, uint64_t overlap[2]) {
    int64_t i, j, first = 0;
    if (x[n - 1] + a->size <= y[0] || y[m - 1] + b->size <= x[0]) return 0;
    for (i = 0; i < n; i++) {
        while (first < m && y[first] + b->size <= x[i]) first++;
        for (j = x == y ? i + 1 : first; j < m && y[j] < x[i] + a->size; j++) {
            overlap[0] = x[i];
            overlap[1] = y[j];
            if (gmm__boxes_overlap(gmm__span_box(a, x[i]), gmm__span_box(b, y[j]))) return 1;
        }
    }
    return 0;
}

/* Whether two boxes differ in their addresses alone. */
static int gmm__same_form(const gmm__box *a, const gmm__box *b) {
    int32_t i;
    if (a->width != b->width || a->loops != b->loops) return 0;
    for (i = 0; i < a->loops; i++)
        if (a->count[i] != b->count[i] || a->step[i] != b->step[i]) return 0;
    return 1;
}

/* Finds two boxes that overlap, one from each span, or two of one span (a == b). It allocates nothing. Two tables of n
   ascending addresses take O(n) steps, unsorted ones O(n log n); with more than GMM__SORTED addresses, n / GMM__SORTED
   times as many. */
static int gmm__tables_overlap(const gmm__span *a, const gmm__span *b, uint64_t overlap[2]) {
    uint64_t x[GMM__SORTED], y[GMM__SORTED];
    int64_t i, j, n, m;
    for (i = 0; i < a->count; i += GMM__SORTED) {
        n = gmm__span_sorted(a, i, x);
        if (a == b && gmm__sorted_overlap(a, x, n, a, x, n, overlap)) return 1;
        for (j = a == b ? i + GMM__SORTED : 0; j < b->count; j += GMM__SORTED) {
            m = gmm__span_sorted(b, j, y);
            if (gmm__sorted_overlap(a, x, n, b, y, m, overlap)) return 1;
        }
    }
    return 0;
}
/* Finds two boxes that overlap, one from each of two spans, and writes their addresses to `overlap`. With in_place, two
   boxes at the same address and of the same form are allowed, if one of the two spans has one box. */
static int gmm__spans_overlap(const gmm__span *a, const gmm__span *b, int in_place, uint64_t overlap[2]) {
    int64_t i, j;
    if (a->high <= b->low || b->high <= a->low) return 0;
    if (a->count > 1 && b->count > 1) return gmm__tables_overlap(a, b, overlap);
    for (i = 0; i < a->count; i++)
        for (j = 0; j < b->count; j++) {
            overlap[0] = gmm__span_at(a, i);
            overlap[1] = gmm__span_at(b, j);
            if (overlap[0] + a->size <= overlap[1] || overlap[1] + b->size <= overlap[0] ||
                (in_place && overlap[0] == overlap[1] && gmm__same_form(&a->box, &b->box)))
                continue;
            if (gmm__boxes_overlap(gmm__span_box(a, overlap[0]), gmm__span_box(b, overlap[1]))) return 1;
        }
    return 0;
}

/* Writes the name of the memory at an address: "dw.table[3]". `repeated`: its second entry in the table. */
static void gmm__span_name(const gmm__span *s, uint64_t address, int repeated, char *text, size_t size) {
    int64_t i = 0;
    if (!s->table) {
        (void)snprintf(text, size, "%s%s", s->name, s->part);
        return;
    }
    for (; i < s->count && (gmm__span_at(s, i) != address || repeated); i++)
        if (gmm__span_at(s, i) == address) repeated = 0;
    (void)snprintf(text, size, "%s%s[%lld]", s->name, s->part[0] ? ".scale_table" : ".table", (long long)i);
}

/* Whether the contract lets the output `a` be the input `b`, at the same address and with the same strides. */
static int gmm__may_replace(const gmm__call *call, const gmm__span *a, const gmm__span *b) {
    static const struct { gmm_op op; const char *output, *input; } pairs[] = {
        { GMM_OP_ACT_BWD, "dx", "x" }, { GMM_OP_ACT_BWD, "y", "dy" },
        { GMM_OP_MLP_BWD, "dx", "x" }, { GMM_OP_MLP_BWD, "dx", "dy" }
    };
    size_t i;
    if (!call->in_place || b->writes) return 0;
    if (call->op != GMM_OP_ACT_BWD && call->op != GMM_OP_MLP_BWD) return 1; /* ACCUMULATE: y may be an addend */
    for (i = 0; i < sizeof pairs / sizeof pairs[0]; i++)
        if (call->op == pairs[i].op && !strcmp(a->name, pairs[i].output) && !strcmp(b->name, pairs[i].input)) return 1;
    return 0;
}
/* Refuses a call that writes a span which overlaps another one, or itself; a pair of written spans is compared once. */
static gmm_status gmm__check_overlap(gmm__call *call) {
    int32_t i, j;
    for (i = 0; i < call->spans; i++)
        for (j = 0; j < call->spans; j++) {
            const gmm__span *a = &call->span[i], *b = &call->span[j];
            uint64_t overlap[2];
            char first[72], second[72];
            if (!a->writes || (b->writes && j < i) || (i == j && a->count == 1) ||
                !gmm__spans_overlap(a, b, gmm__may_replace(call, a, b), overlap))
                continue;
            gmm__span_name(a, overlap[0], 0, first, sizeof first);
            gmm__span_name(b, overlap[1], i == j && overlap[0] == overlap[1], second, sizeof second);
            return gmm__refuse(call, GMM_E_ARG, first, "%p overlaps %s%s%s, %p: what is written must share no byte "
                               "with other memory of the call", (void *)overlap[0],
                               gmm__is_field(call, second) ? call->path : "",
                               gmm__is_field(call, second) ? "." : "", second, (void *)overlap[1]);
        }
    return GMM_OK;
}

/* Begins the call of an operation that has a query, and checks its descriptor `d`. */
static gmm_status gmm__prepare(gmm__call *call, gmm_context *ctx, gmm_op op, const char *function, const void *d,
                               int query) {
    gmm_status s;
    switch (op) {
    case GMM_OP_QUANTIZE: case GMM_OP_REQUANTIZE:
        return gmm__quantize_prepare(call, ctx, op, function, (const gmm_quantization *)d, query);
    case GMM_OP_DEQUANTIZE:
        return gmm__dequantize_prepare(call, ctx, function, (const gmm_dequantization *)d, query);
    case GMM_OP_TRANSPOSE: return gmm__transpose_prepare(call, ctx, function, (const gmm_transposition *)d, query);
    case GMM_OP_LINEAR_FWD: case GMM_OP_LINEAR_DGRAD: case GMM_OP_LINEAR_WGRAD: case GMM_OP_LINEAR_BGRAD:
        return gmm__linear_prepare(call, ctx, op, function, (const gmm_linear *)d, query);
    case GMM_OP_ACT_FWD: case GMM_OP_ACT_BWD:
        return gmm__act_prepare(call, ctx, op, function, (const gmm_activation *)d, query);
    case GMM_OP_MLP_FWD: case GMM_OP_MLP_BWD: case GMM_OP_MLP_WGRAD:
        return gmm__mlp_prepare(call, ctx, op, function, (const gmm_mlp *)d,
                                query ? GMM__MLP_QUERY : GMM__MLP_LAUNCH);
    case GMM_OP_MOE_FWD: case GMM_OP_MOE_BWD:
        return gmm__moe_prepare(call, ctx, op, function, (const gmm_moe *)d, query);
    case GMM_OP_TOPK_FWD: case GMM_OP_TOPK_BWD:
        return gmm__topk_prepare(call, ctx, op, function, (const gmm_route *)d, query);
    case GMM_OP_PERMUTE_MAP: case GMM_OP_PERMUTE_FWD: case GMM_OP_PERMUTE_BWD: case GMM_OP_UNPERMUTE_FWD:
    case GMM_OP_UNPERMUTE_BWD:
        return gmm__permute_prepare(call, ctx, op, function, (const gmm_permute *)d, query);
    case GMM_OP_PAD: case GMM_OP_UNPAD:
        return gmm__pad_prepare(call, ctx, op, function, (const gmm_padding *)d, query);
    case GMM_OP_GLU_INTERLEAVE: return gmm__glu_prepare(call, ctx, function, (const gmm_glu *)d, query);
    case GMM_OP_ACCUMULATE: return gmm__accumulate_prepare(call, ctx, function, (const gmm_accumulation *)d, query);
    case GMM_OP_CONVERT: return gmm__convert_prepare(call, ctx, function, (const gmm_conversion *)d, query);
    default:
        s = gmm__open(call, ctx, op, function, query);
        return s != GMM_OK ? s : gmm__refuse(call, GMM_E_ARG, "op", "%d (%s) has no query", (int)op, gmm_op_name(op));
    }
}

/* Appends to a plan's note, truncated to fit. */
static void gmm__note(gmm__plan *plan, const char *format, ...) {
    const size_t length = strlen(plan->note);
    va_list list;
    va_start(list, format);
    (void)vsnprintf(plan->note + length, sizeof plan->note - length, format, list);
    va_end(list);
}

/* Whether AUTO tries an engine for a call. */
static int gmm__automatic(const gmm__engine_row *row, const gmm__call *call) {
    return row->automatic && row->space == call->ctx->config.space && row->ops[call->op].plan;
}

/* Makes the plan of an engine for a call. Returns 0 if the engine declines it, for the reason in the note: of several
   fields that the engine does not honour, the note names the first one of GMM__FIELD_LIST. */
static int gmm__plan_row(const gmm__engine_row *row, const gmm__call *call, gmm__plan *plan) {
    int field;
    memset(plan, 0, sizeof *plan);
    plan->call = call;
    plan->engine = row->engine;
    if (row->space != call->ctx->config.space) return gmm__decline(plan, "serves another memory space");
    if (!row->ops[call->op].plan) return gmm__decline(plan, "does not have this operation");
    if ((field = gmm__missing_field(call, row->honours)) < 0) return row->ops[call->op].plan(call, plan);
    return gmm__decline(plan, "does not honour %s", gmm__field_name(field));
}

/* Completes the plan by rows[i] of a query without addresses. The note states the alignment that the plan assumes, and
   the workspace is enlarged for the engine that AUTO tries next, which serves calls with other addresses. */
static void gmm__cover_unaligned(const gmm__engine_row *rows, size_t count, size_t i, const gmm__call *call,
                                 gmm__plan *plan) {
    gmm__plan other;
    while (call->options.engine == GMM_ENGINE_AUTO && ++i < count) {
        if (!gmm__automatic(&rows[i], call)) continue;
        if (!gmm__plan_row(&rows[i], call, &other)) continue;
        if (other.workspace_bytes > plan->workspace_bytes) plan->workspace_bytes = other.workspace_bytes;
        if (other.assumes_aligned) continue;
        gmm__note(plan, "; for addresses at multiples of 16 bytes, else %s", gmm_engine_name(other.engine));
        return;
    }
    gmm__note(plan, "; only for addresses at multiples of 16 bytes");
}

/* gmm__select over the given engine table. Engines that declined the call are named in the note of the one that serves
   it, or in the message if none does. */
static gmm_status gmm__select_from(const gmm__engine_row *rows, size_t count, gmm__call *call, gmm__plan *plan) {
    const gmm_engine demanded = call->options.engine;
    char reasons[160] = "";
    size_t i, length = 0;
    for (i = 0; i < count; i++) {
        const gmm__engine_row *row = &rows[i];
        if (demanded != GMM_ENGINE_AUTO ? row->engine != demanded : !gmm__automatic(row, call)) continue;
        if (gmm__plan_row(row, call, plan)) {
            if (plan->assumes_aligned) gmm__cover_unaligned(rows, count, i, call, plan);
            if (reasons[0]) gmm__note(plan, "%s%s", plan->note[0] ? "; " : "", reasons);
            return GMM_OK;
        }
        length += (size_t)snprintf(reasons + length, sizeof reasons - length, "%s%s %.120s", length ? "; " : "",
                                   gmm_engine_name(row->engine), plan->note);
        if (length >= sizeof reasons) length = sizeof reasons - 1;
    }
    return gmm__refuse(call, GMM_E_UNSUPPORTED,
                       call->engine_by_context && demanded != GMM_ENGINE_AUTO ? "gmm_config.engine" : "options.engine",
                       "%s cannot serve %s: %s", gmm_engine_name(demanded), gmm_op_name(call->op),
                       reasons[0] ? reasons
                       : demanded == GMM_ENGINE_AUTO ? "no engine of this build has it"
                                                     : "this build does not hold that engine");
}

/* Refuses a call that needs what GMM_NO_QUANT or GMM_NO_F16 left out of the build. */
static gmm_status gmm__check_build(const gmm__call *call) {
    gmm_status s = GMM_OK;
#ifdef GMM_NO_QUANT
    const int casts = call->op >= GMM_OP_QUANTIZE && call->op <= GMM_OP_SHARD_CAST;
    const int linear = call->op >= GMM_OP_LINEAR_FWD && call->op <= GMM_OP_LINEAR_WGRAD;
    if (casts || (linear && gmm__quantized(call)) || call->recipe.kind != GMM_RECIPE_NONE ||
        gmm__saves_e4m3(&call->config))
        s = gmm__refuse(call, GMM_E_BUILD, call->path, "FP8, MX and NV formats are left out of this build "
                        "(GMM_NO_QUANT)");
#endif
#ifdef GMM_NO_F16
    int role;
    for (role = 0; role < GMM__ROLES && call->ctx->config.space == GMM_SPACE_CUDA; role++)
        if (call->mat[role].dtype == GMM_F16)
            s = gmm__refuse(call, GMM_E_BUILD, call->path, "kernels for f16 are left out of this build (GMM_NO_F16)");
#endif
    (void)call;
    return s;
}

static gmm_status gmm__select(gmm__call *call, gmm__plan *plan) {
    const gmm_status s = gmm__check_build(call);
    if (s != GMM_OK) return s;
    return gmm__select_from(gmm__engines, sizeof gmm__engines / sizeof gmm__engines[0], call, plan);
}

/* Begin and end of the range in which a call enqueues its work, for profilers. */
static void gmm__range_begin(const gmm__plan *plan) {
#ifdef GMM_WITH_NVTX
    const gmm__call *call = plan->call;
    char name[192];
    (void)snprintf(name, sizeof name, "gmm %s %s%s%s%s", gmm_op_name(call->op), gmm_engine_name(plan->engine),
                   call->shapes[0] ? " (" : "", call->shapes, call->shapes[0] ? ")" : "");
    (void)nvtxRangePushA(name);
#else
    (void)plan;
#endif
}
static void gmm__range_end(void) {
#ifdef GMM_WITH_NVTX
    (void)nvtxRangePop();
#endif
}

/* Launches a plan by its engine, on the current device. */
static gmm_status gmm__launch_on(const gmm__plan *plan, gmm_stream stream) {
    gmm_status s = GMM_E_UNSUPPORTED;
    size_t i = 0;
    while (i < sizeof gmm__engines / sizeof gmm__engines[0] && gmm__engines[i].engine != plan->engine) i++;
    if (i == sizeof gmm__engines / sizeof gmm__engines[0]) return s;
    gmm__range_begin(plan);
    s = gmm__engines[i].ops[plan->call->op].launch(plan, stream);
    gmm__range_end();
    return s;
}

/* Launches on the context's device, and restores the current device. */
static gmm_status gmm__launch(const gmm__plan *plan, gmm_stream stream) {
#ifdef __CUDACC__
    const gmm_context *ctx = plan->call->ctx;
    if (ctx->config.space == GMM_SPACE_CUDA) {
        int current;
        const cudaError_t e = gmm__cuda_enter(ctx, &current);
        const gmm_status s = e == cudaSuccess ? gmm__launch_on(plan, stream) : gmm__cuda_status(plan->call, e);
        gmm__cuda_restore(ctx, current);
        return s;
    }
#endif
    return gmm__launch_on(plan, stream);
}

/* Checks workspace and overlap of a planned call, and launches it. */
static gmm_status gmm__serve_plan(gmm__call *call, gmm__plan *plan, void *workspace, size_t workspace_bytes,
                                  gmm_stream stream) {
    gmm_status s;
    if (workspace_bytes < plan->workspace_bytes)
        return gmm__refuse(call, GMM_E_WORKSPACE, "workspace_bytes", "%llu must be >= %llu, which the query states",
                           (unsigned long long)workspace_bytes, (unsigned long long)plan->workspace_bytes);
    if (!workspace && plan->workspace_bytes > 0)
        return gmm__refuse_that(call, GMM_E_NULL, "workspace", "is NULL for %llu bytes, which the query states",
                                (unsigned long long)plan->workspace_bytes);
    if ((uintptr_t)workspace % GMM__WORKSPACE_ALIGN && plan->workspace_bytes > 0)
        return gmm__refuse(call, GMM_E_ALIGN, "workspace", "%p is not aligned to %d bytes", workspace,
                           (int)GMM__WORKSPACE_ALIGN);
    if ((s = gmm__check_stream(call, stream)) != GMM_OK) return s;
    gmm__add_span(call, "workspace", "", 1, workspace, (int64_t)plan->workspace_bytes);
    plan->workspace = workspace;
    if ((s = gmm__check_overlap(call)) != GMM_OK || (s = gmm__verify(plan, stream)) != GMM_OK) return s;
    gmm__log(call->ctx, GMM_LOG_TRACE, "%s: served by %s%s%s%s%s%s", call->function, gmm_engine_name(plan->engine),
             plan->note[0] ? ": " : "", plan->note, call->shapes[0] ? " (" : "", call->shapes,
             call->shapes[0] ? ")" : "");
    s = gmm__launch(plan, stream);
    return s != GMM_OK ? s : gmm__verify_launch(plan, stream);
}

static gmm_status gmm__serve(gmm__call *call, gmm_info *info, void *workspace, size_t workspace_bytes,
                             gmm_stream stream) {
    gmm__plan plan;
    gmm_info full = GMM_ZERO;
    gmm_status s;
    char rule[96];
    uint32_t size;
    if (!call->query) {
        s = gmm__select(call, &plan);
        return s != GMM_OK ? s : gmm__serve_plan(call, &plan, workspace, workspace_bytes, stream);
    }
    if (!info) return gmm__refuse_that(call, GMM_E_NULL, "info", "is NULL");
    if ((s = gmm__check_size(info->struct_size, sizeof *info, rule)) != GMM_OK)
        return gmm__refuse(call, s, "info", "%s", rule);
    if ((s = gmm__select(call, &plan)) != GMM_OK) return s;
    full.struct_size = size = info->struct_size;
    full.engine = plan.engine;
    full.workspace_bytes = plan.workspace_bytes;
    full.saved_bytes = plan.saved_bytes;
    full.deferred_bytes = plan.deferred_bytes;
    full.weight_cache_bytes = plan.weight_cache_bytes;
    full.in_align = call->in_align ? call->in_align : 1;
    full.out_align = call->out_align ? call->out_align : 1;
    memcpy(full.note, plan.note, sizeof full.note);
    memcpy(info, &full, size ? size : sizeof full);
    return GMM_OK;
}

GMMDEF gmm_status gmm_offsets(gmm_context *ctx, const gmm_groups *groups, int64_t *offsets, gmm_stream stream) {
    gmm__call call;
    gmm_groups g;
    gmm_status s = gmm__open(&call, ctx, GMM_OP_OFFSETS, "gmm_offsets", 0);
    if (s != GMM_OK) return s;
    gmm__peek_groups(groups, &g);
    (void)snprintf(call.shapes, sizeof call.shapes, "G=%d T=%lld", g.count, (long long)g.capacity);
    if ((s = gmm__read_groups(&call, groups)) != GMM_OK) return s; /* any engine: all compute the same offsets */
    if (!offsets) return gmm__refuse_that(&call, GMM_E_NULL, "offsets", "is NULL");
    if ((uintptr_t)offsets % 8)
        return gmm__refuse(&call, GMM_E_ALIGN, "offsets", "%p is not aligned to 8 bytes", (void *)offsets);
    call.output = offsets;
    gmm__add_span(&call, "offsets", "", 1, offsets, (call.groups.count + (int64_t)1) * (int64_t)sizeof *offsets);
    return gmm__serve(&call, NULL, NULL, 0, stream);
}

