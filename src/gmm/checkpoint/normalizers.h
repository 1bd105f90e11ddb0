/* ............................................................... 15.8 Megatron-LM's normalizers and small rules ... */
/* Megatron-LM's key normalizers, and its rules for splits and shards. */

GMMDEF gmm_status gmm_ckpt_split(const gmm_ckpt_tensor *tensor, int32_t members, int32_t experts,
                                 gmm_ckpt_tensor *parts, gmm_ckpt_report *report) {
    static const char fn[] = "gmm_ckpt_split";
    gmm_ckpt_tensor part;
    int32_t e, d;
    char shape[160];
    if (!tensor || !parts) return gmm__ck_fail_null(fn, tensor ? "parts" : "tensor", report);
    gmm__ck_reset_report(report);
    if (tensor->rank < 0 || tensor->rank > GMM_CKPT_RANK || experts < 1 || members < 0)
        return gmm__ck_fail(report, GMM_CKPT_ARGUMENT, tensor->name, fn,
                            "rank %d, %d members, %d experts: out of range", (int)tensor->rank, members, experts);
    for (d = 0; d < tensor->rank && tensor->shape[d] >= 0; d++) {}
    if (d < tensor->rank || tensor->bytes < 0 || tensor->offset < 0 || tensor->offset > INT64_MAX - tensor->bytes)
        return gmm__ck_fail(report, GMM_CKPT_ARGUMENT, tensor->name, fn,
                            "%lld bytes at offset %lld, or an extent: out of range", (long long)tensor->bytes,
                            (long long)tensor->offset);
    if (members && members != experts)
        return gmm__ck_fail(report, GMM_CKPT_GROUP_COUNT, tensor->name, fn, "it has %d groups, %d experts are expected",
                            members, experts);
    gmm__ck_shape_text(shape, sizeof shape, tensor->rank, tensor->shape);
    if (tensor->rank == 0 || tensor->shape[0] % experts || tensor->bytes % experts)
        return gmm__ck_fail(report, GMM_CKPT_NOT_DIVISIBLE, tensor->name, fn, "shape %s does not split into %d experts",
                            shape, experts);
    part = *tensor;
    part.bytes = tensor->bytes / experts;
    if (tensor->shape[0] == experts) {
        part.rank--;
        for (d = 0; d < part.rank; d++) part.shape[d] = tensor->shape[d + 1];
        part.shape[part.rank] = 0;
    } else {
        part.shape[0] /= experts;
    }
    for (e = 0; e < experts; e++) {
        parts[e] = part;
        parts[e].offset = tensor->offset + e * part.bytes;
    }
    return GMM_OK;
}

/* Keys as Megatron-LM's rules change them: first those of the table, then the keys that stacking and splitting made. A
   key that was stacked or split is marked replaced. The bytes of a key are its runs, concatenated. */
typedef struct gmm__ck_key_run { int64_t at, units; int32_t src; } gmm__ck_key_run;
typedef struct gmm__ck_key_entry {
    gmm_ckpt_tensor tensor;
    gmm__ck_key_run *runs;
    int64_t count;
    int replaced;
} gmm__ck_key_entry;

typedef struct gmm__ck_key_list {
    gmm__ck_key_entry *entries;
    int64_t count, capacity;
} gmm__ck_key_list;

/* The keys of one parameter of one module. */
typedef struct gmm__ck_key_group {
    int64_t grouped, grouped_count; /* entry, and how many match */
    int64_t *index;                 /* [experts] entries */
    int32_t *index_count;           /* [experts] */
    int32_t any, one, all;          /* whether any index has keys, and any or every one has exactly one */
} gmm__ck_key_group;

/* Adds a key and allocates its runs; NULL without memory. */
static gmm__ck_key_entry *gmm__ck_add_entry(gmm__ck_builder *b, gmm__ck_key_list *keys, const gmm_ckpt_tensor *tensor,
                                            int64_t runs) {
    void *array = keys->entries;
    gmm__ck_key_entry *e;
    if (!gmm__ck_reserve(&b->arena, &array, keys->count, &keys->capacity, sizeof *keys->entries)) return NULL;
    keys->entries = (gmm__ck_key_entry *)array;
    e = &keys->entries[keys->count];
    memset(e, 0, sizeof *e);
    e->tensor = *tensor;
    e->runs = (gmm__ck_key_run *)gmm__ck_alloc(&b->arena, runs, sizeof *e->runs);
    if (!e->runs) return NULL;
    keys->count++;
    return e;
}

/* "weight12": the length before the digits and the index; -1 where no index stands at the end. */
static size_t gmm__ck_split_index(const char *name, int64_t *index) {
    const size_t length = strlen(name);
    size_t first_digit = length;
    const char *digits;
    while (first_digit && name[first_digit - 1] >= '0' && name[first_digit - 1] <= '9') first_digit--;
    while (name[first_digit] == '0' && name[first_digit + 1]) first_digit++; /* "weight01" is "weight0" and 1 */
    digits = name + first_digit;
    if (gmm__ck_parse_number(&digits, index)) return first_digit;
    *index = -1;
    return length;
}

/* Stacks the keys of all experts into one of this name. */
static gmm_status gmm__ck_stack_keys(gmm__ck_builder *b, gmm__ck_key_list *keys, const gmm__ck_key_group *f,
                                     int64_t experts, const char *name) {
    const gmm_ckpt_tensor first = keys->entries[f->index[0]].tensor;
    gmm_ckpt_tensor t = first;
    gmm__ck_key_entry *stack;
    int64_t e, runs = 0;
    if (first.rank == GMM_CKPT_RANK)
        return gmm__ck_refuse(b, GMM_CKPT_SHAPE, first.name, "a stack of it would have %d dimensions", first.rank + 1);
    for (e = t.rank++; e > 0; e--) t.shape[e] = t.shape[e - 1];
    t.shape[0] = experts;
    t.name = name;
    if (!gmm__mul(first.bytes, experts, &t.bytes))
        return gmm__ck_refuse(b, GMM_CKPT_OVERFLOW, first.name, "a stack of it does not fit 63 bits");
    for (e = 0; e < experts; e++) {
        const gmm_ckpt_tensor *s = &keys->entries[f->index[e]].tensor;
        if (s->dtype != first.dtype)
            return gmm__ck_refuse(b, GMM_CKPT_DTYPE, s->name, "it is %s, the first of the stack %s",
                                  gmm_dtype_name(s->dtype), gmm_dtype_name(first.dtype));
        if (s->rank != first.rank || s->bytes != first.bytes ||
            memcmp(s->shape, first.shape, (size_t)s->rank * sizeof s->shape[0]))
            return gmm__ck_refuse(b, GMM_CKPT_SHAPE, s->name, "the first of the stack has another shape");
        runs += keys->entries[f->index[e]].count;
    }
    stack = gmm__ck_add_entry(b, keys, &t, runs);
    if (!stack) return gmm__ck_no_memory(b);
    for (e = 0; e < experts; e++) {
        gmm__ck_key_entry *member = &keys->entries[f->index[e]];
        memcpy(stack->runs + stack->count, member->runs, (size_t)member->count * sizeof *member->runs);
        stack->count += member->count;
        member->replaced = 1;
    }
    return GMM_OK;
}

/* Splits the grouped key into one key per expert, named `name` and its index. */
static gmm_status gmm__ck_split_key(gmm__ck_builder *b, gmm__ck_key_list *keys, const gmm__ck_key_group *f,
                                    int64_t experts, const char *name, size_t length) {
    const gmm__ck_key_entry grouped = keys->entries[f->grouped];
    gmm_ckpt_tensor *parts = (gmm_ckpt_tensor *)gmm__ck_alloc(&b->arena, experts, sizeof *parts);
    int64_t e, run = 0, run_offset = 0;
    gmm_status status;
    if (!parts) return gmm__ck_no_memory(b);
    status = gmm_ckpt_split(&grouped.tensor, 0, (int32_t)experts, parts, b->report);
    if (status) return status;
    keys->entries[f->grouped].replaced = 1;
    for (e = 0; e < experts; e++) {
        int64_t remaining = gmm__ck_unit_count(&parts[e]);
        char *name_copy = (char *)gmm__ck_alloc(&b->arena, (int64_t)length + 24, 1);
        gmm__ck_key_entry *member;
        if (!name_copy) return gmm__ck_no_memory(b);
        (void)snprintf(name_copy, length + 24, "%s%lld", name, (long long)e);
        parts[e].name = name_copy;
        member = gmm__ck_add_entry(b, keys, &parts[e], grouped.count);
        if (!member) return gmm__ck_no_memory(b);
        while (remaining > 0) {
            gmm__ck_key_run *piece = &member->runs[member->count++];
            *piece = grouped.runs[run];
            piece->at += run_offset;
            piece->units = gmm__min_i64(remaining, piece->units - run_offset);
            run_offset += piece->units;
            remaining -= piece->units;
            if (run_offset == grouped.runs[run].units) {
                run_offset = 0;
                run++;
            }
        }
    }
    return GMM_OK;
}

/* Finds the keys of one parameter: `stem`, and `stem` with an index. Keys are equal to them where `exact` is 1, or else
   end with them. */
static gmm_status gmm__ck_find_group(gmm__ck_builder *b, const gmm__ck_key_list *keys, int64_t experts,
                                     const char *stem, int exact, gmm__ck_key_group *f) {
    const size_t stem_length = strlen(stem);
    int64_t i, e;
    memset(f, 0, sizeof *f);
    f->index = (int64_t *)gmm__ck_alloc(&b->arena, experts, sizeof *f->index);
    f->index_count = (int32_t *)gmm__ck_alloc(&b->arena, experts, sizeof *f->index_count);
    if (!f->index || !f->index_count) return gmm__ck_no_memory(b);
    for (i = 0; i < keys->count; i++) {
        const char *key = keys->entries[i].tensor.name;
        size_t length = strlen(key);
        int64_t index = -1;
        if (keys->entries[i].replaced) continue;
        if (length >= stem_length && !strcmp(key + length - stem_length, stem) && (!exact || length == stem_length)) {
            f->grouped = i;
            f->grouped_count++;
        }
        length = gmm__ck_split_index(key, &index);
        if (index < 0 || index >= experts || length < stem_length || (exact && length != stem_length) ||
            memcmp(key + length - stem_length, stem, stem_length))
            continue;
        f->index[index] = i;
        f->index_count[index]++;
    }
    f->all = 1;
    for (e = 0; e < experts; e++) {
        f->any |= f->index_count[e] > 0;
        f->one |= f->index_count[e] == 1;
        f->all &= f->index_count[e] == 1;
    }
    return GMM_OK;
}

/* Stacks or splits the keys of one group. `name` is the stacked key's. */
static gmm_status gmm__ck_convert_group(gmm__ck_builder *b, gmm__ck_key_list *keys, const gmm__ck_key_group *f,
                                        int64_t experts, const char *name, int32_t grouped) {
    return grouped ? gmm__ck_stack_keys(b, keys, f, experts, name)
                   : gmm__ck_split_key(b, keys, f, experts, name, strlen(name));
}

/* One expert's tensor of a group; fails where the stacked tensor does not split. */
static gmm_status gmm__ck_group_member(gmm__ck_builder *b, const gmm__ck_key_list *keys, const gmm__ck_key_group *f,
                                       int64_t experts, int32_t grouped, gmm_ckpt_tensor *member) {
    gmm_ckpt_tensor *parts;
    gmm_status status;
    *member = keys->entries[grouped ? f->index[0] : f->grouped].tensor;
    if (grouped) return GMM_OK;
    parts = (gmm_ckpt_tensor *)gmm__ck_alloc(&b->arena, experts, sizeof *parts);
    if (!parts) return gmm__ck_no_memory(b);
    status = gmm_ckpt_split(member, 0, (int32_t)experts, parts, b->report);
    *member = parts[0];
    return status;
}

/* Finds the format of one expert's codes from one expert's scales. */
static gmm_status gmm__ck_upstream_format(gmm__ck_builder *b, const gmm_ckpt_row *row, const gmm_ckpt_tensor *codes,
                                          const gmm_ckpt_tensor *scale, const gmm__ck_format **format) {
    gmm__ck_quantized q;
    int32_t dims;
    uint32_t dtypes;
    char shapes[200], names[64], actual[160];
    memset(&q, 0, sizeof q);
    q.row = row;
    q.codes = codes;
    q.scale = scale;
    q.experts = 1;
    q.packed = gmm__ck_is_packed(codes->dtype);
    q.dims = codes->rank;
    if (codes->rank != 1 && codes->rank != 2)
        return gmm__ck_refuse(b, GMM_CKPT_SHAPE, codes->name, "an expert's codes of %d dimensions are no matrix with "
                              "scales", (int)codes->rank);
    if (codes->rank == 2 && codes->shape[1] > INT64_MAX / 2)
        return gmm__ck_refuse(b, GMM_CKPT_OVERFLOW, codes->name, "rows of %lld do not fit 63 bits",
                              (long long)codes->shape[1]);
    q.rows = codes->shape[0];
    q.cols = codes->rank == 1 ? 1 : codes->shape[1] * (codes->dtype == GMM_U8 ? 2 : 1);
    *format = gmm__ck_find_format(&q, &dims, &dtypes, shapes, sizeof shapes);
    if (*format) return GMM_OK;
    if (!(dtypes >> scale->dtype & 1))
        return gmm__ck_refuse(b, GMM_CKPT_DTYPE, scale->name, "scales of %s codes must be %s, not %s",
                              gmm_dtype_name(codes->dtype), gmm__ck_dtype_names(dtypes, names, sizeof names),
                              gmm_dtype_name(scale->dtype));
    gmm__ck_shape_text(actual, sizeof actual, scale->rank, scale->shape);
    return gmm__ck_refuse(b, GMM_CKPT_SHAPE, scale->name, "an expert's shape %s is not that of the %s scales of %lld x "
                          "%lld codes: %s", actual, gmm_dtype_name(scale->dtype), (long long)q.rows, (long long)q.cols,
                          shapes);
}

/* Checks that the scales of one kind have the layout that their weights are converted from. `stem` is their stacked
   key. *present tells whether there are any. */
static gmm_status gmm__ck_check_group(gmm__ck_builder *b, const gmm__ck_key_group *f, int64_t experts,
                                      const char *stem, int32_t grouped, int *present) {
    const size_t capacity = strlen(stem) + 24;
    int64_t e;
    char *name;
    *present = f->any || f->grouped_count;
    if (!*present || (grouped ? f->all && !f->grouped_count : f->grouped_count == 1 && !f->any)) return GMM_OK;
    if (f->grouped_count && f->any)
        return gmm__ck_refuse(b, GMM_CKPT_BOTH_LAYOUTS, stem, "scales are there for all experts together and for each");
    if (grouped == (f->grouped_count > 0))
        return gmm__ck_refuse(b, GMM_CKPT_SCALE_MISSING, stem, "the weights are %s, these scales are %s: both must be "
                              "alike", grouped ? "of one expert each" : "of all experts",
                              grouped ? "of all experts" : "of one expert each");
    for (e = 0; e < experts && f->index_count[e] == 1; e++) {}
    name = (char *)gmm__ck_alloc(&b->arena, (int64_t)capacity, 1);
    if (!name) return gmm__ck_no_memory(b);
    (void)snprintf(name, capacity, "%s%lld", stem, (long long)e);
    return gmm__ck_refuse(b, f->index_count[e] ? GMM_CKPT_AMBIGUOUS : GMM_CKPT_SCALE_MISSING, name,
                          "the source has it %s", f->index_count[e] ? "several times" : "not, the other experts' "
                                                                                        "scales are there");
}

/* Converts the scales of quantized weights as the weights: `weight` is the stacked key of the weights, `codes` one
   expert's tensor. A quantized stack of Megatron-LM is one object, whose members have their scales. */
static gmm_status gmm__ck_convert_scales(gmm__ck_builder *b, gmm__ck_key_list *keys, int64_t experts,
                                         const char *weight, const gmm_ckpt_tensor *codes, int32_t grouped) {
    static const char front[] = "{p}.weight";
    const int32_t count = (int32_t)(sizeof gmm__ck_module / sizeof gmm__ck_module[0]);
    const gmm__ck_format *format = NULL;
    const gmm_ckpt_row *each;
    int32_t r;
    int beside = 0;
    for (r = 0; r < count; r++) { /* scales stand before the kinds beside them */
        const gmm_ckpt_row *row = &gmm__ck_module[r];
        gmm__ck_key_group f;
        gmm_ckpt_tensor member;
        gmm_status status;
        int64_t elements = 1;
        int32_t d;
        int present = 0;
        char *stem;
        if (row->form == GMM_CKPT_EACH || row->kind < GMM_CKPT_SCALE) continue;
        stem = (char *)gmm__ck_alloc(&b->arena, (int64_t)(strlen(weight) + strlen(row->pattern)), 1);
        if (!stem) return gmm__ck_no_memory(b);
        memcpy(stem, weight, strlen(weight));
        memcpy(stem + strlen(weight), row->pattern + sizeof front - 1, strlen(row->pattern) - (sizeof front - 1));
        for (each = gmm__ck_module; each->kind != row->kind || !gmm__ck_same_suffix(each, row); each++) {}
        if (row->kind != GMM_CKPT_SCALE && format && !(format->beside >> row->kind & 1)) continue;
        status = gmm__ck_find_group(b, keys, experts, stem, 1, &f);
        if (!status && row->kind != GMM_CKPT_SCALE && !format && (f.any || f.grouped_count))
            return gmm__ck_refuse(b, GMM_CKPT_SCALE_MISSING, codes->name, "the source lacks its scales");
        if (!status) status = gmm__ck_check_group(b, &f, experts, stem, grouped, &present);
        if (status) return status;
        if (!present) continue;
        if (row->kind == GMM_CKPT_SCALE && format)
            return gmm__ck_refuse(b, GMM_CKPT_BOTH_LAYOUTS, stem, "its scales are there under another name too");
        status = gmm__ck_group_member(b, keys, &f, experts, grouped, &member);
        if (status) return status;
        if (row->kind == GMM_CKPT_SCALE) status = gmm__ck_upstream_format(b, each, codes, &member, &format);
        for (d = 0; d < member.rank; d++) elements = member.shape[d] == 1 ? elements : 0;
        if (row->kind != GMM_CKPT_SCALE && (member.dtype != GMM_F32 || !elements))
            return gmm__ck_refuse(b, elements ? GMM_CKPT_DTYPE : GMM_CKPT_SHAPE, member.name, "it must have one f32 "
                                  "for each expert, not %s", elements ? gmm_dtype_name(member.dtype) : "more");
        if (!status) status = gmm__ck_convert_group(b, keys, &f, experts, stem, grouped);
        if (status) return status;
        beside |= row->kind != GMM_CKPT_SCALE;
    }
    if (!format && codes->dtype != GMM_U8)
        return gmm__ck_refuse(b, GMM_CKPT_SCALE_MISSING, codes->name, "the source lacks its scales");
    if (format && format->needs_beside && !beside)
        return gmm__ck_refuse(b, GMM_CKPT_SCALE_MISSING, codes->name, "the source lacks its tensor scale or amax: %s "
                              "has one beside its scales", gmm_scaling_name(format->scaling));
    return GMM_OK;
}

/* Replaces keys of one parameter as upstream does, and the scales of weights. `stem` is what keys are, or end with,
   before the index. */
static gmm_status gmm__ck_convert_upstream(gmm__ck_builder *b, gmm__ck_key_list *keys, const gmm_ckpt_linear *l,
                                           const char *stem, int exact, int bias) {
    const int32_t grouped = bias ? l->grouped_bias : l->grouped_weight;
    const size_t stem_length = strlen(stem);
    gmm__ck_key_group f;
    gmm_ckpt_tensor codes;
    const char *first;
    char *name;
    size_t prefix;
    gmm_status status = gmm__ck_find_group(b, keys, l->experts, stem, exact, &f);
    if (status) return status;
    if (grouped ? f.grouped_count || !f.all : f.one || f.grouped_count != 1) return GMM_OK;
    first = keys->entries[grouped ? f.index[0] : f.grouped].tensor.name;
    prefix = strlen(first) - stem_length - (grouped ? 1 : 0); /* index 0 is one digit */
    name = (char *)gmm__ck_alloc(&b->arena, (int64_t)(prefix + stem_length + 1), 1);
    if (!name) return gmm__ck_no_memory(b);
    memcpy(name, first, prefix);
    memcpy(name + prefix, stem, stem_length);
    status = gmm__ck_group_member(b, keys, &f, l->experts, grouped, &codes);
    if (!status) status = gmm__ck_convert_group(b, keys, &f, l->experts, name, grouped);
    if (status || bias || !((GMM__CK_CODES_8 | GMM__CK_CODES_4) >> codes.dtype & 1)) return status;
    return gmm__ck_convert_scales(b, keys, l->experts, name, &codes, grouped);
}

/* All keys of the table, each one run. */
static gmm_status gmm__ck_list_keys(gmm__ck_builder *b, gmm__ck_key_list *keys) {
    const gmm_ckpt_table *table = b->parts[0].table;
    int64_t i;
    b->uses = (uint8_t **)gmm__ck_alloc(&b->arena, 1, sizeof *b->uses);
    if (b->uses) b->uses[0] = (uint8_t *)gmm__ck_alloc(&b->arena, table->count + 1, 1);
    if (!b->uses || !b->uses[0]) return gmm__ck_no_memory(b);
    for (i = 0; i < table->count; i++) {
        gmm__ck_key_entry *e = gmm__ck_add_entry(b, keys, &table->tensors[i], 1);
        if (!e) return gmm__ck_no_memory(b);
        e->count = 1;
        e->runs->src = (int32_t)i;
        e->runs->units = gmm__ck_unit_count(&e->tensor);
    }
    return GMM_OK;
}

/* Plans the targets of the keys that stacking and splitting made. */
static gmm_status gmm__ck_plan_keys(gmm__ck_builder *b, const gmm__ck_key_list *keys) {
    int64_t i, r;
    for (i = 0; i < keys->count; i++) {
        const gmm__ck_key_entry *e = &keys->entries[i];
        const int64_t first = b->move_count;
        gmm_ckpt_tensor t = e->tensor;
        int64_t offset = 0;
        int32_t target = -1;
        gmm_status status;
        if (i < b->parts[0].table->count) b->uses[0][i] = e->replaced ? GMM__CK_USED : GMM__CK_UNUSED;
        if (i < b->parts[0].table->count || e->replaced) continue;
        status = gmm__ck_add_target(b, &t, &target);
        for (r = 0; !status && r < e->count; r++) {
            status = gmm__ck_plan_copy(b, 0, e->runs[r].src, e->runs[r].at, target, offset, e->runs[r].units);
            offset += e->runs[r].units;
        }
        if (!status) status = gmm__ck_finish_target(b, target, first);
        if (status) return status;
    }
    return GMM_OK;
}

/* Arguments in which the two normalizers differ. */
typedef struct gmm__ck_normalize_args {
    const char *fn;
    const gmm_ckpt_table *table;
    const char *prefix;             /* of the hook's module; NULL = linears have paths */
    const gmm_ckpt_linear *linears; /* [count] */
    int64_t count;
    gmm_ckpt_parity parity;
} gmm__ck_normalize_args;

/* Plans the normalized table of both functions. */
static gmm_status gmm__ck_normalize(gmm_ckpt_plan **out, const gmm__ck_normalize_args *args,
                                    const gmm_allocator *allocator, gmm_ckpt_report *report) {
    static const char *const module[] = {"module", "_orig_mod"};
    static const char *const names[] = {"weight", "bias"};
    gmm_ckpt_source source = GMM_ZERO;
    gmm_ckpt_target target = GMM_ZERO;
    gmm_ckpt_part part = GMM_ZERO;
    gmm__ck_key_list keys;
    gmm__ck_builder b;
    gmm_status status;
    const char *prefix = args->prefix;
    int64_t i;
    int kind;
    if (out) *out = NULL;
    if ((args->parity != GMM_CKPT_UPSTREAM && args->parity != GMM_CKPT_SAFE) || args->count < 0)
        return gmm__ck_fail(report, GMM_CKPT_ARGUMENT, NULL, args->fn, "parity %d must be 0 or 1, and count %lld >= 0",
                            (int)args->parity, (long long)args->count);
    memset(&keys, 0, sizeof keys);
    part.table = args->table;
    source.parts = &part;
    source.part_count = 1;
    source.scheme = gmm_ckpt_scheme_of("module");
    source.prefix = prefix;
    source.wrappers = module;
    source.wrapper_count = prefix ? 0 : 2;
    source.extra = GMM_CKPT_EXTRA_KEEP;
    target.views = 1;
    if (args->parity != GMM_CKPT_UPSTREAM)
        return gmm__ck_create(args->fn, out, &source, &target, args->linears, args->count, allocator, report);
    status = gmm__ck_builder_init(&b, args->fn, out, allocator, report);
    if (!status) status = gmm__ck_read_descriptors(&b, &source, &target);
    if (!status) status = gmm__ck_list_keys(&b, &keys);
    for (i = 0; !status && i < args->count; i++) {
        const gmm_ckpt_linear *l = &args->linears[i];
        const char *path = prefix ? prefix : l->path ? l->path : "";
        char *stem;
        if (l->experts < 1 || l->experts > INT32_MAX) {
            status = gmm__ck_refuse(&b, GMM_CKPT_ARGUMENT, l->path, "linears[%lld].experts is %lld", (long long)i,
                                    (long long)l->experts);
            break;
        }
        while (!prefix && !strncmp(path, "module.", 7)) path += 7;
        stem = (char *)gmm__ck_alloc(&b.arena, (int64_t)strlen(path) + 16, 1);
        if (!stem) status = gmm__ck_no_memory(&b);
        for (kind = 0; !status && kind < (l->bias ? 2 : 1); kind++) {
            (void)snprintf(stem, strlen(path) + 16, "%s%s%s", path, prefix || !*path ? "" : ".", names[kind]);
            status = gmm__ck_convert_upstream(&b, &keys, l, stem, prefix != NULL, kind);
        }
    }
    if (!status) status = gmm__ck_plan_keys(&b, &keys);
    if (!status) status = gmm__ck_plan_extra(&b);
    if (!status) status = gmm__ck_build_plan(&b, *out);
    return gmm__ck_builder_release(&b, out, status);
}

GMMDEF gmm_status gmm_ckpt_normalize_hook(gmm_ckpt_plan **out, const gmm_ckpt_table *table, const char *prefix,
                                          const gmm_ckpt_linear *linear, gmm_ckpt_parity parity,
                                          const gmm_allocator *allocator, gmm_ckpt_report *report) {
    static const char fn[] = "gmm_ckpt_normalize_hook";
    gmm__ck_normalize_args args;
    gmm_ckpt_linear l;
    if (out) *out = NULL;
    if (!out || !table || !prefix || !linear)
        return gmm__ck_fail_null(fn, !out ? "out" : !table ? "table" : !prefix ? "prefix" : "linear", report);
    l = *linear;
    l.path = "";
    args.fn = fn;
    args.table = table;
    args.prefix = prefix;
    args.linears = &l;
    args.count = 1;
    args.parity = parity;
    return gmm__ck_normalize(out, &args, allocator, report);
}

GMMDEF gmm_status gmm_ckpt_normalize_map(gmm_ckpt_plan **out, const gmm_ckpt_table *table,
                                         const gmm_ckpt_linear *linears, int64_t count, gmm_ckpt_parity parity,
                                         const gmm_allocator *allocator, gmm_ckpt_report *report) {
    static const char fn[] = "gmm_ckpt_normalize_map";
    gmm__ck_normalize_args args;
    int64_t i;
    if (out) *out = NULL;
    if (!out || !table || (!linears && count))
        return gmm__ck_fail_null(fn, !out ? "out" : !table ? "table" : "linears", report);
    for (i = 0; i < count; i++)
        if (!linears[i].path) return gmm__ck_fail_null(fn, "linears: a path", report);
    args.fn = fn;
    args.table = table;
    args.prefix = NULL;
    args.linears = linears;
    args.count = count;
    args.parity = parity;
    return gmm__ck_normalize(out, &args, allocator, report);
}

GMMDEF gmm_status gmm_ckpt_shard_members(const int64_t *numel, int32_t members, int64_t start, int64_t length,
                                         gmm_ckpt_interval *out, gmm_error *error) {
    static const char fn[] = "gmm_ckpt_shard_members";
    int64_t total = 0, member_begin = 0;
    int32_t i;
    if (!out || (!numel && members > 0)) return gmm__fail(error, GMM_E_NULL, "%s: %s is NULL", fn,
                                                          out ? "numel" : "out");
    if (members < 0) return gmm__fail(error, GMM_E_ARG, "%s: members is %d: must be >= 0", fn, members);
    for (i = 0; i < members; i++) {
        if (numel[i] < 0)
            return gmm__fail(error, GMM_E_ARG, "%s: numel[%d] is %lld: must be >= 0", fn, i, (long long)numel[i]);
        if (numel[i] > INT64_MAX - total)
            return gmm__fail(error, GMM_E_OVERFLOW, "%s: the members do not fit 63 bits", fn);
        total += numel[i];
    }
    if (length < 0 || start < -1 || (start == -1 && length))
        return gmm__fail(error, GMM_E_ARG, "%s: start %lld, length %lld: must be >= 0, or -1 and 0 for no shard", fn,
                         (long long)start, (long long)length);
    if (start > total || length > total - (start < 0 ? 0 : start))
        return gmm__fail(error, GMM_E_ARG, "%s: the shard of %lld at %lld passes the end of %lld elements", fn,
                         (long long)length, (long long)start, (long long)total);
    for (i = 0; i < members; i++) {
        const int64_t begin = start > member_begin ? start : member_begin;
        const int64_t end = gmm__min_i64(start + length, member_begin + numel[i]);
        const int empty = start < 0 || begin >= end;
        out[i].shard_at = empty ? -1 : begin - start;
        out[i].member_at = empty ? -1 : begin - member_begin;
        out[i].length = empty ? 0 : end - begin;
        member_begin += numel[i];
    }
    return GMM_OK;
}

