/* ------------------------------------------------------------------------------------------------- 7 Routing --- */

typedef enum gmm_score { GMM_SCORE_SOFTMAX = 0, GMM_SCORE_SIGMOID = 1, GMM_SCORE_MAX = 0x7fffffff } gmm_score;

/* Top-k routing. The scores s[t] are the softmax or sigmoid of logits[t]. The k experts with the largest s +
   expert_bias are chosen, of equal values the lower index (a NaN score ranks last); indices are in falling order of
   that value.
       probs[t][i] = scale s[t][e_i]; if normalize, divided by the sum of s over the chosen experts (sigmoid: + 1e-20)
   Losses are sums over tokens in a fixed order, where c_e is the number of times that expert e was chosen, and q is s,
   for sigmoid divided by the token's sum of s over all experts:
       aux_loss = aux_coeff E / (topk T^2) sum_e c_e sum_t q[t][e]
       z_loss = z_coeff / T sum_t logsumexp(logits[t])^2
   Shapes: logits, dlogits [T, E]; expert_bias [E]; indices, probs, dprobs [T, topk]; counts [E]; offsets [E + 1];
       T topk < 2^31. Where all scores of a denominator are 0, the quotient is 0.
   dtypes: logits, dlogits F32, F16, BF16; indices int32; counts, offsets int32; the rest fp32.  Aliasing: none. */
typedef struct gmm_route {
    uint32_t struct_size;
    int32_t experts;         /* E >= 1 */
    int64_t tokens;          /* T >= 0 */
    int32_t topk;            /* 1 to E */
    gmm_score score;
    int32_t normalize;
    float scale;             /* 0 = 1 */
    const gmm_options *options;
    const gmm_mat *logits;
    const float *expert_bias;/* selection only; NULL = none */
    int32_t *indices;        /* fwd writes, bwd reads */
    float *probs;            /* fwd writes */
    int32_t *counts;         /* tokens per expert; fwd writes, bwd reads if aux_coeff is not 0; else may be NULL */
    int32_t *offsets;        /* exclusive prefix sums of counts; NULL = not wanted */
    float aux_coeff, z_coeff;/* finite; 0 = the loss is 0 and has no gradient */
    float *aux_loss, *z_loss;/* one value each; NULL = not wanted */
    const float *dprobs;     /* bwd: gradient of probs; NULL = zeros */
    const float *dloss;      /* bwd: [2] gradients of aux_loss and z_loss; NULL = ones */
    const gmm_mat *dlogits;  /* bwd writes */
} gmm_route;

/* Engine and workspace of GMM_OP_TOPK_FWD or GMM_OP_TOPK_BWD.  Stream, graph: none. Errors: as the operation. */
GMMDEF gmm_status gmm_topk_query(gmm_context *ctx, gmm_op op, const gmm_route *route, gmm_info *info);

/* indices, probs, counts, offsets, losses. Needs logits, indices, probs.  Stream, graph: enqueued; capturable.
   Errors: as gmm_linear_fwd. */
GMMDEF gmm_status gmm_topk_fwd(gmm_context *ctx, const gmm_route *route, void *workspace, size_t workspace_bytes,
                               gmm_stream stream);

/* dlogits from dprobs, dloss, logits, indices, counts. The choice of experts and expert_bias have no gradient.
   Stream, graph: enqueued; capturable. Errors: as gmm_linear_fwd. */
GMMDEF gmm_status gmm_topk_bwd(gmm_context *ctx, const gmm_route *route, void *workspace, size_t workspace_bytes,
                               gmm_stream stream);

