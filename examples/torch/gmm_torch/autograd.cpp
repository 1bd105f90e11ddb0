/* The derivatives of linear, mlp, topk, permute and unpermute. Forward and backward call other operators of
   torch.ops.gmm through the dispatcher, so that torch.compile sees these. */
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/library.h>

#include "call.h"

#include <optional>
#include <string>

namespace gmm_torch {

using Text = c10::string_view;
using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;

/* The operator of this name, found once. */
#define GMM_TORCH_OPERATOR(name, ...) \
    static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("gmm::" name, "").typed<__VA_ARGS__>()

static Maybe maybe(const Tensor &t) { return t.defined() ? Maybe(t) : Maybe(); }

/* ---- Grouped linear */

static Tensor linear_fwd(const Tensor &x, const Tensor &w, const Tensor &splits, const Maybe &bias) {
    GMM_TORCH_OPERATOR("linear_fwd", Tensor(const Tensor &, const Tensor &, const Tensor &, const Maybe &));
    return op.call(x, w, splits, bias);
}
static Tensor linear_dgrad(const Tensor &dy, const Tensor &w, const Tensor &splits) {
    GMM_TORCH_OPERATOR("linear_dgrad", Tensor(const Tensor &, const Tensor &, const Tensor &));
    return op.call(dy, w, splits);
}
static Tensor linear_wgrad(const Tensor &dy, const Tensor &x, const Tensor &splits) {
    GMM_TORCH_OPERATOR("linear_wgrad", Tensor(const Tensor &, const Tensor &, const Tensor &));
    return op.call(dy, x, splits);
}
static void linear_wgrad_add(Tensor dw, const Tensor &dy, const Tensor &x, const Tensor &splits) {
    GMM_TORCH_OPERATOR("linear_wgrad_add", void(Tensor, const Tensor &, const Tensor &, const Tensor &));
    op.call(dw, dy, x, splits);
}
static Tensor linear_bgrad(const Tensor &dy, const Tensor &splits) {
    GMM_TORCH_OPERATOR("linear_bgrad", Tensor(const Tensor &, const Tensor &));
    return op.call(dy, splits);
}

/* main_grad is no input of the graph: backward adds to it whatever was added before, so that its version is not
   recorded. */
struct Linear : torch::autograd::Function<Linear> {
    static Tensor forward(AutogradContext *ctx, const Tensor &x, const Tensor &w, const Tensor &splits,
                          const Maybe &bias, const Maybe &main_grad) {
        at::AutoDispatchBelowADInplaceOrView below;
        ctx->save_for_backward({x, w, splits});
        ctx->saved_data["main_grad"] = main_grad, ctx->saved_data["bias"] = bias.has_value();
        return linear_fwd(x, w, splits, bias);
    }
    static variable_list backward(AutogradContext *ctx, variable_list grads) {
        const variable_list saved = ctx->get_saved_variables();
        const Tensor &x = saved[0], &w = saved[1], &splits = saved[2], &dy = grads[0];
        const Maybe main_grad = ctx->saved_data["main_grad"].toOptional<Tensor>();
        Tensor dx, dw, db;
        if (ctx->needs_input_grad(0)) dx = linear_dgrad(dy, w, splits);
        if (ctx->needs_input_grad(1) && main_grad.has_value()) linear_wgrad_add(*main_grad, dy, x, splits);
        else if (ctx->needs_input_grad(1)) dw = linear_wgrad(dy, x, splits);
        if (ctx->saved_data["bias"].toBool() && ctx->needs_input_grad(3)) db = linear_bgrad(dy, splits);
        return {dx, dw, Tensor(), db, Tensor()};
    }
};
static Tensor linear(const Tensor &x, const Tensor &w, const Tensor &splits, const Maybe &bias,
                     const Maybe &main_grad) {
    return Linear::apply(x, w, splits, bias, main_grad);
}

/* ---- Expert MLP */

using Six = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;
using Four = std::tuple<Tensor, Tensor, Tensor, Tensor>;

static std::tuple<Tensor, Tensor> mlp_fwd(const Tensor &x, const Tensor &w1, const Tensor &w2, const Tensor &routing,
                                          const Maybe &probs, const Maybe &b1, const Maybe &b2, Text act, Text recipe,
                                          Text save, bool training) {
    GMM_TORCH_OPERATOR("mlp_fwd", std::tuple<Tensor, Tensor>(
        const Tensor &, const Tensor &, const Tensor &, const Tensor &, const Maybe &, const Maybe &, const Maybe &,
        Text, Text, Text, bool));
    return op.call(x, w1, w2, routing, probs, b1, b2, act, recipe, save, training);
}

/* Whether the running backward may overwrite what forward saved: no later one reads it, unless the graph is kept
   (retain_graph). Where torch.compile traces it does not, since a traced graph would make a copy first. */
static bool may_overwrite(const Tensor &saved) {
    const bool traced = saved.key_set().has_any(c10::python_ks | c10::DispatchKeySet(c10::DispatchKey::Functionalize));
    return !traced && !torch::autograd::get_current_graph_task_keep_graph();
}

/* A tensor of the shape, dtype and device of t without memory for its elements. */
static Tensor shape_of(const Tensor &t) { return t.new_empty({}).expand(t.sizes()); }

/* What the graph keeps of x for backward: x, or its shape where `saved` has what is needed of it. */
static Tensor kept_x(const Tensor &x, Text save) { return saves_x(save) ? shape_of(x) : x; }

struct Mlp : torch::autograd::Function<Mlp> {
    static Tensor forward(AutogradContext *ctx, const Tensor &x, const Tensor &w1, const Tensor &w2,
                          const Tensor &routing, const Maybe &probs, const Maybe &b1, const Maybe &b2,
                          std::string act, std::string recipe, std::string save, const Maybe &random,
                          const Maybe &main_grad1, const Maybe &main_grad2) {
        at::AutoDispatchBelowADInplaceOrView below;
        const auto [y, saved] = mlp_fwd(x, w1, w2, routing, probs, b1, b2, act, recipe, save, true);
        ctx->save_for_backward({kept_x(x, save), w1, w2, routing, saved, value(probs), value(b1), value(b2),
                                value(random)});
        ctx->saved_data["act"] = act, ctx->saved_data["recipe"] = recipe, ctx->saved_data["save"] = save;
        ctx->saved_data["main_grad1"] = main_grad1, ctx->saved_data["main_grad2"] = main_grad2;
        return y;
    }
    static variable_list backward(AutogradContext *ctx, variable_list grads) {
        GMM_TORCH_OPERATOR("mlp_bwd", Six(
            const Tensor &, const Tensor &, const Tensor &, const Tensor &, const Tensor &, const Tensor &,
            const Maybe &, const Maybe &, const Maybe &, const Maybe &, Text, Text, Text, bool, bool, bool,
            const Maybe &));
        static const auto op_add = c10::Dispatcher::singleton().findSchemaOrThrow("gmm::mlp_bwd_add", "").typed<Four(
            const Maybe &, const Maybe &, const Tensor &, const Tensor &, const Tensor &, const Tensor &,
            const Tensor &, const Tensor &, const Maybe &, const Maybe &, const Maybe &, const Maybe &, Text, Text,
            Text, bool, const Maybe &)>();
        const variable_list s = ctx->get_saved_variables();
        const Maybe probs = maybe(s[5]), b1 = maybe(s[6]), b2 = maybe(s[7]), random = maybe(s[8]);
        const std::string act = ctx->saved_data["act"].toStringRef(), recipe = ctx->saved_data["recipe"].toStringRef();
        const std::string save = ctx->saved_data["save"].toStringRef();
        const Maybe over = may_overwrite(s[4]) ? Maybe(s[4]) : Maybe();
        const bool need_dx = ctx->needs_input_grad(0);
        const bool need_dw1 = ctx->needs_input_grad(1), need_dw2 = ctx->needs_input_grad(2);
        const Maybe main1 = need_dw1 ? ctx->saved_data["main_grad1"].toOptional<Tensor>() : Maybe();
        const Maybe main2 = need_dw2 ? ctx->saved_data["main_grad2"].toOptional<Tensor>() : Maybe();
        Tensor dx, dw1, dw2, dprobs, db1, db2;
        if (main1.has_value() || main2.has_value())
            std::tie(dx, dprobs, db1, db2) = op_add.call(main1, main2, grads[0], s[0], s[1], s[2], s[3], s[4], probs,
                                                         b1, b2, random, act, recipe, save, need_dx, over);
        else
            std::tie(dx, dw1, dw2, dprobs, db1, db2) = op.call(grads[0], s[0], s[1], s[2], s[3], s[4], probs, b1, b2,
                                                               random, act, recipe, save, need_dx, need_dw1, need_dw2,
                                                               over);
        if (!need_dx) dx = Tensor();
        if (!need_dw1) dw1 = Tensor();
        if (!need_dw2) dw2 = Tensor();
        if (!probs.has_value()) dprobs = Tensor();
        if (!b1.has_value()) db1 = Tensor();
        if (!b2.has_value()) db2 = Tensor();
        return {dx, dw1, dw2, Tensor(), dprobs, db1, db2, {}, {}, {}, {}, {}, {}};
    }
};
static Tensor mlp(const Tensor &x, const Tensor &w1, const Tensor &w2, const Tensor &routing, const Maybe &probs,
                  const Maybe &b1, const Maybe &b2, Text act, Text recipe, Text save, const Maybe &random,
                  const Maybe &main_grad1, const Maybe &main_grad2) {
    TORCH_CHECK(main_grad1.has_value() == main_grad2.has_value() || !w1.requires_grad() || !w2.requires_grad(),
                "gmm: main_grad1 and main_grad2 go together where both weights are trained");
    const auto wants = [](const Maybe &t) { return t.has_value() && t->requires_grad(); };
    if (at::GradMode::is_enabled() && (x.requires_grad() || w1.requires_grad() || w2.requires_grad() || wants(probs) ||
                                       wants(b1) || wants(b2)))
        return Mlp::apply(x, w1, w2, routing, probs, b1, b2, std::string(act), std::string(recipe), std::string(save),
                          random, main_grad1, main_grad2);
    at::AutoDispatchBelowADInplaceOrView below; /* nothing is saved */
    return std::get<0>(mlp_fwd(x, w1, w2, routing, probs, b1, b2, act, recipe, save, false));
}

/* ---- Router, permute, unpermute */

struct Topk : torch::autograd::Function<Topk> {
    static variable_list forward(AutogradContext *ctx, const Tensor &logits, int64_t k, std::string score,
                                 bool normalize, double scale, const Maybe &expert_bias, double aux, double z) {
        at::AutoDispatchBelowADInplaceOrView below;
        GMM_TORCH_OPERATOR("topk", Four(const Tensor &, int64_t, Text, bool, double, const Maybe &, double, double));
        const auto [probs, indices, counts, losses] = op.call(logits, k, score, normalize, scale, expert_bias, aux, z);
        ctx->save_for_backward({logits, indices, counts});
        ctx->saved_data["k"] = k, ctx->saved_data["score"] = score, ctx->saved_data["normalize"] = normalize;
        ctx->saved_data["scale"] = scale, ctx->saved_data["aux"] = aux, ctx->saved_data["z"] = z;
        ctx->mark_non_differentiable({indices, counts});
        return {probs, indices, counts, losses};
    }
    static variable_list backward(AutogradContext *ctx, variable_list grads) {
        GMM_TORCH_OPERATOR("topk_bwd", Tensor(const Tensor &, const Tensor &, const Tensor &, const Tensor &,
                                              const Tensor &, int64_t, Text, bool, double, double, double));
        const variable_list s = ctx->get_saved_variables();
        auto &d = ctx->saved_data;
        const std::string score = d["score"].toStringRef();
        const Tensor dlogits = op.call(grads[0], grads[3], s[0], s[1], s[2], d["k"].toInt(), score,
                                       d["normalize"].toBool(), d["scale"].toDouble(), d["aux"].toDouble(),
                                       d["z"].toDouble());
        return {dlogits, {}, {}, {}, {}, {}, {}, {}};
    }
};
static Four topk(const Tensor &logits, int64_t k, Text score, bool normalize, double scale, const Maybe &expert_bias,
                 double aux, double z) {
    const variable_list out = Topk::apply(logits, k, std::string(score), normalize, scale, expert_bias, aux, z);
    return {out[0], out[1], out[2], out[3]};
}

using Five = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;
using Two = std::tuple<Tensor, Tensor>;

struct Permute : torch::autograd::Function<Permute> {
    static variable_list forward(AutogradContext *ctx, const Tensor &x, const Tensor &indices, int64_t experts,
                                 const Maybe &probs) {
        at::AutoDispatchBelowADInplaceOrView below;
        GMM_TORCH_OPERATOR("permute", Five(const Tensor &, const Tensor &, int64_t, const Maybe &));
        const auto [rows, row_probs, row_of, slot_of, sizes] = op.call(x, indices, experts, probs);
        ctx->save_for_backward({row_of});
        ctx->saved_data["probs"] = probs.has_value();
        ctx->mark_non_differentiable({row_of, slot_of, sizes});
        return {rows, row_probs, row_of, slot_of, sizes};
    }
    static variable_list backward(AutogradContext *ctx, variable_list grads) {
        GMM_TORCH_OPERATOR("permute_bwd", Two(const Tensor &, const Maybe &, const Tensor &));
        const bool probs = ctx->saved_data["probs"].toBool();
        const auto [dx, dprobs] = op.call(grads[0], probs ? Maybe(grads[1]) : Maybe(), ctx->get_saved_variables()[0]);
        return {dx, {}, {}, probs ? dprobs : Tensor()};
    }
};
static Five permute(const Tensor &x, const Tensor &indices, int64_t experts, const Maybe &probs) {
    const variable_list out = Permute::apply(x, indices, experts, probs);
    return {out[0], out[1], out[2], out[3], out[4]};
}

struct Unpermute : torch::autograd::Function<Unpermute> {
    static Tensor forward(AutogradContext *ctx, const Tensor &rows, const Tensor &row_of, const Tensor &slot_of,
                          const Tensor &sizes, const Maybe &probs) {
        at::AutoDispatchBelowADInplaceOrView below;
        GMM_TORCH_OPERATOR("unpermute", Tensor(const Tensor &, const Tensor &, const Tensor &, const Tensor &,
                                               const Maybe &));
        ctx->save_for_backward({probs.has_value() ? rows : shape_of(rows), row_of, slot_of, sizes, value(probs)});
        return op.call(rows, row_of, slot_of, sizes, probs);
    }
    static variable_list backward(AutogradContext *ctx, variable_list grads) {
        GMM_TORCH_OPERATOR("unpermute_bwd", Two(const Tensor &, const Tensor &, const Tensor &, const Tensor &,
                                                const Tensor &, const Maybe &));
        const variable_list s = ctx->get_saved_variables();
        const auto [drows, dprobs] = op.call(grads[0], s[0], s[1], s[2], s[3], maybe(s[4]));
        return {drows, {}, {}, {}, s[4].defined() ? dprobs : Tensor()};
    }
};
static Tensor unpermute(const Tensor &rows, const Tensor &row_of, const Tensor &slot_of, const Tensor &sizes,
                        const Maybe &probs) {
    return Unpermute::apply(rows, row_of, slot_of, sizes, probs);
}

TORCH_LIBRARY_FRAGMENT(gmm, m) {
    m.def("may_overwrite(Tensor saved) -> bool", may_overwrite);
    m.def("kept_x(Tensor x, str save) -> Tensor", kept_x);
}

TORCH_LIBRARY_IMPL(gmm, Autograd, m) {
    m.impl("linear", linear);
    m.impl("mlp", mlp);
    m.impl("topk", topk);
    m.impl("permute", permute);
    m.impl("unpermute", unpermute);
}

} // namespace gmm_torch
