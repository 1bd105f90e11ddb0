/* One call of gmm on torch's tensors: a context of their device, the current stream, operands as gmm describes them,
   workspaces from torch's allocator, and a failure as an exception with gmm's message. */
#pragma once
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <c10/core/DeviceGuard.h>
#ifdef GMM_TORCH_CUDA
#include <c10/cuda/CUDAStream.h>
#endif
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "gmm.h"

namespace gmm_torch {

using at::Tensor;
using Maybe = std::optional<Tensor>;

inline Tensor value(const Maybe &t) { return t.has_value() ? *t : Tensor(); }

/* Whether this value of `save` keeps what backward needs of x: x is not read then, and may be any tensor of its shape
   and dtype. */
inline bool saves_x(c10::string_view save) {
    return save == "quantized" || save == "quantized_e4m3" || save == "preact_and_rows";
}

/* gmm reads and writes what a descriptor says: a tensor of another shape would be read or written past its end. */
inline void check_shape(const Tensor &t, const char *name, at::IntArrayRef shape) {
    TORCH_CHECK(!t.defined() || t.sizes() == shape, "gmm: ", name, " has shape ", t.sizes(), ", not ", shape);
}

/* The address of a vector's numbers. gmm wants one of an empty vector too, and does not read it. */
template <class T> T *address(const Tensor &t) {
    alignas(256) static char nothing[256];
    if (!t.defined()) return nullptr;
    return (T *)(t.numel() ? const_cast<void *>(t.const_data_ptr()) : nothing);
}
inline float *floats(const Tensor &t) { return address<float>(t); }
inline int32_t *ints(const Tensor &t) { return address<int32_t>(t); }

/* Contexts that no call uses at this time. A context serves one thread at a time, and autograd calls from threads of
   its own. Never freed: at the end of a process the CUDA driver may be gone first. */
struct Pool {
    std::mutex mutex;
    std::map<int, std::vector<gmm_context *>> idle; /* by CUDA device, or minus the number of CPU threads */
    std::map<int, Tensor> fault;                    /* by CUDA device: the word that its calls set GMM_FAULT_* in */
    static Pool &get() {
        static Pool *pool = new Pool;
        return *pool;
    }
};

/* A tensor and how gmm sees it. The tensor lives as long as the call. */
struct Mat {
    Tensor tensor;
    gmm_mat mat = GMM_ZERO;
    const gmm_mat *get() const { return tensor.defined() ? &mat : nullptr; }
};

/* Memory aligned to 256 bytes. On the CPU torch's allocator aligns to 64 bytes, so that more is allocated. */
struct Buffer {
    Tensor tensor;
    void *data = nullptr;
    Buffer(int64_t bytes, at::Device device) {
        tensor = at::empty({bytes + (device.is_cpu() ? 256 : 1)}, at::TensorOptions(at::kByte).device(device));
        data = (void *)(((uintptr_t)tensor.data_ptr() + 255) / 256 * 256);
    }
};

inline gmm_dtype dtype_of(const Tensor &t, const char *name) {
    switch (t.scalar_type()) {
    case at::kFloat: return GMM_F32;
    case at::kHalf: return GMM_F16;
    case at::kBFloat16: return GMM_BF16;
    case at::kInt: return GMM_I32;
    case at::kLong: return GMM_I64;
    default: TORCH_CHECK(false, "gmm: ", name, " has dtype ", t.scalar_type(), ", not float32, float16 or bfloat16");
    }
}

/* Takes what torch has of a matrix, or of one per group: rows whose elements are adjacent are read where they are,
   others are copied. Addresses need the alignment of an element alone, on the CPU too. */
inline Mat mat_of(Tensor t, const char *name) {
    Mat m;
    if (!t.defined()) return m;
    TORCH_CHECK(t.dim() == 2 || t.dim() == 3, "gmm: ", name, " has ", t.dim(), " dimensions, not 2 or 3");
    if (!t.numel()) { /* gmm wants an address, also of no rows */
        std::vector<int64_t> shape = t.sizes().vec();
        for (int64_t &n : shape) n = std::max<int64_t>(n, 1);
        t = at::empty(shape, t.options());
    }
    const int64_t d = t.dim(), rows = t.size(d - 2), cols = t.size(d - 1);
    /* Strides of single rows and groups may be anything, also those of a tensor that torch calls contiguous. */
    const auto ld = [&] { return rows == 1 ? cols : t.stride(d - 2); };
    const auto group_stride = [&] { return d == 2 ? 0 : t.size(0) == 1 ? rows * ld() : t.stride(0); };
    if (t.stride(d - 1) != 1 || ld() < cols || (d == 3 && group_stride() < rows * ld())) t = t.contiguous();
    m.mat = gmm_mat_packed(dtype_of(t, name), t.const_data_ptr());
    m.mat.ld = ld();
    m.mat.group_stride = group_stride();
    m.tensor = std::move(t);
    return m;
}

/* A bias [groups, features] as gmm's matrices of one row. */
inline Tensor as_rows(const Tensor &t) { return t.defined() ? t.unsqueeze(1) : t; }

class Call {
public:
    gmm_context *ctx = nullptr;
    gmm_stream stream = nullptr;

    explicit Call(const Tensor &t) : device(t.device()), guard(device) {
        key = device.is_cuda() ? device.index() : -at::get_num_threads();
#ifdef GMM_TORCH_CUDA
        if (device.is_cuda()) stream = c10::cuda::getCurrentCUDAStream(device.index()).stream();
#endif
        Pool &pool = Pool::get();
        {
            std::lock_guard<std::mutex> lock(pool.mutex);
            std::vector<gmm_context *> &idle = pool.idle[key];
            if (!idle.empty()) {
                ctx = idle.back();
                idle.pop_back();
                return;
            }
        }
        gmm_config config = GMM_ZERO;
        gmm_error error = GMM_ZERO;
        config.space = device.is_cuda() ? GMM_SPACE_CUDA : GMM_SPACE_CPU;
        config.device = device.is_cuda() ? device.index() : 0;
        config.threads = device.is_cuda() ? 0 : at::get_num_threads();
        TORCH_CHECK(gmm_create(&ctx, &config, &error) == GMM_OK, "gmm: ", error.text);
        if (device.is_cuda()) fault();
    }
    ~Call() {
        Pool &pool = Pool::get();
        std::lock_guard<std::mutex> lock(pool.mutex);
        pool.idle[key].push_back(ctx);
    }
    Call(const Call &) = delete;
    Call &operator=(const Call &) = delete;

    void check(gmm_status s) const { TORCH_CHECK(s == GMM_OK, "gmm: ", gmm_last_error(ctx)); }

    /* All operands are on the device of the first one. */
    const Tensor &here(const Tensor &t, const char *name) const {
        TORCH_CHECK(!t.defined() || t.device() == device, "gmm: ", name, " is on ", t.device(), ", other operands on ",
                    device);
        return t;
    }
    Mat mat(const Tensor &t, const char *name) const { return mat_of(here(t, name), name); }
    Mat bias(const Tensor &t, const char *name, const Tensor &w) const { /* of the layer with weights w */
        check_shape(t, name, {w.size(0), w.size(1)});
        return mat_of(as_rows(here(t, name)), name);
    }
    Tensor vector(const Tensor &t, const char *name, at::ScalarType type) const {
        TORCH_CHECK(!t.defined() || t.scalar_type() == type, "gmm: ", name, " has dtype ", t.scalar_type(), ", not ",
                    type);
        return t.defined() ? here(t, name).contiguous() : t;
    }
    Tensor vector(const Tensor &t, const char *name, at::ScalarType type, at::IntArrayRef shape) const {
        check_shape(t, name, shape);
        return vector(t, name, type);
    }

    /* Rows of each expert, in memory of the device, which the host does not read. `splits` outlives the call. */
    gmm_groups groups(const Tensor &splits, int64_t capacity) const {
        TORCH_CHECK(splits.dim() == 1 && splits.is_contiguous(), "gmm: splits must be contiguous, one size per expert");
        TORCH_CHECK(splits.scalar_type() == at::kInt || splits.scalar_type() == at::kLong,
                    "gmm: splits has dtype ", splits.scalar_type(), ", not int32 or int64");
        gmm_groups g = GMM_ZERO;
        g.count = (int32_t)here(splits, "splits").size(0);
        g.capacity = capacity;
        g.splits = splits.const_data_ptr();
        g.dtype = splits.scalar_type() == at::kInt ? GMM_I32 : GMM_I64;
        g.tail = GMM_TAIL_ZERO;
        g.fault = fault();
        return g;
    }

    /* NULL on the CPU, where gmm then refuses faulty sizes at once. */
    uint32_t *fault() const {
        if (device.is_cpu()) return nullptr;
        Pool &pool = Pool::get();
        std::lock_guard<std::mutex> lock(pool.mutex);
        Tensor &word = pool.fault[device.index()];
        if (!word.defined()) word = at::zeros({1}, at::TensorOptions(at::kInt).device(device));
        return (uint32_t *)word.data_ptr();
    }

    template <class D>
    void run(gmm_op op, gmm_status (*query)(gmm_context *, gmm_op, const D *, gmm_info *),
             gmm_status (*work)(gmm_context *, const D *, void *, size_t, gmm_stream), const D &descriptor) const {
        gmm_info info = GMM_ZERO;
        check(query(ctx, op, &descriptor, &info));
        const Buffer workspace((int64_t)info.workspace_bytes, device);
        check(work(ctx, &descriptor, workspace.data, info.workspace_bytes, stream));
    }

    const at::Device device;

private:
    const c10::DeviceGuard guard;
    int key;
};

} // namespace gmm_torch
