/* gmm.hpp: gmm in C++17. Contexts and workspaces that free themselves, and calls whose operands are values.
 *
 *     gmm::Context ctx;                                             // the CPU; Context(GMM_SPACE_CUDA, 0): a GPU
 *     gmm::Workspace workspace(ctx);                                // grows to what the calls need
 *     gmm::Linear lin;
 *     lin.in_features = 64, lin.out_features = 32, lin.groups = gmm::sizes(counts, experts, rows);
 *     lin.x = gmm::mat(xs), lin.w = gmm::mat(ws), lin.y = gmm::mat(ys);
 *     lin.fwd(workspace);                                           // throws gmm::Error with gmm's message
 *
 * Define GMM_NO_EXCEPTIONS for programs without exceptions: calls then return what they also return otherwise, a
 * gmm_status, which must not be ignored, and last_error() has the message. Other operations:
 * gmm::call(gmm::permute_fwd, workspace, descriptor). One unit of the program defines GMM_IMPLEMENTATION, as gmm.h
 * says. Define GMM_HPP_CUDA to include cuda_runtime.h, for workspaces of GPU contexts. */
#ifndef GMM_MOE_GMM_HPP_INCLUDED
#define GMM_MOE_GMM_HPP_INCLUDED

#include "gmm.h"

#include <memory>
#include <new>
#ifdef GMM_HPP_CUDA
#include <cuda_runtime.h>
#endif
#ifdef GMM_NO_EXCEPTIONS
#define GMM_HPP_STATUS [[nodiscard]] gmm_status
#else
#include <stdexcept>
#define GMM_HPP_STATUS gmm_status
#endif

namespace gmm {

#ifdef GMM_NO_EXCEPTIONS
inline gmm_status check(gmm_status status, const char *) { return status; }
#else
/* What a refused call throws: its status, and in what() gmm's sentence. */
struct Error : std::runtime_error {
    Error(gmm_status s, const char *text) : std::runtime_error(text), status(s) {}
    gmm_status status;
};
inline gmm_status check(gmm_status status, const char *text) {
    if (status != GMM_OK) throw Error(status, text);
    return status;
}
#endif

/* ---- Context */

class Context {
public:
    explicit Context(gmm_space space = GMM_SPACE_CPU, int32_t device = 0) {
        gmm_config config{};
        config.space = space, config.device = device;
        (void)create(config);
    }
    explicit Context(const gmm_config &config) { (void)create(config); }
    explicit operator bool() const { return ctx_ != nullptr; } /* false where creation failed without exceptions */
    gmm_context *get() const { return ctx_.get(); }
    gmm_space space() const { return space_; }
    int32_t device() const { return device_; }
    const char *last_error() const { return ctx_ ? gmm_last_error(get()) : error_.text; }

private:
    struct Destroy { void operator()(gmm_context *ctx) const { gmm_destroy(ctx); } };
    gmm_status create(const gmm_config &config) {
        gmm_context *ctx = nullptr;
        space_ = config.space, device_ = config.device;
        const gmm_status s = gmm_create(&ctx, &config, &error_);
        ctx_.reset(ctx);
        return check(s, error_.text);
    }
    std::unique_ptr<gmm_context, Destroy> ctx_;
    gmm_space space_ = GMM_SPACE_CPU;
    int32_t device_ = 0;
    gmm_error error_{};
};

/* ---- Memory of a context, aligned to 256 bytes: workspaces, and what calls leave for later ones */

class Memory {
public:
    explicit Memory(const Context &c) : Memory(c.space(), c.device()) {}
    Memory(gmm_space space, int32_t index) : device_(index), data_(nullptr, Free{space}) {}
    void *data() const { return data_.get(); }
    size_t bytes() const { return data_ ? bytes_ : 0; }
    /* At least so many bytes; the contents are lost where it grows. On a GPU growing waits for the device. */
    GMM_HPP_STATUS reserve(size_t bytes) {
        if (data_ && bytes <= bytes_) return GMM_OK;
        data_.reset();
        bytes_ = bytes ? (bytes + 255) / 256 * 256 : 256;
        data_.reset(on_cpu() ? ::operator new(bytes_, std::align_val_t(256), std::nothrow) : device_memory(bytes_));
        return data_ ? GMM_OK : check(GMM_E_MEMORY, failure());
    }
    /* Why reserve has failed. */
    const char *failure() const {
        return on_cpu() || has_cuda ? "gmm.hpp: memory of a context could not be allocated"
                                    : "gmm.hpp: no memory of a GPU context: define GMM_HPP_CUDA";
    }

private:
#ifdef GMM_HPP_CUDA
    static constexpr bool has_cuda = true;
    static void free_device(void *data) { (void)cudaFree(data); }
    void *device_memory(size_t bytes) const { /* of the context's device, whichever is current */
        void *data = nullptr;
        int current = 0;
        if (cudaGetDevice(&current) != cudaSuccess || cudaSetDevice(device_) != cudaSuccess) return nullptr;
        const bool allocated = cudaMalloc(&data, bytes) == cudaSuccess;
        (void)cudaSetDevice(current);
        return allocated ? data : nullptr;
    }
#else
    static constexpr bool has_cuda = false;
    static void free_device(void *) {}
    void *device_memory(size_t) const { return nullptr; }
#endif
    struct Free {
        gmm_space space;
        void operator()(void *data) const {
            if (space == GMM_SPACE_CPU) ::operator delete(data, std::align_val_t(256));
            else free_device(data);
        }
    };
    bool on_cpu() const { return data_.get_deleter().space == GMM_SPACE_CPU; }
    [[maybe_unused]] int32_t device_;
    std::unique_ptr<void, Free> data_;
    size_t bytes_ = 0;
};

/* The workspace of calls on one context and one stream, one after the other. The context outlives it. */
struct Workspace : Memory {
    explicit Workspace(Context &c, gmm_stream s = nullptr) : Memory(c), context(c), stream(s) {}
    Context &context;
    gmm_stream stream;
};

/* ---- Operations: each with its query */

template <class Descriptor> struct Operation {
    gmm_op op;
    gmm_status (*query)(gmm_context *, gmm_op, const Descriptor *, gmm_info *);
    gmm_status (*run)(gmm_context *, const Descriptor *, void *, size_t, gmm_stream);
};

/* Queries of operations that are alone in their family. */
template <class D, gmm_status (*Query)(gmm_context *, const D *, gmm_info *)>
gmm_status query_of(gmm_context *ctx, gmm_op, const D *d, gmm_info *info) { return Query(ctx, d, info); }

/* X(name, descriptor, op, family of the query); Y: an operation that is alone in its family */
#define GMM_HPP_LIST(X, Y) \
    X(linear_fwd, linear, LINEAR_FWD, linear) X(linear_dgrad, linear, LINEAR_DGRAD, linear) \
    X(linear_wgrad, linear, LINEAR_WGRAD, linear) X(linear_bgrad, linear, LINEAR_BGRAD, linear) \
    X(act_fwd, activation, ACT_FWD, act) X(act_bwd, activation, ACT_BWD, act) \
    X(mlp_fwd, mlp, MLP_FWD, mlp) X(mlp_bwd, mlp, MLP_BWD, mlp) \
    X(moe_fwd, moe, MOE_FWD, moe) X(moe_bwd, moe, MOE_BWD, moe) \
    X(topk_fwd, route, TOPK_FWD, topk) X(topk_bwd, route, TOPK_BWD, topk) \
    X(permute_map, permute, PERMUTE_MAP, permute) X(permute_fwd, permute, PERMUTE_FWD, permute) \
    X(permute_bwd, permute, PERMUTE_BWD, permute) X(unpermute_fwd, permute, UNPERMUTE_FWD, permute) \
    X(unpermute_bwd, permute, UNPERMUTE_BWD, permute) X(glu_interleave, glu, GLU_INTERLEAVE, glu) \
    X(pad, padding, PAD, pad) X(unpad, padding, UNPAD, pad) \
    X(quantize, quantization, QUANTIZE, quantize) X(requantize, quantization, REQUANTIZE, quantize) \
    Y(accumulate, accumulation, ACCUMULATE) Y(convert, conversion, CONVERT) \
    Y(transpose, transposition, TRANSPOSE) Y(dequantize, dequantization, DEQUANTIZE)
#define GMM_HPP_OPERATION(name, descriptor, op, family) \
    constexpr Operation<gmm_##descriptor> name{GMM_OP_##op, gmm_##family##_query, gmm_##name};
#define GMM_HPP_ALONE(name, descriptor, op) \
    constexpr Operation<gmm_##descriptor> name{GMM_OP_##op, query_of<gmm_##descriptor, gmm_##name##_query>, gmm_##name};
GMM_HPP_LIST(GMM_HPP_OPERATION, GMM_HPP_ALONE)
#undef GMM_HPP_ALONE
#undef GMM_HPP_OPERATION
#undef GMM_HPP_LIST

/* Runs an operation in as much workspace as it needs. */
template <class D> GMM_HPP_STATUS call(const Operation<D> &operation, Workspace &workspace, const D &descriptor) {
    gmm_context *ctx = workspace.context.get();
    gmm_info info{};
    gmm_status s = operation.query(ctx, operation.op, &descriptor, &info);
    if (s == GMM_OK && (s = workspace.reserve(info.workspace_bytes)) != GMM_OK) return s;
    if (s == GMM_OK) s = operation.run(ctx, &descriptor, workspace.data(), workspace.bytes(), workspace.stream);
    return check(s, gmm_last_error(ctx));
}

/* ---- Operands */

inline gmm_mat mat(const float *data) { return gmm_mat_packed(GMM_F32, data); }
inline gmm_mat mat(gmm_dtype dtype, const void *data) { return gmm_mat_packed(dtype, data); } /* GMM_BF16, ... */

/* Rows of each expert, in the context's memory. `fault` is a word there; see gmm.h. */
inline gmm_groups sizes(const int32_t *splits, int32_t experts, int64_t capacity, uint32_t *fault = nullptr) {
    gmm_groups g{};
    g.count = experts, g.capacity = capacity, g.splits = splits, g.dtype = GMM_I32, g.fault = fault;
    return g;
}

/* A gradient: stored, or with add summed into what is there (main_grad). */
struct Grad {
    gmm_mat mat{};
    bool add = false;
    gmm_grad grad() const {
        gmm_grad g{};
        return g.main_grad = add, g.mat = &mat, g;
    }
};

/* ---- Calls. Operands that were not set are not wanted. */

inline const gmm_mat *wanted(const gmm_mat &m) { return m.dtype != GMM_NONE ? &m : nullptr; }
inline const gmm_grad *wanted(const Grad &g, const gmm_grad &grad) { return wanted(g.mat) ? &grad : nullptr; }

struct Linear {
    int64_t in_features = 0, out_features = 0;
    gmm_groups groups{};
    gmm_mat x{}, w{}, bias{}, y{}, dy{}, dx{};
    Grad dw, db;

    GMM_HPP_STATUS fwd(Workspace &workspace) const { return run(linear_fwd, workspace); }
    GMM_HPP_STATUS dgrad(Workspace &workspace) const { return run(linear_dgrad, workspace); }
    GMM_HPP_STATUS wgrad(Workspace &workspace) const { return run(linear_wgrad, workspace); }
    GMM_HPP_STATUS bgrad(Workspace &workspace) const { return run(linear_bgrad, workspace); }

private:
    GMM_HPP_STATUS run(const Operation<gmm_linear> &operation, Workspace &workspace) const {
        const gmm_grad gw = dw.grad(), gb = db.grad();
        gmm_linear lin{};
        lin.groups = &groups, lin.in_features = in_features, lin.out_features = out_features;
        lin.x = wanted(x), lin.w = wanted(w), lin.bias = wanted(bias), lin.y = wanted(y);
        lin.dy = wanted(dy), lin.dx = wanted(dx), lin.dw = wanted(dw, gw), lin.db = wanted(db, gb);
        return call(operation, workspace, lin);
    }
};

/* The weight gradients that one Mlp::bwd leaves for later, and what they read of it. The operands that gmm_mlp_bwd
   names must live on. */
struct Wgrads {
    explicit Wgrads(const Context &c) : deferred(c) {}
    Wgrads(const Wgrads &) = delete; /* `queue` points to `entry` */
    GMM_HPP_STATUS run(Workspace &workspace) {
        gmm_status s = workspace.reserve(workspace_bytes);
        gmm_context *ctx = workspace.context.get();
        if (s != GMM_OK) return s;
        s = gmm_mlp_wgrad(ctx, &queue, workspace.data(), workspace.bytes(), workspace.stream);
        return check(s, gmm_last_error(ctx));
    }
    Memory deferred;
    size_t workspace_bytes = 0;
    gmm_wgrad_entry entry{};
    gmm_wgrad_queue queue = gmm_wgrad_queue_over(&entry, 1);
};

/* An expert MLP. fwd keeps in `saved` what bwd needs. With a recipe in config, set it in `recipe` too. */
struct Mlp {
    gmm_mlp_config config{};
    gmm_recipe recipe{};
    gmm_groups groups{};
    gmm_mat x{}, w1{}, b1{}, w2{}, b2{}, y{}, dy{}, dx{};
    Grad dw1, dw2, db1, db2;
    const float *prob = nullptr;
    float *dprob = nullptr;
    gmm_mlp_quant quant{};    /* fields but `recipe` and the cache */
    Memory *cache = nullptr;  /* fwd leaves the quantized weights here: gmm_mlp_quant.weight_skip */
    Wgrads *wgrads = nullptr; /* with config.delay_wgrad bwd leaves the weight gradients here */

    GMM_HPP_STATUS fwd(Workspace &workspace, Memory &saved) const { return run(mlp_fwd, workspace, &saved); }
    GMM_HPP_STATUS bwd(Workspace &workspace, Memory &saved) const { return run(mlp_bwd, workspace, &saved); }
    GMM_HPP_STATUS infer(Workspace &workspace) const { return run(mlp_fwd, workspace, nullptr); }

private:
    GMM_HPP_STATUS run(const Operation<gmm_mlp> &operation, Workspace &workspace, Memory *saved) const {
        const gmm_grad g1 = dw1.grad(), g2 = dw2.grad(), h1 = db1.grad(), h2 = db2.grad();
        const bool fwd = operation.op == GMM_OP_MLP_FWD, delays = !fwd && wgrads;
        gmm_context *ctx = workspace.context.get();
        gmm_mlp_quant q = quant;
        gmm_info info{}, later{};
        gmm_mlp mlp{};
        q.recipe = &recipe;
        mlp.config = &config, mlp.groups = &groups, mlp.quant = recipe.kind ? &q : nullptr;
        mlp.x = wanted(x), mlp.w1 = wanted(w1), mlp.b1 = wanted(b1), mlp.w2 = wanted(w2), mlp.b2 = wanted(b2);
        mlp.y = wanted(y), mlp.dy = wanted(dy), mlp.dx = wanted(dx), mlp.prob = prob, mlp.dprob = dprob;
        mlp.dw1 = wanted(dw1, g1), mlp.dw2 = wanted(dw2, g2), mlp.db1 = wanted(db1, h1), mlp.db2 = wanted(db2, h2);
        mlp.queue = delays ? &wgrads->queue : nullptr;
        if (cache) q.weight_cache = cache; /* the query wants any address */
        gmm_status s = gmm_mlp_query(ctx, operation.op, &mlp, &info);
        if (s == GMM_OK && delays) s = gmm_mlp_query(ctx, GMM_OP_MLP_WGRAD, &mlp, &later);
        if (s != GMM_OK) return check(s, gmm_last_error(ctx));
        /* What later calls read stays as it is: where bwd, or a queue that is not empty, finds less, gmm refuses it. */
        if (fwd && saved && (s = saved->reserve(info.saved_bytes)) != GMM_OK) return s;
        if (fwd && cache && (s = cache->reserve(info.weight_cache_bytes)) != GMM_OK) return s;
        if (delays && !wgrads->queue.count && (s = wgrads->deferred.reserve(info.deferred_bytes)) != GMM_OK) return s;
        if (saved) mlp.saved = saved->data(), mlp.saved_bytes = saved->bytes();
        if (cache) q.weight_cache = cache->data(), q.weight_cache_bytes = cache->bytes();
        if (delays) mlp.deferred = wgrads->deferred.data(), mlp.deferred_bytes = wgrads->deferred.bytes();
        s = call(operation, workspace, mlp);
        if (delays && s == GMM_OK) wgrads->workspace_bytes = later.workspace_bytes;
        return s;
    }
};

} // namespace gmm

#endif /* GMM_MOE_GMM_HPP_INCLUDED */
