/* gtp_case.h - a training run with integer-valued weights on CPU ranks, checked value by value; several GTP tests use
   it */
#ifndef GMM_TESTS_GTP_CASE_H
#define GMM_TESTS_GTP_CASE_H

#include "gtp_world.h"

#include <stdatomic.h>

enum { CASE_RANKS = 16, CASE_LAYERS = 8, CASE_EXPERTS = 4 };

/* Every layer is a bundle of `experts` weights of rows x cols. A step runs `micro` micro-batches forward and backward,
   then an optimizer computes new integer weights from main_grad. Zero in every field is the plain case. */
typedef struct gtp_case {
    int ranks, layers, experts, rows, cols;
    int prefetch, held, steps, micro;
    int together;            /* bundles that one call gathers; 0 = 1 */
    int consumes;            /* reads of a layer per pass; 0 = 1 */
    unsigned recompute, frozen, taller; /* bit masks of layers; taller: four times as many rows */
    int zero_rank;           /* 1 + the rank that never has tokens */
    int delayed;             /* gradients are submitted after the whole backward */
    int shuffled;            /* backward runs in another order than its chain; layers must not be a multiple of 3 */
    int unchained, wrap;     /* unchained: no prefetch chains; wrap: the backward chain continues with forward's */
    int publish_on_need;               /* shards are published in the on_need callback */
    int unused_prefetch;               /* one gather before the fence whose view is never acquired */
    /* 1: layers alternate between two streams; 2: backward also reads on the other stream than forward */
    int two_streams;
    int caller_gradients;             /* gradients are submitted from caller-owned memory */
    /* permuted: the order of ranks within the group differs from the world's; other_ids: weight ids differ per rank */
    int permuted, other_ids;
    int threads;             /* a thread per rank, all compute on stream NULL */
    gmm_dtype wire, main_grad;
    gmm_gtp_reduction reduction;
    int exchanges;           /* gmm_comm.exchanges of the communicator that reduces */
    int synchronous, wgrad_slots;
    uint64_t seed;
    int drop_wait;           /* rank 0 skips its n-th stream wait, counted from 1 */
    int fail_call;           /* rank 0's n-th call of a collective fails, counted from 1 */
    int silent_rank;         /* 1 + the rank that stops halfway through its program */
    int timeout_ms;
} gtp_case;

typedef struct gtp_result {
    gmm_status status[CASE_RANKS];
    char text[CASE_RANKS][512];
    int64_t races, waits, wrong; /* waits: of rank 0, counted from 1; wrong: values */
    unsigned char implied[TRACE_WAITS]; /* 1: others imply the wait, see gtp_trace */
    char race[400], first_wrong[200];
    gmm_gtp_statistics stats[CASE_RANKS];
    gmm_gtp_need need;
    int64_t asked, reported;  /* weights that rank 0's on_need and on_ready callbacks received */
    int64_t communications, groups; /* collective calls of rank 0, and its calls of group_begin */
    int64_t exchanges;        /* calls of all_to_all among them */
    uint64_t hash;            /* hash of main_grads and weights of all ranks, as whole tensors */
    gmm_status run;           /* status of gmm_ranks_run at the end */
} gtp_result;

/* Runs a case. A failing call ends that rank's program; its status is in the result. */
void gtp_case_run(const gtp_case *c, gtp_result *out);
/* The same; the case fails on any data race, wrong value or error status. */
#define gtp_case_check(...) T_CALL(gtp_case_check, __VA_ARGS__)
void (gtp_case_check)(const gtp_case *c, gtp_result *out);

#endif
