/* wrapper.cpp - examples/cpp/gmm.hpp: backward of an MLP does not read what forward has not saved; a cache of weights
   and gradients that come later keep the bits; memory of a GPU context is allocated on its device, and without
   GMM_HPP_CUDA the failure says what to define. check.sh links it with
   the CPU engine, and puts an empty cuda_runtime.h in the path: a GPU's functions are below. */
#include <cstddef>

static int device = 1, allocated_on = -1; /* current device; that of the last allocation */
#ifdef GMM_HPP_CUDA
enum cudaError { cudaSuccess, cudaFailure };
alignas(256) static char device_bytes[1024];
static cudaError cudaGetDevice(int *d) { return *d = device, cudaSuccess; }
static cudaError cudaSetDevice(int d) { return d < 4 ? (device = d, cudaSuccess) : cudaFailure; }
static cudaError cudaFree(void *) { return cudaSuccess; }
static cudaError cudaMalloc(void **p, std::size_t bytes) {
    allocated_on = device;
    return bytes <= sizeof device_bytes ? (*p = device_bytes, cudaSuccess) : cudaFailure;
}
#endif
#include "examples/cpp/gmm.hpp"

#include <cstdio>
#include <cstring>

#define CHECK(condition) do { if (!(condition)) { std::printf("line %d: %s\n", __LINE__, #condition); return 1; } \
    } while (0)

/* The CPU engine has no GPU contexts: this one is not made, and keeps its space and its device. */
static int memory_of_a_gpu() {
    gmm::Context failed(GMM_SPACE_CUDA, 3), ctx;
    CHECK(!failed && failed.space() == GMM_SPACE_CUDA && failed.device() == 3);
    ctx = std::move(failed);
    CHECK(!ctx && ctx.space() == GMM_SPACE_CUDA && ctx.device() == 3);
    gmm::Workspace workspace(ctx);
    gmm::Memory first(ctx), moved(std::move(first)), wrong(GMM_SPACE_CUDA, 7);
#ifdef GMM_HPP_CUDA
    CHECK(workspace.reserve(100) == GMM_OK && workspace.bytes() == 256 && allocated_on == 3 && device == 1);
    CHECK(moved.reserve(0) == GMM_OK && moved.bytes() == 256 && device == 1);
    CHECK(moved.reserve(4096) != GMM_OK && !moved.data() && moved.bytes() == 0 && allocated_on == 3 && device == 1);
    CHECK(wrong.reserve(1) != GMM_OK && device == 1 && !std::strstr(wrong.failure(), "GMM_HPP_CUDA"));
#else
    CHECK(workspace.reserve(100) == GMM_E_MEMORY && std::strstr(workspace.failure(), "define GMM_HPP_CUDA"));
    CHECK(moved.reserve(0) != GMM_OK && wrong.reserve(1) != GMM_OK && device == 1 && allocated_on == -1);
#endif
    return 0;
}

static int backward_alone() {
    enum { ROWS = 40, K = 8 };
    static float x[ROWS * K], w[K * K], y[ROWS * K], dx[ROWS * K], dw1[K * K], dw2[K * K];
    const int32_t few = 3, all = ROWS;
    gmm::Context ctx;
    gmm::Workspace workspace(ctx);
    gmm::Memory saved(ctx);
    gmm::Mlp mlp;
    mlp.config.hidden = mlp.config.ffn = K, mlp.config.act.kind = GMM_ACT_RELU;
    mlp.groups = gmm::sizes(&all, 1, ROWS);
    mlp.x = mlp.dy = gmm::mat(x), mlp.w1 = mlp.w2 = gmm::mat(w), mlp.y = gmm::mat(y), mlp.dx = gmm::mat(dx);
    mlp.dw1.mat = gmm::mat(dw1), mlp.dw2.mat = gmm::mat(dw2);
    CHECK(mlp.bwd(workspace, saved) == GMM_E_NULL && !saved.data());
    CHECK(std::strstr(ctx.last_error(), "saved"));
    mlp.groups = gmm::sizes(&few, 1, few);
    CHECK(mlp.fwd(workspace, saved) == GMM_OK && mlp.bwd(workspace, saved) == GMM_OK);
    mlp.groups = gmm::sizes(&all, 1, ROWS);
    CHECK(mlp.bwd(workspace, saved) != GMM_OK && std::strstr(ctx.last_error(), "saved"));
    CHECK(mlp.fwd(workspace, saved) == GMM_OK && mlp.bwd(workspace, saved) == GMM_OK);
    return 0;
}

/* Weights that forward has quantized into a cache, and weight gradients that come later, have the bits of those at
   once. A second backward is refused while the first one's gradients wait, and then they still can be computed. */
static int cache_and_later() {
    enum { ROWS = 40, K = 32 };
    static float x[ROWS * K], w[K * K], y[ROWS * K], dx[ROWS * K], dw[2][2][K * K];
    const int32_t rows[2] = { ROWS, 0 };
    gmm::Context ctx;
    gmm::Workspace workspace(ctx);
    for (int later = 0; later < 2; later++) {
        gmm::Memory saved(ctx), cache(ctx);
        gmm::Wgrads wgrads(ctx);
        gmm::Mlp mlp;
        for (int i = 0; i < ROWS * K; i++) x[i] = (float)(i * 37 % 101 - 50) / 50.0f;
        for (int i = 0; i < K * K; i++) w[i] = (float)(i * 53 % 97 - 48) / 200.0f;
        mlp.config.hidden = mlp.config.ffn = K, mlp.config.act.kind = GMM_ACT_RELU;
        mlp.config.recipe = GMM_RECIPE_FP8_CURRENT, mlp.recipe = gmm_recipe_of(GMM_RECIPE_FP8_CURRENT);
        mlp.groups = gmm::sizes(rows, 1, ROWS);
        mlp.x = mlp.dy = gmm::mat(x), mlp.w1 = mlp.w2 = gmm::mat(w), mlp.y = gmm::mat(y), mlp.dx = gmm::mat(dx);
        mlp.dw1.mat = gmm::mat(dw[later][0]), mlp.dw2.mat = gmm::mat(dw[later][1]);
        mlp.config.delay_wgrad = later;
        if (later) mlp.cache = &cache, mlp.wgrads = &wgrads;
        CHECK(mlp.fwd(workspace, saved) == GMM_OK);
        if (later) std::memset(w, 0xFF, sizeof w); /* backward reads the cache */
        CHECK(mlp.bwd(workspace, saved) == GMM_OK && (cache.bytes() > 0) == later && wgrads.queue.count == later);
        if (!later) continue;
        CHECK(mlp.bwd(workspace, saved) == GMM_E_STATE && std::strstr(ctx.last_error(), "queue"));
        CHECK(wgrads.run(workspace) == GMM_OK && wgrads.run(workspace) == GMM_E_STATE);
        CHECK(dw[0][0][5] != 0.0f && !std::memcmp(dw[0], dw[1], sizeof dw[0]));
        CHECK(mlp.bwd(workspace, saved) == GMM_OK && wgrads.run(workspace) == GMM_OK);
        CHECK(!std::memcmp(dw[0], dw[1], sizeof dw[0]));
    }
    return 0;
}

int main() { return memory_of_a_gpu() || backward_alone() || cache_and_later(); }
