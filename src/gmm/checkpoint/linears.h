/* .............................................................................................. 15.7 Building ... */

static int gmm__ck_has_row(const gmm_ckpt_scheme *scheme, const gmm_ckpt_linear *l, gmm_ckpt_kind kind,
                           const gmm_ckpt_row **row) {
    int32_t i;
    for (i = 0; i < scheme->count; i++) {
        const gmm_ckpt_row *r = &scheme->rows[i];
        if (r->kind != kind || (r->slot != l->slot && (r->slot != GMM_CKPT_SLOT_ANY || !l->path))) continue;
        *row = r;
        return 1;
    }
    return 0;
}

static gmm_status gmm__ck_divides(gmm__ck_build *b, const gmm_ckpt_linear *l, int64_t extent, int64_t by,
                                  const char *what, const char *unit) {
    if (by > 0 && extent % by == 0) return GMM_OK;
    return gmm__ck_refuse(b, GMM_CKPT_NOT_DIVISIBLE, l->path, "slot %d of layer %lld: %s %lld is no multiple of %s "
                          "%lld", (int)l->slot, (long long)l->layer, what, (long long)extent, unit, (long long)by);
}

/* Blocks of gate and up rows on both sides of a gated FC1. */
static gmm_status gmm__ck_blocks(gmm__ck_build *b, const gmm_ckpt_linear *l, const gmm__ck_holder *weight,
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
    if (!weight[GMM_CKPT_BOTH].row) return GMM_OK; /* gate and up come by themselves */
    if (s->scheme->glu_known) {
        if (known.known && known.block != s->scheme->glu_block)
            return gmm__ck_refuse(b, GMM_CKPT_GLU_CONFLICT, key, "gate and up rows: blocks of %d are stated or "
                                  "recorded, the scheme %s has %d (0 = halves)", (int)known.block, s->scheme->name,
                                  (int)s->scheme->glu_block);
        known.known = 1;
        known.block = s->scheme->glu_block;
    }
    if (known.block < 0)
        return gmm__ck_refuse(b, GMM_CKPT_NOT_DIVISIBLE, key, "gate and up rows: blocks of %d", (int)known.block);
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

/* Scales whose weights are not quantized are extra. */
static void gmm__ck_plain(gmm__ck_build *b, int64_t each, const gmm__ck_holder *weight, const gmm__ck_holder *scale) {
    int64_t i, e;
    int h;
    for (h = 0; h < 3; h++)
        for (i = 0; weight[h].row && scale[h].row && i < b->source.part_count * each; i++) {
            const int64_t part = i / each, first = scale[h].row->form == GMM_CKPT_EACH ? i % each : 0;
            const int64_t end = scale[h].row->form == GMM_CKPT_EACH ? first + 1 : each;
            int plain = 0, quantized = weight[h].row->scaling == GMM_SCALING_MX32;
            for (e = first; e < end; e++) {
                const int32_t t = weight[h].tensor[part * each + (weight[h].row->form == GMM_CKPT_EACH ? e : 0)];
                const gmm_dtype dtype = t < 0 ? GMM_NONE : b->parts[part].table->tensors[t].dtype;
                plain |= t >= 0;
                quantized |= dtype == GMM_E4M3 || dtype == GMM_E5M2;
            }
            if (plain && !quantized && scale[h].tensor[i] >= 0)
                b->used[part][scale[h].tensor[i]] = GMM__CK_PLAIN_SCALE;
        }
}

/* Plans one linear in one state. */
static gmm_status gmm__ck_plan_state(gmm__ck_build *b, int64_t index, int32_t state, gmm__ck_hit *hits, int64_t count) {
    static const int8_t grouped[] = {
#define GMM__X(name, value, text, grouped, rows, cols) grouped,
        GMM_CKPT_SLOT_LIST(GMM__X)
#undef GMM__X
    };
    static const int8_t cuts[][2] = {
#define GMM__X(name, value, text, grouped, rows, cols) {rows, cols},
        GMM_CKPT_SLOT_LIST(GMM__X)
#undef GMM__X
    };
    const gmm_ckpt_linear *l = &b->linears[index];
    const int experts_own = l->slot != GMM_CKPT_ROUTER && l->slot != GMM_CKPT_ROUTER_CORRECTION &&
                            l->slot != GMM_CKPT_SHARED_GATE;
    const gmm_ckpt_row *row = NULL;
    gmm__ck_holder weight[3], scale[3];
    gmm__ck_passage g;
    gmm__ck_array x;
    int64_t n[3] = {0, 0, 0}, i, first, src_etp, dst_etp;
    int quantized = 0, mx, joined;
    gmm_status status;
    const gmm_ckpt_tensor *t = NULL;

    memset(&x, 0, sizeof x);
    memset(&g, 0, sizeof g);
    x.linear = l;
    x.kind = GMM_CKPT_WEIGHT;
    x.experts = l->experts;
    x.halves = l->gated ? 2 : 1;
    x.f = l->out / x.halves;
    x.k = l->in ? l->in : 1;
    x.vector = l->in == 0;
    x.grouped = grouped[l->slot];
    x.rows_cut = cuts[l->slot][0];
    x.cols_cut = cuts[l->slot][1];
    src_etp = x.rows_cut || x.cols_cut ? b->parts[0].rank.etp_size : 1;
    dst_etp = x.rows_cut || x.cols_cut ? b->target.rank.etp_size : 1;
    for (i = 0; i < count; i++) n[hits[i].kind]++;
    if (n[GMM_CKPT_WEIGHT] == 0) {
        if (!gmm__ck_has_row(b->source.scheme, l, GMM_CKPT_WEIGHT, &row))
            return gmm__ck_refuse(b, GMM_CKPT_ARGUMENT, l->path, "linears: the scheme %s has no slot %d",
                                  b->source.scheme->name, (int)l->slot);
        return gmm__ck_missing(b, &x, row, state, 0);
    }
    status = gmm__ck_gather(b, &x, hits, n[GMM_CKPT_WEIGHT], l->grouped_weight, weight);
    if (status) return status;
    if (!weight[GMM_CKPT_GATE].row != !weight[GMM_CKPT_UP].row) {
        const int there = weight[GMM_CKPT_GATE].row ? GMM_CKPT_GATE : GMM_CKPT_UP;
        for (i = 0; weight[there].tensor[i] < 0; i++) {}
        t = &b->parts[i / gmm__ck_part_experts(b, &x)].table->tensors[weight[there].tensor[i]];
        return gmm__ck_refuse(b, GMM_CKPT_MISSING_INDEX, t->name, "the source lacks the other of gate and up");
    }
    if (weight[GMM_CKPT_GATE].row && !l->gated)
        return gmm__ck_refuse(b, GMM_CKPT_ARGUMENT, l->path, "linears: gated is 0, but the source has gate and up");
    status = gmm__ck_blocks(b, l, weight, &g.src_block, &g.dst_block);
    if (!status && x.grouped) status = gmm__ck_divides(b, l, x.experts, b->parts[0].rank.ep_size, "experts", "EP");
    if (!status && x.grouped) status = gmm__ck_divides(b, l, x.experts, b->target.rank.ep_size, "experts", "EP");
    if (!status) status = gmm__ck_divides(b, l, x.rows_cut ? x.f : x.k, src_etp, "the cut extent", "ETP");
    if (!status) status = gmm__ck_divides(b, l, x.rows_cut ? x.f : x.k, dst_etp, "the cut extent", "ETP");
    if (!status && g.src_block)
        status = gmm__ck_divides(b, l, x.f / (x.rows_cut ? src_etp : 1), g.src_block, "a rank's gate rows",
                                 "the source's block");
    if (!status && g.dst_block && x.halves == 2)
        status = gmm__ck_divides(b, l, x.f / (x.rows_cut ? dst_etp : 1), g.dst_block, "a rank's gate rows",
                                 "the target's block");
    if (status) return status;

    for (i = 0; i < 3 && !weight[i].row; i++) {}
    row = weight[i].row;
    mx = row->scaling == GMM_SCALING_MX32;
    for (first = 0; first < b->source.part_count * gmm__ck_part_experts(b, &x); first++) { /* is anything quantized? */
        int h;
        for (h = 0; h < 3; h++) {
            if (!weight[h].row || weight[h].tensor[first] < 0) continue;
            t = &b->parts[first / gmm__ck_part_experts(b, &x)].table->tensors[weight[h].tensor[first]];
            quantized |= mx || t->dtype == GMM_E4M3 || t->dtype == GMM_E5M2;
        }
    }
    quantized = quantized && gmm__ck_has_row(b->source.scheme, l, GMM_CKPT_SCALE, &row);
    x.kind = GMM_CKPT_SCALE;
    status = gmm__ck_gather(b, &x, hits + n[GMM_CKPT_WEIGHT] + n[GMM_CKPT_BIAS], n[GMM_CKPT_SCALE], l->grouped_weight,
                            scale);
    x.kind = GMM_CKPT_WEIGHT;
    if (status) return status;
    gmm__ck_plain(b, gmm__ck_part_experts(b, &x), weight, scale);
    if (mx) {
        status = gmm__ck_divides(b, l, x.k / (x.cols_cut ? src_etp : 1), 32, "in", "MX32 blocks of");
        if (!status) status = gmm__ck_divides(b, l, x.k / (x.cols_cut ? dst_etp : 1), 32, "in", "MX32 blocks of");
        if (status) return status;
    }
    g.weight = weight;
    g.state = state;
    g.grouped = l->grouped_weight;
    g.shown_cols = x.k;
    g.cut = b->target.cuts ? &b->target.cuts[index] : NULL;
    g.cut_unit = 1;
    if (state == 0 && experts_own) g.dtype = b->target.dtype;
    if (quantized && g.dtype != GMM_NONE) {
        g.scale = scale;
        status = gmm__ck_pass(b, &x, &g);
    } else if (quantized) { /* blocks and scales move alike */
        const int64_t br = mx ? 1 : 128, bc = mx ? 32 : 128;
        for (i = 0; i < 3; i++)
            if (weight[i].row && !scale[i].row)
                return gmm__ck_refuse(b, GMM_CKPT_SCALE_MISSING, t->name, "the source lacks its scales");
        g.blocks = mx;
        if (mx) x.k /= 2;
        status = gmm__ck_pass(b, &x, &g);
        if (mx) x.k *= 2;
        joined = x.halves == 2 && (weight[GMM_CKPT_BOTH].row || gmm__ck_target_row(b, &x, GMM_CKPT_BOTH, 0, mx));
        if (!status && (joined || src_etp > 1 || dst_etp > 1 || g.cut || gmm__ck_is_cut(b, &x))) {
            status = gmm__ck_divides(b, l, x.f / (x.rows_cut ? src_etp : 1), br, "rows", "scale blocks of");
            if (!status) status = gmm__ck_divides(b, l, x.f / (x.rows_cut ? dst_etp : 1), br, "rows",
                                                  "scale blocks of");
            if (!status && x.cols_cut) status = gmm__ck_divides(b, l, x.k / src_etp, bc, "columns", "scale blocks of");
            if (!status && x.cols_cut) status = gmm__ck_divides(b, l, x.k / dst_etp, bc, "columns", "scale blocks of");
            if (!status && g.src_block) status = gmm__ck_divides(b, l, g.src_block, br, "the block", "scale blocks of");
            if (!status && g.dst_block) status = gmm__ck_divides(b, l, g.dst_block, br, "the block", "scale blocks of");
        }
        if (status) return status;
        x.kind = GMM_CKPT_SCALE;
        x.f = gmm__ceil_div(x.f, br);
        x.k = gmm__ceil_div(x.k, bc);
        g.weight = scale;
        g.src_block /= br;
        g.dst_block /= br;
        g.shown_cols = x.k;
        g.cut_unit = br;
        status = gmm__ck_pass(b, &x, &g);
        x.f = l->out / x.halves;
        g.src_block *= br;
        g.dst_block *= br;
    } else {
        status = gmm__ck_pass(b, &x, &g);
    }
    if (status || !l->bias) return status;

    x.kind = GMM_CKPT_BIAS;
    x.k = 1;
    x.vector = 1;
    x.cols_cut = 0;
    g.cut = NULL;
    if (n[GMM_CKPT_BIAS] == 0) {
        if (!gmm__ck_has_row(b->source.scheme, l, GMM_CKPT_BIAS, &row))
            return gmm__ck_refuse(b, GMM_CKPT_ARGUMENT, l->path, "linears: bias is 1, but the scheme %s has none",
                                  b->source.scheme->name);
        return gmm__ck_missing(b, &x, row, state, 0);
    }
    status = gmm__ck_gather(b, &x, hits + n[GMM_CKPT_WEIGHT], n[GMM_CKPT_BIAS], l->grouped_bias, scale);
    if (status) return status;
    g.weight = scale;
    g.scale = NULL;
    g.blocks = 0;
    g.grouped = l->grouped_bias;
    g.shown_cols = 1;
    g.dtype = state == 0 && experts_own ? b->target.bias_dtype : GMM_NONE;
    return gmm__ck_pass(b, &x, &g);
}

static gmm_status gmm__ck_plan_linears(gmm__ck_build *b) {
    int64_t at = 0, i;
    int32_t s;
    uint8_t *present = (uint8_t *)gmm__ck_get(&b->temp, b->source.state_count, 1);
    if (!present) return gmm__ck_no_memory(b);
    for (i = 0; i < b->hit_count; i++) present[b->hits[i].state] = 1;
    if (b->hit_count) qsort(b->hits, (size_t)b->hit_count, sizeof *b->hits, gmm__ck_compare_hits);
    for (i = 0; i < b->linear_count; i++) {
        int64_t end = at;
        while (end < b->hit_count && b->hits[end].linear == i) end++;
        if (at == end && b->source.skip_missing) continue;
        for (s = 0; s < b->source.state_count; s++) {
            const int64_t begin = at;
            gmm_status status;
            while (at < end && b->hits[at].state == s) at++;
            if (!present[s] && s > 0) continue;
            status = gmm__ck_plan_state(b, i, s, begin < at ? b->hits + begin : NULL, at - begin);
            if (status) return status;
        }
    }
    return GMM_OK;
}

