/* test_graph.c - captured graphs replayed with other splits, whole layers included; SM limits. GPU only. */
#include "test.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifdef HAVE_CUDA
#include "device.h"

enum { TOKENS = 96, EXPERTS = 12, TOPK = 3, ROWS = TOKENS * TOPK, SLOTS = TOKENS * TOPK };

/* A mixture-of-experts layer, forward and backward, in buffers at fixed addresses. */
typedef struct layer {
    int64_t hidden, ffn;
    gmm_recipe recipe;
    gmm_mlp_quant quant;
    gmm_groups groups;
    gmm_options options;
    gmm_mlp_config config;
    gmm_route route;
    gmm_permute permute, dispatch; /* permute_map's descriptor; permute_fwd's with its operands */
    gmm_mlp mlp;
    t_mat logits, dlogits, x, rows, w1, w2, b1, b2, y, out, dout, drows_y, drows_x, dx, dw1, dw2, db1, db2;
    gmm_grad gw1, gw2, gb1, gb2;
    float *row_probs, *drow_probs, *dprobs;
    void *workspace;
    size_t workspace_bytes;
    uint32_t *fault;
} layer;

static void grow(layer *l, gmm_info *info) {
    if (info->workspace_bytes > l->workspace_bytes) l->workspace_bytes = info->workspace_bytes;
    memset(info, 0, sizeof *info);
}

static void layer_build(layer *l, gmm_dtype dtype, gmm_recipe_kind recipe, int32_t sm_limit) {
    const uint32_t zero = 0;
    const uint64_t random[4] = { 1, 2, 3, 4 };
    const int64_t hidden = recipe ? 64 : 40, ffn = recipe ? 96 : 24;
    gmm_info info = GMM_ZERO;
    memset(l, 0, sizeof *l);
    l->hidden = hidden;
    l->ffn = ffn;
    l->recipe = gmm_recipe_of(recipe);
    l->quant.recipe = &l->recipe;
    l->quant.random = (const uint64_t *)t_in(random, sizeof random);
    l->options.sm_limit = sm_limit;
    l->logits = t_mat_make(GMM_F32, 1, TOKENS, EXPERTS, 0, 0, T_PACKED, T_REALS);
    l->dlogits = t_mat_out(GMM_F32, 1, TOKENS, EXPERTS);
    l->x = t_mat_make(dtype, 1, TOKENS, hidden, 0, 0, T_PACKED, T_REALS);
    l->rows = t_mat_out(dtype, 1, ROWS, hidden);
    l->w1 = t_mat_make(dtype, EXPERTS, 2 * ffn, hidden, 0, 0, T_PACKED, T_REALS);
    l->w2 = t_mat_make(dtype, EXPERTS, hidden, ffn, 0, 0, T_TABLE, T_REALS);
    l->b1 = t_mat_make(dtype, EXPERTS, 1, 2 * ffn, 0, 0, T_PACKED, T_REALS);
    l->b2 = t_mat_make(dtype, EXPERTS, 1, hidden, 0, 0, T_PACKED, T_REALS);
    l->y = t_mat_out(dtype, 1, ROWS, hidden);
    l->out = t_mat_out(dtype, 1, TOKENS, hidden);
    l->dout = t_mat_make(dtype, 1, TOKENS, hidden, 0, 0, T_PACKED, T_REALS);
    l->drows_y = t_mat_out(dtype, 1, ROWS, hidden);
    l->drows_x = t_mat_out(dtype, 1, ROWS, hidden);
    l->dx = t_mat_out(dtype, 1, TOKENS, hidden);
    l->dw1 = t_mat_out(GMM_F32, EXPERTS, 2 * ffn, hidden);
    l->dw2 = t_mat_make(GMM_F32, EXPERTS, hidden, ffn, 0, 0, T_TABLE, T_POISON);
    l->db1 = t_mat_out(GMM_F32, EXPERTS, 1, 2 * ffn);
    l->db2 = t_mat_out(GMM_F32, EXPERTS, 1, hidden);
    l->row_probs = t_floats_out(ROWS);
    l->drow_probs = t_floats_out(ROWS);
    l->dprobs = t_floats_out(SLOTS);
    l->fault = (uint32_t *)t_alloc(sizeof zero);
    t_upload(l->fault, &zero, sizeof zero);

    l->route.tokens = TOKENS;
    l->route.experts = EXPERTS;
    l->route.topk = TOPK;
    l->route.normalize = 1;
    l->route.options = &l->options;
    l->route.logits = &l->logits.mat;
    l->route.indices = (int32_t *)t_alloc(SLOTS * sizeof(int32_t));
    l->route.probs = t_floats_out(SLOTS);
    l->route.counts = (int32_t *)t_alloc(EXPERTS * sizeof(int32_t));
    l->route.aux_coeff = 0.01f;
    l->route.aux_loss = t_floats_out(1);
    l->route.dprobs = l->dprobs;
    l->route.dlogits = &l->dlogits.mat;

    l->permute.tokens = TOKENS;
    l->permute.experts = EXPERTS;
    l->permute.topk = TOPK;
    l->permute.capacity = ROWS;
    l->permute.hidden = hidden;
    l->permute.tail = GMM_TAIL_ZERO;
    l->permute.options = &l->options;
    l->permute.fault = l->fault;
    l->permute.indices = l->route.indices;
    l->permute.row_of = (int32_t *)t_alloc(SLOTS * sizeof(int32_t));
    l->permute.slot_of = (int32_t *)t_alloc(ROWS * sizeof(int32_t));
    l->permute.sizes = (int32_t *)t_alloc(EXPERTS * sizeof(int32_t));
    l->dispatch = l->permute;
    l->dispatch.x = &l->x.mat;
    l->dispatch.probs = l->route.probs;
    l->dispatch.rows = &l->rows.mat;
    l->dispatch.row_probs = l->row_probs;

    l->groups.count = EXPERTS;
    l->groups.capacity = ROWS;
    l->groups.splits = l->permute.sizes;
    l->groups.dtype = GMM_I32;
    l->groups.tail = GMM_TAIL_ZERO;
    l->groups.fault = l->fault;
    l->config.hidden = hidden;
    l->config.ffn = ffn;
    l->config.act.kind = GMM_ACT_SWIGLU;
    l->config.act.interleave = 8;
    l->config.recipe = recipe;
    l->config.bias1 = l->config.bias2 = l->config.prob = l->config.prob_on_bias2 = 1;
    l->mlp.config = &l->config;
    if (recipe) l->mlp.quant = &l->quant;
    l->mlp.groups = &l->groups;
    l->mlp.options = &l->options;
    l->mlp.x = &l->rows.mat;
    l->mlp.w1 = &l->w1.mat;
    l->mlp.w2 = &l->w2.mat;
    l->mlp.b1 = &l->b1.mat;
    l->mlp.b2 = &l->b2.mat;
    l->mlp.prob = l->row_probs;
    l->mlp.y = &l->y.mat;
    l->mlp.dy = &l->drows_y.mat;
    l->mlp.dx = &l->drows_x.mat;
    l->gw1.mat = &l->dw1.mat;
    l->gw2.mat = &l->dw2.mat;
    l->gb1.mat = &l->db1.mat;
    l->gb2.mat = &l->db2.mat;
    l->mlp.dw1 = &l->gw1;
    l->mlp.dw2 = &l->gw2;
    l->mlp.db1 = &l->gb1;
    l->mlp.db2 = &l->gb2;
    l->mlp.dprob = l->drow_probs;

    T_OK(gmm_topk_query(T.ctx, GMM_OP_TOPK_FWD, &l->route, &info));
    grow(l, &info);
    T_OK(gmm_topk_query(T.ctx, GMM_OP_TOPK_BWD, &l->route, &info));
    grow(l, &info);
    T_OK(gmm_permute_query(T.ctx, GMM_OP_PERMUTE_MAP, &l->permute, &info));
    grow(l, &info);
    T_OK(gmm_permute_query(T.ctx, GMM_OP_PERMUTE_FWD, &l->dispatch, &info));
    grow(l, &info);
    T_OK(gmm_mlp_query(T.ctx, GMM_OP_MLP_BWD, &l->mlp, &info));
    l->mlp.saved = t_workspace(info.saved_bytes);
    l->mlp.saved_bytes = info.saved_bytes;
    grow(l, &info);
    T_OK(gmm_mlp_query(T.ctx, GMM_OP_MLP_FWD, &l->mlp, &info));
    grow(l, &info);
    l->workspace_bytes += 1 << 16; /* the permutes need little more */
    l->workspace = t_workspace(l->workspace_bytes);
}
#define layer_build(...) T_CALL(layer_build, __VA_ARGS__)

/* Enqueues the whole layer; all operations share one workspace. Returns the first error status. */
static gmm_status layer_run(layer *l) {
#define STEP(call) do { const gmm_status s_ = (call); if (s_ != GMM_OK) return s_; } while (0)
#define WS l->workspace, l->workspace_bytes, T.stream
    gmm_permute combine = l->permute, back = l->permute, scatter = l->permute;
    combine.rows = &l->y.mat; /* no probs: the MLP has weighted the rows */
    combine.out = &l->out.mat;
    scatter.dout = &l->dout.mat;
    scatter.drows = &l->drows_y.mat;
    back.drows = &l->drows_x.mat;
    back.drow_probs = l->drow_probs;
    back.dx = &l->dx.mat;
    back.dprobs = l->dprobs;
    STEP(gmm_topk_fwd(T.ctx, &l->route, WS));
    STEP(gmm_permute_map(T.ctx, &l->permute, WS));
    STEP(gmm_permute_fwd(T.ctx, &l->dispatch, WS));
    STEP(gmm_mlp_fwd(T.ctx, &l->mlp, WS));
    STEP(gmm_unpermute_fwd(T.ctx, &combine, WS));
    STEP(gmm_unpermute_bwd(T.ctx, &scatter, WS));
    STEP(gmm_mlp_bwd(T.ctx, &l->mlp, WS));
    STEP(gmm_permute_bwd(T.ctx, &back, WS));
    STEP(gmm_topk_bwd(T.ctx, &l->route, WS));
    return GMM_OK;
#undef STEP
#undef WS
}

enum { OUTPUTS = 9 };
typedef struct bits { const void *at[OUTPUTS]; size_t bytes[OUTPUTS]; } bits;
static const char *const names[OUTPUTS] = { "out", "dx",  "dlogits",    "dw1",     "dw2",
                                            "db1", "db2", "drow_probs", "aux_loss" };
static bits layer_bits(const layer *l) {
    const t_mat *mats[7] = { &l->out, &l->dx, &l->dlogits, &l->dw1, &l->dw2, &l->db1, &l->db2 };
    bits b;
    for (int i = 0; i < 7; i++) {
        b.at[i] = t_mat_bits(mats[i]);
        b.bytes[i] = (size_t)(mats[i]->count * mats[i]->rows * mats[i]->cols * ref_bytes(mats[i]->dtype));
    }
    b.at[7] = t_get(l->drow_probs, b.bytes[7] = ROWS * sizeof(float));
    b.at[8] = t_get(l->route.aux_loss, b.bytes[8] = sizeof(float));
    return b;
}
/* Copies the outputs to `to` in device memory asynchronously; returns the number of bytes. */
static size_t layer_keep(const layer *l, unsigned char *to, bits *b) {
    const t_mat *mats[7] = { &l->out, &l->dx, &l->dlogits, &l->dw1, &l->dw2, &l->db1, &l->db2 };
    const size_t sizes[2] = { ROWS * sizeof(float), sizeof(float) };
    const void *const rest[2] = { l->drow_probs, l->route.aux_loss };
    size_t used = 0;
    for (int i = 0; i < OUTPUTS; i++) {
        const int64_t count = i < 7 && mats[i]->form != T_PACKED ? mats[i]->count : 1;
        const size_t all = i < 7 ? (size_t)(mats[i]->count * mats[i]->rows * mats[i]->cols * ref_bytes(mats[i]->dtype))
                                 : sizes[i - 7];
        b->at[i] = to + used;
        b->bytes[i] = all;
        for (int64_t g = 0; g < count && to; g++)
            device_copy(to + used + g * (int64_t)(all / (size_t)count), i < 7 ? mats[i]->table[g] : rest[i - 7],
                        all / (size_t)count);
        used += all;
    }
    return used;
}
/* Poisons all that the layer writes, also what one step leaves for another: a graph without a step would find it. */
static void layer_poison(const layer *l) {
    const t_mat *mats[11] = { &l->out, &l->dx,   &l->dlogits, &l->dw1,     &l->dw2,    &l->db1,
                              &l->db2, &l->rows, &l->y,       &l->drows_y, &l->drows_x };
    const struct { void *at; size_t bytes; } rest[] = {
        { l->drow_probs, ROWS * sizeof(float) },
        { l->row_probs, ROWS * sizeof(float) },
        { l->dprobs, SLOTS * sizeof(float) },
        { l->route.indices, SLOTS * sizeof(int32_t) },
        { l->route.probs, SLOTS * sizeof(float) },
        { l->route.counts, EXPERTS * sizeof(int32_t) },
        { l->route.aux_loss, sizeof(float) },
        { l->permute.row_of, SLOTS * sizeof(int32_t) },
        { l->permute.slot_of, ROWS * sizeof(int32_t) },
        { l->permute.sizes, EXPERTS * sizeof(int32_t) },
        { l->mlp.saved, l->mlp.saved_bytes },
        { l->workspace, l->workspace_bytes },
    };
    for (int i = 0; i < (int)T_COUNT(mats); i++) t_mat_poison(mats[i]);
    for (int i = 0; i < (int)T_COUNT(rest); i++) t_poison(rest[i].at, 0xFF, rest[i].bytes);
}
static void layer_same(const char *what, const bits *a, const bits *b) {
    for (int i = 0; i < OUTPUTS; i++) {
        char text[64];
        (void)snprintf(text, sizeof text, "%s: %s", what, names[i]);
        t_same(text, a->at[i], b->at[i], a->bytes[i]);
    }
}
#define layer_same(...) T_CALL(layer_same, __VA_ARGS__)

/* New logits: random, random with most experts empty, or all tokens in favour of one expert. */
static void layer_reroute(layer *l, int kind) {
    for (int64_t i = 0; i < TOKENS * EXPERTS; i++)
        l->logits.v[i] = (double)(float)(t_real() + (kind == 1 && i % EXPERTS < TOPK ? 8.0 : 0.0) +
                                         (kind == 2 && i % EXPERTS == 5 ? 8.0 : 0.0));
    t_mat_put(&l->logits);
    for (int64_t i = 0; i < TOKENS * l->hidden; i++) l->x.v[i] = ref_round(l->x.dtype, t_real());
    t_mat_put(&l->x);
}

static void wait_for(const char *what, const char *why) { T_CHECK(!why, "%s: %s", what, why); }
#define wait_for(...) T_CALL(wait_for, __VA_ARGS__)

/* Argument of the cases of a layer: dtype and recipe. */
static int layer_arg(gmm_dtype dtype, int recipe) { return (int)dtype | recipe << 8; }

/* One captured forward and backward of the layer, replayed with other routings, equals eager calls */
static void replay_layer(int arg) {
    enum { BATCH = 10 };
    const int rounds = (T.rounds + 9) / 10;
    layer l;
    bits at[BATCH][2];
    unsigned char *kept, *seen;
    size_t bytes;
    void *graph = NULL;
    layer_build(&l, (gmm_dtype)(arg & 255), (gmm_recipe_kind)(arg >> 8), 0);
    bytes = layer_keep(&l, NULL, &at[0][0]);
    kept = (unsigned char *)t_alloc(2 * BATCH * bytes);
    seen = (unsigned char *)t_host(2 * BATCH * bytes);
    wait_for("begin", device_begin_capture());
    {
        const gmm_status s = layer_run(&l);
        const char *const why = device_end_capture(&graph);
        T_CHECK(s == GMM_OK, "capture: %s", gmm_last_error(T.ctx));
        wait_for("end", why);
    }
    for (int i = 0; i < rounds; i++) {
        const int k = i % BATCH;
        layer_reroute(&l, i % 3);
        layer_poison(&l);
        T_CHECK(layer_run(&l) == GMM_OK, "%s", gmm_last_error(T.ctx));
        (void)layer_keep(&l, kept + (size_t)(2 * k) * bytes, &at[k][0]);
        layer_poison(&l);
        wait_for("replay", device_replay(graph));
        (void)layer_keep(&l, kept + (size_t)(2 * k + 1) * bytes, &at[k][1]);
        if (k + 1 < BATCH && i + 1 < rounds) continue;
        t_wait();
        t_check_guards();
        t_download(seen, kept, (size_t)(2 * (k + 1)) * bytes);
        for (int j = 0; j <= 2 * k + 1; j++)
            for (int o = 0; o < OUTPUTS; o++)
                at[j / 2][j % 2].at[o] = seen + ((const unsigned char *)at[j / 2][j % 2].at[o] - kept);
        for (int j = 0; j <= k; j++) layer_same("replay", &at[j][0], &at[j][1]);
    }
    device_graph_free(graph);
}

/* gmm_options.sm_limit changes no bit */
static void limits(int arg) {
    static const int32_t limit[] = { 0, 132, 100, 33, 1 };
    bits first, b;
    for (int i = 0; i < 5; i++) {
        layer l;
        t_reseed(56);
        layer_build(&l, (gmm_dtype)(arg & 255), (gmm_recipe_kind)(arg >> 8), limit[i]);
        layer_reroute(&l, 0);
        T_OK(layer_run(&l));
        b = layer_bits(&l);
        if (i == 0) first = b;
        else layer_same("sm_limit", &first, &b);
    }
}

/* SMs beyond the limit stay free. While the product runs, another stream launches blocks, several times in a
   row, which all end before the product does. Each block takes the whole shared memory of an SM, so it cannot share one
   with a block of the product. */
enum { FREED_ROWS = 24576, FREED_WIDE = 4096 };
static void freed(int arg) {
    if (device_emulated()) t_skip("the emulator loads no PTX");
    enum { ROWS_ = FREED_ROWS, WIDE = FREED_WIDE, TURNS = 8 };
    const gmm_op op = (gmm_op)(GMM_OP_LINEAR_FWD + arg);
    const int64_t size = ROWS_;
    const int processors = device_processors(), beside = processors / 4 / 2 * 2;
    const gmm_mat a = gmm_mat_packed(GMM_BF16, t_sparse((size_t)ROWS_ * WIDE * 2));
    const gmm_mat b = gmm_mat_packed(GMM_BF16, t_sparse((size_t)ROWS_ * WIDE * 2));
    const gmm_mat w = gmm_mat_packed(GMM_BF16, t_sparse((size_t)WIDE * WIDE * 2));
    device_stamp *stamps = (device_stamp *)t_alloc((size_t)(2 + TURNS * beside) * sizeof *stamps);
    const device_stamp *seen, *before, *after;
    gmm_groups groups = GMM_ZERO;
    gmm_options options = GMM_ZERO;
    gmm_grad grad = GMM_ZERO;
    gmm_linear d = GMM_ZERO;
    gmm_info info = GMM_ZERO;
    gmm_runtime rt = GMM_ZERO;
    gmm_stream other;
    gmm_event began;
    gmm_status status[6];
    const char *why[2 + TURNS];
    void *ws;
    groups.count = 1;
    groups.capacity = ROWS_;
    groups.splits = t_in(&size, sizeof size);
    groups.dtype = GMM_I64;
    options.sm_limit = processors - beside;
    grad.mat = &w;
    d.groups = &groups;
    d.options = &options;
    d.in_features = d.out_features = WIDE;
    d.x = &a;
    d.w = &w;
    d.y = &b;
    d.dy = arg == 2 ? &b : &a;
    d.dx = &b;
    d.dw = &grad;
    T_OK(gmm_linear_query(T.ctx, op, &d, &info));
    ws = t_workspace(info.workspace_bytes);
    T_OK(gmm_runtime_of(T.ctx, &rt));
    T_OK(t_linear_functions[arg](T.ctx, &d, ws, info.workspace_bytes, T.stream)); /* loads the code */
    status[0] = rt.stream_create(rt.self, 0, &other);
    status[1] = rt.event_create(rt.self, &began);
    why[0] = device_stamps(other, stamps, 1, 0, 0);
    t_wait();
    why[0] = device_stamps(T.stream, stamps, 1, 0, 0);
    status[2] = rt.event_record(rt.self, began, T.stream, 0);
    status[3] = t_linear_functions[arg](T.ctx, &d, ws, info.workspace_bytes, T.stream);
    why[1] = device_stamps(T.stream, stamps + 1, 1, 0, 0);
    status[4] = rt.stream_wait(rt.self, other, began, 0);
    for (int t = 0; t < TURNS; t++) /* the first round only lets the product begin */
        why[2 + t] = device_stamps(other, stamps + 2 + t * beside, t ? beside : 1, t != 0, t ? 10000 : 100000);
    t_wait();
    status[5] = rt.stream_sync(rt.self, other);
    for (int i = 0; i < 6; i++) T_CHECK(status[i] == GMM_OK, "call %d: %s", i, gmm_last_error(T.ctx));
    for (int i = 0; i < 2 + TURNS; i++) wait_for("stamps", why[i]);
    T_CHECK(rt.event_destroy(rt.self, began) == GMM_OK && rt.stream_destroy(rt.self, other) == GMM_OK, "destroy");
    seen = (const device_stamp *)t_get(stamps, (size_t)(2 + TURNS * beside) * sizeof *stamps);
    before = seen;
    after = seen + 1;
    for (int t = 1; t < TURNS; t++) {
        unsigned char taken[1024] = { 0 };
        for (int i = 0; i < beside; i++) {
            const device_stamp *s = seen + 2 + t * beside + i;
            T_CHECK(s->begin > before->end && s->end < after->begin,
                    "turn %d, block %d: from %lld to %lld ns of a product that took %lld ns", t, i,
                    (long long)(s->begin - before->end), (long long)(s->end - before->end),
                    (long long)(after->begin - before->end));
            T_CHECK(s->processor < sizeof taken && !taken[s->processor]++, "two blocks on multiprocessor %d",
                    (int)s->processor);
        }
    }
}

/* Linear operations that are captured once and replayed with `count` splits of `groups` sizes each: the bits of eager
   calls, and the fault bits in `faults`. */
typedef struct replayed {
    gmm_dtype dtype;
    int64_t groups, capacity, K, N;
    t_form w;
    const int64_t *splits;
    const uint32_t *faults;
    int count;
    int gathers;    /* rows of x and dy, by an index that each replay changes */
} replayed;

/* An index of `count` rows of a matrix of as many, with negative entries. */
static void replay_index(int32_t *device, int64_t count, int step) {
    int32_t *at = (int32_t *)t_host((size_t)count * sizeof *at);
    for (int64_t i = 0; i < count; i++) at[i] = (i + step) % 5 == 0 ? -1 : (int32_t)(2 * ((i * 7 + 31 * step) % count));
    t_upload(device, at, (size_t)count * sizeof *at);
}
static void replay_splits(const replayed *p) {
    const gmm_dtype dtype = p->dtype;
    const int64_t G = p->groups, capacity = p->capacity, K = p->K, N = p->N;
    const char *why;
    const size_t split_bytes = (size_t)G * sizeof *p->splits;
    const t_mat x = t_mat_in(dtype, 1, capacity, K, T_REALS), dy = t_mat_in(dtype, 1, capacity, N, T_REALS);
    const t_mat w = t_mat_make(dtype, G, N, K, 0, 0, p->w, T_REALS);
    t_mat y = t_mat_out(dtype, 1, capacity, N), dx = t_mat_out(dtype, 1, capacity, K), dw = t_mat_out(GMM_F32, G, N, K);
    t_mat db = t_mat_out(GMM_F32, G, 1, N);
    t_mat *const outs[4] = { &y, &dx, &dw, &db };
    gmm_groups groups = GMM_ZERO;
    gmm_grad gw = GMM_ZERO, gb = GMM_ZERO;
    gmm_linear d = GMM_ZERO;
    gmm_status s = GMM_OK;
    size_t bytes = 0;
    void *ws, *graph = NULL;
    uint32_t *fault = (uint32_t *)t_alloc(4);
    int32_t *index = (int32_t *)t_alloc((size_t)capacity * 4);
    groups.count = (int32_t)G;
    groups.capacity = capacity;
    groups.splits = t_alloc(split_bytes);
    groups.dtype = GMM_I64;
    groups.tail = GMM_TAIL_ZERO;
    groups.fault = fault;
    gw.mat = &dw.mat;
    gb.mat = &db.mat;
    d.groups = &groups;
    d.in_features = K;
    d.out_features = N;
    d.x = &x.mat;
    d.w = &w.mat;
    d.y = &y.mat;
    d.dy = &dy.mat;
    d.dx = &dx.mat;
    d.dw = &gw;
    d.db = &gb;
    if (p->gathers) {
        d.x_index = d.dy_index = index;
        d.index_rows = capacity;
        d.index_div = 2;
    }
    for (int op = 0; op < 4; op++) {
        gmm_info info = GMM_ZERO;
        T_OK(gmm_linear_query(T.ctx, (gmm_op)(GMM_OP_LINEAR_FWD + op), &d, &info));
        if (info.workspace_bytes > bytes) bytes = info.workspace_bytes;
    }
    ws = t_workspace(bytes);
    wait_for("begin", device_begin_capture());
    for (int op = 0; op < 4 && s == GMM_OK; op++) s = t_linear_functions[op](T.ctx, &d, ws, bytes, T.stream);
    why = device_end_capture(&graph);
    T_CHECK(s == GMM_OK, "capture: %s", gmm_last_error(T.ctx));
    wait_for("end", why);
    for (int i = 0; i < p->count; i++) {
        void *eager[4];
        uint32_t seen, zero = 0;
        for (int pass = 0; pass < 2; pass++) {
            t_upload((void *)(uintptr_t)groups.splits, p->splits + i * G, split_bytes);
            replay_index(index, capacity, i);
            t_upload(fault, &zero, sizeof zero);
            t_poison(ws, 0xFF, bytes);
            for (int k = 0; k < 4; k++)
                t_poison(outs[k]->data, 0xFF, (size_t)(outs[k]->count * outs[k]->rows * outs[k]->cols *
                                                       ref_bytes(outs[k]->dtype)));
            if (pass) wait_for("replay", device_replay(graph));
            else
                for (int op = 0; op < 4; op++) T_OK(t_linear_functions[op](T.ctx, &d, ws, bytes, T.stream));
            t_download(&seen, fault, sizeof seen);
            T_CHECK(seen == p->faults[i], "split %d: fault bits %x, want %x", i, seen, p->faults[i]);
            for (int k = 0; k < 4; k++) {
                void *b = t_mat_bits(outs[k]);
                if (pass)
                    t_same("replay", eager[k], b, (size_t)(outs[k]->count * outs[k]->rows * outs[k]->cols *
                                                           ref_bytes(outs[k]->dtype)));
                else eager[k] = b;
            }
        }
    }
    device_graph_free(graph);
}
#define replay_splits(...) T_CALL(replay_splits, __VA_ARGS__)

/* Splits from all empty to full, faulty ones between valid ones. */
static void replay_linear(int arg) {
    static const int64_t splits[][5] = {
        { 10, 20, 30, 40, 50 }, { 0, 0, 0, 0, 0 }, { 300, 0, 0, 0, 0 }, { 0, 0, 0, 0, 300 }, { 129, 1, 0, 127, 43 },
        { -5, 20, 30, 0, 7 }, { 100, 100, 100, 100, 100 }, { 60, 60, 60, 60, 60 }, { 1, 1, 1, 1, 1 }
    };
    static const uint32_t faults[] = { 0, 0, 0, 0, 0, GMM_FAULT_NEGATIVE, GMM_FAULT_CAPACITY, 0, 0 };
    const replayed p = { (gmm_dtype)arg, 5, 300, 72, 56, T_TABLE_HOST, splits[0], faults, (int)T_COUNT(splits), 0 };
    replayed gathers = p;
    replay_splits(&p);
    gathers.gathers = 1;
    gathers.count = 3;
    replay_splits(&gathers);
}

/* Any shape, replayed with splits that are drawn; or a whole layer with routings that are drawn. */
static void drawn(int arg) {
    enum { SPLITS = 6 };
    static const gmm_dtype dtypes[] = { GMM_F32, GMM_F16, GMM_BF16 };
    static const uint32_t faults[SPLITS] = { 0 };
    replayed p = { dtypes[t_int(0, 2)], t_draw_size(8, 40), t_draw_size(300, 1500), 8 * t_draw_size(20, 80),
                   8 * t_draw_size(20, 80), (t_form)t_int(0, 2), NULL, faults, SPLITS, (int)t_int(0, 1) };
    int64_t *splits;
    (void)arg;
    if (t_int(0, 2) == 0) {
        const int recipe = (int)t_int(GMM_RECIPE_NONE, GMM_RECIPE_NVFP4);
        replay_layer(layer_arg(recipe ? GMM_BF16 : p.dtype, recipe));
        return;
    }
    splits = (int64_t *)t_host((size_t)(SPLITS * p.groups) * sizeof *splits);
    for (int i = 0; i < SPLITS; i++)
        memcpy(splits + i * p.groups, t_draw_sizes(p.groups, t_int(0, p.capacity)), (size_t)p.groups * sizeof *splits);
    p.splits = splits;
    replay_splits(&p);
}

/* Host sizes cannot be captured; the capture stays valid */
static void host_sizes(int arg) {
    enum { G = 3, K = 16, N = 24 };
    const int32_t sizes[G] = { 4, 0, 9 };
    const t_mat x = t_mat_in(GMM_BF16, 1, 16, K, T_INTS), w = t_mat_in(GMM_BF16, G, N, K, T_INTS);
    t_mat y = t_mat_out(GMM_BF16, 1, 16, N), y2 = t_mat_out(GMM_BF16, 1, 16, N);
    gmm_groups host = GMM_ZERO, device;
    gmm_linear d = GMM_ZERO;
    gmm_info info = GMM_ZERO;
    void *ws, *graph = NULL;
    gmm_status refused, served;
    char text[512];
    (void)arg;
    host.count = G;
    host.capacity = 16;
    host.splits = sizes;
    host.dtype = GMM_I32;
    host.on_host = 1;
    device = host;
    device.on_host = 0;
    device.splits = t_in(sizes, sizeof sizes);
    d.groups = &host;
    d.in_features = K;
    d.out_features = N;
    d.x = &x.mat;
    d.w = &w.mat;
    d.y = &y.mat;
    T_OK(gmm_linear_query(T.ctx, GMM_OP_LINEAR_FWD, &d, &info));
    ws = t_workspace(info.workspace_bytes);
    T_OK(gmm_linear_fwd(T.ctx, &d, ws, info.workspace_bytes, T.stream));
    d.y = &y2.mat;
    wait_for("begin", device_begin_capture());
    refused = gmm_linear_fwd(T.ctx, &d, ws, info.workspace_bytes, T.stream);
    (void)snprintf(text, sizeof text, "%s", gmm_last_error(T.ctx));
    d.groups = &device;
    served = gmm_linear_fwd(T.ctx, &d, ws, info.workspace_bytes, T.stream);
    wait_for("end", device_end_capture(&graph));
    T_CHECK(refused == GMM_E_CAPTURE && strstr(text, "gmm_linear_fwd") && strstr(text, "groups"), "%s: %s",
            gmm_status_name(refused), text);
    T_CHECK(served == GMM_OK, "%s", gmm_last_error(T.ctx));
    wait_for("replay", device_replay(graph));
    t_same("y", t_mat_bits(&y), t_mat_bits(&y2), 13 * N * 2);
    device_graph_free(graph);
}

/* A context with the default engine, made and destroyed on a thread that captures nothing. */
static void *other_context(void *error) {
    gmm_context *ctx = NULL;
    gmm_config config = GMM_ZERO;
    config.space = GMM_SPACE_CUDA;
    (void)gmm_create(&ctx, &config, (gmm_error *)error);
    gmm_destroy(ctx);
    return NULL;
}
static void contexts_of_other_threads(int arg) {
    enum { CONTEXTS = 3, BYTES = 1000 };
    unsigned char *const to = (unsigned char *)t_alloc(BYTES);
    gmm_error error = GMM_ZERO;
    gmm_runtime rt = GMM_ZERO;
    gmm_status s = GMM_OK;
    pthread_t thread;
    void *graph = NULL;
    (void)arg;
    T_OK(gmm_runtime_of(T.ctx, &rt));
    wait_for("begin", device_begin_capture());
    for (int i = 0; i < CONTEXTS && s == GMM_OK; i++) {
        s = rt.fill(rt.self, to, 7, BYTES, T.stream);
        if (pthread_create(&thread, NULL, other_context, &error)) abort();
        (void)pthread_join(thread, NULL);
    }
    wait_for("end", device_end_capture(&graph));
    T_CHECK(s == GMM_OK, "%s", gmm_last_error(T.ctx));
    T_CHECK(!error.text[0], "%s", error.text);
    device_graph_free(graph);
}

void tests_graph(void) {
    static const gmm_dtype dtypes[] = { GMM_F32, GMM_F16, GMM_BF16 };
    t_add_gpu(drawn, 0, "graph drawn at random");
    t_random(8);
    for (int i = 0; i < T_COUNT(dtypes); i++) {
        const char *name = gmm_dtype_name(dtypes[i]);
        t_add_gpu(replay_linear, (int)dtypes[i], "graph of linear operations, other splits %s", name);
        t_add_gpu(replay_layer, layer_arg(dtypes[i], GMM_RECIPE_NONE), "graph of a whole layer, other routings %s",
                  name);
        t_add_gpu(limits, layer_arg(dtypes[i], GMM_RECIPE_NONE), "sm_limit leaves the bits of a layer %s", name);
    }
    for (int i = 0; i < 3; i++) {
        t_add_gpu(freed, i, "sm_limit frees multiprocessors %s", gmm_op_name((gmm_op)(GMM_OP_LINEAR_FWD + i)));
        t_needs((size_t)(2 * FREED_ROWS + FREED_WIDE) * FREED_WIDE * 2);
    }
    for (int k = GMM_RECIPE_FP8_DELAYED; k <= GMM_RECIPE_NVFP4; k++) {
        const char *name = ref_recipe_name((gmm_recipe_kind)k);
        t_add_gpu(replay_layer, layer_arg(GMM_BF16, k), "graph of a whole layer, other routings, recipe %s", name);
        t_add_gpu(limits, layer_arg(GMM_BF16, k), "sm_limit leaves the bits of a layer, recipe %s", name);
    }
    t_add_gpu(host_sizes, 0, "graph of host sizes while capturing");
    t_add_gpu(contexts_of_other_threads, 0, "graph while another thread makes and destroys contexts");
}
#else
void tests_graph(void) {} /* graphs need CUDA */
#endif
