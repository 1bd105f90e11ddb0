/* The implementation as nvcc compiles it. Copy this file beside the headers, or write its three lines into your own.
   N units that are compiled side by side, with -DGMM_PARTS=N (up to 8) and -DGMM_PART=0 to N - 1, take less time than
   one; all of them are linked. */
#define GMM_IMPLEMENTATION
#include "gmm.h"
#include "gmm_gtp.h"
