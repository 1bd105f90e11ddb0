/* ................................................................................................ 15.3 Schemes ... */
/* The schemes of this library: patterns, slots, forms and scalings of each family of checkpoints. */

#define GMM__CK_L "decoder.layers.{L}.mlp."
#define GMM__CK_H "model.layers.{L}."
#define GMM__CK_ROW(pattern, slot, kind, half, form, transposed, scaling) \
    {pattern, slot, kind, half, form, transposed, GMM_SCALING_##scaling}
#define GMM__CK_PLAIN(pattern, slot, kind) \
    {pattern, slot, kind, GMM_CKPT_BOTH, GMM_CKPT_EACH, 0, GMM_SCALING_NONE}

/* A weight, its bias and its scales in one form; `front` and `e` stand around the words of the names. */
#define GMM__CK_SCALE_LIST(front, e, slot, form) \
    GMM__CK_ROW(front "weight_scale_inv" e, slot, GMM_CKPT_SCALE, GMM_CKPT_BOTH, form, 0, 128X128), \
    GMM__CK_ROW(front "weight_scale" e, slot, GMM_CKPT_SCALE, GMM_CKPT_BOTH, form, 0, 128X128), \
    GMM__CK_ROW(front "weight_tensor_scale" e, slot, GMM_CKPT_TENSOR_SCALE, GMM_CKPT_BOTH, form, 0, 128X128), \
    GMM__CK_ROW(front "weight_amax" e, slot, GMM_CKPT_AMAX, GMM_CKPT_BOTH, form, 0, 128X128)
#define GMM__CK_LINEAR_LIST(front, e, slot, form) \
    GMM__CK_ROW(front "weight" e, slot, GMM_CKPT_WEIGHT, GMM_CKPT_BOTH, form, 0, 128X128), \
    GMM__CK_ROW(front "bias" e, slot, GMM_CKPT_BIAS, GMM_CKPT_BOTH, form, 0, NONE), \
    GMM__CK_SCALE_LIST(front, e, slot, form)

static const gmm_ckpt_row gmm__ck_module[] = {
    GMM__CK_LINEAR_LIST("{p}.", "{e}", GMM_CKPT_SLOT_ANY, GMM_CKPT_EACH),
    GMM__CK_LINEAR_LIST("{p}.", "", GMM_CKPT_SLOT_ANY, GMM_CKPT_STACKED),
};

/* Router and shared experts, which every Megatron scheme has. */
#define GMM__CK_MEGATRON_LIST \
    GMM__CK_PLAIN(GMM__CK_L "router.weight", GMM_CKPT_ROUTER, GMM_CKPT_WEIGHT), \
    GMM__CK_PLAIN(GMM__CK_L "router.bias", GMM_CKPT_ROUTER, GMM_CKPT_BIAS), \
    GMM__CK_PLAIN(GMM__CK_L "router.expert_bias", GMM_CKPT_ROUTER_CORRECTION, GMM_CKPT_WEIGHT), \
    GMM__CK_PLAIN(GMM__CK_L "shared_experts.linear_fc1.weight", GMM_CKPT_SHARED_FC1, GMM_CKPT_WEIGHT), \
    GMM__CK_SCALE_LIST(GMM__CK_L "shared_experts.linear_fc1.", "", GMM_CKPT_SHARED_FC1, GMM_CKPT_EACH), \
    GMM__CK_PLAIN(GMM__CK_L "shared_experts.linear_fc2.weight", GMM_CKPT_SHARED_FC2, GMM_CKPT_WEIGHT), \
    GMM__CK_SCALE_LIST(GMM__CK_L "shared_experts.linear_fc2.", "", GMM_CKPT_SHARED_FC2, GMM_CKPT_EACH), \
    GMM__CK_PLAIN(GMM__CK_L "shared_experts.gate_weight", GMM_CKPT_SHARED_GATE, GMM_CKPT_WEIGHT)

static const gmm_ckpt_row gmm__ck_megatron[] = {
    GMM__CK_LINEAR_LIST(GMM__CK_L "experts.linear_fc1.", "{e}", GMM_CKPT_FC1, GMM_CKPT_EACH),
    GMM__CK_LINEAR_LIST(GMM__CK_L "experts.linear_fc1.", "", GMM_CKPT_FC1, GMM_CKPT_STACKED),
    GMM__CK_LINEAR_LIST(GMM__CK_L "experts.linear_fc2.", "{e}", GMM_CKPT_FC2, GMM_CKPT_EACH),
    GMM__CK_LINEAR_LIST(GMM__CK_L "experts.linear_fc2.", "", GMM_CKPT_FC2, GMM_CKPT_STACKED),
    GMM__CK_MEGATRON_LIST,
};

static const gmm_ckpt_row gmm__ck_sequential[] = {
    GMM__CK_LINEAR_LIST(GMM__CK_L "experts.local_experts.{e}.linear_fc1.", "", GMM_CKPT_FC1, GMM_CKPT_EACH),
    GMM__CK_LINEAR_LIST(GMM__CK_L "experts.local_experts.{e}.linear_fc2.", "", GMM_CKPT_FC2, GMM_CKPT_EACH),
    GMM__CK_MEGATRON_LIST,
};

static const gmm_ckpt_row gmm__ck_legacy[] = { /* [E, in, out], declared as matrices of hidden rows or columns */
    GMM__CK_ROW(GMM__CK_L "experts.weight1", GMM_CKPT_FC1, GMM_CKPT_WEIGHT, GMM_CKPT_BOTH, GMM_CKPT_WIDE, 1, NONE),
    GMM__CK_ROW(GMM__CK_L "experts.weight2", GMM_CKPT_FC2, GMM_CKPT_WEIGHT, GMM_CKPT_BOTH, GMM_CKPT_TALL, 1, NONE),
    GMM__CK_MEGATRON_LIST,
};

/* A weight as Hugging Face's models name it, with the scales of each format: weight_scale_inv of 128x128 blocks and of
   one value, weight_scale of all others, and weight_scale_2 beside those of NV16. Every expert's gate, up and down
   weights are separate tensors. */
#define GMM__CK_EACH(pattern, slot, kind, half) \
    GMM__CK_ROW(GMM__CK_H pattern, slot, kind, half, GMM_CKPT_EACH, 0, 128X128)
#define GMM__CK_WEIGHT_LIST(pattern, slot, half) \
    GMM__CK_EACH(pattern, slot, GMM_CKPT_WEIGHT, half), \
    GMM__CK_EACH(pattern "_scale_inv", slot, GMM_CKPT_SCALE, half), \
    GMM__CK_EACH(pattern "_scale", slot, GMM_CKPT_SCALE, half), \
    GMM__CK_EACH(pattern "_scale_2", slot, GMM_CKPT_TENSOR_SCALE, half)

static const gmm_ckpt_row gmm__ck_mixtral[] = {
    GMM__CK_WEIGHT_LIST("block_sparse_moe.experts.{e}.w1.weight", GMM_CKPT_FC1, GMM_CKPT_GATE),
    GMM__CK_WEIGHT_LIST("block_sparse_moe.experts.{e}.w3.weight", GMM_CKPT_FC1, GMM_CKPT_UP),
    GMM__CK_WEIGHT_LIST("block_sparse_moe.experts.{e}.w2.weight", GMM_CKPT_FC2, GMM_CKPT_BOTH),
    GMM__CK_PLAIN(GMM__CK_H "block_sparse_moe.gate.weight", GMM_CKPT_ROUTER, GMM_CKPT_WEIGHT),
};

#define GMM__CK_QWEN_LIST \
    GMM__CK_WEIGHT_LIST("mlp.experts.{e}.gate_proj.weight", GMM_CKPT_FC1, GMM_CKPT_GATE), \
    GMM__CK_WEIGHT_LIST("mlp.experts.{e}.up_proj.weight", GMM_CKPT_FC1, GMM_CKPT_UP), \
    GMM__CK_WEIGHT_LIST("mlp.experts.{e}.down_proj.weight", GMM_CKPT_FC2, GMM_CKPT_BOTH), \
    GMM__CK_PLAIN(GMM__CK_H "mlp.gate.weight", GMM_CKPT_ROUTER, GMM_CKPT_WEIGHT)

static const gmm_ckpt_row gmm__ck_qwen3[] = {
    GMM__CK_QWEN_LIST,
};

static const gmm_ckpt_row gmm__ck_qwen2[] = {
    GMM__CK_QWEN_LIST,
    GMM__CK_WEIGHT_LIST("mlp.shared_expert.gate_proj.weight", GMM_CKPT_SHARED_FC1, GMM_CKPT_GATE),
    GMM__CK_WEIGHT_LIST("mlp.shared_expert.up_proj.weight", GMM_CKPT_SHARED_FC1, GMM_CKPT_UP),
    GMM__CK_WEIGHT_LIST("mlp.shared_expert.down_proj.weight", GMM_CKPT_SHARED_FC2, GMM_CKPT_BOTH),
    GMM__CK_PLAIN(GMM__CK_H "mlp.shared_expert_gate.weight", GMM_CKPT_SHARED_GATE, GMM_CKPT_WEIGHT),
};

static const gmm_ckpt_row gmm__ck_deepseek[] = {
    GMM__CK_QWEN_LIST,
    GMM__CK_PLAIN(GMM__CK_H "mlp.gate.e_score_correction_bias", GMM_CKPT_ROUTER_CORRECTION, GMM_CKPT_WEIGHT),
    GMM__CK_WEIGHT_LIST("mlp.shared_experts.gate_proj.weight", GMM_CKPT_SHARED_FC1, GMM_CKPT_GATE),
    GMM__CK_WEIGHT_LIST("mlp.shared_experts.up_proj.weight", GMM_CKPT_SHARED_FC1, GMM_CKPT_UP),
    GMM__CK_WEIGHT_LIST("mlp.shared_experts.down_proj.weight", GMM_CKPT_SHARED_FC2, GMM_CKPT_BOTH),
};

#define GMM__CK_STACK(pattern, slot, kind, transposed, scaling) \
    GMM__CK_ROW(GMM__CK_H "mlp." pattern, slot, kind, GMM_CKPT_BOTH, GMM_CKPT_STACKED, transposed, scaling)

static const gmm_ckpt_row gmm__ck_fused[] = {
    GMM__CK_STACK("experts.gate_up_proj", GMM_CKPT_FC1, GMM_CKPT_WEIGHT, 0, NONE),
    GMM__CK_STACK("experts.down_proj", GMM_CKPT_FC2, GMM_CKPT_WEIGHT, 0, NONE),
    GMM__CK_PLAIN(GMM__CK_H "mlp.gate.weight", GMM_CKPT_ROUTER, GMM_CKPT_WEIGHT),
};

static const gmm_ckpt_row gmm__ck_fused_transposed[] = {
    GMM__CK_STACK("experts.gate_up_proj", GMM_CKPT_FC1, GMM_CKPT_WEIGHT, 1, NONE),
    GMM__CK_STACK("experts.down_proj", GMM_CKPT_FC2, GMM_CKPT_WEIGHT, 1, NONE),
    GMM__CK_PLAIN(GMM__CK_H "mlp.gate.weight", GMM_CKPT_ROUTER, GMM_CKPT_WEIGHT),
};

static const gmm_ckpt_row gmm__ck_gpt_oss[] = {
    GMM__CK_STACK("experts.gate_up_proj", GMM_CKPT_FC1, GMM_CKPT_WEIGHT, 1, NONE),
    GMM__CK_STACK("experts.gate_up_proj_blocks", GMM_CKPT_FC1, GMM_CKPT_WEIGHT, 0, MX32),
    GMM__CK_STACK("experts.gate_up_proj_scales", GMM_CKPT_FC1, GMM_CKPT_SCALE, 0, MX32),
    GMM__CK_STACK("experts.gate_up_proj_bias", GMM_CKPT_FC1, GMM_CKPT_BIAS, 0, NONE),
    GMM__CK_STACK("experts.down_proj", GMM_CKPT_FC2, GMM_CKPT_WEIGHT, 1, NONE),
    GMM__CK_STACK("experts.down_proj_blocks", GMM_CKPT_FC2, GMM_CKPT_WEIGHT, 0, MX32),
    GMM__CK_STACK("experts.down_proj_scales", GMM_CKPT_FC2, GMM_CKPT_SCALE, 0, MX32),
    GMM__CK_STACK("experts.down_proj_bias", GMM_CKPT_FC2, GMM_CKPT_BIAS, 0, NONE),
    GMM__CK_PLAIN(GMM__CK_H "mlp.router.weight", GMM_CKPT_ROUTER, GMM_CKPT_WEIGHT),
    GMM__CK_PLAIN(GMM__CK_H "mlp.router.bias", GMM_CKPT_ROUTER, GMM_CKPT_BIAS),
};

#define GMM__CK_SCHEME(name, rows, glu_known, glu_block, global_index) \
    {name, rows, (int32_t)(sizeof rows / sizeof rows[0]), glu_known, glu_block, global_index}

static const gmm_ckpt_scheme gmm__ck_schemes[] = {
    GMM__CK_SCHEME("module", gmm__ck_module, 0, 0, 0),
    GMM__CK_SCHEME("megatron", gmm__ck_megatron, 0, 0, 0),
    GMM__CK_SCHEME("sequential", gmm__ck_sequential, 0, 0, 0),
    GMM__CK_SCHEME("legacy", gmm__ck_legacy, 0, 0, 0),
    GMM__CK_SCHEME("mixtral", gmm__ck_mixtral, 0, 0, 1),
    GMM__CK_SCHEME("qwen2-moe", gmm__ck_qwen2, 0, 0, 1),
    GMM__CK_SCHEME("qwen3-moe", gmm__ck_qwen3, 0, 0, 1),
    GMM__CK_SCHEME("deepseek-v3", gmm__ck_deepseek, 0, 0, 1),
    GMM__CK_SCHEME("fused", gmm__ck_fused, 1, 0, 1),
    GMM__CK_SCHEME("fused-transposed", gmm__ck_fused_transposed, 1, 0, 1),
    GMM__CK_SCHEME("gpt-oss", gmm__ck_gpt_oss, 1, 1, 1),
};

#undef GMM__CK_L
#undef GMM__CK_H
#undef GMM__CK_ROW
#undef GMM__CK_PLAIN
#undef GMM__CK_MEGATRON_LIST
#undef GMM__CK_SCALE_LIST
#undef GMM__CK_LINEAR_LIST
#undef GMM__CK_EACH
#undef GMM__CK_QWEN_LIST
#undef GMM__CK_WEIGHT_LIST
#undef GMM__CK_STACK
#undef GMM__CK_SCHEME

GMMDEF const gmm_ckpt_scheme *gmm_ckpt_scheme_at(int32_t index) {
    const int32_t count = (int32_t)(sizeof gmm__ck_schemes / sizeof gmm__ck_schemes[0]);
    return index >= 0 && index < count ? &gmm__ck_schemes[index] : NULL;
}

GMMDEF const gmm_ckpt_scheme *gmm_ckpt_scheme_of(const char *name) {
    int32_t i;
    for (i = 0; name && gmm_ckpt_scheme_at(i); i++)
        if (!strcmp(gmm__ck_schemes[i].name, name)) return &gmm__ck_schemes[i];
    return NULL;
}

