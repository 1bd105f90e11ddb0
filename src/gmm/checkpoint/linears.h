/* .............................................................................................. 15.7 Building ... */
/* Checks linears, reports missing tensors, and plans one linear in one state. */

static int gmm__ck_find_row(const gmm_ckpt_scheme *scheme, const gmm_ckpt_linear *l, gmm_ckpt_kind kind,
                            const gmm_ckpt_row **row) {
    int32_t i;
    for (i = 0; i < scheme->count; i++) {
        const gmm_ckpt_row *r = &scheme->rows[i];
        if (r->kind != kind || (r->slot != l->slot && (r->slot != GMM_CKPT_SLOT_ANY || !l->path))) continue;
        *row = r;
        return 1;
    }
    return 0;
}

static const char *gmm__ck_slot_name(gmm_ckpt_slot slot) {
    static const char *const names[] = {
#define GMM__X(name, value, text, grouped, rows, cols) #text,
        GMM_CKPT_SLOT_LIST(GMM__X)
#undef GMM__X
    };
    return slot >= 0 && slot < GMM_CKPT_SLOT_COUNT ? names[slot] : "?";
}

static int64_t gmm__ck_find_slot(const gmm__ck_builder *b, gmm_ckpt_slot slot, int64_t layer) {
    int64_t at = 0;
    return b->slot_count ? gmm__ck_find_linear(b, NULL, 0, slot, layer, &at) : -1;
}

/* Name of the first tensor that the source has of a linear, or NULL. */
static const char *gmm__ck_first_key(const gmm__ck_builder *b, int64_t linear) {
    int64_t i;
    for (i = 0; i < b->match_count && b->matches[i].linear != linear; i++) {}
    return i < b->match_count ? b->parts[b->matches[i].part].table->tensors[b->matches[i].tensor].name : NULL;
}

/* Checks one linear against the second of its pair: fc1 or shared_fc1 against fc2 or shared_fc2. */
static gmm_status gmm__ck_check_pair(gmm__ck_builder *b, int64_t first, int64_t second) {
    const gmm_ckpt_linear *l = &b->linears[first], *m = &b->linears[second];
    const char *a = gmm__ck_slot_name(l->slot), *c = gmm__ck_slot_name(m->slot);
    const char *key = gmm__ck_first_key(b, second);
    if (l->experts != m->experts)
        return gmm__ck_refuse(b, GMM_CKPT_SHAPE, key, "layer %lld: %s has %lld experts, %s %lld",
                              (long long)l->layer, c, (long long)m->experts, a, (long long)l->experts);
    if (!l->in || !m->in) return GMM_OK; /* vectors */
    if (l->in != m->out)
        return gmm__ck_refuse(b, GMM_CKPT_SHAPE, key, "layer %lld: %s gives %lld features, %s takes %lld",
                              (long long)l->layer, c, (long long)m->out, a, (long long)l->in);
    if (l->out / (l->gated ? 2 : 1) != m->in)
        return gmm__ck_refuse(b, GMM_CKPT_SHAPE, key, "layer %lld: %s takes %lld features, %s%s gives %lld",
                              (long long)l->layer, c, (long long)m->in, l->gated ? "gated " : "", a,
                              (long long)l->out);
    return GMM_OK;
}

/* Checks that the linears of each layer agree in experts and features. */
static gmm_status gmm__ck_check_layers(gmm__ck_builder *b) {
    int64_t i;
    for (i = 0; i < b->linear_count; i++) {
        const gmm_ckpt_linear *l = &b->linears[i];
        gmm_status status = GMM_OK;
        int64_t other;
        if (l->path || !l->out) continue;
        if (l->slot == GMM_CKPT_FC1 || l->slot == GMM_CKPT_SHARED_FC1) {
            other = gmm__ck_find_slot(b, l->slot == GMM_CKPT_FC1 ? GMM_CKPT_FC2 : GMM_CKPT_SHARED_FC2, l->layer);
            if (other >= 0 && b->linears[other].out) status = gmm__ck_check_pair(b, i, other);
        }
        if (status) return status;
        if (l->slot != GMM_CKPT_ROUTER && l->slot != GMM_CKPT_ROUTER_CORRECTION) continue;
        other = gmm__ck_find_slot(b, GMM_CKPT_FC1, l->layer);
        if (other < 0 || !b->linears[other].out) other = gmm__ck_find_slot(b, GMM_CKPT_FC2, l->layer);
        if (other < 0 || !b->linears[other].out || l->out - l->spare == b->linears[other].experts) continue;
        return gmm__ck_refuse(b, GMM_CKPT_SHAPE, gmm__ck_first_key(b, i), "layer %lld: %s has %lld rows%s, %s %lld "
                              "experts%s", (long long)l->layer, gmm__ck_slot_name(l->slot), (long long)l->out,
                              l->spare ? ", some of them spare" : "", gmm__ck_slot_name(b->linears[other].slot),
                              (long long)b->linears[other].experts,
                              l->out > b->linears[other].experts ? ": state their number if the other rows are spare"
                                                                 : "");
    }
    return GMM_OK;
}

/* Records that the source lacks experts [first, last] of a row; row -1: layers. */
static gmm_status gmm__ck_add_missing(gmm__ck_builder *b, int64_t linear, int32_t row, int32_t state, int32_t part,
                                      int64_t first, int64_t last) {
    const gmm_ckpt_linear *l = row < 0 ? NULL : &b->linears[linear];
    void *array = b->missing_ranges;
    gmm__ck_missing_range m;
    memset(&m, 0, sizeof m);
    m.linear = (int32_t)linear;
    m.layer = l && !l->path ? l->layer : linear;
    m.row = row;
    m.state = state;
    m.part = part;
    m.first = first;
    m.last = last;
    if (!gmm__ck_reserve(&b->arena, &array, b->missing_range_count, &b->missing_range_capacity,
                         sizeof *b->missing_ranges))
        return gmm__ck_no_memory(b);
    b->missing_ranges = (gmm__ck_missing_range *)array;
    b->missing_ranges[b->missing_range_count++] = m;
    b->missing += last - first + 1;
    return GMM_OK;
}

/* Records the tensors of one row that parts lack, given its matches. */
static gmm_status gmm__ck_find_missing_tensors(gmm__ck_builder *b, const gmm__ck_array *x, int64_t linear, int32_t row,
                                               int32_t state, const gmm__ck_match *matches, int64_t count) {
    const int several = b->source.scheme->rows[row].form == GMM_CKPT_EACH && x->grouped;
    const int64_t part_experts = several ? gmm__ck_part_experts(b, x) : 1;
    int64_t at = 0;
    int32_t p;
    for (p = 0; p < b->source.part_count; p++) {
        const int64_t base = several && b->source.scheme->global_index ? b->parts[p].rank.ep_rank * part_experts : 0;
        int64_t next = base;
        const int reads = gmm__ck_part_is_read(b, x, p);
        gmm_status status = GMM_OK;
        for (; at < count && matches[at].part == p; at++) {
            const int64_t e = several ? matches[at].expert : 0;
            if (reads && !status && e > next && next < base + part_experts)
                status = gmm__ck_add_missing(b, linear, row, state, p, next, gmm__min_i64(e, base + part_experts) - 1);
            if (e >= next) next = e + 1;
        }
        if (reads && !status && next < base + part_experts)
            status = gmm__ck_add_missing(b, linear, row, state, p, next, base + part_experts - 1);
        if (status) return status;
    }
    return GMM_OK;
}

/* The row that is assumed for a linear without any key: its form and scaling follow those of other weights. */
static const gmm_ckpt_row *gmm__ck_default_row(const gmm__ck_builder *b, const gmm_ckpt_linear *l, gmm_ckpt_kind kind) {
    const gmm_ckpt_scheme *scheme = b->source.scheme;
    const gmm_ckpt_row *other = NULL, *best = NULL;
    int score = -1;
    int64_t i;
    int32_t r;
    for (i = 0; i < b->match_count && !other; i++) {
        const gmm_ckpt_row *row = &scheme->rows[b->matches[i].row];
        if (row->kind == GMM_CKPT_WEIGHT && (row->slot <= GMM_CKPT_FC2 || row->slot == GMM_CKPT_SLOT_ANY)) other = row;
    }
    for (r = 0; r < scheme->count; r++) {
        const gmm_ckpt_row *row = &scheme->rows[r];
        int now;
        if (row->kind != kind || (row->slot != l->slot && (row->slot != GMM_CKPT_SLOT_ANY || !l->path))) continue;
        now = !other ? 0 : 2 * ((row->form == GMM_CKPT_EACH) == (other->form == GMM_CKPT_EACH)) +
                           (row->scaling == other->scaling);
        if (now > score) best = row;
        if (now > score) score = now;
    }
    return best;
}

/* Records what the source lacks of one linear in one state. Where several rows match one half, nothing is recorded:
   gmm__ck_group_matches reports it. */
static gmm_status gmm__ck_find_missing_rows(gmm__ck_builder *b, int64_t index, int32_t state,
                                            const gmm__ck_match *matches, int64_t count) {
    const gmm_ckpt_scheme *scheme = b->source.scheme;
    const gmm_ckpt_linear *l = &b->linears[index];
    int kind, half;
    for (kind = GMM_CKPT_WEIGHT; kind <= (l->bias ? GMM_CKPT_BIAS : GMM_CKPT_WEIGHT); kind++) {
        const gmm__ck_array x = gmm__ck_make_array(l, (gmm_ckpt_kind)kind);
        int64_t begin[3] = {0, 0, 0}, end[3] = {0, 0, 0}, i;
        int32_t rows[3] = {-1, -1, -1}, r;
        const gmm_ckpt_row *like = NULL;
        int doubtful = x.grouped && x.experts % b->parts[0].rank.ep_size;
        for (i = 0; i < count; i++) {
            const gmm_ckpt_row *row = &scheme->rows[matches[i].row];
            if ((int)matches[i].kind != kind) continue;
            doubtful |= rows[row->half] >= 0 && rows[row->half] != matches[i].row;
            if (rows[row->half] < 0) begin[row->half] = i;
            rows[row->half] = matches[i].row;
            end[row->half] = i + 1;
            if (!like) like = row;
        }
        if (doubtful || (rows[GMM_CKPT_BOTH] >= 0 && (rows[GMM_CKPT_GATE] >= 0 || rows[GMM_CKPT_UP] >= 0))) continue;
        if (!like) like = gmm__ck_default_row(b, l, (gmm_ckpt_kind)kind);
        for (r = 0; like && rows[GMM_CKPT_BOTH] < 0 && r < scheme->count; r++) { /* the other half, or all */
            const gmm_ckpt_row *row = &scheme->rows[r];
            if ((int)row->kind != kind || (row->slot != l->slot && (row->slot != GMM_CKPT_SLOT_ANY || !l->path)))
                continue;
            if (row->form == like->form && row->scaling == like->scaling && rows[row->half] < 0 &&
                (row->half == GMM_CKPT_BOTH) == (like->half == GMM_CKPT_BOTH))
                rows[row->half] = r;
        }
        for (half = 0; half < 3; half++) {
            gmm_status status = GMM_OK;
            if (rows[half] >= 0)
                status = gmm__ck_find_missing_tensors(b, &x, index, rows[half], state,
                                                      matches ? matches + begin[half] : NULL,
                                              end[half] - begin[half]);
            if (status) return status;
        }
    }
    return GMM_OK;
}

/* Orders missing ranges so that those of one row, state and part are neighbours. */
static int gmm__ck_compare_missing(const void *a, const void *b) {
    const gmm__ck_missing_range *x = (const gmm__ck_missing_range *)a, *y = (const gmm__ck_missing_range *)b;
    if (x->state != y->state) return x->state < y->state ? -1 : 1;
    if (x->row != y->row) return x->row < y->row ? -1 : 1;
    if (x->part != y->part) return x->part < y->part ? -1 : 1;
    if (x->layer != y->layer) return x->layer < y->layer ? -1 : 1;
    return x->first < y->first ? -1 : x->first > y->first;
}

/* Appends a range of numbers to a text that starts with "{", as in "{3,5-7}". */
static void gmm__ck_add_numbers(char *text, size_t capacity, int64_t first, int64_t last) {
    const size_t n = strlen(text);
    if (n + 48 > capacity) {
        if (text[n - 1] != '.') memcpy(text + n, ",...", 5);
        return;
    }
    (void)snprintf(text + n, capacity - n, first == last ? "%s%lld" : "%s%lld-%lld", n > 1 ? "," : "", (long long)first,
                   (long long)last);
}

static const char *gmm__ck_end_numbers(char *text) {
    const size_t n = strlen(text);
    if (!strpbrk(text, ",-")) return text + 1;
    memcpy(text + n, "}", 2);
    return text;
}

enum { GMM__CK_SET_CHARS = 120 };

/* Names the missing ranges from *at on that differ in layer only by one pattern with number sets. *at moves past them.
   */
static char *gmm__ck_missing_set_name(gmm__ck_builder *b, const gmm_ckpt_row *layer_row, int64_t *at,
                                      int64_t *tensors) {
    const gmm__ck_missing_range *m = &b->missing_ranges[*at], *next = m,
        *end = b->missing_ranges + b->missing_range_count;
    const gmm_ckpt_row *row = m->row < 0 ? layer_row : &b->source.scheme->rows[m->row];
    const gmm_ckpt_rank *rank = &b->parts[m->part].rank, *size = &b->parts[0].rank;
    const gmm_ckpt_linear *l = m->row < 0 ? NULL : &b->linears[m->linear];
    char layers[GMM__CK_SET_CHARS] = "{", experts[GMM__CK_SET_CHARS] = "{", *name, *to;
    int64_t n = 0, i, from = m->layer, to_layer = m->layer;
    *tensors = 0;
    for (; m + n < end && m[n].layer == m->layer && m[n].row == m->row && m[n].state == m->state &&
         m[n].part == m->part; n++)
        gmm__ck_add_numbers(experts, sizeof experts, m[n].first, m[n].last);
    for (;;) {
        for (i = 0; i < n; i++) *tensors += next[i].last - next[i].first + 1;
        next += n;
        for (i = 0; i < n && next + i < end && next[i].first == m[i].first && next[i].last == m[i].last &&
             next[i].layer == next->layer && next[i].row == m->row && next[i].state == m->state &&
             next[i].part == m->part; i++) {}
        if (i < n || (l && l->path) || (next + n < end && next[n].layer == next->layer && next[n].row == m->row &&
                                        next[n].state == m->state && next[n].part == m->part))
            break;
        if (next->layer != to_layer + 1) {
            gmm__ck_add_numbers(layers, sizeof layers, from, to_layer);
            from = next->layer;
        }
        to_layer = next->layer;
    }
    gmm__ck_add_numbers(layers, sizeof layers, from, to_layer);
    *at = next - b->missing_ranges;
    name = gmm__ck_missing_name(b, row, m->state, l, gmm__ck_end_numbers(layers), gmm__ck_end_numbers(experts));
    if (!name || b->source.part_count == 1) return name;
    to = (char *)gmm__ck_alloc(&b->arena, (int64_t)strlen(name) + 64, 1);
    if (!to) return NULL;
    n = snprintf(to, strlen(name) + 64, "%s", name);
    if (size->ep_size > 1) n += snprintf(to + n, 20, " of EP %d", (int)rank->ep_rank);
    if (size->etp_size > 1) n += snprintf(to + n, 20, " of ETP %d", (int)rank->etp_rank);
    if (size->gtp_size > 1) (void)snprintf(to + n, 20, " of GTP %d", (int)rank->gtp_rank);
    return to;
}

/* Fails with the list of missing tensors, unless skip_missing allows them. */
static gmm_status gmm__ck_refuse_incomplete(gmm__ck_builder *b, const gmm_ckpt_row *layer_row) {
    char text[340] = "", hint[100] = "", layer[24], expert[24], *name;
    int64_t at = 0, listed = 0, tensors = 0;
    const gmm__ck_missing_range *m = b->missing_ranges;
    size_t n = 0;
    if (b->report) b->report->missing = b->missing;
    if (!b->missing_range_count || b->source.skip_missing) return GMM_OK;
    if (!b->report) return GMM_E_KEY;
    qsort(b->missing_ranges, (size_t)b->missing_range_count, sizeof *b->missing_ranges, gmm__ck_compare_missing);
    while (at < b->missing_range_count) {
        name = gmm__ck_missing_set_name(b, layer_row, &at, &tensors);
        if (!name) return gmm__ck_no_memory(b);
        if (n && n + strlen(name) > sizeof text - 60) break;
        gmm__ck_truncate(text + n, sizeof text - 60 - n, n ? ", " : "");
        n += strlen(text + n);
        gmm__ck_truncate(text + n, sizeof text - 56 - n, name);
        n += strlen(text + n);
        listed += tensors;
    }
    if (listed < b->missing)
        (void)snprintf(text + n, sizeof text - n, ", and %lld more", (long long)(b->missing - listed));
    (void)snprintf(layer, sizeof layer, "%lld", (long long)m->layer);
    (void)snprintf(expert, sizeof expert, "%lld", (long long)m->first);
    name = gmm__ck_missing_name(b, m->row < 0 ? layer_row : &b->source.scheme->rows[m->row], m->state,
                               m->row < 0 ? NULL : &b->linears[m->linear], layer, expert);
    if (!name) return gmm__ck_no_memory(b);
    b->report->reason = GMM_CKPT_MISSING_INDEX;
    gmm__ck_truncate(b->report->key, sizeof b->report->key, name);
    if (b->extra_router_rows)
        (void)snprintf(hint, sizeof hint, " (layer %lld routes to %lld: if some rows are spare, state the experts)",
                       (long long)b->extra_router_layer, (long long)b->extra_router_rows);
    return gmm__fail(&b->report->error, GMM_E_KEY, "%s: the source lacks %s%s", b->fn, text, hint);
}

/* Records what the source lacks of all linears. */
static gmm_status gmm__ck_find_missing(gmm__ck_builder *b) {
    int64_t at = 0, i;
    int32_t s;
    for (i = 0; i < b->linear_count; i++)
        for (s = 0; s < b->source.state_count; s++) {
            const int64_t begin = at;
            gmm_status status;
            while (at < b->match_count && b->matches[at].linear == i && b->matches[at].state == s) at++;
            if (!b->state_present[s] && s > 0) continue;
            status = gmm__ck_find_missing_rows(b, i, s, b->matches ? b->matches + begin : NULL, at - begin);
            if (status) return status;
        }
    return GMM_OK;
}

static gmm_status gmm__ck_check_multiple(gmm__ck_builder *b, const gmm_ckpt_linear *l, int64_t extent, int64_t by,
                                         const char *what, const char *unit) {
    if (by > 0 && extent % by == 0) return GMM_OK;
    return gmm__ck_refuse(b, GMM_CKPT_NOT_DIVISIBLE, l->path, "slot %d of layer %lld: %s %lld is no multiple of %s "
                          "%lld", (int)l->slot, (long long)l->layer, what, (long long)extent, unit, (long long)by);
}

/* Determines the blocks of gate and up rows of a gated FC1 in the source and in the target. */
static gmm_status gmm__ck_glu_blocks(gmm__ck_builder *b, const gmm_ckpt_linear *l, const gmm__ck_row_tensors *weight,
                                     int64_t *src_block, int64_t *dst_block) {
    const gmm_ckpt_source *s = &b->source;
    const gmm_ckpt_target *t = &b->target;
    gmm_ckpt_glu known = s->stated.known ? s->stated : s->recorded;
    const char *key = l->path;
    const gmm_ckpt_linear *x = l;
    gmm__ck_array probe;
    *src_block = 0;
    *dst_block = t->scheme->glu_known ? t->scheme->glu_block : t->glu_block;
    if (l->slot != GMM_CKPT_FC1) *dst_block = 0;
    if (l->slot != GMM_CKPT_FC1 || !l->gated) return GMM_OK;
    if (s->stated.known && s->recorded.known && s->stated.block != s->recorded.block)
        return gmm__ck_refuse(b, GMM_CKPT_GLU_CONFLICT, key, "gate and up rows: blocks of %d are stated, blocks of %d "
                              "recorded (0 = halves)", (int)s->stated.block, (int)s->recorded.block);
    if (t->scheme->glu_known && t->glu_block && t->glu_block != t->scheme->glu_block)
        return gmm__ck_refuse(b, GMM_CKPT_GLU_CONFLICT, key, "gate and up rows: blocks of %d are wanted, the scheme %s "
                              "has %d (0 = halves)", (int)t->glu_block, t->scheme->name, (int)t->scheme->glu_block);
    if (!weight[GMM_CKPT_BOTH].row) return GMM_OK; /* gate and up are separate tensors */
    if (s->scheme->glu_known) {
        if (known.known && known.block != s->scheme->glu_block)
            return gmm__ck_refuse(b, GMM_CKPT_GLU_CONFLICT, key, "gate and up rows: blocks of %d are stated or "
                                  "recorded, the scheme %s has %d (0 = halves)", known.block, s->scheme->name,
                                  (int)s->scheme->glu_block);
        known.known = 1;
        known.block = s->scheme->glu_block;
    }
    if (known.block < 0)
        return gmm__ck_refuse(b, GMM_CKPT_NOT_DIVISIBLE, key, "gate and up rows: blocks of %d", known.block);
    memset(&probe, 0, sizeof probe);
    probe.linear = x;
    if (!known.known && (*dst_block || b->parts[0].rank.etp_size > 1 || t->rank.etp_size > 1 ||
                         !gmm__ck_target_row(b, &probe, GMM_CKPT_BOTH, 0, 0)))
        return gmm__ck_refuse(b, GMM_CKPT_GLU_UNKNOWN, key, "gate and up rows of layer %lld would move, but nothing "
                              "says whether the source has them as halves or in blocks: state it",
                              (long long)l->layer);
    *src_block = known.block;
    return GMM_OK;
}

/* Marks scales whose weights are not quantized: they are extra. */
static void gmm__ck_mark_plain_scales(gmm__ck_builder *b, int64_t part_experts, const gmm__ck_row_tensors *weight,
                                      const gmm__ck_row_tensors *scale) {
    int64_t i, e;
    int h;
    for (h = 0; h < 3; h++)
        for (i = 0; weight[h].row && scale[h].row && i < b->source.part_count * part_experts; i++) {
            const int64_t part = i / part_experts, first = scale[h].row->form == GMM_CKPT_EACH ? i % part_experts : 0;
            const int64_t end = scale[h].row->form == GMM_CKPT_EACH ? first + 1 : part_experts;
            int plain = 0, quantized = weight[h].row->scaling == GMM_SCALING_MX32;
            for (e = first; e < end; e++) {
                const int32_t t =
                    weight[h].tensor[part * part_experts + (weight[h].row->form == GMM_CKPT_EACH ? e : 0)];
                const gmm_dtype dtype = t < 0 ? GMM_NONE : b->parts[part].table->tensors[t].dtype;
                plain |= t >= 0;
                quantized |= dtype == GMM_E4M3 || dtype == GMM_E5M2;
            }
            if (plain && !quantized && scale[h].tensor[i] >= 0)
                b->uses[part][scale[h].tensor[i]] = GMM__CK_PLAIN_SCALE;
        }
}

/* Checks that all keys of a linear in one state have the same wrapper segments, unless names lose them. */
static gmm_status gmm__ck_check_wrappers(gmm__ck_builder *b, const gmm__ck_match *matches, int64_t count) {
    int64_t i;
    for (i = 0; i < count && !b->target.drop_wrappers; i++)
        if (!gmm__ck_same_wrappers(&b->source, gmm__ck_match_key(b, &matches[i]), gmm__ck_match_key(b, &matches[0])))
            return gmm__ck_refuse(b, GMM_CKPT_AMBIGUOUS,
                                  b->parts[matches[i].part].table->tensors[matches[i].tensor].name,
                                  "its wrapper segments are not those of \"%.100s\"%s",
                                  gmm__ck_match_key(b, &matches[0]),
                                  gmm__ck_is_map(b) ? "" : ": target.drop_wrappers leaves them out");
    return GMM_OK;
}

/* Checks that gate and up tensors are both there, and belong to a gated linear. */
static gmm_status gmm__ck_check_halves(gmm__ck_builder *b, const gmm__ck_array *x, const gmm__ck_row_tensors *weight) {
    if (!weight[GMM_CKPT_GATE].row != !weight[GMM_CKPT_UP].row) {
        const int half = weight[GMM_CKPT_GATE].row ? GMM_CKPT_GATE : GMM_CKPT_UP;
        const gmm_ckpt_tensor *t;
        int64_t i;
        for (i = 0; weight[half].tensor[i] < 0; i++) {}
        t = &b->parts[i / gmm__ck_part_experts(b, x)].table->tensors[weight[half].tensor[i]];
        return gmm__ck_refuse(b, GMM_CKPT_MISSING_INDEX, t->name, "the source lacks the other of gate and up");
    }
    if (weight[GMM_CKPT_GATE].row && !x->linear->gated)
        return gmm__ck_refuse(b, GMM_CKPT_ARGUMENT, x->linear->path,
                              "linears: gated is 0, but the source has gate and up");
    return GMM_OK;
}

/* The ETP size of the source's or the target's ranks; 1 where ETP does not shard the array. */
static int64_t gmm__ck_etp_size(const gmm__ck_array *x, const gmm_ckpt_rank *rank) {
    return x->rows_sharded || x->cols_sharded ? rank->etp_size : 1;
}

/* Checks that EP, ETP and the blocks of gate and up rows divide a weight on both sides. */
static gmm_status gmm__ck_check_extents(gmm__ck_builder *b, const gmm__ck_array *x, const gmm__ck_transfer *g) {
    const gmm_ckpt_linear *l = x->linear;
    const gmm_ckpt_rank *ranks[2];
    const int64_t blocks[2] = {g->src_block, x->halves == 2 ? g->dst_block : 0};
    gmm_status status = GMM_OK;
    int i;
    ranks[0] = &b->parts[0].rank;
    ranks[1] = &b->target.rank;
    for (i = 0; !status && x->grouped && i < 2; i++)
        status = gmm__ck_check_multiple(b, l, x->experts, ranks[i]->ep_size, "experts", "EP");
    for (i = 0; !status && i < 2; i++)
        status = gmm__ck_check_multiple(b, l, x->rows_sharded ? x->f : x->k, gmm__ck_etp_size(x, ranks[i]),
                                        "the cut extent", "ETP");
    for (i = 0; !status && i < 2; i++)
        if (blocks[i])
            status = gmm__ck_check_multiple(b, l, x->f / (x->rows_sharded ? gmm__ck_etp_size(x, ranks[i]) : 1),
                                            blocks[i], "a rank's gate rows",
                                            i ? "the target's block" : "the source's block");
    return status;
}

/* Whether any weight is quantized. *last is the last weight tensor of the source. */
static int gmm__ck_is_quantized(const gmm__ck_builder *b, const gmm__ck_array *x, const gmm__ck_row_tensors *weight,
                                const gmm_ckpt_tensor **last) {
    const int64_t part_experts = gmm__ck_part_experts(b, x);
    int quantized = 0, half;
    int64_t i;
    for (i = 0; i < b->source.part_count * part_experts; i++)
        for (half = 0; half < 3; half++) {
            if (!weight[half].row || weight[half].tensor[i] < 0) continue;
            *last = &b->parts[i / part_experts].table->tensors[weight[half].tensor[i]];
            quantized |= weight[half].row->scaling == GMM_SCALING_MX32 || (*last)->dtype == GMM_E4M3 ||
                         (*last)->dtype == GMM_E5M2;
        }
    return quantized;
}

/* Checks that no rank's shard and no gate or up block cuts a block of br x bc scaled elements. */
static gmm_status gmm__ck_check_scale_blocks(gmm__ck_builder *b, const gmm__ck_array *x, const gmm__ck_transfer *g,
                                             int64_t br, int64_t bc) {
    static const char unit[] = "scale blocks of";
    const gmm_ckpt_linear *l = x->linear;
    const int64_t src_etp = gmm__ck_etp_size(x, &b->parts[0].rank), dst_etp = gmm__ck_etp_size(x, &b->target.rank);
    const int fused = x->halves == 2 && (g->weight[GMM_CKPT_BOTH].row ||
                                         gmm__ck_target_row(b, x, GMM_CKPT_BOTH, 0, g->blocks));
    gmm_status status;
    if (!fused && src_etp <= 1 && dst_etp <= 1 && !g->cut && !gmm__ck_is_gtp_sharded(b, x)) return GMM_OK;
    status = gmm__ck_check_multiple(b, l, x->f / (x->rows_sharded ? src_etp : 1), br, "rows", unit);
    if (!status) status = gmm__ck_check_multiple(b, l, x->f / (x->rows_sharded ? dst_etp : 1), br, "rows", unit);
    if (!status && x->cols_sharded) status = gmm__ck_check_multiple(b, l, x->k / src_etp, bc, "columns", unit);
    if (!status && x->cols_sharded) status = gmm__ck_check_multiple(b, l, x->k / dst_etp, bc, "columns", unit);
    if (!status && g->src_block) status = gmm__ck_check_multiple(b, l, g->src_block, br, "the block", unit);
    if (!status && g->dst_block) status = gmm__ck_check_multiple(b, l, g->dst_block, br, "the block", unit);
    return status;
}

/* Plans quantized weights that stay quantized, and their scales: blocks and scales move alike. `last` names the weight
   in the message about missing scales. */
static gmm_status gmm__ck_plan_quantized(gmm__ck_builder *b, gmm__ck_array x, gmm__ck_transfer g,
                                         gmm__ck_row_tensors *scale, int mx, const gmm_ckpt_tensor *last) {
    const int64_t br = mx ? 1 : 128, bc = mx ? 32 : 128;
    gmm_status status;
    int half;
    for (half = 0; half < 3; half++)
        if (g.weight[half].row && !scale[half].row)
            return gmm__ck_refuse(b, GMM_CKPT_SCALE_MISSING, last->name, "the source lacks its scales");
    g.blocks = mx;
    if (mx) x.k /= 2; /* bytes of two 4-bit elements */
    status = gmm__ck_plan_array(b, &x, &g);
    if (mx) x.k *= 2;
    if (!status) status = gmm__ck_check_scale_blocks(b, &x, &g, br, bc);
    if (status) return status;
    x.kind = GMM_CKPT_SCALE;
    x.f = gmm__ceil_div(x.f, br);
    x.k = gmm__ceil_div(x.k, bc);
    g.weight = scale;
    g.src_block /= br;
    g.dst_block /= br;
    g.shape_cols = x.k;
    g.cut_unit = br;
    return gmm__ck_plan_array(b, &x, &g);
}

/* Plans the biases of one linear in one state; `g` is the transfer of its weights. */
static gmm_status gmm__ck_plan_bias(gmm__ck_builder *b, const gmm_ckpt_linear *l, gmm__ck_transfer g,
                                    gmm__ck_match *matches, int64_t count, gmm_dtype dtype) {
    const gmm__ck_array x = gmm__ck_make_array(l, GMM_CKPT_BIAS);
    const gmm_ckpt_row *row = NULL;
    gmm__ck_row_tensors bias[3];
    gmm_status status;
    if (count == 0 && b->source.skip_missing) return GMM_OK;
    if (count == 0) {
        if (!gmm__ck_find_row(b->source.scheme, l, GMM_CKPT_BIAS, &row))
            return gmm__ck_refuse(b, GMM_CKPT_ARGUMENT, l->path, "linears: bias is 1, but the scheme %s has none",
                                  b->source.scheme->name);
        return gmm__ck_refuse_missing_tensor(b, &x, row, g.state, 0);
    }
    status = gmm__ck_group_matches(b, &x, matches, count, l->grouped_bias, bias);
    if (status) return status;
    g.weight = bias;
    g.presence = bias;
    g.scale = NULL;
    g.cut = NULL;
    g.blocks = 0;
    g.grouped = l->grouped_bias;
    g.shape_cols = 1;
    g.dtype = dtype;
    return gmm__ck_plan_array(b, &x, &g);
}

/* Plans one linear in one state. */
static gmm_status gmm__ck_plan_state(gmm__ck_builder *b, int64_t index, int32_t state, gmm__ck_match *matches,
                                     int64_t count) {
    const gmm_ckpt_linear *l = &b->linears[index];
    const int converted = state == 0 && l->slot != GMM_CKPT_ROUTER && l->slot != GMM_CKPT_ROUTER_CORRECTION &&
                          l->slot != GMM_CKPT_SHARED_GATE;
    const gmm_ckpt_row *row = NULL;
    const gmm_ckpt_tensor *last = NULL;
    gmm__ck_row_tensors weight[3], scale[3];
    gmm__ck_transfer g;
    gmm__ck_array x = gmm__ck_make_array(l, GMM_CKPT_WEIGHT);
    int64_t n[3] = {0, 0, 0}, i;
    int quantized, mx;
    gmm_status status = gmm__ck_check_wrappers(b, matches, count);
    if (status) return status;
    memset(&g, 0, sizeof g);
    for (i = 0; i < count; i++) n[matches[i].kind]++;
    if (count) g.key = gmm__ck_match_key(b, &matches[0]);
    else if (b->source.skip_missing) return GMM_OK;
    if (n[GMM_CKPT_WEIGHT] == 0) {
        if (!gmm__ck_find_row(b->source.scheme, l, GMM_CKPT_WEIGHT, &row))
            return gmm__ck_refuse(b, GMM_CKPT_ARGUMENT, l->path, "linears: the scheme %s has no slot %d",
                                  b->source.scheme->name, (int)l->slot);
        return gmm__ck_refuse_missing_tensor(b, &x, row, state, 0);
    }
    status = gmm__ck_group_matches(b, &x, matches, n[GMM_CKPT_WEIGHT], l->grouped_weight, weight);
    if (!status) status = gmm__ck_check_halves(b, &x, weight);
    if (!status) status = gmm__ck_glu_blocks(b, l, weight, &g.src_block, &g.dst_block);
    if (!status) status = gmm__ck_check_extents(b, &x, &g);
    if (status) return status;

    for (i = 0; i < 3 && !weight[i].row; i++) {}
    mx = weight[i].row->scaling == GMM_SCALING_MX32;
    quantized = gmm__ck_is_quantized(b, &x, weight, &last) &&
                gmm__ck_find_row(b->source.scheme, l, GMM_CKPT_SCALE, &row);
    x.kind = GMM_CKPT_SCALE;
    status = gmm__ck_group_matches(b, &x, matches + n[GMM_CKPT_WEIGHT] + n[GMM_CKPT_BIAS], n[GMM_CKPT_SCALE],
                                   l->grouped_weight, scale);
    x.kind = GMM_CKPT_WEIGHT;
    if (status) return status;
    gmm__ck_mark_plain_scales(b, gmm__ck_part_experts(b, &x), weight, scale);
    if (mx) {
        const int64_t src_etp = x.cols_sharded ? b->parts[0].rank.etp_size : 1;
        const int64_t dst_etp = x.cols_sharded ? b->target.rank.etp_size : 1;
        status = gmm__ck_check_multiple(b, l, x.k / src_etp, 32, "in", "MX32 blocks of");
        if (!status) status = gmm__ck_check_multiple(b, l, x.k / dst_etp, 32, "in", "MX32 blocks of");
        if (status) return status;
    }
    g.weight = weight;
    g.presence = weight;
    g.state = state;
    g.grouped = l->grouped_weight;
    g.shape_cols = x.k;
    g.cut = b->target.cuts ? &b->target.cuts[index] : NULL;
    g.cut_unit = 1;
    if (converted) g.dtype = b->target.dtype;
    if (quantized && g.dtype != GMM_NONE) g.scale = scale;
    status = quantized && g.dtype == GMM_NONE ? gmm__ck_plan_quantized(b, x, g, scale, mx, last)
                                              : gmm__ck_plan_array(b, &x, &g);
    if (status || !l->bias) return status;
    return gmm__ck_plan_bias(b, l, g, matches + n[GMM_CKPT_WEIGHT], n[GMM_CKPT_BIAS],
                             converted ? b->target.bias_dtype : GMM_NONE);
}

static gmm_status gmm__ck_plan_linears(gmm__ck_builder *b) {
    int64_t at = 0, i;
    int32_t s;
    for (i = 0; i < b->linear_count; i++) {
        int64_t end = at;
        while (end < b->match_count && b->matches[end].linear == i) end++;
        if (at == end && b->source.skip_missing) continue;
        for (s = 0; s < b->source.state_count; s++) {
            const int64_t begin = at;
            gmm_status status;
            while (at < end && b->matches[at].state == s) at++;
            if (!b->state_present[s] && s > 0) continue;
            status = gmm__ck_plan_state(b, i, s, begin < at ? b->matches + begin : NULL, at - begin);
            if (status) return status;
        }
    }
    return GMM_OK;
}

