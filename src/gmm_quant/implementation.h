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

/* Checks the struct_size of a caller's struct, of which this version has `size` bytes, and writes the rule that it
   breaks: GMM_E_ARG if it is too small for any version, GMM_E_VERSION if the caller's is newer. */
static GMM__UNUSED gmm_status gmm__check_size(uint32_t struct_size, size_t size, char rule[96]) {
    if (struct_size && struct_size < 2 * sizeof struct_size) {
        (void)snprintf(rule, 96, "struct_size %u is too small for any version; write = GMM_ZERO", struct_size);
        return GMM_E_ARG;
    }
    if (struct_size <= size) return GMM_OK;
    (void)snprintf(rule, 96, "struct_size %u is larger than the %u bytes of version %s; write = GMM_ZERO", struct_size,
                   (unsigned)size, GMM_VERSION_STRING);
    return GMM_E_VERSION;
}
/* Copies a descriptor that opens with struct_size; fields that an older caller lacks become 0. */
static GMM__UNUSED gmm_status gmm__read_sized(void *dst, size_t size, const void *src, char rule[96]) {
    uint32_t struct_size;
    gmm_status s;
    memcpy(&struct_size, src, sizeof struct_size);
    if ((s = gmm__check_size(struct_size, size, rule)) != GMM_OK) return s;
    memset(dst, 0, size);
    memcpy(dst, src, struct_size ? struct_size : size);
    return GMM_OK;
}
/* The same, or nothing where a check will refuse the descriptor: returns whether it was copied. */
static GMM__UNUSED int gmm__copy_sized(void *dst, size_t size, const void *src) {
    char rule[96];
    return gmm__read_sized(dst, size, src, rule) == GMM_OK;
}
/* Members behind the struct_size of a format that a recipe holds become 0, as where the format stands alone. */
static GMM__UNUSED void gmm__complete_recipe(gmm_recipe *recipe) {
    gmm_format *const f[3] = { &recipe->input, &recipe->weight, &recipe->grad };
    int i;
    for (i = 0; i < 3; i++) {
        const gmm_format given = *f[i];
        (void)gmm__copy_sized(f[i], sizeof *f[i], &given);
    }
}

