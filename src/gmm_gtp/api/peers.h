/* ------------------------------------------------------------------------------------------------ 9 Peer copies --- */

/* Collectives by copies between the GPUs of one host, on their copy engines: no multiprocessor takes part in
   all_to_all, and in all_gather none but for the own part, since CUDA copies within a device with a kernel. They write
   to the windows of the peers and synchronise by flags in device memory that the streams set and wait for. Equally
   spaced matrices, such as those of a bundle, are one copy to each rank. reduce_scatter is a sum over the peers'
   windows, in the order of ranks and in fp32; all_reduce_max uses a staging buffer of the communicator. Calls are
   captured like any other work, and replays mix with calls. What all_gather and all_to_all receive, and what
   reduce_scatter sends, lies in a window, at the same offset on every rank. Windows, and what is sent, are memory of
   cudaMalloc: two-dimensional copies between GPUs may refuse virtual memory, which ncclMemAlloc gives. A caller that
   uses several streams orders its calls with events. A stream that waits for a peer blocks the streams that share its
   hardware queue: with many streams, raise CUDA_DEVICE_MAX_CONNECTIONS above their number.
   Ranks are threads of one process, or processes: then windows must have 2 MiB or more, which CUDA IPC opens. Between
   threads, a call of CUDA that waits for a GPU must not stand in the way of the others, whose GPUs that one waits for:
   cudaMalloc, cudaFree, synchronous copies, and the first launch of a kernel unless CUDA_MODULE_LOADING is EAGER,
   belong where the GPU has nothing left to do.
   After a rank has failed, the streams of the others wait until give_up, which gmm_gtp_poll calls: for three seconds it
   releases every stream that waits or begins to wait. The enqueued work then runs, including copies to slower ranks of
   data that may not have been received. Therefore give_up first sets a flag of the peers, whose poll is GMM_E_COMM from
   then on: if the host has waited for a stream and a poll behind that is GMM_OK, what the stream received is valid. */
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
/* Frees what open made; the work of all ranks must be done, and none may call give_up later. NULL and a zeroed one are
   allowed. */
GMMDEF void gmm_peers_close(gmm_comm *comm);

