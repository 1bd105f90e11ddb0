/* test_act.c - activations: values, gradients, limits, settings. */
#include "test.h"

#include <math.h>
#include <string.h>

/* ------------------------------------------------------------------------------------------------- Reference --- */

/* Relative error that fp32 arithmetic may add: the rounded argument of the exponential, up to about 60 in size, is
   relative error of its result. */
static const double lost = 2e-5;

/* Subnormal exponentials lose precision on the host and are flushed to 0 on GPUs. */
static double bound_of(gmm_dtype dtype, double want, double size, double factor) {
    const double error = lost * size + (T.gpu ? 0x1p-119 : 0x1p-140) * (1.0 + factor);
    return error + ref_roundoff(dtype) * (fabs(want) + error) + ref_tiny(dtype);
}

/* Columns of the pre-activation: gate and linear part of output j. */
static int64_t gate_column(int64_t j, int64_t B) { return B ? j / B * 2 * B + j % B : j; }
static int64_t linear_column(int64_t j, int64_t ffn, int64_t B) { return B ? gate_column(j, B) + B : ffn + j; }

/* ------------------------------------------------------------------------------------------------------ Runs --- */

typedef struct act_run {
    gmm_act act;
    int64_t T, live, ffn, cols;
    gmm_groups groups;
    t_mat x, y, dy, dx;
    double *prob;
    float *dprob;
    gmm_activation d;
} act_run;

/* Group sizes that add up to `live`, with empty groups at the beginning, middle and end. */
static const void *split(int64_t live, int32_t *count) {
    enum { GROUPS = 7 };
    int64_t sizes[GROUPS] = { 0 };
    int32_t narrow[GROUPS];
    sizes[1] = live / 3;
    sizes[3] = live / 4;
    sizes[5] = live - sizes[1] - sizes[3];
    for (int g = 0; g < GROUPS; g++) narrow[g] = (int32_t)sizes[g];
    t_splits(sizes, GROUPS);
    *count = GROUPS;
    return t_in(narrow, sizeof narrow);
}

/* Inputs over [-8, 8), rows past `live` NaN; probabilities with 0 and negative ones. */
static act_run make(gmm_act act, int64_t T_, int64_t live, int64_t ffn, gmm_dtype x, gmm_dtype y, gmm_dtype dy,
                    gmm_dtype dx, int64_t pad) {
    act_run r = GMM_ZERO;
    t_about("%s, %lld rows, ffn %lld, x %s, y %s, dy %s, dx %s, interleave %d, limit %g, pad %lld",
            gmm_act_name(act.kind), (long long)T_, (long long)ffn, gmm_dtype_name(x), gmm_dtype_name(y),
            gmm_dtype_name(dy), gmm_dtype_name(dx), (int)act.interleave, (double)act.limit, (long long)pad);
    r.act = act;
    r.T = T_;
    r.live = live;
    r.ffn = ffn;
    r.cols = gmm_act_gated(act.kind) ? 2 * ffn : ffn;
    r.groups.capacity = T_;
    r.groups.splits = split(live, &r.groups.count);
    r.groups.dtype = GMM_I32;
    r.x = t_mat_make(x, 1, T_, r.cols, pad, 0, T_PACKED, T_REALS);
    r.dy = t_mat_make(dy, 1, T_, ffn, 2 * pad, 0, T_PACKED, T_REALS);
    r.y = t_mat_make(y, 1, T_, ffn, 3 * pad, 0, T_PACKED, T_POISON);
    r.dx = t_mat_make(dx, 1, T_, r.cols, pad, 0, T_PACKED, T_POISON);
    for (int64_t i = 0; i < T_ * r.cols; i++) r.x.v[i] = i < live * r.cols ? ref_round(x, 8.0 * r.x.v[i]) : (double)NAN;
    for (int64_t i = live * ffn; i < T_ * ffn; i++) r.dy.v[i] = (double)NAN;
    t_mat_put(&r.x);
    t_mat_put(&r.dy);
    r.prob = (double *)t_host((size_t)T_ * sizeof *r.prob);
    for (int64_t i = 0; i < T_; i++)
        r.prob[i] = i >= live ? (double)NAN : i % 5 == 3 ? 0.0 : (double)(float)t_real();
    r.d.prob = t_floats_in(r.prob, T_);
    r.dprob = t_floats_out(T_);
    r.d.ffn = ffn;
    r.d.x = &r.x.mat;
    r.d.y = &r.y.mat;
    return r;
}
/* Sets the pointers into `r` itself; they would dangle if a copy of the struct kept them. */
static const gmm_activation *bind(act_run *r, int backward) {
    r->d.groups = &r->groups;
    r->d.act = &r->act;
    r->d.x = &r->x.mat;
    r->d.y = &r->y.mat;
    r->d.dy = backward ? &r->dy.mat : NULL;
    r->d.dx = backward ? &r->dx.mat : NULL;
    r->d.dprob = backward ? r->dprob : NULL;
    return &r->d;
}

static gmm_status launch(gmm_context *ctx, gmm_op op, const gmm_activation *d) {
    gmm_info info = GMM_ZERO;
    const gmm_status s = gmm_act_query(ctx, op, d, &info);
    void *workspace = s == GMM_OK ? t_workspace(info.workspace_bytes) : NULL;
    if (s != GMM_OK) return s;
    return (op == GMM_OP_ACT_FWD ? gmm_act_fwd : gmm_act_bwd)(ctx, d, workspace, info.workspace_bytes, T.stream);
}

static void check_tail(const char *what, const t_mat *m, int64_t live, gmm_tail tail) {
    const int64_t row = m->cols * ref_bytes(m->dtype);
    t_bytes(what, (const char *)t_mat_bits(m) + live * row, tail == GMM_TAIL_ZERO ? 0 : 0xFF,
            (size_t)((m->rows - live) * row));
}
#define check_tail(...) T_CALL(check_tail, __VA_ARGS__)

static void check_y(const act_run *r) {
    const int64_t n = r->live * r->ffn;
    double *want = (double *)t_host((size_t)n * sizeof *want), *bound = (double *)t_host((size_t)n * sizeof *bound);
    for (int64_t i = 0; i < n; i++) {
        const int64_t t = i / r->ffn, j = i % r->ffn, B = r->act.interleave;
        const double *x = r->x.v + t * r->cols, p = r->d.prob ? r->prob[t] : 1.0;
        const double b = gmm_act_gated(r->act.kind) ? x[linear_column(j, r->ffn, B)] : 0.0;
        const ref_point q = ref_act(&r->act, x[gate_column(j, B)], b);
        want[i] = p * q.y;
        bound[i] = bound_of(r->y.dtype, want[i], fabs(p) * q.y_size, fabs(b));
    }
    t_near("y", t_mat_get(&r->y), want, bound, n);
    check_tail("tail of y", &r->y, r->live, r->groups.tail);
}
#define check_y(...) T_CALL(check_y, __VA_ARGS__)

static void check_gradients(const act_run *r) {
    const int64_t n = r->live * r->cols, B = r->act.interleave;
    double *want = (double *)t_host((size_t)n * sizeof *want), *bound = (double *)t_host((size_t)n * sizeof *bound);
    double *dprob = (double *)t_host((size_t)r->live * sizeof *dprob + 1);
    double *dprob_bound = (double *)t_host((size_t)r->live * sizeof *dprob_bound + 1);
    const int gated = gmm_act_gated(r->act.kind);
    for (int64_t t = 0; t < r->live; t++)
        for (int64_t j = 0; j < r->ffn; j++) {
            const int64_t ia = t * r->cols + gate_column(j, B), ib = t * r->cols + linear_column(j, r->ffn, B);
            const double dy = r->dy.v[t * r->ffn + j], g = (r->d.prob ? r->prob[t] : 1.0) * dy;
            const double b = gated ? r->x.v[ib] : 0.0;
            const ref_point p = ref_act(&r->act, r->x.v[ia], b);
            want[ia] = g * p.da;
            bound[ia] = bound_of(r->dx.dtype, want[ia], fabs(g) * p.da_size, fabs(b));
            if (gated) {
                want[ib] = g * p.db;
                bound[ib] = bound_of(r->dx.dtype, want[ib], fabs(g) * p.db_size, fabs(b));
            }
            dprob[t] += dy * p.y;
            dprob_bound[t] += (lost + (double)(r->ffn + 8) * 0x1p-24) * fabs(dy) * p.y_size;
            dprob_bound[t] += 0x1p-140 * (1.0 + fabs(b));
        }
    t_near("dx", t_mat_get(&r->dx), want, bound, n);
    check_tail("tail of dx", &r->dx, r->live, r->groups.tail);
    t_near("dprob", t_floats_get(r->dprob, r->T), dprob, dprob_bound, r->live);
    t_bytes("tail of dprob", (const float *)t_get(r->dprob, (size_t)r->T * sizeof(float)) + r->live,
            r->groups.tail == GMM_TAIL_ZERO ? 0 : 0xFF, (size_t)(r->T - r->live) * sizeof(float));
}
#define check_gradients(...) T_CALL(check_gradients, __VA_ARGS__)

/* Poisons the outputs, which an earlier call may have written. */
static void poison_outputs(const act_run *r) {
    t_mat_poison(&r->y);
    t_mat_poison(&r->dx);
    t_poison(r->dprob, 0xFF, (size_t)r->T * sizeof(float));
}

static void run_both(act_run *r) {
    poison_outputs(r);
    T_OK(launch(T.ctx, GMM_OP_ACT_FWD, bind(r, 0)));
    check_y(r);
    t_mat_poison(&r->y);
    T_OK(launch(T.ctx, GMM_OP_ACT_BWD, bind(r, 1)));
    check_y(r);
    check_gradients(r);
}
#define run_both(...) T_CALL(run_both, __VA_ARGS__)

/* ----------------------------------------------------------------------------------------- Values and gradients --- */

static const gmm_dtype dtypes[] = { GMM_F32, GMM_BF16, GMM_F16 };

static gmm_act settings(gmm_act_kind kind, int64_t interleave) {
    gmm_act a = GMM_ZERO;
    a.kind = kind;
    a.interleave = (int32_t)interleave;
    return a;
}

static void values_of(gmm_act_kind kind, gmm_dtype dtype, int64_t rows, int64_t ffn, int64_t pad, int all) {
    for (int64_t B = 0; B <= (gmm_act_gated(kind) ? ffn : 0); B++) {
        act_run r;
        if (B && (ffn % B || !(all || (B & (B - 1)) == 0))) continue;
        r = make(settings(kind, B), rows + 3, rows, ffn, dtype, dtype, dtype, dtype, pad);
        r.groups.tail = B % 2 ? GMM_TAIL_ZERO : GMM_TAIL_KEEP;
        if (B == 2) r.d.prob = NULL;
        run_both(&r);
    }
}
#define values_of(...) T_CALL(values_of, __VA_ARGS__)
/* The argument of a case: a row of ref_acts and a dtype. */
static int act_arg(int row, int dtype) { return row + ref_act_count * dtype; }
static int act_row(gmm_act_kind kind) {
    int row = 0;
    while (ref_acts[row].kind != kind) row++;
    return row;
}
static gmm_act_kind kind_of(int arg) { return ref_acts[arg % ref_act_count].kind; }
static gmm_dtype dtype_of(int arg) { return dtypes[arg / ref_act_count]; }

static void act_17x64(int arg) { values_of(kind_of(arg), dtype_of(arg), 17, 64, 0, 0); }
static void act_13x100(int arg) { values_of(kind_of(arg), dtype_of(arg), 13, 100, 3, 1); }
/* several chunks of columns, and interleave blocks that end inside of a chunk */
static void act_5x600(int arg) { values_of(kind_of(arg), dtype_of(arg), 5, 600, 1, 1); }
/* several rows per thread block on a GPU; the last round of warps is partly idle */
static void act_21x1160(int arg) { values_of(kind_of(arg), dtype_of(arg), 21, 1160, 0, 0); }
static void act_1024x2048(int arg) {
    const gmm_dtype dtype = dtype_of(arg);
    act_run r = make(settings(kind_of(arg), 32), 1024, 1021, 2048, dtype, dtype, dtype, dtype, 0);
    if (!gmm_act_gated(r.act.kind)) r.act.interleave = 0;
    run_both(&r);
}

/* Every operand has its own dtype; all settings at once. */
static void act_mixed(int arg) {
    gmm_act a = arg % 2 ? gmm_act_of(GMM_ACT_PRESET_GPT_OSS) : gmm_act_of(GMM_ACT_PRESET_KIMI_SITU);
    act_run r;
    if (arg >= 2) {
        a = settings(arg == 2 ? GMM_ACT_GEGLU : arg == 3 ? GMM_ACT_QGEGLU : arg == 4 ? GMM_ACT_SITUGLU
                                                                                     : GMM_ACT_GEGLU_ERF, 4);
        a.limit = 2.5f;
        a.alpha = 0.75f;
        a.offset = -0.5f;
        if (arg == 4) a.beta1 = 1.5f, a.beta2 = 3.0f;
    }
    r = make(a, 23, 20, 60, dtypes[arg % 3], dtypes[(arg + 1) % 3], dtypes[(arg + 2) % 3], dtypes[arg % 2], 5);
    run_both(&r);
}

/* An ungated activation with a limit is clamped from above. */
static void act_ungated_limit(int arg) {
    gmm_act a = settings(kind_of(arg), 0);
    act_run r;
    a.limit = 3.0f;
    r = make(a, 9, 9, 70, GMM_F32, GMM_F32, GMM_F32, GMM_F32, 0);
    run_both(&r);
}

static void presets(int arg) {
    const gmm_act oss = gmm_act_of(GMM_ACT_PRESET_GPT_OSS), kimi = gmm_act_of(GMM_ACT_PRESET_KIMI_SITU);
    int listed = 0;
    (void)arg;
    T_CHECK(gmm_act_of(GMM_ACT_PRESET_SWIGLU).kind == GMM_ACT_SWIGLU, "swiglu");
    T_CHECK(oss.kind == GMM_ACT_SWIGLU && oss.limit == 7.0f && oss.alpha == 1.702f && oss.offset == 1.0f &&
            oss.interleave == 1, "gpt-oss");
    T_CHECK(kimi.kind == GMM_ACT_SITUGLU && kimi.beta1 == 4.0f && kimi.beta2 == 25.0f, "kimi");
    T_CHECK(gmm_act_of(GMM_ACT_PRESET_NEMOTRON).kind == GMM_ACT_RELU2, "nemotron");
    T_CHECK(gmm_act_of((gmm_act_preset)99).kind == GMM_ACT_NONE, "unknown");
#define ACT(kind_, value, text, gate, gated_, alpha_, betas_) \
    for (int k = 0; k <= ref_act_count; k++) { \
        T_CHECK(k < ref_act_count, "ref_acts lacks %s", #text); \
        if (ref_acts[k].kind == kind_) { \
            T_CHECK(ref_acts[k].gated == gated_ && ref_acts[k].alpha == alpha_ && ref_acts[k].betas == betas_, #text); \
            listed++; \
            break; \
        } \
    }
    GMM_ACT_LIST(ACT)
#undef ACT
    T_CHECK(listed == ref_act_count, "%d of %d", listed, ref_act_count);
    for (int k = 0; k < ref_act_count; k++) {
        const gmm_act_kind kind = ref_acts[k].kind;
        T_CHECK((int)kind == ref_acts[k].value, "%s is %d", ref_acts[k].name, (int)kind);
        T_CHECK(strcmp(gmm_act_name(kind), ref_acts[k].name) == 0, "name %d", k);
        T_CHECK(gmm_act_gated(kind) == ref_acts[k].gated, "gated %d", k);
    }
    T_CHECK(strcmp(gmm_act_name((gmm_act_kind)99), "?") == 0 && gmm_act_gated((gmm_act_kind)99) == 0, "99");
    T_CHECK(strcmp(gmm_act_name((gmm_act_kind)-1), "?") == 0, "-1");
}

/* All split forms, all-empty splits, no rows, no tail. */
static void act_splits(int arg) {
    act_run r = make(settings(GMM_ACT_SWIGLU, 8), 12, 12, 24, GMM_F32, GMM_F32, GMM_F32, GMM_F32, 0);
    const int32_t sizes32[3] = { 4, 0, 8 }, offsets32[4] = { 0, 4, 4, 12 };
    const int64_t sizes64[3] = { 4, 0, 8 }, offsets64[4] = { 0, 4, 4, 12 };
    const int32_t none[3] = { 0, 0, 0 };
    (void)arg;
    r.groups.count = 3;
    for (int form = 0; form < 5; form++) {
        r.groups.dtype = form % 2 ? GMM_I64 : GMM_I32;
        r.groups.form = form < 2 ? GMM_SPLIT_SIZES : GMM_SPLIT_OFFSETS;
        r.groups.splits = form == 0   ? t_in(sizes32, sizeof sizes32)
                          : form == 1 ? t_in(sizes64, sizeof sizes64)
                          : form == 2 ? t_in(offsets32, sizeof offsets32)
                          : form == 3 ? t_in(offsets64, sizeof offsets64)
                                      : (const void *)sizes32;
        if (form == 4) {
            r.groups.form = GMM_SPLIT_SIZES;
            r.groups.on_host = 1;
        }
        run_both(&r);
    }
    r.groups.splits = none;
    r.live = 0;
    for (int tail = 0; tail < 2; tail++) {
        r.groups.tail = (gmm_tail)tail;
        poison_outputs(&r);
        T_OK(launch(T.ctx, GMM_OP_ACT_FWD, bind(&r, 0)));
        check_tail("y of empty groups", &r.y, 0, (gmm_tail)tail);
    }
    r.groups.capacity = 0;
    r.x.mat.data = r.y.mat.data = r.dy.mat.data = r.dx.mat.data = NULL;
    r.d.prob = NULL;
    bind(&r, 1);
    r.d.dprob = NULL;
    T_OK(launch(T.ctx, GMM_OP_ACT_BWD, &r.d));
}

/* A faulty device split is clamped and reported. */
static void act_faults(int arg) {
    act_run r = make(settings(GMM_ACT_GELU, 0), 10, 10, 24, GMM_F32, GMM_F32, GMM_F32, GMM_F32, 0);
    const int32_t sizes[3] = { 4, -3, 1000 };
    uint32_t *fault = (uint32_t *)t_alloc(sizeof *fault), seen;
    (void)arg;
    t_poison(fault, 0, sizeof *fault);
    r.groups.count = 3;
    r.groups.splits = t_in(sizes, sizeof sizes);
    r.groups.fault = fault;
    run_both(&r);
    seen = *(uint32_t *)t_get(fault, sizeof *fault);
    T_CHECK(seen == ((uint32_t)GMM_FAULT_NEGATIVE | (uint32_t)GMM_FAULT_CAPACITY), "fault word is %u", seen);
}

/* Outputs that are NULL are not computed, and the other outputs keep every bit. */
static void act_wanted(int arg) {
    act_run r = make(settings(GMM_ACT_SWIGLU, arg), 21, 19, 300, GMM_BF16, GMM_BF16, GMM_BF16, GMM_BF16, 0);
    const void *y, *dx, *dprob;
    T_OK(launch(T.ctx, GMM_OP_ACT_BWD, bind(&r, 1)));
    y = t_mat_bits(&r.y);
    dx = t_mat_bits(&r.dx);
    dprob = t_get(r.dprob, 21 * sizeof(float));
    for (int want = 1; want < 8; want++) {
        t_mat some_y = t_mat_out(GMM_BF16, 1, 21, 300), some_dx = t_mat_out(GMM_BF16, 1, 21, 600);
        float *some_dprob = t_floats_out(21);
        r.d.y = want & 1 ? &some_y.mat : NULL;
        r.d.dx = want & 2 ? &some_dx.mat : NULL;
        r.d.dprob = want & 4 ? some_dprob : NULL;
        T_OK(launch(T.ctx, GMM_OP_ACT_BWD, &r.d));
        if (want & 1) t_same("y", t_mat_bits(&some_y), y, 21 * 300 * 2);
        if (want & 2) t_same("dx", t_mat_bits(&some_dx), dx, 21 * 600 * 2);
        if (want & 4) t_same("dprob", t_get(some_dprob, 21 * sizeof(float)), dprob, 21 * sizeof(float));
    }
}

/* dx in the place of x and y in that of dy: the bits of apart ones. */
static void act_in_place(int arg) {
    static const struct { gmm_act_kind kind; int64_t block, rows, ffn; } forms[] = {
        { GMM_ACT_SWIGLU, 0, 40, 1160 }, { GMM_ACT_SWIGLU, 1, 17, 64 },  { GMM_ACT_SWIGLU, 8, 33, 520 },
        { GMM_ACT_GEGLU, 100, 9, 300 },  { GMM_ACT_GEGLU, 0, 21, 13 },   { GMM_ACT_SWIGLU, 64, 5, 2048 },
        { GMM_ACT_GELU, 0, 31, 260 },    { GMM_ACT_RELU2, 0, 19, 77 },
    };
    for (int i = 0; i < (int)T_COUNT(forms); i++)
        for (int with_dprob = 0; with_dprob < 2; with_dprob++) {
            const gmm_dtype t = dtypes[arg];
            act_run r = make(settings(forms[i].kind, forms[i].block), forms[i].rows + 3, forms[i].rows, forms[i].ffn, t,
                             t, t, t, 0);
            const int64_t x_bytes = r.live * r.cols * ref_bytes(t), y_bytes = r.live * r.ffn * ref_bytes(t);
            t_mat x = t_mat_out(t, 1, r.T, r.cols), g = t_mat_out(t, 1, r.T, r.ffn);
            const void *y, *dx, *dprob;
            T_OK(launch(T.ctx, GMM_OP_ACT_BWD, bind(&r, 1)));
            y = t_mat_bits(&r.y);
            dx = t_mat_bits(&r.dx);
            dprob = t_get(r.dprob, (size_t)r.live * sizeof(float));
            t_upload(x.data, t_mat_bits(&r.x), (size_t)x_bytes);
            t_upload(g.data, t_mat_bits(&r.dy), (size_t)y_bytes);
            t_poison(r.dprob, 0xFF, (size_t)r.T * sizeof(float));
            r.d.x = r.d.dx = &x.mat;
            r.d.y = r.d.dy = &g.mat;
            if (!with_dprob) r.d.dprob = NULL;
            T_OK(launch(T.ctx, GMM_OP_ACT_BWD, &r.d));
            t_same("y", t_mat_bits(&g), y, (size_t)y_bytes);
            t_same("dx", t_mat_bits(&x), dx, (size_t)x_bytes);
            if (with_dprob)
                t_same("dprob", t_get(r.dprob, (size_t)r.live * sizeof(float)), dprob, (size_t)r.live * sizeof(float));
        }
}

/* The same bits from any number of threads, and for a row alone. */
static void act_threads(int arg) {
    act_run r = make(settings(GMM_ACT_SITUGLU, arg), 300, 290, 520, GMM_F32, GMM_F32, GMM_F32, GMM_F32, 0);
    const void *y, *dx, *dprob;
    T_OK(launch(T.ctx, GMM_OP_ACT_BWD, bind(&r, 1)));
    y = t_mat_bits(&r.y);
    dx = t_mat_bits(&r.dx);
    dprob = t_get(r.dprob, 300 * sizeof(float));
    if (!T.gpu)
        for (int threads = 1; threads < 8; threads += 3) {
            gmm_config config = T.config;
            gmm_context *ctx;
            config.threads = threads;
            ctx = t_context(&config);
            poison_outputs(&r);
            T_OK_TEXT(launch(ctx, GMM_OP_ACT_BWD, bind(&r, 1)), gmm_last_error(ctx));
            t_same("y", t_mat_bits(&r.y), y, 300 * 520 * 4);
            t_same("dx", t_mat_bits(&r.dx), dx, 300 * 1040 * 4);
            t_same("dprob", t_get(r.dprob, 300 * sizeof(float)), dprob, 300 * sizeof(float));
        }
    for (int64_t row = 0; row < 290; row += 97) {
        const int64_t one[1] = { 1 };
        t_mat y1 = t_mat_out(GMM_F32, 1, 1, 520), dx1 = t_mat_out(GMM_F32, 1, 1, 1040);
        float *dprob1 = t_floats_out(1);
        gmm_activation d = *bind(&r, 1);
        gmm_groups groups = r.groups;
        gmm_mat x1 = r.x.mat, dy1 = r.dy.mat;
        groups.count = 1;
        groups.capacity = 1;
        groups.dtype = GMM_I64;
        groups.splits = t_in(one, sizeof one);
        x1.data = (char *)x1.data + row * 1040 * 4;
        dy1.data = (char *)dy1.data + row * 520 * 4;
        d.groups = &groups;
        d.x = &x1;
        d.dy = &dy1;
        d.y = &y1.mat;
        d.dx = &dx1.mat;
        d.prob += row;
        d.dprob = dprob1;
        T_OK(launch(T.ctx, GMM_OP_ACT_BWD, &d));
        t_same("y of a row", t_mat_bits(&y1), (const char *)y + row * 520 * 4, 520 * 4);
        t_same("dx of a row", t_mat_bits(&dx1), (const char *)dx + row * 1040 * 4, 1040 * 4);
        t_same("dprob of a row", t_get(dprob1, 4), (const char *)dprob + row * 4, 4);
    }
}

/* Every SIMD level that the processor has. */
static void act_levels(int arg) {
    for (int level = 1; level <= 3; level++) {
        gmm_context *ctx = NULL;
        gmm_config config = GMM_ZERO;
        gmm_error error;
        config.cpu_level = level;
        if (level > t_cpu_level()) { /* test_groups.c reads the message */
            T_CHECK(gmm_create(&ctx, &config, &error) == GMM_E_DEVICE && !ctx, "level %d", level);
            continue;
        }
        ctx = t_context(&config);
        for (int k = 0; k < 3; k++) {
            act_run r = make(settings(kind_of(arg), 0), 11, 9, 83, dtypes[k], dtypes[k], dtypes[k], dtypes[k], 0);
            T_OK_TEXT(launch(ctx, GMM_OP_ACT_BWD, bind(&r, 1)), gmm_last_error(ctx));
            check_y(&r);
            check_gradients(&r);
        }
    }
}

/* Units in the last place of fp32 between got and want. */
static double ulps(float got, double want) {
    int e;
    if ((double)got == want || (isnan(got) && isnan(want))) return 0.0;
    if (isinf((double)got) && fabs(want) > 0x1.fffffep127) return 0.0;
    (void)frexp(want, &e);
    return fabs((double)got - want) / scalbn(1.0, (e < -125 ? -125 : e) - 24);
}

static void elementary(int arg) {
    double worst_exp = 0.0, worst_sigmoid = 0.0, worst_tanh = 0.0;
    (void)arg;
    for (int64_t i = -1100000; i <= 1100000; i++) {
        const float x = (float)i * 1e-4f;
        worst_exp = fmax(worst_exp, ulps(gmm_exp(x), exp((double)x)));
        if (x > -85.0f) worst_sigmoid = fmax(worst_sigmoid, ulps(gmm_sigmoid(x), 1.0 / (1.0 + exp(-(double)x))));
        worst_tanh = fmax(worst_tanh, ulps(gmm_tanh(x * 0.1f), tanh((double)(x * 0.1f))));
    }
    T_CHECK(worst_exp <= 3.0, "exp: %.2f ulp", worst_exp);
    T_CHECK(worst_sigmoid <= 4.0, "sigmoid: %.2f ulp", worst_sigmoid);
    T_CHECK(worst_tanh <= 5.0, "tanh: %.2f ulp", worst_tanh);
    T_CHECK(gmm_exp(-INFINITY) == 0.0f && gmm_exp(INFINITY) == INFINITY && isnan(gmm_exp(NAN)), "exp");
    T_CHECK(gmm_exp(0.0f) == 1.0f && gmm_exp(-1e30f) == 0.0f && gmm_exp(1e30f) == INFINITY, "exp");
    T_CHECK(gmm_sigmoid(-INFINITY) == 0.0f && gmm_sigmoid(INFINITY) == 1.0f && isnan(gmm_sigmoid(NAN)), "sigmoid");
    T_CHECK(gmm_tanh(-INFINITY) == -1.0f && gmm_tanh(INFINITY) == 1.0f && isnan(gmm_tanh(NAN)), "tanh");
    T_CHECK(gmm_tanh(1e-30f) == 1e-30f && gmm_tanh(0.0f) == 0.0f, "tanh");
}

/* Phi and its density against erfc in fp64, to the bound that the header states, over what fp32 can represent. */
static void normal_cdf(int arg) {
    double worst_near = 0.0, worst_far = 0.0;
    float density;
    (void)arg;
    for (int64_t i = -1310000; i <= 1310000; i++) {
        const float x = (float)i * 1e-5f;
        const double u = (double)x, want = 0.5 * erfc(-u / sqrt(2.0));
        const double peak = exp(-0.5 * u * u) / sqrt(2.0 * acos(-1.0));
        const float got = gmm_normal_cdf(x, &density);
        if (fabs(u) <= 3.0) worst_near = fmax(worst_near, fmax(ulps(got, want), ulps(density, peak)));
        if (want > 0x1p-126) worst_far = fmax(worst_far, fabs((double)got - want) / want);
        if (peak > 0x1p-126) worst_far = fmax(worst_far, fabs((double)density - peak) / peak);
    }
    T_CHECK(worst_near <= 16.0, "%.2f ulp near 0", worst_near);
    T_CHECK(worst_far <= 1.5e-5, "%.3g of the value", worst_far);
    T_CHECK(gmm_normal_cdf(0.0f, &density) > 0.4999999f && gmm_normal_cdf(0.0f, &density) < 0.5000001f, "0");
    T_CHECK(gmm_normal_cdf(-INFINITY, &density) == 0.0f && density == 0.0f, "-inf");
    T_CHECK(gmm_normal_cdf(INFINITY, &density) == 1.0f && density == 0.0f, "inf");
    T_CHECK(isnan(gmm_normal_cdf(NAN, &density)) && isnan(density), "NaN");
    T_CHECK(gmm_normal_cdf(-1e30f, &density) == 0.0f && gmm_normal_cdf(1e30f, &density) == 1.0f, "large");
}

/* ------------------------------------------------------------------------------------------ Limits and settings --- */

static void limits(int arg) {
    gmm_act a = kind_of(arg) == GMM_ACT_SWIGLU ? gmm_act_of(GMM_ACT_PRESET_GPT_OSS) : settings(kind_of(arg), 1);
    const float at = 7.0f, below = nextafterf(at, 0.0f), above = nextafterf(at, 9.0f);
    const float edge[] = { at, below, above, -at, -below, -above, 8.0f, -8.0f, 100.0f, -100.0f, 1e30f, -1e30f, INFINITY,
                           0.0f, -0.0f, 1.0f, NAN };
    const int64_t n = T_COUNT(edge), ffn = n * n;
    act_run r;
    a.limit = at;
    r = make(a, 1, 1, ffn, GMM_F32, GMM_F32, GMM_F32, GMM_F32, 0);
    for (int64_t j = 0; j < ffn; j++) {
        r.x.v[2 * j] = (double)edge[j / n];
        r.x.v[2 * j + 1] = (double)edge[j % n];
    }
    t_mat_put(&r.x);
    r.d.prob = NULL;
    T_OK(launch(T.ctx, GMM_OP_ACT_FWD, bind(&r, 0)));
    check_y(&r);
    {
        const double *y = t_mat_get(&r.y);
        for (int64_t j = 0; j < ffn; j++) {
            const double a_in = (double)edge[j / n], b_in = (double)edge[j % n];
            T_CHECK(isnan(y[j]) == (isnan(a_in) || isnan(b_in)), "a %g b %g gives %g", a_in, b_in, y[j]);
        }
    }
    bind(&r, 1);
    r.d.dprob = NULL;
    T_OK(launch(T.ctx, GMM_OP_ACT_BWD, &r.d));
    {
        const double *dx = t_mat_get(&r.dx);
        for (int64_t j = 0; j < ffn; j++) { /* at the limit itself the gradient is that of the range inside */
            const double ea = (double)edge[j / n], eb = (double)edge[j % n], dy = r.dy.v[j];
            const ref_point p = ref_act(&a, ea, eb);
            const double want[2] = { dy * p.da, dy * p.db };
            const double bound[2] = { bound_of(GMM_F32, want[0], fabs(dy) * p.da_size, fabs(eb)),
                                      bound_of(GMM_F32, want[1], fabs(dy) * p.db_size, fabs(eb)) };
            if (isnan(ea) || isnan(eb)) {
                if (!(a.kind == GMM_ACT_REGLU && isnan(ea))) /* its slope is a constant */
                    T_CHECK(isnan(dx[2 * j]), "a %g b %g: da is %g", ea, eb, dx[2 * j]);
                continue;
            }
            t_near("dx", dx + 2 * j, want, bound, 2);
            if (ea > 7.0) T_CHECK(dx[2 * j] == 0.0, "a %g b %g: da is %g", ea, eb, dx[2 * j]);
            if (fabs(eb) > 7.0) T_CHECK(dx[2 * j + 1] == 0.0, "a %g b %g: db is %g", ea, eb, dx[2 * j + 1]);
            if (ea == 7.0 && eb == 1.0) T_CHECK(dx[2 * j] != 0.0 && dx[2 * j + 1] != 0.0, "no gradient at the limit");
            if (eb == 7.0 && ea == 1.0) T_CHECK(dx[2 * j + 1] != 0.0, "no gradient at the limit");
            if (eb == -7.0 && ea == 1.0) T_CHECK(dx[2 * j + 1] != 0.0, "no gradient at the lower limit");
        }
    }
}

/* Large finite inputs, which a square, an exponential or alpha would overflow, give finite results. */
static void extremes(int arg) {
    const ref_act_row *row = &ref_acts[arg % ref_act_count];
    const float big[] = { 1e3f, -1e3f, 1e10f, -1e10f, 1e18f, -1e18f, 100.0f, -100.0f, -88.8f, -95.0f, -120.0f,
                          1e38f, -1e38f };
    const int squares = row->kind == GMM_ACT_RELU2 || row->kind == GMM_ACT_RELU2_GLU; /* of 1e38 they are infinite */
    const int64_t ffn = T_COUNT(big) - (squares ? 2 : 0);
    gmm_act act = settings(row->kind, 0);
    act_run r;
    if (row->alpha) act.alpha = 4.0f;
    r = make(act, 1, 1, ffn, GMM_F32, GMM_F32, GMM_F32, GMM_F32, 0);
    for (int64_t j = 0; j < r.cols; j++) r.x.v[j] = j < ffn ? (double)big[j] : 0.75;
    t_mat_put(&r.x);
    r.d.prob = NULL;
    run_both(&r);
}

/* -------------------------------------------------------------------------------------------------- Differences --- */

static gmm_act varied(const ref_act_row *row, int variant) {
    gmm_act a = settings(row->kind, 0);
    if (variant & 1) a.limit = 2.25f;
    if (variant & 2 && row->gated) a.offset = 0.75f;
    if (variant & 2 && row->betas) a.beta1 = 1.25f, a.beta2 = 2.0f;
    if (variant & 2 && row->alpha) a.alpha = 1.375f;
    return a;
}

/* The reference's derivatives against central differences of its values, then the library's arithmetic against it. */
static void differences(int arg) {
    for (int variant = 0; variant < 4; variant++) {
        const gmm_act act = varied(&ref_acts[arg], variant);
        const gmm_act_coef coef = gmm_act_coefficients(&act);
        const double h = 1e-5, limit = act.limit > 0.0f ? (double)act.limit : 1e9;
        for (int64_t i = 0; i < 4000; i++) {
            const float a = (float)(6.0 * t_real()), b = (float)(6.0 * t_real());
            const double x = (double)a, z = (double)b;
            const ref_point p = ref_act(&act, x, z);
            const double da = (ref_act(&act, x + h, z).y - ref_act(&act, x - h, z).y) / (2.0 * h);
            const double db = (ref_act(&act, x, z + h).y - ref_act(&act, x, z - h).y) / (2.0 * h);
            float got_da, got_db, y = 0.0f, unlimited[3] = { 0.0f, 0.0f, 0.0f };
            /* the derivative does not exist where ReLU and the limits have a kink */
            if (fabs(x) > 2.0 * h && fabs(x - limit) > 2.0 * h)
                T_CHECK(fabs(da - p.da) <= 1e-6 * (1.0 + p.da_size), "%s variant %d: d/da at (%g, %g): %.9g, %.9g",
                        gmm_act_name(act.kind), variant, x, z, p.da, da);
            if (fabs(fabs(z) - limit) > 2.0 * h)
                T_CHECK(fabs(db - p.db) <= 1e-6 * (1.0 + p.db_size), "%s variant %d: d/db at (%g, %g): %.9g, %.9g",
                        gmm_act_name(act.kind), variant, x, z, p.db, db);
            switch (act.kind) {
#define ACT(name, value, text, gate, gated, alpha, betas) \
            case name: \
                y = gmm_act_point(gate, gated, coef, a, b, &got_da, &got_db); \
                unlimited[0] = gmm__act_point(gate, gated, 0, coef, a, b, &unlimited[1], &unlimited[2]); \
                break;
                GMM_ACT_LIST(ACT)
#undef ACT
            default: got_da = got_db = NAN; break;
            }
            {
                const double got[3] = { (double)y, (double)got_da, (double)got_db }, want[3] = { p.y, p.da, p.db };
                const double bound[3] = { lost * p.y_size + 1e-40, lost * p.da_size + 1e-40,
                                          lost * p.db_size + 1e-40 };
                const float limited[3] = { y, got_da, got_db };
                t_near("y, da, db", got, want, bound, 3);
                if (act.limit == 0.0f) t_same("without limits", unlimited, limited, sizeof limited);
            }
        }
    }
}

/* ------------------------------------------------------------------------------------------------- Bad input --- */

#define BAD_ACT(change, ...) \
    do { \
        r.act = good; \
        change; \
        T_REFUSED(GMM_E_CONFIG, gmm_act_fwd(T.ctx, &r.d, NULL, 0, T.stream), "gmm_act_fwd: activation.act.", \
                  __VA_ARGS__, "G=7 T=12 ffn=24", NULL); \
        T_REFUSED(GMM_E_CONFIG, gmm_act_query(T.ctx, GMM_OP_ACT_BWD, &r.d, &info), "gmm_act_query: activation.act.", \
                  __VA_ARGS__, NULL); \
    } while (0)

static void bad_settings(int arg) {
    act_run r = make(settings(GMM_ACT_SWIGLU, 0), 12, 12, 24, GMM_BF16, GMM_BF16, GMM_BF16, GMM_BF16, 0);
    gmm_act good = r.act;
    gmm_info info = GMM_ZERO;
    (void)arg;
    bind(&r, 1);
    BAD_ACT(r.act.kind = (gmm_act_kind)99, "act.kind: 99 is no activation");
    BAD_ACT(r.act.kind = (gmm_act_kind)-1, "act.kind: -1");
    BAD_ACT(r.act.interleave = -8, "act.interleave: -8 must be >= 0", "swiglu bf16");
    BAD_ACT(r.act.interleave = 5, "act.interleave: 5 must divide ffn 24");
    BAD_ACT(r.act.interleave = 48, "act.interleave: 48 must divide ffn 24");
    BAD_ACT(r.act.limit = -1.0f, "act.limit: -1 must be 0 or finite and > 0");
    BAD_ACT(r.act.limit = INFINITY, "act.limit: inf");
    BAD_ACT(r.act.limit = NAN, "act.limit: ");
    BAD_ACT(r.act.alpha = NAN, "act.alpha: ", "must be finite");
    BAD_ACT(r.act.alpha = -INFINITY, "act.alpha: -inf must be finite");
    BAD_ACT(r.act.offset = INFINITY, "act.offset: inf must be finite");
    BAD_ACT(r.act.beta1 = 4.0f, "act.beta1: 4 must be 0, as swiglu takes no betas");
    BAD_ACT(r.act.beta2 = 25.0f, "act.beta2: 25 must be 0, as swiglu takes no betas");
    good.kind = GMM_ACT_SITUGLU;
    BAD_ACT(r.act.beta1 = -4.0f, "act.beta1: -4 must be 0 or finite and > 0", "situglu");
    BAD_ACT(r.act.beta2 = INFINITY, "act.beta2: inf must be 0 or finite and > 0");
    BAD_ACT(r.act.beta2 = NAN, "act.beta2: ");
    good.kind = GMM_ACT_RELU2_GLU;
    BAD_ACT(r.act.alpha = 1.702f, "act.alpha: 1.702 must be 0 or 1, as relu2_glu takes no alpha");
    good.kind = GMM_ACT_REGLU;
    BAD_ACT(r.act.alpha = 2.0f, "act.alpha: 2 must be 0 or 1");
    good.kind = GMM_ACT_SILU;
    BAD_ACT(r.act.interleave = 8, "act.interleave: 8 must be 0, as silu is not gated");
    BAD_ACT(r.act.offset = 1.0f, "act.offset: 1 must be 0, as silu is not gated");
    good.kind = GMM_ACT_NONE;
    BAD_ACT(r.act.alpha = 0.5f, "act.alpha: 0.5 must be 0 or 1, as none takes no alpha");
    BAD_ACT(r.act.beta1 = 0.5f, "act.beta1: 0.5");
    r.act = settings(GMM_ACT_SWIGLU, 24);
    r.act.alpha = 1.0f;
    r.act.limit = -0.0f;
    T_OK(launch(T.ctx, GMM_OP_ACT_FWD, &r.d));
}

#define REFUSE(status, change, restore, ...) \
    do { \
        change; \
        T_REFUSED(status, gmm_act_bwd(T.ctx, &r.d, NULL, 0, T.stream), "gmm_act_bwd: activation", __VA_ARGS__, NULL); \
        restore; \
    } while (0)

static void bad_operands(int arg) {
    act_run r = make(settings(GMM_ACT_SWIGLU, 0), 12, 12, 24, GMM_BF16, GMM_BF16, GMM_BF16, GMM_BF16, 0);
    gmm_options options = GMM_ZERO;
    gmm_info info = GMM_ZERO;
    gmm_activation d;
    const char *shapes = "G=7 T=12 ffn=24 swiglu bf16";
    (void)arg;
    d = *bind(&r, 1);
    REFUSE(GMM_E_NULL, r.d.act = NULL, r.d = d, ".act is NULL", "G=7 T=12 ffn=24");
    REFUSE(GMM_E_NULL, r.d.groups = NULL, r.d = d, ".groups is NULL", "ffn=24 swiglu bf16");
    REFUSE(GMM_E_NULL, r.d.x = NULL, r.d = d, ".x is NULL: act_bwd needs it");
    REFUSE(GMM_E_NULL, r.d.dy = NULL, r.d = d, ".dy is NULL", shapes);
    REFUSE(GMM_E_NULL, (r.d.dx = NULL, r.d.y = NULL, r.d.dprob = NULL), r.d = d,
           ".dx is NULL, and so are activation.dprob and activation.y: nothing is asked for", shapes);
    REFUSE(GMM_E_ARG, r.d.ffn = 0, r.d = d, "ffn: 0 must be >= 1");
    REFUSE(GMM_E_ARG, r.d.ffn = -3, r.d = d, "ffn: -3 must be >= 1");
    REFUSE(GMM_E_OVERFLOW, r.d.ffn = INT64_MAX, r.d = d, "ffn: 9223372036854775807");
    REFUSE(GMM_E_OVERFLOW, r.d.ffn = INT64_MAX / 4, r.d = d, "x: ", "do not fit 64 bits");
    REFUSE(GMM_E_VERSION, r.d.struct_size = sizeof r.d + 8, r.d = d, "activation: struct_size");
    REFUSE(GMM_E_VERSION, r.act.struct_size = sizeof r.act + 4, r.act.struct_size = 0, "act: struct_size", "G=7 T=12");
    REFUSE(GMM_E_ARG, r.act.struct_size = 4, r.act.struct_size = 0, "act: struct_size 4 is too small");
    REFUSE(GMM_E_ARG, r.groups.count = 0, r.groups.count = 7, "groups.count: 0 must be >= 1", "T=12 ffn=24 swiglu");
    REFUSE(GMM_E_ARG, r.groups.capacity = -1, r.groups.capacity = 12, "groups.capacity: -1");
    REFUSE(GMM_E_NULL, r.groups.splits = NULL, r.groups.splits = d.groups->splits, "groups.splits");
    r = make(settings(GMM_ACT_SWIGLU, 0), 12, 12, 24, GMM_BF16, GMM_BF16, GMM_BF16, GMM_BF16, 0);
    d = *bind(&r, 1);
    REFUSE(GMM_E_DTYPE, r.x.mat.dtype = GMM_U8, r.x.mat.dtype = GMM_BF16, "x: dtype u8 must be f32, f16 or bf16",
           "G=7 T=12 ffn=24 swiglu u8");
    REFUSE(GMM_E_DTYPE, r.dx.mat.dtype = GMM_I32, r.dx.mat.dtype = GMM_BF16, "dx: dtype i32", shapes);
    REFUSE(GMM_E_DTYPE, r.dy.mat.scaling = GMM_SCALING_MX32, r.dy.mat.scaling = GMM_SCALING_NONE, "dy: scaling mx32");
    REFUSE(GMM_E_STRIDE, r.x.mat.ld = 47, r.x.mat.ld = 0, "x: ld 47 must be >= the 48 columns", shapes);
    REFUSE(GMM_E_STRIDE, r.dx.mat.ld = 24, r.dx.mat.ld = 0, "dx: ld 24");
    REFUSE(GMM_E_STRIDE, r.y.mat.ld = 23, r.y.mat.ld = 0, "y: ld 23");
    REFUSE(GMM_E_STRIDE, r.dy.mat.ld = -24, r.dy.mat.ld = 0, "dy: ld -24");
    REFUSE(GMM_E_NULL, r.x.mat.data = NULL, r.x.mat.data = r.x.data, "x has neither data nor table");
    REFUSE(GMM_E_ALIGN, r.y.mat.data = (char *)r.y.data + 1, r.y.mat.data = r.y.data, "y: ", "aligned");
    REFUSE(GMM_E_ALIGN, r.d.prob = (const float *)(const void *)((const char *)d.prob + 2), r.d = d, "prob: ",
           "aligned");
    REFUSE(GMM_E_ALIGN, r.d.dprob = (float *)(void *)((char *)d.dprob + 1), r.d = d, "dprob: ", "aligned");
    options.sm_limit = -1;
    REFUSE(GMM_E_ARG, r.d.options = &options, r.d = d, "options.sm_limit: -1", shapes);
    options.sm_limit = 0;
    options.engine = (gmm_engine)77;
    REFUSE(GMM_E_ARG, r.d.options = &options, r.d = d, "options.engine: 77");
    T_REFUSED(GMM_E_ARG, gmm_act_query(T.ctx, GMM_OP_PAD, &r.d, &info), "gmm_act_query: op", shapes, NULL);
    T_REFUSED(GMM_E_NULL, gmm_act_query(T.ctx, GMM_OP_ACT_FWD, &r.d, NULL), "gmm_act_query: info", NULL);
    T_REFUSED(GMM_E_NULL, gmm_act_fwd(T.ctx, NULL, NULL, 0, T.stream), "gmm_act_fwd: activation is NULL", NULL);
    r.d.y = NULL;
    T_REFUSED(GMM_E_NULL, gmm_act_fwd(T.ctx, &r.d, NULL, 0, T.stream), "gmm_act_fwd: activation.y is NULL", shapes,
              NULL);
    T_CHECK(gmm_act_fwd(NULL, &r.d, NULL, 0, NULL) == GMM_E_NULL, "no context");
    { /* host splits are checked before anything is written */
        const int32_t sizes[2] = { 9, 4 };
        r.d = d;
        r.groups.count = 2;
        r.groups.splits = sizes;
        r.groups.on_host = 1;
        REFUSE(GMM_E_SPLIT, (void)0, (void)0, "groups.splits: size 4 of group 1", "the sum exceeds the capacity");
    }
    { /* a query needs no addresses */
        r.x.mat.data = r.y.mat.data = r.dy.mat.data = r.dx.mat.data = NULL;
        r.d.prob = r.d.dprob = NULL;
        r.groups.splits = NULL;
        T_OK(gmm_act_query(T.ctx, GMM_OP_ACT_BWD, &r.d, &info));
    }
}

/* --------------------------------------------------------------------------------------------------- Cases --- */

/* ------------------------------------------------------------------------------------------------------ Random --- */

static void drawn(int arg) {
    const ref_act_row *row = &ref_acts[t_int(0, ref_act_count - 1)];
    const int64_t rows = t_draw_size(40, 300), ffn = t_draw_size(100, 1200), live = t_int(0, rows);
    gmm_act a = settings(row->kind, 0);
    act_run r;
    (void)arg;
    if (row->gated && t_int(0, 2)) {
        a.interleave = (int32_t)t_int(1, ffn);
        while (ffn % a.interleave) a.interleave--;
    }
    if (row->kind != GMM_ACT_NONE && t_int(0, 3) == 0) a.limit = (float)t_int(1, 20) * 0.5f;
    if (row->alpha && t_int(0, 1)) a.alpha = (float)(0.2 + fabs(t_real()) * 0.8); /* `lost` holds up to 1 */
    if (row->gated && t_int(0, 3) == 0) a.offset = (float)t_real();
    if (row->betas && t_int(0, 1)) a.beta1 = 1.5f, a.beta2 = (float)t_int(2, 20);
    r = make(a, rows, live, ffn, dtypes[t_int(0, 2)], dtypes[t_int(0, 2)], dtypes[t_int(0, 2)], dtypes[t_int(0, 2)],
             t_int(0, 1) * t_int(0, 9));
    r.groups.tail = (gmm_tail)t_int(0, 1);
    if (t_int(0, 2) == 0) r.d.prob = NULL;
    run_both(&r);
}

void tests_act(void) {
    t_add(drawn, 0, "act drawn at random");
    t_random(6);
    t_add_host(presets, 0, "act presets and names");
    t_add_host(elementary, 0, "act exp, sigmoid, tanh");
    t_add_host(normal_cdf, 0, "act normal distribution");
    for (int row = 0; row < ref_act_count; row++) {
        const char *name = ref_acts[row].name;
        t_add_host(differences, row, "act %s against central differences", name);
        for (int k = 0; k < 3; k++) {
            const char *dtype = gmm_dtype_name(dtypes[k]);
            t_add(act_17x64, act_arg(row, k), "act %s %s 17x64", name, dtype);
            t_add(act_13x100, act_arg(row, k), "act %s %s 13x100", name, dtype);
        }
        t_add(act_5x600, act_arg(row, row % 3), "act %s 5x600, all blocks", name);
        t_add(act_ungated_limit, row, "act %s with a limit", name);
        t_add(extremes, row, "act %s large inputs", name);
        t_add_host(act_levels, row, "act %s on every vector level", name);
        if (ref_acts[row].gated) t_add(limits, row, "act %s at its limits", name);
    }
    for (int k = 0; k < 3; k++)
        t_add(act_21x1160, act_arg(act_row(GMM_ACT_SWIGLU), k), "act swiglu %s 21x1160",
              gmm_dtype_name(dtypes[k]));
    t_add(act_1024x2048, act_arg(act_row(GMM_ACT_SWIGLU), 1), "act swiglu bf16 1024x2048");
    t_add(act_1024x2048, act_arg(act_row(GMM_ACT_GELU), 0), "act gelu f32 1024x2048");
    for (int i = 0; i < 6; i++) t_add(act_mixed, i, "act mixed dtypes and settings %d", i);
    t_add(act_splits, 0, "act split forms, empty groups, no rows");
    t_add(act_faults, 0, "act faulty splits");
    t_add(act_wanted, 0, "act bwd only what is asked, halves");
    t_add(act_wanted, 4, "act bwd only what is asked, blocks of 4");
    t_add(act_wanted, 100, "act bwd only what is asked, blocks of 100");
    for (int k = 0; k < 3; k++) t_add(act_in_place, k, "act bwd in place, %s", gmm_dtype_name(dtypes[k]));
    t_add(act_threads, 0, "act bits do not depend on threads or other rows, halves");
    t_add(act_threads, 13, "act bits do not depend on threads or other rows, blocks of 13");
    t_add(act_threads, 26, "act bits do not depend on threads or other rows, blocks of 26");
    t_add(bad_settings, 0, "act bad settings");
    t_add(bad_operands, 0, "act bad operands");
}
