"""What the torch operator costs beside gmm alone and torch._grouped_mm on a GPU: python3 examples/torch/tests/bench.py

Prints, for a forward grouped linear layer in bf16: microseconds of the host per call (operator and C call, on shapes so
small that the GPU is not the limit; in a captured graph), milliseconds of the GPU at models' shapes, and time and peak
memory of a training step of the expert MLP and of a layer beside composed torch."""
import functools
import sys
import time

import torch
import torch.nn.functional as F

import gmm_torch

if not torch.cuda.is_available():
    sys.exit("bench.py: no GPU")
ops = torch.ops.gmm
LIKE = {"device": "cuda", "dtype": torch.bfloat16}


def operands(experts, rows, k, n):
    return (torch.randn(experts * rows, k, **LIKE), torch.randn(experts, n, k, **LIKE),
            torch.full((experts,), rows, device="cuda", dtype=torch.int32))


def host_us(call, n=300):
    """Microseconds of the host per call: the best of 7 series."""
    best = float("inf")
    for _ in range(7):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call(n)
        best = min(best, time.perf_counter() - start)
    torch.cuda.synchronize()
    return best / n * 1e6


def gpu_ms(calls, n=20):
    """Milliseconds of the GPU per call, of calls that alternate: the median."""
    times = [[] for _ in calls]
    for i in range(n + 3):
        for c, out in zip(calls, times):
            a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            a.record(), c(), b.record()
            b.synchronize()
            if i >= 3:
                out.append(a.elapsed_time(b))
    return [sorted(t)[len(t) // 2] for t in times]


def repeat(function):
    def run(n):
        for _ in range(n):
            function()
    return run


def peak(step):
    step()
    torch.cuda.synchronize(), torch.cuda.empty_cache(), torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    return (torch.cuda.max_memory_allocated() - before) / 2 ** 20


print(torch.cuda.get_device_name(), "torch", torch.__version__)
x, w, splits = operands(8, 8, 64, 64)
y = x.new_empty(64, 64)
c = host_us(lambda n: ops.linear_repeat(y, x, w, splits, n))
rows = [("gmm_linear_fwd in C", c)]
with torch.no_grad():
    rows.append(("torch.ops.gmm.linear_fwd", host_us(repeat(lambda: ops.linear_fwd(x, w, splits)))))
    rows.append(("gmm_torch.linear, no gradients", host_us(repeat(lambda: gmm_torch.linear(x, w, splits)))))
    offs = splits.cumsum(0, dtype=torch.int32)
    rows.append(("torch._grouped_mm", host_us(repeat(lambda: torch._grouped_mm(x, w.transpose(1, 2), offs=offs)))))
wg = w.clone().requires_grad_()
rows.append(("gmm_torch.linear, recording gradients", host_us(repeat(lambda: gmm_torch.linear(x, wg, splits)))))
print("host, us per call:")
for name, us in rows:
    print(f"  {name:40s} {us:7.1f}   {us - c:+6.1f}")

x, w, splits = operands(8, 8, 64, 64)
graphs = []
with torch.no_grad():
    for call in (lambda n: ops.linear_repeat(y, x, w, splits, n), repeat(lambda: ops.linear_fwd(x, w, splits))):
        call(1)
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            call(100)
a, b = gpu_ms([g.replay for g in graphs])
print(f"GPU, us per call in a captured graph of 100: C {a * 10:.2f}, torch.ops.gmm.linear_fwd {b * 10:.2f}")
print("GPU, ms per call (experts, rows per expert, K, N):          gmm  _grouped_mm")
for shape in ((8, 512, 4096, 14336), (32, 512, 7168, 4096), (128, 512, 2048, 1536)):
    x, w, splits = operands(*shape)
    offs = splits.cumsum(0, dtype=torch.int32)
    with torch.no_grad():
        a, b = gpu_ms([lambda: ops.linear_fwd(x, w, splits),
                       lambda: torch._grouped_mm(x, w.transpose(1, 2), offs=offs)])
    print(f"  {str(shape):54s} {a:7.3f} {b:7.3f}")
    del x, w

def composed_mlp(x, w1, w2, splits, probs=None):
    offs = splits.cumsum(0, dtype=torch.int32)
    gate, up = torch._grouped_mm(x, w1.transpose(1, 2), offs=offs).chunk(2, dim=1)
    h = F.silu(gate) * up
    if probs is not None:
        h = h * probs[:, None].to(h.dtype)
    return torch._grouped_mm(h, w2.transpose(1, 2), offs=offs)


def composed_layer(x, w1, w2, indices, probs):
    order = indices.flatten().argsort(stable=True)
    token, splits = order // indices.shape[1], torch.bincount(indices.flatten(), minlength=w1.shape[0])
    return torch.zeros_like(x).index_add(0, token, composed_mlp(x[token], w1, w2, splits, probs.flatten()[order]))


def separate_calls(x, w1, w2, indices, probs):
    rows, row_probs, row_of, slot_of, sizes = gmm_torch.permute(x, indices, w1.shape[0], probs)
    return gmm_torch.unpermute(gmm_torch.mlp(rows, w1, w2, sizes, row_probs), row_of, slot_of, sizes)


def training_step(title, leaves, rest, ways):
    """Forward and backward: time and peak memory of each way, and how far its gradients are from the last way's."""
    dy = torch.randn_like(leaves[0])

    def step_of(function):
        def step():
            for t in leaves:
                t.grad = None
            function(*leaves, *rest).backward(dy)
        return step
    steps, gradients = [step_of(function) for _, function in ways], []
    times = gpu_ms(steps)
    for step in steps:
        step()
        gradients.append([t.grad.float() for t in leaves])
    print(f"{title}, forward and backward:          ms  peak MiB beyond the operands  gradients differ by")
    for (name, _), step, ms, got in zip(ways, steps, times, gradients):
        difference = max(float((g - w).norm() / w.norm()) for g, w in zip(got, gradients[-1]))
        print(f"  {name:36s} {ms:9.3f} {peak(step):29.0f} {difference:20.1e}")


def leaves(rows, experts, hidden, ffn):
    scaled = (torch.randn(experts, 2 * ffn, hidden, **LIKE) * 0.02, torch.randn(experts, hidden, ffn, **LIKE) * 0.02)
    return [t.requires_grad_() for t in (torch.randn(rows, hidden, **LIKE), *scaled)]


training_step("MLP", leaves(8192, 8, 4096, 7168), [torch.full((8,), 1024, device="cuda", dtype=torch.int32)],
              (("gmm_torch.mlp", gmm_torch.mlp), ("composed torch", composed_mlp)))
indices = torch.rand(16384, 64, device="cuda").topk(8, dim=1).indices.int()
training_step("layer", leaves(16384, 64, 2048, 1024), [indices, torch.rand(16384, 8, device="cuda")],
              (("gmm_torch.moe", gmm_torch.moe),
               ("gmm_torch.moe, save preact_and_rows", functools.partial(gmm_torch.moe, save="preact_and_rows")),
               ("permute, mlp, unpermute of gmm_torch", separate_calls),
               ("composed torch", composed_layer)))
