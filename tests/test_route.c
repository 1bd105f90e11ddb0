/* test_route.c - top-k routing against fp64 references: choice, probabilities, counts, losses, gradients */
#include "route_case.h"

#include <math.h>
#include <string.h>

static const route_case cases[] = {
    {GMM_F32, GMM_F32, 100, 8, 2, GMM_SCORE_SOFTMAX, 0, 0, 0.0f, 0.0f, 0.0f, .pad = 0},
    {GMM_F32, GMM_F32, 100, 8, 2, GMM_SCORE_SOFTMAX, 1, 0, 0.0f, 0.01f, 0.001f, .pad = 3},
    {GMM_F32, GMM_F32, 100, 8, 2, GMM_SCORE_SIGMOID, 0, 0, 0.0f, 0.01f, 0.0f, .pad = 0},
    {GMM_F32, GMM_F32, 100, 8, 2, GMM_SCORE_SIGMOID, 1, 1, 2.5f, 0.5f, 0.25f, .pad = 1},
    {GMM_F32, GMM_BF16, 37, 64, 8, GMM_SCORE_SIGMOID, 1, 1, 1.0f, 1.0f, 0.0f, .pad = 0},
    {GMM_BF16, GMM_F32, 37, 64, 8, GMM_SCORE_SOFTMAX, 1, 1, -0.5f, 1.0f, 1.0f, .pad = 0},
    {GMM_BF16, GMM_BF16, 40, 17, 17, GMM_SCORE_SOFTMAX, 0, 0, 0.0f, 0.1f, 0.0f, .pad = 5},
    {GMM_F16, GMM_F16, 40, 5, 4, GMM_SCORE_SIGMOID, 0, 1, 0.0f, 0.0f, 1e-3f, .pad = 0},
    {GMM_F16, GMM_F32, 16, 128, 6, GMM_SCORE_SOFTMAX, 1, 0, 16.0f, 0.001f, 0.0f, .pad = 0},
    {GMM_F32, GMM_F32, 1, 1, 1, GMM_SCORE_SOFTMAX, 1, 0, 0.0f, 1.0f, 1.0f, .pad = 0},
    {GMM_F32, GMM_F32, 17, 1, 1, GMM_SCORE_SIGMOID, 0, 0, 0.0f, 1.0f, 1.0f, .pad = 0},
    {GMM_F32, GMM_F32, 3, 300, 300, GMM_SCORE_SOFTMAX, 0, 1, 0.0f, 1.0f, 1.0f, .pad = 0},
    {GMM_F32, GMM_F32, 2, 1500, 3, GMM_SCORE_SIGMOID, 1, 0, 0.0f, 1.0f, 1.0f, .pad = 0},
    {GMM_F32, GMM_F32, 4111, 16, 4, GMM_SCORE_SOFTMAX, 1, 0, 0.0f, 1.0f, 1.0f, .pad = 0},
    {GMM_BF16, GMM_BF16, 1500, 40, 3, GMM_SCORE_SOFTMAX, 0, 1, 0.0f, 0.0f, 0.0f, .pad = 0},
    {GMM_BF16, GMM_F32, 24, 128, 50, GMM_SCORE_SIGMOID, 1, 0, 1.5f, 0.0f, 0.0f, .pad = 2},
};

/* A row of the table; -1: the case that was drawn. */
static _Thread_local route_case drawn_case;
static const route_case *case_of(int arg) { return arg < 0 ? &drawn_case : &cases[arg]; }

/* ----------------------------------------------------------------------------------------------------- Calls --- */

static gmm_route route_of(const route_case *c) {
    t_about("%s, %lld tokens, %d experts, topk %d, %s, normalize %d, scale %g", gmm_dtype_name(c->dtype),
            (long long)c->tokens, (int)c->experts, (int)c->topk,
            c->score == GMM_SCORE_SIGMOID ? "sigmoid" : "softmax", (int)c->normalize, (double)c->scale);
    return route_scalars(c);
}

static int32_t *ints_get(const int32_t *device, int64_t n) {
    return (int32_t *)t_get(device, (size_t)n * sizeof(int32_t));
}

static t_mat logits_of(const route_case *c, double size) {
    t_mat m = t_mat_make(c->dtype, 1, c->tokens, c->experts, c->pad, 0, T_PACKED, T_REALS);
    for (int64_t i = 0; i < c->tokens * c->experts; i++) m.v[i] = ref_round(c->dtype, size * t_real());
    t_mat_put(&m);
    return m;
}

static double *reals(int64_t n, double size) {
    double *v = (double *)t_host((size_t)n * sizeof *v);
    for (int64_t i = 0; i < n; i++) v[i] = ref_round(GMM_F32, size * t_real());
    return v;
}

/* --------------------------------------------------------------------------------------------------- Forward --- */

static void forward(int arg) {
    const route_case *c = case_of(arg);
    const int64_t slots = c->tokens * c->topk;
    const t_mat logits = logits_of(c, 8.0);
    const double *bias = reals(c->experts, 0.5);
    double *s = route_doubles(c->experts), *q = route_doubles(c->experts), *sums = route_doubles(c->experts);
    double *want = route_doubles(slots), aux = 0.0, z = 0.0;
    int32_t *counts = (int32_t *)t_host((size_t)c->experts * sizeof *counts);
    const int32_t *indices;
    gmm_route r = route_of(c);
    r.logits = &logits.mat;
    if (c->bias) r.expert_bias = t_floats_in(bias, c->experts);
    route_outputs(&r);
    route_call(T.ctx, GMM_OP_TOPK_FWD, &r);
    indices = ints_get(r.indices, slots);

    for (int64_t t = 0; t < c->tokens; t++) {
        const int32_t *chosen = indices + t * c->topk;
        unsigned char *taken = (unsigned char *)t_host((size_t)c->experts);
        const double lse = route_scores(c, logits.v + t * c->experts, s, q), close = route_relative(c);
        double last = INFINITY;
        for (int32_t i = 0; i < c->topk; i++) { /* in descending order, unless the values are equal in fp32 */
            double value;
            T_CHECK(chosen[i] >= 0 && chosen[i] < c->experts && !taken[chosen[i]], "token %lld slot %d: expert %d",
                    (long long)t, i, chosen[i]);
            taken[chosen[i]] = 1;
            value = s[chosen[i]] + (c->bias ? bias[chosen[i]] : 0.0);
            T_CHECK(value <= last + close, "token %lld slot %d: %g after %g", (long long)t, i, value, last);
            last = value;
            counts[chosen[i]]++;
        }
        for (int32_t e = 0; e < c->experts; e++) {
            const double value = s[e] + (c->bias ? bias[e] : 0.0);
            T_CHECK(taken[e] || value <= last + close, "token %lld: %g of expert %d beats the last chosen, %g",
                    (long long)t, value, e, last);
            sums[e] += q[e];
        }
        route_probabilities(c, s, chosen, want + t * c->topk);
        z += lse * lse;
    }
    for (int32_t e = 0; e < c->experts; e++) aux += route_aux_factor(c, (double)c->tokens) * counts[e] * sums[e];
    z *= route_z_factor(c, (double)c->tokens);
    route_check(c, &r, want, counts, aux, z, 32); /* sums over tokens: chunks of at most 17 tokens here */
    (void)t_mat_get(&logits);
}

/* -------------------------------------------------------------------------------------------------- Backward --- */

static void backward(int arg) {
    const route_case *c = case_of(arg);
    const int64_t slots = c->tokens * c->topk, total = c->tokens * c->experts;
    const int64_t step = c->tokens > 200 ? 97 : 1; /* tokens compared */
    const t_mat logits = logits_of(c, 4.0);
    const double *bias = reals(c->experts, 0.5), *dprobs = reals(slots, 1.0), dloss[2] = {0.75, -1.25};
    const t_mat dlogits = t_mat_make(c->dlogits, 1, c->tokens, c->experts, c->pad, 0, T_PACKED, T_POISON);
    double *want = route_doubles(total), *bound = route_doubles(total), *got;
    route_token token = route_token_of(c);
    const int32_t *indices;
    gmm_route r = route_of(c);
    r.logits = &logits.mat;
    if (c->bias) r.expert_bias = t_floats_in(bias, c->experts);
    route_outputs(&r);
    route_call(T.ctx, GMM_OP_TOPK_FWD, &r);
    indices = ints_get(r.indices, slots);
    token.counts = ints_get(r.counts, c->experts);
    token.aux = dloss[0] * route_aux_factor(c, (double)c->tokens);
    token.z = dloss[1] * route_z_factor(c, (double)c->tokens);
    r.dprobs = t_floats_in(dprobs, slots);
    r.dloss = t_floats_in(dloss, 2);
    r.dlogits = &dlogits.mat;
    route_call(T.ctx, GMM_OP_TOPK_BWD, &r);
    got = t_mat_get(&dlogits);

    for (int64_t t = 0; t < c->tokens; t++) {
        const int64_t first = t * c->experts;
        if (t % step) {
            for (int64_t i = first; i < first + c->experts; i++)
                want[i] = isfinite(got[i]) ? got[i] : 0.0; /* not compared, but written */
            continue;
        }
        token.logits = logits.v + first;
        token.dprobs = dprobs + t * c->topk;
        token.indices = indices + t * c->topk;
        route_gradient(&token, 0, 1, got + first, want + first, bound + first);
    }
    t_near("dlogits", got, want, bound, total);
}

/* The gradient of all inputs is the sum of the gradients of each alone; NULL means zeros for gradients and ones for
   losses. */
static void backward_parts(int arg) {
    const route_case c = {GMM_F32, GMM_F32, 19, 12, 3, (gmm_score)arg, 1, 0, 0.0f, 0.5f, 0.25f, .pad = 0};
    const int64_t slots = c.tokens * c.topk, total = c.tokens * c.experts;
    const t_mat logits = logits_of(&c, 3.0);
    const double *dprobs = reals(slots, 1.0), ones[2] = {1.0, 1.0};
    double *part[4], *sum = route_doubles(total), *bound = route_doubles(total), *none = route_doubles(total);
    t_mat d = t_mat_out(GMM_F32, 1, c.tokens, c.experts);
    gmm_route r = route_of(&c);
    r.logits = &logits.mat;
    route_outputs(&r);
    route_call(T.ctx, GMM_OP_TOPK_FWD, &r);
    r.dlogits = &d.mat;
    for (int i = 0; i < 4; i++) { /* all, probs, aux, z */
        gmm_route one = r;
        one.dprobs = i < 2 ? t_floats_in(dprobs, slots) : NULL;
        one.indices = i < 2 ? r.indices : NULL;
        one.aux_coeff = i == 0 || i == 2 ? r.aux_coeff : 0.0f;
        one.counts = i == 0 || i == 2 ? r.counts : NULL;
        one.z_coeff = i == 0 || i == 3 ? r.z_coeff : 0.0f;
        t_mat_poison(&d);
        route_call(T.ctx, GMM_OP_TOPK_BWD, &one);
        part[i] = t_mat_get(&d);
        one.dloss = t_floats_in(ones, 2);
        t_mat_poison(&d);
        route_call(T.ctx, GMM_OP_TOPK_BWD, &one);
        t_same("dloss of ones", part[i], t_mat_get(&d), (size_t)total * sizeof(double));
    }
    for (int64_t i = 0; i < total; i++) {
        sum[i] = part[1][i] + part[2][i] + part[3][i];
        bound[i] = 32 * 0x1p-24 * (fabs(part[1][i]) + fabs(part[2][i]) + fabs(part[3][i]) + 1.0);
    }
    t_near("sum of the parts", part[0], sum, bound, total);
    r.aux_coeff = r.z_coeff = 0.0f;
    r.indices = r.counts = NULL;
    t_mat_poison(&d);
    route_call(T.ctx, GMM_OP_TOPK_BWD, &r);
    t_exact("no gradient", GMM_F32, t_mat_get(&d), none, total);
}

/* Indices out of range are ignored. */
static void backward_wild(int arg) {
    const route_case c = {GMM_F32, GMM_F32, 5, 6, 3, (gmm_score)arg, 0, 0, 0.0f, 0.0f, 0.0f, .pad = 0};
    const t_mat logits = logits_of(&c, 3.0);
    const t_mat d = t_mat_out(GMM_F32, 1, c.tokens, c.experts);
    int32_t wild[15], tame[15];
    double g[15], *got, *want;
    gmm_route r = route_of(&c);
    for (int i = 0; i < 15; i++) {
        static const int32_t bad[3] = {6, -1, INT32_MIN};
        tame[i] = i % 3;
        wild[i] = i % 3 == 1 ? bad[i / 3 % 3] : i % 3;
        g[i] = i % 3 == 1 ? 0.0 : ref_round(GMM_F32, t_real());
    }
    r.logits = &logits.mat;
    r.dlogits = &d.mat;
    r.indices = (int32_t *)t_in(tame, sizeof tame);
    r.dprobs = t_floats_in(g, 15);
    route_call(T.ctx, GMM_OP_TOPK_BWD, &r);
    want = t_mat_get(&d);
    r.indices = (int32_t *)t_in(wild, sizeof wild);
    route_call(T.ctx, GMM_OP_TOPK_BWD, &r);
    got = t_mat_get(&d);
    t_exact("dlogits", GMM_F32, got, want, c.tokens * c.experts);
}

/* Slots of the same expert add up. */
static void backward_twice(int arg) {
    const route_case c = {GMM_F32, GMM_F32, 7, 45, 40, (gmm_score)arg, 0, 0, 0.0f, 0.0f, 0.0f, .pad = 0};
    const int64_t slots = c.tokens * c.topk, total = c.tokens * c.experts;
    const t_mat logits = logits_of(&c, 3.0);
    const t_mat d = t_mat_out(GMM_F32, 1, c.tokens, c.experts);
    int32_t *many = (int32_t *)t_host((size_t)slots * sizeof *many), *once = (int32_t *)t_host((size_t)slots * 4);
    double *g = route_doubles(slots), *sums = route_doubles(slots), *bound = route_doubles(total), *want;
    gmm_route r = route_of(&c);
    for (int64_t i = 0; i < slots; i++) {
        const int64_t slot = i % c.topk; /* slots 0 to 4 have experts 0, 9, ..., and so have the others */
        many[i] = (int32_t)(slot % 5 * 9);
        once[i] = slot < 5 ? many[i] : -1;
        g[i] = (double)t_int(-8, 8) / 8.0;
        sums[i - slot + slot % 5] += g[i];
    }
    for (int64_t i = 0; i < total; i++) bound[i] = 64 * 0x1p-24 * 40.0;
    r.logits = &logits.mat;
    r.dlogits = &d.mat;
    r.indices = (int32_t *)t_in(once, (size_t)slots * 4);
    r.dprobs = t_floats_in(sums, slots);
    route_call(T.ctx, GMM_OP_TOPK_BWD, &r);
    want = t_mat_get(&d);
    r.indices = (int32_t *)t_in(many, (size_t)slots * 4);
    r.dprobs = t_floats_in(g, slots);
    t_mat_poison(&d);
    route_call(T.ctx, GMM_OP_TOPK_BWD, &r);
    t_near("dlogits", t_mat_get(&d), want, bound, total);
}

/* -------------------------------------------------------------------------------------------- Order and ties --- */

/* Few distinct values: ties are resolved by the lower index. Some logits are NaN or infinite; with sigmoid they do not
   affect other experts. */
static void ties(int arg) {
    const int32_t experts = 1 + arg;
    for (int32_t topk = 1; topk <= experts; topk += 1 + experts / 6)
        for (int score = 0; score < 2; score++) {
            const route_case c = {GMM_BF16, GMM_BF16, 21, experts, topk, (gmm_score)score, 0, 0, 0.0f, 0.0f, 0.0f,
                                  .pad = 0};
            t_mat logits = logits_of(&c, 1.0);
            gmm_route r = route_of(&c);
            const int32_t *got;
            for (int64_t i = 0; i < c.tokens * experts; i++) {
                static const double values[7] = {0.0, 1.0, -1.0, -0.0, -INFINITY, INFINITY, NAN};
                logits.v[i] = values[t_int(0, score ? 6 : 3)];
            }
            t_mat_put(&logits);
            r.logits = &logits.mat;
            route_outputs(&r);
            route_call(T.ctx, GMM_OP_TOPK_FWD, &r);
            got = ints_get(r.indices, c.tokens * topk);
            for (int64_t t = 0; t < c.tokens; t++) {
                const double *row = logits.v + t * experts;
                unsigned char *taken = (unsigned char *)t_host((size_t)experts);
                for (int32_t i = 0; i < topk; i++) {
                    int32_t best = -1;
                    for (int32_t e = 0; e < experts; e++)
                        if (!taken[e] && (best < 0 || row[e] > row[best] || (isnan(row[best]) && !isnan(row[e]))))
                            best = e;
                    taken[best] = 1;
                    T_CHECK(got[t * topk + i] == best, "E %d k %d token %lld slot %d: %d instead of %d", experts, topk,
                            (long long)t, i, got[t * topk + i], best);
                }
            }
        }
}

/* A NaN logit makes all softmax scores of its token NaN, so that the lower indices are chosen; other tokens are
   unaffected. A NaN bias ranks its expert last, after a bias of -infinity. */
static void nan_rows(int arg) {
    const route_case c = {GMM_F32, GMM_F32, 3, 5, 5, GMM_SCORE_SOFTMAX, 0, 0, 0.0f, 0.0f, 0.0f, .pad = 0};
    const double bias[5] = {0.0, NAN, -INFINITY, 0.0, NAN};
    static const int32_t plain[15] = {4, 3, 2, 1, 0, 0, 1, 2, 3, 4, 0, 1, 2, 3, 4};
    static const int32_t biased[15] = {3, 0, 2, 1, 4, 0, 1, 2, 3, 4, 0, 3, 2, 1, 4};
    t_mat logits = logits_of(&c, 1.0);
    double *probs;
    gmm_route r = route_of(&c);
    (void)arg;
    for (int i = 0; i < 5; i++) {
        logits.v[i] = i;
        logits.v[5 + i] = i == 2 ? NAN : i;
        logits.v[10 + i] = 5 - i;
    }
    t_mat_put(&logits);
    r.logits = &logits.mat;
    route_outputs(&r);
    route_call(T.ctx, GMM_OP_TOPK_FWD, &r);
    t_same("indices", ints_get(r.indices, 15), plain, sizeof plain);
    probs = t_floats_get(r.probs, 15);
    for (int i = 0; i < 15; i++) T_CHECK(!isnan(probs[i]) == (i / 5 != 1), "prob %d is %g", i, probs[i]);
    r.expert_bias = t_floats_in(bias, 5);
    route_call(T.ctx, GMM_OP_TOPK_FWD, &r);
    t_same("indices with bias", ints_get(r.indices, 15), biased, sizeof biased);
}

/* Logits whose exponentials overflow or underflow fp32. */
static void extreme(int arg) {
    const route_case c = {GMM_F32, GMM_F32, 4, 4, 4, (gmm_score)arg, 1, 0, 0.0f, 1.0f, 1e-6f, .pad = 0};
    static const double v[16] = {1e4, 9999.0, -1e4, -INFINITY, 3e38, -3e38, 0.0, 1.0,
                                 -100.0, -100.5, -101.0, -102.0, -80.0, 80.0, 0.0, 88.9};
    t_mat logits = logits_of(&c, 1.0);
    const t_mat d = t_mat_out(GMM_F32, 1, 4, 4);
    double *s = route_doubles(4), *q = route_doubles(4), *want = route_doubles(16), *bound = route_doubles(16), *got;
    const int32_t *indices;
    gmm_route r = route_of(&c);
    for (int i = 0; i < 16; i++) logits.v[i] = ref_round(GMM_F32, v[i]);
    t_mat_put(&logits);
    r.logits = &logits.mat;
    route_outputs(&r);
    route_call(T.ctx, GMM_OP_TOPK_FWD, &r);
    indices = ints_get(r.indices, 16);
    for (int t = 0; t < 4; t++) {
        (void)route_scores(&c, logits.v + 4 * t, s, q);
        route_probabilities(&c, s, indices + 4 * t, want + 4 * t);
    }
    /* the third token's sigmoids are subnormal: multiples of 2^-149, or 0 on a GPU; the denominator 1e-20 magnifies
       their error */
    for (int i = 0; i < 16; i++)
        bound[i] = 1e-5 * fabs(want[i]) +
                   (arg == GMM_SCORE_SIGMOID && i / 4 == 2 ? (T.gpu ? 0x1p-126 : 0x1p-149) / 1e-20 : 1e-37);
    t_near("probs", t_floats_get(r.probs, 16), want, bound, 16);
    T_CHECK(isfinite(t_floats_get(r.aux_loss, 1)[0]), "aux_loss");
    r.z_coeff = 0.0f;
    r.dprobs = t_floats_in(reals(16, 1.0), 16);
    r.dlogits = &d.mat;
    route_call(T.ctx, GMM_OP_TOPK_BWD, &r);
    got = t_mat_get(&d);
    for (int i = 0; i < 16; i++) T_CHECK(isfinite(got[i]), "dlogits[%d] is %g", i, got[i]);
}

/* ----------------------------------------------------------------------------------------- Nothing, optional --- */

static void no_tokens(int arg) {
    const route_case c = {GMM_F32, GMM_F32, 0, 9, 2, GMM_SCORE_SOFTMAX, 1, 0, 0.0f, 1.0f, 1.0f, .pad = 0};
    static const int32_t none[10] = {0};
    gmm_mat logits = gmm_mat_packed(GMM_F32, NULL), dlogits = logits;
    gmm_route r = route_of(&c);
    (void)arg;
    r.logits = &logits;
    r.dlogits = &dlogits;
    r.counts = route_ints_out(9);
    r.offsets = route_ints_out(10);
    r.aux_loss = t_floats_out(1);
    r.z_loss = t_floats_out(1);
    route_call(T.ctx, GMM_OP_TOPK_FWD, &r);
    t_same("counts", ints_get(r.counts, 9), none, 9 * sizeof *none);
    t_same("offsets", ints_get(r.offsets, 10), none, 10 * sizeof *none);
    T_CHECK(t_floats_get(r.aux_loss, 1)[0] == 0.0 && t_floats_get(r.z_loss, 1)[0] == 0.0, "losses");
    route_call(T.ctx, GMM_OP_TOPK_BWD, &r);
}

/* Outputs that are NULL do not change the others; coefficients of 0 give losses of 0. */
static void optional(int arg) {
    const route_case c = {GMM_BF16, GMM_F32, 50, 11, 3, (gmm_score)arg, 1, 0, 0.0f, 0.5f, 0.5f, .pad = 0};
    const t_mat logits = logits_of(&c, 3.0);
    gmm_route r = route_of(&c), all;
    r.logits = &logits.mat;
    route_outputs(&r);
    route_call(T.ctx, GMM_OP_TOPK_FWD, &r);
    all = r;
    route_outputs(&r);
    r.counts = r.offsets = NULL;
    r.z_loss = NULL;
    route_call(T.ctx, GMM_OP_TOPK_FWD, &r);
    t_same("indices", ints_get(r.indices, 150), ints_get(all.indices, 150), 150 * sizeof(int32_t));
    t_same("probs", t_get(r.probs, 600), t_get(all.probs, 600), 600);
    t_same("aux_loss", t_get(r.aux_loss, 4), t_get(all.aux_loss, 4), 4);
    r.aux_coeff = r.z_coeff = 0.0f;
    r.z_loss = t_floats_out(1);
    r.offsets = route_ints_out(12);
    route_call(T.ctx, GMM_OP_TOPK_FWD, &r);
    T_CHECK(t_floats_get(r.aux_loss, 1)[0] == 0.0 && t_floats_get(r.z_loss, 1)[0] == 0.0, "losses");
    t_same("offsets", ints_get(r.offsets, 12), ints_get(all.offsets, 12), 12 * sizeof(int32_t));
}

/* Bitwise the same for any number of threads. */
static void threads(int arg) {
    const route_case c = {GMM_BF16, GMM_BF16, 1003, 70, 5, (gmm_score)arg, 1, 1, 0.0f, 0.5f, 0.5f, .pad = 0};
    const int64_t slots = c.tokens * c.topk;
    const t_mat logits = logits_of(&c, 5.0);
    const double *bias = reals(c.experts, 0.5), *dprobs = reals(slots, 1.0);
    void *first[6] = {NULL};
    if (T.gpu) t_skip("threads are the CPU engine's");
    for (int n = 1; n <= 3; n++) {
        const size_t sizes[6] = {(size_t)slots * 4, (size_t)slots * 4, (size_t)c.experts * 4, 4, 4,
                                 (size_t)(c.tokens * c.experts) * 2};
        const t_mat d = t_mat_out(GMM_BF16, 1, c.tokens, c.experts);
        gmm_config config = T.config;
        gmm_context *ctx;
        gmm_route r = route_of(&c);
        const void *got[6];
        config.threads = n;
        ctx = t_context(&config);
        r.logits = &logits.mat;
        r.expert_bias = t_floats_in(bias, c.experts);
        route_outputs(&r);
        route_call(ctx, GMM_OP_TOPK_FWD, &r);
        r.dprobs = t_floats_in(dprobs, slots);
        r.dlogits = &d.mat;
        route_call(ctx, GMM_OP_TOPK_BWD, &r);
        got[0] = r.indices;
        got[1] = r.probs;
        got[2] = r.counts;
        got[3] = r.aux_loss;
        got[4] = r.z_loss;
        got[5] = d.data;
        for (int i = 0; i < 6; i++) {
            void *bytes = t_get(got[i], sizes[i]);
            if (n == 1) first[i] = bytes;
            else t_same("output", bytes, first[i], sizes[i]);
        }
    }
}

/* ---------------------------------------------------------------------------------------------------- Errors --- */

static void errors(int arg) {
    const route_case c = {GMM_F32, GMM_F32, 6, 4, 2, GMM_SCORE_SOFTMAX, 1, 0, 0.0f, 0.5f, 0.5f, .pad = 0};
    const t_mat logits = logits_of(&c, 1.0), d = t_mat_out(GMM_F32, 1, 6, 4);
    const int bwd = arg;
    const gmm_op op = bwd ? GMM_OP_TOPK_BWD : GMM_OP_TOPK_FWD;
    const char *name = bwd ? "gmm_topk_bwd" : "gmm_topk_fwd";
    gmm_info info = GMM_ZERO;
    gmm_route good = route_of(&c), r;
    gmm_mat mat;
    gmm_options options = GMM_ZERO;
    char *workspace;
    size_t bytes;
    good.logits = &logits.mat;
    good.dlogits = &d.mat;
    route_outputs(&good);
    good.dprobs = t_floats_in(reals(12, 1.0), 12);
    route_call(T.ctx, GMM_OP_TOPK_FWD, &good);
    T_OK(gmm_topk_query(T.ctx, op, &good, &info));
    bytes = info.workspace_bytes;
    workspace = (char *)t_workspace(bytes + 256);

#define RUN (bwd ? gmm_topk_bwd : gmm_topk_fwd)
#define REFUSED(status, ...) \
    do { \
        T_REFUSED(status, RUN(T.ctx, &r, workspace, bytes, T.stream), name, ": route", __VA_ARGS__, NULL); \
        r = good; \
    } while (0)
#define REFUSED_SHAPE(status, ...) \
    do { \
        T_REFUSED(status, gmm_topk_query(T.ctx, op, &r, &info), "gmm_topk_query: route", __VA_ARGS__, NULL); \
        REFUSED(status, __VA_ARGS__); \
    } while (0)

    r = good;
    r.experts = 0; REFUSED_SHAPE(GMM_E_ARG, "experts", "0", "T=6 E=0 k=2");
    r.tokens = -1; REFUSED_SHAPE(GMM_E_ARG, "tokens", "-1");
    r.tokens = (int64_t)1 << 30; REFUSED_SHAPE(GMM_E_ARG, "tokens", "1073741824", "topk 2", "2^31");
    r.tokens = INT64_MAX; REFUSED_SHAPE(GMM_E_ARG, "tokens", "9223372036854775807");
    r.topk = 0; REFUSED_SHAPE(GMM_E_ARG, "topk", "0", "1 to 4");
    r.topk = 5; REFUSED_SHAPE(GMM_E_ARG, "topk", "5", "1 to 4");
    r.score = (gmm_score)2; REFUSED_SHAPE(GMM_E_ARG, "score", "2");
    r.normalize = 2; REFUSED_SHAPE(GMM_E_ARG, "normalize", "2");
    r.scale = INFINITY; REFUSED_SHAPE(GMM_E_ARG, "scale", "inf", "finite");
    r.aux_coeff = NAN; REFUSED_SHAPE(GMM_E_ARG, "aux_coeff", "nan", "finite");
    r.z_coeff = -INFINITY; REFUSED_SHAPE(GMM_E_ARG, "z_coeff", "-inf", "finite");
    r.struct_size = sizeof r + 8; REFUSED_SHAPE(GMM_E_VERSION, "route", "struct_size");
    r.logits = NULL; REFUSED_SHAPE(GMM_E_NULL, "logits", "NULL", "T=6 E=4 k=2");
    mat = logits.mat, mat.dtype = GMM_I32, r.logits = &mat; REFUSED_SHAPE(GMM_E_DTYPE, "logits", "i32");
    mat = logits.mat, mat.dtype = GMM_E4M3, r.logits = &mat; REFUSED_SHAPE(GMM_E_DTYPE, "logits", "e4m3");
    mat = logits.mat, mat.ld = 3, r.logits = &mat; REFUSED_SHAPE(GMM_E_STRIDE, "logits", "3", "4 columns");
    mat = logits.mat, mat.ld = INT64_MAX / 2, r.logits = &mat; REFUSED_SHAPE(GMM_E_OVERFLOW, "logits");
    mat = logits.mat, mat.data = NULL, r.logits = &mat; REFUSED(GMM_E_NULL, "logits", "6 x 4 f32");
    mat = logits.mat, mat.data = (char *)logits.data + 2, r.logits = &mat; REFUSED(GMM_E_ALIGN, "logits", "aligned");
    options.engine = GMM_ENGINE_CUBLASLT;
    r.options = &options; REFUSED_SHAPE(GMM_E_UNSUPPORTED, "options.engine", "cublaslt", bwd ? "topk_bwd" : "topk_fwd");
    options.engine = (gmm_engine)77;
    r.options = &options; REFUSED_SHAPE(GMM_E_ARG, "options.engine", "77");
    r.indices = NULL; REFUSED(GMM_E_NULL, "indices", "12 values", "T=6 E=4 k=2 f32");
    r.indices = (int32_t *)(void *)((char *)good.indices + 1); REFUSED(GMM_E_ALIGN, "indices");
    r.counts = (int32_t *)(void *)((char *)good.counts + 2); REFUSED(GMM_E_ALIGN, "counts");
    if (bwd) {
        r.dlogits = NULL; REFUSED_SHAPE(GMM_E_NULL, "dlogits");
        mat = d.mat, mat.dtype = GMM_U8, r.dlogits = &mat; REFUSED_SHAPE(GMM_E_DTYPE, "dlogits", "u8");
        mat = d.mat, mat.ld = 2, r.dlogits = &mat; REFUSED_SHAPE(GMM_E_STRIDE, "dlogits", "2");
        r.counts = NULL; REFUSED(GMM_E_NULL, "counts", "4 values");
        r.dprobs = (float *)(void *)((char *)good.probs + 1); REFUSED(GMM_E_ALIGN, "dprobs");
        r.dloss = (float *)(void *)((char *)good.probs + 1); REFUSED(GMM_E_ALIGN, "dloss");
    } else {
        r.probs = NULL; REFUSED(GMM_E_NULL, "probs", "12 values");
        r.probs = (float *)(void *)((char *)good.probs + 2); REFUSED(GMM_E_ALIGN, "probs");
        r.offsets = (int32_t *)(void *)((char *)good.offsets + 2); REFUSED(GMM_E_ALIGN, "offsets");
        r.aux_loss = (float *)(void *)((char *)good.probs + 2); REFUSED(GMM_E_ALIGN, "aux_loss");
        r.z_loss = (float *)(void *)((char *)good.probs + 2); REFUSED(GMM_E_ALIGN, "z_loss");
        r.expert_bias = (float *)(void *)((char *)good.probs + 2); REFUSED(GMM_E_ALIGN, "expert_bias");
    }
    if (bytes > 0) { /* an engine may need none */
        T_REFUSED(GMM_E_WORKSPACE, RUN(T.ctx, &r, workspace, bytes - 1, T.stream), name, "workspace_bytes", NULL);
        T_REFUSED(GMM_E_NULL, RUN(T.ctx, &r, NULL, bytes, T.stream), name, "workspace", NULL);
        T_REFUSED(GMM_E_ALIGN, RUN(T.ctx, &r, workspace + 128, bytes, T.stream), name, "workspace", "256", NULL);
    }
    T_REFUSED(GMM_E_NULL, RUN(T.ctx, NULL, workspace, bytes, T.stream), name, "route", NULL);
    T_REFUSED(GMM_E_NULL, gmm_topk_query(T.ctx, op, &r, NULL), "gmm_topk_query", "info", NULL);
    T_REFUSED(GMM_E_ARG, gmm_topk_query(T.ctx, GMM_OP_PAD, &r, &info), "gmm_topk_query", "op", "pad", NULL);
    T_CHECK(RUN(NULL, &r, workspace, bytes, T.stream) == GMM_E_NULL, "no context");
    T_OK(RUN(T.ctx, &r, workspace, bytes, T.stream));
#undef RUN
#undef REFUSED
#undef REFUSED_SHAPE
}

static void drawn(int arg) {
    static const gmm_dtype dtypes[] = {GMM_F32, GMM_F16, GMM_BF16};
    static const float factors[] = {0.0f, 0.01f, 0.5f, 1.0f}, scales[] = {0.0f, 1.0f, 2.5f, -0.5f};
    route_case *c = &drawn_case;
    (void)arg;
    memset(c, 0, sizeof *c);
    c->dtype = dtypes[t_int(0, 2)];
    c->dlogits = dtypes[t_int(0, 2)];
    c->tokens = t_int(1, 100);
    c->experts = (int32_t)t_draw_size(40, 400);
    c->topk = (int32_t)t_int(1, c->experts < 12 ? c->experts : 12);
    c->score = t_int(0, 1) ? GMM_SCORE_SIGMOID : GMM_SCORE_SOFTMAX;
    c->normalize = (int32_t)t_int(0, 1);
    c->bias = (int32_t)t_int(0, 1);
    c->scale = scales[t_int(0, 3)];
    c->aux = factors[t_int(0, 3)];
    c->z = factors[t_int(0, 3)];
    c->pad = t_int(0, 1) * t_int(0, 7);
    if (c->experts > 100 && c->tokens > 20) c->tokens = 20;
    if (t_int(0, 1)) forward(-1);
    else backward(-1);
}

void tests_route(void) {
    t_add(drawn, 0, "route drawn at random");
    t_random(5);
    for (int i = 0; i < (int)T_COUNT(cases); i++) {
        const route_case *c = &cases[i];
        const char *score = c->score == GMM_SCORE_SIGMOID ? "sigmoid" : "softmax";
        t_add(forward, i, "route fwd %s %s E%d k%d T%lld%s%s", score, gmm_dtype_name(c->dtype), c->experts, c->topk,
              (long long)c->tokens, c->normalize ? " normalized" : "", c->bias ? " bias" : "");
        t_add(backward, i, "route bwd %s %s to %s E%d k%d T%lld%s aux %g z %g", score, gmm_dtype_name(c->dtype),
              gmm_dtype_name(c->dlogits), c->experts, c->topk, (long long)c->tokens,
              c->normalize ? " normalized" : "", (double)c->aux, (double)c->z);
    }
    t_add(ties, 0, "route ties E1");
    t_add(ties, 6, "route ties E7");
    t_add(ties, 63, "route ties E64");
    t_add(ties, 149, "route ties E150");
    t_add(ties, 1056, "route ties E1057");
    t_add(nan_rows, 0, "route NaN in logits and bias");
    for (int score = 0; score < 2; score++) {
        const char *name = score ? "sigmoid" : "softmax";
        t_add(extreme, score, "route extreme logits %s", name);
        t_add(backward_parts, score, "route bwd parts %s", name);
        t_add(backward_wild, score, "route bwd indices out of range %s", name);
        t_add(backward_twice, score, "route bwd experts chosen twice %s", name);
        t_add(optional, score, "route outputs not asked for %s", name);
        t_add(threads, score, "route threads 1 2 3 %s", name);
    }
    t_add(no_tokens, 0, "route T0");
    t_add(errors, 0, "route fwd errors");
    t_add(errors, 1, "route bwd errors");
}
