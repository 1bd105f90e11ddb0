/* -------------------------------------------------------------------------------------- 8 Permute, unpermute --- */

/* Permutes tokens to expert order and back. One descriptor serves five calls:
       call            reads                                            writes
       permute_map     indices                                          row_of, slot_of, sizes
       permute_fwd     slot_of, sizes, row_of, x, probs                 rows, row_probs: both, or one
       unpermute_fwd   row_of, rows, probs                              out
       unpermute_bwd   row_of, slot_of, sizes, dout, rows, probs        drows, dprobs
       permute_bwd     row_of, drows, drow_probs                        dx, dprobs
   The fields up to `sizes` describe one permutation and may stay set in all five calls. A call refuses operands behind
   them that are not in its row of this table (GMM_E_CONFIG).
   Slot i of token t (its i-th expert) is dropped where indices[t][i] is -1.
   Rows of one expert keep the order of their tokens (then of their slots); experts follow one another, each segment
   rounded up to `align` rows.
   Shapes: x, dx [T, H]; indices, probs, dprobs, row_of [T, topk]; slot_of [R]; rows, drows [R, H]; row_probs,
       drow_probs [R]; sizes [E]; out, dout [T, H]. R is the capacity.
   dtypes: indices, maps int32; sizes int32; probabilities fp32; matrices F32, F16, BF16, FP8 and U8 for permute_fwd
       (same dtype on both sides), F32, F16, BF16 each their own elsewhere. Sums are fp32, in slot order.
   Aliasing: none. */
typedef struct gmm_permute {
    uint32_t struct_size;
    int32_t experts;          /* E >= 1 */
    int64_t tokens;           /* T >= 0; T topk < 2^31 */
    int64_t capacity;         /* R >= 0, < 2^31: rows of permuted buffers; slots that do not fit are dropped (-1) */
    int64_t hidden;           /* H >= 1 */
    int32_t topk;             /* >= 1 */
    int32_t align;            /* 0 = 1 */
    gmm_tail tail;            /* permuted rows past the last segment */
    int32_t reserved;         /* 0 */
    const gmm_options *options;
    uint32_t *fault;          /* GMM_FAULT_INDEX, GMM_FAULT_CAPACITY; NULL = not wanted */
    const int32_t *indices;
    int32_t *row_of;          /* row of each slot, -1 = dropped */
    int32_t *slot_of;         /* slot t topk + i of each row, -1 = padding; map writes all R */
    int32_t *sizes;           /* rows of each expert, padding included: the splits of gmm_groups. Their sum never
                                 exceeds the capacity: the first expert that does not fit gets the remaining rows,
                                 which may be no multiple of align, and the experts after it get 0 */
    const gmm_mat *x;
    const float *probs;       /* NULL = none: permute_fwd then takes no row_probs, unpermute adds rows unweighted */
    const gmm_mat *rows;
    float *row_probs;         /* 0 in padding; NULL = not wanted */
    const gmm_mat *out;
    const gmm_mat *dout;
    const gmm_mat *drows;
    const float *drow_probs;
    const gmm_mat *dx;
    float *dprobs;            /* permute_bwd: from drow_probs; unpermute_bwd: from dout and rows. Dropped slots get 0 */
} gmm_permute;

/* Engine and workspace of GMM_OP_PERMUTE_* or GMM_OP_UNPERMUTE_*.  Stream, graph: none. Errors: as the operation. */
GMMDEF gmm_status gmm_permute_query(gmm_context *ctx, gmm_op op, const gmm_permute *permute, gmm_info *info);

/* row_of, slot_of and sizes from indices; those of the three that are NULL are not wanted.
   Stream, graph: enqueued; capturable. Errors: as gmm_linear_fwd, GMM_E_CONFIG (an operand of another call). */
GMMDEF gmm_status gmm_permute_map(gmm_context *ctx, const gmm_permute *permute, void *workspace,
                                  size_t workspace_bytes, gmm_stream stream);

/* rows[r] = x[token of r], row_probs[r] = probs[slot of r]; padding rows are zeros. Needs slot_of, sizes, x and rows;
   for row_probs alone neither x nor rows, where products gather the rows of x (gmm_linear.x_index).
   With row_of a GPU reads each token once instead of once per row; results depend on slot_of alone.
   Stream, graph: enqueued; capturable. Errors: as gmm_permute_map. */
GMMDEF gmm_status gmm_permute_fwd(gmm_context *ctx, const gmm_permute *permute, void *workspace,
                                  size_t workspace_bytes, gmm_stream stream);

/* dx[t] = sum over slots of drows[row]; dprobs from drow_probs. Needs row_of, and drows with dx or drow_probs with
   dprobs.  Stream, graph: enqueued; capturable. Errors: as gmm_permute_map. */
GMMDEF gmm_status gmm_permute_bwd(gmm_context *ctx, const gmm_permute *permute, void *workspace,
                                  size_t workspace_bytes, gmm_stream stream);

/* out[t] = sum over slots of (probs) rows[row]. Needs row_of, rows, out.
   Stream, graph: enqueued; capturable. Errors: as gmm_permute_map. */
GMMDEF gmm_status gmm_unpermute_fwd(gmm_context *ctx, const gmm_permute *permute, void *workspace,
                                    size_t workspace_bytes, gmm_stream stream);

/* drows[r] = (probs) dout[token of r], zeros in padding; dprobs = dout . rows. Needs dout, and slot_of and sizes with
   drows (row_of as in permute_fwd), or row_of and rows with dprobs.  Stream, graph: enqueued; capturable.
   Errors: as gmm_permute_map. */
GMMDEF gmm_status gmm_unpermute_bwd(gmm_context *ctx, const gmm_permute *permute, void *workspace,
                                    size_t workspace_bytes, gmm_stream stream);

