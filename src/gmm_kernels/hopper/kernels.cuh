/* Instances of the 16-bit Hopper product: a row of columns each. */
#define GMM__BODY GMM__BODY_PRODUCT
#define GMM__ARGS gmm_sm90_args
/* kernel, operation, tag and dtype of the operands, tile, tiles of the kernel (0: functions of a tile without a kernel,
   which the next row calls), second tile */
#if GMM__HOLDS(1)
#define GMM__ROW (gmm_no_kernel, fwd, bf16, GMM_BF16, 160x256, 0, none)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_gemm_fwd_bf16_160x256x64_256x128x64_sm90, fwd, bf16, GMM_BF16, 256x128, 2, 160x256)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_gemm_fwd_bf16_176x128x64_sm90, fwd, bf16, GMM_BF16, 176x128, 1, none)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_gemm_fwd_bf16_160x256x64_gather_sm90, fwd, bf16, GMM_BF16, gather_160x256, 1, none)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_gemm_fwd_bf16_256x128x64_short_sm90, fwd, bf16, GMM_BF16, short_256x128, 1, none)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_gemm_glu_bf16_176x128x64_sm90, glu, bf16, GMM_BF16, 176x128, 1, none)
#include GMM_KERNELS_FILE
#endif
#if GMM__HOLDS(2)
#define GMM__ROW (gmm_no_kernel, dgrad, bf16, GMM_BF16, 160x256, 0, none)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_gemm_dgrad_bf16_160x256x64_256x128x64_sm90, dgrad, bf16, GMM_BF16, 256x128, 2, 160x256)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_gemm_dgrad_bf16_176x128x64_sm90, dgrad, bf16, GMM_BF16, 176x128, 1, none)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_gemm_dgrad_bf16_160x256x64_gather_sm90, dgrad, bf16, GMM_BF16, gather_160x256, 1, none)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_gemm_dgrad_bf16_256x128x64_short_sm90, dgrad, bf16, GMM_BF16, short_256x128, 1, none)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_gemm_dglu_bf16_176x128x64_sm90, dglu, bf16, GMM_BF16, 176x128, 1, none)
#include GMM_KERNELS_FILE
#endif
#if GMM__HOLDS(6)
#define GMM__ROW (gmm_gemm_wgrad_bf16_192x128x64_sm90, wgrad, bf16, GMM_BF16, 192x128, 1, none)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_gemm_wgrad_bf16_128x128x64_sm90, wgrad, bf16, GMM_BF16, 128x128, 1, none)
#include GMM_KERNELS_FILE
#endif
#ifndef GMM_NO_QUANT
#if GMM__HOLDS(7)
#define GMM__ROW (gmm_gemm_fwd_bf16_mxfp8_192x128x64_sm90, fwd, bf16, GMM_BF16, mx8_192x128, 1, none)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_gemm_fwd_bf16_mxfp4_192x128x64_sm90, fwd, bf16, GMM_BF16, mx4_192x128, 1, none)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_gemm_fwd_bf16_nvfp4_192x128x64_sm90, fwd, bf16, GMM_BF16, nv4_192x128, 1, none)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_gemm_fwd_bf16_mxfp8_48x128x64_sm90, fwd, bf16, GMM_BF16, mx8_48x128, 1, none)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_gemm_fwd_bf16_mxfp4_64x128x64_sm90, fwd, bf16, GMM_BF16, mx4_64x128, 1, none)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_gemm_fwd_bf16_nvfp4_64x128x64_sm90, fwd, bf16, GMM_BF16, nv4_64x128, 1, none)
#include GMM_KERNELS_FILE
#endif
#endif
#ifndef GMM_NO_F16
#if GMM__HOLDS(3)
#define GMM__ROW (gmm_no_kernel, fwd, f16, GMM_F16, 160x256, 0, none)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_gemm_fwd_f16_160x256x64_256x128x64_sm90, fwd, f16, GMM_F16, 256x128, 2, 160x256)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_gemm_fwd_f16_176x128x64_sm90, fwd, f16, GMM_F16, 176x128, 1, none)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_gemm_fwd_f16_160x256x64_gather_sm90, fwd, f16, GMM_F16, gather_160x256, 1, none)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_gemm_fwd_f16_256x128x64_short_sm90, fwd, f16, GMM_F16, short_256x128, 1, none)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_gemm_glu_f16_176x128x64_sm90, glu, f16, GMM_F16, 176x128, 1, none)
#include GMM_KERNELS_FILE
#endif
#if GMM__HOLDS(4)
#define GMM__ROW (gmm_no_kernel, dgrad, f16, GMM_F16, 160x256, 0, none)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_gemm_dgrad_f16_160x256x64_256x128x64_sm90, dgrad, f16, GMM_F16, 256x128, 2, 160x256)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_gemm_dgrad_f16_176x128x64_sm90, dgrad, f16, GMM_F16, 176x128, 1, none)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_gemm_dgrad_f16_160x256x64_gather_sm90, dgrad, f16, GMM_F16, gather_160x256, 1, none)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_gemm_dgrad_f16_256x128x64_short_sm90, dgrad, f16, GMM_F16, short_256x128, 1, none)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_gemm_dglu_f16_176x128x64_sm90, dglu, f16, GMM_F16, 176x128, 1, none)
#include GMM_KERNELS_FILE
#endif
#if GMM__HOLDS(6)
#define GMM__ROW (gmm_gemm_wgrad_f16_192x128x64_sm90, wgrad, f16, GMM_F16, 192x128, 1, none)
#include GMM_KERNELS_FILE
#define GMM__ROW (gmm_gemm_wgrad_f16_128x128x64_sm90, wgrad, f16, GMM_F16, 128x128, 1, none)
#include GMM_KERNELS_FILE
#endif
#endif
#undef GMM__ARGS
#undef GMM__BODY
