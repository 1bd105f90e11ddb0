static int gmm__ck_compare_linears(const void *a, const void *b) {
    const gmm_ckpt_linear *x = (const gmm_ckpt_linear *)a, *y = (const gmm_ckpt_linear *)b;
    if (x->layer != y->layer) return x->layer < y->layer ? -1 : 1;
    return x->slot < y->slot ? -1 : x->slot > y->slot;
}

static int64_t gmm__ck_linear_of(const gmm__ck_build *b, gmm_ckpt_slot slot, int64_t layer) {
    int64_t at = 0;
    return gmm__ck_linear_find(b, NULL, 0, slot, layer, &at);
}

/* Extents of one linear from the shapes of its first tensors. */
static gmm_status gmm__ck_scan_linear(gmm__ck_build *b, gmm_ckpt_linear *l, const gmm__ck_hit *hits, int64_t count,
                                      int64_t experts) {
    const gmm_ckpt_rank *rank = &b->parts[0].rank;
    const int grouped = l->slot == GMM_CKPT_FC1 || l->slot == GMM_CKPT_FC2;
    const int64_t router = gmm__ck_linear_of(b, GMM_CKPT_ROUTER, l->layer);
    const gmm_ckpt_row *row = NULL;
    const gmm_ckpt_tensor *t = NULL;
    int64_t i, last = -1, m[2] = {0, 0};
    for (i = 0; i < count; i++) {
        const gmm_ckpt_row *r = &b->source.scheme->rows[hits[i].row];
        if (hits[i].kind == GMM_CKPT_BIAS) l->bias = 1;
        if (hits[i].kind != GMM_CKPT_WEIGHT) continue;
        if (!row) {
            row = r;
            t = &b->parts[hits[i].part].table->tensors[hits[i].tensor];
        }
        if (r->form == GMM_CKPT_EACH && hits[i].expert > last) last = hits[i].expert;
        l->gated |= r->half != GMM_CKPT_BOTH;
    }
    if (!row) return GMM_OK; /* a bias alone: planning says what is missing */
    l->experts = 1;
    if (grouped) {
        const int by_shape = row->form == GMM_CKPT_STACKED && t->rank >= 3;
        l->experts = experts ? experts : row->form == GMM_CKPT_EACH
                                             ? (last + 1) * (b->source.scheme->global_index ? 1 : rank->ep_size)
                                             : by_shape ? t->shape[0] * rank->ep_size
                                                        : router >= 0 ? b->linears[router].out : 0;
        if (l->experts < 1 || l->experts % rank->ep_size)
            return gmm__ck_refuse(b, GMM_CKPT_ARGUMENT, t->name, "no shape or name tells the number of experts: give "
                                  "it");
    }
    {
        const int64_t held = l->experts / (grouped ? rank->ep_size : 1);
        const int32_t front = row->form == GMM_CKPT_STACKED && t->rank >= 3 ? 1 : 0, left = t->rank - front;
        const int mx = row->scaling == GMM_SCALING_MX32;
        if (left != (mx ? 3 : 2) && !(left == 1 && row->form == GMM_CKPT_EACH))
            return gmm__ck_refuse(b, GMM_CKPT_SHAPE, t->name, "%d dimensions are none of its scheme", (int)t->rank);
        m[0] = t->shape[front];
        m[1] = left == 1 ? 0 : t->shape[front + 1] * (mx ? 32 : 1);
        if (!front && row->form != GMM_CKPT_EACH) {
            const int wide = row->form == GMM_CKPT_WIDE;
            if (m[wide] % held)
                return gmm__ck_refuse(b, GMM_CKPT_SHAPE, t->name, "extent %lld is no multiple of the %lld experts",
                                      (long long)m[wide], (long long)held);
            m[wide] /= held;
        }
    }
    l->out = m[row->transposed ? 1 : 0];
    l->in = m[row->transposed ? 0 : 1];
    if (grouped && rank->gtp_size > 1) { /* ranks stack their rows */
        l->out = 0;
        for (i = 0; i < count; i++) {
            const gmm_ckpt_rank *other = &b->parts[hits[i].part].rank;
            const gmm_ckpt_tensor *o = &b->parts[hits[i].part].table->tensors[hits[i].tensor];
            const int32_t d = o->rank - (row->transposed ? 1 : 2);
            if (hits[i].kind != GMM_CKPT_WEIGHT || hits[i].state != hits[0].state || d < 0 ||
                hits[i].row != (int32_t)(row - b->source.scheme->rows) ||
                other->ep_rank != rank->ep_rank || other->etp_rank != rank->etp_rank ||
                (row->form == GMM_CKPT_EACH && hits[i].expert % (l->experts / rank->ep_size)))
                continue;
            l->out += o->shape[d];
        }
    }
    if (l->slot == GMM_CKPT_FC1) l->out *= rank->etp_size;
    if (l->slot == GMM_CKPT_FC2) l->in *= rank->etp_size;
    if (row->half != GMM_CKPT_BOTH) l->out *= 2;
    return GMM_OK;
}

GMMDEF gmm_status gmm_ckpt_scan(const gmm_ckpt_source *source, int64_t experts, gmm_ckpt_linear **linears,
                                int64_t *count, const gmm_allocator *allocator, gmm_ckpt_report *report) {
    static const char fn[] = "gmm_ckpt_scan";
    const gmm_ckpt_target nothing = GMM_ZERO;
    gmm__ck_build b;
    gmm_status status;
    int64_t i, at, pass;
    if (!source || !linears || !count)
        return gmm__ck_null(fn, !source ? "source" : !linears ? "linears" : "count", report);
    *linears = NULL;
    *count = 0;
    status = gmm__ck_start(&b, fn, NULL, allocator, report);
    b.scan = 1;
    if (!status) status = gmm__ck_open(&b, source, &nothing);
    if (!status && (experts < 0 || experts > INT32_MAX))
        status = gmm__ck_refuse(&b, GMM_CKPT_ARGUMENT, NULL, "experts is %lld", (long long)experts);
    if (!status) status = gmm__ck_read_keys(&b);
    if (!status && b.hit_count) qsort(b.hits, (size_t)b.hit_count, sizeof *b.hits, gmm__ck_compare_hits);
    for (pass = 0; pass < 2; pass++) /* routers may tell the number of experts */
        for (i = 0, at = 0; !status && i < b.linear_count; i++) {
            const int grouped = b.linears[i].slot == GMM_CKPT_FC1 || b.linears[i].slot == GMM_CKPT_FC2;
            const int64_t begin = at;
            while (at < b.hit_count && b.hits[at].linear == i) at++;
            if (grouped == (int)pass)
                status = gmm__ck_scan_linear(&b, &b.linears[i], b.hits + begin, at - begin, experts);
        }
    for (i = 0; !status && i < b.linear_count; i++) {
        gmm_ckpt_linear *l = &b.linears[i];
        const int shared = l->slot == GMM_CKPT_SHARED_FC1;
        int64_t fc2;
        if ((l->slot != GMM_CKPT_FC1 && !shared) || l->gated) continue;
        fc2 = gmm__ck_linear_of(&b, shared ? GMM_CKPT_SHARED_FC2 : GMM_CKPT_FC2, l->layer);
        l->gated = fc2 >= 0 && l->out == 2 * b.linears[fc2].in;
        if (fc2 < 0 || (!l->gated && l->out != b.linears[fc2].in))
            status = gmm__ck_refuse(&b, GMM_CKPT_SHAPE, NULL, "layer %lld: %s's out %lld is neither once nor twice "
                                    "the in "
                                    "of its second linear, so nothing says whether it is gated",
                                    (long long)l->layer, shared ? "shared_fc1" : "fc1", (long long)l->out);
    }
    for (i = at = 0; !status && i < b.linear_count; i++) /* linears without a weight are none */
        if (b.linears[i].out) b.linears[at++] = b.linears[i];
    if (!status) b.linear_count = at;
    if (!status && b.linear_count) {
        qsort(b.linears, (size_t)b.linear_count, sizeof *b.linears, gmm__ck_compare_linears);
        *linears = (gmm_ckpt_linear *)b.temp.allocator.alloc(b.temp.allocator.user,
                                                             (size_t)b.linear_count * sizeof **linears);
        if (!*linears) status = gmm__ck_no_memory(&b);
    }
    if (!status && b.linear_count) {
        memcpy(*linears, b.linears, (size_t)b.linear_count * sizeof **linears);
        *count = b.linear_count;
    }
    return gmm__ck_end(&b, NULL, status);
}

GMMDEF void gmm_ckpt_linears_release(gmm_ckpt_linear *linears, const gmm_allocator *allocator) {
    const gmm_allocator a = gmm__ck_allocator(allocator);
    if (linears) a.release(a.user, linears);
}

