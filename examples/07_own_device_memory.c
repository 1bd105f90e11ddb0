/* Own device memory: the library allocates none, so one cudaMalloc holds all that an expert MLP needs, forward and
   backward. Size queries come first, with descriptors whose addresses are still NULL; then every buffer is cut from
   the one block. */
#include "gmm.h"

#include <stdio.h>

#ifndef HAVE_CUDA
int main(void) {
    puts("built without the CUDA engines");
    return 0;
}
#else
#include <cuda_runtime.h>
#include <math.h>
#include <stdlib.h>

enum { GROUPS = 3, ROWS = 48, HIDDEN = 40, FFN = 24, W = GROUPS * HIDDEN * FFN, X = ROWS * HIDDEN };

typedef struct arena { char *base; size_t used; } arena; /* base NULL: only counts bytes */

static void *take(arena *a, size_t bytes) {
    void *p = a->base ? a->base + a->used : NULL;
    a->used += (bytes + 255) / 256 * 256;
    return p;
}

static double dot(const void *a, const void *b, int n) {
    static float host[2][X > W ? X : W];
    double sum = 0;
    if (cudaMemcpy(host[0], a, sizeof(float) * (size_t)n, cudaMemcpyDeviceToHost) != cudaSuccess ||
        cudaMemcpy(host[1], b, sizeof(float) * (size_t)n, cudaMemcpyDeviceToHost) != cudaSuccess)
        exit((fprintf(stderr, "the GPU reports: %s\n", cudaGetErrorString(cudaGetLastError())), 1));
    for (int i = 0; i < n; i++) sum += (double)host[0][i] * (double)host[1][i];
    return sum;
}

static void fill(void *to, int n, unsigned seed) {
    static float host[X > W ? X : W];
    for (int i = 0; i < n; i++) host[i] = (float)((seed = seed * 1664525u + 1013904223u) >> 8) / 8388608.0f - 1.0f;
    (void)cudaMemcpy(to, host, sizeof(float) * (size_t)n, cudaMemcpyHostToDevice);
}

int main(void) {
    const int32_t sizes[GROUPS] = {20, 0, 28};
    gmm_config create = GMM_ZERO;
    gmm_context *ctx;
    gmm_error error;
    create.space = GMM_SPACE_CUDA;
    if (gmm_create(&ctx, &create, &error) != GMM_OK) {
        printf("%s\n", error.text);
        return error.status != GMM_E_DEVICE; /* no GPU here: nothing to show */
    }
    gmm_mat none = gmm_mat_packed(GMM_F32, NULL), x = none, w1 = none, w2 = none, y = none, dy = none, dx = none;
    gmm_mat dw1 = none, dw2 = none;
    gmm_grad grad1 = GMM_ZERO, grad2 = GMM_ZERO;
    gmm_groups groups = GMM_ZERO;
    gmm_mlp_config config = GMM_ZERO;
    gmm_mlp mlp = GMM_ZERO;
    groups.count = GROUPS, groups.capacity = ROWS, groups.dtype = GMM_I32;
    config.hidden = HIDDEN, config.ffn = FFN, config.act.kind = GMM_ACT_RELU;
    grad1.mat = &dw1, grad2.mat = &dw2;
    mlp.config = &config, mlp.groups = &groups, mlp.x = &x, mlp.w1 = &w1, mlp.w2 = &w2, mlp.y = &y;
    mlp.dy = &dy, mlp.dx = &dx, mlp.dw1 = &grad1, mlp.dw2 = &grad2;

    gmm_info fwd = GMM_ZERO, bwd = GMM_ZERO;
    gmm_status s = gmm_mlp_query(ctx, GMM_OP_MLP_FWD, &mlp, &fwd);
    if (s == GMM_OK) s = gmm_mlp_query(ctx, GMM_OP_MLP_BWD, &mlp, &bwd);
    if (s != GMM_OK) return fprintf(stderr, "%s\n", gmm_last_error(ctx)), 1;
    const size_t bytes = fwd.workspace_bytes > bwd.workspace_bytes ? fwd.workspace_bytes : bwd.workspace_bytes;
    arena a = {NULL, 0};
    void *workspace = NULL, *splits = NULL, *block = NULL;
    for (int pass = 0; pass < 2; pass++) { /* the first pass counts, the second places */
        if (pass == 1 && cudaMalloc(&block, a.used) != cudaSuccess) return puts("out of device memory"), 1;
        a.base = (char *)block, a.used = 0;
        workspace = take(&a, bytes), splits = take(&a, sizeof sizes);
        mlp.saved = take(&a, mlp.saved_bytes = fwd.saved_bytes);
        x.data = take(&a, X * 4), y.data = take(&a, X * 4), dx.data = take(&a, X * 4), dy.data = take(&a, X * 4);
        w1.data = take(&a, W * 4), w2.data = take(&a, W * 4), dw1.data = take(&a, W * 4), dw2.data = take(&a, W * 4);
    }
    groups.splits = splits;
    fill(x.data, X, 1), fill(w1.data, W, 2), fill(w2.data, W, 3), fill(dy.data, X, 4);
    (void)cudaMemcpy(splits, sizes, sizeof sizes, cudaMemcpyHostToDevice);
    s = gmm_mlp_fwd(ctx, &mlp, workspace, bytes, NULL);
    if (s == GMM_OK) s = gmm_mlp_bwd(ctx, &mlp, workspace, bytes, NULL);
    if (s != GMM_OK) return fprintf(stderr, "%s\n", gmm_last_error(ctx)), 1;

    /* with ReLU and no bias y is homogeneous in x, in w1 and in w2: four equal sums */
    double e = dot(y.data, dy.data, X), ex = dot(dx.data, x.data, X);
    double e1 = dot(dw1.data, w1.data, W), e2 = dot(dw2.data, w2.data, W);
    printf("engine %s, one block of %zu bytes\ny dy %.4f, x dx %.4f, w1 dw1 %.4f, w2 dw2 %.4f\n",
           gmm_engine_name(bwd.engine), a.used, e, ex, e1, e2);
    gmm_destroy(ctx), (void)cudaFree(block);
    return !(fabs(ex - e) + fabs(e1 - e) + fabs(e2 - e) < 1e-4 * fabs(e));
}
#endif
