/* -------------------------------------------------------------------------------------- 4 Operands and groups --- */

/* Every descriptor that a call takes alone opens with struct_size: 0 means the size this header declares; a smaller
   value is the size of an older version (none has less than 8 bytes), whose missing fields read as 0; a larger one is
   GMM_E_VERSION. Those in arrays have none, so that the arrays' elements have one size. Zeroed fields mean the
   default. */

enum {
    GMM_MAT_TABLE_ON_HOST = 1u, /* table and scale_table are host arrays; a captured graph freezes their contents */
    GMM_MAT_ROW_AMAX = 2u,      /* amax holds one value per row instead of one per group (row-scaled NVFP4) */
    GMM_MAT_E4M3_256 = 4u       /* NV16: scales were made with 256 as the largest (gmm_format.e4m3_256) */
};

/* One operand: a matrix, or one matrix per group. Row-major; ld counts elements.
   Activations (one row per token) stand in one buffer of capacity rows: data is set. Weights, biases and their
   gradients are packed (data, group after group at group_stride) or one pointer per group (table); exactly one of the
   two is set. A bias is a matrix of one row. Elements, fp32 scales and amax are aligned to their size, tables to that
   of pointers; an engine may want more, and says so. Size queries need no address, so they can come before allocation
   (gmm_info.engine says what they assume); but whether an optional output's pointer is NULL tells them whether it is
   wanted. */
typedef struct gmm_mat {
    uint32_t struct_size;
    gmm_dtype dtype;             /* of the elements */
    gmm_scaling scaling;         /* GMM_SCALING_NONE for F32, F16, BF16 */
    gmm_scale_order scale_order; /* of scale */
    uint32_t flags;              /* GMM_MAT_* */
    int32_t hadamard;            /* columnwise NV16: 0 = as it is, else transformed: gmm_format.hadamard */
    int64_t ld;                  /* elements from row to row; 0 = columns. Rows and columns of a quantized copy are
                                    those that it stores (gmm_layout): a transposed copy of groups has
                                    gmm_padded_capacity columns */
    int64_t group_stride;        /* packed, per group: elements from group to group; 0 = rows * ld */
    void *data;                  /* packed elements */
    void *const *table;          /* [groups] addresses of elements */
    void *scale;                 /* packed dequantization scales, groups as gmm_layout_of places them */
    void *const *scale_table;    /* [groups] addresses of scales, with table */
    float *amax;                 /* [groups] or [rows]: global amax of NV16, amax of TENSOR (there it may be NULL) */
    const struct gmm_mat *columnwise; /* copy of the same matrix quantized GMM_COLUMNWISE; may be NULL */
} gmm_mat;

/* Packed operand over existing memory. */
GMM__HD gmm_mat gmm_mat_packed(gmm_dtype dtype, const void *data) {
    gmm_mat m = GMM_ZERO;
    m.dtype = dtype;
    m.data = (void *)(uintptr_t)data;
    return m;
}

/* Operand given by one address per group. The array is device memory in a GPU context unless `flags` has
   GMM_MAT_TABLE_ON_HOST. */
GMM__HD gmm_mat gmm_mat_table(gmm_dtype dtype, void *const *table, uint32_t flags) {
    gmm_mat m = GMM_ZERO;
    m.dtype = dtype;
    m.table = table;
    m.flags = flags;
    return m;
}

/* Rows at and past the sum of the sizes: kept as they are, or written as zeros. They are never read. */
typedef enum gmm_tail { GMM_TAIL_KEEP = 0, GMM_TAIL_ZERO = 1, GMM_TAIL_MAX = 0x7fffffff } gmm_tail;

/* How rows are split over groups. */
typedef enum gmm_split_form {
    GMM_SPLIT_SIZES = 0,   /* [groups] rows of each group */
    GMM_SPLIT_OFFSETS = 1, /* [groups + 1] exclusive prefix sums, the first one 0 */
    GMM_SPLIT_FORM_MAX = 0x7fffffff
} gmm_split_form;

/* Bits that faulty values in device memory, and in a CPU context that is given the word, set in gmm_groups.fault. The
   call stays in bounds: a negative size counts as 0, offsets are made monotonic, and rows past the capacity are cut
   off. */
enum {
    GMM_FAULT_NEGATIVE = 1u,  /* a size below 0 */
    GMM_FAULT_CAPACITY = 2u,  /* more rows than the capacity */
    GMM_FAULT_MONOTONIC = 4u, /* offsets that fall, or do not start at 0 */
    GMM_FAULT_ALIGN = 8u,     /* a size breaks the row_align promise; results are right nevertheless */
    GMM_FAULT_INDEX = 16u,    /* an expert index outside [-1, experts); an entry of a map or of an index of gathered
                                 rows past its matrix */
    GMM_FAULT_ADDRESS = 32u   /* a table in device memory holds an address that is no multiple of 16 bytes, which the
                                 engine WGMMA needs of weights: that group's rows of the output are wrong */
};

typedef struct gmm_groups {
    uint32_t struct_size;
    int32_t count;       /* groups, >= 1 */
    int64_t capacity;    /* rows of every activation buffer, >= 0 */
    const void *splits;  /* sizes or offsets, see form */
    gmm_dtype dtype;     /* of splits: GMM_I32 or GMM_I64 */
    gmm_split_form form;
    int32_t on_host;     /* 1: splits is host memory, read during the call (an error while capturing); a faulty split or
                            a broken row_align promise is then a status, not a fault bit, in CPU contexts too */
    int32_t row_align;   /* promise: every size is a multiple of this; 0 = no promise. Never changes results */
    int64_t rows_hint;   /* rows expected, 0 = capacity. Speed only, never results */
    gmm_tail tail;
    int32_t reserved;    /* 0 */
    uint32_t *fault;     /* word in the context's memory, OR-ed with GMM_FAULT_*; to be looked at after the call. NULL:
                            a CPU context refuses a faulty split before anything is written, GMM_E_SPLIT (but for a
                            broken row_align promise); a GPU context reports nothing */
} gmm_groups;

/* One step of reading a split: the end offset of the group that starts at `begin`, given `value` (its size, or the
   offset behind it), clamped into [begin, capacity]; faults are OR-ed into *fault. CPU and GPU share this rule. */
GMM__HD int64_t gmm_split_end(int64_t begin, int64_t value, gmm_split_form form, int64_t capacity, int32_t row_align,
                              uint32_t *fault) {
    int64_t size = form == GMM_SPLIT_OFFSETS ? (value < begin ? -1 : value - begin) : value;
    if (size < 0) {
        *fault |= form == GMM_SPLIT_OFFSETS ? (uint32_t)GMM_FAULT_MONOTONIC : (uint32_t)GMM_FAULT_NEGATIVE;
        size = 0;
    }
    if (row_align > 1 && size % row_align != 0) *fault |= (uint32_t)GMM_FAULT_ALIGN;
    if (size > capacity - begin) {
        *fault |= (uint32_t)GMM_FAULT_CAPACITY;
        size = capacity - begin;
    }
    return begin + size;
}

