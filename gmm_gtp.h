/* gmm_gtp.h - v0.1.0 - Generalized Tensor Parallelism for weights: shard plans, process grids, memory - MIT
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
 *     1  Shard plans    3  Process grids    5  Memory            7  Licence
 *     2  Extents        4  Seeds            6  Implementation
 *
 * CONFIGURATION
 *     None beside gmm_quant.h's and gmm.h's.
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
 * Thread safety: every function here is pure or writes only through its arguments. None allocates.
 *
 * REVISIONS (full list: CHANGELOG.md)
 *     0.1.0  first version
 */
#ifndef GMM_MOE_GTP_H_INCLUDED
#define GMM_MOE_GTP_H_INCLUDED

#include "gmm.h"

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

/* ------------------------------------------------------------------------------------------------- 5 Memory --- */

/* Weights of one shape, and the buffers that serve them. Slot counts are of bundles; 0 = none, or the slots counted
   with another use are shared. With gtp_size 1 weights and gradients stay in place: neither gathered nor reduced. */
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

/* Bytes per rank. Padding rows and scales are counted. */
typedef struct gmm_gtp_memory {
    uint32_t struct_size;
    int32_t reserved;
    int64_t weights;    /* shards in every direction that is stored */
    int64_t main_grads;
    int64_t optimizer;
    int64_t gather;     /* gathered operands; also the local transposes that TENSOR and 128X128 need for backward */
    int64_t wgrad;      /* whole gradients before their reduction */
    int64_t reduce;     /* what reductions receive */
    int64_t total;      /* of the above */
    int64_t whole_weights; /* for comparison: what `weights` would be with gtp_size 1; not in the total */
} gmm_gtp_memory;

/* Adds the bytes of one use to *memory; start from GMM_ZERO. *memory is written on success only.
   Errors: as gmm_gtp_plan; GMM_E_NULL, GMM_E_ARG (field out of range), GMM_E_DTYPE (main_grad, wire),
       GMM_E_CONFIG (gradient slots of a frozen weight), GMM_E_OVERFLOW. */
GMMDEF gmm_status gmm_gtp_memory_add(const gmm_gtp_use *use, gmm_gtp_memory *memory, gmm_error *error);

#ifdef __cplusplus
}
#endif
#endif /* GMM_MOE_GTP_H_INCLUDED */

/* ------------------------------------------------------------------------------------------ 6 Implementation --- */

#if defined(GMM_IMPLEMENTATION) && !defined(GMM__GTP_IMPLEMENTATION_DONE)
#define GMM__GTP_IMPLEMENTATION_DONE

#include <string.h>

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
        *status = gmm__fail(error, GMM_E_VERSION, "%s: %s->struct_size is %lu: must be 0 or at most %lu", fn, name,
                            (unsigned long)stated, (unsigned long)size);
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
            return gmm__fail(error, GMM_E_ARG, "%s: section_rows[%d] is %lld: must be >= 1", fn, (int)i,
                             (long long)rows);
        if (rows > left || (i == n - 1 && rows < left))
            return gmm__fail(error, GMM_E_ARG, "%s: section_rows[%d] is %lld with %lld of rows %lld left: the sections "
                             "must add up to rows", fn, (int)i, (long long)rows, (long long)left, (long long)s->rows);
        if (s->tp_cut == GMM_TP_ROWS && rows % s->tp_size != 0)
            return gmm__fail(error, GMM_E_ARG, "%s: section %d has %lld rows: must be a multiple of tp_size %d", fn,
                             (int)i, (long long)rows, (int)s->tp_size);
        if (s->tp_cut == GMM_TP_ROWS && s->tp_multiple > 1 && rows / s->tp_size % s->tp_multiple != 0)
            return gmm__fail(error, GMM_E_CONFIG, "%s: section %d has %lld rows per TP rank: must be a multiple of "
                             "tp_multiple %d", fn, (int)i, (long long)(rows / s->tp_size), (int)s->tp_multiple);
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
                             "local rows: the rest would be lost", fn, (int)s->gtp_size, (long long)p->local_rows);
        if (p->local_rows / s->gtp_size % block != 0)
            return gmm__fail(error, GMM_E_CONFIG, "%s: unit is GMM_GTP_UNPADDED and shards of %lld rows cut the "
                             "%lld-row blocks of scaling %s", fn, (long long)(p->local_rows / s->gtp_size),
                             (long long)block, gmm_scaling_name(s->scaling));
    } else if (s->gtp_size > 1) {
        if (!gmm__mul(p->unit, s->gtp_size, &multiple) || p->local_rows > INT64_MAX - multiple)
            return gmm__fail(error, GMM_E_OVERFLOW, "%s: %lld local rows padded to unit %lld * gtp_size %d do not fit "
                             "64 bits", fn, (long long)p->local_rows, (long long)p->unit, (int)s->gtp_size);
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
        return gmm__fail(error, GMM_E_ARG, "gmm_gtp_extents: capacity is %d: must be >= 0", (int)capacity);
    if (!extents && capacity > 0)
        return gmm__fail(error, GMM_E_NULL, "gmm_gtp_extents: extents is NULL with capacity %d", (int)capacity);
    status = gmm__gtp_solve("gmm_gtp_extents", shard, &s, &p, error);
    if (status) return status;
    for (pass = 0; pass < (extents ? 2 : 1); pass++) { /* count, then fill */
        int64_t logical0 = 0, local0 = 0; /* first row of the section in the whole weight, in the local matrix */
        if (pass == 1 && n > capacity)
            return gmm__fail(error, GMM_E_WORKSPACE, "gmm_gtp_extents: capacity is %d: the shard has %d extents",
                             (int)capacity, (int)n);
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
            return gmm__fail(error, GMM_E_ARG, "%s: size of %s is %d: must be >= 0", fn, names[a], (int)g->size[a]);
        if (g->size[a] == 0) g->size[a] = 1;
        if (a == absent && g->size[a] > 1)
            return gmm__fail(error, GMM_E_CONFIG, "%s: size of %s is %d: %s grid has no such axis", fn, names[a],
                             (int)g->size[a], g->kind == GMM_GRID_EXPERT ? "an expert" : "a dense");
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
        return gmm__fail(error, GMM_E_ARG, "%s: rank is %d: must be in [0, %d)", fn, (int)rank, (int)world);
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
                             (int)g.size[a]);
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
                         (unsigned)axes);
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
                         "be equal", (int)dense_world, (int)expert_world);
    if (d.size[GMM_AXIS_PP] != x.size[GMM_AXIS_PP])
        return gmm__fail(error, GMM_E_CONFIG, "gmm_grid_match: PP is %d in the dense grid and %d in the expert grid: "
                         "must be equal", (int)d.size[GMM_AXIS_PP], (int)x.size[GMM_AXIS_PP]);
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
    int32_t d, sharded, fits;
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
                         "be >= 0", fn, (int)u.bundle, (long long)u.layers, (int)u.optimizer_bytes,
                         (int)u.optimizer_ranks);
    if (u.gather_slots < 0 || u.recompute_slots < 0 || u.wgrad_slots < 0 || u.reduce_slots < 0)
        return gmm__fail(error, GMM_E_ARG, "%s: slots of gather %d, recompute %d, wgrad %d, reduce %d: must be >= 0",
                         fn, (int)u.gather_slots, (int)u.recompute_slots, (int)u.wgrad_slots, (int)u.reduce_slots);
    if (u.all_to_all != 0 && u.all_to_all != 1)
        return gmm__fail(error, GMM_E_ARG, "%s: all_to_all is %d: must be 0 or 1", fn, (int)u.all_to_all);
    if (u.reserved != 0)
        return gmm__fail(error, GMM_E_ARG, "%s: reserved is %d: must be 0", fn, (int)u.reserved);
    if (u.main_grad != GMM_NONE && u.main_grad != GMM_F32 && u.main_grad != GMM_BF16)
        return gmm__fail(error, GMM_E_DTYPE, "%s: main_grad is %s (%d): must be f32, bf16 or none", fn,
                         gmm_dtype_name(u.main_grad), (int)u.main_grad);
    if (u.wire != GMM_NONE && u.wire != GMM_F32 && u.wire != GMM_BF16)
        return gmm__fail(error, GMM_E_DTYPE, "%s: wire is %s (%d): must be f32, bf16 or none", fn,
                         gmm_dtype_name(u.wire), (int)u.wire);
    if (u.main_grad == GMM_NONE && (u.wgrad_slots || u.reduce_slots || u.wire != GMM_NONE))
        return gmm__fail(error, GMM_E_CONFIG, "%s: main_grad is none, but wgrad_slots %d, reduce_slots %d, wire %s: a "
                         "frozen weight has no gradient", fn, (int)u.wgrad_slots, (int)u.reduce_slots,
                         gmm_dtype_name(u.wire));
    if (u.bundle == 0) u.bundle = 1;
    if (u.layers == 0) u.layers = 1;
    if (u.optimizer_ranks == 0) u.optimizer_ranks = 1;
    if (u.optimizer_bytes == 0) u.optimizer_bytes = 12;

    sharded = s.gtp_size > 1;
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
    if (fits && gradient && sharded) {
        int64_t row = 0; /* bytes of a row of every gradient in the bundle */
        fits = gmm__gtp_add(&row, p.local_cols, wire, u.bundle) &&
               gmm__gtp_add(&m.wgrad, row, p.padded_rows, u.wgrad_slots) &&
               gmm__gtp_add(&m.reduce, row, received, u.reduce_slots);
    }
    m.total = 0;
    fits = fits && gmm__gtp_add(&m.total, m.weights, 1, 1) && gmm__gtp_add(&m.total, m.main_grads, 1, 1) &&
           gmm__gtp_add(&m.total, m.optimizer, 1, 1) && gmm__gtp_add(&m.total, m.gather, 1, 1) &&
           gmm__gtp_add(&m.total, m.wgrad, 1, 1) && gmm__gtp_add(&m.total, m.reduce, 1, 1);
    if (!fits)
        return gmm__fail(error, GMM_E_OVERFLOW, "%s: the bytes of %lld layers of %d weights of %lld x %lld do not fit "
                         "64 bits", fn, (long long)u.layers, (int)u.bundle, (long long)p.local_rows,
                         (long long)p.local_cols);
    memcpy(memory, &m, known);
    return GMM_OK;
}

#ifdef __cplusplus
}
#endif
#endif /* GMM_IMPLEMENTATION */

/* ------------------------------------------------------------------------------------------------- 7 Licence ---
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
