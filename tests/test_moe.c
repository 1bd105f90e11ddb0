/* test_moe.c - the layer against the calls that it is composed of, bit for bit; against an fp64 reference with finite
   differences; its memory, refusals, hooks, replays */
#include "test.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#ifdef HAVE_CUDA
#include "device.h"
#endif

/* ---------------------------------------------------------------------------------------------------- One layer --- */

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
    gmm_moe d;
    t_mat x, logits, w1, w2, b1, b2, dout;
    int32_t *indices; /* given ones */
    float *probs;
    gmm_wgrad_entry entry;
    gmm_wgrad_queue queue;
    moe_outputs o;
    size_t workspace, deferred; /* bytes that the queries have named */
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

/* ----------------------------------------------------------------------------------------------- The layer's calls --- */

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
    T_OK(gmm_moe_query(T.ctx, GMM_OP_MOE_BWD, &c->d, &info));
    T_CHECK(info.saved_bytes == c->d.saved_bytes, "saved_bytes %zu of bwd, %zu of fwd", info.saved_bytes,
            c->d.saved_bytes);
    if (info.workspace_bytes > c->workspace) c->workspace = info.workspace_bytes;
    c->deferred = info.deferred_bytes;
    c->d.deferred = info.deferred_bytes ? t_workspace(info.deferred_bytes) : NULL;
    c->d.deferred_bytes = info.deferred_bytes;
    workspace = t_workspace(info.workspace_bytes);
    T_OK(gmm_moe_bwd(T.ctx, &c->d, workspace, info.workspace_bytes, T.stream));
    if (!c->queue.count) return;
    t_poison(workspace, 0xFF, info.workspace_bytes);
    if (c->d.sizes) t_poison(c->d.sizes, 0xFF, (size_t)c->s.experts * 4);
    T_OK(gmm_moe_query(T.ctx, GMM_OP_MLP_WGRAD, &c->d, &info));
    memset(&c->mlp, 0xFF, sizeof c->mlp);
    T_OK(gmm_mlp_wgrad(T.ctx, &c->queue, t_workspace(info.workspace_bytes), info.workspace_bytes, T.stream));
}
#define layer_bwd(...) T_CALL(layer_bwd, __VA_ARGS__)

/* ------------------------------------------------------------------------------------------------ Separate calls --- */

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
    if (c->queue.count) {
        T_OK(gmm_mlp_query(T.ctx, GMM_OP_MLP_WGRAD, &s->mlp, &info));
        T_OK(gmm_mlp_wgrad(T.ctx, &c->queue, t_workspace(info.workspace_bytes), info.workspace_bytes, T.stream));
    }
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

/* ---------------------------------------------------------------------------------------------------- Comparison --- */

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
    if (spec->sizes && spec->delay) { /* layer_bwd overwrites its own */
        separate.sizes = (int32_t *)t_alloc((size_t)spec->experts * 4);
        t_poison(separate.sizes, 0xFF, (size_t)spec->experts * 4);
    }
    c.config.topk = 0;
    c.quant.weight_cache = NULL;
    fresh(&c);
    layer_fwd(&c, 0);
    layer_bwd(&c);
    train = c.o;
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
    const moe_spec s = complete(specs[arg]);
    equals_calls(&s);
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
};
static void recipes(int arg) {
    const struct policy *p = &policies[arg / REF_RECIPES];
    const int quantized = p->save == GMM_SAVE_QUANTIZED || p->save == GMM_SAVE_QUANTIZED_E4M3;
    moe_spec s = complete((moe_spec){ .name = p->name, .recipe = arg % REF_RECIPES + 1, .save = p->save,
                                      .override = p->override, .weighting = ON_ROWS, .sizes = 1, .dropped = 5 });
    if (quantized && ref_recipe_of(arg % REF_RECIPES).recipe.input.dtype == GMM_NONE) {
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
    s.delay = 1;
    equals_calls(&s);
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
    equals_calls(&s);
}

void tests_moe(void) {
    for (int i = 0; i < T_COUNT(specs); i++) t_add(cases, i, "moe equals its calls: %s", specs[i].name);
    for (int i = 0; i < REF_RECIPES * T_COUNT(policies); i++)
        t_add(recipes, i, "moe equals its calls, recipe %s, %s", ref_recipe_of(i % REF_RECIPES).name,
              policies[i / REF_RECIPES].name);
    t_add(drawn, 0, "moe drawn at random");
    t_random(20);
}
