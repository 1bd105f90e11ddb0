/* test_small.c - accumulate and convert. */
#include "test.h"

#include <math.h>
#include <string.h>

static const gmm_dtype floats[] = { GMM_F32, GMM_F16, GMM_BF16 };

/* ------------------------------------------------------------------------------------------------- Accumulate --- */

static gmm_status accumulate(const gmm_accumulation *d) {
    gmm_info info = GMM_ZERO;
    const gmm_status s = gmm_accumulate_query(T.ctx, d, &info);
    void *workspace = s == GMM_OK ? t_workspace(info.workspace_bytes) : NULL;
    if (s != GMM_OK) return s;
    return gmm_accumulate(T.ctx, d, workspace, info.workspace_bytes, T.stream);
}

static gmm_accumulation accumulation(const t_mat *x, const t_mat *y, float scale, float beta) {
    gmm_accumulation d = GMM_ZERO;
    t_about("%lld addends of %lld x %lld %s into %s, scale %g, beta %g", (long long)x->count, (long long)y->rows,
            (long long)y->cols, gmm_dtype_name(x->dtype), gmm_dtype_name(y->dtype), (double)scale, (double)beta);
    d.count = (int32_t)x->count;
    d.rows = y->rows;
    d.cols = y->cols;
    d.x = &x->mat;
    d.y = &y->mat;
    d.scale = scale;
    d.beta = beta;
    return d;
}

/* y with initial values. */
static t_mat filled(gmm_dtype dtype, int64_t rows, int64_t cols, int64_t pad, t_fill fill) {
    t_mat y = t_mat_make(dtype, 1, rows, cols, pad, 0, T_PACKED, T_POISON);
    for (int64_t i = 0; i < rows * cols; i++)
        y.v[i] = fill == T_INTS ? (double)t_int(-4, 4) : ref_round(dtype, t_real());
    t_mat_put(&y);
    return y;
}

/* The fp32 arithmetic of the contract, in double: every step is rounded to fp32 (which is correct for sums and products
   of two fp32 values), the last one to the dtype of y by t_exact. */
static double step(double v) { return (double)(float)v; }
static double stated(const t_mat *x, const t_mat *y, int64_t i, float scale, float beta) {
    const int64_t n = x->rows * x->cols;
    double sum = x->v[i];
    for (int64_t j = 1; j < x->count; j++) sum = step(sum + x->v[j * n + i]);
    sum = step((double)scale * sum);
    return beta == 0.0f ? sum : step(step((double)beta * y->v[i]) + sum);
}

/* Integers give exact sums; reals give the bits of the documented order, and are close to the sum in fp64. */
static void check_sum(const t_mat *x, const t_mat *y, float scale, float beta, int reals) {
    const int64_t n = y->rows * y->cols;
    const gmm_accumulation d = accumulation(x, y, scale, beta);
    double *want = (double *)t_host((size_t)(n + 1) * sizeof *want);
    double *exact = (double *)t_host((size_t)(n + 1) * sizeof *exact);
    double *bound = (double *)t_host((size_t)(n + 1) * sizeof *bound), *got;
    for (int64_t i = 0; i < n; i++) {
        double magnitude = fabs((double)beta * y->v[i]);
        want[i] = stated(x, y, i, scale, beta);
        exact[i] = (double)beta * y->v[i];
        for (int64_t j = 0; j < x->count; j++) {
            exact[i] += (double)scale * x->v[j * n + i];
            magnitude += fabs((double)scale * x->v[j * n + i]);
        }
        bound[i] = ref_bound(y->dtype, x->count + 1, magnitude, exact[i]) + ref_tiny(y->dtype);
        if (!reals) T_CHECK(want[i] == exact[i], "integers are not exact");
    }
    T_OK(accumulate(&d));
    got = t_mat_get(y);
    t_exact("y", y->dtype, got, want, n);
    t_near("y", got, exact, bound, n);
}
#define check_sum(...) T_CALL(check_sum, __VA_ARGS__)

static void accumulates(int arg) {
    static const int64_t shape[][4] = { /* rows, cols, gap in x, gap in y */
        { 1, 1, 0, 0 }, { 3, 7, 0, 0 }, { 5, 64, 0, 0 }, { 2, 33, 3, 5 }, { 9, 8, 8, 0 }, { 4, 2050, 0, 1 },
        { 1, 40000, 0, 0 }, { 0, 12, 0, 0 }, { 700, 24, 0, 8 } };
    static const float factor[][2] = { { 1.0f, 0.0f }, { 1.0f, 1.0f }, { 0.5f, 1.0f }, { -2.0f, 0.25f },
                                       { 0.0f, 1.0f } };
    const gmm_dtype from = floats[arg / 3], to = floats[arg % 3];
    for (int k = 0; k < (int)T_COUNT(shape); k++)
        for (int count = 1; count <= 8; count = count == 1 ? 3 : count + 5)
            for (int fill = 0; fill < 2; fill++) {
                const int64_t rows = shape[k][0], cols = shape[k][1];
                const int reals = fill == 1, f = (k + count + fill) % (int)T_COUNT(factor);
                const float scale = reals ? factor[f][0] / 3.0f : factor[f][0];
                const float beta = reals && factor[f][1] != 0.0f ? factor[f][1] * 0.9f : factor[f][1];
                const t_mat x = t_mat_make(from, count, rows, cols, shape[k][2], k % 2 ? 16 : 0,
                                           (k + count) % 2 ? T_TABLE_HOST : T_PACKED, reals ? T_REALS : T_INTS);
                const t_mat y = filled(to, rows, cols, shape[k][3], reals ? T_REALS : T_INTS);
                check_sum(&x, &y, scale, beta, reals);
            }
}

/* A small sm_limit changes no bit: the documented order, over several rounds of few CTAs, with and without the
   conditions of the kernel for few SMs: 16-byte vectors, rows without gaps, 16-byte aligned addresses. */
static void accumulate_limited(int arg) {
    static const int64_t shape[][4] = { { 1, 70004, 0, 0 }, { 1, 70003, 0, 0 }, { 40, 300, 0, 0 }, { 40, 300, 4, 0 },
                                        { 2, 4096, 0, 0 }, { 1, 4, 0, 0 } };
    static const int counts[] = { 1, 3, 4, 5, 9, 257 };
    const gmm_dtype from = floats[arg / 3], to = floats[arg % 3];
    for (int k = 0; k < (int)T_COUNT(shape); k++)
        for (int c = 0; c < (int)T_COUNT(counts); c++) {
            const int64_t rows = shape[k][0], cols = shape[k][1], n = rows * cols;
            if (counts[c] * n > 700000) continue;
            for (int off = 0; off < 2; off++) {
                const t_mat x = t_mat_make(from, counts[c], rows, cols, shape[k][2], off ? 4 : 0,
                                           (k + c) % 2 ? T_TABLE_HOST : T_PACKED, T_REALS);
                const t_mat y = filled(to, rows, cols, shape[k][3], T_REALS);
                gmm_accumulation d = accumulation(&x, &y, 1.0f / 3.0f, c % 3 ? 0.9f : 0.0f);
                gmm_options options = GMM_ZERO;
                double *want = (double *)t_host((size_t)n * sizeof *want);
                options.sm_limit = 1 + 2 * (k % 2);
                d.options = &options;
                for (int64_t i = 0; i < n; i++) want[i] = stated(&x, &y, i, d.scale, d.beta);
                T_OK(accumulate(&d));
                t_exact("y", to, t_mat_get(&y), want, n);
            }
        }
}

/* beta 0 does not read y; a NaN in an addend propagates, also with a scale of 0; a NaN in y propagates at beta 1 */
static void accumulate_nan(int arg) {
    enum { R = 3, C = 20 };
    const gmm_dtype dtype = floats[arg];
    for (int count = 1; count <= 2; count++) {
        t_mat x = t_mat_make(dtype, count, R, C, 0, 0, T_PACKED, T_INTS), y = t_mat_out(dtype, 1, R, C);
        gmm_accumulation d = accumulation(&x, &y, 2.0f, 0.0f);
        double want[R * C];
        for (int i = 0; i < R * C; i++) want[i] = 2.0 * (x.v[i] + (count == 2 ? x.v[R * C + i] : 0.0));
        T_OK(accumulate(&d)); /* y was poison */
        t_exact("y", dtype, t_mat_get(&y), want, R * C);
        x.v[7] = (double)NAN;
        t_mat_put(&x);
        d.scale = 0.0f;
        for (int i = 0; i < R * C; i++) want[i] = i == 7 ? (double)NAN : 0.0;
        T_OK(accumulate(&d));
        t_exact("y", dtype, t_mat_get(&y), want, R * C);
        d.beta = 1.0f;
        x.v[7] = 1.0;
        t_mat_put(&x);
        T_OK(accumulate(&d)); /* the NaN of the previous call is still there */
        t_exact("y", dtype, t_mat_get(&y), want, R * C);
    }
}

/* One call with several addends has the bits of accumulating them one by one into an fp32 y. */
static void accumulate_order(int arg) {
    enum { N = 5, R = 11, C = 129 };
    const t_mat x = t_mat_in(floats[arg], N, R, C, T_REALS);
    const t_mat all = t_mat_out(GMM_F32, 1, R, C), each = t_mat_out(GMM_F32, 1, R, C);
    gmm_accumulation d = accumulation(&x, &all, 1.0f, 0.0f);
    const int64_t bytes = R * C * ref_bytes(floats[arg]);
    T_OK(accumulate(&d));
    d.count = 1;
    d.y = &each.mat;
    for (int j = 0; j < N; j++) {
        const gmm_mat one = gmm_mat_packed(floats[arg], (char *)x.data + j * bytes);
        d.x = &one;
        d.beta = j > 0 ? 1.0f : 0.0f;
        T_OK(accumulate(&d));
    }
    t_same("y", t_mat_bits(&all), t_mat_bits(&each), R * C * sizeof(float));
}

/* Hundreds of addends, in a table and packed: the fp32 sum follows the documented order from the first to the last. */
static void accumulate_many(int arg) {
    enum { R = 3, C = 24 };
    static const int counts[] = { 255, 256, 257, 513 };
    for (int k = 0; k < (int)T_COUNT(counts); k++) {
        const t_mat x = t_mat_make(floats[arg], counts[k], R, C, k % 2 ? 5 : 0, 0, k % 2 ? T_TABLE_HOST : T_PACKED,
                                   T_REALS);
        const t_mat y = filled(GMM_F32, R, C, k, T_REALS);
        const gmm_accumulation d = accumulation(&x, &y, 1.0f / 3.0f, 0.9f);
        double want[R * C];
        for (int64_t i = 0; i < R * C; i++) want[i] = stated(&x, &y, i, d.scale, d.beta);
        T_OK(accumulate(&d));
        t_exact("y", GMM_F32, t_mat_get(&y), want, R * C);
    }
}

static void accumulate_errors(int arg) {
    const t_mat x = t_mat_in(GMM_BF16, 2, 3, 8, T_INTS), y = t_mat_out(GMM_F32, 1, 3, 8);
    const gmm_accumulation good = accumulation(&x, &y, 1.0f, 0.0f);
    gmm_accumulation d = good;
    gmm_mat m = x.mat;
    gmm_info info = GMM_ZERO;
    void *workspace;
    (void)arg;
    T_OK(gmm_accumulate_query(T.ctx, &good, &info));
    T_CHECK(info.engine == T.engine || T.engine == GMM_ENGINE_AUTO, "%s", gmm_engine_name(info.engine));
    workspace = t_workspace(info.workspace_bytes);
    T_OK(gmm_accumulate(T.ctx, &good, workspace, info.workspace_bytes, T.stream));
#define REFUSED(status, argument) \
    T_REFUSED(status, gmm_accumulate(T.ctx, &d, workspace, info.workspace_bytes, T.stream), \
              "gmm_accumulate: accumulation", argument, NULL); \
    d = good; \
    m = x.mat
    T_REFUSED(GMM_E_NULL, gmm_accumulate(T.ctx, NULL, workspace, info.workspace_bytes, T.stream), "accumulation", NULL);
    T_REFUSED(GMM_E_NULL, gmm_accumulate_query(T.ctx, &good, NULL), "gmm_accumulate_query", "info", NULL);
    T_CHECK(gmm_accumulate(NULL, &good, workspace, info.workspace_bytes, T.stream) == GMM_E_NULL, "no context");
    d.struct_size = sizeof d + 1;
    REFUSED(GMM_E_VERSION, "struct_size");
    d.count = 0;
    REFUSED(GMM_E_ARG, "count");
    d.rows = -1;
    REFUSED(GMM_E_ARG, "rows");
    d.cols = 0;
    REFUSED(GMM_E_ARG, "cols");
    d.x = NULL;
    REFUSED(GMM_E_NULL, ".x is NULL");
    d.y = NULL;
    REFUSED(GMM_E_NULL, ".y is NULL");
    d.x = &m;
    m.dtype = GMM_U8;
    REFUSED(GMM_E_DTYPE, "u8");
    d.x = &m;
    m.ld = 7;
    REFUSED(GMM_E_STRIDE, "ld 7");
    d.x = &m;
    m.group_stride = 9;
    REFUSED(GMM_E_STRIDE, "group_stride 9");
    d.rows = 0;
    d.x = &m;
    m.group_stride = -200;
    REFUSED(GMM_E_STRIDE, "group_stride -200 must be >= 0");
    d.x = &m;
    m.data = NULL;
    REFUSED(GMM_E_NULL, "neither");
    d.x = &m;
    m.data = (char *)m.data + 1;
    REFUSED(GMM_E_ALIGN, "x:");
    d.y = &m;
    m = y.mat;
    m.group_stride = 24;
    REFUSED(GMM_E_STRIDE, "y:");
    if (T.gpu) {
        const t_mat table = t_mat_make(GMM_BF16, 2, 3, 8, 0, 0, T_TABLE, T_INTS);
        d.x = &table.mat;
        REFUSED(GMM_E_ARG, "GMM_MAT_TABLE_ON_HOST");
    }
    if (info.workspace_bytes > 0)
        T_REFUSED(GMM_E_WORKSPACE, gmm_accumulate(T.ctx, &good, workspace, info.workspace_bytes - 1, T.stream),
                  "workspace_bytes", NULL);
#undef REFUSED
}

/* ---------------------------------------------------------------------------------------------------- Convert --- */

static gmm_status convert(gmm_mat *src, gmm_mat *dst, int64_t rows, int64_t cols) {
    gmm_conversion d = GMM_ZERO;
    gmm_info info = GMM_ZERO;
    gmm_status s;
    d.rows = rows;
    d.cols = cols;
    d.src = src;
    d.dst = dst;
    s = gmm_convert_query(T.ctx, &d, &info);
    return s != GMM_OK ? s : gmm_convert(T.ctx, &d, t_workspace(info.workspace_bytes), info.workspace_bytes, T.stream);
}

/* Numbers, NaN, infinities, zeros of both signs, ties, subnormals and the largest values of every dtype. */
static double special(int64_t i) {
    static const double v[] = { 0.0, -0.0, 1.0, -1.0, 65504.0, 65519.99609375, 65520.0, -65536.0, 3.0e38, -3.4e38,
                                6.103515625e-05, 5.9604644775390625e-08, 2.98023223876953125e-08, 2.9802325e-08,
                                -4.4e-08, 1.1754943508222875e-38, 1.401298464324817e-45, -9.1835e-41, 4.6e-41,
                                1.00390625, 1.01171875, 1.00048828125, 1.00146484375, 3.3895313892515355e38,
                                3.3961775292304e38 };
    const int64_t n = T_COUNT(v);
    if (i % (n + 3) < n) return v[i % (n + 3)];
    return i % (n + 3) == n ? (double)INFINITY : i % (n + 3) == n + 1 ? -(double)INFINITY : (double)NAN;
}

static void check_conversion(gmm_dtype from, gmm_dtype to, int64_t rows, int64_t cols, int64_t x_gap, int64_t y_gap) {
    const int64_t n = rows * cols;
    t_mat x = t_mat_make(from, 1, rows, cols, x_gap, 0, T_PACKED, T_REALS);
    t_mat y = t_mat_make(to, 1, rows, cols, y_gap, 0, T_PACKED, T_POISON);
    double *got;
    for (int64_t i = 0; i < n; i += 1 + t_int(0, 2)) x.v[i] = ref_round(from, special(i));
    t_mat_put(&x);
    T_OK(convert(&x.mat, &y.mat, rows, cols));
    got = t_mat_get(&y);
    t_exact("dst", to, got, x.v, n);
    for (int64_t i = 0; i < n; i++)
        T_CHECK(isnan(got[i]) || !signbit(got[i]) == !signbit(x.v[i]), "sign of element %lld", (long long)i);
}
#define check_conversion(...) T_CALL(check_conversion, __VA_ARGS__)

static void converts(int arg) {
    static const int64_t shape[][4] = { { 1, 1, 0, 0 }, { 4, 37, 0, 0 }, { 3, 64, 8, 0 }, { 5, 30, 1, 3 },
                                        { 2, 2500, 0, 4 }, { 1, 33000, 0, 0 }, { 600, 40, 0, 0 }, { 0, 5, 0, 0 } };
    const gmm_dtype from = floats[arg / 3], to = floats[arg % 3];
    for (int k = 0; k < (int)T_COUNT(shape); k++) {
        const int64_t rows = shape[k][0], cols = shape[k][1];
        check_conversion(from, to, rows, cols, shape[k][2], shape[k][3]);
    }
}

/* Conversion to the same dtype copies bytes unchanged, between matrices of different ld and alignment. */
static void copies(int arg) {
    static const gmm_dtype dtypes[] = { GMM_F32, GMM_F16, GMM_BF16, GMM_E4M3, GMM_E5M2, GMM_E8M0,
                                        GMM_U8, GMM_I32, GMM_I64, GMM_F64 };
    static const int64_t shape[][4] = { { 1, 1, 0, 0 }, { 7, 48, 0, 0 }, { 6, 48, 16, 32 }, { 5, 13, 2, 0 },
                                        { 3, 1111, 1, 5 }, { 1, 70000, 0, 0 }, { 900, 17, 0, 15 }, { 0, 4, 0, 0 } };
    const gmm_dtype dtype = dtypes[arg];
    const int64_t size = ref_bytes(dtype);
    for (int k = 0; k < (int)T_COUNT(shape); k++) {
        const int64_t rows = shape[k][0], cols = shape[k][1], from_ld = cols + shape[k][2], to_ld = cols + shape[k][3];
        const int64_t from_n = rows ? (rows - 1) * from_ld + cols : 0, to_n = rows ? (rows - 1) * to_ld + cols : 0;
        unsigned char *host = (unsigned char *)t_host((size_t)(from_n * size) + 1), *got;
        gmm_mat src, dst;
        for (int64_t i = 0; i < from_n * size; i++) host[i] = (unsigned char)t_rand();
        src = gmm_mat_packed(dtype, t_in(host, (size_t)(from_n * size)));
        dst = gmm_mat_packed(dtype, t_alloc((size_t)(to_n * size)));
        src.ld = from_ld;
        dst.ld = to_ld;
        T_OK(convert(&src, &dst, rows, cols));
        got = (unsigned char *)t_get(dst.data, (size_t)(to_n * size));
        for (int64_t r = 0; r < rows; r++) {
            t_same("row", got + r * to_ld * size, host + r * from_ld * size, (size_t)(cols * size));
            if (r + 1 < rows)
                t_bytes("gap", got + (r * to_ld + cols) * size, 0xFF, (size_t)((to_ld - cols) * size));
        }
    }
}

static void convert_errors(int arg) {
    const t_mat x = t_mat_in(GMM_BF16, 1, 3, 8, T_INTS), y = t_mat_out(GMM_F32, 1, 3, 8);
    gmm_conversion d = GMM_ZERO, good;
    gmm_mat m = x.mat;
    (void)arg;
    d.rows = 3;
    d.cols = 8;
    d.src = &x.mat;
    d.dst = &y.mat;
    good = d;
#define REFUSED(status, argument) \
    T_REFUSED(status, gmm_convert(T.ctx, &d, NULL, 0, T.stream), "gmm_convert: conversion", argument, NULL); \
    d = good; \
    m = x.mat
    T_REFUSED(GMM_E_NULL, gmm_convert(T.ctx, NULL, NULL, 0, T.stream), "conversion", NULL);
    d.struct_size = sizeof d + 1;
    REFUSED(GMM_E_VERSION, "struct_size");
    d.reserved = 2;
    REFUSED(GMM_E_ARG, "reserved");
    d.rows = 0;
    d.cols = INT64_MAX;
    REFUSED(GMM_E_OVERFLOW, "src");
    d.rows = -2;
    REFUSED(GMM_E_ARG, "rows");
    d.cols = 0;
    REFUSED(GMM_E_ARG, "cols");
    d.src = NULL;
    REFUSED(GMM_E_NULL, "src");
    d.dst = NULL;
    REFUSED(GMM_E_NULL, "dst");
    d.src = &m;
    m.dtype = GMM_E4M3;
    REFUSED(GMM_E_DTYPE, "e4m3");
    d.src = &m;
    m.dtype = GMM_I32;
    REFUSED(GMM_E_DTYPE, "i32");
    d.src = &m;
    m.ld = 1;
    REFUSED(GMM_E_STRIDE, "ld 1");
    d.src = &m;
    m.data = (char *)m.data + 1;
    REFUSED(GMM_E_ALIGN, "src");
    d.src = &m;
    m.scaling = GMM_SCALING_MX32;
    REFUSED(GMM_E_DTYPE, "scaling");
    T_OK(gmm_convert(T.ctx, &d, NULL, 0, T.stream));
#undef REFUSED
}

static void drawn(int arg) {
    const gmm_dtype from = floats[t_int(0, 2)], to = floats[t_int(0, 2)];
    const int64_t rows = t_draw_size(20, 300), cols = t_draw_size(120, 3000) / (rows > 60 ? 20 : 1) + 1;
    const int64_t gap = t_int(0, 1) * t_int(0, 9);
    const int reals = (int)t_int(0, 1);
    (void)arg;
    if (t_int(0, 1)) check_conversion(from, to, rows, cols, gap, t_int(0, 1) * t_int(0, 9));
    else {
        const float scale = (float)t_int(-2, 2) * (reals ? 0.3f : 0.5f);
        const float beta = (float)t_int(-2, 2) * (reals ? 0.7f : 1.0f);
        const t_mat x = t_mat_make(from, t_int(1, 9), rows, cols, gap, t_int(0, 1) * 16,
                                   t_int(0, 1) ? T_TABLE_HOST : T_PACKED, reals ? T_REALS : T_INTS);
        const t_mat y = filled(to, rows, cols, t_int(0, 1) * t_int(0, 9), reals ? T_REALS : T_INTS);
        check_sum(&x, &y, scale, beta, reals);
    }
}

void tests_small(void) {
    t_add(drawn, 0, "small drawn at random");
    t_random(3);
    for (int i = 0; i < 9; i++) {
        const char *from = gmm_dtype_name(floats[i / 3]), *to = gmm_dtype_name(floats[i % 3]);
        t_add(accumulates, i, "small accumulate %s into %s", from, to);
        t_add(accumulate_limited, i, "small accumulate %s into %s by few multiprocessors", from, to);
        t_add(converts, i, "small convert %s to %s", from, to);
    }
    for (int i = 0; i < 3; i++) {
        t_add(accumulate_nan, i, "small accumulate beta 0 and NaN %s", gmm_dtype_name(floats[i]));
        t_add(accumulate_order, i, "small accumulate order of addends %s", gmm_dtype_name(floats[i]));
        t_add(accumulate_many, i, "small accumulate hundreds of %s", gmm_dtype_name(floats[i]));
    }
    for (int i = 0; i < 10; i++) t_add(copies, i, "small convert keeps bytes %d", i);
    t_add(accumulate_errors, 0, "small accumulate errors");
    t_add(convert_errors, 0, "small convert errors");
}
