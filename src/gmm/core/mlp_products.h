/* --- a product whose factors a recipe quantizes first --- */

static gmm_status gmm__quantize_prepare(gmm__call *call, gmm_context *ctx, gmm_op op, const char *function,
                                        const gmm_quantization *quantization, int query);

/* What such a product needs beside its descriptor; kept with delayed weight gradients. */
typedef struct gmm__mlp_recipe {
    gmm_recipe recipe;
    gmm_mlp_quant quant;
} gmm__mlp_recipe;

/* One factor: where the descriptor points at it, what it becomes, and its slot. */
typedef struct gmm__mlp_factor {
    const gmm_mat **place;
    const gmm_format *role;
    gmm_direction direction;
    int32_t slot;
    int64_t rows, cols; /* of a weight; activations: rows 0 */
} gmm__mlp_factor;

static void *gmm__mlp_take(void *memory, size_t *used, int64_t bytes) {
    void *at = memory ? (char *)memory + *used : NULL;
    *used += gmm__round256((size_t)bytes);
    return at;
}

/* Quantizes the factors of a linear operation of layer 1 or 2 into `memory` and multiplies the copies. Without memory
   it only counts: *need is raised to the bytes that the call takes. */
static gmm_status gmm__mlp_product(gmm_context *ctx, const char *function, const gmm__mlp_recipe *q, gmm_op op,
                                   int layer, const gmm_linear *linear, void *memory, size_t bytes, size_t *need,
                                   gmm_stream stream) {
    const int fwd = op == GMM_OP_LINEAR_FWD, wgrad = op == GMM_OP_LINEAR_WGRAD, query = memory == NULL;
    const gmm_direction tokens = wgrad ? GMM_COLUMNWISE : GMM_ROWWISE;
    const int64_t G = linear->groups->count;
    const int32_t slot_x = layer == 1 ? GMM_SLOT_X : GMM_SLOT_H, slot_w = layer == 1 ? GMM_SLOT_W1 : GMM_SLOT_W2;
    const int32_t slot_dy = layer == 1 ? GMM_SLOT_DZ : GMM_SLOT_DY;
    gmm_linear l = *linear;
    gmm__mlp_factor factor[2];
    gmm_quantization step[2];
    gmm_format format[2];
    gmm_mat copy[2], shell[2];
    gmm__call call;
    gmm__plan plan;
    gmm_status s;
    size_t used = 0, sub = 0;
    int i, count = 0;

    memset(factor, 0, sizeof factor);
    factor[0].place = fwd || wgrad ? &l.x : &l.dy;
    factor[0].role = fwd || wgrad ? &q->recipe.input : &q->recipe.grad;
    factor[0].direction = tokens;
    factor[0].slot = fwd || wgrad ? slot_x : slot_dy;
    factor[0].cols = fwd || wgrad ? l.in_features : l.out_features;
    factor[1].place = wgrad ? &l.dy : &l.w;
    factor[1].role = wgrad ? &q->recipe.grad : &q->recipe.weight;
    factor[1].direction = fwd ? GMM_ROWWISE : GMM_COLUMNWISE;
    factor[1].slot = wgrad ? slot_dy : slot_w;
    factor[1].rows = wgrad ? 0 : l.out_features;
    factor[1].cols = wgrad ? l.out_features : l.in_features;

    memset(step, 0, sizeof step);
    for (i = 0; i < 2; i++) {
        const gmm__mlp_factor *f = &factor[i];
        gmm_quantization *d = &step[count];
        gmm_format *to = &format[count];
        gmm_layout layout;
        gmm_error why = GMM_ZERO;
        if (f->role->dtype == GMM_NONE || (*f->place)->scaling != GMM_SCALING_NONE) continue;
        *to = *f->role;
        to->struct_size = 0;
        if (f->direction == GMM_COLUMNWISE) to->row_amax = 0; /* sums run over the rows */
        s = f->rows ? gmm_layout_of(to->dtype, to->scaling, to->order, f->direction, f->rows, f->cols, &layout, &why)
                    : gmm_layout_of_groups(to->dtype, to->scaling, to->order, f->direction, (int32_t)G,
                                           l.groups->capacity, f->cols, &layout, &why);
        if (s != GMM_OK) return gmm__fail(&ctx->error, s, "%s: %.400s", function, why.text);
        copy[i] = gmm_mat_quantized(to, f->direction, NULL, NULL, NULL);
        copy[i].data = gmm__mlp_take(memory, &used, f->rows ? G * layout.data_bytes : layout.data_bytes);
        copy[i].scale = gmm__mlp_take(memory, &used, f->rows ? G * layout.scale_bytes : layout.scale_bytes);
        if (to->delayed) copy[i].amax = q->quant.amax ? q->quant.amax + f->slot * G : NULL;
        else copy[i].amax = (float *)gmm__mlp_take(memory, &used, 4 * (to->row_amax ? l.groups->capacity : G));
        d->count = f->rows ? (int32_t)G : 0;
        d->rows = f->rows;
        d->cols = f->cols;
        d->groups = f->rows ? NULL : l.groups;
        d->options = l.options;
        d->format = to;
        d->src = *f->place;
        if (f->direction == GMM_ROWWISE) d->rowwise = &copy[i];
        else d->columnwise = &copy[i];
        d->scale = to->delayed && q->quant.scale ? q->quant.scale + f->slot * G : NULL;
        if (to->stochastic && q->quant.random) d->random = q->quant.random + (f->slot == GMM_SLOT_DZ ? 2 : 0);
        count++;
        shell[i] = copy[i];
        shell[i].columnwise = &copy[i];
        *f->place = f->direction == GMM_ROWWISE ? &copy[i] : &shell[i];
    }
    for (i = 0; i < count; i++) {
        s = gmm__quantize_prepare(&call, ctx, GMM_OP_QUANTIZE, function, &step[i], query);
        if (s == GMM_OK) s = query ? gmm__select(&call, &plan)
                                   : gmm__serve(&call, NULL, (char *)memory + used, bytes - used, stream);
        if (s != GMM_OK) return s;
        if (query && plan.workspace_bytes > sub) sub = plan.workspace_bytes;
    }
    s = gmm__linear_prepare(&call, ctx, op, function, &l, query);
    if (s == GMM_OK) s = query ? gmm__select(&call, &plan)
                               : gmm__serve(&call, NULL, (char *)memory + used, bytes - used, stream);
    if (s != GMM_OK) return s;
    if (query && plan.workspace_bytes > sub) sub = plan.workspace_bytes;
    if (need && used + sub > *need) *need = used + sub;
    return GMM_OK;
}

static gmm__mlp_recipe gmm__mlp_recipe_of(const gmm__call *call) {
    gmm__mlp_recipe q;
    q.recipe = call->recipe;
    q.quant = call->quant;
    return q;
}
/* The layer that a step of this call belongs to. */
static int gmm__mlp_layer(const gmm__call *call, const gmm_linear *l) {
    return l->dy == &call->mat[GMM__DY] || l->w == &call->mat[GMM__W2] ? 2 : 1;
}
/* Raises *bytes to the workspace of one product. Returns 0 if the engine declines it. */
static int gmm__mlp_size_product(const gmm__plan *plan, gmm_op op, const gmm_linear *l, size_t *bytes, gmm__plan *out) {
    const gmm__call *call = plan->call;
    const gmm__mlp_recipe q = gmm__mlp_recipe_of(call);
    const gmm_error before = call->ctx->error;
    if (q.recipe.kind == GMM_RECIPE_NONE) return gmm__mlp_size_linear(plan, op, l, bytes, out);
    if (gmm__mlp_product(call->ctx, call->function, &q, op, gmm__mlp_layer(call, l), l, NULL, 0, bytes, NULL) == GMM_OK)
        return 1;
    (void)gmm__decline(out, "%.180s", call->ctx->error.text);
    call->ctx->error = before;
    return 0;
}
static int gmm__mlp_size_act(const gmm__plan *plan, gmm_op op, const gmm_activation *a, size_t *bytes, gmm__plan *out) {
    gmm__call step;
    const gmm_error before = plan->call->ctx->error;
    const gmm_status s = gmm__act_prepare(&step, plan->call->ctx, op, plan->call->function, a, 1);
    return gmm__mlp_size(&step, s, &before, bytes, out);
}

