/* The steps of forward, backward and queued weight gradients: how they are listed, planned and enqueued. */

static gmm_status gmm__quantize_prepare(gmm__call *call, gmm_context *ctx, gmm_op op, const char *function,
                                        const gmm_quantization *quantization, int query);
static gmm_status gmm__dequantize_prepare(gmm__call *call, gmm_context *ctx, const char *function,
                                          const gmm_dequantization *dequantization, int query);

/* Places the split's offsets and tiles in an arena. Every call begins with them. */
static void gmm__mlp_place_split(gmm__mlp_steps *steps, const gmm__call *call, gmm__mlp_arena *arena) {
    const int64_t ends = call->groups.count + (int64_t)1;
    void *offsets = gmm__mlp_place(arena, GMM__MLP_SPLIT, ends * (int64_t)sizeof(int64_t));
    gmm__mlp_begin(steps, call, gmm__mlp_dtype(call), offsets,
                   gmm__mlp_place(arena, GMM__MLP_SPLIT, GMM__TILE_KINDS * ends * (int64_t)sizeof(int32_t)));
}
/* A packed matrix with the rows of the groups in an arena. */
static gmm_mat gmm__mlp_place_tokens(const gmm__mlp_steps *steps, int32_t owner, int64_t cols, gmm__mlp_arena *arena) {
    return gmm__place_rows(arena, owner, steps->dtype, steps->call->rows, cols);
}

/* Describes the saved pre-activation in E4M3 at `memory`. */
static void gmm__mlp_place_e4m3(gmm__mlp_steps *steps, char *memory) {
    const gmm_format f = gmm__mlp_unscaled_e4m3();
    gmm__mlp_arena arena = GMM_ZERO;
    gmm_layout layout;
    const gmm_status s = gmm__mlp_layout(steps->call, &f, GMM_ROWWISE, 0, gmm__mlp_fc1_cols(steps->call), &layout);
    if (s != GMM_OK) {
        steps->status = s;
        return;
    }
    arena.memory = memory;
    steps->z_e4m3 = gmm_mat_quantized(&f, GMM_ROWWISE, NULL, NULL, NULL);
    steps->z_e4m3.data = gmm__mlp_place(&arena, GMM__MLP_Z, layout.data_bytes);
    steps->z_e4m3.scale = gmm__mlp_place(&arena, GMM__MLP_Z, layout.scale_bytes);
}
/* Adds the cast of the pre-activation to what is saved. */
static void gmm__mlp_cast_e4m3(gmm__mlp_steps *steps) {
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
    gmm__mlp_arena arena = GMM_ZERO;
    arena.memory = steps->call->d.mlp.saved ? (char *)steps->call->d.mlp.saved + at : NULL;
    return gmm__mlp_place_copy(steps, slot, gmm__mlp_backward_direction(steps->call), &arena);
}

/* Forward's copies of x or h: that for the product, and with `saves` in the same pass that for backward. */
static void gmm__mlp_cast_forward(gmm__mlp_steps *steps, int slot, int saves, size_t at) {
    int directions = saves ? gmm__mlp_place_saved(steps, slot, at) : 0;
    directions |= gmm__mlp_place_copy(steps, slot, GMM_ROWWISE, &steps->workspace);
    gmm__mlp_cast(steps, slot, directions, NULL);
}
/* Forward's copy of a weight, or with a cache both copies in it, unless the word `weight_skip` says that they are
   there. */
static void gmm__mlp_cast_weight(gmm__mlp_steps *steps, int slot) {
    const gmm_mlp_quant *quant = &steps->call->quant;
    const gmm__mlp_operand *o = &steps->operand[slot];
    int direction, directions = 0;
    gmm__mlp_await_weight(steps, slot, GMM_OP_LINEAR_FWD);
    if (!quant->weight_cache) gmm__mlp_make_copies(steps, slot, GMM__MLP_ROWWISE);
    else if (o->source->scaling == GMM_SCALING_NONE && gmm__mlp_quantizes(o)) {
        for (direction = 0; direction < 2; direction++)
            directions |= (o->copy[direction].dtype != GMM_NONE) << direction;
        gmm__mlp_cast(steps, slot, directions, quant->weight_skip);
    }
}

/* Fills in what FC1 or FC2 of forward reads. */
static void gmm__mlp_fill_forward(gmm__mlp_steps *steps, gmm_linear *linear, int x, int w) {
    linear->x = gmm__mlp_copies_of(steps, x);
    linear->w = gmm__mlp_copies_of(steps, w);
    gmm__mlp_gather(steps, linear, x, GMM_SLOT_DY);
}
/* Adds FC1 or FC2 of forward. */
static void gmm__mlp_add_forward(gmm__mlp_steps *steps, gmm_linear *linear, int x, int w) {
    gmm__mlp_fill_forward(steps, linear, x, w);
    gmm__mlp_add_step(steps, GMM_OP_LINEAR_FWD, linear);
}

static gmm_status gmm__mlp_prepare_step(const gmm__mlp_steps *steps, const gmm__mlp_step *step, int query,
                                        gmm__call *call);
/* Whether some engine's FC1 may compute the activation unless the caller forbids it. */
static int gmm__mlp_may_join(const gmm__call *call) {
    return call->ctx->config.space == GMM_SPACE_CUDA && call->recipe.kind == GMM_RECIPE_NONE;
}
/* Whether FC1's product computes the activation too: an engine's plan for it says so. Where the caller demands it and
   no engine does, steps->status becomes the reason. */
static int gmm__mlp_fc1_fuses_act(gmm__mlp_steps *steps, int drops_preact) {
    const gmm__call *call = steps->call;
    const gmm_error last_error = call->ctx->error;
    const gmm_fuse fuse = call->options.fuse;
    gmm__mlp_step step;
    gmm__call product;
    gmm__plan plan;
    gmm_status s;
    if (fuse == GMM_FUSE_NEVER || (fuse == GMM_FUSE_AUTO && !gmm__mlp_may_join(call))) return 0;
    memset(&step, 0, sizeof step);
    step.op = GMM_OP_LINEAR_FWD;
    step.descriptor = &steps->fc1;
    step.product_act = &steps->act;
    step.drops_preact = drops_preact;
    gmm__mlp_fill_forward(steps, &steps->fc1, GMM_SLOT_X, GMM_SLOT_W1);
    /* Checked as a query, since z has no address in a plan. Selected as the call, so that the alignment of x and w1
       counts, unless hooks.need sets w1 later. */
    s = gmm__mlp_prepare_step(steps, &step, 1, &product);
    product.query = call->query || gmm__mlp_awaits(call);
    product.describes = NULL;
    if (s == GMM_OK) s = gmm__select(&product, &plan);
    if (s == GMM_OK) return 1;
    if (fuse == GMM_FUSE_ALWAYS) steps->status = s;
    else call->ctx->error = last_error; /* a declined plan is no error */
    return 0;
}

/* Places h, in gmm_mlp.saved where it is kept, and makes it the result of the activation. */
static void gmm__mlp_place_h(gmm__mlp_steps *steps, const gmm__mlp_saved *saved) {
    const gmm__call *call = steps->call;
    char *memory = (char *)call->d.mlp.saved;
    steps->h = gmm__mlp_place_tokens(steps, GMM__MLP_H, call->config.ffn, &steps->workspace);
    if (memory && call->config.save == GMM_SAVE_PREACT_AND_ACT) steps->h.data = memory + saved->at[GMM__SAVED_ACT];
    steps->act.y = &steps->h;
}

/* Adds the activation and the casts of h. */
static void gmm__mlp_add_act_fwd(gmm__mlp_steps *steps, int saves, const gmm__mlp_saved *saved) {
    if (gmm__mlp_cast_fusion_of(steps, GMM_SLOT_H) == GMM__CAST_COMPUTES_ACT) {
        steps->gates = steps->z;
        steps->gates.ld = gmm__mlp_fc1_cols(steps->call);
        steps->operand[GMM_SLOT_H].source = &steps->gates;
        gmm__mlp_cast_forward(steps, GMM_SLOT_H, saves, saved->at[GMM__SAVED_ACT]);
        steps->step[steps->count - 1].act_source = &steps->act;
        gmm__mlp_release(&steps->workspace, GMM__MLP_Z);
        return;
    }
    gmm__mlp_place_h(steps, saved);
    gmm__mlp_add_activation(steps, GMM_OP_ACT_FWD, GMM_SLOT_H, 1);
    gmm__mlp_release(&steps->workspace, GMM__MLP_Z);
    gmm__mlp_cast_forward(steps, GMM_SLOT_H, saves, saved->at[GMM__SAVED_ACT]);
}

/* Lists the steps of forward over a workspace. Inference keeps z and h in the workspace, training in gmm_mlp.saved; a
   query cannot tell the two apart, and reserves the workspace for both. */
static gmm_status gmm__mlp_build_fwd(gmm__mlp_steps *steps, const gmm__call *call, void *workspace) {
    const gmm__mlp_saved saved = gmm__mlp_saved_of(call);
    const int saves = call->query || call->d.mlp.saved, copies = saves && gmm__saves_copies(&call->config);
    const int e4m3 = saves && gmm__saves_e4m3(&call->config);
    const int drops_preact = !saves || call->config.save == GMM_SAVE_NOTHING;
    char *memory = (char *)call->d.mlp.saved;
    memset(steps, 0, sizeof *steps);
    steps->workspace.memory = (char *)workspace;
    gmm__mlp_place_split(steps, call, &steps->workspace);
    gmm__mlp_fill(steps);
    if (call->quant.weight_cache) (void)gmm__mlp_place_weights(steps, call->quant.weight_cache);

    steps->z = gmm__mlp_place_tokens(steps, GMM__MLP_Z, gmm__mlp_fc1_cols(call), &steps->workspace);
    if (memory && call->config.save != GMM_SAVE_NOTHING && !e4m3) steps->z.data = memory;
    gmm__mlp_cast_forward(steps, GMM_SLOT_X, copies, saved.at[GMM__SAVED_X]);
    gmm__mlp_cast_weight(steps, GMM_SLOT_W1);
    steps->fc1_fuses_act = gmm__mlp_fc1_fuses_act(steps, drops_preact);
    if (steps->fc1_fuses_act) gmm__mlp_place_h(steps, &saved);
    gmm__mlp_add_forward(steps, &steps->fc1, GMM_SLOT_X, GMM_SLOT_W1);
    if (steps->fc1_fuses_act) {
        steps->step[steps->count - 1].product_act = &steps->act;
        steps->step[steps->count - 1].drops_preact = drops_preact;
    }
    gmm__mlp_release_copies(steps, GMM_SLOT_X, GMM__MLP_BOTH);
    gmm__mlp_release_copies(steps, GMM_SLOT_W1, GMM__MLP_BOTH);
    if (e4m3) {
        gmm__mlp_place_e4m3(steps, memory);
        gmm__mlp_cast_e4m3(steps);
    }
    if (steps->fc1_fuses_act) gmm__mlp_release(&steps->workspace, GMM__MLP_Z);
    else gmm__mlp_add_act_fwd(steps, copies, &saved);
    gmm__mlp_cast_weight(steps, GMM_SLOT_W2);
    gmm__mlp_add_forward(steps, &steps->fc2, GMM_SLOT_H, GMM_SLOT_W2);
    return steps->status;
}

/* Adds the product of a backward: dgrad reads dy and w, wgrad x and dy. No later step reads the same copies. */
static void gmm__mlp_add_dgrad(gmm__mlp_steps *steps, gmm_linear *linear, int dy, int w) {
    linear->dy = gmm__mlp_backward_operand(steps, dy, GMM_ROWWISE);
    gmm__mlp_await_weight(steps, w, GMM_OP_LINEAR_DGRAD);
    linear->w = gmm__mlp_backward_operand(steps, w, GMM_COLUMNWISE);
    gmm__mlp_gather(steps, linear, GMM_SLOT_X, dy);
    gmm__mlp_add_step(steps, GMM_OP_LINEAR_DGRAD, linear);
    gmm__mlp_release_copies(steps, dy, GMM__MLP_ROWWISE);
    gmm__mlp_release_copies(steps, w, GMM__MLP_BOTH);
}
static void gmm__mlp_add_wgrad(gmm__mlp_steps *steps, gmm_linear *linear, int x, int dy, gmm_param param) {
    linear->x = gmm__mlp_backward_operand(steps, x, GMM_COLUMNWISE);
    linear->dy = gmm__mlp_backward_operand(steps, dy, GMM_COLUMNWISE);
    gmm__mlp_gather(steps, linear, x, dy);
    gmm__mlp_add_gradient(steps, GMM_OP_LINEAR_WGRAD, linear, param);
    gmm__mlp_release_copies(steps, x, GMM__MLP_BOTH);
    gmm__mlp_release_copies(steps, dy, GMM__MLP_COLUMNWISE);
}

/* Casts an output gradient in one pass for its dgrad and its wgrad. A queued wgrad reads its copy in gmm_mlp.deferred
   later. */
static void gmm__mlp_cast_gradient(gmm__mlp_steps *steps, int slot, int dgrad, int wgrad, int defer) {
    int directions = 0;
    if (steps->call->quant.backward_override != GMM_BACKWARD_BY_RECIPE) return;
    if (wgrad) /* lives longer than the other copy, which is therefore behind it */
        directions |= gmm__mlp_place_copy(steps, slot, GMM_COLUMNWISE, defer ? &steps->deferred : &steps->workspace);
    if (dgrad) directions |= gmm__mlp_place_copy(steps, slot, GMM_ROWWISE, &steps->workspace);
    gmm__mlp_cast(steps, slot, directions, NULL);
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
static void gmm__mlp_place_bwd(gmm__mlp_steps *steps, const gmm__mlp_gradients *need) {
    const gmm__call *call = steps->call;
    const gmm__mlp_saved saved = gmm__mlp_saved_of(call);
    char *memory = (char *)call->d.mlp.saved;
    if (need->z && (call->config.save == GMM_SAVE_NOTHING || gmm__saves_e4m3(&call->config)))
        steps->z = gmm__mlp_place_tokens(steps, GMM__MLP_Z, gmm__mlp_fc1_cols(call), &steps->workspace);
    else steps->z.data = memory;
    if (need->h_saved) steps->h.data = memory ? memory + saved.at[GMM__SAVED_ACT] : NULL;
    if (gmm__saves_copies(&call->config)) {
        (void)gmm__mlp_place_saved(steps, GMM_SLOT_X, saved.at[GMM__SAVED_X]);
        (void)gmm__mlp_place_saved(steps, GMM_SLOT_H, saved.at[GMM__SAVED_ACT]);
    }
    if (call->quant.weight_cache) (void)gmm__mlp_place_weights(steps, call->quant.weight_cache);
}

/* Adds the steps that compute z again, or its values in the dtype of x. FC1's operands are cast in both directions
   where FC1's gradients read them too. */
static void gmm__mlp_add_preact(gmm__mlp_steps *steps, const gmm__mlp_gradients *need) {
    const gmm__call *call = steps->call;
    const gmm_mlp *d = &call->d.mlp;
    const int both = call->quant.backward_override == GMM_BACKWARD_BY_RECIPE;
    const int x_again = both && d->dw1 && !need->defer, w_again = both && d->dx;
    if (gmm__saves_e4m3(&call->config)) {
        gmm__mlp_place_e4m3(steps, (char *)d->saved);
        gmm__mlp_dequantize(steps, &steps->z_e4m3, 0, gmm__mlp_fc1_cols(call), &steps->z);
    } else if (call->config.save == GMM_SAVE_NOTHING) {
        gmm__mlp_make_copies(steps, GMM_SLOT_X, x_again ? GMM__MLP_BOTH : GMM__MLP_ROWWISE);
        gmm__mlp_await_weight(steps, GMM_SLOT_W1, GMM_OP_LINEAR_FWD);
        gmm__mlp_make_copies(steps, GMM_SLOT_W1, w_again ? GMM__MLP_BOTH : GMM__MLP_ROWWISE);
        gmm__mlp_add_forward(steps, &steps->fc1, GMM_SLOT_X, GMM_SLOT_W1);
        if (both) { /* with an override the rowwise copies are dequantized later */
            gmm__mlp_release_copies(steps, GMM_SLOT_X, GMM__MLP_ROWWISE);
            gmm__mlp_release_copies(steps, GMM_SLOT_W1, GMM__MLP_ROWWISE);
        }
    }
}

/* Whether the activation of backward computes h, and where: in `deferred` where a queued weight gradient reads it. dh,
   which no later step reads, is in the same memory. */
static int gmm__mlp_computes_h(const gmm__mlp_gradients *need) { return need->h && !need->h_saved; }
static gmm_mat gmm__mlp_place_dh(gmm__mlp_steps *steps, const gmm__mlp_gradients *need) {
    const gmm__call *call = steps->call;
    const int queued = gmm__mlp_computes_h(need) && need->defer && !gmm__mlp_backward_reads_copies(call);
    return gmm__mlp_place_tokens(steps, gmm__mlp_computes_h(need) ? GMM__MLP_H : GMM__MLP_DH, call->config.ffn,
                                 queued ? &steps->deferred : &steps->workspace);
}

/* Adds the activation: its gradient dz, h for FC2's weight gradient, or both. dz takes the place of z, unless z is
   saved and may not be overwritten, and h that of dh. Queued weight gradients read dz and h in `deferred`, unless they
   read copies. */
static void gmm__mlp_add_act(gmm__mlp_steps *steps, const gmm__mlp_gradients *need) {
    const gmm__call *call = steps->call;
    const gmm_mlp *d = &call->d.mlp;
    const int saves_z = call->config.save != GMM_SAVE_NOTHING && !gmm__saves_e4m3(&call->config);
    const int dz_copied = call->quant.backward_override == GMM_BACKWARD_BY_RECIPE &&
                          gmm__mlp_quantizes(&steps->operand[GMM_SLOT_DZ]);
    const int dz_queued = need->defer && d->dw1 && !dz_copied;
    const int in_place = need->dz && !dz_queued && (!saves_z || call->config.overwrite_saved);
    const int computes_h = gmm__mlp_computes_h(need);
    if (in_place) steps->dz = steps->z;
    else if (need->dz)
        steps->dz = gmm__mlp_place_tokens(steps, GMM__MLP_DZ, gmm__mlp_fc1_cols(call),
                                          dz_queued ? &steps->deferred : &steps->workspace);
    if (computes_h) steps->h = need->dh ? steps->dh : gmm__mlp_place_dh(steps, need);
    steps->act.dy = &steps->dh;
    steps->act.dx = need->dz ? &steps->dz : NULL;
    steps->act.dprob = d->dprob;
    steps->act.y = computes_h ? &steps->h : NULL;
    if (need->dh) gmm__mlp_add_activation(steps, GMM_OP_ACT_BWD, GMM_SLOT_DZ, dz_copied && (d->dx || d->dw1));
    else if (computes_h) gmm__mlp_add_step(steps, GMM_OP_ACT_FWD, &steps->act);
    if (!in_place) gmm__mlp_release(&steps->workspace, GMM__MLP_Z);
    gmm__mlp_release(&steps->workspace, GMM__MLP_DH);
}

/* Lists the steps of backward. `deferred`: gmm_mlp.deferred. Blocks of the workspace are returned behind the last step
   that reads them, so that later ones get the same bytes. */
static gmm_status gmm__mlp_build_bwd(gmm__mlp_steps *steps, const gmm__call *call, void *workspace, void *deferred) {
    const gmm_mlp *d = &call->d.mlp;
    const gmm__mlp_gradients need = gmm__mlp_gradients_of(call);
    const int dw1 = d->dw1 && !need.defer, dw2 = d->dw2 && !need.defer;
    const gmm_direction queued = gmm__mlp_backward_direction(call);
    memset(steps, 0, sizeof *steps);
    steps->workspace.memory = (char *)workspace;
    steps->deferred.memory = (char *)deferred;
    gmm__mlp_place_split(steps, call, need.defer ? &steps->deferred : &steps->workspace);
    gmm__mlp_fill(steps);
    gmm__mlp_place_bwd(steps, &need);
    if (need.z) gmm__mlp_add_preact(steps, &need);

    if (need.dh) steps->dh = gmm__mlp_place_dh(steps, &need);
    gmm__mlp_cast_gradient(steps, GMM_SLOT_DY, need.dh, d->dw2 != NULL, need.defer);
    if (need.dh) gmm__mlp_add_dgrad(steps, &steps->dgrad2, GMM_SLOT_DY, GMM_SLOT_W2);
    gmm__mlp_add_act(steps, &need);
    if (dw2) gmm__mlp_add_wgrad(steps, &steps->wgrad2, GMM_SLOT_H, GMM_SLOT_DY, GMM_PARAM_W2);
    else if (d->dw2 && gmm__mlp_backward_reads_copies(call))
        gmm__mlp_cast(steps, GMM_SLOT_H, gmm__mlp_place_copy(steps, GMM_SLOT_H, queued, &steps->deferred), NULL);
    gmm__mlp_release(&steps->workspace, GMM__MLP_H);
    if (d->db2) gmm__mlp_add_gradient(steps, GMM_OP_LINEAR_BGRAD, &steps->bgrad2, GMM_PARAM_B2);
    else if (steps->bgrad2.d_bias_scale) gmm__mlp_add_step(steps, GMM_OP_LINEAR_BGRAD, &steps->bgrad2);

    if (d->dx || d->dw1) gmm__mlp_cast_gradient(steps, GMM_SLOT_DZ, d->dx != NULL, d->dw1 != NULL, need.defer);
    if (dw1) gmm__mlp_add_wgrad(steps, &steps->wgrad1, GMM_SLOT_X, GMM_SLOT_DZ, GMM_PARAM_W1);
    if (d->db1) gmm__mlp_add_gradient(steps, GMM_OP_LINEAR_BGRAD, &steps->bgrad1, GMM_PARAM_B1);
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

/* Checks the call of a step. */
static gmm_status gmm__mlp_prepare_step(const gmm__mlp_steps *steps, const gmm__mlp_step *step, int query,
                                        gmm__call *call) {
    gmm_context *ctx = steps->call->ctx;
    const char *function = steps->call->function;
    gmm_status s;
    if (step->op == GMM_OP_QUANTIZE)
        s = gmm__quantize_prepare(call, ctx, step->op, function, (const gmm_quantization *)step->descriptor, query);
    else if (step->op == GMM_OP_DEQUANTIZE)
        s = gmm__dequantize_prepare(call, ctx, function, (const gmm_dequantization *)step->descriptor, query);
    else if (step->op == GMM_OP_ACT_FWD || step->op == GMM_OP_ACT_BWD)
        s = gmm__act_prepare(call, ctx, step->op, function, (const gmm_activation *)step->descriptor, query);
    else s = gmm__linear_prepare(call, ctx, step->op, function, (const gmm_linear *)step->descriptor, query);
    call->split_tiles = steps->tiles;
    call->act_amax = step->act_amax;
    call->act_source = step->act_source;
    call->product_act = step->product_act;
    call->drops_preact = step->drops_preact;
    call->describes = steps->call->describes;
    if (step->act_source) call->act = *step->act_source->act;
    if (step->product_act) call->act = *step->product_act->act;
    return s;
}

/* Raises plan->workspace_bytes to what the steps take. `built` is the status of listing them. Returns 0 if an engine
   or the listing declines. */
static int gmm__mlp_plan_steps(const gmm__mlp_steps *steps, gmm_status built, gmm__plan *plan) {
    gmm_context *ctx = plan->call->ctx;
    const gmm_error last_error = ctx->error;
    size_t bytes = steps->workspace.peak;
    int i;
    if (built != GMM_OK) return gmm__decline(plan, "%.180s", ctx->error.text);
    for (i = 0; i < steps->count; i++) {
        gmm__call call;
        size_t step_bytes = 0;
        const gmm_status s = gmm__mlp_prepare_step(steps, &steps->step[i], 1, &call);
        if (!gmm__mlp_measure_step(&call, s, &last_error, &step_bytes, plan)) return 0;
        if (steps->step[i].workspace + step_bytes > bytes) bytes = steps->step[i].workspace + step_bytes;
    }
    if (bytes > plan->workspace_bytes) plan->workspace_bytes = bytes;
    return 1;
}

/* Calls the hook for the gradient of a parameter. While a graph is captured nothing is computed, and therefore no hook
   is called. */
static void gmm__mlp_call_hook(const gmm_context *ctx, const gmm_grad_hooks *hooks, gmm_param param,
                               gmm_stream stream) {
    if (hooks && hooks->ready && !gmm__capturing(ctx, stream)) hooks->ready(hooks->user, param, stream);
}

/* Checks a matrix that hooks.need has set against the one with which the call began. */
static gmm_status gmm__mlp_check_late(const gmm__call *call, const char *name, const gmm_mat *was, const gmm_mat *m) {
    const uint32_t flags = ~(uint32_t)GMM_MAT_TABLE_ON_HOST;
    const struct { const char *name; int64_t was, is; } fields[] = {
        { "dtype", was->dtype, m->dtype },
        { "scaling", was->scaling, m->scaling },
        { "scale_order", was->scale_order, m->scale_order },
        { "hadamard", was->hadamard, m->hadamard },
        { "flags", was->flags & flags, m->flags & flags },
        { "ld", was->ld, m->ld },
    };
    const int64_t bits = gmm_dtype_bits(m->dtype);
    const int readable = call->ctx->config.space == GMM_SPACE_CPU || (m->flags & (uint32_t)GMM_MAT_TABLE_ON_HOST);
    const void *address = m->data;
    int32_t g;
    size_t i;
    for (i = 0; i < sizeof fields / sizeof fields[0]; i++)
        if (fields[i].was != fields[i].is)
            return gmm__refuse(call, GMM_E_CONFIG, name, "%s %lld must be %lld, as when the call began: hooks.need may "
                               "set addresses and group_stride alone", fields[i].name, (long long)fields[i].is,
                               (long long)fields[i].was);
    if (m->ld * bits % 128) return GMM_OK;
    if (m->data && m->group_stride * bits % 128)
        return gmm__refuse(call, GMM_E_ALIGN, name, "group_stride %lld, set by hooks.need, must be a multiple of 16 "
                           "bytes as ld %lld is", (long long)m->group_stride, (long long)m->ld);
    for (g = 0; m->table && readable && g < call->groups.count && (uintptr_t)address % 16 == 0; g++)
        address = m->table[g];
    if ((uintptr_t)address % 16)
        return gmm__refuse(call, GMM_E_ALIGN, name, "%p, set by hooks.need, must be a multiple of 16 bytes as ld %lld "
                           "is", address, (long long)m->ld);
    return GMM_OK;
}

/* Calls hooks.need for the weight of a step, and reads the addresses that it has set. */
static gmm_status gmm__mlp_take_weight(gmm__mlp_steps *steps, const gmm__mlp_step *step, gmm_stream stream) {
    const int second = step->awaits == GMM_SLOT_W2, role = second ? GMM__W2 : GMM__W;
    const char *const names[2] = { second ? "w2" : "w1", second ? "w2.columnwise" : "w1.columnwise" };
    const gmm_grad_hooks *hooks = steps->call->d.mlp.hooks;
    const int dgrad = step->awaits_op == GMM_OP_LINEAR_DGRAD;
    const gmm_direction direction = dgrad ? gmm__mlp_dgrad_direction(steps->call) : GMM_ROWWISE;
    gmm__mlp_operand *o = &steps->operand[step->awaits];
    const int plain = o->source->scaling == GMM_SCALING_NONE; /* both directions read the one matrix */
    const char *const name = names[plain ? GMM_ROWWISE : direction];
    gmm_mat *mat = plain ? &steps->weight[second] : &o->copy[direction], was = *mat;
    gmm__call late = *steps->call;
    gmm_status s = hooks->need(hooks->user, second ? GMM_PARAM_W2 : GMM_PARAM_W1, step->awaits_op, stream);
    if (s != GMM_OK)
        return gmm__refuse(&late, s, "hooks.need", "status %d (%s) for %s of %s", (int)s, gmm_status_name(s), names[0],
                           gmm_op_name(step->awaits_op));
    if ((s = gmm__mlp_read_weight(&late, role, 1 << direction)) != GMM_OK) return s;
    if (late.mat[role].scaling != o->source->scaling)
        return gmm__mlp_check_late(&late, names[0], &was, &late.mat[role]);
    if (!plain) { /* a query reads both matrices again, to fill in their ld */
        const gmm__extents extents = gmm__mlp_weight_extents(&late, role);
        gmm_mat now = late.mat[role];
        if (direction == GMM_COLUMNWISE) (void)gmm__copy_sized(&now, sizeof now, late.mat[role].columnwise);
        late.query = 1;
        if ((s = gmm__read_quant(&late, role, name, &was, extents, direction)) != GMM_OK) return s;
        was = late.mat[role];
        if ((s = gmm__read_quant(&late, role, name, &now, extents, direction)) != GMM_OK) return s;
        late.query = 0;
    }
    s = gmm__mlp_check_late(&late, name, &was, &late.mat[role]);
    if (s != GMM_OK || (s = gmm__check_overlap(&late)) != GMM_OK) return s;
    *mat = late.mat[role];
    if (mat->scaling != GMM_SCALING_NONE) {
        mat->columnwise = NULL;
        (void)gmm__mlp_copies_of(steps, step->awaits);
    }
    return GMM_OK;
}

/* The kinds of tiles whose prefix sums the steps read: casts and dequantizations, among which are those of products of
   MX32 and NV16 tokens, and bias gradients. Queued weight gradients read them later. */
static int32_t gmm__mlp_tile_kinds(const gmm__mlp_steps *steps) {
    const int queues = steps->deferred.count > 0;
    int32_t kinds = queues ? 1 << GMM__TILES_128 | 1 << GMM__TILES_16 : 0;
    int i;
    for (i = 0; i < steps->count; i++) {
        const gmm__mlp_step *step = &steps->step[i];
        if (step->op == GMM_OP_QUANTIZE || step->op == GMM_OP_DEQUANTIZE) kinds |= 1 << GMM__TILES_128;
        else if (step->op == GMM_OP_LINEAR_BGRAD) kinds |= 1 << GMM__TILES_512;
        else if (step->op != GMM_OP_ACT_FWD && step->op != GMM_OP_ACT_BWD) {
            const gmm_linear *l = (const gmm_linear *)step->descriptor;
            const gmm_scaling scaling = l->dy ? l->dy->scaling : l->x->scaling;
            if (scaling == GMM_SCALING_MX32 || scaling == GMM_SCALING_NV16)
                kinds |= 1 << GMM__TILES_128 | 1 << GMM__TILES_16;
        }
    }
    return kinds;
}

/* Enqueues the computation of the call's split as int64 offsets and tiles, which all steps read. */
static gmm_status gmm__mlp_run_split(const gmm__mlp_steps *steps, const gmm__plan *plan, gmm_stream stream) {
    gmm__call step = *steps->call;
    step.op = GMM_OP_OFFSETS;
    step.query = 0;
    step.options.engine = plan->engine;
    step.output = steps->offsets;
    step.split_tiles = steps->tiles;
    step.tile_kinds = gmm__mlp_tile_kinds(steps);
    step.spans = 0; /* overlap was checked with the call */
    return gmm__serve(&step, NULL, NULL, 0, stream);
}

/* Enqueues the steps, each behind what must outlive it in the workspace of the plan. */
static gmm_status gmm__mlp_run_steps(gmm__mlp_steps *steps, const gmm__plan *plan, const gmm_grad_hooks *hooks,
                                     gmm_stream stream) {
    gmm_status s = GMM_OK;
    int i;
    for (i = 0; i < steps->count && s == GMM_OK; i++) {
        const gmm__mlp_step *step = &steps->step[i];
        gmm__call call;
        if (step->awaits && hooks && hooks->need) s = gmm__mlp_take_weight(steps, step, stream);
        if (s == GMM_OK) s = gmm__mlp_prepare_step(steps, step, 0, &call);
        if (s == GMM_OK)
            s = gmm__serve(&call, NULL, plan->workspace ? (char *)plan->workspace + step->workspace : NULL,
                           plan->workspace_bytes - step->workspace, stream);
        if (s == GMM_OK && step->completes) gmm__mlp_call_hook(call.ctx, hooks, step->param, stream);
    }
    return s;
}
