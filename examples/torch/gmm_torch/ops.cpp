/* The operators of torch.ops.gmm on CPU and CUDA tensors. autograd.cpp differentiates linear, mlp, topk, permute and
   unpermute; fake.py has the shapes. The operators of an MLP are those of a layer too, where they get indices. */
#include <torch/library.h>

#include "call.h"

#include <map>

namespace gmm_torch {

/* ---- Grouped linear */

static gmm_linear linear_of(const gmm_groups &groups, int64_t in, int64_t out) {
    gmm_linear lin = GMM_ZERO;
    lin.groups = &groups;
    lin.in_features = in;
    lin.out_features = out;
    return lin;
}

static void check_weight(const Tensor &w, const char *name, const Tensor &x, int axis) {
    TORCH_CHECK(w.dim() == 3 && x.dim() == 2, "gmm: ", name, " must be [experts, out, in], its rows [rows, features]");
    TORCH_CHECK(w.size(axis) == x.size(1), "gmm: ", name, " ", w.sizes(), " does not fit rows of ", x.size(1),
                " features");
}

static void check_splits(const Tensor &splits, const Tensor &w, const char *name) {
    TORCH_CHECK(w.size(0) == splits.size(0), "gmm: ", name, " has ", w.size(0), " experts, splits ", splits.size(0));
}

static Tensor linear_fwd(const Tensor &x, const Tensor &w, const Tensor &splits, const Maybe &bias) {
    check_weight(w, "w", x, 2);
    check_splits(splits, w, "w");
    const Call call(x);
    const gmm_groups groups = call.groups(splits, x.size(0));
    Tensor y = at::empty({x.size(0), w.size(1)}, x.options());
    const Mat mx = call.mat(x, "x"), mw = call.mat(w, "w"), mb = call.bias(value(bias), "bias", w), my = mat_of(y, "y");
    gmm_linear lin = linear_of(groups, w.size(2), w.size(1));
    lin.x = mx.get(), lin.w = mw.get(), lin.bias = mb.get(), lin.y = my.get();
    call.run(GMM_OP_LINEAR_FWD, gmm_linear_query, gmm_linear_fwd, lin);
    return y;
}

static Tensor linear(const Tensor &x, const Tensor &w, const Tensor &splits, const Maybe &bias, const Maybe &) {
    return linear_fwd(x, w, splits, bias);
}

static Tensor linear_dgrad(const Tensor &dy, const Tensor &w, const Tensor &splits) {
    check_weight(w, "w", dy, 1);
    check_splits(splits, w, "w");
    const Call call(dy);
    const gmm_groups groups = call.groups(splits, dy.size(0));
    Tensor dx = at::empty({dy.size(0), w.size(2)}, dy.options());
    const Mat mdy = call.mat(dy, "dy"), mw = call.mat(w, "w"), mdx = mat_of(dx, "dx");
    gmm_linear lin = linear_of(groups, w.size(2), w.size(1));
    lin.dy = mdy.get(), lin.w = mw.get(), lin.dx = mdx.get();
    call.run(GMM_OP_LINEAR_DGRAD, gmm_linear_query, gmm_linear_dgrad, lin);
    return dx;
}

/* The gradient of a weight or a bias: where it is stored, or added to. It must be dense: a copy of it would lose the
   result. */
struct Gradient {
    const Mat mat;
    gmm_grad grad = GMM_ZERO;
    Gradient(const Call &call, const Tensor &t, const char *name, bool add = false) : mat(call.mat(t, name)) {
        TORCH_CHECK(!t.defined() || !t.numel() || mat.tensor.is_same(t), "gmm: ", name, " must have adjacent elements");
        grad.mat = mat.get(), grad.main_grad = add;
    }
    Gradient(const Gradient &) = delete;
    const gmm_grad *get() const { return mat.get() ? &grad : nullptr; }
};
static void wgrad_into(Tensor dw, const Tensor &dy, const Tensor &x, const Tensor &splits, bool add) {
    TORCH_CHECK(dw.dim() == 3 && dy.dim() == 2 && x.dim() == 2 && dw.size(0) == splits.size(0) &&
                dw.size(1) == dy.size(1) && dw.size(2) == x.size(1) && dy.size(0) == x.size(0),
                "gmm: dw ", dw.sizes(), ", dy ", dy.sizes(), " and x ", x.sizes(), " do not fit");
    const Call call(dy);
    const gmm_groups groups = call.groups(splits, dy.size(0));
    const Mat mdy = call.mat(dy, "dy"), mx = call.mat(x, "x");
    const Gradient grad(call, dw, "dw", add);
    gmm_linear lin = linear_of(groups, x.size(1), dy.size(1));
    lin.dy = mdy.get(), lin.x = mx.get(), lin.dw = grad.get();
    call.run(GMM_OP_LINEAR_WGRAD, gmm_linear_query, gmm_linear_wgrad, lin);
}

static Tensor linear_wgrad(const Tensor &dy, const Tensor &x, const Tensor &splits) {
    Tensor dw = at::empty({splits.size(0), dy.size(1), x.size(1)}, x.options());
    wgrad_into(dw, dy, x, splits, false);
    return dw;
}

static void linear_wgrad_add(Tensor dw, const Tensor &dy, const Tensor &x, const Tensor &splits) {
    wgrad_into(dw, dy, x, splits, true);
}

static Tensor linear_bgrad(const Tensor &dy, const Tensor &splits) {
    const Call call(dy);
    const gmm_groups groups = call.groups(splits, dy.size(0));
    Tensor db = at::empty({splits.size(0), dy.size(1)}, dy.options());
    const Mat mdy = call.mat(dy, "dy");
    const Gradient grad(call, as_rows(db), "db");
    gmm_linear lin = linear_of(groups, 1, dy.size(1));
    lin.dy = mdy.get(), lin.db = grad.get();
    call.run(GMM_OP_LINEAR_BGRAD, gmm_linear_query, gmm_linear_bgrad, lin);
    return db;
}

/* ---- Expert MLP */

/* The number of a name in a table; an unknown one is refused with the names there are, but for `unserved`. */
static int lookup(const std::vector<std::string> &names, c10::string_view name, const char *what,
                  const char *unserved = "") {
    std::string all;
    for (size_t i = 0; i < names.size(); i++) {
        if (names[i] == name) return (int)i;
        if (names[i] != unserved) all += (all.empty() ? "" : ", ") + names[i];
    }
    TORCH_CHECK(false, "gmm: ", what, " '", std::string(name), "' must be one of ", all);
}

static gmm_act act_of(c10::string_view name) {
    static const std::vector<std::string> names = [] {
        std::vector<std::string> list;
#define GMM__X(kind, value, text, ...) list.push_back(#text);
        GMM_ACT_LIST(GMM__X)
#undef GMM__X
        list.push_back("gpt_oss");
        return list;
    }();
    const int i = lookup(names, name, "act", "none");
    gmm_act act = GMM_ZERO;
    if (names[(size_t)i] == "gpt_oss") return gmm_act_of(GMM_ACT_PRESET_GPT_OSS);
    act.kind = (gmm_act_kind)i;
    return act;
}

static const std::vector<std::string> recipes = {"none", "fp8_delayed", "fp8_current", "fp8_block", "mxfp8", "nvfp4"};
/* In the order of gmm_save; the last one is GMM_SAVE_PREACT with gmm_moe.save_rows. */
static const std::vector<std::string> saves = {"preact",      "preact_and_act", "nothing",        "quantized",
                                               "preact_e4m3", "quantized_e4m3", "preact_and_rows"};

/* What mlp's operators have in common: arguments in the order of their schemas. `routing` says which experts the rows
   of x belong to: splits [experts], where they lie by expert, or indices [rows, topk] of each row's experts, whose
   outputs are added. */
struct MlpArguments {
    Tensor x, w1, w2, routing, probs, b1, b2;
    c10::string_view act, recipe, save;
};

/* The descriptor of an MLP over these tensors: of the layer around it, too, where `routing` has indices. */
struct Mlp {
    gmm_mlp_config config = GMM_ZERO;
    gmm_recipe recipe = GMM_ZERO;
    gmm_mlp_quant quant = GMM_ZERO;
    gmm_groups groups = GMM_ZERO;
    gmm_mlp mlp = GMM_ZERO;
    gmm_moe layer = GMM_ZERO;
    Mat x, w1, w2, b1, b2;
    Tensor probs, indices;

    void configure(int64_t hidden, int64_t ffn, int64_t out, c10::string_view act, c10::string_view recipe_name,
                   c10::string_view save, bool prob, bool bias1, bool bias2) {
        config.hidden = hidden, config.ffn = ffn, config.hidden_out = out;
        config.act = act_of(act);
        const int policy = lookup(saves, save, "save");
        layer.save_rows = policy == (int)saves.size() - 1;
        config.save = layer.save_rows ? GMM_SAVE_PREACT : (gmm_save)policy;
        config.recipe = (gmm_recipe_kind)lookup(recipes, recipe_name, "recipe", "fp8_delayed");
        TORCH_CHECK(config.recipe != GMM_RECIPE_FP8_DELAYED,
                    "gmm: recipe 'fp8_delayed' keeps scales between steps, which these operators do not: use "
                    "'fp8_current' or 'fp8_block'");
        config.prob = prob, config.bias1 = bias1, config.bias2 = bias2, config.prob_on_bias2 = prob && bias2;
        recipe = gmm_recipe_of(config.recipe);
        quant.recipe = &recipe;
        mlp.config = &config, mlp.groups = &groups, mlp.quant = config.recipe ? &quant : nullptr;
    }

    Mlp() = default;
    void route(int64_t tokens, int64_t topk, int64_t experts) {
        layer.tokens = tokens, layer.topk = (int32_t)topk, layer.experts = (int32_t)experts;
    }

    Mlp(const Call &call, const MlpArguments &a, bool backward = false) {
        const bool routed = a.routing.dim() == 2;
        check_weight(a.w1, "w1", a.x, 2);
        const gmm_act act = act_of(a.act);
        const int64_t ffn = a.w1.size(1) / (gmm_act_gated(act.kind) ? 2 : 1);
        TORCH_CHECK(a.w2.dim() == 3 && a.w2.size(0) == a.w1.size(0) && a.w2.size(2) == ffn, "gmm: w2 ", a.w2.sizes(),
                    " does not fit w1 ", a.w1.sizes(), " and activation ", std::string(a.act));
        TORCH_CHECK(!routed || (a.routing.size(0) == a.x.size(0) && a.routing.size(1) > 0), "gmm: indices ",
                    a.routing.sizes(), " must be [rows of x, topk], x has ", a.x.size(0), " rows");
        const int64_t weighted = routed ? a.routing.numel() : a.x.size(0);
        TORCH_CHECK(!a.probs.defined() || a.probs.numel() == weighted, "gmm: probs has ", a.probs.sizes(),
                    " values, ", routed ? "indices " : "x ", weighted, routed ? "" : " rows");
        configure(a.x.size(1), ffn, a.w2.size(1), a.act, a.recipe, a.save, a.probs.defined(), a.b1.defined(),
                  a.b2.defined());
        if (routed) {
            indices = call.vector(a.routing, "indices", at::kInt);
            route(a.x.size(0), a.routing.size(1), a.w1.size(0));
            layer.indices = ints(indices), layer.fault = call.fault();
        } else {
            TORCH_CHECK(!layer.save_rows, "gmm: save 'preact_and_rows' keeps the rows that moe permutes: not of mlp");
            check_splits(a.routing, a.w1, "w1");
            groups = call.groups(a.routing, a.x.size(0));
        }
        if (!backward || !saves_x(a.save)) x = call.mat(a.x, "x");
        w1 = call.mat(a.w1, "w1"), w2 = call.mat(a.w2, "w2");
        b1 = call.bias(a.b1, "b1", a.w1), b2 = call.bias(a.b2, "b2", a.w2);
        probs = call.vector(a.probs, "probs", at::kFloat);
        mlp.x = x.get(), mlp.w1 = w1.get(), mlp.w2 = w2.get(), mlp.b1 = b1.get(), mlp.b2 = b2.get();
        mlp.prob = floats(probs);
    }
    Mlp(const Mlp &) = delete;

    /* The layer's descriptor, in which what an MLP has for rows is there for tokens, and that of its experts. */
    gmm_moe layer_over(gmm_mlp *experts) const {
        gmm_moe l = layer;
        *experts = mlp;
        l.mlp = experts;
        l.x = mlp.x, l.out = mlp.y, l.dout = mlp.dy, l.dx = mlp.dx, l.probs = mlp.prob, l.dprobs = mlp.dprob;
        l.saved = mlp.saved, l.saved_bytes = mlp.saved_bytes;
        l.deferred = mlp.deferred, l.deferred_bytes = mlp.deferred_bytes;
        experts->x = experts->y = experts->dy = experts->dx = nullptr;
        experts->groups = nullptr, experts->prob = nullptr, experts->dprob = nullptr;
        experts->saved = experts->deferred = nullptr, experts->saved_bytes = experts->deferred_bytes = 0;
        return l;
    }
    gmm_info query(const Call &call, gmm_op op, gmm_op layer_op) const {
        gmm_info info = GMM_ZERO;
        gmm_mlp experts;
        const gmm_moe l = layer_over(&experts);
        call.check(layer.topk ? gmm_moe_query(call.ctx, layer_op, &l, &info)
                              : gmm_mlp_query(call.ctx, op, &mlp, &info));
        return info;
    }
    void forward(const Call &call) const {
        gmm_mlp experts;
        if (layer.topk) call.run(GMM_OP_MOE_FWD, gmm_moe_query, gmm_moe_fwd, layer_over(&experts));
        else call.run(GMM_OP_MLP_FWD, gmm_mlp_query, gmm_mlp_fwd, mlp);
    }
    void backward(const Call &call) const {
        gmm_mlp experts;
        if (layer.topk) call.run(GMM_OP_MOE_BWD, gmm_moe_query, gmm_moe_bwd, layer_over(&experts));
        else call.run(GMM_OP_MLP_BWD, gmm_mlp_query, gmm_mlp_bwd, mlp);
    }
};

/* Memory of a tensor that outlives the call, aligned to 256 bytes. On the CPU it is a part of what torch allocates. */
static Tensor aligned(size_t bytes, at::Device device) {
    const int64_t n = (int64_t)bytes;
    const at::TensorOptions options = at::TensorOptions(at::kByte).device(device);
    if (device.is_cuda()) return at::empty({n}, options);
    const Buffer memory(n, device);
    return at::from_blob(memory.data, {n}, [memory](void *) {}, options);
}

static std::tuple<Tensor, Tensor> mlp_fwd(const Tensor &x, const Tensor &w1, const Tensor &w2, const Tensor &routing,
                                          const Maybe &probs, const Maybe &b1, const Maybe &b2, c10::string_view act,
                                          c10::string_view recipe, c10::string_view save, bool training) {
    const Call call(x);
    Mlp m(call, {x, w1, w2, routing, value(probs), value(b1), value(b2), act, recipe, save});
    Tensor y = at::empty({x.size(0), w2.size(1)}, x.options());
    const Mat my = mat_of(y, "y");
    m.mlp.y = my.get();
    const size_t bytes = training ? m.query(call, GMM_OP_MLP_FWD, GMM_OP_MOE_FWD).saved_bytes : 0;
    Tensor saved = aligned(bytes, call.device);
    if (training) m.mlp.saved = saved.data_ptr(), m.mlp.saved_bytes = bytes;
    m.forward(call);
    return {y, saved};
}

static Tensor mlp(const Tensor &x, const Tensor &w1, const Tensor &w2, const Tensor &routing, const Maybe &probs,
                  const Maybe &b1, const Maybe &b2, c10::string_view act, c10::string_view recipe,
                  c10::string_view save, const Maybe &, const Maybe &, const Maybe &) {
    return std::get<0>(mlp_fwd(x, w1, w2, routing, probs, b1, b2, act, recipe, save, false));
}

/* The bytes that mlp_fwd saves, for fake tensors: topk is 0 where it takes splits. Every engine saves the same. */
static int64_t mlp_saved_bytes(int64_t rows, int64_t topk, int64_t experts, int64_t hidden, int64_t ffn, int64_t out,
                               at::ScalarType dtype, bool probs, bool b1, bool b2, c10::string_view act,
                               c10::string_view recipe, c10::string_view save) {
    const Tensor none = at::empty({1, 1}, at::TensorOptions(dtype));
    const Call call(none);
    Mlp m;
    gmm_mat any = gmm_mat_packed(dtype_of(none, "x"), nullptr);
    m.configure(hidden, ffn, out, act, recipe, save, probs, b1, b2);
    if (topk) m.route(rows, topk, experts);
    m.groups.count = (int32_t)experts, m.groups.capacity = rows, m.groups.dtype = GMM_I32;
    m.mlp.x = m.mlp.w1 = m.mlp.w2 = m.mlp.y = &any;
    m.mlp.b1 = b1 ? &any : nullptr, m.mlp.b2 = b2 ? &any : nullptr;
    return (int64_t)m.query(call, GMM_OP_MLP_FWD, GMM_OP_MOE_FWD).saved_bytes;
}

/* The gradients of x, w1 and w2 that are wanted. Those of weights are stored in `dw1` and `dw2`, or added to them;
   where these are undefined, they are stored in new tensors. delay: mlp_wgrad computes them later. overwrite: what
   forward saved may be overwritten. */
struct MlpWants {
    bool dx, w1, w2;
    Tensor dw1, dw2;
    bool add, delay, overwrite;
};

/* Results of backward. `entry` says how mlp_wgrad will compute delayed weight gradients; what it reads lives in
   `deferred`, and in the caller's x, dy, saved and random. */
struct MlpGradients {
    Tensor dx, dw1, dw2, dprobs, db1, db2, deferred, entry;
    void place_dx(const Tensor &x) { dx = at::empty(x.sizes(), x.options()); }
    void place_dw1(const Tensor &w) { if (!dw1.defined()) dw1 = at::empty(w.sizes(), w.options()); }
    void place_dw2(const Tensor &w) { if (!dw2.defined()) dw2 = at::empty(w.sizes(), w.options()); }
};

/* Backward of an MLP without a recipe, or of the layer around it, in the steps of gmm_mlp_bwd and gmm_moe_bwd, with
   their bits. One call needs memory of all gradients when it begins; steps free FC2's operands before FC1's gradients
   are allocated. */
class MlpSteps {
public:
    MlpSteps(const Call &call, const Mlp &m, const MlpArguments &a, const MlpWants &wants, MlpGradients &out)
        : call(call), m(m), a(a), wants(wants), out(out), routed(m.layer.topk) {}

    void run(const Mat &dy, const Tensor &saved) {
        if (routed) find_layer(saved);
        else find_mlp(saved);
        Mat own_dz;
        if (!wants.overwrite) own_dz = rows_of(a.w1.size(1));
        dz = wants.overwrite ? z : own_dz.mat;
        drow_probs = out.dprobs;
        if (routed && drow_probs.defined()) drow_probs = at::empty({rows}, drow_probs.options());
        fc2(dy);
        fc1();
    }

private:
    const Call &call;
    const Mlp &m;
    const MlpArguments &a;
    const MlpWants &wants;
    MlpGradients &out;
    const bool routed;
    int64_t rows = 0;
    gmm_groups groups = GMM_ZERO;
    gmm_permute map = GMM_ZERO;          /* of a layer */
    gmm_mat z = GMM_ZERO, dz = GMM_ZERO; /* FC1's output and its gradient */
    gmm_mat saved_rows = GMM_ZERO;       /* permuted rows of x; no address: they are not saved */
    const float *prob = nullptr;         /* of rows */
    Tensor drow_probs;                   /* the gradient of prob */

    Mat rows_of(int64_t cols) const { return mat_of(at::empty({rows, cols}, a.x.options()), "rows"); }

    using Parts = std::map<std::string, void *>;
    template <class Layout> static Parts parts_of(const Layout &layout, const Tensor &saved) {
        TORCH_CHECK(saved.numel() >= layout.bytes, "gmm: saved has ", saved.numel(), " bytes, not ", layout.bytes);
        Parts parts;
        for (int i = 0; i < layout.count; i++)
            parts[layout.part[i].name] = address<char>(saved) + layout.part[i].offset;
        return parts;
    }
    void find_mlp(const Tensor &saved) {
        gmm_saved_layout layout = GMM_ZERO;
        call.check(gmm_mlp_saved_query(call.ctx, GMM_OP_MLP_BWD, &m.mlp, &layout));
        z = gmm_mat_packed(dtype_of(a.x, "x"), parts_of(layout, saved)["preact"]);
        rows = a.x.size(0), groups = m.groups, prob = m.mlp.prob;
    }
    void find_layer(const Tensor &saved) {
        gmm_mlp experts;
        gmm_moe_layout layout = GMM_ZERO;
        const gmm_moe l = m.layer_over(&experts);
        call.check(gmm_moe_saved_query(call.ctx, GMM_OP_MOE_BWD, &l, &layout));
        Parts parts = parts_of(layout, saved);
        z = gmm_mat_packed(dtype_of(a.x, "x"), parts["preact"]);
        saved_rows = gmm_mat_packed(z.dtype, parts["x"]);
        rows = l.tokens * l.topk, prob = (const float *)parts["row_probs"];
        map.experts = l.experts, map.tokens = l.tokens, map.topk = l.topk, map.capacity = rows, map.fault = l.fault;
        map.row_of = (int32_t *)parts["row_of"], map.slot_of = (int32_t *)parts["slot_of"];
        map.sizes = (int32_t *)parts["sizes"];
        groups.count = l.experts, groups.capacity = rows, groups.splits = map.sizes, groups.dtype = GMM_I32;
        groups.fault = l.fault;
    }

    void dgrad(const gmm_mat *dy, const Mat &w, const gmm_mat *dx) const {
        gmm_linear lin = linear_of(groups, w.tensor.size(2), w.tensor.size(1));
        lin.dy = dy, lin.w = w.get(), lin.dx = dx;
        call.run(GMM_OP_LINEAR_DGRAD, gmm_linear_query, gmm_linear_dgrad, lin);
    }
    void wgrad(const gmm_mat *dy, const gmm_mat *x, const Tensor &dw, const char *name) const {
        const Gradient grad(call, dw, name, wants.add);
        gmm_linear lin = linear_of(groups, dw.size(2), dw.size(1));
        lin.dy = dy, lin.x = x, lin.dw = grad.get();
        call.run(GMM_OP_LINEAR_WGRAD, gmm_linear_query, gmm_linear_wgrad, lin);
    }
    /* The gradient of a bias, which where probabilities weight it is a part of theirs too. */
    void bgrad(const gmm_mat *dy, const Mat &b, const Tensor &db, bool weighted) const {
        const Gradient grad(call, as_rows(db), "db");
        gmm_linear lin = linear_of(groups, 1, db.size(1));
        lin.dy = dy, lin.db = grad.get();
        if (weighted) {
            lin.bias = b.get(), lin.bias_scale = prob;
            lin.d_bias_scale = floats(drow_probs), lin.d_bias_scale_add = 1;
        }
        call.run(GMM_OP_LINEAR_BGRAD, gmm_linear_query, gmm_linear_bgrad, lin);
    }

    /* dz, the gradient of prob, and those of FC2's parameters. */
    void fc2(const Mat &dy) {
        const int64_t features = a.w2.size(1);
        const Mat drows = routed ? rows_of(features) : dy;
        if (routed) {
            gmm_permute p = map;
            p.hidden = features, p.dout = dy.get(), p.drows = drows.get();
            call.run(GMM_OP_UNPERMUTE_BWD, gmm_permute_query, gmm_unpermute_bwd, p);
        }
        const Mat h = rows_of(m.config.ffn); /* the gradient of FC2's input, then in its place that input */
        dgrad(drows.get(), m.w2, h.get());
        gmm_activation act = GMM_ZERO;
        act.ffn = m.config.ffn, act.groups = &groups, act.act = &m.config.act;
        act.x = &z, act.prob = prob, act.dy = h.get();
        act.dx = &dz, act.dprob = floats(drow_probs), act.y = wants.w2 ? h.get() : nullptr;
        call.run(GMM_OP_ACT_BWD, gmm_act_query, gmm_act_bwd, act);
        if (wants.w2) {
            out.place_dw2(a.w2);
            wgrad(drows.get(), h.get(), out.dw2, "dw2");
        }
        if (a.b2.defined()) bgrad(drows.get(), m.b2, out.db2, m.config.prob_on_bias2);
    }

    /* The gradients of FC1's parameters, of x, and of a layer's probabilities. In a layer the gradients of rows take
       the place of permuted rows of x. */
    void fc1() {
        gmm_permute p = map;
        p.hidden = a.x.size(1);
        const bool own = routed && !(saved_rows.data && wants.overwrite);
        const Mat memory = own ? rows_of(p.hidden) : Mat();
        const gmm_mat *x = !routed ? m.x.get() : saved_rows.data ? &saved_rows : memory.get();
        if (wants.w1 && routed && !saved_rows.data) {
            gmm_permute to_rows = p;
            to_rows.x = m.x.get(), to_rows.rows = x;
            call.run(GMM_OP_PERMUTE_FWD, gmm_permute_query, gmm_permute_fwd, to_rows);
        }
        if (wants.w1) {
            out.place_dw1(a.w1);
            wgrad(&dz, x, out.dw1, "dw1");
        }
        if (a.b1.defined()) bgrad(&dz, m.b1, out.db1, false);
        if (wants.dx) out.place_dx(a.x);
        const Mat dx = mat_of(out.dx, "dx");
        if (wants.dx) dgrad(&dz, m.w1, !routed ? dx.get() : own ? memory.get() : &saved_rows);
        if (!routed || !(wants.dx || drow_probs.defined())) return;
        if (wants.dx) p.drows = own ? memory.get() : &saved_rows, p.dx = dx.get();
        p.drow_probs = floats(drow_probs), p.dprobs = floats(out.dprobs);
        call.run(GMM_OP_PERMUTE_BWD, gmm_permute_query, gmm_permute_bwd, p);
    }
};

/* The 8-byte words of a delayed entry: gmm's, the bytes of its workspace, and the addresses of dw1 and dw2. */
static constexpr int64_t entry_words = sizeof(gmm_wgrad_entry) / 8 + 3, entry_bytes = entry_words - 3;
static int64_t entry_address(const Tensor &dw) { return dw.defined() ? (int64_t)dw.data_ptr() : 0; }

/* Backward in one call of gmm, which gets the memory of all gradients. */
static void backward_at_once(const Call &call, Mlp &m, const MlpArguments &a, const MlpWants &wants,
                             const Tensor &saved, MlpGradients &out) {
    if (wants.dx) out.place_dx(a.x);
    if (wants.w1) out.place_dw1(a.w1);
    if (wants.w2) out.place_dw2(a.w2);
    const Mat dx = mat_of(out.dx, "dx");
    const Gradient dw1(call, out.dw1, "dw1", wants.add), dw2(call, out.dw2, "dw2", wants.add);
    const Gradient db1(call, as_rows(out.db1), "db1"), db2(call, as_rows(out.db2), "db2");
    m.mlp.dx = dx.get(), m.mlp.dprob = floats(out.dprobs);
    m.mlp.dw1 = dw1.get(), m.mlp.dw2 = dw2.get(), m.mlp.db1 = db1.get(), m.mlp.db2 = db2.get();
    m.config.delay_wgrad = wants.delay;
    m.config.overwrite_saved = wants.overwrite;

    gmm_wgrad_queue queue = GMM_ZERO;
    if (wants.delay) {
        out.entry = at::zeros({entry_words}, at::TensorOptions(at::kLong));
        queue = gmm_wgrad_queue_over((gmm_wgrad_entry *)out.entry.data_ptr(), 1);
        m.mlp.queue = &queue;
        const size_t bytes = m.query(call, GMM_OP_MLP_BWD, GMM_OP_MOE_BWD).deferred_bytes;
        m.mlp.deferred_bytes = (bytes + 255) / 256 * 256;
        out.entry[entry_bytes + 1] = entry_address(out.dw1), out.entry[entry_bytes + 2] = entry_address(out.dw2);
        out.entry[entry_bytes] = (int64_t)m.query(call, GMM_OP_MLP_WGRAD, GMM_OP_MLP_WGRAD).workspace_bytes;
    }
    /* A tensor that was moved to another memory and back may have another alignment. The copy, to which the entry
       refers too, lies behind what is deferred. */
    m.mlp.saved = saved.data_ptr(), m.mlp.saved_bytes = (size_t)saved.numel();
    const bool copies = (uintptr_t)m.mlp.saved % 256;
    if (wants.delay || copies) {
        out.deferred = aligned(m.mlp.deferred_bytes + (copies ? m.mlp.saved_bytes : 0), call.device);
        m.mlp.deferred = wants.delay ? out.deferred.data_ptr() : nullptr;
    }
    if (copies) {
        m.mlp.saved = (char *)out.deferred.data_ptr() + m.mlp.deferred_bytes;
        at::from_blob(m.mlp.saved, saved.sizes(), saved.options()).copy_(saved);
    }
    m.backward(call);
}

static MlpGradients backward(const Tensor &dy, const MlpArguments &a, const Tensor &saved, const Tensor &random,
                             const MlpWants &wants) {
    const Call call(a.x);
    Mlp m(call, a, true);
    check_shape(dy, "dy", {a.x.size(0), a.w2.size(1)});
    check_shape(wants.dw1, "main_grad1", a.w1.sizes());
    check_shape(wants.dw2, "main_grad2", a.w2.sizes());
    const Mat mdy = call.mat(dy, "dy");
    const Tensor seed = call.vector(random, "random", at::kLong, {4}); /* {seed, offset} of dy and of dz */
    m.mlp.dy = mdy.get();
    m.quant.random = seed.defined() ? (const uint64_t *)seed.const_data_ptr() : nullptr;
    const auto like = [](const Tensor &t) { return t.defined() ? at::empty(t.sizes(), t.options()) : Tensor(); };
    MlpGradients out;
    out.dw1 = wants.dw1, out.dw2 = wants.dw2;
    out.dprobs = like(a.probs), out.db1 = like(a.b1), out.db2 = like(a.b2);
    const bool plain = !m.config.recipe && m.config.save == GMM_SAVE_PREACT;
    if (plain && !wants.delay && (wants.dx || wants.w1)) MlpSteps(call, m, a, wants, out).run(mdy, saved);
    else backward_at_once(call, m, a, wants, saved, out);
    return out;
}

static Tensor some(const Tensor &t, const Tensor &like) { return t.defined() ? t : at::empty({0}, like.options()); }

/* `overwritten` is none, or saved itself where that may be overwritten. */
static bool overwrites(const Maybe &overwritten, const Tensor &saved) {
    TORCH_CHECK(!overwritten.has_value() || overwritten->is_alias_of(saved), "gmm: overwritten must be saved");
    return overwritten.has_value();
}

using Six = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;
static Six mlp_bwd(const Tensor &dy, const Tensor &x, const Tensor &w1, const Tensor &w2, const Tensor &routing,
                   const Tensor &saved, const Maybe &probs, const Maybe &b1, const Maybe &b2, const Maybe &random,
                   c10::string_view act, c10::string_view recipe, c10::string_view save, bool need_dx, bool need_dw1,
                   bool need_dw2, const Maybe &overwritten) {
    const MlpArguments a = {x, w1, w2, routing, value(probs), value(b1), value(b2), act, recipe, save};
    const MlpWants wants = {need_dx, need_dw1, need_dw2, {}, {}, false, false, overwrites(overwritten, saved)};
    const MlpGradients g = backward(dy, a, saved, value(random), wants);
    return {some(g.dx, x), some(g.dw1, x), some(g.dw2, x), some(g.dprobs, x), some(g.db1, x), some(g.db2, x)};
}

using Four = std::tuple<Tensor, Tensor, Tensor, Tensor>;
static Four mlp_bwd_add(const Maybe &main_grad1, const Maybe &main_grad2, const Tensor &dy, const Tensor &x,
                        const Tensor &w1, const Tensor &w2, const Tensor &routing, const Tensor &saved,
                        const Maybe &probs, const Maybe &b1, const Maybe &b2, const Maybe &random,
                        c10::string_view act, c10::string_view recipe, c10::string_view save, bool need_dx,
                        const Maybe &overwritten) {
    const MlpArguments a = {x, w1, w2, routing, value(probs), value(b1), value(b2), act, recipe, save};
    const MlpWants wants = {need_dx, main_grad1.has_value(), main_grad2.has_value(), value(main_grad1),
                            value(main_grad2), true, false, overwrites(overwritten, saved)};
    const MlpGradients g = backward(dy, a, saved, value(random), wants);
    return {some(g.dx, x), some(g.dprobs, x), some(g.db1, x), some(g.db2, x)};
}

static Six mlp_bwd_delayed(const Maybe &dw1, const Maybe &dw2, const Tensor &dy, const Tensor &x, const Tensor &w1,
                           const Tensor &w2, const Tensor &routing, const Tensor &saved, const Maybe &probs,
                           const Maybe &b1, const Maybe &b2, const Maybe &random, c10::string_view act,
                           c10::string_view recipe, c10::string_view save, bool need_dx, bool add) {
    const MlpArguments a = {x, w1, w2, routing, value(probs), value(b1), value(b2), act, recipe, save};
    const auto dense = [](const Tensor &t, const char *n) { return !t.numel() || mat_of(t, n).tensor.is_same(t); };
    TORCH_CHECK((saves_x(save) || dense(x, "x")) && dense(dy, "dy"),
                "gmm: x and dy of delayed weight gradients must have adjacent elements");
    TORCH_CHECK(!random.has_value() || random->is_contiguous(), "gmm: random of delayed weight gradients must be "
                "contiguous");
    TORCH_CHECK(dw1.has_value() || dw2.has_value(), "gmm: delayed weight gradients of no weight: use mlp_bwd");
    const MlpWants wants = {need_dx, dw1.has_value(), dw2.has_value(), value(dw1), value(dw2), add, true, false};
    const MlpGradients g = backward(dy, a, saved, value(random), wants);
    return {some(g.dx, x), some(g.dprobs, x), some(g.db1, x), some(g.db2, x), g.deferred, g.entry};
}

static void mlp_wgrad(const Maybe &dw1, const Maybe &dw2, const Tensor &entry, const Tensor &deferred) {
    TORCH_CHECK(entry.is_cpu() && entry.numel() == entry_words, "gmm: entry is not one of mlp_bwd_delayed");
    TORCH_CHECK(entry[entry_bytes + 1].item<int64_t>() == entry_address(value(dw1)) &&
                entry[entry_bytes + 2].item<int64_t>() == entry_address(value(dw2)),
                "gmm: dw1 and dw2 are not those that mlp_bwd_delayed got");
    const Call call(deferred);
    gmm_wgrad_queue queue = gmm_wgrad_queue_over((gmm_wgrad_entry *)entry.data_ptr(), 1);
    queue.count = 1;
    const int64_t bytes = entry[entry_bytes].item<int64_t>();
    const Buffer workspace(bytes, call.device);
    call.check(gmm_mlp_wgrad(call.ctx, &queue, workspace.data, (size_t)bytes, call.stream));
}

/* ---- Router, permute, unpermute */

static gmm_route route_of(const Tensor &logits, int64_t k, c10::string_view score, bool normalize, double scale,
                          double aux_coeff, double z_coeff) {
    gmm_route r = GMM_ZERO;
    r.experts = (int32_t)logits.size(1), r.tokens = logits.size(0), r.topk = (int32_t)k;
    r.score = (gmm_score)lookup({"softmax", "sigmoid"}, score, "score");
    r.normalize = normalize, r.scale = (float)scale;
    r.aux_coeff = (float)aux_coeff, r.z_coeff = (float)z_coeff;
    return r;
}

static Tensor numbers(at::IntArrayRef shape, const Tensor &like, at::ScalarType type) {
    return at::empty(shape, like.options().dtype(type));
}

static Four topk(const Tensor &logits, int64_t k, c10::string_view score, bool normalize, double scale,
                 const Maybe &expert_bias, double aux_coeff, double z_coeff) {
    TORCH_CHECK(logits.dim() == 2, "gmm: logits must be [tokens, experts]");
    const Call call(logits);
    const Mat ml = call.mat(logits, "logits");
    const Tensor bias = call.vector(value(expert_bias), "expert_bias", at::kFloat, logits.size(1));
    Tensor probs = numbers({logits.size(0), k}, logits, at::kFloat), losses = numbers({2}, logits, at::kFloat);
    Tensor indices = numbers({logits.size(0), k}, logits, at::kInt);
    Tensor counts = numbers({logits.size(1)}, logits, at::kInt);
    gmm_route r = route_of(logits, k, score, normalize, scale, aux_coeff, z_coeff);
    r.logits = ml.get(), r.expert_bias = floats(bias);
    r.indices = ints(indices), r.counts = ints(counts);
    r.probs = floats(probs);
    r.aux_loss = floats(losses), r.z_loss = floats(losses) + 1;
    call.run(GMM_OP_TOPK_FWD, gmm_topk_query, gmm_topk_fwd, r);
    return {probs, indices, counts, losses};
}

static Tensor topk_bwd(const Tensor &dprobs, const Tensor &dlosses, const Tensor &logits, const Tensor &indices,
                       const Tensor &counts, int64_t k, c10::string_view score, bool normalize, double scale,
                       double aux_coeff, double z_coeff) {
    TORCH_CHECK(logits.dim() == 2, "gmm: logits must be [tokens, experts]");
    const Call call(logits);
    Tensor dlogits = at::empty(logits.sizes(), logits.options());
    const Mat ml = call.mat(logits, "logits"), mdl = mat_of(dlogits, "dlogits");
    const Tensor dp = call.vector(dprobs, "dprobs", at::kFloat, {logits.size(0), k});
    const Tensor dl = call.vector(dlosses, "dlosses", at::kFloat, 2);
    const Tensor in = call.vector(indices, "indices", at::kInt, {logits.size(0), k});
    const Tensor count = call.vector(counts, "counts", at::kInt, logits.size(1));
    gmm_route r = route_of(logits, k, score, normalize, scale, aux_coeff, z_coeff);
    r.logits = ml.get(), r.dlogits = mdl.get();
    r.indices = ints(in), r.counts = ints(count);
    r.dprobs = floats(dp), r.dloss = floats(dl);
    call.run(GMM_OP_TOPK_BWD, gmm_topk_query, gmm_topk_bwd, r);
    return dlogits;
}

/* row_of is a dense int32 tensor that outlives the call. */
static gmm_permute permute_of(const Call &call, const Tensor &row_of, int64_t hidden, int64_t experts) {
    gmm_permute p = GMM_ZERO;
    p.experts = (int32_t)experts, p.tokens = row_of.size(0), p.topk = (int32_t)row_of.size(1);
    p.capacity = row_of.numel(), p.hidden = hidden;
    p.tail = GMM_TAIL_ZERO, p.fault = call.fault();
    p.row_of = ints(row_of);
    return p;
}

using Five = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;
static Five permute(const Tensor &x, const Tensor &indices, int64_t experts, const Maybe &probs) {
    TORCH_CHECK(x.dim() == 2 && indices.dim() == 2 && indices.size(0) == x.size(0), "gmm: x must be [tokens, hidden], "
                "indices [tokens, topk]");
    const Call call(x);
    const int64_t capacity = indices.numel();
    const Tensor in = call.vector(indices, "indices", at::kInt);
    const Tensor p = call.vector(value(probs), "probs", at::kFloat, indices.sizes());
    Tensor row_of = numbers(indices.sizes(), x, at::kInt), slot_of = numbers({capacity}, x, at::kInt);
    Tensor sizes = numbers({experts}, x, at::kInt), rows = at::empty({capacity, x.size(1)}, x.options());
    Tensor row_probs = numbers({p.defined() ? capacity : 0}, x, at::kFloat);
    const Mat mx = call.mat(x, "x"), mr = mat_of(rows, "rows");
    gmm_permute map = permute_of(call, row_of, x.size(1), experts);
    map.indices = ints(in);
    map.slot_of = ints(slot_of), map.sizes = ints(sizes);
    call.run(GMM_OP_PERMUTE_MAP, gmm_permute_query, gmm_permute_map, map);
    map.x = mx.get(), map.rows = mr.get(), map.probs = floats(p);
    map.row_probs = p.defined() ? floats(row_probs) : nullptr;
    call.run(GMM_OP_PERMUTE_FWD, gmm_permute_query, gmm_permute_fwd, map);
    return {rows, row_probs, row_of, slot_of, sizes};
}

using Two = std::tuple<Tensor, Tensor>;
static Two permute_bwd(const Tensor &drows, const Maybe &drow_probs, const Tensor &map) {
    TORCH_CHECK(drows.dim() == 2 && map.dim() == 2, "gmm: drows must be [rows, hidden], row_of [tokens, topk]");
    check_shape(drows, "drows", {map.numel(), drows.size(1)});
    const Call call(drows);
    const Tensor row_of = call.vector(map, "row_of", at::kInt);
    const Tensor dp = call.vector(value(drow_probs), "drow_probs", at::kFloat, map.numel());
    Tensor dx = at::empty({row_of.size(0), drows.size(1)}, drows.options());
    Tensor dprobs = dp.defined() ? numbers(row_of.sizes(), drows, at::kFloat) : numbers({0}, drows, at::kFloat);
    const Mat mdr = call.mat(drows, "drows"), mdx = mat_of(dx, "dx");
    gmm_permute p = permute_of(call, row_of, drows.size(1), 1);
    p.drows = mdr.get(), p.dx = mdx.get();
    p.drow_probs = floats(dp), p.dprobs = dp.defined() ? floats(dprobs) : nullptr;
    call.run(GMM_OP_PERMUTE_BWD, gmm_permute_query, gmm_permute_bwd, p);
    return {dx, dprobs};
}

static Tensor unpermute(const Tensor &rows, const Tensor &map, const Tensor &slot_of, const Tensor &sizes,
                        const Maybe &probs) {
    TORCH_CHECK(rows.dim() == 2 && map.dim() == 2, "gmm: rows must be [rows, hidden], row_of [tokens, topk]");
    check_shape(rows, "rows", {map.numel(), rows.size(1)});
    const Call call(rows);
    const Tensor row_of = call.vector(map, "row_of", at::kInt);
    const Tensor pr = call.vector(value(probs), "probs", at::kFloat, map.sizes());
    Tensor out = at::empty({row_of.size(0), rows.size(1)}, rows.options());
    const Mat mr = call.mat(rows, "rows"), mo = mat_of(out, "out");
    gmm_permute p = permute_of(call, row_of, rows.size(1), sizes.size(0));
    (void)slot_of;
    p.rows = mr.get(), p.out = mo.get(), p.probs = floats(pr);
    call.run(GMM_OP_UNPERMUTE_FWD, gmm_permute_query, gmm_unpermute_fwd, p);
    return out;
}

static Two unpermute_bwd(const Tensor &dout, const Tensor &rows, const Tensor &map, const Tensor &slots,
                         const Tensor &counts, const Maybe &probs) {
    TORCH_CHECK(rows.dim() == 2 && map.dim() == 2, "gmm: rows must be [rows, hidden], row_of [tokens, topk]");
    check_shape(rows, "rows", {map.numel(), rows.size(1)});
    check_shape(dout, "dout", {map.size(0), rows.size(1)});
    const Call call(dout);
    const Tensor row_of = call.vector(map, "row_of", at::kInt), sizes = call.vector(counts, "sizes", at::kInt);
    const Tensor slot_of = call.vector(slots, "slot_of", at::kInt, map.numel());
    const Tensor pr = call.vector(value(probs), "probs", at::kFloat, map.sizes());
    Tensor drows = at::empty(rows.sizes(), rows.options());
    Tensor dprobs = pr.defined() ? numbers(row_of.sizes(), dout, at::kFloat) : numbers({0}, dout, at::kFloat);
    const Mat mdo = call.mat(dout, "dout"), mdr = mat_of(drows, "drows");
    const Mat mr = call.mat(pr.defined() ? rows : Tensor(), "rows"); /* else rows has a shape alone */
    gmm_permute p = permute_of(call, row_of, rows.size(1), sizes.size(0));
    p.slot_of = ints(slot_of), p.sizes = ints(sizes);
    p.dout = mdo.get(), p.drows = mdr.get(), p.probs = floats(pr);
    if (pr.defined()) p.rows = mr.get(), p.dprobs = floats(dprobs);
    call.run(GMM_OP_UNPERMUTE_BWD, gmm_permute_query, gmm_unpermute_bwd, p);
    return {drows, dprobs};
}

/* ---- Reports */

/* The engine that serves linear_fwd of these operands, and gmm's note. */
static std::string linear_engine(const Tensor &x, const Tensor &w, const Tensor &splits) {
    const Call call(x);
    const gmm_groups groups = call.groups(splits, x.size(0));
    const Mat mx = call.mat(x, "x"), mw = call.mat(w, "w"), my = mat_of(at::empty({1, w.size(1)}, x.options()), "y");
    gmm_linear lin = linear_of(groups, w.size(2), w.size(1));
    gmm_info info = GMM_ZERO;
    lin.x = mx.get(), lin.w = mw.get(), lin.y = my.get();
    call.check(gmm_linear_query(call.ctx, GMM_OP_LINEAR_FWD, &lin, &info));
    return std::string(gmm_engine_name(info.engine)) + ": " + info.note;
}

/* For the benchmark: n calls of gmm alone over the same memory, as a C program makes them. */
static void linear_repeat(Tensor y, const Tensor &x, const Tensor &w, const Tensor &splits, int64_t n) {
    const Call call(x);
    const gmm_groups groups = call.groups(splits, x.size(0));
    const Mat mx = call.mat(x, "x"), mw = call.mat(w, "w"), my = call.mat(y, "y");
    gmm_linear lin = linear_of(groups, w.size(2), w.size(1));
    gmm_info info = GMM_ZERO;
    lin.x = mx.get(), lin.w = mw.get(), lin.y = my.get();
    call.check(gmm_linear_query(call.ctx, GMM_OP_LINEAR_FWD, &lin, &info));
    const Buffer workspace((int64_t)info.workspace_bytes, call.device);
    for (int64_t i = 0; i < n; i++)
        call.check(gmm_linear_fwd(call.ctx, &lin, workspace.data, info.workspace_bytes, call.stream));
}

/* GMM_FAULT_* bits that calls on this CUDA device have set since the last look. The caller has waited for it. */
static int64_t take_faults(int64_t device) {
    Tensor word;
    {
        std::lock_guard<std::mutex> lock(Pool::get().mutex);
        word = Pool::get().fault[(int)device];
    }
    if (!word.defined()) return 0;
    const int64_t bits = word.item<int32_t>();
    word.zero_();
    return bits;
}

#define MLP_OPERANDS "Tensor x, Tensor w1, Tensor w2, Tensor routing, "
#define MLP_OPTIONAL "Tensor? probs=None, Tensor? b1=None, Tensor? b2=None, "
#define MLP_SETTINGS "str act=\"swiglu\", str recipe=\"none\", str save=\"preact\""
#define MLP_BACKWARD "Tensor dy, " MLP_OPERANDS "Tensor saved, " MLP_OPTIONAL "Tensor? random=None, " MLP_SETTINGS ", "
#define ROUTE "int k, str score=\"softmax\", bool normalize=False, float scale=1.0, "

TORCH_LIBRARY(gmm, m) {
    m.def("linear(Tensor x, Tensor w, Tensor splits, Tensor? bias=None, Tensor? main_grad=None) -> Tensor");
    m.def("linear_fwd(Tensor x, Tensor w, Tensor splits, Tensor? bias=None) -> Tensor");
    m.def("linear_dgrad(Tensor dy, Tensor w, Tensor splits) -> Tensor");
    m.def("linear_wgrad(Tensor dy, Tensor x, Tensor splits) -> Tensor");
    m.def("linear_wgrad_add(Tensor(a!) dw, Tensor dy, Tensor x, Tensor splits) -> ()");
    m.def("linear_bgrad(Tensor dy, Tensor splits) -> Tensor");
    m.def("mlp(" MLP_OPERANDS MLP_OPTIONAL MLP_SETTINGS
          ", Tensor? random=None, Tensor? main_grad1=None, Tensor? main_grad2=None) -> Tensor");
    m.def("mlp_fwd(" MLP_OPERANDS MLP_OPTIONAL MLP_SETTINGS ", bool training=True) -> (Tensor, Tensor)");
    m.def("mlp_bwd(" MLP_BACKWARD "bool need_dx=True, bool need_dw1=True, bool need_dw2=True, "
          "Tensor(a!)? overwritten=None) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
    m.def("mlp_bwd_add(Tensor(a!)? main_grad1, Tensor(b!)? main_grad2, " MLP_BACKWARD "bool need_dx=True, "
          "Tensor(c!)? overwritten=None) -> (Tensor, Tensor, Tensor, Tensor)");
    m.def("mlp_bwd_delayed(Tensor? dw1, Tensor? dw2, " MLP_BACKWARD "bool need_dx=True, bool add=True) -> "
          "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
    m.def("mlp_wgrad(Tensor(a!)? dw1, Tensor(b!)? dw2, Tensor entry, Tensor deferred) -> ()");
    m.def("topk(Tensor logits, " ROUTE "Tensor? expert_bias=None, float aux_coeff=0.0, float z_coeff=0.0) -> "
          "(Tensor, Tensor, Tensor, Tensor)");
    m.def("topk_bwd(Tensor dprobs, Tensor dlosses, Tensor logits, Tensor indices, Tensor counts, " ROUTE
          "float aux_coeff=0.0, float z_coeff=0.0) -> Tensor");
    m.def("permute(Tensor x, Tensor indices, int experts, Tensor? probs=None) -> "
          "(Tensor, Tensor, Tensor, Tensor, Tensor)");
    m.def("permute_bwd(Tensor drows, Tensor? drow_probs, Tensor row_of) -> (Tensor, Tensor)");
    m.def("unpermute(Tensor rows, Tensor row_of, Tensor slot_of, Tensor sizes, Tensor? probs=None) -> Tensor");
    m.def("unpermute_bwd(Tensor dout, Tensor rows, Tensor row_of, Tensor slot_of, Tensor sizes, Tensor? probs=None) -> "
          "(Tensor, Tensor)");
    m.def("linear_repeat(Tensor(a!) y, Tensor x, Tensor w, Tensor splits, int n) -> ()");
    m.def("linear_engine(Tensor x, Tensor w, Tensor splits) -> str", linear_engine);
    m.def("take_faults(int device) -> int", take_faults);
    m.def("mlp_saved_bytes(int rows, int topk, int experts, int hidden, int ffn, int out, ScalarType dtype, "
          "bool probs, bool b1, bool b2, str act, str recipe, str save) -> int", mlp_saved_bytes);
}

static void implement(torch::Library &m) {
    m.impl("linear", linear);
    m.impl("linear_fwd", linear_fwd);
    m.impl("linear_dgrad", linear_dgrad);
    m.impl("linear_wgrad", linear_wgrad);
    m.impl("linear_wgrad_add", linear_wgrad_add);
    m.impl("linear_bgrad", linear_bgrad);
    m.impl("mlp", mlp);
    m.impl("mlp_fwd", mlp_fwd);
    m.impl("mlp_bwd", mlp_bwd);
    m.impl("mlp_bwd_add", mlp_bwd_add);
    m.impl("mlp_bwd_delayed", mlp_bwd_delayed);
    m.impl("mlp_wgrad", mlp_wgrad);
    m.impl("topk", topk);
    m.impl("topk_bwd", topk_bwd);
    m.impl("permute", permute);
    m.impl("permute_bwd", permute_bwd);
    m.impl("unpermute", unpermute);
    m.impl("unpermute_bwd", unpermute_bwd);
    m.impl("linear_repeat", linear_repeat);
}

TORCH_LIBRARY_IMPL(gmm, CPU, m) { implement(m); }
TORCH_LIBRARY_IMPL(gmm, CUDA, m) { implement(m); } /* without the CUDA engines gmm_create says so */

} // namespace gmm_torch
