/* .............................................................................................. 15.9 Verifying ... */
/* Verifies the moves of a plan, and makes plans of given moves. */

/* A set of elements as nested strided loops, outermost first. */
typedef struct gmm__ck_element_set {
    int64_t offset, count[GMM_CKPT_LOOPS], step[GMM_CKPT_LOOPS];
    int32_t loops;
} gmm__ck_element_set;

/* Distance from the first to the last element, plus one. */
static int64_t gmm__ck_set_span(const gmm__ck_element_set *s) {
    int64_t n = 1;
    int32_t l;
    for (l = 0; l < s->loops; l++) n += (s->count[l] - 1) * s->step[l];
    return n;
}

/* Whether two sets share no element; neither holds an element twice. The outermost loop with the larger step is
   expanded; where both steps are equal, the inner loops are compared modulo that step. */
static int gmm__ck_disjoint(const gmm__ck_element_set *a, const gmm__ck_element_set *b) {
    const int64_t ah = gmm__ck_set_span(a), bh = gmm__ck_set_span(b);
    if (a->offset + ah <= b->offset || b->offset + bh <= a->offset) return 1;
    if (a->loops == 0 || (b->loops && b->step[0] > a->step[0])) {
        if (b->loops == 0) return 0; /* both are one element, the same */
        return gmm__ck_disjoint(b, a);
    }
    if (a->step[0] == 1 && (b->loops == 0 || b->step[0] == 1)) return 0; /* two runs */
    {
        gmm__ck_element_set inner = *a, other = *b;
        const int64_t step = a->step[0];
        int64_t i;
        int32_t l;
        inner.loops--;
        for (l = 0; l < inner.loops; l++) {
            inner.count[l] = a->count[l + 1];
            inner.step[l] = a->step[l + 1];
        }
        if (b->loops && b->step[0] == step) { /* equal outer steps: compare the inner loops modulo the step */
            const int64_t shift = (b->offset - a->offset) / step - ((b->offset - a->offset) % step < 0);
            other.loops--;
            for (l = 0; l < other.loops; l++) {
                other.count[l] = b->count[l + 1];
                other.step[l] = b->step[l + 1];
            }
            other.offset = b->offset - shift * step; /* in [a->offset, a->offset + step) */
            /* iteration i of b overlaps iteration i + shift of a, or the one after it */
            if (shift > -b->count[0] && shift < a->count[0] && !gmm__ck_disjoint(&inner, &other)) return 0;
            other.offset -= step;
            return shift + 1 <= -b->count[0] || shift + 1 >= a->count[0] || gmm__ck_disjoint(&inner, &other);
        }
        { /* only the iterations whose span overlaps b */
            int64_t low = b->offset - a->offset - gmm__ck_set_span(&inner) + 1, high = b->offset + bh - 1 - a->offset;
            low = low <= 0 ? 0 : low / step;
            high = high < 0 ? -1 : high / step;
            if (high >= a->count[0]) high = a->count[0] - 1;
            for (i = low; i <= high; i++) {
                inner.offset = a->offset + i * step;
                if (!gmm__ck_disjoint(&inner, b)) return 0;
            }
        }
        return 1;
    }
}

static gmm__ck_element_set gmm__ck_write_set(const gmm_ckpt_move *m) {
    gmm__ck_element_set s;
    int l;
    memset(&s, 0, sizeof s);
    s.offset = m->dst_at;
    for (l = 0; l < m->loops; l++) {
        if (m->count[l] == 1) continue;
        s.count[s.loops] = m->count[l];
        s.step[s.loops++] = m->dst_step[l];
    }
    return s;
}

/* Number of elements that a move may read of its source tensor, 4-bit elements counted singly. A view may extend past
   the tensor, up to the end of its storage. */
static int64_t gmm__ck_readable_elements(const gmm_ckpt_plan *plan, const gmm_ckpt_move *m) {
    const gmm_ckpt_table *table = plan->parts[m->part].table;
    const gmm_ckpt_tensor *t = &table->tensors[m->src];
    if (m->kind == GMM_CKPT_VIEW) return (table->storages[t->storage].bytes - t->offset) / gmm__ck_unit_bytes(t->dtype);
    return gmm__ck_unit_count(t) * (m->kind == GMM_CKPT_DEQUANT && gmm__ck_is_packed(t->dtype) ? 2 : 1);
}

/* Checks one move alone: indices, bounds, dtypes, and that it writes no element twice. NULL, or the fault. */
static const char *gmm__ck_move_fault(const gmm_ckpt_plan *plan, const gmm_ckpt_move *m) {
    const gmm_ckpt_tensor *d, *s = NULL;
    int64_t src = m->src_at, dst = m->dst_at, inner = 1;
    int l;
    if (m->dst < 0 || m->dst >= plan->targets->count) return "no such target";
    if (m->loops < 1 || m->loops > GMM_CKPT_LOOPS) return "loops out of range";
    if (m->kind < GMM_CKPT_VIEW || m->kind > GMM_CKPT_ZERO) return "no such kind";
    if (m->part < 0 || m->part >= plan->part_count) return "no such part";
    if (m->kind != GMM_CKPT_ZERO && (m->src < 0 || m->src >= plan->parts[m->part].table->count))
        return "no such source";
    if (m->kind == GMM_CKPT_DEQUANT && (m->scale < 0 || m->scale >= plan->parts[m->part].table->count))
        return "no such scale";
    d = &plan->targets->tensors[m->dst];
    if (m->src >= 0 && m->kind != GMM_CKPT_ZERO) s = &plan->parts[m->part].table->tensors[m->src];
    if (m->src_at < 0 || m->dst_at < 0) return "a negative offset";
    for (l = m->loops - 1; l >= 0; l--) {
        int64_t step = 0;
        if (m->count[l] < 1 || m->src_step[l] < 0 || m->dst_step[l] < 0) return "a count or step out of range";
        if (m->count[l] > 1 && m->dst_step[l] < inner) return "it writes an element twice";
        if (!gmm__mul(m->count[l] - 1, m->src_step[l], &step) || src > INT64_MAX - step) return "an offset overflows";
        src += step;
        if (!gmm__mul(m->count[l] - 1, m->dst_step[l], &step) || dst > INT64_MAX - step) return "an offset overflows";
        dst += step;
        if (inner > INT64_MAX - step) return "an offset overflows";
        inner += step;
    }
    if (dst >= gmm__ck_unit_count(d)) return "it writes past the target's end";
    if (!s) return NULL;
    if (src >= gmm__ck_readable_elements(plan, m)) return "it reads past the source's end";
    if ((m->kind == GMM_CKPT_COPY || m->kind == GMM_CKPT_VIEW) &&
        gmm__ck_unit_bytes(s->dtype) != gmm__ck_unit_bytes(d->dtype))
        return "it copies elements of another size";
    if (m->kind == GMM_CKPT_CONVERT && !(GMM__FLOATS >> s->dtype & 1 && GMM__FLOATS >> d->dtype & 1))
        return "it converts what is no float";
    if (m->kind == GMM_CKPT_DEQUANT) {
        const gmm_ckpt_tensor *sc = &plan->parts[m->part].table->tensors[m->scale];
        int64_t rows, cols, scale_rows, scale_cols, block_rows, block_cols;
        if (!(GMM__FLOATS >> d->dtype & 1)) return "it dequantizes into no float";
        if (s->rank < 1 || !gmm__ck_format_of(m->scaling, s->dtype, sc->dtype)) return "no such blocks";
        gmm__ck_block_of(m->scaling, &block_rows, &block_cols);
        if (s->rank == 1 && block_rows != block_cols) return "no such blocks of a vector";
        gmm__ck_scale_shape(s, m->scaling, &rows, &cols, &scale_rows, &scale_cols);
        src = src / cols / rows * scale_rows + gmm__ck_scale_line(m->scaling, src / cols % rows) + 1;
        if (src * scale_cols > gmm__ck_unit_count(sc)) return "it reads past the scales' end";
    }
    return NULL;
}

static int gmm__ck_compare_writes(const void *a, const void *b) {
    const gmm__ck_order *x = (const gmm__ck_order *)a, *y = (const gmm__ck_order *)b;
    if (x->part != y->part) return x->part < y->part ? -1 : 1;
    return x->offset < y->offset ? -1 : x->offset > y->offset;
}

GMMDEF gmm_status gmm_ckpt_verify(const gmm_ckpt_plan *plan, const gmm_ckpt_move *moves, int64_t count,
                                  gmm_error *error) {
    static const char fn[] = "gmm_ckpt_verify";
    gmm__ck_arena arena;
    gmm__ck_order *order;
    int64_t i, next = 0;
    int32_t t;
    gmm_status status = GMM_OK;
    if (!plan) return gmm__fail(error, GMM_E_NULL, "%s: plan is NULL", fn);
    if (!moves) {
        moves = plan->moves;
        count = plan->count;
    }
    if (count < 0) return gmm__fail(error, GMM_E_ARG, "%s: count %lld must be >= 0", fn, (long long)count);
    arena.allocator = plan->arena.allocator;
    arena.top = NULL;
    order = (gmm__ck_order *)gmm__ck_alloc(&arena, count, sizeof *order);
    if (!order) return gmm__fail(error, GMM_E_MEMORY, "%s: no memory for %lld moves", fn, (long long)count);
    for (i = 0; !status && i < count; i++) {
        const char *fault = gmm__ck_move_fault(plan, &moves[i]);
        order[i].part = moves[i].dst; /* sorted by target, then by where the writing begins */
        order[i].offset = moves[i].dst_at;
        order[i].index = i;
        if (fault)
            status = gmm__fail(error, GMM_E_STATE, "%s: moves[%lld]: %s (target %.160s)", fn, (long long)i, fault,
                               moves[i].dst >= 0 && moves[i].dst < plan->targets->count
                                   ? plan->targets->tensors[moves[i].dst].name : "?");
    }
    if (!status && count) qsort(order, (size_t)count, sizeof *order, gmm__ck_compare_writes);
    for (t = 0; !status && t < plan->targets->count; t++) {
        const gmm_ckpt_tensor *d = &plan->targets->tensors[t];
        const int64_t begin = next;
        int64_t sum = 0, j;
        for (; next < count && order[next].part == t; next++) {
            const gmm_ckpt_move *m = &moves[order[next].index];
            const gmm__ck_element_set written = gmm__ck_write_set(m);
            const int64_t n = gmm__ck_move_elements(m);
            if (n > gmm__ck_unit_count(d) - sum) {
                status = gmm__fail(error, GMM_E_STATE, "%s: target %.160s: more is written than its %lld elements", fn,
                                   d->name, (long long)gmm__ck_unit_count(d));
                break;
            }
            sum += n;
            /* replaced by the end of all writes up to here */
            order[next].offset = written.offset + gmm__ck_set_span(&written);
            if (next > begin && order[next - 1].offset > order[next].offset)
                order[next].offset = order[next - 1].offset;
            for (j = next - 1; !status && j >= begin && order[j].offset > written.offset; j--) {
                const gmm__ck_element_set other = gmm__ck_write_set(&moves[order[j].index]);
                if (!gmm__ck_disjoint(&written, &other))
                    status = gmm__fail(error, GMM_E_STATE, "%s: target %.160s: moves[%lld] and moves[%lld] write the "
                                       "same element", fn, d->name, (long long)order[j].index,
                                       (long long)order[next].index);
            }
            if (status) break;
        }
        if (!status && sum != gmm__ck_unit_count(d) && !plan->partial)
            status = gmm__fail(error, GMM_E_STATE, "%s: target %.160s: %lld of its %lld elements are written", fn,
                               d->name, (long long)sum, (long long)gmm__ck_unit_count(d));
    }
    gmm__ck_arena_release(&arena);
    return status;
}

GMMDEF gmm_status gmm_ckpt_plan_of_moves(gmm_ckpt_plan **out, const gmm_ckpt_part *parts, int32_t part_count,
                                         const gmm_ckpt_tensor *targets, int64_t target_count,
                                         const gmm_ckpt_move *moves, int64_t count, int32_t partial,
                                         const gmm_allocator *allocator, gmm_ckpt_report *report) {
    static const char fn[] = "gmm_ckpt_plan_of_moves";
    gmm__ck_builder b;
    gmm_error error = GMM_ZERO;
    gmm_status status;
    int64_t i;
    if (!out) return gmm__ck_fail_null(fn, "out", report);
    *out = NULL;
    if (!parts || (!targets && target_count) || (!moves && count))
        return gmm__ck_fail_null(fn, !parts ? "parts" : !targets && target_count ? "targets" : "moves", report);
    status = gmm__ck_builder_init(&b, fn, out, allocator, report);
    if (!status && (part_count < 1 || target_count < 0 || count < 0 || partial < 0 || partial > 1))
        status = gmm__ck_refuse(&b, GMM_CKPT_ARGUMENT, NULL, "%d parts, %lld targets, %lld moves, partial %d: must be "
                                ">= 1, >= 0, >= 0, and 0 or 1", part_count, (long long)target_count,
                                (long long)count, partial);
    for (i = 0; !status && i < part_count; i++)
        if (!parts[i].table)
            status = gmm__ck_refuse(&b, GMM_CKPT_ARGUMENT, NULL, "parts[%lld].table is NULL", (long long)i);
    if (!status) {
        b.source.part_count = part_count;
        b.parts = (gmm_ckpt_part *)gmm__ck_alloc(&b.arena, part_count, sizeof *b.parts);
        if (!b.parts) status = gmm__ck_no_memory(&b);
        else memcpy(b.parts, parts, (size_t)part_count * sizeof *parts);
    }
    for (i = 0; !status && i < target_count; i++) {
        gmm_ckpt_tensor t = targets[i];
        int32_t index;
        if (t.rank < 0 || t.rank > GMM_CKPT_RANK || t.dtype <= GMM_NONE || t.dtype > GMM_F64)
            status = gmm__ck_refuse(&b, GMM_CKPT_ARGUMENT, t.name, "targets[%lld]: rank %d, dtype %d: must be 0 to %d, "
                                    "and a dtype", (long long)i, t.rank, (int)t.dtype, (int)GMM_CKPT_RANK);
        else if (!gmm__ck_tensor_bytes(&t, &t.bytes))
            status = gmm__ck_refuse(&b, GMM_CKPT_OVERFLOW, t.name, "its bytes do not fit 63 bits");
        else status = gmm__ck_add_target(&b, &t, &index);
    }
    if (!status) { /* gmm__ck_move_fault reads these; loops are checked before they are simplified */
        (*out)->parts = b.parts;
        (*out)->part_count = part_count;
        (*out)->partial = partial;
    }
    for (i = 0; !status && i < count; i++) {
        gmm_ckpt_move m = moves[i];
        const char *fault = m.kind == GMM_CKPT_VIEW ? "a view" : m.loops < 1 || m.loops > GMM_CKPT_LOOPS
                          ? "loops out of range" : NULL;
        int32_t l;
        for (l = 0; !fault && l < m.loops; l++)
            if (m.count[l] < 1 || m.src_step[l] < 0 || m.dst_step[l] < 0) fault = "a count or step out of range";
        if (m.kind == GMM_CKPT_ZERO) m.src = -1;
        if (m.kind != GMM_CKPT_DEQUANT) m.scale = -1; /* gmm_ckpt_apply would read the tensor */
        if (!fault) gmm__ck_simplify_loops(&m);
        if (!fault) fault = gmm__ck_move_fault(*out, &m);
        if (fault) {
            status = gmm__ck_refuse(&b, GMM_CKPT_ARGUMENT, NULL, "moves[%lld]: %s", (long long)i, fault);
            if (report) report->error.status = GMM_E_STATE;
            status = GMM_E_STATE;
        } else status = gmm__ck_add_move(&b, &m);
    }
    if (!status) status = gmm__ck_build_plan(&b, *out);
    if (!status) {
        status = gmm_ckpt_verify(*out, NULL, 0, &error);
        if (status) {
            (void)gmm__ck_refuse(&b, GMM_CKPT_ARGUMENT, NULL, "%.400s", error.text);
            if (report) report->error.status = status;
        }
    }
    return gmm__ck_builder_release(&b, out, status);
}

GMMDEF gmm_status gmm_ckpt_cost_of(const gmm_ckpt_plan *plan, gmm_ckpt_cost *cost, gmm_error *error) {
    gmm_status s;
    char rule[96];
    uint32_t size;
    if (!plan || !cost) return gmm__fail(error, GMM_E_NULL, "gmm_ckpt_cost_of: %s is NULL", plan ? "cost" : "plan");
    size = cost->struct_size;
    if ((s = gmm__check_size(size, sizeof *cost, rule)) != GMM_OK)
        return gmm__fail(error, s, "gmm_ckpt_cost_of: cost: %s", rule);
    memcpy(cost, &plan->cost, size ? size : sizeof *cost);
    cost->struct_size = size;
    return GMM_OK;
}

