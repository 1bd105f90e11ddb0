#define GMM__ELEM_DONE

/* Precisions. X(tag, dtype): all operands have this dtype, 16-byte aligned rows and a multiple of 8 columns; the row
   `any` reads dtypes and alignment at run time, serves what the others do not, and adds in the same order. */
#define GMM__ELEM_PRECISIONS(X) \
    X(bf16, GMM_BF16) \
    X(f16, GMM_F16) \
    X(f32, GMM_F32) \
    X(any, GMM_NONE)

/* Units in which rows are copied. X(tag, type, bytes) */
#define GMM__ELEM_UNITS(X) \
    X(b16, uint4, 16) \
    X(b4, uint32_t, 4) \
    X(b2, uint16_t, 2) \
    X(b1, uint8_t, 1)

enum {
    GMM__ELEM_BLOCK = 128,   /* threads of a block */
    GMM__ELEM_WARPS = 4,     /* of them */
    GMM__ELEM_PER_SM = 16,   /* blocks that callers let launchers start per multiprocessor */
    GMM__ELEM_STREAM_PER_SM = 128,
        /* the same for kernels that stream rows: a grid in the order of addresses is faster than
                                one that stays, but blocks that find no row cost time as well */
    GMM__ELEM_SPAN = 256,    /* columns a warp handles at a time: 8 per lane */
    GMM__COPY_SPAN = 128,     /* units a warp copies at a time: 4 per lane */
    GMM__SUM_BLOCK = 1024,   /* threads of a block that has a multiprocessor for its sums */
    GMM__ELEM_ADDENDS = 256, /* matrices that one launch adds up: their addresses are kernel parameters */
    GMM__MAP_CHUNK = 1024,   /* slots whose ranks one warp counts */
    GMM__ROUTE_CHUNK = 8,    /* tokens whose loss terms are added first */
    GMM__ROUTE_FOLD = 64,    /* partial sums added in one step */
    GMM__ELEM_SHARED = 48 * 1024 /* bytes that a block has without asking */
};

/* ................................................................................. Arguments of the launchers ... */

/* A matrix as kernels see it. vec: base and rows are aligned to 16 bytes. data NULL: absent. */
typedef struct gmm__view {
    void *data;
    int64_t ld; /* elements */
    gmm_dtype dtype;
    int32_t vec;
} gmm__view;

/* Where the two inputs of a gated activation stand. */
enum {
    GMM__GLU_SPLIT = 0,  /* eight gate columns and eight linear columns are contiguous */
    GMM__GLU_PAIRS = 1,  /* gate and linear columns alternate */
    GMM__GLU_ELEMENT = 2 /* other blocks: element by element */
};

typedef struct gmm__act_args {
    const int64_t *valid_rows; /* device: rows in use */
    int64_t rows;
    int32_t ffn, interleave; /* columns in 32 bits: 64-bit division is slow */
    int32_t tail_zero, gated, layout, wide;
    gmm_act_kind kind;
    gmm_act_coef coef;
    gmm__view x, y, dy, dx;
    const float *prob;
    float *dprob;
} gmm__act_args;

typedef struct gmm__route_args {
    gmm__view logits, dlogits;
    int64_t tokens;
    int32_t experts, topk, sigmoid, normalize;
    float scale;
    float aux, z;              /* aux_coeff E / (topk T^2) and z_coeff / T; 0 = no such loss */
    const float *expert_bias, *dprobs, *dloss;
    int32_t *indices, *counts, *offsets; /* counts: forward needs it for offsets and aux_loss */
    float *probs, *aux_loss, *z_loss;
    float *sums;               /* forward with losses: gmm__route_sums_bytes */
    float *scratch;            /* gmm__route_scratch_bytes */
} gmm__route_args;

typedef struct gmm__map_args {
    const int32_t *indices;
    int64_t slots, capacity;   /* T topk, R */
    int32_t experts, align;
    int32_t *row_of, *slot_of, *sizes;
    uint32_t *fault;
    int32_t *counts;           /* [E][chunks]: slots of each expert per chunk, then their prefix sums */
    int64_t *starts;           /* [E] first row of each expert */
} gmm__map_args;

typedef struct gmm__permute_args {
    gmm__view src, dst;        /* see the launchers */
    int64_t tokens, capacity, hidden;
    int32_t topk, experts, tail_zero, wide;
    const int32_t *row_of, *slot_of, *sizes;
    const float *probs;        /* of slots; NULL = ones */
    const float *row_probs_in; /* gmm__k_gather_probs reads */
    uint32_t *fault;           /* NULL = not wanted */
    float *row_probs;          /* gmm__k_permute_rows writes */
    float *dprobs;             /* gmm__k_gather_probs and gmm__k_unpermute_dots write */
} gmm__permute_args;

/* Rows of groups as they are and with every group rounded up to `align` rows, cut off at `capacity`. */
typedef struct gmm__pad_args {
    gmm__view src, dst;
    int64_t rows, cols;        /* capacity of dst */
    const int64_t *offsets;    /* device [groups + 1]: the groups as they are */
    const int32_t *blocks;     /* device [groups + 1]: prefix sums of their blocks of `align` rows */
    int64_t groups, align, capacity;
    int32_t pad, tail_zero;    /* pad: dst is the padded side */
    const float *src_prob;
    float *dst_prob;
    int32_t *sizes;            /* padded sizes; NULL = not wanted */
    uint32_t *fault;           /* NULL = not wanted */
} gmm__pad_args;

/* Moves 2 ffn rows or columns between halves and blocks. With tables, data is NULL. */
typedef struct gmm__glu_args {
    gmm__view src, dst;
    void *const *src_table, *const *dst_table; /* device */
    int64_t src_stride, dst_stride;            /* elements from matrix to matrix */
    int64_t count, ffn, cols, block;
    int32_t inverse;
} gmm__glu_args;

/* y = beta y + scale (start + x_0 + x_1 + ...), summed up in fp32 from the left; beta 0 does not read y. */
typedef struct gmm__accumulate_args {
    gmm__view x, y, start;     /* x: every addend, but for data; start: fp32 or absent */
    const char *addends[GMM__ELEM_ADDENDS];
    int32_t count;             /* of them, >= 1 */
    int64_t rows, cols;        /* any; the launcher cuts long rows */
    float scale, beta;
} gmm__accumulate_args;

/* dst = src: F32, F16, BF16 into one another; any other dtype of whole bytes into itself. */
typedef struct gmm__convert_args {
    gmm__view src, dst;
    int64_t rows, cols;
} gmm__convert_args;

/* A unit copy: the same kernels serve every dtype. Strides and columns count units. */
typedef struct gmm__copy_args {
    const void *src;
    void *dst;
    int64_t rows, cols, src_ld, dst_ld;
} gmm__copy_args;

/* What a call leaves its kernels: blocks of a grid at most, whether they may be launched early, and how many
   multiprocessors; 0 = all. */
typedef struct gmm__launch_limits {
    int64_t max_ctas;
    int32_t pdl, sm_limit;
} gmm__launch_limits;

