/* .................................................................................... 15.4 Keys to linears ... */
/* Parses the keys of the source, matches them to linears, and composes the names of targets. */

/* A source tensor whose key matches a row of the scheme for a linear. */
typedef struct gmm__ck_match {
    int64_t linear, expert; /* expert as the name counts it; 0 for STACKED and WIDE */
    int32_t state, row, part, tensor;
    int32_t prefix_class;   /* 0 = empty or stated, 1 = the first other prefix found, 2 = a second other prefix */
    gmm_ckpt_kind kind;
} gmm__ck_match;

typedef struct gmm__ck_memory_range { const char *begin, *end; } gmm__ck_memory_range;

struct gmm_ckpt_plan {
    gmm__ck_arena arena;
    gmm_ckpt_table *targets;
    gmm_ckpt_part *parts;
    gmm_ckpt_move *moves;
    int64_t *last_move;  /* [targets] the last move into each; -1 = none */
    gmm__ck_memory_range *source_ranges; /* the source's memory, ascending and disjoint */
    int64_t count, source_range_count;
    int32_t part_count, partial;
    gmm_ckpt_cost cost;
};

/* Tensors that the source lacks of one linear and row: experts first to last of a part, as names count them. row -1: a
   layer without any key. */
typedef struct gmm__ck_missing_range {
    int64_t layer, first, last; /* layer: of linears by path, their index */
    int32_t linear, row, state, part;
} gmm__ck_missing_range;

/* How a source tensor is used. PLAIN_SCALE: scales of a weight that is not quantized, treated as extra like UNUSED. */
enum gmm__ck_tensor_use { GMM__CK_UNUSED, GMM__CK_USED, GMM__CK_DROPPED, GMM__CK_PLAIN_SCALE };

typedef struct gmm__ck_builder {
    gmm__ck_arena arena;
    const char *fn;
    gmm_ckpt_report *report;
    gmm_ckpt_source source;
    gmm_ckpt_target target;
    gmm_ckpt_part *parts;        /* sizes of 0 are 1 */
    const char *const *states;   /* [source.state_count]; "", the model's, is the first if it is one of them */
    gmm_ckpt_linear *linears;    /* copies; canonical paths */
    int64_t linear_count, linear_capacity;
    int32_t *slots;              /* hash of linears: index + 1 */
    int64_t slot_count;
    int scan;                    /* 1: unknown (slot, layer) pairs become linears */
    gmm__ck_match *matches;
    int64_t match_count, match_capacity;
    uint8_t *state_present;      /* [source.state_count] states that have a match, and the model's */
    gmm__ck_missing_range *missing_ranges;
    int64_t missing_range_count, missing_range_capacity, missing; /* missing: tensors and layers */
    /* scan: a router with more rows than experts have keys; 0 rows = none */
    int64_t extra_router_layer, extra_router_rows;
    const char *source_prefix;   /* prefix of the source's keys */
    const char *target_prefix;   /* of the target's names */
    const char *other_prefixes[2];       /* canonical prefixes 1 and 2 */
    const char *other_keys[2];
    char *key_buffer;            /* holds one key without wrapper segments */
    uint8_t **uses;              /* [parts][tensors] gmm__ck_tensor_use */
    gmm_ckpt_table *targets;
    int64_t target_end;          /* end of the targets in storage 0 */
    gmm_ckpt_move *moves;
    int64_t move_count, move_capacity;
} gmm__ck_builder;

static gmm_status gmm__ck_refuse(gmm__ck_builder *b, gmm_ckpt_reason reason, const char *key, const char *format, ...) {
    va_list list;
    gmm_status status;
    va_start(list, format);
    status = gmm__ck_vfail(b->report, reason, key, b->fn, format, list);
    va_end(list);
    return status;
}

/* Whether the call is gmm_ckpt_normalize_map, where linears are named by paths alone and no prefix can be stated. */
static int gmm__ck_is_map(const gmm__ck_builder *b) { return !strcmp(b->fn, "gmm_ckpt_normalize_map"); }

static gmm_status gmm__ck_no_memory(gmm__ck_builder *b) {
    return gmm__ck_refuse(b, GMM_CKPT_NO_MEMORY, NULL, "no memory");
}

/* Parses an integer of at most 9 digits without leading zeros, and moves *text to the character after it. */
static int gmm__ck_parse_number(const char **text, int64_t *value) {
    const char *p = *text;
    int64_t v = 0;
    if (*p < '0' || *p > '9' || (*p == '0' && p[1] >= '0' && p[1] <= '9')) return 0;
    for (; *p >= '0' && *p <= '9'; p++) {
        if (p - *text >= 9) return 0;
        v = v * 10 + (*p - '0');
    }
    *text = p;
    *value = v;
    return 1;
}

/* Matches the pattern up to `end` to the front of a text, and reads its layer and expert. Returns the text behind it;
   NULL: it does not match. */
static const char *gmm__ck_match_front(const char *pattern, const char *end, const char *text, int64_t *layer,
                                       int64_t *expert) {
    while (pattern < end) {
        if (*pattern == '{') {
            if (!gmm__ck_parse_number(&text, pattern[1] == 'L' ? layer : expert)) return NULL;
            pattern += 3;
        } else if (*pattern++ != *text++) {
            return NULL;
        }
    }
    return text;
}

/* Whether the whole text matches the pattern; reads its layer and expert. */
static int gmm__ck_match_pattern(const char *pattern, const char *text, int64_t *layer, int64_t *expert) {
    const char *rest = gmm__ck_match_front(pattern, pattern + strlen(pattern), text, layer, expert);
    return rest && *rest == 0;
}

static int gmm__ck_is_wrapper(const gmm_ckpt_source *source, const char *segment, size_t length) {
    int32_t w;
    for (w = 0; w < source->wrapper_count; w++)
        if (strlen(source->wrappers[w]) == length && !memcmp(source->wrappers[w], segment, length)) return 1;
    return 0;
}

/* Copies a key without its wrapper segments; `dst` may be the key itself. Returns the length. */
static size_t gmm__ck_strip_wrappers(const gmm_ckpt_source *source, const char *key, char *dst) {
    size_t n = 0;
    for (;;) {
        const size_t length = strcspn(key, ".");
        const int wrapper = gmm__ck_is_wrapper(source, key, length);
        if (!wrapper) {
            memmove(dst + n, key, length);
            n += length;
        }
        if (!key[length]) break;
        if (!wrapper) dst[n++] = '.';
        key += length + 1;
    }
    dst[n] = 0;
    return n;
}

/* The same for a key without its state's prefix; wrapper segments of the stated model prefix stay. */
static size_t gmm__ck_strip_key_wrappers(const gmm_ckpt_source *source, const char *key, char *dst) {
    const size_t n = source->prefix ? strlen(source->prefix) : 0;
    if (!n || strncmp(key, source->prefix, n)) return gmm__ck_strip_wrappers(source, key, dst);
    memcpy(dst, source->prefix, n);
    return n + gmm__ck_strip_wrappers(source, key + n, dst + n);
}

/* Finds the first wrapper segment from *text on, its length, and how many segments precede it; NULL if there is none.
   *text moves to the segment after it. */
static const char *gmm__ck_next_wrapper(const gmm_ckpt_source *source, const char **text, size_t *length,
                                        int *follows) {
    for (*follows = 0; **text; ++*follows) {
        const char *segment = *text;
        *length = strcspn(segment, ".");
        *text += *length + (segment[*length] == '.');
        if (gmm__ck_is_wrapper(source, segment, *length)) return segment;
    }
    return NULL;
}

/* Whether two keys have the same wrapper segments at the same positions. */
static int gmm__ck_same_wrappers(const gmm_ckpt_source *source, const char *a, const char *b) {
    for (;;) {
        size_t n = 0, m = 0;
        int i, k;
        const char *x = gmm__ck_next_wrapper(source, &a, &n, &i), *y = gmm__ck_next_wrapper(source, &b, &m, &k);
        if (!x && !y) return 1;
        if (!x || !y || i != k || n != m || memcmp(x, y, n)) return 0;
    }
}

/* Builds `state` followed by `name`, with each wrapper segment of `key` inserted while the segments before it equal
   those of the name. Any two numbers compare equal, because they are a layer or an expert. */
static char *gmm__ck_wrapped_name(gmm__ck_builder *b, const char *key, const char *state, const char *name) {
    static const char digits[] = "0123456789";
    const size_t capacity = strlen(state) + strlen(key) + strlen(name) + 2;
    char *wrapped = (char *)gmm__ck_alloc(&b->arena, (int64_t)capacity, 1);
    size_t n = strlen(state);
    if (!wrapped) return NULL;
    memcpy(wrapped, state, n);
    for (;;) {
        const size_t k = strcspn(key, "."), m = strcspn(name, ".");
        const int equal = (k == m && !memcmp(key, name, k)) ||
                         (k && m && strspn(key, digits) == k && strspn(name, digits) == m);
        const char *source = equal ? name : key;
        if (!key[k] || (equal ? !name[m] : !gmm__ck_is_wrapper(&b->source, key, k))) break;
        memcpy(wrapped + n, source, (equal ? m : k) + 1);
        n += (equal ? m : k) + 1;
        key += k + 1;
        if (equal) name += m + 1;
    }
    memcpy(wrapped + n, name, strlen(name) + 1);
    return wrapped;
}

/* The state of a key, -1 = none, and the length of its prefix: the longest wins. */
static int32_t gmm__ck_find_state(const gmm__ck_builder *b, const char *name, size_t *length) {
    int32_t s, found = -1;
    *length = 0;
    for (s = 0; s < b->source.state_count; s++) {
        const size_t n = strlen(b->states[s]);
        if ((found >= 0 && n <= *length) || strncmp(name, b->states[s], n)) continue;
        *length = n;
        found = s;
    }
    return found;
}

static uint64_t gmm__ck_linear_hash(const char *path, size_t length, gmm_ckpt_slot slot, int64_t layer) {
    return path ? gmm__ck_hash(path, length, 1) : gmm__ck_hash((const char *)&layer, sizeof layer, (uint64_t)slot + 2);
}

/* Index of a linear, by path or by slot and layer; -1 if there is none. *slot_index is its slot in the hash table. */
static int64_t gmm__ck_find_linear(const gmm__ck_builder *b, const char *path, size_t length, gmm_ckpt_slot slot,
                                   int64_t layer, int64_t *slot_index) {
    int64_t i = (int64_t)(gmm__ck_linear_hash(path, length, slot, layer) & (uint64_t)(b->slot_count - 1));
    for (; b->slots[i]; i = (i + 1) & (b->slot_count - 1)) {
        const gmm_ckpt_linear *l = &b->linears[b->slots[i] - 1];
        if (path ? l->path && strlen(l->path) == length && !memcmp(l->path, path, length)
                 : !l->path && l->slot == slot && l->layer == layer) {
            *slot_index = i;
            return b->slots[i] - 1;
        }
    }
    *slot_index = i;
    return -1;
}

/* Enters all linears into slots that are all free. */
static void gmm__ck_hash_linears(gmm__ck_builder *b) {
    int64_t slot_index = 0, i;
    for (i = 0; i < b->linear_count; i++) {
        const gmm_ckpt_linear *l = &b->linears[i];
        (void)gmm__ck_find_linear(b, l->path, l->path ? strlen(l->path) : 0, l->slot, l->layer, &slot_index);
        b->slots[slot_index] = (int32_t)(i + 1);
    }
}

static gmm_status gmm__ck_add_linear(gmm__ck_builder *b, const gmm_ckpt_linear *linear) {
    void *array = b->linears;
    int64_t slot_index = 0;
    if (2 * (b->linear_count + 1) > b->slot_count) {
        b->slot_count = b->slot_count ? b->slot_count * 2 : 64;
        b->slots = (int32_t *)gmm__ck_alloc(&b->arena, b->slot_count, sizeof *b->slots);
        if (!b->slots) return gmm__ck_no_memory(b);
        gmm__ck_hash_linears(b);
    }
    if (gmm__ck_find_linear(b, linear->path, linear->path ? strlen(linear->path) : 0, linear->slot, linear->layer,
                            &slot_index) >= 0)
        return gmm__ck_refuse(b, GMM_CKPT_ARGUMENT, linear->path, "linears: the same path, or slot %d of layer %lld, "
                              "stands twice", (int)linear->slot, (long long)linear->layer);
    if (b->linear_count == INT32_MAX - 1) return gmm__ck_refuse(b, GMM_CKPT_OVERFLOW, NULL, "linears: too many");
    if (!gmm__ck_reserve(&b->arena, &array, b->linear_count, &b->linear_capacity, sizeof *b->linears))
        return gmm__ck_no_memory(b);
    b->linears = (gmm_ckpt_linear *)array;
    b->linears[b->linear_count] = *linear;
    b->slots[slot_index] = (int32_t)++b->linear_count;
    return GMM_OK;
}

/* Finds the linear of a canonical key whose end matches a row's pattern. *start is where the prefix ends.
   Returns -1 if there is none. */
static int64_t gmm__ck_match_row(gmm__ck_builder *b, const gmm_ckpt_row *row, const char *key, size_t length,
                                 int64_t *expert, size_t *start, gmm_status *status) {
    const int has_path = !strncmp(row->pattern, "{p}.", 4);
    const char *tail = row->pattern + (has_path ? 4 : 0);
    const size_t stated = b->source.prefix ? strlen(b->source.prefix) : 0;
    int64_t layer = -1, linear, slot_index = 0;
    size_t i, begin = length;
    int dots = 0;
    for (i = 0; tail[i]; i++) dots += tail[i] == '.';
    for (; begin && (key[begin - 1] != '.' || dots--); begin--) {}
    *expert = 0;
    if (!gmm__ck_match_pattern(tail, key + begin, &layer, expert)) return -1;
    if (b->source.prefix && (length < stated || memcmp(key, b->source.prefix, stated))) return -1;
    if (!has_path) {
        gmm_ckpt_linear fresh = GMM_ZERO;
        *start = begin;
        if (b->source.prefix && begin != stated) return -1;
        linear = b->slot_count ? gmm__ck_find_linear(b, NULL, 0, row->slot, layer, &slot_index) : -1;
        if (linear >= 0 || !b->scan) return linear;
        fresh.slot = row->slot;
        fresh.layer = layer;
        *status = gmm__ck_add_linear(b, &fresh);
        return *status ? -1 : b->linear_count - 1;
    }
    if (!b->slot_count || begin < stated) return -1;
    if (b->source.prefix) {
        *start = stated;
        if (begin == stated + 1) return -1; /* an empty segment */
        return gmm__ck_find_linear(b, key + stated, begin > stated ? begin - 1 - stated : 0, GMM_CKPT_SLOT_ANY, 0,
                                   &slot_index);
    }
    for (i = 0; i + 1 < begin; i++) { /* the longest path wins; no segment is empty */
        if (i && key[i - 1] != '.') continue;
        linear = gmm__ck_find_linear(b, key + i, begin - 1 - i, GMM_CKPT_SLOT_ANY, 0, &slot_index);
        *start = i;
        if (linear >= 0) return linear;
    }
    return -1;
}

static int gmm__ck_compare_matches(const void *a, const void *b) {
    const gmm__ck_match *x = (const gmm__ck_match *)a, *y = (const gmm__ck_match *)b;
    if (x->linear != y->linear) return x->linear < y->linear ? -1 : 1;
    if (x->state != y->state) return x->state < y->state ? -1 : 1;
    if (x->kind != y->kind) return x->kind < y->kind ? -1 : 1;
    if (x->row != y->row) return x->row < y->row ? -1 : 1;
    if (x->part != y->part) return x->part < y->part ? -1 : 1;
    if (x->expert != y->expert) return x->expert < y->expert ? -1 : 1;
    return x->tensor < y->tensor ? -1 : x->tensor > y->tensor;
}

/* Matches all keys: fills the sorted matches, the source's prefix, and how each tensor is used. */
static gmm_status gmm__ck_read_keys(gmm__ck_builder *b) {
    const gmm_ckpt_scheme *scheme = b->source.scheme;
    size_t longest = 0;
    int64_t i, n = 0;
    int32_t p, r, empty = 0;
    for (p = 0; p < b->source.part_count; p++)
        if (b->parts[p].table->longest > longest) longest = b->parts[p].table->longest;
    b->key_buffer = (char *)gmm__ck_alloc(&b->arena, (int64_t)longest + 1, 1);
    b->uses = (uint8_t **)gmm__ck_alloc(&b->arena, b->source.part_count, sizeof *b->uses);
    if (!b->key_buffer || !b->uses) return gmm__ck_no_memory(b);
    for (p = 0; p < b->source.part_count; p++) {
        const gmm_ckpt_table *table = b->parts[p].table;
        b->uses[p] = (uint8_t *)gmm__ck_alloc(&b->arena, table->count + 1, 1);
        if (!b->uses[p]) return gmm__ck_no_memory(b);
        for (i = 0; i < table->count; i++) {
            const char *name = table->tensors[i].name;
            size_t state_length = 0, start = 0, length;
            gmm_status status = GMM_OK;
            gmm__ck_match h;
            void *array = b->matches;
            memset(&h, 0, sizeof h);
            h.linear = -1;
            h.state = gmm__ck_find_state(b, name, &state_length);
            if (h.state < 0) continue;
            length = gmm__ck_strip_key_wrappers(&b->source, name + state_length, b->key_buffer);
            for (r = 0; r < scheme->count && h.linear < 0; r++) {
                h.linear = gmm__ck_match_row(b, &scheme->rows[r], b->key_buffer, length, &h.expert, &start, &status);
                if (status) return status;
                h.row = r;
            }
            if (h.linear < 0) continue;
            h.kind = scheme->rows[h.row].kind;
            h.part = p;
            h.tensor = (int32_t)i;
            if (h.kind == GMM_CKPT_BIAS && !b->scan && !b->linears[h.linear].bias) continue;
            if (!b->source.prefix && start) {
                for (h.prefix_class = 1; h.prefix_class < 3; h.prefix_class++) {
                    const char *other_prefix = b->other_prefixes[h.prefix_class - 1];
                    if (!other_prefix) {
                        other_prefix = gmm__ck_copy_text(&b->arena, b->key_buffer, start);
                        if (!other_prefix) return gmm__ck_no_memory(b);
                        b->other_prefixes[h.prefix_class - 1] = other_prefix;
                        b->other_keys[h.prefix_class - 1] = name;
                    }
                    if ((strlen(other_prefix) == start && !memcmp(other_prefix, b->key_buffer, start)) ||
                        h.prefix_class == 2)
                        break;
                }
            } else {
                empty = 1;
            }
            if (!gmm__ck_reserve(&b->arena, &array, b->match_count, &b->match_capacity, sizeof *b->matches))
                return gmm__ck_no_memory(b);
            b->matches = (gmm__ck_match *)array;
            b->matches[b->match_count++] = h;
        }
    }
    if (!empty && b->other_prefixes[1])
        return gmm__ck_refuse(b, GMM_CKPT_AMBIGUOUS, b->other_keys[1], "its prefix \"%.80s\" and \"%.80s\" are two: "
                              "%s", b->other_prefixes[1], b->other_prefixes[0],
                                  gmm__ck_is_map(b) ? "give linears longer paths"
                                                                               : "state the prefix");
    b->source_prefix = b->source.prefix ? b->source.prefix : !empty && b->other_prefixes[0] ? b->other_prefixes[0] : "";
    b->target_prefix = b->target.prefix ? b->target.prefix : b->source_prefix;
    for (i = 0; i < b->match_count; i++) { /* only matches with the chosen prefix remain */
        const gmm__ck_match h = b->matches[i];
        if (h.prefix_class != (empty ? 0 : 1)) continue;
        b->uses[h.part][h.tensor] = GMM__CK_USED;
        b->matches[n++] = h;
    }
    b->match_count = n;
    b->state_present = (uint8_t *)gmm__ck_alloc(&b->arena, b->source.state_count, 1);
    if (!b->state_present) return gmm__ck_no_memory(b);
    if (!n || !*b->states[0]) b->state_present[0] = 1; /* where it has no key, its keys are missing */
    for (i = 0; i < n; i++) b->state_present[b->matches[i].state] = 1;
    if (n) qsort(b->matches, (size_t)n, sizeof *b->matches, gmm__ck_compare_matches);
    return GMM_OK;
}

/* A match's key without its state's prefix. */
static const char *gmm__ck_match_key(const gmm__ck_builder *b, const gmm__ck_match *h) {
    return b->parts[h->part].table->tensors[h->tensor].name + strlen(b->states[h->state]);
}

/* The name that a row gives, with {L} and {e} as these texts. */
static char *gmm__ck_expand_pattern(gmm__ck_builder *b, const gmm_ckpt_row *row, const char *prefix,
                                    const gmm_ckpt_linear *l, const char *layer, const char *expert) {
    const char *path = l && l->path ? l->path : "", *p = row->pattern;
    const size_t capacity = strlen(prefix) + strlen(p) + strlen(path) + strlen(layer) + strlen(expert) + 1;
    char *name = (char *)gmm__ck_alloc(&b->arena, (int64_t)capacity, 1);
    size_t n = strlen(prefix);
    if (!name) return NULL;
    memcpy(name, prefix, n);
    while (*p) {
        const char *piece = p[1] == 'L' ? layer : p[1] == 'p' ? path : expert;
        if (*p != '{') {
            name[n++] = *p++;
            continue;
        }
        memcpy(name + n, piece, strlen(piece));
        n += strlen(piece);
        p += 3;
        if (!*piece && *p == '.') p++; /* an empty path has no dot */
    }
    name[n] = 0;
    return name;
}

/* The name of a target: STATE WRAPPERS PREFIX pattern. `key` is a key of the linear in the source, without
   its state's prefix. */
static char *gmm__ck_target_name(gmm__ck_builder *b, const gmm_ckpt_row *row, const char *state,
                                 const gmm_ckpt_linear *l, int64_t expert, const char *key) {
    char layer[24], number[24], *name;
    (void)snprintf(layer, sizeof layer, "%lld", (long long)l->layer);
    (void)snprintf(number, sizeof number, "%lld", (long long)expert);
    name = gmm__ck_expand_pattern(b, row, b->target_prefix, l, layer, number);
    if (name && b->target.drop_wrappers) {
        (void)gmm__ck_strip_wrappers(&b->source, name, name);
        key = "";
    }
    return name ? gmm__ck_wrapped_name(b, key, state, name) : NULL;
}

/* The name that a missing key of the source would have, with the wrapper segments of the first key that exists. */
static char *gmm__ck_missing_name(gmm__ck_builder *b, const gmm_ckpt_row *row, int32_t state, const gmm_ckpt_linear *l,
                                  const char *layer, const char *expert) {
    const char *key = b->match_count ? gmm__ck_match_key(b, b->matches) : "";
    char *name = gmm__ck_expand_pattern(b, row, b->source_prefix, l, layer, expert);
    return name ? gmm__ck_wrapped_name(b, key, b->states[state], name) : NULL;
}

/* The key and the fragment of a stored tensor of experts, by Megatron-LM's rules. */
GMMDEF gmm_status gmm_ckpt_stored_key(const gmm_ckpt_stored *stored, char *key, size_t key_bytes, gmm_ckpt_place *place,
                                      gmm_error *error) {
    static const char fn[] = "gmm_ckpt_stored_key";
    gmm_ckpt_stored s;
    gmm_ckpt_place result = GMM_ZERO;
    gmm_status status;
    char number[32], rule[96];
    int n;
    if (!stored || !key || !place)
        return gmm__fail(error, GMM_E_NULL, "%s: %s is NULL", fn, !stored ? "stored" : !key ? "key" : "place");
    if ((status = gmm__read_sized(&s, sizeof s, stored, rule)) != GMM_OK)
        return gmm__fail(error, status, "%s: stored: %s", fn, rule);
    if (s.ep_size == 0) s.ep_size = 1;
    if (s.etp_size == 0) s.etp_size = 1;
    if (!s.prefix || (s.slot != GMM_CKPT_FC1 && s.slot != GMM_CKPT_FC2) ||
        (s.kind != GMM_CKPT_WEIGHT && s.kind != GMM_CKPT_BIAS) || s.experts_local < 1 || s.index < 0 ||
        s.index >= s.experts_local || s.ep_rank < 0 || s.ep_rank >= s.ep_size || s.etp_rank < 0 ||
        s.etp_rank >= s.etp_size || s.experts_local > INT64_MAX / s.ep_size ||
        (s.half != GMM_CKPT_BOTH && !s.singleton && s.etp_size > INT32_MAX / 2) || s.half < GMM_CKPT_BOTH ||
        s.half > GMM_CKPT_UP || (s.half != GMM_CKPT_BOTH) != (s.slot == GMM_CKPT_FC1 && s.gated))
        return gmm__fail(error, GMM_E_ARG,
                         "%s: slot %d, kind %d, half %d, expert %lld of %lld, EP %d/%d, ETP %d/%d: out of range, or a "
                         "gated FC1 without its half", fn, (int)s.slot, (int)s.kind, (int)s.half, (long long)s.index,
                         (long long)s.experts_local, s.ep_rank, s.ep_size, s.etp_rank, s.etp_size);
    result.expert = s.ep_rank * s.experts_local + s.index;
    result.experts = s.ep_size * s.experts_local;
    result.axis = s.slot == GMM_CKPT_FC1 ? 0 : s.kind == GMM_CKPT_WEIGHT ? 1 : -1;
    result.fragment = result.axis < 0 ? 0 : s.etp_rank + (s.half == GMM_CKPT_UP && !s.singleton ? s.etp_size : 0);
    result.fragments = result.axis < 0 ? 1 : s.etp_size * (s.half != GMM_CKPT_BOTH && !s.singleton ? 2 : 1);
    (void)snprintf(number, sizeof number, "%lld.", (long long)result.expert);
    n = snprintf(key, key_bytes, "%sexperts.experts.%slinear_fc%d.%s%s", s.prefix, s.singleton ? number : "",
                 s.slot == GMM_CKPT_FC1 ? 1 : 2, s.kind == GMM_CKPT_WEIGHT ? "weight" : "bias",
                 !s.singleton || s.half == GMM_CKPT_BOTH ? "" : s.half == GMM_CKPT_GATE ? "_w" : "_v");
    if (n < 0 || (size_t)n >= key_bytes)
        return gmm__fail(error, GMM_E_WORKSPACE, "%s: key_bytes is %llu: the key takes %d bytes", fn,
                         (unsigned long long)key_bytes, n + 1);
    *place = result;
    return GMM_OK;
}

