/* test_mlp_fused.c - an expert MLP whose activation shares its work with another operation: the cast of its result
   computes the activation, or the activation takes the amaxes of the cast, or FC1's product computes the activation, or
   FC2's dgrad its gradient. Results are, byte for byte, those of separate calls. */
#include "mlp_case.h"

#ifdef HAVE_CUDA
#include "device.h"
#endif

#include <string.h>

enum { G = 5, HIDDEN = 16, FFN = 144, ROWS = 160, LIVE = 131 + 1 + 15 };
/* Empty groups, one of a row, one that fills a tile of 128 rows and part of the next; the tail has 13 rows. */
static const int64_t sizes_of[G] = { 0, 131, 1, 0, 15 };

typedef struct fused_case {
    gmm_recipe recipe;
    gmm_groups groups;
    gmm_options options;
    gmm_mlp_config config;
    gmm_mlp_quant quant;
    gmm_mlp d;
    gmm_dtype dtype;
    int64_t ffn;
    t_mat x, w1, w2, y;
    float *scale, *amax;
} fused_case;

static void build(fused_case *c, int recipe, gmm_dtype dtype, int64_t ffn, const gmm_act *act, gmm_tail tail) {
    float prob[ROWS], scale[GMM_SLOTS * G];
    memset(c, 0, sizeof *c);
    c->recipe = ref_recipe_of(recipe).recipe;
    c->groups.count = G;
    c->groups.capacity = ROWS;
    c->groups.splits = t_in(sizes_of, sizeof sizes_of);
    c->groups.dtype = GMM_I64;
    c->groups.tail = tail;
    c->options.sm_limit = ffn > FFN; /* so that a warp computes rows of several groups */
    c->config.hidden = HIDDEN;
    c->config.ffn = c->ffn = ffn;
    c->config.act = *act;
    c->config.save = GMM_SAVE_QUANTIZED;
    c->dtype = dtype;
    c->config.prob = 1;
    c->config.recipe = c->recipe.kind;
    c->x = t_mat_in(dtype, 1, ROWS, HIDDEN, T_REALS);
    c->w1 = t_mat_in(dtype, G, (gmm_act_gated(act->kind) ? 2 : 1) * ffn, HIDDEN, T_REALS);
    c->w2 = t_mat_in(dtype, G, HIDDEN, ffn, T_REALS);
    c->y = t_mat_out(dtype, 1, ROWS, HIDDEN);
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
    c->d.options = &c->options;
    c->d.x = &c->x.mat;
    c->d.w1 = &c->w1.mat;
    c->d.w2 = &c->w2.mat;
    c->d.prob = (const float *)t_in(prob, sizeof prob);
    c->d.y = &c->y.mat;
    c->d.quant = &c->quant;
}

/* Runs forward, and returns the number of operations that it consists of, itself included. */
static int forward(fused_case *c) {
    int lines = 0;
    gmm_context *const ctx = mlp_traced(&lines);
    gmm_info info = GMM_ZERO;
    T_OK_TEXT(gmm_mlp_query(ctx, GMM_OP_MLP_FWD, &c->d, &info), gmm_last_error(ctx));
    c->d.saved_bytes = info.saved_bytes;
    c->d.saved = t_alloc_aligned(info.saved_bytes, 256);
    lines = 0;
    T_OK_TEXT(gmm_mlp_fwd(ctx, &c->d, t_workspace(info.workspace_bytes), info.workspace_bytes, T.stream),
              gmm_last_error(ctx));
    return lines;
}

/* The saved pre-activation. */
static gmm_mat preact_of(const fused_case *c) {
    gmm_saved_layout l = GMM_ZERO;
    T_OK(gmm_mlp_saved_query(T.ctx, GMM_OP_MLP_FWD, &c->d, &l));
    T_CHECK(!strcmp(l.part[0].name, "preact"), "part 0 is %s", l.part[0].name);
    return gmm_mat_packed(c->dtype, (const char *)c->d.saved + l.part[0].offset);
}
/* A part of gmm_mlp.saved, in host memory. */
static const void *saved_part(const fused_case *c, const char *name, size_t *bytes) {
    const gmm_saved_part part = mlp_saved_part(&c->d, name);
    T_CHECK(part.name, "saved has no %s", name);
    *bytes = (size_t)part.bytes;
    return t_get((const char *)c->d.saved + part.offset, *bytes);
}

/* Forward against separate calls. */
static void compare(int recipe, int64_t ffn, const gmm_act *act, gmm_tail tail, int fuses) {
    const t_mat h = t_mat_out(GMM_BF16, 1, ROWS, ffn), y = t_mat_out(GMM_BF16, 1, ROWS, HIDDEN);
    const void *part;
    gmm_mat copies[2], weights[2], z;
    fused_case c;
    size_t bytes;
    int operations;
    build(&c, recipe, GMM_BF16, ffn, act, tail);
    operations = forward(&c);
    /* forward, offsets, casts of x, w1, h, w2, both products, and the activation if it is an operation of its own */
    T_CHECK(operations == (fuses ? 8 : 9), "%d operations", operations);
    z = preact_of(&c);
    mlp_act_fwd(&c.d, &z, &h.mat);
    (void)mlp_cast(&c.d, GMM_SLOT_H, &h.mat, copies);
    part = saved_part(&c, "act", &bytes);
    t_same("codes", part, t_get(copies[1].data, bytes), bytes);
    part = saved_part(&c, "act_scale", &bytes);
    t_same("scales", part, t_get(copies[1].scale, bytes), bytes);
    if (c.recipe.input.delayed)
        t_same("amax", t_get(c.amax + GMM_SLOT_H * G, G * 4), t_get(copies[0].amax, G * 4), G * 4);
    (void)mlp_cast(&c.d, GMM_SLOT_W2, &c.w2.mat, weights);
    mlp_linear(&c.d, GMM_PARAM_W2, GMM_OP_LINEAR_FWD, copies, weights, NULL, &y.mat);
    t_same("y", t_mat_bits(&c.y), t_mat_bits(&y), (size_t)(LIVE * HIDDEN * 2));
}
#define compare(...) T_CALL(compare, __VA_ARGS__)

/* An activation (argument: its row in ref_acts) in every layout, by the recipes whose casts compute it and by one whose
   casts read its amaxes. */
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
            compare(recipes[r], FFN, &act, b % 2 ? GMM_TAIL_ZERO : GMM_TAIL_KEEP,
                    T.gpu && recipes[r] != REF_FP8_CURRENT && blocks[b] != 4);
        }
}

/* 65 tiles along a row, of which one multiprocessor has 128 CTAs at most: each computes a column of tiles. */
static void tiles(int arg) {
    const gmm_act act = gmm_act_of(GMM_ACT_PRESET_SWIGLU);
    compare(arg, 65 * 128, &act, GMM_TAIL_KEEP, T.gpu && arg != REF_FP8_CURRENT);
}

/* dx of backward with amaxes of dz, against separate calls. Rows of more than 768 columns are shared by four warps. */
static void gradient(int arg) {
    const gmm_dtype dtype = (gmm_dtype)arg;
    for (int k = 0; k < 8; k++) {
        const int64_t ffn = k & 1 ? 1040 : FFN;
        gmm_act act = gmm_act_of(GMM_ACT_PRESET_SWIGLU);
        gmm_mat dys[2], dzs[2], w1s[2], w2s[2], z;
        fused_case c;
        t_mat dy, dx, dh, dz, DX;
        float *dprob;
        act.interleave = k & 2 ? 4 : 0;
        act.offset = 1.0f; /* columns beyond the row would not be zero */
        t_about("ffn %d, blocks of %d", (int)ffn, (int)act.interleave);
        build(&c, REF_FP8_CURRENT, dtype, ffn, &act, k & 2 ? GMM_TAIL_ZERO : GMM_TAIL_KEEP);
        (void)forward(&c);
        dy = t_mat_in(dtype, 1, ROWS, HIDDEN, T_REALS);
        dx = t_mat_out(dtype, 1, ROWS, HIDDEN);
        DX = t_mat_out(dtype, 1, ROWS, HIDDEN);
        dh = t_mat_out(dtype, 1, ROWS, ffn);
        dz = t_mat_out(dtype, 1, ROWS, 2 * ffn);
        c.d.dy = &dy.mat;
        c.d.dx = &dx.mat;
        c.d.dprob = k & 4 ? NULL : t_floats_out(ROWS);
        T_OK(mlp_call(GMM_OP_MLP_BWD, &c.d));
        z = preact_of(&c);
        dprob = t_floats_out(ROWS);
        (void)mlp_cast(&c.d, GMM_SLOT_DY, &dy.mat, dys);
        (void)mlp_cast(&c.d, GMM_SLOT_W2, &c.w2.mat, w2s);
        (void)mlp_cast(&c.d, GMM_SLOT_W1, &c.w1.mat, w1s);
        mlp_linear(&c.d, GMM_PARAM_W2, GMM_OP_LINEAR_DGRAD, NULL, w2s, dys, &dh.mat);
        mlp_act_bwd(&c.d, &z, &dh.mat, &dz.mat, dprob);
        (void)mlp_cast(&c.d, GMM_SLOT_DZ, &dz.mat, dzs);
        mlp_linear(&c.d, GMM_PARAM_W1, GMM_OP_LINEAR_DGRAD, NULL, w1s, dzs, &DX.mat);
        t_same("dx", t_mat_bits(&dx), t_mat_bits(&DX), (size_t)(LIVE * HIDDEN * ref_bytes(dtype)));
        if (c.d.dprob) t_same("dprob", t_get(c.d.dprob, LIVE * 4), t_get(dprob, LIVE * 4), LIVE * 4);
    }
}

/* The gradients of a call whose casts of dz compute it, or do not, against separate calls. dprob, dw1, db1 and dw2 are
   wanted by the bits of `want`; dw2, for which a cast computes h again. The number of operations says what the casts
   compute. */
enum { WANT_DPROB = 1, WANT_DW1 = 2, WANT_DB1 = 4, WANT_DW2 = 8 };
static void compare_gradients(int recipe, int64_t ffn, const gmm_act *act, gmm_tail tail, int want, int computes) {
    const int64_t cols = (gmm_act_gated(act->kind) ? 2 : 1) * ffn;
    const t_mat dy = t_mat_in(GMM_BF16, 1, ROWS, HIDDEN, T_REALS), dh = t_mat_out(GMM_BF16, 1, ROWS, ffn);
    const t_mat dz = t_mat_out(GMM_BF16, 1, ROWS, cols), dx = t_mat_out(GMM_BF16, 1, ROWS, HIDDEN);
    const t_mat DX = t_mat_out(GMM_BF16, 1, ROWS, HIDDEN), dw1 = t_mat_out(GMM_F32, G, cols, HIDDEN);
    const t_mat DW1 = t_mat_out(GMM_F32, G, cols, HIDDEN), db1 = t_mat_out(GMM_F32, G, 1, cols);
    const t_mat DB1 = t_mat_out(GMM_F32, G, 1, cols), b1 = t_mat_in(GMM_BF16, G, 1, cols, T_REALS);
    const t_mat dw2 = t_mat_out(GMM_F32, G, HIDDEN, ffn), DW2 = t_mat_out(GMM_F32, G, HIDDEN, ffn);
    const t_mat h = t_mat_out(GMM_BF16, 1, ROWS, ffn);
    const gmm_grad grad_w1 = { .mat = &dw1.mat }, grad_b1 = { .mat = &db1.mat }, grad_w2 = { .mat = &dw2.mat };
    float *const dprob = t_floats_out(ROWS), *const DPROB = t_floats_out(ROWS);
    gmm_mat dys[2], dzs[2], w1s[2], w2s[2], xs[2], hs[2], z;
    gmm_info info = GMM_ZERO;
    gmm_context *ctx;
    int lines = 0, operations;
    fused_case c;
    build(&c, recipe, GMM_BF16, ffn, act, tail);
    if (want & WANT_DB1) {
        c.config.bias1 = 1;
        c.d.b1 = &b1.mat;
    }
    if (want & WANT_DW2) {
        c.config.save = GMM_SAVE_PREACT;
        c.d.dw2 = &grad_w2;
    }
    (void)forward(&c);
    z = preact_of(&c);
    c.d.dy = &dy.mat;
    c.d.dx = &dx.mat;
    if (want & WANT_DW1) c.d.dw1 = &grad_w1;
    if (want & WANT_DB1) c.d.db1 = &grad_b1;
    ctx = mlp_traced(&lines);
    c.d.dprob = NULL; /* a query need not have addresses */
    T_OK_TEXT(gmm_mlp_query(ctx, GMM_OP_MLP_BWD, &c.d, &info), gmm_last_error(ctx));
    if (want & WANT_DPROB) c.d.dprob = dprob;
    lines = 0;
    T_OK_TEXT(gmm_mlp_bwd(ctx, &c.d, t_workspace(info.workspace_bytes), info.workspace_bytes, T.stream),
              gmm_last_error(ctx));
    /* backward, offsets, casts of dy, w2, dz, w1, both dgrad, the activation, and what else is wanted: dw2 by a cast of
       h and a product; then x is not saved, and is cast for dw1 */
    operations = 9 + !!(want & WANT_DW1) + !!(want & WANT_DB1);
    if (want & WANT_DW2) operations += 2 + !!(want & WANT_DW1);
    T_CHECK(lines == operations - computes, "%d operations, not %d", lines, operations - computes);
    (void)mlp_cast(&c.d, GMM_SLOT_DY, &dy.mat, dys);
    (void)mlp_cast(&c.d, GMM_SLOT_W2, &c.w2.mat, w2s);
    (void)mlp_cast(&c.d, GMM_SLOT_W1, &c.w1.mat, w1s);
    (void)mlp_cast(&c.d, GMM_SLOT_X, &c.x.mat, xs);
    mlp_linear(&c.d, GMM_PARAM_W2, GMM_OP_LINEAR_DGRAD, NULL, w2s, dys, &dh.mat);
    mlp_act_bwd(&c.d, &z, &dh.mat, &dz.mat, DPROB);
    (void)mlp_cast(&c.d, GMM_SLOT_DZ, &dz.mat, dzs);
    mlp_linear(&c.d, GMM_PARAM_W1, GMM_OP_LINEAR_DGRAD, NULL, w1s, dzs, &DX.mat);
    t_same("dx", t_mat_bits(&dx), t_mat_bits(&DX), LIVE * HIDDEN * 2);
    if (want & WANT_DPROB) t_same("dprob", t_get(dprob, LIVE * 4), t_get(DPROB, LIVE * 4), LIVE * 4);
    if (want & WANT_DPROB)
        t_bytes("tail of dprob", (char *)t_get(dprob, ROWS * 4) + LIVE * 4, tail == GMM_TAIL_ZERO ? 0 : 0xFF,
                (ROWS - LIVE) * 4);
    if (want & WANT_DW1) {
        mlp_linear(&c.d, GMM_PARAM_W1, GMM_OP_LINEAR_WGRAD, xs, NULL, dzs, &DW1.mat);
        t_same("dw1", t_mat_bits(&dw1), t_mat_bits(&DW1), (size_t)(G * cols * HIDDEN * 4));
    }
    if (want & WANT_DB1) {
        mlp_linear(&c.d, GMM_PARAM_W1, GMM_OP_LINEAR_BGRAD, NULL, NULL, &dz.mat, &DB1.mat);
        t_same("db1", t_mat_bits(&db1), t_mat_bits(&DB1), (size_t)(G * cols * 4));
    }
    if (want & WANT_DW2) {
        mlp_act_fwd(&c.d, &z, &h.mat);
        (void)mlp_cast(&c.d, GMM_SLOT_H, &h.mat, hs);
        mlp_linear(&c.d, GMM_PARAM_W2, GMM_OP_LINEAR_WGRAD, hs, NULL, dys, &DW2.mat);
        t_same("dw2", t_mat_bits(&dw2), t_mat_bits(&DW2), (size_t)(G * HIDDEN * ffn * 4));
    }
    if (c.recipe.grad.delayed)
        t_same("amax", t_get(c.amax + GMM_SLOT_DZ * G, G * 4), t_get(dzs[0].amax, G * 4), G * 4);
}
#define compare_gradients(...) T_CALL(compare_gradients, __VA_ARGS__)

/* Casts that compute dz (argument: the recipe), in layouts that they take and in others: they need 128 columns of h
   that lie together. Rows of more than 768 columns have dprob from four warps. */
static void computed_gradient(int recipe) {
    static const struct { gmm_act_kind kind; int64_t ffn; int32_t blocks; int by_tensor, by_block; } layouts[] = {
        { GMM_ACT_SWIGLU, 256, 0, 1, 1 }, { GMM_ACT_SWIGLU, 1152, 0, 1, 1 }, { GMM_ACT_SWIGLU, 384, 128, 1, 1 },
        { GMM_ACT_SWIGLU, 256, 64, 0, 0 }, { GMM_ACT_SWIGLU, 256, 1, 0, 0 }, { GMM_ACT_GEGLU, 384, 384, 1, 1 },
        { GMM_ACT_SWIGLU, 272, 0, 1, 0 }, { GMM_ACT_SITUGLU, 48, 0, 1, 0 }, { GMM_ACT_GELU, 208, 0, 1, 1 },
        { GMM_ACT_RELU2, 1040, 0, 1, 1 },
    };
    const int by_block = recipe == REF_FP8_BLOCK;
    for (int i = 0; i < (int)(sizeof layouts / sizeof layouts[0]); i++)
        for (int k = 0; k < 3; k++) {
            const int want = k == 0 ? 0 : k == 1 ? WANT_DPROB | WANT_DW1 | WANT_DB1
                             : i % 2 ? WANT_DW2 : WANT_DW1 | WANT_DW2 | WANT_DPROB;
            gmm_act act = GMM_ZERO;
            act.kind = layouts[i].kind;
            act.interleave = layouts[i].blocks;
            if (gmm_act_gated(act.kind)) act.offset = 1.0f; /* columns beyond the row would not be zero */
            t_about("ffn %d, blocks of %d, want %d", (int)layouts[i].ffn, (int)act.interleave, want);
            compare_gradients(recipe, layouts[i].ffn, &act, i % 2 ? GMM_TAIL_ZERO : GMM_TAIL_KEEP, want,
                              T.gpu && (by_block ? layouts[i].by_block : layouts[i].by_tensor));
        }
}

/* ------------------------------------------------------------------------------- Activation in FC1's product --- */

/* A forward. blocks: act.interleave. casts: by blocks of FP8, so that the product quantizes the activation too; bits 1
   and 2: with scales that are powers of two, with eps. */
typedef struct product_spec {
    gmm_dtype dtype;
    const ref_act_row *row;
    int64_t hidden, ffn;
    int32_t blocks;
    int settings, bias, prob, gathers, tables, casts; /* settings: limit, offset, alpha */
    int quantized, specials; /* quantized: w1 and w2 are; specials: rows of x are NaN, Inf, large, tiny, 0 */
    int32_t groups, sm_limit; /* groups 0: G */
    gmm_save save;
    gmm_tail tail;
    const int64_t *sizes; /* [groups] */
} product_spec;
typedef struct product_case {
    gmm_mlp_config config;
    gmm_groups groups;
    gmm_options options;
    gmm_recipe recipe;
    gmm_mlp_quant quant;
    gmm_mlp d;
    t_mat x, w1, w2, b1, y;
    gmm_mat copies[2][2]; /* of w1 and w2 */
    int64_t rows;
} product_case;

static void build_product(product_case *c, const product_spec *s) {
    int64_t live = 0;
    float *prob;
    int32_t *index;
    const int32_t groups = s->groups ? s->groups : G;
    memset(c, 0, sizeof *c);
    for (int g = 0; g < groups; g++) live += s->sizes[g];
    c->rows = live + 13;
    t_splits(s->sizes, groups);
    t_about("%s %s, hidden %d, ffn %d, blocks of %d, settings %d, bias %d, prob %d, gathers %d, casts %d, save %d, "
            "tail %d", s->row->name, gmm_dtype_name(s->dtype), (int)s->hidden, (int)s->ffn, (int)s->blocks,
            s->settings, s->bias, s->prob, s->gathers, s->casts, (int)s->save, (int)s->tail);
    c->groups.count = groups;
    c->groups.capacity = c->rows;
    c->groups.splits = t_in(s->sizes, (size_t)groups * sizeof *s->sizes);
    c->options.sm_limit = s->sm_limit;
    c->groups.dtype = GMM_I64;
    c->groups.tail = s->tail;
    c->config.hidden = s->hidden;
    c->config.ffn = s->ffn;
    c->config.act.kind = s->row->kind;
    c->config.act.interleave = s->blocks;
    if (s->settings) {
        c->config.act.limit = 0.75f;
        c->config.act.offset = 0.5f;
        if (s->row->alpha) c->config.act.alpha = 1.5f;
    }
    c->config.bias1 = s->bias;
    c->config.prob = s->prob;
    c->config.save = s->save;
    c->x = t_mat_make(s->dtype, 1, c->rows, s->hidden, 8, 0, T_PACKED, T_REALS);
    c->w1 = t_mat_make(s->dtype, groups, 2 * s->ffn, s->hidden, 8, 0, s->tables ? T_TABLE : T_PACKED, T_REALS);
    c->w2 = t_mat_in(s->dtype, groups, s->hidden, s->ffn, T_REALS);
    c->b1 = t_mat_in(s->dtype, groups, 1, 2 * s->ffn, T_REALS);
    c->y = t_mat_out(s->dtype, 1, c->rows, s->hidden);
    c->d.config = &c->config;
    c->d.groups = &c->groups;
    c->d.options = &c->options;
    c->d.x = &c->x.mat;
    c->d.w1 = &c->w1.mat;
    c->d.w2 = &c->w2.mat;
    if (s->bias) c->d.b1 = &c->b1.mat;
    c->d.y = &c->y.mat;
    if (s->casts) {
        c->recipe = ref_recipe_of(REF_FP8_BLOCK).recipe;
        c->recipe.input.pow2 = s->casts >> 1 & 1;
        c->recipe.input.eps = s->casts & 4 ? 0.5f : 0.0f;
        c->config.recipe = c->recipe.kind;
        c->quant.recipe = &c->recipe;
        c->d.quant = &c->quant;
    }
    if (s->quantized) {
        c->d.w1 = mlp_cast(&c->d, GMM_SLOT_W1, c->d.w1, c->copies[0]);
        c->d.w2 = mlp_cast(&c->d, GMM_SLOT_W2, c->d.w2, c->copies[1]);
    }
    for (int64_t r = 0; r < live && s->specials; r++) {
        static const uint16_t values[] = { 0x7FC0, 0xFF80, 0x7F00, 0x0080, 0x0000, 0x3F80, 0x0001 };
        uint16_t row[1024];
        for (int64_t i = 0; i < s->hidden; i++) row[i] = r % 3 && i ? values[5] : values[r % 7];
        t_upload((char *)c->x.mat.data + r * c->x.mat.ld * 2, row, (size_t)s->hidden * 2);
    }
    prob = (float *)t_host((size_t)c->rows * sizeof *prob);
    index = (int32_t *)t_host((size_t)c->rows * sizeof *index);
    for (int64_t i = 0; i < c->rows; i++) prob[i] = (float)t_real(), index[i] = (int32_t)t_int(-1, c->rows - 1);
    if (s->prob) c->d.prob = (const float *)t_in(prob, (size_t)c->rows * sizeof *prob);
    if (!s->gathers) return;
    c->d.x_index = (const int32_t *)t_in(index, (size_t)c->rows * sizeof *index);
    c->d.index_rows = c->rows;
}

/* What a call writes, rows of tokens to their last live one. Forward: y, the saved pre-activation and activation.
   Backward: dx, dw1, dw2, dprob. */
typedef struct product_result { const void *part[4]; size_t bytes[4]; int parts; char note[192]; } product_result;
static product_result run_product(product_case *c, gmm_fuse fuse, int inference) {
    const gmm_dtype dtype = c->y.dtype;
    const int64_t live = c->rows - 13, kept = c->groups.tail == GMM_TAIL_ZERO ? c->rows : live;
    gmm_saved_layout l = GMM_ZERO;
    gmm_info info = GMM_ZERO;
    product_result r;
    memset(&r, 0, sizeof r);
    c->options.fuse = fuse;
    c->d.saved = NULL;
    t_poison(c->y.mat.data, 0xFF, (size_t)(c->rows * c->y.cols * ref_bytes(dtype)));
    T_OK(gmm_mlp_query(T.ctx, GMM_OP_MLP_FWD, &c->d, &info));
    memcpy(r.note, info.note, sizeof r.note);
    c->d.saved_bytes = info.saved_bytes;
    c->d.saved = inference ? NULL : t_alloc_aligned(info.saved_bytes, 256);
    if (!inference && info.saved_bytes) t_poison(c->d.saved, 0xFF, info.saved_bytes);
    T_OK(gmm_mlp_fwd(T.ctx, &c->d, t_workspace(info.workspace_bytes), info.workspace_bytes, T.stream));
    r.bytes[0] = (size_t)(kept * c->y.cols * ref_bytes(dtype));
    r.part[r.parts++] = t_get(c->y.mat.data, r.bytes[0]);
    if (inference) return r;
    T_OK(gmm_mlp_saved_query(T.ctx, GMM_OP_MLP_FWD, &c->d, &l));
    for (int i = 0; i < l.count; i++) {
        if (l.part[i].rows != c->rows) continue; /* scales */
        r.bytes[r.parts] = (size_t)(kept * l.part[i].cols * ref_bytes(l.part[i].dtype));
        r.part[r.parts] = t_get((const char *)c->d.saved + l.part[i].offset, r.bytes[r.parts]);
        r.parts++;
    }
    return r;
}

/* The kernel of FC1 as gmm_describe has it. */
static int joins_product(product_case *c) {
    static _Thread_local char text[4096];
    T_OK(gmm_describe(T.ctx, GMM_OP_MLP_FWD, &c->d, text, sizeof text));
    return strstr(text, "with the activation") != NULL;
}

/* Demands one launch. Returns 0 where there is none: engines other than WGMMA refuse it. */
static int demand_product(product_case *c, gmm_info *info) {
    gmm_status status;
    c->options.fuse = GMM_FUSE_ALWAYS;
    status = gmm_mlp_query(T.ctx, GMM_OP_MLP_FWD, &c->d, info);
    if (status == GMM_OK) {
        T_CHECK(joins_product(c), "FC1 alone");
        return 1;
    }
    T_CHECK(status == GMM_E_UNSUPPORTED && strstr(gmm_last_error(T.ctx), "an act fused into a product"),
            "\"%s\"", gmm_last_error(T.ctx));
    T_CHECK(T.engine != GMM_ENGINE_AUTO || !T.gpu || strstr(gmm_last_error(T.ctx), "compute capability") ||
            strstr(gmm_last_error(T.ctx), "is not in this build"), "\"%s\"", gmm_last_error(T.ctx));
    return 0;
}

/* Both ways, in training and inference. */
static void compare_product(const product_spec *s) {
    static const char *const names[] = { "y", "preact", "act" };
    product_case c;
    gmm_info info = GMM_ZERO;
    build_product(&c, s);
    if (!demand_product(&c, &info)) return;
    for (int inference = 0; inference < 2; inference++) {
        const product_result never = run_product(&c, GMM_FUSE_NEVER, inference);
        const product_result always = run_product(&c, GMM_FUSE_ALWAYS, inference);
        const product_result by_plan = run_product(&c, GMM_FUSE_AUTO, inference);
        for (int i = 0; i < never.parts; i++) {
            t_same(names[i], always.part[i], never.part[i], never.bytes[i]);
            t_same(names[i], by_plan.part[i], never.part[i], never.bytes[i]);
        }
    }
}
#define compare_product(...) T_CALL(compare_product, __VA_ARGS__)

static const int64_t large_sizes[G] = { 177, 0, 353, 8, 163 };
static product_spec product_of(gmm_dtype dtype, int act) {
    const product_spec s = { .dtype = dtype, .row = &ref_acts[act], .hidden = 72, .ffn = 192, .sizes = sizes_of };
    return s;
}
static product_spec swiglu_of(gmm_dtype dtype) {
    int act = 0;
    while (ref_acts[act].kind != GMM_ACT_SWIGLU) act++;
    return product_of(dtype, act);
}

/* An activation in every layout of its columns, with one column tile and with several, the last one behind the others.
   arg: its row in ref_acts. */
static void product_layouts(int arg) {
    static const int32_t blocks[] = { 0, 8, 16, 32, 64, 192 };
    for (int b = 0; b < 6; b++) {
        product_spec s = product_of(b % 2 ? GMM_F16 : GMM_BF16, arg);
        s.blocks = blocks[b];
        s.settings = b % 3 == 1;
        s.prob = b % 2;
        s.bias = b / 2 % 2;
        s.tail = b % 3 ? GMM_TAIL_KEEP : GMM_TAIL_ZERO;
        compare_product(&s);
    }
}
/* Sizes of groups and matrices, save policies, gathered rows, tables of weights. */
static void product_shapes(int arg) {
    static const int64_t hidden[] = { 8, 64, 200, 328 }, ffn[] = { 64, 128, 320, 448 };
    static const gmm_save saves[] = { GMM_SAVE_PREACT, GMM_SAVE_PREACT_AND_ACT, GMM_SAVE_NOTHING,
                                      GMM_SAVE_PREACT_E4M3 };
    for (int k = 0; k < 4; k++) {
        product_spec s = swiglu_of(arg % 2 ? GMM_F16 : GMM_BF16);
        s.hidden = hidden[(k + arg) % 4];
        s.ffn = ffn[k];
        s.blocks = k == 2 ? 64 : k == 3 ? 32 : 0;
        s.prob = s.bias = k % 2;
        s.save = saves[(k + arg / 2) % 4];
        s.gathers = (k + arg) % 3 == 2;
        s.tables = arg % 3 == 1;
        s.sizes = k % 2 ? large_sizes : sizes_of;
        compare_product(&s);
    }
}

/* A product by blocks of FP8, which quantizes its activation (argument: its row in ref_acts) for FC2. */
static void product_casts(int arg) {
    static const int64_t hidden[] = { 128, 208, 16, 400 }, ffn[] = { 128, 384, 256, 640 };
    static const gmm_save saves[] = { GMM_SAVE_PREACT, GMM_SAVE_NOTHING, GMM_SAVE_PREACT_E4M3, GMM_SAVE_PREACT };
    for (int k = 0; k < 4; k++) {
        product_spec s = product_of(GMM_BF16, arg);
        s.casts = 1 + 2 * (k % 2) + 4 * (k == 3);
        s.hidden = hidden[k];
        s.ffn = ffn[k];
        s.blocks = k == 1 ? 128 : 0;
        s.settings = k == 2;
        s.bias = k % 2;
        s.prob = (k + arg) % 2;
        s.save = saves[k];
        s.tail = k % 2 ? GMM_TAIL_ZERO : GMM_TAIL_KEEP;
        s.gathers = k == 3;
        s.tables = k == 1;
        s.quantized = k % 2;
        s.specials = k == 2 || k == 3;
        s.sm_limit = k == 2 ? 3 : 0;
        s.sizes = k < 2 ? large_sizes : sizes_of;
        compare_product(&s);
    }
}
/* Weights in a cache: the first call casts them into it, and the second, which finds other weights, reads it. */
static void product_casts_cached(int arg) {
    const int32_t words[2] = { 0, 1 };
    product_spec s = swiglu_of(GMM_BF16);
    const void *first = NULL;
    t_mat other;
    (void)arg;
    s.casts = 1;
    s.hidden = 128;
    s.ffn = 256;
    for (int fuse = GMM_FUSE_NEVER; fuse <= GMM_FUSE_ALWAYS; fuse++) {
        const int32_t *const skip = (const int32_t *)t_in(words, sizeof words);
        gmm_info info = GMM_ZERO;
        product_case c;
        t_reseed(9);
        build_product(&c, &s);
        if (fuse == GMM_FUSE_ALWAYS && !demand_product(&c, &info)) return;
        c.options.fuse = (gmm_fuse)fuse;
        T_OK(gmm_mlp_query(T.ctx, GMM_OP_MLP_FWD, &c.d, &info));
        c.quant.weight_cache_bytes = info.weight_cache_bytes;
        c.quant.weight_cache = t_alloc_aligned(info.weight_cache_bytes, 256);
        t_poison(c.quant.weight_cache, 0xFF, info.weight_cache_bytes);
        other = t_mat_in(GMM_BF16, G, 2 * s.ffn, s.hidden, T_REALS);
        for (int call = 0; call < 2; call++) {
            c.quant.weight_skip = skip + call;
            if (call) c.d.w1 = &other.mat;
            T_OK(gmm_mlp_query(T.ctx, GMM_OP_MLP_FWD, &c.d, &info));
            t_poison(c.y.mat.data, 0xFF, (size_t)(c.rows * c.y.cols * 2));
            T_OK(gmm_mlp_fwd(T.ctx, &c.d, t_workspace(info.workspace_bytes), info.workspace_bytes, T.stream));
            if (first) t_same("y", t_mat_bits(&c.y), first, (size_t)((c.rows - 13) * c.y.cols * 2));
            else first = t_mat_bits(&c.y);
        }
    }
}
/* The same of so many groups that no first tile is predicted, and that their tables lie in the workspace. */
static void product_casts_groups(int arg) {
    int64_t sizes[300];
    product_spec s = swiglu_of(GMM_BF16);
    for (int g = 0; g < 300; g++) sizes[g] = g % 7 ? g * 13 % 9 : g % 2 * 70;
    s.casts = s.prob = 1;
    s.hidden = 16;
    s.ffn = 128;
    s.groups = arg;
    s.sizes = sizes;
    compare_product(&s);
}
/* Everything that a joined product takes, drawn at random. */
static void product_drawn(int arg) {
    static const int32_t blocks[] = { 0, 8, 16, 32, 64 };
    static const gmm_save saves[] = { GMM_SAVE_PREACT, GMM_SAVE_NOTHING, GMM_SAVE_PREACT_AND_ACT };
    const int casts = (int)t_int(0, 1);
    product_spec s = product_of(casts || t_int(0, 1) ? GMM_BF16 : GMM_F16, 0);
    (void)arg;
    do s.row = &ref_acts[t_int(0, ref_act_count - 1)];
    while (!s.row->gated);
    s.hidden = (casts ? 16 : 8) * t_int(1, 24);
    s.ffn = (casts ? 128 : 64) * t_int(1, 3);
    s.blocks = casts ? 128 * (int32_t)t_int(0, 1) : blocks[t_int(0, 4)];
    s.settings = (int)t_int(0, 1);
    s.bias = (int)t_int(0, 1);
    s.prob = (int)t_int(0, 1);
    s.gathers = (int)t_int(0, 1);
    s.tables = (int)t_int(0, 1);
    s.casts = casts ? 1 + 2 * (int)t_int(0, 3) : 0;
    s.quantized = casts && t_int(0, 1);
    s.specials = casts && t_int(0, 3) == 0;
    s.groups = (int32_t)t_int(1, 12);
    s.sm_limit = t_int(0, 3) ? 0 : (int32_t)t_int(1, 8);
    s.save = saves[t_int(0, casts ? 1 : 2)];
    s.tail = (gmm_tail)t_int(0, 1);
    s.sizes = t_draw_sizes(s.groups, t_int(1, 600));
    compare_product(&s);
}

#ifdef HAVE_CUDA
/* FC1 begins while an earlier kernel still changes the split, so that its predicted first tiles are wrong: the
   workspace begins with the split as row offsets. */
static void product_casts_late(int arg) {
    static const int64_t early[4][G + 1] = { { 0, 1, 300, 301, 302, 701 }, { 0, 700, 700, 700, 700, 701 },
                                             { 0, 0, 0, 0, 0, 0 }, { 0, 0, 20, 500, 500, 701 } };
    product_spec s = swiglu_of(GMM_BF16);
    product_case c;
    gmm_info info = GMM_ZERO;
    const void *want;
    void *workspace;
    s.casts = s.prob = 1;
    s.hidden = 144;
    s.ffn = 384;
    s.sizes = large_sizes;
    build_product(&c, &s);
    if (!demand_product(&c, &info)) return;
    workspace = t_workspace(info.workspace_bytes);
    T_OK(gmm_mlp_fwd(T.ctx, &c.d, workspace, info.workspace_bytes, T.stream));
    want = t_mat_bits(&c.y);
    t_poison(c.y.mat.data, 0xFF, (size_t)(c.rows * c.y.cols * 2));
    if (!device_early_reads(workspace, early[arg], sizeof early[arg]))
        t_skip("the emulator alone lets a kernel read what was there before");
    T_OK(gmm_mlp_fwd(T.ctx, &c.d, workspace, info.workspace_bytes, T.stream));
    (void)device_early_reads(NULL, NULL, 0);
    t_same("y", t_mat_bits(&c.y), want, (size_t)((c.rows - 13) * c.y.cols * 2));
}
#endif

/* Weights that hooks.need makes known: their addresses are NULL when the call begins. */
typedef struct late_weights { gmm_mat *mat[2]; gmm_mat known[2]; int64_t off; } late_weights;
static gmm_status make_known(void *user, gmm_param param, gmm_op op, gmm_stream stream) {
    late_weights *late = (late_weights *)user;
    const int i = param == GMM_PARAM_W2;
    (void)op, (void)stream;
    *late->mat[i] = late->known[i];
    if (late->mat[i]->data) late->mat[i]->data = (char *)late->mat[i]->data + late->off;
    return GMM_OK;
}
static void product_late(int arg) {
    product_spec s = swiglu_of(GMM_BF16);
    const void *bits[2];
    s.tables = arg == 1;
    s.bias = s.prob = 1;
    s.casts = arg == 2;
    if (s.casts) s.hidden = 128, s.ffn = 256;
    for (int fuse = GMM_FUSE_NEVER; fuse <= GMM_FUSE_ALWAYS; fuse++) {
        gmm_info info = GMM_ZERO;
        late_weights late;
        gmm_mat w[2];
        const gmm_grad_hooks hooks = { &late, NULL, make_known };
        product_case c;
        t_reseed(7);
        build_product(&c, &s);
        for (int i = 0; i < 2; i++) {
            late.mat[i] = &w[i];
            late.known[i] = w[i] = i ? c.w2.mat : c.w1.mat;
            w[i].data = NULL, w[i].table = NULL;
        }
        late.off = 0;
        c.d.w1 = &w[0], c.d.w2 = &w[1], c.d.hooks = &hooks;
        c.options.fuse = (gmm_fuse)fuse;
        if (gmm_mlp_query(T.ctx, GMM_OP_MLP_FWD, &c.d, &info) != GMM_OK) { /* compare_product checks the reason */
            T_CHECK(fuse == GMM_FUSE_ALWAYS, "\"%s\"", gmm_last_error(T.ctx));
            return;
        }
        T_CHECK(joins_product(&c) == (fuse == GMM_FUSE_ALWAYS), "fuse %d", fuse);
        T_OK(gmm_mlp_fwd(T.ctx, &c.d, t_workspace(info.workspace_bytes), info.workspace_bytes, T.stream));
        bits[fuse == GMM_FUSE_ALWAYS] = t_mat_bits(&c.y);
        if (fuse == GMM_FUSE_NEVER) continue;
        t_same("y", bits[1], bits[0], (size_t)((c.rows - 13) * c.y.cols * 2));
        if (arg) continue; /* the host reads no addresses in a device table, and casts take any */
        w[0].data = w[1].data = NULL;
        late.off = 2; /* rows of w1 at multiples of 16 bytes, but not their first */
        T_CHECK(gmm_mlp_fwd(T.ctx, &c.d, t_workspace(info.workspace_bytes), info.workspace_bytes, T.stream) ==
                    GMM_E_ALIGN && strstr(gmm_last_error(T.ctx), "set by hooks.need"), "\"%s\"", gmm_last_error(T.ctx));
    }
}

/* What the plan takes by itself: one launch where groups have few rows, two where the product is large. */
static void product_chosen(int arg) {
    static const struct { int64_t hidden, ffn, rows; int joined, recipe; } rows[] = { { 2048, 4096, 64, 1, 0 },
                                                                                    { 768, 2688, 2225, 0, 0 },
                                                                                    { 1024, 4096, 16, 1, 1 },
                                                                                    { 4096, 640, 146, 0, 1 } };
    const gmm_mat m = gmm_mat_packed(GMM_BF16, NULL);
    gmm_mlp_config config = { .hidden = rows[arg].hidden, .ffn = rows[arg].ffn,
                              .act = gmm_act_of(GMM_ACT_PRESET_SWIGLU) };
    gmm_groups groups = { .count = 4, .capacity = 4 * rows[arg].rows, .dtype = GMM_I32 };
    gmm_options options = GMM_ZERO;
    gmm_info info = GMM_ZERO;
    const gmm_recipe recipe = ref_recipe_of(REF_FP8_BLOCK).recipe;
    gmm_mlp_quant quant = GMM_ZERO;
    product_case c;
    memset(&c, 0, sizeof c);
    quant.recipe = &recipe;
    if (rows[arg].recipe) config.recipe = recipe.kind, c.d.quant = &quant;
    c.d.config = &config;
    c.d.groups = &groups;
    c.d.options = &options;
    c.d.x = c.d.w1 = c.d.w2 = c.d.y = &m;
    options.fuse = GMM_FUSE_ALWAYS;
    if (gmm_mlp_query(T.ctx, GMM_OP_MLP_FWD, &c.d, &info) != GMM_OK) { /* not here: compare_product checks the reason */
        options.fuse = GMM_FUSE_AUTO;
        T_CHECK(!joins_product(&c), "joined");
        return;
    }
    options.fuse = GMM_FUSE_AUTO;
#ifdef HAVE_CUDA
    if (!device_prices()) t_skip("for this number of multiprocessors prices differ");
#endif
    T_CHECK(joins_product(&c) == rows[arg].joined, "%s", joins_product(&c) ? "joined" : "two launches");
}

/* A query without `saved` suffices for training too, where blocks of the workspace lie otherwise. */
static void product_workspace(int arg) {
    static const int64_t hidden[] = { 96, 288 }, out[] = { 96, 672, 1024 };
    static const gmm_save saves[] = { GMM_SAVE_PREACT, GMM_SAVE_PREACT_AND_ACT, GMM_SAVE_PREACT_E4M3 };
    const gmm_recipe recipe = ref_recipe_of(REF_FP8_BLOCK).recipe;
    const gmm_mat m = gmm_mat_packed(GMM_BF16, NULL);
    gmm_groups groups = { .count = 3, .capacity = 130, .dtype = GMM_I32 };
    gmm_mlp_quant quant = GMM_ZERO;
    _Alignas(256) char saved[256];
    quant.recipe = &recipe;
    for (int i = 0; i < 54; i++) {
        gmm_mlp_config config = { .hidden = hidden[i % 2], .ffn = 256, .hidden_out = out[i / 2 % 3],
                                  .save = saves[i / 6 % 3],
                                  .act = gmm_act_of(GMM_ACT_PRESET_SWIGLU),
                                  .recipe = arg ? recipe.kind : GMM_RECIPE_NONE };
        gmm_options options = { .fuse = (gmm_fuse)(i / 18) };
        gmm_mlp d = { .config = &config, .groups = &groups, .options = &options, .x = &m, .w1 = &m, .w2 = &m, .y = &m,
                      .quant = arg ? &quant : NULL };
        gmm_info info[2] = { GMM_ZERO, GMM_ZERO };
        if (!arg && config.save == GMM_SAVE_PREACT_E4M3) continue;
        if (gmm_mlp_query(T.ctx, GMM_OP_MLP_FWD, &d, &info[0]) != GMM_OK) {
            T_CHECK(options.fuse == GMM_FUSE_ALWAYS, "\"%s\"", gmm_last_error(T.ctx));
            continue;
        }
        d.saved = saved;
        T_OK(gmm_mlp_query(T.ctx, GMM_OP_MLP_FWD, &d, &info[1]));
        T_CHECK(info[1].workspace_bytes <= info[0].workspace_bytes, "hidden %d, out %d, save %d, fuse %d: with "
                "saved %zu, without %zu", (int)config.hidden, (int)config.hidden_out, (int)config.save,
                (int)options.fuse, info[1].workspace_bytes, info[0].workspace_bytes);
    }
}

/* What no product computes is refused, with the reason, where the caller demands it; the plan takes two launches. */
static void product_declines(int arg) {
    enum { NONE = -1 };
    static const struct { const char *reason; int act, recipe; int64_t ffn; int32_t blocks; int save; } rows[] = {
        { "not gated", GMM_ACT_SILU, NONE, 192, 0, 0 },
        { "ffn 200", GMM_ACT_SWIGLU, NONE, 200, 0, 0 },
        { "interleave 48", GMM_ACT_SWIGLU, NONE, 192, 48, 0 },
        { "not gated", GMM_ACT_SILU, REF_FP8_BLOCK, 256, 0, 0 },
        { "and cast of ffn 192", GMM_ACT_SWIGLU, REF_FP8_BLOCK, 192, 0, 0 },
        { "and cast of interleave 64", GMM_ACT_SWIGLU, REF_FP8_BLOCK, 256, 64, 0 },
        { "with a cast but to e4m3", GMM_ACT_SWIGLU, REF_FP8_CURRENT, 256, 0, 0 },
        { "with mx32 and nv16", GMM_ACT_SWIGLU, REF_MXFP8, 256, 0, 0 },
        { "config.save 1 keeps h otherwise", GMM_ACT_SWIGLU, REF_FP8_BLOCK, 256, 0, GMM_SAVE_PREACT_AND_ACT },
        { "keeps h otherwise", GMM_ACT_SWIGLU, REF_FP8_BLOCK, 256, 0, GMM_SAVE_QUANTIZED },
    };
    (void)arg;
    for (int k = 0; k < (int)(sizeof rows / sizeof rows[0]); k++) {
        gmm_recipe recipe = ref_recipe_of(rows[k].recipe == NONE ? REF_FP8_BLOCK : rows[k].recipe).recipe;
        gmm_mlp_quant quant = GMM_ZERO;
        gmm_info info = GMM_ZERO;
        const char *why;
        product_case c;
        product_spec s = product_of(GMM_BF16, 0);
        for (int i = 0; i < ref_act_count; i++)
            if ((int)ref_acts[i].kind == rows[k].act) s.row = &ref_acts[i];
        s.ffn = rows[k].ffn;
        s.hidden = 128;
        s.blocks = rows[k].blocks;
        s.save = (gmm_save)rows[k].save;
        build_product(&c, &s);
        quant.recipe = &recipe;
        if (rows[k].recipe != NONE) c.config.recipe = recipe.kind, c.d.quant = &quant;
        c.options.fuse = GMM_FUSE_ALWAYS;
        T_CHECK(gmm_mlp_query(T.ctx, GMM_OP_MLP_FWD, &c.d, &info) == GMM_E_UNSUPPORTED, "accepted");
        why = gmm_last_error(T.ctx); /* of all engines: WGMMA, where there is one, names its own reason */
        T_CHECK(strstr(why, rows[k].reason) ||
                (!strstr(why, "wgmma fuses") &&
                 (strstr(why, "an act fused into a product") || strstr(why, "is not in this build"))),
                "\"%s\"", why);
        c.options.fuse = GMM_FUSE_AUTO;
        T_OK(gmm_mlp_query(T.ctx, GMM_OP_MLP_FWD, &c.d, &info));
        T_CHECK(!joins_product(&c), "row %d is joined", k);
        c.options.fuse = (gmm_fuse)3;
        T_REFUSED(GMM_E_ARG, gmm_mlp_query(T.ctx, GMM_OP_MLP_FWD, &c.d, &info), "options.fuse", "3 must be", NULL);
        c.options.fuse = GMM_FUSE_AUTO;
        c.options.reserved = 1;
        T_REFUSED(GMM_E_ARG, gmm_mlp_query(T.ctx, GMM_OP_MLP_FWD, &c.d, &info), "options.reserved", "1 must be", NULL);
    }
}

/* Backward of the same MLP, whose FC2's dgrad may compute the gradient of the activation. `wants`: what is computed, by
   WANT_* and these. */
enum { WANT_DX = 16, IN_PLACE = 32 }; /* IN_PLACE: the saved pre-activation is overwritten */
typedef struct gradient_case {
    product_case *c;
    t_mat dy, dx, dw1, dw2;
    gmm_grad grad[2];
    float *dprob;
    const void *saved; /* host memory */
} gradient_case;

static void build_gradient(gradient_case *b, product_case *c, int gathers, int wants) {
    gmm_info info = GMM_ZERO;
    memset(b, 0, sizeof *b);
    b->c = c;
    c->options.fuse = GMM_FUSE_NEVER;
    T_OK(gmm_mlp_query(T.ctx, GMM_OP_MLP_FWD, &c->d, &info));
    c->d.saved_bytes = info.saved_bytes;
    c->d.saved = t_alloc_aligned(info.saved_bytes + 1, 256);
    T_OK(gmm_mlp_fwd(T.ctx, &c->d, t_workspace(info.workspace_bytes), info.workspace_bytes, T.stream));
    if (info.saved_bytes) b->saved = t_get(c->d.saved, info.saved_bytes);
    b->dy = t_mat_make(c->y.dtype, 1, c->rows, c->y.cols, 8, 0, T_PACKED, T_REALS);
    b->dx = t_mat_out(c->y.dtype, 1, c->rows, c->x.cols);
    b->dw1 = t_mat_out(GMM_F32, c->groups.count, c->w1.rows, c->w1.cols);
    b->dw2 = t_mat_out(GMM_F32, c->groups.count, c->w2.rows, c->w2.cols);
    b->dprob = t_floats_out(c->rows);
    b->grad[0].mat = &b->dw1.mat;
    b->grad[1].mat = &b->dw2.mat;
    c->config.overwrite_saved = !!(wants & IN_PLACE);
    c->d.dy = &b->dy.mat;
    if (gathers) c->d.dy_index = c->d.x_index;
    if (wants & WANT_DX) c->d.dx = &b->dx.mat;
    if (wants & WANT_DW1) c->d.dw1 = &b->grad[0];
    if (wants & WANT_DW2) c->d.dw2 = &b->grad[1];
    if (wants & WANT_DPROB && c->config.prob) c->d.dprob = b->dprob;
}

/* Whether gmm_describe has the gradient of the activation in FC2's dgrad. */
static int joins_dgrad(product_case *c) {
    static _Thread_local char text[8192];
    T_OK_TEXT(gmm_describe(T.ctx, GMM_OP_MLP_BWD, &c->d, text, sizeof text), gmm_last_error(T.ctx));
    return strstr(text, "with the activation's gradient") != NULL;
}

/* What a backward writes. The workspace is that which the plan's own choice asks for. */
static product_result run_gradient(gradient_case *b, gmm_fuse fuse) {
    product_case *c = b->c;
    const int64_t live = c->groups.tail == GMM_TAIL_ZERO ? c->rows : c->rows - 13;
    t_mat *const mats[] = { &b->dx, &b->dw1, &b->dw2 };
    const int wanted[] = { c->d.dx != NULL, c->d.dw1 != NULL, c->d.dw2 != NULL };
    gmm_info info = GMM_ZERO;
    product_result r;
    memset(&r, 0, sizeof r);
    if (b->saved) t_upload(c->d.saved, b->saved, c->d.saved_bytes);
    for (int i = 0; i < 3; i++)
        t_poison(mats[i]->mat.data, 0xFF, (size_t)(mats[i]->count * mats[i]->rows * mats[i]->cols *
                                                   ref_bytes(mats[i]->dtype)));
    t_poison(b->dprob, 0xFF, (size_t)c->rows * 4);
    c->options.fuse = GMM_FUSE_AUTO;
    T_OK(gmm_mlp_query(T.ctx, GMM_OP_MLP_BWD, &c->d, &info));
    c->options.fuse = fuse;
    T_OK_TEXT(gmm_mlp_bwd(T.ctx, &c->d, t_workspace(info.workspace_bytes), info.workspace_bytes, T.stream),
              gmm_last_error(T.ctx));
    for (int i = 0; i < 3; i++) {
        const int64_t rows = i ? mats[i]->count * mats[i]->rows : live;
        if (!wanted[i]) continue;
        r.bytes[r.parts] = (size_t)(rows * mats[i]->cols * ref_bytes(mats[i]->dtype));
        r.part[r.parts] = t_get(mats[i]->mat.data, r.bytes[r.parts]);
        r.parts++;
    }
    if (c->d.dprob) {
        r.bytes[r.parts] = (size_t)live * 4;
        r.part[r.parts] = t_get(b->dprob, r.bytes[r.parts]);
        r.parts++;
    }
    return r;
}

/* Both ways, and the plan's choice. */
static void compare_dgrad(const product_spec *s, int wants) {
    product_case c;
    gradient_case b;
    gmm_info info = GMM_ZERO;
    gmm_status status;
    product_result never, always, by_plan;
    build_product(&c, s);
    build_gradient(&b, &c, s->gathers, wants);
    c.options.fuse = GMM_FUSE_ALWAYS;
    status = gmm_mlp_query(T.ctx, GMM_OP_MLP_BWD, &c.d, &info);
    if (status != GMM_OK) {
        T_CHECK(status == GMM_E_UNSUPPORTED && strstr(gmm_last_error(T.ctx), "an act fused into a product"), "\"%s\"",
                gmm_last_error(T.ctx));
        return;
    }
    T_CHECK(joins_dgrad(&c) == (c.d.dx || c.d.dw1 || c.d.dprob), "FC2's dgrad alone");
    never = run_gradient(&b, GMM_FUSE_NEVER);
    T_CHECK(!joins_dgrad(&c), "joined");
    always = run_gradient(&b, GMM_FUSE_ALWAYS);
    by_plan = run_gradient(&b, GMM_FUSE_AUTO);
    for (int i = 0; i < never.parts; i++) {
        t_same("gradients", always.part[i], never.part[i], never.bytes[i]);
        t_same("gradients", by_plan.part[i], never.part[i], never.bytes[i]);
    }
}
#define compare_dgrad(...) T_CALL(compare_dgrad, __VA_ARGS__)

/* The gradient of an activation (argument: its row in ref_acts) in layouts of its columns. */
static void dgrad_layouts(int arg) {
    static const int32_t blocks[] = { 0, 8, 24, 64, 192 };
    for (int k = 0; k < 5; k++) {
        product_spec s = product_of(k % 2 ? GMM_F16 : GMM_BF16, arg);
        s.blocks = blocks[k];
        s.settings = k % 3 == 1;
        s.prob = k % 2;
        s.tail = k % 3 ? GMM_TAIL_KEEP : GMM_TAIL_ZERO;
        compare_dgrad(&s, WANT_DX | WANT_DPROB | (k % 2 ? WANT_DW2 : 0) | (k == 2 ? IN_PLACE : 0));
    }
}
/* Sizes, save policies, gathered rows, and what is wanted. Rows of more than 768 columns have an order of their own in
   the sum for dprob. */
static void dgrad_shapes(int arg) {
    static const int64_t hidden[] = { 8, 200, 328, 64 }, ffn[] = { 64, 832, 320, 448 };
    static const gmm_save saves[] = { GMM_SAVE_PREACT, GMM_SAVE_PREACT_AND_ACT, GMM_SAVE_NOTHING };
    static const int wants[] = { WANT_DX | WANT_DW1 | WANT_DW2 | WANT_DPROB, WANT_DPROB, WANT_DW1 | WANT_DPROB,
                                 WANT_DX | WANT_DW2, WANT_DW2 | WANT_DPROB, WANT_DX | WANT_DW1 };
    for (int k = 0; k < 4; k++) {
        product_spec s = swiglu_of((k + arg) % 2 ? GMM_F16 : GMM_BF16);
        s.hidden = hidden[(k + arg) % 4];
        s.ffn = ffn[k];
        s.prob = (k + arg) % 6 != 3; /* whose wants lack dprob */
        s.save = saves[(k + arg) % 3];
        s.gathers = k == 1 && arg % 2;
        s.tables = k == 2;
        s.sm_limit = k == 3 ? 2 : 0;
        s.tail = k % 2 ? GMM_TAIL_ZERO : GMM_TAIL_KEEP;
        s.sizes = k % 2 ? large_sizes : sizes_of;
        compare_dgrad(&s, wants[(k + arg) % 6] | (k == arg % 4 ? IN_PLACE : 0));
    }
}
/* Everything that such a product takes, drawn at random. */
static void dgrad_drawn(int arg) {
    product_spec s = product_of(t_int(0, 1) ? GMM_BF16 : GMM_F16, 0);
    int wants = (int)t_int(1, 63);
    (void)arg;
    do s.row = &ref_acts[t_int(0, ref_act_count - 1)];
    while (!s.row->gated);
    s.hidden = 8 * t_int(1, 40);
    s.ffn = 64 * t_int(1, 6);
    s.blocks = t_int(0, 1) ? 8 << t_int(0, 3) : 0;
    s.settings = (int)t_int(0, 1);
    s.prob = (int)t_int(0, 1);
    s.gathers = t_int(0, 3) == 0;
    s.tables = (int)t_int(0, 1);
    s.groups = (int32_t)t_int(1, 12);
    s.sm_limit = t_int(0, 3) ? 0 : (int32_t)t_int(1, 8);
    s.save = (gmm_save)(t_int(0, 1) ? GMM_SAVE_PREACT : GMM_SAVE_PREACT_AND_ACT);
    s.tail = (gmm_tail)t_int(0, 1);
    s.sizes = t_draw_sizes(s.groups, t_int(1, 600));
    if (!(wants & (WANT_DX | WANT_DW1 | WANT_DW2 | (s.prob ? WANT_DPROB : 0)))) wants |= WANT_DX;
    compare_dgrad(&s, wants);
}
/* Gathered rows of dy under limits of the workspace, among them those that a copy of the rows fits and parts of dprob
   beside it do not: what a query takes, the call takes. arg: whether probabilities multiply the rows. */
static void dgrad_limited(int arg) {
    static const int64_t sizes[G] = { 16, 16, 16, 16, 3 };
    const int64_t hidden = 512, ffn = 4096; /* such that a plan joins them on an H200 */
    product_spec s = swiglu_of(GMM_BF16);
    product_case c;
    gradient_case b;
    s.hidden = hidden;
    s.ffn = ffn;
    s.sizes = sizes;
    s.gathers = 1;
    s.prob = arg;
    build_product(&c, &s);
    build_gradient(&b, &c, 1, WANT_DX);
    for (int k = 0; k < 6; k++) {
        gmm_info info = GMM_ZERO;
        c.options.workspace_limit = c.rows * hidden * 2 + k * c.rows * (ffn / 64) * 4 / 4;
        c.options.fuse = GMM_FUSE_AUTO;
        if (gmm_mlp_query(T.ctx, GMM_OP_MLP_BWD, &c.d, &info) != GMM_OK) continue;
        T_OK_TEXT(gmm_mlp_bwd(T.ctx, &c.d, t_workspace(info.workspace_bytes), info.workspace_bytes, T.stream),
                  gmm_last_error(T.ctx));
    }
}

/* What the plan takes by itself in backward. */
static void dgrad_chosen(int arg) {
    static const struct { int groups; int64_t hidden, ffn, rows; int joined; } rows[] = { { 32, 2880, 2880, 1024, 1 },
                                                                                          { 8, 7168, 2048, 192, 0 } };
    const gmm_mat m = gmm_mat_packed(GMM_BF16, NULL);
    gmm_mlp_config config = { .hidden = rows[arg].hidden, .ffn = rows[arg].ffn, .prob = 1,
                              .act = gmm_act_of(GMM_ACT_PRESET_SWIGLU) };
    gmm_groups groups = { .count = rows[arg].groups, .capacity = rows[arg].groups * rows[arg].rows,
                          .dtype = GMM_I32 };
    gmm_options options = { .fuse = GMM_FUSE_ALWAYS };
    gmm_info info = GMM_ZERO;
    float dprob;
    product_case c;
    memset(&c, 0, sizeof c);
    c.d.config = &config;
    c.d.groups = &groups;
    c.d.options = &options;
    c.d.x = c.d.w1 = c.d.w2 = c.d.dy = c.d.dx = &m;
    c.d.dprob = &dprob;
    if (gmm_mlp_query(T.ctx, GMM_OP_MLP_BWD, &c.d, &info) != GMM_OK) { /* not here: compare_dgrad checks the reason */
        options.fuse = GMM_FUSE_AUTO;
        T_CHECK(!joins_dgrad(&c), "joined");
        return;
    }
    options.fuse = GMM_FUSE_AUTO;
#ifdef HAVE_CUDA
    if (!device_prices()) t_skip("for this number of multiprocessors prices differ");
#endif
    T_CHECK(joins_dgrad(&c) == rows[arg].joined, "%s", joins_dgrad(&c) ? "joined" : "two launches");
}

/* What no dgrad computes. By a recipe `fuse` is not looked at. */
static void dgrad_declines(int arg) {
    static const struct { const char *reason; gmm_act_kind act; int64_t ffn; int32_t blocks; } rows[] = {
        { "ungated", GMM_ACT_SILU, 192, 0 },
        { "ffn 200", GMM_ACT_SWIGLU, 200, 0 },
        { "interleave 4", GMM_ACT_SWIGLU, 192, 4 },
    };
    (void)arg;
    for (int k = 0; k < 4; k++) {
        gmm_info info = GMM_ZERO;
        gradient_case b;
        product_case c;
        product_spec s = swiglu_of(GMM_BF16);
        const char *why;
        for (int i = 0; k < 3 && i < ref_act_count; i++)
            if (ref_acts[i].kind == rows[k].act) s.row = &ref_acts[i];
        if (k < 3) s.ffn = rows[k].ffn, s.blocks = rows[k].blocks;
        else s.casts = 1, s.hidden = 128, s.ffn = 256;
        build_product(&c, &s);
        build_gradient(&b, &c, 0, WANT_DX | WANT_DPROB);
        c.options.fuse = GMM_FUSE_ALWAYS;
        if (k == 3) {
            T_OK(gmm_mlp_query(T.ctx, GMM_OP_MLP_BWD, &c.d, &info));
            T_CHECK(!joins_dgrad(&c), "joined");
            continue;
        }
        T_CHECK(gmm_mlp_query(T.ctx, GMM_OP_MLP_BWD, &c.d, &info) == GMM_E_UNSUPPORTED, "accepted");
        why = gmm_last_error(T.ctx);
        T_CHECK(strstr(why, rows[k].reason) ||
                (!strstr(why, "wgmma fuses") &&
                 (strstr(why, "an act fused into a product") || strstr(why, "is not in this build"))),
                "\"%s\"", why);
        c.options.fuse = GMM_FUSE_AUTO;
        T_OK(gmm_mlp_query(T.ctx, GMM_OP_MLP_BWD, &c.d, &info));
        T_CHECK(!joins_dgrad(&c), "row %d is joined", k);
    }
}

void tests_mlp_fused(void) {
    static const gmm_dtype dtypes[] = { GMM_BF16, GMM_F16, GMM_F32 };
    for (int i = 0; i < ref_act_count; i++)
        if (ref_acts[i].kind != GMM_ACT_NONE) t_add(activation, i, "mlp cast joined to %s", ref_acts[i].name);
    t_add(tiles, REF_FP8_BLOCK, "mlp cast joined to swiglu, columns of tiles fp8 block");
    t_add(tiles, REF_FP8_DELAYED, "mlp cast joined to swiglu, columns of tiles fp8 delayed");
    t_add(tiles, REF_FP8_CURRENT, "mlp cast joined to swiglu, columns of tiles fp8 current");
    for (int i = 0; i < 3; i++)
        t_add(gradient, (int)dtypes[i], "mlp cast joined to the gradient %s", gmm_dtype_name(dtypes[i]));
    t_add(computed_gradient, REF_FP8_BLOCK, "mlp cast computes the gradient, fp8 block");
    t_add(computed_gradient, REF_FP8_DELAYED, "mlp cast computes the gradient, fp8 delayed");
    t_add(product_drawn, 0, "mlp activation joined to its product, drawn at random");
    t_random(4);
    for (int i = 0; i < ref_act_count; i++)
        if (ref_acts[i].gated) t_add(product_layouts, i, "mlp activation joined to its product, %s", ref_acts[i].name);
    for (int i = 0; i < ref_act_count; i++)
        if (ref_acts[i].gated)
            t_add(product_casts, i, "mlp activation and cast joined to a product, %s", ref_acts[i].name);
    for (int i = 0; i < 6; i++) t_add(product_shapes, i, "mlp activation joined to its product, shapes %d", i);
    for (int i = 0; i < 2; i++)
        t_add(product_casts_groups, i ? 300 : 130, "mlp activation and cast joined to a product, %d groups",
              i ? 300 : 130);
#ifdef HAVE_CUDA
    for (int i = 0; i < 4; i++)
        t_add_gpu(product_casts_late, i, "mlp activation and cast joined to a product, late split %d", i);
#endif
    t_add(product_declines, 0, "mlp activation joined to no product");
    t_add(dgrad_drawn, 0, "mlp gradient joined to dgrad, drawn at random");
    t_random(4);
    for (int i = 0; i < ref_act_count; i++)
        if (ref_acts[i].gated) t_add(dgrad_layouts, i, "mlp gradient joined to dgrad, %s", ref_acts[i].name);
    for (int i = 0; i < 12; i++) t_add(dgrad_shapes, i, "mlp gradient joined to dgrad, shapes %d", i);
    for (int i = 0; i < 2; i++)
        t_add(dgrad_chosen, i, "mlp gradient joined to dgrad by plan, %s", i ? "few rows" : "many rows");
    for (int i = 0; i < 2; i++) t_add(dgrad_limited, i, "mlp gradient joined to dgrad, limited workspace %d", i);
    t_add(dgrad_declines, 0, "mlp gradient joined to no dgrad");
    for (int i = 0; i < 2; i++) t_add(product_workspace, i, "mlp workspace of training, %s", i ? "fp8 block" : "bf16");
    t_add(product_late, 2, "mlp activation and cast joined to a product, late weights");
    t_add(product_casts_cached, 0, "mlp activation and cast joined to a product, cached weights");
    for (int i = 0; i < 2; i++) {
        t_add(product_late, i, "mlp activation joined to its product, late weights%s", i ? " in tables" : "");
        t_add(product_chosen, i, "mlp activation joined by plan, %s", i ? "short contraction" : "few rows");
        t_add(product_chosen, 2 + i, "mlp activation and cast joined by plan, %s", i ? "too few tiles" : "few rows");
    }
}
