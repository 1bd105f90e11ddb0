/* Views of gathered weights: acquire, release, prefetch, the order of chains. */

/* Addresses and format of the matrices of a bundle, from which a view is made. */
typedef struct gmm__gtp_operand {
    gmm_dtype dtype;
    gmm_scaling scaling;
    void *const *data, *const *scales; /* [count] */
    int packed;                        /* 1: group_stride describes the addresses; 0: the view refers to the tables */
    int64_t group_stride, ld;
} gmm__gtp_operand;

/* The view of `count` weights of a bundle from `first` on, over an operand. */
static gmm_gtp_view gmm__gtp_make_view(gmm_gtp *g, const gmm__gtp_bundle *b, int32_t first, int32_t count,
                                       const gmm__gtp_operand *o) {
    const gmm__gtp_weight *w = gmm__gtp_member(g, b, first);
    gmm_gtp_view v = GMM_ZERO;
    v.count = count;
    v.rows = w->plan.local_rows;
    v.cols = w->plan.local_cols;
    v.version = b->version;
    v.slot = -1;
    v.mat.dtype = o->dtype;
    v.mat.scaling = o->scaling;
    v.mat.ld = o->ld;
    if (o->packed) {
        v.mat.data = o->data[0];
        v.mat.group_stride = count > 1 ? o->group_stride : 0;
        v.mat.scale = o->scaling == GMM_SCALING_NONE ? NULL : o->scales[0];
    } else {
        v.mat.table = o->data;
        v.mat.scale_table = o->scaling == GMM_SCALING_NONE ? NULL : o->scales;
        v.mat.flags = (uint32_t)GMM_MAT_TABLE_ON_HOST;
    }
    v.mat.amax = o->scaling == GMM_SCALING_NV16 ? w->desc.amax : NULL;
    return v;
}
/* Whether the weights of a bundle from `first` on have one shape. */
static int gmm__gtp_uniform(gmm_gtp *g, const gmm__gtp_bundle *b, int32_t first, int32_t count) {
    int32_t i;
    for (i = 1; i < count; i++)
        if (!gmm__gtp_same_shape(gmm__gtp_member(g, b, first), gmm__gtp_member(g, b, first + i))) return 0;
    return 1;
}
/* The view of `count` weights from `begin` on; `columnwise` is the target of mat.columnwise. */
static gmm_gtp_view gmm__gtp_view_pass(gmm_gtp *g, gmm__gtp_bundle *b, gmm_gtp_pass pass, int32_t begin, int32_t count,
                                       gmm_mat *columnwise) {
    const gmm__gtp_weight *w = gmm__gtp_member(g, b, begin);
    const int dir = gmm__slot_direction(gmm__slot_kind(g, b, pass)), slot = b->slot[pass];
    const gmm__gather_layout *scale = &w->layout[dir][GMM__GTP_SCALE];
    const int64_t bits = gmm_dtype_bits(w->shard.dtype);
    gmm__gtp_operand o;
    gmm_gtp_view v;
    o.dtype = w->shard.dtype;
    o.scaling = w->shard.scaling;
    o.data = g->table[pass] + b->first + begin;
    o.scales = g->scales[pass] + b->first + begin;
    o.packed = count == 1 || (slot >= 0 && gmm__gtp_uniform(g, b, begin, count) &&
                              scale->gathered_bytes == scale->group_bytes);
    o.group_stride = (int64_t)gmm__round256(w->layout[dir][GMM__GTP_DATA].gathered_bytes) * 8 / bits;
    o.ld = slot >= 0 ? w->ld[dir] : 0;
    v = gmm__gtp_make_view(g, b, begin, count, &o);
    if (w->format.e4m3_256) v.mat.flags |= (uint32_t)GMM_MAT_E4M3_256;
    if (slot >= 0 && w->shard.scaling == GMM_SCALING_NV16 && w->desc.amax)
        v.mat.amax = (float *)(void *)(g->slots[slot].base + b->amax_offset[dir]) + begin;
    v.slot = slot;
    if (dir == GMM_COLUMNWISE) { /* the view has no rowwise copy, and operations that read one are refused */
        *columnwise = v.mat;
        v.mat.data = v.mat.scale = NULL;
        v.mat.table = v.mat.scale_table = NULL;
        v.mat.amax = NULL;
        v.mat.flags = 0;
        v.mat.ld = v.mat.group_stride = 0;
        v.mat.columnwise = columnwise;
    }
    return v;
}

/* Multiprocessors that a GEMM of the bundle should leave free (gmm_gtp_view.leave) for concurrent work: gathers of the
   next bundles, and except in forward reductions, whose sums are kernels. A kernel that finds no free multiprocessor
   waits until the GEMM ends. */
enum { GMM__GTP_SUM_PROCESSORS = 16 };
static int32_t gmm__gtp_reserved_processors(const gmm_gtp *g, const gmm__gtp_bundle *b, gmm_gtp_pass pass) {
    const gmm__gtp_domain *d = &g->domains[b->domain];
    const int32_t chain = b->chain[pass];
    int32_t processors = 0;
    if (d->size == 1) return 0;
    if (chain >= 0 && g->chains[chain].prefetch > 0) processors = d->gather.processors;
    if (pass != GMM_GTP_FORWARD && d->reduce.processors > processors) processors = d->reduce.processors;
    if (pass != GMM_GTP_FORWARD && processors < GMM__GTP_SUM_PROCESSORS) processors = GMM__GTP_SUM_PROCESSORS;
    return processors;
}

GMMDEF gmm_status gmm_gtp_acquire(gmm_gtp *gtp, int32_t bundle, gmm_gtp_pass pass, gmm_stream stream,
                                  gmm_gtp_view *view) {
    static const char fn[] = "gmm_gtp_acquire";
    gmm__gtp_bundle *b;
    gmm__gtp_slot *slot;
    gmm_gtp_view v;
    size_t common;
    gmm_status s = gmm__gtp_check_pass(gtp, fn, bundle, pass);
    if (s) return s;
    common = gmm__gtp_common_size(fn, "view", view, sizeof *view, &s, &gtp->error);
    if (s) return s;
    b = &gtp->bundles[bundle];
    slot = b->slot[pass] >= 0 ? &gtp->slots[b->slot[pass]] : NULL;
    if (b->acquired >> pass & 1u)
        return gmm__fail(&gtp->error, GMM_E_STATE, "%s: '%s' is acquired already for pass %d", fn, b->name, (int)pass);
    if (slot && slot->acquired && slot->bundle != bundle)
        return gmm__fail(&gtp->error, GMM_E_STATE, "%s: '%s': its slot holds '%s', which is not released: release it, "
                         "or raise gmm_gtp_chain.held", fn, b->name, gtp->bundles[slot->bundle].name);
    if (pass == GMM_GTP_FORWARD && (s = gmm__gtp_request_publish(gtp, b)) != GMM_OK) return s;
    if (slot && slot->acquired && !gmm__gtp_slot_valid(gtp, slot, bundle))
        return gmm__fail(&gtp->error, GMM_E_STATE, "%s: '%s' was published while another pass holds it", fn, b->name);
    gmm__gtp_hash(gtp, 1, bundle, (int)pass);
    b->publish_requested = pass == GMM_GTP_FORWARD ? 0 : b->publish_requested;
    gtp->stats.acquires++;
    if (!slot) {
        gtp->stats.resident++;
        if (gtp->graph) *gmm__gtp_graph_usage(gtp, gtp->graph - 1, bundle) |= GMM__GRAPH_READS;
        else s = gmm__gtp_event_wait(gtp, &b->published, stream);
    } else {
        if (gmm__gtp_slot_valid(gtp, slot, bundle)) {
            if (slot->pending == 1) gtp->stats.prefetched++;
            else gtp->stats.resident++;
        } else {
            gtp->stats.exposed++;
            gtp->stats.outdated += gmm__gtp_is_outdated(gtp, slot);
            s = gmm__gtp_gather_together(gtp, bundle, pass, stream);
        }
        if (!s) s = gmm__gtp_event_wait(gtp, &slot->ready, stream);
        slot->pending = 0;
        slot->graph = gtp->graph;
        slot->acquired |= 1u << pass;
    }
    b->acquired |= 1u << pass;
    if (!s) s = gmm__gtp_prefetch_successors(gtp, b, pass);
    if (s) return gmm__gtp_fail(gtp, fn, b->name, s);
    v = gmm__gtp_view_pass(gtp, b, pass, 0, b->count, &b->columnwise);
    v.leave = gmm__gtp_reserved_processors(gtp, b, pass);
    v.struct_size = view->struct_size;
    memcpy(view, &v, common);
    return GMM_OK;
}

/* Checks what gmm_gtp_view_part and gmm_gtp_wgrad_part are called with. */
static gmm_status gmm__gtp_check_part(gmm_gtp *g, const char *fn, int32_t bundle, int32_t first, int32_t count) {
    const gmm__gtp_bundle *b = &g->bundles[bundle];
    if (first < 0 || count < 1 || first >= b->count || count > b->count - first)
        return gmm__fail(&g->error, GMM_E_ARG, "%s: '%s': weights %d to %lld: it has %d", fn, b->name, first,
                         (long long)first + count - 1, b->count);
    if (!gmm__gtp_uniform(g, b, first, count))
        return gmm__fail(&g->error, GMM_E_CONFIG, "%s: '%s': weights %d to %d differ in shape", fn, b->name, first,
                         first + count - 1);
    return GMM_OK;
}
GMMDEF gmm_status gmm_gtp_view_part(gmm_gtp *gtp, int32_t bundle, gmm_gtp_pass pass, int32_t first, int32_t count,
                                    gmm_gtp_view *part) {
    static const char fn[] = "gmm_gtp_view_part";
    gmm_gtp_view v;
    gmm__gtp_bundle *b;
    size_t common;
    gmm_status s = gmm__gtp_check_pass(gtp, fn, bundle, pass);
    if (s) return s;
    common = gmm__gtp_common_size(fn, "part", part, sizeof *part, &s, &gtp->error);
    if (!s) s = gmm__gtp_check_part(gtp, fn, bundle, first, count);
    if (s) return s;
    b = &gtp->bundles[bundle];
    if (!(b->acquired >> pass & 1u))
        return gmm__fail(&gtp->error, GMM_E_STATE, "%s: '%s' is not acquired for pass %d", fn, b->name, (int)pass);
    v = gmm__gtp_view_pass(gtp, b, pass, first, count, &gmm__gtp_member(gtp, b, first)->columnwise);
    v.leave = gmm__gtp_reserved_processors(gtp, b, pass);
    v.struct_size = part->struct_size;
    memcpy(part, &v, common);
    return GMM_OK;
}

GMMDEF gmm_status gmm_gtp_release(gmm_gtp *gtp, int32_t bundle, gmm_gtp_pass pass, gmm_stream stream) {
    static const char fn[] = "gmm_gtp_release";
    gmm__gtp_bundle *b;
    gmm__gtp_slot *slot;
    gmm_status s = gmm__gtp_check_pass(gtp, fn, bundle, pass);
    if (s) return s;
    b = &gtp->bundles[bundle];
    if (!(b->acquired >> pass & 1u))
        return gmm__fail(&gtp->error, GMM_E_STATE, "%s: '%s' is not acquired for pass %d", fn, b->name, (int)pass);
    slot = b->slot[pass] >= 0 ? &gtp->slots[b->slot[pass]] : NULL;
    s = slot ? gmm__gtp_record_read(gtp, &slot->last_use, &slot->read, &slot->reader, stream)
             : gmm__gtp_record_read(gtp, &b->in_place, &b->in_place.recorded, &b->reader, stream);
    b->acquired &= ~(1u << pass);
    if (slot) slot->acquired &= ~(1u << pass);
    return s ? gmm__gtp_fail(gtp, fn, b->name, s) : GMM_OK;
}

GMMDEF gmm_status gmm_gtp_prefetch(gmm_gtp *gtp, int32_t bundle, gmm_gtp_pass pass) {
    static const char fn[] = "gmm_gtp_prefetch";
    gmm_status s = gmm__gtp_check_pass(gtp, fn, bundle, pass);
    if (s) return s;
    gmm__gtp_hash(gtp, 2, bundle, (int)pass);
    s = gmm__gtp_prefetch_bundle(gtp, bundle, pass);
    return s ? gmm__gtp_fail(gtp, fn, gtp->bundles[bundle].name, s) : GMM_OK;
}

GMMDEF gmm_status gmm_gtp_follow(gmm_gtp *gtp, int32_t chain, int32_t next) {
    if (!gtp) return GMM_E_NULL;
    if (gtp->failed) return gtp->failed;
    if (chain < 0 || chain >= gtp->chain_count || next < -1 || next >= gtp->chain_count)
        return gmm__fail(&gtp->error, GMM_E_ARG, "gmm_gtp_follow: chain %d, next %d: there are %d", chain,
                         next, gtp->chain_count);
    if (next >= 0 && gtp->chains[next].captured != gtp->chains[chain].captured)
        return gmm__fail(&gtp->error, GMM_E_CAPTURE, "gmm_gtp_follow: chain %d is %scaptured, chain %d is not alike",
                         chain, gtp->chains[chain].captured ? "" : "not ", next);
    gmm__gtp_hash(gtp, 7, chain, 0);
    gmm__gtp_hash(gtp, 7, next, 1);
    gtp->chains[chain].next = next;
    return GMM_OK;
}

