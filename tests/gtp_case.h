/* gtp_case.h - a training of integer-valued weights on CPU ranks, checked value by value; shared by the GTP tests */
#ifndef GMM_TESTS_GTP_CASE_H
#define GMM_TESTS_GTP_CASE_H

#include "test.h"

#include "gmm_gtp.h"

#include <stdatomic.h>

enum { CASE_RANKS = 8, CASE_LAYERS = 8, CASE_EXPERTS = 4, CASE_WAITS = 2048 };

/* Layers are bundles of `experts` weights of rows x cols. A step runs `micro` micro-batches forward and backward, and
   an optimizer that turns main_grad into new integer weights. Zeroed fields are the plain case. */
typedef struct gtp_case {
    int ranks, layers, experts, rows, cols;
    int prefetch, held, steps, micro;
    int consumes;            /* of a layer per pass; 0 = 1 */
    unsigned recompute, frozen, taller; /* bits of layers; taller: four times the rows */
    int zero_rank;           /* 1 + the rank that never has tokens */
    int delayed;             /* gradients are submitted behind the whole backward */
    int shuffled;            /* backward in another order than its chain's; layers is no multiple of 3 */
    int unchained, wrap;     /* no chains; forward follows backward within a step */
    int publish_on_need;               /* shards are published by the callback */
    int unused_prefetch;               /* a prefetch that nobody wants, before the fence */
    int two_streams;         /* 1: layers take turns on two streams; 2: and each reads backward on the other one */
    int caller_gradients;             /* gradients come from the caller's memory */
    int permuted, other_ids; /* ranks stand in another order in their group; ids differ from rank to rank */
    int threads;             /* a thread per rank, all compute on stream NULL */
    gmm_dtype wire, main_grad;
    gmm_gtp_reduction reduction;
    int synchronous, wgrad_slots;
    uint64_t seed;
    int drop_wait;           /* rank 0 leaves out its n-th wait, counted from 1 */
    int fail_call;           /* rank 0's n-th call of a collective fails, counted from 1 */
    int silent_rank;         /* 1 + the rank that stops in the middle */
    int timeout_ms;
} gtp_case;

typedef struct gtp_result {
    gmm_status status[CASE_RANKS];
    char text[CASE_RANKS][512];
    int64_t races, waits, wrong; /* waits: of rank 0, counted from 1; wrong: values */
    unsigned char implied[CASE_WAITS]; /* 1: the wait only repeats what its stream knew from others */
    char race[400], first_wrong[200];
    gmm_gtp_statistics stats[CASE_RANKS];
    gmm_gtp_need need;
    int64_t asked, reported;  /* weights that rank 0's callbacks were told of */
    int64_t communications, groups; /* calls of collectives by rank 0, and of group_begin */
    uint64_t hash;            /* of all main_grads and weights of all ranks, as whole tensors */
    gmm_status run;           /* of gmm_ranks_run at the end */
} gtp_result;

/* Runs a case. Failing calls end the rank's program and are in the result. */
void gtp_case_run(const gtp_case *c, gtp_result *out);
/* The same, and all must be well: no race, no wrong value, no status. */
void gtp_case_check(const gtp_case *c, gtp_result *out);

#endif
