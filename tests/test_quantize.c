/* test_quantize.c - quantize, requantize, dequantize and the scale update as operations. Every byte of
   every copy is compared: elements, scales, padding, and bytes that must stay untouched. The reference processes whole
   matrices by the formulas (ref_quantize), and shares no arithmetic with the library. */
#include "test.h"

#include <math.h>
#include <string.h>

#ifdef HAVE_CUDA
#include "device.h"
#endif

static int64_t up(int64_t a, int64_t b) { return (a + b - 1) / b * b; }
static int64_t blocks(int64_t a, int64_t b) { return (a + b - 1) / b; }
static float float_of(uint32_t u) {
    float v;
    memcpy(&v, &u, sizeof v);
    return v;
}

/* ------------------------------------------------------------------------------------------------------ Cases --- */

static gmm_format named(gmm_dtype dtype, gmm_scaling scaling) {
    gmm_format f = GMM_ZERO;
    f.dtype = dtype;
    f.scaling = scaling;
    return f;
}

/* Every kind of quantized copy. */
typedef struct variant { const char *name; gmm_format format; } variant;
static int variants(variant *v) {
    int n = 0;
#define ADD(text, dtype, scaling, change) \
    do { \
        gmm_format *f = &v[n].format; \
        v[n++].name = text; \
        *f = named(dtype, scaling); \
        change; \
    } while (0)
    ADD("tensor current e4m3", GMM_E4M3, GMM_SCALING_TENSOR, (void)0);
    ADD("tensor current e5m2 pow2", GMM_E5M2, GMM_SCALING_TENSOR, f->pow2 = 1);
    ADD("tensor delayed e4m3", GMM_E4M3, GMM_SCALING_TENSOR, f->delayed = 1);
    ADD("row e4m3", GMM_E4M3, GMM_SCALING_ROW, (void)0);
    ADD("1x128 e4m3 pow2", GMM_E4M3, GMM_SCALING_1X128, f->pow2 = 1);
    ADD("1x128 e5m2", GMM_E5M2, GMM_SCALING_1X128, f->eps = 1e-3f);
    ADD("128x128 e4m3 pow2", GMM_E4M3, GMM_SCALING_128X128, f->pow2 = 1);
    ADD("mxfp8 e4m3", GMM_E4M3, GMM_SCALING_MX32, (void)0);
    ADD("mxfp8 e5m2 swizzled", GMM_E5M2, GMM_SCALING_MX32, f->order = GMM_SCALES_SWIZZLED);
    ADD("mxfp8 square", GMM_E4M3, GMM_SCALING_MX32, f->square = 1);
    ADD("mxfp4", GMM_E2M1, GMM_SCALING_MX32, (void)0);
    ADD("nvfp4", GMM_E2M1, GMM_SCALING_NV16, (void)0);
    ADD("nvfp4 swizzled", GMM_E2M1, GMM_SCALING_NV16, f->order = GMM_SCALES_SWIZZLED);
    ADD("nvfp4 square", GMM_E2M1, GMM_SCALING_NV16, f->square = 1);
    ADD("nvfp4 square swizzled", GMM_E2M1, GMM_SCALING_NV16, (f->square = 1, f->order = GMM_SCALES_SWIZZLED));
    ADD("nvfp4 hadamard", GMM_E2M1, GMM_SCALING_NV16, f->hadamard = GMM_HADAMARD | GMM_HADAMARD_SIGNS);
    ADD("nvfp4 stochastic hadamard", GMM_E2M1, GMM_SCALING_NV16,
        (f->hadamard = GMM_HADAMARD | 0x1234, f->stochastic = 1));
    ADD("nvfp4 row amax", GMM_E2M1, GMM_SCALING_NV16, f->row_amax = 1);
    ADD("nvfp4 four over six", GMM_E2M1, GMM_SCALING_NV16, (f->four_over_six = 1, f->e4m3_256 = 1));
    ADD("nvfp4 square four over six", GMM_E2M1, GMM_SCALING_NV16, (f->four_over_six = 2, f->square = 1));
#undef ADD
    return n;
}
enum { VARIANTS = 20 };

static void valid_variants(int arg) {
    variant v[VARIANTS];
    const int n = variants(v);
    gmm_layout l;
    (void)arg;
    T_CHECK(n == VARIANTS, "%d variants", n);
    for (int i = 0; i < n; i++) {
        gmm_error e = GMM_ZERO;
        T_CHECK(gmm_format_validate(&v[i].format, &e) == GMM_OK, "%s: %s", v[i].name, e.text);
    }
    T_CHECK(gmm_layout_of_groups(GMM_E4M3, GMM_SCALING_128X128, GMM_SCALES_COMPACT, GMM_ROWWISE, 2, 9, 128, &l, NULL) ==
            GMM_E_DTYPE, "128x128 is not for activations");
}

/* What a variant can be tested for: copies of groups, codes that are the same whenever they are computed, and values
   that decode to those of the source's elements one by one. */
static int of_groups(const gmm_format *f) { return f->scaling != GMM_SCALING_128X128; }
static int by_elements(const gmm_format *f) { return !f->row_amax && !f->hadamard; }

/* -------------------------------------------------------------------------------------------------- Reference --- */

/* A reference copy with its arrays in memory of the case. */
static void quantized(ref_copy *q) {
    q->code = (uint8_t *)t_host((size_t)(q->lines * q->along) + 1);
    q->scale = (uint32_t *)t_host((size_t)(q->lines * ref_line_blocks(q->f, q->along)) * 4 + 4);
    q->line_amax = (float *)t_host((size_t)q->lines * 4 + 4);
    ref_quantize(q);
}

/* Expected bytes of a copy, with elements and scales at the offsets of its layout. */
typedef struct ref_bytes_of { uint8_t *data, *scale; float *amax; int64_t data_bytes, scale_bytes, amaxes; } ref_image;

/* ------------------------------------------------------------------------------------------------------ Running --- */

typedef struct quant_case {
    gmm_format f;
    gmm_dtype source;
    int grouped;
    int32_t units;
    const int64_t *sizes;    /* grouped: rows of each group; else every matrix has rows0 */
    int64_t rows0, cols, extra, pad;
    int specials;            /* NaN, Inf and zeros among the values */
    int table;
    int loose;               /* byte-sized scales at any address; otherwise as aligned as their number allows */
    int first_group;
    gmm_tail tail;
    int32_t gathered;        /* divisor of the entries of src_index; 0: rows are not gathered */
} quant_case;

typedef struct quant_run {
    quant_case c;
    int64_t capacity, live, padded;
    t_mat src;               /* its values are those of the quantized rows */
    t_mat tokens;            /* which are gathered from here where c.gathered is set */
    int32_t *index;
    gmm_groups groups;
    gmm_mat copy[2];
    ref_image want[2];
    float *scale_in, *scale_values;
    uint64_t *random, random_values[2];
    gmm_quantization d;
} quant_run;

/* A group or matrix of a case: its rows, the rows before it, and the rows before it with groups padded to 128. */
typedef struct quant_unit { int32_t u; int64_t m, row, start; } quant_unit;
static int64_t padded_rows(const quant_case *c, int64_t m) { return c->grouped ? up(m, 128) : m; }

/* The source's values, and the values that formats read besides. */
static void build_source(quant_run *r) {
    const quant_case *c = &r->c;
    r->src = t_mat_make(c->source, c->grouped ? 1 : c->units, r->capacity, c->cols, c->pad, c->grouped ? 0 : 2 * c->pad,
                        c->table ? T_TABLE : T_PACKED, T_REALS);
    for (int64_t i = 0; i < r->src.count * r->src.rows * c->cols; i++) {
        double v = ref_round(c->source, r->src.v[i] * ldexp(1.0, (int)t_int(-4, 4)));
        if (c->specials && t_int(0, 40) == 0) v = t_int(0, 3) ? 0.0 : t_int(0, 1) ? (double)NAN : -(double)INFINITY;
        if (c->specials == 2) v = 0.0;
        if (c->grouped && i / c->cols >= r->live) /* values that would change an amax, and NaN, which would not */
            v = i % 3 == 0 ? (double)NAN : i % 3 == 1 ? 1e4 : -(double)INFINITY;
        r->src.v[i] = v;
    }
    t_mat_put(&r->src);
    r->random_values[0] = t_rand();
    r->random_values[1] = t_rand();
    if (c->f.stochastic) r->random = (uint64_t *)t_in(r->random_values, 16);
    r->scale_values = (float *)t_host((size_t)c->units * 4);
    for (int32_t u = 0; u < c->units; u++) r->scale_values[u] = (float)(1.0 + fabs(t_real()) * 30.0);
    r->scale_in = (float *)t_in(r->scale_values, (size_t)c->units * 4);
}

/* Tokens with the values of some rows, and an index by which the rows are gathered from them: some entries are
   negative, some are past the tokens, and those behind the live rows must not be read. */
static void build_tokens(quant_run *r) {
    const quant_case *c = &r->c;
    const int64_t cols = c->cols, tokens = r->capacity / 2 + 1;
    const int32_t past = (int32_t)tokens * c->gathered;
    r->tokens = t_mat_make(c->source, 1, tokens, cols, c->pad, 0, T_PACKED, T_REALS);
    for (int64_t i = 0; i < tokens * cols && i < r->live * cols; i++) r->tokens.v[i] = r->src.v[i];
    t_mat_put(&r->tokens);
    r->index = (int32_t *)t_host((size_t)r->capacity * sizeof *r->index + 1);
    for (int64_t i = 0; i < r->capacity; i++) {
        const int64_t token = t_int(0, tokens - 1);
        const int zeros = i >= r->live || i % 9 == 4;
        r->index[i] = !zeros ? (int32_t)(token * c->gathered + t_int(0, c->gathered - 1)) : i % 2 ? past : -1 - (int)i;
        if (i >= r->live) r->index[i] = INT32_MAX;
        for (int64_t j = 0; j < cols && i < r->live; j++)
            r->src.v[i * cols + j] = zeros ? 0.0 : r->tokens.v[token * cols + j];
    }
}

/* A poisoned destination of layout l, and its expected bytes before anything is stored. */
static void build_destination(quant_run *r, int k, const gmm_layout *l) {
    const quant_case *c = &r->c;
    const gmm_format *f = &c->f;
    ref_image *w = &r->want[k];
    const int64_t ld = l->data_cols + 2 * c->pad, stride = c->grouped ? 0 : l->data_rows * ld + 4 * c->pad;
    w->data_bytes = l->data_rows == 0 ? 0 : (c->units - 1) * stride + (l->data_rows - 1) * ld + l->data_cols;
    if (f->dtype == GMM_E2M1) w->data_bytes = (w->data_bytes + 1) / 2;
    w->scale_bytes = c->grouped ? l->scale_bytes : c->units * l->scale_bytes;
    w->amaxes = f->scaling != GMM_SCALING_NV16 && f->scaling != GMM_SCALING_TENSOR ? 0
                : f->row_amax ? (c->grouped ? r->capacity : c->units * c->rows0) : c->units;
    w->data = (uint8_t *)t_host((size_t)w->data_bytes + 1);
    w->scale = (uint8_t *)t_host((size_t)w->scale_bytes + 1);
    w->amax = (float *)t_host((size_t)w->amaxes * 4 + 4);
    memset(w->data, 0xFF, (size_t)w->data_bytes);
    memset(w->scale, 0xFF, (size_t)w->scale_bytes);
    memset(w->amax, 0xFF, (size_t)w->amaxes * 4);
    r->copy[k] = gmm_mat_quantized(f, k ? GMM_COLUMNWISE : GMM_ROWWISE, t_alloc((size_t)w->data_bytes),
                                   c->loose && l->scale_dtype != GMM_F32 ? t_alloc_aligned((size_t)w->scale_bytes, 1)
                                                                         : t_alloc((size_t)w->scale_bytes), NULL);
    if (w->amaxes) r->copy[k].amax = (float *)t_alloc((size_t)w->amaxes * 4);
    r->copy[k].ld = ld == l->data_cols ? 0 : ld;
    r->copy[k].group_stride = c->grouped || ld == l->data_cols ? 0 : stride;
    if (f->delayed) { /* amaxes are updated by maximum */
        for (int64_t i = 0; i < w->amaxes; i++) w->amax[i] = i % 2 ? 1e6f : 0.0f;
        t_upload(r->copy[k].amax, w->amax, (size_t)w->amaxes * 4);
    }
}

/* Quantizes a unit by the formulas. */
static void quantize_unit(const quant_run *r, int k, const quant_unit *at, ref_copy *q) {
    const quant_case *c = &r->c;
    const int64_t m = at->m, cols = c->cols, P = padded_rows(c, m);
    memset(q, 0, sizeof *q);
    q->f = &c->f;
    q->source = c->source;
    q->direction = k ? GMM_COLUMNWISE : GMM_ROWWISE;
    q->live = m;
    q->lines = k ? cols : m;
    q->along = k ? P : cols;
    q->x = (float *)t_host((size_t)(q->lines * q->along) * 4 + 4);
    for (int64_t i = 0; i < m; i++)
        for (int64_t j = 0; j < cols; j++)
            q->x[k ? j * q->along + i : i * cols + j] =
                (float)r->src.v[c->grouped ? (at->row + i) * cols + j : (at->u * m + i) * cols + j];
    if (k && c->f.hadamard)
        for (int64_t i = 0; i < q->lines; i++)
            for (int64_t j = 0; j < (c->grouped ? P : m / 16 * 16); j += 16)
                ref_hadamard(q->x + i * q->along + j, 1, (unsigned)c->f.hadamard & 0xFFFFu);
    q->quant_scale = r->scale_values[at->u];
    q->seed = r->random_values[0];
    q->offset = r->random_values[1];
    q->group = c->first_group + at->u;
    quantized(q);
}

/* Stores the expected scales of a unit, by the layout table. */
static void expect_scales(const quant_case *c, int k, const gmm_layout *l, const quant_unit *at, const ref_copy *q,
                          uint8_t *scales) {
    const gmm_format *f = &c->f;
    const int64_t m = at->m, cols = c->cols, start = at->start, P = padded_rows(c, m);
    const int64_t R = k ? up(cols, 128) : up(P, 128), R4 = k ? up(cols, 4) : up(P, 4);
    const int64_t width = f->scaling == GMM_SCALING_MX32 ? 32 : f->scaling == GMM_SCALING_NV16 ? 16 : 128;
    const int64_t J = up(blocks(k ? P : cols, width), 4);
    float *of_unit = (float *)scales;
    uint32_t *bits = (uint32_t *)scales;
    switch (f->scaling) {
    case GMM_SCALING_TENSOR:
        of_unit[at->u] = 1.0f / (f->delayed ? q->quant_scale
                                            : gmm_scale_from_amax(q->amax, f->dtype == GMM_E4M3 ? 448.0f : 57344.0f,
                                                                  float_of(0x7F7FFFFFu), f->eps, f->pow2));
        break;
    case GMM_SCALING_ROW:
        for (int64_t i = 0; i < q->lines; i++)
            bits[k ? at->u * cols + i : c->grouped ? at->row + i : at->u * m + i] =
                q->per_line ? q->scale[i * q->per_line] : gmm_f32_bits(1.0f);
        break;
    case GMM_SCALING_1X128:
        bits += !c->grouped ? at->u * l->scale_bytes / 4
                : k ? start / 128 * up(cols, 4) : blocks(cols, 128) * start;
        for (int64_t b = 0; b < blocks(k ? P : cols, 128); b++)
            for (int64_t i = 0; i < R4; i++) bits[b * R4 + i] = i < q->lines ? q->scale[i * q->per_line + b] : 0;
        break;
    case GMM_SCALING_128X128:
        bits += at->u * l->scale_bytes / 4;
        for (int64_t i = 0; i < blocks(q->lines, 128); i++)
            for (int64_t b = 0; b < J; b++)
                bits[i * J + b] = b < q->per_line ? q->scale[i * 128 * q->per_line + b] : 0;
        break;
    default:
        scales += !c->grouped ? at->u * l->scale_bytes : k ? start / width * up(cols, 128) : start * J;
        for (int64_t i = 0; i < R; i++)
            for (int64_t b = 0; b < J; b++) {
                const int64_t to = f->order == GMM_SCALES_SWIZZLED
                    ? ((i / 128) * (J / 4) + b / 4) * 512 + (i % 32) * 16 + ((i % 128) / 32) * 4 + b % 4
                    : k && f->scaling == GMM_SCALING_MX32 ? b * R + i : i * J + b;
                const int there = i < q->lines && b < q->per_line;
                scales[to] = there ? (uint8_t)q->scale[i * q->per_line + b] : 0;
            }
    }
}

/* A copy of direction k: its destination and the bytes expected there. */
static void build_copy(quant_run *r, int k) {
    const quant_case *c = &r->c;
    const gmm_format *f = &c->f;
    const int turned = k && f->scaling != GMM_SCALING_MX32;
    gmm_layout l = GMM_ZERO;
    gmm_error e = GMM_ZERO;
    ref_image *w = &r->want[k];
    quant_unit at;
    int64_t ld, stride;
    T_CHECK((c->grouped ? gmm_layout_of_groups(f->dtype, f->scaling, f->order, k ? GMM_COLUMNWISE : GMM_ROWWISE,
                                               c->units, r->capacity, c->cols, &l, &e)
                        : gmm_layout_of(f->dtype, f->scaling, f->order, k ? GMM_COLUMNWISE : GMM_ROWWISE, c->rows0,
                                        c->cols, &l, &e)) == GMM_OK, "%s", e.text);
    build_destination(r, k, &l);
    ld = l.data_cols + 2 * c->pad;
    stride = r->copy[k].group_stride ? r->copy[k].group_stride : l.data_rows * ld;
    memset(&at, 0, sizeof at);
    for (; at.u < c->units; at.u++) {
        ref_copy q;
        int64_t data0;
        at.m = c->grouped ? c->sizes[at.u] : c->rows0;
        data0 = !c->grouped ? at.u * stride : turned ? at.start : at.row * ld;
        quantize_unit(r, k, &at, &q);
        if (w->amaxes && !f->row_amax && !(f->delayed && w->amax[at.u] > q.amax)) w->amax[at.u] = q.amax;
        if (f->row_amax) memcpy(w->amax + (c->grouped ? at.row : at.u * at.m), q.line_amax, (size_t)at.m * 4);
        for (int64_t i = 0; i < q.lines; i++)
            for (int64_t j = 0; j < q.along; j++) {
                if (k && !turned && j >= at.m) continue; /* columns in the order of the source are not padded */
                ref_put_code(f->dtype, w->data, data0 + (k && !turned ? j * ld + i : i * ld + j),
                             q.code[i * q.along + j]);
            }
        expect_scales(c, k, &l, &at, &q, w->scale);
        at.row += at.m;
        at.start += padded_rows(c, at.m);
    }
    if (c->grouped && c->tail == GMM_TAIL_ZERO && !turned)
        for (int64_t i = r->live; i < r->capacity; i++)
            for (int64_t j = 0; j < c->cols; j++) ref_put_code(f->dtype, w->data, i * ld + j, 0);
}

/* Builds the source, poisoned destinations and the expected bytes. */
static void build(quant_run *r, const quant_case *c) {
    const gmm_format *f = &c->f;
    memset(r, 0, sizeof *r);
    r->c = *c;
    for (int32_t u = 0; u < c->units; u++) {
        const int64_t m = c->grouped ? c->sizes[u] : c->rows0;
        r->live += m;
        r->padded += up(m, 128);
    }
    r->capacity = c->grouped ? r->live + c->extra : c->rows0;
    t_about("%s of %s, %s%s from %s, %d %s of %lld rows x %lld, pad %lld", gmm_scaling_name(f->scaling),
            gmm_dtype_name(f->dtype), f->square ? "square, " : "", f->hadamard ? "transformed, " : "",
            gmm_dtype_name(c->source), (int)c->units, c->grouped ? "groups" : "matrices", (long long)r->capacity,
            (long long)c->cols, (long long)c->pad);
    if (c->grouped) t_splits(c->sizes, c->units);
    build_source(r);
    if (c->gathered) build_tokens(r);
    build_copy(r, 0);
    if (!f->row_amax) build_copy(r, 1);
    r->groups.count = c->units;
    r->groups.capacity = r->capacity;
    r->groups.dtype = GMM_I64;
    r->groups.tail = c->tail;
    if (c->grouped) r->groups.splits = t_in(c->sizes, (size_t)c->units * 8);
    r->d.groups = c->grouped ? &r->groups : NULL;
    r->d.count = c->grouped ? 0 : c->units;
    r->d.rows = c->grouped ? 0 : c->rows0;
    r->d.cols = c->cols;
    r->d.format = &r->c.f;
    r->d.first_group = f->stochastic ? c->first_group : 0;
    r->d.src = &r->src.mat;
    r->d.rowwise = &r->copy[0];
    r->d.columnwise = f->row_amax ? NULL : &r->copy[1];
    r->d.scale = f->delayed ? r->scale_in : NULL;
    r->d.random = r->random;
    if (!c->gathered) return;
    r->d.src = &r->tokens.mat;
    r->d.src_index = (const int32_t *)t_in(r->index, (size_t)r->capacity * sizeof *r->index);
    r->d.index_rows = r->tokens.rows;
    r->d.index_div = c->gathered == 1 ? 0 : c->gathered;
}

static gmm_status quantize(const gmm_quantization *d, gmm_op op) {
    gmm_info info = GMM_ZERO;
    gmm_status s = gmm_quantize_query(T.ctx, op, d, &info);
    void *workspace = s == GMM_OK ? t_workspace(info.workspace_bytes) : NULL;
    if (s != GMM_OK) return s;
    return (op == GMM_OP_QUANTIZE ? gmm_quantize : gmm_requantize)(T.ctx, d, workspace, info.workspace_bytes, T.stream);
}

static void check_copy(const quant_run *r, int k) {
    const ref_image *w = &r->want[k];
    if (k && r->c.f.row_amax) return;
    t_same(k ? "columnwise elements" : "rowwise elements", t_get(r->copy[k].data, (size_t)w->data_bytes), w->data,
           (size_t)w->data_bytes);
    t_same(k ? "columnwise scales" : "rowwise scales", t_get(r->copy[k].scale, (size_t)w->scale_bytes), w->scale,
           (size_t)w->scale_bytes);
    if (w->amaxes)
        t_same(k ? "columnwise amax" : "rowwise amax", t_get(r->copy[k].amax, (size_t)w->amaxes * 4), w->amax,
               (size_t)w->amaxes * 4);
}
#define check_copy(...) T_CALL(check_copy, __VA_ARGS__)

static void run_case(const quant_case *c) {
    quant_run r;
    quant_case one = *c;
    const int bytes = c->f.scaling == GMM_SCALING_MX32 || c->f.scaling == GMM_SCALING_NV16; /* as scales */
    for (one.loose = 0; one.loose <= bytes; one.loose++) {
        build(&r, &one);
        T_OK(quantize(&r.d, GMM_OP_QUANTIZE));
        check_copy(&r, 0);
        check_copy(&r, 1);
    }
}
#define run_case(...) T_CALL(run_case, __VA_ARGS__)

static const gmm_dtype floats[] = { GMM_BF16, GMM_F32, GMM_F16 };

static void activations(int arg) {
    static const int64_t splits[][6] = { { 1, 31, 32, 33, 127, 128 }, { 0, 129, 0, 300, 17, 0 }, { 0, 0, 0, 0, 0, 0 },
                                         { 0, 0, 0, 0, 0, 400 }, { 16, 48, 2, 255, 256, 257 } };
    static const int64_t widths[] = { 32, 128, 130, 288, 64, 16 };
    variant v[VARIANTS];
    (void)variants(v);
    for (int i = 0; i < 12; i++) {
        quant_case c = { .f = v[arg].format, .grouped = 1, .units = 6, .sizes = splits[i % 5],
                         .cols = widths[(i + 1) % 6], /* 130 takes several tiles */
                         .extra = i % 3 * 5, .pad = i % 2 * 4, .specials = i % 4 == 3 ? 1 + i / 8 : 0,
                         .first_group = i % 2 * 3, .tail = i % 2 ? GMM_TAIL_ZERO : GMM_TAIL_KEEP };
        c.source = c.f.hadamard ? GMM_BF16 : floats[i % 3];
        if (i % 4 == 1 && c.f.dtype != GMM_E2M1) c.cols++; /* rows at misaligned addresses */
        if (c.f.hadamard) c.specials = 0; /* an infinity becomes NaNs in its run of 16, whose order is not specified */
        run_case(&c);
    }
}

/* Groups without rows have the scales of an amax of 0, also where the capacity is 0. By eps these differ from those of
   an amax that nothing has written. */
static void no_rows(int arg) {
    enum { G = 3, COLS = 96 };
    const int64_t sizes[G] = { 0, 0, 0 };
    const float want = 1.0f / (448.0f / 2.0f);
    gmm_format f = named(GMM_E4M3, arg ? GMM_SCALING_ROW : GMM_SCALING_TENSOR);
    f.eps = 2.0f;
    for (int64_t capacity = 0; capacity < 20; capacity += 10) {
        const t_mat src = t_mat_in(GMM_BF16, 1, capacity, COLS, T_REALS);
        gmm_groups groups = GMM_ZERO;
        gmm_quantization d = GMM_ZERO;
        gmm_layout l = GMM_ZERO;
        gmm_mat copy;
        const float *scale;
        t_about("capacity %lld", (long long)capacity);
        T_CHECK(gmm_layout_of_groups(f.dtype, f.scaling, f.order, GMM_COLUMNWISE, G, capacity, COLS, &l, NULL) ==
                GMM_OK, "layout");
        groups.count = G;
        groups.capacity = capacity;
        groups.splits = t_in(sizes, sizeof sizes);
        groups.dtype = GMM_I64;
        copy = gmm_mat_quantized(&f, GMM_COLUMNWISE, t_alloc((size_t)l.data_bytes), t_alloc((size_t)l.scale_bytes),
                                 NULL);
        d.groups = &groups;
        d.cols = COLS;
        d.format = &f;
        d.src = &src.mat;
        d.columnwise = &copy;
        T_OK(quantize(&d, GMM_OP_QUANTIZE));
        scale = (const float *)t_get(copy.scale, (size_t)l.scale_bytes);
        for (int64_t i = 0; i < l.scale_bytes / 4; i++)
            T_CHECK(scale[i] == want, "scale %lld is %g, not %g", (long long)i, (double)scale[i], (double)want);
    }
}

/* Gathered rows have the copies of rows that are there, and an entry past the tokens is reported. */
static void gathers(int arg) {
    static const int64_t splits[][5] = { { 1, 0, 300, 33, 0 }, { 0, 129, 127, 0, 128 }, { 0, 0, 0, 5, 0 },
                                         { 0, 0, 0, 0, 0 } };
    static const int64_t widths[] = { 128, 288, 97, 32 };
    static const int32_t divisors[] = { 1, 3, 8, 2 };
    variant v[VARIANTS];
    (void)variants(v);
    for (int i = 0; i < 12; i++) {
        quant_case c = { .f = v[arg].format, .grouped = 1, .units = 5, .sizes = splits[i % 4],
                         .cols = widths[i / 2 % 4], .extra = i % 3 * 40, .pad = i % 2 * 8, .specials = i / 4 % 2,
                         .tail = i % 2 ? GMM_TAIL_ZERO : GMM_TAIL_KEEP, .gathered = divisors[i % 4] };
        quant_run r;
        uint32_t fault = 0;
        int past = 0;
        c.source = c.f.hadamard ? GMM_BF16 : floats[i % 3];
        if (c.f.hadamard) c.specials = 0;
        if (c.f.dtype == GMM_E2M1) c.cols = up(c.cols, 32);
        build(&r, &c);
        for (int64_t k = 0; k < r.live; k++) past |= r.index[k] >= (int32_t)r.tokens.rows * c.gathered;
        r.groups.fault = (uint32_t *)t_alloc(sizeof fault);
        t_upload(r.groups.fault, &fault, sizeof fault);
        T_OK(quantize(&r.d, GMM_OP_QUANTIZE));
        check_copy(&r, 0);
        check_copy(&r, 1);
        t_download(&fault, r.groups.fault, sizeof fault);
        T_CHECK(fault == (past ? (uint32_t)GMM_FAULT_INDEX : 0u), "fault word %u", (unsigned)fault);
    }
}

static void matrices(int arg) {
    static const int64_t shapes[][2] = { { 32, 64 }, { 130, 130 }, { 128, 256 }, { 258, 66 }, { 2, 2 }, { 48, 288 },
                                         { 66, 130 }, { 129, 67 } };
    variant v[VARIANTS];
    (void)variants(v);
    for (int i = 0; i < 7 + (v[arg].format.dtype != GMM_E2M1); i++) {
        quant_case c = { .f = v[arg].format, .units = 1 + (i == 6 ? 2 : i % 3), .rows0 = shapes[i][0],
                         .cols = shapes[i][1], .pad = i % 2 * 4, .table = i % 2, .specials = i == 3 };
        c.source = c.f.hadamard ? GMM_BF16 : floats[i % 3];
        if (c.f.hadamard) { /* whole runs of 16 rows: in others the transform would include rows that do not exist */
            c.rows0 = up(c.rows0, 16);
            c.specials = 0;
        }
        if (c.table) c.pad = 0;
        run_case(&c);
    }
}

/* ------------------------------------------------------------------------------------------------- Properties --- */

/* One copy alone, one group at a time, and the phases as separate calls give the bytes of the call for all. */
static void apart(int arg) {
    static const int64_t sizes[4] = { 70, 0, 33, 150 };
    variant v[VARIANTS];
    quant_run r;
    quant_case c = { .grouped = 1, .units = 4, .sizes = sizes, .cols = 96, .source = GMM_BF16 };
    (void)variants(v);
    c.f = v[arg].format;
    build(&r, &c);
    for (int k = 0; k < 2; k++) { /* one copy at a time */
        if (k && c.f.row_amax) continue;
        r.d.rowwise = k ? NULL : &r.copy[0];
        r.d.columnwise = k ? &r.copy[1] : NULL;
        T_OK(quantize(&r.d, GMM_OP_QUANTIZE));
        check_copy(&r, k);
    }
    if ((c.f.scaling == GMM_SCALING_TENSOR && !c.f.delayed) || (c.f.scaling == GMM_SCALING_NV16 && !c.f.row_amax)) {
        for (int k = 0; k < 2; k++) {
            t_poison(r.copy[k].data, 0xFF, (size_t)r.want[k].data_bytes);
            t_poison(r.copy[k].scale, 0xFF, (size_t)r.want[k].scale_bytes);
            t_poison(r.copy[k].amax, 0xFF, (size_t)r.want[k].amaxes * 4);
        }
        r.d.rowwise = &r.copy[0];
        r.d.columnwise = &r.copy[1];
        r.d.phase = GMM_QUANT_AMAX;
        T_OK(quantize(&r.d, GMM_OP_QUANTIZE));
        for (int k = 0; k < 2; k++) {
            t_bytes("elements", t_get(r.copy[k].data, (size_t)r.want[k].data_bytes), 0xFF,
                    (size_t)r.want[k].data_bytes);
            t_same("amax", t_get(r.copy[k].amax, 16), r.want[k].amax, 16);
        }
        r.d.phase = GMM_QUANT_CAST;
        T_OK(quantize(&r.d, GMM_OP_QUANTIZE));
        check_copy(&r, 0);
        check_copy(&r, 1);
    }
    for (int64_t g = 0, row = 0, start = 0; g < 4; row += sizes[g], start += up(sizes[g++], 128)) /* every group */
        for (int k = 0; k < 2; k++) {                                                        /* by itself */
            const gmm_direction direction = k ? GMM_COLUMNWISE : GMM_ROWWISE;
            const int64_t m = sizes[g], bits = gmm_dtype_bits(c.f.dtype);
            const ref_image *w = &r.want[k];
            const float factor = r.scale_values[g], seen = g % 2 ? 1e6f : 0.0f;
            gmm_layout l = GMM_ZERO, all = GMM_ZERO;
            gmm_groups one = r.groups;
            gmm_mat src = r.src.mat, copy = r.copy[k];
            gmm_quantization d = r.d;
            int64_t scales, first, amaxes = w->amaxes == 0 ? 0 : c.f.row_amax ? m : 1;
            const uint8_t *codes;
            if (m == 0 || (k && c.f.row_amax)) continue;
            T_CHECK(gmm_layout_of_groups(c.f.dtype, c.f.scaling, c.f.order, direction, 1, m, 96, &l, NULL) == GMM_OK &&
                    gmm_layout_of_groups(c.f.dtype, c.f.scaling, c.f.order, direction, 4, r.capacity, 96, &all, NULL) ==
                    GMM_OK, "layout");
            first = gmm_scale_base(c.f.scaling, direction, 96, g, row, start) * (l.scale_dtype == GMM_F32 ? 4 : 1);
            scales = l.scale_bytes;
            one.count = 1;
            one.capacity = m;
            one.splits = t_in(&sizes[g], 8);
            src.data = (char *)src.data + row * 96 * 2;
            copy.data = t_alloc((size_t)l.data_bytes);
            copy.scale = t_alloc_aligned((size_t)scales, 4);
            copy.amax = amaxes ? (float *)t_alloc(4 * (size_t)amaxes) : NULL;
            if (c.f.delayed) t_upload(copy.amax, &seen, 4);
            d.phase = GMM_QUANT_ALL;
            d.groups = &one;
            d.src = &src;
            d.rowwise = k ? NULL : &copy;
            d.columnwise = k ? &copy : NULL;
            d.first_group = c.f.stochastic ? (int32_t)g : 0;
            if (d.scale) d.scale = (const float *)t_in(&factor, 4);
            T_OK(quantize(&d, GMM_OP_QUANTIZE));
            codes = (const uint8_t *)t_get(copy.data, (size_t)l.data_bytes);
            if (l.transposed)
                for (int64_t i = 0; i < 96; i++)
                    t_same("codes of one group", codes + i * l.data_cols * bits / 8,
                           w->data + (i * all.data_cols + start) * bits / 8, (size_t)(l.data_cols * bits / 8));
            else t_same("codes of one group", codes, w->data + row * 96 * bits / 8, (size_t)l.data_bytes);
            t_same("scales of one group", t_get(copy.scale, (size_t)scales), w->scale + first, (size_t)scales);
            if (amaxes)
                t_same("amax of one group", t_get(copy.amax, 4 * (size_t)amaxes), w->amax + (c.f.row_amax ? row : g),
                       4 * (size_t)amaxes);
        }
}

/* Copies with equal codes, and re-quantization of decoded values. */
static void shared_codes(int arg) {
    variant v[VARIANTS];
    (void)variants(v);
    {
        quant_run r;
        quant_case c = { .f = v[arg].format, .units = 2, .rows0 = 256, .cols = 128, .source = GMM_BF16 };
        const int same = c.f.scaling == GMM_SCALING_TENSOR || c.f.scaling == GMM_SCALING_128X128 || c.f.square;
        const int turned = c.f.scaling != GMM_SCALING_MX32;
        uint8_t *a, *b;
        int64_t differ = 0;
        build(&r, &c);
        T_OK(quantize(&r.d, GMM_OP_QUANTIZE));
        a = (uint8_t *)t_get(r.copy[0].data, (size_t)r.want[0].data_bytes);
        b = (uint8_t *)t_get(r.copy[1].data, (size_t)r.want[1].data_bytes);
        for (int64_t u = 0; u < 2; u++)
            for (int64_t i = 0; i < 256; i++)
                for (int64_t j = 0; j < 128; j++) {
                    const int64_t p = (u * 256 + i) * 128 + j, q = turned ? (u * 128 + j) * 256 + i : p;
                    differ += c.f.dtype == GMM_E2M1 ? gmm_nibble(a, p) != gmm_nibble(b, q) : a[p] != b[q];
                }
        T_CHECK(same ? differ == 0 : differ > 1000, "%lld codes differ", (long long)differ);
    }
}

static gmm_status dequantize(const gmm_dequantization *d) {
    gmm_info info = GMM_ZERO;
    gmm_status s = gmm_dequantize_query(T.ctx, d, &info);
    void *workspace = s == GMM_OK ? t_workspace(info.workspace_bytes) : NULL;
    return s != GMM_OK ? s : gmm_dequantize(T.ctx, d, workspace, info.workspace_bytes, T.stream);
}

/* Dequantizes both copies to the values of the definitions. */
static void dequantizes(int arg) {
    static const int64_t sizes[5] = { 70, 0, 33, 150, 128 };
    variant v[VARIANTS];
    (void)variants(v);
    for (int i = 0; i < 6; i++) {
        quant_run r;
        quant_case c = { .f = v[arg].format, .grouped = i < 3, .units = i < 3 ? 5 : 2, .sizes = sizes, .rows0 = 80,
                         .cols = i % 2 && v[arg].format.dtype != GMM_E2M1 ? 97 : 96, .extra = i < 3 ? 3 : 0,
                         .source = GMM_BF16, .specials = i % 3 == 2 };
        const gmm_dtype to = floats[i % 3];
        if (c.f.scaling == GMM_SCALING_128X128 && c.grouped) continue;
        if (c.f.hadamard) c.specials = 0;
        build(&r, &c);
        T_OK(quantize(&r.d, GMM_OP_QUANTIZE));
        for (int k = 0; k < 2; k++) {
            const int64_t rows = c.grouped ? r.capacity : 2 * c.rows0, n = rows * c.cols;
            double *want = (double *)t_host((size_t)n * 8);
            t_mat out = t_mat_out(to, c.grouped ? 1 : 2, c.grouped ? r.capacity : c.rows0, c.cols);
            gmm_dequantization d = GMM_ZERO;
            double *got;
            int64_t row = 0;
            if (k && c.f.row_amax) continue;
            for (int32_t u = 0; u < c.units; u++) { /* value of each element, from the reference's own quantization */
                const int64_t m = c.grouped ? sizes[u] : c.rows0, P = c.grouped ? up(m, 128) : m;
                ref_copy q;
                memset(&q, 0, sizeof q);
                q.f = &c.f;
                q.source = c.source;
                q.direction = k ? GMM_COLUMNWISE : GMM_ROWWISE;
                q.live = m;
                q.lines = k ? c.cols : m;
                q.along = k ? P : c.cols;
                q.x = (float *)t_host((size_t)(q.lines * q.along) * 4 + 4);
                for (int64_t a = 0; a < m; a++)
                    for (int64_t b = 0; b < c.cols; b++)
                        q.x[k ? b * P + a : a * c.cols + b] = (float)r.src.v[(row + a) * c.cols + b];
                if (k && c.f.hadamard)
                    for (int64_t a = 0; a < q.lines * P; a += 16)
                        ref_hadamard(q.x + a, 1, (unsigned)c.f.hadamard & 0xFFFFu);
                q.quant_scale = r.scale_values[u];
                q.seed = r.random_values[0];
                q.offset = r.random_values[1];
                q.group = u;
                quantized(&q);
                for (int64_t a = 0; a < m; a++)
                    for (int64_t b = 0; b < c.cols; b++)
                        want[(row + a) * c.cols + b] = (double)ref_dequantized(&q, k ? b : a, k ? a : b);
                row += m;
            }
            d.count = r.d.count;
            d.rows = r.d.rows;
            d.cols = c.cols;
            d.groups = r.d.groups;
            d.direction = k ? GMM_COLUMNWISE : GMM_ROWWISE;
            d.src = &r.copy[k];
            d.dst = &out.mat;
            T_OK(dequantize(&d));
            got = t_mat_get(&out);
            t_exact("values", to, got, want, row * c.cols);
            for (int64_t a = row * c.cols; a < n; a++) T_CHECK(isnan(got[a]), "a row past the sum was written");
        }
    }
}

/* A columnwise copy from a rowwise one equals the copy from the dequantized values. */
static void requantizes(int arg) {
    static const int64_t sizes[3] = { 40, 0, 129 };
    variant v[VARIANTS];
    quant_run r, again;
    quant_case c = { .grouped = 1, .units = 3, .sizes = sizes, .cols = 96, .source = GMM_BF16, .extra = 9 };
    gmm_dequantization dq = GMM_ZERO;
    gmm_quantization d;
    t_mat values;
    (void)variants(v);
    c.f = v[arg].format;
    build(&r, &c);
    T_OK(quantize(&r.d, GMM_OP_QUANTIZE));
    values = t_mat_out(GMM_F32, 1, r.capacity, c.cols);
    dq.cols = c.cols;
    dq.groups = &r.groups;
    dq.src = &r.copy[0];
    dq.dst = &values.mat;
    T_OK(dequantize(&dq));
    build(&again, &c); /* new destinations; their expected bytes are not used */
    d = again.d;
    d.src = &values.mat;
    d.rowwise = NULL;
    T_OK(quantize(&d, GMM_OP_QUANTIZE));
    d.src = &r.copy[0];
    d.columnwise = &r.copy[1];
    t_poison(r.copy[1].data, 0xFF, (size_t)r.want[1].data_bytes);
    t_poison(r.copy[1].scale, 0xFF, (size_t)r.want[1].scale_bytes);
    T_OK(quantize(&d, GMM_OP_REQUANTIZE));
    t_same("elements", t_get(r.copy[1].data, (size_t)r.want[1].data_bytes),
           t_get(again.copy[1].data, (size_t)r.want[1].data_bytes), (size_t)r.want[1].data_bytes);
    t_same("scales", t_get(r.copy[1].scale, (size_t)r.want[1].scale_bytes),
           t_get(again.copy[1].scale, (size_t)r.want[1].scale_bytes), (size_t)r.want[1].scale_bytes);
}

/* Matrices in tables, in host memory (0) or not (1), give the bytes of packed ones: quantized and requantized. */
enum { TABLED = 3 };
typedef struct tabled { gmm_mat mat; gmm_layout l; void *data[TABLED], *scale[TABLED]; } tabled;
static tabled tabled_make(const gmm_format *f, gmm_direction direction, int64_t rows, int64_t cols, int form) {
    tabled t;
    memset(&t, 0, sizeof t);
    T_CHECK(gmm_layout_of(f->dtype, f->scaling, f->order, direction, rows, cols, &t.l, NULL) == GMM_OK, "layout");
    t.mat = gmm_mat_quantized(f, direction, NULL, NULL, NULL);
    if (form == 2) { /* packed */
        t.mat.data = t_alloc((size_t)(TABLED * t.l.data_bytes));
        t.mat.scale = t_alloc((size_t)(TABLED * t.l.scale_bytes));
    }
    for (int u = 0; u < TABLED; u++) {
        t.data[u] = form == 2 ? (char *)t.mat.data + u * t.l.data_bytes : t_alloc((size_t)t.l.data_bytes);
        t.scale[u] = form == 2 ? (char *)t.mat.scale + u * t.l.scale_bytes : t_alloc((size_t)t.l.scale_bytes);
    }
    if (form == 2) return t;
    t.mat.flags |= form == 0 ? (uint32_t)GMM_MAT_TABLE_ON_HOST : 0u;
    t.mat.table = (void *const *)(form == 0 ? memcpy(t_host(sizeof t.data), t.data, sizeof t.data)
                                            : t_in(t.data, sizeof t.data));
    t.mat.scale_table = (void *const *)(form == 0 ? memcpy(t_host(sizeof t.scale), t.scale, sizeof t.scale)
                                                  : t_in(t.scale, sizeof t.scale));
    return t;
}
static void tables(int arg) {
    enum { ROWS = 96, COLS = 64 };
    const gmm_format first = gmm_recipe_of(GMM_RECIPE_FP8_CURRENT).input;
    const gmm_format second = gmm_recipe_of(GMM_RECIPE_MXFP8).input;
    const t_mat src = t_mat_in(GMM_BF16, TABLED, ROWS, COLS, T_REALS);
    tabled t[2][3]; /* [in tables, packed][first format, both copies of the second] */
    for (int form = 0; form < 2; form++) {
        gmm_quantization d = GMM_ZERO;
        t[form][0] = tabled_make(&first, GMM_ROWWISE, ROWS, COLS, form ? 2 : arg);
        for (int k = 0; k < 2; k++)
            t[form][1 + k] = tabled_make(&second, (gmm_direction)k, ROWS, COLS, form ? 2 : arg);
        d.count = TABLED;
        d.rows = ROWS;
        d.cols = COLS;
        d.format = &first;
        d.src = &src.mat;
        d.rowwise = &t[form][0].mat;
        T_OK(quantize(&d, GMM_OP_QUANTIZE));
        d.format = &second;
        d.src = &t[form][0].mat;
        d.rowwise = &t[form][1].mat;
        d.columnwise = &t[form][2].mat;
        T_OK(quantize(&d, GMM_OP_REQUANTIZE));
    }
    for (int k = 0; k < 3; k++)
        for (int u = 0; u < TABLED; u++) {
            const size_t data = (size_t)t[0][k].l.data_bytes, scale = (size_t)t[0][k].l.scale_bytes;
            t_same("elements", t_get(t[0][k].data[u], data), t_get(t[1][k].data[u], data), data);
            t_same("scales", t_get(t[0][k].scale[u], scale), t_get(t[1][k].scale[u], scale), scale);
        }
}

/* A rowwise copy of a matrix of `rows` x `cols` floats, each rounded to BF16; scales as words or bytes. */
typedef struct one_copy { gmm_mat mat; uint8_t *code; void *scale; float *amax; } one_copy;
static one_copy copy_of(const gmm_format *f, gmm_direction direction, const float *x, int64_t rows, int64_t cols,
                        const float *scale) {
    t_mat src = t_mat_in(GMM_BF16, 1, rows, cols, T_REALS);
    gmm_quantization d = GMM_ZERO;
    gmm_layout l = GMM_ZERO;
    one_copy r;
    for (int64_t i = 0; i < rows * cols; i++) src.v[i] = (double)x[i];
    t_mat_put(&src);
    T_CHECK(gmm_layout_of(f->dtype, f->scaling, f->order, direction, rows, cols, &l, NULL) == GMM_OK, "layout");
    r.mat = gmm_mat_quantized(f, direction, t_alloc((size_t)l.data_bytes), t_alloc_aligned((size_t)l.scale_bytes, 4),
                              (float *)t_alloc(4));
    if (f->delayed) t_poison(r.mat.amax, 0, 4);
    d.count = 1;
    d.rows = rows;
    d.cols = cols;
    d.format = f;
    d.src = &src.mat;
    d.rowwise = direction == GMM_ROWWISE ? &r.mat : NULL;
    d.columnwise = direction == GMM_ROWWISE ? NULL : &r.mat;
    d.scale = scale ? (const float *)t_in(scale, 4) : NULL;
    T_OK(quantize(&d, GMM_OP_QUANTIZE));
    r.code = (uint8_t *)t_get(r.mat.data, (size_t)l.data_bytes);
    r.scale = t_get(r.mat.scale, (size_t)l.scale_bytes);
    r.amax = (float *)t_get(r.mat.amax, 4);
    return r;
}

enum { DELAYED, CURRENT_E4M3, CURRENT_E5M2, BLOCK_POW2, BLOCK, MXFP8_E4M3, MXFP8_E5M2, NVFP4, SPECIALS };
static const struct { const char *name; gmm_dtype dtype; gmm_scaling scaling; int delayed, pow2; } specials[] = {
    [DELAYED] = { "tensor delayed e4m3", GMM_E4M3, GMM_SCALING_TENSOR, 1, 0 },
    [CURRENT_E4M3] = { "tensor current e4m3", GMM_E4M3, GMM_SCALING_TENSOR, 0, 0 },
    [CURRENT_E5M2] = { "tensor current e5m2", GMM_E5M2, GMM_SCALING_TENSOR, 0, 0 },
    [BLOCK_POW2] = { "1x128 e4m3 pow2", GMM_E4M3, GMM_SCALING_1X128, 0, 1 },
    [BLOCK] = { "1x128 e4m3", GMM_E4M3, GMM_SCALING_1X128, 0, 0 },
    [MXFP8_E4M3] = { "mxfp8 e4m3", GMM_E4M3, GMM_SCALING_MX32, 0, 0 },
    [MXFP8_E5M2] = { "mxfp8 e5m2", GMM_E5M2, GMM_SCALING_MX32, 0, 0 },
    [NVFP4] = { "nvfp4", GMM_E2M1, GMM_SCALING_NV16, 0, 0 },
};

/* Results of zero, Inf, NaN, the smallest and the largest value by the formats' rules: the first row begins with that
   value and a 2, the second has a 3 in place of the 2; the rest is zero. (Zero and the smallest value stand alone.) */
static void special_values(int arg) {
    enum { CASES = 6, NONE = 1 };
    typedef struct expected { uint8_t first, two, three; uint32_t scale[2], amax; } expected;
    static const struct { uint32_t bits; int alone; } cases[CASES] = {
        { 0x00000000, 1 }, { 0x7F800000, 0 }, { 0xFF800000, 0 }, { 0x7FC00000, 0 }, { 0x00010000, 1 },
        { 0x7F7F0000, 0 } };
    static const expected want[SPECIALS][CASES] = {
        [DELAYED] = { /* by a scale of 2 */
          { 0x00, 0, 0, { 0x3F000000, 0x3F000000 }, 0 },
          { 0x7E, 0x48, 0x4C, { 0x3F000000, 0x3F000000 }, 0x7F800000 },
          { 0xFE, 0x48, 0x4C, { 0x3F000000, 0x3F000000 }, 0x7F800000 },
          { 0x7F, 0x48, 0x4C, { 0x3F000000, 0x3F000000 }, 0x40400000 },
          { 0x00, 0, 0, { 0x3F000000, 0x3F000000 }, 0x00010000 },
          { 0x7E, 0x48, 0x4C, { 0x3F000000, 0x3F000000 }, 0x7F7F0000 } },
        [CURRENT_E4M3] = {
          { 0x00, 0, 0, { 0x3F800000, 0x3F800000 }, 0 },
          { 0x7E, 0x40, 0x44, { 0x3F800000, 0x3F800000 }, 0x7F800000 },
          { 0xFE, 0x40, 0x44, { 0x3F800000, 0x3F800000 }, 0x7F800000 },
          { 0x7F, 0x79, 0x7E, { 0x3BDB6DB7, 0x3BDB6DB7 }, 0x40400000 },
          { 0x10, 0, 0, { 0x00200000, 0x00200000 }, 0x00010000 },
          { 0x7E, 0x00, 0x00, { 0x7B11B6DB, 0x7B11B6DB }, 0x7F7F0000 } },
        [CURRENT_E5M2] = {
          { 0x00, 0, 0, { 0x3F800000, 0x3F800000 }, 0 },
          { 0x7B, 0x40, 0x42, { 0x3F800000, 0x3F800000 }, 0x7F800000 },
          { 0xFB, 0x40, 0x42, { 0x3F800000, 0x3F800000 }, 0x7F800000 },
          { 0x7F, 0x79, 0x7B, { 0x385B6DB7, 0x385B6DB7 }, 0x40400000 },
          { 0x28, 0, 0, { 0x00200000, 0x00200000 }, 0x00010000 },
          { 0x7B, 0x00, 0x00, { 0x7791B6DB, 0x7791B6DB }, 0x7F7F0000 } },
        [BLOCK_POW2] = {
          { 0x00, 0, 0, { 0x3F800000, 0x3F800000 }, NONE },
          { 0x7E, 0x40, 0x7C, { 0x3F800000, 0x3C000000 }, NONE },
          { 0xFE, 0x40, 0x7C, { 0x3F800000, 0x3C000000 }, NONE },
          { 0x7F, 0x78, 0x7C, { 0x3C000000, 0x3C000000 }, NONE },
          { 0x08, 0, 0, { 0x00400000, 0x3F800000 }, NONE },
          { 0x78, 0x00, 0x7C, { 0x7B800000, 0x3C000000 }, NONE } },
        [BLOCK] = {
          { 0x00, 0, 0, { 0x3F800000, 0x3F800000 }, NONE },
          { 0x7E, 0x40, 0x7E, { 0x3F800000, 0x3BDB6DB7 }, NONE },
          { 0xFE, 0x40, 0x7E, { 0x3F800000, 0x3BDB6DB7 }, NONE },
          { 0x7F, 0x7E, 0x7E, { 0x3B924925, 0x3BDB6DB7 }, NONE },
          { 0x10, 0, 0, { 0x00202020, 0x3F800000 }, NONE },
          { 0x7E, 0x00, 0x7E, { 0x7B11B6DB, 0x3BDB6DB7 }, NONE } },
        [MXFP8_E4M3] = {
          { 0x00, 0, 0, { 0x00, 0x00 }, NONE },
          { 0x7E, 0x00, 0x7C, { 0xFE, 0x78 }, NONE },
          { 0xFE, 0x00, 0x7C, { 0xFE, 0x78 }, NONE },
          { 0x7F, 0x78, 0x7C, { 0x78, 0x78 }, NONE },
          { 0x08, 0, 0, { 0x00, 0x00 }, NONE },
          { 0x78, 0x00, 0x7C, { 0xF7, 0x78 }, NONE } },
        [MXFP8_E5M2] = {
          { 0x00, 0, 0, { 0x00, 0x00 }, NONE },
          { 0x7B, 0x00, 0x7A, { 0xFE, 0x71 }, NONE },
          { 0xFB, 0x00, 0x7A, { 0xFE, 0x71 }, NONE },
          { 0x7F, 0x78, 0x7A, { 0x71, 0x71 }, NONE },
          { 0x24, 0, 0, { 0x00, 0x00 }, NONE },
          { 0x78, 0x00, 0x7A, { 0xF0, 0x71 }, NONE } },
        [NVFP4] = {
          { 0x0, 0, 0, { 0x00, 0x00 }, 0 },
          { 0x7, 0x0, 0x7, { 0x7E, 0x30 }, 0x7F800000 },
          { 0xF, 0x0, 0x7, { 0x7E, 0x30 }, 0x7F800000 },
          { 0x7, 0x7, 0x7, { 0x79, 0x7E }, 0x40400000 },
          { 0x0, 0, 0, { 0x03, 0x00 }, 0x00010000 },
          { 0x7, 0x0, 0x7, { 0x7E, 0x00 }, 0x7F7F0000 } } };
    const float two = 2.0f;
    gmm_format f = named(specials[arg].dtype, specials[arg].scaling);
    f.delayed = specials[arg].delayed;
    f.pow2 = specials[arg].pow2;
    for (int k = 0; k < CASES; k++) {
        const expected *w = &want[arg][k];
        float x[64] = { 0 };
        uint32_t scale[2];
        one_copy r;
        x[0] = float_of(cases[k].bits);
        if (!cases[k].alone) x[1] = 2.0f, x[32] = 3.0f;
        r = copy_of(&f, GMM_ROWWISE, x, 2, 32, f.delayed ? &two : NULL);
        for (int i = 0; i < 64; i++) {
            const uint8_t code = f.dtype == GMM_E2M1 ? gmm_nibble(r.code, i) : r.code[i];
            const uint8_t right = i == 0 ? w->first : i == 1 ? w->two : i == 32 ? w->three : 0;
            T_CHECK(code == right, "case %d: code %d is %02x, not %02x", k, i, code, right);
        }
        for (int i = 0; i < 2; i++)
            scale[i] = f.scaling == GMM_SCALING_MX32 || f.scaling == GMM_SCALING_NV16
                           ? ((uint8_t *)r.scale)[4 * i]
                           : ((uint32_t *)r.scale)[f.scaling == GMM_SCALING_TENSOR ? 0 : i];
        T_CHECK(scale[0] == w->scale[0] && scale[1] == w->scale[1], "case %d: scales %08x %08x, not %08x %08x", k,
                scale[0], scale[1], w->scale[0], w->scale[1]);
        if (w->amax != NONE)
            T_CHECK(gmm_f32_bits(*r.amax) == w->amax, "case %d: amax %08x, not %08x", k, gmm_f32_bits(*r.amax),
                    w->amax);
    }
}

static void layout_vectors(int arg) {
    (void)arg;
    { /* tiles of 128 x 128 with the same amax in every row and column: both copies hold the same codes */
        gmm_format f = named(GMM_E4M3, GMM_SCALING_1X128);
        float *x = (float *)t_host(256 * 128 * sizeof(float));
        one_copy a, b;
        for (int i = 0; i < 256 * 128; i++)
            x[i] = i / 128 % 128 == i % 128 ? (i < 128 * 128 ? 5.0f : -3.0f) : (float)(t_real() * 3.0);
        a = copy_of(&f, GMM_ROWWISE, x, 256, 128, NULL);
        b = copy_of(&f, GMM_COLUMNWISE, x, 256, 128, NULL);
        for (int i = 0; i < 256; i++)
            for (int j = 0; j < 128; j++)
                T_CHECK(a.code[i * 128 + j] == b.code[j * 256 + i], "row %d column %d", i, j);
    }
    { /* before the first scale update elements are quantized by a scale of 1 */
        gmm_format f = named(GMM_E4M3, GMM_SCALING_TENSOR);
        float x[32], amax = 0.0f;
        one_copy r;
        for (int i = 0; i < 32; i++) {
            x[i] = (float)ref_round(GMM_BF16, ldexp(t_real(), i - 16));
            amax = fmaxf(amax, fabsf(x[i]));
        }
        f.delayed = 1;
        r = copy_of(&f, GMM_ROWWISE, x, 1, 32, NULL);
        for (int i = 0; i < 32; i++) T_CHECK(r.code[i] == gmm_f32_to_e4m3(x[i]), "element %d", i);
        T_CHECK(*(float *)r.scale == 1.0f && *r.amax == amax, "scale %g amax %g",
                (double)*(float *)r.scale, (double)*r.amax);
    }
    for (int k = 0; k < 4; k++) { /* the padding of the scales of 2880 x 2880 is zero, and nothing else is */
        enum { N = 2880 };
        gmm_format f = named(k & 1 ? GMM_E2M1 : GMM_E4M3, k & 1 ? GMM_SCALING_NV16 : GMM_SCALING_MX32);
        float *x = (float *)t_host((size_t)N * N * sizeof(float));
        const int64_t used = N / (k & 1 ? 16 : 32), cols = up(used, 4);
        one_copy r;
        int64_t zeros = 0;
        for (int64_t i = 0; i < (int64_t)N * N; i++) x[i] = 1.0f + (float)(i % 7);
        f.order = GMM_SCALES_SWIZZLED;
        r = copy_of(&f, k & 2 ? GMM_COLUMNWISE : GMM_ROWWISE, x, N, N, NULL);
        for (int64_t i = 0; i < 2944; i++)
            for (int64_t j = 0; j < cols; j++) {
                const int64_t tile = i / 128 * (cols / 4) + j / 4;
                const uint8_t s = ((uint8_t *)r.scale)[tile * 512 + i % 32 * 16 + i % 128 / 32 * 4 + j % 4];
                zeros += s == 0;
                T_CHECK((s == 0) == (i >= N || j >= used), "scale %d, %d is %02x", (int)i, (int)j, s);
            }
        T_CHECK(zeros == 2944 * cols - N * used, "%lld zeros", (long long)zeros);
    }
}

/* Groups padded by gmm_pad have the same amaxes, scales and codes as before, and codes 0 in their padding. */
static void padded(int arg) {
    static const int64_t sizes[5] = { 70, 0, 33, 1, 128 };
    static const int32_t aligns[3] = { 16, 32, 128 };
    for (int n = 0; n < 3; n++) {
        enum { COLS = 64, G = 5, T0 = 232 };
        gmm_format f = arg ? named(GMM_E2M1, GMM_SCALING_NV16) : named(GMM_E4M3, GMM_SCALING_TENSOR);
        const int64_t R = T0 + G * (aligns[n] - 1);
        t_mat src = t_mat_in(GMM_BF16, 1, T0, COLS, T_REALS), dst = t_mat_out(GMM_BF16, 1, R, COLS);
        gmm_groups groups = GMM_ZERO;
        gmm_padding pad = GMM_ZERO;
        gmm_info info = GMM_ZERO;
        gmm_mat copy[2];
        int32_t *padded_sizes = (int32_t *)t_alloc(G * sizeof *padded_sizes);
        uint8_t *codes[2], *scales[2];
        int64_t row = 0, wide = 0, start = 0;
        groups.count = G;
        groups.capacity = T0;
        groups.splits = t_in(sizes, sizeof sizes);
        groups.dtype = GMM_I64;
        pad.align = aligns[n];
        pad.cols = COLS;
        pad.padded_capacity = R;
        pad.groups = &groups;
        pad.src = &src.mat;
        pad.dst = &dst.mat;
        pad.sizes = padded_sizes;
        T_OK(gmm_pad_query(T.ctx, GMM_OP_PAD, &pad, &info));
        T_OK(gmm_pad(T.ctx, &pad, t_workspace(info.workspace_bytes), info.workspace_bytes, T.stream));
        for (int k = 0; k < 2; k++) {
            gmm_quantization d = GMM_ZERO;
            gmm_layout l = GMM_ZERO;
            if (k) groups.capacity = R, groups.splits = padded_sizes, groups.dtype = GMM_I32;
            T_CHECK(gmm_layout_of_groups(f.dtype, f.scaling, f.order, GMM_ROWWISE, G, groups.capacity, COLS, &l,
                                         NULL) == GMM_OK, "layout");
            copy[k] = gmm_mat_quantized(&f, GMM_ROWWISE, t_alloc((size_t)l.data_bytes),
                                        t_alloc_aligned((size_t)l.scale_bytes, 4), (float *)t_alloc(4 * G));
            d.groups = &groups;
            d.cols = COLS;
            d.format = &f;
            d.src = k ? &dst.mat : &src.mat;
            d.rowwise = &copy[k];
            T_OK(quantize(&d, GMM_OP_QUANTIZE));
            codes[k] = (uint8_t *)t_get(copy[k].data, (size_t)l.data_bytes);
            scales[k] = (uint8_t *)t_get(copy[k].scale, (size_t)l.scale_bytes);
        }
        t_same("amaxes", t_get(copy[1].amax, 4 * G), t_get(copy[0].amax, 4 * G), 4 * G);
        if (!arg) t_same("scales", scales[1], scales[0], 4 * G);
        for (int g = 0; g < G; row += sizes[g], wide += up(sizes[g], aligns[n]), start += up(sizes[g++], 128)) {
            const size_t bytes = arg ? COLS / 2 : COLS, blocks16 = COLS / 16;
            t_same("codes", codes[1] + (size_t)wide * bytes, codes[0] + (size_t)row * bytes,
                   (size_t)sizes[g] * bytes);
            t_bytes("padding", codes[1] + (size_t)(wide + sizes[g]) * bytes, 0,
                    (size_t)(up(sizes[g], aligns[n]) - sizes[g]) * bytes);
            if (arg) t_same("scales", scales[1] + (size_t)start * blocks16, scales[0] + (size_t)start * blocks16,
                            (size_t)up(sizes[g], 128) * blocks16);
        }
    }
}

/* The skip word; poison beyond the used part of a buffer; thread counts. */
static void skips(int recipe) {
    static const int64_t sizes[4] = { 70, 0, 33, 150 };
    const gmm_recipe_kind kind = (gmm_recipe_kind)recipe;
    quant_case c = { .grouped = 1, .units = 4, .sizes = sizes, .cols = 96, .source = GMM_BF16, .extra = 30,
                     .gathered = recipe % 2 * 4 };
    quant_run r;
    int32_t word = 1;
    int32_t *skip = (int32_t *)t_alloc(4);
    t_mat sums = t_mat_out(GMM_F32, 4, 1, 96);
    gmm_grad db = GMM_ZERO;
    void *before[2];
    c.f = gmm_recipe_of(kind).grad;
    build(&r, &c);
    t_upload(skip, &word, 4);
    r.d.skip = skip;
    db.mat = &sums.mat;
    for (int k = 0; k < 2; k++) before[k] = t_get(r.copy[k].data, (size_t)r.want[k].data_bytes);
    T_OK(quantize(&r.d, GMM_OP_QUANTIZE));
    for (int k = 0; k < 2; k++)
        t_same("skipped", t_get(r.copy[k].data, (size_t)r.want[k].data_bytes), before[k], (size_t)r.want[k].data_bytes);
    word = 0;
    t_upload(skip, &word, 4);
    T_OK(quantize(&r.d, GMM_OP_QUANTIZE));
    check_copy(&r, 0);
    check_copy(&r, 1);
    r.d.db = &db;
    T_REFUSED(GMM_E_CONFIG, gmm_quantize(T.ctx, &r.d, NULL, 0, T.stream), ": quantization.db goes with ", "skip", NULL);
}

/* Column sums beside the copies have the bits of gmm_linear_bgrad: strips of 128 rows, full and not, by the vectorized
   casts (pad 0, at most 32 groups or more), which launch no kernel that reads the source again, and the general ones,
   added to what is there or not. The CPU engine, which has one way to them, takes three of the twelve. */
static void column_sums(int arg) {
    static const int64_t sizes[] = { 70, 0, 129, 8, 300, 1, 128 };
    static const gmm_dtype sources[] = { GMM_BF16, GMM_F16, GMM_F32 };
    enum { G = sizeof sizes / sizeof sizes[0], MANY = 5 * G, COLS = 288 };
    int64_t many[MANY];
    variant v[VARIANTS];
    (void)variants(v);
    for (int i = 0; i < MANY; i++) many[i] = i % 5 ? i % 3 : sizes[i / 5];
    for (int k = 0; k < (v[arg].format.hadamard ? 4 : 12); k += T.gpu ? 1 : 5) {
        const int32_t groups = k & 1 ? MANY : G;
        const quant_case c = { .f = v[arg].format, .source = sources[k / 4], .grouped = 1, .units = groups,
                               .sizes = k & 1 ? many : sizes, .cols = COLS, .extra = 30, .pad = k & 2 ? 1 : 0,
                               .gathered = k % 4 == 3 };
        t_mat sums = t_mat_make(GMM_F32, groups, 1, COLS, 0, 0, k & 1 ? T_TABLE_HOST : T_TABLE, T_POISON);
        t_mat want = t_mat_out(GMM_F32, groups, 1, COLS);
        gmm_grad db = GMM_ZERO, db2 = GMM_ZERO;
        gmm_linear l = GMM_ZERO;
        quant_run r;
        build(&r, &c);
        for (int64_t i = 0; i < (int64_t)groups * COLS; i++) sums.v[i] = want.v[i] = (float)t_real();
        if (k & 1) t_mat_put(&sums), t_mat_put(&want);
        db.main_grad = db2.main_grad = k & 1;
        db.mat = &sums.mat;
        db2.mat = &want.mat;
        r.d.db = &db;
        T_OK(quantize(&r.d, GMM_OP_QUANTIZE));
        check_copy(&r, 0);
        check_copy(&r, 1);
        l.groups = &r.groups;
        l.in_features = 32;
        l.out_features = COLS;
        l.dy = r.d.src;
        l.dy_index = r.d.src_index;
        l.index_rows = r.d.index_rows;
        l.index_div = r.d.index_div;
        l.db = &db2;
        T_OK(t_linear(T.ctx, GMM_OP_LINEAR_BGRAD, &l));
        t_same("column sums", t_mat_bits(&sums), t_mat_bits(&want), (size_t)groups * COLS * 4);
#ifdef HAVE_CUDA
        if (T.gpu) {
            const gmm_format *f = &c.f;
            const int general = c.pad || f->four_over_six || (f->stochastic && c.source != GMM_BF16) ||
                                (f->dtype == GMM_E2M1 && f->scaling == GMM_SCALING_MX32);
            gmm_info info = GMM_ZERO;
            const char *error;
            gmm_status s;
            void *workspace;
            int kernels, passes;
            T_OK(gmm_quantize_query(T.ctx, GMM_OP_QUANTIZE, &r.d, &info));
            workspace = t_workspace(info.workspace_bytes);
            T_CHECK(!(error = device_begin_capture()), "begin: %s", error);
            s = gmm_quantize(T.ctx, &r.d, workspace, info.workspace_bytes, T.stream);
            error = device_end_capture_counted("gmm_linear_bgrad_partials", &kernels, &passes);
            T_CHECK(s == GMM_OK && !error, "capture: %s %s", gmm_last_error(T.ctx), error ? error : "");
            T_CHECK(passes == general, "%d of %d kernels read the source again, not %d", passes, kernels, general);
        }
#endif
    }
}

static void updates(int arg) {
    enum { SLOTS = 37, STRIDE = 41, LEN = 5 };
    float history[LEN][STRIDE], scale[SLOTS], h[LEN];
    float *device = (float *)t_alloc(sizeof history), *scales = (float *)t_alloc(sizeof scale);
    gmm_scale_update u = GMM_ZERO;
    u.slots = SLOTS;
    u.stride = STRIDE;
    u.history_length = LEN;
    u.margin = arg;
    u.most_recent = arg == 1;
    u.dtype = arg ? GMM_E5M2 : GMM_E4M3;
    u.history = device;
    u.scale = scales;
    for (int i = 0; i < LEN * STRIDE; i++) (&history[0][0])[i] = t_int(0, 4) ? (float)fabs(t_real()) : 0.0f;
    for (int i = 0; i < SLOTS; i++) scale[i] = (float)(1.0 + t_real() / 2.0);
    history[0][3] = INFINITY;
    t_upload(device, history, sizeof history);
    t_upload(scales, scale, sizeof scale);
    T_OK(gmm_update_scales(T.ctx, &u, T.stream));
    for (int i = 0; i < SLOTS; i++) {
        for (int j = 0; j < LEN; j++) h[j] = history[j][i];
        scale[i] = gmm_delayed_scale(h, 1, LEN, arg ? 57344.0f : 448.0f, arg, arg == 1, 0.0f, scale[i]);
        for (int j = 0; j < LEN; j++) history[j][i] = h[j];
    }
    t_same("history", t_get(device, sizeof history), history, sizeof history);
    t_same("scale", t_get(scales, sizeof scale), scale, sizeof scale);
}

static gmm_status doubled(void *user, float *amax, int32_t slots, gmm_stream stream) {
    float v[8];
    (void)stream;
    if (slots > 8) return GMM_E_COMM;
    t_download(v, amax, (size_t)slots * 4);
    for (int32_t i = 0; i < slots; i++) v[i] *= 2.0f;
    t_upload(amax, v, (size_t)slots * 4);
    ++*(int *)user;
    return GMM_OK;
}
static void update_reduces(int arg) {
    float history[2] = { 4.0f, 7.0f }, scale[2] = { 1.0f, 1.0f };
    int calls = 0;
    gmm_scale_update u = GMM_ZERO;
    (void)arg;
    u.slots = 2;
    u.history_length = 1;
    u.dtype = GMM_E4M3;
    u.history = (float *)t_alloc(8);
    u.scale = (float *)t_alloc(8);
    u.reduce = doubled;
    u.user = &calls;
    t_upload(u.history, history, 8);
    t_upload(u.scale, scale, 8);
    T_OK(gmm_update_scales(T.ctx, &u, T.stream));
    scale[0] = 56.0f;
    scale[1] = 32.0f;
    t_same("scale", t_get(u.scale, 8), scale, 8);
    T_CHECK(calls == 1, "%d calls", calls);
    if (!T.gpu) { /* refused before reduce is called */
        T_REFUSED(GMM_E_ARG, gmm_update_scales(T.ctx, &u, (gmm_stream)&calls), "stream", "NULL in a CPU context", NULL);
        T_CHECK(calls == 1, "%d calls", calls);
    }
    u.slots = 9;
    u.history = (float *)t_alloc(36);
    u.scale = (float *)t_alloc(36);
    T_REFUSED(GMM_E_COMM, gmm_update_scales(T.ctx, &u, T.stream), "gmm_update_scales", "reduce", NULL);
    u.dtype = GMM_E2M1;
    T_REFUSED(GMM_E_DTYPE, gmm_update_scales(T.ctx, &u, T.stream), "dtype", "e2m1", NULL);
    u.dtype = GMM_E4M3;
    u.margin = 64;
    T_REFUSED(GMM_E_ARG, gmm_update_scales(T.ctx, &u, T.stream), "margin", "64", NULL);
    u.margin = 0;
    u.stride = 8;
    T_REFUSED(GMM_E_STRIDE, gmm_update_scales(T.ctx, &u, T.stream), "stride", "8", NULL);
    u.stride = INT64_MAX / 4;
    u.history_length = 3;
    T_REFUSED(GMM_E_OVERFLOW, gmm_update_scales(T.ctx, &u, T.stream), "stride", "history_length 3", NULL);
    u.stride = 0;
    u.history_length = 0;
    T_REFUSED(GMM_E_ARG, gmm_update_scales(T.ctx, &u, T.stream), "history_length", NULL);
}

/* Values at the upper end of fp32: NV16 of large amaxes is dequantized to finite values, MX32 that rounds to 2^128 to
   Inf. */
static void largest_values(int arg) {
    static const struct { gmm_dtype dtype; float last; } mx[3] = { /* the largest bf16 value that stays finite */
        { GMM_E4M3, 0x1.eep127f }, { GMM_E5M2, 0x1.dep127f }, { GMM_E2M1, 0x1.bep127f }
    };
    float x[32] = { 0 };
    (void)arg;
    for (int k = 0; k < 4; k++) {
        gmm_format f = k < 3 ? named(mx[k].dtype, GMM_SCALING_MX32) : named(GMM_E2M1, GMM_SCALING_NV16);
        gmm_dequantization d = GMM_ZERO;
        t_mat out = t_mat_out(GMM_F32, 1, 1, 32);
        one_copy c;
        double *got;
        x[0] = k < 3 ? gmm_bf16_to_f32(0x7F7F) : 0x1.8p127f;
        x[1] = k < 3 ? mx[k].last : -0x1p127f;
        x[2] = k < 3 ? -gmm_bf16_to_f32((uint16_t)(gmm_f32_to_bf16(mx[k].last) + 1)) : 0x1p120f;
        c = copy_of(&f, GMM_ROWWISE, x, 1, 32, NULL);
        d.count = 1;
        d.rows = 1;
        d.cols = 32;
        d.src = &c.mat;
        d.dst = &out.mat;
        T_OK(dequantize(&d));
        got = t_mat_get(&out);
        if (k < 3) {
            T_CHECK(isinf(got[0]) && got[0] > 0.0, "%s: %a", gmm_dtype_name(f.dtype), got[0]);
            T_CHECK(isfinite(got[1]) && got[1] >= 0x1.8p127, "%s: %a", gmm_dtype_name(f.dtype), got[1]);
            T_CHECK(isinf(got[2]) && got[2] < 0.0, "%s: %a", gmm_dtype_name(f.dtype), got[2]);
        } else {
            T_CHECK(fabs(got[0] / 0x1.8p127 - 1.0) < 1e-6, "nv16: %a", got[0]);
            T_CHECK(fabs(got[1] / -0x1p127 - 1.0) < 1e-6, "nv16: %a", got[1]);
            T_CHECK(got[2] == 0.0, "nv16: %a", got[2]);
        }
    }
}

/* Columns after a group's rows in a transformed copy: up to the end of the run of 16 they hold the transform of the
   rows and zeros, then zeros up to the next group. Sizes that are multiples of 16 need only zeros. */
static void transformed_padding(int arg) {
    static const int64_t sizes[5] = { 5, 0, 33, 16, 129 };
    quant_case c = { .grouped = 1, .units = 5, .sizes = sizes, .cols = 96, .source = GMM_BF16 };
    quant_run r;
    gmm_layout l = GMM_ZERO;
    const uint8_t *code;
    int64_t start = 0, spread = 0;
    c.f = gmm_recipe_of(GMM_RECIPE_NVFP4).input;
    if (arg) c.f.order = GMM_SCALES_SWIZZLED;
    build(&r, &c);
    T_OK(quantize(&r.d, GMM_OP_QUANTIZE));
    T_CHECK(gmm_layout_of_groups(c.f.dtype, c.f.scaling, c.f.order, GMM_COLUMNWISE, 5, r.capacity, 96, &l, NULL) ==
            GMM_OK, "layout");
    code = (const uint8_t *)t_get(r.copy[1].data, (size_t)l.data_bytes);
    for (int g = 0; g < 5; start += up(sizes[g++], 128))
        for (int64_t line = 0; line < 96; line++)
            for (int64_t i = sizes[g]; i < up(sizes[g], 128); i++) {
                const int set = gmm_nibble(code, line * l.data_cols + start + i) != 0;
                spread += set;
                T_CHECK(!set || i < up(sizes[g], 16), "group %d, line %d, column %d is not 0", g, (int)line, (int)i);
            }
    T_CHECK(spread > 0, "nothing behind the rows");
}

/* ld 0 of a columnwise copy of groups means the padded capacity, whatever the sizes are. */
static void packed_columns(int arg) {
    static const int64_t sizes[3] = { 40, 0, 20 };
    quant_case c = { .grouped = 1, .units = 3, .sizes = sizes, .cols = 96, .extra = 100, .source = GMM_BF16 };
    const uint8_t *want = NULL;
    c.f = gmm_recipe_of(arg ? GMM_RECIPE_FP8_BLOCK : GMM_RECIPE_NVFP4).input;
    for (int k = 0; k < 2; k++) {
        const int64_t ld = gmm_padded_capacity(3, 160), bytes = 96 * ld / (arg ? 1 : 2);
        quant_run r;
        t_reseed(28);
        build(&r, &c);
        r.d.rowwise = NULL;
        r.copy[1].ld = k ? ld : 0;
        T_OK(quantize(&r.d, GMM_OP_QUANTIZE));
        if (k == 0) want = (const uint8_t *)t_get(r.copy[1].data, (size_t)bytes);
        else t_same("data", t_get(r.copy[1].data, (size_t)bytes), want, (size_t)bytes);
        r.copy[1].ld = ld - 2;
        T_REFUSED(GMM_E_STRIDE, gmm_quantize(T.ctx, &r.d, NULL, 0, T.stream), "columnwise", "ld", NULL);
    }
}

/* 4-over-6 as its contract states it. */
static void four_over_six(int arg) {
    for (int i = 0; i < 400; i++) {
        gmm_format f = named(GMM_E2M1, GMM_SCALING_NV16);
        static float x[16 * GMM_TILE];
        static uint8_t code[16 * GMM_TILE];
        static uint32_t scale[16 * GMM_TILE_BLOCKS];
        const float most = i & 1 ? 256.0f : 448.0f, A = (float)ldexp(1.0 + fabs(t_real()), (int)t_int(-20, 20));
        const int lines = i & 2 ? 16 : 1, squared = i & 4;
        float amax = 0.0f, base, S = 6.0f * most / A, error[2];
        uint8_t byte[2];
        gmm_tile t = GMM_ZERO;
        f.four_over_six = squared ? 2 : 1;
        f.e4m3_256 = i & 1;
        f.square = lines == 16;
        for (int l = 0; l < lines; l++)
            for (int j = 0; j < 16; j++) {
                const float v = i % 5 ? A * (float)t_real() : A * (float)t_int(-6, 6) / 6.0f; /* some are ties */
                x[l * GMM_TILE + j] = v;
                if (fabsf(v) > amax) amax = fabsf(v);
            }
        t.format = &f;
        t.source = GMM_F32;
        t.lines = lines;
        t.along = 16;
        t.x = x;
        t.amax = &A;
        gmm_quantize_tile(&t, code, scale);
        base = amax / 6.0f * S;
        byte[0] = gmm_f32_to_e4m3(base);
        byte[1] = gmm_f32_to_e4m3(base * 1.5f);
        for (int k = 0; k < 2; k++) {
            const gmm_nv_global g = gmm_nv_global_of(A, most);
            float row[16] = { 0 };
            for (int l = 0; l < lines; l++)
                for (int j = 0; j < 16; j++) {
                    const float v = x[l * GMM_TILE + j];
                    const float q = gmm_e2m1_to_f32(gmm_f32_to_e2m1(v * gmm_nv_encode(&g, byte[k])));
                    const float miss = q * gmm_e4m3_to_f32(byte[k]) * A / (6.0f * most) - v;
                    row[l] += squared ? miss * miss : fabsf(miss);
                }
            for (int apart = 8; apart > 0; apart /= 2)
                for (int l = 0; l < apart; l++) row[l] += row[l + apart];
            error[k] = row[0];
        }
        for (int l = 0; l < lines; l++)
            T_CHECK(scale[l * GMM_TILE_BLOCKS] == byte[error[1] < error[0]],
                    "case %d: scale %02x, candidates %02x %02x, errors %a %a", i, scale[l * GMM_TILE_BLOCKS], byte[0],
                    byte[1], (double)error[0], (double)error[1]);
    }
    (void)arg;
}

static void refusals(int arg) {
    static const int64_t sizes[2] = { 40, 20 };
    quant_case c = { .grouped = 1, .units = 2, .sizes = sizes, .cols = 96, .source = GMM_BF16 };
    quant_run r;
    gmm_quantization d;
    gmm_format f;
    gmm_mat m;
    gmm_info info = GMM_ZERO;
    const int32_t *index = (const int32_t *)t_alloc(60 * sizeof *index);
    (void)arg;
    c.f = gmm_recipe_of(GMM_RECIPE_NVFP4).grad;
    build(&r, &c);
#define QREFUSED(status, change, ...) do { \
        d = r.d; f = r.c.f; d.format = &f; m = r.copy[0]; d.rowwise = &m; \
        change; \
        T_REFUSED(status, gmm_quantize(T.ctx, &d, NULL, 0, T.stream), "gmm_quantize", __VA_ARGS__, NULL); \
    } while (0)
    QREFUSED(GMM_E_CONFIG, f.square = 1, "quantization.format.hadamard: ");
    QREFUSED(GMM_E_CONFIG, (f.hadamard = GMM_HADAMARD | 5), "columnwise", "hadamard");
    QREFUSED(GMM_E_CONFIG, memset(&f, 0, sizeof f), ": quantization.format.dtype: none");
    QREFUSED(GMM_E_CONFIG, d.phase = (gmm_quant_phase)3, "phase", "3");
    QREFUSED(GMM_E_NULL, (d.rowwise = NULL, d.columnwise = NULL), "rowwise");
    QREFUSED(GMM_E_NULL, d.random = NULL, "random");
    QREFUSED(GMM_E_NULL, d.src = NULL, "src");
    QREFUSED(GMM_E_NULL, m.amax = NULL, "rowwise", "amax");
    QREFUSED(GMM_E_NULL, m.scale = NULL, "rowwise", "scale");
    QREFUSED(GMM_E_NULL, m.data = NULL, "rowwise", "data");
    QREFUSED(GMM_E_STRIDE, m.ld = 94, "rowwise", "ld 94", "96");
    QREFUSED(GMM_E_STRIDE, m.ld = 97, "rowwise", "ld 97", "even");
    QREFUSED(GMM_E_OVERFLOW, m.ld = INT64_MAX - 1, "rowwise", "do not fit 64 bits");
    QREFUSED(GMM_E_DTYPE, m.dtype = GMM_E4M3, "rowwise", "e4m3");
    QREFUSED(GMM_E_DTYPE, m.scale_order = GMM_SCALES_SWIZZLED, "rowwise", "order 1");
    QREFUSED(GMM_E_CONFIG, m.flags = GMM_MAT_E4M3_256, "rowwise", "flags");
    QREFUSED(GMM_E_ARG, m.flags = 64, "rowwise", "flags");
    QREFUSED(GMM_E_ARG, m.hadamard = GMM_HADAMARD, "rowwise", "hadamard");
    QREFUSED(GMM_E_STRIDE, m.group_stride = 9999, "rowwise", "group_stride");
    QREFUSED(GMM_E_ARG, d.count = 2, "count");
    QREFUSED(GMM_E_ARG, d.cols = 0, "cols");
    QREFUSED(GMM_E_ARG, d.first_group = -1, "first_group");
    QREFUSED(GMM_E_OVERFLOW, d.first_group = (1 << 24) - 1, "first_group", "16777215", "2 groups");
    QREFUSED(GMM_E_WORKSPACE, d.first_group = (1 << 24) - 2, "workspace");
    QREFUSED(GMM_E_OVERFLOW, (d.groups = NULL, d.count = 1, d.rows = (int64_t)1 << 38), "rows", "2^40 blocks");
    QREFUSED(GMM_E_ARG, (d.groups = NULL, d.count = 0), "count", "groups");
    QREFUSED(GMM_E_ARG, (d.groups = NULL, d.count = 1), "rows");
    QREFUSED(GMM_E_ARG, (d.groups = NULL, d.count = 1, d.rows = 40), "rows", "40", "multiple of 16", "40 x 96",
             "Hadamard");
    QREFUSED(GMM_E_OVERFLOW, (d.groups = NULL, d.count = 1, d.rows = INT64_MAX), "rows");
    QREFUSED(GMM_E_VERSION, d.struct_size = 4096, "struct_size");
    QREFUSED(GMM_E_ARG, d.reserved = 7, "reserved: 7");
    QREFUSED(GMM_E_ARG, d.index_div = -3, "index_div: -3");
    QREFUSED(GMM_E_ARG, (d.src_index = index, d.index_rows = -2), "index_rows: -2");
    QREFUSED(GMM_E_NULL, (d.src_index = index, d.index_rows = 5, d.src = NULL), "src");
    QREFUSED(GMM_E_ALIGN, (d.src_index = (const int32_t *)((uintptr_t)index + 2), d.index_rows = 5), "src_index");
    QREFUSED(GMM_E_CONFIG, (d.groups = NULL, d.count = 1, d.rows = 48, d.src_index = index, d.index_rows = 5),
             "src_index", "goes with groups");
    QREFUSED(GMM_E_WORKSPACE, (void)0, "workspace");
    {
        gmm_groups none = r.groups; /* no rows: copies with one scale per tensor or column still have scales */
        none.capacity = 0;
        none.splits = t_alloc(64);
        t_poison((void *)(uintptr_t)none.splits, 0, 64);
        QREFUSED(GMM_E_NULL, (f = gmm_recipe_of(GMM_RECIPE_FP8_CURRENT).input, d.groups = &none, d.columnwise = NULL,
                              m = gmm_mat_quantized(&f, GMM_ROWWISE, NULL, NULL, NULL)), "rowwise", "scale");
        QREFUSED(GMM_E_NULL, (f = gmm_recipe_of(GMM_RECIPE_FP8_CURRENT).input, f.scaling = GMM_SCALING_ROW,
                              d.groups = &none, m = gmm_mat_quantized(&f, GMM_COLUMNWISE, NULL, NULL, NULL),
                              d.rowwise = NULL, d.columnwise = &m), "columnwise", "scale");
    }
    {
        t_mat wide = t_mat_in(GMM_F32, 1, r.capacity, 96, T_REALS);
        QREFUSED(GMM_E_DTYPE, d.src = &wide.mat, "src", "bf16");
    }
    d = r.d;
    d.src_index = index;
    T_REFUSED(GMM_E_CONFIG, gmm_requantize(T.ctx, &d, NULL, 0, T.stream), "gmm_requantize", "src_index", NULL);
    d = r.d;
    T_REFUSED(GMM_E_ARG, gmm_quantize_query(T.ctx, GMM_OP_CONVERT, &d, &info), "gmm_quantize_query", "op", NULL);
    {
        gmm_dequantization q = GMM_ZERO;
        t_mat out = t_mat_out(GMM_F32, 1, r.capacity, 96);
        q.cols = 96;
        q.groups = &r.groups;
        q.src = &r.copy[0];
        q.dst = &out.mat;
        q.direction = (gmm_direction)2;
        T_REFUSED(GMM_E_ARG, gmm_dequantize(T.ctx, &q, NULL, 0, T.stream), "gmm_dequantize", "direction", NULL);
        q.direction = GMM_ROWWISE;
        q.src = &r.src.mat;
        T_REFUSED(GMM_E_DTYPE, gmm_dequantize(T.ctx, &q, NULL, 0, T.stream), "src", "none", NULL);
    }
#undef QREFUSED
    { /* where the scales of groups of 0, 128, 256, 0 and 384 rows begin; how many scale rows a split can need */
        static const int64_t rows[] = { 0, 128, 256, 0, 384 }, mx[] = { 0, 0, 1024, 3072, 3072 };
        static const int64_t nv[] = { 0, 0, 2048, 6144, 6144 }, fp8[] = { 0, 0, 256, 768, 768 };
        int64_t start = 0;
        for (int g = 0; g < 5; g++) {
            T_CHECK(gmm_scale_base(GMM_SCALING_MX32, GMM_ROWWISE, 256, g, start, start) == mx[g] &&
                    gmm_scale_base(GMM_SCALING_NV16, GMM_ROWWISE, 256, g, start, start) == nv[g] &&
                    gmm_scale_base(GMM_SCALING_1X128, GMM_ROWWISE, 256, g, start, start) == fp8[g], "group %d", g);
            start += gmm_group_rows(rows[g]);
        }
        for (int i = 0; i < 1000; i++) {
            const int32_t G = (int32_t)t_int(1, 9);
            int64_t all = 0, need = 0;
            for (int32_t g = 0; g < G; g++) {
                const int64_t n = t_int(0, 3) ? t_int(0, 400) : t_int(0, 1);
                all += n;
                need += up(n, 128);
            }
            T_CHECK(gmm_padded_capacity(G, all) >= need && gmm_padded_capacity(G, all) % 128 == 0 &&
                    gmm_padded_capacity(G, all) <= all + 127 * G, "capacity");
        }
        T_CHECK(gmm_padded_capacity(5, 3) == 384 && gmm_padded_capacity(2, 128) == 256 &&
                gmm_padded_capacity(1, 128) == 128 && gmm_padded_capacity(7, 0) == 0, "tight capacities");
    }
}

/* Where a copy has element (row, col) of matrix u. */
static int64_t element_at(const quant_run *r, int k, int64_t u, int64_t row, int64_t col) {
    const int turned = k && r->c.f.scaling != GMM_SCALING_MX32;
    const int64_t lines = turned ? r->c.cols : r->c.rows0, along = turned ? r->c.rows0 : r->c.cols;
    const int64_t ld = r->copy[k].ld ? r->copy[k].ld : along;
    const int64_t stride = r->copy[k].group_stride ? r->copy[k].group_stride : lines * ld;
    return u * stride + (turned ? col * ld + row : row * ld + col);
}
static uint8_t code_at(gmm_dtype dtype, const uint8_t *data, int64_t i) {
    return dtype == GMM_E2M1 ? gmm_nibble(data, i) : data[i];
}

/* Masters in shards. Rank k has elements [cut[k], cut[k + 1]). */
enum { SHARD_RANKS = 4 };
typedef struct shard_run {
    quant_run r;
    float *master; /* rounds to the values of r.src */
    int64_t cut[SHARD_RANKS + 1];
    gmm_sharding d;
} shard_run;

/* Describes rank k's shard. */
static void shard_of(shard_run *s, int k) {
    s->d.length = s->cut[k + 1] - s->cut[k];
    s->d.start = s->d.length ? s->cut[k] : -1;
    s->d.master = s->d.length ? (const float *)t_in(s->master + s->cut[k], (size_t)s->d.length * 4) : NULL;
}
/* The amaxes of all ranks, reduced to their maximum. */
static void shard_amaxes(shard_run *s, int64_t amaxes) {
    float *reduced = (float *)t_host((size_t)amaxes * 4);
    memset(reduced, 0, (size_t)amaxes * 4);
    s->d.phase = GMM_QUANT_AMAX;
    for (int k = 0; k < SHARD_RANKS; k++) {
        const float *mine;
        shard_of(s, k);
        t_poison(s->d.amax, 0xFF, (size_t)amaxes * 4);
        T_OK(gmm_shard_cast(T.ctx, &s->d, T.stream));
        mine = (const float *)t_get(s->d.amax, (size_t)amaxes * 4);
        for (int64_t i = 0; i < amaxes; i++) {
            T_CHECK(mine[i] >= 0.0f, "amax %lld is %g", (long long)i, (double)mine[i]);
            if (mine[i] > reduced[i]) reduced[i] = mine[i];
        }
    }
    t_upload(s->d.amax, reduced, (size_t)amaxes * 4);
}
#define shard_amaxes(...) T_CALL(shard_amaxes, __VA_ARGS__)

/* Rank k casts into copies of its own: its codes, all scales and amaxes are written, and no other bit. */
static void shard_casts(shard_run *s, int k) {
    quant_run *r = &s->r;
    const quant_case *c = &r->c;
    const gmm_mat *copy[2] = { s->d.rowwise, s->d.columnwise };
    for (int w = 0; w < 2; w++) {
        t_poison(r->copy[w].data, 0xFF, (size_t)r->want[w].data_bytes);
        t_poison(r->copy[w].scale, 0xFF, (size_t)r->want[w].scale_bytes);
        if (!c->f.delayed) t_poison(r->copy[w].amax, 0xFF, (size_t)r->want[w].amaxes * 4);
    }
    shard_of(s, k);
    T_OK(gmm_shard_cast(T.ctx, &s->d, T.stream));
    for (int w = 0; w < 2; w++) {
        const ref_image *want = &r->want[w];
        uint8_t *image = (uint8_t *)t_host((size_t)want->data_bytes);
        if (!copy[w]) continue;
        memset(image, 0xFF, (size_t)want->data_bytes);
        for (int64_t e = s->cut[k]; e < s->cut[k + 1]; e++) {
            const int64_t at = element_at(r, w, e / (c->rows0 * c->cols), e / c->cols % c->rows0, e % c->cols);
            ref_put_code(c->f.dtype, image, at, code_at(c->f.dtype, want->data, at));
        }
        t_same(w ? "columnwise codes of a rank" : "rowwise codes of a rank",
               t_get(copy[w]->data, (size_t)want->data_bytes), image, (size_t)want->data_bytes);
        t_same(w ? "columnwise scales" : "rowwise scales", t_get(copy[w]->scale, (size_t)want->scale_bytes),
               want->scale, (size_t)want->scale_bytes);
        if (want->amaxes && !c->f.delayed)
            t_same("amaxes of a copy", t_get(copy[w]->amax, (size_t)want->amaxes * 4), want->amax,
                   (size_t)want->amaxes * 4);
    }
}
#define shard_casts(...) T_CALL(shard_casts, __VA_ARGS__)

/* Masters of `count` matrices whose shards end within blocks and bytes, or after each `unit` elements. One rank has no
   rows. */
static void shard_build(shard_run *s, const quant_case *c, int64_t unit) {
    const int64_t all = c->units * c->rows0 * c->cols;
    memset(s, 0, sizeof *s);
    build(&s->r, c);
    s->cut[1] = s->cut[2] = t_int(1, all / 3 / unit) * unit;
    s->cut[3] = t_int(all / 3 / unit + 1, 2 * all / 3 / unit) * unit | (unit == 1);
    s->cut[4] = all;
    s->master = (float *)t_host((size_t)all * 4);
    for (int64_t i = 0; i < all; i++) /* the models' dtypes cannot represent the masters exactly */
        s->master[i] = (float)(s->r.src.v[i] * (c->source == GMM_F32 ? 1.0 : 1.0 + ldexp(t_real(), -14)));
    s->d.count = c->units;
    s->d.rows = c->rows0;
    s->d.cols = c->cols;
    s->d.format = &s->r.c.f;
    s->d.model = c->source;
    s->d.scale = s->r.d.scale;
}

/* Sharded masters: each rank's cast equals its part of the cast of the masters rounded to the model's dtype, in both
   directions and in each alone. */
static void shards(int arg) {
    static const int64_t shapes[4][3] = { { 3, 96, 64 }, { 5, 40, 34 }, { 1, 130, 160 }, { 3, 33, 48 } };
    variant v[VARIANTS];
    (void)variants(v);
    for (int w = 0; w < 4; w++) {
        shard_run s;
        quant_case c = { .f = v[arg].format, .units = (int32_t)shapes[w][0], .rows0 = shapes[w][1],
                         .cols = shapes[w][2], .source = floats[w % 3], .pad = w == 1 };
        const gmm_format *f = &c.f;
        const int takes = f->scaling != GMM_SCALING_ROW && !f->hadamard && !f->stochastic && !f->four_over_six &&
                          !f->row_amax;
        if (f->scaling == GMM_SCALING_NV16 && c.rows0 % 2) continue; /* lines of a columnwise copy fill bytes */
        shard_build(&s, &c, w == 0 ? 16 * c.cols : 1);
        if (w == 2) s.r.copy[1].amax = s.r.copy[0].amax; /* both copies may share one array */
        for (int ways = 3; ways >= 1; ways--) {
            const int64_t amaxes = gmm_shard_amaxes(f, c.units, c.rows0, c.cols, ways >> 1);
            s.d.rowwise = ways & 1 ? &s.r.copy[0] : NULL;
            s.d.columnwise = ways & 2 ? &s.r.copy[1] : NULL;
            s.d.amax = (float *)t_alloc((size_t)amaxes * 4 + (size_t)!takes * 4);
            if (!takes) {
                s.d.phase = GMM_QUANT_AMAX;
                shard_of(&s, 0);
                T_CHECK(amaxes == 0, "%lld amaxes", (long long)amaxes);
                T_REFUSED(GMM_E_CONFIG, gmm_shard_cast(T.ctx, &s.d, T.stream), "gmm_shard_cast", "format", NULL);
                return;
            }
            shard_amaxes(&s, amaxes);
            s.d.phase = GMM_QUANT_CAST;
            for (int k = 0; k < SHARD_RANKS; k++) shard_casts(&s, k);
        }
        T_OK(quantize(&s.r.d, GMM_OP_QUANTIZE)); /* the whole matrices at once */
        check_copy(&s.r, 0);
        check_copy(&s.r, 1);
    }
}
static void shard_refusals(int arg) {
    shard_run s;
    quant_case c = { .f = named(GMM_E2M1, GMM_SCALING_NV16), .units = 3, .rows0 = 96, .cols = 64, .source = GMM_BF16 };
    (void)arg;
    c.f.square = 1;
    shard_build(&s, &c, 1);
    s.d.rowwise = &s.r.copy[0];
    s.d.columnwise = &s.r.copy[1];
    s.d.amax = (float *)t_alloc((size_t)gmm_shard_amaxes(&c.f, c.units, c.rows0, c.cols, 1) * 4);
    s.d.phase = GMM_QUANT_CAST;
    shard_of(&s, 3);
#define SREFUSED(status, change, ...) do { \
        gmm_sharding e = s.d; \
        gmm_mat m = s.r.copy[1]; \
        e.columnwise = &m; \
        change; \
        T_REFUSED(status, gmm_shard_cast(T.ctx, &e, T.stream), "gmm_shard_cast", __VA_ARGS__, NULL); \
    } while (0)
    SREFUSED(GMM_E_ARG, e.length++, "start", "length");
    SREFUSED(GMM_E_ARG, e.start = -1, "start", "-1");
    SREFUSED(GMM_E_NULL, e.master = NULL, "master");
    SREFUSED(GMM_E_NULL, e.amax = NULL, "amax");
    SREFUSED(GMM_E_NULL, (e.rowwise = e.columnwise = NULL), "rowwise", "columnwise");
    SREFUSED(GMM_E_CONFIG, e.phase = GMM_QUANT_ALL, "phase", "0");
    SREFUSED(GMM_E_DTYPE, e.model = GMM_E4M3, "model", "e4m3");
    SREFUSED(GMM_E_ARG, e.cols = 63, "cols", "63");
    SREFUSED(GMM_E_ARG, (e.rows = 95, e.length = 1, e.start = 0), "columnwise", "95", "do not fill bytes");
    SREFUSED(GMM_E_ARG, e.count = 0, "count");
    SREFUSED(GMM_E_VERSION, e.struct_size = 4096, "struct_size");
    SREFUSED(GMM_E_CONFIG, m.hadamard = GMM_HADAMARD, "columnwise", "hadamard");
    SREFUSED(GMM_E_DTYPE, m.scale_order = GMM_SCALES_SWIZZLED, "columnwise", "order 1");
    SREFUSED(GMM_E_STRIDE, m.ld = 97, "columnwise", "ld 97");
    SREFUSED(GMM_E_NULL, m.amax = NULL, "columnwise", "amax");
    SREFUSED(GMM_E_ARG, m.data = s.r.copy[0].data, "columnwise", "overlaps");
#undef SREFUSED
}

/* -------------------------------------------------------------------------------------------- Transposed NVFP4 --- */

/* Where a copy of `lines` lines has the scale of block b of line l. */
static int64_t nv_scale_at(gmm_scale_order order, int64_t along, int64_t l, int64_t b) {
    const int64_t J = up(blocks(along, 16), 4);
    return order == GMM_SCALES_SWIZZLED ? (l / 128 * (J / 4) + b / 4) * 512 + l % 32 * 16 + l % 128 / 32 * 4 + b % 4
                                        : l * J + b;
}
/* A destination of a transposition: its operand, and what its bytes shall be. */
typedef struct nv_target { gmm_mat mat; uint8_t *data, *scale; int64_t ld, stride, data_bytes, scale_bytes; } nv_target;

static nv_target nv_target_of(const quant_run *r, gmm_scale_order order, int64_t spare) {
    const quant_case *c = &r->c;
    const int64_t rows = c->rows0, cols = c->cols, per_matrix = up(cols, 128) * up(blocks(rows, 16), 4);
    gmm_format f = c->f;
    nv_target t = { .ld = rows + spare };
    f.order = order;
    t.stride = cols * t.ld + 2 * spare;
    t.data_bytes = ((c->units - 1) * t.stride + (cols - 1) * t.ld + rows) / 2;
    t.scale_bytes = c->units * per_matrix;
    t.mat = gmm_mat_quantized(&f, GMM_COLUMNWISE, t_alloc((size_t)t.data_bytes), t_alloc((size_t)t.scale_bytes),
                              (float *)t_alloc((size_t)c->units * 4));
    t.mat.ld = t.ld;
    t.mat.group_stride = t.stride;
    t.data = (uint8_t *)t_host((size_t)t.data_bytes);
    t.scale = (uint8_t *)t_host((size_t)t.scale_bytes);
    memset(t.data, 0xFF, (size_t)t.data_bytes);
    memset(t.scale, 0, (size_t)t.scale_bytes);
    for (int64_t u = 0; u < c->units; u++)
        for (int64_t j = 0; j < cols; j++) {
            for (int64_t i = 0; i < rows; i++)
                ref_put_code(GMM_E2M1, t.data, u * t.stride + j * t.ld + i,
                             gmm_nibble(r->want[0].data, element_at(r, 0, u, i, j)));
            for (int64_t b = 0; b < blocks(rows, 16); b++)
                t.scale[u * per_matrix + nv_scale_at(order, rows, j, b)] =
                    r->want[0].scale[u * r->want[0].scale_bytes / c->units +
                                     nv_scale_at(c->f.order, cols, b * 16, j / 16)];
        }
    return t;
}
/* The elements and scales of the columnwise copy that quantization gives are those of the target. */
static void nv_same_as_quantized(const quant_run *r, const nv_target *t, gmm_scale_order order) {
    const quant_case *c = &r->c;
    for (int64_t u = 0; u < c->units; u++)
        for (int64_t j = 0; j < c->cols; j++)
            for (int64_t i = 0; i < c->rows0; i++) {
                const uint8_t *a = t->scale + u * t->scale_bytes / c->units;
                const uint8_t *b = r->want[1].scale + u * r->want[1].scale_bytes / c->units;
                T_CHECK(gmm_nibble(t->data, u * t->stride + j * t->ld + i) ==
                            gmm_nibble(r->want[1].data, element_at(r, 1, u, i, j)) &&
                        a[nv_scale_at(order, c->rows0, j, i / 16)] == b[nv_scale_at(c->f.order, c->rows0, j, i / 16)],
                        "element %lld, %lld of matrix %lld", (long long)i, (long long)j, (long long)u);
            }
}
#define nv_same_as_quantized(...) T_CALL(nv_same_as_quantized, __VA_ARGS__)

/* Square NVFP4: the transposed rowwise copy is the columnwise copy, with scales of either order, at aligned and at odd
   extents, in packed memory and in tables. `arg`: orders of source and destination, 4 times the choice of scales. */
static void transposed_squares(int arg) {
    static const int64_t shapes[6][3] = { { 3, 96, 64 }, { 1, 256, 384 }, { 5, 40, 34 }, { 3, 130, 162 }, { 1, 2, 2 },
                                          { 3, 148, 20 } };
    const gmm_scale_order order = (gmm_scale_order)(arg >> 1 & 1);
    for (int w = 0; w < 12; w++) {
        const int64_t *shape = shapes[w % 6];
        const int table = w / 6 * (1 + w % 2); /* 1: in device memory; 2: on the host */
        quant_run r;
        quant_case c = { .f = named(GMM_E2M1, GMM_SCALING_NV16), .units = (int32_t)shape[0], .rows0 = shape[1],
                         .cols = shape[2], .source = floats[w % 3], .pad = w % 4 == 3 ? 3 : 0, .specials = w % 3 == 2,
                         .loose = w % 2 };
        gmm_transposition d = GMM_ZERO;
        gmm_info info = GMM_ZERO;
        gmm_mat src, dst;
        void *at[4][5];
        nv_target t;
        c.f.square = 1;
        c.f.order = (gmm_scale_order)(arg & 1);
        c.f.four_over_six = arg >> 2;
        c.f.e4m3_256 = c.f.four_over_six == 1;
        build(&r, &c);
        T_OK(quantize(&r.d, GMM_OP_QUANTIZE));
        check_copy(&r, 0);
        t = nv_target_of(&r, order, w % 3 == 1 ? 6 : w % 3 == 2 ? 4 : 0);
        if (!c.f.four_over_six) nv_same_as_quantized(&r, &t, order);
        src = r.copy[0];
        dst = t.mat;
        if (w % 2) dst.amax = src.amax; /* one array for both */
        for (int32_t u = 0; u < c.units && table; u++) {
            at[0][u] = (uint8_t *)src.data + element_at(&r, 0, u, 0, 0) / 2;
            at[1][u] = (uint8_t *)src.scale + u * r.want[0].scale_bytes / c.units;
            at[2][u] = (uint8_t *)dst.data + u * t.stride / 2;
            at[3][u] = (uint8_t *)dst.scale + u * t.scale_bytes / c.units;
        }
        for (int k = 0; k < 2 && table; k++) {
            gmm_mat *m = k ? &dst : &src;
            m->data = m->scale = NULL;
            m->group_stride = 0;
            m->flags |= table == 2 ? (uint32_t)GMM_MAT_TABLE_ON_HOST : 0;
            m->table = table == 2 ? at[2 * k] : (void **)t_in(at[2 * k], sizeof at[0]);
            m->scale_table = table == 2 ? at[2 * k + 1] : (void **)t_in(at[2 * k + 1], sizeof at[0]);
        }
        d.count = c.units;
        d.rows = c.rows0;
        d.cols = c.cols;
        d.format = &c.f;
        d.src = &src;
        d.dst = &dst;
        T_OK(gmm_transpose_query(T.ctx, &d, &info));
        T_CHECK(c.units > 1 || info.workspace_bytes == 0, "workspace for one matrix");
        T_OK(gmm_transpose(T.ctx, &d, t_workspace(info.workspace_bytes), info.workspace_bytes, T.stream));
        t_same("transposed elements", t_get(t.mat.data, (size_t)t.data_bytes), t.data, (size_t)t.data_bytes);
        t_same("transposed scales", t_get(t.mat.scale, (size_t)t.scale_bytes), t.scale, (size_t)t.scale_bytes);
        t_same("amax", t_get(dst.amax, (size_t)c.units * 4), r.want[0].amax, (size_t)c.units * 4);
    }
}
static void transposition_refusals(int arg) {
    gmm_transposition d = GMM_ZERO;
    gmm_info info = GMM_ZERO;
    gmm_format f = named(GMM_E2M1, GMM_SCALING_NV16);
    const gmm_format fp8 = named(GMM_E4M3, GMM_SCALING_TENSOR);
    gmm_mat src, dst;
    (void)arg;
    f.square = 1;
    src = gmm_mat_quantized(&f, GMM_ROWWISE, t_alloc(4096), t_alloc(4096), (float *)t_alloc(8));
    dst = gmm_mat_quantized(&f, GMM_COLUMNWISE, t_alloc(4096), t_alloc(4096), (float *)t_alloc(8));
    d.count = 1;
    d.rows = 64;
    d.cols = 32;
    d.format = &f;
    d.src = &src;
    d.dst = &dst;
    T_OK(gmm_transpose_query(T.ctx, &d, &info));
    T_OK(gmm_transpose(T.ctx, &d, NULL, 0, T.stream));
#define XREFUSED(status, change, ...) do { \
        gmm_transposition e = d; \
        gmm_format g = f; \
        gmm_mat from = src, to = dst; \
        e.format = &g; \
        e.src = &from; \
        e.dst = &to; \
        change; \
        T_REFUSED(status, gmm_transpose_query(T.ctx, &e, &info), "gmm_transpose_query", __VA_ARGS__, NULL); \
        T_REFUSED(status, gmm_transpose(T.ctx, &e, NULL, 0, T.stream), "gmm_transpose", __VA_ARGS__, NULL); \
    } while (0)
    XREFUSED(GMM_E_NULL, e.format = NULL, "format", "square");
    XREFUSED(GMM_E_CONFIG, g.square = 0, "format", "1 x 16", "gmm_requantize");
    XREFUSED(GMM_E_CONFIG, (g.square = 0, g.stochastic = 1), "format", "1 x 16");
    XREFUSED(GMM_E_CONFIG, g.stochastic = 1, "stochastic", "square");
    XREFUSED(GMM_E_CONFIG, g.hadamard = GMM_HADAMARD, "hadamard", "square");
    XREFUSED(GMM_E_CONFIG, from.flags |= (uint32_t)GMM_MAT_ROW_AMAX, "src", "flags 0x2");
    XREFUSED(GMM_E_CONFIG, from.flags |= (uint32_t)GMM_MAT_E4M3_256, "src", "flags 0x4");
    XREFUSED(GMM_E_CONFIG, to.flags |= (uint32_t)GMM_MAT_E4M3_256, "dst", "flags 0x4");
    XREFUSED(GMM_E_CONFIG, to.hadamard = GMM_HADAMARD, "dst", "hadamard", "transformed");
    XREFUSED(GMM_E_DTYPE, from.scale_order = GMM_SCALES_SWIZZLED, "src", "order 1");
    XREFUSED(GMM_E_DTYPE, e.format = &fp8, "src", "e4m3");
    XREFUSED(GMM_E_DTYPE, to.scaling = GMM_SCALING_MX32, "dst", "mx32");
    XREFUSED(GMM_E_ARG, e.rows = 63, "dst", "63", "do not fill bytes");
    XREFUSED(GMM_E_ARG, e.cols = 31, "src", "31", "do not fill bytes");
    XREFUSED(GMM_E_STRIDE, to.ld = 65, "dst", "ld 65");
#undef XREFUSED
    {
        gmm_mat to = dst;
        void *workspace;
        d.dst = &to;
        to.amax = NULL;
        T_REFUSED(GMM_E_NULL, gmm_transpose(T.ctx, &d, NULL, 0, T.stream), "dst", "amax", NULL);
        to.amax = src.amax;
        T_OK(gmm_transpose(T.ctx, &d, NULL, 0, T.stream));
        d.count = 2;
        to.amax = src.amax + 1;
        T_OK(gmm_transpose_query(T.ctx, &d, &info));
        workspace = t_workspace(info.workspace_bytes);
        T_REFUSED(GMM_E_ARG, gmm_transpose(T.ctx, &d, workspace, info.workspace_bytes, T.stream), "dst.amax",
                  "overlaps", NULL);
        d.count = 1;
        to.amax = (float *)src.data;
        T_REFUSED(GMM_E_ARG, gmm_transpose(T.ctx, &d, NULL, 0, T.stream), "dst.amax", "overlaps", NULL);
    }
}

#ifdef HAVE_CUDA
/* A captured call, replayed with other splits, scales, random words and skip word, writes the bytes of a call;
   nothing if the skip word is set. Widths with and without vector accesses. */
static void replays(int arg) {
    static const int64_t first[5] = { 70, 0, 33, 150, 127 }, widths[3] = { 128, 288, 34 };
    static const int64_t splits[][5] = { { 0, 0, 0, 0, 0 }, { 128, 129, 1, 0, 32 }, { 0, 400, 0, 0, 0 },
                                         { 1, 2, 3, 4, 5 }, { 70, 0, 33, 150, 127 } };
    variant v[VARIANTS];
    (void)variants(v);
    for (int w = 0; w < 3; w++) {
        quant_run r;
        quant_case c = { .f = v[arg].format, .grouped = 1, .units = 5, .sizes = first, .cols = widths[w], .extra = 20,
                         .source = GMM_BF16, .tail = w ? GMM_TAIL_ZERO : GMM_TAIL_KEEP };
        gmm_info info = GMM_ZERO;
        int32_t *skip = (int32_t *)t_alloc(4), go = 0, stop = 1;
        void *workspace, *graph = NULL;
        const char *why;
        build(&r, &c);
        for (int64_t i = 0; i < r.capacity * c.cols; i++) r.src.v[i] = ref_round(GMM_BF16, t_real());
        t_mat_put(&r.src);
        r.d.skip = skip;
        t_upload(skip, &go, 4);
        T_OK(gmm_quantize_query(T.ctx, GMM_OP_QUANTIZE, &r.d, &info));
        workspace = t_workspace(info.workspace_bytes);
        why = device_begin_capture();
        T_CHECK(!why, "begin: %s", why);
        {
            const gmm_status s = gmm_quantize(T.ctx, &r.d, workspace, info.workspace_bytes, T.stream);
            why = device_end_capture(&graph);
            T_CHECK(s == GMM_OK && !why, "capture: %s %s", gmm_last_error(T.ctx), why ? why : "");
        }
        for (int i = 0; i < 5; i++) {
            uint64_t random[2] = { t_rand(), t_rand() };
            float scale[5];
            void *eager[2][3];
            t_upload((void *)(uintptr_t)r.groups.splits, splits[i], sizeof splits[i]);
            if (r.random) t_upload(r.random, random, sizeof random);
            for (int u = 0; u < 5; u++) scale[u] = (float)(1.0 + fabs(t_real()) * 30.0);
            t_upload(r.scale_in, scale, sizeof scale);
            for (int pass = 0; pass < 3; pass++) { /* a call, a replay, a replay that skips */
                t_upload(skip, pass == 2 ? &stop : &go, 4);
                for (int k = 0; k < 2; k++) {
                    t_poison(r.copy[k].data, 0xA5, (size_t)r.want[k].data_bytes);
                    t_poison(r.copy[k].scale, 0xA5, (size_t)r.want[k].scale_bytes);
                    t_poison(r.copy[k].amax, c.f.delayed ? 0 : 0xA5, (size_t)r.want[k].amaxes * 4);
                }
                if (pass) {
                    why = device_replay(graph);
                    T_CHECK(!why, "replay: %s", why);
                } else T_OK(gmm_quantize(T.ctx, &r.d, workspace, info.workspace_bytes, T.stream));
                for (int k = 0; k < 2; k++) {
                    const size_t bytes[3] = { (size_t)r.want[k].data_bytes, (size_t)r.want[k].scale_bytes,
                                              (size_t)r.want[k].amaxes * 4 };
                    void *const from[3] = { r.copy[k].data, r.copy[k].scale, r.copy[k].amax };
                    for (int j = 0; j < 3; j++) {
                        void *got = bytes[j] ? t_get(from[j], bytes[j]) : NULL;
                        if (!got) continue;
                        if (pass == 0) eager[k][j] = got;
                        else if (pass == 1) t_same("replayed", got, eager[k][j], bytes[j]);
                        else t_bytes("skipped", got, j == 2 && c.f.delayed ? 0 : 0xA5, bytes[j]);
                    }
                }
            }
        }
        device_graph_free(graph);
    }
}
#endif

/* A cast of groups or matrices of any shape. */
static void drawn(int arg) {
    variant v[VARIANTS];
    quant_case c;
    (void)variants(v);
    (void)arg;
    memset(&c, 0, sizeof c);
    c.f = v[t_int(0, VARIANTS - 1)].format;
    c.source = c.f.hadamard ? GMM_BF16 : floats[t_int(0, 2)];
    c.cols = 2 * t_draw_size(80, 300);
    if (c.f.dtype != GMM_E2M1) c.cols += t_int(0, 1);
    c.pad = t_int(0, 1) * 4;
    if (!c.f.hadamard) c.specials = t_int(0, 3) == 0;
    c.grouped = of_groups(&c.f) && t_int(0, 1);
    if (c.grouped) {
        c.units = (int32_t)t_int(1, 7);
        c.sizes = t_draw_sizes(c.units, t_draw_size(200, 600));
        c.extra = t_int(0, 1) * t_int(0, 130);
        c.first_group = (int)t_int(0, 3);
        c.tail = (gmm_tail)t_int(0, 1);
    } else {
        c.units = (int32_t)t_int(1, 3);
        c.rows0 = c.f.hadamard ? 16 * t_int(1, 12) : 2 * t_int(1, 90);
        c.table = (int)t_int(0, 1);
        if (c.table) c.pad = 0;
    }
    run_case(&c);
}

/* The cases of one of the other casts with data of the step. */
static void drawn_others(int arg) {
    variant v[VARIANTS];
    const int i = (int)t_int(0, VARIANTS - 1), which = (int)t_int(0, 5);
    const gmm_format *f = &v[i].format;
    (void)variants(v);
    (void)arg;
    if (which == 0 && of_groups(f)) apart(i);
    else if (which == 1 && by_elements(f) && !f->stochastic) shared_codes(i);
    else if (which == 2 && of_groups(f) && by_elements(f) && !f->delayed) requantizes(i);
    else if (which == 3) shards(i);
    else if (which == 4) updates((int)t_int(0, 2));
    else dequantizes(i);
}

void tests_quantize(void) {
    static const char *const orders[] = { "compact", "swizzled" };
    static const char *const choices[] = { "", " four over six", " four over six by squares" };
    variant v[VARIANTS];
    const int n = variants(v);
    t_add(drawn, 0, "quantize drawn at random");
    t_random(8);
    t_add(drawn_others, 0, "quantize other casts drawn at random");
    t_random(2);
    t_add_host(valid_variants, 0, "quantize variants are valid formats");
    for (int i = 0; i < n; i++)
        if (of_groups(&v[i].format)) t_add(activations, i, "quantize activations %s", v[i].name);
    for (int i = 0; i < n; i++)
        if (of_groups(&v[i].format)) t_add(gathers, i, "quantize gathered rows %s", v[i].name);
    for (int i = 0; i < 2; i++) t_add(no_rows, i, "quantize no rows, %s", i ? "row" : "tensor");
    for (int i = 0; i < n; i++) t_add(matrices, i, "quantize matrices %s", v[i].name);
    for (int i = 0; i < n; i++)
        if (of_groups(&v[i].format)) t_add(apart, i, "quantize apart %s", v[i].name);
    for (int i = 0; i < n; i++)
        if (by_elements(&v[i].format) && !v[i].format.stochastic)
            t_add(shared_codes, i, "quantize shared codes %s", v[i].name);
    for (int i = 0; i < SPECIALS; i++) t_add(special_values, i, "quantize special values, %s", specials[i].name);
    t_add(layout_vectors, 0, "quantize known values, layouts");
    for (int i = 0; i < 2; i++) t_add(padded, i, "quantize padded groups, %s", i ? "nvfp4" : "tensor");
    for (int i = 0; i < n; i++) t_add(dequantizes, i, "dequantize %s", v[i].name);
    for (int i = 0; i < n; i++)
        if (of_groups(&v[i].format) && by_elements(&v[i].format) && !v[i].format.delayed)
            t_add(requantizes, i, "requantize %s", v[i].name);
    for (int i = 0; i < 2; i++) t_add(tables, i, "requantize tables%s", i ? "" : " on the host");
    for (int k = GMM_RECIPE_FP8_DELAYED; k <= GMM_RECIPE_NVFP4; k++)
        t_add(skips, k, "quantize skip word, recipe %s", ref_recipe_name((gmm_recipe_kind)k));
    for (int i = 0; i < n; i++)
        if (of_groups(&v[i].format) && !v[i].format.row_amax)
            t_add(column_sums, i, "quantize column sums, %s", v[i].name);
    for (int i = 0; i < 3; i++) t_add(updates, i, "scale update, margin %d", i);
    t_add(update_reduces, 0, "scale update reduces over ranks, refusals");
    for (int i = 0; i < n; i++) t_add(shards, i, "quantize sharded masters %s", v[i].name);
    t_add(shard_refusals, 0, "quantize sharded masters refusals");
    for (int i = 0; i < 12; i++)
        t_add(transposed_squares, i, "transpose square nvfp4%s, scales %s to %s", choices[i / 4], orders[i & 1],
              orders[i >> 1 & 1]);
    t_add(transposition_refusals, 0, "transpose square nvfp4 refusals");
    t_add(largest_values, 0, "dequantize the largest values");
    for (int i = 0; i < 2; i++)
        t_add(transformed_padding, i, "quantize padding of transformed groups%s", i ? ", swizzled" : "");
    for (int i = 0; i < 2; i++)
        t_add(packed_columns, i, "quantize ld 0 of columnwise copies of groups, %s", i ? "fp8 block" : "nvfp4");
    t_add_host(four_over_six, 0, "quantize 4 over 6 by its contract");
    t_add(refusals, 0, "quantize refusals");
#ifdef HAVE_CUDA
    for (int i = 0; i < n; i++)
        if (of_groups(&v[i].format)) t_add_gpu(replays, i, "quantize replayed, %s", v[i].name);
#endif
}
