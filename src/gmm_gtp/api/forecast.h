/* ------------------------------------------------------------------------------------------- 5 Memory, forecast --- */

/* Weights of one shape and their buffers. A slot holds one bundle; 0 slots: none, or those of another use are shared.
   With gtp_size 1 weights stay in place and nothing is received. */
typedef struct gmm_gtp_use {
    uint32_t struct_size;
    int32_t bundle;           /* weights gathered and reduced together, such as a layer's local experts; 0 = 1 */
    const gmm_shard *shard;   /* the plan of each */
    int64_t layers;           /* bundles that the rank holds; 0 = 1 */
    int32_t gather_slots;     /* gather buffers of each direction: lookahead + 1 */
    int32_t recompute_slots;  /* rowwise gather buffers of a recompute chain */
    int32_t wgrad_slots;      /* buffers of unsharded gradients: the one being written and those being reduced; in
                                 captured graphs the slots of their ring */
    int32_t reduce_slots;     /* receive buffers: in a runtime none with GMM_GTP_REDUCE_SCATTER, one of a domain with
                                 GMM_GTP_REDUCE_EXCHANGE */
    int32_t all_to_all;       /* a reduction receives 0: its shard; 1: the parts of all ranks, which it adds in fp32 */
    gmm_dtype main_grad;      /* F32 or BF16; NONE: frozen, without gradient and optimizer state */
    gmm_dtype wire;           /* of reductions and of the gradients they read: F32 or BF16; NONE = F32 */
    int32_t optimizer_bytes;  /* per parameter; 0 = 12: fp32 master and two moments */
    int32_t optimizer_ranks;  /* that share the optimizer state of a shard (CP * DP); 0 = 1 */
    int32_t reserved;         /* 0 */
} gmm_gtp_use;

/* Bytes per rank, as a runtime takes them. Padding rows and scales are counted, also scales of padding rows that a
   runtime leaves out (1X128, 128X128, NV16); alignment, amaxes and workspaces are not. */
typedef struct gmm_gtp_memory {
    uint32_t struct_size;
    int32_t reserved;
    int64_t weights;    /* shards in every direction that is stored */
    int64_t main_grads;
    int64_t optimizer;
    int64_t gather;     /* gathered operands; also the local transposes that TENSOR and 128X128 need for backward */
    int64_t wgrad;      /* unsharded gradients before their reduction */
    int64_t reduce;     /* receive buffers of reductions */
    int64_t total;      /* of the above and of the stage */
    int64_t whole_weights; /* for comparison: `weights` with gtp_size 1; not in the total */
    int64_t stage;      /* receive buffer of parts that 2D copies place side by side (1X128, NV16), or that are
                           transposed (TENSOR, 128X128): the maximum over all uses */
} gmm_gtp_memory;

/* Adds the bytes of one use to *memory; start from GMM_ZERO. *memory is written on success only.
   Errors: as gmm_gtp_plan; GMM_E_NULL, GMM_E_ARG (field out of range), GMM_E_DTYPE (main_grad, wire),
       GMM_E_CONFIG (gradient slots of a frozen weight), GMM_E_OVERFLOW. */
GMMDEF gmm_status gmm_gtp_memory_add(const gmm_gtp_use *use, gmm_gtp_memory *memory, gmm_error *error);

/* A bundle in a forecast, and its times in seconds. As the element of an array its struct_size is 0, or the size that
   this header declares. */
typedef struct gmm_gtp_stage {
    uint32_t struct_size;
    int32_t bundle;          /* weights gathered together; 0 = 1 */
    const gmm_shard *shard;  /* of each */
    double tokens;           /* rows that go through its GEMMs on this rank, all weights together; >= 0 */
    double gather, reduce;   /* out: communication alone; gather: rowwise, of this bundle only */
    double sum;              /* out: into main_grad */
    double forward, backward;/* out: GEMMs alone */
    double exposed_forward;  /* out: time that forward waits for the gather */
    double exposed_backward; /* out: time that backward waits for the gather */
    double exposed_reduce;   /* out: time that backward waits for a gradient buffer */
} gmm_gtp_stage;

/* One micro-batch in the steady state: forward over the stages, backward in their reverse order, then a fence. The
   model assumes that the host never delays work: a gather starts when the one before it is done and its slots have
   been read, a reduction when its gradient is complete and the one before it is done. Gathers, reductions and GEMMs do
   not slow each other down. */
typedef struct gmm_gtp_forecast {
    uint32_t struct_size;
    int32_t stages;
    double gemm_rate;        /* flop/s that GEMMs of these shapes reach; > 0 */
    double link_rate;        /* bytes/s that a rank receives and sends in a collective; > 0 */
    double latency;          /* of a collective; >= 0 */
    double memory_rate;      /* bytes/s of the sum into main_grad and of transposes; 0 = they take no time */
    gmm_dtype wire;          /* of gradients: F32 or BF16; NONE = F32 */
    gmm_dtype main_grad;     /* F32 or BF16; NONE = F32 */
    int32_t prefetch;        /* bundles gathered ahead; as many slots of each direction, and `together` more */
    int32_t wgrad_slots;     /* 0 = 2 */
    int32_t wrap;            /* 1: the first bundles of forward were gathered during the previous backward */
    int32_t together;        /* as gmm_gtp_chain.together, in both passes: so many bundles are gathered by one
                                collective, with one latency, and are ready at its end. 0 to 8; 0 = 1 */
    double compute;          /* out: GEMMs alone */
    double step;             /* out: compute and all exposed times */
    double exposed_gather, exposed_reduce; /* out: sums over stages; reduce: plus the wait of the fence */
    double gather, reduce;   /* out: communication alone, forward and backward */
    int64_t gathered_bytes, reduced_bytes; /* out: that other ranks send here, as gmm_gtp_statistics counts them */
} gmm_gtp_forecast;

/* Simulates the step with the given rates. stages [forecast->stages] in the order of forward, at most 4096. Pure.
   Errors: as gmm_gtp_plan; GMM_E_NULL, GMM_E_VERSION, GMM_E_ARG, GMM_E_DTYPE, GMM_E_OVERFLOW. Nothing is written on
       failure. */
GMMDEF gmm_status gmm_gtp_foresee(gmm_gtp_forecast *forecast, gmm_gtp_stage *stages, gmm_error *error);

