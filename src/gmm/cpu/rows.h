/* .............................................................................................. 14.2 CPU engine ... */

/* Work is counted in elements that one thread converts or copies, about a nanosecond each. Every thread gets at least
   GMM__CPU_GRAIN of them: on a busy machine starting threads takes milliseconds. */
enum { GMM__CPU_GRAIN = 32768, GMM__CPU_MULTIPLY_ADDS = 64 }; /* multiply-adds that count as one element */

/* Number of threads for `count` tasks of `work` in all. It never decreases with either, so that a plan gets an upper
   bound from upper bounds of both. */
static GMM__UNUSED int32_t gmm__cpu_threads(const gmm_context *ctx, int64_t count, double work) {
    const int64_t max_threads = count < ctx->threads ? count : ctx->threads;
    const double useful_threads = work / GMM__CPU_GRAIN;
    if (max_threads <= 1 || useful_threads < 2.0) return 1;
    return useful_threads < (double)max_threads ? (int32_t)useful_threads : (int32_t)max_threads;
}

/* Runs task(arg, i, thread) for i in [0, count) on gmm__cpu_threads(ctx, count, work) threads, numbered from 0. Tasks
   are independent, so that results do not depend on the number of threads. The only use of OpenMP. */
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

/* Converts the split to offsets [G + 1] (may be NULL), sets fault bits, and returns the number of live rows. */
static GMM__UNUSED int64_t gmm__cpu_offsets(const gmm_groups *groups, int64_t *offsets) {
    uint32_t fault = gmm__split_first_fault(groups);
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

/* Converts n elements of a float dtype to fp32, and back. Each dtype has its own loop, which vectorises. */
static GMM__NOINLINE void gmm__row_load(gmm_dtype dtype, const void *src, float *dst, int64_t n) {
    int64_t i;
    if (dtype == GMM_F32) memcpy(dst, src, (size_t)n * sizeof *dst);
    else if (dtype == GMM_BF16)
        for (i = 0; i < n; i++) dst[i] = gmm_bf16_to_f32(((const uint16_t *)src)[i]);
    else
        for (i = 0; i < n; i++) dst[i] = gmm_f16_to_f32(((const uint16_t *)src)[i]);
}

static GMM__NOINLINE void gmm__row_store(gmm_dtype dtype, void *dst, const float *src, int64_t n) {
    int64_t i;
    if (dtype == GMM_F32) memcpy(dst, src, (size_t)n * sizeof *src);
    else if (dtype == GMM_BF16)
        for (i = 0; i < n; i++) ((uint16_t *)dst)[i] = gmm_f32_to_bf16(src[i]);
    else
        for (i = 0; i < n; i++) ((uint16_t *)dst)[i] = gmm_f32_to_f16(src[i]);
}

/* Dequantizes n elements of line l of a quantized matrix from element a on. Without `whole` it leaves out the scales
   that apply to whole sums (gmm__qview_factor). */
static GMM__NOINLINE void gmm__qview_load(const gmm__qview *v, int64_t l, int64_t a, int64_t n, int whole, float *dst) {
    const int64_t width = gmm_block_along(v->scaling) ? gmm_block_along(v->scaling) : v->along;
    const int fixed = !whole && v->scaling != GMM_SCALING_MX32 && v->scaling != GMM_SCALING_NV16;
    const uint8_t *src = v->data + (v->dtype == GMM_E2M1 ? 0 : v->mn_major ? l : l * v->ld);
    const int64_t step = v->mn_major ? v->ld : 1;
    int64_t i, end, first;
    if (v->dtype == GMM_E4M3)
        for (i = 0; i < n; i++) dst[i] = gmm_e4m3_to_f32(src[(a + i) * step]);
    else if (v->dtype == GMM_E5M2)
        for (i = 0; i < n; i++) dst[i] = gmm_e5m2_to_f32(src[(a + i) * step]);
    else
        for (i = 0; i < n; i++) dst[i] = gmm_e2m1_to_f32(gmm__qview_code(v, l, a + i));
    if (fixed) return;
    for (first = 0; first < n; first = end) {
        const int64_t j = (a + first) / width;
        const float scale = gmm__qview_factor(v, l, j, whole);
        end = gmm__min_i64((j + 1) * width - a, n);
        for (i = first; i < end; i++) dst[i] = gmm__qview_value(dst[i], scale);
    }
}

/* Sums accumulate in 16 lanes, which are then added pairwise: a fixed order that vectorises. */
enum { GMM__LANES = 16 };
static GMM__UNUSED float gmm__lanes_sum(float *lanes) {
    int half, i;
    for (half = GMM__LANES / 2; half > 0; half /= 2)
        for (i = 0; i < half; i++) lanes[i] += lanes[i + half];
    return lanes[0];
}

/* Adds a[i] * b[i] to the lanes; b NULL means ones. Every call but the last has n in multiples of the lanes. */
static GMM__UNUSED void gmm__lanes_add(float *lanes, const float *a, const float *b, int64_t n) {
    int64_t i, j;
    for (i = 0; i + GMM__LANES <= n; i += GMM__LANES)
        if (b) for (j = 0; j < GMM__LANES; j++) lanes[j] += a[i + j] * b[i + j];
        else for (j = 0; j < GMM__LANES; j++) lanes[j] += a[i + j];
    for (j = 0; i + j < n; j++) lanes[j] += b ? a[i + j] * b[i + j] : a[i + j];
}

/* Zeroes rows [begin, end) of a matrix if `tail` is GMM_TAIL_ZERO. */
static GMM__UNUSED void gmm__cpu_tail(const gmm_mat *m, gmm_tail tail, int64_t begin, int64_t end, int64_t cols) {
    int64_t r;
    if (tail != GMM_TAIL_ZERO) return;
    for (r = begin; r < end; r++) memset(gmm__at(m, 0, r, 0), 0, (size_t)(cols * (gmm_dtype_bits(m->dtype) / 8)));
}

static gmm_status gmm__cpu_launch_offsets(const gmm__plan *plan, gmm_stream stream) {
    (void)stream;
    (void)gmm__cpu_offsets(&plan->call->groups, (int64_t *)plan->call->output);
    return GMM_OK;
}

