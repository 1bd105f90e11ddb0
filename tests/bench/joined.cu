/* joined - forward of an MLP on a Hopper GPU with its activation in FC1's product (GMM_FUSE_ALWAYS) and by a kernel of
   its own (GMM_FUSE_NEVER): microseconds of both, alternating, and whether their bits are equal. FC2 has 16 columns, so
   that FC1 and the activation are nearly all of the time. --backward: FC2's dgrad with the gradient of the activation
   in it, and both apart; weight gradients are queued, so that nothing else is computed. --fp8: by the recipe FP8_BLOCK,
   where the product quantizes the activation too, with weights from a cache; the time includes the cast of x. --zeros:
   tokens and weights are 0, with which the clock is not limited by power. --random=SEED: 48 shapes drawn by the seed
   instead of those of models.
   What it means: src/gmm_kernels/KERNELS.md. */
#include "gmm.h"

#include <cuda_runtime.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { TURNS = 21, REPEATS = 4, OUT = 16 };
enum { TWO, ONE, TWO_ALONE, ONE_ALONE, WAYS }; /* launches; alone: inference, which does not keep the pre-activation */

/* rows: of all groups */
typedef struct mlp_shape { const char *name; int groups; int64_t hidden, ffn, rows; } mlp_shape;
static const mlp_shape SHAPES[] = {
    {"dsv3/4096", 8, 7168, 2048, 32768},     {"dsv3/512", 8, 7168, 2048, 4096}, {"mixtral/2048", 8, 4096, 14336, 16384},
    {"qwen3/512", 128, 2048, 768, 65536},    {"gptoss/1024", 32, 2880, 2880, 32768},
    {"odd/958", 24, 3072, 1408, 22992},      {"qwen3/300", 128, 2048, 768, 38400},
    {"64 of 1024 x 64", 64, 2048, 1024, 4096}, {"4 of 512 x 64", 4, 1024, 512, 256},
    {"dsv3/16", 8, 7168, 2048, 128},         {"dsv3/64", 8, 7168, 2048, 512},   {"dsv3/192", 8, 7168, 2048, 1536},
    {"mixtral/64", 8, 4096, 14336, 512},     {"qwen3/16", 128, 2048, 768, 2048}, {"qwen3/64", 128, 2048, 768, 8192},
    {"qwen3/192", 128, 2048, 768, 24576},    {"dsv3/1024", 8, 7168, 2048, 8192}};

static gmm_context *ctx;
static float size_of_data = 1.0f;
static int fp8;

static void cuda(cudaError_t e) {
    if (e == cudaSuccess) return;
    fprintf(stderr, "joined: %s\n", cudaGetErrorString(e));
    exit(1);
}
static void ok(gmm_status s) {
    if (s == GMM_OK) return;
    fprintf(stderr, "joined: %s\n", gmm_last_error(ctx));
    exit(1);
}
static void *device_alloc(size_t bytes) {
    void *p;
    cuda(cudaMalloc(&p, bytes + 256));
    return p;
}
/* Uniform numbers of both signs, below `size`, to bf16; or from 0 to 1 to fp32. */
static __global__ void fill(void *to, int64_t count, float size, int fp32) {
    for (int64_t i = blockIdx.x * 256 + threadIdx.x; i < count; i += (int64_t)gridDim.x * 256) {
        uint32_t v = (uint32_t)i * 2654435761u;
        v = (v ^ v >> 15) * 2246822519u;
        v ^= v >> 13;
        if (fp32) ((float *)to)[i] = (float)(v >> 8) * 0x1p-24f;
        else ((uint16_t *)to)[i] = gmm_f32_to_bf16(((float)(v >> 8) * 0x1p-23f - 1.0f) * size);
    }
}
static __global__ void count_different(const uint16_t *a, const uint16_t *b, int64_t count, unsigned long long *n) {
    for (int64_t i = blockIdx.x * 256 + threadIdx.x; i < count; i += (int64_t)gridDim.x * 256)
        if (a[i] != b[i]) atomicAdd(n, 1ull);
}
static int ascending(const void *a, const void *b) {
    const float p = *(const float *)a, q = *(const float *)b;
    return (p > q) - (p < q);
}

/* A split of the rows into equal groups, in device memory. */
static gmm_groups even_split(const mlp_shape *shape) {
    gmm_groups split = GMM_ZERO;
    int32_t *const sizes = (int32_t *)malloc((size_t)shape->groups * 4);
    void *const splits = device_alloc((size_t)shape->groups * 4);
    if (!sizes) cuda(cudaErrorMemoryAllocation);
    for (int g = 0; g < shape->groups; g++) sizes[g] = (int32_t)(shape->rows / shape->groups);
    cuda(cudaMemcpy(splits, sizes, (size_t)shape->groups * 4, cudaMemcpyHostToDevice));
    free(sizes);
    split.count = shape->groups, split.capacity = shape->rows, split.dtype = GMM_I32, split.splits = splits;
    return split;
}

static int measure(const mlp_shape *shape) {
    const int groups = shape->groups;
    const int64_t H = shape->hidden, F = shape->ffn, R = shape->rows;
    const gmm_groups split = even_split(shape);
    gmm_mlp_config config = GMM_ZERO;
    gmm_options options = GMM_ZERO;
    gmm_info info = GMM_ZERO;
    gmm_mlp mlp = GMM_ZERO;
    gmm_mlp_quant quant = GMM_ZERO;
    const gmm_recipe recipe = gmm_recipe_of(GMM_RECIPE_FP8_BLOCK);
    gmm_mat x, w1, w2, y;
    void *saved[2], *out[2], *workspace;
    int32_t *skip = NULL;
    unsigned long long *different, host = 0;
    static float t[WAYS][TURNS];
    static char text[4096];
    cudaEvent_t begin, end;
    cuda(cudaEventCreate(&begin));
    cuda(cudaEventCreate(&end));
    x = gmm_mat_packed(GMM_BF16, device_alloc((size_t)(R * H * 2)));
    w1 = gmm_mat_packed(GMM_BF16, device_alloc((size_t)(groups * 2 * F * H * 2)));
    w2 = gmm_mat_packed(GMM_BF16, device_alloc((size_t)(groups * OUT * F * 2)));
    y = gmm_mat_packed(GMM_BF16, NULL);
    mlp.prob = (const float *)device_alloc((size_t)(R * 4));
    fill<<<1056, 256>>>(x.data, R * H, size_of_data, 0);
    fill<<<1056, 256>>>(w1.data, groups * 2 * F * H, 0.05f * size_of_data, 0);
    fill<<<1056, 256>>>(w2.data, groups * OUT * F, 0.05f, 0);
    fill<<<1056, 256>>>((void *)(uintptr_t)mlp.prob, R, 1.0f, 1);
    config.hidden = H, config.ffn = F, config.hidden_out = OUT, config.prob = 1;
    config.act = gmm_act_of(GMM_ACT_PRESET_SWIGLU);
    mlp.config = &config, mlp.groups = &split, mlp.options = &options;
    mlp.x = &x, mlp.w1 = &w1, mlp.w2 = &w2, mlp.y = &y;
    if (fp8) {
        config.recipe = recipe.kind;
        quant.recipe = &recipe;
        mlp.quant = &quant;
        ok(gmm_mlp_query(ctx, GMM_OP_MLP_FWD, &mlp, &info));
        quant.weight_cache = device_alloc(quant.weight_cache_bytes = info.weight_cache_bytes);
        quant.weight_skip = skip = (int32_t *)device_alloc(4);
        cuda(cudaMemset(skip, 0, 4));
    }
    ok(gmm_mlp_query(ctx, GMM_OP_MLP_FWD, &mlp, &info));
    ok(gmm_describe(ctx, GMM_OP_MLP_FWD, &mlp, text, sizeof text));
    workspace = device_alloc(info.workspace_bytes);
    mlp.saved_bytes = info.saved_bytes;
    different = (unsigned long long *)device_alloc(8);
    for (int i = 0; i < 2; i++) saved[i] = device_alloc(info.saved_bytes), out[i] = device_alloc((size_t)(R * OUT * 2));
    for (int i = -3; i < TURNS; i++)
        for (int k = 0; k < WAYS; k++) {
            const int way = (i + 3 + k) % WAYS, one = way == ONE || way == ONE_ALONE;
            float ms;
            options.fuse = one ? GMM_FUSE_ALWAYS : GMM_FUSE_NEVER;
            mlp.saved = way < TWO_ALONE ? saved[one] : NULL;
            y.data = out[one];
            cuda(cudaEventRecord(begin));
            for (int r = 0; r < REPEATS; r++) ok(gmm_mlp_fwd(ctx, &mlp, workspace, info.workspace_bytes, NULL));
            cuda(cudaEventRecord(end));
            cuda(cudaEventSynchronize(end));
            cuda(cudaEventElapsedTime(&ms, begin, end));
            if (fp8) cuda(cudaMemset(skip, 1, 4)); /* the first call has cast the weights */
            if (i >= 0) t[way][i] = ms * 1e3f / REPEATS;
        }
    cuda(cudaMemset(different, 0, 8));
    count_different<<<1056, 256>>>((uint16_t *)out[0], (uint16_t *)out[1], R * OUT, different);
    count_different<<<1056, 256>>>((uint16_t *)saved[0], (uint16_t *)saved[1], R * 2 * F, different);
    cuda(cudaMemcpy(&host, different, 8, cudaMemcpyDeviceToHost));
    for (int way = 0; way < WAYS; way++) qsort(t[way], TURNS, sizeof **t, ascending);
    printf("%-22s %8.1f %8.1f  %.3f %8.1f %8.1f  %.3f  %-5s %s\n", shape->name, t[TWO][TURNS / 2],
           t[ONE][TURNS / 2], t[TWO][TURNS / 2] / t[ONE][TURNS / 2], t[TWO_ALONE][TURNS / 2],
           t[ONE_ALONE][TURNS / 2], t[TWO_ALONE][TURNS / 2] / t[ONE_ALONE][TURNS / 2],
           strstr(text, "with the activation") ? "one" : "two", host ? "BITS DIFFER" : "equal");
    fflush(stdout);
    {
        const void *const all[] = {split.splits, x.data, w1.data, w2.data, mlp.prob, workspace, different,
                                   saved[0], saved[1], out[0], out[1], quant.weight_cache, skip};
        for (const void *p : all) cuda(cudaFree((void *)(uintptr_t)p));
    }
    return host != 0;
}

/* Backward: writes dz, h and dprob. hidden is OUT, so that FC1 is small, and hidden_out is the shape's hidden, along
   which FC2's dgrad contracts. `saved` is what a forward would have kept, here random numbers. */
static int measure_backward(const mlp_shape *shape) {
    const int groups = shape->groups;
    const int64_t H = shape->hidden, F = shape->ffn, R = shape->rows;
    const gmm_groups split = even_split(shape);
    gmm_mlp_config config = GMM_ZERO;
    gmm_options options = GMM_ZERO;
    gmm_info info = GMM_ZERO;
    gmm_mlp mlp = GMM_ZERO;
    gmm_mat x, w1, w2, dy, dw[2];
    gmm_grad grad[2] = {GMM_ZERO, GMM_ZERO};
    gmm_wgrad_entry entry;
    gmm_wgrad_queue queue;
    void *deferred[2], *workspace;
    float *dprob[2];
    unsigned long long *different, host = 0;
    static float t[2][TURNS];
    static char text[4096];
    cudaEvent_t begin, end;
    cuda(cudaEventCreate(&begin));
    cuda(cudaEventCreate(&end));
    x = gmm_mat_packed(GMM_BF16, device_alloc((size_t)(R * OUT * 2)));
    w1 = gmm_mat_packed(GMM_BF16, device_alloc((size_t)(groups * 2 * F * OUT * 2)));
    w2 = gmm_mat_packed(GMM_BF16, device_alloc((size_t)(groups * H * F * 2)));
    dy = gmm_mat_packed(GMM_BF16, device_alloc((size_t)(R * H * 2)));
    mlp.prob = (const float *)device_alloc((size_t)(R * 4));
    for (int i = 0; i < 2; i++) {
        dw[i] = gmm_mat_packed(GMM_F32, device_alloc((size_t)(groups * (i ? H * F : 2 * F * OUT)) * 4));
        grad[i].mat = &dw[i];
        dprob[i] = (float *)device_alloc((size_t)R * 4);
    }
    fill<<<1056, 256>>>(dy.data, R * H, size_of_data, 0);
    fill<<<1056, 256>>>(w2.data, groups * H * F, 0.05f * size_of_data, 0);
    fill<<<1056, 256>>>((void *)(uintptr_t)mlp.prob, R, 1.0f, 1);
    config.hidden = OUT, config.ffn = F, config.hidden_out = H, config.prob = config.delay_wgrad = 1;
    config.act = gmm_act_of(GMM_ACT_PRESET_SWIGLU);
    mlp.config = &config, mlp.groups = &split, mlp.options = &options;
    mlp.x = &x, mlp.w1 = &w1, mlp.w2 = &w2, mlp.dy = &dy, mlp.dw1 = &grad[0], mlp.dw2 = &grad[1];
    mlp.dprob = dprob[0], mlp.queue = &queue;
    queue = gmm_wgrad_queue_over(&entry, 1);
    ok(gmm_mlp_query(ctx, GMM_OP_MLP_BWD, &mlp, &info));
    ok(gmm_describe(ctx, GMM_OP_MLP_BWD, &mlp, text, sizeof text));
    workspace = device_alloc(info.workspace_bytes);
    mlp.saved_bytes = info.saved_bytes, mlp.deferred_bytes = info.deferred_bytes;
    mlp.saved = device_alloc(info.saved_bytes);
    fill<<<1056, 256>>>(mlp.saved, R * 2 * F, 4.0f * size_of_data, 0);
    different = (unsigned long long *)device_alloc(8);
    for (int i = 0; i < 2; i++) {
        deferred[i] = device_alloc(info.deferred_bytes);
        cuda(cudaMemset(deferred[i], 0, info.deferred_bytes));
    }
    for (int i = -3; i < TURNS; i++)
        for (int k = 0; k < 2; k++) {
            const int one = (i + 3 + k) % 2;
            float ms;
            options.fuse = one ? GMM_FUSE_ALWAYS : GMM_FUSE_NEVER;
            mlp.deferred = deferred[one];
            mlp.dprob = dprob[one];
            cuda(cudaEventRecord(begin));
            for (int r = 0; r < REPEATS; r++) {
                queue = gmm_wgrad_queue_over(&entry, 1);
                ok(gmm_mlp_bwd(ctx, &mlp, workspace, info.workspace_bytes, NULL));
            }
            cuda(cudaEventRecord(end));
            cuda(cudaEventSynchronize(end));
            cuda(cudaEventElapsedTime(&ms, begin, end));
            if (i >= 0) t[one][i] = ms * 1e3f / REPEATS;
        }
    cuda(cudaMemset(different, 0, 8));
    count_different<<<1056, 256>>>((uint16_t *)dprob[0], (uint16_t *)dprob[1], R * 2, different);
    count_different<<<1056, 256>>>((uint16_t *)deferred[0], (uint16_t *)deferred[1], (int64_t)info.deferred_bytes / 2,
                                   different);
    cuda(cudaMemcpy(&host, different, 8, cudaMemcpyDeviceToHost));
    for (int way = 0; way < 2; way++) qsort(t[way], TURNS, sizeof **t, ascending);
    printf("%-22s %8.1f %8.1f  %.3f  %-5s %s\n", shape->name, t[0][TURNS / 2], t[1][TURNS / 2],
           t[0][TURNS / 2] / t[1][TURNS / 2], strstr(text, "with the activation's gradient") ? "one" : "two",
           host ? "BITS DIFFER" : "equal");
    fflush(stdout);
    {
        const void *const all[] = {split.splits, x.data, w1.data, w2.data, dy.data, mlp.prob, workspace, different,
                                   mlp.saved, deferred[0], deferred[1], dprob[0], dprob[1], dw[0].data, dw[1].data};
        for (const void *p : all) cuda(cudaFree((void *)(uintptr_t)p));
    }
    return host != 0;
}

/* A shape whose product takes at most a few milliseconds: groups, rows of a group and extents by powers of two. */
static int between(int least, int most) { return least + rand() % (most - least + 1); }
static mlp_shape drawn(char name[64]) {
    mlp_shape s;
    int64_t rows;
    do {
        s.groups = 1 << between(2, 7);
        s.hidden = 256 * between(2, 28);
        s.ffn = 128 * between(2, 32);
        rows = (int64_t)(16.0 * exp2(between(0, 800) * 0.01));
        s.rows = s.groups * rows;
    } while (s.rows * s.hidden * s.ffn > (int64_t)5e11 || s.groups * s.hidden * s.ffn > (int64_t)1e9);
    snprintf(name, 64, "%dx%d %d %d", s.groups, (int)rows, (int)s.hidden, (int)s.ffn);
    s.name = name;
    return s;
}

int main(int argc, char **argv) {
    enum { DRAWN = 48 };
    gmm_config config = GMM_ZERO;
    gmm_error error;
    cudaDeviceProp prop;
    int wrong = 0, random = 0, backward = 0;
    for (int i = 1; i < argc; i++) {
        if (!strcmp(argv[i], "--zeros")) size_of_data = 0.0f;
        if (!strcmp(argv[i], "--fp8")) fp8 = 1;
        if (!strcmp(argv[i], "--backward")) backward = 1;
        if (!strncmp(argv[i], "--random=", 9)) srand((unsigned)atoi(argv[i] + 9)), random = 1;
    }
    cuda(cudaGetDeviceProperties(&prop, 0));
    if (prop.major != 9) {
        printf("joined: needs a Hopper GPU\n");
        return 0;
    }
    config.space = GMM_SPACE_CUDA;
    if (gmm_create(&ctx, &config, &error) != GMM_OK) {
        fprintf(stderr, "joined: %s\n", error.text);
        return 1;
    }
    printf("%s, us of %s%s, two launches and one\n", prop.name,
           backward ? "FC2's dgrad and the activation's gradient" : "FC1 and activation", fp8 ? ", fp8-block" : "");
    if (backward) printf("%-22s %8s %8s  %5s  %-5s bits\n", "groups x rows, H, ffn", "two", "joined", "ratio", "plan");
    else
        printf("%-22s %8s %8s  %5s %8s %8s  %5s  %-5s bits\n", random ? "groups x rows, H, ffn" : "rows per group",
               "training", "joined", "ratio", "inference", "joined", "ratio", "plan");
    for (int i = 0; random && i < DRAWN; i++) {
        char name[64];
        const mlp_shape s = drawn(name);
        wrong |= backward ? measure_backward(&s) : measure(&s);
    }
    for (int i = 0; !random && i < (int)(sizeof SHAPES / sizeof *SHAPES); i++)
        if (backward) wrong |= measure_backward(&SHAPES[i]);
        else if (!fp8 || SHAPES[i].ffn % 128 == 0) wrong |= measure(&SHAPES[i]); /* others are not served */
    gmm_destroy(ctx);
    return wrong;
}
