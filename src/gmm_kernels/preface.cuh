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

