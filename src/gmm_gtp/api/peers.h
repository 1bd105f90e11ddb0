/* ------------------------------------------------------------------------------------------------ 9 Peer copies --- */

/* Collectives by copies between the GPUs of one host, on their copy engines: no multiprocessor takes part in
   all_to_all, and in all_gather none but for the own part, since CUDA copies within a device with a kernel. They push
   into windows of the peers; hand-shakes are words in device memory that the streams themselves write and wait for.
   Matrices that lie evenly, such as those of a bundle, go in one copy to each rank. reduce_scatter is a sum over the
   peers' windows, in the order of ranks and in fp32; the values of all_reduce_max go through a box of the
   communicator's own. Calls are captured like any other work, and replays mix with calls. What all_gather and
   all_to_all receive, and what reduce_scatter sends, lies in a window, at the same offset on every rank. Windows, and
   what is sent, are memory of cudaMalloc: two-dimensional copies between GPUs may refuse virtual memory, which
   ncclMemAlloc gives. Whoever calls on several streams orders them. A stream that waits for a peer holds up what shares
   its hardware queue: with many streams, raise CUDA_DEVICE_MAX_CONNECTIONS above their number.
   Ranks are threads of one process, or processes: then windows must have 2 MiB or more, which CUDA IPC opens. Between
   threads, a call of CUDA that waits for a GPU must not stand in the way of the others, whose GPUs that one waits for:
   cudaMalloc, cudaFree, synchronous copies, and the first launch of a kernel unless CUDA_MODULE_LOADING is EAGER,
   belong where the GPU has nothing left to do.
   A rank that is gone leaves the others' streams waiting until give_up, which gmm_gtp_poll calls: it lets go, for three
   seconds, whatever waits or comes to wait. What is enqueued then runs, copies to slower ranks too, of what may never
   have been received. So give_up first tells the peers, whose poll is GMM_E_COMM from there on: where the host has
   waited for a stream, and poll then finds nothing wrong, what that stream received is good. */
typedef struct gmm_peers_config {
    uint32_t struct_size;
    int32_t rank, size;    /* size at most 64 */
    int32_t processes;     /* 1: every rank is a process of its own; 0: all are threads of this one */
    gmm_context *ctx;      /* of the rank's device: its memory, its messages */
    /* The host's all-gather: all [size][bytes] = what every rank gives as mine, at most 128 bytes. Collective, waits;
       open, window_add and window_remove call it, also to say that they fail: then they fail on all ranks. Other than
       GMM_OK: GMM_E_COMM. */
    gmm_status (*exchange)(void *user, const void *mine, void *all, size_t bytes);
    void *user;
} gmm_peers_config;

/* Collective. Allocates 2 MiB of device memory.
   Errors: GMM_E_NULL, GMM_E_ARG, GMM_E_VERSION, GMM_E_MEMORY, GMM_E_COMM (such as a GPU that cannot reach another's
       memory), GMM_E_CUDA, GMM_E_BUILD. *out is zeroed after a failure. */
GMMDEF gmm_status gmm_peers_open(const gmm_peers_config *config, gmm_comm *out, gmm_error *error);
/* Frees what open made; the work of all ranks must be done, and none may give up behind. NULL and a zeroed one are
   allowed. */
GMMDEF void gmm_peers_close(gmm_comm *comm);

