/* shapes - grouped products of random shapes on a GPU, gmm beside cuBLAS: finds the shapes for which gmm is slow.
   Operations: forward, dgrad, wgrad stored in bf16 and added into fp32, all of bf16 operands; forward of FP8 operands
   with a scale per tensor. Groups have equal sizes, which cuBLAS gets from the host (cublasGemmStridedBatchedEx; FP8:
   cublasLtMatmul of a batch) and gmm from device memory. Prints a row per product, then means by operation and by the
   time that cuBLAS takes, then the slowest rows of each operation.
   Options: --seconds=60, --seed=1, --ms=2 (of a contender in a turn; there are five turns), --lowest=10,
   --models: hidden and ffn sizes of current models alone, 4 groups and more. */
#include "gmm.h"

#include <cublasLt.h>
#include <cublas_v2.h>
#include <cuda_runtime.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { TURNS = 5, MOST_ROWS = 1 << 16, MOST_GROUPS = 256 };
static const size_t WORKSPACE = (size_t)4 << 30, LT_WORKSPACE = (size_t)64 << 20;

typedef enum operation { FWD, DGRAD, WGRAD, WGRAD_F32, FP8, OPERATIONS } operation;
static const struct {
    const char *name;
    gmm_op op;
} OPERATION[OPERATIONS] = {{"fwd", GMM_OP_LINEAR_FWD}, {"dgrad", GMM_OP_LINEAR_DGRAD}, {"wgrad", GMM_OP_LINEAR_WGRAD},
                           {"wgrad_f32", GMM_OP_LINEAR_WGRAD}, {"fp8", GMM_OP_LINEAR_FWD}};

/* A product: `groups` of `rows` rows, y [rows, n] = x [rows, k] w^T. */
typedef struct shape { int64_t groups, rows, k, n; } shape;
typedef struct result {
    operation op;
    shape s;
    double us, peer_us;
} result;

static struct {
    cudaStream_t stream;
    cudaEvent_t begin, end;
    gmm_context *ctx;
    cublasHandle_t blas;
    cublasLtHandle_t lt;
    void *workspace, *lt_workspace;
    int32_t *sizes;
    unsigned long long *count;
    uint64_t random;
    double ms;
    int models;
    /* the product at hand */
    shape s;
    operation op;
    uint16_t *x, *w, *dy;
    char *out[2]; /* of gmm and of cuBLAS */
    gmm_groups groups;
    gmm_mat mat[4], fp8[2]; /* x, w, dy, result; FP8 copies of x and w */
    gmm_grad grad;
    gmm_linear linear;
    cublasLtMatmulDesc_t desc;
    cublasLtMatrixLayout_t layout[3];
    cublasLtMatmulAlgo_t algo;
} B;

static void die(const char *what, const char *why) {
    fprintf(stderr, "shapes: %s: %s\n", what, why);
    exit(1);
}
static void cuda(cudaError_t e, const char *what) {
    if (e != cudaSuccess) die(what, cudaGetErrorString(e));
}
static void ok(gmm_status s) {
    if (s != GMM_OK) die("gmm", gmm_last_error(B.ctx));
}
static void blas(cublasStatus_t s, const char *what) {
    if (s != CUBLAS_STATUS_SUCCESS) die(what, cublasGetStatusString(s));
}
static void *device_alloc(int64_t bytes) {
    void *p = NULL;
    cuda(cudaMalloc(&p, (size_t)bytes + 256), "memory");
    return p;
}

/* A number in [0, 1). */
static double uniform(void) {
    B.random = B.random * 6364136223846793005u + 1442695040888963407u;
    return (double)(B.random >> 11) * 0x1p-53;
}

/* Sums of two uniform numbers, in [-1, 1). */
static __global__ void fill(uint16_t *to, int64_t count, uint32_t seed) {
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < count; i += (int64_t)gridDim.x * blockDim.x) {
        uint32_t v = (uint32_t)i * 2654435761u + seed;
        v = (v ^ v >> 15) * 2246822519u;
        v = (v ^ v >> 13) * 3266489917u;
        v ^= v >> 16;
        to[i] = gmm_f32_to_bf16((float)(v & 0xFFFF) * 0x1p-16f + (float)(v >> 16) * 0x1p-16f - 1.0f);
    }
}
/* Counts the elements of two results that are further apart than rounding explains. */
static __global__ void count_different(const char *a, const char *b, int64_t count, int f32, float bound,
                                       unsigned long long *n) {
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < count; i += (int64_t)gridDim.x * blockDim.x) {
        const float u = f32 ? ((const float *)a)[i] : gmm_bf16_to_f32(((const uint16_t *)a)[i]);
        const float v = f32 ? ((const float *)b)[i] : gmm_bf16_to_f32(((const uint16_t *)b)[i]);
        if (!(fabsf(u - v) <= bound + 0.02f * (fabsf(u) + fabsf(v)))) atomicAdd(n, 1ull);
    }
}

/* ------------------------------------------------------------------------------------------------ Products --- */

static int64_t pick(const int *of, int count) { return of[(int)(uniform() * count)]; }

/* Draws a product of 2e9 to 4e12 operations whose operands have at most 3e9 elements each. */
static shape draw(void) {
    static const int any[] = {64,   128,  256,  384,  512,  640,  704,  768,  896,  1024, 1152, 1408, 1536, 1792,  2048,
                              2304, 2560, 2816, 2880, 3072, 3584, 4096, 5120, 5760, 6144, 7168, 8192, 14336, 16384};
    static const int model[] = {512, 640, 704, 768, 896, 1024, 1152, 1408, 1536, 2048, 2880, 4096, 5120, 5760, 7168};
    for (;;) {
        shape s;
        double elements, operations;
        s.groups = B.models ? (int64_t)4 << (int)(uniform() * 6) : (int64_t)1 << (int)(uniform() * 9);
        s.rows = (int64_t)exp2((B.models ? 5.5 : 4.0) + uniform() * (B.models ? 6.0 : 9.5));
        if (uniform() < 0.5) s.rows = (s.rows + 63) / 64 * 64;
        s.k = B.models ? pick(model, sizeof model / sizeof *model) : pick(any, sizeof any / sizeof *any);
        s.n = B.models ? pick(model, sizeof model / sizeof *model) : pick(any, sizeof any / sizeof *any);
        if (!B.models && uniform() < 0.1) s.k += 8 * (int)(uniform() * 16);
        if (!B.models && uniform() < 0.1) s.n += 8 * (int)(uniform() * 16);
        elements = (double)s.groups * fmax((double)(s.k * s.n), (double)s.rows * (double)(s.k > s.n ? s.k : s.n));
        operations = 2.0 * (double)(s.groups * s.rows) * (double)(s.k * s.n);
        if (elements < 3e9 && operations > 2e9 && operations < 4e12) return s;
    }
}

static int adds(void) { return B.op == WGRAD_F32; }
static int64_t result_elements(void) {
    const shape *s = &B.s;
    return s->groups * (B.op == DGRAD ? s->rows * s->k : B.op == WGRAD || adds() ? s->n * s->k : s->rows * s->n);
}

static void run_gmm(void) {
    switch (OPERATION[B.op].op) {
    case GMM_OP_LINEAR_FWD: ok(gmm_linear_fwd(B.ctx, &B.linear, B.workspace, WORKSPACE, B.stream)); break;
    case GMM_OP_LINEAR_DGRAD: ok(gmm_linear_dgrad(B.ctx, &B.linear, B.workspace, WORKSPACE, B.stream)); break;
    default: ok(gmm_linear_wgrad(B.ctx, &B.linear, B.workspace, WORKSPACE, B.stream)); break;
    }
}
/* cuBLAS stores columns, so that it sees every matrix transposed. */
static void run_peer(void) {
    const shape *s = &B.s;
    const float one = 1.0f, beta = adds() ? 1.0f : 0.0f;
    const int rows = (int)s->rows, k = (int)s->k, n = (int)s->n, groups = (int)s->groups;
    const cudaDataType_t bf16 = CUDA_R_16BF;
    switch (B.op) {
    case FWD:
        blas(cublasGemmStridedBatchedEx(B.blas, CUBLAS_OP_T, CUBLAS_OP_N, n, rows, k, &one, B.w, bf16, k, s->n * s->k,
                                        B.x, bf16, k, s->rows * s->k, &beta, B.out[1], bf16, n, s->rows * s->n, groups,
                                        CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT), "forward");
        break;
    case DGRAD:
        blas(cublasGemmStridedBatchedEx(B.blas, CUBLAS_OP_N, CUBLAS_OP_N, k, rows, n, &one, B.w, bf16, k, s->n * s->k,
                                        B.dy, bf16, n, s->rows * s->n, &beta, B.out[1], bf16, k, s->rows * s->k, groups,
                                        CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT), "dgrad");
        break;
    case FP8:
        blas(cublasLtMatmul(B.lt, B.desc, &one, B.fp8[1].data, B.layout[0], B.fp8[0].data, B.layout[1], &beta, B.out[1],
                            B.layout[2], B.out[1], B.layout[2], &B.algo, B.lt_workspace, LT_WORKSPACE, B.stream),
             "cublasLtMatmul");
        break;
    default:
        blas(cublasGemmStridedBatchedEx(B.blas, CUBLAS_OP_N, CUBLAS_OP_T, k, n, rows, &one, B.x, bf16, k,
                                        s->rows * s->k, B.dy, bf16, n, s->rows * s->n, &beta, B.out[1],
                                        adds() ? CUDA_R_32F : bf16, k, s->n * s->k, groups, CUBLAS_COMPUTE_32F,
                                        CUBLAS_GEMM_DEFAULT), "wgrad");
        break;
    }
}

/* The FP8 product of cuBLASLt. Returns 0 if the library has none for the shape. */
static int make_fp8_peer(void) {
    const cublasOperation_t transposed = CUBLAS_OP_T;
    const shape *s = &B.s;
    const int64_t stride[3] = {s->n * s->k, s->rows * s->k, s->rows * s->n};
    const int32_t groups = (int32_t)s->groups;
    const float *const scale[2] = {(const float *)B.fp8[1].scale, (const float *)B.fp8[0].scale};
    cublasLtMatmulPreference_t want;
    cublasLtMatmulHeuristicResult_t found;
    int count = 0, i;
    blas(cublasLtMatmulDescCreate(&B.desc, CUBLAS_COMPUTE_32F, CUDA_R_32F), "desc");
    cublasLtMatmulDescSetAttribute(B.desc, CUBLASLT_MATMUL_DESC_TRANSA, &transposed, sizeof transposed);
    cublasLtMatmulDescSetAttribute(B.desc, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, &scale[0], sizeof scale[0]);
    cublasLtMatmulDescSetAttribute(B.desc, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, &scale[1], sizeof scale[1]);
    blas(cublasLtMatrixLayoutCreate(&B.layout[0], CUDA_R_8F_E4M3, (uint64_t)s->k, (uint64_t)s->n, s->k), "w");
    blas(cublasLtMatrixLayoutCreate(&B.layout[1], CUDA_R_8F_E4M3, (uint64_t)s->k, (uint64_t)s->rows, s->k), "x");
    blas(cublasLtMatrixLayoutCreate(&B.layout[2], CUDA_R_16BF, (uint64_t)s->n, (uint64_t)s->rows, s->n), "y");
    for (i = 0; i < 3; i++) {
        cublasLtMatrixLayoutSetAttribute(B.layout[i], CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &groups, sizeof groups);
        cublasLtMatrixLayoutSetAttribute(B.layout[i], CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &stride[i], 8);
    }
    blas(cublasLtMatmulPreferenceCreate(&want), "preference");
    cublasLtMatmulPreferenceSetAttribute(want, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &LT_WORKSPACE, 8);
    if (cublasLtMatmulAlgoGetHeuristic(B.lt, B.desc, B.layout[0], B.layout[1], B.layout[2], B.layout[2], want, 1,
                                       &found, &count) != CUBLAS_STATUS_SUCCESS)
        count = 0;
    cublasLtMatmulPreferenceDestroy(want);
    if (count) B.algo = found.algo;
    return count > 0;
}
static void drop_fp8(void) {
    int i;
    for (i = 0; i < 3; i++) cublasLtMatrixLayoutDestroy(B.layout[i]);
    cublasLtMatmulDescDestroy(B.desc);
    for (i = 0; i < 2; i++) {
        cudaFree(B.fp8[i].data);
        cudaFree(B.fp8[i].scale);
        cudaFree(B.fp8[i].amax);
    }
}

/* Quantizes x (i = 0) or w (1) with one scale. */
static void quantize(int i) {
    const gmm_recipe recipe = gmm_recipe_of(GMM_RECIPE_FP8_CURRENT);
    const gmm_format *f = i ? &recipe.weight : &recipe.input;
    const int64_t groups = B.s.groups;
    gmm_mat all = i ? B.mat[1] : B.mat[0];
    gmm_quantization q = GMM_ZERO;
    gmm_info info = GMM_ZERO;
    gmm_layout l = GMM_ZERO;
    const int64_t rows = i ? groups * B.s.n : groups * B.s.rows; /* as one matrix, since cuBLASLt takes one scale */
    if (gmm_layout_of(f->dtype, f->scaling, f->order, GMM_ROWWISE, rows, B.s.k, &l, NULL) != GMM_OK)
        die("FP8", "layout");
    B.fp8[i] = gmm_mat_quantized(f, GMM_ROWWISE, device_alloc(l.data_bytes), device_alloc(4 * MOST_GROUPS),
                                 (float *)device_alloc(4 * MOST_GROUPS));
    q.count = 1;
    q.rows = rows;
    q.cols = B.s.k;
    q.format = f;
    q.src = &all;
    q.rowwise = &B.fp8[i];
    ok(gmm_quantize_query(B.ctx, GMM_OP_QUANTIZE, &q, &info));
    if (info.workspace_bytes > WORKSPACE) die("FP8", "workspace");
    ok(gmm_quantize(B.ctx, &q, B.workspace, WORKSPACE, B.stream));
}
/* gmm has a scale per group: the one of all groups, repeated. */
static void repeat_scales(void) {
    int i, g;
    for (i = 0; i < 2; i++)
        for (g = 1; g < B.s.groups; g++)
            cuda(cudaMemcpyAsync((float *)B.fp8[i].scale + g, B.fp8[i].scale, 4, cudaMemcpyDeviceToDevice, B.stream),
                 "scales");
}

/* Sets up the operation of the product at hand. Returns 0 where one of the contenders does not have it. */
static int describe(operation op) {
    const shape *s = &B.s;
    gmm_info info = GMM_ZERO;
    const gmm_linear none = GMM_ZERO;
    B.op = op;
    B.mat[3] = gmm_mat_packed(op == WGRAD_F32 ? GMM_F32 : GMM_BF16, B.out[0]);
    B.linear = none;
    B.linear.groups = &B.groups;
    B.linear.in_features = s->k;
    B.linear.out_features = s->n;
    memset(&B.grad, 0, sizeof B.grad);
    B.grad.mat = &B.mat[3];
    B.grad.main_grad = adds();
    if (op != DGRAD) B.linear.x = &B.mat[0];
    if (op != WGRAD && op != WGRAD_F32) B.linear.w = &B.mat[1];
    if (op == FWD || op == FP8) B.linear.y = &B.mat[3];
    else B.linear.dy = &B.mat[2];
    if (op == DGRAD) B.linear.dx = &B.mat[3];
    if (op == WGRAD || op == WGRAD_F32) B.linear.dw = &B.grad;
    if (op == FP8) {
        if (s->k % 16 || s->n % 16) return 0;
        quantize(0);
        quantize(1);
        repeat_scales();
        B.linear.x = &B.fp8[0];
        B.linear.w = &B.fp8[1];
        if (!make_fp8_peer()) {
            drop_fp8();
            return 0;
        }
    }
    ok(gmm_linear_query(B.ctx, OPERATION[op].op, &B.linear, &info));
    if (info.workspace_bytes > WORKSPACE) die("workspace", "is too small");
    return 1;
}

/* -------------------------------------------------------------------------------------------------- Timing --- */

/* Milliseconds per call of `calls` calls. */
static double time_of(void (*run)(void), int calls) {
    float ms;
    int i;
    cuda(cudaEventRecord(B.begin, B.stream), "event");
    for (i = 0; i < calls; i++) run();
    cuda(cudaEventRecord(B.end, B.stream), "event");
    cuda(cudaEventSynchronize(B.end), "a product");
    cuda(cudaEventElapsedTime(&ms, B.begin, B.end), "event");
    return ms / calls;
}
static int ascending(const void *a, const void *b) {
    const double p = *(const double *)a, q = *(const double *)b;
    return (p > q) - (p < q);
}
/* Compares the results of both, then times them in turns. */
static result measure(void) {
    void (*const run[2])(void) = {run_gmm, run_peer};
    const int64_t elements = result_elements(), size = adds() ? 4 : 2;
    unsigned long long different = 0;
    double t[2][TURNS];
    int calls[2], c, i;
    result r;
    for (c = 0; c < 2; c++) cuda(cudaMemsetAsync(B.out[c], 0, (size_t)(elements * size), B.stream), "results");
    cuda(cudaMemsetAsync(B.count, 0, sizeof *B.count, B.stream), "count");
    for (c = 0; c < 2; c++) run[c]();
    count_different<<<1056, 256, 0, B.stream>>>(B.out[0], B.out[1], elements, size == 4,
                                                0.01f * sqrtf((float)(B.op == DGRAD ? B.s.n
                                                                      : size == 4 || B.op == WGRAD ? B.s.rows : B.s.k)),
                                                B.count);
    cuda(cudaMemcpyAsync(&different, B.count, sizeof different, cudaMemcpyDeviceToHost, B.stream), "count");
    cuda(cudaStreamSynchronize(B.stream), "a product");
    if (different) die(OPERATION[B.op].name, "the results of gmm and cuBLAS differ");
    for (c = 0; c < 2; c++) {
        run[c]();
        calls[c] = 1 + (int)(B.ms / time_of(run[c], 2));
    }
    for (i = 0; i < TURNS; i++)
        for (c = 0; c < 2; c++) t[c][i] = time_of(run[c], calls[c]);
    for (c = 0; c < 2; c++) qsort(t[c], TURNS, sizeof **t, ascending);
    r.op = B.op;
    r.s = B.s;
    r.us = 1e3 * t[0][TURNS / 2];
    r.peer_us = 1e3 * t[1][TURNS / 2];
    return r;
}

/* All operations of one product. Returns how many results it has written. */
static int measure_product(const shape *s, result *to) {
    const int64_t x = s->groups * s->rows * s->k, w = s->groups * s->k * s->n, y = s->groups * s->rows * s->n;
    const int64_t most = 2 * (x > y ? x : y) > 4 * w ? 2 * (x > y ? x : y) : 4 * w;
    int32_t sizes[MOST_GROUPS];
    const gmm_groups none = GMM_ZERO;
    int count = 0, i;
    B.s = *s;
    B.x = (uint16_t *)device_alloc(2 * x);
    B.w = (uint16_t *)device_alloc(2 * w);
    B.dy = (uint16_t *)device_alloc(2 * y);
    for (i = 0; i < 2; i++) B.out[i] = (char *)device_alloc(most);
    fill<<<1056, 256, 0, B.stream>>>(B.x, x, 1);
    fill<<<1056, 256, 0, B.stream>>>(B.w, w, 2);
    fill<<<1056, 256, 0, B.stream>>>(B.dy, y, 3);
    for (i = 0; i < s->groups; i++) sizes[i] = (int32_t)s->rows;
    cuda(cudaMemcpyAsync(B.sizes, sizes, 4 * (size_t)s->groups, cudaMemcpyHostToDevice, B.stream), "sizes");
    B.groups = none;
    B.groups.count = (int32_t)s->groups;
    B.groups.capacity = s->groups * s->rows;
    B.groups.splits = B.sizes;
    B.groups.dtype = GMM_I32;
    B.mat[0] = gmm_mat_packed(GMM_BF16, B.x);
    B.mat[1] = gmm_mat_packed(GMM_BF16, B.w);
    B.mat[2] = gmm_mat_packed(GMM_BF16, B.dy);
    for (i = 0; i < OPERATIONS; i++) {
        if (!describe((operation)i)) continue;
        to[count++] = measure();
        if (i == FP8) drop_fp8();
    }
    cudaFree(B.x);
    cudaFree(B.w);
    cudaFree(B.dy);
    cudaFree(B.out[0]);
    cudaFree(B.out[1]);
    return count;
}

/* -------------------------------------------------------------------------------------------------- Report --- */

static void print_row(const result *r) {
    printf("%-9s %4d x %-6d %6d %6d %10.1f %10.1f %7.3f\n", OPERATION[r->op].name, (int)r->s.groups, (int)r->s.rows,
           (int)r->s.k, (int)r->s.n, r->us, r->peer_us, r->peer_us / r->us);
}
static int by_ratio(const void *a, const void *b) {
    const result *p = (const result *)a, *q = (const result *)b;
    const double u = p->peer_us / p->us, v = q->peer_us / q->us;
    return p->op != q->op ? (int)p->op - (int)q->op : (u > v) - (u < v);
}
/* Means by operation and time of cuBLAS, and the lowest rows. Sorts the results. */
static void summarize(result *r, int count, int lowest) {
    static const double limits[] = {0, 25, 100, 1e30};
    int op, i, k;
    qsort(r, (size_t)count, sizeof *r, by_ratio);
    puts("operation  us of cuBLAS    rows   mean  least  below 0.95");
    for (op = 0; op < OPERATIONS; op++)
        for (k = 0; k < 3; k++) {
            double logs = 0.0, least = 1e30;
            int rows = 0, below = 0;
            for (i = 0; i < count; i++) {
                const double ratio = r[i].peer_us / r[i].us;
                if ((int)r[i].op != op || r[i].peer_us < limits[k] || r[i].peer_us >= limits[k + 1]) continue;
                logs += log(ratio);
                least = ratio < least ? ratio : least;
                below += ratio < 0.95;
                rows++;
            }
            if (rows)
                printf("%-10s %4.0f to %-6.0f %5d  %5.3f  %5.3f  %d\n", OPERATION[op].name, limits[k],
                       k < 2 ? limits[k + 1] : INFINITY, rows, exp(logs / rows), least, below);
        }
    puts("\nlowest rows of 25 us and more");
    for (op = 0; op < OPERATIONS; op++)
        for (i = 0, k = 0; i < count && k < lowest; i++)
            if ((int)r[i].op == op && r[i].peer_us >= 25.0) print_row(&r[i]), k++;
}

int main(int argc, char **argv) {
    static result results[MOST_ROWS];
    double seconds = 60.0;
    int count = 0, lowest = 10, i;
    float elapsed = 0.0f;
    cudaEvent_t start, now;
    gmm_config config = GMM_ZERO;
    gmm_error error;
    B.random = 1;
    B.ms = 2.0;
    for (i = 1; i < argc; i++) {
        if (!strncmp(argv[i], "--seconds=", 10)) seconds = atof(argv[i] + 10);
        else if (!strncmp(argv[i], "--seed=", 7)) B.random = strtoull(argv[i] + 7, NULL, 10);
        else if (!strncmp(argv[i], "--ms=", 5)) B.ms = atof(argv[i] + 5);
        else if (!strncmp(argv[i], "--lowest=", 9)) lowest = atoi(argv[i] + 9);
        else if (!strcmp(argv[i], "--models")) B.models = 1;
        else die(argv[i], "usage: shapes [--seconds=60] [--seed=1] [--ms=2] [--lowest=10] [--models]");
    }
    config.space = GMM_SPACE_CUDA;
    if (gmm_create(&B.ctx, &config, &error) != GMM_OK) die("gmm_create", error.text);
    cuda(cudaStreamCreate(&B.stream), "stream");
    cuda(cudaEventCreate(&B.begin), "event");
    cuda(cudaEventCreate(&B.end), "event");
    cuda(cudaEventCreate(&start), "event");
    cuda(cudaEventCreate(&now), "event");
    B.workspace = device_alloc((int64_t)WORKSPACE);
    B.lt_workspace = device_alloc((int64_t)LT_WORKSPACE);
    B.sizes = (int32_t *)device_alloc(4 * MOST_GROUPS);
    B.count = (unsigned long long *)device_alloc(8);
    blas(cublasCreate(&B.blas), "cublasCreate");
    blas(cublasSetStream(B.blas, B.stream), "stream");
    blas(cublasSetWorkspace(B.blas, B.lt_workspace, LT_WORKSPACE), "workspace");
    blas(cublasLtCreate(&B.lt), "cublasLtCreate");
    puts("operation groups x rows       K      N     us gmm  us cuBLAS  cuBLAS / gmm");
    cuda(cudaEventRecord(start, B.stream), "event");
    while (elapsed < 1e3 * seconds && count + OPERATIONS <= MOST_ROWS) {
        const shape s = draw();
        const int added = measure_product(&s, results + count);
        for (i = count; i < count + added; i++) print_row(&results[i]);
        count += added;
        cuda(cudaEventRecord(now, B.stream), "event");
        cuda(cudaEventSynchronize(now), "event");
        cuda(cudaEventElapsedTime(&elapsed, start, now), "event");
    }
    summarize(results, count, lowest);
    return 0;
}
