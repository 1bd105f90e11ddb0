/* route_case.h - what the tests of top-k routing have in common: a call, its outputs, and the reference of one token in
   double precision; for test_route.c and test_router.c. */
#ifndef GMM_TESTS_ROUTE_CASE_H
#define GMM_TESTS_ROUTE_CASE_H

#include "test.h"

/* A router. What follows `pad` is zero in test_route.c. */
typedef struct route_case {
    gmm_dtype dtype, dlogits;
    int64_t tokens;
    int32_t experts, topk;
    gmm_score score;
    int32_t normalize, bias;
    float scale, aux, z;
    int64_t pad;      /* unused elements after each row of logits and dlogits */
    const char *name;
    int32_t groups, group_topk, group_sum, sinkhorn, sequences, sequence_first, padding;
    float tolerance;  /* of sinkhorn */
} route_case;

int32_t route_sequences(const route_case *c); /* 1 where the case has none */

/* Scores s and the probabilities q that the auxiliary loss sums, [experts] each. Returns logsumexp of the logits. */
double route_scores(const route_case *c, const double *logits, double *s, double *q);
/* Those of the chosen experts, [topk]. */
void route_probabilities(const route_case *c, const double *s, const int32_t *indices, double *probs);
/* What the losses multiply their sums by: aux_loss for a sequence, z_loss for a batch of n tokens that are no
   padding. */
double route_aux_factor(const route_case *c, double n);
double route_z_factor(const route_case *c, double n);

/* Relative error of a probability in units of 2^-24: 6 of exp, 8 from the rounding of its argument (at most 16 in
   size), 10 of the operations around them, and the sums over the experts (in 16 lanes) and over the chosen. */
double route_relative(const route_case *c);

/* One token of  sum dprobs probs + dloss[0] aux_loss + dloss[1] z_loss. */
typedef struct route_token {
    const route_case *c;
    const double *logits, *dprobs;   /* [experts], [topk] */
    const int32_t *indices, *counts; /* [topk]; [experts] of the token's sequence */
    double aux, z;                   /* dloss times the factors of the losses */
    double *row, *s, *q, *probs;     /* scratch */
} route_token;

/* With scratch alone. */
route_token route_token_of(const route_case *c);
/* The gradient of the token's logits by central differences, and bounds. An element e with (first + e) % step != 0 is
   not compared: want is what the library has written, which must be finite. */
void route_gradient(const route_token *token, int64_t first, int64_t step, const double *got, double *want,
                    double *bound);

/* The scalars of the case, without addresses. */
gmm_route route_scalars(const route_case *c);
/* The outputs that every router has: all but total_counts and sequence_counts. */
void route_outputs(gmm_route *r);
int32_t *route_ints_out(int64_t n);
double *route_doubles(int64_t n); /* on the host, zero */
/* Runs op on ctx with a workspace of exactly the queried size. */
#define route_call(...) T_CALL(route_call, __VA_ARGS__)
void (route_call)(gmm_context *ctx, gmm_op op, const gmm_route *r);

/* The library's counts equal `counts`, [experts]; its offsets are their sums. */
#define route_check_counts(...) T_CALL(route_check_counts, __VA_ARGS__)
void (route_check_counts)(const int32_t *got, const int32_t *offsets, const int32_t *counts, int32_t experts);
/* Probabilities, counts, offsets and losses of a forward pass; `sums` is the error of the losses' sums over tokens, in
   units of 2^-24. */
#define route_check(...) T_CALL(route_check, __VA_ARGS__)
void (route_check)(const route_case *c, const gmm_route *r, const double *probs, const int32_t *counts, double aux_loss,
                   double z_loss, int sums);

#endif
