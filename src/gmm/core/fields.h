/* .............................................................................. 14.16 Optional fields of calls ... */

/* The optional fields, options and flags of calls, one per row. A row gives the operations whose descriptors have the
   field (a range of GMM_OP_LIST), the condition under which a call uses it, and for each engine 1 if it honours the
   field. gmm__plan_row declines an engine that does not honour a field which the call uses, so that no engine
   silently ignores one. Whoever adds a field to a descriptor adds a row here, with 1 for the engines that implement it.
   Also 1     permissions (allow_*, fp8_fast_accum) and settings of one engine (tile, workspace_limit), which other
              engines may ignore; on the CPU engine sm_limit and groups.rows_hint, which never change results. CUBLASLT
              has 0 for sm_limit: with fewer multiprocessors cuBLASLt may choose algorithms with other bits.
   No row     required operands, and the results that an operation exists for, of which a call may want only some
              (linear.db, activation.dx, gradients of an MLP, route.counts, row_of, slot_of, sizes, dx and drows of
              permute, rowwise and columnwise of quantization). An engine is in the engine table for an operation only
              if it computes all of these.
   X(field, first operation, last operation, condition, CPU, WGMMA, MMA, CUBLASLT, name in messages) */
#define GMM__FIELD_LIST(X) \
    X(QUANTIZED, LINEAR_FWD, LINEAR_WGRAD, gmm__quantized(call), 1, 1, 1, 0, "quantized operands") \
    X(ALPHA, LINEAR_FWD, LINEAR_WGRAD, linear->alpha, 1, 1, 1, 1, "linear.alpha") \
    X(ALPHA_PER_GROUP, LINEAR_FWD, LINEAR_WGRAD, linear->alpha && linear->alpha_per_group, 1, 1, 1, 1, \
      "linear.alpha_per_group") \
    X(BIAS, LINEAR_FWD, LINEAR_FWD, call->mat[GMM__BIAS].dtype != GMM_NONE, 1, 1, 1, 1, "linear.bias") \
    X(BIAS_SCALE, LINEAR_FWD, LINEAR_BGRAD, \
      linear->bias_scale && (call->mat[GMM__BIAS].dtype != GMM_NONE || call->op == GMM_OP_LINEAR_BGRAD), 1, 1, 1, 0, \
      "linear.bias_scale") \
    X(D_BIAS_SCALE, LINEAR_BGRAD, LINEAR_BGRAD, linear->d_bias_scale, 1, 0, 1, 0, "linear.d_bias_scale") \
    X(D_BIAS_SCALE_ADD, LINEAR_BGRAD, LINEAR_BGRAD, linear->d_bias_scale && linear->d_bias_scale_add, 1, 0, 1, 0, \
      "linear.d_bias_scale_add") \
    X(LINEAR_PROB, LINEAR_FWD, LINEAR_DGRAD, linear->prob, 1, 1, 1, 0, "linear.prob") \
    X(INDEX, LINEAR_FWD, LINEAR_BGRAD, linear->x_index || linear->dy_index, 1, 1, 1, 0, "linear.x_index, dy_index") \
    X(Y_ADD, LINEAR_FWD, LINEAR_DGRAD, linear->y_add, 1, 1, 1, 1, "linear.y_add") \
    X(MAIN_GRAD, QUANTIZE, CONVERT, gmm__any_grad(call, GMM__GRAD_MAIN), 1, 1, 1, 1, "grad.main_grad") \
    X(GRAD_BETA, QUANTIZE, CONVERT, gmm__any_grad(call, GMM__GRAD_BETA), 1, 1, 1, 0, "grad.beta") \
    X(GRAD_FROZEN, QUANTIZE, CONVERT, gmm__any_grad(call, GMM__GRAD_FROZEN), 1, 1, 1, 0, "grad.frozen") \
    X(GROUPS_TAIL, QUANTIZE, CONVERT, call->groups.tail != GMM_TAIL_KEEP, 1, 1, 1, 1, "groups.tail") \
    X(GROUPS_FAULT, QUANTIZE, CONVERT, call->groups.fault, 1, 1, 1, 1, "groups.fault") \
    X(GROUPS_HINT, QUANTIZE, CONVERT, call->groups.rows_hint, 1, 1, 1, 1, "groups.rows_hint") \
    X(ROW_AMAX, QUANTIZE, CONVERT, gmm__any_row_amax(call), 1, 0, 1, 0, "GMM_MAT_ROW_AMAX") \
    X(SM_LIMIT, QUANTIZE, CONVERT, call->options.sm_limit, 1, 1, 1, 0, "options.sm_limit") \
    X(NONDETERMINISM, QUANTIZE, CONVERT, call->options.allow_nondeterminism, 1, 1, 1, 1, \
      "options.allow_nondeterminism") \
    X(TF32, QUANTIZE, CONVERT, call->options.allow_tf32, 1, 1, 1, 1, "options.allow_tf32") \
    X(FAST_ACCUM, QUANTIZE, CONVERT, call->options.fp8_fast_accum, 1, 1, 1, 1, "options.fp8_fast_accum") \
    X(TILE, QUANTIZE, CONVERT, call->options.tile, 1, 1, 1, 1, "options.tile") \
    X(WORKSPACE_LIMIT, QUANTIZE, CONVERT, call->options.workspace_limit, 1, 1, 1, 1, "options.workspace_limit") \
    X(ACT_PROB, ACT_FWD, ACT_BWD, call->d.act.prob, 1, 0, 1, 0, "activation.prob") \
    X(ACT_DPROB, ACT_BWD, ACT_BWD, call->d.act.dprob, 1, 0, 1, 0, "activation.dprob") \
    X(ACT_Y, ACT_BWD, ACT_BWD, call->d.act.y, 1, 0, 1, 0, "activation.y") \
    X(ACT_INTERLEAVE, ACT_FWD, MLP_WGRAD, call->act.interleave, 1, 0, 1, 0, "act.interleave") \
    X(ACT_LIMIT, ACT_FWD, MLP_WGRAD, call->act.limit != 0.0f, 1, 0, 1, 0, "act.limit") \
    X(ACT_ALPHA, ACT_FWD, MLP_WGRAD, call->act.alpha != 0.0f, 1, 0, 1, 0, "act.alpha") \
    X(ACT_OFFSET, ACT_FWD, MLP_WGRAD, call->act.offset != 0.0f, 1, 0, 1, 0, "act.offset") \
    X(ACT_BETAS, ACT_FWD, MLP_WGRAD, call->act.beta1 != 0.0f || call->act.beta2 != 0.0f, 1, 0, 1, 0, "act.beta1") \
    X(MLP_PROB, MLP_FWD, MLP_BWD, call->d.mlp.prob, 1, 0, 1, 0, "mlp.prob") \
    X(MLP_DPROB, MLP_BWD, MLP_BWD, call->d.mlp.dprob, 1, 0, 1, 0, "mlp.dprob") \
    X(MLP_SAVED, MLP_FWD, MLP_FWD, call->d.mlp.saved, 1, 0, 1, 0, "mlp.saved") \
    X(MLP_HOOKS, MLP_FWD, MLP_WGRAD, call->d.mlp.hooks, 1, 0, 1, 0, "mlp.hooks") \
    X(MLP_INDEX, MLP_FWD, MLP_BWD, call->d.mlp.x_index || call->d.mlp.dy_index, 1, 0, 1, 0, "mlp.x_index, dy_index") \
    X(MLP_QUANT, MLP_FWD, MLP_WGRAD, call->d.mlp.quant, 1, 0, 1, 0, "mlp.quant") \
    X(MOE_ALIGN, MOE_FWD, MOE_BWD, call->d.moe.align > 1, 1, 0, 1, 0, "moe.align") \
    X(MOE_ROUTE, MOE_FWD, MOE_BWD, call->d.moe.route, 1, 0, 1, 0, "moe.route") \
    X(MOE_PROBS, MOE_FWD, MOE_BWD, call->d.moe.probs, 1, 0, 1, 0, "moe.probs") \
    X(MOE_DPROBS, MOE_BWD, MOE_BWD, call->d.moe.dprobs, 1, 0, 1, 0, "moe.dprobs") \
    X(MOE_SIZES, MOE_FWD, MOE_BWD, call->d.moe.sizes, 1, 0, 1, 0, "moe.sizes") \
    X(MOE_SAVED, MOE_FWD, MOE_FWD, call->d.moe.saved, 1, 0, 1, 0, "moe.saved") \
    X(MOE_SAVE_ROWS, MOE_FWD, MOE_BWD, call->d.moe.save_rows, 1, 0, 1, 0, "moe.save_rows") \
    X(EXPERT_BIAS, TOPK_FWD, TOPK_BWD, call->d.route.expert_bias, 1, 0, 1, 0, "route.expert_bias") \
    X(NORMALIZE, TOPK_FWD, TOPK_BWD, call->d.route.normalize, 1, 0, 1, 0, "route.normalize") \
    X(ROUTE_SCALE, TOPK_FWD, TOPK_BWD, call->d.route.scale != 0.0f, 1, 0, 1, 0, "route.scale") \
    X(ROUTE_OFFSETS, TOPK_FWD, TOPK_FWD, call->d.route.offsets, 1, 0, 1, 0, "route.offsets") \
    X(AUX_LOSS, TOPK_FWD, TOPK_BWD, call->d.route.aux_coeff != 0.0f, 1, 0, 1, 0, "route.aux_coeff") \
    X(Z_LOSS, TOPK_FWD, TOPK_BWD, call->d.route.z_coeff != 0.0f, 1, 0, 1, 0, "route.z_coeff") \
    X(DLOSS, TOPK_BWD, TOPK_BWD, call->d.route.dloss, 1, 0, 1, 0, "route.dloss") \
    X(ROUTE_GROUPS, TOPK_FWD, TOPK_BWD, call->d.route.groups > 1, 1, 0, 1, 0, "route.groups") \
    X(SINKHORN, TOPK_FWD, TOPK_BWD, call->d.route.sinkhorn, 1, 0, 1, 0, "route.sinkhorn") \
    X(SEQUENCES, TOPK_FWD, TOPK_BWD, call->d.route.sequences > 1, 1, 0, 1, 0, "route.sequences") \
    X(PADDING, TOPK_FWD, TOPK_BWD, call->d.route.padding, 1, 0, 1, 0, "route.padding") \
    X(TOTAL_COUNTS, TOPK_FWD, TOPK_FWD, call->d.route.total_counts, 1, 0, 1, 0, "route.total_counts") \
    X(PERMUTE_ALIGN, PERMUTE_MAP, UNPERMUTE_BWD, call->d.permute.align > 1, 1, 0, 1, 0, "permute.align") \
    X(PERMUTE_TAIL, PERMUTE_MAP, UNPERMUTE_BWD, call->d.permute.tail != GMM_TAIL_KEEP, 1, 0, 1, 0, "permute.tail") \
    X(PERMUTE_FAULT, PERMUTE_MAP, UNPERMUTE_BWD, call->d.permute.fault, 1, 0, 1, 0, "permute.fault") \
    X(PERMUTE_PROBS, PERMUTE_FWD, UNPERMUTE_BWD, call->d.permute.probs, 1, 0, 1, 0, "permute.probs") \
    X(PERMUTE_ROW_PROBS, PERMUTE_FWD, PERMUTE_FWD, call->d.permute.row_probs, 1, 0, 1, 0, "permute.row_probs") \
    X(PERMUTE_DPROBS, PERMUTE_BWD, UNPERMUTE_BWD, call->d.permute.dprobs, 1, 0, 1, 0, "permute.dprobs") \
    X(PAD_PROB, PAD, UNPAD, call->d.pad.src_prob, 1, 0, 1, 0, "padding.src_prob") \
    X(PAD_SIZES, PAD, PAD, call->d.pad.sizes, 1, 0, 1, 0, "padding.sizes") \
    X(SUM_SCALE, ACCUMULATE, ACCUMULATE, call->d.sum.scale != 1.0f, 1, 0, 1, 0, "accumulation.scale") \
    X(SUM_BETA, ACCUMULATE, ACCUMULATE, call->d.sum.beta != 0.0f, 1, 0, 1, 0, "accumulation.beta") \
    X(POW2, QUANTIZE, SHARD_CAST, call->format.pow2, 1, 0, 1, 0, "format.pow2") \
    X(SQUARE, QUANTIZE, SHARD_CAST, call->format.square, 1, 0, 1, 0, "format.square") \
    X(HADAMARD, QUANTIZE, SHARD_CAST, call->format.hadamard, 1, 0, 1, 0, "format.hadamard") \
    X(STOCHASTIC, QUANTIZE, SHARD_CAST, call->format.stochastic, 1, 0, 1, 0, "format.stochastic") \
    X(FOUR_OVER_SIX, QUANTIZE, SHARD_CAST, call->format.four_over_six, 1, 0, 1, 0, "format.four_over_six") \
    X(E4M3_256, QUANTIZE, SHARD_CAST, call->format.e4m3_256, 1, 0, 1, 0, "format.e4m3_256") \
    X(EPS, QUANTIZE, SHARD_CAST, call->format.eps != 0.0f, 1, 0, 1, 0, "format.eps") \
    X(DELAYED, QUANTIZE, SHARD_CAST, call->format.delayed, 1, 0, 1, 0, "format.delayed") \
    X(QUANT_PHASE, QUANTIZE, REQUANTIZE, gmm__casts(call->op) && call->d.quant.phase != GMM_QUANT_ALL, 1, 0, 1, 0, \
      "quantization.phase") \
    X(QUANT_DB, QUANTIZE, REQUANTIZE, gmm__casts(call->op) && call->d.quant.db, 1, 0, 1, 0, "quantization.db") \
    X(QUANT_SKIP, QUANTIZE, REQUANTIZE, gmm__casts(call->op) && call->d.quant.skip, 1, 0, 1, 0, "quantization.skip") \
    X(QUANT_INDEX, QUANTIZE, REQUANTIZE, gmm__casts(call->op) && call->d.quant.src_index, 1, 0, 1, 0, \
      "quantization.src_index") \
    X(ACT_CAST, QUANTIZE, ACT_BWD, call->fused.act_source || call->fused.act_amax, 0, 0, 1, 0, \
      "a cast fused with an activation") \
    X(PRODUCT_ACT, LINEAR_FWD, LINEAR_DGRAD, call->fused.product_act, 0, 1, 0, 0, "an act fused into a product") \
    X(MOST_RECENT, SCALE_UPDATE, SCALE_UPDATE, call->d.update.most_recent, 1, 0, 1, 0, "update.most_recent")

enum gmm__field {
#define GMM__X(field, first, last, condition, cpu, wgmma, mma, cublaslt, name) GMM__FIELD_##field,
    GMM__FIELD_LIST(GMM__X)
#undef GMM__X
    GMM__FIELDS
};

/* The engines' columns of the list, for the engine table. */
#define GMM__X(field, first, last, condition, cpu, wgmma, mma, cublaslt, name) cpu,
static const unsigned char gmm__honours_cpu[] = { GMM__FIELD_LIST(GMM__X) };
#undef GMM__X
#if defined(__CUDACC__)
#define GMM__X(field, first, last, condition, cpu, wgmma, mma, cublaslt, name) wgmma,
static const unsigned char gmm__honours_wgmma[] = { GMM__FIELD_LIST(GMM__X) };
#undef GMM__X
#endif
#if defined(__CUDACC__) && defined(GMM__ELEM_DONE)
#define GMM__X(field, first, last, condition, cpu, wgmma, mma, cublaslt, name) mma,
static const unsigned char gmm__honours_mma[] = { GMM__FIELD_LIST(GMM__X) };
#undef GMM__X
#endif
#ifdef GMM__CUBLASLT
#define GMM__X(field, first, last, condition, cpu, wgmma, mma, cublaslt, name) cublaslt,
static const unsigned char gmm__honours_cublaslt[] = { GMM__FIELD_LIST(GMM__X) };
#undef GMM__X
#endif

static const char *gmm__field_name(int field) {
    static const char *const names[] = {
#define GMM__X(field, first, last, condition, cpu, wgmma, mma, cublaslt, name) name,
        GMM__FIELD_LIST(GMM__X)
#undef GMM__X
    };
    return names[field];
}

/* Whether a gradient destination of the call has a property. */
enum gmm__grad_property { GMM__GRAD_MAIN, GMM__GRAD_BETA, GMM__GRAD_FROZEN };
static int gmm__any_grad(const gmm__call *call, enum gmm__grad_property property) {
    int role;
    for (role = 0; role < GMM__ROLES; role++) {
        const gmm_grad *g = &call->grad[role];
        if (property == GMM__GRAD_MAIN ? g->main_grad : property == GMM__GRAD_BETA ? !!g->beta : !!g->frozen) return 1;
    }
    return 0;
}

/* Whether an operand of the call has a global amax per row (GMM_MAT_ROW_AMAX). */
static int gmm__any_row_amax(const gmm__call *call) {
    uint32_t flags = 0;
    int role;
    for (role = 0; role < GMM__ROLES; role++) flags |= call->mat[role].flags;
    return (flags & (uint32_t)GMM_MAT_ROW_AMAX) != 0;
}

/* Whether gmm__call.d is a gmm_quantization. */
static int gmm__casts(gmm_op op) { return op == GMM_OP_QUANTIZE || op == GMM_OP_REQUANTIZE; }

/* The first optional field of GMM__FIELD_LIST that a checked call uses and an engine does not honour; -1 if there is
   none. The conditions of the list read `call` and `linear`. */
static int gmm__missing_field(const gmm__call *call, const unsigned char *honours) {
    const gmm_linear *linear = &call->d.linear;
    const gmm_op op = call->op;
#define GMM__X(field, first, last, condition, cpu, wgmma, mma, cublaslt, name) \
    if (!honours[GMM__FIELD_##field] && op >= GMM_OP_##first && op <= GMM_OP_##last && (condition)) \
        return GMM__FIELD_##field;
    GMM__FIELD_LIST(GMM__X)
#undef GMM__X
    return -1;
}

