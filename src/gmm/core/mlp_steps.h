/* The steps of forward, backward and queued weight gradients: how they are listed. */

/* Places the split's offsets and tiles in an arena. Every call begins with them. */
static void gmm__mlp_place_split(gmm__mlp_steps *steps, const gmm__call *call, gmm__arena *arena) {
    const int64_t ends = call->groups.count + (int64_t)1;
    void *offsets = gmm__arena_alloc(arena, GMM__MLP_SPLIT, ends * (int64_t)sizeof(int64_t));
    gmm__mlp_begin(steps, call, gmm__mlp_dtype(call), offsets,
                   gmm__arena_alloc(arena, GMM__MLP_SPLIT, GMM__TILE_KINDS * ends * (int64_t)sizeof(int32_t)));
}
/* A packed matrix with the rows of the groups in an arena. */
static gmm_mat gmm__mlp_place_tokens(const gmm__mlp_steps *steps, int32_t owner, int64_t cols, gmm__arena *arena) {
    return gmm__arena_matrix(arena, owner, steps->dtype, steps->call->rows, cols);
}

/* Describes the saved pre-activation in E4M3 at `memory`. */
static void gmm__mlp_place_e4m3(gmm__mlp_steps *steps, char *memory) {
    const gmm_format f = gmm__mlp_unscaled_e4m3();
    gmm__arena arena = GMM_ZERO;
    gmm_layout layout;
    const gmm_status s = gmm__mlp_layout(steps->call, &f, GMM_ROWWISE, 0, gmm__mlp_fc1_cols(steps->call), &layout);
    if (s != GMM_OK) {
        steps->status = s;
        return;
    }
    arena.memory = memory;
    steps->z_e4m3 = gmm_mat_quantized(&f, GMM_ROWWISE, NULL, NULL, NULL);
    steps->z_e4m3.data = gmm__arena_alloc(&arena, GMM__MLP_Z, layout.data_bytes);
    steps->z_e4m3.scale = gmm__arena_alloc(&arena, GMM__MLP_Z, layout.scale_bytes);
}
/* Adds the cast of the pre-activation to what is saved. */
static void gmm__mlp_add_e4m3_cast(gmm__mlp_steps *steps) {
    gmm_quantization *d = &steps->cast[steps->casts++];
    steps->z_format = gmm__mlp_unscaled_e4m3();
    d->cols = gmm__mlp_fc1_cols(steps->call);
    d->groups = &steps->groups;
    d->options = &steps->options;
    d->format = &steps->z_format;
    d->src = &steps->z;
    d->rowwise = &steps->z_e4m3;
    gmm__mlp_add_step(steps, GMM_OP_QUANTIZE, d);
}

/* Gives x or h the copy that forward saves and backward reads, at its place in gmm_mlp.saved. */
static int gmm__mlp_place_saved(gmm__mlp_steps *steps, int slot, size_t at) {
    gmm__arena arena = GMM_ZERO;
    arena.memory = steps->call->d.mlp.saved ? (char *)steps->call->d.mlp.saved + at : NULL;
    return gmm__mlp_place_copy(steps, slot, gmm__mlp_backward_direction(steps->call), &arena);
}

/* Forward's copies of x or h: that for the product, and with `saves` in the same pass that for backward. */
static void gmm__mlp_add_forward_casts(gmm__mlp_steps *steps, int slot, int saves, size_t at) {
    int directions = saves ? gmm__mlp_place_saved(steps, slot, at) : 0;
    directions |= gmm__mlp_place_copy(steps, slot, GMM_ROWWISE, &steps->workspace);
    gmm__mlp_add_cast(steps, slot, directions, NULL);
}
/* Forward's copy of a weight, or with a cache both copies in it, unless the word `weight_skip` says that they are
   there. */
static void gmm__mlp_add_weight_casts(gmm__mlp_steps *steps, int slot) {
    const gmm_mlp_quant *quant = &steps->call->quant;
    const gmm__mlp_operand *o = &steps->operand[slot];
    int direction, directions = 0;
    gmm__mlp_need_weight(steps, slot, GMM_OP_LINEAR_FWD);
    if (!quant->weight_cache) gmm__mlp_make_copies(steps, slot, GMM__MLP_ROWWISE);
    else if (o->source->scaling == GMM_SCALING_NONE && gmm__mlp_quantizes(o)) {
        for (direction = 0; direction < 2; direction++)
            directions |= (o->copy[direction].dtype != GMM_NONE) << direction;
        gmm__mlp_add_cast(steps, slot, directions, quant->weight_skip);
    }
}

/* Fills in what FC1 or FC2 of forward reads. */
static void gmm__mlp_fill_forward(gmm__mlp_steps *steps, gmm_linear *linear, int x, int w) {
    linear->x = gmm__mlp_copies_of(steps, x);
    linear->w = gmm__mlp_copies_of(steps, w);
    gmm__mlp_set_indices(steps, linear, x, GMM_SLOT_DY);
}
/* Adds FC1 or FC2 of forward. */
static void gmm__mlp_add_forward_product(gmm__mlp_steps *steps, gmm_linear *linear, int x, int w) {
    gmm__mlp_fill_forward(steps, linear, x, w);
    gmm__mlp_add_step(steps, GMM_OP_LINEAR_FWD, linear);
}

static gmm_status gmm__mlp_prepare_step(const gmm__mlp_steps *steps, const gmm__mlp_step *step, int query,
                                        gmm__call *call);
/* Whether some engine may have a product of FC1 that computes the activation too, or for backward a dgrad of FC2 that
   computes its gradient (options.fuse apart). */
static int gmm__mlp_may_fuse_act(const gmm__call *call) {
    return call->ctx->config.space == GMM_SPACE_CUDA &&
           (call->recipe.kind == GMM_RECIPE_NONE ||
            (call->recipe.kind == GMM_RECIPE_FP8_BLOCK && call->op == GMM_OP_MLP_FWD));
}
/* The status of planning a product that does what step->fused says. Checked as a query, since its results have no
   address in a plan. Selected as the call, so that the alignment of operands counts, unless hooks.need sets w later. */
static gmm_status gmm__mlp_select_fused(const gmm__mlp_steps *steps, const gmm__mlp_step *step) {
    gmm__call product;
    gmm__plan plan;
    const gmm_status s = gmm__mlp_prepare_step(steps, step, 1, &product);
    product.query = steps->call->query || gmm__mlp_has_need_hook(steps->call);
    product.describes = NULL;
    return s == GMM_OK ? gmm__select(&product, &plan) : s;
}
/* Whether this status says yes. If the caller demands it, steps->status becomes the reason. Else a declined plan
   is no error, and the context gets its last one back. */
static int gmm__mlp_fuses(gmm__mlp_steps *steps, gmm_status s, const gmm_error *last_error) {
    if (s == GMM_OK) return 1;
    if (steps->call->options.fuse == GMM_FUSE_ALWAYS) steps->status = s;
    else steps->call->ctx->error = *last_error;
    return 0;
}
/* Makes the activation a part of FC1's product, which writes h, or its rowwise copy if the recipe quantizes it. */
static void gmm__mlp_fuse_act(gmm__mlp_steps *steps, gmm__mlp_step *step, int drops_d) {
    const gmm__mlp_operand *h = &steps->operand[GMM_SLOT_H];
    step->fused.product_act = &steps->act;
    step->fused.product_cast = gmm__mlp_quantizes(h) ? &h->format[GMM_ROWWISE] : NULL;
    step->fused.drops_d = drops_d;
}
/* Whether FC1's product computes the activation too: an engine's plan for it says so. Where the caller demands it and
   no engine does, steps->status becomes the reason. */
static int gmm__mlp_fc1_fuses_act(gmm__mlp_steps *steps, int drops_d) {
    const gmm__call *call = steps->call;
    const gmm_error last_error = call->ctx->error;
    const gmm_fuse fuse = call->options.fuse;
    const int saves_h = gmm__mlp_quantizes(&steps->operand[GMM_SLOT_H]) &&
                        (gmm__saves_copies(&call->config) || call->config.save == GMM_SAVE_PREACT_AND_ACT);
    gmm__mlp_step step;
    gmm_status s;
    if (fuse == GMM_FUSE_NEVER || (fuse == GMM_FUSE_AUTO && !gmm__mlp_may_fuse_act(call))) return 0;
    if (saves_h && fuse == GMM_FUSE_AUTO) return 0;
    memset(&step, 0, sizeof step);
    step.op = GMM_OP_LINEAR_FWD;
    step.descriptor = &steps->fc1;
    gmm__mlp_fuse_act(steps, &step, drops_d);
    gmm__mlp_fill_forward(steps, &steps->fc1, GMM_SLOT_X, GMM_SLOT_W1);
    s = gmm__mlp_select_fused(steps, &step);
    if (s == GMM_OK && saves_h)
        s = gmm__fail(&call->ctx->error, GMM_E_UNSUPPORTED, "%s: options.fuse %d: FC1's product writes a rowwise copy "
                      "of h alone, and config.save %d keeps h otherwise", call->function, (int)fuse,
                      (int)call->config.save);
    return gmm__mlp_fuses(steps, s, &last_error);
}

/* Places h, in gmm_mlp.saved where it is kept, and makes it the result of the activation. */
static void gmm__mlp_place_h(gmm__mlp_steps *steps, const gmm__mlp_saved *saved) {
    const gmm__call *call = steps->call;
    char *memory = (char *)call->d.mlp.saved;
    steps->h = memory && call->config.save == GMM_SAVE_PREACT_AND_ACT
                   ? gmm_mat_packed(steps->dtype, memory + saved->at[GMM__SAVED_ACT])
                   : gmm__mlp_place_tokens(steps, GMM__MLP_H, call->config.ffn, &steps->workspace);
    steps->act.y = &steps->h;
}

/* Places what FC1's product writes of the activation, h or its rowwise copy. */
static void gmm__mlp_place_product_h(gmm__mlp_steps *steps, const gmm__mlp_saved *saved) {
    gmm__mlp_operand *h = &steps->operand[GMM_SLOT_H];
    if (!gmm__mlp_quantizes(h)) {
        gmm__mlp_place_h(steps, saved);
        return;
    }
    (void)gmm__mlp_place_copy(steps, GMM_SLOT_H, GMM_ROWWISE, &steps->workspace);
    steps->act.y = &h->copy[GMM_ROWWISE];
}

/* Makes the gate columns of z the source of casts that compute h. */
static void gmm__mlp_cast_from_gates(gmm__mlp_steps *steps) {
    steps->gates = steps->z;
    steps->gates.ld = gmm__mlp_fc1_cols(steps->call);
    steps->operand[GMM_SLOT_H].source = &steps->gates;
}
/* Adds the activation and the casts of h. */
static void gmm__mlp_add_act_fwd(gmm__mlp_steps *steps, int saves, const gmm__mlp_saved *saved) {
    if (gmm__mlp_cast_fusion_of(steps, GMM_SLOT_H) == GMM__CAST_COMPUTES_ACT) {
        gmm__mlp_cast_from_gates(steps);
        gmm__mlp_add_forward_casts(steps, GMM_SLOT_H, saves, saved->at[GMM__SAVED_ACT]);
        steps->step[steps->count - 1].fused.act_source = &steps->act;
        gmm__arena_free(&steps->workspace, GMM__MLP_Z);
        return;
    }
    gmm__mlp_place_h(steps, saved);
    gmm__mlp_add_act_step(steps, GMM_OP_ACT_FWD, GMM_SLOT_H, 1);
    gmm__arena_free(&steps->workspace, GMM__MLP_Z);
    gmm__mlp_add_forward_casts(steps, GMM_SLOT_H, saves, saved->at[GMM__SAVED_ACT]);
}

/* Lists the steps of forward over a workspace. Training keeps z and h in gmm_mlp.saved, inference in the workspace. */
static gmm_status gmm__mlp_build_fwd(gmm__mlp_steps *steps, const gmm__call *call, void *workspace) {
    const gmm__mlp_saved saved = gmm__mlp_saved_of(call);
    const int saves = call->d.mlp.saved != NULL, copies = saves && gmm__saves_copies(&call->config);
    const int e4m3 = saves && gmm__saves_e4m3(&call->config);
    const int drops_d = !saves || call->config.save == GMM_SAVE_NOTHING;
    char *memory = (char *)call->d.mlp.saved;
    memset(steps, 0, sizeof *steps);
    steps->workspace.memory = (char *)workspace;
    gmm__mlp_place_split(steps, call, &steps->workspace);
    gmm__mlp_fill(steps);
    if (call->quant.weight_cache) (void)gmm__mlp_place_weights(steps, call->quant.weight_cache);

    steps->z = memory && call->config.save != GMM_SAVE_NOTHING && !e4m3
                   ? gmm_mat_packed(steps->dtype, memory)
                   : gmm__mlp_place_tokens(steps, GMM__MLP_Z, gmm__mlp_fc1_cols(call), &steps->workspace);
    gmm__mlp_add_forward_casts(steps, GMM_SLOT_X, copies, saved.at[GMM__SAVED_X]);
    gmm__mlp_add_weight_casts(steps, GMM_SLOT_W1);
    steps->fuses_act = gmm__mlp_fc1_fuses_act(steps, drops_d);
    if (steps->fuses_act) gmm__mlp_place_product_h(steps, &saved);
    gmm__mlp_add_forward_product(steps, &steps->fc1, GMM_SLOT_X, GMM_SLOT_W1);
    if (steps->fuses_act) gmm__mlp_fuse_act(steps, &steps->step[steps->count - 1], drops_d);
    gmm__mlp_release_copies(steps, GMM_SLOT_X, GMM__MLP_BOTH);
    gmm__mlp_release_copies(steps, GMM_SLOT_W1, GMM__MLP_BOTH);
    if (e4m3) {
        gmm__mlp_place_e4m3(steps, memory);
        gmm__mlp_add_e4m3_cast(steps);
    }
    if (steps->fuses_act) gmm__arena_free(&steps->workspace, GMM__MLP_Z);
    else gmm__mlp_add_act_fwd(steps, copies, &saved);
    gmm__mlp_add_weight_casts(steps, GMM_SLOT_W2);
    gmm__mlp_add_forward_product(steps, &steps->fc2, GMM_SLOT_H, GMM_SLOT_W2);
    return steps->status;
}

/* Fills in what a dgrad reads. */
static void gmm__mlp_fill_dgrad(gmm__mlp_steps *steps, gmm_linear *linear, int dy, int w) {
    linear->dy = gmm__mlp_backward_operand(steps, dy, GMM_ROWWISE);
    gmm__mlp_need_weight(steps, w, GMM_OP_LINEAR_DGRAD);
    linear->w = gmm__mlp_backward_operand(steps, w, GMM_COLUMNWISE);
    gmm__mlp_set_indices(steps, linear, GMM_SLOT_X, dy);
}
/* Adds the product of a backward: dgrad reads dy and w, wgrad x and dy. No later step reads the same copies. */
static void gmm__mlp_add_dgrad(gmm__mlp_steps *steps, gmm_linear *linear, int dy, int w) {
    gmm__mlp_fill_dgrad(steps, linear, dy, w);
    gmm__mlp_add_step(steps, GMM_OP_LINEAR_DGRAD, linear);
    gmm__mlp_release_copies(steps, dy, GMM__MLP_ROWWISE);
    gmm__mlp_release_copies(steps, w, GMM__MLP_BOTH);
}
static void gmm__mlp_add_wgrad(gmm__mlp_steps *steps, gmm_linear *linear, int x, int dy, gmm_param param) {
    linear->x = gmm__mlp_backward_operand(steps, x, GMM_COLUMNWISE);
    linear->dy = gmm__mlp_backward_operand(steps, dy, GMM_COLUMNWISE);
    gmm__mlp_set_indices(steps, linear, x, dy);
    gmm__mlp_add_gradient(steps, GMM_OP_LINEAR_WGRAD, linear, param);
    gmm__mlp_release_copies(steps, x, GMM__MLP_BOTH);
    gmm__mlp_release_copies(steps, dy, GMM__MLP_COLUMNWISE);
}

/* Casts an output gradient in one pass for its dgrad and its wgrad. A queued wgrad reads its copy in gmm_mlp.deferred
   later. `bgrad`: the bias gradient of the same rows, for which the cast adds up columns; NULL: it is not wanted. */
static void gmm__mlp_add_gradient_casts(gmm__mlp_steps *steps, int slot, int dgrad, int wgrad, const gmm_linear *bgrad,
                                        int defer) {
    const gmm__mlp_operand *o = &steps->operand[slot];
    const int cast = steps->count; /* the step, if one is added */
    gmm__column_sums *sums = &steps->sums[slot == GMM_SLOT_DY];
    int directions = 0;
    if (steps->call->quant.backward_override != GMM_BACKWARD_BY_RECIPE) return;
    sums->wanted = bgrad && (dgrad || wgrad) && gmm__mlp_quantizes(o) &&
                   steps->call->ctx->config.space == GMM_SPACE_CUDA;
    if (sums->wanted) { /* they live longer than both copies, which are therefore behind them */
        sums->partials = (float *)gmm__arena_alloc(&steps->workspace, GMM__MLP_SUMS + (slot == GMM_SLOT_DY),
                                                   gmm__group_strips(&steps->call->groups) * o->cols * 4);
        sums->scale = bgrad->bias_scale;
    }
    if (wgrad) /* lives longer than the other copy, which is therefore behind it */
        directions |= gmm__mlp_place_copy(steps, slot, GMM_COLUMNWISE, defer ? &steps->deferred : &steps->workspace);
    if (dgrad) directions |= gmm__mlp_place_copy(steps, slot, GMM_ROWWISE, &steps->workspace);
    gmm__mlp_add_cast(steps, slot, directions, NULL);
    if (sums->wanted) steps->step[cast].fused.sums = *sums;
}
/* Adds a bias gradient, which reads the column sums of the cast of dz or dy if there are any. */
static void gmm__mlp_add_bgrad(gmm__mlp_steps *steps, const gmm_linear *bgrad, gmm_param param) {
    const int second = param == GMM_PARAM_B2;
    gmm__mlp_add_gradient(steps, GMM_OP_LINEAR_BGRAD, bgrad, param);
    steps->step[steps->count - 1].fused.sums = steps->sums[second];
    gmm__arena_free(&steps->workspace, GMM__MLP_SUMS + second);
}

/* What a queued weight gradient reads of an operand: the copy in gmm_mlp.deferred or in `saved`, or the source and
   *index, that of its gathered rows. Without a saved copy, that of x is one for FC1's second run, in the workspace. */
static gmm_mat gmm__mlp_queued_operand(const gmm__mlp_steps *steps, int slot, const int32_t **index) {
    const gmm__mlp_operand *o = &steps->operand[slot];
    const gmm_mat *copy = &o->copy[gmm__mlp_backward_direction(steps->call)];
    const int remains = slot != GMM_SLOT_X || gmm__saves_copies(&steps->call->config);
    const gmm_mat *read = copy->dtype != GMM_NONE && remains &&
                                  steps->call->quant.backward_override != GMM_BACKWARD_HIGH_PRECISION
                              ? copy : o->source;
    gmm_mat m = *read;
    m.columnwise = NULL;
    *index = gmm__mlp_index_of(steps, slot, read);
    return m;
}

/* Finds the matrices that forward has saved, and places those that backward computes before it reads dy. */
static void gmm__mlp_place_bwd(gmm__mlp_steps *steps, const gmm__mlp_wants *wants) {
    const gmm__call *call = steps->call;
    const gmm__mlp_saved saved = gmm__mlp_saved_of(call);
    char *memory = (char *)call->d.mlp.saved;
    if (wants->z && (call->config.save == GMM_SAVE_NOTHING || gmm__saves_e4m3(&call->config)))
        steps->z = gmm__mlp_place_tokens(steps, GMM__MLP_Z, gmm__mlp_fc1_cols(call), &steps->workspace);
    else steps->z.data = memory;
    if (wants->h_saved) steps->h.data = memory ? memory + saved.at[GMM__SAVED_ACT] : NULL;
    if (gmm__saves_copies(&call->config)) {
        (void)gmm__mlp_place_saved(steps, GMM_SLOT_X, saved.at[GMM__SAVED_X]);
        (void)gmm__mlp_place_saved(steps, GMM_SLOT_H, saved.at[GMM__SAVED_ACT]);
    }
    if (call->quant.weight_cache) (void)gmm__mlp_place_weights(steps, call->quant.weight_cache);
}

/* Adds the steps that compute z again, or its values in the dtype of x. FC1's operands are cast in both directions
   where FC1's gradients read them too. */
static void gmm__mlp_add_preact(gmm__mlp_steps *steps, const gmm__mlp_wants *wants) {
    const gmm__call *call = steps->call;
    const gmm_mlp *d = &call->d.mlp;
    const int both = call->quant.backward_override == GMM_BACKWARD_BY_RECIPE;
    const int x_again = both && d->dw1 && !wants->defer, w_again = both && d->dx;
    if (gmm__saves_e4m3(&call->config)) {
        gmm__mlp_place_e4m3(steps, (char *)d->saved);
        gmm__mlp_add_dequantization(steps, &steps->z_e4m3, 0, gmm__mlp_fc1_cols(call), &steps->z);
    } else if (call->config.save == GMM_SAVE_NOTHING) {
        gmm__mlp_make_copies(steps, GMM_SLOT_X, x_again ? GMM__MLP_BOTH : GMM__MLP_ROWWISE);
        gmm__mlp_need_weight(steps, GMM_SLOT_W1, GMM_OP_LINEAR_FWD);
        gmm__mlp_make_copies(steps, GMM_SLOT_W1, w_again ? GMM__MLP_BOTH : GMM__MLP_ROWWISE);
        gmm__mlp_add_forward_product(steps, &steps->fc1, GMM_SLOT_X, GMM_SLOT_W1);
        if (both) { /* with an override the rowwise copies are dequantized later */
            gmm__mlp_release_copies(steps, GMM_SLOT_X, GMM__MLP_ROWWISE);
            gmm__mlp_release_copies(steps, GMM_SLOT_W1, GMM__MLP_ROWWISE);
        }
    }
}

/* Whether the activation of backward computes h, and where: in `deferred` where a queued weight gradient reads it. dh,
   which no later step reads, is in the same memory; that of dh alone is not written if steps->fuses_act. */
static int gmm__mlp_computes_h(const gmm__mlp_wants *wants) { return wants->h && !wants->h_saved; }
static gmm_mat gmm__mlp_place_dh(gmm__mlp_steps *steps, const gmm__mlp_wants *wants) {
    const gmm__call *call = steps->call;
    const int queued = gmm__mlp_computes_h(wants) && wants->defer && !gmm__mlp_backward_reads_copies(call);
    return gmm__mlp_place_tokens(steps, gmm__mlp_computes_h(wants) ? GMM__MLP_H : GMM__MLP_DH, call->config.ffn,
                                 queued ? &steps->deferred : &steps->workspace);
}

/* Makes the gradient of the activation a part of FC2's dgrad, which then does not store dh. */
static void gmm__mlp_fuse_gradient(gmm__mlp_step *step, const gmm_activation *act) {
    step->fused.product_act = act;
    step->fused.drops_d = 1;
}
/* Whether FC2's dgrad computes the gradient of the activation too. Casts of a recipe compute it instead. */
static int gmm__mlp_dgrad2_fuses_act(gmm__mlp_steps *steps, const gmm__mlp_wants *wants) {
    const gmm__call *call = steps->call;
    const gmm_error last_error = call->ctx->error;
    gmm_activation act = steps->act; /* which results are NULL counts here; addresses come later */
    gmm__mlp_step step;
    if (call->op != GMM_OP_MLP_BWD || !wants->dh || call->recipe.kind != GMM_RECIPE_NONE) return 0;
    if (call->options.fuse == GMM_FUSE_NEVER || (call->options.fuse == GMM_FUSE_AUTO && !gmm__mlp_may_fuse_act(call)))
        return 0;
    act.dy = &steps->dh;
    act.dx = wants->dz ? &steps->z : NULL;
    act.y = gmm__mlp_computes_h(wants) ? &steps->dh : NULL;
    memset(&step, 0, sizeof step);
    step.op = GMM_OP_LINEAR_DGRAD;
    step.descriptor = &steps->dgrad2;
    gmm__mlp_fuse_gradient(&step, &act);
    gmm__mlp_fill_dgrad(steps, &steps->dgrad2, GMM_SLOT_DY, GMM_SLOT_W2);
    return gmm__mlp_fuses(steps, gmm__mlp_select_fused(steps, &step), &last_error);
}

/* Adds the activation of backward: its gradient dz, h for FC2's weight gradient, or both. FC2's dgrad computes them if
   steps->fuses_act. dz takes the place of z, unless z is saved and may not be overwritten, and h that of dh. Queued
   weight gradients read dz and h in `deferred`, unless they read copies. */
static void gmm__mlp_add_act_bwd(gmm__mlp_steps *steps, const gmm__mlp_wants *wants) {
    const gmm__call *call = steps->call;
    const gmm_mlp *d = &call->d.mlp;
    const int saves_z = call->config.save != GMM_SAVE_NOTHING && !gmm__saves_e4m3(&call->config);
    const int dz_copied = call->quant.backward_override == GMM_BACKWARD_BY_RECIPE &&
                          gmm__mlp_quantizes(&steps->operand[GMM_SLOT_DZ]);
    const int dz_queued = wants->defer && d->dw1 && !dz_copied;
    const int in_place = wants->dz && !dz_queued && (!saves_z || call->config.overwrite_saved);
    const int computes_h = gmm__mlp_computes_h(wants);
    if (in_place) steps->dz = steps->z;
    else if (wants->dz)
        steps->dz = gmm__mlp_place_tokens(steps, GMM__MLP_DZ, gmm__mlp_fc1_cols(call),
                                          dz_queued ? &steps->deferred : &steps->workspace);
    if (computes_h) steps->h = wants->dh ? steps->dh : gmm__mlp_place_dh(steps, wants);
    steps->act.dy = &steps->dh;
    steps->act.dx = wants->dz ? &steps->dz : NULL;
    steps->act.dprob = d->dprob;
    steps->act.y = computes_h ? &steps->h : NULL;
    if (steps->fuses_act) {
        gmm__mlp_add_dgrad(steps, &steps->dgrad2, GMM_SLOT_DY, GMM_SLOT_W2);
        gmm__mlp_fuse_gradient(&steps->step[steps->count - 1], &steps->act);
    } else if (wants->dh)
        gmm__mlp_add_act_step(steps, GMM_OP_ACT_BWD, GMM_SLOT_DZ, dz_copied && (d->dx || d->dw1));
    else if (computes_h) gmm__mlp_add_step(steps, GMM_OP_ACT_FWD, &steps->act);
    if (!in_place) gmm__arena_free(&steps->workspace, GMM__MLP_Z);
    gmm__arena_free(&steps->workspace, GMM__MLP_DH);
}

/* Adds the casts of dz, which FC1's gradients read. */
static void gmm__mlp_add_dz_casts(gmm__mlp_steps *steps, const gmm__mlp_wants *wants) {
    const gmm_mlp *d = &steps->call->d.mlp;
    gmm__mlp_add_gradient_casts(steps, GMM_SLOT_DZ, d->dx != NULL, d->dw1 != NULL, d->db1 ? &steps->bgrad1 : NULL,
                                wants->defer);
}
/* Whether an operand is quantized by casts that compute it. */
static int gmm__mlp_is_computed(const gmm__mlp_steps *steps, int slot) {
    return gmm__mlp_quantizes(&steps->operand[slot]) &&
           gmm__mlp_cast_fusion_of(steps, slot) == GMM__CAST_COMPUTES_ACT;
}
/* Whether these casts compute dz from z and dh, and dprob with it, so that backward needs no activation. If it needs h
   again, a cast computes h too. */
static int gmm__mlp_casts_compute_dz(const gmm__mlp_steps *steps, const gmm__mlp_wants *wants) {
    const gmm_mlp *d = &steps->call->d.mlp;
    return steps->call->quant.backward_override == GMM_BACKWARD_BY_RECIPE && (d->dx || d->dw1) && wants->dh &&
           gmm__mlp_is_computed(steps, GMM_SLOT_DZ) &&
           (!gmm__mlp_computes_h(wants) || gmm__mlp_is_computed(steps, GMM_SLOT_H));
}
static void gmm__mlp_add_computed_casts(gmm__mlp_steps *steps, const gmm__mlp_wants *wants) {
    if (gmm__mlp_computes_h(wants)) {
        steps->act_again = steps->act;
        gmm__mlp_cast_from_gates(steps);
        gmm__mlp_add_cast(steps, GMM_SLOT_H,
                          gmm__mlp_place_copy(steps, GMM_SLOT_H, GMM_COLUMNWISE,
                                              wants->defer ? &steps->deferred : &steps->workspace), NULL);
        steps->step[steps->count - 1].fused.act_source = &steps->act_again;
    }
    steps->act.dy = &steps->dh;
    steps->act.dprob = steps->call->d.mlp.dprob;
    steps->dz = steps->z; /* the source of the cast, which has the shape of dz */
    gmm__mlp_add_dz_casts(steps, wants);
    steps->step[steps->count - 1].fused.act_source = &steps->act;
    gmm__arena_free(&steps->workspace, GMM__MLP_Z);
    gmm__arena_free(&steps->workspace, gmm__mlp_computes_h(wants) ? GMM__MLP_H : GMM__MLP_DH);
}

/* Lists the steps of backward in the workspace and in gmm_mlp.deferred. Blocks of the workspace are freed behind the
   last step that reads them, so that later ones get the same bytes. */
static gmm_status gmm__mlp_build_bwd(gmm__mlp_steps *steps, const gmm__call *call, void *workspace, void *deferred) {
    const gmm_mlp *d = &call->d.mlp;
    const gmm__mlp_wants wants = gmm__mlp_wants_of(call);
    const int dw1 = d->dw1 && !wants.defer, dw2 = d->dw2 && !wants.defer;
    int casts_compute_dz;
    memset(steps, 0, sizeof *steps);
    steps->workspace.memory = (char *)workspace;
    steps->deferred.memory = (char *)deferred;
    gmm__mlp_place_split(steps, call, wants.defer ? &steps->deferred : &steps->workspace);
    gmm__mlp_fill(steps);
    gmm__mlp_place_bwd(steps, &wants);
    if (wants.z) gmm__mlp_add_preact(steps, &wants);

    if (wants.dh) steps->dh = gmm__mlp_place_dh(steps, &wants);
    gmm__mlp_add_gradient_casts(steps, GMM_SLOT_DY, wants.dh, d->dw2 != NULL, d->db2 ? &steps->bgrad2 : NULL,
                                wants.defer);
    steps->fuses_act = gmm__mlp_dgrad2_fuses_act(steps, &wants);
    if (wants.dh && !steps->fuses_act) gmm__mlp_add_dgrad(steps, &steps->dgrad2, GMM_SLOT_DY, GMM_SLOT_W2);
    casts_compute_dz = gmm__mlp_casts_compute_dz(steps, &wants);
    if (casts_compute_dz) gmm__mlp_add_computed_casts(steps, &wants);
    else gmm__mlp_add_act_bwd(steps, &wants);
    if (dw2) gmm__mlp_add_wgrad(steps, &steps->wgrad2, GMM_SLOT_H, GMM_SLOT_DY, GMM_PARAM_W2);
    else if (d->dw2 && gmm__mlp_backward_reads_copies(call))
        gmm__mlp_add_cast(steps, GMM_SLOT_H,
                          gmm__mlp_place_copy(steps, GMM_SLOT_H, gmm__mlp_backward_direction(call), &steps->deferred),
                          NULL);
    gmm__arena_free(&steps->workspace, GMM__MLP_H);
    if (d->db2) gmm__mlp_add_bgrad(steps, &steps->bgrad2, GMM_PARAM_B2);
    else if (steps->bgrad2.d_bias_scale) gmm__mlp_add_step(steps, GMM_OP_LINEAR_BGRAD, &steps->bgrad2);

    if (!casts_compute_dz && (d->dx || d->dw1)) gmm__mlp_add_dz_casts(steps, &wants);
    if (dw1) gmm__mlp_add_wgrad(steps, &steps->wgrad1, GMM_SLOT_X, GMM_SLOT_DZ, GMM_PARAM_W1);
    if (d->db1) gmm__mlp_add_bgrad(steps, &steps->bgrad1, GMM_PARAM_B1);
    if (d->dx) gmm__mlp_add_dgrad(steps, &steps->dgrad1, GMM_SLOT_DZ, GMM_SLOT_W1);
    return steps->status;
}

/* A queued weight gradient: `source` has its operands, of which those of quantized formats are copies. Index 0 is
   FC2's, 1 is FC1's. */
typedef struct gmm__mlp_queued {
    gmm_dtype dtype; /* of operands that are not quantized */
    int32_t *tiles;
    int64_t in[2], out[2];
    gmm_mat x[2], dy[2];
    const int32_t *x_index[2], *dy_index[2]; /* of gathered rows */
    int64_t index_rows;
    int32_t index_div;
} gmm__mlp_queued;

/* Lists the steps of weight gradient i. The split of the call is in offsets already. */
static gmm_status gmm__mlp_build_wgrad(gmm__mlp_steps *steps, const gmm__call *call, const gmm__mlp_queued *q, int i,
                                       const gmm_grad *dw, void *workspace) {
    const int slots[2][2] = { { GMM_SLOT_H, GMM_SLOT_DY }, { GMM_SLOT_X, GMM_SLOT_DZ } };
    const gmm_mat *source[2];
    const int64_t cols[2] = { q->in[i], q->out[i] };
    int k;
    source[0] = &q->x[i];
    source[1] = &q->dy[i];
    memset(steps, 0, sizeof *steps);
    steps->workspace.memory = (char *)workspace;
    gmm__mlp_begin(steps, call, q->dtype, (void *)(uintptr_t)call->groups.splits, q->tiles);
    for (k = 0; k < 2; k++) {
        gmm__mlp_operand *o = &steps->operand[slots[i][k]];
        gmm__mlp_fill_operand(steps, slots[i][k], source[k], 0, cols[k]);
        o->index = k ? q->dy_index[i] : q->x_index[i];
        if (source[k]->scaling == GMM_SCALING_NONE) continue;
        memset(o->copy, 0, sizeof o->copy);
        o->copy[gmm__mlp_backward_direction(call)] = *source[k];
    }
    steps->wgrad2 = gmm__mlp_linear(steps, q->in[i], q->out[i]);
    steps->wgrad2.dw = dw;
    steps->index_rows = q->index_rows;
    steps->index_div = q->index_div;
    gmm__mlp_add_wgrad(steps, &steps->wgrad2, slots[i][0], slots[i][1], i ? GMM_PARAM_W1 : GMM_PARAM_W2);
    return steps->status;
}
