"""gmm's grouped linear layers, expert MLPs, layers of experts, router and permutation as PyTorch operators
(torch.ops.gmm).

Row counts of experts (`splits`, int32 or int64) and indices stay on the device: the host does not wait for them, and a
captured CUDA graph can be replayed with others. Rows past the sum of the counts are zero in results. Wrong counts raise
on the CPU; on a GPU they are cut to fit, and check_faults() raises.
"""
from collections import deque
from pathlib import Path

import torch

torch.ops.load_library(str(next(Path(__file__).parent.glob("_C*.so"))))
from . import fake  # noqa: E402,F401

ops = torch.ops.gmm
FAULTS = ("a size below 0", "more rows than there are", "offsets that fall", "a broken row_align promise",
          "an expert index out of range", "an address that is no multiple of 16 bytes")


def check_faults(device=None):
    """Raises if calls on this GPU were given wrong counts or indices since the last look. Waits for the GPU."""
    if torch.cuda.is_available():
        index = torch.device("cuda" if device is None else device).index
        index = torch.cuda.current_device() if index is None else index
        torch.cuda.synchronize(index)  # calls on other streams may not have set their bits yet
        bits = ops.take_faults(index)
        if bits:
            raise RuntimeError("gmm: " + ", ".join(text for i, text in enumerate(FAULTS) if bits >> i & 1))


def linear(x, w, splits, bias=None, main_grad=None):
    """y[r] = w[expert of r] x[r] (+ bias): x [T, K], w [experts, N, K], bias [experts, N]. With main_grad, a tensor of
    w's shape in fp32 or bf16, backward adds w's gradient to it and leaves w.grad alone."""
    return ops.linear(x, w, splits, bias, main_grad)


def mlp(x, w1, w2, splits, probs=None, b1=None, b2=None, act="swiglu", recipe="none", save="preact", random=None,
        main_grads=(None, None), queue=None):
    """act(x w1^T + b1) probs w2^T + b2 probs, rows by expert: w1 [experts, 2 ffn or ffn, hidden] with the gate's rows
    first, w2 [experts, out, ffn], probs [T] in fp32. `recipe` quantizes the products: fp8_current, fp8_block, mxfp8 or
    nvfp4 (which needs `random`: int64 {seed, offset} of dy and of dz). `save` is what forward keeps: preact,
    preact_and_act, nothing, quantized, preact_e4m3, quantized_e4m3. With a `queue`, backward leaves the gradients of w1
    and w2 to queue.run()."""
    if queue is None:
        return ops.mlp(x, w1, w2, splits, probs, b1, b2, act, recipe, save, random, *main_grads)
    return _Delayed.apply(x, w1, w2, splits, probs, b1, b2, (act, recipe, save), random, main_grads, queue)


def moe(x, w1, w2, indices, probs=None, b1=None, b2=None, act="swiglu", recipe="none", save="preact", random=None,
        main_grads=(None, None), queue=None):
    """A layer behind its router: the sum of the outputs of each token's experts, which indices [T, k] name (int32, -1 =
    none), weighted by probs [T, k]. Computes what permute, mlp and unpermute do, bit for bit, and keeps x for backward
    instead of permuted rows; with save="preact_and_rows" it keeps these, so that backward need not permute again. Other
    arguments are those of mlp."""
    return mlp(x, w1, w2, indices, probs, b1, b2, act, recipe, save, random, main_grads, queue)


def topk(logits, k, score="softmax", normalize=False, scale=1.0, expert_bias=None, aux_coeff=0.0, z_coeff=0.0):
    """Chooses k experts per token: probs and indices [T, k], tokens per expert, and the two losses [2] (load balance,
    logsumexp squared), which are differentiable."""
    return ops.topk(logits, k, score, normalize, scale, expert_bias, aux_coeff, z_coeff)


def permute(x, indices, experts, probs=None):
    """Sorts tokens by expert: rows [T k, hidden], their probs, and what unpermute needs: row_of, slot_of and the sizes
    of the experts, which are `splits`. Index -1 drops a slot."""
    return ops.permute(x, indices, experts, probs)


def unpermute(rows, row_of, slot_of, sizes, probs=None):
    """Adds the rows of each token, weighted by probs [T, k] if given."""
    return ops.unpermute(rows, row_of, slot_of, sizes, probs)


class WgradQueue:
    """Weight gradients of mlp() that backward has left for later, oldest first."""

    def __init__(self):
        self.entries = deque()

    def __len__(self):
        return len(self.entries)

    def run(self):
        """Computes the gradients of the oldest mlp(): added to its main_grads, or to w1.grad and w2.grad."""
        if not self.entries:
            raise RuntimeError("gmm: the queue is empty: run() once for each backward")
        weights, grads, main, entry, deferred, _ = self.entries.popleft()
        if entry is not None:
            ops.mlp_wgrad(*grads, entry, deferred)
        for w, g in zip(weights, grads):
            if g is not None and not main:
                w.grad = g if w.grad is None else w.grad + g


class _Delayed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w1, w2, routing, probs, b1, b2, settings, random, main_grads, queue):
        if all(ctx.needs_input_grad[1:3]) and (main_grads[0] is None) != (main_grads[1] is None):
            raise RuntimeError("gmm: main_grad1 and main_grad2 go together where both weights are trained")
        x = x.contiguous()  # which the entry of the queue refers to
        y, saved = ops.mlp_fwd(x, w1, w2, routing, probs, b1, b2, *settings)
        ctx.save_for_backward(ops.kept_x(x, settings[2]), w1, w2, routing, saved, probs, b1, b2, random)
        ctx.weights, ctx.settings, ctx.main_grads, ctx.queue = (w1, w2), settings, main_grads, queue
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        x, w1, w2, routing, saved, probs, b1, b2, random = ctx.saved_tensors
        need_dx, *needed = ctx.needs_input_grad[:3]
        grads = [m if need else None for m, need in zip(ctx.main_grads, needed)]
        main = any(g is not None for g in grads)
        if not main:
            grads = [torch.empty_like(w) if need else None for w, need in zip((w1, w2), needed)]
        dy, random = dy.contiguous(), None if random is None else random.contiguous()
        operands = (dy, x, w1, w2, routing, saved, probs, b1, b2, random, *ctx.settings, need_dx)
        if any(needed):
            dx, dprobs, db1, db2, deferred, entry = ops.mlp_bwd_delayed(*grads, *operands, main)
        else:  # both are frozen: run() finds an entry that does nothing
            dx, _, _, dprobs, db1, db2 = ops.mlp_bwd(*operands, False, False)
            deferred = entry = None
        # what the entry refers to lives until run()
        alive = (x, dy, saved, random)
        ctx.queue.entries.append((ctx.weights, grads, main, entry, deferred, alive))
        return (dx if need_dx else None, None, None, None, dprobs if probs is not None else None,
                db1 if b1 is not None else None, db2 if b2 is not None else None, None, None, None, None)


class GroupedLinear(torch.nn.Module):
    """One linear layer per expert. Where the weight has a main_grad, backward adds to it."""

    def __init__(self, experts, in_features, out_features, bias=False, device=None, dtype=None):
        super().__init__()
        like = {"device": device, "dtype": dtype}
        self.weight = torch.nn.Parameter(torch.empty(experts, out_features, in_features, **like))
        self.bias = torch.nn.Parameter(torch.zeros(experts, out_features, **like)) if bias else None
        torch.nn.init.normal_(self.weight, std=in_features ** -0.5)

    def forward(self, x, splits):
        return linear(x, self.weight, splits, self.bias, getattr(self.weight, "main_grad", None))


class MoE(torch.nn.Module):
    """A mixture-of-experts layer: router, experts, the sum of their outputs. forward(x [T, hidden]) gives the output
    and the router's two losses. With delay_wgrad, backward_dw() computes the experts' weight gradients, once for each
    backward."""

    def __init__(self, hidden, ffn, experts, k, act="swiglu", recipe="none", save="preact", score="softmax",
                 normalize=True, aux_coeff=0.0, z_coeff=0.0, delay_wgrad=False, device=None, dtype=None):
        super().__init__()
        like = {"device": device, "dtype": dtype}
        self.router = torch.nn.Linear(hidden, experts, bias=False, **like)
        self.w1 = torch.nn.Parameter(torch.empty(experts, (1 + fake.gated(act)) * ffn, hidden, **like))
        self.w2 = torch.nn.Parameter(torch.empty(experts, hidden, ffn, **like))
        for w in (self.w1, self.w2):
            torch.nn.init.normal_(w, std=w.shape[2] ** -0.5)
        self.k, self.act, self.recipe, self.save = k, act, recipe, save
        self.route = {"score": score, "normalize": normalize, "aux_coeff": aux_coeff, "z_coeff": z_coeff}
        self.queue = WgradQueue() if delay_wgrad else None
        seeds = torch.randint(2 ** 31, (4,)) * torch.tensor([1, 0, 1, 0]) if recipe == "nvfp4" else None
        self.register_buffer("random", seeds.to(device) if seeds is not None else None, persistent=False)

    def forward(self, x):
        if self.random is not None and self.training:
            self.random[1::2] += 1  # other draws for each micro-batch
        probs, indices, _, losses = topk(self.router(x), self.k, **self.route)
        main_grads = tuple(getattr(w, "main_grad", None) for w in (self.w1, self.w2))
        random = self.random.clone() if self.random is not None else None
        y = moe(x, self.w1, self.w2, indices, probs, act=self.act, recipe=self.recipe, save=self.save, random=random,
                main_grads=main_grads, queue=self.queue)
        return y, losses

    def backward_dw(self):
        if self.queue is not None:
            self.queue.run()
