/* ------------------------------------------------------------------------------------------------- 7 Routing --- */

typedef enum gmm_score { GMM_SCORE_SOFTMAX = 0, GMM_SCORE_SIGMOID = 1, GMM_SCORE_MAX = 0x7fffffff } gmm_score;

/* Top-k routing. The scores s[t] are the softmax or sigmoid of logits[t]. The k experts with the largest value v are
   chosen, of equal values the lower index (a NaN ranks last); indices are in falling order of v.
       v = s + expert_bias, or with `sinkhorn` the balanced assignment below
       with `groups`, only experts of the token's group_topk best groups are chosen: those with the largest sum of their
           group_sum largest v, of equal sums the lower index
       probs[t][i] = scale s[t][e_i]; if normalize, divided by the sum of s over the chosen experts (sigmoid: + 1e-20)
   Losses are sums over tokens in a fixed order, where c_e is the number of times that expert e was chosen, and q is s,
   for sigmoid divided by the token's sum of s over all experts:
       aux_loss = aux_coeff E / (topk T^2) sum_e c_e sum_t q[t][e]
       z_loss = z_coeff / T sum_t logsumexp(logits[t])^2
   With `sequences` = B > 1 aux_loss is the mean over the sequences of their own losses: T, c_e and the sum over t are a
   sequence's, whose counts are sequence_counts; bwd reads these instead of counts.
   Tokens of `padding` choose no expert: their indices are -1 and their probs 0, they are in no count, loss and T, and
   their dlogits are 0.
   Sinkhorn's iteration balances x[t][e] = exp(logits[t][e] - max_e logits[t][e]) by multipliers of rows and columns,
   from b[e] = 1 on: a[t] = 1 / (T (sum_e b[e] x[t][e] + 1e-8)), then b[e] = 1 / (E (sum_t a[t] x[t][e] + 1e-8)). It
   ends when the mean of |change of b[e]| is at most the tolerance, or after `sinkhorn` iterations; v = b x. Tokens with
   NaN are left out of the sums. A GPU launches all `sinkhorn` iterations, with three to five kernels each; those that
   follow the end change nothing.
   Shapes: logits, dlogits [T, E]; expert_bias [E]; indices, probs, dprobs [T, topk]; counts, total_counts [E];
       sequence_counts [B, E]; offsets [E + 1]; padding [T]; T topk < 2^31. Where all scores of a denominator are 0, the
       quotient is 0; so are losses without tokens.
   dtypes: logits, dlogits F64, F32, F16, BF16, computed in fp32; indices int32; counts, offsets int32, total_counts
       int64; padding bytes; the rest fp32.  Aliasing: none. */
typedef struct gmm_route {
    uint32_t struct_size;
    int32_t experts;         /* E >= 1 */
    int64_t tokens;          /* T >= 0 */
    int32_t topk;            /* 1 to E */
    gmm_score score;
    int32_t normalize;
    float scale;             /* finite; 0 = 1 */
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
    int32_t groups;          /* a divisor of E: groups of consecutive experts; 0 or 1 = the choice is not limited */
    int32_t group_topk;      /* with groups: 1 to groups, and group_topk E / groups >= topk; else 0 */
    int32_t group_sum;       /* with groups: 1 to E / groups; 0 = topk / group_topk, which must be >= 1 */
    int32_t sinkhorn;        /* iterations at most; 0 = no balance. Excludes expert_bias */
    float sinkhorn_tolerance;/* finite, >= 0; 0 = 1e-4 */
    int32_t sequences;       /* B, a divisor of T; 0 = 1 */
    int32_t sequence_first;  /* 0: sequence b has tokens b T / B on; 1: token t is of sequence t mod B */
    int32_t reserved;        /* 0 */
    const uint8_t *padding;  /* nonzero = the token is padding; NULL = none is */
    int32_t *sequence_counts;/* with sequences > 1: as counts, by sequence; else NULL */
    int64_t *total_counts;   /* fwd adds the counts, over micro-batches for gmm_update_expert_bias; NULL = not wanted */
} gmm_route;

/* Engine and workspace of GMM_OP_TOPK_FWD or GMM_OP_TOPK_BWD.  Stream, graph: none. Errors: as the operation. */
GMMDEF gmm_status gmm_topk_query(gmm_context *ctx, gmm_op op, const gmm_route *route, gmm_info *info);

/* indices, probs, counts, offsets, losses. Needs logits, indices, probs.  Stream, graph: enqueued; capturable.
   Errors: as gmm_linear_fwd, GMM_E_CONFIG (fields that exclude each other). */
GMMDEF gmm_status gmm_topk_fwd(gmm_context *ctx, const gmm_route *route, void *workspace, size_t workspace_bytes,
                               gmm_stream stream);

/* dlogits from dprobs, dloss, logits, indices, counts. Needs logits and dlogits; indices with dprobs; with aux_coeff
   counts, or with sequences > 1 sequence_counts. The choice of experts and expert_bias have no gradient.
   Stream, graph: enqueued; capturable. Errors: as gmm_topk_fwd. */
GMMDEF gmm_status gmm_topk_bwd(gmm_context *ctx, const gmm_route *route, void *workspace, size_t workspace_bytes,
                               gmm_stream stream);

/* A routing as slots (indices and probs, as gmm_route and gmm_permute have it) and as dense matrices: a map of bytes,
   nonzero where a token chose an expert, and values.
       to_dense     map[t][e] = 1 where an index of token t is e, else 0; values[t][e] = the sum of its probs there
       from_dense   with a map: indices are the experts of each row in rising order, -1 behind the last. Of more than
                    topk the first topk are taken. Without: indices are read.
                    probs[t][i] = values[t][e_i], 0 where the index is out of range; counts, offsets as in gmm_route
   The two are each other's backward: the gradient of `values` in to_dense becomes that of probs by from_dense without a
   map; the gradient of probs in from_dense becomes that of `values` by to_dense.
   Shapes: map, values [T, E]; indices, probs [T, topk]; counts [E]; offsets [E + 1]; T topk < 2^31.
   dtypes: map bytes; indices, counts, offsets int32; values, probs fp32.  Aliasing: none. */
typedef struct gmm_dense_route {
    uint32_t struct_size;
    int32_t experts;          /* E >= 1 */
    int64_t tokens;           /* T >= 0 */
    int32_t topk;             /* >= 1 */
    int32_t reserved;         /* 0 */
    const gmm_options *options;
    uint8_t *map;             /* to_dense writes, from_dense reads; NULL = not wanted, from_dense: none */
    float *values;            /* to_dense writes, from_dense reads; goes with probs */
    int32_t *indices;         /* to_dense reads; from_dense writes with a map, else reads */
    float *probs;             /* to_dense reads, from_dense writes; NULL = not wanted, as values */
    int32_t *counts, *offsets;/* from_dense with a map; NULL = not wanted; offsets need counts */
} gmm_dense_route;

/* Stream, graph: enqueued; capturable.
   Errors: GMM_E_NULL, GMM_E_ARG, GMM_E_ALIGN, GMM_E_OVERFLOW, GMM_E_VERSION, GMM_E_UNSUPPORTED, GMM_E_CUDA;
       GMM_E_CONFIG (an operand that the operation does not have). */
GMMDEF gmm_status gmm_route_to_dense(gmm_context *ctx, const gmm_dense_route *dense, gmm_stream stream);
GMMDEF gmm_status gmm_route_from_dense(gmm_context *ctx, const gmm_dense_route *dense, gmm_stream stream);

/* Balances experts without a loss: bias[e] rises by `rate` where fewer tokens than the mean over experts chose e, and
   falls by it where more did. total_counts become 0, for the next step. Where several ranks train on different tokens,
   their total_counts are added up first.
   Shapes: total_counts, bias [layers, E].  dtypes: int64, fp32. Counts are >= 0, and E times the sum of a layer's is
   below 2^63. */
typedef struct gmm_expert_bias {
    uint32_t struct_size;
    int32_t experts;          /* E >= 1 */
    int32_t layers;           /* rows of the arrays; 0 = 1 */
    float rate;               /* finite, >= 0 */
    const gmm_options *options;
    int64_t *total_counts;
    float *bias;
} gmm_expert_bias;

/* Stream, graph: enqueued; capturable.
   Errors: GMM_E_NULL, GMM_E_ARG, GMM_E_ALIGN, GMM_E_OVERFLOW, GMM_E_VERSION, GMM_E_UNSUPPORTED, GMM_E_CUDA. */
GMMDEF gmm_status gmm_update_expert_bias(gmm_context *ctx, const gmm_expert_bias *update, gmm_stream stream);

