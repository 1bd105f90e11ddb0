
/* ................................................................................................ PTX ... */

/* The wrappers of src/gmm_quant/ptx.h, in C++. Approximate instructions are computed exactly. */
static inline float gmm__ptx_add_rn_f32(float a, float b) { return a + b; }
static inline float gmm__ptx_mul_rn_f32(float a, float b) { return a * b; }
static inline float gmm__ptx_div_rn_f32(float a, float b) { return a / b; }
static inline float gmm__ptx_min_nan_f32(float a, float b) { return a != a || b != b ? NAN : a < b ? a : b; }
static inline float gmm__ptx_max_nan_f32(float a, float b) { return a != a || b != b ? NAN : a > b ? a : b; }
static inline float gmm__ptx_fma_rn_f32(float a, float b, float c) { return fmaf(a, b, c); }
static inline float gmm__ptx_flush(float v) { return fabsf(v) < 0x1p-126f ? copysignf(0.0f, v) : v; }
static inline float gmm__ptx_ex2_approx_ftz_f32(float a) { return gmm__ptx_flush(exp2f(gmm__ptx_flush(a))); }
static inline float gmm__ptx_rcp_approx_ftz_f32(float a) { return gmm__ptx_flush(1.0f / gmm__ptx_flush(a)); }
static inline unsigned long long gmm__ptx_globaltimer(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (unsigned long long)t.tv_sec * 1000000000u + (unsigned long long)t.tv_nsec;
}

