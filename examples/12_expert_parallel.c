/* Expert parallelism on two ranks, each with half of the experts: tokens are sorted by expert, sent to the ranks of
   their experts (dispatch), multiplied, sent back and added up (combine). NCCL sends between two GPUs, else the CPU
   copies. Rows arrive by sender, then by expert: each such pair is a group, whose weight a table names. */
#include "two_ranks.h"

#include <math.h>

enum { RANKS = 2, LOCAL = 2, EXPERTS = RANKS * LOCAL, TOKENS = 6, TOPK = 2, SLOTS = TOKENS * TOPK, HIDDEN = 8,
       CAPACITY = RANKS * SLOTS, X = TOKENS * HIDDEN };

typedef struct rank {
    _Alignas(256) char workspace[4 << 20];
    float x[X], rows[SLOTS * HIDDEN], received[CAPACITY * HIDDEN], y[CAPACITY * HIDDEN], returned[SLOTS * HIDDEN];
    float out[X], probs[SLOTS], w[LOCAL][HIDDEN * HIDDEN];
    int32_t indices[SLOTS], row_of[SLOTS], slot_of[SLOTS], sizes[EXPERTS], groups[EXPERTS];
    gmm_context *ctx;
    gmm_stream stream;
} rank;
static rank *ranks[RANKS];

static void check(rank *r, gmm_status s) { if (s) exit((fprintf(stderr, "%s\n", gmm_last_error(r->ctx)), 1)); }
#define WORK(r) (r)->workspace, sizeof (r)->workspace, (r)->stream

static void start(int i) {
    const gmm_config config = two_ranks_config(i);
    rank *r = ranks[i] = (rank *)two_ranks_memory(sizeof(rank));
    r->stream = two_streams[i];
    if (gmm_create(&r->ctx, &config, NULL) != GMM_OK) exit(1);
    for (int k = 0; k < X; k++) r->x[k] = sinf((float)(k + 100 * i));
    for (int k = 0; k < LOCAL * HIDDEN; k++) /* expert e multiplies by e + 1 */
        r->w[k / HIDDEN][k % HIDDEN * (HIDDEN + 1)] = (float)(i * LOCAL + k / HIDDEN + 1);
    for (int k = 0; k < SLOTS; k++) { /* as a router would choose: two experts per token */
        r->indices[k] = (k / 2 * 3 + i + k % 2 * (1 + k / 2 % 3)) % EXPERTS;
        r->probs[k] = k % 2 ? 0.3f : 0.7f;
    }
}
static gmm_permute map_of(rank *r) {
    gmm_permute p = GMM_ZERO;
    p.experts = EXPERTS, p.tokens = TOKENS, p.capacity = SLOTS, p.hidden = HIDDEN, p.topk = TOPK;
    p.indices = r->indices, p.row_of = r->row_of, p.slot_of = r->slot_of, p.sizes = r->sizes;
    return p;
}
static void dispatch(rank *r) {
    const gmm_mat mx = gmm_mat_packed(GMM_F32, r->x), mrows = gmm_mat_packed(GMM_F32, r->rows);
    gmm_permute p = map_of(r);
    check(r, gmm_permute_map(r->ctx, &p, WORK(r)));
    p.x = &mx, p.rows = &mrows;
    check(r, gmm_permute_fwd(r->ctx, &p, WORK(r)));
}
static void multiply(rank *r, int i) {
    void *table[EXPERTS];
    const gmm_mat mx = gmm_mat_packed(GMM_F32, r->received), my = gmm_mat_packed(GMM_F32, r->y);
    const gmm_mat mw = gmm_mat_table(GMM_F32, table, GMM_MAT_TABLE_ON_HOST);
    gmm_groups groups = GMM_ZERO;
    gmm_linear lin = GMM_ZERO;
    for (int g = 0; g < EXPERTS; g++) {
        table[g] = r->w[g % LOCAL];
        r->groups[g] = ranks[g / LOCAL]->sizes[i * LOCAL + g % LOCAL];
    }
    groups.count = EXPERTS, groups.capacity = CAPACITY, groups.splits = r->groups, groups.dtype = GMM_I32;
    lin.groups = &groups, lin.in_features = lin.out_features = HIDDEN, lin.x = &mx, lin.w = &mw, lin.y = &my;
    check(r, gmm_linear_fwd(r->ctx, &lin, WORK(r)));
}
static void combine(rank *r) {
    const gmm_mat mrows = gmm_mat_packed(GMM_F32, r->returned), mout = gmm_mat_packed(GMM_F32, r->out);
    gmm_permute p = map_of(r);
    p.rows = &mrows, p.out = &mout, p.probs = r->probs;
    check(r, gmm_unpermute_fwd(r->ctx, &p, WORK(r)));
}

int main(void) {
    size_t there[RANKS][RANKS], back[RANKS][RANKS]; /* floats that ranks send one another */
    double worst = 0.0;
    two_ranks_open();
    for (int i = 0; i < RANKS; i++) two_ranks_use(i), start(i), dispatch(ranks[i]);
    for (int i = 0; i < RANKS; i++) two_ranks_wait(i); /* the host reads the sizes */
    for (int s = 0; s < RANKS; s++)
        for (int d = 0; d < RANKS; d++)
            there[s][d] = back[d][s] = (size_t)(ranks[s]->sizes[d * LOCAL] + ranks[s]->sizes[d * LOCAL + 1]) * HIDDEN;
    float *rows[] = {ranks[0]->rows, ranks[1]->rows}, *received[] = {ranks[0]->received, ranks[1]->received};
    float *y[] = {ranks[0]->y, ranks[1]->y}, *returned[] = {ranks[0]->returned, ranks[1]->returned};
    two_ranks_exchange(rows, received, there);
    for (int i = 0; i < RANKS; i++) two_ranks_use(i), multiply(ranks[i], i);
    two_ranks_exchange(y, returned, back);
    for (int i = 0; i < RANKS; i++) two_ranks_use(i), combine(ranks[i]), two_ranks_wait(i);
    for (int k = 0; k < RANKS * X; k++) {
        const rank *r = ranks[k / X];
        const int32_t *e = r->indices + k % X / HIDDEN * TOPK;
        const float factor = 0.7f * (float)(e[0] + 1) + 0.3f * (float)(e[1] + 1);
        worst = fmax(worst, fabs((double)(factor * r->x[k % X] - r->out[k % X])));
    }
    printf("two %s: rank 0 sends %zu of its %d rows, the largest error is %.1e\n", two_gpus ? "GPUs" : "CPU ranks",
           there[0][1] / HIDDEN, (int)SLOTS, worst);
    return !(worst < 1e-5);
}
