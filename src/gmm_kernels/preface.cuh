/* gmm_kernels.cuh - v0.1.0 - device kernels of mixture-of-experts compute and their launchers - MIT
 * SPDX-License-Identifier: MIT
 *
 * Quick start: none of its own. The CUDA half of gmm.h's implementation includes this file; nothing else does.
 *
 * CONTENTS
 *     Tables and launchers    common helpers, the split kernel, grouped products (portable; on Hopper), bias
 *                             gradient, rows (activation, routing, permute, pad, gated layout, quantization,
 *                             accumulate, convert)
 *     Bodies 1 to 15          the file includes itself once per row of a table, with GMM__BODY and the row's tags set:
 *                             1 product on tensor cores, 2 fp32 product, 3 bias gradient, 4 rows by precision,
 *                             5 rows by unit of copying, 6 amax by source, 7 casts by source and format, 8 wgmma
 *                             instruction, 9 product on Hopper, 10 product of quantized operands, 11 FP8 product on
 *                             Hopper, 12 amax, 13 to 15 casts of whole vectors. So a profiler and a debugger
 *                             see every line of a kernel.
 *
 * CONFIGURATION (before gmm.h)
 *     GMM_KERNELS_FILE   name under which this file finds itself; default "gmm_kernels.cuh". Set it if you rename it.
 *
 * Kernels are static, need sm_80, read group sizes on the device, and are launched with shapes that depend on
 * capacities alone; those on Hopper need sm_90a and are compiled empty elsewhere. Launchers take plain argument
 * structs, enqueue on the stream, and return cudaError_t. They keep no state. From sm_90 on, some kernels are launched
 * early (gmm_pdl_wait): they take their places while their predecessor in the stream ends, and wait for all of it.
 * Products: every output element accumulates in the order of k, whatever the tile, the grid or the other groups; no
 * floating-point atomics.
 *
 * REVISIONS (full list: CHANGELOG.md)
 *     0.1.0  first version
 */
#ifndef GMM__BODY
#ifndef GMM__GEMM_DONE
#define GMM__GEMM_DONE

