"""Shapes and dtypes of the operators' results, for torch.compile, FakeTensor and the meta device."""
import torch

fake = torch.library.register_fake


def gated(act):
    return act == "gpt_oss" or act.endswith("glu") or act.endswith("glu_erf")


@fake("gmm::linear")
def _(x, w, splits, bias=None, main_grad=None):
    return x.new_empty(x.shape[0], w.shape[1])


@fake("gmm::linear_fwd")
def _(x, w, splits, bias=None):
    return x.new_empty(x.shape[0], w.shape[1])


@fake("gmm::linear_dgrad")
def _(dy, w, splits):
    return dy.new_empty(dy.shape[0], w.shape[2])


@fake("gmm::linear_wgrad")
def _(dy, x, splits):
    return x.new_empty(splits.shape[0], dy.shape[1], x.shape[1])


@fake("gmm::linear_bgrad")
def _(dy, splits):
    return dy.new_empty(splits.shape[0], dy.shape[1])


@fake("gmm::linear_wgrad_add")
def _(dw, dy, x, splits):
    return None


@fake("gmm::linear_repeat")
def _(y, x, w, splits, n):
    return None


def saved_bytes(x, w1, w2, routing, probs, b1, b2, act, recipe, save):
    """Bytes that mlp_fwd saves. Other than FC1's output and the maps of a layer, they are known for a number of rows
    only: torch.compile then compiles again for another number."""
    topk = routing.shape[1] if routing.dim() == 2 else 0
    if recipe == "none" and save == "preact":
        rows = x.shape[0] * topk if topk else x.shape[0]
        parts = [rows * w1.shape[1] * x.element_size()]
        if topk:  # row_of, slot_of, sizes, row_probs
            parts += [4 * rows, 4 * rows, 4 * w1.shape[0], 0 if probs is None else 4 * rows]
        return sum((n + 255) // 256 * 256 for n in parts)
    return torch.ops.gmm.mlp_saved_bytes(
        int(x.shape[0]), int(topk), int(w1.shape[0]), int(x.shape[1]), int(w2.shape[2]), int(w2.shape[1]), x.dtype,
        probs is not None, b1 is not None, b2 is not None, act, recipe, save)


@fake("gmm::mlp")
def _(x, w1, w2, routing, probs=None, b1=None, b2=None, act="swiglu", recipe="none", save="preact", random=None,
      main_grad1=None, main_grad2=None):
    return x.new_empty(x.shape[0], w2.shape[1])


@fake("gmm::mlp_fwd")
def _(x, w1, w2, routing, probs=None, b1=None, b2=None, act="swiglu", recipe="none", save="preact", training=True):
    size = saved_bytes(x, w1, w2, routing, probs, b1, b2, act, recipe, save) if training else 0
    return x.new_empty(x.shape[0], w2.shape[1]), x.new_empty(size, dtype=torch.uint8)


def like(x, t):
    return x.new_empty(0) if t is None else torch.empty_like(t, memory_format=torch.contiguous_format)


@fake("gmm::mlp_bwd")
def _(dy, x, w1, w2, routing, saved, probs=None, b1=None, b2=None, random=None, act="swiglu", recipe="none",
      save="preact", need_dx=True, need_dw1=True, need_dw2=True, overwritten=None):
    dw = w1 if need_dw1 else None, w2 if need_dw2 else None
    return tuple(like(x, t) for t in (x if need_dx else None, *dw, probs, b1, b2))


@fake("gmm::mlp_bwd_add")
def _(main_grad1, main_grad2, dy, x, w1, w2, routing, saved, probs=None, b1=None, b2=None, random=None, act="swiglu",
      recipe="none", save="preact", need_dx=True, overwritten=None):
    return tuple(like(x, t) for t in (x if need_dx else None, probs, b1, b2))


@fake("gmm::topk")
def _(logits, k, score="softmax", normalize=False, scale=1.0, expert_bias=None, aux_coeff=0.0, z_coeff=0.0):
    tokens, experts = logits.shape
    return (logits.new_empty(tokens, k, dtype=torch.float32), logits.new_empty(tokens, k, dtype=torch.int32),
            logits.new_empty(experts, dtype=torch.int32), logits.new_empty(2, dtype=torch.float32))


@fake("gmm::topk_bwd")
def _(dprobs, dlosses, logits, indices, counts, k, score="softmax", normalize=False, scale=1.0, aux_coeff=0.0,
      z_coeff=0.0):
    return like(logits, logits)


@fake("gmm::permute")
def _(x, indices, experts, probs=None):
    slots = indices.shape[0] * indices.shape[1]
    return (x.new_empty(slots, x.shape[1]), x.new_empty(0 if probs is None else slots, dtype=torch.float32),
            torch.empty_like(indices, memory_format=torch.contiguous_format), indices.new_empty(slots),
            indices.new_empty(experts))


@fake("gmm::permute_bwd")
def _(drows, drow_probs, row_of):
    return (drows.new_empty(row_of.shape[0], drows.shape[1]),
            drows.new_empty(0 if drow_probs is None else row_of.shape, dtype=torch.float32))


@fake("gmm::unpermute")
def _(rows, row_of, slot_of, sizes, probs=None):
    return rows.new_empty(row_of.shape[0], rows.shape[1])


@fake("gmm::unpermute_bwd")
def _(dout, rows, row_of, slot_of, sizes, probs=None):
    return like(rows, rows), dout.new_empty(0 if probs is None else row_of.shape, dtype=torch.float32)
