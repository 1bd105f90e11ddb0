/* Checks the extents of one linear and plans it in one state. */

static gmm_status gmm__ck_check_multiple(gmm__ck_builder *b, const gmm_ckpt_linear *l, int64_t extent, int64_t by,
                                         const char *what, const char *unit) {
    if (by > 0 && extent % by == 0) return GMM_OK;
    return gmm__ck_refuse(b, GMM_CKPT_NOT_DIVISIBLE, l->path, "slot %d of layer %lld: %s %lld is no multiple of %s "
                          "%lld", (int)l->slot, (long long)l->layer, what, (long long)extent, unit, (long long)by);
}

/* Determines the block sizes of gate and up rows of a gated FC1 in source and target. */
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
    if (!known.known && (t->scheme->glu_known || *dst_block || b->parts[0].rank.etp_size > 1 || t->rank.etp_size > 1 ||
                         !gmm__ck_target_row(b, &probe, GMM_CKPT_BOTH, 0, 0, NULL)))
        return gmm__ck_refuse(b, GMM_CKPT_GLU_UNKNOWN, key, "gate and up rows of layer %lld %s, but nothing says "
                              "whether the source has them as halves or in blocks: state it", (long long)l->layer,
                              t->scheme->glu_known ? "have an order in the target's scheme" : "would move");
    *src_block = known.block;
    return GMM_OK;
}

/* The elements of a row of an array's matrices in one part. */
static int64_t gmm__ck_part_cols(const gmm__ck_builder *b, const gmm__ck_array *x) {
    return x->cols_sharded ? x->k / b->parts[0].rank.etp_size : x->k;
}

/* Whether a weight's tensor holds codes: FP8, or two 4-bit codes per byte. */
static int gmm__ck_holds_codes(const gmm_ckpt_row *row, const gmm_ckpt_tensor *t, int64_t cols) {
    if (GMM__CK_CODES_8 >> t->dtype & 1 || t->dtype == GMM_E2M1 || row->scaling == GMM_SCALING_MX32) return 1;
    return t->dtype == GMM_U8 && t->rank > 1 && t->shape[t->rank - 1] == cols / 2 && cols % 2 == 0;
}

/* Marks scales whose weights are not quantized: they are extra. */
static void gmm__ck_mark_plain_scales(gmm__ck_builder *b, const gmm__ck_array *x, const gmm__ck_row_tensors *weight,
                                      const gmm__ck_row_tensors *scale) {
    const int64_t part_experts = gmm__ck_part_experts(b, x), cols = gmm__ck_part_cols(b, x);
    int64_t i, e;
    int h;
    for (h = 0; h < 3; h++)
        for (i = 0; weight[h].row && scale[h].row && i < b->source.part_count * part_experts; i++) {
            const int64_t part = i / part_experts, first = scale[h].row->form == GMM_CKPT_EACH ? i % part_experts : 0;
            const int64_t end = scale[h].row->form == GMM_CKPT_EACH ? first + 1 : part_experts;
            int plain = 0, quantized = 0;
            for (e = first; e < end; e++) {
                const int32_t t =
                    weight[h].tensor[part * part_experts + (weight[h].row->form == GMM_CKPT_EACH ? e : 0)];
                plain |= t >= 0;
                quantized |= t >= 0 && gmm__ck_holds_codes(weight[h].row, &b->parts[part].table->tensors[t], cols);
            }
            if (plain && !quantized && scale[h].tensor[i] >= 0)
                b->uses[part][scale[h].tensor[i]] = GMM__CK_PLAIN_SCALE;
        }
}

/* Marks all scales of one kind: PLAIN_SCALE where the weight's format does not have them, DROPPED where the target has
   no use for them. */
static void gmm__ck_mark_scales(gmm__ck_builder *b, const gmm__ck_array *x, const gmm__ck_row_tensors *scale,
                                enum gmm__ck_tensor_use use) {
    const int64_t part_experts = gmm__ck_part_experts(b, x);
    int64_t i;
    int h;
    for (h = 0; h < 3; h++)
        for (i = 0; scale[h].row && i < b->source.part_count * part_experts; i++)
            if (scale[h].tensor[i] >= 0) b->uses[i / part_experts][scale[h].tensor[i]] = (uint8_t)use;
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

/* Checks that EP divides the experts on both sides: other checks take the experts of a rank for granted. */
static gmm_status gmm__ck_check_experts(gmm__ck_builder *b, const gmm__ck_array *x) {
    gmm_status status;
    if (!x->grouped) return GMM_OK;
    status = gmm__ck_check_multiple(b, x->linear, x->experts, b->parts[0].rank.ep_size, "experts", "the source's EP");
    if (status) return status;
    return gmm__ck_check_multiple(b, x->linear, x->experts, b->target.rank.ep_size, "experts", "the target's EP");
}

/* Checks that ETP and the blocks of gate and up rows divide a weight on both sides. */
static gmm_status gmm__ck_check_extents(gmm__ck_builder *b, const gmm__ck_array *x, const gmm__ck_transfer *g) {
    const gmm_ckpt_linear *l = x->linear;
    const gmm_ckpt_rank *ranks[2];
    const int64_t blocks[2] = {g->src_block, x->halves == 2 ? g->dst_block : 0};
    gmm_status status = GMM_OK;
    int i;
    ranks[0] = &b->parts[0].rank;
    ranks[1] = &b->target.rank;
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

/* The first stored weight that holds codes; NULL = none. *half and *index say where it stands in `weight`. */
static const gmm_ckpt_tensor *gmm__ck_first_codes(const gmm__ck_builder *b, const gmm__ck_array *x,
                                                  const gmm__ck_row_tensors *weight, int *half, int64_t *index) {
    const int64_t part_experts = gmm__ck_part_experts(b, x), cols = gmm__ck_part_cols(b, x);
    for (*index = 0; *index < b->source.part_count * part_experts; ++*index)
        for (*half = 0; *half < 3; ++*half) {
            const gmm__ck_row_tensors *h = &weight[*half];
            const gmm_ckpt_tensor *t;
            if (!h->row || h->tensor[*index] < 0) continue;
            t = &b->parts[*index / part_experts].table->tensors[h->tensor[*index]];
            if (gmm__ck_holds_codes(h->row, t, cols)) return t;
        }
    return NULL;
}

/* The scales of the linear in one state, by kind from GMM_CKPT_SCALE on, and half. */
typedef struct gmm__ck_scales { gmm__ck_row_tensors of[GMM_CKPT_KIND_COUNT][3]; } gmm__ck_scales;

/* Finds the format of the quantized weight `codes`, which is weight[half].tensor[index], from the first of its
   scales. */
static gmm_status gmm__ck_read_format(gmm__ck_builder *b, const gmm__ck_array *x, gmm__ck_transfer *g,
                                      const gmm__ck_scales *scales, const gmm_ckpt_tensor *codes, int half,
                                      int64_t index) {
    const gmm__ck_row_tensors *h = &scales->of[GMM_CKPT_SCALE][half];
    const gmm_ckpt_row *row = g->weight[half].row;
    const int64_t part_experts = gmm__ck_part_experts(b, x), part = index / part_experts;
    const gmm_ckpt_rank *rank = &b->parts[part].rank;
    gmm__ck_quantized q;
    uint32_t dtypes;
    int kind, beside = 0;
    char shapes[200], names[64];
    int32_t s;
    if (!h->row) return gmm__ck_refuse(b, GMM_CKPT_SCALE_MISSING, codes->name, "the source lacks its scales");
    s = h->tensor[part * part_experts + (h->row->form == GMM_CKPT_EACH ? index % part_experts : 0)];
    if (s < 0) return gmm__ck_refuse(b, GMM_CKPT_SCALE_MISSING, codes->name, "its scales are missing");
    memset(&q, 0, sizeof q);
    q.row = h->row;
    q.codes = codes;
    q.scale = &b->parts[part].table->tensors[s];
    q.experts = part_experts;
    q.packed = gmm__ck_is_packed(codes->dtype);
    q.dims = x->dims;
    q.alike = row->form != GMM_CKPT_EACH && h->row->form != GMM_CKPT_EACH &&
              codes->rank == gmm__ck_dimensions(row, x->dims);
    q.cols = gmm__ck_part_cols(b, x);
    q.rows = x->f / (x->rows_sharded ? rank->etp_size : 1) * (half == GMM_CKPT_BOTH ? x->halves : 1);
    if (gmm__ck_is_gtp_sharded(b, x)) { /* the rows of one rank */
        const int32_t dims = gmm__ck_dimensions(row, x->dims);
        const int own = row->form == GMM_CKPT_EACH || codes->rank > dims;
        q.rows = codes->rank < dims ? 0 : codes->shape[codes->rank - dims] / (own ? 1 : part_experts);
    }
    g->format = gmm__ck_find_format(&q, &g->scale_dims, &dtypes, shapes, sizeof shapes);
    if (!g->format && !(dtypes >> q.scale->dtype & 1))
        return gmm__ck_refuse(b, GMM_CKPT_DTYPE, q.scale->name, "scales of %s codes must be %s, not %s",
                              gmm_dtype_name(codes->dtype), gmm__ck_dtype_names(dtypes, names, sizeof names),
                              gmm_dtype_name(q.scale->dtype));
    if (!g->format) {
        char actual[160];
        gmm__ck_shape_text(actual, sizeof actual, q.scale->rank, q.scale->shape);
        return gmm__ck_refuse(b, GMM_CKPT_SHAPE, q.scale->name, "its shape %s is not that of the %s scales of %lld x "
                              "%lld codes%s: %s", actual, gmm_dtype_name(q.scale->dtype), (long long)q.rows,
                              (long long)q.cols, h->row->form == GMM_CKPT_EACH ? "" : " of each expert", shapes);
    }
    for (kind = GMM_CKPT_TENSOR_SCALE; kind < GMM_CKPT_KIND_COUNT; kind++) {
        const gmm__ck_row_tensors *of = scales->of[kind];
        if (g->format->beside >> kind & 1) beside |= of[0].row || of[1].row || of[2].row;
        else gmm__ck_mark_scales(b, x, of, GMM__CK_PLAIN_SCALE);
    }
    if (g->format->needs_beside && !beside)
        return gmm__ck_refuse(b, GMM_CKPT_SCALE_MISSING, codes->name, "the source lacks its tensor scale or amax: %s "
                              "has one beside its scales", gmm_scaling_name(g->format->scaling));
    return GMM_OK;
}

/* Refuses a boundary at row or column `at` of `extent` that is no multiple of `block`. `unit` > 0 is GTP's. */
static gmm_status gmm__ck_check_boundary(gmm__ck_builder *b, const gmm__ck_transfer *g, const char *what,
                                         const char *line, int64_t at, int64_t block, int64_t extent, int64_t unit) {
    const int64_t first = block ? at / block * block : 0;
    char rule[100] = "";
    if (at >= extent || at <= 0 || (block && at % block == 0)) return GMM_OK;
    if (unit)
        (void)snprintf(rule, sizeof rule, ": GTP's unit of %s is %lld rows", gmm_scaling_name(g->format->scaling),
                       (long long)unit);
    return gmm__ck_refuse(b, GMM_CKPT_NOT_DIVISIBLE, g->codes, "%s, %s %lld, cuts the block of %ss %lld to %lld (%s)%s",
                          what, line, (long long)at, line, (long long)first,
                          (long long)gmm__min_i64(first + (block ? block : extent), extent) - 1,
                          gmm_scaling_name(g->format->scaling), rule);
}

/* Checks that GTP's boundaries fall between blocks, in the source and in the target. */
static gmm_status gmm__ck_check_cut(gmm__ck_builder *b, const gmm__ck_array *x, const gmm__ck_transfer *g) {
    const int64_t unit = g->format->gtp_rows, part_experts = gmm__ck_part_experts(b, x);
    const int64_t rows = x->f * x->halves / (x->rows_sharded ? b->target.rank.etp_size : 1);
    const int64_t src_rows = x->f * x->halves / (x->rows_sharded ? b->parts[0].rank.etp_size : 1);
    gmm_status status = GMM_OK;
    char what[80];
    int32_t p;
    if (g->cut && x->gtp_sharded) {
        status = gmm__ck_check_boundary(b, g, "cuts: row0", "row", g->cut->row0, unit, rows, unit);
        if (!status && g->cut->row0 >= 0 && g->cut->row0 <= rows && g->cut->rows <= rows - g->cut->row0)
            status = gmm__ck_check_boundary(b, g, "cuts: row0 + rows", "row", g->cut->row0 + g->cut->rows, unit, rows,
                                            unit);
    }
    for (p = 0; !status && gmm__ck_is_gtp_sharded(b, x) && p < b->source.part_count; p++) {
        const gmm_ckpt_rank *rank = &b->parts[p].rank;
        const int half = g->weight[GMM_CKPT_BOTH].row ? GMM_CKPT_BOTH : GMM_CKPT_GATE;
        gmm__ck_shard shard;
        if (g->weight[half].tensor[p * part_experts] < 0) continue;
        status = gmm__ck_source_shard(b, x, g, half, p, rank->ep_rank * part_experts, &shard);
        (void)snprintf(what, sizeof what, "the start of the source's GTP rank %d", (int)rank->gtp_rank);
        if (!status) status = gmm__ck_check_boundary(b, g, what, "row", shard.row0, unit, src_rows, unit);
    }
    return status;
}

/* Checks that no boundary cuts a block: those of ranks, of gate and up rows, and of their blocks. */
static gmm_status gmm__ck_check_blocks(gmm__ck_builder *b, const gmm__ck_array *x, const gmm__ck_transfer *g) {
    const gmm_ckpt_rank *ranks[2];
    const int64_t glu[2] = {g->src_block, g->dst_block};
    const int fused = x->halves == 2 && (g->weight[GMM_CKPT_BOTH].row ||
                                         gmm__ck_target_row(b, x, GMM_CKPT_BOTH, 0, g->blocks, NULL));
    int64_t br, bc;
    gmm_status status = GMM_OK;
    char what[100];
    int i;
    gmm__ck_block_of(g->format->scaling, &br, &bc);
    ranks[0] = &b->parts[0].rank;
    ranks[1] = &b->target.rank;
    for (i = 0; !status && i < 2; i++) {
        const char *side = i ? "target" : "source";
        const int64_t etp = x->rows_sharded || x->cols_sharded ? ranks[i]->etp_size : 1;
        (void)snprintf(what, sizeof what, "the end of the %s's ETP rank 0 of %lld", side, (long long)etp);
        if (etp > 1 && x->rows_sharded && br)
            status = gmm__ck_check_boundary(b, g, what, "row", x->f / etp, br, x->f, 0);
        if (!status && etp > 1 && x->cols_sharded && bc)
            status = gmm__ck_check_boundary(b, g, what, "column", x->k / etp, bc, x->k, 0);
        (void)snprintf(what, sizeof what, "the end of the %s's first block of gate rows", side);
        if (!status && x->halves == 2 && glu[i] && br)
            status = gmm__ck_check_boundary(b, g, what, "row", glu[i], br, 2 * x->f, 0);
    }
    if (!status && fused && br)
        status = gmm__ck_check_boundary(b, g, "the end of the gate rows", "row", x->f, br, 2 * x->f, 0);
    return status ? status : gmm__ck_check_cut(b, x, g);
}

/* The ETP rank whose scales a target takes where ETP cuts weights inside blocks, as it does within a row or a matrix.
   Several ranks of the source may have one each: *joined is then 1. */
static gmm_status gmm__ck_choose_etp(gmm__ck_builder *b, const gmm__ck_array *x, const gmm__ck_transfer *g,
                                     int32_t *part, int *joined) {
    const int64_t from = b->parts[0].rank.etp_size, to = b->target.rank.etp_size, rank = b->target.rank.etp_rank;
    const int64_t first = rank * from / to, last = gmm__ceil_div((rank + 1) * from, to) - 1;
    *part = (int32_t)first;
    *joined = first != last;
    if (!*joined || b->source.equal_scales) return GMM_OK;
    return gmm__ck_refuse(b, GMM_CKPT_NOT_DIVISIBLE, g->codes, "the source's ETP rank %lld begins at %s %lld inside a "
                          "block (%s), and every rank has a scale of the block: state equal_scales if they are equal",
                          (long long)first + 1, x->cols_sharded ? "column" : "row",
                          (long long)((first + 1) * ((x->cols_sharded ? x->k : x->f) / from)),
                          gmm_scaling_name(g->format->scaling));
}

/* The dimensions with which single values of matrices are stored: those of the first tensor, less the experts'. */
static int32_t gmm__ck_single_dims(const gmm__ck_builder *b, const gmm__ck_array *x,
                                   const gmm__ck_row_tensors *tensors) {
    const int64_t count = b->source.part_count * gmm__ck_part_experts(b, x);
    int64_t i;
    int h;
    for (h = 0; h < 3; h++)
        for (i = 0; tensors[h].row && i < count; i++)
            if (tensors[h].tensor[i] >= 0) {
                const int32_t part = (int32_t)(i / gmm__ck_part_experts(b, x));
                const int32_t rank = b->parts[part].table->tensors[tensors[h].tensor[i]].rank;
                const int32_t dims = rank - (tensors[h].row->form != GMM_CKPT_EACH ? 1 : 0);
                return dims < 0 ? 0 : dims > 2 ? 2 : dims;
            }
    return 1;
}

/* Plans the scales of one kind; `x` and `g` are of their weights. */
static gmm_status gmm__ck_plan_scales(gmm__ck_builder *b, gmm__ck_array x, gmm__ck_transfer g, gmm_ckpt_kind kind,
                                      gmm__ck_row_tensors *tensors) {
    int64_t br = 0, bc = 0;
    int half, joined = 0;
    gmm_status status = GMM_OK;
    if (kind == GMM_CKPT_SCALE) gmm__ck_block_of(g.format->scaling, &br, &bc);
    for (half = 0; half < 3; half++)
        if (g.weight[half].row && !tensors[half].row)
            return gmm__ck_refuse(b, GMM_CKPT_SCALE_MISSING, g.codes, "the source has %s of one of gate and up alone",
                                  kind == GMM_CKPT_SCALE ? "scales" : kind == GMM_CKPT_AMAX ? "an amax"
                                                                                            : "a tensor scale");
    if ((x.rows_sharded && !br) || (x.cols_sharded && !bc)) status = gmm__ck_choose_etp(b, &x, &g, &x.etp_part,
                                                                                      &joined);
    if (status) return status;
    x.kind = kind;
    x.dims = g.scale_dims;
    x.f = br ? gmm__ceil_div(x.f, br) : 1;
    x.k = bc ? gmm__ceil_div(x.k, bc) : 1;
    x.rows_sharded &= br != 0;
    x.cols_sharded &= bc != 0;
    g.weight = tensors;
    g.dtypes = g.format->scales;
    g.column_codes = 1;
    g.shape_cols = x.k;
    g.src_block /= br ? br : 1;
    g.dst_block /= br ? br : 1;
    g.cut_unit = br;
    if (!br) {
        x.single = 1;
        x.halves = 1;
        x.gtp_sharded = 0;
    }
    if (kind != GMM_CKPT_SCALE) {
        g.dtypes = 1u << GMM_F32;
        x.dims = gmm__ck_single_dims(b, &x, tensors);
    }
    if (x.single && tensors[GMM_CKPT_GATE].row &&
        gmm__ck_target_row(b, &x, GMM_CKPT_BOTH, g.grouped, g.blocks, NULL)) {
        joined = 1;
        if (!b->source.equal_scales)
            return gmm__ck_refuse(b, GMM_CKPT_NOT_DIVISIBLE, g.codes, "the gate rows end at row %lld inside a block "
                                  "(%s) of the target, and gate and up have a scale each: state equal_scales if they "
                                  "are equal", (long long)(x.linear->out / 2), gmm_scaling_name(g.format->scaling));
    }
    if (joined && kind == GMM_CKPT_AMAX && !g.format->needs_beside) { /* scales may be equal though amaxes are not */
        gmm__ck_mark_scales(b, &x, tensors, GMM__CK_DROPPED);
        return GMM_OK;
    }
    return gmm__ck_plan_array(b, &x, &g);
}

/* Plans quantized weights that stay quantized, and then their scales. */
static gmm_status gmm__ck_plan_quantized(gmm__ck_builder *b, gmm__ck_array x, gmm__ck_transfer g,
                                         gmm__ck_scales *scales) {
    gmm__ck_array codes;
    gmm_status status;
    int kind;
    if (x.halves == 2 && g.weight[GMM_CKPT_BOTH].row && g.src_block == g.dst_block &&
        gmm__ck_target_row(b, &x, GMM_CKPT_BOTH, g.grouped, g.blocks, NULL) &&
        !(x.rows_sharded && (b->parts[0].rank.etp_size > 1 || b->target.rank.etp_size > 1))) {
        x.halves = 1; /* gate and up rows keep their order: blocks may span their boundary */
        x.f *= 2;
        g.src_block = g.dst_block = 0;
    }
    status = gmm__ck_check_blocks(b, &x, &g);
    if (status) return status;
    codes = x;
    if (g.format->packed) codes.k /= 2; /* bytes */
    status = gmm__ck_plan_array(b, &codes, &g);
    for (kind = GMM_CKPT_SCALE; !status && kind < GMM_CKPT_KIND_COUNT; kind++) {
        gmm__ck_row_tensors *of = scales->of[kind];
        if (kind != GMM_CKPT_SCALE && (!(g.format->beside >> kind & 1) || (!of[0].row && !of[1].row && !of[2].row)))
            continue;
        status = gmm__ck_plan_scales(b, x, g, (gmm_ckpt_kind)kind, of);
    }
    return status;
}

/* Plans the biases of one linear in one state; `g` is the transfer of its weights, with the dtype of biases. */
static gmm_status gmm__ck_plan_bias(gmm__ck_builder *b, const gmm_ckpt_linear *l, gmm__ck_transfer g,
                                    gmm__ck_match *matches, int64_t count) {
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
    g.format = NULL;
    g.cut = NULL;
    g.blocks = 0;
    g.column_codes = 1;
    g.grouped = l->grouped_bias;
    g.shape_cols = 1;
    return gmm__ck_plan_array(b, &x, &g);
}

/* Sorts the scales of one linear and state by kind and half, finds the format of its weights and completes the transfer
   of the weights. */
static gmm_status gmm__ck_plan_weights(gmm__ck_builder *b, gmm__ck_array *x, gmm__ck_transfer *g,
                                       gmm__ck_match *matches, const int64_t *n) {
    const gmm_ckpt_row *row = NULL;
    const gmm_ckpt_tensor *codes;
    gmm__ck_scales scales;
    gmm__ck_match *next = matches + n[GMM_CKPT_WEIGHT] + n[GMM_CKPT_BIAS];
    int64_t index = 0;
    int half = 0, kind;
    gmm_status status = GMM_OK;
    memset(&scales, 0, sizeof scales);
    for (kind = GMM_CKPT_SCALE; !status && kind < GMM_CKPT_KIND_COUNT; next += n[kind++]) {
        x->kind = (gmm_ckpt_kind)kind;
        status = gmm__ck_group_matches(b, x, next, n[kind], g->grouped, scales.of[kind]);
        gmm__ck_mark_plain_scales(b, x, g->weight, scales.of[kind]);
    }
    x->kind = GMM_CKPT_WEIGHT;
    if (status) return status;
    codes = gmm__ck_first_codes(b, x, g->weight, &half, &index);
    if (!codes || !gmm__ck_find_row(b->source.scheme, x->linear, GMM_CKPT_SCALE, &row))
        return gmm__ck_plan_array(b, x, g);
    g->codes = codes->name;
    g->blocks = g->weight[half].row->scaling == GMM_SCALING_MX32;
    if (gmm__ck_is_packed(codes->dtype) && gmm__ck_part_cols(b, x) % (g->blocks ? 32 : 2))
        return gmm__ck_refuse(b, GMM_CKPT_NOT_DIVISIBLE, codes->name, "its rows of %lld codes are no whole %s",
                              (long long)gmm__ck_part_cols(b, x), g->blocks ? "blocks of 32" : "bytes of 2");
    if (gmm__ck_is_packed(codes->dtype) && g->weight[half].row->transposed)
        return gmm__ck_refuse(b, GMM_CKPT_SHAPE, codes->name, "two codes per byte cannot be stored in x out");
    if (codes->dtype == GMM_U8 && !g->blocks) g->shape_cols = x->k / 2;
    status = gmm__ck_read_format(b, x, g, &scales, codes, half, index);
    if (status) return status;
    if (g->dtype == GMM_NONE) {
        if (codes->dtype != GMM_U8 && g->format->packed) g->column_codes = 2;
        if (g->blocks) g->column_codes = 2;
        return gmm__ck_plan_quantized(b, *x, *g, &scales);
    }
    if (!g->format->dequantized)
        return gmm__ck_refuse(b, GMM_CKPT_DTYPE, codes->name, "codes of %s cannot become %s here: keep them quantized",
                              gmm_scaling_name(g->format->scaling), gmm_dtype_name(g->dtype));
    for (kind = GMM_CKPT_TENSOR_SCALE; kind < GMM_CKPT_KIND_COUNT; kind++)
        if (g->format->beside >> kind & 1) gmm__ck_mark_scales(b, x, scales.of[kind], GMM__CK_DROPPED);
    g->scale = scales.of[GMM_CKPT_SCALE];
    g->blocks = 0;
    return gmm__ck_plan_array(b, x, g);
}

/* Plans one linear in one state. */
static gmm_status gmm__ck_plan_state(gmm__ck_builder *b, int64_t index, int32_t state, gmm__ck_match *matches,
                                     int64_t count) {
    const gmm_ckpt_linear *l = &b->linears[index];
    const int converted = !*b->states[state] && l->slot != GMM_CKPT_ROUTER && l->slot != GMM_CKPT_ROUTER_CORRECTION &&
                          l->slot != GMM_CKPT_SHARED_GATE;
    const gmm_ckpt_row *row = NULL;
    gmm__ck_row_tensors weight[3];
    gmm__ck_transfer g;
    gmm__ck_array x = gmm__ck_make_array(l, GMM_CKPT_WEIGHT);
    int64_t n[GMM_CKPT_KIND_COUNT], i;
    gmm_status status = gmm__ck_check_wrappers(b, matches, count);
    if (status) return status;
    memset(&g, 0, sizeof g);
    memset(n, 0, sizeof n);
    for (i = 0; i < count; i++) n[matches[i].kind]++;
    if (count) g.key = gmm__ck_match_key(b, &matches[0]);
    else if (b->source.skip_missing) return GMM_OK;
    if (n[GMM_CKPT_WEIGHT] == 0) {
        if (!gmm__ck_find_row(b->source.scheme, l, GMM_CKPT_WEIGHT, &row))
            return gmm__ck_refuse(b, GMM_CKPT_ARGUMENT, l->path, "linears: the scheme %s has no slot %d",
                                  b->source.scheme->name, (int)l->slot);
        return gmm__ck_refuse_missing_tensor(b, &x, row, state, 0);
    }
    status = gmm__ck_check_experts(b, &x);
    if (!status) status = gmm__ck_group_matches(b, &x, matches, n[GMM_CKPT_WEIGHT], l->grouped_weight, weight);
    if (!status) status = gmm__ck_check_halves(b, &x, weight);
    if (!status) status = gmm__ck_glu_blocks(b, l, weight, &g.src_block, &g.dst_block);
    if (!status) status = gmm__ck_check_extents(b, &x, &g);
    if (status) return status;
    g.weight = weight;
    g.presence = weight;
    g.state = state;
    g.grouped = l->grouped_weight;
    g.shape_cols = x.k;
    g.column_codes = 1;
    g.cut = b->target.cuts ? &b->target.cuts[index] : NULL;
    g.cut_unit = 1;
    if (converted) g.dtype = b->target.dtype;
    status = gmm__ck_plan_weights(b, &x, &g, matches, n);
    if (status || !l->bias) return status;
    g.dtype = converted ? b->target.bias_dtype : GMM_NONE;
    return gmm__ck_plan_bias(b, l, g, matches + n[GMM_CKPT_WEIGHT], n[GMM_CKPT_BIAS]);
}

static gmm_status gmm__ck_plan_linears(gmm__ck_builder *b) {
    int64_t match = 0, i;
    int32_t s;
    for (i = 0; i < b->linear_count; i++) {
        int64_t end = match;
        while (end < b->match_count && b->matches[end].linear == i) end++;
        if (match == end && b->source.skip_missing) continue;
        for (s = 0; s < b->source.state_count; s++) {
            const int64_t begin = match;
            gmm_status status;
            while (match < end && b->matches[match].state == s) match++;
            if (!b->state_present[s]) continue;
            status = gmm__ck_plan_state(b, i, s, begin < match ? b->matches + begin : NULL, match - begin);
            if (status) return status;
        }
    }
    return GMM_OK;
}

