/* gated - runs gated_kernel.cu on a Hopper GPU: compares its bits with the library's linear and activation in two
   launches, on ragged groups, then prints microseconds of both, alternating. --bits: no times. What it means:
   src/gmm_kernels/KERNELS.md. */
#include "gated.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_GROUPS = 128, TURNS = 21 };
/* Contenders: the library's product; the product and the activation; then for each tile the fused kernel with D alone
   (no epilogue), with all outputs, without D. */
enum { LINEAR, LINEAR_ACT, PROOF, D_ALONE = 0, ALL, WITHOUT_D, WHATS, WAYS = PROOF + WHATS * gated_tiles };
enum { D, E, H, OUTS }; /* forward: z, h, none; backward: dh, dz, h */

static struct {
    gmm_context *ctx;
    cudaStream_t stream;
    cudaEvent_t begin, end;
    void *workspace;
    size_t bytes;
    gated_call call;
    gmm_linear lin;
    gmm_activation act;
    gmm_mat x, w, bias, z, out[OUTS];
    void *own[OUTS];
    int64_t size[MOST_GROUPS], rows, cols[OUTS];
    int wrong;
} P;

static void cuda(cudaError_t e, const char *what) {
    if (e == cudaSuccess) return;
    fprintf(stderr, "gated: %s: %s\n", what, cudaGetErrorString(e));
    exit(1);
}
static void ok(gmm_status s) {
    if (s == GMM_OK) return;
    fprintf(stderr, "gated: %s\n", gmm_last_error(P.ctx));
    exit(1);
}
static void *device_alloc(int64_t bytes) {
    void *p;
    cuda(cudaMalloc(&p, (size_t)bytes + 256), "memory");
    return p;
}

/* Sums of four uniform numbers, with standard deviation `size`, to bf16; or (uniform) numbers below 1 to fp32. */
static __global__ void fill(void *to, int64_t count, float size, uint64_t seed, int uniform) {
    for (int64_t i = blockIdx.x * 256 + threadIdx.x; i < count; i += (int64_t)gridDim.x * 256) {
        uint64_t v = ((uint64_t)i + 1) * 0x9E3779B97F4A7C15u + seed * 0xD1B54A32D192ED03u;
        v = (v ^ v >> 30) * 0xBF58476D1CE4E5B9u;
        v = (v ^ v >> 27) * 0x94D049BB133111EBu;
        v ^= v >> 31;
        const float sum = (float)((int)(v & 0xFFFF) + (int)(v >> 16 & 0xFFFF) + (int)(v >> 32 & 0xFFFF) +
                                  (int)(v >> 48) - 131070);
        if (uniform) ((float *)to)[i] = (float)(v >> 40) * 0x1p-24f;
        else ((uint16_t *)to)[i] = gmm_f32_to_bf16(sum * (size * 1.7320508f / 65536.0f));
    }
}
static void *random_bf16(int64_t count, float size, uint64_t seed) {
    void *p = device_alloc(2 * count);
    fill<<<1056, 256, 0, P.stream>>>(p, count, size, seed, 0);
    return p;
}

/* Sets up the problem P.size, with a capacity of `spare` rows beyond the sum of the sizes. */
static void set_up(int backward, int groups, int32_t k, int32_t ffn, int64_t spare, int bias, int prob, gmm_act act) {
    const int32_t n = backward ? ffn : 2 * ffn;
    const gmm_op op = backward ? GMM_OP_LINEAR_DGRAD : GMM_OP_LINEAR_FWD;
    gmm_info info = GMM_ZERO, info2 = GMM_ZERO;
    int32_t sizes[MOST_GROUPS];
    void *splits = device_alloc(4 * groups), *p = NULL;
    P.rows = spare;
    for (int g = 0; g < groups; g++) P.rows += sizes[g] = (int32_t)P.size[g];
    cuda(cudaMemcpy(splits, sizes, sizeof *sizes * (size_t)groups, cudaMemcpyHostToDevice), "copy");
    memset(&P.call, 0, sizeof P.call);
    memset(&P.lin, 0, sizeof P.lin);
    memset(&P.act, 0, sizeof P.act);
    P.call.backward = backward;
    P.call.groups.count = groups;
    P.call.groups.capacity = P.rows;
    P.call.groups.splits = splits;
    P.call.groups.dtype = GMM_I32;
    P.call.ffn = ffn;
    P.call.k = k;
    P.call.act = act;
    P.call.act.kind = GMM_ACT_SWIGLU;
    P.call.act.interleave = 8;
    P.call.x = random_bf16(P.rows * k, 1.0f, 1);
    P.call.w = random_bf16((int64_t)groups * n * k, 3.0f / sqrtf((float)k), 2);
    if (bias) P.call.bias = random_bf16((int64_t)groups * n, 1.0f, 3);
    if (prob) {
        fill<<<1056, 256, 0, P.stream>>>(p = device_alloc(4 * P.rows), P.rows, 1.0f, 4, 1);
        P.call.prob = (const float *)p;
    }
    if (backward) P.call.z = random_bf16(P.rows * 2 * ffn, 3.0f, 5);
    P.cols[D] = n;
    P.cols[E] = 3 * ffn - n;
    P.cols[H] = backward ? ffn : 0;
    for (int i = 0; i < OUTS; i++) {
        P.own[i] = device_alloc(2 * P.rows * P.cols[i]);
        P.out[i] = gmm_mat_packed(GMM_BF16, device_alloc(2 * P.rows * P.cols[i]));
    }
    P.x = gmm_mat_packed(GMM_BF16, P.call.x);
    P.w = gmm_mat_packed(GMM_BF16, P.call.w);
    P.bias = gmm_mat_packed(GMM_BF16, P.call.bias);
    P.z = gmm_mat_packed(GMM_BF16, P.call.z);
    P.lin.in_features = backward ? ffn : k;
    P.lin.out_features = backward ? k : n;
    P.lin.groups = P.act.groups = &P.call.groups;
    P.lin.w = &P.w;
    P.lin.bias = bias ? &P.bias : NULL;
    P.act.ffn = ffn;
    P.act.act = &P.call.act;
    P.act.prob = P.call.prob;
    if (backward) {
        P.lin.dy = &P.x;
        P.lin.dx = P.act.dy = &P.out[D];
        P.act.x = &P.z;
        P.act.dx = &P.out[E];
        P.act.y = &P.out[H];
    } else {
        P.lin.x = &P.x;
        P.lin.y = P.act.x = &P.out[D];
        P.act.y = &P.out[E];
    }
    ok(gmm_linear_query(P.ctx, op, &P.lin, &info));
    ok(gmm_act_query(P.ctx, backward ? GMM_OP_ACT_BWD : GMM_OP_ACT_FWD, &P.act, &info2));
    P.bytes = info.workspace_bytes > info2.workspace_bytes ? info.workspace_bytes : info2.workspace_bytes;
    P.workspace = device_alloc((int64_t)P.bytes);
    printf("# %s, %d groups, %lld rows, k %d, ffn %d; the library's product: %s\n", backward ? "backward" : "forward",
           groups, (long long)P.rows, (int)k, (int)ffn, info.note);
}
static void clear(void) {
    const void *const all[] = {P.call.groups.splits, P.call.x, P.call.w, P.call.bias, P.call.z, P.call.prob,
                               P.workspace};
    cuda(cudaStreamSynchronize(P.stream), "a launch");
    for (const void *p : all) cuda(cudaFree((void *)(uintptr_t)p), "free");
    for (int i = 0; i < OUTS; i++) {
        cuda(cudaFree(P.own[i]), "free");
        cuda(cudaFree(P.out[i].data), "free");
    }
}

static void run(int way) {
    const int backward = P.call.backward, what = (way - PROOF) % WHATS;
    if (way < PROOF) {
        ok((backward ? gmm_linear_dgrad : gmm_linear_fwd)(P.ctx, &P.lin, P.workspace, P.bytes, P.stream));
        if (way == LINEAR_ACT)
            ok((backward ? gmm_act_bwd : gmm_act_fwd)(P.ctx, &P.act, P.workspace, P.bytes, P.stream));
        return;
    }
    P.call.tile = (way - PROOF) / WHATS;
    P.call.d = what == WITHOUT_D ? NULL : P.own[D];
    P.call.e = what == D_ALONE ? NULL : P.own[E];
    P.call.h = what == D_ALONE || !backward ? NULL : P.own[H];
    cuda(gated_run(&P.call, P.stream), "the proof");
}

/* ------------------------------------------------------------------------------------------------- Results --- */

/* Number of elements of a that differ from b, or from the poison if b is NULL. */
static int64_t differ(const void *a, const void *b, int64_t count) {
    uint16_t *mine = (uint16_t *)malloc((size_t)(2 * count)), *other = (uint16_t *)malloc((size_t)(2 * count));
    int64_t n = 0;
    if (!mine || !other) cuda(cudaErrorMemoryAllocation, "host memory");
    memset(other, 0xFF, (size_t)(2 * count));
    cuda(cudaMemcpy(mine, a, (size_t)(2 * count), cudaMemcpyDeviceToHost), "copy");
    if (b) cuda(cudaMemcpy(other, b, (size_t)(2 * count), cudaMemcpyDeviceToHost), "copy");
    for (int64_t i = 0; i < count; i++) n += mine[i] != other[i];
    free(mine);
    free(other);
    return n;
}
static void poison(void *const *out) {
    for (int i = 0; i < OUTS; i++)
        cuda(cudaMemsetAsync(out[i], 0xFF, (size_t)(2 * P.rows * P.cols[i]), P.stream), "memset");
}
/* Every tile, with and without D, writes the library's bits and nothing else. */
static void check(const char *what, int64_t live) {
    void *const out[] = {P.out[D].data, P.out[E].data, P.out[H].data};
    int64_t bad[OUTS] = {0, 0, 0}, written = 0;
    int wrong = 0;
    poison(out);
    run(LINEAR_ACT);
    cuda(cudaStreamSynchronize(P.stream), "the library");
    for (int i = 0; i < OUTS; i++) { /* all rows, then only rows of groups */
        written = differ(out[i], NULL, live * P.cols[i]);
        wrong |= written != live * P.cols[i] || differ(out[i], NULL, P.rows * P.cols[i]) != written;
    }
    for (int way = PROOF; way < WAYS; way++) {
        const int wanted = (way - PROOF) % WHATS;
        poison(P.own);
        run(way);
        cuda(cudaStreamSynchronize(P.stream), "the proof");
        for (int i = 0; i < OUTS; i++)
            bad[i] += differ(P.own[i], wanted == (i == D ? WITHOUT_D : D_ALONE) ? NULL : out[i], P.rows * P.cols[i]);
    }
    wrong |= bad[D] || bad[E] || bad[H];
    printf("  %-32s elements that differ: %s %lld, %s %lld, h again %lld; library %s: %s\n", what,
           P.call.backward ? "dh" : "z", (long long)bad[D], P.call.backward ? "dz" : "h", (long long)bad[E],
           (long long)bad[H], wrong && !(bad[D] || bad[E] || bad[H]) ? "left rows out" : "complete",
           wrong ? "FAIL" : "ok");
    P.wrong |= wrong;
}

/* --------------------------------------------------------------------------------------------------- Times --- */

static int ascending(const void *a, const void *b) {
    const float p = *(const float *)a, q = *(const float *)b;
    return (p > q) - (p < q);
}
static void times(const char *what) {
    static float t[WAYS][TURNS];
    double us[WAYS];
    for (int i = -2; i < TURNS; i++)
        for (int way = 0; way < WAYS; way++) {
            float ms;
            cuda(cudaEventRecord(P.begin, P.stream), "event");
            run(way);
            cuda(cudaEventRecord(P.end, P.stream), "event");
            cuda(cudaEventSynchronize(P.end), "a turn");
            cuda(cudaEventElapsedTime(&ms, P.begin, P.end), "event");
            if (i >= 0) t[way][i] = ms * 1e3f;
        }
    for (int way = 0; way < WAYS; way++) {
        qsort(t[way], TURNS, sizeof **t, ascending);
        us[way] = t[way][TURNS / 2];
    }
    printf("  %-14s product %8.1f us (%.0f TFLOP/s), + activation %8.1f\n", what, us[LINEAR],
           2e-6 * (double)P.rows * (double)P.cols[D] * P.call.k / us[LINEAR], us[LINEAR_ACT]);
    for (int tile = 0; tile < gated_tiles; tile++) {
        const double *u = us + PROOF + WHATS * tile;
        printf("    %-10s  D %8.1f   all %8.1f (%.3f of two launches)   without D %8.1f (%.3f)\n", gated_tile(tile),
               u[D_ALONE], u[ALL], u[ALL] / us[LINEAR_ACT], u[WITHOUT_D], u[WITHOUT_D] / us[LINEAR_ACT]);
    }
    fflush(stdout);
}

int main(int argc, char **argv) {
    static const int64_t RAGGED[] = {0, 1, 37, 300, 0, 163, 1025, 8, 160};
    static const struct {
        const char *name;
        int clamped, bias, prob;
        int32_t k, ffn;
    } CASES[] = {{"SwiGLU", 0, 0, 0, 512, 384},
                 {"clamped, bias, prob", 1, 1, 1, 1032, 520},
                 {"prob, 24 columns past a tile", 0, 0, 1, 200, 280},
                 {"bias, 8 columns", 0, 1, 0, 64, 8},
                 {"clamped, k 8", 1, 0, 0, 8, 168},
                 {"prob", 0, 0, 1, 1024, 1024}};
    static const struct {
        const char *name;
        int groups;
        int32_t hidden, ffn;
        int64_t tokens;
    } SHAPES[] = {{"dsv3/512", 8, 7168, 2048, 512},
                  {"dsv3/4096", 8, 7168, 2048, 4096},
                  {"mixtral/1024", 8, 4096, 14336, 1024},
                  {"qwen3/300", 128, 2048, 768, 300},
                  {"qwen3/1024", 128, 2048, 768, 1024}};
    const gmm_act plain = gmm_act_of(GMM_ACT_PRESET_SWIGLU), clamped = gmm_act_of(GMM_ACT_PRESET_GPT_OSS);
    const int bits_only = argc > 1 && !strcmp(argv[1], "--bits");
    int64_t live = 0;
    gmm_config config = GMM_ZERO;
    gmm_error error;
    cudaDeviceProp prop;
    cuda(cudaGetDeviceProperties(&prop, 0), "properties");
    if (prop.major != 9) {
        printf("gated: needs a Hopper GPU\n");
        return 0;
    }
    cuda(cudaStreamCreateWithFlags(&P.stream, cudaStreamNonBlocking), "stream");
    cuda(cudaEventCreate(&P.begin), "event");
    cuda(cudaEventCreate(&P.end), "event");
    config.space = GMM_SPACE_CUDA;
    if (gmm_create(&P.ctx, &config, &error) != GMM_OK) {
        fprintf(stderr, "gated: %s\n", error.text);
        return 1;
    }
    memcpy(P.size, RAGGED, sizeof RAGGED);
    for (int64_t rows : RAGGED) live += rows;
    for (int i = 0; i < 2 * (int)(sizeof CASES / sizeof *CASES); i++) {
        const int c = i / 2, backward = i % 2;
        set_up(backward, 9, CASES[c].k, CASES[c].ffn, 33, CASES[c].bias && !backward, CASES[c].prob,
               CASES[c].clamped ? clamped : plain);
        check(CASES[c].name, live);
        clear();
    }
    for (int i = 0; !P.wrong && !bits_only && i < 2 * (int)(sizeof SHAPES / sizeof *SHAPES); i++) {
        const int s = i / 2;
        for (int g = 0; g < SHAPES[s].groups; g++) P.size[g] = SHAPES[s].tokens;
        set_up(i % 2, SHAPES[s].groups, SHAPES[s].hidden, SHAPES[s].ffn, 0, 0, 1, plain);
        times(SHAPES[s].name);
        clear();
    }
    gmm_destroy(P.ctx);
    return P.wrong;
}
