/* An expert MLP, forward and backward: y = (SwiGLU(x w1^T) p) w2^T. The largest gradient of w1 is compared with
   a finite difference of the loss sum(y . dy). */
#include "gmm.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { GROUPS = 2, ROWS = 6, HIDDEN = 8, FFN = 5 };

static float x[ROWS * HIDDEN], w1[GROUPS * 2 * FFN * HIDDEN], w2[GROUPS * HIDDEN * FFN], prob[ROWS];
static float y[ROWS * HIDDEN], dy[ROWS * HIDDEN], dx[ROWS * HIDDEN], dw1[GROUPS * 2 * FFN * HIDDEN];
static float dw2[GROUPS * HIDDEN * FFN], dprob[ROWS];

static void fill(float *a, int n, unsigned seed) {
    int i;
    for (i = 0; i < n; i++) {
        seed = seed * 1664525u + 1013904223u;
        a[i] = (float)(seed >> 8) / 8388608.0f - 1.0f;
    }
}

static void *buffer(size_t bytes) { return aligned_alloc(256, (bytes + 255) / 256 * 256 + 256); }

static double loss(gmm_context *ctx, const gmm_mlp *mlp, void *workspace, size_t bytes) {
    double sum = 0.0;
    int i;
    if (gmm_mlp_fwd(ctx, mlp, workspace, bytes, NULL) != GMM_OK) {
        fprintf(stderr, "%s\n", gmm_last_error(ctx));
        exit(1);
    }
    for (i = 0; i < ROWS * HIDDEN; i++) sum += (double)y[i] * (double)dy[i];
    return sum;
}

int main(void) {
    const int32_t sizes[GROUPS] = {4, 2};
    gmm_context *ctx;
    if (gmm_create(&ctx, NULL, NULL) != GMM_OK) return 1;
    fill(x, ROWS * HIDDEN, 1);
    fill(w1, GROUPS * 2 * FFN * HIDDEN, 2);
    fill(w2, GROUPS * HIDDEN * FFN, 3);
    fill(dy, ROWS * HIDDEN, 4);
    fill(prob, ROWS, 5);

    gmm_groups groups = GMM_ZERO;
    groups.count = GROUPS;
    groups.capacity = ROWS;
    groups.splits = sizes;
    groups.dtype = GMM_I32;
    gmm_mlp_config config = GMM_ZERO; /* zero means default: no biases, FC1's output is saved */
    config.hidden = HIDDEN;
    config.ffn = FFN;
    config.prob = 1;
    config.act = gmm_act_of(GMM_ACT_PRESET_SWIGLU);
    gmm_mat mx = gmm_mat_packed(GMM_F32, x), mw1 = gmm_mat_packed(GMM_F32, w1), mw2 = gmm_mat_packed(GMM_F32, w2);
    gmm_mat my = gmm_mat_packed(GMM_F32, y), mdy = gmm_mat_packed(GMM_F32, dy), mdx = gmm_mat_packed(GMM_F32, dx);
    gmm_mat mdw1 = gmm_mat_packed(GMM_F32, dw1), mdw2 = gmm_mat_packed(GMM_F32, dw2);
    gmm_grad gw1 = GMM_ZERO, gw2 = GMM_ZERO; /* stored; main_grad = 1 would add */
    gw1.mat = &mdw1;
    gw2.mat = &mdw2;
    gmm_mlp mlp = GMM_ZERO;
    mlp.config = &config;
    mlp.groups = &groups;
    mlp.x = &mx, mlp.w1 = &mw1, mlp.w2 = &mw2, mlp.prob = prob, mlp.y = &my;
    mlp.dy = &mdy, mlp.dx = &mdx, mlp.dw1 = &gw1, mlp.dw2 = &gw2, mlp.dprob = dprob;

    gmm_info fwd = GMM_ZERO, bwd = GMM_ZERO;
    if (gmm_mlp_query(ctx, GMM_OP_MLP_FWD, &mlp, &fwd) != GMM_OK ||
        gmm_mlp_query(ctx, GMM_OP_MLP_BWD, &mlp, &bwd) != GMM_OK)
        return fprintf(stderr, "%s\n", gmm_last_error(ctx)), 1;
    size_t bytes = fwd.workspace_bytes > bwd.workspace_bytes ? fwd.workspace_bytes : bwd.workspace_bytes;
    void *workspace = buffer(bytes);
    mlp.saved_bytes = fwd.saved_bytes;
    mlp.saved = buffer(mlp.saved_bytes);

    loss(ctx, &mlp, workspace, bytes);
    if (gmm_mlp_bwd(ctx, &mlp, workspace, bytes, NULL) != GMM_OK)
        return fprintf(stderr, "%s\n", gmm_last_error(ctx)), 1;

    int i, best = 0;
    for (i = 1; i < GROUPS * 2 * FFN * HIDDEN; i++)
        if (fabsf(dw1[i]) > fabsf(dw1[best])) best = i;
    const float step = 1e-2f, old = w1[best];
    w1[best] = old + step;
    double up = loss(ctx, &mlp, workspace, bytes);
    w1[best] = old - step;
    double down = loss(ctx, &mlp, workspace, bytes), slope = (up - down) / (2.0 * (double)step);
    printf("d loss / d w1[%d]: backward %.5f, finite difference %.5f\n", best, (double)dw1[best], slope);
    free(mlp.saved);
    free(workspace);
    gmm_destroy(ctx);
    return fabs(slope - (double)dw1[best]) < 1e-3 * fabs(slope) ? 0 : 1;
}
