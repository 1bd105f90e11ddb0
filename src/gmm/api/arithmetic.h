/* ------------------------------------------------------------------------------------------ 10 Small operations --- */

/* y = beta y + scale (x_0 + x_1 + ... + x_{count - 1}), which reduces gradients into main_grad: in fp32, in this order,
   with one rounding at the store. beta 0 does not read y. A scale of 0 means 0, unlike other fields with a default.
   Shapes: x count matrices of [rows, cols], packed or a table; y [rows, cols].
   dtypes: x and y each F32, F16 or BF16.  Aliasing: y may be one of x, with the same dtype and ld; else none. */
typedef struct gmm_accumulation {
    uint32_t struct_size;
    int32_t count;           /* >= 1 */
    int64_t rows;            /* >= 0 */
    int64_t cols;            /* >= 1 */
    const gmm_options *options;
    const gmm_mat *x;        /* a table is in host memory (GMM_MAT_TABLE_ON_HOST) and is read during the call */
    const gmm_mat *y;
    float scale;
    float beta;
} gmm_accumulation;

/* Engine and workspace of GMM_OP_ACCUMULATE.  Stream, graph: none. Errors: as the operation. */
GMMDEF gmm_status gmm_accumulate_query(gmm_context *ctx, const gmm_accumulation *accumulation, gmm_info *info);

/* Accumulates. Stream, graph: enqueued; capturable; a graph holds scale, beta and the addresses of a table.
   Errors: as gmm_linear_fwd. */
GMMDEF gmm_status gmm_accumulate(gmm_context *ctx, const gmm_accumulation *accumulation, void *workspace,
                                 size_t workspace_bytes, gmm_stream stream);

/* dst = src, row by row, rounded once to another dtype where dtypes differ.
   Shapes: src, dst [rows, cols], each with its own ld.
   dtypes: F32, F16 and BF16 into one another; any dtype of whole bytes into itself, which keeps every bit.
   Aliasing: none. */
typedef struct gmm_conversion {
    uint32_t struct_size;
    int32_t reserved;        /* 0 */
    int64_t rows;            /* >= 0 */
    int64_t cols;            /* >= 1 */
    const gmm_options *options;
    const gmm_mat *src;
    const gmm_mat *dst;
} gmm_conversion;

/* Engine and workspace of GMM_OP_CONVERT.  Stream, graph: none. Errors: as the operation. */
GMMDEF gmm_status gmm_convert_query(gmm_context *ctx, const gmm_conversion *conversion, gmm_info *info);

/* Converts. Stream, graph: enqueued; capturable. Errors: as gmm_linear_fwd. */
GMMDEF gmm_status gmm_convert(gmm_context *ctx, const gmm_conversion *conversion, void *workspace,
                              size_t workspace_bytes, gmm_stream stream);

