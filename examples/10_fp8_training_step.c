/* The gradients of a training step in FP8, over two micro-batches of an expert MLP: the quantized weights stay in a
   cache until the optimizer changes them, forward saves x and the activation as backward multiplies them, and weight
   gradients add up in fp32. They are compared with those in fp32. */
#include "gmm.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { GROUPS = 2, ROWS = 384, HIDDEN = 128, FFN = 64, MICRO_BATCHES = 2 };

static float x[MICRO_BATCHES][ROWS * HIDDEN], dy[MICRO_BATCHES][ROWS * HIDDEN], y[ROWS * HIDDEN], dx[ROWS * HIDDEN];
static float w1[GROUPS * 2 * FFN * HIDDEN], w2[GROUPS * HIDDEN * FFN];
static float dw1[2][GROUPS * 2 * FFN * HIDDEN], dw2[2][GROUPS * HIDDEN * FFN]; /* in fp32, in FP8 */

static void fill(float *a, int n, float scale, unsigned seed) {
    int i;
    for (i = 0; i < n; i++) {
        seed = seed * 1664525u + 1013904223u;
        a[i] = scale * ((float)(seed >> 8) / 8388608.0f - 1.0f);
    }
}
static void *buffer(size_t bytes) { return aligned_alloc(256, (bytes + 255) / 256 * 256 + 256); }
static int failed(gmm_context *ctx) { return fprintf(stderr, "%s\n", gmm_last_error(ctx)), 1; }

/* The weight gradients of both micro-batches. Returns nonzero after a failure. */
static int train(gmm_context *ctx, int fp8, size_t *saved_bytes) {
    const int32_t sizes[GROUPS] = { 253, 131 };
    const gmm_recipe recipe = gmm_recipe_of(GMM_RECIPE_FP8_BLOCK);
    int32_t weights_are_cached = 0;
    gmm_groups groups = GMM_ZERO;
    gmm_mlp_config config = GMM_ZERO;
    gmm_mlp_quant quant = GMM_ZERO;
    gmm_mlp mlp = GMM_ZERO;
    gmm_info fwd = GMM_ZERO, bwd = GMM_ZERO;
    gmm_mat mx = gmm_mat_packed(GMM_F32, x), mdy = gmm_mat_packed(GMM_F32, dy), my = gmm_mat_packed(GMM_F32, y);
    gmm_mat mdx = gmm_mat_packed(GMM_F32, dx), mw1 = gmm_mat_packed(GMM_F32, w1), mw2 = gmm_mat_packed(GMM_F32, w2);
    gmm_mat mdw1 = gmm_mat_packed(GMM_F32, dw1[fp8]), mdw2 = gmm_mat_packed(GMM_F32, dw2[fp8]);
    gmm_grad gw1 = GMM_ZERO, gw2 = GMM_ZERO;
    groups.count = GROUPS, groups.capacity = ROWS, groups.splits = sizes, groups.dtype = GMM_I32;
    config.hidden = HIDDEN, config.ffn = FFN, config.act = gmm_act_of(GMM_ACT_PRESET_SWIGLU);
    gw1.mat = &mdw1, gw2.mat = &mdw2, gw1.main_grad = gw2.main_grad = 1; /* adds to what is there */
    mlp.config = &config, mlp.groups = &groups, mlp.x = &mx, mlp.w1 = &mw1, mlp.w2 = &mw2, mlp.y = &my;
    mlp.dy = &mdy, mlp.dx = &mdx, mlp.dw1 = &gw1, mlp.dw2 = &gw2;
    if (fp8) {
        config.recipe = recipe.kind;
        config.save = GMM_SAVE_QUANTIZED;
        quant.recipe = &recipe;
        mlp.quant = &quant;
        if (gmm_mlp_query(ctx, GMM_OP_MLP_FWD, &mlp, &fwd) != GMM_OK) return failed(ctx);
        quant.weight_cache = buffer(quant.weight_cache_bytes = fwd.weight_cache_bytes);
        quant.weight_skip = &weights_are_cached; /* in a GPU context a word of device memory */
    }
    if (gmm_mlp_query(ctx, GMM_OP_MLP_FWD, &mlp, &fwd) != GMM_OK ||
        gmm_mlp_query(ctx, GMM_OP_MLP_BWD, &mlp, &bwd) != GMM_OK)
        return failed(ctx);
    const size_t bytes = fwd.workspace_bytes > bwd.workspace_bytes ? fwd.workspace_bytes : bwd.workspace_bytes;
    void *workspace = buffer(bytes);
    *saved_bytes = mlp.saved_bytes = fwd.saved_bytes;
    mlp.saved = buffer(mlp.saved_bytes);
    for (int i = 0; i < MICRO_BATCHES; i++) {
        mx.data = x[i];
        mdy.data = dy[i];
        if (gmm_mlp_fwd(ctx, &mlp, workspace, bytes, NULL) != GMM_OK) return failed(ctx);
        weights_are_cached = 1; /* until the optimizer changes the weights */
        if (fp8) mlp.x = NULL;  /* backward reads what forward has saved of x, which need not live on */
        if (gmm_mlp_bwd(ctx, &mlp, workspace, bytes, NULL) != GMM_OK) return failed(ctx);
        mlp.x = &mx;
    }
    free(mlp.saved), free(workspace), free(quant.weight_cache);
    return 0;
}

/* |a - b| / |b| over n elements. */
static double difference(const float *a, const float *b, int n) {
    double error = 0.0, sum = 0.0;
    for (int i = 0; i < n; i++) error += pow((double)a[i] - (double)b[i], 2.0), sum += pow((double)b[i], 2.0);
    return sqrt(error / sum);
}

int main(void) {
    gmm_context *ctx;
    size_t saved[2];
    if (gmm_create(&ctx, NULL, NULL) != GMM_OK) return 1;
    fill(x[0], MICRO_BATCHES * ROWS * HIDDEN, 1.0f, 1);
    fill(dy[0], MICRO_BATCHES * ROWS * HIDDEN, 1.0f, 2);
    fill(w1, GROUPS * 2 * FFN * HIDDEN, 0.15f, 3);
    fill(w2, GROUPS * HIDDEN * FFN, 0.2f, 4);
    for (int fp8 = 0; fp8 < 2; fp8++)
        if (train(ctx, fp8, &saved[fp8])) return 1;
    const double e1 = difference(dw1[1], dw1[0], GROUPS * 2 * FFN * HIDDEN);
    const double e2 = difference(dw2[1], dw2[0], GROUPS * HIDDEN * FFN);
    printf("gradients of FP8 differ by %.3f (w1) and %.3f (w2) of their norm\n", e1, e2);
    printf("backward needs x and %zu bytes, together %zu; in FP8 %zu without x\n", saved[0], saved[0] + sizeof x[0],
           saved[1]);
    gmm_destroy(ctx);
    return e1 < 0.1 && e2 < 0.1 ? 0 : 1;
}
