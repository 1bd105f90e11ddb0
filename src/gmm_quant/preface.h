/* gmm_quant.h - v0.1.0 - formats of mixture-of-experts compute: dtypes, operands, groups, codecs, layouts - MIT
 * SPDX-License-Identifier: MIT
 *
 * Quick start: gmm.h includes this header. Alone it serves for its codecs and layout queries:
 *
 *     #define GMM_IMPLEMENTATION          // in exactly one .c or .cu file of the program
 *     #include "gmm_quant.h"
 *
 *     uint16_t bits = gmm_f32_to_bf16(1.5f);
 *     gmm_layout lay = GMM_ZERO;          // bytes that a 2880 x 2880 MXFP8 weight takes, scales in 128x4 tiles
 *     gmm_layout_of(GMM_E4M3, GMM_SCALING_MX32, GMM_SCALES_SWIZZLED, GMM_ROWWISE, 2880, 2880, &lay, NULL);
 *
 * CONTENTS
 *     1  Linkage               5  Codecs                       9  Host quantizer
 *     2  Version               6  Layout queries              10  Activation arithmetic
 *     3  Status, dtypes        7  Quantization arithmetic     11  Implementation
 *     4  Operands and groups   8  Recipes                     12  Licence
 *
 * CONFIGURATION (define before the first gmm include of a translation unit)
 *     GMM_IMPLEMENTATION   once per program: this unit holds the functions. Never undefine it.
 *     GMM_STATIC           functions become static to this unit, which must define GMM_IMPLEMENTATION too.
 *     GMM_PARTS, GMM_PART  split the implementation over several units that compile side by side. Each of them defines
 *                          GMM_IMPLEMENTATION, the same GMM_PARTS (1 to 8), the same other macros, and its own GMM_PART
 *                          from 0 to GMM_PARTS - 1; all are linked. Results are those of one unit, to the bit.
 *     GMM_NO_QUANT         leaves out FP8, MX and NV formats: calls that compute with such operands or recipes, or save
 *                          E4M3, are refused with GMM_E_BUILD. Codecs, layouts and recipes remain.
 *     GMM_NO_F16           leaves out GPU kernels for F16: such operands are refused with GMM_E_BUILD in GPU contexts.
 *     GMMDEF               linkage of every function; default: extern with hidden visibility on ELF. Every unit of a
 *                          program must see the same value. Hidden means that another shared object cannot link
 *                          against these functions, and that two copies in one process never mix. For a shared object
 *                          that bindings load (dlsym, ctypes) export them:
 *                              #define GMMDEF extern __attribute__((visibility("default")))
 *                          gmm_create and other static inline functions are in the headers alone: gmm_create calls
 *                          gmm__create with GMM_VERSION_NUMBER.
 *
 * Thread safety: every function here is pure or writes only through its arguments.
 *
 * REVISIONS (full list: CHANGELOG.md)
 *     0.1.0  first version
 */
#ifndef GMM_MOE_QUANT_H_INCLUDED
#define GMM_MOE_QUANT_H_INCLUDED

#include <stddef.h>
#include <stdint.h>

/* The declarations are both C and C++, so they cast as C does, and private names hold two underscores, which C++
   reserves. Between these two macros, C++ compilers warn of neither. */
#if defined(__cplusplus) && defined(__clang__)
#define GMM_QUIET_BEGIN \
    _Pragma("clang diagnostic push") _Pragma("clang diagnostic ignored \"-Wunknown-warning-option\"") \
    _Pragma("clang diagnostic ignored \"-Wold-style-cast\"") \
    _Pragma("clang diagnostic ignored \"-Wreserved-identifier\"")
#define GMM_QUIET_END _Pragma("clang diagnostic pop")
#elif defined(__cplusplus) && defined(__GNUC__)
#define GMM_QUIET_BEGIN _Pragma("GCC diagnostic push") _Pragma("GCC diagnostic ignored \"-Wold-style-cast\"")
#define GMM_QUIET_END _Pragma("GCC diagnostic pop")
#else
#define GMM_QUIET_BEGIN
#define GMM_QUIET_END
#endif

GMM_QUIET_BEGIN

/* ------------------------------------------------------------------------------------------------- 1 Linkage --- */

#if defined(GMM_STATIC) && !defined(GMM_IMPLEMENTATION)
#error "gmm: GMM_STATIC needs GMM_IMPLEMENTATION before the first gmm include of the same file"
#endif

/* GMM__HOLDS(slice): whether this unit of a split implementation holds slice number `slice` of it. */
#if defined(GMM_PARTS) != defined(GMM_PART)
#error "gmm: GMM_PARTS and GMM_PART go together: define both, or none"
#elif !defined(GMM_PARTS)
#define GMM__HOLDS(slice) 1
#elif GMM_PARTS < 1 || GMM_PARTS > 8 || GMM_PART < 0 || GMM_PART >= GMM_PARTS
#error "gmm: GMM_PARTS must be 1 to 8, and GMM_PART 0 to GMM_PARTS - 1"
#elif defined(GMM_STATIC)
#error "gmm: GMM_STATIC needs the whole implementation in one unit; it does not go with GMM_PARTS"
#else
#define GMM__HOLDS(slice) ((slice) % GMM_PARTS == GMM_PART)
#endif

#if defined(__GNUC__) || defined(__clang__)
#define GMM__UNUSED __attribute__((unused))
#define GMM__HIDDEN __attribute__((visibility("hidden")))
#define GMM__FORCE_INLINE __inline__ __attribute__((always_inline))
/* For functions with many callers, whose copies would take seconds to compile. */
#define GMM__NOINLINE __attribute__((noinline)) GMM__UNUSED
#else
#define GMM__UNUSED
#define GMM__HIDDEN
#define GMM__FORCE_INLINE inline
#define GMM__NOINLINE
#endif

#ifndef GMMDEF
#ifdef GMM_STATIC
#define GMMDEF static GMM__UNUSED
#else
#define GMMDEF extern GMM__HIDDEN
#endif
#endif

/* Element arithmetic compiles for the host and, under nvcc, for the device. */
#ifdef __CUDACC__
#define GMM__HD static __host__ __device__ __forceinline__
#else
#define GMM__HD static GMM__FORCE_INLINE GMM__UNUSED
#endif

/* Zero initialiser of a descriptor that is clean in C11 and C++17: gmm_mat m = GMM_ZERO; */
#ifdef __cplusplus
#define GMM_ZERO {}
extern "C" {
#else
#define GMM_ZERO {0}
#endif

/* ------------------------------------------------------------------------------------------------- 2 Version --- */

#define GMM_VERSION_MAJOR 0 /* breaking interface changes */
#define GMM_VERSION_MINOR 1 /* new interfaces */
#define GMM_VERSION_PATCH 0 /* corrections */
#define GMM_VERSION_NUMBER (GMM_VERSION_MAJOR * 10000 + GMM_VERSION_MINOR * 100 + GMM_VERSION_PATCH)
#define GMM_VERSION_STRING "0.1.0"

