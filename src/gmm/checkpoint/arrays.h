/* ............................................................................................ 15.6 One array ... */
/* Finds and describes the stored tensors of one logical array. */

/* The source tensors that match one row for an array: [parts][experts of a part]; -1 = none. */
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

/* The rows of a tensor's matrices, from the extent that counts them; 0 if there is none. `dims` are the dimensions of
   one matrix. */
static int64_t gmm__ck_stored_rows(const gmm_ckpt_row *row, const gmm_ckpt_tensor *t, int64_t experts, int32_t dims) {
    const int split = t->rank > gmm__ck_dimensions(row, dims), transposed = row->transposed && dims == 2;
    const int32_t d = split + transposed;
    const int64_t rows = d < t->rank ? t->shape[d] : 0;
    if (!split && (row->form == GMM_CKPT_WIDE ? transposed : row->form != GMM_CKPT_EACH && !transposed))
        return rows / experts;
    return rows;
}

/* Checks a tensor's shape. *rows < 0 is read from it. */
static gmm_status gmm__ck_check_shape(gmm__ck_builder *b, const gmm_ckpt_row *row, const gmm_ckpt_tensor *t,
                                      int64_t experts, int64_t *rows, int64_t cols, int32_t dims) {
    int64_t shape[2][GMM_CKPT_RANK], r = *rows;
    int32_t rank[2];
    char actual[160], expected[160];
    if (r < 0) r = gmm__ck_stored_rows(row, t, experts, dims);
    if (gmm__ck_shape_index(row, t, experts, r, cols, dims) >= 0) {
        *rows = r;
        return GMM_OK;
    }
    (void)gmm__ck_row_shapes(row, experts, r, cols, dims, shape, rank);
    gmm__ck_shape_text(actual, sizeof actual, t->rank, t->shape);
    gmm__ck_shape_text(expected, sizeof expected, rank[0], shape[0]);
    return gmm__ck_refuse(b, GMM_CKPT_SHAPE, t->name, "its shape %s is not %s, as %lld x %lld of %lld experts%s ask",
                          actual, expected, (long long)r, (long long)cols, (long long)experts,
                          row->transposed ? ", transposed," : "");
}

/* Whether the array is read from a part; it is not where an earlier part holds the same data. */
static int gmm__ck_part_is_read(const gmm__ck_builder *b, const gmm__ck_array *x, int32_t part) {
    const gmm_ckpt_rank *r = &b->parts[part].rank;
    const int etp = x->rows_sharded || x->cols_sharded || x->etp_part >= 0;
    int32_t p;
    if (x->etp_part >= 0 && r->etp_rank != x->etp_part) return 0;
    for (p = 0; p < part; p++) {
        const gmm_ckpt_rank *q = &b->parts[p].rank;
        if ((!x->grouped || q->ep_rank == r->ep_rank) && (!etp || q->etp_rank == r->etp_rank) &&
            (!x->gtp_sharded || q->gtp_rank == r->gtp_rank))
            return 0;
    }
    return 1;
}

static int64_t gmm__ck_part_experts(const gmm__ck_builder *b, const gmm__ck_array *x) {
    return x->grouped ? x->experts / b->parts[0].rank.ep_size : 1;
}

/* Sorts the matches of one linear, state and kind by half. */
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
        int64_t index;
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
            return gmm__ck_refuse(b, GMM_CKPT_BOTH_LAYOUTS, t->name, "its %s are there in another layout too",
                                  x->kind < GMM_CKPT_SCALE ? "weights" : "scales");
        if (!h->row) {
            h->row = row;
            h->tensor = (int32_t *)gmm__ck_alloc(&b->arena, b->source.part_count * part_experts, sizeof *h->tensor);
            if (!h->tensor) return gmm__ck_no_memory(b);
            for (k = 0; k < b->source.part_count * part_experts; k++) h->tensor[k] = -1;
        }
        index = row->form == GMM_CKPT_EACH && x->grouped ? matches[i].expert - base : 0;
        if (index < 0 || index >= part_experts)
            return gmm__ck_refuse(b, GMM_CKPT_EXTRA_INDEX, t->name, "expert %lld is none of the declared %lld",
                                  (long long)matches[i].expert, (long long)part_experts);
        index += matches[i].part * part_experts;
        if (h->tensor[index] >= 0)
            return gmm__ck_refuse(b, GMM_CKPT_AMBIGUOUS, t->name, "\"%.100s\" names the same tensor",
                                  b->parts[matches[i].part].table->tensors[h->tensor[index]].name);
        h->tensor[index] = matches[i].tensor;
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
    if (!name) return gmm__ck_no_memory(b);
    if (x->kind < GMM_CKPT_SCALE) return gmm__ck_refuse(b, GMM_CKPT_MISSING_INDEX, name, "the source lacks it");
    return gmm__ck_refuse(b, GMM_CKPT_SCALE_MISSING, name, "the source lacks these scales of a quantized weight");
}

/* Whether GTP shards the rows of the array's matrices in the source. */
static int gmm__ck_is_gtp_sharded(const gmm__ck_builder *b, const gmm__ck_array *x) {
    return x->gtp_sharded && b->parts[0].rank.gtp_size > 1;
}

/* How one array is transferred from the source to the targets. */
typedef struct gmm__ck_transfer {
    gmm__ck_row_tensors *weight, *scale; /* scale: block scales to dequantize with; NULL = none */
    const gmm__ck_row_tensors *presence; /* what skip_missing is decided by: `weight`; for scales, their weight */
    const char *key;                     /* a key of the linear in the source, without its state's prefix */
    int64_t src_block, dst_block;        /* rows of one gate or up block; 0 = halves */
    gmm_dtype dtype;                     /* of the targets; GMM_NONE = the source's */
    int32_t state, grouped, blocks;      /* grouped: STACKED targets preferred; blocks: the target's row is MX32 */
    int64_t shape_cols;                  /* columns of the whole array as the source's shapes count them */
    int32_t column_codes;                /* columns that the target's shapes count for one of the array: 1, 2 codes */
    const gmm_ckpt_cut *cut;             /* rows of a GTP rank, or NULL */
    int64_t cut_unit;                    /* rows of the weight per row of the array */
    const gmm__ck_format *format;        /* of quantized weights, or NULL */
    const char *codes;                   /* name of the first quantized weight */
    int32_t scale_dims;                  /* dimensions of the scales of one matrix */
    uint32_t dtypes;                     /* of the source; 0 = any */
} gmm__ck_transfer;

/* Describes the stored tensor of the source that holds one half of one expert in one part. */
static gmm_status gmm__ck_source_shard(gmm__ck_builder *b, const gmm__ck_array *x, const gmm__ck_transfer *g, int half,
                                       int32_t part, int64_t expert, gmm__ck_shard *p) {
    const gmm__ck_row_tensors *h = &g->weight[half];
    const gmm_ckpt_rank *rank = &b->parts[part].rank;
    const int64_t part_experts = gmm__ck_part_experts(b, x);
    const int64_t local = h->row->form == GMM_CKPT_EACH ? expert % part_experts : 0; /* index within the part */
    const gmm_ckpt_tensor *t;
    int64_t rows, stored = -1, full, shape_cols = g->shape_cols;
    gmm_status status;
    int32_t i = h->tensor[part * part_experts + local], q;
    memset(p, 0, sizeof *p);
    if (i < 0)
        return gmm__ck_refuse_missing_tensor(
            b, x, h->row, g->state, local + (b->source.scheme->global_index ? rank->ep_rank * part_experts : 0));
    t = &b->parts[part].table->tensors[i];
    if (gmm_dtype_bits(t->dtype) < 8 && !(g->format && g->format->packed))
        return gmm__ck_refuse(b, GMM_CKPT_DTYPE, t->name, "a weight's dtype must have whole bytes");
    if (g->dtypes && !(g->dtypes >> t->dtype & 1)) {
        char dtypes[64];
        return gmm__ck_refuse(b, GMM_CKPT_DTYPE, t->name, "scales of %s must be %s, not %s",
                              gmm_scaling_name(g->format->scaling),
                              gmm__ck_dtype_names(g->dtypes, dtypes, sizeof dtypes), gmm_dtype_name(t->dtype));
    }
    p->part = part;
    p->tensor = i;
    p->scale = -1;
    p->dtype = t->dtype;
    p->f = x->rows_sharded ? x->f / rank->etp_size : x->f;
    p->f0 = x->rows_sharded ? rank->etp_rank * p->f : 0;
    p->k = x->cols_sharded ? x->k / rank->etp_size : x->k;
    p->k0 = x->cols_sharded ? rank->etp_rank * p->k : 0;
    p->half0 = half == GMM_CKPT_UP && !x->single ? 1 : 0;
    p->halves = half == GMM_CKPT_BOTH ? x->halves : 1;
    p->block = p->halves == 2 && g->src_block ? g->src_block : p->f;
    p->experts = h->row->form == GMM_CKPT_EACH ? 1 : part_experts;
    p->expert0 = (x->grouped ? rank->ep_rank * part_experts : 0) + local;
    full = p->f * p->halves;
    rows = gmm__ck_is_gtp_sharded(b, x) ? -1 : full;
    if (x->cols_sharded) shape_cols /= rank->etp_size;
    status = gmm__ck_check_shape(b, h->row, t, part_experts, &rows, shape_cols, x->dims);
    if (status) return status;
    p->rows = stored = rows;
    /* A rank's rows follow those of lower ranks; rows past the matrix's end are padding. */
    if (gmm__ck_is_gtp_sharded(b, x)) {
        int64_t sum = 0;
        for (q = 0; q < b->source.part_count; q++) {
            const gmm_ckpt_rank *other_rank = &b->parts[q].rank;
            int64_t r = -1;
            if (other_rank->ep_rank != rank->ep_rank || other_rank->etp_rank != rank->etp_rank) continue;
            i = h->tensor[q * part_experts + local];
            if (i < 0)
                return gmm__ck_refuse_missing_tensor(
                    b, x, h->row, g->state,
                    local + (b->source.scheme->global_index ? rank->ep_rank * part_experts : 0));
            status = gmm__ck_check_shape(b, h->row, &b->parts[q].table->tensors[i], part_experts, &r, shape_cols,
                                         x->dims);
            if (status) return status;
            if (r > INT64_MAX - sum)
                return gmm__ck_refuse(b, GMM_CKPT_OVERFLOW, t->name, "the rows of the %d GTP ranks do not fit 63 bits",
                                      (int)rank->gtp_size);
            if (other_rank->gtp_rank < rank->gtp_rank) p->row0 += r;
            sum += r;
        }
        if (sum < full || (sum > full && (sum % rank->gtp_size || sum / rank->gtp_size != stored)))
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

/* Adds the moves for the intersection of a source shard and a target shard in one expert. */
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

/* Merges the moves of the last expert, [second, ...), into those of the experts before it, [first, second), as one more
   iteration of an outer loop, which has `experts` iterations so far. Returns 1 if that was possible. */
static int gmm__ck_merge_expert_moves(gmm__ck_builder *b, int64_t first, int64_t second, int64_t experts) {
    const int64_t n = second - first;
    int64_t i;
    int pass;
    if (n == 0 || b->move_count - second != n) return 0;
    for (pass = 0; pass < 2; pass++)
        for (i = 0; i < n; i++) {
            gmm_ckpt_move *m = &b->moves[first + i], e = b->moves[second + i];
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
    b->move_count = second;
    return 1;
}

static int64_t gmm__ck_move_elements(const gmm_ckpt_move *m) {
    int64_t n = 1;
    int l;
    for (l = 0; l < m->loops; l++) n *= m->count[l];
    return n;
}

