/* Casts of an MLP's operands. A tensor that several products read is read once and cast in all directions that they
   need; the copies outlive the products that read them. */

/* The four sets of directions that a cast may have. */
enum { GMM__MLP_ROWWISE = 1 << GMM_ROWWISE, GMM__MLP_COLUMNWISE = 1 << GMM_COLUMNWISE, GMM__MLP_BOTH = 3 };

/* Whether an operand has copies: the recipe quantizes it, or the caller has. */
static int gmm__mlp_quantizes(const gmm__mlp_operand *o) { return o->format[0].dtype != GMM_NONE; }

/* Gives an operand a copy in an arena, unless it has one. A later cast writes the copy, or an earlier call has. Returns
   the direction as a set where the operand has no such copy yet. */
static int gmm__mlp_place_copy(gmm__mlp_steps *steps, int slot, gmm_direction direction, gmm__arena *arena) {
    const gmm__call *call = steps->call;
    const gmm_mlp_quant *quant = &call->quant;
    gmm__mlp_operand *o = &steps->operand[slot];
    const gmm_format *f = &o->format[direction];
    const int32_t owner = GMM__MLP_COPY + 2 * slot + (int32_t)direction;
    gmm_mat *m = &o->copy[direction];
    gmm_layout layout;
    gmm_status s;
    if (!gmm__mlp_quantizes(o) || m->dtype != GMM_NONE) return 0;
    s = gmm__mlp_layout(call, f, direction, o->rows, o->cols, &layout);
    if (s != GMM_OK) {
        if (steps->status == GMM_OK) steps->status = s;
        return 0;
    }
    *m = gmm_mat_quantized(f, direction, NULL, NULL, NULL);
    m->data = gmm__arena_alloc(arena, owner, layout.data_bytes);
    m->scale = gmm__arena_alloc(arena, owner, layout.scale_bytes);
    if (f->scaling == GMM_SCALING_NV16)
        m->amax = (float *)gmm__arena_alloc(arena, owner, 4 * (f->row_amax ? call->groups.capacity
                                                                         : (int64_t)call->groups.count));
    else if (f->delayed && quant->amax) m->amax = quant->amax + (int64_t)slot * call->groups.count;
    return 1 << direction;
}

/* How the activation and the cast of its result, h in forward or dz in backward, share their work. */
enum gmm__mlp_cast_fusion {
    GMM__CAST_ALONE,
    GMM__CAST_AFTER_AMAX, /* the activation takes the amaxes that the cast needs, while it stores the result */
    GMM__CAST_COMPUTES_ACT /* the cast computes h from z, or dz from z and dh; it is neither stored nor loaded */
};
/* Whether the gradients of 128 columns of h are one tile of gate columns and, if the activation is gated, one of linear
   columns. By blocks both begin at multiples of 128 columns. */
static int gmm__mlp_gradient_tiles(const gmm__call *call, const gmm_format *f) {
    const int64_t ffn = call->config.ffn, block = call->act.interleave;
    if (!gmm_act_gated(call->act.kind)) return 1;
    if (block && block != ffn) return block % GMM_TILE == 0;
    return f->scaling == GMM_SCALING_TENSOR || ffn % GMM_TILE == 0;
}
/* The one place that decides it; `slot` is GMM_SLOT_H or GMM_SLOT_DZ. The kernels that compute h or dz serve BF16 and
   aligned rows. */
static enum gmm__mlp_cast_fusion gmm__mlp_cast_fusion_of(const gmm__mlp_steps *steps, int slot) {
    const gmm__call *call = steps->call;
    const gmm_format *f = &steps->operand[slot].format[0];
    const int64_t ffn = call->config.ffn, block = call->act.interleave;
    const int64_t cols = slot == GMM_SLOT_H ? ffn : gmm__mlp_fc1_cols(call); /* of the cast */
    const int aligned = ffn % 8 == 0 && (block <= 1 || block % 8 == 0) && cols <= INT32_MAX / 2 &&
                        call->rows <= INT32_MAX / 2;
    if (call->ctx->config.space != GMM_SPACE_CUDA) return GMM__CAST_ALONE;
    if (f->scaling == GMM_SCALING_TENSOR && !f->delayed) return GMM__CAST_AFTER_AMAX;
    if (slot == GMM_SLOT_H ? call->config.save == GMM_SAVE_PREACT_AND_ACT : !gmm__mlp_gradient_tiles(call, f))
        return GMM__CAST_ALONE;
    return steps->dtype == GMM_BF16 && aligned &&
                   (f->scaling == GMM_SCALING_TENSOR || f->scaling == GMM_SCALING_1X128)
               ? GMM__CAST_COMPUTES_ACT : GMM__CAST_ALONE;
}

/* Adds the activation whose result is the operand `slot`. If a cast follows that needs amaxes by group, the activation
   takes them. */
static void gmm__mlp_add_act_step(gmm__mlp_steps *steps, gmm_op op, int slot, int casts) {
    const int takes_amax = casts && gmm__mlp_cast_fusion_of(steps, slot) == GMM__CAST_AFTER_AMAX;
    if (takes_amax) {
        steps->amax_slots |= 1 << slot;
        steps->amax = (float *)gmm__arena_alloc(&steps->workspace, GMM__MLP_AMAX,
                                                4 * (int64_t)steps->call->groups.count);
    }
    gmm__mlp_add_step(steps, op, &steps->act);
    if (takes_amax) steps->step[steps->count - 1].fused.act_amax = steps->amax;
}
/* The copy as its cast writes it: with the amaxes that the activation has taken, if it has. */
static const gmm_mat *gmm__mlp_cast_destination(gmm__mlp_steps *steps, int slot, int direction) {
    gmm_mat *m = &steps->scaled[direction];
    if (!(steps->amax_slots >> slot & 1)) return &steps->operand[slot].copy[direction];
    *m = steps->operand[slot].copy[direction];
    m->amax = steps->amax;
    return m;
}

/* Adds the quantization that writes the copies of a set of directions. Amaxes per row, which only a rowwise copy has,
   need a quantization of their own. */
static void gmm__mlp_add_cast(gmm__mlp_steps *steps, int slot, int directions, const int32_t *skip) {
    const gmm_mlp_quant *quant = &steps->call->quant;
    gmm__mlp_operand *o = &steps->operand[slot];
    gmm_quantization *d = NULL;
    int direction;
    for (direction = 0; direction < 2; direction++) {
        const gmm_format *f = &o->format[direction];
        if (!(directions & 1 << direction)) continue;
        if (!d || o->format[0].row_amax) {
            d = &steps->cast[steps->casts++];
            d->count = o->rows ? steps->call->groups.count : 0;
            d->rows = o->rows;
            d->cols = o->cols;
            d->groups = o->rows ? NULL : &steps->groups;
            d->options = &steps->options;
            d->format = f;
            d->src = o->source;
            d->src_index = o->index;
            d->index_rows = steps->index_rows;
            d->index_div = steps->index_div;
            d->skip = skip;
            if (steps->amax_slots >> slot & 1) d->phase = GMM_QUANT_CAST;
            if (f->delayed && quant->scale) d->scale = quant->scale + (int64_t)slot * steps->call->groups.count;
            if (f->stochastic && quant->random) d->random = quant->random + (slot == GMM_SLOT_DZ ? 2 : 0);
            gmm__mlp_add_step(steps, GMM_OP_QUANTIZE, d);
        }
        if (direction) d->columnwise = gmm__mlp_cast_destination(steps, slot, direction);
        else d->rowwise = gmm__mlp_cast_destination(steps, slot, direction);
    }
    if (d && steps->amax_slots >> slot & 1) { /* another cast would take amaxes itself */
        steps->amax_slots &= ~(1 << slot);
        gmm__arena_free(&steps->workspace, GMM__MLP_AMAX);
    }
}

/* Frees the workspace of an operand's copies of a set of directions, and that of its dequantized values: no later
   step reads them. */
static void gmm__mlp_release_copies(gmm__mlp_steps *steps, int slot, int directions) {
    int direction;
    for (direction = 0; direction < 2; direction++)
        if (directions & 1 << direction) gmm__arena_free(&steps->workspace, GMM__MLP_COPY + 2 * slot + direction);
    gmm__arena_free(&steps->workspace, GMM__MLP_DEQUANTIZED + slot);
}

/* Makes those copies of a set of directions that the operand lacks, in the workspace. */
static void gmm__mlp_make_copies(gmm__mlp_steps *steps, int slot, int directions) {
    int direction, lacking = 0;
    for (direction = 0; direction < 2; direction++)
        if (directions & 1 << direction)
            lacking |= gmm__mlp_place_copy(steps, slot, (gmm_direction)direction, &steps->workspace);
    gmm__mlp_add_cast(steps, slot, lacking, NULL);
}

/* The operand as a product by the recipe reads it: its copies, or the source where the recipe leaves it as it is. */
static const gmm_mat *gmm__mlp_copies_of(gmm__mlp_steps *steps, int slot) {
    gmm__mlp_operand *o = &steps->operand[slot];
    const gmm_mat *copy = o->copy;
    if (!gmm__mlp_quantizes(o)) return o->source;
    o->quantized = copy[copy[GMM_ROWWISE].dtype == GMM_NONE];
    o->quantized.columnwise = copy[GMM_COLUMNWISE].dtype == GMM_NONE ? NULL : &copy[GMM_COLUMNWISE];
    return &o->quantized;
}

/* Adds the dequantization of a rowwise matrix into `dst`. */
static void gmm__mlp_add_dequantization(gmm__mlp_steps *steps, const gmm_mat *src, int64_t rows, int64_t cols,
                                        const gmm_mat *dst) {
    gmm_dequantization *d = &steps->dequantization[steps->dequantizations++];
    d->count = rows ? steps->call->groups.count : 0;
    d->rows = rows;
    d->cols = cols;
    d->groups = rows ? NULL : &steps->groups;
    d->options = &steps->options;
    d->direction = GMM_ROWWISE;
    d->src = src;
    d->dst = dst;
    gmm__mlp_add_step(steps, GMM_OP_DEQUANTIZE, d);
}

/* The operand as a backward product reads it along `direction`. Adds the steps that this takes. */
static const gmm_mat *gmm__mlp_backward_operand(gmm__mlp_steps *steps, int slot, gmm_direction direction) {
    const gmm_backward_override override = steps->call->quant.backward_override;
    gmm__mlp_operand *o = &steps->operand[slot];
    if (!gmm__mlp_quantizes(o) || override == GMM_BACKWARD_HIGH_PRECISION) return o->source;
    if (override == GMM_BACKWARD_DEQUANTIZED) {
        const int64_t rows = o->rows ? o->rows * steps->call->groups.count : steps->call->groups.capacity;
        if (slot == GMM_SLOT_DY || slot == GMM_SLOT_DZ) return o->source; /* forward has no copy of them */
        gmm__mlp_make_copies(steps, slot, GMM__MLP_ROWWISE);
        o->dequantized = gmm_mat_packed(steps->dtype, gmm__arena_alloc(&steps->workspace, GMM__MLP_DEQUANTIZED + slot,
                                                                       rows * o->cols *
                                                                         (gmm_dtype_bits(steps->dtype) / 8)));
        gmm__mlp_add_dequantization(steps, &o->copy[GMM_ROWWISE], o->rows, o->cols, &o->dequantized);
        return &o->dequantized;
    }
    gmm__mlp_make_copies(steps, slot, 1 << direction);
    return gmm__mlp_copies_of(steps, slot);
}

/* --- the cache of quantized weights --- */

/* Places the copies of both weights in the cache of the caller, and returns its bytes. Backward on dequantized values
   reads rowwise copies alone. Forward and backward place them alike: a weight that the caller has quantized has no copy
   there, whichever of its own copies the call is given, and W1 is behind W2, since some backwards do not read it. */
static size_t gmm__mlp_place_weights(gmm__mlp_steps *steps, void *memory) {
    static const struct { int slot, role; } weights[2] = { { GMM_SLOT_W2, GMM__W2 }, { GMM_SLOT_W1, GMM__W } };
    const gmm__call *call = steps->call;
    const int directions = call->quant.backward_override == GMM_BACKWARD_BY_RECIPE ? 2 : 1;
    gmm__arena cache = GMM_ZERO;
    int i, direction;
    cache.memory = (char *)memory;
    for (i = 0; i < 2; i++)
        for (direction = 0; direction < directions; direction++)
            if (steps->operand[weights[i].slot].source->scaling == GMM_SCALING_NONE &&
                gmm__mlp_weight_directions(call, weights[i].role))
                (void)gmm__mlp_place_copy(steps, weights[i].slot, (gmm_direction)direction, &cache);
    return cache.peak;
}
/* Bytes of the cache that a call's weights need; 0 where they are not quantized here. */
static size_t gmm__mlp_cache_bytes(const gmm__call *call) {
    gmm__mlp_steps steps;
    const gmm_error last_error = call->ctx->error;
    size_t bytes;
    memset(&steps, 0, sizeof steps);
    gmm__mlp_begin(&steps, call, gmm__mlp_dtype(call), NULL, NULL);
    gmm__mlp_fill(&steps);
    bytes = gmm__mlp_place_weights(&steps, NULL);
    call->ctx->error = last_error;
    return steps.status == GMM_OK ? bytes : 0;
}
