/* gmm_kernels.cuh - v0.1.0 - device kernels of mixture-of-experts compute and their launchers - MIT
 * SPDX-License-Identifier: MIT
 *
 * Quick start: none of its own. The CUDA half of gmm.h's implementation includes this file; nothing else needs to. It
 * is empty without GMM_IMPLEMENTATION, and where a C compiler reads it, but for GMM_KERNELS_SCHEDULE.
 *
 * CONTENTS
 *     Tables and launchers    common helpers, the split kernel, grouped GEMMs (portable; on Hopper), bias gradient, row
 *                             kernels (activation, routing, permute, pad, gated layout, accumulate, convert),
 *                             quantization
 *     Bodies                  kernels that exist in several instances. The file includes itself once per instance, with
 *                             GMM__BODY and the instance's GMM__ROW defined, so that profilers and debuggers see every
 *                             line of a kernel. GMM__BODY is one of the names GMM__BODY_TENSOR to GMM__BODY_MX.
 *
 * CONFIGURATION (before gmm.h)
 *     GMM_KERNELS_FILE   the name under which this file includes itself; default "gmm_kernels.cuh". Define it if you
 *                        rename the file.
 *     GMM_KERNELS_SCHEDULE   C and C++ compilers see the arithmetic of the Hopper products' work tiles (gmm_sm90_tile),
 *                        for tests
 *
 * Kernels are static (with GMM_PARTS hidden), need sm_80, read group sizes on the device, and are launched with shapes
 * that depend on capacities alone. The Hopper kernels need sm_90a and are empty on other architectures. Launchers take
 * plain argument structs, enqueue on the stream, and return cudaError_t. They keep no state. From sm_90 on, some
 * kernels use programmatic dependent launch (gmm_pdl_wait, gmm_pdl_wait_only): their CTAs may become resident while the
 * predecessor in the stream finishes. They wait for its completion before they access memory, except that the
 * Hopper products read the split early, and compare it after the wait.
 * Products: every output element accumulates in the order of k, whatever the tile, the grid or the other groups; there
 * are no floating-point atomics.
 *
 * REVISIONS (full list: CHANGELOG.md)
 *     0.1.0  first version
 */
#ifndef GMM__BODY
#include "gmm_quant.h"


/* This conditional ends in hopper/schedule.cuh, which C compilers read too, and which opens the next one. */
#if defined(GMM_IMPLEMENTATION) && defined(__CUDACC__) && !defined(GMM__GEMM_DONE)
#define GMM__GEMM_DONE
/* .................................................................................... Common to all kernels ... */

#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_runtime.h>
#include <string.h>

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
#error "gmm: the kernels need compute capability 8.0; compile with -arch=sm_80 or later"
#endif

/* The name under which this file includes itself, once per kernel instance. */
#ifndef GMM_KERNELS_FILE
#define GMM_KERNELS_FILE "gmm_kernels.cuh"
#endif
/* Values of GMM__BODY: what the file is for a row of instances while it includes itself. They stand in its last
   conditional in this order: the parts body_*.cuh. */
#define GMM__BODY_TENSOR 1         /* portable GEMM on tensor cores (mma.sync) */
#define GMM__BODY_FP32 2           /* portable GEMM of fp32 operands */
#define GMM__BODY_QUANTIZED 3      /* portable GEMM of quantized operands */
#define GMM__BODY_BGRAD 4          /* bias gradient */
#define GMM__BODY_PRECISION 5      /* row kernels by precision */
#define GMM__BODY_UNIT 6           /* row kernels by copy unit */
#define GMM__BODY_WGMMA 7          /* wgmma instructions */
#define GMM__BODY_PRODUCT 8        /* 16-bit GEMM on Hopper */
#define GMM__BODY_FP8 9            /* FP8 GEMM on Hopper */
#define GMM__BODY_QUANTIZE_AMAX 10 /* amaxes of any source (body_source.cuh) */
#define GMM__BODY_QUANTIZE 11      /* casts of any source to any format (body_source.cuh) */
#define GMM__BODY_AMAX 12          /* vectorized amaxes */
#define GMM__BODY_SCALED 13        /* vectorized casts to FP8 with fp32 scales */
#define GMM__BODY_NV 14            /* vectorized casts to NV16 */
#define GMM__BODY_MX 15            /* vectorized casts to MX32 */

#define GMM__CAT_(a, b) a##b
#define GMM__CAT(a, b) GMM__CAT_(a, b)
/* Rows of a table of kernel instances. GMM__ROW holds one row, its columns in parentheses; GMM__COLUMN(i, GMM__ROW) is
   its i-th column from 1, expanded. The body that reads a row undefines GMM__ROW at its end. */
#define GMM__COLUMN(i, row) GMM__APPLY(GMM__COLUMN_##i, GMM__COLUMNS_OF row, )
#define GMM__COLUMNS_OF(...) __VA_ARGS__
#define GMM__APPLY(f, ...) f(__VA_ARGS__)
#define GMM__COLUMN_1(a, ...) a
#define GMM__COLUMN_2(a, b, ...) b
#define GMM__COLUMN_3(a, b, c, ...) c
#define GMM__COLUMN_4(a, b, c, d, ...) d
#define GMM__COLUMN_5(a, b, c, d, e, ...) e
#define GMM__COLUMN_6(a, b, c, d, e, f, ...) f
#define GMM__COLUMN_7(a, b, c, d, e, f, g, ...) g
#define GMM__COLUMN_8(a, b, c, d, e, f, g, h, ...) h
#define GMM__DEVICE static __device__ __forceinline__
#define GMM__KERNEL static __global__ GMM__UNUSED void
/* A kernel of a table row. Where the implementation is split (GMM_PARTS), the unit that holds its slice defines it, and
   the unit with slice 0, which has the launchers and the kernels that no table instantiates, declares it. The slices
   cost about the same to compile. */
#ifdef GMM_PARTS
#define GMM__ROW_KERNEL GMM__HIDDEN __global__ void
#else
#define GMM__ROW_KERNEL static __global__ GMM__UNUSED void
#endif
#define GMM__DECLARE_KERNEL(kernel, type) GMM__ROW_KERNEL kernel(const __grid_constant__ type args);
/* Rows of tables that GMM_NO_F16 and GMM_NO_QUANT leave out. */
#ifdef GMM_NO_F16
#define GMM__IF_F16(...)
#else
#define GMM__IF_F16(...) __VA_ARGS__
#endif
#ifdef GMM_NO_QUANT
#define GMM__IF_QUANT(...)
#else
#define GMM__IF_QUANT(...) __VA_ARGS__
#endif

/* ................................................................................................ PTX ... */

/* One wrapper for each inline PTX instruction of the kernels, named as in the PTX manual; those of wgmma are in
   ptx_wgmma.cuh. `smem` is the 32-bit address of an operand in shared memory. Operands of constraint "n" must be
   constants, so their wrappers are macros. A "memory" clobber keeps the instruction in program order with memory
   accesses. */

/* --- special registers: read again at each use, so that their values do not occupy registers in between --- */
GMM__DEVICE int gmm_tid_x(void) {
    int tid;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(tid));
    return tid;
}
GMM__DEVICE uint32_t gmm_cluster_ctarank(void) {
    uint32_t rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
GMM__DEVICE uint32_t gmm_cluster_nctarank(void) {
    uint32_t size;
    asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
    return size;
}

/* --- programmatic dependent launch --- */
GMM__DEVICE void gmm_griddepcontrol_launch_dependents(void) {
    asm volatile("griddepcontrol.launch_dependents;" : : : "memory");
}
GMM__DEVICE void gmm_griddepcontrol_wait(void) { asm volatile("griddepcontrol.wait;" : : : "memory"); }
/* The same instruction; the compiler must compute the variables `a` to `g` before it and may use them only after it. */
#define GMM__GRIDDEPCONTROL_WAIT_WITH(a, b, c, d, e, f, g) \
    asm volatile("griddepcontrol.wait;" : "+r"(a), "+r"(b), "+r"(c), "+r"(d), "+r"(e), "+r"(f), "+r"(g) : : "memory")
/* Keeps a load whose value is not used otherwise: the load brings a cache line. The conditional nanosleep of 0 ns
   depends on the word, so the compiler cannot remove the load. */
GMM__DEVICE void gmm_touch(uint32_t word) {
    asm volatile("{\n .reg .pred p;\n setp.eq.u32 p, %0, 1;\n @p nanosleep.u32 0;\n}" : : "r"(word) : "memory");
}

/* --- registers per thread, and barriers against reordering by the compiler --- */
#define GMM__SETMAXNREG_DEC(n) asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" : : "n"(n))
#define GMM__SETMAXNREG_INC(n) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" : : "n"(n))
#define GMM__PIN_F32(x) asm volatile("" : "+f"(x) : : "memory") /* x and memory have their values at this point */
#define GMM__UNDEFINED_F32(x) asm volatile("" : "=f"(x))        /* x has an unknown value, for no instruction */
#define GMM__PIN_U32(x) asm volatile("" : "+r"(x))              /* x is computed anew after this point */
#define GMM__PIN_MEMORY() asm volatile("" : : : "memory")       /* loads and stores do not cross this point */

/* Whether this is the thread of the warp that is elected to act alone: ptxas knows that there is one, and passes its
   operands to TMA without a loop over lanes. Whole warp. */
GMM__DEVICE int gmm_elect_one(void) {
    int elected;
    asm volatile("{\n .reg .pred p;\n elect.sync _|p, 0xFFFFFFFF;\n selp.b32 %0, 1, 0, p;\n}" : "=r"(elected));
    return elected;
}

/* --- mbarrier --- */
GMM__DEVICE void gmm_mbarrier_init(uint32_t bar, uint32_t count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" : : "r"(bar), "r"(count) : "memory");
}
GMM__DEVICE void gmm_fence_mbarrier_init(void) { asm volatile("fence.mbarrier_init.release.cluster;" : : : "memory"); }
GMM__DEVICE void gmm_mbarrier_arrive_expect_tx(uint32_t bar, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" : : "r"(bar), "r"(bytes) : "memory");
}
/* Waits until the barrier has completed the phase of this parity. */
GMM__DEVICE void gmm_mbarrier_wait(uint32_t bar, uint32_t parity) {
    uint32_t done;
    do {
        asm volatile("{\n .reg .pred p;\n mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                     " selp.b32 %0, 1, 0, p;\n}" : "=r"(done) : "r"(bar), "r"(parity) : "memory");
    } while (!done);
}
/* Whether it has; does not wait. */
GMM__DEVICE int gmm_mbarrier_test(uint32_t bar, uint32_t parity) {
    int done;
    asm volatile("{\n .reg .pred p;\n mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                 " selp.b32 %0, 1, 0, p;\n}" : "=r"(done) : "r"(bar), "r"(parity) : "memory");
    return done;
}
GMM__DEVICE void gmm_mbarrier_arrive(uint32_t bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" : : "r"(bar) : "memory");
}
/* The address of `smem` in the shared memory of CTA `rank` of the cluster. */
GMM__DEVICE uint32_t gmm_mapa(uint32_t smem, uint32_t rank) {
    uint32_t at;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"(smem), "r"(rank));
    return at;
}
/* Arrives at a barrier by such an address. Reads of what the arrival releases are complete: wgmma has finished, and
   values of ld.shared have been used. So the default scope, the CTA, suffices; at cluster scope it would also wait for
   stores to device memory, once per stage. */
GMM__DEVICE void gmm_mbarrier_arrive_mapped(uint32_t bar) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" : : "r"(bar) : "memory");
}
/* Arrives at the same barrier of CTA `rank` of the cluster. */
GMM__DEVICE void gmm_mbarrier_arrive_remote(uint32_t bar, uint32_t rank) {
    gmm_mbarrier_arrive_mapped(gmm_mapa(bar, rank));
}
/* Writes one word into the shared memory of CTA `rank` of the cluster, and completes 4 bytes of transactions on its
   barrier. */
GMM__DEVICE void gmm_st_async_remote(uint32_t word, uint32_t bar, uint32_t rank, int value) {
    asm volatile("{\n .reg .b32 to, at;\n mapa.shared::cluster.u32 to, %0, %2;\n mapa.shared::cluster.u32 at, %1, %2;\n"
                 " st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [to], %3, [at];\n}"
                 : : "r"(word), "r"(bar), "r"(rank), "r"(value) : "memory");
}

/* --- named barriers and the cluster barrier --- */
#define GMM__BAR_SYNC(id, threads) asm volatile("bar.sync %0, %1;" : : "n"(id), "n"(threads) : "memory")
GMM__DEVICE void gmm_bar_sync_128(int id) { asm volatile("bar.sync %0, 128;" : : "r"(id) : "memory"); }
GMM__DEVICE void gmm_bar_sync_256(int id) { asm volatile("bar.sync %0, 256;" : : "r"(id) : "memory"); }
GMM__DEVICE void gmm_bar_arrive_256(int id) { asm volatile("bar.arrive %0, 256;" : : "r"(id) : "memory"); }
GMM__DEVICE void gmm_cluster_arrive_relaxed(void) {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" : : : "memory");
}
GMM__DEVICE void gmm_cluster_arrive_release(void) {
    asm volatile("barrier.cluster.arrive.release.aligned;" : : : "memory");
}
GMM__DEVICE void gmm_cluster_wait_acquire(void) {
    asm volatile("barrier.cluster.wait.acquire.aligned;" : : : "memory");
}

/* --- shared and global memory --- */
GMM__DEVICE float gmm_ld_shared_f32(uint32_t smem) {
    float v;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(smem) : "memory");
    return v;
}
GMM__DEVICE void gmm_ld_shared_v2_f32(uint32_t smem, float v[2]) {
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v[0]), "=f"(v[1]) : "r"(smem) : "memory");
}
GMM__DEVICE void gmm_ld_shared_v4_f32(uint32_t smem, float v[4]) {
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3]) : "r"(smem)
                 : "memory");
}
GMM__DEVICE uint32_t gmm_ld_shared_u32(uint32_t smem) {
    uint32_t v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(smem) : "memory");
    return v;
}
GMM__DEVICE void gmm_ld_shared_v4_u32(uint32_t smem, uint32_t v[4]) {
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "r"(smem)
                 : "memory");
}
/* Loads two 16-bit values that are 8 bytes apart. */
GMM__DEVICE void gmm_ld_shared_b16_pair(uint32_t smem, uint32_t *low, uint32_t *high) {
    asm volatile("{\n .reg .b16 x, y;\n ld.shared.b16 x, [%2];\n ld.shared.b16 y, [%2 + 8];\n"
                 " cvt.u32.u16 %0, x;\n cvt.u32.u16 %1, y;\n}" : "=r"(*low), "=r"(*high) : "r"(smem) : "memory");
}
GMM__DEVICE void gmm_st_shared_f32(uint32_t smem, float v) {
    asm volatile("st.shared.f32 [%0], %1;" : : "r"(smem), "f"(v) : "memory");
}
GMM__DEVICE void gmm_st_shared_v2_f32(uint32_t smem, float a, float b) {
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" : : "r"(smem), "f"(a), "f"(b) : "memory");
}
GMM__DEVICE void gmm_st_shared_v4_u32(uint32_t smem, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" : : "r"(smem), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
GMM__DEVICE void gmm_st_shared_u32(uint32_t smem, uint32_t v) {
    asm volatile("st.shared.u32 [%0], %1;" : : "r"(smem), "r"(v) : "memory");
}
GMM__DEVICE void gmm_st_global_b32(void *dst, uint32_t a) {
    asm volatile("st.global.b32 [%0], %1;" : : "l"(__cvta_generic_to_global(dst)), "r"(a) : "memory");
}
GMM__DEVICE void gmm_st_global_v2_b32(void *dst, uint32_t a, uint32_t b) {
    asm volatile("st.global.v2.b32 [%0], {%1, %2};" : : "l"(__cvta_generic_to_global(dst)), "r"(a), "r"(b) : "memory");
}
GMM__DEVICE void gmm_st_global_v4_b32(void *dst, uint4 v) {
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};"
                 : : "l"(__cvta_generic_to_global(dst)), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
GMM__DEVICE void gmm_prefetch_global_l2(const void *address) {
    asm volatile("prefetch.global.L2 [%0];" : : "l"(address));
}

/* --- ldmatrix, stmatrix: four 8 x 8 matrices of 16-bit elements, one row address per lane; _trans transposes each
   --- */
GMM__DEVICE void gmm_ldmatrix_x4(uint32_t r[4], uint32_t smem) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(smem));
}
GMM__DEVICE void gmm_ldmatrix_x4_trans(uint32_t r[4], uint32_t smem) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(smem));
}
GMM__DEVICE void gmm_stmatrix_x4(uint32_t smem, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared::cta.b16 [%0], {%1, %2, %3, %4};"
                 : : "r"(smem), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
GMM__DEVICE void gmm_stmatrix_x4_trans(uint32_t smem, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared::cta.b16 [%0], {%1, %2, %3, %4};"
                 : : "r"(smem), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
/* The same where `enabled`, which is equal in all lanes of the warp. */
GMM__DEVICE void gmm_stmatrix_x4_trans_if(int enabled, uint32_t smem, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, %0, 0;\n"
                 " @p stmatrix.sync.aligned.m8n8.x4.trans.shared::cta.b16 [%1], {%2, %3, %4, %5};\n}"
                 : : "r"(enabled), "r"(smem), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

/* --- mma.sync m16n8k16: d += a b, where a is 16 x 16 and b is 16 x 8 --- */
GMM__DEVICE void gmm_mma_bf16(float d[4], const uint32_t a[4], const uint32_t *b) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
GMM__DEVICE void gmm_mma_f16(float d[4], const uint32_t a[4], const uint32_t *b) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

/* --- cp.async: global to shared memory --- */
GMM__DEVICE void gmm_cp_async_16(uint32_t smem, const char *src) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" : : "r"(smem), "l"(src));
}
/* Reads the first `bytes` of 16 bytes and writes zeros for the rest. */
GMM__DEVICE void gmm_cp_async_16_zfill(uint32_t smem, const char *src, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" : : "r"(smem), "l"(src), "r"(bytes));
}
/* If `copies` is 0, does nothing; else copies 16 bytes or, if `zeros` is not 0, writes zeros and does not read. Lanes
   differ by predicates, not by branches. */
GMM__DEVICE void gmm_cp_async_16_where(int copies, uint32_t smem, const char *src, int zeros) {
    asm volatile("{\n.reg .pred copies, zeros;\nsetp.ne.s32 copies, %0, 0;\nsetp.ne.s32 zeros, %3, 0;\n"
                 "@copies cp.async.cg.shared.global [%1], [%2], 16, zeros;\n}"
                 : : "r"(copies), "r"(smem), "l"(src), "r"(zeros));
}
/* Reads the first `bytes` of 4 bytes and writes zeros for the rest. `global`: an address of the global state space. */
GMM__DEVICE void gmm_cp_async_4_zfill(uint32_t smem, size_t global, int bytes) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" : : "r"(smem), "l"(global), "r"(bytes) : "memory");
}
GMM__DEVICE void gmm_cp_async_commit_group(void) { asm volatile("cp.async.commit_group;"); }
#define GMM__CP_ASYNC_WAIT_GROUP(groups) asm volatile("cp.async.wait_group %0;" : : "n"(groups) : "memory")
GMM__DEVICE void gmm_cp_async_wait_all(void) { asm volatile("cp.async.wait_all;" : : : "memory"); }
/* The barrier receives an arrival when all earlier cp.async copies of this thread are complete; the arrival count of
   the barrier includes it. */
GMM__DEVICE void gmm_cp_async_mbarrier_arrive(uint32_t bar) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" : : "r"(bar) : "memory");
}

/* --- TMA: one box of a 4-D tensor map --- */
GMM__DEVICE void gmm_prefetch_tensormap(const CUtensorMap *map) {
    asm volatile("prefetch.tensormap [%0];" : : "l"(map) : "memory");
}
GMM__DEVICE void gmm_fence_proxy_async(void) { asm volatile("fence.proxy.async.shared::cta;" : : : "memory"); }
/* Loads a box into shared memory of this CTA or, with `multicast`, to the same offset in both CTAs of the cluster. */
GMM__DEVICE void gmm_tma_load(uint32_t smem, const CUtensorMap *map, uint32_t bar, int multicast, int32_t c0,
                              int32_t c1, int32_t c2, int32_t c3) {
    if (multicast)
        asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
                     " [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" : : "r"(smem), "l"(map), "r"(bar), "r"(c0), "r"(c1),
                     "r"(c2), "r"(c3), "h"((uint16_t)3) : "memory");
    else
        asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
                     " [%0], [%1, {%3, %4, %5, %6}], [%2];" : : "r"(smem), "l"(map), "r"(bar), "r"(c0), "r"(c1),
                     "r"(c2), "r"(c3) : "memory");
}
/* Stores a box to device memory or, with `add`, adds its fp32 elements to those in device memory. */
GMM__DEVICE void gmm_tma_store(const CUtensorMap *map, uint32_t smem, int add, int32_t c0, int32_t c1, int32_t c2,
                               int32_t c3) {
    if (add)
        asm volatile("cp.reduce.async.bulk.tensor.4d.global.shared::cta.add.tile.bulk_group"
                     " [%0, {%2, %3, %4, %5}], [%1];" : : "l"(map), "r"(smem), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
                     : "memory");
    else
        asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];"
                     : : "l"(map), "r"(smem), "r"(c0), "r"(c1), "r"(c2), "r"(c3) : "memory");
}
/* Loads and stores with the L2 policy evict-first. */
GMM__DEVICE uint64_t gmm_createpolicy_evict_first(void) {
    uint64_t policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
GMM__DEVICE void gmm_tma_load_evict_first(uint32_t smem, const CUtensorMap *map, uint32_t bar, int32_t c0, int32_t c1,
                                          int32_t c2, int32_t c3) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
                 " [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" : : "r"(smem), "l"(map), "r"(bar), "r"(c0), "r"(c1),
                 "r"(c2), "r"(c3), "l"(gmm_createpolicy_evict_first()) : "memory");
}
GMM__DEVICE void gmm_tma_store_evict_first(const CUtensorMap *map, uint32_t smem, int32_t c0, int32_t c1, int32_t c2,
                                           int32_t c3) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group.L2::cache_hint"
                 " [%0, {%2, %3, %4, %5}], [%1], %6;" : : "l"(map), "r"(smem), "r"(c0), "r"(c1), "r"(c2), "r"(c3),
                 "l"(gmm_createpolicy_evict_first()) : "memory");
}
GMM__DEVICE void gmm_tma_prefetch_l2(const CUtensorMap *map, int32_t c0, int32_t c1, int32_t c2, int32_t c3) {
    asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global.tile [%0, {%1, %2, %3, %4}];"
                 : : "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(c3) : "memory");
}
GMM__DEVICE void gmm_bulk_commit_group(void) { asm volatile("cp.async.bulk.commit_group;" : : : "memory"); }
/* Waits until at most so many bulk groups of this thread are pending; _READ waits only until their reads of shared
   memory are complete. */
#define GMM__BULK_WAIT_GROUP(groups) asm volatile("cp.async.bulk.wait_group %0;" : : "n"(groups) : "memory")
#define GMM__BULK_WAIT_GROUP_READ(groups) asm volatile("cp.async.bulk.wait_group.read %0;" : : "n"(groups) : "memory")

/* --- conversions --- */
GMM__DEVICE uint32_t gmm_cvt_bf16x2(float high, float low) {
    uint32_t r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}
GMM__DEVICE uint32_t gmm_cvt_f16x2(float high, float low) {
    uint32_t r;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}
GMM__DEVICE float gmm_cvt_f32_f16(uint16_t bits) {
    float r;
    asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(bits));
    return r;
}
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
GMM__DEVICE uint16_t gmm_cvt_e4m3x2(float high, float low) {
    uint16_t r;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(high), "f"(low));
    return r;
}
GMM__DEVICE uint16_t gmm_cvt_e5m2x2(float high, float low) {
    uint16_t r;
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(r) : "f"(high), "f"(low));
    return r;
}
/* Four E4M3 codes as two pairs of f16. */
GMM__DEVICE void gmm_cvt_f16x2_e4m3x2(uint32_t codes, uint32_t dst[2]) {
    asm("{ .reg .b16 low, high; mov.b32 {low, high}, %2; cvt.rn.f16x2.e4m3x2 %0, low; "
        "cvt.rn.f16x2.e4m3x2 %1, high; }" : "=r"(dst[0]), "=r"(dst[1]) : "r"(codes));
}
#endif

/* --- arithmetic with fixed rounding, which compiler flags neither contract, flush to zero nor reorder --- */
GMM__DEVICE float gmm_mul_rn_f32(float a, float b) {
    float r;
    asm("mul.rn.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    return r;
}
GMM__DEVICE float gmm_add_rn_f32(float a, float b) {
    float r;
    asm("add.rn.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    return r;
}
GMM__DEVICE uint32_t gmm_prmt(uint32_t a, uint32_t b, uint32_t selector) {
    uint32_t r;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(selector));
    return r;
}
/* Products of two pairs, each rounded once; subnormal values are kept. There is no mul.rn.bf16x2 before sm_90, so
   bf16 takes fma(a, b, -0). */
GMM__DEVICE uint32_t gmm_mul_bf16x2(uint32_t a, uint32_t b) {
    uint32_t r;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(0x80008000u));
    return r;
}
GMM__DEVICE uint32_t gmm_mul_f16x2(uint32_t a, uint32_t b) {
    uint32_t r;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}

/* --- maxima. bf16x2 and f16x2 take signed values: callers clear sign bits. max_abs and max_nan_abs return max(a, |b|),
   --- max_abs_abs max(|a|, |b|). max_nan variants return NaN if an operand is NaN, the others ignore it --- */
GMM__DEVICE uint32_t gmm_max_bf16x2(uint32_t a, uint32_t b) {
    asm("max.bf16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
    return a;
}
GMM__DEVICE uint32_t gmm_max_f16x2(uint32_t a, uint32_t b) {
    asm("max.f16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
    return a;
}
GMM__DEVICE uint32_t gmm_max_abs_f32(uint32_t a, uint32_t b) {
    asm("{\n.reg .b32 t;\nabs.f32 t, %1;\nmax.f32 %0, %0, t;\n}" : "+r"(a) : "r"(b));
    return a;
}
GMM__DEVICE uint32_t gmm_max_nan_bf16x2(uint32_t a, uint32_t b) {
    asm("max.NaN.bf16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
    return a;
}
GMM__DEVICE uint32_t gmm_max_nan_f16x2(uint32_t a, uint32_t b) {
    asm("max.NaN.f16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
    return a;
}
GMM__DEVICE uint32_t gmm_max_nan_abs_f32(uint32_t a, uint32_t b) {
    asm("{\n.reg .b32 t;\nabs.f32 t, %1;\nmax.NaN.f32 %0, %0, t;\n}" : "+r"(a) : "r"(b));
    return a;
}
/* The operand of larger absolute value, with the exclusive or of both signs. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 860
GMM__DEVICE uint32_t gmm_max_xorsign_abs_bf16x2(uint32_t a, uint32_t b) {
    asm("max.xorsign.abs.bf16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
    return a;
}
GMM__DEVICE uint32_t gmm_max_xorsign_abs_f16x2(uint32_t a, uint32_t b) {
    asm("max.xorsign.abs.f16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
    return a;
}
#endif
GMM__DEVICE uint32_t gmm_max_abs_abs_f32(uint32_t a, uint32_t b) {
    asm("{\n.reg .b32 s, t;\nabs.f32 s, %0;\nabs.f32 t, %1;\nmax.f32 %0, s, t;\n}" : "+r"(a) : "r"(b));
    return a;
}
/* max(maximum, |a| + |b|) */
GMM__DEVICE float gmm_max_sum_abs_f32(float maximum, float a, float b) {
    asm("{\n.reg .f32 s, t;\nabs.f32 s, %1;\nabs.f32 t, %2;\nadd.rn.f32 s, s, t;\nmax.f32 %0, %0, s;\n}"
        : "+f"(maximum) : "f"(a), "f"(b));
    return maximum;
}

/* --- E2M1 codes of absolute values --- */
/* |a b| */
GMM__DEVICE float gmm_mul_abs_f32(float a, float b) {
    float m;
    asm("{\n.reg .f32 t;\nabs.f32 %0, %1;\nabs.f32 t, %2;\nmul.rn.f32 %0, %0, t;\n}" : "=&f"(m) : "f"(a), "f"(b));
    return m;
}
/* min(m, 6); NaN becomes 6 */
GMM__DEVICE float gmm_min_6_f32(float m) {
    asm("min.f32 %0, %0, 0f40C00000;" : "+f"(m));
    return m;
}
/* 2 m, m + 2 and m / 2 + 4, each rounded to an integer (ties to even) by an addition to 2^23: the low bits of the
   fp32 sums */
GMM__DEVICE void gmm_e2m1_candidates(float m, uint32_t *low, uint32_t *middle, uint32_t *high) {
    asm("{\n.reg .f32 t;\nfma.rn.f32 t, %3, 0f40000000, 0f4B000000;\nmov.b32 %0, t;\n"
        "add.rn.f32 t, %3, 0f4B000002;\nmov.b32 %1, t;\n"
        "fma.rn.f32 t, %3, 0f3F000000, 0f4B000004;\nmov.b32 %2, t;\n}"
        : "=r"(*low), "=r"(*middle), "=r"(*high) : "f"(m));
}
/* Adds fraction_plus_128 - 128, in [0, 1), times the E2M1 step at m (half of the power of two at or below max(m, 1)),
   multiplies by 2^-126 and truncates: bits 22 and up hold the code. */
GMM__DEVICE uint32_t gmm_e2m1_add_fraction(float m, float fraction_plus_128) {
    uint32_t bits;
    asm("{\n.reg .f32 e, f, t;\n.reg .b32 u;\nmax.f32 e, %1, 0f3F800000;\nmov.b32 u, e;\n"
        "and.b32 u, u, 0x7F800000;\nmov.b32 e, u;\nfma.rn.f32 f, %2, 0f3F000000, 0fC2800000;\n"
        "fma.rn.f32 t, e, f, %1;\nmul.rz.f32 t, t, 0f00800000;\nmov.b32 %0, t;\n}"
        : "=r"(bits) : "f"(m), "f"(fraction_plus_128));
    return bits;
}
/* A matrix of each group: group g is at table[g] or, without a table, at data + g stride. */
typedef struct gmm_kmat {
    void *data;
    void *const *table; /* in device memory */
    int64_t stride;     /* bytes between the matrices of two groups; 0: all groups share one matrix */
    int64_t ld;         /* elements */
    gmm_dtype dtype;    /* GMM_NONE = absent */
} gmm_kmat;

GMM__DEVICE char *gmm_kmat_data(const gmm_kmat *m, int64_t g) {
    return m->table ? (char *)m->table[g] : (char *)m->data + g * m->stride;
}
GMM__DEVICE int gmm_kmat_size(const gmm_kmat *m) { return m->dtype == GMM_F32 ? 4 : 2; }

/* Conversions of 16-bit formats by hardware instructions. They give the same bits as the codecs of gmm_quant.h, for
   NaN as well. */
GMM__DEVICE uint32_t gmm_pack2(gmm_dtype dtype, float low, float high) {
    return dtype == GMM_BF16 ? gmm_cvt_bf16x2(high, low) : gmm_cvt_f16x2(high, low);
}
GMM__DEVICE uint4 gmm_pack8(gmm_dtype dtype, const float v[8]) {
    return make_uint4(gmm_pack2(dtype, v[0], v[1]), gmm_pack2(dtype, v[2], v[3]), gmm_pack2(dtype, v[4], v[5]),
                      gmm_pack2(dtype, v[6], v[7]));
}
GMM__DEVICE float gmm_widen(gmm_dtype dtype, uint16_t bits) {
    float value = __uint_as_float((uint32_t)bits << 16);
    if (dtype != GMM_BF16) value = gmm_cvt_f32_f16(bits);
    return value;
}

/* Reads and writes up to 4 consecutive elements of a row. `count` is the number of elements left in the row; it may
   be above 4 or below 1. Elements beyond the row read as 0 and are not written. `vec4`: the address is aligned for
   one access of 4 elements. */
GMM__DEVICE void gmm_read4(gmm_dtype dtype, const char *src, int count, int vec4, float v[4]) {
    uint16_t h[4] = { 0, 0, 0, 0 };
    int i;
    if (dtype == GMM_F32) {
        float4 f = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (vec4 && count >= 4) f = *(const float4 *)src;
        else {
            if (count > 0) f.x = ((const float *)src)[0];
            if (count > 1) f.y = ((const float *)src)[1];
            if (count > 2) f.z = ((const float *)src)[2];
            if (count > 3) f.w = ((const float *)src)[3];
        }
        v[0] = f.x; v[1] = f.y; v[2] = f.z; v[3] = f.w;
        return;
    }
    if (vec4 && count >= 4) {
        const uint2 u = *(const uint2 *)src;
        h[0] = (uint16_t)u.x; h[1] = (uint16_t)(u.x >> 16); h[2] = (uint16_t)u.y; h[3] = (uint16_t)(u.y >> 16);
    } else {
#pragma unroll
        for (i = 0; i < 4; i++)
            if (i < count) h[i] = ((const uint16_t *)src)[i];
    }
#pragma unroll
    for (i = 0; i < 4; i++) v[i] = gmm_widen(dtype, h[i]);
}
GMM__DEVICE void gmm_write4(gmm_dtype dtype, char *dst, int count, int vec4, const float v[4]) {
    uint2 bits;
    int i;
    if (dtype == GMM_F32) {
        if (vec4 && count >= 4) *(float4 *)dst = make_float4(v[0], v[1], v[2], v[3]);
        else {
#pragma unroll
            for (i = 0; i < 4; i++)
                if (i < count) ((float *)dst)[i] = v[i];
        }
        return;
    }
    bits = make_uint2(gmm_pack2(dtype, v[0], v[1]), gmm_pack2(dtype, v[2], v[3]));
    if (vec4 && count >= 4) *(uint2 *)dst = bits;
    else {
        if (count > 0) ((uint16_t *)dst)[0] = (uint16_t)bits.x;
        if (count > 1) ((uint16_t *)dst)[1] = (uint16_t)(bits.x >> 16);
        if (count > 2) ((uint16_t *)dst)[2] = (uint16_t)bits.y;
        if (count > 3) ((uint16_t *)dst)[3] = (uint16_t)(bits.y >> 16);
    }
}
/* Whether groups of 4 elements in the rows of a matrix are aligned for one vector access. */
GMM__DEVICE int gmm_vec4_aligned(gmm_dtype dtype, const char *base, int64_t ld) {
    const uint64_t unit = dtype == GMM_F32 ? 16 : 8;
    return (((uint64_t)(uintptr_t)base | (uint64_t)ld * (unit / 4)) & (unit - 1)) == 0;
}

/* Advances *g to the group that contains index `i`, where ends are prefix sums: ends[g] <= i < ends[g + 1]; to `groups`
   if i >= ends[groups]. *g is at most that group before. All lanes of the warp call it, with equal arguments. */
GMM__DEVICE void gmm_find_group32(const int32_t *ends, int32_t groups, int64_t i, int32_t *g) {
    int passed;
    do {
        const int32_t next = *g + 1 + (int32_t)(threadIdx.x & 31);
        passed = __popc(__ballot_sync(0xFFFFFFFFu, next <= groups && (int64_t)ends[next] <= i));
        *g += passed;
    } while (passed == 32);
}
GMM__DEVICE void gmm_find_group64(const int64_t *ends, int32_t groups, int64_t i, int32_t *g) {
    int passed;
    do {
        const int32_t next = *g + 1 + (int32_t)(threadIdx.x & 31);
        passed = __popc(__ballot_sync(0xFFFFFFFFu, next <= groups && ends[next] <= i));
        *g += passed;
    } while (passed == 32);
}

/* Programmatic dependent launch (from compute capability 9.0 on): a kernel may be launched while the last CTAs of
   its predecessor in the stream still run, which hides the launch latency. A kernel calls one of these functions before
   it reads or writes device memory. Both wait until the predecessor has finished and its writes are visible.
   gmm_pdl_wait also lets the successor launch when all CTAs of this kernel have begun; gmm_pdl_wait_only when all have
   ended. The kernels of quantize/ and gmm_act_dprob call the latter: with gmm_pdl_wait, casts and the products behind
   them together take 2 to 3 us longer per cast. */
GMM__DEVICE void gmm_pdl_wait_only(void) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    gmm_griddepcontrol_wait();
#endif
}
GMM__DEVICE void gmm_pdl_wait(void) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    gmm_griddepcontrol_launch_dependents();
#endif
    gmm_pdl_wait_only();
}

/* Launches a kernel whose only parameter is the structure at `args`. */
static GMM__UNUSED cudaError_t gmm_launch(const void *kernel, dim3 grid, int threads, int32_t shared, const void *args,
                                          cudaStream_t stream) {
    void *params[1];
    params[0] = (void *)(uintptr_t)args;
    return cudaLaunchKernel(kernel, grid, dim3((unsigned)threads), params, (size_t)shared, stream);
}

/* KiB of shared memory that so many CTAs with `bytes` each take of a multiprocessor; CUDA adds 1 KiB to each CTA. */
#define GMM__SM_KIB(ctas, bytes) (((ctas) * ((bytes) + 1024) + 1023) / 1024)
enum { GMM_SM_SHARED_KIB = 228 }; /* the most shared memory of a multiprocessor of sm_90 and sm_100 */
/* Launches a kernel as gmm_launch does, or with `pdl` by programmatic dependent launch, for which the kernel calls
   gmm_pdl_wait or gmm_pdl_wait_only. `shared`: bytes of dynamic shared memory. sm_kib: GMM__SM_KIB of the CTAs that a
   multiprocessor holds, with the static shared memory that ptxas reports; the driver rounds it up to a size that the
   multiprocessor can have, and the rest of its 256 KiB is L1. 0: no preference. A kernel without one that is launched
   while its predecessor runs keeps the predecessor's division. Behind a product that is 28 KiB of L1, with which a cast
   takes 1.2 times as long. */
static GMM__UNUSED cudaError_t gmm_launch_pdl(const void *kernel, int pdl, dim3 grid, unsigned threads, size_t shared,
                                              int sm_kib, const void *args, cudaStream_t stream) {
    cudaLaunchConfig_t config = GMM_ZERO;
    cudaLaunchAttribute attribute;
    void *params[1];
    if (pdl && sm_kib) {
        const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                                       100 * sm_kib / GMM_SM_SHARED_KIB); /* percent */
        if (error != cudaSuccess) return error;
    }
    memset(&attribute, 0, sizeof attribute);
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    config.gridDim = grid;
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = shared;
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = pdl ? 1 : 0;
    params[0] = (void *)(uintptr_t)args;
    return cudaLaunchKernelExC(&config, kernel, params);
}

/* ....................................................................................... Values from the host ... */

/* Writes up to GMM_COPY_VALUES words of 64 bits to device memory, one per thread of a CTA. The words are kernel
   parameters, of which 448 fit the limit of 4096 bytes: so the host array may change as soon as the launch returns, and
   a captured graph keeps the captured values. */
enum { GMM_COPY_VALUES = 448 };
typedef struct gmm_copy_args {
    uint64_t *dst;
    int32_t count;
    uint64_t values[GMM_COPY_VALUES];
} gmm_copy_args;

#if GMM__HOLDS(0)
GMM__KERNEL __launch_bounds__(GMM_COPY_VALUES) gmm_copy_values(const __grid_constant__ gmm_copy_args args) {
    const int i = (int)threadIdx.x;
    if (i < args.count) args.dst[i] = args.values[i];
}
#endif /* GMM__HOLDS(0) */

/* Sets words of 32 bits to one value. A memset would end a chain of programmatic launches. */
enum { GMM_FILL_THREADS = 1024, GMM_FILL_CTAS = 132 };
typedef struct gmm_fill_args {
    uint32_t *words;
    int64_t count;
    uint32_t value;
} gmm_fill_args;

#if GMM__HOLDS(0)
GMM__KERNEL __launch_bounds__(GMM_FILL_THREADS) gmm_fill_words(const __grid_constant__ gmm_fill_args args) {
    int64_t i;
    gmm_pdl_wait();
    for (i = (int64_t)blockIdx.x * GMM_FILL_THREADS + threadIdx.x; i < args.count;
         i += (int64_t)gridDim.x * GMM_FILL_THREADS)
        args.words[i] = args.value;
}
#endif /* GMM__HOLDS(0) */

/* ............................................................................................... Split offsets ... */

/* The split reader: row offsets and tile counts of the groups, from sizes or offsets in device memory. */
enum { GMM_OFFSETS_THREADS = 1024, GMM_OFFSETS_TILES = 2 };
typedef struct gmm_offsets_args {
    gmm_groups groups; /* splits in device memory */
    int64_t *offsets;  /* [G + 1] */
    int32_t *tiles[GMM_OFFSETS_TILES]; /* [G + 1] prefix sums of the groups' tiles of tile_rows rows each; NULL: none */
    int32_t tile_rows[GMM_OFFSETS_TILES];
} gmm_offsets_args;

/* Entry i of the split in device memory. */
GMM__DEVICE int64_t gmm_split_value(const gmm_groups *s, int64_t i) {
    return s->dtype == GMM_I64 ? ((const int64_t *)s->splits)[i] : ((const int32_t *)s->splits)[i];
}

/* Inclusive scan over the CTA of values >= 0: their sum, saturated at `limit`, or their maximum (`maximum`). *total
   receives the last value. `warps` is scratch memory of 32 words in shared memory. */
GMM__DEVICE int64_t gmm_block_scan(int64_t v, int maximum, int64_t limit, int64_t *warps, int64_t *total) {
    const int lane = (int)threadIdx.x & 31, warp = (int)threadIdx.x >> 5;
    int step;
    int64_t prefix;
    for (step = 1; step < 32; step *= 2) {
        const int64_t other = (int64_t)__shfl_up_sync(0xFFFFFFFFu, (long long)v, (unsigned)step);
        if (lane >= step) v = maximum ? (v > other ? v : other) : (v > limit - other ? limit : v + other);
    }
    if (lane == 31) warps[warp] = v;
    __syncthreads();
    if (warp == 0) {
        int64_t warp_prefix = lane < (int)blockDim.x >> 5 ? warps[lane] : 0;
        for (step = 1; step < 32; step *= 2) {
            const int64_t other = (int64_t)__shfl_up_sync(0xFFFFFFFFu, (long long)warp_prefix, (unsigned)step);
            if (lane >= step)
                warp_prefix = maximum ? (warp_prefix > other ? warp_prefix : other)
                                      : (warp_prefix > limit - other ? limit : warp_prefix + other);
        }
        warps[lane] = warp_prefix;
    }
    __syncthreads();
    *total = warps[31];
    prefix = warp > 0 ? warps[warp - 1] : 0;
    __syncthreads();
    return maximum ? (v > prefix ? v : prefix) : (v > limit - prefix ? limit : v + prefix);
}

#if GMM__HOLDS(0)
/* Reads a split by the rule of gmm_split_end and writes row offsets and tile counts. The end of a group is a scan
   with saturation, because the rule clamps to [0, capacity]; gmm_split_end is then evaluated for every group in
   parallel and reports faults. One CTA of full warps. */
GMM__KERNEL __launch_bounds__(GMM_OFFSETS_THREADS) gmm_split_offsets(const __grid_constant__ gmm_offsets_args args) {
    __shared__ int64_t warps[32], ends[GMM_OFFSETS_THREADS + 1];
    const gmm_groups *s = &args.groups;
    const int64_t capacity = s->capacity;
    const int is_offsets = s->form == GMM_SPLIT_OFFSETS, tid = (int)threadIdx.x;
    int64_t rows = 0, tiles[GMM_OFFSETS_TILES] = { 0, 0 }, total;
    uint32_t fault = 0;
    int32_t first, k;
    gmm_pdl_wait();
    if (tid == 0) {
        args.offsets[0] = 0;
#pragma unroll
        for (k = 0; k < GMM_OFFSETS_TILES; k++)
            if (args.tiles[k]) args.tiles[k][0] = 0;
        if (is_offsets && gmm_split_value(s, 0) != 0)
            fault |= (uint32_t)GMM_FAULT_MONOTONIC;
    }
    for (first = 0; first < s->count; first += (int32_t)blockDim.x) {
        const int64_t g = (int64_t)first + tid;
        const int valid = g < s->count;
        int64_t value = 0, end, i = g + is_offsets;
        if (valid) value = gmm_split_value(s, i);
        end = value < 0 ? 0 : value > capacity ? capacity : value;
        if (tid == 0) /* the scan continues from the end of the previous chunk of groups */
            end = is_offsets ? (end > rows ? end : rows) : (end > capacity - rows ? capacity : end + rows);
        end = gmm_block_scan(end, is_offsets, capacity, warps, &total);
        ends[tid + 1] = end;
        if (tid == 0) ends[0] = rows;
        __syncthreads();
        if (valid) {
            end = gmm_split_end(ends[tid], value, s->form, capacity, s->row_align, &fault);
            args.offsets[g + 1] = end;
        }
#pragma unroll
        for (k = 0; k < GMM_OFFSETS_TILES; k++)
            if (args.tiles[k]) {
                int64_t count = valid ? (end - ends[tid] + args.tile_rows[k] - 1) / args.tile_rows[k] : 0, sum;
                count = gmm_block_scan(count, 0, INT64_MAX, warps, &sum);
                if (valid) args.tiles[k][g + 1] = (int32_t)(tiles[k] + count);
                tiles[k] += sum;
            }
        rows = total;
        __syncthreads();
    }
    if (fault && s->fault) atomicOr(s->fault, fault);
}
#endif /* GMM__HOLDS(0) */

/* The same for at most 32 groups: each warp that needs the split reads it, so that no kernel has to run before. Lane g
   receives the first row and the number of rows of group g, and the inclusive prefix sum of tiles. The warp with
   `report_faults` reports faults. */
typedef struct gmm_warp_split { int32_t begin, rows, tiles, total; } gmm_warp_split;
GMM__DEVICE gmm_warp_split gmm_warp_split_scan(const gmm_groups *s, int32_t tile_rows, int32_t report_faults) {
    const int32_t lane = (int32_t)(threadIdx.x & 31u), is_offsets = s->form == GMM_SPLIT_OFFSETS;
    const int32_t capacity = (int32_t)s->capacity, valid = lane < s->count;
    const int64_t value = valid ? gmm_split_value(s, lane + is_offsets) : 0;
    int32_t end = value < 0 ? 0 : value > capacity ? capacity : (int32_t)value, step;
    gmm_warp_split split;
    for (step = 1; step < 32; step *= 2) {
        const int32_t other = __shfl_up_sync(0xFFFFFFFFu, end, (unsigned)step);
        const int32_t sum = end > capacity - other ? capacity : end + other;
        if (lane >= step) end = !is_offsets ? sum : end > other ? end : other;
    }
    split.begin = __shfl_up_sync(0xFFFFFFFFu, end, 1u);
    if (lane == 0) split.begin = 0;
    split.rows = end - split.begin;
    split.tiles = (split.rows + tile_rows - 1) / tile_rows;
    for (step = 1; step < 32; step *= 2) {
        const int32_t other = __shfl_up_sync(0xFFFFFFFFu, split.tiles, (unsigned)step);
        if (lane >= step) split.tiles += other;
    }
    split.total = __shfl_sync(0xFFFFFFFFu, split.tiles, 31);
    if (report_faults && s->fault) {
        uint32_t fault = 0;
        if (valid) (void)gmm_split_end(split.begin, value, s->form, capacity, s->row_align, &fault);
        if (lane == 0 && is_offsets && gmm_split_value(s, 0) != 0) fault |= (uint32_t)GMM_FAULT_MONOTONIC;
        if (fault) atomicOr(s->fault, fault);
    }
    return split;
}

/* Arguments of products, and the steps of their epilogue. */
/* D_g = p (alpha_g A_g B_g^T + bias_g s) + beta_g D_g for all groups g of one call. Groups are ranges of rows of the
   token matrices: fwd and dgrad are m-grouped (rows of A and D), wgrad is k-grouped (the contraction).
       fwd    A = x  [T, K]        B = w [N, K]                D = y  [T, N]
       dgrad  A = dy [T, N]        B = w [N, K], as B[k][n]    D = dx [T, K]
       wgrad  A = dy, as A[k][m]   B = x, as B[k][n]           D = dw [N, K] */
typedef struct gmm_gemm_args {
    gmm_kmat a, b, d, bias;
    const int64_t *offsets; /* [G + 1] */
    const int32_t *tiles;   /* [G + 1] prefix sums of the groups' tiles of rows: fwd, dgrad, quantized wgrad */
    int32_t groups;
    int32_t m, n, k;        /* extents; the grouped one is not read */
    int64_t capacity;
    const float *alpha;     /* [G] or [1]; NULL: 1 */
    int32_t alpha_per_group;
    int32_t zero_tail;      /* fwd, dgrad: rows of D behind the last group become 0 */
    const float *bias_scale; /* [T] s, what the bias is multiplied by; NULL: 1 */
    const float *prob;      /* [T] p, what rows of the sum are multiplied by; NULL: 1 */
    const float *beta;      /* [G]; NULL = beta_all */
    const uint8_t *frozen;  /* [G]; NULL: no group is frozen */
    float beta_all;
} gmm_gemm_args;

/* Epilogue steps of products in forward and dgrad: what happens to an fp32 sum between the mainloop and the addition of
   beta D, which is followed by the only rounding. Every engine applies the steps in the order of the list. A step is
   element-wise: it computes an element from the sum so far, a value of its row and a value of its column. */

/* Steps: X(name, whether it reads a value per row, whether it reads a value per column). Each of them has
   gmm_epilogue_<name>_present, which is the same for all threads; gmm_epilogue_<name>_values, which says where its
   values are, is called for absent steps too, and reads no memory but a table that is present; and gmm_epilogue_<name>,
   the arithmetic of one element. A value that a call does not have is 1. */
#define GMM_EPILOGUE_STEP_LIST(X) \
    X(bias, 1, 1) \
    X(prob, 1, 0)

#define GMM__X(name, rows, cols) GMM_EPILOGUE_##name,
typedef enum gmm_epilogue_step { GMM_EPILOGUE_STEP_LIST(GMM__X) gmm_epilogue_steps } gmm_epilogue_step;
#undef GMM__X

/* Values of rows and columns of D. NULL: 1. */
typedef struct gmm_epilogue_values {
    const float *rows; /* that of row `row` of the token matrices, which the caller passes, and those behind it */
    const char *cols;  /* that of column 0, and those behind it */
    gmm_dtype cols_dtype;
} gmm_epilogue_values;

/* The bias, times bias_scale of the row. */
GMM__DEVICE int gmm_epilogue_bias_present(const gmm_gemm_args *args) { return args->bias.dtype != GMM_NONE; }
GMM__DEVICE gmm_epilogue_values gmm_epilogue_bias_values(const gmm_gemm_args *args, int32_t g, int64_t row) {
    gmm_epilogue_values values;
    values.rows = args->bias_scale ? args->bias_scale + row : NULL;
    values.cols = gmm_kmat_data(&args->bias, g);
    values.cols_dtype = args->bias.dtype;
    return values;
}
GMM__DEVICE float gmm_epilogue_bias(float sum, float row, float col) { return __fmaf_rn(col, row, sum); }

/* Rows times their probabilities. */
GMM__DEVICE int gmm_epilogue_prob_present(const gmm_gemm_args *args) { return args->prob != NULL; }
GMM__DEVICE gmm_epilogue_values gmm_epilogue_prob_values(const gmm_gemm_args *args, int32_t g, int64_t row) {
    gmm_epilogue_values values;
    (void)g;
    values.rows = args->prob + row;
    values.cols = NULL;
    values.cols_dtype = GMM_NONE;
    return values;
}
GMM__DEVICE float gmm_epilogue_prob(float sum, float row, float col) {
    (void)col;
    return __fmul_rn(sum, row);
}

/* The functions of the step `step`, a constant. */
GMM__DEVICE int gmm_epilogue_reads_cols(const gmm_epilogue_step step) {
#define GMM__X(name, rows, cols) if (step == GMM_EPILOGUE_##name) return cols;
    GMM_EPILOGUE_STEP_LIST(GMM__X)
#undef GMM__X
    return 0;
}
GMM__DEVICE int gmm_epilogue_present(const gmm_epilogue_step step, const gmm_gemm_args *args) {
#define GMM__X(name, rows, cols) if (step == GMM_EPILOGUE_##name) return gmm_epilogue_##name##_present(args);
    GMM_EPILOGUE_STEP_LIST(GMM__X)
#undef GMM__X
    return 0;
}
/* Whether the call has any. */
GMM__DEVICE int gmm_epilogue_steps_present(const gmm_gemm_args *args) {
#define GMM__X(name, rows, cols) if (gmm_epilogue_##name##_present(args)) return 1;
    GMM_EPILOGUE_STEP_LIST(GMM__X)
#undef GMM__X
    return 0;
}
GMM__DEVICE gmm_epilogue_values gmm_epilogue_values_of(const gmm_epilogue_step step, const gmm_gemm_args *args,
                                                       int32_t g, int64_t row) {
#define GMM__X(name, rows, cols) if (step == GMM_EPILOGUE_##name) return gmm_epilogue_##name##_values(args, g, row);
    GMM_EPILOGUE_STEP_LIST(GMM__X)
#undef GMM__X
    return gmm_epilogue_bias_values(args, g, row);
}
GMM__DEVICE float gmm_epilogue_apply(const gmm_epilogue_step step, float sum, float row, float col) {
#define GMM__X(name, rows, cols) if (step == GMM_EPILOGUE_##name) return gmm_epilogue_##name(sum, row, col);
    GMM_EPILOGUE_STEP_LIST(GMM__X)
#undef GMM__X
    return sum;
}
/* Eight activations at a time, which the row kernels, the casts and the epilogue of glu products compute. */

/* Computes eight activations and their derivatives. `gated_only`: a constant, 1 where the kind is always gated. The
   switch is outside of the loop, so that each case is straight-line code. SwiGLU without a limit, which most models
   have, takes 16 instructions per element instead of 25. */
GMM__DEVICE void gmm__act_x8(gmm_act_kind kind, const int gated_only, gmm_act_coef c, const float a[8],
                             const float b[8], float f[8], float da[8], float db[8]) {
    int32_t i;
    if (kind == GMM_ACT_SWIGLU && gmm_f32_bits(c.limit) == 0x7F800000u) {
#pragma unroll
        for (i = 0; i < 8; i++) f[i] = gmm__act_point(GMM_GATE_SILU, 1, 0, c, a[i], b[i], &da[i], &db[i]);
        return;
    }
    switch (kind) {
#define GMM__X(name, value, text, gate, gated, alpha, betas) \
    case name: \
        if (gated_only && !(gated)) break; \
        _Pragma("unroll") for (i = 0; i < 8; i++) f[i] = gmm_act_point(gate, gated, c, a[i], b[i], &da[i], &db[i]); \
        break;
        GMM_ACT_LIST(GMM__X)
#undef GMM__X
    default: break;
    }
}

/* dprob of a row is the sum of parts of so many columns. A quarter of a warp adds up a part, a lane 8 columns of it. */
enum { GMM_ACT_DOT_COLS = 64 };
GMM__DEVICE float gmm__quarter_warp_sum(float v) {
    int32_t d;
#pragma unroll
    for (d = 1; d < 8; d <<= 1) v = __fadd_rn(v, __shfl_xor_sync(0xFFFFFFFFu, v, d));
    return v;
}
/* ............................................................................................. Grouped products ... */

/* Operations: X(tag, A is stored as [k][m], B is stored as [k][n], k-grouped). glu is the forward product of an MLP's
   FC1 whose epilogue computes the gated activation besides, and dglu the dgrad of its FC2 whose epilogue computes the
   gradient of that activation instead of storing D. Both have Hopper kernels alone. */
#define GMM_GEMM_OP_LIST(X) \
    X(fwd, 0, 0, 0) \
    X(dgrad, 0, 1, 0) \
    X(wgrad, 1, 1, 1) \
    X(glu, 0, 0, 0) \
    X(dglu, 0, 1, 0)

/* Tiles: X(tag, M, N, K, stages, warps along M, warps along N, CTAs per multiprocessor, skip). With skip 1, blocks of
   16 rows beyond the group's last row are not multiplied, which pays where groups have fewer rows than a tile. All
   tiles accumulate an element in the same order, so results do not depend on the tile. */
#define GMM_MMA_TILE_LIST(X) \
    X(128x256, 128, 256, 64, 3, 2, 4, 1, 0) \
    X(64x128, 64, 128, 32, 6, 1, 4, 2, 1)

/* Instances: X(op, dtype, precision, tile, kernel); the includes below follow the same list. The names
   of GEMM kernels are explained above GMM_SM90_KERNEL_LIST. */
#define GMM_MMA_KERNEL_LIST(X) \
    X(fwd, GMM_BF16, bf16, 128x256, gmm_gemm_fwd_bf16_128x256x64_mma) \
    X(fwd, GMM_BF16, bf16, 64x128, gmm_gemm_fwd_bf16_64x128x32_mma) \
    GMM__IF_F16(X(fwd, GMM_F16, f16, 128x256, gmm_gemm_fwd_f16_128x256x64_mma)) \
    GMM__IF_F16(X(fwd, GMM_F16, f16, 64x128, gmm_gemm_fwd_f16_64x128x32_mma)) \
    X(dgrad, GMM_BF16, bf16, 128x256, gmm_gemm_dgrad_bf16_128x256x64_mma) \
    X(dgrad, GMM_BF16, bf16, 64x128, gmm_gemm_dgrad_bf16_64x128x32_mma) \
    GMM__IF_F16(X(dgrad, GMM_F16, f16, 128x256, gmm_gemm_dgrad_f16_128x256x64_mma)) \
    GMM__IF_F16(X(dgrad, GMM_F16, f16, 64x128, gmm_gemm_dgrad_f16_64x128x32_mma)) \
    X(wgrad, GMM_BF16, bf16, 128x256, gmm_gemm_wgrad_bf16_128x256x64_mma) \
    X(wgrad, GMM_BF16, bf16, 64x128, gmm_gemm_wgrad_bf16_64x128x32_mma) \
    GMM__IF_F16(X(wgrad, GMM_F16, f16, 128x256, gmm_gemm_wgrad_f16_128x256x64_mma)) \
    GMM__IF_F16(X(wgrad, GMM_F16, f16, 64x128, gmm_gemm_wgrad_f16_64x128x32_mma))

#define GMM__X(tag, ta, tb, grouped) GMM__CAT(gmm_ta_, tag) = ta, GMM__CAT(gmm_tb_, tag) = tb, \
    GMM__CAT(gmm_k_grouped_, tag) = grouped,
enum { GMM_GEMM_OP_LIST(GMM__X) gmm_gemm_ops_end };
#undef GMM__X
#define GMM__X(tag, ta, tb, grouped) GMM__CAT(gmm_gemm_, tag),
typedef enum gmm_gemm_op { GMM_GEMM_OP_LIST(GMM__X) gmm_gemm_op_count } gmm_gemm_op;
#undef GMM__X
#define GMM__X(tag, bm, bn, bk, st, wm, wn, ctas, skip) GMM__CAT(gmm_bm_, tag) = bm, GMM__CAT(gmm_bn_, tag) = bn, \
    GMM__CAT(gmm_bk_, tag) = bk, GMM__CAT(gmm_stages_, tag) = st, GMM__CAT(gmm_wm_, tag) = wm, \
    GMM__CAT(gmm_wn_, tag) = wn, GMM__CAT(gmm_ctas_, tag) = ctas, GMM__CAT(gmm_skip_, tag) = skip,
enum { GMM_MMA_TILE_LIST(GMM__X) gmm_mma_tiles_end };
#undef GMM__X
#define GMM__X(tag, bm, bn, bk, st, wm, wn, ctas, skip) GMM__CAT(gmm_tile_, tag),
typedef enum gmm_mma_tile { GMM_MMA_TILE_LIST(GMM__X) gmm_tile_count } gmm_mma_tile;
#undef GMM__X
/* Rules of tiles. gmm_stage_load adds steps of rows to a swizzled offset, which is right for multiples of 8 rows.
   gmm_mma_load_fragment adds blocks to it by XOR, which is an addition where a warp's extent is a power of two.
   Fragments alternate between two buffers from one stage to the next. gmm_gemm_store_rows holds at most 64 columns of a
   warp. */
#define GMM__X(tag, bm, bn, bk, st, wm, wn, ctas, skip) \
    static_assert(32 * (wm) * (wn) % (bm) == 0 && 32 * (wm) * (wn) % (bn) == 0 && 32 * (wm) * (wn) % (bk) == 0, \
                  "tile " #tag ": a CTA loads a multiple of 8 rows of a stage at once"); \
    static_assert((bm) / (wm) % 16 == 0 && ((bm) / (wm) & ((bm) / (wm) - 1)) == 0 && (bk) % 32 == 0, \
                  "tile " #tag ": a warp's rows are a power of two from 16 on, a stage's K steps of 16 even"); \
    static_assert((bn) / (wn) == 16 || (bn) / (wn) == 32 || (bn) / (wn) == 64, \
                  "tile " #tag ": a warp has 16, 32 or 64 columns");
GMM_MMA_TILE_LIST(GMM__X)
#undef GMM__X

/* Shared memory: the stages, then 8 rows of fp32 results per warp for the epilogue. The large tile just fits the 163
   KiB of compute capability 8.0. */
#define GMM__X(tag, bm, bn, bk, st, wm, wn, ctas, skip) \
    GMM__CAT(gmm_store_ld_, tag) = (bn) / (wn) + 8, GMM__CAT(gmm_threads_, tag) = 32 * (wm) * (wn), \
    GMM__CAT(gmm_shared_, tag) = 2 * (st) * (bk) * ((bm) + (bn)) + 4 * 8 * ((bn) / (wn) + 8) * (wm) * (wn),
enum { GMM_MMA_TILE_LIST(GMM__X) gmm_mma_shared_end };
#undef GMM__X

/* A work tile. */
typedef struct gmm_gemm_tile {
    int32_t g, m0, n0, m, k; /* group, first row and column in the group, extents of the group */
    int64_t row;             /* first row of the group in the token matrices */
} gmm_gemm_tile;

/* Rasterization of a group's tiles: along M first, in bands of 8 tiles, so that concurrent tiles read the same operands
   from the L2. */
GMM__DEVICE void gmm_tile_rasterize(uint32_t i, uint32_t tiles_m, uint32_t tiles_n, int bm, int bn, gmm_gemm_tile *t) {
    const uint32_t band = i / (8 * tiles_n), first = band * 8, remaining = tiles_m - first;
    const uint32_t height = remaining < 8 ? remaining : 8;
    i -= first * tiles_n;
    t->m0 = (int32_t)(first + i % height) * bm;
    t->n0 = (int32_t)(i / height) * bn;
}

/* beta of group g. */
GMM__DEVICE float gmm_gemm_beta(const gmm_gemm_args *args, int32_t g) {
    return args->beta ? args->beta[g] : args->beta_all;
}

/* Advances *tile_index to the first tile of this CTA's sequence, at or after it, that has work, and describes the tile
   in *t. Returns 0 where there is none. Whole warp. Tile numbers fit 32 bits. */
GMM__DEVICE int gmm_gemm_next_tile(const gmm_gemm_args *args, int k_grouped, int bm, int bn, int64_t *tile_index,
                                   gmm_gemm_tile *t) {
    const uint32_t tiles_n = (uint32_t)(args->n + bn - 1) / (uint32_t)bn;
    const int32_t G = args->groups;
    if (!k_grouped) {
        uint32_t row_tile;
        if (*tile_index >= (int64_t)args->tiles[G] * tiles_n) return 0;
        row_tile = (uint32_t)*tile_index / tiles_n;
        gmm_find_group32(args->tiles, G, row_tile, &t->g);
        t->row = args->offsets[t->g];
        t->m = (int32_t)(args->offsets[t->g + 1] - t->row);
        t->k = args->k;
        row_tile = (uint32_t)args->tiles[t->g]; /* the group's first */
        gmm_tile_rasterize((uint32_t)*tile_index - row_tile * tiles_n, (uint32_t)args->tiles[t->g + 1] - row_tile,
                           tiles_n, bm, bn, t);
    } else {
        const uint32_t tiles_m = (uint32_t)(args->m + bm - 1) / (uint32_t)bm, group_tiles = tiles_m * tiles_n;
        int32_t rows;
        for (;;) {
            if (*tile_index >= (int64_t)group_tiles * G) return 0;
            t->g = (int32_t)((uint32_t)*tile_index / group_tiles);
            t->row = args->offsets[t->g];
            rows = (int32_t)(args->offsets[t->g + 1] - t->row);
            if (!(args->frozen && args->frozen[t->g]) && !(rows == 0 && gmm_gemm_beta(args, t->g) == 1.0f)) break;
            { /* skip to the first tile of this CTA in the next group */
                const uint32_t skip = (uint32_t)((int64_t)(t->g + 1) * group_tiles - *tile_index);
                *tile_index += (int64_t)((skip + gridDim.x - 1) / gridDim.x) * gridDim.x;
            }
        }
        t->m = args->m;
        t->k = rows;
        gmm_tile_rasterize((uint32_t)*tile_index - (uint32_t)t->g * group_tiles, tiles_m, tiles_n, bm, bn, t);
    }
    return 1;
}

/* Arguments of the epilogue that are constant over a tile. */
typedef struct gmm_gemm_epilogue {
    char *d;                                       /* first row of the group in D */
    gmm_epilogue_values values[gmm_epilogue_steps]; /* of the steps, from the group's first row */
    int present[gmm_epilogue_steps];               /* whether the call has the step */
    const char *bias;                              /* of the group, or NULL */
    float alpha, beta;
    int vec4, bias_vec4;
} gmm_gemm_epilogue;

GMM__DEVICE gmm_gemm_epilogue gmm_gemm_epilogue_begin(const gmm_gemm_args *args, int k_grouped,
                                                      const gmm_gemm_tile *t) {
    gmm_gemm_epilogue epilogue;
    epilogue.d = gmm_kmat_data(&args->d, t->g) + (k_grouped ? 0 : t->row * args->d.ld * gmm_kmat_size(&args->d));
    epilogue.vec4 = gmm_vec4_aligned(args->d.dtype, epilogue.d, args->d.ld);
    epilogue.bias = !k_grouped && args->bias.dtype != GMM_NONE ? gmm_kmat_data(&args->bias, t->g) : NULL;
    epilogue.bias_vec4 = gmm_vec4_aligned(args->bias.dtype, epilogue.bias, 4);
#define GMM__X(name, rows, cols) \
    epilogue.present[GMM_EPILOGUE_##name] = !k_grouped && gmm_epilogue_##name##_present(args); \
    epilogue.values[GMM_EPILOGUE_##name] = gmm_epilogue_##name##_values(args, t->g, t->row);
    GMM_EPILOGUE_STEP_LIST(GMM__X)
#undef GMM__X
    /* an empty sum is +0 whatever alpha is */
    epilogue.alpha = args->alpha && t->k > 0 ? args->alpha[args->alpha_per_group ? t->g : 0] : 1.0f;
    epilogue.beta = gmm_gemm_beta(args, t->g);
    return epilogue;
}

#define GMM__X(name, rows, cols) \
    static_assert(!(cols) || GMM_EPILOGUE_##name == GMM_EPILOGUE_bias, \
                  #name ": the portable products have values of columns for the bias alone");
GMM_EPILOGUE_STEP_LIST(GMM__X)
#undef GMM__X
/* Applies an epilogue step to four elements of a row of the group. `bias`: values of their columns, which no other step
   has. */
GMM__DEVICE void gmm_gemm_apply_step(const gmm_epilogue_step step, const gmm_gemm_epilogue *o, int32_t row,
                                     const float bias[4], float v[4]) {
    const float *const rows = o->values[step].rows;
    const float value = rows ? rows[row] : 1.0f;
    int i;
#pragma unroll
    for (i = 0; i < 4; i++) v[i] = gmm_epilogue_apply(step, v[i], value, bias[i]);
}
GMM__DEVICE void gmm_gemm_apply_steps(const gmm_gemm_epilogue *o, int32_t row, const float bias[4], float v[4]) {
#define GMM__X(name, rows, cols) \
    if (o->present[GMM_EPILOGUE_##name]) gmm_gemm_apply_step(GMM_EPILOGUE_##name, o, row, bias, v);
    GMM_EPILOGUE_STEP_LIST(GMM__X)
#undef GMM__X
}

/* Epilogue of four accumulators of one row: scales, adds bias and beta D, rounds once and stores. `bias` holds the
   biases of the columns. The operations are explicit intrinsics, so that the compiler contracts them equally at
   every place of expansion. */
GMM__DEVICE void gmm_gemm_store(const gmm_gemm_args *args, const gmm_gemm_epilogue *o, int32_t row, int32_t col,
                                const float bias[4], float v[4]) {
    char *dst = o->d + ((int64_t)row * args->d.ld + col) * gmm_kmat_size(&args->d);
    const int count = args->n - col;
    int i;
#pragma unroll
    for (i = 0; i < 4; i++) v[i] = __fmul_rn(v[i], o->alpha);
    gmm_gemm_apply_steps(o, row, bias, v);
    if (o->beta != 0.0f) {
        float old[4];
        gmm_read4(args->d.dtype, dst, count, o->vec4, old);
#pragma unroll
        for (i = 0; i < 4; i++) v[i] = __fmaf_rn(o->beta, old[i], v[i]);
    }
    gmm_write4(args->d.dtype, dst, count, o->vec4, v);
}

/* The same for every row_step-th of 8 rows, which are complete and aligned for vector access: all loads are issued
   before the first store. `row_step` (2 to 8) is also the number of rows that a warp stores at once, so a row has 4 *
   (32 / row_step) columns and takes 8 more floats in shared memory. `src`: the thread's first row there, number `row`
   of the group. `dst`: the same row of D; `dst_stride`: bytes to the next one. */
GMM__DEVICE void gmm_gemm_store_rows(const gmm_gemm_args *args, const gmm_gemm_epilogue *o, char *dst,
                                     int64_t dst_stride, int32_t row, int row_step, const float *src,
                                     const float bias[4]) {
    const int f32 = args->d.dtype == GMM_F32, rows = 8 / row_step;
    const int src_stride = row_step * (4 * (32 / row_step) + 8);
    float v[4][4];
    uint4 old_bits[4];
    int r, i;
    if (o->beta != 0.0f) {
#pragma unroll
        for (r = 0; r < rows; r++)
            if (f32) old_bits[r] = *(const uint4 *)(dst + r * dst_stride);
            else *(uint2 *)&old_bits[r] = *(const uint2 *)(dst + r * dst_stride);
    }
#pragma unroll
    for (r = 0; r < rows; r++) {
        const float4 f = *(const float4 *)(src + r * src_stride);
        v[r][0] = __fmul_rn(f.x, o->alpha);
        v[r][1] = __fmul_rn(f.y, o->alpha);
        v[r][2] = __fmul_rn(f.z, o->alpha);
        v[r][3] = __fmul_rn(f.w, o->alpha);
    }
#pragma unroll
    for (r = 0; r < rows; r++) gmm_gemm_apply_steps(o, row + r * row_step, bias, v[r]);
    if (o->beta != 0.0f) {
#pragma unroll
        for (r = 0; r < rows; r++) {
            float old[4];
            if (f32) {
                old[0] = __uint_as_float(old_bits[r].x); old[1] = __uint_as_float(old_bits[r].y);
                old[2] = __uint_as_float(old_bits[r].z); old[3] = __uint_as_float(old_bits[r].w);
            } else {
                old[0] = gmm_widen(args->d.dtype, (uint16_t)old_bits[r].x);
                old[1] = gmm_widen(args->d.dtype, (uint16_t)(old_bits[r].x >> 16));
                old[2] = gmm_widen(args->d.dtype, (uint16_t)old_bits[r].y);
                old[3] = gmm_widen(args->d.dtype, (uint16_t)(old_bits[r].y >> 16));
            }
#pragma unroll
            for (i = 0; i < 4; i++) v[r][i] = __fmaf_rn(o->beta, old[i], v[r][i]);
        }
    }
#pragma unroll
    for (r = 0; r < rows; r++)
        if (f32) *(float4 *)(dst + r * dst_stride) = make_float4(v[r][0], v[r][1], v[r][2], v[r][3]);
        else *(uint2 *)(dst + r * dst_stride) = make_uint2(gmm_pack2(args->d.dtype, v[r][0], v[r][1]),
                                                           gmm_pack2(args->d.dtype, v[r][2], v[r][3]));
}

/* Stores 8 rows of the tile, from `first_row` and `first_col` of the group on, whose sums a warp holds in shared memory
   at `sums`, with the pitch that gmm_gemm_store_rows names; rows and columns beyond the tile are left out. */
GMM__DEVICE void gmm_gemm_store_8_rows(const gmm_gemm_args *args, const gmm_gemm_epilogue *o, const gmm_gemm_tile *t,
                                       int32_t first_row, int32_t first_col, int row_step, const float *sums,
                                       const float bias[4]) {
    const int lanes = 32 / row_step, lane = (int)threadIdx.x & 31, ld = 4 * lanes + 8;
    const int32_t row = first_row + lane / lanes, col = first_col + lane % lanes * 4;
    const float *src = sums + lane / lanes * ld + lane % lanes * 4;
    int r;
    if (o->vec4 && t->m - first_row >= 8 && first_col + 4 * lanes <= args->n) {
        const int64_t pitch = args->d.ld * gmm_kmat_size(&args->d);
        gmm_gemm_store_rows(args, o, o->d + row * pitch + (int64_t)col * gmm_kmat_size(&args->d), pitch * row_step, row,
                            row_step, src, bias);
    } else {
#pragma unroll 1
        for (r = 0; r < 8; r += row_step) {
            const float4 f = *(const float4 *)(const void *)(src + r * ld);
            float v[4];
            v[0] = f.x; v[1] = f.y; v[2] = f.z; v[3] = f.w;
            if (row + r < t->m && col < args->n) gmm_gemm_store(args, o, row + r, col, bias, v);
        }
    }
}

/* Prefetches the tile's part of D into the L2 if the epilogue will read it. */
GMM__DEVICE void gmm_gemm_prefetch(const gmm_gemm_args *args, int k_grouped, const gmm_gemm_tile *t, int bm, int bn) {
    const int size = gmm_kmat_size(&args->d), row_lines = bn * size / 128; /* 128-byte lines of the cache */
    const char *d;
    int i;
    if (gmm_gemm_beta(args, t->g) == 0.0f) return;
    d = gmm_kmat_data(&args->d, t->g) + (k_grouped ? 0 : t->row * args->d.ld * size);
    for (i = (int)threadIdx.x; i < bm * row_lines; i += (int)blockDim.x) {
        const int32_t row = t->m0 + i / row_lines, col = t->n0 + i % row_lines * (128 / size);
        if (row < t->m && col < args->n)
            gmm_prefetch_global_l2(d + ((int64_t)row * args->d.ld + col) * size);
    }
}

/* Zeroes rows [first_row, capacity) of D, one warp per row. */
GMM__DEVICE void gmm_gemm_zero_tail(const gmm_kmat *d, int64_t first_row, int64_t capacity, int32_t n) {
    const int64_t warps = (int64_t)gridDim.x * (blockDim.x >> 5);
    const int64_t warp = (int64_t)blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5);
    const float zero[4] = { 0.0f, 0.0f, 0.0f, 0.0f };
    const int size = gmm_kmat_size(d), vec4 = gmm_vec4_aligned(d->dtype, (const char *)d->data, d->ld);
    int64_t r;
    int32_t c;
    for (r = first_row + warp; r < capacity; r += warps)
        for (c = 4 * (int32_t)(threadIdx.x & 31); c < n; c += 128)
            gmm_write4(d->dtype, (char *)d->data + (r * d->ld + c) * size, n - c, vec4, zero);
}

/* Stages of the portable products (loads by cp.async for 16 bits, through registers for fp32), and their instances. */

/* Shape of one 16-bit operand's stages, constant per kernel. A stage has rows of contiguous elements, as the operand is
   stored: its rows are rows of A or B where the operand is stored as [mn][k], and values of k where it is stored as
   [k][mn]. */
typedef struct gmm_stage_shape {
    int row_bytes;
    int mn;             /* rows of A or B in a stage */
    int k_rows, k_cols; /* extent of a stage along k, in rows where the operand is stored as [k][mn], else in columns;
                           the other one is 0 */
    int row_step;       /* rows that the CTA copies at once, 16 bytes per thread */
    int chunks;         /* 16-byte chunks of a stage per thread */
} gmm_stage_shape;

GMM__DEVICE gmm_stage_shape gmm_stage_shape_of(int mn_major, int mn, int k, int threads) {
    gmm_stage_shape shape;
    shape.row_bytes = 2 * (mn_major ? mn : k);
    shape.mn = mn;
    shape.k_rows = mn_major ? k : 0;
    shape.k_cols = mn_major ? 0 : k;
    shape.row_step = threads * 16 / shape.row_bytes;
    shape.chunks = mn * k / 8 / threads;
    return shape;
}

/* A thread's part of one operand that is copied into stages: the chunk at `src` and further ones, `chunk_stride` bytes
   apart. */
typedef struct gmm_stage_loader {
    const char *src;
    int64_t chunk_stride, stage_stride; /* bytes between chunks of a stage, and between stages */
    int32_t rows, cols;                 /* of the operand, from the thread's first chunk in stage 0 on */
    int32_t aligned;                    /* chunks are aligned to 16 bytes */
    int32_t full_stages;                /* number of stages that are complete and aligned */
    uint32_t offset;                    /* of the thread's first chunk in the stage, in bytes */
} gmm_stage_loader;

/* Offset of a 16-byte chunk of a row in a stage. The chunks of a row are permuted so that equal chunks of 8 adjacent
   rows are in different banks. */
GMM__DEVICE uint32_t gmm_swizzle(uint32_t row, uint32_t chunk, uint32_t row_bytes) {
    return row * row_bytes + ((chunk ^ (row_bytes == 64 ? (row >> 1) & 3u : row & 7u)) << 4);
}

/* Loader of the `rows` x `cols` elements from (row0, col0) of the stored matrix of group g on. */
GMM__DEVICE gmm_stage_loader gmm_stage_loader_init(const gmm_kmat *m, int32_t g, int64_t row0, int64_t col0,
                                                   int32_t rows, int32_t cols, gmm_stage_shape shape) {
    gmm_stage_loader loader;
    const int64_t pitch = m->ld * 2;
    const int row_chunks = shape.row_bytes / 16;
    const int row = (int)threadIdx.x / row_chunks, chunk = (int)threadIdx.x % row_chunks;
    const char *base = gmm_kmat_data(m, g);
    loader.src = base + (row0 + row) * pitch + (col0 + chunk * 8) * 2;
    loader.chunk_stride = pitch * shape.row_step;
    loader.stage_stride = pitch * shape.k_rows + 2 * shape.k_cols;
    loader.rows = rows - row;
    loader.cols = cols - chunk * 8;
    loader.aligned = (((uint64_t)(uintptr_t)base | (uint64_t)pitch) & 15) == 0;
    loader.full_stages = shape.k_rows ? (cols >= shape.mn ? rows / shape.k_rows : 0)
                                      : (rows >= shape.mn ? cols / shape.k_cols : 0);
    if (!loader.aligned) loader.full_stages = 0;
    loader.offset = gmm_swizzle((uint32_t)row, (uint32_t)chunk, (uint32_t)shape.row_bytes);
    return loader;
}

/* Copies stage number `stage_index`, with zeros beyond the operand, and advances to the next stage. */
GMM__DEVICE void gmm_stage_load(gmm_stage_loader *loader, char *stage, int stage_index, gmm_stage_shape shape) {
    const int step_bytes = shape.row_step * shape.row_bytes;
    const uint32_t smem = (uint32_t)__cvta_generic_to_shared(stage) + loader->offset;
    const char *src = loader->src;
    int i, e;
    if (stage_index < loader->full_stages) {
#pragma unroll
        for (i = 0; i < shape.chunks; i++, src += loader->chunk_stride)
            gmm_cp_async_16(smem + (uint32_t)(i * step_bytes), src);
    } else {
        const int rows = loader->rows - stage_index * shape.k_rows, cols = loader->cols - stage_index * shape.k_cols;
        const int valid = cols < 0 ? 0 : cols > 8 ? 8 : cols;
        if (loader->aligned) {
#pragma unroll
            for (i = 0; i < shape.chunks; i++, src += loader->chunk_stride)
                gmm_cp_async_16_zfill(smem + (uint32_t)(i * step_bytes), src,
                                      i * shape.row_step < rows ? 2 * valid : 0);
        } else {
            uint16_t *h = (uint16_t *)(stage + loader->offset);
#pragma unroll 1
            for (i = 0; i < shape.chunks; i++, src += loader->chunk_stride, h += step_bytes / 2)
#pragma unroll 1
                for (e = 0; e < 8; e++)
                    h[e] = i * shape.row_step < rows && e < valid ? ((const uint16_t *)src)[e] : (uint16_t)0;
        }
    }
    loader->src += loader->stage_stride;
}

typedef struct gmm_stage_loaders { gmm_stage_loader a, b; } gmm_stage_loaders;

/* A warp's part of a tile: its first row and column, and in a stage the byte offsets of the row of the first four 8 x 8
   blocks of A and of B that this lane names to ldmatrix. A stage has A before B. */
typedef struct gmm_mma_warp {
    int m, n;
    uint32_t a, b;
} gmm_mma_warp;

/* Order of the four blocks of an ldmatrix. A: (m, k), (m + 8, k), (m, k + 8), (m + 8, k + 8). B: (n, k), (n, k + 8),
   (n + 8, k), (n + 8, k + 8). `ta`, `tb`: whether A, B are stored as [k][mn]; row bytes: of a stage. */
GMM__DEVICE gmm_mma_warp gmm_mma_warp_init(int m, int n, int ta, int tb, uint32_t a_row_bytes, uint32_t b_row_bytes,
                                           uint32_t a_bytes) {
    const int lane = (int)threadIdx.x & 31;
    gmm_mma_warp w;
    w.m = m;
    w.n = n;
    if (ta)
        w.a = gmm_swizzle((uint32_t)((lane & 7) + (lane >> 4) * 8), (uint32_t)(m / 8 + (lane >> 3 & 1)), a_row_bytes);
    else w.a = gmm_swizzle((uint32_t)(m + (lane & 15)), (uint32_t)(lane >> 4), a_row_bytes);
    if (tb) w.b = gmm_swizzle((uint32_t)(lane & 15), (uint32_t)(n / 8 + (lane >> 4)), b_row_bytes);
    else w.b = gmm_swizzle((uint32_t)(n + (lane & 7) + (lane >> 4) * 8), (uint32_t)(lane >> 3 & 1), b_row_bytes);
    w.b += a_bytes;
    return w;
}

/* ldmatrix of 16 rows of A or B, block i of the warp, and 16 values of k, step s of the stage at `stage`. */
GMM__DEVICE void gmm_mma_load_fragment(uint32_t fragment[4], int mn_major, uint32_t stage, uint32_t offset, int i,
                                       int s, int row_bytes) {
    if (mn_major) gmm_ldmatrix_x4_trans(fragment, stage + (offset ^ (uint32_t)(i * 32)) + s * 16 * row_bytes);
    else gmm_ldmatrix_x4(fragment, stage + (offset ^ (uint32_t)(s * 32)) + i * 16 * row_bytes);
}

/* Tile and instances of the fp32 product, which uses the CUDA cores: X(op, kernel). */
enum { gmm_bm_f32 = 128, gmm_bn_f32 = 128, gmm_bk_f32 = 16, gmm_ld_f32 = 132, gmm_threads_f32 = 256 };
#define GMM_F32_KERNEL_LIST(X) \
    X(fwd, gmm_gemm_fwd_f32_128x128x16_mma) \
    X(dgrad, gmm_gemm_dgrad_f32_128x128x16_mma) \
    X(wgrad, gmm_gemm_wgrad_f32_128x128x16_mma)

#define GMM__BODY GMM__BODY_TENSOR
/* kernel, operation, precision, tile */
#if GMM__HOLDS(4)
#define GMM__ROW (gmm_gemm_fwd_bf16_128x256x64_mma, fwd, bf16, 128x256)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_gemm_fwd_bf16_64x128x32_mma, fwd, bf16, 64x128)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_gemm_dgrad_bf16_128x256x64_mma, dgrad, bf16, 128x256)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_gemm_dgrad_bf16_64x128x32_mma, dgrad, bf16, 64x128)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_gemm_wgrad_bf16_128x256x64_mma, wgrad, bf16, 128x256)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_gemm_wgrad_bf16_64x128x32_mma, wgrad, bf16, 64x128)
#include GMM_KERNELS_FILE
#ifndef GMM_NO_F16
#define GMM__ROW (gmm_gemm_fwd_f16_128x256x64_mma, fwd, f16, 128x256)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_gemm_fwd_f16_64x128x32_mma, fwd, f16, 64x128)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_gemm_dgrad_f16_128x256x64_mma, dgrad, f16, 128x256)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_gemm_dgrad_f16_64x128x32_mma, dgrad, f16, 64x128)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_gemm_wgrad_f16_128x256x64_mma, wgrad, f16, 128x256)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_gemm_wgrad_f16_64x128x32_mma, wgrad, f16, 64x128)
#include GMM_KERNELS_FILE
#endif
#endif
#undef GMM__BODY

/* One stage of an operand of the fp32 product: each thread loads, twice, 4 values of k of a row or, from an operand
   stored as [k][rows], 4 rows of a value of k; then it stores them to shared memory as [k][rows]. */
GMM__DEVICE void gmm_f32_load_stage(int transposed, const char *base, int vec4, int64_t ld, int rows, int k0, int k,
                                    float v[2][4]) {
    int i;
#pragma unroll
    for (i = 0; i < 2; i++) {
        const int c = (int)threadIdx.x + i * gmm_threads_f32;
        const int row = transposed ? k0 + c / 32 : c / 4, col = transposed ? c % 32 * 4 : k0 + c % 4 * 4;
        const int count = row < (transposed ? k : rows) ? (transposed ? rows : k) - col : 0;
        gmm_read4(GMM_F32, base + 4 * (row * ld + col), count, vec4, v[i]);
    }
}
GMM__DEVICE void gmm_f32_store_stage(int transposed, float *smem, const float v[2][4]) {
    int i, j;
#pragma unroll
    for (i = 0; i < 2; i++) {
        const int c = (int)threadIdx.x + i * gmm_threads_f32;
        if (transposed) {
            *(float4 *)&smem[c / 32 * gmm_ld_f32 + c % 32 * 4] = make_float4(v[i][0], v[i][1], v[i][2], v[i][3]);
            continue;
        }
#pragma unroll
        for (j = 0; j < 4; j++) smem[(c % 4 * 4 + j) * gmm_ld_f32 + c / 4] = v[i][j];
    }
}

#define GMM__BODY GMM__BODY_FP32
/* kernel, operation */
#if GMM__HOLDS(5)
#define GMM__ROW (gmm_gemm_fwd_f32_128x128x16_mma, fwd)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_gemm_dgrad_f32_128x128x16_mma, dgrad)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_gemm_wgrad_f32_128x128x16_mma, wgrad)
#include GMM_KERNELS_FILE
#endif
#undef GMM__BODY

/* One row per kernel. */
typedef struct gmm_gemm_kernel {
    gmm_gemm_op op;
    gmm_dtype dtype;
    int32_t tile_rows, tile_cols, threads, blocks, shared;
    const void *function;
    const char *name;
} gmm_gemm_kernel;

#if GMM__HOLDS(0)
#define GMM__X(op, dtype, tag, tile, kernel) GMM__DECLARE_KERNEL(kernel, gmm_gemm_args)
GMM_MMA_KERNEL_LIST(GMM__X)
#undef GMM__X
#define GMM__X(op, kernel) GMM__DECLARE_KERNEL(kernel, gmm_gemm_args)
GMM_F32_KERNEL_LIST(GMM__X)
#undef GMM__X
static const gmm_gemm_kernel gmm_gemm_kernels[] = {
#define GMM__X(op, dtype, tag, tile, kernel) \
    { GMM__CAT(gmm_gemm_, op), dtype, GMM__CAT(gmm_bm_, tile), GMM__CAT(gmm_bn_, tile), GMM__CAT(gmm_threads_, tile), \
      GMM__CAT(gmm_ctas_, tile), GMM__CAT(gmm_shared_, tile), (const void *)kernel, #kernel },
    GMM_MMA_KERNEL_LIST(GMM__X)
#undef GMM__X
#define GMM__X(op, kernel) \
    { GMM__CAT(gmm_gemm_, op), GMM_F32, gmm_bm_f32, gmm_bn_f32, gmm_threads_f32, 1, 0, (const void *)kernel, #kernel },
    GMM_F32_KERNEL_LIST(GMM__X)
#undef GMM__X
};
enum { GMM_GEMM_KERNELS = (int)(sizeof gmm_gemm_kernels / sizeof gmm_gemm_kernels[0]) };
#endif /* GMM__HOLDS(0) */

/* ................................................................................ Grouped products, quantized ... */

/* The same products where both operands are quantized, or the weights alone. The blocks of both run along K; "mn" are
   the rows of A (M) or of B (N). While a stage is multiplied, the codes of the next stage are dequantized into
   16-bit elements in shared memory, once per tile, and the codes behind them are in flight. Where scales are applied:
       MX32, NV16      to the elements, in BF16, where code times scale is exact: for MX32 with scales of 2^-124 to
         2^119, and with others unless the element leaves the range of BF16; NV16 also in F16, where tokens are F16
       1X128, 128X128  to the partial sum of every 128 elements along the contraction
       MX32 beside F16 tokens  to the partial sum of every 32 elements
       others          to the complete sum in the epilogue, as well as NV16's amax
   Codes without scales are multiplied as F16, which represents all FP8 values exactly. */
typedef struct gmm_qgemm_args {
    gmm_gemm_args p;               /* without a and b */
    gmm_mat a, b;                  /* quantized operands, or for a 16-bit tokens; tables in device memory */
    gmm_direction a_along, b_along;
    int32_t a_cols, b_rows, b_cols; /* columns of the matrices that were quantized; rows of the weights */
    /* 16 for Hadamard-transformed copies, where a transform spreads the last rows over a block of 16; else 1 */
    int32_t k_round;
    int32_t block;                 /* elements along the contraction whose partial sum is scaled (block-scaled kinds) */
} gmm_qgemm_args;

/* Kinds of products: X(tag, A is stored as [k][m], B is stored as [k][n], block-scaled sums, dtype of the elements).
   Columnwise MX32 is stored so. */
#define GMM_QUANT_KIND_LIST(X) \
    X(bf16, 0, 0, 0, GMM_BF16) \
    X(bf16_nn, 0, 1, 0, GMM_BF16) \
    X(bf16_tn, 1, 1, 0, GMM_BF16) \
    X(f16, 0, 0, 0, GMM_F16) \
    X(f16_block_scaled, 0, 0, 1, GMM_F16) \
    X(f16_block_scaled_nn, 0, 1, 1, GMM_F16)

/* Instances: X(op, kind, kernel); the includes below define the kernels. fwd and dgrad use the same kernel where both
   have a kind: lines of either copy of the weights run along K then. */
#define GMM_QUANT_KERNEL_LIST(X) \
    X(fwd, bf16, gmm_gemm_quant_bf16_128x256x64_mma) \
    X(fwd, f16, gmm_gemm_quant_f16_128x256x64_mma) \
    X(fwd, f16_block_scaled, gmm_gemm_quant_f16_128x128x64_block_scaled_mma) \
    X(dgrad, bf16, gmm_gemm_quant_bf16_128x256x64_mma) \
    X(dgrad, bf16_nn, gmm_gemm_dgrad_quant_bf16_128x256x64_nn_mma) \
    X(dgrad, f16, gmm_gemm_quant_f16_128x256x64_mma) \
    X(dgrad, f16_block_scaled, gmm_gemm_quant_f16_128x128x64_block_scaled_mma) \
    X(dgrad, f16_block_scaled_nn, gmm_gemm_dgrad_quant_f16_128x128x64_block_scaled_nn_mma) \
    X(wgrad, bf16, gmm_gemm_wgrad_quant_bf16_128x256x64_mma) \
    X(wgrad, bf16_tn, gmm_gemm_wgrad_quant_bf16_128x256x64_tn_mma) \
    X(wgrad, f16, gmm_gemm_wgrad_quant_f16_128x256x64_mma) \
    X(wgrad, f16_block_scaled, gmm_gemm_wgrad_quant_f16_128x128x64_block_scaled_mma)

#define GMM__X(tag, ta, tb, block_scaled, dtype) GMM__CAT(gmm_qgemm_ta_, tag) = ta, GMM__CAT(gmm_qgemm_tb_, tag) = tb, \
    GMM__CAT(gmm_qgemm_block_scaled_, tag) = block_scaled, GMM__CAT(gmm_qgemm_dtype_, tag) = dtype,
enum { GMM_QUANT_KIND_LIST(GMM__X) gmm_quant_kinds_end };
#undef GMM__X

/* A tile has 128 rows, like the granularity of groups in columnwise copies, and 256 columns, or 128 for block-scaled
   sums. A stage has 64 values of k. Shared memory: elements of two stages, A before B, which the epilogue reuses;
   scales of four stages; the work tile. */
enum {
    GMM_QGEMM_TILE_M = 128,
    GMM_QGEMM_TILE_K = 64,
    GMM_QGEMM_THREADS = 256,
    /* names end in _0 for one sum over the contraction, in _1 for block-scaled sums */
    gmm_qgemm_tile_n_0 = 256,
    gmm_qgemm_tile_n_1 = 128,
    gmm_qgemm_slot_bytes_0 = 8 * (GMM_QGEMM_TILE_M + gmm_qgemm_tile_n_0),
    gmm_qgemm_slot_bytes_1 = 8 * (GMM_QGEMM_TILE_M + gmm_qgemm_tile_n_1),
    gmm_qgemm_smem_bytes_0 = 4 * GMM_QGEMM_TILE_K * (GMM_QGEMM_TILE_M + gmm_qgemm_tile_n_0) +
                             4 * gmm_qgemm_slot_bytes_0 + (int)sizeof(gmm_gemm_tile),
    gmm_qgemm_smem_bytes_1 = 4 * GMM_QGEMM_TILE_K * (GMM_QGEMM_TILE_M + gmm_qgemm_tile_n_1) +
                             4 * gmm_qgemm_slot_bytes_1 + (int)sizeof(gmm_gemm_tile)
};

/* Products of two pairs of 16-bit elements, each rounded once; subnormal results are not flushed to 0. */
GMM__DEVICE uint32_t gmm_mul_16bit_x2(gmm_dtype dtype, uint32_t a, uint32_t b) {
    return dtype == GMM_BF16 ? gmm_mul_bf16x2(a, b) : gmm_mul_f16x2(a, b);
}

/* Converts four FP8 codes to `dtype`: exponent and mantissa bits are shifted into place, and one multiplication
   corrects the exponent bias. */
GMM__DEVICE void gmm_fp8_to_16bit_x4(gmm_dtype dtype, gmm_dtype format, uint32_t codes, uint32_t dst[2]) {
    const int e4m3 = format == GMM_E4M3, is_f16 = dtype == GMM_F16;
    const uint32_t a = gmm_prmt(codes, 0u, 0x1404u), b = gmm_prmt(codes, 0u, 0x3424u);
    const int shift = is_f16 ? 1 : e4m3 ? 4 : 3;
    const uint32_t field = is_f16 ? 0x3F803F80u : e4m3 ? 0x07F007F0u : 0x0FE00FE0u;
    const uint32_t exponent_scale = is_f16 ? 0x5C005C00u : e4m3 ? 0x7B807B80u : 0x77807780u; /* 2^8; 2^120; 2^112 */
    /* codes of NaN and infinity */
    const uint32_t nonfinite = ((codes & 0x7F7F7F7Fu) + (e4m3 ? 0x01010101u : 0x04040404u)) & 0x80808080u;
    if (is_f16 && !e4m3) {
        dst[0] = a;
        dst[1] = b;
        return;
    }
#if __CUDA_ARCH__ >= 890
    if (is_f16) {
        gmm_cvt_f16x2_e4m3x2(codes, dst);
        return;
    }
#endif
    dst[0] = (a & 0x80008000u) | (a >> shift & field);
    dst[1] = (b & 0x80008000u) | (b >> shift & field);
    if (nonfinite) {
        const uint32_t bits = e4m3 ? 0x7FFF7FFFu : 0x7F807F80u;
        dst[0] |= gmm_prmt(nonfinite, 0u, 0x9988u) & bits;
        dst[1] |= gmm_prmt(nonfinite, 0u, 0xBBAAu) & bits;
    }
    dst[0] = gmm_mul_16bit_x2(dtype, dst[0], exponent_scale);
    dst[1] = gmm_mul_16bit_x2(dtype, dst[1], exponent_scale);
}
/* Converts eight E2M1 codes; each code is first moved to the upper byte of its element. */
GMM__DEVICE void gmm_fp4_to_16bit_x8(gmm_dtype dtype, uint32_t codes, uint32_t dst[4]) {
    const uint32_t exponent_scale = dtype == GMM_F16 ? 0x74007400u : 0x7E807E80u; /* 2^14; 2^126 */
    const uint32_t even_codes = codes << 4, field = dtype == GMM_F16 ? 0x0E000E00u : 0x01C001C0u;
    uint32_t i;
#pragma unroll
    for (i = 0; i < 4; i++) {
        const uint32_t z = gmm_prmt(even_codes, codes, 0x4400u + 0x1111u * i);
        dst[i] = gmm_mul_16bit_x2(dtype, (z & 0x80008000u) | (z >> (dtype == GMM_F16 ? 3 : 6) & field), exponent_scale);
    }
}

/* A thread's part of one operand of a tile: chunks of 16 bytes, at equal distances of rows. A stage holds 64 columns of
   an operand that is stored as [mn][k], or 64 rows of one that is stored as [k][mn] (`mn_major`). */
typedef struct gmm_qgemm_operand {
    const char *src;     /* first chunk of the thread in the next stage */
    int32_t rows, bytes; /* rows of memory, and bytes of a row, from there on */
    int32_t aligned;     /* chunks are aligned to 16 bytes */
} gmm_qgemm_operand;

/* log2 of the chunks in a row of a stage. `log2_mn64`: log2 of the tile's mn in units of 64. */
GMM__DEVICE int gmm_qgemm_chunk_shift(const gmm_mat *m, int mn_major, int log2_mn64) {
    return (m->scaling == GMM_SCALING_NONE ? 3 : m->dtype == GMM_E2M1 ? 1 : 2) + (mn_major ? log2_mn64 : 0);
}
/* Bits of an element as stored. */
GMM__DEVICE int gmm_qgemm_element_bits(const gmm_mat *m) {
    return m->scaling == GMM_SCALING_NONE ? 16 : m->dtype == GMM_E2M1 ? 4 : 8;
}

/* The operand's first stage, from mn0 on, of a group with extents mn and k. `row`: first row of the group in the token
   matrix. */
GMM__DEVICE gmm_qgemm_operand gmm_qgemm_operand_init(const gmm_mat *m, const gmm__qview *view, int mn_major,
                                                     int log2_mn64, int64_t row, int32_t mn0, int32_t mn, int32_t k) {
    gmm_qgemm_operand s;
    const int bits = gmm_qgemm_element_bits(m), shift = gmm_qgemm_chunk_shift(m, mn_major, log2_mn64);
    const int64_t pitch = m->ld * bits / 8;
    const char *base = bits == 16 ? (const char *)m->data + row * pitch : (const char *)view->data;
    const int32_t first = (int32_t)threadIdx.x >> shift, chunk = (int32_t)threadIdx.x & ((1 << shift) - 1);
    s.aligned = (((uint64_t)(uintptr_t)base | (uint64_t)pitch) & 15) == 0;
    s.src = base + 16 * chunk + (mn_major ? first * pitch + (int64_t)mn0 * bits / 8 : (mn0 + first) * pitch);
    s.rows = (mn_major ? k : mn - mn0) - first;
    s.bytes = (int32_t)(((int64_t)(mn_major ? mn - mn0 : k) * bits + 7) / 8) - 16 * chunk;
    return s;
}
/* Advances to the next stage. */
GMM__DEVICE void gmm_qgemm_operand_advance(gmm_qgemm_operand *s, const gmm_mat *m, int mn_major) {
    const int bits = gmm_qgemm_element_bits(m);
    if (mn_major) s->rows -= GMM_QGEMM_TILE_K;
    else s->bytes -= GMM_QGEMM_TILE_K * bits / 8;
    s->src += mn_major ? GMM_QGEMM_TILE_K * (m->ld * bits / 8) : GMM_QGEMM_TILE_K * bits / 8;
}
/* Address of the thread's chunk i, and the number of its bytes that exist. */
GMM__DEVICE int gmm_qgemm_chunk_bytes(const gmm_qgemm_operand *s, const gmm_mat *m, int mn_major, int log2_mn64, int i,
                                      const char **src) {
    const int32_t row_offset = i * (GMM_QGEMM_THREADS >> gmm_qgemm_chunk_shift(m, mn_major, log2_mn64));
    *src = s->src + row_offset * (m->ld * gmm_qgemm_element_bits(m) / 8);
    return row_offset >= s->rows || s->bytes < 0 ? 0 : s->bytes < 16 ? s->bytes : 16;
}
GMM__DEVICE uint4 gmm_qgemm_load_chunk(const gmm_qgemm_operand *s, const gmm_mat *m, int mn_major, int log2_mn64,
                                       int i) {
    const char *src;
    const int count = gmm_qgemm_chunk_bytes(s, m, mn_major, log2_mn64, i, &src);
    uint4 v = make_uint4(0u, 0u, 0u, 0u);
    int e;
    if (count == 16 && s->aligned) return *(const uint4 *)(const void *)src;
#pragma unroll 1
    for (e = count - 1; e >= 0; e--) {
        v.w = __funnelshift_l(v.z, v.w, 8);
        v.z = __funnelshift_l(v.y, v.z, 8);
        v.y = __funnelshift_l(v.x, v.y, 8);
        v.x = v.x << 8 | (uint32_t)(uint8_t)src[e];
    }
    return v;
}
/* Copies 16-bit tokens to the stage without conversion. */
GMM__DEVICE void gmm_qgemm_copy_tokens(const gmm_qgemm_operand *s, const gmm_mat *m, char *dst) {
    const char *src;
    int i, e;
#pragma unroll 1
    for (i = 0; i < GMM_QGEMM_TILE_M / 32; i++) {
        const int count = gmm_qgemm_chunk_bytes(s, m, 0, 1, i, &src);
        char *smem = dst + gmm_swizzle(threadIdx.x / 8 + 32 * i, threadIdx.x % 8, 2 * GMM_QGEMM_TILE_K);
        if (s->aligned) gmm_cp_async_16_zfill((uint32_t)__cvta_generic_to_shared(smem), src, count);
        else
#pragma unroll 1
            for (e = 0; e < 16; e++) smem[e] = e < count ? src[e] : (char)0;
    }
}

/* Leading dimension of a stage's scales that are applied to elements. Block-scaled kinds have none, so the tile is the
   wide one. */
enum { GMM_QGEMM_SCALE_LD = GMM_QGEMM_TILE_M + gmm_qgemm_tile_n_0 };

/* Converts chunk i of codes to elements at `dst`. With `scales` each element is multiplied by the scale of its block;
   scales are elements, [block][GMM_QGEMM_SCALE_LD]. */
GMM__DEVICE void gmm_qgemm_dequantize_chunk(gmm_dtype dtype, const gmm_mat *m, int mn_major, int log2_mn64, int i,
                                            uint4 codes, char *dst, const uint16_t *scales) {
    const int fp4 = m->dtype == GMM_E2M1, shift = gmm_qgemm_chunk_shift(m, mn_major, log2_mn64);
    const uint32_t row = (threadIdx.x >> shift) + (uint32_t)(i * (GMM_QGEMM_THREADS >> shift));
    const uint32_t chunk = threadIdx.x & ((1u << shift) - 1);
    const uint32_t w[4] = { codes.x, codes.y, codes.z, codes.w };
    const int two_blocks = fp4 && m->scaling == GMM_SCALING_NV16; /* else a chunk is one block or part of one */
    uint32_t scale_pair[2] = { 0u, 0u };
    int e, j;
    if (scales && !mn_major) {
        const uint16_t *scale = scales + (fp4 ? two_blocks ? 2 * chunk : chunk : chunk / 2) * GMM_QGEMM_SCALE_LD + row;
        scale_pair[0] = scale[0] * 0x00010001u;
        scale_pair[1] = two_blocks ? scale[GMM_QGEMM_SCALE_LD] * 0x00010001u : scale_pair[0];
    }
#pragma unroll
    for (e = 0; e < 4; e++) { /* vectors of 8 elements of the row */
        const uint32_t vec8 = chunk * (fp4 ? 4 : 2) + e;
        uint32_t v[4];
        if (!fp4 && e >= 2) break;
        if (fp4) gmm_fp4_to_16bit_x8(dtype, w[e], v);
        else {
            gmm_fp8_to_16bit_x4(dtype, m->dtype, w[2 * e & 3], v);
            gmm_fp8_to_16bit_x4(dtype, m->dtype, w[(2 * e + 1) & 3], v + 2);
        }
        if (scales && mn_major) {
            const uint4 x = *(const uint4 *)(const void *)&scales[row / 32 * GMM_QGEMM_SCALE_LD + 8 * vec8];
            v[0] = gmm_mul_16bit_x2(dtype, v[0], x.x);
            v[1] = gmm_mul_16bit_x2(dtype, v[1], x.y);
            v[2] = gmm_mul_16bit_x2(dtype, v[2], x.z);
            v[3] = gmm_mul_16bit_x2(dtype, v[3], x.w);
        } else if (scales)
#pragma unroll
            for (j = 0; j < 4; j++) v[j] = gmm_mul_16bit_x2(dtype, v[j], scale_pair[e / 2]);
        *(uint4 *)(void *)(dst + gmm_swizzle(row, vec8, mn_major ? 128u << log2_mn64 : 2 * GMM_QGEMM_TILE_K)) =
            make_uint4(v[0], v[1], v[2], v[3]);
    }
}

/* Strides of the scales along k, in bytes: from block to block within four blocks, and from four blocks to the next
   four. They fit 32 bits, since gmm__mma_plan_quantized limits extents. */
typedef struct gmm_qgemm_scale_strides {
    int32_t block, block4;
} gmm_qgemm_scale_strides;

/* Strides for a group whose scales are laid out for the extent `mn`. */
GMM__DEVICE gmm_qgemm_scale_strides gmm_qgemm_scale_strides_of(const gmm_mat *m, int mn_major, int64_t mn) {
    const int swizzled = m->scale_order == GMM_SCALES_SWIZZLED;
    gmm_qgemm_scale_strides t;
    t.block = m->scaling == GMM_SCALING_1X128 ? 4 * (int32_t)gmm__round_up(mn, 4)
              : m->scaling == GMM_SCALING_128X128 ? 4
              : mn_major && !swizzled ? (int32_t)gmm__round_up(mn, 128) : 1;
    t.block4 = swizzled ? 512 : 4 * t.block;
    return t;
}
/* Address of the first scale of row i of A or B, one thread per row; NULL without scales and beyond the last row. */
GMM__DEVICE const uint8_t *gmm_qgemm_first_scale(const gmm__qview *v, gmm_scaling scaling, int32_t i, int32_t mn) {
    const int32_t width = gmm_block_along(scaling);
    return width && i < mn ? v->scale + gmm__qview_scale(v, i, 0) * (width == 128 ? 4 : 1) : NULL;
}
/* Loads the scales of a row of A or B in stage q: the bytes of its blocks, the first in the lowest bits, or the fp32
   scale of a block of 128. `first_scale`: of the row; NULL: no scales. Zeros beyond k and without scales. */
GMM__DEVICE uint32_t gmm_qgemm_load_scales(const uint8_t *first_scale, gmm_qgemm_scale_strides t, gmm_scaling scaling,
                                           int q, int32_t k) {
    const int count = scaling == GMM_SCALING_NV16 ? 4 : scaling == GMM_SCALING_MX32 ? 2 : 1;
    const int32_t first = count == 1 ? q / 2 : count * q;
    const uint8_t *src = first_scale + (first >> 2) * (int64_t)t.block4 + (first & 3) * t.block;
    uint32_t bits = 0;
    int i;
    if (!first_scale || q * GMM_QGEMM_TILE_K >= k) return 0u;
    if (count == 1) return *(const uint32_t *)(const void *)src;
#pragma unroll
    for (i = 0; i < 4; i++)
        if (i < count && q * GMM_QGEMM_TILE_K + i * (GMM_QGEMM_TILE_K / count) < k)
            bits |= (uint32_t)src[i * t.block] << (8 * i);
    return bits;
}
/* Stores the loaded scales of row `index` of A or B into `slot`, [block][ld]: in the dtype of the elements or, for
   block-scaled sums, as fp32, where unquantized tokens have the scale 1. */
GMM__DEVICE void gmm_qgemm_store_scales(gmm_dtype dtype, int block_scaled, gmm_scaling scaling, uint32_t bits,
                                        char *slot, int index, int ld) {
    const int mx = scaling == GMM_SCALING_MX32;
    if (block_scaled) {
        float *dst = (float *)(void *)slot + index;
        dst[0] = scaling == GMM_SCALING_NONE ? 1.0f : mx ? gmm_e8m0_to_f32((uint8_t)bits) : __uint_as_float(bits);
        dst[ld] = mx ? gmm_e8m0_to_f32((uint8_t)(bits >> 8)) : 1.0f;
    } else {
        uint16_t *dst = (uint16_t *)(void *)slot + index;
        uint32_t v[2];
        if (mx) { /* E8M0 as BF16 */
            v[0] = bits & 0xFFu;
            v[1] = bits >> 8;
            dst[0] = (uint16_t)(v[0] == 0 ? 0x0040u : v[0] == 255 ? 0x7FFFu : v[0] << 7);
            dst[ld] = (uint16_t)(v[1] == 0 ? 0x0040u : v[1] == 255 ? 0x7FFFu : v[1] << 7);
        } else {
            gmm_fp8_to_16bit_x4(dtype, GMM_E4M3, bits, v);
            dst[0] = (uint16_t)v[0];
            dst[ld] = (uint16_t)(v[0] >> 16);
            dst[2 * ld] = (uint16_t)v[1];
            dst[3 * ld] = (uint16_t)(v[1] >> 16);
        }
    }
}

/* The scale of row i of A or B that is constant along k, to be divided by gmm_qgemm_outer_divisor: for NV16 the amax
   over 6 e4m3_max, for other scalings over 1. */
GMM__DEVICE float gmm_qgemm_outer_scale(const gmm__qview *v, gmm_scaling scaling, int32_t i) {
    if (scaling == GMM_SCALING_NV16) return v->amax[v->per_line ? i : 0];
    return scaling == GMM_SCALING_TENSOR || scaling == GMM_SCALING_ROW ? gmm__qview_factor(v, i, 0, 1) : 1.0f;
}
GMM__DEVICE float gmm_qgemm_outer_divisor(const gmm__qview *v, gmm_scaling scaling) {
    return scaling == GMM_SCALING_NV16 ? 6.0f * v->e4m3_max : 1.0f;
}

/* Views of the operands of a tile's group. */
typedef struct gmm_qgemm_views { gmm__qview a, b; } gmm_qgemm_views;
GMM__DEVICE gmm_qgemm_views gmm_qgemm_views_of(const gmm_qgemm_args *args, int k_grouped, const gmm_gemm_tile *t) {
    const int64_t start = (int64_t)args->p.tiles[t->g] * GMM_QGEMM_TILE_M, rows = k_grouped ? t->k : t->m;
    gmm_qgemm_views v;
    v.a = gmm__qview_of(&args->a, args->a_along, 1, t->g, t->row, start, rows, args->a_cols);
    v.b = gmm__qview_of(&args->b, args->b_along, k_grouped, t->g, k_grouped ? t->row : 0, k_grouped ? start : 0,
                        k_grouped ? rows : args->b_rows, args->b_cols);
    return v;
}

/* The scales of a tile's stages as a thread loads them: thread t those of row t of A and B together and, of the wide
   tile, of row t + 256. Of block-scaled kinds the group's strides are `strides`; those of others follow from the
   matrices. */
typedef struct gmm_qgemm_scales {
    const uint8_t *first[2];
    uint32_t bits[2]; /* of the stage that is stored next */
    gmm_qgemm_scale_strides strides;
} gmm_qgemm_scales;

/* Adds a block's four partial sums, times the scales of their two rows and two columns of D, to `sum`. `lift`: powers
   of two by which the rows' scales were divided and the columns' scales are multiplied (gmm__scale_lift). */
GMM__DEVICE void gmm_qgemm_promote(float sum[4], float partial[4], const float row_scales[2], const float col_scales[2],
                                   const float lift[2]) {
    int h;
#pragma unroll
    for (h = 0; h < 4; h++) {
        sum[h] = __fmaf_rn(__fmul_rn(partial[h], row_scales[h / 2]), col_scales[h % 2] * lift[h / 2], sum[h]);
        partial[h] = 0.0f;
    }
}

#ifndef GMM_NO_QUANT
#define GMM__BODY GMM__BODY_QUANTIZED
/* kernel, operation (dgrad is m-grouped as fwd is), kind */
#if GMM__HOLDS(1)
#define GMM__ROW (gmm_gemm_quant_bf16_128x256x64_mma, fwd, bf16)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_gemm_quant_f16_128x256x64_mma, fwd, f16)
#include GMM_KERNELS_FILE
#endif
#if GMM__HOLDS(7)
#define GMM__ROW (gmm_gemm_dgrad_quant_bf16_128x256x64_nn_mma, dgrad, bf16_nn)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_gemm_dgrad_quant_f16_128x128x64_block_scaled_nn_mma, dgrad, f16_block_scaled_nn)
#include GMM_KERNELS_FILE
#endif
#if GMM__HOLDS(6)
#define GMM__ROW (gmm_gemm_quant_f16_128x128x64_block_scaled_mma, fwd, f16_block_scaled)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_gemm_wgrad_quant_bf16_128x256x64_mma, wgrad, bf16)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_gemm_wgrad_quant_bf16_128x256x64_tn_mma, wgrad, bf16_tn)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_gemm_wgrad_quant_f16_128x256x64_mma, wgrad, f16)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_gemm_wgrad_quant_f16_128x128x64_block_scaled_mma, wgrad, f16_block_scaled)
#include GMM_KERNELS_FILE
#endif
#undef GMM__BODY

/* One row per kernel. */
typedef struct gmm_qgemm_kernel {
    gmm_gemm_op op;
    int32_t mn_major_a, mn_major_b, block_scaled; /* of the kind */
    int32_t tile_cols, shared;
    gmm_dtype dtype;
    const void *function;
    const char *name;
} gmm_qgemm_kernel;

#if GMM__HOLDS(0)
#define GMM__X(op, kind, kernel) GMM__DECLARE_KERNEL(kernel, gmm_qgemm_args)
GMM_QUANT_KERNEL_LIST(GMM__X)
#undef GMM__X
static const gmm_qgemm_kernel gmm_qgemm_kernels[] = {
#define GMM__X(op, kind, kernel) \
    { GMM__CAT(gmm_gemm_, op), GMM__CAT(gmm_qgemm_ta_, kind), GMM__CAT(gmm_qgemm_tb_, kind), \
      GMM__CAT(gmm_qgemm_block_scaled_, kind), \
      GMM__CAT(gmm_qgemm_block_scaled_, kind) ? gmm_qgemm_tile_n_1 : gmm_qgemm_tile_n_0, \
      GMM__CAT(gmm_qgemm_block_scaled_, kind) ? gmm_qgemm_smem_bytes_1 : gmm_qgemm_smem_bytes_0, \
      (gmm_dtype)GMM__CAT(gmm_qgemm_dtype_, kind), (const void *)kernel, #kernel },
    GMM_QUANT_KERNEL_LIST(GMM__X)
#undef GMM__X
};
enum { GMM_QGEMM_KERNELS = (int)(sizeof gmm_qgemm_kernels / sizeof gmm_qgemm_kernels[0]) };

static GMM__UNUSED cudaError_t gmm_launch_qgemm(int32_t kernel, int32_t grid, const gmm_qgemm_args *args,
                                                cudaStream_t stream) {
    const gmm_qgemm_kernel *row = &gmm_qgemm_kernels[kernel];
    const cudaError_t error = cudaFuncSetAttribute(row->function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                   row->shared);
    if (error != cudaSuccess) return error;
    return gmm_launch(row->function, dim3((unsigned)grid), GMM_QGEMM_THREADS, row->shared, args, stream);
}
#endif /* GMM__HOLDS(0) */
#endif /* GMM_NO_QUANT */

/* ................................................................................................... Tail of D ... */

/* Zeroes the rows of D behind the last group, for engines whose GEMM kernel does not do it. */
enum { GMM_TAIL_THREADS = 256 };
typedef struct gmm_tail_args {
    gmm_kmat d;        /* [capacity, n] */
    gmm_groups groups; /* splits in device memory */
    int32_t n;
} gmm_tail_args;

/* Number of rows in a split by the rule of gmm_split_end: the largest offset or the sum of the sizes, saturated at
   the capacity. One warp. */
GMM__DEVICE int64_t gmm_split_rows(const gmm_groups *s) {
    const int is_offsets = s->form == GMM_SPLIT_OFFSETS;
    const int64_t capacity = s->capacity;
    int64_t rows = 0, v;
    int32_t g;
    int step;
    for (g = (int32_t)(threadIdx.x & 31); g < s->count; g += 32) {
        v = gmm_split_value(s, (int64_t)g + is_offsets);
        v = v < 0 ? 0 : v > capacity ? capacity : v;
        rows = is_offsets ? (v > rows ? v : rows) : (v > capacity - rows ? capacity : v + rows);
    }
    for (step = 16; step > 0; step /= 2) {
        v = (int64_t)__shfl_xor_sync(0xFFFFFFFFu, (long long)rows, step);
        rows = is_offsets ? (v > rows ? v : rows) : (v > capacity - rows ? capacity : v + rows);
    }
    return rows;
}

#if GMM__HOLDS(0)
/* Zeroes rows [rows of the split, capacity) of D, one warp per row. */
GMM__KERNEL __launch_bounds__(GMM_TAIL_THREADS) gmm_linear_tail(const __grid_constant__ gmm_tail_args args) {
    gmm_pdl_wait();
    gmm_gemm_zero_tail(&args.d, gmm_split_rows(&args.groups), args.groups.capacity, args.n);
}

static GMM__UNUSED cudaError_t gmm_launch_tail(int32_t grid, int pdl, const gmm_tail_args *args, cudaStream_t stream) {
    return gmm_launch_pdl((const void *)gmm_linear_tail, pdl, (unsigned)grid, GMM_TAIL_THREADS, 0, GMM__SM_KIB(8, 0),
                          args, stream);
}
#endif /* GMM__HOLDS(0) */

/* ................................................................................................ Gathered rows ... */

/* The index of a token matrix whose rows are gathered: row r of the product is row at[r] / div of the matrix; with a
   negative entry, or one past the matrix, a row of zeros. */
typedef struct gmm_row_index {
    const int32_t *at; /* [T]; NULL: rows are not gathered, and the functions below are not called */
    uint32_t *fault;   /* where GMM_FAULT_INDEX is set; NULL: it is not wanted */
    int32_t div, rows; /* divisor >= 1; rows of the matrix */
} gmm_row_index;

/* The row of the matrix that is row r of the product; -1: zeros. */
GMM__DEVICE int32_t gmm_indexed_row(const gmm_row_index *index, int64_t r) {
    int32_t row = index->at[r];
    if (index->div != 1 && row >= 0) row = (int32_t)((uint32_t)row / (uint32_t)index->div);
    return row >= 0 && row < index->rows ? row : -1;
}
/* The same, and an entry past the matrix is reported. */
GMM__DEVICE int32_t gmm_checked_row(const gmm_row_index *index, int64_t r) {
    const int32_t row = gmm_indexed_row(index, r);
    if (row < 0 && index->at[r] >= 0 && index->fault) atomicOr(index->fault, (uint32_t)GMM_FAULT_INDEX);
    return row;
}
/* Reports entries past the matrix among those of rows begin, begin + step, ... below `end`: the threads that share the
   rows of a call begin at different ones. */
GMM__DEVICE void gmm_report_index_faults(const gmm_row_index *index, int64_t begin, int64_t end, int64_t step) {
    const int64_t limit = (int64_t)index->rows * index->div;
    int past = 0;
    int64_t row;
    if (!index->fault) return;
    for (row = begin; row < end; row += step) past |= index->at[row] >= limit;
    if (past) atomicOr(index->fault, (uint32_t)GMM_FAULT_INDEX);
}

/* Copies the rows that an index names to a dense matrix in the workspace, for products that do not gather them. */
enum { GMM_GATHER_THREADS = 256, GMM_GATHER_PER_SM = 8 }; /* threads of a CTA; CTAs of a multiprocessor */
typedef struct gmm_gather_args {
    const char *src;
    char *dst;           /* 16-byte aligned */
    int64_t ld, pitch;   /* bytes from row to row of src and dst; pitch is a multiple of 16 */
    int64_t bytes;       /* of a row, an even number */
    gmm_row_index index;
    gmm_groups groups;   /* splits in device memory: rows behind the last group are not copied */
} gmm_gather_args;

#if GMM__HOLDS(0)
/* One warp per row. */
GMM__KERNEL __launch_bounds__(GMM_GATHER_THREADS) gmm_gather_rows(const __grid_constant__ gmm_gather_args args) {
    gmm_pdl_wait();
    const int64_t warps = (int64_t)gridDim.x * (GMM_GATHER_THREADS / 32), rows = gmm_split_rows(&args.groups);
    const int64_t thread = (int64_t)blockIdx.x * GMM_GATHER_THREADS + threadIdx.x;
    const int64_t vectors = (((uint64_t)(uintptr_t)args.src | (uint64_t)args.ld) & 15) == 0 ? args.bytes / 16 : 0;
    const int lane = (int)threadIdx.x & 31;
    int64_t r, x;
    gmm_report_index_faults(&args.index, thread, rows, warps * 32);
    for (r = thread / 32; r < rows; r += warps) {
        const int32_t row = gmm_indexed_row(&args.index, r);
        const char *const from = args.src + (row < 0 ? 0 : row * args.ld);
        char *const to = args.dst + r * args.pitch;
#pragma unroll 4
        for (x = lane; x < vectors; x += 32)
            ((uint4 *)to)[x] = row < 0 ? make_uint4(0, 0, 0, 0) : ((const uint4 *)from)[x];
        for (x = 8 * vectors + lane; x < args.bytes / 2; x += 32)
            ((uint16_t *)to)[x] = row < 0 ? (uint16_t)0 : ((const uint16_t *)from)[x];
    }
}

static GMM__UNUSED cudaError_t gmm_launch_gather(int32_t grid, int pdl, const gmm_gather_args *args,
                                                 cudaStream_t stream) {
    return gmm_launch_pdl((const void *)gmm_gather_rows, pdl, (unsigned)grid, GMM_GATHER_THREADS, 0,
                          GMM__SM_KIB(GMM_GATHER_PER_SM, 0), args, stream);
}
#endif /* GMM__HOLDS(0) */
/* ................................................................................ Groups as cuBLASLt reads them ... */

/* cuBLASLt's grouped mode reads sizes, leading dimensions and addresses of its matrices from arrays in device memory.
   The kernel writes them from the row offsets of the groups. Its matrices are column-major: A, B and D stand for w, x
   and y in forward, w, dy and dx in dgrad, x, dy and dw in wgrad. D has m rows and n columns, k is the contraction. */
enum { GMM_LT_A, GMM_LT_B, GMM_LT_D, GMM_LT_MATRICES };
enum { GMM_LT_THREADS = 256, GMM_LT_PER_SM = 8 }; /* threads of a CTA; CTAs of a multiprocessor where D is zeroed */
/* The arrays, of [G] entries each: m, n, k and the leading dimensions are int32, the addresses void *. */
enum { GMM_LT_M, GMM_LT_N, GMM_LT_K, GMM_LT_LD, GMM_LT_ADDRESS = GMM_LT_LD + GMM_LT_MATRICES,
       GMM_LT_ARRAY_COUNT = GMM_LT_ADDRESS + GMM_LT_MATRICES };
typedef struct gmm_lt_args {
    const int64_t *offsets;           /* [G + 1] */
    gmm_kmat matrix[GMM_LT_MATRICES]; /* per group, or one matrix of tokens */
    void *array[GMM_LT_ARRAY_COUNT];
    float *scalars;                   /* [2]: 1 and beta */
    float beta;
    int32_t groups, wgrad;
    int32_t rows, cols; /* features that are m in all operations; n in wgrad, else k */
    int32_t zero;       /* 1: zeroes D where no group writes it: rows behind the last group; wgrad: of empty groups */
    int64_t capacity;
} gmm_lt_args;

#if GMM__HOLDS(0)
/* An empty group of wgrad has no columns, so that its D is zeroed here or keeps its bits. Leading dimensions are those
   of the operands in empty groups too: with 0 or 1 cuBLASLt 13.10 wrote wrong gradients beside them. */
GMM__KERNEL __launch_bounds__(GMM_LT_THREADS) gmm_lt_groups(const __grid_constant__ gmm_lt_args args) {
    const int32_t first = (int32_t)(blockIdx.x * GMM_LT_THREADS + threadIdx.x);
    int32_t g, i;
    for (g = first; g < args.groups; g += (int32_t)gridDim.x * GMM_LT_THREADS) {
        const int64_t begin = args.offsets[g];
        const int32_t tokens = (int32_t)(args.offsets[g + 1] - begin);
        ((int32_t *)args.array[GMM_LT_M])[g] = args.rows;
        ((int32_t *)args.array[GMM_LT_N])[g] = args.wgrad ? (tokens ? args.cols : 0) : tokens;
        ((int32_t *)args.array[GMM_LT_K])[g] = args.wgrad ? tokens : args.cols;
        for (i = 0; i < GMM_LT_MATRICES; i++) {
            const gmm_kmat *m = &args.matrix[i];
            const int of_tokens = args.wgrad ? i != GMM_LT_D : i != GMM_LT_A;
            ((int32_t *)args.array[GMM_LT_LD + i])[g] = (int32_t)m->ld;
            ((void **)args.array[GMM_LT_ADDRESS + i])[g] =
                gmm_kmat_data(m, g) + (of_tokens ? begin * m->ld * gmm_kmat_size(m) : 0);
        }
    }
    if (first == 0) {
        args.scalars[0] = 1.0f;
        args.scalars[1] = args.beta;
    }
    if (!args.zero) return;
    if (!args.wgrad)
        gmm_gemm_zero_tail(&args.matrix[GMM_LT_D], args.offsets[args.groups], args.capacity, args.rows);
    for (g = 0; args.wgrad && g < args.groups; g++) {
        gmm_kmat d = args.matrix[GMM_LT_D];
        if (args.offsets[g + 1] > args.offsets[g]) continue;
        d.data = gmm_kmat_data(&d, g);
        gmm_gemm_zero_tail(&d, 0, args.cols, args.rows);
    }
}

static GMM__UNUSED cudaError_t gmm_launch_lt_groups(int32_t grid, const gmm_lt_args *args, cudaStream_t stream) {
    return gmm_launch((const void *)gmm_lt_groups, dim3((unsigned)grid), GMM_LT_THREADS, 0, args, stream);
}
#endif /* GMM__HOLDS(0) */

/* ..................................................................................... Work tiles of products ... */

/* The arithmetic of the tile scheduler of the Hopper products. Plain functions of host and device, without warp
   operations. The scheduler warp of a CTA calls them (scheduler.cuh, fp8_plan.cuh, body_*.cuh). A C or C++ compiler
   sees this part with GMM_KERNELS_SCHEDULE defined, and nothing else of this header.

   A work tile is the part of D that a CTA computes at once. A cluster tile is what a cluster computes at once: c work
   tiles, one per CTA; c, the size of clusters, is 1 or 2. Cluster tiles are numbered group after group; names say
   `work` for them. CTA b of a grid of B CTAs takes cluster tiles b / c, b / c + B / c, b / c + 2 B / c, ... work_ends
   says in which group a cluster tile lies; gmm_sm90_schedule_tile computes this CTA's work tile from the number of the
   cluster tile within the group. For wgrad of a skewed split the balanced order below replaces that order.

   In a group with an odd number of work tiles the last one is unpaired. The two CTAs of a cluster must pass as many
   stages as each other. In wgrad these depend on the group, so that the other CTA has no tile. In forward and dgrad the
   unpaired tiles of two groups make one cluster tile, the last one of the second group; if the number of all tiles is
   odd, the last unpaired one remains, and is the last cluster tile of the last group. So work_ends[g] is there half the
   number of work tiles before group g, rounded down, and work_ends[G] half of all, rounded up. */
#endif
#if !defined(GMM__SCHEDULE_DONE) && \
    (defined(GMM_KERNELS_SCHEDULE) || (defined(GMM_IMPLEMENTATION) && defined(__CUDACC__)))
#define GMM__SCHEDULE_DONE

/* The operand that the two work tiles of a cluster have in common, and that TMA multicasts. */
enum { GMM_SM90_MULTICAST_NONE, GMM_SM90_MULTICAST_B, GMM_SM90_MULTICAST_A };

/* A work tile. */
typedef struct gmm_sm90_tile {
    int32_t g, k;        /* group; length of the contraction */
    int32_t row, end;    /* the group's rows in the token matrices: [row, end) */
    int32_t m0, n0;      /* first row (within the group) and first column of D */
    int32_t rows, cols;  /* rows and columns that exist; cols <= 0: no tile, its stages pass the pipeline unloaded */
    int32_t row_blocks;  /* blocks of rows that are multiplied: 16 rows each, FP8 64; 0 ends the ring */
    int32_t multicast;   /* GMM_SM90_MULTICAST_* */
} gmm_sm90_tile;

#ifndef __CUDACC__
/* What the functions below read of a product's arguments (common/epilogue.cuh): extents of D and of the contraction;
   the one that varies between groups is not read. */
typedef struct gmm_gemm_args {
    int32_t groups, m, n, k;
} gmm_gemm_args;
#endif

/* The upper 32 bits of a product. */
GMM__HD uint32_t gmm_sm90_umulhi(uint32_t a, uint32_t b) {
#ifdef __CUDA_ARCH__
    return __umulhi(a, b);
#else
    return (uint32_t)((uint64_t)a * b >> 32);
#endif
}

/* The balanced order of wgrad, whose tiles take as long as their group has rows. In the order of groups some clusters
   would get more long tiles than others. Besides, clusters that are at distant rows of the same group do not find each
   other's operands in the L2. So the scheduler passes twice over the groups, the longest first. In the first pass every
   cluster takes the same number of cluster tiles of a group, its rounds, so that all clusters stay at the same rows. In
   the second pass the cluster tiles that are left of a group, its rest, are given to the clusters with the least load
   so far, one each. A group of 70 cluster tiles has one round and a rest of 4 for 66 clusters. The struct lies where
   work_ends lies otherwise. */
enum { GMM_SM90_BALANCE_GROUPS = 256, GMM_SM90_BALANCE_CLUSTERS = 96 };
typedef struct gmm_sm90_balance {
    int32_t load[GMM_SM90_BALANCE_CLUSTERS];       /* length of the rests that each cluster has been given */
    unsigned char order[GMM_SM90_BALANCE_GROUPS];  /* groups, the longest first, equal ones by number */
    int32_t rounds;   /* cluster tiles of a group that each cluster takes in the first pass */
    int32_t rest;     /* cluster tiles of a group that are left for the second pass */
    int32_t min_load; /* least load of a tile, in stages: the time that D takes */
    int32_t cluster, clusters; /* number of this cluster, and how many there are */
    int32_t position; /* of the group at hand: 0 to G - 1 in the first pass, G to 2 G - 1 in the second; -1: none yet */
    int32_t first;    /* number of this cluster's first cluster tile there */
    int32_t count;    /* its cluster tiles in that group; while a rest is given out, those of the rest */
    int32_t below;    /* second pass: clusters with less load */
} gmm_sm90_balance;

/* What the scheduler warp of a CTA knows. Tiles hold at most `max_blocks` blocks of `block_rows` rows, begin at
   multiples of `row_align` rows and `col_align` columns, and cover the columns of D in `tiles_n` tiles. */
typedef struct gmm_sm90_scheduler {
    const gmm_gemm_args *p;
    int32_t *ends;          /* [G + 1] ends of the groups' rows */
    int32_t *work_ends;     /* [G + 1] cluster tiles before the groups, and all (gmm_sm90_count_work) */
    int32_t *padded_starts; /* [G + 1] where groups start in padded copies; FP8 products alone */
    int k_grouped;          /* wgrad: the rows of a group are the contraction */
    int cluster_along_n;    /* the CTAs of a cluster take neighbouring column tiles of the same rows, else neighbouring
                               row tiles of the same columns (gmm_sm90_schedule_tile) */
    int32_t tiles_n, max_blocks; /* 0 before the split has been planned; FP8: of the first tile before */
    int32_t odd_tiles;      /* forward, dgrad with clusters of two: whether the number of all work tiles is odd */
    int32_t g;              /* group in which the search for the next tile begins */
    int32_t balanced;       /* wgrad in the balanced order: a gmm_sm90_balance lies in work_ends */
    int32_t block_rows, row_align, col_align;
} gmm_sm90_scheduler;

/* Size of a CTA's cluster, and the CTA's number in it. Callers pass gmm_sm90_this_cta(), which reads special registers,
   so that no general register holds the two between calls. */
typedef struct gmm_sm90_cta {
    int32_t cluster_size, cta_rank;
} gmm_sm90_cta;

/* a / b for a >= 0 and b > 0: an unsigned division takes fewer instructions. */
GMM__HD int32_t gmm_sm90_divide(int32_t a, int32_t b) { return (int32_t)((uint32_t)a / (uint32_t)b); }

/* The cluster tile that a cluster takes as its `index`-th, counted from 0. stride: clusters of the grid. A shift
   divides by cluster_size, which is 1 or 2. */
GMM__HD int32_t gmm_sm90_work_number(uint32_t block, uint32_t cluster_size, uint32_t index, int32_t stride) {
    return (int32_t)((block >> (cluster_size - 1)) + index * (uint32_t)stride);
}

/* The number of tiles of at most `max_blocks` blocks of `block_rows` rows that cover `rows` rows. */
GMM__HD int32_t gmm_sm90_tile_count(int32_t rows, int32_t block_rows, int32_t max_blocks) {
    return gmm_sm90_divide(gmm_sm90_divide(rows + block_rows - 1, block_rows) + max_blocks - 1, max_blocks);
}

/* Stages of a tile. An empty contraction takes one stage of zeros, which the ragged maps deliver. */
GMM__HD uint32_t gmm_sm90_k_tiles(int32_t k) { return k > 0 ? (uint32_t)(k + 63) / 64 : 1; }

/* Row tiles of group g. */
GMM__HD int32_t gmm_sm90_row_tiles(const gmm_sm90_scheduler *s, int32_t g) {
    return gmm_sm90_tile_count(s->k_grouped ? s->p->m : s->ends[g + 1] - s->ends[g], s->block_rows, s->max_blocks);
}
/* Work tiles of group g; in wgrad rounded up to whole cluster tiles. */
GMM__HD int32_t gmm_sm90_group_tiles(const gmm_sm90_scheduler *s, int32_t g, int32_t cluster_size) {
    const int32_t tiles = gmm_sm90_row_tiles(s, g) * s->tiles_n;
    return s->k_grouped ? (tiles + cluster_size - 1) & -cluster_size : tiles;
}

/* Tiles along the columns of D where each of `nonempty` groups fits one tile of rows: at least `min_tiles`, and as many
   more, up to `max_tiles`, as fill the last round of a grid of `grid` CTAs. Unless loads of weights bound the product
   (loads_bound), no more than the width of the widest tile demands: narrower ones beside it would load rows once more
   and save no time. nonempty > 0. */
GMM__HD int32_t gmm_sm90_filling_tiles(int32_t nonempty, int32_t min_tiles, int32_t max_tiles, int32_t grid,
                                       int32_t cluster_size, int loads_bound) {
    /* rounded down to a multiple of the cluster size */
    const int32_t filling = gmm_sm90_divide(gmm_sm90_divide(nonempty * min_tiles + grid - 1, grid) * grid, nonempty) &
                            -cluster_size;
    const int32_t tiles = filling < min_tiles ? min_tiles : filling < max_tiles ? filling : max_tiles;
    const int32_t widest = gmm_sm90_divide(max_tiles + tiles - 1, tiles);
    return loads_bound ? tiles : gmm_sm90_divide(max_tiles + widest - 1, widest);
}
/* `tiles` tiles divide `count` units as evenly as possible: the first unit of tile i. */
GMM__HD int32_t gmm_sm90_even_begin(int32_t count, int32_t tiles, int32_t i) {
    const int32_t each = gmm_sm90_divide(count, tiles), rest = count - tiles * each;
    return i * each + (i < rest ? i : rest);
}

/* Whether the balanced order pays: the largest of `nonempty` groups has more than 5/4 of their mean, which is 1024 rows
   or more, so that the time of tiles depends on their rows. */
GMM__HD int gmm_sm90_is_skewed(int32_t rows, int32_t max_rows, int32_t nonempty) {
    return rows / 1024 >= nonempty && 4.0f * (float)max_rows * (float)nonempty > 5.0f * (float)rows;
}
/* Load of a tile of wgrad, in stages of 64 rows: products and what they do not hide, or the time of D if that is
   longer. FP8 counts in the same unit, although its stages have 128 rows. */
enum { GMM_SM90_OVERHEAD_STAGES = 2 }; /* per tile, for what its products do not hide */
GMM__HD int32_t gmm_sm90_tile_load(const gmm_sm90_balance *b, int32_t k) {
    const int32_t stages = (int32_t)gmm_sm90_k_tiles(k) + GMM_SM90_OVERHEAD_STAGES;
    return stages > b->min_load ? stages : b->min_load;
}
/* The position behind b->position; the first pass is left out where groups have no rounds. */
GMM__HD int32_t gmm_sm90_next_position(const gmm_sm90_balance *b, int32_t groups) {
    return b->position < 0 && b->rounds == 0 ? groups : b->position + 1;
}
/* The number within its group of the i-th cluster tile that this cluster takes there. groups: of the split. */
GMM__HD int32_t gmm_sm90_balanced_work(const gmm_sm90_balance *b, int32_t groups, int32_t i) {
    return b->position < groups ? i * b->clusters + b->cluster : b->rounds * b->clusters + b->below;
}

/* How the order of tiles differs from group to group, so that a CTA which got a large tile of one group gets a smaller
   one of the next. */
enum {
    GMM_SM90_ROTATE_TILES = 1, /* each group starts at another of its tiles (golden ratio) */
    GMM_SM90_ROTATE_ROWS = 2   /* each group has another row of tiles first in its columns; at most 8 rows */
};
/* The rotation of wgrad, whose tiles are nearly equal: only where a CTA would otherwise get the same tile of every
   group, or tiles of the same rows, of which the last ones may be lower. stride: clusters of the grid. group_work: 0 in
   the balanced order, where rows alone rotate. */
GMM__HD int gmm_sm90_wgrad_rotation(int32_t stride, int32_t group_work, int32_t tiles_m) {
    if (group_work > 0 && stride % group_work == 0) return GMM_SM90_ROTATE_TILES;
    return tiles_m <= 8 && stride % tiles_m == 0 ? GMM_SM90_ROTATE_ROWS : 0;
}

/* Fills in the work tile `t` of CTA `cta` in cluster tile `work` of group t->g; t->g becomes the group of an unpaired
   tile. group_work: cluster tiles of the group in wgrad. The two work tiles of a cluster have the same columns, and B
   is multicast, where tiles have 192 or 256 columns; with `cluster_along_n`, which is s->cluster_along_n (128 columns),
   they have the same rows, and A, the larger operand, is multicast. If the number of tiles along that axis is odd, the
   last ones are paired along the other axis. Rasterization within a group: along the rows first, in bands of 8
   clusters, so that tiles in flight read the same operands. */
GMM__HD void gmm_sm90_schedule_tile(const gmm_sm90_scheduler *s, int cluster_along_n, int32_t group_work, int32_t work,
                                    const int rotation, const gmm_sm90_cta cta, gmm_sm90_tile *t) {
    const gmm_gemm_args *p = s->p;
    const int32_t tiles_n = s->tiles_n, cluster_size = cta.cluster_size;
    int32_t cta_rank = cta.cta_rank, m, units, tiles_m = gmm_sm90_row_tiles(s, t->g), clusters_m, clusters_n, tm, tn;
    if (!s->k_grouped) group_work = tiles_m * tiles_n >> (cluster_size - 1); /* without an unpaired tile */
    if (!s->k_grouped && work == group_work) { /* unpaired tiles */
        const int remains = s->odd_tiles && t->g == p->groups - 1;
        if (!remains) { /* CTA 1 takes that of this group, CTA 0 that of the group before with an odd number */
            t->g -= !cta_rank;
            cta_rank = 0;
        }
        while (!((tiles_m = gmm_sm90_row_tiles(s, t->g)) * tiles_n & 1)) t->g--;
        work = tiles_m * tiles_n >> 1;
    } else if (rotation == GMM_SM90_ROTATE_TILES) {
        work += (int32_t)gmm_sm90_umulhi((uint32_t)t->g * 2654435769u, (uint32_t)group_work);
        if (work >= group_work) work -= group_work;
    }
    t->row = s->ends[t->g];
    t->end = s->ends[t->g + 1];
    m = s->k_grouped ? p->m : t->end - t->row;
    t->k = s->k_grouped ? t->end - t->row : p->k;
    clusters_m = cluster_along_n ? tiles_m : tiles_m >> (cluster_size - 1);
    clusters_n = cluster_along_n ? tiles_n >> (cluster_size - 1) : tiles_n;
    t->multicast = cluster_size == 1 ? GMM_SM90_MULTICAST_NONE
                   : cluster_along_n ? GMM_SM90_MULTICAST_A : GMM_SM90_MULTICAST_B;
    if (work < clusters_m * clusters_n) {
        const int32_t band = clusters_m > 8 ? gmm_sm90_divide(work, 8 * clusters_n) : 0;
        const int32_t rows_of_clusters = clusters_m - 8 * band;
        const int32_t height = rows_of_clusters < 8 ? rows_of_clusters : 8;
        work -= 8 * band * clusters_n;
        tn = gmm_sm90_divide(work, height);
        work -= tn * height;
        if (s->k_grouped && rotation == GMM_SM90_ROTATE_ROWS) work = (work + t->g) % height;
        tm = 8 * band + work;
        if (cluster_along_n) tn = tn * cluster_size + cta_rank;
        else tm = tm * cluster_size + cta_rank;
    } else { /* the last tiles of an odd number along this axis: two neighbours along the other axis */
        work = 2 * (work - clusters_m * clusters_n);
        /* the neighbours have the other operand in common */
        t->multicast = work + 1 < (cluster_along_n ? tiles_m : tiles_n)
                     ? GMM_SM90_MULTICAST_A + GMM_SM90_MULTICAST_B - t->multicast : GMM_SM90_MULTICAST_NONE;
        tm = cluster_along_n ? work + cta_rank : tiles_m - 1;
        tn = cluster_along_n ? tiles_n - 1 : work + cta_rank;
        /* The CTA beside an unpaired tile that no other joins has no tile: its column tile lies beyond the last one, so
           that cols <= 0. Along the columns, tn is that already. */
        if (tm >= tiles_m) {
            tm = tiles_m - 1;
            tn = tiles_n;
        }
    }
    units = gmm_sm90_divide(m + s->row_align - 1, s->row_align);
    t->m0 = s->row_align * gmm_sm90_even_begin(units, tiles_m, tm);
    t->rows = s->row_align * gmm_sm90_even_begin(units, tiles_m, tm + 1) - t->m0;
    if (t->rows > m - t->m0) t->rows = m - t->m0;
    t->row_blocks = gmm_sm90_divide(t->rows + s->block_rows - 1, s->block_rows);
    units = gmm_sm90_divide(p->n + s->col_align - 1, s->col_align);
    t->n0 = s->col_align * gmm_sm90_even_begin(units, tiles_n, tn);
    t->cols = s->col_align * gmm_sm90_even_begin(units, tiles_n, tn + 1) - t->n0;
    if (t->cols > p->n - t->n0) t->cols = p->n - t->n0;
}
#endif /* GMM__SCHEDULE_DONE */
#if defined(GMM__GEMM_DONE) && !defined(GMM__GEMM_REST_DONE) /* what follows is of the kernels again */
#define GMM__GEMM_REST_DONE
/* ................................................................................... Grouped products on Hopper ... */

/* The grouped products of common/epilogue.cuh, computed by wgmma (sm_90a). alpha2 multiplies the sum after alpha.

   swap_ab. A tile of D is computed transposed: the A operand of wgmma is B (the weights, M = 64 columns of D per
   instruction), and its B operand is A (the tokens, N = rows of D). The columns of D are multiples of 64 in nearly
   every layer, while the rows of groups vary. N comes in steps of 8 or 16, so a group is cut into tiles of nearly equal
   height, each with at most 15 rows of padding. Tile names are M x N of D: rows x columns.

   Warp roles of a CTA (384 threads; 512 in tiles with `gather`), and registers per thread after setmaxnreg (two CTAs
   per multiprocessor: in brackets). Warps 0 to 7 are two consumer warp groups with 232 [96]; the others have 40 [48].
   In wgrad, whose scheduler warp needs more, 224 and 56; with `gather`, where there is one more warp group, 216 and 40.
       consumers          cooperative tiles (`consumers` 2): each warp group has half of the tile's columns.
                          ping-pong tiles (`consumers` 1): the warp groups alternate between tiles, so that one stores
                          while the other multiplies; a warp group begins when the other's last stage is full
                          (last_stage_full), so that operands are read in the order in which they are loaded.
       producer, warp 8   loads every stage by TMA: one thread of the warp.
       scheduler          warp 9 (packed weights: warp 11): chooses work tiles and writes them to the tile ring.
       check, warp 10     compares the split with the early plan (below), then is a store warp in wgrad.
       scale loader       packed weights, warp 9: copies the scales of every stage.
       gather             tiles with `gather`, warps 12 to 15: load A, whose rows they gather (gather.cuh).
       store              wgrad, warps 10 and 11: move D between memory and store slots by TMA, in parts of 64 rows x
                          256 bytes. Four slots serve both warp groups in the order of tiles, which leaves shared memory
                          to stages.

   Pipeline. An arrow is a barrier, which its left side completes and its right side waits for:
       scheduler  --tile_full[16]-->  producer, consumers, store, gather, scale loader  --batch_empty[4]-->  scheduler
       producer   --full[stage]-->    consumers  --empty[stage]-->  producer (of both CTAs if an operand is multicast)
       scale loader  --full[stage]--> consumers  --empty[stage]-->  scale loader (packed weights)
       gather     --full[stage]-->    consumers  --empty[stage]-->  gather (gathered rows)
       store      --slot.empty[4]-->  consumers  --slot.full[4]-->  store (wgrad)
       consumers  --last_stage_full[i]-->  the other consumers (ping-pong)
       scheduler  --first_tile_planned-->  producer, check
       check      --split_checked-->  scheduler; where the early plan holds, check completes tile_full[0]

   mbarriers (barriers.cuh). `n` is what the wait is for: stage number n of all tiles, S stages; tile number n; part n
   of D. A wait names the parity of the phase that it waits for; a first wait for "empty" passes at once, as it names
   the phase before the first.
       barrier         completed by, arrivals per phase                            waited for by      parity of wait
       full[n % S]     the producer (1, and the bytes of the TMA boxes);           consumers          n / S
                       packed weights also the 32 lanes of the scale loader (33);
                       gathered rows the 128 lanes of the gather warps (129)
       empty[n % S]    consumer warps that multiply the tile, of all CTAs of the   producer, gather,  n / S + 1
                       cluster (4 consumers x cluster size)                        scale loader
       tile_full[n % 16]  the scheduler lane that wrote tile n; tile 0 of an early readers of the     n / 16
                       plan: lane 0 of check (1)                                   ring
       first_tile_planned  lane 0 of the scheduler: the early plan is complete (1) producer, check    0
       split_checked   lane 0 of check, behind planned_late (1)                    scheduler          0
       batch_empty[n / 4 % 4]  one thread of every reader of the ring (8 consumer  scheduler          n / 16 + 1
                       warps, producer; wgrad: 2 store warps; packed: scale loader;
                       gathered rows: 4 gather warps)
       last_stage_full[i]  warps of consumer warp group i, when the last stage     the other group    n / 2, n: number
                       of its tile is full (4)                                                        of its last tile
       slot[n % 4].empty  the two lanes of a store warp, with old D where beta     consumers          n / 4
                       is not 0 (2)
       slot[n % 4].full   warps of the warp group that wrote part n (4)            store warp         n / 4
   Named barriers (GMM_BAR_*): CONSUMER + i joins warp group i; ORDER + i, the order barrier of warp group i, holds the
   stores of wgrad in the order of tiles.

   Shared memory (shared.cuh), in KiB: stages of B, A and scales; store slots; then barriers, tile ring and tables.
       tile                stages              slots       tile            stages              slots
       160x256 (gather too) 4 x (32 + 20)      4 x 4       mx8_192x128     6 x (8 + 24 + 1)    4 x 4
       256x128 (short too) 4 x (16 + 32)       4 x 8       mx4, nv4 192x128  7 x (4 + 24 + 1)  4 x 4
       176x128             5 x (16 + 22)       4 x 8       mx8_48x128      6 x (8 + 6 + 1)     4 x 4
       192x128             4 x (16 + 24)       4 x 16      mx4, nv4 64x128  7 x (4 + 8 + 1)    4 x 4
       128x128             5 x (16 + 16)       4 x 16

   A cluster of two CTAs takes two tiles at once: two row tiles of the same columns share B, or two column tiles of the
   same rows share A; the shared operand is multicast, but for gathered rows. A CTA exits when all its stages are empty:
   the other CTA of the cluster has then arrived at its barriers for the last time.

   Deferred store (256x128): the accumulators of a finished tile are packed to 16 bits and stay in registers; a few rows
   are stored in every stage of the next tile, which hides the store without a slot for a whole tile: 32 rows, so that
   256 rows need 8 stages; short_256x128 stores 64 and is for contractions of fewer stages. The last tile of a CTA,
   which no stage follows, is stored at once, through the memory of the stages (gmm_sm90_store_last_).

   Small-M mode: where groups are so small that the loads of weights bound forward, the producer requests two
   stages at a time (GMM__SMALL_M).

   A kernel with two tiles uses the one whose price for the split is lower (gmm_sm90_choose_tile, in the scheduler
   warp).

   Early plan. The scheduler reads the split before griddepcontrol.wait and plans the first tile by it, and the producer
   determines what it will load. Meanwhile check reads the split again, after the wait. If it is equal, check publishes
   the first tile; else the scheduler plans anew (planned_late). Where the plan would need more than the split, or write
   device memory, it is made after the wait (gmm_sm90_plans_early).

   Ragged maps address token matrices whose rows are s bytes apart: dimensions {features, 2^30, ends, wraps}, strides
   {s, s, 2^34 - s} bytes. The coordinates (2^30 - rows + r, end, 2^30) are 2^64 + (end - rows + r) s bytes from the
   base, which wraps around to row end - rows + r. Rows r >= rows lie outside the map, and TMA delivers zeros for them.
   This is the arithmetic of Triton's ragged tensor descriptors.

   glu products. A warp group multiplies boxes of 64 gate columns by boxes of the 64 linear columns that belong to them,
   wherever both lie in B (gmm_sm90_glu_column), so that the activation's two operands are in one row of a store slot.

   The last two dimensions of maps of weights, and of D in wgrad, address memory in steps of 16 and 2^18 bytes, counted
   from GMM_SM90_MAP_BASE, so that one map serves matrices at any address (gmm_sm90_map_offset). */

/* The gated activation of a glu product: h = p act(D), where D, the pre-activation, has been rounded. */
typedef struct gmm_sm90_glu {
    gmm_kmat h;         /* [T, ffn] */
    const float *prob;  /* [T] p; NULL: 1 */
    gmm_act_kind kind;
    gmm_act_coef coef;
    int32_t block;      /* the columns of D, which are rows of B, are blocks of as many gate columns and linear columns:
                           8, 16, 32 or a multiple of 64; halves: ffn. D has 2 ffn columns, ffn a multiple of 64 */
    int32_t drops_d;    /* D is not stored */
} gmm_sm90_glu;

/* The gradient of the gated activation behind a dglu product, from D, the rounded gradient of its result, and from its
   inputs z: dz = p D f'(z), and h = p f(z) again. Rows of z, dz and h begin at multiples of 16 bytes. */
typedef struct gmm_sm90_dglu {
    gmm_kmat z, dz;     /* [T, 2 ffn]; the same matrix, or apart from one another; dz.data NULL: not wanted */
    gmm_kmat h;         /* [T, ffn]; data NULL: not wanted */
    const float *prob;  /* [T] p; NULL: 1 */
    float *dots;        /* [parts of GMM_ACT_DOT_COLS columns][T]: sums of D f(z) over a part, which add up to dprob;
                           NULL: not wanted */
    gmm_act_kind kind;
    gmm_act_coef coef;
    int32_t interleave; /* columns of z: 0: halves; else blocks of as many gate and linear columns, a multiple of 8 */
    int32_t linear;     /* columns from a gate column to its linear column */
    int64_t capacity;   /* T */
} gmm_sm90_dglu;

/* Which tile a kernel with two tiles computes, a column of GMM_SM90_KERNEL_LIST and of the FP8 lists. Its first tile is
   that of its row in kernels.cuh or fp8_kernels.cuh, which also names the second one. The device takes a choice other
   than by_split as the answer to whether the tile is the second. Kernels with one tile have `first`. */
typedef enum gmm_sm90_tile_choice {
    gmm_sm90_tile_first = 0,
    gmm_sm90_tile_second = 1,
    gmm_sm90_tile_by_split = 2 /* the scheduler chooses the one that is cheaper for the split */
} gmm_sm90_tile_choice;

typedef struct gmm_sm90_args {
    CUtensorMap a, a16, b;    /* boxes: A 64 rows, A 16 rows (not in wgrad), B 64 rows */
    CUtensorMap d;            /* boxes of D: of a deferred store, or in wgrad 64 rows */
    gmm_gemm_args p;          /* its offsets and tiles are not read */
    gmm_groups groups;        /* splits in device memory */
    int32_t *tables;          /* group tables in the workspace, where shared memory has too few entries, else NULL:
                                 gmm_sm90_table_bytes per CTA */
    int32_t d_by_tma;         /* whether TMA makes deferred stores (gmm_sm90_tma_stores); else only wgrad encodes `d` */
    int32_t tile_choice;      /* gmm_sm90_tile_choice */
    gmm_mat codes;            /* packed weights that the kernel dequantizes; tables in device memory */
    gmm_direction along;      /* direction of the packed copies: their lines run along the contraction */
    int32_t rows, cols;       /* of each packed weight matrix */
    gmm_row_index index;      /* tiles with `gather`: of the rows of A */
    const float *alpha2;      /* [G], beside p.alpha: a factor that is applied after p.alpha; NULL: 1 */
    gmm_sm90_glu glu;         /* glu products */
    gmm_sm90_dglu dglu;       /* dglu products */
} gmm_sm90_args;

#define GMM__SM90(name, tag) GMM__CAT(gmm_sm90_##name##_, tag) /* a constant of a format or of a tile */

/* Formats of B: 16-bit elements, or packed codes with scales: X(tag, bytes of 64 columns per stage, elements per
   scale). Packed codes are dequantized into registers, from which wgmma takes them (RS). GMM__SM90_PACKED_<tag>:
   whether a stage holds scales. */
#define GMM_SM90_B_FORMAT_LIST(X) \
    X(plain, 8192, 1) \
    X(mx8, 4096, 32) \
    X(mx4, 2048, 32) \
    X(nv4, 2048, 16)
#define GMM__SM90_PACKED_plain 0
#define GMM__SM90_PACKED_mx8 1
#define GMM__SM90_PACKED_mx4 1
#define GMM__SM90_PACKED_nv4 1
#define GMM__X(tag, bytes, width) GMM__SM90(b_format, tag),
enum { GMM_SM90_B_FORMAT_LIST(GMM__X) gmm_sm90_b_formats };
#undef GMM__X
#define GMM__X(tag, bytes, width) \
    GMM__SM90(b_bytes, tag) = bytes, GMM__SM90(scale_width, tag) = width, \
    GMM__SM90(box_width, tag) = (width) > 1 ? (bytes) / 64 : 64, /* elements of the tensor map in a line of a box */
enum { GMM_SM90_B_FORMAT_LIST(GMM__X) gmm_sm90_b_formats_end };
#undef GMM__X

/* Tiles, named rows x columns of D: X(tag,
       consumers      warp groups that share a tile: 2 cooperative, 1 ping-pong
       wgmma_m        blocks of 64 columns per warp group
       m16            most blocks of 16 rows
       stages         of 64 elements along the contraction
       store_blocks   blocks of 16 rows x 64 columns of 16 bits in a store slot
       b_format       format of B
       ctas           CTAs per multiprocessor
       deferred       blocks of 16 rows that a deferred store writes per stage of the next tile; 0: there is none
       gather         whether gather warps load A, whose rows they gather; else TMA does) */
#define GMM_SM90_TILE_LIST(X) \
    X(160x256, 2, 2, 10, 4, 2, plain, 1, 0, 0) \
    X(256x128, 2, 1, 16, 4, 4, plain, 1, 2, 0) \
    X(176x128, 1, 2, 11, 5, 4, plain, 1, 0, 0) \
    X(192x128, 1, 2, 12, 4, 8, plain, 1, 0, 0) \
    X(128x128, 1, 2, 8, 5, 8, plain, 1, 0, 0) \
    X(mx8_192x128, 2, 1, 12, 6, 2, mx8, 1, 0, 0) \
    X(mx4_192x128, 2, 1, 12, 7, 2, mx4, 1, 0, 0) \
    X(nv4_192x128, 2, 1, 12, 7, 2, nv4, 1, 0, 0) \
    X(mx8_48x128, 2, 1, 3, 6, 2, mx8, 2, 0, 0) \
    X(mx4_64x128, 2, 1, 4, 7, 2, mx4, 2, 0, 0) \
    X(nv4_64x128, 2, 1, 4, 7, 2, nv4, 2, 0, 0) \
    X(gather_160x256, 2, 2, 10, 4, 2, plain, 1, 0, 1) \
    X(short_256x128, 2, 1, 16, 4, 4, plain, 1, 4, 0)

/* Instances: X(op, dtype, precision, tile, tile choice, kernel). A kernel with two tiles stands in three rows, one per
   gmm_sm90_tile_choice; by_split follows the other two, with the columns of the first tile. gmm_options.tile numbers
   the rows of an operation and dtype in this order, and of tiles of nearly equal price the upper row wins. kernels.cuh
   has a row for each kernel.

   Names of GEMM kernels, as profilers show them: gmm_gemm_<op>_<operands>_<M>x<N>x<K>_<variant>_<arch>, without <op>
   where one kernel serves several operations. M x N is the tile of D, and K the elements of a stage along the
   contraction; in the name of a kernel with two tiles 160x256 stands first, although its first tile is 256x128, that of
   its row in kernels.cuh. <arch> is sm90, or mma for kernels of the portable engine. Every name stands in full in the
   source. */
#define GMM_SM90_KERNEL_LIST(X) \
    X(fwd, GMM_BF16, bf16, 160x256, second, gmm_gemm_fwd_bf16_160x256x64_256x128x64_sm90) \
    GMM__IF_F16(X(fwd, GMM_F16, f16, 160x256, second, gmm_gemm_fwd_f16_160x256x64_256x128x64_sm90)) \
    X(fwd, GMM_BF16, bf16, 256x128, first, gmm_gemm_fwd_bf16_160x256x64_256x128x64_sm90) \
    GMM__IF_F16(X(fwd, GMM_F16, f16, 256x128, first, gmm_gemm_fwd_f16_160x256x64_256x128x64_sm90)) \
    X(fwd, GMM_BF16, bf16, 176x128, first, gmm_gemm_fwd_bf16_176x128x64_sm90) \
    GMM__IF_F16(X(fwd, GMM_F16, f16, 176x128, first, gmm_gemm_fwd_f16_176x128x64_sm90)) \
    X(dgrad, GMM_BF16, bf16, 160x256, second, gmm_gemm_dgrad_bf16_160x256x64_256x128x64_sm90) \
    GMM__IF_F16(X(dgrad, GMM_F16, f16, 160x256, second, gmm_gemm_dgrad_f16_160x256x64_256x128x64_sm90)) \
    X(dgrad, GMM_BF16, bf16, 256x128, first, gmm_gemm_dgrad_bf16_160x256x64_256x128x64_sm90) \
    GMM__IF_F16(X(dgrad, GMM_F16, f16, 256x128, first, gmm_gemm_dgrad_f16_160x256x64_256x128x64_sm90)) \
    X(dgrad, GMM_BF16, bf16, 176x128, first, gmm_gemm_dgrad_bf16_176x128x64_sm90) \
    GMM__IF_F16(X(dgrad, GMM_F16, f16, 176x128, first, gmm_gemm_dgrad_f16_176x128x64_sm90)) \
    GMM__IF_QUANT(X(fwd, GMM_BF16, bf16, mx8_192x128, first, gmm_gemm_fwd_bf16_mxfp8_192x128x64_sm90)) \
    GMM__IF_QUANT(X(fwd, GMM_BF16, bf16, mx4_192x128, first, gmm_gemm_fwd_bf16_mxfp4_192x128x64_sm90)) \
    GMM__IF_QUANT(X(fwd, GMM_BF16, bf16, nv4_192x128, first, gmm_gemm_fwd_bf16_nvfp4_192x128x64_sm90)) \
    GMM__IF_QUANT(X(fwd, GMM_BF16, bf16, mx8_48x128, first, gmm_gemm_fwd_bf16_mxfp8_48x128x64_sm90)) \
    GMM__IF_QUANT(X(fwd, GMM_BF16, bf16, mx4_64x128, first, gmm_gemm_fwd_bf16_mxfp4_64x128x64_sm90)) \
    GMM__IF_QUANT(X(fwd, GMM_BF16, bf16, nv4_64x128, first, gmm_gemm_fwd_bf16_nvfp4_64x128x64_sm90)) \
    X(wgrad, GMM_BF16, bf16, 192x128, first, gmm_gemm_wgrad_bf16_192x128x64_sm90) \
    GMM__IF_F16(X(wgrad, GMM_F16, f16, 192x128, first, gmm_gemm_wgrad_f16_192x128x64_sm90)) \
    X(wgrad, GMM_BF16, bf16, 128x128, first, gmm_gemm_wgrad_bf16_128x128x64_sm90) \
    GMM__IF_F16(X(wgrad, GMM_F16, f16, 128x128, first, gmm_gemm_wgrad_f16_128x128x64_sm90)) \
    X(fwd, GMM_BF16, bf16, 256x128, by_split, gmm_gemm_fwd_bf16_160x256x64_256x128x64_sm90) \
    GMM__IF_F16(X(fwd, GMM_F16, f16, 256x128, by_split, gmm_gemm_fwd_f16_160x256x64_256x128x64_sm90)) \
    X(dgrad, GMM_BF16, bf16, 256x128, by_split, gmm_gemm_dgrad_bf16_160x256x64_256x128x64_sm90) \
    GMM__IF_F16(X(dgrad, GMM_F16, f16, 256x128, by_split, gmm_gemm_dgrad_f16_160x256x64_256x128x64_sm90)) \
    X(glu, GMM_BF16, bf16, 176x128, first, gmm_gemm_glu_bf16_176x128x64_sm90) \
    GMM__IF_F16(X(glu, GMM_F16, f16, 176x128, first, gmm_gemm_glu_f16_176x128x64_sm90)) \
    X(dglu, GMM_BF16, bf16, 176x128, first, gmm_gemm_dglu_bf16_176x128x64_sm90) \
    GMM__IF_F16(X(dglu, GMM_F16, f16, 176x128, first, gmm_gemm_dglu_f16_176x128x64_sm90)) \
    X(fwd, GMM_BF16, bf16, gather_160x256, first, gmm_gemm_fwd_bf16_160x256x64_gather_sm90) \
    GMM__IF_F16(X(fwd, GMM_F16, f16, gather_160x256, first, gmm_gemm_fwd_f16_160x256x64_gather_sm90)) \
    X(dgrad, GMM_BF16, bf16, gather_160x256, first, gmm_gemm_dgrad_bf16_160x256x64_gather_sm90) \
    GMM__IF_F16(X(dgrad, GMM_F16, f16, gather_160x256, first, gmm_gemm_dgrad_f16_160x256x64_gather_sm90)) \
    X(fwd, GMM_BF16, bf16, short_256x128, first, gmm_gemm_fwd_bf16_256x128x64_short_sm90) \
    GMM__IF_F16(X(fwd, GMM_F16, f16, short_256x128, first, gmm_gemm_fwd_f16_256x128x64_short_sm90)) \
    X(dgrad, GMM_BF16, bf16, short_256x128, first, gmm_gemm_dgrad_bf16_256x128x64_short_sm90) \
    GMM__IF_F16(X(dgrad, GMM_F16, f16, short_256x128, first, gmm_gemm_dgrad_f16_256x128x64_short_sm90))

/* A constant for each row of the list. Assertions in body_product_kernel.cuh name it, so that a row of kernels.cuh
   whose operation, dtype or tile is not that of the list does not compile. */
#define GMM__SM90_ROW_(kernel, op, tag, tile, choice) kernel##_##op##_##tag##_##tile##_##choice
#define GMM__SM90_ROW(kernel, op, tag, tile, choice) GMM__SM90_ROW_(kernel, op, tag, tile, choice)
#define GMM__X(op, dtype, tag, tile, choice, kernel) GMM__SM90_ROW_(kernel, op, tag, tile, choice),
enum { GMM_SM90_KERNEL_LIST(GMM__X) gmm_sm90_rows_end };
#undef GMM__X

/* Whether an operation has the epilogue of glu or of dglu, for the preprocessor. */
#define GMM__IS_GLU_fwd 0
#define GMM__IS_GLU_dgrad 0
#define GMM__IS_GLU_wgrad 0
#define GMM__IS_GLU_glu 1
#define GMM__IS_GLU_dglu 0
#define GMM__IS_DGLU_fwd 0
#define GMM__IS_DGLU_dgrad 0
#define GMM__IS_DGLU_wgrad 0
#define GMM__IS_DGLU_glu 0
#define GMM__IS_DGLU_dglu 1
/* Column of D, and row of B, that stands in column `c` of the tiles of a glu product: in these, 64 gate columns and the
   64 linear columns that belong to them alternate. Smaller blocks stay where they are. */
GMM__HD int32_t gmm_sm90_glu_column(int32_t block, int32_t c) {
    const int32_t gate = c / 128 * 64;
    return block < 64 ? c : gate + gate / block * block + c / 64 % 2 * block + c % 64;
}

/* Warp roles of a CTA, by the index of the warp. The two consumer warp groups come first; setmaxnreg takes whole warp
   groups, so that the roles of warps 8 to 11 have one budget of registers, and gather warps the same. */
enum {
    GMM_SM90_CONSUMER_WARPS = 8,
    GMM_SM90_PRODUCER_WARP = GMM_SM90_CONSUMER_WARPS,
    GMM_SM90_SCHEDULER_WARP = 9,         /* of plain operands */
    GMM_SM90_SCALE_WARP = 9,             /* packed weights: the scale loader */
    GMM_SM90_CHECK_WARP = 10,            /* checks the split, then becomes a store warp in wgrad */
    GMM_SM90_STORE_WARP = 10,            /* wgrad: the first of two store warps */
    GMM_SM90_PACKED_SCHEDULER_WARP = 11, /* packed weights */
    GMM_SM90_WARPS = 12,                 /* without gather warps */
    GMM_SM90_GATHER_WARP = GMM_SM90_WARPS, /* tiles with `gather`: the first of a further warp group */
    GMM_SM90_GATHER_WARPS = 4
};

/* The tile ring holds 16 work tiles; the scheduler writes 4 at a time, and its readers release 4 at a time. */
enum {
    GMM_SM90_RAGGED_ROWS = 1 << 30, /* rows of a ragged map; limits the capacity */
    GMM_SM90_MAP_BASE = 256,        /* address at which maps of matrices at any address begin */
    GMM_SM90_MAP_STEPS = 1 << 14,   /* steps of 16 bytes in their third dimension: 2^18 bytes, a step of the fourth */
    GMM_SM90_SMEM_GROUPS = 256,     /* most groups whose tables fit into shared memory */
    GMM_SM90_TABLE_LENGTH = GMM_SM90_SMEM_GROUPS + 1, /* entries of such a table */
    GMM_SM90_TILE_RING = 16,
    GMM_SM90_TILE_BATCH = 4,
    GMM_SM90_TILE_BATCHES = GMM_SM90_TILE_RING / GMM_SM90_TILE_BATCH,
    GMM_SM90_STORE_SLOTS = 4,
    GMM_SM90_BOX_BYTES = 64 * 128,  /* of a TMA box of 64 lines of 128 bytes */
    GMM_SM90_PART_BYTES = 64 * 256, /* of a part of D in wgrad: two boxes side by side, which fill a slot */
    GMM_SM90_SMALL_M = 128          /* most rows of a group in small-M mode */
};

/* Without sm_90a code the kernels are empty, and their launch bounds tell the host so (gmm_sm90_present). */
#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define GMM__SM90_BOUNDS __launch_bounds__(32)
#define GMM__FP8_BOUNDS __launch_bounds__(32)
#else
#define GMM__SM90_BOUNDS __launch_bounds__(GMM__CFG(threads), GMM__CFG(ctas_per_sm))
#define GMM__FP8_BOUNDS __launch_bounds__(GMM__CFG(threads), 1)
#endif

/* Constants of tiles: the columns of the list, and those that follow from them. */
#define GMM__X(tag, consumers_, wgmma_m_, m16_, stages_, store_blocks_, b_format_, ctas_, deferred_, gather_) \
    GMM__SM90(consumers, tag) = consumers_, GMM__SM90(wgmma_m, tag) = wgmma_m_, GMM__SM90(m16, tag) = m16_, \
    GMM__SM90(stages, tag) = stages_, GMM__SM90(store_blocks, tag) = store_blocks_, \
    GMM__SM90(tile_n, tag) = (consumers_) * (wgmma_m_) * 64, \
    GMM__SM90(ctas_per_sm, tag) = ctas_, GMM__SM90(deferred, tag) = deferred_, GMM__SM90(gather, tag) = gather_, \
    GMM__SM90(b_format, tag) = GMM__SM90(b_format, b_format_), \
    GMM__SM90(box_width, tag) = GMM__SM90(box_width, b_format_), \
    GMM__SM90(scale_width, tag) = GMM__SM90(scale_width, b_format_),
enum { GMM_SM90_TILE_LIST(GMM__X) gmm_sm90_tiles_end };
#undef GMM__X
/* Warps of a CTA, and registers of its warp groups: two of consumers, one of the other roles, one of gather warps.
   Slots of 8 blocks are those of wgrad's tiles, as the rules of instances below assert, and wgrad's scheduler needs
   more registers. */
#define GMM__X(tag, consumers_, wgmma_m_, m16_, stages_, store_blocks_, b_format_, ctas_, deferred_, gather_) \
    GMM__SM90(gather_warps, tag) = (gather_) ? GMM_SM90_GATHER_WARPS : 0, \
    GMM__SM90(threads, tag) = 32 * (GMM_SM90_WARPS + GMM__SM90(gather_warps, tag)), \
    GMM__SM90(consumer_regs, tag) = (ctas_) != 1 ? 96 : (gather_) ? 216 : (store_blocks_) == 8 ? 224 : 232, \
    GMM__SM90(other_regs, tag) = (ctas_) != 1 ? 48 : (store_blocks_) == 8 ? 56 : 40,
enum { GMM_SM90_TILE_LIST(GMM__X) gmm_sm90_regs_end };
#undef GMM__X
#define GMM__X(tag, consumers_, wgmma_m_, m16_, stages_, store_blocks_, b_format_, ctas_, deferred_, gather_) \
    static_assert(128 * (2 * GMM__SM90(consumer_regs, tag) + (1 + (gather_)) * GMM__SM90(other_regs, tag)) <= \
                      65536 / (ctas_) && \
                  GMM__SM90(consumer_regs, tag) % 8 == 0 && GMM__SM90(other_regs, tag) % 8 == 0, \
                  "tile " #tag ": a multiprocessor has 65536 registers, and setmaxnreg takes multiples of 8");
GMM_SM90_TILE_LIST(GMM__X)
#undef GMM__X
/* Rules of tiles. Accumulators of a thread are wgmma_m x 8 x m16 of its consumer_regs registers. */
#define GMM__X(tag, consumers_, wgmma_m_, m16_, stages_, store_blocks_, b_format_, ctas_, deferred_, gather_) \
    static_assert((m16_) <= 16 && (wgmma_m_) * 8 * (m16_) <= 192, \
                  "tile " #tag ": at most 16 blocks of 16 rows, and at most 192 accumulators per thread"); \
    static_assert((store_blocks_) % (wgmma_m_) == 0 && (store_blocks_) % 2 == 0, \
                  "tile " #tag ": a store slot holds whole blocks of a warp group, two at least");
GMM_SM90_TILE_LIST(GMM__X)
#undef GMM__X
#define GMM__X(tag, consumers_, wgmma_m_, m16_, stages_, store_blocks_, b_format_, ctas_, deferred_, gather_) \
    static_assert(!GMM__SM90(b_format, b_format_) || ((consumers_) == 2 && (wgmma_m_) == 1 && (m16_) <= 12), \
                  "tile " #tag ": packed weights need two consumers of 64 columns each; wgmma RS has N up to 192");
GMM_SM90_TILE_LIST(GMM__X)
#undef GMM__X
#define GMM__X(tag, consumers_, wgmma_m_, m16_, stages_, store_blocks_, b_format_, ctas_, deferred_, gather_) \
    static_assert(!(deferred_) || ((consumers_) == 2 && (wgmma_m_) == 1), \
                  "tile " #tag ": a deferred store needs two consumers with one block of 64 columns each"); \
    static_assert((m16_) % ((deferred_) ? (deferred_) : 1) == 0 && \
                  2 * (store_blocks_) % ((deferred_) ? (deferred_) : 1) == 0, \
                  "tile " #tag ": deferred divides m16 and the blocks of two store slots");
GMM_SM90_TILE_LIST(GMM__X)
#undef GMM__X
#define GMM__X(op, dtype, tag, tile, tile_choice, kernel) \
    static_assert(!gmm_k_grouped_##op || (GMM__SM90(m16, tile) % 4 == 0 && GMM__SM90(store_blocks, tile) == 8 && \
                                          GMM__SM90(consumers, tile) == 1 && GMM__SM90(wgmma_m, tile) == 2), \
                  #kernel ": wgrad loads boxes of 64 rows of A, stores 64 rows x 256 bytes, and is ping-pong"); \
    static_assert(!gmm_ta_##op || !GMM__SM90(gather, tile), \
                  #kernel ": gather warps copy lines of A along the contraction, which are not rows of A in wgrad");
GMM_SM90_KERNEL_LIST(GMM__X)
#undef GMM__X
#define GMM__X(op, dtype, tag, tile, tile_choice, kernel) \
    static_assert(gmm_k_grouped_##op || GMM__SM90(store_blocks, tile) != 8, \
                  #kernel ": store slots of 8 blocks select the registers of wgrad"); \
    static_assert(!GMM__SM90(b_format, tile) || (gmm_gemm_##op == gmm_gemm_fwd && (dtype) == GMM_BF16), \
                  #kernel ": packed weights are multiplied in forward and in bf16 alone");
GMM_SM90_KERNEL_LIST(GMM__X)
#undef GMM__X
#define GMM__X(op, dtype, tag, tile, tile_choice, kernel) \
    static_assert(!(GMM__IS_GLU_##op || GMM__IS_DGLU_##op) || \
                  (GMM__SM90(wgmma_m, tile) == 2 && !GMM__SM90(deferred, tile) && \
                   (GMM__SM90(store_blocks, tile) == 2 || GMM__SM90(store_blocks, tile) == 4)), \
                  #kernel ": a warp group has rows of 128 columns in a slot, 16 or 32 rows at a time");
GMM_SM90_KERNEL_LIST(GMM__X)
#undef GMM__X

/* Offset of a member of a struct in shared memory, where addresses have 32 bits. */
#define GMM__OFFSET(type, member) ((uint32_t)offsetof(type, member))

/* Named barriers of a CTA. CONSUMER + i joins the 128 threads of consumer warp group i. ORDER + i makes warp group i
   wait until the other one arrives: in wgrad before it stores a tile, since slots are used in the order of tiles; in
   FP8 1d1d before it issues the products of a stage, so that one warp group multiplies while the other promotes. Id 3
   is CONSUMER + 2 in tiles with three consumers, and ORDER + 0 in tiles with two; no kernel uses both. */
enum {
    GMM_BAR_CTA = 0,      /* __syncthreads */
    GMM_BAR_CONSUMER = 1, /* + warp group: 1 to 3 */
    GMM_BAR_ORDER = 3     /* + warp group: 3 and 4 */
};

/* Joins the threads of a consumer warp group. */
GMM__DEVICE void gmm_consumer_sync(int wg) {
    if (wg) GMM__BAR_SYNC((int)GMM_BAR_CONSUMER + 1, 128);
    else GMM__BAR_SYNC((int)GMM_BAR_CONSUMER, 128);
}
/* The same where there are up to three of them. */
GMM__DEVICE void gmm_fp8_consumer_sync(int wg) { gmm_bar_sync_128(GMM_BAR_CONSUMER + wg); }
/* The order barrier of warp group `wg`: that warp group waits for the other one to arrive. */
GMM__DEVICE void gmm_order_wait(int wg) { gmm_bar_sync_256(GMM_BAR_ORDER + wg); }
GMM__DEVICE void gmm_order_arrive(int wg) { gmm_bar_arrive_256(GMM_BAR_ORDER + wg); }

/* mbarriers lie in shared memory, where code addresses them as 32-bit numbers. Stage: its operands have landed (full),
   all warps that read it are done (empty). */
typedef struct gmm_sm90_stage_barriers {
    uint64_t full, empty;
} gmm_sm90_stage_barriers;
/* Store slot: a consumer warp group may write it (empty), it has been written (full). */
typedef struct gmm_sm90_slot_barriers {
    uint64_t empty, full;
} gmm_sm90_slot_barriers;
/* Barriers of the 16-bit products besides those of stages, which depend on no tile. */
typedef struct gmm_sm90_barriers {
    uint64_t first_tile_planned;                 /* the early plan: the first tile, and the ends of the groups */
    uint64_t split_checked;                      /* the split has been compared with the early plan */
    uint64_t tile_full[GMM_SM90_TILE_RING];      /* an entry of the tile ring has been written */
    uint64_t batch_empty[GMM_SM90_TILE_BATCHES]; /* all readers of the ring have released a batch of entries */
    uint64_t last_stage_full[2];                 /* ping-pong: the last stage of the tile of warp group i is full */
    gmm_sm90_slot_barriers slot[GMM_SM90_STORE_SLOTS];
} gmm_sm90_barriers;
enum {
    GMM_SM90_MBARRIER_BYTES = sizeof(uint64_t),
    GMM_SM90_STAGE_BARRIERS_BYTES = sizeof(gmm_sm90_stage_barriers),
    GMM_SM90_SLOT_BARRIERS_BYTES = sizeof(gmm_sm90_slot_barriers)
};

/* Addresses of barriers. stage_bars: of stage 0; slot_bars: of slot 0; bars: of the gmm_sm90_barriers. */
GMM__DEVICE uint32_t gmm_sm90_full(uint32_t stage_bars, uint32_t s) {
    return stage_bars + s * GMM_SM90_STAGE_BARRIERS_BYTES + GMM__OFFSET(gmm_sm90_stage_barriers, full);
}
GMM__DEVICE uint32_t gmm_sm90_empty(uint32_t stage_bars, uint32_t s) {
    return stage_bars + s * GMM_SM90_STAGE_BARRIERS_BYTES + GMM__OFFSET(gmm_sm90_stage_barriers, empty);
}
GMM__DEVICE uint32_t gmm_sm90_slot_empty(uint32_t slot_bars, uint32_t slot) {
    return slot_bars + slot * GMM_SM90_SLOT_BARRIERS_BYTES + GMM__OFFSET(gmm_sm90_slot_barriers, empty);
}
GMM__DEVICE uint32_t gmm_sm90_slot_full(uint32_t slot_bars, uint32_t slot) {
    return slot_bars + slot * GMM_SM90_SLOT_BARRIERS_BYTES + GMM__OFFSET(gmm_sm90_slot_barriers, full);
}
/* Those of the slot of part number `part` of D in wgrad, which takes the slots one after the other. */
GMM__DEVICE uint32_t gmm_sm90_store_empty(uint32_t bars, uint32_t part) {
    return gmm_sm90_slot_empty(bars + GMM__OFFSET(gmm_sm90_barriers, slot), part % GMM_SM90_STORE_SLOTS);
}
GMM__DEVICE uint32_t gmm_sm90_store_full(uint32_t bars, uint32_t part) {
    return gmm_sm90_slot_full(bars + GMM__OFFSET(gmm_sm90_barriers, slot), part % GMM_SM90_STORE_SLOTS);
}
GMM__DEVICE uint32_t gmm_sm90_first_tile_planned(uint32_t bars) {
    return bars + GMM__OFFSET(gmm_sm90_barriers, first_tile_planned);
}
GMM__DEVICE uint32_t gmm_sm90_split_checked(uint32_t bars) {
    return bars + GMM__OFFSET(gmm_sm90_barriers, split_checked);
}
GMM__DEVICE uint32_t gmm_sm90_tile_full(uint32_t bars, uint32_t tile_index) {
    return bars + GMM__OFFSET(gmm_sm90_barriers, tile_full) +
           GMM_SM90_MBARRIER_BYTES * (tile_index % GMM_SM90_TILE_RING);
}
GMM__DEVICE uint32_t gmm_sm90_batch_empty(uint32_t bars, uint32_t batch) {
    return bars + GMM__OFFSET(gmm_sm90_barriers, batch_empty) +
           GMM_SM90_MBARRIER_BYTES * (batch % GMM_SM90_TILE_BATCHES);
}
GMM__DEVICE uint32_t gmm_sm90_last_stage_full(uint32_t bars, int wg) {
    return bars + GMM__OFFSET(gmm_sm90_barriers, last_stage_full) + GMM_SM90_MBARRIER_BYTES * (uint32_t)wg;
}

/* Waits until entry `tile_index` of the tile ring has been written. */
GMM__DEVICE void gmm_sm90_wait_tile(uint32_t bars, uint32_t tile_index) {
    gmm_mbarrier_wait(gmm_sm90_tile_full(bars, tile_index), tile_index / GMM_SM90_TILE_RING & 1);
}
/* Releases the batch of the tile ring that this warp has read, if tile number `tile` opens the next one. */
GMM__DEVICE void gmm_sm90_release_batch(uint32_t bars, uint32_t tile) {
    if (tile > 0 && tile % GMM_SM90_TILE_BATCH == 0)
        gmm_mbarrier_arrive(gmm_sm90_batch_empty(bars, tile / GMM_SM90_TILE_BATCH - 1));
}

/* The pipeline of stages as one warp sees it. Stage number n lies in stage n % stages of shared memory, whose full
   barrier then completes phase n / stages. */
typedef struct gmm_sm90_pipeline {
    uint32_t bars;         /* barriers of stage 0 */
    uint32_t stages, stage_bytes;
    uint32_t cluster_size; /* a consumer warp releases a stage at the empty barrier of each CTA of the cluster */
    uint32_t iter;         /* number of the next stage */
} gmm_sm90_pipeline;

/* Where a consumer warp of packed weights stands in the pipeline: the stage in shared memory, and the parity of the
   phase that its full barrier completes next. The empty barrier completes the phase of the other parity before that. */
typedef struct gmm_sm90_stage {
    uint32_t index, phase;
} gmm_sm90_stage;
/* That of stage number `iter`. */
GMM__DEVICE gmm_sm90_stage gmm_sm90_stage_at(uint32_t iter, uint32_t stages) {
    gmm_sm90_stage s;
    s.index = iter % stages;
    s.phase = iter / stages & 1;
    return s;
}
GMM__DEVICE void gmm_sm90_stage_advance(gmm_sm90_stage *s, uint32_t stages) {
    if (++s->index == stages) {
        s->index = 0;
        s->phase ^= 1;
    }
}
GMM__DEVICE void gmm_sm90_wait_full(uint32_t stage_bars, gmm_sm90_stage s) {
    gmm_mbarrier_wait(gmm_sm90_full(stage_bars, s.index), s.phase);
}
/* A consumer warp releases stage `index` in each CTA of the cluster: lane i at the empty barrier of CTA i. All lanes
   have waited for the stage and read it: a wgmma instruction or __syncwarp precedes the call. */
GMM__DEVICE void gmm_sm90_release_stage(const gmm_sm90_pipeline *pipe, uint32_t index) {
    const uint32_t lane = threadIdx.x & 31;
    if (lane < pipe->cluster_size) gmm_mbarrier_arrive_remote(gmm_sm90_empty(pipe->bars, index), lane);
}
/* Releases the stages of a tile of which the warp multiplies nothing, unread. */
GMM__DEVICE void gmm_sm90_skip_stages(uint32_t k_tiles, gmm_sm90_pipeline *pipe) {
    for (; k_tiles > 0; k_tiles--, pipe->iter++) {
        const uint32_t s = pipe->iter % pipe->stages;
        gmm_mbarrier_wait(gmm_sm90_full(pipe->bars, s), pipe->iter / pipe->stages & 1);
        __syncwarp(); /* a lane's arrival is that of the warp */
        gmm_sm90_release_stage(pipe, s);
    }
}

/* Shared memory of the 16-bit Hopper products: one struct per tile, made from the columns of GMM_SM90_TILE_LIST. */

/* Keeps or drops a member by a column that is 0 or 1. */
#define GMM__IF_0(...)
#define GMM__IF_1(...) __VA_ARGS__
#define GMM__IF(condition, ...) GMM__CAT(GMM__IF_, condition)(__VA_ARGS__)

/* The persistent tile ring, and what else the scheduler and the check warp tell the other warps. */
typedef struct gmm_sm90_ring {
    gmm_sm90_tile tile[GMM_SM90_TILE_RING];
    int32_t second_tile;  /* whether the scheduler has chosen the kernel's second tile */
    int32_t small_m;      /* whether small-M mode is on: see GMM__SMALL_M */
    int32_t planned_late; /* whether the first tile is planned after griddepcontrol.wait: it was not planned early, or
                             the split has changed */
} gmm_sm90_ring;

/* A stage: operands as TMA writes them, in boxes of lines of 128 bytes with 128-byte swizzle (packed codes: lines of 64
   or 32 bytes). `scales`: word i holds the scales of column i; the words behind them keep stages at multiples of 1024
   bytes, which the swizzle needs. */
#define GMM__X(tag, consumers_, wgmma_m_, m16_, stages_, store_blocks_, b_format_, ctas_, deferred_, gather_) \
    typedef struct GMM__SM90(stage, tag) { \
        char b[(consumers_) * (wgmma_m_)][GMM__SM90(b_bytes, b_format_)]; /* [64 columns] */ \
        char a[m16_][2048];                                               /* [16 rows] */ \
        GMM__IF(GMM__SM90_PACKED_##b_format_, uint32_t scales[256];) \
    } GMM__SM90(stage, tag);
GMM_SM90_TILE_LIST(GMM__X)
#undef GMM__X
#define GMM__X(tag, consumers_, wgmma_m_, m16_, stages_, store_blocks_, b_format_, ctas_, deferred_, gather_) \
    typedef struct GMM__SM90(smem, tag) { \
        GMM__SM90(stage, tag) stage[stages_]; \
        char slot[GMM_SM90_STORE_SLOTS][(store_blocks_) * 2048]; \
        gmm_sm90_stage_barriers stage_bars[stages_]; gmm_sm90_barriers bars; gmm_sm90_ring ring; \
        int32_t ends[GMM_SM90_TABLE_LENGTH], work_ends[GMM_SM90_TABLE_LENGTH]; /* group tables of the scheduler */ \
    } GMM__SM90(smem, tag);
GMM_SM90_TILE_LIST(GMM__X)
#undef GMM__X
/* Sizes and offsets in bytes; scales_offset is 0 where a stage has no scales. */
#define GMM__X(tag, consumers_, wgmma_m_, m16_, stages_, store_blocks_, b_format_, ctas_, deferred_, gather_) \
    GMM__SM90(a_offset, tag) = offsetof(GMM__SM90(stage, tag), a), \
    GMM__SM90(scales_offset, tag) = \
        GMM__IF(GMM__SM90_PACKED_##b_format_, offsetof(GMM__SM90(stage, tag), scales) +) 0, \
    GMM__SM90(b_block_bytes, tag) = GMM__SM90(b_bytes, b_format_), \
    GMM__SM90(stage_bytes, tag) = sizeof(GMM__SM90(stage, tag)), GMM__SM90(slot_bytes, tag) = (store_blocks_) * 2048, \
    GMM__SM90(smem_bytes, tag) = sizeof(GMM__SM90(smem, tag)),
enum { GMM_SM90_TILE_LIST(GMM__X) gmm_sm90_smem_end };
#undef GMM__X
/* What addresses and TMA assume of the layout. */
#define GMM__X(tag, consumers_, wgmma_m_, m16_, stages_, store_blocks_, b_format_, ctas_, deferred_, gather_) \
    static_assert(GMM__SM90(stage_bytes, tag) % 1024 == 0 && GMM__SM90(a_offset, tag) % 1024 == 0 && \
                  offsetof(GMM__SM90(smem, tag), slot) % 1024 == 0 && GMM__SM90(slot_bytes, tag) % 1024 == 0, \
                  "tile " #tag ": operands and slots begin at multiples of 1024 bytes, 8 lines of the swizzle");
GMM_SM90_TILE_LIST(GMM__X)
#undef GMM__X
#define GMM__X(tag, consumers_, wgmma_m_, m16_, stages_, store_blocks_, b_format_, ctas_, deferred_, gather_) \
    static_assert(offsetof(GMM__SM90(smem, tag), stage_bars) % 8 == 0 && \
                  offsetof(GMM__SM90(smem, tag), bars) - offsetof(GMM__SM90(smem, tag), stage_bars) == \
                      16 * (stages_) && \
                  offsetof(GMM__SM90(smem, tag), work_ends) - offsetof(GMM__SM90(smem, tag), ends) == \
                      4 * GMM_SM90_TABLE_LENGTH, \
                  "tile " #tag ": barriers take 8 bytes each, and the tables follow one another as in the workspace");
GMM_SM90_TILE_LIST(GMM__X)
#undef GMM__X
#define GMM__X(tag, consumers_, wgmma_m_, m16_, stages_, store_blocks_, b_format_, ctas_, deferred_, gather_) \
    static_assert(GMM__SM90(smem_bytes, tag) <= 233472 / (ctas_) - 1024, \
                  "tile " #tag ": a multiprocessor has 228 KiB of shared memory, and each CTA takes 1 KiB besides");
GMM_SM90_TILE_LIST(GMM__X)
#undef GMM__X
static_assert(sizeof(gmm_sm90_balance) <= 4 * (GMM_SM90_BALANCE_GROUPS + 1), "the balanced order fits into work_ends");
static_assert(offsetof(gmm_sm90_smem_160x256, bars) == offsetof(gmm_sm90_smem_256x128, bars) &&
              offsetof(gmm_sm90_smem_160x256, ring) == offsetof(gmm_sm90_smem_256x128, ring) &&
              (int)gmm_sm90_stages_160x256 == (int)gmm_sm90_stages_256x128 &&
              (int)gmm_sm90_smem_bytes_160x256 == (int)gmm_sm90_smem_bytes_256x128,
              "the two tiles of a kernel have their barriers and their tile ring at the same offsets, and equal sizes");
/* One wrapper for each wgmma instruction and shape. */
GMM__DEVICE void gmm_wgmma_fence(void) { asm volatile("wgmma.fence.sync.aligned;" : : : "memory"); }
GMM__DEVICE void gmm_wgmma_commit(void) { asm volatile("wgmma.commit_group.sync.aligned;" : : : "memory"); }
#define GMM__WGMMA_WAIT(groups) asm volatile("wgmma.wait_group.sync.aligned %0;" : : "n"(groups) : "memory")

/* Shapes of wgmma with operands in shared memory: X(N / 8, tag of the accumulator operand list, N, asm operands of
   descriptor A, descriptor B and scale_d). Each thread holds N / 2 accumulators. Odd multiples of 8 are listed for
   the tile heights whose padding would cost most. */
#define GMM__T1 "%0,%1,%2,%3,%4,%5,%6,%7"
#define GMM__T2 GMM__T1 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define GMM__T3 GMM__T2 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define GMM__T4 GMM__T3 ",%24,%25,%26,%27,%28,%29,%30,%31"
#define GMM__T5 GMM__T4 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define GMM__T6 GMM__T5 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define GMM__T7 GMM__T6 ",%48,%49,%50,%51,%52,%53,%54,%55"
#define GMM__T8 GMM__T7 ",%56,%57,%58,%59,%60,%61,%62,%63"
#define GMM__T9 GMM__T8 ",%64,%65,%66,%67,%68,%69,%70,%71"
#define GMM__T10 GMM__T9 ",%72,%73,%74,%75,%76,%77,%78,%79"
#define GMM__T11 GMM__T10 ",%80,%81,%82,%83,%84,%85,%86,%87"
#define GMM__T12 GMM__T11 ",%88,%89,%90,%91,%92,%93,%94,%95"
#define GMM__T13 GMM__T12 ",%96,%97,%98,%99,%100,%101,%102,%103"
#define GMM__T14 GMM__T13 ",%104,%105,%106,%107,%108,%109,%110,%111"
#define GMM__T15 GMM__T14 ",%112,%113,%114,%115,%116,%117,%118,%119"
#define GMM__T16 GMM__T15 ",%120,%121,%122,%123,%124,%125,%126,%127"
#define GMM__T8h GMM__T8 ",%64,%65,%66,%67"
#define GMM__T9h GMM__T9 ",%72,%73,%74,%75"
#define GMM__T10h GMM__T10 ",%80,%81,%82,%83"
#define GMM__V1 GMM__V(0)
#define GMM__V2 GMM__V1, GMM__V(8)
#define GMM__V3 GMM__V2, GMM__V(16)
#define GMM__V4 GMM__V3, GMM__V(24)
#define GMM__V5 GMM__V4, GMM__V(32)
#define GMM__V6 GMM__V5, GMM__V(40)
#define GMM__V7 GMM__V6, GMM__V(48)
#define GMM__V8 GMM__V7, GMM__V(56)
#define GMM__V9 GMM__V8, GMM__V(64)
#define GMM__V10 GMM__V9, GMM__V(72)
#define GMM__V11 GMM__V10, GMM__V(80)
#define GMM__V12 GMM__V11, GMM__V(88)
#define GMM__V13 GMM__V12, GMM__V(96)
#define GMM__V14 GMM__V13, GMM__V(104)
#define GMM__V15 GMM__V14, GMM__V(112)
#define GMM__V16 GMM__V15, GMM__V(120)
#define GMM__V8h GMM__V8, GMM__H(64)
#define GMM__V9h GMM__V9, GMM__H(72)
#define GMM__V10h GMM__V10, GMM__H(80)
#define GMM_WGMMA_LIST(X) \
    X(2, 1, "16", "%8", "%9", "%10") \
    X(4, 2, "32", "%16", "%17", "%18") \
    X(6, 3, "48", "%24", "%25", "%26") \
    X(8, 4, "64", "%32", "%33", "%34") \
    X(10, 5, "80", "%40", "%41", "%42") \
    X(12, 6, "96", "%48", "%49", "%50") \
    X(14, 7, "112", "%56", "%57", "%58") \
    X(16, 8, "128", "%64", "%65", "%66") \
    X(17, 8h, "136", "%68", "%69", "%70") \
    X(18, 9, "144", "%72", "%73", "%74") \
    X(19, 9h, "152", "%76", "%77", "%78") \
    X(20, 10, "160", "%80", "%81", "%82") \
    X(21, 10h, "168", "%84", "%85", "%86") \
    X(22, 11, "176", "%88", "%89", "%90") \
    X(24, 12, "192", "%96", "%97", "%98") \
    X(26, 13, "208", "%104", "%105", "%106") \
    X(28, 14, "224", "%112", "%113", "%114") \
    X(30, 15, "240", "%120", "%121", "%122") \
    X(32, 16, "256", "%128", "%129", "%130")

/* Shapes of wgmma with A in registers: X(N / 16, N, asm operands of A's four registers, of descriptor B and of
   scale_d). */
#define GMM_WGMMA_RS_LIST(X) \
    X(1, "16", "%8,%9,%10,%11", "%12", "%13") \
    X(2, "32", "%16,%17,%18,%19", "%20", "%21") \
    X(3, "48", "%24,%25,%26,%27", "%28", "%29") \
    X(4, "64", "%32,%33,%34,%35", "%36", "%37") \
    X(5, "80", "%40,%41,%42,%43", "%44", "%45") \
    X(6, "96", "%48,%49,%50,%51", "%52", "%53") \
    X(7, "112", "%56,%57,%58,%59", "%60", "%61") \
    X(8, "128", "%64,%65,%66,%67", "%68", "%69") \
    X(9, "144", "%72,%73,%74,%75", "%76", "%77") \
    X(10, "160", "%80,%81,%82,%83", "%84", "%85") \
    X(11, "176", "%88,%89,%90,%91", "%92", "%93") \
    X(12, "192", "%96,%97,%98,%99", "%100", "%101")

#define GMM__H(b) GMM__W(d[(b)]), GMM__W(d[(b) + 1]), GMM__W(d[(b) + 2]), GMM__W(d[(b) + 3])
#define GMM__V(b) GMM__H(b), GMM__H((b) + 4)
/* Accumulators are read and written, by set too: else ptxas gives them other registers in every stage of a loop. */
#define GMM__W(x) "+f"(x)

#define GMM__BODY GMM__BODY_WGMMA
#define GMM__WGMMA_SCALE_D(c) c
/* dtype, operation, shape and types of wgmma, major modes of A and B */
#define GMM__ROW (bf16, fwd, "k16.f32.bf16.bf16", ", 0, 0")
#include GMM_KERNELS_FILE
#define GMM__ROW (bf16, dgrad, "k16.f32.bf16.bf16", ", 1, 0")
#include GMM_KERNELS_FILE
#define GMM__ROW (bf16, wgrad, "k16.f32.bf16.bf16", ", 1, 1")
#include GMM_KERNELS_FILE
#define GMM__ROW (f16, fwd, "k16.f32.f16.f16", ", 0, 0")
#include GMM_KERNELS_FILE
#define GMM__ROW (f16, dgrad, "k16.f32.f16.f16", ", 1, 0")
#include GMM_KERNELS_FILE
#define GMM__ROW (f16, wgrad, "k16.f32.f16.f16", ", 1, 1")
#include GMM_KERNELS_FILE
#ifndef GMM_NO_QUANT
#define GMM__ROW (e4m3, add, "k32.f32.e4m3.e4m3", "")
#include GMM_KERNELS_FILE
#define GMM__ROW (e5m2, add, "k32.f32.e5m2.e4m3", "")
#include GMM_KERNELS_FILE
#endif

/* One wgmma of M = 64, N = 16 n16 and K = 16 with register-sourced A (RS): d = A B + d, or d = A B where `scale_d` is
   0. B is K-major. */
GMM__DEVICE void gmm_wgmma_rs_bf16(const int n16, float *d, const uint32_t a_regs[4], uint64_t desc_b,
                                   const int scale_d = 1) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    switch (n16) {
#define GMM__X(u, n, regs, desc, c) \
    case u: asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, " c ", 0;\n wgmma.mma_async.sync.aligned.m64n" n \
                         "k16.f32.bf16.bf16 {" GMM__T##u "}, {" regs "}, " desc ", p, 1, 1, 0;\n}" \
                         : GMM__V##u : "r"(a_regs[0]), "r"(a_regs[1]), "r"(a_regs[2]), "r"(a_regs[3]), \
                         "l"(desc_b), "r"(scale_d)); break;
    GMM_WGMMA_RS_LIST(GMM__X)
#undef GMM__X
    default: break;
    }
#endif
}

#undef GMM__WGMMA_SCALE_D
#ifndef GMM_NO_QUANT
#define GMM__WGMMA_SCALE_D(c) "0"
/* dtype, operation, shape and types of wgmma, major modes of A and B */
#define GMM__ROW (e4m3, set, "k32.f32.e4m3.e4m3", "")
#include GMM_KERNELS_FILE
#define GMM__ROW (e5m2, set, "k32.f32.e5m2.e4m3", "")
#include GMM_KERNELS_FILE
#undef GMM__WGMMA_SCALE_D
#endif
#undef GMM__BODY

/* Matrix descriptors of wgmma (PTX manual): in units of 16 bytes, bits 0 to 13 are the start address, bits 16 to 29 the
   leading dimension byte offset, bits 32 to 45 the stride dimension byte offset; 1 in bits 62 and 63 is the 128-byte
   swizzle. */
/* That of an operand's tile in boxes of 128-byte rows with 128-byte swizzle. K-major tiles are [mn][k]; MN-major tiles
   (`mn_major`) are boxes of [k][64 mn] one after another. 1024: 8 rows of 128 bytes; 8192: a box of 64 k by 64 mn. */
GMM__DEVICE uint64_t gmm_wgmma_desc(uint32_t smem, int mn_major) {
    return (uint64_t)1 << 62 | (uint64_t)(1024 >> 4) << 32 | (uint64_t)(mn_major ? 8192 >> 4 : 1) << 16 |
           (smem & 0x3FFFF) >> 4;
}
/* That of a K-major tile, from the low word of its descriptor: the high word is the same for all of them. */
GMM__DEVICE uint64_t gmm_wgmma_desc_k_major(uint32_t address_word) {
    return (uint64_t)(1u << 30 | 1024 >> 4) << 32 | address_word;
}
/* That of a K-major operand without swizzle: blocks of 8 rows of 16 bytes. next_rows, next_k: bytes from a block to
   that of the next 8 rows, and to that of the next 16 bytes along K. */
GMM__DEVICE uint64_t gmm_wgmma_desc_blocks(uint32_t smem, uint32_t next_rows, uint32_t next_k) {
    return (uint64_t)(next_rows >> 4) << 32 | (uint64_t)(next_k >> 4) << 16 | (smem & 0x3FFFF) >> 4;
}
/* Which element of a warp group's product of wgmma (M = 64) is accumulator `u` of a thread in warp `warp` (0 to 3) of
   the warp group: its row, along M, and its column, along N. swap_ab exchanges them: the 16-bit Hopper products have
   columns of D along M and rows of D along N; the FP8 products have rows along M. */
GMM__DEVICE int gmm_wgmma_acc_m(int warp, int lane, int u) { return 16 * warp + lane / 4 + (u & 2 ? 8 : 0); }
GMM__DEVICE int gmm_wgmma_acc_n(int lane, int u) { return 8 * (u / 4) + lane % 4 * 2 + u % 2; }
/* The address that lane `lane` of warp `warp` passes to stmatrix.x4.trans for 16 rows of D, of which the warp has 16 of
   64 columns as accumulators (swap_ab). `to`: of the first row and of these 64 columns, in rows of row_bytes whose
   chunks of 16 bytes are swizzled as TMA with 128 bytes does. */
GMM__DEVICE uint32_t gmm_wgmma_stmatrix_at(uint32_t to, int row_bytes, int warp, int lane) {
    return to + (lane / 16 * 8 + lane % 8) * row_bytes + (((2 * warp + lane / 8 % 2) ^ (lane % 8)) << 4);
}
/* State of the consumer warp groups, and behind it the tile scheduler of the Hopper products on the device: the split
   reader, the choice of a tile for the split, the sums of cluster tiles. schedule.cuh has the arithmetic and says
   what a cluster tile is. From gmm_sm90_lane_sum on, functions run in the scheduler warp of a CTA, unless they say
   otherwise. */

/* Bytes of a CTA's group tables (ends, work_ends) in the workspace. */
static GMM__UNUSED size_t gmm_sm90_table_bytes(int64_t groups) { return 8 * ((size_t)groups + 1); }

/* The operands of a tile as a consumer warp group reads them: stages of the contraction; wgmma descriptors of the warp
   group's columns (B) and of the rows (A) in stage 0; of packed weights the warp's codes and scales there. */
typedef struct gmm_sm90_operands {
    uint32_t k_tiles;
    uint64_t desc_b, desc_a;
    uint32_t packed_at, scales_at;
} gmm_sm90_operands;

/* The stores of a consumer warp group. With deferred stores, D of the previous tile is pending in registers. */
typedef struct gmm_sm90_store_state {
    const gmm_sm90_args *args;
    const gmm_sm90_tile *tile; /* the previous one */
    int wg;
    char *slots;               /* store slots of the warp group */
    int pending;               /* blocks of 16 rows of that tile that are not stored yet */
    uint32_t part;             /* parts stored so far: of the CTA in wgrad, else of this warp group; the next one is
                                  written to slot part % slots */
} gmm_sm90_store_state;

/* Where a consumer warp group stores a tile. */
typedef struct gmm_sm90_output {
    const gmm_gemm_args *p;
    const gmm_sm90_tile *tile;
    int wg, col0;      /* warp group, and its first column in the tile */
    char *d;           /* the tile's first row of D, at column 0 */
    int64_t pitch;     /* bytes from a row of D to the next */
    int size;          /* bytes of an element of D */
    float beta;
    char *slots;       /* the warp group's store slots */
    uint32_t slots_at; /* all store slots */
    uint32_t bars;     /* barriers of the slots */
} gmm_sm90_output;
/* Whether rows of D begin at multiples of 16 bytes. */
GMM__DEVICE int gmm_sm90_d_aligned(const gmm_sm90_output *out) {
    return (((uint64_t)(uintptr_t)out->d | (uint64_t)out->pitch) & 15) == 0;
}

/* Four neighbouring elements of D as stored, and one of them as fp32. Loading and decoding are two functions, so that
   all loads can be issued before the first value is decoded. */
GMM__DEVICE uint4 gmm_sm90_d_load4(int size, const char *from) {
    uint4 v = make_uint4(0, 0, 0, 0);
    if (size == 4) v = *(const uint4 *)from;
    else *(uint2 *)&v = *(const uint2 *)from;
    return v;
}
GMM__DEVICE float gmm_sm90_d_value(gmm_dtype dtype, const uint4 *v, int i) {
    const uint32_t whole = i == 0 ? v->x : i == 1 ? v->y : i == 2 ? v->z : v->w, half = i < 2 ? v->x : v->y;
    return dtype == GMM_F32 ? __uint_as_float(whole) : gmm_widen(dtype, (uint16_t)(half >> 16 * (i & 1)));
}

/* wgmma's N for a tile of `rows` rows, in units of 8: odd values exist only where they save most (GMM_WGMMA_LIST). */
GMM__DEVICE int gmm_sm90_wgmma_n8(int32_t rows) {
    const int n8 = (rows + 7) / 8;
    return n8 % 2 && n8 != 17 && n8 != 19 && n8 != 21 ? n8 + 1 : n8;
}

/* Inclusive prefix sum over the lanes of a warp. Loops over groups that are followed by warp-wide instructions take 32
   groups per pass, one per lane, and all lanes make every pass: if some left earlier, the code behind the loop would be
   issued once for each set of lanes, until the warp converges. */
GMM__DEVICE int32_t gmm_sm90_lane_sum(int32_t v) {
    const int32_t lane = (int32_t)threadIdx.x & 31;
    int32_t i;
#pragma unroll
    for (i = 1; i < 32; i *= 2) {
        const int32_t other = __shfl_up_sync(0xFFFFFFFFu, v, (unsigned)i);
        if (lane >= i) v += other;
    }
    return v;
}

/* Brings the kernel parameters to the constant cache: warp w reads one word of line w, of 64 bytes. Without it the
   scheduler would wait for one cache miss per line, one after another. All warps. */
GMM__DEVICE void gmm_sm90_prefetch_params(const uint32_t *words, int bytes, int warp) {
    if (64 * warp < bytes) gmm_touch(words[16 * warp]);
}
/* Entry i of the split, clamped to [0, capacity]; 0 where it does not exist. Read from the L2, because the predecessor
   may still write it: it is read before griddepcontrol.wait and again after it. Words are loaded without a branch on
   the dtype, so that the loads of several entries are in flight together. */
GMM__DEVICE int32_t gmm_sm90_split_entry(const gmm_groups *s, int32_t i, int exists) {
    const int is_i64 = s->dtype == GMM_I64, capacity = (int32_t)s->capacity;
    const int *const words = (const int *)s->splits + (is_i64 ? 2 * (int64_t)i : i);
    const int low = exists ? __ldcg(words) : 0, high = exists && is_i64 ? __ldcg(words + 1) : low >> 31;
    return high < 0 ? 0 : high > 0 || low < 0 || low > capacity ? capacity : low;
}
/* Combines the end of a group with the entry of the next one, by the rule of gmm_split_end. It is associative. */
GMM__DEVICE int32_t gmm_sm90_split_end(int by_offsets, int32_t capacity, int32_t end, int32_t entry) {
    return by_offsets ? max(end, entry) : (int32_t)min((uint32_t)end + (uint32_t)entry, (uint32_t)capacity);
}
/* Inclusive scan of the entries of 32 groups, one per lane: their ends as if no row came before them. Whole warp. */
GMM__DEVICE int32_t gmm_sm90_scan_entries(const int by_offsets, int32_t capacity, int32_t entry) {
    const int32_t lane = (int32_t)threadIdx.x & 31;
    int32_t i;
#pragma unroll
    for (i = 1; i < 32; i *= 2) {
        const int32_t other = __shfl_up_sync(0xFFFFFFFFu, entry, (unsigned)i);
        if (lane >= i) entry = gmm_sm90_split_end(by_offsets, capacity, other, entry);
    }
    return entry;
}
/* Whether the first tile is planned before griddepcontrol.wait. Then the plan may read the split alone, which is
   compared after the wait, and write shared memory alone: so neither group tables in the workspace, nor frozen and
   beta, which gmm_sm90_has_work reads in wgrad. All warps. */
GMM__DEVICE int gmm_sm90_plans_early(const gmm_gemm_args *p, const int32_t *tables, int k_grouped) {
    return !tables && !(k_grouped && (p->frozen || p->beta));
}
/* What the tile choice depends on besides the groups' ends: rows of the largest group, and non-empty groups. */
typedef struct gmm_sm90_split_stats {
    int32_t max_rows, nonempty;
} gmm_sm90_split_stats;
/* Reads the split by the rule of gmm_split_end and writes the groups' ends [G + 1]. Whole warp. */
GMM__DEVICE gmm_sm90_split_stats gmm_sm90_read_split(const gmm_groups *s, int32_t *ends) {
    const int by_offsets = s->form == GMM_SPLIT_OFFSETS;
    const int32_t capacity = (int32_t)s->capacity, lane = (int32_t)threadIdx.x & 31;
    gmm_sm90_split_stats stats = { 0, 0 };
    int32_t rows_before = 0, g;
    if (lane == 0) ends[0] = 0;
#pragma unroll 4
    for (g = lane; (g & ~31) < s->count; g += 32) {
        const int32_t entry = gmm_sm90_split_entry(s, g + by_offsets, g < s->count);
        if (g < s->count) ends[g + 1] = entry;
    }
#pragma unroll 1
    for (g = lane; (g & ~31) < s->count; g += 32) {
        int32_t end = g < s->count ? ends[g + 1] : 0, start;
        /* by_offsets is a constant within each scan, so that its steps need no select */
        if (by_offsets) end = gmm_sm90_scan_entries(1, capacity, end);
        else end = gmm_sm90_scan_entries(0, capacity, end);
        end = gmm_sm90_split_end(by_offsets, capacity, rows_before, end);
        start = __shfl_up_sync(0xFFFFFFFFu, end, 1);
        if (lane == 0) start = rows_before;
        if (g < s->count) ends[g + 1] = end;
        stats.max_rows = max(stats.max_rows, end - start);
        stats.nonempty += __popc(__ballot_sync(0xFFFFFFFFu, end > start));
        rows_before = __shfl_sync(0xFFFFFFFFu, end, 31);
    }
    stats.max_rows = __reduce_max_sync(0xFFFFFFFFu, stats.max_rows);
    __syncwarp();
    return stats;
}
/* Whether entry g of the split, as gmm_sm90_split_entry reads it again, contradicts `ends`. In a faulty split, whose
   ends were clamped, an entry may contradict them although it is the same. */
GMM__DEVICE int gmm_sm90_entry_changed(int32_t by_offsets, const int32_t *ends, int32_t g, int32_t entry) {
    return entry != ends[g + 1] - (by_offsets ? 0 : ends[g]);
}
/* Whether `ends`, which were read before griddepcontrol.wait, still describe the split after it. FP8 products. Whole
   warp. */
GMM__DEVICE int gmm_sm90_split_unchanged(const gmm_groups *s, const int32_t *ends) {
    const int32_t by_offsets = s->form == GMM_SPLIT_OFFSETS, lane = (int32_t)threadIdx.x & 31;
    int32_t g;
    int changed = 0;
#pragma unroll 4
    for (g = lane; (g & ~31) < s->count; g += 32) {
        const int exists = g < s->count;
        const int32_t entry = gmm_sm90_split_entry(s, g + by_offsets, exists);
        changed |= exists && gmm_sm90_entry_changed(by_offsets, ends, g, entry);
    }
    changed = __any_sync(0xFFFFFFFFu, changed);
    __syncwarp();
    return !changed;
}
/* The same in the check warp of 16-bit products, which also publishes the first tile if the split is unchanged. It
   loads all entries into registers before it waits until the plan is complete, so that the loads and the plan overlap.
   After griddepcontrol.wait. */
GMM__DEVICE void gmm_sm90_check_split(const gmm_groups *s, const int32_t *ends, gmm_sm90_ring *ring, uint32_t bars) {
    const int32_t by_offsets = s->form == GMM_SPLIT_OFFSETS, lane = (int32_t)threadIdx.x & 31;
    int32_t entry[GMM_SM90_SMEM_GROUPS / 32];
    int changed = 0, i;
#pragma unroll
    for (i = 0; i < GMM_SM90_SMEM_GROUPS / 32; i++) {
        const int32_t g = 32 * i + lane;
        entry[i] = 32 * i >= s->count ? 0 : gmm_sm90_split_entry(s, g + by_offsets, g < s->count);
    }
    gmm_mbarrier_wait(gmm_sm90_first_tile_planned(bars), 0);
#pragma unroll
    for (i = 0; i < GMM_SM90_SMEM_GROUPS / 32; i++) {
        const int32_t g = 32 * i + lane;
        if (32 * i >= s->count) break;
        changed |= g < s->count && gmm_sm90_entry_changed(by_offsets, ends, g, entry[i]);
    }
    changed = __any_sync(0xFFFFFFFFu, changed);
    if (lane == 0) {
        ring->planned_late = changed;
        gmm_mbarrier_arrive(gmm_sm90_split_checked(bars));
        if (!changed) gmm_mbarrier_arrive(gmm_sm90_tile_full(bars, 0));
    }
    __syncwarp();
}
/* Sets the fault bits of the split that `ends` come from, and of the table of weights. Whole warp. */
GMM__DEVICE void gmm_sm90_report_faults(const gmm_groups *s, const gmm_gemm_args *p, const int32_t *ends) {
    const int by_offsets = s->form == GMM_SPLIT_OFFSETS;
    uint32_t fault = by_offsets && gmm_split_value(s, 0) != 0 ? (uint32_t)GMM_FAULT_MONOTONIC : 0;
    int32_t g;
    if (!s->fault) return;
#pragma unroll 1
    for (g = (int32_t)threadIdx.x & 31; g < s->count; g += 32) {
        (void)gmm_split_end(ends[g], gmm_split_value(s, g + by_offsets), s->form, s->capacity, s->row_align, &fault);
        if (p->b.table && ((uintptr_t)p->b.table[g] & 15)) fault |= (uint32_t)GMM_FAULT_ADDRESS;
    }
    if (fault) atomicOr(s->fault, fault);
}

GMM__DEVICE gmm_sm90_cta gmm_sm90_this_cta(void) {
    gmm_sm90_cta cta;
    cta.cluster_size = (int32_t)gmm_cluster_nctarank();
    cta.cta_rank = (int32_t)gmm_cluster_ctarank();
    return cta;
}

/* Tiles along the columns of D for tiles of at most `tile_rows` rows: `min_tiles`, or, where no group has more rows
   than one tile, as many more as fill the last round of the grid. Their widths are nearly equal multiples of
   `col_align` columns. */
GMM__DEVICE int32_t gmm_sm90_tiles_n(const gmm_gemm_args *p, int32_t min_tiles, int32_t col_align, int32_t tile_rows,
                                     int32_t cluster_size, gmm_sm90_split_stats stats) {
    const int32_t max_tiles = (p->n + col_align - 1) / col_align, grid = (int32_t)gridDim.x;
    if (stats.max_rows > tile_rows || stats.nonempty == 0) return min_tiles;
    return gmm_sm90_filling_tiles(stats.nonempty, min_tiles, max_tiles, grid, cluster_size,
                                  stats.max_rows <= GMM_SM90_SMALL_M);
}

/* Whether group g of wgrad has work: frozen groups and empty groups with beta 1 have none. */
GMM__DEVICE int gmm_sm90_has_work(const gmm_gemm_args *p, int32_t g, int32_t rows) {
    return !(p->frozen && p->frozen[g]) && !(rows == 0 && gmm_gemm_beta(p, g) == 1.0f);
}
/* Writes work_ends and s->odd_tiles. Whole warp. */
GMM__DEVICE void gmm_sm90_count_work(gmm_sm90_scheduler *s, int32_t cluster_size) {
    const int32_t G = s->p->groups, lane = (int32_t)threadIdx.x & 31;
    int32_t tiles_before = 0, g;
    if (lane == 0) s->work_ends[0] = 0;
#pragma unroll 1
    for (g = lane; (g & ~31) < G; g += 32) {
        int32_t tiles = 0;
        if (g < G && (!s->k_grouped || gmm_sm90_has_work(s->p, g, s->ends[g + 1] - s->ends[g])))
            tiles = gmm_sm90_group_tiles(s, g, cluster_size);
        tiles = tiles_before + gmm_sm90_lane_sum(tiles);
        /* if the number of all tiles is odd, the last one is a cluster tile by itself */
        if (g < G) s->work_ends[g + 1] = (tiles + (g == G - 1 ? cluster_size - 1 : 0)) >> (cluster_size - 1);
        tiles_before = __shfl_sync(0xFFFFFFFFu, tiles, 31);
    }
    s->odd_tiles = tiles_before & (cluster_size - 1);
    __syncwarp();
}

/* The time that D of a tile takes, in stages of 16-bit products (measured with few tokens): 13 stages for fp32 that is
   read and written. FP8 passes twice as much to gmm_sm90_plan_balance, since it multiplies 64 rows in half the time. */
GMM__DEVICE int32_t gmm_sm90_d_stages(const gmm_gemm_args *p) {
    return gmm_kmat_size(&p->d) * (p->beta || p->beta_all != 0.0f ? 2 : 1) * 13 / 8;
}
/* Writes the groups to `order`, the longest first, equal ones by number. Whole warp. */
GMM__DEVICE void gmm_sm90_sort_groups(const int32_t *ends, int32_t groups, unsigned char *order) {
    int32_t g, i;
#pragma unroll 1
    for (g = (int32_t)threadIdx.x & 31; g < groups; g += 32) {
        const int32_t k = ends[g + 1] - ends[g];
        int32_t index = 0;
#pragma unroll 8
        for (i = 0; i < groups; i++) {
            const int32_t other = ends[i + 1] - ends[i];
            index += other > k || (other == k && i < g);
        }
        order[index] = (unsigned char)g;
    }
}
/* Decides whether a wgrad takes its tiles in the balanced order, and prepares it. Returns the decision, s->balanced.
   b, ends: in shared memory; with the pointers of s, which may be to the workspace, the code would need more registers.
   capacity: groups that the tables in shared memory serve, 0 where the workspace has the tables. min_load: see
   gmm_sm90_balance. Whole warp. */
GMM__DEVICE int gmm_sm90_plan_balance(gmm_sm90_scheduler *s, gmm_sm90_split_stats stats, int32_t capacity,
                                      int32_t min_load, gmm_sm90_balance *b, const int32_t *ends) {
    const int32_t cluster_size = (int32_t)gmm_cluster_nctarank(), clusters = (int32_t)gridDim.x >> (cluster_size - 1);
    int32_t c;
    s->balanced = clusters <= GMM_SM90_BALANCE_CLUSTERS && capacity >= GMM_SM90_BALANCE_GROUPS &&
                  s->p->groups <= GMM_SM90_BALANCE_GROUPS &&
                  gmm_sm90_is_skewed(ends[s->p->groups], stats.max_rows, stats.nonempty);
    if (!s->balanced) return 0;
    gmm_sm90_sort_groups(ends, s->p->groups, b->order);
#pragma unroll 1
    for (c = (int32_t)threadIdx.x & 31; c < clusters; c += 32) b->load[c] = 0;
    if ((threadIdx.x & 31) == 0) {
        const int32_t work = gmm_sm90_group_tiles(s, 0, cluster_size) >> (cluster_size - 1);
        b->rounds = work / clusters;
        b->rest = work % clusters;
        b->min_load = min_load;
        b->cluster = (int32_t)blockIdx.x >> (cluster_size - 1);
        b->clusters = clusters;
        b->position = -1;
        b->first = b->count = b->below = 0;
    }
    __syncwarp();
    return 1;
}
/* Gives the rest of the group at hand, b->count cluster tiles, to the clusters with the least load, one each. Lane l
   has clusters l, l + 32, ...; a search finds the most load with which a cluster takes one. Whole warp. */
GMM__DEVICE void gmm_sm90_assign_rest(gmm_sm90_balance *b, const int32_t *ends, int32_t groups) {
    enum { CLUSTERS = GMM_SM90_BALANCE_CLUSTERS / 32 };
    const int32_t lane = (int32_t)threadIdx.x & 31;
    int32_t loads[CLUSTERS], bound = 0, high = 1, below = 0, rest, bit, j;
#pragma unroll
    for (j = 0; j < CLUSTERS; j++) {
        const int exists = lane + 32 * j < b->clusters;
        loads[j] = exists ? b->load[lane + 32 * j] : 0x7FFFFFFF;
        if (exists) high = max(high, loads[j]);
    }
    /* bit by bit, the largest load such that less than b->count clusters stay below it */
#pragma unroll 1
    for (bit = 1 << (31 - __clz(__reduce_max_sync(0xFFFFFFFFu, high))); bit > 0; bit >>= 1) {
        int32_t count = 0;
#pragma unroll
        for (j = 0; j < CLUSTERS; j++) count += __popc(__ballot_sync(0xFFFFFFFFu, loads[j] < bound + bit));
        if (count < b->count) bound += bit;
    }
    rest = b->count;
#pragma unroll
    for (j = 0; j < CLUSTERS; j++) {
        const int32_t mine = b->load[b->cluster], c = lane + 32 * j;
        below += __popc(__ballot_sync(0xFFFFFFFFu, loads[j] < mine || (loads[j] == mine && c < b->cluster)));
        rest -= __popc(__ballot_sync(0xFFFFFFFFu, loads[j] < bound));
    }
    __syncwarp(); /* all lanes have read the loads and the count */
    if (lane == 0) {
        b->below = below;
        b->count = below < b->count;
    }
#pragma unroll
    for (j = 0; j < CLUSTERS; j++) { /* of the clusters with that load, the first `rest` take one */
        const uint32_t equal = __ballot_sync(0xFFFFFFFFu, loads[j] == bound);
        const int32_t g = b->order[b->position - groups];
        if (loads[j] < bound || (loads[j] == bound && __popc(equal & ((1u << lane) - 1)) < rest))
            b->load[lane + 32 * j] = loads[j] + gmm_sm90_tile_load(b, ends[g + 1] - ends[g]);
        rest -= __popc(equal);
    }
    __syncwarp();
}
/* The group of the cluster's cluster tile number `index` in the balanced order, and the number within the group; G and
   -1 behind the last. Whole warp. */
GMM__DEVICE int32_t gmm_sm90_balanced_tile(gmm_sm90_balance *b, const int32_t *ends, const gmm_gemm_args *p,
                                           int32_t index, int32_t *work) {
    while (index >= b->first + b->count) {
        const int32_t position = gmm_sm90_next_position(b, p->groups);
        int32_t g;
        if (position >= 2 * p->groups) {
            *work = -1;
            return p->groups;
        }
        g = b->order[position < p->groups ? position : position - p->groups];
        __syncwarp(); /* all lanes have read the position */
        if ((threadIdx.x & 31) == 0) {
            b->first += b->count;
            b->position = position;
            b->count = !gmm_sm90_has_work(p, g, ends[g + 1] - ends[g]) ? 0
                       : position < p->groups                         ? b->rounds
                                                                      : b->rest;
        }
        __syncwarp();
        if (position >= p->groups) gmm_sm90_assign_rest(b, ends, p->groups);
    }
    *work = gmm_sm90_balanced_work(b, p->groups, index - b->first);
    return b->order[b->position < p->groups ? b->position : b->position - p->groups];
}

/* A tile of a kernel: columns, and the most blocks of 16 rows. m16 is 0 where the kernel has no such tile. */
typedef struct gmm_sm90_tile_shape {
    int32_t n, m16;
} gmm_sm90_tile_shape;

/* The price model of the tile scheduler: chooses the tile, unless `choice` (gmm_sm90_tile_choice) demands one, and its
   height in blocks of 16 rows that take the least time for the split. Returns the height; *chosen: whether the tile is
   `second`. Results do not depend on the choice. Candidates are numbered by tile, then by height from m16 downwards: to
   3/4 of m16 if power_limited, else to m16 / 2 + 1. Eight at most, since four lanes evaluate each candidate.
   power_limited: cooperative tiles of plain operands, whose clocks are linear in the height. They run at the power
   limit, so that CTAs which idle in the last round speed up the others: idle time counts 0.69 of its length. Not
   power_limited: ping-pong tiles, and packed weights, for which an order of heights is enough. Their clocks are the
   maximum of products, shared-memory traffic and store. Constants are clocks of one H200 (KERNELS.md, "Clock and power
   limit"). gmm__wgmma_choose prices kernels on the host for average sizes, by constants of its own (wgmma_price.h).
   Whole warp. */
GMM__DEVICE int32_t gmm_sm90_choose_tile(const gmm_sm90_scheduler *s, gmm_sm90_split_stats stats, int32_t choice,
                                         const int power_limited, const gmm_sm90_tile_shape first,
                                         const gmm_sm90_tile_shape second, int32_t *chosen) {
    const int32_t n0 = first.n, m16_0 = first.m16, n1 = second.n, m16_1 = second.m16;
    const int32_t G = s->p->groups, heights0 = power_limited ? m16_0 / 4 + 1 : m16_0 - m16_0 / 2;
    const int32_t heights1 = m16_1 ? m16_1 / 4 + 1 : 0;
    float total_clocks = 0.0f, total_tiles = 0.0f, max_clocks = 0.0f, cost = 0.0f;
    uint32_t min_cost;
    int32_t i, candidate, is_second, valid;
    if (choice != gmm_sm90_tile_by_split) {
        /* where every group fits one tile of the lowest height, all heights cost the same */
        const int32_t tallest = choice ? m16_1 : m16_0;
        const int32_t lowest = tallest - (choice ? heights1 : heights0) + 1;
        *chosen = choice;
        if (stats.max_rows <= 16 * lowest) return tallest;
    }
    candidate = ((int32_t)threadIdx.x & 31) / 4;
    is_second = candidate >= heights0;
    {
        const float k_tiles = (float)gmm_sm90_k_tiles(s->p->k);
        const float inverse_height = __fdividef(1.0f, (float)(is_second ? m16_1 + heights0 - candidate
                                                                        : m16_0 - candidate));
        const int wide = (is_second ? n1 : n0) == 256;
        const float fixed = wide ? 48.0f * k_tiles + 2000.0f : 56.0f * k_tiles + 5800.0f;
        const float slope = wide ? 134.5f * k_tiles + 340.0f : 66.3f * k_tiles - 270.0f;
#pragma unroll 1
        for (i = (int32_t)threadIdx.x & 3; (i & ~3) < G; i += 4) {
            const int32_t rows = i < G ? s->ends[i + 1] - s->ends[i] : 0;
            const float blocks = (float)(rows + 8) * 0.0625f, /* of 16 rows, rounded by a half */
                        tiles = ceilf((blocks - 0.5f) * inverse_height);
            const float height = __fdividef(blocks, fmaxf(tiles, 1.0f));
            const float clocks = power_limited ? fixed + slope * height
                                               : fmaxf(k_tiles * fmaxf(256.0f + 44.0f * height, 64.0f * height),
                                                       330.0f * height) + 200.0f;
            total_tiles += tiles;
            total_clocks += tiles * clocks;
            if (tiles > 0.0f) max_clocks = fmaxf(max_clocks, clocks);
        }
    }
    for (i = 2; i > 0; i /= 2) {
        total_clocks += __shfl_xor_sync(0xFFFFFFFFu, total_clocks, i);
        total_tiles += __shfl_xor_sync(0xFFFFFFFFu, total_tiles, i);
        max_clocks = fmaxf(max_clocks, __shfl_xor_sync(0xFFFFFFFFu, max_clocks, i));
    }
    candidate = (gmm_tid_x() & 31) / 4; /* recomputed, so that no register holds it during the loop above */
    is_second = candidate >= heights0;
    valid = candidate < heights0 + heights1 && (choice == gmm_sm90_tile_by_split || choice == is_second);
    if (total_tiles > 0.0f) {
        const int32_t cols = heights1 > 0 && is_second ? n1 : n0; /* n1 is 0 where there is no second tile */
        const float tiles_per_cta = __fdividef((float)((s->p->n + cols - 1) / cols), (float)gridDim.x);
        const float rounds = total_tiles * tiles_per_cta;
        cost = __fdividef(ceilf(rounds), rounds);
        /* where the heights of tiles differ, some CTA gets more tall tiles than others */
        if (power_limited)
            cost = 0.31f + 0.69f * cost * (1.0f + 1.26f * (__fdividef(max_clocks * total_tiles, total_clocks) - 1.0f) *
                                                          rsqrtf(rounds));
        cost = fminf(cost * total_clocks * tiles_per_cta, 3.0e38f);
    }
    min_cost = __reduce_min_sync(0xFFFFFFFFu, valid ? __float_as_uint(cost) : 0x7FFFFFFFu);
    candidate = (__ffs((int)__ballot_sync(0xFFFFFFFFu, valid && __float_as_uint(cost) == min_cost)) - 1) / 4;
    *chosen = candidate >= heights0;
    return candidate >= heights0 ? m16_1 + heights0 - candidate : m16_0 - candidate;
}
/* Packed weights (MX8, MX4, NV4) as the register operand of wgmma. A stage holds, for each block of 64 columns, a box
   of 64 codes per column (FP8 swizzled by 64 bytes), then A, then four scale bytes per column: those of the four blocks
   of 16 elements of this stage, or of four blocks of 32 elements, of which an even stage uses the first two. */

/* Scales of a thread's two columns for the stage's four steps of 16, as bf16x2 with equal halves; FP8 scales are
   multiplied by 2^120, by which the decoded elements are too small. smem_at: scales of the warp's 16
   columns; odd: the stage uses the upper two scale bytes. Returns whether a product could leave the range of bf16: then
   gmm_sm90_packed_fragment_wide makes the fragments. */
GMM__DEVICE int gmm_sm90_packed_scales(const int b_format, uint32_t smem_at, int odd, uint32_t scales[2][4]) {
    const uint32_t lane = threadIdx.x & 31;
    int r, j, wide = 0;
#pragma unroll
    for (r = 0; r < 2; r++) {
        uint32_t word = gmm_ld_shared_u32(smem_at + 4 * (lane / 4) + 32 * r), v[2];
        if (b_format == gmm_sm90_b_format_nv4) {
            gmm_fp8_to_16bit_x4(GMM_BF16, GMM_E4M3, word, v);
#pragma unroll
            for (j = 0; j < 4; j++) scales[r][j] = gmm_prmt(v[j / 2], 0u, j % 2 ? 0x3232u : 0x1010u);
            continue;
        }
        if (odd) word >>= 16;
#pragma unroll
        for (j = 0; j < 4; j++) {
            v[0] = word >> (j / 2 * 8) & 0xFFu;
            if (b_format == gmm_sm90_b_format_mx8) {
                scales[r][j] = v[0] * 0x00800080u + 0x3C003C00u;
                wide |= v[0] > 134;
            } else scales[r][j] = (v[0] == 0 ? 0x0040u : v[0] == 255 ? 0x7FFFu : v[0] << 7) * 0x00010001u;
        }
    }
    return wide;
}
/* Codes of a thread for the stage's four steps: of columns lane / 4 and lane / 4 + 8, elements 2 (lane % 4), + 1, + 8
   and + 9, as four FP8 codes or as two bytes. smem_at: codes of the warp's 16 columns. Returns whether an FP8 code is
   NaN. */
GMM__DEVICE int gmm_sm90_packed_load(const int b_format, uint32_t smem_at, uint32_t codes[4][2]) {
    const uint32_t lane = threadIdx.x & 31, c = lane & 3;
    uint32_t nan = 0;
    int r, j;
#pragma unroll
    for (r = 0; r < 2; r++)
#pragma unroll
        for (j = 0; j < 4; j++)
            if (b_format == gmm_sm90_b_format_mx8) {
                uint32_t low, high;
                gmm_ld_shared_b16_pair(smem_at + lane / 4 * 64 + ((lane / 8 ^ (uint32_t)j) << 4) + 2 * c + 512 * r,
                                       &low, &high);
                codes[j][r] = low | high << 16;
            } else if (j % 2 == 0) {
                uint32_t w[4];
                gmm_ld_shared_v4_u32(smem_at + lane / 4 * 32 + 256 * r + 8 * j, w);
                codes[j][r] = gmm_prmt(w[0], w[1], c * 0x11u + 0x40u);
                codes[j + 1][r] = gmm_prmt(w[2], w[3], c * 0x11u + 0x40u);
            }
    if (b_format == gmm_sm90_b_format_mx8)
#pragma unroll
        for (j = 0; j < 4; j++)
#pragma unroll
            for (r = 0; r < 2; r++) nan |= (codes[j][r] & 0x7F7F7F7Fu) + 0x01010101u;
    return (nan & 0x80808080u) != 0;
}
/* A thread's wgmma fragment for one step: codes times scales, as bf16x2. */
GMM__DEVICE void gmm_sm90_packed_fragment(const int b_format, const uint32_t codes[2], uint32_t scales0,
                                          uint32_t scales1, uint32_t fragment[4]) {
    int r;
#pragma unroll
    for (r = 0; r < 2; r++) {
        const uint32_t u = codes[r], scale = r ? scales1 : scales0;
        uint32_t x, y;
        if (b_format == gmm_sm90_b_format_mx8) { /* exponent and mantissa shifted to bf16's bits: 2^-120 of the value */
            x = gmm_prmt(u, 0u, 0x1404u);
            y = gmm_prmt(u, 0u, 0x3424u);
            x = (x & 0x80008000u) | (x >> 4 & 0x07F007F0u);
            y = (y & 0x80008000u) | (y >> 4 & 0x07F007F0u);
        } else { /* table lookup: low and high bytes of eight values, then the signs */
            const uint32_t low = gmm_prmt(0xC0800000u, 0xC0804000u, u & 0x7777u);
            const uint32_t high = gmm_prmt(0x3F3F3F00u, 0x40404040u, u & 0x7777u), up = u << 4;
            x = gmm_prmt(low, high, 0x5140u) | (gmm_prmt(up, u, 0x4000u) & 0x80008000u);
            y = gmm_prmt(low, high, 0x7362u) | (gmm_prmt(up, u, 0x5111u) & 0x80008000u);
        }
        fragment[r] = gmm_mul_16bit_x2(GMM_BF16, x, scale);
        fragment[r + 2] = gmm_mul_16bit_x2(GMM_BF16, y, scale);
    }
}
/* The same for FP8 codes with NaN or scales above 2^7, where the factor 2^120 would overflow. */
GMM__DEVICE void gmm_sm90_packed_fragment_wide(const uint32_t codes[2], uint32_t scales0, uint32_t scales1,
                                               uint32_t fragment[4]) {
    int r;
#pragma unroll
    for (r = 0; r < 2; r++) {
        const uint32_t v = ((r ? scales1 : scales0) - 0x3C00u) >> 7 & 0xFFu; /* the E8M0 byte again */
        const uint32_t scale = (v == 0 ? 0x0040u : v == 255 ? 0x7FFFu : v << 7) * 0x00010001u;
        uint32_t pair[2];
        gmm_fp8_to_16bit_x4(GMM_BF16, GMM_E4M3, codes[r], pair);
        fragment[r] = gmm_mul_16bit_x2(GMM_BF16, pair[0], scale);
        fragment[r + 2] = gmm_mul_16bit_x2(GMM_BF16, pair[1], scale);
    }
}

/* Mainloop of packed weights for a consumer warp group: it dequantizes the fragments of a stage while the other warp
   group multiplies. packed_at, scales_at: codes and scales of this warp in stage 0. */
GMM__DEVICE void gmm_sm90_packed_mainloop(const int b_format, const int m16, float *acc, uint32_t k_tiles,
                                          uint32_t packed_at, uint32_t scales_at, uint64_t desc_a,
                                          gmm_sm90_pipeline *pipe) {
    gmm_sm90_stage s = gmm_sm90_stage_at(pipe->iter, pipe->stages);
    uint32_t k;
    uint32_t scales[2][4], codes[4][2], fragments[4][4];
    int j, wide;
#pragma unroll 1
    for (k = 0; k < k_tiles; k++) {
        const uint32_t a = (uint32_t)desc_a + s.index * (pipe->stage_bytes >> 4);
        gmm_sm90_wait_full(pipe->bars, s);
        wide = gmm_sm90_packed_load(b_format, packed_at + s.index * pipe->stage_bytes, codes);
        wide |= gmm_sm90_packed_scales(b_format, scales_at + s.index * pipe->stage_bytes, (int)(k & 1), scales);
#pragma unroll
        for (j = 0; j < 4; j++) gmm_sm90_packed_fragment(b_format, codes[j], scales[0][j], scales[1][j], fragments[j]);
        if (b_format == gmm_sm90_b_format_mx8 && wide)
#pragma unroll
            for (j = 0; j < 4; j++) gmm_sm90_packed_fragment_wide(codes[j], scales[0][j], scales[1][j], fragments[j]);
        __syncwarp();
        gmm_wgmma_fence();
#pragma unroll
        for (j = 0; j < 4; j++)
            gmm_wgmma_rs_bf16(m16, acc, fragments[j], gmm_wgmma_desc_k_major(a + j * (32 >> 4)));
        gmm_wgmma_commit();
        GMM__WGMMA_WAIT(0); /* until then no other instruction may use the registers of the wgmma */
        gmm_sm90_release_stage(pipe, s.index);
        gmm_sm90_stage_advance(&s, pipe->stages);
    }
    pipe->iter += k_tiles;
}

/* The scale loader: one warp copies the scales of every stage to shared memory, lane l those of columns l + 32 i.
   `width`: elements per scale; `scales`: address of the scales in stage 0. */
GMM__DEVICE void gmm_sm90_load_scales(const gmm_sm90_args *args, const int b_format, const int width, uint32_t scales,
                                      gmm_sm90_pipeline pipe, const gmm_sm90_tile *ring, uint32_t bars) {
    const uint32_t lane = threadIdx.x & 31;
    const gmm_scaling scaling = b_format == gmm_sm90_b_format_nv4 ? GMM_SCALING_NV16 : GMM_SCALING_MX32;
    uint32_t tile_index = 0;
    int i, e;
    for (;; tile_index++) {
        const gmm_sm90_tile *const t = &ring[tile_index % GMM_SM90_TILE_RING];
        const uint8_t *line[4];
        uint32_t k, k_tiles;
        int32_t blocks, word_step, aligned;
        __syncwarp();
        if (lane == 0) gmm_sm90_release_batch(bars, tile_index);
        gmm_sm90_wait_tile(bars, tile_index);
        if (t->row_blocks == 0) break;
        k_tiles = gmm_sm90_k_tiles(t->k);
        blocks = (t->k + width - 1) / width;
        {
            gmm_mat codes = args->codes;
            gmm__qview v;
            codes.scaling = scaling;
            v = gmm__qview_of(&codes, args->along, 0, t->g, 0, 0, args->rows, args->cols);
            word_step = gmm_qgemm_scale_strides_of(&codes, 0, v.lines).block4;
            aligned = ((uintptr_t)v.scale & 3) == 0;
#pragma unroll
            for (i = 0; i < 4; i++) {
                const int32_t c = (int32_t)lane + 32 * i;
                line[i] = v.scale + (c < t->cols ? gmm__qview_scale(&v, t->n0 + c, 0) : 0);
            }
        }
        for (k = 0; k < k_tiles; k++, pipe.iter++) {
            const uint32_t s = pipe.iter % pipe.stages, full = gmm_sm90_full(pipe.bars, s);
            const uint32_t to = scales + s * pipe.stage_bytes + 4 * lane;
            const int32_t word = (int32_t)(width == 16 ? k : k / 2);
            const int32_t left = blocks - 4 * word < 4 ? blocks - 4 * word : 4;
            gmm_mbarrier_wait(gmm_sm90_empty(pipe.bars, s), (pipe.iter / pipe.stages & 1) ^ 1);
#pragma unroll
            for (i = 0; i < 4; i++) {
                const int32_t count = (int32_t)lane + 32 * i < t->cols ? left : 0;
                const uint8_t *const from = line[i] + (int64_t)word * word_step;
                if (aligned) /* bytes past `count` become zeros */
                    gmm_cp_async_4_zfill(to + 128 * i, __cvta_generic_to_global(from), count);
                else {
                    uint32_t bytes = 0;
#pragma unroll 1
                    for (e = 0; e < count; e++) bytes |= (uint32_t)from[e] << 8 * e;
                    gmm_st_shared_u32(to + 128 * i, bytes);
                }
            }
            if (aligned) gmm_cp_async_mbarrier_arrive(full);
            else gmm_mbarrier_arrive(full);
        }
    }
    gmm_cp_async_wait_all();
}

/* TMA of the 16-bit products: the boxes of operands that the producer loads, and the boxes of D that the store warps of
   wgrad load and store. */

/* Where a matrix lies in a map that serves any address (gmm_sm90_map_matrix): bytes from the map's base, and from these
   the last two coordinates. */
GMM__DEVICE uint64_t gmm_sm90_map_offset(const void *data) { return (uint64_t)(uintptr_t)data - GMM_SM90_MAP_BASE; }
GMM__DEVICE int32_t gmm_sm90_map_z(uint64_t offset) { return (int32_t)(offset / 16 % GMM_SM90_MAP_STEPS); }
GMM__DEVICE int32_t gmm_sm90_map_w(uint64_t offset) { return (int32_t)(offset / (16 * GMM_SM90_MAP_STEPS)); }

/* The number of boxes of 64 columns of B that a tile reads. */
GMM__DEVICE int32_t gmm_sm90_b_boxes(const gmm_sm90_tile *t) { return (t->cols + 63) / 64; }

/* An operand of a tile as the producer loads it, in TMA boxes of 64 rows (A) or columns (B). What A has beyond a
   multiple of 64 rows comes in TMA boxes of 16 rows in forward and dgrad, where its rows are K-major. Those of a
   multicast operand alternate between the CTAs of a cluster. */
typedef struct gmm_sm90_operand {
    int mn_major;           /* its rows or columns are the first coordinate of its map, else the second */
    uint32_t box_bytes;     /* of 64 rows or columns */
    int32_t glu_block;      /* B of a glu product: gmm_sm90_glu.block; else 0 */
    int32_t step;           /* from one of 64 to the next: 64, or in a glu product from gate to linear columns */
    uint32_t mask, mask16;  /* a bit for each that this CTA loads, of 64 and of 16 rows */
    int32_t multicast;      /* both CTAs of the cluster get what one of them loads */
    int32_t first, first16; /* coordinate of the first row or column; rows before those of 16 rows */
    int32_t end, wrap;      /* the last two coordinates; of weights, the address */
} gmm_sm90_operand;

/* A and B of a tile. of_cta: what this CTA loads of a multicast operand. k_grouped: a constant, wgrad. */
GMM__DEVICE void gmm_sm90_assign_a(const gmm_sm90_tile *t, const int k_grouped, uint32_t of_cta, gmm_sm90_operand *a) {
    const int32_t num_boxes = k_grouped ? (t->row_blocks + 3) / 4 : t->row_blocks / 4;
    uint32_t mask = (1u << (num_boxes + (k_grouped ? 0 : t->row_blocks % 4))) - 1;
    a->multicast = t->multicast == GMM_SM90_MULTICAST_A;
    if (a->multicast) mask &= of_cta;
    if (t->cols <= 0) mask = 0;
    a->mask = mask & ((1u << num_boxes) - 1);
    a->mask16 = mask >> num_boxes;
    a->first = k_grouped ? t->m0 : GMM_SM90_RAGGED_ROWS - (t->end - t->row) + t->m0;
    a->first16 = 64 * num_boxes;
    a->end = t->end;
    a->wrap = GMM_SM90_RAGGED_ROWS;
}
GMM__DEVICE void gmm_sm90_assign_b(const gmm_gemm_args *p, const gmm_sm90_tile *t, const int k_grouped, uint32_t of_cta,
                                   gmm_sm90_operand *b) {
    b->multicast = t->multicast == GMM_SM90_MULTICAST_B;
    b->mask = t->cols > 0 ? (1u << gmm_sm90_b_boxes(t)) - 1 : 0;
    if (b->multicast) b->mask &= of_cta;
    b->first = b->glu_block ? gmm_sm90_glu_column(b->glu_block, t->n0) : t->n0;
    b->end = t->end;
    b->wrap = GMM_SM90_RAGGED_ROWS;
    if (!k_grouped && t->cols > 0) {
        const uint64_t offset = gmm_sm90_map_offset(gmm_kmat_data(&p->b, t->g));
        b->end = gmm_sm90_map_z(offset);
        b->wrap = gmm_sm90_map_w(offset);
    }
}

/* A stage as the producer fills it: where the operand lies in shared memory, its full barrier, and the coordinate along
   the contraction. */
typedef struct gmm_sm90_load {
    uint32_t at, full;
    int32_t k;
} gmm_sm90_load;
/* Loads TMA box b of an operand, of `rows` rows or columns; rows: a constant, 64 or 16. */
GMM__DEVICE void gmm_sm90_load_box(const gmm_sm90_operand *o, const CUtensorMap *map, const int rows, int b,
                                   const gmm_sm90_load *stage) {
    const int32_t before = rows * b + (rows == 16 ? o->first16 : 0);
    const int32_t at = o->first + (rows == 16 ? before : o->step * b);
    gmm_tma_load(stage->at + o->box_bytes / 64 * (uint32_t)before, map, stage->full, o->multicast,
                 o->mn_major ? at : stage->k, o->mn_major ? stage->k : at, o->end, o->wrap);
}
/* Loads what an operand has in a stage. most: a constant, the most TMA boxes that there may be. The loop is unrolled,
   since the producer has no time to spare (KERNELS.md, "Producer"). */
GMM__DEVICE void gmm_sm90_load_operand(const gmm_sm90_operand *o, const CUtensorMap *map, const int rows,
                                       const int most, const gmm_sm90_load *stage) {
    const uint32_t mask = rows == 16 ? o->mask16 : o->mask;
    int b;
#pragma unroll
    for (b = 0; b < most; b++)
        if (mask >> b & 1) gmm_sm90_load_box(o, map, rows, b, stage);
}
/* The same for two stages at once, in small-M mode: the boxes of the same lines are requested one after the other. The
   loads of weights bound the product there, so that the loop is not unrolled. */
GMM__DEVICE void gmm_sm90_load_operand_twice(const gmm_sm90_operand *o, const CUtensorMap *map, const int rows,
                                             const gmm_sm90_load stages[2]) {
    const uint32_t mask = rows == 16 ? o->mask16 : o->mask;
    int b;
#pragma unroll 1
    for (b = 0; mask >> b; b++)
        if (mask >> b & 1) {
            gmm_sm90_load_box(o, map, rows, b, &stages[0]);
            gmm_sm90_load_box(o, map, rows, b, &stages[1]);
        }
}

/* A TMA box of D: up to 64 rows by 128 bytes. A store slot holds a part of D, two boxes side by side. */
typedef struct gmm_sm90_d_box {
    int evict_first;    /* D is evicted from the L2 before operands, which are read again */
    int active;         /* TMA stores it */
    int32_t w, z, y, x; /* TMA coordinates: address of the group's D, first row, first column */
} gmm_sm90_d_box;

/* A consumer warp group waits until the slot of part number `part` of D is empty, and commits it when it has written
   the part. Part n lies in slot n % GMM_SM90_STORE_SLOTS, whichever warp group writes it. */
GMM__DEVICE void gmm_sm90_acquire_slot(uint32_t bars, uint32_t part) {
    gmm_mbarrier_wait(gmm_sm90_store_empty(bars, part), part / GMM_SM90_STORE_SLOTS & 1);
}
GMM__DEVICE void gmm_sm90_commit_slot(uint32_t bars, uint32_t part) {
    gmm_fence_proxy_async();
    __syncwarp();
    if ((gmm_tid_x() & 31) == 0) gmm_mbarrier_arrive(gmm_sm90_store_full(bars, part));
}
/* Parts of 64 rows x 256 bytes of a tile of D, with elements of `size` bytes. */
GMM__DEVICE uint32_t gmm_sm90_d_parts(const gmm_sm90_tile *t, int32_t size) {
    return t->cols > 0 ? (uint32_t)((t->rows + 63) / 64 * ((t->cols * size + 255) / 256)) : 0;
}

/* Whether TMA may store D at `data`: rows begin and end at multiples of 16 bytes, since a TMA store writes whole units
   of 16 bytes even past the columns of its map. */
GMM__HD int gmm_sm90_tma_stores(const void *data, int64_t ld, int64_t n, int32_t size) {
    return (((uintptr_t)data | (uintptr_t)(ld * size) | (uintptr_t)(n * size)) & 15) == 0;
}
/* Whether TMA stores a group's D in wgrad; 16-bit D only where beta is 0. */
GMM__DEVICE int gmm_sm90_d_by_tma(const gmm_gemm_args *p, int32_t g, float beta) {
    const int size = gmm_kmat_size(&p->d);
    return gmm_sm90_tma_stores(gmm_kmat_data(&p->d, g), p->d.ld, p->n, size) && (size == 4 || beta == 0.0f);
}

/* Stores a lane's box of part number `part` as soon as consumers have written the slot. */
GMM__DEVICE void gmm_sm90_store_part(const gmm_sm90_args *args, const gmm_sm90_d_box *box, uint32_t bars,
                                     uint32_t slot, uint32_t part) {
    gmm_mbarrier_wait(gmm_sm90_store_full(bars, part), part / GMM_SM90_STORE_SLOTS & 1);
    slot += part % GMM_SM90_STORE_SLOTS * GMM_SM90_PART_BYTES;
    if (box->active && box->evict_first) gmm_tma_store_evict_first(&args->d, slot, box->x, box->y, box->z, box->w);
    else if (box->active) gmm_tma_store(&args->d, slot, 0, box->x, box->y, box->z, box->w);
    gmm_bulk_commit_group();
}

/* The store warps of wgrad: each serves every other part of D, with two lanes that have a box each. In the order of
   tiles, and within a tile column block by column block from the first row to the last, it loads old D into the slot
   where beta is not 0, passes the slot to the consumers (store_empty), waits for their result (store_full) and stores
   it. Tiles that the consumers store themselves pass through the same barriers. slots: address of the first slot; part:
   the first part of this warp. */
GMM__DEVICE void gmm_sm90_store_tiles(const gmm_sm90_args *args, const gmm_sm90_tile *ring, uint32_t bars,
                                      uint32_t part, uint32_t slots) {
    const int32_t lane = (int32_t)threadIdx.x & 31, size = gmm_kmat_size(&args->p.d), cols = 128 / size;
    /* boxes in the warp's two slots; two variables and a copy, since an array would lie in local memory */
    gmm_sm90_d_box current, previous;
    /* of the current tile; x and y are those of the box that is stored next */
    int32_t x = 0, y = 0, m0 = 0, rows = 1, col_end = 0, by_tma = 0, evict_first = 0, done = 0;
    float beta = 0.0f;
    uint64_t offset = 0;
    uint32_t tile_index = 0, part_end = 0; /* tiles read so far, and the end of their parts */
    previous.x = previous.y = previous.z = previous.w = previous.active = previous.evict_first = 0;
    current = previous;
    slots += GMM_SM90_BOX_BYTES * (uint32_t)lane;
    /* parts go down by 64 rows, and this warp has every other one; the previous part of its slot is 4 parts ago */
    for (;; part += 2, y += 128) {
        const uint32_t slot_bar = gmm_sm90_store_empty(bars, part);
        if (part >= GMM_SM90_STORE_SLOTS)
            gmm_sm90_store_part(args, &previous, bars, slots, part - GMM_SM90_STORE_SLOTS);
        for (; part >= part_end && !done; tile_index++) { /* the store above is under way while the next tile is read */
            const gmm_sm90_tile *const t = &ring[tile_index % GMM_SM90_TILE_RING];
            __syncwarp(3); /* both lanes have read the previous tile */
            if (lane == 0) gmm_sm90_release_batch(bars, tile_index);
            gmm_sm90_wait_tile(bars, tile_index);
            done = t->row_blocks == 0;
            x = t->n0 + lane * cols;
            y = 64 * (int32_t)(part - part_end);
            m0 = t->m0;
            rows = (t->rows + 63) / 64 * 64;
            col_end = t->n0 + t->cols;
            evict_first = size == 2 || t->k >= 512; /* short sums are slower with evict_first */
            if (!done) {
                part_end += gmm_sm90_d_parts(t, size);
                beta = gmm_gemm_beta(&args->p, t->g);
                by_tma = gmm_sm90_d_by_tma(&args->p, t->g, beta);
                offset = gmm_sm90_map_offset(gmm_kmat_data(&args->p.d, t->g));
            }
        }
        if (done) break;
        for (; y >= rows; y -= rows) x += 2 * cols;
        previous = current;
        current.x = x;
        current.y = m0 + y;
        current.z = gmm_sm90_map_z(offset);
        current.w = gmm_sm90_map_w(offset);
        current.active = by_tma && x < col_end;
        current.evict_first = evict_first;
        GMM__BULK_WAIT_GROUP_READ(0);
        if (current.active && beta != 0.0f) {
            const uint32_t to = slots + part % GMM_SM90_STORE_SLOTS * GMM_SM90_PART_BYTES;
            gmm_mbarrier_arrive_expect_tx(slot_bar, GMM_SM90_BOX_BYTES);
            if (evict_first)
                gmm_tma_load_evict_first(to, &args->d, slot_bar, current.x, current.y, current.z, current.w);
            else gmm_tma_load(to, &args->d, slot_bar, 0, current.x, current.y, current.z, current.w);
        } else gmm_mbarrier_arrive(slot_bar);
    }
    if (part >= 2) gmm_sm90_store_part(args, &current, bars, slots, part - 2);
    GMM__BULK_WAIT_GROUP(0);
}

/* Gathered rows of the 16-bit Hopper products (gmm_row_index), in tiles with `gather`. Where it is faster, the plan
   takes other tiles, and gmm_gather_rows copies the rows before the product.

   Four gather warps copy rows of A to the stage by cp.async, to the addresses at which TMA with 128-byte swizzle would
   put them: byte 16 c of line l at 128 l + 16 (c ^ l % 8). Their lanes arrive at `full` when their copies have landed,
   besides the TMA boxes of B. cp.async writes through the generic proxy, so consumers fence the async proxy before
   wgmma reads the stage. Both CTAs of a cluster gather for themselves.

   A lane copies chunks of 16 bytes, 8 lanes a line, and a warp 4 lines at a time: of each block of 16 lines,
   lines 4 warp to 4 warp + 3. So the swizzle of a lane's chunks is the same in every block. */

/* A line without a row: zeros are written. */
#define GMM_SM90_NO_ROW 0xFFFFFFFFu

/* Copies this lane's chunks of a stage, one in each of the first `blocks` blocks of 16 lines. to: the chunk in block 0.
   rows: where the row of each line begins, in units of 16 bytes, or GMM_SM90_NO_ROW. from: the chunk of row 0. bytes:
   how many of its 16 exist; in a whole stage all do. All lanes of a warp copy in the same branch. On an H200, where
   some copied in one branch and some in another, `full` completed before all copies had landed; why is not known. */
GMM__DEVICE void gmm_sm90_gather_stage(uint32_t to, const uint32_t *rows, int32_t blocks, const int most_blocks,
                                       const char *from, int32_t bytes, const int whole_stage) {
    int i;
#pragma unroll
    for (i = 0; i < most_blocks; i++) {
        const char *const src = from + 16 * (uint64_t)rows[i];
        const int no_row = rows[i] == GMM_SM90_NO_ROW;
        if (whole_stage) gmm_cp_async_16_where(i < blocks, to + 2048 * (uint32_t)i, src, no_row);
        else if (i < blocks) gmm_cp_async_16_zfill(to + 2048 * (uint32_t)i, src, no_row ? 0 : bytes);
    }
}

/* Gather warp `warp`. a_offset: of A in a stage; most_blocks: of 16 lines in the tile, a constant. */
GMM__DEVICE void gmm_sm90_gather_tiles(const gmm_sm90_args *args, const gmm_sm90_tile *ring, uint32_t bars,
                                       gmm_sm90_pipeline pipe, uint32_t stages_at, uint32_t a_offset, uint32_t warp,
                                       const int most_blocks) {
    const uint32_t lane = threadIdx.x & 31, line = 4 * warp + lane / 8, chunk = lane & 7;
    const uint32_t chunk_at = stages_at + a_offset + 128 * line + ((chunk ^ (line & 7)) << 4);
    uint32_t tile_index;
    for (tile_index = 0;; tile_index++) {
        const gmm_sm90_tile *const t = &ring[tile_index % GMM_SM90_TILE_RING];
        uint32_t rows[16]; /* of lines 16 i + line; 32 bits suffice, since gmm__wgmma_shape_of offers these tiles for
                              matrices below 64 GiB alone */
        int32_t x, k_end, lines, blocks;
        int64_t first; /* row of the product in line 0 */
        int i;
        __syncwarp();
        if (lane == 0) gmm_sm90_release_batch(bars, tile_index);
        gmm_sm90_wait_tile(bars, tile_index);
        if (t->row_blocks == 0) break;
        lines = t->cols > 0 ? t->rows : 0;
        blocks = (lines + 15) / 16;
        k_end = 64 * (int32_t)gmm_sm90_k_tiles(t->k);
        first = (int64_t)t->row + t->m0;
        if (warp == 0 && t->n0 == 0) gmm_report_index_faults(&args->index, first + lane, first + lines, 32);
#pragma unroll
        for (i = 0; i < most_blocks; i++) {
            const int32_t l = 16 * i + (int32_t)line;
            const int32_t row = l < lines ? gmm_indexed_row(&args->index, first + l) : -1;
            rows[i] = row < 0 ? GMM_SM90_NO_ROW : (uint32_t)(row * args->p.a.ld >> 3);
        }
        for (x = 0; x < k_end; x += 64, pipe.iter++) {
            const uint32_t s = pipe.iter % pipe.stages, to = chunk_at + s * pipe.stage_bytes;
            const char *const from = (const char *)args->p.a.data + 2 * (int64_t)x + 16 * chunk;
            const int32_t bytes = 2 * (args->p.k - x) - 16 * (int32_t)chunk;
            gmm_mbarrier_wait(gmm_sm90_empty(pipe.bars, s), (pipe.iter / pipe.stages & 1) ^ 1);
            if (args->p.k - x >= 64) gmm_sm90_gather_stage(to, rows, blocks, most_blocks, from, 16, 1);
            else
                gmm_sm90_gather_stage(to, rows, blocks, most_blocks, from, bytes < 0 ? 0 : bytes < 16 ? bytes : 16, 0);
            gmm_cp_async_mbarrier_arrive(gmm_sm90_full(pipe.bars, s));
        }
    }
}
/* The epilogue of glu products: h = p act(D), from rows of D in a store slot, where they are rounded to 16 bits as they
   are stored. So h has the bits that the activation computes from D in memory.

   A row of the slot has 64 gate columns and the 64 linear columns that belong to them, in blocks as in D, or, where
   blocks are larger, one after the other. 8 threads share a row of h, and 16 a row of D, with a vector of 8 columns
   each; all vectors are within the matrices, since ffn is a multiple of 64. Rows of D and h begin at multiples of 16
   bytes: gmm__wgmma_serves_glu checks D, and h is in the workspace or in what forward saves. */

/* The probabilities of a thread's rows of h, of a slot with `count` rows from row `row` of the tile on. */
GMM__DEVICE void gmm_sm90_glu_probs(const gmm_sm90_glu *glu, const gmm_sm90_tile *t, int row, const int count,
                                    float probs[2]) {
    int x;
#pragma unroll
    for (x = 0; x < count / 16; x++) {
        const int line = row + 16 * x + (gmm_tid_x() & 127) / 8;
        probs[x] = glu->prob && line < t->rows ? glu->prob[(int64_t)t->row + t->m0 + line] : 1.0f;
    }
}

/* The vector of 8 columns from column `column` on, in a line of a slot. */
GMM__DEVICE uint4 gmm_sm90_slot_vector(const char *slot, int line, int column) {
    return *(const uint4 *)(slot + line * 256 + (((column / 8) ^ (line & 7)) << 4));
}
GMM__DEVICE void gmm_sm90_widen8(const gmm_dtype dtype, uint4 v, float f[8]) {
    const uint32_t words[4] = { v.x, v.y, v.z, v.w };
    int i;
#pragma unroll
    for (i = 0; i < 8; i++) f[i] = gmm_widen(dtype, (uint16_t)(words[i / 2] >> 16 * (i % 2)));
}

/* Computes and stores rows of h, those of gmm_sm90_glu_probs. */
GMM__DEVICE void gmm_sm90_glu_store_h(const gmm_sm90_glu *glu, const gmm_dtype dtype, const gmm_sm90_output *out,
                                      const char *slot, int row, const int count, const float probs[2]) {
    const gmm_sm90_tile *const t = out->tile;
    const int tid = gmm_tid_x() & 127, column = tid % 8 * 8, block = glu->block < 64 ? glu->block : 64;
    const int gate = column + (column & -block); /* blocks are powers of two here */
    char *const to = (char *)glu->h.data +
                     (((int64_t)t->row + t->m0 + row) * glu->h.ld + (t->n0 + out->col0) / 2 + column) * 2;
    int x, i;
#pragma unroll
    for (x = 0; x < count / 16; x++) {
        const int line = 16 * x + tid / 8;
        float a[8], b[8], f[8], da[8], db[8];
        gmm_sm90_widen8(dtype, gmm_sm90_slot_vector(slot, line, gate), a);
        gmm_sm90_widen8(dtype, gmm_sm90_slot_vector(slot, line, gate + block), b);
        gmm__act_x8(glu->kind, 1, glu->coef, a, b, f, da, db);
#pragma unroll
        for (i = 0; i < 8; i++) f[i] = probs[x] * f[i];
        if (row + line < t->rows)
            *(uint4 *)(to + line * glu->h.ld * 2) = gmm_pack8(dtype, f);
    }
}

/* Stores the rows of D in a slot. */
GMM__DEVICE void gmm_sm90_glu_store_d(const gmm_sm90_glu *glu, const gmm_sm90_output *out, const char *slot, int row,
                                      const int count) {
    const int tid = gmm_tid_x() & 127, column = tid % 16 * 8;
    char *const to = out->d + row * out->pitch +
                     gmm_sm90_glu_column(glu->block, out->tile->n0 + out->col0 + column) * (int64_t)2;
    uint4 v[4];
    int x;
#pragma unroll
    for (x = 0; x < count / 8; x++) v[x] = gmm_sm90_slot_vector(slot, 8 * x + tid / 16, column);
#pragma unroll
    for (x = 0; x < count / 8; x++)
        if (row + 8 * x + tid / 16 < out->tile->rows) *(uint4 *)(to + (8 * x + tid / 16) * out->pitch) = v[x];
}

/* --- dglu products --- */

/* 16 threads share a row of D, with a vector of 8 columns each, and a quarter of a warp a part of dprob. */
typedef struct gmm_sm90_dglu_thread {
    int32_t row;    /* of the token matrices: the thread's first */
    int32_t rows;   /* of the tile from that one on; 0 or less: none, also where the columns are behind those of D */
    int32_t column; /* of D: the vector's first */
    int32_t gate;   /* of z: that of its gate values */
} gmm_sm90_dglu_thread;
GMM__DEVICE gmm_sm90_dglu_thread gmm_sm90_dglu_begin(const gmm_sm90_dglu *g, const gmm_sm90_tile *t, int col0) {
    const int line = (gmm_tid_x() & 127) / 16, column = col0 + gmm_tid_x() % 16 * 8;
    gmm_sm90_dglu_thread thread;
    thread.row = t->row + t->m0 + line;
    thread.rows = column < t->cols ? t->rows - line : 0;
    thread.column = t->n0 + column;
    thread.gate = thread.column + (g->interleave ? thread.column / g->interleave * g->interleave : 0);
    return thread;
}
/* A thread's inputs of a row, in memory format. */
typedef struct gmm_sm90_dglu_row {
    uint4 gate, linear;
    float p;
} gmm_sm90_dglu_row;
/* Loads those of the row `row` rows behind the thread's first one. */
GMM__DEVICE void gmm_sm90_dglu_load(const gmm_sm90_dglu *g, const gmm_sm90_dglu_thread *thread, int row,
                                    gmm_sm90_dglu_row *in) {
    const char *const z = (const char *)g->z.data + ((int64_t)(thread->row + row) * g->z.ld + thread->gate) * 2;
    in->gate = in->linear = make_uint4(0u, 0u, 0u, 0u);
    in->p = 1.0f;
    if (row >= thread->rows) return;
    in->gate = *(const uint4 *)z;
    in->linear = *(const uint4 *)(z + 2 * g->linear);
    if (g->prob) in->p = g->prob[thread->row + row];
}
/* Computes and stores what follows from 8 rows of D, of which `slot` has the first. *in is the thread's row, and gets
   the one 16 rows behind it. */
GMM__DEVICE void gmm_sm90_dglu_step(const gmm_sm90_dglu *g, const gmm_dtype dtype, const gmm_sm90_dglu_thread *thread,
                                    const char *slot, int row, gmm_sm90_dglu_row *in) {
    const int tid = gmm_tid_x() & 127;
    const int64_t at = thread->row + row;
    const float p = in->p;
    float a[8], b[8], d[8], f[8], da[8], db[8], dot = 0.0f;
    int i;
    gmm_sm90_widen8(dtype, in->gate, a);
    gmm_sm90_widen8(dtype, in->linear, b);
    gmm_sm90_widen8(dtype, gmm_sm90_slot_vector(slot, tid / 16, tid % 16 * 8), d);
    gmm_sm90_dglu_load(g, thread, row + 16, in);
    gmm__act_x8(g->kind, 1, g->coef, a, b, f, da, db);
#pragma unroll
    for (i = 0; i < 8; i++) {
        dot = fmaf(d[i], f[i], dot);
        da[i] *= p * d[i];
        db[i] *= p * d[i];
        f[i] *= p;
    }
    if (g->dots) {
        dot = gmm__quarter_warp_sum(dot);
        if (row < thread->rows && tid % 8 == 0) g->dots[thread->column / GMM_ACT_DOT_COLS * g->capacity + at] = dot;
    }
    if (row >= thread->rows) return;
    if (g->dz.data) {
        char *const dz = (char *)g->dz.data + (at * g->dz.ld + thread->gate) * 2;
        *(uint4 *)dz = gmm_pack8(dtype, da);
        *(uint4 *)(dz + 2 * g->linear) = gmm_pack8(dtype, db);
    }
    if (g->h.data) *(uint4 *)((char *)g->h.data + (at * g->h.ld + thread->column) * 2) = gmm_pack8(dtype, f);
}

/* The gated activation of an FP8 product: h = p act(D), where D, the pre-activation, has been rounded to BF16, and the
   rowwise copy of h, quantized by 1x128. A tile has the 128 columns of h that share a scale, and the stages of two
   passes over the contraction. The first pass multiplies by the gate columns of B, the second by the linear columns
   that belong to them. The scheduler counts columns of h: p.n is ffn, while B and D have 2 ffn columns
   (gmm_fp8_glu_column). The gate columns of D stay in the store slot until the second pass ends (body_fp8_glu.cuh). */
typedef struct gmm_fp8_glu {
    gmm_mat h;         /* [T, ffn] its rowwise copy: E4M3 with 1X128 scales */
    const float *prob; /* [T] p; NULL: 1 */
    gmm_act_kind kind;
    gmm_act_coef coef;
    int32_t block;     /* B's rows, which are D's columns, are blocks of as many gate columns and linear columns: a
                          multiple of 128; halves: ffn */
    int32_t drops_d;   /* D is not stored */
    float eps;         /* gmm_format.eps and pow2 of the copy */
    int32_t pow2;
} gmm_fp8_glu;
/* Instances of the 16-bit Hopper product: a row of columns each. */
#define GMM__BODY GMM__BODY_PRODUCT
#define GMM__ARGS gmm_sm90_args
/* kernel, operation, tag and dtype of the operands, tile, tiles of the kernel (0: functions of a tile without a kernel,
   which the next row calls), second tile */
#if GMM__HOLDS(1)
#define GMM__ROW (gmm_no_kernel, fwd, bf16, GMM_BF16, 160x256, 0, none)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_gemm_fwd_bf16_160x256x64_256x128x64_sm90, fwd, bf16, GMM_BF16, 256x128, 2, 160x256)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_gemm_fwd_bf16_176x128x64_sm90, fwd, bf16, GMM_BF16, 176x128, 1, none)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_gemm_fwd_bf16_160x256x64_gather_sm90, fwd, bf16, GMM_BF16, gather_160x256, 1, none)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_gemm_fwd_bf16_256x128x64_short_sm90, fwd, bf16, GMM_BF16, short_256x128, 1, none)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_gemm_glu_bf16_176x128x64_sm90, glu, bf16, GMM_BF16, 176x128, 1, none)
#include GMM_KERNELS_FILE
#endif
#if GMM__HOLDS(2)
#define GMM__ROW (gmm_no_kernel, dgrad, bf16, GMM_BF16, 160x256, 0, none)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_gemm_dgrad_bf16_160x256x64_256x128x64_sm90, dgrad, bf16, GMM_BF16, 256x128, 2, 160x256)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_gemm_dgrad_bf16_176x128x64_sm90, dgrad, bf16, GMM_BF16, 176x128, 1, none)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_gemm_dgrad_bf16_160x256x64_gather_sm90, dgrad, bf16, GMM_BF16, gather_160x256, 1, none)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_gemm_dgrad_bf16_256x128x64_short_sm90, dgrad, bf16, GMM_BF16, short_256x128, 1, none)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_gemm_dglu_bf16_176x128x64_sm90, dglu, bf16, GMM_BF16, 176x128, 1, none)
#include GMM_KERNELS_FILE
#endif
#if GMM__HOLDS(6)
#define GMM__ROW (gmm_gemm_wgrad_bf16_192x128x64_sm90, wgrad, bf16, GMM_BF16, 192x128, 1, none)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_gemm_wgrad_bf16_128x128x64_sm90, wgrad, bf16, GMM_BF16, 128x128, 1, none)
#include GMM_KERNELS_FILE
#endif
#ifndef GMM_NO_QUANT
#if GMM__HOLDS(7)
#define GMM__ROW (gmm_gemm_fwd_bf16_mxfp8_192x128x64_sm90, fwd, bf16, GMM_BF16, mx8_192x128, 1, none)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_gemm_fwd_bf16_mxfp4_192x128x64_sm90, fwd, bf16, GMM_BF16, mx4_192x128, 1, none)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_gemm_fwd_bf16_nvfp4_192x128x64_sm90, fwd, bf16, GMM_BF16, nv4_192x128, 1, none)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_gemm_fwd_bf16_mxfp8_48x128x64_sm90, fwd, bf16, GMM_BF16, mx8_48x128, 1, none)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_gemm_fwd_bf16_mxfp4_64x128x64_sm90, fwd, bf16, GMM_BF16, mx4_64x128, 1, none)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_gemm_fwd_bf16_nvfp4_64x128x64_sm90, fwd, bf16, GMM_BF16, nv4_64x128, 1, none)
#include GMM_KERNELS_FILE
#endif
#endif
#ifndef GMM_NO_F16
#if GMM__HOLDS(3)
#define GMM__ROW (gmm_no_kernel, fwd, f16, GMM_F16, 160x256, 0, none)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_gemm_fwd_f16_160x256x64_256x128x64_sm90, fwd, f16, GMM_F16, 256x128, 2, 160x256)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_gemm_fwd_f16_176x128x64_sm90, fwd, f16, GMM_F16, 176x128, 1, none)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_gemm_fwd_f16_160x256x64_gather_sm90, fwd, f16, GMM_F16, gather_160x256, 1, none)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_gemm_fwd_f16_256x128x64_short_sm90, fwd, f16, GMM_F16, short_256x128, 1, none)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_gemm_glu_f16_176x128x64_sm90, glu, f16, GMM_F16, 176x128, 1, none)
#include GMM_KERNELS_FILE
#endif
#if GMM__HOLDS(4)
#define GMM__ROW (gmm_no_kernel, dgrad, f16, GMM_F16, 160x256, 0, none)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_gemm_dgrad_f16_160x256x64_256x128x64_sm90, dgrad, f16, GMM_F16, 256x128, 2, 160x256)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_gemm_dgrad_f16_176x128x64_sm90, dgrad, f16, GMM_F16, 176x128, 1, none)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_gemm_dgrad_f16_160x256x64_gather_sm90, dgrad, f16, GMM_F16, gather_160x256, 1, none)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_gemm_dgrad_f16_256x128x64_short_sm90, dgrad, f16, GMM_F16, short_256x128, 1, none)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_gemm_dglu_f16_176x128x64_sm90, dglu, f16, GMM_F16, 176x128, 1, none)
#include GMM_KERNELS_FILE
#endif
#if GMM__HOLDS(6)
#define GMM__ROW (gmm_gemm_wgrad_f16_192x128x64_sm90, wgrad, f16, GMM_F16, 192x128, 1, none)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_gemm_wgrad_f16_128x128x64_sm90, wgrad, f16, GMM_F16, 128x128, 1, none)
#include GMM_KERNELS_FILE
#endif
#endif
#undef GMM__ARGS
#undef GMM__BODY
/* Host side of the 16-bit Hopper products: the table of instances, tensor maps, the launcher. */

#if GMM__HOLDS(0)
typedef struct gmm_sm90_kernel {
    gmm_gemm_op op;
    int32_t tb; /* whether B is stored as [k][n] */
    gmm_dtype dtype;
    int32_t consumers, tile_n, m16, stages, store_blocks, smem_bytes, b_format, ctas_per_sm, deferred, gather,
            threads;
    int32_t tile_choice; /* gmm_sm90_tile_choice */
    const void *function;
    const char *name;
} gmm_sm90_kernel;

#define GMM__X(op, dtype, tag, tile, choice, kernel) GMM__DECLARE_KERNEL(kernel, gmm_sm90_args)
GMM_SM90_KERNEL_LIST(GMM__X)
#undef GMM__X
static const gmm_sm90_kernel gmm_sm90_kernels[] = {
#define GMM__X(op, dtype, tag, tile, choice, kernel) \
    { gmm_gemm_##op, gmm_tb_##op, dtype, GMM__SM90(consumers, tile), GMM__SM90(tile_n, tile), GMM__SM90(m16, tile), \
      GMM__SM90(stages, tile), GMM__SM90(store_blocks, tile), GMM__SM90(smem_bytes, tile), \
      GMM__SM90(b_format, tile), GMM__SM90(ctas_per_sm, tile), GMM__SM90(deferred, tile), \
      GMM__SM90(gather, tile), GMM__SM90(threads, tile), \
      gmm_sm90_tile_##choice, (const void *)kernel, #kernel },
    GMM_SM90_KERNEL_LIST(GMM__X)
#undef GMM__X
};
enum { GMM_SM90_KERNELS = (int)(sizeof gmm_sm90_kernels / sizeof gmm_sm90_kernels[0]) };

/* Encodes one tensor map of any element type: boxes of 128 bytes by `box_lines` lines. Unused strides are 16. L2
   promotion of 128 bytes is faster for weights. */
static GMM__UNUSED int gmm_sm90_map(PFN_cuTensorMapEncodeTiled_v12000 encode, CUtensorMap *map, gmm_dtype dtype,
                                    void *base, const cuuint64_t dims[4], const cuuint64_t strides[3],
                                    int32_t box_lines, int weights) {
    const CUtensorMapDataType type = dtype == GMM_F32 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
                                   : gmm_dtype_bits(dtype) == 16 ? CU_TENSOR_MAP_DATA_TYPE_UINT16
                                                                 : CU_TENSOR_MAP_DATA_TYPE_UINT8;
    const CUtensorMapL2promotion promotion = weights ? CU_TENSOR_MAP_L2_PROMOTION_L2_128B
                                                     : CU_TENSOR_MAP_L2_PROMOTION_L2_256B;
    const cuuint32_t one[4] = { 1, 1, 1, 1 };
    cuuint32_t box[4] = { 0, 0, 1, 1 };
    box[0] = (cuuint32_t)(1024 / gmm_dtype_bits(dtype));
    box[1] = (cuuint32_t)box_lines;
    return encode(map, type, 4, base, dims, strides, box, one, CU_TENSOR_MAP_INTERLEAVE_NONE,
                  CU_TENSOR_MAP_SWIZZLE_128B, promotion, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}
/* Rows of a token matrix, as a ragged map (see "Ragged maps" in tables.cuh). Its last two dimensions only have to be
   large. */
static GMM__UNUSED int gmm_sm90_map_tokens(PFN_cuTensorMapEncodeTiled_v12000 encode, CUtensorMap *map,
                                           const gmm_kmat *m, int64_t features, int32_t box_lines) {
    const cuuint64_t pitch = (cuuint64_t)(m->ld * gmm_dtype_bits(m->dtype) / 8);
    cuuint64_t dims[4] = { 0, GMM_SM90_RAGGED_ROWS, 0x7FFF0000, 0x7FFF0000 }, strides[3];
    dims[0] = (cuuint64_t)features;
    strides[0] = strides[1] = pitch;
    strides[2] = ((cuuint64_t)1 << 34) - pitch;
    return gmm_sm90_map(encode, map, m->dtype, m->data, dims, strides, box_lines, 0);
}
/* A matrix of each group, at any address: the last two coordinates are its address (gmm_sm90_map_offset).
   `weights`: weights, else D. */
static GMM__UNUSED int gmm_sm90_map_matrix(PFN_cuTensorMapEncodeTiled_v12000 encode, CUtensorMap *map,
                                           const gmm_kmat *m, int64_t features, int64_t lines, int32_t box_lines,
                                           int weights) {
    cuuint64_t dims[4] = { 0, 0, GMM_SM90_MAP_STEPS, 0x7FFFFFFF }, strides[3] = { 0, 16, 16 * GMM_SM90_MAP_STEPS };
    dims[0] = (cuuint64_t)features;
    dims[1] = (cuuint64_t)lines;
    strides[0] = (cuuint64_t)(m->ld * gmm_dtype_bits(m->dtype) / 8);
    return gmm_sm90_map(encode, map, m->dtype, (void *)(uintptr_t)GMM_SM90_MAP_BASE, dims, strides, box_lines, weights);
}

/* A matrix of packed weights at any address: boxes of 64 codes by `box_lines` lines; FP8 swizzled by 64 bytes. */
static GMM__UNUSED int gmm_sm90_map_packed_weights(PFN_cuTensorMapEncodeTiled_v12000 encode, CUtensorMap *map,
                                                   const gmm_mat *m, int64_t features, int64_t lines,
                                                   int32_t box_lines) {
    const cuuint32_t one[4] = { 1, 1, 1, 1 }, fp4 = m->dtype == GMM_E2M1;
    const cuuint64_t strides[3] = { (cuuint64_t)(fp4 ? m->ld / 2 : m->ld), 16, 16 * GMM_SM90_MAP_STEPS };
    cuuint64_t dims[4] = { 0, 0, GMM_SM90_MAP_STEPS, 0x7FFFFFFF };
    cuuint32_t box[4] = { 0, 0, 1, 1 };
    dims[0] = (cuuint64_t)(fp4 ? features / 2 : features);
    dims[1] = (cuuint64_t)lines;
    box[0] = fp4 ? 32 : 64;
    box[1] = (cuuint32_t)box_lines;
    return encode(map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 4, (void *)(uintptr_t)GMM_SM90_MAP_BASE, dims, strides, box, one,
                  CU_TENSOR_MAP_INTERLEAVE_NONE, fp4 ? CU_TENSOR_MAP_SWIZZLE_NONE : CU_TENSOR_MAP_SWIZZLE_64B,
                  CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

/* Whether this build has sm_90a code for the current device: kernels without it have the launch bounds of an empty
   kernel. */
static GMM__UNUSED int gmm_sm90_present(void) {
    struct cudaFuncAttributes a;
    const int present = cudaFuncGetAttributes(&a, gmm_sm90_kernels[0].function) == cudaSuccess &&
                      a.maxThreadsPerBlock == gmm_sm90_kernels[0].threads;
    (void)cudaGetLastError();
    return present;
}

/* Launches a kernel of the Hopper products with at most `blocks` CTAs, as clusters of two CTAs where there is more than
   one. */
static GMM__UNUSED cudaError_t gmm_launch_clusters(const void *kernel, int32_t blocks, int threads, int32_t smem_bytes,
                                                   void *args, cudaStream_t stream) {
    const int cluster = blocks > 1 ? 2 : 1;
    cudaLaunchConfig_t config = GMM_ZERO;
    cudaLaunchAttribute attributes[2];
    void *params[1];
    cudaError_t error;
    int device = 0, sms = 0;
    memset(attributes, 0, sizeof attributes);
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim.x = (unsigned)cluster;
    attributes[0].val.clusterDim.y = attributes[0].val.clusterDim.z = 1;
    attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[1].val.programmaticStreamSerializationAllowed = 1;
    config.gridDim = dim3((unsigned)(blocks / cluster * cluster));
    config.blockDim = dim3((unsigned)threads);
    config.dynamicSmemBytes = (size_t)smem_bytes;
    config.stream = stream;
    config.attrs = attributes;
    /* With an SM limit this launch waits for the end of its predecessor. Otherwise its CTAs would occupy, beside the
       predecessor's, the multiprocessors that the limit leaves to others. */
    error = cudaGetDevice(&device);
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
    config.numAttrs = blocks < sms / cluster * cluster ? 1 : 2;
    params[0] = args;
    if (error == cudaSuccess)
        error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes);
    return error == cudaSuccess ? cudaLaunchKernelExC(&config, kernel, params) : error;
}

/* Encodes the tensor maps and launches the kernel with at most `blocks` CTAs. `args` is complete but for the
   maps; operands and their rows are 16-byte aligned. */
static GMM__UNUSED cudaError_t gmm_launch_sm90(PFN_cuTensorMapEncodeTiled_v12000 encode, int32_t kernel, int32_t blocks,
                                               gmm_sm90_args *args, cudaStream_t stream) {
    const gmm_sm90_kernel *row = &gmm_sm90_kernels[kernel];
    const gmm_gemm_args *p = &args->p;
    int mapped;
    args->d_by_tma = row->deferred && p->d.dtype != GMM_F32 && gmm_sm90_tma_stores(p->d.data, p->d.ld, p->n, 2);
    if (row->op == gmm_gemm_wgrad)
        mapped = gmm_sm90_map_tokens(encode, &args->a, &p->a, p->m, 64) &&
                 gmm_sm90_map_tokens(encode, &args->b, &p->b, p->n, 64) &&
                 (p->d.ld * (p->d.dtype == GMM_F32 ? 4 : 2) % 16 != 0 || /* else the consumers store D themselves */
                  gmm_sm90_map_matrix(encode, &args->d, &p->d, p->n, p->m, 64, 0));
    else if (row->b_format != gmm_sm90_b_format_plain)
        mapped = gmm_sm90_map_packed_weights(encode, &args->b, &args->codes, p->k, p->n, 64);
    else if (!row->tb)
        mapped = gmm_sm90_map_matrix(encode, &args->b, &p->b, p->k, p->n, 64, 1);
    else
        mapped = gmm_sm90_map_matrix(encode, &args->b, &p->b, p->n, p->k, 64, 1);
    if (row->op != gmm_gemm_wgrad)
        mapped = mapped && gmm_sm90_map_tokens(encode, &args->a, &p->a, p->k, 64) &&
                 gmm_sm90_map_tokens(encode, &args->a16, &p->a, p->k, 16) &&
                 (!args->d_by_tma || gmm_sm90_map_tokens(encode, &args->d, &p->d, p->n, 16 * row->deferred));
    if (!mapped) return cudaErrorInvalidValue;
    args->tile_choice = row->tile_choice;
    return gmm_launch_clusters(row->function, blocks, row->threads, row->smem_bytes, args, stream);
}
#endif /* GMM__HOLDS(0) */

/* --- packed elements, maxima of absolute values, FP8 codes: for vectorized casts and epilogues that quantize --- */

/* Registers hold elements in memory format: two of 16 bits per word, or one F32. `source` is their dtype, a constant.
   Maxima are of absolute values and ignore NaN; the instructions keep subnormal values whatever the compiler flags. */

/* Words of eight elements; elements in sixteen bytes. */
GMM__DEVICE int32_t gmm__words8(gmm_dtype source) { return source == GMM_F32 ? 8 : 4; }
GMM__DEVICE int32_t gmm__elems16(gmm_dtype source) { return source == GMM_F32 ? 4 : 8; }

/* Element j of consecutive words. */
GMM__DEVICE float gmm__word_value(gmm_dtype source, const uint32_t *w, int32_t j) {
    if (source == GMM_F32) return gmm_f32_from_bits(w[j]);
    if (source == GMM_BF16) return gmm_f32_from_bits(j & 1 ? w[j / 2] & 0xFFFF0000u : w[j / 2] << 16);
    return gmm_cvt_f32_f16((uint16_t)(j & 1 ? w[j / 2] >> 16 : w[j / 2]));
}
GMM__DEVICE uint32_t gmm__word_max(gmm_dtype source, uint32_t maximum, uint32_t w) {
    if (source == GMM_F32) return gmm_max_abs_f32(maximum, w);
    return source == GMM_BF16 ? gmm_max_bf16x2(maximum, w & 0x7FFF7FFFu) : gmm_max_f16x2(maximum, w & 0x7FFF7FFFu);
}
/* The maximum that is NaN if an operand is NaN. */
GMM__DEVICE uint32_t gmm__word_max_nan(gmm_dtype source, uint32_t maximum, uint32_t w) {
    if (source == GMM_F32) return gmm_max_nan_abs_f32(maximum, w);
    return source == GMM_BF16 ? gmm_max_nan_bf16x2(maximum, w & 0x7FFF7FFFu)
                              : gmm_max_nan_f16x2(maximum, w & 0x7FFF7FFFu);
}
/* The maximum in fewer instructions, for chains that start with an unmodified word: the sign of the result is
   meaningless, and a result is NaN only if all operands are. gmm__word_max(0, result) is the absolute value, 0 for
   NaN. */
GMM__DEVICE uint32_t gmm__word_max_signed(gmm_dtype source, uint32_t maximum, uint32_t w) {
    if (source == GMM_F32) return gmm_max_abs_abs_f32(maximum, w);
#if __CUDA_ARCH__ >= 860
    return source == GMM_BF16 ? gmm_max_xorsign_abs_bf16x2(maximum, w) : gmm_max_xorsign_abs_f16x2(maximum, w);
#else
    return gmm__word_max(source, maximum & 0x7FFF7FFFu, w);
#endif
}
/* The larger half of a word of maxima, as bits of an fp32. */
GMM__DEVICE uint32_t gmm__word_fold(gmm_dtype source, uint32_t maximum) {
    if (source == GMM_F32) return maximum;
    if (source == GMM_BF16) return max(maximum << 16, maximum & 0xFFFF0000u);
    maximum = max(maximum & 0xFFFFu, maximum >> 16);
    return gmm_f32_bits(gmm__word_value(source, &maximum, 0));
}

/* FP8 codes of four values, the first in the lowest bits. The instructions give the same bits as the codecs of
   gmm_quant.h. */
GMM__DEVICE uint32_t gmm_encode_fp8x4(int32_t e5m2, const float p[4]) {
#if __CUDA_ARCH__ >= 890
    uint16_t low, high;
    if (e5m2) {
        low = gmm_cvt_e5m2x2(p[1], p[0]);
        high = gmm_cvt_e5m2x2(p[3], p[2]);
    } else {
        low = gmm_cvt_e4m3x2(p[1], p[0]);
        high = gmm_cvt_e4m3x2(p[3], p[2]);
    }
    return (uint32_t)low | (uint32_t)high << 16;
#else
    const gmm_dtype dtype = e5m2 ? GMM_E5M2 : GMM_E4M3;
    return (uint32_t)gmm_encode_small(dtype, p[0]) | (uint32_t)gmm_encode_small(dtype, p[1]) << 8 |
           (uint32_t)gmm_encode_small(dtype, p[2]) << 16 | (uint32_t)gmm_encode_small(dtype, p[3]) << 24;
#endif
}
/* ............................................................................ Grouped FP8 products on Hopper ... */

/* Products of FP8 copies, whose lines run along the contraction: fwd x and w ROWWISE, dgrad dy ROWWISE and w
   COLUMNWISE, wgrad dy and x COLUMNWISE. Clusters and multicast are those of the 16-bit products (tables.cuh). The tile
   ring is too, except that its readers do not release its entries: the scheduler writes tile n when the producer has
   begun tile n - 8. A stage is 128 elements long. Without swap_ab: wgmma's A are D's rows (E4M3 or E5M2), its B are
   D's columns (E4M3); each consumer warp group has 64 rows of the tile and all of its columns.

   Warp roles: consumers (warp groups 0 to 1 or 2), then four warps with few registers: producer (one thread of it),
   scale loader, scheduler, store (GMM_FP8_*_WARP). The tile list has the registers of consumers and of the other warps.

   Pipeline. An arrow is a barrier, which its left side completes and its right side waits for:
       scheduler    --tile_full[16]-->  all others;  producer  --tile_begun[16]-->  scheduler
       producer, scale loader  --full[stage]-->  consumers  --empty[stage]-->  producer, scale loader (of both CTAs
                                                                               where an operand is multicast)
       store        --slot.empty[consumer]-->  consumer  --slot.full[consumer]-->  store
       scheduler    --prediction.full-->  producer, scale loader, consumers (the predicted first tile)
       scheduler of the other CTA  --prediction.peer_full-->  scheduler

   mbarriers. S: stages; n: stage number of all tiles, tile number, or part of D that the consumer stores.
       barrier             completed by, arrivals per phase                         waited for by        parity of wait
       full[n % S]         producer (1, and the bytes that TMA loads);              consumers            n / S
                           with scales also the scale loader: 1d2d its lanes
                           (33), 1d1d lane 0 (2)
       empty[n % S]        consumer warps of all CTAs of the cluster (4 consumers   producer,            n / S + 1
                           x cluster size; consumer 0 arrives for an idle one)      scale loader
       tile_full[n % 16]   scheduler lane 0 (1)                                     all other warps      n / 16
       tile_begun[n % 16]  producer, when it begins tile n (1). No reader           scheduler, for       n / 16
                           releases an entry: see "Rules of FP8 tiles"              tile n + 8
       slot[c].empty       store lanes of consumer c, a box each (store_boxes),     consumer c           n
                           with old D where it is loaded
       slot[c].full        threads of consumer c (128); of 16-bit D behind the      store lanes of c     n
                           first products of their next tile
       prediction.full     scheduler lane 0 (1)                                     producer, scale      0
                                                                                    loader, consumers
       prediction.peer_full  this CTA's scheduler and 4 bytes from the other's      scheduler            0
                           (1, st.async)
   Named barriers (GMM_BAR_*): CONSUMER + i joins consumer i; ORDER + i lets consumer i issue a stage of 1d1d.

   Accumulators. Not swap_ab: gmm_wgmma_acc_m is the row of D within a consumer's 64, gmm_wgmma_acc_n the column.

   Shared memory, in KiB: stages of B and A; store slots per consumer; then barriers, tile ring, tables and scales.
       192x128, small_m, glu  4 x (16 + 24)   3 x 16       128x192 and small_m    4 x (24 + 16)   2 x 24
       128x128                4 x (16 + 16)   2 x 32

   Promotion. The tensor cores keep 14 bits of an FP8 sum. Unless the caller allows less (fast), the partial sum of
   every stage is added to an fp32 accumulator, times the block's scales: 1d2d multiplies by a scale per row and one per
   128 columns, 1d1d by a scale per row and one per column, whose products a bf16 wgmma computes
   (gmm_fp8_scale_fragment). The scale loader brings them to shared memory with the stage. Scales of whole tensors
   and of lines are applied once, in the epilogue.

   Epilogue. A consumer writes its accumulators to its store slot, from which the store warp moves them to D by TMA
   while the next tile is multiplied. Where beta is not 0, TMA loads old fp32 D into the slot before. Where a tile
   passes its slot in several parts, each later part would wait for its load. For long sums with beta 1, TMA therefore
   adds later parts to D itself (reduction, 1.3 TB/s), which no warp waits for. Consumers store D themselves where its
   rows are not 16-byte aligned, and where beta is not 0 and D has 16 bits.

   Two tiles. The 1d2d kernels for many tokens have the tiles 192x128 and 128x192, whose results have the same bits. The
   scheduler chooses one for the split, writes second_tile and initialises the barriers of slots before tile_full[0]
   completes, for which all other warps wait. In 128x192 the third consumer is idle: it gives registers to the other
   two, and at every empty barrier consumer 0 arrives twice, for itself and for it. Tables and barriers lie at the same
   places with either tile.

   glu tiles compute h = p act(D), as those of 16 bits do, and quantize it by 1x128 (gmm_fp8_glu). They take twice the
   stages, and pass their slot twice: TMA stores the gate columns of D from it, then h takes their memory, and then the
   linear columns. */
typedef struct gmm_fp8_args {
    CUtensorMap a, b, d;      /* boxes: A 64 rows, B 64 rows, D 64 rows of 128 bytes */
    gmm_gemm_args p;          /* its offsets and tiles are not read; a and b are the copies' codes */
    gmm_groups groups;        /* splits in device memory */
    gmm_mat a_scale, b_scale; /* scaling, scale, scale_table in device memory */
    int32_t *tables;          /* group tables in the workspace where shared memory has too few entries, else NULL */
    int32_t wgrad;            /* the operation is wgrad: both operands are COLUMNWISE copies of tokens */
    int32_t b_columnwise;     /* b is a COLUMNWISE copy: dgrad's weight */
    gmm_fp8_glu glu;          /* tiles with `glu` */
    int32_t tile_choice;      /* gmm_sm90_tile_choice */
} gmm_fp8_args;

enum { GMM_FP8_BLOCK_ROWS = 64 }; /* rows of a tile per consumer */
enum { GMM_FP8_MAX_CONSUMERS = 3 };
enum { GMM_FP8_IDLE_REGS = 24 }; /* registers of a consumer without rows */
/* Roles of the four warps behind those of the consumers. */
enum { GMM_FP8_PRODUCER_WARP, GMM_FP8_SCALE_WARP, GMM_FP8_SCHEDULER_WARP, GMM_FP8_STORE_WARP };
enum { GMM_FP8_SCALE_BLOCK_BYTES = 128 }; /* bytes of the scales of 8 columns of D in 1d1d, a line of 16 bytes each */

/* Tiles, rows x columns of D: X(tag, consumers, columns, stages, boxes of 64 rows x 128 bytes in a store slot,
   registers of consumers, registers of the other warps, whether fwd and dgrad predict the first tile of a CTA, whether
   operands may have a scale per line, whether it is a glu tile). Tags end in _small_m where the first tile is
   predicted, which is for few tokens: with many, 192x128 loses up to 4% by it. So is the glu tile, which loses with
   many tokens anyhow. This is not the small-M mode of the 16-bit products. The store slots of 128x128, the tile of
   1d1d, hold a whole fp32 tile. 128x192 leaves registers for an idle consumer. */
#define GMM_FP8_TILE_LIST(X) \
    X(192x128, 3, 128, 4, 2, 152, 56, 0, 1, 0) \
    X(192x128_small_m, 3, 128, 4, 2, 152, 56, 1, 1, 0) \
    X(128x192, 2, 192, 4, 3, 216, 56, 0, 1, 0) \
    X(128x192_small_m, 2, 192, 4, 3, 224, 56, 1, 1, 0) \
    X(128x128, 2, 128, 4, 4, 216, 72, 0, 0, 0) \
    X(192x128_glu, 3, 128, 4, 2, 152, 56, 1, 0, 1)

/* Scaling of partial sums: X(tag, value, bytes of column scales of a stage per tile, per column of the tile, arrivals
   of the scale loader at a full barrier). GMM__FP8_HAS_STAGE_SCALES_<tag>: whether stages can have scales. */
enum { GMM_FP8_FAST, GMM_FP8_1D2D, GMM_FP8_1D1D };
#define GMM_FP8_SCALING_LIST(X) \
    X(fast, GMM_FP8_FAST, 16, 0, 0) \
    X(1d2d, GMM_FP8_1D2D, 16, 0, 32) \
    X(1d1d, GMM_FP8_1D1D, 0, 16, 1)
#define GMM__FP8_IS_FAST_fast 1
#define GMM__FP8_IS_FAST_1d2d 0
#define GMM__FP8_IS_FAST_1d1d 0
#define GMM__FP8_IS_1D1D_fast 0
#define GMM__FP8_IS_1D1D_1d2d 0
#define GMM__FP8_IS_1D1D_1d1d 1
#define GMM__FP8_HAS_STAGE_SCALES_fast 0
#define GMM__FP8_HAS_STAGE_SCALES_1d2d 1
#define GMM__FP8_HAS_STAGE_SCALES_1d1d 1

/* Instances: X(dtype of A, tag, scaling, tile, first tile of the kernel, tile choice, kernel). The includes in
   fp8_kernels.cuh follow the same list. A kernel serves fwd, dgrad and wgrad, so its name has no operation but glu. A
   kernel with two tiles has the threads and the shared memory of its first one. It stands in three rows, one per
   gmm_sm90_tile_choice: that of by_split in GMM_FP8_SPLIT_LIST, with the columns of the first tile. */
#define GMM_FP8_KERNEL_LIST(X) \
    X(GMM_E4M3, e4m3, 1d2d, 192x128, 192x128, first, gmm_gemm_e4m3_1d2d_192x128x128_128x192x128_sm90) \
    X(GMM_E5M2, e5m2, 1d2d, 192x128, 192x128, first, gmm_gemm_e5m2_1d2d_192x128x128_128x192x128_sm90) \
    X(GMM_E4M3, e4m3, 1d2d, 128x192, 192x128, second, gmm_gemm_e4m3_1d2d_192x128x128_128x192x128_sm90) \
    X(GMM_E5M2, e5m2, 1d2d, 128x192, 192x128, second, gmm_gemm_e5m2_1d2d_192x128x128_128x192x128_sm90) \
    X(GMM_E4M3, e4m3, 1d2d, 192x128_small_m, 192x128_small_m, first, gmm_gemm_e4m3_1d2d_192x128x128_small_m_sm90) \
    X(GMM_E5M2, e5m2, 1d2d, 192x128_small_m, 192x128_small_m, first, gmm_gemm_e5m2_1d2d_192x128x128_small_m_sm90) \
    X(GMM_E4M3, e4m3, 1d2d, 128x192_small_m, 128x192_small_m, first, gmm_gemm_e4m3_1d2d_128x192x128_small_m_sm90) \
    X(GMM_E5M2, e5m2, 1d2d, 128x192_small_m, 128x192_small_m, first, gmm_gemm_e5m2_1d2d_128x192x128_small_m_sm90) \
    X(GMM_E4M3, e4m3, 1d2d, 192x128_glu, 192x128_glu, first, gmm_gemm_glu_e4m3_1d2d_192x128x128_sm90) \
    X(GMM_E4M3, e4m3, 1d1d, 128x128, 128x128, first, gmm_gemm_e4m3_1d1d_128x128x128_sm90) \
    X(GMM_E5M2, e5m2, 1d1d, 128x128, 128x128, first, gmm_gemm_e5m2_1d1d_128x128x128_sm90) \
    X(GMM_E4M3, e4m3, fast, 128x192, 128x192, first, gmm_gemm_e4m3_fast_128x192x128_sm90) \
    X(GMM_E5M2, e5m2, fast, 128x192, 128x192, first, gmm_gemm_e5m2_fast_128x192x128_sm90)
#define GMM_FP8_SPLIT_LIST(X) \
    X(GMM_E4M3, e4m3, 1d2d, 192x128, 192x128, by_split, gmm_gemm_e4m3_1d2d_192x128x128_128x192x128_sm90) \
    X(GMM_E5M2, e5m2, 1d2d, 192x128, 192x128, by_split, gmm_gemm_e5m2_1d2d_192x128x128_128x192x128_sm90)

#define GMM__FP8(name, tag) GMM__CAT(gmm_fp8_##name##_, tag) /* a constant or type of a tile or of a scaling */
#define GMM__FP8_INSTANCE(name, tag, scaling, tile) gmm_fp8_##name##_##tag##_##scaling##_##tile
#define GMM__X(tag, consumers_, tile_n_, stages_, boxes_, consumer_regs_, others_, predicts_, lines_, glu_) \
    GMM__FP8(consumers, tag) = consumers_, GMM__FP8(tile_n, tag) = tile_n_, GMM__FP8(stages, tag) = stages_, \
    GMM__FP8(store_boxes, tag) = boxes_, \
    GMM__FP8(predicts_first_tile, tag) = predicts_, GMM__FP8(lines, tag) = lines_, GMM__FP8(glu, tag) = glu_, \
    GMM__FP8(consumer_regs, tag) = consumer_regs_, GMM__FP8(other_regs, tag) = others_, \
    GMM__FP8(threads, tag) = 128 * (consumers_) + 128,
enum { GMM_FP8_TILE_LIST(GMM__X) gmm_fp8_tiles_end };
#undef GMM__X
#define GMM__X(tag, value, tile_, column_, arrivals_) \
    GMM__FP8(scaling, tag) = value, GMM__FP8(tile_scales, tag) = tile_, GMM__FP8(column_scales, tag) = column_, \
    GMM__FP8(loader_arrivals, tag) = arrivals_,
enum { GMM_FP8_SCALING_LIST(GMM__X) gmm_fp8_scaling_end };
#undef GMM__X

/* How a tile is stored: 16BIT the store slot holds 16-bit elements, else fp32 sums; TMA by the store warp, else by the
   consumers; LOAD added to old D, which TMA loads into the slot; REDUCE (besides LOAD) later parts are added to D by
   TMA instead. */
enum { GMM_FP8_D_16BIT = 1, GMM_FP8_D_TMA = 2, GMM_FP8_D_LOAD = 4, GMM_FP8_D_REDUCE = 8 };
/* The bits of d_flags from this one on: where the outer scale is two factors, the biased exponent of the second, which
   is a power of two; else 0. */
enum { GMM_FP8_SECOND_SCALE_SHIFT = 8 };
enum { GMM_FP8_REDUCE_K = 768 }; /* least contraction whose products hide TMA's additions to D */

/* A work tile of the FP8 products. */
typedef struct alignas(16) gmm_fp8_tile {
    gmm_sm90_tile t;
    float outer_scale;     /* what all of its sums are multiplied by */
    int32_t d_flags;       /* how it is stored: GMM_FP8_D_*, and the second factor of outer_scale */
    int32_t padded_row;    /* where its group starts in padded copies */
    int32_t d_y, d_z, d_w; /* the last three TMA coordinates of its first row in D */
} gmm_fp8_tile;

/* Barriers besides those of stages and slots. */
typedef struct gmm_fp8_barriers {
    uint64_t tile_full[GMM_SM90_TILE_RING];  /* an entry of the tile ring has been written */
    uint64_t tile_begun[GMM_SM90_TILE_RING]; /* the producer has begun tile n: the scheduler may write tile n + 8 */
    int32_t second_tile; /* a kernel with two tiles computes the second; written before tile_full[0] completes */
    int32_t reserved;
} gmm_fp8_barriers;
/* Of kernels with a predicted first tile. */
typedef struct gmm_fp8_prediction {
    uint64_t full;             /* the predicted tile lies in the ring's last entry */
    uint64_t peer_full;        /* the other CTA of the cluster has written peer_mispredicted */
    int32_t peer_mispredicted; /* whether its prediction was wrong */
    int32_t reserved[3];
} gmm_fp8_prediction;

/* Shared memory: one struct per scaling and tile, made from the columns of the lists. A stage holds operands as TMA
   writes them, in boxes of lines of 128 bytes with 128-byte swizzle. */
#define GMM__X(tag, consumers_, tile_n_, stages_, boxes_, consumer_regs_, others_, predicts_, lines_, glu_) \
    typedef struct GMM__FP8(stage, tag) { \
        char b[(tile_n_) / 64][GMM_SM90_BOX_BYTES]; /* [64 columns] */ \
        char a[consumers_][GMM_SM90_BOX_BYTES];     /* [64 rows] */ \
    } GMM__FP8(stage, tag);
GMM_FP8_TILE_LIST(GMM__X)
#undef GMM__X
/* Scales per line, of a consumer's rows and of the tile's columns; 1 if absent. */
#define GMM__X(tag, consumers_, tile_n_, stages_, boxes_, consumer_regs_, others_, predicts_, lines_, glu_) \
    typedef struct GMM__FP8(line_scales, tag) { \
        float row[(lines_) ? GMM_FP8_BLOCK_ROWS : 4], col[(lines_) ? (tile_n_) : 4]; \
    } GMM__FP8(line_scales, tag);
GMM_FP8_TILE_LIST(GMM__X)
#undef GMM__X
#define GMM__X(tag, consumers_, tile_n_, stages_, boxes_, consumer_regs_, others_, predicts_, lines_, glu_) \
    typedef struct GMM__FP8(tile_smem, tag) { \
        GMM__FP8(stage, tag) stage[stages_]; char slot[consumers_][boxes_][GMM_SM90_BOX_BYTES]; \
        gmm_sm90_stage_barriers stage_bars[stages_]; gmm_fp8_barriers bars; \
        gmm_sm90_slot_barriers slot_bars[GMM_FP8_MAX_CONSUMERS]; GMM__IF(predicts_, gmm_fp8_prediction prediction;) \
        gmm_fp8_tile ring[GMM_SM90_TILE_RING]; \
        int32_t ends[GMM_SM90_TABLE_LENGTH], work_ends[GMM_SM90_TABLE_LENGTH], padded_starts[GMM_SM90_TABLE_LENGTH]; \
        alignas(16) GMM__FP8(line_scales, tag) line_scales[consumers_]; } GMM__FP8(tile_smem, tag);
GMM_FP8_TILE_LIST(GMM__X)
#undef GMM__X
/* Sizes and offsets in bytes; prediction_offset is 0 where a tile has none. */
#define GMM__X(tag, consumers_, tile_n_, stages_, boxes_, consumer_regs_, others_, predicts_, lines_, glu_) \
    GMM__FP8(a_offset, tag) = offsetof(GMM__FP8(stage, tag), a), \
    GMM__FP8(stage_bytes, tag) = sizeof(GMM__FP8(stage, tag)), \
    GMM__FP8(slot_bytes, tag) = (boxes_) * GMM_SM90_BOX_BYTES, \
    GMM__FP8(line_scale_bytes, tag) = sizeof(GMM__FP8(line_scales, tag)), \
    GMM__FP8(prediction_offset, tag) = GMM__IF(predicts_, offsetof(GMM__FP8(tile_smem, tag), prediction) +) 0,
enum { GMM_FP8_TILE_LIST(GMM__X) gmm_fp8_tile_smem_end };
#undef GMM__X
/* The scales of a stage: of rows, then of columns. With 1d2d two floats for columns, of those up to the next multiple
   of 128 and of those behind it, all 1 where A has no scales by blocks; with 1d1d an operand of wgmma
   (gmm_fp8_store_column_scale). */
#define GMM__X(dtype, tag, scaling, tile_, first_, tile_choice, kernel) \
    typedef struct GMM__FP8_INSTANCE(stage_scales, tag, scaling, tile_) { \
        float row[GMM__FP8(consumers, tile_)][GMM_FP8_BLOCK_ROWS]; \
        char col[GMM__FP8(tile_scales, scaling) + GMM__FP8(column_scales, scaling) * GMM__FP8(tile_n, tile_)]; \
    } GMM__FP8_INSTANCE(stage_scales, tag, scaling, tile_);
GMM_FP8_KERNEL_LIST(GMM__X)
#undef GMM__X
/* unread: wgmma reads every line of column scales twice, which compute-sanitizer takes for one read of twice as many
   bytes; behind the last stage these are within the struct. */
#define GMM__X(dtype, tag, scaling, tile_, first_, tile_choice, kernel) \
    typedef struct GMM__FP8_INSTANCE(smem, tag, scaling, tile_) { \
        GMM__FP8(tile_smem, tile_) tile; \
        GMM__IF(GMM__FP8_HAS_STAGE_SCALES_##scaling, \
                GMM__FP8_INSTANCE(stage_scales, tag, scaling, tile_) scales[GMM__FP8(stages, tile_)];) \
        GMM__IF(GMM__FP8_IS_1D1D_##scaling, char unread[GMM__FP8(column_scales, scaling) * GMM__FP8(tile_n, tile_)];) \
    } GMM__FP8_INSTANCE(smem, tag, scaling, tile_);
GMM_FP8_KERNEL_LIST(GMM__X)
#undef GMM__X
#define GMM__X(dtype, tag, scaling, tile_, first_, tile_choice, kernel) \
    static_assert(sizeof(GMM__FP8_INSTANCE(smem, tag, scaling, tile_)) <= 232448, \
                  #kernel ": a CTA has at most 227 KiB of shared memory"); \
    static_assert(GMM__FP8_IS_FAST_##scaling || \
                      sizeof(GMM__FP8_INSTANCE(smem, tag, scaling, tile_)) >= \
                          sizeof(GMM__FP8(tile_smem, tile_)) + (int)GMM__FP8(stages, tile_) * \
                              sizeof(GMM__FP8_INSTANCE(stage_scales, tag, scaling, tile_)), \
                  #kernel ": the scales of stages follow the struct of the tile");
GMM_FP8_KERNEL_LIST(GMM__X)
#undef GMM__X
#define GMM__X(dtype, tag, scaling_, tile_, first_, tile_choice, kernel) \
    static_assert(!GMM__FP8(glu, tile_) || (int)GMM__FP8(scaling, scaling_) == GMM_FP8_1D2D, \
                  #kernel ": a glu product is by blocks");
GMM_FP8_KERNEL_LIST(GMM__X)
#undef GMM__X
/* Tiles of one kernel. Warps that do not know the choice yet find the barriers, the ring and the tables at the same
   places. The kernel has the threads and the shared memory of its first tile. */
#define GMM__SAME_OFFSET(first, second, member) \
    (offsetof(GMM__FP8(tile_smem, first), member) == offsetof(GMM__FP8(tile_smem, second), member))
#define GMM__X(dtype, tag, scaling, tile_, first_, tile_choice, kernel) \
    static_assert(GMM__SAME_OFFSET(first_, tile_, slot) && GMM__SAME_OFFSET(first_, tile_, stage_bars) && \
                  GMM__SAME_OFFSET(first_, tile_, bars) && GMM__SAME_OFFSET(first_, tile_, slot_bars) && \
                  GMM__SAME_OFFSET(first_, tile_, ring) && GMM__SAME_OFFSET(first_, tile_, ends) && \
                  GMM__SAME_OFFSET(first_, tile_, line_scales), #kernel ": places of what its tiles have in common");
GMM_FP8_KERNEL_LIST(GMM__X)
#undef GMM__X
#undef GMM__SAME_OFFSET
#define GMM__X(dtype, tag, scaling, tile_, first_, tile_choice, kernel) \
    static_assert(sizeof(GMM__FP8_INSTANCE(smem, tag, scaling, tile_)) <= \
                      sizeof(GMM__FP8_INSTANCE(smem, tag, scaling, first_)) && \
                  (int)GMM__FP8(stages, tile_) == (int)GMM__FP8(stages, first_) && \
                  (int)GMM__FP8(consumers, tile_) <= (int)GMM__FP8(consumers, first_), #kernel ": size of its tiles");
GMM_FP8_KERNEL_LIST(GMM__X)
#undef GMM__X
#define GMM__X(dtype, tag, scaling, tile_, first_, tile_choice, kernel) \
    static_assert((int)gmm_sm90_tile_##tile_choice == gmm_sm90_tile_first || \
                      128 * ((int)GMM__FP8(consumers, tile_) * (int)GMM__FP8(consumer_regs, tile_) + \
                             GMM_FP8_IDLE_REGS + (int)GMM__FP8(other_regs, first_)) <= 65536, \
                  #kernel ": registers of its second tile, beside an idle consumer"); \
    static_assert((int)gmm_sm90_tile_##tile_choice != gmm_sm90_tile_second || \
                      (int)GMM__FP8(consumers, tile_) + 1 == (int)GMM__FP8(consumers, first_), \
                  #kernel ": consumer 0 arrives for one idle consumer");
GMM_FP8_KERNEL_LIST(GMM__X)
#undef GMM__X
#define GMM__X(dtype, tag, scaling_, tile_, first_, tile_choice, kernel) \
    static_assert((int)gmm_sm90_tile_##tile_choice == gmm_sm90_tile_first || \
                      ((int)GMM__FP8(scaling, scaling_) == GMM_FP8_1D2D && \
                       !GMM__FP8(predicts_first_tile, tile_) && !GMM__FP8(glu, tile_) && \
                       !GMM__FP8(predicts_first_tile, first_) && !GMM__FP8(glu, first_)), \
                  #kernel ": 1d2d tiles alone have a choice, and a predicted tile would precede it");
GMM_FP8_KERNEL_LIST(GMM__X)
#undef GMM__X
/* What addresses and TMA assume of the layout. */
#define GMM__X(tag, consumers_, tile_n_, stages_, boxes_, consumer_regs_, others_, predicts_, lines_, glu_) \
    static_assert(GMM__FP8(stage_bytes, tag) % 1024 == 0 && GMM__FP8(a_offset, tag) % 1024 == 0 && \
                  offsetof(GMM__FP8(tile_smem, tag), slot) % 1024 == 0, \
                  "tile " #tag ": operands and slots begin at multiples of 1024 bytes, 8 lines of the swizzle");
GMM_FP8_TILE_LIST(GMM__X)
#undef GMM__X
#define GMM__X(tag, consumers_, tile_n_, stages_, boxes_, consumer_regs_, others_, predicts_, lines_, glu_) \
    static_assert(offsetof(GMM__FP8(tile_smem, tag), padded_starts) - offsetof(GMM__FP8(tile_smem, tag), ends) == \
                      8 * GMM_SM90_TABLE_LENGTH, \
                  "tile " #tag ": the tables follow one another as in the workspace"); \
    static_assert(offsetof(GMM__FP8(tile_smem, tag), line_scales) % 16 == 0 && \
                  sizeof(GMM__FP8(tile_smem, tag)) % 16 == 0, \
                  "tile " #tag ": scales are read by vectors of 16 bytes");
GMM_FP8_TILE_LIST(GMM__X)
#undef GMM__X

/* Bytes of a CTA's group tables (ends, work_ends, padded starts) in the workspace. */
static GMM__UNUSED size_t gmm_fp8_table_bytes(int64_t groups) { return 12 * ((size_t)groups + 1); }

/* Copies a float to shared memory asynchronously (cp.async), or +0 where `present` is 0. */
GMM__DEVICE void gmm_cp_async_f32(uint32_t smem, const float *from, int present) {
    gmm_cp_async_4_zfill(smem, __cvta_generic_to_global(from), present ? 4 : 0);
}

/* Products of scales in 1d1d. A bf16 tensor core multiplies a column of row scales by a row of column scales, into
   accumulators that lie as those of the product do. An fp32 scale is the sum of three bf16, its parts of 8 bits each,
   and of K = 16 products nine are those of a part by a part. A column's line of B has 16 bytes and is read twice, as K
   = 0 to 7 and as K = 8 to 15. By number of the part, - is 0:
       B, column          0 1 2 - 0 1 2 -
       A, row, first K    0 0 0 0 2 2 2 2
       A, row, second K   1 1 1 1 - - - -
   A power of two has one part, and the product of two of them is exact. */
GMM__DEVICE float gmm_fp8_leading_part(float scale) {
    return gmm_f32_from_bits(__float_as_uint(scale) & 0xFFFF0000u);
}
/* The fragment of A of a thread, whose rows have these scales: lane l holds K = 2 (l % 4), and the next one. */
GMM__DEVICE void gmm_fp8_scale_fragment(const float scales[2], uint32_t a[4]) {
    const int left = (threadIdx.x & 3) < 2;
    int e;
#pragma unroll
    for (e = 0; e < 2; e++) {
        const float rest = scales[e] - gmm_fp8_leading_part(scales[e]);
        const float third = rest - gmm_fp8_leading_part(rest);
        a[e] = __byte_perm(__float_as_uint(left ? scales[e] : third), 0, 0x3232);
        a[2 + e] = left ? __byte_perm(__float_as_uint(rest), 0, 0x3232) : 0;
    }
}
/* Writes a column's line of B. */
GMM__DEVICE void gmm_fp8_store_column_scale(uint32_t smem, float scale) {
    const float first = gmm_fp8_leading_part(scale), rest = scale - first, second = gmm_fp8_leading_part(rest);
    const uint32_t low = __byte_perm(__float_as_uint(first), __float_as_uint(second), 0x7632);
    const uint32_t high = __float_as_uint(rest - second) >> 16;
    gmm_st_shared_v4_u32(smem, low, high, low, high);
}

/* Addresses of barriers of the tile ring. */
GMM__DEVICE uint32_t gmm_fp8_tile_full(uint32_t bars, uint32_t tile_index) {
    return bars + GMM__OFFSET(gmm_fp8_barriers, tile_full) +
           GMM_SM90_MBARRIER_BYTES * (tile_index % GMM_SM90_TILE_RING);
}
GMM__DEVICE uint32_t gmm_fp8_tile_begun(uint32_t bars, uint32_t tile_index) {
    return bars + GMM__OFFSET(gmm_fp8_barriers, tile_begun) +
           GMM_SM90_MBARRIER_BYTES * (tile_index % GMM_SM90_TILE_RING);
}
/* Waits for tile number `tile_index` of the ring. predicted: the predicted first tile instead, which lies in the ring's
   last entry; prediction: address of the gmm_fp8_prediction. */
GMM__DEVICE const gmm_fp8_tile *gmm_fp8_wait_tile(const gmm_fp8_tile *ring, uint32_t bars, uint32_t prediction,
                                                  uint32_t tile_index, int predicted) {
    const gmm_fp8_tile *const f = &ring[predicted ? GMM_SM90_TILE_RING - 1 : tile_index % GMM_SM90_TILE_RING];
    gmm_mbarrier_wait(predicted ? prediction + GMM__OFFSET(gmm_fp8_prediction, full)
                                : gmm_fp8_tile_full(bars, tile_index), tile_index / GMM_SM90_TILE_RING & 1);
    return f;
}
/* ............................................................ Grouped FP8 products: the pipeline of a consumer ... */

/* Where a consumer warp stands in the pipeline: what it needs of the next stage. It is computed while the products of
   the stage before run, so that the first product of a stage waits for the full barrier alone. */
typedef struct gmm_fp8_pipeline {
    uint32_t stage, parity;             /* number of the next stage in shared memory; parity of its phase */
    uint32_t desc_a, desc_b;            /* low words of descriptors: of the consumer's rows, of the tile's columns */
    uint32_t full;                      /* its full barrier */
    uint32_t empty;                     /* its empty barrier, in the CTA of the cluster at which this lane arrives */
    uint32_t row_scales, column_scales; /* its scales: of the thread's first row; of the tile's columns */
    int arrives;                        /* this lane arrives at empty barriers */
} gmm_fp8_pipeline;

/* That of the first stage. Addresses are those of stage 0. idle: consumers for which this one arrives too. */
GMM__DEVICE gmm_fp8_pipeline gmm_fp8_begin_pipeline(uint32_t a, uint32_t b, uint32_t stage_bars, uint32_t row_scales,
                                                    uint32_t column_scales, const int idle) {
    const uint32_t lane = (uint32_t)gmm_tid_x() & 31, ctas = gmm_cluster_nctarank();
    const uint32_t empty = gmm_mapa(gmm_sm90_empty(stage_bars, 0), lane & (ctas - 1));
    const gmm_fp8_pipeline p = { 0, 0, (uint32_t)gmm_wgmma_desc(a, 0), (uint32_t)gmm_wgmma_desc(b, 0),
                                 gmm_sm90_full(stage_bars, 0), empty, row_scales, column_scales, lane < ctas << idle };
    return p;
}
/* Waits until the next stage is full; gmm_fp8_test_stage says, without waiting, whether it is. */
GMM__DEVICE void gmm_fp8_wait_stage(const gmm_fp8_pipeline *p) { gmm_mbarrier_wait(p->full, p->parity); }
GMM__DEVICE int gmm_fp8_test_stage(const gmm_fp8_pipeline *p) { return gmm_mbarrier_test(p->full, p->parity); }
/* Releases the stage with this empty barrier to the producers of the cluster's CTAs. Whole warp, which has read the
   stage. */
GMM__DEVICE void gmm_fp8_release_stage(const gmm_fp8_pipeline *p, uint32_t empty) {
    if (p->arrives) gmm_mbarrier_arrive_mapped(empty);
}
/* Moves on by a stage. The sizes are constants, of the tile. */
GMM__DEVICE void gmm_fp8_next_stage(gmm_fp8_pipeline *p, const int stages, const int stage_bytes,
                                    const int scale_bytes) {
    const int wraps = ++p->stage == (uint32_t)stages;
    const uint32_t desc = (uint32_t)(wraps ? (1 - stages) * (stage_bytes >> 4) : stage_bytes >> 4);
    const uint32_t bars = (uint32_t)(wraps ? 1 - stages : 1) * (uint32_t)sizeof(gmm_sm90_stage_barriers);
    const uint32_t scales = (uint32_t)(wraps ? (1 - stages) * scale_bytes : scale_bytes);
    p->stage = wraps ? 0 : p->stage;
    p->parity ^= (uint32_t)wraps;
    p->desc_a += desc;
    p->desc_b += desc;
    p->full += bars;
    p->empty += bars;
    p->row_scales += scales;
    p->column_scales += scales;
}

/* How far a consumer has stored D. The last part that it has written may still have to be passed to the store warp:
   that is done behind the first products of its next tile, before it waits for the slot again, before it skips a tile,
   and at the end. */
typedef struct gmm_fp8_store {
    uint32_t parts;        /* parts of D that it has written to its slot */
    uint32_t pending_full; /* the slot's full barrier while the last of them has not been passed on, else 0 */
} gmm_fp8_store;
/* Passes a written slot to the store warp. Called behind the first products of a tile, so that these run while the
   fence waits for the writes. */
GMM__DEVICE void gmm_fp8_pass_slot(gmm_fp8_store *store) {
    if (!store->pending_full) return;
    gmm_fence_proxy_async();
    gmm_mbarrier_arrive(store->pending_full);
    store->pending_full = 0;
}
/* Waits until the slot of consumer `wg` may be written, for its next part. */
GMM__DEVICE void gmm_fp8_wait_slot(gmm_fp8_store *store, uint32_t slot_bars, int wg) {
    gmm_fp8_pass_slot(store);
    gmm_mbarrier_wait(gmm_sm90_slot_empty(slot_bars, (uint32_t)wg), store->parts++ & 1);
    store->pending_full = gmm_sm90_slot_full(slot_bars, (uint32_t)wg);
}

/* What a consumer reads of a tile's entry in the ring. */
typedef struct gmm_fp8_consumer_tile {
    const gmm_fp8_tile *f; /* for the epilogue; valid until the tile has been stored */
    int32_t row_blocks, k, n0, cols, d_flags;
    float outer_scale;
} gmm_fp8_consumer_tile;
GMM__DEVICE gmm_fp8_consumer_tile gmm_fp8_read_tile(const gmm_fp8_tile *f) {
    const gmm_fp8_consumer_tile tile = { f, f->t.row_blocks, f->t.k, f->t.n0, f->t.cols, f->d_flags, f->outer_scale };
    return tile;
}

/* Initialises the barriers of store slots with their arrivals per phase. store_lanes: that store a slot, a TMA box
   each. One thread. */
GMM__DEVICE void gmm_fp8_init_slots(uint32_t slot_bars, int consumers, int store_lanes) {
    int i;
    for (i = 0; i < consumers; i++) {
        gmm_mbarrier_init(gmm_sm90_slot_empty(slot_bars, (uint32_t)i), (uint32_t)store_lanes);
        gmm_mbarrier_init(gmm_sm90_slot_full(slot_bars, (uint32_t)i), 128);
    }
    gmm_fence_mbarrier_init();
}

/* Waits until the scheduler has chosen one of the kernel's two tiles. Returns whether it is the second. The vote makes
   the answer uniform for the compiler, which would else keep no wgmma descriptor in uniform registers. Whole warp. */
GMM__DEVICE int gmm_fp8_wait_choice(const gmm_fp8_barriers *barriers, uint32_t bars) {
    gmm_mbarrier_wait(gmm_fp8_tile_full(bars, 0), 0);
    return __any_sync(0xFFFFFFFFu, *(const volatile int32_t *)&barriers->second_tile);
}
/* ................................................................. Grouped FP8 products: planning of work tiles ... */

/* Stages of a tile. An empty contraction takes one stage without a load: a tile has at least one stage, because stages
   bound how far the producer, and with it the scheduler, is ahead of the consumers. */
GMM__DEVICE uint32_t gmm_fp8_k_tiles(int32_t k) { return k > 0 ? (uint32_t)(k + 127) / 128 : 1; }

/* Clocks of a stage of a tile with `blocks` blocks of 64 rows. Host (gmm__wgmma_fp8_cost) and device choose tiles by
   them. Fitted on one H200 to 500 products by blocks in forward, even and skewed, each in both tiles. */
GMM__HD int32_t gmm_fp8_stage_clocks(int32_t tile_n, int32_t blocks) {
    if (tile_n == 128) return blocks == 1 ? 640 : blocks == 2 ? 830 : 920;
    return blocks == 1 ? 890 : 970;
}
/* The same, summed over the tiles of a group, which divide its blocks evenly: `lower` tiles of `blocks` blocks, and
   `higher` ones of one more. blocks > 0. */
GMM__HD float gmm_fp8_group_clocks(int32_t tile_n, int32_t blocks, float lower, float higher) {
    return lower * (float)gmm_fp8_stage_clocks(tile_n, blocks) +
           higher * (float)gmm_fp8_stage_clocks(tile_n, blocks + 1);
}
enum { GMM_FP8_TILE_CLOCKS = 2000 }; /* what a tile takes besides its stages */

/* The price of fwd or dgrad of the split in a tile of `consumers` blocks of rows and tile_n columns: the rounds of the
   busiest CTA times the clocks of a mean tile. Whole warp. */
GMM__DEVICE float gmm_fp8_tile_price(const gmm_sm90_scheduler *s, gmm_sm90_split_stats stats, const int32_t consumers,
                                     const int32_t tile_n) {
    const int32_t grid = (int32_t)gridDim.x, min_tiles = (s->p->n + tile_n - 1) / tile_n;
    const int32_t tiles_n = tile_n == 128 ? min_tiles
                                          : gmm_sm90_tiles_n(s->p, min_tiles, 64, GMM_FP8_BLOCK_ROWS * consumers,
                                                             (int32_t)gmm_cluster_nctarank(), stats);
    int32_t tiles = 0, g; /* row tiles */
    float clocks = 0.0f;  /* of a stage, summed over row tiles */
#pragma unroll 1
    for (g = (int32_t)threadIdx.x & 31; (g & ~31) < s->p->groups; g += 32) {
        const int32_t rows = g < s->p->groups ? s->ends[g + 1] - s->ends[g] : 0;
        const int32_t blocks = (rows + GMM_FP8_BLOCK_ROWS - 1) / GMM_FP8_BLOCK_ROWS;
        const int32_t tiles_m = (blocks + consumers - 1) / consumers;
        tiles += tiles_m;
        if (tiles_m > 0)
            clocks += gmm_fp8_group_clocks(tile_n, blocks / tiles_m, (float)(tiles_m - blocks % tiles_m),
                                           (float)(blocks % tiles_m));
    }
    tiles = __reduce_add_sync(0xFFFFFFFFu, tiles);
#pragma unroll
    for (g = 16; g > 0; g /= 2) clocks += __shfl_xor_sync(0xFFFFFFFFu, clocks, g);
    return (float)((tiles * tiles_n + grid - 1) / grid) *
           ((float)gmm_fp8_k_tiles(s->p->k) * clocks / (float)max(tiles, 1) + (float)GMM_FP8_TILE_CLOCKS);
}

/* Prefix sums [G + 1] of the groups' rows in padded copies. Whole warp. */
GMM__DEVICE void gmm_fp8_padded_starts(int32_t groups, const int32_t *ends, int32_t *starts) {
    const int32_t lane = (int32_t)threadIdx.x & 31;
    int32_t rows_before = 0, g;
    if (lane == 0) starts[0] = 0;
#pragma unroll 1
    for (g = lane; (g & ~31) < groups; g += 32) {
        const int32_t rows = g < groups ? ends[g + 1] - ends[g] : 0;
        const int32_t padded = (rows + GMM_GROUP_ROWS - 1) / GMM_GROUP_ROWS * GMM_GROUP_ROWS;
        const int32_t end = rows_before + gmm_sm90_lane_sum(padded);
        if (g < groups) starts[g + 1] = end;
        rows_before = __shfl_sync(0xFFFFFFFFu, end, 31);
    }
    __syncwarp();
}

/* First row of B, and column of D, of a glu tile whose first column of h is n0: the gate's in pass 0, the linear ones'
   in pass 1. */
GMM__DEVICE int32_t gmm_fp8_glu_column(const gmm_fp8_args *args, int32_t n0, int32_t pass) {
    const int32_t block = args->glu.block;
    return n0 / block * 2 * block + n0 % block + pass * block;
}

/* Address of the first scale of a tile's group. *step: floats from a block along the contraction to the next; *block:
   floats from 128 columns of D to the next 128. Lines of A are D's rows, lines of B are D's columns. glu: a constant,
   of the tile. */
GMM__DEVICE const float *gmm_fp8_scales_a(const gmm_fp8_args *args, const gmm_fp8_tile *t, int64_t *step) {
    const gmm_direction direction = args->wgrad ? GMM_COLUMNWISE : GMM_ROWWISE;
    const gmm__qview v = gmm__qview_of(&args->a_scale, direction, 1, t->t.g, t->t.row, t->padded_row,
                                       t->t.end - t->t.row, args->wgrad ? args->p.m : args->p.k);
    *step = gmm__qview_scale(&v, 0, 1);
    return (const float *)(const void *)v.scale;
}
GMM__DEVICE const float *gmm_fp8_scales_b(const gmm_fp8_args *args, const int passes, const gmm_fp8_tile *t,
                                          int64_t *step, int64_t *block) {
    const gmm_direction direction = args->wgrad || args->b_columnwise ? GMM_COLUMNWISE : GMM_ROWWISE;
    const int64_t rows = args->wgrad ? t->t.end - t->t.row
                         : args->b_columnwise ? args->p.k : args->p.n * (int64_t)passes;
    const int64_t cols = args->b_columnwise || args->wgrad ? args->p.n : args->p.k;
    const gmm__qview v = gmm__qview_of(&args->b_scale, direction, args->wgrad, t->t.g, args->wgrad ? t->t.row : 0,
                                       args->wgrad ? t->padded_row : 0, rows, cols);
    *step = gmm__qview_scale(&v, 0, 1);
    *block = gmm__qview_scale(&v, 128, 0);
    return (const float *)(const void *)v.scale;
}

/* Sets how a tile is stored: d_flags and the coordinates in D. The tile's outer scale becomes 1. Rows of D have a
   multiple of 16 elements, so that they end at multiples of 16 bytes, as TMA stores require. */
GMM__DEVICE void gmm_fp8_plan_store(const gmm_fp8_args *args, gmm_fp8_tile *f) {
    const char *const d = gmm_kmat_data(&args->p.d, f->t.g);
    const int32_t map_z = gmm_sm90_map_z(gmm_sm90_map_offset(d)), map_w = gmm_sm90_map_w(gmm_sm90_map_offset(d));
    const int size = gmm_kmat_size(&args->p.d);
    const float beta = gmm_gemm_beta(&args->p, f->t.g);
    f->outer_scale = 1.0f; /* gmm_fp8_plan_outer_scale writes another where there is one */
    f->d_flags = size == 2 && beta == 0.0f ? GMM_FP8_D_16BIT : 0;
    if ((((uint64_t)(uintptr_t)d | (uint64_t)(args->p.d.ld * size)) & 15) == 0 && (beta == 0.0f || size == 4)) {
        f->d_flags |= GMM_FP8_D_TMA | (beta == 0.0f ? 0 : GMM_FP8_D_LOAD);
        if (beta == 1.0f && f->t.k >= GMM_FP8_REDUCE_K) f->d_flags |= GMM_FP8_D_REDUCE;
    }
    f->d_y = f->t.m0 + (args->wgrad ? 0 : GMM_SM90_RAGGED_ROWS - (f->t.end - f->t.row));
    f->d_z = args->wgrad ? map_z : f->t.end;
    f->d_w = args->wgrad ? map_w : GMM_SM90_RAGGED_ROWS;
}

/* Per-tensor scale of a group in A and in B; 1 where the operand has none. */
GMM__DEVICE float gmm_fp8_tensor_scale_a(const gmm_fp8_args *args, int32_t g) {
    return args->a_scale.scaling == GMM_SCALING_TENSOR ? ((const float *)args->a_scale.scale)[g] : 1.0f;
}
GMM__DEVICE float gmm_fp8_tensor_scale_b(const gmm_fp8_args *args, int32_t g) {
    if (args->b_scale.scaling != GMM_SCALING_TENSOR) return 1.0f;
    return args->b_scale.scale_table ? *(const float *)args->b_scale.scale_table[g]
                                     : ((const float *)args->b_scale.scale)[g];
}

/* Whether sums have an outer scale: alpha, or a scale per tensor. */
GMM__DEVICE int gmm_fp8_has_outer_scale(const gmm_fp8_args *args) {
    return args->p.alpha || args->a_scale.scaling == GMM_SCALING_TENSOR || args->b_scale.scaling == GMM_SCALING_TENSOR;
}

/* Sets the outer scale of a tile in the ring: the factor of all sums of its group, that is alpha times per-tensor
   scales. An empty sum stays +0 whatever the sign of alpha. Where a partial product leaves the range of normal numbers,
   the scale becomes two factors, the second a power of two; the scheduler warp computes them, so that consumers spend
   no time on it. `f` is the tile in the ring, since the scheduler warp has no registers left for the scale. */
GMM__DEVICE void gmm_fp8_plan_outer_scale(const gmm_fp8_args *args, gmm_fp8_tile *f) {
    const int32_t g = f->t.g;
    float alpha = 1.0f, alpha_a, scale;
    if (f->t.row_blocks == 0 || f->t.cols <= 0 || f->t.k == 0) return;
    if (args->p.alpha) alpha = args->p.alpha[args->p.alpha_per_group ? g : 0];
    alpha_a = __fmul_rn(alpha, gmm_fp8_tensor_scale_a(args, g));
    scale = __fmul_rn(alpha_a, gmm_fp8_tensor_scale_b(args, g));
    if (__builtin_expect(!gmm__scale_normal(alpha_a) || !gmm__scale_normal(scale), 0)) {
        const gmm__scale product = gmm__scale_times(gmm__scale_of(alpha), gmm_fp8_tensor_scale_a(args, g));
        float second;
        scale = gmm__scale_split(gmm__scale_times(product, gmm_fp8_tensor_scale_b(args, g)), &second);
        f->d_flags |= (int32_t)(gmm_f32_bits(second) >> 23) << GMM_FP8_SECOND_SCALE_SHIFT;
    }
    f->outer_scale = scale;
}

/* Predicted first tile. The scheduler chooses the CTA's first tile by the split that it reads before
   griddepcontrol.wait; the producer loads the tile's operands right after the wait, and consumers multiply them.
   Meanwhile the scheduler reads the split again. If the prediction was wrong, the result is discarded and the CTA takes
   its true first tile after all others. CTAs of a cluster pass stages to one another and must take the same number of
   them: an empty tile takes as many stages as a real one, and where one CTA repeats its first tile, the other takes one
   more empty tile. */

/* A tile without rows or columns that takes the stages of a real one. */
GMM__DEVICE void gmm_fp8_empty_tile(const gmm_fp8_args *args, gmm_fp8_tile *f) {
    memset(f, 0, sizeof *f);
    f->t.row_blocks = 1;
    f->t.k = args->p.k;
}

/* Rules of FP8 tiles. The store warp reads entry n of the ring until it gives consumers the slot for tile n + 1, and
   consumers read it until they have stored tile n. By then they may have released all stages of tile n + 1, so that the
   producer has begun tile n + 2 + stages at most. The scheduler overwrites the entry when the producer has begun tile
   n + GMM_SM90_TILE_RING / 2. */
#define GMM__X(tag, consumers_, tile_n_, stages_, boxes_, consumer_regs_, others_, predicts_, lines_, glu_) \
    static_assert((stages_) + 3 <= GMM_SM90_TILE_RING / 2, "tile " #tag ": the ring is too short for its stages"); \
    static_assert(128 * ((consumers_) * (consumer_regs_) + (others_)) <= 65536 && (consumer_regs_) % 8 == 0 && \
                  (others_) % 8 == 0, "tile " #tag ": a multiprocessor has 65536 registers"); \
    static_assert((consumers_) * (boxes_) <= 32, "tile " #tag ": a lane of the store warp stores one box");
GMM_FP8_TILE_LIST(GMM__X)
#undef GMM__X
#define GMM__X(tag, consumers_, tile_n_, stages_, boxes_, consumer_regs_, others_, predicts_, lines_, glu_) \
    static_assert(!(glu_) || ((tile_n_) == 128 && (boxes_) == 2 && !(lines_)), \
                  "tile " #tag ": a glu tile has the columns of a 1x128 scale, and the gate fills a store slot");
GMM_FP8_TILE_LIST(GMM__X)
#undef GMM__X

/* The predicted first tile of this CTA. Its operands are not multicast, since the CTAs of a cluster may have read
   different splits. Whole warp. */
GMM__DEVICE void gmm_fp8_predict_first_tile(const gmm_fp8_args *args, const gmm_sm90_scheduler *s,
                                            const gmm_sm90_cta cta, gmm_fp8_tile *f) {
    const int32_t *const ends = s->ends, *const work_ends = s->work_ends;
    int32_t work = (int32_t)(blockIdx.x >> (cta.cluster_size - 1)), g = 0, m;
    gmm_fp8_empty_tile(args, f);
    if (work >= work_ends[args->p.groups]) return;
    gmm_find_group32(work_ends, args->p.groups, work, &g);
    work -= work_ends[g];
    f->t.g = g;
    m = ends[g + 1] - ends[g];
    /* What gmm_sm90_schedule_tile computes, with less arithmetic, where the group has one tile of rows. The last column
       tile of an odd number is unpaired, and is left to that function. */
    if (m > 0 && m <= s->block_rows * s->max_blocks && work < s->tiles_n >> (cta.cluster_size - 1)) {
        const int32_t tn = cta.cluster_size * work + cta.cta_rank;
        const int32_t units = gmm_sm90_divide(args->p.n + s->col_align - 1, s->col_align);
        f->t.row = ends[g];
        f->t.end = ends[g + 1];
        f->t.rows = m;
        f->t.row_blocks = gmm_sm90_divide(m + s->block_rows - 1, s->block_rows);
        f->t.n0 = s->col_align * gmm_sm90_even_begin(units, s->tiles_n, tn);
        f->t.cols = s->col_align * gmm_sm90_even_begin(units, s->tiles_n, tn + 1) - f->t.n0;
        if (f->t.cols > args->p.n - f->t.n0) f->t.cols = args->p.n - f->t.n0;
    } else {
        gmm_sm90_schedule_tile(s, s->cluster_along_n, 0, work, 0, cta, &f->t);
        f->t.multicast = GMM_SM90_MULTICAST_NONE;
    }
    f->padded_row = s->padded_starts[f->t.g];
}
/* Whether the predicted first tile is the true one, or both are empty. */
GMM__DEVICE int gmm_fp8_same_tile(const gmm_fp8_tile *f, const gmm_fp8_tile *predicted) {
    const gmm_sm90_tile *const a = &f->t, *const b = &predicted->t;
    return (a->cols <= 0 && b->cols <= 0) ||
           (a->g == b->g && a->row == b->row && a->end == b->end && a->m0 == b->m0 && a->rows == b->rows &&
            a->n0 == b->n0 && a->cols == b->cols && f->padded_row == predicted->padded_row);
}
/* Sends the other CTA of the cluster whether this CTA mispredicted. prediction: address of the gmm_fp8_prediction. One
   lane. */
GMM__DEVICE void gmm_fp8_send_mispredict(uint32_t prediction, int mispredicted) {
    const uint32_t word = prediction + GMM__OFFSET(gmm_fp8_prediction, peer_mispredicted);
    const uint32_t bar = prediction + GMM__OFFSET(gmm_fp8_prediction, peer_full);
    gmm_mbarrier_arrive_expect_tx(bar, 4);
    gmm_st_async_remote(word, bar, gmm_cluster_ctarank() ^ (gmm_cluster_nctarank() - 1), mispredicted);
}

/* What a CTA loads of an operand in every stage: the boxes in `mask`, of 64 rows each. */
typedef struct gmm_fp8_operand {
    const CUtensorMap *map;
    uint32_t mask;
    int32_t multicast;    /* both CTAs of the cluster get what one of them loads */
    int32_t y, end, wrap; /* the last three TMA coordinates of the first box */
} gmm_fp8_operand;
/* Loads them; at most `count`, a constant. to: where the operand begins in the stage. x: their first TMA coordinate. */
GMM__DEVICE void gmm_fp8_load_operand(const gmm_fp8_operand *o, const int count, uint32_t to, uint32_t full,
                                      int32_t x) {
    int i;
#pragma unroll
    for (i = 0; i < count; i++)
        if (o->mask >> i & 1)
            gmm_tma_load(to + GMM_SM90_BOX_BYTES * i, o->map, full, o->multicast, x, o->y + 64 * i, o->end, o->wrap);
}

/* The store warp: one lane per box of each consumer's store slot. A tile is stored in parts of as many columns as a
   slot holds. For each part the lane loads old D where the tile says so, passes the slot to its consumer (slot.empty),
   waits until the consumer has written it (slot.full) and stores it. Tiles that have no rows for a consumer pass
   through the barriers once. A glu tile has two passes, whose parts are apart in D. slots: address of the first slot;
   passes: a constant, of the tile. */
GMM__DEVICE void gmm_fp8_store_tiles(const gmm_fp8_args *args, const int boxes, const int passes,
                                     const gmm_fp8_tile *ring, uint32_t bars, uint32_t slot_bars, uint32_t slots) {
    const int lane = (int)threadIdx.x & 31, consumer = lane / boxes, box = lane % boxes;
    const uint32_t slot = slots + GMM_SM90_BOX_BYTES * (uint32_t)lane;
    const uint32_t empty = gmm_sm90_slot_empty(slot_bars, (uint32_t)consumer);
    const uint32_t full = gmm_sm90_slot_full(slot_bars, (uint32_t)consumer);
    uint32_t tile_index, part = 0;
    for (tile_index = 0;; tile_index++) {
        /* the scheduler overwrites the entry after this warp has left the tile: "Rules of FP8 tiles" (fp8_plan.cuh) */
        const gmm_fp8_tile *const f = &ring[tile_index % GMM_SM90_TILE_RING];
        int box_cols, cols, part_col = 0;
        gmm_mbarrier_wait(gmm_fp8_tile_full(bars, tile_index), tile_index / GMM_SM90_TILE_RING & 1);
        if (f->t.row_blocks == 0) break;
        box_cols = f->d_flags & GMM_FP8_D_16BIT ? 64 : 32;
        cols = f->t.row_blocks > consumer ? f->t.cols * passes : 0;
        do {
            const int x = part_col + box_cols * box, next = x + box_cols * boxes,
                      by_tma = (f->d_flags & GMM_FP8_D_TMA) && x < cols;
            const int reduce = (f->d_flags & GMM_FP8_D_REDUCE) && part_col > 0;
            const int32_t y = f->d_y + 64 * consumer;
            GMM__BULK_WAIT_GROUP_READ(0);
            if (by_tma && (f->d_flags & GMM_FP8_D_LOAD) && !reduce) {
                gmm_mbarrier_arrive_expect_tx(empty, GMM_SM90_BOX_BYTES);
                gmm_tma_load(slot, &args->d, empty, 0, f->t.n0 + x, y, f->d_z, f->d_w);
                if (next < cols && !(f->d_flags & GMM_FP8_D_REDUCE))
                    gmm_tma_prefetch_l2(&args->d, f->t.n0 + next, y, f->d_z, f->d_w);
            } else gmm_mbarrier_arrive(empty);
            gmm_mbarrier_wait(full, part++ & 1);
            if (by_tma) {
                gmm_tma_store(&args->d, slot, reduce,
                              passes > 1 ? gmm_fp8_glu_column(args, f->t.n0, part_col > 0) + box_cols * box
                                         : f->t.n0 + x,
                              y, f->d_z, f->d_w);
                gmm_bulk_commit_group();
            }
        } while ((part_col += box_cols * boxes) < cols);
    }
    GMM__BULK_WAIT_GROUP(0);
}

#ifndef GMM_NO_QUANT
#define GMM__BODY GMM__BODY_FP8
/* kernel, tag of the dtype of A, scaling of partial sums, tile, tiles of the kernel (0: functions of a tile without a
   kernel, which the next row calls), second tile */
#if GMM__HOLDS(2)
#define GMM__ROW (gmm_no_kernel, e4m3, 1d2d, 128x192, 0, none)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_gemm_e4m3_1d2d_192x128x128_128x192x128_sm90, e4m3, 1d2d, 192x128, 2, 128x192)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_gemm_e4m3_1d2d_192x128x128_small_m_sm90, e4m3, 1d2d, 192x128_small_m, 1, none)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_gemm_e4m3_1d2d_128x192x128_small_m_sm90, e4m3, 1d2d, 128x192_small_m, 1, none)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_gemm_e4m3_1d1d_128x128x128_sm90, e4m3, 1d1d, 128x128, 1, none)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_gemm_e4m3_fast_128x192x128_sm90, e4m3, fast, 128x192, 1, none)
#include GMM_KERNELS_FILE
#endif
#if GMM__HOLDS(3)
#define GMM__ROW (gmm_no_kernel, e5m2, 1d2d, 128x192, 0, none)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_gemm_e5m2_1d2d_192x128x128_128x192x128_sm90, e5m2, 1d2d, 192x128, 2, 128x192)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_gemm_e5m2_1d2d_192x128x128_small_m_sm90, e5m2, 1d2d, 192x128_small_m, 1, none)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_gemm_e5m2_1d2d_128x192x128_small_m_sm90, e5m2, 1d2d, 128x192_small_m, 1, none)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_gemm_e5m2_1d1d_128x128x128_sm90, e5m2, 1d1d, 128x128, 1, none)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_gemm_e5m2_fast_128x192x128_sm90, e5m2, fast, 128x192, 1, none)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_gemm_glu_e4m3_1d2d_192x128x128_sm90, e4m3, 1d2d, 192x128_glu, 1, none)
#include GMM_KERNELS_FILE
#endif
#undef GMM__BODY

typedef struct gmm_fp8_kernel {
    gmm_dtype dtype;
    int32_t scaling, consumers, tile_n, predicts_first_tile, glu;
    int32_t tile_choice;         /* gmm_sm90_tile_choice */
    int32_t threads, smem_bytes; /* of the launch */
    const void *function;
    const char *name;
} gmm_fp8_kernel;

#if GMM__HOLDS(0)
#define GMM__X(dtype, tag, scaling, tile, first, tile_choice, kernel) GMM__DECLARE_KERNEL(kernel, gmm_fp8_args)
GMM_FP8_KERNEL_LIST(GMM__X)
#undef GMM__X
static const gmm_fp8_kernel gmm_fp8_kernels[] = {
#define GMM__X(dtype, tag, scaling_, tile, first, tile_choice, kernel) \
    { dtype, GMM__FP8(scaling, scaling_), GMM__FP8(consumers, tile), GMM__FP8(tile_n, tile), \
      GMM__FP8(predicts_first_tile, tile), GMM__FP8(glu, tile), \
      gmm_sm90_tile_##tile_choice, GMM__FP8(threads, first), \
      (int32_t)sizeof(GMM__FP8_INSTANCE(smem, tag, scaling_, first)), \
      (const void *)kernel, #kernel },
    GMM_FP8_KERNEL_LIST(GMM__X)
    GMM_FP8_SPLIT_LIST(GMM__X)
#undef GMM__X
};
enum { GMM_FP8_KERNELS = (int)(sizeof gmm_fp8_kernels / sizeof gmm_fp8_kernels[0]) };

/* Map of a COLUMNWISE copy of tokens, whose lines are `along` padded rows long. */
static GMM__UNUSED int gmm_fp8_map_columnwise(PFN_cuTensorMapEncodeTiled_v12000 encode, CUtensorMap *map,
                                              const gmm_kmat *m, int64_t along, int64_t lines, int32_t box_lines) {
    cuuint64_t dims[4] = { 0, 0, 1, 1 }, strides[3] = { 0, 16, 16 };
    dims[0] = (cuuint64_t)along;
    dims[1] = (cuuint64_t)lines;
    strides[0] = (cuuint64_t)m->ld;
    return gmm_sm90_map(encode, map, m->dtype, m->data, dims, strides, box_lines, 0);
}

/* Encodes the tensor maps and launches the kernel with at most `blocks` CTAs. `args` is complete but for the
   maps; operands and their rows are 16-byte aligned. */
static GMM__UNUSED cudaError_t gmm_launch_fp8(PFN_cuTensorMapEncodeTiled_v12000 encode, int32_t kernel, int32_t blocks,
                                              gmm_fp8_args *args, cudaStream_t stream) {
    const gmm_fp8_kernel *row = &gmm_fp8_kernels[kernel];
    const gmm_gemm_args *p = &args->p;
    const int32_t columns = p->n * (1 + row->glu); /* of D, which are B's rows; p->n of a glu product are those of h */
    /* a tensor map has no empty dimension */
    const int64_t rows = args->groups.capacity > 0 ? args->groups.capacity : 1;
    const int64_t padded = gmm_padded_capacity(p->groups, rows);
    int mapped;
    if (args->wgrad)
        mapped = gmm_fp8_map_columnwise(encode, &args->a, &p->a, padded, p->m, GMM_FP8_BLOCK_ROWS) &&
                 gmm_fp8_map_columnwise(encode, &args->b, &p->b, padded, p->n, 64);
    else
        mapped = gmm_sm90_map_tokens(encode, &args->a, &p->a, p->k, GMM_FP8_BLOCK_ROWS) &&
                 gmm_sm90_map_matrix(encode, &args->b, &p->b, p->k, columns, 64, 1);
    /* D without 16-byte aligned rows has no map; the kernel checks the same condition */
    if (mapped && p->d.ld * gmm_dtype_bits(p->d.dtype) % 128 == 0) {
        if (args->wgrad) mapped = gmm_sm90_map_matrix(encode, &args->d, &p->d, p->n, p->m, GMM_FP8_BLOCK_ROWS, 0);
        else if ((uintptr_t)p->d.data % 16 == 0)
            mapped = gmm_sm90_map_tokens(encode, &args->d, &p->d, columns, GMM_FP8_BLOCK_ROWS);
    }
    if (!mapped) return cudaErrorInvalidValue;
    args->tile_choice = row->tile_choice;
    return gmm_launch_clusters(row->function, blocks, row->threads, row->smem_bytes, args, stream);
}
#endif /* GMM__HOLDS(0) */
#endif /* GMM_NO_QUANT */

/* .................................................................. Copies as operands of 16-bit products ... */

/* Dequantizes MX32 and NV16 copies into matrices of 16-bit elements, code times scale, for the 16-bit Hopper
   products. The values equal those that mma/quantized.cuh computes in shared memory. Copies whose lines run along the
   contraction, and columnwise MX32, keep their layout: rows of `dst` are rows of the copy, without gaps. Columnwise
   NV16 tokens are transposed, since the operands of wgrad are [k][lines]: rows of `dst` are tokens. The groups
   follow one another, each padded to a multiple of 16 rows. Padding rows are zero, but for Hadamard-transformed copies,
   whose transform spreads values of the group over them. */
typedef struct gmm_expand_operand {
    gmm_mat src;        /* tables in device memory; dtype GMM_NONE: absent */
    uint16_t *dst;
    gmm_direction direction;
    int32_t grouped;    /* the matrix holds tokens of all groups, else one matrix per group */
    int32_t rows, cols; /* of each quantized matrix; for tokens rows is the capacity */
} gmm_expand_operand;

typedef struct gmm_expand_args {
    gmm_expand_operand operand[2];
    gmm_dtype dtype;
    int32_t groups;
    const int64_t *offsets; /* [G + 1] */
    const int32_t *tiles;   /* [G + 1] prefix sums of tiles of GMM_GROUP_ROWS rows */
    const int32_t *blocks16; /* [G + 1] prefix sums of blocks of 16 rows; transposed copies */
    int64_t *ends;          /* [G + 1] receives 16 times blocks16: row offsets of groups in transposed copies, or is
                               NULL */
    const float *alpha;     /* [G] or [1]; NULL: 1 */
    int32_t alpha_per_group;
    float *factor;          /* [2][G] receives what each group's accumulators are multiplied by, and what the result is
                               multiplied by after that (gmm__scale_split); NULL: not written */
} gmm_expand_args;

enum {
    GMM_EXPAND_THREADS = 256,
    GMM_EXPAND_MAX_THREADS = 1024, /* threads of a CTA that has a multiprocessor to itself */
    GMM_EXPAND_LINES = 4,          /* lines that a warp dequantizes together, 256 elements of each at a time */
    GMM_EXPAND_SPAN = 1024,        /* elements of each line in a task */
    GMM_EXPAND_TRANSPOSE_THREADS = 256,
    /* strips of GMM_GROUP_ROWS rows that a CTA transposes, 64 lines at a time, so that 128 bytes are contiguous in
       loads and stores */
    GMM_EXPAND_STRIPS = 2,
    GMM_EXPAND_STRIP_LINES = 128   /* lines in a task */
};

/* Loads eight codes, the first in the lowest bits. `aligned`: by vector loads. */
GMM__DEVICE uint2 gmm_expand_load8(int fp4, const uint8_t *src, int aligned) {
    uint2 v = make_uint2(0u, 0u);
    int i;
    if (aligned) {
        if (fp4) v.x = __ldcs((const unsigned *)(const void *)src);
        else v = __ldcs((const uint2 *)(const void *)src);
        return v;
    }
#pragma unroll 1
    for (i = fp4 ? 3 : 7; i >= 0; i--) {
        v.y = __funnelshift_l(v.x, v.y, 8);
        v.x = v.x << 8 | src[i];
    }
    return v;
}

/* Converts eight codes to 16-bit elements, two per word. */
GMM__DEVICE void gmm_expand_convert8(gmm_dtype dtype, gmm_dtype format, int fp4, uint2 codes, uint32_t dst[4]) {
    if (fp4) gmm_fp4_to_16bit_x8(dtype, codes.x, dst);
    else {
        gmm_fp8_to_16bit_x4(dtype, format, codes.x, dst);
        gmm_fp8_to_16bit_x4(dtype, format, codes.y, dst + 2);
    }
}

/* Converts four scale bytes to 16-bit elements, two per word. The E8M0 bytes of MX32 are exponents of bf16. */
GMM__DEVICE void gmm_expand_scales(gmm_dtype dtype, gmm_scaling scaling, uint32_t bytes, uint32_t dst[2]) {
    const uint32_t magnitude = bytes & 0x7F7F7F7Fu;
    const uint32_t zero = ~((magnitude + 0x7F7F7F7Fu) | bytes) & 0x80808080u;
    const uint32_t nan = (magnitude + 0x01010101u) & bytes & 0x80808080u;
    int i;
    if (scaling == GMM_SCALING_NV16) {
        gmm_fp8_to_16bit_x4(dtype, GMM_E4M3, bytes, dst);
        return;
    }
    dst[0] = gmm_prmt(bytes, 0u, 0x4140u) << 7;
    dst[1] = gmm_prmt(bytes, 0u, 0x4342u) << 7;
    if (zero | nan)
#pragma unroll
        for (i = 0; i < 2; i++) /* 2^-127 is subnormal, NaN is 0x7FFF */
            dst[i] |= (gmm_prmt(zero, 0u, i ? 0xBBAAu : 0x9988u) & 0x00400040u) |
                     (gmm_prmt(nan, 0u, i ? 0xBBAAu : 0x9988u) & 0x007F007Fu);
}

/* Registers of a lane for one step: eight codes of each line, and a scale byte of each line or, for columnwise MX32,
   whose scales apply to blocks of lines, eight bytes for eight columns. */
typedef struct gmm_expand_step {
    uint2 codes[GMM_EXPAND_LINES];
    uint32_t scale[GMM_EXPAND_LINES];
} gmm_expand_step;

/* Addresses and strides of a warp's lines. */
typedef struct gmm_expand_lines_view {
    const uint8_t *data, *scale;
    int64_t pitch;
    /* bytes of scales: between lines (mn_major and swizzled: between 128 lines), and between groups of four blocks */
    int32_t line_stride, block4_stride;
    int32_t count, aligned, swizzled;
} gmm_expand_lines_view;

GMM__DEVICE void gmm_expand_load_step(const gmm_expand_lines_view *p, int mx, int fp4, int mn_major, int32_t c,
                                      gmm_expand_step *step) {
    const int32_t block = c / (mx ? 32 : 16);
    int i;
#pragma unroll
    for (i = 0; i < GMM_EXPAND_LINES; i++) {
        step->codes[i] = make_uint2(0u, 0u);
        step->scale[i] = 0u;
        if (i < p->count && p->aligned)
            step->codes[i] = gmm_expand_load8(fp4, p->data + i * p->pitch + c / (fp4 ? 2 : 1), 1);
        if (i < p->count && !mn_major)
            step->scale[i] = p->scale[i * p->line_stride + (block >> 2) * (int64_t)p->block4_stride + (block & 3)];
    }
    if (!p->aligned)
#pragma unroll
        for (i = 0; i < GMM_EXPAND_LINES; i++)
            if (i < p->count)
                step->codes[i] = gmm_expand_load8(fp4, p->data + i * p->pitch + c / (fp4 ? 2 : 1), 0);
    if (mn_major && !p->swizzled) {
        const uint2 bytes = gmm_expand_load8(0, p->scale + c, p->aligned);
        step->scale[0] = bytes.x;
        step->scale[1] = bytes.y;
    } else if (mn_major) {
        const uint8_t *src = p->scale + c / 128 * (int64_t)p->line_stride + c % 32 * 16 + c % 128 / 32 * 4;
#pragma unroll
        for (i = 0; i < 8; i++) step->scale[i / 4] |= (uint32_t)src[16 * i] << (8 * (i % 4));
    }
}

/* A conversion: dtype of the result, MX32 or NV16, FP4 or FP8 codes. mn_major: columnwise MX32, whose codes lie in rows
   of the matrix; these rows are the lines that are dequantized, and a block of 32 is spread over 32 of them. */
typedef struct gmm_expand_format {
    gmm_dtype dtype;
    int mx, fp4, mn_major;
} gmm_expand_format;

/* Dequantizes lines [line, line + GMM_EXPAND_LINES) of group or matrix g, elements [c, c + GMM_EXPAND_SPAN) of them.
   One warp. The format is a compile-time constant of each call. */
GMM__DEVICE void gmm_expand_lines(const gmm_expand_args *args, const gmm_expand_operand *s,
                                  const gmm_expand_format format, int32_t g, int32_t line, int32_t c) {
    const gmm_dtype dtype = format.dtype;
    const int mx = format.mx, fp4 = format.fp4, mn_major = format.mn_major;
    const int transposed = !mx && s->direction == GMM_COLUMNWISE; /* lines are columns of the matrix */
    const int32_t width = transposed ? s->rows : s->cols;
    const int32_t end = width - c < GMM_EXPAND_SPAN ? width : c + GMM_EXPAND_SPAN;
    int64_t row = 0, start = 0, rows = s->rows;
    gmm_expand_lines_view view;
    gmm_mat copy = s->src;
    gmm__qview v;
    uint16_t *dst;
    int i, j;
    copy.scaling = mx ? GMM_SCALING_MX32 : GMM_SCALING_NV16;
    if (s->grouped) {
        row = args->offsets[g];
        rows = args->offsets[g + 1] - row;
        start = (int64_t)args->tiles[g] * GMM_GROUP_ROWS;
    }
    view.count = (int32_t)(transposed ? s->cols : rows) - line;
    if (view.count <= 0) return;
    v = gmm__qview_of(&copy, mn_major ? GMM_COLUMNWISE : mx ? GMM_ROWWISE : s->direction, s->grouped, g, row, start,
                      rows, s->cols);
    view.pitch = v.ld / (fp4 ? 2 : 1);
    view.data = v.data + line * view.pitch;
    view.scale = v.scale + (mn_major ? gmm__qview_scale(&v, 0, line / 32) : gmm__qview_scale(&v, line, 0));
    view.swizzled = copy.scale_order == GMM_SCALES_SWIZZLED;
    view.line_stride = (int32_t)gmm__qview_scale(&v, mn_major && view.swizzled ? 128 : 1, 0);
    view.block4_stride = gmm_qgemm_scale_strides_of(&copy, 0, v.lines).block4;
    view.aligned = (((uintptr_t)view.data | (uintptr_t)view.pitch | (mn_major ? (uintptr_t)view.scale : 0)) & 7) == 0;
    dst = s->dst + ((s->grouped ? row : (int64_t)g * (transposed ? s->cols : s->rows)) + line) * width;
#pragma unroll 1
    for (c += 8 * (int32_t)(threadIdx.x & 31u); c < end; c += 256) {
        gmm_expand_step step;
        uint32_t scales[4];
        gmm_expand_load_step(&view, mx, fp4, mn_major, c, &step);
        if (mn_major) {
            gmm_expand_scales(dtype, copy.scaling, step.scale[0], scales);
            gmm_expand_scales(dtype, copy.scaling, step.scale[1], scales + 2);
        } else {
            gmm_expand_scales(dtype, copy.scaling,
                              gmm_prmt(gmm_prmt(step.scale[0], step.scale[1], 0x0040u),
                                       gmm_prmt(step.scale[2], step.scale[3], 0x0040u), 0x5410u), scales);
            scales[3] = gmm_prmt(scales[1], 0u, 0x3232u);
            scales[2] = gmm_prmt(scales[1], 0u, 0x1010u);
            scales[1] = gmm_prmt(scales[0], 0u, 0x3232u);
            scales[0] = gmm_prmt(scales[0], 0u, 0x1010u);
        }
#pragma unroll
        for (i = 0; i < GMM_EXPAND_LINES; i++) {
            uint32_t words[4];
            if (i >= view.count) break;
            gmm_expand_convert8(dtype, copy.dtype, fp4, step.codes[i], words);
#pragma unroll
            for (j = 0; j < 4; j++) words[j] = gmm_mul_16bit_x2(dtype, words[j], scales[mn_major ? j : i]);
            *(uint4 *)(void *)(dst + (int64_t)i * width + c) = make_uint4(words[0], words[1], words[2], words[3]);
        }
    }
}

/* A lane's view of 32 rows of a strip of columnwise NV16 tokens: where it loads lines, and where it stores rows. */
typedef struct gmm_expand_strip {
    const uint8_t *data, *scale; /* of line 0 */
    uint16_t *dst;
    int32_t line_stride;         /* bytes of scales between lines, or between 128 lines if they are swizzled */
    /* counted from the first row of the strip: rows that the copy has, rows that are written */
    int32_t valid_rows, rows;
} gmm_expand_strip;

typedef struct gmm_expand_strip_step {
    uint4 codes[GMM_EXPAND_STRIPS];
    uint32_t scale[GMM_EXPAND_STRIPS][2];
} gmm_expand_strip_step;

GMM__DEVICE void gmm_expand_load_strip_step(const gmm_expand_strip strips[GMM_EXPAND_STRIPS], int64_t pitch,
                                            int aligned, int swizzled, int32_t line, gmm_expand_strip_step *step) {
    const int32_t line_offset = swizzled ? line % 32 * 16 + line % 128 / 32 * 4 : 0;
    int strip;
#pragma unroll
    for (strip = 0; strip < GMM_EXPAND_STRIPS; strip++) {
        const uint8_t *const data = strips[strip].data + line * pitch;
        const uint8_t *const scale = strips[strip].scale +
                                     (int64_t)(swizzled ? line / 128 : line) * strips[strip].line_stride + line_offset;
        step->scale[strip][0] = scale[0];
        step->scale[strip][1] = scale[1];
        if (aligned) step->codes[strip] = __ldcs((const uint4 *)(const void *)data);
        else {
            const uint2 low = gmm_expand_load8(0, data, 0), high = gmm_expand_load8(0, data + 8, 0);
            step->codes[strip] = make_uint4(low.x, low.y, high.x, high.y);
        }
    }
}

/* Transposes GMM_EXPAND_STRIPS strips of GMM_GROUP_ROWS padded rows of the tokens through shared memory, for
   GMM_EXPAND_STRIP_LINES lines from `line` on. One CTA. */
GMM__DEVICE void gmm_expand_transposed(const gmm_expand_args *args, const gmm_expand_operand *s, gmm_dtype dtype,
                                       int32_t strip, int32_t line, char *shared) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    const int lane = (int)threadIdx.x & 31, warp = (int)threadIdx.x >> 5;
    const int swizzled = s->src.scale_order == GMM_SCALES_SWIZZLED;
    const int32_t lines = s->cols, first = line;
    const int32_t end = lines - line < GMM_EXPAND_STRIP_LINES ? lines : line + GMM_EXPAND_STRIP_LINES;
    /* row and chunk that this thread stores */
    const int32_t row0 = (int32_t)threadIdx.x / 8, chunk = (int32_t)threadIdx.x % 8;
    const int64_t pitch = s->src.ld / 2;
    gmm_expand_strip strips[GMM_EXPAND_STRIPS];
    gmm_expand_strip_step next;
    int32_t g = 0;
    int aligned = pitch % 16 == 0, nth, i, j;
    memset(&next, 0, sizeof next);
#pragma unroll
    for (nth = 0; nth < GMM_EXPAND_STRIPS; nth++) {
        /* where it does not, the last strip is loaded again and not stored */
        const int exists = strip + nth < args->tiles[args->groups];
        gmm_mat copy = s->src;
        gmm__qview v;
        int32_t rows, row;
        gmm_find_group32(args->tiles, args->groups, strip + (exists ? nth : 0), &g);
        rows = (int32_t)(args->offsets[g + 1] - args->offsets[g]);
        row = GMM_GROUP_ROWS * (strip + (exists ? nth : 0) - args->tiles[g]);
        copy.scaling = GMM_SCALING_NV16;
        v = gmm__qview_of(&copy, GMM_COLUMNWISE, 1, g, 0, (int64_t)args->tiles[g] * GMM_GROUP_ROWS, rows, lines);
        aligned &= ((uintptr_t)v.data & 15) == 0;
        strips[nth].data = v.data + row / 2 + 16 * (lane % 4);
        strips[nth].scale = v.scale + gmm__qview_scale(&v, 0, row / 16 + 2 * (lane % 4));
        strips[nth].line_stride = (int32_t)gmm__qview_scale(&v, swizzled ? 128 : 1, 0);
        strips[nth].rows = exists ? (rows + 15) / 16 * 16 - row : 0;
        /* a Hadamard transform spreads the last rows over 16 */
        strips[nth].valid_rows = s->src.hadamard ? strips[nth].rows : rows - row;
        strips[nth].dst = s->dst + (16 * (int64_t)args->blocks16[g] + row + row0) * lines + 8 * chunk;
    }
    /* the first iteration only loads; each of the others loads the next 64 lines before it stores its own */
#pragma unroll 1
    for (line -= 64; line < end; line += 64) {
        const gmm_expand_strip_step step = next;
        uint32_t scales[GMM_EXPAND_STRIPS];
        if (line + 64 < end) {
            const int32_t next_line = line + 64 + 8 * warp + lane / 4;
            gmm_expand_load_strip_step(strips, pitch, aligned, swizzled, next_line < lines ? next_line : lines - 1,
                                       &next);
        }
        if (line < first) continue;
        gmm_expand_scales(dtype, GMM_SCALING_NV16, step.scale[0][0] | step.scale[0][1] << 8 | step.scale[1][0] << 16 |
                          step.scale[1][1] << 24, scales);
#pragma unroll
        for (nth = 0; nth < GMM_EXPAND_STRIPS; nth++)
#pragma unroll
            for (i = 0; i < 4; i++) { /* matrix j of the stmatrix: column 2 q + b is row 32 q + 2 j + b */
                const uint32_t c = (uint32_t)lane % 8, row = 32 * (c / 2) + 2 * (4 * i + (uint32_t)lane / 8) + c % 2;
                const uint32_t scale = gmm_prmt(scales[nth], 0u, i < 2 ? 0x1010u : 0x3232u);
                const uint4 codes = step.codes[nth];
                uint32_t words[4];
                gmm_fp4_to_16bit_x8(dtype, i == 0 ? codes.x : i == 1 ? codes.y : i == 2 ? codes.z : codes.w, words);
#pragma unroll
                for (j = 0; j < 4; j++) words[j] = gmm_mul_16bit_x2(dtype, words[j], scale);
                gmm_stmatrix_x4_trans((uint32_t)__cvta_generic_to_shared(shared) + 128 * (GMM_GROUP_ROWS * nth + row) +
                                      (((uint32_t)warp ^ c) << 4), words[0], words[1], words[2], words[3]);
            }
        __syncthreads();
#pragma unroll
        for (nth = 0; nth < GMM_EXPAND_STRIPS; nth++)
#pragma unroll
            for (j = 0; j < 4; j++) {
                const int32_t row = 32 * j + row0;
                uint4 v = make_uint4(0u, 0u, 0u, 0u);
                if (row < strips[nth].valid_rows)
                    v = *(const uint4 *)(const void *)(shared + 128 * (GMM_GROUP_ROWS * nth + row) +
                                                       ((chunk ^ (2 * j + row0 % 2)) << 4));
                if (row < strips[nth].rows && line + 8 * chunk < lines)
                    *(uint4 *)(void *)(strips[nth].dst + j * 32 * (int64_t)lines + line) = v;
            }
        __syncthreads();
    }
#endif
}

/* Writes, once per launch, the alpha of each group's product and the row offsets of groups in transposed copies. */
GMM__DEVICE void gmm_expand_groups(const gmm_expand_args *args) {
    const gmm_mat *a = &args->operand[0].src, *b = &args->operand[1].src;
    /* an amax is encoded as the largest FP4 code times the largest scale */
    const float a_encoded_max = a->scaling != GMM_SCALING_NV16
                         ? 1.0f : 6.0f * (a->flags & (uint32_t)GMM_MAT_E4M3_256 ? 256.0f : 448.0f);
    const float b_encoded_max = 6.0f * (b->flags & (uint32_t)GMM_MAT_E4M3_256 ? 256.0f : 448.0f);
    const float inverse = gmm__fdiv(1.0f, gmm__fmul(a_encoded_max, b_encoded_max));
    int32_t g;
    for (g = (int32_t)threadIdx.x; args->factor && g < args->groups; g += (int32_t)blockDim.x) {
        gmm__scale product = gmm__scale_of(args->alpha ? args->alpha[args->alpha_per_group ? g : 0] : 1.0f);
        if (a->scaling == GMM_SCALING_NV16) product = gmm__scale_times(product, a->amax[g]);
        product = gmm__scale_times(gmm__scale_times(product, b->amax[g]), inverse);
        args->factor[g] = gmm__scale_split(product, &args->factor[args->groups + g]);
    }
    for (g = (int32_t)threadIdx.x; args->ends && g <= args->groups; g += (int32_t)blockDim.x)
        args->ends[g] = 16 * (int64_t)args->blocks16[g];
}

#if GMM__HOLDS(0) && !defined(GMM_NO_QUANT)
/* Dequantizes copies that keep their layout. A task is GMM_EXPAND_LINES lines of GMM_EXPAND_SPAN elements;
   grid-stride loop, one warp per task, first all tasks of operand 0, then those of operand 1. */
GMM__KERNEL __launch_bounds__(GMM_EXPAND_MAX_THREADS, 1) gmm_expand_rows(const __grid_constant__ gmm_expand_args args) {
    enum { LINE_GROUPS = GMM_GROUP_ROWS / GMM_EXPAND_LINES };
    const gmm_expand_format nv16_f16 = { GMM_F16, 0, 1, 0 }, nv16_bf16 = { GMM_BF16, 0, 1, 0 };
    const gmm_expand_format mxfp4_rows = { GMM_BF16, 1, 1, 0 }, mxfp4_columns = { GMM_BF16, 1, 1, 1 };
    const gmm_expand_format mxfp8_rows = { GMM_BF16, 1, 0, 0 }, mxfp8_columns = { GMM_BF16, 1, 0, 1 };
    int32_t task, nth;
    gmm_pdl_wait();
    if (blockIdx.x == 0) gmm_expand_groups(&args);
    task = (int32_t)((blockIdx.x * blockDim.x + threadIdx.x) / 32u);
#pragma unroll 1
    for (nth = 0; nth < 2; nth++) {
        const gmm_expand_operand *s = &args.operand[nth];
        const int mx = s->src.scaling == GMM_SCALING_MX32, columnwise = s->direction == GMM_COLUMNWISE;
        const int transposed = columnwise && !mx, fp4 = s->src.dtype == GMM_E2M1;
        const int32_t width = transposed ? s->rows : s->cols, lines = transposed ? s->cols : s->rows;
        const int32_t spans = (width + GMM_EXPAND_SPAN - 1) / GMM_EXPAND_SPAN;
        const int32_t strips = (lines + GMM_GROUP_ROWS - 1) / GMM_GROUP_ROWS; /* of a matrix */
        const int32_t tasks = LINE_GROUPS * spans * (s->grouped ? args.tiles[args.groups] : args.groups * strips);
        if (s->src.dtype == GMM_NONE) continue;
#pragma unroll 1
        for (; task < tasks; task += (int32_t)(gridDim.x * blockDim.x / 32u)) {
            const int32_t line_group = task / spans, c = (task - line_group * spans) * GMM_EXPAND_SPAN;
            int32_t strip = line_group / LINE_GROUPS, g = 0, line;
            if (s->grouped) {
                gmm_find_group32(args.tiles, args.groups, strip, &g);
                strip -= args.tiles[g];
            } else {
                g = strip / strips;
                strip -= g * strips;
            }
            line = strip * GMM_GROUP_ROWS + line_group % LINE_GROUPS * GMM_EXPAND_LINES;
            if (!mx && args.dtype == GMM_F16) gmm_expand_lines(&args, s, nv16_f16, g, line, c);
            else if (!mx) gmm_expand_lines(&args, s, nv16_bf16, g, line, c);
            else if (columnwise && fp4) gmm_expand_lines(&args, s, mxfp4_columns, g, line, c);
            else if (columnwise) gmm_expand_lines(&args, s, mxfp8_columns, g, line, c);
            else if (fp4) gmm_expand_lines(&args, s, mxfp4_rows, g, line, c);
            else gmm_expand_lines(&args, s, mxfp8_rows, g, line, c);
        }
        task -= tasks;
    }
}

/* Dequantizes and transposes columnwise NV16 tokens. A task is GMM_EXPAND_STRIPS strips by GMM_EXPAND_STRIP_LINES
   lines; grid-stride loop, one CTA per task. */
GMM__KERNEL __launch_bounds__(GMM_EXPAND_TRANSPOSE_THREADS, 4)
gmm_expand_columns(const __grid_constant__ gmm_expand_args args) {
    __shared__ __align__(128) char shared[128 * GMM_GROUP_ROWS * GMM_EXPAND_STRIPS];
    int32_t task = (int32_t)blockIdx.x, strip_groups, nth;
    gmm_pdl_wait();
    strip_groups = (args.tiles[args.groups] + GMM_EXPAND_STRIPS - 1) / GMM_EXPAND_STRIPS;
    if (blockIdx.x == 0) gmm_expand_groups(&args);
#pragma unroll 1
    for (nth = 0; nth < 2; nth++) {
        const gmm_expand_operand *s = &args.operand[nth];
        const int32_t spans = (s->cols + GMM_EXPAND_STRIP_LINES - 1) / GMM_EXPAND_STRIP_LINES;
        const int32_t tasks = strip_groups * spans;
#pragma unroll 1
        for (; task < tasks; task += (int32_t)gridDim.x) {
            const int32_t strip = task / spans * GMM_EXPAND_STRIPS, line = task % spans * GMM_EXPAND_STRIP_LINES;
            if (args.dtype == GMM_F16) gmm_expand_transposed(&args, s, GMM_F16, strip, line, shared);
            else gmm_expand_transposed(&args, s, GMM_BF16, strip, line, shared);
        }
        task -= tasks;
    }
}

/* `columns`: the operands are columnwise NV16 tokens. `limited`: the grid has one CTA per multiprocessor that may be
   used. */
static GMM__UNUSED cudaError_t gmm_launch_expand(int columns, int32_t grid, int limited, int pdl,
                                                 const gmm_expand_args *args, cudaStream_t stream) {
    const int threads = columns ? GMM_EXPAND_TRANSPOSE_THREADS : limited ? GMM_EXPAND_MAX_THREADS : GMM_EXPAND_THREADS;
    return gmm_launch_pdl(columns ? (const void *)gmm_expand_columns : (const void *)gmm_expand_rows, pdl,
                          (unsigned)grid, (unsigned)threads, 0,
                          columns ? GMM__SM_KIB(4, 32768) : GMM__SM_KIB(8, 0), args, stream);
}
#endif

/* ......................................................................................... Bias gradient ... */

/* db_g[n] = sum over the group's rows of s[r] dy[r][n]. A strip of GMM_TILE rows, counted from the start of the group,
   has one partial sum per column. Its rows are added in runs of 8, one row after another; then two neighbouring runs
   each become one of 16 rows, two of these one of 32, and so on. db adds the partial sums in the order of the strips.
   The vectorized casts compute partial sums in the same order (gmm_cast_column_sums), so that the bits of db do not
   depend on which kernel did. d_bias_scale[r] = sum over n of dy[r][n] bias_g[n]. */
enum { GMM_BGRAD_COLS = 256, GMM_BGRAD_THREADS = 256 };
typedef struct gmm_bgrad_args {
    gmm_kmat dy, db, bias;  /* db, bias: [G][n]. db needs partials, and d_bias_scale bias; each may be absent */
    const int64_t *offsets; /* [G + 1] */
    const int32_t *tiles;   /* [G + 1] prefix sums of the groups' strips */
    float *partials;        /* [strips][n] partial sums; NULL: neither written nor read */
    int32_t has_partials;   /* 1: an earlier kernel on the stream has written them */
    int32_t groups, n;
    int64_t capacity;
    const float *bias_scale; /* NULL: ones */
    const float *beta;      /* [G]; NULL = beta_all */
    const uint8_t *frozen;  /* [G]; NULL: no group is frozen */
    float beta_all;
    int32_t d_bias_scale_add; /* 1: d_bias_scale is added to instead of stored */
    int32_t zero_tail;       /* 1: entries of d_bias_scale behind the last group become 0 */
    float *d_bias_scale;     /* NULL: not written */
    gmm_row_index dy_index;
} gmm_bgrad_args;

#if GMM__HOLDS(0)
#define GMM__BODY GMM__BODY_BGRAD
/* kernel of the partial sums, kernel of the rows, dtype of dy, gathered */
#define GMM__ROW (gmm_linear_bgrad_partials_bf16, gmm_linear_bgrad_rows_bf16, GMM_BF16, 0)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_linear_bgrad_partials_gathered_bf16, gmm_linear_bgrad_rows_gathered_bf16, GMM_BF16, 1)
#include GMM_KERNELS_FILE
#ifndef GMM_NO_F16
#define GMM__ROW (gmm_linear_bgrad_partials_f16, gmm_linear_bgrad_rows_f16, GMM_F16, 0)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_linear_bgrad_partials_gathered_f16, gmm_linear_bgrad_rows_gathered_f16, GMM_F16, 1)
#include GMM_KERNELS_FILE
#endif
#define GMM__ROW (gmm_linear_bgrad_partials_f32, gmm_linear_bgrad_rows_f32, GMM_F32, 0)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_linear_bgrad_partials_gathered_f32, gmm_linear_bgrad_rows_gathered_f32, GMM_F32, 1)
#include GMM_KERNELS_FILE
#undef GMM__BODY

/* db_g[n] = beta db_g[n] + sum over the partial sums of the group's strips. One thread per element; no access to
   frozen groups, nor to groups without rows whose beta is 1. */
GMM__KERNEL __launch_bounds__(GMM_BGRAD_THREADS) gmm_linear_bgrad_sum(const __grid_constant__ gmm_bgrad_args args) {
    const int64_t count = (int64_t)args.groups * args.n;
    int64_t i;
    gmm_pdl_wait();
    for (i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += (int64_t)gridDim.x * blockDim.x) {
        const int64_t g = i / args.n, n = i % args.n;
        const float beta = args.beta ? args.beta[g] : args.beta_all;
        const int32_t first = args.tiles[g], last = args.tiles[g + 1];
        char *dst;
        float sum[4] = { 0.0f, 0.0f, 0.0f, 0.0f };
        int32_t strip;
        if ((args.frozen && args.frozen[g]) || (first == last && beta == 1.0f)) continue;
        dst = gmm_kmat_data(&args.db, g);
#pragma unroll 8
        for (strip = first; strip < last; strip++)
            sum[0] = __fadd_rn(sum[0], args.partials[(int64_t)strip * args.n + n]);
        dst += n * gmm_kmat_size(&args.db);
        if (beta != 0.0f) {
            float old[4];
            gmm_read4(args.db.dtype, dst, 1, 0, old);
            sum[0] = __fmaf_rn(beta, old[0], sum[0]);
        }
        gmm_write4(args.db.dtype, dst, 1, 0, sum);
    }
}

/* Rows: dtypes of dy, consecutive and gathered rows. */
typedef struct gmm_bgrad_kernel {
    gmm_dtype dtype;
    int gathered;
    const void *partials, *rows;
} gmm_bgrad_kernel;

static const gmm_bgrad_kernel gmm_bgrad_kernels[] = {
#define GMM__X(dtype, gathered, tag) \
    { dtype, gathered, (const void *)GMM__CAT(gmm_linear_bgrad_partials_, tag), \
      (const void *)GMM__CAT(gmm_linear_bgrad_rows_, tag) },
    GMM__X(GMM_BF16, 0, bf16)
    GMM__X(GMM_BF16, 1, gathered_bf16)
    GMM__IF_F16(GMM__X(GMM_F16, 0, f16))
    GMM__IF_F16(GMM__X(GMM_F16, 1, gathered_f16))
    GMM__X(GMM_F32, 0, f32)
    GMM__X(GMM_F32, 1, gathered_f32)
#undef GMM__X
};
#endif /* GMM__HOLDS(0) */

/* ............................................................................................... Launchers ... */

#if GMM__HOLDS(0)
/* Number of CTAs that a persistent kernel starts. `tasks` is an upper bound of its tasks; sm_limit is
   options.sm_limit, 0 without one. A limit leaves the other multiprocessors to other kernels: since CTAs go where there
   is space, only as many may start as the limit counts. */
static GMM__UNUSED int32_t gmm__grid(int32_t processors, int32_t sm_limit, int32_t ctas_per_sm, int64_t tasks) {
    const int64_t limit = sm_limit < processors ? sm_limit : processors;
    const int64_t max_ctas = sm_limit > 0 ? limit : (int64_t)processors * ctas_per_sm;
    return (int32_t)(tasks < 1 ? 1 : tasks < max_ctas ? tasks : max_ctas);
}

/* Writes `words` 64-bit words of the host to device memory, by kernel parameters (gmm_copy_values). */
static GMM__UNUSED cudaError_t gmm_launch_copy(void *dst, const void *src, int64_t words, cudaStream_t stream) {
    gmm_copy_args args;
    cudaError_t error = cudaSuccess;
    int64_t i;
    for (i = 0; i < words && error == cudaSuccess; i += GMM_COPY_VALUES) {
        args.dst = (uint64_t *)dst + i;
        args.count = (int32_t)(words - i < GMM_COPY_VALUES ? words - i : (int64_t)GMM_COPY_VALUES);
        memcpy(args.values, (const uint64_t *)src + i, (size_t)args.count * 8);
        error = gmm_launch((const void *)gmm_copy_values, dim3(1), GMM_COPY_VALUES, 0, &args, stream);
    }
    return error;
}

/* Sets `count` 32-bit words of device memory to one value (gmm_fill_words). */
static GMM__UNUSED cudaError_t gmm_launch_fill(void *words, uint32_t value, int64_t count, int32_t sm_limit, int pdl,
                                               cudaStream_t stream) {
    const gmm_fill_args args = { (uint32_t *)words, count, value };
    const int32_t ctas = gmm__grid(GMM_FILL_CTAS, sm_limit, 1, (count - 1) / GMM_FILL_THREADS + 1);
    if (count <= 0) return cudaSuccess;
    return gmm_launch_pdl((const void *)gmm_fill_words, pdl, (unsigned)ctas, GMM_FILL_THREADS, 0, 0, &args, stream);
}

/* Launches the split reader as one CTA, with a thread per group up to its limit. */
static GMM__UNUSED cudaError_t gmm_launch_offsets(const gmm_offsets_args *args, int pdl, cudaStream_t stream) {
    const int64_t warps = ((int64_t)args->groups.count + 31) / 32, max_warps = GMM_OFFSETS_THREADS / 32;
    const unsigned threads = 32 * (unsigned)(warps < 1 ? 1 : warps < max_warps ? warps : max_warps);
    return gmm_launch_pdl((const void *)gmm_split_offsets, pdl, 1, threads, 0, 0, args, stream);
}

/* Launches a row of gmm_gemm_kernels. More than 48 KiB of dynamic shared memory need the attribute. */
static GMM__UNUSED cudaError_t gmm_launch_gemm(int32_t kernel, int32_t grid, const gmm_gemm_args *args,
                                               cudaStream_t stream) {
    const gmm_gemm_kernel *row = &gmm_gemm_kernels[kernel];
    cudaError_t error = cudaSuccess;
    if (row->shared > 48 * 1024)
        error = cudaFuncSetAttribute(row->function, cudaFuncAttributeMaxDynamicSharedMemorySize, row->shared);
    if (error != cudaSuccess) return error;
    return gmm_launch(row->function, dim3((unsigned)grid), row->threads, row->shared, args, stream);
}

/* Launches the kernels of a bias gradient: partial sums unless they are there, their sum where db is wanted, and the
   gradient of bias_scale. */
enum { GMM_BGRAD_PER_SM = 8 }; /* CTAs of a multiprocessor */
static GMM__UNUSED cudaError_t gmm_launch_bgrad(gmm_dtype dtype, int32_t grid, int pdl, const gmm_bgrad_args *args,
                                                cudaStream_t stream) {
    const gmm_bgrad_kernel *row = gmm_bgrad_kernels;
    const dim3 blocks((unsigned)grid);
    cudaError_t error = cudaSuccess;
    while (row->dtype != dtype || row->gathered != (args->dy_index.at != NULL)) row++;
    if (args->partials && !args->has_partials)
        error = gmm_launch_pdl(row->partials, pdl, blocks, GMM_BGRAD_THREADS, 0, GMM__SM_KIB(GMM_BGRAD_PER_SM, 4096),
                               args, stream);
    if (error == cudaSuccess && args->db.dtype != GMM_NONE)
        error = gmm_launch_pdl((const void *)gmm_linear_bgrad_sum, pdl, blocks, GMM_BGRAD_THREADS, 0,
                               GMM__SM_KIB(GMM_BGRAD_PER_SM, 0), args, stream);
    if (error == cudaSuccess && args->d_bias_scale)
        error = gmm_launch_pdl(row->rows, pdl, blocks, GMM_BGRAD_THREADS, 0, GMM__SM_KIB(GMM_BGRAD_PER_SM, 0), args,
                               stream);
    return error;
}
#endif /* GMM__HOLDS(0) */

#define GMM__ELEM_DONE

/* Precision instances. X(tag, dtype): all operands have this dtype, rows aligned to 16 bytes and a multiple of 8
   columns. The instance `any` reads dtypes and alignment at run time and serves all other calls; it adds in the same
   order, so results are equal. */
#define GMM__ELEM_PRECISIONS(X) \
    X(bf16, GMM_BF16) \
    GMM__IF_F16(X(f16, GMM_F16)) \
    X(f32, GMM_F32) \
    X(any, GMM_NONE)

/* Units of copies. X(tag, type, bytes): rows are copied in elements of this type. */
#define GMM__ELEM_UNITS(X) \
    X(b16, uint4, 16) \
    X(b4, uint32_t, 4) \
    X(b2, uint16_t, 2) \
    X(b1, uint8_t, 1)

enum {
    GMM__ELEM_BLOCK = 128,       /* threads of a CTA */
    GMM__ELEM_WARPS = 4,         /* warps of a CTA */
    GMM__ELEM_PER_SM = 16,       /* CTAs per multiprocessor that callers let launchers start */
    GMM__ELEM_STREAM_PER_SM = 128,
        /* The same for kernels that stream rows: CTAs in the order of addresses are faster than a grid of resident
           CTAs, but CTAs without a row cost time as well. */
    GMM__ELEM_AMAX_PER_SM = 64,  /* and for those that take amaxes: a warp raises an amax once for several rows */
    GMM__ELEM_SPAN = 256,        /* columns that a warp processes at a time: 8 per lane */
    GMM__COPY_SPAN = 128,        /* units that a warp copies at a time: 4 per lane */
    GMM__SUM_BLOCK = 1024,       /* threads of a CTA that occupies a multiprocessor (accumulation on few SMs) */
    GMM__ELEM_ADDENDS = 256,     /* matrices that one launch adds up: their addresses are kernel parameters */
    GMM__MAP_CHUNK = 1024,       /* slots whose ranks one warp counts */
    GMM__ROUTE_CHUNK = 8,        /* tokens whose loss terms one warp adds up; the most that it takes together */
    GMM__ROUTE_FOLD = 64,        /* partial sums that one step adds up */
    GMM__ROUTE_PITCH = 33,       /* words between rows of 32 experts' sort keys */
    GMM__ROUTE_BLOCK = 256,      /* most threads of a CTA of gmm_route_topk: each CTA adds its counts once */
    GMM__ROUTE_PER_SM = 5,       /* and such CTAs that a multiprocessor holds */
    GMM__ELEM_SHARED = 48 * 1024 /* bytes of shared memory that a CTA has without an attribute */
};

/* ................................................................................. Arguments of the launchers ... */

/* A matrix as kernels address it. vec: base and rows are aligned to 16 bytes. data NULL: the matrix is absent. */
typedef struct gmm__view {
    void *data;
    int64_t ld; /* elements */
    gmm_dtype dtype;
    int32_t vec;
} gmm__view;

/* Layout of the gate and linear columns of a gated activation. */
enum {
    /* blocks of a multiple of 8 columns, or halves: 8 gate columns and 8 linear columns are contiguous */
    GMM__GLU_SPLIT = 0,
    GMM__GLU_PAIRS = 1,  /* gate and linear columns alternate */
    GMM__GLU_ELEMENT = 2 /* other block sizes: elements are accessed one by one */
};

typedef struct gmm__act_args {
    const int64_t *valid_rows; /* device memory: number of rows in use */
    int64_t rows;
    int32_t ffn, interleave;   /* columns are 32-bit, since 64-bit division is slow */
    int32_t tail_zero, gated, layout, wide;
    gmm_act_kind kind;
    gmm_act_coef coef;
    gmm__view x, y, dy, dx;
    const float *prob;
    float *dprob;
    uint32_t *amax;            /* [groups] raised to the amaxes, as bits, of y (forward) or dx (backward); NULL: none */
    int32_t groups;            /* with amax: valid_rows is the last of groups + 1 row offsets, which are read too */
} gmm__act_args;

typedef struct gmm__route_args {
    gmm__view logits, dlogits;
    int64_t tokens;
    int32_t experts, topk, sigmoid, normalize;
    float scale;
    float aux, z;                        /* aux: aux_coeff E / (topk T^2 B), T: tokens of a sequence; z: z_coeff over
                                            the call's tokens. With padding both are without these counts, and kernels
                                            divide by the tokens that are no padding. 0: the loss is not computed */
    const float *expert_bias, *dprobs, *dloss;
    int32_t *indices, *counts, *offsets; /* counts: forward needs it for offsets, aux_loss and total_counts */
    float *probs, *aux_loss, *z_loss;
    float *sums;                         /* forward with losses or Sinkhorn: gmm__route_sums_bytes bytes */
    float *scratch;                      /* gmm__route_scratch_bytes bytes */
    int32_t groups, group_topk, group_sum;   /* groups 1: the choice is not limited */
    int32_t sequences, sequence_first;       /* B >= 1 */
    int32_t *sequence_counts;            /* [B][E] with several sequences and aux_loss; else NULL */
    int64_t *total_counts;               /* raised by the counts */
    const uint8_t *padding;
    int32_t *valid;                      /* [B] with padding: each sequence's tokens that are no padding; else NULL */
    float *multipliers;                  /* Sinkhorn: [E] of experts, then 1 once they have converged, else 0 */
    int32_t iterations;                  /* Sinkhorn: at most; 0 = none */
    float tolerance;
    /* set by the launcher of gmm_route_topk */
    uint32_t length, chunk;              /* tokens of a sequence; tokens that a warp takes together */
    uint32_t sequence_chunks, chunks;    /* chunks of a sequence; of all: below 2^31, as T topk is */
    int32_t count_in_cta;                /* CTAs count in shared memory first */
    int32_t softmax, values;             /* exponentials are needed; experts are chosen by values other than scores */
} gmm__route_args;

/* A routing as slots and as dense matrices; see gmm_dense_route. */
typedef struct gmm__dense_args {
    int64_t tokens;
    int32_t experts, topk, to_dense;
    uint8_t *map;
    float *values, *probs;
    int32_t *indices, *counts;
} gmm__dense_args;

typedef struct gmm__bias_args {
    int64_t *total_counts; /* [layers][experts] */
    float *bias, rate;
    int32_t experts, layers;
} gmm__bias_args;

typedef struct gmm__map_args {
    const int32_t *indices;
    int64_t slots, capacity; /* T topk, R */
    int32_t experts, align;
    int32_t *row_of, *slot_of, *sizes;
    uint32_t *fault;
    int32_t *counts;         /* [E][chunks]: slots of each expert per chunk, then their prefix sums */
    int64_t *starts;         /* [E] first row of each expert */
} gmm__map_args;

typedef struct gmm__permute_args {
    gmm__view src, dst;        /* each launcher says what they are */
    int64_t tokens, capacity, hidden;
    int32_t topk, experts, tail_zero, wide;
    const int32_t *row_of, *slot_of, *sizes;
    const float *probs;        /* probabilities of slots; NULL: ones */
    const float *row_probs_in; /* read by gmm__k_gather_probs */
    uint32_t *fault;           /* NULL: faults are not reported */
    float *row_probs;          /* written by gmm__k_permute_rows and gmm__k_gather_row_probs */
    float *dprobs;             /* written by gmm__k_gather_probs and gmm__k_unpermute_dots */
} gmm__permute_args;

/* Rows of groups without padding and with each group padded to a multiple of `align` rows, cut off at `capacity`. */
typedef struct gmm__pad_args {
    gmm__view src, dst;
    int64_t rows, cols;     /* rows: capacity of dst */
    const int64_t *offsets; /* device [groups + 1]: offsets without padding */
    const int32_t *blocks;  /* device [groups + 1]: prefix sums of the groups' blocks of `align` rows */
    int64_t groups, align, capacity;
    int32_t pad, tail_zero; /* pad: dst has the padding, else src has it */
    const float *src_prob;
    float *dst_prob;
    int32_t *sizes;         /* padded sizes; NULL: not written */
    uint32_t *fault;        /* NULL: faults are not reported */
} gmm__pad_args;

/* Permutes 2 ffn rows or columns between halves and blocks. Where a table is given, data is NULL. */
typedef struct gmm__glu_args {
    gmm__view src, dst;
    void *const *src_table, *const *dst_table; /* in device memory */
    int64_t src_stride, dst_stride;            /* elements between consecutive matrices */
    int64_t count, ffn, cols, block;
    int32_t inverse;
} gmm__glu_args;

/* y = beta y + scale (start + x_0 + x_1 + ...), summed in fp32 from left to right; y is not read where beta is 0. */
typedef struct gmm__accumulate_args {
    gmm__view x, y, start; /* x: dtype and layout of every addend, without data; start: fp32 or absent */
    const char *addends[GMM__ELEM_ADDENDS];
    int32_t count;         /* number of addends, at least 1 */
    int64_t rows, cols;    /* any; the launcher splits long rows */
    float scale, beta;
} gmm__accumulate_args;

/* dst = src. F32, F16 and BF16 convert into one another; any other dtype of whole bytes is copied. */
typedef struct gmm__convert_args {
    gmm__view src, dst;
    int64_t rows, cols;
} gmm__convert_args;

/* A copy in units (GMM__ELEM_UNITS): the same kernels serve every dtype. Strides and columns count units. */
typedef struct gmm__copy_args {
    const void *src;
    void *dst;
    int64_t rows, cols, src_ld, dst_ld;
} gmm__copy_args;

/* Launch limits of a call: most CTAs of a grid, whether programmatic dependent launch is used, and how many
   multiprocessors may be used (0: all). */
typedef struct gmm__launch_limits {
    int64_t max_ctas;
    int32_t pdl, sm_limit;
} gmm__launch_limits;

/* ..................................................................................................... Elements ... */

GMM__DEVICE int32_t gmm__lane(void) { return (int32_t)(threadIdx.x & 31u); }
GMM__DEVICE int32_t gmm__warp(void) { return (int32_t)(threadIdx.x >> 5); }

/* Loads or stores one element. */
GMM__DEVICE float gmm__load_f32(const gmm__view *m, int64_t row, int64_t col) {
    const int64_t i = row * m->ld + col;
    if (m->dtype == GMM_F32) return ((const float *)m->data)[i];
    return gmm_widen(m->dtype, ((const uint16_t *)m->data)[i]);
}
GMM__DEVICE void gmm__store_f32(const gmm__view *m, int64_t row, int64_t col, float v) {
    const int64_t i = row * m->ld + col;
    if (m->dtype == GMM_F32) ((float *)m->data)[i] = v;
    else ((uint16_t *)m->data)[i] = (uint16_t)gmm_pack2(m->dtype, v, 0.0f);
}

/* The eight columns of a lane: two vectors of 4 consecutive columns, of which n[] exist (n may be below 0). In
   16-bit rows the two vectors are adjacent, so that one 16-byte access covers both. In fp32 rows each vector is
   adjacent to that of the previous lane, so that the accesses of a warp are contiguous: writes of half a sector are
   slow. */
typedef struct gmm__lane_cols { int32_t col[2], n[2]; } gmm__lane_cols;

GMM__DEVICE gmm__lane_cols gmm__lane_cols_at(int32_t first, int32_t second, int32_t cols) {
    gmm__lane_cols lane_cols;
    lane_cols.col[0] = first;
    lane_cols.col[1] = second;
    lane_cols.n[0] = min(cols - first, 4);
    lane_cols.n[1] = min(cols - second, 4);
    return lane_cols;
}
/* The columns of this lane in part `part` of a row of `cols` columns. `wide`: the layout of fp32 rows. */
GMM__DEVICE gmm__lane_cols gmm__lane_cols_of(int wide, int32_t part, int32_t cols) {
    const int32_t first = part * GMM__ELEM_SPAN + gmm__lane() * (wide ? 4 : 8);
    return gmm__lane_cols_at(first, first + (wide ? 128 : 4), cols);
}

/* Eight elements in their memory format; 16-bit elements fill the first four words. Loading and decoding are
   separate functions so that a kernel can have several loads in flight. Columns beyond the row read as 0 and are not
   written. `static_dtype` is the dtype of the kernel instance, GMM_NONE if it is read at run time. */
typedef struct gmm__raw8 { uint32_t w[8]; } gmm__raw8;

/* Access width of a lane's two vectors: 2 one access for both, 1 one access each (the second may be absent), 0
   element by element. */
GMM__DEVICE int gmm__vector_access(gmm_dtype static_dtype, const gmm__view *m, const gmm__lane_cols *cols) {
    if (static_dtype != GMM_NONE) return static_dtype == GMM_F32 ? 1 : 2;
    if (!m->vec || cols->n[0] < 4 || (cols->n[1] < 4 && cols->n[1] > 0) || ((cols->col[0] | cols->col[1]) & 3))
        return 0;
    return m->dtype != GMM_F32 && cols->n[1] == 4 && cols->col[1] - cols->col[0] == 4 && (cols->col[0] & 4) == 0 ? 2
                                                                                                               : 1;
}

GMM__DEVICE gmm__raw8 gmm__load8(gmm_dtype static_dtype, const gmm__view *m, int64_t row, const gmm__lane_cols *cols) {
    const gmm_dtype dtype = static_dtype != GMM_NONE ? static_dtype : m->dtype;
    const int access = gmm__vector_access(static_dtype, m, cols);
    gmm__raw8 r = GMM_ZERO;
    int32_t i, j;
    if (dtype == GMM_F32) {
        const uint32_t *p = (const uint32_t *)m->data + row * m->ld;
#pragma unroll
        for (j = 0; j < 2; j++)
            if (access && cols->n[j] > 0) {
                const uint4 v = *(const uint4 *)(p + cols->col[j]);
                r.w[4 * j] = v.x; r.w[4 * j + 1] = v.y; r.w[4 * j + 2] = v.z; r.w[4 * j + 3] = v.w;
            } else {
#pragma unroll
                for (i = 0; i < 4; i++) r.w[4 * j + i] = i < cols->n[j] ? p[cols->col[j] + i] : 0u;
            }
    } else {
        const uint16_t *p = (const uint16_t *)m->data + row * m->ld;
        if (access == 2) {
            const uint4 v = *(const uint4 *)(p + cols->col[0]);
            r.w[0] = v.x; r.w[1] = v.y; r.w[2] = v.z; r.w[3] = v.w;
            return r;
        }
#pragma unroll
        for (j = 0; j < 2; j++)
            if (access && cols->n[j] > 0) {
                const uint2 v = *(const uint2 *)(p + cols->col[j]);
                r.w[2 * j] = v.x; r.w[2 * j + 1] = v.y;
            } else {
#pragma unroll
                for (i = 0; i < 4; i++)
                    if (i < cols->n[j]) r.w[2 * j + i / 2] |= (uint32_t)p[cols->col[j] + i] << (i & 1) * 16;
            }
    }
    return r;
}

GMM__DEVICE void gmm__decode8(gmm_dtype static_dtype, const gmm__view *m, const gmm__raw8 *r, float v[8]) {
    const gmm_dtype dtype = static_dtype != GMM_NONE ? static_dtype : m->dtype;
    int32_t i;
    if (dtype == GMM_F32) {
#pragma unroll
        for (i = 0; i < 8; i++) v[i] = gmm_f32_from_bits(r->w[i]);
    } else if (dtype == GMM_F16) {
#pragma unroll
        for (i = 0; i < 8; i++) v[i] = gmm_widen(GMM_F16, (uint16_t)(r->w[i / 2] >> (i & 1) * 16));
    } else {
#pragma unroll
        for (i = 0; i < 8; i++) v[i] = gmm_f32_from_bits(i & 1 ? r->w[i / 2] & 0xFFFF0000u : r->w[i / 2] << 16);
    }
}

GMM__DEVICE void gmm__store8(gmm_dtype static_dtype, const gmm__view *m, int64_t row, const gmm__lane_cols *cols,
                             const float v[8]) {
    const gmm_dtype dtype = static_dtype != GMM_NONE ? static_dtype : m->dtype;
    const int access = gmm__vector_access(static_dtype, m, cols);
    int32_t i, j;
    if (dtype == GMM_F32) {
        float *p = (float *)m->data + row * m->ld;
#pragma unroll
        for (j = 0; j < 2; j++)
            if (access && cols->n[j] > 0) {
                *(float4 *)(p + cols->col[j]) = make_float4(v[4 * j], v[4 * j + 1], v[4 * j + 2], v[4 * j + 3]);
            } else {
#pragma unroll
                for (i = 0; i < 4; i++)
                    if (i < cols->n[j]) p[cols->col[j] + i] = v[4 * j + i];
            }
    } else {
        uint16_t *p = (uint16_t *)m->data + row * m->ld;
        uint32_t w[4];
#pragma unroll
        for (i = 0; i < 4; i++) w[i] = gmm_pack2(dtype, v[2 * i], v[2 * i + 1]);
        if (access == 2) {
            *(uint4 *)(p + cols->col[0]) = make_uint4(w[0], w[1], w[2], w[3]);
            return;
        }
#pragma unroll
        for (j = 0; j < 2; j++)
            if (access && cols->n[j] > 0) *(uint2 *)(p + cols->col[j]) = make_uint2(w[2 * j], w[2 * j + 1]);
            else {
#pragma unroll
                for (i = 0; i < 4; i++)
                    if (i < cols->n[j]) p[cols->col[j] + i] = (uint16_t)(w[2 * j + i / 2] >> (i & 1) * 16);
            }
    }
}

/* ........................................................................................................ Warps ... */

/* Reductions over a warp; every lane receives the result. A butterfly, so the order of additions is fixed. */
GMM__DEVICE float gmm__warp_sum(float v) {
    int32_t d;
#pragma unroll
    for (d = 16; d > 0; d >>= 1) v += __shfl_xor_sync(0xFFFFFFFFu, v, d);
    return v;
}
/* The sum of the four sums of gmm__quarter_warp_sum. */
GMM__DEVICE float gmm__sum_of_quarters(float v) {
    v = __fadd_rn(v, __shfl_xor_sync(0xFFFFFFFFu, v, 8));
    return __fadd_rn(v, __shfl_xor_sync(0xFFFFFFFFu, v, 16));
}
GMM__DEVICE float gmm__warp_max(float v) { /* NaN is ignored */
    int32_t d;
#pragma unroll
    for (d = 16; d > 0; d >>= 1) v = fmaxf(v, __shfl_xor_sync(0xFFFFFFFFu, v, d));
    return v;
}
GMM__DEVICE int64_t gmm__warp_scan(int64_t v) { /* inclusive */
    int32_t d;
#pragma unroll
    for (d = 1; d < 32; d <<= 1) {
        const int64_t other = __shfl_up_sync(0xFFFFFFFFu, v, (unsigned)d);
        if (gmm__lane() >= d) v += other;
    }
    return v;
}

/* Grid-stride loop over the tasks of a kernel: parts of rows, in order, assigned round robin to all warps of the
   grid. Launchers ensure that rows, parts and the tasks of one round fit 31 bits. */
typedef struct gmm__grid_loop { uint32_t row, part, parts, step; } gmm__grid_loop;

GMM__DEVICE void gmm__grid_loop_advance(gmm__grid_loop *w, uint32_t tasks) {
    const uint32_t part = w->part + tasks, rows = part / w->parts;
    w->row += rows;
    w->part = part - rows * w->parts;
}
/* A warp takes `tasks_per_warp` consecutive tasks in every round. */
GMM__DEVICE gmm__grid_loop gmm__grid_loop_begin(int64_t parts, uint32_t tasks_per_warp) {
    gmm__grid_loop w;
    w.row = w.part = 0;
    w.parts = (uint32_t)parts;
    w.step = gridDim.x * GMM__ELEM_WARPS * tasks_per_warp;
    gmm__grid_loop_advance(&w, (blockIdx.x * GMM__ELEM_WARPS + (uint32_t)gmm__warp()) * tasks_per_warp);
    return w;
}
GMM__DEVICE void gmm__grid_loop_next(gmm__grid_loop *w) { gmm__grid_loop_advance(w, w->step); }
/* The next task in order. */
GMM__DEVICE gmm__grid_loop gmm__grid_loop_successor(gmm__grid_loop w) {
    if (++w.part < w.parts) return w;
    w.part = 0;
    w.row++;
    return w;
}

GMM__DEVICE void gmm__fault(uint32_t *word, uint32_t bits) {
    if (word && bits) atomicOr(word, bits);
}

/* Number of used rows by the rule of gmm_split_end on expert sizes. The whole warp calls it. */
GMM__DEVICE int64_t gmm__valid_rows(const int32_t *sizes, int32_t experts, int64_t capacity, uint32_t *fault) {
    const int reports = blockIdx.x == 0 && gmm__warp() == 0; /* one warp reports faults */
    int64_t sum = 0;
    int32_t e;
    for (e = gmm__lane(); e < experts; e += 32) {
        if (sizes[e] > 0) sum += sizes[e];
        else if (reports && sizes[e] < 0) gmm__fault(fault, (uint32_t)GMM_FAULT_NEGATIVE);
    }
    sum = __shfl_sync(0xFFFFFFFFu, gmm__warp_scan(sum), 31);
    if (sum <= capacity) return sum;
    if (reports && gmm__lane() == 0) gmm__fault(fault, (uint32_t)GMM_FAULT_CAPACITY);
    return capacity;
}

/* Entry i of a map, or -1 where it is outside of [-1, limit). */
GMM__DEVICE int32_t gmm__map_entry(const int32_t *map, int64_t i, int64_t limit, uint32_t *fault) {
    const int32_t v = map[i];
    if (v >= 0 && v < limit) return v;
    if (v != -1) gmm__fault(fault, (uint32_t)GMM_FAULT_INDEX);
    return -1;
}

/* Row of slot i of a token, -1 beyond the last slot, and its probability. */
GMM__DEVICE int32_t gmm__slot_row(const gmm__permute_args *a, int64_t token, int32_t i, float *prob) {
    const int64_t slot = token * a->topk + i;
    *prob = 1.0f;
    if (i >= a->topk) return -1;
    if (a->probs) *prob = a->probs[slot];
    return gmm__map_entry(a->row_of, slot, a->capacity, a->fault);
}

/* First row of group g, with or without padding. */
GMM__DEVICE int64_t gmm__pad_start(const gmm__pad_args *a, int64_t g, int32_t padded) {
    return padded ? min(a->blocks[g] * a->align, a->capacity) : a->offsets[g];
}

/* The group that contains a row of dst: the last group that starts at or before the row. A 32-way search by the
   whole warp. */
GMM__DEVICE int64_t gmm__pad_group(const gmm__pad_args *a, int64_t row) {
    int64_t first = 0, n = a->groups;
    while (n > 1) {
        const int64_t step = (n + 31) / 32, i = gmm__lane() * step;
        const uint32_t starts = __ballot_sync(0xFFFFFFFFu, i < n && gmm__pad_start(a, first + i, a->pad) <= row);
        const int64_t skip = (int64_t)(__popc(starts) - 1) * step;
        first += skip;
        n = n - skip < step ? n - skip : step;
    }
    return first;
}

/* ................................................................................................... Activation ... */

/* Column of the gate that output column j reads (gmm_glu_gate_column in 32 bits), and the distance from the gate
   column to the linear column. */
GMM__DEVICE int32_t gmm__act_gate_column(int32_t j, int32_t interleave) {
    const uint32_t block = interleave ? (uint32_t)j / (uint32_t)interleave : 0u;
    return j + (int32_t)block * interleave;
}
GMM__DEVICE int32_t gmm__act_linear_offset(const gmm__act_args *a) { return a->interleave ? a->interleave : a->ffn; }

/* Source row or column of row or column i of the destination: from halves to blocks or, `inverse`, from blocks to
   halves. All arguments count the same unit. */
GMM__DEVICE uint32_t gmm__glu_source(uint32_t i, uint32_t ffn, uint32_t block, int32_t inverse) {
    const uint32_t half = i >= ffn, block_index = i / block;
    if (inverse) return (uint32_t)gmm__act_gate_column((int32_t)(i - half * ffn), (int32_t)block) + half * block;
    return (block_index & 1u) * ffn + (block_index >> 1) * block + (i - block_index * block);
}

/* Warps that share a row when dprob is computed: all warps of a CTA for long rows, else one. */
static __host__ __device__ __forceinline__ GMM__UNUSED int32_t gmm__act_warps_per_row(int32_t ffn) {
    return ffn > (GMM__ELEM_WARPS - 1) * GMM__ELEM_SPAN ? GMM__ELEM_WARPS : 1;
}

/* Loads element i of a lane's eight elements from one column. */
GMM__DEVICE void gmm__load_element(const gmm__view *m, int64_t row, int64_t col, int32_t i, gmm__raw8 *r) {
    if (m->dtype == GMM_F32) r->w[i] = ((const uint32_t *)m->data)[row * m->ld + col];
    else r->w[i / 2] |= (uint32_t)((const uint16_t *)m->data)[row * m->ld + col] << (i & 1) * 16;
}

/* Deinterleaves pairs: `first` and `second` hold a0 b0 a1 b1 ...; afterwards `first` holds all a and `second` all b. */
GMM__DEVICE void gmm__deinterleave(gmm_dtype dtype, gmm__raw8 *first, gmm__raw8 *second) {
    const gmm__raw8 u = *first, v = *second;
    int32_t i;
#pragma unroll
    for (i = 0; i < 4; i++) {
        if (dtype == GMM_F32) {
            first->w[i] = u.w[2 * i];
            first->w[4 + i] = v.w[2 * i];
            second->w[i] = u.w[2 * i + 1];
            second->w[4 + i] = v.w[2 * i + 1];
        } else {
            const uint32_t low = i < 2 ? u.w[2 * i] : v.w[2 * i - 4], high = i < 2 ? u.w[2 * i + 1] : v.w[2 * i - 3];
            first->w[i] = __byte_perm(low, high, 0x5410);
            second->w[i] = __byte_perm(low, high, 0x7632);
        }
    }
}

/* Raw inputs of eight activations. */
typedef struct gmm__act_operands {
    /* GMM__GLU_PAIRS: a and b hold the interleaved pairs of the first and of the second four outputs */
    gmm__raw8 a, b, dy;
} gmm__act_operands;

/* Raises `maximum`, the bits of an absolute value, to those of a lane's elements. NaN does not count. */
GMM__DEVICE uint32_t gmm__act_max8(uint32_t maximum, const gmm__lane_cols *cols, const float v[8]) {
    int32_t i;
#pragma unroll
    for (i = 0; i < 8; i++)
        if (i % 4 < cols->n[i / 4]) maximum = gmm_max_abs_f32(maximum, gmm_f32_bits(v[i]));
    return maximum;
}
/* The maximum of the rows that a warp has computed of one group, by lane. The amax in device memory is raised once per
   group and warp, since all warps access the memory that holds it. */
typedef struct gmm__group_amax {
    int32_t group;
    uint32_t maximum; /* bits of an absolute value */
} gmm__group_amax;

/* Raises the group's amax. `dtype`: to which elements are rounded where they are stored. The amax is loaded first,
   since most values do not raise it. All lanes call it. */
GMM__DEVICE void gmm__group_amax_store(const gmm__act_args *a, gmm_dtype dtype, const gmm__group_amax *s) {
    uint32_t *dst = a->amax + s->group, maximum = __reduce_max_sync(0xFFFFFFFFu, s->maximum);
    if (dtype != GMM_F32)
        maximum = gmm_f32_bits(gmm_widen(dtype, (uint16_t)gmm_pack2(dtype, gmm_f32_from_bits(maximum), 0.0f)));
    if (gmm__lane() == 0 && maximum && maximum > *(volatile uint32_t *)dst) atomicMax(dst, maximum);
}
/* Takes the maximum of elements of a row, which is not before the last one. All lanes call it. */
GMM__DEVICE void gmm__group_amax_add(const gmm__act_args *a, gmm_dtype dtype, gmm__group_amax *s, uint32_t row,
                                     uint32_t maximum) {
    const int64_t *offsets = a->valid_rows - a->groups;
    if (row >= offsets[s->group + 1]) {
        gmm__group_amax_store(a, dtype, s);
        gmm_find_group64(offsets, a->groups, row, &s->group);
        s->maximum = 0;
    }
    s->maximum = max(s->maximum, maximum);
}
/* .................................................................................................... Instances ... */

#define GMM__X(tag, dtype) enum { gmm__static_dtype_##tag = dtype };
GMM__ELEM_PRECISIONS(GMM__X)
#undef GMM__X
#define GMM__X(tag, type, bytes) typedef type gmm__unit_##tag;
GMM__ELEM_UNITS(GMM__X)
#undef GMM__X

#if GMM__HOLDS(0)
#define GMM__BODY GMM__BODY_PRECISION
/* precision */
#define GMM__ROW (bf16)
#include GMM_KERNELS_FILE
#ifndef GMM_NO_F16
#define GMM__ROW (f16)
#include GMM_KERNELS_FILE
#endif
#define GMM__ROW (f32)
#include GMM_KERNELS_FILE
#define GMM__ROW (any)
#include GMM_KERNELS_FILE
#undef GMM__BODY
#define GMM__BODY GMM__BODY_UNIT
/* unit */
#define GMM__ROW (b16)
#include GMM_KERNELS_FILE
#define GMM__ROW (b4)
#include GMM_KERNELS_FILE
#define GMM__ROW (b2)
#include GMM_KERNELS_FILE
#define GMM__ROW (b1)
#include GMM_KERNELS_FILE
#undef GMM__BODY
#endif /* GMM__HOLDS(0) */

/* ................................................................................ dprob from its parts ... */

/* The gradient of the probabilities where a cast of dz or FC2's dgrad computes the activation's gradient. They write
   the parts of each row, sums over GMM_ACT_DOT_COLS columns. */
typedef struct gmm__dprob_args {
    const float *dots;         /* [parts][rows] */
    const int64_t *valid_rows; /* device memory */
    int64_t rows;
    int32_t ffn, tail_zero;
    float *dprob;              /* [rows]; with tail_zero zeros behind the valid ones */
} gmm__dprob_args;

#if GMM__HOLDS(0)
/* dprob of a row, added up in the order of gmm_act_bwd. */
GMM__DEVICE float gmm__dprob_of(const gmm__dprob_args *a, int64_t row) {
    const int32_t parts = (a->ffn + GMM_ACT_DOT_COLS - 1) / GMM_ACT_DOT_COLS;
    const int32_t warps = gmm__act_warps_per_row(a->ffn), per_span = GMM__ELEM_SPAN / GMM_ACT_DOT_COLS;
    float dprob = 0.0f;
    int32_t warp, part, q;
    for (warp = 0; warp < warps; warp++) {
        float sum[4] = { 0.0f, 0.0f, 0.0f, 0.0f };
        for (part = warp * per_span; part < parts; part += warps * per_span)
#pragma unroll
            for (q = 0; q < per_span; q++)
                if (part + q < parts) sum[q] = __fadd_rn(sum[q], a->dots[(part + q) * a->rows + row]);
        dprob = __fadd_rn(dprob, __fadd_rn(__fadd_rn(sum[0], sum[1]), __fadd_rn(sum[2], sum[3])));
    }
    return dprob;
}
/* One thread per row. */
GMM__KERNEL __launch_bounds__(GMM__ELEM_BLOCK) gmm_act_dprob(const __grid_constant__ gmm__dprob_args a) {
    int64_t row = (int64_t)blockIdx.x * GMM__ELEM_BLOCK + threadIdx.x;
    gmm_pdl_wait_only();
    for (; row < a.rows; row += (int64_t)gridDim.x * GMM__ELEM_BLOCK)
        if (row < *a.valid_rows) a.dprob[row] = gmm__dprob_of(&a, row);
        else if (a.tail_zero) a.dprob[row] = 0.0f;
}
#endif /* GMM__HOLDS(0) */
/* ................................................................................................. Quantization ... */

/* General casts. A tile is GMM_TILE rows of one group or matrix by GMM_TILE columns; a CTA processes one tile after
   another. A copy is a set of lines along its direction (gmm_quant.h, section 6): a warp processes one line at a
   time, a lane four consecutive elements of it. */
enum {
    GMM__QUANT_THREADS = 256,
    GMM__QUANT_WARPS = GMM__QUANT_THREADS / 32,
    GMM__QUANT_CODES_PITCH = GMM_TILE + 4, /* bytes between rows of codes that are transposed in shared memory */
    GMM__QUANT_TILE_BYTES = GMM_TILE * GMM_TILE * 4,
    GMM__QUANT_SHARED_BYTES = GMM__QUANT_TILE_BYTES + GMM_TILE * GMM__QUANT_CODES_PITCH,
    GMM__QUANT_SQUARES = GMM_TILE_BLOCKS * GMM_TILE_BLOCKS,
    GMM__QUANT_PER_SM = 3,
    /* CTAs per multiprocessor of casts that may be skipped. Each CTA reads the word by which it skips: with 128 per
       multiprocessor a skipped cast takes 9 to 19 us, with 32 4 us. Below 32 a cast that is not skipped takes longer:
       with 24 1%, with 16 or 8 10%. */
    GMM__QUANT_SKIPPABLE_PER_SM = 32,
    GMM__TRANSPOSE_PER_SM = 4
};

/* What the source of a cast is; a constant of each kernel. */
typedef enum gmm__cast_source {
    GMM__CAST_OF_MATRIX,
    GMM__CAST_OF_ACT,      /* the result of an activation, whose inputs gmm__quant_args.src has */
    GMM__CAST_OF_GRADIENT  /* the gradient of these inputs, which has their layout */
} gmm__cast_source;
/* The activation of these casts. Rows and columns are those of its result. */
typedef struct gmm__act_source {
    gmm__cast_source source;
    gmm_act_kind kind;
    gmm_act_coef coef;
    int32_t ffn, gated, interleave, layout; /* as in gmm__act_args. Layouts: GMM__GLU_SPLIT; GMM__CAST_OF_ACT also has
                          GMM__GLU_PAIRS */
    int32_t linear;    /* columns from gate to linear ones or, of GMM__GLU_PAIRS, to a lane's next eight elements */
    const float *prob; /* [rows]; NULL: ones */
    const uint16_t *dy; /* GMM__CAST_OF_GRADIENT, else NULL: the gradient of the result, [rows][ffn], dy_ld elements
                          from row to row */
    int64_t dy_ld;
    float *dots;       /* [parts of GMM_ACT_DOT_COLS columns][rows]: dy times the result, summed over a part's columns,
                          of which dprob is the sum; NULL: not wanted */
} gmm__act_source;

/* Which kernels may serve a cast: those of the value and of the values before it. */
typedef enum gmm__vectorized {
    GMM__VECTORIZED_NO,      /* those of any shape and alignment: GMM__BODY_QUANTIZE_AMAX, GMM__BODY_QUANTIZE */
    GMM__VECTORIZED,         /* GMM__BODY_AMAX, _SCALED, _NV, _MX: all rows are multiples of aligned vectors */
    GMM__VECTORIZED_HADAMARD /* of these the instances with GMM__HADAMARD, for a BF16 source of which a copy is
                                transformed or rounded stochastically */
} gmm__vectorized;

typedef struct gmm__quant_args {
    gmm_mat src, rowwise, columnwise; /* tables in device memory; dtype GMM_NONE: absent */
    gmm_format format;
    gmm_dtype source;                 /* dtype of the source for the limits of block scales */
    int32_t grouped, phase, first_group;
    int64_t units, rows, cols;        /* rows: capacity, or rows of each matrix */
    int64_t col_tiles;
    const int64_t *offsets;           /* grouped: [units + 1] row offsets */
    const int32_t *tiles;             /* grouped: [units + 1] prefix sums of strips */
    gmm_groups groups;                /* read by the kernels themselves where warp_split is set */
    int32_t warp_split;               /* vectorized, at most 32 groups: offsets and tiles are not set */
    float *amax[2];                   /* [units]: amaxes of the rowwise and of the columnwise copy */
    float *row_amax;                  /* [rows of all units]; NULL: not needed */
    float *col_amax;                  /* [units][cols]; NULL: not needed */
    const float *scale;               /* [units], delayed scaling: encode scales; NULL: ones */
    const int32_t *skip;              /* not 0: nothing is written; NULL: 0 */
    const uint64_t *random;           /* [2] seed and offset of gmm_draw_block */
    gmm__vectorized vectorized;
    int32_t record;                   /* vectorized, delayed scaling: the casts raise the amaxes of the copies */
    /* vectorized: tiles are processed from the last to the first, since the L2 still holds the last ones */
    int32_t backward;
    /* vectorized: bytes between matrices of rowwise, columnwise and src, and between the scales of the first two */
    int64_t step[3], scale_step[2];
    gmm__act_source act;
    gmm_row_index index;              /* of gathered rows of the source */
    float *sums;                      /* vectorized, grouped: gmm_bgrad_args.partials of the source; NULL: not wanted */
    const float *sum_scale;           /* [rows]: factors of the rows in these sums; NULL: ones */
} gmm__quant_args;

/* Every kernel of a cast calls it before it accesses device memory. Waits for the predecessor, and returns whether the
   call is skipped. */
GMM__DEVICE int gmm__quant_wait_skips(const int32_t *skip) {
    gmm_pdl_wait_only();
    return skip && *skip;
}

typedef struct gmm__dequant_args {
    gmm_mat src, dst;
    gmm_direction direction;
    int32_t grouped;
    int64_t units, rows, cols, col_tiles;
    const int64_t *offsets;
    const int32_t *tiles;
} gmm__dequant_args;

typedef struct gmm__transpose_args {
    gmm_mat src, dst; /* tables in device memory */
    int64_t units, rows, cols;
} gmm__transpose_args;

/* Rows [*valid_rows, rows) of `bytes` bytes each, `pitch` bytes apart, become zeros. */
typedef struct gmm__quant_tail_args {
    uint8_t *data;
    int64_t pitch, bytes, rows;
    const int64_t *valid_rows;
    const int32_t *skip; /* not 0: nothing is written; NULL: 0 */
} gmm__quant_tail_args;

/* A strip of GMM_TILE rows of a unit, that is of a group or matrix. */
typedef struct gmm__quant_strip {
    int64_t unit;
    int64_t row, m;     /* first row of the strip in the unit; rows of the strip */
    int64_t rows;       /* of the unit */
    int64_t source_row; /* first row of the unit in the source */
    int64_t padded_row; /* first row of the unit where groups are padded to multiples of GMM_GROUP_ROWS */
} gmm__quant_strip;

/* The number of strips of all units, and the strip of a number. */
GMM__DEVICE int64_t gmm__quant_strips(int32_t grouped, const int32_t *tiles, int64_t units, int64_t rows) {
    return grouped ? (int64_t)tiles[units] : units * ((rows + GMM_TILE - 1) / GMM_TILE);
}
GMM__DEVICE gmm__quant_strip gmm__quant_strip_of(int32_t grouped, const int32_t *tiles, const int64_t *offsets,
                                                 int64_t units, int64_t rows, int64_t strip) {
    gmm__quant_strip p;
    if (grouped) {
        int32_t g = 0;
        gmm_find_group32(tiles, (int32_t)units, strip, &g);
        p.unit = g;
        p.source_row = offsets[g];
        p.rows = offsets[g + 1] - p.source_row;
        p.padded_row = (int64_t)tiles[g] * GMM_TILE;
        p.row = strip * GMM_TILE - p.padded_row;
    } else {
        const uint32_t strips_per_unit = (uint32_t)((rows + GMM_TILE - 1) / GMM_TILE), index = (uint32_t)strip;
        p.unit = index / strips_per_unit;
        p.row = (int64_t)(index % strips_per_unit) * GMM_TILE;
        p.source_row = p.padded_row = 0;
        p.rows = rows;
    }
    p.m = p.rows - p.row < GMM_TILE ? p.rows - p.row : (int64_t)GMM_TILE;
    return p;
}
/* View of a strip's unit in a copy. */
GMM__DEVICE gmm__qview gmm__quant_copy(const gmm_mat *m, gmm_direction direction, int32_t grouped,
                                       const gmm__quant_strip *p, int64_t cols) {
    return gmm__qview_of(m, direction, grouped, p->unit, p->source_row, p->padded_row, p->rows, cols);
}

/* Rows or columns of the tile that begins at `first` of `count`. */
GMM__DEVICE int32_t gmm__quant_extent(int64_t count, int64_t first) {
    return (int32_t)(count - first < GMM_TILE ? count - first : (int64_t)GMM_TILE);
}
/* The one rule of fp32 scales: that of an amax for a dtype whose largest value is qmax. `blocks`: 1X128 and 128X128,
   which the largest value of the source limits. */
GMM__DEVICE float gmm__quant_scale(const gmm__quant_args *a, float qmax, int32_t blocks, float amax) {
    return gmm_scale_from_amax(amax, qmax, gmm_dtype_largest(blocks ? a->source : GMM_F32), a->format.eps,
                               a->format.pow2);
}

/* Index of element (r, c) of a tile in shared memory. Columns are permuted so that accesses of four elements per
   lane, along rows and along columns, are free of bank conflicts: the lanes of a row start with different elements
   of their four. */
GMM__DEVICE int32_t gmm__quant_smem_index(int32_t r, int32_t c) { return r * GMM_TILE + (c ^ ((r >> 2) & 31)); }
/* Rotates four values to the left by `count`. */
GMM__DEVICE void gmm__quant_rotate4(float v[4], int32_t count) {
    const float a = v[0];
    if (count & 1) { v[0] = v[1]; v[1] = v[2]; v[2] = v[3]; v[3] = a; }
    if (count & 2) {
        const float b = v[0], c = v[1];
        v[0] = v[2]; v[1] = v[3]; v[2] = b; v[3] = c;
    }
}
GMM__DEVICE void gmm__quant_store_row(float *x, int32_t r, const float src[4]) {
    const int32_t lane = gmm__lane(), rotation = lane >> 3;
    float v[4] = { src[0], src[1], src[2], src[3] };
    int32_t j;
    gmm__quant_rotate4(v, rotation);
#pragma unroll
    for (j = 0; j < 4; j++) x[gmm__quant_smem_index(r, 4 * lane + ((j + rotation) & 3))] = v[j];
}
GMM__DEVICE void gmm__quant_load_row(const float *x, int32_t r, float v[4]) {
    const int32_t lane = gmm__lane(), rotation = lane >> 3;
    int32_t j;
#pragma unroll
    for (j = 0; j < 4; j++) v[j] = x[gmm__quant_smem_index(r, 4 * lane + ((j + rotation) & 3))];
    gmm__quant_rotate4(v, (4 - rotation) & 3);
}
/* Stages of strides 1 to `last` of Hadamard transforms of 2 last values each. */
GMM__DEVICE void gmm_hadamard_stages(float *v, int32_t count, int32_t last) {
    int32_t i, stride;
#pragma unroll
    for (stride = 1; stride <= last; stride *= 2)
#pragma unroll
        for (i = 0; i < count; i++)
            if (!(i & stride)) {
                const float a = v[i], b = v[i + stride];
                v[i] = gmm__fadd(a, b);
                v[i + stride] = gmm__fadd(a, gmm_f32_from_bits(gmm_f32_bits(b) ^ 0x80000000u));
            }
}
/* Loads four rows of column c, Hadamard-transformed in blocks of 16 if `hadamard`: 0, or gmm_format.hadamard, whose
   lower 16 bits are the signs by row of a block. */
GMM__DEVICE void gmm__quant_load_col(const float *x, int32_t c, int32_t hadamard, float v[4]) {
    const int32_t lane = gmm__lane(), quarter = lane & 3;
    int32_t j, stride;
#pragma unroll
    for (j = 0; j < 4; j++) v[j] = x[gmm__quant_smem_index(4 * lane + j, c)];
    if (!hadamard) return;
#pragma unroll
    for (j = 0; j < 4; j++)
        v[j] = gmm_f32_from_bits(gmm_f32_bits(v[j]) ^ (((uint32_t)hadamard >> (4 * quarter + j)) & 1u) << 31);
    gmm_hadamard_stages(v, 4, 2);
#pragma unroll
    for (stride = 1; stride < 4; stride *= 2)
#pragma unroll
        for (j = 0; j < 4; j++) {
            const float other = __shfl_xor_sync(0xFFFFFFFFu, v[j], stride);
            v[j] = quarter & stride ? gmm__fadd(other, gmm_f32_from_bits(gmm_f32_bits(v[j]) ^ 0x80000000u))
                                    : gmm__fadd(v[j], other);
        }
#pragma unroll
    for (j = 0; j < 4; j++) v[j] = gmm_bf16_to_f32(gmm_f32_to_bf16(gmm__fmul(v[j], 0.25f)));
}
/* Loads four elements of line l of a copy. */
GMM__DEVICE void gmm__quant_load_line(const float *x, int32_t columnwise, int32_t l, int32_t hadamard, float v[4]) {
    if (columnwise) gmm__quant_load_col(x, l, hadamard, v);
    else gmm__quant_load_row(x, l, v);
}
GMM__DEVICE uint32_t gmm__quant_amax4(const float v[4]) {
    return gmm_amax_bits(gmm_amax_bits(gmm_amax_bits(gmm_amax_bits(0u, v[0]), v[1]), v[2]), v[3]);
}

/* Updates the lane's amax, and the row's unless `row_amax` is NULL, by four values. */
GMM__DEVICE uint32_t gmm__quant_row_amax(uint32_t amax, const float v[4], uint32_t *row_amax) {
    uint32_t bits = gmm__quant_amax4(v);
    amax = bits > amax ? bits : amax;
    if (!row_amax) return amax;
    bits = __reduce_max_sync(0xFFFFFFFFu, bits);
    if (gmm__lane() == 0) atomicMax(row_amax, bits);
    return amax;
}

/* E2M1 codes of four values, the first in the lowest bits. */
GMM__DEVICE uint32_t gmm__quant_e2m1x4(const float p[4]) {
    return (uint32_t)gmm_f32_to_e2m1(p[0]) | (uint32_t)gmm_f32_to_e2m1(p[1]) << 4 |
           (uint32_t)gmm_f32_to_e2m1(p[2]) << 8 | (uint32_t)gmm_f32_to_e2m1(p[3]) << 12;
}
/* Codes of four values times the encode scale of their block. */
GMM__DEVICE uint32_t gmm__quant_codes(gmm_dtype dtype, const float v[4], float encode_scale) {
    float products[4];
    int32_t j;
#pragma unroll
    for (j = 0; j < 4; j++) products[j] = gmm__fmul(v[j], encode_scale);
    return dtype == GMM_E2M1 ? gmm__quant_e2m1x4(products) : gmm_encode_fp8x4(dtype == GMM_E5M2, products);
}

/* Maximum over each aligned group of `lanes` adjacent lanes, a power of two; every lane receives it. */
GMM__DEVICE uint32_t gmm__quant_block_max(uint32_t v, int32_t lanes) {
    int32_t d;
    for (d = 1; d < lanes; d <<= 1) {
        const uint32_t other = __shfl_xor_sync(0xFFFFFFFFu, v, d);
        v = other > v ? other : v;
    }
    return v;
}

/* NV16 with four_over_six (gmm_nv_scale): the two candidate scales of a block, and the error of one of its lines with
   each, summed in the order of its elements. */
GMM__DEVICE void gmm__quant_four_over_six(const gmm_nv_global *n, const float v[4], float amax, int32_t squared,
                                          uint8_t scale[2], float error[2]) {
    const float base = gmm__fmul(gmm__fdiv(amax, 6.0f), n->scale);
    int32_t choice, j, src_lane;
    scale[0] = gmm_f32_to_e4m3(base);
    scale[1] = gmm_f32_to_e4m3(gmm__fmul(base, 1.5f));
#pragma unroll
    for (choice = 0; choice < 2; choice++) {
        const float encode_scale = gmm_nv_encode(n, scale[choice]), block_scale = gmm_e4m3_to_f32(scale[choice]);
        float e[4], sum = 0.0f;
#pragma unroll
        for (j = 0; j < 4; j++) {
            const float code = gmm_e2m1_to_f32(gmm_f32_to_e2m1(gmm__fmul(v[j], encode_scale)));
            const float decoded = gmm__fdiv(gmm__fmul(gmm__fmul(code, block_scale), n->amax), 6.0f * n->e4m3_max);
            const float difference = gmm__fadd(decoded, gmm_f32_from_bits(gmm_f32_bits(v[j]) ^ 0x80000000u));
            e[j] = squared ? gmm__fmul(difference, difference)
                           : gmm_f32_from_bits(gmm_f32_bits(difference) & 0x7FFFFFFFu);
        }
        for (src_lane = 0; src_lane < 4; src_lane++) {
            float partial = sum;
#pragma unroll
            for (j = 0; j < 4; j++) partial = gmm__fadd(partial, e[j]);
            sum = __shfl_sync(0xFFFFFFFFu, partial, (gmm__lane() & ~3) | src_lane);
        }
        error[choice] = sum;
    }
}

/* The part of one copy that belongs to one tile. */
typedef struct gmm__quant_copy_tile {
    gmm__qview view;
    int64_t line0, along0;         /* first line of the tile; first element along a line */
    int32_t lines, along;          /* lines with values; elements along a line that are stored */
    const float *amax;             /* of the unit or, if per_line, of line line0 and the following ones */
    int32_t per_line;
    float scale;
    int64_t group, first_block, blocks_per_line;
    gmm_nv_global global;          /* NV16 with one amax per unit */
    float encode_scale;            /* TENSOR: what elements are multiplied by */
    int64_t line_step, block_step; /* strides of scales between lines and between blocks, except for SWIZZLED */
    int64_t scale_lines;           /* with padding */
    int32_t blocks, padded_blocks; /* blocks of a line in the tile: with values, and with padding */
} gmm__quant_copy_tile;

/* Initializes what all lines of a copy's tile share. */
GMM__DEVICE void gmm__quant_copy_tile_begin(const gmm__quant_args *a, gmm_scaling scaling, gmm__quant_copy_tile *s) {
    const gmm_format *f = &a->format;
    const gmm__qview *v = &s->view;
    const int32_t width = gmm_block_along(scaling);
    s->blocks = s->padded_blocks = 0;
    s->line_step = s->block_step = s->scale_lines = 0;
    if (width) {
        const int64_t blocks = gmm__ceil_div(v->along, width), padded = gmm__round_up(blocks, 4);
        const int64_t first = s->along0 / width;
        s->blocks = (int32_t)(blocks - first < GMM_TILE_BLOCKS ? blocks - first : (int64_t)GMM_TILE_BLOCKS);
        s->padded_blocks = (int32_t)(padded - first < GMM_TILE_BLOCKS ? padded - first : (int64_t)GMM_TILE_BLOCKS);
        s->line_step = gmm__qview_scale(v, 1, 0); /* 0 for blocks of 128 x 128 */
        s->block_step = gmm__qview_scale(v, 0, 1);
        s->scale_lines = width == 128 ? gmm__round_up(v->lines, 4) : gmm__round_up(v->lines, 128);
    }
    s->encode_scale = 1.0f;
    if (scaling == GMM_SCALING_NV16)
        s->global = gmm_nv_global_of(s->per_line ? 0.0f : s->amax[0], f->e4m3_256 ? 256.0f : 448.0f);
    else if (scaling == GMM_SCALING_TENSOR)
        s->encode_scale = f->delayed ? s->scale : gmm__quant_scale(a, gmm_dtype_largest(f->dtype), 0, s->amax[0]);
}

/* Computes and stores the scale and codes of a lane's four values of line l. `shared_amax`: amaxes of square blocks.
   Codes of copies in the order of the source go to `codes` first. */
GMM__DEVICE void gmm__quant_line(const gmm__quant_args *a, const gmm__quant_copy_tile *s, int32_t l, const float v[4],
                                 const uint32_t *shared_amax, uint8_t *codes) {
    const gmm_format *f = &a->format;
    const gmm_scaling scaling = f->scaling;
    const gmm__qview *view = &s->view;
    const int32_t lane = gmm__lane(), width = gmm_block_along(scaling), lanes = width ? width / 4 : 32;
    const int32_t block = lane / lanes, valid = l < s->lines, is_first_lane = lane % lanes == 0;
    const int32_t height = scaling == GMM_SCALING_128X128 ? GMM_TILE : f->square ? width : 1;
    const int64_t line = s->line0 + l;
    const int32_t count = s->along - 4 * lane;
    uint32_t stored = 0, code;
    float encode_scale = s->encode_scale, amax = 0.0f;
    int32_t i;
    if (width) {
        uint32_t bits = gmm__quant_block_max(gmm__quant_amax4(v), lanes);
        if (height > 1) bits = shared_amax[l / height * GMM_TILE_BLOCKS + block];
        amax = gmm_f32_from_bits(bits);
    } else if (scaling == GMM_SCALING_ROW && valid) amax = s->amax[l];
    if (scaling == GMM_SCALING_NV16) {
        gmm_nv_global global = s->global;
        if (s->per_line) global = gmm_nv_global_of(valid ? s->amax[l] : 0.0f, global.e4m3_max);
        if (f->four_over_six && height > 1)
            stored = shared_amax[GMM__QUANT_SQUARES + l / height * GMM_TILE_BLOCKS + block];
        else if (f->four_over_six) {
            uint8_t scale[2];
            float error[2];
            gmm__quant_four_over_six(&global, v, amax, f->four_over_six == 2, scale, error);
            stored = scale[error[1] < error[0]];
        } else stored = gmm_nv_scale(&global, amax);
        encode_scale = gmm_nv_encode(&global, (uint8_t)stored);
    } else if (scaling == GMM_SCALING_MX32) {
        stored = gmm_mx_scale(amax, f->dtype);
        encode_scale = gmm_e8m0_reciprocal((uint8_t)stored);
    } else if (scaling != GMM_SCALING_TENSOR) {
        encode_scale = gmm__quant_scale(a, gmm_dtype_largest(f->dtype), width, amax);
        stored = gmm_f32_bits(gmm_scale_inverse(encode_scale));
    }
    if (scaling == GMM_SCALING_128X128) {
        const int64_t first = gmm__qview_scale(view, line, s->along0 / 128);
        /* a line's padding follows its last block */
        if (l == 0 && (lane == 0 || (s->blocks == 1 && lane < s->padded_blocks)))
            ((float *)(void *)view->scale)[first + lane] = lane == 0 ? gmm_f32_from_bits(stored) : 0.0f;
    } else if (scaling == GMM_SCALING_1X128) {
        if (is_first_lane && line < s->scale_lines)
            ((uint32_t *)(void *)view->scale)[line + s->along0 / 128 * s->block_step] = valid ? stored : 0u;
    } else if (width) {
        if (is_first_lane && block < s->padded_blocks) {
            const int64_t j = s->along0 / width + block;
            view->scale[view->order == GMM_SCALES_SWIZZLED ? gmm__qview_scale(view, line, j)
                                                           : line * s->line_step + j * s->block_step] =
                valid && block < s->blocks ? (uint8_t)stored : (uint8_t)0;
        }
    } else if (scaling == GMM_SCALING_ROW && view->direction == GMM_ROWWISE && lane == 0 && s->along0 == 0 && valid)
        ((float *)(void *)view->scale)[line] = gmm_f32_from_bits(stored);
    if (!valid) return;
    if (f->stochastic) {
        uint32_t random[4], word = 0;
        gmm_draw_block(a->random[0], a->random[1], s->group, s->first_block + l * s->blocks_per_line + block,
                       view->direction, random);
#pragma unroll
        for (i = 0; i < 4; i++) word = (lane & 3) == i ? random[i] : word;
        code = 0;
#pragma unroll
        for (i = 0; i < 4; i++)
            code |= (uint32_t)gmm_f32_to_e2m1_random(gmm__fmul(v[i], encode_scale), (word >> 8 * i) & 0xFFu) << 4 * i;
    } else code = gmm__quant_codes(f->dtype, v, encode_scale);
    if (view->mn_major) {
#pragma unroll
        for (i = 0; i < 4; i++)
            codes[(4 * lane + i) * GMM__QUANT_CODES_PITCH + l] =
                f->dtype == GMM_E2M1 ? (uint8_t)((code >> 4 * i) & 15u) : (uint8_t)(code >> 8 * i);
    } else if (f->dtype == GMM_E2M1) {
        uint8_t *dst = view->data + (line * view->ld + s->along0) / 2 + 2 * lane;
        if (count >= 4 && !((uintptr_t)dst & 1)) *(uint16_t *)dst = (uint16_t)code;
        else {
            if (count > 0) dst[0] = (uint8_t)code;
            if (count > 2) dst[1] = (uint8_t)(code >> 8);
        }
    } else {
        uint8_t *dst = view->data + line * view->ld + s->along0 + 4 * lane;
        if (count >= 4 && !((uintptr_t)dst & 3)) *(uint32_t *)dst = code;
        else
#pragma unroll
            for (i = 0; i < 4; i++)
                if (i < count) dst[i] = (uint8_t)(code >> 8 * i);
    }
}

/* Quantizes all lines of one copy of a tile whose values are in x. All threads of the CTA call it. */
GMM__DEVICE void gmm__quant_copy_tile_lines(const gmm__quant_args *a, gmm__quant_copy_tile *s, const float *x,
                                            uint32_t *shared_amax, uint8_t *codes) {
    const gmm_format *f = &a->format;
    const gmm_scaling scaling = f->scaling;
    const int32_t columnwise = s->view.direction == GMM_COLUMNWISE, hadamard = columnwise ? f->hadamard : 0;
    const int32_t width = gmm_block_along(scaling), lane = gmm__lane();
    const int32_t height = scaling == GMM_SCALING_128X128 ? GMM_TILE : f->square ? width : 1;
    int32_t l, i;
    gmm__quant_copy_tile_begin(a, scaling, s);
    if (height > 1) {
        for (i = (int32_t)threadIdx.x; i < GMM__QUANT_SQUARES; i += GMM__QUANT_THREADS) shared_amax[i] = 0;
        __syncthreads();
        for (l = gmm__warp(); l < s->lines; l += GMM__QUANT_WARPS) {
            uint32_t bits;
            float v[4];
            gmm__quant_load_line(x, columnwise, l, hadamard, v);
            bits = gmm__quant_block_max(gmm__quant_amax4(v), width / 4);
            if (lane % (width / 4) == 0)
                atomicMax(&shared_amax[l / height * GMM_TILE_BLOCKS + lane / (width / 4)], bits);
        }
        __syncthreads();
    }
    /* the errors of the 16 lines of a square block are summed as a binary tree, whose order fixes the result */
    if (height > 1 && scaling == GMM_SCALING_NV16 && f->four_over_six) {
        float *errors = (float *)(void *)codes; /* [2][GMM_TILE][GMM_TILE_BLOCKS] */
        for (l = gmm__warp(); l < GMM_TILE; l += GMM__QUANT_WARPS) {
            uint8_t scale[2];
            float v[4], error[2];
            gmm__quant_load_line(x, columnwise, l, hadamard, v);
            gmm__quant_four_over_six(&s->global, v, gmm_f32_from_bits(shared_amax[l / 16 * GMM_TILE_BLOCKS + lane / 4]),
                                     f->four_over_six == 2, scale, error);
            for (i = 0; i < 2; i++)
                if (lane % 4 == 0) errors[(i * GMM_TILE + l) * GMM_TILE_BLOCKS + lane / 4] = error[i];
            if (lane % 4 == 0 && l % 16 == 0)
                shared_amax[GMM__QUANT_SQUARES + l / 16 * GMM_TILE_BLOCKS + lane / 4] =
                    (uint32_t)scale[0] | (uint32_t)scale[1] << 8;
        }
        __syncthreads();
        for (i = (int32_t)threadIdx.x; i < GMM__QUANT_SQUARES; i += GMM__QUANT_THREADS) {
            uint32_t *chosen = &shared_amax[GMM__QUANT_SQUARES + i];
            float *row[2];
            int32_t stride, j;
            row[0] = errors + i / GMM_TILE_BLOCKS * 16 * GMM_TILE_BLOCKS + i % GMM_TILE_BLOCKS;
            row[1] = row[0] + GMM_TILE * GMM_TILE_BLOCKS;
            for (stride = 8; stride > 0; stride /= 2)
                for (j = 0; j < stride; j++) {
                    row[0][j * GMM_TILE_BLOCKS] = gmm__fadd(row[0][j * GMM_TILE_BLOCKS],
                                                            row[0][(j + stride) * GMM_TILE_BLOCKS]);
                    row[1][j * GMM_TILE_BLOCKS] = gmm__fadd(row[1][j * GMM_TILE_BLOCKS],
                                                            row[1][(j + stride) * GMM_TILE_BLOCKS]);
                }
            *chosen = row[1][0] < row[0][0] ? *chosen >> 8 : *chosen & 0xFFu;
        }
        __syncthreads();
    }
    for (l = gmm__warp(); l < GMM_TILE; l += GMM__QUANT_WARPS) {
        float v[4];
        gmm__quant_load_line(x, columnwise, l, hadamard, v);
        gmm__quant_line(a, s, l, v, shared_amax, codes);
    }
    if (!s->view.mn_major) return;
    __syncthreads();
    for (l = gmm__warp(); l < s->along; l += GMM__QUANT_WARPS) { /* stores the codes row by row */
        const uint8_t *src = codes + l * GMM__QUANT_CODES_PITCH;
        uint8_t *dst = s->view.data;
        if (f->dtype == GMM_E2M1) {
            dst += ((s->along0 + l) * s->view.ld + s->line0) / 2;
            for (i = 2 * lane; i < s->lines; i += 64) dst[i / 2] = (uint8_t)(src[i] | src[i + 1] << 4);
        } else {
            dst += (s->along0 + l) * s->view.ld + s->line0;
            if (4 * lane + 4 <= s->lines && !((uintptr_t)dst & 3))
                *(uint32_t *)(dst + 4 * lane) = *(const uint32_t *)(src + 4 * lane);
            else
                for (i = 4 * lane; i < 4 * lane + 4 && i < s->lines; i++) dst[i] = src[i];
        }
    }
}

/* Stores what depends on amaxes alone: amaxes for the caller, scales of tensors and of columns. Called by threads
   `first`, first + step, ... of a sequence. `store_amax`: amaxes that the caller gave replace those that the casts
   read. */
GMM__DEVICE void gmm__quant_scales(const gmm__quant_args *a, int64_t first, int64_t step, int32_t store_amax) {
    const gmm_format *f = &a->format;
    const int32_t tensor = f->scaling == GMM_SCALING_TENSOR;
    const int32_t global = tensor || (f->scaling == GMM_SCALING_NV16 && !f->row_amax);
    int64_t i;
    int32_t k;
    for (i = first; i < a->units && global; i += step) {
        const gmm_mat *copy[2] = { &a->rowwise, &a->columnwise };
        float amax[2] = { 0.0f, 0.0f };
        if (a->amax[0]) {
            amax[0] = a->amax[0][i];
            amax[1] = f->hadamard ? a->amax[1][i] : amax[0];
        }
        for (k = 0; k < 2; k++) {
            if (copy[k]->dtype == GMM_NONE) continue;
            if (a->phase == GMM_QUANT_CAST) amax[k] = copy[k]->amax[i];
            else if (copy[k]->amax && !a->record) {
                if (f->delayed)
                    copy[k]->amax[i] = gmm_f32_from_bits(gmm_amax_bits(gmm_f32_bits(amax[k]), copy[k]->amax[i]));
                else copy[k]->amax[i] = amax[k];
            }
        }
        if (a->phase == GMM_QUANT_CAST && tensor && copy[0]->dtype != GMM_NONE) amax[1] = amax[0];
        if (store_amax) {
            a->amax[0][i] = amax[0];
            a->amax[1][i] = amax[1];
        }
        for (k = 0; k < 2 && tensor && a->phase != GMM_QUANT_AMAX; k++) {
            const float scale = f->delayed ? a->scale ? a->scale[i] : 1.0f
                                           : gmm__quant_scale(a, gmm_dtype_largest(f->dtype), 0, amax[k]);
            gmm__qview v;
            if (copy[k]->dtype == GMM_NONE) continue;
            v = gmm__qview_of(copy[k], k ? GMM_COLUMNWISE : GMM_ROWWISE, a->grouped, i, 0, 0, 0, 1);
            *(float *)(void *)v.scale = gmm_scale_inverse(scale);
        }
    }
    for (i = first; a->col_amax && i < a->units * a->cols; i += step) {
        const gmm__qview v = gmm__qview_of(&a->columnwise, GMM_COLUMNWISE, a->grouped, i / a->cols, 0, 0, 0, a->cols);
        ((float *)(void *)v.scale)[i % a->cols] =
            gmm_scale_inverse(gmm__quant_scale(a, gmm_dtype_largest(f->dtype), 0, a->col_amax[i]));
    }
    if (f->row_amax && a->rowwise.dtype != GMM_NONE)
        for (i = first; i < (a->grouped ? a->offsets[a->units] : a->units * a->rows); i += step)
            a->rowwise.amax[i] = a->row_amax[i];
}
#if GMM__HOLDS(0) && !defined(GMM_NO_QUANT)
/* gmm__quant_scales by a kernel of its own, for the general casts. */
GMM__KERNEL __launch_bounds__(GMM__QUANT_THREADS) gmm_quantize_scales(const __grid_constant__ gmm__quant_args a) {
    if (gmm__quant_wait_skips(a.skip)) return;
    gmm__quant_scales(&a, (int64_t)blockIdx.x * GMM__QUANT_THREADS + threadIdx.x,
                      (int64_t)gridDim.x * GMM__QUANT_THREADS, 1);
}

/* Zeroes the rows behind the last group. One CTA per row. */
GMM__KERNEL __launch_bounds__(GMM__QUANT_THREADS) gmm_quantize_tail(const __grid_constant__ gmm__quant_tail_args a) {
    int64_t r, i;
    if (gmm__quant_wait_skips(a.skip)) return;
    for (r = *a.valid_rows + blockIdx.x; r < a.rows; r += gridDim.x)
        for (i = threadIdx.x; i < a.bytes; i += GMM__QUANT_THREADS) a.data[r * a.pitch + i] = 0;
}
#endif

/* --- vectorized casts: the common shapes and alignments, at the speed of memory --- */

/* A CTA of 8 warps processes tiles of 128 x 128 elements; a lane holds 8 x 8 of them in registers, in memory
   format (words.cuh), so that rows and columns are encoded from one load:

       columns   0       64      128       columns   0   8   16  24  32  40  48  56
       rows  0   +-------+-------+         rows  0   lane 0   1   2   3   4   5   6   7
                 | warp 0| warp 4|               8        8   9  10  11  12  13  14  15
            32   +-------+-------+              16       16  17  18  19  20  21  22  23
                 | warp 1| warp 5|              24       24  25  26  27  28  29  30  31
            64   +-------+-------+
                 | warp 2| warp 6|         A block of 16 elements of a row or a column lies in two lanes, one of
            96   +-------+-------+         128 of a row in 8 lanes of two warps, of a column in 4 lanes of four
                 | warp 3| warp 7|         warps.
           128   +-------+-------+

   Rowwise codes are stored from registers, 8 per lane and row; columnwise codes are transposed in shared memory.
   MX32, whose copies are both stored in the order of the source, has a tile of its own (stages_mx32.cuh). */
enum {
    GMM_CAST_WARP_ROWS = 32, GMM_CAST_WARP_COLS = 64,
    /* bytes of a column of FP8 codes in shared memory; 16 bytes of padding follow every eight columns */
    GMM_CAST_FP8_COLUMN = GMM_TILE,
    GMM_CAST_FP8_CODES = GMM_TILE * GMM_CAST_FP8_COLUMN + GMM_TILE / 8 * 16,
    GMM_CAST_NV16_COLUMN = GMM_TILE / 2, /* the same for E2M1 codes */
    GMM_CAST_NV16_CODES = GMM_TILE * GMM_CAST_NV16_COLUMN + GMM_TILE / 8 * 16,
    /* tiles of a strip that a CTA processes (NV16, and MX32 from 16-bit sources) */
    GMM_CAST_TILES = 2
};

/* Number of strips of a call, and the split if warps compute it. All threads call it. */
GMM__DEVICE gmm_warp_split gmm_cast_split(const gmm__quant_args *a) {
    gmm_warp_split w = { 0, 0, 0, 0 };
    if (a->warp_split) return gmm_warp_split_scan(&a->groups, GMM_TILE, threadIdx.x < 32 && blockIdx.x == 0 &&
                                                  blockIdx.y == 0);
    w.total = (int32_t)gmm__quant_strips(a->grouped, a->tiles, a->units, a->rows);
    return w;
}

/* gmm__quant_strip in 32 bits. */
typedef struct gmm_cast_strip { int32_t unit, row, m, rows, source_row, padded_row; } gmm_cast_strip;

/* Strip number `strip`, in the order of addresses. */
GMM__DEVICE gmm_cast_strip gmm_cast_strip_of(const gmm__quant_args *a, const gmm_warp_split *w, int32_t strip) {
    if (a->warp_split) {
        const int32_t g = __popc(__ballot_sync(0xFFFFFFFFu, w->tiles <= strip));
        const int32_t group_first = w->tiles - (w->rows + GMM_TILE - 1) / GMM_TILE;
        const int32_t first = __shfl_sync(0xFFFFFFFFu, group_first, g), rows = __shfl_sync(0xFFFFFFFFu, w->rows, g);
        const int32_t begin = __shfl_sync(0xFFFFFFFFu, w->begin, g), row = (strip - first) * GMM_TILE;
        const gmm_cast_strip p = { g, row, min(rows - row, (int32_t)GMM_TILE), rows, begin, first * GMM_TILE };
        return p;
    } else {
        const gmm__quant_strip s = gmm__quant_strip_of(a->grouped, a->tiles, a->offsets, a->units, a->rows, strip);
        const gmm_cast_strip p = { (int32_t)s.unit, (int32_t)s.row, (int32_t)s.m, (int32_t)s.rows,
                                   (int32_t)s.source_row, (int32_t)s.padded_row };
        return p;
    }
}

/* A tile of a vectorized cast, and what of it belongs to this lane. */
typedef struct gmm_cast_tile {
    const gmm__quant_args *a;
    gmm_dtype source;    /* dtype of the source: a constant of the kernel's instance */
    int32_t rowwise, columnwise; /* the copies that the call has */
    gmm_cast_strip p;    /* the strip of rows that the tile is part of */
    int32_t c0, cols;    /* first column of the tile; columns of the matrix */
    int32_t end;         /* the column behind the last one that the tile may have */
    int32_t row0, col0;  /* in the tile: first row and first column of the lane */
    int32_t in_cols;     /* whether the lane's columns exist */
    int32_t valid_rows;  /* rows from row0 on that exist; below 1 or above 8 where none or more than the lane's do */
    int32_t padded_rows; /* rows of the unit as its scales count them */
} gmm_cast_tile;

/* What all tiles of a lane have in common. */
GMM__DEVICE gmm_cast_tile gmm_cast_tile_init(const gmm__quant_args *a, gmm_dtype source) {
    const int32_t lane = gmm__lane(), warp = gmm__warp();
    gmm_cast_tile t;
    t.a = a;
    t.source = source;
    t.row0 = warp % 4 * GMM_CAST_WARP_ROWS + 8 * (lane >> 3);
    t.col0 = warp / 4 * GMM_CAST_WARP_COLS + 8 * (lane & 7);
    t.rowwise = a->rowwise.dtype != GMM_NONE;
    t.columnwise = a->columnwise.dtype != GMM_NONE;
    return t;
}
/* Moves to the tile that begins at column c0. */
GMM__DEVICE void gmm_cast_tile_at(gmm_cast_tile *t, int32_t c0) {
    t->c0 = c0;
    t->in_cols = t->col0 < t->end - c0;
}
/* Moves to the first of the `cta_tiles` tiles that the CTA processes of strip number `index` of its sequence. */
GMM__DEVICE void gmm_cast_tile_move(gmm_cast_tile *t, const gmm_warp_split *w, int32_t index, int32_t cta_tiles) {
    const gmm__quant_args *a = t->a;
    const int32_t tile = a->backward ? (int32_t)(gridDim.x - 1u - blockIdx.x) : (int32_t)blockIdx.x;
    t->cols = t->end = (int32_t)a->cols;
    gmm_cast_tile_at(t, tile * cta_tiles * GMM_TILE);
    t->p = gmm_cast_strip_of(a, w, a->backward ? w->total - 1 - index : index);
    t->valid_rows = t->p.m - t->row0;
    t->padded_rows = a->grouped ? (t->p.rows + 127) & ~127 : t->p.rows;
}

/* --- addresses --- */

GMM__DEVICE uint8_t *gmm_cast_data(const gmm_mat *m, int64_t step, int64_t unit) {
    return m->table ? (uint8_t *)m->table[unit] : (uint8_t *)m->data + unit * step;
}
/* The one address of scales: those of a strip's unit in the rowwise (copy 0) or columnwise copy (copy 1). `offset`:
   bytes of scales of the padded rows before a group (gmm_scale_base). */
GMM__DEVICE uint8_t *gmm_cast_scales(const gmm_cast_tile *t, int32_t copy, int64_t offset) {
    const gmm_mat *m = copy ? &t->a->columnwise : &t->a->rowwise;
    uint8_t *const scales = m->scale_table ? (uint8_t *)m->scale_table[t->p.unit]
                                     : (uint8_t *)m->scale + t->p.unit * t->a->scale_step[copy];
    return scales + (t->a->grouped ? offset : 0);
}
/* Stores four scale bytes of line l of a tile, the first of block `tile_block` of the tile. `dst`: scales of the unit,
   where the tile starts with line `line` and block `block` and a line has `along` scales. */
GMM__DEVICE void gmm_cast_store_scales4(uint8_t *dst, gmm_scale_order order, int32_t line, int32_t block, int32_t along,
                                        int32_t l, int32_t tile_block, uint32_t scales4) {
    if (order == GMM_SCALES_SWIZZLED)
        dst += (int64_t)line * along + block * 128 + tile_block * 128 + (l & 31) * 16 + (l >> 5) * 4;
    else dst += (int64_t)line * along + block + (l * along + tile_block);
    if (block + tile_block < along) gmm_st_global_b32(dst, scales4);
}

/* --- load --- */

/* Loads `words` words of a row to x; zeros unless it exists. */
GMM__DEVICE void gmm_cast_load_row(const uint8_t *src, int32_t exists, int32_t words, uint32_t *x) {
    int32_t k;
#pragma unroll
    for (k = 0; k < words; k += 4) {
        uint4 v = make_uint4(0u, 0u, 0u, 0u);
        if (exists) v = __ldg((const uint4 *)(const void *)(src + 4 * k));
        x[k] = v.x;
        x[k + 1] = v.y;
        x[k + 2] = v.z;
        x[k + 3] = v.w;
    }
}
/* Loads gathered rows. A lane looks up one of the warp's 32 rows, and the others get it from there. */
GMM__DEVICE void gmm_cast_gather_rows(const gmm_cast_tile *t, int32_t rows, int32_t words, int32_t stride,
                                      uint32_t *x) {
    const gmm__quant_args *a = t->a;
    const int64_t size = gmm__words8(t->source) / 2;
    const uint8_t *src = gmm_cast_data(&a->src, 0, 0) + (t->c0 + t->col0) * size;
    const int32_t line = (t->row0 & ~31) + gmm__lane();
    const int32_t own = line < t->p.m ? gmm_checked_row(&a->index, t->p.source_row + t->p.row + line) : -1;
    int32_t i;
#pragma unroll
    for (i = 0; i < rows; i++) {
        const int32_t row = __shfl_sync(0xFFFFFFFFu, own, (t->row0 & 31) + i);
        gmm_cast_load_row(src + row * a->src.ld * size, t->in_cols && row >= 0, words, x + i * stride);
    }
}
/* Loads the lane's rows, `words` words of each to x[stride i]; zeros beyond the last row or column. `ahead`: a
   constant. With 1 rows that are not gathered are loaded without a branch, so that ptxas can issue these loads early;
   but FP8 kernels spill a register with it. */
GMM__DEVICE void gmm_cast_load_rows(const gmm_cast_tile *t, const int ahead, int32_t rows, int32_t words,
                                    int32_t stride, uint32_t *x) {
    const gmm__quant_args *a = t->a;
    const int64_t size = gmm__words8(t->source) / 2, pitch = a->src.ld * size;
    const uint8_t *src = gmm_cast_data(&a->src, a->step[2], t->p.unit) +
                         (t->p.source_row + t->p.row + t->row0) * pitch + (t->c0 + t->col0) * size;
    const int gathers = a->index.at != NULL;
    const int32_t valid_rows = t->in_cols && !(ahead && gathers) ? t->valid_rows : 0;
    int32_t i;
    if (!ahead && gathers) {
        gmm_cast_gather_rows(t, rows, words, stride, x);
        return;
    }
#pragma unroll
    for (i = 0; i < rows; i++, src += pitch) gmm_cast_load_row(src, i < valid_rows, words, x + i * stride);
    if (ahead && gathers) gmm_cast_gather_rows(t, rows, words, stride, x);
}
GMM__DEVICE void gmm_cast_load(const gmm_cast_tile *t, const int ahead, uint32_t x[8][8]) {
    gmm_cast_load_rows(t, ahead, 8, gmm__words8(t->source), 8, x[0]);
}
/* Values of the lane's row or column number l. */
GMM__DEVICE void gmm_cast_line(gmm_dtype source, const uint32_t x[8][8], int32_t columnwise, int32_t l, float v[8]) {
    int32_t i;
#pragma unroll
    for (i = 0; i < 8; i++) v[i] = gmm__word_value(source, x[columnwise ? i : l], columnwise ? l : i);
}
/* Reads one element of the lane's part again from device memory, for codecs that NaN or saturation need. */
GMM__DEVICE float gmm_cast_reload(const gmm_cast_tile *t, int32_t i, int32_t j) {
    const gmm__quant_args *a = t->a;
    int64_t row = t->p.source_row + t->p.row + (t->row0 + i);
    if (a->index.at && (row = gmm_indexed_row(&a->index, row)) < 0) return 0.0f;
    return gmm_load(t->source, gmm_cast_data(&a->src, a->step[2], t->p.unit), row * a->src.ld + (t->c0 + t->col0 + j));
}

/* --- amax --- */

/* Maxima of the lane's parts of its columns, as words. */
GMM__DEVICE void gmm_cast_col_maxima(gmm_dtype source, const uint32_t x[8][8], uint32_t col[8]) {
    int32_t i, k;
#pragma unroll
    for (k = 0; k < gmm__words8(source); k++) {
        col[k] = 0;
#pragma unroll
        for (i = 0; i < 8; i++) col[k] = gmm__word_max(source, col[k], x[i][k]);
    }
}
/* Maxima of the lane's parts of its rows, as bits of fp32. with_cols: and of its columns, from absolute values that are
   computed once. */
GMM__DEVICE void gmm_cast_row_maxima(gmm_dtype source, const uint32_t x[8][8], uint32_t row[8], int32_t with_cols,
                                     uint32_t col[8]) {
    int32_t i, k;
#pragma unroll
    for (k = 0; k < gmm__words8(source) && with_cols; k++) col[k] = 0;
#pragma unroll
    for (i = 0; i < 8; i++) {
        row[i] = 0;
#pragma unroll
        for (k = 0; k < gmm__words8(source); k++) {
            row[i] = gmm__word_max(source, row[i], x[i][k]);
            if (with_cols) col[k] = gmm__word_max(source, col[k], x[i][k]);
        }
        row[i] = gmm__word_fold(source, row[i]);
    }
}
/* Maxima of columns over the four lanes above one another, that is over the warp's 32 rows. */
GMM__DEVICE void gmm_cast_reduce_cols(gmm_dtype source, uint32_t col[8]) {
    int32_t i, k;
#pragma unroll
    for (k = 0; k < gmm__words8(source); k++)
#pragma unroll
        for (i = 8; i < 32; i <<= 1)
            col[k] = gmm__word_max(source, col[k], __shfl_xor_sync(0xFFFFFFFFu, col[k], i));
}
/* Maximum of the warp's part of a tile, as bits of an fp32. */
GMM__DEVICE uint32_t gmm_cast_warp_max(gmm_dtype source, const uint32_t x[8][8]) {
    uint32_t maximum = 0;
    int32_t i, k;
#pragma unroll
    for (i = 0; i < 8; i++)
#pragma unroll
        for (k = 0; k < gmm__words8(source); k++) maximum = gmm__word_max(source, maximum, x[i][k]);
    return __reduce_max_sync(0xFFFFFFFFu, gmm__word_fold(source, maximum));
}
/* Raises an amax in device memory; it is read first, since most values do not raise it. */
GMM__DEVICE void gmm_cast_raise_amax(uint32_t *dst, uint32_t bits) {
    if (bits > *(volatile uint32_t *)dst) atomicMax(dst, bits);
}

/* --- column sums --- */

/* A strip's partial sums for a bias gradient, in the order that bgrad.cuh states. Warps leave the sums of their 32 rows
   in shared memory, float [GMM_CAST_SUM_PARTS][pitch]: part i has rows 32 i to 32 i + 31, and pitch is the number of
   columns of the tile. */
enum { GMM_CAST_SUM_PARTS = GMM_TILE / GMM_CAST_WARP_ROWS };

/* Writes the warp's part. A lane has `rows` rows, 8 or 16, of `cols` elements at x[stride i]: these are constants. */
GMM__DEVICE void gmm_cast_column_sums(const gmm_cast_tile *t, int32_t rows, int32_t cols, int32_t stride,
                                      const uint32_t *x, int32_t pitch, float *smem) {
    const float *scale = t->a->sum_scale;
    float sum[8];
    int32_t i, j, k;
    if (scale) scale += t->p.source_row + t->p.row + t->row0;
#pragma unroll
    for (k = 0; k < rows; k += 8) {
        float sum8[8] = { 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f };
#pragma unroll
        for (i = k; i < k + 8; i++) {
            const float s = scale && i < t->valid_rows ? scale[i] : 1.0f;
#pragma unroll
            for (j = 0; j < cols; j++) sum8[j] = __fmaf_rn(s, gmm__word_value(t->source, x + stride * i, j), sum8[j]);
        }
#pragma unroll
        for (j = 0; j < cols; j++) sum[j] = k ? __fadd_rn(sum[j], sum8[j]) : sum8[j];
    }
#pragma unroll
    for (i = rows; i < 32; i *= 2) /* the 32 / rows lanes above one another are 8 or 16 lanes apart */
#pragma unroll
        for (j = 0; j < cols; j++) sum[j] = __fadd_rn(sum[j], __shfl_xor_sync(0xFFFFFFFFu, sum[j], i));
    if ((t->row0 & (GMM_CAST_WARP_ROWS - 1)) == 0)
#pragma unroll
        for (j = 0; j < cols; j++) smem[t->row0 / GMM_CAST_WARP_ROWS * pitch + t->col0 + j] = sum[j];
}
/* Adds up the parts and stores the strip's partial sums. All threads call it after a barrier. */
GMM__DEVICE void gmm_cast_store_sums(const gmm_cast_tile *t, int32_t pitch, const float *smem) {
    const int64_t strip = (t->p.padded_row + t->p.row) / GMM_TILE;
    int32_t col;
    for (col = (int32_t)threadIdx.x; col < min(pitch, t->end - t->c0); col += GMM__QUANT_THREADS)
        t->a->sums[strip * t->cols + t->c0 + col] =
            __fadd_rn(__fadd_rn(smem[col], smem[pitch + col]), __fadd_rn(smem[2 * pitch + col], smem[3 * pitch + col]));
}

/* --- encode --- */

/* Where a column begins in codes that are transposed in shared memory, `bytes` per column. */
GMM__DEVICE int32_t gmm_cast_smem_column(int32_t bytes, int32_t col) { return col * bytes + (col >> 3) * 16; }
/* A tile's columns are stored from shared memory in steps of 16 bytes per thread. Where the thread's first ones go.
   bytes, pitch: bytes of a column in shared memory, and from one column to the next in device memory. */
GMM__DEVICE uint8_t *gmm_cast_col_codes(const gmm_cast_tile *t, int32_t thread, int32_t bytes, int64_t pitch) {
    const gmm__quant_args *a = t->a;
    const int32_t chunks = bytes / 16, elements = GMM_TILE / bytes; /* elements per byte */
    const int64_t begin = (a->grouped ? t->p.padded_row : 0) + t->p.row;
    return gmm_cast_data(&a->columnwise, a->step[1], t->p.unit) + begin / elements +
           (t->c0 + thread / chunks) * pitch + thread % chunks * 16;
}
/* Stores the columns from there on. All threads call it after a barrier. */
GMM__DEVICE void gmm_cast_store_cols(const gmm_cast_tile *t, int32_t thread, int32_t bytes, uint8_t *codes,
                                     uint8_t *dst, int64_t pitch) {
    const int32_t chunks = bytes / 16, elements = GMM_TILE / bytes, step = GMM__QUANT_THREADS / chunks;
    int32_t k;
    if (thread % chunks * 16 * elements < (t->a->grouped ? (int32_t)GMM_TILE : t->p.m))
#pragma unroll
        for (k = thread / chunks; k < GMM_TILE; k += step, dst += step * pitch)
            if (k < t->end - t->c0)
                gmm_st_global_v4_b32(dst, *(const uint4 *)(const void *)(codes + gmm_cast_smem_column(bytes, k) +
                                                                         thread % chunks * 16));
}
/* --- codecs of the NV16 casts: E2M1 codes and Hadamard transforms of registers --- */

/* Sign bits of eight values, at bit 3 of each nibble. */
GMM__DEVICE uint32_t gmm_e2m1_signs(const float v[8]) {
    const uint32_t odd = __byte_perm(__byte_perm(gmm_f32_bits(v[1]), gmm_f32_bits(v[3]), 0x0073),
                                     __byte_perm(gmm_f32_bits(v[5]), gmm_f32_bits(v[7]), 0x0073), 0x5410);
    const uint32_t even = __byte_perm(__byte_perm(gmm_f32_bits(v[0]), gmm_f32_bits(v[2]), 0x0073),
                                      __byte_perm(gmm_f32_bits(v[4]), gmm_f32_bits(v[6]), 0x0073), 0x5410);
    return (odd & 0x80808080u) | ((even >> 4) & 0x08080808u);
}
/* |v encode_scale|; saturate: 6 if it is larger or NaN. */
GMM__DEVICE float gmm_e2m1_product(float v, float encode_scale, int saturate) {
    const float m = gmm_mul_abs_f32(v, encode_scale);
    return saturate ? gmm_min_6_f32(m) : m;
}
/* E2M1 codes of eight values times |encode_scale|. The code of an absolute value m is 2 m up to 2, m + 2 up to 4, and
   m / 2 + 4 up to 6, each rounded to even once by an addition to 2^23; the smallest of the three is the right one.
   Products either saturate at 6 (`saturate`), or none of them may be NaN or reach 7. */
GMM__DEVICE uint32_t gmm_e2m1x8(const float v[8], float encode_scale, int saturate) {
    uint32_t codes = 0;
    int32_t j;
#pragma unroll
    for (j = 7; j >= 0; j--) {
        uint32_t low, middle, high;
        gmm_e2m1_candidates(gmm_e2m1_product(v[j], encode_scale, saturate), &low, &middle, &high);
        low = low < middle ? low : middle;
        codes = codes * 16 + (low < high ? low : high);
    }
    codes -= 0xFB000000u; /* 0x4B000000 times 1 + 16 + ... + 16^7 */
    return codes | gmm_e2m1_signs(v);
}
/* The same with stochastic rounding as in gmm_f32_to_e2m1_random; element j uses byte j % 4 of word j / 4. A product
   is increased by a random fraction of the E2M1 step and truncated: multiplied by 2^-126, bits 22 and up are the
   code. */
GMM__DEVICE uint32_t gmm_e2m1x8_random(const float v[8], float encode_scale, const uint32_t random[2]) {
    uint32_t codes = 0;
    int32_t j;
#pragma unroll
    for (j = 7; j >= 0; j--) {
        const float m = gmm_e2m1_product(v[j], encode_scale, 1);
        /* 128 plus the random byte times 2^-8 */
        const float fraction_plus_128 =
            gmm_f32_from_bits(__byte_perm(random[j / 4], 0x43000000u, 0x7404 | (j & 3) << 4));
        const uint32_t bits = gmm_e2m1_add_fraction(m, fraction_plus_128);
        codes = codes * 16 + (bits >> 22);
    }
    return codes | gmm_e2m1_signs(v);
}
/* Transposes an 8 x 8 matrix of nibbles: nibble j of word i becomes nibble i of word j. */
GMM__DEVICE void gmm_e2m1_transpose8x8(uint32_t w[8]) {
    int32_t i;
#pragma unroll
    for (i = 0; i < 8; i += 2) {
        const uint32_t low = (w[i] & 0x0F0F0F0Fu) | ((w[i + 1] << 4) & 0xF0F0F0F0u);
        w[i + 1] = ((w[i] >> 4) & 0x0F0F0F0Fu) | (w[i + 1] & 0xF0F0F0F0u);
        w[i] = low;
    }
#pragma unroll
    for (i = 0; i < 8; i++)
        if (!(i & 2)) {
            const uint32_t low = __byte_perm(w[i], w[i + 2], 0x6240);
            w[i + 2] = __byte_perm(w[i], w[i + 2], 0x7351);
            w[i] = low;
        }
#pragma unroll
    for (i = 0; i < 4; i++) {
        const uint32_t low = __byte_perm(w[i], w[i + 4], 0x5410);
        w[i + 4] = __byte_perm(w[i], w[i + 4], 0x7632);
        w[i] = low;
    }
}

/* BF16: clears the sign of NaN. */
GMM__DEVICE uint32_t gmm_hadamard_positive_nan(uint32_t w) {
    if ((w & 0x7FFFu) > 0x7F80u) w &= 0xFFFF7FFFu;
    if ((w & 0x7FFF0000u) > 0x7F800000u) w &= 0x7FFFFFFFu;
    return w;
}
/* BF16: flips the signs of the rows whose bit in `signs` is 1: gmm_format.hadamard, whose lower 16 bits are the signs
   by row of a block, shifted to the lane's 8 rows. gmm_hadamard_gather16 then exchanges words between the two
   lanes of 16 rows, so that 8 rows by 8 columns become 16 rows by 4 columns: the left columns in the upper lane, the
   right ones in the lower lane. */
GMM__DEVICE void gmm_hadamard_flip_signs(uint32_t x[8][8], uint32_t signs) {
    int32_t i, k;
#pragma unroll
    for (i = 0; i < 8; i++) {
        const uint32_t flip = ((signs >> i) & 1u) * 0x80008000u;
#pragma unroll
        for (k = 0; k < 4; k++) x[i][k] ^= flip;
    }
}
GMM__DEVICE void gmm_hadamard_gather16(const uint32_t x[8][8], int32_t lower, uint32_t dst[16][2]) {
    int32_t i, k;
#pragma unroll
    for (i = 0; i < 8; i++)
#pragma unroll
        for (k = 0; k < 2; k++) {
            const uint32_t received = __shfl_xor_sync(0xFFFFFFFFu, lower ? x[i][k] : x[i][k + 2], 8);
            dst[i][k] = lower ? received : x[i][k];
            dst[i + 8][k] = lower ? x[i][k + 2] : received;
        }
}
/* Column j of a lane's four columns as words of two rows, Hadamard-transformed without the signs of rows if
   `hadamard`. NaN loses its sign. */
GMM__DEVICE void gmm_hadamard_column16(const uint32_t x[16][2], int32_t j, int32_t hadamard, uint32_t dst[8]) {
    float v[16];
    int32_t i;
#pragma unroll
    for (i = 0; i < 16; i++) v[i] = gmm__word_value(GMM_BF16, x[i], j);
    if (hadamard) {
        gmm_hadamard_stages(v, 16, 8);
#pragma unroll
        for (i = 0; i < 16; i++) v[i] = gmm__fmul(v[i], 0.25f);
    }
#pragma unroll
    for (i = 0; i < 8; i++)
        dst[i] = gmm_cvt_bf16x2(v[2 * i + 1], v[2 * i]);
}
/* Largest absolute value of the transforms of this lane's and its neighbour's blocks of 16, as bits of an fp32
   rounded to BF16. The last stage takes |a| + |b|, the larger of |a + b| and |a - b|, so that it needs no order. */
GMM__DEVICE uint32_t gmm_hadamard_amax(const uint32_t x[8][8], int32_t lower) {
    float maximum = 0.0f;
    uint32_t bits;
    int32_t i, k, half;
#pragma unroll
    for (k = 0; k < 2; k++) {
        uint32_t own[8], received[8];
#pragma unroll
        for (i = 0; i < 8; i++) {
            received[i] = __shfl_xor_sync(0xFFFFFFFFu, lower ? x[i][k] : x[i][k + 2], 8);
            own[i] = lower ? x[i][k + 2] : x[i][k];
        }
#pragma unroll
        for (half = 0; half < 2; half++) {
            float a[8], b[8];
#pragma unroll
            for (i = 0; i < 8; i++) {
                a[i] = gmm__word_value(GMM_BF16, &own[i], half);
                b[i] = gmm__word_value(GMM_BF16, &received[i], half);
            }
            gmm_hadamard_stages(a, 8, 4);
            gmm_hadamard_stages(b, 8, 4);
#pragma unroll
            for (i = 0; i < 8; i++)
                maximum = gmm_max_sum_abs_f32(maximum, a[i], b[i]);
        }
    }
    bits = gmm_f32_to_bf16(gmm__fmul(maximum, 0.25f));
    return bits << 16;
}

/* --- vectorized casts of an activation, h = p act(gate, linear), or of the gradient of its inputs, z --- */

/* h is rounded to the dtype of its inputs, as the activation kernel stores it, so that a cast has the bits of a cast of
   the stored h. A lane computes its eight rows of the tile of vectors.cuh, keeps them in slots of its own in shared
   memory, and loads them from there as if they were the source. So the loop over rows need not be unrolled, which would
   repeat the code of all activations. */
enum {
    GMM_CAST_ACT_SLOTS = 8 * GMM__QUANT_THREADS * 16,    /* bytes: eight elements per row and thread */
    GMM_CAST_GRADIENT_SLOTS = 2 * GMM_CAST_ACT_SLOTS     /* of the gradients of gate and linear inputs */
};
static_assert((int)GMM_CAST_ACT_SLOTS >= (int)GMM_CAST_FP8_CODES, "columnwise codes replace the activation's slots");

/* A row of the lane's inputs: gate and linear values, which may alternate, in memory format, and the probability. */
typedef struct gmm_cast_act_row {
    gmm__raw8 a, b;
    float prob;
} gmm_cast_act_row;

/* Loads row `row` of the inputs from the lane's gate column `col` on. Everything else is a kernel parameter, so that
   addresses take few registers. */
GMM__DEVICE void gmm_cast_act_load(const gmm__quant_args *a, int32_t row, int32_t col, gmm_cast_act_row *dst) {
    const uint16_t *src = (const uint16_t *)a->src.data + ((int64_t)row * (int32_t)a->src.ld + col);
    const uint4 v = __ldg((const uint4 *)(const void *)src);
    uint4 u = make_uint4(0u, 0u, 0u, 0u);
    if (a->act.gated) u = __ldg((const uint4 *)(const void *)(src + a->act.linear));
    dst->prob = a->act.prob ? a->act.prob[row] : 1.0f;
    dst->a.w[0] = v.x; dst->a.w[1] = v.y; dst->a.w[2] = v.z; dst->a.w[3] = v.w;
    dst->b.w[0] = u.x; dst->b.w[1] = u.y; dst->b.w[2] = u.z; dst->b.w[3] = u.w;
}
/* Loads the lane's rows from its slots; zeros behind the `rows` that exist, or if its columns do not exist. */
GMM__DEVICE void gmm_cast_load_slots(const uint4 *own, int32_t in_cols, int32_t rows, uint32_t x[8][8]) {
    int32_t i;
#pragma unroll
    for (i = 0; i < 8; i++) {
        const uint4 v = in_cols && i < rows ? own[i * GMM__QUANT_THREADS] : make_uint4(0u, 0u, 0u, 0u);
        x[i][0] = v.x;
        x[i][1] = v.y;
        x[i][2] = v.z;
        x[i][3] = v.w;
    }
}
/* gmm_cast_load of the activation. A row is computed while its successor is loaded, and its registers take the row
   behind that one, or the last one again. The slots may be overwritten behind a barrier. */
GMM__DEVICE void gmm_cast_load_act(const gmm_cast_tile *t, uint8_t *slots, uint32_t x[8][8]) {
    const gmm__act_source *act = &t->a->act;
    const int32_t alternate = act->layout == GMM__GLU_PAIRS, rows = t->in_cols ? min(t->valid_rows, 8) : 0;
    const int32_t row = t->p.source_row + t->p.row + t->row0;
    const int32_t col = alternate ? 2 * (t->c0 + t->col0) : gmm__act_gate_column(t->c0 + t->col0, act->interleave);
    uint4 *own = (uint4 *)(void *)slots + threadIdx.x;
    gmm_cast_act_row next[2];
    int32_t i, j, k;
    if (rows > 0)
#pragma unroll
        for (j = 0; j < 2; j++) gmm_cast_act_load(t->a, row + min(j, rows - 1), col, &next[j]);
#pragma unroll 1
    for (i = 0; i < rows; i += 2) {
#pragma unroll
        for (j = 0; j < 2; j++) {
            const float p = next[j].prob;
            float gate[8], linear[8], h[8], d_gate[8], d_linear[8];
            uint32_t w[4];
            if (alternate) gmm__deinterleave(t->source, &next[j].a, &next[j].b);
#pragma unroll
            for (k = 0; k < 8; k++) {
                gate[k] = gmm__word_value(t->source, next[j].a.w, k);
                linear[k] = gmm__word_value(t->source, next[j].b.w, k);
            }
            gmm_cast_act_load(t->a, row + min(i + 2 + j, rows - 1), col, &next[j]);
            gmm__act_x8(act->kind, 0, act->coef, gate, linear, h, d_gate, d_linear);
#pragma unroll
            for (k = 0; k < 4; k++) w[k] = gmm_pack2(t->source, p * h[2 * k], p * h[2 * k + 1]);
            own[(i + j) * GMM__QUANT_THREADS] = make_uint4(w[0], w[1], w[2], w[3]);
        }
    }
    gmm_cast_load_slots(own, 1, rows, x);
}

/* The gradient of z is computed for a tile of 128 columns of h. It is a tile of gate columns and, if the activation is
   gated, a tile of linear columns: the 128 columns lie in one block of gate columns. As for h, values are rounded as
   the activation kernel stores them, and lie in slots of the lane: eight rows of the gradient of the gate columns, then
   eight rows of that of the linear columns. A quarter of a warp adds up a part of dprob. */

/* Where a lane is in the rows of z, dy and prob, and the values of its row. */
typedef struct gmm_cast_gradient_row {
    const uint16_t *z, *dy;
    const float *prob;
    uint4 gate, linear, g;
    float p;
} gmm_cast_gradient_row;
GMM__DEVICE void gmm_cast_gradient_load(const gmm__act_source *act, gmm_cast_gradient_row *r) {
    r->gate = __ldg((const uint4 *)(const void *)r->z);
    r->linear = make_uint4(0u, 0u, 0u, 0u);
    if (act->gated) r->linear = __ldg((const uint4 *)(const void *)(r->z + act->linear));
    r->g = __ldg((const uint4 *)(const void *)r->dy);
    r->p = act->prob ? *r->prob : 1.0f;
}
GMM__DEVICE gmm_cast_gradient_row gmm_cast_gradient_begin(const gmm_cast_tile *t, int32_t h_col) {
    const gmm__act_source *act = &t->a->act;
    const int64_t row = t->p.source_row + t->p.row + min(t->row0, t->p.m - 1);
    gmm_cast_gradient_row r;
    r.z = (const uint16_t *)t->a->src.data + (row * t->a->src.ld + gmm__act_gate_column(h_col, act->interleave));
    r.dy = act->dy + (row * act->dy_ld + h_col);
    r.prob = act->prob + row;
    gmm_cast_gradient_load(act, &r);
    return r;
}
GMM__DEVICE void gmm_cast_unpack8(gmm_dtype dtype, uint4 v, float x[8]) {
    const uint32_t words[4] = { v.x, v.y, v.z, v.w };
    int32_t i;
#pragma unroll
    for (i = 0; i < 8; i++) x[i] = gmm__word_value(dtype, words, i);
}

/* Computes the slots, and writes the parts of dprob, of the tile of h at which t stands. Rows behind the strip's last
   one repeat it, and columns behind the last one repeat the first; these values are not used. */
GMM__DEVICE void gmm_cast_compute_gradient(const gmm_cast_tile *t, uint8_t *slots) {
    const gmm__act_source *act = &t->a->act;
    const int32_t h_col = t->c0 + t->col0, exists = h_col < act->ffn;
    gmm_cast_gradient_row next = gmm_cast_gradient_begin(t, exists ? h_col : 0);
    float *dots = act->dots + ((int64_t)(h_col / GMM_ACT_DOT_COLS) * t->a->rows + t->p.source_row + t->p.row +
                               t->row0);
    const int32_t dot_rows = exists && (gmm__lane() & 7) == 0 ? t->valid_rows : 0; /* of which the lane writes dots */
    uint4 *own = (uint4 *)(void *)slots + threadIdx.x;
    int32_t i, k;
#pragma unroll 1
    for (i = 0; i < 8; i++, own += GMM__QUANT_THREADS, dots++) {
        const float p = next.p;
        float gate[8], linear[8], g[8], h[8], d_gate[8], d_linear[8], dot = 0.0f;
        gmm_cast_unpack8(t->source, next.gate, gate);
        gmm_cast_unpack8(t->source, next.linear, linear);
        gmm_cast_unpack8(t->source, next.g, g);
        if (i + 1 < t->valid_rows) {
            next.z += t->a->src.ld;
            next.dy += act->dy_ld;
            next.prob++;
        }
        gmm_cast_gradient_load(act, &next);
        gmm__act_x8(act->kind, 0, act->coef, gate, linear, h, d_gate, d_linear);
#pragma unroll
        for (k = 0; k < 8; k++) {
            dot = fmaf(g[k], h[k], dot);
            d_gate[k] *= p * g[k];
            d_linear[k] *= p * g[k];
        }
        own[0] = gmm_pack8(t->source, d_gate);
        if (act->gated) own[8 * GMM__QUANT_THREADS] = gmm_pack8(t->source, d_linear);
        if (!act->dots) continue;
        dot = gmm__quarter_warp_sum(exists ? dot : 0.0f);
        if (i < dot_rows) *dots = dot;
    }
}
/* Moves from the tile of h that begins at column h0 to a tile of its gradient, `linear` 0 or 1, and loads it from the
   slots. */
GMM__DEVICE void gmm_cast_load_gradient(gmm_cast_tile *t, int32_t h0, int32_t linear, const uint8_t *slots,
                                        uint32_t x[8][8]) {
    const gmm__act_source *act = &t->a->act;
    const uint4 *own = (const uint4 *)(const void *)slots + (8 * linear * GMM__QUANT_THREADS + (int32_t)threadIdx.x);
    const int32_t c0 = gmm__act_gate_column(h0, act->interleave) + linear * act->linear;
    t->end = c0 + act->ffn - h0;
    gmm_cast_tile_at(t, c0);
    gmm_cast_load_slots(own, t->in_cols, t->valid_rows, x);
}
/* --- amaxes of vectorized sources: stages of gmm_amax --- */

/* Maxima of rows over the warp's 64 columns. partials: by half of the tile's columns. Each step of the exchange halves
   the rows of a lane, until lane 8 i + j has row j of lane row i. */
GMM__DEVICE void gmm_amax_rows(const gmm_cast_tile *t, const uint32_t x[8][8], uint32_t (*partials)[GMM_TILE]) {
    const int32_t lane = gmm__lane(), lane_col = lane & 7;
    uint32_t row[8];
    int32_t i, k;
    gmm_cast_row_maxima(t->source, x, row, 0, row);
#pragma unroll
    for (k = 4; k >= 1; k >>= 1)
#pragma unroll
        for (i = 0; i < k; i++) {
            const uint32_t own = lane_col & k ? row[i + k] : row[i];
            const uint32_t sent = lane_col & k ? row[i] : row[i + k];
            row[i] = max(own, __shfl_xor_sync(0xFFFFFFFFu, sent, k));
        }
    partials[t->col0 / GMM_CAST_WARP_COLS][t->row0 + lane_col] = row[0];
}
/* Maxima of columns over the warp's 32 rows. partials: by quarter of the tile's rows. */
GMM__DEVICE void gmm_amax_cols(const gmm_cast_tile *t, const uint32_t x[8][8], uint32_t (*partials)[GMM_TILE]) {
    const int32_t lane_row = gmm__lane() >> 3;
    uint32_t col[8];
    int32_t k;
    gmm_cast_col_maxima(t->source, x, col);
    gmm_cast_reduce_cols(t->source, col);
#pragma unroll
    for (k = 0; k < 8; k++)
        if (k / 2 == lane_row)
            partials[t->row0 / GMM_CAST_WARP_ROWS][t->col0 + k] = gmm_f32_bits(gmm__word_value(t->source, col, k));
}
/* Raises the amaxes of the tile's rows (threads 0 to 127) and columns (the others). All threads call it; they compute
   addresses before its barrier, while they would wait. */
GMM__DEVICE void gmm_amax_store_lines(const gmm_cast_tile *t, uint32_t (*partials)[4][GMM_TILE]) {
    const gmm__quant_args *a = t->a;
    const gmm_cast_strip *p = &t->p;
    const int32_t copy = threadIdx.x >= GMM_TILE, l = threadIdx.x & (GMM_TILE - 1);
    uint32_t *dst = copy ? (uint32_t *)a->col_amax + p->unit * a->cols + t->c0 + l
                         : (uint32_t *)a->row_amax + (a->grouped ? p->source_row : (int64_t)p->unit * p->rows) +
                               p->row + l;
    uint32_t maximum;
    int32_t i;
    __syncthreads();
    if (!(copy ? a->col_amax : a->row_amax) || l >= (copy ? t->cols - t->c0 : p->m)) return;
    maximum = partials[copy][0][l];
    for (i = 1; i < (copy ? 4 : 2); i++) maximum = max(maximum, partials[copy][i][l]);
    gmm_cast_raise_amax(dst, maximum);
}

/* Maximum of the warp's part of the tile, and in the instances with a transform (`hadamard`) of that. */
GMM__DEVICE void gmm_amax_unit(const gmm_cast_tile *t, int32_t hadamard, uint32_t x[8][8],
                               uint32_t (*warp_maxima)[GMM__QUANT_WARPS]) {
    const int32_t lower = gmm__lane() >> 3 & 1;
    const gmm_format *f = &t->a->format;
    uint32_t maximum = gmm_cast_warp_max(t->source, x);
    if (gmm__lane() == 0) warp_maxima[0][gmm__warp()] = maximum;
    if (!hadamard) return;
    if (f->hadamard && t->columnwise) {
        gmm_hadamard_flip_signs(x, (uint32_t)f->hadamard >> 8 * lower);
        maximum = __reduce_max_sync(0xFFFFFFFFu, gmm_hadamard_amax(x, lower));
    }
    if (gmm__lane() == 0) warp_maxima[1][gmm__warp()] = maximum;
}
/* Raises the amaxes of the unit, after a barrier: thread 0 that of the source, thread 1 that of the transform. */
GMM__DEVICE void gmm_amax_store_unit(const gmm_cast_tile *t, int32_t hadamard,
                                     uint32_t (*warp_maxima)[GMM__QUANT_WARPS]) {
    const int32_t thread = (int32_t)threadIdx.x;
    uint32_t maximum;
    int32_t i;
    if (thread > hadamard) return;
    maximum = warp_maxima[thread][0];
    for (i = 1; i < GMM__QUANT_WARPS; i++) maximum = max(maximum, warp_maxima[thread][i]);
    gmm_cast_raise_amax((uint32_t *)t->a->amax[thread] + t->p.unit, maximum);
}
/* --- FP8 casts with fp32 scales: stages of gmm_cast_tensor, _row, _1x128 and _128x128 --- */

/* Strides between the scales of rows and of columns in shared memory; odd, so that they fall into different banks. */
enum {
    GMM_CAST_ROW_STEP = 3, /* maxima of a row: two halves, one per warp; the scale replaces the first */
    GMM_CAST_COL_STEP = 5  /* maxima of a column: four quarters */
};
typedef float gmm_cast_fp8_scales[GMM_CAST_COL_STEP * GMM_TILE];
typedef struct gmm_cast_fp8 {
    gmm_scaling scaling;         /* a constant of the kernel's instance, as `source` is */
    gmm__cast_source source;
    gmm_cast_fp8_scales *scales; /* [2]: of rows and of columns */
    uint8_t *codes;              /* the tile's columnwise codes */
    float qmax;                  /* largest value of the dtype */
    int32_t e5m2;
} gmm_cast_fp8;

/* 128X128, and TENSOR with delayed scaling: the amax of each warp's part of the tile. */
GMM__DEVICE uint32_t gmm_cast_fp8_warp_amax(const gmm_cast_fp8 *c, const gmm_cast_tile *t, const uint32_t x[8][8]) {
    const uint32_t maximum = gmm_cast_warp_max(t->source, x);
    if (gmm__lane() == 0) c->scales[0][gmm__warp()] = gmm_f32_from_bits(maximum);
    return maximum;
}
/* TENSOR, delayed scaling: the tile's amax raises those of the copies, after all stores and a barrier. */
GMM__DEVICE void gmm_cast_fp8_record_amax(const gmm_cast_fp8 *c, const gmm_cast_tile *t, uint32_t maximum) {
    const int32_t thread = (int32_t)threadIdx.x;
    uint32_t *dst = (uint32_t *)(thread ? t->a->columnwise.amax : t->a->rowwise.amax);
    int32_t i;
    if (thread >= 2) return;
    for (i = 0; i < GMM__QUANT_WARPS; i++) maximum = max(maximum, gmm_f32_bits(c->scales[0][i]));
    if ((thread ? t->columnwise : t->rowwise) && dst) gmm_cast_raise_amax(dst + t->p.unit, maximum);
}

/* ROW: scales of the tile's rows and columns from amaxes in device memory. Threads 0 to 127 have a row each, the others
   a column. The scales of columns are stored by gmm__quant_scales. */
GMM__DEVICE void gmm_cast_fp8_line_scales(const gmm_cast_fp8 *c, const gmm_cast_tile *t) {
    const gmm__quant_args *a = t->a;
    const gmm_cast_strip *p = &t->p;
    const int32_t thread = (int32_t)threadIdx.x;
    if (thread < GMM_TILE && t->rowwise) {
        const int64_t row = (a->grouped ? p->source_row : (int64_t)p->unit * p->rows) + p->row + thread;
        const float scale = gmm__quant_scale(a, c->qmax, 0, thread < p->m ? a->row_amax[row] : 0.0f);
        c->scales[0][thread * GMM_CAST_ROW_STEP] = scale;
        if (t->c0 == 0 && thread < p->m)
            ((float *)(void *)gmm_cast_scales(t, 0, 0))[(a->grouped ? p->source_row : 0) + p->row + thread] =
                gmm_scale_inverse(scale);
    }
    if (thread >= GMM_TILE && t->columnwise) {
        const int32_t col = thread - GMM_TILE;
        c->scales[1][col * GMM_CAST_COL_STEP] = gmm__quant_scale(
            a, c->qmax, 0, col < t->end - t->c0 ? a->col_amax[p->unit * a->cols + t->c0 + col] : 0.0f);
    }
}

/* 1X128: maxima of the warp's parts of rows and columns. */
GMM__DEVICE void gmm_cast_fp8_line_maxima(const gmm_cast_fp8 *c, const gmm_cast_tile *t, const uint32_t x[8][8]) {
    uint32_t row[8], col[8];
    int32_t i;
    gmm_cast_row_maxima(t->source, x, row, t->source != GMM_F32, col); /* F32 sources would spill registers */
    if (t->rowwise) {
#pragma unroll
        for (i = 0; i < 8; i++) {
            const uint32_t bits = gmm__quant_block_max(row[i], 8);
            if ((gmm__lane() & 7) == 0)
                c->scales[0][(t->row0 + i) * GMM_CAST_ROW_STEP + (t->col0 >> 6)] = gmm_f32_from_bits(bits);
        }
    }
    if (t->columnwise) {
        if (t->source == GMM_F32) gmm_cast_col_maxima(t->source, x, col);
        gmm_cast_reduce_cols(t->source, col);
        if (gmm__lane() >> 3 == 0)
#pragma unroll
            for (i = 0; i < 8; i++)
                c->scales[1][(t->col0 + i) * GMM_CAST_COL_STEP + (t->row0 >> 5)] = gmm__word_value(t->source, col, i);
    }
}
/* 1X128: scales from maxima, after a barrier. Threads 0 to 127 have a row each, the others a column; padding of the
   scales is 0. */
GMM__DEVICE void gmm_cast_fp8_1x128_scales(const gmm_cast_fp8 *c, const gmm_cast_tile *t) {
    const gmm__quant_args *a = t->a;
    const gmm_cast_strip *p = &t->p;
    const int32_t thread = (int32_t)threadIdx.x, copy = thread >= GMM_TILE, l = thread & (GMM_TILE - 1);
    const int32_t valid_line = l < (copy ? t->end - t->c0 : p->m);
    const gmm_mat *m = copy ? &a->columnwise : &a->rowwise;
    if (m->dtype != GMM_NONE) {
        const int64_t lines = copy ? (a->cols + 3) & ~(int64_t)3 : (int64_t)((t->padded_rows + 3) & ~3);
        const int64_t line = (copy ? t->c0 : p->row) + l, block = (copy ? p->row : t->c0) >> 7;
        uint8_t *dst = gmm_cast_scales(t, copy, (int64_t)(copy ? p->padded_row >> 7 : p->padded_row) *
                                                    (copy ? lines : (a->cols + 127) >> 7) * 4);
        float *smem = c->scales[copy] + l * (copy ? GMM_CAST_COL_STEP : GMM_CAST_ROW_STEP);
        uint32_t maximum = 0;
        float scale;
        int32_t i;
        for (i = 0; i < (copy ? 4 : 2); i++) maximum = max(maximum, gmm_f32_bits(smem[i]));
        scale = gmm__quant_scale(a, c->qmax, 1, gmm_f32_from_bits(maximum));
        smem[0] = scale;
        if (line < lines) ((float *)(void *)dst)[block * lines + line] = valid_line ? gmm_scale_inverse(scale) : 0.0f;
    }
}

/* 128X128: the scale of the tile from maxima, after a barrier. The padding is behind the last block of a line. */
GMM__DEVICE float gmm_cast_fp8_128x128_scale(const gmm_cast_fp8 *c, const gmm_cast_tile *t) {
    const gmm__quant_args *a = t->a;
    const gmm_cast_strip *p = &t->p;
    const int32_t thread = (int32_t)threadIdx.x;
    uint32_t maximum = 0;
    float scale;
    int32_t k;
    for (k = 0; k < GMM__QUANT_WARPS; k++) maximum = max(maximum, gmm_f32_bits(c->scales[0][k]));
    scale = gmm__quant_scale(a, c->qmax, 1, gmm_f32_from_bits(maximum));
    for (k = 0; k < 2; k++) {
        const int32_t line = (int32_t)(k ? t->c0 : p->row) / 128, block = (int32_t)(k ? p->row : t->c0) / 128;
        const int32_t blocks = (int32_t)(((k ? p->rows : a->cols) + 127) / 128);
        const int32_t padded_blocks = (blocks + 3) & ~3;
        const int32_t stores = thread == 0 || (block == blocks - 1 && block + thread < padded_blocks);
        uint8_t *dst = gmm_cast_scales(t, k, 0);
        if ((k ? t->columnwise : t->rowwise) && stores)
            ((float *)(void *)dst)[(int64_t)line * padded_blocks + block + thread] =
                thread == 0 ? gmm_scale_inverse(scale) : 0.0f;
    }
    return scale;
}

/* Elements of the lane's row or column number l times their scale. line_scales: of ROW and 1X128, the scale of the
   lane's line number 0; tile_scale: of TENSOR and 128X128. */
GMM__DEVICE void gmm_cast_fp8_products(const gmm_cast_fp8 *c, const gmm_cast_tile *t, const uint32_t x[8][8],
                                       int32_t columnwise, int32_t l, const float *line_scales, float tile_scale,
                                       float v[8]) {
    const int32_t by_line = c->scaling == GMM_SCALING_ROW || c->scaling == GMM_SCALING_1X128;
    const float scale = by_line ? line_scales[l * (columnwise ? GMM_CAST_COL_STEP : GMM_CAST_ROW_STEP)] : tile_scale;
    int32_t i;
    gmm_cast_line(t->source, x, columnwise, l, v);
#pragma unroll
    for (i = 0; i < 8; i++) v[i] = gmm__fmul(v[i], scale);
}
/* Encodes and stores the lane's rows. */
GMM__DEVICE void gmm_cast_fp8_encode_rows(const gmm_cast_fp8 *c, const gmm_cast_tile *t, const uint32_t x[8][8],
                                          float tile_scale) {
    const gmm__quant_args *a = t->a;
    const float *scales = c->scales[0] + t->row0 * GMM_CAST_ROW_STEP;
    uint8_t *dst = gmm_cast_data(&a->rowwise, a->step[0], t->p.unit) +
                   (t->p.source_row + t->p.row + t->row0) * a->rowwise.ld + t->c0 + t->col0;
    int32_t i;
#pragma unroll
    for (i = 0; i < 8; i++, dst += a->rowwise.ld) {
        float v[8];
        gmm_cast_fp8_products(c, t, x, 0, i, scales, tile_scale, v);
        if (i < t->valid_rows)
            gmm_st_global_v2_b32(dst, gmm_encode_fp8x4(c->e5m2, v), gmm_encode_fp8x4(c->e5m2, v + 4));
    }
}
/* Encodes the lane's columns into shared memory; after a barrier the CTA stores the tile's columns. */
GMM__DEVICE void gmm_cast_fp8_encode_cols(const gmm_cast_fp8 *c, const gmm_cast_tile *t, const uint32_t x[8][8],
                                          float tile_scale) {
    const int32_t thread = (int32_t)threadIdx.x, bytes = GMM_CAST_FP8_COLUMN;
    const float *scales = c->scales[1] + t->col0 * GMM_CAST_COL_STEP;
    uint8_t *dst = gmm_cast_col_codes(t, thread, bytes, t->a->columnwise.ld);
    uint8_t *smem = c->codes + gmm_cast_smem_column(bytes, t->col0) + t->row0;
    int32_t j;
#pragma unroll
    for (j = 0; j < 8; j++) {
        float v[8];
        gmm_cast_fp8_products(c, t, x, 1, j, scales, tile_scale, v);
        *(uint2 *)(void *)(smem + j * bytes) = make_uint2(gmm_encode_fp8x4(c->e5m2, v),
                                                          gmm_encode_fp8x4(c->e5m2, v + 4));
    }
    __syncthreads();
    gmm_cast_store_cols(t, thread, bytes, c->codes, dst, t->a->columnwise.ld);
}

/* Casts a tile that the lanes have loaded to x. Lanes that have computed it may still read it from c->codes.
   sums: whether column sums are wanted; smem_sums: [GMM_CAST_SUM_PARTS][GMM_TILE] for them. */
GMM__DEVICE void gmm_cast_fp8_tile(const gmm_cast_fp8 *c, const gmm_cast_tile *t, const uint32_t x[8][8],
                                   const int sums, float *smem_sums) {
    const gmm__quant_args *a = t->a;
    float tile_scale = 1.0f;
    uint32_t amax = 0;
    if (sums) gmm_cast_column_sums(t, 8, 8, 8, x[0], GMM_TILE, smem_sums);
    if (c->scaling == GMM_SCALING_TENSOR) {
        tile_scale = c->source != GMM__CAST_OF_ACT && !a->format.delayed
                         ? gmm__quant_scale(a, c->qmax, 0, a->amax[0][t->p.unit])
                     : a->scale         ? a->scale[t->p.unit] : 1.0f;
        if (a->record) amax = gmm_cast_fp8_warp_amax(c, t, x);
        if (c->source != GMM__CAST_OF_MATRIX || sums) __syncthreads(); /* a barrier follows maxima of lines anyway */
    } else {
        if (c->scaling == GMM_SCALING_ROW) gmm_cast_fp8_line_scales(c, t);
        if (c->scaling == GMM_SCALING_1X128) gmm_cast_fp8_line_maxima(c, t, x);
        if (c->scaling == GMM_SCALING_128X128) gmm_cast_fp8_warp_amax(c, t, x);
        __syncthreads();
    }
    if (sums) gmm_cast_store_sums(t, GMM_TILE, smem_sums);
    if (c->scaling == GMM_SCALING_128X128) tile_scale = gmm_cast_fp8_128x128_scale(c, t);
    if (c->scaling == GMM_SCALING_1X128) {
        gmm_cast_fp8_1x128_scales(c, t);
        __syncthreads();
    }
    if (t->rowwise && t->in_cols) gmm_cast_fp8_encode_rows(c, t, x, tile_scale);
    if (t->columnwise) gmm_cast_fp8_encode_cols(c, t, x, tile_scale);
    if (c->scaling == GMM_SCALING_TENSOR && a->record) {
        __syncthreads();
        gmm_cast_fp8_record_amax(c, t, amax);
    }
}
/* --- MX32 casts: stages of gmm_cast_mx32 --- */

/* Copies of both directions are stored in the order of the source, and stores of half lines of memory are slow. So a
   lane holds sixteen rows of sixteen bytes, and sixteen lanes write complete lines. A warp has 32 rows, that is a block
   of each column, by 16 w columns (w: elements in sixteen bytes), and needs no other warp:

       columns   0       16 w    32 w      columns   0   w   2 w               15 w  16 w
       rows  0   +-------+-------+         rows  0   +---+---+---+---      ---+-----+
                 | warp 0| warp 4|                   | 0 | 1 | 2 |     ...    |  15 |
            32   +-------+-------+             16    +---+---+---+---      ---+-----+
                 | warp 1| warp 5|                   |16 |17 |18 |     ...    |  31 |
                  ... to row 128                     +---+---+---+---      ---+-----+

   32 / w adjacent lanes share a block of a row, two lanes above one another a block of a column; each lane computes the
   scales of its part of the blocks. */
typedef struct gmm_cast_mx32 {
    float inverse; /* reciprocal of the dtype's largest value */
    int32_t e5m2;
} gmm_cast_mx32;

/* gmm_cast_tile_init for this tile. */
GMM__DEVICE gmm_cast_tile gmm_cast_mx32_tile_init(const gmm__quant_args *a, gmm_dtype source) {
    const int32_t lane = gmm__lane(), warp = gmm__warp(), width = gmm__elems16(source);
    gmm_cast_tile t = gmm_cast_tile_init(a, source);
    t.row0 = warp % 4 * 32 + 16 * (lane >> 4);
    t.col0 = warp / 4 * 16 * width + width * (lane & 15);
    return t;
}

/* Words of the maxima of sixteen rows: elements of 16 bits have two maxima per word. */
GMM__DEVICE int32_t gmm_cast_mx32_row_words(gmm_dtype source) { return source == GMM_F32 ? 16 : 8; }
/* Maxima of the lane's parts of its rows, with the sign of gmm__word_max_signed. */
GMM__DEVICE void gmm_cast_mx32_row_maxima(gmm_dtype source, const uint32_t x[16][4], uint32_t row[16]) {
    const int32_t rows_per_word = 16 / gmm_cast_mx32_row_words(source);
    int32_t i, k;
#pragma unroll
    for (i = 0; i < 16; i += rows_per_word) {
        uint32_t maximum = x[i][0], second;
#pragma unroll
        for (k = 1; k < 4; k++) maximum = gmm__word_max_signed(source, maximum, x[i][k]);
        if (rows_per_word == 2) {
            second = x[i + 1][0];
#pragma unroll
            for (k = 1; k < 4; k++) second = gmm__word_max_signed(source, second, x[i + 1][k]);
            maximum = gmm__word_max_signed(source, __byte_perm(maximum, second, 0x5410),
                                           __byte_perm(maximum, second, 0x7632));
        }
        row[i / rows_per_word] = maximum;
    }
}
/* Blocks of 32 x 32: the maximum of the lanes that share one. It replaces the maxima of rows that exist. */
GMM__DEVICE uint32_t gmm_cast_mx32_square_max(const gmm_cast_tile *t, uint32_t row[16]) {
    const int32_t words = gmm_cast_mx32_row_words(t->source), row_lanes = 32 / gmm__elems16(t->source);
    uint32_t maximum = row[0];
    int32_t i;
#pragma unroll
    for (i = 1; i < words; i++) maximum = gmm__word_max_signed(t->source, maximum, row[i]);
    if (t->source != GMM_F32) maximum = gmm__word_max_signed(t->source, maximum, __byte_perm(maximum, 0, 0x1032));
#pragma unroll
    for (i = 1; i < 32; i = i == row_lanes / 2 ? 16 : 2 * i)
        maximum = gmm__word_max_signed(t->source, maximum, __shfl_xor_sync(0xFFFFFFFFu, maximum, i));
    maximum = gmm__word_max(t->source, 0, maximum);
#pragma unroll
    for (i = 0; i < words; i++)
        if (t->source == GMM_F32) row[i] = i < t->valid_rows ? maximum : 0;
        else row[i] = 2 * i + 1 < t->valid_rows ? maximum : 2 * i < t->valid_rows ? maximum & 0xFFFFu : 0;
    return maximum;
}

/* gmm_mx_scale of the maxima in two words, two (F32) or four. */
GMM__DEVICE uint32_t gmm_cast_mx32_scales(gmm_dtype source, const uint32_t maxima[2], float inverse) {
    uint32_t bytes = 0;
    int32_t i;
#pragma unroll
    for (i = 0; i < 16 / gmm_cast_mx32_row_words(source) * 2; i++) {
        const uint32_t u = gmm_f32_bits(gmm__fmul(gmm__word_value(source, maxima, i), inverse));
        const uint32_t exponent = (u + 0x7FFFFFu) >> 23;
        bytes |= (u <= 0x400000u ? 0u : exponent < 254u ? exponent : 254u) << 8 * i;
    }
    return bytes;
}
/* gmm_e8m0_reciprocal of scale byte i of an array of words. */
GMM__DEVICE float gmm_cast_mx32_reciprocal(const uint32_t *scales4, int32_t i) {
    const uint32_t bits = (254u - ((scales4[i >> 2] >> 8 * (i & 3)) & 0xFFu)) << 23;
    return gmm_f32_from_bits(bits > 0x400000u ? bits : 0x400000u);
}

/* Scale bytes of the lane's part of the rows of its block, four rows or (F32) two. Each step of the exchange halves the
   rows of a lane, until it has two words. */
GMM__DEVICE uint32_t gmm_cast_mx32_row_scales(const gmm_cast_mx32 *c, gmm_dtype source, uint32_t row[16]) {
    const int32_t words = gmm_cast_mx32_row_words(source), lane_col = gmm__lane() & 15;
    int32_t i, k;
#pragma unroll
    for (k = words / 2; k >= 2; k >>= 1)
#pragma unroll
        for (i = 0; i < words / 2; i++)
            if (i < k) {
                const int32_t lane_stride = words / 2 / k, upper = lane_col & lane_stride;
                const uint32_t own = upper ? row[i + k] : row[i];
                const uint32_t other = __shfl_xor_sync(0xFFFFFFFFu, upper ? row[i] : row[i + k], lane_stride);
                row[i] = gmm__word_max_signed(source, own, other);
            }
    row[0] = gmm__word_max(source, 0, row[0]);
    row[1] = gmm__word_max(source, 0, row[1]);
    return gmm_cast_mx32_scales(source, row, c->inverse);
}
/* Stores the scales of rows. Bytes are transposed between lanes: scales of several rows become scales of four (F32:
   two) adjacent blocks of one row. */
GMM__DEVICE void gmm_cast_mx32_store_row_scales(const gmm_cast_tile *t, uint32_t lane_scales) {
    const gmm_mat *m = &t->a->rowwise;
    const int32_t lane_col = gmm__lane() & 15, along = (t->cols + 127) / 128 * 4;
    const int32_t block = (t->c0 + t->col0 - gmm__elems16(t->source) * lane_col) / 32;
    const int32_t row = t->row0 + 8 * (lane_col & 1) + 2 * (lane_col & 2) + (lane_col >> 1 & 2) + (lane_col >> 3);
    uint8_t *scale = gmm_cast_scales(t, 0, (int64_t)t->p.padded_row * along);
    uint32_t other;
    if (t->source != GMM_F32) {
        other = __shfl_xor_sync(0xFFFFFFFFu, lane_scales, 4);
        lane_scales = __byte_perm(lane_scales, other, lane_col & 4 ? 0x3726 : 0x5140);
    }
    other = __shfl_xor_sync(0xFFFFFFFFu, lane_scales, 8);
    if (t->source != GMM_F32) {
        lane_scales = __byte_perm(lane_scales, other, lane_col & 8 ? 0x3276 : 0x5410);
        gmm_cast_store_scales4(scale, m->scale_order, t->p.row, block, along, row, 0, lane_scales);
    } else if (block < along)
        *(uint16_t *)(void *)(scale + (m->scale_order == GMM_SCALES_SWIZZLED
                                       ? gmm_swizzle_offset(t->p.row + row, block, along)
                                       : (int64_t)(t->p.row + row) * along + block)) =
            (uint16_t)__byte_perm(lane_scales, other, lane_col & 8 ? 0x4415 : 0x4440);
}
/* Scale bytes of all sixteen rows, from the lanes of the block. With F32 those of four rows are spread over two lanes.
   */
GMM__DEVICE void gmm_cast_mx32_gather_row_scales(gmm_dtype source, uint32_t lane_scales, uint32_t scales4[4]) {
    const int32_t lane_col = gmm__lane() & 15;
    uint32_t other, other2;
    if (source == GMM_F32) {
        other = __shfl_xor_sync(0xFFFFFFFFu, lane_scales, 4);
        lane_scales = lane_col & 4 ? other | lane_scales << 16 : lane_scales | other << 16;
    }
    other = __shfl_xor_sync(0xFFFFFFFFu, lane_scales, 2);
    scales4[1] = lane_col & 2 ? lane_scales : other;
    scales4[0] = lane_col & 2 ? other : lane_scales;
    other = __shfl_xor_sync(0xFFFFFFFFu, scales4[0], 1);
    other2 = __shfl_xor_sync(0xFFFFFFFFu, scales4[1], 1);
    scales4[2] = lane_col & 1 ? scales4[0] : other;
    scales4[3] = lane_col & 1 ? scales4[1] : other2;
    scales4[0] = lane_col & 1 ? other : scales4[0];
    scales4[1] = lane_col & 1 ? other2 : scales4[1];
}

/* Scale bytes of the columns that the lane computes: its left half, or its right half in the lower lane. square_max:
   the maximum of the block of 32 x 32, if blocks are square. */
GMM__DEVICE uint32_t gmm_cast_mx32_col_scales(const gmm_cast_mx32 *c, const gmm_cast_tile *t, const uint32_t x[16][4],
                                              uint32_t square_max) {
    const int32_t lower = gmm__lane() >> 4;
    uint32_t maximum[4];
    int32_t i, k;
#pragma unroll
    for (k = 0; k < 4; k++) {
        maximum[k] = x[0][k];
#pragma unroll
        for (i = 1; i < 16; i++) maximum[k] = gmm__word_max_signed(t->source, maximum[k], x[i][k]);
    }
#pragma unroll
    for (k = 0; k < 2; k++) {
        const uint32_t own = lower ? maximum[k + 2] : maximum[k];
        uint32_t other = __shfl_xor_sync(0xFFFFFFFFu, lower ? maximum[k] : maximum[k + 2], 16);
        other = gmm__word_max(t->source, 0, gmm__word_max_signed(t->source, own, other));
        maximum[k] = t->a->format.square ? t->in_cols ? square_max : 0 : other;
    }
    return gmm_cast_mx32_scales(t->source, maximum, c->inverse);
}
/* Stores the scales of columns, and returns in scales4 those of all columns of the lane. */
GMM__DEVICE void gmm_cast_mx32_store_col_scales(const gmm_cast_tile *t, uint32_t lane_scales, uint32_t scales4[2]) {
    const gmm_mat *m = &t->a->columnwise;
    const int32_t lower = gmm__lane() >> 4, count = gmm__elems16(t->source) / 2;
    const int32_t padded_cols = (t->cols + 127) & ~127, along = (t->padded_rows + 127) / 128 * 4;
    const int32_t col = t->c0 + t->col0 + count * lower, block = (t->p.row + t->row0 - 16 * lower) / 32;
    uint8_t *scale = gmm_cast_scales(t, 1, (int64_t)(t->p.padded_row / 32) * padded_cols);
    uint32_t other;
    int32_t j;
    if (col < padded_cols && m->scale_order == GMM_SCALES_SWIZZLED) {
        scale += gmm_swizzle_offset(col, block, along);
#pragma unroll
        for (j = 0; j < count; j++) scale[16 * j] = (uint8_t)(lane_scales >> 8 * j);
    } else if (col < padded_cols) {
        scale += (int64_t)block * padded_cols + col;
        if (count == 4) gmm_st_global_b32(scale, lane_scales);
        else *(uint16_t *)(void *)scale = (uint16_t)lane_scales;
    }
    other = __shfl_xor_sync(0xFFFFFFFFu, lane_scales, 16);
    scales4[0] = lower ? other : lane_scales;
    scales4[1] = lower ? lane_scales : other;
    if (count == 2) scales4[0] |= scales4[1] << 16;
}

/* Encodes and stores the lane's part of the rowwise (copy 0) or columnwise copy (copy 1), whose scales are those of
   rows or of columns; codes are in the order of the source. */
GMM__DEVICE void gmm_cast_mx32_encode(const gmm_cast_mx32 *c, const gmm_cast_tile *t, int32_t copy,
                                      const uint32_t x[16][4], const uint32_t *scales4) {
    const gmm_mat *m = copy ? &t->a->columnwise : &t->a->rowwise;
    uint8_t *dst = gmm_cast_data(m, t->a->step[copy], t->p.unit) + (t->p.source_row + t->p.row + t->row0) * m->ld +
                   t->c0 + t->col0;
    int32_t i, j;
#pragma unroll
    for (i = 0; i < 16; i++, dst += m->ld) {
        float v[8];
#pragma unroll
        for (j = 0; j < gmm__elems16(t->source); j++)
            v[j] = gmm__fmul(gmm__word_value(t->source, x[i], j), gmm_cast_mx32_reciprocal(scales4, copy ? j : i));
        if (i >= t->valid_rows) continue;
        if (t->source == GMM_F32) gmm_st_global_b32(dst, gmm_encode_fp8x4(c->e5m2, v));
        else gmm_st_global_v2_b32(dst, gmm_encode_fp8x4(c->e5m2, v), gmm_encode_fp8x4(c->e5m2, v + 4));
    }
}
/* --- NV16 casts: stages of gmm_cast_nv16 and gmm_cast_nv16_hadamard --- */

/* Lanes hold the tile as drawn in vectors.cuh. Two lanes side by side have a block of a row, two above one another a
   block of a column; each computes the scales of half of the blocks of both. Scales are bytes, which index a table of
   all encode scales that the unit can have. */
typedef struct gmm_cast_nv16 {
    int32_t right, lower;   /* whether this is the right lane of a row's block; the lower lane of a column's block */
    const float *encodes;   /* table of the rowwise copy: encode scales by scale byte. Entry 127, whose byte is NaN in
                               E4M3 and no scale, is what a block's amax is multiplied by to get its scale: mult */
    const float *encodes_t; /* table of the columnwise copy */
    uint8_t *codes;         /* the tile's columnwise codes, in shared memory */
    uint8_t *scales;        /* [GMM_TILE][GMM_TILE_BLOCKS] their scales */
    int32_t row_along, col_along; /* scales of a row and of a column of the unit, with padding */
    int64_t row_pitch, col_pitch; /* bytes between rows and between columns of codes */
} gmm_cast_nv16;

/* Computes what all tiles of a strip have in common, outside of branches, where ptxas keeps it in uniform registers. */
GMM__DEVICE void gmm_cast_nv16_move(gmm_cast_nv16 *c, const gmm_cast_tile *t) {
    c->row_along = ((t->cols + 63) >> 6) * 4;
    c->col_along = ((t->padded_rows + 63) >> 6) * 4;
    c->row_pitch = t->a->rowwise.ld / 2;
    c->col_pitch = t->a->columnwise.ld / 2;
}

/* Computes the tables of the unit, one or with `separate_amax` two. */
GMM__DEVICE void gmm_cast_nv16_tables(const gmm_cast_tile *t, int32_t separate_amax, float (*encodes)[GMM_TILE]) {
    int32_t k;
    for (k = 0; k <= separate_amax; k++) {
        const gmm_nv_global g = gmm_nv_global_of(t->a->amax[k][t->p.unit], t->a->format.e4m3_256 ? 256.0f : 448.0f);
        const int32_t thread = gmm_tid_x();
        if (thread < GMM_TILE) encodes[k][thread] = thread < 127 ? gmm_nv_encode(&g, (uint8_t)thread) : g.mult;
    }
}

/* Maxima of the lane's parts of its rows; returns whether a value is NaN. hadamard: NaN then loses its sign. */
GMM__DEVICE uint32_t gmm_cast_nv16_row_maxima(gmm_dtype source, int32_t hadamard, uint32_t x[8][8], uint32_t row[8]) {
    uint32_t has_nan = 0;
    int32_t i, k;
#pragma unroll
    for (i = 0; i < 8; i++) {
        row[i] = 0;
#pragma unroll
        for (k = 0; k < gmm__words8(source); k++) row[i] = gmm__word_max_nan(source, row[i], x[i][k]);
        row[i] = gmm__word_fold(source, row[i]);
        has_nan = max(row[i], has_nan);
    }
    has_nan = has_nan > 0x7F800000u;
    if (has_nan) gmm_cast_row_maxima(source, x, row, 0, row);
#pragma unroll
    for (i = 0; i < 32 && hadamard && has_nan; i++) x[i / 4][i % 4] = gmm_hadamard_positive_nan(x[i / 4][i % 4]);
    return has_nan;
}
/* Blocks of 16 x 16: the maximum of the four lanes that share one. It replaces the maxima of rows; rows beyond the last
   one have no scales. */
GMM__DEVICE uint32_t gmm_cast_nv16_square_max(const gmm_cast_tile *t, uint32_t row[8]) {
    uint32_t maximum = 0;
    int32_t i;
#pragma unroll
    for (i = 0; i < 8; i++) maximum = max(maximum, row[i]);
    maximum = gmm__quant_block_max(maximum, 2);
    maximum = max(maximum, __shfl_xor_sync(0xFFFFFFFFu, maximum, 8));
#pragma unroll
    for (i = 0; i < 8; i++) row[i] = i < t->valid_rows ? maximum : 0;
    return maximum;
}
/* Maxima of the lane's half of the columns of its block, as words. */
GMM__DEVICE void gmm_cast_nv16_col_maxima(gmm_dtype source, int32_t lower, const uint32_t x[8][8], uint32_t col[8]) {
    const int32_t half = gmm__words8(source) / 2;
    int32_t k;
    gmm_cast_col_maxima(source, x, col);
#pragma unroll
    for (k = 0; k < half; k++) {
        const uint32_t sent = lower ? col[k] : col[k + half];
        col[k] = gmm__word_max(source, lower ? col[k + half] : col[k], __shfl_xor_sync(0xFFFFFFFFu, sent, 8));
    }
}

/* Scale bytes of four blocks. `check`: bit 7 of the first byte is set if a product may reach 7. */
GMM__DEVICE uint32_t gmm_cast_nv16_scale4(const float amax[4], const float *encodes, int check) {
    float v[4], maximum = 0.0f;
    uint32_t scales4;
    int32_t i;
    /* infinity saturates to the largest code as well */
#pragma unroll
    for (i = 0; i < 4; i++) v[i] = gmm__fmul(amax[i], encodes[127]);
    scales4 = gmm_encode_fp8x4(0, v);
#pragma unroll
    for (i = 0; i < 4 && check; i++) {
        const float m = gmm__fmul(amax[i], encodes[(scales4 >> 8 * i) & 0x7Fu]);
        maximum = m > maximum ? m : maximum;
    }
    /* A normal scale is rounded down by at most a 17th, so that its products stay below 6.4. Subnormal and saturated
       scales may be far less than what they are rounded from. */
    return check && !(maximum < 6.75f) ? scales4 | 0x80u : scales4;
}
/* Scale bytes of the lane's 8 lines, from its own four and those of the other lane of its blocks. */
GMM__DEVICE void gmm_cast_nv16_scale8(uint32_t lane_scales, int32_t second, int32_t lane_stride, uint32_t scales4[2]) {
    const uint32_t other = __shfl_xor_sync(0xFFFFFFFFu, lane_scales, lane_stride);
    scales4[0] = second ? other : lane_scales;
    scales4[1] = second ? lane_scales : other;
}
/* Encode scale of line i of the lane, from the scale bytes of its 8 lines. */
GMM__DEVICE float gmm_cast_nv16_encode_scale(const float *encodes, const uint32_t scales4[2], int32_t i) {
    return encodes[((i & 4 ? scales4[1] : scales4[0]) >> 8 * (i & 3)) & 0x7Fu];
}
/* Scale bytes of the lane's half of the rows of its block, and in scales4 of all 8. */
GMM__DEVICE uint32_t gmm_cast_nv16_row_scales(const gmm_cast_nv16 *c, const uint32_t row[8], int check,
                                              uint32_t scales4[2]) {
    uint32_t lane_scales;
    float amax[4];
    int32_t i;
#pragma unroll
    for (i = 0; i < 4; i++) {
        const uint32_t own = c->right ? row[i + 4] : row[i];
        amax[i] = gmm_f32_from_bits(max(own, __shfl_xor_sync(0xFFFFFFFFu, c->right ? row[i] : row[i + 4], 1)));
    }
    lane_scales = gmm_cast_nv16_scale4(amax, c->encodes, check);
    gmm_cast_nv16_scale8(lane_scales, c->right, 1, scales4);
    return lane_scales;
}
/* Stores the scales of rows. Bytes are transposed between lanes: each receives those of four adjacent blocks of a row.
   */
GMM__DEVICE void gmm_cast_nv16_store_row_scales(const gmm_cast_nv16 *c, const gmm_cast_tile *t, uint32_t lane_scales) {
    const int32_t lane_col = gmm__lane() & 7, along = c->row_along;
    uint8_t *dst = gmm_cast_scales(t, 0, (int64_t)t->p.padded_row * along);
    uint32_t other;
    lane_scales &= 0x7F7F7F7Fu;
    other = __shfl_xor_sync(0xFFFFFFFFu, lane_scales, 2);
    lane_scales = __byte_perm(lane_scales, other, lane_col & 2 ? 0x3715 : 0x6240);
    other = __shfl_xor_sync(0xFFFFFFFFu, lane_scales, 4);
    lane_scales = __byte_perm(lane_scales, other, lane_col & 4 ? 0x3276 : 0x5410);
    gmm_cast_store_scales4(dst, t->a->rowwise.scale_order, t->p.row, t->c0 / 16, along,
                           t->row0 + 4 * c->right + (lane_col >> 1), t->col0 >> 6 << 2, lane_scales);
}
/* Leaves the scales of the lane's half of its columns in shared memory. */
GMM__DEVICE void gmm_cast_nv16_leave_col_scales(const gmm_cast_nv16 *c, const gmm_cast_tile *t, uint32_t lane_scales) {
    int32_t j;
#pragma unroll
    for (j = 0; j < 4; j++)
        c->scales[(t->col0 + 4 * c->lower + j) * GMM_TILE_BLOCKS + (t->row0 >> 4)] = (uint8_t)(lane_scales >> 8 * j);
}

/* E2M1 codes of the lane's row or column number l. */
GMM__DEVICE uint32_t gmm_cast_nv16_encode_line(gmm_dtype source, const uint32_t x[8][8], int32_t columnwise, int32_t l,
                                               float encode_scale) {
    float v[8];
    gmm_cast_line(source, x, columnwise, l, v);
    return gmm_e2m1x8(v, encode_scale, 0);
}
/* Encodes the lane's part again by the scalar codec, from values in device memory, where one of them is NaN or a
   product may reach 7. Lines begin at dst, `pitch` bytes apart. */
GMM__DEVICE void gmm_cast_nv16_encode_scalar(const gmm_cast_tile *t, int32_t columnwise, const float *encodes,
                                             const uint32_t scales4[2], uint8_t *dst, int64_t pitch) {
    const int32_t lines = columnwise ? 8 : t->valid_rows;
    int32_t j, k;
#pragma unroll 1
    for (k = 0; k < 64 && k >> 3 < lines; k += 2) {
        const float encode_scale = gmm_cast_nv16_encode_scale(encodes, scales4, k >> 3);
        uint32_t byte = 0;
#pragma unroll 1
        for (j = 0; j < 2; j++) {
            const int32_t line = k >> 3, along = (k & 7) + j;
            float v;
            if (columnwise && !(along < t->valid_rows && t->in_cols)) continue;
            v = columnwise ? gmm_cast_reload(t, along, line) : gmm_cast_reload(t, line, along);
            byte |= (uint32_t)gmm_f32_to_e2m1(gmm__fmul(v, encode_scale)) << 4 * j;
        }
        dst[(k >> 3) * pitch + (k & 7) / 2] = (uint8_t)byte;
    }
}
/* Codes of a square block, which both copies hold. */
GMM__DEVICE void gmm_cast_nv16_encode_square(const gmm_cast_nv16 *c, const gmm_cast_tile *t, const uint32_t x[8][8],
                                             const uint32_t scales4[2], uint32_t square_codes[8]) {
    const float encode_scale = gmm_cast_nv16_encode_scale(c->encodes, scales4, 0);
    int32_t i;
#pragma unroll
    for (i = 0; i < 8; i++) square_codes[i] = gmm_cast_nv16_encode_line(t->source, x, 0, i, encode_scale);
}
/* Where the codes of the lane's first row begin. */
GMM__DEVICE uint8_t *gmm_cast_nv16_row_codes(const gmm_cast_nv16 *c, const gmm_cast_tile *t) {
    const gmm__quant_args *a = t->a;
    return gmm_cast_data(&a->rowwise, a->step[0], t->p.unit) + (t->c0 + t->col0) / 2 +
           (t->p.source_row + t->p.row + t->row0) * c->row_pitch;
}

/* Encodes and stores the lane's rows. square_codes: codes of both copies of square blocks, else NULL. */
GMM__DEVICE void gmm_cast_nv16_encode_rows(const gmm_cast_nv16 *c, const gmm_cast_tile *t, const uint32_t x[8][8],
                                           const uint32_t scales4[2], const uint32_t square_codes[8],
                                           uint32_t has_nan) {
    const int64_t pitch = c->row_pitch;
    uint8_t *dst = gmm_cast_nv16_row_codes(c, t);
    int32_t i;
#pragma unroll
    for (i = 0; i < 8; i++, dst += pitch) {
        const float encode_scale = gmm_cast_nv16_encode_scale(c->encodes, scales4, i);
        if (i < t->valid_rows) {
            uint32_t code = square_codes[i];
            if (!t->a->format.square) code = gmm_cast_nv16_encode_line(t->source, x, 0, i, encode_scale);
            gmm_st_global_b32(dst, code);
        }
    }
    if (has_nan | ((scales4[0] | scales4[1]) & 0x80u))
        gmm_cast_nv16_encode_scalar(t, 0, c->encodes, scales4, dst - 8 * pitch, pitch);
}
/* Encodes the lane's columns into shared memory, with their scales. square_max, square_codes: of square blocks. */
GMM__DEVICE void gmm_cast_nv16_encode_cols(const gmm_cast_nv16 *c, const gmm_cast_tile *t, const uint32_t x[8][8],
                                           uint32_t square_max, uint32_t square_codes[8], uint32_t has_nan) {
    const gmm_format *f = &t->a->format;
    uint8_t *smem = c->codes + gmm_cast_smem_column(GMM_CAST_NV16_COLUMN, t->col0) + t->row0 / 2;
    uint32_t col[8], scales4[2], lane_scales;
    float amax[4];
    int32_t j;
    gmm_cast_nv16_col_maxima(t->source, c->lower, x, col);
#pragma unroll
    for (j = 0; j < 4; j++)
        amax[j] = f->square ? gmm_f32_from_bits(t->in_cols ? square_max : 0) : gmm__word_value(t->source, col, j);
    lane_scales = gmm_cast_nv16_scale4(amax, c->encodes_t, 1);
    gmm_cast_nv16_scale8(lane_scales, c->lower, 8, scales4);
    if (f->square) gmm_e2m1_transpose8x8(square_codes);
#pragma unroll
    for (j = 0; j < 8; j++) {
        const float encode_scale = gmm_cast_nv16_encode_scale(c->encodes_t, scales4, j);
        uint32_t code = square_codes[j];
        if (!f->square) code = gmm_cast_nv16_encode_line(t->source, x, 1, j, encode_scale);
        *(uint32_t *)(void *)(smem + j * GMM_CAST_NV16_COLUMN) = code;
    }
    if (has_nan | ((scales4[0] | scales4[1]) & 0x80u))
        gmm_cast_nv16_encode_scalar(t, 1, c->encodes_t, scales4, smem, GMM_CAST_NV16_COLUMN);
    gmm_cast_nv16_leave_col_scales(c, t, lane_scales & 0x7F7F7F7Fu);
}

/* BF16 with Hadamard transform or stochastic rounding. Encodes and stores rows i and i + 4 at once: each of a block's
   two lanes draws the random bits of one row for both. */
GMM__DEVICE void gmm_cast_nv16_encode_rows_random(const gmm_cast_nv16 *c, const gmm_cast_tile *t,
                                                  const uint32_t x[8][8], const uint32_t scales4[2]) {
    const gmm__quant_args *a = t->a;
    const gmm_format *f = &a->format;
    const int64_t pitch = c->row_pitch, blocks_per_row = (t->cols + 15) >> 4;
    const int64_t block = (t->p.row + t->row0 + 4 * c->right) * blocks_per_row + ((t->c0 + t->col0) >> 4);
    uint8_t *dst = gmm_cast_nv16_row_codes(c, t);
    int32_t i, k;
#pragma unroll
    for (i = 0; i < 4; i++, dst += pitch) {
        uint32_t draw[4], random[2][2];
        if (f->stochastic) {
            gmm_draw_block(a->random[0], a->random[1], a->first_group + t->p.unit, block + i * blocks_per_row,
                           GMM_ROWWISE, draw);
#pragma unroll
            for (k = 0; k < 2; k++) {
                const uint32_t other = __shfl_xor_sync(0xFFFFFFFFu, c->right ? draw[k] : draw[k + 2], 1);
                random[0][k] = c->right ? other : draw[k];
                random[1][k] = c->right ? draw[k + 2] : other;
            }
        }
#pragma unroll
        for (k = 0; k < 2; k++) {
            const float encode_scale = gmm_cast_nv16_encode_scale(c->encodes, scales4, i + 4 * k);
            uint32_t code;
            float v[8];
            gmm_cast_line(GMM_BF16, x, 0, i + 4 * k, v);
            code = f->stochastic ? gmm_e2m1x8_random(v, encode_scale, random[k]) : gmm_e2m1x8(v, encode_scale, 1);
            if (t->in_cols && i + 4 * k < t->valid_rows) gmm_st_global_b32(dst + 4 * k * pitch, code);
        }
    }
}
/* The same for columns, into shared memory with their scales: two lanes above one another exchange halves, so that a
   block of a column lies in one lane, which transforms it. */
GMM__DEVICE void gmm_cast_nv16_encode_cols_hadamard(const gmm_cast_nv16 *c, const gmm_cast_tile *t, uint32_t x[8][8]) {
    const gmm__quant_args *a = t->a;
    const gmm_format *f = &a->format;
    uint8_t *smem = c->codes + gmm_cast_smem_column(GMM_CAST_NV16_COLUMN, t->col0) +
                    4 * c->lower * GMM_CAST_NV16_COLUMN + (t->row0 & ~15) / 2;
    uint32_t y[16][2], lane_scales = 0;
    int32_t i, j, k;
    if (f->hadamard) gmm_hadamard_flip_signs(x, (uint32_t)f->hadamard >> 8 * c->lower);
    gmm_hadamard_gather16(x, c->lower, y);
#pragma unroll
    for (j = 0; j < 4; j++) {
        uint32_t column[8], draw[4], dst[2], maximum = 0;
        float encode_scale, amax[4] = { 0.0f, 0.0f, 0.0f, 0.0f };
        gmm_hadamard_column16(y, j, f->hadamard, column);
#pragma unroll
        for (i = 0; i < 8; i++) maximum = gmm__word_max(GMM_BF16, maximum, column[i]);
        amax[0] = gmm_f32_from_bits(gmm__word_fold(GMM_BF16, maximum));
        k = (int32_t)gmm_cast_nv16_scale4(amax, c->encodes_t, 0);
        encode_scale = c->encodes_t[k];
        lane_scales |= (uint32_t)k << 8 * j;
        if (f->stochastic)
            gmm_draw_block(a->random[0], a->random[1], a->first_group + t->p.unit,
                           (int64_t)(t->c0 + t->col0 + 4 * c->lower + j) * ((t->p.rows + 15) >> 4) +
                           ((t->p.row + t->row0) >> 4), GMM_COLUMNWISE, draw);
#pragma unroll
        for (k = 0; k < 2; k++) {
            float v[8];
#pragma unroll
            for (i = 0; i < 8; i++) v[i] = gmm__word_value(GMM_BF16, column + 4 * k, i);
            dst[k] = f->stochastic ? gmm_e2m1x8_random(v, encode_scale, draw + 2 * k) : gmm_e2m1x8(v, encode_scale, 1);
        }
        *(uint2 *)(void *)(smem + j * GMM_CAST_NV16_COLUMN) = make_uint2(dst[0], dst[1]);
    }
    gmm_cast_nv16_leave_col_scales(c, t, lane_scales);
}

/* Stores the columns of a tile and their scales from shared memory. Two threads have the 8 scales of a column. All
   threads call it. */
GMM__DEVICE void gmm_cast_nv16_store_cols(const gmm_cast_nv16 *c, const gmm_cast_tile *t) {
    const int32_t thread = gmm_tid_x(); /* read here, so that it takes no register before */
    const int32_t col = thread >> 1, block0 = 4 * (thread & 1);
    const int64_t padded_cols = (t->cols + 127) & ~127;
    uint8_t *dst = gmm_cast_col_codes(t, thread, GMM_CAST_NV16_COLUMN, c->col_pitch);
    uint8_t *scales = gmm_cast_scales(t, 1, (int64_t)(t->p.padded_row / 16) * padded_cols);
    __syncthreads();
    gmm_cast_store_scales4(scales, t->a->columnwise.scale_order, t->c0, t->p.row / 16, c->col_along, col, block0,
                           *(const uint32_t *)(const void *)(c->scales + col * GMM_TILE_BLOCKS + block0));
    gmm_cast_store_cols(t, thread, GMM_CAST_NV16_COLUMN, c->codes, dst, c->col_pitch);
    __syncthreads();
}
#if GMM__HOLDS(0) && !defined(GMM_NO_QUANT)
/* Dequantizes a copy in either direction into a matrix in the layout of the source. A CTA processes one 128 x 128
   tile at a time. */
GMM__KERNEL __launch_bounds__(GMM__QUANT_THREADS) gmm_dequantize_tiles(const __grid_constant__ gmm__dequant_args a) {
    extern __shared__ float gmm__dequant_shared[];
    gmm_pdl_wait_only();
    const int64_t tile_count = gmm__quant_strips(a.grouped, a.tiles, a.units, a.rows) * a.col_tiles;
    const int32_t lane = gmm__lane(), columnwise = a.direction == GMM_COLUMNWISE;
    const int64_t size = a.dst.dtype == GMM_F32 ? 4 : 2;
    int64_t tile_index;
    for (tile_index = blockIdx.x; tile_index < tile_count; tile_index += gridDim.x) {
        const gmm__quant_strip p = gmm__quant_strip_of(a.grouped, a.tiles, a.offsets, a.units, a.rows,
                                                       tile_index / a.col_tiles);
        const gmm__qview v = gmm__quant_copy(&a.src, a.direction, a.grouped, &p, a.cols);
        const int64_t c0 = tile_index % a.col_tiles * GMM_TILE;
        const int32_t n = gmm__quant_extent(a.cols, c0);
        const int32_t width = gmm_block_along(v.scaling), lines = columnwise ? n : (int32_t)p.m;
        const int32_t along = columnwise ? (int32_t)p.m : n;
        const int64_t line0 = columnwise ? c0 : p.row, along0 = columnwise ? p.row : c0;
        char *base = a.dst.table ? (char *)a.dst.table[p.unit]
                                 : (char *)a.dst.data + (a.grouped ? 0 : p.unit * a.dst.group_stride) * size;
        int32_t l, i;
        for (l = gmm__warp(); l < lines; l += GMM__QUANT_WARPS)
            for (i = lane; i < along; i += 32) {
                const float decode_scale = gmm__qview_factor(&v, line0 + l, width ? (along0 + i) / width : 0, 1);
                const uint8_t code = gmm__qview_code(&v, line0 + l, along0 + i);
                const float value = gmm__qview_value(gmm_decode_small(v.dtype, code), decode_scale);
                gmm__dequant_shared[columnwise ? gmm__quant_smem_index(i, l) : gmm__quant_smem_index(l, i)] = value;
            }
        __syncthreads();
        for (l = gmm__warp(); l < p.m; l += GMM__QUANT_WARPS) {
            char *dst = base + ((p.source_row + p.row + l) * a.dst.ld + c0) * size;
            float x[4];
            gmm__quant_load_row(gmm__dequant_shared, l, x);
            if (4 * lane < n)
                gmm_write4(a.dst.dtype, dst + 4 * lane * size, n - 4 * lane, gmm_vec4_aligned(a.dst.dtype, dst, 0), x);
        }
        __syncthreads();
    }
}

/* Transposes rows 4 q to 4 q + 3 of a tile, of which each lane has 4 bytes per row, into words that hold 4 rows of
   one column. Words of one column are contiguous, and the lanes of a warp access different banks. */
GMM__DEVICE void gmm__transpose_rows4(const uint32_t v[4], int32_t q, uint32_t *tile) {
    const uint32_t a = __byte_perm(v[0], v[1], 0x5140), b = __byte_perm(v[2], v[3], 0x5140);
    const uint32_t c = __byte_perm(v[0], v[1], 0x7362), d = __byte_perm(v[2], v[3], 0x7362);
    const uint32_t x[4] = { __byte_perm(a, b, 0x5410), __byte_perm(a, b, 0x7632), __byte_perm(c, d, 0x5410),
                            __byte_perm(c, d, 0x7632) };
    const int32_t lane = gmm__lane();
    int32_t i;
#pragma unroll
    for (i = 0; i < 4; i++) {
        const int32_t j = (i + lane / 8) & 3;
        tile[(4 * lane + j) * (GMM__QUANT_CODES_PITCH / 4) + q] = j & 2 ? (j & 1 ? x[3] : x[2]) : j & 1 ? x[1] : x[0];
    }
}

/* Four codes of E2M1 as bytes, and bytes as codes of E2M1. */
GMM__DEVICE uint32_t gmm__transpose_unpack4(uint32_t codes) {
    const uint32_t halves = (codes | codes << 8) & 0x00FF00FFu;
    return (halves | halves << 4) & 0x0F0F0F0Fu;
}
GMM__DEVICE uint32_t gmm__transpose_pack4(uint32_t bytes) {
    const uint32_t halves = (bytes | bytes >> 4) & 0x00FF00FFu;
    return (halves | halves >> 8) & 0xFFFFu;
}
/* Loads and stores four codes of a row. */
GMM__DEVICE uint32_t gmm__transpose_load4(const uint8_t *src, int32_t e2m1) {
    return e2m1 ? gmm__transpose_unpack4(*(const uint16_t *)src) : *(const uint32_t *)src;
}
GMM__DEVICE void gmm__transpose_store4(uint8_t *dst, int32_t e2m1, uint32_t codes) {
    if (e2m1) *(uint16_t *)dst = (uint16_t)gmm__transpose_pack4(codes);
    else *(uint32_t *)dst = codes;
}

/* Transposes codes, which are bytes in shared memory, and scales in tiles of 128 x 128; four codes per access where
   both matrices are aligned. e2m1 is a constant of the kernel: loads in branches would wait for one another. */
GMM__DEVICE void gmm__transpose_all(const gmm__transpose_args *a, int32_t e2m1) {
    __shared__ uint32_t tile[GMM_TILE * GMM__QUANT_CODES_PITCH / 4];
    uint8_t *codes = (uint8_t *)tile;
    const int64_t row_tiles = gmm__ceil_div(a->rows, GMM_TILE), col_tiles = gmm__ceil_div(a->cols, GMM_TILE);
    const int32_t lane = gmm__lane(), bytes4 = e2m1 ? 2 : 4;
    const int64_t src_pitch = a->src.ld * bytes4 / 4, dst_pitch = a->dst.ld * bytes4 / 4, tile_bytes = 32 * bytes4;
    int64_t index;
    gmm_pdl_wait_only();
    for (index = blockIdx.x; index < a->units * row_tiles * col_tiles; index += gridDim.x) {
        const int64_t unit = index / (row_tiles * col_tiles), row_tile = index / col_tiles % row_tiles,
                      col_tile = index % col_tiles;
        const gmm__qview src_view = gmm__qview_of(&a->src, GMM_ROWWISE, 0, unit, 0, 0, a->rows, a->cols);
        const gmm__qview dst_view = gmm__qview_of(&a->dst, GMM_COLUMNWISE, 0, unit, 0, 0, a->rows, a->cols);
        const uint8_t *src = src_view.data + (row_tile * src_view.ld + col_tile) * tile_bytes;
        uint8_t *dst = dst_view.data + (col_tile * dst_view.ld + row_tile) * tile_bytes;
        const int32_t m = gmm__quant_extent(a->rows, row_tile * GMM_TILE);
        const int32_t n = gmm__quant_extent(a->cols, col_tile * GMM_TILE);
        const int words =
            (((uintptr_t)src | (uintptr_t)src_pitch | (uintptr_t)dst | (uintptr_t)dst_pitch) & (bytes4 - 1)) == 0 &&
            (m | n) % 4 == 0;
        int32_t l, k;
        if (words) {
            uint32_t v[GMM_TILE / 4 / GMM__QUANT_WARPS][4];
#pragma unroll
            for (l = 0; l < GMM_TILE / 4 / GMM__QUANT_WARPS; l++)
#pragma unroll
                for (k = 0; k < 4; k++) {
                    const int32_t row = 4 * (l * GMM__QUANT_WARPS + gmm__warp()) + k;
                    v[l][k] = row < m && 4 * lane < n
                                  ? gmm__transpose_load4(src + row * src_pitch + bytes4 * lane, e2m1) : 0u;
                }
#pragma unroll
            for (l = 0; l < GMM_TILE / 4 / GMM__QUANT_WARPS; l++)
                gmm__transpose_rows4(v[l], l * GMM__QUANT_WARPS + gmm__warp(), tile);
        } else
            for (l = gmm__warp(); l < m; l += GMM__QUANT_WARPS)
                for (k = lane; k < n; k += 32)
                    codes[k * GMM__QUANT_CODES_PITCH + l] = e2m1 ? gmm_nibble(src + l * src_pitch, k)
                                                           : src[l * src_pitch + k];
        __syncthreads();
        for (l = gmm__warp(); l < n; l += GMM__QUANT_WARPS)
            if (words) {
                if (4 * lane < m)
                    gmm__transpose_store4(dst + l * dst_pitch + bytes4 * lane, e2m1,
                                          tile[l * (GMM__QUANT_CODES_PITCH / 4) + lane]);
            } else if (e2m1)
                for (k = 2 * lane; k < m; k += 64)
                    dst[l * dst_pitch + k / 2] = (uint8_t)(codes[l * GMM__QUANT_CODES_PITCH + k] |
                                                           codes[l * GMM__QUANT_CODES_PITCH + k + 1] << 4);
            else
                for (k = lane; k < m; k += 32) dst[l * dst_pitch + k] = codes[l * GMM__QUANT_CODES_PITCH + k];
        if (e2m1)
            gmm__qview_transpose_nv16_scales(&src_view, &dst_view, row_tile, col_tile, (int32_t)threadIdx.x,
                                             GMM__QUANT_THREADS);
        else if (threadIdx.x == 0) gmm__qview_transpose_scale(&src_view, &dst_view, row_tile, col_tile);
        __syncthreads();
    }
}
GMM__KERNEL __launch_bounds__(GMM__QUANT_THREADS, GMM__TRANSPOSE_PER_SM)
gmm_transpose_tiles(const __grid_constant__ gmm__transpose_args a) {
    gmm__transpose_all(&a, 0);
}
GMM__KERNEL __launch_bounds__(GMM__QUANT_THREADS, GMM__TRANSPOSE_PER_SM)
gmm_transpose_e2m1_tiles(const __grid_constant__ gmm__transpose_args a) {
    gmm__transpose_all(&a, 1);
}

typedef struct gmm__update_args {
    float *history, *scale;
    int64_t stride;
    int32_t slots, length, margin, most_recent;
    float qmax;
} gmm__update_args;

/* Delayed scaling: each slot's scale from its amax history. One thread per slot. */
GMM__KERNEL __launch_bounds__(GMM__QUANT_THREADS) gmm_update_scale_slots(const __grid_constant__ gmm__update_args a) {
    const int64_t i = (int64_t)blockIdx.x * GMM__QUANT_THREADS + threadIdx.x;
    gmm_pdl_wait_only();
    if (i < a.slots)
        a.scale[i] = gmm_delayed_scale(a.history + i, a.stride, a.length, a.qmax, a.margin, a.most_recent, 0.0f,
                                       a.scale[i]);
}

/* The master weights of one shard: gmm_shard_amax computes amaxes of blocks by atomic maxima on their bits,
   gmm_shard_codes writes scales and codes. */
GMM__KERNEL __launch_bounds__(GMM__QUANT_THREADS) gmm_shard_amax(const __grid_constant__ gmm__shard_args a) {
    const int64_t first = (int64_t)blockIdx.x * GMM__QUANT_THREADS + threadIdx.x;
    const int64_t step = (int64_t)gridDim.x * GMM__QUANT_THREADS;
    int64_t i;
    int32_t k;
    gmm_pdl_wait_only();
    for (i = first; i < a.length; i += step) {
        const int64_t e = a.start + i, member = e / (a.rows * a.cols), row = e / a.cols % a.rows, col = e % a.cols;
        const uint32_t bits = gmm_amax_bits(0u, gmm__shard_value(&a, i));
        for (k = 0; k < 2 + (a.format.scaling == GMM_SCALING_NV16); k++)
            if (k == 2 || a.copy[k].dtype != GMM_NONE) {
                uint32_t *dst = (uint32_t *)&a.amax[k == 2 ? member : gmm__shard_amax_at(&a, k, member, row, col)];
                if (bits > *(volatile uint32_t *)dst) atomicMax(dst, bits);
            }
    }
}
GMM__KERNEL __launch_bounds__(GMM__QUANT_THREADS) gmm_shard_codes(const __grid_constant__ gmm__shard_args a) {
    const int64_t first = (int64_t)blockIdx.x * GMM__QUANT_THREADS + threadIdx.x;
    const int64_t step = (int64_t)gridDim.x * GMM__QUANT_THREADS;
    int64_t i, begin, end, lines, blocks;
    int32_t k;
    gmm_pdl_wait_only();
    for (k = 0; k < 2; k++) {
        if (a.copy[k].dtype == GMM_NONE) continue;
        gmm__shard_scales(&a, k, &lines, &blocks);
        for (i = first; i < a.count * lines * blocks; i += step) gmm__shard_store_scale(&a, k, i);
        gmm__shard_parts(&a, k, &begin, &end);
        for (i = begin + first; i < end; i += step) gmm__shard_store_part(&a, k, i);
    }
}
#endif

#ifndef GMM_NO_QUANT
/* These tables are in one slice, since casts call functions of the amax instance of their source. */
#if GMM__HOLDS(5)
#define GMM__BODY GMM__BODY_QUANTIZE_AMAX
/* kernel, dtype of the source */
#define GMM__ROW (gmm_quantize_amax_bf16, bf16)
#include GMM_KERNELS_FILE
#ifndef GMM_NO_F16
#define GMM__ROW (gmm_quantize_amax_f16, f16)
#include GMM_KERNELS_FILE
#endif
#define GMM__ROW (gmm_quantize_amax_f32, f32)
#include GMM_KERNELS_FILE
#undef GMM__BODY

/* Casts to any format, by dtype of the source. */
#define GMM__BODY GMM__BODY_QUANTIZE
/* kernel, dtype of the source */
#define GMM__ROW (gmm_quantize_bf16, bf16)
#include GMM_KERNELS_FILE
#ifndef GMM_NO_F16
#define GMM__ROW (gmm_quantize_f16, f16)
#include GMM_KERNELS_FILE
#endif
#define GMM__ROW (gmm_quantize_f32, f32)
#include GMM_KERNELS_FILE
#undef GMM__BODY

#define GMM__BODY GMM__BODY_AMAX
/* kernel, dtype of the source, transformed columnwise copy */
#define GMM__ROW (gmm_amax_bf16, bf16, 0)
#include GMM_KERNELS_FILE
#ifndef GMM_NO_F16
#define GMM__ROW (gmm_amax_f16, f16, 0)
#include GMM_KERNELS_FILE
#endif
#define GMM__ROW (gmm_amax_f32, f32, 0)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_amax_hadamard_bf16, bf16, 1)
#include GMM_KERNELS_FILE
#undef GMM__BODY

#define GMM__BODY GMM__BODY_SCALED
/* kernel, dtype of the source, scaling, what the source is */
#define GMM__ROW (gmm_cast_tensor_bf16, bf16, GMM_SCALING_TENSOR, GMM__CAST_OF_MATRIX)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_cast_tensor_f32, f32, GMM_SCALING_TENSOR, GMM__CAST_OF_MATRIX)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_cast_row_bf16, bf16, GMM_SCALING_ROW, GMM__CAST_OF_MATRIX)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_cast_row_f32, f32, GMM_SCALING_ROW, GMM__CAST_OF_MATRIX)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_cast_1x128_bf16, bf16, GMM_SCALING_1X128, GMM__CAST_OF_MATRIX)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_cast_1x128_f32, f32, GMM_SCALING_1X128, GMM__CAST_OF_MATRIX)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_cast_128x128_bf16, bf16, GMM_SCALING_128X128, GMM__CAST_OF_MATRIX)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_cast_128x128_f32, f32, GMM_SCALING_128X128, GMM__CAST_OF_MATRIX)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_cast_act_tensor_bf16, bf16, GMM_SCALING_TENSOR, GMM__CAST_OF_ACT)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_cast_act_1x128_bf16, bf16, GMM_SCALING_1X128, GMM__CAST_OF_ACT)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_cast_gradient_tensor_bf16, bf16, GMM_SCALING_TENSOR, GMM__CAST_OF_GRADIENT)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_cast_gradient_1x128_bf16, bf16, GMM_SCALING_1X128, GMM__CAST_OF_GRADIENT)
#include GMM_KERNELS_FILE
#ifndef GMM_NO_F16
#define GMM__ROW (gmm_cast_tensor_f16, f16, GMM_SCALING_TENSOR, GMM__CAST_OF_MATRIX)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_cast_row_f16, f16, GMM_SCALING_ROW, GMM__CAST_OF_MATRIX)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_cast_1x128_f16, f16, GMM_SCALING_1X128, GMM__CAST_OF_MATRIX)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_cast_128x128_f16, f16, GMM_SCALING_128X128, GMM__CAST_OF_MATRIX)
#include GMM_KERNELS_FILE
#endif
#undef GMM__BODY

#define GMM__BODY GMM__BODY_MX
/* kernel, dtype of the source */
#define GMM__ROW (gmm_cast_mx32_bf16, bf16)
#include GMM_KERNELS_FILE
#ifndef GMM_NO_F16
#define GMM__ROW (gmm_cast_mx32_f16, f16)
#include GMM_KERNELS_FILE
#endif
#define GMM__ROW (gmm_cast_mx32_f32, f32)
#include GMM_KERNELS_FILE
#undef GMM__BODY

/* NV16. GMM__HADAMARD 1: BF16 with a Hadamard-transformed columnwise copy or with stochastic rounding. */
#define GMM__BODY GMM__BODY_NV
/* kernel, dtype of the source, transformed columnwise copy or stochastic rounding */
#define GMM__ROW (gmm_cast_nv16_bf16, bf16, 0)
#include GMM_KERNELS_FILE
#ifndef GMM_NO_F16
#define GMM__ROW (gmm_cast_nv16_f16, f16, 0)
#include GMM_KERNELS_FILE
#endif
#define GMM__ROW (gmm_cast_nv16_f32, f32, 0)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_cast_nv16_hadamard_bf16, bf16, 1)
#include GMM_KERNELS_FILE
#undef GMM__BODY
#endif
#endif /* GMM_NO_QUANT */

#if GMM__HOLDS(0) && !defined(GMM_NO_QUANT)
/* The kernels of the casts. A call is served by the first row that fits it; scaling NONE fits every format. */
typedef struct gmm_quantize_kernel {
    gmm_dtype dtype;            /* of the source */
    gmm_scaling scaling;
    gmm__vectorized vectorized; /* at most that of the arguments */
    gmm__cast_source source;
    int32_t smem;               /* bytes of dynamic shared memory of a vectorized cast */
    int32_t sm_kib;             /* of the cast, as gmm_launch_pdl takes it; of the dtype with most CTAs */
    const void *amax, *cast;
} gmm_quantize_kernel;
/* X(dtype, tag, scaling, vectorized, sm_kib, kernel of the amaxes, of the cast), to whose names the tag is added */
#define GMM__CASTS(X, dtype, tag) \
    X(dtype, tag, TENSOR, GMM__VECTORIZED, GMM__SM_KIB(3, 23808), gmm_amax, gmm_cast_tensor) \
    X(dtype, tag, ROW, GMM__VECTORIZED, GMM__SM_KIB(3, 23808), gmm_amax, gmm_cast_row) \
    X(dtype, tag, 1X128, GMM__VECTORIZED, GMM__SM_KIB(3, 23808), gmm_amax, gmm_cast_1x128) \
    X(dtype, tag, 128X128, GMM__VECTORIZED, GMM__SM_KIB(3, 21760), gmm_amax, gmm_cast_128x128) \
    X(dtype, tag, MX32, GMM__VECTORIZED, GMM__SM_KIB(2, 4096), gmm_amax, gmm_cast_mx32) \
    X(dtype, tag, NV16, GMM__VECTORIZED, GMM__SM_KIB(3, 12544), gmm_amax, gmm_cast_nv16) \
    X(dtype, tag, NONE, GMM__VECTORIZED_NO, 0, gmm_quantize_amax, gmm_quantize)
#define GMM_QUANTIZE_KERNEL_LIST(X) \
    X(GMM_BF16, bf16, NV16, GMM__VECTORIZED_HADAMARD, GMM__SM_KIB(2, 12544), gmm_amax_hadamard, \
      gmm_cast_nv16_hadamard) \
    GMM__CASTS(X, GMM_BF16, bf16) GMM__IF_F16(GMM__CASTS(X, GMM_F16, f16)) GMM__CASTS(X, GMM_F32, f32)
#define GMM__X(dtype, tag, scaling, vectorized, sm_kib, amax, cast) \
    GMM__DECLARE_KERNEL(amax##_##tag, gmm__quant_args) GMM__DECLARE_KERNEL(cast##_##tag, gmm__quant_args)
GMM_QUANTIZE_KERNEL_LIST(GMM__X)
GMM__DECLARE_KERNEL(gmm_cast_act_tensor_bf16, gmm__quant_args)
GMM__DECLARE_KERNEL(gmm_cast_act_1x128_bf16, gmm__quant_args)
GMM__DECLARE_KERNEL(gmm_cast_gradient_tensor_bf16, gmm__quant_args)
GMM__DECLARE_KERNEL(gmm_cast_gradient_1x128_bf16, gmm__quant_args)
#undef GMM__X
#define GMM__X(dtype, tag, scaling, vectorized, sm_kib, amax, cast) \
    { dtype, GMM_SCALING_##scaling, vectorized, GMM__CAST_OF_MATRIX, 0, sm_kib, (const void *)amax##_##tag, \
      (const void *)cast##_##tag },
static const gmm_quantize_kernel gmm_quantize_kernels[] = {
    { GMM_BF16, GMM_SCALING_TENSOR, GMM__VECTORIZED, GMM__CAST_OF_ACT, 0, GMM__SM_KIB(3, 37888), NULL,
      (const void *)gmm_cast_act_tensor_bf16 },
    { GMM_BF16, GMM_SCALING_1X128, GMM__VECTORIZED, GMM__CAST_OF_ACT, 0, GMM__SM_KIB(3, 37888), NULL,
      (const void *)gmm_cast_act_1x128_bf16 },
    { GMM_BF16, GMM_SCALING_TENSOR, GMM__VECTORIZED, GMM__CAST_OF_GRADIENT, GMM_CAST_GRADIENT_SLOTS,
      GMM__SM_KIB(2, GMM_CAST_GRADIENT_SLOTS + 7184), NULL, (const void *)gmm_cast_gradient_tensor_bf16 },
    { GMM_BF16, GMM_SCALING_1X128, GMM__VECTORIZED, GMM__CAST_OF_GRADIENT, GMM_CAST_GRADIENT_SLOTS,
      GMM__SM_KIB(2, GMM_CAST_GRADIENT_SLOTS + 7184), NULL, (const void *)gmm_cast_gradient_1x128_bf16 },
    GMM_QUANTIZE_KERNEL_LIST(GMM__X)
};
#undef GMM__X

/* Grid of a vectorized kernel: tiles along the columns by strips, `max_blocks` CTAs at most. */
static GMM__UNUSED dim3 gmm_cast_grid(int64_t col_tiles, int64_t strips, int64_t max_blocks) {
    const int64_t max_rows = max_blocks / col_tiles < 65535 ? max_blocks / col_tiles : 65535;
    const int64_t y = strips < max_rows ? strips : max_rows;
    return dim3((unsigned)col_tiles, (unsigned)(y < 1 ? 1 : y));
}

/* CTAs of a persistent kernel. */
static GMM__UNUSED dim3 gmm__quant_grid(int64_t tile_count, int64_t max_blocks) {
    return dim3((unsigned)(tile_count < 1 ? 1 : tile_count < max_blocks ? tile_count : max_blocks));
}

/* Launches a kernel that calls gmm_pdl_wait_only, with `smem` bytes of dynamic shared memory; sm_kib, args as
   gmm_launch_pdl takes them. */
static GMM__UNUSED cudaError_t gmm__quant_launch(const void *kernel, int pdl, dim3 grid, int32_t smem, int32_t sm_kib,
                                                 const void *args, cudaStream_t stream) {
    cudaError_t error = cudaSuccess;
    if (smem)
        error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, GMM__QUANT_SHARED_BYTES);
    if (error != cudaSuccess) return error;
    return gmm_launch_pdl(kernel, pdl, grid, GMM__QUANT_THREADS, (size_t)smem, sm_kib, args, stream);
}

/* Launches what a cast needs: the kernel of amaxes (`amax`), that of scales, the cast itself (`cast`).
   `max_blocks`: CTAs of persistent kernels. limits.max_ctas: of those that process tiles in the order of addresses. */
static GMM__UNUSED cudaError_t gmm_launch_quantize(const gmm__quant_args *a, int amax, int cast, int64_t strips,
                                                   int64_t max_blocks, gmm__launch_limits limits, cudaStream_t stream) {
    const gmm_quantize_kernel *row = gmm_quantize_kernels;
    const gmm_dtype dtype = a->src.scaling == GMM_SCALING_NONE ? a->src.dtype : GMM_F32;
    const int mn_major = a->columnwise.dtype != GMM_NONE && a->format.scaling == GMM_SCALING_MX32;
    const int errors = a->format.square && a->format.four_over_six;
    const int32_t any_smem = a->vectorized ? 0 : mn_major || errors ? GMM__QUANT_SHARED_BYTES : GMM__QUANT_TILE_BYTES;
    const int mx_tiles = a->format.scaling == GMM_SCALING_MX32 && dtype != GMM_F32;
    const int64_t tiles_per_block = mx_tiles || a->format.scaling == GMM_SCALING_NV16 ? (int64_t)GMM_CAST_TILES : 1;
    dim3 grid = gmm__quant_grid(strips * a->col_tiles, max_blocks), cast_grid = grid;
    cudaError_t error = cudaSuccess;
    gmm__quant_args forward = *a;
    if (a->vectorized) {
        grid = gmm_cast_grid(a->col_tiles, strips, limits.max_ctas);
        cast_grid = gmm_cast_grid((a->col_tiles + tiles_per_block - 1) / tiles_per_block, strips, limits.max_ctas);
    }
    while (row->dtype != dtype || row->vectorized > a->vectorized || row->source != a->act.source ||
           (row->scaling != GMM_SCALING_NONE && row->scaling != a->format.scaling))
        row++;
    forward.backward = 0;
    if (amax)
        error = gmm__quant_launch(row->amax, limits.pdl, grid, a->vectorized ? 0 : GMM__QUANT_TILE_BYTES,
                                  a->vectorized ? GMM__SM_KIB(4, 4160) : 0, &forward, stream);
    if (error == cudaSuccess && (!a->vectorized || !cast))
        error = gmm__quant_launch((const void *)gmm_quantize_scales, limits.pdl, gmm__quant_grid(max_blocks, 64), 0, 0,
                                  &forward, stream);
    if (error != cudaSuccess || !cast) return error;
    return gmm__quant_launch(row->cast, limits.pdl, cast_grid, row->smem + any_smem, row->sm_kib, a, stream);
}
static GMM__UNUSED cudaError_t gmm_launch_dequantize(const gmm__dequant_args *a, int64_t tile_count,
                                                     gmm__launch_limits limits, cudaStream_t stream) {
    return gmm__quant_launch((const void *)gmm_dequantize_tiles, limits.pdl,
                             gmm__quant_grid(tile_count, limits.max_ctas), GMM__QUANT_TILE_BYTES,
                             GMM__SM_KIB(GMM__QUANT_PER_SM, GMM__QUANT_TILE_BYTES), a, stream);
}

static GMM__UNUSED cudaError_t gmm_launch_transpose(const gmm__transpose_args *a, gmm__launch_limits limits,
                                                    cudaStream_t stream) {
    const int64_t tile_count = a->units * gmm__ceil_div(a->rows, GMM_TILE) * gmm__ceil_div(a->cols, GMM_TILE);
    return gmm__quant_launch(a->src.dtype == GMM_E2M1 ? (const void *)gmm_transpose_e2m1_tiles
                                                      : (const void *)gmm_transpose_tiles,
                             limits.pdl, gmm__quant_grid(tile_count, limits.max_ctas), 0,
                             GMM__SM_KIB(GMM__TRANSPOSE_PER_SM, 16896), a, stream);
}

static GMM__UNUSED cudaError_t gmm_launch_shard_cast(const gmm__shard_args *a, int amax, gmm__launch_limits limits,
                                                     cudaStream_t stream) {
    const int64_t work = a->count * a->rows * a->cols / GMM__QUANT_THREADS + 1;
    return gmm__quant_launch(amax ? (const void *)gmm_shard_amax : (const void *)gmm_shard_codes, limits.pdl,
                             gmm__quant_grid(work, limits.max_ctas), 0, GMM__SM_KIB(8, 0), a, stream);
}

static GMM__UNUSED cudaError_t gmm_launch_quantize_tail(const gmm__quant_tail_args *a, gmm__launch_limits limits,
                                                        cudaStream_t stream) {
    return gmm__quant_launch((const void *)gmm_quantize_tail, limits.pdl, gmm__quant_grid(256, limits.max_ctas), 0,
                             GMM__SM_KIB(8, 0), a, stream);
}

static GMM__UNUSED cudaError_t gmm_launch_update_scales(const gmm__update_args *a, int pdl, cudaStream_t stream) {
    const int64_t blocks = ((int64_t)a->slots + GMM__QUANT_THREADS - 1) / GMM__QUANT_THREADS;
    if (blocks == 0) return cudaSuccess;
    return gmm__quant_launch((const void *)gmm_update_scale_slots, pdl, dim3((unsigned)blocks), 0, 0, a, stream);
}
#endif /* GMM__HOLDS(0), GMM_NO_QUANT */

/* ....................................................................................... Accumulate and convert ... */

#if GMM__HOLDS(0)
/* y = beta y + scale (start + x_0 + x_1 + ...). A task is two spans of a row, so that at least two loads are in
   flight. */
GMM__KERNEL __launch_bounds__(GMM__ELEM_BLOCK, 6) gmm_accumulate_rows(const __grid_constant__ gmm__accumulate_args a) {
    gmm_pdl_wait();
    const int wide = a.x.dtype == GMM_F32 || a.y.dtype == GMM_F32;
    gmm__grid_loop loop = gmm__grid_loop_begin((a.cols - 1) / (2 * GMM__ELEM_SPAN) + 1, 1);
    for (; loop.row < a.rows; gmm__grid_loop_next(&loop)) {
        gmm__raw8 r[2];
        gmm__lane_cols cols[2];
        float sum[2][8], v[8];
        int32_t i, j, k;
#pragma unroll
        for (j = 0; j < 2; j++) {
            cols[j] = gmm__lane_cols_of(wide, (int32_t)(2 * loop.part) + j, (int32_t)a.cols);
            if (a.start.data && cols[j].n[0] > 0) {
                r[j] = gmm__load8(GMM_NONE, &a.start, loop.row, &cols[j]);
                gmm__decode8(GMM_F32, &a.start, &r[j], sum[j]);
            }
        }
        for (i = 0; i < a.count; i++) {
            gmm__view x = a.x;
            x.data = (void *)(uintptr_t)a.addends[i];
#pragma unroll
            for (j = 0; j < 2; j++)
                if (cols[j].n[0] > 0) r[j] = gmm__load8(GMM_NONE, &x, loop.row, &cols[j]);
#pragma unroll
            for (j = 0; j < 2; j++)
                if (cols[j].n[0] > 0) {
                    gmm__decode8(GMM_NONE, &x, &r[j], v);
#pragma unroll
                    for (k = 0; k < 8; k++) sum[j][k] = i > 0 || a.start.data ? gmm_add_rn_f32(sum[j][k], v[k]) : v[k];
                }
        }
#pragma unroll
        for (j = 0; j < 2; j++)
            if (cols[j].n[0] > 0) {
#pragma unroll
                for (k = 0; k < 8; k++) sum[j][k] = gmm_mul_rn_f32(a.scale, sum[j][k]);
                if (a.beta != 0.0f) {
                    r[j] = gmm__load8(GMM_NONE, &a.y, loop.row, &cols[j]);
                    gmm__decode8(GMM_NONE, &a.y, &r[j], v);
#pragma unroll
                    for (k = 0; k < 8; k++) sum[j][k] = gmm_add_rn_f32(gmm_mul_rn_f32(a.beta, v[k]), sum[j][k]);
                }
                gmm__store8(GMM_NONE, &a.y, loop.row, &cols[j], sum[j]);
            }
    }
}

/* Adds 16 bytes of each of n addends. n is a constant, so that all loads are in flight at once. The addends are not
   read again (streaming loads). */
GMM__DEVICE void gmm__add_addends(int wide, int n, const gmm__accumulate_args *a, int32_t first, int64_t index,
                                  float *sum) {
    uint4 v[4];
    int k, c;
#pragma unroll
    for (k = 0; k < n; k++) v[k] = __ldcs((const uint4 *)(const void *)a->addends[first + k] + index);
#pragma unroll
    for (k = 0; k < n; k++) {
        const uint32_t w[4] = {v[k].x, v[k].y, v[k].z, v[k].w};
#pragma unroll
        for (c = 0; c < (wide ? 4 : 8); c++) {
            const float x = __uint_as_float(wide ? w[c & 3] : c & 1 ? w[c / 2] & 0xFFFF0000u : w[c / 2] << 16);
            sum[c] = first + k > 0 ? gmm_add_rn_f32(sum[c], x) : x;
        }
    }
}
/* The same sum for one row of aligned vectors, F32 or BF16 into F32, on few SMs: a CTA occupies one and has
   enough loads in flight for it, so that the other SMs are left to a concurrent GEMM. */
GMM__DEVICE void gmm__accumulate_sm_limited(int wide, const gmm__accumulate_args *a) {
    const int y_vectors = wide ? 1 : 2; /* vectors of y that a thread processes at a time */
    const int64_t count = a->cols / (4 * y_vectors), step = (int64_t)gridDim.x * GMM__SUM_BLOCK;
    int64_t index;
    for (index = (int64_t)blockIdx.x * GMM__SUM_BLOCK + threadIdx.x; index < count; index += step) {
        float4 *const y = (float4 *)a->y.data + index * y_vectors;
        float4 y_old[2];
        float sum[8];
        int32_t i;
        int j;
#pragma unroll
        for (j = 0; j < y_vectors; j++) y_old[j] = a->beta != 0.0f ? __ldcs(y + j) : make_float4(0, 0, 0, 0);
        for (i = 0; i + 4 <= a->count; i += 4) gmm__add_addends(wide, 4, a, i, index, sum);
        if (a->count & 2) gmm__add_addends(wide, 2, a, i, index, sum), i += 2;
        if (a->count & 1) gmm__add_addends(wide, 1, a, i, index, sum);
#pragma unroll
        for (j = 0; j < 4 * y_vectors; j++) sum[j] = gmm_mul_rn_f32(a->scale, sum[j]);
#pragma unroll
        for (j = 0; j < y_vectors && a->beta != 0.0f; j++) {
            sum[4 * j] = gmm_add_rn_f32(gmm_mul_rn_f32(a->beta, y_old[j].x), sum[4 * j]);
            sum[4 * j + 1] = gmm_add_rn_f32(gmm_mul_rn_f32(a->beta, y_old[j].y), sum[4 * j + 1]);
            sum[4 * j + 2] = gmm_add_rn_f32(gmm_mul_rn_f32(a->beta, y_old[j].z), sum[4 * j + 2]);
            sum[4 * j + 3] = gmm_add_rn_f32(gmm_mul_rn_f32(a->beta, y_old[j].w), sum[4 * j + 3]);
        }
#pragma unroll
        for (j = 0; j < y_vectors; j++)
            __stcs(y + j, make_float4(sum[4 * j], sum[4 * j + 1], sum[4 * j + 2], sum[4 * j + 3]));
    }
}
GMM__KERNEL __launch_bounds__(GMM__SUM_BLOCK, 1)
gmm_accumulate_sm_limited_f32(const __grid_constant__ gmm__accumulate_args a) {
    gmm_pdl_wait();
    gmm__accumulate_sm_limited(1, &a);
}
GMM__KERNEL __launch_bounds__(GMM__SUM_BLOCK, 1)
gmm_accumulate_sm_limited_bf16(const __grid_constant__ gmm__accumulate_args a) {
    gmm_pdl_wait();
    gmm__accumulate_sm_limited(0, &a);
}

/* dst = src converted to another float dtype. A task is two spans of a row. */
GMM__KERNEL __launch_bounds__(GMM__ELEM_BLOCK, 8) gmm_convert_rows(const __grid_constant__ gmm__convert_args a) {
    gmm_pdl_wait();
    const int wide = a.src.dtype == GMM_F32 || a.dst.dtype == GMM_F32;
    gmm__grid_loop loop = gmm__grid_loop_begin((a.cols - 1) / (2 * GMM__ELEM_SPAN) + 1, 1);
    for (; loop.row < a.rows; gmm__grid_loop_next(&loop)) {
        gmm__raw8 x[2];
        gmm__lane_cols cols[2];
        int32_t j;
#pragma unroll
        for (j = 0; j < 2; j++) {
            cols[j] = gmm__lane_cols_of(wide, (int32_t)(2 * loop.part) + j, (int32_t)a.cols);
            if (cols[j].n[0] > 0) x[j] = gmm__load8(GMM_NONE, &a.src, loop.row, &cols[j]);
        }
#pragma unroll
        for (j = 0; j < 2; j++)
            if (cols[j].n[0] > 0) {
                float v[8];
                gmm__decode8(GMM_NONE, &a.src, &x[j], v);
                gmm__store8(GMM_NONE, &a.dst, loop.row, &cols[j], v);
            }
    }
}
#endif /* GMM__HOLDS(0) */

/* ...................................................................................................... Routing ... */

#if GMM__HOLDS(0)
/* Sort key of a score, as wide as it: larger scores have larger keys, and NaN has the least. No score has the key 0. */
GMM__DEVICE uint32_t gmm__score_key(float v) {
    const uint32_t u = gmm_f32_bits(v);
    return (u & 0x7FFFFFFFu) > 0x7F800000u ? 1u : u & 0x80000000u ? ~u : u | 0x80000000u;
}
GMM__DEVICE float gmm__key_score(uint32_t key) {
    return gmm_f32_from_bits(key & 0x80000000u ? key & 0x7FFFFFFFu : ~key);
}
/* Sort key of a score and its index: larger scores first, then lower indices; NaN is behind all numbers. */
GMM__DEVICE uint64_t gmm__sort_key(float v, int32_t e) {
    return (uint64_t)gmm__score_key(v) << 32 | (0xFFFFFFFFu - (uint32_t)e);
}

GMM__DEVICE uint64_t gmm__warp_max_key(uint64_t v) {
    const uint32_t hi = __reduce_max_sync(0xFFFFFFFFu, (uint32_t)(v >> 32));
    const uint32_t lo = __reduce_max_sync(0xFFFFFFFFu, (uint32_t)(v >> 32) == hi ? (uint32_t)v : 0u);
    return (uint64_t)hi << 32 | lo;
}

/* An element of the logits, rounded to fp32, and of their gradient. */
GMM__DEVICE float gmm__route_load(const gmm__view *m, int64_t t, int32_t e) {
    if (m->dtype == GMM_F64) return (float)((const double *)m->data)[t * m->ld + e];
    return gmm__load_f32(m, t, e);
}
GMM__DEVICE void gmm__route_store(const gmm__view *m, int64_t t, int32_t e, float v) {
    if (m->dtype == GMM_F64) ((double *)m->data)[t * m->ld + e] = (double)v;
    else gmm__store_f32(m, t, e, v);
}

/* Token i of a sequence, and the sequence of a token. */
GMM__DEVICE int64_t gmm__route_token(const gmm__route_args *a, int64_t sequence, int64_t i) {
    if (a->sequences == 1) return i;
    return a->sequence_first ? i * a->sequences + sequence : sequence * (a->tokens / a->sequences) + i;
}
GMM__DEVICE int64_t gmm__route_sequence(const gmm__route_args *a, int64_t t) {
    if (a->sequences == 1) return 0;
    return a->sequence_first ? t % a->sequences : t / (a->tokens / a->sequences);
}
GMM__DEVICE int32_t gmm__route_is_padding(const gmm__route_args *a, int64_t t) {
    return a->padding && a->padding[t];
}

/* The coefficients of the losses, as gmm__route_args describes them. The whole warp calls the second one. */
GMM__DEVICE float gmm__route_aux(const gmm__route_args *a, int64_t sequence) {
    double n;
    if (!a->valid) return a->aux;
    n = (double)a->valid[sequence];
    return n == 0.0 ? 0.0f : (float)((double)a->aux / (n * n));
}
/* Number of tokens that are no padding. */
GMM__DEVICE int64_t gmm__route_valid_tokens(const gmm__route_args *a) {
    int64_t n = 0, b;
    if (!a->valid) return a->tokens;
    for (b = gmm__lane(); b < a->sequences; b += 32) n += a->valid[b];
    return __shfl_sync(0xFFFFFFFFu, gmm__warp_scan(n), 31);
}
GMM__DEVICE float gmm__route_z(const gmm__route_args *a) {
    const int64_t n = a->valid ? gmm__route_valid_tokens(a) : 1;
    return n == 0 ? 0.0f : (float)((double)a->z / (double)n);
}

/* Largest logit of a token, and the sum of exp(logit - largest). */
GMM__DEVICE void gmm__route_softmax(const gmm__route_args *a, int64_t t, float *largest, float *sum) {
    float m = gmm_f32_from_bits(0xFF800000u), z = 0.0f;
    int32_t e;
    for (e = gmm__lane(); e < a->experts; e += 32) m = fmaxf(m, gmm__route_load(&a->logits, t, e));
    m = gmm__warp_max(m);
    for (e = gmm__lane(); e < a->experts; e += 32) z += gmm_exp(gmm__route_load(&a->logits, t, e) - m);
    *largest = m;
    *sum = gmm__warp_sum(z);
}

/* part / sum, or 0 where the scores are so small that their sum underflows to 0 in fp32. */
GMM__DEVICE float gmm__safe_quotient(float part, float sum) { return sum == 0.0f ? 0.0f : part / sum; }

/* Arrays of a warp have a whole number of rows of 32 experts, one for each lane. */
GMM__HD int32_t gmm__route_rows(int32_t experts) { return experts / 32 + (experts % 32 != 0); }

/* Reads the logits of a token into x, with -infinity behind the last. Returns the lane's largest. */
GMM__DEVICE float gmm__route_read_row(const gmm__view *m, int64_t t, int32_t experts, float *x) {
    const int32_t lane = gmm__lane(), rows = experts / 32;
    float largest = gmm_f32_from_bits(0xFF800000u), v;
    int32_t i;
#pragma unroll 4
    for (i = 0; i < rows; i++) {
        v = gmm__route_load(m, t, 32 * i + lane);
        x[32 * i + lane] = v;
        largest = fmaxf(largest, v);
    }
    if (experts % 32) {
        v = lane < experts % 32 ? gmm__route_load(m, t, 32 * rows + lane) : gmm_f32_from_bits(0xFF800000u);
        x[32 * rows + lane] = v;
        largest = fmaxf(largest, v);
    }
    return largest;
}
GMM__DEVICE void gmm__route_write_row(const gmm__view *m, int64_t t, int32_t experts, const float *x) {
    const int32_t lane = gmm__lane(), rows = experts / 32;
    int32_t i;
#pragma unroll 4
    for (i = 0; i < rows; i++) gmm__route_store(m, t, 32 * i + lane, x[32 * i + lane]);
    if (lane < experts % 32) gmm__route_store(m, t, 32 * rows + lane, x[32 * rows + lane]);
}
/* gmm__route_read_row and gmm__route_write_row with a constant dtype: the assignments let the compiler make a loop per
   dtype, which does not test it per element. Logits have one of these four dtypes. */
GMM__DEVICE float gmm__route_read(const gmm__route_args *a, int64_t t, float *x) {
    gmm__view m = a->logits;
    switch (m.dtype) {
    case GMM_F64: m.dtype = GMM_F64; return gmm__route_read_row(&m, t, a->experts, x);
    case GMM_F32: m.dtype = GMM_F32; return gmm__route_read_row(&m, t, a->experts, x);
    case GMM_F16: m.dtype = GMM_F16; return gmm__route_read_row(&m, t, a->experts, x);
    default: m.dtype = GMM_BF16; return gmm__route_read_row(&m, t, a->experts, x);
    }
}
GMM__DEVICE void gmm__route_write(const gmm__route_args *a, int64_t t, const float *x) {
    gmm__view m = a->dlogits;
    switch (m.dtype) {
    case GMM_F64: m.dtype = GMM_F64; gmm__route_write_row(&m, t, a->experts, x); break;
    case GMM_F32: m.dtype = GMM_F32; gmm__route_write_row(&m, t, a->experts, x); break;
    case GMM_F16: m.dtype = GMM_F16; gmm__route_write_row(&m, t, a->experts, x); break;
    default: m.dtype = GMM_BF16; gmm__route_write_row(&m, t, a->experts, x); break;
    }
}

/* gmm__route_softmax of logits that gmm__route_read has read; `largest` has the lane's largest before. The logits
   become their exponentials, unless scores are sigmoids. */
GMM__DEVICE void gmm__route_exponentials(const gmm__route_args *a, float *x, float *largest, float *sum) {
    const float m = gmm__key_score(__reduce_max_sync(0xFFFFFFFFu, gmm__score_key(*largest)));
    const int32_t rows = gmm__route_rows(a->experts), lane = gmm__lane();
    float z = 0.0f;
    int32_t i;
#pragma unroll 4
    for (i = 0; i < rows; i++) {
        const float v = gmm_exp(x[32 * i + lane] - m);
        if (!a->sigmoid) x[32 * i + lane] = v;
        z += v;
    }
    *largest = m;
    *sum = gmm__warp_sum(z);
}

/* Floats of a warp's arrays in gmm_route_topk: scores, sort keys, the sums of groups and, with losses, of a chunk's
   scores; and in gmm_route_gradient: scores, and their products with gradients. */
GMM__HD int64_t gmm__route_topk_floats(int32_t experts, int32_t groups, int32_t losses) {
    const int64_t rows = gmm__route_rows(experts);
    return (losses ? 64 : 32) * rows + GMM__ROUTE_PITCH * rows + (groups > 1 ? groups : 0);
}
GMM__HD int64_t gmm__route_gradient_floats(int32_t experts) { return 64 * (int64_t)gmm__route_rows(experts); }
/* A warp's array in `scratch`, where the CTA's arrays do not fit into shared memory. */
GMM__DEVICE float *gmm__route_scratch(const gmm__route_args *a, int64_t floats) {
    return a->scratch + ((int64_t)blockIdx.x * (blockDim.x / 32u) + gmm__warp()) * floats;
}

/* Counts the tokens of each sequence that are no padding. */
GMM__KERNEL __launch_bounds__(GMM__ELEM_BLOCK, 8) gmm_route_valid(const __grid_constant__ gmm__route_args a) {
    gmm_pdl_wait();
    const int64_t step = (int64_t)gridDim.x * blockDim.x;
    int64_t t = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    int64_t count = 0;
    for (; t < a.tokens; t += step) {
        if (a.padding[t]) continue;
        if (a.sequences > 1) atomicAdd(&a.valid[gmm__route_sequence(&a, t)], 1);
        else count++;
    }
    if (a.sequences > 1) return;
    count = __shfl_sync(0xFFFFFFFFu, gmm__warp_scan(count), 31);
    if (gmm__lane() == 0 && count) atomicAdd(a.valid, (int32_t)count);
}

/* Where the value of an expert lies, and then its sort key. Neither the experts of a row nor those of a lane lie in the
   same bank of shared memory. */
GMM__DEVICE int32_t gmm__route_key_at(int32_t e) { return e + (e >> 5) * (GMM__ROUTE_PITCH - 32); }
/* The sum of the `count` largest values of n experts from `first` on, in falling order. One thread. */
GMM__DEVICE float gmm__route_group_sum(const float *value, int32_t first, int32_t n, int32_t count) {
    uint64_t previous_key = ~(uint64_t)0;
    float sum = 0.0f;
    int32_t e, i;
#pragma unroll 1
    for (i = 0; i < count; i++) {
        uint64_t max_key = 0;
#pragma unroll 1
        for (e = 0; e < n; e++) {
            const uint64_t key = gmm__sort_key(value[gmm__route_key_at(first + e)], e);
            if (key < previous_key && key > max_key) max_key = key;
        }
        previous_key = max_key;
        sum += value[gmm__route_key_at(first + (int32_t)(0xFFFFFFFFu - (uint32_t)max_key))];
    }
    return sum;
}
/* Chooses the group_topk groups of a token by the values of its experts. Writes the groups' sums, and returns the key
   of the last group that is chosen. */
GMM__DEVICE uint64_t gmm__route_choose_groups(const gmm__route_args *a, const float *value, float *sums) {
    const int32_t members = a->experts / a->groups;
    uint64_t last_key = ~(uint64_t)0;
    int32_t g, i;
    __syncwarp();
#pragma unroll 1
    for (g = gmm__lane(); g < a->groups; g += 32)
        sums[g] = gmm__route_group_sum(value, g * members, members, a->group_sum);
#pragma unroll 1
    for (i = 0; i < a->group_topk; i++) {
        uint64_t max_key = 0;
#pragma unroll 1
        for (g = gmm__lane(); g < a->groups; g += 32) {
            const uint64_t key = gmm__sort_key(sums[g], g);
            if (key < last_key && key > max_key) max_key = key;
        }
        last_key = gmm__warp_max_key(max_key);
    }
    __syncwarp();
    return last_key;
}

/* Sinkhorn's iteration: adds up the columns of the balanced matrix. One warp per chunk of GMM__ROUTE_CHUNK tokens, in
   their order; padding and tokens with NaN are left out. */
GMM__KERNEL __launch_bounds__(GMM__ELEM_BLOCK, 8) gmm_route_sinkhorn(const __grid_constant__ gmm__route_args a) {
    gmm_pdl_wait();
    const int64_t warps = blockDim.x / 32u, stride = (int64_t)gridDim.x * warps;
    const int64_t chunks = (a.tokens + GMM__ROUTE_CHUNK - 1) / GMM__ROUTE_CHUNK;
    const float inverse_rows = 1.0f / (float)gmm__route_valid_tokens(&a);
    const int32_t lane = gmm__lane();
    extern __shared__ float gmm__route_shared[];
    float *x = a.scratch ? gmm__route_scratch(&a, a.experts) : gmm__route_shared + gmm__warp() * a.experts;
    int64_t c, t;
    int32_t e;
    if (a.multipliers[a.experts] != 0.0f) return; /* converged */
    for (c = (int64_t)blockIdx.x * warps + gmm__warp(); c < chunks; c += stride) {
        const int64_t last_token = (c + 1) * GMM__ROUTE_CHUNK < a.tokens ? (c + 1) * GMM__ROUTE_CHUNK : a.tokens;
        float *sums = a.sums + c * (a.experts + (int64_t)1);
        for (e = lane; e <= a.experts; e += 32) sums[e] = 0.0f;
        for (t = c * GMM__ROUTE_CHUNK; t < last_token; t++) {
            float m, z, row = 0.0f, multiplier;
            if (gmm__route_is_padding(&a, t)) continue;
            gmm__route_softmax(&a, t, &m, &z);
            for (e = lane; e < a.experts; e += 32) {
                x[e] = gmm_exp(gmm__route_load(&a.logits, t, e) - m);
                row += x[e] * a.multipliers[e];
            }
            row = gmm__warp_sum(row);
            if (row != row) continue;
            multiplier = inverse_rows / (row + 1e-8f);
            /* the same lane always updates expert e */
            for (e = lane; e < a.experts; e += 32) sums[e] += multiplier * x[e];
        }
    }
}
/* Sets the multipliers of experts: to 1 without `sums`, else to those that balance the columns. One warp. */
GMM__KERNEL __launch_bounds__(32, 1) gmm_route_balance(const __grid_constant__ gmm__route_args a) {
    gmm_pdl_wait();
    const int32_t lane = gmm__lane();
    float change = 0.0f;
    int32_t e;
    if (a.sums && a.multipliers[a.experts] != 0.0f) return;
    for (e = lane; e < a.experts; e += 32) {
        const float multiplier = a.sums ? 1.0f / (float)a.experts / (a.sums[e] + 1e-8f) : 1.0f;
        if (a.sums) change += fabsf(multiplier - a.multipliers[e]);
        a.multipliers[e] = multiplier;
    }
    change = gmm__warp_sum(change) / (float)a.experts;
    __syncwarp();
    if (lane == 0) a.multipliers[a.experts] = a.sums && change <= a.tolerance ? 1.0f : 0.0f;
}

/* Adds up partial sums, GMM__ROUTE_FOLD rows at a time: in [batch][rows][cols] -> out [batch][ceil(rows /
   GMM__ROUTE_FOLD)][cols]. A CTA processes 32 columns of one fold; each warp adds a quarter of the rows. */
typedef struct gmm__fold_args {
    const float *in;
    float *out;
    int64_t rows, cols, batch;
} gmm__fold_args;

GMM__KERNEL __launch_bounds__(GMM__ELEM_BLOCK, 8) gmm_route_fold(const __grid_constant__ gmm__fold_args a) {
    gmm_pdl_wait();
    __shared__ float part[GMM__ELEM_WARPS][32];
    const int64_t tiles = (a.cols + 31) / 32, folds = (a.rows + GMM__ROUTE_FOLD - 1) / GMM__ROUTE_FOLD;
    int64_t i;
    for (i = blockIdx.x; i < tiles * folds * a.batch; i += gridDim.x) {
        const int64_t fold = i / tiles, col = (i - fold * tiles) * 32 + gmm__lane(), b = fold / folds;
        const int64_t first = (fold - b * folds) * GMM__ROUTE_FOLD +
                              gmm__warp() * (GMM__ROUTE_FOLD / GMM__ELEM_WARPS);
        const float *in = a.in + b * a.rows * a.cols;
        float sum = 0.0f;
        int32_t k;
#pragma unroll
        for (k = 0; k < GMM__ROUTE_FOLD / GMM__ELEM_WARPS; k++)
            if (col < a.cols && first + k < a.rows) sum += in[(first + k) * a.cols + col];
        part[gmm__warp()][gmm__lane()] = sum;
        __syncthreads();
        if (gmm__warp() == 0 && col < a.cols) {
            for (k = 1; k < GMM__ELEM_WARPS; k++) sum += part[k][gmm__lane()];
            a.out[fold * a.cols + col] = sum;
        }
        __syncthreads();
    }
}

/* offsets = prefix sums of the counts; aux_loss and z_loss from the sums over all tokens. One warp. */
GMM__KERNEL __launch_bounds__(32, 1) gmm_route_finish(const __grid_constant__ gmm__route_args a) {
    gmm_pdl_wait();
    const int32_t lane = gmm__lane();
    int32_t base;
    int64_t begin = 0, b;
    float sum;
    if (a.offsets && lane == 0) a.offsets[0] = 0;
    for (base = 0; a.offsets && base < a.experts; base += 32) {
        const int32_t e = base + lane;
        const int64_t end = begin + gmm__warp_scan(e < a.experts ? a.counts[e] : 0);
        if (e < a.experts) a.offsets[e + 1] = (int32_t)end;
        begin = __shfl_sync(0xFFFFFFFFu, end, 31);
    }
    for (base = lane; a.total_counts && base < a.experts; base += 32) a.total_counts[base] += a.counts[base];
    if (a.aux_loss) {
        float loss = 0.0f;
        for (b = 0; a.sums && a.aux != 0.0f && b < a.sequences; b++) {
            const int32_t *counts = a.sequence_counts ? a.sequence_counts + b * a.experts : a.counts;
            const float *sums = a.sums + b * (a.experts + (int64_t)1);
            sum = 0.0f;
            for (base = lane; base < a.experts; base += 32) sum += (float)counts[base] * sums[base];
            loss += gmm__route_aux(&a, b) * gmm__warp_sum(sum);
        }
        if (lane == 0) a.aux_loss[0] = loss;
    }
    if (a.z_loss) {
        const float z = gmm__route_z(&a);
        sum = 0.0f;
        for (b = lane; a.sums && a.z != 0.0f && b < a.sequences; b += 32)
            sum += a.sums[b * (a.experts + (int64_t)1) + a.experts];
        sum = gmm__warp_sum(sum);
        if (lane == 0) a.z_loss[0] = z * sum;
    }
}

/* A routing from slots to dense matrices, or back. One warp per token. */
GMM__KERNEL __launch_bounds__(GMM__ELEM_BLOCK, 8) gmm_route_dense(const __grid_constant__ gmm__dense_args a) {
    gmm_pdl_wait();
    const int64_t warps = blockDim.x / 32u, stride = (int64_t)gridDim.x * warps;
    const int32_t lane = gmm__lane();
    int64_t t;
    for (t = (int64_t)blockIdx.x * warps + gmm__warp(); t < a.tokens; t += stride) {
        int32_t *indices = a.indices + t * a.topk, e, i, count = 0;
        uint8_t *map = a.map ? a.map + t * a.experts : NULL;
        float *values = a.values ? a.values + t * a.experts : NULL;
        for (e = lane; a.to_dense && e < a.experts; e += 32) {
            float sum = 0.0f;
            uint8_t chosen = 0;
            for (i = 0; i < a.topk; i++) {
                if (indices[i] != e) continue;
                chosen = 1;
                if (values) sum += a.probs[t * a.topk + i];
            }
            if (map) map[e] = chosen;
            if (values) values[e] = sum;
        }
        if (a.to_dense) continue;
        for (e = lane; map && e - lane < a.experts && count < a.topk; e += 32) {
            const int32_t chosen = e < a.experts && map[e];
            const uint32_t all = __ballot_sync(0xFFFFFFFFu, chosen);
            i = count + __popc(all & ((1u << lane) - 1u));
            if (chosen && i < a.topk) {
                indices[i] = e;
                if (a.counts) atomicAdd(&a.counts[e], 1);
            }
            count += __popc(all);
        }
        for (i = count + lane; map && i < a.topk; i += 32) indices[i] = -1;
        __syncwarp();
        for (i = lane; values && i < a.topk; i += 32) {
            e = indices[i];
            a.probs[t * a.topk + i] = (uint32_t)e < (uint32_t)a.experts ? values[e] : 0.0f;
        }
    }
}

/* The update of expert biases; see gmm_expert_bias. A warp updates one layer at a time. */
GMM__KERNEL __launch_bounds__(32, 1) gmm_route_bias(const __grid_constant__ gmm__bias_args a) {
    int64_t layer;
    gmm_pdl_wait();
    for (layer = blockIdx.x; layer < a.layers; layer += gridDim.x) {
        int64_t *counts = a.total_counts + layer * a.experts, sum = 0;
        float *bias = a.bias + layer * a.experts;
        int32_t e;
        for (e = gmm__lane(); e < a.experts; e += 32) sum += counts[e];
        sum = __shfl_sync(0xFFFFFFFFu, gmm__warp_scan(sum), 31);
        for (e = gmm__lane(); e < a.experts; e += 32) {
            const int64_t above = counts[e] * a.experts; /* compared with the sum: no mean is rounded */
            bias[e] += above < sum ? a.rate : above > sum ? -a.rate : 0.0f;
            counts[e] = 0;
        }
    }
}
#endif /* GMM__HOLDS(0) */

#if GMM__HOLDS(0)
/* The best of a lane's experts, and its sort key; 0 where none is left. Of equal keys the lowest expert is the best. */
typedef struct gmm__route_best {
    uint32_t key;
    int32_t e;
} gmm__route_best;
/* Writes the next key of a lane, whose experts rise from call to call. */
GMM__DEVICE void gmm__route_put_key(uint32_t *keys, int32_t e, uint32_t key, gmm__route_best *best) {
    keys[gmm__route_key_at(e)] = key;
    if (key <= best->key) return;
    best->key = key;
    best->e = e;
}

/* gmm__score_key of scores, which are never negative, in fewer instructions: 1 for NaN, 2 and more for numbers. 0 is
   left for experts that cannot be chosen. */
GMM__DEVICE uint32_t gmm__nonnegative_key(float s) { return s == s ? gmm_f32_bits(s) + 2u : 1u; }

/* Makes scores of what gmm__route_exponentials leaves in x, and their sort keys. Places behind the last expert get the
   score 0, or NaN where all scores are NaN: no key is less than theirs, and of equal keys the lowest index wins, so
   that every expert comes before them. */
GMM__DEVICE gmm__route_best gmm__route_softmax_keys(int32_t experts, float z, float *x, uint32_t *keys) {
    const int32_t rows = gmm__route_rows(experts), lane = gmm__lane();
    gmm__route_best best = { 0u, 0 };
    int32_t i;
#pragma unroll 4
    for (i = 0; i < rows; i++) {
        const float s = x[32 * i + lane] / z;
        x[32 * i + lane] = s;
        gmm__route_put_key(keys, 32 * i + lane, gmm__nonnegative_key(s), &best);
    }
    return best;
}
GMM__DEVICE gmm__route_best gmm__route_sigmoid_keys(int32_t experts, float *x, uint32_t *keys) {
    const int32_t rows = gmm__route_rows(experts), lane = gmm__lane();
    gmm__route_best best = { 0u, 0 };
    int32_t i;
#pragma unroll 2
    for (i = 0; i < rows; i++) {
        const float s = gmm_sigmoid(x[32 * i + lane]);
        x[32 * i + lane] = s;
        if (32 * i + lane < experts)
            gmm__route_put_key(keys, 32 * i + lane, gmm__nonnegative_key(s), &best);
    }
    return best;
}
/* Adds a token's normalised scores to `sums`, which start with those of the first token. */
GMM__DEVICE void gmm__route_add_scores(const gmm__route_args *a, const float *x, float *sums, int32_t first) {
    const int32_t rows = gmm__route_rows(a->experts), lane = gmm__lane();
    float total = 0.0f;
    int32_t i;
    if (!a->sigmoid) {
#pragma unroll 1
        for (i = 0; i < rows; i++) sums[32 * i + lane] = (first ? 0.0f : sums[32 * i + lane]) + x[32 * i + lane];
        return;
    }
#pragma unroll 1
    for (i = 0; i < rows; i++) total += x[32 * i + lane];
    total = gmm__warp_sum(total);
#pragma unroll 1
    for (i = 0; i < rows; i++)
        sums[32 * i + lane] = (first ? 0.0f : sums[32 * i + lane]) + gmm__safe_quotient(x[32 * i + lane], total);
}
/* Makes sort keys of the values by which experts are chosen, where these are not the scores x. The key of an expert
   that cannot be chosen is 0. */
GMM__DEVICE gmm__route_best gmm__route_values(const gmm__route_args *a, int64_t t, float m, const float *x,
                                              uint32_t *keys, float *values, float *group_sums) {
    const int32_t members = a->groups > 1 ? a->experts / a->groups : a->experts;
    gmm__route_best best = { 0u, 0 };
    uint64_t group_key = 0;
    int32_t e;
#pragma unroll 1
    for (e = gmm__lane(); e < a->experts; e += 32) {
        float v = x[e];
        if (a->expert_bias) v += a->expert_bias[e];
        if (a->multipliers) v = gmm_exp(gmm__route_load(&a->logits, t, e) - m) * a->multipliers[e];
        if (a->groups > 1) values[gmm__route_key_at(e)] = v;
        else gmm__route_put_key(keys, e, gmm__score_key(v), &best);
    }
    if (a->groups <= 1) return best;
    group_key = gmm__route_choose_groups(a, values, group_sums);
#pragma unroll 1
    for (e = gmm__lane(); e < a->experts; e += 32) {
        const int32_t g = e / members, chosen = gmm__sort_key(group_sums[g], g) >= group_key;
        gmm__route_put_key(keys, e, chosen ? gmm__score_key(values[gmm__route_key_at(e)]) : 0u, &best);
    }
    return best;
}

/* Takes the best `count` experts that are left; lane i receives the i-th. count <= 32, experts <= 1024, and at least
   `count` experts have keys above 0. Expert e belongs to lane e % 32, which keeps the best of its experts in `best`.
   Once that one is chosen, the whole warp searches the lane's next best, each lane one row of 32 keys, so that the time
   hardly depends on the number of experts. */
GMM__DEVICE int32_t gmm__route_take(uint32_t *keys, int32_t experts, int32_t count, gmm__route_best *best) {
    const uint32_t all = 0xFFFFFFFFu;
    const int32_t lane = gmm__lane();
    int32_t chosen = 0, i;
#pragma unroll 2
    for (i = 0; i < count; i++) {
        const uint32_t key = __reduce_max_sync(all, best->key);
        const int32_t e = (int32_t)__reduce_min_sync(all, best->key == key ? (uint32_t)best->e : all), owner = e & 31;
        const int32_t mine = 32 * lane + owner, at = GMM__ROUTE_PITCH * lane + owner; /* gmm__route_key_at(mine) */
        const uint32_t k = mine < experts && mine != e ? keys[at] : 0u, next = __reduce_max_sync(all, k);
        const int32_t next_e = (int32_t)__reduce_min_sync(all, k == next ? (uint32_t)mine : all);
        if (mine == e) keys[at] = 0u;
        if (lane == owner) {
            best->key = next;
            best->e = next_e;
        }
        if (lane == i) chosen = e;
        __syncwarp();
    }
    return chosen;
}
/* The same for more than 1024 experts: a lane reads several rows. */
GMM__DEVICE int32_t gmm__route_take_many(uint32_t *keys, int32_t experts, int32_t count, gmm__route_best *best) {
    const uint32_t all = 0xFFFFFFFFu;
    const int32_t lane = gmm__lane();
    int32_t chosen = 0, i, mine;
#pragma unroll 1
    for (i = 0; i < count; i++) {
        const uint32_t key = __reduce_max_sync(all, best->key);
        const int32_t e = (int32_t)__reduce_min_sync(all, best->key == key ? (uint32_t)best->e : all), owner = e & 31;
        gmm__route_best next = { 0u, 0 };
        uint32_t k;
        if (lane == owner) keys[gmm__route_key_at(e)] = 0u;
        __syncwarp();
#pragma unroll 1
        for (mine = 32 * lane + owner; mine < experts; mine += 1024) {
            k = keys[gmm__route_key_at(mine)];
            if (k <= next.key) continue;
            next.key = k;
            next.e = mine;
        }
        k = __reduce_max_sync(all, next.key);
        mine = (int32_t)__reduce_min_sync(all, next.key == k ? (uint32_t)next.e : all);
        if (lane == owner) {
            best->key = k;
            best->e = mine;
        }
        if (lane == i) chosen = e;
    }
    return chosen;
}

/* Chooses the experts of a token by their keys, and writes indices and probabilities. With count_in_cta the CTA's
   counts in shared memory are raised, else those in global memory. */
GMM__DEVICE void gmm__route_choose(const gmm__route_args *a, int64_t t, int64_t sequence, const float *x,
                                   uint32_t *keys, gmm__route_best best, int32_t *cta_counts) {
    const int32_t lane = gmm__lane(), several = a->topk > 32;
    int32_t *indices = a->indices + t * a->topk, base, i;
    float *probs = a->probs + t * a->topk, s = 0.0f, selected_sum = 0.0f, divisor = 1.0f;
    __syncwarp();
#pragma unroll 1
    for (base = 0; base < a->topk; base += 32) {
        const int32_t n = min(a->topk - base, 32);
        const int32_t e = a->experts <= 1024 ? gmm__route_take(keys, a->experts, n, &best)
                                             : gmm__route_take_many(keys, a->experts, n, &best);
        if (lane < n) {
            indices[base + lane] = e;
            s = x[e];
            selected_sum += s;
            if (several) probs[base + lane] = s;
            if (a->count_in_cta) atomicAdd(&cta_counts[e], 1);
            else if (a->counts) atomicAdd(&a->counts[e], 1);
            if (a->sequence_counts) atomicAdd(&a->sequence_counts[sequence * a->experts + e], 1);
        }
    }
    __syncwarp();
    if (a->normalize) {
        selected_sum = gmm__warp_sum(selected_sum);
        divisor = a->sigmoid ? selected_sum + 1e-20f : selected_sum;
    }
#pragma unroll 1
    for (i = lane; i < a->topk; i += 32) {
        if (several) s = probs[i];
        probs[i] = a->scale * gmm__safe_quotient(s, divisor);
    }
}

/* Routes a warp's tokens with its arrays. */
GMM__DEVICE void gmm__route_tokens(const gmm__route_args *a, float *x, int32_t *cta_counts) {
    const uint32_t warps = blockDim.x / 32u;
    const int32_t lane = gmm__lane(), rows = gmm__route_rows(a->experts);
    float *values = x + 32 * (int64_t)rows, *sums = values + GMM__ROUTE_PITCH * (int64_t)rows;
    float *group_sums = sums + (a->sums ? 32 * (int64_t)rows : 0);
    uint32_t *keys = (uint32_t *)(void *)values;
    uint32_t c, n;
    int32_t i;
    for (c = blockIdx.x * warps + (uint32_t)gmm__warp(); c < a->chunks; c += gridDim.x * warps) {
        const uint32_t sequence = a->sequences > 1 ? c / a->sequence_chunks : 0;
        const uint32_t first = (c - sequence * a->sequence_chunks) * a->chunk;
        const uint32_t last = min(first + a->chunk, a->length);
        float z_sum = 0.0f;
        for (n = first; n < last; n++) {
            const int64_t t = gmm__route_token(a, sequence, n);
            gmm__route_best best;
            float m, z = 1.0f;
            if (gmm__route_is_padding(a, t)) {
#pragma unroll 1
                for (i = lane; i < a->topk; i += 32) {
                    a->indices[t * a->topk + i] = -1;
                    a->probs[t * a->topk + i] = 0.0f;
                }
#pragma unroll 1
                for (i = 0; a->sums && n == first && i < rows; i++) sums[32 * i + lane] = 0.0f;
                continue;
            }
            m = gmm__route_read(a, t, x);
            if (a->softmax) gmm__route_exponentials(a, x, &m, &z);
            if (a->sums && a->z_loss) z_sum += (m + logf(z)) * (m + logf(z));
            if (a->sigmoid) best = gmm__route_sigmoid_keys(a->experts, x, keys);
            else best = gmm__route_softmax_keys(a->experts, z, x, keys);
            if (a->sums) gmm__route_add_scores(a, x, sums, n == first);
            if (a->values) best = gmm__route_values(a, t, m, x, keys, values, group_sums);
            gmm__route_choose(a, t, sequence, x, keys, best, cta_counts);
        }
        if (a->sums) {
            float *chunk_sums = a->sums + (int64_t)c * (a->experts + 1);
#pragma unroll 1
            for (i = lane; i < a->experts; i += 32) chunk_sums[i] = sums[i];
            if (lane == 0) chunk_sums[a->experts] = z_sum;
        }
    }
}

/* Selects the topk experts of each token and writes their indices and probabilities. A warp takes `chunk` consecutive
   tokens of a sequence at a time; with losses these are GMM__ROUTE_CHUNK, whose loss terms it adds up in order. With
   count_in_cta each CTA counts in shared memory, behind its warps' arrays, since atomics on the same words of global
   memory are slow. */
GMM__KERNEL __launch_bounds__(GMM__ROUTE_BLOCK, GMM__ROUTE_PER_SM)
    gmm_route_topk(const __grid_constant__ gmm__route_args a) {
    gmm_pdl_wait();
    extern __shared__ float gmm__route_shared[];
    const int32_t floats = (int32_t)gmm__route_topk_floats(a.experts, a.groups, a.sums != NULL);
    float *x = gmm__route_shared + gmm__warp() * floats;
    int32_t *counts = (int32_t *)(void *)(gmm__route_shared + (int32_t)(blockDim.x / 32u) * floats), e;
    if (a.count_in_cta) {
        for (e = (int32_t)threadIdx.x; e < a.experts; e += (int32_t)blockDim.x) counts[e] = 0;
        __syncthreads();
    }
    gmm__route_tokens(&a, x, counts);
    if (a.count_in_cta) {
        __syncthreads();
        for (e = (int32_t)threadIdx.x; e < a.experts; e += (int32_t)blockDim.x)
            if (counts[e]) atomicAdd(&a.counts[e], counts[e]);
    }
}
/* The same with the warps' arrays in `scratch`. */
GMM__KERNEL __launch_bounds__(GMM__ELEM_BLOCK, 8) gmm_route_topk_scratch(const __grid_constant__ gmm__route_args a) {
    gmm_pdl_wait();
    const int64_t floats = gmm__route_topk_floats(a.experts, a.groups, a.sums != NULL);
    gmm__route_tokens(&a, gmm__route_scratch(&a, floats), NULL);
}
#endif /* GMM__HOLDS(0) */

#if GMM__HOLDS(0)
/* A slot of a token as the gradient sees it: its expert e, the expert's score s, and the gradient g of its probability.
   Behind the last slot, and where the index is out of range, e is -1, s is -0 and g is 0: -0 changes no sum. */
typedef struct gmm__route_slot {
    int32_t e;
    float s, g;
} gmm__route_slot;

GMM__DEVICE gmm__route_slot gmm__route_slot_at(const gmm__route_args *a, int64_t t, int32_t i, const float *x) {
    gmm__route_slot slot;
    slot.e = i < a->topk ? a->indices[t * a->topk + i] : -1;
    if ((uint32_t)slot.e >= (uint32_t)a->experts) slot.e = -1;
    slot.s = slot.e < 0 ? -0.0f : a->sigmoid ? gmm_sigmoid(x[slot.e]) : x[slot.e];
    slot.g = slot.e < 0 ? 0.0f : a->dprobs[t * a->topk + i];
    return slot;
}

/* Adds to w[e] the terms of probabilities, scale s_i / D, where D is the sum over the selected scores if they are
   normalised, else 1. Lane i has slot i of each 32, and sums are in the order of slots. several:
   topk is above 32, so that slots are read again for each 32; a constant of each call, which makes two versions. */
GMM__DEVICE void gmm__route_slot_terms(const gmm__route_args *a, int64_t t, const float *x, float *w, int32_t several) {
    const int32_t lane = gmm__lane(), step = several ? 32 : a->topk;
    float divisor = 1.0f, weighted_sum = 0.0f;
    gmm__route_slot slot = gmm__route_slot_at(a, t, lane, x);
    int32_t base, i;
    if (a->normalize) {
        float sum = 0.0f;
#pragma unroll 1
        for (base = 0; base < a->topk; base += step) {
            if (several) slot = gmm__route_slot_at(a, t, base + lane, x);
#pragma unroll 4
            for (i = 0; i < min(a->topk - base, step); i++) sum += __shfl_sync(0xFFFFFFFFu, slot.s, i);
        }
        divisor = a->sigmoid ? sum + 1e-20f : sum;
#pragma unroll 1
        for (base = 0; base < a->topk; base += step) {
            float quotient;
            if (several) slot = gmm__route_slot_at(a, t, base + lane, x);
            quotient = slot.e < 0 ? -0.0f : gmm__safe_quotient(slot.s, divisor);
#pragma unroll 4
            for (i = 0; i < min(a->topk - base, step); i++)
                weighted_sum += __shfl_sync(0xFFFFFFFFu, slot.g, i) * __shfl_sync(0xFFFFFFFFu, quotient, i);
        }
    }
#pragma unroll 1
    for (base = 0; base < a->topk; base += step) {
        float part, difference;
        int32_t order;
        if (several) slot = gmm__route_slot_at(a, t, base + lane, x);
        part = a->scale * gmm__safe_quotient(slot.s, divisor);
        difference = slot.g - weighted_sum;
        /* lanes whose slots have the same expert add one after another, in the order of slots */
        order = __popc(__match_any_sync(0xFFFFFFFFu, slot.e) & ((1u << lane) - 1u));
        if (slot.e < 0) order = -1;
#pragma unroll 1
        for (i = 0; __any_sync(0xFFFFFFFFu, order >= i); i++) {
            if (order == i) w[slot.e] = __fmaf_rn(difference, part, w[slot.e]);
            __syncwarp();
        }
    }
}

/* Makes scores of exponentials, but leaves logits of sigmoids in x, and starts w with the terms of the auxiliary loss:
   q_e, the normalised score, has the gradient aux c_e. w is 0 behind the last expert. */
GMM__DEVICE void gmm__route_loss_terms(const gmm__route_args *a, const int32_t *counts, float aux, float z,
                                       float *x, float *w) {
    const int32_t rows = gmm__route_rows(a->experts), lane = gmm__lane();
    float total = 0.0f, mean = 0.0f;
    int32_t e, i;
    if (!a->sigmoid) {
#pragma unroll 4
        for (i = 0; i < rows; i++) {
            x[32 * i + lane] = x[32 * i + lane] / z;
            w[32 * i + lane] = 0.0f;
        }
    } else {
#pragma unroll 4
        for (i = 0; i < rows; i++) w[32 * i + lane] = 0.0f;
    }
    if (a->aux == 0.0f) return;
    if (!a->sigmoid) {
#pragma unroll 4
        for (e = lane; e < a->experts; e += 32) w[e] = x[e] * (aux * (float)counts[e]);
        return;
    }
#pragma unroll 1
    for (e = lane; e < a->experts; e += 32) total += gmm_sigmoid(x[e]);
    total = gmm__warp_sum(total);
#pragma unroll 1
    for (e = lane; e < a->experts; e += 32)
        mean += aux * (float)counts[e] * gmm__safe_quotient(gmm_sigmoid(x[e]), total);
    mean = gmm__warp_sum(mean);
#pragma unroll 1
    for (e = lane; e < a->experts; e += 32)
        w[e] = gmm__safe_quotient(gmm_sigmoid(x[e]), total) * (aux * (float)counts[e] - mean);
}

/* dlogits of a warp's tokens. w[e] is the score times its gradient: every score in a denominator then meets a score in
   a numerator, which avoids quotients of two small numbers. x[e] is the score, or the logit of a sigmoid. */
GMM__DEVICE void gmm__route_gradients(const gmm__route_args *a, float *x) {
    const int64_t warps = blockDim.x / 32u, stride = (int64_t)gridDim.x * warps;
    const int32_t lane = gmm__lane(), rows = gmm__route_rows(a->experts);
    const float z_scale = a->z != 0.0f ? (a->dloss ? a->dloss[1] : 1.0f) * 2.0f * gmm__route_z(a) : 0.0f;
    float *w = x + 32 * (int64_t)rows;
    int64_t t;
    for (t = (int64_t)blockIdx.x * warps + gmm__warp(); t < a->tokens; t += stride) {
        const int64_t sequence = gmm__route_sequence(a, t);
        const int32_t *counts = a->sequence_counts ? a->sequence_counts + sequence * a->experts : a->counts;
        const float aux = a->aux != 0.0f ? (a->dloss ? a->dloss[0] : 1.0f) * gmm__route_aux(a, sequence) : 0.0f;
        float m, z = 1.0f, mean = 0.0f;
        int32_t e, i;
        if (gmm__route_is_padding(a, t)) {
#pragma unroll 1
            for (e = lane; e < a->experts; e += 32) gmm__route_store(&a->dlogits, t, e, 0.0f);
            continue;
        }
        m = gmm__route_read(a, t, x);
        if (!a->sigmoid || a->z != 0.0f) gmm__route_exponentials(a, x, &m, &z);
        gmm__route_loss_terms(a, counts, aux, z, x, w);
        __syncwarp();
        if (a->dprobs && a->topk <= 32) gmm__route_slot_terms(a, t, x, w, 0);
        else if (a->dprobs) gmm__route_slot_terms(a, t, x, w, 1);
        if (a->sigmoid) {
#pragma unroll 1
            for (i = 0; i < rows; i++) {
                float one_minus_s; /* without cancellation */
                (void)gmm_sigmoid_rest(x[32 * i + lane], &one_minus_s);
                w[32 * i + lane] *= one_minus_s;
            }
        } else {
#pragma unroll 4
            for (i = 0; i < rows; i++) mean += w[32 * i + lane];
            mean = gmm__warp_sum(mean);
#pragma unroll 4
            for (i = 0; i < rows; i++) w[32 * i + lane] = w[32 * i + lane] - x[32 * i + lane] * mean;
        }
        if (a->z != 0.0f) {
            const float scale = z_scale * (m + logf(z));
#pragma unroll 1
            for (i = 0; i < rows; i++) {
                const float l = x[32 * i + lane];
                w[32 * i + lane] += scale * (a->sigmoid ? gmm_exp(l - m) / z : l);
            }
        }
        gmm__route_write(a, t, w);
    }
}

/* dlogits of each token from the gradients of probabilities and losses. One warp per token. */
GMM__KERNEL __launch_bounds__(GMM__ELEM_BLOCK, 8) gmm_route_gradient(const __grid_constant__ gmm__route_args a) {
    gmm_pdl_wait();
    extern __shared__ float gmm__route_shared[];
    gmm__route_gradients(&a, gmm__route_shared + gmm__warp() * (int32_t)gmm__route_gradient_floats(a.experts));
}
/* The same with the warps' arrays in `scratch`. */
GMM__KERNEL __launch_bounds__(GMM__ELEM_BLOCK, 8)
    gmm_route_gradient_scratch(const __grid_constant__ gmm__route_args a) {
    gmm_pdl_wait();
    gmm__route_gradients(&a, gmm__route_scratch(&a, gmm__route_gradient_floats(a.experts)));
}
#endif /* GMM__HOLDS(0) */

/* ............................................................................................. Permutation maps ... */

#if GMM__HOLDS(0)
/* counts[e][c] = slots of expert e in chunk c. One CTA per chunk. Integer atomics, so the order of additions does
   not matter. */
GMM__KERNEL __launch_bounds__(GMM__ELEM_BLOCK, 8) gmm_permute_count(const __grid_constant__ gmm__map_args a) {
    gmm_pdl_wait();
    extern __shared__ int32_t gmm__map_shared[];
    const int64_t chunks = (a.slots + GMM__MAP_CHUNK - 1) / GMM__MAP_CHUNK;
    /* else counts are in device memory, and the launcher has zeroed them */
    const int shared = (int64_t)a.experts * 4 <= GMM__ELEM_SHARED;
    int64_t c;
    for (c = blockIdx.x; c < chunks; c += gridDim.x) {
        int32_t e, i;
        if (shared) {
            for (e = (int32_t)threadIdx.x; e < a.experts; e += GMM__ELEM_BLOCK) gmm__map_shared[e] = 0;
            __syncthreads();
        }
        for (i = (int32_t)threadIdx.x; i < GMM__MAP_CHUNK; i += GMM__ELEM_BLOCK) {
            const int64_t slot = c * GMM__MAP_CHUNK + i;
            if (slot >= a.slots) break;
            e = a.indices[slot];
            if (e >= 0 && e < a.experts) atomicAdd(shared ? &gmm__map_shared[e] : &a.counts[e * chunks + c], 1);
            else if (e != -1) gmm__fault(a.fault, (uint32_t)GMM_FAULT_INDEX);
        }
        if (shared) {
            __syncthreads();
            for (e = (int32_t)threadIdx.x; e < a.experts; e += GMM__ELEM_BLOCK)
                a.counts[e * chunks + c] = gmm__map_shared[e];
            __syncthreads();
        }
    }
}

/* Exclusive prefix sums of each expert's counts over the chunks, in place; starts[e] receives the total. One warp
   per expert. */
GMM__KERNEL __launch_bounds__(GMM__ELEM_BLOCK, 8) gmm_permute_scan(const __grid_constant__ gmm__map_args a) {
    gmm_pdl_wait();
    const int64_t chunks = (a.slots + GMM__MAP_CHUNK - 1) / GMM__MAP_CHUNK;
    int64_t e;
    for (e = (int64_t)blockIdx.x * GMM__ELEM_WARPS + gmm__warp(); e < a.experts;
         e += (int64_t)gridDim.x * GMM__ELEM_WARPS) {
        int32_t *counts = a.counts + e * chunks;
        int64_t sum = 0, base;
        for (base = 0; base < chunks; base += 32) {
            const int64_t c = base + gmm__lane();
            const int32_t n = c < chunks ? counts[c] : 0;
            const int64_t end = sum + gmm__warp_scan(n);
            if (c < chunks) counts[c] = (int32_t)(end - n);
            sum = __shfl_sync(0xFFFFFFFFu, end, 31);
        }
        if (gmm__lane() == 0) a.starts[e] = sum;
    }
}

/* starts[e] = first row of expert e, sizes[e] = its rows with padding; reports a capacity fault. One warp. */
GMM__KERNEL __launch_bounds__(32, 1) gmm_permute_starts(const __grid_constant__ gmm__map_args a) {
    gmm_pdl_wait();
    int64_t begin = 0;
    int32_t base, overflow = 0;
    for (base = 0; base < a.experts; base += 32) {
        const int32_t e = base + gmm__lane();
        const int64_t n = e < a.experts ? a.starts[e] : 0, padded = (n + a.align - 1) / a.align * a.align;
        const int64_t end = begin + gmm__warp_scan(padded);
        const int64_t first = end - padded < a.capacity ? end - padded : a.capacity;
        const int64_t last = end < a.capacity ? end : a.capacity;
        if (e < a.experts) {
            a.starts[e] = first;
            if (a.sizes) a.sizes[e] = (int32_t)(last - first);
        }
        if (end > a.capacity) overflow = 1;
        begin = __shfl_sync(0xFFFFFFFFu, end, 31);
    }
    if (overflow) gmm__fault(a.fault, (uint32_t)GMM_FAULT_CAPACITY);
}

/* Assigns rows to slots. One warp (= CTA) per chunk ranks 32 slots at a time, in the order of slots: a slot's row is
   its expert's first row plus the number of earlier slots of that expert. */
GMM__KERNEL __launch_bounds__(32, 16) gmm_permute_assign(const __grid_constant__ gmm__map_args a) {
    gmm_pdl_wait();
    extern __shared__ int32_t gmm__map_shared[];
    const int64_t chunks = (a.slots + GMM__MAP_CHUNK - 1) / GMM__MAP_CHUNK;
    const int shared = (int64_t)a.experts * 4 <= GMM__ELEM_SHARED;
    const int32_t lane = gmm__lane();
    int64_t c;
    for (c = blockIdx.x; c < chunks; c += gridDim.x) {
        int32_t *next = shared ? gmm__map_shared : a.counts + c; /* rank of the next slot of each expert */
        const int64_t stride = shared ? 1 : chunks;
        int32_t e, i;
        for (e = lane; shared && e < a.experts; e += 32) next[e] = a.counts[e * chunks + c];
        __syncwarp();
        for (i = lane; i < GMM__MAP_CHUNK; i += 32) {
            const int64_t slot = c * GMM__MAP_CHUNK + i;
            const int32_t expert = slot < a.slots ? a.indices[slot] : -1;
            const int valid = expert >= 0 && expert < a.experts;
            const uint32_t peers = __match_any_sync(0xFFFFFFFFu, valid ? expert : -1);
            const int32_t rank = __popc(peers & ((1u << lane) - 1u));
            const int32_t expert_rank = valid ? next[expert * stride] : 0;
            int64_t row = -1;
            __syncwarp();
            if (valid && rank == 0) next[expert * stride] = expert_rank + __popc(peers);
            __syncwarp();
            if (valid) row = a.starts[expert] + expert_rank + rank;
            if (row >= a.capacity) row = -1;
            if (slot < a.slots && a.row_of) a.row_of[slot] = (int32_t)row;
            if (row >= 0 && a.slot_of) a.slot_of[row] = (int32_t)slot;
        }
        __syncwarp();
    }
}

/* dprobs[slot] = gradient of the probability of the slot's row; dropped slots receive 0. One thread per slot. */
GMM__KERNEL __launch_bounds__(GMM__ELEM_BLOCK, 16) gmm_gather_probs(const __grid_constant__ gmm__permute_args a) {
    gmm_pdl_wait();
    const int64_t slots = a.tokens * a.topk, stride = (int64_t)gridDim.x * GMM__ELEM_BLOCK;
    int64_t i;
    for (i = (int64_t)blockIdx.x * GMM__ELEM_BLOCK + threadIdx.x; i < slots; i += stride) {
        const int32_t row = gmm__map_entry(a.row_of, i, a.capacity, a.fault);
        a.dprobs[i] = row >= 0 ? a.row_probs_in[row] : 0.0f;
    }
}

/* row_probs[r] = probability of the row's slot, 0 in padding. One thread per row. */
GMM__KERNEL __launch_bounds__(GMM__ELEM_BLOCK, 16) gmm_gather_row_probs(const __grid_constant__ gmm__permute_args a) {
    gmm_pdl_wait();
    const int64_t valid_rows = gmm__valid_rows(a.sizes, a.experts, a.capacity, a.fault), slots = a.tokens * a.topk;
    const int64_t rows = a.tail_zero ? a.capacity : valid_rows, stride = (int64_t)gridDim.x * GMM__ELEM_BLOCK;
    int64_t row;
    for (row = (int64_t)blockIdx.x * GMM__ELEM_BLOCK + threadIdx.x; row < rows; row += stride) {
        const int32_t slot = row < valid_rows ? gmm__map_entry(a.slot_of, row, slots, a.fault) : -1;
        a.row_probs[row] = slot >= 0 ? a.probs[slot] : 0.0f;
    }
}
#endif /* GMM__HOLDS(0) */

/* .................................................................................................... Launchers ... */

#if GMM__HOLDS(0)
/* Starts at most limits.max_ctas CTAs; kernels loop over their tasks, and results do not depend on the grid. Every
   kernel calls gmm_pdl_wait, but gmm_act_dprob gmm_pdl_wait_only. Those without dynamic shared memory have next to
   none, and 16 CTAs per multiprocessor. */
static GMM__UNUSED cudaError_t gmm__k_launch(const void *kernel, int64_t blocks, gmm__launch_limits limits,
                                             int32_t threads, size_t shared, const void *args, cudaStream_t stream) {
    if (blocks > limits.max_ctas) blocks = limits.max_ctas;
    if (blocks < 1) blocks = 1;
    return gmm_launch_pdl(kernel, limits.pdl, (unsigned)blocks, (unsigned)threads, shared,
                          shared ? 0 : GMM__SM_KIB(16, 0), args, stream);
}

/* For kernels whose tasks are `parts` parts of each of `rows` rows, one warp per task. */
static GMM__UNUSED cudaError_t gmm__k_launch_rows(const void *kernel, int64_t rows, int64_t parts,
                                                  gmm__launch_limits limits, const void *args, cudaStream_t stream) {
    if (rows <= 0 || parts <= 0) return cudaSuccess;
    if (rows > INT32_MAX || parts > INT32_MAX) return cudaErrorInvalidValue;
    return gmm__k_launch(kernel, (rows * parts - 1) / GMM__ELEM_WARPS + 1, limits, GMM__ELEM_BLOCK, 0, args, stream);
}

/* dtype of the precision instance that serves a view and the views before it, which have the dtype `dtype`; GMM_NONE
   selects the instance `any`. */
static GMM__UNUSED gmm_dtype gmm__k_common_dtype(gmm_dtype dtype, const gmm__view *m, int64_t cols) {
    if (!m->data) return dtype;
    return m->dtype == dtype && m->vec && cols % 8 == 0 ? dtype : GMM_NONE;
}

/* The kernels of each operation by precision, in the order of GMM__ELEM_PRECISIONS. One name a line: `make tags`. */
static const void *const gmm__act_fwd_kernels[] = {
    (const void *)gmm_act_fwd_bf16,
    GMM__IF_F16((const void *)gmm_act_fwd_f16,)
    (const void *)gmm_act_fwd_f32,
    (const void *)gmm_act_fwd_any
};
#ifndef GMM_NO_QUANT
static const void *const gmm__act_fwd_amax_kernels[] = {
    (const void *)gmm_act_fwd_amax_bf16,
    GMM__IF_F16((const void *)gmm_act_fwd_amax_f16,)
    (const void *)gmm_act_fwd_amax_f32,
    (const void *)gmm_act_fwd_amax_any
};
#endif
static const void *const gmm__act_bwd_kernels[] = {
    (const void *)gmm_act_bwd_bf16,
    GMM__IF_F16((const void *)gmm_act_bwd_f16,)
    (const void *)gmm_act_bwd_f32,
    (const void *)gmm_act_bwd_any
};
#ifndef GMM_NO_QUANT
static const void *const gmm__act_bwd_amax_kernels[] = {
    (const void *)gmm_act_bwd_amax_bf16,
    GMM__IF_F16((const void *)gmm_act_bwd_amax_f16,)
    (const void *)gmm_act_bwd_amax_f32,
    (const void *)gmm_act_bwd_amax_any
};
#endif
static const void *const gmm__unpermute_fwd_kernels[] = {
    (const void *)gmm_unpermute_fwd_bf16,
    GMM__IF_F16((const void *)gmm_unpermute_fwd_f16,)
    (const void *)gmm_unpermute_fwd_f32,
    (const void *)gmm_unpermute_fwd_any
};
static const void *const gmm__unpermute_bwd_kernels[] = {
    (const void *)gmm_unpermute_bwd_bf16,
    GMM__IF_F16((const void *)gmm_unpermute_bwd_f16,)
    (const void *)gmm_unpermute_bwd_f32,
    (const void *)gmm_unpermute_bwd_any
};
static const void *const gmm__unpermute_dots_kernels[] = {
    (const void *)gmm_unpermute_dots_bf16,
    GMM__IF_F16((const void *)gmm_unpermute_dots_f16,)
    (const void *)gmm_unpermute_dots_f32,
    (const void *)gmm_unpermute_dots_any
};

/* The kernel whose operands have the dtype `dtype`; GMM_NONE selects the instance `any`. */
static GMM__UNUSED const void *gmm__k_precision_kernel(const void *const kernels[], gmm_dtype dtype) {
#define GMM__X(tag, value) value,
    static const gmm_dtype DTYPES[] = { GMM__ELEM_PRECISIONS(GMM__X) };
#undef GMM__X
    int i = 0;
    while (DTYPES[i] != dtype && DTYPES[i] != GMM_NONE) i++;
    return kernels[i];
}

/* The kernels of each operation by copy unit, in the order of GMM__ELEM_UNITS. */
static const void *const gmm__copy_kernels[] = {
    (const void *)gmm_copy_b16,
    (const void *)gmm_copy_b4,
    (const void *)gmm_copy_b2,
    (const void *)gmm_copy_b1
};
static const void *const gmm__permute_rows_kernels[] = {
    (const void *)gmm_permute_rows_b16,
    (const void *)gmm_permute_rows_b4,
    (const void *)gmm_permute_rows_b2,
    (const void *)gmm_permute_rows_b1
};
static const void *const gmm__permute_tokens_kernels[] = {
    (const void *)gmm_permute_tokens_b16,
    (const void *)gmm_permute_tokens_b4,
    (const void *)gmm_permute_tokens_b2,
    (const void *)gmm_permute_tokens_b1
};
static const void *const gmm__pad_kernels[] = {
    (const void *)gmm_pad_b16,
    (const void *)gmm_pad_b4,
    (const void *)gmm_pad_b2,
    (const void *)gmm_pad_b1
};
static const void *const gmm__glu_rows_kernels[] = {
    (const void *)gmm_glu_rows_b16,
    (const void *)gmm_glu_rows_b4,
    (const void *)gmm_glu_rows_b2,
    (const void *)gmm_glu_rows_b1
};
static const void *const gmm__glu_columns_kernels[] = {
    (const void *)gmm_glu_columns_b16,
    (const void *)gmm_glu_columns_b4,
    (const void *)gmm_glu_columns_b2,
    (const void *)gmm_glu_columns_b1
};

/* The kernel of the widest unit whose size divides `bits`, the bitwise OR of addresses and byte counts. *bytes receives
   the size. */
static GMM__UNUSED const void *gmm__k_unit_kernel(const void *const kernels[], uintptr_t bits, int64_t *bytes) {
#define GMM__X(tag, type, size) size,
    static const int32_t SIZES[] = { GMM__ELEM_UNITS(GMM__X) };
#undef GMM__X
    int i = 0;
    while (bits % (uintptr_t)SIZES[i] != 0) i++;
    *bytes = SIZES[i];
    return kernels[i];
}

static GMM__UNUSED int64_t gmm__k_bytes(gmm_dtype dtype) { return gmm_dtype_bits(dtype) / 8; }
static GMM__UNUSED uintptr_t gmm__k_alignment(const gmm__view *m) {
    return (uintptr_t)m->data | (uintptr_t)(m->ld * gmm__k_bytes(m->dtype));
}
static GMM__UNUSED int64_t gmm__k_parts(int64_t cols) { return (cols + GMM__ELEM_SPAN - 1) / GMM__ELEM_SPAN; }
static GMM__UNUSED int64_t gmm__k_copy_spans(int64_t units) { return (units + GMM__COPY_SPAN - 1) / GMM__COPY_SPAN; }

static GMM__UNUSED int32_t gmm__k_act_layout(int32_t gated, int32_t interleave) {
    return !gated || interleave % 8 == 0 ? GMM__GLU_SPLIT : interleave == 1 ? GMM__GLU_PAIRS : GMM__GLU_ELEMENT;
}

static GMM__UNUSED cudaError_t gmm__k_act_fwd(const gmm__act_args *args, gmm__launch_limits limits,
                                              cudaStream_t stream) {
    const void *const *kernels = GMM__IF_QUANT(args->amax ? gmm__act_fwd_amax_kernels :) gmm__act_fwd_kernels;
    gmm__act_args a = *args;
    gmm_dtype dtype = a.x.dtype;
    int64_t spans; /* spans that a warp processes together */
    a.layout = gmm__k_act_layout(a.gated, a.interleave);
    dtype = gmm__k_common_dtype(gmm__k_common_dtype(dtype, &a.x, a.ffn), &a.y, a.ffn);
    if (a.layout == GMM__GLU_ELEMENT) dtype = GMM_NONE;
    a.wide = a.x.dtype == GMM_F32 || a.y.dtype == GMM_F32;
    spans = dtype == GMM_BF16 || dtype == GMM_F16 ? 2 : 1;
    return gmm__k_launch_rows(gmm__k_precision_kernel(kernels, dtype), (a.rows - 1) / spans + 1, gmm__k_parts(a.ffn),
                              limits, &a, stream);
}

static GMM__UNUSED cudaError_t gmm__k_act_bwd(const gmm__act_args *args, gmm__launch_limits limits,
                                              cudaStream_t stream) {
    const void *const *kernels = GMM__IF_QUANT(args->amax ? gmm__act_bwd_amax_kernels :) gmm__act_bwd_kernels;
    gmm__act_args a = *args;
    gmm_dtype dtype = a.x.dtype;
    a.layout = gmm__k_act_layout(a.gated, a.interleave);
    dtype = gmm__k_common_dtype(gmm__k_common_dtype(dtype, &a.x, a.ffn), &a.dy, a.ffn);
    dtype = gmm__k_common_dtype(gmm__k_common_dtype(dtype, &a.dx, a.ffn), &a.y, a.ffn);
    if (a.layout == GMM__GLU_ELEMENT) dtype = GMM_NONE;
    /* determines the order of sums, so it must not depend on outputs, which may be absent */
    a.wide = a.x.dtype == GMM_F32 || a.dy.dtype == GMM_F32;
    return gmm__k_launch_rows(gmm__k_precision_kernel(kernels, dtype), a.rows,
                              a.dprob ? (int64_t)gmm__act_warps_per_row(a.ffn) : gmm__k_parts(a.ffn), limits, &a,
                              stream);
}

static GMM__UNUSED cudaError_t gmm__k_dprob(const gmm__dprob_args *a, gmm__launch_limits limits, cudaStream_t stream) {
    if (a->rows == 0) return cudaSuccess;
    return gmm__k_launch((const void *)gmm_act_dprob, (a->rows - 1) / GMM__ELEM_BLOCK + 1, limits, GMM__ELEM_BLOCK, 0,
                         a, stream);
}

static GMM__UNUSED size_t gmm__map_counts_bytes(int64_t slots, int32_t experts) {
    return (size_t)((slots + GMM__MAP_CHUNK - 1) / GMM__MAP_CHUNK) * (size_t)experts * 4;
}

static GMM__UNUSED cudaError_t gmm__k_permute_map(const gmm__map_args *a, gmm__launch_limits limits,
                                                  cudaStream_t stream) {
    const size_t histogram = (size_t)a->experts * 4, shared = histogram <= GMM__ELEM_SHARED ? histogram : 0;
    const int64_t chunks = (a->slots + GMM__MAP_CHUNK - 1) / GMM__MAP_CHUNK;
    cudaError_t status = cudaSuccess;
    if (a->slot_of) status = gmm_launch_fill(a->slot_of, UINT32_MAX, a->capacity, limits.sm_limit, limits.pdl, stream);
    if (status == cudaSuccess && !shared && chunks > 0)
        status = gmm_launch_fill(a->counts, 0, chunks * a->experts, limits.sm_limit, limits.pdl, stream);
    if (status == cudaSuccess && chunks > 0)
        status = gmm__k_launch((const void *)gmm_permute_count, chunks, limits, GMM__ELEM_BLOCK, shared, a,
                               stream);
    if (status == cudaSuccess)
        status = gmm__k_launch((const void *)gmm_permute_scan, (a->experts - 1) / GMM__ELEM_WARPS + 1, limits,
                               GMM__ELEM_BLOCK, 0, a, stream);
    if (status == cudaSuccess)
        status = gmm__k_launch((const void *)gmm_permute_starts, 1, limits, 32, 0, a, stream);
    if (status == cudaSuccess && chunks > 0 && (a->row_of || a->slot_of))
        status = gmm__k_launch((const void *)gmm_permute_assign, chunks, limits, 32, shared, a, stream);
    return status;
}

/* Alignment of a copy between two views, and conversion of strides and columns into units of `bytes`. */
static GMM__UNUSED uintptr_t gmm__k_copy_alignment(const gmm__view *src, const gmm__view *dst, int64_t cols) {
    return gmm__k_alignment(src) | gmm__k_alignment(dst) | (uintptr_t)(cols * gmm__k_bytes(src->dtype));
}
static GMM__UNUSED void gmm__k_convert_to_units(gmm__view *src, gmm__view *dst, int64_t *cols, int64_t bytes) {
    const int64_t size = gmm__k_bytes(src->dtype);
    src->ld = src->ld * size / bytes;
    dst->ld = dst->ld * size / bytes;
    *cols = *cols * size / bytes;
}

/* dst[r] = src[token of r]; row_probs. With row_of each token's row is read once; with one expert per token that
   holds for gmm_permute_rows as well. */
static GMM__UNUSED cudaError_t gmm__k_permute_rows(const gmm__permute_args *args, gmm__launch_limits limits,
                                                   cudaStream_t stream) {
    gmm__permute_args a = *args;
    const uintptr_t bits = gmm__k_copy_alignment(&a.src, &a.dst, a.hidden);
    const int tokens = a.row_of && a.topk > 1;
    int64_t bytes, rows = a.capacity, segments;
    const void *kernel = gmm__k_unit_kernel(tokens ? gmm__permute_tokens_kernels : gmm__permute_rows_kernels, bits,
                                            &bytes);
    gmm__k_convert_to_units(&a.src, &a.dst, &a.hidden, bytes);
    segments = gmm__k_copy_spans(a.hidden);
    if (tokens) rows = a.tokens > a.capacity / 32 / segments ? a.tokens : a.capacity / 32 / segments + 1;
    return gmm__k_launch_rows(kernel, a.capacity > 0 ? rows : 0, segments, limits, &a, stream);
}

/* Selects the precision instance, and the column layout of lanes (`wide`). */
static GMM__UNUSED gmm_dtype gmm__k_precision(gmm__permute_args *a) {
    a->wide = a->src.dtype == GMM_F32 || a->dst.dtype == GMM_F32;
    return gmm__k_common_dtype(gmm__k_common_dtype(a->src.dtype, &a->src, a->hidden), &a->dst, a->hidden);
}

/* dst[t] = sum over slots of (probs) src[row]. */
static GMM__UNUSED cudaError_t gmm__k_unpermute_fwd(const gmm__permute_args *args, gmm__launch_limits limits,
                                                    cudaStream_t stream) {
    gmm__permute_args a = *args;
    const gmm_dtype dtype = gmm__k_precision(&a);
    return gmm__k_launch_rows(gmm__k_precision_kernel(gmm__unpermute_fwd_kernels, dtype), a.tokens,
                              gmm__k_parts(a.hidden), limits, &a, stream);
}

/* dst[r] = (probs) src[token of r]. */
static GMM__UNUSED cudaError_t gmm__k_unpermute_bwd(const gmm__permute_args *args, gmm__launch_limits limits,
                                                    cudaStream_t stream) {
    gmm__permute_args a = *args;
    const gmm_dtype dtype = gmm__k_precision(&a);
    return gmm__k_launch_rows(gmm__k_precision_kernel(gmm__unpermute_bwd_kernels, dtype), a.capacity,
                              (gmm__k_parts(a.hidden) + 1) / 2, limits, &a, stream);
}

/* dprobs[slot] = src[token] . dst[row]; both are read. */
static GMM__UNUSED cudaError_t gmm__k_unpermute_dots(const gmm__permute_args *args, gmm__launch_limits limits,
                                                     cudaStream_t stream) {
    gmm__permute_args a = *args;
    const gmm_dtype dtype = gmm__k_precision(&a);
    return gmm__k_launch_rows(gmm__k_precision_kernel(gmm__unpermute_dots_kernels, dtype), a.tokens, a.topk, limits, &a,
                              stream);
}

static GMM__UNUSED cudaError_t gmm__k_gather_probs(const gmm__permute_args *a, gmm__launch_limits limits,
                                                   cudaStream_t stream) {
    const int64_t slots = a->tokens * a->topk;
    if (slots == 0) return cudaSuccess;
    return gmm__k_launch((const void *)gmm_gather_probs, (slots + GMM__ELEM_BLOCK - 1) / GMM__ELEM_BLOCK,
                         limits, GMM__ELEM_BLOCK, 0, a, stream);
}

static GMM__UNUSED cudaError_t gmm__k_gather_row_probs(const gmm__permute_args *a, gmm__launch_limits limits,
                                                       cudaStream_t stream) {
    if (a->capacity == 0) return cudaSuccess;
    return gmm__k_launch((const void *)gmm_gather_row_probs, (a->capacity + GMM__ELEM_BLOCK - 1) / GMM__ELEM_BLOCK,
                         limits, GMM__ELEM_BLOCK, 0, a, stream);
}

/* Row j of group g of dst is row j of group g of src, or zeros where src has no such row. */
static GMM__UNUSED cudaError_t gmm__k_pad(const gmm__pad_args *args, gmm__launch_limits limits, cudaStream_t stream) {
    gmm__pad_args a = *args;
    int64_t bytes;
    const void *kernel = gmm__k_unit_kernel(gmm__pad_kernels, gmm__k_copy_alignment(&a.src, &a.dst, a.cols), &bytes);
    gmm__k_convert_to_units(&a.src, &a.dst, &a.cols, bytes);
    /* sizes and faults are written even if there are no rows */
    return gmm__k_launch_rows(kernel, a.rows > 0 ? a.rows : 1, gmm__k_copy_spans(a.cols), limits, &a, stream);
}

/* Permutes the 2 ffn rows of each of `count` matrices. Matrices addressed by device tables are aligned to their
   dtype only. */
static GMM__UNUSED cudaError_t gmm__k_glu_rows(const gmm__glu_args *args, gmm__launch_limits limits,
                                               cudaStream_t stream) {
    gmm__glu_args a = *args;
    const int64_t size = gmm__k_bytes(a.src.dtype);
    uintptr_t bits = gmm__k_copy_alignment(&a.src, &a.dst, a.cols);
    int64_t bytes;
    const void *kernel;
    if (!a.src_table) bits |= (uintptr_t)(a.src_stride * size);
    if (!a.dst_table) bits |= (uintptr_t)(a.dst_stride * size);
    if (a.src_table || a.dst_table) bits |= (uintptr_t)size;
    if (size == 8) bits |= 4;
    kernel = gmm__k_unit_kernel(gmm__glu_rows_kernels, bits, &bytes);
    gmm__k_convert_to_units(&a.src, &a.dst, &a.cols, bytes);
    a.src_stride = a.src_stride * size / bytes;
    a.dst_stride = a.dst_stride * size / bytes;
    return gmm__k_launch_rows(kernel, a.count * 2 * a.ffn, gmm__k_copy_spans(a.cols), limits, &a, stream);
}

/* Permutes the 2 ffn columns of one matrix of `count` rows. */
static GMM__UNUSED cudaError_t gmm__k_glu_columns(const gmm__glu_args *args, gmm__launch_limits limits,
                                                  cudaStream_t stream) {
    gmm__glu_args a = *args;
    const int64_t size = gmm__k_bytes(a.src.dtype);
    int64_t bytes;
    const void *kernel = gmm__k_unit_kernel(gmm__glu_columns_kernels,
                                            gmm__k_copy_alignment(&a.src, &a.dst, a.block), &bytes);
    if (a.ffn * size % bytes != 0) return cudaErrorInvalidValue; /* cannot happen, since block divides ffn */
    a.ffn = a.ffn * size / bytes;
    gmm__k_convert_to_units(&a.src, &a.dst, &a.block, bytes);
    return gmm__k_launch_rows(kernel, a.count, gmm__k_copy_spans(2 * a.ffn), limits, &a, stream);
}

/* Treats matrices without gaps between rows as one long row. */
static GMM__UNUSED void gmm__k_flatten(const gmm__view *a, const gmm__view *b, int64_t *rows, int64_t *cols) {
    if (*rows > 1 && a->ld == *cols && b->ld == *cols) {
        *cols *= *rows;
        *rows = 1;
    }
}

/* Most columns of one launch, since kernels count columns in 32 bits. A multiple of GMM__ELEM_SPAN. */
enum { GMM__ELEM_MAX_COLS = 1 << 30 };

static GMM__UNUSED void *gmm__k_column(const gmm__view *m, int64_t col) {
    return (char *)m->data + col * gmm__k_bytes(m->dtype);
}

static GMM__UNUSED cudaError_t gmm__k_accumulate(const gmm__accumulate_args *args, gmm__launch_limits limits,
                                                 cudaStream_t stream) {
    gmm__accumulate_args a = *args;
    cudaError_t status = cudaSuccess;
    int64_t remaining;
    int32_t j, sm_limited;
    gmm__k_flatten(&a.x, &a.y, &a.rows, &a.cols);
    sm_limited = limits.sm_limit > 0 && a.rows == 1 && a.cols % 8 == 0 && !a.start.data && a.x.vec && a.y.vec &&
             a.y.dtype == GMM_F32 && (a.x.dtype == GMM_F32 || a.x.dtype == GMM_BF16);
    if (sm_limited && limits.max_ctas > limits.sm_limit) limits.max_ctas = limits.sm_limit;
    for (remaining = a.cols; remaining > 0 && status == cudaSuccess; remaining -= a.cols) {
        if (a.cols > GMM__ELEM_MAX_COLS) a.cols = GMM__ELEM_MAX_COLS;
        if (a.cols > remaining) a.cols = remaining;
        if (sm_limited)
            status = gmm__k_launch(a.x.dtype == GMM_F32 ? (const void *)gmm_accumulate_sm_limited_f32
                                                        : (const void *)gmm_accumulate_sm_limited_bf16,
                                   (a.cols / 8 - 1) / GMM__SUM_BLOCK + 1, limits, GMM__SUM_BLOCK, 0, &a, stream);
        else
            status = gmm__k_launch_rows((const void *)gmm_accumulate_rows, a.rows, (gmm__k_parts(a.cols) + 1) / 2,
                                        limits, &a, stream);
        for (j = 0; j < a.count; j++) a.addends[j] += a.cols * gmm__k_bytes(a.x.dtype);
        a.y.data = gmm__k_column(&a.y, a.cols);
        if (a.start.data) a.start.data = gmm__k_column(&a.start, a.cols);
    }
    return status;
}

static GMM__UNUSED cudaError_t gmm__k_convert(const gmm__convert_args *args, gmm__launch_limits limits,
                                              cudaStream_t stream) {
    gmm__convert_args a = *args;
    cudaError_t status = cudaSuccess;
    int64_t remaining;
    gmm__k_flatten(&a.src, &a.dst, &a.rows, &a.cols);
    if (a.src.dtype == a.dst.dtype) {
        gmm__copy_args copy;
        int64_t bytes;
        const void *kernel = gmm__k_unit_kernel(gmm__copy_kernels,
                                                gmm__k_copy_alignment(&a.src, &a.dst, a.cols), &bytes);
        gmm__k_convert_to_units(&a.src, &a.dst, &a.cols, bytes);
        copy.src = a.src.data;
        copy.dst = a.dst.data;
        copy.rows = a.rows;
        copy.cols = a.cols;
        copy.src_ld = a.src.ld;
        copy.dst_ld = a.dst.ld;
        return gmm__k_launch_rows(kernel, a.rows, gmm__k_copy_spans(a.cols), limits, &copy, stream);
    }
    for (remaining = a.cols; remaining > 0 && status == cudaSuccess; remaining -= a.cols) {
        if (a.cols > GMM__ELEM_MAX_COLS) a.cols = GMM__ELEM_MAX_COLS;
        if (a.cols > remaining) a.cols = remaining;
        status = gmm__k_launch_rows((const void *)gmm_convert_rows, a.rows, (gmm__k_parts(a.cols) + 1) / 2, limits, &a,
                                    stream);
        a.src.data = gmm__k_column(&a.src, a.cols);
        a.dst.data = gmm__k_column(&a.dst, a.cols);
    }
    return status;
}
#endif /* GMM__HOLDS(0) */

#if GMM__HOLDS(0)
/* Warps per CTA and CTAs of the routing kernels, whose warps have arrays of `floats`. *shared is 0 where the arrays do
   not fit into shared memory and are in `scratch`. */
static GMM__UNUSED int32_t gmm__route_warps(int64_t floats, size_t *shared) {
    int32_t warps = GMM__ELEM_WARPS;
    while (warps > 1 && warps * floats * 4 > GMM__ELEM_SHARED) warps /= 2;
    *shared = (size_t)warps * (size_t)floats * 4;
    if (*shared <= GMM__ELEM_SHARED) return warps;
    *shared = 0;
    return GMM__ELEM_WARPS;
}
static GMM__UNUSED int64_t gmm__route_blocks(int64_t tasks, int32_t warps, size_t shared, int64_t max_blocks) {
    const int64_t blocks = (tasks + warps - 1) / warps;
    if (!shared) max_blocks = (max_blocks - 1) / GMM__ELEM_PER_SM + 1; /* each warp has an array in the workspace */
    return blocks < max_blocks ? blocks : max_blocks;
}
/* Scratch of every routing kernel: none has more floats. */
static GMM__UNUSED size_t gmm__route_scratch_bytes(int64_t tokens, int32_t experts, int32_t groups,
                                                   int64_t max_blocks) {
    size_t shared;
    const int64_t floats = gmm__route_topk_floats(experts, groups, 1);
    const int32_t warps = gmm__route_warps(floats, &shared);
    return shared ? 0 : (size_t)gmm__route_blocks(tokens, warps, 0, max_blocks) * (size_t)warps * (size_t)floats * 4;
}
/* A launch of gmm_route_topk. A CTA that counts in shared memory ends with an atomic per expert, 32 of them in one
   instruction. So CTAs have many warps, and are about as many as run at a time (shared memory, which bounds them for
   many experts, is not considered). Where there are not many slots, these are counted one by one in global memory. */
typedef struct gmm__route_grid {
    const void *kernel;
    int64_t blocks;
    int32_t warps, count_in_cta;
    size_t shared;
} gmm__route_grid;

/* The multiprocessors of a launch, and the CTAs of `warps` warps that it has on each: with sm_limit, where max_ctas is
   that limit, one. */
static GMM__UNUSED int64_t gmm__route_processors(gmm__launch_limits limits) {
    return limits.sm_limit > 0 ? limits.max_ctas : (limits.max_ctas - 1) / GMM__ELEM_PER_SM + 1;
}
static GMM__UNUSED int32_t gmm__route_per_sm(gmm__launch_limits limits, int32_t warps) {
    return limits.sm_limit > 0 ? 1 : GMM__ROUTE_PER_SM * GMM__ROUTE_BLOCK / 32 / warps;
}
/* Tokens that a warp takes together where no loss fixes their number: the least number with which all warps of the
   grid run at a time, at most GMM__ROUTE_CHUNK. */
static GMM__UNUSED uint32_t gmm__route_chunk(const gmm__route_args *a, gmm__launch_limits limits) {
    const int32_t cta_warps = GMM__ROUTE_BLOCK / 32;
    const int64_t warps = gmm__route_processors(limits) * gmm__route_per_sm(limits, cta_warps) * cta_warps;
    const int64_t tokens = (a->tokens - 1) / warps + 1;
    return tokens < GMM__ROUTE_CHUNK ? (uint32_t)tokens : (uint32_t)GMM__ROUTE_CHUNK;
}
static GMM__UNUSED gmm__route_grid gmm__route_topk_grid(const gmm__route_args *a, gmm__launch_limits limits) {
    const int64_t tasks = a->chunks, processors = gmm__route_processors(limits);
    const int64_t floats = gmm__route_topk_floats(a->experts, a->groups, a->sums != NULL);
    int64_t bytes, most;
    gmm__route_grid grid;
    grid.warps = tasks < GMM__ROUTE_BLOCK / 32 * processors ? GMM__ELEM_WARPS : GMM__ROUTE_BLOCK / 32;
    while (grid.warps > 1 && (grid.warps * floats + a->experts) * 4 > GMM__ELEM_SHARED) grid.warps /= 2;
    bytes = (grid.warps * floats + a->experts) * 4;
    most = processors * gmm__route_per_sm(limits, grid.warps);
    grid.blocks = (tasks + grid.warps - 1) / grid.warps;
    if (grid.blocks > most) grid.blocks = most;
    grid.kernel = (const void *)gmm_route_topk;
    grid.shared = (size_t)bytes;
    grid.count_in_cta = a->counts && bytes <= GMM__ELEM_SHARED &&
                        grid.blocks * a->experts <= 4 * a->tokens * a->topk;
    if (grid.count_in_cta) return grid;
    grid.warps = gmm__route_warps(floats, &grid.shared);
    if (!grid.shared) grid.kernel = (const void *)gmm_route_topk_scratch;
    grid.blocks = gmm__route_blocks(tasks, grid.warps, grid.shared, limits.max_ctas);
    return grid;
}
/* Bytes of the partial sums of all levels of the reduction. */
static GMM__UNUSED size_t gmm__route_sums_bytes(int64_t tokens, int32_t experts, int32_t sequences) {
    int64_t rows = (tokens / sequences + GMM__ROUTE_CHUNK - 1) / GMM__ROUTE_CHUNK, total_rows = rows;
    while (rows > 1) {
        rows = (rows + GMM__ROUTE_FOLD - 1) / GMM__ROUTE_FOLD;
        total_rows += rows;
    }
    return (size_t)(total_rows * sequences) * (size_t)(experts + (int64_t)1) * 4;
}

/* Adds up the partial sums of each of `batch` sequences, and makes a->sums point to the results. */
static GMM__UNUSED cudaError_t gmm__k_route_fold(gmm__route_args *a, int64_t batch, gmm__launch_limits limits,
                                                 cudaStream_t stream) {
    int64_t rows = (a->tokens / batch + GMM__ROUTE_CHUNK - 1) / GMM__ROUTE_CHUNK;
    cudaError_t status = cudaSuccess;
    while (status == cudaSuccess && rows > 1) {
        gmm__fold_args fold;
        fold.in = a->sums;
        fold.out = a->sums + batch * rows * (a->experts + (int64_t)1);
        fold.rows = rows;
        fold.cols = a->experts + (int64_t)1;
        fold.batch = batch;
        rows = (rows + GMM__ROUTE_FOLD - 1) / GMM__ROUTE_FOLD;
        status = gmm__k_launch((const void *)gmm_route_fold, batch * rows * ((fold.cols + 31) / 32), limits,
                               GMM__ELEM_BLOCK, 0, &fold, stream);
        a->sums = fold.out;
    }
    return status;
}

/* The number of tokens that are no padding, where there is padding. */
static GMM__UNUSED cudaError_t gmm__k_route_valid(const gmm__route_args *a, gmm__launch_limits limits,
                                                  cudaStream_t stream) {
    const int64_t blocks = (a->tokens + GMM__ELEM_BLOCK - 1) / GMM__ELEM_BLOCK;
    cudaError_t status;
    if (!a->padding) return cudaSuccess;
    status = gmm_launch_fill(a->valid, 0, a->sequences, limits.sm_limit, limits.pdl, stream);
    if (status != cudaSuccess || a->tokens == 0) return status;
    return gmm__k_launch((const void *)gmm_route_valid, blocks < limits.max_ctas ? blocks : limits.max_ctas, limits,
                         GMM__ELEM_BLOCK, 0, a, stream);
}

/* Sinkhorn's multipliers of experts. */
static GMM__UNUSED cudaError_t gmm__k_sinkhorn(const gmm__route_args *args, gmm__launch_limits limits,
                                               cudaStream_t stream) {
    const int64_t chunks = (args->tokens + GMM__ROUTE_CHUNK - 1) / GMM__ROUTE_CHUNK;
    gmm__route_args a = *args;
    size_t shared;
    const int32_t warps = gmm__route_warps(a.experts, &shared);
    cudaError_t status;
    int32_t i;
    if (shared) a.scratch = NULL;
    a.sums = NULL;
    status = gmm__k_launch((const void *)gmm_route_balance, 1, limits, 32, 0, &a, stream);
    for (i = 0; i < a.iterations && status == cudaSuccess; i++) {
        a.sums = args->sums;
        status = gmm__k_launch((const void *)gmm_route_sinkhorn,
                               gmm__route_blocks(chunks, warps, shared, limits.max_ctas), limits, warps * 32, shared,
                               &a, stream);
        if (status == cudaSuccess) status = gmm__k_route_fold(&a, 1, limits, stream);
        if (status == cudaSuccess)
            status = gmm__k_launch((const void *)gmm_route_balance, 1, limits, 32, 0, &a, stream);
    }
    return status;
}

static GMM__UNUSED cudaError_t gmm__k_topk_fwd(const gmm__route_args *args, int losses, gmm__launch_limits limits,
                                               cudaStream_t stream) {
    gmm__route_args a = *args;
    cudaError_t status = cudaSuccess;
    if (a.counts) status = gmm_launch_fill(a.counts, 0, a.experts, limits.sm_limit, limits.pdl, stream);
    if (status == cudaSuccess && a.sequence_counts)
        status = gmm_launch_fill(a.sequence_counts, 0, (int64_t)a.sequences * a.experts, limits.sm_limit, limits.pdl,
                                 stream);
    if (status == cudaSuccess) status = gmm__k_route_valid(&a, limits, stream);
    if (status == cudaSuccess && a.tokens > 0 && a.multipliers) status = gmm__k_sinkhorn(&a, limits, stream);
    if (!losses || a.tokens == 0) a.sums = NULL;
    if (status == cudaSuccess && a.tokens > 0) {
        gmm__route_grid grid;
        a.softmax = !a.sigmoid || (a.sums && a.z_loss) || a.multipliers;
        a.values = a.expert_bias || a.multipliers || a.groups > 1;
        a.length = (uint32_t)a.tokens / (uint32_t)a.sequences;
        a.chunk = a.sums ? (uint32_t)GMM__ROUTE_CHUNK : gmm__route_chunk(&a, limits);
        a.sequence_chunks = (a.length - 1) / a.chunk + 1;
        a.chunks = a.sequence_chunks * (uint32_t)a.sequences;
        grid = gmm__route_topk_grid(&a, limits);
        a.count_in_cta = grid.count_in_cta;
        status = gmm__k_launch(grid.kernel, grid.blocks, limits, grid.warps * 32, grid.shared, &a, stream);
    }
    if (status == cudaSuccess && a.sums) status = gmm__k_route_fold(&a, a.sequences, limits, stream);
    if (status == cudaSuccess && (a.offsets || a.aux_loss || a.z_loss || a.total_counts))
        status = gmm__k_launch((const void *)gmm_route_finish, 1, limits, 32, 0, &a, stream);
    return status;
}

static GMM__UNUSED cudaError_t gmm__k_topk_bwd(const gmm__route_args *args, gmm__launch_limits limits,
                                               cudaStream_t stream) {
    gmm__route_args a = *args;
    size_t shared;
    const int32_t warps = gmm__route_warps(gmm__route_gradient_floats(a.experts), &shared);
    cudaError_t status;
    if (a.tokens == 0) return cudaSuccess;
    status = gmm__k_route_valid(&a, limits, stream);
    if (status != cudaSuccess) return status;
    return gmm__k_launch(shared ? (const void *)gmm_route_gradient : (const void *)gmm_route_gradient_scratch,
                         gmm__route_blocks(a.tokens, warps, shared, limits.max_ctas), limits,
                         warps * 32, shared, &a, stream);
}

/* `offsets` are the prefix sums of the counts. */
static GMM__UNUSED cudaError_t gmm__k_route_dense(const gmm__dense_args *a, int32_t *offsets,
                                                  gmm__launch_limits limits, cudaStream_t stream) {
    cudaError_t status = cudaSuccess;
    if (a->counts) status = gmm_launch_fill(a->counts, 0, a->experts, limits.sm_limit, limits.pdl, stream);
    if (status == cudaSuccess && a->tokens > 0)
        status = gmm__k_launch((const void *)gmm_route_dense,
                               gmm__route_blocks(a->tokens, GMM__ELEM_WARPS, 1, limits.max_ctas), limits,
                               GMM__ELEM_BLOCK, 0, a, stream);
    if (status == cudaSuccess && offsets) {
        gmm__route_args finish;
        memset(&finish, 0, sizeof finish);
        finish.experts = a->experts;
        finish.sequences = 1;
        finish.counts = a->counts;
        finish.offsets = offsets;
        status = gmm__k_launch((const void *)gmm_route_finish, 1, limits, 32, 0, &finish, stream);
    }
    return status;
}

static GMM__UNUSED cudaError_t gmm__k_expert_bias(const gmm__bias_args *a, gmm__launch_limits limits,
                                                  cudaStream_t stream) {
    return gmm__k_launch((const void *)gmm_route_bias, a->layers, limits, 32, 0, a, stream);
}
#endif /* GMM__HOLDS(0) */

#endif /* GMM__GEMM_REST_DONE: opened at the end of hopper/schedule.cuh */

/* Continues the #ifndef GMM__BODY of preface.cuh: each body is a branch, and the last one ends it. */
#elif !defined(GMM__ROW)
#error "gmm: a body needs GMM__ROW"

/* .............................................................................. Body: product on tensor cores ... */
#elif GMM__BODY == GMM__BODY_TENSOR
#define GMM__KERNEL_NAME GMM__COLUMN(1, GMM__ROW)
#define GMM__OP GMM__COLUMN(2, GMM__ROW)
#define GMM__TAG GMM__COLUMN(3, GMM__ROW)
#define GMM__TILE GMM__COLUMN(4, GMM__ROW)
#define GMM__CFG(name) (int)GMM__CAT(gmm_##name##_, GMM__TILE)
#define GMM__PART(part) GMM__CAT(GMM__CAT(GMM__CAT(GMM__CAT(GMM__CAT(part, GMM__OP), _), GMM__TAG), _), GMM__TILE)
#define GMM__TA (int)GMM__CAT(gmm_ta_, GMM__OP)
#define GMM__TB (int)GMM__CAT(gmm_tb_, GMM__OP)
#define GMM__K_GROUPED (int)GMM__CAT(gmm_k_grouped_, GMM__OP)
/* Columns of a warp, blocks of 16 rows and of 8 columns in them, and steps of 16 values of k in a stage. */
#define GMM__WN (GMM__CFG(bn) / GMM__CFG(wn))
#define GMM__MT (GMM__CFG(bm) / GMM__CFG(wm) / 16)
#define GMM__NT (GMM__WN / 8)
#define GMM__KT (GMM__CFG(bk) / 16)
/* Operands in a stage: bytes of their rows, of A, and of both. */
#define GMM__A_SHAPE gmm_stage_shape_of(GMM__TA, GMM__CFG(bm), GMM__CFG(bk), GMM__CFG(threads))
#define GMM__B_SHAPE gmm_stage_shape_of(GMM__TB, GMM__CFG(bn), GMM__CFG(bk), GMM__CFG(threads))
#define GMM__A_ROW_BYTES (2 * (GMM__TA ? GMM__CFG(bm) : GMM__CFG(bk)))
#define GMM__B_ROW_BYTES (2 * (GMM__TB ? GMM__CFG(bn) : GMM__CFG(bk)))
#define GMM__A_BYTES (2 * GMM__CFG(bm) * GMM__CFG(bk))
#define GMM__STAGE_BYTES (GMM__A_BYTES + 2 * GMM__CFG(bn) * GMM__CFG(bk))

/* Loads stage number q of a tile to `stage`. */
GMM__DEVICE void GMM__PART(gmm_tensor_load_stage_)(gmm_stage_loaders *load, char *stage, int q) {
    gmm_stage_load(&load->a, stage, q, GMM__A_SHAPE);
    gmm_stage_load(&load->b, stage + GMM__A_BYTES, q, GMM__B_SHAPE);
    gmm_cp_async_commit_group();
}

/* Loads the first stages of a tile. Returns how many stages it has; an empty group multiplies one stage of zeros. */
GMM__DEVICE int GMM__PART(gmm_tensor_load_first_)(const gmm_gemm_args *args, const gmm_gemm_tile *t,
                                                  gmm_stage_loaders *load, char *smem) {
    const int k_tiles = t->k > 0 ? (t->k + GMM__CFG(bk) - 1) / GMM__CFG(bk) : 1;
    int s;
    load->a = gmm_stage_loader_init(&args->a, 0, GMM__K_GROUPED ? t->row : t->row + t->m0, GMM__K_GROUPED ? t->m0 : 0,
                                    GMM__TA ? t->k : t->m - t->m0, GMM__TA ? t->m - t->m0 : t->k, GMM__A_SHAPE);
    load->b = gmm_stage_loader_init(&args->b, GMM__K_GROUPED ? 0 : t->g, GMM__K_GROUPED ? t->row : GMM__TB ? 0 : t->n0,
                                    GMM__TB ? t->n0 : 0, GMM__TB ? t->k : args->n - t->n0,
                                    GMM__TB ? args->n - t->n0 : t->k, GMM__B_SHAPE);
#pragma unroll
    for (s = 0; s < GMM__CFG(stages) - 1; s++) {
        if (s < k_tiles) GMM__PART(gmm_tensor_load_stage_)(load, smem + s * GMM__STAGE_BYTES, s);
        else gmm_cp_async_commit_group(); /* wait_group counts groups: one per stage, empty or not */
    }
    return k_tiles;
}

/* ldmatrix of K step s of the stage at `stage`: the warp's fragments of A and B. */
GMM__DEVICE void GMM__PART(gmm_tensor_load_fragments_)(const gmm_mma_warp *w, uint32_t stage, int s,
                                                       uint32_t a[GMM__MT][4], uint32_t b[GMM__NT / 2][4]) {
    int i, j;
#pragma unroll
    for (i = 0; i < GMM__MT; i++) gmm_mma_load_fragment(a[i], GMM__TA, stage, w->a, i, s, GMM__A_ROW_BYTES);
#pragma unroll
    for (j = 0; j < GMM__NT / 2; j++) gmm_mma_load_fragment(b[j], GMM__TB, stage, w->b, j, s, GMM__B_ROW_BYTES);
}

/* Adds the products of a K step to the sums of the warp's first `row_blocks` blocks of 16 rows. */
GMM__DEVICE void GMM__PART(gmm_tensor_multiply_)(float acc[GMM__MT][GMM__NT][4], const uint32_t a[GMM__MT][4],
                                                 const uint32_t b[GMM__NT / 2][4], int row_blocks) {
    int i, j;
#pragma unroll
    for (i = 0; i < GMM__MT; i++) {
        if (GMM__CFG(skip) && i >= row_blocks) continue;
#pragma unroll
        for (j = 0; j < GMM__NT; j++) GMM__CAT(gmm_mma_, GMM__TAG)(acc[i][j], a[i], &b[j / 2][j % 2 * 2]);
    }
}

/* Multiplies the stages of a tile, of which the first are on their way, and loads the others. */
GMM__DEVICE void GMM__PART(gmm_tensor_mainloop_)(const gmm_mma_warp *w, gmm_stage_loaders *load, char *smem,
                                                 int k_tiles, int row_blocks, float acc[GMM__MT][GMM__NT][4]) {
    enum { STAGES = GMM__CFG(stages), STAGE = GMM__STAGE_BYTES, KT = GMM__KT };
    const uint32_t shared = (uint32_t)__cvta_generic_to_shared(smem);
    uint32_t a[2][GMM__MT][4], b[2][GMM__NT / 2][4];
    int s, k_tile, read_offset = 0, write_offset = (STAGES - 1) * STAGE;
    GMM__CP_ASYNC_WAIT_GROUP(STAGES - 2);
    __syncthreads();
    GMM__PART(gmm_tensor_load_fragments_)(w, shared, 0, a[0], b[0]);
    for (k_tile = 0; k_tile < k_tiles; k_tile++) {
#pragma unroll
        for (s = 0; s < KT; s++) {
            /* fragments are loaded one K step ahead, also those of the next stage */
            if (s + 1 < KT)
                GMM__PART(gmm_tensor_load_fragments_)(w, shared + (uint32_t)read_offset, s + 1, a[(s + 1) & 1],
                                                      b[(s + 1) & 1]);
            else {
                read_offset = read_offset + STAGE == STAGES * STAGE ? 0 : read_offset + STAGE;
                GMM__CP_ASYNC_WAIT_GROUP(STAGES - 2);
                __syncthreads();
                if (k_tile + 1 < k_tiles)
                    GMM__PART(gmm_tensor_load_fragments_)(w, shared + (uint32_t)read_offset, 0, a[(s + 1) & 1],
                                                          b[(s + 1) & 1]);
            }
            if (s == 0) {
                if (k_tile + STAGES - 1 < k_tiles) {
                    GMM__PART(gmm_tensor_load_stage_)(load, smem + write_offset, k_tile + STAGES - 1);
                    write_offset = write_offset + STAGE == STAGES * STAGE ? 0 : write_offset + STAGE;
                } else gmm_cp_async_commit_group();
            }
            GMM__PART(gmm_tensor_multiply_)(acc, a[s & 1], b[s & 1], row_blocks);
        }
    }
}

/* The epilogue of a tile. `sums`: the warp's 8 rows of shared memory. */
GMM__DEVICE void GMM__PART(gmm_tensor_store_tile_)(const gmm_gemm_args *args, const gmm_gemm_tile *t,
                                                   const gmm_mma_warp *w, float *sums,
                                                   const float acc[GMM__MT][GMM__NT][4]) {
    enum { LD = GMM__CFG(store_ld), LANES = GMM__WN / 4 };
    const gmm_gemm_epilogue epilogue = gmm_gemm_epilogue_begin(args, GMM__K_GROUPED, t);
    const int lane = (int)threadIdx.x & 31;
    const int32_t col = t->n0 + w->n + lane % LANES * 4;
    float bias[4] = { 0.0f, 0.0f, 0.0f, 0.0f };
    int i, j, s;
    if (epilogue.bias) {
        const int size = gmm_kmat_size(&args->bias);
        gmm_read4(args->bias.dtype, epilogue.bias + (int64_t)col * size, args->n - col, epilogue.bias_vec4, bias);
    }
#pragma unroll 1
    for (i = 0; i < 2 * GMM__MT; i++) { /* 8 rows at a time; a loop, so that the store code is expanded once */
        const int32_t first_row = t->m0 + w->m + i * 8;
        if (first_row >= t->m) break;
#pragma unroll
        for (s = 0; s < 2 * GMM__MT; s++)
            if (s == i) {
#pragma unroll
                for (j = 0; j < GMM__NT; j++)
                    *(float2 *)&sums[(lane >> 2) * LD + j * 8 + (lane & 3) * 2] =
                        make_float2(acc[s / 2][j][s % 2 * 2], acc[s / 2][j][s % 2 * 2 + 1]);
            }
        __syncwarp();
        gmm_gemm_store_8_rows(args, &epilogue, t, first_row, t->n0 + w->n, 32 / LANES, sums, bias);
        __syncwarp();
    }
}

/* The 16-bit product on tensor cores (mma.sync), persistent: a CTA computes every gridDim.x-th tile. Operands are
   loaded by cp.async into a ring of STAGES stages; the fragments of the next K step are loaded while those of the
   present one are multiplied. Epilogue: accumulators pass through 8 rows of shared memory per warp, so that rows of D
   are stored by vector accesses, while the first stages of the next tile are in flight. */
GMM__ROW_KERNEL __launch_bounds__(GMM__CFG(threads), GMM__CFG(ctas))
GMM__KERNEL_NAME(const __grid_constant__ gmm_gemm_args args) {
    extern __shared__ __align__(1024) char gmm_shared[];
    const int warp = (int)threadIdx.x >> 5;
    const gmm_mma_warp w = gmm_mma_warp_init(warp / GMM__CFG(wn) * GMM__MT * 16, warp % GMM__CFG(wn) * GMM__WN, GMM__TA,
                                             GMM__TB, GMM__A_ROW_BYTES, GMM__B_ROW_BYTES, GMM__A_BYTES);
    float *const sums = (float *)(gmm_shared + GMM__CFG(stages) * GMM__STAGE_BYTES) + warp * 8 * GMM__CFG(store_ld);
    gmm_gemm_tile load_tile, mma_tile; /* the tile whose operands are loaded; the tile that is multiplied and stored */
    gmm_stage_loaders load;
    float acc[GMM__MT][GMM__NT][4];
    int64_t tile_index = blockIdx.x;
    int first_tile, i, j, h, row_blocks, k_tiles = 0;

    load_tile.g = mma_tile.g = 0;
    for (first_tile = 1;; first_tile = 0, tile_index += gridDim.x) {
        /* all stages have been read: the first stages of the next tile are loaded while the epilogue stores the
           previous tile */
        const int has_tile = gmm_gemm_next_tile(&args, GMM__K_GROUPED, GMM__CFG(bm), GMM__CFG(bn), &tile_index,
                                                &load_tile);
        if (has_tile) k_tiles = GMM__PART(gmm_tensor_load_first_)(&args, &load_tile, &load, gmm_shared);
        if (!first_tile) GMM__PART(gmm_tensor_store_tile_)(&args, &mma_tile, &w, sums, acc);
        if (!has_tile) break;

        mma_tile = load_tile;
        row_blocks = (mma_tile.m - mma_tile.m0 - w.m + 15) / 16; /* blocks of 16 rows that this warp has */
#pragma unroll
        for (i = 0; i < GMM__MT; i++)
#pragma unroll
            for (j = 0; j < GMM__NT; j++)
#pragma unroll
                for (h = 0; h < 4; h++) acc[i][j][h] = 0.0f;
        gmm_gemm_prefetch(&args, GMM__K_GROUPED, &mma_tile, GMM__CFG(bm), GMM__CFG(bn));
        GMM__PART(gmm_tensor_mainloop_)(&w, &load, gmm_shared, k_tiles, row_blocks, acc);
    }
    if (!GMM__K_GROUPED && args.zero_tail)
        gmm_gemm_zero_tail(&args.d, args.offsets[args.groups], args.capacity, args.n);
}
#undef GMM__A_SHAPE
#undef GMM__B_SHAPE
#undef GMM__A_ROW_BYTES
#undef GMM__B_ROW_BYTES
#undef GMM__A_BYTES
#undef GMM__STAGE_BYTES
#undef GMM__WN
#undef GMM__MT
#undef GMM__NT
#undef GMM__KT
#undef GMM__TA
#undef GMM__TB
#undef GMM__K_GROUPED
#undef GMM__PART
#undef GMM__CFG
#undef GMM__KERNEL_NAME
#undef GMM__OP
#undef GMM__TAG
#undef GMM__TILE
#undef GMM__ROW
/* ......................................................................................... Body: fp32 product ... */
#elif GMM__BODY == GMM__BODY_FP32
#define GMM__KERNEL_NAME GMM__COLUMN(1, GMM__ROW)
#define GMM__OP GMM__COLUMN(2, GMM__ROW)

/* D = A B^T in fp32 on the CUDA cores: every element is accumulated by FMAs in the order of k. A CTA of 256 threads
   computes 128 x 128 elements; a thread has 8 x 8 of them, in rows ty and ty + 64 and columns tx and tx + 64, four
   each. Two buffers of 16 values of k: the loads of the next stage are in flight while the present one is
   multiplied. */
GMM__ROW_KERNEL __launch_bounds__(gmm_threads_f32, 1)
GMM__KERNEL_NAME(const __grid_constant__ gmm_gemm_args args) {
    enum {
        TA = (int)GMM__CAT(gmm_ta_, GMM__OP), TB = (int)GMM__CAT(gmm_tb_, GMM__OP),
        K_GROUPED = (int)GMM__CAT(gmm_k_grouped_, GMM__OP),
        BM = gmm_bm_f32, BN = gmm_bn_f32, BK = gmm_bk_f32, LD = gmm_ld_f32
    };
    __shared__ __align__(16) float as[2][BK * LD], bs[2][BK * LD]; /* [k][m], [k][n] */
    const int tid = (int)threadIdx.x, ty = tid / 16 * 4, tx = tid % 16 * 4;
    gmm_gemm_tile tile;
    int64_t tile_index;

    tile.g = 0;
    for (tile_index = blockIdx.x; gmm_gemm_next_tile(&args, K_GROUPED, BM, BN, &tile_index, &tile);
         tile_index += gridDim.x) {
        const char *a = gmm_kmat_data(&args.a, 0) + 4 * (tile.row * args.a.ld + (TA ? tile.m0 : tile.m0 * args.a.ld));
        const char *b = gmm_kmat_data(&args.b, K_GROUPED ? 0 : tile.g) +
                        4 * ((K_GROUPED ? tile.row * args.b.ld : 0) + (TB ? tile.n0 : tile.n0 * args.b.ld));
        const int vec4_a = gmm_vec4_aligned(GMM_F32, a, args.a.ld), vec4_b = gmm_vec4_aligned(GMM_F32, b, args.b.ld);
        const int m = tile.m - tile.m0, n = args.n - tile.n0;
        float acc[8][8], va[2][4], vb[2][4];
        int i, j, k, k0, buffer = 0;
#pragma unroll
        for (i = 0; i < 8; i++)
#pragma unroll
            for (j = 0; j < 8; j++) acc[i][j] = 0.0f;

        k0 = 0;
        gmm_f32_load_stage(TA, a, vec4_a, args.a.ld, m, k0, tile.k, va);
        gmm_f32_load_stage(TB, b, vec4_b, args.b.ld, n, k0, tile.k, vb);
        gmm_f32_store_stage(TA, as[0], va);
        gmm_f32_store_stage(TB, bs[0], vb);
        __syncthreads();
        for (k0 = BK;; k0 += BK) {
            const int last = k0 >= tile.k;
            if (!last) {
                gmm_f32_load_stage(TA, a, vec4_a, args.a.ld, m, k0, tile.k, va);
                gmm_f32_load_stage(TB, b, vec4_b, args.b.ld, n, k0, tile.k, vb);
            }
#pragma unroll
            for (k = 0; k < BK; k++) {
                float x[8], y[8];
                *(float4 *)&x[0] = *(const float4 *)&as[buffer][k * LD + ty];
                *(float4 *)&x[4] = *(const float4 *)&as[buffer][k * LD + ty + 64];
                *(float4 *)&y[0] = *(const float4 *)&bs[buffer][k * LD + tx];
                *(float4 *)&y[4] = *(const float4 *)&bs[buffer][k * LD + tx + 64];
#pragma unroll
                for (i = 0; i < 8; i++)
#pragma unroll
                    for (j = 0; j < 8; j++) acc[i][j] = __fmaf_rn(x[i], y[j], acc[i][j]);
            }
            if (last) break;
            buffer ^= 1;
            gmm_f32_store_stage(TA, as[buffer], va);
            gmm_f32_store_stage(TB, bs[buffer], vb);
            __syncthreads();
        }
        __syncthreads(); /* the next tile overwrites the first buffer */
        {
            const gmm_gemm_epilogue epilogue = gmm_gemm_epilogue_begin(&args, K_GROUPED, &tile);
#pragma unroll
            for (j = 0; j < 8; j += 4) {
                const int32_t col = tile.n0 + tx + (j ? 64 : 0);
                float bias[4] = { 0.0f, 0.0f, 0.0f, 0.0f };
                if (epilogue.bias) {
                    const int size = gmm_kmat_size(&args.bias);
                    gmm_read4(args.bias.dtype, epilogue.bias + (int64_t)col * size, args.n - col, epilogue.bias_vec4,
                              bias);
                }
#pragma unroll
                for (i = 0; i < 8; i++) {
                    const int32_t row = tile.m0 + ty + i % 4 + (i < 4 ? 0 : 64);
                    if (row < tile.m && col < args.n) gmm_gemm_store(&args, &epilogue, row, col, bias, &acc[i][j]);
                }
            }
        }
    }
    if (!K_GROUPED && args.zero_tail) gmm_gemm_zero_tail(&args.d, args.offsets[args.groups], args.capacity, args.n);
}
#undef GMM__KERNEL_NAME
#undef GMM__OP
#undef GMM__ROW


/* ............................................................... Body: product of quantized operands ... */
#elif GMM__BODY == GMM__BODY_QUANTIZED
#define GMM__KERNEL_NAME GMM__COLUMN(1, GMM__ROW)
#define GMM__OP GMM__COLUMN(2, GMM__ROW)
#define GMM__KIND GMM__COLUMN(3, GMM__ROW)
#define GMM__PART(part) GMM__CAT(GMM__CAT(GMM__CAT(part, GMM__OP), _), GMM__KIND)
#define GMM__TA (int)GMM__CAT(gmm_qgemm_ta_, GMM__KIND)
#define GMM__TB (int)GMM__CAT(gmm_qgemm_tb_, GMM__KIND)
#define GMM__BLOCK_SCALED (int)GMM__CAT(gmm_qgemm_block_scaled_, GMM__KIND)
#define GMM__DTYPE (gmm_dtype)GMM__CAT(gmm_qgemm_dtype_, GMM__KIND)
#define GMM__K_GROUPED (int)GMM__CAT(gmm_k_grouped_, GMM__OP)
/* The tile's columns, its rows of A and B together, and log2 of its columns in units of 64. */
#define GMM__BN (GMM__BLOCK_SCALED ? (int)gmm_qgemm_tile_n_1 : (int)gmm_qgemm_tile_n_0)
#define GMM__MN (GMM_QGEMM_TILE_M + GMM__BN)
#define GMM__B_LOG2_MN64 (GMM__BLOCK_SCALED ? 1 : 2)
/* Of a warp, 2 x 4 of which have a tile: columns, blocks of 16 rows and of 8 columns; steps of 16 values of k in a
   stage; blocks of rows whose sums are promoted. */
#define GMM__WN (GMM__BN / 4)
#define GMM__MT 4
#define GMM__NT (GMM__WN / 8)
#define GMM__KT (GMM_QGEMM_TILE_K / 16)
#define GMM__SUM_MT (GMM__BLOCK_SCALED ? GMM__MT : 1)
/* Bytes of elements in a stage: of a row of A and of B, of A, of both. Bytes of a stage's scales. */
#define GMM__A_ROW_BYTES (2 * (GMM__TA ? GMM_QGEMM_TILE_M : GMM_QGEMM_TILE_K))
#define GMM__B_ROW_BYTES (2 * (GMM__TB ? GMM__BN : GMM_QGEMM_TILE_K))
#define GMM__A_BYTES (2 * GMM_QGEMM_TILE_M * GMM_QGEMM_TILE_K)
#define GMM__STAGE_BYTES (GMM__A_BYTES + 2 * GMM__BN * GMM_QGEMM_TILE_K)
#define GMM__SLOT_BYTES (GMM__BLOCK_SCALED ? (int)gmm_qgemm_slot_bytes_1 : (int)gmm_qgemm_slot_bytes_0)
/* Whether A holds 16-bit tokens, which are copied without conversion; whether scales are applied in the mainloop. */
#define GMM__A_IS_16BIT(args) (!GMM__K_GROUPED && (args)->a.scaling == GMM_SCALING_NONE)
#define GMM__HAS_SCALES(args) \
    (GMM__BLOCK_SCALED || (args)->b.scaling == GMM_SCALING_MX32 || (args)->b.scaling == GMM_SCALING_NV16)
/* Chunks of codes that a thread has in a stage. */
#define GMM__A_CHUNKS(args) (GMM__A_IS_16BIT(args) ? 0 : (args)->a.dtype == GMM_E2M1 ? 1 : 2)
#define GMM__B_CHUNKS(args) (((args)->b.dtype == GMM_E2M1 ? 1 : 2) * (GMM__BN / 128))

/* What a thread loads of a tile's operands. Its codes, those of the stage that is dequantized next, have a struct of
   their own: in one with the rest, an instance spills registers. */
typedef struct GMM__PART(gmm_qgemm_codes_) { uint4 a[2], b[GMM__BN / 64]; } GMM__PART(gmm_qgemm_codes_);
typedef struct GMM__PART(gmm_qgemm_loads_) {
    gmm_qgemm_operand a, b;
    gmm_qgemm_scales scales;
    char *smem, *slots; /* elements of two stages; scales of four */
    int k, k_tiles;
} GMM__PART(gmm_qgemm_loads_);

/* Loads the scales of stage q. */
GMM__DEVICE void GMM__PART(gmm_qgemm_load_scales_)(const gmm_qgemm_args *args, GMM__PART(gmm_qgemm_loads_) *load,
                                                   int q) {
    const int tid = (int)threadIdx.x;
    gmm_qgemm_scales *const t = &load->scales;
    t->bits[0] = gmm_qgemm_load_scales(
        t->first[0],
        GMM__BLOCK_SCALED        ? t->strides
        : tid < GMM_QGEMM_TILE_M ? gmm_qgemm_scale_strides_of(&args->a, GMM__TA, args->a_cols)
                                 : gmm_qgemm_scale_strides_of(&args->b, GMM__TB, args->b_cols),
        tid < GMM_QGEMM_TILE_M ? args->a.scaling : args->b.scaling, q, load->k);
    if (GMM__MN > 256 && tid < 128)
        t->bits[1] = gmm_qgemm_load_scales(t->first[1], gmm_qgemm_scale_strides_of(&args->b, GMM__TB, args->b_cols),
                                           args->b.scaling, q, load->k);
}
/* Stores the scales of stage q, which were loaded before, and loads those of the next stage. */
GMM__DEVICE void GMM__PART(gmm_qgemm_store_scales_)(const gmm_qgemm_args *args, GMM__PART(gmm_qgemm_loads_) *load,
                                                    int q) {
    const int tid = (int)threadIdx.x;
    char *const slot = load->slots + (q & 3) * GMM__SLOT_BYTES;
    gmm_qgemm_store_scales(GMM__DTYPE, GMM__BLOCK_SCALED, tid < GMM_QGEMM_TILE_M ? args->a.scaling : args->b.scaling,
                           load->scales.bits[0], slot, tid, GMM__MN);
    if (GMM__MN > 256 && tid < 128)
        gmm_qgemm_store_scales(GMM__DTYPE, GMM__BLOCK_SCALED, args->b.scaling, load->scales.bits[1], slot, tid + 256,
                               GMM__MN);
    GMM__PART(gmm_qgemm_load_scales_)(args, load, q + 1);
}

/* Dequantizes chunk i of A or B in stage q to shared memory and loads the same chunk of the following stage into its
   registers. Scales that are not applied to elements are NULL. */
GMM__DEVICE void GMM__PART(gmm_qgemm_dequantize_a_)(const gmm_qgemm_args *args, const GMM__PART(gmm_qgemm_loads_) *load,
                                                    GMM__PART(gmm_qgemm_codes_) *codes, int i, int q) {
    gmm_qgemm_dequantize_chunk(GMM__DTYPE, &args->a, GMM__TA, 1, i, codes->a[i],
                               load->smem + (q & 1) * GMM__STAGE_BYTES,
                               GMM__HAS_SCALES(args) && !GMM__BLOCK_SCALED
                                   ? (const uint16_t *)(void *)(load->slots + (q & 3) * GMM__SLOT_BYTES) : NULL);
    codes->a[i] = gmm_qgemm_load_chunk(&load->a, &args->a, GMM__TA, 1, i);
}
GMM__DEVICE void GMM__PART(gmm_qgemm_dequantize_b_)(const gmm_qgemm_args *args, const GMM__PART(gmm_qgemm_loads_) *load,
                                                    GMM__PART(gmm_qgemm_codes_) *codes, int i, int q) {
    gmm_qgemm_dequantize_chunk(
        GMM__DTYPE, &args->b, GMM__TB, GMM__B_LOG2_MN64, i, codes->b[i],
        load->smem + (q & 1) * GMM__STAGE_BYTES + GMM__A_BYTES,
        GMM__HAS_SCALES(args) && !GMM__BLOCK_SCALED
            ? (const uint16_t *)(void *)(load->slots + (q & 3) * GMM__SLOT_BYTES) + GMM_QGEMM_TILE_M : NULL);
    codes->b[i] = gmm_qgemm_load_chunk(&load->b, &args->b, GMM__TB, GMM__B_LOG2_MN64, i);
}

/* Begins a tile: the thread's part of its operands and scales. */
GMM__DEVICE void GMM__PART(gmm_qgemm_loads_begin_)(const gmm_qgemm_args *args, GMM__PART(gmm_qgemm_loads_) *load,
                                                   const gmm_gemm_tile *t) {
    const int tid = (int)threadIdx.x;
    const int k = GMM__K_GROUPED ? (t->k + args->k_round - 1) / args->k_round * args->k_round : t->k;
    const gmm_qgemm_views v = gmm_qgemm_views_of(args, GMM__K_GROUPED, t);
    gmm_qgemm_scales *const s = &load->scales;
    load->k = k;
    load->a = gmm_qgemm_operand_init(&args->a, &v.a, GMM__TA, 1, t->row, t->m0, t->m, k);
    load->b = gmm_qgemm_operand_init(&args->b, &v.b, GMM__TB, GMM__B_LOG2_MN64, 0, t->n0, args->p.n, k);
    s->first[0] = tid < GMM_QGEMM_TILE_M
                      ? gmm_qgemm_first_scale(&v.a, args->a.scaling, t->m0 + tid, t->m)
                      : gmm_qgemm_first_scale(&v.b, args->b.scaling, t->n0 + tid - GMM_QGEMM_TILE_M, args->p.n);
    s->first[1] = gmm_qgemm_first_scale(&v.b, args->b.scaling, t->n0 + tid + 128, args->p.n);
    if (GMM__BLOCK_SCALED)
        s->strides = tid < GMM_QGEMM_TILE_M ? gmm_qgemm_scale_strides_of(&args->a, GMM__TA, v.a.lines)
                                            : gmm_qgemm_scale_strides_of(&args->b, GMM__TB, v.b.lines);
    /* an empty group multiplies one stage of zeros */
    load->k_tiles = k > 0 ? (k + GMM_QGEMM_TILE_K - 1) / GMM_QGEMM_TILE_K : 1;
}

/* Dequantizes a tile's first stage, and leaves the scales and codes of the next ones on their way. */
GMM__DEVICE void GMM__PART(gmm_qgemm_load_first_)(const gmm_qgemm_args *args, GMM__PART(gmm_qgemm_loads_) *load,
                                                  GMM__PART(gmm_qgemm_codes_) *codes, const gmm_gemm_tile *t,
                                                  gmm_gemm_tile *smem_tile) {
    const int chunks_a = GMM__A_CHUNKS(args), chunks_b = GMM__B_CHUNKS(args);
    int i;
#pragma unroll
    for (i = 0; i < 2; i++)
        if (i < chunks_a) codes->a[i] = gmm_qgemm_load_chunk(&load->a, &args->a, GMM__TA, 1, i);
#pragma unroll
    for (i = 0; i < GMM__BN / 64; i++)
        if (i < chunks_b) codes->b[i] = gmm_qgemm_load_chunk(&load->b, &args->b, GMM__TB, GMM__B_LOG2_MN64, i);
    if (GMM__HAS_SCALES(args)) {
        load->scales.bits[1] = 0;
        GMM__PART(gmm_qgemm_load_scales_)(args, load, 0);
        GMM__PART(gmm_qgemm_store_scales_)(args, load, 0);
    }
    __syncthreads(); /* scales are stored, and the epilogue of the previous tile has finished with shared memory */
    if (threadIdx.x == 0) *smem_tile = *t; /* in shared memory, so that it takes no registers in the mainloop */
    if (GMM__HAS_SCALES(args)) GMM__PART(gmm_qgemm_store_scales_)(args, load, 1);
    if (GMM__A_IS_16BIT(args)) gmm_qgemm_copy_tokens(&load->a, &args->a, load->smem);
    gmm_cp_async_commit_group();
    gmm_qgemm_operand_advance(&load->a, &args->a, GMM__TA);
    gmm_qgemm_operand_advance(&load->b, &args->b, GMM__TB);
#pragma unroll
    for (i = 0; i < 2; i++)
        if (i < chunks_a) GMM__PART(gmm_qgemm_dequantize_a_)(args, load, codes, i, 0);
#pragma unroll
    for (i = 0; i < GMM__BN / 64; i++)
        if (i < chunks_b) GMM__PART(gmm_qgemm_dequantize_b_)(args, load, codes, i, 0);
}

/* Adds the sums of a block to `sum`, times the scales at `scale`, and zeroes them. */
GMM__DEVICE void GMM__PART(gmm_qgemm_promote_)(const gmm_mma_warp *w, const float *scale,
                                               float acc[GMM__MT][GMM__NT][4], float sum[GMM__SUM_MT][GMM__NT][4]) {
    const int lane = (int)threadIdx.x & 31;
    const float ones[2] = { 1.0f, 1.0f }, *const col_scales = scale + GMM_QGEMM_TILE_M + w->n + (lane & 3) * 2;
    int i, j;
#pragma unroll
    for (i = 0; i < GMM__MT; i++) {
        const float *const first = scale + w->m + i * 16 + (lane >> 2);
        float row_scales[2] = { first[0], first[8] };
        const float lift[2] = { gmm__scale_lift(row_scales[0]), gmm__scale_lift(row_scales[1]) };
        if (lift[0] == 1.0f && lift[1] == 1.0f) {
#pragma unroll
            for (j = 0; j < GMM__NT; j++)
                gmm_qgemm_promote(sum[GMM__BLOCK_SCALED ? i : 0][j], acc[i][j], row_scales, col_scales + 8 * j, ones);
        } else {
            row_scales[0] *= 1.0f / lift[0];
            row_scales[1] *= 1.0f / lift[1];
#pragma unroll
            for (j = 0; j < GMM__NT; j++)
                gmm_qgemm_promote(sum[GMM__BLOCK_SCALED ? i : 0][j], acc[i][j], row_scales, col_scales + 8 * j, lift);
        }
    }
}

/* Adds the products of step s of the stage at `stage` to the sums of the warp's first `row_blocks` blocks of 16 rows.
   The fragments of the step's first block of A and of B are loaded; those of the next blocks are, one ahead. */
GMM__DEVICE void GMM__PART(gmm_qgemm_multiply_)(const gmm_mma_warp *w, uint32_t stage, int s, int row_blocks,
                                                uint32_t a[2][4], const uint32_t b[GMM__NT / 2][4],
                                                float acc[GMM__MT][GMM__NT][4]) {
    int i, j;
#pragma unroll
    for (i = 0; i < GMM__MT; i++) {
        if (i + 1 < GMM__MT)
            gmm_mma_load_fragment(a[(i + 1) & 1], GMM__TA, stage, w->a, i + 1, s, GMM__A_ROW_BYTES);
        if (i >= row_blocks) continue;
#pragma unroll
        for (j = 0; j < GMM__NT; j++)
            if (GMM__DTYPE == GMM_BF16) gmm_mma_bf16(acc[i][j], a[i & 1], &b[j / 2][j % 2 * 2]);
            else gmm_mma_f16(acc[i][j], a[i & 1], &b[j / 2][j % 2 * 2]);
    }
}
GMM__DEVICE void GMM__PART(gmm_qgemm_load_fragments_)(const gmm_mma_warp *w, uint32_t stage, int s, uint32_t a[2][4],
                                                      uint32_t b[GMM__NT / 2][4]) {
    int j;
    gmm_mma_load_fragment(a[0], GMM__TA, stage, w->a, 0, s, GMM__A_ROW_BYTES);
#pragma unroll
    for (j = 0; j < GMM__NT / 2; j++) gmm_mma_load_fragment(b[j], GMM__TB, stage, w->b, j, s, GMM__B_ROW_BYTES);
}

/* Multiplies the stages of a tile, of which the first is dequantized; the dequantization of the next one is interleaved
   with the products. */
GMM__DEVICE void GMM__PART(gmm_qgemm_mainloop_)(const gmm_qgemm_args *args, GMM__PART(gmm_qgemm_loads_) *load,
                                                GMM__PART(gmm_qgemm_codes_) *codes, const gmm_mma_warp *w,
                                                int row_blocks, float acc[GMM__MT][GMM__NT][4],
                                                float sum[GMM__SUM_MT][GMM__NT][4]) {
    const int chunks_a = GMM__A_CHUNKS(args), chunks_b = GMM__B_CHUNKS(args);
    uint32_t a[2][4], b[GMM__NT / 2][4];
    int k_tile, s;
    for (k_tile = 0; k_tile < load->k_tiles; k_tile++) {
        const uint32_t stage = (uint32_t)__cvta_generic_to_shared(load->smem) +
                               (uint32_t)((k_tile & 1) * GMM__STAGE_BYTES);
        const int has_next = k_tile + 1 < load->k_tiles;
        GMM__CP_ASYNC_WAIT_GROUP(0);
        __syncthreads(); /* stage k_tile is complete, and the one before has been read */
        if (GMM__A_IS_16BIT(args) && has_next)
            gmm_qgemm_copy_tokens(&load->a, &args->a, load->smem + ((k_tile + 1) & 1) * GMM__STAGE_BYTES);
        gmm_cp_async_commit_group();
        if (!GMM__A_IS_16BIT(args) || has_next) gmm_qgemm_operand_advance(&load->a, &args->a, GMM__TA);
        gmm_qgemm_operand_advance(&load->b, &args->b, GMM__TB);
        if (GMM__HAS_SCALES(args)) GMM__PART(gmm_qgemm_store_scales_)(args, load, k_tile + 2);
        GMM__PART(gmm_qgemm_load_fragments_)(w, stage, 0, a, b);
#pragma unroll
        for (s = 0; s < GMM__KT; s++) {
            GMM__PART(gmm_qgemm_multiply_)(w, stage, s, row_blocks, a, b, acc);
            if (s + 1 < GMM__KT) GMM__PART(gmm_qgemm_load_fragments_)(w, stage, s + 1, a, b);
            if (s < 2 && has_next && s < chunks_a)
                GMM__PART(gmm_qgemm_dequantize_a_)(args, load, codes, s % 2, k_tile + 1);
            if (s < GMM__BN / 64 && has_next && s < chunks_b)
                GMM__PART(gmm_qgemm_dequantize_b_)(args, load, codes, s % (GMM__BN / 64), k_tile + 1);
            if (GMM__BLOCK_SCALED && (s & 1) &&
                (args->block == 32 || (s == GMM__KT - 1 && (k_tile & 1 || !has_next))))
                GMM__PART(gmm_qgemm_promote_)(
                    w, (const float *)(void *)(load->slots + (k_tile & 3) * GMM__SLOT_BYTES) +
                           (args->block == 32 ? s / 2 * GMM__MN : 0), acc, sum);
        }
    }
}

/* The scales of a tile that are constant along k. */
typedef struct GMM__PART(gmm_qgemm_outer_) {
    float col[GMM__NT][2]; /* of the thread's columns */
    float alpha, inverse;  /* inverse: of the product of the operands' divisors */
    int empty;             /* an empty sum is +0 */
    int extreme;           /* plain products of scales may leave the range of normal numbers */
} GMM__PART(gmm_qgemm_outer_);
GMM__DEVICE void GMM__PART(gmm_qgemm_outer_begin_)(const gmm_qgemm_args *args, const gmm_qgemm_views *v,
                                                   const gmm_gemm_tile *t, int first_col, float alpha,
                                                   GMM__PART(gmm_qgemm_outer_) *o) {
    const int lane = (int)threadIdx.x & 31;
    const float divisor = gmm__fmul(gmm_qgemm_outer_divisor(&v->a, args->a.scaling),
                                    gmm_qgemm_outer_divisor(&v->b, args->b.scaling));
    int j, h;
    o->inverse = gmm__fdiv(1.0f, divisor);
    o->alpha = alpha;
    o->empty = t->k == 0;
    o->extreme = !gmm__scale_moderate(alpha);
#pragma unroll
    for (j = 0; j < GMM__NT; j++)
#pragma unroll
        for (h = 0; h < 2; h++) {
            const int32_t n = first_col + j * 8 + (lane & 3) * 2 + h;
            o->col[j][h] = !o->empty && n < args->p.n ? gmm_qgemm_outer_scale(&v->b, args->b.scaling, n) : 1.0f;
            o->extreme |= !gmm__scale_moderate(o->col[j][h]);
        }
    o->extreme = __any_sync(0xFFFFFFFFu, o->extreme);
}

/* Stores rows 8 i to 8 i + 7 of the warp's sums to shared memory at `sums`, scaled unless in_smem, which says that they
   are scaled there. row_scale: of the thread's row. */
GMM__DEVICE void GMM__PART(gmm_qgemm_write_rows_)(const GMM__PART(gmm_qgemm_outer_) *o, int i, int in_smem,
                                                  float row_scale, float *sums,
                                                  const float acc[GMM__MT][GMM__NT][4],
                                                  const float sum[GMM__SUM_MT][GMM__NT][4]) {
    const int lane = (int)threadIdx.x & 31;
    int s, j;
#pragma unroll
    for (s = 0; s < 2 * GMM__MT; s++)
        if (s == i) {
#pragma unroll
            for (j = 0; j < GMM__NT; j++) {
                const float *v = GMM__BLOCK_SCALED ? &sum[GMM__BLOCK_SCALED ? s / 2 : 0][j][s % 2 * 2]
                                                   : &acc[s / 2][j][s % 2 * 2];
                const float scale0 = in_smem ? 1.0f : gmm__fmul(gmm__fmul(row_scale, o->col[j][0]), o->inverse);
                const float scale1 = in_smem ? 1.0f : gmm__fmul(gmm__fmul(row_scale, o->col[j][1]), o->inverse);
                *(float2 *)&sums[(lane >> 2) * (GMM__WN + 8) + j * 8 + (lane & 3) * 2] =
                    make_float2(gmm__fmul(v[0], scale0), gmm__fmul(v[1], scale1));
            }
        }
    __syncwarp();
}
/* Scales 8 rows in shared memory one by one, which is rare: the tile and the views are read anew, so that they take no
   registers elsewhere. */
GMM__DEVICE void GMM__PART(gmm_qgemm_scale_rows_)(const gmm_qgemm_args *args, const gmm_gemm_tile *smem_tile,
                                                  const GMM__PART(gmm_qgemm_outer_) *o, int first_row, int first_col,
                                                  float *sums) {
    const gmm_gemm_tile t = *smem_tile;
    const gmm_qgemm_views v = gmm_qgemm_views_of(args, GMM__K_GROUPED, &t);
    int r;
#pragma unroll 1
    for (r = (int)threadIdx.x & 31; r < 8 * GMM__WN; r += 32) {
        const int32_t m = first_row + r / GMM__WN, n = first_col + r % GMM__WN;
        float *const f = &sums[r / GMM__WN * (GMM__WN + 8) + r % GMM__WN];
        if (m < t.m && n < args->p.n)
            *f = gmm__scale_sum(*f, o->alpha, gmm_qgemm_outer_scale(&v.a, args->a.scaling, m),
                                gmm_qgemm_outer_scale(&v.b, args->b.scaling, n), o->inverse);
    }
    __syncwarp();
}

/* The epilogue of a tile: applies the scales that are constant along k, then stores as mma/body_tensor.cuh does. */
GMM__DEVICE void GMM__PART(gmm_qgemm_store_tile_)(const gmm_qgemm_args *args, const gmm_gemm_tile *smem_tile,
                                                  const gmm_mma_warp *w, float *sums,
                                                  const float acc[GMM__MT][GMM__NT][4],
                                                  const float sum[GMM__SUM_MT][GMM__NT][4]) {
    const gmm_gemm_tile tile = *smem_tile;
    const gmm_qgemm_views v = gmm_qgemm_views_of(args, GMM__K_GROUPED, &tile);
    const int lane = (int)threadIdx.x & 31;
    const int32_t first_col = tile.n0 + w->n, col = first_col + lane % (GMM__WN / 4) * 4;
    gmm_gemm_epilogue epilogue = gmm_gemm_epilogue_begin(&args->p, GMM__K_GROUPED, &tile);
    GMM__PART(gmm_qgemm_outer_) outer;
    float bias[4] = { 0.0f, 0.0f, 0.0f, 0.0f };
    int i;
    GMM__PART(gmm_qgemm_outer_begin_)(args, &v, &tile, first_col, epilogue.alpha, &outer);
    epilogue.alpha = 1.0f;
    if (epilogue.bias)
        gmm_read4(args->p.bias.dtype, epilogue.bias + (int64_t)col * gmm_kmat_size(&args->p.bias), args->p.n - col,
                  epilogue.bias_vec4, bias);
#pragma unroll 1
    for (i = 0; i < 2 * GMM__MT; i++) { /* 8 rows at a time; a loop, so that the store code is expanded once */
        const int32_t first_row = tile.m0 + w->m + i * 8, frag_row = first_row + (lane >> 2);
        float row_scale = 1.0f;
        int in_smem; /* the accumulators are scaled one by one in shared memory */
        if (first_row >= tile.m) break;
        if (!outer.empty && frag_row < tile.m) row_scale = gmm_qgemm_outer_scale(&v.a, args->a.scaling, frag_row);
        in_smem = outer.extreme || __any_sync(0xFFFFFFFFu, !gmm__scale_moderate(row_scale));
        if (!outer.empty && frag_row < tile.m) row_scale = gmm__fmul(outer.alpha, row_scale);
        GMM__PART(gmm_qgemm_write_rows_)(&outer, i, in_smem, row_scale, sums, acc, sum);
        if (in_smem) GMM__PART(gmm_qgemm_scale_rows_)(args, smem_tile, &outer, first_row, first_col, sums);
        gmm_gemm_store_8_rows(&args->p, &epilogue, &tile, first_row, first_col, 128 / GMM__WN, sums, bias);
        __syncwarp();
    }
}

/* The GEMM of mma/body_tensor.cuh with quantized operands. Pipeline: codes of stage d + 2 are loaded into registers
   while those of stage d + 1 are dequantized into one of two shared buffers and stage d is multiplied from the
   other. Scales are loaded one stage earlier and stored in a ring of four slots. 8 warps, 2 along M and 4 along N. */
GMM__ROW_KERNEL __launch_bounds__(GMM_QGEMM_THREADS, 1) GMM__KERNEL_NAME(const __grid_constant__ gmm_qgemm_args args) {
    extern __shared__ __align__(1024) char gmm_shared[];
    const int warp = (int)threadIdx.x >> 5;
    const gmm_mma_warp w = gmm_mma_warp_init(warp / 4 * 64, warp % 4 * GMM__WN, GMM__TA, GMM__TB, GMM__A_ROW_BYTES,
                                             GMM__B_ROW_BYTES, GMM__A_BYTES);
    float *const sums = (float *)(void *)gmm_shared + warp * 8 * (GMM__WN + 8); /* the warp's, where stages were */
    gmm_gemm_tile *const smem_tile =
        (gmm_gemm_tile *)(void *)(gmm_shared + 2 * GMM__STAGE_BYTES + 4 * GMM__SLOT_BYTES);
    GMM__PART(gmm_qgemm_loads_) load;
    GMM__PART(gmm_qgemm_codes_) codes;
    gmm_gemm_tile tile;
    float acc[GMM__MT][GMM__NT][4], sum[GMM__SUM_MT][GMM__NT][4];
    int64_t tile_index = blockIdx.x;
    int i, j, h, row_blocks;

    load.smem = gmm_shared;
    load.slots = gmm_shared + 2 * GMM__STAGE_BYTES;
    load.scales.strides.block = load.scales.strides.block4 = 0;
    for (tile.g = 0;
         gmm_gemm_next_tile(&args.p, GMM__K_GROUPED, GMM_QGEMM_TILE_M, GMM__BN, &tile_index, &tile);
         tile_index += gridDim.x) {
        row_blocks = (tile.m - tile.m0 - w.m + 15) / 16; /* blocks of 16 rows that this warp has */
        GMM__PART(gmm_qgemm_loads_begin_)(&args, &load, &tile);
        GMM__PART(gmm_qgemm_load_first_)(&args, &load, &codes, &tile, smem_tile);
#pragma unroll
        for (i = 0; i < GMM__MT; i++)
#pragma unroll
            for (j = 0; j < GMM__NT; j++)
#pragma unroll
                for (h = 0; h < 4; h++) acc[i][j][h] = sum[GMM__BLOCK_SCALED ? i : 0][j][h] = 0.0f;
        gmm_gemm_prefetch(&args.p, GMM__K_GROUPED, &tile, GMM_QGEMM_TILE_M, GMM__BN);
        GMM__PART(gmm_qgemm_mainloop_)(&args, &load, &codes, &w, row_blocks, acc, sum);
        __syncthreads(); /* all stages have been read: their memory is reused for the results */
        GMM__PART(gmm_qgemm_store_tile_)(&args, smem_tile, &w, sums, acc, sum);
    }
    if (!GMM__K_GROUPED && args.p.zero_tail)
        gmm_gemm_zero_tail(&args.p.d, args.p.offsets[args.p.groups], args.p.capacity, args.p.n);
}
#undef GMM__A_IS_16BIT
#undef GMM__HAS_SCALES
#undef GMM__A_CHUNKS
#undef GMM__B_CHUNKS
#undef GMM__BN
#undef GMM__MN
#undef GMM__B_LOG2_MN64
#undef GMM__WN
#undef GMM__MT
#undef GMM__NT
#undef GMM__KT
#undef GMM__SUM_MT
#undef GMM__A_ROW_BYTES
#undef GMM__B_ROW_BYTES
#undef GMM__A_BYTES
#undef GMM__STAGE_BYTES
#undef GMM__SLOT_BYTES
#undef GMM__TA
#undef GMM__TB
#undef GMM__BLOCK_SCALED
#undef GMM__DTYPE
#undef GMM__K_GROUPED
#undef GMM__PART
#undef GMM__KERNEL_NAME
#undef GMM__OP
#undef GMM__KIND
#undef GMM__ROW
/* ........................................................................................ Body: bias gradient ... */
#elif GMM__BODY == GMM__BODY_BGRAD
#define GMM__PARTIALS_KERNEL_NAME GMM__COLUMN(1, GMM__ROW)
#define GMM__ROWS_KERNEL_NAME GMM__COLUMN(2, GMM__ROW)
#define GMM__DTYPE GMM__COLUMN(3, GMM__ROW)
#define GMM__GATHERED GMM__COLUMN(4, GMM__ROW)

/* partials[strip][n] = sum over the rows of a strip of s[r] dy[r][n]. A CTA processes GMM_BGRAD_COLS columns of a
   strip: 64 threads cover the columns, 4 each, and each of ROW_GROUPS groups of 64 threads sums 32 rows. */
GMM__KERNEL __launch_bounds__(GMM_BGRAD_THREADS)
GMM__PARTIALS_KERNEL_NAME(const __grid_constant__ gmm_bgrad_args args) {
    enum { ROW_GROUPS = GMM_BGRAD_THREADS / 64, ROWS = GMM_TILE / ROW_GROUPS, SIZE = GMM__DTYPE == GMM_F32 ? 4 : 2 };
    __shared__ float sums[ROW_GROUPS][GMM_BGRAD_COLS];
    gmm_pdl_wait();
    const int tid = (int)threadIdx.x, row_group = tid / 64;
    const uint32_t blocks = (uint32_t)(args.n + GMM_BGRAD_COLS - 1) / GMM_BGRAD_COLS;
    const int64_t count = (int64_t)args.tiles[args.groups] * blocks;
    const char *dy = (const char *)args.dy.data;
    const int vec4 = gmm_vec4_aligned(GMM__DTYPE, dy, args.dy.ld);
    int32_t g = 0;
    int64_t index;
    for (index = blockIdx.x; index < count; index += gridDim.x) {
        const uint32_t strip = (uint32_t)(index / blocks);
        const int32_t first = (int32_t)(index % blocks) * GMM_BGRAD_COLS, col = first + tid % 64 * 4;
        float sum[ROWS / 8][4];
        int64_t row, end;
        int i, j, r;
        gmm_find_group32(args.tiles, args.groups, strip, &g);
        row = args.offsets[g] + (int64_t)(strip - (uint32_t)args.tiles[g]) * GMM_TILE + row_group * ROWS;
        end = args.offsets[g + 1];
#pragma unroll
        for (j = 0; j < ROWS / 8; j++) {
#pragma unroll
            for (i = 0; i < 4; i++) sum[j][i] = 0.0f;
#pragma unroll
            for (r = 0; r < 8; r++, row++) {
                const int64_t at = GMM__GATHERED && row < end ? gmm_indexed_row(&args.dy_index, row) : row;
                const float s = args.bias_scale && row < end ? args.bias_scale[row] : 1.0f;
                float v[4];
                gmm_read4(GMM__DTYPE, dy + (at * args.dy.ld + col) * SIZE, row < end && at >= 0 ? args.n - col : 0,
                          vec4, v);
#pragma unroll
                for (i = 0; i < 4; i++) sum[j][i] = __fmaf_rn(s, v[i], sum[j][i]);
            }
        }
#pragma unroll
        for (i = 0; i < 4; i++)
            sums[row_group][tid % 64 * 4 + i] =
                __fadd_rn(__fadd_rn(sum[0][i], sum[1][i]), __fadd_rn(sum[2][i], sum[3][i]));
        __syncthreads();
        if (first + tid < args.n)
            args.partials[(int64_t)strip * args.n + first + tid] =
                __fadd_rn(__fadd_rn(sums[0][tid], sums[1][tid]), __fadd_rn(sums[2][tid], sums[3][tid]));
        __syncthreads();
    }
    if (GMM__GATHERED)
        gmm_report_index_faults(&args.dy_index, (int64_t)blockIdx.x * blockDim.x + threadIdx.x,
                                args.offsets[args.groups], (int64_t)gridDim.x * blockDim.x);
}

/* d_bias_scale[r] = sum over n of dy[r][n] bias_g[n], added to its old value if d_bias_scale_add is 1. One warp per
   row. */
GMM__KERNEL __launch_bounds__(GMM_BGRAD_THREADS)
GMM__ROWS_KERNEL_NAME(const __grid_constant__ gmm_bgrad_args args) {
    enum { WARPS = GMM_BGRAD_THREADS / 32, SIZE = GMM__DTYPE == GMM_F32 ? 4 : 2 };
    gmm_pdl_wait();
    const int lane = (int)threadIdx.x & 31;
    const int64_t valid_rows = args.offsets[args.groups], end = args.zero_tail ? args.capacity : valid_rows;
    const char *dy = (const char *)args.dy.data;
    const int vec4 = gmm_vec4_aligned(GMM__DTYPE, dy, args.dy.ld);
    int32_t g = 0;
    int64_t row;
    for (row = (int64_t)blockIdx.x * WARPS + (threadIdx.x >> 5); row < end; row += (int64_t)gridDim.x * WARPS) {
        float sum = 0.0f;
        if (row < valid_rows) {
            const int64_t at = GMM__GATHERED ? gmm_indexed_row(&args.dy_index, row) : row;
            const char *bias;
            int bias_vec4, i;
            int32_t col;
            gmm_find_group64(args.offsets, args.groups, row, &g);
            bias = gmm_kmat_data(&args.bias, g);
            bias_vec4 = gmm_vec4_aligned(args.bias.dtype, bias, 4);
            for (col = lane * 4; col < args.n; col += 128) {
                float v[4], w[4];
                gmm_read4(GMM__DTYPE, dy + (at * args.dy.ld + col) * SIZE, GMM__GATHERED && at < 0 ? 0 : args.n - col,
                          vec4, v);
                gmm_read4(args.bias.dtype, bias + (int64_t)col * gmm_kmat_size(&args.bias), args.n - col, bias_vec4,
                          w);
#pragma unroll
                for (i = 0; i < 4; i++) sum = __fmaf_rn(v[i], w[i], sum);
            }
#pragma unroll
            for (i = 16; i > 0; i /= 2) sum = __fadd_rn(sum, __shfl_xor_sync(0xFFFFFFFFu, sum, i));
        }
        if (lane == 0)
            args.d_bias_scale[row] =
                row < valid_rows && args.d_bias_scale_add ? __fadd_rn(args.d_bias_scale[row], sum) : sum;
    }
    if (GMM__GATHERED)
        gmm_report_index_faults(&args.dy_index, (int64_t)blockIdx.x * blockDim.x + threadIdx.x, valid_rows,
                                (int64_t)gridDim.x * blockDim.x);
}
#undef GMM__PARTIALS_KERNEL_NAME
#undef GMM__ROWS_KERNEL_NAME
#undef GMM__DTYPE
#undef GMM__GATHERED
#undef GMM__ROW

/* ======================================================================================== Bodies per precision === */

#elif GMM__BODY == GMM__BODY_PRECISION
#define GMM__TAG GMM__COLUMN(1, GMM__ROW)
#define GMM__NAME(stem) GMM__CAT(stem##_, GMM__TAG)
#define GMM__STATIC_DTYPE ((gmm_dtype)GMM__NAME(gmm__static_dtype))
/* Whether lanes have the column layout of fp32 rows; `dynamic`: the answer where dtypes are read at run time. */
#define GMM__WIDE(dynamic) (GMM__STATIC_DTYPE == GMM_NONE ? (dynamic) : GMM__STATIC_DTYPE == GMM_F32)

/* Loads the gate and linear inputs of a lane's columns, and dy if it is given. */
GMM__DEVICE gmm__act_operands GMM__NAME(gmm__act_load_operands)(const gmm__act_args *a, int64_t row,
                                                                const gmm__lane_cols *cols) {
    gmm__act_operands in = GMM_ZERO;
    gmm__lane_cols x_cols = *cols;
    int32_t i;
    if (a->dy.data) in.dy = gmm__load8(GMM__STATIC_DTYPE, &a->dy, row, cols);
    if (a->layout == GMM__GLU_SPLIT) {
        x_cols.col[0] = gmm__act_gate_column(cols->col[0], a->interleave);
        x_cols.col[1] = gmm__act_gate_column(cols->col[1], a->interleave);
        in.a = gmm__load8(GMM__STATIC_DTYPE, &a->x, row, &x_cols);
        if (!a->gated) return in;
        x_cols.col[0] += gmm__act_linear_offset(a);
        x_cols.col[1] += gmm__act_linear_offset(a);
        in.b = gmm__load8(GMM__STATIC_DTYPE, &a->x, row, &x_cols);
    } else if (a->layout == GMM__GLU_PAIRS) {
        x_cols = gmm__lane_cols_at(2 * cols->col[0], 2 * cols->col[0] + 4, 2 * cols->col[0] + 2 * cols->n[0]);
        in.a = gmm__load8(GMM__STATIC_DTYPE, &a->x, row, &x_cols);
        x_cols = gmm__lane_cols_at(2 * cols->col[1], 2 * cols->col[1] + 4, 2 * cols->col[1] + 2 * cols->n[1]);
        in.b = gmm__load8(GMM__STATIC_DTYPE, &a->x, row, &x_cols);
    } else if (GMM__STATIC_DTYPE == GMM_NONE) {
#pragma unroll
        for (i = 0; i < 8; i++) {
            const int32_t col = gmm__act_gate_column(cols->col[i / 4] + i % 4, a->interleave);
            if (i % 4 < cols->n[i / 4]) gmm__load_element(&a->x, row, col, i, &in.a);
            if (i % 4 < cols->n[i / 4]) gmm__load_element(&a->x, row, col + gmm__act_linear_offset(a), i, &in.b);
        }
    }
    return in;
}

GMM__DEVICE void GMM__NAME(gmm__act_decode)(const gmm__act_args *a, gmm__act_operands *in, float va[8], float vb[8]) {
    if (a->layout == GMM__GLU_PAIRS)
        gmm__deinterleave(GMM__STATIC_DTYPE != GMM_NONE ? GMM__STATIC_DTYPE : a->x.dtype, &in->a, &in->b);
    gmm__decode8(GMM__STATIC_DTYPE, &a->x, &in->a, va);
    gmm__decode8(GMM__STATIC_DTYPE, &a->x, &in->b, vb);
}

/* Stores the gradients of the gate and linear inputs. */
GMM__DEVICE void GMM__NAME(gmm__act_gradients)(const gmm__act_args *a, int64_t row, const gmm__lane_cols *cols,
                                               const float va[8], const float vb[8]) {
    gmm__lane_cols dx_cols = *cols;
    int32_t i, j;
    if (a->layout == GMM__GLU_SPLIT) {
        dx_cols.col[0] = gmm__act_gate_column(cols->col[0], a->interleave);
        dx_cols.col[1] = gmm__act_gate_column(cols->col[1], a->interleave);
        gmm__store8(GMM__STATIC_DTYPE, &a->dx, row, &dx_cols, va);
        if (!a->gated) return;
        dx_cols.col[0] += gmm__act_linear_offset(a);
        dx_cols.col[1] += gmm__act_linear_offset(a);
        gmm__store8(GMM__STATIC_DTYPE, &a->dx, row, &dx_cols, vb);
    } else if (a->layout == GMM__GLU_PAIRS) {
#pragma unroll
        for (j = 0; j < 2; j++) {
            float u[8];
#pragma unroll
            for (i = 0; i < 8; i++) u[i] = i & 1 ? vb[4 * j + i / 2] : va[4 * j + i / 2];
            dx_cols = gmm__lane_cols_at(2 * cols->col[j], 2 * cols->col[j] + 4, 2 * cols->col[j] + 2 * cols->n[j]);
            if (cols->n[j] > 0) gmm__store8(GMM__STATIC_DTYPE, &a->dx, row, &dx_cols, u);
        }
    } else if (GMM__STATIC_DTYPE == GMM_NONE) {
#pragma unroll
        for (i = 0; i < 8; i++)
            if (i % 4 < cols->n[i / 4]) {
                const int32_t col = gmm__act_gate_column(cols->col[i / 4] + i % 4, a->interleave);
                gmm__store_f32(&a->dx, row, col, va[i]);
                gmm__store_f32(&a->dx, row, col + gmm__act_linear_offset(a), vb[i]);
            }
    }
}

/* Spans of GMM__ELEM_SPAN columns that a warp loads together, so that enough loads are in flight and loop overhead
   is shared. */
#define GMM__SPANS (GMM__STATIC_DTYPE == GMM_BF16 || GMM__STATIC_DTYPE == GMM_F16 ? 2 : 1)

/* y = p f(x): the forward activation of each row, multiplied by the row's probability p; rows behind the used ones
   become zeros if the tail is zeroed. A task is one span of a row. Grid-stride loop: a warp processes GMM__SPANS
   consecutive tasks at a time. takes_amax: whether a.amax is wanted, a constant of each kernel. */
GMM__DEVICE void GMM__NAME(gmm__act_fwd_rows)(const gmm__act_args *a, int takes_amax) {
    gmm_pdl_wait();
    const uint32_t valid_rows = (uint32_t)*a->valid_rows, rows = a->tail_zero ? (uint32_t)a->rows : valid_rows;
    const gmm_dtype dtype = GMM__STATIC_DTYPE != GMM_NONE ? GMM__STATIC_DTYPE : a->y.dtype;
    gmm__grid_loop loop = gmm__grid_loop_begin((a->ffn - 1) / GMM__ELEM_SPAN + 1, GMM__SPANS);
    gmm__group_amax amax = { 0, 0 };
    for (; loop.row < rows; gmm__grid_loop_next(&loop)) {
        gmm__act_operands in[2];
        gmm__lane_cols cols[2];
        gmm__grid_loop task[2];
        float p[2];
        uint32_t maximum[2]; /* of lanes that have columns */
        int32_t i, j;
        task[0] = loop;
        task[1] = gmm__grid_loop_successor(loop);
#pragma unroll
        for (j = 0; j < GMM__SPANS; j++) {
            cols[j] = gmm__lane_cols_of(GMM__WIDE(a->wide), (int32_t)task[j].part, task[j].row < rows ? a->ffn : 0);
            p[j] = 1.0f;
            if (cols[j].n[0] > 0 && task[j].row < valid_rows) {
                if (a->prob) p[j] = a->prob[task[j].row];
                in[j] = GMM__NAME(gmm__act_load_operands)(a, task[j].row, &cols[j]);
            }
        }
#pragma unroll
        for (j = 0; j < GMM__SPANS; j++)
            if (cols[j].n[0] > 0) {
                float va[8], vb[8], f[8], da[8], db[8];
                if (task[j].row < valid_rows) {
                    GMM__NAME(gmm__act_decode)(a, &in[j], va, vb);
                    gmm__act_x8(a->kind, 0, a->coef, va, vb, f, da, db);
                }
#pragma unroll
                for (i = 0; i < 8; i++) f[i] = task[j].row < valid_rows ? p[j] * f[i] : 0.0f;
                if (takes_amax) maximum[j] = gmm__act_max8(0, &cols[j], f);
                gmm__store8(GMM__STATIC_DTYPE, &a->y, task[j].row, &cols[j], f);
            }
        if (!takes_amax) continue;
#pragma unroll
        for (j = 0; j < GMM__SPANS; j++)
            if (task[j].row < valid_rows)
                gmm__group_amax_add(a, dtype, &amax, task[j].row, cols[j].n[0] > 0 ? maximum[j] : 0u);
    }
    if (takes_amax) gmm__group_amax_store(a, dtype, &amax);
}
GMM__KERNEL __launch_bounds__(GMM__ELEM_BLOCK, 8)
GMM__NAME(gmm_act_fwd)(const __grid_constant__ gmm__act_args a) {
    GMM__NAME(gmm__act_fwd_rows)(&a, 0);
}
#ifndef GMM_NO_QUANT /* casts alone want an amax */
GMM__KERNEL __launch_bounds__(GMM__ELEM_BLOCK, 8)
GMM__NAME(gmm_act_fwd_amax)(const __grid_constant__ gmm__act_args a) {
    GMM__NAME(gmm__act_fwd_rows)(&a, 1);
}
#endif
#undef GMM__SPANS

/* dx = p dy df/dx, y = p f(x), dprob = dy . f(x). With dprob, one warp computes a row or, where a row has at least
   as many spans as a CTA has warps, one CTA; the order of additions depends on ffn and the dtypes alone. Without
   dprob each span is a task of its own. The sum of a row for dprob: a lane adds up its columns of a span, then a
   quarter of a warp its lanes, then its spans in their order; then quarters and warps are added. gmm_act_dprob
   (dprob.cuh) adds in the same order. */
GMM__DEVICE void GMM__NAME(gmm__act_bwd_rows)(const gmm__act_args *a, int takes_amax) {
    gmm_pdl_wait();
    const uint32_t valid_rows = (uint32_t)*a->valid_rows, rows = a->tail_zero ? (uint32_t)a->rows : valid_rows;
    const uint32_t parts = (uint32_t)(a->ffn - 1) / GMM__ELEM_SPAN + 1;
    const uint32_t row_warps = a->dprob ? (uint32_t)gmm__act_warps_per_row(a->ffn) : parts; /* warps that share a row */
    const gmm_dtype dtype = GMM__STATIC_DTYPE != GMM_NONE ? GMM__STATIC_DTYPE : a->dx.dtype;
    __shared__ float sums[GMM__ELEM_WARPS];
    gmm__grid_loop loop = gmm__grid_loop_begin(row_warps, 1);
    gmm__group_amax amax = { 0, 0 };
    for (; loop.row < rows; gmm__grid_loop_next(&loop)) {
        const float p = a->prob && loop.row < valid_rows ? a->prob[loop.row] : 1.0f;
        float sum = 0.0f;
        uint32_t part, maximum = 0;
        for (part = loop.part; part < parts; part += row_warps) {
            const gmm__lane_cols cols = gmm__lane_cols_of(GMM__WIDE(a->wide), (int32_t)part, a->ffn);
            float va[8], vb[8], f[8], da[8], db[8], g[8], span_sum = 0.0f;
            int32_t i;
            if (loop.row < valid_rows && cols.n[0] > 0) {
                gmm__act_operands in = GMM__NAME(gmm__act_load_operands)(a, loop.row, &cols);
                GMM__NAME(gmm__act_decode)(a, &in, va, vb);
                gmm__act_x8(a->kind, 0, a->coef, va, vb, f, da, db);
                gmm__decode8(GMM__STATIC_DTYPE, &a->dy, &in.dy, g);
#pragma unroll
                for (i = 0; i < 8; i++) {
                    if (i % 4 < cols.n[i / 4]) span_sum = fmaf(g[i], f[i], span_sum);
                    da[i] *= p * g[i];
                    db[i] *= p * g[i];
                    f[i] *= p;
                }
            } else {
#pragma unroll
                for (i = 0; i < 8; i++) f[i] = da[i] = db[i] = 0.0f;
            }
            if (a->dprob) sum = __fadd_rn(sum, gmm__quarter_warp_sum(span_sum));
            if (cols.n[0] <= 0) continue;
            if (takes_amax) maximum = gmm__act_max8(gmm__act_max8(maximum, &cols, da), &cols, db);
            if (a->dx.data) GMM__NAME(gmm__act_gradients)(a, loop.row, &cols, da, db);
            if (a->y.data) gmm__store8(GMM__STATIC_DTYPE, &a->y, loop.row, &cols, f);
        }
        if (takes_amax && loop.row < valid_rows) gmm__group_amax_add(a, dtype, &amax, loop.row, maximum);
        if (!a->dprob) continue;
        sum = gmm__sum_of_quarters(sum);
        if (row_warps > 1) { /* sums of the CTA's warps */
            int32_t i;
            if (gmm__lane() == 0) sums[gmm__warp()] = sum;
            __syncthreads();
            for (i = 0, sum = 0.0f; i < GMM__ELEM_WARPS; i++) sum += sums[i];
            __syncthreads();
        }
        if (loop.part == 0 && gmm__lane() == 0) a->dprob[loop.row] = sum;
    }
    if (takes_amax) gmm__group_amax_store(a, dtype, &amax);
}
#define GMM__BWD_PER_SM (GMM__STATIC_DTYPE == GMM_BF16 || GMM__STATIC_DTYPE == GMM_F16 ? 7 : 5)
GMM__KERNEL __launch_bounds__(GMM__ELEM_BLOCK, GMM__BWD_PER_SM)
GMM__NAME(gmm_act_bwd)(const __grid_constant__ gmm__act_args a) {
    GMM__NAME(gmm__act_bwd_rows)(&a, 0);
}
#ifndef GMM_NO_QUANT /* casts alone want an amax */
GMM__KERNEL __launch_bounds__(GMM__ELEM_BLOCK, GMM__BWD_PER_SM)
GMM__NAME(gmm_act_bwd_amax)(const __grid_constant__ gmm__act_args a) {
    GMM__NAME(gmm__act_bwd_rows)(&a, 1);
}
#endif
#undef GMM__BWD_PER_SM

/* Rows of a token that a warp loads at once. */
#define GMM__BATCH (GMM__STATIC_DTYPE == GMM_BF16 || GMM__STATIC_DTYPE == GMM_F16 ? 4 : 2)

/* out[t] = sum over slots of (probs) rows[row], in the order of slots. A task is one span of a token. The row
   indices of a batch are loaded one batch ahead. */
GMM__KERNEL __launch_bounds__(GMM__ELEM_BLOCK, 8)
GMM__NAME(gmm_unpermute_fwd)(const __grid_constant__ gmm__permute_args a) {
    gmm_pdl_wait();
    gmm__grid_loop loop = gmm__grid_loop_begin((a.hidden - 1) / GMM__ELEM_SPAN + 1, 1);
    float sum[8], p[4], next_p[4];
    int32_t row[4], next_row[4], i = 0, j, k;
#pragma unroll
    for (k = 0; k < 8; k++) sum[k] = 0.0f;
#pragma unroll
    for (j = 0; j < GMM__BATCH; j++)
        next_row[j] = loop.row < a.tokens ? gmm__slot_row(&a, loop.row, j, &next_p[j]) : -1;
    while (loop.row < a.tokens) {
        const gmm__lane_cols cols = gmm__lane_cols_of(GMM__WIDE(a.wide), (int32_t)loop.part, (int32_t)a.hidden);
        const uint32_t token = loop.row;
        gmm__raw8 r[4];
#pragma unroll
        for (j = 0; j < GMM__BATCH; j++) {
            row[j] = next_row[j];
            p[j] = next_p[j];
            if (row[j] >= 0 && cols.n[0] > 0) r[j] = gmm__load8(GMM__STATIC_DTYPE, &a.src, row[j], &cols);
        }
        i += GMM__BATCH;
        if (i >= a.topk) {
            i = 0;
            gmm__grid_loop_next(&loop);
        }
#pragma unroll
        for (j = 0; j < GMM__BATCH; j++)
            next_row[j] = loop.row < a.tokens ? gmm__slot_row(&a, loop.row, i + j, &next_p[j]) : -1;
#pragma unroll
        for (j = 0; j < GMM__BATCH; j++)
            if (row[j] >= 0 && cols.n[0] > 0) {
                float v[8];
                gmm__decode8(GMM__STATIC_DTYPE, &a.src, &r[j], v);
#pragma unroll
                for (k = 0; k < 8; k++) sum[k] = fmaf(p[j], v[k], sum[k]);
            }
        if (i == 0) {
            if (cols.n[0] > 0) gmm__store8(GMM__STATIC_DTYPE, &a.dst, token, &cols, sum);
#pragma unroll
            for (k = 0; k < 8; k++) sum[k] = 0.0f;
        }
    }
}
#undef GMM__BATCH

/* drows[r] = (probs) dout[token of r]; rows of padding become zeros. A task is two spans of a row. */
GMM__KERNEL __launch_bounds__(GMM__ELEM_BLOCK, 8)
GMM__NAME(gmm_unpermute_bwd)(const __grid_constant__ gmm__permute_args a) {
    gmm_pdl_wait();
    const int64_t valid_rows = gmm__valid_rows(a.sizes, a.experts, a.capacity, a.fault), slots = a.tokens * a.topk;
    const int64_t rows = a.tail_zero ? a.capacity : valid_rows;
    gmm__grid_loop loop = gmm__grid_loop_begin((a.hidden - 1) / (2 * GMM__ELEM_SPAN) + 1, 1);
    for (; loop.row < rows; gmm__grid_loop_next(&loop)) {
        const int32_t slot = loop.row < valid_rows ? gmm__map_entry(a.slot_of, loop.row, slots, a.fault) : -1;
        const float p = slot >= 0 && a.probs ? a.probs[slot] : 1.0f;
        gmm__raw8 r[2];
        gmm__lane_cols cols[2];
        int32_t j, k;
#pragma unroll
        for (j = 0; j < 2; j++) {
            cols[j] = gmm__lane_cols_of(GMM__WIDE(a.wide), (int32_t)(2 * loop.part) + j, (int32_t)a.hidden);
            if (slot >= 0 && cols[j].n[0] > 0)
                r[j] = gmm__load8(GMM__STATIC_DTYPE, &a.src, (uint32_t)slot / (uint32_t)a.topk, &cols[j]);
        }
#pragma unroll
        for (j = 0; j < 2; j++)
            if (cols[j].n[0] > 0) {
                float v[8];
                if (slot >= 0) gmm__decode8(GMM__STATIC_DTYPE, &a.src, &r[j], v);
#pragma unroll
                for (k = 0; k < 8; k++) v[k] = slot >= 0 ? p * v[k] : 0.0f;
                gmm__store8(GMM__STATIC_DTYPE, &a.dst, loop.row, &cols[j], v);
            }
    }
}

/* dprobs[slot] = dout[token] . rows[row]. One warp per slot. */
GMM__KERNEL __launch_bounds__(GMM__ELEM_BLOCK, 6)
GMM__NAME(gmm_unpermute_dots)(const __grid_constant__ gmm__permute_args a) {
    gmm_pdl_wait();
    gmm__grid_loop loop = gmm__grid_loop_begin(a.topk, 1);
    for (; loop.row < a.tokens; gmm__grid_loop_next(&loop)) {
        const int64_t slot = (int64_t)loop.row * a.topk + loop.part;
        const int32_t row = gmm__map_entry(a.row_of, slot, a.capacity, a.fault);
        float sum = 0.0f;
        int32_t part;
        for (part = 0; row >= 0; part += 2) {
            gmm__raw8 r[2], s[2];
            gmm__lane_cols cols[2];
            int32_t j, k;
#pragma unroll
            for (j = 0; j < 2; j++) {
                cols[j] = gmm__lane_cols_of(GMM__WIDE(a.wide), part + j, (int32_t)a.hidden);
                if (cols[j].n[0] > 0) r[j] = gmm__load8(GMM__STATIC_DTYPE, &a.src, loop.row, &cols[j]);
                if (cols[j].n[0] > 0) s[j] = gmm__load8(GMM__STATIC_DTYPE, &a.dst, row, &cols[j]);
            }
            if (cols[0].n[0] <= 0) break;
#pragma unroll
            for (j = 0; j < 2; j++)
                if (cols[j].n[0] > 0) {
                    float u[8], v[8];
                    gmm__decode8(GMM__STATIC_DTYPE, &a.src, &r[j], u);
                    gmm__decode8(GMM__STATIC_DTYPE, &a.dst, &s[j], v);
#pragma unroll
                    for (k = 0; k < 8; k++) sum = fmaf(u[k], v[k], sum);
                }
        }
        sum = gmm__warp_sum(sum);
        if (gmm__lane() == 0) a.dprobs[slot] = sum;
    }
}

#undef GMM__WIDE
#undef GMM__STATIC_DTYPE
#undef GMM__NAME
#undef GMM__TAG
#undef GMM__ROW

/* ========================================================================================= Bodies per copy unit === */

#elif GMM__BODY == GMM__BODY_UNIT
#define GMM__TAG GMM__COLUMN(1, GMM__ROW)
#define GMM__NAME(stem) GMM__CAT(stem##_, GMM__TAG)
#define GMM__UNIT GMM__NAME(gmm__unit)

/* Loads, stores or copies a segment of GMM__COPY_SPAN units of a row, four units per lane, so that all loads are
   issued before the first store. src NULL gives zeros. */
GMM__DEVICE void GMM__NAME(gmm__load_segment)(const GMM__UNIT *src, int64_t segment, int64_t units, GMM__UNIT v[4]) {
    const int64_t first = segment * GMM__COPY_SPAN + gmm__lane();
    int32_t j;
    memset(v, 0, 4 * sizeof *v);
#pragma unroll
    for (j = 0; j < 4; j++)
        if (src && first + 32 * j < units) v[j] = src[first + 32 * j];
}
GMM__DEVICE void GMM__NAME(gmm__store_segment)(GMM__UNIT *dst, int64_t segment, int64_t units, const GMM__UNIT v[4]) {
    const int64_t first = segment * GMM__COPY_SPAN + gmm__lane();
    int32_t j;
#pragma unroll
    for (j = 0; j < 4; j++)
        if (first + 32 * j < units) __stcs(dst + first + 32 * j, v[j]);
}
GMM__DEVICE void GMM__NAME(gmm__copy_segment)(const GMM__UNIT *src, GMM__UNIT *dst, int64_t segment, int64_t units) {
    GMM__UNIT v[4];
    GMM__NAME(gmm__load_segment)(src, segment, units, v);
    GMM__NAME(gmm__store_segment)(dst, segment, units, v);
}

/* Copies rows. A task is one segment of a row. */
GMM__KERNEL __launch_bounds__(GMM__ELEM_BLOCK, 12)
GMM__NAME(gmm_copy)(const __grid_constant__ gmm__copy_args a) {
    gmm_pdl_wait();
    gmm__grid_loop loop = gmm__grid_loop_begin((a.cols + GMM__COPY_SPAN - 1) / GMM__COPY_SPAN, 1);
    for (; loop.row < a.rows; gmm__grid_loop_next(&loop))
        GMM__NAME(gmm__copy_segment)((const GMM__UNIT *)a.src + loop.row * a.src_ld,
                                     (GMM__UNIT *)a.dst + loop.row * a.dst_ld, loop.part, a.cols);
}

/* dst[r] = src[token of slot_of[r]], zeros in padding; row_probs[r] = probs[slot_of[r]]. A task is one segment of a
   row. */
GMM__KERNEL __launch_bounds__(GMM__ELEM_BLOCK, 10)
GMM__NAME(gmm_permute_rows)(const __grid_constant__ gmm__permute_args a) {
    gmm_pdl_wait();
    const int64_t valid_rows = gmm__valid_rows(a.sizes, a.experts, a.capacity, a.fault), slots = a.tokens * a.topk;
    const int64_t rows = a.tail_zero ? a.capacity : valid_rows;
    gmm__grid_loop loop = gmm__grid_loop_begin((a.hidden + GMM__COPY_SPAN - 1) / GMM__COPY_SPAN, 1);
    for (; loop.row < rows; gmm__grid_loop_next(&loop)) {
        const int32_t slot = loop.row < valid_rows ? gmm__map_entry(a.slot_of, loop.row, slots, a.fault) : -1;
        const int64_t token = (uint32_t)slot / (uint32_t)a.topk;
        GMM__NAME(gmm__copy_segment)(slot >= 0 ? (const GMM__UNIT *)a.src.data + token * a.src.ld : NULL,
                                     (GMM__UNIT *)a.dst.data + loop.row * a.dst.ld, loop.part, a.hidden);
        if (a.row_probs && loop.part == 0 && gmm__lane() == 0) a.row_probs[loop.row] = slot >= 0 ? a.probs[slot] : 0.0f;
    }
}

/* The same where row_of is given too: each token's row is read once and written to all of its rows. An entry
   of row_of counts only where slot_of agrees, so that any two maps give the result of gmm_permute_rows. Rows without
   such an entry, for example padding, are written last: a warp checks 32 rows at a time. */
GMM__KERNEL __launch_bounds__(GMM__ELEM_BLOCK, 8)
GMM__NAME(gmm_permute_tokens)(const __grid_constant__ gmm__permute_args a) {
    gmm_pdl_wait();
    const int64_t segments = (a.hidden + GMM__COPY_SPAN - 1) / GMM__COPY_SPAN;
    const int64_t stride = (int64_t)gridDim.x * GMM__ELEM_BLOCK;
    const GMM__UNIT *src = (const GMM__UNIT *)a.src.data;
    GMM__UNIT *dst = (GMM__UNIT *)a.dst.data;
    const int32_t slots = (int32_t)(a.tokens * a.topk); /* fits 32 bits, since maps are int32 */
    int64_t base = (int64_t)blockIdx.x * GMM__ELEM_BLOCK + gmm__warp() * 32, valid_rows = -1;
    gmm__grid_loop loop = gmm__grid_loop_begin(segments, 1);
    for (; loop.row < a.tokens; gmm__grid_loop_next(&loop)) {
        GMM__UNIT v[4];
        int32_t i;
        GMM__NAME(gmm__load_segment)(src + loop.row * a.src.ld, loop.part, a.hidden, v);
        for (i = 0; i < a.topk; i += 32) {
            const int32_t choice = i + gmm__lane(), slot = (int32_t)loop.row * a.topk + choice;
            int32_t row = choice < a.topk ? a.row_of[slot] : -1;
            uint32_t pending;
            /* read after the first loads are issued */
            if (valid_rows < 0) valid_rows = gmm__valid_rows(a.sizes, a.experts, a.capacity, a.fault);
            if (row < 0 || row >= valid_rows || a.slot_of[row] != slot) row = -1;
            if (row >= 0 && loop.part == 0 && a.row_probs) a.row_probs[row] = a.probs[slot];
            for (pending = __ballot_sync(0xFFFFFFFFu, row >= 0); pending; pending &= pending - 1) {
                const int64_t dst_row = __shfl_sync(0xFFFFFFFFu, row, __ffs((int)pending) - 1);
                GMM__NAME(gmm__store_segment)(dst + dst_row * a.dst.ld, loop.part, a.hidden, v);
            }
        }
    }
    for (; base < a.capacity; base += stride) {
        const int64_t row = base + gmm__lane();
        int32_t slot, unmapped;
        uint32_t pending;
        if (valid_rows < 0) valid_rows = gmm__valid_rows(a.sizes, a.experts, a.capacity, a.fault);
        slot = row < valid_rows ? gmm__map_entry(a.slot_of, row, slots, a.fault) : -1;
        unmapped = row < (a.tail_zero ? a.capacity : valid_rows) && (slot < 0 || a.row_of[slot] != row);
        if (unmapped && a.row_probs) a.row_probs[row] = slot >= 0 ? a.probs[slot] : 0.0f;
        for (pending = __ballot_sync(0xFFFFFFFFu, unmapped); pending; pending &= pending - 1) {
            const int32_t lane = __ffs((int)pending) - 1, src_slot = __shfl_sync(0xFFFFFFFFu, slot, lane);
            const int64_t token = (uint32_t)src_slot / (uint32_t)a.topk;
            int64_t segment;
            for (segment = 0; segment < segments; segment++)
                GMM__NAME(gmm__copy_segment)(src_slot >= 0 ? src + token * a.src.ld : NULL,
                                             dst + (base + lane) * a.dst.ld, segment, a.hidden);
        }
    }
}

/* Copies row j of each group of src to row j of the group of dst; rows that src does not have become zeros. The
   first CTA also writes the padded sizes and reports a capacity fault. A task is one segment of a row. */
GMM__KERNEL __launch_bounds__(GMM__ELEM_BLOCK, 12)
GMM__NAME(gmm_pad)(const __grid_constant__ gmm__pad_args a) {
    gmm_pdl_wait();
    const int64_t valid_rows = gmm__pad_start(&a, a.groups, a.pad), rows = a.tail_zero ? a.rows : valid_rows;
    gmm__grid_loop loop = gmm__grid_loop_begin((a.cols + GMM__COPY_SPAN - 1) / GMM__COPY_SPAN, 1);
    if (blockIdx.x == 0) {
        int64_t g;
        for (g = threadIdx.x; a.sizes && g < a.groups; g += GMM__ELEM_BLOCK)
            a.sizes[g] = (int32_t)(gmm__pad_start(&a, g + 1, 1) - gmm__pad_start(&a, g, 1));
        if (threadIdx.x == 0 && a.blocks[a.groups] * a.align > a.capacity)
            gmm__fault(a.fault, (uint32_t)GMM_FAULT_CAPACITY);
    }
    for (; loop.row < rows; gmm__grid_loop_next(&loop)) {
        int64_t src_row = -1;
        if (loop.row < valid_rows) {
            const int64_t g = gmm__pad_group(&a, loop.row);
            src_row = gmm__pad_start(&a, g, !a.pad) + loop.row - gmm__pad_start(&a, g, a.pad);
            if (src_row >= gmm__pad_start(&a, g + 1, !a.pad)) src_row = -1;
        }
        GMM__NAME(gmm__copy_segment)(src_row >= 0 ? (const GMM__UNIT *)a.src.data + src_row * a.src.ld : NULL,
                                     (GMM__UNIT *)a.dst.data + loop.row * a.dst.ld, loop.part, a.cols);
        if (a.dst_prob && loop.part == 0 && gmm__lane() == 0)
            a.dst_prob[loop.row] = src_row >= 0 ? a.src_prob[src_row] : 0.0f;
    }
}

/* Permutes the 2 ffn rows of each of `count` matrices. A task is one segment of a row of dst. */
GMM__KERNEL __launch_bounds__(GMM__ELEM_BLOCK, 8)
GMM__NAME(gmm_glu_rows)(const __grid_constant__ gmm__glu_args a) {
    gmm_pdl_wait();
    gmm__grid_loop loop = gmm__grid_loop_begin((a.cols + GMM__COPY_SPAN - 1) / GMM__COPY_SPAN, 1);
    for (; loop.row < a.count * 2 * a.ffn; gmm__grid_loop_next(&loop)) {
        const uint32_t g = loop.row / (2 * (uint32_t)a.ffn), dst_row = loop.row - g * 2 * (uint32_t)a.ffn;
        const int64_t src_row = gmm__glu_source(dst_row, (uint32_t)a.ffn, (uint32_t)a.block, a.inverse);
        const GMM__UNIT *src = a.src_table ? (const GMM__UNIT *)a.src_table[g]
                                           : (const GMM__UNIT *)a.src.data + g * a.src_stride;
        GMM__UNIT *dst = a.dst_table ? (GMM__UNIT *)a.dst_table[g] : (GMM__UNIT *)a.dst.data + g * a.dst_stride;
        GMM__NAME(gmm__copy_segment)(src + src_row * a.src.ld, dst + dst_row * a.dst.ld, loop.part, a.cols);
    }
}

/* Permutes the 2 ffn columns of a matrix of `count` rows. A task is one segment of a row: loads are gathered, stores
   are coalesced. */
GMM__KERNEL __launch_bounds__(GMM__ELEM_BLOCK, 8)
GMM__NAME(gmm_glu_columns)(const __grid_constant__ gmm__glu_args a) {
    gmm_pdl_wait();
    gmm__grid_loop loop = gmm__grid_loop_begin((2 * a.ffn + GMM__COPY_SPAN - 1) / GMM__COPY_SPAN, 1);
    for (; loop.row < a.count; gmm__grid_loop_next(&loop)) {
        const GMM__UNIT *src = (const GMM__UNIT *)a.src.data + loop.row * a.src.ld;
        GMM__UNIT *dst = (GMM__UNIT *)a.dst.data + loop.row * a.dst.ld;
        const int64_t first = loop.part * GMM__COPY_SPAN + gmm__lane();
        GMM__UNIT v[4];
        int32_t j;
        memset(v, 0, sizeof v);
#pragma unroll
        for (j = 0; j < 4; j++)
            if (first + 32 * j < 2 * a.ffn)
                v[j] = src[gmm__glu_source((uint32_t)first + 32u * j, (uint32_t)a.ffn, (uint32_t)a.block, a.inverse)];
#pragma unroll
        for (j = 0; j < 4; j++)
            if (first + 32 * j < 2 * a.ffn) dst[first + 32 * j] = v[j];
    }
}

#undef GMM__UNIT
#undef GMM__NAME
#undef GMM__TAG
#undef GMM__ROW

/* ............................................................................. Body: one wgmma instruction ... */
#elif GMM__BODY == GMM__BODY_WGMMA
#define GMM__TAG GMM__COLUMN(1, GMM__ROW)
#define GMM__OP GMM__COLUMN(2, GMM__ROW)
#define GMM__WGMMA_TYPES GMM__COLUMN(3, GMM__ROW)
#define GMM__WGMMA_MAJOR GMM__COLUMN(4, GMM__ROW)
/* One wgmma of M = 64, N = 8 n8 and 32 bytes of K: d = A B + d, or d = A B where `scale_d` is 0. `desc_a` and
   `desc_b` are the descriptors of the operands in shared memory. */
GMM__DEVICE void GMM__CAT(GMM__CAT(GMM__CAT(gmm_wgmma_, GMM__TAG), _), GMM__OP)(const int n8, float *d, uint64_t desc_a,
                                                                                uint64_t desc_b,
                                                                                const int scale_d = 1) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    switch (n8) {
#define GMM__X(e, u, n, da, db, c) \
    case e: asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, " GMM__WGMMA_SCALE_D(c) ", 0;\n" \
                         " wgmma.mma_async.sync.aligned.m64n" n GMM__WGMMA_TYPES \
                         " {" GMM__T##u "}, " da ", " db ", p, 1, 1" GMM__WGMMA_MAJOR ";\n}" \
                         : GMM__V##u : "l"(desc_a), "l"(desc_b), "r"(scale_d)); break;
    GMM_WGMMA_LIST(GMM__X)
#undef GMM__X
    default: break;
    }
#endif
}
#undef GMM__TAG
#undef GMM__OP
#undef GMM__WGMMA_TYPES
#undef GMM__WGMMA_MAJOR
#undef GMM__ROW

#elif GMM__BODY == GMM__BODY_PRODUCT
#define GMM__KERNEL_NAME GMM__COLUMN(1, GMM__ROW)
#define GMM__OP GMM__COLUMN(2, GMM__ROW)
#define GMM__TAG GMM__COLUMN(3, GMM__ROW)
#define GMM__DTYPE GMM__COLUMN(4, GMM__ROW)
#define GMM__TILE GMM__COLUMN(5, GMM__ROW)
#define GMM__TILES GMM__COLUMN(6, GMM__ROW)
#define GMM__SECOND_TILE GMM__COLUMN(7, GMM__ROW)
#define GMM__CFG(name) (int)GMM__SM90(name, GMM__TILE)
#define GMM__SMEM GMM__SM90(smem, GMM__TILE)          /* the struct in shared memory */
#define GMM__SMEM_AT(member) (base + GMM__OFFSET(GMM__SMEM, member)) /* address of a member; base: of the struct */
#define GMM__INSTANCE(part) GMM__CAT(GMM__CAT(GMM__CAT(GMM__CAT(part, GMM__OP), _), GMM__TAG), _)
#define GMM__PART(part) GMM__CAT(GMM__INSTANCE(part), GMM__TILE)
/* A kernel with two tiles calls the functions of both; those of the second tile are defined by a row before, which
   defines no kernel. */
#if GMM__TILES == 2
#define GMM__SECOND_PART(part) GMM__CAT(GMM__INSTANCE(part), GMM__SECOND_TILE)
#define GMM__TILE_CHOICE args.tile_choice
#define GMM__SECOND_CFG(name) (int)GMM__SM90(name, GMM__SECOND_TILE)
#define GMM__CFG_OF(second_tile, name) ((second_tile) ? GMM__SECOND_CFG(name) : GMM__CFG(name))
static_assert(GMM__CFG(m16) / 4 + 1 + GMM__SECOND_CFG(m16) / 4 + 1 <= 8, "gmm_sm90_choose_tile: candidates of a warp");
#else
#define GMM__TILE_CHOICE gmm_sm90_tile_first
#define GMM__SECOND_CFG(name) 0
#define GMM__CFG_OF(second_tile, name) ((void)(second_tile), GMM__CFG(name))
#endif
#define GMM__MAX_CFG(name) (GMM__SECOND_CFG(name) > GMM__CFG(name) ? GMM__SECOND_CFG(name) : GMM__CFG(name))
#define GMM__TA GMM__CAT(gmm_ta_, GMM__OP)
#define GMM__TB GMM__CAT(gmm_tb_, GMM__OP)
#define GMM__K_GROUPED GMM__CAT(gmm_k_grouped_, GMM__OP)
#define GMM__GLU GMM__CAT(GMM__IS_GLU_, GMM__OP)
#define GMM__DGLU GMM__CAT(GMM__IS_DGLU_, GMM__OP)
#if GMM__GLU
#define GMM__WGMMA_OP fwd /* whose operands glu has */
#elif GMM__DGLU
#define GMM__WGMMA_OP dgrad
#else
#define GMM__WGMMA_OP GMM__OP
#endif
/* Tiles begin at multiples of so many columns. */
#define GMM__COL_ALIGN (GMM__K_GROUPED ? GMM__CFG(tile_n) : GMM__GLU ? 128 : 64)
/* Parts in which gmm_sm90_store_any stores a tile: rows of fp32 accumulators that a store slot holds at once, and the
   number of parts in 64 columns. */
#define GMM__ROWS_PER_STORE (GMM__CFG(store_blocks) >= 4 && GMM__CFG(wgmma_m) * GMM__CFG(m16) < 24 ? 32 : 16)
#define GMM__PARTS_PER_COLUMN ((16 * GMM__CFG(m16) + GMM__ROWS_PER_STORE - 1) / GMM__ROWS_PER_STORE)

/* Deferred store: the 32-bit words of 16-bit D that stay in a thread's registers, the words of them that are stored at
   once, and the slots of a warp group for these. */
#define GMM__DEFERRED GMM__CFG(deferred)
#define GMM__DEFERRED_WORDS (GMM__DEFERRED ? 4 * GMM__CFG(m16) : 1)
#define GMM__WORDS_PER_STORE (GMM__DEFERRED ? 4 * GMM__CFG(deferred) : 1)
#define GMM__DEFERRED_SLOTS (GMM__DEFERRED ? 2 * GMM__CFG(store_blocks) / GMM__CFG(deferred) : 2)
/* Whether the first wgmma of a tile overwrites the accumulators (scale_d = 0); else they are zeroed before. */
#define GMM__ZERO_INIT (GMM__DEFERRED || GMM__K_GROUPED)
/* Tiles begin at multiples of so many rows. GMM__HAS_N8: whether tiles need wgmma's N = 8 n8. */
#define GMM__ROW_ALIGN (GMM__K_GROUPED ? 64 : 8)
#define GMM__HAS_N8(n8) ((n8) <= 2 * GMM__CFG(m16) && (!GMM__K_GROUPED || (n8) % 8 == 0))
/* Small-M mode: the most rows of a tile with which the loads of weights bound forward, or 0. A stage has 128
   bytes of each line of the weights; device memory delivers 256 contiguous bytes faster, so two stages are requested at
   a time, and each is released as soon as it is multiplied. Above 64 rows products take time as well, and the mode pays
   only where groups are nearly equal (plan_split in body_product_warps.cuh). */
#define GMM__SMALL_M(tile_n) \
    (!GMM__K_GROUPED && !GMM__TB && !GMM__CFG(b_format) && !GMM__CFG(gather) && GMM__CFG(consumers) == 2 && \
             (tile_n) == 256 \
         ? GMM_SM90_SMALL_M : 0)
/* The store slots of a consumer warp group; in wgrad the slot of a part, whichever warp group writes it. */
#define GMM__STORE_SLOT(wg, nth) \
    ((char *)smem + GMM__OFFSET(GMM__SMEM, slot) + \
     GMM__CFG(slot_bytes) * (GMM__K_GROUPED ? (int)((nth) % GMM_SM90_STORE_SLOTS) : 2 * (wg)))
#define GMM__SCHEDULER_WARP (GMM__CFG(b_format) ? GMM_SM90_PACKED_SCHEDULER_WARP : GMM_SM90_SCHEDULER_WARP)

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
/* Stores the next rows of a tile, whose 16-bit D is pending in the registers `words`, through one of the warp group's
   slots, by TMA where it may store D (args->d_by_tma). The slots of a warp group rotate: TMA must have read a slot one
   stage before it is written again, three stages after its store with four slots, one with two. Words are selected by
   predicates: an index into them would put them into local memory, and moving them down would need as many registers
   again. */
GMM__DEVICE void GMM__PART(gmm_sm90_store_deferred_)(gmm_sm90_store_state *store,
                                                     const uint32_t words[GMM__DEFERRED_WORDS]) {
    const gmm_sm90_args *const args = store->args;
    const gmm_sm90_tile *const t = store->tile;
    const int wg = store->wg;
    const int tid = gmm_tid_x() & 127, lane = tid & 31, w = tid >> 5, row = 16 * (t->row_blocks - store->pending);
    char *const slot = store->slots + store->part % GMM__DEFERRED_SLOTS * (512 * GMM__WORDS_PER_STORE);
    const uint32_t slot_at = (uint32_t)__cvta_generic_to_shared(slot);
    const uint32_t st_at = gmm_wgmma_stmatrix_at(slot_at, 128, w, lane);
    const gmm_kmat *const d = &args->p.d;
    int x, e;
#pragma unroll
    for (x = 0; x + 3 < GMM__DEFERRED_WORDS; x += 4)
        gmm_stmatrix_x4_trans_if(x / GMM__WORDS_PER_STORE * GMM__CFG(deferred) == row / 16,
                                 st_at + x % GMM__WORDS_PER_STORE * 512, words[x], words[x + 1], words[x + 2],
                                 words[x + 3]);
    gmm_fence_proxy_async();
    if (tid == 0) /* the next slot may be overwritten */
        GMM__BULK_WAIT_GROUP_READ(GMM__DEFERRED_SLOTS - 2);
    gmm_consumer_sync(wg);
    if (args->d_by_tma) {
        if (tid == 0) {
            gmm_tma_store(&args->d, slot_at, 0, t->n0 + 64 * wg, GMM_SM90_RAGGED_ROWS - t->rows + row,
                          t->row + t->m0 + t->rows, GMM_SM90_RAGGED_ROWS);
            gmm_bulk_commit_group();
        }
    } else {
        const int c = 64 * wg + 8 * (tid % 8);
        char *to = (char *)d->data + (((int64_t)t->row + t->m0 + row + tid / 8) * d->ld + t->n0 + c) * 2;
#pragma unroll 1
        for (x = tid / 8; x < 4 * GMM__WORDS_PER_STORE && row + x < t->rows; x += 16, to += 32 * d->ld)
#pragma unroll 1
            for (e = 0; e < 8 && c + e < t->cols; e++)
                ((uint16_t *)to)[e] = ((const uint16_t *)(slot + x * 128 + (((tid % 8) ^ (x & 7)) << 4)))[e];
    }
    store->pending -= GMM__CFG(deferred);
    store->part++;
}

/* Stores the CTA's last tile at once, where TMA may store D (args->d_by_tma). All of it is pending in the registers
   `words`. No stage follows in either CTA of the cluster, and no other warp group reads this one's columns of B, which
   therefore serve as slots: 64 rows of D in each stage. base: of shared memory. */
GMM__DEVICE void GMM__PART(gmm_sm90_store_last_)(gmm_sm90_store_state *store, uint32_t base,
                                                 const uint32_t words[GMM__DEFERRED_WORDS]) {
    const gmm_sm90_tile *const t = store->tile;
    const int wg = store->wg, lane = gmm_tid_x() & 31, w = gmm_tid_x() >> 5 & 3;
    const uint32_t slots_at = base + GMM_SM90_BOX_BYTES * (uint32_t)wg;
    const uint32_t st_at = gmm_wgmma_stmatrix_at(slots_at, 128, w, lane);
    int u;
    static_assert(GMM__CFG(m16) <= 4 * GMM__CFG(stages), "the stages hold the rows of a tile of D");
    gmm_consumer_sync(wg); /* all warps have multiplied the last stage */
#pragma unroll
    for (u = 0; u < GMM__DEFERRED_WORDS / 4; u++)
        gmm_stmatrix_x4_trans_if(u < t->row_blocks, st_at + u / 4 * GMM__CFG(stage_bytes) + u % 4 * 2048, words[4 * u],
                                 words[4 * u + 1], words[4 * u + 2], words[4 * u + 3]);
    gmm_fence_proxy_async();
    gmm_consumer_sync(wg);
    if (lane == 0) { /* each warp requests every fourth TMA box */
#pragma unroll 1
        for (u = GMM__CFG(deferred) * w; u < t->row_blocks; u += 4 * GMM__CFG(deferred))
            gmm_tma_store(&store->args->d, slots_at + u / 4 * GMM__CFG(stage_bytes) + u % 4 * 2048, 0, t->n0 + 64 * wg,
                          GMM_SM90_RAGGED_ROWS - t->rows + 16 * u, t->row + t->m0 + t->rows, GMM_SM90_RAGGED_ROWS);
        gmm_bulk_commit_group();
        GMM__BULK_WAIT_GROUP(0);
    }
    store->pending = 0;
}

/* Mainloop of a consumer warp group: accumulates the stages of a tile of 8 n8 rows, and meanwhile stores the previous
   tile (deferred store). last_stage_full: mbarrier at which this warp group of a ping-pong tile arrives when its last
   stage is full. small_m: a stage is released when it is multiplied, else one stage after it, so that wgmma never
   pauses. */
GMM__DEVICE void GMM__PART(gmm_sm90_mainloop_)(const int n8, const int small_m,
                                               float acc[GMM__CFG(wgmma_m)][8 * GMM__CFG(m16)],
                                               const gmm_sm90_operands *operands, uint32_t last_stage_full,
                                               gmm_sm90_pipeline *pipe, gmm_sm90_store_state *store,
                                               const uint32_t deferred[GMM__DEFERRED_WORDS]) {
    const uint32_t lane = threadIdx.x & 31;
    uint32_t k, s = pipe->iter % GMM__CFG(stages), parity = pipe->iter / GMM__CFG(stages) & 1, prev_stage = 0;
    int kk, j;
#pragma unroll 1
    for (k = 0;; k++) {
        const uint64_t b = operands->desc_b + s * (GMM__CFG(stage_bytes) >> 4);
        const uint64_t a = operands->desc_a + s * (GMM__CFG(stage_bytes) >> 4);
        gmm_mbarrier_wait(gmm_sm90_full(pipe->bars, s), parity);
        if (GMM__CFG(gather)) gmm_fence_proxy_async(); /* wgmma reads what cp.async has written */
        if (GMM__CFG(consumers) == 1 && k == operands->k_tiles - 1 && lane == 0) gmm_mbarrier_arrive(last_stage_full);
        gmm_wgmma_fence();
        /* a step of 16 k: 16 rows of 128 bytes of an MN-major operand, else 32 bytes of each row */
#pragma unroll
        for (kk = 0; kk < 4; kk++)
#pragma unroll
            for (j = 0; j < GMM__CFG(wgmma_m); j++)
                GMM__CAT(GMM__CAT(GMM__CAT(gmm_wgmma_, GMM__TAG), _), GMM__WGMMA_OP)(
                    n8, acc[j], b + j * (8192 >> 4) + kk * ((GMM__TB ? 2048 : 32) >> 4),
                    a + kk * ((GMM__TA ? 2048 : 32) >> 4), !GMM__ZERO_INIT || k > 0 || kk > 0);
        gmm_wgmma_commit();
        if (small_m) GMM__WGMMA_WAIT(0);
        else GMM__WGMMA_WAIT(1);
        if (small_m || k > 0) gmm_sm90_release_stage(pipe, small_m ? s : prev_stage);
        if (GMM__DEFERRED && store->pending > 0)
            GMM__PART(gmm_sm90_store_deferred_)(store, deferred);
        prev_stage = s;
        if (k + 1 == operands->k_tiles) break;
        if (++s == GMM__CFG(stages)) {
            s = 0;
            parity ^= 1;
        }
    }
    GMM__WGMMA_WAIT(0);
    if (!small_m) gmm_sm90_release_stage(pipe, prev_stage);
    pipe->iter += operands->k_tiles;
}
#endif
/* GMM__BODY_PRODUCT, continued: the stores of glu and dglu products. */
#if (GMM__GLU || GMM__DGLU) && defined(__CUDA_ARCH_FEAT_SM90_ALL)
/* Rounds a tile of D to 16 bits, which leaves the activation half of the accumulators' registers. */
GMM__DEVICE void GMM__PART(gmm_sm90_pack_tile_)(const float acc[GMM__CFG(wgmma_m)][8 * GMM__CFG(m16)],
                                                uint32_t words[GMM__CFG(wgmma_m)][4 * GMM__CFG(m16)]) {
    int u, j;
#pragma unroll
    for (j = 0; j < GMM__CFG(wgmma_m); j++)
#pragma unroll
        for (u = 0; u < 4 * GMM__CFG(m16); u++)
            words[j][u] = gmm_pack2(GMM__DTYPE, acc[j][2 * u], acc[j][2 * u + 1]);
}
/* Writes part number `part` of these rows, as many as a slot holds, of 256 bytes each, to the slot, and joins the warp
   group. st_at: the thread's address for stmatrix in the slot. Words are selected by predicates, so that the code of
   the activation, which follows, stands once in a loop over parts. */
GMM__DEVICE void GMM__PART(gmm_sm90_write_slot_)(const gmm_sm90_output *out, uint32_t st_at, int part,
                                                 const uint32_t words[GMM__CFG(wgmma_m)][4 * GMM__CFG(m16)]) {
    const int count = 8 * GMM__CFG(store_blocks);
    int u, j;
#pragma unroll
    for (j = 0; j < GMM__CFG(wgmma_m); j++)
#pragma unroll
        for (u = 0; u < GMM__CFG(m16); u++)
            gmm_stmatrix_x4_trans_if(16 * u / count == part, st_at + 16 * u % count * 256 + 128 * j, words[j][4 * u],
                                     words[j][4 * u + 1], words[j][4 * u + 2], words[j][4 * u + 3]);
    gmm_consumer_sync(out->wg);
}
#endif
#if GMM__GLU && defined(__CUDA_ARCH_FEAT_SM90_ALL)
/* Stores a tile of D, unless it is dropped, and of h. */
GMM__DEVICE void GMM__PART(gmm_sm90_store_glu_)(const GMM__ARGS *args, const gmm_sm90_output *out, uint32_t *part,
                                                const float acc[GMM__CFG(wgmma_m)][8 * GMM__CFG(m16)]) {
    const int count = 8 * GMM__CFG(store_blocks); /* rows of a slot */
    const int lane = gmm_tid_x() & 31, w = gmm_tid_x() >> 5 & 3;
    const uint32_t st_at = gmm_wgmma_stmatrix_at((uint32_t)__cvta_generic_to_shared(out->slots), 256, w, lane);
    /* of lane 0, so that ptxas knows that all threads loop as often: else the mainloop loses its uniform registers */
    const int rows = __shfl_sync(0xFFFFFFFFu, out->tile->rows, 0);
    uint32_t words[GMM__CFG(wgmma_m)][4 * GMM__CFG(m16)];
    int row;
    GMM__PART(gmm_sm90_pack_tile_)(acc, words);
#pragma unroll 1
    for (row = 0; row < rows; row += count, (*part)++) {
        const int slot = (*part & 1) * GMM__CFG(slot_bytes);
        float probs[2];
        gmm_sm90_glu_probs(&args->glu, out->tile, row, count, probs);
        GMM__PART(gmm_sm90_write_slot_)(out, st_at + slot, row / count, words);
        gmm_sm90_glu_store_h(&args->glu, GMM__DTYPE, out, out->slots + slot, row, count, probs);
        if (!args->glu.drops_d) gmm_sm90_glu_store_d(&args->glu, out, out->slots + slot, row, count);
    }
}
#endif
#if GMM__DGLU && defined(__CUDA_ARCH_FEAT_SM90_ALL)
/* Computes the activation's gradient for a tile of D, which is not stored. z is loaded 16 rows ahead. */
GMM__DEVICE void GMM__PART(gmm_sm90_store_dglu_)(const GMM__ARGS *args, const gmm_sm90_output *out, uint32_t *part,
                                                 const float acc[GMM__CFG(wgmma_m)][8 * GMM__CFG(m16)]) {
    const int count = 8 * GMM__CFG(store_blocks); /* rows of a slot */
    const int lane = gmm_tid_x() & 31, w = gmm_tid_x() >> 5 & 3;
    const uint32_t st_at = gmm_wgmma_stmatrix_at((uint32_t)__cvta_generic_to_shared(out->slots), 256, w, lane);
    const int rows = __shfl_sync(0xFFFFFFFFu, out->tile->rows, 0); /* uniform, for the registers of the mainloop */
    const gmm_sm90_dglu_thread thread = gmm_sm90_dglu_begin(&args->dglu, out->tile, out->col0);
    gmm_sm90_dglu_row next[2];
    uint32_t words[GMM__CFG(wgmma_m)][4 * GMM__CFG(m16)];
    int row, j;
    gmm_sm90_dglu_load(&args->dglu, &thread, 0, &next[0]);
    gmm_sm90_dglu_load(&args->dglu, &thread, 8, &next[1]);
    GMM__PART(gmm_sm90_pack_tile_)(acc, words);
#pragma unroll 1
    for (row = 0; row < rows; row += 16) {
        const int slot = (*part & 1) * GMM__CFG(slot_bytes);
        if (row % count == 0) GMM__PART(gmm_sm90_write_slot_)(out, st_at + slot, row / count, words);
#pragma unroll
        for (j = 0; j < 2; j++)
            gmm_sm90_dglu_step(&args->dglu, GMM__DTYPE, &thread, out->slots + slot + (row % count + 8 * j) * 256,
                               row + 8 * j, &next[j]);
        if ((row + 16) % count == 0 || row + 16 >= rows) (*part)++;
    }
}
#endif
/* GMM__BODY_PRODUCT, continued: the epilogue of a consumer warp group. Threads hold accumulators as gmm_wgmma_acc_m
   (columns of D) and gmm_wgmma_acc_n (rows of D) say; stores transpose them through shared memory. */
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
/* Multiplies the accumulators by the alphas of the tile's group. An empty sum stays +0, whatever they are. */
GMM__DEVICE void GMM__PART(gmm_sm90_scale_accumulators_)(const GMM__ARGS *args, const gmm_sm90_tile *t,
                                                         float acc[GMM__CFG(wgmma_m)][8 * GMM__CFG(m16)]) {
    int j, u, x;
#pragma unroll 1
    for (x = 0; x < 2; x++) {
        const float *const alphas = x ? args->alpha2 : args->p.alpha;
        const float alpha = alphas && t->k > 0 ? alphas[args->p.alpha_per_group ? t->g : 0] : 1.0f;
        if (alpha != 1.0f) {
#pragma unroll
            for (j = 0; j < GMM__CFG(wgmma_m); j++)
#pragma unroll
                for (u = 0; u < 8 * GMM__CFG(m16); u++) acc[j][u] = __fmul_rn(acc[j][u], alpha);
        }
    }
}

/* Applies an epilogue step to the accumulators. col0: the warp group's first column in the tile. A thread has two
   columns of each block of 64; of the tile's rows it has two in each unit of 8, whose values come from other lanes. */
GMM__DEVICE void GMM__PART(gmm_sm90_apply_step_)(const gmm_epilogue_step step, const GMM__ARGS *args,
                                                 const gmm_sm90_tile *t, int col0,
                                                 float acc[GMM__CFG(wgmma_m)][8 * GMM__CFG(m16)]) {
    const gmm_epilogue_values values = gmm_epilogue_values_of(step, &args->p, t->g, t->row + t->m0);
    const int lane = (int)threadIdx.x & 31, w = (int)threadIdx.x >> 5 & 3;
    float cols0[GMM__CFG(wgmma_m)][4], cols8[GMM__CFG(wgmma_m)][4];
    float rows[GMM__CFG(m16) / 2 + 1]; /* one per lane */
    int j, u, x;
#pragma unroll
    for (x = 0; x < (GMM__CFG(m16) + 1) / 2; x++)
        rows[x] = values.rows && 32 * x + lane < t->rows ? values.rows[32 * x + lane] : 1.0f;
#pragma unroll
    for (j = 0; j < GMM__CFG(wgmma_m); j++) {
        const int block = t->n0 + col0 + 64 * j, bytes = values.cols_dtype == GMM_F32 ? 4 : 2;
        const int c = (GMM__GLU ? gmm_sm90_glu_column(args->glu.block, block) : block) + gmm_wgmma_acc_m(w, lane, 0);
        cols0[j][0] = cols8[j][0] = 1.0f;
        if (!gmm_epilogue_reads_cols(step)) continue;
        gmm_read4(values.cols_dtype, values.cols + (int64_t)c * bytes, c < args->p.n, 0, cols0[j]);
        gmm_read4(values.cols_dtype, values.cols + (int64_t)(c + 8) * bytes, c + 8 < args->p.n, 0, cols8[j]);
    }
#pragma unroll
    for (u = 0; u < 8 * GMM__CFG(m16); u += 4) {
        const float row0 = __shfl_sync(0xFFFFFFFFu, rows[u / 16], gmm_wgmma_acc_n(lane, u % 16));
        const float row1 = __shfl_sync(0xFFFFFFFFu, rows[u / 16], gmm_wgmma_acc_n(lane, u % 16) + 1);
#pragma unroll
        for (j = 0; j < GMM__CFG(wgmma_m); j++) {
            acc[j][u] = gmm_epilogue_apply(step, acc[j][u], row0, cols0[j][0]);
            acc[j][u + 1] = gmm_epilogue_apply(step, acc[j][u + 1], row1, cols0[j][0]);
            acc[j][u + 2] = gmm_epilogue_apply(step, acc[j][u + 2], row0, cols8[j][0]);
            acc[j][u + 3] = gmm_epilogue_apply(step, acc[j][u + 3], row1, cols8[j][0]);
        }
    }
}

/* Stores a tile of wgrad's 16-bit D by TMA: slots hold its boxes. */
GMM__DEVICE void GMM__PART(gmm_sm90_store_boxes_16_)(const gmm_sm90_output *out, uint32_t *part,
                                                     const float acc[GMM__CFG(wgmma_m)][8 * GMM__CFG(m16)]) {
    const int tid = gmm_tid_x() & 127, lane = tid & 31, w = tid >> 5, row_blocks = out->tile->row_blocks;
    const uint32_t st_at = gmm_wgmma_stmatrix_at(out->slots_at, 128, w, lane);
    int u, j;
#pragma unroll
    for (u = 0; u < GMM__CFG(m16); u++) {
        if (u % 4 == 0) { /* rows past the end of D stay in the slot */
            if (u >= row_blocks) break;
            gmm_sm90_acquire_slot(out->bars, *part);
        }
#pragma unroll
        for (j = 0; j < GMM__CFG(wgmma_m); j++) {
            const float *const f = &acc[j][8 * u];
            gmm_stmatrix_x4_trans(st_at + *part % GMM_SM90_STORE_SLOTS * GMM__CFG(slot_bytes) + j * 8192 + u % 4 * 2048,
                                  gmm_pack2(GMM__DTYPE, f[0], f[1]), gmm_pack2(GMM__DTYPE, f[2], f[3]),
                                  gmm_pack2(GMM__DTYPE, f[4], f[5]), gmm_pack2(GMM__DTYPE, f[6], f[7]));
        }
        if (u % 4 == 3) gmm_sm90_commit_slot(out->bars, (*part)++);
    }
}

/* Stores a tile of wgrad's fp32 D by TMA: slots hold its boxes, and before that the old D if beta is not 0. */
GMM__DEVICE void GMM__PART(gmm_sm90_store_boxes_f32_)(const gmm_sm90_output *out, uint32_t *part,
                                                      float acc[GMM__CFG(wgmma_m)][8 * GMM__CFG(m16)]) {
    const int tid = gmm_tid_x() & 127, lane = tid & 31, w = tid >> 5, row_blocks = out->tile->row_blocks;
    const float beta = out->beta;
    /* address of the element of column lane / 4 and row 2 (lane % 4); the swizzle makes steps of 8 columns and of 1
       row an XOR of this address */
    const uint32_t to = out->slots_at + w / 2 * 8192 + lane % 4 * 256 + lane / 4 % 4 * 4 +
                        (((w % 2 * 4 + lane / 16) ^ (lane % 4 * 2)) << 4);
    int u, j, e;
#pragma unroll
    for (j = 0; j < GMM__CFG(wgmma_m); j++) {
        if (out->col0 + 64 * j >= out->tile->cols) break;
#pragma unroll
        for (u = 0; u < 2 * GMM__CFG(m16); u++) {
            const uint32_t slot_offset = *part % GMM_SM90_STORE_SLOTS * GMM__CFG(slot_bytes) + u % 8 * 1024;
            float old[4];
            if (u % 8 == 0) {
                if (u >= 2 * row_blocks) break;
                gmm_sm90_acquire_slot(out->bars, *part);
            }
            if (beta != 0.0f) {
#pragma unroll
                for (e = 0; e < 4; e++) old[e] = gmm_ld_shared_f32((to ^ (e / 2 * 32 + e % 2 * 144)) + slot_offset);
#pragma unroll
                for (e = 0; e < 4; e++) acc[j][4 * u + e] = __fmaf_rn(beta, old[e], acc[j][4 * u + e]);
            }
#pragma unroll
            for (e = 0; e < 4; e++)
                gmm_st_shared_f32((to ^ (e / 2 * 32 + e % 2 * 144)) + slot_offset, acc[j][4 * u + e]);
            if (u % 8 == 7) gmm_sm90_commit_slot(out->bars, (*part)++);
        }
    }
}

/* Stores a tile of 16-bit D by the threads: slots hold [row][column]. */
GMM__DEVICE void GMM__PART(gmm_sm90_store_rows_16_)(const gmm_sm90_output *out, uint32_t *part,
                                                    const float acc[GMM__CFG(wgmma_m)][8 * GMM__CFG(m16)]) {
    const gmm_sm90_tile *const t = out->tile;
    /* computed here, so that the mainloop has their registers */
    const int tid = gmm_tid_x() & 127, lane = tid & 31, w = tid >> 5;
    const int row_blocks = t->row_blocks, row_bytes = 128 * GMM__CFG(wgmma_m);
    const int chunk = tid % (8 * GMM__CFG(wgmma_m)), slot_row = tid / (8 * GMM__CFG(wgmma_m));
    const int cols = t->cols - out->col0, cols_left = cols - 8 * chunk;
    const int vectorized = gmm_sm90_d_aligned(out) && (cols >= 64 * GMM__CFG(wgmma_m) || cols % 8 == 0);
    const int rows_left = cols_left > 0 ? t->rows - slot_row : 0;
    const uint32_t st_at = gmm_wgmma_stmatrix_at((uint32_t)__cvta_generic_to_shared(out->slots), row_bytes, w, lane);
    const char *const ld_at = out->slots + slot_row * row_bytes + ((chunk ^ (slot_row & 7)) << 4);
    const int64_t pitch = out->pitch;
    char *to = out->d + slot_row * pitch + (t->n0 + out->col0 + 8 * chunk) * 2;
    int u, x, j, e;
#pragma unroll
    for (u = 0; u < GMM__CFG(m16); u += GMM__CFG(store_blocks) / GMM__CFG(wgmma_m)) {
        const int slot = (*part & 1) * GMM__CFG(slot_bytes);
        uint4 v[GMM__CFG(store_blocks)];
        if (u >= row_blocks) break;
        (*part)++;
#pragma unroll
        for (x = 0; x < GMM__CFG(store_blocks) / GMM__CFG(wgmma_m); x++)
#pragma unroll
            for (j = 0; j < GMM__CFG(wgmma_m); j++)
                if (u + x < GMM__CFG(m16)) {
                    const float *const f = &acc[j][8 * (u + x)];
                    gmm_stmatrix_x4_trans(st_at + slot + x * 16 * row_bytes + 128 * j,
                                          gmm_pack2(GMM__DTYPE, f[0], f[1]), gmm_pack2(GMM__DTYPE, f[2], f[3]),
                                          gmm_pack2(GMM__DTYPE, f[4], f[5]), gmm_pack2(GMM__DTYPE, f[6], f[7]));
                }
        gmm_consumer_sync(out->wg);
        if (vectorized) {
#pragma unroll
            for (x = 0; x < GMM__CFG(store_blocks); x++) v[x] = *(const uint4 *)(ld_at + slot + x * 2048);
#pragma unroll
            for (x = 0; x < GMM__CFG(store_blocks); x++, to += 16 / GMM__CFG(wgmma_m) * pitch)
                if (16 * u + 16 / GMM__CFG(wgmma_m) * x < rows_left) *(uint4 *)to = v[x];
        } else {
#pragma unroll 1
            for (x = 0; x < GMM__CFG(store_blocks); x++, to += 16 / GMM__CFG(wgmma_m) * pitch)
#pragma unroll 1
                for (e = 0; e < 8 && e < cols_left && 16 * u + 16 / GMM__CFG(wgmma_m) * x < rows_left; e++)
                    ((uint16_t *)to)[e] = ((const uint16_t *)(ld_at + slot + x * 2048))[e];
        }
    }
}

/* Writes part number `part` of the warp group's fp32 sums to a slot. Parts of GMM__ROWS_PER_STORE rows and 64 columns
   are numbered along the rows, then along the columns. `to`: the thread's address in the slot for its first row and
   column 0. */
GMM__DEVICE void GMM__PART(gmm_sm90_write_sums_)(int part, char *to, int lane, int w,
                                                 const float acc[GMM__CFG(wgmma_m)][8 * GMM__CFG(m16)]) {
    const int column4 = w * 4 + lane / 16; /* the thread's columns in units of 4 */
    int p, x, e;
#pragma unroll
    for (p = 0; p < GMM__CFG(wgmma_m) * GMM__PARTS_PER_COLUMN; p++) {
        const int j = p / GMM__PARTS_PER_COLUMN, u = p % GMM__PARTS_PER_COLUMN * (GMM__ROWS_PER_STORE / 16);
        if (p != part) continue; /* accumulators are indexed by constants alone */
#pragma unroll
        for (x = 0; x < GMM__ROWS_PER_STORE / 16; x++)
            if (u + x < GMM__CFG(m16)) {
#pragma unroll
                for (e = 0; e < 8; e++)
                    *(float *)(to + x * 4096 + e / 4 * 2048 + e % 2 * 256 +
                               (((column4 + e / 2 % 2 * 2) ^ (lane % 4 * 2)) << 4)) = acc[j][8 * (u + x) + e];
            }
    }
}

/* Stores a tile of D of any dtype and alignment by the threads: slots hold fp32 sums. Two slots alternate, since the
   last one may still be read; wgrad halves one slot. The loop over parts is not unrolled, since ptxas takes two to
   seven times as long for a kernel where it is. For packed weights it is, by three: otherwise, or by six or all parts,
   their mainloops are 1 to 7% slower. */
GMM__DEVICE void GMM__PART(gmm_sm90_store_any_)(const gmm_sm90_output *out, uint32_t *part,
                                                const float acc[GMM__CFG(wgmma_m)][8 * GMM__CFG(m16)]) {
    enum { PARTS = GMM__CFG(wgmma_m) * GMM__PARTS_PER_COLUMN, UNROLL = GMM__CFG(b_format) ? 3 : 1 };
    const gmm_sm90_tile *const t = out->tile;
    const int size = out->size;
    const float beta = out->beta;
    const int64_t pitch = out->pitch;
    uint32_t next_part = *part;
    int p, x, e;
    if (GMM__DEFERRED) { /* waits for deferred stores that still read the slots */
        if ((threadIdx.x & 127) == 0) GMM__BULK_WAIT_GROUP_READ(0);
        gmm_consumer_sync(out->wg);
    }
    if (GMM__K_GROUPED) gmm_sm90_acquire_slot(out->bars, *part);
#pragma unroll UNROLL
    for (p = 0; p < PARTS; p++) {
        /* read anew for each part: values that lived on would take registers */
        const int tid = gmm_tid_x() & 127, lane = tid & 31, w = tid >> 5, rows_left = t->rows - tid / 16;
        const int c0 = out->col0 + p / GMM__PARTS_PER_COLUMN * 64;
        const int row = p % GMM__PARTS_PER_COLUMN * GMM__ROWS_PER_STORE; /* the part's first */
        const int vectorized = gmm_sm90_d_aligned(out) && t->cols - c0 >= 64;
        const int slot = (next_part & 1) * (GMM__CFG(slot_bytes) >> GMM__K_GROUPED);
        const char *const ld_at = out->slots + slot + tid / 16 * 256 + (((tid % 16) ^ (tid / 32 % 4 * 2)) << 4);
        char *to = out->d + (row + tid / 16) * pitch + (t->n0 + c0 + 4 * (tid % 16)) * size;
        uint4 old[GMM__ROWS_PER_STORE / 8]; /* old D: all loads are issued first */
        if (row >= 16 * t->row_blocks || c0 >= t->cols) continue;
        next_part++;
#pragma unroll
        for (x = 0; x < GMM__ROWS_PER_STORE / 8; x++) {
            old[x] = make_uint4(0, 0, 0, 0);
            if (vectorized && beta != 0.0f && !GMM__K_GROUPED && row + 8 * x < rows_left)
                old[x] = gmm_sm90_d_load4(size, to + 8 * x * pitch);
        }
        GMM__PART(gmm_sm90_write_sums_)(p, out->slots + slot + lane % 4 * 512 + lane / 4 % 4 * 4, lane, w, acc);
        gmm_consumer_sync(out->wg);
        if (vectorized) {
#pragma unroll
            for (x = 0; x < GMM__ROWS_PER_STORE / 8; x++, to += 8 * pitch) {
                const float4 f = *(const float4 *)(ld_at + x * 2048);
                float v[4];
                v[0] = f.x; v[1] = f.y; v[2] = f.z; v[3] = f.w;
                if (GMM__K_GROUPED && beta != 0.0f && row + 8 * x < rows_left) old[x] = gmm_sm90_d_load4(size, to);
                if (beta != 0.0f)
#pragma unroll
                    for (e = 0; e < 4; e++)
                        v[e] = __fmaf_rn(beta, gmm_sm90_d_value(out->p->d.dtype, &old[x], e), v[e]);
                if (row + 8 * x < rows_left) gmm_write4(out->p->d.dtype, to, 4, 1, v);
            }
        } else {
#pragma unroll 1
            for (x = 0; x < GMM__ROWS_PER_STORE / 8; x++, to += 8 * pitch)
#pragma unroll 1
                for (e = 0; e < 4 && e < t->cols - c0 - 4 * (tid % 16) && row + 8 * x < rows_left; e++) {
                    float v[4], stored[4];
                    v[0] = ((const float *)(ld_at + x * 2048))[e];
                    gmm_read4(out->p->d.dtype, to + e * size, beta != 0.0f, 0, stored);
                    if (beta != 0.0f) v[0] = __fmaf_rn(beta, stored[0], v[0]);
                    gmm_write4(out->p->d.dtype, to + e * size, 1, 0, v);
                }
        }
    }
    if (GMM__K_GROUPED)
        for (next_part = gmm_sm90_d_parts(t, size); next_part > 0; next_part--, (*part)++) {
            gmm_sm90_acquire_slot(out->bars, *part);
            gmm_sm90_commit_slot(out->bars, *part);
        }
    else *part = next_part;
}

#if !GMM__GLU && !GMM__DGLU
/* Stores a tile of D as D admits. With a deferred store, D becomes `deferred`, and store->pending says how much of it
   the next tile's mainloop has to store. */
GMM__DEVICE void GMM__PART(gmm_sm90_store_d_)(const gmm_sm90_output *out, gmm_sm90_store_state *store,
                                              uint32_t deferred[GMM__DEFERRED_WORDS],
                                              float acc[GMM__CFG(wgmma_m)][8 * GMM__CFG(m16)]) {
    const gmm_sm90_tile *const t = out->tile;
    const int size = out->size, by_tma = GMM__K_GROUPED && gmm_sm90_d_by_tma(out->p, t->g, out->beta);
    int u;
    if (by_tma && size == 2) GMM__PART(gmm_sm90_store_boxes_16_)(out, &store->part, acc);
    else if (GMM__DEFERRED && size == 2 && out->beta == 0.0f) {
#pragma unroll
        for (u = 0; u < GMM__DEFERRED_WORDS; u++)
            deferred[u] = gmm_pack2(GMM__DTYPE, acc[0][2 * u], acc[0][2 * u + 1]);
        store->pending = t->row_blocks;
    } else if (!GMM__K_GROUPED && !GMM__DEFERRED && size == 2 && out->beta == 0.0f)
        GMM__PART(gmm_sm90_store_rows_16_)(out, &store->part, acc);
    else if (by_tma) GMM__PART(gmm_sm90_store_boxes_f32_)(out, &store->part, acc);
    else GMM__PART(gmm_sm90_store_any_)(out, &store->part, acc);
}
#endif

/* The epilogue of a tile: alpha, the steps, and the store. `first`: of the CTA. */
GMM__DEVICE void GMM__PART(gmm_sm90_store_tile_)(const GMM__ARGS *args, gmm_sm90_output *out, int first,
                                                 gmm_sm90_store_state *store, uint32_t deferred[GMM__DEFERRED_WORDS],
                                                 float acc[GMM__CFG(wgmma_m)][8 * GMM__CFG(m16)]) {
    const gmm_sm90_tile *const t = out->tile;
    GMM__PART(gmm_sm90_scale_accumulators_)(args, t, acc);
#define GMM__X(name, rows, cols) \
    if (!GMM__K_GROUPED && gmm_epilogue_present(GMM_EPILOGUE_##name, &args->p)) \
        GMM__PART(gmm_sm90_apply_step_)(GMM_EPILOGUE_##name, args, t, out->col0, acc);
    GMM_EPILOGUE_STEP_LIST(GMM__X)
#undef GMM__X
    out->beta = gmm_gemm_beta(&args->p, t->g);
    out->p = &args->p;
    out->d = gmm_kmat_data(&args->p.d, t->g) + (t->m0 + (GMM__K_GROUPED ? 0 : (int64_t)t->row)) * out->pitch;
    if (GMM__K_GROUPED && !first) gmm_order_wait(out->wg); /* slots are used in the order of tiles */
#if GMM__GLU
    (void)deferred;
    GMM__PART(gmm_sm90_store_glu_)(args, out, &store->part, acc);
#elif GMM__DGLU
    (void)deferred;
    GMM__PART(gmm_sm90_store_dglu_)(args, out, &store->part, acc);
#else
    GMM__PART(gmm_sm90_store_d_)(out, store, deferred, acc);
#endif
    if (GMM__K_GROUPED) gmm_order_arrive(out->wg ^ 1);
}
#endif
/* GMM__BODY_PRODUCT, continued: the consumer warp groups. */
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
/* Multiplies a tile: the mainloop for its rows, which are a constant of wgmma. */
GMM__DEVICE void GMM__PART(gmm_sm90_multiply_)(const gmm_sm90_tile *t, const volatile int32_t *small_m,
                                               float acc[GMM__CFG(wgmma_m)][8 * GMM__CFG(m16)],
                                               const gmm_sm90_operands *operands, uint32_t last_stage_full,
                                               gmm_sm90_pipeline *pipe, gmm_sm90_store_state *store,
                                               const uint32_t deferred[GMM__DEFERRED_WORDS]) {
    int j, u;
#pragma unroll
    for (j = 0; j < (GMM__ZERO_INIT ? 0 : GMM__CFG(wgmma_m)); j++)
#pragma unroll
        for (u = 0; u < 8 * GMM__CFG(m16); u++) acc[j][u] = 0.0f;
    switch (GMM__K_GROUPED ? (t->rows + 63) / 64 * 8 : gmm_sm90_wgmma_n8(t->rows)) {
#define GMM__MAINLOOP(n8, small_m) \
    GMM__PART(gmm_sm90_mainloop_)(n8, small_m, acc, operands, last_stage_full, pipe, store, deferred)
#define GMM__PACKED_MAINLOOP(m16) \
    gmm_sm90_packed_mainloop(GMM__CFG(b_format), m16, acc[0], operands->k_tiles, operands->packed_at, \
                             operands->scales_at, operands->desc_a, pipe)
/* in branches that are never reached, the arguments fall back to a size that the accumulators have */
#define GMM__X(n8, u, n, b, a, c) \
        case n8: \
            if (n8 <= 2 * GMM__CFG(m16) && GMM__CFG(b_format)) { \
                GMM__PACKED_MAINLOOP(n8 <= 2 * GMM__CFG(m16) ? (n8 + 1) / 2 : 1); \
            } else if (GMM__HAS_N8(n8) && 8 * n8 <= GMM__SMALL_M(GMM__CFG(tile_n)) && *small_m) \
                GMM__MAINLOOP(GMM__HAS_N8(n8) ? n8 : 2, 1); \
            else if (GMM__HAS_N8(n8)) GMM__MAINLOOP(GMM__HAS_N8(n8) ? n8 : 2, 0); \
            break;
    GMM_WGMMA_LIST(GMM__X)
#undef GMM__X
#undef GMM__PACKED_MAINLOOP
#undef GMM__MAINLOOP
    default: break;
    }
#pragma unroll
    for (j = 0; j < GMM__CFG(wgmma_m); j++)
#pragma unroll
        for (u = 0; u < 8 * GMM__CFG(m16); u++) GMM__PIN_F32(acc[j][u]);
}

/* Skips a tile of which the warp group has no columns: releases its stages unread, and in wgrad keeps the order of the
   tiles' stores. `first`: of the CTA. */
GMM__DEVICE void GMM__PART(gmm_sm90_skip_tile_)(uint32_t k_tiles, uint32_t bars, int wg, int first,
                                                gmm_sm90_pipeline *pipe) {
    gmm_sm90_skip_stages(k_tiles, pipe);
    if (GMM__CFG(consumers) == 1 && (threadIdx.x & 31) == 0) gmm_mbarrier_arrive(gmm_sm90_last_stage_full(bars, wg));
    if (GMM__K_GROUPED) {
        if (!first) gmm_order_wait(wg);
        gmm_order_arrive(wg ^ 1);
    }
}

/* A consumer warp group: mainloop, then epilogue, for every tile of the ring. */
GMM__DEVICE void GMM__PART(gmm_sm90_consume_tiles_)(const GMM__ARGS &args, GMM__SMEM *smem, const uint32_t base) {
    const gmm_sm90_tile *const ring = smem->ring.tile;
    const uint32_t stage_bars = GMM__SMEM_AT(stage_bars), bars = GMM__SMEM_AT(bars);
    const int lane = (int)threadIdx.x & 31, w = (int)threadIdx.x >> 5 & 3;
    const int size = gmm_kmat_size(&args.p.d);
    const int64_t pitch = args.p.d.ld * size;
    float acc[GMM__CFG(wgmma_m)][8 * GMM__CFG(m16)];
    gmm_sm90_pipeline pipe = { stage_bars, GMM__CFG(stages), GMM__CFG(stage_bytes), 1, 0 };
    gmm_sm90_store_state store = { &args, ring, 0, smem->slot[0], 0, 0 };
    uint32_t tile_index = 0, deferred[GMM__DEFERRED_WORDS];
    int u;
#pragma unroll
    for (u = 0; u < GMM__DEFERRED_WORDS; u++) deferred[u] = 0;
    for (;; tile_index++) {
        const gmm_sm90_tile *const t = &ring[tile_index % GMM_SM90_TILE_RING];
        /* recomputed for every tile: a value that lived on would take a register from the epilogue */
        const int wg = __shfl_sync(0xFFFFFFFFu, gmm_tid_x() >> 7, 0);
        /* first column of the warp group in the tile */
        const int col0 = GMM__CFG(consumers) == 1 ? 0 : 64 * GMM__CFG(wgmma_m) * wg;
        uint32_t stage0 = base;
        gmm_sm90_operands operands;
        gmm_sm90_output out;
        store.tile = &ring[(tile_index - 1) % GMM_SM90_TILE_RING];
        store.wg = wg;
        store.slots = GMM__STORE_SLOT(wg, store.part);
        __syncwarp();
        /* a deferred store still reads the previous tile */
        if (lane == 0) gmm_sm90_release_batch(bars, tile_index - (GMM__DEFERRED != 0));
        gmm_sm90_wait_tile(bars, tile_index);
        if (GMM__DEFERRED && store.pending > 0 && t->row_blocks == 0 && args.d_by_tma)
            GMM__PART(gmm_sm90_store_last_)(&store, base, deferred);
        while (GMM__DEFERRED && store.pending > 0 && t->cols <= col0) /* no mainloop follows that could store them */
            GMM__PART(gmm_sm90_store_deferred_)(&store, deferred);
        if (t->row_blocks == 0) {
            if (GMM__K_GROUPED && tile_index > 0 && (int)(tile_index & 1) == wg) gmm_order_wait(wg);
            break;
        }
        operands.k_tiles = gmm_sm90_k_tiles(t->k);
        pipe.cluster_size = gmm_cluster_nctarank(); /* re-read, for the same reason */
        if (GMM__CFG(consumers) == 1 && (int)(tile_index & 1) != wg) { /* a tile of the other warp group */
            pipe.iter += operands.k_tiles;
            if (GMM__K_GROUPED) store.part += gmm_sm90_d_parts(t, size);
            continue;
        }
        /* A parity only distinguishes a phase from the previous one, and this warp group has not waited for the stages
           of the other one's tile: it must wait until the last of them is full. */
        if (GMM__CFG(consumers) == 1 && tile_index > 0)
            gmm_mbarrier_wait(gmm_sm90_last_stage_full(bars, wg ^ 1), (tile_index - 1) / 2 & 1);
        if (t->cols <= col0) {
            GMM__PART(gmm_sm90_skip_tile_)(operands.k_tiles, bars, wg, tile_index == 0, &pipe);
            continue;
        }
        /* the pinned value keeps the compiler from computing the descriptors before the loop, for the same reason */
        if (!GMM__CFG(b_format)) GMM__PIN_U32(stage0);
        operands.desc_b = gmm_wgmma_desc(stage0 + 128 * col0, GMM__TB);
        operands.desc_a = gmm_wgmma_desc(stage0 + GMM__CFG(a_offset), GMM__TA);
        operands.packed_at = base + GMM__CFG(box_width) * (uint32_t)(col0 + 16 * w); /* in bytes, as packed maps */
        operands.scales_at = base + GMM__CFG(scales_offset) + 4 * (uint32_t)(col0 + 16 * w);
        GMM__PART(gmm_sm90_multiply_)(t, &smem->ring.small_m, acc, &operands, gmm_sm90_last_stage_full(bars, wg),
                                      &pipe, &store, deferred);
        while (GMM__DEFERRED && store.pending > 0)
            GMM__PART(gmm_sm90_store_deferred_)(&store, deferred);
#pragma unroll
        for (u = 0; u < GMM__DEFERRED_WORDS; u++) deferred[u] = 0; /* ends the live range of the stored words */
        out.tile = t;
        out.wg = wg;
        out.col0 = col0;
        out.size = size;
        out.pitch = pitch;
        out.slots = store.slots;
        out.slots_at = GMM__SMEM_AT(slot);
        out.bars = bars;
        GMM__PART(gmm_sm90_store_tile_)(&args, &out, tile_index == 0, &store, deferred, acc);
    }
    if (GMM__DEFERRED && (threadIdx.x & 127) == 0) GMM__BULK_WAIT_GROUP(0);
}
#endif
/* GMM__BODY_PRODUCT, continued: the scheduler warp and the producer warp. */
#if GMM__TILES > 0 && defined(__CUDA_ARCH_FEAT_SM90_ALL)
/* Reads the split, chooses the tile for it, and writes the tables of groups. */
GMM__DEVICE void GMM__PART(gmm_sm90_plan_split_)(const GMM__ARGS &args, GMM__SMEM *smem, gmm_sm90_scheduler *s) {
    const gmm_sm90_tile_shape shape = { GMM__CFG(tile_n), GMM__CFG(m16) };
    const gmm_sm90_tile_shape second_shape = { GMM__SECOND_CFG(tile_n), GMM__SECOND_CFG(m16) };
    const gmm_sm90_split_stats stats = gmm_sm90_read_split(&args.groups, s->ends);
    /* no group has more than 64 rows; or none has more than 128, and the mean of those with rows is at least 3/4 of the
       largest */
    if ((threadIdx.x & 31) == 0)
        smem->ring.small_m = stats.max_rows <= GMM_SM90_SMALL_M / 2 ||
                             (stats.max_rows <= GMM_SM90_SMALL_M &&
                              4 * s->ends[args.p.groups] >= 3 * stats.max_rows * stats.nonempty);
    s->max_blocks = GMM__K_GROUPED ? GMM__CFG(m16)
                                   : gmm_sm90_choose_tile(s, stats, GMM__TILE_CHOICE,
                                                          GMM__CFG(consumers) == 2 && !GMM__CFG(b_format), shape,
                                                          second_shape, &smem->ring.second_tile);
    __syncwarp();
    /* divisions by constants: a division by a variable would delay the first tile */
    s->tiles_n = GMM__CFG_OF(smem->ring.second_tile, tile_n) == 256   ? (args.p.n + 255) / 256
                 : GMM__CFG_OF(smem->ring.second_tile, tile_n) == 128 ? (args.p.n + 127) / 128
                                                                   : (args.p.n + GMM__CFG(tile_n) - 1) /
                                                                         GMM__CFG(tile_n);
    if (!GMM__K_GROUPED)
        s->tiles_n = gmm_sm90_tiles_n(&args.p, s->tiles_n, GMM__COL_ALIGN, 16 * s->max_blocks,
                                      (int32_t)gmm_cluster_nctarank(), stats);
    s->cluster_along_n = GMM__CFG_OF(smem->ring.second_tile, tile_n) == 128;
    if (!GMM__K_GROUPED ||
        !gmm_sm90_plan_balance(s, stats, args.tables ? 0 : (int32_t)GMM_SM90_SMEM_GROUPS,
                               gmm_sm90_d_stages(&args.p), (gmm_sm90_balance *)(void *)smem->work_ends, smem->ends))
        gmm_sm90_count_work(s, (int32_t)gmm_cluster_nctarank());
    s->g = 0;
}

/* The scheduler warp writes batches of tiles to the ring, one tile per lane. Its first pass is early where that is
   allowed: it plans the first tile by the split as read before griddepcontrol.wait. If the split is the same after it,
   gmm_sm90_check_split publishes that tile; else the second pass plans anew. */
GMM__DEVICE void GMM__PART(gmm_sm90_schedule_tiles_)(const GMM__ARGS &args, GMM__SMEM *smem, uint32_t base) {
    gmm_sm90_tile *const ring = smem->ring.tile;
    const int32_t *const second_tile = &smem->ring.second_tile;
    const uint32_t bars = GMM__SMEM_AT(bars), cluster_size = gmm_cluster_nctarank();
    const int lane = (int)threadIdx.x & 31;
    int32_t *const ends = args.tables ? args.tables + (int64_t)blockIdx.x * 2 * (args.p.groups + 1) : smem->ends;
    int32_t *const work_ends = ends + args.p.groups + 1;
    gmm_sm90_balance *const balance = (gmm_sm90_balance *)(void *)smem->work_ends;
    gmm_sm90_scheduler s = { &args.p, ends, work_ends, /* padded_starts */ NULL, /* k_grouped */ GMM__K_GROUPED,
                             /* cluster_along_n, tiles_n, max_blocks, odd_tiles, g, balanced */ 0, 0, 0, 0, 0, 0,
                             /* block_rows */ 16, /* row_align */ GMM__ROW_ALIGN,
                             /* col_align */ GMM__COL_ALIGN };
    int32_t batch;
    int early = gmm_sm90_plans_early(&args.p, args.tables, GMM__K_GROUPED);
    uint32_t tile_index;
    if (!early) gmm_cluster_wait_acquire();
    for (tile_index = 0;; tile_index += (uint32_t)batch) {
        const int32_t stride = (int32_t)(gridDim.x >> (cluster_size - 1));
        gmm_sm90_tile *const tile = &ring[(tile_index + (uint32_t)lane) % GMM_SM90_TILE_RING];
        int unchanged = 0;
        batch = tile_index == 0 ? 1 : tile_index == 1 ? GMM_SM90_TILE_BATCH - 1 : GMM_SM90_TILE_BATCH;
        if (tile_index == 0) {
            if (!early) {
                if (s.max_blocks > 0) { /* has been planned early */
                    gmm_mbarrier_wait(gmm_sm90_split_checked(bars), 0);
                    unchanged = !*(volatile int32_t *)&smem->ring.planned_late;
                } else if (lane == 0) smem->ring.planned_late = 1;
                gmm_griddepcontrol_wait();
            }
            if (!unchanged) GMM__PART(gmm_sm90_plan_split_)(args, smem, &s);
        }
        if (!unchanged) {
            int32_t work = gmm_sm90_work_number(blockIdx.x, cluster_size, tile_index, stride), lane_work = -1, n;
            gmm_sm90_tile f = GMM_ZERO;
            if (tile_index >= GMM_SM90_TILE_RING)
                gmm_mbarrier_wait(gmm_sm90_batch_empty(bars, tile_index / GMM_SM90_TILE_BATCH),
                                  (tile_index / GMM_SM90_TILE_RING & 1) ^ 1);
            for (n = 0; n < batch; n++, work += stride) {
                int32_t in_group = -1; /* number of the tile in its group; -1: there is none */
                if (GMM__K_GROUPED && s.balanced)
                    s.g = gmm_sm90_balanced_tile(balance, smem->ends, &args.p, (int32_t)tile_index + n, &in_group);
                else {
                    gmm_find_group32(work_ends, args.p.groups, work, &s.g);
                    if (s.g < args.p.groups) in_group = work - work_ends[s.g];
                }
                if (lane == n && in_group >= 0) lane_work = in_group, f.g = s.g;
            }
            if (lane < batch) {
                if (lane_work >= 0) { /* else all is 0, which ends the ring */
                    const int balanced = GMM__K_GROUPED && s.balanced;
                    const int32_t group_work = balanced ? 0 : work_ends[f.g + 1] - work_ends[f.g];
                    const int rotation =
                        !GMM__K_GROUPED ? GMM_SM90_ROTATE_TILES
                                        : gmm_sm90_wgrad_rotation(stride, group_work,
                                                                  gmm_sm90_tile_count(args.p.m, 16, GMM__CFG(m16)));
                    gmm_sm90_schedule_tile(&s, GMM__CFG_OF(*second_tile, tile_n) == 128, group_work, lane_work,
                                           rotation, gmm_sm90_this_cta(), &f);
                }
                *tile = f;
            }
            __syncwarp();
        }
        if (early) {
            gmm_cluster_wait_acquire(); /* the barriers are initialised */
            if (lane == 0) gmm_mbarrier_arrive(gmm_sm90_first_tile_planned(bars));
            early = batch = 0; /* the next pass begins at tile 0 again */
        } else {
            if (lane < batch && !unchanged) gmm_mbarrier_arrive(gmm_sm90_tile_full(bars, tile_index + (uint32_t)lane));
            if (__any_sync(0xFFFFFFFFu, lane < batch && tile->row_blocks == 0)) break;
        }
    }
    if (blockIdx.x == 0) gmm_sm90_report_faults(&args.groups, &args.p, ends);
}

/* Waits until stage number `iter` is empty, and lets its full barrier count `bytes`. */
GMM__DEVICE gmm_sm90_load GMM__PART(gmm_sm90_begin_stage_)(uint32_t base, uint32_t iter, uint32_t bytes, int32_t k,
                                                           uint32_t stage_bytes) {
    const uint32_t stage_bars = GMM__SMEM_AT(stage_bars), s = iter % GMM__CFG(stages);
    const gmm_sm90_load stage = { base + s * stage_bytes, gmm_sm90_full(stage_bars, s), k };
    gmm_mbarrier_wait(gmm_sm90_empty(stage_bars, s), (iter / GMM__CFG(stages) & 1) ^ 1);
    gmm_mbarrier_arrive_expect_tx(stage.full, bytes);
    return stage;
}

/* The producer, one thread: coordinates pass to TMA without a loop over lanes. What it loads of the first tile is
   determined before griddepcontrol.wait where that tile is planned early. While it reads the tile, the scheduler may
   already write it anew; then planned_late is set, and everything is determined again. */
GMM__DEVICE void GMM__PART(gmm_sm90_load_stages_)(const GMM__ARGS &args, GMM__SMEM *smem, uint32_t base) {
    enum { A_BOXES = (GMM__MAX_CFG(m16) + (GMM__TA ? 3 : 0)) / 4, B_BOXES = GMM__MAX_CFG(tile_n) / 64 };
    const gmm_sm90_tile *const ring = smem->ring.tile;
    const volatile int32_t *const second_tile = &smem->ring.second_tile, *const small_m = &smem->ring.small_m,
                                 *const planned_late = &smem->ring.planned_late;
    const uint32_t stage_bars = GMM__SMEM_AT(stage_bars), bars = GMM__SMEM_AT(bars);
    const uint32_t of_cta = gmm_cluster_ctarank() ? 0xAAAAAAAAu : 0x55555555u; /* its half of a multicast operand */
    const int32_t glu_block = GMM__GLU ? args.glu.block : 0;
    gmm_sm90_operand a = { GMM__TA, GMM_SM90_BOX_BYTES, 0, 64, 0, 0, 0, 0, 0, 0, 0 };
    gmm_sm90_operand b = { GMM__TB, GMM__CFG(b_block_bytes), glu_block, max(glu_block, 64), 0, 0, 0, 0, 0, 0, 0 };
    uint32_t iter = 0, k_tiles = 0, bytes = 0, stage_bytes = 0, a_offset = 0, tile_index, i;
    int early = gmm_sm90_plans_early(&args.p, args.tables, GMM__K_GROUPED), two_at_once = 0;
    int32_t k = 0;
    if (!early) gmm_griddepcontrol_wait();
    for (tile_index = 0;; tile_index += !early, early = 0) {
        const gmm_sm90_tile *const t = &ring[tile_index % GMM_SM90_TILE_RING];
        if (early) gmm_mbarrier_wait(gmm_sm90_first_tile_planned(bars), 0);
        else {
            gmm_sm90_release_batch(bars, tile_index);
            gmm_sm90_wait_tile(bars, tile_index);
            if (t->row_blocks == 0) break;
        }
        if (early || tile_index > 0 || *planned_late) {
            k_tiles = gmm_sm90_k_tiles(t->k);
            k = GMM__K_GROUPED ? GMM_SM90_RAGGED_ROWS - t->k : 0;
            stage_bytes = (uint32_t)GMM__CFG_OF(*second_tile, stage_bytes);
            a_offset = (uint32_t)GMM__CFG_OF(*second_tile, a_offset);
            bytes = GMM__CFG(gather) ? 0 : GMM__TA ? (uint32_t)(t->row_blocks + 3) / 4 * 8192
                                                   : (uint32_t)t->row_blocks * 2048;
            bytes += (uint32_t)gmm_sm90_b_boxes(t) * GMM__CFG(b_block_bytes);
            if (t->cols <= 0) bytes = 0;
            two_at_once = GMM__SMALL_M(GMM__CFG_OF(*second_tile, tile_n)) && *small_m;
            if (early && args.p.b.table) gmm_griddepcontrol_wait(); /* an earlier kernel may write the table */
            gmm_sm90_assign_a(t, GMM__K_GROUPED, of_cta, &a);
            gmm_sm90_assign_b(&args.p, t, GMM__K_GROUPED, of_cta, &b);
        }
        if (early) {
            gmm_griddepcontrol_wait();
            continue;
        }
        for (; GMM__SMALL_M(GMM__MAX_CFG(tile_n)) && two_at_once && k_tiles > 1; k_tiles -= 2, iter += 2, k += 128) {
            gmm_sm90_load stages[2];
#pragma unroll
            for (i = 0; i < 2; i++)
                stages[i] = GMM__PART(gmm_sm90_begin_stage_)(base, iter + i, bytes, k + 64 * (int32_t)i, stage_bytes);
            gmm_sm90_load_operand_twice(&b, &args.b, 64, stages);
#pragma unroll
            for (i = 0; i < 2; i++) stages[i].at += a_offset;
            gmm_sm90_load_operand_twice(&a, &args.a, 64, stages);
            gmm_sm90_load_operand_twice(&a, &args.a16, 16, stages);
        }
        for (; k_tiles > 0; k_tiles--, iter++, k += 64) {
            gmm_sm90_load stage = GMM__PART(gmm_sm90_begin_stage_)(base, iter, bytes, k, stage_bytes);
            if (GMM__CFG(b_format)) stage.k = k / 64 * GMM__CFG(box_width);
            gmm_sm90_load_operand(&b, &args.b, 64, B_BOXES, &stage);
            if (GMM__CFG(gather)) continue; /* gather warps load A */
            stage.k = k;
            stage.at += a_offset;
            gmm_sm90_load_operand(&a, &args.a, 64, A_BOXES, &stage);
            if (!GMM__TA) gmm_sm90_load_operand(&a, &args.a16, 16, 3, &stage);
        }
    }
    /* shared memory must exist until the other CTA of the cluster has arrived at these barriers for the last
       time */
    for (i = 0; i < GMM__CFG(stages); i++, iter++)
        gmm_mbarrier_wait(gmm_sm90_empty(stage_bars, iter % GMM__CFG(stages)),
                          (iter / GMM__CFG(stages) & 1) ^ 1);
}
#endif
/* GMM__BODY_PRODUCT, continued: initialization of the barriers, and the kernel. */
#if GMM__TILES > 0
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
/* Initializes the mbarriers. One thread. */
GMM__DEVICE void GMM__PART(gmm_sm90_init_barriers_)(uint32_t stage_bars, uint32_t bars, uint32_t cluster_size) {
    uint32_t i;
#pragma unroll
    for (i = 0; i < GMM__CFG(stages); i++) {
        /* full: the producer, and the lanes of the scale loader or of the warps that gather */
        gmm_mbarrier_init(gmm_sm90_full(stage_bars, i),
                          1 + (GMM__CFG(b_format) ? 32 : 0) + 32 * GMM__CFG(gather_warps));
        /* empty: consumer warps of the CTAs that read the stage */
        gmm_mbarrier_init(gmm_sm90_empty(stage_bars, i), 4 * GMM__CFG(consumers) * cluster_size);
    }
#pragma unroll
    for (i = 0; i < GMM_SM90_TILE_RING; i++) gmm_mbarrier_init(gmm_sm90_tile_full(bars, i), 1);
    gmm_mbarrier_init(gmm_sm90_first_tile_planned(bars), 1);
    gmm_mbarrier_init(gmm_sm90_split_checked(bars), 1);
    /* readers of the ring: 8 consumer warps, the producer, 2 store warps or 4 gather warps, the scale loader */
#pragma unroll
    for (i = 0; i < GMM_SM90_TILE_BATCHES; i++)
        gmm_mbarrier_init(gmm_sm90_batch_empty(bars, i),
                          9 + (GMM__K_GROUPED ? 2 : 0) + GMM__CFG(gather_warps) + (GMM__CFG(b_format) ? 1 : 0));
#pragma unroll
    for (i = 0; i < 2; i++) /* the warps of a warp group */
        gmm_mbarrier_init(gmm_sm90_last_stage_full(bars, (int)i), 4);
    /* slots, at which wgrad alone arrives: the two lanes of a store warp; the four warps of a warp group */
#pragma unroll
    for (i = 0; i < GMM_SM90_STORE_SLOTS; i++) {
        gmm_mbarrier_init(gmm_sm90_store_empty(bars, i), GMM__K_GROUPED ? 2 : 1);
        gmm_mbarrier_init(gmm_sm90_store_full(bars, i), GMM__K_GROUPED ? 4 : 128);
    }
    gmm_fence_mbarrier_init();
}

#endif

static_assert((int)GMM__SM90_ROW(GMM__KERNEL_NAME, GMM__OP, GMM__TAG, GMM__TILE, first) >= 0,
              "GMM_SM90_KERNEL_LIST has the kernel with this tile");
#if GMM__TILES == 2
static_assert((int)GMM__SM90_ROW(GMM__KERNEL_NAME, GMM__OP, GMM__TAG, GMM__SECOND_TILE, second) >= 0,
              "GMM_SM90_KERNEL_LIST has the kernel with its second tile");
#endif
GMM__ROW_KERNEL GMM__SM90_BOUNDS GMM__KERNEL_NAME(const __grid_constant__ GMM__ARGS args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ __align__(1024) char gmm_shared[];
    GMM__SMEM *const smem = (GMM__SMEM *)gmm_shared;
    gmm_sm90_tile *const ring = smem->ring.tile;
    const uint32_t base = (uint32_t)__cvta_generic_to_shared(gmm_shared);
    const uint32_t stage_bars = GMM__SMEM_AT(stage_bars), bars = GMM__SMEM_AT(bars);
    const int warp = (int)threadIdx.x >> 5, lane = (int)threadIdx.x & 31;

    gmm_sm90_prefetch_params((const uint32_t *)&args.p, (int)(sizeof args - offsetof(gmm_sm90_args, p)), warp);
    if (threadIdx.x == 0) {
        GMM__PART(gmm_sm90_init_barriers_)(stage_bars, bars, gmm_cluster_nctarank());
        gmm_prefetch_tensormap(&args.a);
        if (!GMM__TA) gmm_prefetch_tensormap(&args.a16);
        gmm_prefetch_tensormap(&args.b);
    }
    gmm_cluster_arrive_relaxed(); /* gmm_fence_mbarrier_init is the release */
    if (warp != GMM__SCHEDULER_WARP) { /* the scheduler plans the first tile before it waits */
        gmm_cluster_wait_acquire();
        if (warp != GMM_SM90_PRODUCER_WARP) gmm_griddepcontrol_wait();
        gmm_griddepcontrol_launch_dependents();
    }

    if (warp >= GMM_SM90_CONSUMER_WARPS) {
        GMM__SETMAXNREG_DEC(GMM__CFG(other_regs));
        if (warp == GMM_SM90_PRODUCER_WARP) { /* nothing may follow, or ptxas gives up the thread's uniform registers */
            if (gmm_elect_one()) GMM__PART(gmm_sm90_load_stages_)(args, smem, base);
            return;
        }
        if (warp == GMM__SCHEDULER_WARP) GMM__PART(gmm_sm90_schedule_tiles_)(args, smem, base);
        if (warp == GMM_SM90_CHECK_WARP && gmm_sm90_plans_early(&args.p, args.tables, GMM__K_GROUPED))
            gmm_sm90_check_split(&args.groups, smem->ends, &smem->ring, bars);
        if (GMM__K_GROUPED && warp >= GMM_SM90_STORE_WARP && lane < 2) /* store warps: every other part of D */
            gmm_sm90_store_tiles(&args, ring, bars, (uint32_t)warp - GMM_SM90_STORE_WARP, GMM__SMEM_AT(slot));
        if (GMM__CFG(gather) && warp >= GMM_SM90_GATHER_WARP) {
            const gmm_sm90_pipeline pipe = { stage_bars, GMM__CFG(stages), GMM__CFG(stage_bytes), 0, 0 };
            gmm_sm90_gather_tiles(&args, ring, bars, pipe, base, GMM__CFG(a_offset),
                                  (uint32_t)warp - GMM_SM90_GATHER_WARP, GMM__CFG(m16));
        }
        if (GMM__CFG(b_format) && warp == GMM_SM90_SCALE_WARP) {
            const gmm_sm90_pipeline pipe = { stage_bars, GMM__CFG(stages), GMM__CFG(stage_bytes), 0, 0 };
            gmm_sm90_load_scales(&args, GMM__CFG(b_format), GMM__CFG(scale_width), base + GMM__CFG(scales_offset), pipe,
                                 ring, bars);
        }
    } else {
        GMM__SETMAXNREG_INC(GMM__CFG(consumer_regs));
#if GMM__TILES == 2
        gmm_sm90_wait_tile(bars, 0);
        if (*(const volatile int32_t *)&smem->ring.second_tile)
            GMM__SECOND_PART(gmm_sm90_consume_tiles_)(args, (GMM__SM90(smem, GMM__SECOND_TILE) *)gmm_shared, base);
        else
#endif
        GMM__PART(gmm_sm90_consume_tiles_)(args, smem, base);
    }
#endif
}
#endif
#undef GMM__DEFERRED
#undef GMM__DEFERRED_WORDS
#undef GMM__WORDS_PER_STORE
#undef GMM__DEFERRED_SLOTS
#undef GMM__SCHEDULER_WARP
#undef GMM__STORE_SLOT
#undef GMM__ZERO_INIT
#undef GMM__ROW_ALIGN
#undef GMM__SMALL_M
#undef GMM__HAS_N8
#undef GMM__ROWS_PER_STORE
#undef GMM__PARTS_PER_COLUMN
#undef GMM__K_GROUPED
#undef GMM__GLU
#undef GMM__DGLU
#undef GMM__WGMMA_OP
#undef GMM__COL_ALIGN
#undef GMM__TB
#undef GMM__TA
#undef GMM__MAX_CFG
#undef GMM__CFG_OF
#undef GMM__SECOND_CFG
#undef GMM__TILE_CHOICE
#undef GMM__SECOND_PART
#undef GMM__PART
#undef GMM__INSTANCE
#undef GMM__SMEM_AT
#undef GMM__SMEM
#undef GMM__CFG
#undef GMM__TILE
#undef GMM__SECOND_TILE
#undef GMM__KERNEL_NAME
#undef GMM__TILES
#undef GMM__OP
#undef GMM__TAG
#undef GMM__DTYPE
#undef GMM__ROW

/* ================================================================================== Body: FP8 product on Hopper === */

#elif GMM__BODY == GMM__BODY_FP8
#define GMM__KERNEL_NAME GMM__COLUMN(1, GMM__ROW)
#define GMM__TAG GMM__COLUMN(2, GMM__ROW)
#define GMM__SCALING GMM__COLUMN(3, GMM__ROW)
#define GMM__TILE GMM__COLUMN(4, GMM__ROW)
#define GMM__TILES GMM__COLUMN(5, GMM__ROW)
#define GMM__SECOND_TILE GMM__COLUMN(6, GMM__ROW)
#define GMM__IS_FAST GMM__CAT(GMM__FP8_IS_FAST_, GMM__SCALING)
#define GMM__IS_1D1D GMM__CAT(GMM__FP8_IS_1D1D_, GMM__SCALING)
#define GMM__CFG(name) (int)GMM__FP8(name, GMM__TILE)
#define GMM__INSTANCE(part) GMM__CAT(GMM__CAT(GMM__CAT(GMM__CAT(part, GMM__TAG), _), GMM__SCALING), _)
#define GMM__PART(part) GMM__CAT(GMM__INSTANCE(part), GMM__TILE)
/* A kernel with two tiles calls the functions of both; those of the second tile are defined by a row before, which
   defines no kernel. */
#if GMM__TILES == 2
#define GMM__SECOND_PART(part) GMM__CAT(GMM__INSTANCE(part), GMM__SECOND_TILE)
#define GMM__SECOND_SMEM GMM__FP8(tile_smem, GMM__SECOND_TILE)
#define GMM__IDLE_CONSUMERS (GMM__CFG(consumers) - (int)GMM__FP8(consumers, GMM__SECOND_TILE)) /* in the second tile */
#define GMM__CFG_OF(second_tile, name) ((second_tile) ? (int)GMM__FP8(name, GMM__SECOND_TILE) : GMM__CFG(name))
#else
#define GMM__CFG_OF(second_tile, name) ((void)(second_tile), GMM__CFG(name))
#endif
#define GMM__SCALING_VALUE (int)GMM__CAT(gmm_fp8_scaling_, GMM__SCALING)
/* The struct in shared memory, and the address of a member; base: of the struct. The scales of stages follow it. */
#define GMM__SMEM GMM__FP8(tile_smem, GMM__TILE)
#define GMM__SMEM_AT(member) (base + GMM__OFFSET(GMM__SMEM, member))
#define GMM__STAGE_SCALES GMM__PART(gmm_fp8_stage_scales_)
#define GMM__STAGE_SCALE_BYTES (int)sizeof(GMM__STAGE_SCALES)
#define GMM__ROW_SCALE_BYTES (int)offsetof(GMM__STAGE_SCALES, col)
#define GMM__LINE_SCALES GMM__FP8(line_scales, GMM__TILE)
/* Tiles of fwd and dgrad begin at multiples of so many columns: one of 192 columns may begin in the middle of a block
   of 128. Those of wgrad begin at multiples of their width. */
#define GMM__COL_ALIGN(tile_n) ((tile_n) == 128 ? 128 : 64)
#define GMM__ACC (GMM__CFG(tile_n) / 2)       /* accumulators per thread: 64 rows by the tile's columns */
#define GMM__PASSES (1 + GMM__CFG(glu))       /* over the contraction, per tile */
#define GMM__WGMMA(op) GMM__CAT(GMM__CAT(GMM__CAT(gmm_wgmma_, GMM__TAG), _), op)

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
/* Issues wgmma number `kk` of a stage's four: 64 rows by the tile's columns. Scaled sums start at 0 in every stage. */
GMM__DEVICE void GMM__PART(gmm_fp8_issue_)(float *acc, uint32_t desc_a, uint32_t desc_b, const int kk) {
    const uint64_t a = gmm_wgmma_desc_k_major(desc_a + kk * (32 >> 4));
    const uint64_t b = gmm_wgmma_desc_k_major(desc_b + kk * (32 >> 4));
    if (GMM__SCALING_VALUE == GMM_FP8_FAST || kk > 0) GMM__WGMMA(add)(GMM__CFG(tile_n) / 8, acc, a, b);
    else GMM__WGMMA(set)(GMM__CFG(tile_n) / 8, acc, a, b);
}
/* Moves on by a stage. */
GMM__DEVICE void GMM__PART(gmm_fp8_advance_)(gmm_fp8_pipeline *pipe) {
    gmm_fp8_next_stage(pipe, GMM__CFG(stages), GMM__CFG(stage_bytes), GMM__STAGE_SCALE_BYTES);
}
/* Releases the stages of a tile of which the consumer multiplies nothing, unread. */
GMM__DEVICE void GMM__PART(gmm_fp8_skip_stages_)(uint32_t k_tiles, gmm_fp8_pipeline *pipe) {
#pragma unroll 1
    for (; k_tiles > 0; k_tiles--) {
        gmm_fp8_wait_stage(pipe);
        __syncwarp(); /* a lane's arrival is that of the warp */
        gmm_fp8_release_stage(pipe, pipe->empty);
        GMM__PART(gmm_fp8_advance_)(pipe);
    }
}

#if GMM__IS_1D1D
/* Scales of a stage that a lane of the scale loader holds: of every 32nd row and column of the tile. */
#define GMM__LANE_ROWS (2 * GMM__CFG(consumers))
#define GMM__LANE_COLS (GMM__CFG(tile_n) / 32)
typedef struct GMM__PART(gmm_fp8_lane_scales_) {
    float row[GMM__LANE_ROWS], col[GMM__LANE_COLS];
} GMM__PART(gmm_fp8_lane_scales_);
/* Reads them, and 0 behind the last row and column. */
GMM__DEVICE void GMM__PART(gmm_fp8_read_scales_)(GMM__PART(gmm_fp8_lane_scales_) *v, const float *rows,
                                                 const float *cols, int32_t rows_left, int32_t cols_left) {
    int x;
#pragma unroll
    for (x = 0; x < GMM__LANE_ROWS; x++) v->row[x] = 32 * x < rows_left ? rows[32 * x] : 0.0f;
#pragma unroll
    for (x = 0; x < GMM__LANE_COLS; x++) v->col[x] = 32 * x < cols_left ? cols[32 * x] : 0.0f;
}
/* Passes those of stage number `iter` to the consumers, when its memory is free. */
GMM__DEVICE void GMM__PART(gmm_fp8_write_scales_)(const GMM__PART(gmm_fp8_lane_scales_) *v, uint32_t iter,
                                                  uint32_t stage_bars, uint32_t stage_scales_at) {
    const uint32_t lane = threadIdx.x & 31, s = iter % GMM__CFG(stages);
    const uint32_t to = stage_scales_at + s * GMM__STAGE_SCALE_BYTES;
    int x;
    gmm_mbarrier_wait(gmm_sm90_empty(stage_bars, s), (iter / GMM__CFG(stages) & 1) ^ 1);
#pragma unroll
    for (x = 0; x < GMM__LANE_ROWS; x++) gmm_st_shared_f32(to + 4 * lane + 128 * x, v->row[x]);
#pragma unroll
    for (x = 0; x < GMM__LANE_COLS; x++)
        gmm_fp8_store_column_scale(to + GMM__ROW_SCALE_BYTES + 16 * lane + 512 * x, v->col[x]);
    gmm_fence_proxy_async();
    __syncwarp();
    if (lane == 0) gmm_mbarrier_arrive(gmm_sm90_full(stage_bars, s));
}
/* The scale loader of 1d1d. A stage takes less time than a load from memory, so the scales of two stages are on their
   way to registers while those of one pass to the consumers. */
GMM__DEVICE void GMM__PART(gmm_fp8_load_scales_1d1d_)(const gmm_fp8_args *args, const gmm_fp8_tile *ring,
                                                      uint32_t bars, uint32_t stage_bars, uint32_t stage_scales_at) {
    uint32_t iter = 0, tile_index = 0;
    for (;; tile_index++) {
        const gmm_fp8_tile *const f = gmm_fp8_wait_tile(ring, bars, 0, tile_index, 0);
        const int32_t lane = (int32_t)(threadIdx.x & 31);
        GMM__PART(gmm_fp8_lane_scales_) v[2];
        const float *rows, *cols;
        int64_t step, block;
        int32_t rows_left, cols_left, next_row, next_col, k_tiles, k, i;
        if (f->t.row_blocks == 0) break;
        k_tiles = (int32_t)gmm_fp8_k_tiles(f->t.k);
        rows_left = f->t.k > 0 && f->t.cols > 0 ? f->t.rows - lane : 0;
        cols_left = f->t.k > 0 ? f->t.cols - lane : 0;
        rows = gmm_fp8_scales_a(args, f, &step) + f->t.m0 + lane;
        next_row = (int32_t)step;
        cols = gmm_fp8_scales_b(args, 1, f, &step, &block) + f->t.n0 + lane;
        next_col = (int32_t)step;
#pragma unroll 1
        for (k = -2; k < k_tiles; k += 2) {
#pragma unroll
            for (i = 0; i < 2; i++) {
                if (k + i >= k_tiles) break;
                if (k >= 0) GMM__PART(gmm_fp8_write_scales_)(&v[i], iter++, stage_bars, stage_scales_at);
                if (k + i + 2 >= k_tiles) continue;
                GMM__PART(gmm_fp8_read_scales_)(&v[i], rows, cols, rows_left, cols_left);
                rows += next_row;
                cols += next_col;
            }
        }
    }
}
#undef GMM__LANE_ROWS
#undef GMM__LANE_COLS

/* Multiplies a stage in 1d1d, where every element of its sum has a scale of its own, and adds the scaled sum to acc.
   The tensor cores multiply the scales, since threads would read them from shared memory, whose port the products
   need. Of two consumers each issues the products of a stage after the other has issued its own, so that one's
   additions and the other's products run side by side.
   first: a constant, of the tile. *is_full: whether the stage is known to be full, then whether the next one is. */
GMM__DEVICE void GMM__PART(gmm_fp8_multiply_stage_)(float acc[GMM__ACC], float partial[GMM__ACC], const int first,
                                                    const gmm_fp8_consumer_tile *tile, int wg, gmm_fp8_pipeline *pipe,
                                                    int *is_full, gmm_fp8_store *store) {
    const uint32_t empty = pipe->empty;
    const uint64_t desc_scales = gmm_wgmma_desc_blocks(pipe->column_scales, GMM_FP8_SCALE_BLOCK_BYTES, 0);
    const int alternates = tile->row_blocks > 1;
    float of_rows[2], scales[GMM__ACC];
    uint32_t rows[4];
    int u;
    if (!*is_full) gmm_fp8_wait_stage(pipe);
    if (alternates) gmm_order_wait(wg);
    gmm_wgmma_fence();
#pragma unroll
    for (u = 0; u < 4; u++) GMM__PART(gmm_fp8_issue_)(partial, pipe->desc_a, pipe->desc_b, u);
    gmm_wgmma_commit();
    of_rows[0] = gmm_ld_shared_f32(pipe->row_scales);
    of_rows[1] = gmm_ld_shared_f32(pipe->row_scales + 32);
    gmm_fp8_scale_fragment(of_rows, rows);
    gmm_wgmma_fence();
    gmm_wgmma_rs_bf16(GMM__CFG(tile_n) / 16, scales, rows, desc_scales, 0);
    gmm_wgmma_commit();
    if (alternates) gmm_order_arrive(wg ^ 1);
    if (first) gmm_fp8_pass_slot(store);
    GMM__PART(gmm_fp8_advance_)(pipe);
    GMM__WGMMA_WAIT(0);
    __syncwarp();
    gmm_fp8_release_stage(pipe, empty);
    *is_full = gmm_fp8_test_stage(pipe);
#pragma unroll
    for (u = 0; u < GMM__ACC; u++) {
        GMM__PIN_F32(partial[u]);
        GMM__PIN_F32(scales[u]);
        acc[u] = __fmaf_rn(partial[u], scales[u], first ? 0.0f : acc[u]);
    }
}
#elif !GMM__IS_FAST

/* Multiplies a stage and adds the sum, times its scales, to acc. Scales are multiplied between the first and the second
   product: the gap that this makes is the one with which three consumers are fastest (KERNELS.md, "FP8: the promoted
   mainloop"). first: a constant, of the tile. *is_full: whether the stage is known to be full, then whether the next
   one is. */
GMM__DEVICE void GMM__PART(gmm_fp8_multiply_stage_)(float acc[GMM__ACC], float partial[GMM__ACC], const int first,
                                                    const gmm_fp8_consumer_tile *tile, int wg, gmm_fp8_pipeline *pipe,
                                                    int *is_full, gmm_fp8_store *store) {
    const uint32_t empty = pipe->empty;
    /* The second block of 128 columns begins at the tile's column 64, else at column 128. */
    const int n0_at_64 = tile->n0 % 128 != 0;
    /* scales[b]: of columns 64 b and those behind them. A tile of 128 columns has one block of 128. Of 192 columns, the
       first 64 are in the first block, the last 64 in the second, those between in the second if n0_at_64. */
    float a_scales[2], block_scales[2], scales[GMM__CFG(tile_n) == 128 ? 1 : 3][2];
    int u, e;
    (void)wg;
    if (!*is_full) gmm_fp8_wait_stage(pipe);
    a_scales[0] = gmm_ld_shared_f32(pipe->row_scales);
    a_scales[1] = gmm_ld_shared_f32(pipe->row_scales + 32);
    gmm_ld_shared_v2_f32(pipe->column_scales, block_scales);
    gmm_wgmma_fence();
    GMM__PART(gmm_fp8_issue_)(partial, pipe->desc_a, pipe->desc_b, 0);
#pragma unroll
    for (u = 0; u < (GMM__CFG(tile_n) == 128 ? 1 : 3); u++)
#pragma unroll
        for (e = 0; e < 2; e++) {
            const int second_block = u == 2 || (u == 1 && n0_at_64);
            scales[u][e] = __fmul_rn(a_scales[e], second_block ? block_scales[1] : block_scales[0]);
            GMM__PIN_F32(scales[u][e]);
        }
#pragma unroll
    for (u = 1; u < 4; u++) GMM__PART(gmm_fp8_issue_)(partial, pipe->desc_a, pipe->desc_b, u);
    gmm_wgmma_commit();
    if (first) gmm_fp8_pass_slot(store);
    GMM__PART(gmm_fp8_advance_)(pipe);
    GMM__WGMMA_WAIT(0);
#pragma unroll
    for (u = 0; u < GMM__ACC; u++) GMM__PIN_F32(partial[u]);
    __syncwarp(); /* all lanes have read the stage's scales */
    gmm_fp8_release_stage(pipe, empty);
    *is_full = gmm_fp8_test_stage(pipe);
#pragma unroll
    for (u = 0; u < GMM__ACC / 8; u++) { /* 16 columns */
#pragma unroll
        for (e = 0; e < 8; e++) {
            const float scale = scales[GMM__CFG(tile_n) == 128 ? 0 : u / 4][e / 2 % 2];
            acc[8 * u + e] = __fmaf_rn(partial[8 * u + e], scale, first ? 0.0f : acc[8 * u + e]);
        }
    }
}
#endif

/* Mainloop of a consumer: multiplies the tile's stages, at least one. acc is set. */
#if GMM__IS_FAST
GMM__DEVICE void GMM__PART(gmm_fp8_mainloop_)(float acc[GMM__ACC], const gmm_fp8_consumer_tile *tile, int wg,
                                              gmm_fp8_pipeline *pipe, gmm_fp8_store *store) {
    const uint32_t k_tiles = gmm_fp8_k_tiles(tile->k);
    uint32_t k, previous_empty = 0; /* of the stage before */
    int is_full = 0, u;
    (void)wg;
#pragma unroll
    for (u = 0; u < GMM__ACC; u++) acc[u] = 0.0f;
#pragma unroll 1
    for (k = 0; k < k_tiles; k++) {
        if (!is_full) gmm_fp8_wait_stage(pipe);
        gmm_wgmma_fence();
#pragma unroll
        for (u = 0; u < 4; u++) GMM__PART(gmm_fp8_issue_)(acc, pipe->desc_a, pipe->desc_b, u);
        gmm_wgmma_commit();
        GMM__WGMMA_WAIT(1);
        if (k == 0) gmm_fp8_pass_slot(store);
        else gmm_fp8_release_stage(pipe, previous_empty);
        previous_empty = pipe->empty;
        GMM__PART(gmm_fp8_advance_)(pipe);
        is_full = gmm_fp8_test_stage(pipe);
    }
    GMM__WGMMA_WAIT(0);
    gmm_fp8_release_stage(pipe, previous_empty);
}
#else
GMM__DEVICE void GMM__PART(gmm_fp8_mainloop_)(float acc[GMM__ACC], const gmm_fp8_consumer_tile *tile, int wg,
                                              gmm_fp8_pipeline *pipe, gmm_fp8_store *store) {
    uint32_t k_tiles = gmm_fp8_k_tiles(tile->k);
    float partial[GMM__ACC];
    int is_full = 0, u;
#pragma unroll
    for (u = 0; u < GMM__ACC; u++) GMM__UNDEFINED_F32(partial[u]);
    GMM__PART(gmm_fp8_multiply_stage_)(acc, partial, 1, tile, wg, pipe, &is_full, store);
#pragma unroll 1
    while (--k_tiles > 0)
        GMM__PART(gmm_fp8_multiply_stage_)(acc, partial, 0, tile, wg, pipe, &is_full, store);
}
#endif
#endif

/* GMM__BODY_FP8, continued: the scheduler warp. */
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
/* Whether the CTA's first tile is predicted, and loaded and multiplied while the scheduler checks the split. */
GMM__DEVICE int GMM__PART(gmm_fp8_predicts_)(const gmm_fp8_args *args) {
    return GMM__CFG(predicts_first_tile) && !args->wgrad && !args->tables;
}

#if GMM__TILES > 0
#if GMM__TILES == 2
/* Chooses the kernel's tile for the split that s->ends describe. */
GMM__DEVICE void GMM__PART(gmm_fp8_choose_tile_)(const gmm_fp8_args *args, GMM__SMEM *smem, gmm_sm90_scheduler *s,
                                                 gmm_sm90_split_stats stats) {
    int second = args->tile_choice;
    if (second == gmm_sm90_tile_by_split) /* wgrad takes the first tile */
        second = !args->wgrad && gmm_fp8_tile_price(s, stats, GMM__CFG_OF(1, consumers), GMM__CFG_OF(1, tile_n)) <
                                 gmm_fp8_tile_price(s, stats, GMM__CFG(consumers), GMM__CFG(tile_n));
    s->max_blocks = GMM__CFG_OF(second, consumers);
    s->col_align = GMM__COL_ALIGN(GMM__CFG_OF(second, tile_n));
    s->cluster_along_n = GMM__CFG_OF(second, tile_n) == 128;
    if ((threadIdx.x & 31) == 0) smem->bars.second_tile = second;
    __syncwarp();
}
#endif

/* Reads the split and writes the tables of groups by which the scheduler `s` chooses tiles. */
GMM__DEVICE void GMM__PART(gmm_fp8_plan_split_)(const gmm_fp8_args *args, GMM__SMEM *smem, gmm_sm90_scheduler *s) {
    const gmm_sm90_split_stats stats = gmm_sm90_read_split(&args->groups, s->ends);
#if GMM__TILES == 2
    GMM__PART(gmm_fp8_choose_tile_)(args, smem, s, stats);
#endif
    /* divisions by constants: a division by a variable would delay the first tile */
    s->tiles_n = GMM__CFG_OF(smem->bars.second_tile, tile_n) == 128 ? (args->p.n + 127) / 128
                                                                    : (args->p.n + 191) / 192;
    if (!args->wgrad)
        s->tiles_n = gmm_sm90_tiles_n(&args->p, s->tiles_n, s->col_align, GMM_FP8_BLOCK_ROWS * s->max_blocks,
                                      (int32_t)gmm_cluster_nctarank(), stats);
    s->k_grouped = args->wgrad;
    if (GMM__CFG(predicts_first_tile) || !args->wgrad ||
        !gmm_sm90_plan_balance(s, stats, args->tables ? 0 : (int32_t)GMM_SM90_SMEM_GROUPS,
                               2 * gmm_sm90_d_stages(&args->p), (gmm_sm90_balance *)(void *)smem->work_ends,
                               smem->ends))
        gmm_sm90_count_work(s, (int32_t)gmm_cluster_nctarank());
    gmm_fp8_padded_starts(args->p.groups, s->ends, s->padded_starts);
}

/* Plans the split before griddepcontrol.wait where that is allowed, and after the wait unless the early plan still
   holds. */
GMM__DEVICE void GMM__PART(gmm_fp8_plan_split_twice_)(const gmm_fp8_args *args, GMM__SMEM *smem, uint32_t base,
                                                      gmm_sm90_scheduler *s) {
    const int predicts = GMM__PART(gmm_fp8_predicts_)(args);
    int32_t early = gmm_sm90_plans_early(&args->p, args->tables, args->wgrad);
#pragma unroll 1
    for (; early >= 0; early--) {
        if (!early) {
            gmm_griddepcontrol_wait();
            if (s->tiles_n && gmm_sm90_split_unchanged(&args->groups, s->ends)) break;
        }
        GMM__PART(gmm_fp8_plan_split_)(args, smem, s);
        if (predicts && early) {
            gmm_fp8_tile f;
            gmm_fp8_predict_first_tile(args, s, gmm_sm90_this_cta(), &f);
            gmm_cluster_wait_acquire(); /* the barriers are initialised */
            if ((threadIdx.x & 31) == 0) {
                smem->ring[GMM_SM90_TILE_RING - 1] = f;
                /* the producer loads its operands right after the wait */
                gmm_mbarrier_arrive(base + GMM__CFG(prediction_offset) + GMM__OFFSET(gmm_fp8_prediction, full));
            }
            __syncwarp();
        }
    }
}

/* The scheduler warp chooses the CTA's tiles one by one. It is at most half a ring ahead of the producer. */
GMM__DEVICE void GMM__PART(gmm_fp8_schedule_tiles_)(const gmm_fp8_args *args, GMM__SMEM *smem, uint32_t base) {
    gmm_fp8_tile *const ring = smem->ring;
    const uint32_t bars = GMM__SMEM_AT(bars), prediction = base + GMM__CFG(prediction_offset);
    const uint32_t cluster = gmm_cluster_nctarank();
    const int lane = (int)threadIdx.x & 31, predicts = GMM__PART(gmm_fp8_predicts_)(args);
    int32_t *const ends = args->tables ? args->tables + (int64_t)blockIdx.x * 3 * (args->p.groups + 1)
                                      : smem->ends;
    int32_t *const work_ends = args->tables ? ends + args->p.groups + 1 : smem->work_ends;
    int32_t *const starts = args->tables ? work_ends + args->p.groups + 1 : smem->padded_starts;
    gmm_sm90_balance *const balance = (gmm_sm90_balance *)(void *)smem->work_ends;
    const int32_t stride = (int32_t)(gridDim.x >> (cluster - 1));
    /* of the first tile; gmm_fp8_choose_tile_ overwrites what depends on the tile */
    gmm_sm90_scheduler s = { &args->p, ends, work_ends, /* padded_starts */ starts, /* k_grouped */ 0,
                             /* cluster_along_n */ GMM__CFG(tile_n) == 128, /* tiles_n */ 0,
                             /* max_blocks */ GMM__CFG(consumers), /* odd_tiles, g, balanced */ 0, 0, 0,
                             /* block_rows */ GMM_FP8_BLOCK_ROWS, /* row_align */ GMM_FP8_BLOCK_ROWS,
                             /* col_align */ GMM__COL_ALIGN(GMM__CFG(tile_n)) };
    /* unresolved: this CTA does not know yet whether a CTA of its cluster repeats its first tile */
    int mispredicted = 0, unresolved = predicts;
    int32_t work = (int32_t)(blockIdx.x >> (cluster - 1));
    uint32_t tile_index = 0;
    gmm_fp8_tile f;
    GMM__PART(gmm_fp8_plan_split_twice_)(args, smem, base, &s);
    if (GMM__TILES == 2) { /* no other warp touches the slots before the first tile is in the ring */
        if (lane == 0)
            gmm_fp8_init_slots(GMM__SMEM_AT(slot_bars), GMM__CFG_OF(smem->bars.second_tile, consumers),
                               GMM__CFG_OF(smem->bars.second_tile, store_boxes));
        __syncwarp();
    }
    f.t.g = 0;
    for (;; work += stride, tile_index++) {
        const uint32_t oldest = tile_index - GMM_SM90_TILE_RING / 2;
        int32_t next_work = work;
        f.t.row_blocks = 0; /* ends the ring */
        int32_t in_group = -1, group_work = 0; /* number of the tile in its group; -1: there is none */
        /* Behind the last tile. If this CTA mispredicted, it repeats its first tile; if only its peer did, it takes an
           empty tile, so that both pass equally many stages. */
        if (unresolved && tile_index > 0 && next_work >= work_ends[args->p.groups]) {
            int peer_mispredicted = 0;
            unresolved = 0;
            if (gmm_cluster_nctarank() > 1) {
                gmm_mbarrier_wait(prediction + GMM__OFFSET(gmm_fp8_prediction, peer_full), 0);
                peer_mispredicted = *(volatile const int32_t *)((const char *)smem + GMM__CFG(prediction_offset) +
                    GMM__OFFSET(gmm_fp8_prediction, peer_mispredicted));
            }
            if (mispredicted || peer_mispredicted) { /* one more tile for the CTAs of the cluster */
                gmm_fp8_empty_tile(args, &f);
                if (mispredicted) next_work = (int32_t)(blockIdx.x >> (cluster - 1));
            }
        }
        if (!GMM__CFG(predicts_first_tile) && s.balanced)
            f.t.g = gmm_sm90_balanced_tile(balance, smem->ends, &args->p, (int32_t)tile_index, &in_group);
        else if (next_work < work_ends[args->p.groups]) {
            gmm_find_group32(work_ends, args->p.groups, next_work, &f.t.g);
            in_group = next_work - work_ends[f.t.g];
            group_work = work_ends[f.t.g + 1] - work_ends[f.t.g];
        }
        if (in_group >= 0) { /* what follows from the arguments and the tile is set anew, and takes no registers */
            s.k_grouped = args->wgrad;
            s.col_align = args->wgrad ? GMM__CFG_OF(smem->bars.second_tile, tile_n)
                                      : GMM__COL_ALIGN(GMM__CFG_OF(smem->bars.second_tile, tile_n));
            gmm_sm90_schedule_tile(&s, GMM__CFG_OF(smem->bars.second_tile, tile_n) == 128, group_work, in_group,
                                   !args->wgrad ? 0
                                                : gmm_sm90_wgrad_rotation(stride, group_work,
                                                                          gmm_sm90_tile_count(args->p.m, s.block_rows,
                                                                                              s.max_blocks)),
                                   gmm_sm90_this_cta(), &f.t);
            f.padded_row = starts[f.t.g];
            gmm_fp8_plan_store(args, &f);
            if (GMM__CFG(glu) && args->glu.drops_d) f.d_flags &= ~GMM_FP8_D_TMA;
            /* a repeated tile: the peer loads no half of a multicast operand */
            if (predicts && !unresolved) f.t.multicast = GMM_SM90_MULTICAST_NONE;
        }
        if (predicts && tile_index == 0) {
            const gmm_fp8_tile *const predicted = &ring[GMM_SM90_TILE_RING - 1];
            if (f.t.row_blocks == 0) gmm_fp8_empty_tile(args, &f);
            mispredicted = !gmm_fp8_same_tile(&f, predicted);
            __syncwarp();
            if (mispredicted) gmm_fp8_empty_tile(args, &f); /* the result of the predicted tile is discarded */
            if (lane == 0 && gmm_cluster_nctarank() > 1)
                gmm_fp8_send_mispredict(prediction, mispredicted);
        }
        if (tile_index >= GMM_SM90_TILE_RING / 2)
            gmm_mbarrier_wait(gmm_fp8_tile_begun(bars, oldest), oldest / GMM_SM90_TILE_RING & 1);
        if (lane == 0) {
            ring[tile_index % GMM_SM90_TILE_RING] = f;
            if (gmm_fp8_has_outer_scale(args))
                gmm_fp8_plan_outer_scale(args, &ring[tile_index % GMM_SM90_TILE_RING]);
            gmm_mbarrier_arrive(gmm_fp8_tile_full(bars, tile_index));
        }
        if (f.t.row_blocks == 0) break;
    }
    if (blockIdx.x == 0) gmm_sm90_report_faults(&args->groups, &args->p, ends);
}
#endif
#endif

/* GMM__BODY_FP8, continued: the warps that load operands and scales. */
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
/* Whether A has a scale per 128 elements along the contraction, so that stages have scales. */
GMM__DEVICE int GMM__PART(gmm_fp8_has_stage_scales_)(const gmm_fp8_args *args) {
    return !GMM__IS_FAST && args->a_scale.scaling == GMM_SCALING_1X128;
}

/* The producer, one thread: the coordinates of a box pass to TMA without a loop over lanes. */
GMM__DEVICE void GMM__PART(gmm_fp8_load_stages_)(const gmm_fp8_args *args, const GMM__SMEM *smem, uint32_t base) {
    const gmm_fp8_tile *const ring = smem->ring;
    const uint32_t stage_bars = GMM__SMEM_AT(stage_bars), bars = GMM__SMEM_AT(bars);
    const uint32_t prediction = base + GMM__CFG(prediction_offset);
    const uint32_t of_cta = gmm_cluster_ctarank() ? 0xAAAAAAAAu : 0x55555555u; /* its half of a multicast operand */
    const int predicts = GMM__PART(gmm_fp8_predicts_)(args);
    gmm_fp8_operand a = { &args->a, 0, 0, 0, 0, 0 }, b = { &args->b, 0, 0, 0, 0, 0 };
    uint32_t iter = 0, tile_index = 0, i;
    for (;; tile_index++) {
        const int predicted = predicts && tile_index == 0;
        const gmm_fp8_tile *const f = gmm_fp8_wait_tile(ring, bars, prediction, tile_index, predicted);
        uint32_t bytes, k_tiles;
        int32_t x;
        if (f->t.row_blocks == 0) break;
        gmm_mbarrier_arrive(gmm_fp8_tile_begun(bars, tile_index));
        /* the kernel before may write the table of weights */
        if (predicted && args->p.b.table) gmm_griddepcontrol_wait();
        k_tiles = gmm_fp8_k_tiles(f->t.k);
        x = args->wgrad ? f->padded_row : 0;
        a.y = f->t.m0;
        b.y = GMM__CFG(glu) ? gmm_fp8_glu_column(args, f->t.n0, 0) : f->t.n0;
        if (!args->wgrad) {
            const uint64_t map_offset = gmm_sm90_map_offset(gmm_kmat_data(&args->p.b, f->t.g));
            a.y += GMM_SM90_RAGGED_ROWS - (f->t.end - f->t.row);
            a.end = f->t.end;
            a.wrap = GMM_SM90_RAGGED_ROWS;
            b.end = gmm_sm90_map_z(map_offset);
            b.wrap = gmm_sm90_map_w(map_offset);
        }
        a.mask = b.mask = 0;
        if (f->t.cols > 0 && f->t.k > 0) {
            a.mask = (1u << f->t.row_blocks) - 1;
            b.mask = (1u << gmm_sm90_b_boxes(&f->t)) - 1;
        }
        bytes = (uint32_t)(__popc(a.mask) + __popc(b.mask)) * GMM_SM90_BOX_BYTES; /* what the other CTA loads too */
        a.multicast = f->t.multicast == GMM_SM90_MULTICAST_A;
        b.multicast = f->t.multicast == GMM_SM90_MULTICAST_B;
        if (a.multicast) a.mask &= of_cta;
        if (b.multicast) b.mask &= of_cta;
        if (predicted) /* what is loaded is an operand of the wait, so that the compiler computes it before */
            GMM__GRIDDEPCONTROL_WAIT_WITH(a.y, a.end, b.y, b.end, b.wrap, a.mask, b.mask);
        for (k_tiles *= GMM__PASSES; k_tiles > 0; k_tiles--, iter++) {
            const uint32_t s = iter % GMM__CFG(stages), full = gmm_sm90_full(stage_bars, s);
            const uint32_t stage = base + s * GMM__CFG(stage_bytes);
            gmm_mbarrier_wait(gmm_sm90_empty(stage_bars, s), (iter / GMM__CFG(stages) & 1) ^ 1);
            gmm_mbarrier_arrive_expect_tx(full, bytes);
            gmm_fp8_load_operand(&a, GMM__CFG(consumers), stage + GMM__CFG(a_offset), full, x);
            gmm_fp8_load_operand(&b, GMM__CFG(tile_n) / 64, stage, full, x);
            x += 128;
            if (GMM__CFG(glu) && k_tiles == gmm_fp8_k_tiles(f->t.k) + 1) { /* the second pass follows */
                x = 0;
                b.y += args->glu.block;
            }
        }
    }
    /* Shared memory must exist until the other CTA of the cluster has arrived at these barriers for the last
       time. Its multicast data has arrived before, and the scheduler has waited for its prediction. */
#pragma unroll 1
    for (i = 0; i < GMM__CFG(stages); i++, iter++)
        gmm_mbarrier_wait(gmm_sm90_empty(stage_bars, iter % GMM__CFG(stages)),
                          (iter / GMM__CFG(stages) & 1) ^ 1);
}

#if !GMM__IS_1D1D
/* The scale loader. */
GMM__DEVICE void GMM__PART(gmm_fp8_load_scales_)(const gmm_fp8_args *args, const GMM__SMEM *smem, uint32_t base) {
    const gmm_fp8_tile *const ring = smem->ring;
    const uint32_t stage_bars = GMM__SMEM_AT(stage_bars), bars = GMM__SMEM_AT(bars);
    const uint32_t prediction = base + GMM__CFG(prediction_offset);
    const uint32_t stage_scales_at = base + (uint32_t)sizeof(GMM__SMEM);
    const int lane = (int)threadIdx.x & 31, predicts = GMM__PART(gmm_fp8_predicts_)(args);
    uint32_t iter = 0, tile_index = 0;
    int32_t x;
    for (;; tile_index++) {
        const gmm_fp8_tile *const f = gmm_fp8_wait_tile(ring, bars, prediction, tile_index,
                                                        predicts && tile_index == 0);
        const float *rows, *cols;
        int64_t step, block;
        uint32_t k_tiles;
        int32_t rows_left, cols_left, columns_to_128, next_row, next_col, n0;
        if (f->t.row_blocks == 0) break;
        k_tiles = gmm_fp8_k_tiles(f->t.k);
        rows_left = f->t.k > 0 && f->t.cols > 0 ? f->t.rows - lane : 0;
        cols_left = f->t.k > 0 ? f->t.cols - lane : 0;
        rows = gmm_fp8_scales_a(args, f, &step) + f->t.m0 + lane;
        next_row = (int32_t)step;
        cols = gmm_fp8_scales_b(args, GMM__PASSES, f, &step, &block);
        next_col = (int32_t)step;
        /* lane 1: scale of the columns past the next multiple of 128, if the tile reaches it */
        columns_to_128 = 128 - f->t.n0 % 128;
        n0 = GMM__CFG(glu) ? gmm_fp8_glu_column(args, f->t.n0, 0) : f->t.n0;
        cols += (n0 / 128 + (lane == 1 && f->t.cols > columns_to_128)) * block;
        for (k_tiles *= GMM__PASSES; k_tiles > 0; k_tiles--, iter++) {
            const uint32_t s = iter % GMM__CFG(stages), full = gmm_sm90_full(stage_bars, s);
            const uint32_t stage_scales = stage_scales_at + s * GMM__STAGE_SCALE_BYTES;
            gmm_mbarrier_wait(gmm_sm90_empty(stage_bars, s), (iter / GMM__CFG(stages) & 1) ^ 1);
#pragma unroll
            for (x = 0; x < 2 * GMM__CFG(consumers); x++)
                gmm_cp_async_f32(stage_scales + 4 * (uint32_t)lane + 128 * x, rows + 32 * x,
                                 32 * x < rows_left);
            if (lane < 2)
                gmm_cp_async_f32(stage_scales + GMM__ROW_SCALE_BYTES + 4 * (uint32_t)lane, cols, cols_left > 0);
            gmm_cp_async_mbarrier_arrive(full);
            rows += next_row;
            cols += next_col;
            if (GMM__CFG(glu) && k_tiles == gmm_fp8_k_tiles(f->t.k) + 1) { /* the second pass follows */
                rows -= (int64_t)(k_tiles - 1) * next_row;
                cols += args->glu.block / 128 * block - (int64_t)(k_tiles - 1) * next_col;
            }
        }
    }
    gmm_cp_async_wait_all();
}
#endif
#endif

/* GMM__BODY_FP8, continued: the epilogue of a consumer warp group. Threads hold accumulators as gmm_wgmma_acc_m and
   gmm_wgmma_acc_n say; the first row of a thread is `row` of the warp group's 64, its second one is 8 further. */
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
/* Requests the scales per line of the tile's rows and columns; gmm_fp8_scale_accumulators_ waits for them. */
GMM__DEVICE void GMM__PART(gmm_fp8_request_line_scales_)(const gmm_fp8_args *args, const gmm_sm90_tile *t,
                                                         uint32_t base, int wg) {
    const uint32_t scales = GMM__SMEM_AT(line_scales) + GMM__CFG(line_scale_bytes) * wg;
    const int tid = gmm_tid_x() & 127;
    int x;
    if (args->a_scale.scaling == GMM_SCALING_ROW && tid < 64)
        gmm_cp_async_f32(scales + 4 * tid,
                         (const float *)args->a_scale.scale + t->m0 + 64 * wg + tid +
                             (args->wgrad ? (int64_t)t->g * args->p.m : t->row),
                         64 * wg + tid < t->rows);
    if (args->b_scale.scaling == GMM_SCALING_ROW)
#pragma unroll 1
        for (x = tid; x < GMM__CFG(tile_n); x += 128)
            gmm_cp_async_f32(scales + GMM__OFFSET(GMM__LINE_SCALES, col) + 4 * x,
                             (args->b_scale.scale_table
                                  ? (const float *)args->b_scale.scale_table[t->g]
                                  : (const float *)args->b_scale.scale + (int64_t)t->g * args->p.n) + t->n0 + x,
                             x < t->cols);
}

/* Multiplies the accumulators by the outer scale and, where by_line is set, by scales per line. */
GMM__DEVICE void GMM__PART(gmm_fp8_scale_accumulators_)(const gmm_fp8_consumer_tile *tile, int by_line, uint32_t base,
                                                        int wg, float acc[GMM__ACC]) {
    const uint32_t scales = GMM__SMEM_AT(line_scales) + GMM__CFG(line_scale_bytes) * wg;
    const int tid = gmm_tid_x() & 127, row = tid / 32 * 16 + tid % 32 / 4;
    const int second_exponent = tile->d_flags >> GMM_FP8_SECOND_SCALE_SHIFT;
    const float outer_scale = tile->outer_scale;
    int u;
    if (by_line || second_exponent) { /* line scales that the call does not have are 1 */
        const float second = gmm_f32_from_bits((uint32_t)(second_exponent ? second_exponent : 127) << 23);
        float scale0 = second, scale1 = second;
        gmm_cp_async_wait_all();
        gmm_fp8_consumer_sync(wg);
        if (GMM__CFG(lines)) {
            scale0 *= gmm_ld_shared_f32(scales + 4 * row);
            scale1 *= gmm_ld_shared_f32(scales + 4 * row + 32);
        }
#pragma unroll
        for (u = 0; u < GMM__ACC; u += 4) {
            float col_scales[2] = { 1.0f, 1.0f };
            if (GMM__CFG(lines))
                gmm_ld_shared_v2_f32(scales + GMM__OFFSET(GMM__LINE_SCALES, col) + 8 * u + tid % 4 * 8, col_scales);
            col_scales[0] = __fmul_rn(outer_scale, col_scales[0]);
            col_scales[1] = __fmul_rn(outer_scale, col_scales[1]);
            acc[u] = __fmul_rn(__fmul_rn(acc[u], scale0), col_scales[0]);
            acc[u + 1] = __fmul_rn(__fmul_rn(acc[u + 1], scale0), col_scales[1]);
            acc[u + 2] = __fmul_rn(__fmul_rn(acc[u + 2], scale1), col_scales[0]);
            acc[u + 3] = __fmul_rn(__fmul_rn(acc[u + 3], scale1), col_scales[1]);
        }
        if (by_line) gmm_fp8_consumer_sync(wg); /* the next tile's scales overwrite these */
    } else if (outer_scale != 1.0f) {
#pragma unroll
        for (u = 0; u < GMM__ACC; u++) acc[u] = __fmul_rn(acc[u], outer_scale);
    }
}

/* Applies an epilogue step to the accumulators of a pass. */
GMM__DEVICE void GMM__PART(gmm_fp8_apply_step_)(const gmm_epilogue_step step, const gmm_fp8_args *args,
                                                const gmm_sm90_tile *t, int pass, int wg, float acc[GMM__ACC]) {
    const gmm_epilogue_values values = gmm_epilogue_values_of(step, &args->p, t->g, (int64_t)t->row + t->m0 + 64 * wg);
    const int tid = gmm_tid_x() & 127, row = tid / 32 * 16 + tid % 32 / 4, cols = t->cols;
    const int rows = values.rows ? t->rows - 64 * wg : 0, bytes = values.cols_dtype == GMM_F32 ? 4 : 2;
    const float row0 = row < rows ? values.rows[row] : 1.0f, row8 = row + 8 < rows ? values.rows[row + 8] : 1.0f;
    int u;
#pragma unroll
    for (u = 0; u < GMM__ACC; u += 4) {
        const int c = gmm_wgmma_acc_n(tid % 32, u);
        const int count = cols - c > 2 ? 2 : cols - c;
        float v[4] = { 1.0f, 1.0f, 1.0f, 1.0f };
        if (gmm_epilogue_reads_cols(step)) {
            GMM__PIN_MEMORY(); /* keeps the loads from moving up, where registers are short */
            gmm_read4(values.cols_dtype, values.cols +
                          (int64_t)((GMM__CFG(glu) ? gmm_fp8_glu_column(args, t->n0, pass) : t->n0) + c) * bytes,
                      count, 0, v);
        }
        acc[u] = gmm_epilogue_apply(step, acc[u], row0, v[0]);
        acc[u + 1] = gmm_epilogue_apply(step, acc[u + 1], row0, v[1]);
        acc[u + 2] = gmm_epilogue_apply(step, acc[u + 2], row8, v[0]);
        acc[u + 3] = gmm_epilogue_apply(step, acc[u + 3], row8, v[1]);
    }
}

/* Applies those that the call has. */
GMM__DEVICE void GMM__PART(gmm_fp8_apply_steps_)(const gmm_fp8_args *args, const gmm_sm90_tile *t, int pass, int wg,
                                                 float acc[GMM__ACC]) {
#define GMM__X(name, rows, cols) \
    if (gmm_epilogue_present(GMM_EPILOGUE_##name, &args->p)) \
        GMM__PART(gmm_fp8_apply_step_)(GMM_EPILOGUE_##name, args, t, pass, wg, acc);
    GMM_EPILOGUE_STEP_LIST(GMM__X)
#undef GMM__X
}

/* Writes TMA boxes of D from number `first` on, as many as a slot holds, to the slot at `slot`: as 16-bit elements. */
GMM__DEVICE void GMM__PART(gmm_fp8_write_slot_16_)(gmm_dtype dtype, uint32_t slot, const int first,
                                                   const float acc[GMM__ACC]) {
    const int tid = gmm_tid_x() & 127;
    const uint32_t to = slot + (tid / 32 * 16 + tid % 16) * 128;
    int u;
#pragma unroll
    for (u = 0; u < 4 * GMM__CFG(store_boxes); u++) { /* 16 columns */
        const float *const v = &acc[32 * first + 8 * u < GMM__ACC ? 32 * first + 8 * u : 0];
        if (32 * first + 8 * u >= GMM__ACC) break;
        gmm_stmatrix_x4(to + u / 4 * 8192 + (((u % 4 * 2 + tid % 32 / 16) ^ (tid % 8)) << 4),
                        gmm_pack2(dtype, v[0], v[1]), gmm_pack2(dtype, v[2], v[3]),
                        gmm_pack2(dtype, v[4], v[5]), gmm_pack2(dtype, v[6], v[7]));
    }
}
/* The same as fp32, added to `beta` times what the slot holds where D has been loaded. Odd rows write the halves of
   128 bytes in the other order, which avoids bank conflicts. */
GMM__DEVICE void GMM__PART(gmm_fp8_write_slot_f32_)(uint32_t slot, const int first, int loaded, float beta,
                                                    const float acc[GMM__ACC]) {
    const int tid = gmm_tid_x() & 127, row = tid / 32 * 16 + tid % 32 / 4, swapped = row % 2;
    const uint32_t to = slot + row * 128 + tid % 2 * 8;
    int u, x;
#pragma unroll
    for (x = 0; x < GMM__CFG(store_boxes); x++) {
        const float *const v = &acc[16 * (first + x)];
        float w[16], old[16];
#pragma unroll
        for (u = 0; u < 16; u++) w[u] = swapped ? v[(u + 8) % 16] : v[u];
        if (loaded) {
#pragma unroll
            for (u = 0; u < 16; u += 2)
                gmm_ld_shared_v2_f32(to + x * 8192 + u % 4 * 512 +
                                         (((u / 4 * 2 + tid % 4 / 2) ^ (row % 8) ^ (4 * swapped)) << 4),
                                     old + u);
#pragma unroll
            for (u = 0; u < 16; u++) w[u] = __fmaf_rn(beta, old[u], w[u]);
        }
#pragma unroll
        for (u = 0; u < 16; u += 2) /* 8 columns of the thread's two rows: four accumulators */
            gmm_st_shared_v2_f32(to + x * 8192 + u % 4 * 512 +
                                     (((u / 4 * 2 + tid % 4 / 2) ^ (row % 8) ^ (4 * swapped)) << 4),
                                 w[u], w[u + 1]);
    }
}

/* Stores the slot, whose first column is c0 of the tile, to a D that TMA cannot write: each thread has 16 bytes of a
   row. slot: of the warp group. */
GMM__DEVICE void GMM__PART(gmm_fp8_store_slot_)(const gmm_fp8_args *args, const gmm_fp8_tile *f, const char *slot,
                                                int c0, int wg) {
    const gmm_sm90_tile *const t = &f->t;
    const int size = gmm_kmat_size(&args->p.d), box_cols = f->d_flags & GMM_FP8_D_16BIT ? 64 : 32;
    const int64_t pitch = args->p.d.ld * size;
    const float beta = gmm_gemm_beta(&args->p, t->g);
    char *const d = gmm_kmat_data(&args->p.d, t->g) + (t->m0 + 64 * wg + (args->wgrad ? 0 : (int64_t)t->row)) * pitch;
    const int aligned = (((uint32_t)(uintptr_t)d | (uint32_t)pitch) & (size == 2 ? 7 : 15)) == 0;
    int x, e;
    gmm_fp8_consumer_sync(wg);
#pragma unroll 1
    for (x = gmm_tid_x() & 127; x < 512 * GMM__CFG(store_boxes); x += 128) {
        const int box_row = x / 8 % 64, c = c0 + x / 512 * box_cols + x % 8 * (box_cols / 8);
        const int cols_left = t->cols - c;
        const char *const from = slot + x / 512 * 8192 + box_row * 128 + (((x % 8) ^ (box_row % 8)) << 4);
        char *const to = d + box_row * pitch + (int64_t)(t->n0 + c) * size;
        if (box_row >= t->rows - 64 * wg) continue;
        if (f->d_flags & GMM_FP8_D_16BIT) {
            for (e = 0; e < 8 && e < cols_left; e++) ((uint16_t *)to)[e] = ((const uint16_t *)from)[e];
        } else {
            const float4 values = *(const float4 *)from;
            float v[4], stored[4];
            v[0] = values.x; v[1] = values.y; v[2] = values.z; v[3] = values.w;
            if (beta != 0.0f) {
                gmm_read4(args->p.d.dtype, to, cols_left, aligned, stored);
#pragma unroll
                for (e = 0; e < 4; e++) v[e] = __fmaf_rn(beta, stored[e], v[e]);
            }
            gmm_write4(args->p.d.dtype, to, cols_left, aligned, v);
        }
    }
}

/* Stores the accumulators: part by part to the store slot, from which the store warp moves them to D by TMA. The last
   part of 16-bit D is written, but not passed on yet (gmm_fp8_store). */
GMM__DEVICE void GMM__PART(gmm_fp8_store_accumulators_)(const gmm_fp8_args *args, const gmm_fp8_consumer_tile *tile,
                                                        const GMM__SMEM *smem, uint32_t base, int wg,
                                                        const float acc[GMM__ACC], gmm_fp8_store *store) {
    const uint32_t slot = GMM__SMEM_AT(slot) + GMM__CFG(slot_bytes) * wg;
    const int d_flags = tile->d_flags, box_cols = d_flags & GMM_FP8_D_16BIT ? 64 : 32; /* columns of 128 bytes */
    int i;
#pragma unroll
    for (i = 0; i < GMM__CFG(tile_n) / 32; i += GMM__CFG(store_boxes)) { /* first TMA box of a part */
        const int c0 = i * box_cols;
        if (c0 >= tile->cols || c0 >= GMM__CFG(tile_n)) break;
        gmm_fp8_wait_slot(store, GMM__SMEM_AT(slot_bars), wg);
        if (d_flags & GMM_FP8_D_16BIT) { /* the dtype is a constant, since a predicate would double the conversions */
            if (args->p.d.dtype == GMM_BF16) GMM__PART(gmm_fp8_write_slot_16_)(GMM_BF16, slot, i, acc);
            else GMM__PART(gmm_fp8_write_slot_16_)(GMM_F16, slot, i, acc);
        } else {
            const int loaded = (d_flags & GMM_FP8_D_LOAD) && (i == 0 || !(d_flags & GMM_FP8_D_REDUCE));
            GMM__PART(gmm_fp8_write_slot_f32_)(slot, i, loaded, loaded ? gmm_gemm_beta(&args->p, tile->f->t.g) : 0.0f,
                                               acc);
        }
        if (!(d_flags & GMM_FP8_D_TMA))
            GMM__PART(gmm_fp8_store_slot_)(args, tile->f, (const char *)smem->slot[wg], c0, wg);
    }
    /* stores of fp32 take longer than the mainloop where groups have few rows: they begin at once */
    if (!(d_flags & GMM_FP8_D_16BIT)) gmm_fp8_pass_slot(store);
}
/* Completes one phase of the slot's barriers for a tile without rows or columns of this warp group, since the store
   warp waits for at least one part per tile. */
GMM__DEVICE void GMM__PART(gmm_fp8_skip_slot_)(uint32_t base, int wg, gmm_fp8_store *store) {
    gmm_fp8_wait_slot(store, GMM__SMEM_AT(slot_bars), wg);
    gmm_fp8_pass_slot(store);
}
#endif
/* GMM__BODY_FP8, continued: the epilogue of a glu tile. The store slot holds the tile's gate columns from the first
   pass on. After the second pass each warp replaces its 16 rows of them by h, takes the largest absolute value of each
   row, and quantizes the row; then the linear columns follow in the slot. h has the bits of the activation of D in
   memory, and its copy those of a cast of h. */
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
/* Address in a slot of the 16 columns from 16 * block on, for ldmatrix and stmatrix: a warp's 16 rows. */
GMM__DEVICE uint32_t GMM__PART(gmm_fp8_glu_block_)(uint32_t slot, int block) {
    const int tid = gmm_tid_x() & 127;
    return slot + (tid / 32 * 16 + tid % 16) * 128 + block / 4 * GMM_SM90_BOX_BYTES +
           (((block % 4 * 2 + tid % 32 / 16) ^ (tid % 8)) << 4);
}

/* Writes the gate columns of D to the slot, where they stay; it is passed on behind the first products of the second
   pass. */
GMM__DEVICE void GMM__PART(gmm_fp8_keep_gate_)(uint32_t base, int wg, const float acc[GMM__ACC], gmm_fp8_store *store) {
    gmm_fp8_wait_slot(store, GMM__SMEM_AT(slot_bars), wg);
    GMM__PART(gmm_fp8_write_slot_16_)(GMM_BF16, GMM__SMEM_AT(slot) + GMM__CFG(slot_bytes) * wg, 0, acc);
}

/* Replaces the warp's gate values in the slot by h. linear: the linear columns of D, two accumulators per word.
   maxima: of absolute values in the thread's rows, that of gmm_wgmma_acc_m and the one 8 further. The loop is not
   unrolled, so that the code of the activations stands once. */
GMM__DEVICE void GMM__PART(gmm_fp8_glu_activate_)(const gmm_fp8_glu *glu, uint32_t slot,
                                                  const uint32_t linear[GMM__ACC / 2], const float probs[2],
                                                  uint32_t maxima[2]) {
    int block, i, u;
    maxima[0] = maxima[1] = 0;
#pragma unroll 1
    for (block = 0; block < GMM__CFG(tile_n) / 16; block++) {
        const uint32_t at = GMM__PART(gmm_fp8_glu_block_)(slot, block);
        uint32_t gate[4], selected[4] = { 0, 0, 0, 0 }, h[4];
        float a[8], b[8], f[8], da[8], db[8];
        gmm_ldmatrix_x4(gate, at);
#pragma unroll
        for (u = 0; u < GMM__CFG(tile_n) / 16; u++)
#pragma unroll
            for (i = 0; i < 4; i++) selected[i] = u == block ? linear[4 * u + i] : selected[i];
#pragma unroll
        for (i = 0; i < 8; i++) {
            a[i] = gmm__word_value(GMM_BF16, gate, i);
            b[i] = gmm__word_value(GMM_BF16, selected, i);
        }
        gmm__act_x8(glu->kind, 1, glu->coef, a, b, f, da, db);
#pragma unroll
        for (i = 0; i < 4; i++) {
            h[i] = gmm_pack2(GMM_BF16, probs[i % 2] * f[2 * i], probs[i % 2] * f[2 * i + 1]);
            maxima[i % 2] = gmm__word_max(GMM_BF16, maxima[i % 2], h[i]);
        }
        gmm_stmatrix_x4(at, h[0], h[1], h[2], h[3]);
    }
#pragma unroll
    for (i = 0; i < 2; i++) { /* over the four lanes that share the row */
        maxima[i] = gmm__word_fold(GMM_BF16, maxima[i]);
        maxima[i] = max(maxima[i], __shfl_xor_sync(0xFFFFFFFFu, maxima[i], 1));
        maxima[i] = max(maxima[i], __shfl_xor_sync(0xFFFFFFFFu, maxima[i], 2));
    }
}

/* Stores the scales of the thread's rows, those of gmm_fp8_glu_activate_. The padding behind a group's rows is left as
   it is: FC2 of the same call alone reads the copy. first: the warp's first row of the tile. */
GMM__DEVICE void GMM__PART(gmm_fp8_glu_store_scales_)(const gmm_fp8_args *args, const gmm_fp8_tile *f, int first,
                                                      const float scales[2]) {
    const gmm_sm90_tile *const t = &f->t;
    gmm_mat h = args->glu.h;
    gmm__qview v;
    float *to;
    int i;
    h.scaling = GMM_SCALING_1X128; /* as a constant it saves divisions, whose calls would spill */
    v = gmm__qview_of(&h, GMM_ROWWISE, 1, t->g, t->row, f->padded_row, t->end - t->row, args->p.n);
    to = (float *)(void *)v.scale + gmm__qview_scale(&v, t->m0, t->n0 / 128);
    if (gmm_tid_x() & 3) return;
#pragma unroll
    for (i = 0; i < 2; i++) {
        const int row = first + (gmm_tid_x() & 31) / 4 + 8 * i;
        if (row < t->rows) to[row] = gmm_scale_inverse(scales[i]);
    }
}

/* Encodes and stores the warp's rows of h: 16 lanes have a row of the tile, 8 columns each. slot: its generic address.
   scales: of the thread's rows, as above. */
GMM__DEVICE void GMM__PART(gmm_fp8_glu_store_codes_)(const gmm_fp8_args *args, const gmm_sm90_tile *t, const char *slot,
                                                     int first, const float scales[2]) {
    const int lane = gmm_tid_x() & 31, vector = lane % 16;
    char *const to = (char *)args->glu.h.data + ((int64_t)t->row + t->m0 + first) * args->glu.h.ld + t->n0 + 8 * vector;
    int x, i;
#pragma unroll
    for (x = 0; x < 8; x++) {
        const int line = 2 * x + lane / 16;
        const float scale = __shfl_sync(0xFFFFFFFFu, scales[x / 4], line % 8 * 4);
        const uint4 v = *(const uint4 *)(slot + (first % GMM_FP8_BLOCK_ROWS + line) * 128 +
                                         vector / 8 * GMM_SM90_BOX_BYTES + ((vector % 8 ^ line % 8) << 4));
        const uint32_t words[4] = { v.x, v.y, v.z, v.w };
        float f[8];
#pragma unroll
        for (i = 0; i < 8; i++) f[i] = gmm__fmul(gmm__word_value(GMM_BF16, words, i), scale);
        if (first + line < t->rows)
            gmm_st_global_v2_b32(to + line * args->glu.h.ld, gmm_encode_fp8x4(0, f), gmm_encode_fp8x4(0, f + 4));
    }
}

/* Computes and stores h from the gate columns in the slot and the accumulators of the linear columns, which
   follow them in the slot. */
GMM__DEVICE void GMM__PART(gmm_fp8_store_glu_)(const gmm_fp8_args *args, const gmm_fp8_tile *f, const GMM__SMEM *smem,
                                               uint32_t base, int wg, const float acc[GMM__ACC], gmm_fp8_store *store) {
    const gmm_fp8_glu *const glu = &args->glu;
    const gmm_sm90_tile *const t = &f->t;
    const uint32_t slot = GMM__SMEM_AT(slot) + GMM__CFG(slot_bytes) * wg;
    const int tid = gmm_tid_x() & 127, first = 64 * wg + tid / 32 * 16;
    uint32_t linear[GMM__ACC / 2], maxima[2];
    float probs[2], scales[2];
    int u;
#pragma unroll
    for (u = 0; u < 2; u++) {
        const int row = first + tid % 32 / 4 + 8 * u;
        probs[u] = glu->prob && row < t->rows ? glu->prob[(int64_t)t->row + t->m0 + row] : 1.0f;
    }
#pragma unroll
    for (u = 0; u < GMM__ACC / 2; u++) linear[u] = gmm_pack2(GMM_BF16, acc[2 * u], acc[2 * u + 1]);
    gmm_fp8_wait_slot(store, GMM__SMEM_AT(slot_bars), wg); /* TMA has read the gate columns */
    GMM__PART(gmm_fp8_glu_activate_)(glu, slot, linear, probs, maxima);
#pragma unroll
    for (u = 0; u < 2; u++)
        scales[u] = gmm_scale_from_amax(gmm_f32_from_bits(maxima[u]), gmm_dtype_largest(GMM_E4M3),
                                        gmm_dtype_largest(GMM_BF16), glu->eps, glu->pow2);
    __syncwarp(); /* h is complete in the slot */
    GMM__PART(gmm_fp8_glu_store_scales_)(args, f, first, scales);
    GMM__PART(gmm_fp8_glu_store_codes_)(args, t, smem->slot[wg][0], first, scales);
    __syncwarp(); /* all lanes have read h */
    if (!glu->drops_d)
#pragma unroll
        for (u = 0; u < GMM__CFG(tile_n) / 16; u++)
            gmm_stmatrix_x4(GMM__PART(gmm_fp8_glu_block_)(slot, u), linear[4 * u], linear[4 * u + 1],
                            linear[4 * u + 2], linear[4 * u + 3]);
}
#endif

/* GMM__BODY_FP8, continued: the kernel. Its warp roles, barriers and shared memory: above gmm_fp8_args. */
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
/* A consumer warp group: mainloop and epilogue, pass by pass. idle_consumers: of the kernel, for which consumer 0
   releases stages. */
GMM__DEVICE void GMM__PART(gmm_fp8_consume_tiles_)(const gmm_fp8_args *args, const GMM__SMEM *smem, uint32_t base,
                                                   const int idle_consumers) {
    const gmm_fp8_tile *const ring = smem->ring;
    const uint32_t bars = GMM__SMEM_AT(bars), prediction = base + GMM__CFG(prediction_offset);
    const uint32_t stage_scales_at = base + (uint32_t)sizeof(GMM__SMEM);
    const int predicts = GMM__PART(gmm_fp8_predicts_)(args), tid = gmm_tid_x();
    const int wg = __shfl_sync(0xFFFFFFFFu, tid >> 7, 0);
    int by_line = args->a_scale.scaling == GMM_SCALING_ROW || args->b_scale.scaling == GMM_SCALING_ROW;
    int has_steps = !args->wgrad && gmm_epilogue_steps_present(&args->p);
    const uint32_t row = 64 * wg + (tid >> 5 & 3) * 16 + (tid & 31) / 4;
    gmm_fp8_pipeline pipe = gmm_fp8_begin_pipeline(base + GMM__CFG(a_offset) + 8192 * wg, base,
                                                   GMM__SMEM_AT(stage_bars), stage_scales_at + 4 * row,
                                                   stage_scales_at + GMM__ROW_SCALE_BYTES,
                                                   wg == 0 ? idle_consumers : 0);
    gmm_fp8_store store = { 0, 0 };
    gmm_fp8_consumer_tile tile = gmm_fp8_read_tile(gmm_fp8_wait_tile(ring, bars, prediction, 0, predicts)), next;
    uint32_t tile_index = 0;
    float acc[GMM__ACC];
    int pass = 0, u;
    GMM__PIN_U32(by_line); /* words, since the mainloop needs the predicates */
    GMM__PIN_U32(has_steps);
    for (;; pass = (pass + 1) % GMM__PASSES, tile_index += pass == 0, tile = next) {
        int present = tile.cols > 0 && tile.row_blocks > wg;
        /* All lanes have read the previous tile's entry before one of them releases stages of this tile, by which the
           producer begins further tiles and the scheduler overwrites entries (fp8_plan.cuh). */
        __syncwarp();
        if (tile.row_blocks == 0) break;
        if (!present || tile.k == 0) {
            gmm_fp8_pass_slot(&store);
            GMM__PART(gmm_fp8_skip_stages_)(gmm_fp8_k_tiles(tile.k), &pipe);
        }
        if (present) {
            if (by_line) GMM__PART(gmm_fp8_request_line_scales_)(args, &tile.f->t, base, wg);
            if (tile.k > 0) GMM__PART(gmm_fp8_mainloop_)(acc, &tile, wg, &pipe, &store);
            else
#pragma unroll
                for (u = 0; u < GMM__ACC; u++) {
                    acc[u] = 0.0f;
                    GMM__PIN_F32(acc[u]); /* else the compiler zeroes ahead of the branch */
                }
            if (predicts && tile_index == 0 && pass == 0) { /* the scheduler has read the split again meanwhile */
                tile = gmm_fp8_read_tile(gmm_fp8_wait_tile(ring, bars, prediction, 0, 0));
                present = tile.cols > 0;
                if (!present) gmm_cp_async_wait_all();
            }
        }
        /* read here, so that the next tile begins without a wait for its entry */
        next = tile;
        if (pass == GMM__PASSES - 1)
            next = gmm_fp8_read_tile(gmm_fp8_wait_tile(ring, bars, prediction, tile_index + 1, 0));
        if (!present) {
            if (pass == 0) GMM__PART(gmm_fp8_skip_slot_)(base, wg, &store);
            continue;
        }
        GMM__PART(gmm_fp8_scale_accumulators_)(&tile, by_line, base, wg, acc);
        if (has_steps) GMM__PART(gmm_fp8_apply_steps_)(args, &tile.f->t, pass, wg, acc);
        if (!GMM__CFG(glu)) GMM__PART(gmm_fp8_store_accumulators_)(args, &tile, smem, base, wg, acc, &store);
        else if (pass == 0) GMM__PART(gmm_fp8_keep_gate_)(base, wg, acc, &store);
        else GMM__PART(gmm_fp8_store_glu_)(args, tile.f, smem, base, wg, acc, &store);
    }
    gmm_fp8_pass_slot(&store);
}

/* Producer, scale loader and store warp. role: number of the warp behind the consumers. */
GMM__DEVICE void GMM__PART(gmm_fp8_move_tiles_)(const gmm_fp8_args *args, const GMM__SMEM *smem, uint32_t base,
                                                int role) {
    const uint32_t bars = GMM__SMEM_AT(bars);
    if (role == GMM_FP8_PRODUCER_WARP) {
        if (gmm_elect_one()) GMM__PART(gmm_fp8_load_stages_)(args, smem, base);
    } else if (role == GMM_FP8_SCALE_WARP)
#if GMM__IS_1D1D
        GMM__PART(gmm_fp8_load_scales_1d1d_)(args, smem->ring, bars, GMM__SMEM_AT(stage_bars),
                                             base + (uint32_t)sizeof(GMM__SMEM));
#else
        GMM__PART(gmm_fp8_load_scales_)(args, smem, base);
#endif
    else if (role == GMM_FP8_STORE_WARP && ((int)threadIdx.x & 31) < GMM__CFG(consumers) * GMM__CFG(store_boxes))
        gmm_fp8_store_tiles(args, GMM__CFG(store_boxes), GMM__PASSES, smem->ring, bars, GMM__SMEM_AT(slot_bars),
                            GMM__SMEM_AT(slot));
}

#if GMM__TILES > 0
/* Initialises the barriers with their arrivals per phase, and scales that the call may not have. The barriers of slots
   depend on the tile: where a kernel has two, the scheduler initialises them behind its choice. */
GMM__DEVICE void GMM__PART(gmm_fp8_init_)(const gmm_fp8_args *args, GMM__SMEM *smem, uint32_t base) {
    const uint32_t stage_bars = GMM__SMEM_AT(stage_bars), bars = GMM__SMEM_AT(bars);
    const uint32_t slot_bars = GMM__SMEM_AT(slot_bars), prediction = base + GMM__CFG(prediction_offset);
    const uint32_t loader_arrivals = GMM__PART(gmm_fp8_has_stage_scales_)(args)
                                     ? (int)GMM__FP8(loader_arrivals, GMM__SCALING) : 0;
    const uint32_t consumer_warps = 4 * GMM__CFG(consumers) * gmm_cluster_nctarank();
    uint32_t i;
    /* Scales that the call does not have stay 1: those of lines, and those of stages, which follow the struct. Those of
       a second tile lie within them, since they begin at the same place and its struct is smaller. */
    const uint32_t scale_bytes = sizeof(GMM__SMEM) - offsetof(GMM__SMEM, line_scales) +
                                 (GMM__SCALING_VALUE == GMM_FP8_FAST || loader_arrivals
                                      ? 0 : GMM__CFG(stages) * GMM__STAGE_SCALE_BYTES);
    for (i = threadIdx.x; i < scale_bytes / 4; i += blockDim.x)
        ((float *)((char *)smem + offsetof(GMM__SMEM, line_scales)))[i] = 1.0f;
    if (threadIdx.x != 0) return;
#pragma unroll
    for (i = 0; i < GMM__CFG(stages); i++) {
        gmm_mbarrier_init(gmm_sm90_full(stage_bars, i), 1 + loader_arrivals);
        gmm_mbarrier_init(gmm_sm90_empty(stage_bars, i), consumer_warps);
    }
#pragma unroll
    for (i = 0; i < GMM_SM90_TILE_RING; i++) gmm_mbarrier_init(gmm_fp8_tile_full(bars, i), 1);
#pragma unroll
    for (i = 0; i < GMM_SM90_TILE_RING; i++) gmm_mbarrier_init(gmm_fp8_tile_begun(bars, i), 1);
    if (GMM__TILES == 1) gmm_fp8_init_slots(slot_bars, GMM__CFG(consumers), GMM__CFG(store_boxes));
    if (GMM__CFG(predicts_first_tile)) {
        gmm_mbarrier_init(prediction + GMM__OFFSET(gmm_fp8_prediction, full), 1);
        gmm_mbarrier_init(prediction + GMM__OFFSET(gmm_fp8_prediction, peer_full), 1);
    }
    gmm_fence_mbarrier_init();
    gmm_prefetch_tensormap(&args->a);
    gmm_prefetch_tensormap(&args->b);
}
#endif
#endif

#if GMM__TILES > 0
GMM__ROW_KERNEL GMM__FP8_BOUNDS GMM__KERNEL_NAME(const __grid_constant__ gmm_fp8_args args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ __align__(1024) char gmm_shared[];
    GMM__SMEM *const smem = (GMM__SMEM *)gmm_shared;
    const uint32_t base = (uint32_t)__cvta_generic_to_shared(gmm_shared);
    const int role = ((int)threadIdx.x >> 5) - 4 * GMM__CFG(consumers), predicts = GMM__PART(gmm_fp8_predicts_)(&args);
    GMM__PART(gmm_fp8_init_)(&args, smem, base);
    gmm_cluster_arrive_release();
    if (!predicts || role != GMM_FP8_SCHEDULER_WARP) gmm_cluster_wait_acquire();
    if (role != GMM_FP8_SCHEDULER_WARP && !(predicts && role == GMM_FP8_PRODUCER_WARP)) gmm_griddepcontrol_wait();
    gmm_griddepcontrol_launch_dependents();

    if (role < 0) {
#if GMM__TILES == 2
        /* keeps addresses and wgmma descriptors in uniform registers; without it stages take 1% longer */
        const uint32_t base_of_consumers = __shfl_sync(0xFFFFFFFFu, base, 0);
        if (gmm_fp8_wait_choice(&smem->bars, GMM__SMEM_AT(bars))) {
            if (role >= -4 * GMM__IDLE_CONSUMERS) { /* the others cannot begin before they have its registers */
                GMM__SETMAXNREG_DEC((int)GMM_FP8_IDLE_REGS);
                return;
            }
            GMM__SETMAXNREG_INC(GMM__CFG_OF(1, consumer_regs));
            GMM__SECOND_PART(gmm_fp8_consume_tiles_)(&args, (GMM__SECOND_SMEM *)gmm_shared, base_of_consumers,
                                                     GMM__IDLE_CONSUMERS);
            return;
        }
#else
        const uint32_t base_of_consumers = base;
#endif
        if (GMM__SCALING_VALUE == GMM_FP8_1D1D && threadIdx.x >= 128) gmm_order_arrive(0); /* consumer 0 begins */
        GMM__SETMAXNREG_INC(GMM__CFG(consumer_regs));
        GMM__PART(gmm_fp8_consume_tiles_)(&args, smem, base_of_consumers, 0);
        return;
    }
    GMM__SETMAXNREG_DEC(GMM__CFG(other_regs));
    if (role == GMM_FP8_SCALE_WARP && !GMM__PART(gmm_fp8_has_stage_scales_)(&args)) return;
    if (role == GMM_FP8_SCHEDULER_WARP) GMM__PART(gmm_fp8_schedule_tiles_)(&args, smem, base);
#if GMM__TILES == 2
    else if (gmm_fp8_wait_choice(&smem->bars, GMM__SMEM_AT(bars)))
        GMM__SECOND_PART(gmm_fp8_move_tiles_)(&args, (GMM__SECOND_SMEM *)gmm_shared, base, role);
#endif
    else GMM__PART(gmm_fp8_move_tiles_)(&args, smem, base, role);
#endif
}
#endif
#undef GMM__WGMMA
#undef GMM__PASSES
#undef GMM__ACC
#undef GMM__COL_ALIGN
#undef GMM__LINE_SCALES
#undef GMM__STAGE_SCALE_BYTES
#undef GMM__ROW_SCALE_BYTES
#undef GMM__STAGE_SCALES
#undef GMM__SMEM_AT
#undef GMM__SMEM
#undef GMM__SCALING_VALUE
#undef GMM__CFG_OF
#undef GMM__IDLE_CONSUMERS
#undef GMM__SECOND_SMEM
#undef GMM__SECOND_PART
#undef GMM__PART
#undef GMM__INSTANCE
#undef GMM__CFG
#undef GMM__TILE
#undef GMM__TILES
#undef GMM__SECOND_TILE
#undef GMM__SCALING
#undef GMM__IS_FAST
#undef GMM__IS_1D1D
#undef GMM__KERNEL_NAME
#undef GMM__TAG
#undef GMM__ROW

/* ============================================================================== Bodies per source: quantization === */

#elif GMM__BODY == GMM__BODY_QUANTIZE_AMAX
#define GMM__KERNEL_NAME GMM__COLUMN(1, GMM__ROW)
#define GMM__TAG GMM__COLUMN(2, GMM__ROW)
#define GMM__NAME(stem) GMM__CAT(stem##_, GMM__TAG)
#define GMM__STATIC_DTYPE ((gmm_dtype)GMM__NAME(gmm__static_dtype))

/* Loads a tile of a strip into shared memory (unless x is NULL), with zeros beyond the last row and column, and
   returns the lane's amax of it. With `row_amaxes` it raises the amaxes of rows. A quantized source is dequantized to
   F32. */
GMM__DEVICE uint32_t GMM__NAME(gmm__quant_load)(const gmm__quant_args *a, const gmm__quant_strip *p, int64_t c0,
                                                int32_t n, int32_t row_amaxes, float *x) {
    const int32_t lane = gmm__lane(), count = n - 4 * lane;
    const int64_t size = GMM__STATIC_DTYPE == GMM_F32 ? 4 : 2;
    uint32_t *row_amax = (uint32_t *)a->row_amax + (a->grouped ? p->source_row : p->unit * p->rows) + p->row;
    uint32_t amax = 0;
    int32_t r;
    if (GMM__STATIC_DTYPE == GMM_F32 && a->src.scaling != GMM_SCALING_NONE) {
        const gmm__qview v = gmm__quant_copy(&a->src, GMM_ROWWISE, a->grouped, p, a->cols);
        const int32_t width = gmm_block_along(v.scaling);
        for (r = gmm__warp(); r < GMM_TILE; r += GMM__QUANT_WARPS) {
            float u[4];
            int32_t j;
            for (j = 0; j < 4; j++) {
                const int64_t c = c0 + 4 * lane + j, l = p->row + r;
                u[j] = 0.0f;
                if (r < p->m && j < count)
                    u[j] = gmm__qview_value(gmm_decode_small(v.dtype, gmm__qview_code(&v, l, c)),
                                            gmm__qview_factor(&v, l, width ? c / width : 0, 1));
            }
            amax = gmm__quant_row_amax(amax, u, row_amaxes && r < p->m ? row_amax + r : NULL);
            if (x) gmm__quant_store_row(x, r, u);
        }
    } else {
        const char *base = a->src.table ? (const char *)a->src.table[p->unit]
                                        : (const char *)a->src.data +
                                              (a->grouped ? 0 : p->unit * a->src.group_stride) * size;
        const int64_t first = p->source_row + p->row;
        const char *src = base + ((a->index.at ? 0 : first) * a->src.ld + c0) * size;
        const int32_t vec4 = gmm_vec4_aligned(GMM__STATIC_DTYPE, src, a->src.ld);
#pragma unroll 4
        for (r = gmm__warp(); r < GMM_TILE; r += GMM__QUANT_WARPS) {
            float u[4] = { 0.0f, 0.0f, 0.0f, 0.0f };
            const int32_t row = a->index.at && r < p->m ? gmm_checked_row(&a->index, first + r) : r;
            if (r < p->m && row >= 0 && count > 0)
                gmm_read4(GMM__STATIC_DTYPE, src + (row * a->src.ld + 4 * lane) * size, count, vec4, u);
            amax = gmm__quant_row_amax(amax, u, row_amaxes && r < p->m ? row_amax + r : NULL);
            if (x) gmm__quant_store_row(x, r, u);
        }
    }
    return amax;
}

/* Amaxes of units, rows and columns: atomic maxima on the bits of absolute values, so the result does not depend on
   the order. The destinations start at 0. A CTA processes one 128 x 128 tile at a time: warp w rows w, w + 8, ..., then
   columns w, w + 8, ...; lane l elements 4 l to 4 l + 3 of each. */
GMM__ROW_KERNEL __launch_bounds__(GMM__QUANT_THREADS, GMM__QUANT_PER_SM)
GMM__KERNEL_NAME(const __grid_constant__ gmm__quant_args a) {
    extern __shared__ float gmm__quant_shared[];
    if (gmm__quant_wait_skips(a.skip)) return;
    const int64_t tile_count = gmm__quant_strips(a.grouped, a.tiles, a.units, a.rows) * a.col_tiles;
    const int32_t transformed = a.format.hadamard && a.columnwise.dtype != GMM_NONE, lane = gmm__lane();
    int64_t tile_index;
    for (tile_index = blockIdx.x; tile_index < tile_count; tile_index += gridDim.x) {
        const gmm__quant_strip p = gmm__quant_strip_of(a.grouped, a.tiles, a.offsets, a.units, a.rows,
                                                       tile_index / a.col_tiles);
        const int64_t c0 = tile_index % a.col_tiles * GMM_TILE;
        const int32_t n = gmm__quant_extent(a.cols, c0);
        uint32_t amax[2] = { 0, 0 };
        int32_t l;
        amax[0] = GMM__NAME(gmm__quant_load)(&a, &p, c0, n, a.row_amax != NULL,
                                             transformed || a.col_amax ? gmm__quant_shared : NULL);
        __syncthreads();
        for (l = gmm__warp(); l < n && (transformed || a.col_amax); l += GMM__QUANT_WARPS) {
            float v[4];
            uint32_t bits;
            gmm__quant_load_col(gmm__quant_shared, l, transformed ? a.format.hadamard : 0, v);
            bits = gmm__quant_amax4(v);
            amax[1] = bits > amax[1] ? bits : amax[1];
            if (a.col_amax) {
                bits = __reduce_max_sync(0xFFFFFFFFu, bits);
                if (lane == 0) atomicMax((uint32_t *)a.col_amax + p.unit * a.cols + c0 + l, bits);
            }
        }
        amax[0] = __reduce_max_sync(0xFFFFFFFFu, amax[0]);
        amax[1] = __reduce_max_sync(0xFFFFFFFFu, amax[1]);
        if (lane == 0) atomicMax((uint32_t *)a.amax[0] + p.unit, amax[0]);
        if (lane == 0 && transformed) atomicMax((uint32_t *)a.amax[1] + p.unit, amax[1]);
        __syncthreads();
    }
}

#undef GMM__STATIC_DTYPE
#undef GMM__NAME
#undef GMM__KERNEL_NAME
#undef GMM__TAG
#undef GMM__ROW

/* ================================================================================= Bodies per source and format === */

#elif GMM__BODY == GMM__BODY_QUANTIZE
#define GMM__KERNEL_NAME GMM__COLUMN(1, GMM__ROW)
#define GMM__TAG GMM__COLUMN(2, GMM__ROW)
#define GMM__NAME(stem) GMM__CAT(stem##_, GMM__TAG)

/* Any format and shape, both copies of a 128 x 128 tile that is loaded into shared memory once: load, then for each
   copy amax, scale and codes line by line. Warp w has lines w, w + 8, ... of a copy, that is rows or columns, lane l
   elements 4 l to 4 l + 3 of each; a block lies in 4 (NV16), 8 (MX32) or 32 lanes. */
GMM__ROW_KERNEL __launch_bounds__(GMM__QUANT_THREADS, 2)
GMM__KERNEL_NAME(const __grid_constant__ gmm__quant_args a) {
    extern __shared__ float gmm__quant_shared[];
    __shared__ uint32_t square[2 * GMM__QUANT_SQUARES]; /* amaxes of square blocks, then their chosen scales */
    uint8_t *codes = (uint8_t *)gmm__quant_shared + GMM__QUANT_TILE_BYTES;
    if (gmm__quant_wait_skips(a.skip)) return;
    const int64_t tile_count = gmm__quant_strips(a.grouped, a.tiles, a.units, a.rows) * a.col_tiles;
    const int32_t width = gmm_block_along(a.format.scaling);
    int64_t tile_index;
    for (tile_index = blockIdx.x; tile_index < tile_count; tile_index += gridDim.x) {
        const gmm__quant_strip p = gmm__quant_strip_of(a.grouped, a.tiles, a.offsets, a.units, a.rows,
                                                       tile_index / a.col_tiles);
        const int64_t c0 = tile_index % a.col_tiles * GMM_TILE;
        const int32_t n = gmm__quant_extent(a.cols, c0);
        gmm__quant_copy_tile s;
        (void)GMM__NAME(gmm__quant_load)(&a, &p, c0, n, 0, gmm__quant_shared);
        __syncthreads();
        s.scale = a.format.delayed && a.scale ? a.scale[p.unit] : 1.0f;
        s.group = a.first_group + p.unit;
        if (a.rowwise.dtype != GMM_NONE) {
            s.view = gmm__quant_copy(&a.rowwise, GMM_ROWWISE, a.grouped, &p, a.cols);
            s.line0 = p.row;
            s.along0 = c0;
            s.lines = (int32_t)p.m;
            s.along = n;
            s.per_line = a.row_amax != NULL;
            s.amax = a.row_amax ? a.row_amax + (a.grouped ? p.source_row : p.unit * p.rows) + p.row
                                : a.amax[0] + p.unit;
            s.blocks_per_line = width ? gmm__ceil_div(a.cols, width) : 1;
            s.first_block = p.row * s.blocks_per_line + (width ? c0 / width : 0);
            gmm__quant_copy_tile_lines(&a, &s, gmm__quant_shared, square, codes);
            __syncthreads();
        }
        if (a.columnwise.dtype != GMM_NONE) {
            s.view = gmm__quant_copy(&a.columnwise, GMM_COLUMNWISE, a.grouped, &p, a.cols);
            s.line0 = c0;
            s.along0 = p.row;
            s.lines = n;
            s.along = a.grouped && !s.view.mn_major ? GMM_TILE : (int32_t)p.m;
            s.per_line = a.col_amax != NULL;
            s.amax = a.col_amax ? a.col_amax + p.unit * a.cols + c0 : a.amax[1] + p.unit;
            s.blocks_per_line = width ? gmm__ceil_div(p.rows, width) : 1;
            s.first_block = c0 * s.blocks_per_line + (width ? p.row / width : 0);
            gmm__quant_copy_tile_lines(&a, &s, gmm__quant_shared, square, codes);
            __syncthreads();
        }
    }
}

#undef GMM__NAME
#undef GMM__KERNEL_NAME
#undef GMM__TAG
#undef GMM__ROW

/* ======================================================================== Bodies per source: vectorized amaxes === */

#elif GMM__BODY == GMM__BODY_AMAX
#define GMM__KERNEL_NAME GMM__COLUMN(1, GMM__ROW)
#define GMM__SOURCE ((gmm_dtype)GMM__CAT(gmm__static_dtype_, GMM__COLUMN(2, GMM__ROW)))
#define GMM__HADAMARD GMM__COLUMN(3, GMM__ROW)

/* The same amaxes as gmm_quantize_amax, for sources whose rows are aligned vectors: either of units, or of rows and
   columns. A CTA processes tiles of 128 x 128; GMM__HADAMARD (BF16) also computes the amax of the transformed
   columnwise copy. Atomic maxima on the bits of absolute values make the result independent of the order.

       load           warp w: rows 32 (w % 4), columns 64 (w / 4) on; lane l: 8 rows from 8 (l / 8), 8 columns from
                      8 (l % 8) on of its warp's part (drawn in vectors.cuh)
       amaxes         of lines: thread r < 128: row r; thread 128 + c: column c. Of units: thread 0 that of the source,
                      thread 1 that of its transform */
GMM__ROW_KERNEL __launch_bounds__(GMM__QUANT_THREADS, GMM__HADAMARD ? 3 : GMM__SOURCE == GMM_F32 ? 2 : 4)
GMM__KERNEL_NAME(const __grid_constant__ gmm__quant_args a) {
    __shared__ uint32_t shared_max[2][GMM__QUANT_WARPS]; /* of the source, and of the transformed source */
    __shared__ uint32_t partials[2][4][GMM_TILE]; /* partial maxima: rows by halves, columns by quarters of the tile */
    gmm_cast_tile t = gmm_cast_tile_init(&a, GMM__SOURCE);
    if (gmm__quant_wait_skips(a.skip)) return;
    const gmm_warp_split split = gmm_cast_split(&a);
    int32_t strip;
    for (strip = (int32_t)blockIdx.y; strip < split.total; strip += (int32_t)gridDim.y) {
        uint32_t x[8][8];
        gmm_cast_tile_move(&t, &split, strip, 1);
        gmm_cast_load(&t, 0, x);
        if (!GMM__HADAMARD && (a.row_amax || a.col_amax)) { /* amaxes of units are not needed then */
            if (a.row_amax) gmm_amax_rows(&t, x, partials[0]);
            if (a.col_amax) gmm_amax_cols(&t, x, partials[1]);
            gmm_amax_store_lines(&t, partials);
        } else {
            gmm_amax_unit(&t, GMM__HADAMARD, x, shared_max);
            __syncthreads();
            gmm_amax_store_unit(&t, GMM__HADAMARD, shared_max);
        }
        if (strip + (int32_t)gridDim.y < split.total) __syncthreads();
    }
}

#undef GMM__KERNEL_NAME
#undef GMM__SOURCE
#undef GMM__HADAMARD
#undef GMM__ROW

/* ==================================================================== Bodies per source and scaling: vectorized === */

#elif GMM__BODY == GMM__BODY_SCALED
#define GMM__KERNEL_NAME GMM__COLUMN(1, GMM__ROW)
#define GMM__SOURCE ((gmm_dtype)GMM__CAT(gmm__static_dtype_, GMM__COLUMN(2, GMM__ROW)))
#define GMM__SCALING GMM__COLUMN(3, GMM__ROW)
#define GMM__SOURCE_OF GMM__COLUMN(4, GMM__ROW)
#define GMM__ACT (GMM__SOURCE_OF == GMM__CAST_OF_ACT)
#define GMM__GRADIENT (GMM__SOURCE_OF == GMM__CAST_OF_GRADIENT)

/* FP8 with fp32 scales (GMM__SCALING) in both directions from a tile of 128 x 128 that is loaded once. This variant
   serves aligned rows at the speed of memory; gmm_quantize serves the rest.

       load, encode   warp w: rows 32 (w % 4), columns 64 (w / 4) on; lane l: 8 rows from 8 (l / 8), 8 columns from
                      8 (l % 8) on of its warp's part (drawn in vectors.cuh)
       scales         thread r < 128: row r; thread 128 + c: column c

   GMM__ACT, GMM__GRADIENT: the source is computed (act_source.cuh); of a gradient a CTA has the tile of the gate
   columns and then that of the linear columns.
   TENSOR: load, scale of the unit, rows, columns. ROW: load, scales from given amaxes, rows, columns. 1X128 and
   128X128: load, maxima of the warps' parts, scales from them, rows, columns. */
GMM__ROW_KERNEL __launch_bounds__(GMM__QUANT_THREADS, GMM__SOURCE == GMM_F32 || GMM__GRADIENT ? 2 : 3)
GMM__KERNEL_NAME(const __grid_constant__ gmm__quant_args a) {
    __shared__ gmm_cast_fp8_scales smem_scales[2];
    __shared__ float smem_sums[GMM_CAST_SUM_PARTS * GMM_TILE];
    /* columnwise codes; with GMM__ACT first the lanes' slots of the activation, which all lanes have read by then */
    __shared__ __align__(16) uint8_t smem_codes[GMM__GRADIENT ? 16 : GMM__ACT ? GMM_CAST_ACT_SLOTS
                                                                              : GMM_CAST_FP8_CODES];
    extern __shared__ float gmm__quant_shared[]; /* GMM__GRADIENT: the slots, and codes in place of the first half */
    uint8_t *const codes = GMM__GRADIENT ? (uint8_t *)gmm__quant_shared : smem_codes;
    gmm_cast_tile t = gmm_cast_tile_init(&a, GMM__SOURCE);
    const int32_t thread = (int32_t)threadIdx.x, e5m2 = a.format.dtype == GMM_E5M2;
    const int sums = !GMM__ACT && GMM__SCALING != GMM_SCALING_128X128 && a.sums; /* 128X128 serves weights alone */
    const gmm_cast_fp8 c = { GMM__SCALING, GMM__SOURCE_OF, smem_scales, codes,
                             gmm_dtype_largest(e5m2 ? GMM_E5M2 : GMM_E4M3), e5m2 };
    if (gmm__quant_wait_skips(a.skip)) return;
    gmm_warp_split split = gmm_cast_split(&a);
    int32_t strip;
    if (GMM__SCALING == GMM_SCALING_TENSOR || GMM__SCALING == GMM_SCALING_ROW)
        gmm__quant_scales(&a, ((int64_t)blockIdx.y * gridDim.x + blockIdx.x) * GMM__QUANT_THREADS + thread,
                          (int64_t)gridDim.x * gridDim.y * GMM__QUANT_THREADS, 0);
    for (strip = (int32_t)blockIdx.y; strip < split.total; strip += (int32_t)gridDim.y) {
        uint32_t x[8][8];
        gmm_cast_tile_move(&t, &split, strip, 1);
        if (GMM__GRADIENT) {
            const int32_t h0 = t.c0;
            int32_t linear;
            gmm_cast_compute_gradient(&t, codes);
#pragma unroll 1
            for (linear = 0; linear <= a.act.gated; linear++) {
                if (linear) __syncthreads();
                gmm_cast_load_gradient(&t, h0, linear, codes, x);
                gmm_cast_fp8_tile(&c, &t, x, sums, smem_sums);
            }
        } else {
            if (GMM__ACT) gmm_cast_load_act(&t, codes, x);
            else gmm_cast_load(&t, 0, x);
            gmm_cast_fp8_tile(&c, &t, x, sums, smem_sums);
        }
        if (strip + (int32_t)gridDim.y >= split.total) break;
        __syncthreads();
        /* again, so that it takes no registers in the rest of the loop */
        if (GMM__ACT || GMM__GRADIENT) split = gmm_cast_split(&a);
    }
}

#undef GMM__KERNEL_NAME
#undef GMM__SOURCE
#undef GMM__SCALING
#undef GMM__ACT
#undef GMM__GRADIENT
#undef GMM__SOURCE_OF
#undef GMM__ROW

/* =========================================================================== Bodies per source: vectorized NV16 === */

#elif GMM__BODY == GMM__BODY_NV
#define GMM__KERNEL_NAME GMM__COLUMN(1, GMM__ROW)
#define GMM__SOURCE ((gmm_dtype)GMM__CAT(gmm__static_dtype_, GMM__COLUMN(2, GMM__ROW)))
#define GMM__HADAMARD GMM__COLUMN(3, GMM__ROW)

/* NV16 in both directions from tiles of 128 x 128 that are loaded once, GMM_CAST_TILES of them side by side per CTA.
   GMM__HADAMARD (BF16): the columnwise copy is transformed, or codes are rounded stochastically; a block of a column
   then lies in one lane. This variant serves aligned rows; gmm_quantize serves the rest, and scales chosen by error.

       load, encode   warp w: rows 32 (w % 4), columns 64 (w / 4) on; lane l: 8 rows from 8 (l / 8), 8 columns from
                      8 (l % 8) on of its warp's part (drawn in vectors.cuh)
       block scales   of rows: lanes l and l ^ 1, four rows each; of columns: lanes l and l ^ 8, four columns each
       columns stored thread t: 16 bytes number t % 4 of columns t / 4, t / 4 + 64 */
GMM__ROW_KERNEL __launch_bounds__(GMM__QUANT_THREADS, GMM__SOURCE == GMM_F32 || GMM__HADAMARD ? 2 : 3)
GMM__KERNEL_NAME(const __grid_constant__ gmm__quant_args a) {
    __shared__ float encodes[2][GMM_TILE];
    __shared__ float smem_sums[GMM_CAST_SUM_PARTS * GMM_TILE];
    __shared__ __align__(16) uint8_t codes[GMM_CAST_NV16_CODES];
    __shared__ __align__(16) uint8_t scales[GMM_TILE * GMM_TILE_BLOCKS];
    gmm_cast_tile t = gmm_cast_tile_init(&a, GMM__SOURCE);
    const int32_t separate_amax = t.columnwise && a.amax[1] != a.amax[0];
    gmm_cast_nv16 c = { gmm__lane() & 1, gmm__lane() >> 3 & 1, encodes[0], encodes[separate_amax], codes, scales,
                        0, 0, 0, 0 };
    int32_t strip;
    if (gmm__quant_wait_skips(a.skip)) return;
    gmm__quant_scales(&a, ((int64_t)blockIdx.y * gridDim.x + blockIdx.x) * GMM__QUANT_THREADS + threadIdx.x,
                      (int64_t)gridDim.x * gridDim.y * GMM__QUANT_THREADS, 0);
    for (strip = (int32_t)blockIdx.y;; strip += (int32_t)gridDim.y) {
        /* recomputed for each strip, so that it takes no registers in the loop body */
        const gmm_warp_split split = gmm_cast_split(&a);
        uint32_t x[8][8];
        int32_t end;
        if (strip >= split.total) break;
        gmm_cast_tile_move(&t, &split, strip, GMM_CAST_TILES);
        gmm_cast_nv16_move(&c, &t);
        end = t.cols - t.c0 < GMM_CAST_TILES * GMM_TILE ? t.cols : t.c0 + GMM_CAST_TILES * GMM_TILE;
        gmm_cast_load(&t, 1, x);
        gmm_cast_nv16_tables(&t, separate_amax, encodes);
        __syncthreads();
        for (; t.c0 < end; t.c0 += GMM_TILE) {
            uint32_t row[8], scales4[2], square_codes[8], lane_scales, has_nan = 0, square_max = 0;
            gmm_cast_tile next = t;
            const int32_t square = !GMM__HADAMARD && a.format.square;
            gmm_cast_tile_at(&t, t.c0);
            if (a.sums) {
                gmm_cast_column_sums(&t, 8, 8, 8, x[0], GMM_TILE, smem_sums);
                __syncthreads();
                gmm_cast_store_sums(&t, GMM_TILE, smem_sums);
                __syncthreads();
            }
            if (t.rowwise || !GMM__HADAMARD) {
                has_nan = gmm_cast_nv16_row_maxima(GMM__SOURCE, GMM__HADAMARD, x, row);
                if (square) square_max = gmm_cast_nv16_square_max(&t, row);
                lane_scales = gmm_cast_nv16_row_scales(&c, row, !GMM__HADAMARD, scales4);
                if (square) gmm_cast_nv16_encode_square(&c, &t, x, scales4, square_codes);
                if (t.rowwise) gmm_cast_nv16_store_row_scales(&c, &t, lane_scales);
                if (t.rowwise && GMM__HADAMARD) gmm_cast_nv16_encode_rows_random(&c, &t, x, scales4);
                else if (t.rowwise && t.in_cols) gmm_cast_nv16_encode_rows(&c, &t, x, scales4, square_codes, has_nan);
            }
            if (t.columnwise && GMM__HADAMARD) gmm_cast_nv16_encode_cols_hadamard(&c, &t, x);
            else if (t.columnwise) gmm_cast_nv16_encode_cols(&c, &t, x, square_max, square_codes, has_nan);
            gmm_cast_tile_at(&next, t.c0 + GMM_TILE);
            if (next.c0 < end) gmm_cast_load(&next, 1, x); /* while codes are stored */
            if (t.columnwise) gmm_cast_nv16_store_cols(&c, &t);
        }
        __syncthreads();
    }
}

#undef GMM__KERNEL_NAME
#undef GMM__SOURCE
#undef GMM__HADAMARD
#undef GMM__ROW

/* =========================================================================== Bodies per source: vectorized MX32 === */

#elif GMM__BODY == GMM__BODY_MX
#define GMM__KERNEL_NAME GMM__COLUMN(1, GMM__ROW)
#define GMM__SOURCE ((gmm_dtype)GMM__CAT(gmm__static_dtype_, GMM__COLUMN(2, GMM__ROW)))

/* MX32 in both directions from one load; warps synchronize for column sums alone. This variant serves aligned rows;
   gmm_quantize serves the rest, and E2M1. w: elements in 16 bytes of the source.

       load, encode   warp i: rows 32 (i % 4), columns 16 w (i / 4) on; lane l: 16 rows from 16 (l / 16), w columns from
                      w (l % 16) on of its warp's part (drawn in stages_mx32.cuh)
       block scales   of rows: 32 / w adjacent lanes, w / 2 rows each; of columns: lanes l and l ^ 16, w / 2
                      columns each */
GMM__ROW_KERNEL __launch_bounds__(GMM__QUANT_THREADS, 2)
GMM__KERNEL_NAME(const __grid_constant__ gmm__quant_args a) {
    gmm_cast_tile t = gmm_cast_mx32_tile_init(&a, GMM__SOURCE);
    enum { COLS = 32 * (GMM__SOURCE == GMM_F32 ? 4 : 8) }; /* of a tile */
    __shared__ float smem_sums[GMM_CAST_SUM_PARTS * COLS];
    const int32_t e5m2 = a.format.dtype == GMM_E5M2;
    const gmm_cast_mx32 c = { gmm_f32_from_bits(e5m2 ? 0x37924925u /* 1 / 57344 */ : 0x3B124925u /* 1 / 448 */),
                              e5m2 };
    int32_t strip;
    if (gmm__quant_wait_skips(a.skip)) return;
    for (strip = (int32_t)blockIdx.y;; strip += (int32_t)gridDim.y) {
        /* recomputed for each strip, so that it takes no registers in the loop body */
        const gmm_warp_split split = gmm_cast_split(&a);
        uint32_t x[16][4], row[16], square_max = 0, lane_scales = 0, scales4[4];
        if (strip >= split.total) break;
        gmm_cast_tile_move(&t, &split, strip, gmm__elems16(GMM__SOURCE) / 4);
        gmm_cast_load_rows(&t, 1, 16, 4, 4, x[0]);
        if (a.sums) {
            gmm_cast_column_sums(&t, 16, COLS / 32, 4, x[0], COLS, smem_sums);
            __syncthreads();
            gmm_cast_store_sums(&t, COLS, smem_sums);
            __syncthreads();
        }
        if (t.rowwise || a.format.square) {
            gmm_cast_mx32_row_maxima(GMM__SOURCE, x, row);
            if (a.format.square) square_max = gmm_cast_mx32_square_max(&t, row);
            lane_scales = gmm_cast_mx32_row_scales(&c, GMM__SOURCE, row);
        }
        if (t.rowwise) {
            gmm_cast_mx32_store_row_scales(&t, lane_scales);
            gmm_cast_mx32_gather_row_scales(GMM__SOURCE, lane_scales, scales4);
            if (t.in_cols) gmm_cast_mx32_encode(&c, &t, 0, x, scales4);
        }
        if (t.columnwise) {
            gmm_cast_mx32_store_col_scales(&t, gmm_cast_mx32_col_scales(&c, &t, x, square_max), scales4);
            if (t.in_cols) gmm_cast_mx32_encode(&c, &t, 1, x, scales4);
        }
    }
}

#undef GMM__KERNEL_NAME
#undef GMM__SOURCE
#undef GMM__ROW

#else
#error "gmm: GMM__BODY is none of the values GMM__BODY_*"
#endif
/* --------------------------------------------------------------------------------------------------- Licence ---
 * MIT License, text in the file LICENSE of the repository and below.
 *
 * Permission is hereby granted, free of charge, to any person obtaining a copy of this software and associated
 * documentation files (the "Software"), to deal in the Software without restriction, including without limitation the
 * rights to use, copy, modify, merge, publish, distribute, sublicense, and/or sell copies of the Software, and to
 * permit persons to whom the Software is furnished to do so, subject to the following conditions: The above copyright
 * notice and this permission notice shall be included in all copies or substantial portions of the Software.
 *
 * THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR IMPLIED, INCLUDING BUT NOT LIMITED TO THE
 * WARRANTIES OF MERCHANTABILITY, FITNESS FOR A PARTICULAR PURPOSE AND NONINFRINGEMENT. IN NO EVENT SHALL THE AUTHORS
 * OR COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR
 * OTHERWISE, ARISING FROM, OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE SOFTWARE.
 */
