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

