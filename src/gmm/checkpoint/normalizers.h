/* ............................................................... 15.8 Megatron-LM's normalizers and small rules ... */

GMMDEF gmm_status gmm_ckpt_split(const gmm_ckpt_tensor *tensor, int32_t members, int32_t experts,
                                 gmm_ckpt_tensor *parts, gmm_ckpt_report *report) {
    static const char fn[] = "gmm_ckpt_split";
    gmm_ckpt_tensor one;
    int32_t e, d;
    char shape[160];
    if (!tensor || !parts) return gmm__ck_null(fn, tensor ? "parts" : "tensor", report);
    gmm__ck_begin(report);
    if (tensor->rank < 0 || tensor->rank > GMM_CKPT_RANK || experts < 1 || members < 0)
        return gmm__ck_fail(report, GMM_CKPT_ARGUMENT, tensor->name, fn, "rank %d, %d members, %d experts: out of "
                            "range",
                            (int)tensor->rank, (int)members, (int)experts);
    if (members && members != experts)
        return gmm__ck_fail(report, GMM_CKPT_GROUP_COUNT, tensor->name, fn, "it has %d groups, %d experts are expected",
                            (int)members, (int)experts);
    gmm__ck_shape_text(shape, sizeof shape, tensor->rank, tensor->shape);
    if (tensor->rank == 0 || tensor->shape[0] % experts || tensor->bytes % experts)
        return gmm__ck_fail(report, GMM_CKPT_NOT_DIVISIBLE, tensor->name, fn, "shape %s does not split into %d experts",
                            shape, (int)experts);
    one = *tensor;
    one.bytes = tensor->bytes / experts;
    if (tensor->shape[0] == experts) {
        one.rank--;
        for (d = 0; d < one.rank; d++) one.shape[d] = tensor->shape[d + 1];
        one.shape[one.rank] = 0;
    } else {
        one.shape[0] /= experts;
    }
    for (e = 0; e < experts; e++) {
        parts[e] = one;
        parts[e].offset = tensor->offset + e * one.bytes;
    }
    return GMM_OK;
}

/* Where one parameter of one module stands in the table, for upstream's rules. */
typedef struct gmm__ck_found {
    int32_t grouped, grouped_count; /* tensor, and how many match */
    int32_t *index, *index_count;   /* [experts] */
    int32_t any, all;               /* of the indices that are unique */
} gmm__ck_found;

/* "weight12": the length before the digits and the index; -1 where no index stands at the end. */
static size_t gmm__ck_tail(const char *name, int64_t *index) {
    const size_t length = strlen(name);
    size_t at = length;
    const char *digits;
    while (at && name[at - 1] >= '0' && name[at - 1] <= '9') at--;
    while (name[at] == '0' && name[at + 1]) at++; /* "weight01" is "weight0" and 1 */
    digits = name + at;
    if (gmm__ck_number(&digits, index)) return at;
    *index = -1;
    return length;
}

/* Replaces keys of one parameter as upstream does. `stem` is what keys are, or end with, before the index. */
static gmm_status gmm__ck_upstream(gmm__ck_build *b, const gmm_ckpt_linear *l, const char *stem, int exact,
                                   int32_t grouped) {
    const gmm_ckpt_table *table = b->parts[0].table;
    const size_t stem_length = strlen(stem);
    gmm__ck_found f;
    int64_t i, e;
    gmm_status status;
    memset(&f, 0, sizeof f);
    f.index = (int32_t *)gmm__ck_get(&b->temp, l->experts, sizeof *f.index);
    f.index_count = (int32_t *)gmm__ck_get(&b->temp, l->experts, sizeof *f.index_count);
    if (!f.index || !f.index_count) return gmm__ck_no_memory(b);
    for (i = 0; i < table->count; i++) {
        const char *name = table->tensors[i].name;
        size_t length = strlen(name);
        int64_t index = -1;
        if (b->used[0][i]) continue; /* an earlier module took it */
        if (length >= stem_length && !strcmp(name + length - stem_length, stem) && (!exact || length == stem_length)) {
            f.grouped = (int32_t)i;
            f.grouped_count++;
        }
        length = gmm__ck_tail(name, &index);
        if (index < 0 || index >= l->experts || length < stem_length || (exact && length != stem_length) ||
            memcmp(name + length - stem_length, stem, stem_length))
            continue;
        f.index[index] = (int32_t)i;
        f.index_count[index]++;
    }
    f.all = 1;
    for (e = 0; e < l->experts; e++) {
        f.any |= f.index_count[e] == 1;
        f.all &= f.index_count[e] == 1;
    }
    if (grouped ? f.grouped_count || !f.all : f.any || f.grouped_count != 1) return GMM_OK;
    {
        const gmm_ckpt_tensor *first = &table->tensors[grouped ? f.index[0] : f.grouped];
        const size_t prefix = strlen(first->name) - stem_length - (grouped ? 1 : 0); /* index 0 is one digit */
        char *name = (char *)gmm__ck_get(&b->temp, (int64_t)(prefix + stem_length + 24), 1);
        gmm_ckpt_tensor t = *first;
        int32_t target = -1;
        if (!name) return gmm__ck_no_memory(b);
        memcpy(name, first->name, prefix);
        memcpy(name + prefix, stem, stem_length);
        t.name = name;
        if (grouped) {
            if (first->rank == GMM_CKPT_RANK)
                return gmm__ck_refuse(b, GMM_CKPT_SHAPE, first->name, "a stack of it would have %d dimensions",
                                      first->rank + 1);
            for (e = t.rank++; e > 0; e--) t.shape[e] = t.shape[e - 1];
            t.shape[0] = l->experts;
            if (!gmm__mul(first->bytes, l->experts, &t.bytes))
                return gmm__ck_refuse(b, GMM_CKPT_OVERFLOW, first->name, "a stack of it does not fit 63 bits");
            i = b->move_count;
            status = gmm__ck_new_target(b, &t, &target);
            for (e = 0; !status && e < l->experts; e++) {
                const gmm_ckpt_tensor *s = &table->tensors[f.index[e]];
                if (s->dtype != first->dtype)
                    return gmm__ck_refuse(b, GMM_CKPT_DTYPE, s->name, "it is %s, the first of the stack %s",
                                          gmm_dtype_name(s->dtype), gmm_dtype_name(first->dtype));
                if (s->rank != first->rank || s->bytes != first->bytes ||
                    memcmp(s->shape, first->shape, (size_t)s->rank * sizeof s->shape[0]))
                    return gmm__ck_refuse(b, GMM_CKPT_SHAPE, s->name, "the first of the stack has another shape");
                b->used[0][f.index[e]] = 1;
                status = gmm__ck_run(b, 0, f.index[e], 0, target, e * gmm__ck_units(first), gmm__ck_units(first));
            }
            return status ? status : gmm__ck_close(b, target, i);
        } else {
            gmm_ckpt_tensor *parts = (gmm_ckpt_tensor *)gmm__ck_get(&b->temp, l->experts, sizeof *parts);
            if (!parts) return gmm__ck_no_memory(b);
            if (l->experts > INT32_MAX)
                return gmm__ck_refuse(b, GMM_CKPT_ARGUMENT, l->path, "experts is %lld", (long long)l->experts);
            status = gmm_ckpt_split(first, 0, (int32_t)l->experts, parts, b->report);
            if (status) return status;
            b->used[0][f.grouped] = 1;
            for (e = 0; !status && e < l->experts; e++) {
                const int64_t units = gmm__ck_units(&parts[e]);
                (void)snprintf(name + prefix + stem_length, 24, "%lld", (long long)e);
                parts[e].name = name;
                i = b->move_count;
                status = gmm__ck_new_target(b, &parts[e], &target);
                if (!status) status = gmm__ck_run(b, 0, f.grouped, e * units, target, 0, units);
                if (!status) status = gmm__ck_close(b, target, i);
            }
            return status;
        }
    }
}

static gmm_status gmm__ck_normalize(const char *fn, gmm_ckpt_plan **out, const gmm_ckpt_table *table,
                                    const char *prefix, const gmm_ckpt_linear *linears, int64_t count,
                                    gmm_ckpt_parity parity, const gmm_allocator *allocator, gmm_ckpt_report *report) {
    static const char *const module[] = {"module", "_orig_mod"};
    static const char *const names[] = {"weight", "bias"};
    gmm_ckpt_source source = GMM_ZERO;
    gmm_ckpt_target target = GMM_ZERO;
    gmm_ckpt_part part = GMM_ZERO;
    gmm__ck_build b;
    gmm_status status;
    int64_t i;
    int kind;
    part.table = table;
    source.parts = &part;
    source.part_count = 1;
    source.scheme = gmm_ckpt_scheme_of("module");
    source.prefix = prefix;
    source.wrappers = module;
    source.wrapper_count = prefix ? 0 : 2;
    source.extra = GMM_CKPT_EXTRA_KEEP;
    target.views = 1;
    if (parity != GMM_CKPT_UPSTREAM)
        return gmm__ck_create(fn, out, &source, &target, linears, count, allocator, report);
    status = gmm__ck_start(&b, fn, out, allocator, report);
    if (!status) status = gmm__ck_open(&b, &source, &target);
    if (!status) {
        b.used = (uint8_t **)gmm__ck_get(&b.temp, 1, sizeof *b.used);
        if (b.used) b.used[0] = (uint8_t *)gmm__ck_get(&b.temp, table->count + 1, 1);
        if (!b.used || !b.used[0]) status = gmm__ck_no_memory(&b);
    }
    for (i = 0; !status && i < count; i++) {
        const gmm_ckpt_linear *l = &linears[i];
        const char *path = prefix ? prefix : l->path ? l->path : "";
        char *stem;
        if (l->experts < 1) {
            status = gmm__ck_refuse(&b, GMM_CKPT_ARGUMENT, l->path, "linears[%lld].experts is %lld", (long long)i,
                                    (long long)l->experts);
            break;
        }
        while (!prefix && !strncmp(path, "module.", 7)) path += 7;
        stem = (char *)gmm__ck_get(&b.temp, (int64_t)strlen(path) + 16, 1);
        if (!stem) status = gmm__ck_no_memory(&b);
        for (kind = 0; !status && kind < (l->bias ? 2 : 1); kind++) {
            (void)snprintf(stem, strlen(path) + 16, "%s%s%s", path, prefix || !*path ? "" : ".", names[kind]);
            status = gmm__ck_upstream(&b, l, stem, prefix != NULL, kind ? l->grouped_bias : l->grouped_weight);
        }
    }
    if (!status) status = gmm__ck_keep(&b);
    if (!status) status = gmm__ck_finish(&b, *out);
    return gmm__ck_end(&b, out, status);
}

GMMDEF gmm_status gmm_ckpt_normalize_hook(gmm_ckpt_plan **out, const gmm_ckpt_table *table, const char *prefix,
                                          const gmm_ckpt_linear *linear, gmm_ckpt_parity parity,
                                          const gmm_allocator *allocator, gmm_ckpt_report *report) {
    static const char fn[] = "gmm_ckpt_normalize_hook";
    gmm_ckpt_linear l;
    if (out) *out = NULL;
    if (!out || !table || !prefix || !linear)
        return gmm__ck_null(fn, !out ? "out" : !table ? "table" : !prefix ? "prefix" : "linear", report);
    l = *linear;
    l.path = "";
    return gmm__ck_normalize(fn, out, table, prefix, &l, 1, parity, allocator, report);
}

GMMDEF gmm_status gmm_ckpt_normalize_map(gmm_ckpt_plan **out, const gmm_ckpt_table *table,
                                         const gmm_ckpt_linear *linears, int64_t count, gmm_ckpt_parity parity,
                                         const gmm_allocator *allocator, gmm_ckpt_report *report) {
    static const char fn[] = "gmm_ckpt_normalize_map";
    int64_t i;
    if (out) *out = NULL;
    if (!out || !table || (!linears && count))
        return gmm__ck_null(fn, !out ? "out" : !table ? "table" : "linears", report);
    for (i = 0; i < count; i++)
        if (!linears[i].path) return gmm__ck_null(fn, "linears: a path", report);
    return gmm__ck_normalize(fn, out, table, NULL, linears, count, parity, allocator, report);
}

GMMDEF gmm_status gmm_ckpt_shard_members(const int64_t *numel, int32_t members, int64_t start, int64_t length,
                                         gmm_ckpt_interval *out, gmm_error *error) {
    static const char fn[] = "gmm_ckpt_shard_members";
    int64_t total = 0, at = 0;
    int32_t i;
    if (!out || (!numel && members > 0)) return gmm__fail(error, GMM_E_NULL, "%s: %s is NULL", fn,
                                                          out ? "numel" : "out");
    if (members < 0) return gmm__fail(error, GMM_E_ARG, "%s: members is %d: must be >= 0", fn, (int)members);
    for (i = 0; i < members; i++) {
        if (numel[i] < 0)
            return gmm__fail(error, GMM_E_ARG, "%s: numel[%d] is %lld: must be >= 0", fn, (int)i, (long long)numel[i]);
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
        const int64_t begin = start > at ? start : at, end = gmm__min_i64(start + length, at + numel[i]);
        const int none = start < 0 || begin >= end;
        out[i].shard_at = none ? -1 : begin - start;
        out[i].member_at = none ? -1 : begin - at;
        out[i].length = none ? 0 : end - begin;
        at += numel[i];
    }
    return GMM_OK;
}

GMMDEF gmm_status gmm_ckpt_stored_key(const gmm_ckpt_stored *stored, char *key, size_t room, gmm_ckpt_place *place,
                                      gmm_error *error) {
    static const char fn[] = "gmm_ckpt_stored_key";
    gmm_ckpt_stored s;
    gmm_ckpt_place at = GMM_ZERO;
    char number[32];
    int n;
    if (!stored || !key || !place)
        return gmm__fail(error, GMM_E_NULL, "%s: %s is NULL", fn, !stored ? "stored" : !key ? "key" : "place");
    if (!gmm__copy_sized(&s, sizeof s, stored))
        return gmm__fail(error, GMM_E_VERSION, "%s: stored: struct_size %u is larger than the %u bytes of version %s",
                         fn,
                         stored->struct_size, (unsigned)sizeof s, GMM_VERSION_STRING);
    if (s.ep_size == 0) s.ep_size = 1;
    if (s.etp_size == 0) s.etp_size = 1;
    if (!s.prefix || (s.slot != GMM_CKPT_FC1 && s.slot != GMM_CKPT_FC2) ||
        (s.kind != GMM_CKPT_WEIGHT && s.kind != GMM_CKPT_BIAS) || s.experts_local < 1 || s.index < 0 ||
        s.index >= s.experts_local || s.ep_rank < 0 || s.ep_rank >= s.ep_size || s.etp_rank < 0 ||
        s.etp_rank >= s.etp_size || s.experts_local > INT64_MAX / s.ep_size || s.half < GMM_CKPT_BOTH ||
        s.half > GMM_CKPT_UP || (s.half != GMM_CKPT_BOTH) != (s.slot == GMM_CKPT_FC1 && s.gated))
        return gmm__fail(error, GMM_E_ARG, "%s: slot %d, kind %d, half %d, expert %lld of %lld, EP %d/%d, ETP %d/%d: "
                         "out "
                         "of range, or a gated FC1 without its half", fn, (int)s.slot, (int)s.kind, (int)s.half,
                         (long long)s.index, (long long)s.experts_local, (int)s.ep_rank, (int)s.ep_size,
                         (int)s.etp_rank, (int)s.etp_size);
    at.expert = s.ep_rank * s.experts_local + s.index;
    at.experts = s.ep_size * s.experts_local;
    at.axis = s.slot == GMM_CKPT_FC1 ? 0 : s.kind == GMM_CKPT_WEIGHT ? 1 : -1;
    at.fragment = at.axis < 0 ? 0 : s.etp_rank + (s.half == GMM_CKPT_UP && !s.singleton ? s.etp_size : 0);
    at.fragments = at.axis < 0 ? 1 : s.etp_size * (s.half != GMM_CKPT_BOTH && !s.singleton ? 2 : 1);
    (void)snprintf(number, sizeof number, "%lld.", (long long)at.expert);
    n = snprintf(key, room, "%sexperts.experts.%slinear_fc%d.%s%s", s.prefix, s.singleton ? number : "",
                 s.slot == GMM_CKPT_FC1 ? 1 : 2, s.kind == GMM_CKPT_WEIGHT ? "weight" : "bias",
                 !s.singleton || s.half == GMM_CKPT_BOTH ? "" : s.half == GMM_CKPT_GATE ? "_w" : "_v");
    if (n < 0 || (size_t)n >= room)
        return gmm__fail(error, GMM_E_WORKSPACE, "%s: room is %llu: the key takes %d bytes", fn,
                         (unsigned long long)room, n + 1);
    *place = at;
    return GMM_OK;
}

