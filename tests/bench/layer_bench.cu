/* layer_bench - a mixture-of-experts layer on a GPU: gmm_moe beside the separate calls that it stands for (map,
   permute, MLP, unpermute, and their backward), alternating, with weight gradients added into fp32. One row per
   configuration: TFLOP/s of both and their ratio; bytes per token that are kept from forward to backward beside weights
   and tokens (kept), and of workspace and matrices of permuted rows (space). Results are compared bit by bit.
   bf16; with --recipe=NAME (fp8-current, ...) products of quantized operands, GMM_SAVE_QUANTIZED, weights in a cache;
   with --save-rows the layer saves permuted rows of x, as separate calls do.
   --ms=200: milliseconds per contender; --rows=TEXT: configurations whose name contains it; --csv; --idle=20: each time
   is taken after so many milliseconds without work, when the clock is highest, and has the time of the host too. */
#include "gmm.h"

#include <cuda_runtime.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Those of SonicMoE's paper and others of current models: tokens, hidden, ffn, experts, experts per token. */
static const struct shape { const char *name; int64_t tokens, hidden, ffn; int experts, topk; } SHAPES[] = {
    {"32768 x 4096, 128 of ffn 1024, top 8", 32768, 4096, 1024, 128, 8},
    {"32768 x 1536, 128 of ffn 256, top 8", 32768, 1536, 256, 128, 8},
    {"32768 x 4096, 256 of ffn 256, top 16", 32768, 4096, 256, 256, 16},
    {"32768 x 7168, 32 of ffn 2048, top 4", 32768, 7168, 2048, 32, 4},
    {"24576 x 4096, 128 of ffn 512, top 8", 24576, 4096, 512, 128, 8},
    {"40960 x 768, 128 of ffn 256, top 8", 40960, 768, 256, 128, 8}};
enum { SHAPE_COUNT = sizeof SHAPES / sizeof *SHAPES };

enum { LAYER, SEPARATE, WAYS };
enum { FORWARD, BACKWARD, PASSES };
enum { ROUNDS = 20 };

static int recipe; /* gmm_recipe_kind */
static int save_rows;
static int idle_ms;

static gmm_context *ctx;

static void cuda(cudaError_t e, const char *what) {
    if (e == cudaSuccess) return;
    fprintf(stderr, "layer_bench: %s: %s\n", what, cudaGetErrorString(e));
    exit(1);
}
static void ok(gmm_status s) {
    if (s == GMM_OK) return;
    fprintf(stderr, "layer_bench: %s\n", gmm_last_error(ctx));
    exit(1);
}

/* Memory of a configuration, released together. */
static void *blocks[64];
static int block_count;
static void *device_alloc(int64_t bytes) {
    cuda(cudaMalloc(&blocks[block_count], (size_t)bytes + 256), "memory");
    return blocks[block_count++];
}
static void release_all() {
    while (block_count) cuda(cudaFree(blocks[--block_count]), "free");
}

static __global__ void fill(uint16_t *to, int64_t count, float size, uint32_t seed) {
    for (int64_t i = blockIdx.x * 256 + threadIdx.x; i < count; i += (int64_t)gridDim.x * 256) {
        uint32_t v = ((uint32_t)i + seed) * 2654435761u;
        v = (v ^ v >> 15) * 2246822519u;
        v ^= v >> 13;
        to[i] = gmm_f32_to_bf16(((float)(v >> 8) * 0x1p-23f - 1.0f) * size);
    }
}
static gmm_mat random_bf16(int64_t count, float size, uint32_t seed) {
    void *p = device_alloc(2 * count);
    fill<<<1056, 256>>>((uint16_t *)p, count, size, seed);
    return gmm_mat_packed(GMM_BF16, p);
}
static __global__ void count_different(const uint16_t *a, const uint16_t *b, int64_t count, unsigned long long *n) {
    for (int64_t i = blockIdx.x * 256 + threadIdx.x; i < count; i += (int64_t)gridDim.x * 256)
        if (a[i] != b[i]) atomicAdd(n, 1ull);
}

/* A workspace of the largest of the sizes that `need` was given. */
static size_t workspace_bytes;
static void need(gmm_status s, const gmm_info *info) {
    ok(s);
    if (info->workspace_bytes > workspace_bytes) workspace_bytes = info->workspace_bytes;
}

/* One configuration, and both ways to run it. */
static struct {
    gmm_mlp_config config;
    gmm_recipe recipe;
    gmm_mlp_quant quant;
    int32_t *skip; /* of the cache of weights, which both ways share */
    gmm_groups groups;
    gmm_mlp mlp, experts; /* of the separate calls; of the layer */
    gmm_moe moe;
    gmm_permute map, dispatch, combine, combine_back, dispatch_back;
    gmm_mat x, w1, w2, dout, dw1, dw2, out[WAYS], dx[WAYS], rows, y, dy, drows;
    gmm_grad gw1, gw2;
    int32_t *indices, *row_of, *slot_of, *sizes;
    float *probs, *row_probs, *drow_probs, *dprobs;
    void *workspace;
    int64_t kept[WAYS], peak[WAYS]; /* bytes */
} L;

static void run(int way, int pass) {
    void *const w = L.workspace;
    const size_t b = workspace_bytes;
    if (way == LAYER) {
        ok(pass == FORWARD ? gmm_moe_fwd(ctx, &L.moe, w, b, NULL) : gmm_moe_bwd(ctx, &L.moe, w, b, NULL));
    } else if (pass == FORWARD) {
        ok(gmm_permute_map(ctx, &L.map, w, b, NULL));
        ok(gmm_permute_fwd(ctx, &L.dispatch, w, b, NULL));
        ok(gmm_mlp_fwd(ctx, &L.mlp, w, b, NULL));
        ok(gmm_unpermute_fwd(ctx, &L.combine, w, b, NULL));
    } else {
        ok(gmm_unpermute_bwd(ctx, &L.combine_back, w, b, NULL));
        ok(gmm_mlp_bwd(ctx, &L.mlp, w, b, NULL));
        ok(gmm_permute_bwd(ctx, &L.dispatch_back, w, b, NULL));
    }
}

/* Distinct experts for each token, drawn at random, and their probabilities. */
static void route(const shape *s) {
    const int64_t slots = s->tokens * s->topk;
    int32_t *const indices = (int32_t *)malloc((size_t)slots * sizeof *indices);
    float *const probs = (float *)malloc((size_t)slots * sizeof *probs);
    uint32_t seed = 1;
    if (!indices || !probs) cuda(cudaErrorMemoryAllocation, "host memory");
    for (int64_t i = 0; i < slots; i++) {
        const int64_t first = i / s->topk * s->topk;
        int64_t j = first;
        seed = seed * 1664525u + 1013904223u;
        indices[i] = (int32_t)((seed >> 8) % (uint32_t)s->experts);
        while (j < i) /* the next expert that the token does not have */
            if (indices[j] == indices[i]) indices[i] = (indices[i] + 1) % s->experts, j = first;
            else j++;
        probs[i] = (float)(1 + (seed >> 24)) / (256.0f * (float)s->topk);
    }
    L.indices = (int32_t *)device_alloc(4 * slots);
    L.probs = (float *)device_alloc(4 * slots);
    cuda(cudaMemcpy(L.indices, indices, (size_t)(4 * slots), cudaMemcpyHostToDevice), "copy");
    cuda(cudaMemcpy(L.probs, probs, (size_t)(4 * slots), cudaMemcpyHostToDevice), "copy");
    free(indices);
    free(probs);
}

static void set_up_separate(const shape *s) {
    const int64_t slots = s->tokens * s->topk, rows = 2 * slots * s->hidden;
    gmm_info info = GMM_ZERO;
    size_t largest = 0;
    L.row_of = (int32_t *)device_alloc(4 * slots);
    L.slot_of = (int32_t *)device_alloc(4 * slots);
    L.sizes = (int32_t *)device_alloc(4 * s->experts);
    L.row_probs = (float *)device_alloc(4 * slots);
    L.drow_probs = (float *)device_alloc(4 * slots);
    L.rows = gmm_mat_packed(GMM_BF16, device_alloc(rows));
    L.y = gmm_mat_packed(GMM_BF16, device_alloc(rows));
    L.dy = L.y, L.drows = gmm_mat_packed(GMM_BF16, device_alloc(rows)); /* y is not read in backward */
    L.groups.count = s->experts, L.groups.capacity = slots, L.groups.splits = L.sizes, L.groups.dtype = GMM_I32;
    L.map.experts = s->experts, L.map.tokens = s->tokens, L.map.capacity = slots, L.map.hidden = s->hidden;
    L.map.topk = s->topk, L.map.row_of = L.row_of, L.map.slot_of = L.slot_of, L.map.sizes = L.sizes;
    L.dispatch = L.combine = L.combine_back = L.dispatch_back = L.map;
    L.map.indices = L.indices;
    L.dispatch.x = &L.x, L.dispatch.probs = L.probs, L.dispatch.rows = &L.rows, L.dispatch.row_probs = L.row_probs;
    L.combine.rows = &L.y, L.combine.out = &L.out[SEPARATE];
    L.combine_back.dout = &L.dout, L.combine_back.drows = &L.dy;
    L.dispatch_back.drows = &L.drows, L.dispatch_back.drow_probs = L.drow_probs;
    L.dispatch_back.dx = &L.dx[SEPARATE], L.dispatch_back.dprobs = L.dprobs;
    L.mlp = L.experts;
    L.mlp.groups = &L.groups, L.mlp.x = &L.rows, L.mlp.prob = L.row_probs, L.mlp.y = &L.y, L.mlp.dy = &L.dy;
    L.mlp.dx = &L.drows, L.mlp.dprob = L.drow_probs;
    need(gmm_permute_query(ctx, GMM_OP_PERMUTE_MAP, &L.map, &info), &info);
    need(gmm_permute_query(ctx, GMM_OP_PERMUTE_FWD, &L.dispatch, &info), &info);
    need(gmm_permute_query(ctx, GMM_OP_UNPERMUTE_FWD, &L.combine, &info), &info);
    need(gmm_permute_query(ctx, GMM_OP_UNPERMUTE_BWD, &L.combine_back, &info), &info);
    need(gmm_permute_query(ctx, GMM_OP_PERMUTE_BWD, &L.dispatch_back, &info), &info);
    need(gmm_mlp_query(ctx, GMM_OP_MLP_FWD, &L.mlp, &info), &info);
    largest = info.workspace_bytes;
    L.mlp.saved_bytes = info.saved_bytes;
    L.mlp.saved = device_alloc((int64_t)info.saved_bytes);
    need(gmm_mlp_query(ctx, GMM_OP_MLP_BWD, &L.mlp, &info), &info);
    if (info.workspace_bytes > largest) largest = info.workspace_bytes;
    /* kept: the permuted tokens unless their copies are saved, what the MLP saves, maps, probabilities; then y and dy,
       and the gradient of rows */
    L.kept[SEPARATE] = (recipe ? 0 : rows) + (int64_t)L.mlp.saved_bytes + 12 * slots + 4 * s->experts;
    L.peak[SEPARATE] = (int64_t)largest + 2 * rows + 4 * slots;
}

/* Gives both ways the recipe. The first forward casts the weights into the cache. */
static void set_up_recipe() {
    static const uint64_t random[4] = {1, 0, 2, 0};
    void *const on_device = device_alloc(sizeof random);
    if (!recipe) return;
    cuda(cudaMemcpy(on_device, random, sizeof random, cudaMemcpyHostToDevice), "copy");
    L.skip = (int32_t *)device_alloc(4);
    cuda(cudaMemset(L.skip, 0, 4), "memset");
    L.recipe = gmm_recipe_of((gmm_recipe_kind)recipe);
    L.config.recipe = L.recipe.kind, L.config.save = GMM_SAVE_QUANTIZED;
    L.quant.recipe = &L.recipe, L.quant.random = (const uint64_t *)on_device;
    L.experts.quant = &L.quant;
}
static void set_up_cache(size_t bytes) {
    if (!recipe) return;
    L.quant.weight_cache = device_alloc((int64_t)bytes), L.quant.weight_cache_bytes = bytes;
    L.quant.weight_skip = L.skip;
}

static void set_up_layer(const shape *s) {
    gmm_info info = GMM_ZERO;
    size_t largest = 0;
    L.moe.experts = s->experts, L.moe.tokens = s->tokens, L.moe.topk = s->topk, L.moe.mlp = &L.experts;
    L.moe.save_rows = save_rows, L.moe.indices = L.indices, L.moe.probs = L.probs, L.moe.dprobs = L.dprobs;
    L.moe.x = &L.x, L.moe.out = &L.out[LAYER], L.moe.dout = &L.dout, L.moe.dx = &L.dx[LAYER];
    need(gmm_moe_query(ctx, GMM_OP_MOE_FWD, &L.moe, &info), &info);
    set_up_cache(info.weight_cache_bytes);
    need(gmm_moe_query(ctx, GMM_OP_MOE_FWD, &L.moe, &info), &info);
    largest = info.workspace_bytes;
    L.moe.saved_bytes = info.saved_bytes;
    L.moe.saved = device_alloc((int64_t)info.saved_bytes);
    need(gmm_moe_query(ctx, GMM_OP_MOE_BWD, &L.moe, &info), &info);
    if (info.workspace_bytes > largest) largest = info.workspace_bytes;
    L.kept[LAYER] = (int64_t)L.moe.saved_bytes;
    L.peak[LAYER] = (int64_t)largest;
}

static void set_up(const shape *s) {
    const int64_t E = s->experts, H = s->hidden, F = s->ffn, T = s->tokens;
    memset(&L, 0, sizeof L);
    workspace_bytes = 0;
    L.x = random_bf16(T * H, 1.0f, 1);
    L.dout = random_bf16(T * H, 1.0f, 2);
    L.w1 = random_bf16(E * 2 * F * H, 0.05f, 3);
    L.w2 = random_bf16(E * H * F, 0.05f, 4);
    L.dw1 = gmm_mat_packed(GMM_F32, device_alloc(4 * E * 2 * F * H));
    L.dw2 = gmm_mat_packed(GMM_F32, device_alloc(4 * E * H * F));
    cuda(cudaMemset(L.dw1.data, 0, (size_t)(4 * E * 2 * F * H)), "memset");
    cuda(cudaMemset(L.dw2.data, 0, (size_t)(4 * E * H * F)), "memset");
    L.gw1.mat = &L.dw1, L.gw2.mat = &L.dw2, L.gw1.main_grad = L.gw2.main_grad = 1;
    for (int i = 0; i < WAYS; i++) {
        L.out[i] = gmm_mat_packed(GMM_BF16, device_alloc(2 * T * H));
        L.dx[i] = gmm_mat_packed(GMM_BF16, device_alloc(2 * T * H));
    }
    route(s);
    L.dprobs = (float *)device_alloc(4 * T * s->topk);
    L.config.hidden = H, L.config.ffn = F, L.config.prob = 1, L.config.topk = s->topk;
    L.config.act = gmm_act_of(GMM_ACT_PRESET_SWIGLU);
    L.experts.config = &L.config, L.experts.w1 = &L.w1, L.experts.w2 = &L.w2;
    L.experts.dw1 = &L.gw1, L.experts.dw2 = &L.gw2;
    set_up_recipe();
    set_up_layer(s);
    set_up_separate(s);
    L.workspace = device_alloc((int64_t)workspace_bytes);
    if (!recipe) return;
    run(LAYER, FORWARD);
    cuda(cudaMemset(L.skip, 1, 4), "memset");
}

static int ascending(const void *a, const void *b) {
    const float p = *(const float *)a, q = *(const float *)b;
    return (p > q) - (p < q);
}
/* Medians of ROUNDS blocks that take `ms` together, in microseconds. Forward and backward alternate as in training. */
static void measure(double ms, double us[PASSES][WAYS]) {
    static float t[PASSES][WAYS][ROUNDS];
    cudaEvent_t mark[2];
    int repeats = 1;
    for (int i = 0; i < 2; i++) cuda(cudaEventCreate(&mark[i]), "event");
    for (int round = -2; round < ROUNDS; round++)
        for (int way = 0; way < WAYS; way++)
            for (int pass = 0; pass < PASSES; pass++) {
                const int w = (way + round + 2) % WAYS;
                float elapsed;
                usleep(1000 * (useconds_t)idle_ms);
                cuda(cudaEventRecord(mark[0]), "event");
                for (int i = 0; i < repeats; i++) run(w, pass);
                cuda(cudaEventRecord(mark[1]), "event");
                cuda(cudaEventSynchronize(mark[1]), "a pass");
                cuda(cudaEventElapsedTime(&elapsed, mark[0], mark[1]), "event");
                if (round >= 0) t[pass][w][round] = elapsed / (float)repeats;
                else if (round == -1 && way == 0 && pass == FORWARD)
                    repeats = 1 + (int)(ms / ROUNDS / (3.0 * (double)elapsed));
            }
    for (int pass = 0; pass < PASSES; pass++)
        for (int way = 0; way < WAYS; way++) {
            qsort(t[pass][way], ROUNDS, sizeof(float), ascending);
            us[pass][way] = 500.0 * (double)(t[pass][way][ROUNDS / 2 - 1] + t[pass][way][ROUNDS / 2]);
        }
    for (int i = 0; i < 2; i++) cuda(cudaEventDestroy(mark[i]), "event");
}

static int bench(const shape *s, double ms, int csv) {
    const double flops = 6e-6 * (double)(s->tokens * s->topk) * (double)s->hidden * (double)s->ffn;
    unsigned long long *different, wrong;
    double us[PASSES][WAYS];
    set_up(s);
    measure(ms, us);
    different = (unsigned long long *)device_alloc(8);
    cuda(cudaMemset(different, 0, 8), "memset");
    count_different<<<1056, 256>>>((uint16_t *)L.out[0].data, (uint16_t *)L.out[1].data, s->tokens * s->hidden,
                                   different);
    count_different<<<1056, 256>>>((uint16_t *)L.dx[0].data, (uint16_t *)L.dx[1].data, s->tokens * s->hidden,
                                   different);
    cuda(cudaMemcpy(&wrong, different, 8, cudaMemcpyDeviceToHost), "copy");
    printf(csv ? "\"%s\",%.1f,%.1f,%.3f,%.1f,%.1f,%.3f,%.3f,%lld,%lld,%lld,%lld,%s\n"
               : "%-37s %6.1f %6.1f  %.3f %6.1f %6.1f  %.3f  %.3f %7lld %7lld %7lld %7lld %s\n",
           s->name, flops / us[FORWARD][LAYER], flops / us[FORWARD][SEPARATE],
           us[FORWARD][SEPARATE] / us[FORWARD][LAYER], 2.0 * flops / us[BACKWARD][LAYER],
           2.0 * flops / us[BACKWARD][SEPARATE], us[BACKWARD][SEPARATE] / us[BACKWARD][LAYER],
           (us[FORWARD][SEPARATE] + us[BACKWARD][SEPARATE]) / (us[FORWARD][LAYER] + us[BACKWARD][LAYER]),
           (long long)(L.kept[LAYER] / s->tokens), (long long)(L.kept[SEPARATE] / s->tokens),
           (long long)(L.peak[LAYER] / s->tokens), (long long)(L.peak[SEPARATE] / s->tokens),
           wrong ? "BITS DIFFER" : "equal");
    fflush(stdout);
    release_all();
    return wrong != 0;
}

int main(int argc, char **argv) {
    const char *rows = "";
    double ms = 200.0;
    int csv = 0, wrong = 0;
    gmm_config config = GMM_ZERO;
    gmm_error error;
    cudaDeviceProp prop;
    for (int i = 1; i < argc; i++)
        if (!strncmp(argv[i], "--ms=", 5)) ms = atof(argv[i] + 5);
        else if (!strncmp(argv[i], "--idle=", 7)) idle_ms = atoi(argv[i] + 7);
        else if (!strncmp(argv[i], "--rows=", 7)) rows = argv[i] + 7;
        else if (!strcmp(argv[i], "--csv")) csv = 1;
        else if (!strcmp(argv[i], "--save-rows")) save_rows = 1;
        else if (!strncmp(argv[i], "--recipe=", 9)) {
            for (recipe = GMM_RECIPE_NVFP4; recipe > GMM_RECIPE_NONE; recipe--)
                if (!strcmp(gmm_recipe_name((gmm_recipe_kind)recipe), argv[i] + 9)) break;
            if (!recipe) return fprintf(stderr, "layer_bench: no recipe %s\n", argv[i] + 9), 2;
        }
        else return fprintf(stderr, "layer_bench: unknown option %s\n", argv[i]), 2;
    config.space = GMM_SPACE_CUDA;
    if (gmm_create(&ctx, &config, &error) != GMM_OK) return fprintf(stderr, "layer_bench: %s\n", error.text), 1;
    cuda(cudaGetDeviceProperties(&prop, 0), "properties");
    if (!csv)
        printf("# %s; %s%s, TFLOP/s of gmm_moe and of separate calls, time of these over that of gmm_moe; bytes per "
               "token\n%-37s %6s %6s  %5s %6s %6s  %5s  %5s %7s %7s %7s %7s bits\n", prop.name,
               recipe ? gmm_recipe_name((gmm_recipe_kind)recipe) : "bf16",
               save_rows ? ", rows saved" : "",
               "tokens x hidden, experts", "fwd", "calls", "ratio", "bwd", "calls", "ratio", "both", "kept", "calls",
               "space", "calls");
    for (int i = 0; i < SHAPE_COUNT; i++)
        if (strstr(SHAPES[i].name, rows)) wrong |= bench(&SHAPES[i], ms, csv);
    gmm_destroy(ctx);
    return wrong;
}
