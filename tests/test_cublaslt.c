/* test_cublaslt.c - the CUBLASLT engine, demanded by gmm_options.engine: linear products against fp64, from host sizes
   and, where the library has its grouped mode, from device sizes; and what it declines. GPU. */
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
    T_CHECK(info.engine == GMM_ENGINE_CUBLASLT && strstr(info.note, "a cublasLtMatmul per group"), "%s: %s",
            gmm_engine_name(info.engine), info.note);
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
        TABLE, SM_LIMIT, DTYPE, BIAS, BIAS_DTYPE, BIAS_SCALE, PROB, INDEX, BETA, FROZEN, BGRAD, KINDS
    };
    static const char *const why[KINDS] = {
        "pointer tables", "options.sm_limit", "no f16 from bf16", "no bias of bf16",
            "no bias of f16",
        "linear.bias_scale", "linear.prob", "linear.x_index", "grad.beta", "grad.frozen", "does not have this operation"
    };
    (void)arg;
    for (int i = 0; i < KINDS; i++) {
        lin_spec s = spec_of(i == BIAS_DTYPE || i == BIAS_SCALE ? 0 : 2, sizes); /* f32, else bf16 */
        lin_run r;
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

/* --- device sizes: one grouped cublasLtMatmul --- */

/* Builds a call with device sizes. Skips the case if the library or the GPU lacks the grouped mode. */
static void build_grouped(lin_run *r, const lin_spec *s) {
    gmm_info info = GMM_ZERO;
    build(r, s);
    if (gmm_linear_query(T.ctx, s->op, &r->d, &info) != GMM_OK && strstr(gmm_last_error(T.ctx), "needs host sizes"))
        t_skip("no CUDA toolkit with cuBLASLt 13.8, or no GPU of compute capability 9.0");
}

/* As `both`, and another call with other memory in the workspace gives equal bits. */
static void both_grouped(lin_spec s) {
    gmm_info info = GMM_ZERO;
    lin_run r;
    for (int i = 0; i < 2; i++) {
        void *first;
        s.fill = i ? T_REALS : T_INTS;
        build_grouped(&r, &s);
        T_OK(gmm_linear_query(T.ctx, s.op, &r.d, &info));
        T_CHECK(info.engine == GMM_ENGINE_CUBLASLT && strstr(info.note, "one grouped cublasLtMatmul"), "%s", info.note);
        T_OK(t_linear(T.ctx, s.op, &r.d));
        lin_check(&r);
        if (s.add || (s.main_grad && !s.overwrite)) continue;
        first = t_mat_bits(&r.out);
        t_mat_poison(&r.out);
        T_OK(t_linear(T.ctx, s.op, &r.d));
        t_same("second call", first, t_mat_bits(&r.out),
               (size_t)(r.out.count * r.out.rows * r.out.cols * ref_bytes(r.out.dtype)));
    }
}
#define both_grouped(...) T_CALL(both_grouped, __VA_ARGS__)

/* arg: twice the operation, plus 1 for bf16. */
static lin_spec grouped_spec(int arg, const int64_t *sizes) {
    lin_spec s = {.op = products[arg / 2], .in = lin_dtype(1 + arg % 2), .out = lin_dtype(1 + arg % 2), .groups = 5,
                  .K = 24, .N = 40, .sizes = sizes};
    return s;
}

/* A call with device sizes is served, or refused with what it needs and, of an older library, its version. */
static void grouped_or_refused(int arg) {
    static const int64_t sizes[5] = {12, 0, 31, 1, 40};
    const lin_spec s = grouped_spec(arg, sizes);
    gmm_info info = GMM_ZERO;
    lin_run r;
    build(&r, &s);
    if (gmm_linear_query(T.ctx, s.op, &r.d, &info) == GMM_OK) {
        T_CHECK(info.engine == GMM_ENGINE_CUBLASLT && strstr(info.note, "one grouped cublasLtMatmul"), "%s", info.note);
        return;
    }
    T_REFUSED(GMM_E_UNSUPPORTED, t_linear(T.ctx, s.op, &r.d), "options.engine", "cublaslt", "groups.on_host",
              strstr(gmm_last_error(T.ctx), "capability") ? "compute capability 9.0" : "from cuBLASLt 13.8 on, not in",
              NULL);
}

static void grouped_shapes(int arg) {
    static const int64_t sizes[][5] = {{64, 128, 8, 16, 32}, {3, 77, 1, 30, 17}, {256, 1, 129, 65, 300}};
    static const int64_t features[][2] = {{128, 136}, {72, 40}, {8, 8}, {264, 8}};
    for (int i = 0; i < 3; i++)
        for (int f = 0; f < 4; f++) {
            lin_spec s = grouped_spec(arg, sizes[i]);
            s.K = features[f][0];
            s.N = features[f][1];
            if ((i + f) % 2) s.out = GMM_F32;
            both_grouped(s);
        }
}

/* Empty groups, all of them too, whose leading dimensions are those of the operands; every form of a split; rows behind
   the last group. */
static void grouped_splits(int arg) {
    static const int64_t sizes[][5] = {{0, 4, 9, 1, 6}, {5, 0, 0, 2, 8}, {5, 7, 3, 2, 0}, {0, 0, 0, 0, 0}};
    for (int i = 0; i < 8; i++) {
        lin_spec s = grouped_spec(arg, sizes[i % 4]);
        s.split = (lin_split)((i + i / 4) % 4);
        s.extra = i == 3 ? 0 : 3 * i; /* no row at all in 3 */
        s.tail = i % 2 ? GMM_TAIL_ZERO : GMM_TAIL_KEEP;
        if (i >= 4) s.out = GMM_F32;
        both_grouped(s);
    }
}

/* Pitches, gaps, and host tables, which a kernel copies. */
static void grouped_forms(int arg) {
    static const int64_t sizes[5] = {12, 0, 31, 1, 40};
    lin_spec s = grouped_spec(arg, sizes);
    s.pad = 8;
    s.gap = 16;
    s.extra = 4;
    s.tail = GMM_TAIL_ZERO;
    both_grouped(s);
    s.gap = 0;
    s.w = s.grad = T_TABLE_HOST;
    both_grouped(s);
    s.groups = 1;
    s.w = s.grad = T_PACKED;
    both_grouped(s);
}

/* y_add, main_grad, overwrite, and alpha of the whole product. An empty group that adds keeps its bits. */
static void grouped_adds(int arg) {
    static const int64_t sizes[5] = {12, 0, 31, 1, 40};
    for (int i = 0; i < 4; i++) {
        lin_spec s = grouped_spec(arg, sizes);
        s.extra = 2;
        s.add = s.op != GMM_OP_LINEAR_WGRAD;
        s.main_grad = s.op == GMM_OP_LINEAR_WGRAD;
        if (i % 2) s.out = GMM_F32;
        s.alpha = i / 2;
        both_grouped(s);
        s.add = 0;
        s.overwrite = 1;
        both_grouped(s);
    }
}

/* Sizes far above and far below what the algorithm is chosen for, by rows_hint or by the capacity: results are right,
   and have the same bits whatever the hint. */
static void grouped_hints(int arg) {
    static const int64_t sizes[][5] = {{1, 4096, 0, 7, 900}, {2, 0, 3, 1, 17}};
    static const int64_t hints[] = {0, 1, 50, 80, 320, 2000}, extra[] = {0, 20000};
    for (int i = 0; i < 2; i++) {
        const uint64_t seed = t_rand();
        void *first = NULL;
        for (int h = 0; h < T_COUNT(hints); h++) {
            lin_spec s = grouped_spec(arg, sizes[i]);
            size_t bytes;
            lin_run r;
            s.K = 64;
            s.N = 72;
            s.extra = extra[i];
            s.hint = hints[h];
            s.fill = T_REALS;
            if (s.op == GMM_OP_LINEAR_WGRAD) s.out = GMM_F32;
            t_reseed(seed);
            build_grouped(&r, &s);
            T_OK(t_linear(T.ctx, s.op, &r.d));
            if (h == 0) lin_check(&r);
            bytes = (size_t)(r.out.count * (s.op == GMM_OP_LINEAR_WGRAD ? r.out.rows : r.live) * r.out.cols *
                             ref_bytes(r.out.dtype));
            if (h) t_same("with another hint", first, t_mat_bits(&r.out), bytes);
            else first = t_mat_bits(&r.out);
        }
    }
}

/* A group's result does not depend on the other groups. */
static void grouped_alone(int arg) {
    static const int64_t sizes[5] = {13, 64, 0, 1, 200};
    static const int64_t features[][2] = {{256, 512}, {72, 40}};
    for (int f = 0; f < 2; f++) {
        lin_spec s = grouped_spec(arg, sizes);
        lin_run r;
        s.fill = T_REALS;
        s.K = features[f][0];
        s.N = features[f][1];
        build_grouped(&r, &s);
        T_OK(t_linear(T.ctx, s.op, &r.d));
        lin_check(&r);
        lin_alone(&r);
    }
}

/* As many groups as large models have, most of them empty. */
static void grouped_many(int arg) {
    enum { GROUPS = 513 };
    int64_t *sizes = (int64_t *)t_host(GROUPS * sizeof *sizes);
    lin_spec s = grouped_spec(arg, sizes);
    s.groups = GROUPS;
    for (int64_t g = 0; g < GROUPS; g++) sizes[g] = g % 3 ? 0 : g * 7 % 23;
    both_grouped(s);
}

/* The three products on one workspace, captured and replayed with other splits, faulty ones among them: the bits of
   eager calls. */
static void grouped_graph(int arg) {
    enum { GROUPS = 4, CAPACITY = 300, WIDE = 64, DEEP = 72, SPLITS = 6 };
    static const int64_t splits[SPLITS][GROUPS] = {{75, 75, 75, 75}, {0, 300, 0, 0}, {0, 0, 0, 0}, {1, 0, 2, 130},
                                                   {9, -5, 40, 8}, {100, 150, 100, 7}};
    static const uint32_t faults[SPLITS] = {0, 0, 0, 0, GMM_FAULT_NEGATIVE, GMM_FAULT_CAPACITY};
    static const int64_t even[GROUPS] = {75, 75, 75, 75};
    lin_spec s = grouped_spec(arg, even);
    const uint32_t zero = 0;
    void *graph = NULL, *ws, *eager[3] = {NULL, NULL, NULL};
    gmm_status status = GMM_OK;
    size_t bytes = 0;
    const char *why;
    lin_run r[3];
    s.groups = GROUPS;
    s.K = WIDE;
    s.N = DEEP;
    s.fill = T_REALS;
    s.tail = GMM_TAIL_ZERO;
    s.split = LIN_I64;
    for (int i = 0; i < 3; i++) {
        gmm_info info = GMM_ZERO;
        s.op = products[i];
        if (i == 2) s.out = GMM_F32;
        build_grouped(&r[i], &s);
        r[i].groups.splits = t_alloc(sizeof even);
        t_upload((void *)(uintptr_t)r[i].groups.splits, even, sizeof even);
        T_OK(gmm_linear_query(T.ctx, s.op, &r[i].d, &info));
        if (info.workspace_bytes > bytes) bytes = info.workspace_bytes;
    }
    ws = t_workspace(bytes);
    why = device_begin_capture();
    T_CHECK(!why, "begin: %s", why);
    for (int i = 0; i < 3 && status == GMM_OK; i++)
        status = t_linear_functions[products[i] - GMM_OP_LINEAR_FWD](T.ctx, &r[i].d, ws, bytes, T.stream);
    why = device_end_capture(&graph);
    T_CHECK(status == GMM_OK, "capture: %s", gmm_last_error(T.ctx));
    T_CHECK(!why, "end: %s", why);
    for (int k = 0; k < 5 * SPLITS; k++) {
        const int split = k * 5 % SPLITS;
        for (int pass = 0; pass < 2; pass++) {
            t_poison(ws, 0xFF, bytes);
            for (int i = 0; i < 3; i++) {
                t_upload((void *)(uintptr_t)r[i].groups.splits, splits[split], sizeof splits[split]);
                t_upload(r[i].fault, &zero, sizeof zero);
                t_mat_poison(&r[i].out);
            }
            for (int i = 0; i < 3 && !pass; i++)
                T_OK(t_linear_functions[products[i] - GMM_OP_LINEAR_FWD](T.ctx, &r[i].d, ws, bytes, T.stream));
            if (pass) why = device_replay(graph);
            T_CHECK(!why, "replay: %s", why);
            for (int i = 0; i < 3; i++) {
                uint32_t fault = 1;
                void *b = t_mat_bits(&r[i].out);
                t_download(&fault, r[i].fault, sizeof fault);
                T_CHECK(fault == faults[split], "split %d: fault bits %x, want %x", split, fault, faults[split]);
                if (pass)
                    t_same("replay", eager[i], b,
                           (size_t)(r[i].out.count * r[i].out.rows * r[i].out.cols * ref_bytes(r[i].out.dtype)));
                if (pass && !split) lin_check(&r[i]); /* the split that the call was built with */
                eager[i] = b;
            }
        }
    }
    device_graph_free(graph);
}

/* What the grouped mode does not serve, each with its reason; AUTO never takes it. */
static void grouped_declines(int arg) {
    static const int64_t sizes[5] = {12, 0, 31, 1, 40};
    enum { BIAS, ALPHAS, DTYPE, FEATURES, PITCH, STRIDE, TABLE, ADDRESS, KINDS };
    static const char *const why[KINDS] = {
        "no bias of bf16", "alpha per group from host sizes", "multiplies f32 from host sizes",
        "multiples of 8, not 24 and 19", "rows of w at multiples of 16", "matrices of w at multiples of 16",
        "pointer tables", "needs x at a multiple of 16 bytes"
    };
    (void)arg;
    for (int i = 0; i < KINDS; i++) {
        lin_spec s = grouped_spec(1, sizes);
        gmm_config config;
        gmm_context *other;
        gmm_info info = GMM_ZERO;
        gmm_mat x;
        lin_run r;
        build_grouped(&r, &s); /* skips */
        if (i == BIAS) s.bias = GMM_BF16;
        if (i == ALPHAS) s.alpha = 2;
        if (i == DTYPE) s.in = s.out = GMM_F32;
        if (i == FEATURES) s.N = 19;
        if (i == PITCH) s.pad = 3;
        if (i == STRIDE) s.gap = 3;
        if (i == TABLE) s.w = T_TABLE;
        s.fill = T_INTS;
        build(&r, &s);
        if (i == ADDRESS) {
            x = r.x.mat;
            x.data = (char *)x.data + 2;
            r.d.x = &x;
        }
        T_REFUSED(GMM_E_UNSUPPORTED, t_linear(T.ctx, s.op, &r.d), "options.engine", "cublaslt", why[i], NULL);
        if (i == ALPHAS) { /* a query refuses what the call refuses, though it may have no alpha yet */
            r.d.alpha = NULL;
            T_REFUSED(GMM_E_UNSUPPORTED, gmm_linear_query(T.ctx, s.op, &r.d, &info), "options.engine", why[i], NULL);
        }
        config = T.config;
        config.engine = GMM_ENGINE_AUTO;
        config.require_engine = GMM_ENGINE_CUBLASLT;
        other = t_context(&config);
        r.d.options = NULL;
        T_OK_TEXT(gmm_linear_query(other, s.op, &r.d, &info), gmm_last_error(other));
        T_CHECK(info.engine != GMM_ENGINE_CUBLASLT, "AUTO took %s", gmm_engine_name(info.engine));
    }
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
    t_add_gpu_once(grouped_or_refused, 1, "cublaslt device sizes are served or refused");
    for (int i = 0; i < 6; i++) {
        const char *op = gmm_op_name(products[i / 2]), *dtype = gmm_dtype_name(lin_dtype(1 + i % 2));
        t_add_gpu_once(grouped_shapes, i, "cublaslt grouped shapes %s %s", op, dtype);
        t_add_gpu_once(grouped_splits, i, "cublaslt grouped empty groups, splits, tails %s %s", op, dtype);
        t_add_gpu_once(grouped_forms, i, "cublaslt grouped strides and host tables %s %s", op, dtype);
        t_add_gpu_once(grouped_adds, i, "cublaslt grouped adding, alpha %s %s", op, dtype);
        t_add_gpu_once(grouped_hints, i, "cublaslt grouped sizes far from the hint %s %s", op, dtype);
        t_add_gpu_once(grouped_alone, i, "cublaslt grouped group alone %s %s", op, dtype);
        t_add_gpu_once(grouped_many, i, "cublaslt grouped many groups %s %s", op, dtype);
    }
    t_add_gpu_once(grouped_graph, 0, "cublaslt grouped graph with other splits f16");
    t_add_gpu_once(grouped_graph, 1, "cublaslt grouped graph with other splits bf16");
    t_add_gpu_once(grouped_declines, 0, "cublaslt grouped declines with a reason");
#endif
}
