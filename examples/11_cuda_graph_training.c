/* Training steps of an expert MLP with row counts that change from step to step. On a GPU forward, backward and the
   update of the weights are captured in a CUDA graph once and replayed, which reads the counts from device memory; on
   the CPU the same step is called. The loss |y|^2 / 2, whose gradient is y, falls. */
#include "gmm.h"
#include <stdio.h>
#include <stdlib.h>
#ifdef HAVE_CUDA
#include <cuda_runtime.h>
static void cuda(cudaError_t e) { if (e) exit((fprintf(stderr, "CUDA: %s\n", cudaGetErrorString(e)), 1)); }
#endif

enum { GROUPS = 4, ROWS = 64, HIDDEN = 32, FFN = 16, STEPS = 60, W1 = GROUPS * 2 * FFN * HIDDEN,
       W2 = GROUPS * HIDDEN * FFN, X = ROWS * HIDDEN };

static gmm_context *ctx;
static gmm_runtime rt; /* copies and streams of the context's memory */
static gmm_config config = GMM_ZERO;
static void *workspace; static size_t workspace_bytes;
static void check(gmm_status s) { if (s) exit((fprintf(stderr, "%s\n", gmm_last_error(ctx)), 1)); }

static void *buffer(size_t bytes) {
    void *p = NULL;
#ifdef HAVE_CUDA
    if (config.space == GMM_SPACE_CUDA) return cuda(cudaMalloc(&p, bytes + 256)), p;
#endif
    return (p = aligned_alloc(256, (bytes / 256 + 1) * 256)) ? p : (exit(1), NULL);
}
static float *draw(int n, float scale, unsigned seed) {
    static float host[W1];
    float *p = (float *)buffer((size_t)n * sizeof(float));
    for (int i = 0; i < n; i++, seed = seed * 1664525u + 1013904223u)
        host[i] = scale * ((float)(seed >> 8) / 8388608.0f - 1.0f);
    check(rt.copy(rt.self, p, host, (size_t)n * sizeof(float), NULL)), check(rt.stream_sync(rt.self, NULL));
    return p;
}
static void descend(float *w, const float *dw, int n, float rate, gmm_stream stream) { /* w -= rate dw */
    const gmm_mat x = gmm_mat_packed(GMM_F32, dw), y = gmm_mat_packed(GMM_F32, w);
    gmm_accumulation sum = GMM_ZERO;
    sum.count = 1, sum.rows = 1, sum.cols = n, sum.x = &x, sum.y = &y, sum.scale = -rate, sum.beta = 1.0f;
    check(gmm_accumulate(ctx, &sum, workspace, workspace_bytes, stream));
}
static void step(const gmm_mlp *mlp, gmm_stream stream) {
    check(gmm_mlp_fwd(ctx, mlp, workspace, workspace_bytes, stream));
    check(gmm_mlp_bwd(ctx, mlp, workspace, workspace_bytes, stream));
    descend((float *)mlp->w1->data, (const float *)mlp->dw1->mat->data, W1, 0.002f, stream);
    descend((float *)mlp->w2->data, (const float *)mlp->dw2->mat->data, W2, 0.002f, stream);
}

int main(void) {
    static const int32_t sizes[3][GROUPS] = {{16, 16, 16, 16}, {0, 64, 0, 0}, {1, 40, 3, 20}};
    static float y[X]; double loss[STEPS] = {0};
    gmm_stream stream = NULL;
    gmm_groups groups = GMM_ZERO;
    gmm_mlp_config shape = GMM_ZERO;
    gmm_mlp mlp = GMM_ZERO; gmm_grad gw1 = GMM_ZERO, gw2 = GMM_ZERO;
    gmm_info fwd = GMM_ZERO, bwd = GMM_ZERO;
    config.space = GMM_SPACE_CUDA;
    if (gmm_create(&ctx, &config, NULL) != GMM_OK) config.space = GMM_SPACE_CPU; /* no GPU, or no CUDA in the build */
    if (!ctx && gmm_create(&ctx, &config, NULL) != GMM_OK) return 1;
    check(gmm_runtime_of(ctx, &rt));
    int32_t *splits = (int32_t *)buffer(sizeof sizes[0]);
    groups.count = GROUPS, groups.capacity = ROWS, groups.splits = splits, groups.dtype = GMM_I32;
    groups.tail = GMM_TAIL_ZERO, shape.hidden = HIDDEN, shape.ffn = FFN, shape.act = gmm_act_of(GMM_ACT_PRESET_SWIGLU);
    gmm_mat mx = gmm_mat_packed(GMM_F32, draw(X, 1.0f, 1)), my = gmm_mat_packed(GMM_F32, buffer(sizeof y));
    gmm_mat mw1 = gmm_mat_packed(GMM_F32, draw(W1, 0.3f, 2)), mw2 = gmm_mat_packed(GMM_F32, draw(W2, 0.3f, 3));
    gmm_mat mdw1 = gmm_mat_packed(GMM_F32, buffer(W1 * 4)), mdw2 = gmm_mat_packed(GMM_F32, buffer(W2 * 4));
    gw1.mat = &mdw1, gw2.mat = &mdw2, mlp.dw1 = &gw1, mlp.dw2 = &gw2;
    mlp.config = &shape, mlp.groups = &groups, mlp.x = &mx, mlp.w1 = &mw1, mlp.w2 = &mw2, mlp.y = mlp.dy = &my;
    check(gmm_mlp_query(ctx, GMM_OP_MLP_FWD, &mlp, &fwd));
    check(gmm_mlp_query(ctx, GMM_OP_MLP_BWD, &mlp, &bwd));
    workspace_bytes = fwd.workspace_bytes > bwd.workspace_bytes ? fwd.workspace_bytes : bwd.workspace_bytes;
    workspace = buffer(workspace_bytes);
    mlp.saved = buffer(mlp.saved_bytes = fwd.saved_bytes);
#ifdef HAVE_CUDA
    cudaGraph_t graph; cudaGraphExec_t captured = NULL;
    if (config.space == GMM_SPACE_CUDA) {
        check(rt.stream_create(rt.self, 0, &stream));
        cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
        step(&mlp, stream);
        cuda(cudaStreamEndCapture(stream, &graph));
        cuda(cudaGraphInstantiate(&captured, graph, 0));
    }
#endif
    for (int i = 0; i < STEPS; i++) {
        check(rt.copy(rt.self, splits, sizes[i % 3], sizeof sizes[0], stream));
#ifdef HAVE_CUDA
        if (captured) cuda(cudaGraphLaunch(captured, stream));
        else
#endif
        step(&mlp, stream);
        check(rt.copy(rt.self, y, my.data, sizeof y, stream));
        check(rt.stream_sync(rt.self, stream));
        for (int k = 0; k < X; k++) loss[i] += 0.5 * (double)y[k] * (double)y[k];
    }
    for (int i = 0; i < 3; i++) printf("%s, counts %2d %2d %2d %2d: loss %.4f, at last %.4f\n", stream ? "GPU" : "CPU",
        (int)sizes[i][0], (int)sizes[i][1], (int)sizes[i][2], (int)sizes[i][3], loss[i], loss[STEPS - 3 + i]);
    gmm_destroy(ctx);
    return !(loss[STEPS - 3] < 0.5 * loss[0] && loss[STEPS - 1] < 0.5 * loss[2]);
}
