/* The implementation as nvcc compiles it. Copy this file beside the headers, or write its three lines into your own. To
   compile it faster, compile it N times side by side (N up to 8), with -DGMM_PARTS=N and -DGMM_PART=0 to N - 1, and link
   all objects. */
#define GMM_IMPLEMENTATION
#include "gmm.h"
#include "gmm_gtp.h"
