/* ......................................................................................... Runtime: memory plan ... */

static gmm__gtp_weight *gmm__gtp_member(gmm_gtp *g, const gmm__gtp_bundle *b, int32_t i) {
    return &g->weights[g->members[b->first + i]];
}

/* What the slot of a pass holds. */
static int gmm__gtp_class(gmm_gtp *g, const gmm__gtp_bundle *b, int pass) {
    if (pass == GMM_GTP_RECOMPUTE) return GMM__GTP_REC;
    return pass == GMM_GTP_BACKWARD && gmm__gtp_member(g, b, 0)->plan.gather_data_bytes[GMM_COLUMNWISE] > 0
               ? GMM__GTP_COL : GMM__GTP_ROW;
}
static int gmm__gtp_class_direction(int kind) { return kind == GMM__GTP_COL ? GMM_COLUMNWISE : GMM_ROWWISE; }

/* Whether a pass reads a buffer: of one rank, only what is made of the shards. */
static int gmm__gtp_buffered(gmm_gtp *g, const gmm__gtp_bundle *b, int pass) {
    return g->domains[b->domain].size > 1 ||
           (gmm__gtp_class(g, b, pass) == GMM__GTP_COL && gmm__gtp_member(g, b, 0)->transposed);
}

/* Places of a bundle's parts: in its slots data, scales as gmm_layout_of places groups, amaxes; in the stage what is
   put side by side, or transposed. */
static void gmm__gtp_place(gmm_gtp *g, gmm__gtp_bundle *b) {
    gmm__gtp_domain *to = &g->domains[b->domain];
    int d;
    int32_t i, part;
    for (d = GMM_ROWWISE; d <= GMM_COLUMNWISE; d++) {
        size_t at = 0, stage = 0;
        for (part = GMM__GTP_DATA; part <= GMM__GTP_SCALE; part++) {
            for (i = 0; i < b->count; i++) {
                gmm__gtp_weight *w = gmm__gtp_member(g, b, i);
                gmm__route *r = &w->route[d][part];
                r->at = at;
                at += part == GMM__GTP_DATA ? gmm__round256(r->whole) : r->whole;
                if (d == GMM_COLUMNWISE && w->transposed) { /* the rowwise copy arrives there */
                    gmm__route *from = &w->route[GMM_ROWWISE][part];
                    from->stage = stage;
                    stage += gmm__round256(from->send * (size_t)to->size);
                } else if (r->staged) {
                    r->stage = stage;
                    stage += gmm__round256(r->send * (size_t)to->size);
                }
            }
            at = gmm__round256(at);
        }
        b->amax_at[d] = at;
        if (gmm__gtp_member(g, b, 0)->shard.scaling == GMM_SCALING_NV16)
            at += gmm__round256((size_t)b->count * sizeof(float));
        b->slot_bytes[d == GMM_COLUMNWISE ? GMM__GTP_COL : GMM__GTP_ROW] = at;
        if (to->size > 1 && stage > to->stage_bytes[b->captured]) to->stage_bytes[b->captured] = stage;
    }
    b->slot_bytes[GMM__GTP_REC] = b->chain[GMM_GTP_RECOMPUTE] < 0 ? 0 : b->slot_bytes[GMM__GTP_ROW];
    b->grad_bytes = 0;
    for (i = 0; i < b->count; i++) {
        gmm__gtp_weight *w = gmm__gtp_member(g, b, i);
        w->grad_at = b->grad_bytes;
        b->grad_bytes += gmm__round256((size_t)w->plan.padded_rows * (size_t)w->plan.local_cols *
                                        (size_t)(gmm_dtype_bits(g->domains[b->domain].desc.wire) / 8));
    }
}

/* The bundle k places behind a place of a chain, which may run on into the next, and its pass there; NULL = none. */
static gmm__gtp_bundle *gmm__gtp_behind(gmm_gtp *g, int32_t chain, int32_t place, int32_t k, gmm_gtp_pass *pass) {
    for (place += k; chain >= 0 && place >= g->chains[chain].count; chain = g->chains[chain].next)
        place -= g->chains[chain].count;
    if (chain < 0) return NULL;
    *pass = g->chains[chain].pass;
    return &g->bundles[g->links[g->chains[chain].first + place]];
}

/* Whether some chain has a slot in use, held or prefetched, at a time at which it has b's of that kind in use. */
static int gmm__gtp_slot_taken(gmm_gtp *g, int32_t slot, const gmm__gtp_bundle *b, int kind) {
    int32_t c, i, k;
    for (c = 0; c < g->chain_count; c++)
        for (i = 0; i < g->chains[c].count; i++) {
            int mine = 0, taken = 0;
            for (k = 0; k < g->link_count && k - g->chains[c].prefetch < g->chains[c].held; k++) {
                gmm_gtp_pass pass = GMM_GTP_FORWARD;
                const gmm__gtp_bundle *x = gmm__gtp_behind(g, c, i, k, &pass);
                if (!x) break;
                mine |= x == b && gmm__gtp_class(g, x, pass) == kind;
                taken |= x->slot[pass] == slot;
            }
            if (mine && taken) return 1;
        }
    return 0;
}

/* Gives b the first slot of its kind and size that is free whenever b needs one: those of a chain get them by turns. */
static void gmm__gtp_take_slot(gmm_gtp *g, gmm__gtp_bundle *b, int kind) {
    gmm__gtp_domain *d = &g->domains[b->domain];
    gmm__gtp_slot *s = g->slots;
    int pass;
    for (pass = 0; pass < GMM_GTP_PASSES; pass++)
        if (b->slot[pass] >= 0 && g->slots[b->slot[pass]].kind == kind) return;
    for (; s < g->slots + g->slot_count; s++)
        if (s->domain == b->domain && s->kind == kind && s->captured == b->captured &&
            s->bytes == b->slot_bytes[kind] && !gmm__gtp_slot_taken(g, (int32_t)(s - g->slots), b, kind))
            break;
    if (s == g->slots + g->slot_count) {
        g->slot_count++;
        s->domain = b->domain;
        s->kind = kind;
        s->captured = b->captured;
        s->bytes = b->slot_bytes[kind];
        s->at = d->gather_bytes;
        s->bundle = -1;
        d->gather_bytes += gmm__round256(s->bytes);
    }
    for (pass = 0; pass < GMM_GTP_PASSES; pass++)
        if (gmm__gtp_class(g, b, pass) == kind) b->slot[pass] = (int32_t)(s - g->slots);
}

static void gmm__gtp_take_wslot(gmm_gtp *g, gmm__gtp_bundle *b) {
    gmm__gtp_domain *d = &g->domains[b->domain];
    int32_t i, slots = 0, taken = 0, nth;
    if (!b->trainable || b->wslot >= 0) return;
    for (i = 0; i < g->bundle_count; i++) {
        const gmm__gtp_bundle *x = &g->bundles[i];
        taken += x->wslot >= 0 && x->domain == b->domain && x->captured == b->captured &&
                 x->grad_bytes == b->grad_bytes;
    }
    nth = taken % d->desc.wgrad_slots;
    for (i = 0; i < g->wslot_count; i++) {
        const gmm__wgrad_slot *s = &g->wslots[i];
        if (s->domain == b->domain && s->captured == b->captured && s->bytes == b->grad_bytes && slots++ == nth) {
            b->wslot = i;
            return;
        }
    }
    {
        gmm__wgrad_slot *s = &g->wslots[g->wslot_count];
        s->domain = b->domain;
        s->captured = b->captured;
        s->bytes = b->grad_bytes;
        s->at = d->reduce_bytes;
        s->writer = -1;
        d->reduce_bytes += gmm__round256(s->bytes);
        b->wslot = g->wslot_count++;
    }
}

/* The sum of one weight's gradient into its main_grad. Of parts that were exchanged, the own one is where it was. */
typedef struct gmm__gtp_sum {
    gmm_context *ctx;
    gmm_accumulation d;
    gmm_options options;
    gmm_mat x, y;
    void *workspace;
    size_t workspace_bytes;
    void *part[GMM__GTP_PARTS];
} gmm__gtp_sum;

static gmm__gtp_sum gmm__gtp_sum_of(gmm_gtp *g, const gmm__gtp_domain *d, const gmm__gtp_weight *w) {
    gmm__gtp_sum s;
    memset(&s, 0, sizeof s);
    s.ctx = g->config.ctx;
    s.d.count = d->size > 1 && d->desc.reduction == GMM_GTP_REDUCE_EXCHANGE ? d->size : 1;
    s.d.rows = w->plan.shard_rows;
    s.d.cols = w->plan.local_cols;
    s.x = gmm_mat_packed(d->desc.wire, NULL);
    s.y = gmm_mat_packed(w->desc.main_grad_dtype, w->desc.main_grad);
    return s;
}
/* Its pointers, once it stands where it is used. */
static void gmm__gtp_sum_point(gmm__gtp_sum *s) {
    if (s->d.count > 1) s->x = gmm_mat_table(s->x.dtype, s->part, (uint32_t)GMM_MAT_TABLE_ON_HOST);
    s->d.options = &s->options;
    s->d.x = &s->x;
    s->d.y = &s->y;
}
static gmm_status gmm__gtp_sum_run(const void *argument, gmm_stream stream) {
    gmm__gtp_sum s = *(const gmm__gtp_sum *)argument;
    gmm__gtp_sum_point(&s);
    return gmm_accumulate(s.ctx, &s.d, s.workspace, s.workspace_bytes, stream);
}

/* The making of one weight's shard. */
typedef struct gmm__gtp_cast {
    gmm_context *ctx;
    gmm_quantization d;
    gmm_conversion plain;      /* of a weight without a scaling */
    gmm_format format;
    gmm_mat src, copy[2];
    int32_t wanted[2];
    void *workspace;
    size_t workspace_bytes;
} gmm__gtp_cast;

static gmm__gtp_cast gmm__gtp_cast_of(gmm_gtp *g, const gmm__gtp_weight *w, gmm_dtype dtype, const void *from) {
    gmm__gtp_cast c;
    int d;
    memset(&c, 0, sizeof c);
    c.ctx = g->config.ctx;
    c.src = gmm_mat_packed(dtype, from);
    c.format = w->format;
    c.d.count = 1;
    c.d.rows = c.plain.rows = w->plan.shard_rows;
    c.d.cols = c.plain.cols = w->plan.local_cols;
    for (d = GMM_ROWWISE; d <= GMM_COLUMNWISE; d++) {
        c.wanted[d] = w->plan.shard_data_bytes[d] > 0;
        c.copy[d] = gmm_mat_quantized(&c.format, (gmm_direction)d, w->desc.data[d], w->desc.scale[d], NULL);
    }
    if (w->shard.scaling == GMM_SCALING_NONE) c.copy[GMM_ROWWISE] = gmm_mat_packed(w->shard.dtype, w->desc.data[0]);
    return c;
}
/* Its pointers, once it stands where it is used. */
static void gmm__gtp_cast_point(gmm__gtp_cast *c) {
    c->d.format = &c->format;
    c->d.src = c->plain.src = &c->src;
    c->d.rowwise = c->wanted[GMM_ROWWISE] ? &c->copy[GMM_ROWWISE] : NULL;
    c->d.columnwise = c->wanted[GMM_COLUMNWISE] ? &c->copy[GMM_COLUMNWISE] : NULL;
    c->plain.dst = &c->copy[GMM_ROWWISE];
}
static gmm_status gmm__gtp_cast_run(const void *argument, gmm_stream stream) {
    gmm__gtp_cast c = *(const gmm__gtp_cast *)argument;
    gmm__gtp_cast_point(&c);
    if (c.format.dtype == GMM_NONE) return gmm_convert(c.ctx, &c.plain, NULL, 0, stream);
    return gmm_quantize(c.ctx, &c.d, c.workspace, c.workspace_bytes, stream);
}
/* Whether one amax of the whole tensor decides about its scale. */
static int gmm__gtp_by_amax(const gmm__gtp_weight *w) {
    return w->format.dtype != GMM_NONE && (w->shard.scaling == GMM_SCALING_NV16 ||
                                           (w->shard.scaling == GMM_SCALING_TENSOR && !w->format.delayed));
}

/* What quantizing wants for workspace: the most of the domain's weights, whatever the dtype of the rows. */
static gmm_status gmm__gtp_size_cast(gmm_gtp *g, const char *fn, gmm__gtp_domain *d, const gmm__gtp_weight *w) {
    static const gmm_dtype dtypes[] = {GMM_F32, GMM_F16, GMM_BF16};
    int i;
    for (i = 0; i < 3 && w->format.dtype != GMM_NONE; i++) {
        gmm__gtp_cast c = gmm__gtp_cast_of(g, w, dtypes[i], NULL);
        gmm_info info = GMM_ZERO;
        gmm_status s;
        gmm__gtp_cast_point(&c);
        s = gmm_quantize_query(g->config.ctx, GMM_OP_QUANTIZE, &c.d, &info);
        if (s) return gmm__fail(&g->error, s, "%s: '%s': %.400s", fn, w->desc.name, gmm_last_error(g->config.ctx));
        if (info.workspace_bytes > d->cast_bytes) d->cast_bytes = info.workspace_bytes;
    }
    return GMM_OK;
}

/* The transposing of one weight's rowwise copy. */
typedef struct gmm__gtp_turn {
    gmm_context *ctx;
    gmm_transposition d;
    gmm_mat src, dst;
} gmm__gtp_turn;
static gmm_status gmm__gtp_turn_run(const void *argument, gmm_stream stream) {
    gmm__gtp_turn t = *(const gmm__gtp_turn *)argument;
    t.d.src = &t.src;
    t.d.dst = &t.dst;
    return gmm_transpose(t.ctx, &t.d, NULL, 0, stream);
}

GMMDEF gmm_status gmm_gtp_seal(gmm_gtp *gtp) {
    static const char fn[] = "gmm_gtp_seal";
    int32_t i, k, n;
    int pass;
    gmm_status s = gmm__gtp_declare(gtp, fn, "", 0, 1, gtp);
    if (s) return s;
    for (i = 0; i < gtp->weight_count; i++)
        if (gtp->weights[i].bundle < 0)
            return gmm__fail(&gtp->error, GMM_E_CONFIG, "%s: '%s' is in no bundle", fn, gtp->weights[i].desc.name);
    for (i = 0; i < gtp->bundle_count; i++) { /* what sums want for workspace */
        const gmm__gtp_bundle *b = &gtp->bundles[i];
        gmm__gtp_domain *d = &gtp->domains[b->domain];
        for (k = 0; k < b->count; k++) {
            const gmm__gtp_weight *w = gmm__gtp_member(gtp, b, k);
            gmm__gtp_sum sum = gmm__gtp_sum_of(gtp, d, w);
            gmm_info info = GMM_ZERO;
            if ((s = gmm__gtp_size_cast(gtp, fn, d, w)) != GMM_OK) return s;
            if (!w->desc.main_grad) continue;
            gmm__gtp_sum_point(&sum);
            s = gmm_accumulate_query(gtp->config.ctx, &sum.d, &info);
            if (s) return gmm__fail(&gtp->error, s, "%s: '%s': %.400s", fn, w->desc.name,
                                    gmm_last_error(gtp->config.ctx));
            if (info.workspace_bytes > d->work_bytes) d->work_bytes = info.workspace_bytes;
        }
    }
    for (i = 0; i < gtp->bundle_count; i++) gmm__gtp_place(gtp, &gtp->bundles[i]);
    for (i = 0; i < gtp->chain_count; i++) /* slots in the order of the chains, */
        for (k = 0; k < gtp->chains[i].count; k++) {
            gmm__gtp_bundle *b = &gtp->bundles[gtp->links[gtp->chains[i].first + k]];
            if (gmm__gtp_buffered(gtp, b, gtp->chains[i].pass))
                gmm__gtp_take_slot(gtp, b, gmm__gtp_class(gtp, b, gtp->chains[i].pass));
            if (gtp->chains[i].pass == GMM_GTP_BACKWARD) gmm__gtp_take_wslot(gtp, b);
        }
    for (i = 0; i < gtp->bundle_count; i++) { /* then for who is in none */
        gmm__gtp_bundle *b = &gtp->bundles[i];
        for (pass = GMM_GTP_FORWARD; pass <= GMM_GTP_BACKWARD; pass++)
            if (gmm__gtp_buffered(gtp, b, pass)) gmm__gtp_take_slot(gtp, b, gmm__gtp_class(gtp, b, pass));
        gmm__gtp_take_wslot(gtp, b);
    }
    for (i = 0; i < gtp->domain_count; i++) {
        gmm__gtp_domain *d = &gtp->domains[i];
        size_t most = 0;
        for (k = 0; k < gtp->bundle_count; k++)
            if (gtp->bundles[k].domain == i && gtp->bundles[k].trainable && gtp->bundles[k].grad_bytes > most)
                most = gtp->bundles[k].grad_bytes;
        for (k = 0; k < 2; k++) {
            d->stage_at[k] = d->gather_bytes;
            d->gather_bytes += gmm__round256(d->stage_bytes[k]);
        }
        d->amax_at = d->gather_bytes;
        for (k = 0, n = 0; k < gtp->weight_count; k++)
            n += gtp->bundles[gtp->weights[k].bundle].domain == i && gmm__gtp_by_amax(&gtp->weights[k]);
        d->gather_bytes += gmm__round256((size_t)n * sizeof(float));
        d->cast_at = d->gather_bytes;
        d->gather_bytes += gmm__round256(d->cast_bytes);
        d->recv_at = d->reduce_bytes; /* one suffices: reductions follow one another on their stream */
        if (d->size > 1 && d->desc.reduction == GMM_GTP_REDUCE_EXCHANGE) d->reduce_bytes += gmm__round256(most);
        d->work_at = d->reduce_bytes;
        d->reduce_bytes += gmm__round256(d->work_bytes);
    }
    gtp->sealed = 1;
    return GMM_OK;
}

GMMDEF gmm_status gmm_gtp_memory_need(gmm_gtp *gtp, int32_t domain, gmm_gtp_need *need) {
    static const char fn[] = "gmm_gtp_memory_need";
    gmm_gtp_need n = GMM_ZERO;
    gmm_status s = GMM_OK;
    size_t known;
    int32_t i;
    if (!gtp) return GMM_E_NULL;
    known = gmm__gtp_known(fn, "need", need, sizeof *need, &s, &gtp->error);
    if (s) return s;
    if (!gtp->sealed) return gmm__fail(&gtp->error, GMM_E_STATE, "%s: seal the object first", fn);
    if (domain < 0 || domain >= gtp->domain_count)
        return gmm__fail(&gtp->error, GMM_E_ARG, "%s: domain %d: there are %d", fn, domain,
                         gtp->domain_count);
    n.struct_size = need->struct_size;
    for (i = 0; i < gtp->slot_count; i++) n.gather_slots += gtp->slots[i].domain == domain;
    for (i = 0; i < gtp->wslot_count; i++) n.wgrad_slots += gtp->wslots[i].domain == domain;
    n.gather_bytes = gtp->domains[domain].gather_bytes;
    n.reduce_bytes = gtp->domains[domain].reduce_bytes;
    memcpy(need, &n, known);
    return GMM_OK;
}

