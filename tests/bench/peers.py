#!/usr/bin/env python3
"""gpu_bench with torch._grouped_mm and torch._scaled_grouped_mm as more contenders, in one process on the same data.

usage: peers.py build/libgmm_bench.so [--kernels] [options of gpu_bench]
--kernels: to stderr, what each contender launches in its first call of a row (torch's result is copied behind it)
"""
import ctypes
import sys

import torch
from torch.autograd import DeviceType


class Call(ctypes.Structure):
    """bench_call of gpu_bench.cu"""
    _fields_ = [(n, ctypes.c_int32) for n in ("op", "f32", "first", "check", "groups", "fp8")] + \
               [(n, ctypes.c_int64) for n in ("rows", "n", "k", "padded")] + \
               [(n, ctypes.c_void_p) for n in ("x", "w", "dy", "out", "a", "b", "a_scale", "b_scale",
                                           "ends", "stream")]


class Memory:
    def __init__(self, address, shape, typestr):
        self.__cuda_array_interface__ = {"data": (address, False), "shape": shape, "typestr": typestr, "version": 3}


def tensor(address, shape, dtype):
    """A tensor over memory of the benchmark. bf16 and FP8, which the array interface lacks, are passed as integers."""
    typestr = {torch.bfloat16: "<i2", torch.float8_e4m3fn: "|i1", torch.float32: "<f4", torch.int32: "<i4"}[dtype]
    t = torch.as_tensor(Memory(address, shape, typestr), device="cuda")
    assert t.data_ptr() == address
    return t.view(dtype)


def scaled_contender(c):
    """The same in FP8 with a scale per row. wgrad: rows of a group are padded with zeros to 128, and so are ends."""
    e4m3, f32, bf16 = torch.float8_e4m3fn, torch.float32, torch.bfloat16
    g, t, n, k, fast = c.groups, c.rows, c.n, c.k, c.fp8 == 2
    if c.op == 2:
        a, b = tensor(c.a, (n, c.padded), e4m3), tensor(c.b, (k, c.padded), e4m3).t()
        shape, scales = (g, n, k), ((g * n,), (g * k,))
    else:
        within, across = (k, n) if c.op == 0 else (n, k)
        a, b = tensor(c.a, (t, within), e4m3), tensor(c.b, (g, across, within), e4m3).transpose(-2, -1)
        shape, scales = (t, across), ((t,), (g, across))
    sa, sb = tensor(c.a_scale, scales[0], f32), tensor(c.b_scale, scales[1], f32)
    ends = tensor(c.ends, (g,), torch.int32)
    out = tensor(c.out, shape, f32 if c.f32 else bf16)

    def run():
        return torch._scaled_grouped_mm(a, b, sa, sb, offs=ends, out_dtype=bf16, use_fast_accum=fast)
    return (lambda: out.add_(run()), None) if c.f32 else (run, out)


def contender(c):
    """The call that a torch user would make for this row."""
    bf16, g, t, n, k = torch.bfloat16, c.groups, c.rows, c.n, c.k
    ends = tensor(c.ends, (g,), torch.int32)
    if c.op == 0:
        x, w = tensor(c.x, (t, k), bf16), tensor(c.w, (g, n, k), bf16).transpose(-2, -1)
        return lambda: torch._grouped_mm(x, w, offs=ends), tensor(c.out, (t, n), bf16)
    if c.op == 1:
        dy, w = tensor(c.dy, (t, n), bf16), tensor(c.w, (g, n, k), bf16)
        return lambda: torch._grouped_mm(dy, w, offs=ends), tensor(c.out, (t, k), bf16)
    dy, x = tensor(c.dy, (t, n), bf16).t(), tensor(c.x, (t, k), bf16)
    out = tensor(c.out, (g, n, k), torch.float32 if c.f32 else bf16)
    if c.f32:
        return lambda: out.add_(torch._grouped_mm(dy, x, offs=ends)), None
    return lambda: torch._grouped_mm(dy, x, offs=ends), out


def watcher():
    """Callback before and after a contender's first call: prints the kernels that the profiler saw in between."""
    seen = {}

    def watch(row, contender):
        if row is not None:
            seen["name"] = f"{row.decode()} {contender.decode()}"
            seen["profiler"] = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU,
                                                                  torch.profiler.ProfilerActivity.CUDA])
            seen["profiler"].start()
            return
        seen["profiler"].stop()
        kernels = {}
        for e in seen["profiler"].events():
            if e.device_type == DeviceType.CUDA:
                count, us = kernels.get(e.name, (0, 0.0))
                kernels[e.name] = (count + 1, us + e.time_range.elapsed_us())
        for name, (count, us) in kernels.items():
            print(f"{seen['name']}: {count} x, {us:.1f} us: {name}", file=sys.stderr)
        if not kernels:
            print(f"{seen['name']}: the profiler saw no kernel", file=sys.stderr)

    return watch


def main():
    state = {}

    def call(pointer):
        c = pointer.contents
        try:
            if c.first:
                torch.cuda.set_stream(torch.cuda.ExternalStream(c.stream))
                state[c.fp8] = scaled_contender(c) if c.fp8 else contender(c)
            run, out = state[c.fp8]
            result = run()
            if c.check and out is not None:
                out.copy_(result)
            return 0
        except Exception as e:  # left out of this row
            print(f"peers.py: torch: {e}", file=sys.stderr)
            return 1

    torch.cuda.init()
    library = ctypes.CDLL(sys.argv[1])
    callback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(Call))(call)
    watch = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p)(watcher())
    args = [b"gpu_bench"] + [a.encode() for a in sys.argv[2:] if a != "--kernels"]
    argv = (ctypes.c_char_p * (len(args) + 1))(*args, None)
    return library.gmm_bench(len(args), argv, callback, torch.__version__.encode(),
                             watch if "--kernels" in sys.argv else None)


if __name__ == "__main__":
    with torch.no_grad():
        sys.exit(main())
