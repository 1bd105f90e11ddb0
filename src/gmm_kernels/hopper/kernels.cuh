#define GMM__BODY 9
#define GMM__ARGS gmm_sm90_args
#define GMM__TAG bf16
#define GMM__DTYPE GMM_BF16
#define GMM__OP fwd
#define GMM__FIRST
#define GMM__TILE 256x160
#include GMM_KERNELS_FILE
#define GMM__OTHER 256x160
#define GMM__TILE 128x256
#include GMM_KERNELS_FILE
#define GMM__TILE 128x176
#include GMM_KERNELS_FILE
#define GMM__TILE mx8_128x192
#include GMM_KERNELS_FILE
#define GMM__TILE mx4_128x192
#include GMM_KERNELS_FILE
#define GMM__TILE nv4_128x192
#include GMM_KERNELS_FILE
#define GMM__TILE mx8_128x48
#include GMM_KERNELS_FILE
#define GMM__TILE mx4_128x64
#include GMM_KERNELS_FILE
#define GMM__TILE nv4_128x64
#include GMM_KERNELS_FILE
#undef GMM__OP
#define GMM__OP dgrad
#define GMM__FIRST
#define GMM__TILE 256x160
#include GMM_KERNELS_FILE
#define GMM__OTHER 256x160
#define GMM__TILE 128x256
#include GMM_KERNELS_FILE
#define GMM__TILE 128x176
#include GMM_KERNELS_FILE
#undef GMM__OP
#define GMM__OP wgrad
#define GMM__TILE 128x192
#include GMM_KERNELS_FILE
#define GMM__TILE 128x128
#include GMM_KERNELS_FILE
#undef GMM__OP
#undef GMM__TAG
#undef GMM__DTYPE
#define GMM__TAG f16
#define GMM__DTYPE GMM_F16
#define GMM__OP fwd
#define GMM__FIRST
#define GMM__TILE 256x160
#include GMM_KERNELS_FILE
#define GMM__OTHER 256x160
#define GMM__TILE 128x256
#include GMM_KERNELS_FILE
#define GMM__TILE 128x176
#include GMM_KERNELS_FILE
#undef GMM__OP
#define GMM__OP dgrad
#define GMM__FIRST
#define GMM__TILE 256x160
#include GMM_KERNELS_FILE
#define GMM__OTHER 256x160
#define GMM__TILE 128x256
#include GMM_KERNELS_FILE
#define GMM__TILE 128x176
#include GMM_KERNELS_FILE
#undef GMM__OP
#define GMM__OP wgrad
#define GMM__TILE 128x192
#include GMM_KERNELS_FILE
#define GMM__TILE 128x128
#include GMM_KERNELS_FILE
#undef GMM__OP
#undef GMM__TAG
#undef GMM__DTYPE
#undef GMM__ARGS
#undef GMM__BODY

