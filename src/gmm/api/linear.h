/* ------------------------------------------------------------------------------------------ 3 Grouped linear --- */

/* Destination of the gradient of a weight or bias. A NULL descriptor: the gradient is not wanted and not computed.
   main_grad 0 stores the gradient. main_grad 1 adds it, unless overwrite is 1. See gmm_wgrad_decide.
   An empty group stores zeros; where it would add, it keeps the destination's bits. */
typedef struct gmm_grad {
    uint32_t struct_size;
    int32_t main_grad;
    int32_t overwrite;
    int32_t reserved;      /* 0 */
    const gmm_mat *mat;    /* F32, BF16 or F16, per group; packed or table */
    const float *beta;     /* [G] context memory: dst = grad + beta dst per group, whatever main_grad and overwrite are.
                              0 does not read dst; 1 adds (an empty group keeps the bits). NULL = by main_grad and
                              overwrite */
    const uint8_t *frozen; /* [G] context memory: nonzero = the group's gradient is not computed, and dst keeps it */
} gmm_grad;

/* A grouped linear layer: y[r] = p_r (alpha_g w_g x[r] + bias_g s_r) for every row r of group g.
   Shapes: x, dx [T, K]; y, dy [T, N]; w, dw [G][N, K]; bias, db [G][N]; bias_scale s, d_bias_scale, prob p [T].
   Gathered rows: with x_index, x is [index_rows, K], and its row x_index[r] / index_div (rounded down) stands for x[r];
       dy_index does the same for dy. A negative entry stands for a row of zeros; so does an entry past index_rows,
       which also sets GMM_FAULT_INDEX in groups.fault. gmm_permute.slot_of with index_div = topk takes rows from tokens
       that were not permuted, with the bits of permuted copies. Gathered operands are floats. GPU engines copy the rows
       to the workspace first; in forward and dgrad WGMMA does not where its kernels gather them faster, or where
       options.workspace_limit forbids it. Whether an index is NULL tells a query whether rows are gathered.
   dtypes: x and w share F32, F16 or BF16, and so do dy and w, dy and x. y, dx, bias and gradients are F32, F16 or BF16.
   Quantized operands (bgrad takes none): each product reads the copies whose blocks run along its contraction: fwd x
       and w, dgrad dy and w.columnwise, wgrad x.columnwise and dy.columnwise (wgrad reads no other field of x and dy).
       TENSOR and ROW multiply one another; 1X128 multiplies 1X128 and 128X128; MX32 multiplies MX32, and NV16 NV16; a w
       of MX32 or NV16 also multiplies floats. An element of MX32 or NV16 is the exact product of code and scale; MX32
       is Inf from 2^128 on, and GPUs round its values below 2^-126 to BF16. fp32 scales of blocks multiply the sum of
       each 128 elements along the contraction, other scales the whole sum. K and N must be
       multiples of gmm_info.in_align and out_align.
       Range: where the result is finite and normal, scales may be any finite numbers, whatever their products with one
       another and with alpha are, with two exceptions: the product of the scales of a block of x or dy and a block of
       w (wgrad: of dy and x) must be a normal number; and for two ROW operands on WGMMA the token scales (wgrad: those
       of dy) must be between 2^-90 and 2^70, and the other scales times alpha normal. CUBLASLT multiplies in the
       library's order.
   Batch invariance: on one engine a row of y or dx has the same bits however many rows its group has, and wherever it
   stands among them. Where a recipe scales a tensor as a whole, that holds for equal codes and scales. CUBLASLT is
   excepted where splits are on the host: its algorithm depends on the rows of the group.
   CUBLASLT: splits on the host make a product of the library per group. Splits in device memory make one of its grouped
       mode, if the library at run time is cuBLASLt 13.8 (CUDA 13.4 Update 1) or later, on compute capability 9.0: F16
       and BF16, K and N multiples of 8, matrices and rows at multiples of 16 bytes, tables on the host, no bias, alpha
       for all groups alike. Its algorithm is chosen for groups.rows_hint / G rows in every group, 0: capacity / G.
   Aliasing: none.  Alignment: each base to its element; stores are faster to multiples of 16 bytes. The engine WGMMA
   needs every matrix and row of x, w and dy at multiples of 16 bytes; another engine serves operands that are not.
   Addresses of weights in tables in device memory, which the host cannot see, must be multiples of 16 bytes under WGMMA
   (else GMM_FAULT_ADDRESS). */
typedef struct gmm_linear {
    uint32_t struct_size;
    int32_t alpha_per_group; /* 1: alpha is [G], else [1] */
    int64_t in_features;     /* K >= 1 */
    int64_t out_features;    /* N >= 1 */
    const gmm_groups *groups;
    const gmm_options *options;
    const gmm_mat *x;
    const gmm_mat *w;
    const gmm_mat *bias;     /* NULL = none */
    const float *bias_scale;  /* fp32, context memory: read by fwd and bgrad; NULL = ones */
    const float *alpha;      /* fp32, context memory: read by fwd, dgrad and wgrad; NULL = 1 */
    const gmm_mat *y;
    const gmm_mat *dy;
    const gmm_mat *dx;
    const gmm_grad *dw;
    const gmm_grad *db;
    float *d_bias_scale;      /* fp32: bgrad writes the sum over n of dy[r][n] bias_g[n]; NULL = not wanted */
    int32_t d_bias_scale_add; /* 1: added to d_bias_scale instead of stored */
    int32_t y_add;           /* 1: fwd adds to y, dgrad to dx, instead of storing */
    const float *prob;       /* fp32, context memory: fwd and dgrad multiply rows of their result by it before they add
                                to the old value and round; NULL = ones. wgrad and bgrad refuse it */
    const int32_t *x_index;  /* [T], context memory: fwd and wgrad gather rows of x; NULL = they do not */
    const int32_t *dy_index; /* [T], context memory: dgrad, wgrad and bgrad gather rows of dy; NULL = they do not */
    int64_t index_rows;      /* with an index: rows of the matrices that it gathers from, 0 to 2^31 - 1 */
    int32_t index_div;       /* divisor of the entries of x_index and dy_index, >= 1; 0 = 1 */
    int32_t reserved;        /* 0 */
} gmm_linear;

/* Engine, workspace and feature alignment of one linear operation (GMM_OP_LINEAR_*). Addresses may still be NULL.
   Stream, graph: no effect on either. Errors: those of the operation, except about addresses and workspace. */
GMMDEF gmm_status gmm_linear_query(gmm_context *ctx, gmm_op op, const gmm_linear *linear, gmm_info *info);

/* y = p (alpha x w^T + bias s) (+ y). Needs x, w, y.
   Stream, graph: enqueued; capturable, and a replay may have other group sizes.
   Errors: GMM_E_NULL, GMM_E_ARG (also overlap), GMM_E_DTYPE, GMM_E_STRIDE, GMM_E_ALIGN, GMM_E_OVERFLOW, GMM_E_SPLIT
       (splits on the host, or of a CPU context without a fault word), GMM_E_CONFIG (hadamard of two copies),
       GMM_E_WORKSPACE, GMM_E_VERSION, GMM_E_UNSUPPORTED, GMM_E_BUILD (left out by GMM_NO_QUANT or GMM_NO_F16),
       GMM_E_CAPTURE (host splits), GMM_E_CUDA. */
GMMDEF gmm_status gmm_linear_fwd(gmm_context *ctx, const gmm_linear *linear, void *workspace, size_t workspace_bytes,
                                 gmm_stream stream);

/* dx = p alpha dy w (+ dx). Needs dy, w, dx.  Stream, graph, errors: as gmm_linear_fwd. */
GMMDEF gmm_status gmm_linear_dgrad(gmm_context *ctx, const gmm_linear *linear, void *workspace, size_t workspace_bytes,
                                   gmm_stream stream);

/* dw_g = alpha_g dy_g^T x_g (+ beta dw_g), summed over the group's rows. Needs x, dy, dw.
   Stream, graph, errors: as gmm_linear_fwd. */
GMMDEF gmm_status gmm_linear_wgrad(gmm_context *ctx, const gmm_linear *linear, void *workspace, size_t workspace_bytes,
                                   gmm_stream stream);

/* db_g = sum over rows of s_r dy_r (+ beta db_g), and d_bias_scale. Needs dy, and db or (d_bias_scale and bias).
   Stream, graph, errors: as gmm_linear_fwd. */
GMMDEF gmm_status gmm_linear_bgrad(gmm_context *ctx, const gmm_linear *linear, void *workspace, size_t workspace_bytes,
                                   gmm_stream stream);

