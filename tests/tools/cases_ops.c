/* cases_ops.c - see cases.h: how each operation is built and launched. */
#include "cases_run.h"

#include <stdlib.h>
#include <string.h>

/* Workspace of a queried call; returns nonzero after a failure. */
static int ready(case_run *r, gmm_status status, const gmm_info *info) {
    if (case_check(r, status)) return 1;
    (void)case_workspace(r, info->workspace_bytes);
    return r->status != GMM_OK;
}
static gmm_dtype out_dtype(const case_run *r) {
    return r->flags & CASE_TO32 ? GMM_F32 : r->flags & CASE_TO16 ? GMM_BF16 : r->source;
}

/* ----------------------------------------------------------------------------------------------------- Linear --- */

static gmm_grad *gradient(case_run *r, int slot, const char *name, int64_t rows, int64_t cols) {
    gmm_grad *grad = &r->grads[slot];
    const gmm_dtype dtype = r->flags & (CASE_MAIN32 | CASE_STORE32) ? GMM_F32 : r->source;
    gmm_mat *m;
    if (r->flags & CASE_MAIN32) {
        m = case_in(r, dtype, r->groups, rows, cols);
        case_output_add(r, name, m->data, (size_t)(r->groups * rows * cols * case_bytes(dtype)));
        grad->main_grad = 1;
    } else m = case_mat_out(r, name, dtype, r->groups, rows, cols);
    grad->mat = case_tabled(r, m, r->groups, rows, cols);
    if (r->flags & CASE_FROZEN) {
        uint8_t *frozen = (uint8_t *)calloc((size_t)r->groups, 1);
        if (!frozen) return grad;
        for (int64_t g = 0; g < r->groups; g += 3) frozen[g] = 1;
        grad->frozen = (const uint8_t *)case_put(r, frozen, (size_t)r->groups);
        free(frozen);
    }
    return grad;
}

static const gmm_mat *result(case_run *r, const char *name, int64_t cols) {
    const gmm_dtype dtype = out_dtype(r);
    gmm_mat *m;
    if (!(r->flags & CASE_ADD)) return case_mat_out(r, name, dtype, 1, r->g.capacity, cols);
    m = case_in(r, dtype, 1, r->g.capacity, cols);
    case_output_add(r, name, m->data, (size_t)(r->g.capacity * cols * case_bytes(dtype)));
    return m;
}

#ifndef CASE_FORMER_INDEX
/* With `top` the rows of tokens are gathered, by entries that are divided by it; some of them are rows of zeros. */
static const int32_t *gathered(case_run *r, uint64_t salt) {
    const int64_t T = r->g.capacity;
    const int32_t *index;
    int32_t *at = (int32_t *)calloc((size_t)T + 1, sizeof *at);
    if (!at) return NULL;
    for (int64_t i = 0; i < T; i++)
        at[i] = i % 11 == 5 ? -1 : (int32_t)(case_hash(r->seed + salt, (uint64_t)i) % (uint64_t)(T * r->top));
    index = (const int32_t *)case_put(r, at, (size_t)T * sizeof *at);
    free(at);
    return index;
}
#endif

static int linear_open(case_run *r, gmm_op op) {
    gmm_linear *d = &r->d.linear;
    gmm_info info = GMM_ZERO;
    const int64_t T = r->g.capacity, G = r->groups;
    d->groups = &r->g;
    d->options = &r->options;
    d->in_features = r->K;
    d->out_features = r->N;
    if (r->flags & CASE_ALPHA) {
        d->alpha = case_floats(r, G, 0.5f, 1.5f);
        d->alpha_per_group = 1;
    }
#ifndef CASE_FORMER_INDEX
    if (r->top > 0) {
        d->x_index = gathered(r, 101);
        d->dy_index = gathered(r, 102);
        d->index_rows = T;
        d->index_div = (int32_t)r->top;
    }
#endif
    switch (op) {
    case GMM_OP_LINEAR_FWD:
        d->x = case_operand(r, &r->recipe.input, GMM_ROWWISE, 0, 0, r->K);
        d->w = case_operand(r, &r->recipe.weight, GMM_ROWWISE, G, r->N, r->K);
        if (r->flags & CASE_BIAS) d->bias = case_tabled(r, case_in(r, r->source, G, 1, r->N), G, 1, r->N);
        if (r->flags & CASE_SCALE) d->bias_scale = case_floats(r, T, -1.0f, 1.0f);
        d->y_add = (r->flags & CASE_ADD) != 0;
        d->y = result(r, "y", r->N);
        break;
    case GMM_OP_LINEAR_DGRAD:
        d->dy = case_operand(r, &r->recipe.grad, GMM_ROWWISE, 0, 0, r->N);
        d->w = case_operand(r, &r->recipe.weight, GMM_COLUMNWISE, G, r->N, r->K);
        d->y_add = (r->flags & CASE_ADD) != 0;
        d->dx = result(r, "dx", r->K);
        break;
    case GMM_OP_LINEAR_WGRAD:
        d->x = case_operand(r, &r->recipe.input, GMM_COLUMNWISE, 0, 0, r->K);
        d->dy = case_operand(r, &r->recipe.grad, GMM_COLUMNWISE, 0, 0, r->N);
        d->dw = gradient(r, 0, "dw", r->N, r->K);
        break;
    default: /* bgrad */
        d->dy = case_in(r, r->source, 1, T, r->N);
        d->db = gradient(r, 0, "db", 1, r->N);
        if (r->flags & CASE_SCALE) {
            d->bias_scale = case_floats(r, T, -1.0f, 1.0f);
            d->bias = case_in(r, r->source, G, 1, r->N);
            d->d_bias_scale = (float *)case_out(r, "d_row_scale", 4 * (size_t)T);
        }
        break;
    }
    return r->status != GMM_OK || ready(r, gmm_linear_query(case_context, op, d, &info), &info);
}
static int linear_fwd_open(case_run *r) { return linear_open(r, GMM_OP_LINEAR_FWD); }
static int linear_dgrad_open(case_run *r) { return linear_open(r, GMM_OP_LINEAR_DGRAD); }
static int linear_wgrad_open(case_run *r) { return linear_open(r, GMM_OP_LINEAR_WGRAD); }
static int linear_bgrad_open(case_run *r) { return linear_open(r, GMM_OP_LINEAR_BGRAD); }
static gmm_status linear_fwd(case_run *r, gmm_stream s) {
    return gmm_linear_fwd(case_context, &r->d.linear, r->workspace, r->workspace_bytes, s);
}
static gmm_status linear_dgrad(case_run *r, gmm_stream s) {
    return gmm_linear_dgrad(case_context, &r->d.linear, r->workspace, r->workspace_bytes, s);
}
static gmm_status linear_wgrad(case_run *r, gmm_stream s) {
    return gmm_linear_wgrad(case_context, &r->d.linear, r->workspace, r->workspace_bytes, s);
}
static gmm_status linear_bgrad(case_run *r, gmm_stream s) {
    return gmm_linear_bgrad(case_context, &r->d.linear, r->workspace, r->workspace_bytes, s);
}

/* ------------------------------------------------------------------------------------------------- Activation --- */

static gmm_act activation_of(const case_run *r) {
    gmm_act a = GMM_ZERO;
    if (r->flags & CASE_OSS) return gmm_act_of(GMM_ACT_PRESET_GPT_OSS);
    a.kind = (gmm_act_kind)r->act;
    a.interleave = (int32_t)r->block;
    a.limit = r->flags & CASE_LIMIT ? 0.75f : 0.0f;
    return a;
}

static int act_open(case_run *r, gmm_op op) {
    gmm_activation *d = &r->d.act;
    gmm_info info = GMM_ZERO;
    const int64_t T = r->g.capacity;
    int64_t in;
    r->activation = activation_of(r);
    in = gmm_act_gated(r->activation.kind) ? 2 * r->N : r->N;
    d->ffn = r->N;
    d->groups = &r->g;
    d->options = &r->options;
    d->act = &r->activation;
    d->x = case_in(r, r->source, 1, T, in);
    if (r->flags & CASE_PROB) d->prob = case_floats(r, T, 0.0f, 1.0f);
    if (op == GMM_OP_ACT_FWD) d->y = case_mat_out(r, "y", out_dtype(r), 1, T, r->N);
    else {
        d->dy = case_in(r, r->source, 1, T, r->N);
        d->dx = case_mat_out(r, "dx", out_dtype(r), 1, T, in);
        if (r->flags & CASE_PROB) d->dprob = (float *)case_out(r, "dprob", 4 * (size_t)T);
        if (r->flags & CASE_SAVE_ACT) d->y = case_mat_out(r, "y", out_dtype(r), 1, T, r->N);
    }
    return r->status != GMM_OK || ready(r, gmm_act_query(case_context, op, d, &info), &info);
}
static int act_fwd_open(case_run *r) { return act_open(r, GMM_OP_ACT_FWD); }
static int act_bwd_open(case_run *r) { return act_open(r, GMM_OP_ACT_BWD); }
static gmm_status act_fwd(case_run *r, gmm_stream s) {
    return gmm_act_fwd(case_context, &r->d.act, r->workspace, r->workspace_bytes, s);
}
static gmm_status act_bwd(case_run *r, gmm_stream s) {
    return gmm_act_bwd(case_context, &r->d.act, r->workspace, r->workspace_bytes, s);
}

/* -------------------------------------------------------------------------------------------------------- MLP --- */

static void mlp_config(case_run *r) {
    gmm_mlp_config *c = &r->config;
    const int bias = (r->flags & CASE_BIAS) != 0, prob = (r->flags & CASE_PROB) != 0;
    c->bias1 = c->bias2 = bias;
    c->prob = prob;
    c->prob_on_bias2 = bias && prob;
    c->hidden = r->K;
    c->ffn = r->N;
    c->act = activation_of(r);
    c->save = r->flags & CASE_SAVE_ACT ? GMM_SAVE_PREACT_AND_ACT
              : r->flags & CASE_SAVE_NOTHING ? GMM_SAVE_NOTHING : GMM_SAVE_PREACT;
#ifndef CASE_FORMER_MLP
    if (r->policies & CASE_SAVE_QUANTIZED)
        c->save = r->policies & CASE_SAVE_E4M3 ? GMM_SAVE_QUANTIZED_E4M3 : GMM_SAVE_QUANTIZED;
    else if (r->policies & CASE_SAVE_E4M3) c->save = GMM_SAVE_PREACT_E4M3;
#endif
    c->delay_wgrad = (r->flags & CASE_DELAY) != 0;
    c->recipe = r->quantized ? r->recipe.kind : GMM_RECIPE_NONE;
}

/* A weight without quantization, or quantized beforehand in both directions. */
static const gmm_mat *mlp_weight(case_run *r, int64_t rows, int64_t cols) {
    const gmm_mat *columnwise;
    gmm_mat *rowwise;
    if (!r->quantized || !(r->flags & CASE_CACHED) || r->recipe.weight.dtype == GMM_NONE)
        return case_tabled(r, case_in(r, r->source, r->groups, rows, cols), r->groups, rows, cols);
    columnwise = case_operand(r, &r->recipe.weight, GMM_COLUMNWISE, r->groups, rows, cols)->columnwise;
    r->seed -= r->recipe.weight.delayed ? 2 : 1; /* the same values once more */
    rowwise = (gmm_mat *)(uintptr_t)case_operand(r, &r->recipe.weight, GMM_ROWWISE, r->groups, rows, cols);
    rowwise->columnwise = columnwise;
    return rowwise;
}

#ifndef CASE_FORMER_MLP
/* A cache that holds the quantized weights already, for the flag WEIGHT_CACHE. One forward fills it. */
static int mlp_weight_cache(case_run *r) {
    const int32_t filled = 1;
    gmm_info info = GMM_ZERO;
    if (case_check(r, gmm_mlp_query(case_context, GMM_OP_MLP_FWD, &r->d.mlp, &info))) return 1;
    r->quant.weight_cache = case_alloc(r, info.weight_cache_bytes);
    r->quant.weight_cache_bytes = info.weight_cache_bytes;
    if (ready(r, gmm_mlp_query(case_context, GMM_OP_MLP_FWD, &r->d.mlp, &info), &info) ||
        case_check(r, gmm_mlp_fwd(case_context, &r->d.mlp, r->workspace, r->workspace_bytes, case_stream)))
        return 1;
    r->quant.weight_skip = (const int32_t *)case_put(r, &filled, sizeof filled);
    return r->status != GMM_OK;
}
#endif

static int mlp_open(case_run *r, int train) {
    static const uint64_t random[4] = { 12345, 678, 91011, 1213 };
    gmm_mlp *d = &r->d.mlp;
    gmm_info info = GMM_ZERO;
    const int64_t T = r->g.capacity, G = r->groups;
    int64_t f1;
    mlp_config(r);
    f1 = gmm_act_gated(r->config.act.kind) ? 2 * r->N : r->N;
    d->config = &r->config;
    d->groups = &r->g;
    d->options = &r->options;
    d->x = case_in(r, r->source, 1, T, r->K);
    d->w1 = mlp_weight(r, f1, r->K);
    d->w2 = mlp_weight(r, r->K, r->N);
    if (r->flags & CASE_BIAS) {
        d->b1 = case_in(r, r->source, G, 1, f1);
        d->b2 = case_in(r, r->source, G, 1, r->K);
    }
    if (r->flags & CASE_PROB) d->prob = case_floats(r, T, 0.0f, 1.0f);
    d->y = case_mat_out(r, "y", out_dtype(r), 1, T, r->K);
    if (r->quantized) {
        r->quant.recipe = &r->recipe;
        r->quant.random = (const uint64_t *)case_put(r, random, sizeof random);
        if (r->recipe.input.delayed) {
            r->quant.scale = case_floats(r, GMM_SLOTS * G, 64.0f, 128.0f);
            r->quant.amax = case_floats(r, GMM_SLOTS * G, 0.0f, 0.0f);
            case_output_add(r, "amax", r->quant.amax, 4 * (size_t)(GMM_SLOTS * G));
        }
        d->quant = &r->quant;
    }
    if (r->status != GMM_OK) return 1;
#ifndef CASE_FORMER_MLP
    if (r->quantized) {
        r->quant.backward_override = r->policies & CASE_BACKWARD_HIGH ? GMM_BACKWARD_HIGH_PRECISION
                                     : r->policies & CASE_BACKWARD_DEQUANTIZED ? GMM_BACKWARD_DEQUANTIZED
                                     : GMM_BACKWARD_BY_RECIPE;
        if (r->policies & CASE_WEIGHT_CACHE && mlp_weight_cache(r)) return 1;
    }
#endif
    if (!train) return ready(r, gmm_mlp_query(case_context, GMM_OP_MLP_FWD, d, &info), &info);
    d->dy = case_in(r, r->source, 1, T, r->K);
    d->dx = case_mat_out(r, "dx", out_dtype(r), 1, T, r->K);
    d->dw1 = gradient(r, 0, "dw1", f1, r->K);
    d->dw2 = gradient(r, 1, "dw2", r->K, r->N);
    if (r->flags & CASE_BIAS) {
        d->db1 = gradient(r, 2, "db1", 1, f1);
        d->db2 = gradient(r, 3, "db2", 1, r->K);
    }
    if (r->flags & CASE_PROB) d->dprob = (float *)case_out(r, "dprob", 4 * (size_t)T);
    if (r->flags & CASE_DELAY) {
        r->entries = (gmm_wgrad_entry *)calloc(1, sizeof *r->entries);
        r->queue = gmm_wgrad_queue_over(r->entries, 1);
        d->queue = &r->queue;
    }
    if (r->status != GMM_OK || ready(r, gmm_mlp_query(case_context, GMM_OP_MLP_FWD, d, &info), &info)) return 1;
    d->saved_bytes = info.saved_bytes;
    d->saved = case_alloc(r, info.saved_bytes);
    if (ready(r, gmm_mlp_query(case_context, GMM_OP_MLP_BWD, d, &info), &info)) return 1;
    d->deferred_bytes = info.deferred_bytes;
    if (info.deferred_bytes) d->deferred = case_alloc(r, info.deferred_bytes);
    return r->flags & CASE_DELAY && ready(r, gmm_mlp_query(case_context, GMM_OP_MLP_WGRAD, d, &info), &info);
}
static int mlp_fwd_open(case_run *r) { return mlp_open(r, 0); }
static int mlp_train_open(case_run *r) { return mlp_open(r, 1); }
static gmm_status mlp_fwd(case_run *r, gmm_stream s) {
    return gmm_mlp_fwd(case_context, &r->d.mlp, r->workspace, r->workspace_bytes, s);
}
static gmm_status mlp_train(case_run *r, gmm_stream s) {
    gmm_status status = mlp_fwd(r, s);
    if (status == GMM_OK) status = gmm_mlp_bwd(case_context, &r->d.mlp, r->workspace, r->workspace_bytes, s);
    if (status == GMM_OK && r->flags & CASE_DELAY)
        status = gmm_mlp_wgrad(case_context, &r->queue, r->workspace, r->workspace_bytes, s);
    return status;
}

/* ---------------------------------------------------------------------------------------------------- Routing --- */

/* g experts, t tokens, top of them chosen. */
static int route_open(case_run *r, gmm_op op) {
    static const float dloss[2] = { 0.5f, 0.25f };
    gmm_route *d = &r->d.route;
    gmm_info info = GMM_ZERO;
    const int64_t E = r->groups, T = r->rows, k = r->top;
    d->experts = (int32_t)E;
    d->tokens = T;
    d->topk = (int32_t)k;
    d->score = r->flags & CASE_SIGMOID ? GMM_SCORE_SIGMOID : GMM_SCORE_SOFTMAX;
    d->normalize = (r->flags & CASE_NORMALIZE) != 0;
    d->scale = 1.5f;
    d->options = &r->options;
    d->logits = case_in(r, r->source, 1, T, E);
    if (r->flags & CASE_BIAS) d->expert_bias = case_floats(r, E, -0.1f, 0.1f);
    d->indices = (int32_t *)case_out(r, "indices", 4 * (size_t)(T * k));
    d->probs = (float *)case_out(r, "probs", 4 * (size_t)(T * k));
    d->counts = (int32_t *)case_out(r, "counts", 4 * (size_t)E);
    d->offsets = (int32_t *)case_out(r, "offsets", 4 * (size_t)(E + 1));
    if (r->flags & CASE_AUX) {
        d->aux_coeff = 0.01f;
        d->z_coeff = 0.001f;
        d->aux_loss = (float *)case_out(r, "aux_loss", 4);
        d->z_loss = (float *)case_out(r, "z_loss", 4);
    }
    if (r->status != GMM_OK || ready(r, gmm_topk_query(case_context, GMM_OP_TOPK_FWD, d, &info), &info)) return 1;
    if (op == GMM_OP_TOPK_FWD) return 0;
    if (case_check(r, gmm_topk_fwd(case_context, d, r->workspace, r->workspace_bytes, case_stream))) return 1;
    r->output_count = 0;
    d->dprobs = case_floats(r, T * k, -1.0f, 1.0f);
    d->dloss = (const float *)case_put(r, dloss, sizeof dloss);
    d->dlogits = case_mat_out(r, "dlogits", r->source, 1, T, E);
    return r->status != GMM_OK || ready(r, gmm_topk_query(case_context, op, d, &info), &info);
}
static int route_fwd_open(case_run *r) { return route_open(r, GMM_OP_TOPK_FWD); }
static int route_bwd_open(case_run *r) { return route_open(r, GMM_OP_TOPK_BWD); }
static gmm_status route_fwd(case_run *r, gmm_stream s) {
    return gmm_topk_fwd(case_context, &r->d.route, r->workspace, r->workspace_bytes, s);
}
static gmm_status route_bwd(case_run *r, gmm_stream s) {
    return gmm_topk_bwd(case_context, &r->d.route, r->workspace, r->workspace_bytes, s);
}

/* ---------------------------------------------------------------------------------------------------- Permute --- */

/* Distinct experts of each token; some slots dropped. */
static const int32_t *choices(case_run *r) {
    const int64_t n = r->rows * r->top;
    int32_t *host = (int32_t *)malloc((size_t)n * sizeof *host + 1);
    const int32_t *p;
    if (!host) return NULL;
    for (int64_t t = 0; t < r->rows; t++) {
        const int64_t first = (int64_t)(case_hash(r->seed, (uint64_t)t) % (uint64_t)r->groups);
        for (int64_t i = 0; i < r->top; i++)
            host[t * r->top + i] = case_hash(r->seed + 1, (uint64_t)(t * r->top + i)) % 11 == 0
                                       ? -1 : (int32_t)((first + i * (1 + first % 2)) % r->groups);
    }
    p = (const int32_t *)case_put(r, host, (size_t)n * sizeof *host);
    free(host);
    return p;
}

static int permute_open(case_run *r, gmm_op op) {
    gmm_permute *d = &r->d.permute;
    gmm_info info = GMM_ZERO;
    const int64_t E = r->groups, T = r->rows, k = r->top, H = r->K, slots = T * k;
    const int64_t R = slots + E * (r->align > 1 ? r->align - 1 : 0) + r->past;
    const int prob = (r->flags & CASE_PROB) != 0;
    d->experts = (int32_t)E;
    d->tokens = T;
    d->capacity = R;
    d->hidden = H;
    d->topk = (int32_t)k;
    d->align = (int32_t)r->align;
    d->tail = r->g.tail;
    d->options = &r->options;
    d->indices = choices(r);
    d->row_of = (int32_t *)case_out(r, "row_of", 4 * (size_t)slots);
    d->slot_of = (int32_t *)case_out(r, "slot_of", 4 * (size_t)R);
    d->sizes = (int32_t *)case_out(r, "sizes", 4 * (size_t)E);
    if (r->status != GMM_OK || ready(r, gmm_permute_query(case_context, GMM_OP_PERMUTE_MAP, d, &info), &info)) return 1;
    if (op == GMM_OP_PERMUTE_MAP) return 0;
    if (case_check(r, gmm_permute_map(case_context, d, r->workspace, r->workspace_bytes, case_stream))) return 1;
    r->output_count = 0;
    switch (op) {
    case GMM_OP_PERMUTE_FWD:
        d->x = case_in(r, r->source, 1, T, H);
        d->rows = case_mat_out(r, "rows", r->source, 1, R, H);
        if (prob) d->probs = case_floats(r, slots, 0.0f, 1.0f);
        if (prob) d->row_probs = (float *)case_out(r, "row_probs", 4 * (size_t)R);
        break;
    case GMM_OP_PERMUTE_BWD:
        d->drows = case_in(r, r->source, 1, R, H);
        d->dx = case_mat_out(r, "dx", out_dtype(r), 1, T, H);
        if (prob) d->drow_probs = case_floats(r, R, -1.0f, 1.0f);
        if (prob) d->dprobs = (float *)case_out(r, "dprobs", 4 * (size_t)slots);
        break;
    case GMM_OP_UNPERMUTE_FWD:
        d->rows = case_in(r, r->source, 1, R, H);
        d->out = case_mat_out(r, "out", out_dtype(r), 1, T, H);
        if (prob) d->probs = case_floats(r, slots, 0.0f, 1.0f);
        break;
    default:
        d->dout = case_in(r, r->source, 1, T, H);
        d->rows = case_in(r, r->source, 1, R, H);
        d->drows = case_mat_out(r, "drows", out_dtype(r), 1, R, H);
        if (prob) d->probs = case_floats(r, slots, 0.0f, 1.0f);
        if (prob) d->dprobs = (float *)case_out(r, "dprobs", 4 * (size_t)slots);
        break;
    }
    return r->status != GMM_OK || ready(r, gmm_permute_query(case_context, op, d, &info), &info);
}
static int permute_map_open(case_run *r) { return permute_open(r, GMM_OP_PERMUTE_MAP); }
static int permute_fwd_open(case_run *r) { return permute_open(r, GMM_OP_PERMUTE_FWD); }
static int permute_bwd_open(case_run *r) { return permute_open(r, GMM_OP_PERMUTE_BWD); }
static int unpermute_fwd_open(case_run *r) { return permute_open(r, GMM_OP_UNPERMUTE_FWD); }
static int unpermute_bwd_open(case_run *r) { return permute_open(r, GMM_OP_UNPERMUTE_BWD); }
static gmm_status permute_map(case_run *r, gmm_stream s) {
    return gmm_permute_map(case_context, &r->d.permute, r->workspace, r->workspace_bytes, s);
}
static gmm_status permute_fwd(case_run *r, gmm_stream s) {
    return gmm_permute_fwd(case_context, &r->d.permute, r->workspace, r->workspace_bytes, s);
}
static gmm_status permute_bwd(case_run *r, gmm_stream s) {
    return gmm_permute_bwd(case_context, &r->d.permute, r->workspace, r->workspace_bytes, s);
}
static gmm_status unpermute_fwd(case_run *r, gmm_stream s) {
    return gmm_unpermute_fwd(case_context, &r->d.permute, r->workspace, r->workspace_bytes, s);
}
static gmm_status unpermute_bwd(case_run *r, gmm_stream s) {
    return gmm_unpermute_bwd(case_context, &r->d.permute, r->workspace, r->workspace_bytes, s);
}

/* ------------------------------------------------------------------------------------------------------ Layer --- */

/* g experts, t tokens, top of them chosen. With `aux` a router chooses, else indices and probabilities are given;
   `prob`: they weight FC2's input, else the combine. */
#ifndef CASE_FORMER_LAYER
static void layer_route(case_run *r, int train) {
    gmm_moe *d = &r->d.layer.moe;
    gmm_route *route = &r->d.layer.route;
    const int64_t slots = r->rows * r->top;
    if (!(r->flags & CASE_AUX)) {
        d->indices = choices(r);
        d->probs = case_floats(r, slots, 0.0f, 1.0f);
        if (train) d->dprobs = (float *)case_out(r, "dprobs", 4 * (size_t)slots);
        return;
    }
    route->experts = d->experts;
    route->tokens = d->tokens;
    route->topk = d->topk;
    route->normalize = 1;
    route->logits = case_in(r, GMM_F32, 1, r->rows, r->groups);
    route->indices = (int32_t *)case_out(r, "indices", 4 * (size_t)slots);
    route->probs = (float *)case_out(r, "probs", 4 * (size_t)slots);
    route->counts = (int32_t *)case_out(r, "counts", 4 * (size_t)r->groups);
    route->aux_coeff = 0.01f;
    if (train) route->dlogits = case_mat_out(r, "dlogits", GMM_F32, 1, r->rows, r->groups);
    d->route = route;
}

static int layer_open(case_run *r, int train) {
    static const uint64_t random[4] = { 12345, 678, 91011, 1213 };
    gmm_moe *d = &r->d.layer.moe;
    gmm_mlp *m = &r->d.layer.mlp;
    gmm_info info = GMM_ZERO;
    int64_t f1;
    mlp_config(r);
    f1 = gmm_act_gated(r->config.act.kind) ? 2 * r->N : r->N;
    d->experts = (int32_t)r->groups;
    d->tokens = r->rows;
    d->topk = (int32_t)r->top;
    d->align = (int32_t)r->align;
    d->options = &r->options;
    d->mlp = m;
    m->config = &r->config;
    m->w1 = mlp_weight(r, f1, r->K);
    m->w2 = mlp_weight(r, r->K, r->N);
    if (r->flags & CASE_BIAS) {
        m->b1 = case_in(r, r->source, r->groups, 1, f1);
        m->b2 = case_in(r, r->source, r->groups, 1, r->K);
    }
    if (r->quantized) {
        r->quant.recipe = &r->recipe;
        r->quant.random = (const uint64_t *)case_put(r, random, sizeof random);
        m->quant = &r->quant;
    }
    d->x = case_in(r, r->source, 1, r->rows, r->K);
    d->out = case_mat_out(r, "out", out_dtype(r), 1, r->rows, r->K);
    layer_route(r, train);
    if (train) {
        d->dout = case_in(r, r->source, 1, r->rows, r->K);
        d->dx = case_mat_out(r, "dx", out_dtype(r), 1, r->rows, r->K);
        m->dw1 = gradient(r, 0, "dw1", f1, r->K);
        m->dw2 = gradient(r, 1, "dw2", r->K, r->N);
    }
    if (r->status != GMM_OK || ready(r, gmm_moe_query(case_context, GMM_OP_MOE_FWD, d, &info), &info)) return 1;
    if (!train) return 0;
    d->saved_bytes = info.saved_bytes;
    d->saved = case_alloc(r, info.saved_bytes);
    return ready(r, gmm_moe_query(case_context, GMM_OP_MOE_BWD, d, &info), &info);
}
static int layer_fwd_open(case_run *r) { return layer_open(r, 0); }
static int layer_train_open(case_run *r) { return layer_open(r, 1); }
static gmm_status layer_fwd(case_run *r, gmm_stream s) {
    return gmm_moe_fwd(case_context, &r->d.layer.moe, r->workspace, r->workspace_bytes, s);
}
static gmm_status layer_train(case_run *r, gmm_stream s) {
    const gmm_status status = layer_fwd(r, s);
    return status != GMM_OK ? status
                            : gmm_moe_bwd(case_context, &r->d.layer.moe, r->workspace, r->workspace_bytes, s);
}
#endif

/* ------------------------------------------------------------------------------------------- Pad, interleave --- */

static int pad_open(case_run *r, gmm_op op) {
    gmm_padding *d = &r->d.pad;
    gmm_info info = GMM_ZERO;
    const int64_t T = r->g.capacity, R = T + r->groups * (r->align - 1);
    const int out = op == GMM_OP_PAD;
    d->align = (int32_t)r->align;
    d->cols = r->K;
    d->padded_capacity = R;
    d->groups = &r->g;
    d->options = &r->options;
    d->src = case_in(r, r->source, 1, out ? T : R, r->K);
    d->dst = case_mat_out(r, "dst", r->source, 1, out ? R : T, r->K);
    if (r->flags & CASE_PROB) {
        d->src_prob = case_floats(r, out ? T : R, 0.0f, 1.0f);
        d->dst_prob = (float *)case_out(r, "dst_prob", 4 * (size_t)(out ? R : T));
    }
    if (out) d->sizes = (int32_t *)case_out(r, "sizes", 4 * (size_t)r->groups);
    return r->status != GMM_OK || ready(r, gmm_pad_query(case_context, op, d, &info), &info);
}
static int pad_pad_open(case_run *r) { return pad_open(r, GMM_OP_PAD); }
static int pad_unpad_open(case_run *r) { return pad_open(r, GMM_OP_UNPAD); }
static gmm_status pad_pad(case_run *r, gmm_stream s) {
    return gmm_pad(case_context, &r->d.pad, r->workspace, r->workspace_bytes, s);
}
static gmm_status pad_unpad(case_run *r, gmm_stream s) {
    return gmm_unpad(case_context, &r->d.pad, r->workspace, r->workspace_bytes, s);
}

static int glu_open(case_run *r, gmm_glu_axis axis) {
    gmm_glu *d = &r->d.glu;
    gmm_info info = GMM_ZERO;
    const int rows = axis == GMM_GLU_ROWS;
    d->axis = axis;
    d->inverse = (r->flags & CASE_INVERSE) != 0;
    d->block = (int32_t)r->block;
    d->ffn = r->N;
    d->count = r->count;
    d->cols = rows ? r->K : 0;
    d->options = &r->options;
    d->src = case_in(r, r->source, rows ? r->count : 1, rows ? 2 * r->N : r->count, rows ? r->K : 2 * r->N);
    d->dst = case_mat_out(r, "dst", r->source, rows ? r->count : 1, rows ? 2 * r->N : r->count, rows ? r->K : 2 * r->N);
    return r->status != GMM_OK || ready(r, gmm_glu_query(case_context, GMM_OP_GLU_INTERLEAVE, d, &info), &info);
}
static int glu_rows_open(case_run *r) { return glu_open(r, GMM_GLU_ROWS); }
static int glu_columns_open(case_run *r) { return glu_open(r, GMM_GLU_COLUMNS); }
static gmm_status glu(case_run *r, gmm_stream s) {
    return gmm_glu_interleave(case_context, &r->d.glu, r->workspace, r->workspace_bytes, s);
}

/* ----------------------------------------------------------------------------------------------- Quantization --- */

/* Rows split over groups with the flag GROUPED, else `count` matrices of t x k. */
static int64_t matrices(const case_run *r) { return r->flags & CASE_GROUPED ? 0 : r->count ? r->count : 1; }
static const gmm_format *role_of(const case_run *r) {
    return r->flags & CASE_ROLE_W ? &r->recipe.weight : r->flags & CASE_ROLE_GRAD ? &r->recipe.grad : &r->recipe.input;
}

static int quantize_fill(case_run *r, const gmm_mat *src, int requantize) {
    static const uint64_t state[2] = { 12345, 678 };
    gmm_quantization *d = &r->d.quantize;
    gmm_info info = GMM_ZERO;
    const int64_t count = matrices(r);
    const int both = !(r->flags & (CASE_ROWWISE | CASE_COLUMNWISE));
    r->format = *role_of(r);
    d->count = (int32_t)count;
    d->rows = count ? r->rows : 0;
    d->cols = r->K;
    d->groups = count ? NULL : &r->g;
    d->options = &r->options;
    d->format = &r->format;
    d->src = src;
    if (both || r->flags & CASE_ROWWISE)
        d->rowwise = case_storage(r, "rowwise", &r->format, GMM_ROWWISE, count, r->rows, r->K);
    if (both || r->flags & CASE_COLUMNWISE)
        d->columnwise = case_storage(r, "columnwise", &r->format, GMM_COLUMNWISE, count, r->rows, r->K);
    if (r->format.delayed) d->scale = case_floats(r, count ? count : r->groups, 64.0f, 128.0f);
    if (r->format.stochastic) d->random = (const uint64_t *)case_put(r, state, sizeof state);
#ifndef CASE_FORMER_CAST_INDEX
    if (r->top > 0 && !count && !requantize) {
        d->src_index = gathered(r, 103);
        d->index_rows = r->g.capacity;
        d->index_div = (int32_t)r->top;
    }
#endif
    if (r->flags & CASE_DB) d->db = gradient(r, 0, "db", 1, r->K);
    if (r->status != GMM_OK) return 1;
    return ready(r, gmm_quantize_query(case_context, requantize ? GMM_OP_REQUANTIZE : GMM_OP_QUANTIZE, d, &info),
                 &info);
}
static int quantize_open(case_run *r) {
    const int64_t count = matrices(r);
    return quantize_fill(r, case_in(r, r->source, count ? count : 1, count ? r->rows : r->g.capacity, r->K), 0);
}
static gmm_status quantize(case_run *r, gmm_stream s) {
    return gmm_quantize(case_context, &r->d.quantize, r->workspace, r->workspace_bytes, s);
}
static int requantize_open(case_run *r) {
    return quantize_fill(r, case_operand(r, role_of(r), GMM_ROWWISE, matrices(r), r->rows, r->K), 1);
}
static gmm_status requantize(case_run *r, gmm_stream s) {
    return gmm_requantize(case_context, &r->d.quantize, r->workspace, r->workspace_bytes, s);
}

static int dequantize_open(case_run *r) {
    gmm_dequantization *d = &r->d.dequantize;
    gmm_info info = GMM_ZERO;
    const int64_t count = matrices(r);
    const int columnwise = (r->flags & CASE_COLUMNWISE) != 0;
    const gmm_mat *src;
    d->count = (int32_t)count;
    d->rows = count ? r->rows : 0;
    d->cols = r->K;
    d->groups = count ? NULL : &r->g;
    d->options = &r->options;
    d->direction = columnwise ? GMM_COLUMNWISE : GMM_ROWWISE;
    src = case_operand(r, role_of(r), d->direction, count, r->rows, r->K);
    d->src = columnwise ? src->columnwise : src;
    d->dst = case_mat_out(r, "dst", out_dtype(r), count ? count : 1, count ? r->rows : r->g.capacity, r->K);
    return r->status != GMM_OK || ready(r, gmm_dequantize_query(case_context, d, &info), &info);
}
static gmm_status dequantize(case_run *r, gmm_stream s) {
    return gmm_dequantize(case_context, &r->d.dequantize, r->workspace, r->workspace_bytes, s);
}

static int transpose_open(case_run *r) {
    gmm_transposition *d = &r->d.transpose;
    gmm_info info = GMM_ZERO;
    const gmm_format *f = role_of(r);
    const int64_t count = matrices(r);
    d->count = (int32_t)count;
    d->rows = r->rows;
    d->cols = r->K;
    d->options = &r->options;
#ifndef CASE_FORMER_TRANSPOSITION
    d->format = f;
#endif
    d->src = case_operand(r, f, GMM_ROWWISE, count, r->rows, r->K);
    d->dst = case_storage(r, "dst", f, GMM_COLUMNWISE, count, r->rows, r->K);
    return r->status != GMM_OK || ready(r, gmm_transpose_query(case_context, d, &info), &info);
}
static gmm_status transpose(case_run *r, gmm_stream s) {
    return gmm_transpose(case_context, &r->d.transpose, r->workspace, r->workspace_bytes, s);
}

/* t scale slots with an amax history of n steps. */
static int update_open(case_run *r) {
    gmm_scale_update *d = &r->d.update;
    d->slots = (int32_t)r->rows;
    d->history_length = (int32_t)r->N;
    d->margin = 1;
    d->most_recent = (r->flags & CASE_RECENT) != 0;
    d->dtype = GMM_E4M3;
    d->options = &r->options;
    d->history = case_floats(r, r->rows * r->N, 0.0f, 100.0f);
    d->scale = case_floats(r, r->rows, 1.0f, 2.0f);
    case_output_add(r, "history", d->history, 4 * (size_t)(r->rows * r->N));
    case_output_add(r, "scale", d->scale, 4 * (size_t)r->rows);
    return r->status != GMM_OK;
}
static gmm_status update(case_run *r, gmm_stream s) { return gmm_update_scales(case_context, &r->d.update, s); }

/* The middle third of the elements of `count` matrices of t x k; both phases. */
static int shard_open(case_run *r) {
    gmm_sharding *d = &r->d.shard;
    const gmm_format *f = role_of(r);
    const int64_t count = matrices(r), all = count * r->rows * r->K;
    const int columnwise = f->scaling == GMM_SCALING_MX32 || f->square;
    r->format = *f;
    d->count = (int32_t)count;
    d->rows = r->rows;
    d->cols = r->K;
    d->start = all / 3 + 1;
    d->length = all / 3;
    d->options = &r->options;
    d->format = &r->format;
    d->model = GMM_BF16;
    d->master = case_floats(r, d->length, -1.0f, 1.0f);
    d->rowwise = case_storage(r, "rowwise", f, GMM_ROWWISE, count, r->rows, r->K);
    if (columnwise) d->columnwise = case_storage(r, "columnwise", f, GMM_COLUMNWISE, count, r->rows, r->K);
    d->amax = (float *)case_out(r, "amaxes",
                                4 * (size_t)gmm_shard_amaxes(&r->format, d->count, r->rows, r->K, columnwise));
    if (f->delayed) d->scale = case_floats(r, count, 64.0f, 128.0f);
    return r->status != GMM_OK;
}
static gmm_status shard(case_run *r, gmm_stream s) {
    gmm_status status;
    r->d.shard.phase = GMM_QUANT_AMAX;
    status = gmm_shard_cast(case_context, &r->d.shard, s);
    r->d.shard.phase = GMM_QUANT_CAST;
    return status != GMM_OK ? status : gmm_shard_cast(case_context, &r->d.shard, s);
}

/* ------------------------------------------------------------------------------------------- Small operations --- */

static int accumulate_open(case_run *r) {
    gmm_accumulation *d = &r->d.accumulate;
    gmm_info info = GMM_ZERO;
    gmm_mat *y = case_in(r, out_dtype(r), 1, r->rows, r->K);
    d->count = (int32_t)r->count;
    d->rows = r->rows;
    d->cols = r->K;
    d->options = &r->options;
    d->x = case_in(r, r->source, r->count, r->rows, r->K);
    d->y = y;
    d->scale = 0.25f;
    d->beta = r->flags & CASE_ADD ? 1.0f : 0.0f;
    case_output_add(r, "y", y->data, (size_t)(r->rows * r->K * case_bytes(y->dtype)));
    return r->status != GMM_OK || ready(r, gmm_accumulate_query(case_context, d, &info), &info);
}
static gmm_status accumulate(case_run *r, gmm_stream s) {
    return gmm_accumulate(case_context, &r->d.accumulate, r->workspace, r->workspace_bytes, s);
}

static int convert_open(case_run *r) {
    gmm_conversion *d = &r->d.convert;
    gmm_info info = GMM_ZERO;
    d->rows = r->rows;
    d->cols = r->K;
    d->options = &r->options;
    d->src = case_in(r, r->source, 1, r->rows, r->K);
    d->dst = case_mat_out(r, "dst", out_dtype(r), 1, r->rows, r->K);
    return r->status != GMM_OK || ready(r, gmm_convert_query(case_context, d, &info), &info);
}
static gmm_status convert(case_run *r, gmm_stream s) {
    return gmm_convert(case_context, &r->d.convert, r->workspace, r->workspace_bytes, s);
}

static int offsets_open(case_run *r) {
    (void)case_out(r, "offsets", 8 * (size_t)(r->groups + 1));
    return r->status != GMM_OK;
}
static gmm_status offsets(case_run *r, gmm_stream s) {
    return gmm_offsets(case_context, &r->g, (int64_t *)(uintptr_t)r->outputs[0].data, s);
}

const case_operation CASE_OPERATIONS[] = {
    { "linear", "fwd", linear_fwd_open, linear_fwd },
    { "linear", "dgrad", linear_dgrad_open, linear_dgrad },
    { "linear", "wgrad", linear_wgrad_open, linear_wgrad },
    { "linear", "bgrad", linear_bgrad_open, linear_bgrad },
    { "act", "fwd", act_fwd_open, act_fwd },
    { "act", "bwd", act_bwd_open, act_bwd },
    { "mlp", "fwd", mlp_fwd_open, mlp_fwd },
    { "mlp", "train", mlp_train_open, mlp_train },
    { "route", "fwd", route_fwd_open, route_fwd },
    { "route", "bwd", route_bwd_open, route_bwd },
    { "permute", "map", permute_map_open, permute_map },
    { "permute", "fwd", permute_fwd_open, permute_fwd },
    { "permute", "bwd", permute_bwd_open, permute_bwd },
    { "unpermute", "fwd", unpermute_fwd_open, unpermute_fwd },
    { "unpermute", "bwd", unpermute_bwd_open, unpermute_bwd },
#ifndef CASE_FORMER_LAYER
    { "layer", "fwd", layer_fwd_open, layer_fwd },
    { "layer", "train", layer_train_open, layer_train },
#endif
    { "pad", "pad", pad_pad_open, pad_pad },
    { "pad", "unpad", pad_unpad_open, pad_unpad },
    { "glu", "rows", glu_rows_open, glu },
    { "glu", "columns", glu_columns_open, glu },
    { "cast", "quantize", quantize_open, quantize },
    { "cast", "requantize", requantize_open, requantize },
    { "cast", "dequantize", dequantize_open, dequantize },
    { "cast", "transpose", transpose_open, transpose },
    { "cast", "update", update_open, update },
    { "cast", "shard", shard_open, shard },
    { "small", "accumulate", accumulate_open, accumulate },
    { "small", "convert", convert_open, convert },
    { "small", "offsets", offsets_open, offsets },
    { NULL, NULL, NULL, NULL }
};
