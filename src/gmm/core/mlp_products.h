/* --- products whose operands a recipe quantizes first --- */

static gmm_status gmm__quantize_prepare(gmm__call *call, gmm_context *ctx, gmm_op op, const char *function,
                                        const gmm_quantization *quantization, int query);

/* The recipe of an MLP and the arrays that quantizing its operands reads and writes. */
typedef struct gmm__mlp_quantization {
    gmm_recipe recipe;
    gmm_mlp_quant quant;
} gmm__mlp_quantization;

/* One linear operation of FC1 (layer 1) or FC2 (layer 2). `linear` describes it with the operands of the caller. */
typedef struct gmm__mlp_product {
    gmm_context *ctx;
    const char *function; /* for messages */
    const gmm__mlp_quantization *quantization;
    gmm_op op;
    int layer;
    const gmm_linear *linear;
} gmm__mlp_product;

/* An operand of a product: its field in the linear descriptor, the format that the recipe gives it, the direction of
   the copy that the product reads, and its slot in the arrays of gmm_mlp_quant. `rows` are those of a weight matrix; 0
   marks a token matrix, whose rows are those of the groups. */
typedef struct gmm__mlp_operand {
    const gmm_mat **field;
    const gmm_format *format;
    gmm_direction direction;
    int32_t slot;
    int64_t rows, cols;
} gmm__mlp_operand;

/* A product of quantized operands: `count` quantizations, then `linear`, which reads what they write. The descriptors
   point into this structure, which must therefore not be copied. `bytes` of workspace hold the quantized operands. */
typedef struct gmm__mlp_quantized {
    gmm_linear linear;
    gmm_quantization quantization[2];
    gmm_format format[2];
    gmm_mat operand[2];    /* as the quantization writes it */
    gmm_mat columnwise[2]; /* its view in the linear descriptor, where the product reads the columnwise copy */
    int count;
    size_t bytes;
} gmm__mlp_quantized;

/* Reserves `bytes` of the workspace and returns their address. Without a workspace it counts the bytes, and returns
   NULL. */
static void *gmm__mlp_reserve(void *workspace, size_t *used, int64_t bytes) {
    void *address = workspace ? (char *)workspace + *used : NULL;
    *used += gmm__round256((size_t)bytes);
    return address;
}

/* Describes the two operands of a product: x and w, dy and w, or x and dy. `l` is the descriptor whose fields they are.
   Copies are rowwise where a product contracts along the columns of the operand, and columnwise along its rows. */
static void gmm__mlp_operands(const gmm__mlp_product *p, gmm_linear *l, gmm__mlp_operand operand[2]) {
    const gmm_recipe *r = &p->quantization->recipe;
    const int fwd = p->op == GMM_OP_LINEAR_FWD, wgrad = p->op == GMM_OP_LINEAR_WGRAD, reads_x = fwd || wgrad;
    const int32_t slot_x = p->layer == 1 ? GMM_SLOT_X : GMM_SLOT_H, slot_w = p->layer == 1 ? GMM_SLOT_W1 : GMM_SLOT_W2;
    const int32_t slot_dy = p->layer == 1 ? GMM_SLOT_DZ : GMM_SLOT_DY;
    operand[0].field = reads_x ? &l->x : &l->dy;
    operand[0].format = reads_x ? &r->input : &r->grad;
    operand[0].direction = wgrad ? GMM_COLUMNWISE : GMM_ROWWISE;
    operand[0].slot = reads_x ? slot_x : slot_dy;
    operand[0].rows = 0;
    operand[0].cols = reads_x ? l->in_features : l->out_features;
    operand[1].field = wgrad ? &l->dy : &l->w;
    operand[1].format = wgrad ? &r->grad : &r->weight;
    operand[1].direction = fwd ? GMM_ROWWISE : GMM_COLUMNWISE;
    operand[1].slot = wgrad ? slot_dy : slot_w;
    operand[1].rows = wgrad ? 0 : l->out_features;
    operand[1].cols = wgrad ? l->out_features : l->in_features;
}

/* Adds the quantization of operand i to q, and points the linear descriptor to its result, unless the recipe leaves the
   operand as it is or the caller has quantized it. */
static gmm_status gmm__mlp_add_quantization(const gmm__mlp_product *p, const gmm__mlp_operand *o, int i,
                                            void *workspace, gmm__mlp_quantized *q) {
    const gmm_groups *groups = q->linear.groups;
    const int64_t G = groups->count;
    const gmm_mlp_quant *quant = &p->quantization->quant;
    gmm_quantization *d = &q->quantization[q->count];
    gmm_format *format = &q->format[q->count];
    gmm_mat *m = &q->operand[i];
    gmm_layout layout;
    gmm_error error = GMM_ZERO;
    gmm_status s;
    if (o->format->dtype == GMM_NONE || (*o->field)->scaling != GMM_SCALING_NONE) return GMM_OK;
    *format = *o->format;
    format->struct_size = 0;
    if (o->direction == GMM_COLUMNWISE) format->row_amax = 0; /* the product contracts along the rows */
    s = o->rows ? gmm_layout_of(format->dtype, format->scaling, format->order, o->direction, o->rows, o->cols, &layout,
                                &error)
                : gmm_layout_of_groups(format->dtype, format->scaling, format->order, o->direction, (int32_t)G,
                                       groups->capacity, o->cols, &layout, &error);
    if (s != GMM_OK) return gmm__fail(&p->ctx->error, s, "%s: %.400s", p->function, error.text);
    *m = gmm_mat_quantized(format, o->direction, NULL, NULL, NULL);
    m->data = gmm__mlp_reserve(workspace, &q->bytes, o->rows ? G * layout.data_bytes : layout.data_bytes);
    m->scale = gmm__mlp_reserve(workspace, &q->bytes, o->rows ? G * layout.scale_bytes : layout.scale_bytes);
    if (format->delayed) m->amax = quant->amax ? quant->amax + o->slot * G : NULL;
    else
        m->amax = (float *)gmm__mlp_reserve(workspace, &q->bytes, 4 * (format->row_amax ? groups->capacity : G));
    d->count = o->rows ? (int32_t)G : 0;
    d->rows = o->rows;
    d->cols = o->cols;
    d->groups = o->rows ? NULL : groups;
    d->options = q->linear.options;
    d->format = format;
    d->src = *o->field;
    if (o->direction == GMM_ROWWISE) d->rowwise = m;
    else d->columnwise = m;
    d->scale = format->delayed && quant->scale ? quant->scale + o->slot * G : NULL;
    if (format->stochastic && quant->random) d->random = quant->random + (o->slot == GMM_SLOT_DZ ? 2 : 0);
    q->count++;
    q->columnwise[i] = *m;
    q->columnwise[i].columnwise = m;
    *o->field = o->direction == GMM_ROWWISE ? m : &q->columnwise[i];
    return GMM_OK;
}

/* Describes a product over quantized operands. Without a workspace their addresses are NULL, as in queries. */
static gmm_status gmm__mlp_quantized_of(const gmm__mlp_product *p, void *workspace, gmm__mlp_quantized *q) {
    gmm__mlp_operand operand[2];
    gmm_status s = GMM_OK;
    int i;
    memset(q, 0, sizeof *q);
    q->linear = *p->linear;
    gmm__mlp_operands(p, &q->linear, operand);
    for (i = 0; i < 2 && s == GMM_OK; i++) s = gmm__mlp_add_quantization(p, &operand[i], i, workspace, q);
    return s;
}

/* Checks step i of a product: quantization i, or the linear operation behind the last one. */
static gmm_status gmm__mlp_prepare_product(const gmm__mlp_product *p, const gmm__mlp_quantized *q, int i, int query,
                                           gmm__call *call) {
    return i < q->count ? gmm__quantize_prepare(call, p->ctx, GMM_OP_QUANTIZE, p->function, &q->quantization[i], query)
                        : gmm__linear_prepare(call, p->ctx, p->op, p->function, &q->linear, query);
}

/* Raises *bytes to the workspace of a product: the quantized operands, and behind them the workspace of its steps,
   which they use one after the other. */
static gmm_status gmm__mlp_measure_product(const gmm__mlp_product *p, size_t *bytes) {
    gmm__mlp_quantized q;
    size_t step_bytes = 0; /* the largest workspace of a step */
    int i;
    gmm_status s = gmm__mlp_quantized_of(p, NULL, &q);
    for (i = 0; s == GMM_OK && i <= q.count; i++) {
        gmm__call call;
        gmm__plan plan;
        s = gmm__mlp_prepare_product(p, &q, i, 1, &call);
        if (s == GMM_OK) s = gmm__select(&call, &plan);
        if (s == GMM_OK && plan.workspace_bytes > step_bytes) step_bytes = plan.workspace_bytes;
    }
    if (s == GMM_OK && q.bytes + step_bytes > *bytes) *bytes = q.bytes + step_bytes;
    return s;
}

/* Enqueues the quantizations and the product. */
static gmm_status gmm__mlp_run_product(const gmm__mlp_product *p, void *workspace, size_t bytes, gmm_stream stream) {
    gmm__mlp_quantized q;
    int i;
    gmm_status s = gmm__mlp_quantized_of(p, workspace, &q);
    for (i = 0; s == GMM_OK && i <= q.count; i++) {
        gmm__call call;
        s = gmm__mlp_prepare_product(p, &q, i, 0, &call);
        if (s == GMM_OK) s = gmm__serve(&call, NULL, (char *)workspace + q.bytes, bytes - q.bytes, stream);
    }
    return s;
}

static gmm__mlp_quantization gmm__mlp_quantization_of(const gmm__call *call) {
    gmm__mlp_quantization q;
    q.recipe = call->recipe;
    q.quant = call->quant;
    return q;
}
/* The product that a linear step of this call computes. */
static gmm__mlp_product gmm__mlp_product_of(const gmm__call *call, const gmm__mlp_quantization *quantization, gmm_op op,
                                            int layer, const gmm_linear *l) {
    gmm__mlp_product p;
    p.ctx = call->ctx;
    p.function = call->function;
    p.quantization = quantization;
    p.op = op;
    p.layer = layer;
    p.linear = l;
    return p;
}
/* Raises *bytes to the workspace of one product, quantized if the call has a recipe. Returns 0 if it is declined. */
static int gmm__mlp_size_product(const gmm__plan *plan, gmm_op op, int layer, const gmm_linear *l, size_t *bytes,
                                 gmm__plan *out) {
    const gmm__call *call = plan->call;
    const gmm__mlp_quantization quantization = gmm__mlp_quantization_of(call);
    const gmm__mlp_product product = gmm__mlp_product_of(call, &quantization, op, layer, l);
    const gmm_error last_error = call->ctx->error;
    if (quantization.recipe.kind == GMM_RECIPE_NONE) return gmm__mlp_size_linear(plan, op, l, bytes, out);
    if (gmm__mlp_measure_product(&product, bytes) == GMM_OK) return 1;
    (void)gmm__decline(out, "%.180s", call->ctx->error.text);
    call->ctx->error = last_error;
    return 0;
}

/* --- a gradient that dgrad and wgrad of one layer read: one pass casts it in both directions --- */

/* Whether a backward casts the output gradient of a layer (dy of FC2, dz of FC1) once for both products. It does not
   where only one of them runs in this call, and where the copies differ in their format: the columnwise one has no
   amaxes per row. */
static int gmm__mlp_casts_once(const gmm__call *call, int layer) {
    const gmm_mlp *d = &call->d.mlp;
    const gmm__mlp_gradients need = gmm__mlp_gradients_of(call);
    if (call->recipe.kind == GMM_RECIPE_NONE || call->recipe.grad.dtype == GMM_NONE || call->recipe.grad.row_amax)
        return 0;
    return !need.defer && (layer == 2 ? need.dh && d->dw2 : d->dx && d->dw1);
}

/* Describes both copies of the gradient that `dgrad`, a step of the layer, reads, and the quantization that makes them.
   They begin at `memory`, of which c->bytes are used. Without memory their addresses are NULL, as in queries. `c` holds
   what the descriptors point to, and must not be copied. */
static gmm_status gmm__mlp_copies_of(const gmm__call *call, int layer, const gmm_linear *dgrad, void *memory,
                                     gmm__mlp_copies *c) {
    const int32_t slot = layer == 2 ? GMM_SLOT_DY : GMM_SLOT_DZ;
    const gmm_groups *groups = dgrad->groups;
    gmm_mat *const copies[2] = { &c->rowwise, &c->columnwise };
    gmm_quantization *q = &c->quantization;
    gmm_error error = GMM_ZERO;
    int i;
    memset(c, 0, sizeof *c);
    c->format = call->recipe.grad;
    c->format.struct_size = 0;
    for (i = 0; i < 2; i++) {
        const gmm_direction direction = i ? GMM_COLUMNWISE : GMM_ROWWISE;
        gmm_layout layout;
        const gmm_status s = gmm_layout_of_groups(c->format.dtype, c->format.scaling, c->format.order, direction,
                                                  groups->count, groups->capacity, dgrad->out_features, &layout,
                                                  &error);
        if (s != GMM_OK) return gmm__fail(&call->ctx->error, s, "%s: %.400s", call->function, error.text);
        *copies[i] = gmm_mat_quantized(&c->format, direction, NULL, NULL, NULL);
        copies[i]->data = gmm__mlp_reserve(memory, &c->bytes, layout.data_bytes);
        copies[i]->scale = gmm__mlp_reserve(memory, &c->bytes, layout.scale_bytes);
        if (c->format.delayed) copies[i]->amax = call->quant.amax ? call->quant.amax + slot * groups->count : NULL;
        else copies[i]->amax = (float *)gmm__mlp_reserve(memory, &c->bytes, 4 * (int64_t)groups->count);
    }
    q->cols = dgrad->out_features;
    q->groups = groups;
    q->options = dgrad->options;
    q->format = &c->format;
    q->src = dgrad->dy;
    q->rowwise = &c->rowwise;
    q->columnwise = &c->columnwise;
    q->scale = c->format.delayed && call->quant.scale ? call->quant.scale + slot * groups->count : NULL;
    if (c->format.stochastic && call->quant.random) q->random = call->quant.random + (slot == GMM_SLOT_DZ ? 2 : 0);
    c->operand = c->rowwise;
    c->operand.columnwise = &c->columnwise;
    return GMM_OK;
}

/* Makes the dgrad and wgrad steps of a layer whose gradient is cast once read the copies at `memory`, and checks the
   quantization that writes these. */
static gmm_status gmm__mlp_share_copies(const gmm__call *call, int layer, gmm__mlp_steps *steps, void *memory,
                                        int query, gmm__call *quantize) {
    gmm_linear *dgrad = layer == 2 ? &steps->dgrad2 : &steps->dgrad1;
    gmm_linear *wgrad = layer == 2 ? &steps->wgrad2 : &steps->wgrad1;
    gmm__mlp_copies *c = &steps->copies[layer - 1];
    const gmm_status s = gmm__mlp_copies_of(call, layer, dgrad, memory, c);
    dgrad->dy = wgrad->dy = &c->operand;
    return s != GMM_OK ? s : gmm__quantize_prepare(quantize, call->ctx, GMM_OP_QUANTIZE, call->function,
                                                   &c->quantization, query);
}
/* Raises *bytes to what the copies of a layer's gradient take, and *step_bytes to the workspace of their quantization.
   Returns 0 if that is declined. */
static int gmm__mlp_size_copies(gmm__plan *plan, int layer, gmm__mlp_steps *steps, size_t *bytes, size_t *step_bytes) {
    const gmm__call *call = plan->call;
    const gmm_error last_error = call->ctx->error;
    gmm__call step;
    gmm_status s;
    if (!gmm__mlp_casts_once(call, layer)) return 1;
    s = gmm__mlp_share_copies(call, layer, steps, NULL, 1, &step);
    if (!gmm__mlp_measure_step(&step, s, &last_error, step_bytes, plan)) return 0;
    if (steps->copies[layer - 1].bytes > *bytes) *bytes = steps->copies[layer - 1].bytes;
    return 1;
}

/* Raises *bytes to the workspace of an activation step. Returns 0 if it is declined. */
static int gmm__mlp_size_act(const gmm__plan *plan, gmm_op op, const gmm_activation *a, size_t *bytes, gmm__plan *out) {
    gmm__call step;
    const gmm_error last_error = plan->call->ctx->error;
    const gmm_status s = gmm__act_prepare(&step, plan->call->ctx, op, plan->call->function, a, 1);
    return gmm__mlp_measure_step(&step, s, &last_error, bytes, out);
}

