/* Plans the target tensors of one logical array: their names, shapes and moves, and which of them become views. */

/* Adds a target tensor behind those that exist, at a multiple of 64 bytes; *index is its index in the table. */
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

/* Writes the first rank without a part of the source, as "EP 1, ETP 0, GTP 2"; "" if every rank has one. */
static void gmm__ck_missing_rank(const gmm__ck_builder *b, char *text, size_t capacity) {
    const gmm_ckpt_rank size = b->parts[0].rank;
    int64_t index, all = (int64_t)size.ep_size * size.etp_size;
    *text = 0;
    if (!gmm__mul(all, size.gtp_size, &all)) return;
    for (index = 0; index < all && index <= b->source.part_count; index++) {
        const int32_t gtp = (int32_t)(index % size.gtp_size), etp = (int32_t)(index / size.gtp_size % size.etp_size);
        const int32_t ep = (int32_t)(index / size.gtp_size / size.etp_size);
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

/* Checks that the moves from `first` on write the whole target, and makes it a view where that is allowed and possible.
   */
static gmm_status gmm__ck_finish_target(gmm__ck_builder *b, int32_t target, int64_t first) {
    const gmm_ckpt_tensor *t = &b->targets->tensors[target];
    const int64_t unit = gmm__ck_unit_bytes(t->dtype), units = gmm__ck_unit_count(t);
    int64_t sum = 0, begin = 0, i;
    int view = b->target.views;
    gmm_ckpt_move view_move = GMM_ZERO;
    for (i = first; i < b->move_count; i++) {
        const gmm_ckpt_move *m = &b->moves[i];
        const gmm_ckpt_tensor *s = m->src >= 0 ? &b->parts[m->part].table->tensors[m->src] : NULL;
        int64_t position;
        sum += gmm__ck_move_elements(m);
        view = view && s && m->kind == GMM_CKPT_COPY && m->loops == 1 && m->src_step[0] == 1 && m->dst_step[0] == 1;
        if (!view) continue;
        position = s->offset + (m->src_at - m->dst_at) * unit;
        if (i == first) {
            view_move = *m;
            begin = position;
        } else {
            view = m->part == view_move.part && position == begin &&
                   s->storage == b->parts[m->part].table->tensors[view_move.src].storage;
            if (m->dst_at < view_move.dst_at) view_move = *m;
        }
    }
    if (sum != units) {
        char rank[80];
        gmm__ck_missing_rank(b, rank, sizeof rank);
        return gmm__ck_refuse(b, GMM_CKPT_MISSING_INDEX, t->name, "the source holds %lld of its %lld elements: a "
                              "rank's part is missing%s", (long long)sum, (long long)units, rank);
    }
    if (view && units) {
        view_move.kind = GMM_CKPT_VIEW;
        view_move.count[0] = units;
        b->moves[first] = view_move;
        b->move_count = first + 1;
    }
    return GMM_OK;
}

/* What stands behind "weight" in a pattern, without the expert: "_scale_inv". */
static size_t gmm__ck_suffix(const char *pattern, const char **suffix) {
    const char *next;
    for (*suffix = strstr(pattern, "weight"); *suffix && (next = strstr(*suffix + 6, "weight")) != NULL;)
        *suffix = next;
    if (*suffix) *suffix += 6;
    return *suffix ? strcspn(*suffix, "{") : 0;
}

static int gmm__ck_same_suffix(const gmm_ckpt_row *a, const gmm_ckpt_row *b) {
    const char *x, *y;
    const size_t n = gmm__ck_suffix(a->pattern, &x);
    return gmm__ck_suffix(b->pattern, &y) == n && x && y && !memcmp(x, y, n);
}

/* The target's row for a kind and half. Where EACH and STACKED are there, `grouped` decides; of several names of
   scales, that of `like`, a row of the source, or else the first. */
static const gmm_ckpt_row *gmm__ck_target_row(const gmm__ck_builder *b, const gmm__ck_array *x, int half, int grouped,
                                              int blocks, const gmm_ckpt_row *like) {
    const gmm_ckpt_scheme *scheme = b->target.scheme;
    const gmm_ckpt_row *found = NULL;
    int best = -1;
    int32_t i;
    for (i = 0; i < scheme->count; i++) {
        const gmm_ckpt_row *r = &scheme->rows[i];
        int score;
        if (r->kind != x->kind || (int)r->half != half || (r->scaling == GMM_SCALING_MX32) != blocks) continue;
        if (r->slot != x->linear->slot && (r->slot != GMM_CKPT_SLOT_ANY || !x->linear->path)) continue;
        score = 2 * ((r->form != GMM_CKPT_EACH) == (grouped != 0)) + (like && gmm__ck_same_suffix(r, like));
        if (score > best) found = r;
        if (score > best) best = score;
    }
    return found;
}

/* Of the source tensors that a target half of one expert needs: 0 = all exist, 1 = none, 2 = some. */
static int gmm__ck_missing_state(const gmm__ck_builder *b, const gmm__ck_array *x, const gmm__ck_transfer *g, int half,
                                 int64_t e) {
    const int64_t part_experts = gmm__ck_part_experts(b, x);
    int64_t found = 0, needed = 0;
    int32_t p;
    int s;
    for (p = 0; p < b->source.part_count; p++) {
        if ((x->grouped && e / part_experts != b->parts[p].rank.ep_rank) || !gmm__ck_part_is_read(b, x, p)) continue;
        for (s = 0; s < 3; s++) {
            const gmm__ck_row_tensors *h = &g->presence[s];
            if (!h->row || (half != GMM_CKPT_BOTH && s != GMM_CKPT_BOTH && s != half)) continue;
            needed++;
            found += h->tensor[p * part_experts + (h->row->form == GMM_CKPT_EACH ? e % part_experts : 0)] >= 0;
        }
    }
    return !found ? 1 : found < needed ? 2 : 0;
}

/* Whether skip_missing omits a target. Scales of it that the source has are then dropped. */
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

/* Describes the rows and columns that the target's rank stores of one half. *stored counts its rows with padding. */
static gmm_status gmm__ck_target_shard(gmm__ck_builder *b, const gmm__ck_array *x, const gmm__ck_transfer *g, int half,
                                       const gmm_ckpt_row *row, gmm__ck_shard *d, int64_t *stored) {
    const gmm_ckpt_rank *rank = &b->target.rank;
    const int cut = g->cut && x->gtp_sharded;
    memset(d, 0, sizeof *d);
    d->f = x->rows_sharded ? x->f / rank->etp_size : x->f;
    d->f0 = x->rows_sharded ? rank->etp_rank * d->f : 0;
    d->k = x->cols_sharded ? x->k / rank->etp_size : x->k;
    d->k0 = x->cols_sharded ? rank->etp_rank * d->k : 0;
    d->half0 = half == GMM_CKPT_UP && !x->single ? 1 : 0;
    d->halves = half == GMM_CKPT_BOTH ? x->halves : 1;
    d->block = d->halves == 2 && g->dst_block ? g->dst_block : d->f;
    d->rows = *stored = d->f * d->halves;
    if (cut) {
        const int64_t row0 = g->cut->row0, rows = g->cut->rows, stored_rows = g->cut->stored_rows;
        if (row0 < 0 || rows < 0 || stored_rows < rows || row0 > d->rows * g->cut_unit ||
            rows > d->rows * g->cut_unit - row0)
            return gmm__ck_refuse(b, GMM_CKPT_ARGUMENT, NULL, "cuts: row0 %lld, rows %lld, stored_rows %lld: must be "
                                  ">= 0, end in the %lld rows there are, and store no fewer than rows",
                                  (long long)row0, (long long)rows, (long long)stored_rows,
                                  (long long)(d->rows * g->cut_unit));
        if (half != GMM_CKPT_BOTH)
            return gmm__ck_refuse(b, GMM_CKPT_NOT_DIVISIBLE, NULL, "cuts: row0 %lld, rows %lld, stored_rows %lld: must "
                                  "be of gate and up in one tensor", (long long)row0, (long long)rows,
                                  (long long)stored_rows);
        d->row0 = row0 / g->cut_unit; /* gmm__ck_check_cut lets boundaries fall between blocks alone */
        d->rows = gmm__ceil_div(rows, g->cut_unit);
        *stored = gmm__ceil_div(stored_rows, g->cut_unit);
    }
    d->row_step = row->transposed ? 1 : d->k;
    d->col_step = row->transposed ? *stored : 1;
    if (!gmm__ck_fits(x->experts, *stored, d->k)) /* the linear does: only a cut can store more rows */
        return gmm__ck_refuse(b, GMM_CKPT_OVERFLOW, NULL, "cuts: stored_rows %lld: %lld experts of %lld x %lld do not "
                              "fit 63 bits", (long long)*stored, (long long)x->experts, (long long)*stored,
                              (long long)d->k);
    d->expert_step = *stored * d->k;
    return GMM_OK;
}

/* Finds and checks the scales that dequantize a shard of the source. */
static gmm_status gmm__ck_source_scales(gmm__ck_builder *b, const gmm__ck_array *x, const gmm__ck_transfer *g, int half,
                                        int32_t part, int64_t expert, gmm__ck_shard *src) {
    const int64_t part_experts = gmm__ck_part_experts(b, x);
    const gmm__ck_row_tensors *h = &g->scale[half];
    const gmm_scaling scaling = g->format->scaling;
    const gmm_ckpt_tensor *t;
    const int64_t rows = src->expert_step / src->k;
    const int64_t local = h->row && h->row->form == GMM_CKPT_EACH ? expert % part_experts : 0;
    const int32_t index = h->row ? h->tensor[part * part_experts + local] : -1;
    int64_t block_rows, block_cols, scale_rows, scale_cols;
    char dtypes[64];
    gmm_status status;
    if (index < 0)
        return gmm__ck_refuse(b, GMM_CKPT_SCALE_MISSING,
                              b->parts[part].table->tensors[src->tensor].name, "its scales are missing");
    if (scaling != GMM_SCALING_TENSOR && g->weight[half].row->transposed)
        return gmm__ck_refuse(b, GMM_CKPT_SHAPE, b->parts[part].table->tensors[src->tensor].name, "codes that are "
                              "stored in x out cannot be dequantized by scales of %s: keep them quantized",
                              gmm_scaling_name(scaling));
    if (part_experts > 1 &&
        (h->row->form == GMM_CKPT_EACH) != (g->weight[half].row->form == GMM_CKPT_EACH))
        return gmm__ck_refuse(b, GMM_CKPT_SHAPE, b->parts[part].table->tensors[index].name, "scales of %s "
                              "cannot dequantize weights of %s: keep them quantized, or give both "
                              "alike", h->row->form == GMM_CKPT_EACH ? "one expert" : "all experts",
                              h->row->form == GMM_CKPT_EACH ? "all experts" : "one expert");
    t = &b->parts[part].table->tensors[src->tensor];
    gmm__ck_block_of(scaling, &block_rows, &block_cols);
    /* moves take a vector for one row, and several for the rows of a matrix: blocks must be alike along both */
    if (x->dims == 1 && (block_rows != block_cols || src->experts > 1))
        return gmm__ck_refuse(b, GMM_CKPT_SHAPE, t->name, "vectors%s cannot be dequantized by scales of %s: keep them "
                              "quantized", src->experts > 1 ? " of several experts" : "", gmm_scaling_name(scaling));
    if ((block_rows ? rows % block_rows : 1) && src->experts > 1 && t->rank == 2) /* a block would span two experts */
        return gmm__ck_refuse(b, GMM_CKPT_SHAPE, t->name, "%lld experts of %lld rows one below another cannot be "
                              "dequantized in blocks of %s: give it an extent of experts", (long long)src->experts,
                              (long long)rows, gmm_scaling_name(scaling));
    t = &b->parts[part].table->tensors[index];
    gmm__ck_scale_extents(scaling, rows, src->k, &scale_rows, &scale_cols);
    status = gmm__ck_check_shape(b, h->row, t, part_experts, &scale_rows, scale_cols, g->scale_dims);
    if (status) return status;
    if (!(g->format->scales >> t->dtype & 1))
        return gmm__ck_refuse(b, GMM_CKPT_DTYPE, t->name, "scales of %s must be %s, not %s", gmm_scaling_name(scaling),
                              gmm__ck_dtype_names(g->format->scales, dtypes, sizeof dtypes), gmm_dtype_name(t->dtype));
    src->scale = index;
    src->scaling = scaling;
    return GMM_OK;
}

/* Adds the target tensor whose first expert is that of the shard. */
static gmm_status gmm__ck_add_half_target(gmm__ck_builder *b, const gmm__ck_array *x, const gmm__ck_transfer *g,
                                          const gmm_ckpt_row *row, int64_t expert_index, gmm_ckpt_tensor *t,
                                          gmm__ck_shard *d) {
    const char *state = b->target.state_count ? b->target.states[g->state] : b->states[g->state];
    const int64_t part_experts = gmm__ck_part_experts(b, x);
    gmm_status status;
    int64_t i;
    int half;
    t->name = gmm__ck_target_name(b, row, state, x->linear, expert_index, g->key);
    if (!t->name) return gmm__ck_no_memory(b);
    t->dtype = g->dtype;
    if (t->dtype == GMM_NONE) { /* that of the first source tensor */
        for (half = 0; half < 3 && !g->weight[half].row; half++) {}
        for (i = 0; t->dtype == GMM_NONE && i < b->source.part_count * part_experts; i++)
            if (g->weight[half].tensor[i] >= 0)
                t->dtype = b->parts[i / part_experts].table->tensors[g->weight[half].tensor[i]].dtype;
    }
    if (!gmm__ck_tensor_bytes(t, &t->bytes))
        return gmm__ck_refuse(b, GMM_CKPT_OVERFLOW, t->name, "its bytes do not fit 63 bits");
    status = gmm__ck_add_target(b, t, &d->tensor);
    d->dtype = t->dtype;
    return status;
}

/* The half of the source that has the one value of a target's half: the same; else BOTH for GATE and UP, and GATE for
   BOTH. */
static int gmm__ck_single_half(const gmm__ck_transfer *g, int half) {
    return g->weight[half].row ? half : half == GMM_CKPT_BOTH ? GMM_CKPT_GATE : GMM_CKPT_BOTH;
}

/* Adds the moves of one expert from every part of the source into the shard of a target, which holds `target_half`. */
static gmm_status gmm__ck_move_expert(gmm__ck_builder *b, const gmm__ck_array *x, const gmm__ck_transfer *g,
                                      int target_half, const gmm__ck_shard *d, int64_t expert) {
    const int64_t part_experts = gmm__ck_part_experts(b, x);
    int32_t p;
    int half;
    for (p = 0; p < b->source.part_count; p++) {
        if (x->grouped && expert / part_experts != b->parts[p].rank.ep_rank) continue;
        if (!gmm__ck_part_is_read(b, x, p)) continue;
        for (half = 0; half < 3; half++) {
            gmm_ckpt_move_kind kind = GMM_CKPT_COPY;
            gmm__ck_shard src;
            gmm_status status;
            if (!g->weight[half].row || (x->single && half != gmm__ck_single_half(g, target_half))) continue;
            status = gmm__ck_source_shard(b, x, g, half, p, expert, &src);
            if (status) return status;
            if (g->scale && g->format->codes >> src.dtype & 1) {
                status = gmm__ck_source_scales(b, x, g, half, p, expert, &src);
                if (status) return status;
                kind = GMM_CKPT_DEQUANT;
            } else if (src.dtype != d->dtype) {
                const int floats = (GMM__FLOATS >> src.dtype & 1) && (GMM__FLOATS >> d->dtype & 1);
                if (!floats || g->dtype == GMM_NONE)
                    return gmm__ck_refuse(b, GMM_CKPT_DTYPE, b->parts[p].table->tensors[src.tensor].name,
                                          "%s cannot become %s%s", gmm_dtype_name(src.dtype), gmm_dtype_name(d->dtype),
                                          floats ? " unless a dtype is asked for" : "");
                kind = GMM_CKPT_CONVERT;
            }
            status = gmm__ck_move_overlap(b, &src, d, kind, expert);
            if (status) return status;
        }
    }
    return GMM_OK;
}

/* Adds the move that writes zeros into the padding rows of one expert. */
static gmm_status gmm__ck_zero_padding(gmm__ck_builder *b, const gmm__ck_shard *d, int64_t expert, int64_t stored) {
    gmm_ckpt_move m = GMM_ZERO;
    if (stored <= d->rows) return GMM_OK;
    m.kind = GMM_CKPT_ZERO;
    m.src = m.scale = -1;
    m.dst = d->tensor;
    m.dst_at = (expert - d->expert0) * d->expert_step + d->rows * d->row_step;
    gmm__ck_add_loop(&m, stored - d->rows, 0, d->row_step);
    gmm__ck_add_loop(&m, d->k, 0, d->col_step);
    return gmm__ck_add_move(b, &m);
}

/* Plans all target tensors of one half. */
static gmm_status gmm__ck_plan_half(gmm__ck_builder *b, const gmm__ck_array *x, const gmm__ck_transfer *g, int half,
                                    const gmm_ckpt_row *row) {
    const gmm_ckpt_rank *rank = &b->target.rank;
    const int64_t rank_experts = x->grouped ? x->experts / rank->ep_size : 1;
    const int64_t expert0 = x->grouped ? rank->ep_rank * rank_experts : 0;
    const int stacked = row->form != GMM_CKPT_EACH;
    int64_t e, i, first = b->move_count, group = first, merged = 0, stored = 0, shape[2][GMM_CKPT_RANK], columns;
    int32_t ranks[2];
    gmm__ck_shard d;
    gmm_status status = gmm__ck_target_shard(b, x, g, half, row, &d, &stored);
    if (status) return status;
    columns = d.k * g->column_codes;
    (void)gmm__ck_row_shapes(row, stacked ? rank_experts : 1, stored, columns, x->dims, shape, ranks);
    if (stacked && gmm__ck_skip_target(b, x, g, half, expert0, expert0 + rank_experts)) return GMM_OK;
    for (e = expert0; e < expert0 + rank_experts; e++) {
        int64_t before;
        if (!stacked && gmm__ck_skip_target(b, x, g, half, e, e + 1)) continue;
        if (!stacked || e == expert0) {
            gmm_ckpt_tensor t = GMM_ZERO;
            t.rank = ranks[0];
            memcpy(t.shape, shape[0], sizeof t.shape);
            d.expert0 = e;
            status = gmm__ck_add_half_target(b, x, g, row, b->target.scheme->global_index ? e : e - expert0, &t, &d);
            if (status) return status;
            first = group = b->move_count;
            merged = 0;
        }
        before = b->move_count;
        status = gmm__ck_move_expert(b, x, g, half, &d, e);
        if (!status) status = gmm__ck_zero_padding(b, &d, e, stored);
        if (status) return status;
        if (merged && gmm__ck_merge_expert_moves(b, group, before, merged)) {
            merged++;
        } else {
            group = before;
            merged = 1;
        }
        if (!stacked || e == expert0 + rank_experts - 1) {
            for (i = first; i < b->move_count; i++) gmm__ck_simplify_loops(&b->moves[i]);
            status = gmm__ck_finish_target(b, d.tensor, first);
            if (status) return status;
        }
    }
    return GMM_OK;
}

/* Plans all target tensors of an array. */
static gmm_status gmm__ck_plan_array(gmm__ck_builder *b, const gmm__ck_array *x, const gmm__ck_transfer *g) {
    static const char *const kinds[] = {"weight", "bias", "scales", "tensor scale", "amax"};
    const gmm_ckpt_row *rows[3];
    gmm_status status;
    int half;
    for (half = 0; half < 3; half++) {
        int like = gmm__ck_single_half(g, half);
        if (!g->weight[like].row) like = g->weight[GMM_CKPT_BOTH].row ? GMM_CKPT_BOTH : GMM_CKPT_GATE;
        rows[half] = gmm__ck_target_row(b, x, half, g->grouped, g->blocks, g->weight[like].row);
    }
    if (rows[GMM_CKPT_BOTH]) return gmm__ck_plan_half(b, x, g, GMM_CKPT_BOTH, rows[GMM_CKPT_BOTH]);
    if (!rows[GMM_CKPT_GATE] || !rows[GMM_CKPT_UP] || !x->linear->gated) {
        char slot[48];
        (void)snprintf(slot, sizeof slot, "slot %d of layer %lld", (int)x->linear->slot, (long long)x->linear->layer);
        return gmm__ck_refuse(b, GMM_CKPT_EXTRA_KEY, x->linear->path ? x->linear->path : slot, "the scheme %s has no "
                              "name for its %s", b->target.scheme->name, kinds[x->kind]);
    }
    status = gmm__ck_plan_half(b, x, g, GMM_CKPT_GATE, rows[GMM_CKPT_GATE]);
    return status ? status : gmm__ck_plan_half(b, x, g, GMM_CKPT_UP, rows[GMM_CKPT_UP]);
}
