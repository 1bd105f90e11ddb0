/* The memory plan: slots, layouts of bundles, bytes of domains. */

/* ......................................................................................... Runtime: memory plan ... */

/* The kind of slot that a pass reads. */
static int gmm__slot_kind(gmm_gtp *g, const gmm__gtp_bundle *b, int pass) {
    if (pass == GMM_GTP_RECOMPUTE) return GMM__SLOT_RECOMPUTE;
    return pass == GMM_GTP_BACKWARD && gmm__gtp_member(g, b, 0)->plan.gather_data_bytes[GMM_COLUMNWISE] > 0
               ? GMM__SLOT_COLUMNWISE : GMM__SLOT_ROWWISE;
}
static int gmm__slot_direction(int kind) { return kind == GMM__SLOT_COLUMNWISE ? GMM_COLUMNWISE : GMM_ROWWISE; }

/* Whether a pass reads a slot. With one rank it reads the shards themselves, unless they must be transposed. */
static int gmm__gtp_needs_slot(gmm_gtp *g, const gmm__gtp_bundle *b, int pass) {
    return g->domains[b->domain].size > 1 ||
           (gmm__slot_kind(g, b, pass) == GMM__SLOT_COLUMNWISE && gmm__gtp_member(g, b, 0)->transposed);
}

/* Whether views of consecutive matrices may contain both weights. */
static int gmm__gtp_same_shape(const gmm__gtp_weight *w, const gmm__gtp_weight *x) {
    return w->plan.local_rows == x->plan.local_rows && w->plan.local_cols == x->plan.local_cols &&
           w->plan.padded_rows == x->plan.padded_rows;
}

/* Sets the offsets of a bundle's buffers. A slot contains the data of all weights, their scales at the distance that
   gmm_layout_of gives between weights of one shape, and their amaxes. The stage contains the buffers that a 2D copy or
   a transpose reads, the gradient buffer the gradients. */
static void gmm__gtp_bundle_layout(gmm_gtp *g, gmm__gtp_bundle *b) {
    gmm__gtp_domain *domain = &g->domains[b->domain];
    int d;
    int32_t i, part;
    for (d = GMM_ROWWISE; d <= GMM_COLUMNWISE; d++) {
        size_t offset = 0, stage = 0;
        for (part = GMM__GTP_DATA; part <= GMM__GTP_SCALE; part++) {
            for (i = 0; i < b->count; i++) {
                gmm__gtp_weight *w = gmm__gtp_member(g, b, i);
                gmm__gather_layout *layout = &w->layout[d][part];
                /* the values of TENSOR are copied at once */
                if (i > 0 && w->shard.scaling != GMM_SCALING_TENSOR &&
                    !gmm__gtp_same_shape(w, gmm__gtp_member(g, b, i - 1))) offset = gmm__round256(offset);
                layout->offset = offset;
                offset += part == GMM__GTP_DATA ? gmm__round256(layout->gathered_bytes) : layout->gathered_bytes;
                if (d == GMM_COLUMNWISE && w->transposed) { /* the rowwise copy is received in the stage */
                    gmm__gather_layout *rowwise = &w->layout[GMM_ROWWISE][part];
                    rowwise->stage_offset = stage;
                    stage += gmm__round256(rowwise->send_bytes * (size_t)domain->size);
                } else if (layout->staged) {
                    layout->stage_offset = stage;
                    stage += gmm__round256(layout->send_bytes * (size_t)domain->size);
                }
            }
            offset = gmm__round256(offset);
        }
        b->amax_offset[d] = offset;
        if (gmm__gtp_member(g, b, 0)->shard.scaling == GMM_SCALING_NV16)
            offset += gmm__round256((size_t)b->count * sizeof(float));
        b->slot_bytes[d == GMM_COLUMNWISE ? GMM__SLOT_COLUMNWISE : GMM__SLOT_ROWWISE] = offset;
        b->stage_bytes[d] = domain->size > 1 ? stage : 0;
        if (b->stage_bytes[d] > domain->stage_bytes[b->captured]) domain->stage_bytes[b->captured] = stage;
    }
    b->slot_bytes[GMM__SLOT_RECOMPUTE] = b->chain[GMM_GTP_RECOMPUTE] < 0 ? 0 : b->slot_bytes[GMM__SLOT_ROWWISE];
    b->grad_bytes = 0;
    for (i = 0; i < b->count; i++) {
        gmm__gtp_weight *w = gmm__gtp_member(g, b, i);
        w->grad_offset = b->grad_bytes;
        b->grad_bytes += gmm__round256((size_t)w->plan.padded_rows * (size_t)w->plan.local_cols *
                                       (size_t)(gmm_dtype_bits(g->domains[b->domain].desc.wire) / 8));
    }
}

/* Sets where the bundles of a chain that are gathered together use the stage: behind one another. */
static void gmm__gtp_stage_together(gmm_gtp *g, const gmm__gtp_chain *c) {
    size_t stage = 0;
    int32_t i;
    for (i = 0; i < c->count && c->together > 1; i++) {
        gmm__gtp_bundle *b = &g->bundles[g->chain_bundles[c->first + i]];
        gmm__gtp_domain *domain = &g->domains[b->domain];
        if (i % c->together == 0) stage = 0;
        b->stage_offset[c->pass] = stage;
        stage += b->stage_bytes[gmm__slot_direction(gmm__slot_kind(g, b, c->pass))];
        if (stage > domain->stage_bytes[b->captured]) domain->stage_bytes[b->captured] = stage;
    }
}

/* The bundle `distance` positions behind a position of a chain, which may lie in a chain that follows it
   (gmm_gtp_follow), and the pass of its chain; NULL = none. */
static gmm__gtp_bundle *gmm__gtp_successor(gmm_gtp *g, int32_t chain, int32_t position, int32_t distance,
                                           gmm_gtp_pass *pass) {
    for (position += distance; chain >= 0 && position >= g->chains[chain].count; chain = g->chains[chain].next)
        position -= g->chains[chain].count;
    if (chain < 0) return NULL;
    *pass = g->chains[chain].pass;
    return &g->bundles[g->chain_bundles[g->chains[chain].first + position]];
}

/* Whether some chain uses a slot at the same time as b's slot of that kind: from each position of the chain on, `held`
   bundles may be acquired, and `prefetch` further ones may be gathered, with those that are gathered together with the
   last of them, which may be in another chain that follows. */
static int gmm__gtp_slot_conflicts(gmm_gtp *g, int32_t slot, const gmm__gtp_bundle *b, int kind) {
    int32_t c, i, k, together = 1;
    for (c = 0; c < g->chain_count; c++) together = g->chains[c].together > together ? g->chains[c].together : together;
    for (c = 0; c < g->chain_count; c++)
        for (i = 0; i < g->chains[c].count; i++) {
            const int32_t ahead = g->chains[c].prefetch + together - 1;
            int bundle_used = 0, slot_used = 0;
            for (k = 0; k < g->chain_bundle_count && k - ahead < g->chains[c].held; k++) {
                gmm_gtp_pass pass = GMM_GTP_FORWARD;
                const gmm__gtp_bundle *x = gmm__gtp_successor(g, c, i, k, &pass);
                if (!x) break;
                bundle_used |= x == b && gmm__slot_kind(g, x, pass) == kind;
                slot_used |= x->slot[pass] == slot;
            }
            if (bundle_used && slot_used) return 1;
        }
    return 0;
}

/* Assigns b the first slot of its kind and size that no chain uses at the same time, or a new one. */
static void gmm__gtp_assign_slot(gmm_gtp *g, gmm__gtp_bundle *b, int kind) {
    gmm__gtp_domain *d = &g->domains[b->domain];
    gmm__gtp_slot *s = g->slots;
    int pass;
    for (pass = 0; pass < GMM_GTP_PASSES; pass++)
        if (b->slot[pass] >= 0 && g->slots[b->slot[pass]].kind == kind) return;
    for (; s < g->slots + g->slot_count; s++)
        if (s->domain == b->domain && s->kind == kind && s->captured == b->captured &&
            s->bytes == b->slot_bytes[kind] && !gmm__gtp_slot_conflicts(g, (int32_t)(s - g->slots), b, kind))
            break;
    if (s == g->slots + g->slot_count) {
        g->slot_count++;
        s->domain = b->domain;
        s->kind = kind;
        s->captured = b->captured;
        s->bytes = b->slot_bytes[kind];
        s->offset = d->gather_bytes;
        s->bundle = -1;
        d->gather_bytes += gmm__round256(s->bytes);
    }
    for (pass = 0; pass < GMM_GTP_PASSES; pass++)
        if (gmm__slot_kind(g, b, pass) == kind) b->slot[pass] = (int32_t)(s - g->slots);
}

/* Assigns a trainable bundle one of desc.wgrad_slots gradient slots of its size, in rotation, or a new one while there
   are fewer. */
static void gmm__gtp_assign_wgrad_slot(gmm_gtp *g, gmm__gtp_bundle *b) {
    gmm__gtp_domain *d = &g->domains[b->domain];
    int32_t i, slots = 0, assigned = 0, index;
    if (!b->trainable || b->wgrad_slot >= 0) return;
    for (i = 0; i < g->bundle_count; i++) {
        const gmm__gtp_bundle *x = &g->bundles[i];
        assigned += x->wgrad_slot >= 0 && x->domain == b->domain && x->captured == b->captured &&
                 x->grad_bytes == b->grad_bytes;
    }
    index = assigned % d->desc.wgrad_slots;
    for (i = 0; i < g->wgrad_slot_count; i++) {
        const gmm__wgrad_slot *s = &g->wgrad_slots[i];
        if (s->domain == b->domain && s->captured == b->captured && s->bytes == b->grad_bytes && slots++ == index) {
            b->wgrad_slot = i;
            return;
        }
    }
    {
        gmm__wgrad_slot *s = &g->wgrad_slots[g->wgrad_slot_count];
        s->domain = b->domain;
        s->captured = b->captured;
        s->bytes = b->grad_bytes;
        s->offset = d->reduce_bytes;
        s->writer = -1;
        d->reduce_bytes += gmm__round256(s->bytes);
        b->wgrad_slot = g->wgrad_slot_count++;
    }
}

/* Raises the domain's workspace of casts to what the cast of a weight needs from any source dtype. */
static gmm_status gmm__gtp_query_cast(gmm_gtp *g, const char *fn, gmm__gtp_domain *d, const gmm__gtp_weight *w) {
    static const gmm_dtype dtypes[] = {GMM_F32, GMM_F16, GMM_BF16};
    int i;
    for (i = 0; i < 3 && w->format.dtype != GMM_NONE; i++) {
        gmm__gtp_cast c = gmm__gtp_cast_make(g, w, dtypes[i], NULL);
        gmm_info info = GMM_ZERO;
        gmm_status s;
        gmm__gtp_cast_link(&c);
        s = gmm_quantize_query(g->config.ctx, GMM_OP_QUANTIZE, &c.d, &info);
        if (s) return gmm__fail(&g->error, s, "%s: '%s': %.400s", fn, w->desc.name, gmm_last_error(g->config.ctx));
        if (info.workspace_bytes > d->cast_bytes) d->cast_bytes = info.workspace_bytes;
    }
    return GMM_OK;
}

/* Whether the bytes of all buffers fit 64 bits, if no buffer is shared. A weight takes at most 16 times the bytes of
   its gathered copies and gradient, padding of scales included. */
static int gmm__gtp_bytes_fit(const gmm_gtp *g) {
    double bytes = 0;
    int32_t i;
    for (i = 0; i < g->weight_count; i++) {
        const gmm_shard_plan *p = &g->weights[i].plan;
        bytes += (double)p->gather_data_bytes[0] + (double)p->gather_data_bytes[1] + (double)p->gather_scale_bytes[0] +
                 (double)p->gather_scale_bytes[1] + 4.0 * (double)p->padded_rows * (double)p->local_cols;
    }
    return 16.0 * bytes < (double)INT64_MAX;
}

GMMDEF gmm_status gmm_gtp_seal(gmm_gtp *gtp) {
    static const char fn[] = "gmm_gtp_seal";
    int32_t i, k, n;
    int pass;
    gmm_status s = gmm__gtp_check_declaration(gtp, fn, "", 0, 1, gtp);
    if (s) return s;
    for (i = 0; i < gtp->weight_count; i++)
        if (gtp->weights[i].bundle < 0)
            return gmm__fail(&gtp->error, GMM_E_CONFIG, "%s: '%s' is in no bundle", fn, gtp->weights[i].desc.name);
    if (!gmm__gtp_bytes_fit(gtp))
        return gmm__fail(&gtp->error, GMM_E_OVERFLOW, "%s: the buffers of %d weights do not fit 64 bits", fn,
                         gtp->weight_count);
    for (i = 0; i < gtp->bundle_count; i++) { /* workspaces of sums and casts */
        const gmm__gtp_bundle *b = &gtp->bundles[i];
        gmm__gtp_domain *d = &gtp->domains[b->domain];
        for (k = 0; k < b->count; k++) {
            const gmm__gtp_weight *w = gmm__gtp_member(gtp, b, k);
            gmm__gtp_sum sum = gmm__gtp_sum_make(gtp, d, w);
            gmm_info info = GMM_ZERO;
            if ((s = gmm__gtp_query_cast(gtp, fn, d, w)) != GMM_OK) return s;
            if (!w->desc.main_grad) continue;
            gmm__gtp_sum_link(&sum);
            s = gmm_accumulate_query(gtp->config.ctx, &sum.d, &info);
            if (s) return gmm__fail(&gtp->error, s, "%s: '%s': %.400s", fn, w->desc.name,
                                    gmm_last_error(gtp->config.ctx));
            if (info.workspace_bytes > d->workspace_bytes) d->workspace_bytes = info.workspace_bytes;
        }
    }
    for (i = 0; i < gtp->bundle_count; i++) gmm__gtp_bundle_layout(gtp, &gtp->bundles[i]);
    for (i = 0; i < gtp->chain_count; i++) gmm__gtp_stage_together(gtp, &gtp->chains[i]);
    for (i = 0; i < gtp->chain_count; i++) /* first the slots of bundles in chains, in the order of the chains */
        for (k = 0; k < gtp->chains[i].count; k++) {
            gmm__gtp_bundle *b = &gtp->bundles[gtp->chain_bundles[gtp->chains[i].first + k]];
            if (gmm__gtp_needs_slot(gtp, b, gtp->chains[i].pass))
                gmm__gtp_assign_slot(gtp, b, gmm__slot_kind(gtp, b, gtp->chains[i].pass));
            if (gtp->chains[i].pass == GMM_GTP_BACKWARD) gmm__gtp_assign_wgrad_slot(gtp, b);
        }
    for (i = 0; i < gtp->bundle_count; i++) { /* then those of the other bundles */
        gmm__gtp_bundle *b = &gtp->bundles[i];
        for (pass = GMM_GTP_FORWARD; pass <= GMM_GTP_BACKWARD; pass++)
            if (gmm__gtp_needs_slot(gtp, b, pass)) gmm__gtp_assign_slot(gtp, b, gmm__slot_kind(gtp, b, pass));
        gmm__gtp_assign_wgrad_slot(gtp, b);
    }
    for (i = 0; i < gtp->domain_count; i++) {
        gmm__gtp_domain *d = &gtp->domains[i];
        size_t max_bytes = 0;
        for (k = 0; k < gtp->bundle_count; k++)
            if (gtp->bundles[k].domain == i && gtp->bundles[k].trainable && gtp->bundles[k].grad_bytes > max_bytes)
                max_bytes = gtp->bundles[k].grad_bytes;
        for (k = 0; k < 2; k++) {
            d->stage_offset[k] = d->gather_bytes;
            d->gather_bytes += gmm__round256(d->stage_bytes[k]);
        }
        d->amax_offset = d->gather_bytes;
        for (k = 0, n = 0; k < gtp->weight_count; k++)
            n += gtp->bundles[gtp->weights[k].bundle].domain == i && gmm__gtp_needs_amax(&gtp->weights[k]);
        d->gather_bytes += gmm__round256((size_t)n * sizeof(float));
        d->cast_offset = d->gather_bytes;
        d->gather_bytes += gmm__round256(d->cast_bytes);
        /* one receive buffer suffices, since reductions run one after the other: on the reduce stream, or in replays,
           which wait for that stream, as it does for them */
        d->recv_offset = d->reduce_bytes;
        if (d->size > 1 && d->desc.reduction == GMM_GTP_REDUCE_EXCHANGE) d->reduce_bytes += gmm__round256(max_bytes);
        d->workspace_offset = d->reduce_bytes;
        d->reduce_bytes += gmm__round256(d->workspace_bytes);
    }
    gtp->sealed = 1;
    return GMM_OK;
}

GMMDEF gmm_status gmm_gtp_memory_need(gmm_gtp *gtp, int32_t domain, gmm_gtp_need *need) {
    static const char fn[] = "gmm_gtp_memory_need";
    gmm_gtp_need n = GMM_ZERO;
    gmm_status s = GMM_OK;
    size_t common;
    int32_t i;
    if (!gtp) return GMM_E_NULL;
    common = gmm__gtp_common_size(fn, "need", need, sizeof *need, &s, &gtp->error);
    if (s) return s;
    if (!gtp->sealed) return gmm__fail(&gtp->error, GMM_E_STATE, "%s: seal the object first", fn);
    if (domain < 0 || domain >= gtp->domain_count)
        return gmm__fail(&gtp->error, GMM_E_ARG, "%s: domain %d: there are %d", fn, domain,
                         gtp->domain_count);
    n.struct_size = need->struct_size;
    for (i = 0; i < gtp->slot_count; i++) n.gather_slots += gtp->slots[i].domain == domain;
    for (i = 0; i < gtp->wgrad_slot_count; i++) n.wgrad_slots += gtp->wgrad_slots[i].domain == domain;
    n.gather_bytes = gtp->domains[domain].gather_bytes;
    n.reduce_bytes = gtp->domains[domain].reduce_bytes;
    memcpy(need, &n, common);
    return GMM_OK;
}

