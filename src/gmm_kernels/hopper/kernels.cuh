#define GMM__BODY 9
#define GMM__ARGS gmm_sm90_args
#define GMM__TAG bf16
#define GMM__DTYPE GMM_BF16
#define GMM__OP fwd
#define GMM__NO_KERNEL
#define GMM__TILE 160x256
#include GMM_KERNELS_FILE
#define GMM__KERNEL_NAME gmm_gemm_fwd_bf16_160x256x64_256x128x64_sm90
#define GMM__ALT_TILE 160x256
#define GMM__TILE 256x128
#include GMM_KERNELS_FILE
#define GMM__KERNEL_NAME gmm_gemm_fwd_bf16_176x128x64_sm90
#define GMM__TILE 176x128
#include GMM_KERNELS_FILE
#define GMM__KERNEL_NAME gmm_gemm_fwd_bf16_mxfp8_192x128x64_sm90
#define GMM__TILE mx8_192x128
#include GMM_KERNELS_FILE
#define GMM__KERNEL_NAME gmm_gemm_fwd_bf16_mxfp4_192x128x64_sm90
#define GMM__TILE mx4_192x128
#include GMM_KERNELS_FILE
#define GMM__KERNEL_NAME gmm_gemm_fwd_bf16_nvfp4_192x128x64_sm90
#define GMM__TILE nv4_192x128
#include GMM_KERNELS_FILE
#define GMM__KERNEL_NAME gmm_gemm_fwd_bf16_mxfp8_48x128x64_sm90
#define GMM__TILE mx8_48x128
#include GMM_KERNELS_FILE
#define GMM__KERNEL_NAME gmm_gemm_fwd_bf16_mxfp4_64x128x64_sm90
#define GMM__TILE mx4_64x128
#include GMM_KERNELS_FILE
#define GMM__KERNEL_NAME gmm_gemm_fwd_bf16_nvfp4_64x128x64_sm90
#define GMM__TILE nv4_64x128
#include GMM_KERNELS_FILE
#undef GMM__OP
#define GMM__OP dgrad
#define GMM__NO_KERNEL
#define GMM__TILE 160x256
#include GMM_KERNELS_FILE
#define GMM__KERNEL_NAME gmm_gemm_dgrad_bf16_160x256x64_256x128x64_sm90
#define GMM__ALT_TILE 160x256
#define GMM__TILE 256x128
#include GMM_KERNELS_FILE
#define GMM__KERNEL_NAME gmm_gemm_dgrad_bf16_176x128x64_sm90
#define GMM__TILE 176x128
#include GMM_KERNELS_FILE
#undef GMM__OP
#define GMM__OP wgrad
#define GMM__KERNEL_NAME gmm_gemm_wgrad_bf16_192x128x64_sm90
#define GMM__TILE 192x128
#include GMM_KERNELS_FILE
#define GMM__KERNEL_NAME gmm_gemm_wgrad_bf16_128x128x64_sm90
#define GMM__TILE 128x128
#include GMM_KERNELS_FILE
#undef GMM__OP
#undef GMM__TAG
#undef GMM__DTYPE
#define GMM__TAG f16
#define GMM__DTYPE GMM_F16
#define GMM__OP fwd
#define GMM__NO_KERNEL
#define GMM__TILE 160x256
#include GMM_KERNELS_FILE
#define GMM__KERNEL_NAME gmm_gemm_fwd_f16_160x256x64_256x128x64_sm90
#define GMM__ALT_TILE 160x256
#define GMM__TILE 256x128
#include GMM_KERNELS_FILE
#define GMM__KERNEL_NAME gmm_gemm_fwd_f16_176x128x64_sm90
#define GMM__TILE 176x128
#include GMM_KERNELS_FILE
#undef GMM__OP
#define GMM__OP dgrad
#define GMM__NO_KERNEL
#define GMM__TILE 160x256
#include GMM_KERNELS_FILE
#define GMM__KERNEL_NAME gmm_gemm_dgrad_f16_160x256x64_256x128x64_sm90
#define GMM__ALT_TILE 160x256
#define GMM__TILE 256x128
#include GMM_KERNELS_FILE
#define GMM__KERNEL_NAME gmm_gemm_dgrad_f16_176x128x64_sm90
#define GMM__TILE 176x128
#include GMM_KERNELS_FILE
#undef GMM__OP
#define GMM__OP wgrad
#define GMM__KERNEL_NAME gmm_gemm_wgrad_f16_192x128x64_sm90
#define GMM__TILE 192x128
#include GMM_KERNELS_FILE
#define GMM__KERNEL_NAME gmm_gemm_wgrad_f16_128x128x64_sm90
#define GMM__TILE 128x128
#include GMM_KERNELS_FILE
#undef GMM__OP
#undef GMM__TAG
#undef GMM__DTYPE
#undef GMM__ARGS
#undef GMM__BODY

