/* gmm.cpp - the implementation for the emulator. Peer copies between GPUs are left out: their kernels wait for other
   GPUs. */
#include "device.h"

#define GMM_IMPLEMENTATION
#include "gmm.h"
#undef __CUDACC__
#include "gmm_gtp.h"
