/* What an MLP call is composed of. FC1 computes z from x, the activation h from z, and FC2 y from h; backward computes
   dh from dy, dz from dh, and dx from dz. Each of these operations, and each cast of an operand, is a step. */

/* Memory in which the steps of a call allocate and free blocks. `memory` NULL, as in plans: blocks have offsets alone,
   and only `peak` is of use. A plan and its launch allocate and free the same blocks in the same order, so that both
   have the same offsets. */
enum { GMM__ARENA_BLOCKS = 32 }; /* more than are in use at once */
typedef struct gmm__arena {
    char *memory;
    size_t peak; /* bytes: the largest end of a block so far */
    int32_t count;
    struct { size_t at, bytes; int32_t owner; } block[GMM__ARENA_BLOCKS]; /* in use, by their offset `at` */
} gmm__arena;

/* Owners of blocks, by which they are freed: a copy of an operand, a dequantized operand, a matrix. */
enum gmm__mlp_owner {
    GMM__MLP_COPY,                                     /* + 2 slot + direction */
    GMM__MLP_DEQUANTIZED = GMM__MLP_COPY + 2 * GMM_SLOTS, /* + slot */
    GMM__MLP_SPLIT = GMM__MLP_DEQUANTIZED + GMM_SLOTS,
    GMM__MLP_Z, GMM__MLP_H, GMM__MLP_DH, GMM__MLP_DZ, GMM__MLP_AMAX, GMM__MLP_SUMS, GMM__MLP_ARRAYS = GMM__MLP_SUMS + 2
};

/* The offset behind the last block in use. */
static size_t gmm__arena_end(const gmm__arena *arena) {
    return arena->count ? arena->block[arena->count - 1].at + arena->block[arena->count - 1].bytes : 0;
}
/* Allocates a block in the first gap that is large enough, or behind all blocks. */
static void *gmm__arena_alloc(gmm__arena *arena, int32_t owner, int64_t bytes) {
    const size_t size = gmm__round256((size_t)bytes);
    size_t at = 0;
    int32_t i, j;
    for (i = 0; i < arena->count && arena->block[i].at - at < size; i++)
        at = arena->block[i].at + arena->block[i].bytes;
    if (size) {
        for (j = arena->count++; j > i; j--) arena->block[j] = arena->block[j - 1];
        arena->block[i].at = at;
        arena->block[i].bytes = size;
        arena->block[i].owner = owner;
        if (at + size > arena->peak) arena->peak = at + size;
    }
    return arena->memory ? arena->memory + at : NULL;
}
/* A packed matrix of `rows` x `cols` in an arena. */
static gmm_mat gmm__arena_matrix(gmm__arena *arena, int32_t owner, gmm_dtype dtype, int64_t rows, int64_t cols) {
    return gmm_mat_packed(dtype, gmm__arena_alloc(arena, owner, rows * cols * (gmm_dtype_bits(dtype) / 8)));
}
/* Frees all blocks of an owner. */
static void gmm__arena_free(gmm__arena *arena, int32_t owner) {
    int32_t i, kept = 0;
    for (i = 0; i < arena->count; i++)
        if (arena->block[i].owner != owner) arena->block[kept++] = arena->block[i];
    arena->count = kept;
}

/* An operand of the products, and its copies in the formats of the recipe. */
typedef struct gmm__mlp_operand {
    const gmm_mat *source;  /* as the caller or an earlier step has it */
    const int32_t *index;   /* of gathered rows of the source; NULL: they are not gathered */
    int64_t rows, cols;     /* of each matrix; rows 0: a token matrix, which has the rows of the groups */
    gmm_format format[2];   /* of the copies by direction; dtype NONE: the recipe leaves the operand as it is */
    gmm_mat copy[2];        /* by direction; dtype NONE: absent */
    gmm_mat quantized;      /* what products read: a copy, with the columnwise one as its `columnwise` */
    gmm_mat dequantized;    /* the values of the rowwise copy */
} gmm__mlp_operand;

/* A step. Its workspace begins at `workspace`, behind all blocks in use. */
typedef struct gmm__mlp_step {
    gmm_op op;
    const void *descriptor; /* gmm_linear, gmm_activation, gmm_quantization or gmm_dequantization */
    gmm__fusion fused;      /* gmm__call.fused */
    size_t workspace;
    int32_t completes;      /* 1: the gradient of `param` is complete behind this step */
    gmm_param param;
    int32_t need_slot;      /* of the weight for which hooks.need is called before this step; 0 = of none */
    gmm_op need_op;         /* the product that reads it */
} gmm__mlp_step;

enum { GMM__MLP_CASTS = 12, GMM__MLP_DEQUANTIZATIONS = 5, GMM__MLP_STEPS = 32 }; /* more than any call has */

/* The steps of a call in their order, the same for its plan and its launch, and what they read and write. Descriptors
   point into this structure, which must therefore not be copied. */
typedef struct gmm__mlp_steps {
    const gmm__call *call;
    gmm_status status;  /* the first error of building the steps; the context has its message */
    gmm_dtype dtype;    /* of operands that are not quantized, and of intermediate matrices */
    gmm__arena workspace, deferred; /* deferred: gmm_mlp.deferred */
    gmm_groups groups;  /* the split as int64 offsets, computed once */
    gmm_options options;
    void *offsets;      /* those of groups.splits */
    int32_t *tiles;     /* gmm__call.split_tiles of the steps */
    gmm__mlp_operand operand[GMM_SLOTS];
    int64_t index_rows; /* of operands with an index */
    int32_t index_div;
    gmm_mat weight[2];  /* w1 and w2; their addresses become known behind hooks.need if there is one */
    int32_t need_slot;  /* of the next step */
    gmm_op need_op;
    int fuses_act;      /* FC1's product of forward computes the activation, FC2's dgrad of backward its gradient */
    gmm_mat z, h, dh, dz;
    gmm_mat gates;      /* the gate columns of z as a matrix, from which the cast of h computes it */
    int amax_slots;     /* 1 << slot of h or dz from the activation that takes its amaxes to the cast that reads them */
    float *amax;        /* [G]: these amaxes */
    gmm_mat scaled[2];  /* the copies that this cast writes, by direction, with `amax` as their amaxes */
    gmm__column_sums sums[2]; /* of the casts of dz and dy, for the bias gradients of FC1 and FC2 */
    gmm_mat z_e4m3;     /* the pre-activation as GMM_SAVE_PREACT_E4M3 keeps it */
    gmm_format z_format;
    gmm_linear fc1, fc2, dgrad2, bgrad2, wgrad2, bgrad1, wgrad1, dgrad1;
    gmm_activation act, act_again; /* act_again: of a backward whose cast computes h */
    gmm_quantization cast[GMM__MLP_CASTS];
    gmm_dequantization dequantization[GMM__MLP_DEQUANTIZATIONS];
    gmm__mlp_step step[GMM__MLP_STEPS];
    int casts, dequantizations, count;
} gmm__mlp_steps;

/* --- what forward saves --- */

/* The formats of unscaled E4M3: the delayed format without scales multiplies by 1. */
static gmm_format gmm__mlp_unscaled_e4m3(void) {
    gmm_format f = GMM_ZERO;
    f.dtype = GMM_E4M3;
    f.scaling = GMM_SCALING_TENSOR;
    f.delayed = 1;
    return f;
}
/* The format that the recipe gives an operand's copy. Only rowwise copies have amaxes per row. */
static gmm_format gmm__mlp_format_of(const gmm_recipe *r, int slot, gmm_direction direction) {
    gmm_format f = slot == GMM_SLOT_X || slot == GMM_SLOT_H ? r->input
                   : slot == GMM_SLOT_W1 || slot == GMM_SLOT_W2 ? r->weight : r->grad;
    f.struct_size = 0;
    if (direction == GMM_COLUMNWISE) f.row_amax = 0;
    return f;
}
/* The direction of the copies of x and h that backward reads, which are those that forward can save. */
static gmm_direction gmm__mlp_backward_direction(const gmm__call *call) {
    return call->quant.backward_override == GMM_BACKWARD_DEQUANTIZED ? GMM_ROWWISE : GMM_COLUMNWISE;
}
/* Whether backward reads copies of x and h. */
static int gmm__mlp_backward_reads_copies(const gmm__call *call) {
    return call->recipe.kind != GMM_RECIPE_NONE && call->recipe.input.dtype != GMM_NONE &&
           call->quant.backward_override != GMM_BACKWARD_HIGH_PRECISION;
}

/* Storage of a copy, for all groups. rows 0: a token matrix. */
static gmm_status gmm__mlp_layout(const gmm__call *call, const gmm_format *f, gmm_direction direction, int64_t rows,
                                  int64_t cols, gmm_layout *layout) {
    const int64_t G = call->groups.count;
    gmm_error error = GMM_ZERO;
    const gmm_status s = rows ? gmm_layout_of(f->dtype, f->scaling, f->order, direction, rows, cols, layout, &error)
                              : gmm_layout_of_groups(f->dtype, f->scaling, f->order, direction, call->groups.count,
                                                     call->groups.capacity, cols, layout, &error);
    if (s != GMM_OK) return gmm__fail(&call->ctx->error, s, "%s: %.400s", call->function, error.text);
    if (rows) {
        layout->data_bytes *= G;
        layout->scale_bytes *= G;
    }
    return GMM_OK;
}

/* gmm_mlp.saved: its layout, and where each matrix with its scales begins. */
enum { GMM__SAVED_PREACT, GMM__SAVED_X, GMM__SAVED_ACT, GMM__SAVED_MATRICES };
typedef struct gmm__mlp_saved {
    gmm_saved_layout layout;
    size_t at[GMM__SAVED_MATRICES];
} gmm__mlp_saved;

/* Describes a part of a saved layout that has `*bytes` bytes so far, and returns its offset. */
static int64_t gmm__save_part(gmm_saved_part *p, int64_t *bytes, const char *name, gmm_dtype dtype, int64_t rows,
                              int64_t cols) {
    const int64_t bits = gmm_dtype_bits(dtype); /* times elements they may not fit 64 bits, where the bytes do */
    p->name = name;
    p->dtype = dtype;
    p->rows = rows;
    p->cols = p->ld = cols;
    p->offset = *bytes;
    p->bytes = bits < 8 ? rows * cols / 2 : rows * cols * (bits / 8);
    *bytes += (int64_t)gmm__round256((size_t)p->bytes);
    return p->offset;
}
/* Writes a saved layout, of which `bytes` are this version's, for a caller that may have an older version. */
static gmm_status gmm__write_layout(gmm__call *call, void *layout, void *full, size_t bytes) {
    uint32_t size; /* struct_size is the first field of every layout */
    gmm_status s;
    char rule[96];
    if (!layout) return gmm__refuse_that(call, GMM_E_NULL, "layout", "is NULL");
    memcpy(&size, layout, sizeof size);
    if ((s = gmm__check_size(size, bytes, rule)) != GMM_OK) return gmm__refuse(call, s, "layout", "%s", rule);
    memcpy(full, &size, sizeof size);
    memcpy(layout, full, size ? size : bytes);
    return GMM_OK;
}
static void gmm__mlp_save_part(gmm_saved_layout *l, const char *name, gmm_dtype dtype, int64_t rows, int64_t cols) {
    (void)gmm__save_part(&l->part[l->count++], &l->bytes, name, dtype, rows, cols);
}
/* Adds a copy of a token matrix of `cols` columns, its scales, and its amaxes where the format has them. */
static void gmm__mlp_save_copy(const gmm__call *call, gmm__mlp_saved *saved, int matrix, const gmm_format *f,
                               gmm_direction direction, int64_t cols) {
    static const char *const names[GMM__SAVED_MATRICES][3] = { { "preact", "preact_scale", "" },
                                                               { "x", "x_scale", "x_amax" },
                                                               { "act", "act_scale", "act_amax" } };
    gmm_saved_layout *l = &saved->layout;
    gmm_layout layout;
    saved->at[matrix] = (size_t)l->bytes;
    if (gmm__mlp_layout(call, f, direction, 0, cols, &layout) != GMM_OK) return; /* the cast gives the message */
    gmm__mlp_save_part(l, names[matrix][0], f->dtype, layout.data_rows, layout.data_cols);
    gmm__mlp_save_part(l, names[matrix][1], layout.scale_dtype, 1,
                       layout.scale_bytes * 8 / gmm_dtype_bits(layout.scale_dtype));
    if (f->scaling == GMM_SCALING_NV16)
        gmm__mlp_save_part(l, names[matrix][2], GMM_F32, 1, f->row_amax ? call->rows : call->groups.count);
}
static gmm__mlp_saved gmm__mlp_saved_of(const gmm__call *call) {
    const gmm_mlp_config *c = &call->config;
    const int64_t F1 = gmm__mlp_fc1_cols(call);
    const gmm_direction direction = gmm__mlp_backward_direction(call);
    const gmm_format input = gmm__mlp_format_of(&call->recipe, GMM_SLOT_X, direction);
    const gmm_format e4m3 = gmm__mlp_unscaled_e4m3();
    gmm__mlp_saved s;
    memset(&s, 0, sizeof s);
    if (c->save == GMM_SAVE_NOTHING) return s;
    if (gmm__saves_e4m3(&call->config)) gmm__mlp_save_copy(call, &s, GMM__SAVED_PREACT, &e4m3, GMM_ROWWISE, F1);
    else gmm__mlp_save_part(&s.layout, "preact", gmm__mlp_dtype(call), call->rows, F1);
    if (gmm__saves_copies(&call->config)) {
        gmm__mlp_save_copy(call, &s, GMM__SAVED_X, &input, direction, c->hidden);
        gmm__mlp_save_copy(call, &s, GMM__SAVED_ACT, &input, direction, c->ffn);
    } else if (c->save == GMM_SAVE_PREACT_AND_ACT) {
        s.at[GMM__SAVED_ACT] = (size_t)s.layout.bytes;
        gmm__mlp_save_part(&s.layout, "act", gmm__mlp_dtype(call), call->rows, c->ffn);
    }
    return s;
}

/* --- descriptors --- */

/* What the backward of a call computes, and which matrices it reads in the dtype of x. */
typedef struct gmm__mlp_wants {
    int defer;   /* it queues the weight gradients */
    int dz, dh;  /* computes them */
    int h;       /* reads h, of which no copy is saved */
    int h_saved; /* reads h where forward has saved it; else, with `h`, backward computes it again */
    int z;       /* reads z, or what z is computed from again */
} gmm__mlp_wants;
static gmm__mlp_wants gmm__mlp_wants_of(const gmm__call *call) {
    const gmm_mlp *d = &call->d.mlp;
    gmm__mlp_wants w;
    w.defer = (gmm__delays(&call->config) || call->op == GMM_OP_MLP_WGRAD) && (d->dw1 || d->dw2);
    w.dz = d->dx || d->dw1 || d->db1;
    w.dh = w.dz || d->dprob;
    w.h = d->dw2 && !gmm__saves_copies(&call->config);
    /* a queued weight gradient reads h after `saved` may have been overwritten */
    w.h_saved = w.h && call->config.save == GMM_SAVE_PREACT_AND_ACT &&
                (!w.defer || gmm__mlp_backward_reads_copies(call));
    w.z = w.dh || (w.h && !w.h_saved);
    return w;
}

static gmm_linear gmm__mlp_linear(const gmm__mlp_steps *steps, int64_t in, int64_t out) {
    gmm_linear l = GMM_ZERO;
    l.groups = &steps->groups;
    l.options = &steps->options;
    l.in_features = in;
    l.out_features = out;
    return l;
}

/* The index of an operand's rows for a step that reads `mat`: its source, rather than a copy, whose rows are not
   gathered. NULL: the step does not read the operand. */
static const int32_t *gmm__mlp_index_of(const gmm__mlp_steps *steps, int slot, const gmm_mat *mat) {
    const gmm__mlp_operand *o = &steps->operand[slot];
    return mat && mat == o->source ? o->index : NULL;
}
/* Gives a product of x and dy, of which it may have one alone, the indices of their gathered rows. */
static void gmm__mlp_set_indices(const gmm__mlp_steps *steps, gmm_linear *l, int x, int dy) {
    l->x_index = gmm__mlp_index_of(steps, x, l->x);
    l->dy_index = gmm__mlp_index_of(steps, dy, l->dy);
    l->index_rows = steps->index_rows;
    l->index_div = steps->index_div;
}

/* Begins the steps of a call. `offsets` and `tiles` hold its split. */
static void gmm__mlp_begin(gmm__mlp_steps *steps, const gmm__call *call, gmm_dtype dtype, void *offsets, void *tiles) {
    steps->call = call;
    steps->status = GMM_OK;
    steps->dtype = dtype;
    steps->options = call->options;
    steps->offsets = offsets;
    steps->tiles = (int32_t *)tiles;
    steps->groups = call->groups;
    steps->groups.splits = offsets;
    steps->groups.dtype = GMM_I64;
    steps->groups.form = GMM_SPLIT_OFFSETS;
    steps->groups.on_host = 0;
}

/* Fills in an operand without copies, or with those that the caller has made. */
static void gmm__mlp_fill_operand(gmm__mlp_steps *steps, int slot, const gmm_mat *source, int64_t rows, int64_t cols) {
    gmm__mlp_operand *o = &steps->operand[slot];
    int direction;
    o->source = source;
    o->rows = rows;
    o->cols = cols;
    for (direction = 0; direction < 2; direction++)
        o->format[direction] = gmm__mlp_format_of(&steps->call->recipe, slot, (gmm_direction)direction);
    if (source->scaling == GMM_SCALING_NONE) return;
    o->copy[GMM_ROWWISE] = *source;
    if (source->columnwise)
        (void)gmm__copy_sized(&o->copy[GMM_COLUMNWISE], sizeof o->copy[GMM_COLUMNWISE], source->columnwise);
}

/* Makes the addresses of a weight unknown: it becomes a table in host memory without entries, which in a plan takes
   the workspace that any addresses may take. */
static void gmm__mlp_forget_addresses(gmm_mat *m) {
    static void *const no_entries[1] = { NULL };
    m->data = m->scale = NULL;
    m->table = no_entries;
    m->scale_table = m->scaling == GMM_SCALING_NONE ? NULL : no_entries;
    m->group_stride = 0;
    m->flags |= (uint32_t)GMM_MAT_TABLE_ON_HOST;
}
/* Fills in a weight. */
static void gmm__mlp_fill_weight(gmm__mlp_steps *steps, int slot) {
    const gmm__call *call = steps->call;
    const int role = slot == GMM_SLOT_W1 ? GMM__W : GMM__W2, directions = gmm__mlp_weight_directions(call, role);
    const gmm__extents extents = gmm__mlp_weight_extents(call, role);
    gmm_mat *weight = &steps->weight[slot == GMM_SLOT_W2];
    int direction;
    *weight = call->mat[role];
    gmm__mlp_fill_operand(steps, slot, weight, extents.rows, extents.cols);
    if (!gmm__mlp_has_need_hook(call) || !directions) return;
    if (weight->scaling == GMM_SCALING_NONE) gmm__mlp_forget_addresses(weight);
    else
        for (direction = 0; direction < 2; direction++)
            if (directions >> direction & 1) gmm__mlp_forget_addresses(&steps->operand[slot].copy[direction]);
}

/* Fills in the descriptors and operands of forward and backward. The addresses of z, h, dh and dz are set later. */
static void gmm__mlp_fill(gmm__mlp_steps *steps) {
    const gmm__call *call = steps->call;
    const gmm_mlp *d = &call->d.mlp;
    const gmm_mlp_config *c = &call->config;
    const int64_t F1 = gmm__mlp_fc1_cols(call);

    steps->z = gmm_mat_packed(steps->dtype, NULL);
    steps->h = steps->dh = steps->dz = steps->z;
    gmm__mlp_fill_operand(steps, GMM_SLOT_X, &call->mat[GMM__X_], 0, c->hidden);
    gmm__mlp_fill_weight(steps, GMM_SLOT_W1);
    gmm__mlp_fill_operand(steps, GMM_SLOT_H, &steps->h, 0, c->ffn);
    gmm__mlp_fill_weight(steps, GMM_SLOT_W2);
    gmm__mlp_fill_operand(steps, GMM_SLOT_DY, &call->mat[GMM__DY], 0, call->out);
    gmm__mlp_fill_operand(steps, GMM_SLOT_DZ, &steps->dz, 0, F1);
    steps->operand[GMM_SLOT_X].index = d->x_index;
    steps->operand[GMM_SLOT_DY].index = d->dy_index;
    steps->index_rows = d->index_rows;
    steps->index_div = d->index_div;

    steps->fc1 = gmm__mlp_linear(steps, c->hidden, F1);
    steps->fc1.bias = c->bias1 ? &call->mat[GMM__BIAS] : NULL;
    steps->fc1.y = &steps->z;

    steps->act.groups = &steps->groups;
    steps->act.options = &steps->options;
    steps->act.ffn = c->ffn;
    steps->act.act = &call->act;
    steps->act.x = &steps->z;
    steps->act.prob = d->prob;

    steps->fc2 = gmm__mlp_linear(steps, c->ffn, call->out);
    steps->fc2.bias = c->bias2 ? &call->mat[GMM__BIAS2] : NULL;
    steps->fc2.bias_scale = c->prob_on_bias2 ? d->prob : NULL;
    steps->fc2.y = &call->mat[GMM__Y];

    steps->dgrad2 = gmm__mlp_linear(steps, c->ffn, call->out);
    steps->dgrad2.dx = &steps->dh;

    steps->bgrad2 = gmm__mlp_linear(steps, c->ffn, call->out);
    steps->bgrad2.dy = &call->mat[GMM__DY];
    steps->bgrad2.bias_scale = c->prob_on_bias2 ? d->prob : NULL;
    steps->bgrad2.db = d->db2 ? &call->grad[GMM__DB2] : NULL;
    if (c->prob_on_bias2 && d->dprob) {
        steps->bgrad2.bias = &call->mat[GMM__BIAS2];
        steps->bgrad2.d_bias_scale = d->dprob;
        steps->bgrad2.d_bias_scale_add = 1;
    }

    steps->wgrad2 = gmm__mlp_linear(steps, c->ffn, call->out);
    steps->wgrad2.dw = &call->grad[GMM__DW2];

    steps->bgrad1 = gmm__mlp_linear(steps, c->hidden, F1);
    steps->bgrad1.dy = &steps->dz;
    steps->bgrad1.db = &call->grad[GMM__DB];

    steps->wgrad1 = gmm__mlp_linear(steps, c->hidden, F1);
    steps->wgrad1.dw = &call->grad[GMM__DW];

    steps->dgrad1 = gmm__mlp_linear(steps, c->hidden, F1);
    steps->dgrad1.dx = &call->mat[GMM__DX];

    gmm__mlp_set_indices(steps, &steps->bgrad2, GMM_SLOT_H, GMM_SLOT_DY);
}

/* --- the list of steps --- */

static void gmm__mlp_add_step(gmm__mlp_steps *steps, gmm_op op, const void *descriptor) {
    gmm__mlp_step *step = &steps->step[steps->count++];
    step->op = op;
    step->descriptor = descriptor;
    step->workspace = gmm__arena_end(&steps->workspace);
    step->need_slot = steps->need_slot;
    step->need_op = steps->need_op;
    steps->need_slot = 0;
}
/* Marks the next step as the first one that reads a weight for a product, unless the product reads a copy that was
   cast before. */
static void gmm__mlp_need_weight(gmm__mlp_steps *steps, int slot, gmm_op op) {
    const gmm__call *call = steps->call;
    const gmm__mlp_operand *o = &steps->operand[slot];
    const int dgrad = op == GMM_OP_LINEAR_DGRAD, direction = dgrad ? (int)gmm__mlp_dgrad_direction(call) : GMM_ROWWISE;
    const int casts = o->format[0].dtype != GMM_NONE && o->source->scaling == GMM_SCALING_NONE &&
                      !(dgrad && call->quant.backward_override == GMM_BACKWARD_HIGH_PRECISION);
    if (call->op != GMM_OP_MLP_FWD && casts && o->copy[direction].dtype != GMM_NONE) return;
    steps->need_slot = slot;
    steps->need_op = op;
}
/* Adds a step behind which the gradient of a parameter is complete. */
static void gmm__mlp_add_gradient(gmm__mlp_steps *steps, gmm_op op, const gmm_linear *linear, gmm_param param) {
    gmm__mlp_add_step(steps, op, linear);
    steps->step[steps->count - 1].completes = 1;
    steps->step[steps->count - 1].param = param;
}

/* Plans a step; `prepared` is the status of its checks. If it is refused, declines `plan` with the reason and restores
   the context's error, since another engine may serve the call. */
static int gmm__plan_step(gmm__call *step, gmm_status prepared, const gmm_error *last_error, gmm__plan *step_plan,
                          gmm__plan *plan) {
    if (prepared == GMM_OK && gmm__select(step, step_plan) == GMM_OK) return 1;
    (void)gmm__decline(plan, "%.180s", step->ctx->error.text);
    step->ctx->error = *last_error;
    return 0;
}

/* Raises *bytes to the workspace of one step, and notes in `plan` which engine serves it. Returns 0 if none does.
   `prepared` and last_error as in gmm__plan_step. */
static int gmm__mlp_measure_step(gmm__call *step, gmm_status prepared, const gmm_error *last_error, size_t *bytes,
                                 gmm__plan *plan) {
    gmm__plan step_plan;
    if (!gmm__plan_step(step, prepared, last_error, &step_plan, plan)) return 0;
    if (step_plan.workspace_bytes > *bytes) *bytes = step_plan.workspace_bytes;
    if (step->describes) gmm__describe_plan(step->describes, &step_plan);
    if (step_plan.engine != plan->engine)
        (void)snprintf(plan->note, sizeof plan->note, "products by %s%s", gmm_engine_name(step_plan.engine),
                       step_plan.assumes_aligned ? ", for addresses at multiples of 16 bytes" : "");
#ifdef __CUDACC__
    else if (step->options.engine == GMM_ENGINE_AUTO && step->ctx->wgmma_unavailable)
        (void)snprintf(plan->note, sizeof plan->note, "products by %s; wgmma %s", gmm_engine_name(step_plan.engine),
                       step->ctx->wgmma_unavailable);
#endif
    return 1;
}

