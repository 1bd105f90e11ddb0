/* gmm_gtp.h - v0.1.0 - Generalized Tensor Parallelism for weights: plans, communicators, CPU ranks, runtime - MIT
 * SPDX-License-Identifier: MIT
 *
 * Quick start (C11 or C++17):
 *
 *     #define GMM_IMPLEMENTATION          // in exactly one .c or .cu file of the program
 *     #include "gmm_gtp.h"
 *
 *     const int64_t gate_up[2] = {14336, 14336};
 *     gmm_shard shard = GMM_ZERO;         // what rank 3 of 8 keeps of a gated FC1 in bf16
 *     shard.dtype = GMM_BF16; shard.rows = 28672; shard.cols = 4096; shard.gtp_size = 8; shard.gtp_rank = 3;
 *     shard.section_rows = gate_up; shard.sections = 2;
 *     gmm_shard_plan plan = GMM_ZERO;
 *     gmm_gtp_plan(&shard, &plan, NULL);  // plan.shard_rows, plan.row0, plan.shard_data_bytes[GMM_ROWWISE]
 *
 * CONTENTS
 *     1  Shard plans      4  Seeds               7  CPU ranks       10  Runtime
 *     2  Extents          5  Memory, forecast    8  NCCL            11  Checkpoints
 *     3  Process grids    6  Communicators       9  Peer copies     12  Implementation, 13 Licence
 *
 * CONFIGURATION (beside gmm_quant.h's and gmm.h's; define where GMM_IMPLEMENTATION is)
 *     GMM_WITH_CPU_RANKS   CPU ranks, which need POSIX threads (pthread.h, -pthread). Without it gmm_ranks_create is
 *                          GMM_E_BUILD, and no header of theirs is included.
 *     GMM_WITH_NCCL        Communicators of NCCL (nccl.h, -lnccl), where nvcc compiles GMM_IMPLEMENTATION. Without it
 *                          gmm_nccl_open is GMM_E_BUILD.
 *
 * THE SHARDING RULE
 *     Tensor parallelism (TP) first shards a weight [N, K]: by rows (column-parallel), by columns (row-parallel), or
 *     not at all. The shard of one TP rank is its local matrix. Generalized tensor parallelism (GTP) shards the local
 *     matrix by rows over g ranks: it is padded at its end to a multiple of unit * g rows, and rank r has the padded
 *     rows [r * shard_rows, (r + 1) * shard_rows). All ranks have equally many rows, since collectives need equal
 *     counts; the last ranks may have padding only. Before a GEMM the g shards are all-gathered in the order of ranks
 *     into padded_rows rows, of which the GEMM reads the first local_rows in place. With a GTP size of 1 the local
 *     matrix is neither padded nor gathered.
 *
 *     Sections are parts of a weight that TP shards separately, such as gate and up of a gated FC1: the local matrix is
 *     the TP slice of the first section, then that of the second, and so on. GTP pads and shards these together, so
 *     that all padding is at the end and a GEMM reads one dense operand. A shard may therefore begin and end inside any
 *     section; its extents are the logical rows that it holds. Logical rows are those of the whole, unpadded weight.
 *     Checkpoints store logical rows and no padding, so that one file loads at every TP and GTP size.
 *
 *     Padding rows are zeros after initialisation and loading, so are their gradients, and norms skip them: only the
 *     first valid_rows rows of a shard count.
 *
 *     The scale of a gradient is never derived from a group size: reductions take it as an argument in fp32.
 *
 * Thread safety: sections 1 to 5 and 11 are pure or write only through their arguments. Communicators and the runtime
 * serve one thread at a time each. Memory is allocated only by functions that make CPU ranks, communicators, events and
 * checkpoint plans.
 *
 * REVISIONS (full list: CHANGELOG.md)
 *     0.1.0  first version
 */
#ifndef GMM_MOE_GTP_H_INCLUDED
#define GMM_MOE_GTP_H_INCLUDED

#include "gmm.h"

GMM_QUIET_BEGIN
#ifdef __cplusplus
extern "C" {
#endif

