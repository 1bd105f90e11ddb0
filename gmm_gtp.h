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
 *     Tensor parallelism (TP) cuts a weight [N, K] first: by rows (column-parallel), by columns (row-parallel), or not
 *     at all. What one TP rank has is its local matrix. Generalized tensor parallelism (GTP) cuts that by rows over g
 *     ranks: the local rows are padded at their end to a multiple of unit * g, and rank r keeps the padded rows
 *     [r * shard_rows, (r + 1) * shard_rows). All ranks hold equally many rows, since collectives need equal counts,
 *     and know the same pad; the last ranks may hold padding only. Before a GEMM the g shards are gathered one behind
 *     the other into padded_rows rows, of which the first local_rows are the operand: padding is never stripped.
 *     A GTP size of 1 leaves the local matrix as it is: no padding, nothing gathered.
 *
 *     Sections are parts of a weight that TP cuts one by one, such as gate and up of a gated FC1: the local matrix is
 *     the TP slice of the first section, then that of the second, and so on. GTP pads and cuts the stack as a whole,
 *     so that the padding stays one tail and a GEMM reads one dense operand. A shard may therefore begin and end inside
 *     any section; its extents name the logical rows that it holds. Logical rows are those of the whole, unpadded
 *     weight: checkpoints are written in them, so that one file loads at every TP and GTP size, and padding leaves no
 *     process.
 *
 *     Padding rows are zeros after initialisation and loading, so are their gradients, and norms skip them: only the
 *     first valid_rows rows of a shard count.
 *
 *     A gradient scale is never derived from a group size: where gradients are reduced, it is an argument in fp32.
 *
 * Thread safety: sections 1 to 5 and 11 are pure or write only through their arguments. Communicators and the runtime
 * serve one thread at a time each. Only what makes CPU ranks, communicators and events, and checkpoint plans allocate.
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

/* What tensor parallelism cuts. */
typedef enum gmm_tp_cut {
    GMM_TP_WHOLE = 0, /* nothing: every TP rank has the same matrix */
    GMM_TP_ROWS = 1,  /* out_features of each section (column-parallel) */
    GMM_TP_COLS = 2,  /* in_features (row-parallel) */
    GMM_TP_CUT_MAX = 0x7fffffff
} gmm_tp_cut;

enum { GMM_GTP_UNPADDED = -1 }; /* gmm_shard.unit: never pad */

/* What the rows of a shard must be a multiple of: 16 for NONE, TENSOR and NV16, 32 for MX32, 128 for 1X128 and 128X128;
   0 for a scaling that is not sharded (ROW) or unknown. The second form gives the unit of the weights that a recipe
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

/* Where the shard lies. Byte counts are indexed by gmm_direction, their scales are in COMPACT order (SWIZZLED takes the
   same bytes). */
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
    int64_t shard_data_bytes[2], shard_scale_bytes[2];   /* as kept and sent; [GMM_COLUMNWISE] is 0 where backward reads
                                                            the rowwise copy or a local transpose of it: NONE, TENSOR,
                                                            128X128 */
    int64_t gather_data_bytes[2], gather_scale_bytes[2]; /* of a gathered operand; [GMM_COLUMNWISE] is 0 for NONE, whose
                                                            backward reads the rowwise one */
} gmm_shard_plan;

/* Plans one shard. *out is written on success only.
   Errors: GMM_E_NULL (shard, plan), GMM_E_VERSION, GMM_E_DTYPE (format not sharded, or dtype and scaling do not go
       together), GMM_E_OVERFLOW; GMM_E_ARG: rows or cols below 1, a rank outside its size, a section below 1, section
       rows that do not add up, rows (of every section) or cols that tp_size does not divide, odd local rows or cols of
       a 4-bit format; GMM_E_CONFIG: a unit that cuts the format's blocks, unpadded rows that gtp_size does not divide
       (rows would be lost) or that cut blocks, a TP slice that breaks tp_multiple. */
GMMDEF gmm_status gmm_gtp_plan(const gmm_shard *shard, gmm_shard_plan *plan, gmm_error *error);

/* ------------------------------------------------------------------------------------------------ 2 Extents --- */

/* A run of rows that a shard holds. Its columns are [col0, col0 + local_cols) of the plan. Over all ranks (one TP rank
   where TP cuts nothing) the extents cover every logical row and column exactly once. */
typedef struct gmm_extent {
    int32_t section;
    int32_t reserved;
    int64_t begin, end;  /* rows [begin, end) of the whole section */
    int64_t logical_row; /* `begin`, counted in the whole weight */
    int64_t shard_row;   /* where the run starts in the shard */
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

/* Order of ranks, fastest axis first. An expert grid puts GTP outside EP, whose all-to-all gets the shorter links. */
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

/* The group of ranks that differ from a rank along `axes` only. `first` is the same for all its members and for nobody
   else, so (first, index) are colour and key of a communicator split. */
typedef struct gmm_grid_group {
    int32_t first; /* lowest rank of the group */
    int32_t index; /* of the rank in its group, in the order of ranks */
    int32_t size;
} gmm_grid_group;

/* `axes` is an OR of 1u << GMM_AXIS_*. Weights are gathered along GTP. Whatever adds up data (tokens, losses, expert
   counts, evaluation) goes along GTP, CP and DP together, since GTP peers see different tokens; optimizer state is
   sharded along CP and DP without GTP.
   Errors: as gmm_grid_coords; GMM_E_ARG (an unknown axis bit). */
GMMDEF gmm_status gmm_grid_group_of(const gmm_grid *grid, int32_t rank, uint32_t axes, gmm_grid_group *group,
                                    gmm_error *error);

/* Checks that the grids of dense and of expert weights describe one job: equal world and equal PP, from which it
   follows that their pipeline groups are the same.  Errors: as gmm_grid_world; GMM_E_CONFIG. */
GMMDEF gmm_status gmm_grid_match(const gmm_grid *dense, const gmm_grid *expert, gmm_error *error);

/* The replica rule: of all ranks that hold the same part of a tensor, one writes it to a checkpoint and counts it in a
   norm: the one at 0 along every axis that does not cut the tensor. `cut_axes` names the axes that do (as above): PP
   unless all stages share the tensor, GTP and mostly TP for a sharded weight, also EP for an expert's, neither GTP nor
   TP for a norm's weight, also DP for optimizer state. *writes is 1 on that rank and 0 on the others.
   Errors: as gmm_grid_group_of. */
GMMDEF gmm_status gmm_gtp_writes(const gmm_grid *grid, int32_t rank, uint32_t cut_axes, int32_t *writes,
                                 gmm_error *error);

/* -------------------------------------------------------------------------------------------------- 4 Seeds --- */

/* Seed of a rank that draws its own shard, so that the g shards are not copies of one another: base + 65536 (1 + r),
   and 32768 more in an expert grid. A counter-based generator needs no such seed: it takes the logical rows of the
   extents, and then the gathered weight does not depend on g. Pure, modulo 2^64. */
GMMDEF uint64_t gmm_gtp_seed(uint64_t base, gmm_grid_kind kind, uint32_t gtp_rank);

/* ------------------------------------------------------------------------------------------- 5 Memory, forecast --- */

/* Weights of one shape, and the buffers that serve them. Slot counts are of bundles; 0 = none, or the slots counted
   with another use are shared. With gtp_size 1 weights stay in place and nothing is received. */
typedef struct gmm_gtp_use {
    uint32_t struct_size;
    int32_t bundle;           /* weights gathered and reduced together, such as a layer's local experts; 0 = 1 */
    const gmm_shard *shard;   /* the plan of each */
    int64_t layers;           /* bundles that the rank holds; 0 = 1 */
    int32_t gather_slots;     /* gather buffers of each direction: lookahead + 1 */
    int32_t recompute_slots;  /* rowwise gather buffers of a recompute chain */
    int32_t wgrad_slots;      /* whole gradients alive: the one being written and those being reduced; in captured
                                 graphs the slots of their ring */
    int32_t reduce_slots;     /* reductions in flight */
    int32_t all_to_all;       /* a reduction receives 0: its shard; 1: all parts, which it then adds up in fp32 */
    gmm_dtype main_grad;      /* F32 or BF16; NONE: frozen, without gradient and optimizer state */
    gmm_dtype wire;           /* of reductions and of the gradients they read: F32 or BF16; NONE = main_grad's */
    int32_t optimizer_bytes;  /* per parameter; 0 = 12: fp32 master and two moments */
    int32_t optimizer_ranks;  /* that share the optimizer state of a shard (CP * DP); 0 = 1 */
    int32_t reserved;         /* 0 */
} gmm_gtp_use;

/* Bytes per rank, as a runtime takes them. Padding rows and scales are counted; alignment, amaxes and workspaces are
   not. */
typedef struct gmm_gtp_memory {
    uint32_t struct_size;
    int32_t reserved;
    int64_t weights;    /* shards in every direction that is stored */
    int64_t main_grads;
    int64_t optimizer;
    int64_t gather;     /* gathered operands; also the local transposes that TENSOR and 128X128 need for backward */
    int64_t wgrad;      /* whole gradients before their reduction */
    int64_t reduce;     /* what reductions receive */
    int64_t total;      /* of the above, and the stage */
    int64_t whole_weights; /* for comparison: what `weights` would be with gtp_size 1; not in the total */
    int64_t stage;      /* where parts of ranks arrive that are put side by side (1X128, NV16) or transposed (TENSOR,
                           128X128): once for all uses, the most that one wants */
} gmm_gtp_memory;

/* Adds the bytes of one use to *memory; start from GMM_ZERO. *memory is written on success only.
   Errors: as gmm_gtp_plan; GMM_E_NULL, GMM_E_ARG (field out of range), GMM_E_DTYPE (main_grad, wire),
       GMM_E_CONFIG (gradient slots of a frozen weight), GMM_E_OVERFLOW. */
GMMDEF gmm_status gmm_gtp_memory_add(const gmm_gtp_use *use, gmm_gtp_memory *memory, gmm_error *error);

/* A bundle as a forecast sees it, and what it finds. Times are in seconds. */
typedef struct gmm_gtp_stage {
    uint32_t struct_size;
    int32_t bundle;          /* weights gathered together; 0 = 1 */
    const gmm_shard *shard;  /* of each */
    double tokens;           /* rows that go through its GEMMs on this rank, all weights together; >= 0 */
    double gather, reduce;   /* out: on the wire alone; gather: rowwise */
    double sum;              /* out: into main_grad */
    double forward, backward;/* out: GEMMs alone */
    double exposed_forward;  /* out: what the compute waits for the gather, forward */
    double exposed_backward; /* out: the same, backward */
    double exposed_reduce;   /* out: what it waits for a gradient buffer */
} gmm_gtp_stage;

/* One micro-batch in the steady state: forward over the stages, backward in their reverse order, then a fence. The host
   is ahead: a gather starts when the one before it is done and its slot has been read, a reduction when its gradient is
   there and the one before it is done. Gathers and reductions do not slow each other or the GEMMs down. */
typedef struct gmm_gtp_forecast {
    uint32_t struct_size;
    int32_t stages;
    double gemm_rate;        /* flop/s that GEMMs of these shapes reach; > 0 */
    double link_rate;        /* bytes/s that a rank receives and sends in a collective; > 0 */
    double latency;          /* of a collective; >= 0 */
    double memory_rate;      /* bytes/s of the sum into main_grad and of transposes; 0 = they take no time */
    gmm_dtype wire;          /* of gradients: F32 or BF16; NONE = F32 */
    gmm_dtype main_grad;     /* F32 or BF16; NONE = F32 */
    int32_t prefetch;        /* bundles gathered ahead; one slot more, of each direction */
    int32_t wgrad_slots;     /* 0 = 2 */
    int32_t wrap;            /* 1: the head of forward was gathered during the backward before */
    int32_t reserved;        /* 0 */
    double compute;          /* out: GEMMs alone */
    double step;             /* out: compute and all that is exposed */
    double exposed_gather, exposed_reduce; /* out: sums over stages; reduce: and the wait of the fence */
    double gather, reduce;   /* out: on the wire, forward and backward */
} gmm_gtp_forecast;

/* Plays the step with the given rates. stages [forecast->stages] in the order of forward, at most 4096. Pure.
   Errors: as gmm_gtp_plan; GMM_E_NULL, GMM_E_VERSION, GMM_E_ARG, GMM_E_DTYPE. Nothing is written on failure. */
GMMDEF gmm_status gmm_gtp_foresee(gmm_gtp_forecast *forecast, gmm_gtp_stage *stages, gmm_error *error);

/* ------------------------------------------------------------------------------------------ 6 Communicators --- */

/* Collectives among the ranks of a group, as a table of functions; every function takes `self` first.
   Order       All ranks make the same calls in the same order. A call is enqueued on the stream and done when the
               stream comes to it: then what it received is complete, and what it sent may be overwritten.
   Groups      Calls between group_begin and group_end are one operation with distinct outputs. `what` names it in
               messages, is the same text on all ranks, and lives until it is done.
   Failure     GMM_E_COMM, from a call or from poll, which tells operation and peer. The communicator is then unusable.
   Threads     One at a time. */
typedef struct gmm_comm {
    uint32_t struct_size;
    int32_t rank, size;
    int32_t exchanges;    /* 1: all_to_all and a sum behind it are faster than reduce_scatter: GMM_GTP_REDUCE_AUTO */
    int32_t processors;   /* multiprocessors that its calls need beside a GEMM: see gmm_gtp_view.leave */
    int32_t reserved;
    void *self;
    gmm_status (*group_begin)(void *self, const char *what);
    gmm_status (*group_end)(void *self);
    /* recv [size][bytes]: what every rank sends, in the order of ranks. send may be its own place in recv. */
    gmm_status (*all_gather)(void *self, const void *send, void *recv, size_t bytes, gmm_stream stream);
    /* send [size][count], recv [count]: the sum over ranks of send's part `rank`. F32, BF16 or F16. recv may be its own
       part of send. */
    gmm_status (*reduce_scatter)(void *self, const void *send, void *recv, size_t count, gmm_dtype dtype,
                                 gmm_stream stream);
    /* send, recv [size][bytes]: part r goes to rank r, part r comes from rank r. Not in place. The part that a rank
       would send to itself stays in send; that of recv may be left as it is. */
    gmm_status (*all_to_all)(void *self, const void *send, void *recv, size_t bytes, gmm_stream stream);
    /* The largest of each value, in place: the amax of a tensor that several ranks share. */
    gmm_status (*all_reduce_max)(void *self, float *values, size_t count, gmm_stream stream);
    /* Registers memory that the group's calls will send from and receive into; collective. Both may be NULL. */
    gmm_status (*window_add)(void *self, void *base, size_t bytes, void **window);
    gmm_status (*window_remove)(void *self, void *window);
    /* GMM_OK while nothing is known to be wrong; `error` may be NULL. Does not wait. */
    gmm_status (*poll)(void *self, gmm_error *error);
    /* Gives up: operations under way end as soon as they can, later ones are refused. `why` is copied. */
    void (*give_up)(void *self, const char *why);
} gmm_comm;

/* -------------------------------------------------------------------------------------------------- 7 CPU ranks --- */

/* Ranks in one process, on the CPU: streams are queues, events are counters, communicators copy between the ranks'
   memory. They train without a GPU, and they prove an order of work: which of the operations that could run next runs
   is drawn from a seed, and the checker reports every two accesses to one place, one of them a write, that no event,
   stream or wait of the host orders (vector clocks over the ranges of gmm_work, copies, fills and collectives).
   Driven by one thread, a schedule is a function of the seed. With a thread per rank it is also one of the system.
   Stream NULL is the calling thread: what it is given is done on return, and a wait waits, at most timeout_ms without
   progress of the own rank; then every rank of the communicator that hangs gets GMM_E_COMM, and nothing that is still
   queued there is done. Work runs on whichever thread waits or enqueues.
   Needs GMM_WITH_CPU_RANKS where GMM_IMPLEMENTATION is, and threads of POSIX; otherwise create is GMM_E_BUILD.
   Threads: calls for different ranks may come from different threads; all but gmm_ranks_destroy. */
typedef struct gmm_ranks gmm_ranks;
typedef struct gmm_ranks_graph gmm_ranks_graph;

typedef struct gmm_ranks_config {
    uint32_t struct_size;
    int32_t ranks;           /* 1 to 98 */
    uint64_t seed;           /* 0: operations run as soon as they can; else in an order drawn from it, mostly late */
    int32_t timeout_ms;      /* 0 = 10000 */
    int32_t check_races;     /* 1: every access is checked */
    gmm_allocator allocator; /* of all that the ranks need, whenever they need it; none = GMM_MALLOC */
} gmm_ranks_config;

/* Errors: GMM_E_NULL, GMM_E_ARG, GMM_E_VERSION, GMM_E_MEMORY, GMM_E_BUILD. *out is NULL after a failure. */
GMMDEF gmm_status gmm_ranks_create(const gmm_ranks_config *config, gmm_ranks **out, gmm_error *error);
/* Frees it with all streams and communicators; events and graphs must have been destroyed. NULL is allowed. */
GMMDEF void gmm_ranks_destroy(gmm_ranks *ranks);

/* The runtime of a rank; gmm_ranks_error tells why its functions fail. Up to 48 streams, graphs' streams included.
   Errors: GMM_E_NULL, GMM_E_ARG. */
GMMDEF gmm_status gmm_ranks_runtime(gmm_ranks *ranks, int32_t rank, gmm_runtime *out);

/* A communicator among `count` distinct ranks: out[i] is that of members[i], whose number in it is i. Sums are in fp32
   in the order of ranks, rounded once. Where ranks come to a collective with other calls, sizes or names of groups
   (which are the names of bundles), all ranks get GMM_E_COMM and a message with both names, and no memory is touched.
   Errors: GMM_E_NULL, GMM_E_ARG, GMM_E_MEMORY. */
GMMDEF gmm_status gmm_ranks_comms(gmm_ranks *ranks, const int32_t *members, int32_t count, gmm_comm *out);

/* Runs what is queued until nothing can run.
   Errors: GMM_E_NULL; GMM_E_STATE (something is left that waits for what nobody has given: a deadlock, where all ranks
       are through); GMM_E_COMM (a rank was given up). gmm_ranks_error tells more. */
GMMDEF gmm_status gmm_ranks_run(gmm_ranks *ranks);

/* What the last failing call for a rank said; "" before any. A copy, which lasts until the next call for that rank. */
GMMDEF const char *gmm_ranks_error(gmm_ranks *ranks, int32_t rank);

/* Races found so far, and the text of the first; `text` may be NULL. Needs check_races. */
GMMDEF int64_t gmm_ranks_races(gmm_ranks *ranks, const char **text);

/* Captures what a stream is given, and what streams are given that wait for its events, as queues that a launch
   replays: the counterpart of a CUDA graph, with its rules (other streams join by events and must be joined back; an
   event from outside is waited for as a node only; a graph is one node of the launching stream). One capture of a rank
   at a time.
   Errors: GMM_E_NULL, GMM_E_CAPTURE, GMM_E_MEMORY. */
GMMDEF gmm_status gmm_ranks_capture_begin(gmm_ranks *ranks, int32_t rank, gmm_stream stream);
GMMDEF gmm_status gmm_ranks_capture_end(gmm_ranks *ranks, int32_t rank, gmm_stream stream, gmm_ranks_graph **out);
GMMDEF gmm_status gmm_ranks_launch(gmm_ranks_graph *graph, gmm_stream stream);
GMMDEF void gmm_ranks_graph_destroy(gmm_ranks_graph *graph); /* not while it runs */

/* ------------------------------------------------------------------------------------------------------- 8 NCCL --- */

/* Collectives of NCCL on a communicator that the caller has made, between GPUs of any number of processes and hosts.
   Calls are captured by graphs as NCCL captures them: by all ranks or by none. Gathers and reductions side by side take
   two communicators, all ranks issuing their calls in one order; NCCL_LAUNCH_ORDER_IMPLICIT=1 has NCCL keep that order
   on the device too. On a non-blocking communicator (ncclConfig_t.blocking 0) a call waits for NCCL at most
   timeout_ms, so that a rank which is gone before the first collective is an error; a blocking one waits without end.
   give_up is ncclCommAbort: the ncclComm_t is gone once poll fails. Needs GMM_WITH_NCCL and nvcc. */
struct ncclComm;
typedef struct gmm_nccl_config {
    uint32_t struct_size;
    int32_t windows;       /* 1: window_add registers symmetric windows, of memory that ncclMemAlloc gave. For gathers
                              and reductions by GMM_GTP_REDUCE_EXCHANGE: reduce_scatter was slower in them with NCCL
                              2.28.3, and groups of it wrong */
    struct ncclComm *comm; /* the ncclComm_t; the caller destroys it, after gmm_nccl_close */
    gmm_context *ctx;      /* of the communicator's device: its memory, its messages */
    int32_t timeout_ms;    /* 0 = 10000 */
    int32_t reserved;
} gmm_nccl_config;

/* Errors: GMM_E_NULL, GMM_E_ARG, GMM_E_VERSION, GMM_E_MEMORY, GMM_E_COMM (what NCCL says of the communicator),
       GMM_E_BUILD. *out is zeroed after a failure. */
GMMDEF gmm_status gmm_nccl_open(const gmm_nccl_config *config, gmm_comm *out, gmm_error *error);
/* Frees what open made; work must be done. NULL and a zeroed one are allowed. */
GMMDEF void gmm_nccl_close(gmm_comm *comm);

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

/* --------------------------------------------------------------------------------------------------- 10 Runtime --- */

/* The GTP runtime: weights gathered before they are read, gradients reduced behind the compute.
   Weights are declared, bound into bundles (gathered and reduced together, such as a layer's local experts) and named
   in chains (the order in which a pass reads its bundles, so that the next can be gathered meanwhile). Seal, ask for
   the memory, bind it; then, per step and bundle:

       acquire(forward) ... GEMM ... release        a view of the gathered weights, valid between the two
       acquire(backward) ... dgrad ... release
       wgrad ... GEMM ... submit                    a buffer for the whole gradient, then its reduction into main_grad
       fence ... optimizer ... publish              main_grad is complete; the shards are new

   Order       Every call enqueues and returns (with CPU ranks and stream NULL it may wait). All ranks make the same
               calls in the same order, also a rank without tokens. Gathers run on the domain's gather stream,
               reductions and their sums on its reduce stream, the caller's work on the streams that he passes.
   Buffers     Gathered weights and gradients live in slots. Every slot carries an event of its last use, and whoever
               takes it makes its stream wait for that: right for any order of calls, number of slots, or sharing of
               streams. What a slot holds is known by bundle, direction and version, so a gather that is still there is
               used again, and an outdated one never. Addresses depend on bundle and pass alone, for ever after bind.
   Shards      Whoever writes shards first makes his stream wait for the gathers that read them (fence), and publishes
               them afterwards.
   Formats     Elements and scales of quantized shards move as they are: quantized once, where they are published
               (gmm_gtp_quantize), in the directions that the format stores; which one is gathered is a matter of the
               pass alone. What arrives is what one rank would have made of the whole matrix, bit for bit, and is put
               where it stays in one step.
   g = 1       No communicator is called: views are the shards. Gradients go through the same buffers, since scale and
               accumulation are the same. TENSOR and 128X128 are transposed for backward on the caller's stream.
   Graphs      Between capture_begin and capture_end acquire, release, wgrad, submit and fence may be called, nothing
               else; chains say beforehand which bundles are captured. Content of slots passes from one graph to the
               next only if it was prefetched for it; graphs are then replayed in the order of their capture.
   Errors      What can be checked is checked before anything is enqueued, and state stays as it was. A failure behind
               that, of a communicator above all, poisons the object: every later call returns the same status, nothing
               more is enqueued, and communicators are told to give up. gmm_gtp_last_error tells what and who.
   Threads     One at a time. Allocates nothing itself: memory is the caller's, events are the runtime's (at bind).
   Callbacks   May call gmm_gtp_publish, nothing else. */
typedef struct gmm_gtp gmm_gtp;

typedef enum gmm_gtp_pass {
    GMM_GTP_FORWARD = 0,
    GMM_GTP_BACKWARD = 1,
    GMM_GTP_RECOMPUTE = 2, /* the forward again, inside backward: rowwise buffers of its own, asks nobody to publish */
    GMM_GTP_PASSES = 3,
    GMM_GTP_PASS_MAX = 0x7fffffff
} gmm_gtp_pass;

/* Data groups: whatever counts tokens, losses or expert load goes over ranks that see different tokens, GTP peers
   included; see gmm_grid_group_of. */
typedef struct gmm_gtp_hooks {
    void *user;
    /* The shards of these weights are about to be read for a forward: publish them now if they are not yet. Once per
       bundle and forward; for a graph from gmm_gtp_pre_replay. NULL = not wanted. */
    void (*need)(void *user, gmm_gtp *gtp, const int32_t *weights, int32_t count);
    /* main_grad of these weights, a whole bundle, has had its sum: work on `stream` from here on sees it. Once per
       submit; for a graph from gmm_gtp_post_replay. NULL = not wanted. */
    void (*ready)(void *user, gmm_gtp *gtp, const int32_t *weights, int32_t count, gmm_stream stream);
} gmm_gtp_hooks;

typedef struct gmm_gtp_config {
    uint32_t struct_size;
    int32_t domains, weights, bundles, chains, graphs; /* the most that will be declared; domains 0 = 1 */
    int32_t timeout_ms;         /* of a collective that has begun, see gmm_gtp_poll; 0 = 10000 */
    gmm_context *ctx;           /* for sums and quantization; with CPU ranks one that nobody else uses */
    const gmm_runtime *runtime; /* copied; NULL = that of ctx */
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

/* Ranks that share shards, and the streams of their traffic. Dense and expert weights are two domains with groups of
   different sizes. Gathers and reductions run side by side only with two communicators. */
typedef struct gmm_gtp_domain {
    uint32_t struct_size;
    gmm_dtype wire;             /* of reductions and gradient buffers: F32 or BF16; NONE = F32 */
    const gmm_comm *gather;     /* copied; NULL = one rank */
    const gmm_comm *reduce;     /* copied; NULL = gather's */
    gmm_stream gather_stream, reduce_stream;
    gmm_gtp_reduction reduction;
    int32_t wgrad_slots;        /* gradient buffers of one size, at most one per bundle; 0 = 2 */
    int32_t synchronous;        /* 1: submit makes the caller's stream wait for the sum (for comparison) */
    int32_t reserved;
} gmm_gtp_domain;

typedef struct gmm_gtp_weight {
    uint32_t struct_size;
    int32_t expert;             /* place in its bundle, 0 for a weight of its own */
    const char *name;           /* for messages; lives as long as the object */
    const gmm_shard *shard;     /* copied; its group is the domain's */
    void *data[2];              /* the shard by gmm_direction, as gmm_gtp_plan sizes it; [COLUMNWISE] NULL where the
                                   plan has 0 bytes. Padding rows are zeros */
    void *scale[2];             /* its scales, COMPACT; TENSOR: one value in [ROWWISE], the same on all ranks */
    float *amax;                /* NV16: global amax, the same on all ranks; those of a bundle stand one behind the
                                   other in the order of experts. TENSOR: where gmm_gtp_quantize leaves it, or NULL */
    void *main_grad;            /* [shard_rows, local_cols], dense; NULL = frozen, on all ranks alike */
    gmm_dtype main_grad_dtype;  /* F32 or BF16 */
    int32_t reserved;
    const gmm_format *format;   /* how gmm_gtp_quantize makes a quantized shard, copied; NULL = the caller makes it.
                                   Scales in COMPACT order; not stochastic, hadamard or row_amax, whose bits would
                                   depend on where shards end */
} gmm_gtp_weight;

typedef struct gmm_gtp_chain {
    uint32_t struct_size;
    gmm_gtp_pass pass;
    const int32_t *bundles;     /* [count] in the order of the pass; a bundle is in one chain of a pass at most */
    int32_t count;              /* >= 1 */
    int32_t prefetch;           /* bundles gathered ahead, 0 to 3 */
    int32_t held;               /* bundles that the caller holds at a time; 0 = 1 */
    int32_t captured;           /* 1: for graphs; may be run without one before, to warm up */
} gmm_gtp_chain;

/* Matrices of a bundle in the order of expert indices: a packed operand if all have one shape and lie evenly,
   otherwise a host table of addresses that stays as it is. `mat` goes into gmm_linear.w, gmm_mlp.w1 or w2, or
   gmm_grad.mat as it is: rows are logical, padding lies behind them. In backward a quantized mat has its columnwise
   copy alone, in mat.columnwise, which dgrad reads: of formats that store one (1X128, MX32, NV16) the gathered one, of
   TENSOR and 128X128 a transpose of the rowwise one, made here. Scales and amaxes of tensors are those that were there
   when the bundle was gathered. A table of several shapes is for calls with one matrix each: its mat.ld is that of the
   first; the columnwise copies of the others, but for MX32, have the padded_rows of their plans. */
typedef struct gmm_gtp_view {
    uint32_t struct_size;
    int32_t count;
    gmm_mat mat;
    int64_t rows, cols;         /* of the first matrix */
    int64_t version;            /* how often its shards were published */
    int32_t slot;               /* the buffer; -1 = the shards themselves */
    int32_t leave;              /* multiprocessors that a GEMM over the view should leave to the gathers and reductions
                                   beside it: gmm_options.sm_limit = the GPU's less these. 0 = it may have all */
} gmm_gtp_view;

typedef enum gmm_gtp_add { GMM_GTP_ADD = 0, GMM_GTP_SET = 1, GMM_GTP_ADD_MAX = 0x7fffffff } gmm_gtp_add;

typedef struct gmm_gtp_gradient {
    uint32_t struct_size;
    float scale;                /* main_grad = scale * sum (+ main_grad), in fp32; taken as it is, 0 means 0 */
    gmm_gtp_add add;
    int32_t zero;               /* 1: this rank had no tokens, its gradient is zero; no buffer was asked for */
    const gmm_mat *from;        /* the gradient, [count] matrices of rows x cols in F32, BF16 or F16, instead of the
                                   buffer of gmm_gtp_wgrad; not written. NULL = the buffer. A table is on the host */
} gmm_gtp_gradient;

/* Bytes of a domain's two memory blocks, for windows of the two communicators. Aligned to 256. The first holds the
   gather slots, a stage in which the parts of ranks arrive where they must be put side by side or transposed, and what
   gmm_gtp_quantize needs. */
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
    int64_t prefetched;         /* found what a prefetch had gathered */
    int64_t resident;           /* found it still there from an earlier acquire, or g = 1 */
    int64_t exposed;            /* had to gather */
    int64_t gathers;            /* prefetches and exposed */
    int64_t prefetches;
    int64_t outdated;           /* prefetches thrown away because newer shards were published */
    int64_t busy;               /* prefetches left out because the slot was in use */
    int64_t transposed;         /* of the gathers: found the rowwise copy there (g = 1: the shard), and transposed it */
    int64_t submits;
    int64_t gathered_bytes, reduced_bytes; /* that other ranks sent here */
    uint64_t calls;             /* hash over all calls so far that ranks must make alike */
} gmm_gtp_statistics;

/* Bytes of the object for a configuration, and the object in memory aligned to 16 bytes.
   Errors: GMM_E_NULL, GMM_E_VERSION, GMM_E_ARG, GMM_E_WORKSPACE, GMM_E_ALIGN, GMM_E_OVERFLOW. */
GMMDEF gmm_status gmm_gtp_query(const gmm_gtp_config *config, size_t *bytes, gmm_error *error);
GMMDEF gmm_status gmm_gtp_init(void *memory, size_t bytes, const gmm_gtp_config *config, gmm_gtp **out,
                               gmm_error *error);
/* Ends the use of memory, events and windows; work must be done. NULL is allowed.  Errors: those of the runtime. */
GMMDEF gmm_status gmm_gtp_fini(gmm_gtp *gtp);
/* What the last failing call said; "" before any. */
GMMDEF const char *gmm_gtp_last_error(const gmm_gtp *gtp);

/* Declarations, in any order that names what exists; ids count from 0. Descriptors are copied.
   A bundle takes its weights in any order: their expert indices must be 0 to count - 1, each once, and they share dtype
   and scaling; quantized ones of one shape also the unit. Every weight is in one bundle. A bundle's name is the same on
   all ranks; by it CPU ranks tell bundles of one size apart. NULL is "bundle".
   Errors: GMM_E_NULL, GMM_E_VERSION, GMM_E_ARG, GMM_E_DTYPE, GMM_E_CONFIG, GMM_E_ALIGN, as gmm_gtp_plan;
       GMM_E_WORKSPACE (more than configured); GMM_E_STATE (sealed). */
GMMDEF gmm_status gmm_gtp_add_domain(gmm_gtp *gtp, const gmm_gtp_domain *domain, int32_t *id);
GMMDEF gmm_status gmm_gtp_add_weight(gmm_gtp *gtp, const gmm_gtp_weight *weight, int32_t *id);
GMMDEF gmm_status gmm_gtp_add_bundle(gmm_gtp *gtp, int32_t domain, const int32_t *weights, int32_t count,
                                     const char *name, int32_t *id);
GMMDEF gmm_status gmm_gtp_add_chain(gmm_gtp *gtp, const gmm_gtp_chain *chain, int32_t *id);

/* Ends the declarations and lays out the memory; then the bytes of a domain; then its memory, which must be the same
   blocks of it on all ranks if the communicators register windows (collective). Bytes of 0 take NULL.
   Errors: GMM_E_STATE, GMM_E_CONFIG (a weight in no bundle; a chain that mixes), GMM_E_WORKSPACE, GMM_E_ALIGN,
       GMM_E_ARG, GMM_E_NULL, GMM_E_VERSION, GMM_E_COMM, those of the runtime. */
GMMDEF gmm_status gmm_gtp_seal(gmm_gtp *gtp);
GMMDEF gmm_status gmm_gtp_memory_need(gmm_gtp *gtp, int32_t domain, gmm_gtp_need *need);
GMMDEF gmm_status gmm_gtp_bind(gmm_gtp *gtp, int32_t domain, void *gather, size_t gather_bytes, void *reduce,
                               size_t reduce_bytes);

/* What comes after a chain: the head of `next` is gathered while the tail of `chain` is computed. Backward after
   forward, forward after backward within a step; -1 = nothing, the default: before an optimizer step, whose new shards
   would make the gather useless. Seal counts what follows by then, on all ranks alike: a forward chain that follows
   itself, as in inference or where a pipeline fills, takes more slots than held + prefetch, by what its count leaves
   over when divided by that. A head that shares its slot with the tail is not gathered ahead.
   Errors: GMM_E_ARG, GMM_E_CAPTURE. */
GMMDEF gmm_status gmm_gtp_follow(gmm_gtp *gtp, int32_t chain, int32_t next);

/* The shards of these weights are new: what `stream` was given so far wrote them. Gathers wait for that.
   Errors: GMM_E_NULL, GMM_E_ARG, GMM_E_STATE, GMM_E_CAPTURE, those of the runtime. */
GMMDEF gmm_status gmm_gtp_publish(gmm_gtp *gtp, const int32_t *weights, int32_t count, gmm_stream stream);

/* Makes quantized shards of rows in a wider dtype, and publishes them: waits for gathers as gmm_gtp_fence does, finds
   the amax of tensors that have one (TENSOR unless delayed, NV16) over all ranks of the domain in one packed reduction,
   and writes elements, scales and amax in every direction that the plan stores. Weights without a scaling are
   converted. Collective: all ranks name the same weights in the same order. The bits are those that one rank would make
   of the whole matrix, whatever the number of ranks.
   Shapes: from [count] matrices [shard_rows, local_cols], dense, padding rows zeros. */
typedef struct gmm_gtp_quantization {
    uint32_t struct_size;
    gmm_dtype dtype;            /* of the rows: F32, F16 or BF16 */
    const void *const *from;    /* [count] addresses, on the host */
    const float *scale;         /* [count] delayed: quantization scales, in the context's memory; NULL = ones */
    float *amax;                /* [count] delayed: raised to what any rank sees, in the context's memory; NULL = not
                                   wanted */
    const gmm_comm *also;       /* further ranks that share the amaxes, such as tensor-parallel ones; NULL = none. It is
                                   called on the domain's gather stream, or on `stream` where a domain has one rank,
                                   which gmm_gtp_poll does not look after */
} gmm_gtp_quantization;

/* Errors: as gmm_gtp_publish; GMM_E_NULL, GMM_E_VERSION, GMM_E_DTYPE, GMM_E_ALIGN, GMM_E_CONFIG (a quantized weight
       without a format), GMM_E_COMM. */
GMMDEF gmm_status gmm_gtp_quantize(gmm_gtp *gtp, const int32_t *weights, int32_t count,
                                   const gmm_gtp_quantization *quantization, gmm_stream stream);

/* Gathers a bundle before it is asked for, as chains do: the head of the first chain behind an optimizer step. Does
   nothing while its slot is in use.  Errors: as gmm_gtp_acquire. */
GMMDEF gmm_status gmm_gtp_prefetch(gmm_gtp *gtp, int32_t bundle, gmm_gtp_pass pass);

/* The gathered weights of a bundle: `stream` waits until they are there, and they stay until the release, which says
   that what `stream` was given so far has read them. The bundle's followers in the chain are gathered meanwhile.
   Errors: GMM_E_ARG, GMM_E_NULL, GMM_E_VERSION; GMM_E_STATE (not bound; acquired twice, released without; the slot
       holds another bundle that the caller has not released); GMM_E_CAPTURE (a bundle of chains that are not captured);
       GMM_E_COMM, those of the runtime. */
GMMDEF gmm_status gmm_gtp_acquire(gmm_gtp *gtp, int32_t bundle, gmm_gtp_pass pass, gmm_stream stream,
                                  gmm_gtp_view *view);
GMMDEF gmm_status gmm_gtp_release(gmm_gtp *gtp, int32_t bundle, gmm_gtp_pass pass, gmm_stream stream);

/* A buffer for the gradient of a bundle, in the wire dtype, that `stream` may write; its rows are logical, every one of
   them must be written, and the padding behind them is zero and must stay so. It is the caller's until submit.
   Errors: as gmm_gtp_acquire; GMM_E_STATE (frozen; asked twice before submit; in use by another bundle: too few slots,
       in a graph or without). */
GMMDEF gmm_status gmm_gtp_wgrad(gmm_gtp *gtp, int32_t bundle, gmm_stream stream, gmm_gtp_view *view);

/* Reduces a gradient that `stream` was given into main_grad, on the reduce stream. May come any time after the GEMM, as
   delayed weight gradients do, and any number of times for a bundle. Collective: a rank without tokens calls it too.
   Errors: as gmm_gtp_acquire; GMM_E_STATE (no buffer was asked for), GMM_E_DTYPE, GMM_E_STRIDE, GMM_E_ALIGN. */
GMMDEF gmm_status gmm_gtp_submit(gmm_gtp *gtp, int32_t bundle, const gmm_gtp_gradient *gradient, gmm_stream stream);

enum { GMM_GTP_GATHERS = 1u, GMM_GTP_GRADIENTS = 2u, GMM_GTP_ALL = 3u };

/* `stream` waits: for all gathers so far, so that shards may be written; for all submitted gradients, so that every
   main_grad is complete; either way for replays that post_replay has seen on other streams.
   Errors: GMM_E_ARG, GMM_E_STATE, those of the runtime. */
GMMDEF gmm_status gmm_gtp_fence(gmm_gtp *gtp, uint32_t what, gmm_stream stream);

/* Raises each value to the largest over a domain's ranks, in the order of `stream`: per-tensor amax, packed, once a
   step. Ranks that share the tensor otherwise (DP) go through their own communicator's all_reduce_max.
   Errors: as gmm_gtp_acquire. */
GMMDEF gmm_status gmm_gtp_amax(gmm_gtp *gtp, int32_t domain, float *values, int32_t count, gmm_stream stream);

/* Looks after collectives under way (up to 256 of a stream), without waiting: GMM_E_COMM once one that has begun is not
   done after timeout_ms, or a communicator reports a failure. To be called now and then while the host waits for a
   stream.
   Errors: GMM_E_COMM, GMM_E_STATE, those of the runtime. */
GMMDEF gmm_status gmm_gtp_poll(gmm_gtp *gtp);

/* Dry run, to warm up before a capture: everything runs, but main_grad stays as it is and no callback is made. Ending
   it is GMM_E_STATE if a view is still held or a gradient not submitted, which it then forgets.
   Errors: GMM_E_STATE, GMM_E_CAPTURE. */
GMMDEF gmm_status gmm_gtp_dry_run(gmm_gtp *gtp, int32_t on);

/* A capture of what follows on `stream`, which has begun capturing; the object's own streams join it when they are
   first used, and are joined back at the end. Graphs get ids from 0. Before a replay pre_replay makes `stream` wait for
   shards published since and asks for those that the graph reads; behind it post_replay reports its gradients.
   Errors: GMM_E_STATE (nested; captured slots in use), GMM_E_CAPTURE (stream not capturing), GMM_E_WORKSPACE (more
       graphs than configured), GMM_E_ARG, those of the runtime. */
GMMDEF gmm_status gmm_gtp_capture_begin(gmm_gtp *gtp, gmm_stream stream, int32_t *graph);
GMMDEF gmm_status gmm_gtp_capture_end(gmm_gtp *gtp, gmm_stream stream);
GMMDEF gmm_status gmm_gtp_pre_replay(gmm_gtp *gtp, int32_t graph, gmm_stream stream);
GMMDEF gmm_status gmm_gtp_post_replay(gmm_gtp *gtp, int32_t graph, gmm_stream stream);

/* The counts so far. Errors: GMM_E_NULL, GMM_E_VERSION. */
GMMDEF gmm_status gmm_gtp_statistics_of(const gmm_gtp *gtp, gmm_gtp_statistics *out);

/* ----------------------------------------------------------------------------------------------- 11 Checkpoints --- */

/* Shards to and from checkpoints by logical rows, as plans of strided moves (gmm.h, Checkpoints): built from shapes
   alone, every error found before a byte moves, verified, applied through memory or callbacks, resumable.

       gmm_gtp_export    what ranks hold -> the logical weights, of which every rank writes its own rows
       gmm_gtp_import    logical weights, or the shards of other TP and GTP sizes -> the shards of one rank

   Logical     The logical weight [rows, cols] is the shard of TP size 1 and GTP size 1: its sections one behind the
               other, without padding. A shard's rows are those of its extents. Padding leaves no process, and is
               written as zeros.
   What        Any array in the layout of a shard: the weight, its fp32 main weight, optimizer moments. Those of a
               quantized weight are described by the same shard with dtype F32, scaling NONE and the weight's unit.
               Neither a runtime nor main_grad is read or needed; whoever imports publishes.
   Quantized   From and to one format and direction elements and scales are copied as they are, where every boundary
               falls on a block: no value is quantized twice. 128X128 blocks may also become floats, at any boundary;
               what a boundary cuts is imported so, into 16 bits, and quantized again.
   Tables      Elements of a shard are [rows, cols] as gmm_layout_of stores them, transposed copies as [cols, rows].
               Scales are COMPACT, with its padding or without it (as export writes them); TENSOR has one value, which
               rank 0 of TP and GTP exports. The global amax of NV16 is the caller's. */

/* What a table has of a weight. Arrays of these have no struct_size. */
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
    gmm_direction direction;      /* of quantized copies, on both sides */
    int32_t stored_count;
    const gmm_gtp_stored *stored; /* import: together all that the target wants. export: what this process writes.
                                     All cut alike; what several hold is read from the first */
} gmm_gtp_item;

/* Plans the items: targets are their elements and scales, in the order of items. Parts (only their tables are read),
   shards and names are read during the call; tables must outlive the plan, which gmm_ckpt_plan_destroy frees. Export
   plans are partial (gmm_ckpt_plan_of_moves): a single process may give every rank's shards, or each only its own.
   *out is NULL after a failure.
   Errors (reason): GMM_E_NULL; GMM_E_ARG (argument; also of gmm_gtp_plan); GMM_E_KEY (shape: a weight or tensor of
       other extents; missing_index: rows that nothing holds; duplicate_key), GMM_E_DTYPE (dtype), GMM_E_CONFIG
       (not_divisible: a boundary that cuts a block), GMM_E_OVERFLOW, GMM_E_MEMORY. */
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

#if defined(GMM_IMPLEMENTATION) && !defined(GMM__GTP_IMPLEMENTATION_DONE)
#define GMM__GTP_IMPLEMENTATION_DONE

#include "gmm.h" /* its implementation, where the declarations alone came before GMM_IMPLEMENTATION */
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

/* Bytes of a descriptor that both sides know; 0 after recording why there are none. */
static size_t gmm__gtp_known(const char *fn, const char *name, const void *given, size_t size, gmm_status *status,
                             gmm_error *error) {
    uint32_t stated;
    if (!given) {
        *status = gmm__fail(error, GMM_E_NULL, "%s: %s is NULL", fn, name);
        return 0;
    }
    memcpy(&stated, given, sizeof stated); /* struct_size comes first everywhere */
    if (stated > size || (stated > 0 && stated < sizeof stated)) {
        *status = gmm__fail(error, GMM_E_VERSION, "%s: %s->struct_size is %u: must be 0 or at most %zu", fn, name,
                            stated, size);
        return 0;
    }
    return stated ? stated : size;
}

/* Copies a descriptor; fields that an older caller lacks become 0. */
static gmm_status gmm__gtp_open(const char *fn, const char *name, const void *given, void *copy, size_t size,
                                gmm_error *error) {
    gmm_status status = GMM_OK;
    const size_t known = gmm__gtp_known(fn, name, given, size, &status, error);
    if (known) {
        memset(copy, 0, size);
        memcpy(copy, given, known);
    }
    return status;
}

/* Rows of a scaling block: no shard boundary may cut one. */
static int64_t gmm__gtp_block(gmm_scaling scaling) {
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

/* Checks everything about a shard but its sections, and fills in defaults. */
static gmm_status gmm__gtp_check(const char *fn, const gmm_shard *s, gmm_error *error) {
    const int64_t block = gmm__gtp_block(s->scaling);
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

/* Rows that TP leaves of n. */
static int64_t gmm__gtp_slice(const gmm_shard *s, int64_t n) {
    return s->tp_cut == GMM_TP_ROWS ? n / s->tp_size : n;
}

/* Checks the sections of a shard. */
static gmm_status gmm__gtp_check_sections(const char *fn, const gmm_shard *s, gmm_error *error) {
    const int32_t n = s->sections ? s->sections : 1;
    int64_t left = s->rows;
    int32_t i;
    for (i = 0; i < n; i++) {
        const int64_t rows = s->sections ? s->section_rows[i] : s->rows;
        if (rows < 1)
            return gmm__fail(error, GMM_E_ARG, "%s: section_rows[%d] is %lld: must be >= 1", fn, i,
                             (long long)rows);
        if (rows > left || (i == n - 1 && rows < left))
            return gmm__fail(error, GMM_E_ARG, "%s: section_rows[%d] is %lld with %lld of rows %lld left: the sections "
                             "must add up to rows", fn, i, (long long)rows, (long long)left, (long long)s->rows);
        if (s->tp_cut == GMM_TP_ROWS && rows % s->tp_size != 0)
            return gmm__fail(error, GMM_E_ARG, "%s: section %d has %lld rows: must be a multiple of tp_size %d", fn,
                             i, (long long)rows, (int)s->tp_size);
        if (s->tp_cut == GMM_TP_ROWS && s->tp_multiple > 1 && rows / s->tp_size % s->tp_multiple != 0)
            return gmm__fail(error, GMM_E_CONFIG, "%s: section %d has %lld rows per TP rank: must be a multiple of "
                             "tp_multiple %d", fn, i, (long long)(rows / s->tp_size), (int)s->tp_multiple);
        left -= rows;
    }
    return GMM_OK;
}

/* Copy of the shard with its defaults, and its plan. */
static gmm_status gmm__gtp_solve(const char *fn, const gmm_shard *given, gmm_shard *s, gmm_shard_plan *p,
                                 gmm_error *error) {
    const gmm_shard_plan zero = GMM_ZERO;
    gmm_status status = gmm__gtp_open(fn, "shard", given, s, sizeof *s, error);
    int64_t block, multiple = 0;
    int direction;
    if (status) return status;
    if (s->tp_size == 0) s->tp_size = 1;
    if (s->gtp_size == 0) s->gtp_size = 1;
    status = gmm__gtp_check(fn, s, error);
    if (status) return status;
    status = gmm__gtp_check_sections(fn, s, error);
    if (status) return status;

    *p = zero;
    block = gmm__gtp_block(s->scaling);
    p->unit = s->unit == GMM_GTP_UNPADDED ? 0 : s->unit ? s->unit : gmm_gtp_unit(s->scaling);
    p->local_rows = gmm__gtp_slice(s, s->rows);
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
        const int kept = !columnwise || (gmm__gtp_block(s->scaling) > 1 && s->scaling != GMM_SCALING_128X128);
        gmm_layout whole = GMM_ZERO, shard = GMM_ZERO;
        gmm_error why = GMM_ZERO;
        if (columnwise && s->scaling == GMM_SCALING_NONE) continue;
        status = gmm_layout_of(s->dtype, s->scaling, GMM_SCALES_COMPACT, (gmm_direction)direction, p->padded_rows,
                               p->local_cols, &whole, &why);
        if (!status && kept)
            status = gmm_layout_of(s->dtype, s->scaling, GMM_SCALES_COMPACT, (gmm_direction)direction, p->shard_rows,
                                   p->local_cols, &shard, &why);
        if (status) return gmm__fail(error, status, "%s: %.400s", fn, why.text);
        p->gather_data_bytes[direction] = whole.data_bytes;
        p->gather_scale_bytes[direction] = whole.scale_bytes;
        p->shard_data_bytes[direction] = shard.data_bytes;
        p->shard_scale_bytes[direction] = shard.scale_bytes;
    }
    return GMM_OK;
}

GMMDEF gmm_status gmm_gtp_plan(const gmm_shard *shard, gmm_shard_plan *plan, gmm_error *error) {
    gmm_shard s;
    gmm_shard_plan p;
    gmm_status status = GMM_OK;
    const size_t known = gmm__gtp_known("gmm_gtp_plan", "plan", plan, sizeof *plan, &status, error);
    if (status) return status;
    status = gmm__gtp_solve("gmm_gtp_plan", shard, &s, &p, error);
    if (status) return status;
    p.struct_size = plan->struct_size;
    memcpy(plan, &p, known);
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
    status = gmm__gtp_solve("gmm_gtp_extents", shard, &s, &p, error);
    if (status) return status;
    for (pass = 0; pass < (extents ? 2 : 1); pass++) { /* count, then fill */
        int64_t logical0 = 0, local0 = 0; /* first row of the section in the whole weight, in the local matrix */
        if (pass == 1 && n > capacity)
            return gmm__fail(error, GMM_E_WORKSPACE, "gmm_gtp_extents: capacity is %d: the shard has %d extents",
                             capacity, n);
        n = 0;
        for (i = 0; i < (s.sections ? s.sections : 1); i++) {
            const int64_t rows = s.sections ? s.section_rows[i] : s.rows, slice = gmm__gtp_slice(&s, rows);
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

/* The i-th fastest axis. */
static int gmm__grid_axis(gmm_grid_kind kind, int i) {
    static const int8_t order[2][GMM_AXIS_COUNT] = {
        {GMM_AXIS_TP, GMM_AXIS_GTP, GMM_AXIS_CP, GMM_AXIS_EP, GMM_AXIS_DP, GMM_AXIS_PP},
        {GMM_AXIS_TP, GMM_AXIS_CP, GMM_AXIS_EP, GMM_AXIS_GTP, GMM_AXIS_DP, GMM_AXIS_PP}};
    return order[kind == GMM_GRID_EXPERT][i];
}

static gmm_status gmm__grid_open(const char *fn, const gmm_grid *given, gmm_grid *g, int32_t *world, gmm_error *error) {
    static const char *const names[GMM_AXIS_COUNT] = {"TP", "GTP", "CP", "EP", "DP", "PP"};
    gmm_status status = gmm__gtp_open(fn, "grid", given, g, sizeof *g, error);
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
        ranks *= g->size[a]; /* both factors are below 2^31 */
        if (ranks > INT32_MAX)
            return gmm__fail(error, GMM_E_OVERFLOW, "%s: the grid has more than 2^31 - 1 ranks", fn);
    }
    *world = (int32_t)ranks;
    return GMM_OK;
}

GMMDEF gmm_status gmm_grid_world(const gmm_grid *grid, int32_t *world, gmm_error *error) {
    gmm_grid g;
    if (!world) return gmm__fail(error, GMM_E_NULL, "gmm_grid_world: world is NULL");
    return gmm__grid_open("gmm_grid_world", grid, &g, world, error);
}

static gmm_status gmm__grid_coords(const char *fn, const gmm_grid *grid, int32_t rank, gmm_grid *g, int32_t *coords,
                                   gmm_error *error) {
    int32_t world = 0;
    gmm_status status = gmm__grid_open(fn, grid, g, &world, error);
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
    status = gmm__grid_open("gmm_grid_rank", grid, &g, &world, error);
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
    gmm_status status = gmm__grid_open("gmm_grid_match", dense, &d, &dense_world, error);
    if (status) return status;
    status = gmm__grid_open("gmm_grid_match", expert, &x, &expert_world, error);
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
    const uint32_t all = (1u << GMM_AXIS_COUNT) - 1u; /* bits beyond stay set, so that they are refused */
    gmm_grid_group replicas = GMM_ZERO;
    gmm_status status;
    if (!writes) return gmm__fail(error, GMM_E_NULL, "gmm_gtp_writes: writes is NULL");
    status = gmm__grid_group("gmm_gtp_writes", grid, rank, cut_axes ^ all, &replicas, error);
    if (status) return status;
    *writes = replicas.index == 0;
    return GMM_OK;
}

GMMDEF uint64_t gmm_gtp_seed(uint64_t base, gmm_grid_kind kind, uint32_t gtp_rank) {
    return base + (kind == GMM_GRID_EXPERT ? 32768u : 0u) + 65536u * (1u + (uint64_t)gtp_rank);
}

/* *sum += a * b * c; 0 where that does not fit. */
static int gmm__gtp_add(int64_t *sum, int64_t a, int64_t b, int64_t c) {
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
    int64_t held = 0, elements = 0, gradient, wire, received;
    int32_t d, gtp_size, sharded, fits;
    gmm_status status = GMM_OK;
    const size_t known = gmm__gtp_known(fn, "memory", memory, sizeof *memory, &status, error);
    if (status) return status;
    status = gmm__gtp_open(fn, "memory", memory, &m, sizeof m, error);
    if (status) return status;
    status = gmm__gtp_open(fn, "use", use, &u, sizeof u, error);
    if (status) return status;
    status = gmm__gtp_solve(fn, u.shard, &s, &p, error);
    if (status) return status;
    if (u.bundle < 0 || u.layers < 0 || u.optimizer_bytes < 0 || u.optimizer_ranks < 0)
        return gmm__fail(error, GMM_E_ARG, "%s: bundle %d, layers %lld, optimizer_bytes %d, optimizer_ranks %d: must "
                         "be >= 0", fn, u.bundle, (long long)u.layers, u.optimizer_bytes,
                         u.optimizer_ranks);
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
    s.struct_size = 0; /* now the same weight on one rank */
    s.gtp_size = 1;
    s.gtp_rank = 0;
    status = gmm__gtp_solve(fn, &s, &one, &whole, error);
    if (status) return status;

    gradient = u.main_grad == GMM_NONE ? 0 : gmm_dtype_bits(u.main_grad) / 8;
    wire = u.wire == GMM_NONE ? gradient : gmm_dtype_bits(u.wire) / 8;
    received = u.all_to_all ? p.padded_rows : p.shard_rows;
    fits = gmm__gtp_add(&held, u.layers, u.bundle, 1) && gmm__gtp_add(&elements, p.shard_rows, p.local_cols, held);
    for (d = GMM_ROWWISE; fits && d <= GMM_COLUMNWISE; d++) {
        const int64_t slots = u.gather_slots + (d == GMM_ROWWISE ? (int64_t)u.recompute_slots : 0);
        const int gathered = sharded || p.shard_data_bytes[d] == 0;
        fits = gmm__gtp_add(&m.weights, p.shard_data_bytes[d], held, 1) &&
               gmm__gtp_add(&m.weights, p.shard_scale_bytes[d], held, 1) &&
               gmm__gtp_add(&m.whole_weights, whole.shard_data_bytes[d], held, 1) &&
               gmm__gtp_add(&m.whole_weights, whole.shard_scale_bytes[d], held, 1) &&
               gmm__gtp_add(&m.gather, p.gather_data_bytes[d], gathered ? slots : 0, u.bundle) &&
               gmm__gtp_add(&m.gather, p.gather_scale_bytes[d], gathered ? slots : 0, u.bundle);
    }
    if (fits && gradient)
        fits = gmm__gtp_add(&m.main_grads, elements, gradient, 1) &&
               gmm__gtp_add(&m.optimizer, elements / u.optimizer_ranks + (elements % u.optimizer_ranks != 0),
                            u.optimizer_bytes, 1);
    if (fits && gradient) { /* also of one rank: scale and sum are the same there */
        int64_t row = 0; /* bytes of a row of every gradient in the bundle */
        fits = gmm__gtp_add(&row, p.local_cols, wire, u.bundle) &&
               gmm__gtp_add(&m.wgrad, row, p.padded_rows, u.wgrad_slots) &&
               gmm__gtp_add(&m.reduce, row, sharded ? received : 0, u.reduce_slots);
    }
    if (fits && sharded) {
        int64_t stage[2] = {0, 0}; /* by direction, of all ranks */
        const int64_t *data = p.shard_data_bytes, *scale = p.shard_scale_bytes;
        const int turned = p.gather_data_bytes[GMM_COLUMNWISE] > 0 && data[GMM_COLUMNWISE] == 0;
        if (turned) stage[1] = data[GMM_ROWWISE] + (s.scaling == GMM_SCALING_TENSOR ? 0 : scale[GMM_ROWWISE]);
        if (s.scaling == GMM_SCALING_1X128) stage[0] = scale[GMM_ROWWISE], stage[1] = data[GMM_COLUMNWISE];
        if (s.scaling == GMM_SCALING_NV16) stage[1] = data[GMM_COLUMNWISE] + scale[GMM_COLUMNWISE];
        for (d = GMM_ROWWISE; fits && d <= GMM_COLUMNWISE; d++) {
            int64_t bytes = 0;
            fits = gmm__gtp_add(&bytes, stage[d], gtp_size, u.bundle);
            if (u.gather_slots && bytes > m.stage) m.stage = bytes;
        }
    }
    m.total = 0;
    fits = fits && gmm__gtp_add(&m.total, m.stage, 1, 1) && gmm__gtp_add(&m.total, m.weights, 1, 1) &&
           gmm__gtp_add(&m.total, m.main_grads, 1, 1) &&
           gmm__gtp_add(&m.total, m.optimizer, 1, 1) && gmm__gtp_add(&m.total, m.gather, 1, 1) &&
           gmm__gtp_add(&m.total, m.wgrad, 1, 1) && gmm__gtp_add(&m.total, m.reduce, 1, 1);
    if (!fits)
        return gmm__fail(error, GMM_E_OVERFLOW, "%s: the bytes of %lld layers of %d weights of %lld x %lld do not fit "
                         "64 bits", fn, (long long)u.layers, u.bundle, (long long)p.local_rows,
                         (long long)p.local_cols);
    memcpy(memory, &m, known);
    return GMM_OK;
}

enum { GMM__GTP_STAGES = 4096 };

/* Seconds of a bundle's gathers, forward and backward, and of the transpose in backward. */
typedef struct gmm__gtp_alone {
    double gather[2], turn;
    int shared, turned; /* both passes read one copy; backward's is made of forward's */
} gmm__gtp_alone;

/* Fills in what a stage takes alone. */
static gmm_status gmm__gtp_stage_alone(const char *fn, const gmm_gtp_forecast *f, gmm_gtp_stage *x, gmm__gtp_alone *a,
                                       gmm_error *error) {
    gmm_shard s;
    gmm_shard_plan p;
    double share, count, elements;
    int pass;
    gmm_status status = gmm__gtp_solve(fn, x->shard, &s, &p, error);
    if (status) return status;
    if (x->bundle < 0 || !(x->tokens >= 0))
        return gmm__fail(error, GMM_E_ARG, "%s: bundle is %d, tokens %g: must be >= 0", fn, x->bundle, x->tokens);
    count = x->bundle ? x->bundle : 1;
    share = (double)(s.gtp_size - 1) / s.gtp_size / f->link_rate;
    elements = (double)p.padded_rows * (double)p.local_cols * count;
    for (pass = 0; pass < 2; pass++) {
        const int d = pass && p.shard_data_bytes[GMM_COLUMNWISE] ? GMM_COLUMNWISE : GMM_ROWWISE;
        const double bytes = count * s.gtp_size * ((double)p.shard_data_bytes[d] + (double)p.shard_scale_bytes[d]);
        a->gather[pass] = s.gtp_size > 1 ? f->latency + bytes * share : 0;
    }
    a->shared = p.gather_data_bytes[GMM_COLUMNWISE] == 0;
    a->turned = !a->shared && p.shard_data_bytes[GMM_COLUMNWISE] == 0;
    a->turn = a->turned && f->memory_rate > 0
                  ? 2 * count * (double)p.gather_data_bytes[GMM_COLUMNWISE] / f->memory_rate : 0;
    x->gather = a->gather[0];
    x->reduce = s.gtp_size > 1 ? f->latency + elements * (gmm_dtype_bits(f->wire) / 8) * share : 0;
    x->sum = 0;
    if (f->memory_rate > 0) { /* reads the parts, reads and writes main_grad */
        const double parts = f->wire == GMM_BF16 && s.gtp_size > 2 ? s.gtp_size : 1;
        x->sum = elements / s.gtp_size *
                 (parts * (gmm_dtype_bits(f->wire) / 8) + 2 * (gmm_dtype_bits(f->main_grad) / 8)) / f->memory_rate;
    }
    x->forward = 2 * x->tokens * (double)p.local_rows * (double)p.local_cols / f->gemm_rate;
    x->backward = 2 * x->forward;
    x->exposed_forward = x->exposed_backward = x->exposed_reduce = 0;
    return GMM_OK;
}

static double gmm__later(double a, double b) { return a > b ? a : b; }

GMMDEF gmm_status gmm_gtp_foresee(gmm_gtp_forecast *forecast, gmm_gtp_stage *stages, gmm_error *error) {
    static const char fn[] = "gmm_gtp_foresee";
    gmm_gtp_forecast f;
    double released[GMM__GTP_STAGES], reduced[GMM__GTP_STAGES]; /* by place in the pass */
    double gather_free = 0, reduce_free = 0, now = 0;
    gmm__gtp_alone alone;
    int32_t i, n, slots, pass;
    gmm_status s = gmm__gtp_open(fn, "forecast", forecast, &f, sizeof f, error);
    if (s) return s;
    if (!stages) return gmm__fail(error, GMM_E_NULL, "%s: stages is NULL", fn);
    if (f.struct_size && f.struct_size != sizeof f)
        return gmm__fail(error, GMM_E_VERSION, "%s: forecast->struct_size is %u: must be 0", fn, f.struct_size);
    if (f.wire == GMM_NONE) f.wire = GMM_F32;
    if (f.main_grad == GMM_NONE) f.main_grad = GMM_F32;
    if (f.wgrad_slots == 0) f.wgrad_slots = 2;
    n = f.stages;
    if ((f.wire != GMM_F32 && f.wire != GMM_BF16) || (f.main_grad != GMM_F32 && f.main_grad != GMM_BF16))
        return gmm__fail(error, GMM_E_DTYPE, "%s: wire is %s, main_grad %s: must be f32, bf16 or none", fn,
                         gmm_dtype_name(f.wire), gmm_dtype_name(f.main_grad));
    if (n < 1 || n > GMM__GTP_STAGES || !(f.gemm_rate > 0) || !(f.link_rate > 0) || !(f.latency >= 0) ||
        !(f.memory_rate >= 0) || f.prefetch < 0 || f.prefetch > n || f.wgrad_slots < 1 || f.reserved)
        return gmm__fail(error, GMM_E_ARG, "%s: %d stages, gemm_rate %g, link_rate %g, latency %g, memory_rate %g, "
                         "prefetch %d, wgrad_slots %d, reserved %d: must be 1 to %d, > 0, > 0, >= 0, >= 0, 0 to "
                         "stages, >= 1, and 0", fn, n, f.gemm_rate, f.link_rate, f.latency, f.memory_rate,
                         f.prefetch, f.wgrad_slots, f.reserved, (int)GMM__GTP_STAGES);
    for (i = 0; i < n; i++) {
        gmm_gtp_stage x = stages[i];
        if (x.struct_size && x.struct_size != sizeof x)
            return gmm__fail(error, GMM_E_VERSION, "%s: stages[%d].struct_size is %u: must be 0", fn, i,
                             x.struct_size);
        if ((s = gmm__gtp_stage_alone(fn, &f, &x, &alone, error)) != GMM_OK) return s;
    }
    slots = f.prefetch + 1;
    f.compute = f.exposed_gather = f.exposed_reduce = f.gather = f.reduce = 0;
    for (pass = 0; pass < 2; pass++)
        for (i = 0; i < n; i++) {
            gmm_gtp_stage *x = &stages[pass ? n - 1 - i : i];
            double *exposed = pass ? &x->exposed_backward : &x->exposed_forward, ready = 0;
            const double before = pass ? x->exposed_forward : 0;
            int there; /* the slots still hold what the pass before has read last, if that serves here */
            (void)gmm__gtp_stage_alone(fn, &f, x, &alone, NULL);
            x->exposed_forward = before;
            there = i < slots && (pass ? alone.shared || alone.turned : f.wrap && alone.shared);
            if (!there) {
                gather_free = gmm__later(gather_free, i >= slots ? released[i - slots] : 0) + alone.gather[pass];
                f.gather += alone.gather[pass];
                ready = i < slots && !pass && f.wrap ? 0 : gather_free; /* the pass before has hidden it */
            }
            if (pass && alone.turn > 0) ready = gather_free += alone.turn;
            *exposed = gmm__later(ready - now, 0);
            f.exposed_gather += *exposed;
            now = gmm__later(now, ready) + x->forward; /* or dgrad, which takes as long */
            released[i] = now;
            f.compute += x->forward;
            if (!pass) continue;
            if (i >= f.wgrad_slots) {
                x->exposed_reduce = gmm__later(reduced[i - f.wgrad_slots] - now, 0);
                f.exposed_reduce += x->exposed_reduce;
                now += x->exposed_reduce;
            }
            now += x->forward; /* wgrad */
            f.compute += x->forward;
            reduce_free = gmm__later(reduce_free, now) + x->reduce + x->sum;
            reduced[i] = reduce_free;
            f.reduce += x->reduce;
        }
    f.exposed_reduce += gmm__later(reduce_free - now, 0);
    f.step = gmm__later(now, reduce_free);
    *forecast = f;
    return GMM_OK;
}

/* Whether communicators add up this dtype. */
static GMM__UNUSED int gmm__comm_adds(gmm_dtype dtype) {
    return dtype == GMM_F32 || dtype == GMM_BF16 || dtype == GMM_F16;
}

/* .................................................................................................... CPU ranks ... */

#ifdef GMM_WITH_CPU_RANKS

enum { GMM__RANK_QUEUES = 49 }; /* streams of a rank, NULL and graphs' included */

/* What one record of an event stands for. Waits keep the token that was the newest when they were given. */
typedef struct gmm__token {
    int32_t users, done;
    uint32_t clock[GMM__RANK_QUEUES];
} gmm__token;

typedef struct gmm__rank_event {
    struct gmm__cpu_rank *rank;
    gmm__token *last;       /* of the last record outside of captures, or through a node; NULL = none */
    uint64_t capture;       /* that of the last plain record, if it was in one; 0 = none */
    int32_t mark;           /* its number there */
} gmm__rank_event;

typedef enum gmm__rank_kind {
    GMM__RANK_WORK, GMM__RANK_RECORD, GMM__RANK_WAIT, GMM__RANK_COLLECTIVE, GMM__RANK_LAUNCH
} gmm__rank_kind;

typedef enum gmm__coll_kind { GMM__COLL_GATHER, GMM__COLL_SCATTER, GMM__COLL_EXCHANGE, GMM__COLL_MAX } gmm__coll_kind;

/* One call of a collective; `bytes` of a rank's part. */
typedef struct gmm__coll {
    gmm__coll_kind kind;
    gmm_dtype dtype;
    const void *send;
    void *recv;
    size_t bytes;
} gmm__coll;

typedef struct gmm__rank_op {
    gmm__rank_kind kind;
    int32_t count;          /* ranges, or parts */
    const char *name;
    gmm__token *host;       /* what the enqueuing thread had seen */
    void *memory;           /* ranges and argument, or parts, or a gmm__replay */
    size_t bytes;           /* of memory */
    gmm_status (*function)(const void *argument, gmm_stream stream);
    gmm__token *token;      /* RECORD, WAIT */
    gmm__rank_event *event; /* in graphs: the event of a node; NULL = token number `mark` of the graph */
    int32_t mark;
    int32_t started;        /* LAUNCH */
    struct gmm__member *member; /* COLLECTIVE */
    uint64_t number;        /* of the collective in its communicator */
    gmm_ranks_graph *graph;
} gmm__rank_op;

typedef struct gmm__rank_queue {
    struct gmm__cpu_rank *rank;
    int32_t index, mirrors; /* mirrors: the stream that this queue of a graph stands for; -1 = it is a stream */
    gmm_ranks_graph *graph; /* the capture that the stream is in */
    int32_t slow;           /* of late, drawn last */
    gmm__rank_op *ops;
    size_t head, count, room;
    uint32_t clock[GMM__RANK_QUEUES];
} gmm__rank_queue;

/* An access as the checker remembers it. */
typedef struct gmm__rank_access {
    uintptr_t begin, end;
    int32_t queue, writes;
    uint32_t time;
    const char *name;
} gmm__rank_access;

typedef struct gmm__cpu_rank {
    struct gmm_ranks *world;
    int32_t index, given_up;
    uint64_t captures;      /* begun so far */
    gmm__rank_queue *queues[GMM__RANK_QUEUES];
    gmm_ranks_graph *capture;
    gmm__token *host;       /* snapshot of queue 0's clock for what is enqueued */
    uint64_t progress;      /* operations done */
    gmm__rank_access *accesses;
    size_t access_count, access_room;
    gmm_error error;
    gmm_error told;         /* what gmm_ranks_error copied last */
} gmm__cpu_rank;

/* A communicator, and one rank's end of it. */
typedef struct gmm__group {
    struct gmm_ranks *world;
    struct gmm__group *next;
    int32_t size;
    uint64_t done;          /* collectives so far */
    struct gmm__member *members;
    gmm_error fault;
} gmm__group;

typedef struct gmm__member {
    gmm__group *group;
    gmm__cpu_rank *rank;
    int32_t index, open;
    uint64_t given;         /* collectives enqueued */
    const char *what;
    gmm_stream stream;
    gmm__coll *parts;       /* of the open group */
    int32_t count, room;
} gmm__member;

struct gmm_ranks_graph {
    gmm__cpu_rank *rank;
    gmm_stream origin;
    uint64_t serial;
    int32_t marks;          /* plain records in it */
    int32_t running;
    int32_t queue_count;
    int32_t queues[GMM__RANK_QUEUES];    /* queues of the rank that replay; the origin's first */
    gmm__rank_op *ops[GMM__RANK_QUEUES]; /* the template of each */
    size_t count[GMM__RANK_QUEUES], room[GMM__RANK_QUEUES];
};

/* The operations of one launch, until it starts. */
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
    int64_t races;
    char race[400];
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
/* Room for one more element; 0 if there is no memory. */
static int gmm__ranks_grow(gmm_ranks *w, void **items, size_t count, size_t *room, size_t size) {
    const size_t more = *room ? 2 * *room : 16;
    void *p;
    if (count < *room) return 1;
    p = gmm__ranks_alloc(w, more * size);
    if (!p) return 0;
    if (count) memcpy(p, *items, count * size);
    gmm__ranks_free(w, *items);
    *items = p;
    *room = more;
    return 1;
}

static uint64_t gmm__ranks_draw(gmm_ranks *w) { /* splitmix64 */
    uint64_t z = w->random += 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

static gmm__token *gmm__token_keep(gmm__token *t) {
    if (t) t->users++;
    return t;
}
static void gmm__token_drop(gmm_ranks *w, gmm__token *t) {
    if (t && --t->users == 0) gmm__ranks_free(w, t);
}
static gmm__token *gmm__token_new(gmm_ranks *w) {
    gmm__token *t = (gmm__token *)gmm__ranks_alloc(w, sizeof *t);
    if (t) t->users = 1;
    return t;
}
static void gmm__clock_join(uint32_t *clock, const uint32_t *other) {
    int i;
    for (i = 0; i < GMM__RANK_QUEUES; i++)
        if (other[i] > clock[i]) clock[i] = other[i];
}

/* --- The checker --- */

static void gmm__ranks_access(gmm__rank_queue *q, const char *name, const void *data, size_t bytes, int writes) {
    gmm__cpu_rank *r = q->rank;
    gmm_ranks *w = r->world;
    gmm__rank_access now;
    size_t i, kept = 0;
    if (!w->config.check_races || bytes == 0) return;
    now.begin = (uintptr_t)data;
    now.end = now.begin + bytes;
    now.queue = q->index;
    now.writes = writes;
    now.time = q->clock[q->index];
    now.name = name;
    for (i = 0; i < r->access_count; i++) {
        const gmm__rank_access a = r->accesses[i];
        const int overlap = a.begin < now.end && now.begin < a.end;
        const int ordered = a.time <= q->clock[a.queue];
        const int covered = overlap && now.begin <= a.begin && a.end <= now.end;
        if (overlap && !ordered && (a.writes || writes) && w->races++ == 0)
            (void)snprintf(w->race, sizeof w->race, "rank %d: '%s' on stream %d %s %llu bytes at %p that '%s' on "
                           "stream %d %s, and nothing orders the two", r->index, name, q->index,
                           writes ? "writes" : "reads", (unsigned long long)bytes, (void *)now.begin,
                           a.name, (int)a.queue, a.writes ? "writes" : "reads");
        if (covered && ordered && (writes || !a.writes)) continue; /* whoever is behind `now` is behind `a` */
        r->accesses[kept++] = a;
    }
    r->access_count = kept;
    if (gmm__ranks_grow(w, (void **)&r->accesses, r->access_count, &r->access_room, sizeof now))
        r->accesses[r->access_count++] = now;
}

/* --- Giving up --- */

static void gmm__rank_op_free(gmm_ranks *w, gmm__rank_op *op) {
    if (op->kind == GMM__RANK_LAUNCH && op->memory) { /* not started */
        gmm__replay *replay = (gmm__replay *)op->memory;
        int i;
        for (i = 0; i < GMM__RANK_QUEUES; i++) {
            size_t j;
            for (j = 0; j < replay->count[i]; j++) gmm__rank_op_free(w, &replay->ops[i][j]);
            gmm__ranks_free(w, replay->ops[i]);
        }
    }
    gmm__token_drop(w, op->host);
    gmm__token_drop(w, op->token);
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
            q->head = (q->head + 1) % q->room;
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

/* --- Running --- */

static gmm__rank_op *gmm__queue_head(gmm__rank_queue *q) {
    return q && q->count > 0 ? &q->ops[q->head] : NULL;
}

/* The rank's operation that is collective `number` of the group, if a stream has come to it. */
static gmm__rank_op *gmm__group_arrived(gmm__group *g, int32_t member, gmm__rank_queue **where) {
    gmm__cpu_rank *r = g->members[member].rank;
    int i;
    for (i = 0; i < GMM__RANK_QUEUES; i++) {
        gmm__rank_op *op = gmm__queue_head(r->queues[i]);
        if (op && op->kind == GMM__RANK_COLLECTIVE && op->member->group == g && op->number == g->done) {
            if (where) *where = r->queues[i];
            return op;
        }
    }
    return NULL;
}

static int gmm__rank_can_run(gmm__rank_queue *q) {
    gmm__rank_op *op = gmm__queue_head(q);
    int32_t i;
    if (!op) return 0;
    switch (op->kind) {
    case GMM__RANK_WAIT: return op->token->done;
    case GMM__RANK_COLLECTIVE:
        for (i = 0; i < op->member->group->size; i++)
            if (!gmm__group_arrived(op->member->group, i, NULL)) return 0;
        return 1;
    case GMM__RANK_LAUNCH:
        if (!op->started) return !op->graph->running;
        for (i = 0; op->started && i < op->graph->queue_count; i++)
            if (q->rank->queues[op->graph->queues[i]]->count > 0) return 0;
        return 1;
    default: return 1;
    }
}

/* The next operation starts: what its thread had seen when it was given comes before it. */
static void gmm__rank_start(gmm__rank_queue *q, const gmm__rank_op *op) {
    if (op->host) gmm__clock_join(q->clock, op->host->clock);
    q->clock[q->index]++;
}
static void gmm__rank_pop(gmm__rank_queue *q) {
    gmm__rank_op_free(q->rank->world, &q->ops[q->head]);
    q->head = (q->head + 1) % q->room;
    q->count--;
    q->rank->progress++;
}

static const char *const gmm__coll_names[] = {"all_gather", "reduce_scatter", "all_to_all", "all_reduce_max"};

static void gmm__coll_run(const gmm__group *g, gmm__coll **p, int32_t which) {
    const gmm__coll *first = &p[0][which];
    const size_t bytes = first->bytes;
    const int64_t count = (int64_t)(bytes / (size_t)(gmm_dtype_bits(first->dtype) / 8 + (first->dtype == GMM_NONE)));
    int32_t to, from;
    int64_t i;
    for (to = 0; to < g->size; to++) {
        char *recv = (char *)p[to][which].recv;
        if (first->kind == GMM__COLL_GATHER || first->kind == GMM__COLL_EXCHANGE) {
            for (from = 0; from < g->size; from++) {
                const char *send = (const char *)p[from][which].send;
                if (first->kind == GMM__COLL_EXCHANGE) send += (size_t)to * bytes;
                if (bytes) memmove(recv + (size_t)from * bytes, send, bytes);
            }
        } else if (first->kind == GMM__COLL_SCATTER) {
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
                float top = ((const float *)p[0][which].send)[i];
                for (from = 1; from < g->size; from++) {
                    const float x = ((const float *)p[from][which].send)[i];
                    if (x > top || x != x) top = x;
                }
                for (from = 0; from < g->size; from++) ((float *)p[from][which].recv)[i] = top;
            }
        }
    }
}

/* All ranks have come to the collective: they must agree on it. */
static void gmm__group_run(gmm__group *g) {
    gmm__coll *parts[2 * GMM__RANK_QUEUES];
    gmm__rank_queue *queue[2 * GMM__RANK_QUEUES];
    gmm__rank_op *first = gmm__group_arrived(g, 0, &queue[0]);
    int32_t i, j;
    parts[0] = (gmm__coll *)first->memory;
    for (i = 1; i < g->size; i++) {
        const gmm__rank_op *op = gmm__group_arrived(g, i, &queue[i]);
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
            const int sends_all = p->kind == GMM__COLL_SCATTER || p->kind == GMM__COLL_EXCHANGE;
            const int gets_all = p->kind == GMM__COLL_GATHER || p->kind == GMM__COLL_EXCHANGE;
            gmm__ranks_access(queue[i], first->name, p->send, sends_all ? all : p->bytes, 0);
            gmm__ranks_access(queue[i], first->name, p->recv, gets_all ? all : p->bytes, 1);
        }
    }
    for (j = 0; j < first->count; j++) gmm__coll_run(g, parts, j);
    g->done++;
    for (i = 0; i < g->size; i++) gmm__rank_pop(queue[i]);
}

/* The queues of a graph get what a launch has prepared. */
static void gmm__graph_start(gmm__rank_queue *q, gmm__rank_op *op) {
    gmm__cpu_rank *r = q->rank;
    gmm__replay *replay = (gmm__replay *)op->memory;
    int32_t i;
    for (i = 0; i < op->graph->queue_count; i++) {
        gmm__rank_queue *to = r->queues[op->graph->queues[i]];
        gmm__clock_join(to->clock, q->clock);
        gmm__ranks_free(r->world, to->ops);
        to->ops = replay->ops[i];
        to->count = to->room = replay->count[i];
        to->head = 0;
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
            gmm__ranks_access(q, op->name, ranges[i].data, ranges[i].bytes, ranges[i].writes);
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
        gmm__clock_join(q->clock, op->token->clock);
        break;
    case GMM__RANK_COLLECTIVE: gmm__group_run(op->member->group); return;
    default: /* LAUNCH: started, then done when its queues are */
        if (!op->started) {
            gmm__rank_start(q, op);
            gmm__graph_start(q, op);
            return;
        }
        for (i = 0; i < op->graph->queue_count; i++)
            gmm__clock_join(q->clock, r->queues[op->graph->queues[i]]->clock);
        op->graph->running = 0;
        break;
    }
    gmm__rank_pop(q);
}

/* Runs one operation, drawn from those that can run: first among queues that are not slow. 0 = none can. */
static int gmm__ranks_step(gmm_ranks *w) {
    gmm__rank_queue *can[128], *pick = NULL;
    int count = 0, quick = 0, i;
    int32_t r;
    if (w->config.seed && gmm__ranks_draw(w) % 24 == 0) /* now and then other queues become slow */
        for (r = 0; r < w->config.ranks; r++)
            for (i = 0; i < GMM__RANK_QUEUES; i++)
                if (w->rank[r].queues[i]) w->rank[r].queues[i]->slow = gmm__ranks_draw(w) % 3 == 0;
    for (r = 0; r < w->config.ranks; r++)
        for (i = 0; i < GMM__RANK_QUEUES && count < 128; i++) {
            gmm__rank_queue *q = w->rank[r].queues[i];
            if (!q || !gmm__queue_head(q) || !gmm__rank_can_run(q)) continue;
            if (!w->config.seed) {
                gmm__rank_run(q);
                return 1;
            }
            can[count++] = q;
            quick += !q->slow;
        }
    if (!count) return 0;
    {
        int nth = (int)(gmm__ranks_draw(w) % (uint64_t)(quick ? quick : count));
        for (i = 0; i < count && !pick; i++)
            if ((!quick || !can[i]->slow) && nth-- == 0) pick = can[i];
    }
    gmm__rank_run(pick);
    return 1;
}

/* --- Enqueuing --- */

static gmm_status gmm__rank_fail(gmm__cpu_rank *r, gmm_status status, const char *format, ...) {
    char text[480];
    va_list list;
    va_start(list, format);
    (void)vsnprintf(text, sizeof text, format, list);
    va_end(list);
    return gmm__fail(&r->error, status, "%s", text);
}

static gmm__rank_queue *gmm__rank_queue_of(gmm__cpu_rank *r, gmm_stream stream) {
    return stream ? (gmm__rank_queue *)(void *)stream : r->queues[0];
}

/* Opens a call for a rank: locked, unless it fails. */
static gmm_status gmm__rank_enter(gmm__cpu_rank *r) {
    if (!r) return GMM_E_NULL;
    (void)pthread_mutex_lock(&r->world->mutex);
    if (!r->given_up) return GMM_OK;
    (void)pthread_mutex_unlock(&r->world->mutex);
    return GMM_E_COMM;
}
/* Closes it: some of what is queued runs, by the seed. */
static gmm_status gmm__rank_leave(gmm__cpu_rank *r, gmm_status status) {
    gmm_ranks *w = r->world;
    if (!w->config.seed) {
        while (gmm__ranks_step(w)) { }
    } else if (gmm__ranks_draw(w) % 4 == 0) {
        int n = (int)(gmm__ranks_draw(w) % 6);
        while (n-- > 0 && gmm__ranks_step(w)) { }
    }
    if (!status && r->given_up) status = GMM_E_COMM;
    (void)pthread_cond_broadcast(&w->changed);
    (void)pthread_mutex_unlock(&w->mutex);
    return status;
}

/* The same for a function that needs a pointer, and knows no flag but GMM_EVENT_EXTERNAL. */
static gmm_status gmm__rank_open(gmm__cpu_rank *r, const char *fn, const char *argument, const void *needed,
                                 uint32_t flags) {
    const gmm_status s = gmm__rank_enter(r);
    if (s) return s;
    if (!needed) return gmm__rank_leave(r, gmm__rank_fail(r, GMM_E_NULL, "%s: %s is NULL", fn, argument));
    if (!(flags & ~(uint32_t)GMM_EVENT_EXTERNAL)) return GMM_OK;
    return gmm__rank_leave(r, gmm__rank_fail(r, GMM_E_ARG, "%s: flags 0x%x has unknown bits", fn, flags));
}

/* What hangs, in words; the communicator that does, if there is one. */
static gmm__group *gmm__rank_blame(gmm__cpu_rank *r, char *text, size_t room) {
    int i;
    int32_t m;
    for (i = 0; i < GMM__RANK_QUEUES; i++) {
        gmm__rank_op *op = gmm__queue_head(r->queues[i]);
        gmm__group *g = op && op->kind == GMM__RANK_COLLECTIVE ? op->member->group : NULL;
        for (m = 0; g && m < g->size; m++)
            if (!gmm__group_arrived(g, m, NULL)) {
                (void)snprintf(text, room, "%s '%s', collective %llu of its communicator: rank %d of %d has not "
                               "joined within %d ms", gmm__coll_names[((const gmm__coll *)op->memory)->kind], op->name,
                               (unsigned long long)op->number, m, g->size,
                               r->world->config.timeout_ms);
                return g;
            }
    }
    (void)snprintf(text, room, "rank %d waits for what no stream is going to do (%d ms without progress)",
                   r->index, r->world->config.timeout_ms);
    return NULL;
}

/* Runs and waits, locked, until the queue is empty and the token done (either may be NULL). */
static gmm_status gmm__rank_wait(gmm__cpu_rank *r, const gmm__rank_queue *q, const gmm__token *token) {
    gmm_ranks *w = r->world;
    uint64_t seen = r->progress;
    struct timespec limit;
    int armed = 0;
    while (!r->given_up && ((q && q->count > 0) || (token && !token->done))) {
        if (gmm__ranks_step(w)) {
            (void)pthread_cond_broadcast(&w->changed);
            continue;
        }
        if (!armed || seen != r->progress) {
            (void)timespec_get(&limit, TIME_UTC);
            limit.tv_sec += w->config.timeout_ms / 1000;
            limit.tv_nsec += w->config.timeout_ms % 1000 * 1000000L;
            if (limit.tv_nsec >= 1000000000L) {
                limit.tv_sec++;
                limit.tv_nsec -= 1000000000L;
            }
            armed = 1;
            seen = r->progress;
        }
        if (pthread_cond_timedwait(&w->changed, &w->mutex, &limit) != 0 && seen == r->progress) {
            struct timespec now;
            (void)timespec_get(&now, TIME_UTC);
            if (now.tv_sec > limit.tv_sec || (now.tv_sec == limit.tv_sec && now.tv_nsec >= limit.tv_nsec)) {
                char text[400];
                gmm__group *g = gmm__rank_blame(r, text, sizeof text);
                if (g) gmm__group_give_up(g, text);
                else gmm__rank_give_up(r, text);
                (void)pthread_cond_broadcast(&w->changed);
            }
        }
    }
    return r->given_up ? GMM_E_COMM : GMM_OK;
}

/* Puts an operation on a stream, locked; takes over op->memory and op->token in any case. In a capture it becomes part
   of the graph. On stream NULL it is done on return. */
static gmm_status gmm__rank_put(gmm__cpu_rank *r, gmm_stream stream, gmm__rank_op *op) {
    gmm_ranks *w = r->world;
    gmm__rank_queue *q = gmm__rank_queue_of(r, stream);
    if (q->graph) {
        gmm_ranks_graph *g = q->graph;
        int32_t i;
        for (i = 0; i < g->queue_count && r->queues[g->queues[i]]->mirrors != q->index; i++) { }
        if (!gmm__ranks_grow(w, (void **)&g->ops[i], g->count[i], &g->room[i], sizeof *op)) {
            gmm__rank_op_free(w, op);
            return gmm__rank_fail(r, GMM_E_MEMORY, "no memory for a captured operation");
        }
        g->ops[i][g->count[i]++] = *op;
        return GMM_OK;
    }
    if (!r->host || memcmp(r->host->clock, r->queues[0]->clock, sizeof r->host->clock) != 0) {
        gmm__token *host = gmm__token_new(w);
        if (host) memcpy(host->clock, r->queues[0]->clock, sizeof host->clock);
        gmm__token_drop(w, r->host);
        r->host = host;
    }
    op->host = gmm__token_keep(r->host);
    if (q->count == q->room) { /* a ring: unrolled as it grows */
        const size_t room = q->room ? 2 * q->room : 32;
        gmm__rank_op *ops = (gmm__rank_op *)gmm__ranks_alloc(w, room * sizeof *ops);
        size_t i;
        if (!ops) {
            gmm__rank_op_free(w, op);
            return gmm__rank_fail(r, GMM_E_MEMORY, "no memory for a queued operation");
        }
        for (i = 0; i < q->count; i++) ops[i] = q->ops[(q->head + i) % q->room];
        gmm__ranks_free(w, q->ops);
        q->ops = ops;
        q->room = room;
        q->head = 0;
    }
    q->ops[(q->head + q->count++) % q->room] = *op;
    return q->index == 0 ? gmm__rank_wait(r, q, NULL) : GMM_OK;
}

/* --- The runtime table of a rank --- */

static gmm_status gmm__ranks_stream_create(void *self, int32_t priority, gmm_stream *out) {
    gmm__cpu_rank *r = (gmm__cpu_rank *)self;
    gmm_status s = gmm__rank_open(r, "stream_create", "out", out, 0);
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
        r->queues[i]->mirrors = -1;
        *out = (gmm_stream)(void *)r->queues[i];
    }
    return gmm__rank_leave(r, s);
}

/* Its queue stays until the end, so that what it did is remembered under its number. */
static gmm_status gmm__ranks_stream_sync(void *self, gmm_stream stream) {
    gmm__cpu_rank *r = (gmm__cpu_rank *)self;
    gmm_status s = gmm__rank_enter(r);
    gmm__rank_queue *q;
    if (s) return s;
    q = gmm__rank_queue_of(r, stream);
    if (q->graph) s = gmm__rank_fail(r, GMM_E_CAPTURE, "stream_sync: stream %d is capturing", q->index);
    else s = gmm__rank_wait(r, q, NULL);
    if (!s) gmm__clock_join(r->queues[0]->clock, q->clock);
    return gmm__rank_leave(r, s);
}
static gmm_status gmm__ranks_stream_destroy(void *self, gmm_stream stream) {
    return stream ? gmm__ranks_stream_sync(self, stream) : GMM_OK;
}

static gmm_status gmm__ranks_event_create(void *self, gmm_event *out) {
    gmm__cpu_rank *r = (gmm__cpu_rank *)self;
    gmm__rank_event *e;
    gmm_status s = gmm__rank_open(r, "event_create", "out", out, 0);
    if (s) return s;
    e = (gmm__rank_event *)gmm__ranks_alloc(r->world, sizeof *e);
    if (!e) s = gmm__rank_fail(r, GMM_E_MEMORY, "event_create: no memory");
    else e->rank = r;
    *out = (gmm_event)(void *)e;
    return gmm__rank_leave(r, s);
}
static gmm_status gmm__ranks_event_destroy(void *self, gmm_event event) {
    gmm__cpu_rank *r = (gmm__cpu_rank *)self;
    gmm__rank_event *e = (gmm__rank_event *)(void *)event;
    if (!r) return GMM_E_NULL;
    if (!e) return GMM_OK;
    (void)pthread_mutex_lock(&r->world->mutex);
    gmm__token_drop(r->world, e->last);
    gmm__ranks_free(r->world, e);
    (void)pthread_mutex_unlock(&r->world->mutex);
    return GMM_OK;
}

static gmm_status gmm__ranks_event_record(void *self, gmm_event event, gmm_stream stream, uint32_t flags) {
    gmm__cpu_rank *r = (gmm__cpu_rank *)self;
    gmm__rank_event *e = (gmm__rank_event *)(void *)event;
    gmm__rank_queue *q;
    gmm__rank_op op;
    gmm_status s = gmm__rank_open(r, "event_record", "event", e, flags);
    if (s) return s;
    q = gmm__rank_queue_of(r, stream);
    memset(&op, 0, sizeof op);
    op.kind = GMM__RANK_RECORD;
    op.name = "record";
    if (q->graph) {
        if (flags & (uint32_t)GMM_EVENT_EXTERNAL) op.event = e;
        else op.mark = q->graph->marks;
        s = gmm__rank_put(r, stream, &op);
        if (!s && !op.event) {
            e->capture = q->graph->serial;
            e->mark = q->graph->marks++;
        }
        return gmm__rank_leave(r, s);
    }
    op.token = gmm__token_new(r->world);
    if (!op.token) s = gmm__rank_fail(r, GMM_E_MEMORY, "event_record: no memory");
    else {
        gmm__token *token = gmm__token_keep(op.token);
        s = gmm__rank_put(r, stream, &op);
        if (s != GMM_E_MEMORY) { /* else the event is as before */
            gmm__token *before = e->last;
            e->last = token;
            e->capture = 0;
            token = before;
        }
        gmm__token_drop(r->world, token);
    }
    return gmm__rank_leave(r, s);
}

/* The stream becomes part of the capture: a queue of its own in every replay. */
static gmm_status gmm__graph_join(gmm__cpu_rank *r, gmm_ranks_graph *g, gmm__rank_queue *q) {
    int i;
    for (i = 1; i < GMM__RANK_QUEUES && r->queues[i]; i++) { }
    if (i == GMM__RANK_QUEUES) return gmm__rank_fail(r, GMM_E_MEMORY, "capture: more than %d streams", i - 1);
    r->queues[i] = (gmm__rank_queue *)gmm__ranks_alloc(r->world, sizeof *q);
    if (!r->queues[i]) return gmm__rank_fail(r, GMM_E_MEMORY, "capture: no memory");
    r->queues[i]->rank = r;
    r->queues[i]->index = i;
    r->queues[i]->mirrors = q->index;
    q->graph = g;
    g->queues[g->queue_count++] = i;
    return GMM_OK;
}

static gmm_status gmm__ranks_stream_wait(void *self, gmm_stream stream, gmm_event event, uint32_t flags) {
    gmm__cpu_rank *r = (gmm__cpu_rank *)self;
    gmm__rank_event *e = (gmm__rank_event *)(void *)event;
    gmm__rank_queue *q;
    gmm__rank_op op;
    gmm_status s = gmm__rank_open(r, "stream_wait", "event", e, flags);
    if (s) return s;
    q = gmm__rank_queue_of(r, stream);
    memset(&op, 0, sizeof op);
    op.kind = GMM__RANK_WAIT;
    op.name = "wait";
    if (q->graph && (flags & (uint32_t)GMM_EVENT_EXTERNAL)) {
        op.event = e;
        s = gmm__rank_put(r, stream, &op);
    } else if (r->capture && e->capture == r->capture->serial) {
        if (!q->graph) s = gmm__graph_join(r, r->capture, q);
        op.mark = e->mark;
        if (!s) s = gmm__rank_put(r, stream, &op);
    } else if (q->graph || e->capture) {
        s = gmm__rank_fail(r, GMM_E_CAPTURE, q->graph ? "stream_wait: captured stream %d waits for an event from "
                           "outside without GMM_EVENT_EXTERNAL" : "stream_wait: stream %d waits for an event that a "
                           "capture has recorded", q->index);
    } else if (e->last) {
        op.token = gmm__token_keep(e->last);
        s = gmm__rank_put(r, stream, &op);
    }
    return gmm__rank_leave(r, s);
}

static gmm_status gmm__ranks_event_query(void *self, gmm_event event, int32_t *done) {
    gmm__cpu_rank *r = (gmm__cpu_rank *)self;
    const gmm__rank_event *e = (const gmm__rank_event *)(const void *)event;
    const gmm_status s = gmm__rank_open(r, "event_query", e ? "done" : "event", e ? done : NULL, 0);
    if (s) return s;
    *done = !e->last || e->last->done;
    return gmm__rank_leave(r, GMM_OK);
}
static gmm_status gmm__ranks_event_sync(void *self, gmm_event event) {
    gmm__cpu_rank *r = (gmm__cpu_rank *)self;
    const gmm__rank_event *e = (const gmm__rank_event *)(const void *)event;
    gmm_status s = gmm__rank_open(r, "event_sync", "event", e, 0);
    if (s) return s;
    if (e->last) s = gmm__rank_wait(r, NULL, e->last);
    if (!s && e->last) gmm__clock_join(r->queues[0]->clock, e->last->clock);
    return gmm__rank_leave(r, s);
}

static gmm_status gmm__ranks_run_work(void *self, const gmm_work *work, gmm_stream stream) {
    gmm__cpu_rank *r = (gmm__cpu_rank *)self;
    const int whole = work && work->function;
    gmm_status s = gmm__rank_open(r, "run", work ? "work->function" : "work", whole ? work : NULL, 0);
    gmm__rank_op op;
    size_t ranges;
    if (s) return s;
    ranges = work->ranges ? (size_t)work->range_count * sizeof *work->ranges : 0;
    memset(&op, 0, sizeof op);
    op.kind = GMM__RANK_WORK;
    op.name = work->name ? work->name : "work";
    op.count = work->ranges ? work->range_count : 0;
    op.bytes = ranges + work->argument_bytes + 1;
    op.function = work->function;
    if (gmm__rank_queue_of(r, stream)->index == 0 && !r->queues[0]->graph) { /* at once, and others may go on */
        int32_t i;
        gmm__rank_start(r->queues[0], &op);
        for (i = 0; i < op.count; i++)
            gmm__ranks_access(r->queues[0], op.name, work->ranges[i].data, work->ranges[i].bytes,
                              work->ranges[i].writes);
        s = gmm__rank_leave(r, GMM_OK);
        return s ? s : work->function(work->argument, NULL);
    }
    op.memory = gmm__ranks_alloc(r->world, op.bytes);
    if (!op.memory) s = gmm__rank_fail(r, GMM_E_MEMORY, "'%s': no memory", op.name);
    else {
        if (ranges) memcpy(op.memory, work->ranges, ranges);
        if (work->argument_bytes)
            memcpy((char *)op.memory + ranges, work->argument, work->argument_bytes);
        s = gmm__rank_put(r, stream, &op);
    }
    return gmm__rank_leave(r, s);
}

/* Copies and fills are work like any other. */
typedef struct gmm__rank_move {
    void *dst;
    const void *src;
    size_t dst_pitch, src_pitch, width, height;
    int32_t value, fills; /* fills: there is no src */
} gmm__rank_move;

static gmm_status gmm__rank_move_run(const void *argument, gmm_stream stream) {
    const gmm__rank_move *m = (const gmm__rank_move *)argument;
    size_t i;
    (void)stream;
    for (i = 0; i < m->height && m->width; i++) {
        char *dst = (char *)m->dst + i * m->dst_pitch;
        if (!m->fills) memcpy(dst, (const char *)m->src + i * m->src_pitch, m->width);
        else memset(dst, (int)m->value, m->width);
    }
    return GMM_OK;
}
static gmm_status gmm__rank_move_put(void *self, gmm__rank_move m, gmm_stream stream) {
    gmm__cpu_rank *r = (gmm__cpu_rank *)self;
    const int none = !m.width || !m.height, lacks = !none && (!m.dst || (!m.fills && !m.src));
    gmm_work work;
    gmm_range ranges[2];
    memset(&work, 0, sizeof work);
    memset(ranges, 0, sizeof ranges);
    work.name = m.fills ? "fill" : "copy";
    if (lacks || m.value < 0 || m.value > 255 ||
        (!none && (m.dst_pitch < m.width || (!m.fills && m.src_pitch < m.width)))) {
        const gmm_status s = gmm__rank_enter(r);
        return s ? s : gmm__rank_leave(r, gmm__rank_fail(
            r, lacks ? GMM_E_NULL : GMM_E_ARG, "%s: dst %p, src %p, pitches %llu and %llu, width %llu, value %d: must "
            "not be NULL, >= width, and 0 to 255", work.name, m.dst, m.src, (unsigned long long)m.dst_pitch,
            (unsigned long long)m.src_pitch, (unsigned long long)m.width, m.value));
    }
    if (none) return GMM_OK;
    ranges[0].data = m.dst;
    ranges[0].bytes = (m.height - 1) * m.dst_pitch + m.width;
    ranges[0].writes = 1;
    ranges[1].data = m.src;
    ranges[1].bytes = (m.height - 1) * m.src_pitch + m.width;
    work.function = gmm__rank_move_run;
    work.argument = &m;
    work.argument_bytes = sizeof m;
    work.ranges = ranges;
    work.range_count = m.fills ? 1 : 2;
    return gmm__ranks_run_work(self, &work, stream);
}
static gmm_status gmm__ranks_copy2d(void *self, void *dst, size_t dst_pitch, const void *src, size_t src_pitch,
                                    size_t width, size_t height, gmm_stream stream) {
    gmm__rank_move m;
    m.dst = dst;
    m.src = src;
    m.dst_pitch = dst_pitch;
    m.src_pitch = src_pitch;
    m.width = width;
    m.height = height;
    m.value = m.fills = 0;
    return gmm__rank_move_put(self, m, stream);
}
static gmm_status gmm__ranks_copy(void *self, void *dst, const void *src, size_t bytes, gmm_stream stream) {
    return gmm__ranks_copy2d(self, dst, bytes, src, bytes, bytes, 1, stream);
}
static gmm_status gmm__ranks_fill2d(void *self, void *dst, size_t pitch, int32_t value, size_t width, size_t height,
                                    gmm_stream stream) {
    gmm__rank_move m;
    m.dst = dst;
    m.src = NULL;
    m.dst_pitch = pitch;
    m.src_pitch = 0;
    m.width = width;
    m.height = height;
    m.value = value;
    m.fills = 1;
    return gmm__rank_move_put(self, m, stream);
}
static gmm_status gmm__ranks_fill(void *self, void *dst, int32_t value, size_t bytes, gmm_stream stream) {
    return gmm__ranks_fill2d(self, dst, bytes, value, bytes, 1, stream);
}
static gmm_status gmm__ranks_is_capturing(void *self, gmm_stream stream, int32_t *capturing) {
    gmm__cpu_rank *r = (gmm__cpu_rank *)self;
    const gmm_status s = gmm__rank_open(r, "is_capturing", "capturing", capturing, 0);
    if (s) return s;
    *capturing = gmm__rank_queue_of(r, stream)->graph != NULL;
    return gmm__rank_leave(r, GMM_OK);
}

GMMDEF gmm_status gmm_ranks_runtime(gmm_ranks *ranks, int32_t rank, gmm_runtime *out) {
    static const gmm_runtime table = {
        0, GMM_SPACE_CPU, NULL, gmm__ranks_stream_create, gmm__ranks_stream_destroy, gmm__ranks_stream_wait,
        gmm__ranks_stream_sync, gmm__ranks_event_create, gmm__ranks_event_destroy, gmm__ranks_event_record,
        gmm__ranks_event_query, gmm__ranks_event_sync, gmm__ranks_copy, gmm__ranks_copy2d, gmm__ranks_fill,
        gmm__ranks_fill2d, gmm__ranks_is_capturing, gmm__ranks_run_work};
    if (!ranks || !out) return GMM_E_NULL;
    if (rank < 0 || rank >= ranks->config.ranks) return GMM_E_ARG;
    *out = table;
    out->self = &ranks->rank[rank];
    return GMM_OK;
}

/* --- Communicators --- */

static gmm_status gmm__member_flush(gmm__member *m) {
    gmm__cpu_rank *r = m->rank;
    const int captured = gmm__rank_queue_of(r, m->stream)->graph != NULL;
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
    m->count = m->room = 0;
    if (!captured) op.number = m->given++; /* in a graph: at its launch */
    s = gmm__rank_put(r, m->stream, &op);
    if (!captured && s == GMM_E_MEMORY) m->given--; /* it does not stand in the queue */
    return s;
}

static gmm_status gmm__member_call(void *self, gmm__coll part, gmm_stream stream) {
    gmm__member *m = (gmm__member *)self;
    const char *what = m->what ? m->what : "collective";
    gmm_status s = gmm__rank_enter(m->rank);
    if (s) return s;
    if (part.kind == GMM__COLL_SCATTER && !gmm__comm_adds(part.dtype))
        return gmm__rank_leave(m->rank, gmm__rank_fail(m->rank, GMM_E_DTYPE, "'%s': reduce_scatter of %s: must be f32, "
                                                       "bf16 or f16", what, gmm_dtype_name(part.dtype)));
    if (m->count && m->stream != stream)
        return gmm__rank_leave(m->rank, gmm__rank_fail(m->rank, GMM_E_ARG, "'%s': one group on two streams", what));
    if (m->count == m->room) {
        size_t room = (size_t)m->room;
        void *parts = m->parts;
        if (!gmm__ranks_grow(m->group->world, &parts, (size_t)m->count, &room, sizeof part))
            return gmm__rank_leave(m->rank, gmm__rank_fail(m->rank, GMM_E_MEMORY, "'%s': no memory", what));
        m->parts = (gmm__coll *)parts;
        m->room = (int32_t)room;
    }
    m->parts[m->count++] = part;
    m->stream = stream;
    if (!m->open) s = gmm__member_flush(m);
    return gmm__rank_leave(m->rank, s);
}
static gmm__coll gmm__coll_of(gmm__coll_kind kind, gmm_dtype dtype, const void *send, void *recv, size_t bytes) {
    gmm__coll p;
    memset(&p, 0, sizeof p);
    p.kind = kind;
    p.dtype = dtype;
    p.send = send;
    p.recv = recv;
    p.bytes = bytes;
    return p;
}

static gmm_status gmm__member_begin(void *self, const char *what) {
    gmm__member *m = (gmm__member *)self;
    const gmm_status s = gmm__rank_enter(m->rank);
    if (s) return s;
    m->open = 1;
    m->what = what;
    return gmm__rank_leave(m->rank, GMM_OK);
}
static gmm_status gmm__member_end(void *self) {
    gmm__member *m = (gmm__member *)self;
    gmm_status s = gmm__rank_enter(m->rank);
    if (s) return s;
    m->open = 0;
    s = gmm__member_flush(m);
    m->what = NULL;
    return gmm__rank_leave(m->rank, s);
}
static gmm_status gmm__member_gather(void *self, const void *send, void *recv, size_t bytes, gmm_stream stream) {
    return gmm__member_call(self, gmm__coll_of(GMM__COLL_GATHER, GMM_NONE, send, recv, bytes), stream);
}
static gmm_status gmm__member_scatter(void *self, const void *send, void *recv, size_t count, gmm_dtype dtype,
                                      gmm_stream stream) {
    const size_t bytes = count * (size_t)(gmm_dtype_bits(dtype) / 8);
    return gmm__member_call(self, gmm__coll_of(GMM__COLL_SCATTER, dtype, send, recv, bytes), stream);
}
static gmm_status gmm__member_exchange(void *self, const void *send, void *recv, size_t bytes, gmm_stream stream) {
    return gmm__member_call(self, gmm__coll_of(GMM__COLL_EXCHANGE, GMM_NONE, send, recv, bytes), stream);
}
static gmm_status gmm__member_max(void *self, float *values, size_t count, gmm_stream stream) {
    return gmm__member_call(self, gmm__coll_of(GMM__COLL_MAX, GMM_F32, values, values, count * sizeof *values), stream);
}
static gmm_status gmm__member_poll(void *self, gmm_error *error) {
    gmm__member *m = (gmm__member *)self;
    gmm_status s;
    (void)pthread_mutex_lock(&m->group->world->mutex);
    s = m->group->fault.status ? GMM_E_COMM : m->rank->given_up ? GMM_E_COMM : GMM_OK;
    if (s && error) *error = m->group->fault.status ? m->group->fault : m->rank->error;
    if (!s && error) { /* who is missing, for whoever finds that it has been too long */
        const gmm__rank_op *op = gmm__group_arrived(m->group, m->index, NULL);
        int32_t i;
        memset(error, 0, sizeof *error);
        for (i = 0; op && i < m->group->size; i++)
            if (!gmm__group_arrived(m->group, i, NULL)) {
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

GMMDEF gmm_status gmm_ranks_comms(gmm_ranks *ranks, const int32_t *members, int32_t count, gmm_comm *out) {
    gmm__group *g;
    int32_t i, j;
    if (!ranks || !members || !out) return GMM_E_NULL;
    if (count < 1 || count > ranks->config.ranks) return GMM_E_ARG;
    for (i = 0; i < count; i++) {
        if (members[i] < 0 || members[i] >= ranks->config.ranks) return GMM_E_ARG;
        for (j = 0; j < i; j++)
            if (members[j] == members[i]) return GMM_E_ARG;
    }
    (void)pthread_mutex_lock(&ranks->mutex);
    g = (gmm__group *)gmm__ranks_alloc(ranks, sizeof *g);
    if (g) g->members = (gmm__member *)gmm__ranks_alloc(ranks, (size_t)count * sizeof *g->members);
    if (!g || !g->members) {
        gmm__ranks_free(ranks, g);
        (void)pthread_mutex_unlock(&ranks->mutex);
        return GMM_E_MEMORY;
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
        c.group_begin = gmm__member_begin;
        c.group_end = gmm__member_end;
        c.all_gather = gmm__member_gather;
        c.reduce_scatter = gmm__member_scatter;
        c.all_to_all = gmm__member_exchange;
        c.all_reduce_max = gmm__member_max;
        c.poll = gmm__member_poll;
        c.give_up = gmm__member_give_up;
        out[i] = c;
    }
    (void)pthread_mutex_unlock(&ranks->mutex);
    return GMM_OK;
}

/* --- Captures --- */

static void gmm__graph_free(gmm_ranks_graph *g) {
    gmm_ranks *w = g->rank->world;
    int32_t i;
    for (i = 0; i < g->queue_count; i++) {
        size_t j;
        for (j = 0; j < g->count[i]; j++) gmm__rank_op_free(w, &g->ops[i][j]);
        gmm__ranks_free(w, g->ops[i]);
        g->rank->queues[g->queues[i]]->mirrors = GMM__RANK_QUEUES; /* the number stays taken, for the checker */
    }
    gmm__ranks_free(w, g);
}

/* Whether all that the capture's other streams were given is joined back: a stream is covered up to the last of its
   records that a covered part of another stream waits for. */
static int32_t gmm__graph_loose(const gmm_ranks_graph *g) {
    size_t covered[GMM__RANK_QUEUES] = {0};
    int32_t i, k, again = 1;
    size_t j, n;
    covered[0] = g->count[0];
    while (again)
        for (again = 0, i = 0; i < g->queue_count; i++)
            for (j = covered[i]; j < g->count[i]; j++) {
                const gmm__rank_op *record = &g->ops[i][j];
                if (record->kind != GMM__RANK_RECORD || record->event) continue;
                for (k = 0; k < g->queue_count; k++)
                    for (n = 0; n < covered[k]; n++) {
                        const gmm__rank_op *wait = &g->ops[k][n];
                        if (wait->kind != GMM__RANK_WAIT || wait->event || wait->mark != record->mark) continue;
                        if (covered[i] < j + 1) again = 1;
                        covered[i] = covered[i] < j + 1 ? j + 1 : covered[i];
                    }
            }
    for (i = 1; i < g->queue_count; i++)
        for (j = covered[i]; j < g->count[i]; j++)
            if (g->ops[i][j].kind != GMM__RANK_WAIT && (g->ops[i][j].kind != GMM__RANK_RECORD || g->ops[i][j].event))
                return i;
    return 0;
}

GMMDEF gmm_status gmm_ranks_capture_begin(gmm_ranks *ranks, int32_t rank, gmm_stream stream) {
    gmm__cpu_rank *r = ranks && rank >= 0 && rank < ranks->config.ranks ? &ranks->rank[rank] : NULL;
    gmm_status s = gmm__rank_enter(r);
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
        s = gmm__graph_join(r, r->capture, gmm__rank_queue_of(r, stream));
        if (s) {
            gmm__ranks_free(ranks, r->capture);
            r->capture = NULL;
        }
    }
    return gmm__rank_leave(r, s);
}

GMMDEF gmm_status gmm_ranks_capture_end(gmm_ranks *ranks, int32_t rank, gmm_stream stream, gmm_ranks_graph **out) {
    gmm__cpu_rank *r = ranks && rank >= 0 && rank < ranks->config.ranks ? &ranks->rank[rank] : NULL;
    gmm_ranks_graph *g;
    gmm_status s = gmm__rank_open(r, "capture_end", "out", out, 0);
    int32_t i;
    if (s) return s;
    *out = NULL;
    g = r->capture;
    if (!g || g->origin != stream)
        return gmm__rank_leave(r, gmm__rank_fail(r, GMM_E_CAPTURE, "capture_end: not the stream of a capture"));
    for (i = 0; i < GMM__RANK_QUEUES; i++)
        if (r->queues[i] && r->queues[i]->graph == g) r->queues[i]->graph = NULL;
    r->capture = NULL;
    i = gmm__graph_loose(g);
    if (i) {
        s = gmm__rank_fail(r, GMM_E_CAPTURE, "capture_end: what stream %d was given has not been joined back",
                           r->queues[g->queues[i]]->mirrors);
        gmm__graph_free(g);
    } else *out = g;
    return gmm__rank_leave(r, s);
}

/* A copy of a captured operation for one launch; 0 = no memory. Waits for events from outside see them as they are
   before the launch. */
static int gmm__graph_copy(gmm_ranks_graph *g, gmm__token **tokens, const gmm__rank_op *from, gmm__rank_op *op) {
    gmm_ranks *w = g->rank->world;
    *op = *from;
    op->memory = NULL;
    if (from->kind == GMM__RANK_WAIT) {
        op->token = gmm__token_keep(from->event ? from->event->last : tokens[from->mark]);
        if (!op->token && (op->token = gmm__token_new(w)) != NULL) op->token->done = 1; /* never recorded */
        return op->token != NULL;
    }
    if (from->kind == GMM__RANK_RECORD) {
        op->token = from->event ? gmm__token_new(w) : gmm__token_keep(tokens[from->mark]);
        return op->token != NULL;
    }
    op->memory = gmm__ranks_alloc(w, from->bytes);
    if (op->memory) memcpy(op->memory, from->memory, from->bytes);
    return op->memory != NULL;
}

GMMDEF gmm_status gmm_ranks_launch(gmm_ranks_graph *graph, gmm_stream stream) {
    gmm__cpu_rank *r = graph ? graph->rank : NULL;
    gmm_ranks *w;
    gmm__rank_op op;
    gmm__replay *replay;
    gmm__token **tokens;
    gmm_status s = gmm__rank_enter(r);
    int32_t i;
    size_t j;
    int fits;
    if (s) return s;
    if (gmm__rank_queue_of(r, stream)->graph)
        return gmm__rank_leave(r, gmm__rank_fail(r, GMM_E_CAPTURE, "launch: the stream is capturing"));
    w = r->world;
    memset(&op, 0, sizeof op);
    op.kind = GMM__RANK_LAUNCH;
    op.name = "launch";
    op.graph = graph;
    op.memory = replay = (gmm__replay *)gmm__ranks_alloc(w, sizeof *replay);
    tokens = (gmm__token **)gmm__ranks_alloc(w, ((size_t)graph->marks + 1) * sizeof *tokens);
    fits = replay && tokens;
    for (i = 0; fits && i < graph->marks; i++) fits = (tokens[i] = gmm__token_new(w)) != NULL;
    for (i = 0; fits && i < graph->queue_count; i++) {
        replay->ops[i] = (gmm__rank_op *)gmm__ranks_alloc(w, (graph->count[i] + 1) * sizeof op);
        fits = replay->ops[i] != NULL;
        for (j = 0; fits && j < graph->count[i]; j++) {
            fits = gmm__graph_copy(graph, tokens, &graph->ops[i][j], &replay->ops[i][j]);
            replay->count[i] = j + 1;
        }
    }
    for (i = 0; fits && i < graph->queue_count; i++) /* nothing fails any more: its own records are the last ones */
        for (j = 0; j < graph->count[i]; j++) {
            gmm__rank_op *to = &replay->ops[i][j];
            if (to->kind == GMM__RANK_COLLECTIVE) to->number = to->member->given++;
            if (to->kind != GMM__RANK_RECORD || !to->event) continue;
            gmm__token_drop(w, to->event->last);
            to->event->last = gmm__token_keep(to->token);
        }
    for (i = 0; tokens && i < graph->marks; i++) gmm__token_drop(w, tokens[i]);
    gmm__ranks_free(w, tokens);
    if (!fits) {
        gmm__rank_op_free(w, &op);
        s = gmm__rank_fail(r, GMM_E_MEMORY, "launch: no memory");
    } else s = gmm__rank_put(r, stream, &op);
    return gmm__rank_leave(r, s);
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

/* --- The world of ranks --- */

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
                (void)gmm__rank_blame(r, text, sizeof text);
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
    (void)pthread_mutex_lock(&ranks->mutex); /* other ranks' threads give this one up */
    r->told = r->error;
    (void)pthread_mutex_unlock(&ranks->mutex);
    return r->told.text;
}

GMMDEF int64_t gmm_ranks_races(gmm_ranks *ranks, const char **text) {
    int64_t n;
    if (!ranks) return 0;
    (void)pthread_mutex_lock(&ranks->mutex);
    n = ranks->races;
    if (text) *text = ranks->race;
    (void)pthread_mutex_unlock(&ranks->mutex);
    return n;
}

GMMDEF void gmm_ranks_destroy(gmm_ranks *ranks) {
    int32_t i;
    int q;
    if (!ranks) return;
    for (i = 0; ranks->rank && i < ranks->config.ranks; i++) {
        gmm__cpu_rank *r = &ranks->rank[i];
        r->given_up = 0;
        gmm__rank_give_up(r, "");
        if (r->capture) gmm__graph_free(r->capture); /* that nobody has ended */
        for (q = 0; q < GMM__RANK_QUEUES; q++) {
            if (r->queues[q]) gmm__ranks_free(ranks, r->queues[q]->ops);
            gmm__ranks_free(ranks, r->queues[q]);
        }
        gmm__token_drop(ranks, r->host);
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

GMMDEF gmm_status gmm_ranks_create(const gmm_ranks_config *config, gmm_ranks **out, gmm_error *error) {
    static const char fn[] = "gmm_ranks_create";
    gmm_ranks_config c;
    gmm_ranks *w;
    gmm_status s;
    int32_t i;
    if (!out) return gmm__fail(error, GMM_E_NULL, "%s: out is NULL", fn);
    *out = NULL;
    s = gmm__gtp_open(fn, "config", config, &c, sizeof c, error);
    if (s) return s;
    if (c.ranks < 1 || c.ranks > 2 * GMM__RANK_QUEUES || c.timeout_ms < 0)
        return gmm__fail(error, GMM_E_ARG, "%s: %d ranks, timeout_ms %d: must be 1 to %d, and >= 0", fn, c.ranks,
                         c.timeout_ms, 2 * (int)GMM__RANK_QUEUES);
    if (!c.allocator.alloc != !c.allocator.release)
        return gmm__fail(error, GMM_E_ARG, "%s: allocator: both functions or none", fn);
    if (c.timeout_ms == 0) c.timeout_ms = 10000;
    w = (gmm_ranks *)(c.allocator.alloc ? c.allocator.alloc(c.allocator.user, sizeof *w) : GMM_MALLOC(sizeof *w));
    if (!w) return gmm__fail(error, GMM_E_MEMORY, "%s: no memory", fn);
    memset(w, 0, sizeof *w);
    w->config = c;
    w->random = c.seed;
    (void)pthread_mutex_init(&w->mutex, NULL);
    (void)pthread_cond_init(&w->changed, NULL);
    w->rank = (gmm__cpu_rank *)gmm__ranks_alloc(w, (size_t)c.ranks * sizeof *w->rank);
    for (i = 0; w->rank && i < c.ranks; i++) {
        gmm__cpu_rank *r = &w->rank[i];
        r->world = w;
        r->index = i;
        r->queues[0] = (gmm__rank_queue *)gmm__ranks_alloc(w, sizeof *r->queues[0]);
        if (!r->queues[0]) break;
        r->queues[0]->rank = r;
        r->queues[0]->mirrors = -1;
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

static double gmm__gtp_now(void) {
    struct timespec t;
    (void)timespec_get(&t, TIME_UTC);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* ....................................................................................................... NCCL ... */

/* What the communicators of sections 8 and 9 share. `self` begins with it. */
typedef struct gmm__wire {
    gmm_context *ctx;
    gmm_error error;    /* of the first failure */
    const char *what;   /* the open group */
    int32_t given_up, open;
} gmm__wire;

static GMM__UNUSED gmm_status gmm__wire_fail(gmm__wire *w, const char *call, const char *text) {
    if (!w->error.text[0])
        (void)gmm__fail(&w->error, GMM_E_COMM, "%s%s%.60s%s: %.300s", call, w->what ? " of '" : "",
                        w->what ? w->what : "", w->what ? "'" : "", text);
    return GMM_E_COMM;
}
static GMM__UNUSED gmm_status gmm__wire_poll(const gmm__wire *w, gmm_error *error) {
    if (error) *error = w->error;
    return w->given_up || w->error.text[0] ? GMM_E_COMM : GMM_OK;
}
static GMM__UNUSED void *gmm__wire_alloc(gmm_context *ctx, size_t bytes) {
    const gmm_allocator *a = &ctx->config.allocator;
    void *p = a->alloc ? a->alloc(a->user, bytes) : GMM_MALLOC(bytes);
    return p ? memset(p, 0, bytes) : NULL;
}
static GMM__UNUSED void gmm__wire_free(gmm_context *ctx, void *p) {
    const gmm_allocator *a = &ctx->config.allocator;
    if (a->release) a->release(a->user, p);
    else GMM_FREE(p);
}

#if defined(__CUDACC__) && defined(GMM_WITH_NCCL)

enum { GMM__NCCL_PROCESSORS = 16 }; /* on an H200: enough for windows and the kernels that start copy engines */

typedef struct gmm__nccl {
    gmm__wire wire;
    ncclComm_t comm;
    double timeout;
} gmm__nccl;

/* The outcome of a call: one to a non-blocking communicator may go on for a while. */
static gmm_status gmm__nccl_end(gmm__nccl *n, const char *call, ncclResult_t r) {
    const double begin = gmm__gtp_now();
    const struct timespec pause = {0, 20000};
    while (r == ncclInProgress && !n->wire.open && gmm__gtp_now() - begin < n->timeout) {
        (void)nanosleep(&pause, NULL);
        if (ncclCommGetAsyncError(n->comm, &r) != ncclSuccess) r = ncclInternalError;
    }
    if (r == ncclSuccess || (r == ncclInProgress && n->wire.open)) return GMM_OK;
    if (r == ncclInProgress) return gmm__wire_fail(&n->wire, call, "not done in time: a peer is missing");
    return gmm__wire_fail(&n->wire, call, ncclGetErrorString(r));
}
/* One call on the communicator's device; after a failure nothing more is called. */
#define GMM__NCCL(n, name, call) \
    int current; \
    gmm_status s = gmm__wire_poll(&(n)->wire, NULL); \
    if (s || gmm__cuda_enter((n)->wire.ctx, &current) != cudaSuccess) return s ? s : GMM_E_CUDA; \
    return s = gmm__nccl_end(n, name, call), (void)gmm__cuda_leave((n)->wire.ctx, name, current, cudaSuccess), s

static gmm_status gmm__nccl_begin(void *self, const char *what) {
    gmm__nccl *n = (gmm__nccl *)self;
    n->wire.what = what;
    GMM__NCCL(n, "ncclGroupStart", (n->wire.open = 1, ncclGroupStart()));
}
/* After a failed call NCCL's group stays open: give_up ends it. */
static gmm_status gmm__nccl_close_group(void *self) {
    gmm__nccl *n = (gmm__nccl *)self;
    GMM__NCCL(n, "ncclGroupEnd", (n->wire.open = 0, ncclGroupEnd()));
}
static gmm_status gmm__nccl_gather(void *self, const void *send, void *recv, size_t bytes, gmm_stream stream) {
    gmm__nccl *n = (gmm__nccl *)self;
    GMM__NCCL(n, "ncclAllGather", ncclAllGather(send, recv, bytes, ncclInt8, n->comm, stream));
}
static gmm_status gmm__nccl_scatter(void *self, const void *send, void *recv, size_t count, gmm_dtype dtype,
                                    gmm_stream stream) {
    gmm__nccl *n = (gmm__nccl *)self;
    const ncclDataType_t type = dtype == GMM_F32 ? ncclFloat32 : dtype == GMM_BF16 ? ncclBfloat16 : ncclFloat16;
    if (!gmm__comm_adds(dtype)) return gmm__wire_fail(&n->wire, "reduce_scatter", "dtype must be f32, bf16 or f16");
    GMM__NCCL(n, "ncclReduceScatter", ncclReduceScatter(send, recv, count, type, ncclSum, n->comm, stream));
}
#if NCCL_VERSION_CODE >= 22800
#define GMM__NCCL_ALL_TO_ALL ncclAlltoAll
#else
#define GMM__NCCL_ALL_TO_ALL gmm__nccl_all_to_all
static ncclResult_t gmm__nccl_all_to_all(const void *send, void *recv, size_t bytes, ncclDataType_t type,
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
static gmm_status gmm__nccl_exchange(void *self, const void *send, void *recv, size_t bytes, gmm_stream stream) {
    gmm__nccl *n = (gmm__nccl *)self;
    GMM__NCCL(n, "ncclAlltoAll", GMM__NCCL_ALL_TO_ALL(send, recv, bytes, ncclInt8, n->comm, stream));
}
#undef GMM__NCCL_ALL_TO_ALL
static gmm_status gmm__nccl_max(void *self, float *values, size_t count, gmm_stream stream) {
    gmm__nccl *n = (gmm__nccl *)self;
    GMM__NCCL(n, "ncclAllReduce", ncclAllReduce(values, values, count, ncclFloat32, ncclMax, n->comm, stream));
}
#if NCCL_VERSION_CODE >= 22700
static gmm_status gmm__nccl_window_add(void *self, void *base, size_t bytes, void **window) {
    gmm__nccl *n = (gmm__nccl *)self;
    ncclWindow_t w = NULL;
    int current;
    gmm_status s = gmm__wire_poll(&n->wire, NULL);
    *window = NULL;
    if (s || gmm__cuda_enter(n->wire.ctx, &current) != cudaSuccess) return s ? s : GMM_E_CUDA;
    s = gmm__nccl_end(n, "ncclCommWindowRegister", ncclCommWindowRegister(n->comm, base, bytes, &w,
                                                                          NCCL_WIN_COLL_SYMMETRIC));
    *window = w;
    return gmm__cuda_leave(n->wire.ctx, "ncclCommWindowRegister", current, cudaSuccess), s;
}
static gmm_status gmm__nccl_window_remove(void *self, void *window) {
    gmm__nccl *n = (gmm__nccl *)self;
    GMM__NCCL(n, "ncclCommWindowDeregister", ncclCommWindowDeregister(n->comm, (ncclWindow_t)window));
}
#endif
static gmm_status gmm__nccl_poll(void *self, gmm_error *error) {
    gmm__nccl *n = (gmm__nccl *)self;
    ncclResult_t r = ncclSuccess;
    if (n->comm && !n->wire.error.text[0] && ncclCommGetAsyncError(n->comm, &r) == ncclSuccess && r != ncclSuccess &&
        r != ncclInProgress)
        (void)gmm__wire_fail(&n->wire, "NCCL", ncclGetLastError(n->comm));
    return gmm__wire_poll(&n->wire, error);
}
static void gmm__nccl_give_up(void *self, const char *why) {
    gmm__nccl *n = (gmm__nccl *)self;
    int current;
    if (n->wire.given_up) return;
    n->wire.given_up = 1;
    (void)gmm__wire_fail(&n->wire, "given up", why);
    if (gmm__cuda_enter(n->wire.ctx, &current) != cudaSuccess) return;
    if (n->wire.open) (void)ncclGroupEnd(); /* a group that a failure left open */
    n->wire.open = 0;
    (void)ncclCommAbort(n->comm);
    n->comm = NULL;
    (void)gmm__cuda_leave(n->wire.ctx, "ncclCommAbort", current, cudaSuccess);
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
    if ((s = gmm__gtp_open(fn, "config", config, &c, sizeof c, error)) != GMM_OK) return s;
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
        return gmm__fail(error, GMM_E_ARG, "%s: ctx is not of CUDA device %d, that of the communicator", fn, device);
    n = (gmm__nccl *)gmm__wire_alloc(c.ctx, sizeof *n);
    if (!n) return gmm__fail(error, GMM_E_MEMORY, "%s: no memory", fn);
    n->wire.ctx = c.ctx;
    n->comm = c.comm;
    n->timeout = 1e-3 * (c.timeout_ms ? c.timeout_ms : 10000);
    out->rank = rank;
    out->size = size;
    out->processors = GMM__NCCL_PROCESSORS;
    out->self = n;
    out->group_begin = gmm__nccl_begin;
    out->group_end = gmm__nccl_close_group;
    out->all_gather = gmm__nccl_gather;
    out->reduce_scatter = gmm__nccl_scatter;
    out->all_to_all = gmm__nccl_exchange;
    out->all_reduce_max = gmm__nccl_max;
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
    gmm__wire_free(((gmm__wire *)comm->self)->ctx, comm->self);
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

/* ................................................................................................ Peer copies ... */

#ifdef __CUDACC__

enum {
    GMM__PEERS_MOST = 64,       /* ranks */
    GMM__PEERS_WINDOWS = 16,
    GMM__PEERS_BOX = 1024,      /* values of all_reduce_max at a time */
    GMM__PEERS_BLOCK = 2 << 20, /* bytes that an allocation shares with no other: IPC opens whole blocks */
    GMM__PEERS_PUSHES = 64,     /* of an operation that are enqueued together */
    GMM__PEERS_CAME = 0, GMM__PEERS_DONE = 1, GMM__PEERS_GONE = 2, GMM__PEERS_WORDS = 3
};

/* Device memory of every rank that a communicator reaches. */
typedef struct gmm__peers_window {
    char *base[GMM__PEERS_MOST];
    void *opened[GMM__PEERS_MOST]; /* to be closed */
    size_t bytes;
} gmm__peers_window;

/* What all_gather and all_to_all send: the whole, or the part of each rank, to one place in everybody's window. */
typedef struct gmm__peers_push {
    const char *from;
    const gmm__peers_window *window;
    size_t at, bytes;
    int32_t parts, reserved;
} gmm__peers_push;

/* A rank's own memory begins with words [CAME, DONE, GONE][rank] that its peers set to 1; its stream sets the first two
   back to 0. Its box comes behind, [rank][GMM__PEERS_BOX] values. An operation: tell the peers that this rank has come,
   wait until they have; copy into their windows; tell them that it is done, wait until they are. A word is set again
   only in the operation after the one in which it was set back, so that words need no count, and a graph may be
   replayed. */
typedef struct gmm__peers {
    gmm__wire wire;
    gmm_peers_config config;
    PFN_cuStreamBatchMemOp_v11070 batch;
    PFN_cuMemGetAddressRange_v3020 range;
    gmm__peers_window own, windows[GMM__PEERS_WINDOWS];
    gmm_stream side;            /* copies within the device, beside those to peers */
    gmm_stream aid;             /* for when a peer is missing; of a priority that few use, so that it shares no queue of
                                   the device with a stream that waits */
    uint32_t *seen;             /* [CAME, DONE, GONE][rank] page-locked */
    cudaEvent_t fork, join, last;
    gmm_stream stream;          /* of the open operation */
    int32_t begun, pushes, told, reserved; /* told: by a peer that has given up, as all were */
    gmm__peers_push push[GMM__PEERS_PUSHES]; /* not enqueued yet */
} gmm__peers;

/* What a rank tells of its window. */
typedef struct gmm__peers_offer {
    cudaIpcMemHandle_t handle;
    size_t offset, bytes;
    char *base;
    int32_t device, reserved;
} gmm__peers_offer;

static uint32_t *gmm__peers_word(const gmm__peers *p, int32_t owner, int kind, int32_t writer) {
    return (uint32_t *)(void *)p->own.base[owner] + kind * p->config.size + writer;
}
static float *gmm__peers_box(const gmm__peers *p, int32_t owner, int32_t writer) {
    return (float *)(void *)(p->own.base[owner] + 1024) + (size_t)writer * GMM__PEERS_BOX;
}
static size_t gmm__peers_bytes(int32_t size) { return 1024 + (size_t)size * GMM__PEERS_BOX * sizeof(float); }

static gmm_status gmm__peers_cuda(gmm__peers *p, const char *call, cudaError_t e) {
    if (e == cudaSuccess) return GMM_OK;
    (void)cudaGetLastError();
    return gmm__wire_fail(&p->wire, call, cudaGetErrorString(e));
}

/* Says something to all peers, and waits until they have said it. */
static gmm_status gmm__peers_meet(gmm__peers *p, int kind, gmm_stream stream) {
    CUstreamBatchMemOpParams op[3 * GMM__PEERS_MOST];
    const int32_t size = p->config.size, rank = p->config.rank;
    unsigned n = 0;
    int32_t i, step;
    memset(op, 0, sizeof op);
    for (step = 0; step < 3; step++)
        for (i = 1; i < size; i++, n++) {
            const int32_t peer = (rank + i) % size;
            uint32_t *word = step == 0 ? gmm__peers_word(p, peer, kind, rank) : gmm__peers_word(p, rank, kind, peer);
            if (step == 1) {
                op[n].waitValue.operation = CU_STREAM_MEM_OP_WAIT_VALUE_32;
                op[n].waitValue.address = (CUdeviceptr)(uintptr_t)word;
                op[n].waitValue.value = 1;
                op[n].waitValue.flags = CU_STREAM_WAIT_VALUE_EQ;
            } else {
                op[n].writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_32;
                op[n].writeValue.address = (CUdeviceptr)(uintptr_t)word;
                op[n].writeValue.value = step == 0;
                op[n].writeValue.flags = CU_STREAM_WRITE_VALUE_DEFAULT;
            }
        }
    return n == 0 || p->batch(stream, n, op, 0) == CUDA_SUCCESS /* a batch of none may be refused */
               ? GMM_OK : gmm__wire_fail(&p->wire, "cuStreamBatchMemOp", "the driver refuses it");
}

/* The first call of an operation. */
static gmm_status gmm__peers_start(gmm__peers *p, gmm_stream stream) {
    if (p->begun && p->stream != stream) return gmm__wire_fail(&p->wire, "peer copies", "one group on two streams");
    if (p->begun) return GMM_OK;
    p->begun = 1;
    p->stream = stream;
    return gmm__peers_meet(p, GMM__PEERS_CAME, stream);
}

/* Bytes from an address to the end of its allocation; 0 = not known. */
static size_t gmm__peers_room(const gmm__peers *p, const void *at) {
    CUdeviceptr start = 0;
    size_t bytes = 0;
    if (p->range(&start, &bytes, (CUdeviceptr)(uintptr_t)at) != CUDA_SUCCESS) return 0;
    return (size_t)(start + bytes - (CUdeviceptr)(uintptr_t)at);
}
/* How many pushes from q on, of n, are one two-dimensional copy: alike, and evenly spaced in one allocation on either
   side. */
static int32_t gmm__peers_run(const gmm__peers *p, const gmm__peers_push *q, int32_t n) {
    const uintptr_t step = n > 1 ? (uintptr_t)q[1].from - (uintptr_t)q->from : 0;
    const size_t pitch = n > 1 ? q[1].at - q->at : 0, whole = q->bytes * (size_t)p->config.size;
    size_t from, to;
    int32_t k = 1;
    if (step < q->bytes || pitch < q->bytes || step > 0x7fffffffu || pitch > 0x7fffffffu) return 1;
    from = gmm__peers_room(p, q->from);
    to = gmm__peers_room(p, q->window->base[p->config.rank] + q->at);
    while (k < n && q[k].bytes == q->bytes && q[k].parts == q->parts && q[k].window == q->window &&
           (uintptr_t)q[k].from - (uintptr_t)q[k - 1].from == step && q[k].at - q[k - 1].at == pitch &&
           (size_t)k * step + (q->parts ? whole : q->bytes) <= from && (size_t)k * pitch + whole <= to)
        k++;
    return k;
}
/* Enqueues what is to be sent, rank by rank: few large copies after one another fill the links, which many small ones
   do not, nor copies to several ranks at a time. All begin with another one. */
static cudaError_t gmm__peers_flush(gmm__peers *p) {
    const int32_t size = p->config.size, rank = p->config.rank;
    cudaError_t e = cudaSuccess;
    int32_t i, k, n, forked = 0;
    for (i = 0; i < size && e == cudaSuccess; i++)
        for (k = 0; k < p->pushes && e == cudaSuccess; k += n) {
            const gmm__peers_push *q = &p->push[k];
            const int32_t peer = (rank + i) % size;
            const char *from = q->from + (q->parts ? (size_t)peer * q->bytes : 0);
            char *to = q->window->base[peer] + q->at + (size_t)rank * q->bytes;
            n = i == 0 ? 1 : gmm__peers_run(p, q, p->pushes - k);
            if (i == 0 && (q->parts || to == from)) continue;
            if (i == 0 && !forked) {
                e = cudaEventRecord(p->fork, p->stream);
                if (e == cudaSuccess) e = cudaStreamWaitEvent(p->side, p->fork, 0);
                forked = 1;
            }
            if (e != cudaSuccess) break;
            e = n == 1 ? cudaMemcpyAsync(to, from, q->bytes, cudaMemcpyDeviceToDevice, i == 0 ? p->side : p->stream)
                       : cudaMemcpy2DAsync(to, q[1].at - q->at, from, (size_t)(q[1].from - q->from), q->bytes,
                                           (size_t)n, cudaMemcpyDeviceToDevice, p->stream);
        }
    p->pushes = 0;
    if (e == cudaSuccess && forked) e = cudaEventRecord(p->join, p->side);
    if (e == cudaSuccess && forked) e = cudaStreamWaitEvent(p->stream, p->join, 0);
    return e;
}
static gmm_status gmm__peers_finish(gmm__peers *p) {
    enum cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    gmm_status s;
    if (!p->begun) return GMM_OK;
    p->begun = 0;
    s = gmm__peers_cuda(p, "peer copies", gmm__peers_flush(p));
    if (!s) s = gmm__peers_meet(p, GMM__PEERS_DONE, p->stream);
    if (!s) s = gmm__peers_cuda(p, "peer copies", cudaStreamIsCapturing(p->stream, &status));
    if (!s && status == cudaStreamCaptureStatusNone)
        s = gmm__peers_cuda(p, "peer copies", cudaEventRecord(p->last, p->stream));
    return s;
}

/* A call: begins the operation, and ends it where no group is open. */
typedef gmm_status gmm__peers_part(gmm__peers *p, const void *send, void *recv, size_t size, gmm_dtype dtype,
                                   gmm_stream stream);
static gmm_status gmm__peers_call(void *self, gmm__peers_part *part, const void *send, void *recv, size_t size,
                                  gmm_dtype dtype, gmm_stream stream) {
    gmm__peers *p = (gmm__peers *)self;
    int current;
    gmm_status s = gmm__wire_poll(&p->wire, NULL);
    if (s) return s;
    if (gmm__cuda_enter(p->wire.ctx, &current) != cudaSuccess) return GMM_E_CUDA;
    s = gmm__peers_start(p, stream);
    if (!s) s = part(p, send, recv, size, dtype, stream);
    if (!s && !p->wire.open) s = gmm__peers_finish(p);
    return gmm__cuda_leave(p->wire.ctx, "peers", current, cudaSuccess), s;
}

/* The same place in the windows of all ranks; window NULL: in none. */
typedef struct gmm__peers_place {
    const gmm__peers_window *window;
    size_t at;
} gmm__peers_place;
static gmm__peers_place gmm__peers_find(const gmm__peers *p, const void *memory, size_t bytes) {
    gmm__peers_place place = {NULL, 0};
    int i;
    for (i = 0; i < GMM__PEERS_WINDOWS && !place.window; i++) {
        const gmm__peers_window *w = &p->windows[i];
        const uintptr_t base = (uintptr_t)w->base[p->config.rank], at = (uintptr_t)memory;
        if (!w->bytes || at < base || at - base > w->bytes || bytes > w->bytes - (at - base)) continue;
        place.window = w;
        place.at = at - base;
    }
    return place;
}

/* Sends `bytes` of send to every rank r, at recv's own place there: all of it, to itself too; or its part r, to the
   others. */
static gmm_status gmm__peers_send(gmm__peers *p, const char *call, const void *send, void *recv, size_t bytes,
                                  int parts) {
    const gmm__peers_place to = gmm__peers_find(p, recv, bytes * (size_t)p->config.size);
    gmm__peers_push *q;
    if (!to.window) return gmm__wire_fail(&p->wire, call, "recv lies in no window");
    if (bytes == 0) return GMM_OK;
    if (p->pushes == GMM__PEERS_PUSHES) {
        const gmm_status s = gmm__peers_cuda(p, call, gmm__peers_flush(p));
        if (s) return s;
    }
    q = &p->push[p->pushes++];
    q->from = (const char *)send;
    q->window = to.window;
    q->at = to.at;
    q->bytes = bytes;
    q->parts = parts;
    return GMM_OK;
}
static gmm_status gmm__peers_gather_part(gmm__peers *p, const void *send, void *recv, size_t bytes, gmm_dtype dtype,
                                         gmm_stream stream) {
    (void)dtype, (void)stream;
    return gmm__peers_send(p, "all_gather", send, recv, bytes, 0);
}
static gmm_status gmm__peers_exchange_part(gmm__peers *p, const void *send, void *recv, size_t bytes, gmm_dtype dtype,
                                           gmm_stream stream) {
    (void)dtype, (void)stream;
    return gmm__peers_send(p, "all_to_all", send, recv, bytes, 1);
}
/* The sum over what the peers send, read from their windows. */
static gmm_status gmm__peers_scatter_part(gmm__peers *p, const void *send, void *recv, size_t count, gmm_dtype dtype,
                                          gmm_stream stream) {
    const size_t bytes = count * (size_t)(gmm_dtype_bits(dtype) / 8);
    const gmm__peers_place from = gmm__peers_find(p, send, bytes * (size_t)p->config.size);
    void *addends[GMM__PEERS_MOST];
    gmm_accumulation d;
    gmm_mat x, y;
    int32_t i;
    if (!from.window) return gmm__wire_fail(&p->wire, "reduce_scatter", "send lies in no window");
    if (count == 0) return GMM_OK;
    for (i = 0; i < p->config.size; i++)
        addends[i] = from.window->base[i] + from.at + (size_t)p->config.rank * bytes;
    memset(&d, 0, sizeof d);
    d.count = p->config.size;
    for (d.cols = 1; d.cols < 4096 && count % (size_t)(2 * d.cols) == 0; d.cols *= 2) { }
    d.rows = (int64_t)count / d.cols;
    d.scale = 1.0f;
    x = gmm_mat_table(dtype, addends, (uint32_t)GMM_MAT_TABLE_ON_HOST);
    y = gmm_mat_packed(dtype, recv);
    d.x = &x;
    d.y = &y;
    return gmm_accumulate(p->wire.ctx, &d, NULL, 0, stream)
               ? gmm__wire_fail(&p->wire, "reduce_scatter", gmm_last_error(p->wire.ctx)) : GMM_OK;
}
/* values = the largest of each and what lies in the box. */
static __global__ void gmm_peers_max(float *values, const float *box, int size, int rank, int count) {
    const int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    int r;
    float most;
    if (i >= count) return;
    most = values[i];
    for (r = 0; r < size; r++) {
        const float v = r == rank ? most : box[(size_t)r * GMM__PEERS_BOX + i];
        most = v > most || v != v ? v : most;
    }
    values[i] = most;
}
static gmm_status gmm__peers_max_part(gmm__peers *p, const void *send, void *recv, size_t count, gmm_dtype dtype,
                                      gmm_stream stream) {
    const int32_t size = p->config.size, rank = p->config.rank;
    float *values = (float *)recv;
    cudaError_t e = cudaSuccess;
    gmm_status s = GMM_OK;
    size_t at;
    int32_t i;
    (void)send, (void)dtype;
    for (at = 0; at < count && !s; at += GMM__PEERS_BOX) {
        const int n = count - at < GMM__PEERS_BOX ? (int)(count - at) : (int)GMM__PEERS_BOX;
        if (at > 0) s = gmm__peers_start(p, stream);
        for (i = 1; i < size && e == cudaSuccess; i++)
            e = cudaMemcpyAsync(gmm__peers_box(p, (rank + i) % size, rank), values + at, (size_t)n * sizeof *values,
                                cudaMemcpyDeviceToDevice, stream);
        if (!s) s = gmm__peers_cuda(p, "all_reduce_max", e);
        if (!s) s = gmm__peers_finish(p); /* the box is full */
        if (s) break;
        gmm_peers_max<<<(n + 127) / 128, 128, 0, stream>>>(values + at, gmm__peers_box(p, rank, 0), size, rank, n);
        s = gmm__peers_cuda(p, "all_reduce_max", cudaGetLastError());
    }
    return s;
}

static gmm_status gmm__peers_gather(void *self, const void *send, void *recv, size_t bytes, gmm_stream stream) {
    return gmm__peers_call(self, gmm__peers_gather_part, send, recv, bytes, GMM_NONE, stream);
}
static gmm_status gmm__peers_exchange(void *self, const void *send, void *recv, size_t bytes, gmm_stream stream) {
    return gmm__peers_call(self, gmm__peers_exchange_part, send, recv, bytes, GMM_NONE, stream);
}
static gmm_status gmm__peers_scatter(void *self, const void *send, void *recv, size_t count, gmm_dtype dtype,
                                     gmm_stream stream) {
    return gmm__peers_call(self, gmm__peers_scatter_part, send, recv, count, dtype, stream);
}
static gmm_status gmm__peers_max(void *self, float *values, size_t count, gmm_stream stream) {
    return count ? gmm__peers_call(self, gmm__peers_max_part, NULL, values, count, GMM_F32, stream) : GMM_OK;
}
static gmm_status gmm__peers_begin(void *self, const char *what) {
    gmm__peers *p = (gmm__peers *)self;
    p->wire.what = what;
    p->wire.open = 1;
    return gmm__wire_poll(&p->wire, NULL);
}
static gmm_status gmm__peers_end(void *self) {
    gmm__peers *p = (gmm__peers *)self;
    int current;
    gmm_status s = gmm__wire_poll(&p->wire, NULL);
    p->wire.open = 0;
    if (s) return s;
    if (gmm__cuda_enter(p->wire.ctx, &current) != cudaSuccess) return GMM_E_CUDA;
    s = gmm__peers_finish(p);
    return gmm__cuda_leave(p->wire.ctx, "peers", current, cudaSuccess), s;
}

/* Looks for who is gone or missing without a wait that could itself go on for ever. */
static gmm_status gmm__peers_poll(void *self, gmm_error *error) {
    gmm__peers *p = (gmm__peers *)self;
    gmm_status s = gmm__wire_poll(&p->wire, error);
    const double begin = gmm__gtp_now();
    const int32_t size = p->config.size, rank = p->config.rank;
    int32_t i, missing = -1, gone = -1, current, n = 0;
    char text[96];
    cudaError_t e;
    if (s || size == 1 || gmm__cuda_enter(p->wire.ctx, &current) != cudaSuccess) return s;
    e = cudaMemcpyAsync(p->seen, gmm__peers_word(p, rank, GMM__PEERS_CAME, 0),
                        (size_t)(GMM__PEERS_WORDS * size) * sizeof *p->seen, cudaMemcpyDeviceToHost, p->aid);
    if (e == cudaSuccess)
        while ((e = cudaStreamQuery(p->aid)) == cudaErrorNotReady && gmm__gtp_now() - begin < 0.1) { }
    for (i = 0; i < size && e == cudaSuccess; i++) {
        if (i != rank && p->seen[GMM__PEERS_GONE * size + i]) gone = i;
        if (i != rank && !p->seen[GMM__PEERS_CAME * size + i]) missing = i, n++;
    }
    if (gone >= 0) {
        (void)snprintf(text, sizeof text, "rank %d of %d has given up: what came since is void", gone, size);
        s = gmm__wire_fail(&p->wire, "peer copies", text);
        p->told = 1;
        (void)gmm__wire_poll(&p->wire, error);
    } else if (n == 1 && error && cudaEventQuery(p->last) == cudaErrorNotReady) /* for whoever finds it too long */
        (void)snprintf(error->text, sizeof error->text, "rank %d of %d has not joined", missing, size);
    (void)cudaGetLastError();
    return gmm__cuda_leave(p->wire.ctx, "peers", current, cudaSuccess), s;
}
/* Lets go the streams that wait for a peer, and those that come to such a wait within a while. */
static __global__ void gmm_peers_release(volatile uint32_t *words, int count, unsigned long long nanoseconds) {
    unsigned long long begin, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
    do {
        if ((int)threadIdx.x < count) words[threadIdx.x] = 1;
        __nanosleep(1000);
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    } while (now - begin < nanoseconds);
}
static void gmm__peers_give_up(void *self, const char *why) {
    gmm__peers *p = (gmm__peers *)self;
    CUstreamBatchMemOpParams op[GMM__PEERS_MOST];
    const int32_t size = p->config.size, rank = p->config.rank;
    int32_t i;
    int current;
    if (p->wire.given_up) return;
    p->wire.given_up = 1;
    (void)gmm__wire_fail(&p->wire, "given up", why);
    if (gmm__cuda_enter(p->wire.ctx, &current) != cudaSuccess) return;
    memset(op, 0, sizeof op);
    for (i = 0; i < size; i++) { /* its own word comes last, behind the fence of that write */
        uint32_t *word = gmm__peers_word(p, (rank + 1 + i) % size, GMM__PEERS_GONE, rank);
        op[i].writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_32;
        op[i].writeValue.address = (CUdeviceptr)(uintptr_t)word;
        op[i].writeValue.value = 1;
        op[i].writeValue.flags = CU_STREAM_WRITE_VALUE_DEFAULT;
    }
    if (!p->told) (void)p->batch(p->aid, (unsigned)size, op, 0);
    gmm_peers_release<<<1, GMM__PEERS_GONE * GMM__PEERS_MOST, 0, p->aid>>>(
        gmm__peers_word(p, rank, GMM__PEERS_CAME, 0), GMM__PEERS_GONE * size, 3000000000ull);
    (void)cudaGetLastError();
    (void)gmm__cuda_leave(p->wire.ctx, "peers", current, cudaSuccess);
}

/* Lets the peers have a window, and gets theirs. */
static void gmm__peers_shut(gmm__peers *p, gmm__peers_window *w) {
    int32_t i;
    for (i = 0; i < p->config.size; i++)
        if (w->opened[i]) (void)cudaIpcCloseMemHandle(w->opened[i]);
    memset(w, 0, sizeof *w);
}
/* Whether all ranks are well so far: what fails on one fails on all. */
static gmm_status gmm__peers_agree(gmm__peers *p, const char *call, const char *bad) {
    char mine = bad != NULL, all[GMM__PEERS_MOST], text[64];
    int32_t i;
    if (p->config.exchange(p->config.user, &mine, all, 1) != GMM_OK)
        return gmm__wire_fail(&p->wire, call, bad ? bad : "the exchange failed");
    if (bad) return gmm__wire_fail(&p->wire, call, bad);
    for (i = 0; i < p->config.size && !all[i]; i++) { }
    if (i == p->config.size) return GMM_OK;
    (void)snprintf(text, sizeof text, "it failed on rank %d of %d", i, p->config.size);
    return gmm__wire_fail(&p->wire, call, text);
}
/* `bad`: why this rank has none; w may be NULL then. */
static gmm_status gmm__peers_share(gmm__peers *p, gmm__peers_window *w, void *base, size_t bytes, const char *bad) {
    static const char call[] = "window";
    gmm__peers_offer mine, all[GMM__PEERS_MOST];
    cudaError_t e = cudaSuccess;
    gmm_status s;
    int32_t i;
    memset(&mine, 0, sizeof mine);
    mine.base = (char *)base;
    mine.bytes = bytes;
    mine.device = p->wire.ctx->config.device;
    if (p->config.processes && !bad) {
        CUdeviceptr start = 0;
        e = cudaIpcGetMemHandle(&mine.handle, base);
        if (e == cudaSuccess && p->range(&start, NULL, (CUdeviceptr)(uintptr_t)base) != CUDA_SUCCESS)
            e = cudaErrorInvalidValue;
        mine.offset = (uintptr_t)base - (uintptr_t)start;
        if (e != cudaSuccess) bad = cudaGetErrorString(e);
    }
    s = gmm__peers_agree(p, call, bad);
    if (!s && p->config.exchange(p->config.user, &mine, all, sizeof mine) != GMM_OK)
        s = gmm__wire_fail(&p->wire, call, "the exchange failed");
    if (s) return s;
    for (i = 0; i < p->config.size && !bad; i++) {
        if (all[i].bytes != bytes) bad = "that of a peer has another size";
        else w->base[i] = all[i].base;
        if (bad || i == p->config.rank) continue;
        if (p->config.processes) {
            e = cudaIpcOpenMemHandle(&w->opened[i], all[i].handle, cudaIpcMemLazyEnablePeerAccess);
            if (e == cudaSuccess) w->base[i] = (char *)w->opened[i] + all[i].offset;
        } else if (all[i].device != mine.device) {
            e = cudaDeviceEnablePeerAccess(all[i].device, 0);
            if (e == cudaErrorPeerAccessAlreadyEnabled) e = cudaSuccess;
            (void)cudaGetLastError();
        }
        if (e != cudaSuccess) bad = cudaGetErrorString(e);
    }
    w->bytes = bytes;
    s = gmm__peers_agree(p, call, bad);
    if (!s) return GMM_OK;
    gmm__peers_shut(p, w);
    (void)cudaGetLastError();
    (void)gmm__peers_agree(p, call, NULL); /* nobody has it open any more: it may be freed */
    return s;
}
static gmm_status gmm__peers_window_add(void *self, void *base, size_t bytes, void **window) {
    gmm__peers *p = (gmm__peers *)self;
    gmm__peers_window *w = NULL;
    const char *bad = gmm__wire_poll(&p->wire, NULL) != GMM_OK ? "the communicator has failed" : NULL;
    int i, current = 0;
    const int entered = gmm__cuda_enter(p->wire.ctx, &current) == cudaSuccess;
    gmm_status s;
    *window = NULL;
    for (i = 0; i < GMM__PEERS_WINDOWS && !w; i++)
        if (!p->windows[i].bytes) w = &p->windows[i];
    if (!bad && !entered) bad = gmm_last_error(p->wire.ctx);
    if (!bad && !w) bad = "there are 16 already";
    s = gmm__peers_share(p, w, base, bytes, bad);
    if (!s) *window = w;
    if (entered) (void)gmm__cuda_leave(p->wire.ctx, "window", current, cudaSuccess);
    return s;
}
static gmm_status gmm__peers_window_remove(void *self, void *window) {
    gmm__peers *p = (gmm__peers *)self;
    char mine = 0, all[GMM__PEERS_MOST];
    int current;
    const int entered = gmm__cuda_enter(p->wire.ctx, &current) == cudaSuccess;
    if (entered) gmm__peers_shut(p, (gmm__peers_window *)window);
    if (entered) (void)gmm__cuda_leave(p->wire.ctx, "window", current, cudaSuccess);
    if (p->config.exchange(p->config.user, &mine, all, 1) != GMM_OK) /* the owner may free it now */
        return gmm__wire_fail(&p->wire, "window", "the exchange failed");
    return entered ? GMM_OK : GMM_E_CUDA;
}

static void gmm__peers_free(gmm__peers *p) {
    int current, i;
    if (gmm__cuda_enter(p->wire.ctx, &current) == cudaSuccess) {
        char *own = p->own.base[p->config.rank];
        for (i = 0; i < GMM__PEERS_WINDOWS; i++) gmm__peers_shut(p, &p->windows[i]);
        gmm__peers_shut(p, &p->own);
        if (own) (void)cudaFree(own);
        if (p->side) (void)cudaStreamDestroy(p->side);
        if (p->join) (void)cudaEventDestroy(p->join);
        if (p->aid) (void)cudaStreamDestroy(p->aid);
        if (p->seen) (void)cudaFreeHost(p->seen);
        if (p->fork) (void)cudaEventDestroy(p->fork);
        if (p->last) (void)cudaEventDestroy(p->last);
        (void)cudaGetLastError();
        (void)gmm__cuda_leave(p->wire.ctx, "peers", current, cudaSuccess);
    }
    gmm__wire_free(p->wire.ctx, p);
}

/* Tells the others, who may have begun to wait, that this rank has failed before it came to them. */
static gmm_status gmm__peers_refuse(const gmm_peers_config *c, gmm_status status) {
    char mine = 1, all[GMM__PEERS_MOST];
    if (c->exchange && c->size >= 1 && c->size <= GMM__PEERS_MOST && c->rank >= 0 && c->rank < c->size)
        (void)c->exchange(c->user, &mine, all, 1);
    return status;
}
GMMDEF gmm_status gmm_peers_open(const gmm_peers_config *config, gmm_comm *out, gmm_error *error) {
    static const char fn[] = "gmm_peers_open";
    enum cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
    gmm_peers_config c;
    gmm__peers *p;
    void *batch = NULL, *range = NULL, *own = NULL, *seen = NULL;
    size_t bytes;
    int current, low = 0, high = 0;
    cudaError_t e;
    gmm_status s;
    if (!out) return gmm__fail(error, GMM_E_NULL, "%s: out is NULL", fn);
    memset(out, 0, sizeof *out);
    if ((s = gmm__gtp_open(fn, "config", config, &c, sizeof c, error)) != GMM_OK) return s;
    if (!c.ctx || !c.exchange)
        return gmm__peers_refuse(&c, gmm__fail(error, GMM_E_NULL, "%s: config->%s is NULL", fn,
                                               c.ctx ? "exchange" : "ctx"));
    if (c.size < 1 || c.size > GMM__PEERS_MOST || c.rank < 0 || c.rank >= c.size || c.processes < 0 ||
        c.processes > 1 || c.ctx->config.space != GMM_SPACE_CUDA)
        return gmm__peers_refuse(&c, gmm__fail(
            error, GMM_E_ARG, "%s: rank %d of %d, processes %d, ctx on %s: must be a rank of 1 to %d, 0 or 1, and on a "
            "GPU", fn, c.rank, c.size, c.processes,
            c.ctx->config.space == GMM_SPACE_CUDA ? "a GPU" : "the CPU", (int)GMM__PEERS_MOST));
    p = (gmm__peers *)gmm__wire_alloc(c.ctx, sizeof *p);
    if (!p) return gmm__peers_refuse(&c, gmm__fail(error, GMM_E_MEMORY, "%s: no memory", fn));
    p->wire.ctx = c.ctx;
    p->config = c;
    e = gmm__cuda_enter(c.ctx, &current);
    if (e != cudaSuccess) {
        gmm__wire_free(c.ctx, p);
        return gmm__peers_refuse(&c, gmm__fail(error, GMM_E_CUDA, "%s: %s", fn, cudaGetErrorString(e)));
    }
    e = cudaGetDriverEntryPointByVersion("cuStreamBatchMemOp", &batch, 11070, cudaEnableDefault, &found);
    p->batch = (PFN_cuStreamBatchMemOp_v11070)batch;
    if (e == cudaSuccess && (found != cudaDriverEntryPointSuccess || !batch)) e = cudaErrorNotSupported;
    if (e == cudaSuccess)
        e = cudaGetDriverEntryPointByVersion("cuMemGetAddressRange", &range, 3020, cudaEnableDefault, &found);
    p->range = (PFN_cuMemGetAddressRange_v3020)range;
    if (e == cudaSuccess && (found != cudaDriverEntryPointSuccess || !range)) e = cudaErrorNotSupported;
    if (e == cudaSuccess) e = cudaStreamCreateWithFlags(&p->side, cudaStreamNonBlocking);
    if (e == cudaSuccess) e = cudaDeviceGetStreamPriorityRange(&low, &high);
    if (e == cudaSuccess) e = cudaStreamCreateWithPriority(&p->aid, cudaStreamNonBlocking, (low + high) / 2);
    if (e == cudaSuccess) e = cudaEventCreateWithFlags(&p->fork, cudaEventDisableTiming);
    if (e == cudaSuccess) e = cudaEventCreateWithFlags(&p->join, cudaEventDisableTiming);
    if (e == cudaSuccess) e = cudaEventCreateWithFlags(&p->last, cudaEventDisableTiming);
    bytes = gmm__peers_bytes(c.size);
    if (bytes < GMM__PEERS_BLOCK) bytes = GMM__PEERS_BLOCK;
    if (e == cudaSuccess) e = cudaMallocHost(&seen, GMM__PEERS_WORDS * GMM__PEERS_MOST * sizeof *p->seen);
    if (e == cudaSuccess) e = cudaMalloc(&own, bytes);
    if (e == cudaSuccess) e = cudaMemset(own, 0, bytes);
    p->seen = (uint32_t *)seen;
    if (e == cudaSuccess) { /* loaded now: that may wait for the device, which then waits for a peer */
        gmm_peers_release<<<1, GMM__PEERS_GONE * GMM__PEERS_MOST, 0, p->aid>>>((uint32_t *)own, 0, 0);
        gmm_peers_max<<<1, 1, 0, p->aid>>>((float *)own, (const float *)own, 0, 0, 0);
        e = cudaGetLastError();
    }
    if (e == cudaSuccess) e = cudaDeviceSynchronize(); /* before a peer writes there */
    s = gmm__peers_share(p, &p->own, own, bytes, e != cudaSuccess ? cudaGetErrorString(e) : NULL);
    (void)gmm__cuda_leave(c.ctx, fn, current, cudaSuccess);
    if (e != cudaSuccess || s) {
        s = e != cudaSuccess ? gmm__fail(error, GMM_E_CUDA, "%s: %s", fn, cudaGetErrorString(e))
                             : gmm__fail(error, s, "%s: %.400s", fn, p->wire.error.text);
        p->own.base[c.rank] = (char *)own;
        gmm__peers_free(p);
        return s;
    }
    out->rank = c.rank;
    out->size = c.size;
    out->exchanges = 1;
    out->self = p;
    out->group_begin = gmm__peers_begin;
    out->group_end = gmm__peers_end;
    out->all_gather = gmm__peers_gather;
    out->reduce_scatter = gmm__peers_scatter;
    out->all_to_all = gmm__peers_exchange;
    out->all_reduce_max = gmm__peers_max;
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

/* ....................................................................................... Runtime: what it holds ... */

/* A point on a stream that others wait for. In a capture it is an event inside of the graph for the graph itself, and a
   node that records one outside for everybody else. */
typedef struct gmm__mark {
    gmm_event inside, outside;
    int32_t graph; /* in which it was recorded, counted from 1; 0 = in none */
    int32_t set;
    int32_t waited;             /* `waiter` has waited since: once is enough */
    gmm_stream recorder, waiter;
} gmm__mark;

/* A collective that gmm_gtp_poll looks after. Those of a stream stand in a ring, in which the oldest that is not done
   is the one that may hang; what does not fit while so many are under way is not looked after. */
enum { GMM__WATCHES = 256, GMM__GTP_PARTS = 256 }; /* parts: ranks that exchange */
typedef struct gmm__watch {
    gmm_event begin;
    gmm_event end;      /* NULL = nothing to look after */
    int32_t seen;       /* it has been seen to have begun, */
    double since;       /* at this time */
    const gmm_comm *comm; /* NULL: a graph */
    const char *what, *name;
    int32_t replayed;   /* of a graph: behind post_replay, on this stream */
    gmm_stream stream;
} gmm__watch;

/* How the shards of one buffer become its gathered form: sent bytes one behind the other are it already, or they are
   staged, and every rank's columns are put side by side, as far as the whole reaches. */
typedef struct gmm__route {
    size_t send, whole;          /* bytes of a rank (0 = not sent), of the gathered buffer */
    size_t at, stage;            /* offsets in the slot, in the stage; of a transposed weight's rowwise copy, too */
    size_t even;                 /* bytes that an operation expects from matrix to matrix */
    int32_t staged, reserved;
    size_t width, limit, height, src_pitch, dst_pitch; /* limit: bytes of a row that ranks fill */
} gmm__route;

enum { GMM__GTP_ROW, GMM__GTP_COL, GMM__GTP_REC, GMM__GTP_CLASSES }; /* what slots hold; REC: rowwise, of recompute */
enum { GMM__GTP_DATA, GMM__GTP_SCALE };

typedef struct gmm__gtp_weight {
    gmm_gtp_weight desc;
    gmm_shard shard;
    gmm_shard_plan plan;
    gmm_format format;           /* dtype NONE = none */
    gmm__route route[2][2];      /* [direction][DATA, SCALE] */
    int64_t ld[2];               /* of a gathered copy; 0 = the default */
    int32_t bundle;              /* -1 = none yet */
    int32_t transposed;          /* the columnwise copy is made of the rowwise one */
    size_t grad_at;              /* offset in the gradient buffer */
} gmm__gtp_weight;

typedef struct gmm__gtp_slot {
    char *base;
    size_t at, bytes;            /* in the domain's block */
    int32_t domain, kind, captured;
    int32_t bundle;              /* whose content; -1 = none */
    int32_t graph;               /* that gathered it; 0 = none, eager */
    int32_t pending;             /* wanted by a prefetch, not yet acquired: 1 = gathered for it, 2 = was there */
    uint32_t holders;            /* a bit per pass */
    int32_t read;                /* since it was gathered, */
    gmm_stream reader;           /* last on this stream */
    int64_t version;
    gmm__mark ready, last_use;
} gmm__gtp_slot;

typedef struct gmm__wgrad_slot {
    char *base;
    size_t at, bytes;
    int32_t domain, captured, writer; /* writer: bundle that has it; -1 = none */
    gmm__mark last_use;
} gmm__wgrad_slot;

typedef struct gmm__gtp_bundle {
    const char *name;
    int32_t domain, first, count;  /* members[first .. first + count) */
    int32_t uniform, trainable, captured;
    int32_t asked;                 /* its owner has been asked to publish for the coming forward */
    int32_t slot[GMM_GTP_PASSES];  /* -1 = in place, or none */
    int32_t chain[GMM_GTP_PASSES], place[GMM_GTP_PASSES]; /* -1 = none */
    int32_t wslot;
    uint32_t held;                 /* a bit per pass */
    int64_t version;
    gmm_mat columnwise;            /* what views of backward point to */
    size_t amax_at[2];             /* NV16: offset in a slot, by direction */
    size_t slot_bytes[GMM__GTP_CLASSES], grad_bytes;
    gmm__mark published, done, in_place; /* in_place: the last release of unsharded weights */
    gmm_stream reader;
} gmm__gtp_bundle;

typedef struct gmm__gtp_chain {
    gmm_gtp_pass pass;
    int32_t first, count, prefetch, held, captured, next;
} gmm__gtp_chain;

typedef struct gmm__gtp_domain {
    gmm_gtp_domain desc;
    gmm_comm gather, reduce;     /* size 1: no function is called */
    int32_t size, rank, bound;
    int32_t joined[2];           /* the capture that the streams have joined, counted from 1 */
    int32_t used[2];             /* a fence has something to wait for */
    size_t gather_bytes, reduce_bytes, recv_at, work_at, work_bytes;
    size_t stage_at[2], stage_bytes[2]; /* outside of graphs, and in them: gathers follow one another there */
    gmm__mark staged[2];
    size_t amax_at, cast_at, cast_bytes; /* of gmm_gtp_quantize: amaxes of the domain's weights, workspace */
    gmm__mark cast;
    char *gather_base, *reduce_base;
    void *window[2];
    gmm_event fork[2], join[2];
    gmm__watch watch[2][GMM__WATCHES];
    gmm_event watch_end[2][GMM__WATCHES];
    uint32_t oldest[2], next[2]; /* of the rings, counted on */
} gmm__gtp_domain;

enum { GMM__GRAPH_NEEDS = 1, GMM__GRAPH_READS = 2, GMM__GRAPH_ADDS = 4 }; /* what a graph does with a bundle */

struct gmm_gtp {
    gmm_gtp_config config;
    gmm_runtime rt;
    gmm_error error;
    gmm_status broken;
    const char *calls;           /* the collective that is being called, by rank caller[0] of caller[1]; NULL = none */
    int32_t caller[2];
    int32_t sealed, live, ended, calling_back, dry; /* live: all memory is bound */
    int32_t domain_count, weight_count, bundle_count, chain_count, graph_count, member_count, link_count;
    int32_t slot_count, wslot_count;
    int32_t graph;               /* the capture under way, counted from 1; 0 = none */
    gmm_stream graph_stream;
    gmm_event graph_begin;
    gmm__gtp_domain *domains;
    gmm__gtp_weight *weights;
    gmm__gtp_bundle *bundles;
    gmm__gtp_chain *chains;
    gmm__gtp_slot *slots;        /* [3 bundles] */
    gmm__wgrad_slot *wslots;     /* [bundles] */
    gmm__watch *graph_watch;     /* [graphs] */
    gmm_event *graph_end;        /* [graphs] */
    int32_t *members, *links;    /* [weights], [3 bundles] */
    void **table[GMM_GTP_PASSES], **scales[GMM_GTP_PASSES], **grads; /* [weights] in the order of members */
    unsigned char *graph_use;    /* [graphs][bundles] */
    gmm_gtp_statistics stats;
};


/* ........................................................................................ Runtime: declarations ... */

/* Carves the object: addresses are set where base is not NULL. */
static size_t gmm__gtp_carve(gmm_gtp *g, char *base, const gmm_gtp_config *c) {
    size_t at = (sizeof *g + 15) / 16 * 16;
    const size_t domains = (size_t)c->domains, weights = (size_t)c->weights, bundles = (size_t)c->bundles;
    const size_t graphs = (size_t)c->graphs;
    int i;
#define GMM__CARVE(field, type, count) do { \
        if (base) g->field = (type *)(void *)(base + at); \
        at += ((count) * sizeof(type) + 15) / 16 * 16; } while (0)
    GMM__CARVE(domains, gmm__gtp_domain, domains);
    GMM__CARVE(weights, gmm__gtp_weight, weights);
    GMM__CARVE(bundles, gmm__gtp_bundle, bundles);
    GMM__CARVE(chains, gmm__gtp_chain, (size_t)c->chains);
    GMM__CARVE(slots, gmm__gtp_slot, 3 * bundles);
    GMM__CARVE(wslots, gmm__wgrad_slot, bundles);
    GMM__CARVE(graph_watch, gmm__watch, graphs);
    GMM__CARVE(graph_end, gmm_event, graphs);
    GMM__CARVE(members, int32_t, weights);
    GMM__CARVE(links, int32_t, 3 * bundles);
    for (i = 0; i < GMM_GTP_PASSES; i++) {
        GMM__CARVE(table[i], void *, weights);
        GMM__CARVE(scales[i], void *, weights);
    }
    GMM__CARVE(grads, void *, weights);
    GMM__CARVE(graph_use, unsigned char, graphs * bundles);
#undef GMM__CARVE
    return at;
}

static gmm_status gmm__gtp_config(const char *fn, const gmm_gtp_config *config, gmm_gtp_config *c, gmm_error *error) {
    const int32_t most = 1 << 20;
    gmm_status s = gmm__gtp_open(fn, "config", config, c, sizeof *c, error);
    if (s) return s;
    if (c->domains == 0) c->domains = 1;
    if (c->timeout_ms == 0) c->timeout_ms = 10000;
    if (c->domains < 0 || c->weights < 0 || c->bundles < 0 || c->chains < 0 || c->graphs < 0 || c->domains > most ||
        c->weights > most || c->bundles > most || c->chains > most || c->graphs > 4096)
        return gmm__fail(error, GMM_E_ARG, "%s: %d domains, %d weights, %d bundles, %d chains, %d graphs: must be 0 to "
                         "%d, at most 4096 graphs", fn, c->domains, c->weights, c->bundles,
                         c->chains, c->graphs, (int)most);
    if (c->timeout_ms < 0) return gmm__fail(error, GMM_E_ARG, "%s: timeout_ms is %d: must be >= 0", fn,
                                            c->timeout_ms);
    return GMM_OK;
}

GMMDEF gmm_status gmm_gtp_query(const gmm_gtp_config *config, size_t *bytes, gmm_error *error) {
    gmm_gtp_config c;
    gmm_status s;
    if (!bytes) return gmm__fail(error, GMM_E_NULL, "gmm_gtp_query: bytes is NULL");
    s = gmm__gtp_config("gmm_gtp_query", config, &c, error);
    if (!s) *bytes = gmm__gtp_carve(NULL, NULL, &c);
    return s;
}

/* Whether a runtime has the functions that are called here: streams are the caller's, and the host never waits. */
static int gmm__gtp_runtime_whole(const gmm_runtime *r) {
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
    if ((s = gmm__gtp_config(fn, config, &c, error)) != GMM_OK) return s;
    if (!memory || !c.ctx) return gmm__fail(error, GMM_E_NULL, "%s: %s is NULL", fn, memory ? "config->ctx" : "memory");
    if ((uintptr_t)memory % 16 != 0)
        return gmm__fail(error, GMM_E_ALIGN, "%s: memory at %p must be aligned to 16 bytes", fn, memory);
    need = gmm__gtp_carve(NULL, NULL, &c);
    if (bytes < need)
        return gmm__fail(error, GMM_E_WORKSPACE, "%s: %llu bytes of memory: gmm_gtp_query asks for %llu", fn,
                         (unsigned long long)bytes, (unsigned long long)need);
    memset(memory, 0, need);
    g->config = c;
    (void)gmm__gtp_carve(g, (char *)memory, &c);
    if (c.runtime) {
        s = gmm__gtp_open(fn, "config->runtime", c.runtime, &g->rt, sizeof g->rt, error);
        if (s) return s;
    } else if ((s = gmm_runtime_of(c.ctx, &g->rt)) != GMM_OK) {
        return gmm__fail(error, s, "%s: %.400s", fn, gmm_last_error(c.ctx));
    }
    if (!gmm__gtp_runtime_whole(&g->rt))
        return gmm__fail(error, GMM_E_NULL, "%s: config->runtime lacks a function: all but stream_create, "
                         "stream_destroy, stream_sync and event_sync are needed", fn);
    *out = g;
    return GMM_OK;
}

GMMDEF const char *gmm_gtp_last_error(const gmm_gtp *gtp) { return gtp ? gtp->error.text : ""; }

/* Opens a declaration: the object takes them until it is sealed. */
static gmm_status gmm__gtp_declare(gmm_gtp *g, const char *fn, const char *what, int32_t count, int32_t room,
                                   const void *id) {
    if (!g) return GMM_E_NULL;
    if (g->broken) return g->broken;
    if (!id) return gmm__fail(&g->error, GMM_E_NULL, "%s: id is NULL", fn);
    if (g->sealed) return gmm__fail(&g->error, GMM_E_STATE, "%s: the object is sealed", fn);
    if (count >= room)
        return gmm__fail(&g->error, GMM_E_WORKSPACE, "%s: config->%s is %d: no room for more", fn, what, room);
    return GMM_OK;
}

/* Whether a communicator has its functions. */
static int gmm__gtp_whole(const gmm_comm *c) {
    return c->group_begin && c->group_end && c->all_gather && c->reduce_scatter && c->all_to_all && c->all_reduce_max &&
           !c->window_add == !c->window_remove && c->poll && c->give_up;
}

GMMDEF gmm_status gmm_gtp_add_domain(gmm_gtp *gtp, const gmm_gtp_domain *domain, int32_t *id) {
    static const char fn[] = "gmm_gtp_add_domain";
    gmm__gtp_domain *d;
    gmm_gtp_domain desc;
    gmm_status s = gmm__gtp_declare(gtp, fn, "domains", gtp ? gtp->domain_count : 0, gtp ? gtp->config.domains : 0, id);
    if (!s) s = gmm__gtp_open(fn, "domain", domain, &desc, sizeof desc, &gtp->error);
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
        s = gmm__gtp_open(fn, "domain->gather", desc.gather, &d->gather, sizeof d->gather, &gtp->error);
        if (!s) s = gmm__gtp_open(fn, "domain->reduce", desc.reduce ? desc.reduce : desc.gather, &d->reduce,
                                  sizeof d->reduce, &gtp->error);
        if (s) return s;
        d->size = d->gather.size;
        d->rank = d->gather.rank;
        if (d->size < 1 || d->rank < 0 || d->rank >= d->size || d->reduce.size != d->size || d->reduce.rank != d->rank)
            return gmm__fail(&gtp->error, GMM_E_CONFIG, "%s: gather is rank %d of %d, reduce rank %d of %d: must be "
                             "the same rank of the same group", fn, d->rank, d->size, d->reduce.rank,
                             d->reduce.size);
        if (!gmm__gtp_whole(&d->gather) || !gmm__gtp_whole(&d->reduce))
            return gmm__fail(&gtp->error, GMM_E_NULL, "%s: domain->%s lacks a function; all but window_add and "
                             "window_remove are needed", fn, gmm__gtp_whole(&d->gather) ? "reduce" : "gather");
    } else if (desc.reduce)
        return gmm__fail(&gtp->error, GMM_E_NULL, "%s: domain->gather is NULL, reduce is not", fn);
    if (desc.reduction == GMM_GTP_REDUCE_AUTO)
        desc.reduction = d->size > GMM__GTP_PARTS || (!d->reduce.exchanges && (desc.wire == GMM_F32 || d->size <= 2))
                             ? GMM_GTP_REDUCE_SCATTER : GMM_GTP_REDUCE_EXCHANGE;
    if (desc.reduction == GMM_GTP_REDUCE_EXCHANGE && d->size > GMM__GTP_PARTS)
        return gmm__fail(&gtp->error, GMM_E_CONFIG, "%s: reduction by exchange among %d ranks: must be at most %d", fn,
                         d->size, (int)GMM__GTP_PARTS);
    d->desc = desc;
    *id = gtp->domain_count++;
    return GMM_OK;
}

/* Which extent of a scale array the rows of a matrix lie along (1: its rows, 0: its columns), and how many there are to
   one scale. */
static int gmm__gtp_scale_axis(gmm_scaling scaling, int direction, int64_t *per) {
    const int columnwise = direction == GMM_COLUMNWISE;
    switch (scaling) {
    case GMM_SCALING_1X128: *per = columnwise ? 128 : 1; return columnwise;
    case GMM_SCALING_MX32: *per = columnwise ? 32 : 1; return 1;
    case GMM_SCALING_NV16: *per = columnwise ? 16 : 1; return !columnwise;
    default: *per = 128; return !columnwise; /* 128X128 */
    }
}

/* How the data and scales of one direction travel. What is put together here gets the pitch that operations expect of
   the logical rows (scales) or take as ld (elements, padding included); what arrives in its final order keeps its
   padding behind it. */
static gmm_status gmm__gtp_routes(const gmm_shard *s, const gmm_shard_plan *p, int direction, gmm__gtp_weight *w,
                                  gmm_error *error) {
    gmm__route *data = &w->route[direction][GMM__GTP_DATA], *scale = &w->route[direction][GMM__GTP_SCALE];
    gmm_layout part = GMM_ZERO, whole = GMM_ZERO, logical = GMM_ZERO;
    const size_t bits = (size_t)gmm_dtype_bits(s->dtype);
    const int sent = p->shard_data_bytes[direction] > 0;
    gmm_status status = gmm_layout_of(s->dtype, s->scaling, GMM_SCALES_COMPACT, (gmm_direction)direction, p->shard_rows,
                                      p->local_cols, &part, error);
    if (!status) status = gmm_layout_of(s->dtype, s->scaling, GMM_SCALES_COMPACT, (gmm_direction)direction,
                                        p->padded_rows, p->local_cols, &whole, error);
    if (!status) status = gmm_layout_of(s->dtype, s->scaling, GMM_SCALES_COMPACT, (gmm_direction)direction,
                                        p->local_rows, p->local_cols, &logical, error);
    if (status) return status;
    memset(data, 0, sizeof *data);
    memset(scale, 0, sizeof *scale);
    data->whole = (size_t)whole.data_bytes;
    scale->whole = (size_t)whole.scale_bytes;
    scale->even = (size_t)logical.scale_bytes;
    if (part.transposed) w->ld[direction] = whole.data_cols;
    w->transposed |= !sent;
    if (!sent) { /* all made here */
        scale->whole = scale->even;
        return GMM_OK;
    }
    data->send = (size_t)part.data_bytes;
    if (part.transposed) {
        data->staged = 1;
        data->width = data->src_pitch = (size_t)part.data_cols * bits / 8;
        data->limit = data->dst_pitch = (size_t)whole.data_cols * bits / 8;
        data->height = (size_t)part.data_rows;
    }
    if (s->scaling != GMM_SCALING_NONE && s->scaling != GMM_SCALING_TENSOR) {
        const size_t bytes = (size_t)gmm_dtype_bits(part.scale_dtype) / 8;
        int64_t per = 1;
        const int along_rows = gmm__gtp_scale_axis(s->scaling, direction, &per);
        if (along_rows) scale->send = (size_t)(p->shard_rows / per) * (size_t)part.scale_cols * bytes;
        else {
            scale->whole = scale->even;
            scale->send = (size_t)part.scale_bytes;
            scale->staged = 1;
            scale->width = (size_t)(p->shard_rows / per) * bytes;
            scale->limit = (size_t)((p->local_rows + per - 1) / per) * bytes;
            scale->src_pitch = (size_t)part.scale_cols * bytes;
            scale->dst_pitch = (size_t)logical.scale_cols * bytes;
            scale->height = (size_t)part.scale_rows;
        }
    }
    return GMM_OK;
}

/* The format of a weight that gmm_gtp_quantize makes. */
static gmm_status gmm__gtp_format(const char *fn, gmm__gtp_weight *w, gmm_error *error) {
    gmm_format *f = &w->format;
    gmm_error why = GMM_ZERO;
    gmm_status s;
    if (!w->desc.format) return GMM_OK;
    s = gmm__gtp_open(fn, "weight->format", w->desc.format, f, sizeof *f, error);
    w->desc.format = NULL; /* the copy is what counts */
    if (s) return s;
    f->struct_size = 0;
    s = gmm_format_validate(f, &why);
    if (s) return gmm__fail(error, s, "%s: '%s': format: %.300s", fn, w->desc.name, why.text);
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
    gmm_status s = gmm__gtp_declare(gtp, fn, "weights", gtp ? gtp->weight_count : 0, gtp ? gtp->config.weights : 0, id);
    memset(&w, 0, sizeof w);
    if (!s) s = gmm__gtp_open(fn, "weight", weight, &w.desc, sizeof w.desc, &gtp->error);
    if (!s) s = gmm__gtp_solve(fn, w.desc.shard, &w.shard, &w.plan, &gtp->error);
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
        if (w.plan.gather_data_bytes[d] > 0) s = gmm__gtp_routes(&w.shard, &w.plan, d, &w, &gtp->error);
        if (s) return s;
    }
    if ((s = gmm__gtp_format(fn, &w, &gtp->error)) != GMM_OK) return s;
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
    gmm_status s = gmm__gtp_declare(gtp, fn, "bundles", gtp ? gtp->bundle_count : 0, gtp ? gtp->config.bundles : 0, id);
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
            return gmm__fail(&gtp->error, GMM_E_CONFIG, "%s: '%s': '%s' has e4m3_256 %d, '%s' has not", fn, name,
                             w->desc.name, (int)w->format.e4m3_256, gtp->weights[weights[0]].desc.name);
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
    b->uniform = 1;
    b->wslot = -1;
    for (i = 0; i < GMM_GTP_PASSES; i++) b->slot[i] = b->chain[i] = b->place[i] = -1;
    for (i = 0; i < count; i++) {
        gmm__gtp_weight *w = &gtp->weights[weights[i]];
        gtp->members[b->first + w->desc.expert] = weights[i];
        w->bundle = gtp->bundle_count;
        b->trainable += w->desc.main_grad != NULL;
    }
    for (i = 1; i < count; i++) {
        const gmm_shard_plan *p = &gtp->weights[weights[i]].plan, *q = &gtp->weights[weights[0]].plan;
        if (p->local_rows != q->local_rows || p->local_cols != q->local_cols || p->padded_rows != q->padded_rows)
            b->uniform = 0;
    }
    gtp->member_count += count;
    *id = gtp->bundle_count++;
    return GMM_OK;
}

GMMDEF gmm_status gmm_gtp_add_chain(gmm_gtp *gtp, const gmm_gtp_chain *chain, int32_t *id) {
    static const char fn[] = "gmm_gtp_add_chain";
    gmm_gtp_chain c;
    gmm__gtp_chain *to;
    int32_t i, k;
    gmm_status s = gmm__gtp_declare(gtp, fn, "chains", gtp ? gtp->chain_count : 0, gtp ? gtp->config.chains : 0, id);
    if (!s) s = gmm__gtp_open(fn, "chain", chain, &c, sizeof c, &gtp->error);
    if (s) return s;
    if (!c.bundles) return gmm__fail(&gtp->error, GMM_E_NULL, "%s: chain->bundles is NULL", fn);
    if (c.held == 0) c.held = 1;
    if (c.pass < GMM_GTP_FORWARD || c.pass > GMM_GTP_RECOMPUTE || c.count < 1 || c.prefetch < 0 || c.prefetch > 3 ||
        c.held < 1 || c.captured < 0 || c.captured > 1)
        return gmm__fail(&gtp->error, GMM_E_ARG, "%s: pass %d, count %d, prefetch %d, held %d, captured %d: must be a "
                         "gmm_gtp_pass, >= 1, 0 to 3, >= 0, and 0 or 1", fn, (int)c.pass, c.count, c.prefetch,
                         c.held, c.captured);
    for (i = 0; i < c.count; i++) {
        if (c.bundles[i] < 0 || c.bundles[i] >= gtp->bundle_count)
            return gmm__fail(&gtp->error, GMM_E_ARG, "%s: bundles[%d] is %d: there are %d", fn, i,
                             (int)c.bundles[i], gtp->bundle_count);
        for (k = 0; k < i && c.bundles[k] != c.bundles[i]; k++) { }
        if (k < i || gtp->bundles[c.bundles[i]].chain[c.pass] >= 0)
            return gmm__fail(&gtp->error, GMM_E_CONFIG, "%s: bundle '%s' is in a chain of that pass already", fn,
                             gtp->bundles[c.bundles[i]].name);
        for (k = 0; k < GMM_GTP_PASSES; k++) {
            const int32_t other = gtp->bundles[c.bundles[i]].chain[k];
            if (other >= 0 && gtp->chains[other].captured != c.captured)
                return gmm__fail(&gtp->error, GMM_E_CONFIG, "%s: bundle '%s' is in a chain that is %scaptured", fn,
                                 gtp->bundles[c.bundles[i]].name, c.captured ? "not " : "");
        }
    }
    to = &gtp->chains[gtp->chain_count];
    to->pass = c.pass;
    to->first = gtp->link_count;
    to->count = c.count;
    to->prefetch = c.prefetch;
    to->held = c.held;
    to->captured = c.captured;
    to->next = -1;
    for (i = 0; i < c.count; i++) {
        gmm__gtp_bundle *b = &gtp->bundles[c.bundles[i]];
        gtp->links[gtp->link_count++] = c.bundles[i];
        b->chain[c.pass] = gtp->chain_count;
        b->place[c.pass] = i;
        b->captured = c.captured;
    }
    *id = gtp->chain_count++;
    return GMM_OK;
}

/* ......................................................................................... Runtime: memory plan ... */

static gmm__gtp_weight *gmm__gtp_member(gmm_gtp *g, const gmm__gtp_bundle *b, int32_t i) {
    return &g->weights[g->members[b->first + i]];
}

/* What the slot of a pass holds. */
static int gmm__gtp_class(gmm_gtp *g, const gmm__gtp_bundle *b, int pass) {
    if (pass == GMM_GTP_RECOMPUTE) return GMM__GTP_REC;
    return pass == GMM_GTP_BACKWARD && gmm__gtp_member(g, b, 0)->plan.gather_data_bytes[GMM_COLUMNWISE] > 0
               ? GMM__GTP_COL : GMM__GTP_ROW;
}
static int gmm__gtp_class_direction(int kind) { return kind == GMM__GTP_COL ? GMM_COLUMNWISE : GMM_ROWWISE; }

/* Whether a pass reads a buffer: of one rank, only what is made of the shards. */
static int gmm__gtp_buffered(gmm_gtp *g, const gmm__gtp_bundle *b, int pass) {
    return g->domains[b->domain].size > 1 ||
           (gmm__gtp_class(g, b, pass) == GMM__GTP_COL && gmm__gtp_member(g, b, 0)->transposed);
}

/* Places of a bundle's parts: in its slots data, scales as gmm_layout_of places groups, amaxes; in the stage what is
   put side by side, or transposed. */
static void gmm__gtp_place(gmm_gtp *g, gmm__gtp_bundle *b) {
    gmm__gtp_domain *to = &g->domains[b->domain];
    int d;
    int32_t i, part;
    for (d = GMM_ROWWISE; d <= GMM_COLUMNWISE; d++) {
        size_t at = 0, stage = 0;
        for (part = GMM__GTP_DATA; part <= GMM__GTP_SCALE; part++) {
            for (i = 0; i < b->count; i++) {
                gmm__gtp_weight *w = gmm__gtp_member(g, b, i);
                gmm__route *r = &w->route[d][part];
                r->at = at;
                at += part == GMM__GTP_DATA ? gmm__round256(r->whole) : r->whole;
                if (d == GMM_COLUMNWISE && w->transposed) { /* the rowwise copy arrives there */
                    gmm__route *from = &w->route[GMM_ROWWISE][part];
                    from->stage = stage;
                    stage += gmm__round256(from->send * (size_t)to->size);
                } else if (r->staged) {
                    r->stage = stage;
                    stage += gmm__round256(r->send * (size_t)to->size);
                }
            }
            at = gmm__round256(at);
        }
        b->amax_at[d] = at;
        if (gmm__gtp_member(g, b, 0)->shard.scaling == GMM_SCALING_NV16)
            at += gmm__round256((size_t)b->count * sizeof(float));
        b->slot_bytes[d == GMM_COLUMNWISE ? GMM__GTP_COL : GMM__GTP_ROW] = at;
        if (to->size > 1 && stage > to->stage_bytes[b->captured]) to->stage_bytes[b->captured] = stage;
    }
    b->slot_bytes[GMM__GTP_REC] = b->chain[GMM_GTP_RECOMPUTE] < 0 ? 0 : b->slot_bytes[GMM__GTP_ROW];
    b->grad_bytes = 0;
    for (i = 0; i < b->count; i++) {
        gmm__gtp_weight *w = gmm__gtp_member(g, b, i);
        w->grad_at = b->grad_bytes;
        b->grad_bytes += gmm__round256((size_t)w->plan.padded_rows * (size_t)w->plan.local_cols *
                                        (size_t)(gmm_dtype_bits(g->domains[b->domain].desc.wire) / 8));
    }
}

/* The bundle k places behind a place of a chain, which may run on into the next, and its pass there; NULL = none. */
static gmm__gtp_bundle *gmm__gtp_behind(gmm_gtp *g, int32_t chain, int32_t place, int32_t k, gmm_gtp_pass *pass) {
    for (place += k; chain >= 0 && place >= g->chains[chain].count; chain = g->chains[chain].next)
        place -= g->chains[chain].count;
    if (chain < 0) return NULL;
    *pass = g->chains[chain].pass;
    return &g->bundles[g->links[g->chains[chain].first + place]];
}

/* Whether some chain has a slot in use, held or prefetched, at a time at which it has b's of that kind in use. */
static int gmm__gtp_slot_taken(gmm_gtp *g, int32_t slot, const gmm__gtp_bundle *b, int kind) {
    int32_t c, i, k;
    for (c = 0; c < g->chain_count; c++)
        for (i = 0; i < g->chains[c].count; i++) {
            int mine = 0, taken = 0;
            for (k = 0; k < g->link_count && k - g->chains[c].prefetch < g->chains[c].held; k++) {
                gmm_gtp_pass pass = GMM_GTP_FORWARD;
                const gmm__gtp_bundle *x = gmm__gtp_behind(g, c, i, k, &pass);
                if (!x) break;
                mine |= x == b && gmm__gtp_class(g, x, pass) == kind;
                taken |= x->slot[pass] == slot;
            }
            if (mine && taken) return 1;
        }
    return 0;
}

/* Gives b the first slot of its kind and size that is free whenever b needs one: those of a chain get them by turns. */
static void gmm__gtp_take_slot(gmm_gtp *g, gmm__gtp_bundle *b, int kind) {
    gmm__gtp_domain *d = &g->domains[b->domain];
    gmm__gtp_slot *s = g->slots;
    int pass;
    for (pass = 0; pass < GMM_GTP_PASSES; pass++)
        if (b->slot[pass] >= 0 && g->slots[b->slot[pass]].kind == kind) return;
    for (; s < g->slots + g->slot_count; s++)
        if (s->domain == b->domain && s->kind == kind && s->captured == b->captured &&
            s->bytes == b->slot_bytes[kind] && !gmm__gtp_slot_taken(g, (int32_t)(s - g->slots), b, kind))
            break;
    if (s == g->slots + g->slot_count) {
        g->slot_count++;
        s->domain = b->domain;
        s->kind = kind;
        s->captured = b->captured;
        s->bytes = b->slot_bytes[kind];
        s->at = d->gather_bytes;
        s->bundle = -1;
        d->gather_bytes += gmm__round256(s->bytes);
    }
    for (pass = 0; pass < GMM_GTP_PASSES; pass++)
        if (gmm__gtp_class(g, b, pass) == kind) b->slot[pass] = (int32_t)(s - g->slots);
}

static void gmm__gtp_take_wslot(gmm_gtp *g, gmm__gtp_bundle *b) {
    gmm__gtp_domain *d = &g->domains[b->domain];
    int32_t i, slots = 0, taken = 0, nth;
    if (!b->trainable || b->wslot >= 0) return;
    for (i = 0; i < g->bundle_count; i++) {
        const gmm__gtp_bundle *x = &g->bundles[i];
        taken += x->wslot >= 0 && x->domain == b->domain && x->captured == b->captured &&
                 x->grad_bytes == b->grad_bytes;
    }
    nth = taken % d->desc.wgrad_slots;
    for (i = 0; i < g->wslot_count; i++) {
        const gmm__wgrad_slot *s = &g->wslots[i];
        if (s->domain == b->domain && s->captured == b->captured && s->bytes == b->grad_bytes && slots++ == nth) {
            b->wslot = i;
            return;
        }
    }
    {
        gmm__wgrad_slot *s = &g->wslots[g->wslot_count];
        s->domain = b->domain;
        s->captured = b->captured;
        s->bytes = b->grad_bytes;
        s->at = d->reduce_bytes;
        s->writer = -1;
        d->reduce_bytes += gmm__round256(s->bytes);
        b->wslot = g->wslot_count++;
    }
}

/* The sum of one weight's gradient into its main_grad. Of parts that were exchanged, the own one is where it was. */
typedef struct gmm__gtp_sum {
    gmm_context *ctx;
    gmm_accumulation d;
    gmm_options options;
    gmm_mat x, y;
    void *workspace;
    size_t workspace_bytes;
    void *part[GMM__GTP_PARTS];
} gmm__gtp_sum;

static gmm__gtp_sum gmm__gtp_sum_of(gmm_gtp *g, const gmm__gtp_domain *d, const gmm__gtp_weight *w) {
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
/* Its pointers, once it stands where it is used. */
static void gmm__gtp_sum_point(gmm__gtp_sum *s) {
    if (s->d.count > 1) s->x = gmm_mat_table(s->x.dtype, s->part, (uint32_t)GMM_MAT_TABLE_ON_HOST);
    s->d.options = &s->options;
    s->d.x = &s->x;
    s->d.y = &s->y;
}
static gmm_status gmm__gtp_sum_run(const void *argument, gmm_stream stream) {
    gmm__gtp_sum s = *(const gmm__gtp_sum *)argument;
    gmm__gtp_sum_point(&s);
    return gmm_accumulate(s.ctx, &s.d, s.workspace, s.workspace_bytes, stream);
}

/* The making of one weight's shard. */
typedef struct gmm__gtp_cast {
    gmm_context *ctx;
    gmm_quantization d;
    gmm_conversion plain;      /* of a weight without a scaling */
    gmm_format format;
    gmm_mat src, copy[2];
    int32_t wanted[2];
    void *workspace;
    size_t workspace_bytes;
} gmm__gtp_cast;

static gmm__gtp_cast gmm__gtp_cast_of(gmm_gtp *g, const gmm__gtp_weight *w, gmm_dtype dtype, const void *from) {
    gmm__gtp_cast c;
    int d;
    memset(&c, 0, sizeof c);
    c.ctx = g->config.ctx;
    c.src = gmm_mat_packed(dtype, from);
    c.format = w->format;
    c.d.count = 1;
    c.d.rows = c.plain.rows = w->plan.shard_rows;
    c.d.cols = c.plain.cols = w->plan.local_cols;
    for (d = GMM_ROWWISE; d <= GMM_COLUMNWISE; d++) {
        c.wanted[d] = w->plan.shard_data_bytes[d] > 0;
        c.copy[d] = gmm_mat_quantized(&c.format, (gmm_direction)d, w->desc.data[d], w->desc.scale[d], NULL);
    }
    if (w->shard.scaling == GMM_SCALING_NONE) c.copy[GMM_ROWWISE] = gmm_mat_packed(w->shard.dtype, w->desc.data[0]);
    return c;
}
/* Its pointers, once it stands where it is used. */
static void gmm__gtp_cast_point(gmm__gtp_cast *c) {
    c->d.format = &c->format;
    c->d.src = c->plain.src = &c->src;
    c->d.rowwise = c->wanted[GMM_ROWWISE] ? &c->copy[GMM_ROWWISE] : NULL;
    c->d.columnwise = c->wanted[GMM_COLUMNWISE] ? &c->copy[GMM_COLUMNWISE] : NULL;
    c->plain.dst = &c->copy[GMM_ROWWISE];
}
static gmm_status gmm__gtp_cast_run(const void *argument, gmm_stream stream) {
    gmm__gtp_cast c = *(const gmm__gtp_cast *)argument;
    gmm__gtp_cast_point(&c);
    if (c.format.dtype == GMM_NONE) return gmm_convert(c.ctx, &c.plain, NULL, 0, stream);
    return gmm_quantize(c.ctx, &c.d, c.workspace, c.workspace_bytes, stream);
}
/* Whether one amax of the whole tensor decides about its scale. */
static int gmm__gtp_by_amax(const gmm__gtp_weight *w) {
    return w->format.dtype != GMM_NONE && (w->shard.scaling == GMM_SCALING_NV16 ||
                                           (w->shard.scaling == GMM_SCALING_TENSOR && !w->format.delayed));
}

/* What quantizing wants for workspace: the most of the domain's weights, whatever the dtype of the rows. */
static gmm_status gmm__gtp_size_cast(gmm_gtp *g, const char *fn, gmm__gtp_domain *d, const gmm__gtp_weight *w) {
    static const gmm_dtype dtypes[] = {GMM_F32, GMM_F16, GMM_BF16};
    int i;
    for (i = 0; i < 3 && w->format.dtype != GMM_NONE; i++) {
        gmm__gtp_cast c = gmm__gtp_cast_of(g, w, dtypes[i], NULL);
        gmm_info info = GMM_ZERO;
        gmm_status s;
        gmm__gtp_cast_point(&c);
        s = gmm_quantize_query(g->config.ctx, GMM_OP_QUANTIZE, &c.d, &info);
        if (s) return gmm__fail(&g->error, s, "%s: '%s': %.400s", fn, w->desc.name, gmm_last_error(g->config.ctx));
        if (info.workspace_bytes > d->cast_bytes) d->cast_bytes = info.workspace_bytes;
    }
    return GMM_OK;
}

/* The transposing of one weight's rowwise copy. */
typedef struct gmm__gtp_turn {
    gmm_context *ctx;
    gmm_transposition d;
    gmm_mat src, dst;
} gmm__gtp_turn;
static gmm_status gmm__gtp_turn_run(const void *argument, gmm_stream stream) {
    gmm__gtp_turn t = *(const gmm__gtp_turn *)argument;
    t.d.src = &t.src;
    t.d.dst = &t.dst;
    return gmm_transpose(t.ctx, &t.d, NULL, 0, stream);
}

GMMDEF gmm_status gmm_gtp_seal(gmm_gtp *gtp) {
    static const char fn[] = "gmm_gtp_seal";
    int32_t i, k, n;
    int pass;
    gmm_status s = gmm__gtp_declare(gtp, fn, "", 0, 1, gtp);
    if (s) return s;
    for (i = 0; i < gtp->weight_count; i++)
        if (gtp->weights[i].bundle < 0)
            return gmm__fail(&gtp->error, GMM_E_CONFIG, "%s: '%s' is in no bundle", fn, gtp->weights[i].desc.name);
    for (i = 0; i < gtp->bundle_count; i++) { /* what sums want for workspace */
        const gmm__gtp_bundle *b = &gtp->bundles[i];
        gmm__gtp_domain *d = &gtp->domains[b->domain];
        for (k = 0; k < b->count; k++) {
            const gmm__gtp_weight *w = gmm__gtp_member(gtp, b, k);
            gmm__gtp_sum sum = gmm__gtp_sum_of(gtp, d, w);
            gmm_info info = GMM_ZERO;
            if ((s = gmm__gtp_size_cast(gtp, fn, d, w)) != GMM_OK) return s;
            if (!w->desc.main_grad) continue;
            gmm__gtp_sum_point(&sum);
            s = gmm_accumulate_query(gtp->config.ctx, &sum.d, &info);
            if (s) return gmm__fail(&gtp->error, s, "%s: '%s': %.400s", fn, w->desc.name,
                                    gmm_last_error(gtp->config.ctx));
            if (info.workspace_bytes > d->work_bytes) d->work_bytes = info.workspace_bytes;
        }
    }
    for (i = 0; i < gtp->bundle_count; i++) gmm__gtp_place(gtp, &gtp->bundles[i]);
    for (i = 0; i < gtp->chain_count; i++) /* slots in the order of the chains, */
        for (k = 0; k < gtp->chains[i].count; k++) {
            gmm__gtp_bundle *b = &gtp->bundles[gtp->links[gtp->chains[i].first + k]];
            if (gmm__gtp_buffered(gtp, b, gtp->chains[i].pass))
                gmm__gtp_take_slot(gtp, b, gmm__gtp_class(gtp, b, gtp->chains[i].pass));
            if (gtp->chains[i].pass == GMM_GTP_BACKWARD) gmm__gtp_take_wslot(gtp, b);
        }
    for (i = 0; i < gtp->bundle_count; i++) { /* then for who is in none */
        gmm__gtp_bundle *b = &gtp->bundles[i];
        for (pass = GMM_GTP_FORWARD; pass <= GMM_GTP_BACKWARD; pass++)
            if (gmm__gtp_buffered(gtp, b, pass)) gmm__gtp_take_slot(gtp, b, gmm__gtp_class(gtp, b, pass));
        gmm__gtp_take_wslot(gtp, b);
    }
    for (i = 0; i < gtp->domain_count; i++) {
        gmm__gtp_domain *d = &gtp->domains[i];
        size_t most = 0;
        for (k = 0; k < gtp->bundle_count; k++)
            if (gtp->bundles[k].domain == i && gtp->bundles[k].trainable && gtp->bundles[k].grad_bytes > most)
                most = gtp->bundles[k].grad_bytes;
        for (k = 0; k < 2; k++) {
            d->stage_at[k] = d->gather_bytes;
            d->gather_bytes += gmm__round256(d->stage_bytes[k]);
        }
        d->amax_at = d->gather_bytes;
        for (k = 0, n = 0; k < gtp->weight_count; k++)
            n += gtp->bundles[gtp->weights[k].bundle].domain == i && gmm__gtp_by_amax(&gtp->weights[k]);
        d->gather_bytes += gmm__round256((size_t)n * sizeof(float));
        d->cast_at = d->gather_bytes;
        d->gather_bytes += gmm__round256(d->cast_bytes);
        d->recv_at = d->reduce_bytes; /* one suffices: reductions follow one another on their stream */
        if (d->size > 1 && d->desc.reduction == GMM_GTP_REDUCE_EXCHANGE) d->reduce_bytes += gmm__round256(most);
        d->work_at = d->reduce_bytes;
        d->reduce_bytes += gmm__round256(d->work_bytes);
    }
    gtp->sealed = 1;
    return GMM_OK;
}

GMMDEF gmm_status gmm_gtp_memory_need(gmm_gtp *gtp, int32_t domain, gmm_gtp_need *need) {
    static const char fn[] = "gmm_gtp_memory_need";
    gmm_gtp_need n = GMM_ZERO;
    gmm_status s = GMM_OK;
    size_t known;
    int32_t i;
    if (!gtp) return GMM_E_NULL;
    known = gmm__gtp_known(fn, "need", need, sizeof *need, &s, &gtp->error);
    if (s) return s;
    if (!gtp->sealed) return gmm__fail(&gtp->error, GMM_E_STATE, "%s: seal the object first", fn);
    if (domain < 0 || domain >= gtp->domain_count)
        return gmm__fail(&gtp->error, GMM_E_ARG, "%s: domain %d: there are %d", fn, domain,
                         gtp->domain_count);
    n.struct_size = need->struct_size;
    for (i = 0; i < gtp->slot_count; i++) n.gather_slots += gtp->slots[i].domain == domain;
    for (i = 0; i < gtp->wslot_count; i++) n.wgrad_slots += gtp->wslots[i].domain == domain;
    n.gather_bytes = gtp->domains[domain].gather_bytes;
    n.reduce_bytes = gtp->domains[domain].reduce_bytes;
    memcpy(need, &n, known);
    return GMM_OK;
}

/* ................................................................................................ Runtime: work ... */

static void gmm__gtp_give_up(gmm_gtp *g, const char *why) {
    int32_t i;
    for (i = 0; i < g->domain_count; i++) {
        gmm__gtp_domain *d = &g->domains[i];
        if (d->size == 1) continue;
        d->gather.give_up(d->gather.self, why);
        d->reduce.give_up(d->reduce.self, why);
    }
}

/* Around the calls of a communicator, so that an error names them. */
static void gmm__gtp_calls(gmm_gtp *g, const gmm__gtp_domain *d, const char *what) {
    g->calls = what;
    g->caller[0] = d->rank;
    g->caller[1] = d->size;
}

/* Ends the object's life: the text says what failed, for whom, and what the communicator knows. */
static gmm_status gmm__gtp_break(gmm_gtp *g, const char *fn, const char *name, gmm_status status) {
    char why[320] = "", text[460], calls[64] = "";
    int32_t i;
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
    if (!why[0]) (void)snprintf(why, sizeof why, "%.280s", gmm_last_error(g->config.ctx));
    g->broken = status;
    if (g->calls)
        (void)snprintf(calls, sizeof calls, "%s by rank %d of %d: ", g->calls, g->caller[0], g->caller[1]);
    (void)snprintf(text, sizeof text, "%s: '%.60s': %s%s%s%s", fn, name, calls, gmm_status_string(status),
                   why[0] ? ": " : "", why);
    (void)gmm__fail(&g->error, status, "%s", text);
    gmm__gtp_give_up(g, text);
    return status;
}

static gmm_status gmm__mark_create(gmm_gtp *g, gmm__mark *m) {
    gmm_status s = g->rt.event_create(g->rt.self, &m->inside);
    return s ? s : g->rt.event_create(g->rt.self, &m->outside);
}
static gmm_status gmm__mark_destroy(gmm_gtp *g, gmm__mark *m) {
    const gmm_status a = g->rt.event_destroy(g->rt.self, m->inside), b = g->rt.event_destroy(g->rt.self, m->outside);
    memset(m, 0, sizeof *m);
    return a ? a : b;
}
static gmm_status gmm__mark_record(gmm_gtp *g, gmm__mark *m, gmm_stream stream) {
    gmm_status s = GMM_OK;
    m->set = 1;
    m->waited = 0;
    m->recorder = stream;
    m->graph = g->graph;
    if (g->graph) s = g->rt.event_record(g->rt.self, m->inside, stream, 0);
    return s ? s : g->rt.event_record(g->rt.self, m->outside, stream, g->graph ? (uint32_t)GMM_EVENT_EXTERNAL : 0u);
}
static gmm_status gmm__mark_wait(gmm_gtp *g, gmm__mark *m, gmm_stream stream) {
    if (!m->set) return GMM_OK;
    if (m->graph == g->graph) { /* a stream need not wait for itself, nor twice */
        if (m->recorder == stream || (m->waited && m->waiter == stream)) return GMM_OK;
        m->waited = 1;
        m->waiter = stream;
        if (g->graph) return g->rt.stream_wait(g->rt.self, stream, m->inside, 0);
    }
    return g->rt.stream_wait(g->rt.self, stream, m->outside, g->graph ? (uint32_t)GMM_EVENT_EXTERNAL : 0u);
}

enum { GMM__GTP_GATHER, GMM__GTP_REDUCE };
static gmm_stream gmm__gtp_stream(const gmm__gtp_domain *d, int which) {
    return which == GMM__GTP_GATHER ? d->desc.gather_stream : d->desc.reduce_stream;
}
/* The domain's stream gets work: in a capture it joins that first. */
static gmm_status gmm__gtp_use_stream(gmm_gtp *g, gmm__gtp_domain *d, int which) {
    d->used[which] = 1;
    if (!g->graph || d->joined[which] == g->graph) return GMM_OK;
    d->joined[which] = g->graph;
    return g->rt.stream_wait(g->rt.self, gmm__gtp_stream(d, which), g->graph_begin, 0);
}

/* The next place of a ring, whose collective begins here on its stream: NULL in a capture, whose replay is looked after
   as a whole, or where there is none. */
static gmm_status gmm__watch_begin(gmm_gtp *g, gmm__gtp_domain *d, int which, gmm__watch **out) {
    gmm__watch *ring = d->watch[which], *w;
    const uint32_t at = d->next[which] % GMM__WATCHES;
    gmm_status s = GMM_OK;
    int32_t done = 1;
    *out = NULL;
    if (g->graph) return GMM_OK;
    while (d->oldest[which] != d->next[which] && done && !s) {
        s = g->rt.event_query(g->rt.self, ring[d->oldest[which] % GMM__WATCHES].end, &done);
        d->oldest[which] += done != 0;
    }
    if (s || d->next[which] - d->oldest[which] == GMM__WATCHES) return s;
    w = &ring[at];
    s = g->rt.event_record(g->rt.self, w->begin, gmm__gtp_stream(d, which), 0);
    if (!s) *out = w;
    return s;
}
static gmm_status gmm__watch_end(gmm_gtp *g, gmm__gtp_domain *d, int which, gmm__watch *w, const gmm_comm *comm,
                                 const char *what, const char *name) {
    if (!w) return GMM_OK;
    w->end = d->watch_end[which][d->next[which]++ % GMM__WATCHES];
    w->seen = 0;
    w->comm = comm;
    w->what = what;
    w->name = name;
    return g->rt.event_record(g->rt.self, w->end, gmm__gtp_stream(d, which), 0);
}

/* Makes every event; what has been made is destroyed by gmm_gtp_fini. */
static gmm_status gmm__gtp_events(gmm_gtp *g) {
    gmm_status s = g->rt.event_create(g->rt.self, &g->graph_begin);
    int32_t i;
    int k, n;
    for (i = 0; i < g->domain_count; i++)
        for (k = 0; k < 2; k++) {
            if (!s) s = g->rt.event_create(g->rt.self, &g->domains[i].fork[k]);
            if (!s) s = g->rt.event_create(g->rt.self, &g->domains[i].join[k]);
            for (n = 0; n < GMM__WATCHES && !s; n++) {
                s = g->rt.event_create(g->rt.self, &g->domains[i].watch[k][n].begin);
                if (!s) s = g->rt.event_create(g->rt.self, &g->domains[i].watch_end[k][n]);
            }
            if (!s) s = gmm__mark_create(g, &g->domains[i].staged[k]);
            if (!s && k) s = gmm__mark_create(g, &g->domains[i].cast);
        }
    for (i = 0; i < g->bundle_count; i++) {
        gmm__gtp_bundle *b = &g->bundles[i];
        if (!s) s = gmm__mark_create(g, &b->published);
        if (!s) s = gmm__mark_create(g, &b->done);
        if (!s) s = gmm__mark_create(g, &b->in_place);
    }
    for (i = 0; i < g->slot_count; i++) {
        if (!s) s = gmm__mark_create(g, &g->slots[i].ready);
        if (!s) s = gmm__mark_create(g, &g->slots[i].last_use);
    }
    for (i = 0; i < g->wslot_count && !s; i++) s = gmm__mark_create(g, &g->wslots[i].last_use);
    for (i = 0; i < g->config.graphs; i++) {
        if (!s) s = g->rt.event_create(g->rt.self, &g->graph_watch[i].begin);
        if (!s) s = g->rt.event_create(g->rt.self, &g->graph_end[i]);
    }
    return s;
}

GMMDEF gmm_status gmm_gtp_fini(gmm_gtp *gtp) {
    gmm_status s = GMM_OK;
    int32_t i;
    int k, n;
    if (!gtp || gtp->ended) return GMM_OK;
    gtp->ended = 1;
    gtp->live = 0;
#define GMM__DESTROY(event) do { \
        const gmm_status t = gtp->rt.event_destroy(gtp->rt.self, event); if (!s) s = t; } while (0)
#define GMM__UNMARK(mark) do { const gmm_status t = gmm__mark_destroy(gtp, &(mark)); if (!s) s = t; } while (0)
    GMM__DESTROY(gtp->graph_begin);
    for (i = 0; i < gtp->domain_count; i++) {
        gmm__gtp_domain *d = &gtp->domains[i];
        for (k = 0; k < 2; k++) {
            const gmm_comm *c = k ? &d->reduce : &d->gather;
            GMM__DESTROY(d->fork[k]);
            GMM__DESTROY(d->join[k]);
            GMM__UNMARK(d->staged[k]);
            if (k) GMM__UNMARK(d->cast);
            for (n = 0; n < GMM__WATCHES; n++) {
                GMM__DESTROY(d->watch[k][n].begin);
                GMM__DESTROY(d->watch_end[k][n]);
            }
            if (d->window[k] && !gtp->broken) {
                const gmm_status t = c->window_remove(c->self, d->window[k]);
                if (!s) s = t;
            }
        }
    }
    for (i = 0; i < gtp->bundle_count; i++) {
        GMM__UNMARK(gtp->bundles[i].published);
        GMM__UNMARK(gtp->bundles[i].done);
        GMM__UNMARK(gtp->bundles[i].in_place);
    }
    for (i = 0; i < gtp->slot_count; i++) {
        GMM__UNMARK(gtp->slots[i].ready);
        GMM__UNMARK(gtp->slots[i].last_use);
    }
    for (i = 0; i < gtp->wslot_count; i++) GMM__UNMARK(gtp->wslots[i].last_use);
    for (i = 0; i < gtp->config.graphs; i++) {
        GMM__DESTROY(gtp->graph_watch[i].begin);
        GMM__DESTROY(gtp->graph_end[i]);
    }
#undef GMM__DESTROY
#undef GMM__UNMARK
    return s;
}

/* Addresses that are known once the memory is. */
static void gmm__gtp_addresses(gmm_gtp *g) {
    int32_t i, k;
    int pass;
    for (i = 0; i < g->slot_count; i++) g->slots[i].base = g->domains[g->slots[i].domain].gather_base + g->slots[i].at;
    for (i = 0; i < g->wslot_count; i++)
        g->wslots[i].base = g->domains[g->wslots[i].domain].reduce_base + g->wslots[i].at;
    for (i = 0; i < g->bundle_count; i++) {
        const gmm__gtp_bundle *b = &g->bundles[i];
        for (k = 0; k < b->count; k++) {
            const gmm__gtp_weight *w = gmm__gtp_member(g, b, k);
            for (pass = 0; pass < GMM_GTP_PASSES; pass++) {
                const int d = gmm__gtp_class_direction(gmm__gtp_class(g, b, pass));
                const gmm__gtp_slot *s = b->slot[pass] >= 0 ? &g->slots[b->slot[pass]] : NULL;
                g->table[pass][b->first + k] = s ? s->base + w->route[d][GMM__GTP_DATA].at : w->desc.data[d];
                g->scales[pass][b->first + k] = s && w->route[d][GMM__GTP_SCALE].whole
                                                    ? (void *)(s->base + w->route[d][GMM__GTP_SCALE].at)
                                                    : w->desc.scale[d];
            }
            g->grads[b->first + k] = b->wslot >= 0 ? g->wslots[b->wslot].base + w->grad_at : NULL;
        }
    }
}

GMMDEF gmm_status gmm_gtp_bind(gmm_gtp *gtp, int32_t domain, void *gather, size_t gather_bytes, void *reduce,
                               size_t reduce_bytes) {
    static const char fn[] = "gmm_gtp_bind";
    gmm__gtp_domain *d;
    gmm_status s = GMM_OK;
    int32_t i;
    if (!gtp) return GMM_E_NULL;
    if (gtp->broken) return gtp->broken;
    if (!gtp->sealed || gtp->live || gtp->ended)
        return gmm__fail(&gtp->error, GMM_E_STATE, "%s: %s", fn, gtp->live ? "all memory is bound" : gtp->ended
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
    d->gather_base = (char *)gather;
    d->reduce_base = (char *)reduce;
    if (d->size > 1 && d->gather.window_add && d->gather_bytes)
        s = d->gather.window_add(d->gather.self, gather, d->gather_bytes, &d->window[0]);
    if (!s && d->size > 1 && d->reduce.window_add && d->reduce_bytes)
        s = d->reduce.window_add(d->reduce.self, reduce, d->reduce_bytes, &d->window[1]);
    if (s) return gmm__gtp_break(gtp, fn, "windows", s);
    d->bound = 1;
    for (i = 0; i < gtp->domain_count; i++)
        if (!gtp->domains[i].bound) return GMM_OK;
    gmm__gtp_addresses(gtp);
    gtp->live = 1;
    s = gmm__gtp_events(gtp);
    if (s) {
        (void)gmm__gtp_break(gtp, fn, "events", s);
        (void)gmm_gtp_fini(gtp);
    }
    return s;
}

/* Opens a call that works on a bundle; `name` is what it does. */
enum { GMM__GTP_IN_CALLBACK = 1, GMM__GTP_NO_CAPTURE = 2 };
static gmm_status gmm__gtp_open_call(gmm_gtp *g, const char *fn, int32_t allowed) {
    if (!g) return GMM_E_NULL;
    if (g->broken) return g->broken;
    if (!g->live) return gmm__fail(&g->error, GMM_E_STATE, "%s: seal the object and bind its memory first", fn);
    if (g->calling_back && !(allowed & GMM__GTP_IN_CALLBACK))
        return gmm__fail(&g->error, GMM_E_STATE, "%s: not from a callback", fn);
    if (g->graph && (allowed & GMM__GTP_NO_CAPTURE))
        return gmm__fail(&g->error, GMM_E_CAPTURE, "%s: not while graph %d is captured", fn, g->graph - 1);
    return GMM_OK;
}
static gmm_status gmm__gtp_open_bundle(gmm_gtp *g, const char *fn, int32_t bundle) {
    gmm_status s = gmm__gtp_open_call(g, fn, 0);
    if (s) return s;
    if (bundle < 0 || bundle >= g->bundle_count)
        return gmm__fail(&g->error, GMM_E_ARG, "%s: bundle %d: there are %d", fn, bundle, g->bundle_count);
    if (g->graph && !g->bundles[bundle].captured)
        return gmm__fail(&g->error, GMM_E_CAPTURE, "%s: '%s' is in no captured chain, graph %d is captured", fn,
                         g->bundles[bundle].name, g->graph - 1);
    return GMM_OK;
}
static gmm_status gmm__gtp_open_pass(gmm_gtp *g, const char *fn, int32_t bundle, gmm_gtp_pass pass) {
    const gmm_status s = gmm__gtp_open_bundle(g, fn, bundle);
    if (s) return s;
    if (pass < GMM_GTP_FORWARD || pass > GMM_GTP_RECOMPUTE)
        return gmm__fail(&g->error, GMM_E_ARG, "%s: '%s': pass is %d: must be a gmm_gtp_pass", fn,
                         g->bundles[bundle].name, (int)pass);
    if (pass == GMM_GTP_RECOMPUTE && g->bundles[bundle].chain[pass] < 0)
        return gmm__fail(&g->error, GMM_E_STATE, "%s: '%s' is in no recompute chain", fn, g->bundles[bundle].name);
    return GMM_OK;
}
static void gmm__gtp_hash(gmm_gtp *g, int call, int32_t bundle, int what) {
    const uint64_t word = ((uint64_t)(uint32_t)bundle << 16) | (uint64_t)(uint32_t)(call * 16 + what);
    g->stats.calls = (g->stats.calls ^ word) * 1099511628211u + 1;
}

/* Whether the slot has these weights, for who asks now: what a graph gathers is there in its replays alone, and what
   was gathered outside may not be; a graph hands on what it has prefetched for the next. */
static int gmm__gtp_has(const gmm_gtp *g, const gmm__gtp_slot *s, int32_t bundle) {
    const gmm__gtp_bundle *b = &g->bundles[bundle];
    if (s->bundle != bundle || s->version != b->version) return 0;
    return s->graph == g->graph || (s->graph && g->graph && s->pending);
}

static void gmm__gtp_ask(gmm_gtp *g, gmm__gtp_bundle *b) {
    if (b->asked) return;
    b->asked = 1;
    if (g->graph) g->graph_use[(g->graph - 1) * g->bundle_count + (b - g->bundles)] |= GMM__GRAPH_NEEDS;
    else if (g->config.hooks.need && !g->dry) {
        g->calling_back = 1;
        g->config.hooks.need(g->config.hooks.user, g, g->members + b->first, b->count);
        g->calling_back = 0;
    }
}

/* Bytes of `size` per weight, from where each weight has them to places one behind the other: one copy where the
   sources follow one another too. */
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
        s = g->rt.copy(g->rt.self, dst + (size_t)i * size, src, (size_t)n * size, stream);
    }
    return s;
}

/* The collective: every part of one direction of a bundle to its place in the slot, or in the stage. All codes, then
   all scales: neighbours that lie evenly may go together. */
static gmm_status gmm__gtp_send(gmm_gtp *g, const gmm__gtp_bundle *b, int dir, int all_staged, char *slot, char *stage,
                                gmm_stream stream) {
    const gmm__gtp_domain *d = &g->domains[b->domain];
    const gmm_comm *c = &d->gather;
    int32_t i, part;
    gmm_status s;
    gmm__gtp_calls(g, d, "all_gather");
    s = c->group_begin(c->self, b->name);
    for (part = GMM__GTP_DATA; part <= GMM__GTP_SCALE; part++)
        for (i = 0; i < b->count; i++) {
            const gmm__gtp_weight *w = gmm__gtp_member(g, b, i);
            const gmm__route *to = &w->route[dir][part];
            if (s || !to->send) continue;
            s = c->all_gather(c->self, part == GMM__GTP_DATA ? w->desc.data[dir] : w->desc.scale[dir],
                              all_staged || to->staged ? stage + to->stage : slot + to->at, to->send, stream);
            g->stats.gathered_bytes += (int64_t)to->send * (d->size - 1);
        }
    if (!s) s = c->group_end(c->self);
    if (!s) g->calls = NULL;
    return s;
}

/* Puts what has arrived where it stays, straight: ranks side by side, zeros behind them. */
static gmm_status gmm__gtp_settle(gmm_gtp *g, const gmm__gtp_bundle *b, int dir, char *slot, const char *stage,
                                  gmm_stream stream) {
    const int32_t size = g->domains[b->domain].size;
    gmm_runtime *rt = &g->rt;
    gmm_status s = GMM_OK;
    int32_t i, part, r;
    for (i = 0; i < b->count; i++)
        for (part = GMM__GTP_DATA; part <= GMM__GTP_SCALE; part++) {
            const gmm__route *to = &gmm__gtp_member(g, b, i)->route[dir][part];
            const size_t rows = to->staged ? to->height * to->dst_pitch : to->send * (size_t)size;
            char *dst = slot + to->at;
            if (!to->send) continue;
            for (r = 0; r < size && to->staged && !s; r++) {
                const size_t at = (size_t)r * to->width, left = at < to->limit ? to->limit - at : 0;
                if (left)
                    s = rt->copy2d(rt->self, dst + at, to->dst_pitch, stage + to->stage + (size_t)r * to->send,
                                   to->src_pitch, left < to->width ? left : to->width, to->height, stream);
            }
            if (!s && to->staged && to->limit < to->dst_pitch)
                s = rt->fill2d(rt->self, dst + to->limit, to->dst_pitch, 0, to->dst_pitch - to->limit, to->height,
                               stream);
            if (!s && rows < to->whole) s = rt->fill(rt->self, dst + rows, 0, to->whole - rows, stream);
        }
    return s;
}

/* Makes the columnwise copies in a slot of rowwise ones: of a slot, of the stage, or (both NULL) of the shards. */
static gmm_status gmm__gtp_transpose(gmm_gtp *g, const gmm__gtp_bundle *b, char *slot, const char *row,
                                     const char *stage, gmm_stream stream) {
    gmm_status s = GMM_OK;
    int32_t i;
    for (i = 0; i < b->count && !s; i++) {
        const gmm__gtp_weight *w = gmm__gtp_member(g, b, i);
        const gmm__route *data = w->route[GMM_ROWWISE], *scale = data + 1, *to = w->route[GMM_COLUMNWISE];
        const size_t local = (size_t)w->plan.local_rows, pitch = (size_t)w->plan.padded_rows;
        const int tensor = w->shard.scaling == GMM_SCALING_TENSOR;
        gmm__gtp_turn t;
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
        t.src.data = row ? (void *)(uintptr_t)(row + data->at) : stage ? (void *)(uintptr_t)(stage + data->stage)
                                                                        : w->desc.data[GMM_ROWWISE];
        t.src.scale = row ? (void *)(uintptr_t)(row + scale->at)
                          : stage && !tensor ? (void *)(uintptr_t)(stage + scale->stage) : w->desc.scale[GMM_ROWWISE];
        t.dst.data = slot + to[GMM__GTP_DATA].at;
        t.dst.scale = slot + to[GMM__GTP_SCALE].at;
        t.dst.ld = w->plan.padded_rows;
        ranges[0].data = t.src.data;
        ranges[0].bytes = local * (size_t)w->plan.local_cols;
        ranges[1].data = t.src.scale;
        ranges[1].bytes = tensor ? sizeof(float) : scale->even;
        ranges[2].data = t.dst.data;
        ranges[2].bytes = pitch * (size_t)w->plan.local_cols;
        ranges[3].data = t.dst.scale;
        ranges[3].bytes = to[GMM__GTP_SCALE].whole;
        ranges[2].writes = ranges[3].writes = 1;
        work.name = "transpose";
        work.function = gmm__gtp_turn_run;
        work.argument = &t;
        work.argument_bytes = sizeof t;
        work.ranges = ranges;
        work.range_count = 4;
        s = g->rt.run(g->rt.self, &work, stream);
        if (!s && local < pitch)
            s = g->rt.fill2d(g->rt.self, (char *)t.dst.data + local, pitch, 0, pitch - local,
                             (size_t)w->plan.local_cols, stream);
    }
    return s;
}

/* `stream` has read what the mark stands for the last use of: one event then stands for all readers. */
static gmm_status gmm__gtp_was_read(gmm_gtp *g, gmm__mark *mark, int *read, gmm_stream *reader, gmm_stream stream) {
    gmm_status s = GMM_OK;
    if (*read && *reader != stream) s = gmm__mark_wait(g, mark, stream);
    if (!s) s = gmm__mark_record(g, mark, stream);
    *read = 1;
    *reader = stream;
    return s;
}

/* Gathers a bundle into its slot. With one rank, `stream` transposes the shards. */
static gmm_status gmm__gtp_gather(gmm_gtp *g, int32_t bundle, gmm_gtp_pass pass, gmm_stream stream) {
    gmm__gtp_bundle *b = &g->bundles[bundle];
    gmm__gtp_domain *d = &g->domains[b->domain];
    gmm__gtp_slot *slot = &g->slots[b->slot[pass]], *row = NULL;
    const gmm__gtp_weight *first = gmm__gtp_member(g, b, 0);
    const int dir = gmm__gtp_class_direction(slot->kind);
    const int turn = first->transposed && dir == GMM_COLUMNWISE, several = d->size > 1;
    const int staged = several && (turn || first->route[dir][0].staged || first->route[dir][1].staged);
    char *stage = d->gather_base + d->stage_at[b->captured];
    gmm__watch *watch = NULL;
    gmm_status s = GMM_OK;
    if (several) {
        stream = d->desc.gather_stream;
        s = gmm__gtp_use_stream(g, d, GMM__GTP_GATHER);
        if (turn && gmm__gtp_has(g, &g->slots[b->slot[GMM_GTP_FORWARD]], bundle))
            row = &g->slots[b->slot[GMM_GTP_FORWARD]];
    }
    if (g->graph) g->graph_use[(g->graph - 1) * g->bundle_count + bundle] |= GMM__GRAPH_READS;
    else if (!s) s = gmm__mark_wait(g, &b->published, stream);
    if (!s) s = gmm__mark_wait(g, &slot->last_use, stream);
    if (!s && slot->ready.graph != g->graph) s = gmm__mark_wait(g, &slot->ready, stream);
    if (!s && row) s = gmm__mark_wait(g, &row->ready, stream);
    if (!s && staged && !row) s = gmm__mark_wait(g, &d->staged[b->captured], stream);
    slot->bundle = bundle;
    slot->version = b->version;
    slot->graph = g->graph;
    slot->pending = slot->read = 0;
    if (!s && several) s = gmm__watch_begin(g, d, GMM__GTP_GATHER, &watch);
    if (!s && several && !row) s = gmm__gtp_send(g, b, turn ? (int)GMM_ROWWISE : dir, turn, slot->base, stage, stream);
    if (!s && !turn) s = gmm__gtp_settle(g, b, dir, slot->base, stage, stream);
    if (!s && turn)
        s = gmm__gtp_transpose(g, b, slot->base, row ? row->base : NULL, several && !row ? stage : NULL, stream);
    if (!s && !turn && first->shard.scaling == GMM_SCALING_TENSOR)
        s = gmm__gtp_copy_values(g, b, slot->base + first->route[dir][GMM__GTP_SCALE].at, sizeof(float), 1, stream);
    if (!s && first->shard.scaling == GMM_SCALING_NV16 && first->desc.amax)
        s = gmm__gtp_copy_values(g, b, slot->base + b->amax_at[dir], sizeof(float), 0, stream);
    if (!s && staged && !row) s = gmm__mark_record(g, &d->staged[b->captured], stream);
    if (!s) s = gmm__mark_record(g, &slot->ready, stream);
    if (!s) s = gmm__watch_end(g, d, GMM__GTP_GATHER, watch, &d->gather, "all_gather", b->name);
    if (!s && row) s = gmm__mark_record(g, &row->ready, stream); /* for a gather into it that is not on this stream */
    if (!s && !several) s = gmm__gtp_was_read(g, &b->in_place, &b->in_place.set, &b->reader, stream);
    g->stats.gathers++;
    g->stats.transposed += row || !several;
    return s;
}

/* Gathers a bundle for later, unless it is there or its slot is in use. */
static gmm_status gmm__gtp_gather_ahead(gmm_gtp *g, int32_t bundle, gmm_gtp_pass pass) {
    gmm__gtp_bundle *b = &g->bundles[bundle];
    gmm__gtp_slot *slot;
    if (b->slot[pass] < 0 || g->domains[b->domain].size == 1) return GMM_OK;
    slot = &g->slots[b->slot[pass]];
    if (slot->holders && slot->bundle != bundle) {
        g->stats.busy++;
        return GMM_OK;
    }
    if (pass == GMM_GTP_FORWARD) gmm__gtp_ask(g, b);
    if (gmm__gtp_has(g, slot, bundle)) {
        if (!slot->pending) slot->pending = 2;
        return GMM_OK;
    }
    if (slot->holders || (slot->pending && slot->bundle >= 0 && slot->bundle != bundle &&
                          gmm__gtp_has(g, slot, slot->bundle))) {
        g->stats.busy++;
        return GMM_OK;
    }
    g->stats.outdated += slot->pending == 1;
    g->stats.prefetches++;
    {
        const gmm_status s = gmm__gtp_gather(g, bundle, pass, NULL);
        slot->pending = 1;
        return s;
    }
}

/* The bundles that come after this one. */
static gmm_status gmm__gtp_gather_followers(gmm_gtp *g, const gmm__gtp_bundle *b, gmm_gtp_pass pass) {
    const int32_t chain = b->chain[pass], ahead = chain < 0 ? 0 : g->chains[chain].prefetch;
    gmm_status s = GMM_OK;
    int32_t k;
    for (k = 1; k <= ahead && !s; k++) {
        gmm_gtp_pass then = pass;
        const gmm__gtp_bundle *x = gmm__gtp_behind(g, chain, b->place[pass], k, &then);
        if (!x) break;
        s = gmm__gtp_gather_ahead(g, (int32_t)(x - g->bundles), then);
    }
    return s;
}

/* The operand of a bundle, over addresses that stand in a table. */
static gmm_gtp_view gmm__gtp_view_of(gmm_gtp *g, const gmm__gtp_bundle *b, gmm_dtype dtype, gmm_scaling scaling,
                                     void *const *data, void *const *scales, int packed, int64_t stride, int64_t ld) {
    const gmm__gtp_weight *w = gmm__gtp_member(g, b, 0);
    gmm_gtp_view v = GMM_ZERO;
    v.count = b->count;
    v.rows = w->plan.local_rows;
    v.cols = w->plan.local_cols;
    v.version = b->version;
    v.slot = -1;
    v.mat.dtype = dtype;
    v.mat.scaling = scaling;
    v.mat.ld = ld;
    if (packed) {
        v.mat.data = data[0];
        v.mat.group_stride = b->count > 1 ? stride : 0;
        v.mat.scale = scaling == GMM_SCALING_NONE ? NULL : scales[0];
    } else {
        v.mat.table = data;
        v.mat.scale_table = scaling == GMM_SCALING_NONE ? NULL : scales;
        v.mat.flags = (uint32_t)GMM_MAT_TABLE_ON_HOST;
    }
    v.mat.amax = w->desc.amax;
    return v;
}
static gmm_gtp_view gmm__gtp_view_pass(gmm_gtp *g, gmm__gtp_bundle *b, gmm_gtp_pass pass) {
    const gmm__gtp_weight *w = gmm__gtp_member(g, b, 0);
    const int dir = gmm__gtp_class_direction(gmm__gtp_class(g, b, pass)), slot = b->slot[pass];
    void *const *data = g->table[pass] + b->first;
    const gmm__route *scale = &w->route[dir][GMM__GTP_SCALE];
    const int packed = b->count == 1 || (slot >= 0 && b->uniform && scale->whole == scale->even);
    const int64_t bits = gmm_dtype_bits(w->shard.dtype);
    gmm_gtp_view v = gmm__gtp_view_of(g, b, w->shard.dtype, w->shard.scaling, data, g->scales[pass] + b->first, packed,
                                      (int64_t)gmm__round256(w->route[dir][GMM__GTP_DATA].whole) * 8 / bits,
                                      slot >= 0 ? w->ld[dir] : 0);
    if (w->format.e4m3_256) v.mat.flags |= (uint32_t)GMM_MAT_E4M3_256;
    if (slot >= 0 && w->shard.scaling == GMM_SCALING_NV16 && w->desc.amax)
        v.mat.amax = (float *)(void *)(g->slots[slot].base + b->amax_at[dir]);
    v.slot = slot;
    if (dir == GMM_COLUMNWISE) { /* what asks for a rowwise copy is refused */
        b->columnwise = v.mat;
        v.mat.data = v.mat.scale = NULL;
        v.mat.table = v.mat.scale_table = NULL;
        v.mat.amax = NULL;
        v.mat.flags = 0;
        v.mat.ld = v.mat.group_stride = 0;
        v.mat.columnwise = &b->columnwise;
    }
    return v;
}

/* What a GEMM of the bundle has beside it: the gather of its followers, and behind forward the reductions, whose sums
   are kernels of the runtime's own. A kernel that finds every multiprocessor taken waits until the GEMM ends. */
enum { GMM__GTP_SUM_PROCESSORS = 16 };
static int32_t gmm__gtp_leave(const gmm_gtp *g, const gmm__gtp_bundle *b, gmm_gtp_pass pass) {
    const gmm__gtp_domain *d = &g->domains[b->domain];
    const int32_t chain = b->chain[pass];
    int32_t most = 0;
    if (d->size == 1) return 0;
    if (chain >= 0 && g->chains[chain].prefetch > 0) most = d->gather.processors;
    if (pass != GMM_GTP_FORWARD && d->reduce.processors > most) most = d->reduce.processors;
    if (pass != GMM_GTP_FORWARD && most < GMM__GTP_SUM_PROCESSORS) most = GMM__GTP_SUM_PROCESSORS;
    return most;
}

GMMDEF gmm_status gmm_gtp_acquire(gmm_gtp *gtp, int32_t bundle, gmm_gtp_pass pass, gmm_stream stream,
                                  gmm_gtp_view *view) {
    static const char fn[] = "gmm_gtp_acquire";
    gmm__gtp_bundle *b;
    gmm__gtp_slot *slot;
    gmm_gtp_view v;
    size_t known;
    gmm_status s = gmm__gtp_open_pass(gtp, fn, bundle, pass);
    if (s) return s;
    known = gmm__gtp_known(fn, "view", view, sizeof *view, &s, &gtp->error);
    if (s) return s;
    b = &gtp->bundles[bundle];
    slot = b->slot[pass] >= 0 ? &gtp->slots[b->slot[pass]] : NULL;
    if (b->held >> pass & 1u)
        return gmm__fail(&gtp->error, GMM_E_STATE, "%s: '%s' is acquired already for pass %d", fn, b->name, (int)pass);
    if (slot && slot->holders && slot->bundle != bundle)
        return gmm__fail(&gtp->error, GMM_E_STATE, "%s: '%s': its slot holds '%s', which is not released: release it, "
                         "or raise gmm_gtp_chain.held", fn, b->name, gtp->bundles[slot->bundle].name);
    if (slot && slot->holders && !gmm__gtp_has(gtp, slot, bundle))
        return gmm__fail(&gtp->error, GMM_E_STATE, "%s: '%s' was published while another pass holds it", fn, b->name);
    gmm__gtp_hash(gtp, 1, bundle, (int)pass);
    if (pass == GMM_GTP_FORWARD) gmm__gtp_ask(gtp, b);
    b->asked = pass == GMM_GTP_FORWARD ? 0 : b->asked;
    gtp->stats.acquires++;
    if (!slot) {
        gtp->stats.resident++;
        if (gtp->graph) gtp->graph_use[(gtp->graph - 1) * gtp->bundle_count + bundle] |= GMM__GRAPH_READS;
        else s = gmm__mark_wait(gtp, &b->published, stream);
    } else {
        if (gmm__gtp_has(gtp, slot, bundle)) {
            if (slot->pending == 1) gtp->stats.prefetched++;
            else gtp->stats.resident++;
        } else {
            gtp->stats.exposed++;
            gtp->stats.outdated += slot->pending == 1;
            s = gmm__gtp_gather(gtp, bundle, pass, stream);
        }
        if (!s) s = gmm__mark_wait(gtp, &slot->ready, stream);
        slot->pending = 0;
        slot->graph = gtp->graph;
        slot->holders |= 1u << pass;
    }
    b->held |= 1u << pass;
    if (!s) s = gmm__gtp_gather_followers(gtp, b, pass);
    if (s) return gmm__gtp_break(gtp, fn, b->name, s);
    v = gmm__gtp_view_pass(gtp, b, pass);
    v.leave = gmm__gtp_leave(gtp, b, pass);
    v.struct_size = view->struct_size;
    memcpy(view, &v, known);
    return GMM_OK;
}

GMMDEF gmm_status gmm_gtp_release(gmm_gtp *gtp, int32_t bundle, gmm_gtp_pass pass, gmm_stream stream) {
    static const char fn[] = "gmm_gtp_release";
    gmm__gtp_bundle *b;
    gmm__gtp_slot *slot;
    gmm_status s = gmm__gtp_open_pass(gtp, fn, bundle, pass);
    if (s) return s;
    b = &gtp->bundles[bundle];
    if (!(b->held >> pass & 1u))
        return gmm__fail(&gtp->error, GMM_E_STATE, "%s: '%s' is not acquired for pass %d", fn, b->name, (int)pass);
    slot = b->slot[pass] >= 0 ? &gtp->slots[b->slot[pass]] : NULL;
    s = slot ? gmm__gtp_was_read(gtp, &slot->last_use, &slot->read, &slot->reader, stream)
             : gmm__gtp_was_read(gtp, &b->in_place, &b->in_place.set, &b->reader, stream);
    b->held &= ~(1u << pass);
    if (slot) slot->holders &= ~(1u << pass);
    return s ? gmm__gtp_break(gtp, fn, b->name, s) : GMM_OK;
}

GMMDEF gmm_status gmm_gtp_prefetch(gmm_gtp *gtp, int32_t bundle, gmm_gtp_pass pass) {
    static const char fn[] = "gmm_gtp_prefetch";
    gmm_status s = gmm__gtp_open_pass(gtp, fn, bundle, pass);
    if (s) return s;
    gmm__gtp_hash(gtp, 2, bundle, (int)pass);
    s = gmm__gtp_gather_ahead(gtp, bundle, pass);
    return s ? gmm__gtp_break(gtp, fn, gtp->bundles[bundle].name, s) : GMM_OK;
}

GMMDEF gmm_status gmm_gtp_follow(gmm_gtp *gtp, int32_t chain, int32_t next) {
    if (!gtp) return GMM_E_NULL;
    if (gtp->broken) return gtp->broken;
    if (chain < 0 || chain >= gtp->chain_count || next < -1 || next >= gtp->chain_count)
        return gmm__fail(&gtp->error, GMM_E_ARG, "gmm_gtp_follow: chain %d, next %d: there are %d", chain,
                         next, gtp->chain_count);
    if (next >= 0 && gtp->chains[next].captured != gtp->chains[chain].captured)
        return gmm__fail(&gtp->error, GMM_E_CAPTURE, "gmm_gtp_follow: chain %d is %scaptured, chain %d is not alike",
                         chain, gtp->chains[chain].captured ? "" : "not ", next);
    gtp->chains[chain].next = next;
    return GMM_OK;
}

/* Checks a list of weights. */
static gmm_status gmm__gtp_list(gmm_gtp *g, const char *fn, const int32_t *weights, int32_t count) {
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
static gmm_status gmm__gtp_published(gmm_gtp *g, const int32_t *weights, int32_t count, gmm_stream stream) {
    gmm_status s = GMM_OK;
    int32_t i, k;
    for (i = 0; i < count && !s; i++) {
        gmm__gtp_bundle *b = &g->bundles[g->weights[weights[i]].bundle];
        for (k = 0; k < i && g->weights[weights[k]].bundle != g->weights[weights[i]].bundle; k++) { }
        if (k < i) continue; /* a bundle is published once */
        if (b->published.set) s = gmm__mark_wait(g, &b->published, stream); /* of other weights, on other streams */
        if (!s) s = gmm__mark_record(g, &b->published, stream);
        b->version++;
    }
    return s;
}

GMMDEF gmm_status gmm_gtp_publish(gmm_gtp *gtp, const int32_t *weights, int32_t count, gmm_stream stream) {
    static const char fn[] = "gmm_gtp_publish";
    gmm_status s = gmm__gtp_open_call(gtp, fn, GMM__GTP_IN_CALLBACK | GMM__GTP_NO_CAPTURE);
    if (!s) s = gmm__gtp_list(gtp, fn, weights, count);
    if (s) return s;
    s = gmm__gtp_published(gtp, weights, count, stream);
    return s ? gmm__gtp_break(gtp, fn, "shards", s) : GMM_OK;
}

GMMDEF gmm_status gmm_gtp_wgrad(gmm_gtp *gtp, int32_t bundle, gmm_stream stream, gmm_gtp_view *view) {
    static const char fn[] = "gmm_gtp_wgrad";
    gmm__gtp_bundle *b;
    gmm__wgrad_slot *slot;
    gmm_gtp_view v;
    gmm_dtype wire;
    int32_t i;
    size_t known;
    gmm_status s = gmm__gtp_open_bundle(gtp, fn, bundle);
    if (s) return s;
    known = gmm__gtp_known(fn, "view", view, sizeof *view, &s, &gtp->error);
    if (s) return s;
    b = &gtp->bundles[bundle];
    if (b->wslot < 0) return gmm__fail(&gtp->error, GMM_E_STATE, "%s: '%s' is frozen", fn, b->name);
    slot = &gtp->wslots[b->wslot];
    if (slot->writer == bundle)
        return gmm__fail(&gtp->error, GMM_E_STATE, "%s: '%s' has a buffer already: submit it first", fn, b->name);
    if (slot->writer >= 0)
        return gmm__fail(&gtp->error, gtp->graph ? GMM_E_CAPTURE : GMM_E_STATE, "%s: '%s': its buffer is that of '%s', "
                         "which is not submitted: raise gmm_gtp_domain.wgrad_slots", fn, b->name,
                         gtp->bundles[slot->writer].name);
    wire = gtp->domains[b->domain].desc.wire;
    s = gmm__mark_wait(gtp, &slot->last_use, stream);
    for (i = 0; i < b->count && !s; i++) {
        const gmm__gtp_weight *w = gmm__gtp_member(gtp, b, i);
        const size_t row = (size_t)w->plan.local_cols * (size_t)gmm_dtype_bits(wire) / 8;
        if (w->plan.pad > 0)
            s = gtp->rt.fill(gtp->rt.self, slot->base + w->grad_at + (size_t)w->plan.local_rows * row, 0,
                             (size_t)w->plan.pad * row, stream);
    }
    slot->writer = bundle;
    if (s) return gmm__gtp_break(gtp, fn, b->name, s);
    v = gmm__gtp_view_of(gtp, b, wire, GMM_SCALING_NONE, gtp->grads + b->first, NULL, b->count == 1 || b->uniform,
                         b->count > 1 ? (int64_t)gmm__gtp_member(gtp, b, 1)->grad_at * 8 / gmm_dtype_bits(wire) : 0, 0);
    v.mat.amax = NULL;
    v.slot = b->wslot;
    v.leave = gmm__gtp_leave(gtp, b, GMM_GTP_BACKWARD);
    v.struct_size = view->struct_size;
    memcpy(view, &v, known);
    return GMM_OK;
}

/* A gradient from elsewhere, or none at all, put into the buffer. */
typedef struct gmm__gtp_take {
    gmm_context *ctx;
    gmm_conversion d;
    gmm_mat src, dst;
} gmm__gtp_take;
static gmm_status gmm__gtp_take_run(const void *argument, gmm_stream stream) {
    gmm__gtp_take t = *(const gmm__gtp_take *)argument;
    t.d.src = &t.src;
    t.d.dst = &t.dst;
    return gmm_convert(t.ctx, &t.d, NULL, 0, stream);
}
static gmm_status gmm__gtp_fill_gradient(gmm_gtp *g, const gmm__gtp_bundle *b, const gmm_mat *from,
                                         gmm_stream stream) {
    const gmm__wgrad_slot *slot = &g->wslots[b->wslot];
    const gmm_dtype wire = g->domains[b->domain].desc.wire;
    int32_t i;
    gmm_status s = GMM_OK;
    if (!from) return g->rt.fill(g->rt.self, slot->base, 0, slot->bytes, stream);
    for (i = 0; i < b->count && !s; i++) {
        const gmm__gtp_weight *w = gmm__gtp_member(g, b, i);
        const int64_t ld = from->ld ? from->ld : w->plan.local_cols;
        const int64_t stride = from->group_stride ? from->group_stride : w->plan.local_rows * ld;
        const int64_t size = gmm_dtype_bits(from->dtype) / 8;
        gmm_range ranges[2];
        gmm_work work;
        gmm__gtp_take take;
        memset(&take, 0, sizeof take);
        memset(&work, 0, sizeof work);
        memset(ranges, 0, sizeof ranges);
        take.ctx = g->config.ctx;
        take.d.rows = w->plan.local_rows;
        take.d.cols = w->plan.local_cols;
        take.src = gmm_mat_packed(from->dtype, from->table ? from->table[i]
                                                           : (const char *)from->data + i * stride * size);
        take.src.ld = ld;
        take.dst = gmm_mat_packed(wire, slot->base + w->grad_at);
        ranges[0].data = take.src.data;
        ranges[0].bytes = (size_t)(((w->plan.local_rows - 1) * ld + w->plan.local_cols) * size);
        ranges[1].data = take.dst.data;
        ranges[1].bytes = (size_t)(w->plan.local_rows * w->plan.local_cols * gmm_dtype_bits(wire) / 8);
        ranges[1].writes = 1;
        work.name = "take gradient";
        work.function = gmm__gtp_take_run;
        work.argument = &take;
        work.argument_bytes = sizeof take;
        work.ranges = ranges;
        work.range_count = 2;
        s = g->rt.run(g->rt.self, &work, stream);
    }
    return s;
}

/* Multiprocessors that the sum of a weight takes: those that the GEMMs of the backward chain leave, 0 = all behind its
   last one, and where gmm_accumulate needs all to keep up: main_grad not fp32, or not in whole vectors. */
static int32_t gmm__gtp_sums_take(gmm_gtp *g, const gmm__gtp_bundle *b, const gmm__gtp_weight *w) {
    gmm_gtp_pass pass = GMM_GTP_FORWARD;
    const int32_t chain = b->chain[GMM_GTP_BACKWARD];
    const int64_t part = w->plan.shard_rows * w->plan.local_cols;
    if (g->domains[b->domain].size == 1 || w->desc.main_grad_dtype != GMM_F32 || part % 8 ||
        (uintptr_t)w->desc.main_grad % 16)
        return 0;
    if (chain < 0 || !gmm__gtp_behind(g, chain, b->place[GMM_GTP_BACKWARD], 1, &pass)) return 0;
    return pass == GMM_GTP_BACKWARD ? GMM__GTP_SUM_PROCESSORS : 0;
}
/* Everything of a submit that the reduce stream does. */
static gmm_status gmm__gtp_reduce(gmm_gtp *g, int32_t bundle, float scale, gmm_gtp_add add) {
    gmm__gtp_bundle *b = &g->bundles[bundle];
    gmm__gtp_domain *d = &g->domains[b->domain];
    gmm__wgrad_slot *slot = &g->wslots[b->wslot];
    const gmm_stream stream = d->desc.reduce_stream;
    const gmm_comm *c = &d->reduce;
    const int exchange = d->desc.reduction == GMM_GTP_REDUCE_EXCHANGE;
    const size_t size = (size_t)gmm_dtype_bits(d->desc.wire) / 8;
    int32_t i;
    gmm__watch *watch = NULL;
    gmm_status s = gmm__watch_begin(g, d, GMM__GTP_REDUCE, &watch);
    if (!s) gmm__gtp_calls(g, d, exchange ? "all_to_all" : "reduce_scatter");
    if (!s && d->size > 1) s = c->group_begin(c->self, b->name);
    for (i = 0; i < b->count && d->size > 1 && !s; i++) {
        const gmm__gtp_weight *w = gmm__gtp_member(g, b, i);
        const size_t part = (size_t)w->plan.shard_rows * (size_t)w->plan.local_cols;
        char *send = slot->base + w->grad_at;
        if (!w->desc.main_grad) continue;
        g->stats.reduced_bytes += (int64_t)(part * size) * (d->size - 1);
        s = exchange ? c->all_to_all(c->self, send, d->reduce_base + d->recv_at + w->grad_at, part * size, stream)
                     : c->reduce_scatter(c->self, send, send + (size_t)d->rank * part * size, part, d->desc.wire,
                                         stream);
    }
    if (!s && d->size > 1) s = c->group_end(c->self);
    if (!s) g->calls = NULL;
    for (i = 0; i < b->count && !s && !g->dry; i++) {
        const gmm__gtp_weight *w = gmm__gtp_member(g, b, i);
        const size_t part = (size_t)w->plan.shard_rows * (size_t)w->plan.local_cols;
        gmm__gtp_sum sum = gmm__gtp_sum_of(g, d, w);
        char *own = slot->base + w->grad_at + (size_t)d->rank * part * size, *from = d->reduce_base + d->recv_at;
        gmm_range ranges[5];
        gmm_work work;
        int32_t r;
        if (!w->desc.main_grad) continue;
        memset(&work, 0, sizeof work);
        memset(ranges, 0, sizeof ranges);
        from += w->grad_at;
        for (r = 0; r < sum.d.count && sum.d.count > 1; r++)
            sum.part[r] = r == d->rank ? own : from + (size_t)r * part * size;
        sum.x.data = own;
        sum.options.sm_limit = gmm__gtp_sums_take(g, b, w);
        sum.d.scale = scale;
        sum.d.beta = add == GMM_GTP_SET ? 0.0f : 1.0f;
        sum.workspace = d->reduce_base + d->work_at;
        sum.workspace_bytes = d->work_bytes;
        ranges[0].data = own;
        ranges[0].bytes = part * size;
        ranges[1].data = w->desc.main_grad;
        ranges[1].bytes = part * (size_t)gmm_dtype_bits(w->desc.main_grad_dtype) / 8;
        ranges[1].writes = 1;
        ranges[2].data = sum.workspace;
        ranges[2].bytes = d->work_bytes;
        ranges[2].writes = 1;
        if (sum.d.count > 1) {
            ranges[3].data = from;
            ranges[3].bytes = (size_t)d->rank * part * size;
            ranges[4].data = from + (size_t)(d->rank + 1) * part * size;
            ranges[4].bytes = (size_t)(d->size - 1 - d->rank) * part * size;
        }
        work.name = "add to main_grad";
        work.function = gmm__gtp_sum_run;
        work.argument = &sum;
        work.argument_bytes = sizeof sum;
        work.ranges = ranges;
        work.range_count = sum.d.count > 1 ? 5 : 3;
        s = g->rt.run(g->rt.self, &work, stream);
    }
    if (!s) s = gmm__mark_record(g, &slot->last_use, stream);
    if (!s) s = gmm__mark_record(g, &b->done, stream);
    return s ? s : gmm__watch_end(g, d, GMM__GTP_REDUCE, watch, d->size > 1 ? c : NULL,
                                  exchange ? "all_to_all" : "reduce_scatter", b->name);
}

GMMDEF gmm_status gmm_gtp_submit(gmm_gtp *gtp, int32_t bundle, const gmm_gtp_gradient *gradient, gmm_stream stream) {
    static const char fn[] = "gmm_gtp_submit";
    gmm_gtp_gradient in;
    gmm_mat from = GMM_ZERO;
    gmm__gtp_bundle *b;
    gmm__gtp_domain *d;
    gmm__wgrad_slot *slot;
    int32_t i;
    gmm_status s = gmm__gtp_open_bundle(gtp, fn, bundle);
    if (!s) s = gmm__gtp_open(fn, "gradient", gradient, &in, sizeof in, &gtp->error);
    if (!s && in.from) s = gmm__gtp_open(fn, "gradient->from", in.from, &from, sizeof from, &gtp->error);
    if (s) return s;
    b = &gtp->bundles[bundle];
    d = &gtp->domains[b->domain];
    if (b->wslot < 0) return gmm__fail(&gtp->error, GMM_E_STATE, "%s: '%s' is frozen", fn, b->name);
    slot = &gtp->wslots[b->wslot];
    if ((in.add != GMM_GTP_ADD && in.add != GMM_GTP_SET) || in.zero < 0 || in.zero > 1 || (in.zero && in.from))
        return gmm__fail(&gtp->error, GMM_E_ARG, "%s: '%s': add %d, zero %d, from %s: must be a gmm_gtp_add, 0 or 1, "
                         "not both", fn, b->name, (int)in.add, in.zero, in.from ? "given" : "NULL");
    if (in.zero || in.from) {
        if (slot->writer >= 0)
            return gmm__fail(&gtp->error, GMM_E_STATE, "%s: '%s': its buffer is in use by '%s', which is not submitted",
                             fn, b->name, gtp->bundles[slot->writer].name);
    } else if (slot->writer != bundle)
        return gmm__fail(&gtp->error, GMM_E_STATE, "%s: '%s': no buffer was asked for", fn, b->name);
    if (in.from) {
        if ((from.dtype != GMM_F32 && from.dtype != GMM_BF16 && from.dtype != GMM_F16) || from.scaling)
            return gmm__fail(&gtp->error, GMM_E_DTYPE, "%s: '%s': from is %s: must be f32, bf16 or f16", fn, b->name,
                             gmm_dtype_name(from.dtype));
        if (!from.data == !from.table)
            return gmm__fail(&gtp->error, GMM_E_NULL, "%s: '%s': from has %s", fn, b->name,
                             from.data ? "data and a table" : "neither data nor a table");
        for (i = 0; i < b->count; i++) {
            const gmm_shard_plan *p = &gmm__gtp_member(gtp, b, i)->plan;
            if (from.table && !from.table[i])
                return gmm__fail(&gtp->error, GMM_E_NULL, "%s: '%s': from->table[%d] is NULL", fn, b->name, i);
            if ((from.ld && from.ld < p->local_cols) || (from.data && b->count > 1 && !b->uniform))
                return gmm__fail(&gtp->error, GMM_E_STRIDE, "%s: '%s': from: ld %lld is below %lld columns, or packed "
                                 "with different shapes", fn, b->name, (long long)from.ld, (long long)p->local_cols);
            if (from.data && b->count > 1 && from.group_stride &&
                from.group_stride < (p->local_rows - 1) * (from.ld ? from.ld : p->local_cols) + p->local_cols)
                return gmm__fail(&gtp->error, GMM_E_STRIDE, "%s: '%s': from: group_stride %lld is less than a matrix",
                                 fn, b->name, (long long)from.group_stride);
            if ((uintptr_t)(from.table ? from.table[i] : from.data) % (uintptr_t)(gmm_dtype_bits(from.dtype) / 8))
                return gmm__fail(&gtp->error, GMM_E_ALIGN, "%s: '%s': from: %p is not aligned to its %s elements", fn,
                                 b->name, from.table ? from.table[i] : from.data, gmm_dtype_name(from.dtype));
        }
    }
    gmm__gtp_hash(gtp, 3, bundle, (int)in.add);
    gtp->stats.submits++;
    if (in.zero || in.from) {
        gmm_gtp_view unused = GMM_ZERO;
        if ((s = gmm_gtp_wgrad(gtp, bundle, stream, &unused)) != GMM_OK) return s;
        s = gmm__gtp_fill_gradient(gtp, b, in.from ? &from : NULL, stream);
    }
    if (!s) s = gmm__gtp_use_stream(gtp, d, GMM__GTP_REDUCE);
    if (!s) s = gtp->rt.event_record(gtp->rt.self, d->fork[GMM__GTP_REDUCE], stream, 0);
    if (!s) s = gtp->rt.stream_wait(gtp->rt.self, d->desc.reduce_stream, d->fork[GMM__GTP_REDUCE], 0);
    if (!s) s = gmm__gtp_reduce(gtp, bundle, in.scale, in.add);
    slot->writer = -1;
    if (!s && d->desc.synchronous) s = gmm__mark_wait(gtp, &b->done, stream);
    if (s) return gmm__gtp_break(gtp, fn, b->name, s);
    if (gtp->dry) return GMM_OK;
    if (gtp->graph) gtp->graph_use[(gtp->graph - 1) * gtp->bundle_count + bundle] |= GMM__GRAPH_ADDS;
    else if (gtp->config.hooks.ready) {
        gtp->calling_back = 1;
        gtp->config.hooks.ready(gtp->config.hooks.user, gtp, gtp->members + b->first, b->count, d->desc.reduce_stream);
        gtp->calling_back = 0;
    }
    return GMM_OK;
}

/* `stream` waits for what a domain's stream was given; in a capture, for what it was given there. */
static gmm_status gmm__gtp_join(gmm_gtp *g, gmm__gtp_domain *d, int which, gmm_stream stream) {
    gmm_status s;
    if (!d->used[which] || (g->graph && d->joined[which] != g->graph)) return GMM_OK;
    s = g->rt.event_record(g->rt.self, d->join[which], gmm__gtp_stream(d, which), 0);
    return s ? s : g->rt.stream_wait(g->rt.self, stream, d->join[which], 0);
}

/* `stream` waits for replays on other streams: each is over as a whole. */
static gmm_status gmm__gtp_fence_replays(gmm_gtp *g, gmm_stream stream) {
    gmm_status s = GMM_OK;
    int32_t i;
    for (i = 0; i < g->graph_count && !s && !g->graph; i++)
        if (g->graph_watch[i].replayed && g->graph_watch[i].stream != stream)
            s = g->rt.stream_wait(g->rt.self, stream, g->graph_end[i], 0);
    return s;
}

/* `stream` waits for all reads of shards. */
static gmm_status gmm__gtp_fence_gathers(gmm_gtp *g, gmm_stream stream) {
    gmm_status s = gmm__gtp_fence_replays(g, stream);
    int32_t i;
    for (i = 0; i < g->domain_count && !s; i++) s = gmm__gtp_join(g, &g->domains[i], GMM__GTP_GATHER, stream);
    for (i = 0; i < g->bundle_count && !s; i++) {
        gmm__gtp_bundle *b = &g->bundles[i];
        b->asked = 0; /* the shards may change from here on */
        if (!g->graph || b->in_place.graph == g->graph)
            s = gmm__mark_wait(g, &b->in_place, stream); /* shards that were read as they are */
    }
    return s;
}

GMMDEF gmm_status gmm_gtp_fence(gmm_gtp *gtp, uint32_t what, gmm_stream stream) {
    static const char fn[] = "gmm_gtp_fence";
    int32_t i;
    gmm_status s = gmm__gtp_open_call(gtp, fn, 0);
    if (s) return s;
    if (what == 0 || (what & ~(uint32_t)GMM_GTP_ALL))
        return gmm__fail(&gtp->error, GMM_E_ARG, "%s: what is 0x%x: must be an OR of GMM_GTP_GATHERS and GRADIENTS", fn,
                         what);
    for (i = 0; i < gtp->domain_count && !s && (what & (uint32_t)GMM_GTP_GRADIENTS); i++)
        s = gmm__gtp_join(gtp, &gtp->domains[i], GMM__GTP_REDUCE, stream);
    if (!s) s = what & (uint32_t)GMM_GTP_GATHERS ? gmm__gtp_fence_gathers(gtp, stream)
                                                 : gmm__gtp_fence_replays(gtp, stream);
    return s ? gmm__gtp_break(gtp, fn, "all domains", s) : GMM_OK;
}

/* Raises values to the largest of a domain's ranks, and of further ones. */
static gmm_status gmm__gtp_raise(gmm_gtp *g, gmm__gtp_domain *d, const gmm_comm *also, float *values, int32_t count,
                                 gmm_stream stream) {
    const int several = d->size > 1;
    const gmm_stream on = several ? d->desc.gather_stream : stream;
    gmm__watch *watch = NULL;
    gmm_status s = GMM_OK;
    int k;
    if (count == 0 || (!several && !also)) return GMM_OK;
    if (several) {
        s = gmm__gtp_use_stream(g, d, GMM__GTP_GATHER);
        if (!s) s = g->rt.event_record(g->rt.self, d->fork[GMM__GTP_GATHER], stream, 0);
        if (!s) s = g->rt.stream_wait(g->rt.self, on, d->fork[GMM__GTP_GATHER], 0);
        if (!s) s = gmm__watch_begin(g, d, GMM__GTP_GATHER, &watch);
    }
    for (k = 0; k < 2 && !s; k++) {
        const gmm_comm *c = k ? also : several ? &d->gather : NULL;
        if (!c) continue;
        gmm__gtp_calls(g, d, "all_reduce_max");
        s = c->group_begin(c->self, "amax");
        if (!s) s = c->all_reduce_max(c->self, values, (size_t)count, on);
        if (!s) s = c->group_end(c->self);
        if (!s) g->calls = NULL;
    }
    if (!s) s = gmm__watch_end(g, d, GMM__GTP_GATHER, watch, &d->gather, "all_reduce_max", "amax");
    return s || !several ? s : gmm__gtp_join(g, d, GMM__GTP_GATHER, stream);
}

GMMDEF gmm_status gmm_gtp_amax(gmm_gtp *gtp, int32_t domain, float *values, int32_t count, gmm_stream stream) {
    static const char fn[] = "gmm_gtp_amax";
    gmm__gtp_domain *d;
    gmm_status s = gmm__gtp_open_call(gtp, fn, GMM__GTP_NO_CAPTURE);
    if (s) return s;
    if (domain < 0 || domain >= gtp->domain_count || count < 0)
        return gmm__fail(&gtp->error, GMM_E_ARG, "%s: domain %d of %d, count %d: must exist, and >= 0", fn, domain,
                         gtp->domain_count, count);
    if (!values && count) return gmm__fail(&gtp->error, GMM_E_NULL, "%s: values is NULL", fn);
    if ((uintptr_t)values % sizeof *values)
        return gmm__fail(&gtp->error, GMM_E_ALIGN, "%s: values %p is not aligned to fp32", fn, (void *)values);
    d = &gtp->domains[domain];
    gmm__gtp_hash(gtp, 4, domain, 0);
    s = gmm__gtp_raise(gtp, d, NULL, values, count, stream);
    return s ? gmm__gtp_break(gtp, fn, "amax", s) : GMM_OK;
}

/* Has the amax of one weight found (phase AMAX), or its shard written. `at`: its place in the call. */
static gmm_status gmm__gtp_enqueue_cast(gmm_gtp *g, const gmm__gtp_weight *w, const gmm_gtp_quantization *q,
                                        int32_t at, float *amax, gmm_quant_phase phase, gmm_stream stream) {
    const gmm__gtp_domain *d = &g->domains[g->bundles[w->bundle].domain];
    const size_t elements = (size_t)w->plan.shard_rows * (size_t)w->plan.local_cols;
    gmm__gtp_cast c = gmm__gtp_cast_of(g, w, q->dtype, q->from[at]);
    gmm_range ranges[8];
    gmm_work work;
    int32_t n = 0;
    int k;
    memset(ranges, 0, sizeof ranges);
    memset(&work, 0, sizeof work);
    c.d.phase = phase;
    c.d.scale = w->format.delayed && q->scale ? q->scale + at : NULL;
    c.copy[GMM_ROWWISE].amax = c.copy[GMM_COLUMNWISE].amax = amax;
    c.workspace = d->gather_base ? d->gather_base + d->cast_at : NULL;
    c.workspace_bytes = d->cast_bytes;
    ranges[n].data = c.src.data;
    ranges[n++].bytes = elements * (size_t)gmm_dtype_bits(q->dtype) / 8;
    for (k = GMM_ROWWISE; k <= GMM_COLUMNWISE && phase != GMM_QUANT_AMAX; k++) {
        ranges[n].data = c.wanted[k] ? w->desc.data[k] : NULL;
        ranges[n].bytes = (size_t)w->plan.shard_data_bytes[k];
        ranges[n++].writes = 1;
        ranges[n].data = c.wanted[k] ? w->desc.scale[k] : NULL;
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
    return g->rt.run(g->rt.self, &work, stream);
}

/* What gmm_gtp_quantize can find wrong before it begins. */
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
    if (q->also && q->also->struct_size && q->also->struct_size != sizeof *q->also)
        return gmm__fail(&g->error, GMM_E_VERSION, "%s: also->struct_size is %u: must be 0 or %u", fn,
                         q->also->struct_size, (unsigned)sizeof *q->also);
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
    gmm_gtp_quantization q;
    int32_t i, k, n, pass;
    gmm_status s = gmm__gtp_open_call(gtp, fn, GMM__GTP_NO_CAPTURE);
    if (!s) s = gmm__gtp_open(fn, "quantization", quantization, &q, sizeof q, &gtp->error);
    if (!s) s = gmm__gtp_list(gtp, fn, weights, count);
    if (!s) s = gmm__gtp_check_cast(gtp, fn, weights, count, &q);
    if (s) return s;
    gmm__gtp_hash(gtp, 5, count, 0);
    s = gmm__gtp_fence_gathers(gtp, stream);
    for (k = 0; k < gtp->domain_count && !s; k++) s = gmm__mark_wait(gtp, &gtp->domains[k].cast, stream);
    for (pass = 0; pass < 2 && !s; pass++) /* amaxes, reduced once for each domain; then shards */
        for (k = 0; k < gtp->domain_count && !s; k++) {
            gmm__gtp_domain *d = &gtp->domains[k];
            float *values = d->gather_base ? (float *)(void *)(d->gather_base + d->amax_at) : NULL;
            for (i = 0, n = 0; i < count && !s; i++) {
                const gmm__gtp_weight *w = &gtp->weights[weights[i]];
                const int by_amax = gmm__gtp_by_amax(w);
                if (gtp->bundles[w->bundle].domain != k) continue;
                if (by_amax) {
                    s = gmm__gtp_enqueue_cast(gtp, w, &q, i, values + n, pass ? GMM_QUANT_CAST : GMM_QUANT_AMAX,
                                              stream);
                    if (!s && pass && w->desc.amax)
                        s = gtp->rt.copy(gtp->rt.self, w->desc.amax, values + n, sizeof(float), stream);
                    n++;
                } else if (pass) {
                    s = gmm__gtp_enqueue_cast(gtp, w, &q, i, w->format.delayed && q.amax ? q.amax + i : NULL,
                                              GMM_QUANT_ALL, stream);
                }
            }
            if (!s && !pass) s = gmm__gtp_raise(gtp, d, q.also, values, n, stream);
            for (i = 0; i < count && pass && q.amax && !s; i += n ? n : 1) { /* delayed: runs of neighbours */
                for (n = 0; i + n < count; n++) {
                    const gmm__gtp_weight *w = &gtp->weights[weights[i + n]];
                    if (!w->format.delayed || gtp->bundles[w->bundle].domain != k) break;
                }
                s = gmm__gtp_raise(gtp, d, q.also, q.amax + i, n, stream);
            }
        }
    for (k = 0; k < gtp->domain_count && !s; k++) s = gmm__mark_record(gtp, &gtp->domains[k].cast, stream);
    if (!s) s = gmm__gtp_published(gtp, weights, count, stream);
    return s ? gmm__gtp_break(gtp, fn, "shards", s) : GMM_OK;
}

/* One watched collective: over, or for how long. */
static gmm_status gmm__watch_look(gmm_gtp *g, gmm__watch *w, double now) {
    int32_t done = 0;
    gmm_status s;
    if (!w->end) return GMM_OK;
    s = g->rt.event_query(g->rt.self, w->end, &done);
    if (s || done) {
        w->end = NULL;
        return s;
    }
    if (!w->seen) {
        s = g->rt.event_query(g->rt.self, w->begin, &done);
        w->seen = done;
        w->since = now;
        return s;
    }
    return now - w->since > 1e-3 * (double)g->config.timeout_ms ? GMM_E_COMM : GMM_OK;
}

GMMDEF gmm_status gmm_gtp_poll(gmm_gtp *gtp) {
    static const char fn[] = "gmm_gtp_poll";
    const double now = gmm__gtp_now();
    gmm_status s = gmm__gtp_open_call(gtp, fn, GMM__GTP_NO_CAPTURE);
    gmm__watch *w = NULL;
    int32_t i;
    if (s) return s;
    for (i = 0; i < gtp->domain_count; i++) {
        const gmm__gtp_domain *d = &gtp->domains[i];
        if (d->size > 1 && ((s = d->gather.poll(d->gather.self, NULL)) != GMM_OK ||
                            (s = d->reduce.poll(d->reduce.self, NULL)) != GMM_OK))
            return gmm__gtp_break(gtp, fn, "communicator", s);
    }
    for (i = 0; i < 2 * gtp->domain_count && !s; i++) {
        gmm__gtp_domain *d = &gtp->domains[i / 2];
        const int which = i % 2;
        while (d->oldest[which] != d->next[which] && !s) {
            w = &d->watch[which][d->oldest[which] % GMM__WATCHES];
            s = gmm__watch_look(gtp, w, now);
            if (w->end) break;
            d->oldest[which]++;
        }
    }
    for (i = 0; i < gtp->graph_count && !s; i++) s = gmm__watch_look(gtp, w = &gtp->graph_watch[i], now);
    if (s == GMM_E_COMM && w->end) { /* over time: say so to all, with the peer if the communicator knows */
        gmm_error who = GMM_ZERO;
        char text[400];
        if (w->comm) (void)w->comm->poll(w->comm->self, &who);
        (void)snprintf(text, sizeof text, "%s of '%.60s' is not done after %d ms: %.200s", w->what, w->name,
                       gtp->config.timeout_ms, who.text[0] ? who.text : "a peer is missing");
        gmm__gtp_give_up(gtp, text);
        return gmm__gtp_break(gtp, fn, w->name, s);
    }
    return s ? gmm__gtp_break(gtp, fn, w ? w->name : "", s) : GMM_OK;
}

/* .............................................................................................. Runtime: graphs ... */

GMMDEF gmm_status gmm_gtp_dry_run(gmm_gtp *gtp, int32_t on) {
    static const char fn[] = "gmm_gtp_dry_run";
    const char *left = NULL, *what = "";
    int32_t i;
    gmm_status s = gmm__gtp_open_call(gtp, fn, GMM__GTP_NO_CAPTURE);
    if (s) return s;
    if (on == gtp->dry || on < 0 || on > 1)
        return gmm__fail(&gtp->error, GMM_E_STATE, "%s: on is %d: a dry run is %s", fn, on,
                         gtp->dry ? "under way" : "not under way");
    gtp->dry = on;
    for (i = 0; i < gtp->bundle_count && !on; i++) {
        gmm__gtp_bundle *b = &gtp->bundles[i];
        if (b->held) left = b->name, what = "still held";
        b->held = 0;
        b->asked = 0; /* nobody was */
    }
    for (i = 0; i < gtp->slot_count && !on; i++) gtp->slots[i].holders = 0;
    for (i = 0; i < gtp->wslot_count && !on; i++) {
        if (gtp->wslots[i].writer >= 0) left = gtp->bundles[gtp->wslots[i].writer].name, what = "not submitted";
        gtp->wslots[i].writer = -1;
    }
    return left ? gmm__fail(&gtp->error, GMM_E_STATE, "%s: '%s' was %s", fn, left, what) : GMM_OK;
}

GMMDEF gmm_status gmm_gtp_capture_begin(gmm_gtp *gtp, gmm_stream stream, int32_t *graph) {
    static const char fn[] = "gmm_gtp_capture_begin";
    int32_t capturing = 0, i;
    gmm_status s = gmm__gtp_open_call(gtp, fn, 0);
    if (s) return s;
    if (!graph) return gmm__fail(&gtp->error, GMM_E_NULL, "%s: graph is NULL", fn);
    if (gtp->graph) return gmm__fail(&gtp->error, GMM_E_STATE, "%s: graph %d is being captured", fn,
                                     gtp->graph - 1);
    if (gtp->dry) return gmm__fail(&gtp->error, GMM_E_STATE, "%s: a dry run is under way", fn);
    if (gtp->graph_count == gtp->config.graphs)
        return gmm__fail(&gtp->error, GMM_E_WORKSPACE, "%s: config->graphs is %d: no room for more", fn,
                         gtp->config.graphs);
    s = gtp->rt.is_capturing(gtp->rt.self, stream, &capturing);
    if (s) return gmm__gtp_break(gtp, fn, "stream", s);
    if (!capturing) return gmm__fail(&gtp->error, GMM_E_CAPTURE, "%s: the stream is not capturing", fn);
    for (i = 0; i < gtp->slot_count; i++)
        if (gtp->slots[i].captured && gtp->slots[i].holders && gtp->slots[i].graph == 0)
            return gmm__fail(&gtp->error, GMM_E_STATE, "%s: '%s' is held since before the capture", fn,
                             gtp->bundles[gtp->slots[i].bundle].name);
    gtp->graph = ++gtp->graph_count;
    gtp->graph_stream = stream;
    for (i = 0; i < gtp->bundle_count; i++)
        if (gtp->bundles[i].captured) gtp->bundles[i].asked = 0;
    s = gtp->rt.event_record(gtp->rt.self, gtp->graph_begin, stream, 0);
    if (s) return gmm__gtp_break(gtp, fn, "graph", s);
    *graph = gtp->graph - 1;
    return GMM_OK;
}

GMMDEF gmm_status gmm_gtp_capture_end(gmm_gtp *gtp, gmm_stream stream) {
    static const char fn[] = "gmm_gtp_capture_end";
    int32_t i;
    int k;
    gmm_status s = gmm__gtp_open_call(gtp, fn, 0);
    if (s) return s;
    if (!gtp->graph || gtp->graph_stream != stream)
        return gmm__fail(&gtp->error, GMM_E_STATE, "%s: no capture began on this stream", fn);
    for (i = 0; i < gtp->domain_count; i++)
        for (k = 0; k < 2 && !s; k++) s = gmm__gtp_join(gtp, &gtp->domains[i], k, stream);
    for (i = 0; i < gtp->bundle_count; i++)
        if (gtp->bundles[i].captured) gtp->bundles[i].asked = 0;
    gtp->graph = 0;
    return s ? gmm__gtp_break(gtp, fn, "graph", s) : GMM_OK;
}

GMMDEF gmm_status gmm_gtp_pre_replay(gmm_gtp *gtp, int32_t graph, gmm_stream stream) {
    static const char fn[] = "gmm_gtp_pre_replay";
    int32_t i;
    gmm_status s = gmm__gtp_open_call(gtp, fn, GMM__GTP_NO_CAPTURE);
    if (s) return s;
    if (graph < 0 || graph >= gtp->graph_count)
        return gmm__fail(&gtp->error, GMM_E_ARG, "%s: graph %d: there are %d", fn, graph, gtp->graph_count);
    for (i = 0; i < gtp->slot_count; i++)
        if (gtp->slots[i].captured && gtp->slots[i].graph == 0 && gtp->slots[i].holders)
            return gmm__fail(&gtp->error, GMM_E_STATE, "%s: '%s' is held, and graph %d may write its slot", fn,
                             gtp->bundles[gtp->slots[i].bundle].name, graph);
    for (i = 0; i < gtp->slot_count; i++) /* what was gathered outside of graphs will be gone */
        if (gtp->slots[i].captured && gtp->slots[i].graph == 0) gtp->slots[i].bundle = -1;
    for (i = 0; i < gtp->bundle_count && !s; i++) {
        gmm__gtp_bundle *b = &gtp->bundles[i];
        const int use = gtp->graph_use[graph * gtp->bundle_count + i];
        if (use & GMM__GRAPH_NEEDS) gmm__gtp_ask(gtp, b);
        b->asked = use & GMM__GRAPH_NEEDS ? 0 : b->asked;
        if (use & (GMM__GRAPH_NEEDS | GMM__GRAPH_READS)) s = gmm__mark_wait(gtp, &b->published, stream);
    }
    gtp->graph_watch[graph].end = NULL;
    if (!s) s = gtp->rt.event_record(gtp->rt.self, gtp->graph_watch[graph].begin, stream, 0);
    return s ? gmm__gtp_break(gtp, fn, "graph", s) : GMM_OK;
}

GMMDEF gmm_status gmm_gtp_post_replay(gmm_gtp *gtp, int32_t graph, gmm_stream stream) {
    static const char fn[] = "gmm_gtp_post_replay";
    int32_t i;
    gmm_status s = gmm__gtp_open_call(gtp, fn, GMM__GTP_NO_CAPTURE);
    if (s) return s;
    if (graph < 0 || graph >= gtp->graph_count)
        return gmm__fail(&gtp->error, GMM_E_ARG, "%s: graph %d: there are %d", fn, graph, gtp->graph_count);
    s = gtp->rt.event_record(gtp->rt.self, gtp->graph_end[graph], stream, 0);
    if (s) return gmm__gtp_break(gtp, fn, "graph", s);
    gtp->graph_watch[graph].end = gtp->graph_end[graph];
    gtp->graph_watch[graph].seen = 0;
    gtp->graph_watch[graph].what = "replay";
    gtp->graph_watch[graph].name = "graph";
    gtp->graph_watch[graph].replayed = 1;
    gtp->graph_watch[graph].stream = stream;
    for (i = 0; i < gtp->bundle_count && gtp->config.hooks.ready && !gtp->dry; i++) {
        const gmm__gtp_bundle *b = &gtp->bundles[i];
        if (!(gtp->graph_use[graph * gtp->bundle_count + i] & GMM__GRAPH_ADDS)) continue;
        gtp->calling_back = 1;
        gtp->config.hooks.ready(gtp->config.hooks.user, gtp, gtp->members + b->first, b->count, stream);
        gtp->calling_back = 0;
    }
    return GMM_OK;
}

GMMDEF gmm_status gmm_gtp_statistics_of(const gmm_gtp *gtp, gmm_gtp_statistics *out) {
    gmm_status s = GMM_OK;
    gmm_gtp_statistics full;
    size_t known;
    if (!gtp) return GMM_E_NULL;
    known = gmm__gtp_known("gmm_gtp_statistics_of", "out", out, sizeof *out, &s, NULL);
    if (s) return s;
    full = gtp->stats;
    full.struct_size = out->struct_size;
    memcpy(out, &full, known);
    return GMM_OK;
}

/* ......................................................................................... Checkpoints: moves ... */

/* How one array of a copy lies: units of per[0] rows by per[1] columns of the matrix, `step` apart along either;
   extents count units, padding included. */
typedef struct gmm__gtp_array {
    gmm_dtype dtype;
    int32_t lead;     /* axis of the matrix along which rows of the array follow one another */
    int64_t per[2], step[2], extent[2];
    int64_t shape[2]; /* of its tensor */
} gmm__gtp_array;

/* One side of an item: the shard with defaults, its plan, extents and arrays. */
typedef struct gmm__gtp_side {
    gmm_shard shard;
    gmm_shard_plan plan;
    gmm__gtp_array array[2]; /* [DATA, SCALE] */
    gmm_extent *extents;
    int32_t count;
} gmm__gtp_side;

typedef struct gmm__gtp_planner {
    const char *fn;
    const char *key;             /* the item at work */
    int exports;
    const gmm_ckpt_part *parts;
    int32_t part_count;
    gmm_allocator allocator;
    gmm_ckpt_report *report;
    gmm_ckpt_tensor *targets;
    int64_t target_count;
    gmm_ckpt_move *moves;
    size_t move_count, move_room;
    gmm_extent *extents[2];      /* of the target, of what is stored */
    int32_t room[2];
} gmm__gtp_planner;

static gmm_status gmm__gtp_refuse(gmm__gtp_planner *p, gmm_status status, gmm_ckpt_reason reason, const char *format,
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

/* Rows and columns of the matrix to one scale of a copy. */
static void gmm__gtp_scale_per(gmm_scaling scaling, gmm_direction direction, int64_t per[2]) {
    const int64_t block = scaling == GMM_SCALING_MX32 ? 32 : scaling == GMM_SCALING_NV16 ? 16 : 128;
    per[0] = per[1] = scaling == GMM_SCALING_128X128 ? 128 : 1;
    per[direction == GMM_ROWWISE] = block;
}

/* The arrays of the side's copy, as memory has them: scales padded. */
static gmm_status gmm__gtp_arrays(gmm__gtp_planner *p, gmm__gtp_side *side, gmm_direction direction) {
    const gmm_shard *s = &side->shard;
    const gmm_direction d = s->scaling == GMM_SCALING_NONE ? GMM_ROWWISE : direction;
    gmm__gtp_array *data = &side->array[GMM__GTP_DATA], *scale = &side->array[GMM__GTP_SCALE];
    gmm_layout l = GMM_ZERO;
    gmm_error why = GMM_ZERO;
    const gmm_status status = gmm_layout_of(s->dtype, s->scaling, GMM_SCALES_COMPACT, d, side->plan.shard_rows,
                                            side->plan.local_cols, &l, &why);
    const int64_t pack = gmm_dtype_bits(s->dtype) < 8 ? 8 / gmm_dtype_bits(s->dtype) : 1;
    int64_t unused = 0;
    int lead;
    if (status) return gmm__gtp_refuse(p, status, GMM_CKPT_DTYPE, "%.300s", why.text);
    memset(side->array, 0, sizeof side->array);
    data->dtype = s->dtype;
    data->shape[0] = l.data_rows;
    data->shape[1] = l.data_cols;
    data->lead = lead = l.transposed;
    data->per[lead] = 1;
    data->per[!lead] = pack;
    data->extent[lead] = l.data_rows;
    data->extent[!lead] = l.data_cols / pack;
    data->step[lead] = data->extent[!lead];
    data->step[!lead] = 1;
    if (s->scaling == GMM_SCALING_NONE) return GMM_OK;
    scale->dtype = l.scale_dtype;
    if (s->scaling == GMM_SCALING_TENSOR) {
        scale->dtype = GMM_F32;
        scale->shape[0] = scale->shape[1] = 1;
        return GMM_OK;
    }
    gmm__gtp_scale_per(s->scaling, d, scale->per);
    scale->lead = lead = !gmm__gtp_scale_axis(s->scaling, (int)d, &unused);
    scale->shape[0] = l.scale_rows;
    scale->shape[1] = l.scale_cols;
    scale->extent[lead] = l.scale_rows;
    scale->extent[!lead] = l.scale_cols;
    scale->step[lead] = l.scale_cols;
    scale->step[!lead] = 1;
    return GMM_OK;
}

/* Takes an array for one without padding. */
static void gmm__gtp_unpad(const gmm__gtp_side *side, gmm__gtp_array *a) {
    a->extent[0] = gmm__ceil_div(side->plan.shard_rows, a->per[0]);
    a->extent[1] = gmm__ceil_div(side->plan.local_cols, a->per[1]);
    a->shape[0] = a->extent[a->lead];
    a->shape[1] = a->step[a->lead] = a->extent[!a->lead];
}

/* Opens a side; `which` of the extents' room it takes. */
static gmm_status gmm__gtp_open_side(gmm__gtp_planner *p, const gmm_shard *shard, gmm_direction direction, int which,
                                     gmm__gtp_side *side) {
    gmm_error why = GMM_ZERO;
    gmm_status status = gmm__gtp_solve(p->fn, shard, &side->shard, &side->plan, &why);
    if (status) {
        const size_t skip = strlen(p->fn) + 2; /* the name comes again */
        return gmm__gtp_refuse(p, status, GMM_CKPT_ARGUMENT, "%.300s", strlen(why.text) > skip ? why.text + skip : "");
    }
    side->shard.struct_size = 0;
    status = gmm_gtp_extents(&side->shard, NULL, 0, &side->count, NULL);
    if (!status && side->count > p->room[which]) {
        gmm__gtp_free(p, p->extents[which]);
        p->room[which] = 0;
        p->extents[which] = (gmm_extent *)gmm__gtp_alloc(p, (size_t)side->count * sizeof *side->extents);
        if (!p->extents[which]) return gmm__gtp_refuse(p, GMM_E_MEMORY, GMM_CKPT_NO_MEMORY, "no memory");
        p->room[which] = side->count;
    }
    side->extents = p->extents[which];
    if (!status && side->count)
        status = gmm_gtp_extents(&side->shard, side->extents, side->count, &side->count, NULL);
    return status ? status : gmm__gtp_arrays(p, side, direction);
}

static gmm_status gmm__gtp_push(gmm__gtp_planner *p, const gmm_ckpt_move *m) {
    if (p->move_count == p->move_room) {
        const size_t room = p->move_room ? 2 * p->move_room : 64;
        gmm_ckpt_move *more = (gmm_ckpt_move *)gmm__gtp_alloc(p, room * sizeof *more);
        if (!more) return gmm__gtp_refuse(p, GMM_E_MEMORY, GMM_CKPT_NO_MEMORY, "no memory");
        if (p->move_count) memcpy(more, p->moves, p->move_count * sizeof *more);
        gmm__gtp_free(p, p->moves);
        p->moves = more;
        p->move_room = room;
    }
    p->moves[p->move_count++] = *m;
    return GMM_OK;
}

/* Units of a box along one axis: where they begin, and how many. 0 if a boundary cuts one: only the end of everything
   may lie inside. */
static int gmm__gtp_units(int64_t at, int64_t length, int64_t all, int64_t per, int64_t *first, int64_t *count) {
    *first = at / per;
    *count = gmm__ceil_div(length, per);
    return at % per == 0 && (length % per == 0 || at + length == all);
}

/* Moves one box of an array: rows at src[0] and dst[0] of the two sides, columns at src[1] and dst[1]. */
static gmm_status gmm__gtp_box(gmm__gtp_planner *p, const gmm_gtp_stored *from, const gmm__gtp_side *s,
                               const gmm__gtp_side *d, int32_t target, int part, const int64_t src[2],
                               const int64_t dst[2], const int64_t length[2]) {
    const gmm__gtp_array *a = &s->array[part], *b = &d->array[part];
    const int64_t all[2][2] = {{s->plan.valid_rows, s->plan.local_cols}, {d->plan.valid_rows, d->plan.local_cols}};
    gmm_ckpt_move m = GMM_ZERO;
    int k;
    m.kind = part == GMM__GTP_SCALE || a->dtype == b->dtype ? GMM_CKPT_COPY : GMM_CKPT_CONVERT;
    if (s->shard.scaling != d->shard.scaling) {
        m.kind = GMM_CKPT_DEQUANT;
        m.scaling = s->shard.scaling;
    }
    m.part = from->part;
    m.src = part == GMM__GTP_DATA ? from->data : from->scale;
    m.scale = m.kind == GMM_CKPT_DEQUANT ? from->scale : -1;
    m.dst = target;
    m.loops = 2;
    for (k = 0; k < 2; k++) {
        int64_t begin[2], count[2];
        if (!gmm__gtp_units(src[k], length[k], all[0][k], a->per[k], &begin[0], &count[0]) ||
            !gmm__gtp_units(dst[k], length[k], all[1][k], b->per[k], &begin[1], &count[1]))
            return gmm__gtp_refuse(p, GMM_E_CONFIG, GMM_CKPT_NOT_DIVISIBLE, "%lld %s from %lld of what is stored to "
                                   "%lld of the target cut blocks of %lld in %s: import into 16 bits, and quantize",
                                   (long long)length[k], k ? "columns" : "rows", (long long)src[k], (long long)dst[k],
                                   (long long)a->per[k], gmm_scaling_name(s->shard.scaling));
        m.src_at += begin[0] * a->step[k];
        m.dst_at += begin[1] * b->step[k];
        m.count[k] = count[1];
        m.src_step[k] = a->step[k];
        m.dst_step[k] = b->step[k];
    }
    return gmm__gtp_push(p, &m);
}

/* Zeros what lies behind the valid units of a target: whole rows of units, then the rest of the others. */
static gmm_status gmm__gtp_zeros(gmm__gtp_planner *p, const gmm__gtp_side *d, int32_t target, int part) {
    const gmm__gtp_array *a = &d->array[part];
    const int64_t used[2] = {gmm__ceil_div(d->plan.valid_rows, a->per[0]),
                             gmm__ceil_div(d->plan.local_cols, a->per[1])};
    int k, l;
    for (k = 0; k < 2; k++) {
        gmm_ckpt_move m = GMM_ZERO;
        gmm_status status;
        m.kind = GMM_CKPT_ZERO;
        m.src = m.scale = -1;
        m.dst = target;
        m.dst_at = used[k] * a->step[k];
        m.loops = 2;
        for (l = 0; l < 2; l++) {
            m.count[l] = l == k ? a->extent[l] - used[l] : k == 0 ? a->extent[l] : used[l];
            m.dst_step[l] = a->step[l];
        }
        if (m.count[0] < 1 || m.count[1] < 1) continue;
        status = gmm__gtp_push(p, &m);
        if (status) return status;
    }
    return GMM_OK;
}

/* Whether two shards are of one weight, as far as rows and columns go. */
static int gmm__gtp_same_weight(const gmm_shard *a, const gmm_shard *b) {
    int32_t i;
    if (a->rows != b->rows || a->cols != b->cols || a->sections != b->sections) return 0;
    for (i = 0; i < a->sections; i++)
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
        return gmm__gtp_refuse(p, GMM_E_KEY, GMM_CKPT_SHAPE, "stored[%d] is of a weight of %lld x %lld in %d sections, "
                               "not of %lld x %lld in %d with these rows", j, (long long)s->shard.rows,
                               (long long)s->shard.cols, s->shard.sections, (long long)d->shard.rows,
                               (long long)d->shard.cols, (int)d->shard.sections);
    if (dequant ? scaling != GMM_SCALING_128X128 || d->shard.scaling != GMM_SCALING_NONE || item->direction
                : scaling != GMM_SCALING_NONE && s->shard.dtype != d->shard.dtype)
        return gmm__gtp_refuse(p, GMM_E_DTYPE, GMM_CKPT_DTYPE, "stored[%d] is %s %s, which does not become %s %s by "
                               "copies: import into 16 bits, and quantize", j, gmm_dtype_name(s->shard.dtype),
                               gmm_scaling_name(scaling), gmm_dtype_name(d->shard.dtype),
                               gmm_scaling_name(d->shard.scaling));
    if (x->reserved || x->part < 0 || x->part >= p->part_count)
        return gmm__gtp_refuse(p, GMM_E_ARG, GMM_CKPT_ARGUMENT, "stored[%d]: part %d of %d, reserved %d: must be in "
                               "range, and 0", j, (int)x->part, p->part_count, (int)x->reserved);
    for (part = GMM__GTP_DATA; part <= GMM__GTP_SCALE; part++) {
        gmm__gtp_array *a = &s->array[part];
        const int32_t index = part == GMM__GTP_DATA ? x->data : x->scale;
        int64_t units = 1;
        int32_t k;
        if (part == GMM__GTP_SCALE && scaling == GMM_SCALING_NONE) break;
        t = gmm_ckpt_table_tensors(p->parts[x->part].table, &n);
        if (index < 0 || index >= n)
            return gmm__gtp_refuse(p, part == GMM__GTP_SCALE && index < 0 ? GMM_E_KEY : GMM_E_ARG,
                                   part == GMM__GTP_SCALE && index < 0 ? GMM_CKPT_SCALE_MISSING : GMM_CKPT_ARGUMENT,
                                   "stored[%d].%s is %d: part %d has %lld tensors", j, part ? "scale" : "data",
                                   (int)index, (int)x->part, (long long)n);
        t += index;
        if (t->dtype != a->dtype)
            return gmm__gtp_refuse(p, GMM_E_DTYPE, GMM_CKPT_DTYPE, "stored[%d]: \"%.60s\" is %s, its shard %s", j,
                                   t->name, gmm_dtype_name(t->dtype), gmm_dtype_name(a->dtype));
        for (k = 0; k < t->rank; k++) units *= t->shape[k];
        if (scaling == GMM_SCALING_TENSOR && part == GMM__GTP_SCALE && units == 1) continue;
        if (part == GMM__GTP_SCALE && scaling != GMM_SCALING_TENSOR &&
            (t->rank != 2 || t->shape[0] != a->shape[0] || t->shape[1] != a->shape[1]))
            gmm__gtp_unpad(s, a);
        if (t->rank != 2 || t->shape[0] != a->shape[0] || t->shape[1] != a->shape[1])
            return gmm__gtp_refuse(p, GMM_E_KEY, GMM_CKPT_SHAPE, "stored[%d]: \"%.60s\" is not [%lld, %lld], as its "
                                   "shard %d of %d, TP %d of %d, has it", j, t->name, (long long)a->shape[0],
                                   (long long)a->shape[1], s->shard.gtp_rank, s->shard.gtp_size,
                                   s->shard.tp_rank, s->shard.tp_size);
        if (dequant && part == GMM__GTP_SCALE && a->shape[1] != gmm__ceil_div(s->plan.local_cols, 128))
            return gmm__gtp_refuse(p, GMM_E_CONFIG, GMM_CKPT_NOT_DIVISIBLE, "stored[%d]: scales with padded columns "
                                   "cannot be dequantized: export them first", j);
    }
    return GMM_OK;
}

/* All that one stored shard has of the target; *moved counts elements. */
static gmm_status gmm__gtp_meet(gmm__gtp_planner *p, const gmm_gtp_stored *from, const gmm__gtp_side *s,
                                const gmm__gtp_side *d, int32_t target, int64_t *moved) {
    const int scaled = d->shard.scaling != GMM_SCALING_NONE;
    const int64_t c0 = s->plan.col0 > d->plan.col0 ? s->plan.col0 : d->plan.col0;
    const int64_t send = s->plan.col0 + s->plan.local_cols, dend = d->plan.col0 + d->plan.local_cols;
    int64_t src[2], dst[2], length[2];
    int32_t i, j;
    int part;
    length[1] = (send < dend ? send : dend) - c0;
    if (length[1] <= 0) return GMM_OK;
    src[1] = c0 - s->plan.col0;
    dst[1] = c0 - d->plan.col0;
    for (i = 0; i < d->count; i++)
        for (j = 0; j < s->count; j++) {
            const gmm_extent *a = &s->extents[j], *b = &d->extents[i];
            const int64_t begin = a->begin > b->begin ? a->begin : b->begin, end = a->end < b->end ? a->end : b->end;
            if (a->section != b->section || begin >= end) continue;
            src[0] = a->shard_row + begin - a->begin;
            dst[0] = b->shard_row + begin - b->begin;
            length[0] = end - begin;
            *moved += length[0] * length[1];
            for (part = GMM__GTP_DATA; part <= (scaled ? GMM__GTP_SCALE : GMM__GTP_DATA); part++) {
                gmm_status status;
                if (part == GMM__GTP_SCALE && d->shard.scaling == GMM_SCALING_TENSOR) break;
                status = gmm__gtp_box(p, from, s, d, target + part, part, src, dst, length);
                if (status) return status;
            }
        }
    return GMM_OK;
}

static gmm_status gmm__gtp_plan_item(gmm__gtp_planner *p, const gmm_gtp_item *item, int64_t index) {
    gmm__gtp_side d, s, first;
    gmm_shard whole;
    gmm_status status;
    int32_t j, k, target = (int32_t)p->target_count;
    int64_t moved = 0;
    int part, scaled, scale_moved = 0;
    memset(&d, 0, sizeof d);
    memset(&first, 0, sizeof first);
    p->key = item->name;
    if (!item->name || !item->shard || !item->stored || item->stored_count < 1 || (int)item->direction < GMM_ROWWISE ||
        item->direction > GMM_COLUMNWISE)
        return gmm__gtp_refuse(p, GMM_E_ARG, GMM_CKPT_ARGUMENT, "items[%lld]: name, shard and stored must be given, "
                               "stored_count %d be >= 1, direction %d a gmm_direction", (long long)index,
                               (int)item->stored_count, (int)item->direction);
    status = gmm__gtp_open_side(p, item->shard, item->direction, 0, &d);
    if (!status && p->exports) { /* the logical weight */
        whole = d.shard;
        whole.tp_size = whole.gtp_size = 1;
        whole.tp_rank = whole.gtp_rank = 0;
        status = gmm__gtp_open_side(p, &whole, item->direction, 0, &d);
        if (!status && d.shard.scaling > GMM_SCALING_TENSOR) gmm__gtp_unpad(&d, &d.array[GMM__GTP_SCALE]);
    }
    if (status) return status;
    scaled = d.shard.scaling != GMM_SCALING_NONE;
    if (!item->scale_name != !scaled)
        return gmm__gtp_refuse(p, GMM_E_ARG, GMM_CKPT_ARGUMENT, "items[%lld].scale_name is %s: %s has %s scales",
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
        status = gmm__gtp_open_side(p, x->shard, item->direction, 1, &s);
        if (!status) status = gmm__gtp_check_stored(p, item, j, &s, &d);
        if (status) return status;
        if (j == 0) first = s;
        if (s.shard.tp_cut != first.shard.tp_cut || s.shard.tp_size != first.shard.tp_size ||
            s.shard.gtp_size != first.shard.gtp_size || s.plan.shard_rows != first.plan.shard_rows)
            return gmm__gtp_refuse(p, GMM_E_ARG, GMM_CKPT_ARGUMENT, "stored[%d] is cut over TP %d, GTP %d into %lld "
                                   "rows, stored[0] over %d, %d into %lld: must be alike", j,
                                   s.shard.tp_size, s.shard.gtp_size, (long long)s.plan.shard_rows,
                                   first.shard.tp_size, first.shard.gtp_size,
                                   (long long)first.plan.shard_rows);
        for (k = 0; k < j; k++) { /* the same rows and columns, from before */
            const gmm_shard *o = item->stored[k].shard;
            if (o->gtp_rank == s.shard.gtp_rank && (s.shard.tp_cut == GMM_TP_WHOLE || o->tp_rank == s.shard.tp_rank))
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
            status = gmm__gtp_push(p, &m);
            scale_moved = 1;
        }
        if (!status) status = gmm__gtp_meet(p, x, &s, &d, target, &moved);
    }
    if (status || p->exports) return status;
    if (moved != d.plan.valid_rows * d.plan.local_cols)
        return gmm__gtp_refuse(p, GMM_E_KEY, GMM_CKPT_MISSING_INDEX, "what is stored holds %lld of the %lld elements "
                               "of shard %d of %d, TP %d of %d: a rank's part is missing", (long long)moved,
                               (long long)(d.plan.valid_rows * d.plan.local_cols), d.shard.gtp_rank,
                               d.shard.gtp_size, d.shard.tp_rank, d.shard.tp_size);
    for (part = GMM__GTP_DATA; part <= scaled && !status; part++)
        if (part == GMM__GTP_DATA || d.shard.scaling != GMM_SCALING_TENSOR)
            status = gmm__gtp_zeros(p, &d, target + part, part);
    return status;
}

static gmm_status gmm__gtp_checkpoint(const char *fn, int exports, gmm_ckpt_plan **out, const gmm_ckpt_part *parts,
                                      int32_t part_count, const gmm_gtp_item *items, int64_t count,
                                      const gmm_allocator *allocator, gmm_ckpt_report *report) {
    gmm__gtp_planner p;
    gmm_status status = GMM_OK;
    int64_t i;
    memset(&p, 0, sizeof p);
    if (report) memset(report, 0, sizeof *report);
    p.fn = fn;
    p.exports = exports;
    p.parts = parts;
    p.part_count = part_count;
    p.report = report;
    if (out) *out = NULL;
    if (!out || !parts || (!items && count))
        return gmm__gtp_refuse(&p, GMM_E_NULL, GMM_CKPT_ARGUMENT, "%s is NULL", !out ? "out" : !parts ? "parts"
                                                                                                  : "items");
    if (part_count < 1 || count < 0 || count > INT32_MAX / 2)
        return gmm__gtp_refuse(&p, GMM_E_ARG, GMM_CKPT_ARGUMENT, "part_count %d, count %lld: must be >= 1, and 0 to "
                               "2^30 - 1", part_count, (long long)count);
    if (allocator && !allocator->alloc != !allocator->release)
        return gmm__gtp_refuse(&p, GMM_E_ARG, GMM_CKPT_ARGUMENT, "allocator: both functions or none");
    for (i = 0; i < part_count; i++)
        if (!parts[i].table)
            return gmm__gtp_refuse(&p, GMM_E_NULL, GMM_CKPT_ARGUMENT, "parts[%lld].table is NULL", (long long)i);
    if (allocator) p.allocator = *allocator;
    p.targets = (gmm_ckpt_tensor *)gmm__gtp_alloc(&p, (size_t)(2 * count + 1) * sizeof *p.targets);
    if (!p.targets) return gmm__gtp_refuse(&p, GMM_E_MEMORY, GMM_CKPT_NO_MEMORY, "no memory");
    for (i = 0; i < count && !status; i++) status = gmm__gtp_plan_item(&p, &items[i], i);
    if (!status)
        status = gmm_ckpt_plan_of_moves(out, parts, part_count, p.targets, p.target_count, p.moves,
                                        (int64_t)p.move_count, exports, allocator, report);
    gmm__gtp_free(&p, p.targets);
    gmm__gtp_free(&p, p.moves);
    gmm__gtp_free(&p, p.extents[0]);
    gmm__gtp_free(&p, p.extents[1]);
    return status;
}

GMMDEF gmm_status gmm_gtp_export(gmm_ckpt_plan **out, const gmm_ckpt_part *parts, int32_t part_count,
                                 const gmm_gtp_item *items, int64_t count, const gmm_allocator *allocator,
                                 gmm_ckpt_report *report) {
    return gmm__gtp_checkpoint("gmm_gtp_export", 1, out, parts, part_count, items, count, allocator, report);
}
GMMDEF gmm_status gmm_gtp_import(gmm_ckpt_plan **out, const gmm_ckpt_part *parts, int32_t part_count,
                                 const gmm_gtp_item *items, int64_t count, const gmm_allocator *allocator,
                                 gmm_ckpt_report *report) {
    return gmm__gtp_checkpoint("gmm_gtp_import", 0, out, parts, part_count, items, count, allocator, report);
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
