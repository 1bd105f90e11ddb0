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

#define GMM__CAT_(a, b) a##b
#define GMM__CAT(a, b) GMM__CAT_(a, b)
#define GMM__DEVICE static __device__ __forceinline__
#define GMM__KERNEL static __global__ GMM__UNUSED void

