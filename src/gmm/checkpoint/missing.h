/* .............................................................................................. 15.7 Building ... */
/* Checks that the linears of a layer agree, and reports the tensors that the source lacks. */

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
    int64_t slot_index = 0;
    return b->slot_count ? gmm__ck_find_linear(b, NULL, 0, slot, layer, &slot_index) : -1;
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
        int64_t second;
        if (l->path || !l->out) continue;
        if (l->slot == GMM_CKPT_FC1 || l->slot == GMM_CKPT_SHARED_FC1) {
            second = gmm__ck_find_slot(b, l->slot == GMM_CKPT_FC1 ? GMM_CKPT_FC2 : GMM_CKPT_SHARED_FC2, l->layer);
            if (second >= 0 && b->linears[second].out) status = gmm__ck_check_pair(b, i, second);
        }
        if (status) return status;
        if (l->slot != GMM_CKPT_ROUTER && l->slot != GMM_CKPT_ROUTER_CORRECTION) continue;
        second = gmm__ck_find_slot(b, GMM_CKPT_FC1, l->layer);
        if (second < 0 || !b->linears[second].out) second = gmm__ck_find_slot(b, GMM_CKPT_FC2, l->layer);
        if (second < 0 || !b->linears[second].out || l->out - l->spare == b->linears[second].experts) continue;
        return gmm__ck_refuse(b, GMM_CKPT_SHAPE, gmm__ck_first_key(b, i), "layer %lld: %s has %lld rows%s, %s %lld "
                              "experts%s", (long long)l->layer, gmm__ck_slot_name(l->slot), (long long)l->out,
                              l->spare ? ", some of them spare" : "", gmm__ck_slot_name(b->linears[second].slot),
                              (long long)b->linears[second].experts,
                              l->out > b->linears[second].experts ? ": state their number if the other rows are spare"
                                                                 : "");
    }
    return GMM_OK;
}

/* The sum of two counts, or INT64_MAX. */
static int64_t gmm__ck_add_clamped(int64_t a, int64_t b) { return a > INT64_MAX - b ? INT64_MAX : a + b; }

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
    b->missing = gmm__ck_add_clamped(b->missing, last - first + 1);
    return GMM_OK;
}

/* Records the tensors of one row that parts lack, given its matches. */
static gmm_status gmm__ck_find_missing_tensors(gmm__ck_builder *b, const gmm__ck_array *x, int64_t linear, int32_t row,
                                               int32_t state, const gmm__ck_match *matches, int64_t count) {
    const int several = b->source.scheme->rows[row].form == GMM_CKPT_EACH && x->grouped;
    const int64_t part_experts = several ? gmm__ck_part_experts(b, x) : 1;
    int64_t match = 0;
    int32_t p;
    for (p = 0; p < b->source.part_count; p++) {
        const int64_t base = several && b->source.scheme->global_index ? b->parts[p].rank.ep_rank * part_experts : 0;
        int64_t next = base;
        const int reads = gmm__ck_part_is_read(b, x, p);
        gmm_status status = GMM_OK;
        for (; match < count && matches[match].part == p; match++) {
            const int64_t e = several ? matches[match].expert : 0;
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
    const gmm_ckpt_row *similar = NULL, *best = NULL;
    int best_score = -1;
    int64_t i;
    int32_t r;
    for (i = 0; i < b->match_count && !similar; i++) {
        const gmm_ckpt_row *row = &scheme->rows[b->matches[i].row];
        if (row->kind == GMM_CKPT_WEIGHT && (row->slot <= GMM_CKPT_FC2 || row->slot == GMM_CKPT_SLOT_ANY))
            similar = row;
    }
    for (r = 0; r < scheme->count; r++) {
        const gmm_ckpt_row *row = &scheme->rows[r];
        int score;
        if (row->kind != kind || (row->slot != l->slot && (row->slot != GMM_CKPT_SLOT_ANY || !l->path))) continue;
        score = !similar ? 0 : 2 * ((row->form == GMM_CKPT_EACH) == (similar->form == GMM_CKPT_EACH)) +
                           (row->scaling == similar->scaling);
        if (score > best_score) best = row;
        if (score > best_score) best_score = score;
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

/* Names the missing ranges from *position on that differ in layer only by one pattern with number sets. *position moves
   past them. */
static char *gmm__ck_missing_set_name(gmm__ck_builder *b, const gmm_ckpt_row *layer_row, int64_t *position,
                                      int64_t *tensors) {
    const gmm__ck_missing_range *m = &b->missing_ranges[*position], *next = m,
        *end = b->missing_ranges + b->missing_range_count;
    const gmm_ckpt_row *row = m->row < 0 ? layer_row : &b->source.scheme->rows[m->row];
    const gmm_ckpt_rank *rank = &b->parts[m->part].rank, *size = &b->parts[0].rank;
    const gmm_ckpt_linear *l = m->row < 0 ? NULL : &b->linears[m->linear];
    char layers[GMM__CK_SET_CHARS] = "{", experts[GMM__CK_SET_CHARS] = "{", *name, *text;
    int64_t n = 0, i, from_layer = m->layer, to_layer = m->layer;
    *tensors = 0;
    for (; m + n < end && m[n].layer == m->layer && m[n].row == m->row && m[n].state == m->state &&
         m[n].part == m->part; n++)
        gmm__ck_add_numbers(experts, sizeof experts, m[n].first, m[n].last);
    for (;;) {
        for (i = 0; i < n; i++) *tensors = gmm__ck_add_clamped(*tensors, next[i].last - next[i].first + 1);
        next += n;
        for (i = 0; i < n && next + i < end && next[i].first == m[i].first && next[i].last == m[i].last &&
             next[i].layer == next->layer && next[i].row == m->row && next[i].state == m->state &&
             next[i].part == m->part; i++) {}
        if (i < n || (l && l->path) || (next + n < end && next[n].layer == next->layer && next[n].row == m->row &&
                                        next[n].state == m->state && next[n].part == m->part))
            break;
        if (next->layer != to_layer + 1) {
            gmm__ck_add_numbers(layers, sizeof layers, from_layer, to_layer);
            from_layer = next->layer;
        }
        to_layer = next->layer;
    }
    gmm__ck_add_numbers(layers, sizeof layers, from_layer, to_layer);
    *position = next - b->missing_ranges;
    name = gmm__ck_missing_name(b, row, m->state, l, gmm__ck_end_numbers(layers), gmm__ck_end_numbers(experts));
    if (!name || b->source.part_count == 1) return name;
    text = (char *)gmm__ck_alloc(&b->arena, (int64_t)strlen(name) + 64, 1);
    if (!text) return NULL;
    n = snprintf(text, strlen(name) + 64, "%s", name);
    if (size->ep_size > 1) n += snprintf(text + n, 20, " of EP %d", (int)rank->ep_rank);
    if (size->etp_size > 1) n += snprintf(text + n, 20, " of ETP %d", (int)rank->etp_rank);
    if (size->gtp_size > 1) (void)snprintf(text + n, 20, " of GTP %d", (int)rank->gtp_rank);
    return text;
}

/* Fails with the list of missing tensors, unless skip_missing allows them. */
static gmm_status gmm__ck_refuse_incomplete(gmm__ck_builder *b, const gmm_ckpt_row *layer_row) {
    char text[340] = "", hint[100] = "", layer[24], expert[24], *name;
    int64_t position = 0, listed = 0, tensors = 0;
    const gmm__ck_missing_range *m = b->missing_ranges;
    size_t n = 0;
    if (b->report) b->report->missing = b->missing;
    if (!b->missing_range_count || b->source.skip_missing) return GMM_OK;
    if (!b->report) return GMM_E_KEY;
    qsort(b->missing_ranges, (size_t)b->missing_range_count, sizeof *b->missing_ranges, gmm__ck_compare_missing);
    while (position < b->missing_range_count) {
        name = gmm__ck_missing_set_name(b, layer_row, &position, &tensors);
        if (!name) return gmm__ck_no_memory(b);
        if (n && n + strlen(name) > sizeof text - 60) break;
        gmm__ck_truncate(text + n, sizeof text - 60 - n, n ? ", " : "");
        n += strlen(text + n);
        gmm__ck_truncate(text + n, sizeof text - 56 - n, name);
        n += strlen(text + n);
        listed = gmm__ck_add_clamped(listed, tensors);
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
    int64_t match = 0, i;
    int32_t s;
    for (i = 0; i < b->linear_count; i++)
        for (s = 0; s < b->source.state_count; s++) {
            const int64_t begin = match;
            gmm_status status;
            while (match < b->match_count && b->matches[match].linear == i && b->matches[match].state == s) match++;
            if (!b->state_present[s]) continue;
            status = gmm__ck_find_missing_rows(b, i, s, b->matches ? b->matches + begin : NULL, match - begin);
            if (status) return status;
        }
    return GMM_OK;
}

