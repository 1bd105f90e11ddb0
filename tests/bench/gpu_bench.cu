/* gpu_bench - TFLOP/s of gmm's grouped linear, in bf16 and quantized, on the GPU beside cuBLAS and torch, and the
   bandwidth of the operations that only move rows or quantize. All contenders of a row alternate in one process on the
   same random data. peers.py loads this file as a shared library and provides torch._grouped_mm,
   torch._scaled_grouped_mm and DeepGEMM as further contenders. What it means: README.md. */
#include "gmm.h"

#include <cublasLt.h>
#include <cublas_v2.h>
#include <cuda_runtime.h>
#include <dlfcn.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The libraries that peers.py calls. */
enum { PEER_TORCH, PEER_DEEPGEMM, PEERS };
/* One product as peers.py sees it. */
typedef struct bench_call {
    int32_t op;     /* 0 fwd, 1 dgrad, 2 wgrad */
    int32_t f32;    /* wgrad: added into fp32 */
    int32_t first;  /* the first call on this row */
    int32_t check;  /* the result is compared: write it to out */
    int32_t groups;
    int32_t fp8;    /* 0: bf16 x, w, dy; else a, b in E4M3: 1 a scale per row, 2 the same with fast accumulation,
                       3 scales of 1x128, of weights 128x128 */
    int32_t peer;   /* PEER_* */
    int64_t rows, n, k, padded; /* padded: wgrad in FP8: length of the rows of a and b */
    void *x, *w, *dy, *out;
    void *a, *b, *a_scale, *b_scale;
    int32_t *ends;  /* device: end row of each group */
    cudaStream_t stream;
} bench_call;
typedef int (*bench_peer)(const bench_call *call); /* 0 = enqueued */
/* Called before each contender's first call of a row, and with (NULL, NULL) when the GPU has finished it. */
typedef void (*bench_watch)(const char *row, const char *contender);

extern "C" __attribute__((visibility("default"))) int gmm_bench(int argc, char **argv, bench_peer peers,
                                                                const char *torch_version, bench_watch watch);

typedef struct shape {
    const char *name;
    int groups, topk;
    int64_t tokens, hidden, ffn;
} shape;
static const shape SHAPES[] = {{"dsv3", 8, 8, 32768, 7168, 2048},
                               {"mixtral", 8, 2, 16384, 4096, 14336},
                               {"qwen3", 128, 8, 65536, 2048, 768},
                               {"gptoss", 32, 4, 32768, 2880, 2880},
                               {"odd", 24, 4, 22992, 3072, 1408},
                               {"dense", 1, 1, 8192, 8192, 4096}}; /* 8192^3, not a model's shape */
enum { SHAPE_COUNT = 5, DENSE_SHAPE = 5 };
enum { NEVER, ALWAYS, ASKED }; /* ASKED: only if --rows is given */
/* Tokens per expert: the same for all or, with zipf, on average, in proportion to 1/rank with every fifth expert
   empty. */
typedef struct routing {
    const char *name;
    int64_t tokens;
    int zipf, plain, quantized; /* when bf16 products and quantized products run with this routing */
} routing;
static const routing ROUTINGS[] = {{"1", 1, 0, ALWAYS, ALWAYS},          {"16", 16, 0, ALWAYS, ALWAYS},
                                   {"64", 64, 0, ALWAYS, ALWAYS},        {"128", 128, 0, ALWAYS, ASKED},
                                   {"130", 130, 0, ASKED, ASKED},        {"192", 192, 0, ALWAYS, ASKED},
                                   {"256", 256, 0, ASKED, ASKED},        {"300", 300, 0, ALWAYS, ALWAYS},
                                   {"512", 512, 0, ALWAYS, ALWAYS},      {"1024", 1024, 0, ALWAYS, NEVER},
                                   {"4096", 4096, 0, ALWAYS, ALWAYS},    {"zipf512", 512, 1, ALWAYS, ALWAYS},
                                   {"zipf1024", 1024, 1, ALWAYS, NEVER}, {"zipf4096", 4096, 1, ALWAYS, ALWAYS}};
static const routing DENSE_ROUTING = {"8192", 8192, 0, ALWAYS, NEVER};
enum { ROUTING_COUNT = 14, MOST_TOKENS = 4096, FEW_TOKENS = 128, WGRAD_TOKENS = 735 };
enum { MAX_GROUPS = 128, BLOCKS = 20, STREAMS = 4, SAMPLES = 256 };
enum { FWD, DGRAD, WGRAD, WGRAD_F32, KINDS };
static const char *const KIND_LETTER[KINDS] = {"f", "d", "w", "w"};
enum { GMM_RUN, DENSE, LOOP1, LOOP4, GROUPED, STRIDED, LTGROUPED, TORCH, DEEPGEMM, READ, CONTENDERS };
static const char *const NAMES[CONTENDERS] = {"gmm",     "dense",     "loop1", "loop4", "grouped",
                                              "strided", "ltgrouped", "torch", "deepgemm", "read"};
/* Quantized products: formats of operands, and the library that multiplies. row: a scale per row, E4M3 throughout;
   tensor, block, mxfp8 and nvfp4: the recipes; +: with fast accumulation. cublas is one group of 8192^3 with a scale
   per tensor. */
enum { GMM_PRODUCT, TORCH_PRODUCT, DEEPGEMM_PRODUCT, CUBLAS_ANCHOR, MEMORY };
enum { Q_BF16, Q_ROW, Q_ROW_FAST, Q_TORCH, Q_TORCH_FAST, Q_TENSOR, Q_BLOCK, Q_DEEPGEMM, Q_MXFP8, Q_NVFP4, Q_CUBLAS,
       Q_CUBLAS_FAST, Q_READ, Q_CONTENDERS };
static const struct { const char *name; int who; gmm_recipe_kind recipe; int row, fast; } QUANTIZED[Q_CONTENDERS] = {
    {"bf16", GMM_PRODUCT, GMM_RECIPE_NONE, 0, 0},      {"row", GMM_PRODUCT, GMM_RECIPE_FP8_CURRENT, 1, 0},
    {"row+", GMM_PRODUCT, GMM_RECIPE_FP8_CURRENT, 1, 1}, {"torch", TORCH_PRODUCT, GMM_RECIPE_NONE, 1, 0},
    {"torch+", TORCH_PRODUCT, GMM_RECIPE_NONE, 1, 1},  {"tensor", GMM_PRODUCT, GMM_RECIPE_FP8_CURRENT, 0, 0},
    {"block", GMM_PRODUCT, GMM_RECIPE_FP8_BLOCK, 0, 0}, {"deepgemm", DEEPGEMM_PRODUCT, GMM_RECIPE_NONE, 0, 0},
    {"mxfp8", GMM_PRODUCT, GMM_RECIPE_MXFP8, 0, 0},
    {"nvfp4", GMM_PRODUCT, GMM_RECIPE_NVFP4, 0, 0},    {"cublas", CUBLAS_ANCHOR, GMM_RECIPE_NONE, 0, 0},
    {"cublas+", CUBLAS_ANCHOR, GMM_RECIPE_NONE, 0, 1}, {"read", MEMORY, GMM_RECIPE_NONE, 0, 0}};
enum { TURNS = Q_CONTENDERS, ANCHOR = 8192 };
static const size_t LT_WORKSPACE = (size_t)32 << 20;

/* A cuBLASLt product: C [m, n] = op(A) op(B), column-major. FP8 has a scale of 1 per tensor. */
typedef struct lt_product {
    cudaDataType_t type, type_c;
    cublasOperation_t op_a, op_b;
    int64_t m, n, k, ld_a, ld_b, ld_c;
    int8_t fast; /* FP8: fast accumulation */
} lt_product;
typedef struct lt_plan {
    int64_t rows;
    cublasLtMatmulDesc_t desc;
    cublasLtMatrixLayout_t a, b, c;
    cublasLtMatmulAlgo_t algo;
} lt_plan;
/* Dense products of one N and K: bf16, FP8, FP8 with fast accumulation. */
enum { D_BF16, D_FP8, D_FP8_FAST, D_CONTENDERS };
static const char *const DENSE_NAMES[D_CONTENDERS] = {"bf16", "fp8", "fp8+"};
static const int64_t DENSE_ROWS[] = {4096, 8192, 16384, 32768};
enum { DENSE_ROW_COUNT = 4 };

typedef struct product { /* column-major, as cuBLAS wants it */
    int64_t m, n, k;
    const uint16_t *a, *b;
    char *c;
} product;

typedef struct quantized_product {
    gmm_linear lin;
    gmm_options options;
    gmm_mat operand[2], copy[2]; /* operands of the descriptor, and the copies that the product reads */
    gmm_engine engine;
    double bytes;                /* minimum memory traffic */
    int64_t padded;              /* elements from row to row of the last copy */
    bench_call call;             /* arguments of a peer's call */
} quantized_product;

static struct {
    gmm_context *ctx;
    gmm_engine engine, served; /* demanded; the one that served the last row */
    cudaStream_t stream, side[STREAMS];
    cudaEvent_t fork, join[STREAMS], begin[BLOCKS * TURNS], end[BLOCKS * TURNS];
    cublasHandle_t blas;
    cublasLtHandle_t lt;
    char *lt_workspace[STREAMS];
    float *one; /* device */
    bench_peer peers; /* NULL: neither is there */
    bench_watch watch;
    const char *row;
    double block_ms;
    int blocks;

    /* the row */
    int kind, groups, live, uniform; /* live: groups that are not empty */
    int64_t rows, n, k, size[MAX_GROUPS], start[MAX_GROUPS + 1];
    int32_t *sizes, *ends; /* device */
    uint16_t *x, *w, *dy, *out;
    char *dw;
    gmm_groups g;
    gmm_linear lin;
    gmm_grad grad;
    gmm_mat mx, mw, my, mdy, mdx, mdw;
    gmm_options options;
    char *workspace;
    size_t workspace_bytes;
    lt_plan dense, plan[MAX_GROUPS];
    int plans, plan_of[MAX_GROUPS];
    int grouped_count, gm[MAX_GROUPS], gn[MAX_GROUPS], gk[MAX_GROUPS], ga[MAX_GROUPS], gb[MAX_GROUPS], gc[MAX_GROUPS];
    int ones[MAX_GROUPS];
    float alphas[MAX_GROUPS], betas[MAX_GROUPS];
    cublasOperation_t gta[MAX_GROUPS], gtb[MAX_GROUPS];
    const void **pointers; /* device [3][MAX_GROUPS] */
    lt_plan lt_groups;     /* cuBLASLt's grouped mode */
    int32_t *lt_sizes;     /* device [6][MAX_GROUPS]: m, n, k, leading dimensions of A, B, C */
    const void **lt_addresses; /* device [3][MAX_GROUPS] */
    float *lt_scalars;     /* device: 1, beta */
    bench_call call[PEERS];
    int peer_failed;
    void (*beside)(void); /* the operation that alternates with a copy */

    /* a row of quantized products */
    quantized_product q[Q_CONTENDERS];
    void *hold[64];
    int held;
    lt_plan anchor[2];
    uint8_t *anchor_a, *anchor_b;
    uint16_t *anchor_d;

    /* a row of dense products */
    lt_plan lt_dense[D_CONTENDERS];
    const void *lt_a[D_CONTENDERS], *lt_b[D_CONTENDERS];

    /* bandwidth rows */
    gmm_permute perm;
    gmm_activation act;
    gmm_padding pad;
    char *copy_from, *copy_to;
    size_t copy_bytes;

    void *nvml, *nvml_device;
    int (*nvml_clock)(void *, int, unsigned *);
    char driver[96];
} B;

static void die(const char *what, const char *why) {
    fprintf(stderr, "gpu_bench: %s: %s\n", what, why);
    exit(1);
}
static void cuda(cudaError_t e, const char *what) {
    if (e != cudaSuccess) die(what, cudaGetErrorString(e));
}
static void ok(gmm_status s) {
    if (s != GMM_OK) die("gmm", gmm_last_error(B.ctx));
}
static char *device_alloc(size_t bytes) {
    void *p = NULL;
    cuda(cudaMalloc(&p, bytes ? bytes : 256), "cudaMalloc");
    return (char *)p;
}
static void *upload(const void *host, size_t bytes) {
    char *p = device_alloc(bytes);
    cuda(cudaMemcpy(p, host, bytes, cudaMemcpyHostToDevice), "cudaMemcpy");
    return p;
}

/* -------------------------------------------------------------------------------------- Data, and its check --- */

static __device__ uint32_t mix(uint64_t z) {
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return (uint32_t)((z ^ (z >> 31)) >> 32);
}
/* Normal variates. */
static __global__ void fill_bf16(uint16_t *to, int64_t count, uint64_t seed) {
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < count; i += (int64_t)gridDim.x * blockDim.x) {
        uint32_t u = mix((uint64_t)i * 2 + 1 + (seed << 40)), v = mix((uint64_t)i * 2 + 2 + (seed << 40));
        float r = sqrtf(-2.0f * logf(((float)(u >> 8) + 1.0f) / 16777216.0f));
        to[i] = gmm_f32_to_bf16(r * cospif((float)(v >> 8) / 8388608.0f));
    }
}
static uint16_t *random_bf16(int64_t count, uint64_t seed) {
    uint16_t *p = (uint16_t *)device_alloc((size_t)count * 2);
    fill_bf16<<<1056, 256, 0, B.stream>>>(p, count, seed);
    cuda(cudaGetLastError(), "fill");
    return p;
}

typedef struct sample { int64_t a, b, c, length, stride_a, stride_b; } sample;

/* share[s] = |c - fp64| divided by the error that one rounding to bf16, fp32 accumulation and `loss` times the sum of
   magnitudes allow. */
static __global__ void compare(const void *a, const void *b, gmm_dtype dtype, const void *c, int f32, double loss,
                               const sample *samples, double *share) {
    __shared__ double sums[2][128];
    const sample s = samples[blockIdx.x];
    double sum = 0.0, all = 0.0;
    for (int64_t i = threadIdx.x; i < s.length; i += 128) {
        double p = (double)gmm_load(dtype, a, s.a + i * s.stride_a) * (double)gmm_load(dtype, b, s.b + i * s.stride_b);
        sum += p;
        all += fabs(p);
    }
    sums[0][threadIdx.x] = sum;
    sums[1][threadIdx.x] = all;
    __syncthreads();
    if (threadIdx.x) return;
    for (int i = 1; i < 128; i++) {
        sum += sums[0][i];
        all += sums[1][i];
    }
    share[blockIdx.x] = fabs((double)gmm_load(f32 ? GMM_F32 : GMM_BF16, c, s.c) - sum) /
                        (fabs(sum) * 0x1p-8 + all * (1e-5 + loss) + 1e-30);
}

/* Runs a contender on a poisoned destination and compares sampled elements with fp64. a, b: the operands in the order
   x, w or dy, w or dy, x. */
static int check_contender(void (*run)(int), int contender, const char *name, const void *a, const void *b,
                           gmm_dtype dtype, double loss) {
    static sample s[SAMPLES];
    double share[SAMPLES];
    const int wgrad = B.kind >= WGRAD;
    const size_t bytes = wgrad ? (size_t)B.groups * (size_t)(B.n * B.k) * (B.kind == WGRAD_F32 ? 4 : 2)
                               : (size_t)B.rows * (size_t)(B.kind == FWD ? B.n : B.k) * 2;
    void *c = wgrad ? (void *)B.dw : (void *)B.out;
    uint64_t r = 0x9E3779B97F4A7C15u;
    int i, good = 1;
    for (i = 0; i < SAMPLES; i++) {
        int64_t g, row, n, k;
        r = r * 6364136223846793005u + 1442695040888963407u;
        row = (int64_t)((r >> 16) % (uint64_t)B.rows);
        n = (int64_t)((r >> 24) % (uint64_t)B.n);
        k = (int64_t)((r >> 32) % (uint64_t)B.k);
        for (g = 0; row >= B.start[g + 1]; g++) {}
        if (B.kind == FWD) {
            sample t = {row * B.k, (g * B.n + n) * B.k, row * B.n + n, B.k, 1, 1};
            s[i] = t;
        } else if (B.kind == DGRAD) {
            sample t = {row * B.n, g * B.n * B.k + k, row * B.k + k, B.n, 1, B.k};
            s[i] = t;
        } else {
            sample t = {B.start[g] * B.k + k, B.start[g] * B.n + n, (g * B.n + n) * B.k + k, B.size[g], B.k, B.n};
            s[i] = t;
        }
    }
    cuda(cudaMemsetAsync(c, B.kind == WGRAD_F32 ? 0 : 0xFF, bytes, B.stream), "memset");
    if (B.watch) {
        cuda(cudaStreamSynchronize(B.stream), "memset");
        B.watch(B.row, name);
    }
    B.call[PEER_TORCH].check = B.call[PEER_DEEPGEMM].check = 1;
    run(contender);
    B.call[PEER_TORCH].check = B.call[PEER_DEEPGEMM].check = 0;
    if (B.watch) {
        cuda(cudaStreamSynchronize(B.stream), "a contender");
        B.watch(NULL, NULL);
    }
    if (B.peer_failed) return 0;
    cuda(cudaStreamSynchronize(B.stream), "a contender");
    {
        sample *samples = (sample *)upload(s, sizeof s);
        double *shares = (double *)device_alloc(sizeof share);
        compare<<<SAMPLES, 128, 0, B.stream>>>(a, b, dtype, c, B.kind == WGRAD_F32, loss, samples, shares);
        cuda(cudaStreamSynchronize(B.stream), "compare");
        cuda(cudaMemcpy(share, shares, sizeof share, cudaMemcpyDeviceToHost), "compare");
        cudaFree(samples);
        cudaFree(shares);
    }
    for (i = 0; i < SAMPLES; i++) good &= share[i] <= 1.0;
    return good;
}

/* ------------------------------------------------------------------------------------------------ Contenders --- */

static product device_part(int64_t group, int64_t row, int64_t rows) {
    product p;
    if (B.kind >= WGRAD) {
        p.m = B.k, p.n = B.n, p.k = rows;
        p.a = B.x + row * B.k;
        p.b = B.dy + row * B.n;
        p.c = B.dw + group * B.n * B.k * (B.kind == WGRAD_F32 ? 4 : 2);
    } else {
        const int64_t in = B.kind == FWD ? B.k : B.n, out = B.kind == FWD ? B.n : B.k;
        p.m = out, p.n = rows, p.k = in;
        p.a = B.w + group * B.n * B.k;
        p.b = (B.kind == FWD ? B.x : B.dy) + row * in;
        p.c = (char *)(B.out + row * out);
    }
    return p;
}
static cublasOperation_t op_a(void) { return B.kind == FWD ? CUBLAS_OP_T : CUBLAS_OP_N; }
static cublasOperation_t op_b(void) { return B.kind >= WGRAD ? CUBLAS_OP_T : CUBLAS_OP_N; }
static int64_t ld_b(void) { return B.kind == FWD ? B.k : B.n; }
static int64_t ld_c(void) { return B.kind == FWD ? B.n : B.k; }
static cudaDataType_t type_c(void) { return B.kind == WGRAD_F32 ? CUDA_R_32F : CUDA_R_16BF; }
static float beta(void) { return B.kind == WGRAD_F32 ? 1.0f : 0.0f; }

static int lt_make(lt_plan *plan, const lt_product *p) {
    const uint32_t align = 128; /* rows of these shapes start at multiples of it */
    cublasLtMatmulPreference_t want;
    cublasLtMatmulHeuristicResult_t found;
    int count = 0;
    plan->rows = p->n;
    cublasLtMatmulDescCreate(&plan->desc, CUBLAS_COMPUTE_32F, CUDA_R_32F);
    cublasLtMatmulDescSetAttribute(plan->desc, CUBLASLT_MATMUL_DESC_TRANSA, &p->op_a, sizeof p->op_a);
    cublasLtMatmulDescSetAttribute(plan->desc, CUBLASLT_MATMUL_DESC_TRANSB, &p->op_b, sizeof p->op_b);
    if (p->type == CUDA_R_8F_E4M3) {
        cublasLtMatmulDescSetAttribute(plan->desc, CUBLASLT_MATMUL_DESC_FAST_ACCUM, &p->fast, sizeof p->fast);
        cublasLtMatmulDescSetAttribute(plan->desc, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, &B.one, sizeof B.one);
        cublasLtMatmulDescSetAttribute(plan->desc, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, &B.one, sizeof B.one);
    }
    cublasLtMatrixLayoutCreate(&plan->a, p->type, p->op_a ? p->k : p->m, p->op_a ? p->m : p->k, p->ld_a);
    cublasLtMatrixLayoutCreate(&plan->b, p->type, p->op_b ? p->n : p->k, p->op_b ? p->k : p->n, p->ld_b);
    cublasLtMatrixLayoutCreate(&plan->c, p->type_c, p->m, p->n, p->ld_c);
    cublasLtMatmulPreferenceCreate(&want);
    cublasLtMatmulPreferenceSetAttribute(want, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &LT_WORKSPACE, 8);
    cublasLtMatmulPreferenceSetAttribute(want, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, &align, 4);
    cublasLtMatmulPreferenceSetAttribute(want, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, &align, 4);
    cublasLtMatmulPreferenceSetAttribute(want, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, &align, 4);
    cublasLtMatmulPreferenceSetAttribute(want, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, &align, 4);
    if (cublasLtMatmulAlgoGetHeuristic(B.lt, plan->desc, plan->a, plan->b, plan->c, plan->c, want, 1, &found, &count)
        != CUBLAS_STATUS_SUCCESS)
        count = 0;
    cublasLtMatmulPreferenceDestroy(want);
    if (count) plan->algo = found.algo;
    return count > 0;
}
static void lt_drop(lt_plan *plan) {
    cublasLtMatrixLayoutDestroy(plan->a);
    cublasLtMatrixLayoutDestroy(plan->b);
    cublasLtMatrixLayoutDestroy(plan->c);
    cublasLtMatmulDescDestroy(plan->desc);
}
static void lt_run(const lt_plan *plan, const void *a, const void *b, void *c, float add, int stream) {
    const float one = 1.0f;
    if (cublasLtMatmul(B.lt, plan->desc, &one, a, plan->a, b, plan->b, &add, c, plan->c, c, plan->c, &plan->algo,
                       B.lt_workspace[stream], LT_WORKSPACE, stream ? B.side[stream] : B.stream))
        die("cublasLtMatmul", "failed");
}
/* The row's product, of `rows` rows of tokens. */
static int lt_make_part(lt_plan *plan, int64_t rows) {
    const product p = device_part(0, 0, rows);
    const lt_product l = {CUDA_R_16BF, type_c(), op_a(), op_b(), p.m, p.n, p.k, B.k, ld_b(), ld_c(), 0};
    const int found = lt_make(plan, &l);
    plan->rows = rows;
    return found;
}
static void lt_run_part(const lt_plan *plan, const product *p, int stream) {
    lt_run(plan, p->a, p->b, p->c, beta(), stream);
}

/* One product of cuBLASLt's grouped mode, from sizes, leading dimensions and addresses in device memory. Its attributes
   are given by number, since the headers of CUDA 13.0 do not name them. */
enum { LT_GROUPED_SINCE = 130800, LT_GROUPED = 2, LT_BATCH_MODE = 8, LT_ROWS_ARRAY, LT_COLS_ARRAY, LT_LD_ARRAY,
       LT_AVERAGE_K = 13, LT_AVERAGE_ROWS, LT_AVERAGE_COLS };
static int lt_grouped_layout(cublasLtMatrixLayout_t *layout, cudaDataType_t type, int rows, int cols, int ld) {
    const int32_t mode = LT_GROUPED;
    const int32_t *const arrays[3] = {B.lt_sizes + rows * MAX_GROUPS, B.lt_sizes + cols * MAX_GROUPS,
                                      B.lt_sizes + ld * MAX_GROUPS};
    int failed = cublasLtMatrixLayoutCreate(layout, type, 0, 0, 0), i;
    failed |= cublasLtMatrixLayoutSetAttribute(*layout, (cublasLtMatrixLayoutAttribute_t)LT_BATCH_MODE, &mode, 4);
    failed |= cublasLtMatrixLayoutSetAttribute(*layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &B.groups, 4);
    for (i = 0; i < 3; i++)
        failed |= cublasLtMatrixLayoutSetAttribute(*layout, (cublasLtMatrixLayoutAttribute_t)(LT_ROWS_ARRAY + i),
                                                   &arrays[i], 8);
    return !failed;
}
static int lt_make_grouped(lt_plan *plan) {
    const cublasOperation_t ta = op_a(), tb = op_b();
    const int32_t mode = CUBLASLT_POINTER_MODE_DEVICE;
    const uint32_t align = 16;
    const int64_t mean = (B.rows + B.groups - 1) / B.groups;
    const product p = device_part(0, 0, mean);
    const float scalars[2] = {1.0f, beta()};
    cublasLtMatmulPreference_t want;
    cublasLtMatmulHeuristicResult_t found;
    int32_t sizes[6][MAX_GROUPS];
    const void *addresses[3][MAX_GROUPS];
    int count = 0, g, i;
    if (cublasLtGetVersion() < LT_GROUPED_SINCE) return 0;
    for (g = 0; g < B.groups; g++) {
        const product q = device_part(g, B.start[g], B.size[g]);
        sizes[0][g] = (int32_t)q.m, sizes[1][g] = B.size[g] ? (int32_t)q.n : 0, sizes[2][g] = (int32_t)q.k;
        sizes[3][g] = (int32_t)B.k, sizes[4][g] = (int32_t)ld_b(), sizes[5][g] = (int32_t)ld_c();
        addresses[0][g] = q.a, addresses[1][g] = q.b, addresses[2][g] = q.c;
    }
    cuda(cudaMemcpy(B.lt_sizes, sizes, sizeof sizes, cudaMemcpyHostToDevice), "sizes");
    cuda(cudaMemcpy(B.lt_addresses, addresses, sizeof addresses, cudaMemcpyHostToDevice), "addresses");
    cuda(cudaMemcpy(B.lt_scalars, scalars, sizeof scalars, cudaMemcpyHostToDevice), "scalars");
    cublasLtMatmulDescCreate(&plan->desc, CUBLAS_COMPUTE_32F, CUDA_R_32F);
    cublasLtMatmulDescSetAttribute(plan->desc, CUBLASLT_MATMUL_DESC_TRANSA, &ta, sizeof ta);
    cublasLtMatmulDescSetAttribute(plan->desc, CUBLASLT_MATMUL_DESC_TRANSB, &tb, sizeof tb);
    cublasLtMatmulDescSetAttribute(plan->desc, CUBLASLT_MATMUL_DESC_POINTER_MODE, &mode, sizeof mode);
    i = lt_grouped_layout(&plan->a, CUDA_R_16BF, ta ? 2 : 0, ta ? 0 : 2, 3) &&
        lt_grouped_layout(&plan->b, CUDA_R_16BF, tb ? 1 : 2, tb ? 2 : 1, 4) &&
        lt_grouped_layout(&plan->c, type_c(), 0, 1, 5);
    if (!i) return 0;
    cublasLtMatmulPreferenceCreate(&want);
    cublasLtMatmulPreferenceSetAttribute(want, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &LT_WORKSPACE, 8);
    for (i = CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES; i <= CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES; i++)
        cublasLtMatmulPreferenceSetAttribute(want, (cublasLtMatmulPreferenceAttributes_t)i, &align, 4);
    cublasLtMatmulPreferenceSetAttribute(want, (cublasLtMatmulPreferenceAttributes_t)LT_AVERAGE_ROWS, &p.m, 8);
    cublasLtMatmulPreferenceSetAttribute(want, (cublasLtMatmulPreferenceAttributes_t)LT_AVERAGE_COLS, &p.n, 8);
    cublasLtMatmulPreferenceSetAttribute(want, (cublasLtMatmulPreferenceAttributes_t)LT_AVERAGE_K, &p.k, 8);
    if (cublasLtMatmulAlgoGetHeuristic(B.lt, plan->desc, plan->a, plan->b, plan->c, plan->c, want, 1, &found, &count)
        != CUBLAS_STATUS_SUCCESS)
        count = 0;
    cublasLtMatmulPreferenceDestroy(want);
    if (count) plan->algo = found.algo;
    return count > 0;
}
static void run_ltgrouped(void) {
    const void **at = B.lt_addresses;
    int g;
    for (g = 0; g < B.groups && B.kind == WGRAD; g++)
        if (!B.size[g]) cudaMemsetAsync(device_part(g, 0, 0).c, 0, (size_t)(B.n * B.k) * 2, B.stream);
    if (cublasLtMatmul(B.lt, B.lt_groups.desc, B.lt_scalars, at, B.lt_groups.a, at + MAX_GROUPS, B.lt_groups.b,
                       B.lt_scalars + 1, at + 2 * MAX_GROUPS, B.lt_groups.c, (void *)(at + 2 * MAX_GROUPS),
                       B.lt_groups.c, &B.lt_groups.algo, B.lt_workspace[0], LT_WORKSPACE, B.stream))
        B.peer_failed = 1;
}

static void multiply(const gmm_linear *lin) {
    switch (B.kind) {
    case FWD: ok(gmm_linear_fwd(B.ctx, lin, B.workspace, B.workspace_bytes, B.stream)); break;
    case DGRAD: ok(gmm_linear_dgrad(B.ctx, lin, B.workspace, B.workspace_bytes, B.stream)); break;
    default: ok(gmm_linear_wgrad(B.ctx, lin, B.workspace, B.workspace_bytes, B.stream)); break;
    }
}
static void run_gmm(void) { multiply(&B.lin); }
static void run_dense(void) {
    const product p = device_part(0, 0, B.rows);
    lt_run_part(&B.dense, &p, 0);
}
static void loop_over(int streams) {
    int g, s;
    if (streams > 1) {
        cudaEventRecord(B.fork, B.stream);
        for (s = 1; s < streams; s++) cudaStreamWaitEvent(B.side[s], B.fork, 0);
    }
    for (g = 0; g < B.groups; g++) {
        const product p = device_part(g, B.start[g], B.size[g]);
        if (B.size[g]) lt_run_part(&B.plan[B.plan_of[g]], &p, g % streams);
        else if (B.kind == WGRAD) cudaMemsetAsync(p.c, 0, (size_t)(B.n * B.k) * 2, B.stream);
    }
    if (streams > 1)
        for (s = 1; s < streams; s++) {
            cudaEventRecord(B.join[s], B.side[s]);
            cudaStreamWaitEvent(B.stream, B.join[s], 0);
        }
}
static void run_loop1(void) { loop_over(1); }
static void run_loop4(void) { loop_over(STREAMS); }
static cublasStatus_t grouped(void) {
    return cublasGemmGroupedBatchedEx(B.blas, B.gta, B.gtb, B.gm, B.gn, B.gk, B.alphas, B.pointers, CUDA_R_16BF, B.ga,
                                      B.pointers + MAX_GROUPS, CUDA_R_16BF, B.gb, B.betas,
                                      (void *const *)(B.pointers + 2 * MAX_GROUPS), type_c(), B.gc, B.grouped_count,
                                      B.ones, CUBLAS_COMPUTE_32F);
}
static void run_grouped(void) {
    if (grouped()) B.peer_failed = 1;
}
static void run_strided(void) {
    const float one = 1.0f, add = beta();
    const product p = device_part(0, 0, B.size[0]), q = device_part(1, B.size[0], B.size[0]);
    if (cublasGemmStridedBatchedEx(B.blas, op_a(), op_b(), (int)p.m, (int)p.n, (int)p.k, &one, p.a, CUDA_R_16BF,
                                   (int)B.k, q.a - p.a, p.b, CUDA_R_16BF, (int)ld_b(), q.b - p.b, &add, p.c, type_c(),
                                   (int)ld_c(), (q.c - p.c) / (type_c() == CUDA_R_32F ? 4 : 2), B.groups,
                                   CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT))
        B.peer_failed = 1;
}
static void ask_peer(bench_call *call) {
    if (B.peers(call)) B.peer_failed = 1;
    call->first = 0;
}
static void run_torch(void) { ask_peer(&B.call[PEER_TORCH]); }
static void run_deepgemm(void) { ask_peer(&B.call[PEER_DEEPGEMM]); }
/* Reads a buffer larger than the L2: the bandwidth to which rows with few tokens are compared. */
static __global__ void read_all(const uint4 *from, uint32_t *to) {
    const uint4 *p = from + (int64_t)blockIdx.x * 8 * blockDim.x + threadIdx.x;
    uint4 v[8];
    uint32_t x = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] = __ldcs(p + i * blockDim.x);
#pragma unroll
    for (int i = 0; i < 8; i++) x ^= v[i].x ^ v[i].y ^ v[i].z ^ v[i].w;
    if (x == 0x9E3779B9u) *to = x; /* keeps the compiler from removing the loads */
}
static void run_read(void) {
    read_all<<<(unsigned)(B.copy_bytes / (8 * 256 * 16)), 256, 0, B.stream>>>((const uint4 *)B.copy_from,
                                                                             (uint32_t *)B.copy_to);
}
static void (*const RUN[CONTENDERS])(void) = {run_gmm,     run_dense,     run_loop1, run_loop4, run_grouped,
                                              run_strided, run_ltgrouped, run_torch, run_deepgemm, run_read};
static void run_one(int contender) { RUN[contender](); }

/* ---------------------------------------------------------------------------------------------------- Timing --- */

static int ascending(const void *a, const void *b) {
    const double p = *(const double *)a, q = *(const double *)b;
    return (p > q) - (p < q);
}
static unsigned sm_clock(void) {
    unsigned mhz = 0;
    if (!B.nvml_clock || B.nvml_clock(B.nvml_device, 1, &mhz)) mhz = 0;
    return mhz;
}

/* Median seconds of a call of each contender. The contenders alternate in blocks; a turn has as many calls as fill its
   share of the time, so that all load the GPU alike and launches follow one another as in a busy stream. */
static void measure(void (*run)(int), const int *present, int count, double *seconds, double *mhz) {
    int calls[TURNS], c, b, i, clocks = 0;
    double clock = 0.0;
    for (c = 0; c < count; c++) {
        float ms = 0.0f;
        if (!present[c]) continue;
        for (i = 0; i < 2; i++) run(c);
        cuda(cudaEventRecord(B.begin[0], B.stream), "event");
        for (i = 0; i < 3; i++) run(c);
        cuda(cudaEventRecord(B.end[0], B.stream), "event");
        cuda(cudaEventSynchronize(B.end[0]), "a contender");
        cuda(cudaEventElapsedTime(&ms, B.begin[0], B.end[0]), "event");
        calls[c] = 1 + (int)(B.block_ms / (ms / 3.0 + 1e-6));
    }
    for (b = 0; b < B.blocks; b++) {
        for (c = 0; c < count; c++) {
            if (!present[c]) continue;
            cuda(cudaEventRecord(B.begin[b * TURNS + c], B.stream), "event");
            for (i = 0; i < calls[c]; i++) run(c);
            cuda(cudaEventRecord(B.end[b * TURNS + c], B.stream), "event");
        }
        if (b % 5 == 4) {
            const unsigned now = sm_clock();
            clock += now;
            clocks += now > 0;
        }
    }
    cuda(cudaStreamSynchronize(B.stream), "a contender");
    *mhz = clocks ? clock / clocks : 0.0;
    for (c = 0; c < count; c++) {
        double t[BLOCKS];
        seconds[c] = 0.0;
        if (!present[c]) continue;
        for (b = 0; b < B.blocks; b++) {
            float ms;
            cuda(cudaEventElapsedTime(&ms, B.begin[b * TURNS + c], B.end[b * TURNS + c]), "event");
            t[b] = ms * 1e-3 / calls[c];
        }
        qsort(t, (size_t)B.blocks, sizeof *t, ascending);
        seconds[c] = 0.5 * (t[(B.blocks - 1) / 2] + t[B.blocks / 2]);
    }
}

/* ------------------------------------------------------------------------------------------------------ Rows --- */

static void split(const shape *s, const routing *r) {
    double weight[MAX_GROUPS], sum = 0.0;
    const int64_t rows = r->tokens * s->groups;
    int64_t left = rows;
    int32_t sizes[MAX_GROUPS], ends[MAX_GROUPS];
    int rank[MAX_GROUPS], g, largest = 0;
    uint64_t z = 2026;
    for (g = 0; g < s->groups; g++) { /* a random order of ranks */
        int other;
        z = z * 6364136223846793005u + 1442695040888963407u;
        other = (int)((z >> 33) % (uint64_t)(g + 1));
        rank[g] = rank[other];
        rank[other] = g;
    }
    for (g = 0; g < s->groups; g++) {
        weight[g] = g % 5 == 3 ? 0.0 : 1.0 / (1 + rank[g]);
        sum += weight[g];
        if (weight[g] > weight[largest]) largest = g;
    }
    B.live = 0;
    for (g = 0; g < s->groups; g++) {
        B.size[g] = !r->zipf ? r->tokens : g % 5 == 3 ? 0 : (int64_t)(weight[g] / sum * (double)rows) | 1;
        left -= B.size[g];
        B.live += B.size[g] > 0;
    }
    B.size[largest] += left;
    B.start[0] = 0;
    for (g = 0; g < s->groups; g++) {
        B.start[g + 1] = B.start[g] + B.size[g];
        sizes[g] = (int32_t)B.size[g];
        ends[g] = (int32_t)B.start[g + 1];
    }
    cuda(cudaMemcpy(B.sizes, sizes, sizeof(int32_t) * (size_t)s->groups, cudaMemcpyHostToDevice), "splits");
    cuda(cudaMemcpy(B.ends, ends, sizeof(int32_t) * (size_t)s->groups, cudaMemcpyHostToDevice), "splits");
    memset(&B.g, 0, sizeof B.g);
    B.uniform = !r->zipf;
    B.groups = s->groups;
    B.g.count = s->groups;
    B.g.capacity = B.rows = rows;
    B.g.splits = B.sizes;
    B.g.dtype = GMM_I32;
}

static void workspace(size_t bytes) {
    if (bytes <= B.workspace_bytes) return;
    cudaFree(B.workspace);
    B.workspace = device_alloc(bytes);
    B.workspace_bytes = bytes;
}

static gmm_engine plan(const gmm_linear *lin) {
    gmm_info info = GMM_ZERO;
    ok(gmm_linear_query(B.ctx, B.kind == FWD     ? GMM_OP_LINEAR_FWD
                               : B.kind == DGRAD ? GMM_OP_LINEAR_DGRAD
                                                 : GMM_OP_LINEAR_WGRAD, lin, &info));
    workspace(info.workspace_bytes);
    return info.engine;
}

/* Fills the row's bf16 descriptor, and the arguments of the peers' calls. */
static void describe(int kind) {
    bench_call *call = &B.call[PEER_TORCH];
    B.kind = kind;
    memset(&B.lin, 0, sizeof B.lin);
    memset(&B.grad, 0, sizeof B.grad);
    memset(&B.options, 0, sizeof B.options);
    B.options.engine = B.engine;
    B.mx = gmm_mat_packed(GMM_BF16, B.x);
    B.mw = gmm_mat_packed(GMM_BF16, B.w);
    B.mdy = gmm_mat_packed(GMM_BF16, B.dy);
    B.my = B.mdx = gmm_mat_packed(GMM_BF16, B.out);
    B.mdw = gmm_mat_packed(kind == WGRAD_F32 ? GMM_F32 : GMM_BF16, B.dw);
    B.grad.mat = &B.mdw;
    B.grad.main_grad = kind == WGRAD_F32;
    B.lin.in_features = B.k;
    B.lin.out_features = B.n;
    B.lin.groups = &B.g;
    B.lin.options = &B.options;
    B.lin.x = &B.mx, B.lin.w = &B.mw, B.lin.y = &B.my;
    B.lin.dy = &B.mdy, B.lin.dx = &B.mdx, B.lin.dw = &B.grad;
    memset(call, 0, sizeof *call);
    call->op = kind == WGRAD_F32 ? 2 : kind;
    call->f32 = kind == WGRAD_F32;
    call->first = 1;
    call->groups = B.groups;
    call->rows = B.rows, call->n = B.n, call->k = B.k;
    call->x = B.x, call->w = B.w, call->dy = B.dy;
    call->out = kind >= WGRAD ? (void *)B.dw : (void *)B.out;
    call->ends = B.ends;
    call->stream = B.stream;
    B.call[PEER_DEEPGEMM] = *call;
    B.call[PEER_DEEPGEMM].peer = PEER_DEEPGEMM;
}
/* Whether the row has so few tokens that it is compared with the minimum memory traffic. */
static int few_rows(void) {
    return B.kind >= WGRAD ? B.rows < (int64_t)WGRAD_TOKENS * B.live : B.uniform && B.size[0] <= FEW_TOKENS;
}
static double operations(void) { return 2.0 * (double)(B.rows * B.n) * (double)B.k; }

/* Sets up what a user would set up once per shape. present[] says which contenders run the row. */
static void prepare(int kind, int *present) {
    const cublasOperation_t ta = (B.kind = kind, op_a()), tb = op_b();
    const void *pointers[3][MAX_GROUPS];
    int g, i;
    describe(kind);
    B.served = plan(&B.lin);
    B.plans = B.grouped_count = 0;
    present[GMM_RUN] = 1;
    present[DENSE] = lt_make_part(&B.dense, B.rows);
    present[LOOP1] = 1;
    for (g = 0; g < B.groups; g++) {
        const product p = device_part(g, B.start[g], B.size[g]);
        if (!B.size[g]) continue;
        for (i = 0; i < B.plans && B.plan[i].rows != B.size[g]; i++) {}
        if (i == B.plans && !lt_make_part(&B.plan[B.plans++], B.size[g])) present[LOOP1] = 0;
        B.plan_of[g] = i;
        i = B.grouped_count++;
        B.gm[i] = (int)p.m, B.gn[i] = (int)p.n, B.gk[i] = (int)p.k;
        B.ga[i] = (int)B.k, B.gb[i] = (int)ld_b(), B.gc[i] = (int)ld_c();
        B.gta[i] = ta, B.gtb[i] = tb;
        B.alphas[i] = 1.0f, B.betas[i] = beta(), B.ones[i] = 1;
        pointers[0][i] = p.a, pointers[1][i] = p.b, pointers[2][i] = p.c;
    }
    for (i = 0; i < 3; i++)
        cuda(cudaMemcpy(B.pointers + i * MAX_GROUPS, pointers[i], sizeof(void *) * (size_t)B.grouped_count,
                        cudaMemcpyHostToDevice), "pointers");
    present[LOOP4] = present[LOOP1];
    present[GROUPED] = B.uniform;
    present[STRIDED] = B.uniform && B.groups > 1;
    present[LTGROUPED] = lt_make_grouped(&B.lt_groups);
    present[READ] = few_rows();
    present[TORCH] = present[DEEPGEMM] = B.peers != NULL;
    for (i = 0; i < CONTENDERS; i++) {
        /* dense multiplies all rows by one weight, so its result differs */
        if (!present[i] || i == DENSE || i == READ) continue;
        B.peer_failed = 0;
        if (!check_contender(run_one, i, NAMES[i], kind == DGRAD ? B.dy : B.x, kind >= WGRAD ? B.dy : B.w, GMM_BF16,
                             0.0)) {
            if (i == GMM_RUN) die("gmm", "a sampled result is wrong");
            if (!B.peer_failed) fprintf(stderr, "gpu_bench: %s: a sampled result is wrong; left out\n", NAMES[i]);
            present[i] = 0;
        }
    }
    (void)cudaGetLastError();
}
static void finish(void) {
    int i;
    for (i = 0; i < B.plans; i++) lt_drop(&B.plan[i]);
    lt_drop(&B.dense);
    lt_drop(&B.lt_groups);
    memset(&B.lt_groups, 0, sizeof B.lt_groups);
}

/* ---------------------------------------------------------------------------------------- Quantized products --- */

static void *keep(int64_t bytes) {
    if (B.held == (int)(sizeof B.hold / sizeof *B.hold)) die("quantized row", "holds too much");
    return B.hold[B.held++] = device_alloc((size_t)bytes);
}
static __global__ void convert_codes(uint8_t *to, const uint16_t *from, int64_t count) {
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < count; i += (int64_t)gridDim.x * blockDim.x)
        to[i] = gmm_f32_to_e4m3(gmm_bf16_to_f32(from[i]));
}

/* E4M3 codes of bf16 values. */
static uint8_t *codes_of(const uint16_t *values, int64_t count) {
    uint8_t *codes = (uint8_t *)device_alloc((size_t)count);
    convert_codes<<<1056, 256, 0, B.stream>>>(codes, values, count);
    cuda(cudaGetLastError(), "codes");
    return codes;
}
static int lt_make_fp8(lt_plan *plan, int64_t rows, int64_t n, int64_t k, int fast) {
    const lt_product p = {CUDA_R_8F_E4M3, CUDA_R_16BF, CUBLAS_OP_T, CUBLAS_OP_N, n, rows, k, k, k, n, (int8_t)fast};
    return lt_make(plan, &p);
}

/* The anchor row: one FP8 product of 8192^3 with a scale per tensor, without and with fast accumulation. */
static void make_anchor(void) {
    const int64_t count = (int64_t)ANCHOR * ANCHOR;
    int i;
    B.anchor_d = (uint16_t *)device_alloc((size_t)count * 2);
    fill_bf16<<<1056, 256, 0, B.stream>>>(B.anchor_d, count, 4);
    B.anchor_a = codes_of(B.anchor_d, count);
    fill_bf16<<<1056, 256, 0, B.stream>>>(B.anchor_d, count, 5);
    B.anchor_b = codes_of(B.anchor_d, count);
    cuda(cudaStreamSynchronize(B.stream), "the anchor's codes");
    for (i = 0; i < 2; i++)
        if (!lt_make_fp8(&B.anchor[i], ANCHOR, ANCHOR, ANCHOR, i)) die("cublasLt", "has no FP8 product");
}
static void run_anchor(int fast) { lt_run(&B.anchor[fast], B.anchor_a, B.anchor_b, B.anchor_d, 0.0f, 0); }
static void run_quantized(int contender) {
    quantized_product *q = &B.q[contender];
    switch (QUANTIZED[contender].who) {
    case GMM_PRODUCT: multiply(&q->lin); break;
    case CUBLAS_ANCHOR: run_anchor(QUANTIZED[contender].fast); break;
    case MEMORY: run_read(); break;
    default:
        q->call.check = B.call[q->call.peer].check;
        ask_peer(&q->call);
    }
}

/* An operand: the tokens' rows of `cols` features, or weights. */
typedef struct product_operand { int weights; int64_t cols; const uint16_t *values; } product_operand;

/* Quantizes operand i of a product, and adds its bytes to the minimum traffic. */
static void quantize_operand(quantized_product *p, int i, const product_operand *x, const gmm_format *f,
                            gmm_direction direction) {
    const int64_t count = x->weights ? B.groups : 1;
    const gmm_mat source = gmm_mat_packed(GMM_BF16, x->values);
    gmm_quantization q = GMM_ZERO;
    gmm_info info = GMM_ZERO;
    gmm_layout l = GMM_ZERO;
    if ((x->weights ? gmm_layout_of(f->dtype, f->scaling, f->order, direction, B.n, x->cols, &l, NULL)
                    : gmm_layout_of_groups(f->dtype, f->scaling, f->order, direction, B.groups, B.rows, x->cols, &l,
                                           NULL)) != GMM_OK)
        die("quantized row", "a factor has no layout");
    p->copy[i] = gmm_mat_quantized(f, direction, keep(l.data_bytes * count), keep(l.scale_bytes * count),
                                   (float *)keep(4 * MAX_GROUPS));
    p->operand[i] = p->copy[i];
    if (direction == GMM_COLUMNWISE) p->operand[i].columnwise = &p->copy[i];
    p->padded = l.data_cols;
    q.groups = x->weights ? NULL : &B.g;
    q.count = x->weights ? B.groups : 0;
    q.rows = x->weights ? B.n : 0;
    q.cols = x->cols;
    q.format = f;
    q.src = &source;
    if (direction == GMM_COLUMNWISE) q.columnwise = &p->copy[i];
    else q.rowwise = &p->copy[i];
    ok(gmm_quantize_query(B.ctx, GMM_OP_QUANTIZE, &q, &info));
    workspace(info.workspace_bytes);
    ok(gmm_quantize(B.ctx, &q, B.workspace, B.workspace_bytes, B.stream));
    p->bytes += x->weights ? (double)(l.data_bytes + l.scale_bytes) * B.live
                           : (double)(B.rows * x->cols) * gmm_dtype_bits(f->dtype) / 8.0;
}
/* The dequantized values of an operand's copy, in fp32. */
static float *dequantize_operand(const product_operand *x, gmm_direction direction, const gmm_mat *copy) {
    float *values = (float *)device_alloc((size_t)(x->weights ? B.groups * B.n : B.rows) * (size_t)x->cols * 4);
    const gmm_mat to = gmm_mat_packed(GMM_F32, values);
    gmm_dequantization d = GMM_ZERO;
    gmm_info info = GMM_ZERO;
    d.groups = x->weights ? NULL : &B.g;
    d.count = x->weights ? B.groups : 0;
    d.rows = x->weights ? B.n : 0;
    d.cols = x->cols;
    d.direction = direction;
    d.src = copy;
    d.dst = &to;
    ok(gmm_dequantize_query(B.ctx, &d, &info));
    workspace(info.workspace_bytes);
    ok(gmm_dequantize(B.ctx, &d, B.workspace, B.workspace_bytes, B.stream));
    return values;
}

/* Hopper's FP8 sums keep 14 bits: allowed error relative to the sum of magnitudes, with and without promotion. */
static double loss_of(int contender) {
    const gmm_recipe_kind r = QUANTIZED[contender].recipe;
    if (QUANTIZED[contender].fast) return 1e-2;
    return r == GMM_RECIPE_MXFP8 || r == GMM_RECIPE_NVFP4 ? 0.0 : 2e-3;
}

/* The peer of a contender, -1 for gmm and the others. */
static int peer_of(int contender) {
    const int who = QUANTIZED[contender].who;
    return who == TORCH_PRODUCT ? PEER_TORCH : who == DEEPGEMM_PRODUCT ? PEER_DEEPGEMM : -1;
}

/* Sets up the product of gmm or of a peer for the row. */
static void describe_quantized(int c, const product_operand *const operands[2], const gmm_direction way[2]) {
    const int wgrad = B.kind >= WGRAD;
    quantized_product *q = &B.q[c];
    const int peer = peer_of(c);
    const quantized_product *source = &B.q[peer == PEER_DEEPGEMM ? Q_BLOCK : Q_ROW]; /* whose copies are read */
    gmm_recipe recipe = gmm_recipe_of(QUANTIZED[c].recipe);
    gmm_format f[2] = {B.kind == FWD ? recipe.input : recipe.grad, wgrad ? recipe.input : recipe.weight};
    int i, g;
    q->lin = B.lin;
    q->options = B.options;
    q->options.fp8_fast_accum = QUANTIZED[c].fast;
    q->lin.options = &q->options;
    q->bytes = wgrad ? (B.kind == WGRAD_F32 ? 8.0 : 2.0) * (double)B.live * (double)(B.n * B.k)
                     : 2.0 * (double)B.rows * (double)(B.kind == FWD ? B.n : B.k);
    if (c == Q_BF16)
        for (i = 0; i < 2; i++)
            q->bytes += 2.0 * (double)operands[i]->cols * (double)(operands[i]->weights ? B.live * B.n : B.rows);
    else if (peer >= 0) {
        q->call = B.call[peer];
        q->call.fp8 = peer == PEER_TORCH ? 1 + QUANTIZED[c].fast : 3;
        q->call.a = source->copy[0].data, q->call.a_scale = source->copy[0].scale;
        q->call.b = source->copy[1].data, q->call.b_scale = source->copy[1].scale;
        if (wgrad) { /* peers need groups padded to a multiple of 128 rows */
            int32_t ends[MAX_GROUPS];
            for (g = 0; g < B.groups; g++) ends[g] = (g ? ends[g - 1] : 0) + (int32_t)((B.size[g] + 127) / 128 * 128);
            q->call.padded = source->padded;
            q->call.ends = (int32_t *)keep(sizeof ends);
            cuda(cudaMemcpy(q->call.ends, ends, sizeof(int32_t) * (size_t)B.groups, cudaMemcpyHostToDevice), "ends");
        }
    } else {
        for (i = 0; i < 2; i++) {
            f[i].hadamard = f[i].stochastic = 0; /* neither changes the time of products */
            if (QUANTIZED[c].row) f[i].scaling = GMM_SCALING_ROW, f[i].dtype = GMM_E4M3;
            if (c != Q_ROW_FAST) quantize_operand(q, i, operands[i], &f[i], way[i]);
            else q->operand[i] = source->operand[i];
        }
        if (c == Q_ROW_FAST) q->bytes = source->bytes;
        *(B.kind == FWD ? &q->lin.x : &q->lin.dy) = &q->operand[0];
        *(wgrad ? &q->lin.x : &q->lin.w) = &q->operand[1];
    }
    if (QUANTIZED[c].who == GMM_PRODUCT) q->engine = plan(&q->lin);
}

static void prepare_quantized(int kind, int *present) {
    const int wgrad = kind >= WGRAD;
    const product_operand x = {0, B.k, B.x}, w = {1, B.k, B.w}, dy = {0, B.n, B.dy};
    const product_operand *const operands[2] = {kind == FWD ? &x : &dy, wgrad ? &x : &w};
    const gmm_direction way[2] = {wgrad ? GMM_COLUMNWISE : GMM_ROWWISE, kind == FWD ? GMM_ROWWISE : GMM_COLUMNWISE};
    float *values[2] = {NULL, NULL};
    int c, i;
    describe(kind);
    if (!B.anchor_d) make_anchor();
    for (c = 0; c < Q_CONTENDERS; c++) {
        const int peer = peer_of(c) >= 0;
        int good;
        present[c] = peer ? B.peers != NULL : QUANTIZED[c].who != MEMORY || few_rows();
        if (!present[c] || !(peer || QUANTIZED[c].who == GMM_PRODUCT)) continue;
        B.peer_failed = 0;
        describe_quantized(c, operands, way);
        /* these and torch read the copies of contender `row`, deepgemm those of `block` */
        if (QUANTIZED[c].recipe != GMM_RECIPE_NONE && c != Q_ROW_FAST)
            for (i = 0; i < 2; i++) {
                cudaFree(values[i]);
                values[i] = dequantize_operand(operands[i], way[i], &B.q[c].copy[i]);
            }
        if (c == Q_BF16)
            good = check_contender(run_quantized, c, QUANTIZED[c].name, operands[wgrad]->values,
                                   operands[!wgrad]->values, GMM_BF16, 0.0);
        else good = check_contender(run_quantized, c, QUANTIZED[c].name, values[wgrad], values[!wgrad], GMM_F32,
                                    loss_of(c));
        if (good) continue;
        if (!peer) die(QUANTIZED[c].name, "a sampled result is wrong");
        if (!B.peer_failed) fprintf(stderr, "gpu_bench: %s: a sampled result is wrong; left out\n", QUANTIZED[c].name);
        present[c] = 0;
    }
    for (i = 0; i < 2; i++) cudaFree(values[i]);
    (void)cudaGetLastError();
}

/* ------------------------------------------------------------------------------------------------- Bandwidth --- */

enum { PERMUTE, PERMUTE_ROWS, UNPERMUTE, ACT_FWD, ACT_BWD, PAD, UNPAD, MOVES };
static const char *const MOVE_NAMES[MOVES] = {"permute", "permute*", "unpermute", "act fwd", "act bwd", "pad", "unpad"};
static void run_permute(void) { ok(gmm_permute_fwd(B.ctx, &B.perm, B.workspace, B.workspace_bytes, B.stream)); }
static void run_unpermute(void) { ok(gmm_unpermute_fwd(B.ctx, &B.perm, B.workspace, B.workspace_bytes, B.stream)); }
static void run_act_fwd(void) { ok(gmm_act_fwd(B.ctx, &B.act, B.workspace, B.workspace_bytes, B.stream)); }
static void run_act_bwd(void) { ok(gmm_act_bwd(B.ctx, &B.act, B.workspace, B.workspace_bytes, B.stream)); }
static void run_pad(void) { ok(gmm_pad(B.ctx, &B.pad, B.workspace, B.workspace_bytes, B.stream)); }
static void run_unpad(void) { ok(gmm_unpad(B.ctx, &B.pad, B.workspace, B.workspace_bytes, B.stream)); }
static void (*const RUN_MOVE[MOVES])(void) = {run_permute, run_permute, run_unpermute, run_act_fwd,
                                             run_act_bwd, run_pad,     run_unpad};
static void run_copy(void) {
    cuda(cudaMemcpyAsync(B.copy_to, B.copy_from, B.copy_bytes, cudaMemcpyDeviceToDevice, B.stream), "copy");
}
static void run_beside(int copy) {
    if (copy) run_copy();
    else B.beside();
}

/* GB/s of one operation and of a copy that alternates with it; fewest bytes: every input and output once. */
static void bandwidth(const shape *s, int what, double *gbs, double *copy, double *mhz) {
    const int64_t tokens = s->tokens / s->topk, rows = s->tokens, h = s->hidden, ffn = s->ffn;
    const int present[2] = {1, 1};
    double seconds[2], bytes = 0.0;
    gmm_info info = GMM_ZERO;
    gmm_act act = gmm_act_of(GMM_ACT_PRESET_SWIGLU);
    gmm_mat in, out, third, fourth;
    void *hold[8];
    int held = 0, i;
    int64_t r;
    B.options.engine = B.engine;
    routing even = {"", 0, 0, NEVER, NEVER};
    even.tokens = s->tokens / s->groups;
    even.zipf = what == PAD || what == UNPAD;
    split(s, &even);
    if (what == PERMUTE || what == UNPERMUTE) {
        int32_t *indices = (int32_t *)malloc(sizeof *indices * (size_t)rows);
        float *probs = (float *)malloc(sizeof *probs * (size_t)rows);
        uint64_t z = 7;
        if (!indices || !probs) die("malloc", "no memory");
        for (r = 0; r < rows; r++) {
            int again = 1;
            while (again) {
                int64_t q = r / s->topk * s->topk;
                z = z * 6364136223846793005u + 1442695040888963407u;
                indices[r] = (int32_t)((z >> 33) % (uint64_t)s->groups);
                for (again = 0; q < r; q++) again |= indices[q] == indices[r];
            }
            probs[r] = (float)((z >> 40) & 0xFFFF) / 65536.0f;
        }
        memset(&B.perm, 0, sizeof B.perm);
        B.perm.experts = s->groups;
        B.perm.tokens = tokens;
        B.perm.capacity = rows;
        B.perm.hidden = h;
        B.perm.topk = s->topk;
        B.perm.options = &B.options;
        B.perm.indices = (int32_t *)(hold[held++] = upload(indices, sizeof *indices * (size_t)rows));
        B.perm.row_of = (int32_t *)(hold[held++] = device_alloc(4 * (size_t)rows));
        B.perm.slot_of = (int32_t *)(hold[held++] = device_alloc(4 * (size_t)rows));
        B.perm.sizes = B.sizes;
        in = gmm_mat_packed(GMM_BF16, hold[held++] = random_bf16(what == PERMUTE ? tokens * h : rows * h, 1));
        hold[held] = device_alloc((size_t)(what == PERMUTE ? rows : tokens) * (size_t)h * 2);
        out = gmm_mat_packed(GMM_BF16, hold[held++]);
        for (i = 0; i < 2; i++) { /* the map, and the operation that is timed */
            const gmm_op op = i ? (what == PERMUTE ? GMM_OP_PERMUTE_FWD : GMM_OP_UNPERMUTE_FWD) : GMM_OP_PERMUTE_MAP;
            if (i) {
                B.perm.probs = (float *)(hold[held++] = upload(probs, sizeof *probs * (size_t)rows));
                B.perm.rows = what == PERMUTE ? &out : &in;
                if (what == PERMUTE) {
                    B.perm.x = &in;
                    B.perm.row_probs = (float *)(hold[held++] = device_alloc(4 * (size_t)rows));
                } else {
                    B.perm.out = &out;
                }
            }
            ok(gmm_permute_query(B.ctx, op, &B.perm, &info));
            workspace(info.workspace_bytes);
            if (!i) ok(gmm_permute_map(B.ctx, &B.perm, B.workspace, B.workspace_bytes, B.stream));
        }
        bytes = 2.0 * (double)((tokens + rows) * h) + (what == PERMUTE ? 12.0 : 8.0) * (double)rows;
        free(indices);
        free(probs);
    } else if (what == ACT_FWD || what == ACT_BWD) {
        memset(&B.act, 0, sizeof B.act);
        B.act.ffn = ffn;
        B.act.groups = &B.g;
        B.act.options = &B.options;
        B.act.act = &act;
        in = gmm_mat_packed(GMM_BF16, hold[held++] = random_bf16(rows * 2 * ffn, 1));
        out = gmm_mat_packed(GMM_BF16, hold[held++] = device_alloc((size_t)(rows * ffn) * 2));
        B.act.x = &in;
        B.act.y = &out;
        B.act.prob = (float *)(hold[held++] = device_alloc(4 * (size_t)rows));
        cuda(cudaMemset((void *)B.act.prob, 0x3F, 4 * (size_t)rows), "memset"); /* 0.747 */
        if (what == ACT_BWD) {
            third = gmm_mat_packed(GMM_BF16, hold[held++] = random_bf16(rows * ffn, 2));
            fourth = gmm_mat_packed(GMM_BF16, hold[held++] = device_alloc((size_t)(rows * 2 * ffn) * 2));
            B.act.dy = &third;
            B.act.dx = &fourth;
            B.act.dprob = (float *)(hold[held++] = device_alloc(4 * (size_t)rows));
        }
        ok(gmm_act_query(B.ctx, what == ACT_FWD ? GMM_OP_ACT_FWD : GMM_OP_ACT_BWD, &B.act, &info));
        bytes = (double)rows * (what == ACT_FWD ? 6.0 * (double)ffn + 4.0 : 12.0 * (double)ffn + 8.0);
    } else {
        int64_t padded = 0;
        memset(&B.pad, 0, sizeof B.pad);
        for (i = 0; i < s->groups; i++) padded += (B.size[i] + 15) / 16 * 16;
        B.pad.align = 16;
        B.pad.cols = h;
        B.pad.padded_capacity = rows + 15 * s->groups;
        B.pad.groups = &B.g;
        B.pad.options = &B.options;
        in = gmm_mat_packed(GMM_BF16, hold[held++] = random_bf16(B.pad.padded_capacity * h, 1));
        out = gmm_mat_packed(GMM_BF16, hold[held++] = device_alloc((size_t)(B.pad.padded_capacity * h) * 2));
        B.pad.src = &in;
        B.pad.dst = &out;
        ok(gmm_pad_query(B.ctx, what == PAD ? GMM_OP_PAD : GMM_OP_UNPAD, &B.pad, &info));
        bytes = 2.0 * (double)h * (double)(rows + (what == PAD ? padded : rows));
    }
    workspace(info.workspace_bytes);
    B.beside = RUN_MOVE[what];
    measure(run_beside, present, 2, seconds, mhz);
    *gbs = bytes / seconds[0] * 1e-9;
    *copy = 2.0 * (double)B.copy_bytes / seconds[1] * 1e-9;
    for (i = 0; i < held; i++) cudaFree(hold[i]);
}

/* ------------------------------------------------------------------------------------------------------ Main --- */

static void open_nvml(int device) {
    char bus[32];
    int (*init)(void), (*by_bus)(const char *, void **), (*driver)(char *, unsigned);
    snprintf(B.driver, sizeof B.driver, "unknown");
    B.nvml = dlopen("libnvidia-ml.so.1", RTLD_NOW);
    if (!B.nvml || cudaDeviceGetPCIBusId(bus, sizeof bus, device) != cudaSuccess) return;
    *(void **)&init = dlsym(B.nvml, "nvmlInit_v2");
    *(void **)&by_bus = dlsym(B.nvml, "nvmlDeviceGetHandleByPciBusId_v2");
    *(void **)&driver = dlsym(B.nvml, "nvmlSystemGetDriverVersion");
    if (!init || !by_bus || !driver || init()) return;
    (void)driver(B.driver, sizeof B.driver);
    if (by_bus(bus, &B.nvml_device) == 0) *(void **)&B.nvml_clock = dlsym(B.nvml, "nvmlDeviceGetClockInfo");
}

/* ------------------------------------------------------------------------------------------------------ Report --- */

/* The geometric means of the report: of ratios of rates, or of the least time that memory traffic takes over the
   measured time. */
enum { EVEN, ZIPF, MIDDLE, MIDDLE_STRIDED, WGRAD_MAIN, WGRAD_BYTES, WGRAD_PEERS, FEW, ONE_GROUP,
       DEEPGEMM_EVEN, DEEPGEMM_ZIPF, DEEPGEMM_WGRAD, MEANS };
typedef struct mean {
    const char *what;
    int rows;
    double logs, worst;
    char name[64];
} mean;
static mean MEAN[MEANS] = {{"fwd, dgrad, 512 tokens and more / best peer", 0, 0, 0, ""},
                 {"the same, Zipf with empty experts / best peer", 0, 0, 0, ""},
                 {"fwd, dgrad, 129 to 511 tokens / torch", 0, 0, 0, ""},
                 {"the same / strided-batched", 0, 0, 0, ""},
                 {"wgrad f32+, 735 tokens and more / best bf16 peer", 0, 0, 0, ""},
                 {"wgrad f32+, fewer tokens, share of the byte floor", 0, 0, 0, ""},
                 {"wgrad bf16 / best peer", 0, 0, 0, ""},
                 {"fwd, up to 128 tokens, share of the byte floor", 0, 0, 0, ""},
                 {"fwd, one group of 8192^3 / cuBLASLt", 0, 0, 0, ""},
                 {"fwd, dgrad, 129 tokens and more / deepgemm", 0, 0, 0, ""},
                 {"the same, Zipf with empty experts / deepgemm", 0, 0, 0, ""},
                 {"wgrad f32+, 129 tokens and more / deepgemm", 0, 0, 0, ""}};
static void count_in(mean *m, double ratio, const char *name) {
    if (!(ratio > 0.0)) return;
    if (!m->rows++ || ratio < m->worst) {
        m->worst = ratio;
        snprintf(m->name, sizeof m->name, "%s", name);
    }
    m->logs += log(ratio);
}

static struct {
    const char *rows; /* substrings, separated by commas: a row that contains one is selected, or left out (-) */
    FILE *json;
    int csv, entries, limits, quantized;
    double ms;
} R;

static int now(int when) { return when == ALWAYS || (when == ASKED && *R.rows); }
static int wanted(const char *name) {
    const char *at = R.rows;
    char one[64];
    int named = 0, yes = 0;
    while (*at) {
        const size_t n = strcspn(at, ",");
        snprintf(one, sizeof one, "%.*s", (int)(n < sizeof one ? n : sizeof one - 1), at);
        if (n && *one == '-') {
            if (strstr(name, one + 1)) return 0;
        } else if (n) {
            named = 1;
            if (strstr(name, one)) yes = 1;
        }
        at += n + (at[n] == ',');
    }
    return yes || !named;
}

static void print_mean(const mean *m) {
    if (m->rows)
        printf("%-52s %4d %6.3f  %.3f %s\n", m->what, m->rows, exp(m->logs / m->rows), m->worst, m->name);
}

/* Times the row in B, prints it, and adds it to the means. *peer: best rate of a peer that writes bf16 gradients; set
   by the bf16 row, read by the fp32 row after it. */
static void linear_row(const shape *p, const routing *r, int fc, int kind, const char *name, double *peer) {
    const int wgrad = kind >= WGRAD;
    const double weights = (double)B.live * (double)B.n * (double)B.k;
    const double flops = operations();
    const double bytes = 2.0 * (double)B.rows * (double)(B.n + B.k) + (kind == WGRAD_F32 ? 8.0 : 2.0) * weights;
    int present[CONTENDERS], i;
    double seconds[CONTENDERS], rate[CONTENDERS], best = 0.0, mhz, read = 0.0, share = 0.0;
    prepare(kind, present);
    B.peer_failed = 0;
    measure(run_one, present, CONTENDERS, seconds, &mhz);
    finish();
    if (B.peer_failed) die(name, "a peer that had run failed while it was timed");
    for (i = 0; i < READ; i++) {
        rate[i] = present[i] ? flops / seconds[i] * 1e-12 : 0.0;
        if (i != GMM_RUN && i != DENSE && rate[i] > best) best = rate[i];
    }
    if (present[READ]) {
        read = (double)B.copy_bytes / seconds[READ];
        share = bytes / read / seconds[GMM_RUN];
    }
    if (present[DEEPGEMM] && r->tokens > FEW_TOKENS && p != &SHAPES[DENSE_SHAPE])
        count_in(&MEAN[wgrad ? DEEPGEMM_WGRAD : r->zipf ? DEEPGEMM_ZIPF : DEEPGEMM_EVEN],
                 rate[GMM_RUN] / rate[DEEPGEMM], name);
    if (p == &SHAPES[DENSE_SHAPE]) {
        if (kind == FWD) count_in(&MEAN[ONE_GROUP], rate[GMM_RUN] / (rate[DENSE] > best ? rate[DENSE] : best), name);
    } else if (!wgrad) {
        if (r->tokens >= 512 && best > 0.0) count_in(&MEAN[r->zipf ? ZIPF : EVEN], rate[GMM_RUN] / best, name);
        else if (r->tokens > FEW_TOKENS && !r->zipf) {
            if (present[TORCH]) count_in(&MEAN[MIDDLE], rate[GMM_RUN] / rate[TORCH], name);
            if (present[STRIDED]) count_in(&MEAN[MIDDLE_STRIDED], rate[GMM_RUN] / rate[STRIDED], name);
        } else if (kind == FWD) count_in(&MEAN[FEW], share, name);
    } else if (kind == WGRAD) {
        *peer = best;
        if (best > 0.0) count_in(&MEAN[WGRAD_PEERS], rate[GMM_RUN] / best, name);
    } else if (present[READ]) count_in(&MEAN[WGRAD_BYTES], share, name);
    else if (*peer > 0.0) count_in(&MEAN[WGRAD_MAIN], rate[GMM_RUN] / *peer, name);

    if (R.csv) printf("%s,%lld,%lld,%lld", name, (long long)B.rows, (long long)B.n, (long long)B.k);
    else
        printf("%-8s %-8s fc%d%-2s %-5s", p->name, r->name, fc, KIND_LETTER[kind],
               kind == WGRAD_F32 ? "f32+" : "bf16");
    for (i = 0; i < READ; i++) {
        if (rate[i] > 0.0) printf(R.csv ? ",%.4g" : " %9.4g", rate[i]);
        else printf(R.csv ? "," : " %9s", "-");
    }
    if (R.csv) {
        printf(",%.3f,", rate[DENSE] > 0.0 ? rate[GMM_RUN] / rate[DENSE] : 0.0);
        if (best > 0.0) printf("%.3f", rate[GMM_RUN] / best);
        printf(",");
        if (share > 0.0) printf("%.3f,%.0f", share, read * 1e-9);
        else printf(",");
        printf(",%.0f\n", mhz);
    } else {
        printf(" %9.2f", rate[DENSE] > 0.0 ? rate[GMM_RUN] / rate[DENSE] : 0.0);
        if (best > 0.0) printf(" %8.2f", rate[GMM_RUN] / best);
        else printf(" %8s", "-");
        if (share > 0.0) printf(" %6.2f of %4.0f", share, read * 1e-9);
        else printf(" %14s", "-");
        printf(" %5.0f\n", mhz);
    }
    fflush(stdout);
    if (R.json) {
        fprintf(R.json, "%s\n  {\"row\": \"%s\", \"shape\": \"%s\", \"routing\": \"%s\", \"zipf\": %d, "
                "\"tokens\": %lld, \"op\": \"%s\", \"rows\": %lld, \"n\": %lld, \"k\": %lld, \"flops\": %.6g, "
                "\"bytes\": %.6g",
                R.entries++ ? "," : "", name, p->name, r->name, r->zipf, (long long)r->tokens,
                kind == FWD ? "fwd" : kind == DGRAD ? "dgrad" : kind == WGRAD ? "wgrad" : "wgrad f32+",
                (long long)B.rows, (long long)B.n, (long long)B.k, flops, bytes);
        for (i = 0; i < READ; i++)
            if (rate[i] > 0.0) fprintf(R.json, ", \"%s\": %.4g", NAMES[i], rate[i]);
        if (read > 0.0) fprintf(R.json, ", \"read_gbs\": %.1f, \"floor_share\": %.4f", read * 1e-9, share);
        fprintf(R.json, ", \"sm_mhz\": %.0f}", mhz);
    }
}

/* Ratios of quantized products: rates of two contenders, or the least time of the memory traffic over the time (against
   Q_READ). */
enum { F = 1, D = 2, W = 4, W32 = 8 }; /* 1 << kind */
static struct { int kinds, contender, over; int64_t least, most; mean m; } RATIOS[] = {
    {F | D, Q_ROW, Q_TORCH, 512, 4096, {"fp8 row, fwd, dgrad, 512 tokens and more / torch", 0, 0, 0, ""}},
    {F | D, Q_ROW, Q_TORCH, 129, 511, {"the same, 129 to 511 tokens / torch", 0, 0, 0, ""}},
    {F | D, Q_ROW_FAST, Q_TORCH_FAST, 512, 4096, {"fast, fwd, dgrad, 512 tokens and more / torch fast", 0, 0, 0, ""}},
    {W, Q_ROW, Q_TORCH, 512, 4096, {"fp8 row, wgrad, 512 tokens and more / torch", 0, 0, 0, ""}},
    {W, Q_ROW_FAST, Q_TORCH_FAST, 512, 4096, {"fast, wgrad, 512 tokens and more / torch fast", 0, 0, 0, ""}},
    {F | D, Q_ROW, Q_CUBLAS, 4096, 4096, {"fp8 row, fwd, dgrad, 4096 tokens / 8192^3", 0, 0, 0, ""}},
    {F | D, Q_ROW_FAST, Q_CUBLAS_FAST, 4096, 4096, {"fast, fwd, dgrad, 4096 tokens / 8192^3 fast", 0, 0, 0, ""}},
    {F | D, Q_BLOCK, Q_DEEPGEMM, 129, 4096, {"fp8 block, fwd, dgrad, from 129 tokens / deepgemm", 0, 0, 0, ""}},
    {W32, Q_BLOCK, Q_DEEPGEMM, 129, 4096, {"fp8 block, wgrad f32+, from 129 tokens / deepgemm", 0, 0, 0, ""}},
    {F | D, Q_BLOCK, Q_CUBLAS, 4096, 4096, {"fp8 block, fwd, dgrad, 4096 tokens / 8192^3", 0, 0, 0, ""}},
    {W | W32, Q_TENSOR, Q_BF16, 512, 4096, {"fp8 tensor, wgrad, 512 tokens and more / bf16", 0, 0, 0, ""}},
    {W | W32, Q_BLOCK, Q_BF16, 512, 4096, {"fp8 block, wgrad, 512 tokens and more / bf16", 0, 0, 0, ""}},
    {F | D | W | W32, Q_MXFP8, Q_BF16, 129, 4096, {"mxfp8, 129 tokens and more / bf16", 0, 0, 0, ""}},
    {F | D | W | W32, Q_NVFP4, Q_BF16, 129, 4096, {"nvfp4, 129 tokens and more / bf16", 0, 0, 0, ""}},
    {F, Q_ROW, Q_READ, 1, 64, {"fp8 row, fwd, up to 64 tokens, share of the floor", 0, 0, 0, ""}},
    {F, Q_BLOCK, Q_READ, 1, 64, {"fp8 block, fwd, up to 64, share of the floor", 0, 0, 0, ""}},
    {F, Q_MXFP8, Q_READ, 1, 64, {"mxfp8, fwd, up to 64, share of the floor", 0, 0, 0, ""}},
    {F, Q_NVFP4, Q_READ, 1, 64, {"nvfp4, fwd, up to 64, share of the floor", 0, 0, 0, ""}}};
enum { RATIO_COUNT = (int)(sizeof RATIOS / sizeof RATIOS[0]) };

/* Times the products of quantized operands; a second line has the ratios to the least time of the memory traffic, for
   rows with few tokens. */
static void quantized_row(const shape *p, const routing *r, int fc, int kind, const char *name) {
    const double flops = operations();
    const char *comma = "";
    int present[Q_CONTENDERS], c, i;
    double seconds[Q_CONTENDERS], rate[Q_CONTENDERS], share[Q_CONTENDERS], mhz, read = 0.0;
    prepare_quantized(kind, present);
    B.peer_failed = 0;
    measure(run_quantized, present, Q_CONTENDERS, seconds, &mhz);
    if (B.peer_failed) die(name, "a peer that had run failed while it was timed");
    while (B.held) cudaFree(B.hold[--B.held]);
    if (present[Q_READ]) read = (double)B.copy_bytes / seconds[Q_READ];
    for (c = 0; c < Q_READ; c++) {
        const int anchor = QUANTIZED[c].who == CUBLAS_ANCHOR;
        rate[c] = present[c] ? (anchor ? 2.0 * ANCHOR * ANCHOR * ANCHOR : flops) / seconds[c] * 1e-12 : 0.0;
        share[c] = read > 0.0 && QUANTIZED[c].who == GMM_PRODUCT ? B.q[c].bytes / read / seconds[c] : 0.0;
    }
    for (i = 0; i < RATIO_COUNT; i++) {
        const int a = RATIOS[i].contender, b = RATIOS[i].over;
        if (!(RATIOS[i].kinds >> kind & 1) || r->tokens < RATIOS[i].least || r->tokens > RATIOS[i].most) continue;
        count_in(&RATIOS[i].m, b == Q_READ ? share[a] : rate[b] > 0.0 ? rate[a] / rate[b] : 0.0, name);
    }
    if (!R.quantized++) {
        printf(R.csv ? "\nrow,tokens,n,k" : "\nQuantized products, TFLOP/s (cublas: one product of 8192^3, a scale per "
               "tensor; + : fast accumulation);\nfloor: share of the least time that the bytes of codes, scales and "
               "results take\n%-8s %-8s %-5s %-5s", "shape", "split", "op", "out");
        for (c = 0; c < Q_READ; c++) printf(R.csv ? ",%s" : " %8s", QUANTIZED[c].name);
        for (c = 0; R.csv && c < Q_READ; c++) printf(",%s_floor", QUANTIZED[c].name);
        printf(R.csv ? ",read_gbs,sm_mhz\n" : " %5s\n", "MHz");
    }
    if (R.csv) printf("%s,%lld,%lld,%lld", name, (long long)B.rows, (long long)B.n, (long long)B.k);
    else
        printf("%-8s %-8s fc%d%-2s %-5s", p->name, r->name, fc, KIND_LETTER[kind], kind == WGRAD_F32 ? "f32+" : "bf16");
    for (c = 0; c < Q_READ; c++) {
        if (rate[c] > 0.0) printf(R.csv ? ",%.4g" : " %8.4g", rate[c]);
        else printf(R.csv ? "," : " %8s", "-");
    }
    if (!R.csv) printf(" %5.0f\n", mhz);
    if (!R.csv && read > 0.0) printf("%24s %4.0f", "floor, GB/s read:", read * 1e-9);
    for (c = 0; c < Q_READ && (R.csv || read > 0.0); c++) {
        if (share[c] > 0.0) printf(R.csv ? ",%.3f" : " %8.2f", share[c]);
        else printf(R.csv ? "," : " %8s", "");
    }
    if (R.csv) printf(",%.0f,%.0f\n", read * 1e-9, mhz);
    else if (read > 0.0) printf("\n");
    fflush(stdout);
    if (!R.json) return;
    fprintf(R.json, "%s\n  {\"row\": \"%s\", \"rows\": %lld, \"n\": %lld, \"k\": %lld, \"quantized\": {",
            R.entries++ ? "," : "", name, (long long)B.rows, (long long)B.n, (long long)B.k);
    for (c = 0; c < Q_READ; c++, comma = rate[c - 1] > 0.0 ? ", " : comma) {
        if (rate[c] > 0.0) fprintf(R.json, "%s\"%s\": %.4g", comma, QUANTIZED[c].name, rate[c]);
        if (share[c] > 0.0) fprintf(R.json, ", \"%s_floor\": %.3f", QUANTIZED[c].name, share[c]);
    }
    fprintf(R.json, "}, \"sm_mhz\": %.0f}", mhz);
}

/* The same call with sm_limit set, alternating. */
static const int32_t LIMITS[] = {132, 124, 116, 100};
static void run_limit(int i) {
    B.options.sm_limit = LIMITS[i];
    run_gmm();
    B.options.sm_limit = 0;
}
static void limit_row(const char *name, int kind) {
    const int all[4] = {1, 1, 1, 1};
    int present[CONTENDERS], i;
    double seconds[4], mhz;
    prepare(kind, present);
    measure(run_limit, all, 4, seconds, &mhz);
    finish();
    if (!R.limits++)
        printf("\n%s\n", R.csv ? "row,sm_limit,us,of_132" : "Time with fewer multiprocessors, and its ratio to 132 "
               "(work shared out evenly: 1.065, 1.138, 1.320)");
    if (!R.csv) printf("%-28s", name);
    for (i = 0; i < 4; i++) {
        if (R.csv) printf("%s,%d,%.3g,%.3f\n", name, (int)LIMITS[i], seconds[i] * 1e6, seconds[i] / seconds[0]);
        else printf("  %3d: %8.1f us %5.3f", (int)LIMITS[i], seconds[i] * 1e6, seconds[i] / seconds[0]);
    }
    if (!R.csv) printf("\n");
    fflush(stdout);
    if (!R.json) return;
    fprintf(R.json, "%s\n  {\"row\": \"%s\", \"sm_limit\": {", R.entries++ ? "," : "", name);
    for (i = 0; i < 4; i++) fprintf(R.json, "%s\"%d\": %.4g", i ? ", " : "", (int)LIMITS[i], seconds[i] * 1e6);
    fprintf(R.json, "}}");
}

static void row_name(char name[64], const shape *p, const routing *r, int fc, int kind, const char *more) {
    snprintf(name, 64, "%s/%s/fc%d%s/%s%s", p->name, r->name, fc, KIND_LETTER[kind],
             kind == WGRAD_F32 ? "f32" : "bf16", more);
}

/* All rows of one linear layer in bf16, or with sm_limit, or with quantized operands. */
enum { PLAIN, LIMITED, WITH_CODES };
static void layer_rows(const shape *p, int fc, int rows) {
    const int dense = p == &SHAPES[DENSE_SHAPE], count = dense ? 1 : ROUTING_COUNT;
    int ready = 0, i, kind;
    B.n = fc == 1 ? 2 * p->ffn : p->hidden;
    B.k = fc == 1 ? p->hidden : p->ffn;
    for (i = 0; i < count; i++) {
        const routing *r = dense ? &DENSE_ROUTING : &ROUTINGS[i];
        double peer = 0.0;
        if (rows == LIMITED && strcmp(r->name, "4096")) continue;
        if (!now(rows == WITH_CODES ? r->quantized : r->plain)) continue;
        for (kind = 0; kind < KINDS; kind++) {
            char name[64];
            row_name(name, p, r, fc, kind, rows == LIMITED ? "/sm_limit" : rows == WITH_CODES ? "/qlinear" : "");
            if (!wanted(name)) continue;
            if (!ready) {
                const int64_t most = (dense ? DENSE_ROUTING.tokens : (int64_t)MOST_TOKENS) * p->groups;
                const int64_t wide = B.n > B.k ? B.n : B.k;
                B.x = random_bf16(most * B.k, 1);
                B.w = random_bf16(p->groups * B.n * B.k, 2);
                B.dy = random_bf16(most * B.n, 3);
                B.out = (uint16_t *)device_alloc((size_t)(most * wide) * 2);
                B.dw = device_alloc((size_t)(p->groups * B.n * B.k) * 4);
                ready = 1;
            }
            B.row = name;
            split(p, r);
            if (rows == LIMITED) limit_row(name, kind);
            else if (rows == WITH_CODES) quantized_row(p, r, fc, kind, name);
            else linear_row(p, r, fc, kind, name, &peer);
        }
    }
    if (ready) cudaFree(B.x), cudaFree(B.w), cudaFree(B.dy), cudaFree(B.out), cudaFree(B.dw);
}

/* One dense product of a layer's N and K with many rows of tokens, by cuBLASLt. */
static void run_lt_dense(int c) { lt_run(&B.lt_dense[c], B.lt_a[c], B.lt_b[c], B.out, 0.0f, 0); }
static void dense_rows(const shape *p, int fc) {
    static int any;
    const int64_t n = fc == 1 ? 2 * p->ffn : p->hidden, k = fc == 1 ? p->hidden : p->ffn;
    const int64_t most = DENSE_ROWS[DENSE_ROW_COUNT - 1];
    uint16_t *x = NULL, *w = NULL;
    int present[D_CONTENDERS], i, c;
    for (i = 0; i < DENSE_ROW_COUNT; i++) {
        const int64_t m = DENSE_ROWS[i];
        const lt_product plain = {CUDA_R_16BF, CUDA_R_16BF, CUBLAS_OP_T, CUBLAS_OP_N, n, m, k, k, k, n, 0};
        double seconds[D_CONTENDERS], rate[D_CONTENDERS], mhz;
        const char *comma = "";
        char name[64];
        snprintf(name, sizeof name, "dense/%s/%lld/fc%d", p->name, (long long)m, fc);
        if (!wanted(name)) continue;
        if (!x) {
            x = random_bf16(most * k, 1);
            w = random_bf16(n * k, 2);
            B.out = (uint16_t *)device_alloc((size_t)(most * n) * 2);
            B.lt_a[D_BF16] = w, B.lt_b[D_BF16] = x;
            B.lt_a[D_FP8] = B.lt_a[D_FP8_FAST] = codes_of(w, n * k);
            B.lt_b[D_FP8] = B.lt_b[D_FP8_FAST] = codes_of(x, most * k);
        }
        for (c = 0; c < D_CONTENDERS; c++)
            present[c] = c == D_BF16 ? lt_make(&B.lt_dense[c], &plain)
                                     : lt_make_fp8(&B.lt_dense[c], m, n, k, c == D_FP8_FAST);
        measure(run_lt_dense, present, D_CONTENDERS, seconds, &mhz);
        if (!any++)
            printf(R.csv ? "\nrow,m,n,k,bf16,fp8,fp8+,sm_mhz\n"
                         : "\nOne dense product by cuBLASLt, TFLOP/s (fp8: E4M3, a scale per tensor; + : fast "
                           "accumulation)\n%-24s %6s %6s %6s %8s %8s %8s %5s\n", "row", "m", "n", "k",
                   DENSE_NAMES[D_BF16], DENSE_NAMES[D_FP8], DENSE_NAMES[D_FP8_FAST], "MHz");
        printf(R.csv ? "%s,%lld,%lld,%lld" : "%-24s %6lld %6lld %6lld", name, (long long)m, (long long)n, (long long)k);
        if (R.json)
            fprintf(R.json, "%s\n  {\"row\": \"%s\", \"rows\": %lld, \"n\": %lld, \"k\": %lld, \"dense_lt\": {",
                    R.entries++ ? "," : "", name, (long long)m, (long long)n, (long long)k);
        for (c = 0; c < D_CONTENDERS; c++) {
            rate[c] = present[c] ? 2.0 * (double)(m * n) * (double)k / seconds[c] * 1e-12 : 0.0;
            if (rate[c] > 0.0) printf(R.csv ? ",%.4g" : " %8.4g", rate[c]);
            else printf(R.csv ? "," : " %8s", "-");
            if (R.json && rate[c] > 0.0) {
                fprintf(R.json, "%s\"%s\": %.4g", comma, DENSE_NAMES[c], rate[c]);
                comma = ", ";
            }
            lt_drop(&B.lt_dense[c]);
        }
        printf(R.csv ? ",%.0f\n" : " %5.0f\n", mhz);
        fflush(stdout);
        if (R.json) fprintf(R.json, "}, \"sm_mhz\": %.0f}", mhz);
    }
    if (x) {
        cudaFree(x), cudaFree(w), cudaFree(B.out);
        cudaFree((void *)B.lt_a[D_FP8]), cudaFree((void *)B.lt_b[D_FP8]);
    }
}

static void move_rows(void) {
    double rate[MOVES][SHAPE_COUNT], copy[MOVES][SHAPE_COUNT];
    int s, i, any = 0;
    memset(rate, 0, sizeof rate);
    for (s = 0; s < SHAPE_COUNT; s++)
        for (i = 0; i < MOVES; i++) {
            char name[64];
            double mhz;
            snprintf(name, sizeof name, "%s/%s", SHAPES[s].name, MOVE_NAMES[i]);
            if (!wanted(name)) continue;
            if (i != PERMUTE_ROWS) bandwidth(&SHAPES[s], i, &rate[i][s], &copy[i][s], &mhz);
            else if (rate[PERMUTE][s] > 0.0) { /* the same run, other bytes counted */
                const double h = 2.0 * (double)SHAPES[s].hidden, tokens = 1.0 / SHAPES[s].topk;
                rate[i][s] = rate[PERMUTE][s] * (2.0 * h + 12.0) / (h * (1.0 + tokens) + 12.0);
                copy[i][s] = copy[PERMUTE][s];
            } else continue;
            any = 1;
            if (R.json)
                fprintf(R.json, "%s\n  {\"row\": \"%s\", \"gbs\": %.1f, \"copy_gbs\": %.1f}", R.entries++ ? "," : "",
                        name, rate[i][s], copy[i][s]);
        }
    if (!any) return;
    if (R.csv) {
        printf("\nrow,gbs,copy_gbs,share\n");
        for (s = 0; s < SHAPE_COUNT; s++)
            for (i = 0; i < MOVES; i++)
                if (rate[i][s] > 0.0)
                    printf("%s/%s,%.1f,%.1f,%.3f\n", SHAPES[s].name, MOVE_NAMES[i], rate[i][s], copy[i][s],
                           rate[i][s] / copy[i][s]);
        return;
    }
    printf("\nGB/s of the row / of a device-to-device copy, alternating, and the share. Inputs, outputs count once;\n"
           "in permute* a token's row counts once for every row that it is copied to.\n%-10s", "");
    for (s = 0; s < SHAPE_COUNT; s++) printf(" %18s", SHAPES[s].name);
    printf("\n");
    for (i = 0; i < MOVES; i++) {
        printf("%-10s", MOVE_NAMES[i]);
        for (s = 0; s < SHAPE_COUNT; s++) {
            if (rate[i][s] > 0.0)
                printf(" %5.0f/%-5.0f %5.1f%%", rate[i][s], copy[i][s], 100.0 * rate[i][s] / copy[i][s]);
            else printf(" %18s", "-");
        }
        printf("\n");
    }
}

/* Quantizers: formats of activations (18432 x 7168 in 8 uneven groups) or of weights (8 of 4096 x 4096), and how often
   the source must be read. `sides`: 1 rowwise, 2 columnwise, 3 both. */
typedef struct quantizer {
    const char *name;
    gmm_dtype source;
    int32_t sides, weights, passes;
    gmm_dtype dtype;
    gmm_scaling scaling;
    int32_t delayed, pow2, square, hadamard, stochastic;
} quantizer;
static const quantizer QUANTIZERS[] = {
    {"delayed", GMM_BF16, 1, 0, 1, GMM_E4M3, GMM_SCALING_TENSOR, 1, 0, 0, 0, 0},
    {"delayed", GMM_BF16, 3, 0, 1, GMM_E4M3, GMM_SCALING_TENSOR, 1, 0, 0, 0, 0},
    {"current", GMM_BF16, 1, 0, 2, GMM_E4M3, GMM_SCALING_TENSOR, 0, 0, 0, 0, 0},
    {"current", GMM_BF16, 3, 0, 2, GMM_E4M3, GMM_SCALING_TENSOR, 0, 0, 0, 0, 0},
    {"current weights", GMM_BF16, 3, 1, 2, GMM_E4M3, GMM_SCALING_TENSOR, 0, 0, 0, 0, 0},
    {"row", GMM_BF16, 1, 0, 2, GMM_E4M3, GMM_SCALING_ROW, 0, 0, 0, 0, 0},
    {"row", GMM_BF16, 3, 0, 2, GMM_E4M3, GMM_SCALING_ROW, 0, 0, 0, 0, 0},
    {"1x128", GMM_BF16, 1, 0, 1, GMM_E4M3, GMM_SCALING_1X128, 0, 0, 0, 0, 0},
    {"1x128", GMM_BF16, 2, 0, 1, GMM_E4M3, GMM_SCALING_1X128, 0, 1, 0, 0, 0},
    {"1x128", GMM_BF16, 3, 0, 1, GMM_E4M3, GMM_SCALING_1X128, 0, 1, 0, 0, 0},
    {"128x128 weights", GMM_BF16, 1, 1, 1, GMM_E4M3, GMM_SCALING_128X128, 0, 1, 0, 0, 0},
    {"128x128 weights", GMM_BF16, 3, 1, 1, GMM_E4M3, GMM_SCALING_128X128, 0, 1, 0, 0, 0},
    {"mxfp8", GMM_BF16, 1, 0, 1, GMM_E4M3, GMM_SCALING_MX32, 0, 0, 0, 0, 0},
    {"mxfp8", GMM_BF16, 3, 0, 1, GMM_E4M3, GMM_SCALING_MX32, 0, 0, 0, 0, 0},
    {"mxfp8 weights", GMM_BF16, 3, 1, 1, GMM_E4M3, GMM_SCALING_MX32, 0, 0, 0, 0, 0},
    {"nvfp4", GMM_BF16, 1, 0, 2, GMM_E2M1, GMM_SCALING_NV16, 0, 0, 0, 0, 0},
    {"nvfp4", GMM_BF16, 3, 0, 2, GMM_E2M1, GMM_SCALING_NV16, 0, 0, 0, 0, 0},
    {"nvfp4 16x16 weights", GMM_BF16, 3, 1, 2, GMM_E2M1, GMM_SCALING_NV16, 0, 0, 1, 0, 0},
    {"nvfp4 hadamard", GMM_BF16, 3, 0, 2, GMM_E2M1, GMM_SCALING_NV16, 0, 0, 0, 1, 0},
    {"nvfp4 hadamard stochastic", GMM_BF16, 3, 0, 2, GMM_E2M1, GMM_SCALING_NV16, 0, 0, 0, 1, 1},
    {"delayed f16", GMM_F16, 3, 0, 1, GMM_E5M2, GMM_SCALING_TENSOR, 1, 0, 0, 0, 0},
    {"1x128 f16", GMM_F16, 3, 0, 1, GMM_E4M3, GMM_SCALING_1X128, 0, 1, 0, 0, 0},
    {"delayed f32", GMM_F32, 1, 0, 1, GMM_E4M3, GMM_SCALING_TENSOR, 1, 0, 0, 0, 0},
    {"1x128 f32", GMM_F32, 3, 0, 1, GMM_E4M3, GMM_SCALING_1X128, 0, 1, 0, 0, 0},
    {"128x128 weights f32", GMM_F32, 3, 1, 1, GMM_E4M3, GMM_SCALING_128X128, 0, 1, 0, 0, 0},
    {"mxfp8 f32", GMM_F32, 3, 0, 1, GMM_E4M3, GMM_SCALING_MX32, 0, 0, 0, 0, 0},
    {"nvfp4 16x16 weights f32", GMM_F32, 3, 1, 2, GMM_E2M1, GMM_SCALING_NV16, 0, 0, 1, 0, 0}};

static __global__ void convert_bf16(void *to, gmm_dtype dtype, const uint16_t *from, int64_t count) {
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < count; i += (int64_t)gridDim.x * blockDim.x)
        gmm_store(dtype, to, i, gmm_bf16_to_f32(from[i]));
}
static gmm_quantization quantization;
static void run_quantize(void) { ok(gmm_quantize(B.ctx, &quantization, B.workspace, B.workspace_bytes, B.stream)); }

static void quantize_rows(void) {
    static const char *const sides[4] = {"", "row", "col", "both"};
    enum { TOKENS = 18432, WIDE = 7168, SQUARE = 4096, GROUPS = 8 };
    static const int32_t sizes[GROUPS] = {2305, 2303, 1001, 3607, 0, 4611, 2301, 2304};
    const int present[2] = {1, 1};
    int any = 0, k;
    size_t i;
    for (i = 0; i < sizeof QUANTIZERS / sizeof QUANTIZERS[0]; i++) {
        const quantizer *q = &QUANTIZERS[i];
        const int64_t count = q->weights ? GROUPS : 1, rows = q->weights ? SQUARE : TOKENS;
        const int64_t cols = q->weights ? SQUARE : WIDE, all = count * rows * cols;
        double seconds[2], mhz, bytes = (double)(q->passes * all) * gmm_dtype_bits(q->source) / 8.0, gbs, copy;
        char name[96];
        void *hold[16];
        int held = 0;
        gmm_format f = GMM_ZERO;
        gmm_mat source, to[2];
        gmm_info info = GMM_ZERO;
        float scale[GROUPS];
        snprintf(name, sizeof name, "quantize/%s/%s", q->name, sides[q->sides]);
        if (!wanted(name)) continue;
        f.dtype = q->dtype;
        f.scaling = q->scaling;
        f.delayed = q->delayed;
        f.pow2 = q->pow2;
        f.square = q->square;
        f.hadamard = q->hadamard ? GMM_HADAMARD | GMM_HADAMARD_SIGNS : 0;
        f.stochastic = q->stochastic;
        for (k = 0; k < GROUPS; k++) scale[k] = 20.0f;
        cuda(cudaMemcpy(B.sizes, sizes, sizeof sizes, cudaMemcpyHostToDevice), "splits");
        memset(&B.g, 0, sizeof B.g);
        B.g.count = GROUPS;
        B.g.capacity = TOKENS;
        B.g.splits = B.sizes;
        B.g.dtype = GMM_I32;
        memset(&quantization, 0, sizeof quantization);
        quantization.format = &f;
        quantization.cols = cols;
        if (q->weights) {
            quantization.count = GROUPS;
            quantization.rows = rows;
        } else quantization.groups = &B.g;
        source = gmm_mat_packed(GMM_BF16, hold[held++] = random_bf16(all, 1));
        if (q->source != GMM_BF16) {
            source = gmm_mat_packed(q->source, hold[held++] = device_alloc((size_t)all * 4));
            convert_bf16<<<1056, 256, 0, B.stream>>>(source.data, q->source, (const uint16_t *)hold[0], all);
        }
        quantization.src = &source;
        quantization.scale = q->delayed ? (float *)(hold[held++] = upload(scale, sizeof scale)) : NULL;
        quantization.random = (uint64_t *)(hold[held++] = device_alloc(16));
        cuda(cudaMemset(hold[held - 1], 7, 16), "memset");
        for (k = 0; k < 2; k++) {
            const gmm_direction direction = k ? GMM_COLUMNWISE : GMM_ROWWISE;
            gmm_layout l = GMM_ZERO;
            if (!(q->sides >> k & 1)) continue;
            if ((q->weights ? gmm_layout_of(f.dtype, f.scaling, f.order, direction, rows, cols, &l, NULL)
                            : gmm_layout_of_groups(f.dtype, f.scaling, f.order, direction, GROUPS, rows, cols, &l,
                                                   NULL)) != GMM_OK)
                die(name, "has no layout");
            to[k] = gmm_mat_quantized(&f, direction, hold[held] = device_alloc((size_t)(l.data_bytes * count)),
                                      hold[held + 1] = device_alloc((size_t)(l.scale_bytes * count)), NULL);
            held += 2;
            if (f.scaling == GMM_SCALING_NV16 || q->delayed) { /* delayed: the amax is recorded in the same pass */
                to[k].amax = (float *)(hold[held++] = device_alloc(4 * GROUPS));
                cuda(cudaMemset(to[k].amax, 0, 4 * GROUPS), "memset");
            }
            bytes += (double)(all * gmm_dtype_bits(f.dtype) / 8 + l.scale_bytes * count);
            if (k) quantization.columnwise = &to[1];
            else quantization.rowwise = &to[0];
        }
        ok(gmm_quantize_query(B.ctx, GMM_OP_QUANTIZE, &quantization, &info));
        workspace(info.workspace_bytes);
        B.beside = run_quantize;
        measure(run_beside, present, 2, seconds, &mhz);
        while (held) cudaFree(hold[--held]);
        gbs = bytes / seconds[0] * 1e-9;
        copy = 2.0 * (double)B.copy_bytes / seconds[1] * 1e-9;
        if (R.json)
            fprintf(R.json, "%s\n  {\"row\": \"%s\", \"gbs\": %.1f, \"copy_gbs\": %.1f}", R.entries++ ? "," : "",
                    name, gbs, copy);
        if (!any++)
            printf(R.csv ? "\nrow,us,gbs,copy_gbs,share\n"
                         : "\nQuantizers: GB/s of sources (as often as they must be read), codes and scales, and of a "
                           "copy alternating\n");
        printf(R.csv ? "%s,%.1f,%.1f,%.1f,%.3f\n" : "%-40s %8.1f us %6.0f/%-5.0f %6.3f\n", name, seconds[0] * 1e6, gbs,
               copy, gbs / copy);
        fflush(stdout);
    }
}

static const char USAGE[] =
    "usage: gpu_bench [--rows=LIST] [--ms=20] [--csv] [--json=FILE] [--engine=mma]\n"
    "--rows: parts of names, any of which selects a row: dsv3/512/fc1f/bf16 (shape, tokens per expert, operation,\n"
    "        output), dsv3/4096/fc1f/bf16/sm_limit, dsv3/512/fc1f/bf16/qlinear, dense/8192/fc1f/bf16, dsv3/permute,\n"
    "        dense/dsv3/4096/fc1, quantize/mxfp8/both; with - before it, leaves them out;\n"
    "        --rows=/64/,/zipf512/,-qlinear; rows of 130 and 256 tokens, qlinear of 128 and 192 run only if named\n"
    "--ms:   time of a contender in a row, alternating in 10 blocks (20 from 200 ms on); a claim needs 200\n"
    "--kernels: with torch: the kernels that contenders launch, as torch's profiler sees them, to stderr\n";

extern "C" int gmm_bench(int argc, char **argv, bench_peer peers, const char *torch_version, bench_watch watch) {
    const char *json_path = NULL;
    const float one = 1.0f;
    int engine, i, s;
    gmm_config config = GMM_ZERO;
    gmm_error error;
    cudaDeviceProp prop;
    int runtime = 0, cublas_version = 0;
    R.rows = "";
    R.ms = 20.0;
    for (i = 1; i < argc; i++) {
        if (!strcmp(argv[i], "--csv")) R.csv = 1;
        else if (!strncmp(argv[i], "--json=", 7)) json_path = argv[i] + 7;
        else if (!strncmp(argv[i], "--rows=", 7)) R.rows = argv[i] + 7;
        else if (!strncmp(argv[i], "--ms=", 5)) R.ms = atof(argv[i] + 5);
        else if (!strncmp(argv[i], "--engine=", 9)) {
            for (engine = 0; strcmp(gmm_engine_name((gmm_engine)engine), argv[i] + 9); engine++)
                if (engine == GMM_ENGINE_CUBLASLT) die("--engine", "no such engine");
            B.engine = (gmm_engine)engine;
        } else {
            fputs(USAGE, stdout);
            return strcmp(argv[i], "--help") != 0;
        }
    }
    if (!(R.ms > 0.0 && R.ms < 1e6)) die("--ms", "must be above 0 and below 1e6");
    B.blocks = R.ms >= 200.0 ? BLOCKS : BLOCKS / 2;
    B.block_ms = R.ms / B.blocks;
    B.peers = peers;
    B.watch = watch;
    cuda(cudaSetDevice(0), "cudaSetDevice");
    cuda(cudaGetDeviceProperties(&prop, 0), "cudaGetDeviceProperties");
    cuda(cudaStreamCreateWithFlags(&B.stream, cudaStreamNonBlocking), "stream");
    cuda(cudaEventCreateWithFlags(&B.fork, cudaEventDisableTiming), "event");
    for (i = 0; i < STREAMS; i++) {
        cuda(cudaStreamCreateWithFlags(&B.side[i], cudaStreamNonBlocking), "stream");
        cuda(cudaEventCreateWithFlags(&B.join[i], cudaEventDisableTiming), "event");
        B.lt_workspace[i] = device_alloc(LT_WORKSPACE);
    }
    for (i = 0; i < BLOCKS * TURNS; i++) {
        cuda(cudaEventCreate(&B.begin[i]), "event");
        cuda(cudaEventCreate(&B.end[i]), "event");
    }
    if (cublasCreate(&B.blas) || cublasLtCreate(&B.lt) || cublasSetStream(B.blas, B.stream) ||
        cublasSetWorkspace(B.blas, B.lt_workspace[0], LT_WORKSPACE))
        die("cuBLAS", "cannot be opened");
    cublasGetVersion(B.blas, &cublas_version);
    cudaRuntimeGetVersion(&runtime);
    config.space = GMM_SPACE_CUDA;
    if (gmm_create(&B.ctx, &config, &error) != GMM_OK) die("gmm_create", error.text);
    B.one = (float *)upload(&one, sizeof one);
    B.sizes = (int32_t *)device_alloc(4 * MAX_GROUPS);
    B.ends = (int32_t *)device_alloc(4 * MAX_GROUPS);
    B.pointers = (const void **)device_alloc(3 * MAX_GROUPS * sizeof(void *));
    B.lt_sizes = (int32_t *)device_alloc(6 * 4 * MAX_GROUPS);
    B.lt_addresses = (const void **)device_alloc(3 * MAX_GROUPS * sizeof(void *));
    B.lt_scalars = (float *)device_alloc(2 * sizeof(float));
    B.copy_bytes = (size_t)1 << 30;
    B.copy_from = (char *)random_bf16((int64_t)(B.copy_bytes / 2), 9);
    B.copy_to = device_alloc(B.copy_bytes);
    open_nvml(0);
    if (json_path && !(R.json = fopen(json_path, "w"))) die(json_path, "cannot be written");
    if (R.json)
        fprintf(R.json, "{\"gpu\": \"%s\", \"driver\": \"%s\", \"gmm\": \"%s\", \"ms\": %g, \"rows\": [", prop.name,
                B.driver, GMM_VERSION_STRING, R.ms);
    if (R.csv) {
        printf("row,tokens,n,k");
        for (i = 0; i < READ; i++) printf(",%s", NAMES[i]);
        printf(",gmm/dense,gmm/best,floor_share,read_gbs,sm_mhz\n");
    } else {
        printf("# %s, %d multiprocessors; SM clock %u MHz before; driver %s; CUDA %d.%d; cuBLAS %d.%d.%d; torch %s; "
               "gmm %s\n", prop.name, prop.multiProcessorCount, sm_clock(), B.driver, runtime / 1000,
               runtime % 1000 / 10, cublas_version / 10000, cublas_version / 100 % 100, cublas_version % 100,
               torch_version ? torch_version : "not installed", GMM_VERSION_STRING);
        printf("# bf16, TFLOP/s at the median of %d blocks, %.0f ms per contender, alternating; every result but dense "
               "compared with fp64\n", B.blocks, R.ms);
        printf("# gmm: device sizes. dense: one cublasLtMatmul of equal FLOPs. loop1, loop4: one per group on 1 and 4 "
               "streams, host sizes.\n# grouped: cublasGemmGroupedBatchedEx. strided: cublasGemmStridedBatchedEx, even "
               "splits only. ltgrouped:\n# one cublasLtMatmul of the grouped mode, where cuBLASLt is 13.8 or later. "
               "deepgemm: groups padded to\n# 128 rows beforehand. best: of all but dense.\n");
        printf("# split: tokens per expert, even or Zipf's. fc1 N = 2 ffn, fc2 N = hidden; f forward, d dgrad, w wgrad;"
               " f32+: added into fp32\n# (torch: by a second kernel). floor: least time of the bytes that must move, "
               "at the GB/s that a kernel reads beside it, over gmm's.\n");
        printf("%-8s %-8s %-5s %-5s", "shape", "split", "op", "out");
        for (i = 0; i < READ; i++) printf(" %9s", NAMES[i]);
        printf(" %9s %8s %14s %5s\n", "gmm/dense", "gmm/best", "floor of GB/s", "MHz");
    }
    for (s = 0; s < SHAPE_COUNT; s++)
        for (i = 1; i <= 2; i++) layer_rows(&SHAPES[s], i, PLAIN);
    layer_rows(&SHAPES[DENSE_SHAPE], 1, PLAIN);
    for (i = 1; i <= 2; i++) layer_rows(&SHAPES[0], i, LIMITED);
    for (s = 0; s < SHAPE_COUNT; s++)
        for (i = 1; i <= 2; i++) layer_rows(&SHAPES[s], i, WITH_CODES);
    for (s = 0; s < SHAPE_COUNT; s++)
        for (i = 1; i <= 2; i++) dense_rows(&SHAPES[s], i);
    move_rows();
    quantize_rows();
    if (R.json) {
        fprintf(R.json, "\n]}\n");
        fclose(R.json);
    }
    if (!R.csv) {
        printf("\n%-52s %4s %6s  %s\n", "gmm against its peers", "rows", "mean", "least");
        for (i = 0; i < MEANS; i++) print_mean(&MEAN[i]);
        for (i = 0; i < RATIO_COUNT; i++) print_mean(&RATIOS[i].m);
        printf("gmm: engine %s\n", gmm_engine_name(B.served));
        for (i = 0; R.quantized && i < Q_READ; i++)
            if (QUANTIZED[i].who == GMM_PRODUCT)
                printf("%s: engine %s\n", QUANTIZED[i].name, gmm_engine_name(B.q[i].engine));
    }
    fflush(stdout);
    gmm_destroy(B.ctx);
    return 0;
}

int main(int argc, char **argv) { return gmm_bench(argc, argv, NULL, NULL, NULL); }
