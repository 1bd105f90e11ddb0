/* Two ranks of one process: two GPUs with NCCL between them where there are two, else the CPU twice. */
#ifndef TWO_RANKS_H
#define TWO_RANKS_H

#include "gmm.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int two_gpus; /* 1: the ranks are GPUs */
static gmm_stream two_streams[2];

#ifdef HAVE_NCCL
#include <cuda_runtime.h>
#include <nccl.h>
static ncclComm_t two_comms[2];
#define TWO_GPUS(call) do { if (two_gpus && (call)) exit((fprintf(stderr, "failed: %s\n", #call), 1)); } while (0)
#else
#define TWO_GPUS(call) (void)0
#endif

static void two_ranks_open(void) {
#ifdef HAVE_NCCL
    int n = 0;
    two_gpus = cudaGetDeviceCount(&n) == cudaSuccess && n >= 2;
    TWO_GPUS(ncclCommInitAll(two_comms, 2, NULL));
    for (int i = 0; i < 2 && two_gpus; i++) {
        TWO_GPUS(cudaSetDevice(i));
        TWO_GPUS(cudaStreamCreate(&two_streams[i]));
    }
#endif
}

/* What follows concerns rank i, until the next call. */
static void two_ranks_use(int i) {
    (void)i;
    TWO_GPUS(cudaSetDevice(i));
}

static void two_ranks_wait(int i) {
    (void)i;
    TWO_GPUS(cudaStreamSynchronize(two_streams[i]));
}

/* Zeroed memory that the host and the ranks access. */
static void *two_ranks_memory(size_t bytes) {
    void *p = NULL;
    TWO_GPUS(cudaMallocManaged(&p, bytes, cudaMemAttachGlobal));
    if (!p && !(p = aligned_alloc(256, (bytes + 255) / 256 * 256))) exit(1);
    return memset(p, 0, bytes);
}

static gmm_config two_ranks_config(int i) {
    gmm_config config = GMM_ZERO;
    config.space = two_gpus ? GMM_SPACE_CUDA : GMM_SPACE_CPU;
    config.device = two_gpus ? i : 0;
    config.threads = two_gpus ? 0 : 1;
    return config;
}

/* Rank s sends counts[s][d] floats to rank d, those for rank 0 first; they arrive in the order of the senders. */
static void two_ranks_exchange(float *const from[2], float *const to[2], size_t counts[2][2]) {
    TWO_GPUS(ncclGroupStart());
    for (int s = 0; s < 2; s++)
        for (int d = 0; d < 2; d++) {
            const float *sent = from[s] + (d ? counts[s][0] : 0);
            float *received = to[d] + (s ? counts[0][d] : 0);
            TWO_GPUS(ncclSend(sent, counts[s][d], ncclFloat, d, two_comms[s], two_streams[s]));
            TWO_GPUS(ncclRecv(received, counts[s][d], ncclFloat, s, two_comms[d], two_streams[d]));
            if (!two_gpus) memcpy(received, sent, counts[s][d] * sizeof(float));
        }
    TWO_GPUS(ncclGroupEnd());
}

#endif
