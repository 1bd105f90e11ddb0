/* test_mlp_quant.c - the expert MLP under every recipe equals its steps as separate calls, bit for bit. The separate
   calls quantize both copies of an operand at once, the MLP quantizes each when it needs it. */
#include "mlp_case.h"

#include <string.h>

#ifdef HAVE_CUDA
#include "device.h"
#endif

enum { G = MLP_GROUPS, HIDDEN = MLP_HIDDEN, FFN = MLP_FFN, LIVE = MLP_LIVE, ROWS = MLP_ROWS };

/* The small MLP by a recipe with scales, random numbers and memory for amaxes. */
static void build(mlp_case *c, int recipe, gmm_save save) {
    float values[GMM_SLOTS * G];
    uint64_t random[4];
    mlp_build(c, recipe, save, T_TABLE, T_PACKED);
    for (int i = 0; i < GMM_SLOTS * G; i++) values[i] = (float)(2.0 + t_real());
    for (int i = 0; i < 4; i++) random[i] = t_rand();
    c->scale = (float *)t_in(values, sizeof values);
    c->amax = (float *)t_alloc(sizeof values);
    t_poison(c->amax, 0, sizeof values);
    c->random = (uint64_t *)t_in(random, sizeof random);
    c->quant.scale = c->scale;
    c->quant.amax = c->amax;
    c->quant.random = c->random;
}

static void same_rows(const char *what, const t_mat *a, const t_mat *b) {
    t_same(what, t_mat_bits(a), t_mat_bits(b), (size_t)(LIVE * a->cols * ref_bytes(a->dtype)));
}
#define same_rows(...) T_CALL(same_rows, __VA_ARGS__)

/* The values of a rowwise copy in BF16. rows: of a weight matrix; 0 = tokens. */
static t_mat dequantized(const mlp_case *c, const gmm_mat *copy, int64_t rows, int64_t cols) {
    const t_mat to = t_mat_out(GMM_BF16, rows ? G : 1, rows ? rows : ROWS, cols);
    gmm_dequantization d = GMM_ZERO;
    gmm_info info = GMM_ZERO;
    d.groups = rows ? NULL : &c->groups;
    d.count = rows ? G : 0;
    d.rows = rows;
    d.cols = cols;
    d.src = copy;
    d.dst = &to.mat;
    T_OK(gmm_dequantize_query(T.ctx, &d, &info));
    T_OK(gmm_dequantize(T.ctx, &d, t_workspace(info.workspace_bytes), info.workspace_bytes, T.stream));
    return to;
}
/* z rounded to unscaled E4M3. */
static t_mat rounded_to_e4m3(const mlp_case *c, const gmm_mat *z) {
    gmm_format f = GMM_ZERO;
    gmm_quantization d = GMM_ZERO;
    gmm_info info = GMM_ZERO;
    gmm_mat copy;
    f.dtype = GMM_E4M3;
    f.scaling = GMM_SCALING_TENSOR;
    f.delayed = 1;
    copy = gmm_mat_quantized(&f, GMM_ROWWISE, t_alloc(ROWS * 2 * FFN), t_alloc(4 * G), NULL);
    d.groups = &c->groups;
    d.cols = 2 * FFN;
    d.format = &f;
    d.src = z;
    d.rowwise = &copy;
    T_OK(gmm_quantize_query(T.ctx, GMM_OP_QUANTIZE, &d, &info));
    T_OK(gmm_quantize(T.ctx, &d, t_workspace(info.workspace_bytes), info.workspace_bytes, T.stream));
    return dequantized(c, &copy, 0, 2 * FFN);
}

/* What the products of backward multiply in place of an operand of forward. */
static const gmm_mat *in_backward(const mlp_case *c, const gmm_format *f, const gmm_mat *source, const gmm_mat *copies,
                                  t_mat *values, int64_t rows, int64_t cols) {
    if (c->quant.backward_override == GMM_BACKWARD_HIGH_PRECISION || f->dtype == GMM_NONE) return source;
    if (c->quant.backward_override == GMM_BACKWARD_BY_RECIPE) return copies;
    *values = dequantized(c, copies, rows, cols);
    return &values->mat;
}

/* A save policy, with what backward multiplies. */
static const struct policy { const char *name; gmm_save save; gmm_backward_override override; } policies[] = {
    { "preact", GMM_SAVE_PREACT, GMM_BACKWARD_BY_RECIPE },
    { "preact and act", GMM_SAVE_PREACT_AND_ACT, GMM_BACKWARD_BY_RECIPE },
    { "nothing", GMM_SAVE_NOTHING, GMM_BACKWARD_BY_RECIPE },
    { "quantized", GMM_SAVE_QUANTIZED, GMM_BACKWARD_BY_RECIPE },
    { "preact e4m3", GMM_SAVE_PREACT_E4M3, GMM_BACKWARD_BY_RECIPE },
    { "quantized e4m3", GMM_SAVE_QUANTIZED_E4M3, GMM_BACKWARD_BY_RECIPE },
    { "preact, high precision", GMM_SAVE_PREACT, GMM_BACKWARD_HIGH_PRECISION },
    { "nothing, high precision", GMM_SAVE_NOTHING, GMM_BACKWARD_HIGH_PRECISION },
    { "preact e4m3, high precision", GMM_SAVE_PREACT_E4M3, GMM_BACKWARD_HIGH_PRECISION },
    { "preact, dequantized", GMM_SAVE_PREACT, GMM_BACKWARD_DEQUANTIZED },
    { "preact and act, dequantized", GMM_SAVE_PREACT_AND_ACT, GMM_BACKWARD_DEQUANTIZED },
    { "nothing, dequantized", GMM_SAVE_NOTHING, GMM_BACKWARD_DEQUANTIZED },
    { "quantized, dequantized", GMM_SAVE_QUANTIZED, GMM_BACKWARD_DEQUANTIZED },
    { "quantized e4m3, dequantized", GMM_SAVE_QUANTIZED_E4M3, GMM_BACKWARD_DEQUANTIZED },
};
enum { POLICIES = sizeof policies / sizeof policies[0] };
/* The MLP of a recipe and a policy (argument: recipe + REF_RECIPES * policy) against its steps as separate calls. */
static void equals_steps(int arg) {
    const struct policy *policy = &policies[arg / REF_RECIPES];
    const int by_recipe = policy->override == GMM_BACKWARD_BY_RECIPE;
    mlp_case c;
    gmm_mat x[2], w1[2], h[2], w2[2], dy[2], dz[2], hb[2];
    const gmm_mat *qx, *qw1, *qh, *qw2, *qdy, *qdz;
    t_mat Z, H, Y, ZB, HB, DH, DZ, DX, DW1, DW2, vx, vw1, vh, vw2;
    gmm_info info = GMM_ZERO;
    float *dprob;
    build(&c, arg % REF_RECIPES, policy->save);
    c.quant.backward_override = policy->override;
    if (mlp_saves_copies(policy->save) && c.recipe.input.dtype == GMM_NONE) {
        T_REFUSED(GMM_E_CONFIG, gmm_mlp_query(T.ctx, GMM_OP_MLP_FWD, &c.d, &info), "mlp.config.save: ",
                  "leaves the input", NULL);
        return;
    }
    mlp_forward(&c.d);
    Z = t_mat_out(GMM_BF16, 1, ROWS, 2 * FFN);
    H = t_mat_out(GMM_BF16, 1, ROWS, FFN);
    Y = t_mat_out(GMM_BF16, 1, ROWS, HIDDEN);
    qx = mlp_cast(&c.d, GMM_SLOT_X, &c.x.mat, x);
    qw1 = mlp_cast(&c.d, GMM_SLOT_W1, &c.w1.mat, w1);
    mlp_linear(&c.d, GMM_PARAM_W1, GMM_OP_LINEAR_FWD, qx, qw1, NULL, &Z.mat);
    mlp_act_fwd(&c.d, &Z.mat, &H.mat);
    qh = mlp_cast(&c.d, GMM_SLOT_H, &H.mat, h);
    qw2 = mlp_cast(&c.d, GMM_SLOT_W2, &c.w2.mat, w2);
    mlp_linear(&c.d, GMM_PARAM_W2, GMM_OP_LINEAR_FWD, qh, qw2, NULL, &Y.mat);
    same_rows("y", &c.y, &Y);

    mlp_want_gradients(&c);
    if (mlp_saves_copies(policy->save)) c.d.x = NULL; /* its copy is saved */
    T_OK(mlp_call(GMM_OP_MLP_BWD, &c.d));
    DH = t_mat_out(GMM_BF16, 1, ROWS, FFN);
    DZ = t_mat_out(GMM_BF16, 1, ROWS, 2 * FFN);
    DX = t_mat_out(GMM_BF16, 1, ROWS, HIDDEN);
    DW1 = t_mat_out(GMM_F32, G, 2 * FFN, HIDDEN);
    DW2 = t_mat_out(GMM_F32, G, HIDDEN, FFN);
    dprob = t_floats_out(ROWS);
    ZB = mlp_saves_e4m3(policy->save) ? rounded_to_e4m3(&c, &Z.mat) : Z;
    HB = H;
    if (policy->save == GMM_SAVE_PREACT_E4M3) { /* computed again, from the rounded pre-activation */
        HB = t_mat_out(GMM_BF16, 1, ROWS, FFN);
        mlp_act_fwd(&c.d, &ZB.mat, &HB.mat);
        qh = mlp_cast(&c.d, GMM_SLOT_H, &HB.mat, hb);
    }
    qx = in_backward(&c, &c.recipe.input, &c.x.mat, qx, &vx, 0, HIDDEN);
    qw1 = in_backward(&c, &c.recipe.weight, &c.w1.mat, qw1, &vw1, 2 * FFN, HIDDEN);
    qh = in_backward(&c, &c.recipe.input, &HB.mat, qh, &vh, 0, FFN);
    qw2 = in_backward(&c, &c.recipe.weight, &c.w2.mat, qw2, &vw2, HIDDEN, FFN);
    qdy = by_recipe ? mlp_cast(&c.d, GMM_SLOT_DY, &c.dy.mat, dy) : &c.dy.mat;
    mlp_linear(&c.d, GMM_PARAM_W2, GMM_OP_LINEAR_DGRAD, NULL, qw2, qdy, &DH.mat);
    mlp_act_bwd(&c.d, &ZB.mat, &DH.mat, &DZ.mat, dprob);
    qdz = by_recipe ? mlp_cast(&c.d, GMM_SLOT_DZ, &DZ.mat, dz) : &DZ.mat;
    mlp_linear(&c.d, GMM_PARAM_W2, GMM_OP_LINEAR_WGRAD, qh, NULL, qdy, &DW2.mat);
    mlp_linear(&c.d, GMM_PARAM_W1, GMM_OP_LINEAR_WGRAD, qx, NULL, qdz, &DW1.mat);
    mlp_linear(&c.d, GMM_PARAM_W1, GMM_OP_LINEAR_DGRAD, NULL, qw1, qdz, &DX.mat);
    same_rows("dx", &c.dx, &DX);
    t_same("dw1", t_mat_bits(&c.dw1), t_mat_bits(&DW1), sizeof(float) * G * 2 * FFN * HIDDEN);
    t_same("dw2", t_mat_bits(&c.dw2), t_mat_bits(&DW2), sizeof(float) * G * FFN * HIDDEN);
    t_same("dprob", t_get(c.dprob, LIVE * 4), t_get(dprob, LIVE * 4), LIVE * 4);
    if (c.recipe.input.delayed && by_recipe && policy->save != GMM_SAVE_PREACT_E4M3) {
        /* every slot recorded the amax of its operand */
        const float *seen = (const float *)t_get(c.amax, sizeof(float) * GMM_SLOTS * G);
        const gmm_mat *const copies[GMM_SLOTS] = { x, w1, h, w2, dy, dz };
        for (int k = 0; k < GMM_SLOTS; k++)
            t_same("amax of a slot", seen + k * G, t_get(copies[k]->amax, G * 4), G * 4);
    }
}

/* Backward, and the weight gradients that it queues, unless they shall be left in the queue. */
static void backward_to(mlp_case *c, gmm_wgrad_queue *queue, int leave) {
    gmm_info info = GMM_ZERO;
    void *workspace;
    T_OK(gmm_mlp_query(T.ctx, GMM_OP_MLP_BWD, &c->d, &info));
    if (queue) {
        c->d.deferred = t_alloc_aligned(info.deferred_bytes, 256);
        c->d.deferred_bytes = info.deferred_bytes;
        c->d.queue = queue;
    }
    workspace = t_workspace(info.workspace_bytes);
    T_OK(gmm_mlp_bwd(T.ctx, &c->d, workspace, info.workspace_bytes, T.stream));
    if (!queue || leave) return;
    t_poison(workspace, 0xFF, info.workspace_bytes); /* another call's by now */
    T_OK(mlp_call(GMM_OP_MLP_WGRAD, &c->d));
}
#define backward_to(...) T_CALL(backward_to, __VA_ARGS__)
#define backward(c, queue) backward_to(c, queue, 0)
static void gradients_of(mlp_case *c, gmm_wgrad_queue *queue) {
    mlp_want_gradients(c);
    backward(c, queue);
}
static void same_gradients(const mlp_case *a, const mlp_case *b) {
    const mlp_results of_a = mlp_results_of(a), of_b = mlp_results_of(b);
    mlp_same_results(&of_a, &of_b);
}
#define same_gradients(...) T_CALL(same_gradients, __VA_ARGS__)

/* The bits that gmm_save promises for each policy. */
static void policy_bits(int arg) {
    mlp_case preact, c;
    t_reseed(7);
    build(&preact, arg, GMM_SAVE_PREACT);
    if (preact.recipe.input.dtype == GMM_NONE) {
        T_CHECK(preact.recipe.grad.dtype == GMM_NONE, "a recipe without copies of x has none of gradients");
        return;
    }
    mlp_forward(&preact.d);
    gradients_of(&preact, NULL);
    t_reseed(7);
    build(&c, arg, GMM_SAVE_QUANTIZED);
    mlp_forward(&c.d);
    gradients_of(&c, NULL);
    same_gradients(&preact, &c);
    t_reseed(7);
    build(&c, arg, GMM_SAVE_QUANTIZED_E4M3);
    mlp_forward(&c.d);
    gradients_of(&c, NULL);
    same_rows("y", &preact.y, &c.y);
    t_same("dw2", t_mat_bits(&preact.dw2), t_mat_bits(&c.dw2), sizeof(float) * G * FFN * HIDDEN);
}

/* Members behind the struct_size of a recipe's formats are not read. */
static void smaller_formats(int arg) {
    mlp_case whole, smaller;
    (void)arg;
    t_reseed(7);
    build(&whole, REF_FP8_CURRENT, GMM_SAVE_QUANTIZED);
    mlp_forward(&whole.d);
    gradients_of(&whole, NULL);
    t_reseed(7);
    build(&smaller, REF_FP8_CURRENT, GMM_SAVE_QUANTIZED);
    for (int i = 0; i < 3; i++) {
        gmm_format *f = i == 0 ? &smaller.recipe.input : i == 1 ? &smaller.recipe.weight : &smaller.recipe.grad;
        f->struct_size = (uint32_t)offsetof(gmm_format, eps);
        f->eps = 1e20f;
    }
    mlp_forward(&smaller.d);
    gradients_of(&smaller, NULL);
    same_gradients(&whole, &smaller);
}

/* Of a columnwise copy of a weight, as of any matrix, no byte behind its struct_size is read. */
static void smaller_copies(int arg) {
    const uint32_t size = (uint32_t)offsetof(gmm_mat, columnwise);
    mlp_case whole, smaller;
    gmm_mat copies[2], quantized;
    (void)arg;
    t_reseed(7);
    build(&whole, REF_FP8_BLOCK, GMM_SAVE_PREACT);
    mlp_forward(&whole.d);
    gradients_of(&whole, NULL);
    t_reseed(7);
    build(&smaller, REF_FP8_BLOCK, GMM_SAVE_PREACT);
    quantized = *mlp_cast(&smaller.d, GMM_SLOT_W1, &smaller.w1.mat, copies);
    copies[1].struct_size = size;
    /* memory of t_in ends with an unreadable page, but is not the host's in a GPU context */
    quantized.columnwise = (const gmm_mat *)(T.gpu ? memcpy(t_host(size), &copies[1], size) : t_in(&copies[1], size));
    smaller.d.w1 = &quantized;
    mlp_forward(&smaller.d);
    gradients_of(&smaller, NULL);
    same_gradients(&whole, &smaller);
}

/* Weights in a cache: the bits are those without one, and with the word set nothing reads the weights. */
static void weight_cache(int arg) {
    const int32_t words[2] = { 0, 1 };
    for (int k = 0; k < 3; k++) {
        const gmm_backward_override override = (gmm_backward_override)k;
        mlp_case now, cached;
        t_mat others[2];
        gmm_info info = GMM_ZERO;
        const int32_t *skip = (const int32_t *)t_in(words, sizeof words);
        t_reseed(9);
        build(&now, arg, GMM_SAVE_PREACT);
        now.quant.backward_override = override;
        mlp_forward(&now.d);
        gradients_of(&now, NULL);
        t_reseed(9);
        build(&cached, arg, GMM_SAVE_PREACT);
        cached.quant.backward_override = override;
        T_OK(gmm_mlp_query(T.ctx, GMM_OP_MLP_FWD, &cached.d, &info));
        T_CHECK((info.weight_cache_bytes > 0) == (cached.recipe.weight.dtype != GMM_NONE), "%llu bytes",
                (unsigned long long)info.weight_cache_bytes);
        cached.quant.weight_cache = t_alloc_aligned(info.weight_cache_bytes, 256);
        cached.quant.weight_cache_bytes = info.weight_cache_bytes;
        cached.quant.weight_skip = skip;
        mlp_forward(&cached.d);
        gradients_of(&cached, NULL);
        same_gradients(&now, &cached);
        cached.quant.weight_skip = skip + 1;
        others[0] = t_mat_in(GMM_BF16, G, cached.w1.rows, HIDDEN, T_REALS);
        others[1] = t_mat_in(GMM_BF16, G, HIDDEN, FFN, T_REALS);
        if (override != GMM_BACKWARD_HIGH_PRECISION && cached.recipe.weight.dtype != GMM_NONE) {
            cached.d.w1 = &others[0].mat; /* which nothing reads, since the word says that the cache is valid */
            cached.d.w2 = &others[1].mat;
        }
        cached.y = t_mat_out(GMM_BF16, 1, ROWS, HIDDEN);
        cached.dx = t_mat_out(GMM_BF16, 1, ROWS, HIDDEN);
        mlp_forward(&cached.d);
        gradients_of(&cached, NULL);
        same_gradients(&now, &cached);
        cached.quant.weight_cache_bytes--;
        T_REFUSED(GMM_E_WORKSPACE, gmm_mlp_fwd(T.ctx, &cached.d, NULL, 0, T.stream), "mlp.quant.weight_cache ", "bytes",
                  NULL);
        T_REFUSED(GMM_E_WORKSPACE, gmm_mlp_bwd(T.ctx, &cached.d, NULL, 0, T.stream), "mlp.quant.weight_cache ", "bytes",
                  NULL);
        cached.quant.weight_cache = NULL;
        T_REFUSED(GMM_E_CONFIG, gmm_mlp_fwd(T.ctx, &cached.d, NULL, 0, T.stream), "mlp.quant.weight_skip needs ", NULL);
    }
}

/* One weight, or none, that the caller has quantized, beside a cache of the rest: forward is given its rowwise copy,
   backward both, and no w1 where it multiplies none. The bits are those of weights in 16 bits. */
static void cache_of_the_rest(int arg) {
    for (int k = 0; k < 3; k++) { /* w1, w2, none */
        mlp_case now, cached;
        gmm_mat copies[2], rowwise;
        const gmm_mat *both, **weight = k == 1 ? &cached.d.w2 : &cached.d.w1;
        gmm_info info = GMM_ZERO;
        t_reseed(9);
        build(&now, arg, GMM_SAVE_PREACT);
        if (now.recipe.weight.dtype == GMM_NONE) return;
        mlp_forward(&now.d);
        gradients_of(&now, NULL);
        t_reseed(9);
        build(&cached, arg, GMM_SAVE_PREACT);
        both = k == 2 ? *weight : mlp_cast(&cached.d, k ? GMM_SLOT_W2 : GMM_SLOT_W1, *weight, copies);
        rowwise = *both;
        if (k < 2) rowwise.columnwise = NULL;
        *weight = &rowwise;
        T_OK(gmm_mlp_query(T.ctx, GMM_OP_MLP_FWD, &cached.d, &info));
        cached.quant.weight_cache = t_alloc_aligned(info.weight_cache_bytes, 256);
        cached.quant.weight_cache_bytes = info.weight_cache_bytes;
        mlp_forward(&cached.d);
        *weight = both;
        gradients_of(&cached, NULL);
        same_gradients(&now, &cached);
        cached.dw1 = t_mat_out(GMM_F32, G, 2 * FFN, HIDDEN);
        cached.d.dx = NULL;
        cached.d.w1 = NULL;
        backward(&cached, NULL);
        t_same("dw1 without w1", t_mat_bits(&now.dw1), t_mat_bits(&cached.dw1), sizeof(float) * G * 2 * FFN * HIDDEN);
    }
}

/* The workspace that a query without `saved` states is enough for inference, which has the bits of training (argument:
   as of equals_steps). */
static void infers(int arg) {
    const struct policy *policy = &policies[arg / REF_RECIPES];
    mlp_case c;
    t_mat trained;
    build(&c, arg % REF_RECIPES, policy->save);
    c.quant.backward_override = policy->override;
    mlp_forward(&c.d);
    trained = c.y;
    c.y = t_mat_out(GMM_BF16, 1, ROWS, HIDDEN);
    c.d.saved = NULL;
    c.d.saved_bytes = 0;
    T_OK(mlp_call(GMM_OP_MLP_FWD, &c.d));
    same_rows("y", &trained, &c.y);
}

/* Without capacity nothing may be saved: backward stores zeros (argument: as of equals_steps). */
static void no_capacity(int arg) {
    const struct policy *policy = &policies[arg / REF_RECIPES];
    const int64_t zeros[MLP_GROUPS] = { 0 };
    mlp_case c;
    build(&c, arg % REF_RECIPES, policy->save);
    c.quant.backward_override = policy->override;
    c.groups.splits = t_in(zeros, sizeof zeros);
    c.groups.capacity = 0;
    mlp_forward(&c.d);
    mlp_want_gradients(&c);
    T_OK(mlp_call(GMM_OP_MLP_BWD, &c.d));
    t_bytes("dw1", t_mat_bits(&c.dw1), 0, (size_t)(MLP_GROUPS * c.dw1.rows * c.dw1.cols * 4));
    t_bytes("dw2", t_mat_bits(&c.dw2), 0, (size_t)(MLP_GROUPS * c.dw2.rows * c.dw2.cols * 4));
}

/* Queued weight gradients have the bits of immediate ones (argument: as of equals_steps). */
static void delayed_wgrad(int arg) {
    const struct policy *policy = &policies[arg / REF_RECIPES];
    mlp_case now, later;
    gmm_wgrad_entry entries[2];
    gmm_wgrad_queue queue = gmm_wgrad_queue_over(entries, 2);
    t_reseed(5);
    build(&now, arg % REF_RECIPES, policy->save);
    now.quant.backward_override = policy->override;
    if (mlp_saves_copies(policy->save) && now.recipe.input.dtype == GMM_NONE) {
        T_REFUSED(GMM_E_CONFIG, gmm_mlp_bwd(T.ctx, &now.d, NULL, 0, T.stream), "mlp.config.save: ", NULL);
        return;
    }
    mlp_forward(&now.d);
    gradients_of(&now, NULL);
    t_reseed(5);
    build(&later, arg % REF_RECIPES, policy->save);
    later.quant.backward_override = policy->override;
    later.config.delay_wgrad = 1;
    mlp_forward(&later.d);
    gradients_of(&later, &queue);
    same_gradients(&now, &later);
    later.dw2 = t_mat_out(GMM_F32, G, HIDDEN, FFN);
    later.d.dx = NULL; /* backward multiplies nothing, and the queue FC2's gradient alone */
    later.d.dw1 = NULL;
    later.d.dprob = NULL;
    backward(&later, &queue);
    t_same("dw2 alone", t_mat_bits(&now.dw2), t_mat_bits(&later.dw2), sizeof(float) * G * FFN * HIDDEN);
}

/* A workspace over amaxes or scales that casts of queued gradients use is refused before any gradient is computed. */
static void queued_overlaps(int arg) {
    mlp_case c;
    gmm_wgrad_entry entries[2];
    gmm_wgrad_queue queue = gmm_wgrad_queue_over(entries, 2);
    gmm_info info = GMM_ZERO;
    void *arrays;
    (void)arg;
    build(&c, REF_FP8_DELAYED, GMM_SAVE_PREACT);
    c.config.delay_wgrad = 1;
    mlp_forward(&c.d);
    mlp_want_gradients(&c);
    T_OK(gmm_mlp_query(T.ctx, GMM_OP_MLP_WGRAD, &c.d, &info));
    arrays = t_alloc_aligned(info.workspace_bytes, 256);
    for (int k = 0; k < 2; k++) {
        if (k) c.quant.scale = (const float *)arrays, c.quant.amax = c.amax;
        else c.quant.amax = (float *)arrays;
        backward_to(&c, &queue, 1);
        T_REFUSED(GMM_E_ARG, gmm_mlp_wgrad(T.ctx, &queue, arrays, info.workspace_bytes, T.stream), "gmm_mlp_wgrad: ",
                  k ? "quant.scale" : "quant.amax", "overlaps", NULL);
        t_bytes("dw2", t_mat_bits(&c.dw2), 0xFF, sizeof(float) * G * FFN * HIDDEN);
        queue = gmm_wgrad_queue_over(entries, 2);
    }
}

/* Gathered rows of x and dy, by different indices, have the bits of rows that are there: at once and queued (argument:
   as of equals_steps). */
static void gathers(int arg) {
    enum { TOKENS = 40, DIV = 3 };
    const struct policy *policy = &policies[arg / REF_RECIPES];
    for (int delay = 0; delay < 2; delay++) {
        mlp_case runs[2];
        for (int index = 0; index < 2; index++) {
            gmm_wgrad_entry entries[2];
            gmm_wgrad_queue queue = gmm_wgrad_queue_over(entries, 2);
            mlp_case *c = &runs[index];
            t_reseed(8 + (uint64_t)delay);
            build(c, arg % REF_RECIPES, policy->save);
            c->quant.backward_override = policy->override;
            c->config.delay_wgrad = delay;
            for (int k = 0; k < 2; k++) { /* x, dy */
                t_mat *rows = k ? &c->dy : &c->x;
                const t_mat tokens = t_mat_make(GMM_BF16, 1, TOKENS, rows->cols, 8, 0, T_PACKED, T_REALS);
                int32_t at[ROWS];
                for (int i = 0; i < ROWS; i++) at[i] = i % (9 - k) == 4 ? -2 : (int32_t)t_int(0, TOKENS * DIV - 1);
                for (int64_t i = 0; i < ROWS * rows->cols; i++) {
                    const int32_t token = at[i / rows->cols];
                    rows->v[i] = token < 0 ? 0.0 : tokens.v[token / DIV * rows->cols + i % rows->cols];
                }
                if (!index) t_mat_put(rows);
                else {
                    *rows = tokens;
                    *(k ? &c->d.dy_index : &c->d.x_index) = (const int32_t *)t_in(at, sizeof at);
                }
            }
            c->d.index_rows = TOKENS;
            c->d.index_div = DIV;
            mlp_forward(&c->d);
            gradients_of(c, delay ? &queue : NULL);
        }
        same_gradients(&runs[0], &runs[1]);
    }
}

/* Whether the casts of dz compute it, so that it is not stored. By blocks they would where FFN is a multiple of 128. */
static int casts_compute_dz(const mlp_case *c) {
    return T.gpu && c->quant.backward_override == GMM_BACKWARD_BY_RECIPE && c->recipe.grad.delayed;
}
/* Where backward may overwrite what is saved, gradients keep their bits, and the workspace shrinks (argument: as of
   equals_steps). */
static void overwrites_saved(int arg) {
    const struct policy *policy = &policies[arg / REF_RECIPES];
    const int64_t preact = (int64_t)sizeof(uint16_t) * ROWS * 2 * FFN;
    for (int delay = 0; delay < 2; delay++) {
        mlp_case runs[2];
        gmm_info info[2];
        int saves_preact = !mlp_saves_e4m3(policy->save) && policy->save != GMM_SAVE_NOTHING, queued, overwrites;
        memset(info, 0, sizeof info);
        for (int overwrite = 0; overwrite < 2; overwrite++) {
            gmm_wgrad_entry entries[1];
            gmm_wgrad_queue queue = gmm_wgrad_queue_over(entries, 1);
            mlp_case *c = &runs[overwrite];
            void *before;
            t_reseed(11);
            build(c, arg % REF_RECIPES, policy->save);
            c->quant.backward_override = policy->override;
            c->config.delay_wgrad = delay;
            c->config.overwrite_saved = overwrite;
            mlp_forward(&c->d);
            before = saves_preact ? t_get(c->d.saved, (size_t)preact) : NULL;
            mlp_want_gradients(c);
            T_OK(gmm_mlp_query(T.ctx, GMM_OP_MLP_BWD, &c->d, &info[overwrite]));
            gradients_of(c, delay ? &queue : NULL);
            queued = delay && (policy->override != GMM_BACKWARD_BY_RECIPE || c->recipe.grad.dtype == GMM_NONE);
            overwrites = overwrite && !queued && !casts_compute_dz(c);
            if (saves_preact)
                T_CHECK(!memcmp(before, t_get(c->d.saved, (size_t)preact), (size_t)preact) == !overwrites,
                        "the saved pre-activation %s", overwrites ? "remains" : "changes");
        }
        same_gradients(&runs[0], &runs[1]);
        T_CHECK(info[0].workspace_bytes >= info[1].workspace_bytes && info[0].saved_bytes == info[1].saved_bytes &&
                    info[0].deferred_bytes == info[1].deferred_bytes,
                "workspace %llu, overwriting %llu", (unsigned long long)info[0].workspace_bytes,
                (unsigned long long)info[1].workspace_bytes);
    }
}

/* The named parts of `saved` are the columnwise copies of x and h that gmm_quantize makes: equal values, and equal
   scales and amaxes, which dequantization multiplies by. */
static void saved_copies(int arg) {
    const struct { const char *data, *scale, *amax; int slot; int64_t cols; } copies[2] = {
        { "x", "x_scale", "x_amax", GMM_SLOT_X, HIDDEN }, { "act", "act_scale", "act_amax", GMM_SLOT_H, FFN }
    };
    gmm_saved_layout l = GMM_ZERO;
    int64_t end = 0;
    mlp_case c;
    t_mat H = t_mat_out(GMM_BF16, 1, ROWS, FFN), z;
    build(&c, arg, GMM_SAVE_QUANTIZED);
    if (c.recipe.input.dtype == GMM_NONE) {
        T_REFUSED(GMM_E_CONFIG, gmm_mlp_saved_query(T.ctx, GMM_OP_MLP_FWD, &c.d, &l), "mlp.config.save: ", NULL);
        return;
    }
    mlp_forward(&c.d);
    T_OK(gmm_mlp_saved_query(T.ctx, GMM_OP_MLP_FWD, &c.d, &l));
    T_CHECK(l.count == (c.recipe.input.scaling == GMM_SCALING_NV16 ? 7 : 5), "%d parts", (int)l.count);
    T_CHECK((size_t)l.bytes == c.d.saved_bytes, "%lld bytes", (long long)l.bytes);
    for (int i = 0; i < l.count; i++) {
        T_CHECK(l.part[i].offset >= end && l.part[i].offset % 256 == 0, "offset of %s", l.part[i].name);
        end = l.part[i].offset + l.part[i].bytes;
    }
    T_CHECK(end <= l.bytes, "parts end at %lld", (long long)end);
    z.mat = gmm_mat_packed(GMM_BF16, (char *)c.d.saved + mlp_saved_part(&c.d, "preact").offset);
    mlp_act_fwd(&c.d, &z.mat, &H.mat);
    for (int i = 0; i < 2; i++) {
        gmm_mat own[2];
        gmm_dequantization d = GMM_ZERO;
        gmm_info info = GMM_ZERO;
        t_mat values[2];
        gmm_format f = c.recipe.input;
        const gmm_saved_part data = mlp_saved_part(&c.d, copies[i].data);
        const gmm_saved_part scale = mlp_saved_part(&c.d, copies[i].scale);
        const gmm_saved_part amax = mlp_saved_part(&c.d, copies[i].amax);
        gmm_mat saved;
        f.row_amax = 0;
        saved = gmm_mat_quantized(&f, GMM_COLUMNWISE, (char *)c.d.saved + data.offset,
                                  (char *)c.d.saved + scale.offset,
                                  amax.name ? (float *)(void *)((char *)c.d.saved + amax.offset) : NULL);
        (void)mlp_cast(&c.d, copies[i].slot, i ? &H.mat : &c.x.mat, own);
        d.groups = &c.groups;
        d.cols = copies[i].cols;
        d.direction = GMM_COLUMNWISE;
        for (int k = 0; k < 2; k++) {
            values[k] = t_mat_out(GMM_BF16, 1, ROWS, copies[i].cols);
            d.src = k ? &own[1] : &saved;
            d.dst = &values[k].mat;
            T_OK(gmm_dequantize_query(T.ctx, &d, &info));
            T_OK(gmm_dequantize(T.ctx, &d, t_workspace(info.workspace_bytes), info.workspace_bytes, T.stream));
        }
        same_rows(copies[i].data, &values[0], &values[1]);
    }
}

#ifdef HAVE_CUDA
/* Forward and backward launch one kernel that reads the split, whatever their steps are. MMA's products have tiles of
   their own, and launch one each; NV16 with an amax per row is theirs on every GPU. */
static void one_split(int arg) {
    static const gmm_op ops[2] = { GMM_OP_MLP_FWD, GMM_OP_MLP_BWD };
    mlp_case c;
    build(&c, arg, GMM_SAVE_QUANTIZED);
    if (c.recipe.input.dtype == GMM_NONE) c.config.save = GMM_SAVE_PREACT;
    c.groups.tail = GMM_TAIL_ZERO; /* with which casts do not read the split themselves */
    mlp_forward(&c.d);
    mlp_want_gradients(&c);
    for (int i = 0; i < 2; i++) {
        gmm_info info = GMM_ZERO;
        const char *error;
        gmm_status s;
        void *workspace;
        int kernels, splits, want;
        T_OK(gmm_mlp_query(T.ctx, ops[i], &c.d, &info));
        workspace = t_workspace(info.workspace_bytes);
        error = device_begin_capture();
        T_CHECK(!error, "begin: %s", error);
        s = i ? gmm_mlp_bwd(T.ctx, &c.d, workspace, info.workspace_bytes, T.stream)
              : gmm_mlp_fwd(T.ctx, &c.d, workspace, info.workspace_bytes, T.stream);
        error = device_end_capture_counted("gmm_split_offsets", &kernels, &splits);
        T_CHECK(s == GMM_OK, "capture: %s", gmm_last_error(T.ctx));
        T_CHECK(!error, "end: %s", error);
        /* products of MMA read it themselves, and those of MMA alone take an amax per row */
        want = T.engine == GMM_ENGINE_MMA ? (i ? 5 : 3) : arg == REF_NVFP4_ROW_AMAX && !i ? 3 : 1;
        T_CHECK(splits == want && kernels > 4, "%d kernels read the split, not %d, of %d", splits, want, kernels);
    }
}
#endif

/* Bias gradients have the bits of gmm_linear_bgrad, and a cast of dy or dz adds up the columns: no kernel reads either
   again for them. */
static void bias_gradients(int arg) {
    for (int prob_on_bias2 = 0; prob_on_bias2 < 2; prob_on_bias2++) {
        const t_mat b1 = t_mat_in(GMM_BF16, G, 1, 2 * FFN, T_REALS), b2 = t_mat_in(GMM_BF16, G, 1, HIDDEN, T_REALS);
        const t_mat db1 = t_mat_out(GMM_F32, G, 1, 2 * FFN), db2 = t_mat_out(GMM_F32, G, 1, HIDDEN);
        const t_mat DB1 = t_mat_out(GMM_F32, G, 1, 2 * FFN), DB2 = t_mat_out(GMM_F32, G, 1, HIDDEN);
        const t_mat dh = t_mat_out(GMM_BF16, 1, ROWS, FFN), dz = t_mat_out(GMM_BF16, 1, ROWS, 2 * FFN);
        gmm_mat dys[2], w2s[2], z;
        gmm_grad g1 = GMM_ZERO, g2 = GMM_ZERO;
        mlp_case c;
        build(&c, arg, GMM_SAVE_PREACT);
        c.config.bias1 = c.config.bias2 = 1;
        c.config.prob_on_bias2 = prob_on_bias2;
        c.d.b1 = &b1.mat;
        c.d.b2 = &b2.mat;
        mlp_forward(&c.d);
        mlp_want_gradients(&c);
        g1.mat = &db1.mat;
        g2.mat = &db2.mat;
        c.d.db1 = &g1;
        c.d.db2 = &g2;
        T_OK(mlp_call(GMM_OP_MLP_BWD, &c.d));
        z = gmm_mat_packed(GMM_BF16, (const char *)c.d.saved + mlp_saved_part(&c.d, "preact").offset);
        mlp_linear(&c.d, GMM_PARAM_W2, GMM_OP_LINEAR_DGRAD, NULL, mlp_cast(&c.d, GMM_SLOT_W2, &c.w2.mat, w2s),
                   mlp_cast(&c.d, GMM_SLOT_DY, &c.dy.mat, dys), &dh.mat);
        mlp_act_bwd(&c.d, &z, &dh.mat, &dz.mat, t_floats_out(ROWS));
        mlp_linear(&c.d, GMM_PARAM_W2, GMM_OP_LINEAR_BGRAD, NULL, NULL, &c.dy.mat, &DB2.mat);
        mlp_linear(&c.d, GMM_PARAM_W1, GMM_OP_LINEAR_BGRAD, NULL, NULL, &dz.mat, &DB1.mat);
        t_same("db2", t_mat_bits(&db2), t_mat_bits(&DB2), G * HIDDEN * 4);
        t_same("db1", t_mat_bits(&db1), t_mat_bits(&DB1), G * 2 * FFN * 4);
#ifdef HAVE_CUDA
        if (T.gpu) {
            const gmm_format *f = &c.recipe.grad;
            const int want = f->dtype == GMM_NONE || f->four_over_six || f->row_amax ? 2 : 0; /* general casts do not */
            gmm_info info = GMM_ZERO;
            const char *error;
            gmm_status s;
            void *workspace;
            int kernels, sums;
            T_OK(gmm_mlp_query(T.ctx, GMM_OP_MLP_BWD, &c.d, &info));
            workspace = t_workspace(info.workspace_bytes);
            error = device_begin_capture();
            T_CHECK(!error, "begin: %s", error);
            s = gmm_mlp_bwd(T.ctx, &c.d, workspace, info.workspace_bytes, T.stream);
            error = device_end_capture_counted("gmm_linear_bgrad_partials", &kernels, &sums);
            T_CHECK(s == GMM_OK && !error, "capture: %s %s", gmm_last_error(T.ctx), error ? error : "");
            T_CHECK(sums == want, "%d of %d kernels read dy or dz for a bias gradient, not %d", sums, kernels, want);
        }
#endif
    }
}

/* The column sums of bias gradients lie where they displace no larger block: backward's workspace grows by them and by
   their alignment alone. */
static void bias_workspace(int arg) {
    const gmm_mat m = gmm_mat_packed(GMM_BF16, NULL), sum = gmm_mat_packed(GMM_F32, NULL);
    const gmm_recipe recipe = ref_recipe_of(arg).recipe;
    gmm_groups groups = { .count = 32, .capacity = 32768, .dtype = GMM_I32 };
    gmm_mlp_config config = { .hidden = 2880, .ffn = 2880, .act = gmm_act_of(GMM_ACT_PRESET_SWIGLU), .bias1 = 1,
                              .bias2 = 1, .save = GMM_SAVE_QUANTIZED, .recipe = recipe.kind };
    gmm_mlp_quant quant = { .recipe = &recipe };
    gmm_grad grad = { .mat = &sum };
    gmm_mlp d = { .config = &config, .groups = &groups, .quant = &quant, .x = &m, .w1 = &m, .w2 = &m, .b1 = &m,
                  .b2 = &m, .dy = &m, .dx = &m, .dw1 = &grad, .dw2 = &grad };
    /* of dz and, if its cast computes it while FC2's wgrad has not read dy yet, of dy */
    const size_t sums = (32768 / 128 + 32) * (2 + (T.gpu && recipe.grad.delayed)) * 2880 * sizeof(float);
    gmm_info info = GMM_ZERO, with = GMM_ZERO;
    if (recipe.input.dtype == GMM_NONE) config.save = GMM_SAVE_PREACT;
    T_OK(gmm_mlp_query(T.ctx, GMM_OP_MLP_BWD, &d, &info));
    d.db1 = d.db2 = &grad;
    T_OK(gmm_mlp_query(T.ctx, GMM_OP_MLP_BWD, &d, &with));
    T_CHECK(with.workspace_bytes <= info.workspace_bytes + sums, "%zu bytes, without bias gradients %zu",
            with.workspace_bytes, info.workspace_bytes);
}

static void count_warning(void *user, gmm_log_level level, const char *message) {
    *(int *)user += level == GMM_LOG_WARN && strstr(message, "mlp.quant.scale is NULL");
}

/* Backward casts each operand once: dy and dz, which dgrad and wgrad both read, in one pass. Every operation that it is
   composed of writes one line of the trace. */
static void casts_once(int arg) {
    for (int wgrads = 0; wgrads < 2; wgrads++) {
        int lines = 0, casts;
        gmm_context *const ctx = mlp_traced(&lines);
        gmm_info info = GMM_ZERO;
        mlp_case c;
        build(&c, arg, GMM_SAVE_PREACT);
        mlp_forward(&c.d);
        mlp_want_gradients(&c);
        if (!wgrads) c.d.dw1 = c.d.dw2 = NULL;
        T_OK_TEXT(gmm_mlp_query(ctx, GMM_OP_MLP_BWD, &c.d, &info), gmm_last_error(ctx));
        lines = 0;
        T_OK_TEXT(gmm_mlp_bwd(ctx, &c.d, t_workspace(info.workspace_bytes), info.workspace_bytes, T.stream),
                  gmm_last_error(ctx));
        /* lines of the MLP, its offsets, its activation unless the cast of dz computes it, two or four products */
        casts = lines - (wgrads ? 7 : 5) + casts_compute_dz(&c);
        T_CHECK(casts == 2 * (c.recipe.grad.dtype != GMM_NONE) + 2 * (c.recipe.weight.dtype != GMM_NONE) +
                             2 * (wgrads && c.recipe.input.dtype != GMM_NONE), "%d casts, wgrads %d", casts, wgrads);
    }
}

/* Delayed scaling without scales is written to the log once per context, and scales are not. */
static void warns_without_scales(int arg) {
    (void)arg;
    for (int scaled = 0; scaled < 2; scaled++) {
        gmm_config config = T.config;
        gmm_info info = GMM_ZERO;
        gmm_context *ctx;
        mlp_case c;
        int lines = 0;
        config.log.level = GMM_LOG_WARN;
        config.log.user = &lines;
        config.log.write = count_warning;
        ctx = t_context(&config);
        build(&c, REF_FP8_DELAYED, GMM_SAVE_PREACT);
        if (!scaled) c.quant.scale = NULL;
        for (int i = 0; i < 2; i++) {
            T_OK_TEXT(gmm_mlp_query(ctx, GMM_OP_MLP_FWD, &c.d, &info), gmm_last_error(ctx));
            T_CHECK(lines == (i && !scaled), "%d lines after a query", lines);
            T_OK_TEXT(gmm_mlp_fwd(ctx, &c.d, t_workspace(info.workspace_bytes), info.workspace_bytes, T.stream),
                      gmm_last_error(ctx));
        }
        T_CHECK(lines == !scaled, "%d lines", lines);
    }
}

/* What a layer keeps from forward to backward beside weights and gradients: x where backward reads it, and `saved`. By
   the queries of an MLP of these extents, without memory. */
static double kept_bytes(gmm_recipe_kind kind, gmm_save save, int32_t groups, int64_t rows, int64_t hidden,
                         int64_t ffn) {
    const gmm_recipe recipe = gmm_recipe_of(kind);
    const int32_t sizes[1] = { 0 };
    gmm_groups g = GMM_ZERO;
    gmm_mlp_config config = GMM_ZERO;
    gmm_mlp_quant quant = GMM_ZERO;
    gmm_mat x = gmm_mat_packed(GMM_BF16, NULL);
    gmm_info info = GMM_ZERO;
    gmm_mlp d = GMM_ZERO;
    g.count = groups;
    g.capacity = rows;
    g.splits = sizes;
    g.dtype = GMM_I32;
    config.hidden = hidden;
    config.ffn = ffn;
    config.act = gmm_act_of(GMM_ACT_PRESET_SWIGLU);
    config.save = save;
    config.recipe = kind;
    quant.recipe = &recipe;
    d.config = &config;
    d.groups = &g;
    d.x = d.w1 = d.w2 = d.y = &x;
    if (kind != GMM_RECIPE_NONE) d.quant = &quant;
    T_OK(gmm_mlp_query(T.ctx, GMM_OP_MLP_FWD, &d, &info));
    return (double)info.saved_bytes + (mlp_saves_copies(save) ? 0.0 : 2.0 * (double)(rows * hidden));
}

/* The memory that quantized copies save: on models whose groups are large, x, z and h take 1, 2 and 1 bytes per element
   in place of 2, and z 1 byte as E4M3. */
static void kept_memory(int arg) {
    static const struct { int32_t groups; int64_t rows, hidden, ffn; } shapes[] = {
        { 8, 32768, 7168, 2048 }, { 8, 16384, 4096, 14336 }, { 128, 65536, 2048, 768 }, { 32, 32768, 2880, 2880 }
    };
    (void)arg;
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++) {
        const int64_t T_ = shapes[i].rows, H = shapes[i].hidden, F = shapes[i].ffn;
        const int32_t E = shapes[i].groups;
        const double all = kept_bytes(GMM_RECIPE_NONE, GMM_SAVE_PREACT_AND_ACT, E, T_, H, F);
        const double preact = kept_bytes(GMM_RECIPE_NONE, GMM_SAVE_PREACT, E, T_, H, F);
        const double both = kept_bytes(GMM_RECIPE_FP8_BLOCK, GMM_SAVE_QUANTIZED_E4M3, E, T_, H, F);
        const double quantized = kept_bytes(GMM_RECIPE_FP8_BLOCK, GMM_SAVE_QUANTIZED, E, T_, H, F);
        T_CHECK(all == 2.0 * (double)T_ * (double)(H + 3 * F), "all %g", all);
        T_CHECK(preact == 2.0 * (double)T_ * (double)(H + 2 * F), "preact %g", preact);
        T_CHECK(both < 0.75 * preact, "copies and E4M3: %g of %g", both, preact);
        T_CHECK(quantized < 0.83 * all, "copies: %g of %g", quantized, all);
        T_CHECK(both < 0.60 * all, "copies and E4M3: %g of %g", both, all);
    }
}

static void refusals(int arg) {
    mlp_case c;
    (void)arg;
    build(&c, REF_NVFP4, GMM_SAVE_PREACT);
    c.config.recipe = GMM_RECIPE_MXFP8;
    T_REFUSED(GMM_E_CONFIG, gmm_mlp_fwd(T.ctx, &c.d, NULL, 0, T.stream), ": mlp.config.recipe is mxfp8, but the kind "
              "of quant.recipe is nvfp4", NULL);
    c.config.recipe = c.recipe.kind;
    c.recipe.grad.hadamard = 0;
    T_REFUSED(GMM_E_CONFIG, gmm_mlp_fwd(T.ctx, &c.d, NULL, 0, T.stream), ": mlp.quant.recipe.grad.hadamard: ", NULL);
    c.recipe = gmm_recipe_of(GMM_RECIPE_NVFP4);
    c.quant.recipe = NULL;
    T_REFUSED(GMM_E_NULL, gmm_mlp_fwd(T.ctx, &c.d, NULL, 0, T.stream), ": mlp.quant.recipe is NULL", NULL);
    c.quant.recipe = &c.recipe;
    c.quant.reserved = 1;
    T_REFUSED(GMM_E_ARG, gmm_mlp_fwd(T.ctx, &c.d, NULL, 0, T.stream), ": mlp.quant.reserved: 1", NULL);
    c.quant.reserved = 0;
    c.quant.reserved1 = 2;
    T_REFUSED(GMM_E_ARG, gmm_mlp_fwd(T.ctx, &c.d, NULL, 0, T.stream), ": mlp.quant.reserved1: 2", NULL);
    c.quant.reserved1 = 0;
    c.quant.backward_override = (gmm_backward_override)3;
    T_REFUSED(GMM_E_ARG, gmm_mlp_fwd(T.ctx, &c.d, NULL, 0, T.stream), ": mlp.quant.backward_override: 3", NULL);
    c.quant.backward_override = GMM_BACKWARD_HIGH_PRECISION;
    c.config.save = GMM_SAVE_QUANTIZED_E4M3;
    T_REFUSED(GMM_E_CONFIG, gmm_mlp_fwd(T.ctx, &c.d, NULL, 0, T.stream), ": mlp.config.save: 5", "backward_override 1",
              NULL);
    c.config.save = GMM_SAVE_PREACT;
    { /* backward in 16 bits has no weights to multiply where they are given quantized */
        gmm_mat w1 = c.w1.mat;
        w1.dtype = c.recipe.weight.dtype;
        w1.scaling = c.recipe.weight.scaling;
        mlp_want_gradients(&c);
        c.d.w1 = &w1;
        T_REFUSED(GMM_E_CONFIG, gmm_mlp_bwd(T.ctx, &c.d, NULL, 0, T.stream), ": mlp.w1 is quantized", NULL);
        c.d.w1 = &c.w1.mat;
    }
    c.quant.backward_override = GMM_BACKWARD_BY_RECIPE;
    c.quant.weight_cache = c.w2.mat.data;
    c.quant.weight_cache_bytes = (size_t)1 << 30;
    c.quant.weight_skip = (const int32_t *)(const void *)((const char *)c.scale + 1);
    T_REFUSED(GMM_E_ALIGN, gmm_mlp_fwd(T.ctx, &c.d, NULL, 0, T.stream), ": mlp.quant.weight_skip: ", NULL);
    c.quant.weight_skip = NULL;
    {
        gmm_info info = GMM_ZERO;
        void *workspace;
        char *cache;
        T_OK(gmm_mlp_query(T.ctx, GMM_OP_MLP_FWD, &c.d, &info));
        cache = (char *)t_alloc_aligned(info.weight_cache_bytes + 256, 256);
        c.quant.weight_cache = cache + 8;
        T_REFUSED(GMM_E_ALIGN, gmm_mlp_fwd(T.ctx, &c.d, NULL, 0, T.stream), ": mlp.quant.weight_cache: ", "256", NULL);
        c.quant.weight_cache_bytes = info.weight_cache_bytes;
        c.quant.weight_cache = c.y.mat.data = cache;
        workspace = t_workspace(info.workspace_bytes);
        T_REFUSED(GMM_E_ARG, gmm_mlp_fwd(T.ctx, &c.d, workspace, info.workspace_bytes, T.stream), "overlaps",
                  "quant.weight_cache", NULL);
        c.quant.weight_cache = NULL;
    }
    { /* refused before anything is enqueued, so `deferred` is not written */
        gmm_wgrad_entry entry[1];
        gmm_wgrad_queue queue = gmm_wgrad_queue_over(entry, 1);
        gmm_info info = GMM_ZERO;
        void *workspace;
        mlp_forward(&c.d);
        mlp_want_gradients(&c);
        c.config.delay_wgrad = 1;
        T_OK(gmm_mlp_query(T.ctx, GMM_OP_MLP_BWD, &c.d, &info));
        T_CHECK(info.in_align == 32 && info.out_align == 32, "aligns %d %d", (int)info.in_align, (int)info.out_align);
        c.d.deferred = t_alloc_aligned(info.deferred_bytes, 256);
        c.d.deferred_bytes = info.deferred_bytes;
        c.d.queue = &queue;
        workspace = t_workspace(info.workspace_bytes);
        c.quant.random = NULL;
        T_REFUSED(GMM_E_NULL, gmm_mlp_bwd(T.ctx, &c.d, workspace, info.workspace_bytes, T.stream), "gmm_mlp_bwd",
                  "mlp.quant.random: ", NULL);
        c.quant.random = (const uint64_t *)(const void *)((const char *)c.random + 4);
        T_REFUSED(GMM_E_ALIGN, gmm_mlp_bwd(T.ctx, &c.d, workspace, info.workspace_bytes, T.stream), "gmm_mlp_bwd",
                  "mlp.quant.random: ", NULL);
        t_bytes("deferred", t_get(c.d.deferred, info.deferred_bytes), 0xFF, info.deferred_bytes);
        c.quant.random = c.random;
        c.quant.scale = (const float *)(const void *)((const char *)c.scale + 2);
        T_REFUSED(GMM_E_ALIGN, gmm_mlp_fwd(T.ctx, &c.d, NULL, 0, T.stream), "gmm_mlp_fwd: mlp.quant.scale: ", NULL);
        c.quant.scale = c.scale;
        c.config.delay_wgrad = 0;
    }
    c.d.quant = NULL;
    {
        gmm_info info = GMM_ZERO;
        T_REFUSED(GMM_E_CONFIG, gmm_mlp_fwd(T.ctx, &c.d, NULL, 0, T.stream), "gmm_mlp_fwd: mlp.config.recipe: nvfp4 "
                  "needs quant", NULL);
        T_REFUSED(GMM_E_CONFIG, gmm_mlp_bwd(T.ctx, &c.d, NULL, 0, T.stream), "gmm_mlp_bwd: mlp.config.recipe: nvfp4",
                  NULL);
        for (int op = GMM_OP_MLP_FWD; op <= GMM_OP_MLP_WGRAD; op++)
            T_REFUSED(GMM_E_CONFIG, gmm_mlp_query(T.ctx, (gmm_op)op, &c.d, &info),
                      "gmm_mlp_query: mlp.config.recipe: nvfp4", NULL);
    }
    c.d.quant = &c.quant;
    c.config.ffn = 40;
    {
        t_mat w1 = t_mat_in(GMM_BF16, G, 80, HIDDEN, T_REALS), w2 = t_mat_in(GMM_BF16, G, HIDDEN, 40, T_REALS);
        c.d.w1 = &w1.mat;
        c.d.w2 = &w2.mat;
        T_REFUSED(GMM_E_ARG, gmm_mlp_fwd(T.ctx, &c.d, NULL, 0, T.stream), "gmm_mlp_fwd: mlp.config.ffn: 40",
                  "multiple of 32", "ffn=40", NULL);
    }
}

/* The Hadamard transform supports BF16 only. Other dtypes are refused by forward and backward; without the transform
   both accept them. */
static void transform_dtypes(int arg) {
    const gmm_dtype dtype = (gmm_dtype)arg;
    gmm_info info = GMM_ZERO;
    mlp_case c;
    t_mat w1, w2;
    build(&c, REF_NVFP4, GMM_SAVE_PREACT);
    c.x = t_mat_in(dtype, 1, ROWS, HIDDEN, T_REALS);
    c.dy = t_mat_in(dtype, 1, ROWS, HIDDEN, T_REALS);
    w1 = t_mat_in(dtype, G, 2 * FFN, HIDDEN, T_REALS);
    w2 = t_mat_in(dtype, G, HIDDEN, FFN, T_REALS);
    c.d.w1 = &w1.mat;
    c.d.w2 = &w2.mat;
    mlp_want_gradients(&c);
    for (int op = GMM_OP_MLP_FWD; op <= GMM_OP_MLP_WGRAD; op++)
        T_REFUSED(GMM_E_DTYPE, gmm_mlp_query(T.ctx, (gmm_op)op, &c.d, &info),
                  op == GMM_OP_MLP_FWD ? " mlp.x: " : " mlp.dy: ",
                  gmm_dtype_name(dtype), "hadamard", NULL);
    T_REFUSED(GMM_E_DTYPE, gmm_mlp_fwd(T.ctx, &c.d, NULL, 0, T.stream), "gmm_mlp_fwd: mlp.x: dtype", NULL);
    T_REFUSED(GMM_E_DTYPE, gmm_mlp_bwd(T.ctx, &c.d, NULL, 0, T.stream), "gmm_mlp_bwd: mlp.dy: dtype", NULL);
    c.recipe.input.hadamard = c.recipe.grad.hadamard = 0;
    mlp_forward(&c.d);
    T_OK(mlp_call(GMM_OP_MLP_BWD, &c.d));
}

void tests_mlp_quant(void) {
    for (int i = 0; i < REF_RECIPES * POLICIES; i++) {
        const char *recipe = ref_recipe_of(i % REF_RECIPES).name, *policy = policies[i / REF_RECIPES].name;
        t_add(equals_steps, i, "mlp recipe %s equals its steps, %s", recipe, policy);
        t_add(delayed_wgrad, i, "mlp recipe %s delayed weight gradients, %s", recipe, policy);
        if (mlp_saves_copies(policies[i / REF_RECIPES].save) && !ref_recipe_of(i % REF_RECIPES).recipe.input.dtype)
            continue; /* refused */
        t_add(infers, i, "mlp recipe %s infers, %s", recipe, policy);
        t_add(no_capacity, i, "mlp recipe %s no capacity, %s", recipe, policy);
        t_add(gathers, i, "mlp recipe %s gathered rows, %s", recipe, policy);
        t_add(overwrites_saved, i, "mlp recipe %s overwrites what is saved, %s", recipe, policy);
    }
    for (int i = 0; i < REF_RECIPES; i++) {
        t_add(policy_bits, i, "mlp recipe %s bits of save policies", ref_recipe_of(i).name);
        t_add(weight_cache, i, "mlp recipe %s weight cache", ref_recipe_of(i).name);
        t_add(cache_of_the_rest, i, "mlp recipe %s weight cache beside quantized weights", ref_recipe_of(i).name);
        t_add(saved_copies, i, "mlp recipe %s saved copies", ref_recipe_of(i).name);
    }
    for (int i = 0; i < REF_RECIPES; i++) {
        t_add(casts_once, i, "mlp recipe %s casts each operand once", ref_recipe_of(i).name);
        t_add(bias_gradients, i, "mlp recipe %s bias gradients from its casts", ref_recipe_of(i).name);
        t_add(bias_workspace, i, "mlp recipe %s workspace of bias gradients", ref_recipe_of(i).name);
    }
    t_add(smaller_formats, 0, "mlp recipe formats of fewer members");
    t_add(smaller_copies, 0, "mlp recipe copies of fewer members");
    t_add(warns_without_scales, 0, "mlp recipe fp8 delayed without scales");
    t_add(queued_overlaps, 0, "mlp recipe fp8 delayed, queued gradients whose workspace lies over scales");
#ifdef HAVE_CUDA
    for (int i = 0; i <= REF_NVFP4_ROW_AMAX; i++)
        t_add_gpu(one_split, i, "mlp recipe %s reads the split once", ref_recipe_of(i).name);
#endif
    t_add(kept_memory, 0, "mlp recipe memory that a layer keeps");
    t_add(refusals, 0, "mlp recipe refusals");
    t_add(transform_dtypes, (int)GMM_F16, "mlp recipe with the transform takes bf16 alone, not f16");
    t_add(transform_dtypes, (int)GMM_F32, "mlp recipe with the transform takes bf16 alone, not f32");
}
