/* .............................................................................................. 14.2 CPU engine ... */

/* Work is counted in elements that one thread converts or copies, about a nanosecond each. A thread is started for no
   less than GMM__CPU_GRAIN of them: beside busy processes a team of threads costs milliseconds. */
enum { GMM__CPU_GRAIN = 32768, GMM__CPU_MULTIPLY_ADDS = 64 }; /* the latter count as one element */

/* Threads for `count` tasks that are `work` together. More tasks or more work never mean fewer threads, so the largest
   of both tell a plan the most that its launch may take. */
static GMM__UNUSED int32_t gmm__cpu_threads(const gmm_context *ctx, int64_t count, double work) {
    const int64_t most = count < ctx->threads ? count : ctx->threads;
    const double worth = work / GMM__CPU_GRAIN;
    return most <= 1 || worth < 2.0 ? 1 : worth < (double)most ? (int32_t)worth : (int32_t)most;
}

/* Runs task(arg, i, thread) for i in [0, count) on gmm__cpu_threads(ctx, count, work) threads, which number from 0.
   Tasks are independent, so results do not depend on how many. The only place that knows OpenMP. */
typedef void (*gmm__task)(const void *arg, int64_t i, int32_t thread);
static GMM__UNUSED void gmm__cpu_for(const gmm_context *ctx, int64_t count, double work, gmm__task task,
                                     const void *arg) {
    const int32_t threads = gmm__cpu_threads(ctx, count, work);
    int64_t i;
#ifdef _OPENMP
    if (threads > 1) {
        _Pragma("omp parallel for schedule(dynamic) num_threads(threads)")
        for (i = 0; i < count; i++) task(arg, i, omp_get_thread_num());
        return;
    }
#endif
    (void)threads;
    for (i = 0; i < count; i++) task(arg, i, 0);
}

/* Reads the split into offsets [G + 1] (may be NULL), sets fault bits, and returns the number of live rows. */
static GMM__UNUSED int64_t gmm__cpu_offsets(const gmm_groups *groups, int64_t *offsets) {
    uint32_t fault = gmm__split_first(groups);
    int64_t begin = 0, g;
    if (offsets) offsets[0] = 0;
    for (g = 0; g < groups->count; g++) {
        begin = gmm_split_end(begin, gmm__split_value(groups, g), groups->form, groups->capacity, groups->row_align,
                              &fault);
        if (offsets) offsets[g + 1] = begin;
    }
    if (fault && groups->fault) *groups->fault |= fault;
    return begin;
}

/* Rows as fp32, whatever their dtype: one plain loop per dtype, so that each vectorises. */
static GMM__UNUSED void gmm__row_load(gmm_dtype dtype, const void *from, float *to, int64_t n) {
    int64_t i;
    if (dtype == GMM_F32) memcpy(to, from, (size_t)n * sizeof *to);
    else if (dtype == GMM_BF16)
        for (i = 0; i < n; i++) to[i] = gmm_bf16_to_f32(((const uint16_t *)from)[i]);
    else
        for (i = 0; i < n; i++) to[i] = gmm_f16_to_f32(((const uint16_t *)from)[i]);
}

static GMM__UNUSED void gmm__row_store(gmm_dtype dtype, void *to, const float *from, int64_t n) {
    int64_t i;
    if (dtype == GMM_F32) memcpy(to, from, (size_t)n * sizeof *from);
    else if (dtype == GMM_BF16)
        for (i = 0; i < n; i++) ((uint16_t *)to)[i] = gmm_f32_to_bf16(from[i]);
    else
        for (i = 0; i < n; i++) ((uint16_t *)to)[i] = gmm_f32_to_f16(from[i]);
}

/* n values of line l of a copy from element a: codes times factors (gmm__qview_factor). */
static GMM__UNUSED void gmm__qview_load(const gmm__qview *v, int64_t l, int64_t a, int64_t n, int whole, float *to) {
    const int64_t width = gmm_block_along(v->scaling) ? gmm_block_along(v->scaling) : v->along;
    const int fixed = !whole && v->scaling != GMM_SCALING_MX32 && v->scaling != GMM_SCALING_NV16;
    const uint8_t *from = v->data + (v->dtype == GMM_E2M1 ? 0 : v->apart ? l : l * v->ld);
    const int64_t step = v->apart ? v->ld : 1;
    int64_t i, end, done;
    if (v->dtype == GMM_E4M3)
        for (i = 0; i < n; i++) to[i] = gmm_e4m3_to_f32(from[(a + i) * step]);
    else if (v->dtype == GMM_E5M2)
        for (i = 0; i < n; i++) to[i] = gmm_e5m2_to_f32(from[(a + i) * step]);
    else
        for (i = 0; i < n; i++) to[i] = gmm_e2m1_to_f32(gmm__qview_code(v, l, a + i));
    if (fixed) return;
    for (done = 0; done < n; done = end) {
        const int64_t j = (a + done) / width;
        const float factor = gmm__qview_factor(v, l, j, whole);
        end = gmm__min_i64((j + 1) * width - a, n);
        for (i = done; i < end; i++) to[i] = gmm__qview_value(to[i], factor);
    }
}

/* Sums run in 16 lanes, which are then folded in halves: a fixed order that vector units like. */
enum { GMM__LANES = 16 };
static GMM__UNUSED float gmm__lanes_fold(float *lane) {
    int half, i;
    for (half = GMM__LANES / 2; half > 0; half /= 2)
        for (i = 0; i < half; i++) lane[i] += lane[i + half];
    return lane[0];
}

/* Adds a[i] * b[i] to the lanes; b NULL means ones. n starts at a multiple of the lanes. */
static GMM__UNUSED void gmm__lanes_add(float *lane, const float *a, const float *b, int64_t n) {
    int64_t i, j;
    for (i = 0; i + GMM__LANES <= n; i += GMM__LANES)
        if (b) for (j = 0; j < GMM__LANES; j++) lane[j] += a[i + j] * b[i + j];
        else for (j = 0; j < GMM__LANES; j++) lane[j] += a[i + j];
    for (j = 0; i + j < n; j++) lane[j] += b ? a[i + j] * b[i + j] : a[i + j];
}

/* Zeroes rows [begin, end) of a matrix where the caller asked for zero tails. */
static GMM__UNUSED void gmm__cpu_tail(const gmm_mat *m, gmm_tail tail, int64_t begin, int64_t end, int64_t cols) {
    int64_t r;
    if (tail != GMM_TAIL_ZERO) return;
    for (r = begin; r < end; r++) memset(gmm__at(m, 0, r, 0), 0, (size_t)(cols * (gmm_dtype_bits(m->dtype) / 8)));
}

/* The plan of operations that take every call, and no workspace. */
static int gmm__plan_any(const gmm__call *call, gmm__plan *plan) {
    (void)call;
    (void)plan;
    return 1;
}
static gmm_status gmm__cpu_launch_offsets(const gmm__plan *plan, gmm_stream stream) {
    (void)stream;
    (void)gmm__cpu_offsets(&plan->call->groups, (int64_t *)plan->call->output);
    return GMM_OK;
}

