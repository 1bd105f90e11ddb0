/* .................................................................................................... Instances ... */

#define GMM__X(tag, dtype) enum { gmm__static_dtype_##tag = dtype };
GMM__ELEM_PRECISIONS(GMM__X)
#undef GMM__X
#define GMM__X(tag, type, bytes) typedef type gmm__unit_##tag;
GMM__ELEM_UNITS(GMM__X)
#undef GMM__X

#if GMM__HOLDS(0)
#define GMM__BODY GMM__BODY_PRECISION
/* precision */
#define GMM__ROW (bf16)
#include GMM_KERNELS_FILE
#ifndef GMM_NO_F16
#define GMM__ROW (f16)
#include GMM_KERNELS_FILE
#endif
#define GMM__ROW (f32)
#include GMM_KERNELS_FILE
#define GMM__ROW (any)
#include GMM_KERNELS_FILE
#undef GMM__BODY
#define GMM__BODY GMM__BODY_UNIT
/* unit */
#define GMM__ROW (b16)
#include GMM_KERNELS_FILE
#define GMM__ROW (b4)
#include GMM_KERNELS_FILE
#define GMM__ROW (b2)
#include GMM_KERNELS_FILE
#define GMM__ROW (b1)
#include GMM_KERNELS_FILE
#undef GMM__BODY
#endif /* GMM__HOLDS(0) */

