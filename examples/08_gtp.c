/* Generalized tensor parallelism on two CPU ranks: each keeps half of the rows of two layers' weights, gathers a layer
   before it reads it (the second while the first is at work), and gets its half of the mean gradients. One thread plays
   both ranks, so work is queued on streams; with a thread per rank, stream NULL is the rank's own thread. */
#include "gmm_gtp.h"

#include <stdio.h>
#include <stdlib.h>

enum { RANKS = 2, LAYERS = 2, N = 32, K = 8, HALF = N / RANKS * K };

typedef struct rank {
    gmm_context *ctx;
    gmm_runtime rt;
    gmm_stream compute;
    gmm_gtp *gtp;
    float weight[LAYERS][HALF], main_grad[LAYERS][HALF], read[LAYERS];
} rank;

static gmm_gtp *current; /* rank whose error message is printed */
static void check(gmm_status s) {
    if (s) exit((fprintf(stderr, "%s: %s\n", gmm_status_name(s), gmm_gtp_last_error(current)), 1));
}

static void declare(rank *r, int index, gmm_ranks *ranks, const gmm_comm *gather, const gmm_comm *reduce) {
    const gmm_shard shard = {.dtype = GMM_F32, .rows = N, .cols = K, .gtp_size = RANKS, .gtp_rank = index};
    gmm_gtp_domain domain = {.gather = gather, .reduce = reduce};
    gmm_gtp_need need = GMM_ZERO;
    int32_t bundle[LAYERS], weight, id;
    size_t bytes = 0;
    check(gmm_create(&r->ctx, NULL, NULL));
    check(gmm_ranks_runtime(ranks, index, &r->rt));
    check(r->rt.stream_create(r->rt.self, 0, &r->compute));
    check(r->rt.stream_create(r->rt.self, 0, &domain.gather_stream));
    check(r->rt.stream_create(r->rt.self, 0, &domain.reduce_stream));
    {
        const gmm_gtp_config config = {.weights = LAYERS, .bundles = LAYERS, .chains = 1, .ctx = r->ctx,
                                       .runtime = &r->rt};
        check(gmm_gtp_query(&config, &bytes, NULL));
        check(gmm_gtp_init(malloc(bytes), bytes, &config, &r->gtp, NULL));
        current = r->gtp;
    }
    check(gmm_gtp_add_domain(r->gtp, &domain, &id));
    for (int l = 0; l < LAYERS; l++) {
        const gmm_gtp_weight w = {.shard = &shard, .data = {r->weight[l]}, .main_grad = r->main_grad[l],
                                  .main_grad_dtype = GMM_F32};
        for (int i = 0; i < HALF; i++) r->weight[l][i] = (float)(index + 10 * l);
        check(gmm_gtp_add_weight(r->gtp, &w, &weight));
        check(gmm_gtp_add_bundle(r->gtp, id, &weight, 1, l ? "second" : "first", &bundle[l]));
    }
    {
        const gmm_gtp_chain chain = {.pass = GMM_GTP_FORWARD, .bundles = bundle, .count = LAYERS, .prefetch = 1};
        check(gmm_gtp_add_chain(r->gtp, &chain, &id));
    }
    check(gmm_gtp_seal(r->gtp));
    check(gmm_gtp_memory_need(r->gtp, 0, &need));
    check(gmm_gtp_bind(r->gtp, 0, aligned_alloc(256, need.gather_bytes), need.gather_bytes,
                       aligned_alloc(256, need.reduce_bytes), need.reduce_bytes));
}

/* The work of a layer: reads the gathered weights and writes this rank's gradient. */
typedef struct work { const float *w; float *dw, *sum; } work;
static gmm_status layer(const void *argument, gmm_stream stream) {
    const work *a = (const work *)argument;
    (void)stream;
    for (int i = 0; i < N * K; i++) *a->sum += a->w[i], a->dw[i] = 1;
    return GMM_OK;
}

int main(void) {
    static rank r[RANKS];
    const int32_t members[RANKS] = {0, 1};
    const gmm_ranks_config config = {.ranks = RANKS};
    gmm_comm gather[RANKS], reduce[RANKS];
    gmm_ranks *ranks;
    gmm_error error;
    if (gmm_ranks_create(&config, &ranks, &error)) return (puts(error.text), error.status != GMM_E_BUILD);
    check(gmm_ranks_comms(ranks, members, RANKS, gather));
    check(gmm_ranks_comms(ranks, members, RANKS, reduce));
    for (int i = 0; i < RANKS; i++) declare(&r[i], i, ranks, &gather[i], &reduce[i]);
    for (int i = 0; i < RANKS * LAYERS; i++) {
        rank *k = &r[i / LAYERS];
        const int l = i % LAYERS;
        gmm_gtp_view w = GMM_ZERO, dw = GMM_ZERO;
        const gmm_gtp_gradient mean = {.scale = 1.0f / RANKS, .add = GMM_GTP_SET};
        current = k->gtp;
        check(gmm_gtp_acquire(k->gtp, l, GMM_GTP_FORWARD, k->compute, &w));
        check(gmm_gtp_wgrad(k->gtp, l, k->compute, &dw));
        const work a = {w.mat.data, dw.mat.data, &k->read[l]};
        const gmm_work job = {.function = layer, .argument = &a, .argument_bytes = sizeof a};
        check(k->rt.run(k->rt.self, &job, k->compute));
        check(gmm_gtp_release(k->gtp, l, GMM_GTP_FORWARD, k->compute));
        check(gmm_gtp_submit(k->gtp, l, &mean, k->compute));
    }
    check(gmm_ranks_run(ranks));
    for (int i = 0; i < RANKS; i++)
        printf("rank %d read weights that add up to %g and %g, and has mean gradients of %g and %g\n", i,
               r[i].read[0], r[i].read[1], r[i].main_grad[0][0], r[i].main_grad[1][0]);
    return r[0].read[1] != HALF * 10 + HALF * 11 || r[1].main_grad[0][0] != 1;
}
