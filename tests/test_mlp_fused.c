/* test_mlp_fused.c - forward of an expert MLP whose cast of FC2's input computes the activation: its copies are, byte
   for byte, those of the activation and the cast as separate calls. */
#include "test.h"

#include <string.h>

enum { G = 5, HIDDEN = 16, FFN = 144, ROWS = 160 };
/* Empty groups, one of a row, one that fills a tile of 128 rows and part of the next; the tail has 13 rows. */
static const int64_t sizes_of[G] = { 0, 131, 1, 0, 15 };

typedef struct fused_case {
    gmm_recipe recipe;
    gmm_groups groups;
    gmm_mlp_config config;
    gmm_mlp_quant quant;
    gmm_mlp d;
    t_mat x, w1, w2, y;
    float *scale, *amax;
} fused_case;

static void build(fused_case *c, int recipe, const gmm_act *act, gmm_tail tail) {
    float prob[ROWS], scale[GMM_SLOTS * G];
    memset(c, 0, sizeof *c);
    c->recipe = ref_recipe_of(recipe).recipe;
    c->groups.count = G;
    c->groups.capacity = ROWS;
    c->groups.splits = t_in(sizes_of, sizeof sizes_of);
    c->groups.dtype = GMM_I64;
    c->groups.tail = tail;
    c->config.hidden = HIDDEN;
    c->config.ffn = FFN;
    c->config.act = *act;
    c->config.save = GMM_SAVE_QUANTIZED;
    c->config.prob = 1;
    c->config.recipe = c->recipe.kind;
    c->x = t_mat_in(GMM_BF16, 1, ROWS, HIDDEN, T_REALS);
    c->w1 = t_mat_in(GMM_BF16, G, (gmm_act_gated(act->kind) ? 2 : 1) * FFN, HIDDEN, T_REALS);
    c->w2 = t_mat_in(GMM_BF16, G, HIDDEN, FFN, T_REALS);
    c->y = t_mat_out(GMM_BF16, 1, ROWS, HIDDEN);
    for (int i = 0; i < ROWS; i++) prob[i] = (float)t_real();
    for (int i = 0; i < GMM_SLOTS * G; i++) scale[i] = (float)(2.0 + t_real());
    c->scale = (float *)t_in(scale, sizeof scale);
    c->amax = (float *)t_alloc(sizeof scale);
    t_poison(c->amax, 0, sizeof scale);
    c->quant.recipe = &c->recipe;
    c->quant.scale = c->scale;
    c->quant.amax = c->amax;
    c->d.config = &c->config;
    c->d.groups = &c->groups;
    c->d.x = &c->x.mat;
    c->d.w1 = &c->w1.mat;
    c->d.w2 = &c->w2.mat;
    c->d.prob = (const float *)t_in(prob, sizeof prob);
    c->d.y = &c->y.mat;
    c->d.quant = &c->quant;
}

static void count_line(void *user, gmm_log_level level, const char *message) {
    (void)message;
    *(int *)user += level == GMM_LOG_TRACE;
}
/* Runs forward, and returns the number of operations that it consists of, itself included. */
static int forward(fused_case *c) {
    gmm_config config = T.config;
    gmm_info info = GMM_ZERO;
    gmm_context *ctx;
    int lines = 0;
    config.log.level = GMM_LOG_TRACE;
    config.log.user = &lines;
    config.log.write = count_line;
    ctx = t_context(&config);
    T_OK_TEXT(gmm_mlp_query(ctx, GMM_OP_MLP_FWD, &c->d, &info), gmm_last_error(ctx));
    c->d.saved_bytes = info.saved_bytes;
    c->d.saved = t_alloc_aligned(info.saved_bytes, 256);
    lines = 0;
    T_OK_TEXT(gmm_mlp_fwd(ctx, &c->d, t_workspace(info.workspace_bytes), info.workspace_bytes, T.stream),
              gmm_last_error(ctx));
    return lines;
}

/* The activation of the saved pre-activation. */
static void activate(const fused_case *c, const void *preact, const t_mat *h) {
    const gmm_mat z = gmm_mat_packed(GMM_BF16, preact);
    gmm_activation act = GMM_ZERO;
    gmm_info info = GMM_ZERO;
    act.groups = &c->groups;
    act.ffn = FFN;
    act.act = &c->config.act;
    act.x = &z;
    act.prob = c->d.prob;
    act.y = &h->mat;
    T_OK(gmm_act_query(T.ctx, GMM_OP_ACT_FWD, &act, &info));
    T_OK(gmm_act_fwd(T.ctx, &act, t_workspace(info.workspace_bytes), info.workspace_bytes, T.stream));
}
/* The copies of a matrix in both directions. */
static void cast_both(const fused_case *c, const gmm_format *f, const gmm_mat *src, int slot, int64_t rows,
                      int64_t cols, gmm_mat copy[2]) {
    const int64_t count = rows ? G : 1;
    gmm_quantization d = GMM_ZERO;
    gmm_info info = GMM_ZERO;
    float *amax = (float *)t_alloc(G * sizeof(float));
    t_poison(amax, 0, G * sizeof(float));
    for (int k = 0; k < 2; k++) {
        gmm_layout l = GMM_ZERO;
        T_CHECK((rows ? gmm_layout_of(f->dtype, f->scaling, f->order, (gmm_direction)k, rows, cols, &l, NULL)
                      : gmm_layout_of_groups(f->dtype, f->scaling, f->order, (gmm_direction)k, G, ROWS, cols, &l,
                                             NULL)) == GMM_OK, "layout");
        copy[k] = gmm_mat_quantized(f, (gmm_direction)k, t_alloc((size_t)(count * l.data_bytes)),
                                    t_alloc((size_t)(count * l.scale_bytes)), f->delayed ? amax : NULL);
    }
    d.groups = rows ? NULL : &c->groups;
    d.count = rows ? G : 0;
    d.rows = rows;
    d.cols = cols;
    d.format = f;
    d.src = src;
    d.rowwise = &copy[0];
    d.columnwise = &copy[1];
    if (f->delayed) d.scale = c->scale + slot * G;
    T_OK(gmm_quantize_query(T.ctx, GMM_OP_QUANTIZE, &d, &info));
    T_OK(gmm_quantize(T.ctx, &d, t_workspace(info.workspace_bytes), info.workspace_bytes, T.stream));
    copy[0].columnwise = &copy[1];
}

/* A part of gmm_mlp.saved, in host memory. */
static const void *saved_part(const fused_case *c, const gmm_saved_layout *l, const char *name, size_t *bytes) {
    for (int i = 0; i < l->count; i++)
        if (!strcmp(l->part[i].name, name)) {
            *bytes = (size_t)l->part[i].bytes;
            return t_get((const char *)c->d.saved + l->part[i].offset, *bytes);
        }
    T_FAIL("saved has no %s", name);
}

/* Forward against separate calls. */
static void compare(int recipe, const gmm_act *act, gmm_tail tail, int fuses) {
    const int64_t live = 131 + 1 + 15;
    const t_mat h = t_mat_out(GMM_BF16, 1, ROWS, FFN), y = t_mat_out(GMM_BF16, 1, ROWS, HIDDEN);
    const void *part;
    gmm_linear l = GMM_ZERO;
    gmm_mat copies[2], weights[2];
    gmm_saved_layout layout = GMM_ZERO;
    fused_case c;
    size_t bytes;
    int operations;
    build(&c, recipe, act, tail);
    operations = forward(&c);
    /* forward, offsets, casts of x, w1, h, w2, both products, and the activation if it is an operation of its own */
    T_CHECK(operations == (fuses ? 8 : 9), "%d operations", operations);
    T_OK(gmm_mlp_saved_query(T.ctx, GMM_OP_MLP_FWD, &c.d, &layout));
    T_CHECK(!strcmp(layout.part[0].name, "preact"), "part 0 is %s", layout.part[0].name);
    activate(&c, (const char *)c.d.saved + layout.part[0].offset, &h);
    cast_both(&c, &c.recipe.input, &h.mat, GMM_SLOT_H, 0, FFN, copies);
    part = saved_part(&c, &layout, "act", &bytes);
    t_same("codes", part, t_get(copies[1].data, bytes), bytes);
    part = saved_part(&c, &layout, "act_scale", &bytes);
    t_same("scales", part, t_get(copies[1].scale, bytes), bytes);
    if (c.recipe.input.delayed)
        t_same("amax", t_get(c.amax + GMM_SLOT_H * G, G * 4), t_get(copies[0].amax, G * 4), G * 4);
    cast_both(&c, &c.recipe.weight, &c.w2.mat, GMM_SLOT_W2, HIDDEN, FFN, weights);
    l.groups = &c.groups;
    l.in_features = FFN;
    l.out_features = HIDDEN;
    l.x = &copies[0];
    l.w = &weights[0];
    l.y = &y.mat;
    T_OK(t_linear(T.ctx, GMM_OP_LINEAR_FWD, &l));
    t_same("y", t_mat_bits(&c.y), t_mat_bits(&y), (size_t)(live * HIDDEN * 2));
}
#define compare(...) T_CALL(compare, __VA_ARGS__)

/* An activation (argument: its row in ref_acts) in every layout, by the recipes whose casts compute it and by one whose
   cast does not. */
static void activation(int arg) {
    static const int recipes[] = { REF_FP8_BLOCK, REF_FP8_DELAYED, REF_FP8_CURRENT };
    static const int32_t blocks[] = { 0, 1, 4, 8, 48, FFN };
    const ref_act_row *row = &ref_acts[arg];
    for (int r = 0; r < 3; r++)
        for (int b = 0; b < (row->gated ? 6 : 1); b++) {
            gmm_act act = GMM_ZERO;
            act.kind = row->kind;
            act.interleave = blocks[b];
            if (b % 2) {
                act.limit = 0.75f;
                if (row->gated) act.offset = 0.5f;
                if (row->alpha) act.alpha = 1.5f;
            }
            t_about("%s, recipe %d, blocks of %d", row->name, recipes[r], (int)blocks[b]);
            compare(recipes[r], &act, b % 2 ? GMM_TAIL_ZERO : GMM_TAIL_KEEP,
                    T.gpu && recipes[r] != REF_FP8_CURRENT && blocks[b] != 4);
        }
}

void tests_mlp_fused(void) {
    for (int i = 0; i < ref_act_count; i++)
        if (ref_acts[i].kind != GMM_ACT_NONE) t_add(activation, i, "mlp cast computes %s", ref_acts[i].name);
}
