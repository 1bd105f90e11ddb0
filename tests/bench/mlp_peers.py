#!/usr/bin/env python3
"""mlp_bench with an expert MLP composed of torch's operations as one more contender, in one process on the same data.

usage: mlp_peers.py build/libgmm_mlp_bench.so [--kernels[=names]] [options of mlp_bench]
--kernels: microseconds of each contender by group of kernels, as torch's profiler sees them
--kernels=names: to stderr also those of each kernel
"""
import ctypes
import re
import sys

import torch
from torch.autograd import DeviceType

from peers import tensor


class Call(ctypes.Structure):
    """mlp_call of mlp_bench.cu"""
    _fields_ = [(n, ctypes.c_int32) for n in ("phase", "first", "check", "groups")] + \
               [(n, ctypes.c_int64) for n in ("tokens", "hidden", "ffn")] + \
               [(n, ctypes.c_void_p) for n in ("x", "w1", "w2", "prob", "dy", "y", "dx", "dprob", "dw1", "dw2",
                                               "ends", "stream")] + \
               [(n, ctypes.c_int64) for n in ("saved", "workspace")]


class Composed:
    """The MLP of a torch user: grouped products, and the activation in element-wise operations. Forward keeps FC1's
    output z and FC2's input h. torch._grouped_mm cannot accumulate, so that a second kernel adds into fp32."""

    def __init__(self, c):
        bf16, f32, t, g, k, f = torch.bfloat16, torch.float32, c.tokens, c.groups, c.hidden, c.ffn
        self.x, self.dy = tensor(c.x, (t, k), bf16), tensor(c.dy, (t, k), bf16)
        self.w1, self.w2 = tensor(c.w1, (g, 2 * f, k), bf16), tensor(c.w2, (g, k, f), bf16)
        self.dw1, self.dw2 = tensor(c.dw1, (g, 2 * f, k), f32), tensor(c.dw2, (g, k, f), f32)
        self.y, self.dx = tensor(c.y, (t, k), bf16), tensor(c.dx, (t, k), bf16)
        self.dprob = tensor(c.dprob, (t,), f32)
        self.prob = tensor(c.prob, (t,), f32).to(bf16).unsqueeze(1)
        self.ends = tensor(c.ends, (g,), torch.int32)
        self.ffn = f
        self.z = self.h = None
        self.before = torch.cuda.memory_allocated()

    def forward(self, c):
        self.z = self.h = None
        z = torch._grouped_mm(self.x, self.w1.transpose(-2, -1), offs=self.ends)
        h = torch.nn.functional.silu(z[:, :self.ffn])
        h *= z[:, self.ffn:]
        h *= self.prob
        y = torch._grouped_mm(h, self.w2.transpose(-2, -1), offs=self.ends)
        self.z, self.h = z, h
        if c.check:
            self.y.copy_(y)
            c.saved = z.nbytes + h.nbytes

    def backward(self, c):
        a, b = self.z[:, :self.ffn], self.z[:, self.ffn:]
        if c.check:
            torch.cuda.reset_peak_memory_stats()
        dh = torch._grouped_mm(self.dy, self.w2, offs=self.ends)
        self.dw2.add_(torch._grouped_mm(self.dy.t(), self.h, offs=self.ends))
        silu = torch.nn.functional.silu(a)
        dprob = (dh * silu).mul_(b).sum(-1, dtype=torch.float32)
        dh *= self.prob
        dz = torch.empty_like(self.z)
        torch.mul(dh, silu, out=dz[:, self.ffn:])
        del silu
        dh *= b
        torch.ops.aten.silu_backward.grad_input(dh, a, grad_input=dz[:, :self.ffn])
        del dh
        self.dw1.add_(torch._grouped_mm(dz.t(), self.x, offs=self.ends))
        peak = torch.cuda.max_memory_allocated()
        dx = torch._grouped_mm(dz, self.w1, offs=self.ends)
        if c.check:
            self.dx.copy_(dx)
            self.dprob.copy_(dprob)
            c.workspace = max(0, peak - self.before - c.saved)


GROUPS = ("gemm", "wgrad", "act", "cast", "amax", "expand", "splits", "copies", "other")  # as in mlp_bench.cu
RULES = [(g, re.compile(r)) for g, r in (
    ("splits", r"gmm_split_offsets|prepare_grouped_gemm"),
    ("amax", r"gmm_(quantize_)?amax"),
    ("cast", r"gmm_(cast|quantize|transpose)_"),
    ("expand", r"gmm_(expand|dequantize)_"),
    ("wgrad", r"gmm_gemm_wgrad|CUDAFunctor(OnSelf|OnOther)?_add"),
    ("gemm", r"gmm_gemm_(fwd|dgrad)"),
    ("product", r"gmm_gemm_|[Gg]emm|GEMM|cutlass|nvjet"),
    ("copies", r"Memcpy|Memset|gmm_fill_words|gmm_copy|gmm_convert|copy_kernel"),
    ("act", r"gmm_act_|at::native"),
    ("other", r""))]


def group_of(name):
    return next(g for g, rule in RULES if rule.search(name))


def watcher(names):
    """Callback around the calls that are profiled: writes microseconds of a call by group of kernels. Names of FP8
    products do not tell what they compute; the second and third product of a backward are the weight gradients."""
    seen = {}

    def watch(row, contender, backward, calls, us):
        if not us:
            seen["profiler"] = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU,
                                                                  torch.profiler.ProfilerActivity.CUDA])
            seen["profiler"].start()
            return
        seen["profiler"].stop()
        title = f"{row.decode()} {contender.decode()} {'bwd' if backward else 'fwd'}"
        events = [(e.time_range.start, e.name, e.time_range.elapsed_us()) for e in seen["profiler"].events()
                  if e.device_type == DeviceType.CUDA]
        events.sort(key=lambda e: e[0])
        found = [[group_of(name), name, t] for _, name, t in events]
        products = [e for e in found if e[0] == "product"]
        ordered = backward and len(products) == 4 * calls
        if backward and products and not ordered:
            print(f"{title}: {len(products)} products of {calls} calls, not 4 each: gemm has all", file=sys.stderr)
        for i, e in enumerate(products):
            e[0] = "wgrad" if ordered and i % 4 in (1, 2) else "gemm"
        sums, kernels = dict.fromkeys(GROUPS, 0.0), {}
        for group, name, t in found:
            sums[group] += t / calls
            count, total = kernels.get((group, name), (0, 0.0))
            kernels[group, name] = (count + 1, total + t)
        for i, group in enumerate(GROUPS):
            us[i] = sums[group]
        if not found:
            print(f"{title}: the profiler saw no kernel", file=sys.stderr)
        for (group, name), (count, total) in kernels.items():
            if names or group == "other":
                print(f"{title}: {group}: {count / calls:g} x, {total / calls:.1f} us: {name}", file=sys.stderr)

    return watch


def main():
    state = {}

    def call(pointer):
        c = pointer.contents
        try:
            if c.phase == 2:
                state.clear()
                torch.cuda.empty_cache()
                return 0
            if c.first:
                state.clear()
                torch.cuda.set_stream(torch.cuda.ExternalStream(c.stream))
                state["mlp"] = Composed(c)
            mlp = state["mlp"]
            if c.phase == 0:
                mlp.forward(c)
            else:
                mlp.backward(c)
            return 0
        except Exception as e:  # left out of this row
            print(f"mlp_peers.py: torch: {e}", file=sys.stderr)
            return 1

    def safely(*args):
        try:
            watch(*args)
        except Exception as e:  # the figures of this contender stay 0
            print(f"mlp_peers.py: profiler: {e}", file=sys.stderr)

    options = sys.argv[2:]
    kernels = [a for a in options if a in ("--kernels", "--kernels=names")]
    watch = watcher("--kernels=names" in kernels)
    library = ctypes.CDLL(sys.argv[1])
    peer_type = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(Call))
    watch_type = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int, ctypes.c_int,
                                  ctypes.POINTER(ctypes.c_double))
    args = [b"mlp_bench"] + [a.encode() for a in options if a not in kernels]
    argv = (ctypes.c_char_p * (len(args) + 1))(*args, None)
    if "--list" not in options:
        torch.cuda.init()
    return library.gmm_mlp_bench(len(args), argv, peer_type(call), torch.__version__.encode(),
                                 watch_type(safely) if kernels else watch_type())


if __name__ == "__main__":
    with torch.no_grad():
        sys.exit(main())
