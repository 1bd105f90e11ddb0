/* test_mlp_reference.c - the expert MLP under every recipe against a reference that quantizes by the formulas,
   dequantizes, and multiplies in double.

   Every stage is computed from the library's values of the stages before it, so that both take the same decisions where
   a value is next to a rounding tie. z and h are read from gmm_mlp.saved. No buffer of an MLP has dh and dz: they are
   those of gmm_linear_dgrad over operands that the reference has quantized, and of gmm_act_bwd, whose bits gmm_mlp_bwd
   is to have. Each of them is checked as every other stage. Two kinds of cases take nothing from other calls than the
   MLP's: where groups have one row, the gradient of b1 is dz; and in the exact cases, small integers and powers of two,
   a stage has the bits of the reference.

   Bounds: the roundings of fp32 sums over the contraction, and one rounding to the dtype of the result. */
#include "mlp_case.h"

#include <math.h>
#include <string.h>

#ifdef HAVE_CUDA
#include "device.h"
#endif

enum { G = 3, ROWS = 139 };
static const int64_t uneven[G] = { 1, 0, 131 }, nobody[G] = { 0, 0, 0 }, single[G] = { 1, 0, 1 };

/* ------------------------------------------------------------------------------------------------------ Cases --- */

/* What varies; zeros: bf16, SwiGLU in halves, hidden columns out, fp32 gradients that are stored. */
typedef struct settings {
    gmm_dtype dtype, grad;
    gmm_act_kind act;
    int interleave, bias, prob, on_bias2;
    int64_t out;
    gmm_save save;
    gmm_backward_override override;
    int main_grad, overwrite, delay, prequantized, exact, empty;
    int single; /* groups of up to one row, with biases: the gradient of b1 is dz */
    int64_t hidden, ffn; /* 0 = 160 and 96 */
    const int64_t *sizes; /* NULL = uneven, or what `empty` and `single` say */
    int replayed; /* other splits follow: rows past the sum are numbers, and zeros in results */
} settings;

typedef struct ref_case {
    settings s;
    const int64_t *sizes;
    int64_t first[G + 1], live, hidden, ffn, F1, out;
    gmm_recipe recipe;
    gmm_groups groups;
    gmm_mlp_config config;
    gmm_mlp_quant quant;
    gmm_mlp d;
    t_mat x, w1, b1, w2, b2, dy, y, dx, gradient[4];
    gmm_grad grad[4];      /* of w1, b1, w2, b2, as gmm_param numbers them */
    double *prob;
    float *dprob, scale[GMM_SLOTS * G], *amax;
    uint64_t random[4];
    gmm_wgrad_entry entry[1];
    gmm_wgrad_queue queue;
    gmm_grad_hooks hooks;
    char fired[16];        /* the hooks in the order of their calls: 1 a 2 b for w1 b1 w2 b2 */
    const double *source[GMM_SLOTS]; /* values of operands: [rows of all groups][cols]; weights: [G][rows][cols] */
    int64_t rows[GMM_SLOTS], cols[GMM_SLOTS]; /* rows 0: tokens */
    const double *z;       /* what backward reads */
} ref_case;

static void fired(void *user, gmm_param param, gmm_stream stream) {
    char *text = (char *)user;
    const size_t n = strlen(text);
    if (n < 15) text[n] = stream == T.stream ? "1a2b"[param] : '?';
}

/* Values of a matrix of `rows` rows. Rows have different sizes, so that scales matter. exact: few of them are not 0, so
   that sums of products are small integers. */
static void fill(const ref_case *c, t_mat *m, int64_t rows, double size) {
    for (int64_t r = 0; r < m->count * m->rows; r++) {
        const double row = ldexp(size, (int)t_int(-2, 2));
        for (int64_t k = 0; k < m->cols; k++) {
            double v = ref_round(m->dtype, t_real() * row);
            if (c->s.exact) v = t_int(0, 7) ? 0.0 : (double)t_int(-2, 2);
            m->v[r * m->cols + k] = m->count == 1 && r >= rows ? (double)NAN : v;
        }
    }
    t_mat_put(m);
}
static t_mat filled(const ref_case *c, int64_t count, int64_t rows, int64_t cols, double size) {
    t_mat m = t_mat_make(c->s.dtype, count, rows, cols, 0, 0, count > 1 && t_int(0, 1) ? T_TABLE : T_PACKED, T_INTS);
    fill(c, &m, c->s.replayed ? rows : c->live, size);
    return m;
}

/* A gradient, poison unless the call adds to it. */
static void build_gradient(ref_case *c, int param, int64_t rows, int64_t cols) {
    t_mat *m = &c->gradient[param];
    const gmm_dtype dtype = c->s.grad ? c->s.grad : GMM_F32;
    *m = t_mat_out(dtype, G, rows, cols);
    for (int64_t i = 0; c->s.main_grad && !c->s.overwrite && i < G * rows * cols; i++) {
        m->v[i] = ref_round(dtype, c->s.exact ? (double)t_int(-8, 8) : t_real());
        if (!c->sizes[i / (rows * cols)] && i % 7 == 0) m->v[i] = -0.0; /* which adding 0 would change */
    }
    if (c->s.main_grad && !c->s.overwrite) t_mat_put(m);
    c->grad[param].mat = &m->mat;
    c->grad[param].main_grad = c->s.main_grad;
    c->grad[param].overwrite = c->s.overwrite;
}

static void add_operand(ref_case *c, int slot, int64_t rows, int64_t cols, const double *source) {
    c->rows[slot] = rows;
    c->cols[slot] = cols;
    c->source[slot] = source;
}

static void build_groups(ref_case *c) {
    c->sizes = c->s.sizes ? c->s.sizes : c->s.empty ? nobody : c->s.single ? single : uneven;
    for (int g = 0; g < G; g++) c->first[g + 1] = c->first[g] + c->sizes[g];
    c->live = c->first[G];
    t_splits(c->sizes, G);
    c->groups.count = G;
    c->groups.capacity = ROWS;
    c->groups.dtype = GMM_I64;
    c->groups.splits = t_in(c->sizes, G * sizeof *c->sizes);
    if (c->s.replayed) c->groups.tail = GMM_TAIL_ZERO;
}

static void build_quant(ref_case *c) {
    float zeros[GMM_SLOTS * G] = { 0.0f };
    for (int i = 0; i < GMM_SLOTS * G; i++) c->scale[i] = c->s.exact ? 16.0f : (float)(60.0 + 40.0 * t_real());
    for (int i = 0; i < 4; i++) c->random[i] = t_rand();
    c->quant.recipe = &c->recipe;
    c->quant.scale = (const float *)t_in(c->scale, sizeof c->scale);
    c->quant.random = (const uint64_t *)t_in(c->random, sizeof c->random);
    c->quant.amax = c->amax = (float *)t_alloc(sizeof zeros);
    t_upload(c->amax, zeros, sizeof zeros);
    c->quant.backward_override = c->s.override;
    if (c->s.exact && c->recipe.kind == GMM_RECIPE_FP8_CURRENT)
        c->recipe.input.pow2 = c->recipe.weight.pow2 = c->recipe.grad.pow2 = 1;
}

static void build_config(ref_case *c) {
    c->hidden = c->s.hidden ? c->s.hidden : 160;
    c->ffn = c->s.ffn ? c->s.ffn : 96;
    c->config.hidden = c->hidden;
    c->config.ffn = c->ffn;
    c->config.hidden_out = c->s.out;
    c->config.act.kind = c->s.act ? c->s.act : c->s.exact ? GMM_ACT_REGLU : GMM_ACT_SWIGLU;
    c->config.act.interleave = c->s.interleave;
    c->config.save = c->s.save;
    c->config.bias1 = c->config.bias2 = c->s.bias;
    c->config.prob = c->s.prob;
    c->config.prob_on_bias2 = c->s.on_bias2;
    c->config.delay_wgrad = c->s.delay;
    c->config.recipe = c->recipe.kind;
    c->F1 = gmm_act_gated(c->config.act.kind) ? 2 * c->ffn : c->ffn;
    c->out = c->s.out ? c->s.out : c->hidden;
}

static void build(ref_case *c, int recipe, const settings *s) {
    memset(c, 0, sizeof *c);
    c->s = *s;
    if (!c->s.dtype) c->s.dtype = GMM_BF16;
    c->recipe = ref_recipe_of(recipe).recipe;
    build_config(c);
    build_groups(c);
    build_quant(c);
    c->x = filled(c, 1, ROWS, c->hidden, 1.0);
    c->dy = filled(c, 1, ROWS, c->out, 1.0);
    c->w1 = filled(c, G, c->F1, c->hidden, 0.2);
    c->w2 = filled(c, G, c->out, c->ffn, 0.2);
    c->b1 = filled(c, G, 1, c->F1, 0.5);
    c->b2 = filled(c, G, 1, c->out, 0.5);
    c->y = t_mat_out(c->s.dtype, 1, ROWS, c->out);
    c->dx = t_mat_out(c->s.dtype, 1, ROWS, c->hidden);
    build_gradient(c, GMM_PARAM_W1, c->F1, c->hidden);
    build_gradient(c, GMM_PARAM_B1, 1, c->F1);
    build_gradient(c, GMM_PARAM_W2, c->out, c->ffn);
    build_gradient(c, GMM_PARAM_B2, 1, c->out);
    add_operand(c, GMM_SLOT_X, 0, c->hidden, c->x.v);
    add_operand(c, GMM_SLOT_W1, c->F1, c->hidden, c->w1.v);
    add_operand(c, GMM_SLOT_H, 0, c->ffn, NULL);
    add_operand(c, GMM_SLOT_W2, c->out, c->ffn, c->w2.v);
    add_operand(c, GMM_SLOT_DY, 0, c->out, c->dy.v);
    add_operand(c, GMM_SLOT_DZ, 0, c->F1, NULL);
    c->prob = (double *)t_host(ROWS * sizeof *c->prob);
    for (int i = 0; i < ROWS; i++)
        c->prob[i] = i >= c->live && !s->replayed ? (double)NAN
                     : s->exact ? ldexp(1.0, (int)t_int(-1, 1)) : i % 9 == 4 ? 0.0 : (double)(float)t_real();
    c->dprob = t_floats_out(ROWS);
    c->hooks.user = c->fired;
    c->hooks.ready = fired;
    c->queue = gmm_wgrad_queue_over(c->entry, 1);
    c->d.config = &c->config;
    c->d.groups = &c->groups;
    c->d.quant = &c->quant;
    c->d.hooks = &c->hooks;
    c->d.x = &c->x.mat;
    c->d.w1 = &c->w1.mat;
    c->d.w2 = &c->w2.mat;
    c->d.b1 = s->bias ? &c->b1.mat : NULL;
    c->d.b2 = s->bias ? &c->b2.mat : NULL;
    c->d.prob = s->prob ? t_floats_in(c->prob, ROWS) : NULL;
    c->d.y = &c->y.mat;
}
static void want_gradients(ref_case *c) {
    c->d.dy = &c->dy.mat;
    c->d.dx = &c->dx.mat;
    c->d.dw1 = &c->grad[GMM_PARAM_W1];
    c->d.dw2 = &c->grad[GMM_PARAM_W2];
    c->d.db1 = c->s.bias ? &c->grad[GMM_PARAM_B1] : NULL;
    c->d.db2 = c->s.bias ? &c->grad[GMM_PARAM_B2] : NULL;
    c->d.dprob = c->s.prob ? c->dprob : NULL;
    c->d.queue = c->s.delay ? &c->queue : NULL;
}

/* Backward, and the queued weight gradients. Hooks fire once per parameter, FC2's first, whether groups are empty or
   not. */
static void backward(ref_case *c) {
    const char *at_once = c->s.bias ? "2b1a" : "21", *biases = c->s.bias ? "ba" : "";
    const char *want = c->s.delay ? biases : at_once;
    gmm_info info = GMM_ZERO;
    want_gradients(c);
    T_OK(gmm_mlp_query(T.ctx, GMM_OP_MLP_BWD, &c->d, &info));
    if (c->s.delay) c->d.deferred = t_alloc_aligned(info.deferred_bytes, 256);
    c->d.deferred_bytes = info.deferred_bytes;
    T_OK(gmm_mlp_bwd(T.ctx, &c->d, t_workspace(info.workspace_bytes), info.workspace_bytes, T.stream));
    T_CHECK(!strcmp(c->fired, want), "hooks \"%s\", want \"%s\"", c->fired, want);
    if (!c->s.delay) return;
    T_OK(mlp_call(GMM_OP_MLP_WGRAD, &c->d));
    T_CHECK(!strncmp(c->fired, biases, strlen(biases)) && !strcmp(c->fired + strlen(biases), "21"), "hooks \"%s\"",
            c->fired);
}
#define backward(...) T_CALL(backward, __VA_ARGS__)

/* --------------------------------------------------------------------------------------------------- Reference --- */

/* The format of an operand's copy; row_amax is for rowwise copies alone. */
static gmm_format format_of(const ref_case *c, int slot, gmm_direction direction) {
    gmm_format f = slot == GMM_SLOT_X || slot == GMM_SLOT_H ? c->recipe.input
                   : slot == GMM_SLOT_W1 || slot == GMM_SLOT_W2 ? c->recipe.weight : c->recipe.grad;
    if (direction == GMM_COLUMNWISE) f.row_amax = 0;
    return f;
}
static int64_t rows_of(const ref_case *c, int slot, int g) { return c->rows[slot] ? c->rows[slot] : c->sizes[g]; }
static const double *values_of(const ref_case *c, int slot, int g) {
    return c->source[slot] + (c->rows[slot] ? g * c->rows[slot] : c->first[g]) * c->cols[slot];
}

/* Group or matrix g of an operand, quantized. A transform takes 16 rows, of which the last ones may be zeros. */
static ref_copy copy_of(const ref_case *c, int slot, gmm_direction direction, int g, gmm_format *f) {
    const int64_t m = rows_of(c, slot, g), cols = c->cols[slot];
    const double *v = values_of(c, slot, g);
    ref_copy q;
    memset(&q, 0, sizeof q);
    *f = format_of(c, slot, direction);
    q.f = f;
    q.source = c->s.dtype;
    q.direction = direction;
    q.live = m;
    q.lines = direction ? cols : m;
    q.along = !direction ? cols : f->hadamard ? (m + 15) / 16 * 16 : m;
    q.quant_scale = c->scale[slot * G + g];
    q.seed = c->random[slot == GMM_SLOT_DZ ? 2 : 0];
    q.offset = c->random[slot == GMM_SLOT_DZ ? 3 : 1];
    q.group = g;
    q.x = (float *)t_host((size_t)(q.lines * q.along) * sizeof(float) + 4);
    q.code = (uint8_t *)t_host((size_t)(q.lines * q.along) + 1);
    q.scale = (uint32_t *)t_host((size_t)(q.lines * ref_line_blocks(f, q.along)) * 4 + 4);
    q.line_amax = (float *)t_host((size_t)q.lines * 4 + 4);
    for (int64_t r = 0; r < m; r++)
        for (int64_t k = 0; k < cols; k++) q.x[direction ? k * q.along + r : r * q.along + k] = (float)v[r * cols + k];
    for (int64_t i = 0; direction && f->hadamard && i < q.lines * q.along; i += 16)
        ref_hadamard(q.x + i, 1, (unsigned)f->hadamard & 0xFFFFu);
    ref_quantize(&q);
    return q;
}

/* What a product multiplies in place of an operand: its copy, the operand itself, or the values of the rowwise copy in
   the dtype of x. */
typedef enum reading { COPIES, ITSELF, DEQUANTIZED } reading;
static reading reading_of(const ref_case *c, int slot, int in_backward) {
    const int gradient = slot == GMM_SLOT_DY || slot == GMM_SLOT_DZ;
    if (format_of(c, slot, GMM_ROWWISE).dtype == GMM_NONE) return ITSELF;
    if (!in_backward || c->s.override == GMM_BACKWARD_BY_RECIPE) return COPIES;
    return gradient || c->s.override == GMM_BACKWARD_HIGH_PRECISION ? ITSELF : DEQUANTIZED;
}

/* The values of group g of an operand in a product, as lines along the contraction. */
/* least: what a factor counts in a bound at least. Tensor cores truncate products to 24 bits below the largest sum of
   two exponents, and the exponent of every subnormal f16 is -14. */
typedef struct lines { int64_t lines, along; double *v, least; } lines;
static lines lines_of(const ref_case *c, int slot, gmm_direction direction, int g, int in_backward) {
    const reading how = reading_of(c, slot, in_backward);
    const int64_t m = rows_of(c, slot, g), cols = c->cols[slot];
    gmm_format f;
    ref_copy q;
    lines l = { direction ? cols : m, direction ? m : cols, NULL, 0.0 };
    if (how != ITSELF) q = copy_of(c, slot, how == COPIES ? direction : GMM_ROWWISE, g, &f);
    if (how == COPIES) l.along = q.along;
    else if (T.gpu && c->s.dtype == GMM_F16) l.least = 0x1p-14;
    l.v = (double *)t_host((size_t)(l.lines * l.along) * sizeof(double) + 8);
    for (int64_t i = 0; i < l.lines; i++)
        for (int64_t k = 0; k < l.along; k++) {
            const int64_t row = direction ? k : i, col = direction ? i : k;
            l.v[i * l.along + k] = how == COPIES ? ref_value(&q, i, k)
                                   : how == ITSELF ? values_of(c, slot, g)[row * cols + col]
                                                   : ref_round(c->s.dtype, (double)ref_dequantized(&q, row, col));
        }
    return l;
}

/* The results of a stage and what the library's may differ by. */
typedef struct results { gmm_dtype dtype; int64_t n; double *want, *bound; } results;
static results results_of(gmm_dtype dtype, int64_t n) {
    results r = { dtype, n, (double *)t_host((size_t)n * 8 + 8), (double *)t_host((size_t)n * 8 + 8) };
    return r;
}

/* The share of the sum of magnitudes that Hopper's FP8 products lose, which keep 14 bits of a sum over 128 elements. */
static double fp8_share(const ref_case *c, int slot, int in_backward) {
    const gmm_format f = format_of(c, slot, GMM_ROWWISE);
    return T.gpu && T.engine != GMM_ENGINE_MMA && reading_of(c, slot, in_backward) == COPIES && f.dtype != GMM_E2M1 &&
           f.scaling != GMM_SCALING_MX32 ? 2e-3 : 0.0;
}

/* Compares `got` with a stage; a stage without errors has its bits. The 14 bits of Hopper's FP8 sums may be too few for
   that. */
static void check(const ref_case *c, const char *what, const double *got, const results *r) {
    if (c->s.exact && fp8_share(c, GMM_SLOT_X, 0) == 0.0) t_exact(what, r->dtype, got, r->want, r->n);
    else t_near(what, got, r->want, r->bound, r->n);
}
#define check(...) T_CALL(check, __VA_ARGS__)

/* One product of group g: the results from `at` on are a b^T + addend[column] s[row] + start. NULL: no addend, s of 1,
   no start. The sums of blocks are rounded once more than a sum, and a scale is a product of up to four. */
typedef struct addends { const double *addend, *s, *start; double share; } addends;
static void multiply(const lines *a, const lines *b, const addends *extra, results *r, int64_t at) {
    for (int64_t i = 0; i < a->lines; i++)
        for (int64_t j = 0; j < b->lines; j++) {
            const double *x = a->v + i * a->along, *y = b->v + j * b->along;
            const int64_t K = a->along, to = at + i * b->lines + j;
            double sum = 0.0, magnitude = 0.0, aligned = 0.0, more = 0.0, much;
            for (int64_t k = 0; k < K; k++) {
                sum += x[k] * y[k];
                magnitude += fabs(x[k] * y[k]);
                aligned += fmax(fabs(x[k]), a->least) * fmax(fabs(y[k]), b->least);
            }
            if (magnitude > 0.0) magnitude = aligned;
            if (extra->addend) more = extra->addend[j] * (extra->s ? extra->s[i] : 1.0);
            much = fabs(more) + (extra->start ? fabs(extra->start[to]) : 0.0);
            more += extra->start ? extra->start[to] : 0.0;
            r->want[to] = sum + more;
            r->bound[to] = ref_bound(r->dtype, K + K / 16 + 16, magnitude + much, r->want[to]) +
                           extra->share * magnitude;
        }
}

/* The product of tokens in slot `a` with weights in slot `b`: [rows of all groups][features]. */
static results sums_by_weights(const ref_case *c, gmm_dtype dtype, int a, int b, gmm_direction direction,
                               int in_backward, const double *bias, const double *s) {
    const int64_t features = direction ? c->cols[b] : c->rows[b];
    results r = results_of(dtype, c->live * features);
    addends extra;
    for (int g = 0; g < G; g++) {
        lines x, w;
        if (!c->sizes[g]) continue;
        x = lines_of(c, a, GMM_ROWWISE, g, in_backward);
        w = lines_of(c, b, direction, g, in_backward);
        extra = (addends){ bias ? bias + g * features : NULL, s ? s + c->first[g] : NULL, NULL,
                           fp8_share(c, a, in_backward) };
        multiply(&x, &w, &extra, &r, c->first[g] * features);
    }
    return r;
}

static results tokens_by_weights(const ref_case *c, int a, int b, gmm_direction direction, int in_backward,
                                 const double *bias, const double *s) {
    return sums_by_weights(c, c->s.dtype, a, b, direction, in_backward, bias, s);
}

/* The gradient of a weight from slots dy and x. */
static void check_weight_gradient(const ref_case *c, const char *what, int param, int dy, int x) {
    const t_mat *m = &c->gradient[param];
    const int64_t each = m->rows * m->cols;
    results r = results_of(m->dtype, G * each);
    for (int g = 0; g < G; g++) {
        const lines a = lines_of(c, dy, GMM_COLUMNWISE, g, 1), b = lines_of(c, x, GMM_COLUMNWISE, g, 1);
        const addends extra = { NULL, NULL, c->s.main_grad && !c->s.overwrite ? m->v : NULL, fp8_share(c, dy, 1) };
        multiply(&a, &b, &extra, &r, g * each);
    }
    check(c, what, t_mat_get(m), &r);
}
#define check_weight_gradient(...) T_CALL(check_weight_gradient, __VA_ARGS__)

/* The gradient of a bias: sums of the rows of a slot, times s. */
static void check_bias_gradient(const ref_case *c, const char *what, int param, int slot, const double *s) {
    const t_mat *m = &c->gradient[param];
    results r = results_of(m->dtype, G * m->cols);
    for (int g = 0; g < G; g++)
        for (int64_t n = 0; n < m->cols; n++) {
            const int64_t at = g * m->cols + n;
            double sum = c->s.main_grad && !c->s.overwrite ? m->v[at] : 0.0, magnitude = fabs(sum);
            for (int64_t i = c->first[g]; i < c->first[g + 1]; i++) {
                const double v = c->source[slot][i * m->cols + n] * (s ? s[i] : 1.0);
                sum += v;
                magnitude += fabs(v);
            }
            r.want[at] = sum;
            r.bound[at] = ref_bound(m->dtype, c->sizes[g] + 1, magnitude, sum);
        }
    check(c, what, t_mat_get(m), &r);
}
#define check_bias_gradient(...) T_CALL(check_bias_gradient, __VA_ARGS__)

/* Where an empty group's gradient is added, its bits stay; where it is stored, it is +0. */
static void check_empty_groups(const ref_case *c, int param) {
    const t_mat *m = &c->gradient[param];
    const int64_t each = m->rows * m->cols, size = ref_bytes(m->dtype);
    const unsigned char *bits = (const unsigned char *)t_mat_bits(m);
    unsigned char *start = (unsigned char *)t_host((size_t)(G * each * size));
    for (int64_t i = 0; c->s.main_grad && !c->s.overwrite && i < G * each; i++)
        ref_store(m->dtype, start, i, m->v[i]);
    for (int g = 0; g < G; g++)
        if (!c->sizes[g])
            t_same("an empty group's gradient", bits + g * each * size, start + g * each * size, (size_t)(each * size));
}
#define check_empty_groups(...) T_CALL(check_empty_groups, __VA_ARGS__)

/* --------------------------------------------------------------------------------------------------- Activation --- */

/* Error that fp32 arithmetic of an activation may add (test_act.c), and the rounding to a dtype. GPUs take sigmoids
   below 2^-126 for 0, and activations multiply them by arguments of up to 128. */
static double act_error(double size, double factor) {
    return 2e-5 * size + (T.gpu ? 0x1p-119 : 0x1p-140) * (1.0 + factor);
}
static double rounded_bound(gmm_dtype dtype, double want, double error) {
    return error + ref_roundoff(dtype) * (fabs(want) + error) + ref_tiny(dtype);
}

/* The activation of output j of row i, and the columns of its operands. */
static ref_point activated(const ref_case *c, const double *z, int64_t i, int64_t j, int64_t *gate, int64_t *line) {
    const int64_t B = c->s.interleave;
    *gate = B ? j / B * 2 * B + j % B : j;
    *line = *gate + (B ? B : c->ffn);
    if (c->F1 == c->ffn) *gate = *line = j;
    return ref_act(&c->config.act, z[i * c->F1 + *gate], c->F1 == c->ffn ? 0.0 : z[i * c->F1 + *line]);
}
static double prob_of(const ref_case *c, int64_t row) { return c->s.prob ? c->prob[row] : 1.0; }

static results expected_h(const ref_case *c, const double *z) {
    results r = results_of(c->s.dtype, c->live * c->ffn);
    for (int64_t i = 0; i < c->live; i++)
        for (int64_t j = 0; j < c->ffn; j++) {
            int64_t gate, line;
            const ref_point q = activated(c, z, i, j, &gate, &line);
            const double p = prob_of(c, i), want = p * q.y;
            r.want[i * c->ffn + j] = want;
            r.bound[i * c->ffn + j] = rounded_bound(r.dtype, want, act_error(fabs(p) * q.y_size, 1.0));
        }
    return r;
}

/* dz from dh, which may differ from that of the library by `slack` (NULL: it does not). */
static results expected_dz(const ref_case *c, const double *dh, const double *slack) {
    results r = results_of(c->s.dtype, c->live * c->F1);
    for (int64_t i = 0; i < c->live; i++)
        for (int64_t j = 0; j < c->ffn; j++) {
            int64_t gate, line;
            const ref_point q = activated(c, c->z, i, j, &gate, &line);
            const double d = prob_of(c, i) * dh[i * c->ffn + j], factor = fabs(c->z[i * c->F1 + line]);
            const double off = slack ? fabs(prob_of(c, i)) * slack[i * c->ffn + j] : 0.0;
            const int64_t a = i * c->F1 + gate, b = i * c->F1 + line;
            if (c->F1 != c->ffn) {
                r.want[b] = d * q.db;
                r.bound[b] = rounded_bound(r.dtype, r.want[b],
                                           act_error(fabs(d) * q.db_size, factor) + off * q.db_size);
            }
            r.want[a] = d * q.da;
            r.bound[a] = rounded_bound(r.dtype, r.want[a], act_error(fabs(d) * q.da_size, factor) + off * q.da_size);
        }
    return r;
}

/* dprob: sum of dh times the activation, and with prob_on_bias2 of dy times the bias. */
static void check_dprob(const ref_case *c, const double *dh, const double *slack) {
    results r = results_of(GMM_F32, c->live);
    for (int g = 0; g < G; g++)
        for (int64_t i = c->first[g]; i < c->first[g + 1]; i++) {
            double sum = 0.0, error = 0.0;
            for (int64_t j = 0; j < c->ffn; j++) {
                int64_t gate, line;
                const ref_point q = activated(c, c->z, i, j, &gate, &line);
                const double d = dh[i * c->ffn + j];
                sum += d * q.y;
                error += act_error(fabs(d) * q.y_size, 1.0) + (c->ffn + 8) * 0x1p-24 * fabs(d) * q.y_size;
                error += slack ? slack[i * c->ffn + j] * q.y_size : 0.0;
            }
            for (int64_t n = 0; c->s.on_bias2 && n < c->out; n++) {
                const double v = c->dy.v[i * c->out + n] * c->b2.v[g * c->out + n];
                sum += v;
                error += (double)(c->out + 8) * 0x1p-24 * fabs(v);
            }
            r.want[i] = sum;
            r.bound[i] = rounded_bound(GMM_F32, sum, error);
        }
    check(c, "dprob", t_floats_get(c->dprob, ROWS), &r);
}
#define check_dprob(...) T_CALL(check_dprob, __VA_ARGS__)

/* ------------------------------------------------------------------------------------- Stages of the library --- */

/* The reference's copy of an operand, tokens rowwise or weights, as the library stores copies. */
static gmm_mat image_of(const ref_case *c, int slot, gmm_direction direction) {
    const int tokens = !c->rows[slot];
    const int64_t cols = c->cols[slot];
    gmm_format f = format_of(c, slot, direction);
    const int64_t amaxes = f.scaling != GMM_SCALING_NV16 ? 0 : f.row_amax ? ROWS : G, units = tokens ? 1 : G;
    int64_t start = 0, size;
    gmm_layout l = GMM_ZERO;
    uint8_t *data, *scale;
    float *amax = (float *)t_host((size_t)amaxes * 4 + 4);
    T_CHECK((tokens ? gmm_layout_of_groups(f.dtype, f.scaling, f.order, direction, G, ROWS, cols, &l, NULL)
                    : gmm_layout_of(f.dtype, f.scaling, f.order, direction, c->rows[slot], cols, &l, NULL)) == GMM_OK,
            "layout");
    size = ref_bytes(l.scale_dtype);
    data = (uint8_t *)t_host((size_t)(units * l.data_bytes));
    scale = (uint8_t *)t_host((size_t)(units * l.scale_bytes));
    for (int g = 0; g < G; g++) {
        const int64_t m = rows_of(c, slot, g), padded = (m + 127) / 128 * 128;
        const ref_copy q = copy_of(c, slot, direction, g, &f);
        const int64_t lines = !direction && tokens ? padded : q.lines, row = tokens ? c->first[g] : g * m;
        const int64_t base = tokens ? gmm_scale_base(f.scaling, direction, cols, g, row, start)
                                    : g * l.scale_bytes / size;
        for (int64_t i = 0; i < q.lines; i++) {
            for (int64_t k = 0; k < q.along; k++)
                ref_put_code(f.dtype, data, row * cols + (direction && f.scaling == GMM_SCALING_MX32
                                                              ? k * cols + i : i * q.along + k),
                             q.code[i * q.along + k]);
            for (int64_t b = 0; b < q.per_line; b++) {
                const int64_t at = base + gmm_scale_index(f.scaling, f.order, direction, lines, q.along, i, b);
                if (size == 1) scale[at] = (uint8_t)q.scale[i * q.per_line + b];
                else memcpy(scale + 4 * at, &q.scale[i * q.per_line + b], 4);
            }
        }
        if (f.row_amax) memcpy(amax + row, q.line_amax, (size_t)q.lines * 4);
        else if (amaxes) amax[g] = q.amax;
        start += padded;
    }
    f = format_of(c, slot, direction);
    return gmm_mat_quantized(&f, direction, t_in(data, (size_t)(units * l.data_bytes)),
                             t_in(scale, (size_t)(units * l.scale_bytes)),
                             amaxes ? (float *)t_in(amax, (size_t)amaxes * 4) : NULL);
}
/* Both copies of a weight. */
static void weight_images(const ref_case *c, int slot, gmm_mat image[2]) {
    for (int k = 0; k < 2; k++) image[k] = image_of(c, slot, (gmm_direction)k);
    image[0].columnwise = &image[1];
}

/* Values of all groups in the dtype of x; rows past them are NaN. */
static t_mat tokens_of(const ref_case *c, const double *v, int64_t cols) {
    t_mat m = t_mat_in(c->s.dtype, 1, ROWS, cols, T_INTS);
    for (int64_t i = 0; i < ROWS * cols; i++) m.v[i] = i < c->live * cols ? v[i] : (double)NAN;
    t_mat_put(&m);
    return m;
}

/* FC2's dgrad over operands of the reference, checked. */
static const double *dh_of(const ref_case *c) {
    const results want = tokens_by_weights(c, GMM_SLOT_DY, GMM_SLOT_W2, GMM_COLUMNWISE, 1, NULL, NULL);
    const reading how = reading_of(c, GMM_SLOT_W2, 1);
    t_mat dh = t_mat_out(c->s.dtype, 1, ROWS, c->ffn), values;
    gmm_mat image[2], dy = c->dy.mat;
    const gmm_mat *w = &c->w2.mat;
    const double *got;
    if (reading_of(c, GMM_SLOT_DY, 1) == COPIES) dy = image_of(c, GMM_SLOT_DY, GMM_ROWWISE);
    if (how == COPIES) {
        image[0] = image[1] = image_of(c, GMM_SLOT_W2, GMM_COLUMNWISE);
        image[0].columnwise = &image[1];
        w = &image[0];
    }
    if (how == DEQUANTIZED) {
        values = t_mat_in(c->s.dtype, G, c->out, c->ffn, T_INTS);
        for (int g = 0; g < G; g++)
            memcpy(values.v + g * c->out * c->ffn, lines_of(c, GMM_SLOT_W2, GMM_ROWWISE, g, 1).v,
                   (size_t)(c->out * c->ffn) * sizeof(double));
        t_mat_put(&values);
        w = &values.mat;
    }
    mlp_linear(&c->d, GMM_PARAM_W2, GMM_OP_LINEAR_DGRAD, NULL, w, &dy, &dh.mat);
    got = t_mat_get(&dh);
    check(c, "dh", got, &want);
    return got;
}

/* One pass of the activation over z: forward gives h, backward from dh dz. Checked. */
static const double *act_of(const ref_case *c, const double *dh) {
    const results want = dh ? expected_dz(c, dh, NULL) : expected_h(c, c->z);
    const t_mat z = tokens_of(c, c->z, c->F1), to = t_mat_out(c->s.dtype, 1, ROWS, dh ? c->F1 : c->ffn);
    const double *got;
    if (dh) {
        const t_mat from = tokens_of(c, dh, c->ffn);
        mlp_act_bwd(&c->d, &z.mat, &from.mat, &to.mat, NULL);
    } else mlp_act_fwd(&c->d, &z.mat, &to.mat);
    got = t_mat_get(&to);
    check(c, dh ? "dz" : "h of the saved z", got, &want);
    return got;
}

/* dh as the reference rounds it. *slack: what it may differ by from a dh that is rounded from an fp32 sum, which is 0
   but next to a tie. */
static const double *own_dh(const ref_case *c, const double **slack) {
    const results r = sums_by_weights(c, GMM_F32, GMM_SLOT_DY, GMM_SLOT_W2, GMM_COLUMNWISE, 1, NULL, NULL);
    for (int64_t i = 0; i < r.n; i++) {
        const double sum = r.want[i], error = r.bound[i];
        r.want[i] = ref_round(c->s.dtype, sum);
        r.bound[i] = fmax(fabs(ref_round(c->s.dtype, sum + error) - r.want[i]),
                          fabs(ref_round(c->s.dtype, sum - error) - r.want[i]));
    }
    *slack = r.bound;
    return r.want;
}

/* dz of groups of one row: the gradient of their b1. Checked. */
static double *own_dz(const ref_case *c, const double *dh, const double *slack) {
    const results want = expected_dz(c, dh, slack);
    const double *sums = t_mat_get(&c->gradient[GMM_PARAM_B1]);
    double *dz = (double *)t_host((size_t)(c->live * c->F1) * sizeof *dz);
    for (int g = 0; g < G; g++)
        memcpy(dz + c->first[g] * c->F1, sums + g * c->F1, (size_t)(c->sizes[g] * c->F1) * sizeof *dz);
    t_matrix(dz, 1, c->live, c->F1, (int64_t)sizeof *dz);
    check(c, "dz", dz, &want);
    return dz;
}

/* --------------------------------------------------------------------------------------------------- Running --- */

/* The rows of all groups of a part of gmm_mlp.saved, as bytes; NULL if it has no part of this name. */
static const void *saved_part(const ref_case *c, const char *name, gmm_dtype *dtype) {
    const gmm_saved_part part = mlp_saved_part(&c->d, name);
    *dtype = part.dtype;
    if (!part.name) return NULL;
    return t_get((const char *)c->d.saved + part.offset, (size_t)(c->live * part.ld * ref_bytes(part.dtype)));
}
static double *saved_values(const ref_case *c, const char *name, int64_t cols) {
    gmm_dtype dtype = GMM_NONE;
    const void *bytes = saved_part(c, name, &dtype);
    double *v = (double *)t_host((size_t)(c->live * cols) * sizeof *v + 8);
    T_CHECK(bytes && dtype == c->s.dtype, "%s is saved as %s", name, gmm_dtype_name(dtype));
    for (int64_t i = 0; i < c->live * cols; i++) v[i] = ref_load(dtype, bytes, i);
    t_matrix(v, 1, c->live, cols, (int64_t)sizeof *v);
    return v;
}

/* z and h, which a forward that saves both gives. Checked. */
static void take_stages(ref_case *c) {
    const gmm_save save = c->config.save;
    const t_mat y = t_mat_out(c->s.dtype, 1, ROWS, c->out);
    double *z;
    results want;
    c->config.save = GMM_SAVE_PREACT_AND_ACT;
    c->d.y = &y.mat;
    mlp_forward(&c->d);
    z = saved_values(c, "preact", c->F1);
    want = tokens_by_weights(c, GMM_SLOT_X, GMM_SLOT_W1, GMM_ROWWISE, 0, c->s.bias ? c->b1.v : NULL, NULL);
    check(c, "z", z, &want);
    c->z = z;
    c->source[GMM_SLOT_H] = saved_values(c, "act", c->ffn);
    want = expected_h(c, z);
    check(c, "h", c->source[GMM_SLOT_H], &want);
    c->config.save = save;
    c->d.y = &c->y.mat;
}
#define take_stages(...) T_CALL(take_stages, __VA_ARGS__)

/* z as it is saved, which backward reads: itself, or its nearest E4M3. */
static void take_saved_z(ref_case *c) {
    const int e4m3 = mlp_saves_e4m3(c->config.save);
    const int64_t n = c->live * c->F1;
    const void *saved;
    uint8_t *code = (uint8_t *)t_host((size_t)n + 1);
    double *z = (double *)t_host((size_t)n * sizeof *z + 8);
    gmm_dtype dtype = GMM_NONE;
    if (c->config.save == GMM_SAVE_NOTHING) return;
    saved = saved_part(c, "preact", &dtype);
    T_CHECK(saved && dtype == (e4m3 ? GMM_E4M3 : c->s.dtype), "z is saved as %s", gmm_dtype_name(dtype));
    for (int64_t i = 0; i < n; i++) {
        code[i] = ref_encode_small(GMM_E4M3, c->z[i]);
        z[i] = e4m3 ? ref_decode_small(GMM_E4M3, code[i]) : ref_load(dtype, saved, i);
    }
    if (e4m3) {
        t_same("z as E4M3", saved, code, (size_t)n);
        c->z = z;
    } else t_exact("saved z", dtype, z, c->z, n);
}
#define take_saved_z(...) T_CALL(take_saved_z, __VA_ARGS__)

/* Delayed scaling records the largest magnitude of every operand that the call casts. */
static void check_amaxes(const ref_case *c) {
    const float *seen = (const float *)t_get(c->amax, sizeof(float) * GMM_SLOTS * G);
    for (int slot = 0; slot < GMM_SLOTS; slot++)
        for (int g = 0; g < G; g++) {
            double most = 0.0;
            for (int64_t i = 0; i < rows_of(c, slot, g) * c->cols[slot]; i++)
                most = fmax(most, fabs(values_of(c, slot, g)[i]));
            if (c->s.prequantized && (slot == GMM_SLOT_W1 || slot == GMM_SLOT_W2)) most = 0.0; /* not cast */
            T_CHECK((double)seen[slot * G + g] == most, "slot %d, group %d: amax %g, want %g", slot, g,
                    (double)seen[slot * G + g], most);
        }
}
#define check_amaxes(...) T_CALL(check_amaxes, __VA_ARGS__)

static void check_tail(const char *what, const t_mat *m, int64_t live) {
    const size_t row = (size_t)(m->cols * ref_bytes(m->dtype));
    t_bytes(what, (const char *)t_mat_bits(m) + (size_t)live * row, 0xFF, (size_t)(ROWS - live) * row);
}

/* All results of forward and backward under a recipe. */
static void compare(int recipe, const settings *s) {
    ref_case c;
    gmm_mat image[2][2];
    const double *dh, *slack = NULL;
    const void *y = NULL;
    results want;
    build(&c, recipe, s);
    if (T.gpu && s->dtype == GMM_F32 && c.recipe.input.dtype == GMM_NONE) { /* quantized weights and f32 tokens */
        gmm_info info = GMM_ZERO;
        T_REFUSED(GMM_E_UNSUPPORTED, gmm_mlp_query(T.ctx, GMM_OP_MLP_FWD, &c.d, &info), "gmm_mlp_query: ", NULL);
        return;
    }
    if (s->prequantized) {
        c.quant.amax = NULL; /* the call that casts the weights shall not record them */
        mlp_forward(&c.d);
        y = t_mat_bits(&c.y);
        c.quant.amax = c.amax;
        for (int i = 0; i < 2; i++) weight_images(&c, i ? GMM_SLOT_W2 : GMM_SLOT_W1, image[i]);
        c.d.w1 = &image[0][0];
        c.d.w2 = &image[1][0];
    }
    take_stages(&c);
    mlp_forward(&c.d);
    if (y) t_same("y of quantized weights", t_mat_bits(&c.y), y, (size_t)(ROWS * c.out * ref_bytes(c.s.dtype)));
    want = tokens_by_weights(&c, GMM_SLOT_H, GMM_SLOT_W2, GMM_ROWWISE, 0, s->bias ? c.b2.v : NULL,
                             s->on_bias2 ? c.prob : NULL);
    check(&c, "y", t_mat_get(&c.y), &want);
    check_tail("tail of y", &c.y, c.live);

    take_saved_z(&c);
    if (mlp_saves_copies(s->save)) c.d.x = NULL; /* its copy is saved */
    backward(&c);
    if (s->save == GMM_SAVE_PREACT_E4M3) c.source[GMM_SLOT_H] = act_of(&c, NULL);
    dh = s->single ? own_dh(&c, &slack) : dh_of(&c);
    c.source[GMM_SLOT_DZ] = s->single ? own_dz(&c, dh, slack) : act_of(&c, dh);
    want = tokens_by_weights(&c, GMM_SLOT_DZ, GMM_SLOT_W1, GMM_COLUMNWISE, 1, NULL, NULL);
    check(&c, "dx", t_mat_get(&c.dx), &want);
    check_tail("tail of dx", &c.dx, c.live);
    check_weight_gradient(&c, "dw1", GMM_PARAM_W1, GMM_SLOT_DZ, GMM_SLOT_X);
    check_weight_gradient(&c, "dw2", GMM_PARAM_W2, GMM_SLOT_DY, GMM_SLOT_H);
    if (s->bias) {
        check_bias_gradient(&c, "db1", GMM_PARAM_B1, GMM_SLOT_DZ, NULL);
        check_bias_gradient(&c, "db2", GMM_PARAM_B2, GMM_SLOT_DY, s->on_bias2 ? c.prob : NULL);
    }
    for (int param = 0; param < 4; param++)
        if (s->bias || param == GMM_PARAM_W1 || param == GMM_PARAM_W2) check_empty_groups(&c, param);
    if (s->prob) check_dprob(&c, dh, slack);
    if (c.recipe.input.delayed && s->save == GMM_SAVE_PREACT && s->override == GMM_BACKWARD_BY_RECIPE)
        check_amaxes(&c);
}
#define compare(...) T_CALL(compare, __VA_ARGS__)

/* What the cases vary, for every recipe that has it. */
enum { ANY, FLOATS, FP8, COPIED, EXACT };
static const struct variation { const char *name; int recipes; settings s; } variations[] = {
    { "bf16, all biases weighted", ANY, { .bias = 1, .prob = 1, .on_bias2 = 1, .interleave = 8 } },
    { "f16, narrow output", FLOATS, { .dtype = GMM_F16, .bias = 1, .prob = 1, .on_bias2 = 1, .out = 64 } },
    { "f32, bias not weighted", FLOATS, { .dtype = GMM_F32, .bias = 1, .prob = 1, .interleave = 32, .out = 64 } },
    { "no biases, no prob, nothing saved", ANY, { .out = 64, .save = GMM_SAVE_NOTHING } },
    { "ungated, copies saved", COPIED, { .act = GMM_ACT_GELU, .bias = 1, .out = 64, .save = GMM_SAVE_QUANTIZED } },
    { "adds to fp32 gradients", ANY,
      { .bias = 1, .prob = 1, .on_bias2 = 1, .main_grad = 1, .interleave = 8, .out = 64 } },
    { "adds to bf16 gradients, delayed", ANY,
      { .grad = GMM_BF16, .bias = 1, .prob = 1, .main_grad = 1, .delay = 1, .out = 96 } },
    { "overwrites bf16 gradients", ANY, { .grad = GMM_BF16, .bias = 1, .main_grad = 1, .overwrite = 1, .out = 64 } },
    { "empty rank, adds", ANY, { .bias = 1, .prob = 1, .on_bias2 = 1, .main_grad = 1, .empty = 1, .out = 64 } },
    { "empty rank, stores, delayed", ANY,
      { .bias = 1, .prob = 1, .on_bias2 = 1, .delay = 1, .empty = 1, .out = 64 } },
    { "one row per group", ANY, { .bias = 1, .prob = 1, .on_bias2 = 1, .single = 1 } },
    { "one row per group, f32", FLOATS, { .dtype = GMM_F32, .bias = 1, .out = 64, .single = 1 } },
    { "exact", EXACT, { .bias = 1, .prob = 1, .on_bias2 = 1, .main_grad = 1, .exact = 1, .interleave = 8 } },
    { "exact, delayed, narrow output", EXACT, { .grad = GMM_BF16, .delay = 1, .exact = 1, .out = 64 } },
    { "weights quantized before", FP8, { .bias = 1, .prob = 1, .prequantized = 1 } },
    { "z saved as e4m3", ANY, { .bias = 1, .prob = 1, .out = 64, .save = GMM_SAVE_PREACT_E4M3 } },
    { "z saved as e4m3, copies saved", COPIED,
      { .bias = 1, .prob = 1, .out = 64, .save = GMM_SAVE_QUANTIZED_E4M3 } },
    { "backward in high precision", ANY,
      { .bias = 1, .prob = 1, .out = 64, .override = GMM_BACKWARD_HIGH_PRECISION } },
    { "backward in high precision, z saved as e4m3", ANY,
      { .out = 64, .save = GMM_SAVE_PREACT_E4M3, .override = GMM_BACKWARD_HIGH_PRECISION, .delay = 1 } },
    { "backward dequantized", ANY, { .bias = 1, .prob = 1, .out = 64, .override = GMM_BACKWARD_DEQUANTIZED } },
    { "backward dequantized, f32, delayed", FLOATS,
      { .dtype = GMM_F32, .out = 64, .override = GMM_BACKWARD_DEQUANTIZED, .delay = 1 } },
    { "backward dequantized, z saved as e4m3, copies saved", COPIED,
      { .bias = 1, .prob = 1, .out = 64, .save = GMM_SAVE_QUANTIZED_E4M3, .override = GMM_BACKWARD_DEQUANTIZED } },
};
enum { VARIATIONS = sizeof variations / sizeof variations[0] };

/* Argument: recipe + REF_RECIPES * variation. */
static void reference(int arg) { compare(arg % REF_RECIPES, &variations[arg / REF_RECIPES].s); }

static int has_variation(int recipe, int needs) {
    const gmm_recipe r = ref_recipe_of(recipe).recipe;
    switch (needs) {
    case FLOATS: return !r.input.hadamard; /* the transform takes bf16 alone */
    case FP8: return r.weight.dtype == GMM_E4M3;
    case COPIED: return r.input.dtype != GMM_NONE;
    case EXACT: return r.kind != GMM_RECIPE_NVFP4; /* whose two-level scales are no powers of two */
    default: return 1;
    }
}

/* ------------------------------------------------------------------------------------------------------- Graphs --- */

#ifdef HAVE_CUDA
static void no_error(const char *what, const char *why) { T_CHECK(!why, "%s: %s", what, why); }
#define no_error(...) T_CALL(no_error, __VA_ARGS__)

/* Memory of a captured forward and backward. The bytes are those that the largest of the calls needs. */
typedef struct graph_case {
    ref_case c;
    void *workspace, *graph;
    size_t bytes;
    int64_t *splits;
} graph_case;

/* Enqueues forward, backward and, if they are delayed, the weight gradients. Returns the first error. */
static gmm_status enqueue(graph_case *r) {
    gmm_status s = gmm_mlp_fwd(T.ctx, &r->c.d, r->workspace, r->bytes, T.stream);
    if (s == GMM_OK) s = gmm_mlp_bwd(T.ctx, &r->c.d, r->workspace, r->bytes, T.stream);
    if (s == GMM_OK && r->c.s.delay) s = gmm_mlp_wgrad(T.ctx, &r->c.queue, r->workspace, r->bytes, T.stream);
    return s;
}

/* Makes the buffers of all operations, after the caller has changed the descriptors that build has made. */
static void ready(graph_case *r) {
    ref_case *c = &r->c;
    const int last = c->s.delay ? GMM_OP_MLP_WGRAD : GMM_OP_MLP_BWD;
    r->splits = (int64_t *)t_alloc(G * sizeof *r->splits);
    t_upload(r->splits, c->sizes, G * sizeof *r->splits);
    c->groups.splits = r->splits;
    want_gradients(c);
    for (int op = GMM_OP_MLP_FWD; op <= last; op++) {
        gmm_info info = GMM_ZERO;
        T_OK(gmm_mlp_query(T.ctx, (gmm_op)op, &c->d, &info));
        if (op == GMM_OP_MLP_FWD) {
            c->d.saved_bytes = info.saved_bytes;
            c->d.saved = t_alloc_aligned(info.saved_bytes, 256);
        }
        if (op == GMM_OP_MLP_BWD && c->s.delay) {
            c->d.deferred_bytes = info.deferred_bytes;
            c->d.deferred = t_alloc_aligned(info.deferred_bytes, 256);
        }
        if (info.workspace_bytes > r->bytes) r->bytes = info.workspace_bytes;
    }
    r->workspace = t_workspace(r->bytes);
}
#define ready(...) T_CALL(ready, __VA_ARGS__)

/* Captures the calls. Hooks are silent, and the queue is empty behind them. */
static void capture(graph_case *r) {
    gmm_status s;
    const size_t calls = strlen(r->c.fired);
    no_error("begin", device_begin_capture());
    s = enqueue(r);
    no_error("end", device_end_capture(&r->graph));
    T_CHECK(s == GMM_OK, "capture: %s", gmm_last_error(T.ctx));
    T_CHECK(strlen(r->c.fired) == calls, "hooks \"%s\" while capturing", r->c.fired + calls);
    T_CHECK(r->c.queue.count == 0, "the queue holds %d", (int)r->c.queue.count);
}
#define capture(...) T_CALL(capture, __VA_ARGS__)

/* All results; gradients begin with the same values before every run. */
enum { OUTPUTS = 7 };
typedef struct outputs { const void *bits[OUTPUTS]; } outputs;
static const char *const output_names[OUTPUTS] = { "y", "dx", "dw1", "db1", "dw2", "db2", "dprob" };
static const t_mat *output_of(const ref_case *c, int i) {
    return i == 0 ? &c->y : i == 1 ? &c->dx : &c->gradient[i - 2];
}
static size_t output_bytes(const ref_case *c, int i) {
    const t_mat *m = i < OUTPUTS - 1 ? output_of(c, i) : NULL;
    return m ? (size_t)(m->count * m->rows * m->cols * ref_bytes(m->dtype)) : ROWS * sizeof(float);
}
static void reset(graph_case *r, const int64_t *sizes) {
    ref_case *c = &r->c;
    t_upload(r->splits, sizes, G * sizeof *sizes);
    t_poison(c->y.data, 0xFF, output_bytes(c, 0));
    t_poison(c->dx.data, 0xFF, output_bytes(c, 1));
    t_poison(c->dprob, 0xFF, output_bytes(c, OUTPUTS - 1));
    for (int i = 0; i < 4; i++) t_mat_put(&c->gradient[i]);
    t_poison(r->workspace, 0xFF, r->bytes);
}
static outputs outputs_of(const ref_case *c) {
    outputs o;
    t_wait();
    for (int i = 0; i < OUTPUTS - 1; i++) o.bits[i] = t_mat_bits(output_of(c, i));
    o.bits[OUTPUTS - 1] = t_get(c->dprob, output_bytes(c, OUTPUTS - 1));
    return o;
}
static outputs eager(graph_case *r, const int64_t *sizes) {
    reset(r, sizes);
    T_CHECK(enqueue(r) == GMM_OK, "%s", gmm_last_error(T.ctx));
    return outputs_of(&r->c);
}
static outputs replayed(graph_case *r, const int64_t *sizes) {
    reset(r, sizes);
    no_error("replay", device_replay(r->graph));
    return outputs_of(&r->c);
}
static void same_outputs(const ref_case *c, const outputs *a, const outputs *b) {
    for (int i = 0; i < OUTPUTS; i++) t_same(output_names[i], a->bits[i], b->bits[i], output_bytes(c, i));
}
#define same_outputs(...) T_CALL(same_outputs, __VA_ARGS__)

static const int64_t other_sizes[][G] = { { 1, 0, 131 }, { 0, 0, 0 }, { ROWS, 0, 0 }, { 50, 37, 52 }, { 0, 0, ROWS } };

/* Replays with other splits, beside eager calls. Only the eager calls fire hooks. */
static void same_replays(graph_case *r) {
    const char *once = r->c.s.delay ? "ba21" : "2b1a";
    for (int i = 0; i < (int)T_COUNT(other_sizes); i++) {
        outputs a, b;
        t_splits(other_sizes[i], G);
        memset(r->c.fired, 0, sizeof r->c.fired);
        a = eager(r, other_sizes[i]);
        b = replayed(r, other_sizes[i]);
        T_CHECK(!strcmp(r->c.fired, once), "hooks \"%s\", want \"%s\"", r->c.fired, once);
        same_outputs(&r->c, &a, &b);
    }
    memset(r->c.fired, 0, sizeof r->c.fired); /* as after a replay */
    T_OK(gmm_mlp_fire_hooks(T.ctx, GMM_OP_MLP_BWD, &r->c.d, T.stream));
    if (r->c.s.delay) T_OK(gmm_mlp_fire_hooks(T.ctx, GMM_OP_MLP_WGRAD, &r->c.d, T.stream));
    T_CHECK(!strcmp(r->c.fired, once), "hooks \"%s\", want \"%s\"", r->c.fired, once);
}
#define same_replays(...) T_CALL(same_replays, __VA_ARGS__)

/* Forward and backward that add to fp32 gradients; delayed: weight gradients by way of the queue. Argument: recipe +
   REF_RECIPES * delayed. */
static void graph_of_gradients(int arg) {
    const settings s = { .bias = 1, .prob = 1, .on_bias2 = 1, .main_grad = 1, .interleave = 8, .replayed = 1,
                         .delay = arg / REF_RECIPES };
    graph_case r;
    memset(&r, 0, sizeof r);
    build(&r.c, arg % REF_RECIPES, &s);
    ready(&r);
    (void)eager(&r, r.c.sizes); /* loads the code */
    capture(&r);
    same_replays(&r);
    device_graph_free(r.graph);
}

/* Weights that were quantized before the capture. */
static void graph_of_quantized_weights(int arg) {
    const settings s = { .bias = 1, .prob = 1, .main_grad = 1, .prequantized = 1, .replayed = 1 };
    gmm_mat image[2][2];
    graph_case r;
    outputs quantized, cast;
    memset(&r, 0, sizeof r);
    build(&r.c, arg, &s);
    for (int i = 0; i < 2; i++) weight_images(&r.c, i ? GMM_SLOT_W2 : GMM_SLOT_W1, image[i]);
    ready(&r);
    cast = eager(&r, r.c.sizes);
    t_done(r.workspace);
    r.bytes = 0;
    r.c.d.w1 = &image[0][0];
    r.c.d.w2 = &image[1][0];
    ready(&r);
    quantized = eager(&r, r.c.sizes);
    same_outputs(&r.c, &cast, &quantized);
    capture(&r);
    same_replays(&r);
    device_graph_free(r.graph);
}

/* A graph reads the word of the weight cache at each replay: 0 casts the weights as they are then, anything else takes
   what the cache has. */
static void graph_of_weight_cache(int arg) {
    const settings s = { .bias = 1, .prob = 1, .main_grad = 1, .replayed = 1 };
    const int32_t cast = 0, skip = 1;
    int32_t *word = (int32_t *)t_alloc(sizeof cast);
    gmm_info info = GMM_ZERO;
    outputs first, second, kept, fresh;
    graph_case r;
    memset(&r, 0, sizeof r);
    build(&r.c, arg, &s);
    T_OK(gmm_mlp_query(T.ctx, GMM_OP_MLP_FWD, &r.c.d, &info));
    r.c.quant.weight_cache = t_alloc_aligned(info.weight_cache_bytes, 256);
    r.c.quant.weight_cache_bytes = info.weight_cache_bytes;
    r.c.quant.weight_skip = word;
    t_upload(word, &cast, sizeof cast);
    ready(&r);
    first = eager(&r, r.c.sizes);
    capture(&r);
    fresh = replayed(&r, r.c.sizes);
    same_outputs(&r.c, &first, &fresh);
    fill(&r.c, &r.c.w1, 0, 0.3); /* other weights, which the cache does not have */
    fill(&r.c, &r.c.w2, 0, 0.3);
    t_upload(word, &skip, sizeof skip);
    kept = replayed(&r, r.c.sizes);
    same_outputs(&r.c, &first, &kept);
    t_upload(word, &cast, sizeof cast);
    fresh = replayed(&r, r.c.sizes);
    second = eager(&r, r.c.sizes);
    same_outputs(&r.c, &second, &fresh);
    T_CHECK(memcmp(first.bits[0], second.bits[0], output_bytes(&r.c, 0)) != 0, "other weights give the same y");
    t_upload(word, &skip, sizeof skip);
    kept = replayed(&r, r.c.sizes);
    same_outputs(&r.c, &second, &kept);
    device_graph_free(r.graph);
}
#endif

/* A variation with another recipe, shape and split. */
static void drawn(int arg) {
    const int recipe = (int)t_int(0, REF_RECIPES - 1);
    int v = (int)t_int(0, VARIATIONS - 1);
    settings s;
    (void)arg;
    while (!has_variation(recipe, variations[v].recipes)) v = (v + 1) % VARIATIONS;
    s = variations[v].s;
    if (!s.exact) { /* whose sums of integers are exact in the usual shape */
        s.hidden = 32 * t_int(1, 7);
        s.ffn = 32 * t_int(1, 5);
        s.out = t_int(0, 1) * 32 * t_int(1, 5);
    }
    if (!s.empty && !s.single && !s.exact) s.sizes = t_draw_sizes(G, t_int(1, ROWS));
    compare(recipe, &s);
}

void tests_mlp_reference(void) {
    t_add(drawn, 0, "mlp reference drawn at random");
    t_random(8);
    for (int i = 0; i < REF_RECIPES * VARIATIONS; i++) {
        const struct variation *v = &variations[i / REF_RECIPES];
        if (has_variation(i % REF_RECIPES, v->recipes))
            t_add(reference, i, "mlp reference %s, %s", ref_recipe_of(i % REF_RECIPES).name, v->name);
    }
#ifdef HAVE_CUDA
    for (int i = 0; i < REF_RECIPES; i++) {
        const ref_recipe r = ref_recipe_of(i);
        t_add_gpu(graph_of_gradients, i, "mlp reference graph %s, adds to gradients, other splits", r.name);
        t_add_gpu(graph_of_gradients, i + REF_RECIPES, "mlp reference graph %s, delayed queue, other splits", r.name);
        t_add_gpu(graph_of_weight_cache, i, "mlp reference graph %s, weight cache between replays", r.name);
        if (has_variation(i, FP8))
            t_add_gpu(graph_of_quantized_weights, i, "mlp reference graph %s, weights quantized before", r.name);
    }
#endif
}
