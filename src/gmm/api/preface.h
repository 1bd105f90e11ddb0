/* gmm.h - v0.1.0 - the experts of mixture-of-experts models: grouped linear, expert MLP, routing, on GPU and CPU - MIT
 * SPDX-License-Identifier: MIT
 *
 * Quick start (C11 or C++17; a .c unit holds the CPU engine, a .cu unit the CUDA engines too):
 *
 *     #define GMM_IMPLEMENTATION          // in exactly one .c or .cu file of the program
 *     #include "gmm.h"
 *
 *     gmm_context *ctx;                                         // y[r] = w[group of r] x[r]
 *     gmm_create(&ctx, NULL, NULL);                             // NULL: the CPU
 *     uint32_t fault = 0;                                       // what is wrong with the counts, as GMM_FAULT_* bits
 *     gmm_groups groups = GMM_ZERO;                             // 4 experts, their token counts in memory
 *     groups.count = 4; groups.capacity = 1024; groups.splits = counts; groups.dtype = GMM_I32; groups.fault = &fault;
 *     gmm_mat x = gmm_mat_packed(GMM_BF16, xs), w = gmm_mat_packed(GMM_BF16, ws), y = gmm_mat_packed(GMM_BF16, ys);
 *     gmm_linear lin = GMM_ZERO;
 *     lin.groups = &groups; lin.in_features = 512; lin.out_features = 2048; lin.x = &x; lin.w = &w; lin.y = &y;
 *     gmm_info info = GMM_ZERO;
 *     gmm_linear_query(ctx, GMM_OP_LINEAR_FWD, &lin, &info);    // info.workspace_bytes
 *     if (gmm_linear_fwd(ctx, &lin, workspace, info.workspace_bytes, NULL) != GMM_OK) puts(gmm_last_error(ctx));
 *     if (fault) puts("counts are negative, or exceed the capacity");
 *
 * CONTENTS
 *     1  Version, context, errors      6  Weight-gradient decisions     11  Quantization
 *     2  Operations, options, queries  7  Routing                       12  Runtime
 *     3  Grouped linear                8  Permute, unpermute, layer     13  Checkpoints
 *     4  Activation                    9  Pad, GLU interleave           14  Implementation
 *     5  Expert MLP                   10  Small operations              15  Implementation: checkpoints
 *                                                                       16  Licence
 *
 * CONFIGURATION (beside gmm_quant.h's; define where GMM_IMPLEMENTATION is)
 *     GMM_NO_CUBLASLT        under nvcc: leaves out the CUBLASLT engine, so that nothing links with -lcublasLt
 *     GMM_WITH_NVTX          an NVTX range, named by operation, engine and shapes, around what each call enqueues (an
 *                            MLP's has those of its steps inside); needs nvtx3/nvToolsExt.h of the CUDA toolkit
 *     GMM_MALLOC, GMM_FREE   host allocation of contexts where gmm_config has no allocator; both or none; default
 *                            malloc and free. Signatures: void *GMM_MALLOC(size_t), void GMM_FREE(void *)
 *
 * CONTRACTS OF EVERY OPERATION
 *     Shapes      Matrices are row-major. T is the capacity (rows of activation buffers), G the number of groups, K and
 *                 N the in and out features. A group has any number of rows >= 0; G, K and N are what the engine takes
 *                 (GPUs: below about 2^31).
 *     Splits      Group sizes may be in device memory. The host does not read them there, so that a captured graph can
 *                 be replayed with other sizes. Rows past their sum never influence a result and are kept or zeroed
 *                 (gmm_tail).
 *     Arithmetic  fp32 accumulation and one rounding at the store; bias, activation and probabilities in fp32.
 *     Order       The order in which an output element accumulates depends only on operation, dtypes, N, K and its own
 *                 group's rows: results are bitwise equal from run to run, for any thread count, and equal to the call
 *                 with that group alone. Different machines and engines may differ in the last bits. A query reports
 *                 the engine that serves a call.
 *     Memory      All memory is the caller's; operations allocate nothing. Context memory is host memory in a CPU
 *                 context and device memory in a GPU context. Descriptors are in host memory. Elements, splits, arrays,
 *                 the fault word, workspaces and buffers are in context memory, unless a field says otherwise, and
 *                 arrays and the fault word are aligned to their elements. A query reports the bytes of the workspace,
 *                 which is aligned to 256 bytes. Its contents are undefined before and after a call, and calls ordered
 *                 on one stream may share it.
 *     Overlap     Unless a function allows it, memory that a call writes (outputs, workspace, fault word) shares no
 *                 byte with other memory that it reads or writes (operands at full capacity, splits, arrays, pointer
 *                 tables), and the matrices of one output share no byte with one another. Bytes between the rows of a
 *                 matrix are not part of it: x and y may be the columns [0, K) and [K, 2K) of one buffer with ld 2K.
 *                 An overlap of addresses that the host can read is GMM_E_ARG before anything is written. Addresses in
 *                 tables in device memory are not checked.
 *     Stream      The last argument. GPU contexts enqueue on it and return; every call can be captured in a CUDA graph.
 *                 CPU contexts take NULL and have completed the work on return.
 *     Errors      Everything that the host can check is checked before anything is launched or written. On failure a
 *                 status is returned, and gmm_last_error(ctx) names function, argument, value, rule and shapes. Faulty
 *                 values in device memory set bits in gmm_groups.fault, and the call stays within bounds; a CPU context
 *                 does the same where it is given a fault word, and otherwise refuses a faulty split: GMM_E_SPLIT.
 *     Threads     A context serves one thread at a time; contexts are independent and cheap. No global state.
 *
 * REVISIONS (full list: CHANGELOG.md)
 *     0.1.0  first version
 */
#ifndef GMM_MOE_GMM_H_INCLUDED
#define GMM_MOE_GMM_H_INCLUDED

#include "gmm_quant.h"

GMM_QUIET_BEGIN
#ifdef __cplusplus
extern "C" {
#endif

