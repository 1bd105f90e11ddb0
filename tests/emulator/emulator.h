/* emulator.h - runs CUDA kernels on the CPU, for tests on machines without a GPU: the threads of a CTA, or of the CTAs
   of a cluster, are fibers that a scheduler resumes in an order drawn at random, and that yield where they synchronize.
   Streams are synchronous. What is asynchronous (TMA, cp.async, wgmma) happens at a moment drawn at random between its
   issue and the wait for it. GMM_EMULATOR_SEED chooses the order.

   The implementation is compiled from its own sources, by a C++ compiler, with the parts that hold inline PTX replaced
   by those of this folder (build.sh); this library stands in the place of the CUDA runtime (runtime.cpp). What it does
   not show: speed, register use, what the hardware does with programs that are wrong (misaligned accesses, missing
   fences, too early launches of dependents), and rounding inside tensor cores, whose sums are fp32 here. */
#ifndef GMM_EMULATOR_H
#define GMM_EMULATOR_H

#include <cuda.h>
#include <stddef.h>
#include <stdint.h>
#include <vector_types.h>

enum {
    EMULATED_PROCESSORS = 4,
    EMULATED_SHARED_BYTES = 227 * 1024,
    EMULATED_CLUSTER = 2,             /* most CTAs of a cluster */
    EMULATED_SHARED_STRIDE = 1 << 18  /* between the shared memories of a cluster's CTAs; addresses are 32-bit */
};

/* A thread of the kernel that runs. */
typedef struct emulated_thread_state {
    uint3 thread_index, block_index;
    int cta, warp, lane; /* CTA of the cluster; warp of the CTA; lane */
} emulated_thread_state;
extern emulated_thread_state *emulated_thread;

typedef struct emulated_launch_state {
    dim3 grid, block;
    unsigned cluster;
    size_t shared_bytes;
    int programmatic; /* it may begin before its predecessor has ended */
} emulated_launch_state;
extern emulated_launch_state emulated_launch;

/* Runs a kernel whose only parameter is the structure at `args`, and returns when all of its CTAs have ended. */
void emulated_run(const void *kernel, const void *args, const emulated_launch_state *launch);
/* The name of a kernel in the symbol table of the program. */
const char *emulated_kernel_name(const void *kernel);
/* Prints what is wrong, with the kernel and the thread, and aborts. */
void emulated_fail(const char *format, ...) __attribute__((format(printf, 1, 2), noreturn));

/* Until the next call of this, threads of a programmatic launch find `early` at `at` until they wait for the launch
   before theirs; the wait ends when nothing else can go on. NULL: ends that. */
extern "C" void emulated_early_reads(void *at, const void *early, size_t bytes);

/* --- what device code calls --- */

/* griddepcontrol.wait */
void emulated_dependency_wait(void);

/* Lets other threads run. */
void emulated_yield(void);
/* Dynamic shared memory of this thread's CTA. */
void *emulated_dynamic_shared(void);
/* bar.sync of barrier `id` for `count` threads; 0: all threads of the CTA. _arrive does not wait. */
void emulated_barrier(int id, int count);
void emulated_barrier_arrive(int id, int count);
/* barrier.cluster: arrive, and wait for all threads of the cluster. */
void emulated_cluster_arrive(void);
void emulated_cluster_wait(void);

/* The values that the lanes of `mask` give, by lane, when all have come. Valid until this lane's next exchange. */
typedef struct emulated_value { unsigned char bytes[32]; } emulated_value;
const emulated_value *emulated_exchange(uint32_t mask, const void *mine, size_t bytes);

/* The address of `smem`, a 32-bit address in the shared memory of this CTA, in that of CTA `rank` of the cluster. */
uint32_t emulated_mapa(uint32_t smem, uint32_t rank);

/* mbarrier at a 32-bit address of shared memory. */
void emulated_mbarrier_init(uint32_t bar, uint32_t count);
void emulated_mbarrier_arrive(uint32_t bar, int32_t expect_bytes);
void emulated_mbarrier_complete(uint32_t bar, int32_t bytes);
void emulated_mbarrier_wait(uint32_t bar, uint32_t parity);
int emulated_mbarrier_test(uint32_t bar, uint32_t parity);

/* Operands of tensor cores. An instruction adds its products and d in double precision, and rounds the sum to fp32. */
typedef enum emulated_type { EMULATED_BF16, EMULATED_F16, EMULATED_E4M3, EMULATED_E5M2 } emulated_type;
/* mma.sync m16n8k16 with the registers of its lanes. */
void emulated_mma(emulated_type type, float d[4], const uint32_t a[4], const uint32_t *b);
/* wgmma. A descriptor addresses shared memory of this CTA with 128-byte swizzle, or, if K-major, without; mn_major: its
   tile is [k][mn].
   d = a b + d for `n8` blocks of eight columns of b, or d = a b without `adds`, at some time until the wait for its
   group: shared memory is read, and d is written, only then. `regs`: the registers of a, or NULL for `a`. */
typedef struct emulated_tile { uint64_t desc; int mn_major; emulated_type type; } emulated_tile;
void emulated_wgmma(int n8, float *d, const emulated_tile *a, const uint32_t *regs, const emulated_tile *b, int adds);
/* Calls of emulated_wgmma so far with `n8`: one per thread of the warp group. */
extern "C" int64_t emulated_wgmmas(int n8);
void emulated_wgmma_commit(void);
void emulated_wgmma_wait(int groups);

/* cp.async of `bytes` of `size` bytes, and zeros for the rest, at some time until the wait for its group or the arrival
   at a barrier that stands behind it. */
void emulated_cp_async(uint32_t smem, const void *src, int size, int bytes);
void emulated_cp_async_arrive(uint32_t bar);
void emulated_cp_async_commit(void);
void emulated_cp_async_wait(int groups); /* -1: all, committed or not */

/* TMA with maps of emulated_tensor_map: a load into the CTAs of the bits of `ctas`, and a store or an addition of fp32
   elements. Stores belong to the bulk group that the thread commits next. */
void emulated_tma_load(uint32_t smem, const CUtensorMap *map, uint32_t bar, uint32_t ctas, const int32_t at[4]);
void emulated_tma_store(const CUtensorMap *map, uint32_t smem, int add, const int32_t at[4]);
void emulated_bulk_commit(void);
void emulated_bulk_wait(int groups);
/* The function that cuTensorMapEncodeTiled stands for, of maps with four dimensions. */
CUresult emulated_tensor_map(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *base,
                             const cuuint64_t *dims, const cuuint64_t *strides, const cuuint32_t *box,
                             const cuuint32_t *element_strides, CUtensorMapInterleave interleave,
                             CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                             CUtensorMapFloatOOBfill fill);

#endif
