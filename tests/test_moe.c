/* test_moe.c - the layer against the calls that it is composed of, bit for bit; against an fp64 reference with finite
   differences; its memory, refusals, hooks, replays */
#include "mlp_case.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#ifdef HAVE_CUDA
#include "device.h"
#endif

/* -------------------------------------------------------------------------------------------------- One layer --- */

enum weighting { NO_PROBS, ON_ROWS, ON_SUM }; /* where probabilities count: nowhere, FC2's input, the combine */
/* Results that may be left out. */
enum { DX = 1, DPROBS = 2, DLOGITS = 4, DW1 = 8, DW2 = 16, DB1 = 32, DB2 = 64 };

typedef struct moe_spec {
    const char *name;
    gmm_dtype dtype, out, dout;  /* of x and weights; of out and dx; of dout: 0 = dtype */
    int64_t tokens, hidden, ffn, hidden_out;
    int experts, used, topk;     /* slots choose experts below `used` (0 = all), some of them twice */
    gmm_act_kind act;            /* 0: SwiGLU */
    int bias, routed;            /* routed: by logits */
    enum weighting weighting;
    int recipe;                  /* REF_* + 1; 0 = none */
    gmm_save save;
    gmm_backward_override override;
    int delay, cache, sizes;     /* sizes: in the caller's array */
    int align, dropped;          /* dropped: per cent of the slots */
    int64_t capacity;            /* 0 = the default */
    int without;                 /* results that are not wanted */
    int prob_on_input;           /* x was weighted already */
    int gathers;                 /* GPUs gather rows in products, as with any limit of the workspace */
    int save_rows, overwrite_saved;
    int main_grad;
} moe_spec;

/* Outputs of one run; `dprobs` is NULL where the layer keeps it to itself. */
typedef struct moe_outputs {
    t_mat out, dx, dlogits, dw[2], db[2];
    gmm_grad gw[2], gb[2];
    int32_t *indices, *sizes, *counts;
    float *probs, *dprobs, *losses;
    uint32_t *fault;
    float *amax;
} moe_outputs;

typedef struct moe_case {
    moe_spec s;
    int64_t slots, out_cols, f1, capacity;
    gmm_recipe recipe;
    gmm_mlp_config config;
    gmm_mlp_quant quant;
    gmm_mlp mlp;
    gmm_route route;
    gmm_options options;
    gmm_moe d;
    t_mat x, logits, w1, w2, b1, b2, dout;
    int32_t *indices; /* given ones */
    float *probs;
    gmm_wgrad_entry entry;
    gmm_wgrad_queue queue;
    moe_outputs o;
    size_t workspace, deferred; /* bytes that the queries have named */
    int queued;       /* backward has queued weight gradients */
} moe_case;

static t_mat scaled(gmm_dtype dtype, int64_t count, int64_t rows, int64_t cols, double size) {
    t_mat m = t_mat_in(dtype, count, rows, cols, T_REALS);
    for (int64_t i = 0; i < count * rows * cols; i++) m.v[i] = ref_round(dtype, m.v[i] * size);
    t_mat_put(&m);
    return m;
}
static gmm_grad grad_of(const t_mat *m, int main_grad) {
    gmm_grad g = GMM_ZERO;
    g.mat = &m->mat;
    g.main_grad = main_grad;
    return g;
}
/* A destination of gradients: poison, or values that are added to. */
static t_mat destination(const moe_case *c, int64_t rows, int64_t cols) {
    t_mat m = t_mat_out(GMM_F32, c->s.experts, rows, cols);
    if (c->s.main_grad) {
        for (int64_t i = 0; i < m.count * rows * cols; i++) m.v[i] = (double)(i % 13) - 6.0;
        t_mat_put(&m);
    }
    return m;
}

/* Fresh outputs for another run of the same case. */
static void fresh(moe_case *c) {
    const moe_spec *s = &c->s;
    const uint32_t zero = 0;
    const float zeros[GMM_SLOTS * 64] = { 0 };
    moe_outputs *o = &c->o;
    memset(o, 0, sizeof *o);
    o->out = t_mat_out(s->out, 1, s->tokens, c->out_cols);
    o->dx = t_mat_out(s->out, 1, s->tokens, s->hidden);
    o->dlogits = t_mat_out(GMM_F32, 1, s->tokens, s->experts);
    o->dw[0] = destination(c, c->f1, s->hidden);
    o->dw[1] = destination(c, c->out_cols, s->ffn);
    o->db[0] = destination(c, 1, c->f1);
    o->db[1] = destination(c, 1, c->out_cols);
    for (int i = 0; i < 2; i++) {
        o->gw[i] = grad_of(&o->dw[i], s->main_grad);
        o->gb[i] = grad_of(&o->db[i], s->main_grad);
    }
    o->indices = s->routed ? (int32_t *)t_alloc((size_t)c->slots * 4) : c->indices;
    o->probs = s->routed ? t_floats_out(c->slots) : c->probs;
    o->counts = (int32_t *)t_alloc((size_t)s->experts * 4);
    o->sizes = (int32_t *)t_alloc((size_t)s->experts * 4);
    o->dprobs = t_floats_out(c->slots);
    o->losses = t_floats_out(2);
    o->fault = (uint32_t *)t_alloc(4);
    t_upload(o->fault, &zero, 4);
    o->amax = (float *)t_alloc(sizeof(float) * GMM_SLOTS * (size_t)s->experts);
    t_upload(o->amax, zeros, sizeof(float) * GMM_SLOTS * (size_t)s->experts);
    c->quant.amax = o->amax;
}

/* Indices, of which some are dropped and some tokens choose an expert twice. */
static void give_routing(moe_case *c) {
    const moe_spec *s = &c->s;
    const int used = s->used ? s->used : s->experts;
    int32_t *indices = (int32_t *)t_host((size_t)c->slots * 4 + 4);
    double *probs = (double *)t_host((size_t)c->slots * 8 + 8);
    for (int64_t i = 0; i < c->slots; i++) {
        indices[i] = t_int(0, 99) < s->dropped ? -1 : (int32_t)t_int(0, used - 1);
        if (i % s->topk == 1 && t_int(0, 3) == 0) indices[i] = indices[i - 1];
        probs[i] = t_real() * 1.5;
    }
    c->indices = (int32_t *)t_in(indices, (size_t)c->slots * 4);
    c->probs = t_floats_in(probs, c->slots);
}

static void build_inputs(moe_case *c) {
    const moe_spec *s = &c->s;
    const gmm_dtype t = s->dtype;
    const int G = s->experts;
    float scale[GMM_SLOTS * 64];
    c->x = t_mat_make(t, 1, s->tokens, s->hidden, 8, 0, T_PACKED, T_REALS);
    c->dout = t_mat_make(s->dout, 1, s->tokens, c->out_cols, 8, 0, T_PACKED, T_REALS);
    c->logits = t_mat_in(GMM_F32, 1, s->tokens, G, T_REALS);
    c->w1 = scaled(t, G, c->f1, s->hidden, 3.0 / sqrt((double)s->hidden));
    c->w2 = scaled(t, G, c->out_cols, s->ffn, 2.0 / sqrt((double)s->ffn));
    c->b1 = scaled(t, G, 1, c->f1, 0.5);
    c->b2 = scaled(t, G, 1, c->out_cols, 0.5);
    give_routing(c);
    for (int i = 0; i < GMM_SLOTS * G; i++) scale[i] = (float)(2.0 + t_real());
    c->quant.scale = (const float *)t_in(scale, sizeof *scale * GMM_SLOTS * (size_t)G);
    c->quant.random = (const uint64_t *)t_in((const uint64_t[4]){ 1, 2, 3, 4 }, 32);
}

static void build(moe_case *c, const moe_spec *spec) {
    moe_spec *s = &c->s;
    memset(c, 0, sizeof *c);
    *s = *spec;
    if (!s->act) s->act = GMM_ACT_SWIGLU;
    if (!s->out) s->out = s->dtype;
    if (!s->dout) s->dout = s->dtype;
    c->slots = s->tokens * s->topk;
    c->out_cols = s->hidden_out ? s->hidden_out : s->hidden;
    c->f1 = gmm_act_gated(s->act) ? 2 * s->ffn : s->ffn;
    t_about("%s: %s, %lld tokens, %d experts, top %d, hidden %lld, ffn %lld", s->name, gmm_dtype_name(s->dtype),
            (long long)s->tokens, s->experts, s->topk, (long long)s->hidden, (long long)s->ffn);
    c->config.hidden = s->hidden;
    c->config.ffn = s->ffn;
    c->config.hidden_out = s->hidden_out;
    c->config.act.kind = s->act;
    c->config.save = s->save;
    c->config.bias1 = c->config.bias2 = s->bias;
    c->config.prob = s->weighting == ON_ROWS;
    c->config.prob_on_bias2 = s->bias && c->config.prob;
    c->config.prob_on_input = s->prob_on_input;
    c->config.topk = s->prob_on_input ? s->topk : 0;
    c->config.delay_wgrad = s->delay;
    if (s->recipe) {
        c->recipe = ref_recipe_of(s->recipe - 1).recipe;
        c->config.recipe = c->recipe.kind;
        c->quant.recipe = &c->recipe;
        c->quant.backward_override = s->override;
    }
    build_inputs(c);
    fresh(c);
}
#define build(...) T_CALL(build, __VA_ARGS__)

/* The MLP's parameters: the fields that layer and separate calls have in common. */
static void fill_mlp(moe_case *c, gmm_mlp *m) {
    const moe_spec *s = &c->s;
    memset(m, 0, sizeof *m);
    m->config = &c->config;
    m->w1 = &c->w1.mat;
    m->w2 = &c->w2.mat;
    m->dw1 = s->without & DW1 ? NULL : &c->o.gw[0];
    m->dw2 = s->without & DW2 ? NULL : &c->o.gw[1];
    if (s->bias) {
        m->b1 = &c->b1.mat;
        m->b2 = &c->b2.mat;
        m->db1 = s->without & DB1 ? NULL : &c->o.gb[0];
        m->db2 = s->without & DB2 ? NULL : &c->o.gb[1];
    }
    m->quant = s->recipe ? &c->quant : NULL;
    c->queue = gmm_wgrad_queue_over(&c->entry, 1);
    m->queue = &c->queue;
}
static void fill_route(moe_case *c, gmm_route *r) {
    const moe_spec *s = &c->s;
    memset(r, 0, sizeof *r);
    r->experts = s->experts;
    r->tokens = s->tokens;
    r->topk = s->topk;
    r->normalize = 1;
    r->logits = &c->logits.mat;
    r->indices = c->o.indices;
    r->probs = c->o.probs;
    r->counts = c->o.counts;
    r->aux_coeff = 0.01f;
    r->z_coeff = 0.001f;
    r->aux_loss = c->o.losses;
    r->z_loss = c->o.losses + 1;
    r->dlogits = s->without & DLOGITS ? NULL : &c->o.dlogits.mat;
}

/* ------------------------------------------------------------------------------------------ The layer's calls --- */

static void fill_layer(moe_case *c) {
    const moe_spec *s = &c->s;
    gmm_moe *d = &c->d;
    fill_mlp(c, &c->mlp);
    fill_route(c, &c->route);
    memset(d, 0, sizeof *d);
    d->experts = s->experts;
    d->tokens = s->tokens;
    d->topk = s->topk;
    d->align = s->align;
    d->capacity = s->capacity;
    d->save_rows = s->save_rows;
    if (s->gathers) {
        c->options.workspace_limit = (int64_t)1 << 40;
        d->options = &c->options;
    }
    d->mlp = &c->mlp;
    if (s->routed) d->route = &c->route;
    else {
        d->indices = c->indices;
        d->probs = s->weighting == NO_PROBS ? NULL : c->probs;
    }
    d->x = &c->x.mat;
    d->out = &c->o.out.mat;
    d->dout = &c->dout.mat;
    d->dx = s->without & DX ? NULL : &c->o.dx.mat;
    d->dprobs = s->without & DPROBS || s->weighting == NO_PROBS ? NULL : c->o.dprobs;
    d->sizes = s->sizes ? c->o.sizes : NULL;
    d->fault = c->o.fault;
}

/* Makes the cache that the query asks for. */
static void give_cache(moe_case *c, const gmm_info *info) {
    if (!c->s.cache || c->quant.weight_cache) return;
    c->quant.weight_cache = t_alloc_aligned(info->weight_cache_bytes ? info->weight_cache_bytes : 256, 256);
    c->quant.weight_cache_bytes = info->weight_cache_bytes;
}
static void layer_fwd(moe_case *c, int inference) {
    gmm_info info = GMM_ZERO;
    fill_layer(c);
    T_OK(gmm_moe_query(T.ctx, GMM_OP_MOE_FWD, &c->d, &info));
    give_cache(c, &info);
    T_OK(gmm_moe_query(T.ctx, GMM_OP_MOE_FWD, &c->d, &info));
    c->workspace = info.workspace_bytes;
    if (!inference) {
        c->d.saved_bytes = info.saved_bytes;
        c->d.saved = t_workspace(info.saved_bytes);
    }
    T_OK(gmm_moe_fwd(T.ctx, &c->d, t_workspace(info.workspace_bytes), info.workspace_bytes, T.stream));
}
#define layer_fwd(...) T_CALL(layer_fwd, __VA_ARGS__)

/* Backward and, if they are delayed, the weight gradients, before which all is overwritten that need not remain. */
static void layer_bwd(moe_case *c) {
    gmm_info info = GMM_ZERO;
    void *workspace;
    if (c->s.save_rows) c->d.x = NULL; /* bwd does not read it */
    T_OK(gmm_moe_query(T.ctx, GMM_OP_MOE_BWD, &c->d, &info));
    T_CHECK(info.saved_bytes == c->d.saved_bytes, "saved_bytes %zu of bwd, %zu of fwd", info.saved_bytes,
            c->d.saved_bytes);
    if (info.workspace_bytes > c->workspace) c->workspace = info.workspace_bytes;
    c->deferred = info.deferred_bytes;
    c->d.deferred = info.deferred_bytes ? t_workspace(info.deferred_bytes) : NULL;
    c->d.deferred_bytes = info.deferred_bytes;
    workspace = t_workspace(info.workspace_bytes);
    T_OK(gmm_moe_bwd(T.ctx, &c->d, workspace, info.workspace_bytes, T.stream));
    c->queued = c->queue.count > 0;
    if (!c->queued) return;
    t_poison(workspace, 0xFF, info.workspace_bytes);
    if (c->d.sizes) t_poison(c->d.sizes, 0xFF, (size_t)c->s.experts * 4);
    T_OK(gmm_moe_query(T.ctx, GMM_OP_MLP_WGRAD, &c->d, &info));
    memset(&c->mlp, 0xFF, sizeof c->mlp);
    T_OK(gmm_mlp_wgrad(T.ctx, &c->queue, t_workspace(info.workspace_bytes), info.workspace_bytes, T.stream));
}
#define layer_bwd(...) T_CALL(layer_bwd, __VA_ARGS__)

/* --------------------------------------------------------------------------------------------- Separate calls --- */

/* The same layer, composed of calls. */
typedef struct composed {
    gmm_permute map;
    gmm_groups groups;
    gmm_mlp mlp;
    gmm_route route;
    t_mat rows, y, dy, drows;
    float *row_probs, *drow_probs;
    int64_t capacity;
    size_t workspace, saved, deferred;
} composed;

typedef gmm_status (*permutation)(gmm_context *, const gmm_permute *, void *, size_t, gmm_stream);
static void permute(composed *s, gmm_op op, permutation run, const gmm_permute *p) {
    gmm_info info = GMM_ZERO;
    T_OK(gmm_permute_query(T.ctx, op, p, &info));
    if (info.workspace_bytes > s->workspace) s->workspace = info.workspace_bytes;
    T_OK(run(T.ctx, p, t_workspace(info.workspace_bytes), info.workspace_bytes, T.stream));
}
#define permute(...) T_CALL(permute, __VA_ARGS__)
static void topk(composed *s, gmm_op op) {
    gmm_info info = GMM_ZERO;
    void *ws;
    T_OK(gmm_topk_query(T.ctx, op, &s->route, &info));
    ws = t_workspace(info.workspace_bytes);
    if (op == GMM_OP_TOPK_FWD) T_OK(gmm_topk_fwd(T.ctx, &s->route, ws, info.workspace_bytes, T.stream));
    else T_OK(gmm_topk_bwd(T.ctx, &s->route, ws, info.workspace_bytes, T.stream));
}
#define topk(...) T_CALL(topk, __VA_ARGS__)

static int64_t default_capacity(const moe_spec *s) {
    const int64_t align = s->align ? s->align : 1, slots = s->tokens * s->topk;
    const int64_t experts = slots < s->experts ? slots : s->experts;
    return (slots + experts * (align - 1) + align - 1) / align * align;
}

static void separate_fwd(moe_case *c, composed *s, int inference) {
    const moe_spec *spec = &c->s;
    gmm_permute dispatch, combine;
    gmm_info info = GMM_ZERO;
    memset(s, 0, sizeof *s);
    s->capacity = spec->capacity ? spec->capacity : default_capacity(spec);
    fill_mlp(c, &s->mlp);
    fill_route(c, &s->route);
    s->map.experts = spec->experts;
    s->map.tokens = spec->tokens;
    s->map.capacity = s->capacity;
    s->map.hidden = spec->hidden;
    s->map.topk = spec->topk;
    s->map.align = spec->align;
    s->map.fault = c->o.fault;
    s->map.indices = c->o.indices;
    s->map.row_of = (int32_t *)t_alloc((size_t)c->slots * 4);
    s->map.slot_of = (int32_t *)t_alloc((size_t)s->capacity * 4);
    s->map.sizes = c->o.sizes;
    s->groups.count = spec->experts;
    s->groups.capacity = s->capacity;
    s->groups.splits = c->o.sizes;
    s->groups.dtype = GMM_I32;
    s->groups.fault = c->o.fault;
    s->rows = t_mat_out(spec->dtype, 1, s->capacity, spec->hidden);
    s->y = t_mat_out(spec->dtype, 1, s->capacity, c->out_cols);
    s->row_probs = t_floats_out(s->capacity);
    if (spec->routed) topk(s, GMM_OP_TOPK_FWD);
    permute(s, GMM_OP_PERMUTE_MAP, gmm_permute_map, &s->map);
    dispatch = combine = s->map;
    dispatch.x = &c->x.mat;
    dispatch.rows = &s->rows.mat;
    if (spec->weighting == ON_ROWS) {
        dispatch.probs = c->o.probs;
        dispatch.row_probs = s->row_probs;
        s->mlp.prob = s->row_probs;
    }
    permute(s, GMM_OP_PERMUTE_FWD, gmm_permute_fwd, &dispatch);
    s->mlp.groups = &s->groups;
    s->mlp.x = &s->rows.mat;
    s->mlp.y = &s->y.mat;
    c->config.topk = spec->topk;
    T_OK(gmm_mlp_query(T.ctx, GMM_OP_MLP_FWD, &s->mlp, &info));
    s->saved = info.saved_bytes;
    if (info.workspace_bytes > s->workspace) s->workspace = info.workspace_bytes;
    if (!inference) {
        s->mlp.saved = t_workspace(info.saved_bytes);
        s->mlp.saved_bytes = info.saved_bytes;
    }
    T_OK(gmm_mlp_fwd(T.ctx, &s->mlp, t_workspace(info.workspace_bytes), info.workspace_bytes, T.stream));
    combine.hidden = c->out_cols;
    combine.rows = &s->y.mat;
    combine.out = &c->o.out.mat;
    combine.probs = spec->weighting == ON_SUM ? c->o.probs : NULL;
    permute(s, GMM_OP_UNPERMUTE_FWD, gmm_unpermute_fwd, &combine);
}
#define separate_fwd(...) T_CALL(separate_fwd, __VA_ARGS__)

static void separate_bwd(moe_case *c, composed *s) {
    const moe_spec *spec = &c->s;
    const int probs = spec->weighting != NO_PROBS && (!(spec->without & DPROBS) || s->route.dlogits);
    gmm_permute dispatch = s->map, combine = s->map;
    gmm_info info = GMM_ZERO;
    s->dy = t_mat_out(spec->dtype, 1, s->capacity, c->out_cols);
    s->drows = t_mat_out(spec->dtype, 1, s->capacity, spec->hidden);
    s->drow_probs = t_floats_out(s->capacity);
    combine.hidden = c->out_cols;
    combine.dout = &c->dout.mat;
    combine.drows = &s->dy.mat;
    combine.probs = spec->weighting == ON_SUM ? c->o.probs : NULL;
    if (spec->weighting == ON_SUM) {
        combine.rows = &s->y.mat;
        combine.dprobs = c->o.dprobs;
    }
    permute(s, GMM_OP_UNPERMUTE_BWD, gmm_unpermute_bwd, &combine);
    s->mlp.dy = &s->dy.mat;
    s->mlp.dx = spec->without & DX ? NULL : &s->drows.mat;
    s->mlp.dprob = probs && spec->weighting == ON_ROWS ? s->drow_probs : NULL;
    T_OK(gmm_mlp_query(T.ctx, GMM_OP_MLP_BWD, &s->mlp, &info));
    if (info.workspace_bytes > s->workspace) s->workspace = info.workspace_bytes;
    s->deferred = info.deferred_bytes;
    s->mlp.deferred = info.deferred_bytes ? t_workspace(info.deferred_bytes) : NULL;
    s->mlp.deferred_bytes = info.deferred_bytes;
    T_OK(gmm_mlp_bwd(T.ctx, &s->mlp, t_workspace(info.workspace_bytes), info.workspace_bytes, T.stream));
    if (c->queue.count) T_OK(mlp_call(GMM_OP_MLP_WGRAD, &s->mlp));
    dispatch.indices = NULL;
    if (s->mlp.dx) {
        dispatch.drows = &s->drows.mat;
        dispatch.dx = &c->o.dx.mat;
    }
    if (s->mlp.dprob) {
        dispatch.drow_probs = s->drow_probs;
        dispatch.dprobs = c->o.dprobs;
    }
    if (dispatch.dx || dispatch.dprobs) permute(s, GMM_OP_PERMUTE_BWD, gmm_permute_bwd, &dispatch);
    s->route.dprobs = probs ? c->o.dprobs : NULL;
    if (spec->routed && s->route.dlogits) topk(s, GMM_OP_TOPK_BWD);
}
#define separate_bwd(...) T_CALL(separate_bwd, __VA_ARGS__)

/* ------------------------------------------------------------------------------------------------- Comparison --- */

static void same_mat(const char *what, const t_mat *a, const t_mat *b) {
    t_same(what, t_mat_bits(a), t_mat_bits(b), (size_t)(a->count * a->rows * a->cols * ref_bytes(a->dtype)));
}
#define same_mat(...) T_CALL(same_mat, __VA_ARGS__)
static void same_memory(const char *what, const void *a, const void *b, int64_t bytes) {
    t_same(what, t_get(a, (size_t)bytes), t_get(b, (size_t)bytes), (size_t)bytes);
}
/* All outputs; those that are not wanted are poison in both. `backward` 0: of forward alone. */
static void same_outputs(const moe_case *c, const moe_outputs *a, const moe_outputs *b, int backward) {
    const moe_spec *s = &c->s;
    same_mat("out", &a->out, &b->out);
    if (s->sizes) same_memory("sizes", a->sizes, b->sizes, 4 * s->experts);
    same_memory("fault", a->fault, b->fault, 4);
    if (s->routed) {
        same_memory("indices", a->indices, b->indices, 4 * c->slots);
        same_memory("probs", a->probs, b->probs, 4 * c->slots);
        same_memory("losses", a->losses, b->losses, 8);
    }
    if (s->recipe) same_memory("amax", a->amax, b->amax, 4 * GMM_SLOTS * s->experts);
    if (!backward) return;
    same_mat("dx", &a->dx, &b->dx);
    same_mat("dw1", &a->dw[0], &b->dw[0]);
    same_mat("dw2", &a->dw[1], &b->dw[1]);
    same_mat("db1", &a->db[0], &b->db[0]);
    same_mat("db2", &a->db[1], &b->db[1]);
    if (s->routed) same_mat("dlogits", &a->dlogits, &b->dlogits);
    if (!(s->without & DPROBS)) same_memory("dprobs", a->dprobs, b->dprobs, 4 * c->slots);
}
#define same_outputs(...) T_CALL(same_outputs, __VA_ARGS__)

/* The layer equals its calls, in training and in inference. */
static void equals_calls(const moe_spec *spec) {
    moe_case c;
    composed s;
    moe_outputs separate, train;
    build(&c, spec);
    separate_fwd(&c, &s, 0);
    separate_bwd(&c, &s);
    separate = c.o;
    if (!spec->prob_on_input) c.config.topk = 0; /* the layer's counts */
    c.quant.weight_cache = NULL;
    c.config.overwrite_saved = spec->overwrite_saved;
    fresh(&c);
    layer_fwd(&c, 0);
    layer_bwd(&c);
    train = c.o;
    if (c.queued) t_poison(separate.sizes, 0xFF, (size_t)spec->experts * 4); /* as layer_bwd has done to its own */
    same_outputs(&c, &separate, &train, 1);
    fresh(&c);
    layer_fwd(&c, 1);
    same_mat("out of inference", &separate.out, &c.o.out);
}
#define equals_calls(...) T_CALL(equals_calls, __VA_ARGS__)

/* Words of the names: what is special. Sizes where the values below are 0: 37 tokens, 5 experts, top 3, 64 to 96. */
static const moe_spec specs[] = {
    { .name = "bf16", .dtype = GMM_BF16, .weighting = ON_ROWS },
    { .name = "routed", .dtype = GMM_BF16, .routed = 1, .weighting = ON_ROWS, .sizes = 1 },
    { .name = "f32 routed, weighted sum", .dtype = GMM_F32, .routed = 1, .weighting = ON_SUM, .main_grad = 1 },
    { .name = "f16, biases", .dtype = GMM_F16, .bias = 1, .weighting = ON_ROWS, .hidden_out = 40 },
    { .name = "f32, biases, weighted sum", .dtype = GMM_F32, .bias = 1, .weighting = ON_SUM, .hidden_out = 24 },
    { .name = "no probs, odd sizes", .dtype = GMM_BF16, .hidden = 17, .ffn = 13, .hidden_out = 9 },
    { .name = "relu2, other dtypes", .dtype = GMM_BF16, .act = GMM_ACT_RELU2, .out = GMM_F32, .dout = GMM_F32,
      .weighting = ON_ROWS, .routed = 1 },
    { .name = "other dtypes, weighted sum", .dtype = GMM_F16, .out = GMM_F32, .dout = GMM_BF16, .weighting = ON_SUM },
    { .name = "x weighted already", .dtype = GMM_BF16, .topk = 1, .prob_on_input = 1, .bias = 1 },
    { .name = "dropped tokens", .dtype = GMM_BF16, .dropped = 40, .weighting = ON_ROWS, .sizes = 1 },
    { .name = "all dropped", .dtype = GMM_BF16, .dropped = 100, .weighting = ON_SUM, .bias = 1 },
    { .name = "capacity too small", .dtype = GMM_BF16, .capacity = 70, .weighting = ON_ROWS, .sizes = 1 },
    { .name = "capacity 1, aligned", .dtype = GMM_BF16, .capacity = 1, .align = 8, .weighting = ON_SUM },
    { .name = "capacity to spare", .dtype = GMM_BF16, .capacity = 300, .weighting = ON_ROWS, .dropped = 10 },
    { .name = "aligned", .dtype = GMM_BF16, .align = 16, .weighting = ON_ROWS, .dropped = 10, .sizes = 1, .bias = 1 },
    { .name = "aligned, weighted sum", .dtype = GMM_F32, .align = 7, .weighting = ON_SUM, .bias = 1 },
    { .name = "empty experts", .dtype = GMM_BF16, .experts = 40, .used = 3, .weighting = ON_ROWS, .main_grad = 1 },
    { .name = "one token", .dtype = GMM_BF16, .tokens = 1, .routed = 1, .weighting = ON_ROWS },
    { .name = "no tokens", .dtype = GMM_BF16, .tokens = -1, .routed = 1, .weighting = ON_ROWS, .main_grad = 1 },
    { .name = "no tokens, weighted sum", .dtype = GMM_F32, .tokens = -1, .weighting = ON_SUM, .bias = 1 },
    { .name = "top 1", .dtype = GMM_BF16, .topk = 1, .routed = 1, .weighting = ON_SUM },
    { .name = "top 32", .dtype = GMM_BF16, .topk = 32, .experts = 33, .tokens = 9, .routed = 1, .weighting = ON_ROWS },
    { .name = "one expert, chosen by all slots", .dtype = GMM_F32, .experts = 1, .topk = 4, .weighting = ON_ROWS },
    { .name = "saved act", .dtype = GMM_BF16, .save = GMM_SAVE_PREACT_AND_ACT, .weighting = ON_ROWS, .bias = 1 },
    { .name = "nothing saved", .dtype = GMM_BF16, .save = GMM_SAVE_NOTHING, .weighting = ON_ROWS, .bias = 1 },
    { .name = "e4m3 saved", .dtype = GMM_BF16, .save = GMM_SAVE_PREACT_E4M3, .weighting = ON_ROWS },
    { .name = "nothing saved, weighted sum", .dtype = GMM_F32, .save = GMM_SAVE_NOTHING, .weighting = ON_SUM },
    { .name = "delayed", .dtype = GMM_BF16, .delay = 1, .weighting = ON_ROWS, .main_grad = 1, .sizes = 1, .bias = 1 },
    { .name = "delayed, routed, act saved", .dtype = GMM_BF16, .delay = 1, .routed = 1, .weighting = ON_ROWS,
      .save = GMM_SAVE_PREACT_AND_ACT },
    { .name = "delayed, weighted sum", .dtype = GMM_F32, .delay = 1, .weighting = ON_SUM, .dropped = 20 },
    { .name = "delayed, other dtype of dout", .dtype = GMM_BF16, .dout = GMM_F32, .delay = 1, .weighting = ON_ROWS },
    { .name = "delayed, without dw1", .dtype = GMM_BF16, .delay = 1, .weighting = ON_ROWS, .without = DW1 },
    { .name = "without dx", .dtype = GMM_BF16, .without = DX, .weighting = ON_ROWS, .bias = 1 },
    { .name = "without dprobs", .dtype = GMM_BF16, .without = DPROBS, .weighting = ON_ROWS, .bias = 1 },
    { .name = "dlogits without dprobs", .dtype = GMM_BF16, .without = DPROBS, .routed = 1, .weighting = ON_SUM },
    { .name = "dprobs alone", .dtype = GMM_BF16, .without = DX | DW1 | DW2, .weighting = ON_ROWS },
    { .name = "dprobs of the sum alone", .dtype = GMM_BF16, .without = DX | DW1 | DW2, .weighting = ON_SUM },
    { .name = "dx alone", .dtype = GMM_BF16, .without = DPROBS | DLOGITS | DW1 | DW2, .routed = 1,
      .weighting = ON_ROWS },
    { .name = "dw2 alone, nothing saved", .dtype = GMM_BF16, .without = DX | DPROBS | DW1 | DB1 | DB2, .bias = 1,
      .weighting = ON_ROWS, .save = GMM_SAVE_NOTHING },
    { .name = "db2 alone", .dtype = GMM_BF16, .without = DX | DPROBS | DW1 | DW2 | DB1, .bias = 1,
      .weighting = ON_SUM },
    { .name = "rows saved", .dtype = GMM_BF16, .save_rows = 1, .weighting = ON_ROWS, .sizes = 1 },
    { .name = "rows saved, nothing else", .dtype = GMM_F32, .save_rows = 1, .weighting = ON_SUM, .align = 7,
      .save = GMM_SAVE_NOTHING, .bias = 1, .routed = 1 },
    { .name = "rows saved, delayed", .dtype = GMM_BF16, .save_rows = 1, .weighting = ON_ROWS, .delay = 1,
      .dropped = 30, .main_grad = 1 },
    { .name = "rows saved, capacity 50, without dw1", .dtype = GMM_F16, .save_rows = 1, .weighting = ON_ROWS,
      .capacity = 50, .without = DW1 },
    { .name = "nothing wanted", .dtype = GMM_BF16, .without = DX | DPROBS | DW1 | DW2, .weighting = ON_ROWS,
      .save = GMM_SAVE_NOTHING },
};

static moe_spec complete(moe_spec s) {
    if (s.tokens == 0) s.tokens = 37;
    if (s.tokens < 0) s.tokens = 0;
    if (!s.experts) s.experts = 5;
    if (!s.topk) s.topk = 3;
    if (!s.hidden) s.hidden = 64;
    if (!s.ffn) s.ffn = 96;
    if (s.recipe) s.dtype = GMM_BF16;
    return s;
}
static void cases(int arg) {
    moe_spec s = complete(specs[arg]);
    equals_calls(&s);
    s.gathers = 1;
    if (T.gpu && !s.recipe) equals_calls(&s);
}
/* The layer hands options.fuse to its MLP, and is refused where the MLP alone would be. arg: recipe + 1. */
static void fused(int arg) {
    moe_spec s = complete((moe_spec){ .name = "fused", .dtype = GMM_BF16, .ffn = 128, .weighting = ON_ROWS,
                                      .recipe = arg });
    const gmm_mat rows = gmm_mat_packed(s.dtype, NULL);
    gmm_groups groups = { .count = s.experts, .capacity = s.tokens * s.topk, .dtype = GMM_I32 };
    gmm_info info = GMM_ZERO;
    gmm_mlp alone;
    char text[8192];
    const void *joined;
    moe_case c;
    build(&c, &s);
    fill_layer(&c);
    c.d.options = &c.options;
    c.options.fuse = GMM_FUSE_ALWAYS;
    if (gmm_moe_query(T.ctx, GMM_OP_MOE_FWD, &c.d, &info) != GMM_OK) {
        T_CHECK(strstr(gmm_last_error(T.ctx), "cannot serve moe_fwd"), "\"%s\"", gmm_last_error(T.ctx));
        fill_mlp(&c, &alone);
        alone.groups = &groups, alone.options = &c.options, alone.x = alone.y = &rows;
        T_CHECK(gmm_mlp_query(T.ctx, GMM_OP_MLP_FWD, &alone, &info) == GMM_E_UNSUPPORTED, "its MLP alone is served");
        return;
    }
    T_OK(gmm_describe(T.ctx, GMM_OP_MOE_FWD, &c.d, text, sizeof text));
    T_CHECK(strstr(text, "with the activation"), "%s", text);
    T_OK(gmm_moe_fwd(T.ctx, &c.d, t_workspace(info.workspace_bytes), info.workspace_bytes, T.stream));
    joined = t_mat_bits(&c.o.out);
    fresh(&c);
    c.d.out = &c.o.out.mat, c.d.fault = c.o.fault;
    c.options.fuse = GMM_FUSE_NEVER;
    T_OK(gmm_moe_query(T.ctx, GMM_OP_MOE_FWD, &c.d, &info));
    T_OK(gmm_moe_fwd(T.ctx, &c.d, t_workspace(info.workspace_bytes), info.workspace_bytes, T.stream));
    t_same("out", joined, t_mat_bits(&c.o.out), (size_t)(s.tokens * c.out_cols * 2));
    T_OK(gmm_describe(T.ctx, GMM_OP_MOE_FWD, &c.d, text, sizeof text));
    T_CHECK(!strstr(text, "with the activation"), "%s", text);
}

/* Every recipe with every policy that it has: argument recipe + REF_RECIPES * policy. */
static const struct policy { const char *name; gmm_save save; gmm_backward_override override; } policies[] = {
    { "preact", GMM_SAVE_PREACT, GMM_BACKWARD_BY_RECIPE },
    { "preact and act", GMM_SAVE_PREACT_AND_ACT, GMM_BACKWARD_BY_RECIPE },
    { "nothing", GMM_SAVE_NOTHING, GMM_BACKWARD_BY_RECIPE },
    { "quantized", GMM_SAVE_QUANTIZED, GMM_BACKWARD_BY_RECIPE },
    { "preact e4m3", GMM_SAVE_PREACT_E4M3, GMM_BACKWARD_BY_RECIPE },
    { "quantized e4m3", GMM_SAVE_QUANTIZED_E4M3, GMM_BACKWARD_BY_RECIPE },
    { "high precision", GMM_SAVE_PREACT, GMM_BACKWARD_HIGH_PRECISION },
    { "dequantized", GMM_SAVE_PREACT, GMM_BACKWARD_DEQUANTIZED },
    { "nothing, dequantized", GMM_SAVE_NOTHING, GMM_BACKWARD_DEQUANTIZED },
    { "quantized, dequantized", GMM_SAVE_QUANTIZED, GMM_BACKWARD_DEQUANTIZED },
    { "quantized e4m3, dequantized", GMM_SAVE_QUANTIZED_E4M3, GMM_BACKWARD_DEQUANTIZED },
};
static void recipes(int arg) {
    const struct policy *p = &policies[arg / REF_RECIPES];
    moe_spec s = complete((moe_spec){ .name = p->name, .recipe = arg % REF_RECIPES + 1, .save = p->save,
                                      .override = p->override, .weighting = ON_ROWS, .sizes = 1, .dropped = 5 });
    if (mlp_saves_copies(p->save) && ref_recipe_of(arg % REF_RECIPES).recipe.input.dtype == GMM_NONE) {
        gmm_info info = GMM_ZERO;
        moe_case c;
        build(&c, &s);
        fill_layer(&c);
        T_REFUSED(GMM_E_CONFIG, gmm_moe_query(T.ctx, GMM_OP_MOE_FWD, &c.d, &info),
                  "gmm_moe_query: moe.mlp.config.save: ", "leaves the input", NULL);
        return;
    }
    equals_calls(&s);
    s.weighting = ON_SUM;
    s.delay = s.save_rows = s.overwrite_saved = 1;
    equals_calls(&s);
    s.save_rows = s.delay = 0;
    equals_calls(&s);
    s.delay = 1;
    s.overwrite_saved = 0;
    s.weighting = ON_ROWS;
    s.routed = s.cache = s.bias = 1;
    s.align = 16;
    equals_calls(&s);
}

/* Any layer. */
static void drawn(int arg) {
    static const gmm_dtype dtypes[] = { GMM_F32, GMM_F16, GMM_BF16 };
    moe_spec s = { .name = "drawn" };
    (void)arg;
    s.recipe = t_int(0, 2) ? 0 : (int)t_int(1, REF_RECIPES);
    s.dtype = s.recipe ? GMM_BF16 : dtypes[t_int(0, 2)];
    s.out = dtypes[t_int(0, 2)];
    s.dout = t_int(0, 1) ? s.dtype : dtypes[t_int(0, 2)];
    s.tokens = t_int(0, 9) ? t_draw_size(60, 300) : 0;
    s.experts = (int)t_draw_size(8, 60);
    s.routed = (int)t_int(0, 1);
    s.topk = (int)t_int(1, s.routed && s.experts < 6 ? s.experts : 6);
    s.used = (int)t_int(1, s.experts);
    s.hidden = s.recipe ? 32 * t_int(1, 4) : t_draw_size(60, 200);
    s.ffn = s.recipe ? 32 * t_int(1, 4) : t_draw_size(60, 200);
    s.hidden_out = t_int(0, 1) ? 0 : s.recipe ? 32 * t_int(1, 3) : t_draw_size(60, 200);
    s.bias = (int)t_int(0, 1);
    s.weighting = s.routed ? (enum weighting)t_int(1, 2) : (enum weighting)t_int(0, 2);
    s.save = (gmm_save)t_int(0, 2);
    if (s.recipe) s.override = (gmm_backward_override)t_int(0, 2);
    s.delay = (int)t_int(0, 1);
    s.cache = s.recipe && t_int(0, 1);
    s.sizes = (int)t_int(0, 1);
    s.align = (int)t_int(0, 3) * 5;
    s.dropped = (int)t_int(0, 1) * (int)t_int(0, 60);
    s.capacity = t_int(0, 2) ? 0 : t_int(1, s.tokens * s.topk + 20);
    s.main_grad = (int)t_int(0, 1);
    s.without = t_int(0, 1) ? 0 : (int)t_int(0, 127);
    s.save_rows = t_int(0, 2) == 0;
    s.overwrite_saved = (int)t_int(0, 1);
    equals_calls(&s);
}

/* --------------------------------------------------------------------------------------------- fp64 reference --- */

/* The loss sum(out . dout) + aux_loss + z_loss of a small layer in fp64, and by central differences its gradients. */
typedef struct model {
    const moe_spec *s;
    int64_t f1, out_cols;
    double *x, *logits, *w1, *w2, *b1, *b2, *probs, *dout;
    const int32_t *indices; /* that the library has chosen */
    double *out;            /* of the last call */
} model;

/* What a token's row becomes in one expert, before it is weighted. */
static void expert_out(const model *m, const double *x, int e, double *y) {
    const moe_spec *s = m->s;
    const int64_t H = s->hidden, F = s->ffn, O = m->out_cols;
    double z[64], h[32];
    for (int64_t n = 0; n < 2 * F; n++) {
        z[n] = m->b1[e * 2 * F + n];
        for (int64_t k = 0; k < H; k++) z[n] += m->w1[(e * 2 * F + n) * H + k] * x[k];
    }
    for (int64_t j = 0; j < F; j++) h[j] = z[j] / (1.0 + exp(-z[j])) * z[F + j];
    for (int64_t o = 0; o < O; o++) {
        y[o] = m->b2[e * O + o];
        for (int64_t j = 0; j < F; j++) y[o] += m->w2[(e * O + o) * F + j] * h[j];
    }
}
static double loss_of(model *m) {
    const moe_spec *s = m->s;
    const int E = s->experts, k = s->topk;
    double loss = 0, q[16] = { 0 }, counts[16] = { 0 }, y[16];
    for (int64_t t = 0; t < s->tokens; t++) {
        double p[16], sum = 0, chosen = 0;
        for (int e = 0; e < E; e++) sum += p[e] = exp(m->logits[t * E + e]);
        for (int e = 0; e < E; e++) q[e] += p[e] / sum;
        if (s->routed) loss += 0.001 / (double)s->tokens * log(sum) * log(sum);
        for (int i = 0; i < k; i++)
            if (m->indices[t * k + i] >= 0) chosen += p[m->indices[t * k + i]];
        for (int64_t o = 0; o < m->out_cols; o++) m->out[t * m->out_cols + o] = 0;
        for (int i = 0; i < k; i++) {
            const int e = m->indices[t * k + i];
            const double weight = s->routed && e >= 0 ? p[e] / chosen : m->probs[t * k + i];
            if (e < 0) continue;
            counts[e]++;
            expert_out(m, m->x + t * s->hidden, e, y);
            for (int64_t o = 0; o < m->out_cols; o++) m->out[t * m->out_cols + o] += weight * y[o];
        }
        for (int64_t o = 0; o < m->out_cols; o++) loss += m->out[t * m->out_cols + o] * m->dout[t * m->out_cols + o];
    }
    for (int e = 0; e < E && s->routed; e++)
        loss += 0.01 * E / (k * (double)s->tokens * (double)s->tokens) * counts[e] * q[e];
    return loss;
}
/* `got` are the derivatives of the loss by each of `values`. */
static void check_slopes(model *m, const char *what, double *values, const double *got, int64_t n) {
    double *want = (double *)t_host((size_t)n * 8), *bound = (double *)t_host((size_t)n * 8), most = 0;
    for (int64_t i = 0; i < n; i++) {
        const double old = values[i], step = 1e-5;
        values[i] = old + step;
        want[i] = loss_of(m);
        values[i] = old - step;
        want[i] = (want[i] - loss_of(m)) / (2 * step);
        values[i] = old;
        most = fmax(most, fabs(want[i]));
    }
    T_CHECK(most > 1e-3, "%s: no gradient", what);
    for (int64_t i = 0; i < n; i++) bound[i] = 1e-5 * (most + fabs(want[i]));
    t_near(what, got, want, bound, n);
}
#define check_slopes(...) T_CALL(check_slopes, __VA_ARGS__)

/* Argument: 1 = routed, 2 = weighted sum. */
static void reference(int arg) {
    const moe_spec s = { .name = "reference", .dtype = GMM_F32, .tokens = 7, .experts = 5, .topk = 2, .hidden = 6,
                         .ffn = 4, .hidden_out = 3, .bias = 1, .dropped = 20, .routed = arg & 1,
                         .weighting = arg & 2 ? ON_SUM : ON_ROWS };
    model m = GMM_ZERO;
    moe_case c;
    double bound[21];
    build(&c, &s);
    layer_fwd(&c, 0);
    layer_bwd(&c);
    m.s = &c.s;
    m.out_cols = c.out_cols;
    m.x = c.x.v;
    m.logits = c.logits.v;
    m.w1 = c.w1.v;
    m.w2 = c.w2.v;
    m.b1 = c.b1.v;
    m.b2 = c.b2.v;
    m.dout = c.dout.v;
    m.probs = t_floats_get(c.o.probs, c.slots);
    m.indices = (const int32_t *)t_get(c.o.indices, (size_t)c.slots * 4);
    m.out = (double *)t_host((size_t)(s.tokens * c.out_cols) * 8);
    (void)loss_of(&m);
    for (int i = 0; i < 21; i++) bound[i] = 2e-5;
    t_near("out", t_mat_get(&c.o.out), m.out, bound, s.tokens * c.out_cols);
    check_slopes(&m, "dx", m.x, t_mat_get(&c.o.dx), s.tokens * s.hidden);
    check_slopes(&m, "dw1", m.w1, t_mat_get(&c.o.dw[0]), s.experts * c.f1 * s.hidden);
    check_slopes(&m, "dw2", m.w2, t_mat_get(&c.o.dw[1]), s.experts * c.out_cols * s.ffn);
    check_slopes(&m, "db1", m.b1, t_mat_get(&c.o.db[0]), s.experts * c.f1);
    check_slopes(&m, "db2", m.b2, t_mat_get(&c.o.db[1]), s.experts * c.out_cols);
    if (s.routed) check_slopes(&m, "dlogits", m.logits, t_mat_get(&c.o.dlogits), s.tokens * s.experts);
    else check_slopes(&m, "dprobs", m.probs, t_floats_get(c.o.dprobs, c.slots), c.slots);
}

/* ----------------------------------------------------------------------------------------------------- Memory --- */

/* The layout: parts behind one another, and the maps in them. */
static void layout(int arg) {
    const int op = arg % 2 ? GMM_OP_MOE_BWD : GMM_OP_MOE_FWD;
    moe_spec s = complete((moe_spec){ .name = "layout", .dtype = GMM_BF16, .align = 16, .dropped = 10,
                                      .weighting = arg & 2 ? ON_ROWS : ON_SUM, .save_rows = arg / 4 });
    gmm_moe_layout l = GMM_ZERO, cut = GMM_ZERO;
    const char *const names[] = { "row_of", "slot_of", "sizes", s.weighting == ON_SUM ? "y" : "row_probs",
                                  s.save_rows ? "x" : "preact", "preact" };
    const int count = 5 + s.save_rows;
    int64_t live = 0;
    moe_case c;
    composed sep;
    const char *saved;
    build(&c, &s);
    separate_fwd(&c, &sep, 0);
    layer_fwd(&c, 0);
    T_OK(gmm_moe_saved_query(T.ctx, (gmm_op)op, &c.d, &l));
    T_CHECK(l.count == count && l.bytes == (int64_t)c.d.saved_bytes, "%d parts, %lld bytes", l.count,
            (long long)l.bytes);
    for (int i = 0; i < l.count; i++) {
        const gmm_saved_part *p = &l.part[i];
        const int64_t end = i + 1 < l.count ? l.part[i + 1].offset : l.bytes;
        T_CHECK(!strcmp(p->name, names[i]), "part %d is %s", i, p->name);
        T_CHECK(p->offset % 256 == 0 && p->offset + p->bytes <= end && end - p->offset - p->bytes < 256, "part %s",
                p->name);
    }
    T_CHECK(l.part[count].name == NULL && l.part[count].bytes == 0, "parts behind the last");
    saved = (const char *)t_get(c.d.saved, c.d.saved_bytes);
    t_same("row_of", saved + l.part[0].offset, t_get(sep.map.row_of, (size_t)c.slots * 4), (size_t)c.slots * 4);
    t_same("slot_of", saved + l.part[1].offset, t_get(sep.map.slot_of, (size_t)sep.capacity * 4),
           (size_t)sep.capacity * 4);
    t_same("sizes", saved + l.part[2].offset, t_get(sep.map.sizes, (size_t)s.experts * 4), (size_t)s.experts * 4);
    for (int e = 0; e < s.experts; e++) live += ((const int32_t *)(const void *)(saved + l.part[2].offset))[e];
    if (s.save_rows)
        t_same("x", saved + l.part[4].offset, t_mat_bits(&sep.rows), (size_t)(live * s.hidden * 2));
    cut.struct_size = (uint32_t)sizeof cut + 8;
    T_REFUSED(GMM_E_VERSION, gmm_moe_saved_query(T.ctx, (gmm_op)op, &c.d, &cut), "gmm_moe_saved_query: layout", NULL);
    T_REFUSED(GMM_E_NULL, gmm_moe_saved_query(T.ctx, (gmm_op)op, &c.d, NULL), "gmm_moe_saved_query: layout", NULL);
}

/* Bytes per token of models' layers, on this engine: the layer saves neither rows of x nor y, and needs no more memory
   than separate calls but for probabilities of rows and slots. --verbose prints the table. */
static const struct shape { const char *name; int64_t hidden, ffn; int experts, topk; } shapes[] = {
    { "dsv3, 8 of 256, 32 here", 7168, 2048, 32, 8 },
    { "qwen3, 8 of 128", 4096, 1536, 128, 8 },
    { "mixtral, 2 of 8", 4096, 14336, 8, 2 },
};
static void memory(int arg) {
    enum { TOKENS = 4096 };
    const struct shape *h = &shapes[arg / 2];
    const int64_t slots = (int64_t)TOKENS * h->topk, bits = 2;
    const gmm_mat x = gmm_mat_packed(GMM_BF16, NULL), w = x, g32 = gmm_mat_packed(GMM_F32, NULL);
    const gmm_grad grad = { .mat = &g32 };
    gmm_mlp_config config = { .hidden = h->hidden, .ffn = h->ffn, .act = gmm_act_of(GMM_ACT_PRESET_SWIGLU),
                              .prob = !(arg % 2) };
    gmm_mlp m = { .config = &config, .w1 = &w, .w2 = &w, .dw1 = &grad, .dw2 = &grad };
    gmm_groups groups = { .count = h->experts, .capacity = slots, .dtype = GMM_I32 };
    float one[1];
    gmm_moe d = { .experts = h->experts, .tokens = TOKENS, .topk = h->topk, .mlp = &m, .x = &x, .out = &x, .dout = &x,
                  .dx = &x, .probs = one, .dprobs = one };
    gmm_info fwd = GMM_ZERO, bwd = GMM_ZERO, mfwd = GMM_ZERO, mbwd = GMM_ZERO;
    /* separate calls: rows of x are saved beside the maps; y, dy and drows are buffers beside the workspace */
    int64_t separate_saved, separate_peak, peak, row = h->hidden * bits, maps = slots * 8 + slots * 4;
    T_OK(gmm_moe_query(T.ctx, GMM_OP_MOE_FWD, &d, &fwd));
    T_OK(gmm_moe_query(T.ctx, GMM_OP_MOE_BWD, &d, &bwd));
    m.groups = &groups;
    m.x = m.y = m.dy = m.dx = &x;
    m.prob = config.prob ? one : NULL;
    m.dprob = config.prob ? one : NULL;
    T_OK(gmm_mlp_query(T.ctx, GMM_OP_MLP_FWD, &m, &mfwd));
    T_OK(gmm_mlp_query(T.ctx, GMM_OP_MLP_BWD, &m, &mbwd));
    separate_saved = (int64_t)mfwd.saved_bytes + slots * row + maps + (config.prob ? 0 : slots * row);
    separate_peak = separate_saved + (int64_t)mbwd.workspace_bytes + 2 * slots * row;
    if (separate_peak < separate_saved + (int64_t)mfwd.workspace_bytes + (config.prob ? slots * row : 0))
        separate_peak = separate_saved + (int64_t)mfwd.workspace_bytes + (config.prob ? slots * row : 0);
    peak = (int64_t)(bwd.workspace_bytes > fwd.workspace_bytes ? bwd.workspace_bytes : fwd.workspace_bytes) +
           (int64_t)fwd.saved_bytes;
    if (T.verbose)
        printf("  %s, probabilities %s, engine %s: bytes per token saved %lld (separate %lld), saved and workspace "
               "%lld (separate %lld)\n", h->name, config.prob ? "in the MLP" : "in the combine",
               gmm_engine_name(T.engine), (long long)((int64_t)fwd.saved_bytes / TOKENS),
               (long long)(separate_saved / TOKENS), (long long)(peak / TOKENS), (long long)(separate_peak / TOKENS));
    T_CHECK(fwd.saved_bytes == bwd.saved_bytes, "saved_bytes %zu and %zu", fwd.saved_bytes, bwd.saved_bytes);
    T_CHECK((int64_t)fwd.saved_bytes <= separate_saved - slots * row + 2048, "saved %zu, separate %lld",
            fwd.saved_bytes, (long long)separate_saved);
    { /* of x, dy and dx backward keeps at most dx, and on GPUs, which permute all three, a second one */
        const int64_t rows = (1 + (T.gpu != 0)) * slots * row, small = 8 * slots + 4096;
        T_CHECK((int64_t)bwd.workspace_bytes <= (int64_t)mbwd.workspace_bytes + rows + small,
                "workspace %zu, of the MLP %zu", bwd.workspace_bytes, mbwd.workspace_bytes);
    }
    T_CHECK(peak <= separate_peak + 2 * 4 * slots + 4096, "peak %lld, separate %lld", (long long)peak,
            (long long)separate_peak);
}

/* --------------------------------------------------------------------------------------------------- Refusals --- */

/* Calls of one descriptor with memory that is large enough for what is refused. */
typedef struct refusing { moe_case c; void *workspace; size_t bytes; } refusing;
static gmm_status call(refusing *r, gmm_op op) {
    return (op == GMM_OP_MOE_FWD ? gmm_moe_fwd : gmm_moe_bwd)(T.ctx, &r->c.d, r->workspace, r->bytes, T.stream);
}
static void ready_to_refuse(refusing *r, const moe_spec *s) {
    gmm_info info = GMM_ZERO;
    build(&r->c, s);
    layer_fwd(&r->c, 0);
    T_OK(gmm_moe_query(T.ctx, GMM_OP_MOE_BWD, &r->c.d, &info));
    r->bytes = r->c.workspace > info.workspace_bytes ? r->c.workspace : info.workspace_bytes;
    r->workspace = t_workspace(r->bytes);
    r->c.d.deferred = info.deferred_bytes ? t_workspace(info.deferred_bytes) : NULL;
    r->c.d.deferred_bytes = info.deferred_bytes;
}
/* Changes the descriptor, expects the refusal, and undoes the change. */
#define REFUSED(status, op, change, ...) \
    do { \
        const moe_case before_ = r.c; \
        change; \
        T_REFUSED(status, call(&r, op), op == GMM_OP_MOE_FWD ? "gmm_moe_fwd: " : "gmm_moe_bwd: ", __VA_ARGS__, NULL); \
        r.c = before_; \
        r.c.mlp.config = &r.c.config; \
    } while (0)
#define FWD GMM_OP_MOE_FWD
#define BWD GMM_OP_MOE_BWD

static void refused_fields(int arg) {
    const moe_spec s = complete((moe_spec){ .name = "refused", .dtype = GMM_BF16, .weighting = ON_ROWS, .bias = 1 });
    gmm_mat f32 = gmm_mat_packed(GMM_F32, NULL);
    gmm_options wrong = { .engine = (gmm_engine)77 };
    gmm_groups groups = GMM_ZERO;
    gmm_info info = GMM_ZERO;
    refusing r;
    (void)arg;
    ready_to_refuse(&r, &s);
    f32.data = r.c.x.data;
    REFUSED(GMM_E_VERSION, FWD, r.c.d.struct_size = sizeof r.c.d + 8, "moe: struct_size");
    REFUSED(GMM_E_ARG, FWD, r.c.d.experts = 0, "moe.experts: 0 must be >= 1", "T=37");
    REFUSED(GMM_E_ARG, FWD, r.c.d.tokens = -1, "moe.tokens: -1 must be >= 0");
    REFUSED(GMM_E_ARG, FWD, r.c.d.tokens = 1 << 30, "moe.tokens: 1073741824 times topk 3");
    REFUSED(GMM_E_ARG, FWD, r.c.d.topk = 0, "moe.topk: 0 must be >= 1");
    REFUSED(GMM_E_ARG, FWD, r.c.d.align = -2, "moe.align: -2 must be >= 0");
    REFUSED(GMM_E_ARG, FWD, r.c.d.save_rows = 2, "moe.save_rows: 2 must be 0 or 1");
    REFUSED(GMM_E_ARG, BWD, r.c.d.reserved = 5, "moe.save_rows: 0 must be 0 or 1, and reserved 5");
    REFUSED(GMM_E_ARG, FWD, r.c.d.capacity = -5, "moe.capacity: -5 must be >= 0");
    REFUSED(GMM_E_ARG, FWD, r.c.d.capacity = (int64_t)1 << 31, "moe.capacity: 2147483648");
    REFUSED(GMM_E_ARG, FWD, r.c.d.options = &wrong, "moe.options.engine: 77");
    REFUSED(GMM_E_NULL, FWD, r.c.d.mlp = NULL, "moe.mlp is NULL");
    REFUSED(GMM_E_CONFIG, FWD, r.c.mlp.groups = &groups, "moe.mlp.groups is set", "the layer passes");
    REFUSED(GMM_E_CONFIG, FWD, r.c.mlp.options = &wrong, "moe.mlp.options is set");
    REFUSED(GMM_E_CONFIG, FWD, r.c.mlp.x = &r.c.x.mat, "moe.mlp.x is set");
    REFUSED(GMM_E_CONFIG, FWD, r.c.mlp.y = &r.c.x.mat, "moe.mlp.y is set");
    REFUSED(GMM_E_CONFIG, FWD, r.c.mlp.dy = &r.c.x.mat, "moe.mlp.dy is set");
    REFUSED(GMM_E_CONFIG, FWD, r.c.mlp.dx = &r.c.x.mat, "moe.mlp.dx is set");
    REFUSED(GMM_E_CONFIG, FWD, r.c.mlp.prob = r.c.probs, "moe.mlp.prob is set");
    REFUSED(GMM_E_CONFIG, FWD, r.c.mlp.dprob = r.c.probs, "moe.mlp.dprob is set");
    REFUSED(GMM_E_CONFIG, FWD, r.c.mlp.saved_bytes = 1, "moe.mlp.saved is set");
    REFUSED(GMM_E_CONFIG, FWD, r.c.mlp.deferred_bytes = 1, "moe.mlp.deferred is set");
    REFUSED(GMM_E_CONFIG, FWD, r.c.mlp.x_index = r.c.indices, "moe.mlp.x_index is set");
    REFUSED(GMM_E_CONFIG, FWD, r.c.mlp.dy_index = r.c.indices, "moe.mlp.dy_index is set");
    REFUSED(GMM_E_CONFIG, FWD, r.c.mlp.index_rows = 3, "moe.mlp.index_rows is set");
    REFUSED(GMM_E_CONFIG, FWD, r.c.mlp.index_div = 3, "moe.mlp.index_div is set");
    REFUSED(GMM_E_NULL, FWD, r.c.mlp.config = NULL, "moe.mlp.config is NULL");
    REFUSED(GMM_E_ARG, FWD, r.c.config.topk = 2, "moe.mlp.config.topk: 2 must be that of the layer, 3");
    REFUSED(GMM_E_CONFIG, FWD, r.c.config.ffn = 0, "moe.mlp.config.ffn: 0 must be >= 1");
    REFUSED(GMM_E_CONFIG, FWD, r.c.config.prob_on_bias2 = 0, "moe.mlp.config.prob_on_bias2: 0 with topk 3");
    REFUSED(GMM_E_ARG, FWD, r.c.config.act.struct_size = 4,
            "moe.mlp.config.act.struct_size: 4 is too small for any version");
    REFUSED(GMM_E_ARG, FWD, r.c.mlp.reserved = 1, "moe.mlp.reserved: 1");
    REFUSED(GMM_E_NULL, FWD, r.c.mlp.w1 = NULL, "moe.mlp.w1 is NULL");
    REFUSED(GMM_E_NULL, FWD, r.c.mlp.w2 = NULL, "moe.mlp.w2 is NULL");
    REFUSED(GMM_E_NULL, FWD, r.c.mlp.b2 = NULL, "moe.mlp.b2 is NULL");
    REFUSED(GMM_E_OVERFLOW, FWD, (r.c.config.hidden = r.c.config.hidden_out = (int64_t)1 << 40, r.c.d.tokens = 1,
                                  r.c.d.capacity = INT32_MAX), "moe.mlp.config.hidden_out: 2147483647 rows",
            "do not fit 64 bits");
    REFUSED(GMM_E_NULL, FWD, r.c.d.x = NULL, "moe.x is NULL");
    REFUSED(GMM_E_DTYPE, FWD, r.c.d.x = &f32, "moe.x: dtype f32 must be that of moe.mlp.w2, bf16");
    REFUSED(GMM_E_NULL, FWD, r.c.d.out = NULL, "moe.out is NULL");
    REFUSED(GMM_E_NULL, FWD, r.c.d.indices = NULL, "moe.indices is NULL, and so is route", "R=111");
    REFUSED(GMM_E_NULL, FWD, r.c.d.probs = NULL, "moe.probs is NULL for 111 values");
    REFUSED(GMM_E_NULL, FWD, (r.c.d.probs = NULL, r.c.d.dprobs = NULL), "moe.probs is NULL for 111 values");
    REFUSED(GMM_E_WORKSPACE, FWD, r.c.d.saved_bytes -= 1, "moe.saved has");
    REFUSED(GMM_E_ALIGN, FWD, r.c.d.saved = (char *)r.c.d.saved + 64, "moe.saved: ", "256 bytes");
    REFUSED(GMM_E_WORKSPACE, FWD, r.bytes = 100, "workspace_bytes: 100 must be >=");
    REFUSED(GMM_E_NULL, BWD, r.c.d.dout = NULL, "moe.dout is NULL");
    REFUSED(GMM_E_NULL, BWD, r.c.d.x = NULL, "moe.x is NULL");
    REFUSED(GMM_E_NULL, BWD, r.c.d.saved = NULL, "moe.saved is NULL for");
    T_REFUSED(GMM_E_ARG, gmm_moe_query(T.ctx, GMM_OP_MLP_FWD, &r.c.d, &info), "gmm_moe_query: op: mlp_fwd", NULL);
    T_REFUSED(GMM_E_NULL, gmm_moe_query(T.ctx, FWD, &r.c.d, NULL), "gmm_moe_query: info is NULL", NULL);
    T_REFUSED(GMM_E_NULL, gmm_moe_query(T.ctx, FWD, NULL, &info), "gmm_moe_query: moe is NULL", NULL);
    T_REFUSED(GMM_E_ARG, gmm_moe_fire_hooks(T.ctx, FWD, &r.c.d, T.stream), "gmm_moe_fire_hooks: op: moe_fwd", NULL);
    T_CHECK(gmm_moe_fwd(NULL, &r.c.d, NULL, 0, NULL) == GMM_E_NULL, "no context");
}

static void refused_routes(int arg) {
    const moe_spec s = complete((moe_spec){ .name = "refused", .dtype = GMM_BF16, .weighting = ON_SUM, .routed = 1 });
    const gmm_options options = GMM_ZERO;
    refusing r;
    (void)arg;
    ready_to_refuse(&r, &s);
    REFUSED(GMM_E_ARG, FWD, r.c.route.experts = 4, "moe.route.experts: 4 must be that of the layer, 5");
    REFUSED(GMM_E_ARG, FWD, r.c.route.tokens = 4, "moe.route.tokens: 4 must be that of the layer, 37");
    REFUSED(GMM_E_ARG, FWD, r.c.route.topk = 4, "moe.route.topk: 4 must be that of the layer, 3");
    REFUSED(GMM_E_CONFIG, FWD, r.c.route.options = &options, "moe.route.options is set");
    REFUSED(GMM_E_CONFIG, BWD, r.c.route.dprobs = r.c.o.dprobs, "moe.route.dprobs is set");
    REFUSED(GMM_E_CONFIG, FWD, r.c.d.indices = r.c.indices, "moe.indices is set beside route");
    REFUSED(GMM_E_CONFIG, FWD, r.c.d.probs = r.c.probs, "moe.probs is set beside route");
    REFUSED(GMM_E_NULL, FWD, r.c.route.logits = NULL, "moe.route.logits is NULL");
    REFUSED(GMM_E_NULL, FWD, r.c.route.indices = NULL, "moe.route.indices is NULL");
    REFUSED(GMM_E_NULL, FWD, r.c.route.probs = NULL, "moe.route.probs is NULL");
    REFUSED(GMM_E_ARG, FWD, r.c.route.normalize = 2, "moe.route.normalize: 2");
    REFUSED(GMM_E_NULL, BWD, r.c.route.indices = NULL, "moe.route.indices is NULL");
    REFUSED(GMM_E_NULL, BWD, r.c.route.probs = NULL, "moe.route.probs is NULL");
    REFUSED(GMM_E_NULL, BWD, r.c.route.counts = NULL, "moe.route.counts is NULL");
    REFUSED(GMM_E_CONFIG, FWD, (r.c.config.prob_on_input = 1, r.c.config.topk = 3), "moe.mlp.config.prob_on_input");
    r.c.s.weighting = ON_ROWS; /* memory */
    REFUSED(GMM_E_ARG, FWD, r.c.d.out = &r.c.x.mat, "moe.out", "overlaps");
    REFUSED(GMM_E_ARG, FWD, r.c.mlp.w1 = &r.c.o.out.mat, "moe.out", "overlaps moe.mlp.w1");
    REFUSED(GMM_E_ARG, FWD, r.c.route.probs = (float *)r.c.o.out.data, "overlaps");
    REFUSED(GMM_E_ARG, FWD, r.c.d.sizes = r.c.o.indices, "overlaps");
    REFUSED(GMM_E_ARG, FWD, r.workspace = r.c.d.saved, "overlaps");
    REFUSED(GMM_E_ARG, BWD, r.c.d.dx = &r.c.dout.mat, "overlaps");
    REFUSED(GMM_E_ARG, BWD, r.c.o.gw[0].mat = &r.c.o.dw[1].mat, "overlaps");
    REFUSED(GMM_E_ARG, BWD, r.c.d.dprobs = (float *)r.c.d.saved, "overlaps");
}

/* A queue that is full or missing, before anything is launched. */
static void refused_queue(int arg) {
    const moe_spec s = complete((moe_spec){ .name = "queue", .dtype = GMM_BF16, .weighting = ON_ROWS, .delay = 1 });
    refusing r;
    (void)arg;
    ready_to_refuse(&r, &s);
    REFUSED(GMM_E_NULL, BWD, r.c.mlp.queue = NULL, "moe.mlp.queue is NULL");
    REFUSED(GMM_E_STATE, BWD, r.c.queue.count = 1, "moe.mlp.queue is full with 1 of 1 entries");
    REFUSED(GMM_E_WORKSPACE, BWD, r.c.d.deferred_bytes -= 1, "moe.deferred has");
    REFUSED(GMM_E_NULL, BWD, r.c.d.deferred = NULL, "moe.deferred is NULL");
    r.c.mlp.queue = &r.c.queue;
    T_OK(call(&r, BWD));
    T_CHECK(r.c.queue.count == 1, "the queue holds %d", (int)r.c.queue.count);
}

/* A recipe's feature alignment, and a weight of another dtype; probabilities that are in x already. */
static void refused_recipes(int arg) {
    const moe_spec s = complete((moe_spec){ .name = "recipe", .recipe = REF_MXFP8 + 1, .weighting = ON_ROWS });
    refusing r;
    (void)arg;
    ready_to_refuse(&r, &s);
    REFUSED(GMM_E_ARG, FWD, r.c.config.hidden = 48, "moe.mlp.config.hidden: 48 must be a multiple of 32");
    REFUSED(GMM_E_CONFIG, FWD, r.c.mlp.quant = NULL, "moe.mlp.config.recipe");
    REFUSED(GMM_E_ARG, FWD, r.c.recipe.input.struct_size = 4,
            "moe.mlp.quant.recipe.input.struct_size: 4 is too small for any version");
    REFUSED(GMM_E_CONFIG, FWD, r.c.config.recipe = GMM_RECIPE_NONE, "moe.mlp.config.recipe is none");
    REFUSED(GMM_E_CONFIG, FWD, (r.c.config.prob = 0, r.c.config.prob_on_input = 1), "moe.mlp.config.prob_on_input");
}

/* Faults: dropped rows and indices out of range are reported, and with gmm_config.verify an index is refused. */
static void faults(int arg) {
    const moe_spec s = complete((moe_spec){ .name = "faults", .dtype = GMM_BF16, .weighting = ON_ROWS,
                                            .capacity = arg ? 0 : 50 });
    const uint32_t want = arg ? (uint32_t)GMM_FAULT_INDEX : (uint32_t)GMM_FAULT_CAPACITY;
    gmm_info info = GMM_ZERO;
    moe_outputs reported;
    moe_case c;
    build(&c, &s);
    if (arg) {
        int32_t *bad = (int32_t *)t_get(c.indices, (size_t)c.slots * 4);
        bad[17] = 5;
        c.indices = (int32_t *)t_in(bad, (size_t)c.slots * 4);
    }
    layer_fwd(&c, 0);
    layer_bwd(&c);
    T_CHECK(*(const uint32_t *)t_get(c.o.fault, 4) == want, "fault %u", *(const uint32_t *)t_get(c.o.fault, 4));
    reported = c.o;
    fresh(&c);
    fill_layer(&c);
    c.d.fault = NULL; /* the same rows are dropped */
    T_OK(gmm_moe_query(T.ctx, GMM_OP_MOE_FWD, &c.d, &info));
    T_OK(gmm_moe_fwd(T.ctx, &c.d, t_workspace(info.workspace_bytes), info.workspace_bytes, T.stream));
    same_mat("out without a fault word", &reported.out, &c.o.out);
    if (arg) {
        gmm_config config = T.config;
        const size_t bytes = c.workspace;
        void *workspace = t_workspace(bytes);
        config.verify = 1;
        T.ctx = t_context(&config);
        T_REFUSED(GMM_E_ARG, gmm_moe_fwd(T.ctx, &c.d, workspace, bytes, T.stream),
                  "gmm_moe_fwd: moe.indices: [17] is 5", NULL);
        c.indices = NULL;
        build(&c, &s);
        layer_fwd(&c, 0);
        layer_bwd(&c);
    }
}

/* ------------------------------------------------------------------------------------------------------ Hooks --- */

typedef struct hooked { moe_case c; gmm_mat late[2]; char log[32]; void *over; gmm_status fails; } hooked;
static void note(hooked *h, char what) { h->log[strlen(h->log)] = what; }
static void ready(void *user, gmm_param param, gmm_stream stream) {
    (void)stream;
    note((hooked *)user, "1a2b"[param]);
}
/* Sets the address of the weight that a product is about to read: x, y in forward, p, q in dgrad. */
static gmm_status need(void *user, gmm_param param, gmm_op op, gmm_stream stream) {
    hooked *h = (hooked *)user;
    const int i = param == GMM_PARAM_W2;
    (void)stream;
    note(h, (op == GMM_OP_LINEAR_FWD ? "xy" : "pq")[i]);
    h->late[i].data = h->over && i ? h->over : i ? h->c.w2.data : h->c.w1.data;
    return h->fails;
}

/* Weights that become known in the hook, and the order of the hooks. Argument: delayed. */
static void hooks(int arg) {
    const moe_spec s = complete((moe_spec){ .name = "hooks", .dtype = GMM_BF16, .weighting = ON_ROWS, .bias = 1,
                                            .delay = arg, .save = GMM_SAVE_NOTHING });
    const char *const backward = arg ? "xqbap" : "xq2b1ap", *const queued = "21";
    const gmm_grad_hooks functions = { NULL, ready, need };
    gmm_grad_hooks with;
    moe_outputs known;
    gmm_info info = GMM_ZERO, bwd = GMM_ZERO;
    void *workspace;
    hooked h;
    memset(&h, 0, sizeof h);
    build(&h.c, &s);
    layer_fwd(&h.c, 0);
    layer_bwd(&h.c);
    known = h.c.o;
    fresh(&h.c);
    fill_layer(&h.c);
    with = functions;
    with.user = &h;
    h.late[0] = h.c.w1.mat;
    h.late[1] = h.c.w2.mat;
    h.late[0].data = h.late[1].data = NULL;
    h.c.mlp.w1 = &h.late[0];
    h.c.mlp.w2 = &h.late[1];
    h.c.mlp.hooks = &with;
    T_OK(gmm_moe_query(T.ctx, GMM_OP_MOE_FWD, &h.c.d, &info));
    h.c.d.saved = t_workspace(info.saved_bytes);
    h.c.d.saved_bytes = info.saved_bytes;
    workspace = t_workspace(info.workspace_bytes);
    T_OK(gmm_moe_fwd(T.ctx, &h.c.d, workspace, info.workspace_bytes, T.stream));
    T_CHECK(!strcmp(h.log, "xy"), "hooks \"%s\" of forward", h.log);
    T_OK(gmm_moe_query(T.ctx, GMM_OP_MOE_BWD, &h.c.d, &info));
    h.c.d.deferred = info.deferred_bytes ? t_workspace(info.deferred_bytes) : NULL;
    h.c.d.deferred_bytes = info.deferred_bytes;
    h.late[0].data = h.late[1].data = NULL;
    memset(h.log, 0, sizeof h.log);
    T_OK(gmm_moe_bwd(T.ctx, &h.c.d, t_workspace(info.workspace_bytes), info.workspace_bytes, T.stream));
    T_CHECK(!strcmp(h.log, backward), "hooks \"%s\" of backward", h.log);
    if (arg) {
        memset(h.log, 0, sizeof h.log);
        T_OK(gmm_moe_query(T.ctx, GMM_OP_MLP_WGRAD, &h.c.d, &info));
        T_OK(gmm_mlp_wgrad(T.ctx, &h.c.queue, t_workspace(info.workspace_bytes), info.workspace_bytes, T.stream));
        T_CHECK(!strcmp(h.log, queued), "hooks \"%s\" of the queue", h.log);
    }
    same_outputs(&h.c, &known, &h.c.o, 1);
    memset(h.log, 0, sizeof h.log); /* as after a replay */
    T_OK(gmm_moe_fire_hooks(T.ctx, GMM_OP_MOE_BWD, &h.c.d, T.stream));
    T_OK(gmm_moe_fire_hooks(T.ctx, GMM_OP_MLP_WGRAD, &h.c.d, T.stream));
    T_CHECK(!strcmp(h.log, arg ? "ba21" : "2b1a"), "hooks \"%s\" of a replay", h.log);
    /* refused behind the beginning: an address in memory that the layer writes, and a status of the hook */
    T_OK(gmm_moe_query(T.ctx, GMM_OP_MOE_FWD, &h.c.d, &info));
    h.over = h.c.o.out.data;
    T_CHECK(gmm_moe_fwd(T.ctx, &h.c.d, workspace, info.workspace_bytes, T.stream) == GMM_E_ARG, "overlap");
    T_CHECK(strstr(gmm_last_error(T.ctx), "gmm_moe_fwd") && strstr(gmm_last_error(T.ctx), "overlaps"), "%s",
            gmm_last_error(T.ctx));
    T_OK(gmm_moe_query(T.ctx, GMM_OP_MOE_BWD, &h.c.d, &bwd));
    h.over = h.c.o.dx.data;
    T_CHECK(gmm_moe_bwd(T.ctx, &h.c.d, t_workspace(bwd.workspace_bytes), bwd.workspace_bytes, T.stream) == GMM_E_ARG,
            "overlap");
    T_CHECK(strstr(gmm_last_error(T.ctx), "gmm_moe_bwd") && strstr(gmm_last_error(T.ctx), "overlaps"), "%s",
            gmm_last_error(T.ctx));
    h.over = NULL;
    h.fails = GMM_E_STATE;
    T_CHECK(gmm_moe_fwd(T.ctx, &h.c.d, workspace, info.workspace_bytes, T.stream) == GMM_E_STATE, "status");
    T_CHECK(strstr(gmm_last_error(T.ctx), "gmm_moe_fwd: moe.mlp.hooks.need"), "%s", gmm_last_error(T.ctx));
}

/* gmm_describe: a line per step, those of the MLP behind it and indented once more. */
static void described(int arg) {
    const moe_spec s = complete((moe_spec){ .name = "described", .dtype = GMM_BF16, .weighting = ON_ROWS,
                                            .routed = 1 });
    static const char *const lines[2][6] = {
        { "moe_fwd: engine ", "\n  topk_fwd: ", "\n  permute_map: ", "\n  permute_fwd: ", "\n  mlp_fwd: ",
          "\n  unpermute_fwd: " },
        { "moe_bwd: engine ", "\n  mlp_bwd: ", "\n    linear_dgrad: ", "\n    linear_wgrad: ", "\n  permute_bwd: ",
          "\n  topk_bwd: " } };
    const gmm_op op = arg ? GMM_OP_MOE_BWD : GMM_OP_MOE_FWD;
    gmm_info info = GMM_ZERO;
    char text[8192], bytes[64];
    const char *at = text;
    moe_case c;
    build(&c, &s);
    fill_layer(&c);
    T_OK(gmm_moe_query(T.ctx, op, &c.d, &info));
    T_OK(gmm_describe(T.ctx, op, &c.d, text, sizeof text));
    (void)snprintf(bytes, sizeof bytes, "workspace %zu bytes", info.workspace_bytes);
    T_CHECK(strstr(text, bytes) && strstr(text, bytes) < strchr(text, '\n'), "%s", text);
    T_CHECK(strstr(text, "T=37 E=5 k=3 R=111 hidden=64 ffn=96 out=64"), "%s", text);
    for (int i = 0; i < 6; i++) {
        at = strstr(at, lines[arg][i]);
        T_CHECK(at, "%s of %s", lines[arg][i], text);
    }
    T_CHECK(strstr(text, "\n    linear_"), "%s", text);
}

/* Forward permutes no rows of x where FC1's product gathers them faster: of many rows with few columns, unless they are
   saved. */
static void gathered_rows(int arg) {
    static const struct { int64_t tokens, hidden, ffn; int experts, save_rows, recipe, gathers; } forms[] = {
        { 32768, 1536, 256, 128, 0, 0, 1 }, { 32768, 1536, 256, 128, 1, 0, 0 }, { 32768, 1536, 256, 128, 0, 1, 0 },
        { 32768, 4096, 256, 256, 0, 0, 1 }, { 24576, 4096, 512, 128, 0, 0, 1 }, { 32768, 4096, 1024, 128, 0, 0, 0 },
        { 40960, 768, 256, 128, 0, 0, 0 }, { 4096, 7168, 2048, 32, 0, 0, 0 }
    };
    const gmm_recipe recipe = ref_recipe_of(REF_MXFP4_BF16).recipe; /* it leaves x as it is */
    gmm_mlp_quant quant = { .recipe = &recipe };
    const gmm_mat x = gmm_mat_packed(arg & 1 ? GMM_F16 : GMM_BF16, NULL);
    const float one[1] = { 1.0f };
    _Alignas(256) char saved[256];
    int wgmma = T.engine == GMM_ENGINE_AUTO;
#ifdef HAVE_CUDA
    wgmma = wgmma && device_prices();
#endif
    for (int i = 0; i < (int)T_COUNT(forms); i++) {
        const int gathers = wgmma && forms[i].gathers, permutes = forms[i].save_rows || (T.gpu && !gathers);
        gmm_mlp_config config = { .hidden = forms[i].hidden, .ffn = forms[i].ffn,
                                  .recipe = forms[i].recipe ? recipe.kind : GMM_RECIPE_NONE,
                                  .act = gmm_act_of(GMM_ACT_PRESET_SWIGLU) };
        const gmm_mlp m = { .config = &config, .w1 = &x, .w2 = &x, .quant = forms[i].recipe ? &quant : NULL };
        gmm_moe d = { .experts = forms[i].experts, .tokens = forms[i].tokens, .topk = 8, .mlp = &m, .x = &x,
                      .out = &x, .probs = one, .saved = arg & 2 ? saved : NULL, .save_rows = forms[i].save_rows };
        gmm_mat odd = x;
        char text[8192];
        if (forms[i].recipe && x.dtype == GMM_F16) continue; /* which such weights are not multiplied by */
        T_OK(gmm_describe(T.ctx, GMM_OP_MOE_FWD, &d, text, sizeof text));
        T_CHECK(!strstr(text, "\n  permute_fwd: ") == !permutes, "form %d: %s", i, text);
        T_CHECK(!strstr(text, "which gather rows") == !gathers, "form %d: %s", i, text);
        T_CHECK(!strstr(text, "rows gathered in"), "form %d: %s", i, text); /* copied by the product */
        odd.data = saved + 2; /* an address does not change the choice, and so not what a query without it says */
        d.x = &odd;
        T_OK(gmm_describe(T.ctx, GMM_OP_MOE_FWD, &d, text, sizeof text));
        T_CHECK(!strstr(text, "\n  permute_fwd: ") == !permutes, "form %d, odd address: %s", i, text);
    }
}

/* Which steps permute rows of x and dout: none in CPU contexts; on GPUs those whose products read the rows, not those
   whose casts do. */
static void permuted_rows(int arg) {
    static const struct { int recipe; gmm_backward_override override; int fwd, bwd; } forms[] = {
        { 0, GMM_BACKWARD_BY_RECIPE, 1, 1 },
        { REF_FP8_BLOCK + 1, GMM_BACKWARD_BY_RECIPE, 0, 0 },
        { REF_NVFP4 + 1, GMM_BACKWARD_BY_RECIPE, 0, 0 },
        { REF_FP8_BLOCK + 1, GMM_BACKWARD_HIGH_PRECISION, 0, 1 },
    };
    (void)arg;
    for (int i = 0; i < (int)T_COUNT(forms); i++)
        for (int bwd = 0; bwd < 2; bwd++) {
            const moe_spec s = complete((moe_spec){ .name = "permuted", .dtype = GMM_BF16, .recipe = forms[i].recipe,
                                                    .override = forms[i].override });
            const int permutes = T.gpu && (bwd ? forms[i].bwd : forms[i].fwd);
            char text[8192];
            moe_case c;
            build(&c, &s);
            fill_layer(&c);
            T_OK(gmm_describe(T.ctx, bwd ? GMM_OP_MOE_BWD : GMM_OP_MOE_FWD, &c.d, text, sizeof text));
            T_CHECK(!strstr(text, "\n  permute_fwd: ") == !permutes, "form %d: %s", i, text);
            T_CHECK(!strstr(text, "\n  unpermute_bwd: ") == !(permutes && bwd), "form %d: %s", i, text);
        }
}

/* ----------------------------------------------------------------------------------------------------- Graphs --- */

#ifdef HAVE_CUDA
static void no_error(const char *what, const char *why) { T_CHECK(!why, "%s: %s", what, why); }
#define no_error(...) T_CALL(no_error, __VA_ARGS__)

typedef struct replayed { moe_case c; void *workspace, *graph; size_t bytes; int32_t *indices; float *probs; } replayed;

static gmm_status enqueue(replayed *r) {
    gmm_status s = gmm_moe_fwd(T.ctx, &r->c.d, r->workspace, r->bytes, T.stream);
    if (s == GMM_OK) s = gmm_moe_bwd(T.ctx, &r->c.d, r->workspace, r->bytes, T.stream);
    if (s == GMM_OK && r->c.s.delay) s = gmm_mlp_wgrad(T.ctx, &r->c.queue, r->workspace, r->bytes, T.stream);
    return s;
}
/* Other tokens, logits, indices and probabilities at the same addresses, and poisoned outputs. */
static void redraw(replayed *r, int seed) {
    moe_case *c = &r->c;
    t_mat *in[] = { &c->x, &c->logits, &c->dout };
    t_mat *out[] = { &c->o.out, &c->o.dx, &c->o.dlogits };
    const uint32_t zero = 0;
    t_reseed((uint64_t)seed);
    for (int i = 0; i < 3; i++) {
        for (int64_t k = 0; k < in[i]->rows * in[i]->cols; k++) in[i]->v[k] = ref_round(in[i]->dtype, 2.0 * t_real());
        t_mat_put(in[i]);
        t_poison(out[i]->data, 0xFF, (size_t)(out[i]->rows * out[i]->cols * ref_bytes(out[i]->dtype)));
    }
    if (!c->s.routed) {
        c->s.dropped = seed == 2 ? 100 : 10 * seed;
        c->s.used = 1 + seed % c->s.experts;
        give_routing(c);
        t_upload(r->indices, t_get(c->indices, (size_t)c->slots * 4), (size_t)c->slots * 4);
        t_upload(r->probs, t_get(c->probs, (size_t)c->slots * 4), (size_t)c->slots * 4);
    }
    for (int i = 0; i < 2; i++) {
        t_mat_put(&c->o.dw[i]);
        t_mat_put(&c->o.db[i]);
    }
    t_poison(c->o.dprobs, 0xFF, (size_t)c->slots * 4);
    t_poison(r->workspace, 0xFF, r->bytes);
    t_poison(c->d.saved, 0xFF, c->d.saved_bytes);
    t_upload(c->o.fault, &zero, 4);
}
/* Copies of all outputs. */
static moe_outputs copied(const moe_case *c) {
    moe_outputs o = c->o;
    t_mat *mats[] = { &o.out, &o.dx, &o.dlogits, &o.dw[0], &o.dw[1], &o.db[0], &o.db[1] };
    t_wait();
    for (int i = 0; i < 7; i++) {
        const size_t bytes = (size_t)(mats[i]->count * mats[i]->rows * mats[i]->cols * ref_bytes(mats[i]->dtype));
        const void *bits = t_get(mats[i]->data, bytes);
        *mats[i] = t_mat_out(mats[i]->dtype, mats[i]->count, mats[i]->rows, mats[i]->cols);
        t_upload(mats[i]->data, bits, bytes);
    }
    o.dprobs = (float *)t_in(t_get(c->o.dprobs, (size_t)c->slots * 4), (size_t)c->slots * 4);
    o.indices = (int32_t *)t_in(t_get(c->o.indices, (size_t)c->slots * 4), (size_t)c->slots * 4);
    o.probs = (float *)t_in(t_get(c->o.probs, (size_t)c->slots * 4), (size_t)c->slots * 4);
    o.losses = (float *)t_in(t_get(c->o.losses, 8), 8);
    o.sizes = (int32_t *)t_in(t_get(c->o.sizes, (size_t)c->s.experts * 4), (size_t)c->s.experts * 4);
    o.fault = (uint32_t *)t_in(t_get(c->o.fault, 4), 4);
    o.amax = (float *)t_in(t_get(c->o.amax, 4 * GMM_SLOTS * (size_t)c->s.experts),
                           4 * GMM_SLOTS * (size_t)c->s.experts);
    return o;
}
/* A captured step, replayed with other tokens and routings, equals eager calls. Argument: 1 routed, 2 weighted sum,
   4 delayed, 8 FP8. */
static void graphs(int arg) {
    const moe_spec s = complete((moe_spec){ .name = "graph", .dtype = GMM_BF16, .routed = arg & 1, .bias = 1,
                                            .weighting = arg & 2 ? ON_SUM : ON_ROWS, .delay = arg >> 2 & 1,
                                            .recipe = arg & 8 ? REF_FP8_BLOCK + 1 : 0, .hidden = 128, .ffn = 128,
                                            .main_grad = 1, .capacity = 100, .sizes = 1 });
    const gmm_op ops[] = { GMM_OP_MOE_FWD, GMM_OP_MOE_BWD, GMM_OP_MLP_WGRAD };
    replayed r;
    gmm_status status;
    memset(&r, 0, sizeof r);
    build(&r.c, &s);
    r.indices = (int32_t *)t_alloc((size_t)r.c.slots * 4);
    r.probs = (float *)t_alloc((size_t)r.c.slots * 4);
    if (!s.routed) r.c.o.indices = r.indices, r.c.o.probs = r.probs;
    fill_layer(&r.c);
    if (!s.routed) r.c.d.indices = r.indices, r.c.d.probs = r.probs;
    for (int i = 0; i < (s.delay ? 3 : 2); i++) {
        gmm_info info = GMM_ZERO;
        T_OK(gmm_moe_query(T.ctx, ops[i], &r.c.d, &info));
        if (i == 0) {
            r.c.d.saved = t_alloc_aligned(info.saved_bytes, 256);
            r.c.d.saved_bytes = info.saved_bytes;
        }
        if (i == 1 && info.deferred_bytes) {
            r.c.d.deferred = t_alloc_aligned(info.deferred_bytes, 256);
            r.c.d.deferred_bytes = info.deferred_bytes;
        }
        if (info.workspace_bytes > r.bytes) r.bytes = info.workspace_bytes;
    }
    r.workspace = t_alloc_aligned(r.bytes, 256);
    redraw(&r, 1);
    T_CHECK(enqueue(&r) == GMM_OK, "%s", gmm_last_error(T.ctx)); /* loads the code */
    t_wait();
    no_error("begin", device_begin_capture());
    status = enqueue(&r);
    no_error("end", device_end_capture(&r.graph));
    T_CHECK(status == GMM_OK, "capture: %s", gmm_last_error(T.ctx));
    for (int seed = 2; seed < 6; seed++) {
        moe_outputs eager, replay;
        redraw(&r, seed);
        T_CHECK(enqueue(&r) == GMM_OK, "%s", gmm_last_error(T.ctx));
        eager = copied(&r.c);
        redraw(&r, seed);
        no_error("replay", device_replay(r.graph));
        replay = copied(&r.c);
        same_outputs(&r.c, &eager, &replay, 1);
    }
    device_graph_free(r.graph);
}
#endif

void tests_moe(void) {
    static const char *const forms[] = { "given routing", "routed", "given routing, weighted sum",
                                         "routed, weighted sum" };
    for (int i = 0; i < T_COUNT(specs); i++) t_add(cases, i, "moe equals its calls: %s", specs[i].name);
    for (int i = 0; i < REF_RECIPES * T_COUNT(policies); i++)
        t_add(recipes, i, "moe equals its calls, recipe %s, %s", ref_recipe_of(i % REF_RECIPES).name,
              policies[i / REF_RECIPES].name);
    t_add(drawn, 0, "moe drawn at random");
    t_add(fused, 0, "moe with the activation joined to its product");
    t_add(fused, REF_FP8_BLOCK + 1, "moe with the activation and cast joined to a product");
    t_random(20);
    for (int i = 0; i < 4; i++) t_add(reference, i, "moe beside an fp64 reference: %s", forms[i]);
    for (int i = 0; i < 8; i++)
        t_add(layout, i, "moe layout of saved, %s, %s%s", i & 2 ? "row_probs" : "y", i & 1 ? "bwd" : "fwd",
              i & 4 ? ", rows" : "");
    for (int i = 0; i < 2 * T_COUNT(shapes); i++)
        t_add(memory, i, "moe memory of %s%s", shapes[i / 2].name, i % 2 ? ", weighted sum" : "");
    t_add(refused_fields, 0, "moe refused: fields");
    t_add(refused_routes, 0, "moe refused: routes and overlaps");
    t_add(refused_queue, 0, "moe refused: queue");
    t_add(refused_recipes, 0, "moe refused: recipes");
    t_add(faults, 0, "moe fault of the capacity");
    t_add(faults, 1, "moe fault of an index, verified");
    for (int i = 0; i < 2; i++) t_add(hooks, i, "moe hooks%s", i ? ", delayed" : "");
    for (int i = 0; i < 2; i++) t_add(described, i, "moe described %s", i ? "bwd" : "fwd");
    t_add(permuted_rows, 0, "moe described: which rows are permuted");
    for (int i = 0; i < 4; i++)
        t_add(gathered_rows, i, "moe described: rows gathered in the product, %s, %s", i & 1 ? "f16" : "bf16",
              i & 2 ? "training" : "inference");
#ifdef HAVE_CUDA
    for (int i = 0; i < 16; i++)
        t_add_gpu(graphs, i, "moe graph, other tokens and routings: %s%s%s", forms[i & 3], i & 4 ? ", delayed" : "",
                  i & 8 ? ", fp8" : "");
#endif
}
