/* A plain C caller of the CUDA engines: this file is compiled by a C compiler and linked with the object that nvcc
   made of the implementation. The same descriptor runs in a GPU context and in a CPU context; results are compared. */
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

enum { GROUPS = 3, ROWS = 100, IN = 72, OUT = 40 };

static float x[ROWS * IN], w[GROUPS * OUT * IN], b[GROUPS * OUT], cpu_y[ROWS * OUT], gpu_y[ROWS * OUT];
static const int32_t sizes[GROUPS] = {41, 0, 59};

static void fill(float *a, int n, unsigned seed) {
    int i;
    for (i = 0; i < n; i++) {
        seed = seed * 1664525u + 1013904223u;
        a[i] = (float)(seed >> 8) / 8388608.0f - 1.0f;
    }
}

static void *allocate(gmm_space space, size_t bytes) {
    void *p = NULL;
    if (space == GMM_SPACE_CPU) p = aligned_alloc(256, (bytes + 255) / 256 * 256 + 256);
    else if (cudaMalloc(&p, bytes + 1) != cudaSuccess) p = NULL;
    if (!p) exit((fprintf(stderr, "out of memory\n"), 1));
    return p;
}

/* A copy of host memory in the context's memory. */
static void *place(gmm_space space, const void *from, size_t bytes) {
    void *p = allocate(space, bytes);
    if (cudaMemcpy(p, from, bytes, cudaMemcpyDefault) != cudaSuccess) exit((fprintf(stderr, "copy failed\n"), 1));
    return p;
}

/* y = w x + b in a context of its own. */
static void run(gmm_space space, float *y) {
    gmm_config config = GMM_ZERO;
    gmm_context *ctx;
    gmm_error error;
    config.space = space;
    if (gmm_create(&ctx, &config, &error) != GMM_OK) {
        printf("%s\n", error.text);
        exit(error.status != GMM_E_DEVICE); /* no GPU here: nothing to show */
    }
    gmm_groups groups = GMM_ZERO;
    groups.count = GROUPS;
    groups.capacity = ROWS;
    groups.splits = place(space, sizes, sizeof sizes);
    groups.dtype = GMM_I32;
    gmm_mat mx = gmm_mat_packed(GMM_F32, place(space, x, sizeof x));
    gmm_mat mw = gmm_mat_packed(GMM_F32, place(space, w, sizeof w));
    gmm_mat mb = gmm_mat_packed(GMM_F32, place(space, b, sizeof b));
    gmm_mat my = gmm_mat_packed(GMM_F32, allocate(space, sizeof cpu_y));
    gmm_linear linear = GMM_ZERO;
    linear.groups = &groups;
    linear.in_features = IN;
    linear.out_features = OUT;
    linear.x = &mx, linear.w = &mw, linear.bias = &mb, linear.y = &my;
    gmm_info info = GMM_ZERO;
    gmm_status s = gmm_linear_query(ctx, GMM_OP_LINEAR_FWD, &linear, &info);
    if (s == GMM_OK) { /* the default stream; a GPU context returns at once, the copy below waits */
        s = gmm_linear_fwd(ctx, &linear, allocate(space, info.workspace_bytes), info.workspace_bytes, NULL);
    }
    if (s != GMM_OK) exit((fprintf(stderr, "%s\n", gmm_last_error(ctx)), 1));
    if (cudaMemcpy(y, my.data, sizeof cpu_y, cudaMemcpyDefault) != cudaSuccess)
        exit((fprintf(stderr, "the GPU reports: %s\n", cudaGetErrorString(cudaGetLastError())), 1));
    printf("engine %s: y[0] = %.6f, last y = %.6f\n", gmm_engine_name(info.engine), (double)y[0],
           (double)y[ROWS * OUT - 1]);
    gmm_destroy(ctx); /* the buffers live as long as the process */
}

int main(void) {
    double worst = 0;
    int i;
    fill(x, ROWS * IN, 1);
    fill(w, GROUPS * OUT * IN, 2);
    fill(b, GROUPS * OUT, 3);
    run(GMM_SPACE_CUDA, gpu_y);
    run(GMM_SPACE_CPU, cpu_y);
    for (i = 0; i < ROWS * OUT; i++) worst = fmax(worst, fabs((double)gpu_y[i] - (double)cpu_y[i]));
    printf("largest difference %.2g\n", worst);
    return !(worst < 1e-5); /* other order of the sums, fp32 */
}
#endif
