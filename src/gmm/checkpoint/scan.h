/* Finds the linears of a table and their extents. */

static int gmm__ck_compare_linears(const void *a, const void *b) {
    const gmm_ckpt_linear *x = (const gmm_ckpt_linear *)a, *y = (const gmm_ckpt_linear *)b;
    if (x->layer != y->layer) return x->layer < y->layer ? -1 : 1;
    return x->slot < y->slot ? -1 : x->slot > y->slot;
}

/* Removes the linears that keys of other prefixes have added: these keys are extra. Matches are sorted by linear. */
static void gmm__ck_remove_unmatched(gmm__ck_builder *b) {
    int64_t i = 0, n = 0;
    for (; i < b->match_count; n++) {
        const int64_t linear = b->matches[i].linear;
        b->linears[n] = b->linears[linear];
        for (; i < b->match_count && b->matches[i].linear == linear; i++) b->matches[i].linear = n;
    }
    if (n == b->linear_count) return;
    b->linear_count = n;
    memset(b->slots, 0, (size_t)b->slot_count * sizeof *b->slots);
    gmm__ck_hash_linears(b);
}

/* Whether a tensor of all experts has an extent for them. */
static int gmm__ck_has_expert_extent(const gmm_ckpt_row *row, const gmm_ckpt_tensor *t) {
    return (row->form == GMM_CKPT_STACKED || row->form == GMM_CKPT_TALL) && t->rank > gmm__ck_dimensions(row, 2);
}

/* The number of experts that names or shapes of a linear imply; 0 = they imply none. */
static int64_t gmm__ck_count_experts(const gmm__ck_builder *b, const gmm__ck_match *matches, int64_t count) {
    const int64_t ranks = b->parts[0].rank.ep_size;
    int64_t experts = 0, i;
    for (i = 0; i < count; i++) {
        const gmm_ckpt_row *row = &b->source.scheme->rows[matches[i].row];
        const gmm_ckpt_tensor *t = &b->parts[matches[i].part].table->tensors[matches[i].tensor];
        int64_t n = 0;
        if (row->form == GMM_CKPT_EACH) n = (matches[i].expert + 1) * (b->source.scheme->global_index ? 1 : ranks);
        else if (row->kind != GMM_CKPT_WEIGHT || !gmm__ck_has_expert_extent(row, t) ||
                 !gmm__mul(t->shape[0], ranks, &n))
            n = 0;
        if (n > experts) experts = n;
    }
    return experts;
}

/* The experts of a layer: as stated, or as the names and shapes of its linears imply (linears[].experts). Where each
   expert has a tensor of its own, a router may have rows for more experts than have keys. */
static int64_t gmm__ck_layer_experts(gmm__ck_builder *b, const gmm_ckpt_linear *l, const gmm_ckpt_row *row,
                                     const gmm_ckpt_tensor *t, int64_t stated) {
    const int64_t partner = gmm__ck_find_slot(b, l->slot == GMM_CKPT_FC1 ? GMM_CKPT_FC2 : GMM_CKPT_FC1, l->layer);
    const int64_t router = gmm__ck_find_slot(b, GMM_CKPT_ROUTER, l->layer);
    int64_t n = l->experts;
    if (stated) return stated;
    if (gmm__ck_has_expert_extent(row, t)) return n;
    if (partner >= 0 && b->linears[partner].experts > n) n = b->linears[partner].experts;
    if (row->form != GMM_CKPT_EACH || router < 0 || b->linears[router].out <= n) return n;
    if (!b->extra_router_rows) b->extra_router_layer = l->layer;
    if (!b->extra_router_rows) b->extra_router_rows = b->linears[router].out;
    return b->linears[router].out;
}

/* Sets the scaling of a linear from its first weight `t` and the first of its scales, where their format is known. */
static void gmm__ck_scan_format(const gmm__ck_builder *b, gmm_ckpt_linear *l, const gmm_ckpt_row *row,
                                const gmm_ckpt_tensor *t, const gmm__ck_match *scale, int64_t experts) {
    const int32_t own = gmm__ck_has_expert_extent(row, t) ? 1 : 0;
    const gmm__ck_format *format;
    gmm__ck_quantized q;
    int32_t dims;
    uint32_t dtypes;
    char shapes[200];
    if (t->rank - own < 1 || t->rank - own > 2) return;
    memset(&q, 0, sizeof q);
    q.row = &b->source.scheme->rows[scale->row];
    q.codes = t;
    q.scale = &b->parts[scale->part].table->tensors[scale->tensor];
    q.experts = experts;
    q.packed = gmm__ck_is_packed(t->dtype);
    q.dims = t->rank - own;
    if (q.dims == 2 && t->shape[own + 1] > INT64_MAX / 2) return; /* the extents are refused */
    q.alike = row->form != GMM_CKPT_EACH && q.row->form != GMM_CKPT_EACH && !own;
    q.rows = own || row->form == GMM_CKPT_EACH ? t->shape[own] : t->shape[0] / experts;
    q.cols = q.dims == 1 ? 1 : t->shape[own + 1] * (t->dtype == GMM_U8 ? 2 : 1);
    format = gmm__ck_find_format(&q, &dims, &dtypes, shapes, sizeof shapes);
    if (format) l->scaling = format->scaling;
}

/* Multiplies an extent of a linear, which a tensor's shape has given. */
static gmm_status gmm__ck_scan_times(gmm__ck_builder *b, const gmm_ckpt_tensor *t, int64_t *extent, int64_t multiple) {
    if (gmm__mul(*extent, multiple, extent)) return GMM_OK;
    return gmm__ck_refuse(b, GMM_CKPT_OVERFLOW, t->name, "extent %lld times %lld does not fit 63 bits",
                          (long long)*extent, (long long)multiple);
}

/* Adds up the rows that all GTP ranks have of the tensor of a match, among the matches of its linear. */
static gmm_status gmm__ck_scan_gtp_rows(gmm__ck_builder *b, const gmm__ck_match *matches, int64_t count,
                                        const gmm__ck_match *match, int64_t rank_experts, int32_t dims, int64_t *rows) {
    const gmm_ckpt_row *row = &b->source.scheme->rows[match->row];
    const gmm_ckpt_rank *rank = &b->parts[match->part].rank;
    int32_t found = 0;
    int64_t i;
    *rows = 0;
    for (i = 0; i < count; i++) {
        const gmm_ckpt_rank *other_rank = &b->parts[matches[i].part].rank;
        const gmm_ckpt_tensor *t = &b->parts[matches[i].part].table->tensors[matches[i].tensor];
        int64_t n;
        if (matches[i].kind != GMM_CKPT_WEIGHT || matches[i].state != match->state || matches[i].row != match->row ||
            matches[i].expert != match->expert || other_rank->ep_rank != rank->ep_rank ||
            other_rank->etp_rank != rank->etp_rank)
            continue;
        n = gmm__ck_stored_rows(row, t, rank_experts, dims);
        if (n > INT64_MAX - *rows)
            return gmm__ck_refuse(b, GMM_CKPT_OVERFLOW, t->name, "the rows of all GTP ranks do not fit 63 bits");
        *rows += n;
        found++;
    }
    if (found == rank->gtp_size) return GMM_OK;
    return gmm__ck_refuse(b, GMM_CKPT_MISSING_INDEX,
                          b->parts[match->part].table->tensors[match->tensor].name, "%d of %d GTP ranks have it", found,
                          (int)rank->gtp_size);
}

/* Extents of one linear from the shapes of its first tensors. */
static gmm_status gmm__ck_scan_linear(gmm__ck_builder *b, gmm_ckpt_linear *l, const gmm__ck_match *matches,
                                      int64_t count, int64_t experts) {
    const int32_t ep_size = b->parts[0].rank.ep_size;
    const int grouped = l->slot == GMM_CKPT_FC1 || l->slot == GMM_CKPT_FC2;
    const gmm_ckpt_row *row = NULL;
    const gmm_ckpt_tensor *t = NULL;
    const gmm__ck_match *match = NULL;
    int64_t i, m[2] = {0, 0}, rank_experts;
    int32_t expert_dims, matrix_rank;
    const gmm__ck_match *scale = NULL;
    gmm_status status;
    int mx, scaled = 0;
    for (i = 0; i < count; i++) {
        const gmm_ckpt_row *r = &b->source.scheme->rows[matches[i].row];
        const gmm_ckpt_tensor *o = &b->parts[matches[i].part].table->tensors[matches[i].tensor];
        if (matches[i].kind == GMM_CKPT_BIAS) l->bias = 1;
        scaled |= matches[i].kind >= GMM_CKPT_SCALE;
        if (matches[i].kind == GMM_CKPT_SCALE && match && !scale && r->half == row->half &&
            matches[i].state == match->state && matches[i].part == match->part)
            scale = &matches[i];
        if (matches[i].kind != GMM_CKPT_WEIGHT) continue;
        if (!row) {
            match = &matches[i];
            row = r;
            t = o;
        }
        l->gated |= r->half != GMM_CKPT_BOTH;
        if (r->scaling == GMM_SCALING_MX32) l->scaling = GMM_SCALING_MX32;
        else if (GMM__CK_CODES_8 >> o->dtype & 1 && gmm__ck_find_row(b->source.scheme, l, GMM_CKPT_SCALE, &r))
            l->scaling = GMM_SCALING_128X128; /* unless the scales are of another format */
    }
    if (!row) return GMM_OK; /* There is only a bias: the weight is missing. */
    l->experts = grouped ? gmm__ck_layer_experts(b, l, row, t, experts) : 1;
    if (grouped && l->experts % ep_size)
        return gmm__ck_refuse(b, GMM_CKPT_NOT_DIVISIBLE, t->name, "experts %lld is no multiple of EP %d",
                              (long long)l->experts, (int)ep_size);
    if (l->experts < 1)
        return gmm__ck_refuse(b, GMM_CKPT_ARGUMENT, t->name, "no shape or name tells the number of experts: state it");
    rank_experts = l->experts / (grouped ? ep_size : 1);
    expert_dims = gmm__ck_has_expert_extent(row, t) ? 1 : 0;
    matrix_rank = t->rank - expert_dims;
    mx = row->scaling == GMM_SCALING_MX32;
    if (scale && !mx) gmm__ck_scan_format(b, l, row, t, scale, rank_experts);
    if (matrix_rank != (mx ? 3 : 2) && !(matrix_rank == 1 && row->form == GMM_CKPT_EACH))
        return gmm__ck_refuse(b, GMM_CKPT_SHAPE, t->name, "%d dimensions are none of its scheme", (int)t->rank);
    m[0] = t->shape[expert_dims];
    m[1] = matrix_rank == 1 ? 0 : t->shape[expert_dims + 1];
    /* blocks of 32 elements, or two codes per byte */
    status = gmm__ck_scan_times(b, t, &m[1], mx ? 32 : t->dtype == GMM_U8 && scaled ? 2 : 1);
    if (status) return status;
    if (!expert_dims && row->form != GMM_CKPT_EACH) {
        const int wide = row->form == GMM_CKPT_WIDE;
        if (m[wide] % rank_experts)
            return gmm__ck_refuse(b, GMM_CKPT_SHAPE, t->name, "extent %lld is no multiple of the %lld experts",
                                  (long long)m[wide], (long long)rank_experts);
        m[wide] /= rank_experts;
    }
    l->out = m[row->transposed ? 1 : 0];
    l->in = m[row->transposed ? 0 : 1];
    if (grouped && b->parts[0].rank.gtp_size > 1) {
        status = gmm__ck_scan_gtp_rows(b, matches, count, match, rank_experts, matrix_rank == 1 ? 1 : 2, &l->out);
        if (status) return status;
    }
    status = gmm__ck_scan_times(b, t, &l->out, l->slot == GMM_CKPT_FC1 ? b->parts[0].rank.etp_size : 1);
    if (!status) status = gmm__ck_scan_times(b, t, &l->in, l->slot == GMM_CKPT_FC2 ? b->parts[0].rank.etp_size : 1);
    if (!status) status = gmm__ck_scan_times(b, t, &l->out, row->half != GMM_CKPT_BOTH ? 2 : 1);
    if (status) return status;
    if (l->out < 1)
        return gmm__ck_refuse(b, GMM_CKPT_SHAPE, t->name, "it has no rows");
    return GMM_OK;
}

enum { GMM__CK_UNIT_ROWS = 128 }; /* the most rows to which GTP pads the shards of a format, if no unit is stated */

/* Refuses an FC1 that seems to be gated where GTP ranks may hold half as many rows and as much padding: a rank then has
   one unit of rows. */
static gmm_status gmm__ck_check_gated(gmm__ck_builder *b, int64_t index) {
    const gmm_ckpt_source *s = &b->source;
    const gmm_ckpt_linear *l = &b->linears[index];
    const gmm_ckpt_rank *size = &b->parts[0].rank;
    const int64_t rows = l->out / size->etp_size; /* of all GTP ranks */
    if (l->slot != GMM_CKPT_FC1 || size->gtp_size == 1 || rows % size->gtp_size ||
        rows / size->gtp_size > GMM__CK_UNIT_ROWS || s->scheme->glu_known || s->stated.known || s->recorded.known)
        return GMM_OK;
    return gmm__ck_refuse(b, GMM_CKPT_GLU_UNKNOWN, gmm__ck_first_key(b, index), "layer %lld: fc1 has twice the rows of "
                          "fc2's in, which may be gate and up or padding of the %d GTP ranks: state the order of gate "
                          "and up, or make the plan of linears that you state", (long long)l->layer,
                          (int)size->gtp_size);
}

/* Extents of all linears, and which FC1 are gated. */
static gmm_status gmm__ck_scan_extents(gmm__ck_builder *b, int64_t experts) {
    int64_t i, match, pass;
    gmm_status status = GMM_OK;
    for (pass = 0; pass < 3; pass++) /* the experts that names imply, then routers, which may have rows for more */
        for (i = 0, match = 0; i < b->linear_count; i++) {
            gmm_ckpt_linear *l = &b->linears[i];
            const int grouped = l->slot == GMM_CKPT_FC1 || l->slot == GMM_CKPT_FC2;
            const int64_t begin = match;
            while (match < b->match_count && b->matches[match].linear == i) match++;
            if (pass == 0 && grouped) l->experts = gmm__ck_count_experts(b, b->matches + begin, match - begin);
            if (pass != (grouped ? 2 : 1)) continue;
            status = gmm__ck_scan_linear(b, l, b->matches + begin, match - begin, experts);
            if (status) return status;
        }
    for (i = 0; i < b->linear_count; i++) {
        gmm_ckpt_linear *l = &b->linears[i];
        const int shared = l->slot == GMM_CKPT_SHARED_FC1;
        const int64_t fc1 = gmm__ck_find_slot(b, GMM_CKPT_FC1, l->layer);
        const int64_t fc2 = gmm__ck_find_slot(b, shared ? GMM_CKPT_SHARED_FC2 : GMM_CKPT_FC2, l->layer);
        if (experts && (l->slot == GMM_CKPT_ROUTER || l->slot == GMM_CKPT_ROUTER_CORRECTION) && l->out > experts &&
            (fc1 >= 0 || fc2 >= 0))
            l->spare = (int32_t)gmm__min_i64(l->out - experts, INT32_MAX);
        if ((l->slot != GMM_CKPT_FC1 && !shared) || l->gated || !l->out || fc2 < 0 || !b->linears[fc2].out) continue;
        l->gated = l->out == 2 * b->linears[fc2].in;
        if (l->gated && (status = gmm__ck_check_gated(b, i)) != GMM_OK) return status;
        if (!l->gated && l->out != b->linears[fc2].in)
            return gmm__ck_refuse(b, GMM_CKPT_SHAPE, gmm__ck_first_key(b, i), "layer %lld: %s's out %lld is neither "
                                  "once nor twice the in of its second linear, so nothing says whether it is gated",
                                  (long long)l->layer, shared ? "shared_fc1" : "fc1", (long long)l->out);
    }
    return GMM_OK;
}

/* Records the layers without a key, from 0 to the last layer with one. `head` is the text before {L}. */
static gmm_status gmm__ck_scan_layers(gmm__ck_builder *b, const char *head) {
    const size_t prefix = strlen(b->source_prefix), length = strlen(head);
    int64_t *layers = NULL, count = 0, capacity = 0, next = 0, i;
    gmm_status status = GMM_OK;
    int32_t p;
    for (p = 0; p < b->source.part_count; p++)
        for (i = 0; i < b->parts[p].table->count; i++) {
            const char *key = b->parts[p].table->tensors[i].name, *layer_text;
            void *array = layers;
            size_t skipped;
            int64_t layer;
            if (gmm__ck_find_state(b, key, &skipped) < 0) continue;
            (void)gmm__ck_strip_key_wrappers(&b->source, key + skipped, b->key_buffer);
            if (strncmp(b->key_buffer, b->source_prefix, prefix) ||
                strncmp(b->key_buffer + prefix, head, length)) continue;
            layer_text = b->key_buffer + prefix + length;
            if (!gmm__ck_parse_number(&layer_text, &layer) || (*layer_text && *layer_text != '.') ||
                (count && layers[count - 1] == layer)) continue;
            if (!gmm__ck_reserve(&b->arena, &array, count, &capacity, sizeof *layers)) return gmm__ck_no_memory(b);
            layers = (int64_t *)array;
            layers[count++] = layer;
        }
    if (count) qsort(layers, (size_t)count, sizeof *layers, gmm__ck_compare_i64);
    for (i = 0; !status && i < count; i++) {
        if (layers[i] > next) status = gmm__ck_add_missing(b, 0, -1, 0, 0, next, layers[i] - 1);
        next = layers[i] + 1;
    }
    return status;
}

/* Gives every layer the linears and biases that any layer of experts has; those without a key are then missing. */
static gmm_status gmm__ck_scan_members(gmm__ck_builder *b) {
    int bias[GMM_CKPT_SLOT_COUNT], slot_present[GMM_CKPT_SLOT_COUNT], slot;
    const int64_t count = b->linear_count;
    int64_t i;
    memset(bias, 0, sizeof bias);
    memset(slot_present, 0, sizeof slot_present);
    slot_present[GMM_CKPT_FC1] = slot_present[GMM_CKPT_FC2] = 1;
    for (i = 0; i < count; i++) {
        slot_present[b->linears[i].slot] = 1;
        bias[b->linears[i].slot] |= b->linears[i].bias;
    }
    slot_present[GMM_CKPT_SHARED_FC1] = slot_present[GMM_CKPT_SHARED_FC2] =
        slot_present[GMM_CKPT_SHARED_FC1] | slot_present[GMM_CKPT_SHARED_FC2];
    for (i = 0; i < count; i++) {
        const int64_t layer = b->linears[i].layer, router = gmm__ck_find_slot(b, GMM_CKPT_ROUTER, layer);
        const int64_t fc1 = gmm__ck_find_slot(b, GMM_CKPT_FC1, layer), fc2 = gmm__ck_find_slot(b, GMM_CKPT_FC2, layer);
        for (slot = 0; slot < GMM_CKPT_SLOT_COUNT; slot++) {
            const gmm_ckpt_row *row = NULL;
            gmm_ckpt_linear missing = GMM_ZERO;
            gmm_status status;
            if (!slot_present[slot] || gmm__ck_find_slot(b, (gmm_ckpt_slot)slot, layer) >= 0) continue;
            missing.slot = (gmm_ckpt_slot)slot;
            missing.layer = layer;
            missing.experts = 1;
            if (slot == GMM_CKPT_FC1 || slot == GMM_CKPT_FC2)
                missing.experts = fc1 >= 0 ? b->linears[fc1].experts : fc2 >= 0 ? b->linears[fc2].experts
                              : router >= 0 ? b->linears[router].out : 1;
            if (!gmm__ck_find_row(b->source.scheme, &missing, GMM_CKPT_WEIGHT, &row)) continue;
            status = gmm__ck_add_linear(b, &missing);
            if (status) return status;
        }
    }
    for (i = 0; i < b->linear_count; i++) b->linears[i].bias |= bias[b->linears[i].slot];
    return GMM_OK;
}

/* Refuses a source that lacks layers, linears or experts. */
static gmm_status gmm__ck_scan_missing(gmm__ck_builder *b) {
    const int64_t count = b->linear_count;
    gmm_ckpt_row layer = GMM_ZERO;
    gmm_status status = GMM_OK;
    int32_t r;
    for (r = 0; r < b->source.scheme->count && !layer.pattern; r++) {
        const char *pattern = b->source.scheme->rows[r].pattern, *placeholder = strstr(pattern, "{L}");
        char *head;
        if (!placeholder) continue;
        head = (char *)gmm__ck_alloc(&b->arena, placeholder - pattern + 4, 1);
        if (!head) return gmm__ck_no_memory(b);
        memcpy(head, pattern, (size_t)(placeholder - pattern));
        status = gmm__ck_scan_layers(b, head);
        memcpy(head + (placeholder - pattern), "{e}", 4); /* missing layers are stored like missing experts */
        layer.pattern = head;
    }
    if (!status && !b->source.skip_missing) status = gmm__ck_scan_members(b);
    if (!status) status = gmm__ck_find_missing(b);
    if (!status) status = gmm__ck_refuse_incomplete(b, &layer);
    b->linear_count = count;
    return status;
}

GMMDEF gmm_status gmm_ckpt_scan(const gmm_ckpt_source *source, int64_t experts, gmm_ckpt_linear **linears,
                                int64_t *count, const gmm_allocator *allocator, gmm_ckpt_report *report) {
    static const char fn[] = "gmm_ckpt_scan";
    const gmm_ckpt_target nothing = GMM_ZERO;
    gmm__ck_builder b;
    gmm_status status;
    int64_t i, remaining;
    if (!source || !linears || !count)
        return gmm__ck_fail_null(fn, !source ? "source" : !linears ? "linears" : "count", report);
    *linears = NULL;
    *count = 0;
    status = gmm__ck_builder_init(&b, fn, NULL, allocator, report);
    b.scan = 1;
    if (!status) status = gmm__ck_read_descriptors(&b, source, &nothing);
    if (!status && (experts < 0 || experts > INT32_MAX))
        status = gmm__ck_refuse(&b, GMM_CKPT_ARGUMENT, NULL, "experts is %lld", (long long)experts);
    if (!status) status = gmm__ck_read_keys(&b);
    if (!status) gmm__ck_remove_unmatched(&b);
    if (!status) status = gmm__ck_scan_extents(&b, experts);
    if (!status) status = gmm__ck_check_layers(&b);
    if (!status && b.linear_count) status = gmm__ck_scan_missing(&b);
    for (i = remaining = 0; !status && i < b.linear_count; i++) /* linears without a weight are removed */
        if (b.linears[i].out) b.linears[remaining++] = b.linears[i];
    if (!status) b.linear_count = remaining;
    if (!status && b.linear_count) {
        qsort(b.linears, (size_t)b.linear_count, sizeof *b.linears, gmm__ck_compare_linears);
        *linears = (gmm_ckpt_linear *)b.arena.allocator.alloc(b.arena.allocator.user,
                                                             (size_t)b.linear_count * sizeof **linears);
        if (!*linears) status = gmm__ck_no_memory(&b);
    }
    if (!status && b.linear_count) {
        memcpy(*linears, b.linears, (size_t)b.linear_count * sizeof **linears);
        *count = b.linear_count;
    }
    return gmm__ck_builder_release(&b, NULL, status);
}

GMMDEF void gmm_ckpt_linears_release(gmm_ckpt_linear *linears, const gmm_allocator *allocator) {
    const gmm_allocator a = gmm__ck_allocator(allocator);
    if (linears) a.release(a.user, linears);
}

