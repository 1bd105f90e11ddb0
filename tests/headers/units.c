/* Two translation units of one program. FIRST has main; the other returns what its own copy of the header contains. */
#include "gmm.h"

#include "gmm_gtp.h"

#ifdef __cplusplus
extern "C"
#endif
gmm_status second_unit(uint32_t *version, char *text, size_t bytes);

#ifdef FIRST
int main(void) {
    gmm_context *ctx = NULL;
    char text[256];
    uint32_t version = 0;
    if (gmm_create(&ctx, NULL, NULL) != GMM_OK) return 1;
    gmm_destroy(ctx);
    if (second_unit(&version, text, sizeof text) != GMM_E_NULL) return 2;
    return version == gmm_version_number() && text[0] ? 0 : 3;
}
#else
gmm_status second_unit(uint32_t *version, char *text, size_t bytes) {
    gmm_context *ctx = NULL;
    gmm_status status;
    size_t i;
    *version = gmm_version_number();
    if (gmm_create(&ctx, NULL, NULL) != GMM_OK) return GMM_E_STATE;
    status = gmm_linear_fwd(ctx, NULL, NULL, 0, NULL);
    for (i = 0; i + 1 < bytes && gmm_last_error(ctx)[i]; i++) text[i] = gmm_last_error(ctx)[i];
    text[i] = 0;
    gmm_destroy(ctx);
    return status;
}
#endif
