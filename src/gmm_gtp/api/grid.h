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

