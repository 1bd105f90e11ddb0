/* -------------------------------------------------------------------------------------------- 12 Implementation --- */

#if defined(GMM_IMPLEMENTATION) && !defined(GMM__GTP_IMPLEMENTATION_DONE)
#define GMM__GTP_IMPLEMENTATION_DONE

#include "gmm.h" /* its implementation, where the declarations alone came before GMM_IMPLEMENTATION */
#include <string.h>
#include <time.h>
#ifdef GMM_WITH_CPU_RANKS
#include <pthread.h>
#endif
#if defined(__CUDACC__) && defined(GMM_WITH_NCCL)
#include <nccl.h>
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* Bytes of a descriptor that both sides know; 0 after recording why there are none. */
static size_t gmm__gtp_known(const char *fn, const char *name, const void *given, size_t size, gmm_status *status,
                             gmm_error *error) {
    uint32_t stated;
    if (!given) {
        *status = gmm__fail(error, GMM_E_NULL, "%s: %s is NULL", fn, name);
        return 0;
    }
    memcpy(&stated, given, sizeof stated); /* struct_size comes first everywhere */
    if (stated > size || (stated > 0 && stated < sizeof stated)) {
        *status = gmm__fail(error, GMM_E_VERSION, "%s: %s->struct_size is %u: must be 0 or at most %zu", fn, name,
                            stated, size);
        return 0;
    }
    return stated ? stated : size;
}

/* Copies a descriptor; fields that an older caller lacks become 0. */
static gmm_status gmm__gtp_open(const char *fn, const char *name, const void *given, void *copy, size_t size,
                                gmm_error *error) {
    gmm_status status = GMM_OK;
    const size_t known = gmm__gtp_known(fn, name, given, size, &status, error);
    if (known) {
        memset(copy, 0, size);
        memcpy(copy, given, known);
    }
    return status;
}

