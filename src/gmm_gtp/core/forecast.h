/* Forecast of the memory and of the time of a training step. */

/* *sum += a * b * c; returns 0 if that overflows. */
static int gmm__gtp_add_product(int64_t *sum, int64_t a, int64_t b, int64_t c) {
    int64_t product = 0;
    if (!gmm__mul(a, b, &product) || !gmm__mul(product, c, &product) || *sum > INT64_MAX - product) return 0;
    *sum += product;
    return 1;
}

GMMDEF gmm_status gmm_gtp_memory_add(const gmm_gtp_use *use, gmm_gtp_memory *memory, gmm_error *error) {
    static const char fn[] = "gmm_gtp_memory_add";
    gmm_gtp_use u;
    gmm_gtp_memory m;
    gmm_shard s, one;
    gmm_shard_plan p, whole;
    int64_t weights = 0, elements = 0, gradient, wire, received;
    int32_t d, gtp_size, sharded, fits;
    gmm_status status = GMM_OK;
    const size_t common = gmm__gtp_common_size(fn, "memory", memory, sizeof *memory, &status, error);
    if (status) return status;
    status = gmm__gtp_read(fn, "memory", memory, &m, sizeof m, error);
    if (status) return status;
    status = gmm__gtp_read(fn, "use", use, &u, sizeof u, error);
    if (status) return status;
    status = gmm__gtp_plan_shard(fn, u.shard, &s, &p, error);
    if (status) return status;
    if (u.bundle < 0 || u.layers < 0 || u.optimizer_bytes < 0 || u.optimizer_ranks < 0)
        return gmm__fail(error, GMM_E_ARG, "%s: bundle %d, layers %lld, optimizer_bytes %d, optimizer_ranks %d: must "
                         "be >= 0", fn, u.bundle, (long long)u.layers, u.optimizer_bytes, u.optimizer_ranks);
    if (u.gather_slots < 0 || u.recompute_slots < 0 || u.wgrad_slots < 0 || u.reduce_slots < 0)
        return gmm__fail(error, GMM_E_ARG, "%s: slots of gather %d, recompute %d, wgrad %d, reduce %d: must be >= 0",
                         fn, u.gather_slots, u.recompute_slots, u.wgrad_slots, u.reduce_slots);
    if (u.all_to_all != 0 && u.all_to_all != 1)
        return gmm__fail(error, GMM_E_ARG, "%s: all_to_all is %d: must be 0 or 1", fn, u.all_to_all);
    if (u.reserved != 0)
        return gmm__fail(error, GMM_E_ARG, "%s: reserved is %d: must be 0", fn, u.reserved);
    if (u.main_grad != GMM_NONE && u.main_grad != GMM_F32 && u.main_grad != GMM_BF16)
        return gmm__fail(error, GMM_E_DTYPE, "%s: main_grad is %s (%d): must be f32, bf16 or none", fn,
                         gmm_dtype_name(u.main_grad), (int)u.main_grad);
    if (u.wire != GMM_NONE && u.wire != GMM_F32 && u.wire != GMM_BF16)
        return gmm__fail(error, GMM_E_DTYPE, "%s: wire is %s (%d): must be f32, bf16 or none", fn,
                         gmm_dtype_name(u.wire), (int)u.wire);
    if (u.main_grad == GMM_NONE && (u.wgrad_slots || u.reduce_slots || u.wire != GMM_NONE))
        return gmm__fail(error, GMM_E_CONFIG, "%s: main_grad is none, but wgrad_slots %d, reduce_slots %d, wire %s: a "
                         "frozen weight has no gradient", fn, u.wgrad_slots, u.reduce_slots,
                         gmm_dtype_name(u.wire));
    if (u.bundle == 0) u.bundle = 1;
    if (u.layers == 0) u.layers = 1;
    if (u.optimizer_ranks == 0) u.optimizer_ranks = 1;
    if (u.optimizer_bytes == 0) u.optimizer_bytes = 12;

    gtp_size = s.gtp_size;
    sharded = gtp_size > 1;
    s.struct_size = 0; /* the same weight on one rank, for whole_weights */
    s.gtp_size = 1;
    s.gtp_rank = 0;
    status = gmm__gtp_plan_shard(fn, &s, &one, &whole, error);
    if (status) return status;

    gradient = u.main_grad == GMM_NONE ? 0 : gmm_dtype_bits(u.main_grad) / 8;
    wire = u.main_grad == GMM_NONE ? 0 : gmm_dtype_bits(u.wire == GMM_NONE ? GMM_F32 : u.wire) / 8;
    received = u.all_to_all ? p.padded_rows : p.shard_rows;
    fits = gmm__gtp_add_product(&weights, u.layers, u.bundle, 1) &&
           gmm__gtp_add_product(&elements, p.shard_rows, p.local_cols, weights);
    for (d = GMM_ROWWISE; fits && d <= GMM_COLUMNWISE; d++) {
        const int64_t slots = u.gather_slots + (d == GMM_ROWWISE ? (int64_t)u.recompute_slots : 0);
        const int gathered = sharded || p.shard_data_bytes[d] == 0;
        fits = gmm__gtp_add_product(&m.weights, p.shard_data_bytes[d], weights, 1) &&
               gmm__gtp_add_product(&m.weights, p.shard_scale_bytes[d], weights, 1) &&
               gmm__gtp_add_product(&m.whole_weights, whole.shard_data_bytes[d], weights, 1) &&
               gmm__gtp_add_product(&m.whole_weights, whole.shard_scale_bytes[d], weights, 1) &&
               gmm__gtp_add_product(&m.gather, p.gather_data_bytes[d], gathered ? slots : 0, u.bundle) &&
               gmm__gtp_add_product(&m.gather, p.gather_scale_bytes[d], gathered ? slots : 0, u.bundle);
    }
    if (fits && gradient)
        fits = gmm__gtp_add_product(&m.main_grads, elements, gradient, 1) &&
               gmm__gtp_add_product(&m.optimizer, elements / u.optimizer_ranks + (elements % u.optimizer_ranks != 0),
                                    u.optimizer_bytes, 1);
    if (fits && gradient) { /* one rank has gradient buffers too, since it scales and adds as several do */
        int64_t row = 0; /* bytes of a row of every gradient in the bundle */
        fits = gmm__gtp_add_product(&row, p.local_cols, wire, u.bundle) &&
               gmm__gtp_add_product(&m.wgrad, row, p.padded_rows, u.wgrad_slots) &&
               gmm__gtp_add_product(&m.reduce, row, sharded ? received : 0, u.reduce_slots);
    }
    if (fits && sharded) {
        int64_t stage[2] = {0, 0}; /* bytes that a rank receives of each rank in the stage, by direction */
        const int64_t *data = p.shard_data_bytes, *scale = p.shard_scale_bytes;
        const int transposed = p.gather_data_bytes[GMM_COLUMNWISE] > 0 && data[GMM_COLUMNWISE] == 0;
        if (transposed) stage[1] = data[GMM_ROWWISE] + (s.scaling == GMM_SCALING_TENSOR ? 0 : scale[GMM_ROWWISE]);
        if (s.scaling == GMM_SCALING_1X128) stage[0] = scale[GMM_ROWWISE], stage[1] = data[GMM_COLUMNWISE];
        if (s.scaling == GMM_SCALING_NV16) stage[1] = data[GMM_COLUMNWISE] + scale[GMM_COLUMNWISE];
        for (d = GMM_ROWWISE; fits && d <= GMM_COLUMNWISE; d++) {
            int64_t bytes = 0;
            fits = gmm__gtp_add_product(&bytes, stage[d], gtp_size, u.bundle);
            if (u.gather_slots && bytes > m.stage) m.stage = bytes;
        }
    }
    m.total = 0;
    fits = fits && gmm__gtp_add_product(&m.total, m.stage, 1, 1) && gmm__gtp_add_product(&m.total, m.weights, 1, 1) &&
           gmm__gtp_add_product(&m.total, m.main_grads, 1, 1) &&
           gmm__gtp_add_product(&m.total, m.optimizer, 1, 1) && gmm__gtp_add_product(&m.total, m.gather, 1, 1) &&
           gmm__gtp_add_product(&m.total, m.wgrad, 1, 1) && gmm__gtp_add_product(&m.total, m.reduce, 1, 1);
    if (!fits)
        return gmm__fail(error, GMM_E_OVERFLOW, "%s: the bytes of %lld layers of %d weights of %lld x %lld do not fit "
                         "64 bits", fn, (long long)u.layers, u.bundle, (long long)p.local_rows,
                         (long long)p.local_cols);
    memcpy(memory, &m, common);
    return GMM_OK;
}

enum { GMM__GTP_STAGES = 4096, GMM__GTP_MAX_TOGETHER = 8 /* bundles gathered by one group call */ };

/* Seconds of a bundle's gathers in forward and backward, and of the transpose in backward; bytes from other ranks. */
typedef struct gmm__gtp_gather_cost {
    double gather[2], transpose;
    int64_t gathered[2], reduced;
    int shared;     /* 1: both passes read the same copy */
    int transposed; /* 1: backward reads a transpose of the copy of forward */
} gmm__gtp_gather_cost;

/* Computes the times in seconds that the collectives and products of a stage take when nothing else runs. */
static gmm_status gmm__gtp_stage_cost(const char *fn, const gmm_gtp_forecast *f, gmm_gtp_stage *x,
                                      gmm__gtp_gather_cost *cost, gmm_error *error) {
    gmm_shard s;
    gmm_shard_plan p;
    double seconds_per_byte, count, elements;
    int64_t elements_of_shard;
    int pass, fits;
    gmm_layout shard = GMM_ZERO;
    gmm_status status = gmm__gtp_plan_shard(fn, x->shard, &s, &p, error);
    if (status) return status;
    if (x->bundle < 0 || !(x->tokens >= 0))
        return gmm__fail(error, GMM_E_ARG, "%s: bundle is %d, tokens %g: must be >= 0", fn, x->bundle, x->tokens);
    count = x->bundle ? x->bundle : 1;
    seconds_per_byte = (double)(s.gtp_size - 1) / s.gtp_size / f->link_rate;
    elements = (double)p.padded_rows * (double)p.local_cols * count;
    cost->gathered[0] = cost->gathered[1] = cost->reduced = elements_of_shard = 0;
    fits = gmm__gtp_add_product(&elements_of_shard, p.shard_rows, p.local_cols, x->bundle ? x->bundle : 1) &&
           gmm__gtp_add_product(&cost->reduced, elements_of_shard, gmm_dtype_bits(f->wire) / 8, s.gtp_size - 1);
    for (pass = 0; pass < 2; pass++) {
        const int d = pass && p.shard_data_bytes[GMM_COLUMNWISE] ? GMM_COLUMNWISE : GMM_ROWWISE;
        if (s.scaling != GMM_SCALING_NONE && /* the plan has laid out the same */
            (status = gmm_layout_of(s.dtype, s.scaling, GMM_SCALES_COMPACT, (gmm_direction)d, p.shard_rows,
                                    p.local_cols, &shard, error)) != GMM_OK)
            return status;
        fits = fits && gmm__gtp_add_product(&cost->gathered[pass], p.shard_data_bytes[d] +
                                            gmm__gtp_sent_scale_bytes(s.scaling, d, p.shard_rows, &shard),
                                            x->bundle ? x->bundle : 1, s.gtp_size - 1);
        cost->gather[pass] = s.gtp_size > 1 ? f->latency + (double)cost->gathered[pass] / f->link_rate : 0;
    }
    if (!fits)
        return gmm__fail(error, GMM_E_OVERFLOW, "%s: the bytes that %d ranks send of %d weights of %lld x %lld do not "
                         "fit 64 bits", fn, s.gtp_size, x->bundle, (long long)p.local_rows, (long long)p.local_cols);
    cost->shared = p.gather_data_bytes[GMM_COLUMNWISE] == 0;
    cost->transposed = !cost->shared && p.shard_data_bytes[GMM_COLUMNWISE] == 0;
    cost->transpose = cost->transposed && f->memory_rate > 0
                          ? 2 * count * (double)p.gather_data_bytes[GMM_COLUMNWISE] / f->memory_rate
                          : 0;
    x->gather = cost->gather[0];
    x->reduce = s.gtp_size > 1 ? f->latency + elements * (gmm_dtype_bits(f->wire) / 8) * seconds_per_byte : 0;
    x->sum = 0;
    if (f->memory_rate > 0) { /* the sum reads the ranks' parts, and reads and writes main_grad */
        const double parts = f->wire == GMM_BF16 && s.gtp_size > 2 ? s.gtp_size : 1;
        x->sum = elements / s.gtp_size *
                 (parts * (gmm_dtype_bits(f->wire) / 8) + 2 * (gmm_dtype_bits(f->main_grad) / 8)) / f->memory_rate;
    }
    x->forward = 2 * x->tokens * (double)p.local_rows * (double)p.local_cols / f->gemm_rate;
    x->backward = 2 * x->forward;
    x->exposed_forward = x->exposed_backward = x->exposed_reduce = 0;
    return GMM_OK;
}

static double gmm__gtp_max(double a, double b) { return a > b ? a : b; }

/* Simulates the collective that gathers the bundles from position `first` of a pass on, and their transposes: *done is
   the time when the gather stream has done its work, ready[i] when bundle first + i can be read. */
static void gmm__gtp_foresee_gather(gmm_gtp_forecast *f, const gmm_gtp_stage *stages, int32_t pass, int32_t first,
                                    const double *released, double *done, double *ready) {
    const int32_t n = f->stages, slots = f->prefetch + f->together;
    const int32_t count = f->together < n - first ? f->together : n - first;
    double seconds = 0, gathered, transpose[GMM__GTP_MAX_TOGETHER];
    int32_t i, sends = 0, awaited[GMM__GTP_MAX_TOGETHER];
    for (i = 0; i < count; i++) {
        const int32_t at = first + i;
        gmm_gtp_stage x = stages[pass ? n - 1 - at : at];
        gmm__gtp_gather_cost cost;
        /* 1: no other bundle uses the slot, which contains the copy of the previous micro-batch */
        const int kept = f->wrap && at < slots && at + slots >= n;
        int resident; /* 1: a slot still contains the weights from the end of the previous pass, or is kept */
        (void)gmm__gtp_stage_cost("gmm_gtp_foresee", f, &x, &cost, NULL);
        resident = kept || (at < slots && (pass ? cost.shared || cost.transposed : f->wrap && cost.shared));
        awaited[i] = !resident && (at >= slots || pass || !f->wrap); /* otherwise the previous pass has overlapped it */
        transpose[i] = pass && !kept ? cost.transpose : 0;
        if (resident) continue;
        *done = gmm__gtp_max(*done, at >= slots ? released[at - slots] : 0);
        seconds += cost.gather[pass];
        if (cost.gather[pass] > 0 && sends++) seconds -= f->latency;
        f->gathered_bytes += cost.gathered[pass];
    }
    gathered = *done += seconds;
    f->gather += seconds;
    for (i = 0; i < count; i++) {
        ready[i] = awaited[i] ? gathered : 0;
        if (transpose[i] > 0) ready[i] = *done += transpose[i];
    }
}

GMMDEF gmm_status gmm_gtp_foresee(gmm_gtp_forecast *forecast, gmm_gtp_stage *stages, gmm_error *error) {
    static const char fn[] = "gmm_gtp_foresee";
    gmm_gtp_forecast f, stated;
    double released[GMM__GTP_STAGES], reduced[GMM__GTP_STAGES]; /* times when a slot is free, by position in the pass */
    /* simulated times: when the gather and the reduce stream have done their work, and when the compute stream has */
    double gather_free = 0, reduce_free = 0, now = 0, ready[GMM__GTP_MAX_TOGETHER];
    gmm__gtp_gather_cost cost;
    char where[48]; /* names the stage in messages */
    int64_t sent = 0; /* at most, in all passes */
    int32_t i, n, pass;
    gmm_status s = GMM_OK;
    const size_t common = gmm__gtp_common_size(fn, "forecast", forecast, sizeof f, &s, error);
    if (!s) s = gmm__gtp_read(fn, "forecast", forecast, &f, sizeof f, error);
    if (s) return s;
    if (!stages) return gmm__fail(error, GMM_E_NULL, "%s: stages is NULL", fn);
    stated = f;
    if (f.wire == GMM_NONE) f.wire = GMM_F32;
    if (f.main_grad == GMM_NONE) f.main_grad = GMM_F32;
    if (f.wgrad_slots == 0) f.wgrad_slots = 2;
    if (f.together == 0) f.together = 1;
    n = f.stages;
    if ((f.wire != GMM_F32 && f.wire != GMM_BF16) || (f.main_grad != GMM_F32 && f.main_grad != GMM_BF16))
        return gmm__fail(error, GMM_E_DTYPE, "%s: wire is %s, main_grad %s: must be f32, bf16 or none", fn,
                         gmm_dtype_name(f.wire), gmm_dtype_name(f.main_grad));
    if (n < 1 || n > GMM__GTP_STAGES || !(f.gemm_rate > 0) || !(f.link_rate > 0) || !(f.latency >= 0) ||
        !(f.memory_rate >= 0) || f.prefetch < 0 || f.prefetch > n || f.wgrad_slots < 1 || f.together < 1 ||
        f.together > GMM__GTP_MAX_TOGETHER)
        return gmm__fail(error, GMM_E_ARG, "%s: %d stages, gemm_rate %g, link_rate %g, latency %g, memory_rate %g, "
                         "prefetch %d, wgrad_slots %d, together %d: must be 1 to %d, > 0, > 0, >= 0, >= 0, 0 to "
                         "stages, >= 1, and 0 to %d", fn, n, f.gemm_rate, f.link_rate, f.latency, f.memory_rate,
                         f.prefetch, f.wgrad_slots, f.together, (int)GMM__GTP_STAGES, (int)GMM__GTP_MAX_TOGETHER);
    for (i = 0; i < n; i++) {
        gmm_gtp_stage x = stages[i];
        if (x.struct_size && x.struct_size != sizeof x)
            return gmm__fail(error, GMM_E_VERSION, "%s: stages[%d].struct_size is %u: must be 0 or %zu", fn, i,
                             x.struct_size, sizeof x);
        (void)snprintf(where, sizeof where, "%s: stages[%d]", fn, i);
        if ((s = gmm__gtp_stage_cost(where, &f, &x, &cost, error)) != GMM_OK) return s;
        if (!gmm__gtp_add_product(&sent, cost.gathered[0], 1, 1) ||
            !gmm__gtp_add_product(&sent, cost.gathered[1], 1, 1) || !gmm__gtp_add_product(&sent, cost.reduced, 1, 1))
            return gmm__fail(error, GMM_E_OVERFLOW, "%s: the bytes that ranks send in %d stages do not fit 64 bits",
                             fn, n);
    }
    f.compute = f.exposed_gather = f.exposed_reduce = f.gather = f.reduce = 0;
    f.gathered_bytes = f.reduced_bytes = 0;
    for (pass = 0; pass < 2; pass++)
        for (i = 0; i < n; i++) {
            gmm_gtp_stage *x = &stages[pass ? n - 1 - i : i];
            double *exposed = pass ? &x->exposed_backward : &x->exposed_forward;
            const double exposed_forward = pass ? x->exposed_forward : 0, *arrives = &ready[i % f.together];
            (void)gmm__gtp_stage_cost(fn, &f, x, &cost, NULL);
            x->exposed_forward = exposed_forward;
            if (i % f.together == 0) gmm__gtp_foresee_gather(&f, stages, pass, i, released, &gather_free, ready);
            *exposed = gmm__gtp_max(*arrives - now, 0);
            f.exposed_gather += *exposed;
            now = gmm__gtp_max(now, *arrives) + x->forward; /* in backward dgrad, which takes as long */
            released[i] = now;
            f.compute += x->forward;
            if (!pass) continue;
            if (i >= f.wgrad_slots) {
                x->exposed_reduce = gmm__gtp_max(reduced[i - f.wgrad_slots] - now, 0);
                f.exposed_reduce += x->exposed_reduce;
                now += x->exposed_reduce;
            }
            now += x->forward; /* wgrad */
            f.compute += x->forward;
            reduce_free = gmm__gtp_max(reduce_free, now) + x->reduce + x->sum;
            reduced[i] = reduce_free;
            f.reduce += x->reduce;
            f.reduced_bytes += cost.reduced;
        }
    f.exposed_reduce += gmm__gtp_max(reduce_free - now, 0);
    f.step = gmm__gtp_max(now, reduce_free);
    f.wire = stated.wire; /* the caller's fields have no defaults written into them */
    f.main_grad = stated.main_grad;
    f.wgrad_slots = stated.wgrad_slots;
    f.together = stated.together;
    memcpy(forecast, &f, common);
    return GMM_OK;
}

