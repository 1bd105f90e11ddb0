/* wrapper.cpp - examples/cpp/gmm.hpp: backward of an MLP does not read what forward has not saved; memory of a GPU
   context is allocated on its device, and without GMM_HPP_CUDA the failure says what to define. check.sh links it with
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
    CHECK(ctx.device() == 3 && failed.device() == 0);
    gmm::Workspace workspace(ctx);
    gmm::Memory first(ctx), moved(std::move(first)), wrong(GMM_SPACE_CUDA, 7);
#ifdef GMM_HPP_CUDA
    CHECK(workspace.reserve(100) && workspace.bytes() == 256 && allocated_on == 3 && device == 1);
    CHECK(moved.reserve(0) && moved.bytes() == 256 && device == 1);
    CHECK(!moved.reserve(4096) && !moved.data() && moved.bytes() == 0 && allocated_on == 3 && device == 1);
    CHECK(!wrong.reserve(1) && device == 1 && !std::strstr(wrong.failure(), "GMM_HPP_CUDA"));
#else
    CHECK(!workspace.reserve(100) && std::strstr(workspace.failure(), "define GMM_HPP_CUDA"));
    CHECK(!moved.reserve(0) && !wrong.reserve(1) && device == 1 && allocated_on == -1);
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

int main() { return memory_of_a_gpu() || backward_alone(); }
