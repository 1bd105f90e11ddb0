"""What the torch operator costs beside gmm alone and torch._grouped_mm on a GPU: python3 examples/torch/tests/bench.py

Prints, for a forward grouped linear layer in bf16: microseconds of the host per call (operator and C call, on shapes so
small that the GPU is not the limit; in a captured graph), milliseconds of the GPU at models' shapes, and peak memory of
a training step of the expert MLP beside composed torch."""
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

experts, tokens, hidden, ffn = 8, 1024, 4096, 7168
x, w1, splits = operands(experts, tokens, hidden, 2 * ffn)
w1, w2 = w1.mul_(0.02).requires_grad_(), torch.randn(experts, hidden, ffn, **LIKE).mul_(0.02).requires_grad_()
x.requires_grad_()
offs = splits.cumsum(0, dtype=torch.int32)
dy = torch.randn_like(x)


def with_gmm():
    x.grad = w1.grad = w2.grad = None
    gmm_torch.mlp(x, w1, w2, splits).backward(dy)


def composed():
    x.grad = w1.grad = w2.grad = None
    gate, up = torch._grouped_mm(x, w1.transpose(1, 2), offs=offs).chunk(2, dim=1)
    torch._grouped_mm(F.silu(gate) * up, w2.transpose(1, 2), offs=offs).backward(dy)


a, b = gpu_ms([with_gmm, composed])
with_gmm()
grads = [t.grad.clone() for t in (x, w1, w2)]
composed()
print("MLP, forward and backward:                             gmm  composed")
print(f"  ms {a:54.3f} {b:9.3f}")
print(f"  peak MiB beyond the operands {peak(with_gmm):28.0f} {peak(composed):9.0f}")
for name, g, t in zip(("x", "w1", "w2"), grads, (x, w1, w2)):
    difference = float((g - t.grad).float().norm() / t.grad.float().norm())
    print(f"  gradient of {name} differs by {difference:.1e} of its norm")
