#define GMM__ELEM_DONE

/* Precision instances. X(tag, dtype): all operands have this dtype, rows aligned to 16 bytes and a multiple of 8
   columns. The instance `any` reads dtypes and alignment at run time and serves all other calls; it adds in the same
   order, so results are equal. */
#define GMM__ELEM_PRECISIONS(X) \
    X(bf16, GMM_BF16) \
    GMM__IF_F16(X(f16, GMM_F16)) \
    X(f32, GMM_F32) \
    X(any, GMM_NONE)

/* Units of copies. X(tag, type, bytes): rows are copied in elements of this type. */
#define GMM__ELEM_UNITS(X) \
    X(b16, uint4, 16) \
    X(b4, uint32_t, 4) \
    X(b2, uint16_t, 2) \
    X(b1, uint8_t, 1)

enum {
    GMM__ELEM_BLOCK = 128,       /* threads of a CTA */
    GMM__ELEM_WARPS = 4,         /* warps of a CTA */
    GMM__ELEM_PER_SM = 16,       /* CTAs per multiprocessor that callers let launchers start */
    GMM__ELEM_STREAM_PER_SM = 128,
        /* The same for kernels that stream rows: CTAs in the order of addresses are faster than a grid of resident
           CTAs, but CTAs without a row cost time as well. */
    GMM__ELEM_AMAX_PER_SM = 64,  /* and for those that take amaxes: a warp raises an amax once for several rows */
    GMM__ELEM_SPAN = 256,        /* columns that a warp processes at a time: 8 per lane */
    GMM__COPY_SPAN = 128,        /* units that a warp copies at a time: 4 per lane */
    GMM__SUM_BLOCK = 1024,       /* threads of a CTA that occupies a multiprocessor (accumulation on few SMs) */
    GMM__ELEM_ADDENDS = 256,     /* matrices that one launch adds up: their addresses are kernel parameters */
    GMM__MAP_CHUNK = 1024,       /* slots whose ranks one warp counts */
    GMM__ROUTE_CHUNK = 8,        /* tokens whose loss terms one warp adds up; the most that it takes together */
    GMM__ROUTE_FOLD = 64,        /* partial sums that one step adds up */
    GMM__ROUTE_PITCH = 33,       /* words between rows of 32 experts' sort keys */
    GMM__ROUTE_BLOCK = 256,      /* most threads of a CTA of gmm_route_topk: each CTA adds its counts once */
    GMM__ROUTE_PER_SM = 5,       /* and such CTAs that a multiprocessor holds */
    GMM__ELEM_SHARED = 48 * 1024 /* bytes of shared memory that a CTA has without an attribute */
};

/* ................................................................................. Arguments of the launchers ... */

/* A matrix as kernels address it. vec: base and rows are aligned to 16 bytes. data NULL: the matrix is absent. */
typedef struct gmm__view {
    void *data;
    int64_t ld; /* elements */
    gmm_dtype dtype;
    int32_t vec;
} gmm__view;

/* Layout of the gate and linear columns of a gated activation. */
enum {
    /* blocks of a multiple of 8 columns, or halves: 8 gate columns and 8 linear columns are contiguous */
    GMM__GLU_SPLIT = 0,
    GMM__GLU_PAIRS = 1,  /* gate and linear columns alternate */
    GMM__GLU_ELEMENT = 2 /* other block sizes: elements are accessed one by one */
};

typedef struct gmm__act_args {
    const int64_t *valid_rows; /* device memory: number of rows in use */
    int64_t rows;
    int32_t ffn, interleave;   /* columns are 32-bit, since 64-bit division is slow */
    int32_t tail_zero, gated, layout, wide;
    gmm_act_kind kind;
    gmm_act_coef coef;
    gmm__view x, y, dy, dx;
    const float *prob;
    float *dprob;
    uint32_t *amax;            /* [groups] raised to the amaxes, as bits, of y (forward) or dx (backward); NULL: none */
    int32_t groups;            /* with amax: valid_rows is the last of groups + 1 row offsets, which are read too */
} gmm__act_args;

typedef struct gmm__route_args {
    gmm__view logits, dlogits;
    int64_t tokens;
    int32_t experts, topk, sigmoid, normalize;
    float scale;
    float aux, z;                        /* aux: aux_coeff E / (topk T^2 B), T: tokens of a sequence; z: z_coeff over
                                            the call's tokens. With padding both are without these counts, and kernels
                                            divide by the tokens that are no padding. 0: the loss is not computed */
    const float *expert_bias, *dprobs, *dloss;
    int32_t *indices, *counts, *offsets; /* counts: forward needs it for offsets, aux_loss and total_counts */
    float *probs, *aux_loss, *z_loss;
    float *sums;                         /* forward with losses or Sinkhorn: gmm__route_sums_bytes bytes */
    float *scratch;                      /* gmm__route_scratch_bytes bytes */
    int32_t groups, group_topk, group_sum;   /* groups 1: the choice is not limited */
    int32_t sequences, sequence_first;       /* B >= 1 */
    int32_t *sequence_counts;            /* [B][E] with several sequences and aux_loss; else NULL */
    int64_t *total_counts;               /* raised by the counts */
    const uint8_t *padding;
    int32_t *valid;                      /* [B] with padding: each sequence's tokens that are no padding; else NULL */
    float *multipliers;                  /* Sinkhorn: [E] of experts, then 1 once they have converged, else 0 */
    int32_t iterations;                  /* Sinkhorn: at most; 0 = none */
    float tolerance;
    /* set by the launcher of gmm_route_topk */
    uint32_t length, chunk;              /* tokens of a sequence; tokens that a warp takes together */
    uint32_t sequence_chunks, chunks;    /* chunks of a sequence; of all: below 2^31, as T topk is */
    int32_t count_in_cta;                /* CTAs count in shared memory first */
    int32_t softmax, values;             /* exponentials are needed; experts are chosen by values other than scores */
} gmm__route_args;

/* A routing as slots and as dense matrices; see gmm_dense_route. */
typedef struct gmm__dense_args {
    int64_t tokens;
    int32_t experts, topk, to_dense;
    uint8_t *map;
    float *values, *probs;
    int32_t *indices, *counts;
} gmm__dense_args;

typedef struct gmm__bias_args {
    int64_t *total_counts; /* [layers][experts] */
    float *bias, rate;
    int32_t experts, layers;
} gmm__bias_args;

typedef struct gmm__map_args {
    const int32_t *indices;
    int64_t slots, capacity; /* T topk, R */
    int32_t experts, align;
    int32_t *row_of, *slot_of, *sizes;
    uint32_t *fault;
    int32_t *counts;         /* [E][chunks]: slots of each expert per chunk, then their prefix sums */
    int64_t *starts;         /* [E] first row of each expert */
} gmm__map_args;

typedef struct gmm__permute_args {
    gmm__view src, dst;        /* each launcher says what they are */
    int64_t tokens, capacity, hidden;
    int32_t topk, experts, tail_zero, wide;
    const int32_t *row_of, *slot_of, *sizes;
    const float *probs;        /* probabilities of slots; NULL: ones */
    const float *row_probs_in; /* read by gmm__k_gather_probs */
    uint32_t *fault;           /* NULL: faults are not reported */
    float *row_probs;          /* written by gmm__k_permute_rows and gmm__k_gather_row_probs */
    float *dprobs;             /* written by gmm__k_gather_probs and gmm__k_unpermute_dots */
} gmm__permute_args;

/* Rows of groups without padding and with each group padded to a multiple of `align` rows, cut off at `capacity`. */
typedef struct gmm__pad_args {
    gmm__view src, dst;
    int64_t rows, cols;     /* rows: capacity of dst */
    const int64_t *offsets; /* device [groups + 1]: offsets without padding */
    const int32_t *blocks;  /* device [groups + 1]: prefix sums of the groups' blocks of `align` rows */
    int64_t groups, align, capacity;
    int32_t pad, tail_zero; /* pad: dst has the padding, else src has it */
    const float *src_prob;
    float *dst_prob;
    int32_t *sizes;         /* padded sizes; NULL: not written */
    uint32_t *fault;        /* NULL: faults are not reported */
} gmm__pad_args;

/* Permutes 2 ffn rows or columns between halves and blocks. Where a table is given, data is NULL. */
typedef struct gmm__glu_args {
    gmm__view src, dst;
    void *const *src_table, *const *dst_table; /* in device memory */
    int64_t src_stride, dst_stride;            /* elements between consecutive matrices */
    int64_t count, ffn, cols, block;
    int32_t inverse;
} gmm__glu_args;

/* y = beta y + scale (start + x_0 + x_1 + ...), summed in fp32 from left to right; y is not read where beta is 0. */
typedef struct gmm__accumulate_args {
    gmm__view x, y, start; /* x: dtype and layout of every addend, without data; start: fp32 or absent */
    const char *addends[GMM__ELEM_ADDENDS];
    int32_t count;         /* number of addends, at least 1 */
    int64_t rows, cols;    /* any; the launcher splits long rows */
    float scale, beta;
} gmm__accumulate_args;

/* dst = src. F32, F16 and BF16 convert into one another; any other dtype of whole bytes is copied. */
typedef struct gmm__convert_args {
    gmm__view src, dst;
    int64_t rows, cols;
} gmm__convert_args;

/* A copy in units (GMM__ELEM_UNITS): the same kernels serve every dtype. Strides and columns count units. */
typedef struct gmm__copy_args {
    const void *src;
    void *dst;
    int64_t rows, cols, src_ld, dst_ld;
} gmm__copy_args;

/* Launch limits of a call: most CTAs of a grid, whether programmatic dependent launch is used, and how many
   multiprocessors may be used (0: all). */
typedef struct gmm__launch_limits {
    int64_t max_ctas;
    int32_t pdl, sm_limit;
} gmm__launch_limits;

