
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

