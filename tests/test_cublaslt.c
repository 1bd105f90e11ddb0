/* test_cublaslt.c - the CUBLASLT engine, demanded by gmm_options.engine: linear products against fp64, and what it
   declines. GPU. */
#include "linear_case.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#ifdef HAVE_CUDA
#include "device.h"

static const gmm_op products[] = {GMM_OP_LINEAR_FWD, GMM_OP_LINEAR_DGRAD, GMM_OP_LINEAR_WGRAD};

static void demand(lin_run *r) {
    r->options.engine = GMM_ENGINE_CUBLASLT;
    r->d.options = &r->options;
}

static void build(lin_run *r, const lin_spec *s) {
    gmm_info info = GMM_ZERO;
    lin_build(r, s);
    demand(r);
    if (gmm_linear_query(T.ctx, s->op, &r->d, &info) == GMM_E_UNSUPPORTED) {
        gmm_config config = T.config;
        if (strstr(gmm_last_error(T.ctx), "this build does not hold"))
            t_skip("the GPU engines were built without cuBLASLt");
        if (!strstr(gmm_last_error(T.ctx), "is not open in this context")) return;
        config.require_engine = GMM_ENGINE_CUBLASLT;
        T.ctx = t_context(&config);
    }
}

/* Integer operands give exact results, real ones within the bound of fp32 accumulation; a second run gives equal
   bits. */
static void both(lin_spec s) {
    lin_run r;
    for (int i = 0; i < 2; i++) {
        void *first;
        s.fill = i ? T_REALS : T_INTS;
        build(&r, &s);
        T_OK(t_linear(T.ctx, s.op, &r.d));
        lin_check(&r);
        if (s.add || s.main_grad) continue;
        first = t_mat_bits(&r.out);
        t_mat_poison(&r.out);
        T_OK(t_linear(T.ctx, s.op, &r.d));
        t_same("second call", first, t_mat_bits(&r.out),
               (size_t)(r.out.count * r.out.rows * r.out.cols * ref_bytes(r.out.dtype)));
    }
}
#define both(...) T_CALL(both, __VA_ARGS__)

static lin_spec spec_of(int arg, const int64_t *sizes) {
    lin_spec s = {.op = products[arg / 3], .in = lin_dtype(arg % 3), .out = lin_dtype(arg % 3), .groups = 5, .K = 24,
                  .N = 19, .sizes = sizes, .on_host = 1};
    return s;
}

static void shapes(int arg) {
    static const int64_t sizes[][5] = {{64, 128, 8, 16, 32}, {3, 77, 1, 30, 17}};
    static const int64_t features[][2] = {{128, 136}, {69, 33}, {1, 1}};
    for (int i = 0; i < 2; i++)
        for (int f = 0; f < 3; f++) {
            lin_spec s = spec_of(arg, sizes[i]);
            s.K = features[f][0];
            s.N = features[f][1];
            both(s);
            s.out = GMM_F32;
            if (s.in != GMM_F32) both(s);
        }
}

static void splits(int arg) {
    static const int64_t sizes[][5] = {{0, 4, 9, 1, 6}, {5, 0, 0, 2, 8}, {5, 7, 3, 2, 0}, {0, 0, 0, 0, 0}};
    for (int i = 0; i < 4; i++) {
        lin_spec s = spec_of(arg, sizes[i]);
        s.split = (lin_split)i; /* sizes and offsets of both widths */
        s.extra = 3 * i;
        s.tail = i % 2 ? GMM_TAIL_ZERO : GMM_TAIL_KEEP;
        both(s);
    }
}

static void forms(int arg) {
    static const int64_t sizes[5] = {12, 0, 31, 1, 40};
    lin_spec s = spec_of(arg, sizes);
    s.pad = 3;
    s.gap = 5;
    s.extra = 4;
    s.tail = GMM_TAIL_ZERO;
    both(s);
    s.pad = 8;
    s.gap = 0;
    s.w = s.grad = T_TABLE_HOST;
    both(s);
}

/* y_add and main_grad; an empty group that adds keeps its bits. */
static void adds(int arg) {
    static const int64_t sizes[5] = {12, 0, 31, 1, 40};
    lin_spec s = spec_of(arg, sizes);
    s.extra = 2;
    s.add = s.op != GMM_OP_LINEAR_WGRAD;
    s.main_grad = s.op == GMM_OP_LINEAR_WGRAD;
    both(s);
    s.out = GMM_F32;
    both(s);
    s.K = 64;
    s.N = 128;
    s.alpha = 2;
    both(s);
    if (s.op != GMM_OP_LINEAR_WGRAD) return;
    s.overwrite = 1;
    both(s);
}

/* A query without the address of alpha returns the workspace of a call with it. */
static void alphas(int arg) {
    static const int64_t sizes[5] = {12, 0, 31, 1, 40};
    lin_spec s = spec_of(arg, sizes);
    gmm_info with = GMM_ZERO, without = GMM_ZERO;
    lin_run r;
    s.alpha = 1;
    build(&r, &s);
    T_OK(gmm_linear_query(T.ctx, s.op, &r.d, &with));
    r.d.alpha = NULL;
    T_OK(gmm_linear_query(T.ctx, s.op, &r.d, &without));
    T_CHECK(without.workspace_bytes == with.workspace_bytes, "%llu and %llu bytes",
            (unsigned long long)without.workspace_bytes, (unsigned long long)with.workspace_bytes);
    for (s.alpha = 1; s.alpha <= 2; s.alpha++) {
        s.K = 24;
        s.N = 19;
        both(s);
        s.K = 128;
        s.N = 256;
        both(s);
    }
}

static void biases(int arg) {
    static const int64_t sizes[5] = {12, 0, 31, 1, 40};
    for (int i = 0; i < 4; i++) {
        lin_spec s = spec_of(arg, sizes);
        s.bias = GMM_F32;
        s.K = i % 2 ? 69 : 128;
        s.N = i % 2 ? 33 : 256;
        s.alpha = i / 2 ? 2 : 0;
        s.add = i / 2;
        both(s);
        s.bias_form = T_TABLE_HOST;
        both(s);
    }
}

/* A group's result does not depend on the groups before it. */
static void alone(int arg) {
    static const int64_t sizes[5] = {13, 64, 0, 1, 200};
    static const int64_t features[][2] = {{256, 512}, {69, 33}};
    for (int f = 0; f < 2; f++) {
        lin_spec s = spec_of(arg, sizes);
        int64_t row = 0;
        lin_run r;
        s.fill = T_REALS;
        s.K = features[f][0];
        s.N = features[f][1];
        build(&r, &s);
        T_OK(t_linear(T.ctx, s.op, &r.d));
        for (int64_t g = 0; g < s.groups; row += s.sizes[g++]) {
            gmm_mat x = r.x.mat, w = r.w.mat, dy = r.dy.mat;
            t_mat out = t_mat_out(s.out, 1, s.op == GMM_OP_LINEAR_WGRAD ? s.N : sizes[g], r.out.cols);
            gmm_groups one = r.groups;
            gmm_linear d = r.d;
            gmm_grad grad = r.grad;
            size_t bytes;
            void *want = lin_group_bits(&r, g, &bytes);
            if (sizes[g] == 0) continue;
            one.count = 1;
            one.capacity = sizes[g];
            one.splits = &sizes[g];
            one.dtype = GMM_I64;
            d.groups = &one;
            if (d.x) x.data = (char *)x.data + row * s.K * ref_bytes(s.in), d.x = &x;
            if (d.dy) dy.data = (char *)dy.data + row * s.N * ref_bytes(s.in), d.dy = &dy;
            if (d.w) w.data = r.w.table[g], d.w = &w;
            grad.mat = &out.mat;
            if (d.y) d.y = &out.mat;
            if (d.dx) d.dx = &out.mat;
            if (d.dw) d.dw = &grad;
            T_OK(t_linear(T.ctx, s.op, &d));
            t_same("group alone", want, t_mat_bits(&out), bytes);
        }
    }
}

/* More shapes than the algorithm cache holds, each twice. */
static void many_shapes(int arg) {
    enum { GROUPS = 300 };
    int64_t *sizes = (int64_t *)t_host(GROUPS * sizeof *sizes);
    lin_spec s = spec_of(arg, sizes);
    s.groups = GROUPS;
    for (int64_t g = 0; g < GROUPS; g++) sizes[g] = g * 7 % GROUPS;
    both(s);
}

/* Largest error against fp64 of a forward pass, relative to the sum of the terms' sizes. */
static double error_of(const lin_run *r) {
    const lin_spec *s = &r->spec;
    const double *y = t_mat_get(&r->out);
    double worst = 0.0;
    for (int64_t g = 0; g < s->groups; g++)
        for (int64_t row = r->offsets[g]; row < r->offsets[g + 1]; row++)
            for (int64_t n = 0; n < s->N; n++) {
                double sum = 0.0, size = 0.0, error;
                for (int64_t k = 0; k < s->K; k++) {
                    const double term = r->x.v[row * s->K + k] * r->w.v[(g * s->N + n) * s->K + k];
                    sum += term;
                    size += fabs(term);
                }
                error = fabs(y[row * s->N + n] - sum) / size;
                if (!(error <= worst)) worst = error; /* NaN too */
            }
    return worst;
}

/* F32 is multiplied as TF32, 11 bits of precision, only when asked. */
static void tf32(int arg) {
    static const int64_t sizes[2] = {64, 96};
    lin_spec s = {.op = GMM_OP_LINEAR_FWD, .in = GMM_F32, .out = GMM_F32, .groups = 2, .K = 256, .N = 128,
                  .sizes = sizes, .on_host = 1, .fill = T_REALS};
    double exact, fast;
    lin_run r;
    (void)arg;
    build(&r, &s);
    T_OK(t_linear(T.ctx, s.op, &r.d));
    lin_check(&r);
    exact = error_of(&r);
    r.options.allow_tf32 = 1;
    T_OK(t_linear(T.ctx, s.op, &r.d));
    fast = error_of(&r);
    if (T.verbose) printf("     largest relative error %.3g in fp32, %.3g as TF32\n", exact, fast);
    T_CHECK(exact < 1e-6, "%.3g", exact);
    T_CHECK(fast > 1e-5 && fast < 0x1p-9, "%.3g", fast);
    r.options.allow_tf32 = 0;
    T_OK(t_linear(T.ctx, s.op, &r.d));
    T_CHECK(error_of(&r) == exact, "after TF32 the same call in fp32 differs");
}

/* A context with this engine as default: queries return it; AUTO never takes it, and a context that does not name it
   has not opened it. */
static void context(int arg) {
    static const int64_t sizes[5] = {12, 0, 31, 1, 40};
    lin_spec s = spec_of(arg, sizes);
    gmm_config config = T.config;
    gmm_info info = GMM_ZERO;
    gmm_context *ctx;
    lin_run r;
    s.fill = T_REALS;
    build(&r, &s);
    T_OK(gmm_linear_query(T.ctx, s.op, &r.d, &info));
    T_CHECK(info.engine == GMM_ENGINE_CUBLASLT, "%s", gmm_engine_name(info.engine));
    r.d.options = NULL;
    config.engine = GMM_ENGINE_AUTO;
    ctx = t_context(&config);
    T_OK_TEXT(gmm_linear_query(ctx, s.op, &r.d, &info), gmm_last_error(ctx));
    T_CHECK(info.engine != GMM_ENGINE_CUBLASLT, "AUTO took %s", gmm_engine_name(info.engine));
    r.d.options = &r.options;
    T_REFUSED_TEXT(GMM_E_UNSUPPORTED, t_linear(ctx, s.op, &r.d), gmm_last_error(ctx), "is not open", NULL);
    r.d.options = NULL;
    config.engine = GMM_ENGINE_CUBLASLT;
    ctx = t_context(&config);
    T_OK_TEXT(t_linear(ctx, s.op, &r.d), gmm_last_error(ctx));
    lin_check(&r);
}

/* Calls that the engine declines, each with its reason, before anything is written. */
static void declines(int arg) {
    static const int64_t sizes[5] = {12, 0, 31, 1, 40};
    enum {
        DEVICE_SIZES, TABLE, SM_LIMIT, DTYPE, BIAS, BIAS_DTYPE, BIAS_SCALE, PROB, INDEX, BETA, FROZEN, BGRAD, KINDS
    };
    static const char *const why[KINDS] = {
        "needs host sizes", "pointer tables", "options.sm_limit", "no f16 from bf16", "no bias of bf16",
            "no bias of f16",
        "linear.bias_scale", "linear.prob", "linear.x_index", "grad.beta", "grad.frozen", "does not have this operation"
    };
    (void)arg;
    for (int i = 0; i < KINDS; i++) {
        lin_spec s = spec_of(i == BIAS_DTYPE || i == BIAS_SCALE ? 0 : 2, sizes); /* f32, else bf16 */
        lin_run r;
        s.on_host = i != DEVICE_SIZES;
        if (i == TABLE) s.w = T_TABLE;
        if (i == DTYPE) s.out = GMM_F16;
        if (i == BIAS) s.bias = GMM_BF16;
        if (i == BIAS_DTYPE) s.bias = GMM_F16;
        if (i == BIAS_SCALE) s.bias = GMM_F32, s.scale = 1;
        s.prob = i == PROB;
        if (i == INDEX) s.index = LIN_PERMUTED;
        if (i == BETA || i == FROZEN) s.op = GMM_OP_LINEAR_WGRAD;
        s.beta = i == BETA;
        s.frozen = i == FROZEN;
        if (i == BGRAD) s.op = GMM_OP_LINEAR_BGRAD;
        s.fill = T_INTS;
        build(&r, &s);
        if (i == SM_LIMIT) r.options.sm_limit = 7;
        T_REFUSED(GMM_E_UNSUPPORTED, t_linear(T.ctx, s.op, &r.d), "options.engine", "cublaslt", why[i], NULL);
    }
}

/* A call during a stream capture returns an error and leaves the capture valid. */
static void capture(int arg) {
    static const int64_t sizes[5] = {12, 0, 31, 1, 40};
    lin_spec s = spec_of(arg, sizes);
    gmm_status refused, served;
    gmm_info info = GMM_ZERO;
    const char *why;
    char text[508];
    void *graph = NULL, *workspace;
    gmm_groups device;
    lin_run r;
    s.fill = T_INTS;
    build(&r, &s);
    T_OK(gmm_linear_query(T.ctx, s.op, &r.d, &info));
    workspace = t_workspace(info.workspace_bytes);
    device = r.groups;
    device.splits = t_in(sizes, sizeof sizes);
    device.dtype = GMM_I64;
    device.on_host = 0;
    why = device_begin_capture();
    T_CHECK(!why, "begin: %s", why);
    refused = gmm_linear_fwd(T.ctx, &r.d, workspace, info.workspace_bytes, T.stream);
    (void)snprintf(text, sizeof text, "%s", gmm_last_error(T.ctx));
    r.d.groups = &device;
    r.d.options = NULL; /* the engine of T.ctx */
    served = gmm_linear_fwd(T.ctx, &r.d, workspace, info.workspace_bytes, T.stream);
    why = device_end_capture(&graph);
    T_CHECK(!why, "end: %s", why);
    T_CHECK(refused == GMM_E_CAPTURE && strstr(text, "gmm_linear_fwd") && strstr(text, "groups.on_host"), "%s: %s",
            gmm_status_name(refused), text);
    T_CHECK(served == GMM_OK, "%s", gmm_last_error(T.ctx));
    why = device_replay(graph);
    T_CHECK(!why, "replay: %s", why);
    lin_check(&r);
    device_graph_free(graph);
}
#endif

void tests_cublaslt(void) {
#ifdef HAVE_CUDA
    for (int i = 0; i < 9; i++) {
        const char *op = gmm_op_name(products[i / 3]), *dtype = gmm_dtype_name(lin_dtype(i % 3));
        t_add_gpu_once(shapes, i, "cublaslt shapes %s %s", op, dtype);
        t_add_gpu_once(splits, i, "cublaslt empty groups, splits, tails %s %s", op, dtype);
        t_add_gpu_once(forms, i, "cublaslt strides and host tables %s %s", op, dtype);
        t_add_gpu_once(adds, i, "cublaslt adding %s %s", op, dtype);
        t_add_gpu_once(alphas, i, "cublaslt alpha %s %s", op, dtype);
        t_add_gpu_once(alone, i, "cublaslt group alone %s %s", op, dtype);
    }
    for (int i = 0; i < 3; i++) {
        t_add_gpu_once(many_shapes, i, "cublaslt many shapes %s", gmm_dtype_name(lin_dtype(i)));
        t_add_gpu_once(context, i, "cublaslt context and query %s", gmm_dtype_name(lin_dtype(i)));
    }
    t_add_gpu_once(biases, 0, "cublaslt bias f32");
    t_add_gpu_once(tf32, 0, "cublaslt f32 as TF32 only when asked");
    t_add_gpu_once(declines, 0, "cublaslt declines with a reason");
    t_add_gpu_once(capture, 2, "cublaslt host sizes while capturing");
#endif
}
