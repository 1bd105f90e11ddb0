/* The implementation as nvcc compiles it. Copy this file beside the headers, or write its three lines into your own. */
#define GMM_IMPLEMENTATION
#include "gmm.h"
#include "gmm_gtp.h"
