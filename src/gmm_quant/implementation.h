#ifdef __cplusplus
}
#endif
GMM_QUIET_END
#endif /* GMM_MOE_QUANT_H_INCLUDED */

/* ----------------------------------------------------------------------------------------- 11 Implementation --- */

#if defined(GMM_IMPLEMENTATION) && !defined(GMM__QUANT_IMPLEMENTATION_DONE)
#define GMM__QUANT_IMPLEMENTATION_DONE

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Stores the failure in *error, unless that is NULL, and returns the status. */
static GMM__UNUSED gmm_status gmm__fail(gmm_error *error, gmm_status status, const char *format, ...) {
    if (error) {
        va_list list;
        va_start(list, format);
        error->status = status;
        (void)vsnprintf(error->text, sizeof error->text, format, list);
        va_end(list);
    }
    return status;
}

/* a * b for extents that are >= 0; returns 0 and leaves *out alone where the product does not fit. */
static GMM__UNUSED int gmm__mul(int64_t a, int64_t b, int64_t *out) {
    if (a < 0 || b < 0 || (b != 0 && a > INT64_MAX / b)) return 0;
    *out = a * b;
    return 1;
}

static GMM__UNUSED int64_t gmm__min_i64(int64_t a, int64_t b) { return a < b ? a : b; }

/* Copies a descriptor that opens with struct_size. Returns 0 if the caller's is newer than this version. */
static GMM__UNUSED int gmm__copy_sized(void *dst, size_t size, const void *src) {
    uint32_t struct_size;
    memcpy(&struct_size, src, sizeof struct_size);
    if (struct_size > size) return 0;
    memset(dst, 0, size);
    memcpy(dst, src, struct_size ? struct_size : size);
    return 1;
}

