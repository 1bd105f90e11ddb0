/* The CPU implementation. Copy this file beside the headers, or write its three lines into a file of your own. */
#define GMM_IMPLEMENTATION
#include "gmm.h"
#include "gmm_gtp.h"
