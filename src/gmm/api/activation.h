/* ---------------------------------------------------------------------------------------------- 4 Activation --- */

/* Settings of the activations of known models, for gmm_act_of. */
typedef enum gmm_act_preset {
    GMM_ACT_PRESET_SWIGLU = 0,  /* Mixtral, Qwen, DeepSeek, OLMoE */
    GMM_ACT_PRESET_GPT_OSS = 1, /* SwiGLU, limit 7, alpha 1.702, offset 1, interleave 1 */
    GMM_ACT_PRESET_KIMI_SITU = 2, /* SiTU-GLU, betas 4 and 25 */
    GMM_ACT_PRESET_NEMOTRON = 3,  /* squared ReLU, not gated */
    GMM_ACT_PRESET_MAX = 0x7fffffff
} gmm_act_preset;

/* The settings of a preset. Pure. Errors: an unknown preset gives GMM_ACT_NONE. */
GMMDEF gmm_act gmm_act_of(gmm_act_preset preset);
GMMDEF const char *gmm_act_name(gmm_act_kind kind); /* "swiglu"; "?" if unknown */

/* 1 if the activation reads two values per output, 0 otherwise. Pure. */
GMMDEF int gmm_act_gated(gmm_act_kind kind);

/* A row-scaled activation: y[r][j] = p_r f(x[r]) over rows of all groups.
   Shapes: x, dx [T, ffn] or, gated, [T, 2 ffn] in the order of gmm_act.interleave; y, dy [T, ffn]; prob, dprob [T].
   dtypes: F32, F16, BF16, each operand its own; prob and dprob fp32.
   Aliasing: none, but in bwd dx may be x, and y may be dy, with the same address, ld and size of elements. */
typedef struct gmm_activation {
    uint32_t struct_size;
    int32_t reserved;        /* 0 */
    int64_t ffn;             /* >= 1 */
    const gmm_groups *groups;
    const gmm_options *options;
    const gmm_act *act;
    const gmm_mat *x;
    const float *prob;       /* NULL = ones */
    const gmm_mat *y;
    const gmm_mat *dy;
    const gmm_mat *dx;
    float *dprob;            /* sum over j of dy[r][j] f(x[r])_j; NULL = not wanted */
} gmm_activation;

/* Engine and workspace of GMM_OP_ACT_FWD or GMM_OP_ACT_BWD.  Stream, graph: none. Errors: as the operation. */
GMMDEF gmm_status gmm_act_query(gmm_context *ctx, gmm_op op, const gmm_activation *activation, gmm_info *info);

/* y = p f(x). Needs x, y.  Stream, graph: enqueued; capturable.
   Errors: as gmm_linear_fwd, and GMM_E_CONFIG for settings that contradict one another. */
GMMDEF gmm_status gmm_act_fwd(gmm_context *ctx, const gmm_activation *activation, void *workspace,
                              size_t workspace_bytes, gmm_stream stream);

/* dx = p dy df/dx, dprob, and y = p f(x). Needs x, dy and one of dx, dprob, y; outputs that are NULL are not computed.
   Stream, graph, errors: as gmm_act_fwd. */
GMMDEF gmm_status gmm_act_bwd(gmm_context *ctx, const gmm_activation *activation, void *workspace,
                              size_t workspace_bytes, gmm_stream stream);

