/* gmm_gtp.h - v0.1.0 - Generalized Tensor Parallelism for weights: plans, communicators, CPU ranks, runtime - MIT
 * SPDX-License-Identifier: MIT
 *
 * Quick start (C11 or C++17):
 *
 *     #define GMM_IMPLEMENTATION          // in exactly one .c or .cu file of the program
 *     #include "gmm_gtp.h"
 *
 *     const int64_t gate_up[2] = {14336, 14336};
 *     gmm_shard shard = GMM_ZERO;         // what rank 3 of 8 keeps of a gated FC1 in bf16
 *     shard.dtype = GMM_BF16; shard.rows = 28672; shard.cols = 4096; shard.gtp_size = 8; shard.gtp_rank = 3;
 *     shard.section_rows = gate_up; shard.sections = 2;
 *     gmm_shard_plan plan = GMM_ZERO;
 *     gmm_gtp_plan(&shard, &plan, NULL);  // plan.shard_rows, plan.row0, plan.shard_data_bytes[GMM_ROWWISE]
 *
 * CONTENTS
 *     1  Shard plans      4  Seeds               7  CPU ranks       10  Runtime
 *     2  Extents          5  Memory, forecast    8  NCCL            11  Checkpoints
 *     3  Process grids    6  Communicators       9  Peer copies     12  Implementation, 13 Licence
 *
 * CONFIGURATION (beside gmm_quant.h's and gmm.h's; define where GMM_IMPLEMENTATION is)
 *     GMM_WITH_CPU_RANKS   CPU ranks, which need POSIX threads (pthread.h, -pthread). Without it gmm_ranks_create is
 *                          GMM_E_BUILD, and no header of theirs is included.
 *     GMM_WITH_NCCL        Communicators of NCCL (nccl.h, -lnccl), where nvcc compiles GMM_IMPLEMENTATION. Without it
 *                          gmm_nccl_open is GMM_E_BUILD.
 *
 * THE SHARDING RULE
 *     Tensor parallelism (TP) first shards a weight [N, K]: by rows (column-parallel), by columns (row-parallel), or
 *     not at all. The shard of one TP rank is its local matrix. Generalized tensor parallelism (GTP) shards the local
 *     matrix by rows over g ranks: it is padded at its end to a multiple of unit * g rows, and rank r has the padded
 *     rows [r * shard_rows, (r + 1) * shard_rows). All ranks have equally many rows, since collectives need equal
 *     counts; the last ranks may have padding only. Before a GEMM the g shards are all-gathered in the order of ranks
 *     into padded_rows rows, of which the GEMM reads the first local_rows in place. With a GTP size of 1 the local
 *     matrix is neither padded nor gathered.
 *
 *     Sections are parts of a weight that TP shards separately, such as gate and up of a gated FC1: the local matrix is
 *     the TP slice of the first section, then that of the second, and so on. GTP pads and shards these together, so
 *     that all padding is at the end and a GEMM reads one dense operand. A shard may therefore begin and end inside any
 *     section; its extents are the logical rows that it holds. Logical rows are those of the whole, unpadded weight.
 *     Checkpoints store logical rows and no padding, so that one file loads at every TP and GTP size.
 *
 *     Padding rows are zeros after initialisation and loading, so are their gradients, and norms skip them: only the
 *     first valid_rows rows of a shard count.
 *
 *     The scale of a gradient is never derived from a group size: reductions take it as an argument in fp32.
 *
 * Thread safety: sections 1 to 5 and 11 are pure or write only through their arguments. Communicators and the runtime
 * serve one thread at a time each. Memory is allocated only by functions that make CPU ranks, communicators, events and
 * checkpoint plans.
 *
 * REVISIONS (full list: CHANGELOG.md)
 *     0.1.0  first version
 */
#ifndef GMM_MOE_GTP_H_INCLUDED
#define GMM_MOE_GTP_H_INCLUDED

#include "gmm.h"

GMM_QUIET_BEGIN
#ifdef __cplusplus
extern "C" {
#endif

/* -------------------------------------------------------------------------------------------- 1 Shard plans --- */

/* How tensor parallelism shards a weight. */
typedef enum gmm_tp_cut {
    GMM_TP_WHOLE = 0, /* nothing: every TP rank has the same matrix */
    GMM_TP_ROWS = 1,  /* out_features of each section (column-parallel) */
    GMM_TP_COLS = 2,  /* in_features (row-parallel) */
    GMM_TP_CUT_MAX = 0x7fffffff
} gmm_tp_cut;

enum { GMM_GTP_UNPADDED = -1 }; /* gmm_shard.unit: never pad */

/* The unit: rows of a shard are a multiple of it. 16 for NONE, TENSOR and NV16, 32 for MX32, 128 for 1X128 and 128X128;
   0 for a scaling that is not sharded (ROW) or unknown. gmm_gtp_recipe_unit gives the unit of weights that a recipe
   quantizes. Pure. */
GMMDEF int64_t gmm_gtp_unit(gmm_scaling scaling);
GMMDEF int64_t gmm_gtp_recipe_unit(gmm_recipe_kind recipe);

/* One weight and the rank that holds a shard of it. Sizes of 0 mean 1. */
typedef struct gmm_shard {
    uint32_t struct_size;
    gmm_dtype dtype;             /* of the stored elements */
    gmm_scaling scaling;
    gmm_tp_cut tp_cut;
    int32_t tp_size, tp_rank;
    int32_t gtp_size, gtp_rank;
    int64_t rows;                /* N of the whole weight, all TP ranks and sections together; >= 1 */
    int64_t cols;                /* K of the whole weight; >= 1 */
    const int64_t *section_rows; /* [sections] rows of each, >= 1, their sum is `rows`; NULL = one section */
    int32_t sections;            /* 0 with NULL */
    int32_t tp_multiple;         /* GMM_TP_ROWS: a TP slice of a section is a multiple of this many rows; 0 = 1. With
                                    gate and up interleaved in blocks of B rows in one section: 2 B */
    int64_t unit;                /* 0 = the format's; > 0 replaces it; GMM_GTP_UNPADDED = no padding */
} gmm_shard;

/* Position and size of the shard. Byte counts are indexed by gmm_direction; scales are in COMPACT order (SWIZZLED has
   the same size). */
typedef struct gmm_shard_plan {
    uint32_t struct_size;
    int32_t reserved;
    int64_t unit;        /* in use; 0 = unpadded */
    int64_t local_rows;  /* of the TP-local matrix: the out_features of a GEMM */
    int64_t local_cols;  /* its in_features */
    int64_t col0;        /* its first column in the whole weight */
    int64_t pad;         /* rows of padding behind local_rows; the same on every rank */
    int64_t padded_rows; /* local_rows + pad = gtp_size * shard_rows */
    int64_t shard_rows;  /* the same on every rank */
    int64_t row0;        /* the shard's first row in the padded local matrix */
    int64_t valid_rows;  /* rows of the shard that are not padding; 0 for a shard that is all padding */
    int64_t shard_data_bytes[2], shard_scale_bytes[2];   /* stored; all data are sent, scales without their padding.
                                                            [GMM_COLUMNWISE] is 0 where backward reads the rowwise copy
                                                            or a local transpose of it: NONE, TENSOR, 128X128 */
    int64_t gather_data_bytes[2], gather_scale_bytes[2]; /* of a gathered operand of padded_rows rows;
                                                            [GMM_COLUMNWISE] is 0 for NONE, whose backward reads the
                                                            rowwise one */
} gmm_shard_plan;

/* Plans one shard. *plan is written on success only.
   Errors: GMM_E_NULL (shard, plan), GMM_E_VERSION, GMM_E_DTYPE (format not sharded, or dtype and scaling do not go
       together), GMM_E_OVERFLOW; GMM_E_ARG: a struct_size of 1 to 7, rows or cols below 1, a rank outside its size, a
       section below 1, section rows that do not add up, sections without section_rows or the reverse, rows (of every
       section) or cols that tp_size does not divide, odd local cols of a 4-bit format, odd local rows of NV16, a unit
       below -1;
       GMM_E_CONFIG: a unit that cuts the format's blocks, unpadded rows that gtp_size does not divide (rows would be
       lost) or that cut blocks, a TP slice that breaks tp_multiple. */
GMMDEF gmm_status gmm_gtp_plan(const gmm_shard *shard, gmm_shard_plan *plan, gmm_error *error);

/* ------------------------------------------------------------------------------------------------ 2 Extents --- */

/* Consecutive rows that a shard contains. Its columns are [col0, col0 + local_cols) of the plan. Over all ranks (one TP
   rank where TP cuts nothing) the extents cover every logical row and column exactly once. */
typedef struct gmm_extent {
    int32_t section;
    int32_t reserved;
    int64_t begin, end;  /* rows [begin, end) of the whole section */
    int64_t logical_row; /* `begin`, counted in the whole weight */
    int64_t shard_row;   /* the first of these rows in the shard */
} gmm_extent;

/* The extents of a shard, at most one per section, in the order of the shard's rows. *count is how many there are, 0
   for a shard that is all padding. Call it with extents NULL and capacity 0 to count.
   Errors: as gmm_gtp_plan; GMM_E_NULL (count; extents with a capacity), GMM_E_ARG (negative capacity),
       GMM_E_WORKSPACE (capacity too small). Nothing is written on failure. */
GMMDEF gmm_status gmm_gtp_extents(const gmm_shard *shard, gmm_extent *extents, int32_t capacity, int32_t *count,
                                  gmm_error *error);

/* ------------------------------------------------------------------------------------------ 3 Process grids --- */

/* Parallel dimensions. In an expert grid TP, GTP and DP are those of the experts. */
typedef enum gmm_axis {
    GMM_AXIS_TP = 0,
    GMM_AXIS_GTP = 1,
    GMM_AXIS_CP = 2,
    GMM_AXIS_EP = 3,
    GMM_AXIS_DP = 4,
    GMM_AXIS_PP = 5,
    GMM_AXIS_COUNT = 6,
    GMM_AXIS_MAX = 0x7fffffff
} gmm_axis;

/* Order of ranks, fastest axis first. In an expert grid EP is faster than GTP, so that its all-to-all has nearer
   peers. */
typedef enum gmm_grid_kind {
    GMM_GRID_DENSE = 0,  /* TP GTP CP EP DP PP; EP has size 1 */
    GMM_GRID_EXPERT = 1, /* TP CP EP GTP DP PP; CP has size 1 */
    GMM_GRID_KIND_MAX = 0x7fffffff
} gmm_grid_kind;

typedef struct gmm_grid {
    uint32_t struct_size;
    gmm_grid_kind kind;
    int32_t size[GMM_AXIS_COUNT]; /* by gmm_axis; 0 = 1 */
} gmm_grid;

/* Ranks of a grid, coordinates of a rank, rank of coordinates.
   Errors: GMM_E_NULL, GMM_E_VERSION, GMM_E_ARG (negative size; rank or coordinate out of range), GMM_E_CONFIG (the axis
       that the kind does not have), GMM_E_OVERFLOW (more than 2^31 - 1 ranks). Outputs are written on success only. */
GMMDEF gmm_status gmm_grid_world(const gmm_grid *grid, int32_t *world, gmm_error *error);
GMMDEF gmm_status gmm_grid_coords(const gmm_grid *grid, int32_t rank, int32_t coords[GMM_AXIS_COUNT], gmm_error *error);
GMMDEF gmm_status gmm_grid_rank(const gmm_grid *grid, const int32_t coords[GMM_AXIS_COUNT], int32_t *rank,
                                gmm_error *error);

/* The group of ranks that differ from a rank along `axes` only. `first` is the same for all its members and differs
   between groups, so (first, index) are colour and key of a communicator split. */
typedef struct gmm_grid_group {
    int32_t first; /* lowest rank of the group */
    int32_t index; /* of the rank in its group, in the order of ranks */
    int32_t size;
} gmm_grid_group;

/* `axes` is an OR of 1u << GMM_AXIS_*. Weights are gathered along GTP. Reductions over data (tokens, losses, expert
   counts, evaluation) go along GTP, CP and DP together, since GTP peers see different tokens; optimizer state is
   sharded along CP and DP without GTP.
   Errors: as gmm_grid_coords; GMM_E_ARG (an unknown axis bit). */
GMMDEF gmm_status gmm_grid_group_of(const gmm_grid *grid, int32_t rank, uint32_t axes, gmm_grid_group *group,
                                    gmm_error *error);

/* Checks that the grids of dense and of expert weights describe one job: equal world and equal PP, from which it
   follows that their pipeline groups are the same.  Errors: as gmm_grid_world; GMM_E_CONFIG. */
GMMDEF gmm_status gmm_grid_match(const gmm_grid *dense, const gmm_grid *expert, gmm_error *error);

/* The replica rule: of all ranks that hold the same part of a tensor, one writes it to a checkpoint and counts it in a
   norm, namely the one with coordinate 0 on every axis that does not shard the tensor. `cut_axes` are the axes that do
   (as above): PP unless all stages share the tensor; GTP and mostly TP for a sharded weight, neither of them for the
   weight of a normalization layer; also EP for the weights of experts; also DP for optimizer state. *writes is 1 on
   that rank and 0 on the others.
   Errors: as gmm_grid_group_of. */
GMMDEF gmm_status gmm_gtp_writes(const gmm_grid *grid, int32_t rank, uint32_t cut_axes, int32_t *writes,
                                 gmm_error *error);

/* -------------------------------------------------------------------------------------------------- 4 Seeds --- */

/* Seed of a rank that initialises its own shard, so that the g shards differ: base + 65536 (1 + r), and 32768 more in
   an expert grid. With a counter-based generator over the logical rows of the extents no such seed is needed, and the
   gathered weight does not depend on g. Pure, modulo 2^64. */
GMMDEF uint64_t gmm_gtp_seed(uint64_t base, gmm_grid_kind kind, uint32_t gtp_rank);

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

/* ------------------------------------------------------------------------------------------ 6 Communicators --- */

/* Collectives among the ranks of a group, as a table of functions; every function takes `self` first.
   Order       All ranks make the same calls in the same order. A call is enqueued on the stream. Later work on the
               stream may read what the call received and overwrite what it sent. Calls on several streams run one
               after the other: the caller orders the streams with events.
   Groups      Calls between group_begin and group_end are one operation, on one stream, with distinct outputs. Groups
               do not nest. `what` names it in messages, is the same text on all ranks, and stays valid until the
               operation is done.
   Failure     A call returns GMM_E_COMM, or another status if it has enqueued nothing (GMM_E_ARG, GMM_E_DTYPE,
               GMM_E_MEMORY, GMM_E_CUDA); the ranks no longer agree then, so give_up is called. poll returns
               GMM_E_COMM, and its message names operation and peer. The communicator is then unusable.
   Threads     One at a time. */
typedef struct gmm_comm {
    uint32_t struct_size;
    int32_t rank, size;
    int32_t exchanges;    /* 1: all_to_all and a sum are faster than reduce_scatter; see GMM_GTP_REDUCE_AUTO */
    int32_t processors;   /* multiprocessors for its calls while a GEMM runs; see gmm_gtp_view.leave */
    int32_t reserved;
    void *self;
    gmm_status (*group_begin)(void *self, const char *what);
    gmm_status (*group_end)(void *self);
    /* recv [size][bytes]: what every rank sends, in the order of ranks. In place: send = recv + rank * bytes. */
    gmm_status (*all_gather)(void *self, const void *send, void *recv, size_t bytes, gmm_stream stream);
    /* send [size][count], recv [count]: the sum of part `rank` of send over all ranks. F32, BF16 or F16. In place: recv
       is part `rank` of send. */
    gmm_status (*reduce_scatter)(void *self, const void *send, void *recv, size_t count, gmm_dtype dtype,
                                 gmm_stream stream);
    /* send, recv [size][bytes]: part r goes to rank r, part r comes from rank r. Not in place. The part of the
       rank itself need not be copied: it is valid in send, and undefined in recv. */
    gmm_status (*all_to_all)(void *self, const void *send, void *recv, size_t bytes, gmm_stream stream);
    /* The maximum of each value over the ranks, in place: the amax of a tensor that several ranks share. */
    gmm_status (*all_reduce_max)(void *self, float *values, size_t count, gmm_stream stream);
    /* Registers memory that later calls send from and receive into; collective. Both functions may be NULL. */
    gmm_status (*window_add)(void *self, void *base, size_t bytes, void **window);
    gmm_status (*window_remove)(void *self, void *window);
    /* GMM_OK unless a failure is known; `error` may be NULL. Does not wait for collectives; that of peer copies
       waits at most 0.1 s for a copy of their flags. */
    gmm_status (*poll)(void *self, gmm_error *error);
    /* Aborts: operations in flight end as soon as possible, later ones are refused. `why` is copied into messages. */
    void (*give_up)(void *self, const char *why);
} gmm_comm;

/* -------------------------------------------------------------------------------------------------- 7 CPU ranks --- */

/* Ranks of one process on the CPU: streams are queues, events are counters, communicators copy between the ranks'
   memory. With them a model trains without a GPU, and the order of work is tested: a seed determines which of the ready
   operations runs next, and the race checker reports any two accesses to the same memory, one of them a write, that no
   event, stream or wait of the host orders (vector clocks over the ranges of gmm_work, copies, fills and collectives).
   With one host thread the schedule is a function of the seed; with a thread per rank it also depends on the operating
   system. Stream NULL is the calling thread: its operations are done on return. A wait lasts at most timeout_ms without
   progress of its rank; then every rank of the communicator that hangs gets GMM_E_COMM, and its queued operations are
   discarded. Work runs on any thread that waits or enqueues.
   Needs GMM_WITH_CPU_RANKS where GMM_IMPLEMENTATION is defined, and POSIX threads; otherwise create is GMM_E_BUILD.
   Threads: different threads may call for different ranks at the same time, except gmm_ranks_destroy. */
typedef struct gmm_ranks gmm_ranks;
typedef struct gmm_ranks_graph gmm_ranks_graph;

typedef struct gmm_ranks_config {
    uint32_t struct_size;
    int32_t ranks;           /* 1 to 98 */
    uint64_t seed;           /* 0: operations run as early as possible; else in a random order of this seed, mostly
                                late */
    int32_t timeout_ms;      /* 0 = 10000 */
    int32_t check_races;     /* 1: the race checker is on */
    gmm_allocator allocator; /* for all memory of the ranks, at any call; zeroed = GMM_MALLOC */
} gmm_ranks_config;

/* Errors: GMM_E_NULL, GMM_E_ARG, GMM_E_VERSION, GMM_E_MEMORY, GMM_E_BUILD. *out is NULL after a failure. */
GMMDEF gmm_status gmm_ranks_create(const gmm_ranks_config *config, gmm_ranks **out, gmm_error *error);
/* Frees it with all streams and communicators; events and graphs must have been destroyed. NULL is allowed. */
GMMDEF void gmm_ranks_destroy(gmm_ranks *ranks);

/* The runtime of a rank; gmm_ranks_error gives the messages of its failures. A rank has at most 48 streams in its life,
   those of graphs included: a destroyed one counts, since the race checker knows it.
   Errors: GMM_E_NULL, GMM_E_ARG; the message is that of rank 0, none where `ranks` is NULL. */
GMMDEF gmm_status gmm_ranks_runtime(gmm_ranks *ranks, int32_t rank, gmm_runtime *out);

/* A communicator of `count` distinct ranks: out[i] is for members[i], whose rank in it is i. Sums are in fp32 in the
   order of ranks, rounded once. Where ranks differ in the call, size or group name (the name of a bundle) of a
   collective, all ranks get GMM_E_COMM and a message with both names, and no memory is written.
   Errors: GMM_E_NULL, GMM_E_ARG, GMM_E_MEMORY; the message is that of rank 0, none where `ranks` is NULL. */
GMMDEF gmm_status gmm_ranks_comms(gmm_ranks *ranks, const int32_t *members, int32_t count, gmm_comm *out);

/* Runs queued operations until none is ready.
   Errors: GMM_E_NULL; GMM_E_STATE (queued operations wait for something that was not enqueued: a deadlock, if all ranks
       have made their calls); GMM_E_COMM (a rank has failed). gmm_ranks_error gives the message. */
GMMDEF gmm_status gmm_ranks_run(gmm_ranks *ranks);

/* Message of the last failed call for a rank; "" before any. Valid until the next gmm_ranks_error for that rank. */
GMMDEF const char *gmm_ranks_error(gmm_ranks *ranks, int32_t rank);

/* Races found so far, and the text of the first; `text` may be NULL. Needs check_races. An access for whose record
   there was no memory counts as one, since its races are not found. */
GMMDEF int64_t gmm_ranks_races(gmm_ranks *ranks, const char **text);

/* Captures the work of a stream, and of streams that wait for its events, as queues that a launch replays. The rules
   are those of CUDA graphs: other streams join the capture by events and must be joined with its origin before the end;
   waits for events from outside need GMM_EVENT_EXTERNAL; a launch is one operation of its stream. A rank has one
   capture at a time.
   Errors: GMM_E_NULL, GMM_E_ARG (no such rank), GMM_E_CAPTURE, GMM_E_MEMORY. */
GMMDEF gmm_status gmm_ranks_capture_begin(gmm_ranks *ranks, int32_t rank, gmm_stream stream);
GMMDEF gmm_status gmm_ranks_capture_end(gmm_ranks *ranks, int32_t rank, gmm_stream stream, gmm_ranks_graph **out);
GMMDEF gmm_status gmm_ranks_launch(gmm_ranks_graph *graph, gmm_stream stream);
GMMDEF void gmm_ranks_graph_destroy(gmm_ranks_graph *graph); /* not while a launch is queued or runs */

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

/* --------------------------------------------------------------------------------------------------- 10 Runtime --- */

/* The GTP runtime: all-gathers weights ahead of their use, and reduces gradients while the compute continues.
   Weights are declared and grouped into bundles (gathered and reduced together, such as a layer's local experts).
   Chains list the bundles in the order in which a pass reads them, so that the next ones are gathered meanwhile. Call
   seal, query the memory, bind it; then, per step and bundle:

       acquire(forward) ... GEMM ... release        a view of the gathered weights, valid between the two
       acquire(backward) ... dgrad ... release
       wgrad ... GEMM ... submit                    a buffer for the unsharded gradient, which is reduced into main_grad
       fence ... optimizer ... publish              main_grad is complete; new shards are declared

   Order       Every call enqueues and returns (with CPU ranks and stream NULL it may wait). All ranks make the same
               calls in the same order, also a rank without tokens. Gathers run on the domain's gather stream,
               reductions and their sums on its reduce stream, the caller's work on the streams that it passes.
   Buffers     Gathered weights and gradients are in slots. Every slot has an event of its last use, for which the next
               stream that uses it waits: any order of calls, number of slots and sharing of streams is correct. The
               content of a slot is identified by bundle, direction and version: a gather that is still valid is reused,
               an outdated one never. After bind, addresses depend on bundle and pass alone.
   Streams     Their handles tell them apart: a stream that was passed to a call is not destroyed before
               gmm_gtp_fini, unless the host has waited for it.
   Shards      Before it writes shards, a stream waits for the gathers that read them (fence); afterwards the caller
               publishes them.
   Formats     Quantized shards are gathered as elements and scales. They are quantized once, before they are published
               (gmm_gtp_quantize), in the directions that the format stores; the pass alone determines which direction
               is gathered. Gathered weights are bitwise those that one rank would have quantized from the unsharded
               matrix.
   g = 1       No communicator is called: views are the shards. Gradients go through the same buffers, since scale and
               accumulation are the same. TENSOR and 128X128 are transposed for backward on the caller's stream.
   Graphs      Between capture_begin and capture_end only acquire, release, prefetch, view_part, wgrad, wgrad_part,
               submit, fence and follow may be called. Chains declare beforehand which bundles are captured. A graph
               uses the slot contents of the graph before it only where that one has prefetched them; such graphs are
               replayed in the order of their capture. Communication of replays and of calls outside of graphs is
               serialized.
   Errors      Everything that can be checked is checked before anything is enqueued, and such an error leaves the state
               unchanged. After a later failure, such as one of a communicator, the object is unusable: every later call
               but fini, memory_need, statistics_of and last_error returns the same status, nothing more is enqueued,
               and give_up of its communicators is called.
               gmm_gtp_last_error names the operation and the rank.
   Threads     One at a time. Allocates nothing itself: memory is the caller's, events are the runtime's (at bind).
   Callbacks   May call gmm_gtp_publish, nothing else. */
typedef struct gmm_gtp gmm_gtp;

typedef enum gmm_gtp_pass {
    GMM_GTP_FORWARD = 0,
    GMM_GTP_BACKWARD = 1,
    GMM_GTP_RECOMPUTE = 2, /* forward again inside backward: has its own rowwise buffers, does not call hooks.need */
    GMM_GTP_PASSES = 3,
    GMM_GTP_PASS_MAX = 0x7fffffff
} gmm_gtp_pass;

/* Callbacks. Reductions of token counts, losses and expert load are the caller's: their group includes the GTP peers,
   which see different tokens (gmm_grid_group_of). */
typedef struct gmm_gtp_hooks {
    void *user;
    /* The shards of these weights are about to be read for a forward: the caller publishes them now if it has not yet.
       Once per bundle and forward; for a graph from gmm_gtp_pre_replay. While another pass holds a bundle it must not
       be published: the acquire that called this would fail. NULL = not wanted. */
    void (*need)(void *user, gmm_gtp *gtp, const int32_t *weights, int32_t count);
    /* The sum into main_grad of these weights, a whole bundle, has been enqueued: later work on `stream` reads its
       result. Once per submit; for a graph from gmm_gtp_post_replay. NULL = not wanted. */
    void (*ready)(void *user, gmm_gtp *gtp, const int32_t *weights, int32_t count, gmm_stream stream);
} gmm_gtp_hooks;

typedef struct gmm_gtp_config {
    uint32_t struct_size;
    int32_t domains, weights, bundles, chains, graphs; /* maximum numbers of declarations: at most 2^20 of each, and
                                   4096 graphs; domains 0 = 1 */
    int32_t timeout_ms;         /* of a collective that has begun, see gmm_gtp_poll; 0 = 10000 */
    gmm_context *ctx;           /* for sums and quantization; with CPU ranks not shared with other code */
    const gmm_runtime *runtime; /* copied; NULL = that of ctx. It may lack stream_create, stream_destroy, stream_sync
                                   and event_sync */
    gmm_gtp_hooks hooks;
} gmm_gtp_config;

/* How gradients are reduced. Either way their sum is scaled and added in fp32. */
typedef enum gmm_gtp_reduction {
    GMM_GTP_REDUCE_AUTO = 0,   /* EXCHANGE where the communicator says so; else SCATTER with an fp32 wire or at most
                                  two ranks, else EXCHANGE */
    GMM_GTP_REDUCE_SCATTER = 1, /* the communicator adds; with a bf16 wire its sum is rounded to bf16 */
    GMM_GTP_REDUCE_EXCHANGE = 2, /* all_to_all of the parts, which are then added in fp32 in the order of ranks; at most
                                    256 ranks */
    GMM_GTP_REDUCTION_MAX = 0x7fffffff
} gmm_gtp_reduction;

/* The ranks among which weights are sharded, and the streams of their communication. Dense and expert weights are two
   domains with groups of different sizes. Gathers and reductions run concurrently only with two communicators: one
   communicator is called on one stream, also by several domains. */
typedef struct gmm_gtp_domain {
    uint32_t struct_size;
    gmm_dtype wire;             /* of reductions and gradient buffers: F32 or BF16; NONE = F32 */
    const gmm_comm *gather;     /* copied; NULL = one rank */
    const gmm_comm *reduce;     /* copied; NULL = gather's; reduce_stream is then gather_stream or NULL */
    gmm_stream gather_stream, reduce_stream;
    gmm_gtp_reduction reduction;
    int32_t wgrad_slots;        /* gradient buffers of one size, at most one per bundle; 0 = 2 */
    int32_t synchronous;        /* 1: submit makes the caller's stream wait for the sum, for measuring the overlap */
    int32_t reserved;
} gmm_gtp_domain;

typedef struct gmm_gtp_weight {
    uint32_t struct_size;
    int32_t expert;             /* index in its bundle; 0 in a bundle of one weight */
    const char *name;           /* for messages; valid as long as the object */
    const gmm_shard *shard;     /* copied; its group is the domain's */
    void *data[2];              /* the shard by gmm_direction, as gmm_gtp_plan sizes it; [COLUMNWISE] NULL where the
                                   plan has 0 bytes. Padding rows are zeros */
    void *scale[2];             /* its scales, COMPACT; TENSOR: one value in [ROWWISE], the same on all ranks */
    float *amax;                /* NV16: global amax, the same on all ranks; those of a bundle are contiguous, in the
                                   order of experts. TENSOR, not delayed: gmm_gtp_quantize writes it; views do not
                                   contain it; may be NULL */
    void *main_grad;            /* [shard_rows, local_cols], dense; NULL = frozen, on all ranks alike */
    gmm_dtype main_grad_dtype;  /* F32 or BF16 */
    int32_t reserved;
    const gmm_format *format;   /* of the shards that gmm_gtp_quantize writes, copied; NULL = the caller writes them.
                                   Scales in COMPACT order; not stochastic, hadamard or row_amax, whose bits would
                                   depend on the boundaries of shards */
} gmm_gtp_weight;

typedef struct gmm_gtp_chain {
    uint32_t struct_size;
    gmm_gtp_pass pass;
    const int32_t *bundles;     /* [count] in the order of the pass; a bundle is in one chain of a pass at most */
    int32_t count;              /* >= 1 */
    int32_t prefetch;           /* bundles gathered ahead, 0 to 3 */
    int32_t held;               /* bundles that the caller holds at a time; 0 = 1 */
    int32_t captured;           /* 1: for graphs; may also run outside of captures before, to warm up */
    int32_t together;           /* bundles of one domain that one group call gathers, 0 to 8; 0 = 1. Positions 0 to
                                   together - 1 of the chain are one call, the next `together` the next. All chains
                                   take the largest together - 1 more slots of each kind, and this one a stage for
                                   `together` bundles */
    int32_t reserved;           /* 0 */
} gmm_gtp_chain;

/* Matrices of a bundle in the order of expert indices: packed if all have one shape and equal distances, otherwise a
   host table of addresses that stays valid. `mat` is ready for gmm_linear.w, gmm_mlp.w1 or w2, or gmm_grad.mat: its
   rows are the logical ones, with padding behind them. In backward a quantized mat has only its columnwise copy, in
   mat.columnwise, which dgrad reads: gathered in formats that store one (1X128, MX32, NV16), for TENSOR and 128X128 a
   transpose of the rowwise one. Scales of TENSOR and amaxes of NV16 have the values that they had when the bundle
   was gathered. In a table of several shapes mat.ld is that of the first matrix; gmm_gtp_view_part gives those of
   one shape as an operand of their own, such as the FC1 of all experts, followed by their FC2, for an MLP. */
typedef struct gmm_gtp_view {
    uint32_t struct_size;
    int32_t count;
    gmm_mat mat;
    int64_t rows, cols;         /* of the first matrix */
    int64_t version;            /* how often its shards were published */
    int32_t slot;               /* the buffer; -1 = the shards themselves */
    int32_t leave;              /* multiprocessors that a GEMM over the view should leave to concurrent gathers and
                                   reductions: gmm_options.sm_limit = the GPU's number less this. 0 = none */
} gmm_gtp_view;

typedef enum gmm_gtp_add { GMM_GTP_ADD = 0, GMM_GTP_SET = 1, GMM_GTP_ADD_MAX = 0x7fffffff } gmm_gtp_add;

typedef struct gmm_gtp_gradient {
    uint32_t struct_size;
    float scale;                /* main_grad = scale * sum (+ main_grad), in fp32; 0 means 0, not a default */
    gmm_gtp_add add;
    int32_t zero;               /* 1: this rank had no tokens and its gradient is zero; gmm_gtp_wgrad was not called */
    const gmm_mat *from;        /* the gradient, [count] matrices of rows x cols in F32, BF16 or F16, instead of the
                                   buffer of gmm_gtp_wgrad; not written. NULL = the buffer. A table is on the host */
} gmm_gtp_gradient;

/* Bytes of a domain's two memory blocks, one for the windows of each communicator. Aligned to 256. The first contains
   the gather slots, the stage that receives parts which are then copied side by side or transposed, and the workspace
   of gmm_gtp_quantize. */
typedef struct gmm_gtp_need {
    uint32_t struct_size;
    int32_t gather_slots, wgrad_slots;
    int32_t reserved;
    size_t gather_bytes, reduce_bytes;
} gmm_gtp_need;

/* Counts since init; the same on every rank. acquires = prefetched + resident + exposed. */
typedef struct gmm_gtp_statistics {
    uint32_t struct_size;
    int32_t reserved;
    int64_t acquires;
    int64_t prefetched;         /* acquires whose weights a prefetch had gathered */
    int64_t resident;           /* acquires whose weights were in the slot from an earlier acquire, or g = 1 */
    int64_t exposed;            /* acquires that gathered */
    int64_t gathers;            /* prefetches and exposed */
    int64_t prefetches;
    int64_t outdated;           /* prefetches discarded because newer shards were published; those that an acquire of
                                   another bundle discards, out of the chain's order, are not counted */
    int64_t busy;               /* prefetches skipped because the slot was in use */
    int64_t transposed;         /* gathers that transposed a resident rowwise copy (g = 1: the shard) */
    int64_t submits;
    int64_t gathered_bytes, reduced_bytes; /* that other ranks sent here */
    uint64_t calls;             /* hash of the calls so far that all ranks make alike: acquire, prefetch, submit,
                                   publish, quantize, amax, follow, captures and replays */
} gmm_gtp_statistics;

/* Bytes of the object for a configuration, and the object in memory aligned to 16 bytes.
   Errors: GMM_E_NULL (also: a runtime that lacks a function), GMM_E_VERSION, GMM_E_ARG, GMM_E_CONFIG (ctx and runtime
       are of two memory spaces), GMM_E_WORKSPACE, GMM_E_ALIGN. */
GMMDEF gmm_status gmm_gtp_query(const gmm_gtp_config *config, size_t *bytes, gmm_error *error);
GMMDEF gmm_status gmm_gtp_init(void *memory, size_t bytes, const gmm_gtp_config *config, gmm_gtp **out,
                               gmm_error *error);
/* Ends the use of memory, events and windows; work must be done. NULL is allowed.  Errors: those of the runtime. */
GMMDEF gmm_status gmm_gtp_fini(gmm_gtp *gtp);
/* Message of the last failed call; "" before any. */
GMMDEF const char *gmm_gtp_last_error(const gmm_gtp *gtp);

/* Declarations; ids count from 0, and an id must exist before it is used. Descriptors are copied.
   The weights of a bundle may be listed in any order: their expert indices must be 0 to count - 1, each once, and they
   share dtype and scaling; quantized ones of one shape also the unit. Every weight is in one bundle. A bundle's name is
   the same on all ranks; CPU ranks distinguish bundles of one size by it. NULL is "bundle".
   Errors: GMM_E_NULL, GMM_E_VERSION, GMM_E_ARG, GMM_E_DTYPE, GMM_E_ALIGN, as gmm_gtp_plan; GMM_E_CONFIG (also: one
       communicator on several streams; a bundle in two chains of a pass, or in captured and other chains; bundles of
       several domains gathered together); GMM_E_WORKSPACE (more than configured); GMM_E_STATE (sealed). */
GMMDEF gmm_status gmm_gtp_add_domain(gmm_gtp *gtp, const gmm_gtp_domain *domain, int32_t *id);
GMMDEF gmm_status gmm_gtp_add_weight(gmm_gtp *gtp, const gmm_gtp_weight *weight, int32_t *id);
GMMDEF gmm_status gmm_gtp_add_bundle(gmm_gtp *gtp, int32_t domain, const int32_t *weights, int32_t count,
                                     const char *name, int32_t *id);
GMMDEF gmm_status gmm_gtp_add_chain(gmm_gtp *gtp, const gmm_gtp_chain *chain, int32_t *id);

/* gmm_gtp_seal ends the declarations and lays out the memory. gmm_gtp_memory_need gives the bytes of a domain.
   gmm_gtp_bind sets its memory; where the communicators register windows it is collective, and all ranks bind the same
   blocks of the domain. Bytes of 0 take NULL. The blocks of all domains share no bytes with each other, with shards or
   with main_grads.
   Errors: GMM_E_STATE, GMM_E_CONFIG (a weight in no bundle), GMM_E_OVERFLOW (buffers whose bytes do not fit 64 bits),
       those of gmm_accumulate_query and gmm_quantize_query, GMM_E_WORKSPACE, GMM_E_ALIGN, GMM_E_ARG (also: blocks
       overlap), GMM_E_NULL, GMM_E_VERSION, GMM_E_COMM, those of the runtime. */
GMMDEF gmm_status gmm_gtp_seal(gmm_gtp *gtp);
GMMDEF gmm_status gmm_gtp_memory_need(gmm_gtp *gtp, int32_t domain, gmm_gtp_need *need);
GMMDEF gmm_status gmm_gtp_bind(gmm_gtp *gtp, int32_t domain, void *gather, size_t gather_bytes, void *reduce,
                               size_t reduce_bytes);

/* Declares the chain that runs after a chain: the first bundles of `next` are gathered while the last ones of `chain`
   are computed, such as those of backward after forward, or of forward after backward within a step. -1 = none, the
   default: use it before an optimizer step, whose new shards would make the gather useless. gmm_gtp_seal sizes slots by
   the calls made until then, the same on all ranks: a forward chain that follows itself, as in inference or while a
   pipeline fills, takes count % (held + prefetch) more slots than held + prefetch, if it has as many bundles. A first
   bundle that shares its slot with a last one is not gathered ahead.
   Errors: GMM_E_ARG, GMM_E_CAPTURE. */
GMMDEF gmm_status gmm_gtp_follow(gmm_gtp *gtp, int32_t chain, int32_t next);

/* Declares that the work enqueued on `stream` so far has written the shards of these weights. Gathers wait for it.
   Errors: GMM_E_NULL, GMM_E_ARG, GMM_E_STATE, GMM_E_CAPTURE, those of the runtime. */
GMMDEF gmm_status gmm_gtp_publish(gmm_gtp *gtp, const int32_t *weights, int32_t count, gmm_stream stream);

/* Quantizes the rows of shards in a wider dtype, and publishes the shards: waits for gathers as gmm_gtp_fence does,
   computes the amaxes of tensors that need one (TENSOR unless delayed, NV16) over all ranks of the domain in one packed
   reduction, and writes elements, scales and amax in every direction that the plan stores. Weights without a scaling
   are converted. Collective: all ranks pass the same weights in the same order. For any number of ranks the bits are
   those of quantizing the unsharded matrix.
   Shapes: from [count] matrices [shard_rows, local_cols], dense, padding rows zeros. */
typedef struct gmm_gtp_quantization {
    uint32_t struct_size;
    gmm_dtype dtype;            /* of the rows: F32, F16 or BF16 */
    const void *const *from;    /* [count] addresses, on the host */
    const float *scale;         /* [count] delayed: quantization scales, in the context's memory; NULL = ones */
    float *amax;                /* [count] delayed: raised to the maximum over all ranks, in the context's memory; NULL
                                   = not wanted */
    const gmm_comm *also;       /* further ranks that share the amaxes, such as tensor-parallel ones; NULL = none. It is
                                   called on the domain's gather stream, or on `stream` where a domain has one rank.
                                   gmm_gtp_poll does not monitor it. If a call of it fails, the object fails, and its
                                   give_up is called too */
} gmm_gtp_quantization;

/* Errors: as gmm_gtp_publish; GMM_E_NULL, GMM_E_VERSION, GMM_E_ARG, GMM_E_DTYPE, GMM_E_ALIGN, GMM_E_CONFIG (a
       quantized weight without a format), GMM_E_COMM. */
GMMDEF gmm_status gmm_gtp_quantize(gmm_gtp *gtp, const int32_t *weights, int32_t count,
                                   const gmm_gtp_quantization *quantization, gmm_stream stream);

/* Gathers a bundle before it is acquired, as chains do; for the first bundles after an optimizer step. Does nothing
   while its slot is in use.  Errors: as gmm_gtp_acquire. */
GMMDEF gmm_status gmm_gtp_prefetch(gmm_gtp *gtp, int32_t bundle, gmm_gtp_pass pass);

/* The gathered weights of a bundle: `stream` waits until they are complete, and they stay valid until the release,
   which declares that only work enqueued on `stream` so far reads them. The next bundles of the chain are gathered
   ahead.
   Errors: GMM_E_ARG, GMM_E_NULL, GMM_E_VERSION; GMM_E_STATE (not bound; acquired twice, released without; the slot
       holds another bundle that the caller has not released); GMM_E_CAPTURE (a bundle of chains that are not captured);
       GMM_E_COMM, those of the runtime. */
GMMDEF gmm_status gmm_gtp_acquire(gmm_gtp *gtp, int32_t bundle, gmm_gtp_pass pass, gmm_stream stream,
                                  gmm_gtp_view *view);
GMMDEF gmm_status gmm_gtp_release(gmm_gtp *gtp, int32_t bundle, gmm_gtp_pass pass, gmm_stream stream);

/* The matrices first to first + count - 1 of an acquired bundle, which have one shape, in a view of their own that is
   valid until the release, or until another part of that pass that begins with the same matrix. Enqueues nothing.
   Errors: as gmm_gtp_acquire; GMM_E_STATE (not acquired), GMM_E_CONFIG (several shapes). */
GMMDEF gmm_status gmm_gtp_view_part(gmm_gtp *gtp, int32_t bundle, gmm_gtp_pass pass, int32_t first, int32_t count,
                                    gmm_gtp_view *part);

/* A buffer for the gradient of a bundle, in the wire dtype, that `stream` may write. Its rows are the logical ones, all
   of which must be written; the padding behind them is zero and must remain zero. It is the caller's until submit.
   Errors: as gmm_gtp_acquire; GMM_E_STATE (frozen; called twice before submit; in use by another bundle: too few slots,
       in a graph or outside). */
GMMDEF gmm_status gmm_gtp_wgrad(gmm_gtp *gtp, int32_t bundle, gmm_stream stream, gmm_gtp_view *view);
/* The gradients first to first + count - 1 of the bundle, of one shape, between gmm_gtp_wgrad and gmm_gtp_submit.
   Errors: as gmm_gtp_view_part. */
GMMDEF gmm_status gmm_gtp_wgrad_part(gmm_gtp *gtp, int32_t bundle, int32_t first, int32_t count, gmm_gtp_view *part);

/* Reduces a gradient, which work enqueued on `stream` computes, into main_grad on the reduce stream. It may be called
   at any time after the GEMM was enqueued, as with delayed weight gradients, and any number of times for a bundle.
   Collective: a rank without tokens calls it too.
   Errors: as gmm_gtp_acquire; GMM_E_STATE (gmm_gtp_wgrad was not called; or it was, with zero or from),
       GMM_E_DTYPE, GMM_E_STRIDE, GMM_E_OVERFLOW, GMM_E_ALIGN. */
GMMDEF gmm_status gmm_gtp_submit(gmm_gtp *gtp, int32_t bundle, const gmm_gtp_gradient *gradient, gmm_stream stream);

enum { GMM_GTP_GATHERS = 1u, GMM_GTP_GRADIENTS = 2u, GMM_GTP_ALL = 3u };

/* Makes `stream` wait: GMM_GTP_GATHERS for all gathers so far, so that shards may be written; GMM_GTP_GRADIENTS for all
   submitted gradients, so that every main_grad is complete. Either also makes it wait for the replays that
   gmm_gtp_post_replay has reported on other streams.
   Errors: GMM_E_ARG, GMM_E_STATE, those of the runtime. */
GMMDEF gmm_status gmm_gtp_fence(gmm_gtp *gtp, uint32_t what, gmm_stream stream);

/* Raises each value to its maximum over a domain's ranks, in the order of `stream`: for packed per-tensor amaxes, once
   a step. Other ranks that share the tensor (DP) use all_reduce_max of their own communicator.
   Errors: as gmm_gtp_acquire; GMM_E_ALIGN, GMM_E_CAPTURE (in a capture). */
GMMDEF gmm_status gmm_gtp_amax(gmm_gtp *gtp, int32_t domain, float *values, int32_t count, gmm_stream stream);

/* Checks the collectives in flight (up to 256 of a stream), without waiting for them: GMM_E_COMM if one has run longer
   than timeout_ms, counted from the first poll that finds it begun, or a communicator reports a failure. Call it
   repeatedly while the host waits for a stream.
   Errors: GMM_E_COMM, GMM_E_STATE, GMM_E_CAPTURE, those of the runtime. */
GMMDEF gmm_status gmm_gtp_poll(gmm_gtp *gtp);

/* Begins (on 1) or ends a dry run, to warm up before a capture: everything runs, but main_grad is not changed and no
   callback is called. Ending it while a view is held or a gradient not submitted is GMM_E_STATE.
   Errors: GMM_E_STATE, GMM_E_CAPTURE. */
GMMDEF gmm_status gmm_gtp_dry_run(gmm_gtp *gtp, int32_t on);

/* Captures the following calls on `stream`, which has begun capturing; the domains' streams join the capture when they
   are first used, and are joined back at the end. Graphs get ids from 0. When a capture begins or ends, and before a
   replay, the caller holds no view of a bundle in captured chains, and has submitted its gradients. Before a replay,
   gmm_gtp_pre_replay makes `stream` wait for newly published shards and for gathers and reductions outside of graphs,
   and calls hooks.need for the shards that the graph reads; after it, gmm_gtp_post_replay calls hooks.ready for its
   gradients, and later gathers and reductions wait for the replay. Neither may be left out, and no other call is made
   between the two.
   Errors: GMM_E_STATE (nested; a view is held, or a gradient not submitted), GMM_E_CAPTURE (stream not capturing),
       GMM_E_WORKSPACE (more graphs than configured), GMM_E_NULL, GMM_E_ARG, those of the runtime. */
GMMDEF gmm_status gmm_gtp_capture_begin(gmm_gtp *gtp, gmm_stream stream, int32_t *graph);
GMMDEF gmm_status gmm_gtp_capture_end(gmm_gtp *gtp, gmm_stream stream);
GMMDEF gmm_status gmm_gtp_pre_replay(gmm_gtp *gtp, int32_t graph, gmm_stream stream);
GMMDEF gmm_status gmm_gtp_post_replay(gmm_gtp *gtp, int32_t graph, gmm_stream stream);

/* The counts so far. Errors: GMM_E_NULL, GMM_E_VERSION, GMM_E_ARG (struct_size). */
GMMDEF gmm_status gmm_gtp_statistics_of(const gmm_gtp *gtp, gmm_gtp_statistics *out);

/* ----------------------------------------------------------------------------------------------- 11 Checkpoints --- */

/* Export and import of shards by logical rows, as plans of strided moves (gmm.h, Checkpoints). Plans are built from
   shapes alone, report every error before a byte is copied, are verified, run through memory or callbacks, and can
   resume.

       gmm_gtp_export    the shards of ranks -> the logical weights, of which every rank writes its own rows
       gmm_gtp_import    logical weights, or the shards of other TP and GTP sizes -> the shards of one rank

   Logical     The logical weight [rows, cols] is the shard of TP size 1 and GTP size 1: its sections one after another,
               without padding. A shard's rows are those of its extents. Padding is never exported, and imported as
               zeros.
   Arrays      Any array in the layout of a shard: the weight, its fp32 main weight, optimizer moments. The fp32 arrays
               of a quantized weight are described by its shard with dtype F32, scaling NONE and the weight's unit. No
               runtime is needed, and main_grad is not read; after an import the caller publishes the weights.
   Quantized   Within one format and direction, elements and scales are copied unchanged, so that no value is quantized
               twice; every boundary must then fall between blocks. 128X128 blocks may also be dequantized, at any
               boundary: shards whose boundaries cut blocks are imported into 16 bits and quantized again.
   Tables      Elements of a shard are [rows, cols] as gmm_layout_of stores them, transposed copies as [cols, rows].
               Scales are COMPACT, with its padding or without it (as export writes them); TENSOR has one value, which
               rank 0 of TP and GTP exports. The caller saves and restores the global amax of NV16. */

/* A shard of a weight in a table. Arrays of these have no struct_size. */
typedef struct gmm_gtp_stored {
    const gmm_shard *shard; /* which rows and columns, and their format */
    int32_t part;           /* the table */
    int32_t data, scale;    /* its tensors; scale -1 = none */
    int32_t reserved;       /* 0 */
} gmm_gtp_stored;

/* One weight, or one copy of a quantized one. Arrays of these have no struct_size. */
typedef struct gmm_gtp_item {
    const char *name;             /* of the target's elements, */
    const char *scale_name;       /* and of its scales; NULL where the format has none */
    const gmm_shard *shard;       /* import: the target. export: the weight and its stored format, of any rank */
    gmm_direction direction;      /* of quantized arrays, in source and target */
    int32_t stored_count;
    const gmm_gtp_stored *stored; /* import: shards that together contain the target. export: the shards that this
                                     process writes. All have the same sections; rows that several contain are read
                                     from the first */
} gmm_gtp_item;

/* Plans the items: targets are their elements and scales, in the order of items. Parts (only their tables are read),
   shards and names are read during the call; tables must outlive the plan, which gmm_ckpt_plan_destroy frees. Export
   plans are partial (gmm_ckpt_plan_of_moves): one process may export the shards of all ranks, or each process its own.
   *out is NULL after a failure.
   Errors (reason): GMM_E_NULL; GMM_E_ARG (argument; also of gmm_gtp_plan); GMM_E_VERSION; GMM_E_KEY (shape: a weight or
       tensor of other extents; missing_index: rows that no stored shard contains; duplicate_key), GMM_E_DTYPE (dtype),
       GMM_E_CONFIG (not_divisible: a boundary that cuts a block), GMM_E_OVERFLOW, GMM_E_MEMORY. */
GMMDEF gmm_status gmm_gtp_export(gmm_ckpt_plan **out, const gmm_ckpt_part *parts, int32_t part_count,
                                 const gmm_gtp_item *items, int64_t count, const gmm_allocator *allocator,
                                 gmm_ckpt_report *report);
GMMDEF gmm_status gmm_gtp_import(gmm_ckpt_plan **out, const gmm_ckpt_part *parts, int32_t part_count,
                                 const gmm_gtp_item *items, int64_t count, const gmm_allocator *allocator,
                                 gmm_ckpt_report *report);

#ifdef __cplusplus
}
#endif
GMM_QUIET_END
#endif /* GMM_MOE_GTP_H_INCLUDED */

/* -------------------------------------------------------------------------------------------- 12 Implementation --- */

/* Opens the implementation: includes, and the copying of descriptors.

   Names of locals in all parts: fn is the name of the public function, for messages; g or gtp is the runtime object, d
   a domain, b a bundle, w a weight, c a communicator or a configuration; s is a gmm_status. */

#if defined(GMM_IMPLEMENTATION) && !defined(GMM__GTP_IMPLEMENTATION_DONE) && GMM__HOLDS(2)
#define GMM__GTP_IMPLEMENTATION_DONE

#include "gmm.h" /* its implementation, if only its declarations were included before GMM_IMPLEMENTATION */
#include <string.h>
#include <time.h>
#ifdef GMM_WITH_CPU_RANKS
#include <pthread.h>
#endif
#if defined(__CUDACC__) && defined(GMM_WITH_NCCL)
#include <nccl.h>
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* Bytes of a descriptor that caller and implementation both know; 0 = invalid, for the reason in *status. */
static size_t gmm__gtp_common_size(const char *fn, const char *name, const void *desc, size_t size, gmm_status *status,
                                   gmm_error *error) {
    char rule[96];
    uint32_t stated;
    if (!desc) {
        *status = gmm__fail(error, GMM_E_NULL, "%s: %s is NULL", fn, name);
        return 0;
    }
    memcpy(&stated, desc, sizeof stated); /* struct_size is the first member of every descriptor */
    if ((*status = gmm__check_size(stated, size, rule)) != GMM_OK) {
        *status = gmm__fail(error, *status, "%s: %s->%s", fn, name, rule);
        return 0;
    }
    return stated ? stated : size;
}

/* Copies a descriptor; fields that an older caller lacks become 0. */
static gmm_status gmm__gtp_read(const char *fn, const char *name, const void *desc, void *copy, size_t size,
                                gmm_error *error) {
    gmm_status status = GMM_OK;
    const size_t common = gmm__gtp_common_size(fn, name, desc, size, &status, error);
    if (common) {
        memset(copy, 0, size);
        memcpy(copy, desc, common);
    }
    return status;
}

/* Shard plans and extents. */

/* Rows of a scaling block, which no shard boundary may cut. */
static int64_t gmm__gtp_block_rows(gmm_scaling scaling) {
    return scaling == GMM_SCALING_NONE || scaling == GMM_SCALING_TENSOR ? 1 : gmm_gtp_unit(scaling);
}

GMMDEF int64_t gmm_gtp_unit(gmm_scaling scaling) {
    switch (scaling) {
    case GMM_SCALING_NONE:
    case GMM_SCALING_TENSOR:
    case GMM_SCALING_NV16: return 16;
    case GMM_SCALING_MX32: return 32;
    case GMM_SCALING_1X128:
    case GMM_SCALING_128X128: return 128;
    default: return 0;
    }
}

GMMDEF int64_t gmm_gtp_recipe_unit(gmm_recipe_kind recipe) {
    switch (recipe) {
    case GMM_RECIPE_NONE: return gmm_gtp_unit(GMM_SCALING_NONE);
    case GMM_RECIPE_FP8_DELAYED:
    case GMM_RECIPE_FP8_CURRENT: return gmm_gtp_unit(GMM_SCALING_TENSOR);
    case GMM_RECIPE_FP8_BLOCK: return gmm_gtp_unit(GMM_SCALING_128X128);
    case GMM_RECIPE_MXFP8: return gmm_gtp_unit(GMM_SCALING_MX32);
    case GMM_RECIPE_NVFP4: return gmm_gtp_unit(GMM_SCALING_NV16);
    default: return 0;
    }
}

/* Checks everything about a shard except its sections. */
static gmm_status gmm__gtp_check_shard(const char *fn, const gmm_shard *s, gmm_error *error) {
    const int64_t block = gmm__gtp_block_rows(s->scaling);
    if (gmm_gtp_unit(s->scaling) == 0)
        return gmm__fail(error, GMM_E_DTYPE, "%s: scaling %s (%d) is not sharded", fn, gmm_scaling_name(s->scaling),
                         (int)s->scaling);
    if (s->tp_cut != GMM_TP_WHOLE && s->tp_cut != GMM_TP_ROWS && s->tp_cut != GMM_TP_COLS)
        return gmm__fail(error, GMM_E_ARG, "%s: tp_cut is %d: must be a gmm_tp_cut", fn, (int)s->tp_cut);
    if (s->rows < 1 || s->cols < 1)
        return gmm__fail(error, GMM_E_ARG, "%s: weight of %lld x %lld: rows and cols must be >= 1", fn,
                         (long long)s->rows, (long long)s->cols);
    if (s->tp_rank < 0 || s->tp_rank >= s->tp_size)
        return gmm__fail(error, GMM_E_ARG, "%s: tp_rank %d of tp_size %d: must be in [0, size)", fn, (int)s->tp_rank,
                         (int)s->tp_size);
    if (s->gtp_rank < 0 || s->gtp_rank >= s->gtp_size)
        return gmm__fail(error, GMM_E_ARG, "%s: gtp_rank %d of gtp_size %d: must be in [0, size)", fn,
                         (int)s->gtp_rank, (int)s->gtp_size);
    if (s->sections < 0 || (s->sections > 0) != (s->section_rows != NULL))
        return gmm__fail(error, GMM_E_ARG, "%s: sections is %d and section_rows is %s: one needs the other", fn,
                         (int)s->sections, s->section_rows ? "given" : "NULL");
    if (s->tp_multiple < 0)
        return gmm__fail(error, GMM_E_ARG, "%s: tp_multiple is %d: must be >= 0", fn, (int)s->tp_multiple);
    if (s->tp_cut == GMM_TP_COLS && s->cols % s->tp_size != 0)
        return gmm__fail(error, GMM_E_ARG, "%s: cols is %lld: must be a multiple of tp_size %d", fn,
                         (long long)s->cols, (int)s->tp_size);
    if (s->unit < GMM_GTP_UNPADDED)
        return gmm__fail(error, GMM_E_ARG, "%s: unit is %lld: must be > 0, 0 (the format's) or GMM_GTP_UNPADDED", fn,
                         (long long)s->unit);
    if (s->unit > 0 && s->unit % block != 0)
        return gmm__fail(error, GMM_E_CONFIG, "%s: unit is %lld: must be a multiple of %lld rows, a block of scaling "
                         "%s", fn, (long long)s->unit, (long long)block, gmm_scaling_name(s->scaling));
    return GMM_OK;
}

/* The rows that a TP rank has of `rows` rows of the whole weight. */
static int64_t gmm__gtp_tp_rows(const gmm_shard *s, int64_t rows) {
    return s->tp_cut == GMM_TP_ROWS ? rows / s->tp_size : rows;
}

/* Checks the sections of a shard. */
static gmm_status gmm__gtp_check_sections(const char *fn, const gmm_shard *s, gmm_error *error) {
    const int32_t n = s->sections ? s->sections : 1;
    int64_t remaining = s->rows;
    int32_t i;
    for (i = 0; i < n; i++) {
        const int64_t rows = s->sections ? s->section_rows[i] : s->rows;
        if (rows < 1)
            return gmm__fail(error, GMM_E_ARG, "%s: section_rows[%d] is %lld: must be >= 1", fn, i,
                             (long long)rows);
        if (rows > remaining || (i == n - 1 && rows < remaining))
            return gmm__fail(error, GMM_E_ARG, "%s: section_rows[%d] is %lld with %lld of rows %lld left: the sections "
                             "must add up to rows", fn, i, (long long)rows, (long long)remaining, (long long)s->rows);
        if (s->tp_cut == GMM_TP_ROWS && rows % s->tp_size != 0)
            return gmm__fail(error, GMM_E_ARG, "%s: section %d has %lld rows: must be a multiple of tp_size %d", fn,
                             i, (long long)rows, (int)s->tp_size);
        if (s->tp_cut == GMM_TP_ROWS && s->tp_multiple > 1 && rows / s->tp_size % s->tp_multiple != 0)
            return gmm__fail(error, GMM_E_CONFIG, "%s: section %d has %lld rows per TP rank: must be a multiple of "
                             "tp_multiple %d", fn, i, (long long)(rows / s->tp_size), (int)s->tp_multiple);
        remaining -= rows;
    }
    return GMM_OK;
}

/* Copies the shard, fills in its defaults, and computes its plan. */
static gmm_status gmm__gtp_plan_shard(const char *fn, const gmm_shard *desc, gmm_shard *s, gmm_shard_plan *p,
                                      gmm_error *error) {
    const gmm_shard_plan zero = GMM_ZERO;
    gmm_status status = gmm__gtp_read(fn, "shard", desc, s, sizeof *s, error);
    int64_t block, multiple = 0;
    int direction;
    if (status) return status;
    if (s->tp_size == 0) s->tp_size = 1;
    if (s->gtp_size == 0) s->gtp_size = 1;
    status = gmm__gtp_check_shard(fn, s, error);
    if (status) return status;
    status = gmm__gtp_check_sections(fn, s, error);
    if (status) return status;

    *p = zero;
    block = gmm__gtp_block_rows(s->scaling);
    p->unit = s->unit == GMM_GTP_UNPADDED ? 0 : s->unit ? s->unit : gmm_gtp_unit(s->scaling);
    p->local_rows = gmm__gtp_tp_rows(s, s->rows);
    p->local_cols = s->tp_cut == GMM_TP_COLS ? s->cols / s->tp_size : s->cols;
    p->col0 = s->tp_cut == GMM_TP_COLS ? s->tp_rank * p->local_cols : 0;
    if (s->scaling == GMM_SCALING_NV16 && p->local_rows % 2 != 0)
        return gmm__fail(error, GMM_E_ARG, "%s: %lld local rows: must be even for scaling nv16", fn,
                         (long long)p->local_rows);
    if (s->gtp_size > 1 && p->unit == 0) {
        if (p->local_rows % s->gtp_size != 0)
            return gmm__fail(error, GMM_E_CONFIG, "%s: unit is GMM_GTP_UNPADDED and gtp_size %d does not divide %lld "
                             "local rows: the rest would be lost", fn, s->gtp_size, (long long)p->local_rows);
        if (p->local_rows / s->gtp_size % block != 0)
            return gmm__fail(error, GMM_E_CONFIG, "%s: unit is GMM_GTP_UNPADDED and shards of %lld rows cut the "
                             "%lld-row blocks of scaling %s", fn, (long long)(p->local_rows / s->gtp_size),
                             (long long)block, gmm_scaling_name(s->scaling));
    } else if (s->gtp_size > 1) {
        if (!gmm__mul(p->unit, s->gtp_size, &multiple) || p->local_rows > INT64_MAX - multiple)
            return gmm__fail(error, GMM_E_OVERFLOW, "%s: %lld local rows padded to unit %lld * gtp_size %d do not fit "
                             "64 bits", fn, (long long)p->local_rows, (long long)p->unit, s->gtp_size);
        p->pad = (multiple - p->local_rows % multiple) % multiple;
    }
    p->padded_rows = p->local_rows + p->pad;
    p->shard_rows = p->padded_rows / s->gtp_size;
    p->row0 = s->gtp_rank * p->shard_rows;
    p->valid_rows = p->local_rows - p->row0;
    p->valid_rows = p->valid_rows < 0 ? 0 : p->valid_rows > p->shard_rows ? p->shard_rows : p->valid_rows;

    for (direction = GMM_ROWWISE; direction <= GMM_COLUMNWISE; direction++) {
        const int columnwise = direction == GMM_COLUMNWISE;
        /* whether shards store the direction; other columnwise copies are transposed from gathered rowwise ones */
        const int stored = !columnwise || (gmm__gtp_block_rows(s->scaling) > 1 && s->scaling != GMM_SCALING_128X128);
        gmm_layout whole = GMM_ZERO, shard = GMM_ZERO;
        gmm_error layout_error = GMM_ZERO;
        if (columnwise && s->scaling == GMM_SCALING_NONE) continue;
        status = gmm_layout_of(s->dtype, s->scaling, GMM_SCALES_COMPACT, (gmm_direction)direction, p->padded_rows,
                               p->local_cols, &whole, &layout_error);
        if (!status && stored)
            status = gmm_layout_of(s->dtype, s->scaling, GMM_SCALES_COMPACT, (gmm_direction)direction, p->shard_rows,
                                   p->local_cols, &shard, &layout_error);
        if (status) return gmm__fail(error, status, "%s: %.400s", fn, layout_error.text);
        p->gather_data_bytes[direction] = whole.data_bytes;
        p->gather_scale_bytes[direction] = whole.scale_bytes;
        p->shard_data_bytes[direction] = shard.data_bytes;
        p->shard_scale_bytes[direction] = shard.scale_bytes;
    }
    return GMM_OK;
}

/* Which axis of a scale array runs along the rows of the weight (1: its rows, 0: its columns), and the number of rows
   that share a scale. */
static int gmm__gtp_scale_axis(gmm_scaling scaling, int direction, int64_t *block) {
    const int columnwise = direction == GMM_COLUMNWISE;
    switch (scaling) {
    case GMM_SCALING_1X128: *block = columnwise ? 128 : 1; return columnwise;
    case GMM_SCALING_MX32: *block = columnwise ? 32 : 1; return 1;
    case GMM_SCALING_NV16: *block = columnwise ? 16 : 1; return !columnwise;
    default: *block = 128; return !columnwise; /* 128X128 */
    }
}

/* Bytes of a shard's scales that its rank sends. Ranks agree on the scale of TENSOR beforehand, and where the scales of
   shards follow one another in those of the whole weight, padding behind a shard's is not sent. */
static int64_t gmm__gtp_sent_scale_bytes(gmm_scaling scaling, int direction, int64_t shard_rows,
                                         const gmm_layout *shard) {
    int64_t block = 1;
    if (scaling == GMM_SCALING_NONE || scaling == GMM_SCALING_TENSOR) return 0;
    if (!gmm__gtp_scale_axis(scaling, direction, &block)) return shard->scale_bytes;
    /* at most the bytes of the layout; bits might not fit */
    return shard_rows / block * shard->scale_cols * (gmm_dtype_bits(shard->scale_dtype) / 8);
}

GMMDEF gmm_status gmm_gtp_plan(const gmm_shard *shard, gmm_shard_plan *plan, gmm_error *error) {
    gmm_shard s;
    gmm_shard_plan p;
    gmm_status status = GMM_OK;
    const size_t common = gmm__gtp_common_size("gmm_gtp_plan", "plan", plan, sizeof *plan, &status, error);
    if (status) return status;
    status = gmm__gtp_plan_shard("gmm_gtp_plan", shard, &s, &p, error);
    if (status) return status;
    p.struct_size = plan->struct_size;
    memcpy(plan, &p, common);
    return GMM_OK;
}

GMMDEF gmm_status gmm_gtp_extents(const gmm_shard *shard, gmm_extent *extents, int32_t capacity, int32_t *count,
                                  gmm_error *error) {
    gmm_shard s;
    gmm_shard_plan p;
    int32_t i, n = 0, pass;
    gmm_status status;
    if (!count) return gmm__fail(error, GMM_E_NULL, "gmm_gtp_extents: count is NULL");
    if (capacity < 0)
        return gmm__fail(error, GMM_E_ARG, "gmm_gtp_extents: capacity is %d: must be >= 0", capacity);
    if (!extents && capacity > 0)
        return gmm__fail(error, GMM_E_NULL, "gmm_gtp_extents: extents is NULL with capacity %d", capacity);
    status = gmm__gtp_plan_shard("gmm_gtp_extents", shard, &s, &p, error);
    if (status) return status;
    for (pass = 0; pass < (extents ? 2 : 1); pass++) { /* count, then fill */
        int64_t logical0 = 0, local0 = 0; /* first row of the section: in the whole weight, in the local matrix */
        if (pass == 1 && n > capacity)
            return gmm__fail(error, GMM_E_WORKSPACE, "gmm_gtp_extents: capacity is %d: the shard has %d extents",
                             capacity, n);
        n = 0;
        for (i = 0; i < (s.sections ? s.sections : 1); i++) {
            const int64_t rows = s.sections ? s.section_rows[i] : s.rows, slice = gmm__gtp_tp_rows(&s, rows);
            const int64_t lo = local0 > p.row0 ? local0 : p.row0, last = p.row0 + p.valid_rows;
            const int64_t hi = local0 + slice < last ? local0 + slice : last;
            if (lo < hi) {
                if (pass == 1) {
                    gmm_extent x = GMM_ZERO;
                    x.section = i;
                    x.begin = (s.tp_cut == GMM_TP_ROWS ? s.tp_rank * slice : 0) + (lo - local0);
                    x.end = x.begin + (hi - lo);
                    x.logical_row = logical0 + x.begin;
                    x.shard_row = lo - p.row0;
                    extents[n] = x;
                }
                n++;
            }
            logical0 += rows;
            local0 += slice;
        }
    }
    *count = n;
    return GMM_OK;
}

/* Process grids, the replica rule, and seeds of ranks. */

/* The axis with the i-th smallest stride of ranks. */
static int gmm__grid_axis(gmm_grid_kind kind, int i) {
    static const int8_t order[2][GMM_AXIS_COUNT] = {
        {GMM_AXIS_TP, GMM_AXIS_GTP, GMM_AXIS_CP, GMM_AXIS_EP, GMM_AXIS_DP, GMM_AXIS_PP},
        {GMM_AXIS_TP, GMM_AXIS_CP, GMM_AXIS_EP, GMM_AXIS_GTP, GMM_AXIS_DP, GMM_AXIS_PP}};
    return order[kind == GMM_GRID_EXPERT][i];
}

/* Copies and checks a grid; *world is its number of ranks. */
static gmm_status gmm__grid_read(const char *fn, const gmm_grid *desc, gmm_grid *g, int32_t *world, gmm_error *error) {
    static const char *const names[GMM_AXIS_COUNT] = {"TP", "GTP", "CP", "EP", "DP", "PP"};
    gmm_status status = gmm__gtp_read(fn, "grid", desc, g, sizeof *g, error);
    int64_t ranks = 1;
    int a, absent;
    if (status) return status;
    if (g->kind != GMM_GRID_DENSE && g->kind != GMM_GRID_EXPERT)
        return gmm__fail(error, GMM_E_ARG, "%s: kind is %d: must be a gmm_grid_kind", fn, (int)g->kind);
    absent = g->kind == GMM_GRID_EXPERT ? GMM_AXIS_CP : GMM_AXIS_EP;
    for (a = 0; a < GMM_AXIS_COUNT; a++) {
        if (g->size[a] < 0)
            return gmm__fail(error, GMM_E_ARG, "%s: size of %s is %d: must be >= 0", fn, names[a], g->size[a]);
        if (g->size[a] == 0) g->size[a] = 1;
        if (a == absent && g->size[a] > 1)
            return gmm__fail(error, GMM_E_CONFIG, "%s: size of %s is %d: %s grid has no such axis", fn, names[a],
                             g->size[a], g->kind == GMM_GRID_EXPERT ? "an expert" : "a dense");
        ranks *= g->size[a]; /* both operands are below 2^31 */
        if (ranks > INT32_MAX)
            return gmm__fail(error, GMM_E_OVERFLOW, "%s: the grid has more than 2^31 - 1 ranks", fn);
    }
    *world = (int32_t)ranks;
    return GMM_OK;
}

GMMDEF gmm_status gmm_grid_world(const gmm_grid *grid, int32_t *world, gmm_error *error) {
    gmm_grid g;
    if (!world) return gmm__fail(error, GMM_E_NULL, "gmm_grid_world: world is NULL");
    return gmm__grid_read("gmm_grid_world", grid, &g, world, error);
}

static gmm_status gmm__grid_coords(const char *fn, const gmm_grid *grid, int32_t rank, gmm_grid *g, int32_t *coords,
                                   gmm_error *error) {
    int32_t world = 0;
    gmm_status status = gmm__grid_read(fn, grid, g, &world, error);
    int i;
    if (status) return status;
    if (rank < 0 || rank >= world)
        return gmm__fail(error, GMM_E_ARG, "%s: rank is %d: must be in [0, %d)", fn, rank, world);
    for (i = 0; i < GMM_AXIS_COUNT; i++) {
        const int a = gmm__grid_axis(g->kind, i);
        coords[a] = rank % g->size[a];
        rank /= g->size[a];
    }
    return GMM_OK;
}

GMMDEF gmm_status gmm_grid_coords(const gmm_grid *grid, int32_t rank, int32_t coords[GMM_AXIS_COUNT],
                                  gmm_error *error) {
    gmm_grid g;
    int32_t c[GMM_AXIS_COUNT];
    gmm_status status;
    if (!coords) return gmm__fail(error, GMM_E_NULL, "gmm_grid_coords: coords is NULL");
    status = gmm__grid_coords("gmm_grid_coords", grid, rank, &g, c, error);
    if (!status) memcpy(coords, c, sizeof c);
    return status;
}

GMMDEF gmm_status gmm_grid_rank(const gmm_grid *grid, const int32_t coords[GMM_AXIS_COUNT], int32_t *rank,
                                gmm_error *error) {
    gmm_grid g;
    int32_t world = 0, r = 0;
    gmm_status status;
    int i;
    if (!coords) return gmm__fail(error, GMM_E_NULL, "gmm_grid_rank: coords is NULL");
    if (!rank) return gmm__fail(error, GMM_E_NULL, "gmm_grid_rank: rank is NULL");
    status = gmm__grid_read("gmm_grid_rank", grid, &g, &world, error);
    if (status) return status;
    for (i = GMM_AXIS_COUNT - 1; i >= 0; i--) {
        const int a = gmm__grid_axis(g.kind, i);
        if (coords[a] < 0 || coords[a] >= g.size[a])
            return gmm__fail(error, GMM_E_ARG, "gmm_grid_rank: coords[%d] is %d: must be in [0, %d)", a, (int)coords[a],
                             g.size[a]);
        r = r * g.size[a] + coords[a];
    }
    *rank = r;
    return GMM_OK;
}

/* The group of the ranks whose coordinates differ from those of `rank` along `axes` alone. */
static gmm_status gmm__grid_group(const char *fn, const gmm_grid *grid, int32_t rank, uint32_t axes,
                                  gmm_grid_group *group, gmm_error *error) {
    gmm_grid g;
    gmm_grid_group out = GMM_ZERO;
    int32_t coords[GMM_AXIS_COUNT], stride = 1;
    gmm_status status;
    int i;
    if (axes >> GMM_AXIS_COUNT)
        return gmm__fail(error, GMM_E_ARG, "%s: axes is 0x%x: bits beyond 1u << GMM_AXIS_PP are unknown", fn,
                         axes);
    status = gmm__grid_coords(fn, grid, rank, &g, coords, error);
    if (status) return status;
    out.first = rank;
    out.size = 1;
    for (i = 0; i < GMM_AXIS_COUNT; i++) {
        const int a = gmm__grid_axis(g.kind, i);
        if (axes >> a & 1u) {
            out.first -= coords[a] * stride;
            out.index += coords[a] * out.size;
            out.size *= g.size[a];
        }
        stride *= g.size[a];
    }
    *group = out;
    return GMM_OK;
}

GMMDEF gmm_status gmm_grid_group_of(const gmm_grid *grid, int32_t rank, uint32_t axes, gmm_grid_group *group,
                                    gmm_error *error) {
    if (!group) return gmm__fail(error, GMM_E_NULL, "gmm_grid_group_of: group is NULL");
    return gmm__grid_group("gmm_grid_group_of", grid, rank, axes, group, error);
}

GMMDEF gmm_status gmm_grid_match(const gmm_grid *dense, const gmm_grid *expert, gmm_error *error) {
    gmm_grid d, x;
    int32_t dense_world = 0, expert_world = 0;
    gmm_status status = gmm__grid_read("gmm_grid_match", dense, &d, &dense_world, error);
    if (status) return status;
    status = gmm__grid_read("gmm_grid_match", expert, &x, &expert_world, error);
    if (status) return status;
    if (d.kind != GMM_GRID_DENSE || x.kind != GMM_GRID_EXPERT)
        return gmm__fail(error, GMM_E_CONFIG, "gmm_grid_match: kinds are %d and %d: must be a dense and an expert grid",
                         (int)d.kind, (int)x.kind);
    if (dense_world != expert_world)
        return gmm__fail(error, GMM_E_CONFIG, "gmm_grid_match: the dense grid has %d ranks, the expert grid %d: must "
                         "be equal", dense_world, expert_world);
    if (d.size[GMM_AXIS_PP] != x.size[GMM_AXIS_PP])
        return gmm__fail(error, GMM_E_CONFIG, "gmm_grid_match: PP is %d in the dense grid and %d in the expert grid: "
                         "must be equal", d.size[GMM_AXIS_PP], x.size[GMM_AXIS_PP]);
    return GMM_OK;
}

GMMDEF gmm_status gmm_gtp_writes(const gmm_grid *grid, int32_t rank, uint32_t cut_axes, int32_t *writes,
                                 gmm_error *error) {
    const uint32_t all = (1u << GMM_AXIS_COUNT) - 1u;
    gmm_grid_group replicas = GMM_ZERO;
    gmm_status status;
    if (!writes) return gmm__fail(error, GMM_E_NULL, "gmm_gtp_writes: writes is NULL");
    if (cut_axes & ~all)
        return gmm__fail(error, GMM_E_ARG, "gmm_gtp_writes: cut_axes is 0x%x: bits beyond 1u << GMM_AXIS_PP are "
                         "unknown", cut_axes);
    status = gmm__grid_group("gmm_gtp_writes", grid, rank, cut_axes ^ all, &replicas, error);
    if (status) return status;
    *writes = replicas.index == 0;
    return GMM_OK;
}

GMMDEF uint64_t gmm_gtp_seed(uint64_t base, gmm_grid_kind kind, uint32_t gtp_rank) {
    return base + (kind == GMM_GRID_EXPERT ? 32768u : 0u) + 65536u * (1u + (uint64_t)gtp_rank);
}

/* Forecast of the memory and of the time of a training step. */

/* *sum += a * b * c; returns 0 if that overflows. */
static int gmm__gtp_add_product(int64_t *sum, int64_t a, int64_t b, int64_t c) {
    int64_t product = 0;
    if (!gmm__mul(a, b, &product) || !gmm__mul(product, c, &product) || *sum > INT64_MAX - product) return 0;
    *sum += product;
    return 1;
}

GMMDEF gmm_status gmm_gtp_memory_add(const gmm_gtp_use *use, gmm_gtp_memory *memory, gmm_error *error) {
    static const char fn[] = "gmm_gtp_memory_add";
    gmm_gtp_use u;
    gmm_gtp_memory m;
    gmm_shard s, one;
    gmm_shard_plan p, whole;
    int64_t weights = 0, elements = 0, gradient, wire, received;
    int32_t d, gtp_size, sharded, fits;
    gmm_status status = GMM_OK;
    const size_t common = gmm__gtp_common_size(fn, "memory", memory, sizeof *memory, &status, error);
    if (status) return status;
    status = gmm__gtp_read(fn, "memory", memory, &m, sizeof m, error);
    if (status) return status;
    status = gmm__gtp_read(fn, "use", use, &u, sizeof u, error);
    if (status) return status;
    status = gmm__gtp_plan_shard(fn, u.shard, &s, &p, error);
    if (status) return status;
    if (u.bundle < 0 || u.layers < 0 || u.optimizer_bytes < 0 || u.optimizer_ranks < 0)
        return gmm__fail(error, GMM_E_ARG, "%s: bundle %d, layers %lld, optimizer_bytes %d, optimizer_ranks %d: must "
                         "be >= 0", fn, u.bundle, (long long)u.layers, u.optimizer_bytes, u.optimizer_ranks);
    if (u.gather_slots < 0 || u.recompute_slots < 0 || u.wgrad_slots < 0 || u.reduce_slots < 0)
        return gmm__fail(error, GMM_E_ARG, "%s: slots of gather %d, recompute %d, wgrad %d, reduce %d: must be >= 0",
                         fn, u.gather_slots, u.recompute_slots, u.wgrad_slots, u.reduce_slots);
    if (u.all_to_all != 0 && u.all_to_all != 1)
        return gmm__fail(error, GMM_E_ARG, "%s: all_to_all is %d: must be 0 or 1", fn, u.all_to_all);
    if (u.reserved != 0)
        return gmm__fail(error, GMM_E_ARG, "%s: reserved is %d: must be 0", fn, u.reserved);
    if (u.main_grad != GMM_NONE && u.main_grad != GMM_F32 && u.main_grad != GMM_BF16)
        return gmm__fail(error, GMM_E_DTYPE, "%s: main_grad is %s (%d): must be f32, bf16 or none", fn,
                         gmm_dtype_name(u.main_grad), (int)u.main_grad);
    if (u.wire != GMM_NONE && u.wire != GMM_F32 && u.wire != GMM_BF16)
        return gmm__fail(error, GMM_E_DTYPE, "%s: wire is %s (%d): must be f32, bf16 or none", fn,
                         gmm_dtype_name(u.wire), (int)u.wire);
    if (u.main_grad == GMM_NONE && (u.wgrad_slots || u.reduce_slots || u.wire != GMM_NONE))
        return gmm__fail(error, GMM_E_CONFIG, "%s: main_grad is none, but wgrad_slots %d, reduce_slots %d, wire %s: a "
                         "frozen weight has no gradient", fn, u.wgrad_slots, u.reduce_slots,
                         gmm_dtype_name(u.wire));
    if (u.bundle == 0) u.bundle = 1;
    if (u.layers == 0) u.layers = 1;
    if (u.optimizer_ranks == 0) u.optimizer_ranks = 1;
    if (u.optimizer_bytes == 0) u.optimizer_bytes = 12;

    gtp_size = s.gtp_size;
    sharded = gtp_size > 1;
    s.struct_size = 0; /* the same weight on one rank, for whole_weights */
    s.gtp_size = 1;
    s.gtp_rank = 0;
    status = gmm__gtp_plan_shard(fn, &s, &one, &whole, error);
    if (status) return status;

    gradient = u.main_grad == GMM_NONE ? 0 : gmm_dtype_bits(u.main_grad) / 8;
    wire = u.main_grad == GMM_NONE ? 0 : gmm_dtype_bits(u.wire == GMM_NONE ? GMM_F32 : u.wire) / 8;
    received = u.all_to_all ? p.padded_rows : p.shard_rows;
    fits = gmm__gtp_add_product(&weights, u.layers, u.bundle, 1) &&
           gmm__gtp_add_product(&elements, p.shard_rows, p.local_cols, weights);
    for (d = GMM_ROWWISE; fits && d <= GMM_COLUMNWISE; d++) {
        const int64_t slots = u.gather_slots + (d == GMM_ROWWISE ? (int64_t)u.recompute_slots : 0);
        const int gathered = sharded || p.shard_data_bytes[d] == 0;
        fits = gmm__gtp_add_product(&m.weights, p.shard_data_bytes[d], weights, 1) &&
               gmm__gtp_add_product(&m.weights, p.shard_scale_bytes[d], weights, 1) &&
               gmm__gtp_add_product(&m.whole_weights, whole.shard_data_bytes[d], weights, 1) &&
               gmm__gtp_add_product(&m.whole_weights, whole.shard_scale_bytes[d], weights, 1) &&
               gmm__gtp_add_product(&m.gather, p.gather_data_bytes[d], gathered ? slots : 0, u.bundle) &&
               gmm__gtp_add_product(&m.gather, p.gather_scale_bytes[d], gathered ? slots : 0, u.bundle);
    }
    if (fits && gradient)
        fits = gmm__gtp_add_product(&m.main_grads, elements, gradient, 1) &&
               gmm__gtp_add_product(&m.optimizer, elements / u.optimizer_ranks + (elements % u.optimizer_ranks != 0),
                                    u.optimizer_bytes, 1);
    if (fits && gradient) { /* one rank has gradient buffers too, since it scales and adds as several do */
        int64_t row = 0; /* bytes of a row of every gradient in the bundle */
        fits = gmm__gtp_add_product(&row, p.local_cols, wire, u.bundle) &&
               gmm__gtp_add_product(&m.wgrad, row, p.padded_rows, u.wgrad_slots) &&
               gmm__gtp_add_product(&m.reduce, row, sharded ? received : 0, u.reduce_slots);
    }
    if (fits && sharded) {
        int64_t stage[2] = {0, 0}; /* bytes that a rank receives of each rank in the stage, by direction */
        const int64_t *data = p.shard_data_bytes, *scale = p.shard_scale_bytes;
        const int transposed = p.gather_data_bytes[GMM_COLUMNWISE] > 0 && data[GMM_COLUMNWISE] == 0;
        if (transposed) stage[1] = data[GMM_ROWWISE] + (s.scaling == GMM_SCALING_TENSOR ? 0 : scale[GMM_ROWWISE]);
        if (s.scaling == GMM_SCALING_1X128) stage[0] = scale[GMM_ROWWISE], stage[1] = data[GMM_COLUMNWISE];
        if (s.scaling == GMM_SCALING_NV16) stage[1] = data[GMM_COLUMNWISE] + scale[GMM_COLUMNWISE];
        for (d = GMM_ROWWISE; fits && d <= GMM_COLUMNWISE; d++) {
            int64_t bytes = 0;
            fits = gmm__gtp_add_product(&bytes, stage[d], gtp_size, u.bundle);
            if (u.gather_slots && bytes > m.stage) m.stage = bytes;
        }
    }
    m.total = 0;
    fits = fits && gmm__gtp_add_product(&m.total, m.stage, 1, 1) && gmm__gtp_add_product(&m.total, m.weights, 1, 1) &&
           gmm__gtp_add_product(&m.total, m.main_grads, 1, 1) &&
           gmm__gtp_add_product(&m.total, m.optimizer, 1, 1) && gmm__gtp_add_product(&m.total, m.gather, 1, 1) &&
           gmm__gtp_add_product(&m.total, m.wgrad, 1, 1) && gmm__gtp_add_product(&m.total, m.reduce, 1, 1);
    if (!fits)
        return gmm__fail(error, GMM_E_OVERFLOW, "%s: the bytes of %lld layers of %d weights of %lld x %lld do not fit "
                         "64 bits", fn, (long long)u.layers, u.bundle, (long long)p.local_rows,
                         (long long)p.local_cols);
    memcpy(memory, &m, common);
    return GMM_OK;
}

enum { GMM__GTP_STAGES = 4096, GMM__GTP_MAX_TOGETHER = 8 /* bundles gathered by one group call */ };

/* Seconds of a bundle's gathers in forward and backward, and of the transpose in backward; bytes from other ranks. */
typedef struct gmm__gtp_gather_cost {
    double gather[2], transpose;
    int64_t gathered[2], reduced;
    int shared;     /* 1: both passes read the same copy */
    int transposed; /* 1: backward reads a transpose of the copy of forward */
} gmm__gtp_gather_cost;

/* Computes the times in seconds that the collectives and products of a stage take when nothing else runs. */
static gmm_status gmm__gtp_stage_cost(const char *fn, const gmm_gtp_forecast *f, gmm_gtp_stage *x,
                                      gmm__gtp_gather_cost *cost, gmm_error *error) {
    gmm_shard s;
    gmm_shard_plan p;
    double seconds_per_byte, count, elements;
    int64_t elements_of_shard;
    int pass, fits;
    gmm_layout shard = GMM_ZERO;
    gmm_status status = gmm__gtp_plan_shard(fn, x->shard, &s, &p, error);
    if (status) return status;
    if (x->bundle < 0 || !(x->tokens >= 0))
        return gmm__fail(error, GMM_E_ARG, "%s: bundle is %d, tokens %g: must be >= 0", fn, x->bundle, x->tokens);
    count = x->bundle ? x->bundle : 1;
    seconds_per_byte = (double)(s.gtp_size - 1) / s.gtp_size / f->link_rate;
    elements = (double)p.padded_rows * (double)p.local_cols * count;
    cost->gathered[0] = cost->gathered[1] = cost->reduced = elements_of_shard = 0;
    fits = gmm__gtp_add_product(&elements_of_shard, p.shard_rows, p.local_cols, x->bundle ? x->bundle : 1) &&
           gmm__gtp_add_product(&cost->reduced, elements_of_shard, gmm_dtype_bits(f->wire) / 8, s.gtp_size - 1);
    for (pass = 0; pass < 2; pass++) {
        const int d = pass && p.shard_data_bytes[GMM_COLUMNWISE] ? GMM_COLUMNWISE : GMM_ROWWISE;
        if (s.scaling != GMM_SCALING_NONE && /* the plan has laid out the same */
            (status = gmm_layout_of(s.dtype, s.scaling, GMM_SCALES_COMPACT, (gmm_direction)d, p.shard_rows,
                                    p.local_cols, &shard, error)) != GMM_OK)
            return status;
        fits = fits && gmm__gtp_add_product(&cost->gathered[pass], p.shard_data_bytes[d] +
                                            gmm__gtp_sent_scale_bytes(s.scaling, d, p.shard_rows, &shard),
                                            x->bundle ? x->bundle : 1, s.gtp_size - 1);
        cost->gather[pass] = s.gtp_size > 1 ? f->latency + (double)cost->gathered[pass] / f->link_rate : 0;
    }
    if (!fits)
        return gmm__fail(error, GMM_E_OVERFLOW, "%s: the bytes that %d ranks send of %d weights of %lld x %lld do not "
                         "fit 64 bits", fn, s.gtp_size, x->bundle, (long long)p.local_rows, (long long)p.local_cols);
    cost->shared = p.gather_data_bytes[GMM_COLUMNWISE] == 0;
    cost->transposed = !cost->shared && p.shard_data_bytes[GMM_COLUMNWISE] == 0;
    cost->transpose = cost->transposed && f->memory_rate > 0
                          ? 2 * count * (double)p.gather_data_bytes[GMM_COLUMNWISE] / f->memory_rate
                          : 0;
    x->gather = cost->gather[0];
    x->reduce = s.gtp_size > 1 ? f->latency + elements * (gmm_dtype_bits(f->wire) / 8) * seconds_per_byte : 0;
    x->sum = 0;
    if (f->memory_rate > 0) { /* the sum reads the ranks' parts, and reads and writes main_grad */
        const double parts = f->wire == GMM_BF16 && s.gtp_size > 2 ? s.gtp_size : 1;
        x->sum = elements / s.gtp_size *
                 (parts * (gmm_dtype_bits(f->wire) / 8) + 2 * (gmm_dtype_bits(f->main_grad) / 8)) / f->memory_rate;
    }
    x->forward = 2 * x->tokens * (double)p.local_rows * (double)p.local_cols / f->gemm_rate;
    x->backward = 2 * x->forward;
    x->exposed_forward = x->exposed_backward = x->exposed_reduce = 0;
    return GMM_OK;
}

static double gmm__gtp_max(double a, double b) { return a > b ? a : b; }

/* Simulates the collective that gathers the bundles from position `first` of a pass on, and their transposes: *done is
   the time when the gather stream has done its work, ready[i] when bundle first + i can be read. */
static void gmm__gtp_foresee_gather(gmm_gtp_forecast *f, const gmm_gtp_stage *stages, int32_t pass, int32_t first,
                                    const double *released, double *done, double *ready) {
    const int32_t n = f->stages, slots = f->prefetch + f->together;
    const int32_t count = f->together < n - first ? f->together : n - first;
    double seconds = 0, gathered, transpose[GMM__GTP_MAX_TOGETHER];
    int32_t i, sends = 0, awaited[GMM__GTP_MAX_TOGETHER];
    for (i = 0; i < count; i++) {
        const int32_t at = first + i;
        gmm_gtp_stage x = stages[pass ? n - 1 - at : at];
        gmm__gtp_gather_cost cost;
        /* 1: no other bundle uses the slot, which contains the copy of the previous micro-batch */
        const int kept = f->wrap && at < slots && at + slots >= n;
        int resident; /* 1: a slot still contains the weights from the end of the previous pass, or is kept */
        (void)gmm__gtp_stage_cost("gmm_gtp_foresee", f, &x, &cost, NULL);
        resident = kept || (at < slots && (pass ? cost.shared || cost.transposed : f->wrap && cost.shared));
        awaited[i] = !resident && (at >= slots || pass || !f->wrap); /* otherwise the previous pass has overlapped it */
        transpose[i] = pass && !kept ? cost.transpose : 0;
        if (resident) continue;
        *done = gmm__gtp_max(*done, at >= slots ? released[at - slots] : 0);
        seconds += cost.gather[pass];
        if (cost.gather[pass] > 0 && sends++) seconds -= f->latency;
        f->gathered_bytes += cost.gathered[pass];
    }
    gathered = *done += seconds;
    f->gather += seconds;
    for (i = 0; i < count; i++) {
        ready[i] = awaited[i] ? gathered : 0;
        if (transpose[i] > 0) ready[i] = *done += transpose[i];
    }
}

GMMDEF gmm_status gmm_gtp_foresee(gmm_gtp_forecast *forecast, gmm_gtp_stage *stages, gmm_error *error) {
    static const char fn[] = "gmm_gtp_foresee";
    gmm_gtp_forecast f, stated;
    double released[GMM__GTP_STAGES], reduced[GMM__GTP_STAGES]; /* times when a slot is free, by position in the pass */
    /* simulated times: when the gather and the reduce stream have done their work, and when the compute stream has */
    double gather_free = 0, reduce_free = 0, now = 0, ready[GMM__GTP_MAX_TOGETHER];
    gmm__gtp_gather_cost cost;
    char where[48]; /* names the stage in messages */
    int64_t sent = 0; /* at most, in all passes */
    int32_t i, n, pass;
    gmm_status s = GMM_OK;
    const size_t common = gmm__gtp_common_size(fn, "forecast", forecast, sizeof f, &s, error);
    if (!s) s = gmm__gtp_read(fn, "forecast", forecast, &f, sizeof f, error);
    if (s) return s;
    if (!stages) return gmm__fail(error, GMM_E_NULL, "%s: stages is NULL", fn);
    stated = f;
    if (f.wire == GMM_NONE) f.wire = GMM_F32;
    if (f.main_grad == GMM_NONE) f.main_grad = GMM_F32;
    if (f.wgrad_slots == 0) f.wgrad_slots = 2;
    if (f.together == 0) f.together = 1;
    n = f.stages;
    if ((f.wire != GMM_F32 && f.wire != GMM_BF16) || (f.main_grad != GMM_F32 && f.main_grad != GMM_BF16))
        return gmm__fail(error, GMM_E_DTYPE, "%s: wire is %s, main_grad %s: must be f32, bf16 or none", fn,
                         gmm_dtype_name(f.wire), gmm_dtype_name(f.main_grad));
    if (n < 1 || n > GMM__GTP_STAGES || !(f.gemm_rate > 0) || !(f.link_rate > 0) || !(f.latency >= 0) ||
        !(f.memory_rate >= 0) || f.prefetch < 0 || f.prefetch > n || f.wgrad_slots < 1 || f.together < 1 ||
        f.together > GMM__GTP_MAX_TOGETHER)
        return gmm__fail(error, GMM_E_ARG, "%s: %d stages, gemm_rate %g, link_rate %g, latency %g, memory_rate %g, "
                         "prefetch %d, wgrad_slots %d, together %d: must be 1 to %d, > 0, > 0, >= 0, >= 0, 0 to "
                         "stages, >= 1, and 0 to %d", fn, n, f.gemm_rate, f.link_rate, f.latency, f.memory_rate,
                         f.prefetch, f.wgrad_slots, f.together, (int)GMM__GTP_STAGES, (int)GMM__GTP_MAX_TOGETHER);
    for (i = 0; i < n; i++) {
        gmm_gtp_stage x = stages[i];
        if (x.struct_size && x.struct_size != sizeof x)
            return gmm__fail(error, GMM_E_VERSION, "%s: stages[%d].struct_size is %u: must be 0 or %zu", fn, i,
                             x.struct_size, sizeof x);
        (void)snprintf(where, sizeof where, "%s: stages[%d]", fn, i);
        if ((s = gmm__gtp_stage_cost(where, &f, &x, &cost, error)) != GMM_OK) return s;
        if (!gmm__gtp_add_product(&sent, cost.gathered[0], 1, 1) ||
            !gmm__gtp_add_product(&sent, cost.gathered[1], 1, 1) || !gmm__gtp_add_product(&sent, cost.reduced, 1, 1))
            return gmm__fail(error, GMM_E_OVERFLOW, "%s: the bytes that ranks send in %d stages do not fit 64 bits",
                             fn, n);
    }
    f.compute = f.exposed_gather = f.exposed_reduce = f.gather = f.reduce = 0;
    f.gathered_bytes = f.reduced_bytes = 0;
    for (pass = 0; pass < 2; pass++)
        for (i = 0; i < n; i++) {
            gmm_gtp_stage *x = &stages[pass ? n - 1 - i : i];
            double *exposed = pass ? &x->exposed_backward : &x->exposed_forward;
            const double exposed_forward = pass ? x->exposed_forward : 0, *arrives = &ready[i % f.together];
            (void)gmm__gtp_stage_cost(fn, &f, x, &cost, NULL);
            x->exposed_forward = exposed_forward;
            if (i % f.together == 0) gmm__gtp_foresee_gather(&f, stages, pass, i, released, &gather_free, ready);
            *exposed = gmm__gtp_max(*arrives - now, 0);
            f.exposed_gather += *exposed;
            now = gmm__gtp_max(now, *arrives) + x->forward; /* in backward dgrad, which takes as long */
            released[i] = now;
            f.compute += x->forward;
            if (!pass) continue;
            if (i >= f.wgrad_slots) {
                x->exposed_reduce = gmm__gtp_max(reduced[i - f.wgrad_slots] - now, 0);
                f.exposed_reduce += x->exposed_reduce;
                now += x->exposed_reduce;
            }
            now += x->forward; /* wgrad */
            f.compute += x->forward;
            reduce_free = gmm__gtp_max(reduce_free, now) + x->reduce + x->sum;
            reduced[i] = reduce_free;
            f.reduce += x->reduce;
            f.reduced_bytes += cost.reduced;
        }
    f.exposed_reduce += gmm__gtp_max(reduce_free - now, 0);
    f.step = gmm__gtp_max(now, reduce_free);
    f.wire = stated.wire; /* the caller's fields have no defaults written into them */
    f.main_grad = stated.main_grad;
    f.wgrad_slots = stated.wgrad_slots;
    f.together = stated.together;
    memcpy(forecast, &f, common);
    return GMM_OK;
}

/* Functions that all communicators use: sums, time, errors, memory. */

/* Whether reduce_scatter supports the dtype. */
static GMM__UNUSED int gmm__comm_supports_sum(gmm_dtype dtype) {
    return dtype == GMM_F32 || dtype == GMM_BF16 || dtype == GMM_F16;
}

/* CLOCK_MONOTONIC does not change when the host's time is set. To wait by it needs POSIX.1-2001, which glibc does not
   declare with -std=c11, nor macOS: then the host's time is used, and to set it changes timeouts. */
#if defined(CLOCK_MONOTONIC) && defined(_POSIX_C_SOURCE) && _POSIX_C_SOURCE >= 200112L && !defined(__APPLE__)
#define GMM__HAS_MONOTONIC_CLOCK 1
#else
#define GMM__HAS_MONOTONIC_CLOCK 0
#endif
/* Time since some point in the past. */
static GMM__UNUSED struct timespec gmm__gtp_time(void) {
    struct timespec t;
#if GMM__HAS_MONOTONIC_CLOCK
    (void)clock_gettime(CLOCK_MONOTONIC, &t);
#else
    (void)timespec_get(&t, TIME_UTC);
#endif
    return t;
}
/* The same in seconds. */
static GMM__UNUSED double gmm__gtp_now(void) {
    const struct timespec t = gmm__gtp_time();
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* State common to NCCL communicators and peer copies: the first member of the structure that `self` points to. */
typedef struct gmm__comm_base {
    gmm_context *ctx;
    gmm_error error;    /* the first failure */
    const char *what;   /* name of the open group; NULL = none */
    int32_t given_up, open; /* 1: give_up was called; 1: a group is open */
} gmm__comm_base;

/* Stores the first failure of a communicator, which the functions behind it report from then on. */
static GMM__UNUSED gmm_status gmm__comm_fail(gmm__comm_base *base, const char *call, const char *text) {
    if (!base->error.text[0])
        (void)gmm__fail(&base->error, GMM_E_COMM, "%s%s%.60s%s: %.300s", call, base->what ? " of '" : "",
                        base->what ? base->what : "", base->what ? "'" : "", text);
    return GMM_E_COMM;
}
/* GMM_E_COMM once the communicator has failed or was given up; *error, which may be NULL, is the first failure. */
static GMM__UNUSED gmm_status gmm__comm_poll(const gmm__comm_base *base, gmm_error *error) {
    if (error) *error = base->error;
    return base->given_up || base->error.text[0] ? GMM_E_COMM : GMM_OK;
}
static GMM__UNUSED void *gmm__comm_alloc(gmm_context *ctx, size_t bytes) {
    const gmm_allocator *a = &ctx->config.allocator;
    void *p = a->alloc ? a->alloc(a->user, bytes) : GMM_MALLOC(bytes);
    return p ? memset(p, 0, bytes) : NULL;
}
static GMM__UNUSED void gmm__comm_free(gmm_context *ctx, void *p) {
    const gmm_allocator *a = &ctx->config.allocator;
    if (a->release) a->release(a->user, p);
    else GMM_FREE(p);
}

/* CPU ranks: streams, tokens of events, vector clocks, communicators and their memory. One thread or several drive the
   ranks; one mutex of the world protects everything here. An operation is queued on a stream, and runs when it is the
   head of its queue and ready.

   A vector clock has an entry per queue of the rank: the number of operations of that queue that are ordered before
   the present one. The race checker reports two accesses of which neither is ordered before the other. */

/* .................................................................................................... CPU ranks ... */

#ifdef GMM_WITH_CPU_RANKS

enum {
    GMM__MAX_CPU_RANKS = 98,
    GMM__RANK_QUEUES = 49,       /* most streams of a rank, stream NULL and those of graphs included */
    GMM__MAX_READY_QUEUES = 128  /* queues among which an operation is drawn: those of the first ranks that are ready */
};

/* One record of an event. A wait retains the token of the record that was the last one when the wait was enqueued. */
typedef struct gmm__token {
    int32_t references;
    int32_t done;           /* 1: the record has run, */
    uint32_t clock[GMM__RANK_QUEUES];
} gmm__token;

typedef struct gmm__rank_event {
    struct gmm__cpu_rank *rank;
    gmm__token *last;       /* of the last record outside of captures, or by a node of a graph; NULL = none */
    uint64_t capture;       /* serial of the capture that contains the last plain record; 0 = none */
    int32_t record_index;   /* of that record in the capture */
} gmm__rank_event;

typedef enum gmm__rank_kind {
    GMM__RANK_WORK, GMM__RANK_RECORD, GMM__RANK_WAIT, GMM__RANK_COLLECTIVE, GMM__RANK_LAUNCH
} gmm__rank_kind;

typedef enum gmm__coll_kind { GMM__COLL_ALL_GATHER, GMM__COLL_REDUCE_SCATTER, GMM__COLL_ALL_TO_ALL,
                             GMM__COLL_ALL_REDUCE_MAX } gmm__coll_kind;

/* One call of a collective; `bytes` is the size of one rank's part. */
typedef struct gmm__coll {
    gmm__coll_kind kind;
    gmm_dtype dtype;
    const void *send;
    void *recv;
    size_t bytes;
} gmm__coll;

/* A queued or captured operation. */
typedef struct gmm__rank_op {
    gmm__rank_kind kind;
    int32_t count;          /* of ranges, or of collective calls */
    const char *name;
    gmm__token *host;       /* clock of the enqueuing thread */
    void *memory;           /* ranges and argument, or collective calls, or a gmm__replay */
    size_t bytes;           /* of memory */
    gmm_status (*function)(const void *argument, gmm_stream stream);
    gmm__token *token;      /* RECORD, WAIT */
    gmm__rank_event *event; /* graphs: the event of an external node; NULL = a record of the graph itself, */
    int32_t record_index;   /* with this index */
    int32_t started;        /* LAUNCH: 1 = its operations are in the queues of the graph */
    struct gmm__member *member; /* COLLECTIVE */
    uint64_t number;        /* of the collective in its communicator */
    gmm_ranks_graph *graph;
} gmm__rank_op;

/* The operations of a stream, or of a stream that a graph replays. */
typedef struct gmm__rank_queue {
    struct gmm__cpu_rank *rank;
    int32_t index;
    int32_t captured_stream; /* queues of a graph: index of the stream whose work they replay; -1 = a stream */
    gmm_ranks_graph *graph; /* the capture that the stream belongs to */
    int32_t delayed;        /* 1: its operations are drawn last */
    gmm__rank_op *ops;
    size_t head, count, capacity; /* of the ring `ops` */
    uint32_t clock[GMM__RANK_QUEUES];
} gmm__rank_queue;

/* An access to memory that the race checker has recorded. */
typedef struct gmm__rank_access {
    uintptr_t begin, end;
    int32_t queue, writes;
    uint32_t time;          /* entry of its queue in the clock of the access */
    const char *name;
} gmm__rank_access;

typedef struct gmm__cpu_rank {
    struct gmm_ranks *world;
    int32_t index, given_up;
    uint64_t captures;      /* captures begun */
    gmm__rank_queue *queues[GMM__RANK_QUEUES];
    gmm_ranks_graph *capture; /* the capture under way; NULL = none */
    gmm__token *host;       /* copy of the clock of queue 0, for operations being enqueued */
    uint64_t progress;      /* operations done */
    gmm__rank_access *accesses;
    size_t access_count, access_capacity;
    gmm_error error;
    gmm_error reported;     /* the copy that gmm_ranks_error returned last */
} gmm__cpu_rank;

/* A communicator: the group is common to its ranks, and a member is the part of one rank. */
typedef struct gmm__group {
    struct gmm_ranks *world;
    struct gmm__group *next;
    int32_t size;
    uint64_t done;          /* collectives completed */
    struct gmm__member *members;
    gmm_error fault;        /* the failure that ended its use; status GMM_OK = none */
} gmm__group;

typedef struct gmm__member {
    gmm__group *group;
    gmm__cpu_rank *rank;
    int32_t index, open;
    uint64_t enqueued;      /* collectives enqueued */
    uint64_t captured;      /* collectives in the capture with this serial number, in the order of the calls */
    uint64_t capture_serial;
    const char *what;
    gmm_stream stream;
    gmm__coll *parts;       /* calls of the open group */
    int32_t count, capacity;
} gmm__member;

struct gmm_ranks_graph {
    gmm__cpu_rank *rank;
    gmm_stream origin;
    uint64_t serial;
    int32_t record_count;   /* plain records */
    int32_t running;        /* 1: a launch has started and is not done */
    int32_t queue_count;
    int32_t queues[GMM__RANK_QUEUES];    /* queues that replay the streams; the origin's is first */
    gmm__rank_op *ops[GMM__RANK_QUEUES]; /* their operations, which each launch copies */
    size_t count[GMM__RANK_QUEUES], capacity[GMM__RANK_QUEUES];
};

/* The operations of a launch that has not started. */
typedef struct gmm__replay {
    gmm__rank_op *ops[GMM__RANK_QUEUES];
    size_t count[GMM__RANK_QUEUES];
} gmm__replay;

struct gmm_ranks {
    gmm_ranks_config config;
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    uint64_t random;
    gmm__cpu_rank *rank;
    gmm__group *groups;
    int64_t races;          /* number of races found */
    char race[400];         /* description of the first one */
};

static void *gmm__ranks_alloc(gmm_ranks *w, size_t bytes) {
    void *p = w->config.allocator.alloc ? w->config.allocator.alloc(w->config.allocator.user, bytes)
                                        : GMM_MALLOC(bytes);
    if (p) memset(p, 0, bytes);
    return p;
}
static void gmm__ranks_free(gmm_ranks *w, void *p) {
    if (!p) return;
    if (w->config.allocator.release) w->config.allocator.release(w->config.allocator.user, p);
    else GMM_FREE(p);
}
/* Grows an array to hold one more element; 0 = no memory. */
static int gmm__ranks_grow(gmm_ranks *w, void **items, size_t count, size_t *capacity, size_t size) {
    const size_t new_capacity = *capacity ? 2 * *capacity : 16;
    void *p;
    if (count < *capacity) return 1;
    p = gmm__ranks_alloc(w, new_capacity * size);
    if (!p) return 0;
    if (count) memcpy(p, *items, count * size);
    gmm__ranks_free(w, *items);
    *items = p;
    *capacity = new_capacity;
    return 1;
}

static uint64_t gmm__ranks_random(gmm_ranks *w) { /* splitmix64 */
    uint64_t z = w->random += 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

static gmm__token *gmm__token_retain(gmm__token *t) {
    if (t) t->references++;
    return t;
}
static void gmm__token_release(gmm_ranks *w, gmm__token *t) {
    if (t && --t->references == 0) gmm__ranks_free(w, t);
}
static gmm__token *gmm__token_create(gmm_ranks *w) {
    gmm__token *t = (gmm__token *)gmm__ranks_alloc(w, sizeof *t);
    if (t) t->references = 1;
    return t;
}
static void gmm__clock_merge(uint32_t *clock, const uint32_t *other) {
    int i;
    for (i = 0; i < GMM__RANK_QUEUES; i++)
        if (other[i] > clock[i]) clock[i] = other[i];
}

/* --- The race checker, failures, and the scheduler of queued operations --- */

/* Reports a race between an access of the queue's present operation and an earlier one, and records the access. */
static void gmm__ranks_check_access(gmm__rank_queue *q, const char *name, const void *data, size_t bytes, int writes) {
    gmm__cpu_rank *r = q->rank;
    gmm_ranks *w = r->world;
    gmm__rank_access access;
    size_t i, count = 0;
    if (!w->config.check_races || bytes == 0) return;
    access.begin = (uintptr_t)data;
    access.end = access.begin + bytes;
    access.queue = q->index;
    access.writes = writes;
    access.time = q->clock[q->index];
    access.name = name;
    for (i = 0; i < r->access_count; i++) {
        const gmm__rank_access a = r->accesses[i];
        const int overlap = a.begin < access.end && access.begin < a.end;
        const int ordered = a.time <= q->clock[a.queue];
        const int covered = overlap && access.begin <= a.begin && a.end <= access.end;
        if (overlap && !ordered && (a.writes || writes) && w->races++ == 0)
            (void)snprintf(w->race, sizeof w->race, "rank %d: '%s' on stream %d %s %llu bytes at %p that '%s' on "
                           "stream %d %s, and nothing orders the two", r->index, name, q->index,
                           writes ? "writes" : "reads", (unsigned long long)bytes, (void *)access.begin,
                           a.name, (int)a.queue, a.writes ? "writes" : "reads");
        /* `a` is dropped: an access ordered behind `access` is ordered behind `a` too */
        if (covered && ordered && (writes || !a.writes)) continue;
        r->accesses[count++] = a;
    }
    r->access_count = count;
    if (gmm__ranks_grow(w, (void **)&r->accesses, r->access_count, &r->access_capacity, sizeof access))
        r->accesses[r->access_count++] = access;
    else if (w->races++ == 0) /* a race with it would not be found */
        (void)snprintf(w->race, sizeof w->race, "rank %d: no memory to record what '%s' accesses", r->index, name);
}

/* --- Failures --- */

static void gmm__rank_op_free(gmm_ranks *w, gmm__rank_op *op) {
    if (op->kind == GMM__RANK_LAUNCH && op->memory) { /* of a launch that has not started */
        gmm__replay *replay = (gmm__replay *)op->memory;
        int i;
        for (i = 0; i < GMM__RANK_QUEUES; i++) {
            size_t j;
            for (j = 0; j < replay->count[i]; j++) gmm__rank_op_free(w, &replay->ops[i][j]);
            gmm__ranks_free(w, replay->ops[i]);
        }
    }
    gmm__token_release(w, op->host);
    gmm__token_release(w, op->token);
    gmm__ranks_free(w, op->memory);
    memset(op, 0, sizeof *op);
}

static void gmm__rank_give_up(gmm__cpu_rank *r, const char *text) {
    int i;
    if (r->given_up) return;
    r->given_up = 1;
    (void)gmm__fail(&r->error, GMM_E_COMM, "%s", text);
    for (i = 0; i < GMM__RANK_QUEUES; i++) {
        gmm__rank_queue *q = r->queues[i];
        if (!q) continue;
        while (q->count > 0) {
            if (q->ops[q->head].kind == GMM__RANK_LAUNCH) q->ops[q->head].graph->running = 0;
            gmm__rank_op_free(r->world, &q->ops[q->head]);
            q->head = (q->head + 1) % q->capacity;
            q->count--;
        }
    }
}
static void gmm__group_give_up(gmm__group *g, const char *text) {
    int32_t i;
    if (g->fault.status) return;
    (void)gmm__fail(&g->fault, GMM_E_COMM, "%s", text);
    for (i = 0; i < g->size; i++) gmm__rank_give_up(g->members[i].rank, g->fault.text);
}

/* --- Scheduling --- */

static gmm__rank_op *gmm__queue_head(gmm__rank_queue *q) {
    return q && q->count > 0 ? &q->ops[q->head] : NULL;
}

/* The operation of a rank that is the group's next collective, if it is the head of a queue, which goes to *queue. */
static gmm__rank_op *gmm__group_find_op(gmm__group *g, int32_t member, gmm__rank_queue **queue) {
    gmm__cpu_rank *r = g->members[member].rank;
    int i;
    for (i = 0; i < GMM__RANK_QUEUES; i++) {
        gmm__rank_op *op = gmm__queue_head(r->queues[i]);
        if (op && op->kind == GMM__RANK_COLLECTIVE && op->member->group == g && op->number == g->done) {
            if (queue) *queue = r->queues[i];
            return op;
        }
    }
    return NULL;
}

/* Whether the head of a queue can run. */
static int gmm__rank_is_ready(gmm__rank_queue *q) {
    gmm__rank_op *op = gmm__queue_head(q);
    int32_t i;
    if (!op) return 0;
    switch (op->kind) {
    case GMM__RANK_WAIT: return op->token->done;
    case GMM__RANK_COLLECTIVE:
        for (i = 0; i < op->member->group->size; i++)
            if (!gmm__group_find_op(op->member->group, i, NULL)) return 0;
        return 1;
    case GMM__RANK_LAUNCH:
        if (!op->started) return !op->graph->running;
        for (i = 0; op->started && i < op->graph->queue_count; i++)
            if (q->rank->queues[op->graph->queues[i]]->count > 0) return 0;
        return 1;
    default: return 1;
    }
}

/* Advances the clock of a queue for its next operation, which is ordered behind the work that the enqueuing thread had
   waited for. */
static void gmm__rank_start(gmm__rank_queue *q, const gmm__rank_op *op) {
    if (op->host) gmm__clock_merge(q->clock, op->host->clock);
    q->clock[q->index]++;
}
static void gmm__rank_pop(gmm__rank_queue *q) {
    gmm__rank_op_free(q->rank->world, &q->ops[q->head]);
    q->head = (q->head + 1) % q->capacity;
    q->count--;
    q->rank->progress++;
}

static const char *const gmm__coll_names[] = {"all_gather", "reduce_scatter", "all_to_all", "all_reduce_max"};

/* Runs call `which` of a group's collective: p[rank][which]. `bytes` and `count` are those of one rank's part. */
static void gmm__coll_run(const gmm__group *g, gmm__coll **p, int32_t which) {
    const gmm__coll *first = &p[0][which];
    const size_t bytes = first->bytes;
    const int64_t count = (int64_t)(bytes / (size_t)(gmm_dtype_bits(first->dtype) / 8 + (first->dtype == GMM_NONE)));
    int32_t to, from;
    int64_t i;
    for (to = 0; to < g->size; to++) {
        char *recv = (char *)p[to][which].recv;
        if (first->kind == GMM__COLL_ALL_GATHER || first->kind == GMM__COLL_ALL_TO_ALL) {
            for (from = 0; from < g->size; from++) {
                const char *send = (const char *)p[from][which].send;
                if (first->kind == GMM__COLL_ALL_TO_ALL) send += (size_t)to * bytes;
                if (bytes) memmove(recv + (size_t)from * bytes, send, bytes);
            }
        } else if (first->kind == GMM__COLL_REDUCE_SCATTER) {
            for (i = 0; i < count; i++) {
                float sum = 0.0f;
                for (from = 0; from < g->size; from++) {
                    const float x = gmm_load(first->dtype, p[from][which].send, (int64_t)to * count + i);
                    sum = from ? sum + x : x;
                }
                gmm_store(first->dtype, recv, i, sum);
            }
        } else if (to == 0) {
            for (i = 0; i < count; i++) {
                float largest = ((const float *)p[0][which].send)[i];
                for (from = 1; from < g->size; from++) {
                    const float x = ((const float *)p[from][which].send)[i];
                    if (x > largest || x != x) largest = x;
                }
                for (from = 0; from < g->size; from++) ((float *)p[from][which].recv)[i] = largest;
            }
        }
    }
}

/* Runs the collective that is the head of a queue on every rank, after a check that the ranks made the same calls. */
static void gmm__group_run(gmm__group *g) {
    gmm__coll *parts[GMM__MAX_CPU_RANKS];
    gmm__rank_queue *queue[GMM__MAX_CPU_RANKS];
    gmm__rank_op *first = gmm__group_find_op(g, 0, &queue[0]);
    int32_t i, j;
    parts[0] = (gmm__coll *)first->memory;
    for (i = 1; i < g->size; i++) {
        const gmm__rank_op *op = gmm__group_find_op(g, i, &queue[i]);
        const int alike = op->count == first->count && !strcmp(op->name, first->name);
        parts[i] = (gmm__coll *)op->memory;
        for (j = 0; j < first->count && alike; j++)
            if (parts[i][j].kind != parts[0][j].kind || parts[i][j].bytes != parts[0][j].bytes ||
                parts[i][j].dtype != parts[0][j].dtype)
                break;
        if (j < first->count || !alike) {
            char text[400];
            j = j < first->count ? j : 0;
            (void)snprintf(text, sizeof text, "collective %llu: rank 0 waits for '%.60s' (%d calls, %s of %llu bytes) "
                           "and rank %d for '%.60s' (%d calls, %s of %llu bytes): all ranks must make the same calls "
                           "for the same bundles in the same order", (unsigned long long)g->done, first->name,
                           first->count, gmm__coll_names[parts[0][j].kind], (unsigned long long)parts[0][j].bytes,
                           i, op->name, (int)op->count, gmm__coll_names[parts[i][j].kind],
                           (unsigned long long)parts[i][j].bytes);
            gmm__group_give_up(g, text);
            return;
        }
    }
    for (i = 0; i < g->size; i++) {
        gmm__rank_start(queue[i], gmm__queue_head(queue[i]));
        for (j = 0; j < first->count; j++) {
            const gmm__coll *p = &parts[i][j];
            const size_t all = p->bytes * (size_t)g->size;
            const int sends_parts = p->kind == GMM__COLL_REDUCE_SCATTER || p->kind == GMM__COLL_ALL_TO_ALL;
            const int receives_parts = p->kind == GMM__COLL_ALL_GATHER || p->kind == GMM__COLL_ALL_TO_ALL;
            gmm__ranks_check_access(queue[i], first->name, p->send, sends_parts ? all : p->bytes, 0);
            gmm__ranks_check_access(queue[i], first->name, p->recv, receives_parts ? all : p->bytes, 1);
        }
    }
    for (j = 0; j < first->count; j++) gmm__coll_run(g, parts, j);
    g->done++;
    for (i = 0; i < g->size; i++) gmm__rank_pop(queue[i]);
}

/* Moves the operations of a launch to the queues of its graph. */
static void gmm__graph_start(gmm__rank_queue *q, gmm__rank_op *op) {
    gmm__cpu_rank *r = q->rank;
    gmm__replay *replay = (gmm__replay *)op->memory;
    int32_t i;
    for (i = 0; i < op->graph->queue_count; i++) {
        gmm__rank_queue *queue = r->queues[op->graph->queues[i]];
        gmm__clock_merge(queue->clock, q->clock);
        gmm__ranks_free(r->world, queue->ops);
        queue->ops = replay->ops[i];
        queue->count = queue->capacity = replay->count[i];
        queue->head = 0;
    }
    gmm__ranks_free(r->world, replay);
    op->memory = NULL;
    op->started = op->graph->running = 1;
}

static void gmm__rank_run(gmm__rank_queue *q) {
    gmm__rank_op *op = gmm__queue_head(q);
    gmm__cpu_rank *r = q->rank;
    int32_t i;
    switch (op->kind) {
    case GMM__RANK_WORK: {
        const gmm_range *ranges = (const gmm_range *)op->memory;
        gmm_status s;
        gmm__rank_start(q, op);
        for (i = 0; i < op->count; i++)
            gmm__ranks_check_access(q, op->name, ranges[i].data, ranges[i].bytes, ranges[i].writes);
        s = op->function((const char *)op->memory + (size_t)op->count * sizeof *ranges, NULL);
        if (s) {
            char text[300];
            (void)snprintf(text, sizeof text, "rank %d: '%s' failed with %s", r->index, op->name,
                           gmm_status_name(s));
            gmm__rank_give_up(r, text);
            return;
        }
        break;
    }
    case GMM__RANK_RECORD:
        gmm__rank_start(q, op);
        memcpy(op->token->clock, q->clock, sizeof q->clock);
        op->token->done = 1;
        break;
    case GMM__RANK_WAIT:
        gmm__rank_start(q, op);
        gmm__clock_merge(q->clock, op->token->clock);
        break;
    case GMM__RANK_COLLECTIVE: gmm__group_run(op->member->group); return;
    default: /* LAUNCH: runs twice, first to start, and again once the queues of the graph are empty */
        if (!op->started) {
            gmm__rank_start(q, op);
            gmm__graph_start(q, op);
            return;
        }
        for (i = 0; i < op->graph->queue_count; i++)
            gmm__clock_merge(q->clock, r->queues[op->graph->queues[i]]->clock);
        op->graph->running = 0;
        break;
    }
    gmm__rank_pop(q);
}

/* Runs one operation, drawn from those that are ready, if possible from a queue that is not delayed. Returns 0 if none
   is ready. */
static int gmm__ranks_step(gmm_ranks *w) {
    gmm__rank_queue *ready[GMM__MAX_READY_QUEUES], *drawn = NULL;
    int count = 0, prompt = 0, i;
    int32_t r;
    /* with probability 1/24, draw again which queues are delayed */
    if (w->config.seed && gmm__ranks_random(w) % 24 == 0)
        for (r = 0; r < w->config.ranks; r++)
            for (i = 0; i < GMM__RANK_QUEUES; i++)
                if (w->rank[r].queues[i]) w->rank[r].queues[i]->delayed = gmm__ranks_random(w) % 3 == 0;
    for (r = 0; r < w->config.ranks; r++)
        for (i = 0; i < GMM__RANK_QUEUES && count < GMM__MAX_READY_QUEUES; i++) {
            gmm__rank_queue *q = w->rank[r].queues[i];
            if (!q || !gmm__queue_head(q) || !gmm__rank_is_ready(q)) continue;
            if (!w->config.seed) {
                gmm__rank_run(q);
                return 1;
            }
            ready[count++] = q;
            prompt += !q->delayed;
        }
    if (!count) return 0;
    {
        int nth = (int)(gmm__ranks_random(w) % (uint64_t)(prompt ? prompt : count));
        for (i = 0; i < count && !drawn; i++)
            if ((!prompt || !ready[i]->delayed) && nth-- == 0) drawn = ready[i];
    }
    gmm__rank_run(drawn);
    return 1;
}

/* --- Enqueuing, waiting, and error messages --- */

static gmm_status gmm__rank_fail(gmm__cpu_rank *r, gmm_status status, const char *format, ...) {
    char text[480];
    va_list list;
    va_start(list, format);
    (void)vsnprintf(text, sizeof text, format, list);
    va_end(list);
    return gmm__fail(&r->error, status, "%s", text);
}

/* The queue of a stream; that of stream NULL is queue 0. */
static gmm__rank_queue *gmm__rank_stream_queue(gmm__cpu_rank *r, gmm_stream stream) {
    return stream ? (gmm__rank_queue *)(void *)stream : r->queues[0];
}

/* Begins a call for a rank. On success the world's mutex is locked, until gmm__rank_end_call. */
static gmm_status gmm__rank_begin_call(gmm__cpu_rank *r) {
    if (!r) return GMM_E_NULL;
    (void)pthread_mutex_lock(&r->world->mutex);
    if (!r->given_up) return GMM_OK;
    (void)pthread_mutex_unlock(&r->world->mutex);
    return GMM_E_COMM;
}
/* Ends a call: runs the queued operations that are ready, or with config.seed a random number of them, and unlocks the
   mutex. */
static gmm_status gmm__rank_end_call(gmm__cpu_rank *r, gmm_status status) {
    gmm_ranks *w = r->world;
    if (!w->config.seed) {
        while (gmm__ranks_step(w)) { }
    } else if (gmm__ranks_random(w) % 4 == 0) {
        int n = (int)(gmm__ranks_random(w) % 6);
        while (n-- > 0 && gmm__ranks_step(w)) { }
    }
    if (!status && r->given_up) status = GMM_E_COMM;
    (void)pthread_cond_broadcast(&w->changed);
    (void)pthread_mutex_unlock(&w->mutex);
    return status;
}

/* Begins a call that needs the pointer `needed`, and whose only flag is GMM_EVENT_EXTERNAL. */
static gmm_status gmm__rank_check_call(gmm__cpu_rank *r, const char *fn, const char *argument, const void *needed,
                                       uint32_t flags) {
    const gmm_status s = gmm__rank_begin_call(r);
    if (s) return s;
    if (!needed) return gmm__rank_end_call(r, gmm__rank_fail(r, GMM_E_NULL, "%s: %s is NULL", fn, argument));
    if (!(flags & ~(uint32_t)GMM_EVENT_EXTERNAL)) return GMM_OK;
    return gmm__rank_end_call(r, gmm__rank_fail(r, GMM_E_ARG, "%s: flags 0x%x has unknown bits", fn, flags));
}

/* Writes a message about what the rank waits for. Returns the communicator whose collective hangs; NULL = none does. */
static gmm__group *gmm__rank_describe_hang(gmm__cpu_rank *r, char *text, size_t capacity) {
    int i;
    int32_t m;
    for (i = 0; i < GMM__RANK_QUEUES; i++) {
        gmm__rank_op *op = gmm__queue_head(r->queues[i]);
        gmm__group *g = op && op->kind == GMM__RANK_COLLECTIVE ? op->member->group : NULL;
        for (m = 0; g && m < g->size; m++)
            if (!gmm__group_find_op(g, m, NULL)) {
                (void)snprintf(text, capacity, "%s '%s', collective %llu of its communicator: rank %d of %d has not "
                               "joined within %d ms", gmm__coll_names[((const gmm__coll *)op->memory)->kind], op->name,
                               (unsigned long long)op->number, m, g->size,
                               r->world->config.timeout_ms);
                return g;
            }
    }
    (void)snprintf(text, capacity, "rank %d waits for what no stream is going to do (%d ms without progress)",
                   r->index, r->world->config.timeout_ms);
    return NULL;
}

/* Runs operations, and waits for those of other threads, until the queue is empty and the token is done (either may be
   NULL). The lock is held. */
static gmm_status gmm__rank_wait(gmm__cpu_rank *r, const gmm__rank_queue *q, const gmm__token *token) {
    gmm_ranks *w = r->world;
    uint64_t seen = r->progress;
    struct timespec limit;
    int limited = 0;
    while (!r->given_up && ((q && q->count > 0) || (token && !token->done))) {
        if (gmm__ranks_step(w)) {
            (void)pthread_cond_broadcast(&w->changed);
            continue;
        }
        if (!limited || seen != r->progress) {
            limit = gmm__gtp_time();
            limit.tv_sec += w->config.timeout_ms / 1000;
            limit.tv_nsec += w->config.timeout_ms % 1000 * 1000000L;
            if (limit.tv_nsec >= 1000000000L) {
                limit.tv_sec++;
                limit.tv_nsec -= 1000000000L;
            }
            limited = 1;
            seen = r->progress;
        }
        if (pthread_cond_timedwait(&w->changed, &w->mutex, &limit) != 0 && seen == r->progress) {
            const struct timespec now = gmm__gtp_time();
            if (now.tv_sec > limit.tv_sec || (now.tv_sec == limit.tv_sec && now.tv_nsec >= limit.tv_nsec)) {
                char text[400];
                gmm__group *g = gmm__rank_describe_hang(r, text, sizeof text);
                if (g) gmm__group_give_up(g, text);
                else gmm__rank_give_up(r, text);
                (void)pthread_cond_broadcast(&w->changed);
            }
        }
    }
    return r->given_up ? GMM_E_COMM : GMM_OK;
}

/* Enqueues an operation on a stream, or adds it to the graph of the capture that the stream belongs to. On stream NULL
   it is done on return. Owns op->memory and op->token from here on, also if it fails. The lock is held. */
static gmm_status gmm__rank_enqueue(gmm__cpu_rank *r, gmm_stream stream, gmm__rank_op *op) {
    gmm_ranks *w = r->world;
    gmm__rank_queue *q = gmm__rank_stream_queue(r, stream);
    if (q->graph) {
        gmm_ranks_graph *g = q->graph;
        int32_t i;
        for (i = 0; i < g->queue_count && r->queues[g->queues[i]]->captured_stream != q->index; i++) { }
        if (!gmm__ranks_grow(w, (void **)&g->ops[i], g->count[i], &g->capacity[i], sizeof *op)) {
            gmm__rank_op_free(w, op);
            return gmm__rank_fail(r, GMM_E_MEMORY, "no memory for a captured operation");
        }
        g->ops[i][g->count[i]++] = *op;
        return GMM_OK;
    }
    if (!r->host || memcmp(r->host->clock, r->queues[0]->clock, sizeof r->host->clock) != 0) {
        gmm__token *host = gmm__token_create(w);
        if (!host) {
            gmm__rank_op_free(w, op);
            return gmm__rank_fail(r, GMM_E_MEMORY, "no memory for the order of a queued operation");
        }
        memcpy(host->clock, r->queues[0]->clock, sizeof host->clock);
        gmm__token_release(w, r->host);
        r->host = host;
    }
    op->host = gmm__token_retain(r->host);
    if (q->count == q->capacity) { /* a ring, copied in order as it grows */
        const size_t capacity = q->capacity ? 2 * q->capacity : 32;
        gmm__rank_op *ops = (gmm__rank_op *)gmm__ranks_alloc(w, capacity * sizeof *ops);
        size_t i;
        if (!ops) {
            gmm__rank_op_free(w, op);
            return gmm__rank_fail(r, GMM_E_MEMORY, "no memory for a queued operation");
        }
        for (i = 0; i < q->count; i++) ops[i] = q->ops[(q->head + i) % q->capacity];
        gmm__ranks_free(w, q->ops);
        q->ops = ops;
        q->capacity = capacity;
        q->head = 0;
    }
    q->ops[(q->head + q->count++) % q->capacity] = *op;
    return q->index == 0 ? gmm__rank_wait(r, q, NULL) : GMM_OK;
}

/* --- The runtime table of a rank: streams, events, copies, work --- */

static gmm_status gmm__ranks_stream_create(void *self, int32_t priority, gmm_stream *out) {
    gmm__cpu_rank *r = (gmm__cpu_rank *)self;
    gmm_status s = gmm__rank_check_call(r, "stream_create", "out", out, 0);
    int i;
    (void)priority;
    if (s) return s;
    for (i = 1; i < GMM__RANK_QUEUES && r->queues[i]; i++) { }
    if (i == GMM__RANK_QUEUES)
        s = gmm__rank_fail(r, GMM_E_MEMORY, "stream_create: a rank has at most %d streams", i - 1);
    else if (!(r->queues[i] = (gmm__rank_queue *)gmm__ranks_alloc(r->world, sizeof(gmm__rank_queue))))
        s = gmm__rank_fail(r, GMM_E_MEMORY, "stream_create: no memory");
    else {
        r->queues[i]->rank = r;
        r->queues[i]->index = i;
        r->queues[i]->captured_stream = -1;
        *out = (gmm_stream)(void *)r->queues[i];
    }
    return gmm__rank_end_call(r, s);
}

/* The queue of a destroyed stream stays allocated, since the race checker identifies its accesses by its index. */
static gmm_status gmm__ranks_stream_sync(void *self, gmm_stream stream) {
    gmm__cpu_rank *r = (gmm__cpu_rank *)self;
    gmm_status s = gmm__rank_begin_call(r);
    gmm__rank_queue *q;
    if (s) return s;
    q = gmm__rank_stream_queue(r, stream);
    if (q->graph) s = gmm__rank_fail(r, GMM_E_CAPTURE, "stream_sync: stream %d is capturing", q->index);
    else s = gmm__rank_wait(r, q, NULL);
    if (!s) gmm__clock_merge(r->queues[0]->clock, q->clock);
    return gmm__rank_end_call(r, s);
}
static gmm_status gmm__ranks_stream_destroy(void *self, gmm_stream stream) {
    return stream ? gmm__ranks_stream_sync(self, stream) : GMM_OK;
}

static gmm_status gmm__ranks_event_create(void *self, gmm_event *out) {
    gmm__cpu_rank *r = (gmm__cpu_rank *)self;
    gmm__rank_event *e;
    gmm_status s = gmm__rank_check_call(r, "event_create", "out", out, 0);
    if (s) return s;
    e = (gmm__rank_event *)gmm__ranks_alloc(r->world, sizeof *e);
    if (!e) s = gmm__rank_fail(r, GMM_E_MEMORY, "event_create: no memory");
    else e->rank = r;
    *out = (gmm_event)(void *)e;
    return gmm__rank_end_call(r, s);
}
static gmm_status gmm__ranks_event_destroy(void *self, gmm_event event) {
    gmm__cpu_rank *r = (gmm__cpu_rank *)self;
    gmm__rank_event *e = (gmm__rank_event *)(void *)event;
    if (!r) return GMM_E_NULL;
    if (!e) return GMM_OK;
    (void)pthread_mutex_lock(&r->world->mutex);
    gmm__token_release(r->world, e->last);
    gmm__ranks_free(r->world, e);
    (void)pthread_mutex_unlock(&r->world->mutex);
    return GMM_OK;
}

static gmm_status gmm__ranks_event_record(void *self, gmm_event event, gmm_stream stream, uint32_t flags) {
    gmm__cpu_rank *r = (gmm__cpu_rank *)self;
    gmm__rank_event *e = (gmm__rank_event *)(void *)event;
    gmm__rank_queue *q;
    gmm__rank_op op;
    gmm_status s = gmm__rank_check_call(r, "event_record", "event", e, flags);
    if (s) return s;
    q = gmm__rank_stream_queue(r, stream);
    memset(&op, 0, sizeof op);
    op.kind = GMM__RANK_RECORD;
    op.name = "record";
    if (q->graph) {
        if (flags & (uint32_t)GMM_EVENT_EXTERNAL) op.event = e;
        else op.record_index = q->graph->record_count;
        s = gmm__rank_enqueue(r, stream, &op);
        if (!s && !op.event) {
            e->capture = q->graph->serial;
            e->record_index = q->graph->record_count++;
        }
        return gmm__rank_end_call(r, s);
    }
    op.token = gmm__token_create(r->world);
    if (!op.token) s = gmm__rank_fail(r, GMM_E_MEMORY, "event_record: no memory");
    else {
        gmm__token *token = gmm__token_retain(op.token);
        s = gmm__rank_enqueue(r, stream, &op);
        if (s != GMM_E_MEMORY) { /* after GMM_E_MEMORY the event is unchanged */
            gmm__token *previous = e->last;
            e->last = token;
            e->capture = 0;
            token = previous;
        }
        gmm__token_release(r->world, token);
    }
    return gmm__rank_end_call(r, s);
}

/* Adds a stream to a capture, with a queue that replays its work. */
static gmm_status gmm__graph_join(gmm__cpu_rank *r, gmm_ranks_graph *g, gmm__rank_queue *q) {
    int i;
    for (i = 1; i < GMM__RANK_QUEUES && r->queues[i]; i++) { }
    if (i == GMM__RANK_QUEUES) return gmm__rank_fail(r, GMM_E_MEMORY, "capture: more than %d streams", i - 1);
    r->queues[i] = (gmm__rank_queue *)gmm__ranks_alloc(r->world, sizeof *q);
    if (!r->queues[i]) return gmm__rank_fail(r, GMM_E_MEMORY, "capture: no memory");
    r->queues[i]->rank = r;
    r->queues[i]->index = i;
    r->queues[i]->captured_stream = q->index;
    q->graph = g;
    g->queues[g->queue_count++] = i;
    return GMM_OK;
}

static gmm_status gmm__ranks_stream_wait(void *self, gmm_stream stream, gmm_event event, uint32_t flags) {
    gmm__cpu_rank *r = (gmm__cpu_rank *)self;
    gmm__rank_event *e = (gmm__rank_event *)(void *)event;
    gmm__rank_queue *q;
    gmm__rank_op op;
    gmm_status s = gmm__rank_check_call(r, "stream_wait", "event", e, flags);
    if (s) return s;
    q = gmm__rank_stream_queue(r, stream);
    memset(&op, 0, sizeof op);
    op.kind = GMM__RANK_WAIT;
    op.name = "wait";
    if (q->graph && (flags & (uint32_t)GMM_EVENT_EXTERNAL)) {
        op.event = e;
        s = gmm__rank_enqueue(r, stream, &op);
    } else if (r->capture && e->capture == r->capture->serial) {
        if (!q->graph) s = gmm__graph_join(r, r->capture, q);
        op.record_index = e->record_index;
        if (!s) s = gmm__rank_enqueue(r, stream, &op);
    } else if (q->graph || e->capture) {
        s = gmm__rank_fail(r, GMM_E_CAPTURE, q->graph ? "stream_wait: captured stream %d waits for an event from "
                           "outside without GMM_EVENT_EXTERNAL" : "stream_wait: stream %d waits for an event that a "
                           "capture has recorded", q->index);
    } else if (e->last) {
        op.token = gmm__token_retain(e->last);
        s = gmm__rank_enqueue(r, stream, &op);
    }
    return gmm__rank_end_call(r, s);
}

static gmm_status gmm__ranks_event_query(void *self, gmm_event event, int32_t *done) {
    gmm__cpu_rank *r = (gmm__cpu_rank *)self;
    const gmm__rank_event *e = (const gmm__rank_event *)(const void *)event;
    const gmm_status s = gmm__rank_check_call(r, "event_query", e ? "done" : "event", e ? done : NULL, 0);
    if (s) return s;
    *done = !e->last || e->last->done;
    return gmm__rank_end_call(r, GMM_OK);
}
static gmm_status gmm__ranks_event_sync(void *self, gmm_event event) {
    gmm__cpu_rank *r = (gmm__cpu_rank *)self;
    const gmm__rank_event *e = (const gmm__rank_event *)(const void *)event;
    gmm_status s = gmm__rank_check_call(r, "event_sync", "event", e, 0);
    if (s) return s;
    if (e->last) s = gmm__rank_wait(r, NULL, e->last);
    if (!s && e->last) gmm__clock_merge(r->queues[0]->clock, e->last->clock);
    return gmm__rank_end_call(r, s);
}

static gmm_status gmm__ranks_run_work(void *self, const gmm_work *work, gmm_stream stream) {
    gmm__cpu_rank *r = (gmm__cpu_rank *)self;
    const int complete = work && work->function;
    gmm_status s = gmm__rank_check_call(r, "run", work ? "work->function" : "work", complete ? work : NULL, 0);
    gmm__rank_op op;
    size_t ranges;
    if (s) return s;
    if (work->range_count < 0 || (work->argument_bytes && !work->argument))
        return gmm__rank_end_call(r, gmm__rank_fail(
            r, work->range_count < 0 ? GMM_E_ARG : GMM_E_NULL, "run: range_count is %d, argument %p with %llu bytes: "
            "must be >= 0, and not NULL", work->range_count, work->argument, (unsigned long long)work->argument_bytes));
    ranges = work->ranges ? (size_t)work->range_count * sizeof *work->ranges : 0;
    memset(&op, 0, sizeof op);
    op.kind = GMM__RANK_WORK;
    op.name = work->name ? work->name : "work";
    op.count = work->ranges ? work->range_count : 0;
    op.bytes = ranges + work->argument_bytes + 1;
    op.function = work->function;
    /* stream NULL runs it here, without the lock */
    if (gmm__rank_stream_queue(r, stream)->index == 0 && !r->queues[0]->graph) {
        int32_t i;
        gmm__rank_start(r->queues[0], &op);
        for (i = 0; i < op.count; i++)
            gmm__ranks_check_access(r->queues[0], op.name, work->ranges[i].data, work->ranges[i].bytes,
                                    work->ranges[i].writes);
        s = gmm__rank_end_call(r, GMM_OK);
        return s ? s : work->function(work->argument, NULL);
    }
    op.memory = gmm__ranks_alloc(r->world, op.bytes);
    if (!op.memory) s = gmm__rank_fail(r, GMM_E_MEMORY, "'%s': no memory", op.name);
    else {
        if (ranges) memcpy(op.memory, work->ranges, ranges);
        if (work->argument_bytes)
            memcpy((char *)op.memory + ranges, work->argument, work->argument_bytes);
        s = gmm__rank_enqueue(r, stream, &op);
    }
    return gmm__rank_end_call(r, s);
}

/* Arguments of a copy or fill, which is enqueued as work. */
typedef struct gmm__rank_copy {
    void *dst;
    const void *src;
    size_t dst_pitch, src_pitch, width, height;
    int32_t value, fill; /* fill: 1 = set to `value`, src is NULL */
} gmm__rank_copy;

static gmm_status gmm__rank_copy_run(const void *argument, gmm_stream stream) {
    const gmm__rank_copy *m = (const gmm__rank_copy *)argument;
    size_t i;
    (void)stream;
    for (i = 0; i < m->height && m->width; i++) {
        char *dst = (char *)m->dst + i * m->dst_pitch;
        if (!m->fill) memcpy(dst, (const char *)m->src + i * m->src_pitch, m->width);
        else memset(dst, (int)m->value, m->width);
    }
    return GMM_OK;
}
static gmm_status gmm__rank_copy_enqueue(void *self, gmm__rank_copy m, gmm_stream stream) {
    gmm__cpu_rank *r = (gmm__cpu_rank *)self;
    const int empty = !m.width || !m.height, missing = !empty && (!m.dst || (!m.fill && !m.src));
    gmm_work work;
    gmm_range ranges[2];
    memset(&work, 0, sizeof work);
    memset(ranges, 0, sizeof ranges);
    work.name = m.fill ? "fill" : "copy";
    if (missing || m.value < 0 || m.value > 255 ||
        (!empty && (m.dst_pitch < m.width || (!m.fill && m.src_pitch < m.width)))) {
        const gmm_status s = gmm__rank_begin_call(r);
        return s ? s : gmm__rank_end_call(r, gmm__rank_fail(
            r, missing ? GMM_E_NULL : GMM_E_ARG, "%s: dst %p, src %p, pitches %llu and %llu, width %llu, value %d: "
            "must not be NULL, >= width, and 0 to 255", work.name, m.dst, m.src, (unsigned long long)m.dst_pitch,
            (unsigned long long)m.src_pitch, (unsigned long long)m.width, m.value));
    }
    if (empty) return GMM_OK;
    if (m.dst_pitch > SIZE_MAX / m.height || m.src_pitch > SIZE_MAX / m.height) {
        const gmm_status s = gmm__rank_begin_call(r);
        return s ? s : gmm__rank_end_call(r, gmm__rank_fail(
            r, GMM_E_OVERFLOW, "%s: %llu rows of pitches %llu and %llu do not fit size_t", work.name,
            (unsigned long long)m.height, (unsigned long long)m.dst_pitch, (unsigned long long)m.src_pitch));
    }
    ranges[0].data = m.dst;
    ranges[0].bytes = (m.height - 1) * m.dst_pitch + m.width;
    ranges[0].writes = 1;
    ranges[1].data = m.src;
    ranges[1].bytes = (m.height - 1) * m.src_pitch + m.width;
    work.function = gmm__rank_copy_run;
    work.argument = &m;
    work.argument_bytes = sizeof m;
    work.ranges = ranges;
    work.range_count = m.fill ? 1 : 2;
    return gmm__ranks_run_work(self, &work, stream);
}
static gmm_status gmm__ranks_copy2d(void *self, void *dst, size_t dst_pitch, const void *src, size_t src_pitch,
                                    size_t width, size_t height, gmm_stream stream) {
    gmm__rank_copy m;
    m.dst = dst;
    m.src = src;
    m.dst_pitch = dst_pitch;
    m.src_pitch = src_pitch;
    m.width = width;
    m.height = height;
    m.value = m.fill = 0;
    return gmm__rank_copy_enqueue(self, m, stream);
}
static gmm_status gmm__ranks_copy(void *self, void *dst, const void *src, size_t bytes, gmm_stream stream) {
    return gmm__ranks_copy2d(self, dst, bytes, src, bytes, bytes, 1, stream);
}
static gmm_status gmm__ranks_fill2d(void *self, void *dst, size_t pitch, int32_t value, size_t width, size_t height,
                                    gmm_stream stream) {
    gmm__rank_copy m;
    m.dst = dst;
    m.src = NULL;
    m.dst_pitch = pitch;
    m.src_pitch = 0;
    m.width = width;
    m.height = height;
    m.value = value;
    m.fill = 1;
    return gmm__rank_copy_enqueue(self, m, stream);
}
static gmm_status gmm__ranks_fill(void *self, void *dst, int32_t value, size_t bytes, gmm_stream stream) {
    return gmm__ranks_fill2d(self, dst, bytes, value, bytes, 1, stream);
}
static gmm_status gmm__ranks_is_capturing(void *self, gmm_stream stream, int32_t *capturing) {
    gmm__cpu_rank *r = (gmm__cpu_rank *)self;
    const gmm_status s = gmm__rank_check_call(r, "is_capturing", "capturing", capturing, 0);
    if (s) return s;
    *capturing = gmm__rank_stream_queue(r, stream)->graph != NULL;
    return gmm__rank_end_call(r, GMM_OK);
}

GMMDEF gmm_status gmm_ranks_runtime(gmm_ranks *ranks, int32_t rank, gmm_runtime *out) {
    static const gmm_runtime table = {
        0, GMM_SPACE_CPU, NULL, gmm__ranks_stream_create, gmm__ranks_stream_destroy, gmm__ranks_stream_wait,
        gmm__ranks_stream_sync, gmm__ranks_event_create, gmm__ranks_event_destroy, gmm__ranks_event_record,
        gmm__ranks_event_query, gmm__ranks_event_sync, gmm__ranks_copy, gmm__ranks_copy2d, gmm__ranks_fill,
        gmm__ranks_fill2d, gmm__ranks_is_capturing, gmm__ranks_run_work};
    if (!ranks) return GMM_E_NULL;
    if (!out || rank < 0 || rank >= ranks->config.ranks) {
        gmm_status s;
        (void)pthread_mutex_lock(&ranks->mutex);
        s = out ? gmm__rank_fail(ranks->rank, GMM_E_ARG, "gmm_ranks_runtime: rank %d: must be 0 to %d", rank,
                                 ranks->config.ranks - 1)
                : gmm__rank_fail(ranks->rank, GMM_E_NULL, "gmm_ranks_runtime: out is NULL");
        (void)pthread_mutex_unlock(&ranks->mutex);
        return s;
    }
    *out = table;
    out->self = &ranks->rank[rank];
    return GMM_OK;
}

/* --- Communicators --- */

/* Enqueues the calls of a group as one operation. */
static gmm_status gmm__member_flush(gmm__member *m) {
    gmm__cpu_rank *r = m->rank;
    const int captured = gmm__rank_stream_queue(r, m->stream)->graph != NULL;
    uint64_t *number;
    gmm__rank_op op;
    gmm_status s;
    if (!m->count) return GMM_OK;
    memset(&op, 0, sizeof op);
    op.kind = GMM__RANK_COLLECTIVE;
    op.name = m->what ? m->what : "collective";
    op.count = m->count;
    op.memory = m->parts;
    op.bytes = (size_t)m->count * sizeof *m->parts;
    op.member = m;
    m->parts = NULL;
    m->count = m->capacity = 0;
    if (captured && m->capture_serial != r->capture->serial) {
        m->capture_serial = r->capture->serial;
        m->captured = 0;
    }
    number = captured ? &m->captured : &m->enqueued; /* a launch adds those that were enqueued before it */
    op.number = (*number)++;
    s = gmm__rank_enqueue(r, m->stream, &op);
    if (s == GMM_E_MEMORY) --*number; /* it was not enqueued */
    return s;
}

static gmm_status gmm__member_add_call(void *self, gmm__coll part, gmm_stream stream) {
    gmm__member *m = (gmm__member *)self;
    const char *what = m->what ? m->what : "collective";
    gmm_status s = gmm__rank_begin_call(m->rank);
    if (s) return s;
    if (part.kind == GMM__COLL_REDUCE_SCATTER && !gmm__comm_supports_sum(part.dtype))
        return gmm__rank_end_call(m->rank,
                                  gmm__rank_fail(m->rank, GMM_E_DTYPE, "'%s': reduce_scatter of %s: must be f32, "
                                                 "bf16 or f16", what, gmm_dtype_name(part.dtype)));
    if (part.bytes && (!part.send || !part.recv))
        return gmm__rank_end_call(m->rank, gmm__rank_fail(m->rank, GMM_E_ARG, "'%s': %s of %llu bytes from %p to %p: "
                                                          "must not be NULL", what, gmm__coll_names[part.kind],
                                                          (unsigned long long)part.bytes, part.send, part.recv));
    if (m->count && m->stream != stream)
        return gmm__rank_end_call(m->rank, gmm__rank_fail(m->rank, GMM_E_ARG, "'%s': one group on two streams", what));
    if (m->count == m->capacity) {
        size_t capacity = (size_t)m->capacity;
        void *parts = m->parts;
        if (!gmm__ranks_grow(m->group->world, &parts, (size_t)m->count, &capacity, sizeof part))
            return gmm__rank_end_call(m->rank, gmm__rank_fail(m->rank, GMM_E_MEMORY, "'%s': no memory", what));
        m->parts = (gmm__coll *)parts;
        m->capacity = (int32_t)capacity;
    }
    m->parts[m->count++] = part;
    m->stream = stream;
    if (!m->open) s = gmm__member_flush(m);
    return gmm__rank_end_call(m->rank, s);
}
static gmm__coll gmm__coll_make(gmm__coll_kind kind, gmm_dtype dtype, const void *send, void *recv, size_t bytes) {
    gmm__coll p;
    memset(&p, 0, sizeof p);
    p.kind = kind;
    p.dtype = dtype;
    p.send = send;
    p.recv = recv;
    p.bytes = bytes;
    return p;
}

static gmm_status gmm__member_group_begin(void *self, const char *what) {
    gmm__member *m = (gmm__member *)self;
    const gmm_status s = gmm__rank_begin_call(m->rank);
    if (s) return s;
    m->open = 1;
    m->what = what;
    return gmm__rank_end_call(m->rank, GMM_OK);
}
static gmm_status gmm__member_group_end(void *self) {
    gmm__member *m = (gmm__member *)self;
    gmm_status s = gmm__rank_begin_call(m->rank);
    if (s) return s;
    m->open = 0;
    s = gmm__member_flush(m);
    m->what = NULL;
    return gmm__rank_end_call(m->rank, s);
}
static gmm_status gmm__member_all_gather(void *self, const void *send, void *recv, size_t bytes, gmm_stream stream) {
    return gmm__member_add_call(self, gmm__coll_make(GMM__COLL_ALL_GATHER, GMM_NONE, send, recv, bytes), stream);
}
static gmm_status gmm__member_reduce_scatter(void *self, const void *send, void *recv, size_t count, gmm_dtype dtype,
                                             gmm_stream stream) {
    const size_t bytes = count * (size_t)(gmm_dtype_bits(dtype) / 8);
    return gmm__member_add_call(self, gmm__coll_make(GMM__COLL_REDUCE_SCATTER, dtype, send, recv, bytes), stream);
}
static gmm_status gmm__member_all_to_all(void *self, const void *send, void *recv, size_t bytes, gmm_stream stream) {
    return gmm__member_add_call(self, gmm__coll_make(GMM__COLL_ALL_TO_ALL, GMM_NONE, send, recv, bytes), stream);
}
static gmm_status gmm__member_all_reduce_max(void *self, float *values, size_t count, gmm_stream stream) {
    return gmm__member_add_call(self, gmm__coll_make(GMM__COLL_ALL_REDUCE_MAX, GMM_F32, values, values,
                                                     count * sizeof *values), stream);
}
static gmm_status gmm__member_poll(void *self, gmm_error *error) {
    gmm__member *m = (gmm__member *)self;
    gmm_status s;
    (void)pthread_mutex_lock(&m->group->world->mutex);
    s = m->group->fault.status ? GMM_E_COMM : m->rank->given_up ? GMM_E_COMM : GMM_OK;
    if (s && error) *error = m->group->fault.status ? m->group->fault : m->rank->error;
    if (!s && error) { /* names a missing rank, for a caller that reports a timeout */
        const gmm__rank_op *op = gmm__group_find_op(m->group, m->index, NULL);
        int32_t i;
        memset(error, 0, sizeof *error);
        for (i = 0; op && i < m->group->size; i++)
            if (!gmm__group_find_op(m->group, i, NULL)) {
                (void)snprintf(error->text, sizeof error->text, "rank %d of %d has not joined", i,
                               m->group->size);
                break;
            }
    }
    (void)pthread_mutex_unlock(&m->group->world->mutex);
    return s;
}
static void gmm__member_give_up(void *self, const char *why) {
    gmm__member *m = (gmm__member *)self;
    (void)pthread_mutex_lock(&m->group->world->mutex);
    gmm__group_give_up(m->group, why);
    (void)pthread_cond_broadcast(&m->group->world->changed);
    (void)pthread_mutex_unlock(&m->group->world->mutex);
}

/* Checks the arguments of gmm_ranks_comms. The message of a failure is rank 0's. */
static gmm_status gmm__ranks_check_members(const gmm_ranks *ranks, const int32_t *members, int32_t count,
                                           const gmm_comm *out) {
    static const char fn[] = "gmm_ranks_comms";
    gmm__cpu_rank *r = ranks->rank;
    const int32_t last = ranks->config.ranks - 1;
    int32_t i, j;
    if (!members || !out) return gmm__rank_fail(r, GMM_E_NULL, "%s: %s is NULL", fn, members ? "out" : "members");
    if (count < 1 || count > last + 1)
        return gmm__rank_fail(r, GMM_E_ARG, "%s: count %d: must be 1 to %d, the number of ranks", fn, count, last + 1);
    for (i = 0; i < count; i++) {
        if (members[i] < 0 || members[i] > last)
            return gmm__rank_fail(r, GMM_E_ARG, "%s: members[%d] is %d: must be a rank, 0 to %d", fn, i, members[i],
                                  last);
        for (j = 0; j < i; j++)
            if (members[j] == members[i])
                return gmm__rank_fail(r, GMM_E_ARG, "%s: members[%d] and members[%d] are %d: must be distinct", fn, j,
                                      i, members[i]);
    }
    return GMM_OK;
}

/* Allocates a communicator of `count` members, not yet initialized. NULL: there is no memory. */
static gmm__group *gmm__ranks_add_group(gmm_ranks *ranks, int32_t count) {
    gmm__group *g = (gmm__group *)gmm__ranks_alloc(ranks, sizeof *g);
    if (g) g->members = (gmm__member *)gmm__ranks_alloc(ranks, (size_t)count * sizeof *g->members);
    if (!g || g->members) return g;
    gmm__ranks_free(ranks, g);
    return NULL;
}

GMMDEF gmm_status gmm_ranks_comms(gmm_ranks *ranks, const int32_t *members, int32_t count, gmm_comm *out) {
    gmm__group *g = NULL;
    gmm_status s;
    int32_t i;
    if (!ranks) return GMM_E_NULL;
    (void)pthread_mutex_lock(&ranks->mutex);
    s = gmm__ranks_check_members(ranks, members, count, out);
    if (s == GMM_OK) g = gmm__ranks_add_group(ranks, count);
    if (s == GMM_OK && !g) s = gmm__rank_fail(ranks->rank, GMM_E_MEMORY, "gmm_ranks_comms: no memory");
    if (s != GMM_OK) {
        (void)pthread_mutex_unlock(&ranks->mutex);
        return s;
    }
    g->world = ranks;
    g->size = count;
    g->next = ranks->groups;
    ranks->groups = g;
    for (i = 0; i < count; i++) {
        gmm_comm c;
        memset(&c, 0, sizeof c);
        g->members[i].group = g;
        g->members[i].rank = &ranks->rank[members[i]];
        g->members[i].index = i;
        c.rank = i;
        c.size = count;
        c.self = &g->members[i];
        c.group_begin = gmm__member_group_begin;
        c.group_end = gmm__member_group_end;
        c.all_gather = gmm__member_all_gather;
        c.reduce_scatter = gmm__member_reduce_scatter;
        c.all_to_all = gmm__member_all_to_all;
        c.all_reduce_max = gmm__member_all_reduce_max;
        c.poll = gmm__member_poll;
        c.give_up = gmm__member_give_up;
        out[i] = c;
    }
    (void)pthread_mutex_unlock(&ranks->mutex);
    return GMM_OK;
}

/* --- Captures and their graphs --- */

static void gmm__graph_free(gmm_ranks_graph *g) {
    gmm_ranks *w = g->rank->world;
    int32_t i;
    for (i = 0; i < g->queue_count; i++) {
        size_t j;
        for (j = 0; j < g->count[i]; j++) gmm__rank_op_free(w, &g->ops[i][j]);
        gmm__ranks_free(w, g->ops[i]);
        /* its index is not reused, since the race checker has it */
        g->rank->queues[g->queues[i]]->captured_stream = GMM__RANK_QUEUES;
    }
    gmm__ranks_free(w, g);
}

/* Finds a stream of the capture that is not joined with the origin: a stream is joined up to the last of its records
   that a joined operation of another stream waits for. Returns its index among the queues; 0 = all are joined. */
static int32_t gmm__graph_find_unjoined(const gmm_ranks_graph *g) {
    size_t joined[GMM__RANK_QUEUES] = {0};
    int32_t i, k, changed = 1;
    size_t j, n;
    joined[0] = g->count[0];
    while (changed)
        for (changed = 0, i = 0; i < g->queue_count; i++)
            for (j = joined[i]; j < g->count[i]; j++) {
                const gmm__rank_op *record = &g->ops[i][j];
                if (record->kind != GMM__RANK_RECORD || record->event) continue;
                for (k = 0; k < g->queue_count; k++)
                    for (n = 0; n < joined[k]; n++) {
                        const gmm__rank_op *wait = &g->ops[k][n];
                        if (wait->kind != GMM__RANK_WAIT || wait->event || wait->record_index != record->record_index)
                            continue;
                        if (joined[i] < j + 1) changed = 1;
                        joined[i] = joined[i] < j + 1 ? j + 1 : joined[i];
                    }
            }
    for (i = 1; i < g->queue_count; i++)
        for (j = joined[i]; j < g->count[i]; j++)
            if (g->ops[i][j].kind != GMM__RANK_WAIT && (g->ops[i][j].kind != GMM__RANK_RECORD || g->ops[i][j].event))
                return i;
    return 0;
}

GMMDEF gmm_status gmm_ranks_capture_begin(gmm_ranks *ranks, int32_t rank, gmm_stream stream) {
    gmm__cpu_rank *r = ranks && rank >= 0 && rank < ranks->config.ranks ? &ranks->rank[rank] : NULL;
    gmm_status s = ranks && !r ? GMM_E_ARG : gmm__rank_begin_call(r);
    if (s) return s;
    if (r->capture || !stream)
        s = gmm__rank_fail(r, GMM_E_CAPTURE, stream ? "capture_begin: rank %d is capturing already" : "capture_begin: "
                           "stream NULL of rank %d cannot be captured", rank);
    else if (!(r->capture = (gmm_ranks_graph *)gmm__ranks_alloc(ranks, sizeof *r->capture)))
        s = gmm__rank_fail(r, GMM_E_MEMORY, "capture_begin: no memory");
    else {
        r->capture->rank = r;
        r->capture->origin = stream;
        r->capture->serial = ++r->captures;
        s = gmm__graph_join(r, r->capture, gmm__rank_stream_queue(r, stream));
        if (s) {
            gmm__ranks_free(ranks, r->capture);
            r->capture = NULL;
        }
    }
    return gmm__rank_end_call(r, s);
}

GMMDEF gmm_status gmm_ranks_capture_end(gmm_ranks *ranks, int32_t rank, gmm_stream stream, gmm_ranks_graph **out) {
    gmm__cpu_rank *r = ranks && rank >= 0 && rank < ranks->config.ranks ? &ranks->rank[rank] : NULL;
    gmm_ranks_graph *g;
    gmm_status s = ranks && !r ? GMM_E_ARG : gmm__rank_check_call(r, "capture_end", "out", out, 0);
    int32_t i;
    if (s) return s;
    *out = NULL;
    g = r->capture;
    if (!g || g->origin != stream)
        return gmm__rank_end_call(r, gmm__rank_fail(r, GMM_E_CAPTURE, "capture_end: not the stream of a capture"));
    for (i = 0; i < GMM__RANK_QUEUES; i++)
        if (r->queues[i] && r->queues[i]->graph == g) r->queues[i]->graph = NULL;
    r->capture = NULL;
    i = gmm__graph_find_unjoined(g);
    if (i) {
        s = gmm__rank_fail(r, GMM_E_CAPTURE, "capture_end: what stream %d was given has not been joined back",
                           r->queues[g->queues[i]]->captured_stream);
        gmm__graph_free(g);
    } else *out = g;
    return gmm__rank_end_call(r, s);
}

/* Copies a captured operation for one launch; 0 = no memory. External waits wait for the last record before the launch.
   */
static int gmm__graph_copy_op(gmm_ranks_graph *g, gmm__token **tokens, const gmm__rank_op *src, gmm__rank_op *op) {
    gmm_ranks *w = g->rank->world;
    *op = *src;
    op->memory = NULL;
    if (src->kind == GMM__RANK_WAIT) {
        op->token = gmm__token_retain(src->event ? src->event->last : tokens[src->record_index]);
        /* the event was never recorded */
        if (!op->token && (op->token = gmm__token_create(w)) != NULL) op->token->done = 1;
        return op->token != NULL;
    }
    if (src->kind == GMM__RANK_RECORD) {
        op->token = src->event ? gmm__token_create(w) : gmm__token_retain(tokens[src->record_index]);
        return op->token != NULL;
    }
    op->memory = gmm__ranks_alloc(w, src->bytes);
    if (op->memory) memcpy(op->memory, src->memory, src->bytes);
    return op->memory != NULL;
}

GMMDEF gmm_status gmm_ranks_launch(gmm_ranks_graph *graph, gmm_stream stream) {
    gmm__cpu_rank *r = graph ? graph->rank : NULL;
    gmm_ranks *w;
    gmm__rank_op op;
    gmm__replay *replay;
    gmm__token **tokens;
    gmm_status s = gmm__rank_begin_call(r);
    int32_t i;
    size_t j;
    int fits;
    if (s) return s;
    if (gmm__rank_stream_queue(r, stream)->graph)
        return gmm__rank_end_call(r, gmm__rank_fail(r, GMM_E_CAPTURE, "launch: the stream is capturing"));
    w = r->world;
    memset(&op, 0, sizeof op);
    op.kind = GMM__RANK_LAUNCH;
    op.name = "launch";
    op.graph = graph;
    op.memory = replay = (gmm__replay *)gmm__ranks_alloc(w, sizeof *replay);
    tokens = (gmm__token **)gmm__ranks_alloc(w, ((size_t)graph->record_count + 1) * sizeof *tokens);
    fits = replay && tokens;
    for (i = 0; fits && i < graph->record_count; i++) fits = (tokens[i] = gmm__token_create(w)) != NULL;
    for (i = 0; fits && i < graph->queue_count; i++) {
        replay->ops[i] = (gmm__rank_op *)gmm__ranks_alloc(w, (graph->count[i] + 1) * sizeof op);
        fits = replay->ops[i] != NULL;
        for (j = 0; fits && j < graph->count[i]; j++) {
            fits = gmm__graph_copy_op(graph, tokens, &graph->ops[i][j], &replay->ops[i][j]);
            replay->count[i] = j + 1;
        }
    }
    /* from here on nothing fails, and events take the records of this launch */
    for (i = 0; fits && i < graph->queue_count; i++)
        for (j = 0; j < graph->count[i]; j++) {
            gmm__rank_op *to = &replay->ops[i][j];
            if (to->kind == GMM__RANK_COLLECTIVE) to->number += to->member->enqueued;
            if (to->kind != GMM__RANK_RECORD || !to->event) continue;
            gmm__token_release(w, to->event->last);
            to->event->last = gmm__token_retain(to->token);
        }
    for (i = 0; fits && i < graph->queue_count; i++)
        for (j = 0; j < graph->count[i]; j++)
            if (replay->ops[i][j].kind == GMM__RANK_COLLECTIVE) replay->ops[i][j].member->enqueued++;
    for (i = 0; tokens && i < graph->record_count; i++) gmm__token_release(w, tokens[i]);
    gmm__ranks_free(w, tokens);
    if (!fits) {
        gmm__rank_op_free(w, &op);
        s = gmm__rank_fail(r, GMM_E_MEMORY, "launch: no memory");
    } else s = gmm__rank_enqueue(r, stream, &op);
    return gmm__rank_end_call(r, s);
}

GMMDEF void gmm_ranks_graph_destroy(gmm_ranks_graph *graph) {
    if (!graph) return;
    {
        gmm_ranks *w = graph->rank->world;
        (void)pthread_mutex_lock(&w->mutex);
        gmm__graph_free(graph);
        (void)pthread_mutex_unlock(&w->mutex);
    }
}

/* --- Worlds of ranks: create, run, destroy --- */

GMMDEF gmm_status gmm_ranks_run(gmm_ranks *ranks) {
    gmm_status s = GMM_OK;
    int32_t i;
    int q;
    if (!ranks) return GMM_E_NULL;
    (void)pthread_mutex_lock(&ranks->mutex);
    while (gmm__ranks_step(ranks)) { }
    for (i = 0; i < ranks->config.ranks; i++) {
        gmm__cpu_rank *r = &ranks->rank[i];
        if (r->given_up) s = GMM_E_COMM;
        for (q = 0; q < GMM__RANK_QUEUES && !s; q++)
            if (r->queues[q] && r->queues[q]->count > 0) {
                char text[400];
                (void)gmm__rank_describe_hang(r, text, sizeof text);
                s = gmm__rank_fail(r, GMM_E_STATE, "gmm_ranks_run: stuck: %s", text);
            }
    }
    (void)pthread_cond_broadcast(&ranks->changed);
    (void)pthread_mutex_unlock(&ranks->mutex);
    return s;
}

GMMDEF const char *gmm_ranks_error(gmm_ranks *ranks, int32_t rank) {
    gmm__cpu_rank *r;
    if (!ranks || rank < 0 || rank >= ranks->config.ranks) return "";
    r = &ranks->rank[rank];
    (void)pthread_mutex_lock(&ranks->mutex); /* threads of other ranks may set the error */
    r->reported = r->error;
    (void)pthread_mutex_unlock(&ranks->mutex);
    return r->reported.text;
}

GMMDEF int64_t gmm_ranks_races(gmm_ranks *ranks, const char **text) {
    int64_t races;
    if (!ranks) return 0;
    (void)pthread_mutex_lock(&ranks->mutex);
    races = ranks->races;
    if (text) *text = ranks->race;
    (void)pthread_mutex_unlock(&ranks->mutex);
    return races;
}

GMMDEF void gmm_ranks_destroy(gmm_ranks *ranks) {
    int32_t i;
    int q;
    if (!ranks) return;
    for (i = 0; ranks->rank && i < ranks->config.ranks; i++) {
        gmm__cpu_rank *r = &ranks->rank[i];
        r->given_up = 0;
        gmm__rank_give_up(r, "");
        if (r->capture) gmm__graph_free(r->capture); /* a capture that was not ended */
        for (q = 0; q < GMM__RANK_QUEUES; q++) {
            if (r->queues[q]) gmm__ranks_free(ranks, r->queues[q]->ops);
            gmm__ranks_free(ranks, r->queues[q]);
        }
        gmm__token_release(ranks, r->host);
        gmm__ranks_free(ranks, r->accesses);
    }
    while (ranks->groups) {
        gmm__group *g = ranks->groups;
        ranks->groups = g->next;
        for (i = 0; i < g->size; i++) gmm__ranks_free(ranks, g->members[i].parts);
        gmm__ranks_free(ranks, g->members);
        gmm__ranks_free(ranks, g);
    }
    gmm__ranks_free(ranks, ranks->rank);
    (void)pthread_cond_destroy(&ranks->changed);
    (void)pthread_mutex_destroy(&ranks->mutex);
    {
        const gmm_allocator a = ranks->config.allocator;
        if (a.release) a.release(a.user, ranks);
        else GMM_FREE(ranks);
    }
}

/* Initializes a condition whose timed waits end by the clock of gmm__gtp_time. */
static void gmm__ranks_init_condition(pthread_cond_t *condition) {
#if GMM__HAS_MONOTONIC_CLOCK
    pthread_condattr_t attributes;
    (void)pthread_condattr_init(&attributes);
    (void)pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    (void)pthread_cond_init(condition, &attributes);
    (void)pthread_condattr_destroy(&attributes);
#else
    (void)pthread_cond_init(condition, NULL);
#endif
}

GMMDEF gmm_status gmm_ranks_create(const gmm_ranks_config *config, gmm_ranks **out, gmm_error *error) {
    static const char fn[] = "gmm_ranks_create";
    gmm_ranks_config c;
    gmm_ranks *w;
    gmm_status s;
    int32_t i;
    if (!out) return gmm__fail(error, GMM_E_NULL, "%s: out is NULL", fn);
    *out = NULL;
    s = gmm__gtp_read(fn, "config", config, &c, sizeof c, error);
    if (s) return s;
    if (c.ranks < 1 || c.ranks > GMM__MAX_CPU_RANKS || c.timeout_ms < 0)
        return gmm__fail(error, GMM_E_ARG, "%s: %d ranks, timeout_ms %d: must be 1 to %d, and >= 0", fn, c.ranks,
                         c.timeout_ms, (int)GMM__MAX_CPU_RANKS);
    if (!c.allocator.alloc != !c.allocator.release)
        return gmm__fail(error, GMM_E_ARG, "%s: allocator: both functions or none", fn);
    if (c.timeout_ms == 0) c.timeout_ms = 10000;
    w = (gmm_ranks *)(c.allocator.alloc ? c.allocator.alloc(c.allocator.user, sizeof *w) : GMM_MALLOC(sizeof *w));
    if (!w) return gmm__fail(error, GMM_E_MEMORY, "%s: no memory", fn);
    memset(w, 0, sizeof *w);
    w->config = c;
    w->random = c.seed;
    (void)pthread_mutex_init(&w->mutex, NULL);
    gmm__ranks_init_condition(&w->changed);
    w->rank = (gmm__cpu_rank *)gmm__ranks_alloc(w, (size_t)c.ranks * sizeof *w->rank);
    for (i = 0; w->rank && i < c.ranks; i++) {
        gmm__cpu_rank *r = &w->rank[i];
        r->world = w;
        r->index = i;
        r->queues[0] = (gmm__rank_queue *)gmm__ranks_alloc(w, sizeof *r->queues[0]);
        if (!r->queues[0]) break;
        r->queues[0]->rank = r;
        r->queues[0]->captured_stream = -1;
    }
    if (i < c.ranks) {
        gmm_ranks_destroy(w);
        return gmm__fail(error, GMM_E_MEMORY, "%s: no memory", fn);
    }
    *out = w;
    return GMM_OK;
}

#else /* GMM_WITH_CPU_RANKS */

GMMDEF gmm_status gmm_ranks_create(const gmm_ranks_config *config, gmm_ranks **out, gmm_error *error) {
    (void)config;
    if (out) *out = NULL;
    return gmm__fail(error, GMM_E_BUILD, "gmm_ranks_create: define GMM_WITH_CPU_RANKS where GMM_IMPLEMENTATION is");
}
GMMDEF void gmm_ranks_destroy(gmm_ranks *ranks) { (void)ranks; }
GMMDEF gmm_status gmm_ranks_runtime(gmm_ranks *ranks, int32_t rank, gmm_runtime *out) {
    (void)ranks, (void)rank, (void)out;
    return GMM_E_BUILD;
}
GMMDEF gmm_status gmm_ranks_comms(gmm_ranks *ranks, const int32_t *members, int32_t count, gmm_comm *out) {
    (void)ranks, (void)members, (void)count, (void)out;
    return GMM_E_BUILD;
}
GMMDEF gmm_status gmm_ranks_run(gmm_ranks *ranks) {
    (void)ranks;
    return GMM_E_BUILD;
}
GMMDEF const char *gmm_ranks_error(gmm_ranks *ranks, int32_t rank) {
    (void)ranks, (void)rank;
    return "";
}
GMMDEF int64_t gmm_ranks_races(gmm_ranks *ranks, const char **text) {
    (void)ranks, (void)text;
    return 0;
}
GMMDEF gmm_status gmm_ranks_capture_begin(gmm_ranks *ranks, int32_t rank, gmm_stream stream) {
    (void)ranks, (void)rank, (void)stream;
    return GMM_E_BUILD;
}
GMMDEF gmm_status gmm_ranks_capture_end(gmm_ranks *ranks, int32_t rank, gmm_stream stream, gmm_ranks_graph **out) {
    (void)ranks, (void)rank, (void)stream, (void)out;
    return GMM_E_BUILD;
}
GMMDEF gmm_status gmm_ranks_launch(gmm_ranks_graph *graph, gmm_stream stream) {
    (void)graph, (void)stream;
    return GMM_E_BUILD;
}
GMMDEF void gmm_ranks_graph_destroy(gmm_ranks_graph *graph) { (void)graph; }

#endif /* GMM_WITH_CPU_RANKS */

/* Communicators of NCCL. */

/* ....................................................................................................... NCCL ... */

#if defined(__CUDACC__) && defined(GMM_WITH_NCCL)

/* gmm_comm.processors: the multiprocessors that collectives of NCCL need, also those by windows and copy engines, as
   measured on an H200. */
enum { GMM__NCCL_PROCESSORS = 16 };

typedef struct gmm__nccl {
    gmm__comm_base comm_base;
    ncclComm_t comm;
    double timeout; /* seconds */
} gmm__nccl;

/* The status of an NCCL call. A non-blocking communicator may complete the call later; this function waits for that,
   except within a group. */
static gmm_status gmm__nccl_check(gmm__nccl *n, const char *call, ncclResult_t r) {
    const double begin = gmm__gtp_now();
    const struct timespec pause = {0, 20000};
    while (r == ncclInProgress && !n->comm_base.open && gmm__gtp_now() - begin < n->timeout) {
        (void)nanosleep(&pause, NULL);
        if (ncclCommGetAsyncError(n->comm, &r) != ncclSuccess) r = ncclInternalError;
    }
    if (r == ncclSuccess || (r == ncclInProgress && n->comm_base.open)) return GMM_OK;
    if (r == ncclInProgress) return gmm__comm_fail(&n->comm_base, call, "not done in time: a peer is missing");
    return gmm__comm_fail(&n->comm_base, call, ncclGetErrorString(r));
}
/* One NCCL call on the communicator's device; after a failure of the communicator NCCL is not called. */
#define GMM__NCCL(n, name, call) \
    int current; \
    gmm_status s = gmm__comm_poll(&(n)->comm_base, NULL); \
    if (s || gmm__cuda_enter((n)->comm_base.ctx, &current) != cudaSuccess) return s ? s : GMM_E_CUDA; \
    return s = gmm__nccl_check(n, name, call), (void)gmm__cuda_leave((n)->comm_base.ctx, name, current, cudaSuccess), s

static gmm_status gmm__nccl_group_begin(void *self, const char *what) {
    gmm__nccl *n = (gmm__nccl *)self;
    n->comm_base.what = what;
    GMM__NCCL(n, "ncclGroupStart", (n->comm_base.open = 1, ncclGroupStart()));
}
/* After a failed call NCCL's group stays open until give_up ends it. */
static gmm_status gmm__nccl_end_group(gmm__nccl *n) {
    GMM__NCCL(n, "ncclGroupEnd", (n->comm_base.open = 0, ncclGroupEnd()));
}
static gmm_status gmm__nccl_group_end(void *self) {
    gmm__nccl *n = (gmm__nccl *)self;
    const gmm_status s = gmm__nccl_end_group(n);
    n->comm_base.what = NULL;
    return s;
}
static gmm_status gmm__nccl_all_gather(void *self, const void *send, void *recv, size_t bytes, gmm_stream stream) {
    gmm__nccl *n = (gmm__nccl *)self;
    GMM__NCCL(n, "ncclAllGather", ncclAllGather(send, recv, bytes, ncclInt8, n->comm, stream));
}
static gmm_status gmm__nccl_reduce_scatter(void *self, const void *send, void *recv, size_t count, gmm_dtype dtype,
                                           gmm_stream stream) {
    gmm__nccl *n = (gmm__nccl *)self;
    const ncclDataType_t type = dtype == GMM_F32 ? ncclFloat32 : dtype == GMM_BF16 ? ncclBfloat16 : ncclFloat16;
    if (!gmm__comm_supports_sum(dtype))
        return gmm__comm_fail(&n->comm_base, "reduce_scatter", "dtype must be f32, bf16 or f16");
    GMM__NCCL(n, "ncclReduceScatter", ncclReduceScatter(send, recv, count, type, ncclSum, n->comm, stream));
}
#if NCCL_VERSION_CODE >= 22800
#define GMM__NCCL_ALL_TO_ALL ncclAlltoAll
#else
#define GMM__NCCL_ALL_TO_ALL gmm__nccl_send_recv
static ncclResult_t gmm__nccl_send_recv(const void *send, void *recv, size_t bytes, ncclDataType_t type,
                                        ncclComm_t comm, cudaStream_t stream) {
    int size = 0, i;
    ncclResult_t r = ncclCommCount(comm, &size), end;
    if (r == ncclSuccess) r = ncclGroupStart();
    if (r != ncclSuccess) return r;
    for (i = 0; i < size && r == ncclSuccess; i++) {
        r = ncclSend((const char *)send + (size_t)i * bytes, bytes, type, i, comm, stream);
        if (r == ncclSuccess) r = ncclRecv((char *)recv + (size_t)i * bytes, bytes, type, i, comm, stream);
    }
    end = ncclGroupEnd();
    return r == ncclSuccess ? end : r;
}
#endif
static gmm_status gmm__nccl_all_to_all(void *self, const void *send, void *recv, size_t bytes, gmm_stream stream) {
    gmm__nccl *n = (gmm__nccl *)self;
    GMM__NCCL(n, "ncclAlltoAll", GMM__NCCL_ALL_TO_ALL(send, recv, bytes, ncclInt8, n->comm, stream));
}
#undef GMM__NCCL_ALL_TO_ALL
static gmm_status gmm__nccl_all_reduce_max(void *self, float *values, size_t count, gmm_stream stream) {
    gmm__nccl *n = (gmm__nccl *)self;
    GMM__NCCL(n, "ncclAllReduce", ncclAllReduce(values, values, count, ncclFloat32, ncclMax, n->comm, stream));
}
#if NCCL_VERSION_CODE >= 22700
static gmm_status gmm__nccl_window_add(void *self, void *base, size_t bytes, void **window) {
    gmm__nccl *n = (gmm__nccl *)self;
    ncclWindow_t w = NULL;
    int current;
    gmm_status s = gmm__comm_poll(&n->comm_base, NULL);
    *window = NULL;
    if (s || gmm__cuda_enter(n->comm_base.ctx, &current) != cudaSuccess) return s ? s : GMM_E_CUDA;
    s = gmm__nccl_check(n, "ncclCommWindowRegister", ncclCommWindowRegister(n->comm, base, bytes, &w,
                                                                            NCCL_WIN_COLL_SYMMETRIC));
    *window = w;
    return gmm__cuda_leave(n->comm_base.ctx, "ncclCommWindowRegister", current, cudaSuccess), s;
}
static gmm_status gmm__nccl_window_remove(void *self, void *window) {
    gmm__nccl *n = (gmm__nccl *)self;
    GMM__NCCL(n, "ncclCommWindowDeregister", ncclCommWindowDeregister(n->comm, (ncclWindow_t)window));
}
#endif
static gmm_status gmm__nccl_poll(void *self, gmm_error *error) {
    gmm__nccl *n = (gmm__nccl *)self;
    ncclResult_t r = ncclSuccess;
    if (n->comm && !n->comm_base.error.text[0] && ncclCommGetAsyncError(n->comm, &r) == ncclSuccess &&
        r != ncclSuccess && r != ncclInProgress)
        (void)gmm__comm_fail(&n->comm_base, "NCCL", ncclGetLastError(n->comm));
    return gmm__comm_poll(&n->comm_base, error);
}
static void gmm__nccl_give_up(void *self, const char *why) {
    gmm__nccl *n = (gmm__nccl *)self;
    int current;
    if (n->comm_base.given_up) return;
    n->comm_base.given_up = 1;
    (void)gmm__comm_fail(&n->comm_base, "given up", why);
    if (gmm__cuda_enter(n->comm_base.ctx, &current) != cudaSuccess) return;
    if (n->comm_base.open) (void)ncclGroupEnd(); /* a failed call leaves its group open */
    n->comm_base.open = 0;
    (void)ncclCommAbort(n->comm);
    n->comm = NULL;
    (void)gmm__cuda_leave(n->comm_base.ctx, "ncclCommAbort", current, cudaSuccess);
}

GMMDEF gmm_status gmm_nccl_open(const gmm_nccl_config *config, gmm_comm *out, gmm_error *error) {
    static const char fn[] = "gmm_nccl_open";
    gmm_nccl_config c;
    gmm__nccl *n;
    int rank = 0, size = 0, device = 0;
    ncclResult_t r;
    gmm_status s;
    if (!out) return gmm__fail(error, GMM_E_NULL, "%s: out is NULL", fn);
    memset(out, 0, sizeof *out);
    if ((s = gmm__gtp_read(fn, "config", config, &c, sizeof c, error)) != GMM_OK) return s;
    if (!c.comm || !c.ctx)
        return gmm__fail(error, GMM_E_NULL, "%s: config->%s is NULL", fn, c.comm ? "ctx" : "comm");
    if (c.windows < 0 || c.windows > 1 || c.timeout_ms < 0 || c.reserved)
        return gmm__fail(error, GMM_E_ARG, "%s: windows %d, timeout_ms %d, reserved %d: must be 0 or 1, >= 0, and 0",
                         fn, c.windows, c.timeout_ms, c.reserved);
    r = ncclCommUserRank(c.comm, &rank);
    if (r == ncclSuccess) r = ncclCommCount(c.comm, &size);
    if (r == ncclSuccess) r = ncclCommCuDevice(c.comm, &device);
    if (r != ncclSuccess) return gmm__fail(error, GMM_E_COMM, "%s: %s", fn, ncclGetErrorString(r));
    if (c.ctx->config.space != GMM_SPACE_CUDA || c.ctx->config.device != device)
        return gmm__fail(error, GMM_E_ARG, "%s: ctx is of %s %d: must be of CUDA device %d, that of the "
                         "communicator", fn, c.ctx->config.space == GMM_SPACE_CUDA ? "CUDA device" : "the CPU, device",
                         c.ctx->config.device, device);
    n = (gmm__nccl *)gmm__comm_alloc(c.ctx, sizeof *n);
    if (!n) return gmm__fail(error, GMM_E_MEMORY, "%s: no memory", fn);
    n->comm_base.ctx = c.ctx;
    n->comm = c.comm;
    n->timeout = 1e-3 * (c.timeout_ms ? c.timeout_ms : 10000);
    out->rank = rank;
    out->size = size;
    out->processors = GMM__NCCL_PROCESSORS;
    out->self = n;
    out->group_begin = gmm__nccl_group_begin;
    out->group_end = gmm__nccl_group_end;
    out->all_gather = gmm__nccl_all_gather;
    out->reduce_scatter = gmm__nccl_reduce_scatter;
    out->all_to_all = gmm__nccl_all_to_all;
    out->all_reduce_max = gmm__nccl_all_reduce_max;
#if NCCL_VERSION_CODE >= 22700
    if (c.windows) {
        out->window_add = gmm__nccl_window_add;
        out->window_remove = gmm__nccl_window_remove;
    }
#endif
    out->poll = gmm__nccl_poll;
    out->give_up = gmm__nccl_give_up;
    return GMM_OK;
}

GMMDEF void gmm_nccl_close(gmm_comm *comm) {
    if (!comm || !comm->self) return;
    gmm__comm_free(((gmm__comm_base *)comm->self)->ctx, comm->self);
    memset(comm, 0, sizeof *comm);
}
#undef GMM__NCCL

#else /* GMM_WITH_NCCL */

GMMDEF gmm_status gmm_nccl_open(const gmm_nccl_config *config, gmm_comm *out, gmm_error *error) {
    (void)config;
    if (out) memset(out, 0, sizeof *out);
    return gmm__fail(error, GMM_E_BUILD, "gmm_nccl_open: compile with nvcc, and define GMM_WITH_NCCL where "
                     "GMM_IMPLEMENTATION is");
}
GMMDEF void gmm_nccl_close(gmm_comm *comm) { (void)comm; }

#endif /* GMM_WITH_NCCL */

/* Collectives by copies between the GPUs of one host: flags, copies, collectives. In all_gather, all_to_all
   and all_reduce_max a rank writes into the memory of its peers; in reduce_scatter it reads theirs. */

/* ................................................................................................ Peer copies ... */

#ifdef __CUDACC__

enum {
    GMM__PEERS_MAX_RANKS = 64,
    GMM__PEERS_MAX_WINDOWS = 16,
    GMM__PEERS_STAGED_VALUES = 1024, /* values that all_reduce_max reduces at a time */
    GMM__PEERS_MIN_BYTES = 2 << 20,  /* smaller allocations share a block, and CUDA IPC opens whole blocks */
    GMM__PEERS_MAX_PUSHES = 64,      /* of an operation, enqueued together */
    /* kinds of flags: the rank has reached the operation; its copies are done; it has given up; number of kinds */
    GMM__PEERS_READY = 0, GMM__PEERS_DONE = 1, GMM__PEERS_ABORTED = 2, GMM__PEERS_FLAGS = 3
};

/* A window: device memory that every rank has allocated, and its addresses in this process. */
typedef struct gmm__peers_window {
    char *base[GMM__PEERS_MAX_RANKS];
    void *opened[GMM__PEERS_MAX_RANKS]; /* the IPC mappings that this rank must close; NULL = none */
    size_t bytes;
} gmm__peers_window;

/* The copies of one all_gather or all_to_all to the same offset of a window on all ranks. all_gather copies `bytes` of
   `source` to every rank. all_to_all (`parts` = 1) copies part r of `source`, of `bytes` bytes, to rank r. */
typedef struct gmm__peers_push {
    const char *source;
    const gmm__peers_window *window;
    size_t offset, bytes;
    int32_t parts, reserved;
} gmm__peers_push;

/* The state of a communicator. A rank's own memory begins with flags [READY, DONE, ABORTED][rank]. Peers set them to 1;
   the rank's own stream resets READY and DONE to 0. Behind them, at byte 1024, is the staging buffer of all_reduce_max,
   [rank][GMM__PEERS_STAGED_VALUES] values. An operation is a barrier on READY, the copies into the windows of the
   peers, and a barrier on DONE. A peer sets a flag again only in a later operation, after a barrier that follows the
   reset. Flags therefore need no counter, and graphs that contain operations can be replayed. */
typedef struct gmm__peers {
    gmm__comm_base comm_base;
    gmm_peers_config config;
    PFN_cuStreamBatchMemOp_v11070 batch_mem_op;
    PFN_cuMemGetAddressRange_v3020 address_range;
    gmm__peers_window own, windows[GMM__PEERS_MAX_WINDOWS];
    gmm_stream copy_stream;     /* for copies within the device, concurrent with those to peers */
    gmm_stream control_stream;  /* for poll and give_up; of a priority that few streams use, so that it shares no
                                   hardware queue with a stream that waits for a peer */
    uint32_t *host_flags;       /* [READY, DONE, ABORTED][rank]: copy in page-locked memory, for poll */
    cudaEvent_t fork, join;     /* between the operation's stream and copy_stream */
    cudaEvent_t last;           /* end of the last operation outside of captures */
    gmm_stream stream;          /* of the active operation */
    int32_t active;             /* 1: between the barriers of an operation */
    int32_t push_count;         /* pushes of the operation that are not enqueued yet */
    int32_t notified, reserved; /* notified: a peer has called give_up and set the ABORTED flags of all ranks */
    gmm__peers_push pushes[GMM__PEERS_MAX_PUSHES];
} gmm__peers;

/* What a rank tells its peers about its memory of a window: an IPC handle between processes, else the address. */
typedef struct gmm__peers_handle {
    cudaIpcMemHandle_t handle;
    size_t offset, bytes;
    char *base;
    int32_t device, reserved;
} gmm__peers_handle;

/* The flag of a kind in the memory of rank `owner` that rank `writer` sets. */
static uint32_t *gmm__peers_flag(const gmm__peers *p, int32_t owner, int kind, int32_t writer) {
    return (uint32_t *)(void *)p->own.base[owner] + kind * p->config.size + writer;
}
/* The staged values of rank `writer` in the memory of rank `owner`. */
static float *gmm__peers_staging(const gmm__peers *p, int32_t owner, int32_t writer) {
    return (float *)(void *)(p->own.base[owner] + 1024) + (size_t)writer * GMM__PEERS_STAGED_VALUES;
}
static size_t gmm__peers_own_bytes(int32_t size) {
    return 1024 + (size_t)size * GMM__PEERS_STAGED_VALUES * sizeof(float);
}

static gmm_status gmm__peers_cuda(gmm__peers *p, const char *call, cudaError_t e) {
    if (e == cudaSuccess) return GMM_OK;
    (void)cudaGetLastError();
    return gmm__comm_fail(&p->comm_base, call, cudaGetErrorString(e));
}

/* Enqueues a barrier, in three steps over all peers: sets this rank's flag in their memory, waits for their flags in
   the own memory, and resets those. */
static gmm_status gmm__peers_barrier(gmm__peers *p, int kind, gmm_stream stream) {
    CUstreamBatchMemOpParams op[3 * GMM__PEERS_MAX_RANKS];
    const int32_t size = p->config.size, rank = p->config.rank;
    unsigned n = 0;
    int32_t i, step;
    memset(op, 0, sizeof op);
    for (step = 0; step < 3; step++)
        for (i = 1; i < size; i++, n++) {
            const int32_t peer = (rank + i) % size;
            uint32_t *flag = step == 0 ? gmm__peers_flag(p, peer, kind, rank) : gmm__peers_flag(p, rank, kind, peer);
            if (step == 1) {
                op[n].waitValue.operation = CU_STREAM_MEM_OP_WAIT_VALUE_32;
                op[n].waitValue.address = (CUdeviceptr)(uintptr_t)flag;
                op[n].waitValue.value = 1;
                op[n].waitValue.flags = CU_STREAM_WAIT_VALUE_EQ;
            } else {
                op[n].writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_32;
                op[n].writeValue.address = (CUdeviceptr)(uintptr_t)flag;
                op[n].writeValue.value = step == 0;
                op[n].writeValue.flags = CU_STREAM_WRITE_VALUE_DEFAULT;
            }
        }
    return n == 0 || p->batch_mem_op(stream, n, op, 0) == CUDA_SUCCESS /* an empty batch may be refused */
               ? GMM_OK : gmm__comm_fail(&p->comm_base, "cuStreamBatchMemOp", "the driver refuses it");
}

/* Begins an operation, unless one is active on the same stream. */
static gmm_status gmm__peers_begin_op(gmm__peers *p, gmm_stream stream) {
    if (p->active && p->stream != stream)
        return gmm__comm_fail(&p->comm_base, "peer copies", "one group on two streams");
    if (p->active) return GMM_OK;
    p->active = 1;
    p->stream = stream;
    return gmm__peers_barrier(p, GMM__PEERS_READY, stream);
}

/* Bytes from an address to the end of its allocation; 0 = unknown. */
static size_t gmm__peers_remaining_bytes(const gmm__peers *p, const void *address) {
    CUdeviceptr start = 0;
    size_t bytes = 0;
    if (p->address_range(&start, &bytes, (CUdeviceptr)(uintptr_t)address) != CUDA_SUCCESS) return 0;
    return (size_t)(start + bytes - (CUdeviceptr)(uintptr_t)address);
}
/* Number of pushes, of the n from q on, that one 2D copy to a peer can do together: they are equal in size and kind,
   and equally spaced within one allocation on either side. */
static int32_t gmm__peers_count_2d(const gmm__peers *p, const gmm__peers_push *q, int32_t n) {
    const uintptr_t step = n > 1 ? (uintptr_t)q[1].source - (uintptr_t)q->source : 0;
    const size_t pitch = n > 1 ? q[1].offset - q->offset : 0, whole = q->bytes * (size_t)p->config.size;
    size_t source_bytes, window_bytes;
    int32_t k = 1;
    if (step < q->bytes || pitch < q->bytes || step > 0x7fffffffu || pitch > 0x7fffffffu) return 1;
    source_bytes = gmm__peers_remaining_bytes(p, q->source);
    window_bytes = gmm__peers_remaining_bytes(p, q->window->base[p->config.rank] + q->offset);
    while (k < n && q[k].bytes == q->bytes && q[k].parts == q->parts && q[k].window == q->window &&
           (uintptr_t)q[k].source - (uintptr_t)q[k - 1].source == step && q[k].offset - q[k - 1].offset == pitch &&
           (size_t)k * step + (q->parts ? whole : q->bytes) <= source_bytes &&
           (size_t)k * pitch + whole <= window_bytes)
        k++;
    return k;
}
/* Enqueues the pushes, peer by peer, each rank beginning with a different peer. Few large copies, one after the other,
   saturate the links; many small ones do not, nor do concurrent copies to several ranks. i = 0 is this rank itself,
   whose copies run on copy_stream. */
static cudaError_t gmm__peers_flush(gmm__peers *p) {
    const int32_t size = p->config.size, rank = p->config.rank;
    cudaError_t e = cudaSuccess;
    int32_t i, k, n, forked = 0;
    for (i = 0; i < size && e == cudaSuccess; i++)
        for (k = 0; k < p->push_count && e == cudaSuccess; k += n) {
            const gmm__peers_push *q = &p->pushes[k];
            const int32_t peer = (rank + i) % size;
            const char *src = q->source + (q->parts ? (size_t)peer * q->bytes : 0);
            char *dst = q->window->base[peer] + q->offset + (size_t)rank * q->bytes;
            n = i == 0 ? 1 : gmm__peers_count_2d(p, q, p->push_count - k);
            if (i == 0 && (q->parts || dst == src)) continue;
            if (i == 0 && !forked) {
                e = cudaEventRecord(p->fork, p->stream);
                if (e == cudaSuccess) e = cudaStreamWaitEvent(p->copy_stream, p->fork, 0);
                forked = 1;
            }
            if (e != cudaSuccess) break;
            e = n == 1 ? cudaMemcpyAsync(dst, src, q->bytes, cudaMemcpyDeviceToDevice,
                                         i == 0 ? p->copy_stream : p->stream)
                       : cudaMemcpy2DAsync(dst, q[1].offset - q->offset, src, (size_t)(q[1].source - q->source),
                                           q->bytes, (size_t)n, cudaMemcpyDeviceToDevice, p->stream);
        }
    p->push_count = 0;
    if (e == cudaSuccess && forked) e = cudaEventRecord(p->join, p->copy_stream);
    if (e == cudaSuccess && forked) e = cudaStreamWaitEvent(p->stream, p->join, 0);
    return e;
}
/* Ends the active operation: its pushes and the barrier on DONE. */
static gmm_status gmm__peers_end_op(gmm__peers *p) {
    enum cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    gmm_status s;
    if (!p->active) return GMM_OK;
    p->active = 0;
    s = gmm__peers_cuda(p, "peer copies", gmm__peers_flush(p));
    if (!s) s = gmm__peers_barrier(p, GMM__PEERS_DONE, p->stream);
    if (!s) s = gmm__peers_cuda(p, "peer copies", cudaStreamIsCapturing(p->stream, &status));
    if (!s && status == cudaStreamCaptureStatusNone)
        s = gmm__peers_cuda(p, "peer copies", cudaEventRecord(p->last, p->stream));
    return s;
}

/* A collective call: it begins an operation if none is active, and ends it unless a group is open. */
typedef gmm_status gmm__peers_collective(gmm__peers *p, const void *send, void *recv, size_t size, gmm_dtype dtype,
                                         gmm_stream stream);
static gmm_status gmm__peers_call(void *self, gmm__peers_collective *collective, const void *send, void *recv,
                                  size_t size, gmm_dtype dtype, gmm_stream stream) {
    gmm__peers *p = (gmm__peers *)self;
    int current;
    gmm_status s = gmm__comm_poll(&p->comm_base, NULL);
    if (s) return s;
    if (gmm__cuda_enter(p->comm_base.ctx, &current) != cudaSuccess) return GMM_E_CUDA;
    s = gmm__peers_begin_op(p, stream);
    if (!s) s = collective(p, send, recv, size, dtype, stream);
    if (!s && !p->comm_base.open) s = gmm__peers_end_op(p);
    return gmm__cuda_leave(p->comm_base.ctx, "peers", current, cudaSuccess), s;
}

/* An offset in a window, the same on all ranks; window NULL = in no window. */
typedef struct gmm__peers_location {
    const gmm__peers_window *window;
    size_t offset;
} gmm__peers_location;
static gmm__peers_location gmm__peers_find_window(const gmm__peers *p, const void *memory, size_t bytes) {
    gmm__peers_location location = {NULL, 0};
    int i;
    for (i = 0; i < GMM__PEERS_MAX_WINDOWS && !location.window; i++) {
        const gmm__peers_window *w = &p->windows[i];
        const uintptr_t base = (uintptr_t)w->base[p->config.rank], address = (uintptr_t)memory;
        if (!w->bytes || address < base || address - base > w->bytes || bytes > w->bytes - (address - base)) continue;
        location.window = w;
        location.offset = address - base;
    }
    return location;
}

static gmm_status gmm__peers_no_window(gmm__peers *p, const char *call, const char *name, const void *memory,
                                       size_t bytes) {
    char text[96];
    (void)snprintf(text, sizeof text, "%s at %p, %zu bytes: lies in no window", name, memory, bytes);
    return gmm__comm_fail(&p->comm_base, call, text);
}
/* Adds a push to the offset of `recv` in the window of every rank: `bytes` of `send`, to this rank too, or part r of
   `send` to every other rank r (`parts`). */
static gmm_status gmm__peers_add_push(gmm__peers *p, const char *call, const void *send, void *recv, size_t bytes,
                                      int parts) {
    const gmm__peers_location target = gmm__peers_find_window(p, recv, bytes * (size_t)p->config.size);
    gmm__peers_push *q;
    if (!target.window) return gmm__peers_no_window(p, call, "recv", recv, bytes * (size_t)p->config.size);
    if (bytes == 0) return GMM_OK;
    if (p->push_count == GMM__PEERS_MAX_PUSHES) {
        const gmm_status s = gmm__peers_cuda(p, call, gmm__peers_flush(p));
        if (s) return s;
    }
    q = &p->pushes[p->push_count++];
    q->source = (const char *)send;
    q->window = target.window;
    q->offset = target.offset;
    q->bytes = bytes;
    q->parts = parts;
    return GMM_OK;
}
static gmm_status gmm__peers_push_all_gather(gmm__peers *p, const void *send, void *recv, size_t bytes, gmm_dtype dtype,
                                             gmm_stream stream) {
    (void)dtype, (void)stream;
    return gmm__peers_add_push(p, "all_gather", send, recv, bytes, 0);
}
static gmm_status gmm__peers_push_all_to_all(gmm__peers *p, const void *send, void *recv, size_t bytes, gmm_dtype dtype,
                                             gmm_stream stream) {
    (void)dtype, (void)stream;
    return gmm__peers_add_push(p, "all_to_all", send, recv, bytes, 1);
}
/* reduce_scatter: this rank reads its part from the window of every rank, and sums the parts. */
static gmm_status gmm__peers_sum_windows(gmm__peers *p, const void *send, void *recv, size_t count, gmm_dtype dtype,
                                         gmm_stream stream) {
    const size_t bytes = count * (size_t)(gmm_dtype_bits(dtype) / 8);
    const gmm__peers_location source = gmm__peers_find_window(p, send, bytes * (size_t)p->config.size);
    void *addends[GMM__PEERS_MAX_RANKS];
    gmm_accumulation d;
    gmm_mat x, y;
    int32_t i;
    if (!source.window)
        return gmm__peers_no_window(p, "reduce_scatter", "send", send, bytes * (size_t)p->config.size);
    if (count == 0) return GMM_OK;
    for (i = 0; i < p->config.size; i++)
        addends[i] = source.window->base[i] + source.offset + (size_t)p->config.rank * bytes;
    memset(&d, 0, sizeof d);
    d.count = p->config.size;
    /* rows of the largest power of two that divides count, at most 4096 */
    for (d.cols = 1; d.cols < 4096 && count % (size_t)(2 * d.cols) == 0; d.cols *= 2) { }
    d.rows = (int64_t)count / d.cols;
    d.scale = 1.0f;
    x = gmm_mat_table(dtype, addends, (uint32_t)GMM_MAT_TABLE_ON_HOST);
    y = gmm_mat_packed(dtype, recv);
    d.x = &x;
    d.y = &y;
    return gmm_accumulate(p->comm_base.ctx, &d, NULL, 0, stream)
               ? gmm__comm_fail(&p->comm_base, "reduce_scatter", gmm_last_error(p->comm_base.ctx)) : GMM_OK;
}
/* Raises each value to the largest of those that the peers have copied into the staging buffer; NaN wins. */
static __global__ void gmm_peers_max(float *values, const float *staging, int size, int rank, int count) {
    const int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    int r;
    float largest;
    if (i >= count) return;
    largest = values[i];
    for (r = 0; r < size; r++) {
        const float v = r == rank ? largest : staging[(size_t)r * GMM__PEERS_STAGED_VALUES + i];
        largest = v > largest || v != v ? v : largest;
    }
    values[i] = largest;
}
/* all_reduce_max: in rounds of GMM__PEERS_STAGED_VALUES values, each an operation of its own. */
static gmm_status gmm__peers_reduce_max(gmm__peers *p, const void *send, void *recv, size_t count, gmm_dtype dtype,
                                        gmm_stream stream) {
    const int32_t size = p->config.size, rank = p->config.rank;
    float *values = (float *)recv;
    cudaError_t e = cudaSuccess;
    gmm_status s = GMM_OK;
    size_t first;
    int32_t i;
    (void)send, (void)dtype;
    for (first = 0; first < count && !s; first += GMM__PEERS_STAGED_VALUES) {
        const int n = count - first < GMM__PEERS_STAGED_VALUES ? (int)(count - first) : (int)GMM__PEERS_STAGED_VALUES;
        if (first > 0) s = gmm__peers_begin_op(p, stream);
        for (i = 1; i < size && e == cudaSuccess; i++)
            e = cudaMemcpyAsync(gmm__peers_staging(p, (rank + i) % size, rank), values + first,
                                (size_t)n * sizeof *values, cudaMemcpyDeviceToDevice, stream);
        if (!s) s = gmm__peers_cuda(p, "all_reduce_max", e);
        if (!s) s = gmm__peers_end_op(p); /* the peers have copied their values */
        if (s) break;
        gmm_peers_max<<<(n + 127) / 128, 128, 0, stream>>>(values + first, gmm__peers_staging(p, rank, 0), size,
                                                           rank, n);
        s = gmm__peers_cuda(p, "all_reduce_max", cudaGetLastError());
    }
    return s;
}

static gmm_status gmm__peers_all_gather(void *self, const void *send, void *recv, size_t bytes, gmm_stream stream) {
    return gmm__peers_call(self, gmm__peers_push_all_gather, send, recv, bytes, GMM_NONE, stream);
}
static gmm_status gmm__peers_all_to_all(void *self, const void *send, void *recv, size_t bytes, gmm_stream stream) {
    return gmm__peers_call(self, gmm__peers_push_all_to_all, send, recv, bytes, GMM_NONE, stream);
}
static gmm_status gmm__peers_reduce_scatter(void *self, const void *send, void *recv, size_t count, gmm_dtype dtype,
                                            gmm_stream stream) {
    return gmm__peers_call(self, gmm__peers_sum_windows, send, recv, count, dtype, stream);
}
static gmm_status gmm__peers_all_reduce_max(void *self, float *values, size_t count, gmm_stream stream) {
    return count ? gmm__peers_call(self, gmm__peers_reduce_max, NULL, values, count, GMM_F32, stream) : GMM_OK;
}
static gmm_status gmm__peers_group_begin(void *self, const char *what) {
    gmm__peers *p = (gmm__peers *)self;
    p->comm_base.what = what;
    p->comm_base.open = 1;
    return gmm__comm_poll(&p->comm_base, NULL);
}
static gmm_status gmm__peers_group_end(void *self) {
    gmm__peers *p = (gmm__peers *)self;
    int current;
    gmm_status s = gmm__comm_poll(&p->comm_base, NULL);
    p->comm_base.open = 0;
    if (!s && gmm__cuda_enter(p->comm_base.ctx, &current) != cudaSuccess) s = GMM_E_CUDA;
    else if (!s) {
        s = gmm__peers_end_op(p);
        (void)gmm__cuda_leave(p->comm_base.ctx, "peers", current, cudaSuccess);
    }
    p->comm_base.what = NULL;
    return s;
}

/* Windows, failures, opening and closing of communicators of peer copies. */

/* Finds a peer that has given up, and for the message of a timeout the only peer whose READY flag is not set. That peer
   has not reached the operation; of two ranks it may also not have finished its copies, since READY flags are reset
   before these. It waits for its copy of the flags at most 0.1 s, since a stream of the device may wait for ever. */
static gmm_status gmm__peers_poll(void *self, gmm_error *error) {
    gmm__peers *p = (gmm__peers *)self;
    gmm_status s = gmm__comm_poll(&p->comm_base, error);
    const double begin = gmm__gtp_now();
    const int32_t size = p->config.size, rank = p->config.rank;
    int32_t i, missing = -1, aborted = -1, current, missing_count = 0;
    char text[96];
    cudaError_t e;
    if (s || size == 1 || gmm__cuda_enter(p->comm_base.ctx, &current) != cudaSuccess) return s;
    e = cudaMemcpyAsync(p->host_flags, gmm__peers_flag(p, rank, GMM__PEERS_READY, 0),
                        (size_t)(GMM__PEERS_FLAGS * size) * sizeof *p->host_flags, cudaMemcpyDeviceToHost,
                        p->control_stream);
    if (e == cudaSuccess)
        while ((e = cudaStreamQuery(p->control_stream)) == cudaErrorNotReady && gmm__gtp_now() - begin < 0.1) { }
    for (i = 0; i < size && e == cudaSuccess; i++) {
        if (i != rank && p->host_flags[GMM__PEERS_ABORTED * size + i]) aborted = i;
        if (i != rank && !p->host_flags[GMM__PEERS_READY * size + i]) missing = i, missing_count++;
    }
    if (aborted >= 0) {
        (void)snprintf(text, sizeof text, "rank %d of %d has given up: what came since is void", aborted, size);
        s = gmm__comm_fail(&p->comm_base, "peer copies", text);
        p->notified = 1;
        (void)gmm__comm_poll(&p->comm_base, error);
    } else if (missing_count == 1 && error && cudaEventQuery(p->last) == cudaErrorNotReady) {
        /* the message of a timeout contains this text; s stays GMM_OK */
        (void)snprintf(error->text, sizeof error->text, "rank %d of %d has not joined%s", missing, size,
                       size == 2 ? ", or not finished" : "");
    }
    (void)cudaGetLastError();
    return gmm__cuda_leave(p->comm_base.ctx, "peers", current, cudaSuccess), s;
}
/* Sets the flags again and again for `nanoseconds`, so that streams that wait for a peer, or begin to wait in that
   time, continue. */
static __global__ void gmm_peers_release(volatile uint32_t *flags, int count, unsigned long long nanoseconds) {
    const unsigned long long begin = gmm__ptx_globaltimer();
    do {
        if ((int)threadIdx.x < count) flags[threadIdx.x] = 1;
        __nanosleep(1000);
    } while (gmm__ptx_globaltimer() - begin < nanoseconds);
}
/* Ends the use of the communicator: tells all ranks, unless a peer has done so (`notified`), and releases the streams
   of this rank that wait for a peer. */
static void gmm__peers_give_up(void *self, const char *why) {
    gmm__peers *p = (gmm__peers *)self;
    CUstreamBatchMemOpParams op[GMM__PEERS_MAX_RANKS];
    const int32_t size = p->config.size, rank = p->config.rank;
    int32_t i;
    int current;
    if (p->comm_base.given_up) return;
    p->comm_base.given_up = 1;
    (void)gmm__comm_fail(&p->comm_base, "given up", why);
    if (gmm__cuda_enter(p->comm_base.ctx, &current) != cudaSuccess) return;
    memset(op, 0, sizeof op);
    for (i = 0; i < size; i++) { /* the rank's own flag is the last write of the batch */
        uint32_t *flag = gmm__peers_flag(p, (rank + 1 + i) % size, GMM__PEERS_ABORTED, rank);
        op[i].writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_32;
        op[i].writeValue.address = (CUdeviceptr)(uintptr_t)flag;
        op[i].writeValue.value = 1;
        op[i].writeValue.flags = CU_STREAM_WRITE_VALUE_DEFAULT;
    }
    if (!p->notified) (void)p->batch_mem_op(p->control_stream, (unsigned)size, op, 0);
    gmm_peers_release<<<1, GMM__PEERS_ABORTED * GMM__PEERS_MAX_RANKS, 0, p->control_stream>>>(
        gmm__peers_flag(p, rank, GMM__PEERS_READY, 0), GMM__PEERS_ABORTED * size, 3000000000ull);
    (void)cudaGetLastError();
    (void)gmm__cuda_leave(p->comm_base.ctx, "peers", current, cudaSuccess);
}

/* Closes the mappings of a window. */
static void gmm__peers_close_window(gmm__peers *p, gmm__peers_window *w) {
    int32_t i;
    for (i = 0; i < p->config.size; i++)
        if (w->opened[i]) (void)cudaIpcCloseMemHandle(w->opened[i]);
    memset(w, 0, sizeof *w);
}
/* Exchanges whether the call has failed on a rank; if so, it fails on all. `failure` is the reason on this rank, or
   NULL. */
static gmm_status gmm__peers_check_ranks(gmm__peers *p, const char *call, const char *failure) {
    char own = failure != NULL, all[GMM__PEERS_MAX_RANKS], text[64];
    int32_t i;
    if (p->config.exchange(p->config.user, &own, all, 1) != GMM_OK)
        return gmm__comm_fail(&p->comm_base, call, failure ? failure : "the exchange failed");
    if (failure) return gmm__comm_fail(&p->comm_base, call, failure);
    for (i = 0; i < p->config.size && !all[i]; i++) { }
    if (i == p->config.size) return GMM_OK;
    (void)snprintf(text, sizeof text, "it failed on rank %d of %d", i, p->config.size);
    return gmm__comm_fail(&p->comm_base, call, text);
}
/* Exchanges the addresses of a window and maps those of the peers. All ranks call it, also those that have failed
   before: they pass the reason as `failure`, and w may then be NULL. */
static gmm_status gmm__peers_open_window(gmm__peers *p, gmm__peers_window *w, void *base, size_t bytes,
                                         const char *failure) {
    static const char call[] = "window";
    gmm__peers_handle own, all[GMM__PEERS_MAX_RANKS];
    cudaError_t e = cudaSuccess;
    char text[96];
    gmm_status s;
    int32_t i;
    memset(&own, 0, sizeof own);
    own.base = (char *)base;
    own.bytes = bytes;
    own.device = p->comm_base.ctx->config.device;
    if (p->config.processes && !failure) {
        CUdeviceptr start = 0;
        e = cudaIpcGetMemHandle(&own.handle, base);
        if (e == cudaSuccess && p->address_range(&start, NULL, (CUdeviceptr)(uintptr_t)base) != CUDA_SUCCESS)
            e = cudaErrorInvalidValue;
        own.offset = (uintptr_t)base - (uintptr_t)start;
        if (e != cudaSuccess) failure = cudaGetErrorString(e);
    }
    s = gmm__peers_check_ranks(p, call, failure);
    if (!s && p->config.exchange(p->config.user, &own, all, sizeof own) != GMM_OK)
        s = gmm__comm_fail(&p->comm_base, call, "the exchange failed");
    if (s) return s;
    for (i = 0; i < p->config.size && !failure; i++) {
        if (all[i].bytes != bytes) {
            (void)snprintf(text, sizeof text, "%zu bytes, rank %d has %zu: must be of equal size", bytes, i,
                           all[i].bytes);
            failure = text;
        }
        else w->base[i] = all[i].base;
        if (failure || i == p->config.rank) continue;
        if (p->config.processes) {
            e = cudaIpcOpenMemHandle(&w->opened[i], all[i].handle, cudaIpcMemLazyEnablePeerAccess);
            if (e == cudaSuccess) w->base[i] = (char *)w->opened[i] + all[i].offset;
        } else if (all[i].device == own.device) {
            (void)snprintf(text, sizeof text, "ranks %d and %d of %d are threads on GPU %d: only processes may share "
                           "one", p->config.rank, i, p->config.size, own.device);
            failure = text;
        } else {
            e = cudaDeviceEnablePeerAccess(all[i].device, 0);
            if (e == cudaErrorPeerAccessAlreadyEnabled) e = cudaSuccess;
            (void)cudaGetLastError();
        }
        if (e != cudaSuccess) failure = cudaGetErrorString(e);
    }
    w->bytes = bytes;
    s = gmm__peers_check_ranks(p, call, failure);
    if (!s) return GMM_OK;
    gmm__peers_close_window(p, w);
    (void)cudaGetLastError();
    (void)gmm__peers_check_ranks(p, call, NULL); /* owners may free the memory once all ranks have closed it */
    return s;
}
static gmm_status gmm__peers_window_add(void *self, void *base, size_t bytes, void **window) {
    gmm__peers *p = (gmm__peers *)self;
    gmm__peers_window *w = NULL;
    const char *failure = gmm__comm_poll(&p->comm_base, NULL) != GMM_OK ? "the communicator has failed" : NULL;
    int i, current = 0;
    const int entered = gmm__cuda_enter(p->comm_base.ctx, &current) == cudaSuccess;
    gmm_status s;
    *window = NULL;
    for (i = 0; i < GMM__PEERS_MAX_WINDOWS && !w; i++)
        if (!p->windows[i].bytes) w = &p->windows[i];
    if (!failure && !entered) failure = gmm_last_error(p->comm_base.ctx);
    if (!failure && !w) failure = "there are 16 already";
    s = gmm__peers_open_window(p, w, base, bytes, failure);
    if (!s) *window = w;
    if (entered) (void)gmm__cuda_leave(p->comm_base.ctx, "window", current, cudaSuccess);
    return s;
}
static gmm_status gmm__peers_window_remove(void *self, void *window) {
    gmm__peers *p = (gmm__peers *)self;
    char own = 0, all[GMM__PEERS_MAX_RANKS];
    int current;
    const int entered = gmm__cuda_enter(p->comm_base.ctx, &current) == cudaSuccess;
    if (entered) gmm__peers_close_window(p, (gmm__peers_window *)window);
    if (entered) (void)gmm__cuda_leave(p->comm_base.ctx, "window", current, cudaSuccess);
    /* owners may free the memory once all ranks have closed it */
    if (p->config.exchange(p->config.user, &own, all, 1) != GMM_OK)
        return gmm__comm_fail(&p->comm_base, "window", "the exchange failed");
    return entered ? GMM_OK : GMM_E_CUDA;
}

static void gmm__peers_free(gmm__peers *p) {
    int current, i;
    if (gmm__cuda_enter(p->comm_base.ctx, &current) == cudaSuccess) {
        char *own = p->own.base[p->config.rank];
        for (i = 0; i < GMM__PEERS_MAX_WINDOWS; i++) gmm__peers_close_window(p, &p->windows[i]);
        gmm__peers_close_window(p, &p->own);
        if (own) (void)cudaFree(own);
        if (p->copy_stream) (void)cudaStreamDestroy(p->copy_stream);
        if (p->join) (void)cudaEventDestroy(p->join);
        if (p->control_stream) (void)cudaStreamDestroy(p->control_stream);
        if (p->host_flags) (void)cudaFreeHost(p->host_flags);
        if (p->fork) (void)cudaEventDestroy(p->fork);
        if (p->last) (void)cudaEventDestroy(p->last);
        (void)cudaGetLastError();
        (void)gmm__cuda_leave(p->comm_base.ctx, "peers", current, cudaSuccess);
    }
    gmm__comm_free(p->comm_base.ctx, p);
}

/* Reports a failure before the first exchange to the peers, which may already wait in it. */
static gmm_status gmm__peers_fail_open(const gmm_peers_config *c, gmm_status status) {
    char own = 1, all[GMM__PEERS_MAX_RANKS];
    if (c->exchange && c->size >= 1 && c->size <= GMM__PEERS_MAX_RANKS && c->rank >= 0 && c->rank < c->size)
        (void)c->exchange(c->user, &own, all, 1);
    return status;
}
GMMDEF gmm_status gmm_peers_open(const gmm_peers_config *config, gmm_comm *out, gmm_error *error) {
    static const char fn[] = "gmm_peers_open";
    enum cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
    gmm_peers_config c;
    gmm__peers *p;
    void *batch = NULL, *range = NULL, *own = NULL, *host_flags = NULL;
    size_t bytes;
    int current, low = 0, high = 0;
    cudaError_t e;
    gmm_status s;
    if (!out) return gmm__fail(error, GMM_E_NULL, "%s: out is NULL", fn);
    memset(out, 0, sizeof *out);
    if ((s = gmm__gtp_read(fn, "config", config, &c, sizeof c, error)) != GMM_OK) return s;
    if (!c.ctx || !c.exchange)
        return gmm__peers_fail_open(&c, gmm__fail(error, GMM_E_NULL, "%s: config->%s is NULL", fn,
                                                  c.ctx ? "exchange" : "ctx"));
    if (c.size < 1 || c.size > GMM__PEERS_MAX_RANKS || c.rank < 0 || c.rank >= c.size || c.processes < 0 ||
        c.processes > 1 || c.ctx->config.space != GMM_SPACE_CUDA)
        return gmm__peers_fail_open(&c, gmm__fail(
            error, GMM_E_ARG, "%s: rank %d of %d, processes %d, ctx on %s: must be a rank of 1 to %d, 0 or 1, and on a "
            "GPU", fn, c.rank, c.size, c.processes,
            c.ctx->config.space == GMM_SPACE_CUDA ? "a GPU" : "the CPU", (int)GMM__PEERS_MAX_RANKS));
    p = (gmm__peers *)gmm__comm_alloc(c.ctx, sizeof *p);
    if (!p) return gmm__peers_fail_open(&c, gmm__fail(error, GMM_E_MEMORY, "%s: no memory", fn));
    p->comm_base.ctx = c.ctx;
    p->config = c;
    e = gmm__cuda_enter(c.ctx, &current);
    if (e != cudaSuccess) {
        gmm__comm_free(c.ctx, p);
        return gmm__peers_fail_open(&c, gmm__fail(error, GMM_E_CUDA, "%s: %s", fn, cudaGetErrorString(e)));
    }
    e = cudaGetDriverEntryPointByVersion("cuStreamBatchMemOp", &batch, 11070, cudaEnableDefault, &found);
    p->batch_mem_op = (PFN_cuStreamBatchMemOp_v11070)batch;
    if (e == cudaSuccess && (found != cudaDriverEntryPointSuccess || !batch)) e = cudaErrorNotSupported;
    if (e == cudaSuccess)
        e = cudaGetDriverEntryPointByVersion("cuMemGetAddressRange", &range, 3020, cudaEnableDefault, &found);
    p->address_range = (PFN_cuMemGetAddressRange_v3020)range;
    if (e == cudaSuccess && (found != cudaDriverEntryPointSuccess || !range)) e = cudaErrorNotSupported;
    if (e == cudaSuccess) e = cudaStreamCreateWithFlags(&p->copy_stream, cudaStreamNonBlocking);
    if (e == cudaSuccess) e = cudaDeviceGetStreamPriorityRange(&low, &high);
    if (e == cudaSuccess) e = cudaStreamCreateWithPriority(&p->control_stream, cudaStreamNonBlocking, (low + high) / 2);
    if (e == cudaSuccess) e = cudaEventCreateWithFlags(&p->fork, cudaEventDisableTiming);
    if (e == cudaSuccess) e = cudaEventCreateWithFlags(&p->join, cudaEventDisableTiming);
    if (e == cudaSuccess) e = cudaEventCreateWithFlags(&p->last, cudaEventDisableTiming);
    bytes = gmm__peers_own_bytes(c.size);
    if (bytes < GMM__PEERS_MIN_BYTES) bytes = GMM__PEERS_MIN_BYTES;
    if (e == cudaSuccess)
        e = cudaMallocHost(&host_flags, GMM__PEERS_FLAGS * GMM__PEERS_MAX_RANKS * sizeof *p->host_flags);
    if (e == cudaSuccess) e = cudaMalloc(&own, bytes);
    if (e == cudaSuccess) e = cudaMemset(own, 0, bytes);
    p->host_flags = (uint32_t *)host_flags;
    if (e == cudaSuccess) {
        /* Launches both kernels, so that they are loaded here: later, loading may wait for the device while a stream of
           it waits for a peer. */
        gmm_peers_release<<<1, GMM__PEERS_ABORTED * GMM__PEERS_MAX_RANKS, 0, p->control_stream>>>((uint32_t *)own, 0,
                                                                                                  0);
        gmm_peers_max<<<1, 1, 0, p->control_stream>>>((float *)own, (const float *)own, 0, 0, 0);
        e = cudaGetLastError();
    }
    if (e == cudaSuccess) e = cudaDeviceSynchronize(); /* the flags are 0 before a peer writes them */
    s = gmm__peers_open_window(p, &p->own, own, bytes, e != cudaSuccess ? cudaGetErrorString(e) : NULL);
    (void)gmm__cuda_leave(c.ctx, fn, current, cudaSuccess);
    if (e != cudaSuccess || s) {
        s = e != cudaSuccess ? gmm__fail(error, GMM_E_CUDA, "%s: %s", fn, cudaGetErrorString(e))
                             : gmm__fail(error, s, "%s: %.400s", fn, p->comm_base.error.text);
        p->own.base[c.rank] = (char *)own;
        gmm__peers_free(p);
        return s;
    }
    out->rank = c.rank;
    out->size = c.size;
    out->exchanges = 1;
    out->self = p;
    out->group_begin = gmm__peers_group_begin;
    out->group_end = gmm__peers_group_end;
    out->all_gather = gmm__peers_all_gather;
    out->reduce_scatter = gmm__peers_reduce_scatter;
    out->all_to_all = gmm__peers_all_to_all;
    out->all_reduce_max = gmm__peers_all_reduce_max;
    out->window_add = gmm__peers_window_add;
    out->window_remove = gmm__peers_window_remove;
    out->poll = gmm__peers_poll;
    out->give_up = gmm__peers_give_up;
    return GMM_OK;
}
GMMDEF void gmm_peers_close(gmm_comm *comm) {
    if (!comm || !comm->self) return;
    gmm__peers_free((gmm__peers *)comm->self);
    memset(comm, 0, sizeof *comm);
}

#else /* __CUDACC__ */

GMMDEF gmm_status gmm_peers_open(const gmm_peers_config *config, gmm_comm *out, gmm_error *error) {
    (void)config;
    if (out) memset(out, 0, sizeof *out);
    return gmm__fail(error, GMM_E_BUILD, "gmm_peers_open: this build holds the CPU engine alone: compile with nvcc");
}
GMMDEF void gmm_peers_close(gmm_comm *comm) { (void)comm; }

#endif /* __CUDACC__ */

/* Structures of the GTP runtime object.

   A bundle is gathered into a slot of its domain's gather block. Slots are of a kind: rowwise copies, columnwise
   copies, or rowwise copies for recomputation; bundles that no chain uses at the same time share a slot. The stage
   is a buffer behind the slots, for gathers whose bytes must be rearranged or transposed before they are in the
   slot. Gradients of a bundle are computed in a gradient slot of the reduce block. Slots, stages and gradient slots
   of bundles in captured chains are separate from those of the others, since replays of a graph use fixed addresses. */

/* ....................................................................................... Runtime: structures ... */

/* An event that streams wait for, inside and outside of captures. A record in a capture records two CUDA events:
   `captured_event` for waits in the same graph, and by an external node `external_event` for all other waits. A record
   outside of captures records `external_event` alone. */
typedef struct gmm__gtp_event {
    gmm_event captured_event, external_event;
    int32_t graph;              /* graph of the last record, counted from 1; 0 = outside of captures */
    int32_t recorded;           /* 1 after the first record */
    int32_t waited;             /* 1: stream `waiter` has waited since the last record, and need not wait again */
    gmm_stream recorder, waiter;
} gmm__gtp_event;

/* A collective or a replay that gmm_gtp_poll monitors. The collectives of a stream are stored in a ring. They run in
   order, so that only the oldest one that is not done can hang. A collective that finds the ring full is not
   monitored. */
enum { GMM__MAX_WATCHES = 256, GMM__MAX_EXCHANGE_RANKS = 256 };
typedef struct gmm__watch {
    gmm_event begin;
    gmm_event end;              /* NULL = nothing to monitor */
    int32_t begun;              /* 1: a poll has found that it has begun */
    double begin_time;          /* time of that poll in seconds, from which the timeout counts */
    const gmm_comm *comm;       /* NULL = a graph */
    const char *what, *name;    /* for messages: the collective, the bundle; of a graph `what` alone */
    int32_t replayed;           /* graphs: 1 = gmm_gtp_post_replay was called, */
    gmm_stream stream;          /* last with this stream */
} gmm__watch;

/* Layout of one buffer that is gathered from the shards of all ranks. Where the gathered buffer is the shards' bytes
   one after the other in the order of ranks, they are received in place. Otherwise they are received in the stage
   (`staged`), and one 2D copy per rank places their columns side by side. */
typedef struct gmm__gather_layout {
    size_t send_bytes;           /* bytes of a rank's shard; 0 = not sent */
    size_t gathered_bytes;
    size_t offset;               /* in the slot */
    size_t stage_offset;         /* in the stage: of a staged buffer, or of a rowwise copy that will be transposed */
    size_t group_bytes;          /* bytes between the weights of a bundle that an operation expects */
    int32_t staged, reserved;
    size_t width, height, src_pitch, dst_pitch; /* of the 2D copy of a rank */
    size_t valid_width;          /* bytes of a destination row that ranks fill; zeros follow */
} gmm__gather_layout;

enum { GMM__SLOT_ROWWISE, GMM__SLOT_COLUMNWISE, GMM__SLOT_RECOMPUTE, GMM__SLOT_KINDS }; /* RECOMPUTE: rowwise copies */
enum { GMM__GTP_DATA, GMM__GTP_SCALE };

typedef struct gmm__gtp_weight {
    gmm_gtp_weight desc;
    gmm_shard shard;
    gmm_shard_plan plan;
    gmm_format format;           /* dtype NONE = none */
    gmm__gather_layout layout[2][2]; /* [direction][DATA, SCALE] */
    int64_t ld[2];               /* of a gathered copy; 0 = the default */
    int32_t bundle;              /* -1 = none yet */
    int32_t transposed;          /* 1: the columnwise copy is a transpose of the rowwise one */
    size_t grad_offset;          /* in the gradient buffer */
    gmm_mat columnwise;          /* the target of mat.columnwise in backward parts that begin with this weight */
} gmm__gtp_weight;

/* A buffer for the gathered weights of a bundle. */
typedef struct gmm__gtp_slot {
    char *base;
    size_t offset, bytes;        /* in the domain's gather block */
    int32_t domain, kind, captured;
    int32_t bundle;              /* whose weights the slot contains; -1 = none */
    int32_t graph;               /* the graph that gathered them, counted from 1; 0 = outside of captures */
    int32_t pending;             /* not 0: prefetched and not acquired yet; 1 = gathered, 2 = was resident already */
    uint32_t acquired;           /* a bit per pass: acquired, and not released yet */
    int32_t read;                /* 1: read since it was gathered, */
    gmm_stream reader;           /* last on this stream */
    int64_t version;             /* of the bundle's weights in the slot */
    gmm__gtp_event ready;        /* the gather into the slot is done */
    gmm__gtp_event last_use;     /* all reads up to the last release are done */
} gmm__gtp_slot;

/* A buffer for the gradients of a bundle. */
typedef struct gmm__wgrad_slot {
    char *base;
    size_t offset, bytes;        /* in the domain's reduce block */
    int32_t domain, captured;
    int32_t writer;              /* bundle between gmm_gtp_wgrad and gmm_gtp_submit; -1 = none */
    gmm__gtp_event last_use;
} gmm__wgrad_slot;

typedef struct gmm__gtp_bundle {
    const char *name;
    int32_t domain, first, count;  /* members[first .. first + count) */
    int32_t trainable;             /* number of weights with a main_grad */
    int32_t captured;              /* 1: its chains are captured */
    int32_t publish_requested;     /* 1: hooks.need was called for the next forward */
    int32_t slot[GMM_GTP_PASSES];  /* -1 = none: the shards are read in place */
    int32_t chain[GMM_GTP_PASSES], position[GMM_GTP_PASSES]; /* -1 = none */
    int32_t wgrad_slot;            /* -1 = frozen */
    uint32_t acquired;             /* a bit per pass: acquired, and not released yet */
    int64_t version;               /* number of publications */
    gmm_mat columnwise;            /* the target of mat.columnwise in backward views */
    size_t amax_offset[2];         /* NV16: amaxes in a slot, by direction */
    size_t slot_bytes[GMM__SLOT_KINDS], grad_bytes;
    size_t stage_bytes[2];         /* of the stage, by direction */
    size_t stage_offset[GMM_GTP_PASSES]; /* of a gather, in the stage: bundles gathered together use parts of it */
    gmm__gtp_event published;      /* the shards have been written */
    gmm__gtp_event done;           /* the gradients have been added to main_grad */
    gmm__gtp_event in_place;       /* all reads of the shards themselves are done, */
    gmm_stream reader;             /* the last of them on this stream */
} gmm__gtp_bundle;

typedef struct gmm__gtp_chain {
    gmm_gtp_pass pass;
    int32_t first, count;          /* chain_bundles[first .. first + count) */
    int32_t prefetch, held, captured, next, together;
} gmm__gtp_chain;

/* Arrays of two are indexed by GMM__GTP_GATHER and GMM__GTP_REDUCE, those of the stage (stage_offset, stage_bytes,
   staged) by whether the bundle is in captured chains. */
typedef struct gmm__gtp_domain {
    gmm_gtp_domain desc;
    gmm_comm gather, reduce;     /* with one rank no function of theirs is called */
    int32_t size, rank, bound;
    int32_t joined_graph[2];     /* the last capture that the stream joined, counted from 1 */
    int32_t used[2];             /* 1: the stream was given work outside of captures since the last replay that uses it,
                                    so that fences and replays have to wait for it */
    size_t gather_bytes, reduce_bytes, recv_offset, workspace_offset, workspace_bytes;
    size_t stage_offset[2], stage_bytes[2];
    gmm__gtp_event staged[2];    /* the last gather that used the stage is done; the next one waits for that */
    size_t amax_offset, cast_offset, cast_bytes; /* gmm_gtp_quantize: amaxes of the domain's weights, workspace */
    gmm__gtp_event cast;         /* the last gmm_gtp_quantize has used these */
    char *gather_base, *reduce_base;
    void *window[2];
    gmm_event fork[2], join[2];
    gmm__watch watch[2][GMM__MAX_WATCHES];
    gmm_event watch_end[2][GMM__MAX_WATCHES];
    uint32_t oldest[2], next[2]; /* of the rings: counters that are taken modulo the ring's size */
} gmm__gtp_domain;

enum { GMM__GTP_GATHER, GMM__GTP_REDUCE };
static gmm_stream gmm__gtp_stream(const gmm__gtp_domain *d, int role) {
    return role == GMM__GTP_GATHER ? d->desc.gather_stream : d->desc.reduce_stream;
}

/* How a graph uses a bundle: it needs newly published shards (hooks.need), reads shards, reduces gradients. */
enum { GMM__GRAPH_NEEDS = 1, GMM__GRAPH_READS = 2, GMM__GRAPH_REDUCES = 4 };

struct gmm_gtp {
    gmm_gtp_config config;
    gmm_runtime runtime;
    gmm_error error;
    gmm_status failed;           /* the failure that ended the object's use; GMM_OK = none */
    const char *collective;      /* the one being called, by rank caller[0] of caller[1]; NULL = none */
    const gmm_comm *further;     /* gmm_gtp_quantization.also while it is being called; else NULL */
    int32_t caller[2];
    int32_t sealed, active, finished, in_callback, dry_run; /* active: the memory of all domains is bound */
    int32_t domain_count, weight_count, bundle_count, chain_count, graph_count, member_count, chain_bundle_count;
    int32_t slot_count, wgrad_slot_count;
    int32_t graph;               /* the graph being captured, counted from 1; 0 = none */
    gmm_stream graph_stream;     /* the stream on which that capture began */
    gmm_event graph_begin;       /* recorded there, for streams that join the capture */
    gmm__gtp_domain *domains;
    gmm__gtp_weight *weights;
    gmm__gtp_bundle *bundles;
    gmm__gtp_chain *chains;
    gmm__gtp_slot *slots;        /* [3 bundles] */
    gmm__wgrad_slot *wgrad_slots; /* [bundles] */
    gmm__watch *graph_watch;     /* [graphs] */
    gmm_event *graph_end;        /* [graphs] */
    int32_t *members, *chain_bundles; /* [weights], [3 bundles] */
    /* addresses that views refer to, [weights] in the order of members: of data, scales and gradients */
    void **table[GMM_GTP_PASSES], **scales[GMM_GTP_PASSES], **grads;
    unsigned char *graph_usage;  /* [graphs][bundles] */
    gmm_gtp_statistics stats;
};

/* Creation of the runtime object, and declarations of domains, weights, bundles and chains. */

/* ........................................................................................ Runtime: declarations ... */

/* Places the arrays of the object behind it; sets their addresses if base is not NULL. Returns the bytes of all. */
static size_t gmm__gtp_place_arrays(gmm_gtp *g, char *base, const gmm_gtp_config *c) {
    size_t at = (sizeof *g + 15) / 16 * 16;
    const size_t domains = (size_t)c->domains, weights = (size_t)c->weights, bundles = (size_t)c->bundles;
    const size_t graphs = (size_t)c->graphs;
    int i;
#define GMM__ARRAY(field, type, count) do { \
        if (base) g->field = (type *)(void *)(base + at); \
        at += ((count) * sizeof(type) + 15) / 16 * 16; } while (0)
    GMM__ARRAY(domains, gmm__gtp_domain, domains);
    GMM__ARRAY(weights, gmm__gtp_weight, weights);
    GMM__ARRAY(bundles, gmm__gtp_bundle, bundles);
    GMM__ARRAY(chains, gmm__gtp_chain, (size_t)c->chains);
    GMM__ARRAY(slots, gmm__gtp_slot, 3 * bundles);
    GMM__ARRAY(wgrad_slots, gmm__wgrad_slot, bundles);
    GMM__ARRAY(graph_watch, gmm__watch, graphs);
    GMM__ARRAY(graph_end, gmm_event, graphs);
    GMM__ARRAY(members, int32_t, weights);
    GMM__ARRAY(chain_bundles, int32_t, 3 * bundles);
    for (i = 0; i < GMM_GTP_PASSES; i++) {
        GMM__ARRAY(table[i], void *, weights);
        GMM__ARRAY(scales[i], void *, weights);
    }
    GMM__ARRAY(grads, void *, weights);
    GMM__ARRAY(graph_usage, unsigned char, graphs * bundles);
#undef GMM__ARRAY
    return at;
}

static gmm_status gmm__gtp_read_config(const char *fn, const gmm_gtp_config *config, gmm_gtp_config *c,
                                       gmm_error *error) {
    const int32_t limit = 1 << 20;
    gmm_status s = gmm__gtp_read(fn, "config", config, c, sizeof *c, error);
    if (s) return s;
    if (c->domains == 0) c->domains = 1;
    if (c->timeout_ms == 0) c->timeout_ms = 10000;
    if (c->domains < 0 || c->weights < 0 || c->bundles < 0 || c->chains < 0 || c->graphs < 0 || c->domains > limit ||
        c->weights > limit || c->bundles > limit || c->chains > limit || c->graphs > 4096)
        return gmm__fail(error, GMM_E_ARG, "%s: %d domains, %d weights, %d bundles, %d chains, %d graphs: must be 0 to "
                         "%d, at most 4096 graphs", fn, c->domains, c->weights, c->bundles,
                         c->chains, c->graphs, (int)limit);
    if (c->timeout_ms < 0)
        return gmm__fail(error, GMM_E_ARG, "%s: timeout_ms is %d: must be >= 0", fn, c->timeout_ms);
    return GMM_OK;
}

GMMDEF gmm_status gmm_gtp_query(const gmm_gtp_config *config, size_t *bytes, gmm_error *error) {
    gmm_gtp_config c;
    gmm_status s;
    if (!bytes) return gmm__fail(error, GMM_E_NULL, "gmm_gtp_query: bytes is NULL");
    s = gmm__gtp_read_config("gmm_gtp_query", config, &c, error);
    if (!s) *bytes = gmm__gtp_place_arrays(NULL, NULL, &c);
    return s;
}

/* Whether a runtime has the functions that GTP calls; it calls none that create streams or make the host wait. */
static int gmm__gtp_runtime_complete(const gmm_runtime *r) {
    return r->stream_wait && r->event_create && r->event_destroy && r->event_record && r->event_query && r->copy &&
           r->copy2d && r->fill && r->fill2d && r->is_capturing && r->run;
}

GMMDEF gmm_status gmm_gtp_init(void *memory, size_t bytes, const gmm_gtp_config *config, gmm_gtp **out,
                               gmm_error *error) {
    static const char fn[] = "gmm_gtp_init";
    gmm_gtp_config c;
    gmm_gtp *g = (gmm_gtp *)memory;
    gmm_status s;
    size_t need;
    if (!out) return gmm__fail(error, GMM_E_NULL, "%s: out is NULL", fn);
    *out = NULL;
    if ((s = gmm__gtp_read_config(fn, config, &c, error)) != GMM_OK) return s;
    if (!memory || !c.ctx) return gmm__fail(error, GMM_E_NULL, "%s: %s is NULL", fn, memory ? "config->ctx" : "memory");
    if ((uintptr_t)memory % 16 != 0)
        return gmm__fail(error, GMM_E_ALIGN, "%s: memory at %p must be aligned to 16 bytes", fn, memory);
    need = gmm__gtp_place_arrays(NULL, NULL, &c);
    if (bytes < need)
        return gmm__fail(error, GMM_E_WORKSPACE, "%s: %llu bytes of memory: gmm_gtp_query asks for %llu", fn,
                         (unsigned long long)bytes, (unsigned long long)need);
    memset(memory, 0, need);
    g->config = c;
    (void)gmm__gtp_place_arrays(g, (char *)memory, &c);
    if (c.runtime) {
        s = gmm__gtp_read(fn, "config->runtime", c.runtime, &g->runtime, sizeof g->runtime, error);
        if (s) return s;
    } else if ((s = gmm_runtime_of(c.ctx, &g->runtime)) != GMM_OK) {
        return gmm__fail(error, s, "%s: %.400s", fn, gmm_last_error(c.ctx));
    }
    if (g->runtime.space != c.ctx->config.space)
        return gmm__fail(error, GMM_E_CONFIG, "%s: config->runtime is for %s memory, ctx for %s: must be one memory "
                         "space", fn, g->runtime.space == GMM_SPACE_CPU ? "CPU" : "GPU",
                         c.ctx->config.space == GMM_SPACE_CPU ? "CPU" : "GPU");
    if (!gmm__gtp_runtime_complete(&g->runtime))
        return gmm__fail(error, GMM_E_NULL, "%s: config->runtime lacks a function: all but stream_create, "
                         "stream_destroy, stream_sync and event_sync are needed", fn);
    *out = g;
    return GMM_OK;
}

GMMDEF const char *gmm_gtp_last_error(const gmm_gtp *gtp) { return gtp ? gtp->error.text : ""; }

/* Checks that the object accepts a further declaration: it is not sealed, and the configured number is not reached. */
static gmm_status gmm__gtp_check_declaration(gmm_gtp *g, const char *fn, const char *what, int32_t count,
                                             int32_t capacity, const void *id) {
    if (!g) return GMM_E_NULL;
    if (g->failed) return g->failed;
    if (!id) return gmm__fail(&g->error, GMM_E_NULL, "%s: id is NULL", fn);
    if (g->sealed) return gmm__fail(&g->error, GMM_E_STATE, "%s: the object is sealed", fn);
    if (count >= capacity)
        return gmm__fail(&g->error, GMM_E_WORKSPACE, "%s: config->%s is %d: no room for more", fn, what, capacity);
    return GMM_OK;
}

/* Whether a communicator has all functions that are required. */
static int gmm__gtp_comm_complete(const gmm_comm *c) {
    return c->group_begin && c->group_end && c->all_gather && c->reduce_scatter && c->all_to_all && c->all_reduce_max &&
           !c->window_add == !c->window_remove && c->poll && c->give_up;
}

/* Whether a communicator of the domain would be called on several streams, which nothing orders: by its two roles, or
   by it and a domain before it. */
static int gmm__gtp_several_streams(const gmm_gtp *g, const gmm__gtp_domain *d) {
    const gmm__gtp_domain *x;
    int k;
    for (x = g->domains; x <= d && d->size > 1; x++)
        for (k = 0; k < 4; k++) {
            const gmm_comm *c = k / 2 ? &x->reduce : &x->gather, *own = k % 2 ? &d->reduce : &d->gather;
            if (x->size > 1 && c->self == own->self && gmm__gtp_stream(x, k / 2) != gmm__gtp_stream(d, k % 2)) return 1;
        }
    return 0;
}

GMMDEF gmm_status gmm_gtp_add_domain(gmm_gtp *gtp, const gmm_gtp_domain *domain, int32_t *id) {
    static const char fn[] = "gmm_gtp_add_domain";
    gmm__gtp_domain *d;
    gmm_gtp_domain desc;
    gmm_status s = gmm__gtp_check_declaration(gtp, fn, "domains", gtp ? gtp->domain_count : 0,
                                              gtp ? gtp->config.domains : 0, id);
    if (!s) s = gmm__gtp_read(fn, "domain", domain, &desc, sizeof desc, &gtp->error);
    if (s) return s;
    if (desc.wire == GMM_NONE) desc.wire = GMM_F32;
    if (desc.wire != GMM_F32 && desc.wire != GMM_BF16)
        return gmm__fail(&gtp->error, GMM_E_DTYPE, "%s: wire is %s (%d): must be f32, bf16 or none", fn,
                         gmm_dtype_name(desc.wire), (int)desc.wire);
    if (desc.wgrad_slots == 0) desc.wgrad_slots = 2;
    if (desc.wgrad_slots < 0 || desc.reduction < GMM_GTP_REDUCE_AUTO || desc.reduction > GMM_GTP_REDUCE_EXCHANGE ||
        desc.synchronous < 0 || desc.synchronous > 1 || desc.reserved)
        return gmm__fail(&gtp->error, GMM_E_ARG, "%s: wgrad_slots %d, reduction %d, synchronous %d, reserved %d: must "
                         "be >= 0, a gmm_gtp_reduction, 0 or 1, and 0", fn, desc.wgrad_slots, (int)desc.reduction,
                         desc.synchronous, desc.reserved);
    d = &gtp->domains[gtp->domain_count];
    memset(d, 0, sizeof *d);
    d->size = 1;
    if (desc.gather) {
        s = gmm__gtp_read(fn, "domain->gather", desc.gather, &d->gather, sizeof d->gather, &gtp->error);
        if (!s) s = gmm__gtp_read(fn, "domain->reduce", desc.reduce ? desc.reduce : desc.gather, &d->reduce,
                                  sizeof d->reduce, &gtp->error);
        if (s) return s;
        d->size = d->gather.size;
        d->rank = d->gather.rank;
        if (d->size < 1 || d->rank < 0 || d->rank >= d->size || d->reduce.size != d->size || d->reduce.rank != d->rank)
            return gmm__fail(&gtp->error, GMM_E_CONFIG, "%s: gather is rank %d of %d, reduce rank %d of %d: must be "
                             "the same rank of the same group", fn, d->rank, d->size, d->reduce.rank,
                             d->reduce.size);
        if (!gmm__gtp_comm_complete(&d->gather) || !gmm__gtp_comm_complete(&d->reduce))
            return gmm__fail(&gtp->error, GMM_E_NULL, "%s: domain->%s lacks a function; all but window_add and "
                             "window_remove are needed", fn, gmm__gtp_comm_complete(&d->gather) ? "reduce" : "gather");
        if (d->gather.processors < 0 || d->reduce.processors < 0)
            return gmm__fail(&gtp->error, GMM_E_ARG, "%s: %s.processors %d must be >= 0", fn,
                             d->gather.processors < 0 ? "gather" : "reduce",
                             d->gather.processors < 0 ? d->gather.processors : d->reduce.processors);
    } else if (desc.reduce)
        return gmm__fail(&gtp->error, GMM_E_NULL, "%s: domain->gather is NULL, reduce is not", fn);
    if (desc.reduction == GMM_GTP_REDUCE_AUTO)
        desc.reduction = d->size > GMM__MAX_EXCHANGE_RANKS ||
                                 (!d->reduce.exchanges && (desc.wire == GMM_F32 || d->size <= 2))
                             ? GMM_GTP_REDUCE_SCATTER
                             : GMM_GTP_REDUCE_EXCHANGE;
    if (desc.reduction == GMM_GTP_REDUCE_EXCHANGE && d->size > GMM__MAX_EXCHANGE_RANKS)
        return gmm__fail(&gtp->error, GMM_E_CONFIG, "%s: reduction by exchange among %d ranks: must be at most %d", fn,
                         d->size, (int)GMM__MAX_EXCHANGE_RANKS);
    if (d->size > 1 && !desc.reduce && !desc.reduce_stream) desc.reduce_stream = desc.gather_stream;
    d->desc = desc;
    if (gmm__gtp_several_streams(gtp, d))
        return gmm__fail(&gtp->error, GMM_E_CONFIG, "%s: a communicator would be called on several streams: give "
                         "gather_stream and reduce_stream one stream, or communicators of their own", fn);
    *id = gtp->domain_count++;
    return GMM_OK;
}

/* The gather layouts of the data and scales of one direction. Buffers that 2D copies assemble have the pitch that
   operations expect: scales that of the unpadded rows, elements that of the padded rows, which views give as ld.
   Buffers that are received in place have their padding at their end. `part` is the layout of a shard, `whole` that
   of the padded weight, `logical` that of the unpadded one. */
static gmm_status gmm__gtp_gather_layouts(const gmm_shard *s, const gmm_shard_plan *p, int direction,
                                          gmm__gtp_weight *w, gmm_error *error) {
    gmm__gather_layout *data = &w->layout[direction][GMM__GTP_DATA], *scale = &w->layout[direction][GMM__GTP_SCALE];
    gmm_layout part = GMM_ZERO, whole = GMM_ZERO, logical = GMM_ZERO;
    const size_t bits = (size_t)gmm_dtype_bits(s->dtype);
    const int sent = p->shard_data_bytes[direction] > 0;
    gmm_status status = gmm_layout_of(s->dtype, s->scaling, GMM_SCALES_COMPACT, (gmm_direction)direction, p->shard_rows,
                                      p->local_cols, &part, error);
    if (!status)
        status = gmm_layout_of(s->dtype, s->scaling, GMM_SCALES_COMPACT, (gmm_direction)direction, p->padded_rows,
                               p->local_cols, &whole, error);
    if (!status)
        status = gmm_layout_of(s->dtype, s->scaling, GMM_SCALES_COMPACT, (gmm_direction)direction, p->local_rows,
                               p->local_cols, &logical, error);
    if (status) return status;
    memset(data, 0, sizeof *data);
    memset(scale, 0, sizeof *scale);
    data->gathered_bytes = (size_t)whole.data_bytes;
    scale->gathered_bytes = (size_t)whole.scale_bytes;
    scale->group_bytes = (size_t)logical.scale_bytes;
    if (part.transposed) w->ld[direction] = whole.data_cols;
    w->transposed |= !sent;
    if (!sent) { /* transposed from the rowwise copy */
        scale->gathered_bytes = scale->group_bytes;
        return GMM_OK;
    }
    data->send_bytes = (size_t)part.data_bytes;
    if (part.transposed) {
        data->staged = 1;
        data->width = data->src_pitch = (size_t)part.data_cols * bits / 8;
        data->valid_width = data->dst_pitch = (size_t)whole.data_cols * bits / 8;
        data->height = (size_t)part.data_rows;
    }
    if (s->scaling != GMM_SCALING_NONE && s->scaling != GMM_SCALING_TENSOR) {
        const size_t bytes = (size_t)gmm_dtype_bits(part.scale_dtype) / 8;
        int64_t block = 1;
        const int along_rows = gmm__gtp_scale_axis(s->scaling, direction, &block);
        scale->send_bytes = (size_t)gmm__gtp_sent_scale_bytes(s->scaling, direction, p->shard_rows, &part);
        if (!along_rows) {
            scale->gathered_bytes = scale->group_bytes;
            scale->staged = 1;
            scale->width = (size_t)(p->shard_rows / block) * bytes;
            scale->valid_width = (size_t)((p->local_rows + block - 1) / block) * bytes;
            scale->src_pitch = (size_t)part.scale_cols * bytes;
            scale->dst_pitch = (size_t)logical.scale_cols * bytes;
            scale->height = (size_t)part.scale_rows;
        }
    }
    return GMM_OK;
}

/* Copies and checks the format in which gmm_gtp_quantize writes a weight. */
static gmm_status gmm__gtp_read_format(const char *fn, gmm__gtp_weight *w, gmm_error *error) {
    gmm_format *f = &w->format;
    gmm_error format_error = GMM_ZERO;
    gmm_status s;
    if (!w->desc.format) return GMM_OK;
    s = gmm__gtp_read(fn, "weight->format", w->desc.format, f, sizeof *f, error);
    w->desc.format = NULL; /* w->format is used from here on */
    if (s) return s;
    f->struct_size = 0;
    s = gmm_format_validate(f, &format_error);
    if (s) return gmm__fail(error, s, "%s: '%s': format: %.300s", fn, w->desc.name, format_error.text);
    if (w->shard.scaling == GMM_SCALING_NONE && f->dtype == GMM_NONE) return GMM_OK;
    if (f->dtype != w->shard.dtype || f->scaling != w->shard.scaling)
        return gmm__fail(error, GMM_E_DTYPE, "%s: '%s': format is %s scaled %s, the shard %s scaled %s", fn,
                         w->desc.name, gmm_dtype_name(f->dtype), gmm_scaling_name(f->scaling),
                         gmm_dtype_name(w->shard.dtype), gmm_scaling_name(w->shard.scaling));
    if (f->order != GMM_SCALES_COMPACT || f->stochastic || f->hadamard || f->row_amax)
        return gmm__fail(error, GMM_E_CONFIG, "%s: '%s': format has order %d, stochastic %d, hadamard 0x%x, row_amax "
                         "%d: shards take none of them", fn, w->desc.name, (int)f->order, f->stochastic,
                         (unsigned)f->hadamard, f->row_amax);
    if (f->scaling == GMM_SCALING_NV16 && !w->desc.amax)
        return gmm__fail(error, GMM_E_NULL, "%s: '%s': amax is NULL, which nv16 is made with", fn, w->desc.name);
    return GMM_OK;
}

GMMDEF gmm_status gmm_gtp_add_weight(gmm_gtp *gtp, const gmm_gtp_weight *weight, int32_t *id) {
    static const char fn[] = "gmm_gtp_add_weight";
    gmm__gtp_weight w;
    int d;
    gmm_status s = gmm__gtp_check_declaration(gtp, fn, "weights", gtp ? gtp->weight_count : 0,
                                              gtp ? gtp->config.weights : 0, id);
    memset(&w, 0, sizeof w);
    if (!s) s = gmm__gtp_read(fn, "weight", weight, &w.desc, sizeof w.desc, &gtp->error);
    if (!s) s = gmm__gtp_plan_shard(fn, w.desc.shard, &w.shard, &w.plan, &gtp->error);
    if (s) return s;
    if (!w.desc.name) w.desc.name = "weight";
    if (w.desc.expert < 0 || w.desc.reserved)
        return gmm__fail(&gtp->error, GMM_E_ARG, "%s: '%s': expert is %d, reserved %d: must be >= 0, and 0", fn,
                         w.desc.name, w.desc.expert, w.desc.reserved);
    for (d = GMM_ROWWISE; d <= GMM_COLUMNWISE; d++) {
        if (w.plan.shard_data_bytes[d] > 0 && !w.desc.data[d])
            return gmm__fail(&gtp->error, GMM_E_NULL, "%s: '%s': data[%d] is NULL: a shard in %s has %lld bytes there",
                             fn, w.desc.name, d, gmm_scaling_name(w.shard.scaling),
                             (long long)w.plan.shard_data_bytes[d]);
        if (w.plan.shard_scale_bytes[d] > 0 && !w.desc.scale[d])
            return gmm__fail(&gtp->error, GMM_E_NULL, "%s: '%s': scale[%d] is NULL: a shard in %s has %lld bytes there",
                             fn, w.desc.name, d, gmm_scaling_name(w.shard.scaling),
                             (long long)w.plan.shard_scale_bytes[d]);
        if (w.plan.gather_data_bytes[d] > 0) s = gmm__gtp_gather_layouts(&w.shard, &w.plan, d, &w, &gtp->error);
        if (s) return s;
    }
    if ((s = gmm__gtp_read_format(fn, &w, &gtp->error)) != GMM_OK) return s;
    if (w.desc.main_grad && w.desc.main_grad_dtype != GMM_F32 && w.desc.main_grad_dtype != GMM_BF16)
        return gmm__fail(&gtp->error, GMM_E_DTYPE, "%s: '%s': main_grad_dtype is %s: must be f32 or bf16", fn,
                         w.desc.name, gmm_dtype_name(w.desc.main_grad_dtype));
    for (d = 0; d < 2; d++) {
        const uintptr_t element = (uintptr_t)(gmm_dtype_bits(w.shard.dtype) + 7) / 8;
        const int bytes = w.shard.scaling == GMM_SCALING_MX32 || w.shard.scaling == GMM_SCALING_NV16;
        if ((uintptr_t)w.desc.data[d] % element || (!bytes && (uintptr_t)w.desc.scale[d] % 4))
            return gmm__fail(&gtp->error, GMM_E_ALIGN, "%s: '%s': data[%d] at %p and scale[%d] at %p must be aligned "
                             "to their elements", fn, w.desc.name, d, w.desc.data[d], d, w.desc.scale[d]);
    }
    if ((uintptr_t)w.desc.amax % 4 ||
        (w.desc.main_grad && (uintptr_t)w.desc.main_grad % (uintptr_t)(gmm_dtype_bits(w.desc.main_grad_dtype) / 8)))
        return gmm__fail(&gtp->error, GMM_E_ALIGN, "%s: '%s': amax at %p and main_grad at %p must be aligned to their "
                         "elements", fn, w.desc.name, (void *)w.desc.amax, w.desc.main_grad);
    w.bundle = -1;
    gtp->weights[gtp->weight_count] = w;
    *id = gtp->weight_count++;
    return GMM_OK;
}

GMMDEF gmm_status gmm_gtp_add_bundle(gmm_gtp *gtp, int32_t domain, const int32_t *weights, int32_t count,
                                     const char *name, int32_t *id) {
    static const char fn[] = "gmm_gtp_add_bundle";
    gmm__gtp_bundle *b;
    const gmm__gtp_domain *d;
    int32_t i, k;
    gmm_status s = gmm__gtp_check_declaration(gtp, fn, "bundles", gtp ? gtp->bundle_count : 0,
                                              gtp ? gtp->config.bundles : 0, id);
    if (s) return s;
    if (!name) name = "bundle";
    if (!weights) return gmm__fail(&gtp->error, GMM_E_NULL, "%s: '%s': weights is NULL", fn, name);
    if (domain < 0 || domain >= gtp->domain_count || count < 1)
        return gmm__fail(&gtp->error, GMM_E_ARG, "%s: '%s': domain %d of %d, %d weights: must exist, and >= 1", fn,
                         name, domain, gtp->domain_count, count);
    d = &gtp->domains[domain];
    for (i = 0; i < count; i++)
        if (weights[i] < 0 || weights[i] >= gtp->weight_count)
            return gmm__fail(&gtp->error, GMM_E_ARG, "%s: '%s': weights[%d] is %d: there are %d", fn, name, i,
                             (int)weights[i], gtp->weight_count);
    for (i = 0; i < count; i++) {
        const gmm__gtp_weight *w = &gtp->weights[weights[i]];
        if (w->bundle >= 0)
            return gmm__fail(&gtp->error, GMM_E_ARG, "%s: '%s': '%s' is in bundle '%s' already", fn, name,
                             w->desc.name, gtp->bundles[w->bundle].name);
        if (w->desc.expert >= count)
            return gmm__fail(&gtp->error, GMM_E_ARG, "%s: '%s': '%s' has expert index %d: a bundle of %d leaves a gap "
                             "below it", fn, name, w->desc.name, (int)w->desc.expert, count);
        for (k = 0; k < i; k++)
            if (weights[k] == weights[i] || gtp->weights[weights[k]].desc.expert == w->desc.expert)
                return gmm__fail(&gtp->error, GMM_E_ARG, "%s: '%s': '%s' and '%s' both have expert index %d", fn, name,
                                 gtp->weights[weights[k]].desc.name, w->desc.name, (int)w->desc.expert);
        if (w->shard.gtp_size != d->size || w->shard.gtp_rank != d->rank)
            return gmm__fail(&gtp->error, GMM_E_CONFIG, "%s: '%s': '%s' is shard %d of %d, domain %d is rank %d of %d",
                             fn, name, w->desc.name, (int)w->shard.gtp_rank, (int)w->shard.gtp_size, domain,
                             (int)d->rank, (int)d->size);
        if (w->shard.dtype != gtp->weights[weights[0]].shard.dtype ||
            w->shard.scaling != gtp->weights[weights[0]].shard.scaling)
            return gmm__fail(&gtp->error, GMM_E_DTYPE, "%s: '%s': '%s' differs in dtype or scaling from '%s'", fn, name,
                             w->desc.name, gtp->weights[weights[0]].desc.name);
        for (k = 0; k < i; k++) {
            const gmm__gtp_weight *x = &gtp->weights[weights[k]];
            if (w->ld[GMM_COLUMNWISE] != x->ld[GMM_COLUMNWISE] && w->plan.local_rows == x->plan.local_rows &&
                w->plan.local_cols == x->plan.local_cols)
                return gmm__fail(&gtp->error, GMM_E_CONFIG, "%s: '%s': '%s' is padded to %lld rows, '%s' to %lld: "
                                 "weights of one shape need one unit, for the ld of their transposed copies", fn, name,
                                 w->desc.name, (long long)w->plan.padded_rows, x->desc.name,
                                 (long long)x->plan.padded_rows);
        }
        if (w->format.e4m3_256 != gtp->weights[weights[0]].format.e4m3_256)
            return gmm__fail(&gtp->error, GMM_E_CONFIG, "%s: '%s': '%s' has e4m3_256 %d, '%s' has %d", fn, name,
                             w->desc.name, w->format.e4m3_256, gtp->weights[weights[0]].desc.name,
                             gtp->weights[weights[0]].format.e4m3_256);
        if (w->shard.scaling == GMM_SCALING_NV16)
            for (k = 0; k < count; k++) {
                const gmm__gtp_weight *x = &gtp->weights[weights[k]];
                if ((x->desc.expert == 0 && !x->desc.amax != !w->desc.amax) ||
                    (x->desc.expert == 0 && w->desc.amax && w->desc.amax != x->desc.amax + w->desc.expert))
                    return gmm__fail(&gtp->error, GMM_E_CONFIG, "%s: '%s': amax of '%s' is at %p: must be %d values "
                                     "behind that of expert 0, at %p", fn, name, w->desc.name, (void *)w->desc.amax,
                                     (int)w->desc.expert, (void *)x->desc.amax);
            }
    }
    b = &gtp->bundles[gtp->bundle_count];
    memset(b, 0, sizeof *b);
    b->name = name;
    b->domain = domain;
    b->first = gtp->member_count;
    b->count = count;
    b->wgrad_slot = -1;
    for (i = 0; i < GMM_GTP_PASSES; i++) b->slot[i] = b->chain[i] = b->position[i] = -1;
    for (i = 0; i < count; i++) {
        gmm__gtp_weight *w = &gtp->weights[weights[i]];
        gtp->members[b->first + w->desc.expert] = weights[i];
        w->bundle = gtp->bundle_count;
        b->trainable += w->desc.main_grad != NULL;
    }
    gtp->member_count += count;
    *id = gtp->bundle_count++;
    return GMM_OK;
}

GMMDEF gmm_status gmm_gtp_add_chain(gmm_gtp *gtp, const gmm_gtp_chain *chain, int32_t *id) {
    static const char fn[] = "gmm_gtp_add_chain";
    gmm_gtp_chain c;
    gmm__gtp_chain *entry;
    int32_t i, k;
    gmm_status s = gmm__gtp_check_declaration(gtp, fn, "chains", gtp ? gtp->chain_count : 0,
                                              gtp ? gtp->config.chains : 0, id);
    if (!s) s = gmm__gtp_read(fn, "chain", chain, &c, sizeof c, &gtp->error);
    if (s) return s;
    if (!c.bundles) return gmm__fail(&gtp->error, GMM_E_NULL, "%s: chain->bundles is NULL", fn);
    if (c.held == 0) c.held = 1;
    if (c.together == 0) c.together = 1;
    if (c.pass < GMM_GTP_FORWARD || c.pass > GMM_GTP_RECOMPUTE || c.count < 1 || c.prefetch < 0 || c.prefetch > 3 ||
        c.held < 1 || c.captured < 0 || c.captured > 1 || c.together < 1 || c.together > GMM__GTP_MAX_TOGETHER ||
        c.reserved)
        return gmm__fail(&gtp->error, GMM_E_ARG, "%s: pass %d, count %d, prefetch %d, held %d, captured %d, together "
                         "%d, reserved %d: must be a gmm_gtp_pass, >= 1, 0 to 3, >= 0, 0 or 1, 0 to %d, and 0", fn,
                         (int)c.pass, c.count, c.prefetch, c.held, c.captured, c.together, c.reserved,
                         (int)GMM__GTP_MAX_TOGETHER);
    for (i = 0; i < c.count; i++) {
        if (c.bundles[i] < 0 || c.bundles[i] >= gtp->bundle_count)
            return gmm__fail(&gtp->error, GMM_E_ARG, "%s: bundles[%d] is %d: there are %d", fn, i,
                             (int)c.bundles[i], gtp->bundle_count);
        for (k = 0; k < i && c.bundles[k] != c.bundles[i]; k++) { }
        if (k < i || gtp->bundles[c.bundles[i]].chain[c.pass] >= 0)
            return gmm__fail(&gtp->error, GMM_E_CONFIG, "%s: bundle '%s' is in a chain of that pass already", fn,
                             gtp->bundles[c.bundles[i]].name);
        k = c.bundles[i - i % c.together];
        if (gtp->bundles[k].domain != gtp->bundles[c.bundles[i]].domain)
            return gmm__fail(&gtp->error, GMM_E_CONFIG, "%s: bundles '%s' and '%s' are gathered together, but of "
                             "domains %d and %d", fn, gtp->bundles[k].name, gtp->bundles[c.bundles[i]].name,
                             gtp->bundles[k].domain, gtp->bundles[c.bundles[i]].domain);
        for (k = 0; k < GMM_GTP_PASSES; k++) {
            const int32_t other = gtp->bundles[c.bundles[i]].chain[k];
            if (other >= 0 && gtp->chains[other].captured != c.captured)
                return gmm__fail(&gtp->error, GMM_E_CONFIG, "%s: bundle '%s' is in a chain that is %scaptured", fn,
                                 gtp->bundles[c.bundles[i]].name, c.captured ? "not " : "");
        }
    }
    entry = &gtp->chains[gtp->chain_count];
    entry->pass = c.pass;
    entry->first = gtp->chain_bundle_count;
    entry->count = c.count;
    entry->prefetch = c.prefetch;
    entry->held = c.held;
    entry->captured = c.captured;
    entry->together = c.together;
    entry->next = -1;
    for (i = 0; i < c.count; i++) {
        gmm__gtp_bundle *b = &gtp->bundles[c.bundles[i]];
        gtp->chain_bundles[gtp->chain_bundle_count++] = c.bundles[i];
        b->chain[c.pass] = gtp->chain_count;
        b->position[c.pass] = i;
        b->captured = c.captured;
    }
    *id = gtp->chain_count++;
    return GMM_OK;
}

/* Work that the runtime enqueues by gmm_runtime.run: sums of gradients, casts of shards, transposes. Each has a
   structure of arguments with pointers into itself. gmm_runtime.run may copy the structure, so that a *_run function
   links the pointers of its own copy. */

/* ................................................................................................ Runtime: work ... */

/* Weight i of a bundle. */
static gmm__gtp_weight *gmm__gtp_member(gmm_gtp *g, const gmm__gtp_bundle *b, int32_t i) {
    return &g->weights[g->members[b->first + i]];
}

/* Arguments of the sum of one weight's gradient into its main_grad. `part`: the parts of all ranks after an all-to-all;
   that of this rank is still in the gradient buffer. */
typedef struct gmm__gtp_sum {
    gmm_context *ctx;
    gmm_accumulation d;
    gmm_options options;
    gmm_mat x, y;
    void *workspace;
    size_t workspace_bytes;
    void *part[GMM__MAX_EXCHANGE_RANKS];
} gmm__gtp_sum;

static gmm__gtp_sum gmm__gtp_sum_make(gmm_gtp *g, const gmm__gtp_domain *d, const gmm__gtp_weight *w) {
    gmm__gtp_sum s;
    memset(&s, 0, sizeof s);
    s.ctx = g->config.ctx;
    s.d.count = d->size > 1 && d->desc.reduction == GMM_GTP_REDUCE_EXCHANGE ? d->size : 1;
    s.d.rows = w->plan.shard_rows;
    s.d.cols = w->plan.local_cols;
    s.x = gmm_mat_packed(d->desc.wire, NULL);
    s.y = gmm_mat_packed(w->desc.main_grad_dtype, w->desc.main_grad);
    return s;
}
/* Sets the pointers into the structure itself, after each copy of it. */
static void gmm__gtp_sum_link(gmm__gtp_sum *s) {
    if (s->d.count > 1) s->x = gmm_mat_table(s->x.dtype, s->part, (uint32_t)GMM_MAT_TABLE_ON_HOST);
    s->d.options = &s->options;
    s->d.x = &s->x;
    s->d.y = &s->y;
}
static gmm_status gmm__gtp_sum_run(const void *argument, gmm_stream stream) {
    gmm__gtp_sum s = *(const gmm__gtp_sum *)argument;
    gmm__gtp_sum_link(&s);
    return gmm_accumulate(s.ctx, &s.d, s.workspace, s.workspace_bytes, stream);
}

/* Arguments of the cast or quantization of one weight's shard. */
typedef struct gmm__gtp_cast {
    gmm_context *ctx;
    gmm_quantization d;
    gmm_conversion plain;      /* for a weight without scaling */
    gmm_format format;
    gmm_mat src, copy[2];
    int32_t stored[2]; /* 1: the plan stores the direction */
    void *workspace;
    size_t workspace_bytes;
} gmm__gtp_cast;

static gmm__gtp_cast gmm__gtp_cast_make(gmm_gtp *g, const gmm__gtp_weight *w, gmm_dtype dtype, const void *source) {
    gmm__gtp_cast c;
    int d;
    memset(&c, 0, sizeof c);
    c.ctx = g->config.ctx;
    c.src = gmm_mat_packed(dtype, source);
    c.format = w->format;
    c.d.count = 1;
    c.d.rows = c.plain.rows = w->plan.shard_rows;
    c.d.cols = c.plain.cols = w->plan.local_cols;
    for (d = GMM_ROWWISE; d <= GMM_COLUMNWISE; d++) {
        c.stored[d] = w->plan.shard_data_bytes[d] > 0;
        c.copy[d] = gmm_mat_quantized(&c.format, (gmm_direction)d, w->desc.data[d], w->desc.scale[d], NULL);
    }
    if (w->shard.scaling == GMM_SCALING_NONE) c.copy[GMM_ROWWISE] = gmm_mat_packed(w->shard.dtype, w->desc.data[0]);
    return c;
}
/* Sets the pointers into the structure itself, after each copy of it. */
static void gmm__gtp_cast_link(gmm__gtp_cast *c) {
    c->d.format = &c->format;
    c->d.src = c->plain.src = &c->src;
    c->d.rowwise = c->stored[GMM_ROWWISE] ? &c->copy[GMM_ROWWISE] : NULL;
    c->d.columnwise = c->stored[GMM_COLUMNWISE] ? &c->copy[GMM_COLUMNWISE] : NULL;
    c->plain.dst = &c->copy[GMM_ROWWISE];
}
static gmm_status gmm__gtp_cast_run(const void *argument, gmm_stream stream) {
    gmm__gtp_cast c = *(const gmm__gtp_cast *)argument;
    gmm__gtp_cast_link(&c);
    if (c.format.dtype == GMM_NONE) return gmm_convert(c.ctx, &c.plain, NULL, 0, stream);
    return gmm_quantize(c.ctx, &c.d, c.workspace, c.workspace_bytes, stream);
}
/* Whether the scale of the weight depends on the amax of the whole tensor. */
static int gmm__gtp_needs_amax(const gmm__gtp_weight *w) {
    return w->format.dtype != GMM_NONE && (w->shard.scaling == GMM_SCALING_NV16 ||
                                           (w->shard.scaling == GMM_SCALING_TENSOR && !w->format.delayed));
}

/* Arguments of the transpose of one weight's rowwise copy. */
typedef struct gmm__gtp_transposition {
    gmm_context *ctx;
    gmm_transposition d;
    gmm_mat src, dst;
} gmm__gtp_transposition;
static gmm_status gmm__gtp_transposition_run(const void *argument, gmm_stream stream) {
    gmm__gtp_transposition t = *(const gmm__gtp_transposition *)argument;
    t.d.src = &t.src;
    t.d.dst = &t.dst;
    return gmm_transpose(t.ctx, &t.d, NULL, 0, stream);
}

/* The memory plan: slots, layouts of bundles, bytes of domains. */

/* ......................................................................................... Runtime: memory plan ... */

/* The kind of slot that a pass reads. */
static int gmm__slot_kind(gmm_gtp *g, const gmm__gtp_bundle *b, int pass) {
    if (pass == GMM_GTP_RECOMPUTE) return GMM__SLOT_RECOMPUTE;
    return pass == GMM_GTP_BACKWARD && gmm__gtp_member(g, b, 0)->plan.gather_data_bytes[GMM_COLUMNWISE] > 0
               ? GMM__SLOT_COLUMNWISE : GMM__SLOT_ROWWISE;
}
static int gmm__slot_direction(int kind) { return kind == GMM__SLOT_COLUMNWISE ? GMM_COLUMNWISE : GMM_ROWWISE; }

/* Whether a pass reads a slot. With one rank it reads the shards themselves, unless they must be transposed. */
static int gmm__gtp_needs_slot(gmm_gtp *g, const gmm__gtp_bundle *b, int pass) {
    return g->domains[b->domain].size > 1 ||
           (gmm__slot_kind(g, b, pass) == GMM__SLOT_COLUMNWISE && gmm__gtp_member(g, b, 0)->transposed);
}

/* Whether views of consecutive matrices may contain both weights. */
static int gmm__gtp_same_shape(const gmm__gtp_weight *w, const gmm__gtp_weight *x) {
    return w->plan.local_rows == x->plan.local_rows && w->plan.local_cols == x->plan.local_cols &&
           w->plan.padded_rows == x->plan.padded_rows;
}

/* Sets the offsets of a bundle's buffers. A slot contains the data of all weights, their scales at the distance that
   gmm_layout_of gives between weights of one shape, and their amaxes. The stage contains the buffers that a 2D copy or
   a transpose reads, the gradient buffer the gradients. */
static void gmm__gtp_bundle_layout(gmm_gtp *g, gmm__gtp_bundle *b) {
    gmm__gtp_domain *domain = &g->domains[b->domain];
    int d;
    int32_t i, part;
    for (d = GMM_ROWWISE; d <= GMM_COLUMNWISE; d++) {
        size_t offset = 0, stage = 0;
        for (part = GMM__GTP_DATA; part <= GMM__GTP_SCALE; part++) {
            for (i = 0; i < b->count; i++) {
                gmm__gtp_weight *w = gmm__gtp_member(g, b, i);
                gmm__gather_layout *layout = &w->layout[d][part];
                /* the values of TENSOR are copied at once */
                if (i > 0 && w->shard.scaling != GMM_SCALING_TENSOR &&
                    !gmm__gtp_same_shape(w, gmm__gtp_member(g, b, i - 1))) offset = gmm__round256(offset);
                layout->offset = offset;
                offset += part == GMM__GTP_DATA ? gmm__round256(layout->gathered_bytes) : layout->gathered_bytes;
                if (d == GMM_COLUMNWISE && w->transposed) { /* the rowwise copy is received in the stage */
                    gmm__gather_layout *rowwise = &w->layout[GMM_ROWWISE][part];
                    rowwise->stage_offset = stage;
                    stage += gmm__round256(rowwise->send_bytes * (size_t)domain->size);
                } else if (layout->staged) {
                    layout->stage_offset = stage;
                    stage += gmm__round256(layout->send_bytes * (size_t)domain->size);
                }
            }
            offset = gmm__round256(offset);
        }
        b->amax_offset[d] = offset;
        if (gmm__gtp_member(g, b, 0)->shard.scaling == GMM_SCALING_NV16)
            offset += gmm__round256((size_t)b->count * sizeof(float));
        b->slot_bytes[d == GMM_COLUMNWISE ? GMM__SLOT_COLUMNWISE : GMM__SLOT_ROWWISE] = offset;
        b->stage_bytes[d] = domain->size > 1 ? stage : 0;
        if (b->stage_bytes[d] > domain->stage_bytes[b->captured]) domain->stage_bytes[b->captured] = stage;
    }
    b->slot_bytes[GMM__SLOT_RECOMPUTE] = b->chain[GMM_GTP_RECOMPUTE] < 0 ? 0 : b->slot_bytes[GMM__SLOT_ROWWISE];
    b->grad_bytes = 0;
    for (i = 0; i < b->count; i++) {
        gmm__gtp_weight *w = gmm__gtp_member(g, b, i);
        w->grad_offset = b->grad_bytes;
        b->grad_bytes += gmm__round256((size_t)w->plan.padded_rows * (size_t)w->plan.local_cols *
                                       (size_t)(gmm_dtype_bits(g->domains[b->domain].desc.wire) / 8));
    }
}

/* Sets where the bundles of a chain that are gathered together use the stage: behind one another. */
static void gmm__gtp_stage_together(gmm_gtp *g, const gmm__gtp_chain *c) {
    size_t stage = 0;
    int32_t i;
    for (i = 0; i < c->count && c->together > 1; i++) {
        gmm__gtp_bundle *b = &g->bundles[g->chain_bundles[c->first + i]];
        gmm__gtp_domain *domain = &g->domains[b->domain];
        if (i % c->together == 0) stage = 0;
        b->stage_offset[c->pass] = stage;
        stage += b->stage_bytes[gmm__slot_direction(gmm__slot_kind(g, b, c->pass))];
        if (stage > domain->stage_bytes[b->captured]) domain->stage_bytes[b->captured] = stage;
    }
}

/* The bundle `distance` positions behind a position of a chain, which may lie in a chain that follows it
   (gmm_gtp_follow), and the pass of its chain; NULL = none. */
static gmm__gtp_bundle *gmm__gtp_successor(gmm_gtp *g, int32_t chain, int32_t position, int32_t distance,
                                           gmm_gtp_pass *pass) {
    for (position += distance; chain >= 0 && position >= g->chains[chain].count; chain = g->chains[chain].next)
        position -= g->chains[chain].count;
    if (chain < 0) return NULL;
    *pass = g->chains[chain].pass;
    return &g->bundles[g->chain_bundles[g->chains[chain].first + position]];
}

/* Whether some chain uses a slot at the same time as b's slot of that kind: from each position of the chain on, `held`
   bundles may be acquired, and `prefetch` further ones may be gathered, with those that are gathered together with the
   last of them, which may be in another chain that follows. */
static int gmm__gtp_slot_conflicts(gmm_gtp *g, int32_t slot, const gmm__gtp_bundle *b, int kind) {
    int32_t c, i, k, together = 1;
    for (c = 0; c < g->chain_count; c++) together = g->chains[c].together > together ? g->chains[c].together : together;
    for (c = 0; c < g->chain_count; c++)
        for (i = 0; i < g->chains[c].count; i++) {
            const int32_t ahead = g->chains[c].prefetch + together - 1;
            int bundle_used = 0, slot_used = 0;
            for (k = 0; k < g->chain_bundle_count && k - ahead < g->chains[c].held; k++) {
                gmm_gtp_pass pass = GMM_GTP_FORWARD;
                const gmm__gtp_bundle *x = gmm__gtp_successor(g, c, i, k, &pass);
                if (!x) break;
                bundle_used |= x == b && gmm__slot_kind(g, x, pass) == kind;
                slot_used |= x->slot[pass] == slot;
            }
            if (bundle_used && slot_used) return 1;
        }
    return 0;
}

/* Assigns b the first slot of its kind and size that no chain uses at the same time, or a new one. */
static void gmm__gtp_assign_slot(gmm_gtp *g, gmm__gtp_bundle *b, int kind) {
    gmm__gtp_domain *d = &g->domains[b->domain];
    gmm__gtp_slot *s = g->slots;
    int pass;
    for (pass = 0; pass < GMM_GTP_PASSES; pass++)
        if (b->slot[pass] >= 0 && g->slots[b->slot[pass]].kind == kind) return;
    for (; s < g->slots + g->slot_count; s++)
        if (s->domain == b->domain && s->kind == kind && s->captured == b->captured &&
            s->bytes == b->slot_bytes[kind] && !gmm__gtp_slot_conflicts(g, (int32_t)(s - g->slots), b, kind))
            break;
    if (s == g->slots + g->slot_count) {
        g->slot_count++;
        s->domain = b->domain;
        s->kind = kind;
        s->captured = b->captured;
        s->bytes = b->slot_bytes[kind];
        s->offset = d->gather_bytes;
        s->bundle = -1;
        d->gather_bytes += gmm__round256(s->bytes);
    }
    for (pass = 0; pass < GMM_GTP_PASSES; pass++)
        if (gmm__slot_kind(g, b, pass) == kind) b->slot[pass] = (int32_t)(s - g->slots);
}

/* Assigns a trainable bundle one of desc.wgrad_slots gradient slots of its size, in rotation, or a new one while there
   are fewer. */
static void gmm__gtp_assign_wgrad_slot(gmm_gtp *g, gmm__gtp_bundle *b) {
    gmm__gtp_domain *d = &g->domains[b->domain];
    int32_t i, slots = 0, assigned = 0, index;
    if (!b->trainable || b->wgrad_slot >= 0) return;
    for (i = 0; i < g->bundle_count; i++) {
        const gmm__gtp_bundle *x = &g->bundles[i];
        assigned += x->wgrad_slot >= 0 && x->domain == b->domain && x->captured == b->captured &&
                 x->grad_bytes == b->grad_bytes;
    }
    index = assigned % d->desc.wgrad_slots;
    for (i = 0; i < g->wgrad_slot_count; i++) {
        const gmm__wgrad_slot *s = &g->wgrad_slots[i];
        if (s->domain == b->domain && s->captured == b->captured && s->bytes == b->grad_bytes && slots++ == index) {
            b->wgrad_slot = i;
            return;
        }
    }
    {
        gmm__wgrad_slot *s = &g->wgrad_slots[g->wgrad_slot_count];
        s->domain = b->domain;
        s->captured = b->captured;
        s->bytes = b->grad_bytes;
        s->offset = d->reduce_bytes;
        s->writer = -1;
        d->reduce_bytes += gmm__round256(s->bytes);
        b->wgrad_slot = g->wgrad_slot_count++;
    }
}

/* Raises the domain's workspace of casts to what the cast of a weight needs from any source dtype. */
static gmm_status gmm__gtp_query_cast(gmm_gtp *g, const char *fn, gmm__gtp_domain *d, const gmm__gtp_weight *w) {
    static const gmm_dtype dtypes[] = {GMM_F32, GMM_F16, GMM_BF16};
    int i;
    for (i = 0; i < 3 && w->format.dtype != GMM_NONE; i++) {
        gmm__gtp_cast c = gmm__gtp_cast_make(g, w, dtypes[i], NULL);
        gmm_info info = GMM_ZERO;
        gmm_status s;
        gmm__gtp_cast_link(&c);
        s = gmm_quantize_query(g->config.ctx, GMM_OP_QUANTIZE, &c.d, &info);
        if (s) return gmm__fail(&g->error, s, "%s: '%s': %.400s", fn, w->desc.name, gmm_last_error(g->config.ctx));
        if (info.workspace_bytes > d->cast_bytes) d->cast_bytes = info.workspace_bytes;
    }
    return GMM_OK;
}

/* Whether the bytes of all buffers fit 64 bits, if no buffer is shared. A weight takes at most 16 times the bytes of
   its gathered copies and gradient, padding of scales included. */
static int gmm__gtp_bytes_fit(const gmm_gtp *g) {
    double bytes = 0;
    int32_t i;
    for (i = 0; i < g->weight_count; i++) {
        const gmm_shard_plan *p = &g->weights[i].plan;
        bytes += (double)p->gather_data_bytes[0] + (double)p->gather_data_bytes[1] + (double)p->gather_scale_bytes[0] +
                 (double)p->gather_scale_bytes[1] + 4.0 * (double)p->padded_rows * (double)p->local_cols;
    }
    return 16.0 * bytes < (double)INT64_MAX;
}

GMMDEF gmm_status gmm_gtp_seal(gmm_gtp *gtp) {
    static const char fn[] = "gmm_gtp_seal";
    int32_t i, k, n;
    int pass;
    gmm_status s = gmm__gtp_check_declaration(gtp, fn, "", 0, 1, gtp);
    if (s) return s;
    for (i = 0; i < gtp->weight_count; i++)
        if (gtp->weights[i].bundle < 0)
            return gmm__fail(&gtp->error, GMM_E_CONFIG, "%s: '%s' is in no bundle", fn, gtp->weights[i].desc.name);
    if (!gmm__gtp_bytes_fit(gtp))
        return gmm__fail(&gtp->error, GMM_E_OVERFLOW, "%s: the buffers of %d weights do not fit 64 bits", fn,
                         gtp->weight_count);
    for (i = 0; i < gtp->bundle_count; i++) { /* workspaces of sums and casts */
        const gmm__gtp_bundle *b = &gtp->bundles[i];
        gmm__gtp_domain *d = &gtp->domains[b->domain];
        for (k = 0; k < b->count; k++) {
            const gmm__gtp_weight *w = gmm__gtp_member(gtp, b, k);
            gmm__gtp_sum sum = gmm__gtp_sum_make(gtp, d, w);
            gmm_info info = GMM_ZERO;
            if ((s = gmm__gtp_query_cast(gtp, fn, d, w)) != GMM_OK) return s;
            if (!w->desc.main_grad) continue;
            gmm__gtp_sum_link(&sum);
            s = gmm_accumulate_query(gtp->config.ctx, &sum.d, &info);
            if (s) return gmm__fail(&gtp->error, s, "%s: '%s': %.400s", fn, w->desc.name,
                                    gmm_last_error(gtp->config.ctx));
            if (info.workspace_bytes > d->workspace_bytes) d->workspace_bytes = info.workspace_bytes;
        }
    }
    for (i = 0; i < gtp->bundle_count; i++) gmm__gtp_bundle_layout(gtp, &gtp->bundles[i]);
    for (i = 0; i < gtp->chain_count; i++) gmm__gtp_stage_together(gtp, &gtp->chains[i]);
    for (i = 0; i < gtp->chain_count; i++) /* first the slots of bundles in chains, in the order of the chains */
        for (k = 0; k < gtp->chains[i].count; k++) {
            gmm__gtp_bundle *b = &gtp->bundles[gtp->chain_bundles[gtp->chains[i].first + k]];
            if (gmm__gtp_needs_slot(gtp, b, gtp->chains[i].pass))
                gmm__gtp_assign_slot(gtp, b, gmm__slot_kind(gtp, b, gtp->chains[i].pass));
            if (gtp->chains[i].pass == GMM_GTP_BACKWARD) gmm__gtp_assign_wgrad_slot(gtp, b);
        }
    for (i = 0; i < gtp->bundle_count; i++) { /* then those of the other bundles */
        gmm__gtp_bundle *b = &gtp->bundles[i];
        for (pass = GMM_GTP_FORWARD; pass <= GMM_GTP_BACKWARD; pass++)
            if (gmm__gtp_needs_slot(gtp, b, pass)) gmm__gtp_assign_slot(gtp, b, gmm__slot_kind(gtp, b, pass));
        gmm__gtp_assign_wgrad_slot(gtp, b);
    }
    for (i = 0; i < gtp->domain_count; i++) {
        gmm__gtp_domain *d = &gtp->domains[i];
        size_t max_bytes = 0;
        for (k = 0; k < gtp->bundle_count; k++)
            if (gtp->bundles[k].domain == i && gtp->bundles[k].trainable && gtp->bundles[k].grad_bytes > max_bytes)
                max_bytes = gtp->bundles[k].grad_bytes;
        for (k = 0; k < 2; k++) {
            d->stage_offset[k] = d->gather_bytes;
            d->gather_bytes += gmm__round256(d->stage_bytes[k]);
        }
        d->amax_offset = d->gather_bytes;
        for (k = 0, n = 0; k < gtp->weight_count; k++)
            n += gtp->bundles[gtp->weights[k].bundle].domain == i && gmm__gtp_needs_amax(&gtp->weights[k]);
        d->gather_bytes += gmm__round256((size_t)n * sizeof(float));
        d->cast_offset = d->gather_bytes;
        d->gather_bytes += gmm__round256(d->cast_bytes);
        /* one receive buffer suffices, since reductions run one after the other: on the reduce stream, or in replays,
           which wait for that stream, as it does for them */
        d->recv_offset = d->reduce_bytes;
        if (d->size > 1 && d->desc.reduction == GMM_GTP_REDUCE_EXCHANGE) d->reduce_bytes += gmm__round256(max_bytes);
        d->workspace_offset = d->reduce_bytes;
        d->reduce_bytes += gmm__round256(d->workspace_bytes);
    }
    gtp->sealed = 1;
    return GMM_OK;
}

GMMDEF gmm_status gmm_gtp_memory_need(gmm_gtp *gtp, int32_t domain, gmm_gtp_need *need) {
    static const char fn[] = "gmm_gtp_memory_need";
    gmm_gtp_need n = GMM_ZERO;
    gmm_status s = GMM_OK;
    size_t common;
    int32_t i;
    if (!gtp) return GMM_E_NULL;
    common = gmm__gtp_common_size(fn, "need", need, sizeof *need, &s, &gtp->error);
    if (s) return s;
    if (!gtp->sealed) return gmm__fail(&gtp->error, GMM_E_STATE, "%s: seal the object first", fn);
    if (domain < 0 || domain >= gtp->domain_count)
        return gmm__fail(&gtp->error, GMM_E_ARG, "%s: domain %d: there are %d", fn, domain,
                         gtp->domain_count);
    n.struct_size = need->struct_size;
    for (i = 0; i < gtp->slot_count; i++) n.gather_slots += gtp->slots[i].domain == domain;
    for (i = 0; i < gtp->wgrad_slot_count; i++) n.wgrad_slots += gtp->wgrad_slots[i].domain == domain;
    n.gather_bytes = gtp->domains[domain].gather_bytes;
    n.reduce_bytes = gtp->domains[domain].reduce_bytes;
    memcpy(need, &n, common);
    return GMM_OK;
}

/* Errors, and events of the runtime on streams inside and outside of captures. */

/* ...................................................................................... Runtime: errors, events ... */

/* Tells the communicators of all domains, and the further one of a call that has failed, that this rank will call no
   further collective. */
static void gmm__gtp_give_up(gmm_gtp *g, const char *why) {
    int32_t i;
    for (i = 0; i < g->domain_count; i++) {
        gmm__gtp_domain *d = &g->domains[i];
        if (d->size == 1) continue;
        d->gather.give_up(d->gather.self, why);
        d->reduce.give_up(d->reduce.self, why);
    }
    if (g->further && g->further->give_up) g->further->give_up(g->further->self, why);
}

/* Records the collective that is being called, so that an error message names it. */
static void gmm__gtp_set_collective(gmm_gtp *g, const gmm__gtp_domain *d, const char *what) {
    g->collective = what;
    g->caller[0] = d->rank;
    g->caller[1] = d->size;
}

/* Ends the use of the object after a failure: the message names the call, the bundle, and what the communicator
   reports. */
static gmm_status gmm__gtp_fail(gmm_gtp *g, const char *fn, const char *name, gmm_status status) {
    char why[320] = "", text[460], calls[64] = "";
    int32_t i;
    if (g->failed) return g->failed; /* by a hook: its failure is the first */
    for (i = 0; i < g->domain_count && !why[0]; i++) {
        gmm_comm *c[2];
        int k;
        c[0] = &g->domains[i].gather;
        c[1] = &g->domains[i].reduce;
        for (k = 0; k < 2 && !why[0] && g->domains[i].size > 1; k++) {
            gmm_error e = GMM_ZERO;
            if (c[k]->poll && c[k]->poll(c[k]->self, &e) != GMM_OK)
                (void)snprintf(why, sizeof why, "%.300s", e.text);
        }
    }
    if (!why[0] && g->further && g->further->poll) {
        gmm_error e = GMM_ZERO;
        if (g->further->poll(g->further->self, &e) != GMM_OK) (void)snprintf(why, sizeof why, "%.300s", e.text);
    }
    if (!why[0]) (void)snprintf(why, sizeof why, "%.280s", gmm_last_error(g->config.ctx));
    g->failed = status;
    if (g->collective)
        (void)snprintf(calls, sizeof calls, "%s by rank %d of %d: ", g->collective, g->caller[0], g->caller[1]);
    (void)snprintf(text, sizeof text, "%s: '%.60s': %s%s%s%s", fn, name, calls, gmm_status_string(status),
                   why[0] ? ": " : "", why);
    (void)gmm__fail(&g->error, status, "%s", text);
    gmm__gtp_give_up(g, text);
    return status;
}

static gmm_status gmm__gtp_event_create(gmm_gtp *g, gmm__gtp_event *m) {
    gmm_status s = g->runtime.event_create(g->runtime.self, &m->captured_event);
    return s ? s : g->runtime.event_create(g->runtime.self, &m->external_event);
}
static gmm_status gmm__gtp_event_destroy(gmm_gtp *g, gmm__gtp_event *m) {
    const gmm_status captured = g->runtime.event_destroy(g->runtime.self, m->captured_event);
    const gmm_status external = g->runtime.event_destroy(g->runtime.self, m->external_event);
    memset(m, 0, sizeof *m);
    return captured ? captured : external;
}
static gmm_status gmm__gtp_event_record(gmm_gtp *g, gmm__gtp_event *m, gmm_stream stream) {
    gmm_status s = GMM_OK;
    m->recorded = 1;
    m->waited = 0;
    m->recorder = stream;
    m->graph = g->graph;
    if (g->graph) s = g->runtime.event_record(g->runtime.self, m->captured_event, stream, 0);
    return s ? s : g->runtime.event_record(g->runtime.self, m->external_event, stream,
                                           g->graph ? (uint32_t)GMM_EVENT_EXTERNAL : 0u);
}
static gmm_status gmm__gtp_event_wait(gmm_gtp *g, gmm__gtp_event *m, gmm_stream stream) {
    if (!m->recorded) return GMM_OK;
    if (m->graph == g->graph) { /* a stream need not wait for its own record, nor wait twice */
        if (m->recorder == stream || (m->waited && m->waiter == stream)) return GMM_OK;
        m->waited = 1;
        m->waiter = stream;
        if (g->graph) return g->runtime.stream_wait(g->runtime.self, stream, m->captured_event, 0);
    }
    return g->runtime.stream_wait(g->runtime.self, stream, m->external_event,
                                  g->graph ? (uint32_t)GMM_EVENT_EXTERNAL : 0u);
}

/* Makes `stream` wait for the ends of replays on other streams. */
static gmm_status gmm__gtp_fence_replays(gmm_gtp *g, gmm_stream stream) {
    gmm_status s = GMM_OK;
    int32_t i;
    for (i = 0; i < g->graph_count && !s && !g->graph; i++)
        if (g->graph_watch[i].replayed && g->graph_watch[i].stream != stream)
            s = g->runtime.stream_wait(g->runtime.self, stream, g->graph_end[i], 0);
    return s;
}

/* Prepares a stream of the domain for work: it first makes the stream join the capture, or outside of captures wait for
   the replays so far. */
static gmm_status gmm__gtp_prepare_stream(gmm_gtp *g, gmm__gtp_domain *d, int role) {
    const int32_t used = d->used[role];
    if (!g->graph) {
        d->used[role] = 1;
        return used ? GMM_OK : gmm__gtp_fence_replays(g, gmm__gtp_stream(d, role));
    }
    if (d->joined_graph[role] == g->graph) return GMM_OK;
    d->joined_graph[role] = g->graph;
    return g->runtime.stream_wait(g->runtime.self, gmm__gtp_stream(d, role), g->graph_begin, 0);
}

/* Binding of memory, creation of events, destruction of the object. */

/* Creates all events; gmm_gtp_fini destroys those that were created. */
static gmm_status gmm__gtp_create_events(gmm_gtp *g) {
    gmm_status s = g->runtime.event_create(g->runtime.self, &g->graph_begin);
    int32_t i;
    int k, n;
    for (i = 0; i < g->domain_count; i++)
        for (k = 0; k < 2; k++) {
            if (!s) s = g->runtime.event_create(g->runtime.self, &g->domains[i].fork[k]);
            if (!s) s = g->runtime.event_create(g->runtime.self, &g->domains[i].join[k]);
            for (n = 0; n < GMM__MAX_WATCHES && !s; n++) {
                s = g->runtime.event_create(g->runtime.self, &g->domains[i].watch[k][n].begin);
                if (!s) s = g->runtime.event_create(g->runtime.self, &g->domains[i].watch_end[k][n]);
            }
            if (!s) s = gmm__gtp_event_create(g, &g->domains[i].staged[k]);
            if (!s && k) s = gmm__gtp_event_create(g, &g->domains[i].cast);
        }
    for (i = 0; i < g->bundle_count; i++) {
        gmm__gtp_bundle *b = &g->bundles[i];
        if (!s) s = gmm__gtp_event_create(g, &b->published);
        if (!s) s = gmm__gtp_event_create(g, &b->done);
        if (!s) s = gmm__gtp_event_create(g, &b->in_place);
    }
    for (i = 0; i < g->slot_count; i++) {
        if (!s) s = gmm__gtp_event_create(g, &g->slots[i].ready);
        if (!s) s = gmm__gtp_event_create(g, &g->slots[i].last_use);
    }
    for (i = 0; i < g->wgrad_slot_count && !s; i++) s = gmm__gtp_event_create(g, &g->wgrad_slots[i].last_use);
    for (i = 0; i < g->config.graphs; i++) {
        if (!s) s = g->runtime.event_create(g->runtime.self, &g->graph_watch[i].begin);
        if (!s) s = g->runtime.event_create(g->runtime.self, &g->graph_end[i]);
    }
    return s;
}

GMMDEF gmm_status gmm_gtp_fini(gmm_gtp *gtp) {
    gmm_status s = GMM_OK;
    int32_t i;
    int k, n;
    if (!gtp || gtp->finished) return GMM_OK;
    gtp->finished = 1;
    gtp->active = 0;
#define GMM__DESTROY(event) do { \
        const gmm_status t = gtp->runtime.event_destroy(gtp->runtime.self, event); if (!s) s = t; } while (0)
#define GMM__DESTROY_PAIR(pair) do { \
        const gmm_status t = gmm__gtp_event_destroy(gtp, &(pair)); if (!s) s = t; } while (0)
    GMM__DESTROY(gtp->graph_begin);
    for (i = 0; i < gtp->domain_count; i++) {
        gmm__gtp_domain *d = &gtp->domains[i];
        for (k = 0; k < 2; k++) {
            const gmm_comm *c = k ? &d->reduce : &d->gather;
            GMM__DESTROY(d->fork[k]);
            GMM__DESTROY(d->join[k]);
            GMM__DESTROY_PAIR(d->staged[k]);
            if (k) GMM__DESTROY_PAIR(d->cast);
            for (n = 0; n < GMM__MAX_WATCHES; n++) {
                GMM__DESTROY(d->watch[k][n].begin);
                GMM__DESTROY(d->watch_end[k][n]);
            }
            if (d->window[k] && !gtp->failed) {
                const gmm_status t = c->window_remove(c->self, d->window[k]);
                if (!s) s = t;
            }
        }
    }
    for (i = 0; i < gtp->bundle_count; i++) {
        GMM__DESTROY_PAIR(gtp->bundles[i].published);
        GMM__DESTROY_PAIR(gtp->bundles[i].done);
        GMM__DESTROY_PAIR(gtp->bundles[i].in_place);
    }
    for (i = 0; i < gtp->slot_count; i++) {
        GMM__DESTROY_PAIR(gtp->slots[i].ready);
        GMM__DESTROY_PAIR(gtp->slots[i].last_use);
    }
    for (i = 0; i < gtp->wgrad_slot_count; i++) GMM__DESTROY_PAIR(gtp->wgrad_slots[i].last_use);
    for (i = 0; i < gtp->config.graphs; i++) {
        GMM__DESTROY(gtp->graph_watch[i].begin);
        GMM__DESTROY(gtp->graph_end[i]);
    }
#undef GMM__DESTROY
#undef GMM__DESTROY_PAIR
    return s;
}

/* Sets the addresses of slots and tables once all memory is bound. */
static void gmm__gtp_set_addresses(gmm_gtp *g) {
    int32_t i, k;
    int pass;
    for (i = 0; i < g->slot_count; i++)
        g->slots[i].base = g->domains[g->slots[i].domain].gather_base + g->slots[i].offset;
    for (i = 0; i < g->wgrad_slot_count; i++)
        g->wgrad_slots[i].base = g->domains[g->wgrad_slots[i].domain].reduce_base + g->wgrad_slots[i].offset;
    for (i = 0; i < g->bundle_count; i++) {
        const gmm__gtp_bundle *b = &g->bundles[i];
        for (k = 0; k < b->count; k++) {
            const gmm__gtp_weight *w = gmm__gtp_member(g, b, k);
            for (pass = 0; pass < GMM_GTP_PASSES; pass++) {
                const int d = gmm__slot_direction(gmm__slot_kind(g, b, pass));
                const gmm__gtp_slot *s = b->slot[pass] >= 0 ? &g->slots[b->slot[pass]] : NULL;
                g->table[pass][b->first + k] = s ? s->base + w->layout[d][GMM__GTP_DATA].offset : w->desc.data[d];
                g->scales[pass][b->first + k] = s && w->layout[d][GMM__GTP_SCALE].gathered_bytes
                                                    ? (void *)(s->base + w->layout[d][GMM__GTP_SCALE].offset)
                                                    : w->desc.scale[d];
            }
            g->grads[b->first + k] = b->wgrad_slot >= 0 ? g->wgrad_slots[b->wgrad_slot].base + w->grad_offset : NULL;
        }
    }
}

/* Refuses blocks of a domain that share bytes with each other, or with those of a domain that is bound. */
static gmm_status gmm__gtp_check_disjoint(gmm_gtp *g, const char *fn, int32_t domain, const void *gather,
                                          const void *reduce) {
    static const char *const names[2] = {"gather", "reduce"};
    const gmm__gtp_domain *d = &g->domains[domain];
    const uintptr_t own[2] = {(uintptr_t)gather, (uintptr_t)reduce};
    const size_t own_bytes[2] = {d->gather_bytes, d->reduce_bytes};
    int32_t i;
    int k, n;
    for (i = 0; i < g->domain_count; i++) {
        const gmm__gtp_domain *x = &g->domains[i];
        const uintptr_t base[2] = {i == domain ? own[0] : (uintptr_t)x->gather_base,
                                   i == domain ? own[1] : (uintptr_t)x->reduce_base};
        const size_t bytes[2] = {x->gather_bytes, x->reduce_bytes};
        for (k = 0; k < 2 && (i == domain || x->bound); k++)
            for (n = 0; n < 2; n++)
                if ((i != domain || k < n) && own[k] < base[n] + bytes[n] && base[n] < own[k] + own_bytes[k])
                    return gmm__fail(&g->error, GMM_E_ARG, "%s: domain %d: %s at %p, %llu bytes, overlaps %s of domain "
                                     "%d at %p", fn, domain, names[k], (void *)own[k],
                                     (unsigned long long)own_bytes[k], names[n], i, (void *)base[n]);
    }
    return GMM_OK;
}

GMMDEF gmm_status gmm_gtp_bind(gmm_gtp *gtp, int32_t domain, void *gather, size_t gather_bytes, void *reduce,
                               size_t reduce_bytes) {
    static const char fn[] = "gmm_gtp_bind";
    gmm__gtp_domain *d;
    gmm_status s = GMM_OK;
    int32_t i;
    if (!gtp) return GMM_E_NULL;
    if (gtp->failed) return gtp->failed;
    if (!gtp->sealed || gtp->active || gtp->finished)
        return gmm__fail(&gtp->error, GMM_E_STATE, "%s: %s", fn, gtp->active ? "all memory is bound" : gtp->finished
                         ? "gmm_gtp_fini was called" : "seal it first");
    if (domain < 0 || domain >= gtp->domain_count || gtp->domains[domain].bound)
        return gmm__fail(&gtp->error, GMM_E_ARG, "%s: domain %d: must be one of %d that is not bound yet", fn,
                         domain, gtp->domain_count);
    d = &gtp->domains[domain];
    if (gather_bytes < d->gather_bytes || reduce_bytes < d->reduce_bytes)
        return gmm__fail(&gtp->error, GMM_E_WORKSPACE, "%s: domain %d: %llu and %llu bytes: gmm_gtp_memory_need asks "
                         "for %llu and %llu", fn, domain, (unsigned long long)gather_bytes,
                         (unsigned long long)reduce_bytes, (unsigned long long)d->gather_bytes,
                         (unsigned long long)d->reduce_bytes);
    if ((d->gather_bytes && !gather) || (d->reduce_bytes && !reduce))
        return gmm__fail(&gtp->error, GMM_E_NULL, "%s: domain %d: %s is NULL", fn, domain,
                         d->gather_bytes && !gather ? "gather" : "reduce");
    if (((uintptr_t)gather | (uintptr_t)reduce) % 256 != 0)
        return gmm__fail(&gtp->error, GMM_E_ALIGN, "%s: domain %d: %p and %p must be aligned to 256 bytes", fn,
                         domain, gather, reduce);
    if ((s = gmm__gtp_check_disjoint(gtp, fn, domain, gather, reduce)) != GMM_OK) return s;
    d->gather_base = (char *)gather;
    d->reduce_base = (char *)reduce;
    if (d->size > 1 && d->gather.window_add && d->gather_bytes)
        s = d->gather.window_add(d->gather.self, gather, d->gather_bytes, &d->window[0]);
    if (!s && d->size > 1 && d->reduce.window_add && d->reduce_bytes)
        s = d->reduce.window_add(d->reduce.self, reduce, d->reduce_bytes, &d->window[1]);
    if (s) return gmm__gtp_fail(gtp, fn, "windows", s);
    d->bound = 1;
    for (i = 0; i < gtp->domain_count; i++)
        if (!gtp->domains[i].bound) return GMM_OK;
    gmm__gtp_set_addresses(gtp);
    gtp->active = 1;
    s = gmm__gtp_create_events(gtp);
    if (s) {
        (void)gmm__gtp_fail(gtp, fn, "events", s);
        (void)gmm_gtp_fini(gtp);
    }
    return s;
}

/* Checks at the beginning of public calls, and the hash of calls that must be the same on all ranks. */

/* Flags of gmm__gtp_check_call: the call is also allowed in a callback; it is allowed only outside of captures. */
enum { GMM__GTP_IN_CALLBACK = 1, GMM__GTP_NO_CAPTURE = 2 };
static gmm_status gmm__gtp_check_call(gmm_gtp *g, const char *fn, int32_t allowed) {
    if (!g) return GMM_E_NULL;
    if (g->failed) return g->failed;
    if (!g->active)
        return gmm__fail(&g->error, GMM_E_STATE, "%s: %s", fn,
                         g->finished ? "gmm_gtp_fini was called" : "seal the object and bind its memory first");
    if (g->in_callback && !(allowed & GMM__GTP_IN_CALLBACK))
        return gmm__fail(&g->error, GMM_E_STATE, "%s: not from a callback", fn);
    if (g->graph && (allowed & GMM__GTP_NO_CAPTURE))
        return gmm__fail(&g->error, GMM_E_CAPTURE, "%s: not while graph %d is captured", fn, g->graph - 1);
    return GMM_OK;
}
/* Checks a call that names a bundle, and one that names a bundle and a pass. */
static gmm_status gmm__gtp_check_bundle(gmm_gtp *g, const char *fn, int32_t bundle) {
    gmm_status s = gmm__gtp_check_call(g, fn, 0);
    if (s) return s;
    if (bundle < 0 || bundle >= g->bundle_count)
        return gmm__fail(&g->error, GMM_E_ARG, "%s: bundle %d: there are %d", fn, bundle, g->bundle_count);
    if (g->graph && !g->bundles[bundle].captured)
        return gmm__fail(&g->error, GMM_E_CAPTURE, "%s: '%s' is in no captured chain, graph %d is captured", fn,
                         g->bundles[bundle].name, g->graph - 1);
    return GMM_OK;
}
static gmm_status gmm__gtp_check_pass(gmm_gtp *g, const char *fn, int32_t bundle, gmm_gtp_pass pass) {
    const gmm_status s = gmm__gtp_check_bundle(g, fn, bundle);
    if (s) return s;
    if (pass < GMM_GTP_FORWARD || pass > GMM_GTP_RECOMPUTE)
        return gmm__fail(&g->error, GMM_E_ARG, "%s: '%s': pass is %d: must be a gmm_gtp_pass", fn,
                         g->bundles[bundle].name, (int)pass);
    if (pass == GMM_GTP_RECOMPUTE && g->bundles[bundle].chain[pass] < 0)
        return gmm__fail(&g->error, GMM_E_STATE, "%s: '%s' is in no recompute chain", fn, g->bundles[bundle].name);
    return GMM_OK;
}
/* Mixes a call into gmm_gtp_statistics.calls, by which callers compare the order of calls among ranks. `call` numbers
   the function. */
static void gmm__gtp_hash(gmm_gtp *g, int call, int32_t bundle, int what) {
    const uint64_t word = ((uint64_t)(uint32_t)bundle << 16) | (uint64_t)(uint32_t)(call * 16 + what);
    g->stats.calls = (g->stats.calls ^ word) * 1099511628211u + 1;
}

/* Monitoring of collectives and replays for timeouts. */

/* Records the begin of a collective in the ring of its stream. *out is NULL if the ring is full, and in a capture,
   since gmm_gtp_poll monitors a replay as a whole. gmm__watch_end records the end and adds the entry to the ring. */
static gmm_status gmm__watch_begin(gmm_gtp *g, gmm__gtp_domain *d, int role, gmm__watch **out) {
    gmm__watch *ring = d->watch[role], *w;
    const uint32_t index = d->next[role] % GMM__MAX_WATCHES;
    gmm_status s = GMM_OK;
    int32_t done = 1;
    *out = NULL;
    if (g->graph) return GMM_OK;
    while (d->oldest[role] != d->next[role] && done && !s) {
        s = g->runtime.event_query(g->runtime.self, ring[d->oldest[role] % GMM__MAX_WATCHES].end, &done);
        d->oldest[role] += done != 0;
    }
    if (s || d->next[role] - d->oldest[role] == GMM__MAX_WATCHES) return s;
    w = &ring[index];
    s = g->runtime.event_record(g->runtime.self, w->begin, gmm__gtp_stream(d, role), 0);
    if (!s) *out = w;
    return s;
}
static gmm_status gmm__watch_end(gmm_gtp *g, gmm__gtp_domain *d, int role, gmm__watch *w, const gmm_comm *comm,
                                 const char *what, const char *name) {
    if (!w) return GMM_OK;
    w->end = d->watch_end[role][d->next[role]++ % GMM__MAX_WATCHES];
    w->begun = 0;
    w->comm = comm;
    w->what = what;
    w->name = name;
    return g->runtime.event_record(g->runtime.self, w->end, gmm__gtp_stream(d, role), 0);
}

/* Checks one collective or replay: clears `end` once it is done; GMM_E_COMM once it has run longer than the timeout. */
static gmm_status gmm__watch_check(gmm_gtp *g, gmm__watch *w, double now) {
    int32_t done = 0;
    gmm_status s;
    if (!w->end) return GMM_OK;
    s = g->runtime.event_query(g->runtime.self, w->end, &done);
    if (s || done) {
        w->end = NULL;
        return s;
    }
    if (!w->begun) {
        s = g->runtime.event_query(g->runtime.self, w->begin, &done);
        w->begun = done;
        w->begin_time = now;
        return s;
    }
    return now - w->begin_time > 1e-3 * (double)g->config.timeout_ms ? GMM_E_COMM : GMM_OK;
}

GMMDEF gmm_status gmm_gtp_poll(gmm_gtp *gtp) {
    static const char fn[] = "gmm_gtp_poll";
    const double now = gmm__gtp_now();
    gmm_status s = gmm__gtp_check_call(gtp, fn, GMM__GTP_NO_CAPTURE);
    gmm__watch *w = NULL;
    const char *name = "";
    char graph[24];
    int32_t i;
    if (s) return s;
    for (i = 0; i < gtp->domain_count; i++) {
        const gmm__gtp_domain *d = &gtp->domains[i];
        if (d->size > 1 && ((s = d->gather.poll(d->gather.self, NULL)) != GMM_OK ||
                            (s = d->reduce.poll(d->reduce.self, NULL)) != GMM_OK))
            return gmm__gtp_fail(gtp, fn, "communicator", s);
    }
    for (i = 0; i < 2 * gtp->domain_count && !s; i++) {
        gmm__gtp_domain *d = &gtp->domains[i / 2];
        const int role = i % 2;
        while (d->oldest[role] != d->next[role] && !s) {
            w = &d->watch[role][d->oldest[role] % GMM__MAX_WATCHES];
            s = gmm__watch_check(gtp, w, now);
            name = w->name;
            if (w->end) break;
            d->oldest[role]++;
        }
    }
    for (i = 0; i < gtp->graph_count && !s; i++) {
        s = gmm__watch_check(gtp, w = &gtp->graph_watch[i], now);
        (void)snprintf(graph, sizeof graph, "graph %d", i);
        name = graph;
    }
    if (s == GMM_E_COMM && w->end) { /* timeout: the message names the peer if the communicator knows it */
        gmm_error who = GMM_ZERO;
        char text[400];
        if (w->comm) (void)w->comm->poll(w->comm->self, &who);
        (void)snprintf(text, sizeof text, "%s of '%.60s' is not done after %d ms: %.200s", w->what, name,
                       gtp->config.timeout_ms, who.text[0] ? who.text : "a peer is missing");
        gmm__gtp_give_up(gtp, text);
        return gmm__gtp_fail(gtp, fn, name, s);
    }
    return s ? gmm__gtp_fail(gtp, fn, name, s) : GMM_OK;
}

/* Gathers of bundles into slots, ahead of their use or when they are acquired. */

/* Whether the slot contains the current weights of a bundle for the work that is being enqueued. Weights that a
   graph gathers are in the slot during its replays only, and weights that were gathered outside of captures may be
   gone when a graph is replayed. A graph may use weights that an earlier graph has prefetched for it. */
static int gmm__gtp_slot_valid(const gmm_gtp *g, const gmm__gtp_slot *s, int32_t bundle) {
    const gmm__gtp_bundle *b = &g->bundles[bundle];
    if (s->bundle != bundle || s->version != b->version) return 0;
    return s->graph == g->graph || (s->graph && g->graph && s->pending);
}

/* Whether the slot contains weights that were prefetched, and have been published again since. */
static int gmm__gtp_is_outdated(const gmm_gtp *g, const gmm__gtp_slot *s) {
    return s->pending == 1 && s->bundle >= 0 && s->version != g->bundles[s->bundle].version;
}

/* How a graph uses a bundle (GMM__GRAPH_*). */
static unsigned char *gmm__gtp_graph_usage(gmm_gtp *g, int32_t graph, int32_t bundle) {
    return &g->graph_usage[(size_t)graph * (size_t)g->bundle_count + (size_t)bundle];
}

/* Asks the caller, once per forward, to publish the weights of a bundle: calls hooks.need, or in a capture notes that
   gmm_gtp_pre_replay has to. Returns the failure of a gmm_gtp_publish that the hook has called. */
static gmm_status gmm__gtp_request_publish(gmm_gtp *g, gmm__gtp_bundle *b) {
    if (b->publish_requested) return GMM_OK;
    b->publish_requested = 1;
    if (g->graph) *gmm__gtp_graph_usage(g, g->graph - 1, (int32_t)(b - g->bundles)) |= GMM__GRAPH_NEEDS;
    else if (g->config.hooks.need && !g->dry_run) {
        g->in_callback = 1;
        g->config.hooks.need(g->config.hooks.user, g, g->members + b->first, b->count);
        g->in_callback = 0;
    }
    return g->failed;
}

/* Copies a value of `size` bytes of each weight to consecutive addresses: its tensor scale (`scale` = 1) or its amax.
   Values at consecutive addresses are copied together. */
static gmm_status gmm__gtp_copy_values(gmm_gtp *g, const gmm__gtp_bundle *b, char *dst, size_t size, int scale,
                                       gmm_stream stream) {
    gmm_status s = GMM_OK;
    int32_t i, n;
    for (i = 0; i < b->count && !s; i += n) {
        const gmm_gtp_weight *first = &gmm__gtp_member(g, b, i)->desc;
        const char *src = (const char *)(scale ? first->scale[GMM_ROWWISE] : first->amax);
        for (n = 1; i + n < b->count; n++) {
            const gmm_gtp_weight *w = &gmm__gtp_member(g, b, i + n)->desc;
            if ((const char *)(scale ? w->scale[GMM_ROWWISE] : w->amax) != src + (size_t)n * size) break;
        }
        s = g->runtime.copy(g->runtime.self, dst + (size_t)i * size, src, (size_t)n * size, stream);
    }
    return s;
}

/* A gather of a bundle into its slot for a pass. */
typedef struct gmm__gtp_gathering {
    gmm__gtp_bundle *bundle;
    gmm__gtp_slot *slot, *row; /* row: the slot with the rowwise copy that is transposed; NULL = none */
    char *stage;
    int dir, transpose;        /* direction of the slot; 1: its copy is a transpose of the rowwise one */
    int staged;                /* 1: the gather uses the stage */
} gmm__gtp_gathering;

/* All-gathers the data and scales of bundles in one group call, to their slots, or to the stage where they are staged
   or transposed behind it. All data are sent before all scales, since peer copies merge consecutive calls with equal
   spacing into one 2D copy. */
static gmm_status gmm__gtp_all_gather(gmm_gtp *g, const gmm__gtp_gathering *list, int32_t count, gmm_stream stream) {
    const gmm__gtp_domain *d = &g->domains[list->bundle->domain];
    const gmm_comm *c = &d->gather;
    int32_t i, k, part, sends = 0;
    gmm_status s = GMM_OK;
    for (k = 0; k < count; k++) sends += !list[k].row;
    if (sends == 0) return GMM_OK;
    gmm__gtp_set_collective(g, d, "all_gather");
    s = c->group_begin(c->self, list->bundle->name);
    for (part = GMM__GTP_DATA; part <= GMM__GTP_SCALE; part++)
        for (k = 0; k < count; k++) {
            const gmm__gtp_gathering *x = &list[k];
            const int dir = x->transpose ? (int)GMM_ROWWISE : x->dir;
            for (i = 0; i < x->bundle->count && !x->row && !s; i++) {
                const gmm__gtp_weight *w = gmm__gtp_member(g, x->bundle, i);
                const gmm__gather_layout *l = &w->layout[dir][part];
                if (!l->send_bytes) continue;
                s = c->all_gather(c->self, part == GMM__GTP_DATA ? w->desc.data[dir] : w->desc.scale[dir],
                                  x->transpose || l->staged ? x->stage + l->stage_offset : x->slot->base + l->offset,
                                  l->send_bytes, stream);
                g->stats.gathered_bytes += (int64_t)l->send_bytes * (d->size - 1);
            }
        }
    if (!s) s = c->group_end(c->self);
    if (!s) g->collective = NULL;
    return s;
}

/* Copies the columns of all ranks from the stage to the slot, and zeros the bytes behind them and behind buffers that
   were received in place. */
static gmm_status gmm__gtp_unpack(gmm_gtp *g, const gmm__gtp_bundle *b, int dir, char *slot, const char *stage,
                                  gmm_stream stream) {
    const int32_t size = g->domains[b->domain].size;
    gmm_runtime *rt = &g->runtime;
    gmm_status s = GMM_OK;
    int32_t i, part, r;
    for (i = 0; i < b->count; i++)
        for (part = GMM__GTP_DATA; part <= GMM__GTP_SCALE; part++) {
            const gmm__gather_layout *l = &gmm__gtp_member(g, b, i)->layout[dir][part];
            const size_t rows = l->staged ? l->height * l->dst_pitch : l->send_bytes * (size_t)size;
            char *dst = slot + l->offset;
            if (!l->send_bytes) continue;
            for (r = 0; r < size && l->staged && !s; r++) {
                const size_t offset = (size_t)r * l->width;
                const size_t rest = offset < l->valid_width ? l->valid_width - offset : 0;
                if (rest)
                    s = rt->copy2d(rt->self, dst + offset, l->dst_pitch,
                                   stage + l->stage_offset + (size_t)r * l->send_bytes, l->src_pitch,
                                   rest < l->width ? rest : l->width, l->height, stream);
            }
            if (!s && l->staged && l->valid_width < l->dst_pitch)
                s = rt->fill2d(rt->self, dst + l->valid_width, l->dst_pitch, 0, l->dst_pitch - l->valid_width,
                               l->height, stream);
            if (!s && rows < l->gathered_bytes) s = rt->fill(rt->self, dst + rows, 0, l->gathered_bytes - rows, stream);
        }
    return s;
}

/* Transposes rowwise copies to columnwise copies in `slot`. The rowwise copies are those of another slot (`row`), or
   those in the stage, or with both NULL the shards themselves. */
static gmm_status gmm__gtp_transpose(gmm_gtp *g, const gmm__gtp_bundle *b, char *slot, const char *row,
                                     const char *stage, gmm_stream stream) {
    gmm_status s = GMM_OK;
    int32_t i;
    for (i = 0; i < b->count && !s; i++) {
        const gmm__gtp_weight *w = gmm__gtp_member(g, b, i);
        const gmm__gather_layout *data = w->layout[GMM_ROWWISE], *scale = data + 1, *to = w->layout[GMM_COLUMNWISE];
        const size_t local = (size_t)w->plan.local_rows, pitch = (size_t)w->plan.padded_rows;
        const int tensor = w->shard.scaling == GMM_SCALING_TENSOR;
        gmm__gtp_transposition t;
        gmm_range ranges[4];
        gmm_work work;
        memset(&t, 0, sizeof t);
        memset(&work, 0, sizeof work);
        memset(ranges, 0, sizeof ranges);
        t.ctx = g->config.ctx;
        t.d.count = 1;
        t.d.rows = w->plan.local_rows;
        t.d.cols = w->plan.local_cols;
        t.src.dtype = t.dst.dtype = w->shard.dtype;
        t.src.scaling = t.dst.scaling = w->shard.scaling;
        t.src.data = w->desc.data[GMM_ROWWISE];
        t.src.scale = w->desc.scale[GMM_ROWWISE];
        if (row) {
            t.src.data = (void *)(uintptr_t)(row + data->offset);
            t.src.scale = (void *)(uintptr_t)(row + scale->offset);
        } else if (stage) {
            t.src.data = (void *)(uintptr_t)(stage + data->stage_offset);
            if (!tensor) t.src.scale = (void *)(uintptr_t)(stage + scale->stage_offset);
        }
        t.dst.data = slot + to[GMM__GTP_DATA].offset;
        t.dst.scale = slot + to[GMM__GTP_SCALE].offset;
        t.dst.ld = w->plan.padded_rows;
        ranges[0].data = t.src.data;
        ranges[0].bytes = local * (size_t)w->plan.local_cols;
        ranges[1].data = t.src.scale;
        ranges[1].bytes = tensor ? sizeof(float) : scale->group_bytes;
        ranges[2].data = t.dst.data;
        ranges[2].bytes = pitch * (size_t)w->plan.local_cols;
        ranges[3].data = t.dst.scale;
        ranges[3].bytes = to[GMM__GTP_SCALE].gathered_bytes;
        ranges[2].writes = ranges[3].writes = 1;
        work.name = "transpose";
        work.function = gmm__gtp_transposition_run;
        work.argument = &t;
        work.argument_bytes = sizeof t;
        work.ranges = ranges;
        work.range_count = 4;
        s = g->runtime.run(g->runtime.self, &work, stream);
        if (!s && local < pitch)
            s = g->runtime.fill2d(g->runtime.self, (char *)t.dst.data + local, pitch, 0, pitch - local,
                                  (size_t)w->plan.local_cols, stream);
    }
    return s;
}

/* Records that `stream` has read a buffer. It first waits for the last reader, so that the event covers all readers. */
static gmm_status gmm__gtp_record_read(gmm_gtp *g, gmm__gtp_event *last_use, int *read, gmm_stream *reader,
                                       gmm_stream stream) {
    gmm_status s = GMM_OK;
    if (*read && *reader != stream) s = gmm__gtp_event_wait(g, last_use, stream);
    if (!s) s = gmm__gtp_event_record(g, last_use, stream);
    *read = 1;
    *reader = stream;
    return s;
}

/* Begins the gather of a bundle: makes `stream` wait for the shards, the slot and the stage, and assigns the
   slot. */
static gmm_status gmm__gtp_gather_begin(gmm_gtp *g, int32_t bundle, gmm_gtp_pass pass, gmm_stream stream,
                                        gmm__gtp_gathering *x) {
    gmm__gtp_bundle *b = &g->bundles[bundle];
    gmm__gtp_domain *d = &g->domains[b->domain];
    gmm__gtp_slot *slot = &g->slots[b->slot[pass]];
    const gmm__gtp_weight *first = gmm__gtp_member(g, b, 0);
    const int sharded = d->size > 1;
    gmm_status s = GMM_OK;
    x->bundle = b;
    x->slot = slot;
    x->row = NULL;
    x->stage = d->gather_base + d->stage_offset[b->captured] + b->stage_offset[pass];
    x->dir = gmm__slot_direction(slot->kind);
    x->transpose = first->transposed && x->dir == GMM_COLUMNWISE;
    if (sharded && x->transpose && gmm__gtp_slot_valid(g, &g->slots[b->slot[GMM_GTP_FORWARD]], bundle))
        x->row = &g->slots[b->slot[GMM_GTP_FORWARD]];
    x->staged = sharded && !x->row &&
                (x->transpose || first->layout[x->dir][0].staged || first->layout[x->dir][1].staged);
    if (g->graph) *gmm__gtp_graph_usage(g, g->graph - 1, bundle) |= GMM__GRAPH_READS;
    else s = gmm__gtp_event_wait(g, &b->published, stream);
    if (!s) s = gmm__gtp_event_wait(g, &slot->last_use, stream);
    if (!s && slot->ready.graph != g->graph) s = gmm__gtp_event_wait(g, &slot->ready, stream);
    if (!s && x->row) s = gmm__gtp_event_wait(g, &x->row->ready, stream);
    if (!s && x->staged) s = gmm__gtp_event_wait(g, &d->staged[b->captured], stream);
    slot->bundle = bundle;
    slot->version = b->version;
    slot->graph = g->graph;
    slot->pending = slot->read = 0;
    return s;
}
/* Ends the gather of a bundle, whose bytes have been received: moves them to their places, or transposes them. */
static gmm_status gmm__gtp_gather_end(gmm_gtp *g, const gmm__gtp_gathering *x, gmm_stream stream) {
    gmm__gtp_bundle *b = x->bundle;
    gmm__gtp_domain *d = &g->domains[b->domain];
    const gmm__gtp_weight *first = gmm__gtp_member(g, b, 0);
    const int sharded = d->size > 1;
    gmm_status s = x->transpose ? gmm__gtp_transpose(g, b, x->slot->base, x->row ? x->row->base : NULL,
                                                     sharded && !x->row ? x->stage : NULL, stream)
                                : gmm__gtp_unpack(g, b, x->dir, x->slot->base, x->stage, stream);
    if (!s && !x->transpose && first->shard.scaling == GMM_SCALING_TENSOR)
        s = gmm__gtp_copy_values(g, b, x->slot->base + first->layout[x->dir][GMM__GTP_SCALE].offset, sizeof(float), 1,
                                 stream);
    if (!s && first->shard.scaling == GMM_SCALING_NV16 && first->desc.amax)
        s = gmm__gtp_copy_values(g, b, x->slot->base + b->amax_offset[x->dir], sizeof(float), 0, stream);
    if (!s && x->staged) s = gmm__gtp_event_record(g, &d->staged[b->captured], stream);
    if (!s) s = gmm__gtp_event_record(g, &x->slot->ready, stream);
    /* records `ready` of the forward slot again, so that the next gather into it waits for the transpose */
    if (!s && x->row) s = gmm__gtp_event_record(g, &x->row->ready, stream);
    if (!s && !sharded) s = gmm__gtp_record_read(g, &b->in_place, &b->in_place.recorded, &b->reader, stream);
    g->stats.gathers++;
    g->stats.transposed += x->row || !sharded;
    return s;
}

/* Gathers bundles of one domain into their slots for a pass, in one group call on the gather stream. A columnwise copy
   that shards do not store is transposed from the rowwise copy of the forward slot if that is valid, else from shards
   gathered in the stage. With one rank the shards are transposed, on `stream`. */
static gmm_status gmm__gtp_gather(gmm_gtp *g, const int32_t *bundles, int32_t count, gmm_gtp_pass pass,
                                  gmm_stream stream) {
    gmm__gtp_domain *d = &g->domains[g->bundles[bundles[0]].domain];
    const int sharded = d->size > 1;
    gmm__gtp_gathering list[GMM__GTP_MAX_TOGETHER];
    gmm__watch *watch = NULL;
    gmm_status s = GMM_OK;
    int32_t k;
    if (sharded) {
        stream = d->desc.gather_stream;
        s = gmm__gtp_prepare_stream(g, d, GMM__GTP_GATHER);
    }
    for (k = 0; k < count && !s; k++) s = gmm__gtp_gather_begin(g, bundles[k], pass, stream, &list[k]);
    if (!s && sharded) s = gmm__watch_begin(g, d, GMM__GTP_GATHER, &watch);
    if (!s && sharded) s = gmm__gtp_all_gather(g, list, count, stream);
    for (k = 0; k < count && !s; k++) s = gmm__gtp_gather_end(g, &list[k], stream);
    return s ? s : gmm__watch_end(g, d, GMM__GTP_GATHER, watch, &d->gather, "all_gather", list->bundle->name);
}

/* Begins to gather a bundle ahead of its acquire: counts it, and marks a slot that holds it already. Returns 1 if it
   must be gathered: it is not resident, its slot is not in use, and the caller's hook has not failed (g->failed). */
static int gmm__gtp_begin_prefetch(gmm_gtp *g, int32_t bundle, gmm_gtp_pass pass) {
    gmm__gtp_bundle *b = &g->bundles[bundle];
    gmm__gtp_slot *slot;
    if (b->slot[pass] < 0 || g->domains[b->domain].size == 1) return 0;
    slot = &g->slots[b->slot[pass]];
    if (slot->acquired && slot->bundle != bundle) {
        g->stats.busy++;
        return 0;
    }
    if (pass == GMM_GTP_FORWARD && gmm__gtp_request_publish(g, b) != GMM_OK) return 0;
    if (gmm__gtp_slot_valid(g, slot, bundle)) {
        if (!slot->pending) slot->pending = 2;
        return 0;
    }
    if (slot->acquired || (slot->pending && slot->bundle >= 0 && slot->bundle != bundle &&
                           gmm__gtp_slot_valid(g, slot, slot->bundle))) {
        g->stats.busy++;
        return 0;
    }
    g->stats.outdated += gmm__gtp_is_outdated(g, slot);
    g->stats.prefetches++;
    return 1;
}
/* Gathers a bundle, and in the same group call those that follow it in its chain up to the next multiple of `together`,
   unless they are resident or their slots are in use. */
static gmm_status gmm__gtp_gather_together(gmm_gtp *g, int32_t bundle, gmm_gtp_pass pass, gmm_stream stream) {
    const gmm__gtp_bundle *b = &g->bundles[bundle];
    const gmm__gtp_chain *c = b->chain[pass] < 0 ? NULL : &g->chains[b->chain[pass]];
    int32_t list[GMM__GTP_MAX_TOGETHER], count = 1, i;
    gmm_status s;
    list[0] = bundle;
    for (i = b->position[pass] + 1; c && i < c->count && i % c->together; i++) {
        const int32_t next = g->chain_bundles[c->first + i];
        /* gmm_gtp_seal gives each a slot of its own */
        if (gmm__gtp_begin_prefetch(g, next, pass)) list[count++] = next;
    }
    if (g->failed) return g->failed;
    s = gmm__gtp_gather(g, list, count, pass, stream);
    for (i = 1; i < count; i++) g->slots[g->bundles[list[i]].slot[pass]].pending = 1;
    return s;
}
/* Gathers a bundle ahead of its acquire, unless it is resident or its slot is in use. */
static gmm_status gmm__gtp_prefetch_bundle(gmm_gtp *g, int32_t bundle, gmm_gtp_pass pass) {
    gmm_status s;
    if (!gmm__gtp_begin_prefetch(g, bundle, pass)) return g->failed;
    s = gmm__gtp_gather_together(g, bundle, pass, NULL);
    g->slots[g->bundles[bundle].slot[pass]].pending = 1;
    return s;
}

/* Gathers the bundles that follow in the chain, as many as its `prefetch` says. */
static gmm_status gmm__gtp_prefetch_successors(gmm_gtp *g, const gmm__gtp_bundle *b, gmm_gtp_pass pass) {
    const int32_t chain = b->chain[pass], count = chain < 0 ? 0 : g->chains[chain].prefetch;
    gmm_status s = GMM_OK;
    int32_t k;
    for (k = 1; k <= count && !s; k++) {
        gmm_gtp_pass next_pass = pass;
        const gmm__gtp_bundle *x = gmm__gtp_successor(g, chain, b->position[pass], k, &next_pass);
        if (!x) break;
        s = gmm__gtp_prefetch_bundle(g, (int32_t)(x - g->bundles), next_pass);
    }
    return s;
}

/* Views of gathered weights: acquire, release, prefetch, the order of chains. */

/* Addresses and format of the matrices of a bundle, from which a view is made. */
typedef struct gmm__gtp_operand {
    gmm_dtype dtype;
    gmm_scaling scaling;
    void *const *data, *const *scales; /* [count] */
    int packed;                        /* 1: group_stride describes the addresses; 0: the view refers to the tables */
    int64_t group_stride, ld;
} gmm__gtp_operand;

/* The view of `count` weights of a bundle from `first` on, over an operand. */
static gmm_gtp_view gmm__gtp_make_view(gmm_gtp *g, const gmm__gtp_bundle *b, int32_t first, int32_t count,
                                       const gmm__gtp_operand *o) {
    const gmm__gtp_weight *w = gmm__gtp_member(g, b, first);
    gmm_gtp_view v = GMM_ZERO;
    v.count = count;
    v.rows = w->plan.local_rows;
    v.cols = w->plan.local_cols;
    v.version = b->version;
    v.slot = -1;
    v.mat.dtype = o->dtype;
    v.mat.scaling = o->scaling;
    v.mat.ld = o->ld;
    if (o->packed) {
        v.mat.data = o->data[0];
        v.mat.group_stride = count > 1 ? o->group_stride : 0;
        v.mat.scale = o->scaling == GMM_SCALING_NONE ? NULL : o->scales[0];
    } else {
        v.mat.table = o->data;
        v.mat.scale_table = o->scaling == GMM_SCALING_NONE ? NULL : o->scales;
        v.mat.flags = (uint32_t)GMM_MAT_TABLE_ON_HOST;
    }
    v.mat.amax = o->scaling == GMM_SCALING_NV16 ? w->desc.amax : NULL;
    return v;
}
/* Whether the weights of a bundle from `first` on have one shape. */
static int gmm__gtp_uniform(gmm_gtp *g, const gmm__gtp_bundle *b, int32_t first, int32_t count) {
    int32_t i;
    for (i = 1; i < count; i++)
        if (!gmm__gtp_same_shape(gmm__gtp_member(g, b, first), gmm__gtp_member(g, b, first + i))) return 0;
    return 1;
}
/* The view of `count` weights from `begin` on; `columnwise` is the target of mat.columnwise. */
static gmm_gtp_view gmm__gtp_view_pass(gmm_gtp *g, gmm__gtp_bundle *b, gmm_gtp_pass pass, int32_t begin, int32_t count,
                                       gmm_mat *columnwise) {
    const gmm__gtp_weight *w = gmm__gtp_member(g, b, begin);
    const int dir = gmm__slot_direction(gmm__slot_kind(g, b, pass)), slot = b->slot[pass];
    const gmm__gather_layout *scale = &w->layout[dir][GMM__GTP_SCALE];
    const int64_t bits = gmm_dtype_bits(w->shard.dtype);
    gmm__gtp_operand o;
    gmm_gtp_view v;
    o.dtype = w->shard.dtype;
    o.scaling = w->shard.scaling;
    o.data = g->table[pass] + b->first + begin;
    o.scales = g->scales[pass] + b->first + begin;
    o.packed = count == 1 || (slot >= 0 && gmm__gtp_uniform(g, b, begin, count) &&
                              scale->gathered_bytes == scale->group_bytes);
    o.group_stride = (int64_t)gmm__round256(w->layout[dir][GMM__GTP_DATA].gathered_bytes) * 8 / bits;
    o.ld = slot >= 0 ? w->ld[dir] : 0;
    v = gmm__gtp_make_view(g, b, begin, count, &o);
    if (w->format.e4m3_256) v.mat.flags |= (uint32_t)GMM_MAT_E4M3_256;
    if (slot >= 0 && w->shard.scaling == GMM_SCALING_NV16 && w->desc.amax)
        v.mat.amax = (float *)(void *)(g->slots[slot].base + b->amax_offset[dir]) + begin;
    v.slot = slot;
    if (dir == GMM_COLUMNWISE) { /* the view has no rowwise copy, and operations that read one are refused */
        *columnwise = v.mat;
        v.mat.data = v.mat.scale = NULL;
        v.mat.table = v.mat.scale_table = NULL;
        v.mat.amax = NULL;
        v.mat.flags = 0;
        v.mat.ld = v.mat.group_stride = 0;
        v.mat.columnwise = columnwise;
    }
    return v;
}

/* Multiprocessors that a GEMM of the bundle should leave free (gmm_gtp_view.leave) for concurrent work: gathers of the
   next bundles, and except in forward reductions, whose sums are kernels. A kernel that finds no free multiprocessor
   waits until the GEMM ends. */
enum { GMM__GTP_SUM_PROCESSORS = 16 };
static int32_t gmm__gtp_reserved_processors(const gmm_gtp *g, const gmm__gtp_bundle *b, gmm_gtp_pass pass) {
    const gmm__gtp_domain *d = &g->domains[b->domain];
    const int32_t chain = b->chain[pass];
    int32_t processors = 0;
    if (d->size == 1) return 0;
    if (chain >= 0 && g->chains[chain].prefetch > 0) processors = d->gather.processors;
    if (pass != GMM_GTP_FORWARD && d->reduce.processors > processors) processors = d->reduce.processors;
    if (pass != GMM_GTP_FORWARD && processors < GMM__GTP_SUM_PROCESSORS) processors = GMM__GTP_SUM_PROCESSORS;
    return processors;
}

GMMDEF gmm_status gmm_gtp_acquire(gmm_gtp *gtp, int32_t bundle, gmm_gtp_pass pass, gmm_stream stream,
                                  gmm_gtp_view *view) {
    static const char fn[] = "gmm_gtp_acquire";
    gmm__gtp_bundle *b;
    gmm__gtp_slot *slot;
    gmm_gtp_view v;
    size_t common;
    gmm_status s = gmm__gtp_check_pass(gtp, fn, bundle, pass);
    if (s) return s;
    common = gmm__gtp_common_size(fn, "view", view, sizeof *view, &s, &gtp->error);
    if (s) return s;
    b = &gtp->bundles[bundle];
    slot = b->slot[pass] >= 0 ? &gtp->slots[b->slot[pass]] : NULL;
    if (b->acquired >> pass & 1u)
        return gmm__fail(&gtp->error, GMM_E_STATE, "%s: '%s' is acquired already for pass %d", fn, b->name, (int)pass);
    if (slot && slot->acquired && slot->bundle != bundle)
        return gmm__fail(&gtp->error, GMM_E_STATE, "%s: '%s': its slot holds '%s', which is not released: release it, "
                         "or raise gmm_gtp_chain.held", fn, b->name, gtp->bundles[slot->bundle].name);
    if (pass == GMM_GTP_FORWARD && (s = gmm__gtp_request_publish(gtp, b)) != GMM_OK) return s;
    if (slot && slot->acquired && !gmm__gtp_slot_valid(gtp, slot, bundle))
        return gmm__fail(&gtp->error, GMM_E_STATE, "%s: '%s' was published while another pass holds it", fn, b->name);
    gmm__gtp_hash(gtp, 1, bundle, (int)pass);
    b->publish_requested = pass == GMM_GTP_FORWARD ? 0 : b->publish_requested;
    gtp->stats.acquires++;
    if (!slot) {
        gtp->stats.resident++;
        if (gtp->graph) *gmm__gtp_graph_usage(gtp, gtp->graph - 1, bundle) |= GMM__GRAPH_READS;
        else s = gmm__gtp_event_wait(gtp, &b->published, stream);
    } else {
        if (gmm__gtp_slot_valid(gtp, slot, bundle)) {
            if (slot->pending == 1) gtp->stats.prefetched++;
            else gtp->stats.resident++;
        } else {
            gtp->stats.exposed++;
            gtp->stats.outdated += gmm__gtp_is_outdated(gtp, slot);
            s = gmm__gtp_gather_together(gtp, bundle, pass, stream);
        }
        if (!s) s = gmm__gtp_event_wait(gtp, &slot->ready, stream);
        slot->pending = 0;
        slot->graph = gtp->graph;
        slot->acquired |= 1u << pass;
    }
    b->acquired |= 1u << pass;
    if (!s) s = gmm__gtp_prefetch_successors(gtp, b, pass);
    if (s) return gmm__gtp_fail(gtp, fn, b->name, s);
    v = gmm__gtp_view_pass(gtp, b, pass, 0, b->count, &b->columnwise);
    v.leave = gmm__gtp_reserved_processors(gtp, b, pass);
    v.struct_size = view->struct_size;
    memcpy(view, &v, common);
    return GMM_OK;
}

/* Checks what gmm_gtp_view_part and gmm_gtp_wgrad_part are called with. */
static gmm_status gmm__gtp_check_part(gmm_gtp *g, const char *fn, int32_t bundle, int32_t first, int32_t count) {
    const gmm__gtp_bundle *b = &g->bundles[bundle];
    if (first < 0 || count < 1 || first >= b->count || count > b->count - first)
        return gmm__fail(&g->error, GMM_E_ARG, "%s: '%s': weights %d to %lld: it has %d", fn, b->name, first,
                         (long long)first + count - 1, b->count);
    if (!gmm__gtp_uniform(g, b, first, count))
        return gmm__fail(&g->error, GMM_E_CONFIG, "%s: '%s': weights %d to %d differ in shape", fn, b->name, first,
                         first + count - 1);
    return GMM_OK;
}
GMMDEF gmm_status gmm_gtp_view_part(gmm_gtp *gtp, int32_t bundle, gmm_gtp_pass pass, int32_t first, int32_t count,
                                    gmm_gtp_view *part) {
    static const char fn[] = "gmm_gtp_view_part";
    gmm_gtp_view v;
    gmm__gtp_bundle *b;
    size_t common;
    gmm_status s = gmm__gtp_check_pass(gtp, fn, bundle, pass);
    if (s) return s;
    common = gmm__gtp_common_size(fn, "part", part, sizeof *part, &s, &gtp->error);
    if (!s) s = gmm__gtp_check_part(gtp, fn, bundle, first, count);
    if (s) return s;
    b = &gtp->bundles[bundle];
    if (!(b->acquired >> pass & 1u))
        return gmm__fail(&gtp->error, GMM_E_STATE, "%s: '%s' is not acquired for pass %d", fn, b->name, (int)pass);
    v = gmm__gtp_view_pass(gtp, b, pass, first, count, &gmm__gtp_member(gtp, b, first)->columnwise);
    v.leave = gmm__gtp_reserved_processors(gtp, b, pass);
    v.struct_size = part->struct_size;
    memcpy(part, &v, common);
    return GMM_OK;
}

GMMDEF gmm_status gmm_gtp_release(gmm_gtp *gtp, int32_t bundle, gmm_gtp_pass pass, gmm_stream stream) {
    static const char fn[] = "gmm_gtp_release";
    gmm__gtp_bundle *b;
    gmm__gtp_slot *slot;
    gmm_status s = gmm__gtp_check_pass(gtp, fn, bundle, pass);
    if (s) return s;
    b = &gtp->bundles[bundle];
    if (!(b->acquired >> pass & 1u))
        return gmm__fail(&gtp->error, GMM_E_STATE, "%s: '%s' is not acquired for pass %d", fn, b->name, (int)pass);
    slot = b->slot[pass] >= 0 ? &gtp->slots[b->slot[pass]] : NULL;
    s = slot ? gmm__gtp_record_read(gtp, &slot->last_use, &slot->read, &slot->reader, stream)
             : gmm__gtp_record_read(gtp, &b->in_place, &b->in_place.recorded, &b->reader, stream);
    b->acquired &= ~(1u << pass);
    if (slot) slot->acquired &= ~(1u << pass);
    return s ? gmm__gtp_fail(gtp, fn, b->name, s) : GMM_OK;
}

GMMDEF gmm_status gmm_gtp_prefetch(gmm_gtp *gtp, int32_t bundle, gmm_gtp_pass pass) {
    static const char fn[] = "gmm_gtp_prefetch";
    gmm_status s = gmm__gtp_check_pass(gtp, fn, bundle, pass);
    if (s) return s;
    gmm__gtp_hash(gtp, 2, bundle, (int)pass);
    s = gmm__gtp_prefetch_bundle(gtp, bundle, pass);
    return s ? gmm__gtp_fail(gtp, fn, gtp->bundles[bundle].name, s) : GMM_OK;
}

GMMDEF gmm_status gmm_gtp_follow(gmm_gtp *gtp, int32_t chain, int32_t next) {
    if (!gtp) return GMM_E_NULL;
    if (gtp->failed) return gtp->failed;
    if (chain < 0 || chain >= gtp->chain_count || next < -1 || next >= gtp->chain_count)
        return gmm__fail(&gtp->error, GMM_E_ARG, "gmm_gtp_follow: chain %d, next %d: there are %d", chain,
                         next, gtp->chain_count);
    if (next >= 0 && gtp->chains[next].captured != gtp->chains[chain].captured)
        return gmm__fail(&gtp->error, GMM_E_CAPTURE, "gmm_gtp_follow: chain %d is %scaptured, chain %d is not alike",
                         chain, gtp->chains[chain].captured ? "" : "not ", next);
    gmm__gtp_hash(gtp, 7, chain, 0);
    gmm__gtp_hash(gtp, 7, next, 1);
    gtp->chains[chain].next = next;
    return GMM_OK;
}

/* Publication of new shards: gathers that are enqueued later wait for them, and gathered copies are outdated. */

/* Checks an array of weight ids. */
static gmm_status gmm__gtp_check_weights(gmm_gtp *g, const char *fn, const int32_t *weights, int32_t count) {
    int32_t i;
    if (!weights || count < 0)
        return gmm__fail(&g->error, weights ? GMM_E_ARG : GMM_E_NULL, "%s: weights is %s, count %d", fn,
                         weights ? "given" : "NULL", count);
    for (i = 0; i < count; i++)
        if (weights[i] < 0 || weights[i] >= g->weight_count)
            return gmm__fail(&g->error, GMM_E_ARG, "%s: weights[%d] is %d: there are %d", fn, i, (int)weights[i],
                             g->weight_count);
    return GMM_OK;
}
static gmm_status gmm__gtp_record_publish(gmm_gtp *g, const int32_t *weights, int32_t count, gmm_stream stream) {
    gmm_status s = GMM_OK;
    int32_t i, k;
    for (i = 0; i < count && !s; i++) {
        gmm__gtp_bundle *b = &g->bundles[g->weights[weights[i]].bundle];
        for (k = 0; k < i && g->weights[weights[k]].bundle != g->weights[weights[i]].bundle; k++) { }
        if (k < i) continue; /* once per bundle */
        gmm__gtp_hash(g, 6, (int32_t)(b - g->bundles), 0);
        /* other weights of the bundle may have been published on other streams */
        if (b->published.recorded) s = gmm__gtp_event_wait(g, &b->published, stream);
        if (!s) s = gmm__gtp_event_record(g, &b->published, stream);
        b->version++;
    }
    return s;
}

GMMDEF gmm_status gmm_gtp_publish(gmm_gtp *gtp, const int32_t *weights, int32_t count, gmm_stream stream) {
    static const char fn[] = "gmm_gtp_publish";
    gmm_status s = gmm__gtp_check_call(gtp, fn, GMM__GTP_IN_CALLBACK | GMM__GTP_NO_CAPTURE);
    if (!s) s = gmm__gtp_check_weights(gtp, fn, weights, count);
    if (s) return s;
    s = gmm__gtp_record_publish(gtp, weights, count, stream);
    return s ? gmm__gtp_fail(gtp, fn, "shards", s) : GMM_OK;
}

/* Gradients of a bundle: gmm_gtp_wgrad gives their buffer, gmm_gtp_submit reduces them over the ranks and adds them to
   main_grad. */

/* The view of `count` gradients of a bundle from `first` on. */
static gmm_gtp_view gmm__gtp_view_wgrad(gmm_gtp *g, const gmm__gtp_bundle *b, int32_t first, int32_t count) {
    const gmm_dtype wire = g->domains[b->domain].desc.wire;
    gmm__gtp_operand o;
    gmm_gtp_view v;
    memset(&o, 0, sizeof o);
    o.dtype = wire;
    o.scaling = GMM_SCALING_NONE;
    o.data = g->grads + b->first + first;
    o.packed = gmm__gtp_uniform(g, b, first, count);
    if (count > 1)
        o.group_stride = (int64_t)(gmm__gtp_member(g, b, first + 1)->grad_offset -
                                   gmm__gtp_member(g, b, first)->grad_offset) * 8 / gmm_dtype_bits(wire);
    v = gmm__gtp_make_view(g, b, first, count, &o);
    v.slot = b->wgrad_slot;
    v.leave = gmm__gtp_reserved_processors(g, b, GMM_GTP_BACKWARD);
    return v;
}
GMMDEF gmm_status gmm_gtp_wgrad(gmm_gtp *gtp, int32_t bundle, gmm_stream stream, gmm_gtp_view *view) {
    static const char fn[] = "gmm_gtp_wgrad";
    gmm__gtp_bundle *b;
    gmm__wgrad_slot *slot;
    gmm_gtp_view v;
    gmm_dtype wire;
    int32_t i;
    size_t common;
    gmm_status s = gmm__gtp_check_bundle(gtp, fn, bundle);
    if (s) return s;
    common = gmm__gtp_common_size(fn, "view", view, sizeof *view, &s, &gtp->error);
    if (s) return s;
    b = &gtp->bundles[bundle];
    if (b->wgrad_slot < 0) return gmm__fail(&gtp->error, GMM_E_STATE, "%s: '%s' is frozen", fn, b->name);
    slot = &gtp->wgrad_slots[b->wgrad_slot];
    if (slot->writer == bundle)
        return gmm__fail(&gtp->error, GMM_E_STATE, "%s: '%s' has a buffer already: submit it first", fn, b->name);
    if (slot->writer >= 0)
        return gmm__fail(&gtp->error, GMM_E_STATE, "%s: '%s': its buffer is that of '%s', which is not submitted: "
                         "raise gmm_gtp_domain.wgrad_slots", fn, b->name, gtp->bundles[slot->writer].name);
    wire = gtp->domains[b->domain].desc.wire;
    s = gmm__gtp_event_wait(gtp, &slot->last_use, stream);
    for (i = 0; i < b->count && !s; i++) {
        const gmm__gtp_weight *w = gmm__gtp_member(gtp, b, i);
        const size_t row = (size_t)w->plan.local_cols * (size_t)gmm_dtype_bits(wire) / 8;
        if (w->plan.pad > 0)
            s = gtp->runtime.fill(gtp->runtime.self, slot->base + w->grad_offset + (size_t)w->plan.local_rows * row, 0,
                                  (size_t)w->plan.pad * row, stream);
    }
    slot->writer = bundle;
    if (s) return gmm__gtp_fail(gtp, fn, b->name, s);
    v = gmm__gtp_view_wgrad(gtp, b, 0, b->count);
    v.struct_size = view->struct_size;
    memcpy(view, &v, common);
    return GMM_OK;
}

GMMDEF gmm_status gmm_gtp_wgrad_part(gmm_gtp *gtp, int32_t bundle, int32_t first, int32_t count, gmm_gtp_view *part) {
    static const char fn[] = "gmm_gtp_wgrad_part";
    const gmm__gtp_bundle *b;
    gmm_gtp_view v;
    size_t common;
    gmm_status s = gmm__gtp_check_bundle(gtp, fn, bundle);
    if (s) return s;
    common = gmm__gtp_common_size(fn, "part", part, sizeof *part, &s, &gtp->error);
    if (!s) s = gmm__gtp_check_part(gtp, fn, bundle, first, count);
    if (s) return s;
    b = &gtp->bundles[bundle];
    if (b->wgrad_slot < 0 || gtp->wgrad_slots[b->wgrad_slot].writer != bundle)
        return gmm__fail(&gtp->error, GMM_E_STATE, "%s: '%s' has no buffer: call gmm_gtp_wgrad first", fn, b->name);
    v = gmm__gtp_view_wgrad(gtp, b, first, count);
    v.struct_size = part->struct_size;
    memcpy(part, &v, common);
    return GMM_OK;
}

/* Arguments of the copy of a gradient of the caller into the gradient buffer. */
typedef struct gmm__gtp_conversion {
    gmm_context *ctx;
    gmm_conversion d;
    gmm_mat src, dst;
} gmm__gtp_conversion;
static gmm_status gmm__gtp_conversion_run(const void *argument, gmm_stream stream) {
    gmm__gtp_conversion t = *(const gmm__gtp_conversion *)argument;
    t.d.src = &t.src;
    t.d.dst = &t.dst;
    return gmm_convert(t.ctx, &t.d, NULL, 0, stream);
}

/* Checks a gradient of the caller. */
static gmm_status gmm__gtp_check_gradient(gmm_gtp *g, const char *fn, const gmm__gtp_bundle *b, const gmm_mat *source) {
    int32_t i;
    if ((source->dtype != GMM_F32 && source->dtype != GMM_BF16 && source->dtype != GMM_F16) || source->scaling)
        return gmm__fail(&g->error, GMM_E_DTYPE, "%s: '%s': from is %s, scaling %s: must be f32, bf16 or f16, and none",
                         fn, b->name, gmm_dtype_name(source->dtype), gmm_scaling_name(source->scaling));
    if (!source->data == !source->table)
        return gmm__fail(&g->error, GMM_E_NULL, "%s: '%s': from has %s", fn, b->name,
                         source->data ? "data and a table" : "neither data nor a table");
    for (i = 0; i < b->count; i++) {
        const gmm_shard_plan *p = &gmm__gtp_member(g, b, i)->plan;
        const int64_t ld = source->ld ? source->ld : p->local_cols;
        const int packed = source->data && b->count > 1;
        const int64_t stride = packed ? source->group_stride : 0;
        void *const data = source->table ? source->table[i] : source->data;
        int64_t matrix, elements, bytes;
        if (!data) return gmm__fail(&g->error, GMM_E_NULL, "%s: '%s': from->table[%d] is NULL", fn, b->name, i);
        if (ld < p->local_cols || (packed && !gmm__gtp_uniform(g, b, 0, b->count)))
            return gmm__fail(&g->error, GMM_E_STRIDE, "%s: '%s': from: ld %lld is below %lld columns, or packed with "
                             "different shapes", fn, b->name, (long long)ld, (long long)p->local_cols);
        if (!gmm__mul(p->local_rows, ld, &matrix) ||
            !gmm__mul(packed ? b->count : 1, stride > matrix ? stride : matrix, &elements) ||
            !gmm__mul(elements, 8, &bytes))
            return gmm__fail(&g->error, GMM_E_OVERFLOW, "%s: '%s': from: %d matrices of %lld rows, ld %lld, "
                             "group_stride %lld do not fit 64 bits", fn, b->name, b->count, (long long)p->local_rows,
                             (long long)ld, (long long)stride);
        if (stride && stride < (p->local_rows - 1) * ld + p->local_cols)
            return gmm__fail(&g->error, GMM_E_STRIDE, "%s: '%s': from: group_stride %lld is less than a matrix", fn,
                             b->name, (long long)stride);
        if ((uintptr_t)data % (uintptr_t)(gmm_dtype_bits(source->dtype) / 8))
            return gmm__fail(&g->error, GMM_E_ALIGN, "%s: '%s': from: %p is not aligned to its %s elements", fn,
                             b->name, data, gmm_dtype_name(source->dtype));
    }
    return GMM_OK;
}

/* Copies the gradient of a bundle into its buffer; NULL = zeros. */
static gmm_status gmm__gtp_copy_gradient(gmm_gtp *g, const gmm__gtp_bundle *b, const gmm_mat *source,
                                         gmm_stream stream) {
    const gmm__wgrad_slot *slot = &g->wgrad_slots[b->wgrad_slot];
    const gmm_dtype wire = g->domains[b->domain].desc.wire;
    int32_t i;
    gmm_status s = GMM_OK;
    if (!source) return g->runtime.fill(g->runtime.self, slot->base, 0, slot->bytes, stream);
    for (i = 0; i < b->count && !s; i++) {
        const gmm__gtp_weight *w = gmm__gtp_member(g, b, i);
        const int64_t ld = source->ld ? source->ld : w->plan.local_cols;
        const int64_t stride = source->group_stride ? source->group_stride : w->plan.local_rows * ld;
        const int64_t size = gmm_dtype_bits(source->dtype) / 8;
        gmm_range ranges[2];
        gmm_work work;
        gmm__gtp_conversion c;
        memset(&c, 0, sizeof c);
        memset(&work, 0, sizeof work);
        memset(ranges, 0, sizeof ranges);
        c.ctx = g->config.ctx;
        c.d.rows = w->plan.local_rows;
        c.d.cols = w->plan.local_cols;
        c.src = gmm_mat_packed(source->dtype, source->table ? source->table[i]
                                                            : (const char *)source->data + i * stride * size);
        c.src.ld = ld;
        c.dst = gmm_mat_packed(wire, slot->base + w->grad_offset);
        ranges[0].data = c.src.data;
        ranges[0].bytes = (size_t)(((w->plan.local_rows - 1) * ld + w->plan.local_cols) * size);
        ranges[1].data = c.dst.data;
        ranges[1].bytes = (size_t)(w->plan.local_rows * w->plan.local_cols * gmm_dtype_bits(wire) / 8);
        ranges[1].writes = 1;
        work.name = "take gradient";
        work.function = gmm__gtp_conversion_run;
        work.argument = &c;
        work.argument_bytes = sizeof c;
        work.ranges = ranges;
        work.range_count = 2;
        s = g->runtime.run(g->runtime.self, &work, stream);
    }
    return s;
}

/* Multiprocessors for the sum of a weight: as many as the GEMMs of the backward chain leave free, or 0 = all. It is 0
   for the last bundle of the chain, behind which no GEMM runs, and where main_grad is not fp32 or does not admit vector
   accesses, so that gmm_accumulate would be too slow on few of them. */
static int32_t gmm__gtp_sum_processors(gmm_gtp *g, const gmm__gtp_bundle *b, const gmm__gtp_weight *w) {
    gmm_gtp_pass pass = GMM_GTP_FORWARD;
    const int32_t chain = b->chain[GMM_GTP_BACKWARD];
    const int64_t elements = w->plan.shard_rows * w->plan.local_cols;
    if (g->domains[b->domain].size == 1 || w->desc.main_grad_dtype != GMM_F32 || elements % 8 ||
        (uintptr_t)w->desc.main_grad % 16)
        return 0;
    if (chain < 0 || !gmm__gtp_successor(g, chain, b->position[GMM_GTP_BACKWARD], 1, &pass)) return 0;
    return pass == GMM_GTP_BACKWARD ? GMM__GTP_SUM_PROCESSORS : 0;
}

/* Enqueues the reduction of a bundle and its sums into main_grad on the reduce stream. */
static gmm_status gmm__gtp_reduce_bundle(gmm_gtp *g, int32_t bundle, float scale, gmm_gtp_add add) {
    gmm__gtp_bundle *b = &g->bundles[bundle];
    gmm__gtp_domain *d = &g->domains[b->domain];
    gmm__wgrad_slot *slot = &g->wgrad_slots[b->wgrad_slot];
    const gmm_stream stream = d->desc.reduce_stream;
    const gmm_comm *c = &d->reduce;
    const int exchange = d->desc.reduction == GMM_GTP_REDUCE_EXCHANGE;
    const size_t size = (size_t)gmm_dtype_bits(d->desc.wire) / 8;
    int32_t i;
    gmm__watch *watch = NULL;
    gmm_status s = d->size > 1 ? gmm__watch_begin(g, d, GMM__GTP_REDUCE, &watch) : GMM_OK;
    if (!s) gmm__gtp_set_collective(g, d, exchange ? "all_to_all" : "reduce_scatter");
    if (!s && d->size > 1) s = c->group_begin(c->self, b->name);
    for (i = 0; i < b->count && d->size > 1 && !s; i++) {
        const gmm__gtp_weight *w = gmm__gtp_member(g, b, i);
        const size_t elements = (size_t)w->plan.shard_rows * (size_t)w->plan.local_cols;
        char *send = slot->base + w->grad_offset;
        if (!w->desc.main_grad) continue;
        g->stats.reduced_bytes += (int64_t)(elements * size) * (d->size - 1);
        s = exchange ? c->all_to_all(c->self, send, d->reduce_base + d->recv_offset + w->grad_offset, elements * size,
                                     stream)
                     : c->reduce_scatter(c->self, send, send + (size_t)d->rank * elements * size, elements,
                                         d->desc.wire, stream);
    }
    if (!s && d->size > 1) s = c->group_end(c->self);
    if (!s) g->collective = NULL;
    for (i = 0; i < b->count && !s && !g->dry_run; i++) {
        const gmm__gtp_weight *w = gmm__gtp_member(g, b, i);
        const size_t elements = (size_t)w->plan.shard_rows * (size_t)w->plan.local_cols;
        gmm__gtp_sum sum = gmm__gtp_sum_make(g, d, w);
        char *own_part = slot->base + w->grad_offset + (size_t)d->rank * elements * size;
        char *received = d->reduce_base + d->recv_offset;
        gmm_range ranges[5];
        gmm_work work;
        int32_t r;
        if (!w->desc.main_grad) continue;
        memset(&work, 0, sizeof work);
        memset(ranges, 0, sizeof ranges);
        received += w->grad_offset;
        for (r = 0; r < sum.d.count && sum.d.count > 1; r++)
            sum.part[r] = r == d->rank ? own_part : received + (size_t)r * elements * size;
        sum.x.data = own_part;
        sum.options.sm_limit = gmm__gtp_sum_processors(g, b, w);
        sum.d.scale = scale;
        sum.d.beta = add == GMM_GTP_SET ? 0.0f : 1.0f;
        sum.workspace = d->reduce_base + d->workspace_offset;
        sum.workspace_bytes = d->workspace_bytes;
        ranges[0].data = own_part;
        ranges[0].bytes = elements * size;
        ranges[1].data = w->desc.main_grad;
        ranges[1].bytes = elements * (size_t)gmm_dtype_bits(w->desc.main_grad_dtype) / 8;
        ranges[1].writes = 1;
        ranges[2].data = sum.workspace;
        ranges[2].bytes = d->workspace_bytes;
        ranges[2].writes = 1;
        if (sum.d.count > 1) {
            ranges[3].data = received;
            ranges[3].bytes = (size_t)d->rank * elements * size;
            ranges[4].data = received + (size_t)(d->rank + 1) * elements * size;
            ranges[4].bytes = (size_t)(d->size - 1 - d->rank) * elements * size;
        }
        work.name = "add to main_grad";
        work.function = gmm__gtp_sum_run;
        work.argument = &sum;
        work.argument_bytes = sizeof sum;
        work.ranges = ranges;
        work.range_count = sum.d.count > 1 ? 5 : 3;
        s = g->runtime.run(g->runtime.self, &work, stream);
    }
    if (!s) s = gmm__gtp_event_record(g, &slot->last_use, stream);
    if (!s) s = gmm__gtp_event_record(g, &b->done, stream);
    return s ? s : gmm__watch_end(g, d, GMM__GTP_REDUCE, watch, c, exchange ? "all_to_all" : "reduce_scatter",
                                  b->name);
}

GMMDEF gmm_status gmm_gtp_submit(gmm_gtp *gtp, int32_t bundle, const gmm_gtp_gradient *gradient, gmm_stream stream) {
    static const char fn[] = "gmm_gtp_submit";
    gmm_gtp_gradient in;
    gmm_mat source = GMM_ZERO;
    gmm__gtp_bundle *b;
    gmm__gtp_domain *d;
    gmm__wgrad_slot *slot;
    gmm_status s = gmm__gtp_check_bundle(gtp, fn, bundle);
    if (!s) s = gmm__gtp_read(fn, "gradient", gradient, &in, sizeof in, &gtp->error);
    if (!s && in.from) s = gmm__gtp_read(fn, "gradient->from", in.from, &source, sizeof source, &gtp->error);
    if (s) return s;
    b = &gtp->bundles[bundle];
    d = &gtp->domains[b->domain];
    if (b->wgrad_slot < 0) return gmm__fail(&gtp->error, GMM_E_STATE, "%s: '%s' is frozen", fn, b->name);
    slot = &gtp->wgrad_slots[b->wgrad_slot];
    if ((in.add != GMM_GTP_ADD && in.add != GMM_GTP_SET) || in.zero < 0 || in.zero > 1 || (in.zero && in.from))
        return gmm__fail(&gtp->error, GMM_E_ARG, "%s: '%s': add %d, zero %d, from %s: must be a gmm_gtp_add, 0 or 1, "
                         "not both", fn, b->name, (int)in.add, in.zero, in.from ? "given" : "NULL");
    if (in.zero || in.from) {
        if (slot->writer >= 0)
            return gmm__fail(&gtp->error, GMM_E_STATE, "%s: '%s': its buffer is in use by '%s', which is not submitted",
                             fn, b->name, gtp->bundles[slot->writer].name);
    } else if (slot->writer != bundle)
        return gmm__fail(&gtp->error, GMM_E_STATE, "%s: '%s': no buffer was asked for", fn, b->name);
    if (in.from && (s = gmm__gtp_check_gradient(gtp, fn, b, &source)) != GMM_OK) return s;
    gmm__gtp_hash(gtp, 3, bundle, (int)in.add);
    gtp->stats.submits++;
    if (in.zero || in.from) {
        gmm_gtp_view unused = GMM_ZERO;
        if ((s = gmm_gtp_wgrad(gtp, bundle, stream, &unused)) != GMM_OK) return s;
        s = gmm__gtp_copy_gradient(gtp, b, in.from ? &source : NULL, stream);
    }
    if (!s) s = gmm__gtp_prepare_stream(gtp, d, GMM__GTP_REDUCE);
    if (!s) s = gtp->runtime.event_record(gtp->runtime.self, d->fork[GMM__GTP_REDUCE], stream, 0);
    if (!s) s = gtp->runtime.stream_wait(gtp->runtime.self, d->desc.reduce_stream, d->fork[GMM__GTP_REDUCE], 0);
    if (!s) s = gmm__gtp_reduce_bundle(gtp, bundle, in.scale, in.add);
    slot->writer = -1;
    if (!s && d->desc.synchronous) s = gmm__gtp_event_wait(gtp, &b->done, stream);
    if (s) return gmm__gtp_fail(gtp, fn, b->name, s);
    if (gtp->dry_run) return GMM_OK;
    if (gtp->graph) *gmm__gtp_graph_usage(gtp, gtp->graph - 1, bundle) |= GMM__GRAPH_REDUCES;
    else if (gtp->config.hooks.ready) {
        gtp->in_callback = 1;
        gtp->config.hooks.ready(gtp->config.hooks.user, gtp, gtp->members + b->first, b->count, d->desc.reduce_stream);
        gtp->in_callback = 0;
    }
    return gtp->failed; /* by the hook */
}

/* Waits of streams for gathers, reductions and replays. */

/* Makes `stream` wait for the work of a domain's stream; in a capture, for its captured work. */
static gmm_status gmm__gtp_join_stream(gmm_gtp *g, gmm__gtp_domain *d, int role, gmm_stream stream) {
    gmm_status s;
    if (g->graph ? d->joined_graph[role] != g->graph : !d->used[role]) return GMM_OK;
    s = g->runtime.event_record(g->runtime.self, d->join[role], gmm__gtp_stream(d, role), 0);
    return s ? s : g->runtime.stream_wait(g->runtime.self, stream, d->join[role], 0);
}

/* Makes `stream` wait for all reads of shards, so that it may write them. */
static gmm_status gmm__gtp_fence_gathers(gmm_gtp *g, gmm_stream stream) {
    gmm_status s = gmm__gtp_fence_replays(g, stream);
    int32_t i;
    for (i = 0; i < g->domain_count && !s; i++) s = gmm__gtp_join_stream(g, &g->domains[i], GMM__GTP_GATHER, stream);
    for (i = 0; i < g->bundle_count && !s; i++) {
        gmm__gtp_bundle *b = &g->bundles[i];
        b->publish_requested = 0; /* the shards may change behind the fence */
        if (!g->graph || b->in_place.graph == g->graph)
            s = gmm__gtp_event_wait(g, &b->in_place, stream); /* reads of the shards themselves */
    }
    return s;
}

GMMDEF gmm_status gmm_gtp_fence(gmm_gtp *gtp, uint32_t what, gmm_stream stream) {
    static const char fn[] = "gmm_gtp_fence";
    int32_t i;
    gmm_status s = gmm__gtp_check_call(gtp, fn, 0);
    if (s) return s;
    if (what == 0 || (what & ~(uint32_t)GMM_GTP_ALL))
        return gmm__fail(&gtp->error, GMM_E_ARG, "%s: what is 0x%x: must be an OR of GMM_GTP_GATHERS and GRADIENTS", fn,
                         what);
    for (i = 0; i < gtp->domain_count && !s && (what & (uint32_t)GMM_GTP_GRADIENTS); i++)
        s = gmm__gtp_join_stream(gtp, &gtp->domains[i], GMM__GTP_REDUCE, stream);
    if (!s) s = what & (uint32_t)GMM_GTP_GATHERS ? gmm__gtp_fence_gathers(gtp, stream)
                                                 : gmm__gtp_fence_replays(gtp, stream);
    return s ? gmm__gtp_fail(gtp, fn, "all domains", s) : GMM_OK;
}

/* Reduction of amaxes over ranks (gmm_gtp_amax), and quantization of shards (gmm_gtp_quantize). */

/* Raises values to the largest over the ranks of a domain, and then over those of a further communicator (NULL =
   none). `stream` waits for the result. */
static gmm_status gmm__gtp_reduce_amax(gmm_gtp *g, gmm__gtp_domain *d, const gmm_comm *further, float *values,
                                       int32_t count, gmm_stream stream) {
    const int sharded = d->size > 1;
    const gmm_stream comm_stream = sharded ? d->desc.gather_stream : stream;
    gmm__watch *watch = NULL;
    gmm_status s = GMM_OK;
    int k;
    if (count == 0 || (!sharded && !further)) return GMM_OK;
    if (sharded) {
        s = gmm__gtp_prepare_stream(g, d, GMM__GTP_GATHER);
        if (!s) s = g->runtime.event_record(g->runtime.self, d->fork[GMM__GTP_GATHER], stream, 0);
        if (!s) s = g->runtime.stream_wait(g->runtime.self, comm_stream, d->fork[GMM__GTP_GATHER], 0);
        if (!s) s = gmm__watch_begin(g, d, GMM__GTP_GATHER, &watch);
    }
    for (k = 0; k < 2 && !s; k++) {
        const gmm_comm *c = k ? further : sharded ? &d->gather : NULL;
        if (!c) continue;
        g->further = k ? further : NULL;
        gmm__gtp_set_collective(g, d, "all_reduce_max");
        s = c->group_begin(c->self, "amax");
        if (!s) s = c->all_reduce_max(c->self, values, (size_t)count, comm_stream);
        if (!s) s = c->group_end(c->self);
        if (!s) g->collective = NULL, g->further = NULL;
        if (!s && !k) s = gmm__watch_end(g, d, GMM__GTP_GATHER, watch, c, "all_reduce_max", "amax");
    }
    return s || !sharded ? s : gmm__gtp_join_stream(g, d, GMM__GTP_GATHER, stream);
}

GMMDEF gmm_status gmm_gtp_amax(gmm_gtp *gtp, int32_t domain, float *values, int32_t count, gmm_stream stream) {
    static const char fn[] = "gmm_gtp_amax";
    gmm__gtp_domain *d;
    gmm_status s = gmm__gtp_check_call(gtp, fn, GMM__GTP_NO_CAPTURE);
    if (s) return s;
    if (domain < 0 || domain >= gtp->domain_count || count < 0)
        return gmm__fail(&gtp->error, GMM_E_ARG, "%s: domain %d of %d, count %d: must exist, and >= 0", fn, domain,
                         gtp->domain_count, count);
    if (!values && count) return gmm__fail(&gtp->error, GMM_E_NULL, "%s: values is NULL", fn);
    if ((uintptr_t)values % sizeof *values)
        return gmm__fail(&gtp->error, GMM_E_ALIGN, "%s: values %p is not aligned to fp32", fn, (void *)values);
    d = &gtp->domains[domain];
    gmm__gtp_hash(gtp, 4, domain, 0);
    s = gmm__gtp_reduce_amax(gtp, d, NULL, values, count, stream);
    return s ? gmm__gtp_fail(gtp, fn, "amax", s) : GMM_OK;
}

/* Enqueues the amax of one weight (phase AMAX) or the quantization of its shard; `index` is that of the weight in q. */
static gmm_status gmm__gtp_enqueue_cast(gmm_gtp *g, const gmm__gtp_weight *w, const gmm_gtp_quantization *q,
                                        int32_t index, float *amax, gmm_quant_phase phase, gmm_stream stream) {
    const gmm__gtp_domain *d = &g->domains[g->bundles[w->bundle].domain];
    const size_t elements = (size_t)w->plan.shard_rows * (size_t)w->plan.local_cols;
    gmm__gtp_cast c = gmm__gtp_cast_make(g, w, q->dtype, q->from[index]);
    gmm_range ranges[8];
    gmm_work work;
    int32_t n = 0;
    int k;
    memset(ranges, 0, sizeof ranges);
    memset(&work, 0, sizeof work);
    c.d.phase = phase;
    c.d.scale = w->format.delayed && q->scale ? q->scale + index : NULL;
    c.copy[GMM_ROWWISE].amax = c.copy[GMM_COLUMNWISE].amax = amax;
    c.workspace = d->gather_base ? d->gather_base + d->cast_offset : NULL;
    c.workspace_bytes = d->cast_bytes;
    ranges[n].data = c.src.data;
    ranges[n++].bytes = elements * (size_t)gmm_dtype_bits(q->dtype) / 8;
    for (k = GMM_ROWWISE; k <= GMM_COLUMNWISE && phase != GMM_QUANT_AMAX; k++) {
        ranges[n].data = c.stored[k] ? w->desc.data[k] : NULL;
        ranges[n].bytes = (size_t)w->plan.shard_data_bytes[k];
        ranges[n++].writes = 1;
        ranges[n].data = c.stored[k] ? w->desc.scale[k] : NULL;
        ranges[n].bytes = (size_t)w->plan.shard_scale_bytes[k];
        ranges[n++].writes = 1;
    }
    ranges[n].data = amax;
    ranges[n].bytes = amax ? sizeof *amax : 0;
    ranges[n++].writes = phase != GMM_QUANT_CAST;
    ranges[n].data = c.d.scale;
    ranges[n++].bytes = c.d.scale ? sizeof(float) : 0;
    if (w->format.dtype != GMM_NONE) {
        ranges[n].data = c.workspace;
        ranges[n].bytes = c.workspace_bytes;
        ranges[n++].writes = 1;
    }
    work.name = phase == GMM_QUANT_AMAX ? "amax of a shard" : "quantize a shard";
    work.function = gmm__gtp_cast_run;
    work.argument = &c;
    work.argument_bytes = sizeof c;
    work.ranges = ranges;
    work.range_count = n;
    return g->runtime.run(g->runtime.self, &work, stream);
}

/* Checks the arguments of gmm_gtp_quantize. */
static gmm_status gmm__gtp_check_cast(gmm_gtp *g, const char *fn, const int32_t *weights, int32_t count,
                                      const gmm_gtp_quantization *q) {
    int32_t i, k;
    if (q->dtype != GMM_F32 && q->dtype != GMM_F16 && q->dtype != GMM_BF16)
        return gmm__fail(&g->error, GMM_E_DTYPE, "%s: dtype is %s: must be f32, f16 or bf16", fn,
                         gmm_dtype_name(q->dtype));
    if (!q->from && count) return gmm__fail(&g->error, GMM_E_NULL, "%s: from is NULL", fn);
    if (((uintptr_t)q->scale | (uintptr_t)q->amax) % sizeof(float))
        return gmm__fail(&g->error, GMM_E_ALIGN, "%s: scale %p and amax %p must be aligned to 4 bytes", fn,
                         (const void *)q->scale, (void *)q->amax);
    if (q->also && (!q->also->group_begin || !q->also->group_end || !q->also->all_reduce_max))
        return gmm__fail(&g->error, GMM_E_NULL, "%s: also->%s is NULL: group_begin, group_end and all_reduce_max are "
                         "needed", fn, !q->also->group_begin ? "group_begin" : !q->also->group_end ? "group_end"
                         : "all_reduce_max");
    for (i = 0; i < count; i++) {
        const gmm__gtp_weight *w = &g->weights[weights[i]];
        for (k = 0; k < i; k++)
            if (weights[k] == weights[i])
                return gmm__fail(&g->error, GMM_E_ARG, "%s: '%s' is named twice", fn, w->desc.name);
        if (!q->from[i]) return gmm__fail(&g->error, GMM_E_NULL, "%s: from[%d] ('%s') is NULL", fn, i,
                                          w->desc.name);
        if ((uintptr_t)q->from[i] % (uintptr_t)(gmm_dtype_bits(q->dtype) / 8))
            return gmm__fail(&g->error, GMM_E_ALIGN, "%s: from[%d] at %p is not aligned to its %s elements", fn, i,
                             q->from[i], gmm_dtype_name(q->dtype));
        if (w->shard.scaling != GMM_SCALING_NONE && w->format.dtype == GMM_NONE)
            return gmm__fail(&g->error, GMM_E_CONFIG, "%s: '%s' was declared without a format", fn, w->desc.name);
    }
    return GMM_OK;
}

GMMDEF gmm_status gmm_gtp_quantize(gmm_gtp *gtp, const int32_t *weights, int32_t count,
                                   const gmm_gtp_quantization *quantization, gmm_stream stream) {
    static const char fn[] = "gmm_gtp_quantize";
    gmm_gtp_quantization q = GMM_ZERO;
    gmm_comm also;
    int32_t i, k, n, pass;
    gmm_status s = gmm__gtp_check_call(gtp, fn, GMM__GTP_NO_CAPTURE);
    if (!s) s = gmm__gtp_read(fn, "quantization", quantization, &q, sizeof q, &gtp->error);
    if (!s && q.also) s = gmm__gtp_read(fn, "quantization->also", q.also, &also, sizeof also, &gtp->error);
    if (q.also) q.also = &also;
    if (!s) s = gmm__gtp_check_weights(gtp, fn, weights, count);
    if (!s) s = gmm__gtp_check_cast(gtp, fn, weights, count, &q);
    if (s) return s;
    gmm__gtp_hash(gtp, 5, count, 0);
    s = gmm__gtp_fence_gathers(gtp, stream);
    for (k = 0; k < gtp->domain_count && !s; k++) s = gmm__gtp_event_wait(gtp, &gtp->domains[k].cast, stream);
    for (pass = 0; pass < 2 && !s; pass++) /* first the amaxes, with one reduction per domain, then the shards */
        for (k = 0; k < gtp->domain_count && !s; k++) {
            gmm__gtp_domain *d = &gtp->domains[k];
            float *values = d->gather_base ? (float *)(void *)(d->gather_base + d->amax_offset) : NULL;
            for (i = 0, n = 0; i < count && !s; i++) {
                const gmm__gtp_weight *w = &gtp->weights[weights[i]];
                const int needs_amax = gmm__gtp_needs_amax(w);
                if (gtp->bundles[w->bundle].domain != k) continue;
                if (needs_amax) {
                    s = gmm__gtp_enqueue_cast(gtp, w, &q, i, values + n, pass ? GMM_QUANT_CAST : GMM_QUANT_AMAX,
                                              stream);
                    if (!s && pass && w->desc.amax)
                        s = gtp->runtime.copy(gtp->runtime.self, w->desc.amax, values + n, sizeof(float), stream);
                    n++;
                } else if (pass) {
                    s = gmm__gtp_enqueue_cast(gtp, w, &q, i, w->format.delayed && q.amax ? q.amax + i : NULL,
                                              GMM_QUANT_ALL, stream);
                }
            }
            if (!s && !pass) s = gmm__gtp_reduce_amax(gtp, d, q.also, values, n, stream);
            /* delayed scaling: the amaxes of consecutive weights of the domain are reduced together */
            for (i = 0; i < count && pass && q.amax && !s; i += n ? n : 1) {
                for (n = 0; i + n < count; n++) {
                    const gmm__gtp_weight *w = &gtp->weights[weights[i + n]];
                    if (!w->format.delayed || gtp->bundles[w->bundle].domain != k) break;
                }
                s = gmm__gtp_reduce_amax(gtp, d, q.also, q.amax + i, n, stream);
            }
        }
    for (k = 0; k < gtp->domain_count && !s; k++) s = gmm__gtp_event_record(gtp, &gtp->domains[k].cast, stream);
    if (!s) s = gmm__gtp_record_publish(gtp, weights, count, stream);
    return s ? gmm__gtp_fail(gtp, fn, "shards", s) : GMM_OK;
}

/* Dry runs, captures, replays, statistics. */

/* .............................................................................................. Runtime: graphs ... */

/* Checks that the caller holds no view and no gradient buffer, of bundles in captured chains alone (`captured`) or of
   all. */
static gmm_status gmm__gtp_check_unused(gmm_gtp *g, const char *fn, int captured) {
    int32_t i;
    for (i = 0; i < g->bundle_count; i++) {
        const gmm__gtp_bundle *b = &g->bundles[i];
        const int open = b->wgrad_slot >= 0 && g->wgrad_slots[b->wgrad_slot].writer == i;
        if ((b->acquired || open) && (b->captured || !captured))
            return gmm__fail(&g->error, GMM_E_STATE, "%s: '%s' is %s", fn, b->name,
                             open ? "not submitted" : "held: release it");
    }
    return GMM_OK;
}

GMMDEF gmm_status gmm_gtp_dry_run(gmm_gtp *gtp, int32_t on) {
    static const char fn[] = "gmm_gtp_dry_run";
    int32_t i;
    gmm_status s = gmm__gtp_check_call(gtp, fn, GMM__GTP_NO_CAPTURE);
    if (s) return s;
    if (on == gtp->dry_run || on < 0 || on > 1)
        return gmm__fail(&gtp->error, GMM_E_STATE, "%s: on is %d: a dry run is %s", fn, on,
                         gtp->dry_run ? "under way" : "not under way");
    if (!on && (s = gmm__gtp_check_unused(gtp, fn, 0)) != GMM_OK) return s;
    gtp->dry_run = on;
    for (i = 0; i < gtp->bundle_count && !on; i++)
        gtp->bundles[i].publish_requested = 0; /* a dry run makes no callback */
    return GMM_OK;
}

GMMDEF gmm_status gmm_gtp_capture_begin(gmm_gtp *gtp, gmm_stream stream, int32_t *graph) {
    static const char fn[] = "gmm_gtp_capture_begin";
    int32_t capturing = 0, i;
    gmm_status s = gmm__gtp_check_call(gtp, fn, 0);
    if (s) return s;
    if (!graph) return gmm__fail(&gtp->error, GMM_E_NULL, "%s: graph is NULL", fn);
    if (gtp->graph)
        return gmm__fail(&gtp->error, GMM_E_STATE, "%s: graph %d is being captured", fn, gtp->graph - 1);
    if (gtp->dry_run) return gmm__fail(&gtp->error, GMM_E_STATE, "%s: a dry run is under way", fn);
    if (gtp->graph_count == gtp->config.graphs)
        return gmm__fail(&gtp->error, GMM_E_WORKSPACE, "%s: config->graphs is %d: no room for more", fn,
                         gtp->config.graphs);
    s = gtp->runtime.is_capturing(gtp->runtime.self, stream, &capturing);
    if (s) return gmm__gtp_fail(gtp, fn, "stream", s);
    if (!capturing) return gmm__fail(&gtp->error, GMM_E_CAPTURE, "%s: the stream is not capturing", fn);
    if ((s = gmm__gtp_check_unused(gtp, fn, 1)) != GMM_OK) return s;
    gmm__gtp_hash(gtp, 8, gtp->graph_count, 0);
    gtp->graph = ++gtp->graph_count;
    gtp->graph_stream = stream;
    for (i = 0; i < gtp->bundle_count; i++)
        if (gtp->bundles[i].captured) gtp->bundles[i].publish_requested = 0;
    s = gtp->runtime.event_record(gtp->runtime.self, gtp->graph_begin, stream, 0);
    if (s) return gmm__gtp_fail(gtp, fn, "graph", s);
    *graph = gtp->graph - 1;
    return GMM_OK;
}

GMMDEF gmm_status gmm_gtp_capture_end(gmm_gtp *gtp, gmm_stream stream) {
    static const char fn[] = "gmm_gtp_capture_end";
    int32_t i;
    int k;
    gmm_status s = gmm__gtp_check_call(gtp, fn, 0);
    if (s) return s;
    if (!gtp->graph || gtp->graph_stream != stream)
        return gmm__fail(&gtp->error, GMM_E_STATE, "%s: no capture began on this stream", fn);
    if ((s = gmm__gtp_check_unused(gtp, fn, 1)) != GMM_OK) return s;
    gmm__gtp_hash(gtp, 8, gtp->graph - 1, 1);
    for (i = 0; i < gtp->domain_count; i++)
        for (k = 0; k < 2 && !s; k++) s = gmm__gtp_join_stream(gtp, &gtp->domains[i], k, stream);
    for (i = 0; i < gtp->bundle_count; i++)
        if (gtp->bundles[i].captured) gtp->bundles[i].publish_requested = 0;
    gtp->graph = 0;
    return s ? gmm__gtp_fail(gtp, fn, "graph", s) : GMM_OK;
}

/* Makes `stream`, on which a graph is replayed, wait for the work of a domain's stream: the replay uses the same
   communicator, stage and receive buffer on a stream of its own. Roles that have a communicator in common have one
   stream. */
static gmm_status gmm__gtp_hand_over(gmm_gtp *g, int32_t domain, int role, gmm_stream stream) {
    gmm_status s = GMM_OK;
    int32_t i;
    for (i = 0; i < 2 * g->domain_count && !s; i++) {
        gmm__gtp_domain *d = &g->domains[i / 2];
        if (gmm__gtp_stream(d, i % 2) != gmm__gtp_stream(&g->domains[domain], role)) continue;
        s = gmm__gtp_join_stream(g, d, i % 2, stream);
        d->used[i % 2] = 0;
    }
    return s;
}

GMMDEF gmm_status gmm_gtp_pre_replay(gmm_gtp *gtp, int32_t graph, gmm_stream stream) {
    static const char fn[] = "gmm_gtp_pre_replay";
    int32_t i;
    gmm_status s = gmm__gtp_check_call(gtp, fn, GMM__GTP_NO_CAPTURE);
    if (s) return s;
    if (graph < 0 || graph >= gtp->graph_count)
        return gmm__fail(&gtp->error, GMM_E_ARG, "%s: graph %d: there are %d", fn, graph, gtp->graph_count);
    if ((s = gmm__gtp_check_unused(gtp, fn, 1)) != GMM_OK) return s;
    gmm__gtp_hash(gtp, 8, graph, 2);
    for (i = 0; i < gtp->slot_count; i++) /* the replay may overwrite weights that were gathered outside of graphs */
        if (gtp->slots[i].captured && gtp->slots[i].graph == 0) gtp->slots[i].bundle = -1;
    for (i = 0; i < gtp->bundle_count && !s; i++) {
        gmm__gtp_bundle *b = &gtp->bundles[i];
        const int use = *gmm__gtp_graph_usage(gtp, graph, i);
        if (use & GMM__GRAPH_NEEDS && (s = gmm__gtp_request_publish(gtp, b)) != GMM_OK) return s;
        b->publish_requested = use & GMM__GRAPH_NEEDS ? 0 : b->publish_requested;
        if (use & (GMM__GRAPH_NEEDS | GMM__GRAPH_READS)) s = gmm__gtp_event_wait(gtp, &b->published, stream);
        if (!s && use & GMM__GRAPH_READS) s = gmm__gtp_hand_over(gtp, b->domain, GMM__GTP_GATHER, stream);
        if (!s && use & GMM__GRAPH_REDUCES) s = gmm__gtp_hand_over(gtp, b->domain, GMM__GTP_REDUCE, stream);
    }
    if (!s) s = gmm__gtp_fence_replays(gtp, stream);
    gtp->graph_watch[graph].end = NULL;
    if (!s) s = gtp->runtime.event_record(gtp->runtime.self, gtp->graph_watch[graph].begin, stream, 0);
    return s ? gmm__gtp_fail(gtp, fn, "graph", s) : GMM_OK;
}

GMMDEF gmm_status gmm_gtp_post_replay(gmm_gtp *gtp, int32_t graph, gmm_stream stream) {
    static const char fn[] = "gmm_gtp_post_replay";
    int32_t i;
    gmm_status s = gmm__gtp_check_call(gtp, fn, GMM__GTP_NO_CAPTURE);
    if (s) return s;
    if (graph < 0 || graph >= gtp->graph_count)
        return gmm__fail(&gtp->error, GMM_E_ARG, "%s: graph %d: there are %d", fn, graph, gtp->graph_count);
    s = gtp->runtime.event_record(gtp->runtime.self, gtp->graph_end[graph], stream, 0);
    if (s) return gmm__gtp_fail(gtp, fn, "graph", s);
    gtp->graph_watch[graph].end = gtp->graph_end[graph];
    gtp->graph_watch[graph].begun = 0;
    gtp->graph_watch[graph].what = "replay";
    gtp->graph_watch[graph].replayed = 1;
    gtp->graph_watch[graph].stream = stream;
    for (i = 0; i < gtp->bundle_count && gtp->config.hooks.ready && !gtp->dry_run && !gtp->failed; i++) {
        const gmm__gtp_bundle *b = &gtp->bundles[i];
        if (!(*gmm__gtp_graph_usage(gtp, graph, i) & GMM__GRAPH_REDUCES)) continue;
        gtp->in_callback = 1;
        gtp->config.hooks.ready(gtp->config.hooks.user, gtp, gtp->members + b->first, b->count, stream);
        gtp->in_callback = 0;
    }
    return gtp->failed; /* by a hook */
}

GMMDEF gmm_status gmm_gtp_statistics_of(const gmm_gtp *gtp, gmm_gtp_statistics *out) {
    gmm_status s = GMM_OK;
    gmm_gtp_statistics full;
    size_t common;
    if (!gtp) return GMM_E_NULL;
    common = gmm__gtp_common_size("gmm_gtp_statistics_of", "out", out, sizeof *out, &s, NULL);
    if (s) return s;
    full = gtp->stats;
    full.struct_size = out->struct_size;
    memcpy(out, &full, common);
    return GMM_OK;
}

/* Plans that move shards to and from checkpoints. */
/* ......................................................................................... Checkpoints: moves ... */

/* Layout of one array of a copy: an element stands for a block of block[0] rows and block[1] columns of the matrix.
   Strides are in elements; extents count blocks, padding included. */
typedef struct gmm__gtp_array {
    gmm_dtype dtype;
    int32_t major;    /* axis of the matrix that the rows of the array follow: 0 = rows, 1 = columns */
    int64_t block[2], stride[2], extent[2];
    int64_t shape[2]; /* of its tensor */
} gmm__gtp_array;

/* Source or target of an item: the shard with its defaults, its plan, extents and arrays. */
typedef struct gmm__gtp_side {
    gmm_shard shard;
    gmm_shard_plan plan;
    gmm__gtp_array array[2]; /* [DATA, SCALE] */
    gmm_extent *extents;
    int32_t count;
} gmm__gtp_side;

typedef struct gmm__gtp_planner {
    const char *fn;
    const char *key;             /* name of the item being planned; NULL = none */
    int exports;
    const gmm_ckpt_part *parts;
    int32_t part_count;
    gmm_allocator allocator;
    gmm_ckpt_report *report;
    gmm_ckpt_tensor *targets;
    int64_t target_count;
    gmm_ckpt_move *moves;
    size_t move_count, move_capacity;
    gmm_extent *extents[2];      /* of the target, of the stored shard */
    int32_t capacity[2];
} gmm__gtp_planner;

static gmm_status gmm__gtp_ckpt_fail(gmm__gtp_planner *p, gmm_status status, gmm_ckpt_reason reason, const char *format,
                                     ...) {
    char text[360];
    va_list list;
    va_start(list, format);
    (void)vsnprintf(text, sizeof text, format, list);
    va_end(list);
    if (!p->report) return status;
    p->report->reason = reason;
    (void)snprintf(p->report->key, sizeof p->report->key, "%s", p->key ? p->key : "");
    return gmm__fail(&p->report->error, status, "%s: %s%.100s%s%s", p->fn, p->key ? "\"" : "", p->key ? p->key : "",
                     p->key ? "\": " : "", text);
}

static void *gmm__gtp_alloc(gmm__gtp_planner *p, size_t bytes) {
    return p->allocator.alloc ? p->allocator.alloc(p->allocator.user, bytes) : GMM_MALLOC(bytes);
}
static void gmm__gtp_free(gmm__gtp_planner *p, void *memory) {
    if (!memory) return;
    if (p->allocator.release) p->allocator.release(p->allocator.user, memory);
    else GMM_FREE(memory);
}

/* Rows and columns of the matrix in a block with one scale. */
static void gmm__gtp_scale_block(gmm_scaling scaling, gmm_direction direction, int64_t shape[2]) {
    const int64_t block = scaling == GMM_SCALING_MX32 ? 32 : scaling == GMM_SCALING_NV16 ? 16 : 128;
    shape[0] = shape[1] = scaling == GMM_SCALING_128X128 ? 128 : 1;
    shape[direction == GMM_ROWWISE] = block;
}

/* The arrays of a side's copy as they are in memory: scales are padded. */
static gmm_status gmm__gtp_arrays(gmm__gtp_planner *p, gmm__gtp_side *side, gmm_direction direction) {
    const gmm_shard *s = &side->shard;
    const gmm_direction d = s->scaling == GMM_SCALING_NONE ? GMM_ROWWISE : direction;
    gmm__gtp_array *data = &side->array[GMM__GTP_DATA], *scale = &side->array[GMM__GTP_SCALE];
    gmm_layout l = GMM_ZERO;
    gmm_error error = GMM_ZERO;
    const gmm_status status = gmm_layout_of(s->dtype, s->scaling, GMM_SCALES_COMPACT, d, side->plan.shard_rows,
                                            side->plan.local_cols, &l, &error);
    const int64_t pack = gmm_dtype_bits(s->dtype) < 8 ? 8 / gmm_dtype_bits(s->dtype) : 1;
    int64_t unused = 0;
    int major;
    if (status) return gmm__gtp_ckpt_fail(p, status, GMM_CKPT_DTYPE, "%.300s", error.text);
    memset(side->array, 0, sizeof side->array);
    data->dtype = s->dtype;
    data->shape[0] = l.data_rows;
    data->shape[1] = l.data_cols;
    data->major = major = l.transposed;
    data->block[major] = 1;
    data->block[!major] = pack;
    data->extent[major] = l.data_rows;
    data->extent[!major] = l.data_cols / pack;
    data->stride[major] = data->extent[!major];
    data->stride[!major] = 1;
    if (s->scaling == GMM_SCALING_NONE) return GMM_OK;
    scale->dtype = l.scale_dtype;
    if (s->scaling == GMM_SCALING_TENSOR) {
        scale->dtype = GMM_F32;
        scale->shape[0] = scale->shape[1] = 1;
        return GMM_OK;
    }
    gmm__gtp_scale_block(s->scaling, d, scale->block);
    scale->major = major = !gmm__gtp_scale_axis(s->scaling, (int)d, &unused);
    scale->shape[0] = l.scale_rows;
    scale->shape[1] = l.scale_cols;
    scale->extent[major] = l.scale_rows;
    scale->extent[!major] = l.scale_cols;
    scale->stride[major] = l.scale_cols;
    scale->stride[!major] = 1;
    return GMM_OK;
}

/* Removes the padding from the description of an array. */
static void gmm__gtp_unpad(const gmm__gtp_side *side, gmm__gtp_array *a) {
    a->extent[0] = gmm__ceil_div(side->plan.shard_rows, a->block[0]);
    a->extent[1] = gmm__ceil_div(side->plan.local_cols, a->block[1]);
    a->shape[0] = a->extent[a->major];
    a->shape[1] = a->stride[a->major] = a->extent[!a->major];
}

/* Describes a side; its extents are stored in p->extents[buffer]. stored: the index of its shard in the item's
   `stored`; -1: it is the item's own. */
static gmm_status gmm__gtp_read_side(gmm__gtp_planner *p, const gmm_shard *shard, int32_t stored,
                                     gmm_direction direction, int buffer, gmm__gtp_side *side) {
    gmm_error error = GMM_ZERO;
    char owner[32] = "";
    gmm_status status = gmm__gtp_plan_shard(p->fn, shard, &side->shard, &side->plan, &error);
    if (status) {
        const size_t skip = strlen(p->fn) + 2; /* gmm__gtp_ckpt_fail writes the name again */
        if (stored >= 0) (void)snprintf(owner, sizeof owner, "stored[%d].", stored);
        return gmm__gtp_ckpt_fail(p, status, GMM_CKPT_ARGUMENT, "%s%.300s", owner,
                                  strlen(error.text) > skip ? error.text + skip : "");
    }
    side->shard.struct_size = 0;
    status = gmm_gtp_extents(&side->shard, NULL, 0, &side->count, NULL);
    if (!status && side->count > p->capacity[buffer]) {
        gmm__gtp_free(p, p->extents[buffer]);
        p->capacity[buffer] = 0;
        p->extents[buffer] = (gmm_extent *)gmm__gtp_alloc(p, (size_t)side->count * sizeof *side->extents);
        if (!p->extents[buffer]) return gmm__gtp_ckpt_fail(p, GMM_E_MEMORY, GMM_CKPT_NO_MEMORY, "no memory");
        p->capacity[buffer] = side->count;
    }
    side->extents = p->extents[buffer];
    if (!status && side->count)
        status = gmm_gtp_extents(&side->shard, side->extents, side->count, &side->count, NULL);
    return status ? status : gmm__gtp_arrays(p, side, direction);
}

static gmm_status gmm__gtp_add_move(gmm__gtp_planner *p, const gmm_ckpt_move *m) {
    if (p->move_count == p->move_capacity) {
        const size_t capacity = p->move_capacity ? 2 * p->move_capacity : 64;
        gmm_ckpt_move *more = (gmm_ckpt_move *)gmm__gtp_alloc(p, capacity * sizeof *more);
        if (!more) return gmm__gtp_ckpt_fail(p, GMM_E_MEMORY, GMM_CKPT_NO_MEMORY, "no memory");
        if (p->move_count) memcpy(more, p->moves, p->move_count * sizeof *more);
        gmm__gtp_free(p, p->moves);
        p->moves = more;
        p->move_capacity = capacity;
    }
    p->moves[p->move_count++] = *m;
    return GMM_OK;
}

/* First block and number of blocks of a box along one axis. Returns 0 if a boundary of the box cuts a block; only the
   last block of the axis may be partial. */
static int gmm__gtp_block_range(int64_t begin, int64_t length, int64_t all, int64_t block, int64_t *first,
                                int64_t *count) {
    *first = begin / block;
    *count = gmm__ceil_div(length, block);
    return begin % block == 0 && (length % block == 0 || begin + length == all);
}

/* Rows and columns that two sides have in common: index 0 is rows, 1 columns. */
typedef struct gmm__gtp_overlap {
    const gmm_gtp_stored *stored;
    const gmm__gtp_side *source, *target;
    int32_t target_index; /* of the target's elements; its scales follow */
    int64_t src[2], dst[2], length[2];
} gmm__gtp_overlap;

/* Adds the move of one array of an overlap. */
static gmm_status gmm__gtp_move_box(gmm__gtp_planner *p, const gmm__gtp_overlap *o, int part) {
    const gmm__gtp_side *s = o->source, *d = o->target;
    const gmm__gtp_array *a = &s->array[part], *b = &d->array[part];
    const int64_t all[2][2] = {{s->plan.valid_rows, s->plan.local_cols}, {d->plan.valid_rows, d->plan.local_cols}};
    gmm_ckpt_move m = GMM_ZERO;
    int k;
    m.kind = part == GMM__GTP_SCALE || a->dtype == b->dtype ? GMM_CKPT_COPY : GMM_CKPT_CONVERT;
    if (s->shard.scaling != d->shard.scaling) {
        m.kind = GMM_CKPT_DEQUANT;
        m.scaling = s->shard.scaling;
    }
    m.part = o->stored->part;
    m.src = part == GMM__GTP_DATA ? o->stored->data : o->stored->scale;
    m.scale = m.kind == GMM_CKPT_DEQUANT ? o->stored->scale : -1;
    m.dst = o->target_index + part;
    m.loops = 2;
    for (k = 0; k < 2; k++) {
        int64_t begin[2], count[2];
        if (!gmm__gtp_block_range(o->src[k], o->length[k], all[0][k], a->block[k], &begin[0], &count[0]) ||
            !gmm__gtp_block_range(o->dst[k], o->length[k], all[1][k], b->block[k], &begin[1], &count[1]))
            return gmm__gtp_ckpt_fail(p, GMM_E_CONFIG, GMM_CKPT_NOT_DIVISIBLE, "%lld %s from %lld of what is stored to "
                                      "%lld of the target cut blocks of %lld in %s: import into 16 bits, and quantize",
                                      (long long)o->length[k], k ? "columns" : "rows", (long long)o->src[k],
                                      (long long)o->dst[k],
                                      (long long)a->block[k], gmm_scaling_name(s->shard.scaling));
        m.src_at += begin[0] * a->stride[k];
        m.dst_at += begin[1] * b->stride[k];
        m.count[k] = count[1];
        m.src_step[k] = a->stride[k];
        m.dst_step[k] = b->stride[k];
    }
    return gmm__gtp_add_move(p, &m);
}

/* Zeros the padding of a target: the rows behind the valid ones, then the columns behind those of the valid rows. */
static gmm_status gmm__gtp_zero_padding(gmm__gtp_planner *p, const gmm__gtp_side *d, int32_t target, int part) {
    const gmm__gtp_array *a = &d->array[part];
    const int64_t used[2] = {gmm__ceil_div(d->plan.valid_rows, a->block[0]),
                             gmm__ceil_div(d->plan.local_cols, a->block[1])};
    int k, l;
    for (k = 0; k < 2; k++) {
        gmm_ckpt_move m = GMM_ZERO;
        gmm_status status;
        m.kind = GMM_CKPT_ZERO;
        m.src = m.scale = -1;
        m.dst = target;
        m.dst_at = used[k] * a->stride[k];
        m.loops = 2;
        for (l = 0; l < 2; l++) {
            m.count[l] = l == k ? a->extent[l] - used[l] : k == 0 ? a->extent[l] : used[l];
            m.dst_step[l] = a->stride[l];
        }
        if (m.count[0] < 1 || m.count[1] < 1) continue;
        status = gmm__gtp_add_move(p, &m);
        if (status) return status;
    }
    return GMM_OK;
}

/* Whether two shards belong to weights of the same rows, columns and sections. */
static int gmm__gtp_same_weight(const gmm_shard *a, const gmm_shard *b) {
    const int32_t n = a->sections ? a->sections : 1; /* 0: one section, as section_rows is NULL */
    int32_t i;
    if (a->rows != b->rows || a->cols != b->cols || n != (b->sections ? b->sections : 1)) return 0;
    for (i = 0; n > 1 && i < n; i++)
        if (a->section_rows[i] != b->section_rows[i]) return 0;
    return 1;
}

/* Checks one stored shard against its tensors and the target. */
static gmm_status gmm__gtp_check_stored(gmm__gtp_planner *p, const gmm_gtp_item *item, int32_t j, gmm__gtp_side *s,
                                        const gmm__gtp_side *d) {
    const gmm_gtp_stored *x = &item->stored[j];
    const gmm_scaling scaling = s->shard.scaling;
    const int dequant = scaling != d->shard.scaling;
    const gmm_ckpt_tensor *t;
    int64_t n = 0;
    int part;
    if (!gmm__gtp_same_weight(&s->shard, &d->shard))
        return gmm__gtp_ckpt_fail(p, GMM_E_KEY, GMM_CKPT_SHAPE,
                                  "stored[%d] is of a weight of %lld x %lld in %d sections, "
                                  "not of %lld x %lld in %d with these rows", j, (long long)s->shard.rows,
                                  (long long)s->shard.cols, s->shard.sections, (long long)d->shard.rows,
                                  (long long)d->shard.cols, (int)d->shard.sections);
    if (dequant ? scaling != GMM_SCALING_128X128 || d->shard.scaling != GMM_SCALING_NONE || item->direction
        : scaling != GMM_SCALING_NONE && s->shard.dtype != d->shard.dtype)
        return gmm__gtp_ckpt_fail(p, GMM_E_DTYPE, GMM_CKPT_DTYPE, "stored[%d] is %s %s, which does not become %s %s by "
                                  "copies: import into 16 bits, and quantize", j, gmm_dtype_name(s->shard.dtype),
                                  gmm_scaling_name(scaling), gmm_dtype_name(d->shard.dtype),
                                  gmm_scaling_name(d->shard.scaling));
    if (x->reserved || x->part < 0 || x->part >= p->part_count)
        return gmm__gtp_ckpt_fail(p, GMM_E_ARG, GMM_CKPT_ARGUMENT, "stored[%d]: part %d of %d, reserved %d: must be in "
                                  "range, and 0", j, (int)x->part, p->part_count, (int)x->reserved);
    for (part = GMM__GTP_DATA; part <= GMM__GTP_SCALE; part++) {
        gmm__gtp_array *a = &s->array[part];
        const int32_t index = part == GMM__GTP_DATA ? x->data : x->scale;
        int32_t k, single = 1;
        if (part == GMM__GTP_SCALE && scaling == GMM_SCALING_NONE) break;
        t = gmm_ckpt_table_tensors(p->parts[x->part].table, &n);
        if (index < 0 || index >= n)
            return gmm__gtp_ckpt_fail(p, part == GMM__GTP_SCALE && index < 0 ? GMM_E_KEY : GMM_E_ARG,
                                      part == GMM__GTP_SCALE && index < 0 ? GMM_CKPT_SCALE_MISSING : GMM_CKPT_ARGUMENT,
                                      "stored[%d].%s is %d: part %d has %lld tensors", j, part ? "scale" : "data",
                                      (int)index, (int)x->part, (long long)n);
        t += index;
        if (t->dtype != a->dtype)
            return gmm__gtp_ckpt_fail(p, GMM_E_DTYPE, GMM_CKPT_DTYPE, "stored[%d]: \"%.60s\" is %s, its shard %s", j,
                                      t->name, gmm_dtype_name(t->dtype), gmm_dtype_name(a->dtype));
        for (k = 0; k < t->rank; k++) single &= t->shape[k] == 1;
        if (scaling == GMM_SCALING_TENSOR && part == GMM__GTP_SCALE && single) continue;
        if (part == GMM__GTP_SCALE && scaling != GMM_SCALING_TENSOR &&
            (t->rank != 2 || t->shape[0] != a->shape[0] || t->shape[1] != a->shape[1]))
            gmm__gtp_unpad(s, a);
        if (t->rank != 2 || t->shape[0] != a->shape[0] || t->shape[1] != a->shape[1])
            return gmm__gtp_ckpt_fail(p, GMM_E_KEY, GMM_CKPT_SHAPE, "stored[%d]: \"%.60s\" is not [%lld, %lld], as its "
                                      "shard %d of %d, TP %d of %d, has it", j, t->name, (long long)a->shape[0],
                                      (long long)a->shape[1], s->shard.gtp_rank, s->shard.gtp_size,
                                      s->shard.tp_rank, s->shard.tp_size);
        if (dequant && part == GMM__GTP_SCALE && a->shape[1] != gmm__ceil_div(s->plan.local_cols, 128))
            return gmm__gtp_ckpt_fail(p, GMM_E_CONFIG, GMM_CKPT_NOT_DIVISIBLE, "stored[%d]: scales with padded columns "
                                      "cannot be dequantized: export them first", j);
    }
    return GMM_OK;
}

/* Adds the moves of everything that a stored shard has in common with the target; *moved counts its elements. */
static gmm_status gmm__gtp_move_overlap(gmm__gtp_planner *p, const gmm_gtp_stored *stored, const gmm__gtp_side *s,
                                        const gmm__gtp_side *d, int32_t target, int64_t *moved) {
    const int scaled = d->shard.scaling != GMM_SCALING_NONE;
    const int64_t col0 = s->plan.col0 > d->plan.col0 ? s->plan.col0 : d->plan.col0;
    const int64_t source_end = s->plan.col0 + s->plan.local_cols;
    const int64_t target_end = d->plan.col0 + d->plan.local_cols;
    gmm__gtp_overlap o;
    int32_t i, j;
    int part;
    o.stored = stored;
    o.source = s;
    o.target = d;
    o.target_index = target;
    o.length[1] = (source_end < target_end ? source_end : target_end) - col0;
    if (o.length[1] <= 0) return GMM_OK;
    o.src[1] = col0 - s->plan.col0;
    o.dst[1] = col0 - d->plan.col0;
    for (i = 0; i < d->count; i++)
        for (j = 0; j < s->count; j++) {
            const gmm_extent *a = &s->extents[j], *b = &d->extents[i];
            const int64_t begin = a->begin > b->begin ? a->begin : b->begin, end = a->end < b->end ? a->end : b->end;
            if (a->section != b->section || begin >= end) continue;
            o.src[0] = a->shard_row + begin - a->begin;
            o.dst[0] = b->shard_row + begin - b->begin;
            o.length[0] = end - begin;
            *moved += o.length[0] * o.length[1];
            for (part = GMM__GTP_DATA; part <= (scaled ? GMM__GTP_SCALE : GMM__GTP_DATA); part++) {
                gmm_status status;
                if (part == GMM__GTP_SCALE && d->shard.scaling == GMM_SCALING_TENSOR) break;
                status = gmm__gtp_move_box(p, &o, part);
                if (status) return status;
            }
        }
    return GMM_OK;
}

static gmm_status gmm__gtp_plan_item(gmm__gtp_planner *p, const gmm_gtp_item *item, int64_t index) {
    gmm__gtp_side d, s, first;
    gmm_shard logical;
    gmm_status status;
    int32_t j, k, target = (int32_t)p->target_count;
    int64_t moved = 0;
    int part, scaled, scale_moved = 0;
    memset(&d, 0, sizeof d);
    memset(&first, 0, sizeof first);
    p->key = item->name;
    if (!item->name || !item->shard || !item->stored || item->stored_count < 1 || (int)item->direction < GMM_ROWWISE ||
        item->direction > GMM_COLUMNWISE)
        return gmm__gtp_ckpt_fail(p, GMM_E_ARG, GMM_CKPT_ARGUMENT, "items[%lld]: name, shard and stored must be given, "
                                  "stored_count %d be >= 1, direction %d a gmm_direction", (long long)index,
                                  (int)item->stored_count, (int)item->direction);
    status = gmm__gtp_read_side(p, item->shard, -1, item->direction, 0, &d);
    if (!status && p->exports) { /* the target is the logical weight */
        logical = d.shard;
        logical.tp_size = logical.gtp_size = 1;
        logical.tp_rank = logical.gtp_rank = 0;
        status = gmm__gtp_read_side(p, &logical, -1, item->direction, 0, &d);
        if (!status && d.shard.scaling > GMM_SCALING_TENSOR) gmm__gtp_unpad(&d, &d.array[GMM__GTP_SCALE]);
    }
    if (status) return status;
    scaled = d.shard.scaling != GMM_SCALING_NONE;
    if (!item->scale_name != !scaled)
        return gmm__gtp_ckpt_fail(p, GMM_E_ARG, GMM_CKPT_ARGUMENT, "items[%lld].scale_name is %s: %s has %s scales",
                                  (long long)index, item->scale_name ? "given" : "NULL",
                                  gmm_scaling_name(d.shard.scaling), scaled ? "" : "no");
    for (part = GMM__GTP_DATA; part <= scaled; part++) {
        gmm_ckpt_tensor *t = &p->targets[p->target_count++];
        memset(t, 0, sizeof *t);
        t->name = part ? item->scale_name : item->name;
        t->dtype = d.array[part].dtype;
        t->rank = 2;
        memcpy(t->shape, d.array[part].shape, sizeof d.array[part].shape);
    }
    for (j = 0; j < item->stored_count && !status; j++) {
        const gmm_gtp_stored *x = &item->stored[j];
        status = gmm__gtp_read_side(p, x->shard, j, item->direction, 1, &s);
        if (!status) status = gmm__gtp_check_stored(p, item, j, &s, &d);
        if (status) return status;
        if (j == 0) first = s;
        if (s.shard.tp_cut != first.shard.tp_cut || s.shard.tp_size != first.shard.tp_size ||
            s.shard.gtp_size != first.shard.gtp_size || s.plan.shard_rows != first.plan.shard_rows)
            return gmm__gtp_ckpt_fail(p, GMM_E_ARG, GMM_CKPT_ARGUMENT, "stored[%d] is cut over TP %d, GTP %d into %lld "
                                      "rows, stored[0] over %d, %d into %lld: must be alike", j,
                                      s.shard.tp_size, s.shard.gtp_size, (long long)s.plan.shard_rows,
                                      first.shard.tp_size, first.shard.gtp_size,
                                      (long long)first.plan.shard_rows);
        for (k = 0; k < j; k++) { /* an earlier stored shard may hold the same rows and columns */
            const gmm_shard *earlier = item->stored[k].shard;
            if (earlier->gtp_rank == s.shard.gtp_rank &&
                (s.shard.tp_cut == GMM_TP_WHOLE || earlier->tp_rank == s.shard.tp_rank))
                break;
        }
        if (k < j) continue;
        if (d.shard.scaling == GMM_SCALING_TENSOR && !scale_moved &&
            (!p->exports || (s.shard.gtp_rank == 0 && (s.shard.tp_rank == 0 || s.shard.tp_cut == GMM_TP_WHOLE)))) {
            gmm_ckpt_move m = GMM_ZERO;
            m.kind = GMM_CKPT_COPY;
            m.part = x->part;
            m.src = x->scale;
            m.dst = target + GMM__GTP_SCALE;
            m.scale = -1;
            m.loops = 1;
            m.count[0] = m.src_step[0] = m.dst_step[0] = 1;
            status = gmm__gtp_add_move(p, &m);
            scale_moved = 1;
        }
        if (!status) status = gmm__gtp_move_overlap(p, x, &s, &d, target, &moved);
    }
    if (status || p->exports) return status;
    if (moved != d.plan.valid_rows * d.plan.local_cols)
        return gmm__gtp_ckpt_fail(p, GMM_E_KEY, GMM_CKPT_MISSING_INDEX,
                                  "what is stored holds %lld of the %lld elements "
                                  "of shard %d of %d, TP %d of %d: a rank's part is missing", (long long)moved,
                                  (long long)(d.plan.valid_rows * d.plan.local_cols), d.shard.gtp_rank,
                                  d.shard.gtp_size, d.shard.tp_rank, d.shard.tp_size);
    for (part = GMM__GTP_DATA; part <= scaled && !status; part++)
        if (part == GMM__GTP_DATA || d.shard.scaling != GMM_SCALING_TENSOR)
            status = gmm__gtp_zero_padding(p, &d, target + part, part);
    return status;
}

/* Checks the parts and plans the items with a planner that has its function, direction, parts, and report. */
static gmm_status gmm__gtp_plan_items(gmm__gtp_planner *p, const gmm_gtp_item *items, int64_t count,
                                      const gmm_allocator *allocator, gmm_ckpt_plan **out) {
    static const char of_moves[] = "gmm_ckpt_plan_of_moves";
    gmm_status status = GMM_OK;
    int64_t i;
    if (p->report) memset(p->report, 0, sizeof *p->report);
    if (out) *out = NULL;
    if (!out || !p->parts || (!items && count))
        return gmm__gtp_ckpt_fail(p, GMM_E_NULL, GMM_CKPT_ARGUMENT, "%s is NULL",
                                  !out ? "out" : !p->parts ? "parts" : "items");
    if (p->part_count < 1 || count < 0 || count > INT32_MAX / 2)
        return gmm__gtp_ckpt_fail(p, GMM_E_ARG, GMM_CKPT_ARGUMENT, "part_count %d, count %lld: must be >= 1, and 0 to "
                                  "2^30 - 1", p->part_count, (long long)count);
    if (allocator && !allocator->alloc != !allocator->release)
        return gmm__gtp_ckpt_fail(p, GMM_E_ARG, GMM_CKPT_ARGUMENT, "allocator: both functions or none");
    for (i = 0; i < p->part_count; i++)
        if (!p->parts[i].table)
            return gmm__gtp_ckpt_fail(p, GMM_E_NULL, GMM_CKPT_ARGUMENT, "parts[%lld].table is NULL", (long long)i);
    if (allocator) p->allocator = *allocator;
    p->targets = (gmm_ckpt_tensor *)gmm__gtp_alloc(p, (size_t)(2 * count + 1) * sizeof *p->targets);
    if (!p->targets) return gmm__gtp_ckpt_fail(p, GMM_E_MEMORY, GMM_CKPT_NO_MEMORY, "no memory");
    for (i = 0; i < count && !status; i++) status = gmm__gtp_plan_item(p, &items[i], i);
    if (!status)
        status = gmm_ckpt_plan_of_moves(out, p->parts, p->part_count, p->targets, p->target_count, p->moves,
                                        (int64_t)p->move_count, p->exports, allocator, p->report);
    if (status && p->report && !strncmp(p->report->error.text, of_moves, sizeof of_moves - 1)) {
        const gmm_error inner = p->report->error; /* its message is to name the function that the caller called */
        (void)gmm__fail(&p->report->error, inner.status, "%s%s", p->fn, inner.text + sizeof of_moves - 1);
    }
    gmm__gtp_free(p, p->targets);
    gmm__gtp_free(p, p->moves);
    gmm__gtp_free(p, p->extents[0]);
    gmm__gtp_free(p, p->extents[1]);
    return status;
}

static gmm__gtp_planner gmm__gtp_planner_make(const char *fn, int exports, const gmm_ckpt_part *parts,
                                              int32_t part_count, gmm_ckpt_report *report) {
    gmm__gtp_planner p;
    memset(&p, 0, sizeof p);
    p.fn = fn;
    p.exports = exports;
    p.parts = parts;
    p.part_count = part_count;
    p.report = report;
    return p;
}

GMMDEF gmm_status gmm_gtp_export(gmm_ckpt_plan **out, const gmm_ckpt_part *parts, int32_t part_count,
                                 const gmm_gtp_item *items, int64_t count, const gmm_allocator *allocator,
                                 gmm_ckpt_report *report) {
    gmm__gtp_planner p = gmm__gtp_planner_make("gmm_gtp_export", 1, parts, part_count, report);
    return gmm__gtp_plan_items(&p, items, count, allocator, out);
}
GMMDEF gmm_status gmm_gtp_import(gmm_ckpt_plan **out, const gmm_ckpt_part *parts, int32_t part_count,
                                 const gmm_gtp_item *items, int64_t count, const gmm_allocator *allocator,
                                 gmm_ckpt_report *report) {
    gmm__gtp_planner p = gmm__gtp_planner_make("gmm_gtp_import", 0, parts, part_count, report);
    return gmm__gtp_plan_items(&p, items, count, allocator, out);
}

#ifdef __cplusplus
}
#endif
#endif /* GMM_IMPLEMENTATION */

/* ------------------------------------------------------------------------------------------------- 13 Licence ---
 * MIT License, text in the file LICENSE of the repository and below.
 *
 * Permission is hereby granted, free of charge, to any person obtaining a copy of this software and associated
 * documentation files (the "Software"), to deal in the Software without restriction, including without limitation the
 * rights to use, copy, modify, merge, publish, distribute, sublicense, and/or sell copies of the Software, and to
 * permit persons to whom the Software is furnished to do so, subject to the following conditions: The above copyright
 * notice and this permission notice shall be included in all copies or substantial portions of the Software.
 *
 * THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR IMPLIED, INCLUDING BUT NOT LIMITED TO THE
 * WARRANTIES OF MERCHANTABILITY, FITNESS FOR A PARTICULAR PURPOSE AND NONINFRINGEMENT. IN NO EVENT SHALL THE AUTHORS
 * OR COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR
 * OTHERWISE, ARISING FROM, OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE SOFTWARE.
 */
