/* A mixture-of-experts layer, forward and backward, as one call each: top-k routing of the router's logits, gather,
   expert MLP, combine. Gradients of the loss sum(out . dout) are compared with finite differences. */
#include "gmm.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { TOKENS = 7, EXPERTS = 4, TOPK = 2, SLOTS = TOKENS * TOPK, HIDDEN = 6, FFN = 5, W = EXPERTS * HIDDEN * FFN };

static float x[TOKENS * HIDDEN], logits[TOKENS * EXPERTS], w1[2 * W], w2[W], dout[TOKENS * HIDDEN];
static float probs[SLOTS], out[TOKENS * HIDDEN], dx[TOKENS * HIDDEN], dlogits[TOKENS * EXPERTS], dw1[2 * W], dw2[W];
static int32_t indices[SLOTS], sizes[EXPERTS];
static uint32_t fault; /* fault bits for invalid indices and rows past the capacity, which only the device can see */
static void *saved, *workspace;
static gmm_context *ctx;

static void check(gmm_status status) {
    if (status == GMM_OK && !fault) return;
    fprintf(stderr, "%s, fault word 0x%x: %s\n", gmm_status_name(status), (unsigned)fault, gmm_last_error(ctx));
    exit(1);
}

/* Memory of a queried size. On a GPU it is the caller's device memory. */
static void *memory(void *old, size_t bytes) {
    void *p;
    free(old);
    if (!(p = aligned_alloc(256, (bytes + 255) / 256 * 256))) exit(1);
    return p;
}

#define M(name) const gmm_mat m##name = gmm_mat_packed(GMM_F32, name)

static double layer(int backward) {
    gmm_route route = GMM_ZERO;
    gmm_mlp_config config = GMM_ZERO;
    gmm_mlp mlp = GMM_ZERO;
    gmm_grad gw1 = GMM_ZERO, gw2 = GMM_ZERO;
    gmm_moe moe = GMM_ZERO;
    gmm_info info = GMM_ZERO;
    double loss = 0.0;
    M(x); M(logits); M(w1); M(w2); M(out); M(dout); M(dx); M(dlogits); M(dw1); M(dw2);
    route.experts = EXPERTS, route.tokens = TOKENS, route.topk = TOPK, route.normalize = 1, route.logits = &mlogits;
    route.indices = indices, route.probs = probs, route.dlogits = &mdlogits;
    config.hidden = HIDDEN, config.ffn = FFN, config.act = gmm_act_of(GMM_ACT_PRESET_SWIGLU);
    config.prob = 1; /* probabilities weight FC2's input, so that no outputs of experts are saved */
    mlp.config = &config, mlp.w1 = &mw1, mlp.w2 = &mw2, mlp.dw1 = &gw1, mlp.dw2 = &gw2;
    gw1.mat = &mdw1, gw2.mat = &mdw2;
    moe.experts = EXPERTS, moe.tokens = TOKENS, moe.topk = TOPK, moe.route = &route, moe.mlp = &mlp;
    moe.x = &mx, moe.out = &mout, moe.dout = &mdout, moe.dx = &mdx, moe.sizes = sizes, moe.fault = &fault;

    check(gmm_moe_query(ctx, GMM_OP_MOE_FWD, &moe, &info));
    moe.saved = saved = memory(saved, info.saved_bytes), moe.saved_bytes = info.saved_bytes;
    workspace = memory(workspace, info.workspace_bytes);
    check(gmm_moe_fwd(ctx, &moe, workspace, info.workspace_bytes, NULL));
    for (int i = 0; i < TOKENS * HIDDEN; i++) loss += (double)out[i] * (double)dout[i];
    if (!backward) return loss;

    check(gmm_moe_query(ctx, GMM_OP_MOE_BWD, &moe, &info));
    workspace = memory(workspace, info.workspace_bytes);
    check(gmm_moe_bwd(ctx, &moe, workspace, info.workspace_bytes, NULL));
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
    if (gmm_create(&ctx, NULL, NULL) != GMM_OK) return 1;
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
    free(saved);
    free(workspace);
    gmm_destroy(ctx);
    return (int)wrong;
}
