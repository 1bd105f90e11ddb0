/* ------------------------------------------------------------------------------------------ 6 Layout queries --- */

/* Storage of one quantized matrix. Groups follow one another at these sizes. */
typedef struct gmm_layout {
    int64_t data_rows, data_cols;   /* elements as stored; a transposed copy swaps the matrix's rows and columns */
    int64_t data_bytes;
    int64_t scale_rows, scale_cols; /* as stored, padding included; 0 without scales */
    int64_t scale_bytes;
    gmm_dtype scale_dtype;
    int32_t transposed;             /* 1: data holds the transposed matrix */
} gmm_layout;

/* Size of a dtype's element in bits, 0 if unknown; names of dtypes, scaling modes and status codes, "?" if unknown. */
GMMDEF int32_t gmm_dtype_bits(gmm_dtype dtype);
GMMDEF const char *gmm_dtype_name(gmm_dtype dtype);
GMMDEF const char *gmm_scaling_name(gmm_scaling scaling);
GMMDEF const char *gmm_recipe_name(gmm_recipe_kind kind); /* "fp8-block" */
GMMDEF const char *gmm_status_name(gmm_status status);   /* "GMM_E_ARG" */
GMMDEF const char *gmm_status_string(gmm_status status); /* a sentence */

/* Storage of a rows x cols matrix in a format.
   Shapes: as Transformer Engine and cuBLASLt lay them out. FP8 copies for the other direction are transposed
       (TENSOR, 1X128, 128X128, NV16) or keep the row-major order (MX32). Padded scale extents: 1X128 rounds the
       un-blocked extent to 4; 128X128 rounds the blocked columns to 4; MX32 and NV16 round to tiles of 128 x 4.
   Errors: GMM_E_NULL (out), GMM_E_ARG (negative extent, unknown direction, rows of an odd number of 4-bit elements),
       GMM_E_DTYPE (dtype and scaling do not go together, or an order that the scaling lacks), GMM_E_OVERFLOW. */
GMMDEF gmm_status gmm_layout_of(gmm_dtype dtype, gmm_scaling scaling, gmm_scale_order order, gmm_direction direction,
                                int64_t rows, int64_t cols, gmm_layout *out, gmm_error *error);

/* Byte of the scale of row i and scale column j in a SWIZZLED buffer of `scale_cols` columns (a multiple of 4). */
GMM__HD int64_t gmm_swizzle_offset(int64_t i, int64_t j, int64_t scale_cols) {
    return ((i / 128) * (scale_cols / 4) + j / 4) * 512 + (i % 32) * 16 + ((i % 128) / 32) * 4 + j % 4;
}

/* Word of four power-of-two fp32 scales of consecutive blocks, as DeepGEMM reads them on sm_100: their exponent bytes,
   the first in the lowest. 2^-127 becomes 0, as in E8M0. */
GMM__HD uint32_t gmm_scale_exponents(const float scale[4]) {
    return (gmm_f32_bits(scale[0]) >> 23 & 255u) | (gmm_f32_bits(scale[1]) >> 23 & 255u) << 8 |
           (gmm_f32_bits(scale[2]) >> 23 & 255u) << 16 | (gmm_f32_bits(scale[3]) >> 23 & 255u) << 24;
}

/* Order of a block's scales in memory, and where grouped copies of activations place theirs.
   A copy is seen as lines: the rows of the matrix (ROWWISE) or its columns (COLUMNWISE); blocks run along a line.
   Groups of device-resident sizes start at multiples of GMM_GROUP_ROWS in every place that has blocks of rows: group g
   begins at start(g), the sum of gmm_group_rows(size) over the groups before it. Its scales are those of
   gmm_layout_of for gmm_group_rows(size) rows, and follow those of the groups before it. Its elements stand
       ROWWISE, and COLUMNWISE of MX32   in the rows of the source, not padded
       COLUMNWISE of the others          transposed: element (row r, column c) in row c, column start(g) + r of one
                                         matrix for all groups; the columns between the group's rows and start(g + 1)
                                         are zeros. With a Hadamard transform those of the last block of 16 rows hold
                                         the transform of its rows and of zeros behind them, which products need
   TENSOR has one scale per group, ROW one per row (ROWWISE, as in the source) or [groups][columns] (COLUMNWISE).
   128X128 is for matrices of fixed extents alone. */
enum { GMM_GROUP_ROWS = 128 };

GMM__HD int64_t gmm__ceil_div(int64_t a, int64_t b) { return a / b + (a % b != 0); }
GMM__HD int64_t gmm__round_up(int64_t a, int64_t b) { return gmm__ceil_div(a, b) * b; }
GMM__HD int64_t gmm_group_rows(int64_t rows) { return gmm__round_up(rows, GMM_GROUP_ROWS); }
/* The largest start(groups) that `capacity` rows can have. */
GMM__HD int64_t gmm_padded_capacity(int32_t groups, int64_t capacity) {
    const int64_t partial = groups < capacity ? groups : capacity;
    return (capacity + partial * (GMM_GROUP_ROWS - 1)) / GMM_GROUP_ROWS * GMM_GROUP_ROWS;
}

/* Elements along a line that share a scale; 0 = the whole line. */
GMM__HD int32_t gmm_block_along(gmm_scaling scaling) {
    return scaling == GMM_SCALING_1X128 || scaling == GMM_SCALING_128X128 ? 128
           : scaling == GMM_SCALING_MX32 ? 32 : scaling == GMM_SCALING_NV16 ? 16 : 0;
}
/* Index of the scale of line l and block j in a copy of `lines` x `along` elements, counted in scales. */
GMM__HD int64_t gmm_scale_index(gmm_scaling scaling, gmm_scale_order order, gmm_direction direction, int64_t lines,
                                int64_t along, int64_t l, int64_t j) {
    int64_t line_scales;
    switch ((int)scaling) {
    case GMM_SCALING_ROW: return l;
    case GMM_SCALING_1X128: return j * gmm__round_up(lines, 4) + l;
    case GMM_SCALING_128X128: return l / 128 * gmm__round_up(gmm__ceil_div(along, 128), 4) + j;
    case GMM_SCALING_MX32:
    case GMM_SCALING_NV16:
        line_scales = gmm__round_up(gmm__ceil_div(along, gmm_block_along(scaling)), 4);
        if (order == GMM_SCALES_SWIZZLED) return gmm_swizzle_offset(l, j, line_scales);
        return scaling == GMM_SCALING_MX32 && direction == GMM_COLUMNWISE ? j * gmm__round_up(lines, 128) + l
                                                                          : l * line_scales + j;
    default: return 0;
    }
}
/* Index of the first scale of group g, which starts at row `row` of the source and at `start` among padded rows. */
GMM__HD int64_t gmm_scale_base(gmm_scaling scaling, gmm_direction direction, int64_t cols, int64_t g, int64_t row,
                               int64_t start) {
    const int rowwise = direction == GMM_ROWWISE;
    const int32_t along = gmm_block_along(scaling);
    switch ((int)scaling) {
    case GMM_SCALING_TENSOR: return g;
    case GMM_SCALING_ROW: return rowwise ? row : g * cols;
    case GMM_SCALING_1X128: return rowwise ? gmm__ceil_div(cols, 128) * start : start / 128 * gmm__round_up(cols, 4);
    case GMM_SCALING_MX32:
    case GMM_SCALING_NV16:
        return rowwise ? start * gmm__round_up(gmm__ceil_div(cols, along), 4)
                       : start / along * gmm__round_up(cols, 128);
    default: return 0;
    }
}

/* Storage of a copy of activations: `capacity` rows of `cols` columns, split over `groups` groups, at its largest.
   data_cols is the least leading dimension of the elements; scale_rows and scale_cols are 0.
   Errors: as gmm_layout_of, which takes the same arguments; GMM_E_DTYPE (128X128), GMM_E_ARG (groups below 1). */
GMMDEF gmm_status gmm_layout_of_groups(gmm_dtype dtype, gmm_scaling scaling, gmm_scale_order order,
                                       gmm_direction direction, int32_t groups, int64_t capacity, int64_t cols,
                                       gmm_layout *out, gmm_error *error);

