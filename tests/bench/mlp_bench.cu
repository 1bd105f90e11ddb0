/* mlp_bench - time and memory of an expert MLP, forward and backward, by recipe: bf16, FP8, MXFP8 and NVFP4, with
   weights in a cache and with weights cast in every step. All contenders of a row alternate in one process on the same
   random data. mlp_peers.py loads this file as a shared library and provides an MLP composed of torch's operations
   as a further contender, and torch's profiler. What it means: README.md. */
#include "gmm.h"

#include <cuda_runtime.h>
#include <dlfcn.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* One call of the MLP as mlp_peers.py sees it. */
typedef struct mlp_call {
    int32_t phase;   /* 0 forward, 1 backward, 2: the row is over, and torch frees its memory */
    int32_t first;   /* the first call on this row */
    int32_t check;   /* results are compared: write them to y, or to dx and dprob */
    int32_t groups;
    int64_t tokens, hidden, ffn;
    void *x, *w1, *w2, *prob, *dy, *y, *dx, *dprob, *dw1, *dw2;
    int32_t *ends;   /* device: end row of each group */
    cudaStream_t stream;
    int64_t saved, workspace; /* torch writes in checked calls: bytes from forward to backward, and most bytes beside */
} mlp_call;
typedef int (*mlp_peer)(mlp_call *call); /* 0 = enqueued */
/* Profiles `calls` forwards or backwards of a contender: called before them with `us` NULL, and behind them, when the
   GPU has finished, to write microseconds of a call by group of kernels. */
enum { KERNEL_GROUPS = 9 };
static const char *const KERNEL_GROUP[KERNEL_GROUPS] = {"gemm",   "wgrad",  "act",    "cast", "amax",
                                                        "expand", "splits", "copies", "other"};
typedef void (*mlp_watch)(const char *row, const char *contender, int backward, int calls, double *us);

extern "C" __attribute__((visibility("default"))) int gmm_mlp_bench(int argc, char **argv, mlp_peer torch,
                                                                    const char *torch_version, mlp_watch watch);

typedef struct shape {
    const char *name;
    int64_t tokens, hidden, ffn;
    int groups;
} shape;
static const shape SHAPES[] = {{"dsv3/32k", 32768, 7168, 2048, 8},    {"dsv3/4k", 4096, 7168, 2048, 8},
                               {"mixtral/16k", 16384, 4096, 14336, 8}, {"qwen3/64k", 65536, 2048, 768, 128},
                               {"gptoss/32k", 32768, 2880, 2880, 32},  {"odd/23k", 23000, 3072, 1408, 24}};
enum { SHAPE_COUNT = 6, MAX_GROUPS = 128, BLOCKS = 20, PROFILED = 3 };
enum { EVEN, ZIPF, SPLITS };
static const char *const SPLIT_NAMES[SPLITS] = {"even", "zipf"};

/* bound: the largest relative error of a result that is not taken for wrong. */
static const struct { const char *name, *heading; gmm_recipe_kind kind; double bound; } RECIPES[] = {
    {"fp8-delayed", "delayed", GMM_RECIPE_FP8_DELAYED, 0.3},
    {"fp8-current", "current", GMM_RECIPE_FP8_CURRENT, 0.3},
    {"fp8-block", "block", GMM_RECIPE_FP8_BLOCK, 0.3},
    {"mxfp8", "mxfp8", GMM_RECIPE_MXFP8, 0.3},
    {"nvfp4", "nvfp4", GMM_RECIPE_NVFP4, 0.8}};
enum { RECIPE_COUNT = 5, BF16 = 0, CACHED = 1, CAST = CACHED + RECIPE_COUNT, TORCH = CAST + RECIPE_COUNT, CONTENDERS };
static const double BF16_BOUND = 0.03;

/* Results compared with fp64. */
enum { Y, DX, DPROB, DW1, DW2, RESULTS };
static const char *const RESULT_NAMES[RESULTS] = {"y", "dx", "dprob", "dw1", "dw2"};

/* Bytes. kept: what a layer keeps from forward to backward beside weights and gradients: `saved`, and x where backward
   reads it. peak: kept, and the larger workspace. */
typedef struct sizes { int64_t saved, fwd, bwd, cache, kept, peak; } sizes;

typedef struct contender {
    char name[32];
    int recipe;              /* index into RECIPES; -1: none */
    int cached;
    int present;             /* runs in this row */
    gmm_recipe rules;
    gmm_mlp_config config;
    gmm_mlp_quant quant;
    gmm_mlp fwd, bwd;
    char note[192];
    sizes bytes, e4m3;       /* e4m3: with GMM_SAVE_QUANTIZED_E4M3 */
    int64_t owned;           /* bytes of mlp.saved that this contender has allocated */
    double seconds[3];       /* forward, backward, together */
    double error[RESULTS];
    double us[2][KERNEL_GROUPS];
} contender;
enum { T_FWD, T_BWD, T_BOTH, TIMES };
static const char *const TIME_NAMES[TIMES] = {"fwd", "bwd", "f+b"};

static struct {
    gmm_context *ctx;
    gmm_options options;
    cudaStream_t stream;
    cudaEvent_t event[BLOCKS][CONTENDERS][3];
    mlp_peer torch;
    mlp_watch watch;
    double block_ms;

    /* the shape */
    const shape *s;
    uint16_t *x, *w1, *w2, *dy, *y, *dx;
    float *prob, *dprob, *dw1, *dw2, *scale, *amax;
    uint64_t *random;
    int32_t *skip;
    char *workspace;
    int64_t workspace_bytes;
    gmm_mat mx, mw1, mw2, my, mdy, mdx, mdw1, mdw2;
    gmm_grad gw1, gw2;
    contender c[CONTENDERS];

    /* the row */
    int64_t size[MAX_GROUPS], start[MAX_GROUPS + 1];
    int live;             /* groups that are not empty */
    int32_t *sizes, *ends;/* device */
    gmm_groups groups;
    mlp_call call;
    int peer_failed;

    void *nvml, *nvml_device;
    int (*nvml_clock)(void *, int, unsigned *);
    char driver[96];
} B;

static void die(const char *what, const char *why) {
    fprintf(stderr, "mlp_bench: %s: %s\n", what, why);
    exit(1);
}
static void cuda(cudaError_t e, const char *what) {
    if (e != cudaSuccess) die(what, cudaGetErrorString(e));
}
static void ok(gmm_status s) {
    if (s != GMM_OK) die("gmm", gmm_last_error(B.ctx));
}
static void *device_alloc(int64_t bytes) {
    void *p = NULL;
    cuda(cudaMalloc(&p, bytes > 0 ? (size_t)bytes : 256), "cudaMalloc");
    return p;
}
static void finished(const char *what) { cuda(cudaStreamSynchronize(B.stream), what); }
static void upload(void *to, const void *host, int64_t bytes) {
    cuda(cudaMemcpyAsync(to, host, (size_t)bytes, cudaMemcpyHostToDevice, B.stream), "upload");
    finished("upload");
}
static void fill_bytes(void *to, int byte, int64_t bytes) {
    if (bytes > 0) cuda(cudaMemsetAsync(to, byte, (size_t)bytes, B.stream), "memset");
}

/* -------------------------------------------------------------------------------------------------------- Data --- */

static __device__ uint32_t mix(uint64_t z) {
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return (uint32_t)((z ^ (z >> 31)) >> 32);
}
/* Normal variates of a standard deviation. */
static __global__ void fill_bf16(uint16_t *to, int64_t count, uint64_t seed, float deviation) {
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < count; i += (int64_t)gridDim.x * blockDim.x) {
        uint32_t u = mix((uint64_t)i * 2 + 1 + (seed << 40)), v = mix((uint64_t)i * 2 + 2 + (seed << 40));
        float r = sqrtf(-2.0f * logf(((float)(u >> 8) + 1.0f) / 16777216.0f));
        to[i] = gmm_f32_to_bf16(deviation * r * cospif((float)(v >> 8) / 8388608.0f));
    }
}
static __global__ void fill_uniform(float *to, int64_t count, uint64_t seed) {
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < count; i += (int64_t)gridDim.x * blockDim.x)
        to[i] = ((float)(mix((uint64_t)i + (seed << 40)) >> 8) + 1.0f) / 16777216.0f;
}
static uint16_t *random_bf16(int64_t count, uint64_t seed, double deviation) {
    uint16_t *p = (uint16_t *)device_alloc(count * 2);
    fill_bf16<<<1056, 256, 0, B.stream>>>(p, count, seed, (float)deviation);
    cuda(cudaGetLastError(), "fill");
    return p;
}

/* ---------------------------------------------------------------------------------------------- Check in fp64 --- */

/* The check computes some rows of y, dx and dprob, and some features of the weight gradients. A line is one row of
   tokens with all columns of FC2's input, or one of these columns with all rows of its group. */
enum { ROW_LINES = 8, COLUMN_LINES = 4, LINES = ROW_LINES + COLUMN_LINES };
typedef struct line { int64_t group, row, f, count, by_row; } line; /* by_row: 1: over rows from `row` on */
/* FC2's input, what it adds to dprob, and the gradients of both of its pre-activations. */
typedef struct point { double h, dprob, da, db; } point;
static struct {
    line *lines;         /* device [LINES] */
    point *points;       /* device [LINES][stride] */
    double *want;        /* device [LINES][3][hidden]: y, dx, dprob in [0]; or dw2, dw1 of the gate, dw1 of the rest */
    double *errors;      /* device [RESULTS] */
    int64_t stride;
} C;
typedef struct tensors {
    const uint16_t *x, *w1, *w2, *dy, *y, *dx;
    const float *prob, *dprob, *dw1, *dw2;
    int64_t hidden, ffn;
} tensors;

static __device__ double bf(const uint16_t *p, int64_t i) { return (double)gmm_bf16_to_f32(p[i]); }
/* The sum over a block of 128 threads, in thread 0. */
static __device__ double block_sum(double v) {
    __shared__ double part[128];
    __syncthreads();
    part[threadIdx.x] = v;
    __syncthreads();
    for (int n = 64; n > 0; n /= 2) {
        if ((int)threadIdx.x < n) part[threadIdx.x] += part[threadIdx.x + n];
        __syncthreads();
    }
    return part[0];
}
static __global__ void compute_points(tensors t, const line *lines, point *points, int64_t stride) {
    const line l = lines[blockIdx.y];
    const int64_t i = blockIdx.x, row = l.row + (l.by_row ? i : 0), f = l.f + (l.by_row ? 0 : i);
    const uint16_t *w1 = t.w1 + l.group * 2 * t.ffn * t.hidden, *w2 = t.w2 + l.group * t.hidden * t.ffn;
    double a = 0.0, b = 0.0, d = 0.0;
    if (i >= l.count) return;
    for (int64_t k = threadIdx.x; k < t.hidden; k += 128) {
        const double x = bf(t.x, row * t.hidden + k);
        a += x * bf(w1, f * t.hidden + k);
        b += x * bf(w1, (t.ffn + f) * t.hidden + k);
        d += bf(t.dy, row * t.hidden + k) * bf(w2, k * t.ffn + f);
    }
    a = block_sum(a);
    b = block_sum(b);
    d = block_sum(d);
    if (threadIdx.x == 0) {
        const double p = (double)t.prob[row], s = 1.0 / (1.0 + exp(-a));
        const point out = {a * s * b * p, d * a * s * b, d * p * b * s * (1.0 + a * (1.0 - s)), d * p * a * s};
        points[blockIdx.y * stride + i] = out;
    }
}
static __global__ void compute_want(tensors t, const line *lines, const point *points, int64_t stride, double *want) {
    const line l = lines[blockIdx.y];
    const int64_t j = blockIdx.x;
    const uint16_t *w1 = t.w1 + l.group * 2 * t.ffn * t.hidden, *w2 = t.w2 + l.group * t.hidden * t.ffn;
    double sum[3] = {0.0, 0.0, 0.0};
    for (int64_t i = threadIdx.x; i < l.count; i += 128) {
        const point p = points[blockIdx.y * stride + i];
        if (l.by_row) {
            const double x = bf(t.x, (l.row + i) * t.hidden + j);
            sum[0] += p.h * bf(t.dy, (l.row + i) * t.hidden + j);
            sum[1] += p.da * x;
            sum[2] += p.db * x;
        } else {
            sum[0] += p.h * bf(w2, j * t.ffn + i);
            sum[1] += p.da * bf(w1, i * t.hidden + j) + p.db * bf(w1, (t.ffn + i) * t.hidden + j);
            sum[2] += p.dprob;
        }
    }
    for (int i = 0; i < 3; i++) {
        const double all = block_sum(sum[i]);
        if (threadIdx.x == 0) want[(blockIdx.y * 3 + i) * t.hidden + j] = all;
    }
}
/* errors[r] = |result - want| / |want| over all that is computed of result r, which is the block's index. */
static __global__ void compute_errors(tensors t, const line *lines, const double *want, double *errors) {
    const int result = (int)blockIdx.x;
    double off = 0.0, all = 0.0;
    for (int n = 0; n < LINES; n++) {
        const line l = lines[n];
        if (l.count == 0 || l.by_row != (result == DW1 || result == DW2)) continue;
        for (int64_t j = threadIdx.x; j < (result == DPROB ? 1 : t.hidden); j += 128)
            for (int half = 0; half < (result == DW1 ? 2 : 1); half++) {
                const int kind = result == DX ? 1 : result == DPROB ? 2 : result == DW1 ? 1 + half : 0;
                const double w = want[(n * 3 + kind) * t.hidden + j];
                const double v = result == Y       ? bf(t.y, l.row * t.hidden + j)
                                 : result == DX    ? bf(t.dx, l.row * t.hidden + j)
                                 : result == DPROB ? (double)t.dprob[l.row]
                                 : result == DW1   ? (double)t.dw1[((l.group * 2 + half) * t.ffn + l.f) * t.hidden + j]
                                                   : (double)t.dw2[(l.group * t.hidden + j) * t.ffn + l.f];
                off += (v - w) * (v - w);
                all += w * w;
            }
    }
    off = block_sum(off);
    all = block_sum(all);
    if (threadIdx.x == 0) errors[result] = sqrt(off / all);
}
static tensors all_tensors(void) {
    const tensors t = {B.x, B.w1, B.w2, B.dy, B.y, B.dx, B.prob, B.dprob, B.dw1, B.dw2, B.s->hidden, B.s->ffn};
    return t;
}

/* Chooses the lines of the row and computes what results should be. */
static void prepare_check(void) {
    const shape *s = B.s;
    line lines[LINES];
    int64_t longest = s->ffn;
    int i, g;
    memset(lines, 0, sizeof lines);
    for (i = 0; i < ROW_LINES; i++) {
        line *l = &lines[i];
        l->row = (2 * i + 1) * s->tokens / (2 * ROW_LINES);
        for (g = 0; l->row >= B.start[g + 1]; g++) {}
        l->group = g;
        l->count = s->ffn;
    }
    for (i = 0; i < COLUMN_LINES; i++) {
        line *l = &lines[ROW_LINES + i];
        for (g = i * s->groups / COLUMN_LINES; !B.size[g]; g = (g + 1) % s->groups) {}
        l->by_row = 1;
        l->group = g;
        l->row = B.start[g];
        l->count = B.size[g];
        l->f = (2 * i + 1) * s->ffn / (2 * COLUMN_LINES) + i;
        if (l->count > longest) longest = l->count;
    }
    C.stride = longest;
    C.lines = (line *)device_alloc(sizeof lines);
    C.points = (point *)device_alloc(LINES * longest * (int64_t)sizeof(point));
    C.want = (double *)device_alloc(LINES * 3 * s->hidden * (int64_t)sizeof(double));
    C.errors = (double *)device_alloc(RESULTS * sizeof(double));
    upload(C.lines, lines, sizeof lines);
    compute_points<<<dim3((unsigned)longest, LINES), 128, 0, B.stream>>>(all_tensors(), C.lines, C.points, C.stride);
    cuda(cudaGetLastError(), "points");
    compute_want<<<dim3((unsigned)s->hidden, LINES), 128, 0, B.stream>>>(all_tensors(), C.lines, C.points, C.stride,
                                                                         C.want);
    cuda(cudaGetLastError(), "expected results");
    finished("expected results");
}
static void free_check(void) {
    cudaFree(C.lines), cudaFree(C.points), cudaFree(C.want), cudaFree(C.errors);
}

/* -------------------------------------------------------------------------------------------------- Contenders --- */

static void ask_torch(int phase) {
    B.call.phase = phase;
    if (B.torch(&B.call)) B.peer_failed = 1;
    B.call.first = 0;
}
static void run_fwd(int i) {
    if (i == TORCH) ask_torch(0);
    else ok(gmm_mlp_fwd(B.ctx, &B.c[i].fwd, B.workspace, (size_t)B.workspace_bytes, B.stream));
}
static void run_bwd(int i) {
    if (i == TORCH) ask_torch(1);
    else ok(gmm_mlp_bwd(B.ctx, &B.c[i].bwd, B.workspace, (size_t)B.workspace_bytes, B.stream));
}
static void set_skip(int32_t value) { upload(B.skip, &value, sizeof value); }

/* Bytes that a contender needs with one policy of saving. Returns 0 where the library refuses. */
static int ask_sizes(contender *c, gmm_save save, sizes *z) {
    const gmm_save before = c->config.save;
    gmm_info fwd = GMM_ZERO, bwd = GMM_ZERO;
    gmm_status s;
    c->config.save = save;
    s = gmm_mlp_query(B.ctx, GMM_OP_MLP_FWD, &c->fwd, &fwd);
    if (s == GMM_OK) s = gmm_mlp_query(B.ctx, GMM_OP_MLP_BWD, &c->bwd, &bwd);
    c->config.save = before;
    if (s != GMM_OK) {
        fprintf(stderr, "mlp_bench: %s: %s: %s; left out\n", B.s->name, c->name, gmm_last_error(B.ctx));
        return 0;
    }
    z->saved = (int64_t)fwd.saved_bytes;
    z->fwd = (int64_t)fwd.workspace_bytes;
    z->bwd = (int64_t)bwd.workspace_bytes;
    z->cache = c->cached ? (int64_t)fwd.weight_cache_bytes : 0;
    z->kept = z->saved + (c->bwd.x ? B.s->tokens * B.s->hidden * 2 : 0);
    z->peak = z->kept + (z->fwd > z->bwd ? z->fwd : z->bwd);
    if (save == before) snprintf(c->note, sizeof c->note, "%s", bwd.note);
    return 1;
}

/* Fills in the descriptors of a contender, and gives it memory. The two contenders of a recipe have one `saved`, since
   the bits in it are equal. */
static void make_contender(int i) {
    contender *c = &B.c[i];
    memset(&c->config, 0, sizeof c->config);
    memset(&c->quant, 0, sizeof c->quant);
    memset(&c->fwd, 0, sizeof c->fwd);
    c->owned = 0;
    c->config.hidden = B.s->hidden;
    c->config.ffn = B.s->ffn;
    c->config.prob = 1;
    c->config.act = gmm_act_of(GMM_ACT_PRESET_SWIGLU);
    c->config.save = c->recipe < 0 ? GMM_SAVE_PREACT : GMM_SAVE_QUANTIZED;
    c->fwd.config = &c->config;
    c->fwd.groups = &B.groups;
    c->fwd.options = &B.options;
    c->fwd.x = &B.mx, c->fwd.w1 = &B.mw1, c->fwd.w2 = &B.mw2;
    c->fwd.prob = B.prob;
    if (c->recipe >= 0) {
        c->rules = gmm_recipe_of(RECIPES[c->recipe].kind);
        c->config.recipe = RECIPES[c->recipe].kind;
        c->quant.recipe = &c->rules;
        c->quant.scale = c->rules.kind == GMM_RECIPE_FP8_DELAYED ? B.scale : NULL;
        c->quant.amax = c->rules.kind == GMM_RECIPE_FP8_DELAYED ? B.amax : NULL;
        c->quant.random = B.random;
        c->fwd.quant = &c->quant;
    }
    c->bwd = c->fwd;
    c->fwd.y = &B.my;
    if (c->recipe >= 0) c->bwd.x = NULL; /* backward reads the copy in `saved` */
    c->bwd.dy = &B.mdy, c->bwd.dx = &B.mdx;
    c->bwd.dw1 = &B.gw1, c->bwd.dw2 = &B.gw2;
    c->bwd.dprob = B.dprob;
    c->present = ask_sizes(c, c->config.save, &c->bytes);
    if (c->present && c->cached) { /* the workspace depends on whether there is a cache */
        c->quant.weight_cache = device_alloc(c->bytes.cache);
        c->quant.weight_cache_bytes = (size_t)c->bytes.cache;
        c->quant.weight_skip = B.skip;
        c->present = ask_sizes(c, c->config.save, &c->bytes);
    }
    if (!c->present) return;
    if (c->recipe >= 0 && !ask_sizes(c, GMM_SAVE_QUANTIZED_E4M3, &c->e4m3)) memset(&c->e4m3, 0, sizeof c->e4m3);
    if (i >= CAST && B.c[i - RECIPE_COUNT].owned == c->bytes.saved) c->fwd.saved = B.c[i - RECIPE_COUNT].fwd.saved;
    else c->fwd.saved = device_alloc(c->owned = c->bytes.saved);
    c->bwd.saved = c->fwd.saved;
    c->fwd.saved_bytes = c->bwd.saved_bytes = (size_t)c->bytes.saved;
    if (c->bytes.fwd > B.workspace_bytes) B.workspace_bytes = c->bytes.fwd;
    if (c->bytes.bwd > B.workspace_bytes) B.workspace_bytes = c->bytes.bwd;
}

/* Runs a contender on poisoned results and compares with fp64. Returns 0 if it is wrong or fails. */
static int check_contender(int i, const char *row) {
    contender *c = &B.c[i];
    const shape *s = B.s;
    const double bound = c->recipe < 0 ? BF16_BOUND : RECIPES[c->recipe].bound;
    int r, good = 1;
    fill_bytes(B.y, 0xFF, s->tokens * s->hidden * 2);
    fill_bytes(B.dx, 0xFF, s->tokens * s->hidden * 2);
    fill_bytes(B.dprob, 0xFF, s->tokens * 4);
    fill_bytes(B.dw1, 0, s->groups * 2 * s->ffn * s->hidden * 4);
    fill_bytes(B.dw2, 0, s->groups * s->ffn * s->hidden * 4);
    if (i != TORCH) {
        fill_bytes(B.workspace, 0xFF, B.workspace_bytes);
        fill_bytes(c->fwd.saved, 0xFF, c->bytes.saved);
        fill_bytes(c->quant.weight_cache, 0xFF, c->bytes.cache);
    }
    set_skip(0);
    B.call.check = 1;
    run_fwd(i);
    set_skip(1);
    if (!B.peer_failed) run_bwd(i);
    B.call.check = 0;
    finished(c->name);
    if (B.peer_failed) return 0;
    compute_errors<<<RESULTS, 128, 0, B.stream>>>(all_tensors(), C.lines, C.want, C.errors);
    cuda(cudaGetLastError(), "errors");
    finished("errors");
    cuda(cudaMemcpy(c->error, C.errors, sizeof c->error, cudaMemcpyDeviceToHost), "errors");
    for (r = 0; r < RESULTS; r++) {
        if (c->error[r] <= bound) continue;
        fprintf(stderr, "mlp_bench: %s: %s: relative error of %s is %.3g, above %.2g; left out\n", row, c->name,
                RESULT_NAMES[r], c->error[r], bound);
        good = 0;
    }
    return good;
}

/* ------------------------------------------------------------------------------------------------------ Timing --- */

static int ascending(const void *a, const void *b) {
    const double p = *(const double *)a, q = *(const double *)b;
    return (p > q) - (p < q);
}
static unsigned sm_clock(void) {
    unsigned mhz = 0;
    if (!B.nvml_clock || B.nvml_clock(B.nvml_device, 1, &mhz)) mhz = 0;
    return mhz;
}
/* One turn of a contender: `calls` forwards, then `calls` backwards, which all read what the last forward has saved. */
static void run_block(int i, int calls, cudaEvent_t event[3]) {
    int k;
    cuda(cudaEventRecord(event[0], B.stream), "event");
    for (k = 0; k < calls; k++) run_fwd(i);
    cuda(cudaEventRecord(event[1], B.stream), "event");
    for (k = 0; k < calls; k++) run_bwd(i);
    cuda(cudaEventRecord(event[2], B.stream), "event");
}
static double milliseconds(cudaEvent_t from, cudaEvent_t to) {
    float ms = 0.0f;
    cuda(cudaEventElapsedTime(&ms, from, to), "event");
    return ms;
}

/* Median seconds of a call of each contender. The contenders alternate in blocks. */
static void measure(double *mhz) {
    int calls[CONTENDERS], i, b, t, clocks = 0;
    double clock = 0.0;
    for (i = 0; i < CONTENDERS; i++) {
        if (!B.c[i].present) continue;
        run_fwd(i);
        run_bwd(i);
        run_block(i, 1, B.event[0][i]);
        finished(B.c[i].name);
        calls[i] = 1 + (int)(B.block_ms / (milliseconds(B.event[0][i][0], B.event[0][i][2]) + 1e-6));
    }
    for (b = 0; b < BLOCKS; b++) {
        for (i = 0; i < CONTENDERS; i++)
            if (B.c[i].present) run_block(i, calls[i], B.event[b][i]);
        if (b % 5 == 4) {
            const unsigned now = sm_clock();
            clock += now;
            clocks += now > 0;
        }
    }
    finished("a contender");
    *mhz = clocks ? clock / clocks : 0.0;
    for (i = 0; i < CONTENDERS; i++)
        for (t = 0; t < TIMES && B.c[i].present; t++) {
            static const int from[TIMES] = {0, 1, 0}, to[TIMES] = {1, 2, 2};
            double all[BLOCKS];
            for (b = 0; b < BLOCKS; b++)
                all[b] = milliseconds(B.event[b][i][from[t]], B.event[b][i][to[t]]) * 1e-3 / calls[i];
            qsort(all, BLOCKS, sizeof *all, ascending);
            B.c[i].seconds[t] = 0.5 * (all[(BLOCKS - 1) / 2] + all[BLOCKS / 2]);
        }
}

/* Microseconds by group of kernels, by the profiler. */
static void profile(const char *row) {
    int i, k, way;
    for (i = 0; i < CONTENDERS; i++)
        for (way = 0; way < 2 && B.c[i].present; way++) {
            finished("a contender");
            B.watch(row, B.c[i].name, way, PROFILED, NULL);
            for (k = 0; k < PROFILED; k++) {
                if (way) run_bwd(i);
                else run_fwd(i);
            }
            finished(B.c[i].name);
            B.watch(row, B.c[i].name, way, PROFILED, B.c[i].us[way]);
        }
}

/* -------------------------------------------------------------------------------------------------------- Rows --- */

static void split(int zipf) {
    const int G = B.s->groups;
    double weight[MAX_GROUPS], sum = 0.0;
    int64_t left = B.s->tokens;
    int32_t sizes[MAX_GROUPS], ends[MAX_GROUPS];
    int order[MAX_GROUPS], g, largest = 0;
    uint64_t z = 2026;
    for (g = 0; g < G; g++) { /* a random order of ranks */
        int other;
        z = z * 6364136223846793005u + 1442695040888963407u;
        other = (int)((z >> 33) % (uint64_t)(g + 1));
        order[g] = order[other];
        order[other] = g;
    }
    for (g = 0; g < G; g++) {
        weight[g] = g % 5 == 3 ? 0.0 : 1.0 / (1 + order[g]);
        sum += weight[g];
        if (weight[g] > weight[largest]) largest = g;
    }
    for (g = 0; g < G; g++) {
        B.size[g] = !zipf ? B.s->tokens / G + (g < B.s->tokens % G)
                          : g % 5 == 3 ? 0 : (int64_t)(weight[g] / sum * (double)B.s->tokens) | 1;
        left -= B.size[g];
    }
    B.size[largest] += left;
    B.live = 0;
    B.start[0] = 0;
    for (g = 0; g < G; g++) {
        B.live += B.size[g] > 0;
        B.start[g + 1] = B.start[g] + B.size[g];
        sizes[g] = (int32_t)B.size[g];
        ends[g] = (int32_t)B.start[g + 1];
    }
    upload(B.sizes, sizes, 4 * G);
    upload(B.ends, ends, 4 * G);
}

static double power_of_two(double v) { return exp2(rint(log2(v))); }

/* Allocates and fills the tensors of a shape, and describes all contenders. The weights' deviations make the
   pre-activation and y of the size of x. */
static void open_shape(const shape *s) {
    const int64_t T = s->tokens, H = s->hidden, F = s->ffn, G = s->groups;
    const double w1 = 1.0 / sqrt((double)H), w2 = 1.0 / sqrt((double)F);
    float scale[GMM_SLOTS][MAX_GROUPS], *at = &scale[0][0];
    double of[GMM_SLOTS];
    int slot, i;
    B.s = s;
    memset(&B.groups, 0, sizeof B.groups);
    B.groups.count = s->groups;
    B.groups.capacity = T;
    B.groups.splits = B.sizes;
    B.groups.dtype = GMM_I32;
    B.x = random_bf16(T * H, 1, 1.0);
    B.w1 = random_bf16(G * 2 * F * H, 2, w1);
    B.w2 = random_bf16(G * H * F, 3, w2);
    B.dy = random_bf16(T * H, 4, 1.0);
    B.y = (uint16_t *)device_alloc(T * H * 2);
    B.dx = (uint16_t *)device_alloc(T * H * 2);
    B.prob = (float *)device_alloc(T * 4);
    B.dprob = (float *)device_alloc(T * 4);
    B.dw1 = (float *)device_alloc(G * 2 * F * H * 4);
    B.dw2 = (float *)device_alloc(G * H * F * 4);
    fill_uniform<<<1056, 256, 0, B.stream>>>(B.prob, T, 5);
    cuda(cudaGetLastError(), "fill");
    /* delayed scaling: scales that keep the largest values, 6 deviations, in range */
    of[GMM_SLOT_X] = 64.0;
    of[GMM_SLOT_W1] = power_of_two(48.0 / w1);
    of[GMM_SLOT_H] = 8.0;
    of[GMM_SLOT_W2] = power_of_two(48.0 / w2);
    of[GMM_SLOT_DY] = of[GMM_SLOT_DZ] = 64.0;
    for (slot = 0; slot < GMM_SLOTS; slot++)
        for (i = 0; i < s->groups; i++) *at++ = (float)of[slot];
    upload(B.scale, scale, 4 * GMM_SLOTS * G);
    B.mx = gmm_mat_packed(GMM_BF16, B.x);
    B.mw1 = gmm_mat_packed(GMM_BF16, B.w1);
    B.mw2 = gmm_mat_packed(GMM_BF16, B.w2);
    B.mdy = gmm_mat_packed(GMM_BF16, B.dy);
    B.my = gmm_mat_packed(GMM_BF16, B.y);
    B.mdx = gmm_mat_packed(GMM_BF16, B.dx);
    B.mdw1 = gmm_mat_packed(GMM_F32, B.dw1);
    B.mdw2 = gmm_mat_packed(GMM_F32, B.dw2);
    B.gw1.mat = &B.mdw1;
    B.gw2.mat = &B.mdw2;
    B.gw1.main_grad = B.gw2.main_grad = 1;
    B.workspace_bytes = 0;
}
static void close_shape(void) {
    int i;
    for (i = 0; i < TORCH; i++) {
        if (B.c[i].owned) cudaFree(B.c[i].fwd.saved);
        cudaFree(B.c[i].quant.weight_cache);
        B.c[i].owned = 0;
        B.c[i].quant.weight_cache = NULL;
    }
    cudaFree(B.workspace);
    cudaFree(B.x), cudaFree(B.w1), cudaFree(B.w2), cudaFree(B.dy), cudaFree(B.y), cudaFree(B.dx);
    cudaFree(B.prob), cudaFree(B.dprob), cudaFree(B.dw1), cudaFree(B.dw2);
}

/* ------------------------------------------------------------------------------------------------------ Report --- */

typedef struct mean {
    int rows;
    double logs, least;
    char name[32];
} mean;
enum { TO_BF16, TO_TORCH, BASES };
enum { ROWS = SHAPE_COUNT * SPLITS };
static struct {
    const char *rows, *recipes;
    FILE *json;
    int csv, entries, count, wrong; /* wrong: 1: a contender was left out because of its results */
    double ms;
    mean speed[SPLITS][CONTENDERS][TIMES][BASES];
    sizes bytes[SHAPE_COUNT][CONTENDERS], e4m3[SHAPE_COUNT][CONTENDERS];
    struct { char name[48]; int present[CONTENDERS]; double us[CONTENDERS][2][KERNEL_GROUPS], timed[CONTENDERS][2]; }
        kernels[ROWS];
    char note[CONTENDERS][192];
} R;

/* Whether a list of parts of names, separated by commas, selects a name: one of them is in it, and none that has a -
   before it. */
static int selects(const char *list, const char *name) {
    const char *at = list;
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
static void row_name(char name[48], const shape *s, int zipf) {
    snprintf(name, 48, "mlp/%s/%s", s->name, SPLIT_NAMES[zipf]);
}
static int any_row(const shape *s) {
    char name[48];
    int zipf, any = 0;
    for (zipf = 0; zipf < SPLITS; zipf++) {
        row_name(name, s, zipf);
        any |= selects(R.rows, name);
    }
    return any;
}
static double ratio(double a, double b) { return a > 0.0 && b > 0.0 ? a / b : 0.0; }
/* Time of the base over the contender's: above 1 the contender is faster. */
static double speed(int i, int t, int base) {
    const int of = base == TO_BF16 ? BF16 : TORCH;
    return B.c[i].present && B.c[of].present ? ratio(B.c[of].seconds[t], B.c[i].seconds[t]) : 0.0;
}
static void count_in(mean *m, double v, const char *name) {
    if (!(v > 0.0)) return;
    if (!m->rows++ || v < m->least) {
        m->least = v;
        snprintf(m->name, sizeof m->name, "%.31s", name + 4);
    }
    m->logs += log(v);
}
static void print_cell(double v, const char *format) {
    if (v > 0.0) printf(format, v);
    else printf(" %7s", "-");
}
static void print_heading(const char *first, const char *second) {
    int i;
    printf("%-22s %7s  %-38s  %-38s\n%-16s %-5s", "", "", "-- weights in a cache --------------",
           "-- weights cast in every step ------", first, second);
    for (i = 0; i < CONTENDERS; i++)
        printf(" %7s", i == BF16 ? "bf16" : i == TORCH ? "torch" : RECIPES[B.c[i].recipe].heading);
    printf("\n");
}

static void json_sizes(const char *name, const sizes *z, const sizes *bf16) {
    fprintf(R.json, "\"%s\": {\"saved\": %lld, \"workspace_fwd\": %lld, \"workspace_bwd\": %lld, "
        "\"weight_cache\": %lld, "
            "\"kept\": %lld, \"peak\": %lld", name, (long long)z->saved, (long long)z->fwd, (long long)z->bwd,
            (long long)z->cache, (long long)z->kept, (long long)z->peak);
    if (bf16->kept)
        fprintf(R.json, ", \"kept_to_bf16\": %.4f, \"peak_to_bf16\": %.4f", (double)z->kept / (double)bf16->kept,
                (double)z->peak / (double)bf16->peak);
    fprintf(R.json, "}");
}
static void json_row(const char *name, int zipf, double mhz) {
    static const char *const bases[BASES] = {"bf16", "torch"};
    const shape *s = B.s;
    const char *comma = "";
    int i, t, k, way;
    fprintf(R.json, "%s\n  {\"row\": \"%s\", \"shape\": \"%s\", \"split\": \"%s\", \"tokens\": %lld, \"hidden\": %lld, "
            "\"ffn\": %lld, \"experts\": %d, \"live\": %d, \"flops\": %.6g, \"sm_mhz\": %.0f, \"contenders\": [",
            R.entries++ ? "," : "", name, s->name, SPLIT_NAMES[zipf], (long long)s->tokens, (long long)s->hidden,
            (long long)s->ffn, s->groups, B.live, 18.0 * (double)s->tokens * (double)s->hidden * (double)s->ffn, mhz);
    for (i = 0; i < CONTENDERS; i++) {
        const contender *c = &B.c[i];
        if (!c->present) continue;
        fprintf(R.json, "%s\n    {\"name\": \"%s\", \"recipe\": \"%s\", \"weights\": \"%s\"", comma, c->name,
                c->recipe < 0 ? "none" : RECIPES[c->recipe].name,
                c->recipe < 0 ? "bf16" : c->cached ? "cache" : "cast");
        for (t = 0; t < TIMES; t++) fprintf(R.json, ", \"%s_us\": %.2f", TIME_NAMES[t], c->seconds[t] * 1e6);
        for (k = 0; k < BASES; k++)
            for (t = 0; t < TIMES && speed(i, T_BOTH, k) > 0.0; t++)
                fprintf(R.json, ", \"%s_speed_of_%s\": %.4f", TIME_NAMES[t], bases[k], speed(i, t, k));
        fprintf(R.json, ", ");
        json_sizes("bytes", &c->bytes, &B.c[BF16].bytes);
        if (c->e4m3.saved) {
            fprintf(R.json, ", ");
            json_sizes("bytes_preact_e4m3", &c->e4m3, &B.c[BF16].bytes);
        }
        fprintf(R.json, ", \"error\": {");
        for (k = 0; k < RESULTS; k++)
            fprintf(R.json, "%s\"%s\": %.3g", k ? ", " : "", RESULT_NAMES[k], c->error[k]);
        fprintf(R.json, "}");
        for (way = 0; way < 2 && B.watch; way++) {
            fprintf(R.json, ", \"%s_kernels_us\": {", TIME_NAMES[way]);
            for (k = 0; k < KERNEL_GROUPS; k++)
                fprintf(R.json, "%s\"%s\": %.2f", k ? ", " : "", KERNEL_GROUP[k], c->us[way][k]);
            fprintf(R.json, "}");
        }
        fprintf(R.json, "}");
        comma = ",";
    }
    fprintf(R.json, "]}");
    fflush(R.json);
}
static void csv_row(const char *name, double mhz) {
    int i, k;
    for (i = 0; i < CONTENDERS; i++) {
        const contender *c = &B.c[i];
        if (!c->present) continue;
        printf("%s,%s,%.1f,%.1f,%.1f,%.3f,", name, c->name, c->seconds[T_FWD] * 1e6, c->seconds[T_BWD] * 1e6,
               c->seconds[T_BOTH] * 1e6, speed(i, T_BOTH, TO_BF16));
        if (B.c[TORCH].present) printf("%.3f", speed(i, T_BOTH, TO_TORCH));
        printf(",%lld,%lld,%lld,%lld,%lld,%lld", (long long)c->bytes.saved, (long long)c->bytes.fwd,
               (long long)c->bytes.bwd, (long long)c->bytes.cache, (long long)c->bytes.kept, (long long)c->bytes.peak);
        for (k = 0; k < RESULTS; k++) printf(",%.3g", c->error[k]);
        printf(",%.0f\n", mhz);
    }
}
static void text_row(const char *name) {
    static const int order[TIMES] = {T_BOTH, T_FWD, T_BWD};
    int i, t, k;
    for (t = 0; t < TIMES; t++) {
        printf("%-16s %-5s", t ? "" : name + 4, TIME_NAMES[order[t]]);
        for (i = 0; i < CONTENDERS; i++)
            print_cell(B.c[i].present ? B.c[i].seconds[order[t]] * 1e6 : 0.0, " %7.0f");
        printf("\n");
    }
    for (k = 0; k < BASES; k++) {
        if (!B.c[k ? TORCH : BF16].present) continue;
        printf("%-16s %-5s", "", k ? "torch" : "bf16");
        for (i = 0; i < CONTENDERS; i++) print_cell(speed(i, T_BOTH, k), " %7.3f");
        printf("\n");
    }
}

/* Runs one row. */
static void run_row(int zipf, const char *name) {
    const int which = (int)(B.s - SHAPES);
    double mhz;
    int i, t, k, way;
    split(zipf);
    memset(&B.call, 0, sizeof B.call);
    B.call.first = 1;
    B.call.groups = B.s->groups;
    B.call.tokens = B.s->tokens, B.call.hidden = B.s->hidden, B.call.ffn = B.s->ffn;
    B.call.x = B.x, B.call.w1 = B.w1, B.call.w2 = B.w2, B.call.prob = B.prob, B.call.dy = B.dy;
    B.call.y = B.y, B.call.dx = B.dx, B.call.dprob = B.dprob, B.call.dw1 = B.dw1, B.call.dw2 = B.dw2;
    B.call.ends = B.ends;
    B.call.stream = B.stream;
    prepare_check();
    for (i = 0; i < CONTENDERS; i++) {
        contender *c = &B.c[i];
        B.peer_failed = 0;
        if (i == TORCH) c->present = B.torch != NULL;
        else c->present = c->fwd.saved != NULL;
        if (c->present && !check_contender(i, name)) {
            if (i == TORCH && B.peer_failed) fprintf(stderr, "mlp_bench: %s: torch failed; left out\n", name);
            else if (i != TORCH) R.wrong = 1;
            c->present = 0;
        }
    }
    free_check();
    if (B.c[TORCH].present) {
        sizes *z = &B.c[TORCH].bytes;
        memset(z, 0, sizeof *z);
        z->saved = B.call.saved;
        z->bwd = B.call.workspace;
        z->kept = z->saved + B.s->tokens * B.s->hidden * 2;
        z->peak = z->kept + z->bwd;
    }
    measure(&mhz);
    if (B.torch && B.peer_failed) {
        fprintf(stderr, "mlp_bench: %s: torch failed while it was timed; left out\n", name);
        B.c[TORCH].present = 0;
    }
    if (B.watch) profile(name);
    for (i = 0; i < CONTENDERS; i++) {
        if (!B.c[i].present) continue;
        R.bytes[which][i] = B.c[i].bytes;
        R.e4m3[which][i] = B.c[i].e4m3;
        memcpy(R.note[i], B.c[i].note, sizeof R.note[i]);
        for (t = 0; t < TIMES; t++)
            for (k = 0; k < BASES; k++) count_in(&R.speed[zipf][i][t][k], speed(i, t, k), name);
    }
    if (R.csv) csv_row(name, mhz);
    else text_row(name);
    fflush(stdout);
    if (R.json) json_row(name, zipf, mhz);
    snprintf(R.kernels[R.count].name, sizeof R.kernels[R.count].name, "%s", name + 4);
    for (i = 0; i < CONTENDERS; i++)
        for (way = 0; way < 2; way++) {
            R.kernels[R.count].present[i] = B.c[i].present;
            R.kernels[R.count].timed[i][way] = B.c[i].seconds[way] * 1e6;
            memcpy(R.kernels[R.count].us[i][way], B.c[i].us[way], sizeof B.c[i].us[way]);
        }
    R.count++;
    if (B.torch) (void)(B.call.phase = 2, B.torch(&B.call));
}
static void shape_rows(const shape *s) {
    char name[48];
    int zipf, i;
    if (!any_row(s)) return;
    open_shape(s);
    for (i = 0; i < TORCH; i++)
        if (B.c[i].recipe < 0 || selects(R.recipes, RECIPES[B.c[i].recipe].name)) make_contender(i);
    B.workspace = (char *)device_alloc(B.workspace_bytes);
    for (zipf = 0; zipf < SPLITS; zipf++) {
        row_name(name, s, zipf);
        if (selects(R.rows, name)) run_row(zipf, name);
    }
    close_shape();
}

static void print_mean(const mean *m, int named) {
    if (!m->rows) printf("  %6s %6s", "-", "-");
    else printf("  %6.3f %6.3f", exp(m->logs / m->rows), m->least);
    if (named) printf(" %-16s", m->rows ? m->name : "");
}
static void print_means(void) {
    int i, zipf;
    printf("\nSpeed against gmm's bf16 and torch's composition: geometric mean and least row\n%-18s %-5s %4s  %-30s"
           "  %-13s  %-13s  %s\n", "", "split", "rows", "f+b / bf16", "fwd / bf16", "bwd / bf16", "f+b / torch");
    for (i = 0; i < CONTENDERS; i++)
        for (zipf = 0; zipf < SPLITS; zipf++) {
            const mean(*m)[BASES] = R.speed[zipf][i];
            if (!m[T_BOTH][TO_BF16].rows && !m[T_BOTH][TO_TORCH].rows) continue;
            printf("%-18s %-5s %4d", B.c[i].name, SPLIT_NAMES[zipf], m[T_BOTH][TO_BF16].rows);
            print_mean(&m[T_BOTH][TO_BF16], 1);
            print_mean(&m[T_FWD][TO_BF16], 0);
            print_mean(&m[T_BWD][TO_BF16], 0);
            print_mean(&m[T_BOTH][TO_TORCH], 1);
            printf("\n");
        }
}
/* One line of memory: MiB, or the ratio to bf16's. */
enum { M_SAVED, M_WORKSPACE, M_CACHE, M_KEPT, M_PEAK };
static double size_of(const sizes *z, int what) {
    const int64_t bytes = what == M_SAVED       ? z->saved
                          : what == M_WORKSPACE ? (z->fwd > z->bwd ? z->fwd : z->bwd)
                          : what == M_CACHE     ? z->cache
                          : what == M_KEPT      ? z->kept
                                                : z->peak;
    return (double)bytes;
}
static void memory_line(const char *first, const char *second, const sizes *z, const sizes *bf16, int what) {
    int i;
    printf("%-13s %-8s", first, second);
    for (i = 0; i < CONTENDERS; i++) {
        if (bf16) print_cell(ratio(size_of(&z[i], what), size_of(bf16, what)), " %7.3f");
        else print_cell(size_of(&z[i], what) / 1048576.0, " %7.1f");
    }
    printf("\n");
}
static void print_memory(void) {
    int s;
    printf("\nMemory, MiB. kept: from forward to backward beside weights and gradients (saved, and x where "
        "backward reads "
           "it);\npeak: kept and workspace; /bf16: ratios to bf16. e4m3: GMM_SAVE_QUANTIZED_E4M3, by query\n");
    print_heading("shape", "");
    for (s = 0; s < SHAPE_COUNT; s++) {
        const sizes *z = R.bytes[s], *e = R.e4m3[s], *bf16 = z[BF16].kept ? &z[BF16] : NULL;
        int i, any = 0, codes = 0;
        for (i = 0; i < CONTENDERS; i++) {
            any |= z[i].kept > 0;
            codes |= e[i].saved > 0;
        }
        if (!any) continue;
        memory_line(SHAPES[s].name, "saved", z, NULL, M_SAVED);
        memory_line("", "worksp.", z, NULL, M_WORKSPACE);
        memory_line("", "cache", z, NULL, M_CACHE);
        memory_line("", "kept", z, NULL, M_KEPT);
        memory_line("", "peak", z, NULL, M_PEAK);
        if (bf16) memory_line("", "k./bf16", z, bf16, M_KEPT);
        if (bf16) memory_line("", "p./bf16", z, bf16, M_PEAK);
        if (!codes) continue;
        memory_line("  e4m3", "saved", e, NULL, M_SAVED);
        memory_line("", "worksp.", e, NULL, M_WORKSPACE);
        if (bf16) memory_line("", "k./bf16", e, bf16, M_KEPT);
        if (bf16) memory_line("", "p./bf16", e, bf16, M_PEAK);
    }
}
static void print_kernels(int rows) {
    int r, i, way, k;
    printf("\nMicroseconds of a call by group of kernels, by torch's profiler; kernels that overlap count in "
        "full. timed: "
           "as above\n%-16s %-18s %-4s", "row", "contender", "");
    for (k = 0; k < KERNEL_GROUPS; k++) printf(" %7s", KERNEL_GROUP[k]);
    printf(" %7s %7s\n", "sum", "timed");
    for (r = 0; r < rows; r++)
        for (i = 0; i < CONTENDERS; i++)
            for (way = 0; way < 2 && R.kernels[r].present[i]; way++) {
                double sum = 0.0;
                printf("%-16s %-18s %-4s", i || way ? "" : R.kernels[r].name, way ? "" : B.c[i].name, TIME_NAMES[way]);
                for (k = 0; k < KERNEL_GROUPS; k++) {
                    sum += R.kernels[r].us[i][way][k];
                    print_cell(R.kernels[r].us[i][way][k], " %7.1f");
                }
                printf(" %7.1f %7.1f\n", sum, R.kernels[r].timed[i][way]);
            }
}

/* -------------------------------------------------------------------------------------------------------- Main --- */

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

static void name_contenders(void) {
    int i;
    for (i = 0; i < CONTENDERS; i++) {
        contender *c = &B.c[i];
        c->recipe = i >= CACHED && i < TORCH ? (i - CACHED) % RECIPE_COUNT : -1;
        c->cached = i >= CACHED && i < CAST;
        if (c->recipe < 0) snprintf(c->name, sizeof c->name, "%s", i == TORCH ? "torch" : "bf16");
        else snprintf(c->name, sizeof c->name, "%s%s", RECIPES[c->recipe].name, c->cached ? "" : " cast");
    }
}
/* Ends the program if a list names what is no recipe. */
static void check_recipes(const char *list) {
    const char *at = list;
    while (*at) {
        const size_t n = strcspn(at, ",");
        int i, known = 0;
        for (i = 0; i < RECIPE_COUNT; i++)
            known |= strlen(RECIPES[i].name) == n && !strncmp(RECIPES[i].name, at, n);
        if (!known && !(n == 4 && !strncmp(at, "bf16", 4)))
            die("--recipes", "must be names out of bf16, fp8-delayed, fp8-current, fp8-block, mxfp8, nvfp4");
        at += n + (at[n] == ',');
    }
}
static void list_rows(void) {
    int s, zipf, i;
    for (s = 0; s < SHAPE_COUNT; s++)
        for (zipf = 0; zipf < SPLITS; zipf++) {
            char name[48];
            row_name(name, &SHAPES[s], zipf);
            if (selects(R.rows, name)) printf("%s\n", name);
        }
    printf("contenders:");
    for (i = 0; i < CONTENDERS; i++)
        if (i == TORCH ? B.torch != NULL : B.c[i].recipe < 0 || selects(R.recipes, RECIPES[B.c[i].recipe].name))
            printf("%s %s", i ? "," : "", B.c[i].name);
    printf("\n");
}

static const char USAGE[] =
    "usage: mlp_bench [--rows=LIST] [--recipes=LIST] [--ms=20] [--list] [--csv] [--json=FILE] [--engine=mma]\n"
    "--rows:    parts of names, any of which selects a row: mlp/dsv3/32k/even; with - before it, leaves them out\n"
    "--recipes: fp8-delayed, fp8-current, fp8-block, mxfp8, nvfp4: those that run beside bf16; bf16: none of them\n"
    "--ms:      time of a contender in a row, at least, alternating in 20 blocks of whole steps\n"
    "--list:    names of rows and contenders; runs nothing\n"
    "--kernels: with torch: microseconds by group of kernels; --kernels=names: and by kernel, to stderr\n";

static void print_head(const char *torch_version) {
    cudaDeviceProp prop;
    int runtime = 0;
    cuda(cudaGetDeviceProperties(&prop, 0), "cudaGetDeviceProperties");
    cudaRuntimeGetVersion(&runtime);
    if (R.json)
        fprintf(R.json, "{\"gpu\": \"%s\", \"driver\": \"%s\", \"gmm\": \"%s\", \"ms\": %g, \"rows\": [", prop.name,
                B.driver, GMM_VERSION_STRING, R.ms);
    if (R.csv) {
        printf("row,contender,fwd_us,bwd_us,us,speed_of_bf16,speed_of_torch,saved,workspace_fwd,workspace_bwd,"
               "weight_cache,kept,peak,error_y,error_dx,error_dprob,error_dw1,error_dw2,sm_mhz\n");
        return;
    }
    printf("# %s, %d multiprocessors; SM clock %u MHz before; driver %s; CUDA %d.%d; torch %s; gmm %s\n", prop.name,
           prop.multiProcessorCount, sm_clock(), B.driver, runtime / 1000, runtime % 1000 / 10,
           torch_version ? torch_version : "not installed", GMM_VERSION_STRING);
    printf("# expert MLP, SwiGLU times prob, bf16 tensors, fp32 main_grad (beta 1), dx and dprob. Microseconds at the "
           "median of %d blocks,\n# %.0f ms per contender, alternating; results compared with fp64. f+b: forward "
           "and backward; "
           "bf16, torch: speed of f+b against these.\n# bf16 saves FC1's output (GMM_SAVE_PREACT), recipes "
           "GMM_SAVE_QUANTIZED; torch: _grouped_mm and torch's element-wise operations.\n", BLOCKS, R.ms);
    print_heading("row", "");
}

extern "C" int gmm_mlp_bench(int argc, char **argv, mlp_peer torch, const char *torch_version, mlp_watch watch) {
    const char *json_path = NULL;
    int engine, list = 0, any = 0, i, k, s;
    gmm_config config = GMM_ZERO;
    gmm_error error;
    R.rows = R.recipes = "";
    R.ms = 20.0;
    B.torch = torch;
    B.watch = watch;
    name_contenders();
    for (i = 1; i < argc; i++) {
        if (!strcmp(argv[i], "--csv")) R.csv = 1;
        else if (!strcmp(argv[i], "--list")) list = 1;
        else if (!strncmp(argv[i], "--json=", 7)) json_path = argv[i] + 7;
        else if (!strncmp(argv[i], "--rows=", 7)) R.rows = argv[i] + 7;
        else if (!strncmp(argv[i], "--recipes=", 10)) check_recipes(R.recipes = argv[i] + 10);
        else if (!strncmp(argv[i], "--ms=", 5)) R.ms = atof(argv[i] + 5);
        else if (!strncmp(argv[i], "--engine=", 9)) {
            for (engine = 0; strcmp(gmm_engine_name((gmm_engine)engine), argv[i] + 9); engine++)
                if (engine == GMM_ENGINE_CUBLASLT) die("--engine", "no such engine");
            B.options.engine = (gmm_engine)engine;
        } else {
            fputs(USAGE, stdout);
            return strcmp(argv[i], "--help") != 0;
        }
    }
    if (!(R.ms > 0.0 && R.ms < 1e6)) die("--ms", "must be above 0 and below 1e6");
    if (list) {
        list_rows();
        return 0;
    }
    for (s = 0; s < SHAPE_COUNT; s++) any |= any_row(&SHAPES[s]);
    if (!any) return 0; /* --rows names rows of gpu_bench alone */
    B.block_ms = R.ms / BLOCKS;
    cuda(cudaSetDevice(0), "cudaSetDevice");
    cuda(cudaStreamCreateWithFlags(&B.stream, cudaStreamNonBlocking), "stream");
    for (i = 0; i < BLOCKS; i++)
        for (k = 0; k < CONTENDERS * 3; k++) cuda(cudaEventCreate(&B.event[i][k / 3][k % 3]), "event");
    config.space = GMM_SPACE_CUDA;
    if (gmm_create(&B.ctx, &config, &error) != GMM_OK) die("gmm_create", error.text);
    B.sizes = (int32_t *)device_alloc(4 * MAX_GROUPS);
    B.ends = (int32_t *)device_alloc(4 * MAX_GROUPS);
    B.scale = (float *)device_alloc(4 * GMM_SLOTS * MAX_GROUPS);
    B.amax = (float *)device_alloc(4 * GMM_SLOTS * MAX_GROUPS);
    B.random = (uint64_t *)device_alloc(32);
    B.skip = (int32_t *)device_alloc(4);
    fill_bytes(B.amax, 0, 4 * GMM_SLOTS * MAX_GROUPS);
    fill_bytes(B.random, 7, 32);
    finished("memset");
    open_nvml(0);
    if (json_path && !(R.json = fopen(json_path, "w"))) die(json_path, "cannot be written");
    print_head(torch_version);
    for (s = 0; s < SHAPE_COUNT; s++) shape_rows(&SHAPES[s]);
    if (R.json) {
        fprintf(R.json, "\n]}\n");
        fclose(R.json);
    }
    if (!R.csv) {
        print_means();
        print_memory();
        if (B.watch) print_kernels(R.count);
        for (i = 0; i < TORCH; i++)
            if (*R.note[i]) printf("%s%s: %s\n", i ? "" : "\n", B.c[i].name, R.note[i]);
    }
    fflush(stdout);
    gmm_destroy(B.ctx);
    return R.wrong;
}

int main(int argc, char **argv) { return gmm_mlp_bench(argc, argv, NULL, NULL, NULL); }
