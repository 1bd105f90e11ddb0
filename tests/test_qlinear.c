/* test_qlinear.c - grouped linear with quantized operands. References: codes times scales in double, read from the
   copies by the layout functions that test_quantize.c checks. */
#include "test.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#ifdef HAVE_CUDA
#include "device.h"
#endif

static int64_t up(int64_t a, int64_t b) { return (a + b - 1) / b * b; }

/* The format of each operand. */
typedef struct setup { const char *name; gmm_dtype source; gmm_format x, w, dy; } setup;
enum { FP8_DELAYED, FP8_CURRENT, FP8_BLOCK, MXFP8, NVFP4, FP8_ROW, FP8_BLOCK_FP32, MXFP4_WEIGHTS, NVFP4_ROW_AMAX,
       MXFP4_BF16, NVFP4_BF16, MXFP8_F16, NVFP4_F16, FP8_BLOCK_1X128, SETUPS };
static const struct { const char *name; gmm_recipe_kind recipe; gmm_dtype source; int weights_alone; } setups[] = {
    [FP8_DELAYED] = { "fp8 delayed", GMM_RECIPE_FP8_DELAYED, GMM_BF16, 0 },
    [FP8_CURRENT] = { "fp8 current", GMM_RECIPE_FP8_CURRENT, GMM_BF16, 0 },
    [FP8_BLOCK] = { "fp8 block", GMM_RECIPE_FP8_BLOCK, GMM_BF16, 0 },
    [MXFP8] = { "mxfp8", GMM_RECIPE_MXFP8, GMM_BF16, 0 },
    [NVFP4] = { "nvfp4", GMM_RECIPE_NVFP4, GMM_BF16, 0 },
    [FP8_ROW] = { "fp8 row", GMM_RECIPE_FP8_CURRENT, GMM_BF16, 0 },
    [FP8_BLOCK_FP32] = { "fp8 block, fp32 scales", GMM_RECIPE_FP8_BLOCK, GMM_BF16, 0 },
    [MXFP4_WEIGHTS] = { "mxfp4 weights", GMM_RECIPE_MXFP8, GMM_BF16, 0 },
    [NVFP4_ROW_AMAX] = { "nvfp4 row amax, 4 over 6", GMM_RECIPE_NVFP4, GMM_BF16, 0 },
    [MXFP4_BF16] = { "mxfp4 weights with bf16", GMM_RECIPE_MXFP8, GMM_BF16, 1 },
    [NVFP4_BF16] = { "nvfp4 weights with bf16", GMM_RECIPE_NVFP4, GMM_BF16, 1 },
    [MXFP8_F16] = { "mxfp8 weights with f16", GMM_RECIPE_MXFP8, GMM_F16, 1 },
    [NVFP4_F16] = { "nvfp4 weights with f16", GMM_RECIPE_NVFP4, GMM_F16, 1 },
    [FP8_BLOCK_1X128] = { "fp8 block, 1x128 weights", GMM_RECIPE_FP8_BLOCK, GMM_BF16, 0 },
};
static gmm_recipe recipe_of(int i) {
    gmm_recipe r = gmm_recipe_of(setups[i].recipe);
    if (i == FP8_ROW) r.input.scaling = r.weight.scaling = r.grad.scaling = GMM_SCALING_ROW;
    if (i == FP8_BLOCK_FP32) r.input.pow2 = r.weight.pow2 = r.grad.pow2 = 0;
    if (i == MXFP4_WEIGHTS || i == MXFP4_BF16) r.weight.dtype = GMM_E2M1;
    if (i == MXFP4_WEIGHTS) r.weight.order = r.input.order = r.grad.order = GMM_SCALES_SWIZZLED;
    if (i == NVFP4_ROW_AMAX) {
        r.input.row_amax = 1;
        r.weight.four_over_six = r.weight.e4m3_256 = 1;
        r.input.hadamard = r.grad.hadamard = 0;
    }
    if (i == FP8_BLOCK_1X128) r.weight.scaling = GMM_SCALING_1X128;
    if (setups[i].weights_alone) {
        const gmm_format none = GMM_ZERO;
        r.input = r.grad = none;
    }
    return r;
}
static setup setup_of(int i) {
    const gmm_recipe r = recipe_of(i);
    setup s;
    s.name = setups[i].name;
    s.source = setups[i].source;
    s.x = r.input;
    s.w = r.weight;
    s.dy = r.grad;
    return s;
}

static void valid_setups(int arg) {
    (void)arg;
    for (int i = 0; i < SETUPS; i++) {
        const gmm_recipe r = recipe_of(i);
        gmm_error e = GMM_ZERO;
        T_CHECK(gmm_recipe_validate(&r, &e) == GMM_OK, "%s: %s", setups[i].name, e.text);
    }
}

/* A source and its quantized copies. */
typedef struct operand {
    t_mat src;
    int quantized, grouped, odd; /* odd: at a misaligned address, with gaps */
    gmm_mat rowwise, columnwise; /* rowwise.columnwise points at the other */
    gmm_format f;
} operand;

/* Leading dimension of a copy's storage; odd: larger than needed. */
static int64_t ld_of(const gmm_layout *l, int odd) { return l->data_cols + 2 * odd; }
static int64_t bytes_of(const gmm_layout *l, int odd, gmm_dtype dtype) {
    return odd ? l->data_rows * ld_of(l, odd) * gmm_dtype_bits(dtype) / 8 : l->data_bytes;
}

static gmm_status quantize(const gmm_quantization *d) {
    gmm_info info = GMM_ZERO;
    const gmm_status s = gmm_quantize_query(T.ctx, GMM_OP_QUANTIZE, d, &info);
    return s != GMM_OK ? s : gmm_quantize(T.ctx, d, t_workspace(info.workspace_bytes), info.workspace_bytes, T.stream);
}

static void make(operand *o, const gmm_format *f, const gmm_groups *groups, int32_t count, int64_t rows, int64_t cols,
                 const t_mat *src, int first_group, int table, int odd) {
    static const uint64_t state[2] = { 12345, 678 };
    const int32_t units = groups ? groups->count : count;
    gmm_quantization d = GMM_ZERO;
    memset(o, 0, sizeof *o);
    o->src = *src;
    o->f = *f;
    o->odd = odd;
    o->quantized = f->dtype != GMM_NONE;
    o->grouped = groups != NULL;
    o->rowwise = src->mat;
    if (!o->quantized) return;
    d.groups = groups;
    d.count = groups ? 0 : count;
    d.rows = groups ? 0 : rows;
    d.cols = cols;
    d.format = &o->f;
    d.src = &o->src.mat;
    if (f->stochastic) {
        d.random = (const uint64_t *)t_in(state, sizeof state);
        d.first_group = first_group;
    }
    for (int k = 0; k < 2; k++) {
        const gmm_direction direction = k ? GMM_COLUMNWISE : GMM_ROWWISE;
        gmm_format plain = *f;
        gmm_layout l = GMM_ZERO;
        gmm_mat *m = k ? &o->columnwise : &o->rowwise;
        int64_t bytes;
        int shift;
        if (k) plain.row_amax = 0; /* a copy that the weight gradient reads has one amax per group */
        T_CHECK((groups ? gmm_layout_of_groups(f->dtype, f->scaling, f->order, direction, groups->count,
                                               groups->capacity, cols, &l, NULL)
                        : gmm_layout_of(f->dtype, f->scaling, f->order, direction, rows, cols, &l, NULL)) == GMM_OK,
                "layout");
        bytes = bytes_of(&l, odd, f->dtype);
        shift = odd && l.scale_dtype != GMM_F32;
        *m = gmm_mat_quantized(&plain, direction, (char *)t_alloc((size_t)(bytes * (groups ? 1 : count) + odd)) + odd,
                               (char *)t_alloc((size_t)(l.scale_bytes * (groups ? 1 : count) + shift)) + shift, NULL);
        if (odd) m->ld = ld_of(&l, 1);
        m->amax = (float *)t_alloc(4 * (size_t)(plain.row_amax ? groups->capacity : units) + 4);
        if (f->delayed) t_poison(m->amax, 0, 4 * (size_t)units + 4);
        if (f->row_amax) { /* two calls, since a copy with one amax per row has no columnwise partner */
            d.format = &plain;
            d.rowwise = k ? NULL : m;
            d.columnwise = k ? m : NULL;
            T_OK(quantize(&d));
        }
        if (table) {
            void **data = (void **)t_host((size_t)count * sizeof *data);
            void **scale = (void **)t_host((size_t)count * sizeof *scale);
            for (int32_t g = 0; g < count; g++) {
                data[g] = (char *)m->data + g * bytes;
                scale[g] = (char *)m->scale + g * l.scale_bytes;
            }
            m->table = (void *const *)t_in(data, (size_t)count * sizeof *data);
            m->scale_table = (void *const *)t_in(scale, (size_t)count * sizeof *data);
        }
    }
    o->rowwise.columnwise = &o->columnwise;
    if (!f->row_amax) {
        gmm_mat r = o->rowwise, c = o->columnwise;
        r.columnwise = NULL;
        r.table = r.scale_table = c.table = c.scale_table = NULL;
        d.rowwise = &r;
        d.columnwise = &c;
        T_OK(quantize(&d));
    }
    if (table) o->rowwise.data = o->rowwise.scale = o->columnwise.data = o->columnwise.scale = NULL;
}

/* Host copy of a quantized copy, to decode values from. */
typedef struct image {
    const operand *o;
    const gmm_mat *m;
    gmm_direction direction;
    const uint8_t *data, *scale;
    const float *amax;
    int64_t ld, stride, scale_stride;
} image;

static image image_of(const operand *o, gmm_direction direction, int32_t units, int64_t rows, int64_t cols) {
    image r;
    gmm_layout l = GMM_ZERO;
    const gmm_mat *m = direction == GMM_ROWWISE ? &o->rowwise : &o->columnwise;
    memset(&r, 0, sizeof r);
    r.o = o;
    r.m = m;
    r.direction = direction;
    if (!o->quantized) return r;
    T_CHECK((o->grouped ? gmm_layout_of_groups(m->dtype, m->scaling, m->scale_order, direction, units, rows, cols, &l,
                                               NULL)
                        : gmm_layout_of(m->dtype, m->scaling, m->scale_order, direction, rows, cols, &l, NULL)) ==
            GMM_OK, "layout");
    r.ld = ld_of(&l, o->odd);
    r.stride = bytes_of(&l, o->odd, m->dtype);
    r.scale_stride = l.scale_bytes;
    r.data = (const uint8_t *)t_get(m->table ? ((void **)t_get(m->table, 8))[0] : m->data,
                                    (size_t)(r.stride * (o->grouped ? 1 : units)));
    r.scale = (const uint8_t *)t_get(m->scale_table ? ((void **)t_get(m->scale_table, 8))[0] : m->scale,
                                     (size_t)(l.scale_bytes * (o->grouped ? 1 : units)));
    r.amax = (const float *)t_get(m->amax, 4 * (size_t)(m->flags & GMM_MAT_ROW_AMAX ? rows : units));
    return r;
}

/* Element (line, along) of unit g in double; row and start as in gmm_scale_base; n rows in the unit. With `whole` 0 the
   NV16 amax is left out: code times block scale. */
static double element(const image *r, int whole, int64_t g, int64_t row, int64_t start, int64_t n, int64_t cols,
                      int64_t line, int64_t along) {
    const operand *o = r->o;
    const gmm_mat *m = r->m;
    const int k = r->direction == GMM_COLUMNWISE, apart = k && m->scaling == GMM_SCALING_MX32;
    const int64_t P = o->grouped ? up(n, 128) : n, lines = k ? cols : P, length = k ? P : cols;
    const int64_t i = apart ? (row + along) * r->ld + line
                      : k ? line * r->ld + start + along : (row + line) * r->ld + along;
    const uint8_t *data = r->data + (o->grouped ? 0 : g * r->stride);
    const int64_t w = gmm_block_along(m->scaling);
    const int64_t b = w ? along / w : 0;
    const int64_t j = gmm_scale_index(m->scaling, m->scale_order, r->direction, lines, length, line, b) +
                      (o->grouped ? gmm_scale_base(m->scaling, r->direction, cols, g, row, start) : 0);
    const uint8_t *scale = r->scale + (o->grouped ? 0 : g * r->scale_stride);
    const uint8_t code = m->dtype == GMM_E2M1 ? gmm_nibble(data, i) : data[i];
    const double e = m->dtype == GMM_E4M3 ? (double)gmm_e4m3_to_f32(code)
                     : m->dtype == GMM_E5M2 ? (double)gmm_e5m2_to_f32(code) : (double)gmm_e2m1_to_f32(code);
    float s;
    if (m->scaling == GMM_SCALING_MX32) return ldexp(e, scale[j] - 127);
    if (m->scaling == GMM_SCALING_NV16 && !whole) return e * (double)gmm_e4m3_to_f32(scale[j]);
    if (m->scaling == GMM_SCALING_NV16)
        return e * (double)gmm_e4m3_to_f32(scale[j]) *
               (double)r->amax[m->flags & GMM_MAT_ROW_AMAX ? row + line : g] /
               (m->flags & GMM_MAT_E4M3_256 ? 1536.0 : 2688.0);
    memcpy(&s, scale + 4 * j, 4);
    return e * (double)s;
}

static double value(const image *r, int64_t g, int64_t row, int64_t start, int64_t n, int64_t cols, int64_t line,
                    int64_t along) {
    return element(r, 1, g, row, start, n, cols, line, along);
}

/* ------------------------------------------------------------------------------------------------------- A case --- */

typedef struct qcase {
    gmm_op op;
    int setup, table, odd;
    int32_t groups;
    const int64_t *sizes;
    int64_t K, N, extra;
    gmm_dtype out, splits;
    int offsets, on_host;
    gmm_tail tail;
    int main_grad, add, bias, fast;
    int alpha;              /* one per group */
    int32_t row_align;      /* a promise */
    int positive;           /* no element below 0 */
    int wrong;              /* faulty split. 1: a negative size, 2: more rows than the capacity */
    t_fill fill;
} qcase;

typedef struct qrun {
    int64_t live, capacity, *first;
    gmm_groups groups;
    uint32_t *fault;
    t_mat xs, ws, dys, bias, out;
    operand x, w, dy;
    gmm_grad grad;
    gmm_linear d;
    gmm_options options;
    void *before;
} qrun;

static gmm_status run_with(const gmm_linear *d, gmm_op op, void *workspace, size_t bytes) {
    return t_linear_functions[op - GMM_OP_LINEAR_FWD](T.ctx, d, workspace, bytes, T.stream);
}
static gmm_status run(const gmm_linear *d, gmm_op op) {
    gmm_info info = GMM_ZERO;
    const gmm_status s = gmm_linear_query(T.ctx, op, d, &info);
    void *workspace;
    if (s != GMM_OK) return s;
    workspace = t_workspace(info.workspace_bytes);
    return run_with(d, op, workspace, info.workspace_bytes);
}

static void set_splits(qrun *r, const qcase *c) {
    int64_t values[64], end = 0;
    int32_t narrow[64];
    const int n = c->groups + c->offsets;
    if (c->offsets) values[0] = 0;
    for (int32_t g = 0; g < c->groups; g++) {
        end += c->sizes[g];
        values[g + c->offsets] = c->offsets ? end : c->sizes[g];
    }
    for (int i = 0; i < n; i++) narrow[i] = (int32_t)values[i];
    r->groups.count = c->groups;
    r->groups.capacity = r->capacity;
    r->groups.dtype = c->splits ? c->splits : GMM_I64;
    r->groups.form = c->offsets ? GMM_SPLIT_OFFSETS : GMM_SPLIT_SIZES;
    r->groups.tail = c->tail;
    r->groups.row_align = c->row_align;
    r->groups.on_host = c->on_host;
    {
        const void *from = r->groups.dtype == GMM_I32 ? (const void *)narrow : (const void *)values;
        const size_t bytes = (size_t)n * (r->groups.dtype == GMM_I32 ? 4 : 8);
        void *host = t_host(bytes);
        memcpy(host, from, bytes);
        r->groups.splits = c->on_host ? host : t_in(host, bytes);
    }
}

static double alpha_of(int64_t g) { return g % 3 == 0 ? -0.75 : g % 3 == 1 ? 2.0 : 0.5; }

static void build(qrun *r, const qcase *c) {
    const setup s = setup_of(c->setup);
    const int fwd = c->op == GMM_OP_LINEAR_FWD, wgrad = c->op == GMM_OP_LINEAR_WGRAD;
    const gmm_dtype out = c->out ? c->out : GMM_F32;
    memset(r, 0, sizeof *r);
    r->first = (int64_t *)t_host(((size_t)c->groups + 1) * 8);
    for (int32_t g = 0; g < c->groups; g++) r->first[g + 1] = r->first[g] + (c->sizes[g] > 0 ? c->sizes[g] : 0);
    r->live = r->first[c->groups];
    r->capacity = r->live + c->extra;
    if (c->wrong == 2) { /* the last group is cut off */
        r->capacity = r->live - 5;
        r->first[c->groups] = r->live = r->capacity;
    }
    t_about("%s, %s, K %lld, N %lld, capacity %lld, %s, %s%s", setups[c->setup].name, gmm_op_name(c->op),
            (long long)c->K, (long long)c->N, (long long)r->capacity, c->table ? "tables" : "packed",
            gmm_dtype_name(out), c->odd ? ", odd addresses" : "");
    t_splits(c->sizes, c->groups);
    set_splits(r, c);
    r->fault = (uint32_t *)t_alloc(4);
    t_poison(r->fault, 0, 4);
    r->groups.fault = r->fault;
    r->xs = t_mat_in(s.source, 1, r->capacity, c->K, c->fill);
    r->ws = t_mat_in(s.source, c->groups, c->N, c->K, c->fill);
    r->dys = t_mat_in(s.source, 1, r->capacity, c->N, c->fill);
    for (int64_t i = r->live * c->K; i < r->capacity * c->K; i++) r->xs.v[i] = (double)NAN;
    for (int64_t i = r->live * c->N; i < r->capacity * c->N; i++) r->dys.v[i] = (double)NAN;
    for (int k = 0; k < 3 && c->positive; k++) {
        t_mat *m = k == 0 ? &r->xs : k == 1 ? &r->ws : &r->dys;
        for (int64_t i = 0; i < m->count * m->rows * m->cols; i++) m->v[i] = fabs(m->v[i]);
        t_mat_put(m);
    }
    t_mat_put(&r->xs);
    t_mat_put(&r->dys);
    make(&r->x, &s.x, &r->groups, 0, 0, c->K, &r->xs, 0, 0, c->odd);
    make(&r->w, &s.w, NULL, c->groups, c->N, c->K, &r->ws, 0, c->table, c->odd);
    make(&r->dy, &s.dy, &r->groups, 0, 0, c->N, &r->dys, 0, 0, c->odd);
    r->out = wgrad ? t_mat_make(out, c->groups, c->N, c->K, 0, 0, c->table ? T_TABLE : T_PACKED, T_POISON)
                   : t_mat_out(out, 1, r->capacity, fwd ? c->N : c->K);
    if ((wgrad && c->main_grad) || c->add) {
        for (int64_t i = 0; i < r->out.count * r->out.rows * r->out.cols; i++) r->out.v[i] = i % 3 ? 0.5 : -0.0;
        /* destinations that are only stored may hold anything */
        for (int64_t i = 0; wgrad && i < c->groups * c->N * c->K; i++)
            if (c->sizes[i / (c->N * c->K)] == 0 && i % 5 < 2) r->out.v[i] = i % 5 ? (double)NAN : -(double)INFINITY;
        t_mat_put(&r->out);
    }
    r->before = t_mat_bits(&r->out);
    r->d.groups = &r->groups;
    r->options.fp8_fast_accum = c->fast;
    r->d.options = &r->options;
    r->d.in_features = c->K;
    r->d.out_features = c->N;
    r->d.x = &r->x.rowwise;
    r->d.w = &r->w.rowwise;
    r->d.dy = &r->dy.rowwise;
    r->d.y = fwd ? &r->out.mat : NULL;
    r->d.dx = c->op == GMM_OP_LINEAR_DGRAD ? &r->out.mat : NULL;
    r->d.y_add = c->add;
    r->grad.mat = &r->out.mat;
    r->grad.main_grad = c->main_grad;
    r->d.dw = wgrad ? &r->grad : NULL;
    if (c->alpha) {
        double *values = (double *)t_host((size_t)c->groups * sizeof *values);
        for (int32_t g = 0; g < c->groups; g++) values[g] = alpha_of(g);
        r->d.alpha = t_floats_in(values, c->groups);
        r->d.alpha_per_group = 1;
    }
    if (c->bias && fwd) {
        r->bias = t_mat_in(GMM_BF16, c->groups, 1, c->N, c->fill);
        r->d.bias = &r->bias.mat;
    }
    if (T.engine == GMM_ENGINE_AUTO) { /* these contexts test this engine, even where another one is faster */
        gmm_info info = GMM_ZERO;
        r->options.engine = GMM_ENGINE_WGMMA;
        if (gmm_linear_query(T.ctx, c->op, &r->d, &info) != GMM_OK) r->options.engine = GMM_ENGINE_AUTO;
    }
}

/* Hopper's FP8 wgmma keeps 14 bits of a sum: the error relative to the sum of magnitudes, for random data. Per 4
   instructions of 32 along K if sums are promoted every 128; otherwise over all of K. */
static double fp8_share(const qrun *r, gmm_op op) {
    const gmm_mat *b = op == GMM_OP_LINEAR_WGRAD ? &r->x.rowwise : &r->w.rowwise;
    gmm_info info = GMM_ZERO;
    if ((b->dtype != GMM_E4M3 && b->dtype != GMM_E5M2) || b->scaling == GMM_SCALING_MX32) return 0.0;
    T_OK(gmm_linear_query(T.ctx, op, &r->d, &info));
    return info.engine == GMM_ENGINE_WGMMA ? (r->options.fp8_fast_accum ? 1e-2 : 2e-3) : 0.0;
}

static void check(const qrun *r, const qcase *c) {
    const int fwd = c->op == GMM_OP_LINEAR_FWD, wgrad = c->op == GMM_OP_LINEAR_WGRAD;
    const gmm_dtype out = c->out ? c->out : GMM_F32;
    const int64_t rows = r->out.count * r->out.rows, cols = r->out.cols, n = rows * cols;
    const image X = image_of(&r->x, wgrad ? GMM_COLUMNWISE : GMM_ROWWISE, c->groups, r->capacity, c->K);
    const image DY = image_of(&r->dy, wgrad ? GMM_COLUMNWISE : GMM_ROWWISE, c->groups, r->capacity, c->N);
    const image W = image_of(&r->w, fwd ? GMM_ROWWISE : GMM_COLUMNWISE, c->groups, c->N, c->K);
    double *want = (double *)t_host((size_t)n * 8 + 8), *bound = (double *)t_host((size_t)n * 8 + 8), *got;
    const unsigned char *bits = (const unsigned char *)t_mat_bits(&r->out), *before = (const unsigned char *)r->before;
    const double share = fp8_share(r, c->op);
    const size_t row_bytes = (size_t)(cols * ref_bytes(out));
    int64_t start = 0;
    for (int32_t g = 0; g < c->groups; g++) {
        const int64_t row = r->first[g], m = r->first[g + 1] - row;
        const int64_t out_rows = wgrad ? c->N : m, K = fwd ? c->K : wgrad ? (X.m->hadamard ? up(m, 16) : m) : c->N;
        double *a = (double *)t_host((size_t)(out_rows * K) * 8 + 8), *b = (double *)t_host((size_t)(cols * K) * 8 + 8);
        for (int64_t i = 0; i < out_rows; i++)
            for (int64_t k = 0; k < K; k++) {
                const image *p = fwd ? &X : &DY;
                const int64_t width = fwd ? c->K : c->N;
                a[i * K + k] = p->o->quantized ? value(p, g, row, start, m, width, i, k)
                               : p->o->src.v[(wgrad ? (row + k) * width + i : (row + i) * width + k)];
            }
        for (int64_t j = 0; j < cols; j++)
            for (int64_t k = 0; k < K; k++)
                b[j * K + k] = !wgrad ? value(&W, g, 0, 0, c->N, c->K, j, k)
                               : X.o->quantized ? value(&X, g, row, start, m, c->K, j, k)
                                                : X.o->src.v[(row + k) * c->K + j];
        for (int64_t i = 0; i < out_rows; i++)
            for (int64_t j = 0; j < cols; j++) {
                const int64_t at = (wgrad ? g * c->N + i : row + i) * cols + j;
                double sum = 0.0, magnitude = 0.0, extra = 0.0;
                for (int64_t k = 0; k < K; k++) {
                    sum += a[i * K + k] * b[j * K + k];
                    magnitude += fabs(a[i * K + k] * b[j * K + k]);
                }
                if (c->alpha) {
                    sum *= alpha_of(g);
                    magnitude *= fabs(alpha_of(g));
                }
                if ((wgrad && c->main_grad) || c->add) extra += at % 3 ? 0.5 : 0.0;
                if (r->d.bias) extra += r->bias.v[g * c->N + j];
                want[at] = sum + extra;
                /* sums of blocks are rounded once more, and scales are products of four */
                bound[at] = ref_bound(out, K + K / 16 + 16, magnitude + fabs(extra), want[at]) + ref_tiny(out) +
                            share * magnitude;
            }
        if (wgrad && m == 0 && c->main_grad)
            t_same("an empty group's destination", bits + (size_t)(g * c->N) * row_bytes,
                   before + (size_t)(g * c->N) * row_bytes, (size_t)c->N * row_bytes);
        start += up(m, 128);
    }
    got = t_mat_get(&r->out);
    for (int64_t i = 0; wgrad && c->main_grad && i < n; i++)
        if (c->sizes[i / (c->N * c->K)] == 0) got[i] = want[i] = 0.0; /* compared above, bit by bit */
    if (wgrad) t_near("dw", got, want, bound, n);
    else {
        t_near(fwd ? "y" : "dx", got, want, bound, r->live * cols);
        if (r->capacity > r->live) {
            const size_t tail = (size_t)(r->capacity - r->live) * row_bytes;
            if (c->tail == GMM_TAIL_KEEP) t_same("tail", bits + (size_t)r->live * row_bytes,
                                                 before + (size_t)r->live * row_bytes, tail);
            else t_bytes("tail", bits + (size_t)r->live * row_bytes, 0, tail);
        }
    }
}
#define check(...) T_CALL(check, __VA_ARGS__)

static void test(const qcase *c) {
    qrun r;
    build(&r, c);
    T_OK(run(&r.d, c->op));
    check(&r, c);
    T_CHECK(c->wrong || *(uint32_t *)t_get(r.fault, 4) == 0, "a fault bit");
}
#define test(...) T_CALL(test, __VA_ARGS__)

/* wgrad needs both operands quantized or none; weights against 16-bit tokens have none. */
static int has(int which, gmm_op op) {
    return op != GMM_OP_LINEAR_WGRAD || setup_of(which).x.dtype != GMM_NONE;
}
static const gmm_op ops[] = { GMM_OP_LINEAR_FWD, GMM_OP_LINEAR_DGRAD, GMM_OP_LINEAR_WGRAD };
#define EACH_OP(i, setup) for (int i = 0; i < 3; i++) if (has(setup, ops[i]))

static const int64_t aligned[3] = { 16, 128, 48 }, ragged[5] = { 1, 15, 17, 100, 300 };

static void products(int arg) {
    EACH_OP(i, arg) {
        const qcase even = { .op = ops[i], .setup = arg, .groups = 3, .sizes = aligned, .K = 160, .N = 96,
                             .fill = T_REALS };
        const qcase odd = { .op = ops[i], .setup = arg, .groups = 5, .sizes = ragged, .K = 96, .N = 288,
                            .fill = T_REALS, .out = GMM_BF16, .table = 1, .bias = 1 };
        const qcase apart = { .op = ops[i], .setup = arg, .groups = 5, .sizes = ragged, .K = 96, .N = 96,
                              .fill = T_REALS, .table = 1, .odd = 1 };
        const qcase wide = { .op = ops[i], .setup = arg, .groups = 1, .sizes = aligned + 2, .K = 416, .N = 352,
                             .fill = T_REALS };
        const qcase many = { .op = ops[i], .setup = arg, .groups = 5, .sizes = ragged, .K = 288, .N = 544,
                             .fill = T_REALS, .out = GMM_BF16, .main_grad = 1, .fast = 1 };
        test(&even);
        test(&odd);
        test(&many);
        test(&apart);
        test(&wide);
    }
}

/* Moves an operand's copies, or its source, to one byte or element past a multiple of 16 bytes. */
static void move_odd(operand *o, int32_t units, int64_t rows, int64_t cols) {
    for (int k = 0; k < 1 + o->quantized; k++) {
        gmm_mat *m = k ? &o->columnwise : &o->rowwise;
        const int64_t step = o->quantized ? 1 : ref_bytes(m->dtype);
        gmm_layout l = GMM_ZERO;
        size_t bytes = (size_t)(o->src.count * rows * cols * step);
        char *moved;
        if (o->quantized) {
            const gmm_direction direction = k ? GMM_COLUMNWISE : GMM_ROWWISE;
            T_CHECK((o->grouped ? gmm_layout_of_groups(m->dtype, m->scaling, m->scale_order, direction, units, rows,
                                                       cols, &l, NULL)
                                : gmm_layout_of(m->dtype, m->scaling, m->scale_order, direction, rows, cols, &l,
                                                NULL)) == GMM_OK, "layout");
            bytes = (size_t)(l.data_bytes * (o->grouped ? 1 : units));
        }
        moved = (char *)t_alloc_aligned(bytes + 16, 16) + step;
        t_upload(moved, t_get(m->data, bytes), bytes);
        m->data = moved;
    }
}

/* The workspace of a query without addresses suffices for a call with misaligned operands. */
static void odd_addresses(int arg) {
    EACH_OP(i, arg) {
        const qcase c = { .op = ops[i], .setup = arg, .groups = 5, .sizes = ragged, .K = 96, .N = 288,
                          .fill = T_REALS };
        gmm_info info = GMM_ZERO;
        gmm_mat mat[3][2];
        gmm_linear d;
        void *workspace;
        qrun r;
        build(&r, &c);
        d = r.d;
        for (int k = 0; k < 3; k++) {
            const operand *o = k == 0 ? &r.x : k == 1 ? &r.w : &r.dy;
            mat[k][0] = o->rowwise;
            mat[k][1] = o->columnwise;
            mat[k][0].data = mat[k][0].scale = mat[k][1].data = mat[k][1].scale = NULL;
            mat[k][0].columnwise = o->quantized ? &mat[k][1] : NULL;
        }
        d.x = &mat[0][0];
        d.w = &mat[1][0];
        d.dy = &mat[2][0];
        T_OK(gmm_linear_query(T.ctx, c.op, &d, &info));
        move_odd(&r.x, c.groups, r.capacity, c.K);
        move_odd(&r.w, c.groups, c.N, c.K);
        move_odd(&r.dy, c.groups, r.capacity, c.N);
        workspace = t_workspace(info.workspace_bytes);
        if (strstr(info.note, "only for addresses at multiples of 16 bytes")) { /* for a demanded engine */
            T_REFUSED(GMM_E_UNSUPPORTED, run_with(&r.d, c.op, workspace, info.workspace_bytes), "16 bytes", NULL);
            continue;
        }
        T_OK(run_with(&r.d, c.op, workspace, info.workspace_bytes));
        check(&r, &c);
    }
}

static void empties(int arg) {
    static const int64_t splits[][4] = { { 0, 40, 17, 3 }, { 40, 0, 0, 20 }, { 33, 20, 7, 0 }, { 0, 0, 0, 0 } };
    EACH_OP(i, arg)
        for (int k = 0; k < 5; k++) {
            qcase c = { .op = ops[i], .setup = arg, .groups = 4, .sizes = splits[k < 4 ? k : 3], .K = 64, .N = 32,
                        .extra = k == 4 ? 256 : 0, .main_grad = k & 1, .fill = T_REALS, .table = k & 1,
                        .tail = k & 1 ? GMM_TAIL_ZERO : GMM_TAIL_KEEP };
            test(&c);
            c.main_grad = !c.main_grad;
            test(&c);
        }
    EACH_OP(i, arg)
        for (int k = 0; k < 4; k++) {
            static const int64_t none[1] = { 0 };
            const qcase c = { .op = ops[i], .setup = arg, .groups = 1, .sizes = none, .K = 32, .N = 32, .fill = T_REALS,
                              .extra = k & 1 ? 17 : 0, .table = k / 2, .main_grad = k / 2 };
            test(&c);
        }
}

/* wgrad of consecutive empty groups, each with more tiles than the tile ring of a cluster holds ahead. */
static void idle(int arg) {
    static const int64_t sizes[7] = { 3, 0, 0, 0, 0, 20, 0 };
    qcase c = { .op = GMM_OP_LINEAR_WGRAD, .setup = arg, .groups = 7, .sizes = sizes, .K = 1024, .N = 768,
                .fill = T_REALS };
    for (int limited = 0; limited < 2; limited++) {
        qrun r;
        build(&r, &c);
        r.options.sm_limit = limited ? 2 : 0;
        r.d.options = &r.options;
        T_OK(run(&r.d, c.op));
        check(&r, &c);
    }
}

/* beta per group, frozen groups, 16-bit D and D at any address: bit for bit, the result is the sum alone plus beta
   times the old value. */
static void added(int arg) {
    static const int64_t sizes[7] = { 800, 0, 130, 5, 0, 33, 64 };
    static const double betas[7] = { 1.0, 1.0, -1.0, 0.0, 2.0, 4.0, 1.0 };
    static const uint8_t frozen[7] = { 0, 0, 0, 0, 0, 0, 3 };
    const qcase c = { .op = GMM_OP_LINEAR_WGRAD, .setup = arg, .groups = 7, .sizes = sizes, .K = 224, .N = 160,
                      .fill = T_REALS };
    const int64_t each = c.N * c.K, n = c.groups * each;
    qrun r;
    double *sums;
    build(&r, &c);
    T_OK(run(&r.d, c.op));
    sums = t_mat_get(&r.out);
    r.grad.beta = t_floats_in(betas, 7);
    r.grad.frozen = (const uint8_t *)t_in(frozen, sizeof frozen);
    for (int way = 0; way < 6; way++) {
        const gmm_dtype dtype = way % 2 ? GMM_BF16 : GMM_F32;
        double *want = (double *)t_host((size_t)n * sizeof *want);
        r.out = t_mat_make(dtype, c.groups, c.N, c.K, way / 2 == 1, way / 2 == 1 ? 3 : 0, way < 4 ? T_PACKED : T_TABLE,
                           T_POISON);
        for (int64_t i = 0; i < n; i++)
            r.out.v[i] = i % 5 ? (double)(i * 37 % 255 - 127) / 64.0 : i % 2 ? -0.0 : ldexp(1.0, -130);
        t_mat_put(&r.out);
        for (int64_t i = 0; i < n; i++) {
            const int64_t g = i / each;
            const float sum = (float)sums[i], old = (float)(betas[g] * r.out.v[i]);
            want[i] = frozen[g] || (sizes[g] == 0 && betas[g] == 1.0) ? r.out.v[i]
                      : betas[g] == 0.0 ? sums[i] : (double)(sum + old);
        }
        T_OK(run(&r.d, c.op));
        t_exact("dw", dtype, t_mat_get(&r.out), want, n);
    }
}

/* Rows times powers of two and 0: bit for bit, the fp32 result without them, times them. */
static void probs(int arg) {
    static const double factors[5] = { 0.5, 2.0, -1.0, 0.0, -0.25 };
    EACH_OP(i, arg) {
        const qcase c = { .op = ops[i], .setup = arg, .groups = 5, .sizes = ragged, .K = 96, .N = 288, .extra = 3,
                          .fill = T_REALS, .bias = 1, .alpha = 1 };
        double *want, *values;
        int64_t n;
        qrun r;
        if (c.op == GMM_OP_LINEAR_WGRAD) continue;
        build(&r, &c);
        T_OK(run(&r.d, c.op));
        want = t_mat_get(&r.out);
        values = (double *)t_host((size_t)r.capacity * sizeof *values);
        for (int64_t row = 0; row < r.capacity; row++) values[row] = row < r.live ? factors[row % 5] : (double)NAN;
        n = r.live * r.out.cols;
        for (int64_t k = 0; k < n; k++) want[k] *= values[k / r.out.cols];
        r.d.prob = t_floats_in(values, r.capacity);
        T_OK(run(&r.d, c.op));
        t_exact("rows times prob", r.out.dtype, t_mat_get(&r.out), want, n);
    }
}

static void tails(int arg) { /* rows beyond the sum of the sizes are NaN in sources and copies */
    EACH_OP(i, arg)
        for (int tail = 0; tail < 2; tail++) {
            const qcase c = { .op = ops[i], .setup = arg, .groups = 5, .sizes = ragged, .K = 64, .N = 64, .extra = 80,
                              .fill = T_REALS, .tail = (gmm_tail)tail, .out = tail ? GMM_BF16 : GMM_F16, .table = tail,
                              .add = i < 2 && tail, .main_grad = i == 2, .alpha = 1, .bias = tail, .fast = tail };
            test(&c);
        }
}

static void split_forms(int arg) { /* bitwise equal */
    EACH_OP(i, arg) {
        void *first = NULL;
        size_t bytes = 0;
        for (int k = 0; k < 5; k++) {
            qcase c = { .op = ops[i], .setup = arg, .groups = 5, .sizes = ragged, .K = 64, .N = 64, .fill = T_REALS,
                        .splits = k & 1 ? GMM_I32 : GMM_I64, .offsets = k / 2 == 1, .on_host = k == 4,
                        .table = k & 1 }; /* packed, or in tables */
            qrun r;
            t_reseed(77);
            build(&r, &c);
            T_OK(run(&r.d, c.op));
            bytes = (size_t)(r.out.count * r.out.rows * r.out.cols * 4);
            if (!first) first = t_mat_bits(&r.out);
            t_same("split form", t_mat_bits(&r.out), first, bytes);
        }
    }
}

static void faults(int arg) { /* reported, clamped, in bounds */
    static const int64_t negative[4] = { 20, -7, 30, 10 }, many[4] = { 20, 0, 33, 17 };
    static const uint32_t faults_of[3] = { GMM_FAULT_NEGATIVE, GMM_FAULT_CAPACITY, GMM_FAULT_ALIGN };
    EACH_OP(i, arg)
        for (int k = 0; k < 6; k++) {
            const int wrong = k % 3;
            const qcase c = { .op = ops[i], .setup = arg, .groups = 4, .sizes = wrong ? many : negative, .K = 64,
                              .N = 32, .fill = T_REALS, .wrong = wrong < 2 ? wrong + 1 : 0, .table = k / 3,
                              .row_align = wrong == 2 ? 16 : 0 };
            qrun r;
            build(&r, &c);
            t_poison(r.fault, 0, 4);
            T_OK(run(&r.d, c.op));
            check(&r, &c);
            T_CHECK(*(uint32_t *)t_get(r.fault, 4) == faults_of[wrong], "fault bits %x",
                    *(uint32_t *)t_get(r.fault, 4));
        }
}

/* Tokens that are gathered beside quantized weights give the bits of tokens that were permuted before. arg: a setup
   whose weights alone are quantized. */
static void gathered(int arg) {
    for (int i = 0; i < 8; i++) {
        const qcase c = { .op = ops[i % 2], .setup = arg, .groups = 5, .sizes = ragged, .K = i & 4 ? 96 : 160,
                          .N = i & 4 ? 288 : 64, .extra = 9, .tail = GMM_TAIL_ZERO, .fill = T_REALS };
        const int past = i & 2, fwd = c.op == GMM_OP_LINEAR_FWD;
        const int64_t cols = fwd ? c.K : c.N;
        gmm_info info = GMM_ZERO;
        gmm_linear d;
        const gmm_mat **operand;
        int32_t *at;
        t_mat hand;
        void *want;
        qrun r;
        build(&r, &c);
        at = (int32_t *)t_host((size_t)r.capacity * sizeof *at);
        hand = t_mat_in(setups[arg].source, 1, r.capacity, cols, T_REALS);
        for (int64_t row = 0; row < r.capacity; row++) {
            const int64_t from = t_int(0, r.live - 1);
            const int zeros = row % 7 == 3 || (past && row % 7 == 5);
            at[row] = !zeros ? (int32_t)(3 * from + t_int(0, 2)) : row % 7 == 3 ? -2 : (int32_t)(3 * r.capacity);
            if (row >= r.live) at[row] = INT32_MAX;
            for (int64_t col = 0; col < cols; col++)
                hand.v[row * cols + col] = zeros ? 0.0 : (fwd ? r.xs : r.dys).v[from * cols + col];
        }
        t_mat_put(&hand);
        if (i & 4) move_odd(fwd ? &r.x : &r.dy, c.groups, r.capacity, cols);
        d = r.d;
        operand = fwd ? &d.x : &d.dy;
        *(fwd ? &d.x_index : &d.dy_index) = (const int32_t *)t_in(at, (size_t)r.capacity * sizeof *at);
        d.index_rows = r.capacity;
        d.index_div = 3;
        if (gmm_linear_query(T.ctx, c.op, &d, &info) != GMM_OK) r.options.engine = GMM_ENGINE_AUTO;
        T_OK(gmm_linear_query(T.ctx, c.op, &d, &info));
        r.options.engine = info.engine;
        T_OK(run(&d, c.op));
        want = t_mat_bits(&r.out);
        T_CHECK(*(uint32_t *)t_get(r.fault, 4) == (past ? (uint32_t)GMM_FAULT_INDEX : 0), "fault bits");
        d.x_index = d.dy_index = NULL;
        *operand = &hand.mat;
        T_OK(run(&d, c.op));
        t_same("gathered rows", want, t_mat_bits(&r.out), (size_t)(r.capacity * r.out.cols * ref_bytes(r.out.dtype)));
    }
}

/* A group's result has the bits of a call with this group alone, from its own copies. */
static void alone(int arg) {
    EACH_OP(i, arg) {
        const qcase c = { .op = ops[i], .setup = arg, .groups = 5, .sizes = ragged, .K = 64, .N = 96, .fill = T_REALS };
        const setup s = setup_of(arg);
        const int wgrad = ops[i] == GMM_OP_LINEAR_WGRAD;
        qrun r;
        const unsigned char *all;
        build(&r, &c);
        T_OK(run(&r.d, c.op));
        all = (const unsigned char *)t_mat_bits(&r.out);
        for (int32_t g = 0; g < c.groups; g++) {
            const int64_t m = c.sizes[g], row = r.first[g];
            const int64_t cols = r.out.cols;
            const size_t bytes = (size_t)((wgrad ? c.N : m) * cols * 4);
            gmm_groups one = r.groups;
            t_mat xs = r.xs, dys = r.dys, ws = r.ws, out;
            operand x, dy, w;
            gmm_linear d = r.d;
            gmm_grad grad = r.grad;
            one.count = 1;
            one.capacity = m;
            one.splits = t_in(&c.sizes[g], 8);
            xs.mat.data = (char *)xs.mat.data + row * c.K * 2;
            dys.mat.data = (char *)dys.mat.data + row * c.N * 2;
            ws.mat.data = (char *)ws.mat.data + g * c.N * c.K * 2;
            make(&x, &s.x, &one, 0, 0, c.K, &xs, g, 0, 0);
            make(&dy, &s.dy, &one, 0, 0, c.N, &dys, g, 0, 0);
            make(&w, &s.w, NULL, 1, c.N, c.K, &ws, 0, 0, 0);
            out = t_mat_out(GMM_F32, 1, wgrad ? c.N : m, cols);
            d.groups = &one;
            d.x = &x.rowwise;
            d.w = &w.rowwise;
            d.dy = &dy.rowwise;
            d.y = d.y ? &out.mat : NULL;
            d.dx = d.dx ? &out.mat : NULL;
            grad.mat = &out.mat;
            if (d.dw) d.dw = &grad;
            T_OK(run(&d, c.op));
            t_same("one group", t_mat_bits(&out), all + (size_t)((wgrad ? g * c.N : row) * cols * 4), bytes);
        }
    }
}

/* Batch invariance: a row of forward and dgrad has the same bits however many rows its group has. Where the codes of a
   row depend on that row alone, the rows are quantized again alone, with a capacity that chooses other kernels; else a
   smaller group reads the same copies. */
static void rows_alone(int arg) {
    static const int64_t whole[1] = { 300 }, fewer[5] = { 1, 33, 64, 130, 257 };
    const setup s = setup_of(arg);
    for (int i = 0; i < 10; i++) {
        const gmm_op op = i % 2 ? GMM_OP_LINEAR_DGRAD : GMM_OP_LINEAR_FWD;
        const gmm_format *tokens = op == GMM_OP_LINEAR_FWD ? &s.x : &s.dy;
        const int by_row = tokens->scaling != GMM_SCALING_TENSOR && tokens->scaling != GMM_SCALING_NV16;
        const qcase c = { .op = op, .setup = arg, .groups = 1, .sizes = whole, .K = 288, .N = 416, .fill = T_REALS,
                          .out = i % 4 < 2 ? GMM_F32 : GMM_BF16 };
        const int64_t n = fewer[i / 2];
        gmm_groups few;
        operand x, dy;
        gmm_linear d;
        t_mat out;
        qrun r;
        if (!has(arg, op)) continue;
        build(&r, &c);
        T_OK(run(&r.d, c.op));
        few = r.groups;
        few.splits = t_in(&n, 8);
        if (by_row) few.capacity = n;
        d = r.d;
        d.groups = &few;
        out = t_mat_out(c.out, 1, few.capacity, r.out.cols);
        if (d.y) d.y = &out.mat;
        if (d.dx) d.dx = &out.mat;
        if (by_row) {
            make(&x, &s.x, &few, 0, 0, c.K, &r.xs, 0, 0, 0);
            make(&dy, &s.dy, &few, 0, 0, c.N, &r.dys, 0, 0, 0);
            d.x = &x.rowwise;
            d.dy = &dy.rowwise;
        }
        T_OK(run(&d, c.op));
        t_same("fewer rows", t_mat_bits(&r.out), t_mat_bits(&out), (size_t)(n * r.out.cols * ref_bytes(c.out)));
    }
}

/* The values of a copy, dequantized by the library. */
static t_mat values_of(const qrun *r, const qcase *c, const operand *o, gmm_dtype dtype, gmm_direction direction) {
    const int weight = o == &r->w;
    t_mat values = t_mat_out(dtype, o->src.count, o->src.rows, o->src.cols);
    gmm_dequantization q = GMM_ZERO;
    gmm_info info = GMM_ZERO;
    q.groups = weight ? NULL : &r->groups;
    q.count = weight ? c->groups : 0;
    q.rows = weight ? c->N : 0;
    q.cols = o->src.cols;
    q.direction = direction;
    q.src = direction == GMM_ROWWISE ? &o->rowwise : &o->columnwise;
    q.dst = &values.mat;
    T_OK(gmm_dequantize_query(T.ctx, &q, &info));
    T_OK(gmm_dequantize(T.ctx, &q, t_workspace(info.workspace_bytes), info.workspace_bytes, T.stream));
    return values;
}

/* Compared with the product of the dequantized operands: the same bits where these are exact; sums too, if codes are
   multiplied without scales. */
static void exact(int arg) {
    static const int64_t sizes[3] = { 33, 0, 20 };
    EACH_OP(i, arg) {
        const qcase c = { .op = ops[i], .setup = arg, .groups = 3, .sizes = sizes, .K = 160, .N = 96,
                          .fill = setup_of(arg).w.scaling == GMM_SCALING_MX32 ? T_REALS : T_INTS };
        qrun r;
        t_mat values[3], out;
        gmm_linear d;
        gmm_grad grad = GMM_ZERO;
        build(&r, &c);
        T_OK(run(&r.d, c.op));
        for (int k = 0; k < 3; k++) {
            const operand *o = k == 0 ? &r.x : k == 1 ? &r.w : &r.dy;
            const int columnwise = c.op == GMM_OP_LINEAR_WGRAD || (k == 1 && c.op == GMM_OP_LINEAR_DGRAD);
            values[k] = o->src;
            if (o->quantized)
                values[k] = values_of(&r, &c, o, GMM_BF16, columnwise ? GMM_COLUMNWISE : GMM_ROWWISE);
        }
        out = t_mat_out(GMM_F32, r.out.count, r.out.rows, r.out.cols);
        d = r.d;
        d.x = &values[0].mat;
        d.w = &values[1].mat;
        d.dy = &values[2].mat;
        if (d.y) d.y = &out.mat;
        if (d.dx) d.dx = &out.mat;
        grad.mat = &out.mat;
        if (d.dw) d.dw = &grad;
        T_OK(run(&d, c.op));
        t_same("dequantized product", t_mat_bits(&r.out), t_mat_bits(&out),
               (size_t)(r.out.count * r.out.rows * r.out.cols * 4));
    }
}

/* Whether sums are rounded to fp32 with fast accumulation too: on the emulator. */
static int emulated(void) {
#ifdef HAVE_CUDA
    return T.gpu && device_emulated();
#else
    return 0;
#endif
}

/* Fast accumulation over a large K. Positive operands show the error of sums without promotion; an engine that
   always promotes, or accumulates in fp32, gives the same bits. */
static void fast(int arg) {
    for (int i = 0; i < 2; i++) {
        qcase c = { .op = ops[i], .setup = arg, .groups = 1, .sizes = aligned, .K = i ? 32 : 8192, .N = i ? 8192 : 32,
                    .fill = T_REALS, .positive = 1 };
        gmm_info info = GMM_ZERO;
        const float *sum[2];
        double all[2] = { 0.0, 0.0 };
        int64_t n = 0;
        for (c.fast = 0; c.fast < 2; c.fast++) {
            qrun r;
            t_reseed(35);
            build(&r, &c);
            T_OK(run(&r.d, c.op));
            if (!c.fast) check(&r, &c);
            T_OK(gmm_linear_query(T.ctx, c.op, &r.d, &info));
            sum[c.fast] = (const float *)t_mat_bits(&r.out);
            n = r.out.rows * r.out.cols;
            for (int64_t j = 0; j < n; j++) all[c.fast] += (double)sum[c.fast][j];
        }
        if (!strstr(info.note, "fast accumulation")) t_same("sums", sum[1], sum[0], (size_t)n * 4);
        else T_CHECK(emulated() || (all[1] < 0.99 * all[0] && all[1] > 0.7 * all[0]), "%g of %g", all[1], all[0]);
    }
}

/* Codes times block scales, which are exact in BF16. */
static t_mat of_codes(const qrun *r, const qcase *c, const operand *o, gmm_direction direction) {
    const int weight = o == &r->w, along_rows = direction == GMM_COLUMNWISE;
    const int64_t cols = o->src.cols;
    const image im = image_of(o, direction, c->groups, weight ? c->N : r->capacity, cols);
    t_mat m;
    if (!o->quantized) return o->src;
    m = t_mat_in(GMM_BF16, o->src.count, o->src.rows, cols, T_INTS);
    for (int64_t g = 0, start = 0; g < c->groups; start += up(c->sizes[g++], 128)) {
        const int64_t row = weight ? 0 : r->first[g], n = weight ? c->N : c->sizes[g];
        for (int64_t i = 0; i < n; i++)
            for (int64_t j = 0; j < cols; j++)
                m.v[(weight ? g * n + i : row + i) * cols + j] = element(&im, 0, g, row, weight ? 0 : start, n, cols,
                                                                         along_rows ? j : i, along_rows ? i : j);
    }
    t_mat_put(&m);
    return m;
}

/* NVFP4 against the product of codes times block scales, bit for bit: amaxes multiply the sums. */
static void exact_nv(int arg) {
    EACH_OP(i, arg) {
        const qcase c = { .op = ops[i], .setup = arg, .groups = 3, .sizes = aligned, .K = 160, .N = 96,
                          .fill = T_REALS };
        const int fwd = ops[i] == GMM_OP_LINEAR_FWD, wgrad = ops[i] == GMM_OP_LINEAR_WGRAD;
        const gmm_direction tokens = wgrad ? GMM_COLUMNWISE : GMM_ROWWISE;
        const operand *A, *B;
        qrun r;
        t_mat x, w, dy, out;
        image ia, ib;
        gmm_linear d;
        gmm_grad grad = GMM_ZERO;
        const float *got, *sum;
        build(&r, &c);
        T_OK(run(&r.d, c.op));
        A = fwd ? &r.x : &r.dy;
        B = wgrad ? &r.x : &r.w;
        x = of_codes(&r, &c, &r.x, tokens);
        dy = of_codes(&r, &c, &r.dy, tokens);
        w = of_codes(&r, &c, &r.w, fwd ? GMM_ROWWISE : GMM_COLUMNWISE);
        out = t_mat_out(GMM_F32, r.out.count, r.out.rows, r.out.cols);
        d = r.d;
        d.x = &x.mat;
        d.w = &w.mat;
        d.dy = &dy.mat;
        if (d.y) d.y = &out.mat;
        if (d.dx) d.dx = &out.mat;
        grad.mat = &out.mat;
        if (d.dw) d.dw = &grad;
        T_OK(run(&d, c.op));
        ia = image_of(A, tokens, c.groups, r.capacity, fwd ? c.K : c.N);
        ib = image_of(B, fwd ? GMM_ROWWISE : GMM_COLUMNWISE, c.groups, wgrad ? r.capacity : c.N, c.K);
        got = (const float *)t_mat_bits(&r.out);
        sum = (const float *)t_mat_bits(&out);
        for (int64_t g = 0; g < c.groups; g++)
            for (int64_t m = 0; m < (wgrad ? c.N : c.sizes[g]); m++) {
                const int64_t row = (wgrad ? g * c.N : r.first[g]) + m;
                const int per_row = A->quantized && ia.m->flags & GMM_MAT_ROW_AMAX;
                const float a = A->quantized ? ia.amax[per_row ? row : g] : 1.0f;
                const float la = !A->quantized ? 1.0f : ia.m->flags & GMM_MAT_E4M3_256 ? 1536.0f : 2688.0f;
                const float lb = ib.m->flags & GMM_MAT_E4M3_256 ? 1536.0f : 2688.0f, share = 1.0f / (la * lb);
                const float factor = a * ib.amax[g], all = factor * share;
                for (int64_t j = 0; j < out.cols; j++) {
                    const float want = sum[row * out.cols + j] * all;
                    T_CHECK(got[row * out.cols + j] == want, "op %d group %d row %d col %d: %a, want %a", i, (int)g,
                            (int)m, (int)j, (double)got[row * out.cols + j], (double)want);
                }
            }
    }
}

/* Sets all padding of a copy's elements and scales to 0xFF: NaN, or the largest FP4 code. */
static void poison_padding(const qrun *r, const qcase *c, const operand *o, gmm_direction direction) {
    const int weight = o == &r->w, k = direction == GMM_COLUMNWISE;
    const image im = image_of(o, direction, c->groups, weight ? c->N : r->capacity, o->src.cols);
    const int64_t cols = o->src.cols, w = o->quantized ? gmm_block_along(im.m->scaling) : 0;
    gmm_layout l = GMM_ZERO;
    uint8_t *data, *scale, *keep_data, *keep_scale;
    size_t data_bytes, scale_bytes;
    int64_t size;
    if (!o->quantized) return;
    T_CHECK((o->grouped ? gmm_layout_of_groups(im.m->dtype, im.m->scaling, im.m->scale_order, direction, c->groups,
                                               r->capacity, cols, &l, NULL)
                        : gmm_layout_of(im.m->dtype, im.m->scaling, im.m->scale_order, direction, c->N, cols, &l,
                                        NULL)) == GMM_OK, "layout");
    size = l.scale_dtype == GMM_F32 ? 4 : 1;
    data_bytes = (size_t)(l.data_bytes * (o->grouped ? 1 : c->groups));
    scale_bytes = (size_t)(l.scale_bytes * (o->grouped ? 1 : c->groups));
    data = (uint8_t *)t_host(data_bytes + 1);
    scale = (uint8_t *)t_host(scale_bytes + 1);
    keep_data = (uint8_t *)t_host(data_bytes + 1);
    keep_scale = (uint8_t *)t_host(scale_bytes + 1);
    memcpy(data, im.data, data_bytes);
    memcpy(scale, im.scale, scale_bytes);
    for (int64_t g = 0, start = 0; g < c->groups; start += up(c->sizes[g++], 128)) {
        const int64_t row = weight ? 0 : r->first[g], n = weight ? c->N : c->sizes[g], P = o->grouped ? up(n, 128) : n;
        const int apart = k && im.m->scaling == GMM_SCALING_MX32;
        const int64_t lines = k ? cols : n, along = k ? (im.m->hadamard ? up(n, 16) : n) : cols;
        for (int64_t i = 0; i < lines; i++)
            /* the zeros up to the next group are part of a copy */
            for (int64_t a = 0; a < (k && !apart ? P : along); a++) {
                const int64_t e = apart ? (row + a) * im.ld + i
                                  : k ? i * im.ld + (weight ? 0 : start) + a : (row + i) * im.ld + a;
                const int64_t j = gmm_scale_index(im.m->scaling, im.m->scale_order, direction, k ? cols : P,
                                                  k ? P : cols, i, w ? a / w : 0) +
                                  (o->grouped ? gmm_scale_base(im.m->scaling, direction, cols, g, row, start) : 0);
                keep_data[(o->grouped ? 0 : g * im.stride) + (im.m->dtype == GMM_E2M1 ? e / 2 : e)] = 1;
                if (a >= along) continue;
                memset(keep_scale + (o->grouped ? 0 : g * im.scale_stride) + j * size, 1, (size_t)size);
            }
    }
    for (size_t i = 0; i < data_bytes; i++)
        if (!keep_data[i]) data[i] = 0xFF;
    for (size_t i = 0; i < scale_bytes; i++)
        if (!keep_scale[i]) scale[i] = 0xFF;
    t_upload(im.m->data, data, data_bytes);
    t_upload(im.m->scale, scale, scale_bytes);
}

/* Padding of elements and scales has no effect on results. */
static void padding(int arg) {
    EACH_OP(i, arg) {
        const qcase c = { .op = ops[i], .setup = arg, .groups = 5, .sizes = ragged, .K = 96, .N = 160, .extra = 30,
                          .fill = T_REALS };
        const int wgrad = ops[i] == GMM_OP_LINEAR_WGRAD;
        qrun r;
        const void *clean;
        build(&r, &c);
        T_OK(run(&r.d, c.op));
        clean = t_mat_bits(&r.out);
        for (int k = 0; k < 6; k++) { /* also padding of what dequantization reads */
            const operand *o = k < 2 ? &r.x : k < 4 ? &r.w : &r.dy;
            const gmm_direction direction = (gmm_direction)(k % 2);
            t_mat before, after;
            if (!o->quantized) continue;
            before = values_of(&r, &c, o, GMM_F32, direction);
            poison_padding(&r, &c, o, direction);
            after = values_of(&r, &c, o, GMM_F32, direction);
            t_same("values", t_mat_bits(&after), t_mat_bits(&before), (size_t)(o->src.count * o->src.rows *
                                                                               o->src.cols * 4));
        }
        T_OK(run(&r.d, c.op));
        t_same("with padding poisoned", t_mat_bits(&r.out), clean,
               (size_t)((wgrad ? r.out.count * r.out.rows : r.live) * r.out.cols * 4));
    }
}

#ifdef HAVE_CUDA
/* Restores the destination's bytes of before the first call. */
static void restore(qrun *r, const qcase *c) {
    if (c->add || (c->op == GMM_OP_LINEAR_WGRAD && c->main_grad)) t_mat_put(&r->out);
    else
        for (int64_t g = 0; g < (r->out.form == T_PACKED ? 1 : r->out.count); g++)
            t_poison(r->out.table[g], 0xFF, (size_t)(r->out.rows * r->out.cols * ref_bytes(r->out.dtype) *
                                                     (r->out.form == T_PACKED ? r->out.count : 1)));
}
static size_t out_bytes(const qrun *r) {
    return (size_t)(r->out.count * r->out.rows * r->out.cols * ref_bytes(r->out.dtype));
}

static void *captured(const gmm_linear *d, gmm_op op, void *workspace, size_t bytes) {
    void *graph = NULL;
    const char *begin = device_begin_capture(), *end;
    const gmm_status s = run_with(d, op, workspace, bytes);
    end = device_end_capture(&graph);
    T_CHECK(!begin && !end && s == GMM_OK, "%s %s %d: %s", begin ? begin : "", end ? end : "", (int)s,
            gmm_last_error(T.ctx));
    return graph;
}

/* Demands WGMMA, and returns whether it serves the call; skips the case if there is no such engine. */
static int wgmma_takes(qrun *r, gmm_op op, gmm_info *info) {
    const char *why;
    r->options.engine = GMM_ENGINE_WGMMA;
    if (gmm_linear_query(T.ctx, op, &r->d, info) == GMM_OK) return 1;
    why = gmm_last_error(T.ctx);
    if (strstr(why, "compute capability") || strstr(why, "is not in this build"))
        t_skip("this GPU or build has no WGMMA engine: %s", why);
    return 0;
}

/* WGMMA on copies that are converted to 16-bit elements: correct, with the bits of MMA, with every tile, in graphs and
   on few SMs. */
static void converted(int arg) {
    static const int64_t tall[4] = { 70, 0, 209, 64 }, none[2] = { 0, 0 };
    EACH_OP(i, arg) {
        const qcase cases[] = {
            { .groups = 5, .sizes = ragged, .K = 96, .N = 288, .out = GMM_BF16, .table = 1, .bias = 1, .alpha = 1 },
            { .groups = 5, .sizes = ragged, .K = 96, .N = 96, .table = 1, .odd = 1 },
            { .groups = 4, .sizes = tall, .K = 672, .N = 288, .extra = 33, .tail = GMM_TAIL_ZERO, .alpha = 1 },
            { .groups = 4, .sizes = tall, .K = 288, .N = 672, .main_grad = 1, .add = i < 2 },
            { .groups = 3, .sizes = aligned, .K = 2080, .N = 64, .on_host = 1 },
            { .groups = 2, .sizes = none, .K = 64, .N = 96 }
        };
        for (size_t k = 0; k < sizeof cases / sizeof cases[0]; k++) {
            qcase c = cases[k];
            qrun r;
            gmm_info info = GMM_ZERO;
            const void *first;
            c.op = ops[i];
            c.setup = arg;
            c.fill = T_REALS;
            build(&r, &c);
            if (!wgmma_takes(&r, c.op, &info)) {
                const char *const why = gmm_last_error(T.ctx);
                T_CHECK((arg == NVFP4_ROW_AMAX && c.op == GMM_OP_LINEAR_FWD &&
                         strstr(why, "does not honour GMM_MAT_ROW_AMAX")) ||
                        (arg == MXFP8_F16 && strstr(why, "multiplies no f16 by mx32 weights")) ||
                        (arg == NVFP4_F16 && c.out == GMM_BF16 && strstr(why, "makes no bf16 from f16")), "%s", why);
                continue;
            }
            T_CHECK(strstr(info.note, "of workspace, tile "), "\"%s\"", info.note);
            T_OK(run(&r.d, c.op));
            check(&r, &c);
            first = t_mat_bits(&r.out);
            for (int way = 1; way < 10; way++) {
                restore(&r, &c);
                r.options.tile = way < 8 ? way : 0;
                r.options.sm_limit = way == 8 ? 3 : 0;
                r.options.engine = way == 9 ? GMM_ENGINE_MMA : GMM_ENGINE_WGMMA;
                T_OK(run(&r.d, c.op));
                t_same(way == 9 ? "MMA" : way == 8 ? "sm_limit" : "another tile", first, t_mat_bits(&r.out),
                       out_bytes(&r));
            }
            r.options.engine = GMM_ENGINE_WGMMA;
            r.options.workspace_limit = (int64_t)info.workspace_bytes;
            T_OK(gmm_linear_query(T.ctx, c.op, &r.d, &info));
            r.options.workspace_limit--;
            T_REFUSED(GMM_E_UNSUPPORTED, gmm_linear_query(T.ctx, c.op, &r.d, &info), "options.engine",
                      "options.workspace_limit", NULL);
            r.options.workspace_limit = 0;
            if (c.on_host) continue;
            { /* a graph with a poisoned workspace */
                void *graph, *workspace;
                T_OK(gmm_linear_query(T.ctx, c.op, &r.d, &info));
                workspace = t_workspace(info.workspace_bytes);
                graph = captured(&r.d, c.op, workspace, info.workspace_bytes);
                for (int n = 0; n < 2; n++) {
                    restore(&r, &c);
                    t_poison(workspace, n ? 0x7F : 0xFF, info.workspace_bytes);
                    T_CHECK(!device_replay(graph), "replay");
                    t_same("replay", first, t_mat_bits(&r.out), out_bytes(&r));
                }
                device_graph_free(graph);
            }
        }
    }
}

/* WGMMA on FP8 copies, K larger than all its stages: correct, with the same bits for every tile that promotes, and on
   few SMs, where a CTA computes many tiles. */
static void multiplied(int arg) {
    static const int64_t tall[4] = { 70, 0, 520, 64 };
    EACH_OP(i, arg) {
        const qcase cases[] = {
            { .groups = 5, .sizes = ragged, .K = 96, .N = 352, .out = GMM_BF16, .table = 1, .bias = 1, .alpha = 1 },
            { .groups = 4, .sizes = tall, .K = 544, .N = 352, .extra = 33, .tail = GMM_TAIL_ZERO, .alpha = 1 },
            { .groups = 4, .sizes = tall, .K = 352, .N = 544, .main_grad = 1, .add = i < 2 },
            { .groups = 4, .sizes = tall, .K = 352, .N = 544, .out = GMM_BF16, .fast = 1 }
        };
        for (size_t k = 0; k < sizeof cases / sizeof cases[0]; k++) {
            qcase c = cases[k];
            qrun r;
            gmm_info info = GMM_ZERO;
            const void *first;
            c.op = ops[i];
            c.setup = arg;
            c.fill = T_REALS;
            build(&r, &c);
            T_CHECK(wgmma_takes(&r, c.op, &info), "%s", gmm_last_error(T.ctx));
            T_OK(run(&r.d, c.op));
            check(&r, &c);
            first = t_mat_bits(&r.out);
            for (int way = 1; way < 9; way++) { /* five tiles, the last by the split */
                restore(&r, &c);
                r.options.tile = way < 6 && !c.fast ? way : 0;
                r.options.sm_limit = way < 6 ? 0 : way - 5;
                T_OK(run(&r.d, c.op));
                t_same(way < 6 ? "another tile" : "sm_limit", first, t_mat_bits(&r.out), out_bytes(&r));
            }
        }
    }
}

/* wgrad of skewed splits whose groups have 1024 rows and more in the mean: the balanced order of tiles. */
static void skewed(int arg) {
    static const int64_t sizes[2][4] = { { 2100, 0, 60, 0 }, { 1, 2500, 2000, 0 } };
    static const int32_t limits[4] = { 0, 4, 6, 7 };
    for (int i = 0; i < (device_emulated() ? 2 : 4); i++) {
        const qcase c = { .op = GMM_OP_LINEAR_WGRAD, .setup = arg, .groups = 4, .sizes = sizes[i / 2], .K = 96,
                          .N = i % 2 ? 800 : 544, .out = i % 2 ? GMM_BF16 : GMM_F32, .main_grad = i < 2,
                          .fill = T_REALS };
        gmm_info info = GMM_ZERO;
        const void *first;
        qrun r;
        build(&r, &c);
        T_CHECK(wgmma_takes(&r, c.op, &info), "%s", gmm_last_error(T.ctx));
        T_OK(run(&r.d, c.op));
        check(&r, &c);
        first = t_mat_bits(&r.out);
        for (int k = 1; k < 4; k++) {
            restore(&r, &c);
            r.options.sm_limit = limits[k];
            T_OK(run(&r.d, c.op));
            t_same("sm_limit", first, t_mat_bits(&r.out), out_bytes(&r));
        }
    }
}

/* The device chooses the tile by the split: on one cluster 384 rows take three rounds in either tile, and those of
   192x128 are shorter; groups of 128 and 256 rows take five rounds in 192x128 and three in 128x192. wgmmas of 128 and
   of 192 columns tell which tile was computed. */
static void chosen(int arg) {
    static const int64_t sizes[2][2] = { { 384, 0 }, { 128, 256 } };
    for (int by = 0; by < 2; by++)
        for (int want = 0; want < 2; want++) { /* the second tile */
            const qcase c = { .op = by ? GMM_OP_LINEAR_DGRAD : GMM_OP_LINEAR_FWD, .setup = arg, .groups = 2,
                              .sizes = sizes[want], .K = by ? 384 : 256, .N = by ? 256 : 384, .out = GMM_BF16,
                              .fill = T_REALS };
            int64_t before[2];
            gmm_info info = GMM_ZERO;
            qrun r;
            build(&r, &c);
            T_CHECK(wgmma_takes(&r, c.op, &info), "%s", gmm_last_error(T.ctx));
            r.options.tile = 5;
            r.options.sm_limit = 2;
            for (int tile = 0; tile < 2; tile++) before[tile] = device_wgmmas(tile ? 24 : 16);
            if (before[0] < 0) t_skip("the emulator alone counts wgmmas");
            T_OK(run(&r.d, c.op));
            check(&r, &c);
            for (int tile = 0; tile < 2; tile++)
                T_CHECK((device_wgmmas(tile ? 24 : 16) > before[tile]) == (tile == want), "%s, split %d: tile %d",
                        by ? "dgrad" : "forward", want, tile);
        }
}

/* Splits that the preceding kernel changes while CTAs already read them (programmatic dependent launch), so that each
   CTA may see either: the result has the bits of the final split. Of the tiles by blocks the device chooses another one
   for the third split than for the others, on few processors. */
static void late_splits(int arg) {
    static const int64_t sizes[4][5] = { { 100, 3, 50, 40, 7 }, { 20, 90, 0, 43, 47 }, { 0, 0, 192, 8, 0 },
                                         { 1, 1, 1, 1, 196 } };
    static const int32_t limits[] = { 0, 6 };
    const int emulated = device_early_reads(NULL, NULL, 0);
    EACH_OP(i, arg) {
        qcase c = { .op = ops[i], .setup = arg, .groups = 5, .sizes = sizes[3], .K = 544, .N = 544, .out = GMM_BF16,
                    .fill = T_REALS };
        qrun r;
        gmm_info info = GMM_ZERO;
        int64_t *each;
        void *workspace;
        int number = 0;
        build(&r, &c);
        T_CHECK(wgmma_takes(&r, c.op, &info), "%s", gmm_last_error(T.ctx));
        workspace = t_workspace(info.workspace_bytes);
        each = (int64_t *)t_in(sizes, sizeof sizes);
        r.groups.splits = t_alloc(sizeof sizes[0]);
        for (int32_t tile = 1; tile < 6; tile++)
            for (int l = 0; l < (emulated ? 1 : 2); l++)
                for (int to = 0; to < (emulated ? 2 : 4); to++) {
                    const void *want = NULL;
                    r.options.tile = tile;
                    r.options.sm_limit = limits[l];
                    for (int n = 0; n < (emulated ? 3 : 8); n++, number++) { /* the first round changes nothing */
                        const int from = n ? (to + 1 + n % 3) % 4 : to;
                        void *const at = (void *)(uintptr_t)r.groups.splits;
                        restore(&r, &c);
                        if (device_early_reads(at, sizes[from], sizeof sizes[from])) {
                            t_upload(at, sizes[to], sizeof sizes[to]);
                        } else {
                            const char *why;
                            t_upload(at, sizes[from], sizeof sizes[from]);
                            why = device_late_copy(at, each + 5 * to, 10, (uint64_t)(number * 377 % 9000));
                            T_CHECK(!why, "late copy: %s", why);
                        }
                        T_OK(run_with(&r.d, c.op, workspace, info.workspace_bytes));
                        (void)device_early_reads(NULL, NULL, 0);
                        if (n) t_same("another split before", want, t_mat_bits(&r.out), out_bytes(&r));
                        else want = t_mat_bits(&r.out);
                    }
                }
    }
}

/* Sizes that change between replays while row starts and scale offsets stay: groups of whole tiles. */
static void resized(int arg) {
    static const int64_t sizes[2][3] = { { 128, 384, 128 }, { 384, 0, 256 } };
    const qcase c = { .op = GMM_OP_LINEAR_FWD, .setup = arg, .groups = 3, .sizes = sizes[0], .K = 224, .N = 160,
                      .fill = T_REALS };
    gmm_info info = GMM_ZERO;
    void *graph, *workspace;
    const void *got;
    qrun r;
    build(&r, &c);
    T_CHECK(wgmma_takes(&r, c.op, &info), "%s", gmm_last_error(T.ctx));
    workspace = t_workspace(info.workspace_bytes);
    graph = captured(&r.d, c.op, workspace, info.workspace_bytes);
    t_upload((void *)(uintptr_t)r.groups.splits, sizes[1], sizeof sizes[1]);
    restore(&r, &c);
    T_CHECK(!device_replay(graph), "replay");
    got = t_mat_bits(&r.out);
    device_graph_free(graph);
    restore(&r, &c);
    r.options.engine = GMM_ENGINE_MMA;
    T_OK(run(&r.d, c.op));
    t_same("MMA after a change of sizes", got, t_mat_bits(&r.out), out_bytes(&r));
}

/* Weights at an address that TMA cannot load: WGMMA declines, and MMA serves the call in the workspace of a query
   without addresses. */
static void misplaced(int arg) {
    const qcase c = { .op = GMM_OP_LINEAR_FWD, .setup = arg, .groups = 3, .sizes = aligned, .K = 160, .N = 96,
                      .fill = T_REALS };
    gmm_config config = T.config;
    gmm_context *ctx;
    gmm_info info = GMM_ZERO;
    gmm_layout l = GMM_ZERO;
    const void *first;
    void *workspace;
    char *moved;
    gmm_mat *w;
    qrun r;
    config.engine = GMM_ENGINE_AUTO;
    ctx = t_context(&config);
    build(&r, &c);
    w = &r.w.rowwise;
    r.options.tile = 4; /* reads the weights as codes */
    T_CHECK(wgmma_takes(&r, c.op, &info), "%s", gmm_last_error(T.ctx));
    T_OK(run(&r.d, c.op));
    first = t_mat_bits(&r.out);
    T_CHECK(gmm_layout_of(w->dtype, w->scaling, w->scale_order, GMM_ROWWISE, c.N, c.K, &l, NULL) == GMM_OK, "layout");
    moved = (char *)t_alloc_aligned((size_t)(l.data_bytes * c.groups) + 16, 16) + 8;
    t_upload(moved, t_get(w->data, (size_t)(l.data_bytes * c.groups)), (size_t)(l.data_bytes * c.groups));
    r.options.engine = GMM_ENGINE_AUTO;
    w->data = NULL;
    T_OK_TEXT(gmm_linear_query(ctx, c.op, &r.d, &info), gmm_last_error(ctx));
    T_CHECK(info.engine == GMM_ENGINE_WGMMA, "%s: %s", gmm_engine_name(info.engine), info.note);
    w->data = moved;
    workspace = t_workspace(info.workspace_bytes);
    restore(&r, &c);
    T_OK_TEXT(gmm_linear_fwd(ctx, &r.d, workspace, info.workspace_bytes, T.stream), gmm_last_error(ctx));
    t_same("MMA", first, t_mat_bits(&r.out), out_bytes(&r));
    r.options.engine = GMM_ENGINE_WGMMA;
    T_REFUSED(GMM_E_UNSUPPORTED, gmm_linear_fwd(T.ctx, &r.d, workspace, info.workspace_bytes, T.stream),
              "options.engine", "needs w at a multiple of 16 bytes", NULL);
}

/* Elements outside of BF16's range: both engines give the same bits. */
static void ranges(int arg) {
    static const uint8_t codes[8] = { 0, 1, 2, 3, 118, 127, 246, 254 };
    EACH_OP(i, arg) {
        const qcase c = { .op = ops[i], .setup = arg, .groups = 3, .sizes = aligned, .K = 160, .N = 96,
                          .fill = T_REALS };
        gmm_info info = GMM_ZERO;
        const void *got;
        qrun r;
        build(&r, &c);
        for (int side = 0; side < 3; side++)
            for (int k = 0; k < 2; k++) {
                const operand *o = side == 0 ? &r.x : side == 1 ? &r.w : &r.dy;
                const gmm_mat *m = k ? &o->columnwise : &o->rowwise;
                const int64_t rows = side == 1 ? c.N : r.capacity;
                gmm_layout l = GMM_ZERO;
                uint8_t *scale;
                size_t bytes;
                T_CHECK((o->grouped ? gmm_layout_of_groups(m->dtype, m->scaling, m->scale_order,
                                                           k ? GMM_COLUMNWISE : GMM_ROWWISE, c.groups, rows,
                                                           o->src.cols, &l, NULL)
                                    : gmm_layout_of(m->dtype, m->scaling, m->scale_order,
                                                    k ? GMM_COLUMNWISE : GMM_ROWWISE, rows, o->src.cols, &l, NULL)) ==
                        GMM_OK, "layout");
                bytes = (size_t)(l.scale_bytes * (o->grouped ? 1 : c.groups));
                scale = (uint8_t *)t_host(bytes);
                for (size_t b = 0; b < bytes; b++) scale[b] = codes[t_rand() % 8];
                t_upload(m->scale, scale, bytes);
            }
        T_CHECK(wgmma_takes(&r, c.op, &info), "%s", gmm_last_error(T.ctx));
        T_OK(run(&r.d, c.op));
        got = t_mat_bits(&r.out);
        restore(&r, &c);
        r.options.engine = GMM_ENGINE_MMA;
        T_OK(run(&r.d, c.op));
        t_same("MMA", got, t_mat_bits(&r.out), out_bytes(&r));
    }
}
#endif

/* Weights with one amax per row: each column of y has the bits of a product with the same codes under its row's amax
   alone. */
static void row_amaxes(int arg) {
    const qcase c = { .op = GMM_OP_LINEAR_FWD, .setup = arg, .groups = 3, .sizes = aligned, .K = 160, .N = 96,
                      .fill = T_REALS };
    float amax[3 * 96];
    const float *got;
    qrun r;
    gmm_mat w;
    build(&r, &c);
    if (T.gpu) r.options.engine = GMM_ENGINE_MMA; /* WGMMA does not support row amaxes */
    for (int i = 0; i < 3 * 96; i++) amax[i] = (float)(2.0 + t_real());
    w = r.w.rowwise;
    w.flags |= (uint32_t)GMM_MAT_ROW_AMAX;
    w.amax = (float *)t_in(amax, sizeof amax);
    r.d.w = &w;
    T_OK(run(&r.d, c.op));
    got = (const float *)t_mat_bits(&r.out);
    w.flags &= ~(uint32_t)GMM_MAT_ROW_AMAX;
    for (int n = 0; n < 96; n += 19) {
        float one[3];
        const float *want;
        for (int g = 0; g < 3; g++) one[g] = amax[g * 96 + n];
        w.amax = (float *)t_in(one, sizeof one);
        t_mat_poison(&r.out);
        T_OK(run(&r.d, c.op));
        want = (const float *)t_mat_bits(&r.out);
        for (int64_t row = 0; row < r.first[3]; row++)
            T_CHECK(got[row * 96 + n] == want[row * 96 + n], "row %d col %d: %a, want %a", (int)row, n,
                    (double)got[row * 96 + n], (double)want[row * 96 + n]);
    }
}

/* Writes the fp32 scales of a copy, of line `line` or of all lines (-1): the values `some` in turn, block after block;
   without them random powers of two. */
static void put_scales(const qrun *r, const qcase *c, const operand *o, gmm_direction direction, int64_t line,
                       const float *some, int n_some) {
    const int weight = o == &r->w, k = direction == GMM_COLUMNWISE;
    const int64_t cols = o->src.cols;
    const image im = image_of(o, direction, c->groups, weight ? c->N : r->capacity, cols);
    float *const scale = (float *)(uintptr_t)im.scale; /* in a host copy */
    int64_t base = 0, end = 0;
    for (int64_t g = 0, start = 0; g < c->groups; start += up(c->sizes[g++], 128)) {
        const int64_t row = weight ? 0 : r->first[g], n = weight ? c->N : c->sizes[g], P = o->grouped ? up(n, 128) : n;
        const int64_t lines = k ? cols : n, blocks = ((k ? n : cols) + 127) / 128;
        base = o->grouped ? gmm_scale_base(im.m->scaling, direction, cols, g, row, start) : g * im.scale_stride / 4;
        for (int64_t i = line < 0 ? 0 : line; i < (line < 0 ? lines : line < lines ? line + 1 : 0); i++)
            for (int64_t b = 0; b < blocks; b++) {
                const int64_t j = base + gmm_scale_index(im.m->scaling, im.m->scale_order, direction, k ? cols : P,
                                                         k ? P : cols, i, b);
                scale[j] = some ? some[(g + b) % n_some] : (float)ldexp(1.0, (int)(t_rand() % 13) - 6);
                if (end < j + 1) end = j + 1;
            }
    }
    t_upload(im.m->scale, scale, (size_t)end * 4);
}

/* 1x128 scales on both sides that vary far more from line to line and from block to block than those of quantized
   random data. A changed scale changes its row or column of D and no other bit. */
static void mixed_scales(int arg) {
    static const int64_t sizes[4] = { 70, 0, 520, 64 };
    static const struct { int of_rows, n; float v[4]; } some[] = {
        { 0, 4, { 3.0f, 4.0f, 0.0f, 0x1p-70f } }, { 0, 3, { 0x1p63f, 0x1p-63f, -1.0f } },
        { 0, 3, { 0x1p64f, 0x1p-64f, 0.5f } }, { 1, 2, { -0.75f, 3.0f } },
        { 1, 4, { 0x1p63f, 0.0f, 0x1p-63f, 0x1p64f } }
    };
    EACH_OP(i, arg) {
        const qcase c = { .op = ops[i], .setup = arg, .groups = 4, .sizes = sizes, .K = 352, .N = 544,
                          .fill = T_REALS };
        const int fwd = ops[i] == GMM_OP_LINEAR_FWD, wgrad = ops[i] == GMM_OP_LINEAR_WGRAD;
        const gmm_direction tokens = wgrad ? GMM_COLUMNWISE : GMM_ROWWISE, other = fwd ? GMM_ROWWISE : GMM_COLUMNWISE;
        qrun r;
        build(&r, &c);
        if (!wgrad && r.w.columnwise.scaling != GMM_SCALING_1X128) continue;
        for (size_t k = 0; k < sizeof some / sizeof some[0]; k++) {
            const operand *A = fwd ? &r.x : &r.dy, *B = wgrad ? &r.x : &r.w;
            const float *before, *after;
            put_scales(&r, &c, A, tokens, -1, NULL, 0);
            put_scales(&r, &c, B, other, -1, NULL, 0);
            T_OK(run(&r.d, c.op));
            check(&r, &c);
            before = (const float *)t_mat_bits(&r.out);
            for (int64_t line = 5; line < 300; line += 195)
                if (some[k].of_rows) put_scales(&r, &c, A, tokens, line, some[k].v, some[k].n);
                else put_scales(&r, &c, B, other, line, some[k].v, some[k].n);
            T_OK(run(&r.d, c.op));
            check(&r, &c);
            after = (const float *)t_mat_bits(&r.out);
            for (int64_t g = 0; g < c.groups; g++) {
                const int64_t first = wgrad ? g * c.N : r.first[g], m = wgrad ? c.N : c.sizes[g], n = r.out.cols;
                for (int64_t j = 0; j < m * n; j++) {
                    const int64_t line = some[k].of_rows ? j / n : j % n, at = first * n + j;
                    T_CHECK(line == 5 || line == 200 || memcmp(&after[at], &before[at], 4) == 0,
                            "op %d, scales %d, group %d: element %d, %d: %a, before %a", i, (int)k, (int)g,
                            (int)(j / n), (int)(j % n), (double)after[at], (double)before[at]);
                }
            }
        }
    }
}

/* Multiplies the outer scales of a copy by a power of two: its fp32 scales, or NV16's amaxes. */
static void shift_scales(const qrun *r, const qcase *c, const operand *o, gmm_direction direction, int power) {
    const int weight = o == &r->w;
    const int64_t rows = weight ? c->N : r->capacity;
    const image im = image_of(o, direction, c->groups, rows, o->src.cols);
    const int nv = im.m->scaling == GMM_SCALING_NV16, per_row = (im.m->flags & GMM_MAT_ROW_AMAX) != 0;
    const int64_t n = nv ? (per_row ? rows : c->groups) : im.scale_stride / 4 * (o->grouped ? 1 : c->groups);
    const float *const from = nv ? im.amax : (const float *)(const void *)im.scale;
    float *to = (float *)t_host((size_t)n * 4 + 4);
    for (int64_t i = 0; i < n; i++) to[i] = ldexpf(from[i], power);
    t_upload(nv ? (void *)im.m->amax : im.m->scale, to, (size_t)n * 4);
}

static void check_shifted(const qrun *r, const float *before, int power, const char *what, int op, int i) {
    const float *const got = (const float *)t_mat_bits(&r->out);
    for (int64_t j = 0; j < r->out.count * r->out.rows * r->out.cols; j++) {
        const float want = ldexpf(before[j], power);
        /* a subnormal result may be rounded once more */
        const double apart = fabsf(want) < FLT_MIN ? ldexp(1.0, -149) : 0.0;
        T_CHECK(memcmp(&got[j], &want, 4) == 0 || fabs((double)got[j] - (double)want) <= apart,
                "op %d, %s %d, element %d: %a, want %a", op, what, i, (int)j, (double)got[j], (double)want);
    }
}
#define check_shifted(...) T_CALL(check_shifted, __VA_ARGS__)

/* Tensor scales, row scales and amaxes whose products with each other or with alpha are not normal numbers: powers of
   two in the scales multiply the results by their product and change no other bit. */
static void far_scales(int arg) {
    static const struct { int a, b, alpha; } some[] = {
        { 0, 0, 0 }, { 70, -70, 70 }, { -70, 70, -70 }, { -60, -55, 0 }, { 60, -55, -100 }, { -70, 60, 110 },
        { 70, 30, 0 }, { -70, 70, 0 }
    };
    EACH_OP(i, arg) {
        const qcase c = { .op = ops[i], .setup = arg, .groups = 3, .sizes = aligned, .K = 160, .N = 96,
                          .fill = T_REALS };
        const int wgrad = ops[i] == GMM_OP_LINEAR_WGRAD, fwd = ops[i] == GMM_OP_LINEAR_FWD;
        const gmm_direction tokens = wgrad ? GMM_COLUMNWISE : GMM_ROWWISE, other = fwd ? GMM_ROWWISE : GMM_COLUMNWISE;
        const int fp8 = setup_of(arg).w.dtype == GMM_E4M3;
        qrun r;
        build(&r, &c);
        for (r.options.fp8_fast_accum = 0; r.options.fp8_fast_accum <= fp8; r.options.fp8_fast_accum++) {
            const operand *A = fwd ? &r.x : &r.dy, *B = wgrad ? &r.x : &r.w;
            const float *before = NULL;
            for (int k = 0; k < (int)T_COUNT(some); k++) {
                /* 16-bit operands of NV16 weights stay as they are: the weights' amax alone is moved to where its scale
                   is subnormal */
                const int a = A->quantized ? some[k].a : 0, b = A->quantized ? some[k].b : some[k].b + some[k].a;
                const double alpha = ldexp(0.75, some[k].alpha);
                const int rows = A->quantized && A->rowwise.scaling == GMM_SCALING_ROW;
                /* the contract for two ROW operands on WGMMA: scales of B times alpha are normal numbers */
                if (rows && (T.engine == GMM_ENGINE_WGMMA || (T.gpu && T.engine == GMM_ENGINE_AUTO)) &&
                    abs(some[k].b + some[k].alpha) > 110)
                    continue;
                if (A->quantized) shift_scales(&r, &c, A, tokens, a);
                shift_scales(&r, &c, B, other, b);
                r.d.alpha = t_floats_in(&alpha, 1);
                T_OK(run(&r.d, c.op));
                if (k == 0) before = (const float *)t_mat_bits(&r.out);
                else check_shifted(&r, before, a + b + some[k].alpha, "powers", i, k);
                if (A->quantized) shift_scales(&r, &c, A, tokens, -a);
                shift_scales(&r, &c, B, other, -b);
            }
        }
    }
}

/* Block scales at the limits of the contract: their product is the smallest normal number, or 2^127. */
static void far_blocks(int arg) {
    static const struct { int a, b; } some[] = {
        { 0, 0 }, { 120, -120 }, { -120, 120 }, { -63, -63 }, { 120, -20 }, { -100, -26 }, { 60, 40 }, { 127, -126 },
        { 0, 0 }, { 127, 0 }, { 0, 127 }, { 64, 63 } /* of the smallest codes */
    };
    EACH_OP(i, arg) {
        const qcase c = { .op = ops[i], .setup = arg, .groups = 3, .sizes = aligned, .K = 160, .N = 96,
                          .fill = T_REALS };
        const int wgrad = ops[i] == GMM_OP_LINEAR_WGRAD, fwd = ops[i] == GMM_OP_LINEAR_FWD;
        const gmm_direction tokens = wgrad ? GMM_COLUMNWISE : GMM_ROWWISE, other = fwd ? GMM_ROWWISE : GMM_COLUMNWISE;
        const float *before = NULL;
        qrun r;
        build(&r, &c);
        for (int k = 0; k < (int)T_COUNT(some); k++) {
            const operand *A = fwd ? &r.x : &r.dy, *B = wgrad ? &r.x : &r.w;
            const float a = ldexpf(1.0f, some[k].a), b = ldexpf(1.0f, some[k].b);
            if (k == 8)
                for (int side = 0; side < 2; side++) {
                    const operand *o = side ? B : A;
                    const image im = image_of(o, side ? other : tokens, c.groups, o == &r.w ? c.N : r.capacity,
                                              o->src.cols);
                    t_poison(im.m->data, 1, (size_t)(im.stride * (o->grouped ? 1 : c.groups)));
                }
            put_scales(&r, &c, A, tokens, -1, &a, 1);
            put_scales(&r, &c, B, other, -1, &b, 1);
            T_OK(run(&r.d, c.op));
            if (some[k].a == 0 && some[k].b == 0) before = (const float *)t_mat_bits(&r.out);
            else check_shifted(&r, before, some[k].a + some[k].b, "scales", i, k);
        }
    }
}

static void refusals(int arg) {
    const qcase c = { .op = GMM_OP_LINEAR_FWD, .setup = NVFP4, .groups = 3, .sizes = aligned, .K = 160, .N = 96,
                      .fill = T_REALS };
    qcase other = c;
    qrun r, q;
    gmm_linear d;
    gmm_mat m, other_flags;
    gmm_info info = GMM_ZERO;
    (void)arg;
    build(&r, &c);
    other.setup = FP8_BLOCK;
    build(&q, &other);
    T_OK(gmm_linear_query(T.ctx, GMM_OP_LINEAR_FWD, &r.d, &info));
    T_CHECK(info.in_align == 32 && info.out_align == 32, "aligns %d %d", (int)info.in_align, (int)info.out_align);
    T_OK(gmm_linear_query(T.ctx, GMM_OP_LINEAR_FWD, &q.d, &info));
    T_CHECK(info.in_align == 16, "align %d", (int)info.in_align);
#define LREFUSED(status, op, change, ...) do { \
        d = r.d; \
        change; \
        T_REFUSED(status, gmm_linear_##op(T.ctx, &d, NULL, 0, T.stream), __VA_ARGS__, NULL); \
    } while (0)
    LREFUSED(GMM_E_DTYPE, fwd, d.w = &q.w.rowwise, "w: ", "128x128", "nv16");
    LREFUSED(GMM_E_DTYPE, fwd, d.x = &r.xs.mat; d.w = &q.w.rowwise, "w: ", "bf16");
    LREFUSED(GMM_E_DTYPE, fwd, d.w = &r.ws.mat, "w: ", "none");
    LREFUSED(GMM_E_NULL, wgrad, (m = r.x.rowwise, m.columnwise = NULL, d.x = &m, d.dw = &r.grad), "x.columnwise",
             "linear_wgrad");
    LREFUSED(GMM_E_NULL, dgrad, (m = r.w.rowwise, m.columnwise = NULL, d.w = &m, d.dx = &r.out.mat), "w.columnwise");
    {
        gmm_mat plain = r.x.columnwise;
        plain.hadamard = 0;
        LREFUSED(GMM_E_CONFIG, wgrad, (m = r.x.rowwise, m.columnwise = &plain, d.x = &m, d.dw = &r.grad),
                 "linear.dy.columnwise: hadamard", "that of linear.x.columnwise");
    }
    {
        gmm_mat other_signs = r.dy.columnwise;
        other_signs.hadamard ^= 1;
        LREFUSED(GMM_E_CONFIG, wgrad, (m = r.dy.rowwise, m.columnwise = &other_signs, d.dy = &m, d.dw = &r.grad),
                 "hadamard", "0x1d7e9", "0x1d7e8");
    }
    LREFUSED(GMM_E_ARG, fwd, (m = r.x.rowwise, m.hadamard = GMM_HADAMARD, d.x = &m), "x: ", "hadamard", "0x10000");
    LREFUSED(GMM_E_DTYPE, fwd, (m = r.x.rowwise, m.scale_order = (gmm_scale_order)2, d.x = &m), "x: ", "order 2");
    LREFUSED(GMM_E_DTYPE, fwd, (m = q.x.rowwise, m.scale_order = GMM_SCALES_SWIZZLED, d.x = &m), "x: ", "1x128",
             "order 1");
    LREFUSED(GMM_E_DTYPE, dgrad, (m = q.w.rowwise, m.scale_order = GMM_SCALES_SWIZZLED, d.w = &m, d.dx = &r.out.mat),
             "w: ", "128x128", "order 1");
    LREFUSED(GMM_E_ARG, fwd, (m = q.x.rowwise, m.flags = GMM_MAT_ROW_AMAX, d.x = &m), "x: ", "flags", "1x128");
    LREFUSED(GMM_E_ARG, wgrad, (other_flags = r.x.columnwise, other_flags.flags |= GMM_MAT_ROW_AMAX, m = r.x.rowwise,
             m.columnwise = &other_flags, d.x = &m, d.dw = &r.grad), "x.columnwise", "flags", "columnwise");
    LREFUSED(GMM_E_ARG, fwd, d.in_features = 144, "in_features", "144", "32");
    LREFUSED(GMM_E_DTYPE, bgrad, (d.db = &r.grad, d.dy = &r.dy.rowwise), "dy: ", "e2m1");
    LREFUSED(GMM_E_NULL, fwd, (m = r.x.rowwise, m.amax = NULL, d.x = &m), ": linear.x lacks amax");
    { /* tables in host memory, whose addresses are checked */
        qcase tables = c;
        void *data[3], *scale[3];
        qrun p;
        tables.setup = FP8_BLOCK;
        tables.table = 1;
        build(&p, &tables);
        for (int g = 0; g < 3; g++) {
            data[g] = ((void **)t_get(p.w.rowwise.table, sizeof data))[g];
            scale[g] = ((void **)t_get(p.w.rowwise.scale_table, sizeof scale))[g];
        }
        m = p.w.rowwise;
        m.flags = GMM_MAT_TABLE_ON_HOST;
        m.table = data;
        m.scale_table = scale;
        d = p.d;
        d.w = &m;
        T_OK(run(&d, GMM_OP_LINEAR_FWD));
        check(&p, &tables);
        scale[1] = (char *)scale[1] + 2;
        T_REFUSED(GMM_E_ALIGN, gmm_linear_fwd(T.ctx, &d, NULL, 0, T.stream), "w: ", "scale_table[1]", "4 bytes", NULL);
        scale[1] = NULL;
        T_REFUSED(GMM_E_NULL, gmm_linear_fwd(T.ctx, &d, NULL, 0, T.stream), "w: ", "scale_table[1]", NULL);
        m.scale_table = NULL;
        T_REFUSED(GMM_E_ARG, gmm_linear_fwd(T.ctx, &d, NULL, 0, T.stream), "w: ", "scale_table", NULL);
    }
    { /* both operands with 128x128 scales */
        gmm_mat w = q.w.rowwise;
        w.data = t_alloc(1 << 16);
        d = q.d;
        d.x = &w;
        T_REFUSED(GMM_E_DTYPE, gmm_linear_fwd(T.ctx, &d, NULL, 0, T.stream), "x: ", "128x128", NULL);
        d.dy = &w;
        d.dx = &q.xs.mat;
        T_REFUSED(GMM_E_DTYPE, gmm_linear_dgrad(T.ctx, &d, NULL, 0, T.stream), "dy: ", "128x128", NULL);
    }
#undef LREFUSED
}

/* Everything is drawn. */
static void drawn(int arg) {
    static const gmm_dtype outs[] = { GMM_F32, GMM_BF16, GMM_F16 };
    qcase c = { .op = ops[t_int(0, 2)], .setup = (int)t_int(0, SETUPS - 1), .groups = (int32_t)t_int(1, 8),
                .K = 32 * t_int(1, 12), .N = 32 * t_int(1, 12), .extra = t_int(0, 1) * t_int(0, 150),
                .out = outs[t_int(0, 2)], .splits = t_int(0, 1) ? GMM_I32 : GMM_I64, .offsets = (int)t_int(0, 1),
                .tail = (gmm_tail)t_int(0, 1), .fill = t_int(0, 2) ? T_REALS : T_INTS };
    (void)arg;
    if (!has(c.setup, c.op)) c.op = t_int(0, 1) ? GMM_OP_LINEAR_FWD : GMM_OP_LINEAR_DGRAD;
    c.sizes = t_draw_sizes(c.groups, t_draw_size(140, 500));
    c.table = (int)t_int(0, 1);
    c.odd = c.table && t_int(0, 1);
    c.on_host = t_int(0, 7) == 0;
    c.main_grad = (int)t_int(0, 1);
    c.add = c.op != GMM_OP_LINEAR_WGRAD && t_int(0, 1);
    c.bias = (int)t_int(0, 1);
    c.alpha = (int)t_int(0, 1);
    test(&c);
}

void tests_qlinear(void) {
    t_add(drawn, 0, "qlinear drawn at random");
    t_random(12);
    t_add_host(valid_setups, 0, "qlinear setups are valid recipes");
    for (int i = 0; i < SETUPS; i++) t_add(products, i, "qlinear products %s", setups[i].name);
    for (int i = 0; i < SETUPS; i++) t_add(odd_addresses, i, "qlinear odd addresses %s", setups[i].name);
    for (int i = 0; i < SETUPS; i++) t_add(empties, i, "qlinear empty groups %s", setups[i].name);
    for (int i = 0; i < SETUPS; i++)
        if (has(i, GMM_OP_LINEAR_WGRAD)) t_add(added, i, "qlinear beta, frozen groups %s", setups[i].name);
    for (int i = 0; i < SETUPS; i++) t_add(probs, i, "qlinear prob %s", setups[i].name);
    for (int i = 0; i < SETUPS; i++) t_add(tails, i, "qlinear tails %s", setups[i].name);
    for (int i = 0; i < SETUPS; i++) t_add(split_forms, i, "qlinear split forms %s", setups[i].name);
    for (int i = 0; i < SETUPS; i++) t_add(faults, i, "qlinear faulty splits %s", setups[i].name);
    for (int i = 0; i < SETUPS; i++)
        if (setups[i].weights_alone) t_add(gathered, i, "qlinear gathered rows %s", setups[i].name);
    for (int i = 0; i < SETUPS; i++) t_add(alone, i, "qlinear group alone %s", setups[i].name);
    for (int i = 0; i < SETUPS; i++) t_add(rows_alone, i, "qlinear rows alone %s", setups[i].name);
    t_add(mixed_scales, FP8_BLOCK, "qlinear mixed scales %s", setups[FP8_BLOCK].name);
    t_add(mixed_scales, FP8_BLOCK_1X128, "qlinear mixed scales %s", setups[FP8_BLOCK_1X128].name);
    for (int i = 0; i < SETUPS; i++)
        if (i == FP8_DELAYED || i == FP8_CURRENT || i == FP8_BLOCK)
            t_add(idle, i, "qlinear idle groups of many tiles %s", setups[i].name);
    for (int i = 0; i < SETUPS; i++) t_add(padding, i, "qlinear padding %s", setups[i].name);
    t_add(fast, FP8_CURRENT, "qlinear fast accumulation, tensor");
    t_add(fast, FP8_ROW, "qlinear fast accumulation, row");
    t_add(exact, FP8_DELAYED, "qlinear exact fp8 delayed"); /* whose scales are 1 */
    t_add(exact, FP8_BLOCK, "qlinear exact fp8 block");
    t_add(exact, MXFP8, "qlinear exact mxfp8");
    t_add(exact, MXFP4_WEIGHTS, "qlinear exact mxfp4 weights");
    t_add(exact, MXFP4_BF16, "qlinear exact mxfp4 weights with bf16");
    t_add(exact, FP8_BLOCK_1X128, "qlinear exact fp8 block, 1x128 weights");
    t_add(exact_nv, NVFP4, "qlinear exact nvfp4");
    t_add(exact_nv, NVFP4_ROW_AMAX, "qlinear exact nvfp4 row amax, 4 over 6");
    t_add(exact_nv, NVFP4_BF16, "qlinear exact nvfp4 weights with bf16");
    t_add(row_amaxes, NVFP4, "qlinear nvfp4 weights with an amax per row");
    t_add(row_amaxes, NVFP4_BF16, "qlinear nvfp4 weights with an amax per row, bf16 tokens");
    {
        static const int outer[] = { FP8_CURRENT, NVFP4, FP8_ROW, NVFP4_ROW_AMAX, NVFP4_BF16 };
        static const int blocks[] = { FP8_BLOCK, FP8_BLOCK_FP32, FP8_BLOCK_1X128 };
        for (int i = 0; i < T_COUNT(outer); i++)
            t_add(far_scales, outer[i], "qlinear scales far apart %s", setups[outer[i]].name);
        for (int i = 0; i < T_COUNT(blocks); i++)
            t_add(far_blocks, blocks[i], "qlinear scales of blocks far apart %s", setups[blocks[i]].name);
    }
    t_add(refusals, 0, "qlinear refusals");
#ifdef HAVE_CUDA
    for (int i = 0; i < SETUPS; i++) {
        const gmm_scaling scaling = setup_of(i).w.scaling;
        if (scaling != GMM_SCALING_MX32 && scaling != GMM_SCALING_NV16) {
            t_add_gpu_once(multiplied, i, "qlinear wgmma tiles %s", setups[i].name);
            if (has(i, GMM_OP_LINEAR_WGRAD))
                t_add_gpu_once(skewed, i, "qlinear wgmma skewed splits %s", setups[i].name);
            t_add_gpu_once(late_splits, i, "qlinear wgmma splits that change late %s", setups[i].name);
            if (i == FP8_CURRENT || i == FP8_BLOCK)
                t_add_gpu_once(chosen, i, "qlinear wgmma tile by the split %s", setups[i].name);
            continue;
        }
        t_add_gpu_once(converted, i, "qlinear wgmma converted %s", setups[i].name);
        if (i != NVFP4_ROW_AMAX && i != MXFP8_F16) /* whose forward WGMMA declines: see converted */
            t_add_gpu_once(resized, i, "qlinear wgmma sizes after a capture %s", setups[i].name);
    }
    t_add_gpu_once(misplaced, MXFP8, "qlinear wgmma misplaced %s", setups[MXFP8].name);
    t_add_gpu_once(misplaced, NVFP4_BF16, "qlinear wgmma misplaced %s", setups[NVFP4_BF16].name);
    t_add_gpu_once(ranges, MXFP8, "qlinear wgmma ranges %s", setups[MXFP8].name);
    t_add_gpu_once(ranges, MXFP4_WEIGHTS, "qlinear wgmma ranges %s", setups[MXFP4_WEIGHTS].name);
#endif
}
