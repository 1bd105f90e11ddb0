/* A shared object that embeds the library and exports PLUGIN alone; check.sh builds it from two versions: beside the
   library's object, and with GMM_IMPLEMENTATION. */
#include "gmm.h"

unsigned PLUGIN(void);
unsigned PLUGIN(void) { return gmm_version_number(); }
