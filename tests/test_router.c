/* test_router.c - routers of current models against fp64 references: group-limited choice, Sinkhorn, losses by
   sequence, padding, fp64 logits; dense routings; the update of expert biases */
#include "route_case.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#ifdef HAVE_CUDA
#include "device.h"
#endif

static const route_case cases[] = {
    {.name = "dsv3", .dtype = GMM_F32, .dlogits = GMM_F32, .tokens = 96, .experts = 256, .topk = 8,
     .score = GMM_SCORE_SIGMOID, .normalize = 1, .bias = 1, .scale = 2.5f, .aux = 0.5f, .groups = 8,
     .group_topk = 4, .sequences = 3},
    {.name = "dsv2", .dtype = GMM_BF16, .dlogits = GMM_F32, .tokens = 50, .experts = 160, .topk = 6, .scale = 16.0f,
     .aux = 1.0f, .groups = 8, .group_topk = 3, .group_sum = 1, .sequences = 1},
    {.name = "groups of uneven warps", .dtype = GMM_F32, .dlogits = GMM_BF16, .tokens = 33, .experts = 105, .topk = 5,
     .score = GMM_SCORE_SIGMOID, .bias = 1, .z = 0.5f, .groups = 35, .group_topk = 4, .group_sum = 2},
    {.name = "every group", .dtype = GMM_F32, .dlogits = GMM_F32, .tokens = 20, .experts = 12, .topk = 12,
     .normalize = 1, .aux = 1.0f, .z = 1.0f, .groups = 4, .group_topk = 4, .group_sum = 3, .sequences = 1},
    {.name = "one expert a group", .dtype = GMM_F32, .dlogits = GMM_F32, .tokens = 20, .experts = 40, .topk = 3,
     .normalize = 1, .bias = 1, .aux = 1.0f, .z = 1.0f, .groups = 40, .group_topk = 3, .sequences = 1},
    {.name = "many experts in groups", .dtype = GMM_F32, .dlogits = GMM_F32, .tokens = 9, .experts = 14000, .topk = 4,
     .score = GMM_SCORE_SIGMOID, .normalize = 1, .aux = 1.0f, .z = 1.0f, .groups = 100, .group_topk = 2,
     .sequences = 3},
    {.name = "sequences", .dtype = GMM_F32, .dlogits = GMM_F32, .tokens = 120, .experts = 16, .topk = 4, .normalize = 1,
     .aux = 1.0f, .z = 1.0f, .sequences = 4},
    {.name = "sequences of the second index", .dtype = GMM_F32, .dlogits = GMM_F32, .tokens = 120, .experts = 16,
     .topk = 4, .score = GMM_SCORE_SIGMOID, .normalize = 1, .bias = 1, .aux = 1.0f, .z = 1.0f, .sequences = 5,
     .sequence_first = 1},
    {.name = "sequences without an auxiliary loss", .dtype = GMM_F32, .dlogits = GMM_F32, .tokens = 120, .experts = 16,
     .topk = 4, .normalize = 1, .z = 1.0f, .sequences = 4},
    {.name = "sequences of one token", .dtype = GMM_F32, .dlogits = GMM_F32, .tokens = 70, .experts = 10, .topk = 2,
     .aux = 1.0f, .z = 1.0f, .sequences = 70},
    {.name = "long sequences", .dtype = GMM_F32, .dlogits = GMM_F32, .tokens = 5200, .experts = 8, .topk = 2,
     .aux = 1.0f, .z = 1.0f, .sequences = 4, .sequence_first = 1, .padding = 1},
    {.name = "padding", .dtype = GMM_F32, .dlogits = GMM_F32, .tokens = 77, .experts = 16, .topk = 4,
     .score = GMM_SCORE_SIGMOID, .normalize = 1, .bias = 1, .aux = 1.0f, .z = 1.0f, .sequences = 1,
     .padding = 1},
    {.name = "padding of sequences", .dtype = GMM_BF16, .dlogits = GMM_BF16, .tokens = 96, .experts = 24, .topk = 3,
     .normalize = 1, .aux = 1.0f, .z = 1.0f, .groups = 4, .group_topk = 2, .sequences = 6, .padding = 1},
    {.name = "all padding", .dtype = GMM_F32, .dlogits = GMM_F32, .tokens = 30, .experts = 8, .topk = 2, .normalize = 1,
     .aux = 1.0f, .z = 1.0f, .sinkhorn = 3, .sequences = 2, .padding = 2},
    {.name = "sinkhorn", .dtype = GMM_F32, .dlogits = GMM_F32, .tokens = 150, .experts = 16, .topk = 2, .z = 1.0f,
     .sinkhorn = 7, .sequences = 1},
    {.name = "sinkhorn to the end", .dtype = GMM_F32, .dlogits = GMM_F32, .tokens = 700, .experts = 33, .topk = 1,
     .score = GMM_SCORE_SIGMOID, .aux = 1.0f, .sinkhorn = 100, .sequences = 1},
    {.name = "sinkhorn of a coarse tolerance", .dtype = GMM_F32, .dlogits = GMM_F32, .tokens = 150, .experts = 8,
     .topk = 2, .z = 1.0f, .sinkhorn = 100, .sequences = 1, .tolerance = 0.5f},
    {.name = "sinkhorn of a fine tolerance", .dtype = GMM_F32, .dlogits = GMM_F32, .tokens = 300, .experts = 8,
     .topk = 1, .z = 1.0f, .sinkhorn = 100, .sequences = 1, .tolerance = 1e-7f},
    {.name = "sinkhorn of groups, padding", .dtype = GMM_F32, .dlogits = GMM_F32, .tokens = 90, .experts = 24,
     .topk = 4, .normalize = 1, .aux = 1.0f, .z = 1.0f, .groups = 6, .group_topk = 3, .sinkhorn = 20, .sequences = 3,
     .sequence_first = 1, .padding = 1},
};

/* A routing in double precision. */
typedef struct reference {
    const route_case *c;
    double *logits, *bias;
    uint8_t *padding;
    int32_t *indices, *counts, *sequence_counts;
    double *probs, *valid;   /* valid [sequences + 1]: tokens, and of the batch */
    double aux_loss, z_loss;
} reference;

static int64_t sequence_of(const route_case *c, int64_t t) {
    return c->sequence_first ? t % route_sequences(c) : t / (c->tokens / route_sequences(c));
}
static double z_factor(const reference *r) { return route_z_factor(r->c, r->valid[route_sequences(r->c)]); }

/* Factors of experts by Sinkhorn's iteration. */
static double *sinkhorn(const reference *r) {
    const route_case *c = r->c;
    double *b = route_doubles(c->experts), *x = route_doubles(c->experts), *sums = route_doubles(c->experts);
    double change = 1.0;
    const double tolerance = c->tolerance > 0.0f ? (double)c->tolerance : 1e-4;
    for (int32_t e = 0; e < c->experts; e++) b[e] = 1.0;
    for (int32_t i = 0; i < c->sinkhorn && change > tolerance; i++) {
        for (int32_t e = 0; e < c->experts; e++) sums[e] = 0.0;
        for (int64_t t = 0; t < c->tokens; t++) {
            const double *logits = r->logits + t * c->experts;
            double top = -INFINITY, row = 0.0;
            if (r->padding[t]) continue;
            for (int32_t e = 0; e < c->experts; e++) top = fmax(top, logits[e]);
            for (int32_t e = 0; e < c->experts; e++) row += b[e] * (x[e] = exp(logits[e] - top));
            for (int32_t e = 0; e < c->experts; e++)
                sums[e] += x[e] / (r->valid[route_sequences(c)] * (row + 1e-8));
        }
        change = 0.0;
        for (int32_t e = 0; e < c->experts; e++) {
            const double next = 1.0 / (c->experts * (sums[e] + 1e-8));
            change += fabs(next - b[e]) / c->experts;
            b[e] = next;
        }
    }
    return b;
}

/* Gives token 0 two large logits whose experts are chosen in one order by the case's tolerance, in the other by the
   usual one. The token itself changes the factors a little. */
static void place_between_tolerances(reference *r) {
    const route_case *c = r->c;
    route_case usual = *c;
    reference other = *r;
    int32_t first = 0, second = 0;
    usual.tolerance = 0.0f;
    other.c = &usual;
    for (int i = 0; i < 8; i++) {
        const double *b = sinkhorn(r), *w = sinkhorn(&other);
        for (int32_t e = 0; e < c->experts && i == 0; e++) {
            if (b[e] / w[e] > b[first] / w[first]) first = e;
            if (b[e] / w[e] < b[second] / w[second]) second = e;
        }
        for (int32_t e = 0; e < c->experts; e++) r->logits[e] = -6.0;
        r->logits[first] = 1.0;
        r->logits[second] = ref_round(c->dtype, 1.0 + 0.5 * log(b[first] / b[second] * w[first] / w[second]));
    }
}

/* The indices of the k largest values, of equal ones the lower index. Those of `not` are left out. */
static void largest(const double *v, int32_t n, const uint8_t *not_these, int32_t k, int32_t *indices) {
    uint8_t *taken = (uint8_t *)t_host((size_t)n);
    if (not_these) memcpy(taken, not_these, (size_t)n);
    for (int32_t i = 0; i < k; i++) {
        indices[i] = -1;
        for (int32_t e = 0; e < n; e++)
            if (!taken[e] && (indices[i] < 0 || v[e] > v[indices[i]])) indices[i] = e;
        taken[indices[i]] = 1;
    }
}
static void choose(const route_case *c, const double *v, int32_t *indices) {
    const int32_t members = c->groups > 1 ? c->experts / c->groups : 0;
    const int32_t count = c->group_sum ? c->group_sum : c->group_topk ? c->topk / c->group_topk : 0;
    uint8_t *out = (uint8_t *)t_host((size_t)c->experts);
    double *sums = route_doubles(c->groups);
    int32_t *best = (int32_t *)t_host((size_t)(c->groups + c->experts) * sizeof *best);
    if (c->groups > 1) {
        for (int32_t g = 0; g < c->groups; g++) {
            largest(v + g * members, members, NULL, count, best);
            for (int32_t i = 0; i < count; i++) sums[g] += v[g * members + best[i]];
        }
        largest(sums, c->groups, NULL, c->group_topk, best);
        memset(out, 1, (size_t)c->experts);
        for (int32_t i = 0; i < c->group_topk; i++) memset(out + best[i] * members, 0, (size_t)members);
    }
    largest(v, c->experts, out, c->topk, indices);
}

static reference reference_of(const route_case *c) {
    const int64_t E = c->experts, B = route_sequences(c), slots = c->tokens * c->topk;
    double *s = route_doubles(E), *q = route_doubles(E), *v = route_doubles(E), *sums = route_doubles(B * E);
    double *b = NULL;
    reference r;
    memset(&r, 0, sizeof r);
    r.c = c;
    r.logits = route_doubles(c->tokens * E);
    r.bias = route_doubles(E);
    r.padding = (uint8_t *)t_host((size_t)c->tokens + 1);
    r.indices = (int32_t *)t_host((size_t)(slots + 1) * sizeof(int32_t));
    r.counts = (int32_t *)t_host((size_t)E * sizeof(int32_t));
    r.sequence_counts = (int32_t *)t_host((size_t)(B * E) * sizeof(int32_t));
    r.probs = route_doubles(slots);
    r.valid = route_doubles(B + 1);
    for (int64_t t = 0; t < c->tokens; t++) {
        r.padding[t] = c->padding == 2 || (c->padding && (t % 5 == 1 || sequence_of(c, t) == 2)) ? 1 + t % 200 : 0;
        r.valid[sequence_of(c, t)] += !r.padding[t];
        r.valid[B] += !r.padding[t];
    }
    for (int64_t i = 0; i < c->tokens * E; i++)
        r.logits[i] = r.padding[i / E] ? NAN : ref_round(c->dtype, (c->tolerance > 0.0f ? 16.0 : 4.0) * t_real());
    for (int64_t e = 0; e < E; e++) r.bias[e] = c->bias ? ref_round(GMM_F32, 0.3 * t_real()) : 0.0;
    if (c->tolerance > 0.0f) place_between_tolerances(&r);
    if (c->sinkhorn) b = sinkhorn(&r);
    for (int64_t t = 0; t < c->tokens; t++) {
        int32_t *indices = r.indices + t * c->topk;
        const int64_t sequence = sequence_of(c, t);
        double lse, top = -INFINITY;
        for (int32_t i = 0; i < c->topk && r.padding[t]; i++) indices[i] = -1;
        if (r.padding[t]) continue;
        lse = route_scores(c, r.logits + t * E, s, q);
        for (int64_t e = 0; e < E; e++) top = fmax(top, r.logits[t * E + e]);
        for (int64_t e = 0; e < E; e++) {
            v[e] = b ? b[e] * exp(r.logits[t * E + e] - top) : s[e] + r.bias[e];
            sums[sequence * E + e] += q[e];
        }
        choose(c, v, indices);
        route_probabilities(c, s, indices, r.probs + t * c->topk);
        for (int32_t i = 0; i < c->topk; i++) {
            r.counts[indices[i]]++;
            r.sequence_counts[sequence * E + indices[i]]++;
        }
        r.z_loss += z_factor(&r) * lse * lse;
    }
    for (int64_t i = 0; i < B * E; i++)
        r.aux_loss += route_aux_factor(c, r.valid[i / E]) * r.sequence_counts[i] * sums[i];
    return r;
}

/* A case with a tolerance says something of it only if the usual one chooses other experts. */
static void tolerance(int arg) {
    const reference ref = reference_of(&cases[arg]);
    const int64_t E = ref.c->experts, topk = ref.c->topk;
    route_case usual = *ref.c;
    reference r = ref;
    int32_t *indices = (int32_t *)t_host((size_t)topk * sizeof *indices), others = 0;
    double *v = route_doubles(E), *b;
    usual.tolerance = 0.0f;
    r.c = &usual;
    b = sinkhorn(&r);
    for (int64_t t = 0; t < usual.tokens; t++) {
        for (int64_t e = 0; e < E; e++) v[e] = b[e] * exp(ref.logits[t * E + e]);
        choose(&usual, v, indices);
        others += memcmp(indices, ref.indices + t * topk, (size_t)topk * sizeof *indices) != 0;
    }
    T_CHECK(others > 0, "%s: the usual tolerance gives the same routing", usual.name);
    if (T.verbose) printf("%s: %d tokens of %lld have other experts\n", usual.name, others, (long long)usual.tokens);
}

/* ----------------------------------------------------------------------------------------------------- Calls --- */

static gmm_route route_of(const reference *ref, const t_mat *logits) {
    const route_case *c = ref->c;
    const size_t bytes = (size_t)c->experts * sizeof(int64_t);
    int64_t *totals = (int64_t *)t_host(bytes);
    gmm_route r = route_scalars(c);
    t_about("%s", c->name);
    for (int32_t e = 0; e < c->experts; e++) totals[e] = 5000000000 + e;
    r.logits = logits ? &logits->mat : NULL;
    if (c->bias) r.expert_bias = t_floats_in(ref->bias, c->experts);
    if (c->padding) r.padding = (const uint8_t *)t_in(ref->padding, (size_t)c->tokens);
    route_outputs(&r);
    r.total_counts = (int64_t *)t_alloc(bytes);
    t_upload(r.total_counts, totals, bytes);
    if (route_sequences(c) > 1) r.sequence_counts = route_ints_out((int64_t)c->sequences * c->experts);
    return r;
}
static t_mat logits_of(const reference *ref) {
    const route_case *c = ref->c;
    t_mat m = t_mat_make(c->dtype, 1, c->tokens, c->experts, 3, 0, T_PACKED, T_REALS);
    memcpy(m.v, ref->logits, (size_t)(c->tokens * c->experts) * sizeof *m.v);
    t_mat_put(&m);
    return m;
}

/* ------------------------------------------------------------------------------------------ Forward, backward --- */

static void forward(int arg) {
    const route_case *c = &cases[arg];
    const int64_t E = c->experts, slots = c->tokens * c->topk, B = route_sequences(c);
    const reference ref = reference_of(c);
    const t_mat logits = logits_of(&ref);
    const gmm_route r = route_of(&ref, &logits);
    const int64_t *totals;
    route_call(T.ctx, GMM_OP_TOPK_FWD, &r);
    t_matrix(ref.indices, 1, c->tokens, c->topk, sizeof(int32_t));
    t_same("indices", t_get(r.indices, (size_t)slots * 4), ref.indices, (size_t)slots * 4);
    if (B > 1)
        t_same("sequence_counts", t_get(r.sequence_counts, (size_t)(B * E) * 4), ref.sequence_counts,
               (size_t)(B * E) * 4);
    totals = (const int64_t *)t_get(r.total_counts, (size_t)E * 8);
    for (int32_t e = 0; e < E; e++)
        T_CHECK(totals[e] == 5000000000 + e + ref.counts[e], "total %lld of expert %d", (long long)totals[e], e);
    route_check(c, &r, ref.probs, ref.counts, ref.aux_loss, ref.z_loss, 400);
}

static void backward(int arg) {
    const route_case *c = &cases[arg];
    const int64_t E = c->experts, slots = c->tokens * c->topk, total = c->tokens * E;
    const int64_t step = total > 20000 ? t_step(total, 2000, E) : 1; /* elements compared */
    const reference ref = reference_of(c);
    const t_mat logits = logits_of(&ref);
    const t_mat d = t_mat_make(c->dlogits, 1, c->tokens, E, 1, 0, T_PACKED, T_POISON);
    const double dloss[2] = {0.75, -1.25};
    double *dprobs = route_doubles(slots), *want = route_doubles(total), *bound = route_doubles(total), *got;
    route_token token = route_token_of(c);
    gmm_route r = route_of(&ref, &logits);
    for (int64_t i = 0; i < slots; i++) dprobs[i] = ref_round(GMM_F32, t_real());
    route_call(T.ctx, GMM_OP_TOPK_FWD, &r);
    r.dprobs = t_floats_in(dprobs, slots);
    r.dloss = t_floats_in(dloss, 2);
    r.dlogits = &d.mat;
    if (route_sequences(c) > 1) r.counts = NULL; /* sequence_counts are read */
    if (c->aux == 0.0f) r.counts = r.sequence_counts = NULL; /* neither is read */
    route_call(T.ctx, GMM_OP_TOPK_BWD, &r);
    got = t_mat_get(&d);
    token.z = dloss[1] * z_factor(&ref);
    for (int64_t t = 0; t < c->tokens; t++) {
        const int64_t b = sequence_of(c, t), first = t * E;
        if (ref.padding[t]) continue; /* want is 0 */
        token.logits = ref.logits + first;
        token.dprobs = dprobs + t * c->topk;
        token.indices = ref.indices + t * c->topk;
        token.counts = ref.sequence_counts + b * E;
        token.aux = dloss[0] * route_aux_factor(c, ref.valid[b]);
        route_gradient(&token, first, step, got + first, want + first, bound + first);
    }
    t_near("dlogits", got, want, bound, total);
}

/* fp64 logits give the bits of the same logits rounded to fp32; fp64 gradients are those of fp32. */
static void doubles_equal_floats(int arg) {
    const route_case *c = &cases[arg];
    const int64_t total = c->tokens * c->experts, slots = c->tokens * c->topk;
    const reference ref = reference_of(c);
    const t_mat logits = logits_of(&ref), d = t_mat_out(GMM_F32, 1, c->tokens, c->experts);
    double *wide = route_doubles(total), *got, *want;
    gmm_mat in, out;
    gmm_route r = route_of(&ref, &logits), w = route_of(&ref, NULL);
    for (int64_t i = 0; i < total; i++) wide[i] = ref.logits[i] * (1.0 + 0x1p-30 * t_real());
    in = gmm_mat_packed(GMM_F64, t_in(wide, (size_t)total * sizeof *wide));
    out = gmm_mat_packed(GMM_F64, t_alloc((size_t)total * sizeof *wide));
    w.logits = &in;
    route_call(T.ctx, GMM_OP_TOPK_FWD, &r);
    route_call(T.ctx, GMM_OP_TOPK_FWD, &w);
    t_same("indices", t_get(r.indices, (size_t)slots * 4), t_get(w.indices, (size_t)slots * 4), (size_t)slots * 4);
    t_same("probs", t_get(r.probs, (size_t)slots * 4), t_get(w.probs, (size_t)slots * 4), (size_t)slots * 4);
    t_same("aux_loss", t_get(r.aux_loss, 4), t_get(w.aux_loss, 4), 4);
    t_same("z_loss", t_get(r.z_loss, 4), t_get(w.z_loss, 4), 4);
    r.dlogits = &d.mat;
    w.dlogits = &out;
    r.dprobs = w.dprobs = r.probs;
    route_call(T.ctx, GMM_OP_TOPK_BWD, &r);
    route_call(T.ctx, GMM_OP_TOPK_BWD, &w);
    want = t_mat_get(&d);
    got = (double *)t_get(out.data, (size_t)total * sizeof *got);
    t_same("dlogits", got, want, (size_t)total * sizeof *got);
}

/* The same bits twice, on one multiprocessor, for any number of threads, and without the outputs that may be NULL. */
static void repeated(int arg) {
    const route_case *c = &cases[arg];
    const int64_t slots = c->tokens * c->topk, total = c->tokens * c->experts;
    const reference ref = reference_of(c);
    const t_mat logits = logits_of(&ref);
    const size_t sizes[5] = {(size_t)slots * 4, (size_t)slots * 4, 4, 4, (size_t)total * 4};
    const void *first[5] = {NULL};
    for (int n = 0; n < 4; n++) {
        const t_mat d = t_mat_out(GMM_F32, 1, c->tokens, c->experts);
        gmm_config config = T.config;
        gmm_options options = GMM_ZERO;
        gmm_route r = route_of(&ref, &logits), bwd;
        gmm_context *ctx = T.ctx;
        const void *got[5];
        if (n == 2) options.sm_limit = 1;
        if (n == 3 && !T.gpu) {
            config.threads = 3;
            ctx = t_context(&config);
        }
        r.options = &options;
        bwd = r;
        if (n == 1) r.total_counts = NULL;
        if (n == 1) r.offsets = NULL;
        route_call(ctx, GMM_OP_TOPK_FWD, &r);
        bwd.dprobs = r.probs;
        bwd.dlogits = &d.mat;
        route_call(ctx, GMM_OP_TOPK_BWD, &bwd);
        got[0] = r.indices;
        got[1] = r.probs;
        got[2] = r.aux_loss;
        got[3] = r.z_loss;
        got[4] = d.data;
        for (int i = 0; i < 5; i++) {
            const void *bytes = t_get(got[i], sizes[i]);
            if (n == 0) first[i] = bytes;
            else t_same("output", bytes, first[i], sizes[i]);
        }
    }
}

/* Of equal groups and experts the lower ones are chosen; NaN ranks last. */
static void ties(int arg) {
    static const route_case c = {.name = "ties", .dtype = GMM_F32, .dlogits = GMM_F32, .tokens = 3, .experts = 8,
                                 .topk = 3, .score = GMM_SCORE_SIGMOID, .groups = 4, .group_topk = 2};
    static const int32_t want[9] = {0, 1, 2, 2, 3, 6, 4, 5, 0};
    reference ref = reference_of(&c);
    t_mat logits;
    gmm_route r;
    (void)arg;
    for (int i = 0; i < 24; i++) ref.logits[i] = 0.0;
    for (int i = 0; i < 2; i++) {
        ref.logits[8 + i] = ref.logits[12 + i] = -1.0; /* token 1: groups 1 and 3 are best */
        ref.logits[16 + 2 + i] = NAN;                  /* token 2: group 2 is best, group 1 last */
        ref.logits[16 + 4 + i] = 1.0;
    }
    logits = logits_of(&ref);
    r = route_of(&ref, &logits);
    route_call(T.ctx, GMM_OP_TOPK_FWD, &r);
    t_same("indices", t_get(r.indices, sizeof want), want, sizeof want);
}

/* Without a coefficient z_loss is 0, whatever the logits. */
static void no_z_loss(int arg) {
    static const route_case c = {.name = "no z", .dtype = GMM_F32, .dlogits = GMM_F32, .tokens = 2, .experts = 4,
                                 .topk = 1};
    reference ref = reference_of(&c);
    t_mat logits;
    gmm_route r;
    (void)arg;
    for (int i = 0; i < 8; i++) ref.logits[i] = i == 2 ? 1e20 : 0.0;
    logits = logits_of(&ref);
    r = route_of(&ref, &logits);
    route_call(T.ctx, GMM_OP_TOPK_FWD, &r);
    T_CHECK(t_floats_get(r.z_loss, 1)[0] == 0.0, "%g", t_floats_get(r.z_loss, 1)[0]);
}

/* ----------------------------------------------------------------------------------------------------- Dense --- */

static gmm_dense_route dense_of(int64_t tokens, int32_t experts, int32_t topk) {
    gmm_dense_route d = GMM_ZERO;
    t_about("%lld tokens, %d experts, topk %d", (long long)tokens, experts, topk);
    d.experts = experts;
    d.tokens = tokens;
    d.topk = topk;
    return d;
}

/* Slots to dense matrices, with dropped slots and an expert chosen twice, and back without a map: the sums at the
   indices. */
static void to_dense(int experts) {
    enum { TOKENS = 45, TOPK = 5 };
    const size_t elements = (size_t)(TOKENS * experts);
    int32_t indices[TOKENS * TOPK];
    double probs[TOKENS * TOPK], *want = route_doubles(TOKENS * experts), *bound = route_doubles(TOKENS * experts);
    double back[TOKENS * TOPK];
    uint8_t *map = (uint8_t *)t_host(elements);
    gmm_dense_route d = dense_of(TOKENS, experts, TOPK);
    for (int i = 0; i < TOKENS * TOPK; i++) {
        indices[i] = (int32_t)t_int(-1, experts);
        probs[i] = ref_round(GMM_F32, t_real());
        if (indices[i] < 0 || indices[i] >= experts) continue;
        map[i / TOPK * experts + indices[i]] = 1;
        want[i / TOPK * experts + indices[i]] += probs[i];
    }
    for (size_t i = 0; i < elements; i++) bound[i] = 8 * 0x1p-24;
    d.indices = (int32_t *)t_in(indices, sizeof indices);
    d.probs = t_floats_in(probs, TOKENS * TOPK);
    d.map = (uint8_t *)t_alloc(elements);
    d.values = t_floats_out(TOKENS * experts);
    T_OK(gmm_route_to_dense(T.ctx, &d, T.stream));
    t_same("map", t_get(d.map, elements), map, elements);
    t_near("values", t_floats_get(d.values, TOKENS * experts), want, bound, TOKENS * experts);
    for (int i = 0; i < TOKENS * TOPK; i++)
        back[i] = indices[i] < 0 || indices[i] >= experts
                      ? 0.0 : t_floats_get(d.values, TOKENS * experts)[i / TOPK * experts + indices[i]];
    d.map = NULL;
    d.probs = t_floats_out(TOKENS * TOPK);
    T_OK(gmm_route_from_dense(T.ctx, &d, T.stream));
    t_exact("probs", GMM_F32, t_floats_get(d.probs, TOKENS * TOPK), back, TOKENS * TOPK);
    d.probs = d.values = NULL;
    d.map = (uint8_t *)t_alloc(elements);
    T_OK(gmm_route_to_dense(T.ctx, &d, T.stream));
    t_same("map alone", t_get(d.map, elements), map, elements);
}

/* A map of rows with none to all experts: indices rise, -1 fills up, no more than topk are taken. */
static void from_dense(int experts) {
    enum { TOKENS = 61, TOPK = 6 };
    const size_t elements = (size_t)(TOKENS * experts);
    uint8_t *map = (uint8_t *)t_host(elements);
    double *values = route_doubles(TOKENS * experts), probs[TOKENS * TOPK];
    int32_t want[TOKENS * TOPK], *counts = (int32_t *)t_host((size_t)experts * 4);
    gmm_dense_route d = dense_of(TOKENS, experts, TOPK);
    for (int t = 0; t < TOKENS; t++) {
        int n = 0;
        for (int e = 0; e < experts; e++) {
            values[t * experts + e] = ref_round(GMM_F32, t_real());
            map[t * experts + e] = (uint8_t)(t_int(0, 59) < t ? t_int(1, 255) : 0);
            if (!map[t * experts + e] || n == TOPK) continue;
            want[t * TOPK + n] = e;
            probs[t * TOPK + n++] = values[t * experts + e];
            counts[e]++;
        }
        for (; n < TOPK; n++) {
            want[t * TOPK + n] = -1;
            probs[t * TOPK + n] = 0.0;
        }
    }
    d.map = (uint8_t *)t_in(map, elements);
    d.values = t_floats_in(values, TOKENS * experts);
    d.indices = route_ints_out(TOKENS * TOPK);
    d.probs = t_floats_out(TOKENS * TOPK);
    d.counts = route_ints_out(experts);
    d.offsets = route_ints_out(experts + 1);
    T_OK(gmm_route_from_dense(T.ctx, &d, T.stream));
    t_matrix(want, 1, TOKENS, TOPK, sizeof *want);
    t_same("indices", t_get(d.indices, sizeof want), want, sizeof want);
    t_exact("probs", GMM_F32, t_floats_get(d.probs, TOKENS * TOPK), probs, TOKENS * TOPK);
    route_check_counts(d.counts, d.offsets, counts, experts);
    d.tokens = 0;
    T_OK(gmm_route_from_dense(T.ctx, &d, T.stream));
    t_bytes("counts without tokens", t_get(d.counts, (size_t)experts * 4), 0, (size_t)experts * 4);
}

/* A router's choice by way of the dense matrices, as a permutation of the same rows needs it. */
static void round_trip(int arg) {
    const route_case *c = &cases[arg];
    const int64_t slots = c->tokens * c->topk, total = c->tokens * c->experts;
    const reference ref = reference_of(c);
    const t_mat logits = logits_of(&ref);
    const gmm_route r = route_of(&ref, &logits);
    gmm_dense_route d = dense_of(c->tokens, c->experts, c->topk), back;
    int32_t *got;
    double *probs, *values;
    route_call(T.ctx, GMM_OP_TOPK_FWD, &r);
    d.indices = r.indices;
    d.probs = r.probs;
    d.map = (uint8_t *)t_alloc((size_t)total);
    d.values = t_floats_out(total);
    T_OK(gmm_route_to_dense(T.ctx, &d, T.stream));
    back = d;
    back.indices = route_ints_out(slots);
    back.probs = t_floats_out(slots);
    back.counts = route_ints_out(c->experts);
    T_OK(gmm_route_from_dense(T.ctx, &back, T.stream));
    t_same("counts", t_get(back.counts, (size_t)c->experts * 4), t_get(r.counts, (size_t)c->experts * 4),
           (size_t)c->experts * 4);
    got = (int32_t *)t_get(back.indices, (size_t)slots * 4);
    probs = t_floats_get(back.probs, slots);
    values = t_floats_get(d.values, total);
    for (int64_t i = 0; i < slots; i++) {
        const int64_t t = i / c->topk;
        T_CHECK(got[i] < 0 ? ref.padding[t] != 0 : i % c->topk == 0 || got[i] > got[i - 1], "slot %lld: expert %d",
                (long long)i, got[i]);
        T_CHECK(probs[i] == (got[i] < 0 ? 0.0 : values[t * c->experts + got[i]]), "slot %lld: %g", (long long)i,
                probs[i]);
    }
}

/* ----------------------------------------------------------------------------------------------- Expert bias --- */

static void expert_bias(int experts) {
    enum { LAYERS = 3 };
    const gmm_options options = { .sm_limit = experts % 2 }; /* fewer multiprocessors than layers */
    const int n = LAYERS * experts;
    int64_t *counts = (int64_t *)t_host((size_t)n * sizeof *counts);
    double *bias = route_doubles(n), *want = route_doubles(n);
    gmm_expert_bias u = GMM_ZERO;
    for (int l = 0; l < LAYERS; l++) {
        int64_t sum = 0;
        for (int e = 0; e < experts; e++) {
            counts[l * experts + e] = l == 1 ? (int64_t)1 << 40 : t_int(0, 3) + (l == 2) * ((int64_t)1 << 33);
            bias[l * experts + e] = ref_round(GMM_F32, t_real());
            sum += counts[l * experts + e];
        }
        for (int e = 0; e < experts; e++) {
            const int64_t below = sum - experts * counts[l * experts + e];
            const double step = below == 0 ? 0.0 : below > 0 ? 1.0 : -1.0;
            want[l * experts + e] = ref_round(GMM_F32, bias[l * experts + e] + step * (double)0.001f);
        }
    }
    u.experts = experts;
    u.layers = LAYERS;
    u.rate = 0.001f;
    u.options = &options;
    u.total_counts = (int64_t *)t_alloc((size_t)n * 8);
    t_upload(u.total_counts, counts, (size_t)n * 8);
    u.bias = t_floats_out(n);
    {
        float *values = (float *)t_host((size_t)n * 4);
        for (int i = 0; i < n; i++) values[i] = (float)bias[i];
        t_upload(u.bias, values, (size_t)n * 4);
    }
    T_OK(gmm_update_expert_bias(T.ctx, &u, T.stream));
    t_exact("bias", GMM_F32, t_floats_get(u.bias, n), want, n);
    t_bytes("total_counts", t_get(u.total_counts, (size_t)n * 8), 0, (size_t)n * 8);
    T_OK(gmm_update_expert_bias(T.ctx, &u, T.stream)); /* no counts: all are at the mean */
    t_exact("bias", GMM_F32, t_floats_get(u.bias, n), want, n);
}

/* ----------------------------------------------------------------------------------------------------- Graph --- */

#ifdef HAVE_CUDA
/* A graph of all of it reads new logits and padding at each replay. */
static void graph(int arg) {
    const route_case *c = &cases[arg];
    const int64_t slots = c->tokens * c->topk;
    const reference ref = reference_of(c), other = reference_of(c);
    t_mat logits = logits_of(&ref);
    gmm_route r = route_of(&ref, &logits);
    gmm_info info = GMM_ZERO;
    gmm_expert_bias u = GMM_ZERO;
    void *workspace, *captured = NULL;
    const char *error;
    gmm_status s;
    float bias[64] = {0};
    route_call(T.ctx, GMM_OP_TOPK_FWD, &r); /* loads the code */
    u.experts = c->experts;
    u.rate = 1.0f;
    u.total_counts = r.total_counts;
    u.bias = t_floats_out(c->experts);
    t_upload(u.bias, bias, (size_t)c->experts * 4);
    T_OK(gmm_update_expert_bias(T.ctx, &u, T.stream));
    T_OK(gmm_topk_query(T.ctx, GMM_OP_TOPK_FWD, &r, &info));
    workspace = t_workspace(info.workspace_bytes);
    error = device_begin_capture();
    T_CHECK(!error, "%s", error);
    s = gmm_topk_fwd(T.ctx, &r, workspace, info.workspace_bytes, T.stream);
    if (s == GMM_OK) s = gmm_update_expert_bias(T.ctx, &u, T.stream);
    error = device_end_capture(&captured);
    T_CHECK(!error && s == GMM_OK, "%s %s", error ? error : "", gmm_last_error(T.ctx));
    for (int i = 0; i < 3; i++) {
        const reference *now = i % 2 ? &ref : &other;
        memcpy(logits.v, now->logits, (size_t)(c->tokens * c->experts) * sizeof *logits.v);
        t_mat_put(&logits);
        error = device_replay(captured);
        T_CHECK(!error, "%s", error);
        t_wait();
        t_same("indices", t_get(r.indices, (size_t)slots * 4), now->indices, (size_t)slots * 4);
        t_bytes("total_counts", t_get(r.total_counts, (size_t)c->experts * 8), 0, (size_t)c->experts * 8);
    }
    device_graph_free(captured);
}
#endif

/* ---------------------------------------------------------------------------------------------------- Errors --- */

static void route_errors(int arg) {
    static const route_case c = {.name = "errors", .dtype = GMM_F32, .dlogits = GMM_F32, .tokens = 6, .experts = 12,
                                  .topk = 4, .score = GMM_SCORE_SIGMOID, .normalize = 1, .bias = 1, .aux = 1, .z = 1,
                                  .groups = 4, .group_topk = 2, .sequences = 3, .padding = 1};
    const gmm_op op = arg ? GMM_OP_TOPK_BWD : GMM_OP_TOPK_FWD;
    const reference ref = reference_of(&c);
    const t_mat logits = logits_of(&ref), d = t_mat_out(GMM_F32, 1, c.tokens, c.experts);
    gmm_route good = route_of(&ref, &logits), r;
    gmm_info info = GMM_ZERO;
    void *workspace;
    good.dlogits = &d.mat;
    T_OK(gmm_topk_query(T.ctx, op, &good, &info));
    workspace = t_workspace(info.workspace_bytes);
#define RUN (arg ? gmm_topk_bwd : gmm_topk_fwd)
#define REFUSED(status, ...) \
    do { \
        T_REFUSED(status, RUN(T.ctx, &r, workspace, info.workspace_bytes, T.stream), ": route.", __VA_ARGS__, NULL); \
        r = good; \
    } while (0)
    r = good;
    r.groups = 5; REFUSED(GMM_E_ARG, "route.groups", "5", "12 experts");
    r.groups = -1; REFUSED(GMM_E_ARG, "route.groups", "-1");
    r.groups = 0; REFUSED(GMM_E_CONFIG, "group_topk", "2", "groups 0");
    r.groups = r.group_topk = 0; r.group_sum = 1; REFUSED(GMM_E_CONFIG, "group_sum", "1");
    r.group_topk = 0; REFUSED(GMM_E_ARG, "group_topk", "0", "4 groups");
    r.group_topk = 5; REFUSED(GMM_E_ARG, "group_topk", "5");
    r.group_topk = 1; REFUSED(GMM_E_ARG, "group_topk", "3 experts", "topk 4");
    r.group_sum = 4; REFUSED(GMM_E_ARG, "group_sum", "4", "3 experts");
    r.group_sum = -1; REFUSED(GMM_E_ARG, "group_sum", "-1");
    r.topk = 1; REFUSED(GMM_E_ARG, "group_sum", "topk 1", "group_topk 2");
    r.sinkhorn = -1; REFUSED(GMM_E_ARG, "sinkhorn", "-1");
    r.sinkhorn = 3; REFUSED(GMM_E_CONFIG, "sinkhorn", "expert_bias");
    r.sinkhorn_tolerance = NAN; REFUSED(GMM_E_ARG, "sinkhorn_tolerance", "nan");
    r.sinkhorn_tolerance = -1.0f; REFUSED(GMM_E_ARG, "sinkhorn_tolerance", "-1");
    r.sequences = 4; REFUSED(GMM_E_ARG, "sequences", "4", "6 tokens");
    r.sequences = -1; REFUSED(GMM_E_ARG, "sequences", "-1");
    r.sequences = 0; REFUSED(GMM_E_CONFIG, "sequence_counts");
    r.sequence_first = 2; REFUSED(GMM_E_ARG, "sequence_first", "2");
    r.reserved = 1; REFUSED(GMM_E_ARG, "reserved", "1");
    r.sequence_counts = (int32_t *)(void *)((char *)good.sequence_counts + 2); REFUSED(GMM_E_ALIGN, "sequence_counts");
    if (arg) {
        r.sequence_counts = NULL; REFUSED(GMM_E_NULL, "sequence_counts", "36 values");
    } else {
        r.total_counts = (int64_t *)(void *)((char *)good.total_counts + 4);
        REFUSED(GMM_E_ALIGN, "total_counts", "8 bytes");
        r.sequence_counts = good.counts; REFUSED(GMM_E_ARG, "sequence_counts", "overlaps");
        r.padding = (const uint8_t *)good.indices; REFUSED(GMM_E_ARG, "indices", "overlaps", "padding");
    }
#undef REFUSED
#undef RUN
    route_call(T.ctx, GMM_OP_TOPK_FWD, &good);
}

static void other_errors(int arg) {
    gmm_dense_route good = dense_of(6, 4, 2), d;
    gmm_expert_bias u = GMM_ZERO, v;
    (void)arg;
    good.indices = route_ints_out(12);
    t_upload(good.indices, (const int32_t[12]){0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3}, 48);
    good.probs = t_floats_out(12);
    good.map = (uint8_t *)t_alloc(24);
    good.values = t_floats_out(24);
#define REFUSED(function, status, ...) \
    do { \
        T_REFUSED(status, function(T.ctx, &d, T.stream), #function ": dense", __VA_ARGS__, NULL); \
        d = good; \
    } while (0)
    d = good;
    d.experts = 0; REFUSED(gmm_route_to_dense, GMM_E_ARG, "experts", "0");
    d.tokens = -1; REFUSED(gmm_route_to_dense, GMM_E_ARG, "tokens", "-1");
    d.topk = 0; REFUSED(gmm_route_from_dense, GMM_E_ARG, "topk", "0");
    d.tokens = (int64_t)1 << 31; REFUSED(gmm_route_from_dense, GMM_E_ARG, "tokens", "2^31");
    d.reserved = 1; REFUSED(gmm_route_to_dense, GMM_E_ARG, "reserved", "1");
    d.struct_size = sizeof d + 8; REFUSED(gmm_route_to_dense, GMM_E_VERSION, "struct_size");
    d.values = NULL; REFUSED(gmm_route_to_dense, GMM_E_CONFIG, "probs", "without values");
    d.probs = NULL; REFUSED(gmm_route_from_dense, GMM_E_CONFIG, "values", "without probs");
    d.indices = NULL; REFUSED(gmm_route_from_dense, GMM_E_NULL, "indices", "12 values");
    d.map = NULL; d.values = d.probs = NULL; REFUSED(gmm_route_to_dense, GMM_E_NULL, "map is NULL", "nothing is asked");
    d.map = NULL; d.values = d.probs = NULL; REFUSED(gmm_route_from_dense, GMM_E_NULL, "map is NULL", "values");
    d.counts = route_ints_out(4); REFUSED(gmm_route_to_dense, GMM_E_CONFIG, "counts", "counts nothing");
    d.offsets = route_ints_out(5); REFUSED(gmm_route_from_dense, GMM_E_CONFIG, "offsets", "without counts");
    d.map = NULL; d.counts = route_ints_out(4); REFUSED(gmm_route_from_dense, GMM_E_CONFIG, "counts", "without map");
    d.values = (float *)(void *)((char *)good.values + 2); REFUSED(gmm_route_to_dense, GMM_E_ALIGN, "values");
    d.map = (uint8_t *)good.probs; REFUSED(gmm_route_to_dense, GMM_E_ARG, "overlaps");
    T_REFUSED(GMM_E_NULL, gmm_route_to_dense(T.ctx, NULL, T.stream), "gmm_route_to_dense", "dense", NULL);
    T_CHECK(gmm_route_to_dense(NULL, &d, T.stream) == GMM_E_NULL, "no context");
    T_OK(gmm_route_to_dense(T.ctx, &d, T.stream));
#undef REFUSED
#define REFUSED(status, ...) \
    do { \
        T_REFUSED(status, gmm_update_expert_bias(T.ctx, &v, T.stream), "gmm_update_expert_bias: update", __VA_ARGS__, \
                  NULL); \
        v = u; \
    } while (0)
    u.experts = 4;
    u.total_counts = (int64_t *)t_alloc(32);
    t_poison(u.total_counts, 0, 32);
    u.bias = t_floats_out(4);
    v = u;
    v.experts = 0; REFUSED(GMM_E_ARG, "experts", "0");
    v.layers = -1; REFUSED(GMM_E_ARG, "layers", "-1");
    v.rate = NAN; REFUSED(GMM_E_ARG, "rate", "nan");
    v.rate = -1.0f; REFUSED(GMM_E_ARG, "rate", "-1");
    v.bias = NULL; REFUSED(GMM_E_NULL, "bias", "4 values");
    v.total_counts = NULL; REFUSED(GMM_E_NULL, "total_counts");
    v.total_counts = (int64_t *)(void *)((char *)u.total_counts + 4); REFUSED(GMM_E_ALIGN, "total_counts");
    v.bias = (float *)(void *)u.total_counts; REFUSED(GMM_E_ARG, "overlaps");
    T_OK(gmm_update_expert_bias(T.ctx, &v, T.stream));
#undef REFUSED
}

/* As many groups as a route can have, and as many chosen: their sum needs more than 32 bits. */
static void most_groups(int arg) {
    const gmm_mat logits = gmm_mat_packed(GMM_F32, NULL);
    gmm_info info[2] = { GMM_ZERO, GMM_ZERO };
    gmm_route r = GMM_ZERO;
    (void)arg;
    r.experts = r.groups = 1 << 30;
    r.tokens = r.topk = r.group_sum = 1;
    r.logits = &logits;
    for (int k = 0; k < 2; k++) {
        r.group_topk = k ? r.groups : 1;
        const gmm_status s = gmm_topk_query(T.ctx, GMM_OP_TOPK_FWD, &r, &info[k]);
        if (s != GMM_OK && T.engine != GMM_ENGINE_CPU) return; /* a GPU takes fewer */
        T_OK(s);
    }
    if (T.engine == GMM_ENGINE_CPU) /* whose workspace has a number for each chosen group */
        T_CHECK(info[1].workspace_bytes > info[0].workspace_bytes, "%llu bytes, and %llu with more groups",
                (unsigned long long)info[0].workspace_bytes, (unsigned long long)info[1].workspace_bytes);
}

/* Dense routings and biases of so many experts as are drawn. */
static void drawn(int arg) {
    const int experts = (int)t_draw_size(70, 300), which = (int)t_int(0, 2);
    (void)arg;
    if (which == 0) to_dense(experts);
    else if (which == 1) from_dense(experts);
    else expert_bias(experts);
}

void tests_router(void) {
    t_add(drawn, 0, "router drawn at random");
    t_random(2);
    for (int i = 0; i < (int)T_COUNT(cases); i++) {
        t_add(forward, i, "router fwd %s", cases[i].name);
        t_add(backward, i, "router bwd %s", cases[i].name);
        t_add(repeated, i, "router repeated %s", cases[i].name);
        if (cases[i].dtype == GMM_F32) t_add(doubles_equal_floats, i, "router fp64 logits %s", cases[i].name);
        t_add(round_trip, i, "router dense round trip %s", cases[i].name);
        if (cases[i].tolerance > 0.0f) t_add_host(tolerance, i, "router tolerance of %s", cases[i].name);
    }
    t_add(ties, 0, "router ties and NaN in groups");
    t_add(most_groups, 0, "router workspace of most groups");
    t_add(no_z_loss, 0, "router z_loss without a coefficient");
    for (int i = 1; i <= 70; i += 23) {
        t_add(to_dense, i, "router to dense E%d", i);
        t_add(from_dense, i, "router from dense E%d", i);
        t_add(expert_bias, i, "router expert bias E%d", i);
    }
    t_add(route_errors, 0, "router fwd errors");
    t_add(route_errors, 1, "router bwd errors");
    t_add(other_errors, 0, "router dense and bias errors");
#ifdef HAVE_CUDA
    t_add_gpu(graph, (int)T_COUNT(cases) - 1, "router in a graph, %s", cases[T_COUNT(cases) - 1].name);
    t_add_gpu(graph, 6, "router in a graph, %s", cases[6].name);
#endif
}
