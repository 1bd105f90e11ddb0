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
    if (!known.known && (*dst_block || b->parts[0].rank.etp_size > 1 || t->rank.etp_size > 1 ||
                         !gmm__ck_target_row(b, &probe, GMM_CKPT_BOTH, 0, 0)))
        return gmm__ck_refuse(b, GMM_CKPT_GLU_UNKNOWN, key, "gate and up rows of layer %lld would move, but nothing "
                              "says whether the source has them as halves or in blocks: state it",
                              (long long)l->layer);
    *src_block = known.block;
    return GMM_OK;
}

/* Marks scales whose weights are not quantized: they are extra. */
static void gmm__ck_mark_plain_scales(gmm__ck_builder *b, int64_t part_experts, const gmm__ck_row_tensors *weight,
                                      const gmm__ck_row_tensors *scale) {
    int64_t i, e;
    int h;
    for (h = 0; h < 3; h++)
        for (i = 0; weight[h].row && scale[h].row && i < b->source.part_count * part_experts; i++) {
            const int64_t part = i / part_experts, first = scale[h].row->form == GMM_CKPT_EACH ? i % part_experts : 0;
            const int64_t end = scale[h].row->form == GMM_CKPT_EACH ? first + 1 : part_experts;
            int plain = 0, quantized = weight[h].row->scaling == GMM_SCALING_MX32;
            for (e = first; e < end; e++) {
                const int32_t t =
                    weight[h].tensor[part * part_experts + (weight[h].row->form == GMM_CKPT_EACH ? e : 0)];
                const gmm_dtype dtype = t < 0 ? GMM_NONE : b->parts[part].table->tensors[t].dtype;
                plain |= t >= 0;
                quantized |= dtype == GMM_E4M3 || dtype == GMM_E5M2;
            }
            if (plain && !quantized && scale[h].tensor[i] >= 0)
                b->uses[part][scale[h].tensor[i]] = GMM__CK_PLAIN_SCALE;
        }
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

/* Checks that EP, ETP and the blocks of gate and up rows divide a weight on both sides. */
static gmm_status gmm__ck_check_extents(gmm__ck_builder *b, const gmm__ck_array *x, const gmm__ck_transfer *g) {
    const gmm_ckpt_linear *l = x->linear;
    const gmm_ckpt_rank *ranks[2];
    const int64_t blocks[2] = {g->src_block, x->halves == 2 ? g->dst_block : 0};
    gmm_status status = GMM_OK;
    int i;
    ranks[0] = &b->parts[0].rank;
    ranks[1] = &b->target.rank;
    for (i = 0; !status && x->grouped && i < 2; i++)
        status = gmm__ck_check_multiple(b, l, x->experts, ranks[i]->ep_size, "experts", "EP");
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

/* Whether any weight is quantized. *last is the last weight tensor of the source. */
static int gmm__ck_is_quantized(const gmm__ck_builder *b, const gmm__ck_array *x, const gmm__ck_row_tensors *weight,
                                const gmm_ckpt_tensor **last) {
    const int64_t part_experts = gmm__ck_part_experts(b, x);
    int quantized = 0, half;
    int64_t i;
    for (i = 0; i < b->source.part_count * part_experts; i++)
        for (half = 0; half < 3; half++) {
            if (!weight[half].row || weight[half].tensor[i] < 0) continue;
            *last = &b->parts[i / part_experts].table->tensors[weight[half].tensor[i]];
            quantized |= weight[half].row->scaling == GMM_SCALING_MX32 || (*last)->dtype == GMM_E4M3 ||
                         (*last)->dtype == GMM_E5M2;
        }
    return quantized;
}

/* Checks that no rank's shard and no gate or up block cuts a block of br x bc scaled elements. */
static gmm_status gmm__ck_check_scale_blocks(gmm__ck_builder *b, const gmm__ck_array *x, const gmm__ck_transfer *g,
                                             int64_t br, int64_t bc) {
    static const char unit[] = "scale blocks of";
    const gmm_ckpt_linear *l = x->linear;
    const int64_t src_etp = gmm__ck_etp_size(x, &b->parts[0].rank), dst_etp = gmm__ck_etp_size(x, &b->target.rank);
    const int fused = x->halves == 2 && (g->weight[GMM_CKPT_BOTH].row ||
                                         gmm__ck_target_row(b, x, GMM_CKPT_BOTH, 0, g->blocks));
    gmm_status status;
    if (!fused && src_etp <= 1 && dst_etp <= 1 && !g->cut && !gmm__ck_is_gtp_sharded(b, x)) return GMM_OK;
    status = gmm__ck_check_multiple(b, l, x->f / (x->rows_sharded ? src_etp : 1), br, "rows", unit);
    if (!status) status = gmm__ck_check_multiple(b, l, x->f / (x->rows_sharded ? dst_etp : 1), br, "rows", unit);
    if (!status && x->cols_sharded) status = gmm__ck_check_multiple(b, l, x->k / src_etp, bc, "columns", unit);
    if (!status && x->cols_sharded) status = gmm__ck_check_multiple(b, l, x->k / dst_etp, bc, "columns", unit);
    if (!status && g->src_block) status = gmm__ck_check_multiple(b, l, g->src_block, br, "the block", unit);
    if (!status && g->dst_block) status = gmm__ck_check_multiple(b, l, g->dst_block, br, "the block", unit);
    return status;
}

/* Plans quantized weights that stay quantized, and their scales, with the same moves for both. `last` names the weight
   in the message about missing scales. */
static gmm_status gmm__ck_plan_quantized(gmm__ck_builder *b, gmm__ck_array x, gmm__ck_transfer g,
                                         gmm__ck_row_tensors *scale, int mx, const gmm_ckpt_tensor *last) {
    const int64_t br = mx ? 1 : 128, bc = mx ? 32 : 128;
    gmm_status status;
    int half;
    for (half = 0; half < 3; half++)
        if (g.weight[half].row && !scale[half].row)
            return gmm__ck_refuse(b, GMM_CKPT_SCALE_MISSING, last->name, "the source lacks its scales");
    g.blocks = mx;
    if (mx) x.k /= 2; /* bytes of two 4-bit elements */
    status = gmm__ck_plan_array(b, &x, &g);
    if (mx) x.k *= 2;
    if (!status) status = gmm__ck_check_scale_blocks(b, &x, &g, br, bc);
    if (status) return status;
    x.kind = GMM_CKPT_SCALE;
    x.f = gmm__ceil_div(x.f, br);
    x.k = gmm__ceil_div(x.k, bc);
    g.weight = scale;
    g.src_block /= br;
    g.dst_block /= br;
    g.shape_cols = x.k;
    g.cut_unit = br;
    return gmm__ck_plan_array(b, &x, &g);
}

/* Plans the biases of one linear in one state; `g` is the transfer of its weights. */
static gmm_status gmm__ck_plan_bias(gmm__ck_builder *b, const gmm_ckpt_linear *l, gmm__ck_transfer g,
                                    gmm__ck_match *matches, int64_t count, gmm_dtype dtype) {
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
    g.cut = NULL;
    g.blocks = 0;
    g.grouped = l->grouped_bias;
    g.shape_cols = 1;
    g.dtype = dtype;
    return gmm__ck_plan_array(b, &x, &g);
}

/* Plans one linear in one state. */
static gmm_status gmm__ck_plan_state(gmm__ck_builder *b, int64_t index, int32_t state, gmm__ck_match *matches,
                                     int64_t count) {
    const gmm_ckpt_linear *l = &b->linears[index];
    const int converted = state == 0 && l->slot != GMM_CKPT_ROUTER && l->slot != GMM_CKPT_ROUTER_CORRECTION &&
                          l->slot != GMM_CKPT_SHARED_GATE;
    const gmm_ckpt_row *row = NULL;
    const gmm_ckpt_tensor *last = NULL;
    gmm__ck_row_tensors weight[3], scale[3];
    gmm__ck_transfer g;
    gmm__ck_array x = gmm__ck_make_array(l, GMM_CKPT_WEIGHT);
    int64_t n[3] = {0, 0, 0}, i;
    int quantized, mx;
    gmm_status status = gmm__ck_check_wrappers(b, matches, count);
    if (status) return status;
    memset(&g, 0, sizeof g);
    for (i = 0; i < count; i++) n[matches[i].kind]++;
    if (count) g.key = gmm__ck_match_key(b, &matches[0]);
    else if (b->source.skip_missing) return GMM_OK;
    if (n[GMM_CKPT_WEIGHT] == 0) {
        if (!gmm__ck_find_row(b->source.scheme, l, GMM_CKPT_WEIGHT, &row))
            return gmm__ck_refuse(b, GMM_CKPT_ARGUMENT, l->path, "linears: the scheme %s has no slot %d",
                                  b->source.scheme->name, (int)l->slot);
        return gmm__ck_refuse_missing_tensor(b, &x, row, state, 0);
    }
    status = gmm__ck_group_matches(b, &x, matches, n[GMM_CKPT_WEIGHT], l->grouped_weight, weight);
    if (!status) status = gmm__ck_check_halves(b, &x, weight);
    if (!status) status = gmm__ck_glu_blocks(b, l, weight, &g.src_block, &g.dst_block);
    if (!status) status = gmm__ck_check_extents(b, &x, &g);
    if (status) return status;

    for (i = 0; i < 3 && !weight[i].row; i++) {}
    mx = weight[i].row->scaling == GMM_SCALING_MX32;
    quantized = gmm__ck_is_quantized(b, &x, weight, &last) &&
                gmm__ck_find_row(b->source.scheme, l, GMM_CKPT_SCALE, &row);
    x.kind = GMM_CKPT_SCALE;
    status = gmm__ck_group_matches(b, &x, matches + n[GMM_CKPT_WEIGHT] + n[GMM_CKPT_BIAS], n[GMM_CKPT_SCALE],
                                   l->grouped_weight, scale);
    x.kind = GMM_CKPT_WEIGHT;
    if (status) return status;
    gmm__ck_mark_plain_scales(b, gmm__ck_part_experts(b, &x), weight, scale);
    if (mx) {
        const int64_t src_etp = x.cols_sharded ? b->parts[0].rank.etp_size : 1;
        const int64_t dst_etp = x.cols_sharded ? b->target.rank.etp_size : 1;
        status = gmm__ck_check_multiple(b, l, x.k / src_etp, 32, "in", "MX32 blocks of");
        if (!status) status = gmm__ck_check_multiple(b, l, x.k / dst_etp, 32, "in", "MX32 blocks of");
        if (status) return status;
    }
    g.weight = weight;
    g.presence = weight;
    g.state = state;
    g.grouped = l->grouped_weight;
    g.shape_cols = x.k;
    g.cut = b->target.cuts ? &b->target.cuts[index] : NULL;
    g.cut_unit = 1;
    if (converted) g.dtype = b->target.dtype;
    if (quantized && g.dtype != GMM_NONE) g.scale = scale;
    status = quantized && g.dtype == GMM_NONE ? gmm__ck_plan_quantized(b, x, g, scale, mx, last)
                                              : gmm__ck_plan_array(b, &x, &g);
    if (status || !l->bias) return status;
    return gmm__ck_plan_bias(b, l, g, matches + n[GMM_CKPT_WEIGHT], n[GMM_CKPT_BIAS],
                             converted ? b->target.bias_dtype : GMM_NONE);
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
            if (!b->state_present[s] && s > 0) continue;
            status = gmm__ck_plan_state(b, i, s, begin < match ? b->matches + begin : NULL, match - begin);
            if (status) return status;
        }
    }
    return GMM_OK;
}

