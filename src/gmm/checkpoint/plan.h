/* Builds a plan: descriptors, extra tensors, the order of moves, and the cost. */

/* Whether a segment is "_extra_state" or "_extra_state12": a pickle, or with further segments a tensor from one. */
static int gmm__ck_extra_state(const char *name) {
    const char *segment, *dot;
    int64_t number;
    for (; name; name = dot ? dot + 1 : NULL) {
        dot = strchr(name, '.');
        if (strncmp(name, "_extra_state", 12)) continue;
        segment = name + 12;
        if (*segment && segment != dot && !gmm__ck_parse_number(&segment, &number)) continue;
        if (!*segment || segment == dot) return 1;
    }
    return 0;
}

/* Adds a copy of consecutive units of one source tensor. */
static gmm_status gmm__ck_plan_copy(gmm__ck_builder *b, int32_t part, int32_t src, int64_t src_at, int32_t dst,
                                    int64_t dst_at, int64_t units) {
    gmm_ckpt_move m = GMM_ZERO;
    if (units == 0) return GMM_OK;
    m.kind = GMM_CKPT_COPY;
    m.part = part;
    m.src = src;
    m.dst = dst;
    m.scale = -1;
    m.src_at = src_at;
    m.dst_at = dst_at;
    gmm__ck_add_loop(&m, units, 1, 1);
    return gmm__ck_add_move(b, &m);
}

/* Whether a key stands in the module of a linear of experts, and does not say which of all experts it is of: ranks of
   EP and ETP may have other tensors by the same name. */
static int gmm__ck_is_of_rank(gmm__ck_builder *b, const char *name) {
    const gmm_ckpt_scheme *scheme = b->source.scheme;
    const size_t prefix = strlen(b->source_prefix);
    const char *key, *dot;
    size_t state_length;
    int64_t layer, expert, slot_index;
    int32_t r;
    (void)gmm__ck_find_state(b, name, &state_length);
    (void)gmm__ck_strip_key_wrappers(&b->source, name + state_length, b->key_buffer);
    if (strncmp(b->key_buffer, b->source_prefix, prefix)) return 0;
    key = b->key_buffer + prefix;
    for (dot = strchr(key, '.'); b->slot_count && dot; dot = strchr(dot + 1, '.')) {
        const int64_t i = gmm__ck_find_linear(b, key, (size_t)(dot - key), GMM_CKPT_SLOT_ANY, 0, &slot_index);
        if (i >= 0 && (b->linears[i].slot == GMM_CKPT_FC1 || b->linears[i].slot == GMM_CKPT_FC2)) return 1;
    }
    for (r = 0; r < scheme->count; r++) {
        const char *pattern = scheme->rows[r].pattern, *last = strrchr(pattern, '.'), *number = strstr(pattern, "{e}");
        if ((scheme->rows[r].slot != GMM_CKPT_FC1 && scheme->rows[r].slot != GMM_CKPT_FC2) || !last ||
            (scheme->global_index && number && number < last))
            continue;
        if (gmm__ck_match_front(pattern, last + 1, key, &layer, &expert)) return 1;
    }
    return 0;
}

/* Merges an extra tensor of part p with the target `twin` of the same name, which is a tensor of part `from`. Names of
   one part differ, so that two of it meet only where they lose their wrapper segments. */
static gmm_status gmm__ck_merge_extra(gmm__ck_builder *b, const gmm_ckpt_tensor *t, const char *source_name, int32_t p,
                                      int64_t twin, int32_t from) {
    const gmm_ckpt_tensor *k = &b->targets->tensors[twin];
    const gmm_ckpt_rank *r = &b->parts[p].rank, *q = &b->parts[from].rank;
    if (p == from)
        return gmm__ck_refuse(b, GMM_CKPT_DUPLICATE_KEY, source_name, "without wrapper segments it has the name of "
                              "another tensor, \"%.100s\"", t->name);
    if (k->dtype != t->dtype || k->rank != t->rank || k->bytes != t->bytes ||
        memcmp(k->shape, t->shape, (size_t)t->rank * sizeof t->shape[0]))
        return gmm__ck_refuse(b, GMM_CKPT_SHAPE, t->name, "parts of the source have it in different shapes");
    if ((r->ep_rank != q->ep_rank || r->etp_rank != q->etp_rank) && gmm__ck_is_of_rank(b, source_name))
        return gmm__ck_refuse(b, GMM_CKPT_AMBIGUOUS, source_name, "parts of other EP or ETP ranks have it too, and it "
                              "belongs to the experts of a rank: it cannot be kept under one name");
    if (b->report) b->report->merged++;
    return GMM_OK;
}

/* Keeps, drops or refuses the tensors that no linear uses. */
static gmm_status gmm__ck_plan_extra(gmm__ck_builder *b) {
    const int64_t before = b->targets->count;
    int32_t *from; /* the part of each target that is kept */
    int64_t i, n = 0;
    int32_t p;
    for (p = 0; p < b->source.part_count; p++) n += b->parts[p].table->count;
    from = (int32_t *)gmm__ck_alloc(&b->arena, n, sizeof *from);
    if (!from) return gmm__ck_no_memory(b);
    for (p = 0; p < b->source.part_count; p++) {
        const gmm_ckpt_table *table = b->parts[p].table;
        for (i = 0; i < table->count; i++) {
            gmm_ckpt_tensor t = table->tensors[i];
            const int64_t first = b->move_count;
            int64_t twin;
            int32_t target = -1;
            gmm_status status;
            if (b->uses[p][i] == GMM__CK_USED) {
                if (b->report) b->report->matched++;
                continue;
            }
            if (b->uses[p][i] == GMM__CK_DROPPED || (b->source.drop_extra_state && gmm__ck_extra_state(t.name)) ||
                b->source.extra == GMM_CKPT_EXTRA_DROP) {
                if (b->report) b->report->dropped++;
                continue;
            }
            if (b->source.extra == GMM_CKPT_EXTRA_REFUSE)
                return gmm__ck_refuse(b, GMM_CKPT_EXTRA_KEY, t.name, b->uses[p][i] == GMM__CK_PLAIN_SCALE
                                      ? "its weight is not quantized, or not in a format with such scales"
                                      : "no linear uses it");
            if (b->target.drop_wrappers) {
                char *name = (char *)gmm__ck_alloc(&b->arena, (int64_t)strlen(t.name) + 1, 1);
                size_t n;
                if (!name) return gmm__ck_no_memory(b);
                (void)gmm__ck_find_state(b, t.name, &n);
                memcpy(name, t.name, n);
                (void)gmm__ck_strip_wrappers(&b->source, t.name + n, name + n);
                t.name = name;
            }
            twin = gmm_ckpt_table_find(b->targets, t.name);
            if (twin >= before) { /* several ranks hold the same tensor */
                status = gmm__ck_merge_extra(b, &t, table->tensors[i].name, p, twin, from[twin - before]);
                if (status) return status;
                continue;
            }
            if (b->report) b->report->kept++;
            status = gmm__ck_add_target(b, &t, &target);
            if (!status) from[target - before] = p;
            if (!status) status = gmm__ck_plan_copy(b, p, (int32_t)i, 0, target, 0, gmm__ck_unit_count(&t));
            if (!status) status = gmm__ck_finish_target(b, target, first);
            if (status) return status;
        }
    }
    return GMM_OK;
}

typedef struct gmm__ck_order { int64_t offset, index; int32_t part, storage; } gmm__ck_order;

static int gmm__ck_compare_order(const void *a, const void *b) {
    const gmm__ck_order *x = (const gmm__ck_order *)a, *y = (const gmm__ck_order *)b;
    if (x->part != y->part) return x->part < y->part ? -1 : 1;
    if (x->storage != y->storage) return x->storage < y->storage ? -1 : 1;
    if (x->offset != y->offset) return x->offset < y->offset ? -1 : 1;
    return x->index < y->index ? -1 : x->index > y->index;
}

static int gmm__ck_compare_ranges(const void *a, const void *b) {
    const uintptr_t x = (uintptr_t)((const gmm__ck_memory_range *)a)->begin,
        y = (uintptr_t)((const gmm__ck_memory_range *)b)->begin;
    return x < y ? -1 : x > y;
}

/* What dequantizing reads beside the codes: the bytes of the scales of one row of blocks, the least at once, and of
   the scales of `codes` codes. */
static int64_t gmm__ck_scale_row_bytes(const gmm_ckpt_plan *plan, const gmm_ckpt_move *m, int64_t codes,
                                       int64_t *all_bytes) {
    const gmm_ckpt_table *table = plan->parts[m->part].table;
    const int64_t unit = gmm__ck_unit_bytes(table->tensors[m->scale].dtype);
    int64_t rows, cols, scale_rows, scale_cols, block_rows, block_cols, block;
    gmm__ck_scale_shape(&table->tensors[m->src], m->scaling, &rows, &cols, &scale_rows, &scale_cols);
    gmm__ck_block_of(m->scaling, &block_rows, &block_cols);
    if (!gmm__mul(block_rows ? block_rows : rows, block_cols ? block_cols : cols, &block) || block < 1) block = 1;
    *all_bytes = gmm__ceil_div(codes, block) * unit;
    return scale_cols * unit;
}

enum { GMM__CK_SCRATCH_MIN = 64 };

/* Copies the sorted moves into the plan and computes its cost and source ranges. */
static gmm_status gmm__ck_build_plan(gmm__ck_builder *b, gmm_ckpt_plan *plan) {
    gmm__ck_order *order = (gmm__ck_order *)gmm__ck_alloc(&b->arena, b->move_count, sizeof *order);
    int64_t i, s, n = 0;
    int32_t p;
    plan->count = b->move_count;
    plan->part_count = b->source.part_count;
    plan->moves = (gmm_ckpt_move *)gmm__ck_alloc(&plan->arena, b->move_count, sizeof *plan->moves);
    plan->last_move = (int64_t *)gmm__ck_alloc(&plan->arena, b->targets->count, sizeof *plan->last_move);
    plan->parts = (gmm_ckpt_part *)gmm__ck_alloc(&plan->arena, b->source.part_count, sizeof *plan->parts);
    for (p = 0; p < b->source.part_count; p++) n += b->parts[p].table->storage_count;
    plan->source_ranges = (gmm__ck_memory_range *)gmm__ck_alloc(&plan->arena, n, sizeof *plan->source_ranges);
    if (!order || !plan->moves || !plan->last_move || !plan->parts || !plan->source_ranges) return gmm__ck_no_memory(b);
    memcpy(plan->parts, b->parts, (size_t)b->source.part_count * sizeof *plan->parts);
    for (i = 0; i < b->move_count; i++) {
        const gmm_ckpt_move *m = &b->moves[i];
        order[i].index = i;
        order[i].part = m->part;
        if (m->src < 0) continue;
        order[i].storage = b->parts[m->part].table->tensors[m->src].storage;
        order[i].offset = b->parts[m->part].table->tensors[m->src].offset +
                      m->src_at * gmm__ck_unit_bytes(b->parts[m->part].table->tensors[m->src].dtype);
    }
    if (b->move_count) qsort(order, (size_t)b->move_count, sizeof *order, gmm__ck_compare_order);
    for (i = 0; i < b->targets->count; i++) plan->last_move[i] = -1;
    plan->cost.target_bytes = b->target_end;
    plan->cost.scratch_min = GMM__CK_SCRATCH_MIN;
    for (i = 0; i < b->move_count; i++) {
        const gmm_ckpt_move *m = &plan->moves[i];
        const int64_t units = gmm__ck_move_elements(&b->moves[order[i].index]);
        plan->moves[i] = b->moves[order[i].index];
        plan->last_move[m->dst] = i;
        plan->cost.moves[m->kind]++;
        if (m->kind == GMM_CKPT_VIEW) continue;
        plan->cost.bytes_written += units * gmm__ck_unit_bytes(b->targets->tensors[m->dst].dtype);
        if (m->kind == GMM_CKPT_ZERO) continue;
        if (m->kind == GMM_CKPT_DEQUANT) {
            int64_t scale_bytes;
            const int64_t row = gmm__ck_scale_row_bytes(plan, m, units, &scale_bytes);
            const int packed = gmm__ck_is_packed(plan->parts[m->part].table->tensors[m->src].dtype);
            if (8 * 3 * row + GMM__CK_SCRATCH_MIN > plan->cost.scratch_min)
                plan->cost.scratch_min = 8 * 3 * row + GMM__CK_SCRATCH_MIN;
            plan->cost.bytes_read += (packed ? units / 2 : units) + scale_bytes;
        } else {
            plan->cost.bytes_read += units * gmm__ck_unit_bytes(b->parts[m->part].table->tensors[m->src].dtype);
        }
    }
    for (p = 0; p < b->source.part_count; p++)
        for (s = 0; s < b->parts[p].table->storage_count; s++) {
            const gmm__ck_storage *storage = &b->parts[p].table->storages[s];
            if (!storage->base || !storage->bytes) continue;
            plan->source_ranges[plan->source_range_count].begin = storage->base;
            plan->source_ranges[plan->source_range_count++].end = storage->base + storage->bytes;
        }
    if (plan->source_range_count) {
        qsort(plan->source_ranges, (size_t)plan->source_range_count, sizeof *plan->source_ranges,
              gmm__ck_compare_ranges);
        for (i = 1, n = 1; i < plan->source_range_count; i++) {
            gmm__ck_memory_range *last = &plan->source_ranges[n - 1];
            const gmm__ck_memory_range *next = &plan->source_ranges[i];
            if ((uintptr_t)next->begin > (uintptr_t)last->end) plan->source_ranges[n++] = *next;
            else if ((uintptr_t)next->end > (uintptr_t)last->end) last->end = next->end;
        }
        plan->source_range_count = n;
    }
    return GMM_OK;
}

/* Checks that none of the names of an argument is NULL. */
static gmm_status gmm__ck_check_names(gmm__ck_builder *b, const char *argument, const char *const *names,
                                      int32_t count) {
    int32_t i;
    for (i = 0; i < count; i++)
        if (!names[i]) return gmm__ck_refuse(b, GMM_CKPT_ARGUMENT, NULL, "%s[%d] is NULL", argument, i);
    return GMM_OK;
}

/* Copies the parts of the source, and checks their ranks and that of the target. */
static gmm_status gmm__ck_read_parts(gmm__ck_builder *b) {
    int32_t p, q;
    b->parts = (gmm_ckpt_part *)gmm__ck_alloc(&b->arena, b->source.part_count, sizeof *b->parts);
    if (!b->parts) return gmm__ck_no_memory(b);
    memcpy(b->parts, b->source.parts, (size_t)b->source.part_count * sizeof *b->parts);
    for (p = -1; p < b->source.part_count; p++) {
        gmm_ckpt_rank *r = p < 0 ? &b->target.rank : &b->parts[p].rank;
        if (p < 0) r->gtp_rank = r->gtp_size = 0;
        if (r->ep_size == 0) r->ep_size = 1;
        if (r->etp_size == 0) r->etp_size = 1;
        if (r->gtp_size == 0) r->gtp_size = 1;
        if (r->ep_rank < 0 || r->ep_rank >= r->ep_size || r->etp_rank < 0 || r->etp_rank >= r->etp_size ||
            r->gtp_rank < 0 || r->gtp_rank >= r->gtp_size)
            return gmm__ck_refuse(b, GMM_CKPT_ARGUMENT, NULL, "%s: EP %d/%d, ETP %d/%d, GTP %d/%d: ranks must lie in "
                                  "[0, size)", p < 0 ? "target.rank" : "parts", r->ep_rank, r->ep_size,
                                  r->etp_rank, r->etp_size, r->gtp_rank, r->gtp_size);
        if (p >= 0 && !b->parts[p].table)
            return gmm__ck_refuse(b, GMM_CKPT_ARGUMENT, NULL, "parts[%d].table is NULL", p);
        if (p < 0) continue;
        if (r->ep_size != b->parts[0].rank.ep_size || r->etp_size != b->parts[0].rank.etp_size ||
            r->gtp_size != b->parts[0].rank.gtp_size)
            return gmm__ck_refuse(b, GMM_CKPT_ARGUMENT, NULL, "parts[%d] has other sizes of EP, ETP or GTP than "
                                  "parts[0]", p);
        for (q = 0; q < p; q++)
            if (!memcmp(r, &b->parts[q].rank, sizeof *r))
                return gmm__ck_refuse(b, GMM_CKPT_ARGUMENT, NULL, "parts[%d] and parts[%d] are the same rank", q,
                                      p);
    }
    return GMM_OK;
}

/* Whether a pattern's placeholders are known ones, {p} at the front alone, and closed. */
static int gmm__ck_is_pattern(const char *pattern) {
    const char *p;
    for (p = strchr(pattern, '{'); p; p = strchr(p + 3, '{')) {
        if ((p[1] != 'p' && p[1] != 'L' && p[1] != 'e') || p[2] != '}') return 0;
        if (p[1] == 'p' && (p != pattern || p[3] != '.')) return 0;
    }
    return 1;
}

/* Checks a scheme, which may be the caller's: its rows are used as indices. */
static gmm_status gmm__ck_check_scheme(gmm__ck_builder *b, const char *argument, const gmm_ckpt_scheme *scheme) {
    int32_t i, k;
    if (!scheme->name || scheme->count < 0 || (!scheme->rows && scheme->count) || scheme->glu_block < 0)
        return gmm__ck_refuse(b, GMM_CKPT_ARGUMENT, NULL, "%s: name or rows is NULL, or count %d or glu_block %d is "
                              "negative", argument, (int)scheme->count, (int)scheme->glu_block);
    for (i = 0; i < scheme->count; i++) {
        const gmm_ckpt_row *r = &scheme->rows[i];
        const struct { const char *name; int value, end; } fields[] = {
            {"slot", r->slot == GMM_CKPT_SLOT_ANY ? 0 : (int)r->slot, GMM_CKPT_SLOT_COUNT},
            {"kind", (int)r->kind, GMM_CKPT_KIND_COUNT}, {"half", (int)r->half, GMM_CKPT_UP + 1},
            {"form", (int)r->form, GMM_CKPT_TALL + 1}, {"transposed", r->transposed, 2}};
        if (!r->pattern || !gmm__ck_is_pattern(r->pattern))
            return gmm__ck_refuse(b, GMM_CKPT_ARGUMENT, NULL, "%s: rows[%d].pattern is %s%.80s: must be segments with "
                                  "{L}, {e} and, at the front, {p} and a dot", argument, i,
                                  r->pattern ? "" : "NULL", r->pattern ? r->pattern : "");
        for (k = 0; k < (int32_t)(sizeof fields / sizeof fields[0]); k++)
            if (fields[k].value < 0 || fields[k].value >= fields[k].end)
                return gmm__ck_refuse(b, GMM_CKPT_ARGUMENT, NULL, "%s: rows[%d].%s is %d: must be 0 to %d%s", argument,
                                      i, fields[k].name, fields[k].value, fields[k].end - 1,
                                      k ? "" : ", or GMM_CKPT_SLOT_ANY");
    }
    return GMM_OK;
}

/* Copies a list of states with the one at `first` in front. */
static const char *const *gmm__ck_copy_states(gmm__ck_builder *b, const char *const *states, int32_t count,
                                              int32_t first) {
    const char **copy = (const char **)gmm__ck_alloc(&b->arena, count, sizeof *copy);
    int32_t i, n = 1;
    if (!copy) return NULL;
    copy[0] = states[first];
    for (i = 0; i < count; i++)
        if (i != first) copy[n++] = states[i];
    return copy;
}

/* Checks and copies the states of the source and of the target. That of the model, which has no prefix, comes first. */
static gmm_status gmm__ck_read_states(gmm__ck_builder *b) {
    static const char *const model[] = {""};
    int32_t first = 0, i;
    gmm_status s = gmm__ck_check_names(b, "source.states", b->source.states, b->source.state_count);
    if (s) return s;
    if (!b->source.states || !b->source.state_count) {
        b->source.states = model;
        b->source.state_count = 1;
    }
    if (b->target.state_count && (b->target.state_count != b->source.state_count || !b->target.states))
        return gmm__ck_refuse(b, GMM_CKPT_ARGUMENT, NULL, "target.state_count is %d: must be 0 or the source's %d",
                              b->target.state_count, b->source.state_count);
    if ((s = gmm__ck_check_names(b, "target.states", b->target.states, b->target.state_count)) != GMM_OK) return s;
    for (i = 0; i < b->source.state_count && *b->source.states[first]; i++)
        if (!*b->source.states[i]) first = i;
    b->states = gmm__ck_copy_states(b, b->source.states, b->source.state_count, first);
    if (b->target.state_count)
        b->target.states = gmm__ck_copy_states(b, b->target.states, b->target.state_count, first);
    return b->states && (b->target.states || !b->target.state_count) ? GMM_OK : gmm__ck_no_memory(b);
}

/* Reads and checks the source's and target's descriptors, and fills in defaults. */
static gmm_status gmm__ck_read_descriptors(gmm__ck_builder *b, const gmm_ckpt_source *source,
                                           const gmm_ckpt_target *target) {
    const void *descriptors[2];
    void *copies[2];
    size_t sizes[2];
    gmm_status s;
    int32_t i;
    descriptors[0] = source;
    descriptors[1] = target;
    copies[0] = &b->source;
    copies[1] = &b->target;
    sizes[0] = sizeof b->source;
    sizes[1] = sizeof b->target;
    for (i = 0; i < 2; i++) {
        char rule[96];
        const gmm_status s = gmm__read_sized(copies[i], sizes[i], descriptors[i], rule);
        if (s != GMM_OK) {
            (void)gmm__ck_refuse(b, GMM_CKPT_ARGUMENT, NULL, "%s: %s", i ? "target" : "source", rule);
            if (b->report) b->report->error.status = s;
            return s;
        }
    }
    if (!b->source.scheme || !b->source.parts || b->source.part_count < 1 || b->source.wrapper_count < 0 ||
        b->source.state_count < 0 || (b->source.wrapper_count && !b->source.wrappers) ||
        (b->source.state_count && !b->source.states))
        return gmm__ck_refuse(b, GMM_CKPT_ARGUMENT, NULL,
                              "source: scheme, %d parts, %d wrappers or %d states are NULL or out of range",
                              b->source.part_count, b->source.wrapper_count, b->source.state_count);
    if (b->source.prefix && *b->source.prefix && b->source.prefix[strlen(b->source.prefix) - 1] != '.')
        return gmm__ck_refuse(b, GMM_CKPT_ARGUMENT, NULL, "prefix is \"%.100s\": must be empty or end with a dot",
                              b->source.prefix);
    if (b->source.extra < GMM_CKPT_EXTRA_REFUSE || b->source.extra > GMM_CKPT_EXTRA_DROP)
        return gmm__ck_refuse(b, GMM_CKPT_ARGUMENT, NULL, "source.extra is %d: must be a gmm_ckpt_extra",
                              (int)b->source.extra);
    if ((b->source.skip_missing | b->target.views) & ~1 || b->target.reserved)
        return gmm__ck_refuse(b, GMM_CKPT_ARGUMENT, NULL, "source.skip_missing %d and target.views %d must be 0 or 1, "
                              "target.reserved %d must be 0", b->source.skip_missing, b->target.views,
                              b->target.reserved);
    if (!b->target.scheme) b->target.scheme = b->source.scheme;
    if ((s = gmm__ck_check_scheme(b, "source.scheme", b->source.scheme)) != GMM_OK ||
        (s = gmm__ck_check_scheme(b, "target.scheme", b->target.scheme)) != GMM_OK ||
        (s = gmm__ck_check_names(b, "source.wrappers", b->source.wrappers, b->source.wrapper_count)) != GMM_OK ||
        (s = gmm__ck_read_states(b)) != GMM_OK)
        return s;
    for (i = 0; i < 2; i++) {
        const gmm_dtype d = i ? b->target.bias_dtype : b->target.dtype;
        if (d != GMM_NONE && (d < GMM_NONE || d > GMM_I64 || !(GMM__FLOATS >> d & 1)))
            return gmm__ck_refuse(b, GMM_CKPT_DTYPE, NULL, "target.%s is %s: must be none, f32, f16 or bf16",
                                  i ? "bias_dtype" : "dtype", gmm_dtype_name(d));
    }
    if (b->target.glu_block < 0)
        return gmm__ck_refuse(b, GMM_CKPT_NOT_DIVISIBLE, NULL, "target.glu_block is %d: must be >= 0",
                              b->target.glu_block);
    return gmm__ck_read_parts(b);
}

/* Checks and copies the linears of the caller. */
static gmm_status gmm__ck_add_linears(gmm__ck_builder *b, const gmm_ckpt_linear *linears, int64_t count) {
    int64_t i;
    for (i = 0; i < count; i++) {
        gmm_ckpt_linear l = linears[i];
        int64_t slots; /* of the tensors of one row */
        gmm_status status;
        if (l.slot < GMM_CKPT_FC1 || l.slot >= GMM_CKPT_SLOT_COUNT)
            return gmm__ck_refuse(b, GMM_CKPT_ARGUMENT, l.path, "linears[%lld].slot is %d: must be a slot",
                                  (long long)i, (int)l.slot);
        if (l.experts == 0) l.experts = 1;
        if (l.spare < 0)
            return gmm__ck_refuse(b, GMM_CKPT_ARGUMENT, l.path, "linears[%lld].spare is %d: must be >= 0", (long long)i,
                                  l.spare);
        if (l.experts < 1 || l.out < 1 || l.in < 0 || (l.gated && l.out % 2))
            return gmm__ck_refuse(b, GMM_CKPT_ARGUMENT, l.path, "linears[%lld]: %lld experts of %lld x %lld%s: extents "
                                  "must be >= 1 (in: 0 is a vector), gated out even", (long long)i,
                                  (long long)l.experts, (long long)l.out, (long long)l.in, l.gated ? ", gated" : "");
        if (!gmm__ck_fits(l.experts, l.out, l.in ? l.in : 1))
            return gmm__ck_refuse(b, GMM_CKPT_OVERFLOW, l.path, "linears[%lld]: %lld x %lld x %lld do not fit 63 bits",
                                  (long long)i, (long long)l.experts, (long long)l.out, (long long)l.in);
        if (!gmm__mul(l.experts, b->source.part_count, &slots))
            return gmm__ck_refuse(b, GMM_CKPT_OVERFLOW, l.path, "linears[%lld]: %lld experts in %d parts do not fit "
                                  "63 bits", (long long)i, (long long)l.experts, b->source.part_count);
        if (l.path) {
            char *path = (char *)gmm__ck_alloc(&b->arena, (int64_t)strlen(l.path) + 1, 1);
            if (!path) return gmm__ck_no_memory(b);
            if (!gmm__ck_strip_wrappers(&b->source, l.path, path) && !b->source.prefix)
                return gmm__ck_refuse(b, GMM_CKPT_ARGUMENT, NULL, "linears[%lld].path is \"%.60s\", empty without "
                                      "wrapper segments: any key would do%s", (long long)i, l.path,
                                      gmm__ck_is_map(b) ? "" : "; state the prefix");
            l.path = path;
        }
        status = gmm__ck_add_linear(b, &l);
        if (status) return status;
    }
    return GMM_OK;
}

static gmm_status gmm__ck_builder_init(gmm__ck_builder *b, const char *fn, gmm_ckpt_plan **out,
                                       const gmm_allocator *allocator, gmm_ckpt_report *report) {
    gmm_allocator a;
    gmm_status status;
    int32_t storage;
    memset(b, 0, sizeof *b);
    gmm__ck_reset_report(report);
    b->fn = fn;
    b->report = report;
    if (allocator && !allocator->alloc != !allocator->release)
        return gmm__ck_refuse(b, GMM_CKPT_ARGUMENT, NULL, "allocator: 1 of 2 functions is set; set both or none");
    a = gmm__ck_allocator(allocator);
    b->arena.allocator = a;
    if (!out) return GMM_OK; /* a scan */
    *out = (gmm_ckpt_plan *)a.alloc(a.user, sizeof **out);
    if (!*out) return gmm__ck_no_memory(b);
    memset(*out, 0, sizeof **out);
    (*out)->arena.allocator = a;
    status = gmm_ckpt_table_create(&(*out)->targets, &a, NULL);
    if (!status) status = gmm_ckpt_table_add_storage((*out)->targets, NULL, INT64_MAX, &storage, NULL);
    if (status) return gmm__ck_no_memory(b);
    b->targets = (*out)->targets;
    return GMM_OK;
}

static gmm_status gmm__ck_builder_release(gmm__ck_builder *b, gmm_ckpt_plan **out, gmm_status status) {
    gmm__ck_arena_release(&b->arena);
    if (status && out) {
        gmm_ckpt_plan_destroy(*out);
        *out = NULL;
    }
    return status;
}

static gmm_status gmm__ck_fail_null(const char *fn, const char *what, gmm_ckpt_report *report) {
    gmm__ck_reset_report(report);
    if (report) report->reason = GMM_CKPT_ARGUMENT;
    return gmm__fail(report ? &report->error : NULL, GMM_E_NULL, "%s: %s is NULL", fn, what);
}

static gmm_status gmm__ck_create(const char *fn, gmm_ckpt_plan **out, const gmm_ckpt_source *source,
                                 const gmm_ckpt_target *target, const gmm_ckpt_linear *linears, int64_t count,
                                 const gmm_allocator *allocator, gmm_ckpt_report *report) {
    gmm__ck_builder b;
    gmm_status status;
    if (!out) return gmm__ck_fail_null(fn, "out", report);
    *out = NULL;
    if (!source || !target || (!linears && count))
        return gmm__ck_fail_null(fn, !source ? "source" : !target ? "target" : "linears", report);
    status = gmm__ck_builder_init(&b, fn, out, allocator, report);
    if (!status) status = gmm__ck_read_descriptors(&b, source, target);
    if (!status && count < 0) status = gmm__ck_refuse(&b, GMM_CKPT_ARGUMENT, NULL, "count is %lld", (long long)count);
    if (!status) status = gmm__ck_add_linears(&b, linears, count);
    if (!status) status = gmm__ck_read_keys(&b);
    if (!status) status = gmm__ck_check_layers(&b);
    if (!status) status = gmm__ck_find_missing(&b);
    if (!status) status = gmm__ck_refuse_incomplete(&b, NULL);
    if (!status) status = gmm__ck_plan_linears(&b);
    if (!status) status = gmm__ck_plan_extra(&b);
    if (!status) status = gmm__ck_build_plan(&b, *out);
    return gmm__ck_builder_release(&b, out, status);
}

GMMDEF gmm_status gmm_ckpt_plan_create(gmm_ckpt_plan **out, const gmm_ckpt_source *source,
                                       const gmm_ckpt_target *target, const gmm_ckpt_linear *linears, int64_t count,
                                       const gmm_allocator *allocator, gmm_ckpt_report *report) {
    return gmm__ck_create("gmm_ckpt_plan_create", out, source, target, linears, count, allocator, report);
}

GMMDEF void gmm_ckpt_plan_destroy(gmm_ckpt_plan *plan) {
    gmm_allocator a;
    if (!plan) return;
    a = plan->arena.allocator;
    gmm_ckpt_table_destroy(plan->targets);
    gmm__ck_arena_release(&plan->arena);
    a.release(a.user, plan);
}

GMMDEF const gmm_ckpt_table *gmm_ckpt_plan_targets(const gmm_ckpt_plan *plan) { return plan ? plan->targets : NULL; }

GMMDEF const gmm_ckpt_move *gmm_ckpt_plan_moves(const gmm_ckpt_plan *plan, int64_t *count) {
    if (count) *count = plan ? plan->count : 0;
    return plan ? plan->moves : NULL;
}

static int gmm__ck_compare_i64(const void *a, const void *b) {
    const int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return x < y ? -1 : x > y;
}

