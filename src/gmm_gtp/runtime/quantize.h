/* Reduction of amaxes over ranks (gmm_gtp_amax), and quantization of shards (gmm_gtp_quantize). */

/* Raises values to the largest over the ranks of a domain, and then over those of a further communicator (NULL =
   none). `stream` waits for the result. */
static gmm_status gmm__gtp_reduce_amax(gmm_gtp *g, gmm__gtp_domain *d, const gmm_comm *further, float *values,
                                       int32_t count, gmm_stream stream) {
    const int sharded = d->size > 1;
    const gmm_stream comm_stream = sharded ? d->desc.gather_stream : stream;
    gmm__watch *watch = NULL;
    gmm_status s = GMM_OK;
    int k;
    if (count == 0 || (!sharded && !further)) return GMM_OK;
    if (sharded) {
        s = gmm__gtp_prepare_stream(g, d, GMM__GTP_GATHER);
        if (!s) s = g->runtime.event_record(g->runtime.self, d->fork[GMM__GTP_GATHER], stream, 0);
        if (!s) s = g->runtime.stream_wait(g->runtime.self, comm_stream, d->fork[GMM__GTP_GATHER], 0);
        if (!s) s = gmm__watch_begin(g, d, GMM__GTP_GATHER, &watch);
    }
    for (k = 0; k < 2 && !s; k++) {
        const gmm_comm *c = k ? further : sharded ? &d->gather : NULL;
        if (!c) continue;
        g->further = k ? further : NULL;
        gmm__gtp_set_collective(g, d, "all_reduce_max");
        s = c->group_begin(c->self, "amax");
        if (!s) s = c->all_reduce_max(c->self, values, (size_t)count, comm_stream);
        if (!s) s = c->group_end(c->self);
        if (!s) g->collective = NULL, g->further = NULL;
        if (!s && !k) s = gmm__watch_end(g, d, GMM__GTP_GATHER, watch, c, "all_reduce_max", "amax");
    }
    return s || !sharded ? s : gmm__gtp_join_stream(g, d, GMM__GTP_GATHER, stream);
}

GMMDEF gmm_status gmm_gtp_amax(gmm_gtp *gtp, int32_t domain, float *values, int32_t count, gmm_stream stream) {
    static const char fn[] = "gmm_gtp_amax";
    gmm__gtp_domain *d;
    gmm_status s = gmm__gtp_check_call(gtp, fn, GMM__GTP_NO_CAPTURE);
    if (s) return s;
    if (domain < 0 || domain >= gtp->domain_count || count < 0)
        return gmm__fail(&gtp->error, GMM_E_ARG, "%s: domain %d of %d, count %d: must exist, and >= 0", fn, domain,
                         gtp->domain_count, count);
    if (!values && count) return gmm__fail(&gtp->error, GMM_E_NULL, "%s: values is NULL", fn);
    if ((uintptr_t)values % sizeof *values)
        return gmm__fail(&gtp->error, GMM_E_ALIGN, "%s: values %p is not aligned to fp32", fn, (void *)values);
    d = &gtp->domains[domain];
    gmm__gtp_hash(gtp, 4, domain, 0);
    s = gmm__gtp_reduce_amax(gtp, d, NULL, values, count, stream);
    return s ? gmm__gtp_fail(gtp, fn, "amax", s) : GMM_OK;
}

/* Enqueues the amax of one weight (phase AMAX) or the quantization of its shard; `index` is that of the weight in q. */
static gmm_status gmm__gtp_enqueue_cast(gmm_gtp *g, const gmm__gtp_weight *w, const gmm_gtp_quantization *q,
                                        int32_t index, float *amax, gmm_quant_phase phase, gmm_stream stream) {
    const gmm__gtp_domain *d = &g->domains[g->bundles[w->bundle].domain];
    const size_t elements = (size_t)w->plan.shard_rows * (size_t)w->plan.local_cols;
    gmm__gtp_cast c = gmm__gtp_cast_make(g, w, q->dtype, q->from[index]);
    gmm_range ranges[8];
    gmm_work work;
    int32_t n = 0;
    int k;
    memset(ranges, 0, sizeof ranges);
    memset(&work, 0, sizeof work);
    c.d.phase = phase;
    c.d.scale = w->format.delayed && q->scale ? q->scale + index : NULL;
    c.copy[GMM_ROWWISE].amax = c.copy[GMM_COLUMNWISE].amax = amax;
    c.workspace = d->gather_base ? d->gather_base + d->cast_offset : NULL;
    c.workspace_bytes = d->cast_bytes;
    ranges[n].data = c.src.data;
    ranges[n++].bytes = elements * (size_t)gmm_dtype_bits(q->dtype) / 8;
    for (k = GMM_ROWWISE; k <= GMM_COLUMNWISE && phase != GMM_QUANT_AMAX; k++) {
        ranges[n].data = c.stored[k] ? w->desc.data[k] : NULL;
        ranges[n].bytes = (size_t)w->plan.shard_data_bytes[k];
        ranges[n++].writes = 1;
        ranges[n].data = c.stored[k] ? w->desc.scale[k] : NULL;
        ranges[n].bytes = (size_t)w->plan.shard_scale_bytes[k];
        ranges[n++].writes = 1;
    }
    ranges[n].data = amax;
    ranges[n].bytes = amax ? sizeof *amax : 0;
    ranges[n++].writes = phase != GMM_QUANT_CAST;
    ranges[n].data = c.d.scale;
    ranges[n++].bytes = c.d.scale ? sizeof(float) : 0;
    if (w->format.dtype != GMM_NONE) {
        ranges[n].data = c.workspace;
        ranges[n].bytes = c.workspace_bytes;
        ranges[n++].writes = 1;
    }
    work.name = phase == GMM_QUANT_AMAX ? "amax of a shard" : "quantize a shard";
    work.function = gmm__gtp_cast_run;
    work.argument = &c;
    work.argument_bytes = sizeof c;
    work.ranges = ranges;
    work.range_count = n;
    return g->runtime.run(g->runtime.self, &work, stream);
}

/* Checks the arguments of gmm_gtp_quantize. */
static gmm_status gmm__gtp_check_cast(gmm_gtp *g, const char *fn, const int32_t *weights, int32_t count,
                                      const gmm_gtp_quantization *q) {
    int32_t i, k;
    if (q->dtype != GMM_F32 && q->dtype != GMM_F16 && q->dtype != GMM_BF16)
        return gmm__fail(&g->error, GMM_E_DTYPE, "%s: dtype is %s: must be f32, f16 or bf16", fn,
                         gmm_dtype_name(q->dtype));
    if (!q->from && count) return gmm__fail(&g->error, GMM_E_NULL, "%s: from is NULL", fn);
    if (((uintptr_t)q->scale | (uintptr_t)q->amax) % sizeof(float))
        return gmm__fail(&g->error, GMM_E_ALIGN, "%s: scale %p and amax %p must be aligned to 4 bytes", fn,
                         (const void *)q->scale, (void *)q->amax);
    if (q->also && (!q->also->group_begin || !q->also->group_end || !q->also->all_reduce_max))
        return gmm__fail(&g->error, GMM_E_NULL, "%s: also->%s is NULL: group_begin, group_end and all_reduce_max are "
                         "needed", fn, !q->also->group_begin ? "group_begin" : !q->also->group_end ? "group_end"
                         : "all_reduce_max");
    for (i = 0; i < count; i++) {
        const gmm__gtp_weight *w = &g->weights[weights[i]];
        for (k = 0; k < i; k++)
            if (weights[k] == weights[i])
                return gmm__fail(&g->error, GMM_E_ARG, "%s: '%s' is named twice", fn, w->desc.name);
        if (!q->from[i]) return gmm__fail(&g->error, GMM_E_NULL, "%s: from[%d] ('%s') is NULL", fn, i,
                                          w->desc.name);
        if ((uintptr_t)q->from[i] % (uintptr_t)(gmm_dtype_bits(q->dtype) / 8))
            return gmm__fail(&g->error, GMM_E_ALIGN, "%s: from[%d] at %p is not aligned to its %s elements", fn, i,
                             q->from[i], gmm_dtype_name(q->dtype));
        if (w->shard.scaling != GMM_SCALING_NONE && w->format.dtype == GMM_NONE)
            return gmm__fail(&g->error, GMM_E_CONFIG, "%s: '%s' was declared without a format", fn, w->desc.name);
    }
    return GMM_OK;
}

GMMDEF gmm_status gmm_gtp_quantize(gmm_gtp *gtp, const int32_t *weights, int32_t count,
                                   const gmm_gtp_quantization *quantization, gmm_stream stream) {
    static const char fn[] = "gmm_gtp_quantize";
    gmm_gtp_quantization q = GMM_ZERO;
    gmm_comm also;
    int32_t i, k, n, pass;
    gmm_status s = gmm__gtp_check_call(gtp, fn, GMM__GTP_NO_CAPTURE);
    if (!s) s = gmm__gtp_read(fn, "quantization", quantization, &q, sizeof q, &gtp->error);
    if (!s && q.also) s = gmm__gtp_read(fn, "quantization->also", q.also, &also, sizeof also, &gtp->error);
    if (q.also) q.also = &also;
    if (!s) s = gmm__gtp_check_weights(gtp, fn, weights, count);
    if (!s) s = gmm__gtp_check_cast(gtp, fn, weights, count, &q);
    if (s) return s;
    gmm__gtp_hash(gtp, 5, count, 0);
    s = gmm__gtp_fence_gathers(gtp, stream);
    for (k = 0; k < gtp->domain_count && !s; k++) s = gmm__gtp_event_wait(gtp, &gtp->domains[k].cast, stream);
    for (pass = 0; pass < 2 && !s; pass++) /* first the amaxes, with one reduction per domain, then the shards */
        for (k = 0; k < gtp->domain_count && !s; k++) {
            gmm__gtp_domain *d = &gtp->domains[k];
            float *values = d->gather_base ? (float *)(void *)(d->gather_base + d->amax_offset) : NULL;
            for (i = 0, n = 0; i < count && !s; i++) {
                const gmm__gtp_weight *w = &gtp->weights[weights[i]];
                const int needs_amax = gmm__gtp_needs_amax(w);
                if (gtp->bundles[w->bundle].domain != k) continue;
                if (needs_amax) {
                    s = gmm__gtp_enqueue_cast(gtp, w, &q, i, values + n, pass ? GMM_QUANT_CAST : GMM_QUANT_AMAX,
                                              stream);
                    if (!s && pass && w->desc.amax)
                        s = gtp->runtime.copy(gtp->runtime.self, w->desc.amax, values + n, sizeof(float), stream);
                    n++;
                } else if (pass) {
                    s = gmm__gtp_enqueue_cast(gtp, w, &q, i, w->format.delayed && q.amax ? q.amax + i : NULL,
                                              GMM_QUANT_ALL, stream);
                }
            }
            if (!s && !pass) s = gmm__gtp_reduce_amax(gtp, d, q.also, values, n, stream);
            /* delayed scaling: the amaxes of consecutive weights of the domain are reduced together */
            for (i = 0; i < count && pass && q.amax && !s; i += n ? n : 1) {
                for (n = 0; i + n < count; n++) {
                    const gmm__gtp_weight *w = &gtp->weights[weights[i + n]];
                    if (!w->format.delayed || gtp->bundles[w->bundle].domain != k) break;
                }
                s = gmm__gtp_reduce_amax(gtp, d, q.also, q.amax + i, n, stream);
            }
        }
    for (k = 0; k < gtp->domain_count && !s; k++) s = gmm__gtp_event_record(gtp, &gtp->domains[k].cast, stream);
    if (!s) s = gmm__gtp_record_publish(gtp, weights, count, stream);
    return s ? gmm__gtp_fail(gtp, fn, "shards", s) : GMM_OK;
}

