/* A grouped linear layer captured in a CUDA graph once, then replayed with other group sizes: the sizes are read from
   device memory by the replay itself, so nothing is captured again. */
#include "gmm.h"

#include <stdio.h>

#ifndef HAVE_CUDA
int main(void) {
    puts("built without the CUDA engines");
    return 0;
}
#else
#include <cuda_runtime.h>
#include <stdlib.h>

enum { GROUPS = 4, ROWS = 64, IN = 32, OUT = 16, REPLAYS = 4 };

static void cuda(cudaError_t e) {
    if (e == cudaSuccess) return;
    fprintf(stderr, "CUDA: %s\n", cudaGetErrorString(e));
    exit(1);
}

static void *device(size_t bytes, const void *from) {
    void *p;
    cuda(cudaMalloc(&p, bytes));
    if (from) cuda(cudaMemcpy(p, from, bytes, cudaMemcpyHostToDevice));
    return p;
}

int main(void) {
    static const int32_t sizes[REPLAYS][GROUPS] = {{16, 16, 16, 16}, {0, 64, 0, 0}, {1, 2, 3, 4}, {0, 0, 0, 0}};
    static uint16_t x[ROWS * IN], w[GROUPS * OUT * IN]; /* bf16: row r holds r % 7, the weight of group g is g + 1 */
    static float y[ROWS * OUT];
    gmm_config config = GMM_ZERO;
    gmm_context *ctx;
    gmm_error error;
    int i, r, g, wrong = 0;

    config.space = GMM_SPACE_CUDA;
    if (gmm_create(&ctx, &config, &error) != GMM_OK) {
        printf("%s\n", error.text);
        return error.status != GMM_E_DEVICE; /* no GPU here: nothing to show */
    }
    for (i = 0; i < ROWS * IN; i++) x[i] = gmm_f32_to_bf16((float)(i / IN % 7));
    for (i = 0; i < GROUPS * OUT * IN; i++) w[i] = gmm_f32_to_bf16((float)(1 + i / (OUT * IN)));

    int32_t *splits = (int32_t *)device(sizeof sizes[0], sizes[0]);
    float *dev_y = (float *)device(sizeof y, NULL);
    gmm_groups groups = GMM_ZERO;
    groups.count = GROUPS;
    groups.capacity = ROWS; /* the most rows of a replay: it determines the shape of the launch, the sizes do not */
    groups.splits = splits;
    groups.dtype = GMM_I32;
    groups.tail = GMM_TAIL_ZERO;
    gmm_mat mx = gmm_mat_packed(GMM_BF16, device(sizeof x, x)), mw = gmm_mat_packed(GMM_BF16, device(sizeof w, w));
    gmm_mat my = gmm_mat_packed(GMM_F32, dev_y);
    gmm_linear linear = GMM_ZERO;
    linear.groups = &groups;
    linear.in_features = IN;
    linear.out_features = OUT;
    linear.x = &mx, linear.w = &mw, linear.y = &my;
    gmm_info info = GMM_ZERO;
    gmm_status s = gmm_linear_query(ctx, GMM_OP_LINEAR_FWD, &linear, &info);
    void *workspace = device(info.workspace_bytes + 1, NULL);

    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t layer;
    cuda(cudaStreamCreate(&stream));
    cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    if (s == GMM_OK) s = gmm_linear_fwd(ctx, &linear, workspace, info.workspace_bytes, stream);
    cuda(cudaStreamEndCapture(stream, &graph));
    if (s != GMM_OK) return fprintf(stderr, "%s\n", gmm_last_error(ctx)), 1;
    cuda(cudaGraphInstantiate(&layer, graph, 0));

    for (i = 0; i < REPLAYS; i++) {
        cuda(cudaMemcpyAsync(splits, sizes[i], sizeof sizes[i], cudaMemcpyHostToDevice, stream));
        cuda(cudaGraphLaunch(layer, stream));
        cuda(cudaMemcpyAsync(y, dev_y, sizeof y, cudaMemcpyDeviceToHost, stream));
        cuda(cudaStreamSynchronize(stream));
        for (r = g = 0; g < GROUPS; g++)
            for (int n = 0; n < sizes[i][g]; n++, r++)
                wrong += y[r * OUT] != (float)(IN * (r % 7) * (g + 1));
        printf("sizes %d %d %d %d: %d rows", (int)sizes[i][0], (int)sizes[i][1], (int)sizes[i][2], (int)sizes[i][3], r);
        for (; r < ROWS; r++) wrong += y[r * OUT + OUT - 1] != 0.0f; /* the tail */
        printf("%s\n", wrong ? ", wrong" : "");
    }
    cuda(cudaGraphExecDestroy(layer));
    cuda(cudaGraphDestroy(graph));
    gmm_destroy(ctx);
    cuda(cudaDeviceReset()); /* frees the device memory */
    return wrong != 0;
}
#endif
