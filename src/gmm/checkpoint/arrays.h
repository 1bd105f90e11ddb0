/* ............................................................................................ 15.6 One array ... */

/* The tensors that a row gives to an array: [parts][experts of a part]; -1 = none. */
typedef struct gmm__ck_row_tensors {
    const gmm_ckpt_row *row;
    int32_t *tensor;
} gmm__ck_row_tensors;

/* "[4, 8]" */
static void gmm__ck_shape_text(char *text, size_t capacity, int32_t rank, const int64_t *shape) {
    size_t n = 0;
    int32_t d;
    for (d = 0; d < rank && n + 24 < capacity; d++)
        n += (size_t)snprintf(text + n, capacity - n, "%s%lld", d ? ", " : "[", (long long)shape[d]);
    (void)snprintf(text + n, capacity - n, rank ? "]" : "[]");
}

/* Dimensions of one matrix as a row stores it. */
static int32_t gmm__ck_dimensions(const gmm_ckpt_row *row, int vector) {
    return vector ? 1 : row->scaling == GMM_SCALING_MX32 && row->kind == GMM_CKPT_WEIGHT ? 3 : 2;
}

/* The shapes that a row allows for matrices of rows x cols, as targets have it first; returns how many. `blocks` of
   MX32. */
static int gmm__ck_row_shapes(const gmm_ckpt_row *row, int64_t experts, int64_t rows, int64_t cols, int vector,
                              int64_t shape[2][GMM_CKPT_RANK], int32_t rank[2]) {
    const int32_t n = gmm__ck_dimensions(row, vector);
    const int stacked = row->form == GMM_CKPT_STACKED || row->form == GMM_CKPT_TALL;
    int64_t matrix[3];
    int32_t i, d;
    matrix[0] = n == 2 && row->transposed ? cols : rows;
    matrix[1] = n == 3 ? cols / 32 : row->transposed ? rows : cols;
    matrix[2] = 16;
    for (i = 0; i < 2; i++) {
        const int split = stacked && i == (row->form == GMM_CKPT_TALL); /* with an extent of its own for experts */
        rank[i] = 0;
        if (split) shape[i][rank[i]++] = experts;
        for (d = 0; d < n; d++) shape[i][rank[i]++] = matrix[d];
        if (stacked && !split) shape[i][0] *= experts;
    }
    if (row->form == GMM_CKPT_WIDE) shape[0][n - 1] *= experts;
    return stacked ? 2 : 1;
}

/* Checks a tensor's shape. *rows < 0 is read from it. */
static gmm_status gmm__ck_check_shape(gmm__ck_builder *b, const gmm_ckpt_row *row, const gmm_ckpt_tensor *t,
                                      int64_t experts, int64_t *rows, int64_t cols, int vector) {
    int64_t shape[2][GMM_CKPT_RANK], r = *rows;
    int32_t rank[2], d;
    int i, n;
    char have[160], want[160];
    if (r < 0) {
        const int split = t->rank > gmm__ck_dimensions(row, vector), transposed = row->transposed && !vector;
        d = split + transposed;
        r = d < t->rank ? t->shape[d] : 0;
        if (!split && (row->form == GMM_CKPT_WIDE ? transposed : row->form != GMM_CKPT_EACH && !transposed))
            r /= experts;
    }
    n = gmm__ck_row_shapes(row, experts, r, cols, vector, shape, rank);
    for (i = 0; i < n; i++) {
        int same = rank[i] == t->rank;
        for (d = 0; same && d < rank[i]; d++) same = shape[i][d] == t->shape[d];
        if (!same) continue;
        *rows = r;
        return GMM_OK;
    }
    gmm__ck_shape_text(have, sizeof have, t->rank, t->shape);
    gmm__ck_shape_text(want, sizeof want, rank[0], shape[0]);
    return gmm__ck_refuse(b, GMM_CKPT_SHAPE, t->name, "its shape %s is not %s, as %lld x %lld of %lld experts%s ask",
                          have, want, (long long)r, (long long)cols, (long long)experts,
                          row->transposed ? ", transposed," : "");
}

/* Whether the array reads a part: not where an earlier one holds the same. */
static int gmm__ck_part_is_read(const gmm__ck_builder *b, const gmm__ck_array *x, int32_t part) {
    const gmm_ckpt_rank *r = &b->parts[part].rank;
    int32_t p;
    for (p = 0; p < part; p++) {
        const gmm_ckpt_rank *q = &b->parts[p].rank;
        if ((!x->grouped || q->ep_rank == r->ep_rank) &&
            (!(x->rows_sharded || x->cols_sharded) || q->etp_rank == r->etp_rank) &&
            (!x->grouped || x->kind == GMM_CKPT_BIAS || q->gtp_rank == r->gtp_rank))
            return 0;
    }
    return 1;
}

static int64_t gmm__ck_part_experts(const gmm__ck_builder *b, const gmm__ck_array *x) {
    return x->grouped ? x->experts / b->parts[0].rank.ep_size : 1;
}

/* Sorts hits of one linear, state and kind into holders by half. */
static gmm_status gmm__ck_group_matches(gmm__ck_builder *b, const gmm__ck_array *x, gmm__ck_match *matches,
                                        int64_t count, int32_t grouped, gmm__ck_row_tensors holder[3]) {
    const gmm_ckpt_row *rows = b->source.scheme->rows;
    const int64_t part_experts = gmm__ck_part_experts(b, x);
    int64_t i, k;
    memset(holder, 0, 3 * sizeof *holder);
    for (i = 0; i < count; i++) {
        const gmm_ckpt_row *row = &rows[matches[i].row];
        gmm__ck_row_tensors *h = &holder[row->half];
        const gmm_ckpt_tensor *t = &b->parts[matches[i].part].table->tensors[matches[i].tensor];
        const int64_t base = b->source.scheme->global_index ? b->parts[matches[i].part].rank.ep_rank * part_experts : 0;
        int64_t at;
        if (h->row && h->row != row && b->source.prefer_target &&
            (h->row->form == GMM_CKPT_EACH) != (row->form == GMM_CKPT_EACH)) {
            const int fresh = (row->form != GMM_CKPT_EACH) == (grouped != 0);
            for (k = fresh ? 0 : i; k < (fresh ? i : count); k++) /* rows come sorted */
                if (fresh ? rows[matches[k].row].half == row->half : matches[k].row == matches[i].row)
                    b->uses[matches[k].part][matches[k].tensor] = GMM__CK_DROPPED;
            if (!fresh) continue;
            h->row = NULL;
        }
        if (b->uses[matches[i].part][matches[i].tensor] == GMM__CK_DROPPED) continue;
        if ((h->row && h->row != row) || (row->half == GMM_CKPT_BOTH ? holder[GMM_CKPT_GATE].row ||
                                          holder[GMM_CKPT_UP].row : holder[GMM_CKPT_BOTH].row != NULL))
            return gmm__ck_refuse(b, GMM_CKPT_BOTH_LAYOUTS, t->name, "its weights are there in another layout too");
        if (!h->row) {
            h->row = row;
            h->tensor = (int32_t *)gmm__ck_alloc(&b->arena, b->source.part_count * part_experts, sizeof *h->tensor);
            if (!h->tensor) return gmm__ck_no_memory(b);
            for (k = 0; k < b->source.part_count * part_experts; k++) h->tensor[k] = -1;
        }
        at = row->form == GMM_CKPT_EACH && x->grouped ? matches[i].expert - base : 0;
        if (at < 0 || at >= part_experts)
            return gmm__ck_refuse(b, GMM_CKPT_EXTRA_INDEX, t->name, "expert %lld is none of the declared %lld",
                                  (long long)matches[i].expert, (long long)part_experts);
        at += matches[i].part * part_experts;
        if (h->tensor[at] >= 0)
            return gmm__ck_refuse(b, GMM_CKPT_AMBIGUOUS, t->name, "\"%.100s\" names the same tensor",
                                  b->parts[matches[i].part].table->tensors[h->tensor[at]].name);
        h->tensor[at] = matches[i].tensor;
    }
    return GMM_OK;
}

static gmm_status gmm__ck_refuse_missing_tensor(gmm__ck_builder *b, const gmm__ck_array *x, const gmm_ckpt_row *row,
                                                int32_t state, int64_t expert) {
    char layer[24], number[24];
    const char *name;
    (void)snprintf(layer, sizeof layer, "%lld", (long long)x->linear->layer);
    (void)snprintf(number, sizeof number, "%lld", (long long)expert);
    name = gmm__ck_missing_name(b, row, state, x->linear, layer, number);
    return name ? gmm__ck_refuse(b, GMM_CKPT_MISSING_INDEX, name, "the source lacks it") : gmm__ck_no_memory(b);
}

/* Rows of a part's matrices that GTP left, or -1 where all are there. */
static int gmm__ck_is_gtp_sharded(const gmm__ck_builder *b, const gmm__ck_array *x) {
    return x->grouped && x->kind != GMM_CKPT_BIAS && b->parts[0].rank.gtp_size > 1;
}

/* One stored tensor of the source. `wide` are columns as the shape counts them (MX32 kept as bytes). */
static gmm_status gmm__ck_source_shard(gmm__ck_builder *b, const gmm__ck_array *x, const gmm__ck_row_tensors *h,
                                       int half, int32_t part, int64_t expert, int32_t state, int64_t block,
                                       int64_t shape_cols, gmm__ck_shard *p) {
    const gmm_ckpt_rank *rank = &b->parts[part].rank;
    const int64_t part_experts = gmm__ck_part_experts(b, x),
        local = h->row->form == GMM_CKPT_EACH ? expert % part_experts : 0;
    const gmm_ckpt_tensor *t;
    int64_t rows, stored = -1, full;
    gmm_status status;
    int32_t i = h->tensor[part * part_experts + local], q;
    memset(p, 0, sizeof *p);
    if (i < 0)
        return gmm__ck_refuse_missing_tensor(b, x, h->row, state,
                               local + (b->source.scheme->global_index ? rank->ep_rank * part_experts : 0));
    t = &b->parts[part].table->tensors[i];
    if (gmm_dtype_bits(t->dtype) < 8)
        return gmm__ck_refuse(b, GMM_CKPT_DTYPE, t->name, "a weight's dtype must have whole bytes");
    p->part = part;
    p->tensor = i;
    p->scale = -1;
    p->dtype = t->dtype;
    p->f = x->rows_sharded ? x->f / rank->etp_size : x->f;
    p->f0 = x->rows_sharded ? rank->etp_rank * p->f : 0;
    p->k = x->cols_sharded ? x->k / rank->etp_size : x->k;
    p->k0 = x->cols_sharded ? rank->etp_rank * p->k : 0;
    p->half0 = half == GMM_CKPT_UP ? 1 : 0;
    p->halves = half == GMM_CKPT_BOTH ? x->halves : 1;
    p->block = p->halves == 2 && block ? block : p->f;
    p->experts = h->row->form == GMM_CKPT_EACH ? 1 : part_experts;
    p->expert0 = (x->grouped ? rank->ep_rank * part_experts : 0) + local;
    full = p->f * p->halves;
    rows = gmm__ck_is_gtp_sharded(b, x) ? -1 : full;
    if (x->cols_sharded) shape_cols /= rank->etp_size;
    status = gmm__ck_check_shape(b, h->row, t, part_experts, &rows, shape_cols, x->vector);
    if (status) return status;
    p->rows = stored = rows;
    /* behind the rows of lower ranks; more rows than there are is padding at the end */
    if (gmm__ck_is_gtp_sharded(b, x)) {
        int64_t sum = 0;
        for (q = 0; q < b->source.part_count; q++) {
            const gmm_ckpt_rank *other = &b->parts[q].rank;
            int64_t r = -1;
            if (other->ep_rank != rank->ep_rank || other->etp_rank != rank->etp_rank) continue;
            i = h->tensor[q * part_experts + local];
            if (i < 0)
                return gmm__ck_refuse_missing_tensor(b, x, h->row, state,
                                       local + (b->source.scheme->global_index ? rank->ep_rank * part_experts : 0));
            status = gmm__ck_check_shape(b, h->row, &b->parts[q].table->tensors[i], part_experts, &r, shape_cols,
                                         x->vector);
            if (status) return status;
            if (other->gtp_rank < rank->gtp_rank) p->row0 += r;
            sum += r;
        }
        if (sum < full || (sum > full && sum != stored * rank->gtp_size))
            return gmm__ck_refuse(b, GMM_CKPT_SHAPE, t->name, "the %d GTP ranks hold %lld rows together, not %lld",
                                  (int)rank->gtp_size, (long long)sum, (long long)full);
        p->row0 = gmm__min_i64(p->row0, full);
        p->rows = gmm__min_i64(stored, full - p->row0);
    }
    p->row_step = h->row->transposed ? 1 : p->k;
    p->col_step = h->row->transposed ? stored : 1;
    p->expert_step = stored * p->k;
    return GMM_OK;
}

/* Moves all that a source piece and a target piece share of one expert. */
static gmm_status gmm__ck_move_overlap(gmm__ck_builder *b, const gmm__ck_shard *src, const gmm__ck_shard *dst,
                                       gmm_ckpt_move_kind kind, int64_t expert) {
    gmm__ck_box sb[5], db[5];
    const int sn = gmm__ck_row_boxes(src, sb), dn = gmm__ck_row_boxes(dst, db);
    gmm__ck_overlap o;
    int i, j;
    o.src = src;
    o.dst = dst;
    o.kind = kind;
    o.expert = expert;
    o.k0 = src->k0 > dst->k0 ? src->k0 : dst->k0;
    o.k1 = gmm__min_i64(src->k0 + src->k, dst->k0 + dst->k);
    for (i = 0; i < dn; i++)
        for (j = 0; j < sn; j++) {
            const int64_t f0 = sb[j].f0 > db[i].f0 ? sb[j].f0 : db[i].f0, f1 = gmm__min_i64(sb[j].f1, db[i].f1);
            gmm_status status;
            o.h0 = sb[j].h0 > db[i].h0 ? sb[j].h0 : db[i].h0;
            o.h1 = gmm__min_i64(sb[j].h1, db[i].h1);
            if (f0 >= f1 || o.h0 >= o.h1 || o.k0 >= o.k1) continue;
            status = gmm__ck_move_rows(b, &o, f0, f1, 1, 0);
            if (status) return status;
        }
    return GMM_OK;
}

/* Folds the moves of the last expert, [at, ...), into those of the experts before it, [first, at), as one more step of
   an outer loop; `experts` were folded so far. Returns 1 if that was possible. */
static int gmm__ck_merge_expert_moves(gmm__ck_builder *b, int64_t first, int64_t at, int64_t experts) {
    const int64_t n = at - first;
    int64_t i;
    int pass;
    if (n == 0 || b->move_count - at != n) return 0;
    for (pass = 0; pass < 2; pass++)
        for (i = 0; i < n; i++) {
            gmm_ckpt_move *m = &b->moves[first + i], e = b->moves[at + i];
            const int outer = experts > 1;
            const int64_t src = e.src_at - m->src_at, dst = e.dst_at - m->dst_at;
            int l;
            if (pass == 1) {
                if (!outer) {
                    for (l = m->loops++; l > 0; l--) {
                        m->count[l] = m->count[l - 1];
                        m->src_step[l] = m->src_step[l - 1];
                        m->dst_step[l] = m->dst_step[l - 1];
                    }
                    m->count[0] = 1;
                    m->src_step[0] = src;
                    m->dst_step[0] = dst;
                }
                m->count[0]++;
                continue;
            }
            if (m->kind != e.kind || m->part != e.part || m->src != e.src || m->dst != e.dst || m->scale != e.scale ||
                m->loops != e.loops + outer || (!outer && m->loops == GMM_CKPT_LOOPS) || src <= 0 || dst <= 0)
                return 0;
            if (outer && (src != m->count[0] * m->src_step[0] || dst != m->count[0] * m->dst_step[0])) return 0;
            for (l = 0; l < e.loops; l++)
                if (m->count[l + outer] != e.count[l] || m->src_step[l + outer] != e.src_step[l] ||
                    m->dst_step[l + outer] != e.dst_step[l])
                    return 0;
        }
    b->move_count = at;
    return 1;
}

static int64_t gmm__ck_move_elements(const gmm_ckpt_move *m) {
    int64_t n = 1;
    int l;
    for (l = 0; l < m->loops; l++) n *= m->count[l];
    return n;
}

static gmm_status gmm__ck_add_target(gmm__ck_builder *b, gmm_ckpt_tensor *t, int32_t *index) {
    gmm_status status;
    t->storage = 0;
    t->offset = b->target_end;
    if (t->bytes > INT64_MAX / 2 - b->target_end)
        return gmm__ck_refuse(b, GMM_CKPT_OVERFLOW, t->name, "the targets exceed 2^62 bytes");
    status = gmm__ck_add_tensor(b->targets, t, b->fn, b->report);
    if (status) return status;
    b->target_end = gmm__round_up(b->target_end + t->bytes, 64);
    *index = (int32_t)(b->targets->count - 1);
    return GMM_OK;
}

/* The first ranks that no part of the source is of, as "EP 1, ETP 0, GTP 2"; "" if all are there. */
static void gmm__ck_missing_rank(const gmm__ck_builder *b, char *text, size_t capacity) {
    const gmm_ckpt_rank size = b->parts[0].rank;
    int64_t at, all = (int64_t)size.ep_size * size.etp_size;
    *text = 0;
    if (!gmm__mul(all, size.gtp_size, &all)) return;
    for (at = 0; at < all && at <= b->source.part_count; at++) {
        const int32_t gtp = (int32_t)(at % size.gtp_size), etp = (int32_t)(at / size.gtp_size % size.etp_size);
        const int32_t ep = (int32_t)(at / size.gtp_size / size.etp_size);
        int32_t p;
        for (p = 0; p < b->source.part_count; p++) {
            const gmm_ckpt_rank *r = &b->parts[p].rank;
            if (r->ep_rank == ep && r->etp_rank == etp && r->gtp_rank == gtp) break;
        }
        if (p < b->source.part_count) continue;
        (void)snprintf(text, capacity, " (EP %d, ETP %d, GTP %d)", (int)ep, (int)etp, (int)gtp);
        return;
    }
}

/* Checks that the moves from `first` on fill a target, and makes it a view where that is allowed and possible. */
static gmm_status gmm__ck_finish_target(gmm__ck_builder *b, int32_t target, int64_t first) {
    const gmm_ckpt_tensor *t = &b->targets->tensors[target];
    const int64_t unit = gmm__ck_unit_bytes(t->dtype), units = gmm__ck_unit_count(t);
    int64_t sum = 0, begin = 0, i;
    int view = b->target.views;
    gmm_ckpt_move whole = GMM_ZERO;
    for (i = first; i < b->move_count; i++) {
        const gmm_ckpt_move *m = &b->moves[i];
        const gmm_ckpt_tensor *s = m->src >= 0 ? &b->parts[m->part].table->tensors[m->src] : NULL;
        int64_t here;
        sum += gmm__ck_move_elements(m);
        view = view && s && m->kind == GMM_CKPT_COPY && m->loops == 1 && m->src_step[0] == 1 && m->dst_step[0] == 1;
        if (!view) continue;
        here = s->offset + (m->src_at - m->dst_at) * unit;
        if (i == first) {
            whole = *m;
            begin = here;
        } else {
            view = m->part == whole.part && here == begin &&
                   s->storage == b->parts[m->part].table->tensors[whole.src].storage;
            if (m->dst_at < whole.dst_at) whole = *m;
        }
    }
    if (sum != units) {
        char rank[80];
        gmm__ck_missing_rank(b, rank, sizeof rank);
        return gmm__ck_refuse(b, GMM_CKPT_MISSING_INDEX, t->name, "the source holds %lld of its %lld elements: a "
                              "rank's part is missing%s", (long long)sum, (long long)units, rank);
    }
    if (view && units) {
        whole.kind = GMM_CKPT_VIEW;
        whole.count[0] = units;
        b->moves[first] = whole;
        b->move_count = first + 1;
    }
    return GMM_OK;
}

/* The target's row for a kind and half; where EACH and STACKED are there, `grouped` decides. */
static const gmm_ckpt_row *gmm__ck_target_row(const gmm__ck_builder *b, const gmm__ck_array *x, int half, int grouped,
                                              int blocks) {
    const gmm_ckpt_scheme *scheme = b->target.scheme;
    const gmm_ckpt_row *found = NULL;
    int32_t i;
    for (i = 0; i < scheme->count; i++) {
        const gmm_ckpt_row *r = &scheme->rows[i];
        if (r->kind != x->kind || (int)r->half != half || (r->scaling == GMM_SCALING_MX32) != blocks) continue;
        if (r->slot != x->linear->slot && (r->slot != GMM_CKPT_SLOT_ANY || !x->linear->path)) continue;
        if (!found || (r->form != GMM_CKPT_EACH) == (grouped != 0)) found = r;
    }
    return found;
}

/* How an array goes over. */
typedef struct gmm__ck_transfer {
    gmm__ck_row_tensors *weight, *scale; /* scale: dequantize; NULL = none */
    /* tells what skip_missing leaves out: `weight`, for scales that of their weight */
    const gmm__ck_row_tensors *presence;
    const char *key;                /* one of the source's, behind its state */
    int64_t src_block, dst_block;
    gmm_dtype dtype;                /* NONE = the source's */
    int32_t state, grouped, blocks; /* blocks: the target's row is one of MX32 */
    int64_t shape_cols;             /* of the source, as its shape counts */
    const gmm_ckpt_cut *cut;
    int64_t cut_unit;               /* rows of the weight per row of the array */
} gmm__ck_transfer;

/* Of the tensors that a target half of one expert is made from: 0 = all are there, 1 = none, 2 = some. */
static int gmm__ck_missing_state(const gmm__ck_builder *b, const gmm__ck_array *x, const gmm__ck_transfer *g, int half,
                                 int64_t e) {
    const int64_t part_experts = gmm__ck_part_experts(b, x);
    int64_t found = 0, wanted = 0;
    int32_t p;
    int s;
    for (p = 0; p < b->source.part_count; p++) {
        if ((x->grouped && e / part_experts != b->parts[p].rank.ep_rank) || !gmm__ck_part_is_read(b, x, p)) continue;
        for (s = 0; s < 3; s++) {
            const gmm__ck_row_tensors *h = &g->presence[s];
            if (!h->row || (half != GMM_CKPT_BOTH && s != GMM_CKPT_BOTH && s != half)) continue;
            wanted++;
            found += h->tensor[p * part_experts + (h->row->form == GMM_CKPT_EACH ? e % part_experts : 0)] >= 0;
        }
    }
    return !found ? 1 : found < wanted ? 2 : 0;
}

/* Whether skip_missing leaves a target out. Its scales, if the source has them, are then dropped. */
static int gmm__ck_skip_target(gmm__ck_builder *b, const gmm__ck_array *x, const gmm__ck_transfer *g, int half,
                               int64_t e, int64_t end) {
    const int64_t part_experts = gmm__ck_part_experts(b, x), first = e;
    int32_t p;
    int s;
    if (!b->source.skip_missing) return 0;
    for (; e < end; e++)
        if (gmm__ck_missing_state(b, x, g, half, e) != 1) return 0;
    for (e = first; e < end; e++)
        for (p = 0; p < b->source.part_count; p++)
            for (s = 0; s < 3; s++) {
                const gmm__ck_row_tensors *h = &g->weight[s];
                int32_t t;
                if (!h->row || h->row->form != GMM_CKPT_EACH ||
                    (x->grouped && e / part_experts != b->parts[p].rank.ep_rank) ||
                    (half != GMM_CKPT_BOTH && s != GMM_CKPT_BOTH && s != half))
                    continue;
                t = h->tensor[p * part_experts + e % part_experts];
                if (t >= 0) b->uses[p][t] = GMM__CK_DROPPED;
            }
    return 1;
}

/* Plans all target tensors of one half. */
static gmm_status gmm__ck_plan_half(gmm__ck_builder *b, const gmm__ck_array *x, const gmm__ck_transfer *g, int half,
                                    const gmm_ckpt_row *row) {
    const gmm_ckpt_rank *rank = &b->target.rank;
    const char *state = b->target.state_count ? b->target.states[g->state] : b->states[g->state];
    const int64_t rank_experts = x->grouped ? x->experts / rank->ep_size : 1,
        expert0 = x->grouped ? rank->ep_rank * rank_experts : 0;
    const int64_t part_experts = gmm__ck_part_experts(b, x);
    const int stacked = row->form != GMM_CKPT_EACH, cut = g->cut && x->grouped && x->kind != GMM_CKPT_BIAS;
    int64_t e, first = b->move_count, group = first, folded = 0, stored, shape[2][GMM_CKPT_RANK], columns;
    int32_t ranks[2], target = -1;
    gmm__ck_shard d;
    gmm_status status;
    memset(&d, 0, sizeof d);
    d.f = x->rows_sharded ? x->f / rank->etp_size : x->f;
    d.f0 = x->rows_sharded ? rank->etp_rank * d.f : 0;
    d.k = x->cols_sharded ? x->k / rank->etp_size : x->k;
    d.k0 = x->cols_sharded ? rank->etp_rank * d.k : 0;
    d.half0 = half == GMM_CKPT_UP ? 1 : 0;
    d.halves = half == GMM_CKPT_BOTH ? x->halves : 1;
    d.block = d.halves == 2 && g->dst_block ? g->dst_block : d.f;
    d.rows = stored = d.f * d.halves;
    if (cut) {
        const int64_t row0 = g->cut->row0, rows = g->cut->rows, stored_rows = g->cut->stored_rows;
        if (row0 < 0 || rows < 0 || stored_rows < rows || row0 > d.rows * g->cut_unit ||
            rows > d.rows * g->cut_unit - row0)
            return gmm__ck_refuse(b, GMM_CKPT_ARGUMENT, NULL, "cuts: row0 %lld, rows %lld, stored_rows %lld: must be "
                                  ">= 0, end in the %lld rows there are, and store no fewer than rows",
                                  (long long)row0, (long long)rows, (long long)stored_rows,
                                  (long long)(d.rows * g->cut_unit));
        if (half != GMM_CKPT_BOTH || row0 % g->cut_unit || rows % g->cut_unit || stored_rows % g->cut_unit)
            return gmm__ck_refuse(b, GMM_CKPT_NOT_DIVISIBLE, NULL, "cuts: row0 %lld, rows %lld, stored_rows %lld: must "
                                  "be whole blocks of %lld rows, and gate and up in one tensor", (long long)row0,
                                  (long long)rows, (long long)stored_rows, (long long)g->cut_unit);
        d.row0 = g->cut->row0 / g->cut_unit;
        d.rows = g->cut->rows / g->cut_unit;
        stored = g->cut->stored_rows / g->cut_unit;
    }
    d.row_step = row->transposed ? 1 : d.k;
    d.col_step = row->transposed ? stored : 1;
    d.expert_step = stored * d.k;
    columns = g->blocks && x->kind == GMM_CKPT_WEIGHT ? d.k * 2 : d.k;
    (void)gmm__ck_row_shapes(row, stacked ? rank_experts : 1, stored, columns, x->vector, shape, ranks);
    if (stacked && gmm__ck_skip_target(b, x, g, half, expert0, expert0 + rank_experts)) return GMM_OK;
    for (e = expert0; e < expert0 + rank_experts; e++) {
        int64_t before;
        int32_t p;
        int s;
        if (!stacked && gmm__ck_skip_target(b, x, g, half, e, e + 1)) continue;
        if (!stacked || e == expert0) {
            gmm_ckpt_tensor t = GMM_ZERO;
            t.name = gmm__ck_target_name(b, row, state, x->linear, b->target.scheme->global_index ? e : e - expert0,
                                         g->key);
            if (!t.name) return gmm__ck_no_memory(b);
            t.dtype = g->dtype;
            if (t.dtype == GMM_NONE) { /* that of the first source tensor */
                for (s = 0; s < 3 && !g->weight[s].row; s++) {}
                for (p = 0; t.dtype == GMM_NONE && p < b->source.part_count * part_experts; p++)
                    if (g->weight[s].tensor[p] >= 0)
                        t.dtype = b->parts[p / part_experts].table->tensors[g->weight[s].tensor[p]].dtype;
            }
            t.rank = ranks[0];
            memcpy(t.shape, shape[0], sizeof t.shape);
            if (!gmm__ck_tensor_bytes(&t, &t.bytes))
                return gmm__ck_refuse(b, GMM_CKPT_OVERFLOW, t.name, "its bytes do not fit 63 bits");
            status = gmm__ck_add_target(b, &t, &target);
            if (status) return status;
            first = group = b->move_count;
            folded = 0;
            d.tensor = target;
            d.dtype = t.dtype;
            d.expert0 = e;
        }
        before = b->move_count;
        for (p = 0; p < b->source.part_count; p++) {
            if (x->grouped && e / part_experts != b->parts[p].rank.ep_rank) continue;
            if (!gmm__ck_part_is_read(b, x, p)) continue;
            for (s = 0; s < 3; s++) {
                gmm_ckpt_move_kind kind = GMM_CKPT_COPY;
                gmm__ck_shard src;
                if (!g->weight[s].row) continue;
                status = gmm__ck_source_shard(b, x, &g->weight[s], s, p, e, g->state, g->src_block, g->shape_cols,
                                              &src);
                if (status) return status;
                if (g->scale && (src.dtype == GMM_E4M3 || src.dtype == GMM_E5M2 || g->weight[s].row->scaling ==
                                 GMM_SCALING_MX32)) {
                    const gmm__ck_row_tensors *h = &g->scale[s];
                    const int mx = g->weight[s].row->scaling == GMM_SCALING_MX32;
                    const gmm_ckpt_tensor *t;
                    int64_t rows = src.expert_step / src.k;
                    int32_t at;
                    at = h->row
                        ? h->tensor[p * part_experts + (h->row->form == GMM_CKPT_EACH ? e % part_experts : 0)] : -1;
                    if (at < 0)
                        return gmm__ck_refuse(b, GMM_CKPT_SCALE_MISSING,
                                              b->parts[p].table->tensors[src.tensor].name, "its scales are missing");
                    if (part_experts > 1 &&
                        (h->row->form == GMM_CKPT_EACH) != (g->weight[s].row->form == GMM_CKPT_EACH))
                        return gmm__ck_refuse(b, GMM_CKPT_SHAPE, b->parts[p].table->tensors[at].name, "scales of %s "
                                              "cannot dequantize weights of %s: keep them quantized, or give both "
                                              "alike", h->row->form == GMM_CKPT_EACH ? "one expert" : "all experts",
                                              h->row->form == GMM_CKPT_EACH ? "all experts" : "one expert");
                    t = &b->parts[p].table->tensors[src.tensor];
                    if (!mx && rows % 128 && src.experts > 1 && t->rank == 2) /* blocks would span two of them */
                        return gmm__ck_refuse(b, GMM_CKPT_SHAPE, t->name, "%lld experts of %lld rows one below another "
                                              "cannot be dequantized in blocks of 128 rows: give it an extent of "
                                              "experts", (long long)src.experts, (long long)rows);
                    t = &b->parts[p].table->tensors[at];
                    if (!mx) rows = gmm__ceil_div(rows, 128);
                    status = gmm__ck_check_shape(b, h->row, t, part_experts, &rows,
                                                 mx ? src.k / 32 : gmm__ceil_div(src.k, 128),
                                                 0);
                    if (status) return status;
                    if (t->dtype != (mx ? GMM_U8 : GMM_F32) && !(mx && t->dtype == GMM_E8M0))
                        return gmm__ck_refuse(b, GMM_CKPT_DTYPE, t->name, "scales of %s must be %s, not %s",
                                              mx ? "MX32 blocks" : "128x128 blocks", mx ? "u8 or e8m0" : "f32",
                                              gmm_dtype_name(t->dtype));
                    src.scale = at;
                    src.scaling = mx ? GMM_SCALING_MX32 : GMM_SCALING_128X128;
                    kind = GMM_CKPT_DEQUANT;
                } else if (src.dtype != d.dtype) {
                    const int floats = (GMM__FLOATS >> src.dtype & 1) && (GMM__FLOATS >> d.dtype & 1);
                    if (!floats || g->dtype == GMM_NONE)
                        return gmm__ck_refuse(b, GMM_CKPT_DTYPE, b->parts[p].table->tensors[src.tensor].name,
                                              "%s cannot become %s%s", gmm_dtype_name(src.dtype),
                                              gmm_dtype_name(d.dtype), floats ? " unless a dtype is asked for" : "");
                    kind = GMM_CKPT_CONVERT;
                }
                status = gmm__ck_move_overlap(b, &src, &d, kind, e);
                if (status) return status;
            }
        }
        if (stored > d.rows) { /* padding rows */
            gmm_ckpt_move m = GMM_ZERO;
            m.kind = GMM_CKPT_ZERO;
            m.src = m.scale = -1;
            m.dst = target;
            m.dst_at = (e - d.expert0) * d.expert_step + d.rows * d.row_step;
            gmm__ck_add_loop(&m, stored - d.rows, 0, d.row_step);
            gmm__ck_add_loop(&m, d.k, 0, d.col_step);
            status = gmm__ck_add_move(b, &m);
            if (status) return status;
        }
        if (folded && gmm__ck_merge_expert_moves(b, group, before, folded)) {
            folded++;
        } else {
            group = before;
            folded = 1;
        }
        if (!stacked || e == expert0 + rank_experts - 1) {
            int64_t i;
            for (i = first; i < b->move_count; i++) gmm__ck_simplify_loops(&b->moves[i]);
            status = gmm__ck_finish_target(b, target, first);
            if (status) return status;
        }
    }
    return GMM_OK;
}

/* Plans all target tensors of an array. */
static gmm_status gmm__ck_plan_array(gmm__ck_builder *b, const gmm__ck_array *x, const gmm__ck_transfer *g) {
    const gmm_ckpt_row *both = gmm__ck_target_row(b, x, GMM_CKPT_BOTH, g->grouped, g->blocks);
    const gmm_ckpt_row *gate = gmm__ck_target_row(b, x, GMM_CKPT_GATE, g->grouped, g->blocks);
    const gmm_ckpt_row *up = gmm__ck_target_row(b, x, GMM_CKPT_UP, g->grouped, g->blocks);
    gmm_status status;
    if (both) return gmm__ck_plan_half(b, x, g, GMM_CKPT_BOTH, both);
    if (!gate || !up || x->halves == 1) {
        char slot[48];
        (void)snprintf(slot, sizeof slot, "slot %d of layer %lld", (int)x->linear->slot, (long long)x->linear->layer);
        return gmm__ck_refuse(b, GMM_CKPT_EXTRA_KEY, x->linear->path ? x->linear->path : slot, "the scheme %s has no "
                              "name for its %s", b->target.scheme->name, x->kind == GMM_CKPT_BIAS ? "bias" :
                              x->kind == GMM_CKPT_SCALE ? "scales" : "weight");
    }
    status = gmm__ck_plan_half(b, x, g, GMM_CKPT_GATE, gate);
    return status ? status : gmm__ck_plan_half(b, x, g, GMM_CKPT_UP, up);
}

