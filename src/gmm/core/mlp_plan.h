/* Which matrices and operations an MLP call is composed of. FC1 computes z from x, the activation h from z, and FC2 y
   from h; backward computes dh from dy, dz from dh, and dx from dz. A step is one of these operations.

   Regions of the workspace: the intermediate matrices, and the workspace that all steps share. */
enum {
    GMM__PART_MLP_OFFSETS, GMM__PART_MLP_Z, GMM__PART_MLP_H, GMM__PART_MLP_DH, GMM__PART_MLP_DZ,
    GMM__PART_MLP_COPIES, /* of dy, then of dz */
    GMM__PART_MLP_STEP
};

/* Sizes in bytes of an MLP's intermediate matrices, and their places in the buffers of the caller. */
typedef struct gmm__mlp_buffers {
    size_t z_bytes, h_bytes, offsets_bytes;  /* of each matrix, rounded up */
    size_t saved_h;                          /* offset in gmm_mlp.saved */
    size_t deferred_dz, deferred_h;          /* offsets in gmm_mlp.deferred */
    size_t deferred_arrays, arrays_bytes;    /* offset of dw2's arrays by group, then dw1's; bytes of each */
    size_t saved_bytes;
} gmm__mlp_buffers;

/* The layout of gmm_mlp.saved. */
static gmm_saved_layout gmm__mlp_saved(const gmm__call *call) {
    const gmm_mlp_config *c = &call->config;
    const struct { const char *name; int64_t cols; int saved; } parts[] = {
        { "preact", gmm__mlp_fc1_cols(call), c->save != GMM_SAVE_NOTHING },
        { "act", c->ffn, c->save == GMM_SAVE_PREACT_AND_ACT }
    };
    gmm_saved_layout l;
    size_t i;
    memset(&l, 0, sizeof l);
    for (i = 0; i < sizeof parts / sizeof parts[0]; i++) {
        gmm_saved_part *p = &l.part[l.count];
        if (!parts[i].saved) continue;
        p->name = parts[i].name;
        p->dtype = gmm__mlp_dtype(call);
        p->rows = call->rows;
        p->cols = p->ld = parts[i].cols;
        p->offset = l.bytes;
        p->bytes = p->rows * p->ld * (gmm_dtype_bits(p->dtype) / 8);
        l.bytes += (int64_t)gmm__round256((size_t)p->bytes);
        l.count++;
    }
    return l;
}

static gmm__mlp_buffers gmm__mlp_measure(const gmm__call *call) {
    const size_t row = (size_t)call->rows * (size_t)(gmm_dtype_bits(gmm__mlp_dtype(call)) / 8);
    const gmm_saved_layout saved = gmm__mlp_saved(call);
    gmm__mlp_buffers b;
    b.z_bytes = gmm__round256(row * (size_t)gmm__mlp_fc1_cols(call));
    b.h_bytes = gmm__round256(row * (size_t)call->config.ffn);
    b.offsets_bytes = gmm__round256(((size_t)call->groups.count + 1) * sizeof(int64_t));
    b.saved_h = (size_t)saved.part[1].offset;
    b.saved_bytes = (size_t)saved.bytes;
    b.deferred_dz = b.offsets_bytes;
    b.deferred_h = b.deferred_dz + b.z_bytes;
    b.deferred_arrays = b.deferred_h + b.h_bytes;
    b.arrays_bytes = gmm__round256((size_t)call->groups.count * (sizeof(void *) + sizeof(float) + 1));
    return b;
}

/* The intermediate matrices that the backward of a call computes or reads. `defer`: it queues the weight gradients. */
typedef struct gmm__mlp_gradients { int dz, dh, h, z, defer; } gmm__mlp_gradients;
static gmm__mlp_gradients gmm__mlp_gradients_of(const gmm__call *call) {
    const gmm_mlp *d = &call->d.mlp;
    gmm__mlp_gradients n;
    n.defer = gmm__mlp_delayed(call) && (d->dw1 || d->dw2);
    n.dz = d->dx || d->dw1 || d->db1;
    n.dh = n.dz || d->dprob;
    n.h = d->dw2 != NULL;
    n.z = n.dh || (n.h && (n.defer || call->config.save != GMM_SAVE_PREACT_AND_ACT));
    return n;
}

/* An output gradient, dy or dz, quantized in both directions, and the quantization that makes these copies in one pass.
   `operand` is what the products of the layer read. */
typedef struct gmm__mlp_copies {
    gmm_format format;
    gmm_mat rowwise, columnwise, operand;
    gmm_quantization quantization;
    size_t bytes;
} gmm__mlp_copies;

/* Descriptors of the operations that an MLP consists of, the same for its plan and its launch. */
typedef struct gmm__mlp_steps {
    gmm_groups groups; /* the split as int64 offsets, computed once */
    gmm_options options;
    gmm_mat z, h, dh, dz, x, w1, w2, b1, b2, y, dy, dx;
    gmm_linear fc1, fc2, dgrad2, bgrad2, wgrad2, bgrad1, wgrad1, dgrad1;
    gmm_activation act;
    gmm__mlp_copies copies[2]; /* of dz, for FC1's dgrad and wgrad; of dy, for FC2's */
} gmm__mlp_steps;

static gmm_linear gmm__mlp_linear(const gmm__mlp_steps *steps, int64_t in, int64_t out) {
    gmm_linear l = GMM_ZERO;
    l.groups = &steps->groups;
    l.options = &steps->options;
    l.in_features = in;
    l.out_features = out;
    return l;
}

/* Fills in the steps over the given memory, all of which is NULL in a query. */
static void gmm__mlp_fill(gmm__mlp_steps *steps, const gmm__plan *plan, void *offsets, void *z, void *h, void *dh,
                          void *dz) {
    const gmm__call *call = plan->call;
    const gmm_mlp *d = &call->d.mlp;
    const gmm_mlp_config *c = &call->config;
    const gmm_dtype dtype = gmm__mlp_dtype(call);
    const int64_t F1 = gmm__mlp_fc1_cols(call);

    memset(steps, 0, sizeof *steps);
    steps->options = call->options;
    steps->groups = call->groups;
    steps->groups.splits = offsets;
    steps->groups.dtype = GMM_I64;
    steps->groups.form = GMM_SPLIT_OFFSETS;
    steps->groups.on_host = 0;
    steps->z = gmm_mat_packed(dtype, z);
    steps->h = gmm_mat_packed(dtype, h);
    steps->dh = gmm_mat_packed(dtype, dh);
    steps->dz = gmm_mat_packed(dtype, dz);

    steps->fc1 = gmm__mlp_linear(steps, c->hidden, F1);
    steps->fc1.x = &call->mat[GMM__X_];
    steps->fc1.w = &call->mat[GMM__W];
    steps->fc1.bias = c->bias1 ? &call->mat[GMM__BIAS] : NULL;
    steps->fc1.y = &steps->z;

    steps->act.groups = &steps->groups;
    steps->act.options = &steps->options;
    steps->act.ffn = c->ffn;
    steps->act.act = &call->act;
    steps->act.x = &steps->z;
    steps->act.prob = d->prob;

    steps->fc2 = gmm__mlp_linear(steps, c->ffn, call->out);
    steps->fc2.x = &steps->h;
    steps->fc2.w = &call->mat[GMM__W2];
    steps->fc2.bias = c->bias2 ? &call->mat[GMM__BIAS2] : NULL;
    steps->fc2.bias_scale = c->prob_on_bias2 ? d->prob : NULL;
    steps->fc2.y = &call->mat[GMM__Y];

    steps->dgrad2 = gmm__mlp_linear(steps, c->ffn, call->out);
    steps->dgrad2.dy = &call->mat[GMM__DY];
    steps->dgrad2.w = &call->mat[GMM__W2];
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
    steps->wgrad2.x = &steps->h;
    steps->wgrad2.dy = &call->mat[GMM__DY];
    steps->wgrad2.dw = &call->grad[GMM__DW2];

    steps->bgrad1 = gmm__mlp_linear(steps, c->hidden, F1);
    steps->bgrad1.dy = &steps->dz;
    steps->bgrad1.db = &call->grad[GMM__DB];

    steps->wgrad1 = gmm__mlp_linear(steps, c->hidden, F1);
    steps->wgrad1.x = &call->mat[GMM__X_];
    steps->wgrad1.dy = &steps->dz;
    steps->wgrad1.dw = &call->grad[GMM__DW];

    steps->dgrad1 = gmm__mlp_linear(steps, c->hidden, F1);
    steps->dgrad1.dy = &steps->dz;
    steps->dgrad1.w = &call->mat[GMM__W];
    steps->dgrad1.dx = &call->mat[GMM__DX];
}

/* Raises *bytes to the workspace of one step, and notes in `plan` which engine serves it. Returns 0 if none does.
   `prepared` is the status of the step's checks; *last_error is restored if the step is declined. */
static int gmm__mlp_measure_step(gmm__call *step, gmm_status prepared, const gmm_error *last_error, size_t *bytes,
                                 gmm__plan *plan) {
    gmm__plan step_plan;
    if (prepared != GMM_OK || gmm__select(step, &step_plan) != GMM_OK) {
        (void)gmm__decline(plan, "%.180s", step->ctx->error.text);
        step->ctx->error = *last_error; /* a declined plan is no error: another engine may serve the call */
        return 0;
    }
    if (step_plan.workspace_bytes > *bytes) *bytes = step_plan.workspace_bytes;
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
/* Raises *bytes to the workspace of a linear step. Returns 0 if it is declined. */
static int gmm__mlp_size_linear(const gmm__plan *plan, gmm_op op, const gmm_linear *l, size_t *bytes, gmm__plan *out) {
    gmm__call step;
    const gmm_error last_error = plan->call->ctx->error;
    const gmm_status s = gmm__linear_prepare(&step, plan->call->ctx, op, plan->call->function, l, 1);
    return gmm__mlp_measure_step(&step, s, &last_error, bytes, out);
}

