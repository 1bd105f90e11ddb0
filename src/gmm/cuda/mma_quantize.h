#if defined(__CUDACC__) && !defined(GMM_NO_QUANT)

/* --- quantization: plans and launches of the MMA engine --- */

/* Regions of the workspace, behind GMM__ROW_OFFSETS and GMM__TILE_SUMS. */
enum {
    GMM__MMA_QUANT_AMAX = GMM__TILE_SUMS + 1, /* float: the amaxes that gmm__mma_quant_amax_count counts */
    GMM__MMA_QUANT_TABLES,   /* device copies of host tables: per operand, addresses of data and of scales */
    GMM__MMA_QUANT_SUMS,     /* [strips, cols] float: partial sums of the columns, for quantization.db */
    GMM__MMA_QUANT_DOTS,     /* [parts, rows] float: gmm__act_source.dots */
    GMM__MMA_QUANT_DB_TABLE  /* [G] device copy of a host table: addresses of db */
};

/* Number of amaxes in the workspace. counts[0]: one per unit for each of the two copies; counts[1]: one per row;
   counts[2]: one per column and unit. */
static size_t gmm__mma_quant_amax_count(const gmm__call *call, size_t counts[3]) {
    const gmm_format *f = &call->format;
    const size_t units = (size_t)gmm__units(call);
    const size_t rows = (size_t)(gmm__grouped(call) ? call->rows : call->units * call->rows);
    const int by_row = f->scaling == GMM_SCALING_ROW;
    counts[0] = 2 * units;
    counts[1] = by_row || f->row_amax ? rows : 0;
    counts[2] = by_row && call->mat[GMM__COLUMNWISE_COPY].dtype != GMM_NONE ? units * (size_t)call->in : 0;
    return counts[0] + counts[1] + counts[2];
}

/* Describes the activation that the cast computes, without its memory in the workspace. */
static gmm__act_source gmm__mma_act_source(const gmm__call *call) {
    const gmm_activation *d = call->fused.act_source;
    gmm__act_source act;
    memset(&act, 0, sizeof act);
    if (!d) return act;
    act.source = d->dy ? GMM__CAST_OF_GRADIENT : GMM__CAST_OF_ACT;
    act.kind = call->act.kind;
    act.coef = gmm_act_coefficients(&call->act);
    act.gated = gmm_act_gated(call->act.kind);
    act.ffn = (int32_t)d->ffn;
    act.interleave = gmm__mma_act_interleave(call->act.interleave, d->ffn);
    act.layout = gmm__k_act_layout(act.gated, act.interleave);
    act.linear = act.layout == GMM__GLU_PAIRS ? 8 : act.interleave ? act.interleave : act.ffn;
    act.prob = d->prob;
    if (!d->dy) return act;
    act.dy = (const uint16_t *)d->dy->data;
    act.dy_ld = d->dy->ld ? d->dy->ld : d->ffn;
    return act;
}

/* Checks the limits of the kernels, and reserves offsets and strips of the units. */
static int gmm__mma_plan_quant_units(const gmm__call *call, gmm__plan *plan) {
    if (!gmm__mma_takes_scalings(call, plan)) return 0;
    if (gmm__strips(call) > INT32_MAX / GMM_TILE || gmm__units(call) > INT32_MAX - 1)
        return gmm__decline(plan, "takes at most %lld padded rows", (long long)INT32_MAX);
    gmm__cuda_reserve_split(plan, gmm__units(call));
    return 1;
}
static int gmm__mma_plan_quantize(const gmm__call *call, gmm__plan *plan) {
    size_t counts[3];
    if (!gmm__mma_plan_quant_units(call, plan)) return 0;
    gmm__reserve(plan, GMM__MMA_QUANT_AMAX, gmm__mma_quant_amax_count(call, counts) * sizeof(float));
    gmm__reserve(plan, GMM__MMA_QUANT_TABLES, gmm__grouped(call) ? 0 : 6 * (size_t)call->units * sizeof(void *));
    /* a query need not have the address of dprob yet */
    if (call->fused.act_source && (call->fused.act_source->dprob || (call->query && call->fused.act_source->dy)))
        gmm__reserve(plan, GMM__MMA_QUANT_DOTS,
                     (size_t)gmm__ceil_div(call->fused.act_source->ffn, GMM_ACT_DOT_COLS) * (size_t)call->rows *
                         sizeof(float));
    if (call->fused.act_source || call->fused.sums.wanted)
        (void)snprintf(plan->note, sizeof plan->note, "%s%s%s", !call->fused.act_source ? ""
                       : call->fused.act_source->dy ? "computes the activation's gradient" : "computes the activation",
                       call->fused.act_source && call->fused.sums.wanted ? ", " : "",
                       call->fused.sums.wanted ? "adds up columns for the bias gradient" : "");
    if (!call->d.quant.db) return 1;
    gmm__cuda_reserve_table(call, plan, GMM__DB, GMM__MMA_QUANT_DB_TABLE);
    return gmm__mma_reserve_partials(call, plan, call->in, GMM__MMA_QUANT_SUMS);
}

/* Describes an operand with its tables in device memory. Host tables are copied to the tables `slot` (data) and
   slot + 1 (scales) of `region`. */
static cudaError_t gmm__mma_quant_operand(const gmm__plan *plan, int region, int role, int slot, gmm_mat *out,
                                          gmm_stream stream) {
    const gmm_mat *m = &plan->call->mat[role];
    void **table = (void **)gmm__region(plan, region) + slot * plan->call->units;
    cudaError_t e = cudaSuccess;
    *out = *m;
    if (m->dtype == GMM_NONE || !m->table || !(m->flags & (uint32_t)GMM_MAT_TABLE_ON_HOST)) return e;
    out->table = (void *const *)table;
    e = gmm_launch_copy(table, m->table, plan->call->units, stream);
    if (!m->scale_table || e != cudaSuccess) return e;
    out->scale_table = (void *const *)(table + plan->call->units);
    return gmm_launch_copy(table + plan->call->units, m->scale_table, plan->call->units, stream);
}

/* Zeroes the rows of a matrix behind the last group: `bytes` bytes each, `pitch` bytes apart. */
static cudaError_t gmm__mma_zero_quant_tail(const gmm__plan *plan, const int64_t *offsets, const gmm_mat *m,
                                            int64_t bytes, int64_t pitch, const int32_t *skip, gmm_stream stream) {
    gmm__quant_tail_args t;
    memset(&t, 0, sizeof t);
    t.data = (uint8_t *)m->data;
    t.pitch = pitch;
    t.bytes = bytes;
    t.rows = plan->call->rows;
    t.valid_rows = offsets + plan->call->groups.count;
    t.skip = skip;
    return gmm_launch_quantize_tail(&t, gmm__mma_launch_limits(plan->call, 8), stream);
}

/* Whether an operand admits the accesses of the vectorized kernels: k 0 is the rowwise copy, 1 the columnwise one, 2
   the source. An access is eight elements of a row, or 16 bytes of the source or of a transposed copy. */
static int gmm__mma_quant_aligned(const gmm__quant_args *a, const gmm_mat *m, int k) {
    const int mx = a->format.scaling == GMM_SCALING_MX32; /* whose columnwise copies are not transposed */
    const int64_t bits = gmm_dtype_bits(m->dtype), access_bytes = k == 2 || (k == 1 && !mx) ? 16 : bits;
    const uint64_t places = (uintptr_t)m->data | (uint64_t)(m->ld * bits / 8) | (uint64_t)a->step[k];
    if (m->table || (uintptr_t)m->scale % 4 || (k == 2 && m->scaling != GMM_SCALING_NONE)) return 0;
    if (k == 1 && !a->grouped && !mx && a->rows % (a->format.dtype == GMM_E2M1 ? 32 : 16)) return 0;
    return places % (uint64_t)access_bytes == 0;
}

/* Decides whether the vectorized kernels serve the call, and fills in their arguments (see gmm__quant_args). */
static void gmm__mma_quant_vectorized(const gmm__call *call, gmm__quant_args *a) {
    const gmm_format *f = &call->format;
    const gmm_mat *const mat[3] = { &a->rowwise, &a->columnwise, &a->src };
    const int byte_scales = f->scaling == GMM_SCALING_MX32 || f->scaling == GMM_SCALING_NV16;
    const int transformed = f->hadamard && a->columnwise.dtype != GMM_NONE;
    /* the instances with GMM__HADAMARD transform, and round stochastically */
    const int hadamard_instance = transformed || f->stochastic;
    int aligned = a->cols % 8 == 0, served, k;
    for (k = 0; k < 3; k++) {
        const gmm_mat *m = mat[k];
        if (m->dtype == GMM_NONE) continue;
        a->step[k] = a->grouped ? 0 : m->group_stride * gmm_dtype_bits(m->dtype) / 8;
        if (k < 2 && !a->grouped)
            a->scale_step[k] = gmm__scale_count(m->scaling, k ? a->cols : a->rows, k ? a->rows : a->cols) *
                               (byte_scales ? 1 : 4);
        else if (k < 2 && f->scaling == GMM_SCALING_TENSOR) a->scale_step[k] = 4;
        aligned = aligned && gmm__mma_quant_aligned(a, m, k);
    }
    served = aligned && a->cols <= INT32_MAX / 2 && a->rows <= INT32_MAX / 2 && !f->four_over_six && !f->row_amax &&
             !(hadamard_instance && a->src.dtype != GMM_BF16) &&
             !(f->dtype == GMM_E2M1 && f->scaling == GMM_SCALING_MX32);
    a->vectorized = !served ? GMM__VECTORIZED_NO : hadamard_instance ? GMM__VECTORIZED_HADAMARD : GMM__VECTORIZED;
    if (!served) return;
    a->groups = call->groups;
    a->warp_split = a->grouped && call->groups.count <= 32 && !call->groups.on_host &&
                    call->groups.tail == GMM_TAIL_KEEP && !call->d.quant.db;
    a->record = f->delayed && a->phase != GMM_QUANT_AMAX && (a->rowwise.amax || a->columnwise.amax);
    a->backward = f->scaling == GMM_SCALING_ROW || f->scaling == GMM_SCALING_NV16 ||
                  (f->scaling == GMM_SCALING_TENSOR && !f->delayed);
    if (a->phase == GMM_QUANT_ALL && !transformed) a->amax[1] = a->amax[0]; /* both copies have the same values */
    if (a->phase != GMM_QUANT_CAST) return;
    a->amax[0] = a->rowwise.dtype != GMM_NONE ? a->rowwise.amax : a->columnwise.amax;
    a->amax[1] = a->columnwise.dtype != GMM_NONE && f->scaling == GMM_SCALING_NV16 ? a->columnwise.amax : a->amax[0];
}

/* Enqueues the kernel of the partial sums unless the cast has written them, and quantization.db, which adds them up, if
   it is wanted. */
static gmm_status gmm__mma_quant_bgrad(const gmm__plan *plan, float *partials, int has_partials, gmm_stream stream) {
    const gmm__call *call = plan->call;
    const gmm_quantization *d = &call->d.quant;
    gmm__cuda_split split;
    gmm_bgrad_args args;
    gmm_status s;
    if (has_partials && !d->db) return GMM_OK;
    s = gmm__cuda_split_of(plan, GMM__TILES_128, NULL, &split, stream);
    if (s != GMM_OK) return s;
    memset(&args, 0, sizeof args);
    args.partials = partials;
    args.has_partials = has_partials;
    args.bias_scale = call->fused.sums.scale;
    args.dy_index = gmm__cuda_row_index(call, d->src_index, d->index_rows, d->index_div);
    return gmm__mma_enqueue_bgrad(plan, &split, GMM__SOURCE, call->in, GMM__MMA_QUANT_DB_TABLE, &args, stream);
}

/* Enqueues the sum of the parts of dprob that the cast of a gradient has written. */
static gmm_status gmm__mma_quant_dprob(const gmm__plan *plan, const gmm__act_source *act, gmm_stream stream) {
    const gmm__call *call = plan->call;
    gmm__dprob_args args;
    const int64_t *offsets;
    const gmm_status s = gmm__mma_row_offsets(plan, &offsets, stream);
    if (s != GMM_OK) return s;
    memset(&args, 0, sizeof args);
    args.dots = act->dots;
    args.valid_rows = offsets + call->groups.count;
    args.rows = call->rows;
    args.ffn = act->ffn;
    args.tail_zero = call->groups.tail == GMM_TAIL_ZERO;
    args.dprob = call->fused.act_source->dprob;
    return gmm__cuda_status(call, gmm__k_dprob(&args, gmm__mma_launch_limits(call, 8), stream));
}

/* Enqueues offsets, amaxes, casts, zeros behind the last group, and the bias gradient. */
static gmm_status gmm__mma_launch_quantize(const gmm__plan *plan, gmm_stream stream) {
    const gmm__call *call = plan->call;
    const gmm_quantization *d = &call->d.quant;
    const gmm_format *f = &call->format;
    const int takes_amax = d->phase != GMM_QUANT_CAST, casts = d->phase != GMM_QUANT_AMAX; /* the call's phases */
    const int records_amax = f->delayed && (call->mat[GMM__ROWWISE_COPY].amax || call->mat[GMM__COLUMNWISE_COPY].amax);
    int scales_by_amax; /* scales are computed from amaxes, which a kernel before the cast takes */
    size_t counts[3], floats = gmm__mma_quant_amax_count(call, counts);
    float *amax = (float *)gmm__region(plan, GMM__MMA_QUANT_AMAX);
    float *partials = call->fused.sums.wanted ? call->fused.sums.partials
                      : d->db                 ? (float *)gmm__region(plan, GMM__MMA_QUANT_SUMS) : NULL;
    gmm__quant_args a;
    gmm_status s;
    cudaError_t e;
    int k;

    memset(&a, 0, sizeof a);
    a.format = *f;
    a.grouped = gmm__grouped(call);
    a.phase = d->phase;
    a.first_group = d->first_group;
    a.units = gmm__units(call);
    a.rows = call->rows;
    a.cols = call->in;
    a.act = gmm__mma_act_source(call);
    if (a.act.dy && call->fused.act_source->dprob) a.act.dots = (float *)gmm__region(plan, GMM__MMA_QUANT_DOTS);
    a.col_tiles = gmm__ceil_div(a.act.dy ? a.act.ffn : call->in, GMM_TILE);
    a.amax[0] = amax;
    a.amax[1] = amax + a.units;
    if (counts[1]) a.row_amax = amax + counts[0];
    if (counts[2]) a.col_amax = amax + counts[0] + counts[1];
    a.scale = d->scale;
    a.skip = d->skip;
    a.random = d->random;
    a.index = gmm__cuda_row_index(call, d->src_index, d->index_rows, d->index_div);
    e = gmm__mma_quant_operand(plan, GMM__MMA_QUANT_TABLES, GMM__SOURCE, 0, &a.src, stream);
    if (e == cudaSuccess)
        e = gmm__mma_quant_operand(plan, GMM__MMA_QUANT_TABLES, GMM__ROWWISE_COPY, 2, &a.rowwise, stream);
    if (e == cudaSuccess)
        e = gmm__mma_quant_operand(plan, GMM__MMA_QUANT_TABLES, GMM__COLUMNWISE_COPY, 4, &a.columnwise, stream);
    gmm__mma_quant_vectorized(call, &a);
    if (a.vectorized) a.sums = partials;
    a.sum_scale = call->fused.sums.scale;
    /* gmm__mlp_cast_fusion_of fuses only what the vectorized kernels serve */
    if (e == cudaSuccess && call->fused.act_source && !a.vectorized)
        return gmm__refuse(call, GMM_E_UNSUPPORTED, "options.engine", "mma has no kernel that casts this activation: "
                           "%d columns, ld %lld", (int)a.cols, (long long)a.src.ld);
    if (e == cudaSuccess && a.grouped && !a.warp_split) {
        gmm__cuda_split split;
        s = gmm__cuda_split_of(plan, GMM__TILES_128, NULL, &split, stream);
        if (s != GMM_OK) return s;
        a.offsets = split.offsets;
        a.tiles = split.tiles[GMM__TILES_128];
    }
    scales_by_amax = gmm__amax_by_unit(f) || a.row_amax || a.col_amax;
    if (e == cudaSuccess && takes_amax && (scales_by_amax || records_amax))
        e = gmm_launch_fill(amax, 0, (int64_t)floats, call->options.sm_limit, gmm__cuda_pdl(call), stream);
    if (e != cudaSuccess) return gmm__cuda_status(call, e);
    a.source = a.src.scaling == GMM_SCALING_NONE ? a.src.dtype : GMM_F32;
    e = gmm_launch_quantize(&a, takes_amax && (scales_by_amax || (records_amax && !a.record)), casts, gmm__strips(call),
                            gmm__mma_launch_limits(call, GMM__QUANT_PER_SM).max_ctas,
                            gmm__mma_launch_limits(call, a.skip ? (int32_t)GMM__QUANT_SKIPPABLE_PER_SM
                                                                : (int32_t)GMM__ELEM_STREAM_PER_SM),
                            stream);
    for (k = 0; k < 2 && a.grouped && call->groups.tail == GMM_TAIL_ZERO && casts; k++) {
        const gmm_mat *m = &call->mat[k ? GMM__COLUMNWISE_COPY : GMM__ROWWISE_COPY];
        const int64_t bits = gmm_dtype_bits(m->dtype);
        if (m->dtype == GMM_NONE || (k && f->scaling != GMM_SCALING_MX32) || e != cudaSuccess) continue;
        e = gmm__mma_zero_quant_tail(plan, a.offsets, m, call->in * bits / 8, m->ld * bits / 8, d->skip, stream);
    }
    s = gmm__cuda_status(call, e);
    if (s == GMM_OK && partials) s = gmm__mma_quant_bgrad(plan, partials, a.sums != NULL, stream);
    if (s == GMM_OK && a.act.dots) s = gmm__mma_quant_dprob(plan, &a.act, stream);
    return s;
}

static int gmm__mma_plan_dequantize(const gmm__call *call, gmm__plan *plan) {
    if (!gmm__mma_plan_quant_units(call, plan)) return 0;
    gmm__reserve(plan, GMM__MMA_QUANT_TABLES, gmm__grouped(call) ? 0 : 3 * (size_t)call->units * sizeof(void *));
    return 1;
}
static gmm_status gmm__mma_launch_dequantize(const gmm__plan *plan, gmm_stream stream) {
    const gmm__call *call = plan->call;
    const gmm_mat *dst = &call->mat[GMM__ROWWISE_COPY];
    gmm__dequant_args a;
    cudaError_t e;
    memset(&a, 0, sizeof a);
    a.direction = call->d.dequant.direction;
    a.grouped = gmm__grouped(call);
    a.units = gmm__units(call);
    a.rows = call->rows;
    a.cols = call->in;
    a.col_tiles = gmm__ceil_div(call->in, GMM_TILE);
    if (a.grouped) {
        gmm__cuda_split split;
        const gmm_status s = gmm__cuda_split_of(plan, GMM__TILES_128, NULL, &split, stream);
        if (s != GMM_OK) return s;
        a.offsets = split.offsets;
        a.tiles = split.tiles[GMM__TILES_128];
    }
    e = gmm__mma_quant_operand(plan, GMM__MMA_QUANT_TABLES, GMM__SOURCE, 0, &a.src, stream);
    if (e == cudaSuccess) e = gmm__mma_quant_operand(plan, GMM__MMA_QUANT_TABLES, GMM__ROWWISE_COPY, 2, &a.dst, stream);
    if (e == cudaSuccess)
        e = gmm_launch_dequantize(&a, gmm__strips(call) * a.col_tiles,
                                  gmm__mma_launch_limits(call, GMM__QUANT_PER_SM), stream);
    if (e == cudaSuccess && a.grouped && call->groups.tail == GMM_TAIL_ZERO) {
        const int64_t size = gmm_dtype_bits(dst->dtype) / 8;
        e = gmm__mma_zero_quant_tail(plan, a.offsets, dst, call->in * size, dst->ld * size, NULL, stream);
    }
    return gmm__cuda_status(call, e);
}

/* One matrix needs no workspace: the only address of its host table is passed to the kernel. */
static int gmm__mma_plan_transpose(const gmm__call *call, gmm__plan *plan) {
    gmm__reserve(plan, GMM__MMA_QUANT_TABLES, call->units > 1 ? 4 * (size_t)call->units * sizeof(void *) : 0);
    return 1;
}
static cudaError_t gmm__mma_transpose_operand(const gmm__plan *plan, int role, int slot, gmm_mat *out,
                                              gmm_stream stream) {
    const gmm_mat *m = &plan->call->mat[role];
    if (plan->call->units > 1 || !m->table || !(m->flags & (uint32_t)GMM_MAT_TABLE_ON_HOST))
        return gmm__mma_quant_operand(plan, GMM__MMA_QUANT_TABLES, role, slot, out, stream);
    *out = *m;
    out->data = m->table[0];
    out->scale = m->scale_table[0];
    out->table = out->scale_table = NULL;
    return cudaSuccess;
}
static gmm_status gmm__mma_launch_transpose(const gmm__plan *plan, gmm_stream stream) {
    const gmm__call *call = plan->call;
    gmm__transpose_args a;
    cudaError_t e;
    memset(&a, 0, sizeof a);
    a.units = gmm__units(call);
    a.rows = call->rows;
    a.cols = call->in;
    e = gmm__mma_transpose_operand(plan, GMM__SOURCE, 0, &a.src, stream);
    if (e == cudaSuccess) e = gmm__mma_transpose_operand(plan, GMM__ROWWISE_COPY, 2, &a.dst, stream);
    if (e == cudaSuccess)
        e = gmm_launch_transpose(&a, gmm__mma_launch_limits(call, GMM__TRANSPOSE_PER_SM), stream);
    return gmm__cuda_status(call, e);
}

static gmm_status gmm__mma_launch_scale_update(const gmm__plan *plan, gmm_stream stream) {
    const gmm_scale_update *d = &plan->call->d.update;
    gmm__update_args a;
    memset(&a, 0, sizeof a);
    a.history = d->history;
    a.scale = d->scale;
    a.slots = d->slots;
    a.stride = d->stride;
    a.length = d->history_length;
    a.margin = d->margin;
    a.most_recent = d->most_recent;
    a.qmax = gmm_dtype_largest(d->dtype);
    return gmm__cuda_status(plan->call, gmm_launch_update_scales(&a, gmm__cuda_pdl(plan->call), stream));
}

static gmm_status gmm__mma_launch_shard_cast(const gmm__plan *plan, gmm_stream stream) {
    const gmm__shard_args a = gmm__shard_of(plan->call);
    const int amax = plan->call->d.shard.phase == GMM_QUANT_AMAX;
    cudaError_t e = cudaSuccess;
    if (amax)
        e = gmm_launch_fill(a.amax, 0, gmm__shard_floats(&a), plan->call->options.sm_limit,
                            gmm__cuda_pdl(plan->call), stream);
    if (e == cudaSuccess) e = gmm_launch_shard_cast(&a, amax, gmm__mma_streaming_limits(plan->call), stream);
    return gmm__cuda_status(plan->call, e);
}

#endif /* __CUDACC__, GMM_NO_QUANT */

