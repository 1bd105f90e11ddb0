/* ------------------------------------------------------------------------------------------------------- 8 NCCL --- */

/* Collectives of NCCL on a communicator that the caller has made, between GPUs of any number of processes and hosts.
   Calls are captured by graphs as NCCL captures them: by all ranks or by none. Concurrent gathers and reductions need
   two communicators, all ranks issuing their calls in one order; NCCL_LAUNCH_ORDER_IMPLICIT=1 has NCCL keep that order
   on the device too. On a non-blocking communicator (ncclConfig_t.blocking 0) a call waits for NCCL at most
   timeout_ms, so that a rank that fails before the first collective is an error; a blocking one waits for ever.
   give_up is ncclCommAbort: the ncclComm_t is invalid from then on. Needs GMM_WITH_NCCL and nvcc. */
struct ncclComm;
typedef struct gmm_nccl_config {
    uint32_t struct_size;
    int32_t windows;       /* 1: window_add registers symmetric windows, over memory of ncclMemAlloc; without effect
                              before NCCL 2.27. Use it with GMM_GTP_REDUCE_EXCHANGE only: with NCCL 2.28.3
                              reduce_scatter in windows was slower, and groups of it gave wrong results */
    struct ncclComm *comm; /* the ncclComm_t; the caller destroys it after gmm_nccl_close, unless give_up was called,
                              which has freed it */
    gmm_context *ctx;      /* of the communicator's device: its memory, its messages */
    int32_t timeout_ms;    /* 0 = 10000 */
    int32_t reserved;
} gmm_nccl_config;

/* Errors: GMM_E_NULL, GMM_E_ARG, GMM_E_VERSION, GMM_E_MEMORY, GMM_E_COMM (an error of the NCCL communicator),
       GMM_E_BUILD. *out is zeroed after a failure. */
GMMDEF gmm_status gmm_nccl_open(const gmm_nccl_config *config, gmm_comm *out, gmm_error *error);
/* Frees what open made; work must be done. NULL and a zeroed one are allowed. */
GMMDEF void gmm_nccl_close(gmm_comm *comm);

