/* test_route_case.c - calls of top-k routing and their reference, see route_case.h */
#include "route_case.h"

#include <math.h>
#include <string.h>

/* ------------------------------------------------------------------------------------------------- Reference --- */

int32_t route_sequences(const route_case *c) { return c->sequences ? c->sequences : 1; }

double route_scores(const route_case *c, const double *logits, double *s, double *q) {
    double top = -INFINITY, sum = 0.0, all = 0.0;
    for (int32_t e = 0; e < c->experts; e++) top = fmax(top, logits[e]);
    for (int32_t e = 0; e < c->experts; e++) sum += exp(logits[e] - top);
    for (int32_t e = 0; e < c->experts; e++) {
        s[e] = c->score == GMM_SCORE_SIGMOID ? 1.0 / (1.0 + exp(-logits[e])) : exp(logits[e] - top) / sum;
        all += s[e];
    }
    for (int32_t e = 0; e < c->experts; e++) q[e] = c->score == GMM_SCORE_SIGMOID ? s[e] / all : s[e];
    return top + log(sum);
}

static double scale_of(const route_case *c) { return c->scale == 0.0f ? 1.0 : (double)c->scale; }

void route_probabilities(const route_case *c, const double *s, const int32_t *indices, double *probs) {
    double sum = c->score == GMM_SCORE_SIGMOID ? 1e-20 : 0.0;
    for (int32_t i = 0; i < c->topk; i++) sum += s[indices[i]];
    for (int32_t i = 0; i < c->topk; i++) probs[i] = scale_of(c) * s[indices[i]] / (c->normalize ? sum : 1.0);
}

double route_aux_factor(const route_case *c, double n) {
    return n == 0.0 ? 0.0 : (double)c->aux * c->experts / (c->topk * n * n) / route_sequences(c);
}
double route_z_factor(const route_case *c, double n) { return n == 0.0 ? 0.0 : (double)c->z / n; }

double route_relative(const route_case *c) { return (c->experts / 16 + c->topk + 24) * 0x1p-24; }

/* -------------------------------------------------------------------------------------------------- Gradient --- */

route_token route_token_of(const route_case *c) {
    route_token token;
    memset(&token, 0, sizeof token);
    token.c = c;
    token.row = route_doubles(c->experts);
    token.s = route_doubles(c->experts);
    token.q = route_doubles(c->experts);
    token.probs = route_doubles(c->topk);
    return token;
}

/* The token's part of the objective, at the logits of its row. */
static double objective(const route_token *token) {
    const route_case *c = token->c;
    const double lse = route_scores(c, token->row, token->s, token->q);
    double sum = token->z * lse * lse;
    route_probabilities(c, token->s, token->indices, token->probs);
    for (int32_t i = 0; i < c->topk; i++) sum += token->dprobs[i] * token->probs[i];
    for (int32_t e = 0; e < c->experts; e++) sum += token->aux * token->counts[e] * token->q[e];
    return sum;
}

void route_gradient(const route_token *token, int64_t first, int64_t step, const double *got, double *want,
                    double *bound) {
    const route_case *c = token->c;
    const double h = 1e-5, lse = route_scores(c, token->logits, token->s, token->q);
    double size = 0.0, most = 0.0;
    for (int32_t i = 0; i < c->topk; i++) size += fabs(scale_of(c) * token->dprobs[i]);
    for (int32_t e = 0; e < c->experts; e++) most = fmax(most, token->counts[e]);
    /* the sum of the magnitudes of a gradient's terms: each is a product of probabilities of at most 1 */
    size = 2.0 * size + 2.0 * fabs(token->aux) * most + 2.0 * fabs(token->z) * (fabs(lse) + 1.0);
    memcpy(token->row, token->logits, (size_t)c->experts * sizeof *token->row);
    for (int32_t e = 0; e < c->experts; e++) {
        const double at = token->row[e];
        double up, down;
        if ((first + e) % step) {
            want[e] = isfinite(got[e]) ? got[e] : 0.0;
            continue;
        }
        token->row[e] = at + h;
        up = objective(token);
        token->row[e] = at - h;
        down = objective(token);
        token->row[e] = at;
        want[e] = (up - down) / (2.0 * h);
        /* fp32 arithmetic, the difference quotient (h^2 and 2^-52 / h), the store */
        bound[e] = (2.0 * route_relative(c) + 1e-9) * size + ref_roundoff(c->dlogits) * 1.01 * fabs(want[e]) +
                   ref_tiny(c->dlogits);
    }
}

/* ----------------------------------------------------------------------------------------------------- Calls --- */

gmm_route route_scalars(const route_case *c) {
    gmm_route r = GMM_ZERO;
    r.experts = c->experts;
    r.tokens = c->tokens;
    r.topk = c->topk;
    r.score = c->score;
    r.normalize = c->normalize;
    r.scale = c->scale;
    r.aux_coeff = c->aux;
    r.z_coeff = c->z;
    r.groups = c->groups;
    r.group_topk = c->group_topk;
    r.group_sum = c->group_sum;
    r.sinkhorn = c->sinkhorn;
    r.sinkhorn_tolerance = c->tolerance;
    r.sequences = c->sequences;
    r.sequence_first = c->sequence_first;
    return r;
}

void route_outputs(gmm_route *r) {
    const int64_t slots = r->tokens * r->topk;
    r->indices = route_ints_out(slots);
    r->probs = t_floats_out(slots);
    r->counts = route_ints_out(r->experts);
    r->offsets = route_ints_out(r->experts + 1);
    r->aux_loss = t_floats_out(1);
    r->z_loss = t_floats_out(1);
}

int32_t *route_ints_out(int64_t n) { return (int32_t *)t_alloc((size_t)n * sizeof(int32_t)); }
double *route_doubles(int64_t n) { return (double *)t_host((size_t)n * sizeof(double)); }

void (route_call)(gmm_context *ctx, gmm_op op, const gmm_route *r) {
    gmm_info info = GMM_ZERO;
    void *workspace;
    T_OK_TEXT(gmm_topk_query(ctx, op, r, &info), gmm_last_error(ctx));
    workspace = t_workspace(info.workspace_bytes);
    if (op == GMM_OP_TOPK_FWD)
        T_OK_TEXT(gmm_topk_fwd(ctx, r, workspace, info.workspace_bytes, T.stream), gmm_last_error(ctx));
    else T_OK_TEXT(gmm_topk_bwd(ctx, r, workspace, info.workspace_bytes, T.stream), gmm_last_error(ctx));
}

void (route_check_counts)(const int32_t *got, const int32_t *offsets, const int32_t *counts, int32_t experts) {
    const size_t bytes = (size_t)experts * sizeof(int32_t);
    int32_t first = 0;
    t_same("counts", t_get(got, bytes), counts, bytes);
    offsets = (const int32_t *)t_get(offsets, bytes + sizeof(int32_t));
    for (int32_t e = 0; e <= experts; first += e < experts ? counts[e] : 0, e++)
        T_CHECK(offsets[e] == first, "offset %d of expert %d instead of %d", offsets[e], e, first);
}

void (route_check)(const route_case *c, const gmm_route *r, const double *probs, const int32_t *counts, double aux_loss,
                   double z_loss, int sums) {
    const int64_t slots = c->tokens * c->topk;
    double *bound = route_doubles(slots), near;
    for (int64_t i = 0; i < slots; i++) bound[i] = 2.0 * route_relative(c) * fabs(probs[i]);
    t_near("probs", t_floats_get(r->probs, slots), probs, bound, slots);
    route_check_counts(r->counts, r->offsets, counts, c->experts);
    near = (route_relative(c) + sums * 0x1p-24) * fabs(aux_loss);
    t_near("aux_loss", t_floats_get(r->aux_loss, 1), &aux_loss, &near, 1);
    near = 2.0 * (route_relative(c) + sums * 0x1p-24) * fabs(z_loss);
    t_near("z_loss", t_floats_get(r->z_loss, 1), &z_loss, &near, 1);
}
