/* test_permute.c - the expert permutation and its inverse: maps against a plain construction, moves exactly, sums and
   gradients against fp64, adjointness in exact integers */
#include "test.h"

#include <math.h>
#include <string.h>

typedef struct permute_case {
    gmm_dtype dtype, other; /* of x and rows; of out and gradients */
    int64_t tokens, hidden;
    int32_t experts, used, topk, align; /* indices are below `used`; further experts are empty */
    int32_t dropped;                    /* per cent of the slots */
    int64_t capacity_extra;                       /* capacity minus the number of rows; negative: too small */
    gmm_tail tail;
    int64_t pad;                        /* unused elements after each row */
} permute_case;

static const permute_case cases[] = {
    {GMM_BF16, GMM_BF16, 33, 24, 8, 8, 2, 0, 0, 0, GMM_TAIL_KEEP, 0},
    {GMM_BF16, GMM_F32, 33, 24, 8, 5, 2, 1, 20, 7, GMM_TAIL_KEEP, 3},
    {GMM_F32, GMM_F32, 40, 17, 4, 4, 3, 16, 10, 5, GMM_TAIL_ZERO, 1},
    {GMM_F16, GMM_F32, 40, 9, 6, 6, 6, 8, 0, 64, GMM_TAIL_ZERO, 0},
    {GMM_F16, GMM_F16, 25, 1, 3, 1, 1, 32, 0, 0, GMM_TAIL_KEEP, 2},
    {GMM_BF16, GMM_F16, 64, 40, 300, 290, 8, 4, 5, 20, GMM_TAIL_ZERO, 0},
    {GMM_F32, GMM_BF16, 50, 1030, 8, 8, 2, 0, 0, -30, GMM_TAIL_KEEP, 0},
    {GMM_BF16, GMM_BF16, 50, 12, 8, 8, 2, 8, 0, -50, GMM_TAIL_ZERO, 4},
    {GMM_BF16, GMM_BF16, 9, 12, 8, 8, 2, 8, 0, -1000, GMM_TAIL_ZERO, 0},
    {GMM_BF16, GMM_BF16, 0, 12, 70, 70, 2, 8, 0, 10, GMM_TAIL_ZERO, 0},
    {GMM_F32, GMM_F32, 20, 6, 5, 5, 4, 3, 100, 4, GMM_TAIL_KEEP, 0},
    {GMM_F32, GMM_F32, 1, 1, 1, 1, 1, 0, 0, 0, GMM_TAIL_KEEP, 0},
    {GMM_BF16, GMM_F32, 7001, 3, 65, 64, 2, 16, 1, 100, GMM_TAIL_ZERO, 0},
    {GMM_BF16, GMM_BF16, 37, 2056, 70, 66, 35, 8, 10, 33, GMM_TAIL_ZERO, 8},
    {GMM_BF16, GMM_BF16, 50, 1032, 8, 8, 2, 16, 5, 40, GMM_TAIL_KEEP, 0},
};

/* A row of the table; -1: the case that was drawn. */
static _Thread_local permute_case drawn_case;
static const permute_case *case_of(int arg) { return arg < 0 ? &drawn_case : &cases[arg]; }

/* ------------------------------------------------------------------------------------------------- Reference --- */

/* A permutation and its expected maps, made by a loop over the tokens for each expert. */
typedef struct plan {
    int64_t slots, capacity, live;
    int32_t *indices, *row_of, *slot_of, *sizes; /* host */
    uint32_t fault;
    gmm_permute p; /* device operands: indices; maps are not yet written */
} plan;

static int32_t *ints(int64_t n) { return (int32_t *)t_host((size_t)n * sizeof(int32_t)); }
static int32_t *ints_in(const int32_t *v, int64_t n) { return (int32_t *)t_in(v, (size_t)n * sizeof *v); }
static int32_t *ints_out(int64_t n) { return (int32_t *)t_alloc((size_t)n * sizeof(int32_t)); }
static int32_t *ints_get(const int32_t *v, int64_t n) { return (int32_t *)t_get(v, (size_t)n * sizeof *v); }
static uint32_t *word(uint32_t value) {
    uint32_t *device = (uint32_t *)t_alloc(sizeof *device);
    t_upload(device, &value, sizeof value);
    return device;
}
static uint32_t word_get(const uint32_t *device) { return *(const uint32_t *)t_get(device, sizeof *device); }
static double *reals(int64_t n) {
    double *v = (double *)t_host((size_t)n * sizeof *v);
    for (int64_t i = 0; i < n; i++) v[i] = ref_round(GMM_F32, t_real());
    return v;
}
static double *zeros(int64_t n) { return (double *)t_host((size_t)n * sizeof(double)); }

static void construct(const permute_case *c, plan *m) {
    const int64_t align = c->align ? c->align : 1;
    int64_t row = 0;
    m->row_of = ints(m->slots);
    m->slot_of = ints(m->capacity);
    m->sizes = ints(c->experts);
    for (int64_t i = 0; i < m->slots; i++) m->row_of[i] = -1;
    for (int64_t i = 0; i < m->capacity; i++) m->slot_of[i] = -1;
    for (int32_t e = 0; e < c->experts; e++) {
        const int64_t begin = row;
        for (int64_t i = 0; i < m->slots; i++)
            if (m->indices[i] == e) {
                if (row < m->capacity) {
                    m->row_of[i] = (int32_t)row;
                    m->slot_of[row] = (int32_t)i;
                }
                row++;
            }
        while ((row - begin) % align) row++;
        if (row > m->capacity) {
            m->fault |= (uint32_t)GMM_FAULT_CAPACITY;
            row = m->capacity;
        }
        m->sizes[e] = (int32_t)(row - begin);
    }
    m->live = row;
}

static plan plan_of(const permute_case *c) {
    const int64_t align = c->align ? c->align : 1;
    plan m = GMM_ZERO;
    int64_t *counts = (int64_t *)t_host((size_t)c->experts * sizeof *counts), rows = 0;
    m.slots = c->tokens * c->topk;
    m.indices = ints(m.slots);
    for (int64_t i = 0; i < m.slots; i++)
        m.indices[i] = t_int(0, 99) < c->dropped ? -1 : (int32_t)t_int(0, c->used - 1);
    for (int64_t i = 0; i < m.slots; i++)
        if (m.indices[i] >= 0) counts[m.indices[i]]++;
    for (int32_t e = 0; e < c->experts; e++) rows += (counts[e] + align - 1) / align * align;
    m.capacity = rows + c->capacity_extra > 0 ? rows + c->capacity_extra : 0;
    construct(c, &m);
    t_about("%lld tokens, hidden %lld, %d experts, topk %d, align %d, %s to %s, capacity %lld", (long long)c->tokens,
            (long long)c->hidden, (int)c->experts, (int)c->topk, (int)c->align, gmm_dtype_name(c->dtype),
            gmm_dtype_name(c->other), (long long)m.capacity);
    m.p.experts = c->experts;
    m.p.tokens = c->tokens;
    m.p.capacity = m.capacity;
    m.p.hidden = c->hidden;
    m.p.topk = c->topk;
    m.p.align = c->align;
    m.p.tail = c->tail;
    m.p.indices = ints_in(m.indices, m.slots);
    m.p.fault = word(0);
    return m;
}

typedef gmm_status (*operation)(gmm_context *, const gmm_permute *, void *, size_t, gmm_stream);

/* The descriptor of one of the five calls, with NULL for operands that it does not use. */
static gmm_permute operands_of(gmm_op op, const gmm_permute *all) {
    const int fwd = op == GMM_OP_PERMUTE_FWD, bwd = op == GMM_OP_PERMUTE_BWD;
    const int back_fwd = op == GMM_OP_UNPERMUTE_FWD, back_bwd = op == GMM_OP_UNPERMUTE_BWD;
    gmm_permute p = *all;
    if (!fwd) p.x = NULL, p.row_probs = NULL;
    if (!fwd && !back_fwd && !back_bwd) p.probs = NULL, p.rows = NULL;
    if (!back_fwd) p.out = NULL;
    if (!back_bwd) p.dout = NULL;
    if (!bwd) p.drow_probs = NULL, p.dx = NULL;
    if (!bwd && !back_bwd) p.drows = NULL, p.dprobs = NULL;
    return p;
}

static void call(gmm_context *ctx, gmm_op op, const gmm_permute *all) {
    const gmm_permute p = operands_of(op, all);
    const operation run = op == GMM_OP_PERMUTE_MAP     ? gmm_permute_map
                          : op == GMM_OP_PERMUTE_FWD   ? gmm_permute_fwd
                          : op == GMM_OP_PERMUTE_BWD   ? gmm_permute_bwd
                          : op == GMM_OP_UNPERMUTE_FWD ? gmm_unpermute_fwd
                                                       : gmm_unpermute_bwd;
    gmm_info info = GMM_ZERO;
    T_OK_TEXT(gmm_permute_query(ctx, op, &p, &info), gmm_last_error(ctx));
    T_OK_TEXT(run(ctx, &p, t_workspace(info.workspace_bytes), info.workspace_bytes, T.stream), gmm_last_error(ctx));
}
#define call(...) T_CALL(call, __VA_ARGS__)

/* Uses the reference's maps as inputs. */
static void use_maps(plan *m) {
    m->p.row_of = ints_in(m->row_of, m->slots);
    m->p.slot_of = ints_in(m->slot_of, m->capacity);
    m->p.sizes = ints_in(m->sizes, m->p.experts);
}

static t_mat matrix(const permute_case *c, gmm_dtype dtype, int64_t rows, t_fill fill) {
    return t_mat_make(dtype, 1, rows, c->hidden, c->pad, 0, T_PACKED, fill);
}

/* Rows beyond the sum of the sizes keep their poison, or are zero if the tail is to be zeroed. */
static void check_tail(const plan *m, const t_mat *rows) {
    const size_t size = (size_t)(rows->cols * ref_bytes(rows->dtype));
    const char *bits = (const char *)t_mat_bits(rows);
    t_bytes("tail", bits + (size_t)m->live * size, m->p.tail == GMM_TAIL_ZERO ? 0 : 0xFF,
            (size_t)(m->capacity - m->live) * size);
}
#define check_tail(...) T_CALL(check_tail, __VA_ARGS__)

/* ------------------------------------------------------------------------------------------------------ Maps --- */

static void map(int arg) {
    const permute_case *c = case_of(arg);
    plan m = plan_of(c);
    m.p.row_of = ints_out(m.slots);
    m.p.slot_of = ints_out(m.capacity);
    m.p.sizes = ints_out(c->experts);
    call(T.ctx, GMM_OP_PERMUTE_MAP, &m.p);
    t_same("row_of", ints_get(m.p.row_of, m.slots), m.row_of, (size_t)m.slots * 4);
    t_same("slot_of", ints_get(m.p.slot_of, m.capacity), m.slot_of, (size_t)m.capacity * 4);
    t_same("sizes", ints_get(m.p.sizes, c->experts), m.sizes, (size_t)c->experts * 4);
    T_CHECK(word_get(m.p.fault) == m.fault, "fault %u instead of %u", word_get(m.p.fault), m.fault);
    T_CHECK((c->capacity_extra < 0) == (m.fault != 0), "the case is what its name says");
}

/* Every output has the same bits with and without the other outputs. */
static void map_optional(int arg) {
    const permute_case *c = &cases[2];
    (void)arg;
    for (int only = 0; only < 4; only++) {
        plan m = plan_of(c);
        m.p.fault = NULL;
        if (only == 3) {
            T_REFUSED(GMM_E_NULL, gmm_permute_map(T.ctx, &m.p, NULL, 0, T.stream), "permute.row_of is NULL",
                      "permute.slot_of", "permute.sizes", NULL);
            break;
        }
        if (only == 0) m.p.row_of = ints_out(m.slots);
        if (only == 1) m.p.slot_of = ints_out(m.capacity);
        if (only == 2) m.p.sizes = ints_out(c->experts);
        call(T.ctx, GMM_OP_PERMUTE_MAP, &m.p);
        if (only == 0) t_same("row_of", ints_get(m.p.row_of, m.slots), m.row_of, (size_t)m.slots * 4);
        if (only == 1) t_same("slot_of", ints_get(m.p.slot_of, m.capacity), m.slot_of, (size_t)m.capacity * 4);
        if (only == 2) t_same("sizes", ints_get(m.p.sizes, c->experts), m.sizes, (size_t)c->experts * 4);
    }
}

/* Indices outside of [-1, experts) are dropped and reported; other bits of the fault word stay. */
static void map_index(int arg) {
    static const int32_t bad[4] = {8, -2, INT32_MAX, INT32_MIN};
    const permute_case *c = &cases[0];
    plan m = plan_of(c);
    for (int64_t i = 3; i < m.slots; i += 7) m.indices[i] = arg ? bad[arg - 1] : bad[i % 4];
    construct(c, &m);
    m.p.indices = ints_in(m.indices, m.slots);
    m.p.row_of = ints_out(m.slots);
    m.p.slot_of = ints_out(m.capacity);
    m.p.sizes = ints_out(c->experts);
    m.p.fault = arg ? word((uint32_t)GMM_FAULT_ALIGN) : NULL;
    call(T.ctx, GMM_OP_PERMUTE_MAP, &m.p);
    t_same("row_of", ints_get(m.p.row_of, m.slots), m.row_of, (size_t)m.slots * 4);
    t_same("slot_of", ints_get(m.p.slot_of, m.capacity), m.slot_of, (size_t)m.capacity * 4);
    t_same("sizes", ints_get(m.p.sizes, c->experts), m.sizes, (size_t)c->experts * 4);
    if (arg)
        T_CHECK(word_get(m.p.fault) == ((uint32_t)GMM_FAULT_ALIGN | (uint32_t)GMM_FAULT_INDEX), "fault %u",
                word_get(m.p.fault));
}

/* The sizes are valid splits for the grouped operations. */
static void map_splits(int arg) {
    const permute_case *c = case_of(arg);
    plan m = plan_of(c);
    gmm_groups groups = GMM_ZERO;
    int64_t *offsets = (int64_t *)t_alloc((size_t)(c->experts + 1) * sizeof *offsets), *got, end = 0;
    m.p.sizes = ints_out(c->experts);
    call(T.ctx, GMM_OP_PERMUTE_MAP, &m.p);
    groups.count = c->experts;
    groups.capacity = m.capacity;
    groups.splits = m.p.sizes;
    groups.dtype = GMM_I32;
    groups.row_align = c->capacity_extra < 0 ? 0 : c->align;
    groups.fault = word(0);
    T_OK(gmm_offsets(T.ctx, &groups, offsets, T.stream));
    got = (int64_t *)t_get(offsets, (size_t)(c->experts + 1) * sizeof *offsets);
    for (int32_t e = 0; e <= c->experts; e++) {
        T_CHECK(got[e] == end, "offset %lld of expert %d instead of %lld", (long long)got[e], e, (long long)end);
        if (e < c->experts) end += m.sizes[e];
    }
    T_CHECK(word_get(groups.fault) == 0, "fault %u", word_get(groups.fault));
}

/* --------------------------------------------------------------------------------------------------- Forward --- */

static void forward(int arg) {
    const permute_case *c = case_of(arg);
    plan m = plan_of(c);
    const t_mat x = matrix(c, c->dtype, c->tokens, T_REALS), rows = matrix(c, c->dtype, m.capacity, T_POISON);
    const double *probs = reals(m.slots), *got, *got_probs;
    use_maps(&m);
    m.p.x = &x.mat;
    m.p.rows = &rows.mat;
    m.p.probs = t_floats_in(probs, m.slots);
    m.p.row_probs = t_floats_out(m.capacity);
    call(T.ctx, GMM_OP_PERMUTE_FWD, &m.p);
    got = t_mat_get(&rows);
    got_probs = t_floats_get(m.p.row_probs, m.capacity);
    for (int64_t r = 0; r < m.live; r++) {
        const int64_t slot = m.slot_of[r];
        for (int64_t i = 0; i < c->hidden; i++) {
            const double want = slot < 0 ? 0.0 : x.v[slot / c->topk * c->hidden + i];
            T_CHECK(got[r * c->hidden + i] == want, "row %lld column %lld: %g instead of %g", (long long)r,
                    (long long)i, got[r * c->hidden + i], want);
        }
        T_CHECK(got_probs[r] == (slot < 0 ? 0.0 : probs[slot]), "probability of row %lld: %g", (long long)r,
                got_probs[r]);
    }
    check_tail(&m, &rows);
    t_bytes("tail of row_probs", (const float *)t_get(m.p.row_probs, (size_t)m.capacity * 4) + m.live,
            c->tail == GMM_TAIL_ZERO ? 0 : 0xFF, (size_t)(m.capacity - m.live) * 4);
    T_CHECK(word_get(m.p.fault) == 0, "fault %u", word_get(m.p.fault));
    { /* probabilities without rows have the same bits */
        const void *with_rows = t_get(m.p.row_probs, (size_t)m.capacity * 4);
        m.p.x = m.p.rows = NULL;
        m.p.row_probs = t_floats_out(m.capacity);
        call(T.ctx, GMM_OP_PERMUTE_FWD, &m.p);
        t_same("row_probs alone", t_get(m.p.row_probs, (size_t)m.capacity * 4), with_rows, (size_t)m.capacity * 4);
        T_CHECK(word_get(m.p.fault) == 0, "fault %u", word_get(m.p.fault));
        m.p.x = &x.mat;
        m.p.rows = &rows.mat;
    }
    /* without probabilities the rows are the same */
    m.p.probs = NULL;
    m.p.row_probs = NULL;
    m.p.fault = NULL;
    t_mat_poison(&rows);
    call(T.ctx, GMM_OP_PERMUTE_FWD, &m.p);
    t_exact("rows again", c->dtype, t_mat_get(&rows), got, m.live * c->hidden);
}

/* The rows do not depend on row_of: the correct one, NULL, slots that are permuted, and the same row for all. Sizes
   that end before the last row change only the tail. */
static void forward_maps(int arg) {
    const permute_case *c = case_of(arg);
    plan m = plan_of(c);
    const t_mat x = matrix(c, c->dtype, c->tokens, T_REALS);
    const double *probs = reals(m.slots), *want = NULL;
    const float *want_probs = NULL;
    use_maps(&m);
    m.p.x = &x.mat;
    m.p.probs = t_floats_in(probs, m.slots);
    for (int shorter = 0; shorter < 2; shorter++) {
        if (shorter && m.live > 1) {
            int32_t e = c->experts - 1;
            while (m.sizes[e] == 0) e--;
            m.sizes[e]--;
            m.live--;
            m.p.sizes = ints_in(m.sizes, c->experts);
        }
        for (int kind = 0; kind < 4; kind++) {
            const t_mat rows = matrix(c, c->dtype, m.capacity, T_POISON);
            int32_t *maps = ints(m.slots);
            for (int64_t i = 0; i < m.slots; i++)
                maps[i] = kind == 0 ? m.row_of[i] : kind == 2 ? m.row_of[m.slots - 1 - i] : m.capacity > 0 ? 0 : -1;
            m.p.row_of = kind == 1 ? NULL : ints_in(maps, m.slots);
            m.p.rows = &rows.mat;
            m.p.row_probs = t_floats_out(m.capacity);
            call(T.ctx, GMM_OP_PERMUTE_FWD, &m.p);
            check_tail(&m, &rows);
            if (kind == 0) {
                want = t_mat_get(&rows);
                want_probs = (const float *)t_get(m.p.row_probs, (size_t)m.capacity * 4);
                for (int64_t i = 0; i < m.live * c->hidden; i++) {
                    const int64_t slot = m.slot_of[i / c->hidden];
                    const double value = slot < 0 ? 0.0 : x.v[slot / c->topk * c->hidden + i % c->hidden];
                    T_CHECK(want[i] == value, "row %lld: %g instead of %g", (long long)(i / c->hidden), want[i], value);
                }
            } else {
                t_exact("rows", c->dtype, t_mat_get(&rows), want, m.live * c->hidden);
                t_same("row_probs", t_get(m.p.row_probs, (size_t)m.capacity * 4), want_probs, (size_t)m.capacity * 4);
            }
            T_CHECK(word_get(m.p.fault) == 0, "fault %u", word_get(m.p.fault));
        }
    }
}

/* Elements of one byte are copied as they are. */
static void forward_bytes(int arg) {
    const gmm_dtype dtype = (gmm_dtype)arg;
    const permute_case *c = &cases[2];
    plan m = plan_of(c);
    const int64_t n = c->tokens * c->hidden;
    unsigned char *bytes = (unsigned char *)t_host((size_t)n), *rows, *got;
    gmm_mat x, y;
    for (int64_t i = 0; i < n; i++) bytes[i] = (unsigned char)t_rand();
    x = gmm_mat_packed(dtype, t_in(bytes, (size_t)n));
    rows = (unsigned char *)t_alloc((size_t)(m.capacity * c->hidden));
    y = gmm_mat_packed(dtype, rows);
    use_maps(&m);
    m.p.x = &x;
    m.p.rows = &y;
    call(T.ctx, GMM_OP_PERMUTE_FWD, &m.p);
    got = (unsigned char *)t_get(rows, (size_t)(m.capacity * c->hidden));
    for (int64_t r = 0; r < m.capacity; r++) {
        if (m.slot_of[r] < 0) t_bytes("padding", got + r * c->hidden, 0, (size_t)c->hidden);
        else t_same("row", got + r * c->hidden, bytes + m.slot_of[r] / c->topk * c->hidden, (size_t)c->hidden);
    }
}

/* out[t] against fp64, with and without probabilities. */
static void back(int arg) {
    const permute_case *c = case_of(arg);
    const int64_t n = c->tokens * c->hidden;
    plan m = plan_of(c);
    const t_mat rows = matrix(c, c->dtype, m.capacity, T_REALS), out = matrix(c, c->other, c->tokens, T_POISON);
    const double *probs = reals(m.slots);
    use_maps(&m);
    m.p.rows = &rows.mat;
    m.p.out = &out.mat;
    for (int with = 0; with < 2; with++) {
        double *want = zeros(n), *bound = zeros(n);
        m.p.probs = with ? t_floats_in(probs, m.slots) : NULL;
        call(T.ctx, GMM_OP_UNPERMUTE_FWD, &m.p);
        for (int64_t i = 0; i < n; i++) {
            double mag = 0.0;
            for (int32_t k = 0; k < c->topk; k++) {
                const int64_t slot = i / c->hidden * c->topk + k, row = m.row_of[slot];
                const double p = with ? probs[slot] : 1.0;
                const double term = row < 0 ? 0.0 : p * rows.v[row * c->hidden + i % c->hidden];
                want[i] += term;
                mag += fabs(term);
            }
            bound[i] = ref_bound(c->other, c->topk, mag, want[i]);
        }
        t_near("out", t_mat_get(&out), want, bound, n);
    }
    T_CHECK(word_get(m.p.fault) == 0, "fault %u", word_get(m.p.fault));
}

/* Permute and unpermute of integers: every token is returned exactly as many times as it has slots that were not
   dropped. */
static void round_trip(int arg) {
    const permute_case *c = case_of(arg);
    plan m = plan_of(c);
    const t_mat x = matrix(c, c->dtype, c->tokens, T_INTS), rows = matrix(c, c->dtype, m.capacity, T_POISON);
    const t_mat out = matrix(c, c->other, c->tokens, T_POISON);
    double *want = zeros(c->tokens * c->hidden);
    m.p.row_of = ints_out(m.slots);
    m.p.slot_of = ints_out(m.capacity);
    m.p.sizes = ints_out(c->experts);
    m.p.x = &x.mat;
    m.p.rows = &rows.mat;
    m.p.out = &out.mat;
    call(T.ctx, GMM_OP_PERMUTE_MAP, &m.p);
    call(T.ctx, GMM_OP_PERMUTE_FWD, &m.p);
    call(T.ctx, GMM_OP_UNPERMUTE_FWD, &m.p);
    for (int64_t i = 0; i < c->tokens * c->hidden; i++)
        for (int32_t k = 0; k < c->topk; k++)
            if (m.row_of[i / c->hidden * c->topk + k] >= 0) want[i] += x.v[i];
    t_exact("out", c->other, t_mat_get(&out), want, c->tokens * c->hidden);
}

/* -------------------------------------------------------------------------------------------------- Backward --- */

static void permute_backward(int arg) {
    const permute_case *c = case_of(arg);
    const int64_t n = c->tokens * c->hidden;
    plan m = plan_of(c);
    const t_mat drows = matrix(c, c->other, m.capacity, T_REALS), dx = matrix(c, c->dtype, c->tokens, T_POISON);
    const double *drow_probs = reals(m.capacity);
    double *want = zeros(n), *bound = zeros(n), *dprobs = zeros(m.slots);
    use_maps(&m);
    for (int64_t i = 0; i < n; i++) {
        double mag = 0.0;
        for (int32_t k = 0; k < c->topk; k++) {
            const int64_t row = m.row_of[i / c->hidden * c->topk + k];
            const double term = row < 0 ? 0.0 : drows.v[row * c->hidden + i % c->hidden];
            want[i] += term;
            mag += fabs(term);
        }
        bound[i] = ref_bound(c->dtype, c->topk, mag, want[i]);
    }
    for (int64_t i = 0; i < m.slots; i++) dprobs[i] = m.row_of[i] < 0 ? 0.0 : drow_probs[m.row_of[i]];
    for (int part = 1; part < 4; part++) { /* dx, dprobs, both */
        gmm_permute p = m.p;
        if (part & 1) p.drows = &drows.mat, p.dx = &dx.mat;
        if (part & 2) p.drow_probs = t_floats_in(drow_probs, m.capacity), p.dprobs = t_floats_out(m.slots);
        t_poison(dx.data, 0xFF, n ? (size_t)(((c->tokens - 1) * dx.ld + c->hidden) * ref_bytes(c->dtype)) : 0);
        call(T.ctx, GMM_OP_PERMUTE_BWD, &p);
        if (part & 1) t_near("dx", t_mat_get(&dx), want, bound, n);
        if (part & 2) t_exact("dprobs", GMM_F32, t_floats_get(p.dprobs, m.slots), dprobs, m.slots);
    }
}

static void unpermute_backward(int arg) {
    const permute_case *c = case_of(arg);
    plan m = plan_of(c);
    const t_mat dout = matrix(c, c->other, c->tokens, T_REALS), rows = matrix(c, c->dtype, m.capacity, T_REALS);
    const double *probs = reals(m.slots);
    double *want = zeros(m.capacity * c->hidden), *dprobs = zeros(m.slots), *bound = zeros(m.slots);
    use_maps(&m);
    m.p.dout = &dout.mat;
    for (int64_t s = 0; s < m.slots; s++) {
        double mag = 0.0;
        for (int64_t i = 0; i < c->hidden && m.row_of[s] >= 0; i++) {
            const double term = dout.v[s / c->topk * c->hidden + i] * rows.v[m.row_of[s] * c->hidden + i];
            dprobs[s] += term;
            mag += fabs(term);
        }
        bound[s] = ref_bound(GMM_F32, c->hidden, mag, dprobs[s]);
    }
    for (int part = 0; part < 6; part++) { /* with or without probs: drows, dprobs, both */
        const int with = part / 3, drows_too = part % 3 != 1, dprobs_too = part % 3 != 0;
        const gmm_dtype dtype = part % 3 == 2 ? c->dtype : c->other;
        const t_mat drows = matrix(c, dtype, m.capacity, T_POISON);
        gmm_permute p = m.p;
        if (with) p.probs = t_floats_in(probs, m.slots);
        if (drows_too) p.drows = &drows.mat;
        if (dprobs_too) p.rows = &rows.mat, p.dprobs = t_floats_out(m.slots);
        call(T.ctx, GMM_OP_UNPERMUTE_BWD, &p);
        if (drows_too) {
            for (int64_t i = 0; i < m.live * c->hidden; i++) { /* one product, rounded to fp32, then stored */
                const int64_t slot = m.slot_of[i / c->hidden];
                want[i] = slot < 0 ? 0.0
                                   : ref_round(GMM_F32, (with ? probs[slot] : 1.0) *
                                                            dout.v[slot / c->topk * c->hidden + i % c->hidden]);
            }
            t_exact("drows", dtype, t_mat_get(&drows), want, m.live * c->hidden);
            check_tail(&m, &drows);
        }
        if (dprobs_too) t_near("dprobs", t_floats_get(p.dprobs, m.slots), dprobs, bound, m.slots);
    }
}

/* <permute(x), r> = <x, permute_bwd(r)> and <unpermute(r), y> = <r, unpermute_bwd(y)>: exact, all values are small
   integers, and probabilities are halves. */
static void adjoint(int arg) {
    const permute_case *c = case_of(arg);
    plan m = plan_of(c);
    const t_mat x = matrix(c, GMM_F32, c->tokens, T_INTS), r = matrix(c, GMM_F32, m.capacity, T_INTS);
    const t_mat px = matrix(c, GMM_F32, m.capacity, T_POISON), dx = matrix(c, GMM_F32, c->tokens, T_POISON);
    double *halves = zeros(m.slots), *a, *b, left = 0.0, right = 0.0, up = 0.0, down = 0.0;
    use_maps(&m);
    for (int64_t i = 0; i < m.slots; i++) halves[i] = (double)t_int(-3, 3) / 2.0;
    m.p.x = &x.mat;
    m.p.rows = &px.mat;
    m.p.drows = &r.mat;
    m.p.dx = &dx.mat;
    call(T.ctx, GMM_OP_PERMUTE_FWD, &m.p);
    call(T.ctx, GMM_OP_PERMUTE_BWD, &m.p);
    a = t_mat_get(&px);
    b = t_mat_get(&dx);
    for (int64_t i = 0; i < m.live * c->hidden; i++) left += a[i] * r.v[i];
    for (int64_t i = 0; i < c->tokens * c->hidden; i++) right += x.v[i] * b[i];
    T_CHECK(left == right, "permute: %g and %g", left, right);
    m.p.probs = t_floats_in(halves, m.slots);
    m.p.rows = &r.mat;
    m.p.out = &dx.mat;
    m.p.dout = &x.mat;
    m.p.drows = &px.mat;
    call(T.ctx, GMM_OP_UNPERMUTE_FWD, &m.p);
    call(T.ctx, GMM_OP_UNPERMUTE_BWD, &m.p);
    a = t_mat_get(&dx);
    b = t_mat_get(&px);
    for (int64_t i = 0; i < c->tokens * c->hidden; i++) up += a[i] * x.v[i];
    for (int64_t i = 0; i < m.live * c->hidden; i++) down += r.v[i] * b[i];
    T_CHECK(up == down, "unpermute: %g and %g", up, down);
}

/* ---------------------------------------------------------------------------------------- Faults and threads --- */

/* Maps and sizes with invalid entries: nothing is accessed out of bounds, invalid entries count as -1 and are
   reported. */
static void faults(int arg) {
    static const int32_t bad[4] = {-2, INT32_MIN, INT32_MAX, 1000000};
    const permute_case *c = &cases[1];
    plan m = plan_of(c);
    const t_mat x = matrix(c, GMM_F32, c->tokens, T_REALS), rows = matrix(c, GMM_F32, m.capacity, T_REALS);
    const t_mat to_rows = matrix(c, GMM_F32, m.capacity, T_POISON), out = matrix(c, GMM_F32, c->tokens, T_POISON);
    const double *got;
    uint32_t want = (uint32_t)GMM_FAULT_INDEX;
    for (int64_t i = 1; i < m.live; i += 5) m.slot_of[i] = bad[i % 4];
    for (int64_t i = 1; i < m.slots; i += 5) m.row_of[i] = bad[i % 4];
    if (arg == 1) { /* sizes: -5, then more than fits */
        m.sizes[0] = -5;
        m.sizes[1] = INT32_MAX;
        m.sizes[2] = INT32_MAX;
        m.live = m.capacity;
        want |= (uint32_t)GMM_FAULT_NEGATIVE | (uint32_t)GMM_FAULT_CAPACITY;
    }
    use_maps(&m);
    m.p.x = &x.mat;
    m.p.rows = &to_rows.mat;
    call(T.ctx, GMM_OP_PERMUTE_FWD, &m.p);
    T_CHECK(word_get(m.p.fault) == want, "permute_fwd: fault %u instead of %u", word_get(m.p.fault), want);
    got = t_mat_get(&to_rows);
    for (int64_t i = 0; i < m.live * c->hidden; i++) {
        const int64_t slot = m.slot_of[i / c->hidden], column = i - i / c->hidden * c->hidden;
        const double value = slot < 0 || slot >= m.slots ? 0.0 : x.v[slot / c->topk * c->hidden + column];
        T_CHECK(got[i] == value, "row %lld: %g instead of %g", (long long)(i / c->hidden), got[i], value);
    }
    m.p.dout = &x.mat;
    m.p.drows = &to_rows.mat;
    m.p.fault = word(0);
    t_mat_poison(&to_rows);
    call(T.ctx, GMM_OP_UNPERMUTE_BWD, &m.p);
    T_CHECK(word_get(m.p.fault) == want, "unpermute_bwd: fault %u instead of %u", word_get(m.p.fault), want);
    t_same("drows", t_mat_get(&to_rows), got, (size_t)(m.live * c->hidden) * sizeof *got);
    m.p.drows = NULL;
    m.p.rows = &rows.mat;
    m.p.out = &out.mat;
    m.p.dprobs = t_floats_out(m.slots);
    m.p.fault = word(0);
    call(T.ctx, GMM_OP_UNPERMUTE_BWD, &m.p);
    T_CHECK(word_get(m.p.fault) == (uint32_t)GMM_FAULT_INDEX, "dprobs: fault %u", word_get(m.p.fault));
    for (int64_t i = 1; i < m.slots; i += 5) T_CHECK(t_floats_get(m.p.dprobs, m.slots)[i] == 0.0, "dprobs");
    m.p.fault = word(0);
    call(T.ctx, GMM_OP_UNPERMUTE_FWD, &m.p);
    T_CHECK(word_get(m.p.fault) == (uint32_t)GMM_FAULT_INDEX, "unpermute_fwd: fault %u", word_get(m.p.fault));
    got = t_mat_get(&out);
    for (int64_t i = 0; i < c->tokens * c->hidden; i++) {
        double sum = 0.0, size = 0.0;
        for (int32_t k = 0; k < c->topk; k++) {
            const int32_t row = m.row_of[i / c->hidden * c->topk + k];
            const double v = row < 0 || row >= m.capacity ? 0.0 : rows.v[row * c->hidden + i % c->hidden];
            sum += v, size += fabs(v);
        }
        T_CHECK(fabs(got[i] - sum) <= 0x1p-22 * size, "out %lld: %g instead of %g", (long long)i, got[i], sum);
    }
    m.p.drows = &rows.mat;
    m.p.dx = &out.mat;
    m.p.dprobs = NULL;
    m.p.fault = word(0);
    t_mat_poison(&out);
    call(T.ctx, GMM_OP_PERMUTE_BWD, &m.p);
    T_CHECK(word_get(m.p.fault) == (uint32_t)GMM_FAULT_INDEX, "permute_bwd: fault %u", word_get(m.p.fault));
    t_exact("dx", GMM_F32, t_mat_get(&out), got, c->tokens * c->hidden);
    m.p.fault = NULL;
    call(T.ctx, GMM_OP_PERMUTE_BWD, &m.p);
}

/* NaN in rows beyond the sum of the sizes and in padding rows reaches no token. */
static void tail_nan(int arg) {
    const permute_case *c = &cases[2];
    plan m = plan_of(c);
    t_mat rows = matrix(c, GMM_F32, m.capacity, T_REALS);
    const t_mat out = matrix(c, GMM_F32, c->tokens, T_POISON), x = matrix(c, GMM_F32, c->tokens, T_REALS);
    const double *got;
    (void)arg;
    for (int64_t i = 0; i < m.capacity * c->hidden; i++)
        if (m.slot_of[i / c->hidden] < 0) rows.v[i] = NAN;
    t_mat_put(&rows);
    use_maps(&m);
    m.p.rows = m.p.drows = &rows.mat;
    m.p.out = m.p.dx = &out.mat;
    m.p.dout = &x.mat;
    call(T.ctx, GMM_OP_UNPERMUTE_FWD, &m.p);
    got = t_mat_get(&out);
    for (int64_t i = 0; i < c->tokens * c->hidden; i++) T_CHECK(isfinite(got[i]), "out");
    t_mat_poison(&out);
    call(T.ctx, GMM_OP_PERMUTE_BWD, &m.p);
    got = t_mat_get(&out);
    for (int64_t i = 0; i < c->tokens * c->hidden; i++) T_CHECK(isfinite(got[i]), "dx");
    m.p.drows = NULL;
    m.p.dprobs = t_floats_out(m.slots);
    call(T.ctx, GMM_OP_UNPERMUTE_BWD, &m.p);
    got = t_floats_get(m.p.dprobs, m.slots);
    for (int64_t i = 0; i < m.slots; i++) T_CHECK(isfinite(got[i]), "dprobs");
}

/* Bitwise the same for any number of threads. */
static void threads(int arg) {
    const permute_case c = {GMM_BF16, GMM_BF16, 9000, 20, 65, 60, 2, 8, 3, arg ? -900 : 40, GMM_TAIL_ZERO, 0};
    plan m = plan_of(&c);
    const t_mat x = matrix(&c, GMM_BF16, c.tokens, T_REALS), drows = matrix(&c, GMM_BF16, m.capacity, T_REALS);
    const double *probs = reals(m.slots);
    void *first[3] = {NULL};
    if (T.gpu) t_skip("threads are the CPU engine's");
    for (int n = 1; n <= 3; n++) {
        const t_mat rows = matrix(&c, GMM_BF16, m.capacity, T_POISON), out = matrix(&c, GMM_BF16, c.tokens, T_POISON);
        const t_mat dx = matrix(&c, GMM_BF16, c.tokens, T_POISON);
        const t_mat *results[3];
        gmm_config config = T.config;
        gmm_context *ctx;
        config.threads = n;
        ctx = t_context(&config);
        m.p.row_of = ints_out(m.slots);
        m.p.slot_of = ints_out(m.capacity);
        m.p.sizes = ints_out(c.experts);
        m.p.fault = word(0);
        m.p.x = &x.mat;
        m.p.rows = &rows.mat;
        m.p.out = &out.mat;
        m.p.drows = &drows.mat;
        m.p.dx = &dx.mat;
        m.p.probs = t_floats_in(probs, m.slots);
        call(ctx, GMM_OP_PERMUTE_MAP, &m.p);
        t_same("row_of", ints_get(m.p.row_of, m.slots), m.row_of, (size_t)m.slots * 4);
        t_same("slot_of", ints_get(m.p.slot_of, m.capacity), m.slot_of, (size_t)m.capacity * 4);
        t_same("sizes", ints_get(m.p.sizes, c.experts), m.sizes, (size_t)c.experts * 4);
        T_CHECK(word_get(m.p.fault) == m.fault, "fault");
        call(ctx, GMM_OP_PERMUTE_FWD, &m.p);
        call(ctx, GMM_OP_UNPERMUTE_FWD, &m.p);
        call(ctx, GMM_OP_PERMUTE_BWD, &m.p);
        results[0] = &rows;
        results[1] = &out;
        results[2] = &dx;
        for (int i = 0; i < 3; i++) {
            void *bits = t_mat_bits(results[i]);
            if (n == 1) first[i] = bits;
            else t_same("result", bits, first[i], (size_t)(results[i]->rows * c.hidden) * 2);
        }
    }
}

/* ---------------------------------------------------------------------------------------------------- Errors --- */

/* One of the five calls with good operands, of which each refused call spoils one. */
typedef struct refusing {
    gmm_op op;
    operation run;
    const char *name;
    gmm_permute good, all, p; /* all: operands of every call; p: the spoiled copy of good */
    gmm_mat mat;
    t_mat tokens_in, tokens_out, rows_in, rows_out;
    char *workspace, *odd;    /* odd: an address that no element may have */
    size_t bytes;
} refusing;

static void ready_to_refuse(refusing *x, int which) {
    static const struct { gmm_op op; operation run; const char *name; } table[5] = {
        {GMM_OP_PERMUTE_MAP, gmm_permute_map, "gmm_permute_map"},
        {GMM_OP_PERMUTE_FWD, gmm_permute_fwd, "gmm_permute_fwd"},
        {GMM_OP_PERMUTE_BWD, gmm_permute_bwd, "gmm_permute_bwd"},
        {GMM_OP_UNPERMUTE_FWD, gmm_unpermute_fwd, "gmm_unpermute_fwd"},
        {GMM_OP_UNPERMUTE_BWD, gmm_unpermute_bwd, "gmm_unpermute_bwd"},
    };
    const permute_case c = {GMM_F32, GMM_F32, 6, 5, 4, 4, 2, 4, 10, 3, GMM_TAIL_KEEP, 0};
    plan m = plan_of(&c);
    gmm_info info = GMM_ZERO;
    gmm_permute *good = &x->good;
    memset(x, 0, sizeof *x);
    x->op = table[which].op;
    x->run = table[which].run;
    x->name = table[which].name;
    x->tokens_in = matrix(&c, GMM_F32, 6, T_REALS);
    x->tokens_out = matrix(&c, GMM_F32, 6, T_POISON);
    x->rows_in = matrix(&c, GMM_F32, m.capacity, T_REALS);
    x->rows_out = matrix(&c, GMM_F32, m.capacity, T_POISON);
    *good = m.p;
    good->row_of = ints_out(m.slots);
    good->slot_of = ints_out(m.capacity);
    good->sizes = ints_out(4);
    call(T.ctx, GMM_OP_PERMUTE_MAP, good);
    good->x = good->dout = &x->tokens_in.mat;
    good->rows = x->op == GMM_OP_PERMUTE_FWD ? &x->rows_out.mat : &x->rows_in.mat;
    good->drows = x->op == GMM_OP_UNPERMUTE_BWD ? &x->rows_out.mat : &x->rows_in.mat;
    good->out = good->dx = &x->tokens_out.mat;
    good->probs = t_floats_in(reals(12), 12);
    good->drow_probs = t_floats_in(reals(m.capacity), m.capacity);
    good->row_probs = t_floats_out(m.capacity);
    good->dprobs = t_floats_out(12);
    x->all = *good;
    x->odd = (char *)good->row_probs + 1;
    *good = operands_of(x->op, &x->all);
    T_OK(gmm_permute_query(T.ctx, x->op, good, &info));
    x->bytes = info.workspace_bytes;
    x->workspace = (char *)t_workspace(x->bytes + 512);
    x->p = *good;
}

#define REFUSED(status, ...) \
    do { \
        T_REFUSED(status, x->run(T.ctx, &x->p, x->workspace, x->bytes, T.stream), x->name, ": permute", __VA_ARGS__, \
                  NULL); \
        x->p = x->good; \
    } while (0)
#define REFUSED_SHAPE(status, ...) \
    do { \
        gmm_info info = GMM_ZERO; \
        T_REFUSED(status, gmm_permute_query(T.ctx, x->op, &x->p, &info), "gmm_permute_query: permute", __VA_ARGS__, \
                  NULL); \
        REFUSED(status, __VA_ARGS__); \
    } while (0)
#define BAD(field, value) x->p.field = value
#define BAD_MAT(field, part, value) x->mat = *x->good.field, x->mat.part = value, x->p.field = &x->mat
#define ODD(field, type) x->p.field = (type *)(void *)x->odd; REFUSED(GMM_E_ALIGN, #field, "aligned")

static void bad_sizes(refusing *x) {
    gmm_options options = GMM_ZERO;
    BAD(experts, 0); REFUSED_SHAPE(GMM_E_ARG, "experts", "0", "T=6 E=0 k=2 R=");
    BAD(tokens, -7); REFUSED_SHAPE(GMM_E_ARG, "tokens", "-7");
    BAD(tokens, (int64_t)1 << 30); REFUSED_SHAPE(GMM_E_ARG, "tokens", "1073741824", "topk 2", "2^31");
    BAD(tokens, INT64_MAX); REFUSED_SHAPE(GMM_E_ARG, "tokens", "9223372036854775807", "2^31");
    BAD(topk, 0); REFUSED_SHAPE(GMM_E_ARG, "topk", "0");
    BAD(capacity, -1); REFUSED_SHAPE(GMM_E_ARG, "capacity", "-1");
    BAD(capacity, (int64_t)1 << 31); REFUSED_SHAPE(GMM_E_ARG, "capacity", "2147483648", "2^31");
    BAD(hidden, 0); REFUSED_SHAPE(GMM_E_ARG, "hidden", "0");
    BAD(align, -1); REFUSED_SHAPE(GMM_E_ARG, "align", "-1");
    BAD(tail, (gmm_tail)2); REFUSED_SHAPE(GMM_E_ARG, "tail", "2");
    BAD(reserved, 1); REFUSED_SHAPE(GMM_E_ARG, "reserved", "1");
    BAD(struct_size, sizeof x->p + 8); REFUSED_SHAPE(GMM_E_VERSION, "permute", "struct_size");
    options.engine = GMM_ENGINE_WGMMA;
    BAD(options, &options); REFUSED_SHAPE(GMM_E_UNSUPPORTED, "options.engine", "wgmma");
    ODD(fault, uint32_t);
}

static void bad_operands(refusing *x) {
    if (x->op == GMM_OP_PERMUTE_MAP) {
        BAD(indices, NULL); REFUSED(GMM_E_NULL, "indices", "12 values", "T=6 E=4 k=2 R=");
        ODD(indices, const int32_t);
        ODD(row_of, int32_t);
        ODD(slot_of, int32_t);
        ODD(sizes, int32_t);
    }
    if (x->op == GMM_OP_PERMUTE_FWD) {
        BAD(x, NULL); REFUSED_SHAPE(GMM_E_NULL, "x", "NULL");
        BAD(rows, NULL); REFUSED_SHAPE(GMM_E_NULL, "rows", "NULL");
        BAD_MAT(x, dtype, GMM_I32); REFUSED_SHAPE(GMM_E_DTYPE, "x", "i32");
        BAD_MAT(x, dtype, GMM_E2M1); REFUSED_SHAPE(GMM_E_DTYPE, "x", "e2m1");
        BAD_MAT(rows, dtype, GMM_BF16); REFUSED_SHAPE(GMM_E_DTYPE, "rows", "bf16", "f32");
        BAD_MAT(rows, ld, 4); REFUSED_SHAPE(GMM_E_STRIDE, "rows", "4", "5 columns");
        BAD_MAT(x, data, NULL); REFUSED(GMM_E_NULL, "x", "6 x 5 f32");
        BAD_MAT(x, group_stride, 30); REFUSED_SHAPE(GMM_E_STRIDE, "x", "group_stride 30");
        BAD(slot_of, NULL); REFUSED(GMM_E_NULL, "slot_of");
        BAD(sizes, NULL); REFUSED(GMM_E_NULL, "sizes", "4 values");
        BAD(probs, NULL); REFUSED(GMM_E_NULL, "probs", "12 values");
        ODD(slot_of, int32_t);
        ODD(row_of, int32_t);
        ODD(probs, const float);
        ODD(row_probs, float);
    }
    if (x->op == GMM_OP_PERMUTE_BWD) {
        BAD(dx, NULL), x->p.dprobs = NULL; REFUSED(GMM_E_NULL, "dx", "dprobs");
        BAD(drows, NULL); REFUSED_SHAPE(GMM_E_NULL, "drows");
        BAD_MAT(drows, dtype, GMM_E4M3); REFUSED_SHAPE(GMM_E_DTYPE, "drows", "e4m3");
        BAD_MAT(dx, dtype, GMM_U8); REFUSED_SHAPE(GMM_E_DTYPE, "dx", "u8");
        BAD_MAT(dx, ld, 2); REFUSED_SHAPE(GMM_E_STRIDE, "dx", "2");
        BAD(row_of, NULL); REFUSED(GMM_E_NULL, "row_of", "12 values");
        BAD(drow_probs, NULL); REFUSED(GMM_E_NULL, "drow_probs");
        ODD(dprobs, float);
        ODD(drow_probs, const float);
    }
    if (x->op == GMM_OP_UNPERMUTE_FWD) {
        BAD(rows, NULL); REFUSED_SHAPE(GMM_E_NULL, "rows");
        BAD(out, NULL); REFUSED_SHAPE(GMM_E_NULL, "out");
        BAD_MAT(rows, dtype, GMM_E5M2); REFUSED_SHAPE(GMM_E_DTYPE, "rows", "e5m2");
        BAD_MAT(out, data, (char *)x->tokens_out.data + 1); REFUSED(GMM_E_ALIGN, "out", "f32");
        BAD(row_of, NULL); REFUSED(GMM_E_NULL, "row_of");
        ODD(probs, const float);
    }
    if (x->op == GMM_OP_UNPERMUTE_BWD) {
        BAD(drows, NULL), x->p.dprobs = NULL; REFUSED(GMM_E_NULL, "drows", "dprobs");
        BAD(dout, NULL); REFUSED_SHAPE(GMM_E_NULL, "dout");
        BAD_MAT(drows, dtype, GMM_I64); REFUSED_SHAPE(GMM_E_DTYPE, "drows", "i64");
        BAD_MAT(dout, dtype, GMM_NONE); REFUSED_SHAPE(GMM_E_DTYPE, "dout", "none");
        BAD(slot_of, NULL); REFUSED(GMM_E_NULL, "slot_of");
        BAD(sizes, NULL); REFUSED(GMM_E_NULL, "sizes");
        BAD(rows, NULL); REFUSED_SHAPE(GMM_E_NULL, "rows");
        BAD(row_of, NULL); REFUSED(GMM_E_NULL, "row_of");
        ODD(dprobs, float);
    }
}

/* Every operand that only other calls use. Returns how many there are. */
static int operands_of_others(refusing *x) {
    int refused = 0;
#define OTHERS(field, calls) \
    if (!x->good.field) { \
        x->p.field = x->all.field; \
        REFUSED_SHAPE(GMM_E_CONFIG, "." #field " is set and must be NULL", "neither reads nor writes it, only " \
                      calls); \
        refused++; \
    }
    OTHERS(x, "permute_fwd (")
    OTHERS(probs, "permute_fwd, unpermute_fwd, unpermute_bwd (")
    OTHERS(rows, "permute_fwd, unpermute_fwd, unpermute_bwd (")
    OTHERS(row_probs, "permute_fwd (")
    OTHERS(out, "unpermute_fwd (")
    OTHERS(dout, "unpermute_bwd (")
    OTHERS(drows, "permute_bwd, unpermute_bwd (")
    OTHERS(drow_probs, "permute_bwd (")
    OTHERS(dx, "permute_bwd (")
    OTHERS(dprobs, "permute_bwd, unpermute_bwd (")
#undef OTHERS
    return refused;
}
#undef REFUSED
#undef REFUSED_SHAPE
#undef BAD
#undef BAD_MAT
#undef ODD

static void errors(int arg) {
    static const int others[5] = {10, 6, 6, 7, 5}; /* number of the 10 operands that the call does not use */
    gmm_info info = GMM_ZERO;
    refusing r, *x = &r;
    int refused;
    ready_to_refuse(x, arg);
    bad_sizes(x);
    bad_operands(x);
    refused = operands_of_others(x);
    T_CHECK(refused == others[arg], "%d operands belong to other calls, not %d", refused, others[arg]);
    if (x->bytes) {
        T_REFUSED(GMM_E_WORKSPACE, x->run(T.ctx, &x->p, x->workspace, x->bytes - 1, T.stream), x->name,
                  "workspace_bytes", NULL);
        T_REFUSED(GMM_E_NULL, x->run(T.ctx, &x->p, NULL, x->bytes, T.stream), x->name, "workspace", NULL);
        T_REFUSED(GMM_E_ALIGN, x->run(T.ctx, &x->p, x->workspace + 64, x->bytes, T.stream), x->name, "workspace",
                  "256", NULL);
    }
    T_REFUSED(GMM_E_NULL, x->run(T.ctx, NULL, x->workspace, x->bytes, T.stream), x->name, "permute", NULL);
    T_REFUSED(GMM_E_NULL, gmm_permute_query(T.ctx, x->op, &x->p, NULL), "gmm_permute_query", "info", NULL);
    T_REFUSED(GMM_E_ARG, gmm_permute_query(T.ctx, GMM_OP_TOPK_FWD, &x->p, &info), "gmm_permute_query", "op",
              "topk_fwd", NULL);
    T_CHECK(x->run(NULL, &x->p, x->workspace, x->bytes, T.stream) == GMM_E_NULL, "no context");
    T_OK(x->run(T.ctx, &x->p, x->workspace, x->bytes, T.stream));
}

static const struct { void (*run)(int); const char *name; } all[] = {
    {map, "map"}, {forward, "fwd"}, {forward_maps, "any row_of"}, {permute_backward, "bwd"}, {back, "unpermute fwd"},
    {unpermute_backward, "unpermute bwd"}, {round_trip, "round trip"}, {adjoint, "adjoint"}, {map_splits, "splits"},
};

/* One of the above with a drawn case. */
static void drawn(int arg) {
    static const gmm_dtype dtypes[] = {GMM_F32, GMM_F16, GMM_BF16};
    const int which = (int)t_int(0, T_COUNT(all) - 1);
    permute_case *c = &drawn_case;
    (void)arg;
    memset(c, 0, sizeof *c);
    c->dtype = dtypes[t_int(0, 2)];
    c->other = dtypes[t_int(0, 2)];
    c->tokens = t_draw_size(60, 1500) - 1;
    c->hidden = t_draw_size(60, c->tokens > 200 ? 20 : 1100);
    c->experts = (int32_t)t_draw_size(20, 300);
    c->used = (int32_t)t_int(1, c->experts);
    c->topk = (int32_t)t_int(1, c->experts < 8 ? c->experts : 8);
    c->align = (int32_t)(t_int(0, 1) * t_int(1, 40));
    c->dropped = (int32_t)(t_int(0, 1) * t_int(0, 100));
    c->capacity_extra = t_int(0, 60);
    c->tail = (gmm_tail)t_int(0, 1);
    c->pad = t_int(0, 1) * t_int(0, 9);
    all[which].run(-1);
}

void tests_permute(void) {
    static const char *const errors_of[5] = {"map", "fwd", "bwd", "unpermute fwd", "unpermute bwd"};
    t_add(drawn, 0, "permute drawn at random");
    t_random(6);
    for (int f = 0; f < (int)T_COUNT(all); f++)
        for (int i = 0; i < (int)T_COUNT(cases); i++) {
            const permute_case *c = &cases[i];
            t_add(all[f].run, i, "permute %s %s %s T%lld H%lld E%d k%d align%d%s%s%s", all[f].name,
                  gmm_dtype_name(c->dtype), gmm_dtype_name(c->other), (long long)c->tokens, (long long)c->hidden,
                  c->experts, c->topk, c->align, c->dropped ? " dropped" : "", c->capacity_extra < 0 ? " overflow" : "",
                  c->tail == GMM_TAIL_ZERO ? " zero tail" : "");
        }
    t_add(map_optional, 0, "permute map, one output each");
    t_add(map_index, 0, "permute map, indices out of range, no fault word");
    for (int i = 1; i <= 4; i++) t_add(map_index, i, "permute map, indices out of range %d", i);
    t_add(forward_bytes, GMM_E4M3, "permute fwd e4m3");
    t_add(forward_bytes, GMM_E5M2, "permute fwd e5m2");
    t_add(forward_bytes, GMM_U8, "permute fwd u8");
    t_add(faults, 0, "permute wild maps");
    t_add(faults, 1, "permute wild maps and sizes");
    t_add(tail_nan, 0, "permute NaN in tail and padding");
    t_add(threads, 0, "permute threads 1 2 3");
    t_add(threads, 1, "permute threads 1 2 3 overflow");
    for (int i = 0; i < 5; i++) t_add(errors, i, "permute errors %s", errors_of[i]);
}
