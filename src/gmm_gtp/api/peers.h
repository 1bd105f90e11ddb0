/* ------------------------------------------------------------------------------------------------ 9 Peer copies --- */

/* Collectives by copies between the GPUs of one host, on their copy engines. all_to_all uses no multiprocessor;
   all_gather uses them only for the rank's own part, since CUDA copies within a device with a kernel. Ranks write to
   the windows of the peers and synchronise by flags in device memory that the streams set and wait for. Equally spaced
   matrices, such as those of a bundle, are one copy to each rank. reduce_scatter is a sum over the peers' windows, in
   the order of ranks and in fp32; all_reduce_max uses a staging buffer of the communicator. Calls can be captured, and
   replays may alternate with calls.
   Memory      Receive buffers of all_gather and all_to_all and send buffers of reduce_scatter lie in a window, at the
               same offset on every rank. Windows and send buffers are memory of cudaMalloc: two-dimensional copies
               between GPUs may refuse virtual memory, such as that of ncclMemAlloc.
   Streams     A caller with several streams orders its calls with events. A stream that waits for a peer blocks the
               streams that share its hardware queue: with many streams, raise CUDA_DEVICE_MAX_CONNECTIONS above their
               number.
   Ranks       Ranks are threads of one process, or processes; with processes a window has 2 MiB or more, which CUDA IPC
               can open. With threads, a CUDA call that waits for a GPU must not block a thread for whose work that GPU
               waits: call cudaMalloc, cudaFree and synchronous copies, and launch a kernel for the first time (unless
               CUDA_MODULE_LOADING is EAGER), only while the GPU is idle.
   One GPU     Ranks that are processes may share a GPU. Threads may not, and open fails with GMM_E_COMM: CUDA sees no
               dependency between streams that wait for flags, and may put the work that sets a flag behind the wait.
   Failure     After a rank has failed, the streams of the others wait until give_up, which gmm_gtp_poll calls: for
               three seconds it releases every stream that waits or begins to wait. The enqueued work then runs,
               including copies to slower ranks of data that may not have been received. Therefore give_up first sets a
               flag on the peers, whose poll is GMM_E_COMM from then on: if the host has waited for a stream and a later
               poll is GMM_OK, the data that the stream received is valid. */
typedef struct gmm_peers_config {
    uint32_t struct_size;
    int32_t rank, size;    /* size at most 64 */
    int32_t processes;     /* 1: every rank is a process of its own; 0: all are threads of this one */
    gmm_context *ctx;      /* of the rank's device: its memory, its messages */
    /* All-gather of the host: all [size][bytes] = `mine` of every rank, at most 128 bytes. Collective, and waits.
       gmm_peers_open, window_add and window_remove call it, also after an error of their own, so that they fail on all
       ranks. gmm_peers_open does not call it where config or out is NULL, after GMM_E_VERSION, and with a rank or size
       out of range. A result other than GMM_OK makes them fail with GMM_E_COMM. */
    gmm_status (*exchange)(void *user, const void *mine, void *all, size_t bytes);
    void *user;
} gmm_peers_config;

/* Collective. Allocates 2 MiB of device memory.
   Errors: GMM_E_NULL, GMM_E_ARG, GMM_E_VERSION, GMM_E_MEMORY, GMM_E_COMM (such as a GPU that cannot reach another's
       memory), GMM_E_CUDA, GMM_E_BUILD. *out is zeroed after a failure. */
GMMDEF gmm_status gmm_peers_open(const gmm_peers_config *config, gmm_comm *out, gmm_error *error);
/* Unmaps the memory of the peers, and frees that of this rank at once: call it when the work of all ranks is done, such
   as after an exchange, and let none use the communicator or call give_up afterwards. NULL and a zeroed communicator
   are allowed. */
GMMDEF void gmm_peers_close(gmm_comm *comm);

