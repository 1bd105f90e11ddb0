/* Creation of the runtime object, and declarations of domains, weights, bundles and chains. */

/* ........................................................................................ Runtime: declarations ... */

/* Places the arrays of the object behind it; sets their addresses if base is not NULL. Returns the bytes of all. */
static size_t gmm__gtp_place_arrays(gmm_gtp *g, char *base, const gmm_gtp_config *c) {
    size_t at = (sizeof *g + 15) / 16 * 16;
    const size_t domains = (size_t)c->domains, weights = (size_t)c->weights, bundles = (size_t)c->bundles;
    const size_t graphs = (size_t)c->graphs;
    int i;
#define GMM__ARRAY(field, type, count) do { \
        if (base) g->field = (type *)(void *)(base + at); \
        at += ((count) * sizeof(type) + 15) / 16 * 16; } while (0)
    GMM__ARRAY(domains, gmm__gtp_domain, domains);
    GMM__ARRAY(weights, gmm__gtp_weight, weights);
    GMM__ARRAY(bundles, gmm__gtp_bundle, bundles);
    GMM__ARRAY(chains, gmm__gtp_chain, (size_t)c->chains);
    GMM__ARRAY(slots, gmm__gtp_slot, 3 * bundles);
    GMM__ARRAY(wgrad_slots, gmm__wgrad_slot, bundles);
    GMM__ARRAY(graph_watch, gmm__watch, graphs);
    GMM__ARRAY(graph_end, gmm_event, graphs);
    GMM__ARRAY(members, int32_t, weights);
    GMM__ARRAY(chain_bundles, int32_t, 3 * bundles);
    for (i = 0; i < GMM_GTP_PASSES; i++) {
        GMM__ARRAY(table[i], void *, weights);
        GMM__ARRAY(scales[i], void *, weights);
    }
    GMM__ARRAY(grads, void *, weights);
    GMM__ARRAY(graph_usage, unsigned char, graphs * bundles);
#undef GMM__ARRAY
    return at;
}

static gmm_status gmm__gtp_read_config(const char *fn, const gmm_gtp_config *config, gmm_gtp_config *c,
                                       gmm_error *error) {
    const int32_t limit = 1 << 20;
    gmm_status s = gmm__gtp_read(fn, "config", config, c, sizeof *c, error);
    if (s) return s;
    if (c->domains == 0) c->domains = 1;
    if (c->timeout_ms == 0) c->timeout_ms = 10000;
    if (c->domains < 0 || c->weights < 0 || c->bundles < 0 || c->chains < 0 || c->graphs < 0 || c->domains > limit ||
        c->weights > limit || c->bundles > limit || c->chains > limit || c->graphs > 4096)
        return gmm__fail(error, GMM_E_ARG, "%s: %d domains, %d weights, %d bundles, %d chains, %d graphs: must be 0 to "
                         "%d, at most 4096 graphs", fn, c->domains, c->weights, c->bundles,
                         c->chains, c->graphs, (int)limit);
    if (c->timeout_ms < 0)
        return gmm__fail(error, GMM_E_ARG, "%s: timeout_ms is %d: must be >= 0", fn, c->timeout_ms);
    return GMM_OK;
}

GMMDEF gmm_status gmm_gtp_query(const gmm_gtp_config *config, size_t *bytes, gmm_error *error) {
    gmm_gtp_config c;
    gmm_status s;
    if (!bytes) return gmm__fail(error, GMM_E_NULL, "gmm_gtp_query: bytes is NULL");
    s = gmm__gtp_read_config("gmm_gtp_query", config, &c, error);
    if (!s) *bytes = gmm__gtp_place_arrays(NULL, NULL, &c);
    return s;
}

/* Whether a runtime has the functions that GTP calls; it calls none that create streams or make the host wait. */
static int gmm__gtp_runtime_complete(const gmm_runtime *r) {
    return r->stream_wait && r->event_create && r->event_destroy && r->event_record && r->event_query && r->copy &&
           r->copy2d && r->fill && r->fill2d && r->is_capturing && r->run;
}

GMMDEF gmm_status gmm_gtp_init(void *memory, size_t bytes, const gmm_gtp_config *config, gmm_gtp **out,
                               gmm_error *error) {
    static const char fn[] = "gmm_gtp_init";
    gmm_gtp_config c;
    gmm_gtp *g = (gmm_gtp *)memory;
    gmm_status s;
    size_t need;
    if (!out) return gmm__fail(error, GMM_E_NULL, "%s: out is NULL", fn);
    *out = NULL;
    if ((s = gmm__gtp_read_config(fn, config, &c, error)) != GMM_OK) return s;
    if (!memory || !c.ctx) return gmm__fail(error, GMM_E_NULL, "%s: %s is NULL", fn, memory ? "config->ctx" : "memory");
    if ((uintptr_t)memory % 16 != 0)
        return gmm__fail(error, GMM_E_ALIGN, "%s: memory at %p must be aligned to 16 bytes", fn, memory);
    need = gmm__gtp_place_arrays(NULL, NULL, &c);
    if (bytes < need)
        return gmm__fail(error, GMM_E_WORKSPACE, "%s: %llu bytes of memory: gmm_gtp_query asks for %llu", fn,
                         (unsigned long long)bytes, (unsigned long long)need);
    memset(memory, 0, need);
    g->config = c;
    (void)gmm__gtp_place_arrays(g, (char *)memory, &c);
    if (c.runtime) {
        s = gmm__gtp_read(fn, "config->runtime", c.runtime, &g->runtime, sizeof g->runtime, error);
        if (s) return s;
    } else if ((s = gmm_runtime_of(c.ctx, &g->runtime)) != GMM_OK) {
        return gmm__fail(error, s, "%s: %.400s", fn, gmm_last_error(c.ctx));
    }
    if (g->runtime.space != c.ctx->config.space)
        return gmm__fail(error, GMM_E_CONFIG, "%s: config->runtime is for %s memory, ctx for %s: must be one memory "
                         "space", fn, g->runtime.space == GMM_SPACE_CPU ? "CPU" : "GPU",
                         c.ctx->config.space == GMM_SPACE_CPU ? "CPU" : "GPU");
    if (!gmm__gtp_runtime_complete(&g->runtime))
        return gmm__fail(error, GMM_E_NULL, "%s: config->runtime lacks a function: all but stream_create, "
                         "stream_destroy, stream_sync and event_sync are needed", fn);
    *out = g;
    return GMM_OK;
}

GMMDEF const char *gmm_gtp_last_error(const gmm_gtp *gtp) { return gtp ? gtp->error.text : ""; }

/* Checks that the object accepts a further declaration: it is not sealed, and the configured number is not reached. */
static gmm_status gmm__gtp_check_declaration(gmm_gtp *g, const char *fn, const char *what, int32_t count,
                                             int32_t capacity, const void *id) {
    if (!g) return GMM_E_NULL;
    if (g->failed) return g->failed;
    if (!id) return gmm__fail(&g->error, GMM_E_NULL, "%s: id is NULL", fn);
    if (g->sealed) return gmm__fail(&g->error, GMM_E_STATE, "%s: the object is sealed", fn);
    if (count >= capacity)
        return gmm__fail(&g->error, GMM_E_WORKSPACE, "%s: config->%s is %d: no room for more", fn, what, capacity);
    return GMM_OK;
}

/* Whether a communicator has all functions that are required. */
static int gmm__gtp_comm_complete(const gmm_comm *c) {
    return c->group_begin && c->group_end && c->all_gather && c->reduce_scatter && c->all_to_all && c->all_reduce_max &&
           !c->window_add == !c->window_remove && c->poll && c->give_up;
}

/* Whether a communicator of the domain would be called on several streams, which nothing orders: by its two roles, or
   by it and a domain before it. */
static int gmm__gtp_several_streams(const gmm_gtp *g, const gmm__gtp_domain *d) {
    const gmm__gtp_domain *x;
    int k;
    for (x = g->domains; x <= d && d->size > 1; x++)
        for (k = 0; k < 4; k++) {
            const gmm_comm *c = k / 2 ? &x->reduce : &x->gather, *own = k % 2 ? &d->reduce : &d->gather;
            if (x->size > 1 && c->self == own->self && gmm__gtp_stream(x, k / 2) != gmm__gtp_stream(d, k % 2)) return 1;
        }
    return 0;
}

GMMDEF gmm_status gmm_gtp_add_domain(gmm_gtp *gtp, const gmm_gtp_domain *domain, int32_t *id) {
    static const char fn[] = "gmm_gtp_add_domain";
    gmm__gtp_domain *d;
    gmm_gtp_domain desc;
    gmm_status s = gmm__gtp_check_declaration(gtp, fn, "domains", gtp ? gtp->domain_count : 0,
                                              gtp ? gtp->config.domains : 0, id);
    if (!s) s = gmm__gtp_read(fn, "domain", domain, &desc, sizeof desc, &gtp->error);
    if (s) return s;
    if (desc.wire == GMM_NONE) desc.wire = GMM_F32;
    if (desc.wire != GMM_F32 && desc.wire != GMM_BF16)
        return gmm__fail(&gtp->error, GMM_E_DTYPE, "%s: wire is %s (%d): must be f32, bf16 or none", fn,
                         gmm_dtype_name(desc.wire), (int)desc.wire);
    if (desc.wgrad_slots == 0) desc.wgrad_slots = 2;
    if (desc.wgrad_slots < 0 || desc.reduction < GMM_GTP_REDUCE_AUTO || desc.reduction > GMM_GTP_REDUCE_EXCHANGE ||
        desc.synchronous < 0 || desc.synchronous > 1 || desc.reserved)
        return gmm__fail(&gtp->error, GMM_E_ARG, "%s: wgrad_slots %d, reduction %d, synchronous %d, reserved %d: must "
                         "be >= 0, a gmm_gtp_reduction, 0 or 1, and 0", fn, desc.wgrad_slots, (int)desc.reduction,
                         desc.synchronous, desc.reserved);
    d = &gtp->domains[gtp->domain_count];
    memset(d, 0, sizeof *d);
    d->size = 1;
    if (desc.gather) {
        s = gmm__gtp_read(fn, "domain->gather", desc.gather, &d->gather, sizeof d->gather, &gtp->error);
        if (!s) s = gmm__gtp_read(fn, "domain->reduce", desc.reduce ? desc.reduce : desc.gather, &d->reduce,
                                  sizeof d->reduce, &gtp->error);
        if (s) return s;
        d->size = d->gather.size;
        d->rank = d->gather.rank;
        if (d->size < 1 || d->rank < 0 || d->rank >= d->size || d->reduce.size != d->size || d->reduce.rank != d->rank)
            return gmm__fail(&gtp->error, GMM_E_CONFIG, "%s: gather is rank %d of %d, reduce rank %d of %d: must be "
                             "the same rank of the same group", fn, d->rank, d->size, d->reduce.rank,
                             d->reduce.size);
        if (!gmm__gtp_comm_complete(&d->gather) || !gmm__gtp_comm_complete(&d->reduce))
            return gmm__fail(&gtp->error, GMM_E_NULL, "%s: domain->%s lacks a function; all but window_add and "
                             "window_remove are needed", fn, gmm__gtp_comm_complete(&d->gather) ? "reduce" : "gather");
        if (d->gather.processors < 0 || d->reduce.processors < 0)
            return gmm__fail(&gtp->error, GMM_E_ARG, "%s: %s.processors %d must be >= 0", fn,
                             d->gather.processors < 0 ? "gather" : "reduce",
                             d->gather.processors < 0 ? d->gather.processors : d->reduce.processors);
    } else if (desc.reduce)
        return gmm__fail(&gtp->error, GMM_E_NULL, "%s: domain->gather is NULL, reduce is not", fn);
    if (desc.reduction == GMM_GTP_REDUCE_AUTO)
        desc.reduction = d->size > GMM__MAX_EXCHANGE_RANKS ||
                                 (!d->reduce.exchanges && (desc.wire == GMM_F32 || d->size <= 2))
                             ? GMM_GTP_REDUCE_SCATTER
                             : GMM_GTP_REDUCE_EXCHANGE;
    if (desc.reduction == GMM_GTP_REDUCE_EXCHANGE && d->size > GMM__MAX_EXCHANGE_RANKS)
        return gmm__fail(&gtp->error, GMM_E_CONFIG, "%s: reduction by exchange among %d ranks: must be at most %d", fn,
                         d->size, (int)GMM__MAX_EXCHANGE_RANKS);
    if (d->size > 1 && !desc.reduce && !desc.reduce_stream) desc.reduce_stream = desc.gather_stream;
    d->desc = desc;
    if (gmm__gtp_several_streams(gtp, d))
        return gmm__fail(&gtp->error, GMM_E_CONFIG, "%s: a communicator would be called on several streams: give "
                         "gather_stream and reduce_stream one stream, or communicators of their own", fn);
    *id = gtp->domain_count++;
    return GMM_OK;
}

/* The gather layouts of the data and scales of one direction. Buffers that 2D copies assemble have the pitch that
   operations expect: scales that of the unpadded rows, elements that of the padded rows, which views give as ld.
   Buffers that are received in place have their padding at their end. `part` is the layout of a shard, `whole` that
   of the padded weight, `logical` that of the unpadded one. */
static gmm_status gmm__gtp_gather_layouts(const gmm_shard *s, const gmm_shard_plan *p, int direction,
                                          gmm__gtp_weight *w, gmm_error *error) {
    gmm__gather_layout *data = &w->layout[direction][GMM__GTP_DATA], *scale = &w->layout[direction][GMM__GTP_SCALE];
    gmm_layout part = GMM_ZERO, whole = GMM_ZERO, logical = GMM_ZERO;
    const size_t bits = (size_t)gmm_dtype_bits(s->dtype);
    const int sent = p->shard_data_bytes[direction] > 0;
    gmm_status status = gmm_layout_of(s->dtype, s->scaling, GMM_SCALES_COMPACT, (gmm_direction)direction, p->shard_rows,
                                      p->local_cols, &part, error);
    if (!status)
        status = gmm_layout_of(s->dtype, s->scaling, GMM_SCALES_COMPACT, (gmm_direction)direction, p->padded_rows,
                               p->local_cols, &whole, error);
    if (!status)
        status = gmm_layout_of(s->dtype, s->scaling, GMM_SCALES_COMPACT, (gmm_direction)direction, p->local_rows,
                               p->local_cols, &logical, error);
    if (status) return status;
    memset(data, 0, sizeof *data);
    memset(scale, 0, sizeof *scale);
    data->gathered_bytes = (size_t)whole.data_bytes;
    scale->gathered_bytes = (size_t)whole.scale_bytes;
    scale->group_bytes = (size_t)logical.scale_bytes;
    if (part.transposed) w->ld[direction] = whole.data_cols;
    w->transposed |= !sent;
    if (!sent) { /* transposed from the rowwise copy */
        scale->gathered_bytes = scale->group_bytes;
        return GMM_OK;
    }
    data->send_bytes = (size_t)part.data_bytes;
    if (part.transposed) {
        data->staged = 1;
        data->width = data->src_pitch = (size_t)part.data_cols * bits / 8;
        data->valid_width = data->dst_pitch = (size_t)whole.data_cols * bits / 8;
        data->height = (size_t)part.data_rows;
    }
    if (s->scaling != GMM_SCALING_NONE && s->scaling != GMM_SCALING_TENSOR) {
        const size_t bytes = (size_t)gmm_dtype_bits(part.scale_dtype) / 8;
        int64_t block = 1;
        const int along_rows = gmm__gtp_scale_axis(s->scaling, direction, &block);
        scale->send_bytes = (size_t)gmm__gtp_sent_scale_bytes(s->scaling, direction, p->shard_rows, &part);
        if (!along_rows) {
            scale->gathered_bytes = scale->group_bytes;
            scale->staged = 1;
            scale->width = (size_t)(p->shard_rows / block) * bytes;
            scale->valid_width = (size_t)((p->local_rows + block - 1) / block) * bytes;
            scale->src_pitch = (size_t)part.scale_cols * bytes;
            scale->dst_pitch = (size_t)logical.scale_cols * bytes;
            scale->height = (size_t)part.scale_rows;
        }
    }
    return GMM_OK;
}

/* Copies and checks the format in which gmm_gtp_quantize writes a weight. */
static gmm_status gmm__gtp_read_format(const char *fn, gmm__gtp_weight *w, gmm_error *error) {
    gmm_format *f = &w->format;
    gmm_error format_error = GMM_ZERO;
    gmm_status s;
    if (!w->desc.format) return GMM_OK;
    s = gmm__gtp_read(fn, "weight->format", w->desc.format, f, sizeof *f, error);
    w->desc.format = NULL; /* w->format is used from here on */
    if (s) return s;
    f->struct_size = 0;
    s = gmm_format_validate(f, &format_error);
    if (s) return gmm__fail(error, s, "%s: '%s': format: %.300s", fn, w->desc.name, format_error.text);
    if (w->shard.scaling == GMM_SCALING_NONE && f->dtype == GMM_NONE) return GMM_OK;
    if (f->dtype != w->shard.dtype || f->scaling != w->shard.scaling)
        return gmm__fail(error, GMM_E_DTYPE, "%s: '%s': format is %s scaled %s, the shard %s scaled %s", fn,
                         w->desc.name, gmm_dtype_name(f->dtype), gmm_scaling_name(f->scaling),
                         gmm_dtype_name(w->shard.dtype), gmm_scaling_name(w->shard.scaling));
    if (f->order != GMM_SCALES_COMPACT || f->stochastic || f->hadamard || f->row_amax)
        return gmm__fail(error, GMM_E_CONFIG, "%s: '%s': format has order %d, stochastic %d, hadamard 0x%x, row_amax "
                         "%d: shards take none of them", fn, w->desc.name, (int)f->order, f->stochastic,
                         (unsigned)f->hadamard, f->row_amax);
    if (f->scaling == GMM_SCALING_NV16 && !w->desc.amax)
        return gmm__fail(error, GMM_E_NULL, "%s: '%s': amax is NULL, which nv16 is made with", fn, w->desc.name);
    return GMM_OK;
}

GMMDEF gmm_status gmm_gtp_add_weight(gmm_gtp *gtp, const gmm_gtp_weight *weight, int32_t *id) {
    static const char fn[] = "gmm_gtp_add_weight";
    gmm__gtp_weight w;
    int d;
    gmm_status s = gmm__gtp_check_declaration(gtp, fn, "weights", gtp ? gtp->weight_count : 0,
                                              gtp ? gtp->config.weights : 0, id);
    memset(&w, 0, sizeof w);
    if (!s) s = gmm__gtp_read(fn, "weight", weight, &w.desc, sizeof w.desc, &gtp->error);
    if (!s) s = gmm__gtp_plan_shard(fn, w.desc.shard, &w.shard, &w.plan, &gtp->error);
    if (s) return s;
    if (!w.desc.name) w.desc.name = "weight";
    if (w.desc.expert < 0 || w.desc.reserved)
        return gmm__fail(&gtp->error, GMM_E_ARG, "%s: '%s': expert is %d, reserved %d: must be >= 0, and 0", fn,
                         w.desc.name, w.desc.expert, w.desc.reserved);
    for (d = GMM_ROWWISE; d <= GMM_COLUMNWISE; d++) {
        if (w.plan.shard_data_bytes[d] > 0 && !w.desc.data[d])
            return gmm__fail(&gtp->error, GMM_E_NULL, "%s: '%s': data[%d] is NULL: a shard in %s has %lld bytes there",
                             fn, w.desc.name, d, gmm_scaling_name(w.shard.scaling),
                             (long long)w.plan.shard_data_bytes[d]);
        if (w.plan.shard_scale_bytes[d] > 0 && !w.desc.scale[d])
            return gmm__fail(&gtp->error, GMM_E_NULL, "%s: '%s': scale[%d] is NULL: a shard in %s has %lld bytes there",
                             fn, w.desc.name, d, gmm_scaling_name(w.shard.scaling),
                             (long long)w.plan.shard_scale_bytes[d]);
        if (w.plan.gather_data_bytes[d] > 0) s = gmm__gtp_gather_layouts(&w.shard, &w.plan, d, &w, &gtp->error);
        if (s) return s;
    }
    if ((s = gmm__gtp_read_format(fn, &w, &gtp->error)) != GMM_OK) return s;
    if (w.desc.main_grad && w.desc.main_grad_dtype != GMM_F32 && w.desc.main_grad_dtype != GMM_BF16)
        return gmm__fail(&gtp->error, GMM_E_DTYPE, "%s: '%s': main_grad_dtype is %s: must be f32 or bf16", fn,
                         w.desc.name, gmm_dtype_name(w.desc.main_grad_dtype));
    for (d = 0; d < 2; d++) {
        const uintptr_t element = (uintptr_t)(gmm_dtype_bits(w.shard.dtype) + 7) / 8;
        const int bytes = w.shard.scaling == GMM_SCALING_MX32 || w.shard.scaling == GMM_SCALING_NV16;
        if ((uintptr_t)w.desc.data[d] % element || (!bytes && (uintptr_t)w.desc.scale[d] % 4))
            return gmm__fail(&gtp->error, GMM_E_ALIGN, "%s: '%s': data[%d] at %p and scale[%d] at %p must be aligned "
                             "to their elements", fn, w.desc.name, d, w.desc.data[d], d, w.desc.scale[d]);
    }
    if ((uintptr_t)w.desc.amax % 4 ||
        (w.desc.main_grad && (uintptr_t)w.desc.main_grad % (uintptr_t)(gmm_dtype_bits(w.desc.main_grad_dtype) / 8)))
        return gmm__fail(&gtp->error, GMM_E_ALIGN, "%s: '%s': amax at %p and main_grad at %p must be aligned to their "
                         "elements", fn, w.desc.name, (void *)w.desc.amax, w.desc.main_grad);
    w.bundle = -1;
    gtp->weights[gtp->weight_count] = w;
    *id = gtp->weight_count++;
    return GMM_OK;
}

GMMDEF gmm_status gmm_gtp_add_bundle(gmm_gtp *gtp, int32_t domain, const int32_t *weights, int32_t count,
                                     const char *name, int32_t *id) {
    static const char fn[] = "gmm_gtp_add_bundle";
    gmm__gtp_bundle *b;
    const gmm__gtp_domain *d;
    int32_t i, k;
    gmm_status s = gmm__gtp_check_declaration(gtp, fn, "bundles", gtp ? gtp->bundle_count : 0,
                                              gtp ? gtp->config.bundles : 0, id);
    if (s) return s;
    if (!name) name = "bundle";
    if (!weights) return gmm__fail(&gtp->error, GMM_E_NULL, "%s: '%s': weights is NULL", fn, name);
    if (domain < 0 || domain >= gtp->domain_count || count < 1)
        return gmm__fail(&gtp->error, GMM_E_ARG, "%s: '%s': domain %d of %d, %d weights: must exist, and >= 1", fn,
                         name, domain, gtp->domain_count, count);
    d = &gtp->domains[domain];
    for (i = 0; i < count; i++)
        if (weights[i] < 0 || weights[i] >= gtp->weight_count)
            return gmm__fail(&gtp->error, GMM_E_ARG, "%s: '%s': weights[%d] is %d: there are %d", fn, name, i,
                             (int)weights[i], gtp->weight_count);
    for (i = 0; i < count; i++) {
        const gmm__gtp_weight *w = &gtp->weights[weights[i]];
        if (w->bundle >= 0)
            return gmm__fail(&gtp->error, GMM_E_ARG, "%s: '%s': '%s' is in bundle '%s' already", fn, name,
                             w->desc.name, gtp->bundles[w->bundle].name);
        if (w->desc.expert >= count)
            return gmm__fail(&gtp->error, GMM_E_ARG, "%s: '%s': '%s' has expert index %d: a bundle of %d leaves a gap "
                             "below it", fn, name, w->desc.name, (int)w->desc.expert, count);
        for (k = 0; k < i; k++)
            if (weights[k] == weights[i] || gtp->weights[weights[k]].desc.expert == w->desc.expert)
                return gmm__fail(&gtp->error, GMM_E_ARG, "%s: '%s': '%s' and '%s' both have expert index %d", fn, name,
                                 gtp->weights[weights[k]].desc.name, w->desc.name, (int)w->desc.expert);
        if (w->shard.gtp_size != d->size || w->shard.gtp_rank != d->rank)
            return gmm__fail(&gtp->error, GMM_E_CONFIG, "%s: '%s': '%s' is shard %d of %d, domain %d is rank %d of %d",
                             fn, name, w->desc.name, (int)w->shard.gtp_rank, (int)w->shard.gtp_size, domain,
                             (int)d->rank, (int)d->size);
        if (w->shard.dtype != gtp->weights[weights[0]].shard.dtype ||
            w->shard.scaling != gtp->weights[weights[0]].shard.scaling)
            return gmm__fail(&gtp->error, GMM_E_DTYPE, "%s: '%s': '%s' differs in dtype or scaling from '%s'", fn, name,
                             w->desc.name, gtp->weights[weights[0]].desc.name);
        for (k = 0; k < i; k++) {
            const gmm__gtp_weight *x = &gtp->weights[weights[k]];
            if (w->ld[GMM_COLUMNWISE] != x->ld[GMM_COLUMNWISE] && w->plan.local_rows == x->plan.local_rows &&
                w->plan.local_cols == x->plan.local_cols)
                return gmm__fail(&gtp->error, GMM_E_CONFIG, "%s: '%s': '%s' is padded to %lld rows, '%s' to %lld: "
                                 "weights of one shape need one unit, for the ld of their transposed copies", fn, name,
                                 w->desc.name, (long long)w->plan.padded_rows, x->desc.name,
                                 (long long)x->plan.padded_rows);
        }
        if (w->format.e4m3_256 != gtp->weights[weights[0]].format.e4m3_256)
            return gmm__fail(&gtp->error, GMM_E_CONFIG, "%s: '%s': '%s' has e4m3_256 %d, '%s' has %d", fn, name,
                             w->desc.name, w->format.e4m3_256, gtp->weights[weights[0]].desc.name,
                             gtp->weights[weights[0]].format.e4m3_256);
        if (w->shard.scaling == GMM_SCALING_NV16)
            for (k = 0; k < count; k++) {
                const gmm__gtp_weight *x = &gtp->weights[weights[k]];
                if ((x->desc.expert == 0 && !x->desc.amax != !w->desc.amax) ||
                    (x->desc.expert == 0 && w->desc.amax && w->desc.amax != x->desc.amax + w->desc.expert))
                    return gmm__fail(&gtp->error, GMM_E_CONFIG, "%s: '%s': amax of '%s' is at %p: must be %d values "
                                     "behind that of expert 0, at %p", fn, name, w->desc.name, (void *)w->desc.amax,
                                     (int)w->desc.expert, (void *)x->desc.amax);
            }
    }
    b = &gtp->bundles[gtp->bundle_count];
    memset(b, 0, sizeof *b);
    b->name = name;
    b->domain = domain;
    b->first = gtp->member_count;
    b->count = count;
    b->wgrad_slot = -1;
    for (i = 0; i < GMM_GTP_PASSES; i++) b->slot[i] = b->chain[i] = b->position[i] = -1;
    for (i = 0; i < count; i++) {
        gmm__gtp_weight *w = &gtp->weights[weights[i]];
        gtp->members[b->first + w->desc.expert] = weights[i];
        w->bundle = gtp->bundle_count;
        b->trainable += w->desc.main_grad != NULL;
    }
    gtp->member_count += count;
    *id = gtp->bundle_count++;
    return GMM_OK;
}

GMMDEF gmm_status gmm_gtp_add_chain(gmm_gtp *gtp, const gmm_gtp_chain *chain, int32_t *id) {
    static const char fn[] = "gmm_gtp_add_chain";
    gmm_gtp_chain c;
    gmm__gtp_chain *entry;
    int32_t i, k;
    gmm_status s = gmm__gtp_check_declaration(gtp, fn, "chains", gtp ? gtp->chain_count : 0,
                                              gtp ? gtp->config.chains : 0, id);
    if (!s) s = gmm__gtp_read(fn, "chain", chain, &c, sizeof c, &gtp->error);
    if (s) return s;
    if (!c.bundles) return gmm__fail(&gtp->error, GMM_E_NULL, "%s: chain->bundles is NULL", fn);
    if (c.held == 0) c.held = 1;
    if (c.together == 0) c.together = 1;
    if (c.pass < GMM_GTP_FORWARD || c.pass > GMM_GTP_RECOMPUTE || c.count < 1 || c.prefetch < 0 || c.prefetch > 3 ||
        c.held < 1 || c.captured < 0 || c.captured > 1 || c.together < 1 || c.together > GMM__GTP_MAX_TOGETHER ||
        c.reserved)
        return gmm__fail(&gtp->error, GMM_E_ARG, "%s: pass %d, count %d, prefetch %d, held %d, captured %d, together "
                         "%d, reserved %d: must be a gmm_gtp_pass, >= 1, 0 to 3, >= 0, 0 or 1, 0 to %d, and 0", fn,
                         (int)c.pass, c.count, c.prefetch, c.held, c.captured, c.together, c.reserved,
                         (int)GMM__GTP_MAX_TOGETHER);
    for (i = 0; i < c.count; i++) {
        if (c.bundles[i] < 0 || c.bundles[i] >= gtp->bundle_count)
            return gmm__fail(&gtp->error, GMM_E_ARG, "%s: bundles[%d] is %d: there are %d", fn, i,
                             (int)c.bundles[i], gtp->bundle_count);
        for (k = 0; k < i && c.bundles[k] != c.bundles[i]; k++) { }
        if (k < i || gtp->bundles[c.bundles[i]].chain[c.pass] >= 0)
            return gmm__fail(&gtp->error, GMM_E_CONFIG, "%s: bundle '%s' is in a chain of that pass already", fn,
                             gtp->bundles[c.bundles[i]].name);
        k = c.bundles[i - i % c.together];
        if (gtp->bundles[k].domain != gtp->bundles[c.bundles[i]].domain)
            return gmm__fail(&gtp->error, GMM_E_CONFIG, "%s: bundles '%s' and '%s' are gathered together, but of "
                             "domains %d and %d", fn, gtp->bundles[k].name, gtp->bundles[c.bundles[i]].name,
                             gtp->bundles[k].domain, gtp->bundles[c.bundles[i]].domain);
        for (k = 0; k < GMM_GTP_PASSES; k++) {
            const int32_t other = gtp->bundles[c.bundles[i]].chain[k];
            if (other >= 0 && gtp->chains[other].captured != c.captured)
                return gmm__fail(&gtp->error, GMM_E_CONFIG, "%s: bundle '%s' is in a chain that is %scaptured", fn,
                                 gtp->bundles[c.bundles[i]].name, c.captured ? "not " : "");
        }
    }
    entry = &gtp->chains[gtp->chain_count];
    entry->pass = c.pass;
    entry->first = gtp->chain_bundle_count;
    entry->count = c.count;
    entry->prefetch = c.prefetch;
    entry->held = c.held;
    entry->captured = c.captured;
    entry->together = c.together;
    entry->next = -1;
    for (i = 0; i < c.count; i++) {
        gmm__gtp_bundle *b = &gtp->bundles[c.bundles[i]];
        gtp->chain_bundles[gtp->chain_bundle_count++] = c.bundles[i];
        b->chain[c.pass] = gtp->chain_count;
        b->position[c.pass] = i;
        b->captured = c.captured;
    }
    *id = gtp->chain_count++;
    return GMM_OK;
}

