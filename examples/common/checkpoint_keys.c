/* checkpoint_keys.c - see checkpoint_keys.h.  SPDX-License-Identifier: MIT */
#include "checkpoint_keys.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* --------------------------------------------------------------------------------------------------- Patterns --- */

static char *fold(const char *name) {
    char *text = (char *)malloc(strlen(name) + 2), *to = text;
    if (!text) return NULL;
    for (const char *at = name;;) {
        const size_t length = strcspn(at, "."), digits = strspn(at, "0123456789");
        size_t kept = length;
        if (digits && digits == length) kept = 0;
        else if (!at[length])
            while (kept && at[kept - 1] >= '0' && at[kept - 1] <= '9') kept--;
        memcpy(to, at, kept);
        to += kept;
        if (kept < length) *to++ = 'N';
        if (!at[length]) break;
        *to++ = '.';
        at += length + 1;
    }
    *to = 0;
    return text;
}

typedef struct folded { char *text; int64_t index; } folded;

static int compare_folded(const void *a, const void *b) {
    const folded *x = (const folded *)a, *y = (const folded *)b;
    const int order = strcmp(x->text, y->text);
    return order ? order : x->index < y->index ? -1 : 1;
}

int key_patterns_of(key_patterns *patterns, const char *const *names, int64_t count, int64_t *pattern_of) {
    folded *list = (folded *)calloc((size_t)count + 1, sizeof *list);
    int64_t made = 0;
    int ok;
    memset(patterns, 0, sizeof *patterns);
    patterns->texts = (char **)calloc((size_t)count + 1, sizeof *patterns->texts);
    patterns->names = (int64_t *)calloc((size_t)count + 1, sizeof *patterns->names);
    ok = list && patterns->texts && patterns->names;
    for (; ok && made < count; made++) {
        list[made].index = made;
        list[made].text = fold(names[made]);
        ok = list[made].text != NULL;
    }
    if (ok) qsort(list, (size_t)count, sizeof *list, compare_folded);
    for (int64_t i = 0; i < made; i++) {
        const int64_t n = patterns->count;
        const int fresh = ok && (!n || strcmp(patterns->texts[n - 1], list[i].text));
        if (fresh) patterns->texts[patterns->count++] = list[i].text;
        else free(list[i].text);
        if (!ok) continue;
        patterns->names[patterns->count - 1]++;
        pattern_of[list[i].index] = patterns->count - 1;
    }
    free(list);
    if (!ok) key_patterns_free(patterns);
    return ok;
}

void key_patterns_free(key_patterns *patterns) {
    for (int64_t i = 0; i < patterns->count; i++) free(patterns->texts[i]);
    free(patterns->texts);
    free(patterns->names);
    memset(patterns, 0, sizeof *patterns);
}

/* -------------------------------------------------------------------------------------------------- Inventory --- */

enum { PREFIXES = 3 };

/* A key that matches the scheme. Keys of one optimizer state and one prefix form a tree, which should be complete. */
typedef struct hit {
    int64_t layer, expert, tensor, rows;
    int32_t state, group, part, row, prefix;
} hit;

typedef struct search {
    const gmm_ckpt_source *source;
    const gmm_ckpt_scheme *scheme;
    key_inventory *out;
    hit *hits;
    int64_t hit_count, hit_room;
    char *prefixes[PREFIXES];  /* prefixes of keys without optimizer state; ambiguous if there are PREFIXES */
    const char *prefix;
    int32_t prefix_count;
    int64_t *layers;           /* layer numbers of all keys, then sorted */
    int64_t layer_count, layer_room;
    int64_t *moe, moe_count;   /* layers with experts or a router, ascending */
    int64_t *experts;          /* [moe_count] number of experts of each layer */
    char *lacking;             /* [moe_count] */
    int32_t groups;
    int failed;                /* no memory */
} search;

static void *grown(search *s, void *array, int64_t count, int64_t *capacity, size_t size) {
    void *larger;
    if (count < *capacity) return array;
    larger = realloc(array, (size_t)(count * 2 + 64) * size);
    if (!larger) {
        s->failed = 1;
        return array;
    }
    *capacity = count * 2 + 64;
    return larger;
}

static void say(search *s, const char *format, ...) {
    key_inventory *out = s->out;
    char **larger = (char **)realloc(out->missing, (size_t)(out->missing_count + 1) * sizeof *larger), *text;
    va_list list;
    int n;
    if (larger) out->missing = larger;
    va_start(list, format);
    n = vsnprintf(NULL, 0, format, list);
    va_end(list);
    text = larger && n >= 0 ? (char *)malloc((size_t)n + 1) : NULL;
    s->failed |= !text;
    if (!text) return;
    va_start(list, format);
    vsnprintf(text, (size_t)n + 1, format, list);
    va_end(list);
    out->missing[out->missing_count++] = text;
}

/* A number of at most 9 digits without leading zeros, as gmm's schemes take them. */
static int read_number(const char **text, int64_t *value) {
    const size_t digits = strspn(*text, "0123456789");
    if (!digits || digits > 9 || (digits > 1 && **text == '0')) return 0;
    *value = strtoll(*text, NULL, 10);
    *text += digits;
    return 1;
}

static int matches(const char *pattern, const char *text, int64_t *layer, int64_t *expert) {
    while (*pattern) {
        if (*pattern == '{') {
            if (!read_number(&text, pattern[1] == 'L' ? layer : expert)) return 0;
            pattern += 3;
        } else if (*pattern++ != *text++) {
            return 0;
        }
    }
    return !*text;
}

/* The key after its state's prefix, without wrapper segments; NULL if it belongs to no state. */
static const char *plain_key(const search *s, const char *name, char *text, int32_t *state) {
    const gmm_ckpt_source *source = s->source;
    size_t skip = 0;
    char *to = text;
    int found = !source->states;
    *state = 0;
    for (int32_t i = 0; source->states && i < source->state_count; i++) {
        const size_t length = strlen(source->states[i]);
        if (strncmp(name, source->states[i], length) || (found && length <= skip)) continue;
        found = 1;
        skip = length;
        *state = i;
    }
    if (!found) return NULL;
    for (name += skip;; name++) {
        const size_t length = strcspn(name, ".");
        int wrapper = 0;
        for (int32_t w = 0; w < source->wrapper_count; w++)
            wrapper |= strlen(source->wrappers[w]) == length && !memcmp(source->wrappers[w], name, length);
        if (!wrapper) {
            memcpy(to, name, length);
            to += length;
        }
        name += length;
        if (!*name) break;
        if (!wrapper) *to++ = '.';
    }
    *to = 0;
    return text;
}

/* The end of the key with as many segments as the pattern. */
static const char *tail_of(const char *key, const char *pattern) {
    const char *at = key + strlen(key);
    int dots = 0;
    for (; *pattern; pattern++) dots += *pattern == '.';
    for (; at > key && (at[-1] != '.' || dots--); at--) {}
    return at;
}

static int32_t prefix_index(search *s, const char *key, size_t length) {
    int32_t i;
    for (i = 0; i < s->prefix_count; i++)
        if (strlen(s->prefixes[i]) == length && !memcmp(s->prefixes[i], key, length)) return i;
    if (i == PREFIXES) return i;
    s->prefixes[i] = (char *)calloc(length + 1, 1);
    if (!s->prefixes[i]) {
        s->failed = 1;
        return PREFIXES;
    }
    memcpy(s->prefixes[i], key, length);
    return s->prefix_count++;
}

static void read_key(search *s, int32_t part, int64_t index, const gmm_ckpt_tensor *t, char *text) {
    const gmm_ckpt_source *source = s->source;
    hit h;
    memset(&h, 0, sizeof h);
    if (!plain_key(s, t->name, text, &h.state)) return;
    for (h.row = 0; h.row < s->scheme->count; h.row++) {
        const char *pattern = s->scheme->rows[h.row].pattern, *tail = tail_of(text, pattern);
        if (!matches(pattern, tail, &h.layer, &h.expert)) continue;
        if (source->prefix && ((size_t)(tail - text) != strlen(source->prefix) ||
                               memcmp(text, source->prefix, (size_t)(tail - text))))
            continue;
        h.prefix = prefix_index(s, text, (size_t)(tail - text));
        h.part = part;
        h.tensor = index;
        h.rows = t->rank ? t->shape[0] : 0;
        h.group = s->scheme->global_index ? 0 : source->parts[part].rank.ep_rank;
        s->hits = (hit *)grown(s, s->hits, s->hit_count, &s->hit_room, sizeof *s->hits);
        if (!s->failed) s->hits[s->hit_count++] = h;
        return;
    }
}

static int compare_hits(const void *a, const void *b) {
    const hit *x = (const hit *)a, *y = (const hit *)b;
    if (x->state != y->state) return x->state < y->state ? -1 : 1;
    if (x->group != y->group) return x->group < y->group ? -1 : 1;
    if (x->layer != y->layer) return x->layer < y->layer ? -1 : 1;
    if (x->row != y->row) return x->row < y->row ? -1 : 1;
    if (x->expert != y->expert) return x->expert < y->expert ? -1 : 1;
    return x->part != y->part ? (x->part < y->part ? -1 : 1) : x->tensor < y->tensor ? -1 : x->tensor > y->tensor;
}

static int compare_numbers(const void *a, const void *b) {
    const int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return x < y ? -1 : x > y;
}

/* Sorts and removes duplicates; returns the new count. */
static int64_t unique(int64_t *list, int64_t count) {
    int64_t n = 0;
    if (count) qsort(list, (size_t)count, sizeof *list, compare_numbers);
    for (int64_t i = 0; i < count; i++)
        if (!n || list[n - 1] != list[i]) list[n++] = list[i];
    return n;
}

static int is_expert_slot(gmm_ckpt_slot slot) { return slot == GMM_CKPT_FC1 || slot == GMM_CKPT_FC2; }

static int is_moe_slot(gmm_ckpt_slot slot) { return is_expert_slot(slot) || slot == GMM_CKPT_ROUTER; }

static int64_t moe_index(const search *s, int64_t layer) {
    const int64_t *at = (const int64_t *)bsearch(&layer, s->moe, (size_t)s->moe_count, sizeof *s->moe, compare_numbers);
    return at ? at - s->moe : -1;
}

/* Reads all keys and keeps those with the model's prefix. Returns 0 if there are none, or if the prefix is
   ambiguous. */
static int collect(search *s) {
    const gmm_ckpt_source *source = s->source;
    int64_t n = 0;
    int32_t chosen = 0;
    for (int32_t p = 0; p < source->part_count && !s->failed; p++) {
        int64_t count;
        const gmm_ckpt_tensor *t = gmm_ckpt_table_tensors(source->parts[p].table, &count);
        size_t longest = 0;
        char *text;
        for (int64_t i = 0; i < count; i++)
            if (strlen(t[i].name) > longest) longest = strlen(t[i].name);
        text = (char *)malloc(longest + 2);
        s->failed |= !text;
        for (int64_t i = 0; i < count && !s->failed; i++) read_key(s, p, i, &t[i], text);
        free(text);
    }
    for (int32_t i = 0; i < s->prefix_count; i++)
        if (!*s->prefixes[i]) chosen = i + 1;
    if (!chosen && s->prefix_count != 1) return 0;
    if (chosen) chosen--;
    s->prefix = s->prefixes[chosen];
    for (int64_t i = 0; i < s->hit_count; i++)
        if (s->hits[i].prefix == chosen) s->hits[n++] = s->hits[i];
    s->hit_count = n;
    if (n) qsort(s->hits, (size_t)n, sizeof *s->hits, compare_hits);
    s->moe = (int64_t *)calloc((size_t)n + 1, sizeof *s->moe);
    s->failed |= !s->moe;
    for (int64_t i = 0; i < n && !s->failed; i++)
        if (is_moe_slot(s->scheme->rows[s->hits[i].row].slot)) s->moe[s->moe_count++] = s->hits[i].layer;
    if (!s->failed) s->moe_count = unique(s->moe, s->moe_count);
    s->experts = (int64_t *)calloc((size_t)s->moe_count + 1, sizeof *s->experts);
    s->lacking = (char *)calloc((size_t)s->moe_count + 1, 1);
    s->failed |= !s->experts || !s->lacking;
    s->out->matched = n;
    return !s->failed && s->moe_count > 0;
}

/* Reports numbers between the first and the last layer that no key has. */
static void find_layers(search *s) {
    const char *pattern = s->scheme->rows[0].pattern, *number = strstr(pattern, "{L}");
    const size_t stem = number ? (size_t)(number - pattern) : 0, prefix = strlen(s->prefix);
    for (int32_t p = 0; number && p < s->source->part_count && !s->failed; p++) {
        int64_t count, layer;
        const gmm_ckpt_tensor *t = gmm_ckpt_table_tensors(s->source->parts[p].table, &count);
        for (int64_t i = 0; i < count && !s->failed; i++) {
            char *text = (char *)malloc(strlen(t[i].name) + 2);
            const char *at;
            int32_t state;
            s->failed |= !text;
            if (text && plain_key(s, t[i].name, text, &state) && !strncmp(text, s->prefix, prefix) &&
                !strncmp(text + prefix, pattern, stem)) {
                at = text + prefix + stem;
                s->layers = (int64_t *)grown(s, s->layers, s->layer_count, &s->layer_room, sizeof *s->layers);
                if (!s->failed && read_number(&at, &layer) && *at == '.') s->layers[s->layer_count++] = layer;
            }
            free(text);
        }
    }
    s->layer_count = unique(s->layers, s->layer_count);
    for (int64_t i = 1; i < s->layer_count; i++) {
        const int64_t from = s->layers[i - 1] + 1, to = s->layers[i] - 1;
        if (from == to) say(s, "layer %lld: no tensor at all", (long long)from);
        else if (from < to) say(s, "layers %lld to %lld: no tensor at all", (long long)from, (long long)to);
    }
}

static int same_tree(const hit *a, const hit *b) { return a->state == b->state && a->group == b->group; }

/* The hits of one tree and layer; [begin, end). */
static int64_t end_of_layer(const search *s, int64_t begin) {
    const hit *h = &s->hits[begin];
    int64_t end = begin;
    while (end < s->hit_count && same_tree(&s->hits[end], h) && s->hits[end].layer == h->layer) end++;
    return end;
}

/* Number of experts of each layer: by its own keys and its router, or by all layers if it has neither. */
static void count_experts(search *s, int64_t stated) {
    const int32_t size = s->source->parts[0].rank.ep_size, ep = s->scheme->global_index || size < 1 ? 1 : size;
    char *router = (char *)calloc((size_t)s->moe_count + 1, 1);
    int64_t all = 0;
    s->failed |= !router;
    for (int64_t i = 0; i < s->hit_count && router; i++) {
        const hit *h = &s->hits[i];
        const gmm_ckpt_row *row = &s->scheme->rows[h->row];
        const int64_t at = moe_index(s, h->layer);
        int64_t n = 0;
        if (row->form == GMM_CKPT_EACH && is_expert_slot(row->slot)) n = h->expert + 1;
        if (n > all) all = n;
        if (row->slot == GMM_CKPT_ROUTER && row->kind == GMM_CKPT_WEIGHT) {
            router[at] = 1;
            n = h->rows / ep;
        }
        if (at >= 0 && n > s->experts[at]) s->experts[at] = n;
    }
    for (int64_t i = 0; i < s->moe_count && router; i++)
        if (stated || !router[i]) s->experts[i] = stated ? stated / ep : all;
    free(router);
}

/* The name of a row of the scheme, with N for the expert if `expert` is -1. */
static char *name_of(search *s, const hit *h, int32_t row, int64_t expert) {
    const char *pattern = s->scheme->rows[row].pattern, *state = s->source->states ? s->source->states[h->state] : "";
    const size_t capacity = strlen(pattern) + strlen(state) + strlen(s->prefix) + 48;
    char *text = (char *)malloc(capacity);
    size_t n;
    s->failed |= !text;
    if (!text) return NULL;
    n = (size_t)snprintf(text, capacity, "%s%s", state, s->prefix);
    while (*pattern) {
        if (*pattern != '{') {
            text[n++] = *pattern++;
            continue;
        }
        if (pattern[1] == 'e' && expert < 0) text[n++] = 'N';
        else n += (size_t)snprintf(text + n, capacity - n, "%lld", (long long)(pattern[1] == 'L' ? h->layer : expert));
        pattern += 3;
    }
    text[n] = 0;
    return text;
}

/* Reports experts of a row that are not among the hits [begin, end) of a layer. */
static int find_experts(search *s, int64_t begin, int64_t end, int32_t row, int64_t experts) {
    char ranges[200] = "";
    size_t used = 0;
    int64_t next = 0, missing = 0, first = -1;
    for (int64_t i = begin; i <= end; i++) {
        const int64_t expert = i < end ? s->hits[i].expert : experts;
        if (i < end && (s->hits[i].row != row || expert < next)) continue;
        if (expert > next) {
            if (first < 0) first = next;
            missing += expert - next;
            if (used + 60 < sizeof ranges) {
                used += (size_t)snprintf(ranges + used, sizeof ranges - used, "%s%lld", used ? ", " : "",
                                         (long long)next);
                if (expert - next > 1)
                    used += (size_t)snprintf(ranges + used, sizeof ranges - used, "-%lld", (long long)expert - 1);
                if (used + 60 >= sizeof ranges) used += (size_t)snprintf(ranges + used, sizeof ranges - used, ", ...");
            }
        }
        next = expert + 1;
    }
    if (missing) {
        const hit *h = &s->hits[begin];
        char *name = name_of(s, h, row, missing == 1 ? first : -1), rank[48] = "";
        if (s->groups > 1) snprintf(rank, sizeof rank, " of ep rank %d", (int)h->group);
        if (name && missing == 1) say(s, "layer %lld%s: %s", (long long)h->layer, rank, name);
        else if (name)
            say(s, "layer %lld%s: %s, N = %s: %lld of %lld experts", (long long)h->layer, rank, name, ranges,
                (long long)missing, (long long)experts);
        free(name);
    }
    return missing > 0;
}

/* Whether a layer must have a row of the scheme: FC1, FC2 and routers that its tree has in any layer; for separate
   experts, all rows that the scheme has for the halves that are present; biases that the layer has itself. */
static int expects(const search *s, const int *layer_has, const int *tree_has, int32_t row) {
    const gmm_ckpt_row *r = &s->scheme->rows[row];
    int slot_in_layer = 0, like_in_layer = 0, slot_in_tree = 0, same_form = 0;
    if (layer_has[row]) return 1;
    if (r->kind != GMM_CKPT_WEIGHT || (!is_expert_slot(r->slot) && r->slot != GMM_CKPT_ROUTER)) return 0;
    for (int32_t i = 0; i < s->scheme->count; i++) {
        const gmm_ckpt_row *other = &s->scheme->rows[i];
        if (other->kind != GMM_CKPT_WEIGHT) continue;
        same_form |= layer_has[i] && is_expert_slot(other->slot) && other->form == r->form &&
                     other->transposed == r->transposed && other->scaling == r->scaling;
        if (other->slot != r->slot) continue;
        slot_in_layer |= layer_has[i];
        slot_in_tree |= tree_has[i];
        if (layer_has[i] && other->form == GMM_CKPT_EACH && other->half != GMM_CKPT_BOTH && r->half != GMM_CKPT_BOTH)
            like_in_layer = 1;
    }
    if (slot_in_layer) return like_in_layer;
    return tree_has[row] || (is_expert_slot(r->slot) && !slot_in_tree && same_form);
}

static void lacks_layers(search *s, const hit *h, int64_t *next, int64_t end) {
    for (; *next < end; (*next)++) {
        char rank[48] = "";
        if (s->groups > 1) snprintf(rank, sizeof rank, " of ep rank %d", (int)h->group);
        say(s, "layer %lld%s: no tensor of its experts under the prefix \"%s%s\"", (long long)s->moe[*next], rank,
            s->source->states ? s->source->states[h->state] : "", s->prefix);
        s->lacking[*next] = 1;
    }
}

/* Checks the layers of every tree. */
static void find_members(search *s) {
    int64_t next = 0;
    int *has = (int *)calloc((size_t)s->scheme->count * 2 + 1, sizeof *has), *tree = has;
    if (has) tree += s->scheme->count;
    s->failed |= !has;
    for (int64_t begin = 0, end; begin < s->hit_count && !s->failed; begin = end) {
        const hit *h = &s->hits[begin];
        int64_t at = -1;
        int moe = 0;
        end = end_of_layer(s, begin);
        if (!begin || !same_tree(h - 1, h)) {
            next = 0;
            memset(tree, 0, (size_t)s->scheme->count * sizeof *tree);
            for (const hit *i = h; i < s->hits + s->hit_count && same_tree(i, h); i++) tree[i->row] = 1;
        }
        memset(has, 0, (size_t)s->scheme->count * sizeof *has);
        for (int64_t i = begin; i < end; i++) {
            has[s->hits[i].row] = 1;
            moe |= is_moe_slot(s->scheme->rows[s->hits[i].row].slot);
        }
        if (moe) {
            at = moe_index(s, h->layer);
            lacks_layers(s, h, &next, at);
            next = at + 1;
        }
        for (int32_t row = 0; moe && row < s->scheme->count; row++) {
            const gmm_ckpt_row *r = &s->scheme->rows[row];
            if (r->kind >= GMM_CKPT_SCALE || !expects(s, has, tree, row)) continue;
            if (is_expert_slot(r->slot) && r->form == GMM_CKPT_EACH) {
                if (find_experts(s, begin, end, row, s->experts[at])) s->lacking[at] = 1;
            } else if (!has[row]) {
                char *name = name_of(s, h, row, -1);
                if (name) say(s, "layer %lld: %s", (long long)h->layer, name);
                free(name);
                s->lacking[at] = 1;
            }
        }
        if (end == s->hit_count || !same_tree(&s->hits[end], h))
            lacks_layers(s, h, &next, s->moe_count);
    }
    free(has);
}

int key_inventory_of(key_inventory *inventory, const gmm_ckpt_source *source, int64_t experts) {
    search s;
    memset(&s, 0, sizeof s);
    memset(inventory, 0, sizeof *inventory);
    s.source = source;
    s.scheme = source->scheme;
    s.out = inventory;
    s.groups = s.scheme->global_index || source->parts[0].rank.ep_size < 2 ? 1 : source->parts[0].rank.ep_size;
    inventory->parts = source->part_count;
    inventory->left_out = (char **)calloc((size_t)source->part_count + 1, sizeof *inventory->left_out);
    s.failed |= !inventory->left_out;
    for (int32_t p = 0; p < source->part_count && !s.failed; p++) {
        int64_t count;
        (void)gmm_ckpt_table_tensors(source->parts[p].table, &count);
        inventory->left_out[p] = (char *)calloc((size_t)count + 1, 1);
        s.failed |= !inventory->left_out[p];
    }
    if (!s.failed && collect(&s)) {
        count_experts(&s, experts);
        find_layers(&s);
        if (!s.failed) find_members(&s);
        for (int64_t i = 0; i < s.moe_count; i++) inventory->layers_left_out += s.lacking[i];
        for (int64_t i = 0; i < s.hit_count && inventory->layers_left_out; i++) {
            const hit *h = &s.hits[i];
            const int64_t at = moe_index(&s, h->layer);
            if (at < 0 || !s.lacking[at]) continue;
            inventory->left_out[h->part][h->tensor] = 1;
            inventory->left_out_count++;
        }
    }
    for (int32_t i = 0; i < s.prefix_count; i++) free(s.prefixes[i]);
    free(s.hits);
    free(s.layers);
    free(s.moe);
    free(s.experts);
    free(s.lacking);
    if (s.failed) key_inventory_free(inventory);
    return !s.failed;
}

void key_inventory_free(key_inventory *inventory) {
    for (int64_t i = 0; i < inventory->missing_count; i++) free(inventory->missing[i]);
    for (int32_t p = 0; inventory->left_out && p < inventory->parts; p++) free(inventory->left_out[p]);
    free(inventory->missing);
    free(inventory->left_out);
    memset(inventory, 0, sizeof *inventory);
}
