/* The steps of a layer call, each an operation of the library: which there are, and what they read and write. */

/* Owners of blocks of a layer's memory (gmm__arena). */
enum gmm__moe_owner { GMM__MOE_MAPS, GMM__MOE_X, GMM__MOE_Y, GMM__MOE_DY, GMM__MOE_DX, GMM__MOE_PROBS };

typedef struct gmm__moe_step {
    gmm_op op;
    const void *descriptor; /* gmm_route, gmm_permute or gmm_mlp */
    size_t workspace;       /* where the step's begins, behind all blocks in use */
} gmm__moe_step;

enum { GMM__MOE_STEPS = 5 };

/* The steps of a call in their order, the same for its plan and its launch. Descriptors point into this structure,
   which must therefore not be copied. */
typedef struct gmm__moe_steps {
    const gmm__call *call;
    gmm__moe_wants wants;
    gmm__arena workspace, deferred;
    gmm_dtype dtype;      /* of rows */
    gmm_route route;
    gmm_permute map, dispatch, combine;
    gmm_groups groups;
    gmm_mlp_config config;
    gmm_mlp mlp;
    gmm_mat x, y, dy, dx; /* rows of the MLP, as many as the capacity */
    int32_t *row_of, *slot_of, *sizes;
    float *row_probs;
    const float *probs;   /* of slots */
    gmm__moe_step step[GMM__MOE_STEPS];
    int count;
} gmm__moe_steps;

/* Offsets in gmm_moe.saved: of the layer's parts, and of the MLP's behind them. */
typedef struct gmm__moe_saved {
    gmm_moe_layout layout;
    int64_t row_of, slot_of, sizes, row_probs, y, x, mlp;
} gmm__moe_saved;

static int64_t gmm__moe_save_part(gmm_moe_layout *l, const char *name, gmm_dtype dtype, int64_t rows, int64_t cols) {
    return gmm__save_part(&l->part[l->count++], &l->bytes, name, dtype, rows, cols);
}
static gmm__moe_saved gmm__moe_saved_of(const gmm__call *call) {
    const gmm_moe *d = &call->d.moe;
    const gmm__moe_wants w = gmm__moe_wants_of(call);
    gmm__moe_saved s;
    memset(&s, 0, sizeof s);
    s.row_of = gmm__moe_save_part(&s.layout, "row_of", GMM_I32, d->tokens, d->topk);
    s.slot_of = gmm__moe_save_part(&s.layout, "slot_of", GMM_I32, 1, call->rows);
    s.sizes = gmm__moe_save_part(&s.layout, "sizes", GMM_I32, 1, d->experts);
    if (w.weights_rows) s.row_probs = gmm__moe_save_part(&s.layout, "row_probs", GMM_F32, 1, call->rows);
    if (w.weights_sum) s.y = gmm__moe_save_part(&s.layout, "y", gmm__mlp_dtype(call), call->rows, call->out);
    if (w.saves_x) s.x = gmm__moe_save_part(&s.layout, "x", gmm__mlp_dtype(call), call->rows, call->in);
    s.mlp = s.layout.bytes;
    return s;
}

static void gmm__moe_add_step(gmm__moe_steps *steps, gmm_op op, const void *descriptor) {
    gmm__moe_step *step = &steps->step[steps->count++];
    step->op = op;
    step->descriptor = descriptor;
    step->workspace = gmm__arena_end(&steps->workspace);
}
/* Rows of the MLP in an arena. */
static gmm_mat gmm__moe_place_rows(const gmm__moe_steps *steps, int32_t owner, int64_t cols, gmm__arena *arena) {
    return gmm__arena_matrix(arena, owner, steps->dtype, steps->call->rows, cols);
}

/* Finds the maps in `saved`, or places them in the workspace. */
static void gmm__moe_place_maps(gmm__moe_steps *steps, const gmm__moe_saved *at, char *saved) {
    const gmm_moe *d = &steps->call->d.moe;
    const int64_t R = steps->call->rows;
    gmm__arena *arena = &steps->workspace;
    if (saved) {
        steps->row_of = (int32_t *)(saved + at->row_of);
        steps->slot_of = (int32_t *)(saved + at->slot_of);
        steps->sizes = (int32_t *)(saved + at->sizes);
        steps->row_probs = (float *)(saved + at->row_probs);
    } else {
        steps->row_of = (int32_t *)gmm__arena_alloc(arena, GMM__MOE_MAPS, 4 * d->tokens * d->topk);
        steps->slot_of = (int32_t *)gmm__arena_alloc(arena, GMM__MOE_MAPS, 4 * R);
        steps->sizes = (int32_t *)gmm__arena_alloc(arena, GMM__MOE_MAPS, 4 * (int64_t)d->experts);
        steps->row_probs = (float *)gmm__arena_alloc(arena, GMM__MOE_MAPS, steps->wants.weights_rows ? 4 * R : 0);
    }
    if (d->sizes) steps->sizes = d->sizes;
}

/* Fills in the descriptors of all steps but for what single steps read and write. */
static void gmm__moe_fill(gmm__moe_steps *steps, const gmm__moe_saved *at, char *saved) {
    const gmm__call *call = steps->call;
    const gmm_moe *d = &call->d.moe;
    gmm_permute *p = &steps->map;
    const int64_t slots = d->tokens * d->topk;
    steps->route = gmm__moe_route(call);
    steps->route.options = &call->options;
    steps->probs = d->route ? steps->route.probs : d->probs;

    p->experts = d->experts;
    p->tokens = d->tokens;
    p->capacity = call->rows;
    p->hidden = call->in;
    p->topk = d->topk;
    p->align = d->align;
    p->options = &call->options;
    p->fault = d->fault;
    p->indices = d->route ? steps->route.indices : d->indices;
    p->row_of = steps->row_of;
    p->slot_of = steps->slot_of;
    p->sizes = steps->sizes;
    steps->dispatch = steps->combine = *p;
    steps->combine.hidden = call->out;

    steps->groups.count = d->experts;
    steps->groups.capacity = call->rows;
    steps->groups.splits = steps->sizes;
    steps->groups.dtype = GMM_I32;
    /* otherwise the last expert that fits may have rows up to the capacity */
    steps->groups.row_align = call->rows % d->align ? 0 : d->align;
    steps->groups.rows_hint = slots < call->rows ? slots : 0;
    steps->groups.fault = d->fault;

    steps->config = call->config;
    steps->mlp = gmm__moe_mlp(call);
    steps->mlp.config = &steps->config;
    steps->mlp.groups = &steps->groups;
    steps->mlp.options = &call->options;
    steps->mlp.prob = steps->wants.weights_rows ? steps->row_probs : NULL;
    steps->mlp.index_rows = d->tokens;
    steps->mlp.index_div = d->topk;
    if (saved) {
        steps->mlp.saved = saved + at->mlp;
        steps->mlp.saved_bytes = d->saved_bytes > (size_t)at->mlp ? d->saved_bytes - (size_t)at->mlp : 0;
    }
}

/* Adds the permutation of x into steps->x, or that of its probabilities alone where the MLP gathers the rows. */
static void gmm__moe_add_dispatch(gmm__moe_steps *steps, int probs) {
    const gmm__call *call = steps->call;
    gmm_permute *p = &steps->dispatch;
    if (steps->wants.permutes) {
        steps->mlp.x = &steps->x;
        p->x = &call->mat[GMM__X_];
        p->rows = &steps->x;
    } else {
        steps->mlp.x = &call->mat[GMM__X_];
        steps->mlp.x_index = steps->slot_of;
    }
    if (probs) {
        p->probs = steps->probs ? steps->probs : (const float *)gmm__placeholder(); /* a query may leave it open */
        p->row_probs = steps->row_probs;
    }
    if (p->rows || p->row_probs) gmm__moe_add_step(steps, GMM_OP_PERMUTE_FWD, p);
}

/* Lists the steps of forward. `saved`: gmm_moe.saved; NULL = inference. */
static void gmm__moe_build_fwd(gmm__moe_steps *steps, const gmm__moe_saved *at, char *saved) {
    const gmm__call *call = steps->call;
    gmm__moe_place_maps(steps, at, saved);
    gmm__moe_fill(steps, at, saved);
    if (call->d.moe.route) gmm__moe_add_step(steps, GMM_OP_TOPK_FWD, &steps->route);
    gmm__moe_add_step(steps, GMM_OP_PERMUTE_MAP, &steps->map);
    if (saved && steps->wants.weights_sum) steps->y = gmm_mat_packed(steps->dtype, saved + at->y);
    else steps->y = gmm__moe_place_rows(steps, GMM__MOE_Y, call->out, &steps->workspace);
    if (saved && steps->wants.saves_x) steps->x = gmm_mat_packed(steps->dtype, saved + at->x);
    else if (steps->wants.permutes)
        steps->x = gmm__moe_place_rows(steps, GMM__MOE_X, call->in, &steps->workspace);
    gmm__moe_add_dispatch(steps, steps->wants.weights_rows);
    steps->mlp.y = &steps->y;
    gmm__moe_add_step(steps, GMM_OP_MLP_FWD, &steps->mlp);
    gmm__arena_free(&steps->workspace, GMM__MOE_X);
    steps->combine.rows = &steps->y;
    steps->combine.out = &call->mat[GMM__Y];
    steps->combine.probs = steps->wants.weights_sum ? steps->probs : NULL;
    gmm__moe_add_step(steps, GMM_OP_UNPERMUTE_FWD, &steps->combine);
}

/* Places the rows that the MLP of backward reads and writes. Permuted rows of dout that a queued weight gradient reads
   are in gmm_moe.deferred. Others, and those of x, share the memory of dx's rows: the MLP writes dx when it has read
   them. */
static void gmm__moe_place_bwd(gmm__moe_steps *steps, const gmm__moe_saved *at, char *saved) {
    const gmm__call *call = steps->call;
    const gmm__moe_wants *w = &steps->wants;
    const int queues = gmm__moe_queues(call), permutes_x = w->permutes && w->x && !w->saves_x;
    const int places_dy = w->mlp && !w->gathers_dy;
    const int queues_dy = queues && steps->mlp.dw2 && !gmm__moe_casts(call, GMM__DY); /* else a copy is queued */
    int free_dx = 0; /* the rows of dx are there, and hold nothing that the MLP reads */
    if (call->d.moe.dx) {
        steps->dx = gmm__moe_place_rows(steps, GMM__MOE_DX, call->in, &steps->workspace);
        free_dx = !queues;
    }
    if (w->saves_x) steps->x = gmm_mat_packed(steps->dtype, saved + at->x);
    else if (permutes_x) {
        steps->x = free_dx ? steps->dx : gmm__moe_place_rows(steps, GMM__MOE_X, call->in, &steps->workspace);
        free_dx = 0;
    }
    if (places_dy)
        steps->dy = free_dx && call->in == call->out
                        ? steps->dx
                        : gmm__moe_place_rows(steps, GMM__MOE_DY, call->out,
                                              queues_dy ? &steps->deferred : &steps->workspace);
}

/* Lists the steps of backward. A queued weight gradient reads rows of x by their index, or those in saved. */
static void gmm__moe_build_bwd(gmm__moe_steps *steps, const gmm__moe_saved *at, char *saved) {
    const gmm__call *call = steps->call;
    const gmm_moe *d = &call->d.moe;
    const gmm__moe_wants *w = &steps->wants;
    gmm_mlp *m = &steps->mlp;
    float *dprobs = d->dprobs, *drow_probs = NULL;
    gmm__moe_place_maps(steps, at, saved);
    gmm__moe_fill(steps, at, saved);
    if (w->dprobs && !dprobs)
        dprobs = (float *)gmm__arena_alloc(&steps->workspace, GMM__MOE_PROBS, 4 * d->tokens * d->topk);
    if (w->dprobs && w->weights_rows)
        drow_probs = (float *)gmm__arena_alloc(&steps->workspace, GMM__MOE_PROBS, 4 * call->rows);
    gmm__moe_place_bwd(steps, at, saved);

    steps->combine.dout = &call->mat[GMM__DY];
    if (w->gathers_dy) {
        m->dy = &call->mat[GMM__DY];
        m->dy_index = steps->slot_of;
    } else if (w->mlp) m->dy = steps->combine.drows = &steps->dy;
    if (w->weights_sum) steps->combine.probs = steps->probs;
    if (w->weights_sum && w->dprobs) {
        steps->y = gmm_mat_packed(steps->dtype, saved + at->y);
        steps->combine.rows = &steps->y;
        steps->combine.dprobs = dprobs;
    }
    if (steps->combine.drows || steps->combine.dprobs)
        gmm__moe_add_step(steps, GMM_OP_UNPERMUTE_BWD, &steps->combine);
    if (w->mlp) {
        if (w->x) gmm__moe_add_dispatch(steps, 0);
        if (w->saves_x) m->x = &steps->x;
        m->dx = d->dx ? &steps->dx : NULL;
        m->dprob = drow_probs;
        gmm__moe_add_step(steps, GMM_OP_MLP_BWD, m);
    }
    gmm__arena_free(&steps->workspace, GMM__MOE_X);
    gmm__arena_free(&steps->workspace, GMM__MOE_DY);

    steps->map.indices = NULL;
    if (d->dx) {
        steps->map.drows = &steps->dx;
        steps->map.dx = &call->mat[GMM__DX];
    }
    if (drow_probs) {
        steps->map.drow_probs = drow_probs;
        steps->map.dprobs = dprobs;
    }
    if (steps->map.dx || drow_probs) gmm__moe_add_step(steps, GMM_OP_PERMUTE_BWD, &steps->map);
    steps->route.dprobs = w->dprobs ? dprobs : NULL;
    if (steps->route.dlogits) gmm__moe_add_step(steps, GMM_OP_TOPK_BWD, &steps->route);
}

/* Lists the steps of a call over its workspace and gmm_moe.deferred; gmm__placeholder() for a plan. */
static void gmm__moe_build(gmm__moe_steps *steps, const gmm__call *call, char *workspace, char *deferred) {
    const gmm__moe_saved at = gmm__moe_saved_of(call);
    const int fwd = call->op == GMM_OP_MOE_FWD;
    char *saved = (char *)call->d.moe.saved;
    memset(steps, 0, sizeof *steps);
    steps->call = call;
    steps->wants = gmm__moe_wants_of(call);
    steps->dtype = gmm__mlp_dtype(call);
    steps->workspace.memory = workspace;
    steps->deferred.memory = deferred;
    if (fwd) gmm__moe_build_fwd(steps, &at, saved);
    else gmm__moe_build_bwd(steps, &at, saved ? saved : gmm__placeholder());
    if (fwd || !deferred) return;
    steps->mlp.deferred = deferred + steps->deferred.peak;
    steps->mlp.deferred_bytes = call->d.moe.deferred_bytes > steps->deferred.peak
                                    ? call->d.moe.deferred_bytes - steps->deferred.peak : 0;
}
