#!/usr/bin/env python3
"""A layer of experts with its router, forward and backward on a GPU: gmm_torch beside SonicMoE, if it is installed, in
one process on the same data, alternating.

usage: layer_peers.py [--rows=TEXT] [--rounds=20] [--all-configs] [--csv] [--kernels]
--rows: configurations whose name contains the text; --all-configs: SonicMoE's autotuner tries all of its tiles;
--kernels: to stderr the microseconds of each kernel in a pass, by torch's profiler, without those below 1% of the sum

Contenders: `gmm` is gmm_torch.moe, `calls` are permute, mlp and unpermute of gmm_torch; both add weight gradients into
fp32. `sonic` stores weight gradients in bf16. All compute the router's product, softmax of the top k, and their
gradients. TFLOP/s count the experts' products alone, at the median time of the rounds."""
import argparse
import statistics
import sys

import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

import gmm_torch

# tokens, hidden, ffn, experts, experts per token: those of layer_bench
SHAPES = ((32768, 4096, 1024, 128, 8), (32768, 1536, 256, 128, 8), (32768, 4096, 256, 256, 16),
          (32768, 7168, 2048, 32, 4), (24576, 4096, 512, 128, 8), (40960, 768, 256, 128, 8))
LIKE = {"device": "cuda", "dtype": torch.bfloat16}
PASSES = ("forward", "backward")
SLEEP = 40_000_000  # cycles of the GPU, about 20 ms, in which the host enqueues forward and backward


def name_of(tokens, hidden, ffn, experts, k):
    return f"{tokens} x {hidden}, {experts} of ffn {ffn}, top {k}"


def sonic_layer(all_configs):
    """SonicMoE's layer, or None with the reason on stderr. Its autotuner compiles each candidate for about 5 s, so that
    by default it gets the tiles with 128 and 192 columns, in clusters along m."""
    try:
        from quack import gemm_config
        everything = gemm_config.get_all_configs

        def some(*args, **kwargs):
            return [c for c in everything(*args, **kwargs) if c.device_capacity == 9 and c.tile_n in (128, 192)
                    and c.cluster_m == 2 and not c.swap_ab]
        if not all_configs:
            gemm_config.get_all_configs = some  # before quack.gemm_interface reads it
        from sonicmoe.functional import moe_TC_softmax_topk_layer
        return moe_TC_softmax_topk_layer
    except ImportError as e:
        print(f"layer_peers: without SonicMoE: {e}", file=sys.stderr)
        return None


class Layer:
    """The operands of a configuration, and the ways to run it: forward(way) gives the output, backward(dy) gradients
    of all operands. Random logits spread the tokens over the experts nearly evenly."""

    def __init__(self, tokens, hidden, ffn, experts, k, sonic):
        torch.manual_seed(1)
        self.k, self.sonic = k, sonic
        self.x = torch.randn(tokens, hidden, **LIKE).requires_grad_()
        self.router = (torch.randn(experts, hidden, **LIKE) * hidden ** -0.5).requires_grad_()
        self.w1 = (torch.randn(experts, 2 * ffn, hidden, **LIKE) * hidden ** -0.5).requires_grad_()
        self.w2 = (torch.randn(experts, hidden, ffn, **LIKE) * ffn ** -0.5).requires_grad_()
        self.main_grads = tuple(torch.zeros_like(w, dtype=torch.float32) for w in (self.w1, self.w2))
        # SonicMoE's rows of gate and linear layer alternate
        self.w1_rows = None
        if sonic:
            halves = self.w1.detach().unflatten(1, (2, ffn))
            self.w1_rows = halves.transpose(1, 2).reshape(self.w1.shape).contiguous().requires_grad_()
        self.dy = torch.randn(tokens, hidden, **LIKE)
        self.y = None
        top = F.linear(self.x, self.router).topk(k + 1).values
        self.unique = top[:, k - 1] > top[:, k]  # tokens whose k experts no two ways can choose differently

    def forward(self, way):
        for t in (self.x, self.router, self.w1, self.w2, self.w1_rows):
            if t is not None:
                t.grad = None
        if way == "sonic":
            w1, w2 = self.w1_rows.permute(1, 2, 0), self.w2.permute(1, 2, 0)
            stream = torch.cuda.current_stream().cuda_stream
            self.y = self.sonic(self.x, self.router, w1, None, w2, None, self.k, stream, "swiglu")[0]
            return
        probs, indices, _, _ = gmm_torch.topk(F.linear(self.x, self.router), self.k, normalize=True)
        if way == "gmm":
            self.y = gmm_torch.moe(self.x, self.w1, self.w2, indices, probs, main_grads=self.main_grads)
            return
        rows, row_probs, row_of, slot_of, sizes = gmm_torch.permute(self.x, indices, self.w1.shape[0], probs)
        out = gmm_torch.mlp(rows, self.w1, self.w2, sizes, row_probs, main_grads=self.main_grads)
        self.y = gmm_torch.unpermute(out, row_of, slot_of, sizes)

    def backward(self, dy):
        self.y.backward(dy)
        self.y = None

    def gradients(self, way):
        """Those of x, router, w1 and w2, in fp32 and gmm's order of rows."""
        if way != "sonic":
            return [self.x.grad.float(), self.router.grad.float(), *self.main_grads]
        w1 = self.w1_rows.grad.unflatten(1, (-1, 2)).transpose(1, 2).reshape(self.w1.shape)
        return [t.float() for t in (self.x.grad, self.router.grad, w1, self.w2.grad)]


def reference(layer, tokens):
    """Output rows of some tokens in fp64. Experts are those of the bf16 logits that all ways compute."""
    logits = F.linear(layer.x, layer.router)[tokens].double()
    scores, experts = logits.topk(layer.k)
    y = torch.zeros(len(tokens), layer.x.shape[1], device="cuda", dtype=torch.float64)
    with torch.no_grad():
        for i, (x, weights, chosen) in enumerate(zip(layer.x[tokens].double(), scores.softmax(-1), experts)):
            for weight, e in zip(weights, chosen):
                gate, linear = (layer.w1[e].double() @ x).chunk(2)
                y[i] += weight * (layer.w2[e].double() @ (F.silu(gate) * linear))
    return y


def difference(got, want):
    return float((got.double() - want.double()).norm() / want.double().norm())


def check(layer, ways):
    """Ends the program where outputs miss fp64, or gradients those of the first way. bf16 keeps 8 bits. Tokens with
    equal logits, of which ways may choose another expert, are left out: their dy is 0."""
    tokens = layer.unique.nonzero().flatten()[:32]
    want, first = reference(layer, tokens), None
    dy = layer.dy * layer.unique[:, None]
    for way in ways:
        for g in layer.main_grads:
            g.zero_()
        layer.forward(way)
        errors = [difference(layer.y.detach()[tokens], want)]
        layer.backward(dy)
        gradients = [g.clone() for g in layer.gradients(way)]
        first = first or gradients
        errors += [difference(g, w) for g, w in zip(gradients, first)]
        if not all(e < 0.02 for e in errors):
            sys.exit(f"layer_peers: {way} is wrong: y, dx, drouter, dw1, dw2 differ by {errors}")


def measure(layer, ways, rounds):
    """Milliseconds of the GPU for each way and pass: the median of alternating rounds after three warm-ups."""
    times = {(way, p): [] for way in ways for p in PASSES}
    for i in range(rounds + 3):
        for way in ways:
            events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
            torch.cuda._sleep(SLEEP)
            events[0].record()
            layer.forward(way)
            events[1].record()
            layer.backward(layer.dy)
            events[2].record()
            if i >= 3 and events[0].query():
                sys.exit(f"layer_peers: {way}: the host took longer than SLEEP, so that its time would count")
            events[2].synchronize()
            if i >= 3:
                for p, (a, b) in zip(PASSES, zip(events, events[1:])):
                    times[way, p].append(a.elapsed_time(b))
    return {key: statistics.median(t) for key, t in times.items()}


def print_kernels(layer, ways, repeats=5):
    """Kernels of a pass in the order of their time, of which the sum is printed first. A kernel that starts early
    (programmatic dependent launch) counts the wait for its predecessor, so that the sum may exceed the pass."""
    for way in ways:
        times = {p: {} for p in PASSES}
        for _ in range(repeats):
            for p, run in zip(PASSES, (lambda: layer.forward(way), lambda: layer.backward(layer.dy))):
                with profile(activities=[ProfilerActivity.CUDA]) as profiler:
                    run()
                    torch.cuda.synchronize()
                for e in profiler.key_averages():
                    times[p][e.key] = times[p].get(e.key, 0) + e.self_device_time_total / repeats
        for p in PASSES:
            total = sum(times[p].values())
            print(f"  {way} {p}: kernels {total:.0f} us", file=sys.stderr)
            for name, t in sorted(times[p].items(), key=lambda item: -item[1]):
                if t > 0.01 * total:
                    print(f"  {t:10.1f} {name[:120]}", file=sys.stderr)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", default="")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--all-configs", action="store_true")
    parser.add_argument("--csv", action="store_true")
    parser.add_argument("--kernels", action="store_true")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("layer_peers: no GPU")
    sonic = sonic_layer(options.all_configs)
    ways = ("gmm", "calls", "sonic") if sonic else ("gmm", "calls")
    print(f"# {torch.cuda.get_device_name()}; torch {torch.__version__}; TFLOP/s; ratios: time of another over gmm's")
    head = ["layer"] + [f"{p} {w}" for p in PASSES for w in ways] + [f"{p} gmm/{w}" for p in PASSES for w in ways[1:]]
    print(",".join(head) if options.csv else f"{head[0]:38s}" + "".join(f"{h:>20s}" for h in head[1:]))
    for shape in SHAPES:
        if options.rows not in name_of(*shape):
            continue
        tokens, hidden, ffn, _, k = shape
        layer = Layer(*shape, sonic)
        check(layer, ways)
        ms = measure(layer, ways, options.rounds)
        flops = 6 * tokens * k * hidden * ffn
        row = [f"{flops * (1 + (p == 'backward')) / ms[w, p] / 1e9:.1f}" for p in PASSES for w in ways]
        row += [f"{ms[w, p] / ms['gmm', p]:.3f}" for p in PASSES for w in ways[1:]]
        name = name_of(*shape)
        print(",".join([f'"{name}"'] + row) if options.csv else f"{name:38s}" + "".join(f"{v:>20s}" for v in row),
              flush=True)
        if options.kernels:
            print_kernels(layer, ways)
        del layer
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
