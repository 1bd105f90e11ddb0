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

GMMDEF int32_t gmm_dtype_bits(gmm_dtype dtype) {
    switch (dtype) {
#define GMM__X(name, value, text, bits) case name: return bits;
        GMM_DTYPE_LIST(GMM__X)
#undef GMM__X
    default: return 0;
    }
}

GMMDEF const char *gmm_dtype_name(gmm_dtype dtype) {
    switch (dtype) {
#define GMM__X(name, value, text, bits) case name: return #text;
        GMM_DTYPE_LIST(GMM__X)
#undef GMM__X
    default: return "?";
    }
}

GMMDEF const char *gmm_scaling_name(gmm_scaling scaling) {
    switch (scaling) {
#define GMM__X(name, value, text, dtype, rows, cols) case name: return #text;
        GMM_SCALING_LIST(GMM__X)
#undef GMM__X
    default: return "?";
    }
}

GMMDEF const char *gmm_status_name(gmm_status status) {
    switch (status) {
#define GMM__X(name, value, text) case name: return #name;
        GMM_STATUS_LIST(GMM__X)
#undef GMM__X
    default: return "?";
    }
}

GMMDEF const char *gmm_status_string(gmm_status status) {
    switch (status) {
#define GMM__X(name, value, text) case name: return text;
        GMM_STATUS_LIST(GMM__X)
#undef GMM__X
    default: return "unknown status";
    }
}

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

