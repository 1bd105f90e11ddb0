/* test_linear.c - grouped linear: forward, dgrad, wgrad, bgrad against fp64 */
#include "linear_case.h"

#include <math.h>
#include <string.h>

/* ----------------------------------------------------------------------------------------------------- Driver --- */

gmm_dtype lin_dtype(int i) { return i == 0 ? GMM_F32 : i == 1 ? GMM_F16 : GMM_BF16; }

static const char *lin_op(gmm_op op) { return gmm_op_name(op) + 7; /* the name after "linear_" */ }

static int lin_is_grad(gmm_op op) { return op == GMM_OP_LINEAR_WGRAD || op == GMM_OP_LINEAR_BGRAD; }

/* beta of dst = result + beta dst for group g */
static double lin_beta(const lin_run *r, int64_t g) {
    const lin_spec *s = &r->spec;
    if (!lin_is_grad(s->op)) return s->add ? 1.0 : 0.0;
    if (r->beta) return r->beta[g];
    return s->main_grad && !s->overwrite ? 1.0 : 0.0;
}

static void lin_nan_tail(t_mat *m, int64_t live) {
    for (int64_t i = live * m->cols; i < m->rows * m->cols; i++) m->v[i] = (double)NAN;
    t_mat_put(m);
}

/* Writes the split in the form of the specification. */
static void lin_splits(lin_run *r) {
    const lin_spec *s = &r->spec;
    const int offsets = s->split == LIN_OFFSETS32 || s->split == LIN_OFFSETS64;
    const int wide = s->split == LIN_I64 || s->split == LIN_OFFSETS64;
    const int64_t n = s->groups + offsets;
    int64_t *v64 = (int64_t *)t_host((size_t)n * sizeof *v64);
    int32_t *v32 = (int32_t *)t_host((size_t)n * sizeof *v32);
    const void *host = wide ? (const void *)v64 : (const void *)v32;
    for (int64_t g = 0; g < n; g++) {
        v64[g] = offsets ? r->offsets[g] : s->sizes[g];
        v32[g] = (int32_t)v64[g];
    }
    r->groups.count = s->groups;
    r->groups.capacity = r->capacity;
    r->groups.splits = s->on_host ? host : t_in(host, (size_t)n * (wide ? 8 : 4));
    r->groups.dtype = wide ? GMM_I64 : GMM_I32;
    r->groups.form = offsets ? GMM_SPLIT_OFFSETS : GMM_SPLIT_SIZES;
    r->groups.on_host = s->on_host;
    r->groups.row_align = s->row_align;
    r->groups.rows_hint = s->hint;
    r->groups.tail = s->tail;
    r->groups.fault = r->fault;
}

/* Notes a run for failures. */
static void lin_note(const lin_run *r) {
    static const char *const forms[] = {[T_PACKED] = "packed", [T_TABLE] = "table", [T_TABLE_HOST] = "host table"};
    const lin_spec *s = &r->spec;
    t_about("%s of %s into %s, %d groups, K %lld, N %lld, capacity %lld, w %s, %s", gmm_op_name(s->op),
            gmm_dtype_name(s->in), gmm_dtype_name(s->out), (int)s->groups, (long long)s->K, (long long)s->N,
            (long long)r->capacity, forms[s->w], s->fill == T_INTS ? "integers" : "reals");
    t_splits(s->sizes, s->groups);
}

/* A value per row, with zeros and negatives; NaN past the sum. */
static const float *lin_rows(const lin_run *r, double **values) {
    static const double some[] = {1.0, 0.0, -0.5, 2.0, -1.0, 0.5};
    *values = (double *)t_host((size_t)r->capacity * sizeof **values);
    for (int64_t i = 0; i < r->capacity; i++)
        (*values)[i] = i >= r->live ? (double)NAN
                       : r->spec.fill == T_INTS || i % 7 < 2 ? some[t_int(0, 5)] : ref_round(GMM_F32, t_real());
    return t_floats_in(*values, r->capacity);
}

/* An entry of an index for a row of zeros; none of the entries' rows is in a matrix of `rows` rows. */
static int32_t lin_entry_of_zeros(lin_run *r, int64_t rows, int32_t div) {
    const int32_t negative[] = {-1, INT32_MIN, (int32_t)-t_int(1, 9)};
    const int32_t past[] = {(int32_t)(rows * div), (int32_t)(rows * div + t_int(0, 99)), INT32_MAX};
    if (r->spec.index == LIN_NEGATIVE || t_int(0, 1)) return negative[t_int(0, 2)];
    r->faults |= (uint32_t)GMM_FAULT_INDEX;
    return past[t_int(0, 2)];
}

/* x or dy: the matrix with a row for each row of the product, NaN past the sum; or one that rows are gathered from, and
   its index. Then rows that no entry names are NaN, and entries past the sum name rows past the matrix. */
static t_mat lin_tokens(lin_run *r, int64_t cols, int gathered, const double **rows, const int32_t **index) {
    const lin_spec *s = &r->spec;
    const int64_t count = gathered ? r->d.index_rows : r->capacity, live = r->live;
    const int32_t div = s->index_div ? s->index_div : 1;
    t_mat m = t_mat_make(s->in, 1, count, cols, s->pad, 0, T_PACKED, s->fill);
    int32_t *at = (int32_t *)t_host((size_t)r->capacity * sizeof *at);
    int64_t *order = (int64_t *)t_host((size_t)live * sizeof *order);
    double *values = (double *)t_host((size_t)(r->capacity * cols) * sizeof *values);
    char *named = (char *)t_host((size_t)count);
    *rows = m.v;
    if (!gathered) {
        lin_nan_tail(&m, live);
        return m;
    }
    for (int64_t i = 0; i < live; i++) {
        const int64_t j = s->index == LIN_IDENTITY ? i : t_int(0, i);
        order[i] = order[j];
        order[j] = i;
    }
    for (int64_t i = 0; i < live; i++) {
        const int64_t row = s->index == LIN_REPEATED ? t_int(0, (count - 1) / 3) : order[i];
        at[i] = (int32_t)(row * div + t_int(0, div - 1));
        if (s->index >= LIN_NEGATIVE && t_int(0, 2) == 0) {
            at[i] = lin_entry_of_zeros(r, count, div);
            continue;
        }
        named[row] = 1;
        memcpy(values + i * cols, m.v + row * cols, (size_t)cols * sizeof *values);
    }
    for (int64_t i = live; i < r->capacity; i++) at[i] = INT32_MAX;
    for (int64_t i = live * cols; i < r->capacity * cols; i++) values[i] = (double)NAN;
    for (int64_t i = 0; i < count * cols; i++)
        if (!named[i / cols]) m.v[i] = (double)NAN;
    t_mat_put(&m);
    *rows = values;
    *index = (const int32_t *)t_in(at, (size_t)r->capacity * sizeof *at);
    return m;
}

void lin_build(lin_run *r, const lin_spec *spec) {
    static const double alphas[] = {-2.0, 0.5, 3.0, 1.0, -1.0}, betas[] = {0.0, 1.0, 0.5, -1.0, 2.0};
    const int fwd = spec->op == GMM_OP_LINEAR_FWD, wgrad = spec->op == GMM_OP_LINEAR_WGRAD;
    const int dgrad = spec->op == GMM_OP_LINEAR_DGRAD, bgrad = spec->op == GMM_OP_LINEAR_BGRAD;
    const int ints = spec->fill == T_INTS;
    lin_spec *s = &r->spec;
    const uint32_t zero = 0;
    int64_t G = spec->groups, K = spec->K, N = spec->N;

    memset(r, 0, sizeof *r);
    *s = *spec;
    if (s->in == GMM_NONE) s->in = GMM_F32;
    if (s->out == GMM_NONE) s->out = GMM_F32;
    r->offsets = (int64_t *)t_host((size_t)(G + 1) * sizeof *r->offsets);
    for (int64_t g = 0; g < G; g++) r->offsets[g + 1] = r->offsets[g] + s->sizes[g];
    r->live = r->offsets[G];
    r->capacity = r->live + s->extra;
    lin_note(r);
    r->fault = (uint32_t *)t_alloc(sizeof zero);
    t_upload(r->fault, &zero, sizeof zero);
    lin_splits(r);

    r->d.in_features = K;
    r->d.out_features = N;
    r->d.groups = &r->groups;
    if (s->index) {
        r->d.index_rows = s->index == LIN_REPEATED ? r->live / 2 + 1 : r->live + 2;
        r->d.index_div = s->index_div;
    }
    if (fwd || wgrad) {
        r->x = lin_tokens(r, K, s->index && (fwd || s->plain != 1), &r->x_rows, &r->d.x_index);
        r->d.x = &r->x.mat;
    }
    if (!fwd) {
        r->dy = lin_tokens(r, N, s->index && (!wgrad || s->plain != 2), &r->dy_rows, &r->d.dy_index);
        r->d.dy = &r->dy.mat;
    }
    if (fwd || dgrad) {
        r->w = t_mat_make(s->in, G, N, K, s->pad, s->gap, s->w, s->fill);
        r->d.w = &r->w.mat;
    }
    if (s->bias != GMM_NONE) {
        r->bias = t_mat_make(s->bias, G, 1, N, s->pad, s->gap, s->bias_form, s->fill);
        r->d.bias = &r->bias.mat;
    }
    if (s->scale) r->d.bias_scale = lin_rows(r, &r->scale);
    if (s->prob) r->d.prob = lin_rows(r, &r->prob);
    if (s->alpha) {
        r->alpha = (double *)t_host((size_t)G * sizeof *r->alpha);
        for (int64_t g = 0; g < G; g++)
            r->alpha[g] = s->alpha == 1 && g ? r->alpha[0] : ints ? alphas[g % 5] : ref_round(GMM_F32, t_real());
        r->d.alpha = t_floats_in(r->alpha, s->alpha == 1 ? 1 : G);
        r->d.alpha_per_group = s->alpha == 2;
    }
    if (s->beta) {
        r->beta = (double *)t_host((size_t)G * sizeof *r->beta);
        for (int64_t g = 0; g < G; g++) r->beta[g] = betas[g % 5];
        r->grad.beta = t_floats_in(r->beta, G);
    }
    if (s->frozen) {
        r->frozen = (unsigned char *)t_host((size_t)G);
        for (int64_t g = 0; g < G; g++) r->frozen[g] = (unsigned char)(g % 3 == 1 ? 1 + g % 200 : 0);
        r->grad.frozen = (const uint8_t *)t_in(r->frozen, (size_t)G);
    }
    r->out = t_mat_make(s->out, lin_is_grad(s->op) ? G : 1, wgrad ? N : bgrad ? 1 : r->capacity,
                        fwd || bgrad ? N : K, s->pad, lin_is_grad(s->op) ? s->gap : 0,
                        lin_is_grad(s->op) ? s->grad : T_PACKED, T_POISON);
    if (lin_is_grad(s->op) ? s->beta || (s->main_grad && !s->overwrite) : s->add) {
        const int64_t row = r->out.cols, per_group = r->out.rows * row;
        const int64_t count = lin_is_grad(s->op) ? G * per_group : r->live * row;
        for (int64_t i = 0; i < count; i++) {
            const int64_t g = lin_is_grad(s->op) ? i / per_group : 0;
            /* destinations that must not be read or changed hold values that arithmetic would not preserve */
            if (r->frozen && r->frozen[g])
                r->out.v[i] = i % 3 == 0 ? -0.0 : i % 3 == 1 ? (double)NAN : (double)INFINITY;
            else if (lin_is_grad(s->op) && s->sizes[g] == 0 && lin_beta(r, g) == 1.0)
                r->out.v[i] = i % 4 == 0 ? -0.0 : i % 4 == 1 ? (double)NAN : i % 4 == 2 ? -(double)INFINITY : 0.5;
            else if (lin_is_grad(s->op) && lin_beta(r, g) == 0.0)
                r->out.v[i] = (double)NAN;
            else
                r->out.v[i] = ints ? (double)t_int(-4, 4) + 0.5 : ref_round(s->out, t_real());
        }
        t_mat_put(&r->out);
    }
    r->before = t_mat_bits(&r->out);
    if (fwd) r->d.y = &r->out.mat;
    if (dgrad) r->d.dx = &r->out.mat;
    r->d.y_add = s->add;
    if (lin_is_grad(s->op)) {
        r->grad.main_grad = s->main_grad;
        r->grad.overwrite = s->overwrite;
        r->grad.mat = &r->out.mat;
        if (wgrad) r->d.dw = &r->grad;
        else if (!s->no_db) r->d.db = &r->grad;
    }
    if (s->dscale) {
        r->dscale_start = (double *)t_host((size_t)r->capacity * sizeof *r->dscale_start);
        r->d.d_bias_scale = t_floats_out(r->capacity);
        r->d.d_bias_scale_add = s->dscale == 2;
        if (s->dscale == 2) {
            for (int64_t i = 0; i < r->capacity; i++) r->dscale_start[i] = (double)t_int(-4, 4);
            {
                const float *values = t_floats_in(r->dscale_start, r->capacity);
                t_upload(r->d.d_bias_scale, t_get(values, (size_t)r->capacity * 4), (size_t)r->capacity * 4);
            }
        }
    }
}

/* Elements to compare, in order. */
typedef struct lin_list {
    double *got, *want, *bound;
    int64_t *at; /* of each in the output */
    int64_t n;
} lin_list;

static lin_list lin_list_of(int64_t n) {
    lin_list l;
    l.got = (double *)t_host((size_t)n * sizeof(double));
    l.want = (double *)t_host((size_t)n * sizeof(double));
    l.bound = (double *)t_host((size_t)n * sizeof(double));
    l.at = (int64_t *)t_host((size_t)n * sizeof(int64_t));
    l.n = 0;
    return l;
}

static void lin_compare(const char *what, const lin_run *r, gmm_dtype dtype, const lin_list *l) {
    if (r->spec.fill == T_INTS) t_exact(what, dtype, l->got, l->want, l->n);
    else t_near(what, l->got, l->want, l->bound, l->n);
}

static ref_linear lin_reference(const lin_run *r) {
    ref_linear l;
    memset(&l, 0, sizeof l);
    l.in = r->spec.K;
    l.out = r->spec.N;
    l.offsets = r->offsets;
    l.x = r->x_rows;
    l.w = r->w.v;
    l.dy = r->dy_rows;
    l.bias = r->bias.v;
    l.scale = r->scale;
    l.prob = r->prob;
    l.alpha = r->alpha;
    l.start = r->out.v;
    return l;
}

void (lin_check)(const lin_run *r) {
    const lin_spec *s = &r->spec;
    const ref_linear l = lin_reference(r);
    const int grads = lin_is_grad(s->op);
    const int64_t G = s->groups, cols = r->out.cols, size = ref_bytes(s->out);
    const int64_t total = r->out.count * r->out.rows * cols;
    const unsigned char *bits = (const unsigned char *)t_mat_bits(&r->out), *before = (const unsigned char *)r->before;
    /* the fp64 reference is slow: above 4 million products a sample of the elements is compared */
    const double work = grads ? (double)r->live * (double)s->N * (s->op == GMM_OP_LINEAR_WGRAD ? (double)s->K : 1.0)
                              : (double)r->live * (double)s->N * (double)s->K;
    const int64_t step = work > 4e6 ? t_step((int64_t)work, 4000000, cols) : 1;
    lin_list list = lin_list_of(total);
    uint32_t fault = 1;
    int64_t i = 0, unwritten = 0;

    lin_note(r);
    t_picked(list.got, list.at, bits);
    t_download(&fault, r->fault, sizeof fault);
    T_CHECK(fault == r->faults, "fault bits %x, want %x", fault, r->faults);
    for (int64_t g = 0; g < G; g++) {
        const int64_t first = grads ? 0 : r->offsets[g], last = grads ? r->out.rows : r->offsets[g + 1];
        const double beta = lin_beta(r, g);
        if (grads && (s->no_db || (r->frozen && r->frozen[g]) || (s->sizes[g] == 0 && beta == 1.0))) {
            t_same("group that is not touched", bits + g * r->out.rows * cols * size,
                   before + g * r->out.rows * cols * size, (size_t)(r->out.rows * cols * size));
            continue;
        }
        if (grads && s->sizes[g] == 0 && beta == 0.0)
            t_bytes("gradient of an empty group", bits + g * r->out.rows * cols * size, 0,
                    (size_t)(r->out.rows * cols * size));
        for (int64_t row = first; row < last; row++)
            for (int64_t col = 0; col < cols; col++, i++) {
                const int64_t at = (grads ? g * r->out.rows + row : row) * cols + col;
                double magnitude;
                if (i % step != 0) { /* not compared, but written */
                    unwritten += isnan(ref_load(s->out, bits, at)) != 0;
                    continue;
                }
                list.at[list.n] = at;
                list.got[list.n] = ref_load(s->out, bits, at);
                list.want[list.n] = ref_linear_at(&l, s->op, g, row, col, beta, &magnitude);
                list.bound[list.n] = ref_bound(s->out, ref_linear_terms(&l, s->op, g), magnitude, list.want[list.n]);
                list.n++;
            }
    }
    lin_compare(lin_op(s->op), r, s->out, &list);
    T_CHECK(unwritten == 0, "%lld elements that are not compared are NaN", (long long)unwritten);
    if (!grads) { /* rows beyond the sum of the sizes */
        const size_t at = (size_t)(r->live * cols * size), rest = (size_t)((r->capacity - r->live) * cols * size);
        if (s->tail == GMM_TAIL_ZERO) t_bytes("zeroed tail", bits + at, 0, rest);
        else t_same("kept tail", bits + at, before + at, rest);
    }
    if (s->dscale) {
        const double *got = t_floats_get(r->d.d_bias_scale, r->capacity);
        const unsigned char *raw = (const unsigned char *)t_get(r->d.d_bias_scale, (size_t)r->capacity * 4);
        list = lin_list_of(r->capacity);
        for (int64_t g = 0; g < G; g++)
            for (int64_t row = r->offsets[g]; row < r->offsets[g + 1]; row++) {
                const double start = s->dscale == 2 ? r->dscale_start[row] : 0.0;
                double magnitude;
                list.got[list.n] = got[row];
                list.want[list.n] = ref_bias_scale_at(&l, g, row, &magnitude) + start;
                list.bound[list.n] = ref_bound(GMM_F32, s->N, magnitude + fabs(start), list.want[list.n]);
                list.n++;
            }
        lin_compare("d_bias_scale", r, GMM_F32, &list);
        for (int64_t row = r->live; row < r->capacity; row++)
            if (s->tail == GMM_TAIL_ZERO) t_bytes("zeroed tail of d_bias_scale", raw + row * 4, 0, 4);
            else if (s->dscale == 1) t_bytes("kept tail of d_bias_scale", raw + row * 4, 0xFF, 4);
            else T_CHECK(got[row] == r->dscale_start[row], "tail of d_bias_scale");
    }
}

void (lin_test)(const lin_spec *spec) {
    lin_run r;
    lin_build(&r, spec);
    T_OK(t_linear(T.ctx, spec->op, &r.d));
    lin_check(&r);
}

/* Replaces the operands whose rows are gathered by copies with the product's rows. */
static void gather_by_hand(lin_run *h) {
    for (int i = 0; i < 2; i++) { /* x, dy */
        const gmm_mat **operand = i ? &h->d.dy : &h->d.x;
        const int32_t **index = i ? &h->d.dy_index : &h->d.x_index;
        const double **rows = i ? &h->dy_rows : &h->x_rows;
        t_mat *m = i ? &h->dy : &h->x;
        if (!*index) continue;
        *m = t_mat_make(h->spec.in, 1, h->capacity, m->cols, h->spec.pad, 0, T_PACKED, T_REALS);
        memcpy(m->v, *rows, (size_t)(h->capacity * m->cols) * sizeof *m->v);
        t_mat_put(m);
        *rows = m->v;
        *operand = &m->mat;
        *index = NULL;
    }
    h->faults = 0;
}

void (lin_by_hand)(const lin_spec *spec) {
    const uint64_t seed = t_rand();
    gmm_info info = GMM_ZERO;
    lin_run r, h;
    void *want;
    t_reseed(seed);
    lin_build(&h, spec);
    T_OK(gmm_linear_query(T.ctx, spec->op, &h.d, &info));
    /* a query does not read the addresses of host tables, at which WGMMA may not serve the call */
    if (strstr(info.note, "for addresses at multiples")) info.engine = GMM_ENGINE_MMA;
    gather_by_hand(&h);
    h.options.engine = info.engine;
    h.d.options = &h.options;
    T_OK(t_linear(T.ctx, spec->op, &h.d));
    lin_check(&h);
    want = t_mat_bits(&h.out);
    for (int limit = 0; limit < 2; limit++) { /* workspace for copies of the rows or, if there is another way, none */
        t_reseed(seed);
        lin_build(&r, spec);
        r.options.engine = info.engine;
        r.options.workspace_limit = limit;
        r.d.options = &r.options;
        if (limit) { /* the kernels of WGMMA that gather rows themselves */
            const gmm_status s = gmm_linear_query(T.ctx, spec->op, &r.d, &info);
            if (info.engine != GMM_ENGINE_WGMMA || spec->op == GMM_OP_LINEAR_WGRAD) continue;
            T_CHECK(s == GMM_OK && strstr(info.note, "gather rows"), "%s: %s", gmm_status_name(s), info.note);
        }
        T_OK(t_linear(T.ctx, spec->op, &r.d));
        lin_check(&r);
        t_same("gathered rows", t_mat_bits(&r.out), want,
               (size_t)(r.out.count * r.out.rows * r.out.cols * ref_bytes(r.out.dtype)));
        if (spec->dscale)
            t_same("d_bias_scale of gathered rows", t_get(r.d.d_bias_scale, (size_t)r.capacity * 4),
                   t_get(h.d.d_bias_scale, (size_t)r.capacity * 4), (size_t)r.capacity * 4);
    }
}

void *lin_group_bits(const lin_run *r, int64_t g, size_t *bytes) {
    const int64_t row = r->out.cols * ref_bytes(r->out.dtype);
    const int64_t first = lin_is_grad(r->spec.op) ? g * r->out.rows : r->offsets[g];
    const int64_t rows = lin_is_grad(r->spec.op) ? r->out.rows : r->spec.sizes[g];
    unsigned char *part = (unsigned char *)t_host((size_t)(rows * row));
    memcpy(part, (unsigned char *)t_mat_bits(&r->out) + first * row, (size_t)(rows * row));
    *bytes = (size_t)(rows * row);
    return part;
}

static gmm_mat lin_shift(const t_mat *m, int64_t row, int64_t group) {
    gmm_mat shifted = m->mat;
    shifted.table = NULL;
    shifted.flags = 0;
    shifted.group_stride = 0;
    shifted.data = (char *)m->table[group] + row * m->ld * ref_bytes(m->dtype);
    return shifted;
}

/* Calls `size` rows of group g, from its row `first` on, as the only group, and requires the bits that `r` has. */
static void lin_rows_alone(const lin_run *r, int64_t g, int64_t first, int64_t size) {
    const lin_spec *s = &r->spec;
    const int64_t row = r->offsets[g] + first;
    gmm_groups one = r->groups;
    gmm_linear d = r->d;
    gmm_mat x, w, dy, bias, out;
    gmm_grad grad = r->grad;
    t_mat result;
    size_t bytes, skipped = 0;
    const char *want = (const char *)lin_group_bits(r, g, &bytes);
    one.count = 1;
    one.capacity = size;
    one.splits = t_in(&size, sizeof size);
    one.dtype = GMM_I64;
    one.form = GMM_SPLIT_SIZES;
    one.on_host = 0;
    d.groups = &one;
    if (d.x) x = lin_shift(&r->x, d.x_index ? 0 : row, 0), d.x = &x;
    if (d.dy) dy = lin_shift(&r->dy, d.dy_index ? 0 : row, 0), d.dy = &dy;
    if (d.x_index) d.x_index += row;
    if (d.dy_index) d.dy_index += row;
    if (d.w) w = lin_shift(&r->w, 0, g), d.w = &w;
    if (d.bias) bias = lin_shift(&r->bias, 0, g), d.bias = &bias;
    if (d.bias_scale) d.bias_scale += row;
    if (d.prob) d.prob += row;
    if (d.alpha && d.alpha_per_group) d.alpha += g;
    result = t_mat_out(r->out.dtype, 1, lin_is_grad(s->op) ? r->out.rows : size, r->out.cols);
    out = result.mat;
    grad.mat = &out;
    if (d.y) d.y = &out;
    if (d.dx) d.dx = &out;
    if (d.dw) d.dw = &grad;
    if (d.db) d.db = &grad;
    if (!lin_is_grad(s->op)) {
        skipped = (size_t)(first * r->out.cols * ref_bytes(r->out.dtype));
        bytes = (size_t)(size * r->out.cols * ref_bytes(r->out.dtype));
    }
    T_OK(t_linear(T.ctx, s->op, &d));
    t_same("group alone", want + skipped, t_mat_bits(&result), bytes);
}
#define lin_rows_alone(...) T_CALL(lin_rows_alone, __VA_ARGS__)

void (lin_alone)(const lin_run *r) {
    const int64_t groups = r->spec.groups, step = groups > 16 ? groups / 16 : 1;
    for (int64_t g = 0; g < groups; g += step) lin_rows_alone(r, g, 0, r->spec.sizes[g]);
}

/* ------------------------------------------------------------------------------------------------------ Cases --- */

static const gmm_op ops[] = {GMM_OP_LINEAR_FWD, GMM_OP_LINEAR_DGRAD, GMM_OP_LINEAR_WGRAD, GMM_OP_LINEAR_BGRAD};

/* Shapes, compared with one-group calls. spread: rows are distributed over the groups at random. */
static const struct { int32_t groups; int64_t rows, K, N; int last_empty; const int64_t *sizes; } shapes[] = {
    {3, 768, 128, 128, 0, (const int64_t[]){128, 256, 384}},
    /* larger than every cache block of the CPU engine */
    {3, 520, 300, 1040, 1, NULL}, {6, 520, 300, 1040, 1, NULL},
    {8, 15, 128, 512, 0, NULL}, {1, 127, 128, 512, 0, NULL}, {8, 1027, 128, 512, 0, NULL},
    {16, 10027, 128, 512, 0, NULL},
};

static int64_t *spread(int32_t groups, int64_t rows, int last_empty) {
    int64_t *sizes = (int64_t *)t_host((size_t)groups * sizeof *sizes);
    while (rows > 0) {
        const int64_t part = t_int(1, rows < 40 ? rows : rows / 3);
        sizes[t_int(0, groups - 1 - last_empty)] += part;
        rows -= part;
    }
    return sizes;
}

static void shape_case(int arg) {
    const int i = arg / 9;
    lin_spec s = {.op = ops[arg / 3 % 3], .in = lin_dtype(arg % 3), .groups = shapes[i].groups, .K = shapes[i].K,
                  .N = shapes[i].N};
    lin_run r;
    s.out = s.in;
    s.sizes = shapes[i].sizes ? shapes[i].sizes : spread(s.groups, shapes[i].rows, shapes[i].last_empty);
    s.fill = T_INTS;
    if (shapes[i].rows < 5000) lin_test(&s);
    s.fill = T_REALS;
    lin_build(&r, &s);
    T_OK(t_linear(T.ctx, s.op, &r.d));
    lin_check(&r);
    lin_alone(&r);
}

/* The bits of a row do not depend on how many rows its group has, nor on its place among them: runs of rows alone,
   whose lengths are at and beside the heights of tiles. arg: 3 times dgrad, plus the dtype. */
static void batch_invariance(int arg) {
    static const int64_t sizes[] = {5, 390, 0}, lengths[] = {1, 7, 8, 16, 17, 63, 64, 65, 127, 129, 192, 257, 389};
    lin_spec s = {.op = arg / 3 ? GMM_OP_LINEAR_DGRAD : GMM_OP_LINEAR_FWD, .in = lin_dtype(arg % 3), .groups = 3,
                  .K = 264, .N = 136, .sizes = sizes, .alpha = 2, .fill = T_REALS};
    lin_run r;
    s.out = s.in;
    lin_build(&r, &s);
    T_OK(t_linear(T.ctx, s.op, &r.d));
    lin_check(&r);
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        lin_rows_alone(&r, 1, 0, lengths[i]);
        lin_rows_alone(&r, 1, 390 - lengths[i], lengths[i]);
    }
}

/* Runs the case with integer and with real data. */
static void both(lin_spec s) {
    s.fill = T_INTS;
    lin_test(&s);
    s.fill = T_REALS;
    lin_test(&s);
}
#define both(...) T_CALL(both, __VA_ARGS__)

static void main_grad_half(int arg) {
    static const int64_t sizes[] = {17, 0, 31, 5};
    lin_spec s = {.op = GMM_OP_LINEAR_WGRAD, .in = lin_dtype(arg), .out = GMM_F32, .groups = 4, .K = 69, .N = 24,
                  .sizes = sizes, .main_grad = 1, .fill = T_INTS};
    lin_run r;
    lin_build(&r, &s);
    for (int64_t i = 0; i < r.out.count * r.out.rows * r.out.cols; i++) r.out.v[i] = 0.5;
    t_mat_put(&r.out);
    r.before = t_mat_bits(&r.out);
    T_OK(t_linear(T.ctx, s.op, &r.d));
    lin_check(&r);
    both(s);
    s.out = lin_dtype(arg);
    both(s);
}

/* Rows at multiples of 16 bytes that end between them: what follows a row of the result keeps its bits, whatever tile
   stores it. A TMA store writes whole units of 16 bytes. */
static void rows_end_between(int arg) {
    static const int64_t sizes[] = {70, 0, 260, 5}, features[][2] = {{61, 69}, {68, 140}, {300, 63}, {9, 513}};
    lin_spec s = {.op = ops[arg / 3], .in = lin_dtype(arg % 3), .groups = 4, .sizes = sizes};
    T.align_rows = 1;
    for (int i = 0; i < T_COUNT(features); i++)
        for (int f32 = 0; f32 < 2; f32++) {
            s.K = features[i][0];
            s.N = features[i][1];
            s.out = f32 ? GMM_F32 : s.in;
            s.grad = f32 ? T_TABLE : T_PACKED;
            for (int tile = 0; tile <= 5; tile++) {
                lin_run r;
                lin_build(&r, &s);
                r.options.tile = tile; /* 0: chosen by the engine, as are those that it does not have */
                r.d.options = &r.options;
                T_OK(t_linear(T.ctx, s.op, &r.d));
                lin_check(&r);
            }
        }
}

static void overwrite_nan(int arg) {
    static const int64_t sizes[] = {3, 0, 20};
    lin_spec s = {.op = GMM_OP_LINEAR_WGRAD, .in = lin_dtype(arg), .out = GMM_F32, .groups = 3, .K = 40, .N = 33,
                  .sizes = sizes, .main_grad = 1, .overwrite = 1};
    both(s); /* the destination is poison (NaN), the reference is finite */
    s.op = GMM_OP_LINEAR_BGRAD;
    both(s);
}

/* bgrad reads the bias for d_bias_scale alone, and looks at it for nothing else. */
static void bgrad_without_bias(int arg) {
    static const int64_t sizes[] = {3, 0, 20};
    const lin_spec s = {.op = GMM_OP_LINEAR_BGRAD, .in = GMM_BF16, .groups = 3, .K = 40, .N = 33, .sizes = sizes};
    const gmm_mat nowhere = gmm_mat_packed(GMM_U8, NULL);
    lin_run r;
    (void)arg;
    lin_build(&r, &s);
    r.d.bias = &nowhere;
    T_OK(t_linear(T.ctx, s.op, &r.d));
    lin_check(&r);
}

static void empty_groups(int arg) {
    static const int64_t sizes[][5] = {{0, 4, 9, 1, 6}, {5, 7, 0, 2, 8}, {5, 7, 3, 2, 0}, {5, 0, 0, 2, 8},
                                        {0, 0, 0, 0, 3}};
    lin_spec s = {.op = ops[arg / 3], .in = lin_dtype(arg % 3), .out = lin_dtype(arg % 3), .groups = 5, .K = 24,
                  .N = 19};
    for (int i = 0; i < 5; i++) {
        s.sizes = sizes[i];
        s.extra = i;
        both(s);
    }
    /* a negative alpha must not give -0 in empty groups */
    s.alpha = 2;
    both(s);
}

static void no_rows(int arg) {
    static const int64_t sizes[4] = {0, 0, 0, 0};
    /* kind: 0 capacity 0, 1 capacity 256 with the tail kept, 2 zeroed, 3 one group */
    const int op = arg % 4, kind = arg / 4;
    for (int d = 0; d < 3; d++) {
        lin_spec s = {.op = ops[op], .in = lin_dtype(d), .out = lin_dtype(d), .groups = kind == 3 ? 1 : 4, .K = 20,
                      .N = 9, .sizes = sizes, .extra = kind == 0 ? 0 : kind == 3 ? d * 5 : 256,
                      .tail = kind == 2 ? GMM_TAIL_ZERO : GMM_TAIL_KEEP};
        both(s);
        if (lin_is_grad(s.op)) {
            s.main_grad = 1;
            both(s);
        }
    }
}

/* Capacity 0 needs no activation buffers. */
static void no_memory(int arg) {
    static const int64_t sizes[2] = {0, 0};
    lin_spec s = {.op = ops[arg], .groups = 2, .K = 5, .N = 7, .sizes = sizes, .fill = T_INTS};
    lin_run r;
    lin_build(&r, &s);
    r.x.mat.data = r.dy.mat.data = NULL;
    if (!lin_is_grad(s.op)) r.out.mat.data = NULL;
    T_OK(t_linear(T.ctx, s.op, &r.d));
    if (lin_is_grad(s.op)) lin_check(&r);
}

static void keep_bits(int arg) {
    static const int64_t sizes[] = {4, 0, 7, 0, 0};
    lin_spec s = {.op = arg / 3 ? GMM_OP_LINEAR_BGRAD : GMM_OP_LINEAR_WGRAD, .in = lin_dtype(arg % 3), .groups = 5,
                  .K = 12, .N = 10, .sizes = sizes, .main_grad = 1};
    for (int d = 0; d < 3; d++) { /* lin_build fills destinations of empty groups with -0.0, NaN and -Inf */
        s.out = lin_dtype(d);
        s.beta = 0;
        both(s);
        s.beta = 1;
        both(s);
    }
}

static void tails(int arg) {
    static const int64_t sizes[] = {9, 0, 30, 1};
    for (int d = 0; d < 3; d++)
        for (int add = 0; add < 2; add++) {
            lin_spec s = {.op = ops[arg / 2], .in = lin_dtype(d), .out = lin_dtype(d), .groups = 4, .K = 25, .N = 18,
                          .sizes = sizes, .extra = 80, .tail = arg % 2 ? GMM_TAIL_ZERO : GMM_TAIL_KEEP, .pad = 3};
            s.add = add;
            if (s.op == GMM_OP_LINEAR_BGRAD) {
                s.bias = s.in;
                s.dscale = 1 + add;
                s.scale = 1;
            }
            both(s);
        }
}

static void many_groups(int arg) {
    static const int32_t counts[] = {1, 2, 63, 64, 65, 128, 256, 512};
    const int32_t G = counts[arg / 4];
    for (int d = 0; d < 3; d++) {
        lin_spec s = {.op = ops[arg % 4], .in = lin_dtype(d), .out = lin_dtype(d), .groups = G, .K = 13, .N = 11};
        s.sizes = spread(G, 3 * G, 0);
        s.w = s.grad = (t_form)d;
        both(s);
    }
}

static void skewed(int arg) {
    const int kind = arg / 4;
    for (int d = 0; d < 3; d++) {
        lin_spec s = {.op = ops[arg % 4], .in = lin_dtype(d), .out = lin_dtype(d), .groups = 24, .K = 31, .N = 26};
        int64_t *sizes = (int64_t *)t_host(24 * sizeof *sizes);
        for (int g = 0; g < 24; g++)
            sizes[g] = kind == 0 ? (g == 13 ? 301 : 0) : kind == 1 ? 400 / ((g + 1) * (g + 1)) : 1;
        s.sizes = sizes;
        both(s);
    }
}

static void odd_shapes(int arg) {
    static const int64_t dims[] = {1, 8, 24, 69, 136, 2880};
    static const int64_t sizes[] = {3, 0, 14, 7};
    for (int i = 0; i < 6; i++)
        for (int j = 0; j < 6; j++) {
            lin_spec s = {.op = ops[arg / 3], .in = lin_dtype(arg % 3), .out = lin_dtype(arg % 3), .groups = 4,
                          .K = dims[i], .N = dims[j], .sizes = sizes};
            if ((i == 5 && j > 3) || (j == 5 && i > 3)) continue; /* the largest take no other code path */
            s.fill = (i + j) % 2 ? T_INTS : T_REALS;
            lin_test(&s);
        }
}

static void strides(int arg) {
    static const int64_t sizes[] = {6, 13, 0, 2};
    for (int64_t pad = 0; pad < 12; pad += 3)
        for (int64_t gap = 0; gap < 20; gap += 7) {
            lin_spec s = {.op = ops[arg / 3], .in = lin_dtype(arg % 3), .out = lin_dtype((arg + 1) % 3), .groups = 4,
                          .K = 21, .N = 16, .sizes = sizes, .extra = 4, .pad = pad, .gap = gap};
            s.bias = s.op == GMM_OP_LINEAR_FWD ? s.in : GMM_NONE;
            both(s);
            s.w = s.grad = s.bias_form = T_TABLE;
            both(s);
        }
}

static void tables(int arg) {
    static const int64_t sizes[] = {3, 1, 8, 0, 5, 2, 4};
    for (int form = 0; form < 27; form++) {
        lin_spec s = {.op = ops[arg / 3], .in = lin_dtype(arg % 3), .out = lin_dtype(arg % 3), .groups = 7, .K = 10,
                      .N = 14, .sizes = sizes, .w = (t_form)(form % 3), .grad = (t_form)(form / 3 % 3),
                      .bias_form = (t_form)(form / 9)};
        if (s.op == GMM_OP_LINEAR_FWD) s.bias = s.out;
        both(s);
    }
}

/* Two experts with the same weight matrix. */
static void shared_weight(int arg) {
    static const int64_t sizes[] = {3, 6, 4};
    lin_spec s = {.op = ops[arg / 3], .in = lin_dtype(arg % 3), .out = GMM_F32, .groups = 3, .K = 9, .N = 12,
                  .sizes = sizes, .w = T_TABLE_HOST, .fill = T_INTS};
    lin_run r;
    lin_build(&r, &s);
    r.w.table[2] = r.w.table[0];
    memcpy(r.w.v + 2 * 9 * 12, r.w.v, 9 * 12 * sizeof *r.w.v);
    T_OK(t_linear(T.ctx, s.op, &r.d));
    lin_check(&r);
}

static void alpha_beta(int arg) {
    static const int64_t sizes[] = {3, 0, 8, 11, 5, 0, 0, 2};
    for (int alpha = 0; alpha < 3; alpha++)
        for (int beta = 0; beta < 2; beta++) {
            lin_spec s = {.op = ops[arg / 3], .in = lin_dtype(arg % 3), .out = beta ? GMM_F32 : lin_dtype(arg % 3),
                          .groups = 8, .K = 22, .N = 17, .sizes = sizes, .alpha = alpha, .add = beta, .main_grad = 1};
            s.beta = beta && lin_is_grad(s.op);
            both(s);
            s.main_grad = 0; /* beta per group takes precedence over main_grad and overwrite */
            both(s);
        }
}

static void dtypes(int arg) {
    static const int64_t sizes[] = {5, 0, 12};
    for (int in = 0; in < 3; in++)
        for (int out = 0; out < 3; out++)
            for (int bias = 0; bias < 4; bias++) {
                lin_spec s = {.op = ops[arg], .in = lin_dtype(in), .out = lin_dtype(out), .groups = 3, .K = 20, .N = 15,
                              .sizes = sizes, .bias = bias ? lin_dtype(bias - 1) : GMM_NONE};
                if (bias && s.op != GMM_OP_LINEAR_FWD && s.op != GMM_OP_LINEAR_BGRAD) continue;
                s.dscale = s.op == GMM_OP_LINEAR_BGRAD && bias;
                both(s);
            }
}

static void biases(int arg) {
    static const int64_t widths[] = {8, 9, 64, 515, 3072}, sizes[] = {2, 0, 5, 1};
    for (int i = 0; i < 5; i++) {
        lin_spec s = {.op = GMM_OP_LINEAR_FWD, .in = lin_dtype(arg), .out = lin_dtype(arg), .bias = lin_dtype(arg),
                      .groups = 4, .K = 8, .N = widths[i], .sizes = sizes};
        both(s);
        s.scale = 1;
        s.extra = 3;
        both(s);
        s.add = 1;
        s.alpha = 2;
        both(s);
    }
}

static void bias_scale(int arg) {
    static const int64_t sizes[] = {40, 0, 33};
    lin_spec s = {.op = GMM_OP_LINEAR_FWD, .in = lin_dtype(arg), .out = lin_dtype(arg), .bias = GMM_F32, .groups = 3,
                  .K = 16, .N = 20, .sizes = sizes, .scale = 1, .extra = 5, .tail = GMM_TAIL_ZERO};
    both(s);
    s.bias = GMM_NONE; /* bias_scale without a bias has no effect */
    both(s);
}

/* Rows times their probability, behind alpha and bias, before the old value. arg: forward or dgrad, dtype. */
static void probs(int arg) {
    static const int64_t sizes[] = {40, 0, 33, 1, 130};
    for (int mode = 0; mode < 6; mode++) {
        lin_spec s = {.op = ops[arg / 3], .in = lin_dtype(arg % 3), .groups = 5, .K = 72, .N = 136, .sizes = sizes,
                      .prob = 1, .extra = 5, .tail = mode % 2 ? GMM_TAIL_ZERO : GMM_TAIL_KEEP, .add = mode / 2 == 1,
                      .alpha = mode / 2};
        s.out = mode % 2 ? GMM_F32 : s.in;
        if (s.op == GMM_OP_LINEAR_FWD && mode != 3) s.bias = lin_dtype(mode % 3), s.scale = mode % 2;
        both(s);
        s.K = 41; /* rows at odd addresses */
        s.N = 19;
        both(s);
    }
}

/* Rows that are gathered equal rows that were permuted before. arg: operation, dtype. */
static void gathered(int arg) {
    static const int64_t sizes[][5] = {{40, 0, 33, 1, 130}, {0, 0, 0, 0, 7}, {1, 65, 0, 0, 0}};
    static const int64_t features[][2] = {{200, 136}, {41, 19}, {1, 72}, {64, 1}};
    for (int i = 0; i < 20; i++) {
        lin_spec s = {.op = ops[arg / 3], .in = lin_dtype(arg % 3), .groups = 5, .K = features[i % 4][0],
                      .N = features[i % 4][1], .sizes = sizes[i % 3], .index = (lin_index)(1 + i % 5),
                      .index_div = i % 4 == 1 ? 0 : 1 + i % 4, .extra = i % 3 * 6, .pad = i % 8 == 3 ? 3 : 0,
                      .tail = i % 2 ? GMM_TAIL_ZERO : GMM_TAIL_KEEP, .fill = i % 2 ? T_REALS : T_INTS};
        T.align_rows = i / 4 % 2;
        s.out = i % 3 ? s.in : GMM_F32;
        s.add = i % 4 == 2 || i % 5 == 1;
        if (lin_is_grad(s.op)) {
            s.beta = s.frozen = i % 4 > 1;
            s.main_grad = i % 4 == 1;
        }
        if (s.op == GMM_OP_LINEAR_WGRAD) {
            s.plain = i % 3;
            s.alpha = 2;
        }
        if (s.op == GMM_OP_LINEAR_FWD && i % 2) s.bias = GMM_F32, s.scale = 1;
        if (s.op == GMM_OP_LINEAR_BGRAD) {
            s.scale = i % 3 == 1;
            if (i % 4) s.bias = s.in, s.dscale = 1 + i % 2, s.no_db = i % 4 == 3;
        }
        lin_by_hand(&s);
    }
}

/* The same with so many tiles that engines choose large ones, and the bits of rows alone. */
static void gathered_wide(int arg) {
    static const int64_t sizes[] = {500, 0, 400, 1, 300};
    lin_spec s = {.op = ops[arg / 3], .in = lin_dtype(arg % 3), .groups = 5, .K = 72, .N = 3072, .sizes = sizes,
                  .index = LIN_NEGATIVE, .index_div = 2, .fill = T_REALS};
    lin_run r;
    T.align_rows = 1;
    s.out = s.in;
    if (s.op == GMM_OP_LINEAR_DGRAD) s.K = 3072, s.N = 72;
    if (s.op == GMM_OP_LINEAR_WGRAD) s.K = 744, s.N = 760;
    lin_by_hand(&s);
    lin_build(&r, &s);
    T_OK(t_linear(T.ctx, s.op, &r.d));
    if (!lin_is_grad(s.op)) lin_rows_alone(&r, 0, 63, 66);
}

/* options.workspace_limit bounds the copies to the byte; a query without addresses reports what a call needs. */
static void gathered_limit(int arg) {
    static const int64_t sizes[] = {40, 0, 33};
    lin_spec s = {.op = ops[arg], .in = GMM_BF16, .out = GMM_BF16, .groups = 3, .K = 136, .N = 200, .sizes = sizes,
                  .index = LIN_REPEATED, .fill = T_INTS};
    gmm_info info = GMM_ZERO, blind = GMM_ZERO, limited = GMM_ZERO;
    gmm_linear d;
    lin_run r;
    T.align_rows = 1;
    lin_build(&r, &s);
    r.options.sm_limit = T.gpu ? 3 : 0;
    r.d.options = &r.options;
    d = r.d;
    T_OK(gmm_linear_query(T.ctx, s.op, &d, &info));
    r.options.engine = info.engine;
    r.options.workspace_limit = (int64_t)info.workspace_bytes;
    T_OK(t_linear(T.ctx, s.op, &d));
    lin_check(&r);
    T_OK(gmm_linear_query(T.ctx, s.op, &d, &limited));
    T_CHECK(limited.workspace_bytes == info.workspace_bytes, "%zu, %zu", limited.workspace_bytes, info.workspace_bytes);
    if (d.x) r.x.mat.data = NULL;
    if (d.dy) r.dy.mat.data = NULL;
    T_OK(gmm_linear_query(T.ctx, s.op, &d, &blind));
    T_CHECK(blind.workspace_bytes >= info.workspace_bytes, "%zu, %zu", blind.workspace_bytes, info.workspace_bytes);
    if (!T.gpu || strstr(info.note, "gathered in") == NULL) return;
    r.options.workspace_limit--;
    memset(&limited, 0, sizeof limited);
    if (gmm_linear_query(T.ctx, s.op, &d, &limited) == GMM_OK)
        T_CHECK(limited.workspace_bytes < info.workspace_bytes && strstr(limited.note, "gather rows"), "%s",
                limited.note);
    else
        T_CHECK(strstr(gmm_last_error(T.ctx), "options.workspace_limit"), "%s", gmm_last_error(T.ctx));
}

/* A matrix without rows needs no memory: every entry that is not negative is past it. */
static void gathered_none(int arg) {
    static const int64_t sizes[] = {3, 0, 5};
    const int32_t beyond[8] = {-1, 0, INT32_MAX, 1, -5, 0, 2, INT32_MIN};
    const int32_t none[8] = {-1, -1, -2, -9, -1, INT32_MIN, -1, -3};
    for (int k = 0; k < 6; k++) { /* f32; bf16 in aligned rows, with and without a limit of the workspace */
        const int past = k % 2, wide = k > 1;
        lin_spec s = {.op = ops[arg], .in = wide ? GMM_BF16 : GMM_F32, .out = GMM_F32, .groups = 3,
                      .K = wide ? 64 : 9, .N = wide ? 72 : 7, .sizes = sizes, .index = LIN_IDENTITY, .fill = T_INTS};
        gmm_info info = GMM_ZERO;
        lin_run r;
        T.align_rows = wide;
        lin_build(&r, &s);
        r.options.workspace_limit = k > 3;
        r.d.options = &r.options;
        if (k > 3 && (gmm_linear_query(T.ctx, s.op, &r.d, &info) != GMM_OK)) continue;
        r.d.index_rows = 0;
        r.x.mat.data = r.dy.mat.data = NULL;
        if (r.d.x) r.d.x_index = (const int32_t *)t_in(past ? beyond : none, sizeof none);
        if (r.d.dy) r.d.dy_index = (const int32_t *)t_in(past ? beyond : none, sizeof none);
        r.x_rows = r.dy_rows = (const double *)t_host(8 * 72 * sizeof(double));
        r.faults = past ? (uint32_t)GMM_FAULT_INDEX : 0;
        T_OK(t_linear(T.ctx, s.op, &r.d));
        lin_check(&r);
        r.groups.fault = NULL; /* not wanted */
        t_mat_poison(&r.out);
        T_OK(t_linear(T.ctx, s.op, &r.d));
        lin_check(&r);
        r.groups.capacity = INT64_MAX;
        if (s.op == GMM_OP_LINEAR_BGRAD) /* whose other operands do not have so many rows */
            T_REFUSED(GMM_E_OVERFLOW, gmm_linear_bgrad(T.ctx, &r.d, NULL, 0, T.stream), "dy_index", "64 bits", NULL);
    }
}

/* Rows of quantized operands are not gathered. */
static void gathered_quantized(int arg) {
    static const int64_t sizes[] = {3, 0, 5};
    lin_spec s = {.op = ops[arg], .in = GMM_BF16, .out = GMM_BF16, .groups = 3, .K = 32, .N = 32, .sizes = sizes,
                  .index = LIN_IDENTITY, .fill = T_INTS};
    const float one = 1.0f;
    gmm_mat q = GMM_ZERO, other;
    gmm_info info = GMM_ZERO;
    lin_run r;
    lin_build(&r, &s);
    q.dtype = GMM_E4M3;
    q.scaling = GMM_SCALING_TENSOR;
    q.data = t_alloc(3 * 32 * 32);
    q.scale = t_in(&one, sizeof one);
    other = q;
    if (s.op == GMM_OP_LINEAR_WGRAD) {
        gmm_mat *const copies = (gmm_mat *)t_host(2 * sizeof *copies);
        copies[0] = q;
        copies[1] = q;
        q.columnwise = &copies[0];
        other.columnwise = &copies[1];
    }
    if (s.op == GMM_OP_LINEAR_DGRAD) other.columnwise = &q;
    if (r.d.x) r.d.x = &q;
    if (r.d.dy) r.d.dy = r.d.x ? &other : &q;
    if (r.d.w) r.d.w = &other;
    T_REFUSED(GMM_E_UNSUPPORTED, gmm_linear_query(T.ctx, s.op, &r.d, &info), "gmm_linear_query",
              r.d.x ? "linear.x_index: " : "linear.dy_index: ", "cannot be gathered", NULL);
}

static void bias_grads(int arg) {
    static const int64_t sizes[] = {1, 0, 300, 1, 17};
    for (int out = 0; out < 3; out++)
        for (int mode = 0; mode < 4; mode++) {
            lin_spec s = {.op = GMM_OP_LINEAR_BGRAD, .in = lin_dtype(arg), .out = lin_dtype(out), .groups = 5, .K = 3,
                          .N = 261, .sizes = sizes, .scale = mode % 2, .main_grad = mode / 2, .extra = 6};
            both(s);
            s.beta = 1;
            s.frozen = mode % 2;
            both(s);
        }
}

static void bias_scale_grads(int arg) {
    static const int64_t sizes[] = {1, 0, 280, 1, 17};
    for (int bias = 0; bias < 3; bias++)
        for (int mode = 0; mode < 8; mode++) {
            lin_spec s = {.op = GMM_OP_LINEAR_BGRAD, .in = lin_dtype(arg), .out = GMM_F32, .bias = lin_dtype(bias),
                          .groups = 5, .K = 3, .N = 40 + 41 * mode, .sizes = sizes, .dscale = 1 + mode % 2,
                          .no_db = mode / 2 % 2, .tail = mode / 4 ? GMM_TAIL_ZERO : GMM_TAIL_KEEP, .extra = 300};
            both(s);
        }
}

/* Frozen groups, and outputs that are NULL. */
static void frozen_groups(int arg) {
    static const int64_t sizes[] = {3, 4, 0, 0, 8, 9, 1};
    for (int mode = 0; mode < 4; mode++) {
        lin_spec s = {.op = arg / 3 ? GMM_OP_LINEAR_BGRAD : GMM_OP_LINEAR_WGRAD, .in = lin_dtype(arg % 3),
                      .out = mode % 2 ? GMM_F32 : lin_dtype(arg % 3), .groups = 7, .K = 18, .N = 23, .sizes = sizes,
                      .main_grad = mode % 2, .beta = mode / 2, .frozen = 1, .pad = 2, .gap = 3,
                      .grad = (t_form)(mode % 3)};
        both(s);
    }
}

/* Element indices beyond 2^31 in x, w, y, dy, dx and dw, in memory of which only the used pages are backed. */
enum { BIG_ROWS = 5, BIG_K = 6, BIG_N = 5 };
static const int64_t big_ld = (int64_t)1 << 29;           /* row 4 begins at element 2^31 */
static const int64_t big_gap = ((int64_t)1 << 32) + 64;   /* group 1 of a packed operand, in elements */
static int64_t big_w_rows(int arg) { return arg < 3 ? BIG_N : 1; }
static size_t big_act_bytes(void) { return (size_t)((BIG_ROWS - 1) * big_ld + BIG_K + BIG_N) * 4; }
static size_t big_w_bytes(int arg) {
    return (size_t)(big_gap + (big_w_rows(arg) - 1) * big_ld + BIG_K + BIG_N) * 4;
}
static void big(int arg) {
    enum { ROWS = BIG_ROWS, K = BIG_K, N = BIG_N };
    const gmm_op op = ops[arg];
    const int64_t ld = big_ld, gap = big_gap, w_rows = big_w_rows(arg), sizes[] = {2, 3};
    const size_t act_bytes = big_act_bytes(), w_bytes = big_w_bytes(arg);
    double x[ROWS * K], dy[ROWS * N], w[2 * N * K];
    const int64_t offsets[] = {0, 2, 5};
    char *dev_x = (char *)t_sparse(act_bytes), *dev_dy = (char *)t_sparse(act_bytes);
    char *dev_w = (char *)t_sparse(w_bytes);
    gmm_groups groups = GMM_ZERO;
    gmm_linear d = GMM_ZERO;
    gmm_grad grad = GMM_ZERO;
    gmm_mat mx = gmm_mat_packed(GMM_F32, dev_x), mdy = gmm_mat_packed(GMM_F32, dev_dy);
    gmm_mat mw = gmm_mat_packed(GMM_F32, dev_w);
    ref_linear l;
    float v;
    if (sizeof(void *) < 8) t_skip("needs 64-bit addresses");
    mx.ld = mdy.ld = mw.ld = ld;
    mw.group_stride = gap;
    for (int i = 0; i < ROWS * K; i++) x[i] = (double)t_int(-4, 4);
    for (int i = 0; i < ROWS * N; i++) dy[i] = (double)t_int(-4, 4);
    for (int i = 0; i < 2 * N * K; i++) w[i] = (double)t_int(-4, 4);
    for (int i = 0; i < ROWS * K && op != GMM_OP_LINEAR_DGRAD; i++)
        v = (float)x[i], t_upload(dev_x + 4 * (i / K * ld + i % K), &v, 4);
    for (int i = 0; i < ROWS * N && op != GMM_OP_LINEAR_FWD; i++)
        v = (float)dy[i], t_upload(dev_dy + 4 * (i / N * ld + i % N), &v, 4);
    for (int i = 0; i < 2 * N * K && arg < 2; i++)
        v = (float)w[i], t_upload(dev_w + 4 * (i / (N * K) * gap + i / K % N * ld + i % K), &v, 4);
    groups.count = 2;
    groups.capacity = ROWS;
    groups.dtype = GMM_I64;
    groups.splits = t_in(sizes, sizeof sizes);
    grad.mat = &mw;
    d.in_features = K;
    d.out_features = N;
    d.groups = &groups;
    d.x = &mx;
    d.w = &mw;
    d.y = d.dy = &mdy;
    d.dx = &mx;
    d.dw = d.db = &grad;
    T_OK(t_linear(T.ctx, op, &d));
    memset(&l, 0, sizeof l);
    l.in = K;
    l.out = N;
    l.offsets = offsets;
    l.x = x;
    l.w = w;
    l.dy = dy;
    for (int64_t g = 0; g < 2; g++)
        for (int64_t row = lin_is_grad(op) ? 0 : offsets[g]; row < (lin_is_grad(op) ? w_rows : offsets[g + 1]); row++)
            for (int64_t col = 0; col < (arg == 0 || arg == 3 ? N : K); col++) {
                double magnitude, got, want = ref_linear_at(&l, op, g, row, col, 0.0, &magnitude);
                const char *base = arg == 0 ? dev_dy : arg == 1 ? dev_x : dev_w + g * gap * 4;
                t_download(&v, base + (row * ld + col) * 4, 4);
                got = (double)v;
                t_exact("element", GMM_F32, &got, &want, 1);
            }
}

/* NaN and Inf in one group change no other group. */
static void contained(int arg) {
    static const int64_t sizes[] = {4, 7, 3, 8};
    const int kind = arg / 12; /* 0: in x or dy, 1: in w */
    lin_spec s = {.op = ops[arg / 3 % 4], .in = lin_dtype(arg % 3), .out = lin_dtype(arg % 3), .groups = 4, .K = 19,
                  .N = 30, .sizes = sizes, .fill = T_INTS};
    lin_run r;
    lin_build(&r, &s);
    if (kind == 0) {
        t_mat *m = s.op == GMM_OP_LINEAR_FWD ? &r.x : &r.dy;
        for (int64_t i = sizes[0] * m->cols; i < (sizes[0] + sizes[1]) * m->cols; i++)
            m->v[i] = i % 2 ? (double)NAN : (double)INFINITY;
        t_mat_put(m);
    } else {
        for (int64_t i = 19 * 30; i < 2 * 19 * 30; i++) r.w.v[i] = i % 2 ? (double)NAN : -(double)INFINITY;
        t_mat_put(&r.w);
    }
    T_OK(t_linear(T.ctx, s.op, &r.d));
    for (int64_t g = 0; g < 4; g++) {
        size_t bytes;
        const void *bits = lin_group_bits(&r, g, &bytes);
        for (int64_t i = 0; i < (int64_t)bytes / ref_bytes(s.out); i++) {
            const double v = ref_load(s.out, bits, i);
            T_CHECK(g == 1 ? isnan(v) || isinf(v) : isfinite(v), "group %d element %lld is %g", (int)g,
                    (long long)i, v);
        }
    }
    lin_check(&r);
}

/* Moves an input to one element past an address that is a multiple of 16 bytes. */
static void lin_move_odd(t_mat *m) {
    const int64_t size = ref_bytes(m->dtype), elements = (m->count - 1) * m->stride + (m->rows - 1) * m->ld + m->cols;
    const size_t bytes = (size_t)(elements * size);
    char *moved = (char *)t_alloc_aligned(bytes + 16, 16) + size;
    t_upload(moved, t_get(m->mat.data, bytes), bytes);
    for (int64_t g = 0; g < m->count; g++) m->table[g] = moved + g * m->stride * size;
    m->mat.data = m->data = moved;
}

/* A query without addresses returns workspace for every engine that may serve the call: a call with misaligned inputs
   is served in exactly that workspace, and its result is correct. */
static void odd_addresses(int arg) {
    static const int64_t sizes[] = {40, 0, 75, 1};
    const lin_spec s = {.op = ops[arg / 3], .in = lin_dtype(arg % 3), .out = lin_dtype(arg % 3), .groups = 4, .K = 96,
                        .N = 160, .sizes = sizes, .fill = T_INTS};
    for (int odd = 1; odd < 8; odd++) { /* bits: x, w, dy */
        lin_run r;
        gmm_linear d;
        gmm_mat x, w, dy, out;
        gmm_grad grad;
        gmm_groups groups;
        gmm_info info = GMM_ZERO;
        void *workspace;
        lin_build(&r, &s);
        d = r.d;
        groups = r.groups;
        groups.splits = NULL;
        groups.fault = NULL;
        d.groups = &groups;
        if (d.x) x = *d.x, x.data = NULL, d.x = &x;
        if (d.w) w = *d.w, w.data = NULL, d.w = &w;
        if (d.dy) dy = *d.dy, dy.data = NULL, d.dy = &dy;
        out = r.out.mat;
        out.data = NULL;
        grad = r.grad;
        grad.mat = &out;
        if (d.y) d.y = &out;
        if (d.dx) d.dx = &out;
        if (d.dw) d.dw = &grad;
        if (d.db) d.db = &grad;
        T_OK(gmm_linear_query(T.ctx, s.op, &d, &info));
        T_CHECK(info.engine != GMM_ENGINE_WGMMA || strstr(info.note, "multiples of 16 bytes, else mma"), "\"%s\"",
                info.note);
        if (r.d.x && odd & 1) lin_move_odd(&r.x);
        if (r.d.w && odd & 2) lin_move_odd(&r.w);
        if (r.d.dy && odd & 4) lin_move_odd(&r.dy);
        workspace = t_workspace(info.workspace_bytes);
        switch (s.op) {
        case GMM_OP_LINEAR_FWD:
            T_OK(gmm_linear_fwd(T.ctx, &r.d, workspace, info.workspace_bytes, T.stream));
            break;
        case GMM_OP_LINEAR_DGRAD:
            T_OK(gmm_linear_dgrad(T.ctx, &r.d, workspace, info.workspace_bytes, T.stream));
            break;
        case GMM_OP_LINEAR_WGRAD:
            T_OK(gmm_linear_wgrad(T.ctx, &r.d, workspace, info.workspace_bytes, T.stream));
            break;
        default: T_OK(gmm_linear_bgrad(T.ctx, &r.d, workspace, info.workspace_bytes, T.stream)); break;
        }
        lin_check(&r);
        if (info.engine != GMM_ENGINE_WGMMA || !(odd & (r.d.x ? 1 : 4))) continue;
        /* a demanded engine is promised under a condition on addresses; a call that breaks it is refused */
        r.options.engine = GMM_ENGINE_WGMMA;
        r.d.options = d.options = &r.options;
        T_OK(gmm_linear_query(T.ctx, s.op, &d, &info));
        T_CHECK(strstr(info.note, "only for addresses at multiples of 16 bytes"), "\"%s\"", info.note);
        T_REFUSED(GMM_E_UNSUPPORTED, t_linear(T.ctx, s.op, &r.d), "at a multiple of 16 bytes", NULL);
    }
}

/* ------------------------------------------------------------------------------------------------------ Random --- */

/* A call with everything drawn; `rows` bounds the sum of the sizes. */
static lin_spec drawn_spec(int64_t rows) {
    lin_spec s = {.op = ops[t_int(0, 3)], .in = lin_dtype((int)t_int(0, 2)), .out = lin_dtype((int)t_int(0, 2)),
                  .groups = (int32_t)t_draw_size(9, 70), .K = t_draw_size(80, 600), .N = t_draw_size(80, 600),
                  .extra = t_int(0, 2) ? 0 : t_int(1, 140), .split = (lin_split)t_int(0, 3),
                  .pad = t_int(0, 1) * t_int(0, 9), .gap = t_int(0, 1) * t_int(0, 40), .w = (t_form)t_int(0, 2),
                  .grad = (t_form)t_int(0, 2), .bias_form = (t_form)t_int(0, 2), .alpha = (int)t_int(0, 2),
                  .tail = (gmm_tail)t_int(0, 1), .fill = t_int(0, 1) ? T_INTS : T_REALS};
    while (s.K * s.N > 60000) s.K = (s.K + 1) / 2;
    T.align_rows = t_int(0, 3) == 0;
    s.sizes = t_draw_sizes(s.groups, rows);
    s.on_host = t_int(0, 7) == 0;
    s.add = t_int(0, 2) == 0;
    s.main_grad = (int)t_int(0, 1);
    s.overwrite = t_int(0, 3) == 0;
    s.beta = t_int(0, 3) == 0;
    s.frozen = t_int(0, 3) == 0;
    if (s.op == GMM_OP_LINEAR_FWD && t_int(0, 1)) s.bias = lin_dtype((int)t_int(0, 2));
    if (s.op == GMM_OP_LINEAR_BGRAD && t_int(0, 1)) {
        s.bias = lin_dtype((int)t_int(0, 2));
        s.dscale = (int)t_int(1, 2);
        s.no_db = t_int(0, 3) == 0;
    }
    s.scale = (s.bias != GMM_NONE || s.op == GMM_OP_LINEAR_BGRAD) && t_int(0, 1);
    if (s.frozen && !lin_is_grad(s.op)) s.frozen = 0;
    if (s.beta && !lin_is_grad(s.op)) s.beta = 0;
    if (t_int(0, 2) == 0) {
        s.index = (lin_index)t_int(LIN_IDENTITY, LIN_PAST);
        s.index_div = (int32_t)t_int(0, 9);
        s.plain = (int)t_int(0, 2);
    }
    return s;
}

static void drawn(int arg) {
    const lin_spec s = drawn_spec(t_draw_size(200, 700));
    lin_run r;
    (void)arg;
    if (s.index && t_int(0, 1)) lin_by_hand(&s);
    lin_build(&r, &s);
    T_OK(t_linear(T.ctx, s.op, &r.d));
    lin_check(&r);
    if (t_int(0, 3) == 0 && !s.frozen && !s.beta && !s.dscale && !s.main_grad && !s.add) lin_alone(&r);
}

/* Several calls at once on streams of one context. */
static void drawn_streams(int arg) {
    enum { STREAMS = 4 };
    lin_run *r = (lin_run *)t_host(STREAMS * sizeof *r);
    gmm_runtime rt = GMM_ZERO;
    gmm_stream stream[STREAMS] = {NULL};
    gmm_info info[STREAMS];
    void *workspace[STREAMS];
    gmm_status worst = GMM_OK;
    (void)arg;
    T_OK(gmm_runtime_of(T.ctx, &rt));
    memset(info, 0, sizeof info);
    for (int i = 0; i < STREAMS; i++) {
        const lin_spec s = drawn_spec(t_draw_size(150, 500));
        lin_build(&r[i], &s);
        T_OK(gmm_linear_query(T.ctx, s.op, &r[i].d, &info[i]));
        workspace[i] = t_workspace(info[i].workspace_bytes);
    }
    t_wait(); /* the operands were written on T.stream */
    for (int i = 0; i < STREAMS && worst == GMM_OK; i++) worst = rt.stream_create(rt.self, 0, &stream[i]);
    for (int i = 0; i < STREAMS && worst == GMM_OK; i++)
        worst = t_linear_functions[r[i].spec.op - GMM_OP_LINEAR_FWD](T.ctx, &r[i].d, workspace[i],
                                                                     info[i].workspace_bytes, stream[i]);
    for (int i = 0; i < STREAMS; i++) {
        const gmm_status s = stream[i] ? rt.stream_sync(rt.self, stream[i]) : GMM_OK;
        if (worst == GMM_OK) worst = s;
        if (stream[i]) (void)rt.stream_destroy(rt.self, stream[i]);
    }
    T_CHECK(worst == GMM_OK, "%s: %s", gmm_status_name(worst), gmm_last_error(T.ctx));
    t_check_guards();
    for (int i = 0; i < STREAMS; i++) lin_check(&r[i]);
}

void tests_linear(void) {
    static const char *const name[] = {"f32", "f16", "bf16"};
    t_add(bgrad_without_bias, 0, "linear bgrad looks at no bias without d_bias_scale");
    t_add(drawn, 0, "linear drawn at random");
    t_random(12);
    t_add_gpu(drawn_streams, 0, "linear drawn at random on several streams");
    t_random(6);
    for (int i = 0; i < T_COUNT(shapes); i++)
        for (int k = 0; k < 9; k++)
            t_add(shape_case, i * 9 + k, "linear %s %s G=%d rows=%lld %lldx%lld",
                  lin_op(ops[k / 3]), name[k % 3], (int)shapes[i].groups, (long long)shapes[i].rows,
                  (long long)shapes[i].K, (long long)shapes[i].N);
    for (int k = 0; k < 6; k++)
        t_add(batch_invariance, k, "linear %s %s rows alone and in groups of other sizes", lin_op(ops[k / 3]),
              name[k % 3]);
    for (int k = 0; k < 12; k++)
        t_add(odd_addresses, k, "linear %s %s at odd addresses after a query without any", lin_op(ops[k / 3]),
              name[k % 3]);
    for (int d = 0; d < 3; d++) t_add(main_grad_half, d, "linear wgrad %s beta 1 into main_grad 0.5", name[d]);
    for (int k = 0; k < 9; k++)
        t_add(rows_end_between, k, "linear %s %s rows that end between multiples of 16 bytes", lin_op(ops[k / 3]),
              name[k % 3]);
    for (int d = 0; d < 3; d++) t_add(overwrite_nan, d, "linear wgrad and bgrad %s beta 0 into NaN", name[d]);
    for (int k = 0; k < 12; k++) t_add(empty_groups, k, "linear %s %s empty groups", lin_op(ops[k / 3]), name[k % 3]);
    for (int k = 0; k < 4; k++) t_add(no_rows, k, "linear %s all empty, capacity 0", lin_op(ops[k]));
    for (int k = 0; k < 4; k++) t_add(no_memory, k, "linear %s capacity 0 without memory", lin_op(ops[k]));
    for (int k = 4; k < 12; k++)
        t_add(no_rows, k, "linear %s all empty, capacity 256, tail %s", lin_op(ops[k % 4]), k < 8 ? "kept" : "zeroed");
    for (int k = 0; k < 6; k++)
        t_add(keep_bits, k, "linear %s %s beta 1, empty groups keep -0, NaN, Inf", k / 3 ? "bgrad" : "wgrad",
              name[k % 3]);
    for (int k = 12; k < 16; k++) t_add(no_rows, k, "linear %s one empty group", lin_op(ops[k % 4]));
    for (int k = 0; k < 8; k++)
        t_add(tails, k, "linear %s tail %s, NaN in tails of inputs", lin_op(ops[k / 2]),
              k % 2 ? "zeroed" : "kept");
    for (int k = 0; k < 32; k++) {
        static const int counts[] = {1, 2, 63, 64, 65, 128, 256, 512};
        t_add(many_groups, k, "linear %s G=%d", lin_op(ops[k % 4]), counts[k / 4]);
    }
    for (int k = 0; k < 12; k++)
        t_add(skewed, k, "linear %s %s", lin_op(ops[k % 4]),
              k / 4 == 0 ? "one group owns all rows" : k / 4 == 1 ? "power law" : "one row each");
    for (int k = 0; k < 12; k++) t_add(odd_shapes, k, "linear %s %s odd K and N", lin_op(ops[k / 3]), name[k % 3]);
    for (int k = 0; k < 12; k++) t_add(strides, k, "linear %s %s ld and group_stride", lin_op(ops[k / 3]), name[k % 3]);
    for (int k = 0; k < 12; k++)
        t_add(tables, k, "linear %s %s packed, table, host table", lin_op(ops[k / 3]), name[k % 3]);
    for (int k = 0; k < 6; k++) t_add(shared_weight, k, "linear %s %s shared weight", lin_op(ops[k / 3]), name[k % 3]);
    for (int k = 0; k < 12; k++) t_add(alpha_beta, k, "linear %s %s alpha and beta", lin_op(ops[k / 3]), name[k % 3]);
    for (int k = 0; k < 4; k++) t_add(dtypes, k, "linear %s every input and output dtype", lin_op(ops[k]));
    for (int d = 0; d < 3; d++) t_add(biases, d, "linear fwd %s bias N=8..3072", name[d]);
    for (int d = 0; d < 3; d++) t_add(bias_scale, d, "linear fwd %s bias times row scale", name[d]);
    for (int k = 0; k < 6; k++) t_add(probs, k, "linear %s %s prob", lin_op(ops[k / 3]), name[k % 3]);
    for (int k = 0; k < 12; k++) t_add(gathered, k, "linear %s %s gathered rows", lin_op(ops[k / 3]), name[k % 3]);
    for (int k = 0; k < 9; k++)
        t_add(gathered_wide, k, "linear %s %s gathered rows, many tiles", lin_op(ops[k / 3]), name[k % 3]);
    for (int k = 0; k < 3; k++)
        t_add(gathered_limit, k, "linear %s gathered rows, limit of the workspace", lin_op(ops[k]));
    for (int k = 0; k < 4; k++) t_add(gathered_none, k, "linear %s gathers from no rows", lin_op(ops[k]));
    for (int k = 0; k < 3; k++)
        t_add(gathered_quantized, k, "linear %s gathers no rows of quantized operands", lin_op(ops[k]));
    for (int d = 0; d < 3; d++) t_add(bias_grads, d, "linear bgrad %s beta, dtypes, sizes 0 and 1", name[d]);
    for (int d = 0; d < 3; d++) t_add(bias_scale_grads, d, "linear bgrad %s d_bias_scale", name[d]);
    for (int k = 0; k < 6; k++)
        t_add(frozen_groups, k, "linear %s %s frozen groups", k / 3 ? "bgrad" : "wgrad", name[k % 3]);
    for (int k = 0; k < 4; k++) {
        t_add(big, k, "linear %s more than 2^31 elements", lin_op(ops[k]));
        t_needs(2 * big_act_bytes() + big_w_bytes(k));
    }
    for (int k = 0; k < 18; k++)
        t_add(contained, k, "linear %s %s NaN and Inf in %s of one group", lin_op(ops[k / 3 % 4]), name[k % 3],
              k / 12 ? "w" : "an activation");
}
