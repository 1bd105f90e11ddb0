/* A mixture-of-experts layer, forward and backward: top-k routing of the router's logits, permute, expert MLP,
   unpermute. Gradients of the loss sum(out . dout) are compared with finite differences. */
#include "gmm.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { TOKENS = 7, EXPERTS = 4, TOPK = 2, SLOTS = TOKENS * TOPK, HIDDEN = 6, FFN = 5, W = EXPERTS * HIDDEN * FFN };

static float x[TOKENS * HIDDEN], logits[TOKENS * EXPERTS], w1[2 * W], w2[W], dout[TOKENS * HIDDEN];
static float probs[SLOTS], rows[SLOTS * HIDDEN], row_probs[SLOTS], y[SLOTS * HIDDEN], out[TOKENS * HIDDEN];
static float dy[SLOTS * HIDDEN], drows[SLOTS * HIDDEN], drow_probs[SLOTS], dprobs[SLOTS];
static float dx[TOKENS * HIDDEN], dlogits[TOKENS * EXPERTS], dw1[2 * W], dw2[W];
static int32_t indices[SLOTS], row_of[SLOTS], slot_of[SLOTS], sizes[EXPERTS];
static uint32_t fault; /* fault bits for invalid indices, maps or splits, which only the device can see on a GPU */
static gmm_context *ctx;

static void check(gmm_status status) {
    if (status == GMM_OK && !fault) return;
    fprintf(stderr, "%s, fault word 0x%x: %s\n", gmm_status_name(status), (unsigned)fault, gmm_last_error(ctx));
    exit(1);
}

/* Large enough here. gmm_mlp_query and the other queries return the size that a call needs; a call refuses less. */
static _Alignas(256) char workspace[4 << 20], saved[1 << 14];
#define WORK workspace, sizeof workspace, NULL
#define M(name) const gmm_mat m##name = gmm_mat_packed(GMM_F32, name)

static double layer(int backward) {
    gmm_route route = GMM_ZERO;
    gmm_permute map = GMM_ZERO, dispatch, combine;
    gmm_groups groups = GMM_ZERO;
    gmm_mlp_config config = GMM_ZERO;
    gmm_mlp mlp = GMM_ZERO;
    gmm_grad gw1 = GMM_ZERO, gw2 = GMM_ZERO;
    double loss = 0.0;
    M(x); M(logits); M(w1); M(w2); M(rows); M(y); M(out); M(dout); M(dy); M(drows); M(dx); M(dlogits); M(dw1); M(dw2);
    route.experts = map.experts = groups.count = EXPERTS, route.tokens = map.tokens = TOKENS;
    route.topk = map.topk = config.topk = TOPK, route.normalize = 1, route.logits = &mlogits;
    route.indices = indices, route.probs = probs, route.dprobs = dprobs, route.dlogits = &mdlogits;
    map.capacity = groups.capacity = SLOTS, map.hidden = config.hidden = HIDDEN, config.ffn = FFN, config.prob = 1;
    map.indices = indices, map.row_of = row_of, map.slot_of = slot_of, map.sizes = sizes;
    groups.splits = sizes, groups.dtype = GMM_I32, groups.fault = map.fault = &fault;
    config.act = gmm_act_of(GMM_ACT_PRESET_SWIGLU);
    mlp.config = &config, mlp.groups = &groups, mlp.w1 = &mw1, mlp.w2 = &mw2, mlp.x = &mrows, mlp.prob = row_probs;
    mlp.y = &my, mlp.dy = &mdy, mlp.dx = &mdrows, mlp.dprob = drow_probs, mlp.dw1 = &gw1, mlp.dw2 = &gw2;
    gw1.mat = &mdw1, gw2.mat = &mdw2, mlp.saved = saved, mlp.saved_bytes = sizeof saved;
    dispatch = combine = map; /* each call gets the operands that it reads or writes, and no others */

    check(gmm_topk_fwd(ctx, &route, WORK));
    check(gmm_permute_map(ctx, &map, WORK));
    dispatch.x = &mx, dispatch.probs = probs, dispatch.rows = &mrows, dispatch.row_probs = row_probs;
    check(gmm_permute_fwd(ctx, &dispatch, WORK));
    check(gmm_mlp_fwd(ctx, &mlp, WORK));
    combine.rows = &my, combine.out = &mout; /* without probs: the MLP has weighted its rows */
    check(gmm_unpermute_fwd(ctx, &combine, WORK));
    for (int i = 0; i < TOKENS * HIDDEN; i++) loss += (double)out[i] * (double)dout[i];
    if (!backward) return loss;

    dispatch = combine = map;
    combine.dout = &mdout, combine.drows = &mdy;
    check(gmm_unpermute_bwd(ctx, &combine, WORK));
    check(gmm_mlp_bwd(ctx, &mlp, WORK));
    dispatch.drows = &mdrows, dispatch.drow_probs = drow_probs, dispatch.dx = &mdx, dispatch.dprobs = dprobs;
    check(gmm_permute_bwd(ctx, &dispatch, WORK));
    check(gmm_topk_bwd(ctx, &route, WORK));
    return loss;
}

int main(void) {
    const struct { const char *name; float *at, *grad; int n; } inputs[] = {
        {"x", x, dx, TOKENS * HIDDEN}, {"logits", logits, dlogits, TOKENS * EXPERTS}, {"w1", w1, dw1, 2 * W},
        {"w2", w2, dw2, W}, {"dout", dout, NULL, TOKENS * HIDDEN}};
    unsigned seed = 1, wrong = 0;
    for (int k = 0; k < 5; k++)
        for (int i = 0; i < inputs[k].n; i++, seed = seed * 1664525u + 1013904223u)
            inputs[k].at[i] = (float)(seed >> 8) / 8388608.0f - 1.0f;
    gmm_config config = GMM_ZERO;
    config.threads = 1; /* the CPU engine's workspace grows with its threads */
    if (gmm_create(&ctx, &config, NULL) != GMM_OK) return 1;
    printf("loss %.6f", layer(1));
    printf(", rows of the experts: %d %d %d %d\n", sizes[0], sizes[1], sizes[2], sizes[3]);
    for (int k = 0; k < 4; k++) { /* the largest gradient of each input */
        int i = 0;
        for (int j = 1; j < inputs[k].n; j++) i = fabsf(inputs[k].grad[j]) > fabsf(inputs[k].grad[i]) ? j : i;
        const float old = inputs[k].at[i], step = 4e-3f;
        const double gradient = (double)inputs[k].grad[i];
        inputs[k].at[i] = old + step;
        double slope = layer(0);
        inputs[k].at[i] = old - step;
        slope = (slope - layer(0)) / (2.0 * (double)step);
        inputs[k].at[i] = old;
        wrong |= !(fabs(slope - gradient) < 2e-3 * fabs(slope));
        printf("d loss / d %s[%d]: backward %.5f, finite difference %.5f\n", inputs[k].name, i, gradient, slope);
    }
    gmm_destroy(ctx);
    return (int)wrong;
}
