/* device.h - CUDA C++ as a C++ compiler reads it: keywords, built-in variables and functions, for the implementation
   whose kernels emulator.cpp runs on the CPU. Included before everything else (-include). */
#ifndef GMM_EMULATOR_DEVICE_H
#define GMM_EMULATOR_DEVICE_H

#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_runtime.h>
#include <math.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

#include "emulator.h"

/* From here on, headers take this for a compilation of device code for sm_90a. */
#define __CUDACC__ 1
#define __CUDA_ARCH__ 900
#define __CUDA_ARCH_FEAT_SM90_ALL 1

#undef __host__
#undef __device__
#undef __global__
#undef __shared__
#undef __forceinline__
#undef __launch_bounds__
#undef __align__
#define __host__
#define __device__
#define __global__
#define __shared__ static /* one CTA runs at a time, unless it belongs to a cluster; those use dynamic memory alone */
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))

#define threadIdx (emulated_thread->thread_index)
#define blockIdx (emulated_thread->block_index)
static const dim3 &blockDim = emulated_launch.block, &gridDim = emulated_launch.grid;

#define __syncthreads() emulated_barrier(0, 0)
#define __nanosleep(ns) emulated_yield()

/* --- warp functions --- */
static inline void __syncwarp(unsigned mask = 0xFFFFFFFFu) { (void)emulated_exchange(mask, NULL, 0); }
template <typename T> static inline T emulated_shuffle(uint32_t mask, T value, int lane) {
    T result;
    memcpy(&result, emulated_exchange(mask, &value, sizeof value)[lane & 31].bytes, sizeof result);
    return result;
}
#define EMULATED_LANE ((int)(threadIdx.x & 31))
template <typename T> static inline T __shfl_sync(unsigned mask, T v, int lane, int width = 32) {
    return emulated_shuffle(mask, v, (EMULATED_LANE & ~(width - 1)) | (lane & (width - 1)));
}
template <typename T> static inline T __shfl_xor_sync(unsigned mask, T v, int lanes, int width = 32) {
    const int other = EMULATED_LANE ^ lanes;
    return emulated_shuffle(mask, v, other / width == EMULATED_LANE / width ? other : EMULATED_LANE);
}
template <typename T> static inline T __shfl_up_sync(unsigned mask, T v, unsigned delta, int width = 32) {
    const int other = EMULATED_LANE % width - (int)delta;
    return emulated_shuffle(mask, v, other < 0 ? EMULATED_LANE : EMULATED_LANE - (int)delta);
}
template <typename T> static inline T __shfl_down_sync(unsigned mask, T v, unsigned delta, int width = 32) {
    const int other = EMULATED_LANE % width + (int)delta;
    return emulated_shuffle(mask, v, other >= width ? EMULATED_LANE : EMULATED_LANE + (int)delta);
}
/* A reduction over the lanes of `mask`. */
template <typename T, typename F> static inline T emulated_reduce(uint32_t mask, T v, F combine) {
    const emulated_value *all = emulated_exchange(mask, &v, sizeof v);
    T result = v;
    int first = 1, lane;
    for (lane = 0; lane < 32; lane++) {
        T other;
        if (!(mask >> lane & 1)) continue;
        memcpy(&other, all[lane].bytes, sizeof other);
        result = first ? other : combine(result, other);
        first = 0;
    }
    return result;
}
static inline unsigned __ballot_sync(unsigned mask, int predicate) {
    const unsigned bit = predicate ? 1u << EMULATED_LANE : 0u;
    return emulated_reduce(mask, bit, [](unsigned a, unsigned b) { return a | b; });
}
static inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
static inline int __all_sync(unsigned mask, int predicate) { return (__ballot_sync(mask, predicate) & mask) == mask; }
#define EMULATED_REDUCE(name, type, result) \
    static inline type name(unsigned mask, type v) { \
        return emulated_reduce(mask, v, [](type a, type b) { return (type)(result); }); \
    }
EMULATED_REDUCE(__reduce_max_sync, unsigned, a > b ? a : b)
EMULATED_REDUCE(__reduce_max_sync, int, a > b ? a : b)
EMULATED_REDUCE(__reduce_min_sync, unsigned, a < b ? a : b)
EMULATED_REDUCE(__reduce_min_sync, int, a < b ? a : b)
EMULATED_REDUCE(__reduce_add_sync, unsigned, a + b)
EMULATED_REDUCE(__reduce_add_sync, int, a + b)
EMULATED_REDUCE(__reduce_or_sync, unsigned, a | b)
#undef EMULATED_REDUCE
template <typename T> static inline unsigned __match_any_sync(unsigned mask, T v) {
    const emulated_value *all = emulated_exchange(mask, &v, sizeof v);
    unsigned equal = 0;
    int lane;
    for (lane = 0; lane < 32; lane++)
        if (mask >> lane & 1 && !memcmp(all[lane].bytes, &v, sizeof v)) equal |= 1u << lane;
    return equal;
}

/* --- atomics: no thread is interrupted between two synchronizations --- */
template <typename T, typename U> static inline T atomicAdd(T *p, U v) {
    const T old = *p;
    *p = (T)(old + (T)v);
    return old;
}
template <typename T, typename U> static inline T atomicOr(T *p, U v) {
    const T old = *p;
    *p = (T)(old | (T)v);
    return old;
}
template <typename T, typename U> static inline T atomicMax(T *p, U v) {
    const T old = *p;
    if ((T)v > old) *p = (T)v;
    return old;
}

/* --- memory --- */
template <typename T> static inline T __ldg(const T *p) { return *p; }
template <typename T> static inline T __ldcs(const T *p) { return *p; }
template <typename T> static inline T __ldcg(const T *p) { return *p; }
template <typename T> static inline void __stcs(T *p, T v) { *p = v; }
#define __cvta_generic_to_shared(p) ((size_t)(uintptr_t)(p))
#define __cvta_generic_to_global(p) ((size_t)(uintptr_t)(p))

/* --- arithmetic --- */
static inline float __uint_as_float(uint32_t u) { float f; memcpy(&f, &u, 4); return f; }
static inline uint32_t __float_as_uint(float f) { uint32_t u; memcpy(&u, &f, 4); return u; }
static inline int __float_as_int(float f) { return (int)__float_as_uint(f); }
static inline float __int_as_float(int i) { return __uint_as_float((uint32_t)i); }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
static inline float __fdividef(float a, float b) { return a / b; }
static inline int __popc(unsigned v) { return __builtin_popcount(v); }
static inline int __ffs(int v) { return __builtin_ffs(v); }
static inline int __clz(int v) { return v ? __builtin_clz((unsigned)v) : 32; }
static inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((uint64_t)a * b >> 32); }
static inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
    return shift & 31 ? high << (shift & 31) | low >> (32 - (shift & 31)) : high;
}
static inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    const uint64_t both = (uint64_t)b << 32 | a;
    unsigned result = 0;
    int i;
    for (i = 0; i < 4; i++) {
        const unsigned s = selector >> 4 * i & 15, byte = (unsigned)(both >> 8 * (s & 7)) & 255;
        result |= (s & 8 ? (byte & 128 ? 255u : 0u) : byte) << 8 * i;
    }
    return result;
}
template <typename T, typename U> static inline auto min(T a, U b) -> decltype(a + b) { return a < b ? a : b; }
template <typename T, typename U> static inline auto max(T a, U b) -> decltype(a + b) { return a > b ? a : b; }
static inline float rsqrtf(float v) { return 1.0f / sqrtf(v); }

#endif
