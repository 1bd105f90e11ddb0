/* gated.h - grouped products with a gated activation as epilogue, forward and backward: see gated_kernel.cu. */
#ifndef GATED_H
#define GATED_H
#include "gmm.h"

#include <cuda_runtime.h>

/* forward   z = x w^T (+ bias), h = prob silu(gate) linear of z
       x [T, k], w [G][2 ffn, k], bias [G][2 ffn]; d = z [T, 2 ffn], e = h [T, ffn]
   backward  dh = x w, dz = prob dh d(silu(gate) linear)/dz, h as above
       x [T, k], w [G][k, ffn], z [T, 2 ffn]; d = dh [T, ffn], e = dz [T, 2 ffn], h [T, ffn]
   Output j reads columns 16 (j / 8) + j % 8 of z (gate) and 8 more (linear). bf16, packed, rows 16-byte aligned;
   prob [T] fp32. bias, prob and outputs may be NULL. ffn is a multiple of 8, there are at most 256 groups, and splits
   are in device memory. */
typedef struct gated_call {
    int tile, backward;
    gmm_groups groups;
    int32_t ffn, k;
    const void *x, *w, *bias, *z;
    const float *prob;
    void *d, *e, *h;
    gmm_act act; /* SwiGLU, its settings */
} gated_call;
enum { gated_tiles = 3 };

#ifdef __cplusplus
extern "C" {
#endif
const char *gated_tile(int tile);
cudaError_t gated_run(const gated_call *call, cudaStream_t stream);
#ifdef __cplusplus
}
#endif
#endif
