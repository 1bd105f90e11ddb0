/* Formats of quantized weights: the dtypes of codes and scales, and the format that the tensors of a source have. */

enum {
    GMM__CK_CODES_8 = 1 << GMM_E4M3 | 1 << GMM_E5M2,
    GMM__CK_CODES_4 = 1 << GMM_U8 | 1 << GMM_E2M1,
    GMM__CK_FLOAT_SCALES = 1 << GMM_F32 | 1 << GMM_BF16,
    GMM__CK_BYTE_SCALES = 1 << GMM_E8M0 | 1 << GMM_U8
};

/* Sets of dtypes and kinds are bits. The blocks of a scaling are those of GMM_SCALING_LIST. */
typedef struct gmm__ck_format {
    gmm_scaling scaling;
    uint32_t codes, scales;      /* dtypes */
    int32_t packed;              /* 1: codes of 4 bits, two per byte */
    int32_t gtp_rows;            /* GTP's recipe unit: its shards begin at multiples of these rows */
    uint32_t beside;             /* kinds that may stand beside the scales */
    int32_t needs_beside;        /* 1: one of them must */
    int32_t dequantized;         /* 1: moves can dequantize it */
} gmm__ck_format;

/* Where the dtypes of several formats are those of a source, the first whose shape fits is its format. */
static const gmm__ck_format gmm__ck_formats[] = {
    {GMM_SCALING_128X128, GMM__CK_CODES_8, GMM__CK_FLOAT_SCALES, 0, 128, 0, 0, 1},
    {GMM_SCALING_ROW, GMM__CK_CODES_8, GMM__CK_FLOAT_SCALES, 0, 1, 0, 0, 1},
    {GMM_SCALING_TENSOR, GMM__CK_CODES_8, GMM__CK_FLOAT_SCALES, 0, 1, 1 << GMM_CKPT_AMAX, 0, 1},
    {GMM_SCALING_MX32, GMM__CK_CODES_8, GMM__CK_BYTE_SCALES, 0, 32, 0, 0, 1},
    {GMM_SCALING_MX32, GMM__CK_CODES_4, GMM__CK_BYTE_SCALES, 1, 32, 0, 0, 1},
    {GMM_SCALING_NV16, GMM__CK_CODES_4, 1 << GMM_E4M3, 1, 16, 1 << GMM_CKPT_TENSOR_SCALE | 1 << GMM_CKPT_AMAX, 1, 0},
};

/* Rows and columns of a scaling's block; 0 = the whole extent. */
static void gmm__ck_block_of(gmm_scaling scaling, int64_t *rows, int64_t *cols) {
    static const int16_t blocks[][2] = {
#define GMM__X(name, value, text, dtype, rows, cols) {rows, cols},
        GMM_SCALING_LIST(GMM__X)
#undef GMM__X
    };
    *rows = blocks[scaling][0];
    *cols = blocks[scaling][1];
}

/* The format that moves can dequantize by these dtypes, or NULL. */
static const gmm__ck_format *gmm__ck_format_of(gmm_scaling scaling, gmm_dtype codes, gmm_dtype scales) {
    size_t i;
    for (i = 0; i < sizeof gmm__ck_formats / sizeof gmm__ck_formats[0]; i++) {
        const gmm__ck_format *f = &gmm__ck_formats[i];
        if (f->scaling == scaling && f->dequantized && f->codes >> codes & 1 && f->scales >> scales & 1) return f;
    }
    return NULL;
}

/* The row of scales of a row of codes. */
static int64_t gmm__ck_scale_line(gmm_scaling scaling, int64_t row) {
    int64_t block_rows, block_cols;
    gmm__ck_block_of(scaling, &block_rows, &block_cols);
    return block_rows ? row / block_rows : 0;
}

/* Rows and columns of the scales of a matrix. */
static void gmm__ck_scale_extents(gmm_scaling scaling, int64_t rows, int64_t cols, int64_t *scale_rows,
                                  int64_t *scale_cols) {
    int64_t block_rows, block_cols;
    gmm__ck_block_of(scaling, &block_rows, &block_cols);
    *scale_rows = block_rows ? gmm__ceil_div(rows, block_rows) : 1;
    *scale_cols = block_cols ? gmm__ceil_div(cols, block_cols) : 1;
}

/* Whether a dtype holds two codes per byte; quantized tensors alone have such bytes. */
static int gmm__ck_is_packed(gmm_dtype dtype) { return GMM__CK_CODES_4 >> dtype & 1; }

/* Rows and columns of a quantized tensor's matrices, and of their scales. Blocks of MX32 with an extent of 16 bytes
   are matrices of one block per row, which have the same scales one after another. */
static void gmm__ck_scale_shape(const gmm_ckpt_tensor *t, gmm_scaling scaling, int64_t *rows, int64_t *cols,
                                int64_t *scale_rows, int64_t *scale_cols) {
    *rows = t->rank > 1 ? t->shape[t->rank - 2] : 1;
    *cols = t->shape[t->rank - 1] * (t->dtype == GMM_U8 ? 2 : 1);
    gmm__ck_scale_extents(scaling, *rows, *cols, scale_rows, scale_cols);
}

/* Dimensions of one matrix as a row stores it, given those of its elements: 0 for one value, 1 for a vector, 2. */
static int32_t gmm__ck_dimensions(const gmm_ckpt_row *row, int32_t dims) {
    return dims == 2 && row->scaling == GMM_SCALING_MX32 && row->kind == GMM_CKPT_WEIGHT ? 3 : dims;
}

/* The shapes that a row allows for matrices of rows x cols, as targets have it first; returns how many. */
static int gmm__ck_row_shapes(const gmm_ckpt_row *row, int64_t experts, int64_t rows, int64_t cols, int32_t dims,
                              int64_t shape[2][GMM_CKPT_RANK], int32_t rank[2]) {
    const int32_t n = gmm__ck_dimensions(row, dims);
    const int stacked = row->form == GMM_CKPT_STACKED || row->form == GMM_CKPT_TALL;
    int64_t matrix[3];
    int32_t i, d;
    matrix[0] = n == 2 && row->transposed ? cols : rows;
    matrix[1] = n == 3 ? cols / 32 : row->transposed ? rows : cols;
    matrix[2] = 16;
    for (i = 0; i < 2; i++) {
        const int split = stacked && (n == 0 || i == (row->form == GMM_CKPT_TALL)); /* an extent of experts alone */
        rank[i] = 0;
        if (split) shape[i][rank[i]++] = experts;
        for (d = 0; d < n; d++) shape[i][rank[i]++] = matrix[d];
        if (stacked && !split && !gmm__mul(shape[i][0], experts, &shape[i][0])) shape[i][0] = -1; /* no tensor has it */
    }
    if (row->form == GMM_CKPT_WIDE && !gmm__mul(shape[0][n - 1], experts, &shape[0][n - 1])) shape[0][n - 1] = -1;
    return stacked ? 2 : 1;
}

/* The first of a row's shapes that a tensor has, -1 if it has none of them. */
static int gmm__ck_shape_index(const gmm_ckpt_row *row, const gmm_ckpt_tensor *t, int64_t experts, int64_t rows,
                               int64_t cols, int32_t dims) {
    int64_t shape[2][GMM_CKPT_RANK];
    int32_t rank[2], d;
    const int n = gmm__ck_row_shapes(row, experts, rows, cols, dims, shape, rank);
    int i;
    for (i = 0; i < n; i++) {
        int equal = rank[i] == t->rank;
        for (d = 0; equal && d < rank[i]; d++) equal = shape[i][d] == t->shape[d];
        if (equal) return i;
    }
    return -1;
}

/* The least dimensions that the scales of one matrix are stored with; `dims` of the matrix at most. */
static int32_t gmm__ck_least_dims(gmm_scaling scaling, int32_t dims) {
    int64_t rows, cols;
    gmm__ck_block_of(scaling, &rows, &cols);
    return cols ? dims : rows ? 1 : 0;
}

/* A stored weight and its scales, for finding their format. */
typedef struct gmm__ck_quantized {
    const gmm_ckpt_row *row;              /* of the scales */
    const gmm_ckpt_tensor *codes, *scale;
    int64_t experts;                      /* of one scale tensor, where it holds all */
    int64_t rows, cols;                   /* elements of one expert's matrix in the tensor */
    int32_t dims, packed;                 /* of the codes */
    int alike;                            /* 1: codes of several experts stand one below another; 0: they do not */
} gmm__ck_quantized;

/* The format, and in *dims how the scales of a matrix are stored. Scales that are stacked as their codes win. NULL:
   none; *dtypes are then the scales' dtypes of all formats that such codes can have, and `shapes` what their shapes
   would be. */
static const gmm__ck_format *gmm__ck_find_format(const gmm__ck_quantized *q, int32_t *dims, uint32_t *dtypes,
                                                 char *shapes, size_t capacity) {
    const int32_t formats = (int32_t)(sizeof gmm__ck_formats / sizeof gmm__ck_formats[0]);
    size_t n = 0;
    int32_t i;
    *dtypes = 0;
    *shapes = 0;
    for (i = 0; i < 2 * formats; i++) { /* scales that are stacked alike, then all */
        const gmm__ck_format *f = &gmm__ck_formats[i % formats];
        int64_t rows, cols;
        if (!(f->codes >> q->codes->dtype & 1) || f->packed != q->packed) continue;
        *dtypes |= f->scales;
        if (!(f->scales >> q->scale->dtype & 1)) continue;
        gmm__ck_scale_extents(f->scaling, q->rows, q->cols, &rows, &cols);
        for (*dims = gmm__ck_least_dims(f->scaling, q->dims); *dims <= q->dims; ++*dims) {
            const int found = gmm__ck_shape_index(q->row, q->scale, q->experts, rows, cols, *dims);
            if (found >= 0 && (i >= formats || !*dims || found == q->alike)) return f;
        }
        if (i < formats && n + 48 < capacity)
            n += (size_t)snprintf(shapes + n, capacity - n, "%s%lld x %lld (%s)", n ? ", " : "", (long long)rows,
                                  (long long)cols, gmm_scaling_name(f->scaling));
    }
    return NULL;
}

/* Writes the names of a set of dtypes, as "e8m0, u8". */
static const char *gmm__ck_dtype_names(uint32_t set, char *text, size_t capacity) {
    size_t n = 0;
    int32_t d;
    *text = 0;
    for (d = 0; d <= GMM_F64; d++)
        if (set >> d & 1 && n + 8 < capacity)
            n += (size_t)snprintf(text + n, capacity - n, "%s%s", n ? ", " : "", gmm_dtype_name((gmm_dtype)d));
    return text;
}
