/* test_mlp.c - the expert MLP against an fp64 reference that carries its own error bounds; save policies, delayed
   weight gradients, callbacks, the decision table, the configuration check */
#include "mlp_case.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---------------------------------------------------------------------------------------------------- One call --- */

typedef struct mlp_spec {
    gmm_dtype dtype;
    gmm_act act;
    int64_t hidden, ffn, hidden_out; /* output width; 0 = hidden */
    int bias, prob, on_bias2;
    t_form form;
    gmm_save save;
    gmm_tail tail;
    const int64_t *sizes; /* NULL = mlp_sizes */
} mlp_spec;

enum { GROUPS = MLP_GROUPS };
/* Sizes of the groups, their sum, and the capacity; build sets them. */
static _Thread_local int64_t sizes_of[GROUPS], live_rows, all_rows = MLP_ROWS;

/* A built MLP: inputs, outputs and buffers of fwd and bwd. */
typedef struct mlp_run {
    mlp_spec spec;
    int64_t F1, out;
    int64_t offsets[GROUPS + 1];
    gmm_groups groups;
    gmm_mlp_config config;
    t_mat x, w1, b1, w2, b2, dy, y, dx, dw1, dw2, db1, db2;
    gmm_grad gw1, gw2, gb1, gb2;
    double *prob;
    float *dprob;
    gmm_mlp d;
} mlp_run;

static gmm_grad grad_of(const t_mat *m, int main_grad) {
    gmm_grad g = GMM_ZERO;
    g.mat = &m->mat;
    g.main_grad = main_grad;
    return g;
}

/* Rows beyond the sum of the sizes are NaN in every input. */
static t_mat activations(gmm_dtype dtype, int64_t cols, double size) {
    t_mat m = t_mat_make(dtype, 1, all_rows, cols, 3, 0, T_PACKED, T_REALS);
    for (int64_t i = 0; i < all_rows * cols; i++) m.v[i] = i < live_rows * cols ? ref_round(dtype, m.v[i] * size) : NAN;
    t_mat_put(&m);
    return m;
}

static t_mat weights(gmm_dtype dtype, int64_t rows, int64_t cols, double size, t_form form) {
    t_mat m = t_mat_make(dtype, GROUPS, rows, cols, form == T_PACKED ? 1 : 0, form == T_PACKED ? 7 : 0, form, T_REALS);
    for (int64_t i = 0; i < GROUPS * rows * cols; i++) m.v[i] = ref_round(dtype, m.v[i] * size);
    t_mat_put(&m);
    return m;
}

static void build(mlp_run *r, const mlp_spec *spec) {
    const gmm_dtype t = spec->dtype;
    int32_t sizes[GROUPS];
    memset(r, 0, sizeof *r);
    r->spec = *spec;
    memcpy(sizes_of, spec->sizes ? spec->sizes : mlp_sizes, sizeof sizes_of);
    live_rows = sizes_of[0] + sizes_of[1] + sizes_of[2] + sizes_of[3];
    all_rows = live_rows + 7;
    t_about("%s, %s, hidden %lld, ffn %lld, out %lld, interleave %d, bias %d, prob %d", gmm_act_name(spec->act.kind),
            gmm_dtype_name(t), (long long)spec->hidden, (long long)spec->ffn,
            (long long)(spec->hidden_out ? spec->hidden_out : spec->hidden), (int)spec->act.interleave, spec->bias,
            spec->prob);
    t_splits(sizes_of, GROUPS);
    r->F1 = spec->ffn * (gmm_act_gated(spec->act.kind) ? 2 : 1);
    r->out = spec->hidden_out ? spec->hidden_out : spec->hidden;
    for (int g = 0; g < GROUPS; g++) {
        sizes[g] = (int32_t)sizes_of[g];
        r->offsets[g + 1] = r->offsets[g] + sizes_of[g];
    }
    r->groups.count = GROUPS;
    r->groups.capacity = all_rows;
    r->groups.splits = t_in(sizes, sizeof sizes);
    r->groups.dtype = GMM_I32;
    r->groups.tail = spec->tail;
    r->config.hidden = spec->hidden;
    r->config.ffn = spec->ffn;
    r->config.hidden_out = spec->hidden_out;
    r->config.act = spec->act;
    r->config.save = spec->save;
    r->config.bias1 = r->config.bias2 = spec->bias;
    r->config.prob = spec->prob;
    r->config.prob_on_bias2 = spec->on_bias2;

    r->x = activations(t, spec->hidden, 1.0);
    r->dy = activations(t, r->out, 1.0);
    r->w1 = weights(t, r->F1, spec->hidden, 1.0 / sqrt((double)spec->hidden) * 3.0, spec->form);
    r->w2 = weights(t, r->out, spec->ffn, 1.0 / sqrt((double)spec->ffn) * 2.0, spec->form);
    r->b1 = weights(t, 1, r->F1, 0.5, T_PACKED);
    r->b2 = weights(t, 1, r->out, 0.5, T_PACKED);
    r->prob = (double *)t_host(all_rows * sizeof(double));
    for (int i = 0; i < all_rows; i++) r->prob[i] = i >= live_rows ? NAN : i % 7 == 3 ? 0.0 : (float)(t_real() * 1.5);
    r->y = t_mat_make(t, 1, all_rows, r->out, 2, 0, T_PACKED, T_POISON);
    r->dx = t_mat_make(t, 1, all_rows, spec->hidden, 1, 0, T_PACKED, T_POISON);
    r->dw1 = t_mat_make(GMM_F32, GROUPS, r->F1, spec->hidden, 0, 0, spec->form, T_POISON);
    r->dw2 = t_mat_make(GMM_F32, GROUPS, r->out, spec->ffn, 0, 0, spec->form, T_POISON);
    r->db1 = t_mat_out(GMM_F32, GROUPS, 1, r->F1);
    r->db2 = t_mat_out(GMM_F32, GROUPS, 1, r->out);
    r->gw1 = grad_of(&r->dw1, 0);
    r->gw2 = grad_of(&r->dw2, 0);
    r->gb1 = grad_of(&r->db1, 0);
    r->gb2 = grad_of(&r->db2, 0);
    r->dprob = t_floats_out(all_rows);

    r->d.config = &r->config;
    r->d.groups = &r->groups;
    r->d.x = &r->x.mat;
    r->d.w1 = &r->w1.mat;
    r->d.w2 = &r->w2.mat;
    r->d.y = &r->y.mat;
    r->d.dy = &r->dy.mat;
    r->d.dx = &r->dx.mat;
    r->d.dw1 = &r->gw1;
    r->d.dw2 = &r->gw2;
    if (spec->bias) {
        r->d.b1 = &r->b1.mat;
        r->d.b2 = &r->b2.mat;
        r->d.db1 = &r->gb1;
        r->d.db2 = &r->gb2;
    }
    if (spec->prob) {
        r->d.prob = t_floats_in(r->prob, all_rows);
        r->d.dprob = r->dprob;
    }
}

/* One pass with buffers of exactly the queried sizes. `inference`: nothing is saved. */
static void run_fwd(mlp_run *r, int inference) {
    gmm_info info = GMM_ZERO;
    T_OK(gmm_mlp_query(T.ctx, GMM_OP_MLP_FWD, &r->d, &info));
    if (!inference) {
        r->d.saved = t_workspace(info.saved_bytes);
        r->d.saved_bytes = info.saved_bytes;
    }
    T_OK(gmm_mlp_fwd(T.ctx, &r->d, t_workspace(info.workspace_bytes), info.workspace_bytes, T.stream));
}
#define run_fwd(...) T_CALL(run_fwd, __VA_ARGS__)
static void run_bwd(mlp_run *r) {
    gmm_info info = GMM_ZERO;
    T_OK(gmm_mlp_query(T.ctx, GMM_OP_MLP_BWD, &r->d, &info));
    if (info.deferred_bytes) {
        r->d.deferred = t_workspace(info.deferred_bytes);
        r->d.deferred_bytes = info.deferred_bytes;
    }
    T_OK(gmm_mlp_bwd(T.ctx, &r->d, t_workspace(info.workspace_bytes), info.workspace_bytes, T.stream));
}
#define run_bwd(...) T_CALL(run_bwd, __VA_ARGS__)

/* Bits of every output of a backward pass. */
typedef struct outputs { void *bits[7]; size_t bytes[7]; } outputs;
static outputs outputs_of(const mlp_run *r) {
    const t_mat *mats[6] = { &r->y, &r->dx, &r->dw1, &r->dw2, &r->db1, &r->db2 };
    outputs o;
    for (int i = 0; i < 6; i++) {
        o.bits[i] = t_mat_bits(mats[i]);
        o.bytes[i] = (size_t)(mats[i]->count * mats[i]->rows * mats[i]->cols * ref_bytes(mats[i]->dtype));
    }
    o.bits[6] = t_get(r->dprob, all_rows * sizeof(float));
    o.bytes[6] = all_rows * sizeof(float);
    return o;
}
static const char *const output_names[7] = { "y", "dx", "dw1", "dw2", "db1", "db2", "dprob" };
static void outputs_same(const outputs *a, const outputs *b) {
    for (int i = 0; i < 7; i++) t_same(output_names[i], a->bits[i], b->bits[i], a->bytes[i]);
}
#define outputs_same(...) T_CALL(outputs_same, __VA_ARGS__)

/* --------------------------------------------------------------------------------------------------- Reference --- */

/* A value v and a bound e of the library's error. Bounds propagate to first order; functions take the largest deviation
   at the ends of the interval, which also covers kinks; the factor 1.25 covers higher orders. */
typedef struct bounded { double v, e; } bounded;

static double u_of(gmm_dtype t) { return ref_roundoff(t); }
/* Stored once in dtype t. */
static bounded stored(bounded a, gmm_dtype t) {
    a.e = a.e * 1.25 + (fabs(a.v) + a.e) * u_of(t) + ref_tiny(t);
    return a;
}
/* A sum of n products: exact value, propagated error, magnitude. fp32 accumulation adds (n + 8) 2^-24 of magnitude. */
static bounded summed(double v, double e, double magnitude, int64_t n) {
    bounded r = { v, e + magnitude * (double)(n + 8) * 0x1p-24 };
    return r;
}

typedef struct bounded_act { bounded y, da, db; } bounded_act;
static bounded_act act_bounded(const gmm_act *act, bounded a, bounded b) {
    bounded_act r;
    ref_point p = ref_act(act, a.v, b.v);
    r.y.v = p.y;
    r.da.v = p.da;
    r.db.v = p.db;
    r.y.e = r.da.e = r.db.e = 0;
    for (int i = 0; i < 9; i++) {
        p = ref_act(act, a.v + (i % 3 - 1) * a.e, b.v + (i / 3 - 1) * b.e);
        r.y.e = fmax(r.y.e, fabs(p.y - r.y.v));
        r.da.e = fmax(r.da.e, fabs(p.da - r.da.v));
        r.db.e = fmax(r.db.e, fabs(p.db - r.db.v));
    }
    /* the library's own fp32 arithmetic: a dozen roundings, some of them relative to intermediate values */
    r.y.e += 2e-6 * (fabs(r.y.v) + 0.1);
    r.da.e += 2e-6 * (fabs(r.da.v) + 1.0) * (1.0 + fabs(b.v));
    r.db.e += 2e-6 * (fabs(r.db.v) + 0.1);
    return r;
}

static int64_t gate_col(const mlp_spec *s, int64_t j) {
    const int64_t B = s->act.interleave;
    return B ? j / B * 2 * B + j % B : j;
}
static int64_t line_col(const mlp_spec *s, int64_t j) {
    return gate_col(s, j) + (s->act.interleave ? s->act.interleave : s->ffn);
}

static bounded *bounded_array(int64_t n) { return (bounded *)t_host((size_t)(n > 0 ? n : 1) * sizeof(bounded)); }
static void compare(const char *what, const double *got, const bounded *want, int64_t n) {
    double *v = (double *)t_host((size_t)(n + 1) * sizeof *v), *e = (double *)t_host((size_t)(n + 1) * sizeof *e);
    for (int64_t i = 0; i < n; i++) { v[i] = want[i].v; e[i] = want[i].e * 1.25 + 1e-30; }
    t_near(what, got, v, e, n);
}

/* Checks all outputs of a forward and backward. Gradients are poison before they are stored. */
static void check(const mlp_run *r, int with_bwd) {
    const mlp_spec *s = &r->spec;
    const int64_t H = s->hidden, F = s->ffn, F1 = r->F1, O = r->out;
    const int gated = gmm_act_gated(s->act.kind);
    const gmm_dtype t = s->dtype;
    bounded *z = bounded_array(live_rows * F1), *h = bounded_array(live_rows * F), *dz = bounded_array(live_rows * F1);
    bounded *y = bounded_array(live_rows * O), *dx = bounded_array(live_rows * H);
    bounded *dp = bounded_array(live_rows), *dw1 = bounded_array(GROUPS * F1 * H), *dw2 = bounded_array(GROUPS * O * F);
    bounded *db1 = bounded_array(GROUPS * F1), *db2 = bounded_array(GROUPS * O);
    const double *x = r->x.v, *dy = r->dy.v;

    for (int g = 0; g < GROUPS; g++) {
        const double *w1 = r->w1.v + g * F1 * H, *w2 = r->w2.v + g * O * F;
        for (int64_t i = r->offsets[g]; i < r->offsets[g + 1]; i++) {
            const double p = s->prob ? r->prob[i] : 1.0;
            double dpv = 0, dpe = 0, dpm = 0;
            for (int64_t n = 0; n < F1; n++) {
                double v = s->bias ? r->b1.v[g * F1 + n] : 0, m = fabs(v);
                for (int64_t k = 0; k < H; k++) {
                    v += x[i * H + k] * w1[n * H + k];
                    m += fabs(x[i * H + k] * w1[n * H + k]);
                }
                z[i * F1 + n] = stored(summed(v, 0, m, H), t);
            }
            for (int64_t j = 0; j < F; j++) {
                const int64_t ca = gated ? gate_col(s, j) : j, cb = gated ? line_col(s, j) : j;
                const bounded_act f = act_bounded(&s->act, z[i * F1 + ca], z[i * F1 + cb]);
                double v = 0, m = 0;
                bounded G, ha = { p * f.y.v, fabs(p) * f.y.e };
                h[i * F + j] = stored(ha, t);
                for (int64_t n = 0; n < O; n++) {
                    v += dy[i * O + n] * w2[n * F + j];
                    m += fabs(dy[i * O + n] * w2[n * F + j]);
                }
                G = stored(summed(v, 0, m, O), t);
                ha.v = p * G.v * f.da.v;
                ha.e = fabs(p) * (fabs(G.v) * f.da.e + G.e * (fabs(f.da.v) + f.da.e));
                dz[i * F1 + ca] = stored(ha, t);
                ha.v = p * G.v * f.db.v;
                ha.e = fabs(p) * (fabs(G.v) * f.db.e + G.e * (fabs(f.db.v) + f.db.e));
                if (gated) dz[i * F1 + cb] = stored(ha, t);
                dpv += G.v * f.y.v;
                dpe += G.e * (fabs(f.y.v) + f.y.e) + fabs(G.v) * f.y.e;
                dpm += fabs(G.v * f.y.v);
            }
            for (int64_t n = 0; n < O; n++) {
                const double b = s->bias ? r->b2.v[g * O + n] : 0, scale = s->on_bias2 ? p : 1.0;
                double v = b * scale, e = 0, m = fabs(v);
                for (int64_t j = 0; j < F; j++) {
                    v += h[i * F + j].v * w2[n * F + j];
                    e += h[i * F + j].e * fabs(w2[n * F + j]);
                    m += fabs(h[i * F + j].v * w2[n * F + j]);
                }
                y[i * O + n] = stored(summed(v, e, m, F), t);
                if (s->on_bias2) { dpv += dy[i * O + n] * b; dpm += fabs(dy[i * O + n] * b); }
                db2[g * O + n].v += scale * dy[i * O + n];
                db2[g * O + n].e += fabs(scale * dy[i * O + n]) * 80 * 0x1p-24;
            }
            dp[i] = summed(dpv, dpe, dpm, F + O);
            for (int64_t k = 0; k < H; k++) {
                double v = 0, e = 0, m = 0;
                for (int64_t n = 0; n < F1; n++) {
                    v += dz[i * F1 + n].v * w1[n * H + k];
                    e += dz[i * F1 + n].e * fabs(w1[n * H + k]);
                    m += fabs(dz[i * F1 + n].v * w1[n * H + k]);
                }
                dx[i * H + k] = stored(summed(v, e, m, F1), t);
            }
            for (int64_t n = 0; n < F1; n++) {
                const bounded d = dz[i * F1 + n];
                db1[g * F1 + n].v += d.v;
                db1[g * F1 + n].e += d.e + fabs(d.v) * 80 * 0x1p-24;
                for (int64_t k = 0; k < H; k++) {
                    bounded *o = &dw1[(g * F1 + n) * H + k];
                    o->v += d.v * x[i * H + k];
                    o->e += (d.e + fabs(d.v) * 80 * 0x1p-24) * fabs(x[i * H + k]);
                }
            }
            for (int64_t n = 0; n < O; n++)
                for (int64_t j = 0; j < F; j++) {
                    bounded *o = &dw2[(g * O + n) * F + j];
                    o->v += dy[i * O + n] * h[i * F + j].v;
                    o->e += fabs(dy[i * O + n]) * (h[i * F + j].e + fabs(h[i * F + j].v) * 80 * 0x1p-24);
                }
        }
    }
    compare("y", t_mat_get(&r->y), y, live_rows * O);
    if (with_bwd) {
        compare("dx", t_mat_get(&r->dx), dx, live_rows * H);
        compare("dw1", t_mat_get(&r->dw1), dw1, GROUPS * F1 * H);
        compare("dw2", t_mat_get(&r->dw2), dw2, GROUPS * O * F);
        if (s->bias) {
            compare("db1", t_mat_get(&r->db1), db1, GROUPS * F1);
            compare("db2", t_mat_get(&r->db2), db2, GROUPS * O);
        }
        if (s->prob) compare("dprob", t_floats_get(r->dprob, all_rows), dp, live_rows);
    }
    /* rows past the sum */
    {
        const size_t row = (size_t)(O * ref_bytes(t)), row_dx = (size_t)(H * ref_bytes(t));
        const int byte = s->tail == GMM_TAIL_ZERO ? 0 : 0xFF;
        t_bytes("tail of y", (char *)t_mat_bits(&r->y) + live_rows * row, byte, (all_rows - live_rows) * row);
        if (with_bwd) {
            t_bytes("tail of dx", (char *)t_mat_bits(&r->dx) + live_rows * row_dx, byte,
                    (all_rows - live_rows) * row_dx);
            if (s->prob)
                t_bytes("tail of dprob", (char *)t_get(r->dprob, all_rows * 4) + live_rows * 4, byte,
                        (all_rows - live_rows) * 4);
        }
    }
}
#define check(...) T_CALL(check, __VA_ARGS__)

/* ------------------------------------------------------------------------------------------------------- Cases --- */

static gmm_act act_make(gmm_act_kind kind, int32_t interleave, float limit, float alpha, float offset, float b1,
                        float b2) {
    gmm_act a = GMM_ZERO;
    a.kind = kind;
    a.interleave = interleave;
    a.limit = limit;
    a.alpha = alpha;
    a.offset = offset;
    a.beta1 = b1;
    a.beta2 = b2;
    return a;
}

static mlp_spec spec_make(gmm_dtype dtype, gmm_act act, int64_t hidden, int64_t ffn) {
    mlp_spec s;
    memset(&s, 0, sizeof s);
    s.dtype = dtype;
    s.act = act;
    s.hidden = hidden;
    s.ffn = ffn;
    s.bias = s.prob = s.on_bias2 = 1;
    return s;
}

static mlp_spec table[64];
/* number of configurations, of which the first table_kinds are one per activation */
static int table_count, table_kinds;
static void table_fill(void) {
    table_count = 0;
    for (int i = 0; i < ref_act_count; i++) {
        const gmm_act_kind kind = ref_acts[i].kind;
        if (kind == GMM_ACT_NONE) continue; /* refused */
        table[table_count++] = spec_make(GMM_F32, act_make(kind, 0, 0, 0, 0, 0, 0), 24, 16);
        table[table_count++] = spec_make(GMM_BF16, act_make(kind, ref_acts[i].gated ? 8 : 0, 0, 0, 0, 0, 0), 17, 16);
    }
    table[table_count++] = spec_make(GMM_F16, act_make(GMM_ACT_SWIGLU, 1, 7.0f, 1.702f, 1.0f, 0, 0), 33, 20);
    table[table_count++] = spec_make(GMM_BF16, act_make(GMM_ACT_SWIGLU, 0, 5.0f, 1.5f, 0.5f, 0, 0), 32, 24);
    table[table_count++] = spec_make(GMM_F32, act_make(GMM_ACT_SWIGLU, 32, 0.5f, 1.5f, 0.5f, 0, 0), 20, 32);
    table[table_count++] = spec_make(GMM_F32, act_make(GMM_ACT_SITUGLU, 4, 0, 0, 0, 2.0f, 8.0f), 20, 8);
    table_kinds = table_count;
    for (int i = 0; i < 6; i++) { /* bias, probabilities, output width, pointer tables, tails */
        mlp_spec s = spec_make(i % 2 ? GMM_BF16 : GMM_F32, act_make(GMM_ACT_SWIGLU, 0, 0, 0, 0, 0, 0), 40, 24);
        s.bias = i < 4;
        s.prob = i != 1 && i != 5;
        s.on_bias2 = i == 0 || i == 2;
        s.hidden_out = i % 3 == 1 ? 19 : 0;
        s.form = i % 3 == 0 ? T_PACKED : i % 3 == 1 ? T_TABLE : T_TABLE_HOST;
        s.tail = i % 2 ? GMM_TAIL_ZERO : GMM_TAIL_KEEP;
        table[table_count++] = s;
    }
    {
        mlp_spec s = spec_make(GMM_BF16, act_make(GMM_ACT_SWIGLU, 32, 0, 0, 0, 0, 0), 128, 64);
        table[table_count++] = s;
    }
}

static void numerics(int arg) {
    mlp_run r;
    build(&r, &table[arg]);
    run_fwd(&r, 0);
    run_bwd(&r);
    check(&r, 1);
}

static void inference(int arg) {
    const mlp_spec s = spec_make(GMM_BF16, act_make(GMM_ACT_SWIGLU, 8, 0, 0, 0, 0, 0), 17, 16);
    mlp_run r;
    (void)arg;
    build(&r, &s);
    run_fwd(&r, 1);
    check(&r, 0);
}

static mlp_spec usual(gmm_dtype dtype) {
    return spec_make(dtype, act_make(GMM_ACT_SWIGLU, 8, 7.0f, 1.702f, 1.0f, 0, 0), 24, 16);
}

/* Workspace sizes of queries without addresses suffice for a call with misaligned inputs. */
static void odd_inputs(int arg) {
    const mlp_spec s = usual((gmm_dtype)arg);
    const size_t element = (size_t)ref_bytes(s.dtype);
    gmm_info info = GMM_ZERO;
    gmm_mat open[4];
    gmm_mlp d;
    mlp_run r;
    t_mat *inputs[4];
    build(&r, &s);
    inputs[0] = &r.x;
    inputs[1] = &r.dy;
    inputs[2] = &r.w1;
    inputs[3] = &r.w2;
    for (int i = 0; i < 4; i++) { /* dense, so that only the addresses keep an engine from serving the call */
        t_mat *m = inputs[i], dense = t_mat_make(m->dtype, m->count, m->rows, m->cols, 0, 0, T_PACKED, T_REALS);
        const size_t bytes = (size_t)(m->count * m->rows * m->cols) * element;
        char *moved = (char *)t_alloc_aligned(bytes + 16, 16) + element;
        memcpy(dense.v, m->v, (size_t)(m->count * m->rows * m->cols) * sizeof *m->v);
        t_mat_put(&dense);
        t_upload(moved, t_get(dense.data, bytes), bytes);
        *m = dense;
        open[i] = dense.mat;
        open[i].data = NULL;
        m->mat.data = moved;
    }
    d = r.d;
    d.x = &open[0];
    d.dy = &open[1];
    d.w1 = &open[2];
    d.w2 = &open[3];
    T_OK(gmm_mlp_query(T.ctx, GMM_OP_MLP_FWD, &d, &info));
    T_CHECK(!strstr(info.note, "wgmma") || strstr(info.note, "multiples of 16 bytes"), "\"%s\"", info.note);
    r.d.saved = t_workspace(info.saved_bytes);
    r.d.saved_bytes = info.saved_bytes;
    T_OK(gmm_mlp_fwd(T.ctx, &r.d, t_workspace(info.workspace_bytes), info.workspace_bytes, T.stream));
    T_OK(gmm_mlp_query(T.ctx, GMM_OP_MLP_BWD, &d, &info));
    T_OK(gmm_mlp_bwd(T.ctx, &r.d, t_workspace(info.workspace_bytes), info.workspace_bytes, T.stream));
    check(&r, 1);
}

/* What is saved changes memory, not results, nor does whether backward overwrites it: then dz needs no memory of its
   own, except where z is not saved and both have the same anyhow. Where z is saved, forward has no memory for it. */
static void save_policies(int arg) {
    outputs first, o;
    for (int i = 0; i < 6; i++) {
        mlp_spec s = usual((gmm_dtype)arg);
        mlp_run r;
        gmm_info info[2];
        int64_t dz;
        s.save = (gmm_save)(i / 2);
        t_reseed(45);
        build(&r, &s);
        r.config.overwrite_saved = i % 2;
        run_fwd(&r, 0);
        run_bwd(&r);
        o = outputs_of(&r);
        if (i == 0) first = o;
        else outputs_same(&first, &o);
        memset(info, 0, sizeof info);
        for (int overwrites = 0; overwrites < 2; overwrites++) {
            r.config.overwrite_saved = overwrites;
            T_OK(gmm_mlp_query(T.ctx, GMM_OP_MLP_BWD, &r.d, &info[overwrites]));
        }
        dz = s.save == GMM_SAVE_NOTHING ? 0 : (int64_t)all_rows * r.F1 * ref_bytes(s.dtype) / 256 * 256;
        T_CHECK((int64_t)(info[0].workspace_bytes - info[1].workspace_bytes) >= dz, "save %d: workspace %llu, "
                "overwriting %llu", (int)s.save, (unsigned long long)info[0].workspace_bytes,
                (unsigned long long)info[1].workspace_bytes);
        for (int trains = 0; trains < 2; trains++) { /* a query without `saved` may be about inference */
            void *const saved = r.d.saved;
            if (!trains) r.d.saved = NULL;
            T_OK(gmm_mlp_query(T.ctx, GMM_OP_MLP_FWD, &r.d, &info[trains]));
            r.d.saved = saved;
        }
        T_CHECK((int64_t)(info[0].workspace_bytes - info[1].workspace_bytes) >= dz, "save %d: workspace %llu, of "
                "training %llu", (int)s.save, (unsigned long long)info[0].workspace_bytes,
                (unsigned long long)info[1].workspace_bytes);
        T_OK(gmm_mlp_fwd(T.ctx, &r.d, t_workspace(info[1].workspace_bytes), info[1].workspace_bytes, T.stream));
        o = outputs_of(&r);
        outputs_same(&first, &o);
    }
}

/* dx in the memory of x or of dy has the bits of dx in its own; at another address in it, it is refused. */
static void dx_in_place(int arg) {
    outputs first, o;
    for (int place = 0; place < 3; place++) {
        mlp_spec s = usual((gmm_dtype)arg);
        const t_mat *input;
        mlp_run r;
        s.hidden_out = s.hidden;
        t_reseed(46);
        build(&r, &s);
        run_fwd(&r, 0);
        input = place == 1 ? &r.x : &r.dy;
        if (place) {
            void *const workspace = t_workspace(1 << 20);
            r.dx = t_mat_out(s.dtype, 1, all_rows, s.hidden);
            t_upload(r.dx.data, t_mat_bits(input), (size_t)(live_rows * s.hidden * ref_bytes(s.dtype)));
            *(place == 1 ? &r.d.x : &r.d.dy) = &r.dx.mat;
            {
                gmm_mat moved = r.dx.mat;
                moved.data = (char *)moved.data + ref_bytes(s.dtype);
                r.d.dx = &moved;
                T_REFUSED(GMM_E_ARG, gmm_mlp_bwd(T.ctx, &r.d, workspace, 1 << 20, T.stream), "dx: 0x", "overlaps",
                          NULL);
            }
            r.d.dx = &r.dx.mat;
        }
        run_bwd(&r);
        o = outputs_of(&r);
        if (place == 0) first = o;
        else outputs_same(&first, &o);
    }
}

/* Equals FC1, activation and FC2 as separate calls */
static void three_calls(int arg) {
    const mlp_spec s = usual((gmm_dtype)arg);
    mlp_run r;
    t_mat z, h, y;
    build(&r, &s);
    run_fwd(&r, 0);
    z = t_mat_out(s.dtype, 1, all_rows, r.F1);
    h = t_mat_out(s.dtype, 1, all_rows, s.ffn);
    y = t_mat_out(s.dtype, 1, all_rows, r.out);
    mlp_linear(&r.d, GMM_PARAM_W1, GMM_OP_LINEAR_FWD, r.d.x, r.d.w1, NULL, &z.mat);
    mlp_act_fwd(&r.d, &z.mat, &h.mat);
    mlp_linear(&r.d, GMM_PARAM_W2, GMM_OP_LINEAR_FWD, &h.mat, r.d.w2, NULL, &y.mat);
    t_same("y", t_mat_bits(&y), t_mat_bits(&r.y), (size_t)(live_rows * r.out * ref_bytes(s.dtype)));
}

/* Rows of x and dy that are gathered from tokens have the bits of permuted copies: every output, at once or delayed.
   arg: save policy, and DELAYED. */
enum { DELAYED = 64 };
static const struct { gmm_save save; const char *name; } saves[] = {
    {GMM_SAVE_PREACT, "preact"}, {GMM_SAVE_PREACT_AND_ACT, "preact and act"}, {GMM_SAVE_NOTHING, "nothing"}};
static void gathered(int arg) {
    enum { TOKENS = 40, DIV = 3 };
    outputs out[2];
    for (int index = 0; index < 2; index++) {
        mlp_spec s = usual(GMM_BF16);
        gmm_wgrad_entry entry[1];
        gmm_wgrad_queue queue = gmm_wgrad_queue_over(entry, 1);
        t_mat tokens[2];
        mlp_run r;
        s.save = (gmm_save)(arg % DELAYED);
        t_reseed(51);
        build(&r, &s);
        r.config.delay_wgrad = arg / DELAYED;
        r.d.queue = &queue;
        for (int k = 0; k < 2; k++) { /* x, dy */
            t_mat *const rows = k ? &r.dy : &r.x;
            int32_t *at = (int32_t *)t_host((size_t)all_rows * sizeof *at);
            for (int i = 0; i < all_rows; i++) at[i] = i % (9 - k) == 4 ? -2 : (int32_t)t_int(0, TOKENS * DIV - 1);
            tokens[k] = t_mat_make(s.dtype, 1, TOKENS, rows->cols, 5, 0, T_PACKED, T_REALS);
            for (int64_t i = 0; i < live_rows; i++)
                for (int64_t c = 0; c < rows->cols; c++)
                    rows->v[i * rows->cols + c] = at[i] < 0 ? 0.0 : tokens[k].v[at[i] / DIV * rows->cols + c];
            t_mat_put(rows);
            if (index) *(k ? &r.d.dy_index : &r.d.x_index) = (const int32_t *)t_in(at, (size_t)all_rows * sizeof *at);
        }
        if (index) {
            r.d.x = &tokens[0].mat;
            r.d.dy = &tokens[1].mat;
            r.d.index_rows = TOKENS;
            r.d.index_div = DIV;
        }
        run_fwd(&r, 0);
        run_bwd(&r);
        if (queue.count) T_OK(mlp_call(GMM_OP_MLP_WGRAD, &r.d));
        out[index] = outputs_of(&r);
    }
    outputs_same(&out[0], &out[1]);
}

/* The backward as separate calls: FC2's dgrad is rounded to the operands' dtype before the activation and dprob read
   it. */
static void backward_steps(int arg) {
    mlp_spec s = usual((gmm_dtype)arg);
    mlp_run r;
    gmm_saved_layout layout = GMM_ZERO;
    float *dprob[2] = { t_floats_out(all_rows), t_floats_out(all_rows) };
    t_mat dz, dx;
    gmm_mat z;
    s.on_bias2 = 0;
    s.bias = 0;
    build(&r, &s);
    run_fwd(&r, 0);
    run_bwd(&r);
    T_OK(gmm_mlp_saved_query(T.ctx, GMM_OP_MLP_BWD, &r.d, &layout));
    z = gmm_mat_packed(layout.part[0].dtype, (char *)r.d.saved + layout.part[0].offset);
    dz = t_mat_out(s.dtype, 1, all_rows, r.F1);
    dx = t_mat_out(s.dtype, 1, all_rows, s.hidden);
    for (int wide = 0; wide < 2; wide++) { /* 1: without that rounding */
        t_mat dh = t_mat_out(wide ? GMM_F32 : s.dtype, 1, all_rows, s.ffn);
        mlp_linear(&r.d, GMM_PARAM_W2, GMM_OP_LINEAR_DGRAD, NULL, r.d.w2, r.d.dy, &dh.mat);
        mlp_act_bwd(&r.d, &z, &dh.mat, &dz.mat, dprob[wide]);
        if (!wide) mlp_linear(&r.d, GMM_PARAM_W1, GMM_OP_LINEAR_DGRAD, NULL, r.d.w1, &dz.mat, &dx.mat);
    }
    t_same("dprob", t_get(dprob[0], live_rows * 4), t_get(r.dprob, live_rows * 4), live_rows * 4);
    t_same("dx", t_mat_bits(&dx), t_mat_bits(&r.dx), (size_t)(live_rows * s.hidden * ref_bytes(s.dtype)));
    if (s.dtype != GMM_F32)
        T_CHECK(memcmp(t_get(dprob[1], live_rows * 4), t_get(r.dprob, live_rows * 4), live_rows * 4) != 0,
                "dprob is not rounded");
}

/* The named parts of `saved`, compared with FC1 and the activation as separate calls. */
static void saved_parts(int arg) {
    const gmm_dtype t = (gmm_dtype)arg;
    for (int save = 0; save < 3; save++)
        for (int gated = 0; gated < 2; gated++) {
            mlp_spec s = spec_make(t, act_make(gated ? GMM_ACT_SWIGLU : GMM_ACT_RELU2, 0, 0, 0, 0, 0, 0), 24, 24);
            const int count = save == GMM_SAVE_PREACT ? 1 : save == GMM_SAVE_PREACT_AND_ACT ? 2 : 0;
            gmm_saved_layout layout = GMM_ZERO, again = GMM_ZERO;
            gmm_info info = GMM_ZERO;
            mlp_run r;
            t_mat stage[2];
            int64_t end = 0;
            s.save = (gmm_save)save;
            build(&r, &s);
            stage[0] = t_mat_out(t, 1, all_rows, r.F1);
            stage[1] = t_mat_out(t, 1, all_rows, s.ffn);
            T_OK(gmm_mlp_query(T.ctx, GMM_OP_MLP_FWD, &r.d, &info));
            T_OK(gmm_mlp_saved_query(T.ctx, GMM_OP_MLP_FWD, &r.d, &layout));
            T_OK(gmm_mlp_saved_query(T.ctx, GMM_OP_MLP_BWD, &r.d, &again));
            T_CHECK(memcmp(&layout, &again, sizeof layout) == 0, "fwd and bwd differ");
            T_CHECK(layout.count == count, "%d parts, want %d", (int)layout.count, count);
            T_CHECK(layout.bytes == (int64_t)info.saved_bytes, "%lld bytes, info says %lld", (long long)layout.bytes,
                    (long long)info.saved_bytes);
            run_fwd(&r, 0);
            mlp_linear(&r.d, GMM_PARAM_W1, GMM_OP_LINEAR_FWD, r.d.x, r.d.w1, NULL, &stage[0].mat);
            mlp_act_fwd(&r.d, &stage[0].mat, &stage[1].mat);
            for (int i = 0; i < layout.count; i++) {
                const gmm_saved_part *p = &layout.part[i];
                T_CHECK(strcmp(p->name, i ? "act" : "preact") == 0, "part %d is called %s", i, p->name);
                T_CHECK(p->dtype == t && p->rows == all_rows && p->cols == (i ? s.ffn : r.F1) && p->ld == p->cols,
                        "%s: %s %lld x %lld, ld %lld", p->name, gmm_dtype_name(p->dtype), (long long)p->rows,
                        (long long)p->cols, (long long)p->ld);
                T_CHECK(p->offset % 256 == 0 && p->offset >= end && p->bytes == p->rows * p->ld * ref_bytes(t) &&
                        p->offset + p->bytes <= layout.bytes, "%s: %lld bytes at %lld", p->name, (long long)p->bytes,
                        (long long)p->offset);
                end = p->offset + p->bytes;
                t_same(p->name, t_get((char *)r.d.saved + p->offset, (size_t)(live_rows * p->ld * ref_bytes(t))),
                       t_mat_bits(&stage[i]), (size_t)(live_rows * p->cols * ref_bytes(t)));
            }
            layout.struct_size = offsetof(gmm_saved_layout, part) + sizeof layout.part[0];
            layout.part[0].rows = layout.part[1].rows = -1;
            T_OK(gmm_mlp_saved_query(T.ctx, GMM_OP_MLP_FWD, &r.d, &layout));
            T_CHECK(layout.part[0].rows == (count ? all_rows : 0) && layout.part[1].rows == -1, "an older layout");
            layout.struct_size = sizeof layout + 8;
            T_REFUSED(GMM_E_VERSION, gmm_mlp_saved_query(T.ctx, GMM_OP_MLP_FWD, &r.d, &layout), "gmm_mlp_saved_query",
                      "layout", "struct_size", NULL);
            layout.struct_size = 1;
            T_REFUSED(GMM_E_ARG, gmm_mlp_saved_query(T.ctx, GMM_OP_MLP_FWD, &r.d, &layout), "layout", "struct_size 1",
                      NULL);
            T_REFUSED(GMM_E_NULL, gmm_mlp_saved_query(T.ctx, GMM_OP_MLP_FWD, &r.d, NULL), "layout", NULL);
            T_REFUSED(GMM_E_ARG, gmm_mlp_saved_query(T.ctx, GMM_OP_LINEAR_FWD, &r.d, &again), "op", NULL);
        }
}

/* GMM_SAVE_NOTHING: `saved` may have any size; only its alignment is checked. */
static void saved_nothing(int arg) {
    mlp_spec s = usual(GMM_BF16);
    gmm_info info = GMM_ZERO;
    mlp_run r;
    char *memory;
    (void)arg;
    s.save = GMM_SAVE_NOTHING;
    build(&r, &s);
    run_fwd(&r, 1);
    run_bwd(&r);
    memory = (char *)t_workspace(512);
    r.d.saved = memory + 16;
    T_OK(gmm_mlp_query(T.ctx, GMM_OP_MLP_FWD, &r.d, &info));
    T_REFUSED(GMM_E_ALIGN, gmm_mlp_fwd(T.ctx, &r.d, NULL, 0, T.stream), "saved", "256 bytes", NULL);
    T_REFUSED(GMM_E_ALIGN, gmm_mlp_bwd(T.ctx, &r.d, NULL, 0, T.stream), "saved", "256 bytes", NULL);
    r.d.saved = memory;
    T_OK(gmm_mlp_fwd(T.ctx, &r.d, t_workspace(info.workspace_bytes), info.workspace_bytes, T.stream));
}

/* Every subset of the outputs gives the same bits, and outputs that are NULL stay untouched */
static void subsets(int arg) {
    outputs all, o, untouched;
    for (int mask = 63; mask >= 0; mask--) {
        const mlp_spec s = usual(GMM_BF16);
        mlp_run r;
        t_reseed(48);
        build(&r, &s);
        untouched = outputs_of(&r);
        if (arg) r.config.delay_wgrad = 1;
        if (!(mask & 1)) r.d.dx = NULL;
        if (!(mask & 2)) r.d.dw1 = NULL;
        if (!(mask & 4)) r.d.dw2 = NULL;
        if (!(mask & 8)) r.d.db1 = NULL;
        if (!(mask & 16)) r.d.db2 = NULL;
        if (!(mask & 32)) r.d.dprob = NULL;
        {
            gmm_wgrad_entry entry;
            gmm_wgrad_queue queue = gmm_wgrad_queue_over(&entry, 1);
            r.d.queue = &queue;
            run_fwd(&r, 0);
            run_bwd(&r);
            T_CHECK(queue.count == (arg && (mask & 6) ? 1 : 0), "queue holds %d", queue.count);
            if (queue.count) T_OK(mlp_call(GMM_OP_MLP_WGRAD, &r.d));
        }
        o = outputs_of(&r);
        if (mask == 63) all = o;
        else
            for (int i = 0; i < 7; i++)
                t_same(output_names[i], o.bits[i], i == 0 || (mask >> (i - 1) & 1) ? all.bits[i] : untouched.bits[i],
                       o.bytes[i]);
    }
}

/* Calls of the gradient hooks, in order. */
typedef struct hook_log { int count; gmm_param param[16]; gmm_stream stream[16]; } hook_log;
static void note(void *user, gmm_param param, gmm_stream stream) {
    hook_log *d = (hook_log *)user;
    if (d->count < 16) {
        d->param[d->count] = param;
        d->stream[d->count] = stream;
    }
    d->count++;
}
static void hook_log_is(const hook_log *d, const char *want) {
    const char letters[] = "1a2b"; /* W1 B1 W2 B2 */
    T_CHECK(d->count == (int)strlen(want), "%d callbacks, want %s", d->count, want);
    for (int i = 0; want[i]; i++)
        T_CHECK(letters[d->param[i]] == want[i] && d->stream[i] == T.stream, "callback %d is %c, want %s", i,
                letters[d->param[i]], want);
}
#define hook_log_is(...) T_CALL(hook_log_is, __VA_ARGS__)

/* Two micro-batches with queued weight gradients, run later, give the bits of immediate ones; the splits may be
   overwritten in between; hooks of FC2 come first */
static void delayed(int arg) {
    outputs now, later;
    for (int delay = 0; delay < 2; delay++) {
        const mlp_spec s = usual((gmm_dtype)arg);
        gmm_wgrad_entry entries[2];
        gmm_wgrad_queue queue = gmm_wgrad_queue_over(entries, 2);
        gmm_grad_hooks hooks = GMM_ZERO;
        hook_log log;
        mlp_run r, r2;
        gmm_info info = GMM_ZERO;
        int32_t other[GROUPS] = { 50, 50, 50, 50 }, *splits;
        memset(&log, 0, sizeof log);
        hooks.user = &log;
        hooks.ready = note;
        t_reseed(49);
        build(&r, &s);
        build(&r2, &s);
        memset(r.dw1.v, 0, (size_t)(GROUPS * r.F1 * s.hidden) * sizeof(double));
        memset(r.dw2.v, 0, (size_t)(GROUPS * r.out * s.ffn) * sizeof(double));
        t_mat_put(&r.dw1);
        t_mat_put(&r.dw2);
        splits = (int32_t *)t_alloc(sizeof other);
        t_upload(splits, t_get(r.groups.splits, sizeof other), sizeof other);
        r.groups.splits = r2.groups.splits = splits;
        r.gw1.main_grad = r.gw2.main_grad = 1;
        r2.d.dw1 = &r.gw1; /* the second micro-batch adds to the same main_grad */
        r2.d.dw2 = &r.gw2;
        if (delay) r.config.delay_wgrad = 1;
        if (delay) r2.config.overlap_dispatch_wgrad = 1;
        r.d.hooks = r2.d.hooks = &hooks;
        r.d.queue = r2.d.queue = &queue;
        run_fwd(&r, 0);
        run_bwd(&r);
        hook_log_is(&log, delay ? "ba" : "2b1a");
        run_fwd(&r2, 0);
        run_bwd(&r2);
        hook_log_is(&log, delay ? "baba" : "2b1a2b1a");
        T_CHECK(queue.count == 2 * delay, "queue holds %d", queue.count);
        if (delay) {
            void *ws = t_workspace(1 << 22);
            T_REFUSED(GMM_E_STATE, gmm_mlp_bwd(T.ctx, &r2.d, ws, 1 << 22, T.stream), "gmm_mlp_bwd", "queue", "2 of 2",
                      NULL);
            t_upload(splits, other, sizeof other);
            T_OK(gmm_mlp_query(T.ctx, GMM_OP_MLP_WGRAD, &r.d, &info));
            T_REFUSED(GMM_E_WORKSPACE, gmm_mlp_wgrad(T.ctx, &queue, ws, info.workspace_bytes - 1, T.stream),
                      "gmm_mlp_wgrad", NULL);
            for (int i = 0; i < 2; i++)
                T_OK(gmm_mlp_wgrad(T.ctx, &queue, t_workspace(info.workspace_bytes), info.workspace_bytes, T.stream));
            hook_log_is(&log, "baba2121");
            T_REFUSED(GMM_E_STATE, gmm_mlp_wgrad(T.ctx, &queue, ws, 1 << 22, T.stream), "gmm_mlp_wgrad", "queue",
                      "empty", NULL);
            /* as after the replay of a graph */
            T_OK(gmm_mlp_fire_hooks(T.ctx, GMM_OP_MLP_BWD, &r.d, T.stream));
            T_OK(gmm_mlp_fire_hooks(T.ctx, GMM_OP_MLP_WGRAD, &r.d, T.stream));
            hook_log_is(&log, "baba2121ba21");
        }
        if (delay) later = outputs_of(&r);
        else now = outputs_of(&r);
    }
    outputs_same(&now, &later);
}

/* All descriptors and tables of a backward, to which a queue must not keep pointers, in one host allocation. */
typedef struct caller_memory {
    gmm_mlp d;
    gmm_mlp_config config;
    gmm_groups groups;
    gmm_options options;
    gmm_grad_hooks hooks;
    gmm_grad grad[2];
    gmm_mat x, dy, dw[2];
    void *table[2][GROUPS];
} caller_memory;

/* Right after the backward the caller's descriptors and host tables are overwritten and freed, and its tables
   and arrays in context memory overwritten; the queued gradients have the bits of immediate ones */
static void delayed_copies(int arg) {
    static const float betas[GROUPS] = { 0.0f, 1.0f, 0.5f, 2.0f };
    static const uint8_t frozen[GROUPS] = { 0, 0, 1, 0 };
    outputs now, later;
    for (int delay = 0; delay < 2; delay++) {
        mlp_spec s = usual(GMM_BF16);
        float *beta = (float *)t_alloc(sizeof betas);
        uint8_t *ice = (uint8_t *)t_alloc(sizeof frozen);
        gmm_wgrad_entry entries[2];
        gmm_wgrad_queue queue = gmm_wgrad_queue_over(entries, 2);
        caller_memory *g = (caller_memory *)calloc(1, sizeof *g);
        t_mat *dw[2];
        gmm_info info = GMM_ZERO;
        hook_log log;
        mlp_run r;
        T_CHECK(g != NULL, "no memory");
        memset(&log, 0, sizeof log);
        s.form = (t_form)arg;
        t_reseed(490);
        build(&r, &s);
        run_fwd(&r, 0);
        dw[0] = &r.dw1;
        dw[1] = &r.dw2;
        for (int k = 0; k < 2; k++) { /* destinations that are added to */
            for (int64_t i = 0; i < GROUPS * dw[k]->rows * dw[k]->cols; i++) dw[k]->v[i] = (double)t_int(-4, 4);
            t_mat_put(dw[k]);
        }
        t_upload(beta, betas, sizeof betas);
        t_upload(ice, frozen, sizeof frozen);
        g->d = r.d;
        g->config = r.config;
        g->config.delay_wgrad = delay;
        g->groups = r.groups;
        g->options.sm_limit = 3;
        g->hooks.user = &log;
        g->hooks.ready = note;
        g->x = r.x.mat;
        g->dy = r.dy.mat;
        for (int k = 0; k < 2; k++) {
            g->dw[k] = dw[k]->mat;
            if (s.form == T_TABLE_HOST || (s.form == T_TABLE && !T.gpu)) {
                memcpy(g->table[k], dw[k]->table, sizeof g->table[k]);
                g->dw[k].table = g->table[k];
            } else if (s.form == T_TABLE) {
                void *const table = t_alloc(sizeof g->table[k]);
                memcpy(g->table[k], dw[k]->table, sizeof g->table[k]);
                t_upload(table, g->table[k], sizeof g->table[k]);
                g->dw[k].table = (void *const *)table;
            }
            g->grad[k].mat = &g->dw[k];
            g->grad[k].beta = beta;
            g->grad[k].frozen = ice;
        }
        g->d.config = &g->config;
        g->d.groups = &g->groups;
        g->d.options = &g->options;
        g->d.hooks = &g->hooks;
        g->d.x = &g->x;
        g->d.dy = &g->dy;
        g->d.dw1 = &g->grad[0];
        g->d.dw2 = &g->grad[1];
        g->d.queue = &queue;
        T_OK(gmm_mlp_query(T.ctx, GMM_OP_MLP_BWD, &g->d, &info));
        if (delay) {
            g->d.deferred = t_workspace(info.deferred_bytes);
            g->d.deferred_bytes = info.deferred_bytes;
        }
        T_OK(gmm_mlp_bwd(T.ctx, &g->d, t_workspace(info.workspace_bytes), info.workspace_bytes, T.stream));
        if (delay) T_OK(gmm_mlp_query(T.ctx, GMM_OP_MLP_WGRAD, &g->d, &info));
        for (int k = 0; k < 2 && s.form == T_TABLE && T.gpu; k++)
            t_poison((void *)(uintptr_t)g->dw[k].table, 0x11, GROUPS * sizeof(void *));
        memset(g, 0xA5, sizeof *g);
        free(g);
        t_poison(beta, 0xA5, sizeof betas);
        t_poison(ice, 0xA5, sizeof frozen);
        if (delay)
            T_OK(gmm_mlp_wgrad(T.ctx, &queue, t_workspace(info.workspace_bytes), info.workspace_bytes, T.stream));
        hook_log_is(&log, delay ? "ba21" : "2b1a");
        if (delay) later = outputs_of(&r);
        else now = outputs_of(&r);
    }
    outputs_same(&now, &later);
}

/* A queue with an invalid field is refused by both functions that read it, and works again when the field is
   restored */
static void queue_fields(int arg) {
    enum { WS = 1 << 22, CAPACITY = 3 };
    const mlp_spec s = usual(GMM_F32);
    gmm_wgrad_entry entries[CAPACITY + 1];
    gmm_wgrad_queue queue = gmm_wgrad_queue_over(entries, CAPACITY), good;
    void *ws = t_workspace(WS);
    gmm_info info = GMM_ZERO;
    mlp_run r;
    (void)arg;
    memset(entries, 0xA5, sizeof entries);
    build(&r, &s);
    r.config.delay_wgrad = 1;
    r.d.queue = &queue;
    run_fwd(&r, 0);
    T_OK(gmm_mlp_query(T.ctx, GMM_OP_MLP_BWD, &r.d, &info));
    r.d.deferred = t_workspace(info.deferred_bytes + WS); /* a workspace over it reaches no other memory of the call */
    r.d.deferred_bytes = info.deferred_bytes;
    T_OK(gmm_mlp_bwd(T.ctx, &r.d, ws, WS, T.stream));
    T_OK(gmm_mlp_query(T.ctx, GMM_OP_MLP_WGRAD, &r.d, &info));
    good = queue;
#define SPOILED(status, change, ...) \
    do { \
        change; \
        T_REFUSED(status, gmm_mlp_wgrad(T.ctx, &queue, ws, WS, T.stream), "gmm_mlp_wgrad: queue", __VA_ARGS__, NULL); \
        T_REFUSED(status, gmm_mlp_bwd(T.ctx, &r.d, ws, WS, T.stream), "gmm_mlp_bwd: mlp.queue", __VA_ARGS__, NULL); \
        queue = good; \
    } while (0)
    SPOILED(GMM_E_NULL, queue.entries = NULL, "entries");
    SPOILED(GMM_E_ALIGN, queue.entries = (gmm_wgrad_entry *)(void *)((char *)entries + 4), ".entries: 0x", "8 bytes");
    SPOILED(GMM_E_ARG, queue.capacity = 0, ".capacity: 0 ", ">= 1");
    SPOILED(GMM_E_ARG, queue.capacity = -7, ".capacity: -7 ", ">= 1");
    SPOILED(GMM_E_ARG, queue.head = -1, ".head: -1 ", "capacity 3");
    SPOILED(GMM_E_ARG, queue.head = 3, ".head: 3 ", "capacity 3");
    SPOILED(GMM_E_ARG, queue.head = INT32_MAX, ".head: 2147483647 ", "capacity 3");
    SPOILED(GMM_E_ARG, queue.count = -1, ".count: -1 ", "capacity 3");
    SPOILED(GMM_E_ARG, queue.count = 4, ".count: 4 ", "capacity 3");
    SPOILED(GMM_E_ARG, queue.count = INT32_MIN, ".count: -2147483648 ", "capacity 3");
    SPOILED(GMM_E_ARG, queue.reserved = 1, ".reserved: 1 ", "0");
#undef SPOILED
    queue.head = 2; /* an entry that was never recorded */
    T_REFUSED(GMM_E_STATE, gmm_mlp_wgrad(T.ctx, &queue, ws, WS, T.stream), "gmm_mlp_wgrad: queue.entries: [2]", NULL);
    queue = good;
    T_REFUSED(GMM_E_ARG, gmm_mlp_wgrad(T.ctx, &queue, r.d.deferred, WS, T.stream), "gmm_mlp_wgrad",
              "overlaps deferred", NULL);
    if (T.gpu) { /* operands in the memory of a GPU */
        gmm_context *other = NULL;
        T_CHECK(gmm_create(&other, NULL, NULL) == GMM_OK, "no CPU context");
        T_CHECK(gmm_mlp_wgrad(other, &queue, NULL, 0, NULL) == GMM_E_STATE &&
                    strstr(gmm_last_error(other), "recorded in space 1"), "%s", gmm_last_error(other));
        gmm_destroy(other);
    }
    T_OK(gmm_mlp_wgrad(T.ctx, &queue, t_workspace(info.workspace_bytes), info.workspace_bytes, T.stream));
    queue = good; /* and one that has already run */
    T_REFUSED(GMM_E_STATE, gmm_mlp_wgrad(T.ctx, &queue, ws, WS, T.stream), "gmm_mlp_wgrad: queue.entries: [0]", NULL);
}

/* Operands of an MLP that must not overlap; gradients of two weights that are interleaved expert by expert in one
   buffer do not overlap. */
static void mlp_overlaps(int arg) {
    enum { WS = 1 << 22 };
    const mlp_spec s = usual(GMM_F32);
    void *ws = t_workspace(WS), *kept;
    mlp_run r;
    (void)arg;
    build(&r, &s);
    run_fwd(&r, 0);
#define SHARED(call, function, change, restore, first, second) \
    do { \
        change; \
        T_REFUSED(GMM_E_ARG, call(T.ctx, &r.d, ws, WS, T.stream), function ": ", first ": 0x", \
                  "overlaps ", T.gpu ? "0x" : second ", 0x", NULL); \
        restore; \
    } while (0)
#define FWD(change, restore, first, second) SHARED(gmm_mlp_fwd, "gmm_mlp_fwd", change, restore, first, second)
#define BWD(change, restore, first, second) SHARED(gmm_mlp_bwd, "gmm_mlp_bwd", change, restore, first, second)
    FWD(r.d.y = &r.x.mat, r.d.y = &r.y.mat, "y", "x");
    kept = r.y.mat.data;
    FWD(r.y.mat.data = r.w2.mat.data, r.y.mat.data = kept, "y", "w2");
    kept = r.x.mat.data;
    FWD(r.x.mat.data = r.d.saved, r.x.mat.data = kept, "saved", "x");
    kept = r.d.saved;
    FWD(r.d.saved = ws, r.d.saved = kept, "saved", "workspace");
    r.groups.fault = (uint32_t *)(uintptr_t)r.d.prob;
    FWD((void)0, r.groups.fault = NULL, "groups.fault", "prob");
    run_bwd(&r);
    BWD(r.gw2.mat = &r.dw1.mat, r.gw2.mat = &r.dw2.mat, "dw1.mat", "dw2.mat");
    BWD(r.d.dprob = (float *)(uintptr_t)r.d.prob, r.d.dprob = r.dprob, "dprob", "prob");
    kept = r.dx.mat.data;
    BWD(r.dx.mat.data = r.d.saved, r.dx.mat.data = kept, "dx", "saved");
    kept = r.x.mat.data;
    BWD(r.config.overwrite_saved = 1; r.x.mat.data = r.d.saved, r.config.overwrite_saved = 0; r.x.mat.data = kept,
        "saved", "x");
    {
        gmm_wgrad_entry entry;
        gmm_wgrad_queue queue = gmm_wgrad_queue_over(&entry, 1);
        gmm_info info = GMM_ZERO;
        r.config.delay_wgrad = 1;
        r.d.queue = &queue;
        T_OK(gmm_mlp_query(T.ctx, GMM_OP_MLP_BWD, &r.d, &info));
        r.d.deferred_bytes = info.deferred_bytes;
        r.d.deferred = t_alloc_aligned(info.deferred_bytes, 256);
        BWD(r.d.dx = &r.dy.mat, r.d.dx = &r.dx.mat, "dx", "dy"); /* which a queued gradient reads later */
        BWD(r.d.dx = &r.x.mat, r.d.dx = &r.dx.mat, "dx", "x");
        BWD(r.d.deferred = r.d.saved, r.d.deferred = NULL, "deferred", "saved");
        T_CHECK(queue.count == 0, "a refused call was queued");
        r.config.delay_wgrad = 0;
    }
#undef SHARED
#undef FWD
#undef BWD
    { /* [dw1 | dw2] of one expert after those of another */
        const int64_t n1 = r.F1 * s.hidden, n2 = r.out * s.ffn, all = GROUPS * (n1 + n2);
        const float *w1 = (const float *)t_mat_bits(&r.dw1), *w2 = (const float *)t_mat_bits(&r.dw2);
        float *memory = (float *)t_alloc((size_t)all * 4), *want = (float *)t_host((size_t)all * 4);
        gmm_mat dw1 = gmm_mat_packed(GMM_F32, memory), dw2 = gmm_mat_packed(GMM_F32, memory + n1);
        dw1.group_stride = dw2.group_stride = n1 + n2;
        r.gw1.mat = &dw1;
        r.gw2.mat = &dw2;
        for (int g = 0; g < GROUPS; g++) {
            memcpy(want + g * (n1 + n2), w1 + g * n1, (size_t)n1 * 4);
            memcpy(want + g * (n1 + n2) + n1, w2 + g * n2, (size_t)n2 * 4);
        }
        run_bwd(&r);
        t_same("dw1 and dw2 in turns", t_get(memory, (size_t)all * 4), want, (size_t)all * 4);
    }
}

/* A group's results are those of an MLP with only that expert */
static void one_expert(int arg) {
    const mlp_spec s = usual((gmm_dtype)arg);
    const int64_t size = ref_bytes(s.dtype);
    mlp_run r;
    outputs all, one;
    const int g = 3;
    int32_t rows;
    build(&r, &s);
    rows = (int32_t)sizes_of[g];
    run_fwd(&r, 0);
    run_bwd(&r);
    all = outputs_of(&r);
    {
        mlp_run d = r;
        const int64_t r0 = r.offsets[g];
        t_mat y = t_mat_out(s.dtype, 1, rows, r.out), dx = t_mat_out(s.dtype, 1, rows, s.hidden);
        t_mat *const weights_[] = { &d.w1, &d.w2, &d.b1, &d.b2, &d.dw1, &d.dw2, &d.db1, &d.db2 };
        d.groups.count = 1;
        d.groups.capacity = rows;
        d.groups.splits = t_in(&rows, sizeof rows);
        d.d.config = &d.config;
        d.d.groups = &d.groups;
        for (int i = 0; i < 8; i++) weights_[i]->mat.data = (char *)weights_[i]->data +
            (size_t)(g * weights_[i]->stride * ref_bytes(weights_[i]->dtype));
        d.x.mat.data = (char *)d.x.data + (size_t)(r0 * d.x.ld * size);
        d.dy.mat.data = (char *)d.dy.data + (size_t)(r0 * d.dy.ld * size);
        d.gw1 = grad_of(&d.dw1, 0);
        d.gw2 = grad_of(&d.dw2, 0);
        d.gb1 = grad_of(&d.db1, 0);
        d.gb2 = grad_of(&d.db2, 0);
        d.d.x = &d.x.mat; d.d.dy = &d.dy.mat; d.d.w1 = &d.w1.mat; d.d.w2 = &d.w2.mat;
        d.d.b1 = &d.b1.mat; d.d.b2 = &d.b2.mat;
        d.d.dw1 = &d.gw1; d.d.dw2 = &d.gw2; d.d.db1 = &d.gb1; d.d.db2 = &d.gb2;
        d.d.y = &y.mat;
        d.d.dx = &dx.mat;
        d.d.prob = r.d.prob + r0;
        d.d.dprob = t_floats_out(rows);
        run_fwd(&d, 0);
        run_bwd(&d);
        one = outputs_of(&r); /* the weight gradients have overwritten those of the first call */
        for (int i = 2; i < 6; i++) t_same(output_names[i], all.bits[i], one.bits[i], all.bytes[i]);
        t_same("y", t_mat_bits(&y), (char *)all.bits[0] + r0 * r.out * size, (size_t)(rows * r.out * size));
        t_same("dx", t_mat_bits(&dx), (char *)all.bits[1] + r0 * s.hidden * size, (size_t)(rows * s.hidden * size));
        t_same("dprob", t_get(d.d.dprob, (size_t)rows * 4), (char *)all.bits[6] + r0 * 4, (size_t)rows * 4);
    }
}

/* Weights stored with GLU interleave give the bits of weights stored in halves; dw1 has the order of w1. */
static void interleaved(int arg) {
    mlp_run a, b;
    mlp_spec s = usual((gmm_dtype)arg);
    t_mat back;
    gmm_glu glu = GMM_ZERO;
    outputs oa, ob;
    s.act.interleave = 0;
    t_reseed(7);
    build(&a, &s);
    s.act.interleave = 4;
    t_reseed(7);
    build(&b, &s);
    for (int g = 0; g < GROUPS; g++)
        for (int64_t j = 0; j < s.ffn; j++)
            for (int half = 0; half < 2; half++) {
                const int64_t from = half * s.ffn + j, to = half ? line_col(&s, j) : gate_col(&s, j);
                memcpy(b.w1.v + (g * b.F1 + to) * s.hidden, a.w1.v + (g * b.F1 + from) * s.hidden,
                       (size_t)s.hidden * sizeof(double));
                b.b1.v[g * b.F1 + to] = a.b1.v[g * b.F1 + from];
            }
    t_mat_put(&b.w1);
    t_mat_put(&b.b1);
    run_fwd(&a, 0);
    run_bwd(&a);
    run_fwd(&b, 0);
    run_bwd(&b);
    back = t_mat_out(GMM_F32, GROUPS, b.F1, s.hidden);
    glu.axis = GMM_GLU_ROWS;
    glu.inverse = 1;
    glu.block = 4;
    glu.ffn = s.ffn;
    glu.count = GROUPS;
    glu.cols = s.hidden;
    glu.src = &b.dw1.mat;
    glu.dst = &back.mat;
    T_OK(gmm_glu_interleave(T.ctx, &glu, t_workspace(1 << 12), 1 << 12, T.stream));
    oa = outputs_of(&a);
    ob = outputs_of(&b);
    for (int i = 0; i < 7; i++)
        if (i != 1 && i != 2 && i != 4) t_same(output_names[i], oa.bits[i], ob.bits[i], oa.bytes[i]);
    t_same("dw1", oa.bits[2], t_mat_bits(&back), oa.bytes[2]);
}

/* All groups empty, with and without capacity: stored gradients are zero, accumulated ones keep their bits. */
static void all_empty(int arg) {
    const mlp_spec s = usual(GMM_BF16);
    const int32_t zeros[GROUPS] = { 0 };
    mlp_run r;
    build(&r, &s);
    r.groups.splits = t_in(zeros, sizeof zeros);
    if (arg) r.groups.capacity = 0;
    r.gw1.main_grad = 1;
    run_fwd(&r, 0);
    run_bwd(&r);
    t_bytes("dw1", t_mat_bits(&r.dw1), 0xFF, (size_t)(GROUPS * r.F1 * s.hidden * 4));
    t_bytes("dw2", t_mat_bits(&r.dw2), 0, (size_t)(GROUPS * r.out * s.ffn * 4));
    t_bytes("db1", t_mat_bits(&r.db1), 0, (size_t)(GROUPS * r.F1 * 4));
    t_bytes("db2", t_mat_bits(&r.db2), 0, (size_t)(GROUPS * r.out * 4));
    t_bytes("y", t_mat_bits(&r.y), 0xFF, (size_t)(all_rows * r.out * 2));
    t_bytes("dprob", t_get(r.dprob, all_rows * 4), 0xFF, all_rows * 4);
}

/* ------------------------------------------------------------------------------------------------------ Errors --- */

/* A workspace large enough for any call, to which refused calls must not write. */
static void *large;
#define WS large, 1 << 22, T.stream

static void gather_refused(int arg) {
    const mlp_spec s = usual(GMM_F32);
    uint32_t zero = 0, fault;
    int32_t *at;
    mlp_run r;
    (void)arg;
    build(&r, &s);
    at = (int32_t *)t_host((size_t)all_rows * sizeof *at);
    r.d.x_index = (const int32_t *)t_in(at, (size_t)all_rows * sizeof *at);
    r.d.index_rows = -1;
    T_REFUSED(GMM_E_ARG, gmm_mlp_fwd(T.ctx, &r.d, NULL, 0, T.stream), "gmm_mlp_fwd: mlp.index_rows: -1", NULL);
    r.d.index_rows = (int64_t)1 << 31;
    T_REFUSED(GMM_E_ARG, gmm_mlp_bwd(T.ctx, &r.d, NULL, 0, T.stream), "gmm_mlp_bwd: mlp.index_rows: 2147483648", NULL);
    r.d.index_rows = all_rows;
    r.d.index_div = -4;
    T_REFUSED(GMM_E_ARG, gmm_mlp_fwd(T.ctx, &r.d, NULL, 0, T.stream), "gmm_mlp_fwd: mlp.index_div: -4", NULL);
    r.d.index_div = 0;
    r.d.reserved1 = 3;
    T_REFUSED(GMM_E_ARG, gmm_mlp_fwd(T.ctx, &r.d, NULL, 0, T.stream), "gmm_mlp_fwd: mlp.reserved: 0 and reserved1 3",
              NULL);
    r.d.reserved1 = 0;
    r.groups.fault = (uint32_t *)t_alloc(sizeof fault);
    t_upload(r.groups.fault, &zero, sizeof zero);
    run_fwd(&r, 0);
    t_download(&fault, r.groups.fault, sizeof fault);
    T_CHECK(fault == 0, "fault word %u", (unsigned)fault);
    at[live_rows - 1] = (int32_t)all_rows;
    r.d.x_index = (const int32_t *)t_in(at, (size_t)all_rows * sizeof *at);
    run_fwd(&r, 0);
    t_download(&fault, r.groups.fault, sizeof fault);
    T_CHECK(fault == GMM_FAULT_INDEX, "fault word %u", (unsigned)fault);
}

/* Bytes of `saved` of which there are fewer than 2^63, though the bits are more. */
static void saved_bytes_of_many_rows(int arg) {
    gmm_groups groups = GMM_ZERO;
    gmm_mlp_config config = GMM_ZERO;
    gmm_mat mat = gmm_mat_packed(GMM_F32, NULL);
    gmm_mlp d = GMM_ZERO;
    gmm_info info = GMM_ZERO;
    (void)arg;
    if (T.engine != GMM_ENGINE_CPU) t_skip("GPUs take fewer rows");
    groups.count = 1;
    groups.capacity = (int64_t)1 << 58;
    groups.dtype = GMM_I32;
    config.hidden = config.ffn = 1;
    config.act.kind = GMM_ACT_RELU;
    d.config = &config;
    d.groups = &groups;
    d.x = d.w1 = d.w2 = d.y = &mat;
    T_OK(gmm_mlp_query(T.ctx, GMM_OP_MLP_FWD, &d, &info));
    T_CHECK(info.saved_bytes == (size_t)1 << 60, "saved has %llu bytes", (unsigned long long)info.saved_bytes);
}

static void refused(int arg) {
    const mlp_spec s = usual(GMM_BF16);
    mlp_run r;
    gmm_info info = GMM_ZERO;
    gmm_mlp keep;
    gmm_options options = GMM_ZERO;
    gmm_mat odd;
    (void)arg;
    large = t_workspace(1 << 22);
    build(&r, &s);
    T_OK(gmm_mlp_query(T.ctx, GMM_OP_MLP_BWD, &r.d, &info));
    run_fwd(&r, 0);
    keep = r.d;
#define BAD(status, call, ...) do { T_REFUSED(status, call, __VA_ARGS__, NULL); r.d = keep; } while (0)
    r.d.saved_bytes--;
    BAD(GMM_E_WORKSPACE, gmm_mlp_bwd(T.ctx, &r.d, WS), "gmm_mlp_bwd: mlp.saved has ", "bytes");
    r.d.saved_bytes--;
    BAD(GMM_E_WORKSPACE, gmm_mlp_fwd(T.ctx, &r.d, WS), "gmm_mlp_fwd", "saved");
    r.d.saved = NULL;
    BAD(GMM_E_NULL, gmm_mlp_bwd(T.ctx, &r.d, WS), "gmm_mlp_bwd", "saved");
    r.d.saved = (char *)r.d.saved + 8;
    BAD(GMM_E_ALIGN, gmm_mlp_bwd(T.ctx, &r.d, WS), "saved", "256");
    BAD(GMM_E_WORKSPACE, gmm_mlp_bwd(T.ctx, &r.d, large, info.workspace_bytes - 1, T.stream), "gmm_mlp_bwd",
        "workspace_bytes");
    r.d.w1 = NULL;
    BAD(GMM_E_NULL, gmm_mlp_fwd(T.ctx, &r.d, WS), "gmm_mlp_fwd: mlp.w1 is NULL: mlp_fwd needs it", "hidden=24");
    r.d.config = NULL;
    BAD(GMM_E_NULL, gmm_mlp_fwd(T.ctx, &r.d, WS), ": mlp.config is NULL");
    r.d.b2 = NULL;
    BAD(GMM_E_NULL, gmm_mlp_fwd(T.ctx, &r.d, WS), ": mlp.b2 is NULL");
    r.d.prob = NULL;
    BAD(GMM_E_NULL, gmm_mlp_fwd(T.ctx, &r.d, WS), "prob");
    {
        const gmm_mlp_config before = r.config;
        void *table[64] = {NULL};
        gmm_mat tables = gmm_mat_table(GMM_BF16, table, GMM_MAT_TABLE_ON_HOST);
        r.config.hidden = r.config.hidden_out = (int64_t)1 << 57;
        r.d.w1 = r.d.w2 = &tables;
        BAD(GMM_E_OVERFLOW, gmm_mlp_query(T.ctx, GMM_OP_MLP_FWD, &r.d, &info), "gmm_mlp_query: mlp.w1: ",
            "do not fit 64 bits");
        r.config = before;
    }
    odd = r.w1.mat;
    odd.dtype = GMM_F16;
    r.d.w1 = &odd;
    BAD(GMM_E_DTYPE, gmm_mlp_fwd(T.ctx, &r.d, WS), ": mlp.w1: dtype f16 must be that of mlp.w2, bf16");
    r.d.struct_size = 4096;
    BAD(GMM_E_VERSION, gmm_mlp_fwd(T.ctx, &r.d, WS), "mlp", "4096");
    r.config.prob = r.config.prob_on_bias2 = 0;
    BAD(GMM_E_CONFIG, gmm_mlp_fwd(T.ctx, &r.d, WS), "prob");
    r.config.prob = 1;
    r.config.act.limit = -1.0f;
    BAD(GMM_E_CONFIG, gmm_mlp_fwd(T.ctx, &r.d, WS), "gmm_mlp_fwd: mlp.config.act.limit: -1");
    r.config.act.limit = 0.0f;
    r.config.delay_wgrad = 1;
    keep.deferred = t_workspace(1 << 20);
    keep.deferred_bytes = 1 << 20;
    r.d = keep;
    BAD(GMM_E_NULL, gmm_mlp_bwd(T.ctx, &r.d, WS), ": mlp.queue is NULL");
    r.d.deferred = NULL;
    BAD(GMM_E_NULL, gmm_mlp_bwd(T.ctx, &r.d, WS), "deferred");
    T_REFUSED(GMM_E_ARG, gmm_mlp_query(T.ctx, GMM_OP_PAD, &r.d, &info), "op", NULL);
    T_REFUSED(GMM_E_NULL, gmm_mlp_wgrad(T.ctx, NULL, WS), "queue", NULL);
    T_REFUSED(GMM_E_ARG, gmm_mlp_fire_hooks(T.ctx, GMM_OP_MLP_FWD, &r.d, T.stream), "mlp_fwd", NULL);
    options.engine = GMM_ENGINE_WGMMA;
    r.d.options = &options;
    T_REFUSED(GMM_E_UNSUPPORTED, gmm_mlp_fwd(T.ctx, &r.d, WS), "wgmma", NULL);
#undef BAD
}

/* A main_grad that is missing or has the wrong shape */
static void bad_main_grad(int arg) {
    const mlp_spec s = usual(GMM_BF16);
    mlp_run r;
    gmm_mat m;
    (void)arg;
    large = t_workspace(1 << 22);
    build(&r, &s);
    run_fwd(&r, 0);
    r.gw1.main_grad = 1;
    m = r.dw1.mat;
    r.gw1.mat = NULL;
    T_REFUSED(GMM_E_NULL, gmm_mlp_bwd(T.ctx, &r.d, WS), ": mlp.dw1.mat is NULL", NULL);
    r.gw1.mat = &m;
    m.data = NULL;
    T_REFUSED(GMM_E_NULL, gmm_mlp_bwd(T.ctx, &r.d, WS), "dw1", NULL);
    m = r.dw1.mat;
    m.ld = s.hidden - 1;
    T_REFUSED(GMM_E_STRIDE, gmm_mlp_bwd(T.ctx, &r.d, WS), ": mlp.dw1.mat: ld 23", NULL);
    m = r.dw1.mat;
    m.group_stride = r.F1 * s.hidden - 1;
    T_REFUSED(GMM_E_STRIDE, gmm_mlp_bwd(T.ctx, &r.d, WS), "dw1", "group_stride", NULL);
    m = r.dw1.mat;
    m.dtype = GMM_E4M3;
    T_REFUSED(GMM_E_DTYPE, gmm_mlp_bwd(T.ctx, &r.d, WS), "dw1", "e4m3", NULL);
    m = r.dw1.mat;
    r.gw1.main_grad = 2;
    T_REFUSED(GMM_E_ARG, gmm_mlp_bwd(T.ctx, &r.d, WS), ": mlp.dw1: main_grad 2", NULL);
}

/* The fifteen rows, spelled out: want main overwrite delay flag zero ('-' any), then
   now queued beta real dummy zero set hooks */
static void decisions(int arg) {
    static const struct { const char *in, *out; } rows[15] = {
        { "0-----", "00000000" },
        { "10-0--", "10010000" }, { "10-1--", "01000001" },
        { "11000-", "10100000" }, { "110010", "10101010" }, { "110011", "10101110" },
        { "11100-", "10000000" }, { "111010", "10001010" }, { "111011", "10001110" },
        { "11010-", "01100001" }, { "110110", "01101011" }, { "110111", "01101111" },
        { "11110-", "01000001" }, { "111110", "01001011" }, { "111111", "01001111" },
    };
    gmm_wgrad_in in;
    gmm_wgrad_out out;
    gmm_error e;
    (void)arg;
    for (int bits = 0; bits < 64; bits++) {
        uint8_t v[6];
        int row = -1;
        for (int i = 0; i < 6; i++) v[i] = (uint8_t)(bits >> i & 1);
        memcpy(&in, v, 6);
        for (int k = 0; k < 15; k++) {
            int match = 1;
            for (int i = 0; i < 6; i++) match &= rows[k].in[i] == '-' || rows[k].in[i] == '0' + v[i];
            if (match) {
                T_CHECK(row < 0, "input %d matches rows %d and %d", bits, row, k);
                row = k;
            }
        }
        T_CHECK(row >= 0, "input %d matches no row", bits);
        memset(&out, 0xFF, sizeof out);
        T_CHECK(gmm_wgrad_decide(&in, &out, &e) == GMM_OK, "input %d", bits);
        {
            const uint8_t got[8] = { out.run_now, out.enqueue, out.beta_one, out.return_real, out.return_dummy,
                                     out.dummy_zero, out.set_flag, out.hooks_after };
            T_CHECK(out.row == row, "input %d: row %d, want %d", bits, out.row, row);
            for (int i = 0; i < 8; i++)
                T_CHECK(got[i] == rows[row].out[i] - '0', "input %d row %d: output %d is %d", bits, row, i, got[i]);
        }
    }
    T_CHECK(gmm_wgrad_decide(NULL, &out, &e) == GMM_E_NULL && strstr(e.text, "in is NULL"), "%s", e.text);
    in.delay = 3;
    T_CHECK(gmm_wgrad_decide(&in, &out, &e) == GMM_E_ARG && strstr(e.text, "delay 3"), "%s", e.text);
}

static gmm_mlp_config good_config(void) {
    gmm_mlp_config c = GMM_ZERO;
    c.hidden = 64;
    c.ffn = 32;
    c.act.kind = GMM_ACT_SWIGLU;
    return c;
}

/* Each rule broken alone is refused by the name of its field; the good configurations pass. */
static void configurations(int arg) {
    gmm_mlp_config c;
    gmm_error e;
    (void)arg;
#define GOOD(change) do { c = good_config(); change; \
        T_CHECK(gmm_mlp_validate(&c, &e) == GMM_OK, "%s refused: %s", #change, e.text); } while (0)
#define BAD(field, change) do { c = good_config(); change; memset(&e, 0, sizeof e); \
        T_CHECK(gmm_mlp_validate(&c, &e) == GMM_E_CONFIG, "%s accepted", #change); \
        T_CHECK(strncmp(e.text, field ":", sizeof(field)) == 0 && strpbrk(strchr(e.text, ':'), "0123456789n") != NULL, \
                "%s: the text is: %s", #change, e.text); } while (0)
    GOOD((void)0);
    GOOD(c.act.interleave = 8; c.source_interleave = 8);
    GOOD(c.act.interleave = 32; c.source_interleave = 32); /* one block of ffn rows is the halves layout */
    GOOD(c.source_interleave = 32);
    GOOD(c.act = gmm_act_of(GMM_ACT_PRESET_GPT_OSS); c.bias1 = c.bias2 = c.prob = c.prob_on_bias2 = 1; c.topk = 4);
    GOOD(c.act = gmm_act_of(GMM_ACT_PRESET_NEMOTRON));
    GOOD(c.act = gmm_act_of(GMM_ACT_PRESET_KIMI_SITU));
    GOOD(c.delay_wgrad = 1; c.ddp = 1; c.ddp_expects_delay = 1);
    GOOD(c.overlap_dispatch_wgrad = 1; c.ddp = 1; c.ddp_expects_delay = 1);
    GOOD(c.prob_on_input = 1; c.topk = 1);
    GOOD(c.router_padding = 1; c.recipe = GMM_RECIPE_MXFP8);
    BAD("hidden", c.hidden = 0);
    BAD("ffn", c.ffn = -3);
    BAD("hidden_out", c.hidden_out = -1);
    BAD("bias1", c.bias1 = 2);
    BAD("ddp", c.ddp = -1);
    BAD("save", c.save = (gmm_save)3);
    BAD("dispatcher", c.dispatcher = (gmm_dispatcher)5);
    BAD("recipe", c.recipe = (gmm_recipe_kind)6);
    c = good_config();
    c.struct_size = sizeof c + 8;
    T_CHECK(gmm_mlp_validate(&c, &e) == GMM_E_VERSION && strstr(e.text, "struct_size"), "%s", e.text);
    c.struct_size = 4;
    T_CHECK(gmm_mlp_validate(&c, &e) == GMM_E_ARG && strstr(e.text, "struct_size 4"), "%s", e.text);
    c = good_config();
    c.act.struct_size = 4;
    T_CHECK(gmm_mlp_validate(&c, &e) == GMM_E_ARG && strstr(e.text, "act.struct_size 4"), "%s", e.text);
    BAD("source_interleave", c.source_interleave = 40); /* ffn is 32 */
    BAD("source_interleave", c.act.interleave = 8; c.source_interleave = 5);
    BAD("source_interleave", c.source_interleave = 64);
    BAD("act.kind", c.act.kind = (gmm_act_kind)99);
    BAD("act.interleave", c.act.interleave = -8);
    BAD("act.interleave", c.act.interleave = 12);
    BAD("act.interleave", c.act.kind = GMM_ACT_GELU; c.act.interleave = 8);
    BAD("act.limit", c.act.limit = -7.0f);
    BAD("act.limit", c.act.limit = INFINITY);
    BAD("act.limit", c.act.limit = NAN);
    BAD("act.offset", c.act.offset = NAN);
    BAD("act.offset", c.act.kind = GMM_ACT_SILU; c.act.offset = 1.0f);
    BAD("act.alpha", c.act.alpha = INFINITY);
    BAD("act.alpha", c.act.kind = GMM_ACT_REGLU; c.act.alpha = 1.5f);
    BAD("act.beta1", c.act.kind = GMM_ACT_SITUGLU; c.act.beta1 = -1.0f);
    BAD("act.beta2", c.act.beta2 = 25.0f);
    BAD("act.reserved", c.act.reserved[3] = 1);
    BAD("source_interleave", c.act.interleave = 8; c.source_interleave = 32);
    BAD("source_interleave", c.source_interleave = 16);
    BAD("source_interleave", c.source_interleave = -1);
    BAD("topk", c.topk = -1);
    BAD("etp_size", c.etp_size = -1);
    BAD("etp_size", c.etp_size = 2; c.bias1 = 1);
    BAD("etp_size", c.etp_size = 4; c.bias2 = 1);
    BAD("overlap_dispatch_wgrad", c.delay_wgrad = c.overlap_dispatch_wgrad = 1);
    BAD("ddp_expects_delay", c.ddp = 1; c.overlap_dispatch_wgrad = 1);
    BAD("ddp_expects_delay", c.ddp = 1; c.delay_wgrad = 1);
    BAD("ddp_expects_delay", c.ddp_expects_delay = 1);
    BAD("prob_on_bias2", c.prob_on_bias2 = 1; c.prob = 1);
    BAD("prob_on_bias2", c.prob_on_bias2 = 1; c.bias2 = 1);
    BAD("prob_on_bias2", c.prob = c.bias2 = 1; c.topk = 2);
    BAD("prob_on_input", c.prob_on_input = 1; c.topk = 2);
    BAD("prob_on_input", c.prob_on_input = 1; c.topk = 1; c.prob = 1);
    BAD("router_padding", c.router_padding = 1);
    BAD("router_padding", c.router_padding = 1; c.recipe = GMM_RECIPE_MXFP8; c.dispatcher = GMM_DISPATCH_ALLGATHER);
    BAD("act_input_fp8", c.act_input_fp8 = 1);
    BAD("act_input_fp8", c.act_input_fp8 = 1; c.save = GMM_SAVE_QUANTIZED; c.recipe = GMM_RECIPE_MXFP8);
    GOOD(c.act_input_fp8 = 1; c.save = GMM_SAVE_PREACT_E4M3);
    GOOD(c.act_input_fp8 = 1; c.save = GMM_SAVE_QUANTIZED_E4M3; c.recipe = GMM_RECIPE_MXFP8);
    BAD("save", c.save = GMM_SAVE_QUANTIZED);
    BAD("save", c.save = GMM_SAVE_QUANTIZED_E4M3);
    BAD("save", c.save = (gmm_save)(GMM_SAVE_QUANTIZED_E4M3 + 1));
    BAD("act_recompute", c.act_recompute = 1; c.save = GMM_SAVE_QUANTIZED; c.recipe = GMM_RECIPE_MXFP8);
    BAD("act.kind", memset(&c.act, 0, sizeof c.act));
    T_CHECK(strstr(e.text, "no activation"), "%s", e.text);
    BAD("act_recompute", c.act_recompute = 1; c.save = GMM_SAVE_PREACT_AND_ACT);
    BAD("overwrite_saved", c.overwrite_saved = 2);
#undef GOOD
#undef BAD
    T_CHECK(gmm_mlp_validate(NULL, &e) == GMM_E_NULL, "NULL accepted");
    T_CHECK(gmm_mlp_validate(NULL, NULL) == GMM_E_NULL, "NULL accepted");
}

/* Any activation, shape, split and setting. */
static void drawn(int arg) {
    static const gmm_dtype dtypes[3] = { GMM_F32, GMM_F16, GMM_BF16 };
    const ref_act_row *row = &ref_acts[t_int(0, ref_act_count - 1)];
    mlp_spec s;
    mlp_run r;
    (void)arg;
    if (row->kind == GMM_ACT_NONE) row = &ref_acts[1];
    s = spec_make(dtypes[t_int(0, 2)], act_make(row->kind, 0, 0, 0, 0, 0, 0), t_int(1, 48), t_int(1, 40));
    if (row->gated && t_int(0, 1)) {
        s.act.interleave = (int32_t)t_int(1, s.ffn);
        while (s.ffn % s.act.interleave) s.act.interleave--;
    }
    if (row->alpha && t_int(0, 1)) s.act.alpha = 1.5f;
    if (row->gated && t_int(0, 2) == 0) s.act.offset = 0.5f, s.act.limit = 5.0f;
    if (row->betas && t_int(0, 1)) s.act.beta1 = 2.0f, s.act.beta2 = 8.0f;
    s.bias = (int)t_int(0, 1);
    s.prob = (int)t_int(0, 1);
    s.on_bias2 = s.bias && s.prob && t_int(0, 1);
    s.hidden_out = t_int(0, 1) * t_int(0, 40);
    s.form = (t_form)t_int(0, 2);
    s.save = (gmm_save)t_int(0, 2);
    s.tail = (gmm_tail)t_int(0, 1);
    s.sizes = t_draw_sizes(GROUPS, t_int(1, 80));
    build(&r, &s);
    r.config.overwrite_saved = (int)t_int(0, 1);
    run_fwd(&r, 0);
    run_bwd(&r);
    check(&r, 1);
}

void tests_mlp(void) {
    t_add(drawn, 0, "mlp drawn at random");
    t_random(8);
    for (int i = 0; i < T_COUNT(saves); i++) {
        t_add(gathered, (int)saves[i].save, "mlp gathered rows of x and dy, saving %s", saves[i].name);
        t_add(gathered, DELAYED | (int)saves[i].save, "mlp gathered rows of x and dy, saving %s, delayed",
              saves[i].name);
    }
    t_add(gather_refused, 0, "mlp gathered rows, bad indices");
    static const gmm_dtype dtypes[3] = { GMM_F32, GMM_F16, GMM_BF16 };
    static const char *const forms[3] = { "packed", "table", "host table" };
    table_fill();
    for (int i = 0; i < table_count; i++) {
        const mlp_spec *s = &table[i];
        t_add(numerics, i, "mlp fwd bwd %s %s hidden=%d ffn=%d interleave=%d limit=%g bias=%d prob=%d%s%s",
              gmm_act_name(s->act.kind), gmm_dtype_name(s->dtype), (int)s->hidden, (int)s->ffn,
              (int)s->act.interleave, (double)s->act.limit, s->bias, s->prob, s->on_bias2 ? " on bias2" : "",
              s->form == T_PACKED ? "" : s->form == T_TABLE ? ", table" : ", host table");
    }
    t_add(queue_fields, 0, "mlp delayed wgrad, queue with spoiled fields");
    t_add(mlp_overlaps, 0, "mlp overlap");
    t_add(inference, 0, "mlp inference");
    for (int i = 0; i < 3; i++) {
        const char *name = gmm_dtype_name(dtypes[i]);
        t_add(odd_inputs, (int)dtypes[i], "mlp inputs at odd addresses %s", name);
        t_add(save_policies, (int)dtypes[i], "mlp save policies %s", name);
        t_add(dx_in_place, (int)dtypes[i], "mlp bwd with dx in place %s", name);
        t_add(three_calls, (int)dtypes[i], "mlp equals three calls %s", name);
        t_add(backward_steps, (int)dtypes[i], "mlp backward equals its steps %s", name);
        t_add(saved_parts, (int)dtypes[i], "mlp parts of saved %s", name);
        t_add(delayed, (int)dtypes[i], "mlp delayed wgrad %s", name);
        t_add(delayed_copies, i, "mlp delayed wgrad keeps what it needs, %s", forms[i]);
        t_add(one_expert, (int)dtypes[i], "mlp one expert alone %s", name);
        t_add(interleaved, (int)dtypes[i], "mlp interleaved weights %s", name);
    }
    t_add(subsets, 0, "mlp subsets of outputs");
    t_add(subsets, 1, "mlp subsets of outputs, delayed");
    t_add(all_empty, 0, "mlp all groups empty");
    t_add(all_empty, 1, "mlp no capacity");
    t_add(saved_nothing, 0, "mlp nothing saved");
    t_add(saved_bytes_of_many_rows, 0, "mlp saved of many rows");
    t_add(refused, 0, "mlp bad input");
    t_add(bad_main_grad, 0, "mlp bad main_grad");
    t_add_host(decisions, 0, "mlp wgrad_decide");
    t_add_host(configurations, 0, "mlp configurations");
}
