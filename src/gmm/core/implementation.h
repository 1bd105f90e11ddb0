/* -------------------------------------------------------------------------------------------- 14 Implementation --- */

/* Opens the implementation: includes and configuration.

   Names of locals in all parts: d is the call's own copy of its descriptor, with the defaults filled in; s is a
   gmm_status, e a cudaError_t; m is a gmm_mat, g a group, G the number of groups; K and N are the input and output
   features of a linear layer, and T is the capacity in rows. */

#if defined(GMM_IMPLEMENTATION) && !defined(GMM__IMPLEMENTATION_DONE)
#define GMM__IMPLEMENTATION_DONE

#include "gmm_quant.h" /* its implementation, where the declarations alone came before GMM_IMPLEMENTATION */
#include <stdlib.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#elif defined(__unix__) || defined(__APPLE__)
#include <unistd.h> /* sysconf */
#endif

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define GMM__X86
#include <immintrin.h>
#endif

#if defined(GMM_MALLOC) != defined(GMM_FREE)
#error "gmm: define both of GMM_MALLOC and GMM_FREE, or none"
#endif
#ifndef GMM_MALLOC
#define GMM_MALLOC(bytes) malloc(bytes)
#define GMM_FREE(memory) free(memory)
#endif

#ifdef GMM_WITH_NVTX
#include <nvtx3/nvToolsExt.h>
#endif
#ifdef __CUDACC__
#include <cuda_runtime.h>
#ifndef GMM_NO_CUBLASLT
#define GMM__CUBLASLT
#include <cublasLt.h>
#endif
#endif

#ifdef __cplusplus
extern "C" {
#endif

#ifdef __CUDACC__
#include "gmm_kernels.cuh"
#endif

