/* -------------------------------------------------------------------------------------------- 12 Implementation --- */

/* Opens the implementation: includes, and the copying of descriptors.

   Names of locals in all parts: fn is the name of the public function, for messages; g or gtp is the runtime object, d
   a domain, b a bundle, w a weight, c a communicator or a configuration; s is a gmm_status. */

#if defined(GMM_IMPLEMENTATION) && !defined(GMM__GTP_IMPLEMENTATION_DONE) && GMM__HOLDS(2)
#define GMM__GTP_IMPLEMENTATION_DONE

#include "gmm.h" /* its implementation, if only its declarations were included before GMM_IMPLEMENTATION */
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

/* Bytes of a descriptor that caller and implementation both know; 0 = invalid, for the reason in *status. */
static size_t gmm__gtp_common_size(const char *fn, const char *name, const void *desc, size_t size, gmm_status *status,
                                   gmm_error *error) {
    char rule[96];
    uint32_t stated;
    if (!desc) {
        *status = gmm__fail(error, GMM_E_NULL, "%s: %s is NULL", fn, name);
        return 0;
    }
    memcpy(&stated, desc, sizeof stated); /* struct_size is the first member of every descriptor */
    if ((*status = gmm__check_size(stated, size, rule)) != GMM_OK) {
        *status = gmm__fail(error, *status, "%s: %s->%s", fn, name, rule);
        return 0;
    }
    return stated ? stated : size;
}

/* Copies a descriptor; fields that an older caller lacks become 0. */
static gmm_status gmm__gtp_read(const char *fn, const char *name, const void *desc, void *copy, size_t size,
                                gmm_error *error) {
    gmm_status status = GMM_OK;
    const size_t common = gmm__gtp_common_size(fn, name, desc, size, &status, error);
    if (common) {
        memset(copy, 0, size);
        memcpy(copy, desc, common);
    }
    return status;
}

