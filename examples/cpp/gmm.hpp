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

#include <cstdlib>
#include <new>
#include <utility>
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

#ifndef GMM_NO_EXCEPTIONS
/* What a refused call throws: its status, and in what() gmm's sentence. */
struct Error : std::runtime_error {
    Error(gmm_status s, const char *text) : std::runtime_error(text), status(s) {}
    gmm_status status;
};
#endif

inline gmm_status check(gmm_status status, const char *text) {
#ifdef GMM_NO_EXCEPTIONS
    (void)text;
#else
    if (status != GMM_OK) throw Error(status, text);
#endif
    return status;
}

/* ---- Context */

class Context {
public:
    Context() { (void)create(gmm_config{}); }
    explicit Context(gmm_space space, int32_t device = 0) {
        gmm_config config{};
        config.space = space, config.device = device;
        (void)create(config);
    }
    explicit Context(const gmm_config &config) { (void)create(config); }
    Context(Context &&other) noexcept : ctx_(std::exchange(other.ctx_, nullptr)), space_(other.space_),
        device_(other.device_), error_(other.error_) {}
    Context &operator=(Context &&other) noexcept {
        std::swap(ctx_, other.ctx_), std::swap(error_, other.error_);
        std::swap(space_, other.space_), std::swap(device_, other.device_);
        return *this;
    }
    Context(const Context &) = delete;
    Context &operator=(const Context &) = delete;
    ~Context() { gmm_destroy(ctx_); }

    explicit operator bool() const { return ctx_ != nullptr; } /* false where creation failed without exceptions */
    gmm_context *get() const { return ctx_; }
    gmm_space space() const { return space_; }
    int32_t device() const { return device_; }
    const char *last_error() const { return ctx_ ? gmm_last_error(ctx_) : error_.text; }

private:
    gmm_status create(const gmm_config &config) {
        space_ = config.space, device_ = config.device;
        return check(gmm_create(&ctx_, &config, &error_), error_.text);
    }
    gmm_context *ctx_ = nullptr;
    gmm_space space_ = GMM_SPACE_CPU;
    int32_t device_ = 0;
    gmm_error error_{};
};

/* ---- Memory of a context, aligned to 256 bytes: workspaces, and what an MLP saves */

class Memory {
public:
    explicit Memory(const Context &c) : Memory(c.space(), c.device()) {}
    Memory(gmm_space space, int32_t device) : space_(space), device_(device) {}
    Memory(Memory &&other) noexcept : space_(other.space_), device_(other.device_),
        data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
    Memory(const Memory &) = delete;
    Memory &operator=(const Memory &) = delete;
    ~Memory() { release(); }
    void *data() const { return data_; }
    size_t bytes() const { return bytes_; }

    /* At least so many bytes; the contents are lost where it grows. On a GPU growing waits for the device. */
    bool reserve(size_t bytes) {
        if (data_ && bytes <= bytes_) return true;
        release();
        const size_t rounded = bytes ? (bytes + 255) / 256 * 256 : 256;
        if (space_ == GMM_SPACE_CPU) data_ = ::operator new(rounded, std::align_val_t(256), std::nothrow);
#ifdef GMM_HPP_CUDA
        else data_ = device_memory(rounded);
#endif
        bytes_ = data_ ? rounded : 0;
        return data_ != nullptr;
    }
    /* Why reserve has returned false. */
    const char *failure() const {
#ifndef GMM_HPP_CUDA
        if (space_ != GMM_SPACE_CPU) return "gmm.hpp: no memory of a GPU context: define GMM_HPP_CUDA";
#endif
        return "gmm.hpp: a workspace, or what fwd saves, could not be allocated";
    }

private:
#ifdef GMM_HPP_CUDA
    void *device_memory(size_t bytes) const { /* of the context's device, whichever is current */
        void *data = nullptr;
        int current = 0;
        if (cudaGetDevice(&current) != cudaSuccess || cudaSetDevice(device_) != cudaSuccess) return nullptr;
        const bool allocated = cudaMalloc(&data, bytes) == cudaSuccess;
        (void)cudaSetDevice(current);
        return allocated ? data : nullptr;
    }
#endif
    void release() {
        if (space_ == GMM_SPACE_CPU) ::operator delete(data_, std::align_val_t(256));
#ifdef GMM_HPP_CUDA
        else (void)cudaFree(data_);
#endif
        data_ = nullptr, bytes_ = 0;
    }
    gmm_space space_;
    int32_t device_;
    void *data_ = nullptr;
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
gmm_status query_of(gmm_context *ctx, gmm_op, const D *descriptor, gmm_info *info) {
    return Query(ctx, descriptor, info);
}

#define GMM_HPP_LIST(X) \
    X(linear_fwd, gmm_linear, LINEAR_FWD, gmm_linear_query) \
    X(linear_dgrad, gmm_linear, LINEAR_DGRAD, gmm_linear_query) \
    X(linear_wgrad, gmm_linear, LINEAR_WGRAD, gmm_linear_query) \
    X(linear_bgrad, gmm_linear, LINEAR_BGRAD, gmm_linear_query) \
    X(act_fwd, gmm_activation, ACT_FWD, gmm_act_query) X(act_bwd, gmm_activation, ACT_BWD, gmm_act_query) \
    X(mlp_fwd, gmm_mlp, MLP_FWD, gmm_mlp_query) X(mlp_bwd, gmm_mlp, MLP_BWD, gmm_mlp_query) \
    X(moe_fwd, gmm_moe, MOE_FWD, gmm_moe_query) X(moe_bwd, gmm_moe, MOE_BWD, gmm_moe_query) \
    X(topk_fwd, gmm_route, TOPK_FWD, gmm_topk_query) X(topk_bwd, gmm_route, TOPK_BWD, gmm_topk_query) \
    X(permute_map, gmm_permute, PERMUTE_MAP, gmm_permute_query) \
    X(permute_fwd, gmm_permute, PERMUTE_FWD, gmm_permute_query) \
    X(permute_bwd, gmm_permute, PERMUTE_BWD, gmm_permute_query) \
    X(unpermute_fwd, gmm_permute, UNPERMUTE_FWD, gmm_permute_query) \
    X(unpermute_bwd, gmm_permute, UNPERMUTE_BWD, gmm_permute_query) \
    X(pad, gmm_padding, PAD, gmm_pad_query) X(unpad, gmm_padding, UNPAD, gmm_pad_query) \
    X(glu_interleave, gmm_glu, GLU_INTERLEAVE, gmm_glu_query) \
    X(quantize, gmm_quantization, QUANTIZE, gmm_quantize_query) \
    X(requantize, gmm_quantization, REQUANTIZE, gmm_quantize_query) \
    X(accumulate, gmm_accumulation, ACCUMULATE, (query_of<gmm_accumulation, gmm_accumulate_query>)) \
    X(convert, gmm_conversion, CONVERT, (query_of<gmm_conversion, gmm_convert_query>)) \
    X(transpose, gmm_transposition, TRANSPOSE, (query_of<gmm_transposition, gmm_transpose_query>)) \
    X(dequantize, gmm_dequantization, DEQUANTIZE, (query_of<gmm_dequantization, gmm_dequantize_query>))
#define GMM_HPP_OPERATION(name, descriptor, op, query) \
    constexpr Operation<descriptor> name{GMM_OP_##op, query, gmm_##name};
GMM_HPP_LIST(GMM_HPP_OPERATION)
#undef GMM_HPP_OPERATION
#undef GMM_HPP_LIST

/* Runs an operation in as much workspace as it needs. */
template <class D> GMM_HPP_STATUS call(const Operation<D> &operation, Workspace &workspace, const D &descriptor) {
    gmm_context *ctx = workspace.context.get();
    gmm_info info{};
    gmm_status s = operation.query(ctx, operation.op, &descriptor, &info);
    if (s == GMM_OK && !workspace.reserve(info.workspace_bytes))
        return check(GMM_E_MEMORY, workspace.failure());
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
        g.main_grad = add, g.mat = &mat;
        return g;
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

/* An expert MLP. fwd keeps in `saved` what bwd needs. With a recipe in config, set it in `recipe` too. */
struct Mlp {
    gmm_mlp_config config{};
    gmm_recipe recipe{};
    gmm_groups groups{};
    gmm_mat x{}, w1{}, b1{}, w2{}, b2{}, y{}, dy{}, dx{};
    Grad dw1, dw2, db1, db2;
    const float *prob = nullptr;
    float *dprob = nullptr;
    gmm_mlp_quant quant{}; /* fields but `recipe` */

    GMM_HPP_STATUS fwd(Workspace &workspace, Memory &saved) const { return run(mlp_fwd, workspace, &saved); }
    GMM_HPP_STATUS bwd(Workspace &workspace, Memory &saved) const { return run(mlp_bwd, workspace, &saved); }
    GMM_HPP_STATUS infer(Workspace &workspace) const { return run(mlp_fwd, workspace, nullptr); }

private:
    GMM_HPP_STATUS run(const Operation<gmm_mlp> &operation, Workspace &workspace, Memory *saved) const {
        const gmm_grad g1 = dw1.grad(), g2 = dw2.grad(), h1 = db1.grad(), h2 = db2.grad();
        gmm_mlp_quant q = quant;
        gmm_mlp mlp{};
        q.recipe = &recipe;
        mlp.config = &config, mlp.groups = &groups, mlp.quant = recipe.kind ? &q : nullptr;
        mlp.x = wanted(x), mlp.w1 = wanted(w1), mlp.b1 = wanted(b1), mlp.w2 = wanted(w2), mlp.b2 = wanted(b2);
        mlp.y = wanted(y), mlp.dy = wanted(dy), mlp.dx = wanted(dx), mlp.prob = prob, mlp.dprob = dprob;
        mlp.dw1 = wanted(dw1, g1), mlp.dw2 = wanted(dw2, g2), mlp.db1 = wanted(db1, h1), mlp.db2 = wanted(db2, h2);
        if (saved) {
            gmm_info info{};
            gmm_context *ctx = workspace.context.get();
            const gmm_status s = gmm_mlp_query(ctx, operation.op, &mlp, &info);
            if (s != GMM_OK) return check(s, gmm_last_error(ctx));
            /* What bwd reads is there: without fwd, or where fwd saved less, gmm refuses it. */
            if (operation.op == GMM_OP_MLP_FWD && !saved->reserve(info.saved_bytes))
                return check(GMM_E_MEMORY, saved->failure());
            mlp.saved = saved->data(), mlp.saved_bytes = saved->bytes();
        }
        return call(operation, workspace, mlp);
    }
};

} // namespace gmm

#endif /* GMM_MOE_GMM_HPP_INCLUDED */
