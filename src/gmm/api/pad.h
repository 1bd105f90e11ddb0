/* ------------------------------------------------------------------------------------ 9 Pad, GLU interleave --- */

/* Multiple of rows to which the recipes of other libraries pad each group (1 = no padding): 256 for grouped-tensor
   kernels, whatever the recipe; else 32 for MXFP8, 128 for NVFP4, 16 for other FP8. This library needs no padding for
   any recipe. Pure. */
GMMDEF int32_t gmm_pad_align(gmm_recipe_kind recipe, int32_t grouped_tensor);

typedef struct gmm_pad_in {
    gmm_recipe_kind recipe;
    gmm_dispatcher dispatcher;
    int32_t grouped_tensor;       /* the experts use grouped-tensor kernels */
    int32_t router_padding;       /* the router was asked to round counts up */
    int32_t router_padding_done;  /* and every count is a multiple, which too few tokens make impossible */
    int32_t permute_fusion;       /* permutation is fused, by a kernel that pads */
} gmm_pad_in;

/* The multiple to which the expert MLP must pad: gmm_pad_align(recipe, grouped_tensor), and 1 where rows arrive padded
   from the router (only if router_padding_done), from HybridEP or NCCL-EP, or from DeepEP's fused permute-and-pad with
   grouped tensors. Pure.
   Errors: GMM_E_NULL, GMM_E_CONFIG (unknown recipe or dispatcher). */
GMMDEF gmm_status gmm_pad_decide(const gmm_pad_in *in, int32_t *align, gmm_error *error);

/* Rounds every group up to `align` rows. Empty groups stay empty; new rows and their probabilities are zeros.
   Shapes: src [T, cols] in the order of `groups`; dst [R, cols]; src_prob [T], dst_prob [R]; sizes [G]. In unpad src is
       [R, cols], dst [T, cols], src_prob [R] and dst_prob [T].
   dtypes: src and dst share any dtype of whole bytes; probabilities fp32; sizes int32.  Aliasing: none. */
typedef struct gmm_padding {
    uint32_t struct_size;
    int32_t align;            /* >= 1 */
    int64_t cols;             /* >= 1 */
    int64_t padded_capacity;  /* R >= 0; T + G (align - 1) always suffices. With sizes at most 2^31 - 1 */
    const gmm_groups *groups; /* the unpadded split; tail and fault apply to the destination */
    const gmm_options *options;
    const gmm_mat *src;
    const gmm_mat *dst;
    const float *src_prob;
    float *dst_prob;          /* both or none */
    int32_t *sizes;           /* pad writes the padded sizes, unpad does not look at it; NULL = not wanted */
} gmm_padding;

/* Engine and workspace of GMM_OP_PAD or GMM_OP_UNPAD.  Stream, graph: none. Errors: as the operation. */
GMMDEF gmm_status gmm_pad_query(gmm_context *ctx, gmm_op op, const gmm_padding *padding, gmm_info *info);

/* Pads. Stream, graph: enqueued; capturable. Errors: as gmm_linear_fwd; a padded sum above R is GMM_FAULT_CAPACITY, or
   GMM_E_SPLIT where a faulty split is. */
GMMDEF gmm_status gmm_pad(gmm_context *ctx, const gmm_padding *padding, void *workspace, size_t workspace_bytes,
                          gmm_stream stream);

/* Removes the padding: the inverse of gmm_pad on the live rows.
   Stream, graph: enqueued; capturable. Errors: as gmm_pad. */
GMMDEF gmm_status gmm_unpad(gmm_context *ctx, const gmm_padding *padding, void *workspace, size_t workspace_bytes,
                            gmm_stream stream);

/* Permutes FC1's gate part a and linear part b between halves [a | b] and blocks [a:B | b:B | a:B ...].
   Shapes: by axis. GMM_GLU_ROWS permutes the rows of count matrices of [2 ffn, cols]: weights, biases (cols = 1, ld = 1
       and group_stride = 2 ffn). GMM_GLU_COLUMNS permutes the columns of one matrix of [count, 2 ffn]: activations.
   dtypes: src and dst share any dtype of whole bytes.  Aliasing: none, not in place. */
typedef enum gmm_glu_axis { GMM_GLU_ROWS = 0, GMM_GLU_COLUMNS = 1, GMM_GLU_AXIS_MAX = 0x7fffffff } gmm_glu_axis;

typedef struct gmm_glu {
    uint32_t struct_size;
    gmm_glu_axis axis;
    int32_t inverse;     /* 0: halves to blocks; 1: blocks to halves */
    int32_t block;       /* B >= 1, a divisor of ffn; B = ffn is the identity */
    int64_t ffn;         /* >= 1 */
    int64_t count;       /* matrices or rows, >= 0 */
    int64_t cols;        /* ROWS: columns of each matrix, >= 1; COLUMNS: not read */
    const gmm_options *options;
    const gmm_mat *src;  /* ROWS: packed or table; COLUMNS: packed */
    const gmm_mat *dst;
} gmm_glu;

/* Engine and workspace of GMM_OP_GLU_INTERLEAVE.  Stream, graph: none. Errors: as the operation. */
GMMDEF gmm_status gmm_glu_query(gmm_context *ctx, gmm_op op, const gmm_glu *glu, gmm_info *info);

/* Interleaves, or restores the halves.  Stream, graph: enqueued; capturable.
   Errors: as gmm_linear_fwd; GMM_E_CONFIG (block). */
GMMDEF gmm_status gmm_glu_interleave(gmm_context *ctx, const gmm_glu *glu, void *workspace, size_t workspace_bytes,
                                     gmm_stream stream);

