/* test_mlp_case.c - the functions of mlp_case.h */
#include "mlp_case.h"

#include <string.h>

/* ---------------------------------------------------------------------------------------------- The small MLP --- */

const int64_t mlp_sizes[MLP_GROUPS] = { 0, 37, 5, 61 };

void mlp_build(mlp_case *c, int recipe, gmm_save save, t_form w1, t_form w2) {
    float prob[MLP_ROWS];
    memset(c, 0, sizeof *c);
    t_splits(mlp_sizes, MLP_GROUPS);
    c->groups.count = MLP_GROUPS;
    c->groups.capacity = MLP_ROWS;
    c->groups.splits = t_in(mlp_sizes, sizeof mlp_sizes);
    c->groups.dtype = GMM_I64;
    c->config.hidden = MLP_HIDDEN;
    c->config.ffn = MLP_FFN;
    c->config.act = gmm_act_of(GMM_ACT_PRESET_SWIGLU);
    c->config.save = save;
    c->config.prob = 1;
    c->x = t_mat_in(GMM_BF16, 1, MLP_ROWS, MLP_HIDDEN, T_REALS);
    c->dy = t_mat_in(GMM_BF16, 1, MLP_ROWS, MLP_HIDDEN, T_REALS);
    c->w1 = t_mat_make(GMM_BF16, MLP_GROUPS, 2 * MLP_FFN, MLP_HIDDEN, 0, 0, w1, T_REALS);
    c->w2 = t_mat_make(GMM_BF16, MLP_GROUPS, MLP_HIDDEN, MLP_FFN, 0, 0, w2, T_REALS);
    c->y = t_mat_out(GMM_BF16, 1, MLP_ROWS, MLP_HIDDEN);
    c->dx = t_mat_out(GMM_BF16, 1, MLP_ROWS, MLP_HIDDEN);
    c->dw1 = t_mat_out(GMM_F32, MLP_GROUPS, 2 * MLP_FFN, MLP_HIDDEN);
    c->dw2 = t_mat_out(GMM_F32, MLP_GROUPS, MLP_HIDDEN, MLP_FFN);
    c->gw1.mat = &c->dw1.mat;
    c->gw2.mat = &c->dw2.mat;
    for (int i = 0; i < MLP_ROWS; i++) prob[i] = (float)t_real();
    c->prob = (float *)t_in(prob, sizeof prob);
    c->dprob = t_floats_out(MLP_ROWS);
    c->d.config = &c->config;
    c->d.groups = &c->groups;
    c->d.x = &c->x.mat;
    c->d.w1 = &c->w1.mat;
    c->d.w2 = &c->w2.mat;
    c->d.prob = c->prob;
    c->d.y = &c->y.mat;
    if (recipe < 0) return;
    c->recipe = ref_recipe_of(recipe).recipe;
    c->config.recipe = c->recipe.kind;
    c->quant.recipe = &c->recipe;
    c->d.quant = &c->quant;
}

void mlp_want_gradients(mlp_case *c) {
    c->d.dy = &c->dy.mat;
    c->d.dx = &c->dx.mat;
    c->d.dw1 = &c->gw1;
    c->d.dw2 = &c->gw2;
    c->d.dprob = c->dprob;
}

mlp_results mlp_results_of(const mlp_case *c) {
    const mlp_results r = { { t_mat_bits(&c->y), t_mat_bits(&c->dx), t_mat_bits(&c->dw1), t_mat_bits(&c->dw2),
                              t_get(c->dprob, MLP_LIVE * sizeof(float)) } };
    return r;
}
void (mlp_same_results)(const mlp_results *a, const mlp_results *b) {
    enum { TOKENS = MLP_LIVE * MLP_HIDDEN * 2, WEIGHTS = MLP_GROUPS * MLP_FFN * MLP_HIDDEN * 4 };
    static const char *const names[5] = { "y", "dx", "dw1", "dw2", "dprob" };
    static const size_t bytes[5] = { TOKENS, TOKENS, 2 * WEIGHTS, WEIGHTS, MLP_LIVE * sizeof(float) };
    for (int i = 0; i < 5; i++) t_same(names[i], a->bits[i], b->bits[i], bytes[i]);
}

/* ------------------------------------------------------------------------------------------------- Any MLP --- */

gmm_status mlp_call(gmm_op op, const gmm_mlp *d) {
    gmm_info info = GMM_ZERO;
    const gmm_status s = gmm_mlp_query(T.ctx, op, d, &info);
    void *workspace;
    if (s != GMM_OK) return s;
    workspace = t_workspace(info.workspace_bytes);
    if (op == GMM_OP_MLP_WGRAD) return gmm_mlp_wgrad(T.ctx, d->queue, workspace, info.workspace_bytes, T.stream);
    return (op == GMM_OP_MLP_FWD ? gmm_mlp_fwd : gmm_mlp_bwd)(T.ctx, d, workspace, info.workspace_bytes, T.stream);
}
void (mlp_forward)(gmm_mlp *d) {
    gmm_info info = GMM_ZERO;
    T_OK(gmm_mlp_query(T.ctx, GMM_OP_MLP_FWD, d, &info));
    d->saved_bytes = info.saved_bytes;
    d->saved = info.saved_bytes ? t_alloc_aligned(info.saved_bytes, 256) : NULL;
    T_OK(mlp_call(GMM_OP_MLP_FWD, d));
}

gmm_saved_part mlp_saved_part(const gmm_mlp *d, const char *name) {
    const gmm_saved_part none = GMM_ZERO;
    gmm_saved_layout l = GMM_ZERO;
    T_OK(gmm_mlp_saved_query(T.ctx, GMM_OP_MLP_FWD, d, &l));
    for (int i = 0; i < l.count; i++)
        if (!strcmp(l.part[i].name, name)) return l.part[i];
    return none;
}
int mlp_saves_copies(gmm_save save) { return save == GMM_SAVE_QUANTIZED || save == GMM_SAVE_QUANTIZED_E4M3; }
int mlp_saves_e4m3(gmm_save save) { return save == GMM_SAVE_PREACT_E4M3 || save == GMM_SAVE_QUANTIZED_E4M3; }

static void count_line(void *user, gmm_log_level level, const char *message) {
    (void)message;
    *(int *)user += level == GMM_LOG_TRACE;
}
gmm_context *mlp_traced(int *lines) {
    gmm_config config = T.config;
    config.log.level = GMM_LOG_TRACE;
    config.log.user = lines;
    config.log.write = count_line;
    return t_context(&config);
}

/* Columns of z and of y. */
static int64_t fc1_cols(const gmm_mlp *d) { return d->config->ffn * (gmm_act_gated(d->config->act.kind) ? 2 : 1); }
static int64_t out_cols(const gmm_mlp *d) { return d->config->hidden_out ? d->config->hidden_out : d->config->hidden; }

void (mlp_linear)(const gmm_mlp *d, gmm_param fc, gmm_op op, const gmm_mat *x, const gmm_mat *w, const gmm_mat *dy,
                  const gmm_mat *result) {
    const int second = fc == GMM_PARAM_W2;
    gmm_grad grad = GMM_ZERO;
    gmm_linear l = GMM_ZERO;
    grad.mat = result;
    l.groups = d->groups;
    l.in_features = second ? d->config->ffn : d->config->hidden;
    l.out_features = second ? out_cols(d) : fc1_cols(d);
    l.x = x;
    l.w = w;
    l.dy = dy;
    if (op == GMM_OP_LINEAR_FWD) {
        l.bias = second ? d->b2 : d->b1;
        if (second && d->config->prob_on_bias2) l.bias_scale = d->prob;
        l.y = result;
    } else if (op == GMM_OP_LINEAR_DGRAD) l.dx = result;
    else if (op == GMM_OP_LINEAR_WGRAD) l.dw = &grad;
    else {
        l.db = &grad;
        if (second && d->config->prob_on_bias2) l.bias_scale = d->prob;
    }
    T_OK(t_linear(T.ctx, op, &l));
}

static void act_step(const gmm_mlp *d, gmm_op op, gmm_activation *act) {
    gmm_info info = GMM_ZERO;
    void *workspace;
    act->groups = d->groups;
    act->ffn = d->config->ffn;
    act->act = &d->config->act;
    act->prob = d->prob;
    T_OK(gmm_act_query(T.ctx, op, act, &info));
    workspace = t_workspace(info.workspace_bytes);
    T_OK((op == GMM_OP_ACT_FWD ? gmm_act_fwd : gmm_act_bwd)(T.ctx, act, workspace, info.workspace_bytes, T.stream));
}
void (mlp_act_fwd)(const gmm_mlp *d, const gmm_mat *z, const gmm_mat *h) {
    gmm_activation act = GMM_ZERO;
    act.x = z;
    act.y = h;
    act_step(d, GMM_OP_ACT_FWD, &act);
}
void (mlp_act_bwd)(const gmm_mlp *d, const gmm_mat *z, const gmm_mat *dh, const gmm_mat *dz, float *dprob) {
    gmm_activation act = GMM_ZERO;
    act.x = z;
    act.dy = dh;
    act.dx = dz;
    act.dprob = dprob;
    act_step(d, GMM_OP_ACT_BWD, &act);
}

const gmm_mat *mlp_cast(const gmm_mlp *d, int slot, const gmm_mat *src, gmm_mat copy[2]) {
    const gmm_recipe *recipe = d->quant->recipe;
    const int weight = slot == GMM_SLOT_W1 || slot == GMM_SLOT_W2;
    const int gradient = slot == GMM_SLOT_DY || slot == GMM_SLOT_DZ;
    const int64_t rows = !weight ? 0 : slot == GMM_SLOT_W1 ? fc1_cols(d) : out_cols(d);
    const int64_t cols = slot == GMM_SLOT_DY ? out_cols(d) : slot == GMM_SLOT_DZ ? fc1_cols(d)
                         : slot == GMM_SLOT_X || slot == GMM_SLOT_W1 ? d->config->hidden : d->config->ffn;
    const int32_t count = d->groups->count;
    const size_t units = weight ? (size_t)count : 1, amaxes = sizeof(float) * (size_t)(d->groups->capacity + count);
    const gmm_format rowwise = weight ? recipe->weight : gradient ? recipe->grad : recipe->input;
    gmm_format f[2] = { rowwise, rowwise };
    gmm_quantization q = GMM_ZERO;
    gmm_info info = GMM_ZERO;
    if (rowwise.dtype == GMM_NONE) return src;
    f[1].row_amax = 0; /* columnwise copies have one amax per group */
    for (int k = 0; k < 2; k++) {
        const gmm_direction direction = (gmm_direction)k;
        gmm_layout l = GMM_ZERO;
        T_CHECK((weight ? gmm_layout_of(f[k].dtype, f[k].scaling, f[k].order, direction, rows, cols, &l, NULL)
                        : gmm_layout_of_groups(f[k].dtype, f[k].scaling, f[k].order, direction, count,
                                               d->groups->capacity, cols, &l, NULL)) == GMM_OK, "layout");
        copy[k] = gmm_mat_quantized(&f[k], direction, t_alloc(units * (size_t)l.data_bytes),
                                    t_alloc(units * (size_t)l.scale_bytes), (float *)t_alloc(amaxes));
        if (rowwise.delayed) t_poison(copy[k].amax, 0, amaxes);
    }
    q.groups = weight ? NULL : d->groups;
    q.count = weight ? count : 0;
    q.rows = rows;
    q.cols = cols;
    q.src = src;
    if (rowwise.delayed && d->quant->scale) q.scale = d->quant->scale + slot * count;
    if (rowwise.stochastic) q.random = d->quant->random + (slot == GMM_SLOT_DZ ? 2 : 0);
    for (int k = 0; k < 1 + rowwise.row_amax; k++) { /* two formats take two calls */
        q.format = &f[k];
        q.rowwise = k ? NULL : &copy[0];
        q.columnwise = k == rowwise.row_amax ? &copy[1] : NULL;
        T_OK(gmm_quantize_query(T.ctx, GMM_OP_QUANTIZE, &q, &info));
        T_OK(gmm_quantize(T.ctx, &q, t_workspace(info.workspace_bytes), info.workspace_bytes, T.stream));
    }
    copy[0].columnwise = &copy[1];
    return copy;
}
