#!/usr/bin/env python3
"""gpu_bench with torch._grouped_mm, torch._scaled_grouped_mm and, if installed, DeepGEMM as more contenders, in one
process on the same data.

usage: peers.py build/libgmm_bench.so [--kernels] [options of gpu_bench]
--kernels: to stderr, what each contender launches in its first call of a row, and what prepares operands or copies the
result behind it, which is not timed
"""
import ctypes
import sys

import torch
from torch.autograd import DeviceType

try:
    import deep_gemm
    deep_gemm.set_pdl(True)  # programmatic dependent launch: its kernels begin before their predecessors end
except (ImportError, AttributeError) as error:  # AttributeError: of a version without set_pdl
    deep_gemm = None
    print(f"peers.py: without DeepGEMM: {error}", file=sys.stderr)


class Call(ctypes.Structure):
    """bench_call of gpu_bench.cu"""
    _fields_ = [(n, ctypes.c_int32) for n in ("op", "f32", "first", "check", "groups", "fp8", "peer")] + \
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
    return (lambda: out.add_(run()), None) if c.f32 else (run, out.copy_)


def contender(c):
    """The call that a torch user would make for this row, and a function that copies its result to the benchmark's
    memory, or None where the call writes there itself."""
    bf16, g, t, n, k = torch.bfloat16, c.groups, c.rows, c.n, c.k
    ends = tensor(c.ends, (g,), torch.int32)
    if c.op == 0:
        x, w = tensor(c.x, (t, k), bf16), tensor(c.w, (g, n, k), bf16).transpose(-2, -1)
        return lambda: torch._grouped_mm(x, w, offs=ends), tensor(c.out, (t, n), bf16).copy_
    if c.op == 1:
        dy, w = tensor(c.dy, (t, n), bf16), tensor(c.w, (g, n, k), bf16)
        return lambda: torch._grouped_mm(dy, w, offs=ends), tensor(c.out, (t, k), bf16).copy_
    dy, x = tensor(c.dy, (t, n), bf16).t(), tensor(c.x, (t, k), bf16)
    out = tensor(c.out, (g, n, k), torch.float32 if c.f32 else bf16)
    if c.f32:
        return lambda: out.add_(torch._grouped_mm(dy, x, offs=ends)), None
    return lambda: torch._grouped_mm(dy, x, offs=ends), out.copy_


class Padded:
    """Rows of a token matrix as DeepGEMM wants them: each group begins at a multiple of 128 rows. Where groups do not
    end there, rows are copied to a padded matrix, which is not timed. layout: the group of each row, -1 in padding. The
    other layout, of the groups' ends, excludes some of DeepGEMM's tiles and is slower."""

    def __init__(self, c):
        ends = tensor(c.ends, (c.groups,), torch.int32).tolist()
        self.sizes = [e - s for s, e in zip([0] + ends[:-1], ends)]
        self.aligned = [(n + 127) // 128 * 128 for n in self.sizes]
        begins = [sum(self.aligned[:g]) for g in range(c.groups)]
        self.rows, self.copied = sum(self.aligned), self.sizes != self.aligned
        self.index = torch.cat([torch.arange(n, device="cuda") + b for n, b in zip(self.sizes, begins)])
        self.layout = torch.full((self.rows,), -1, dtype=torch.int32, device="cuda")
        self.layout[self.index] = torch.repeat_interleave(torch.arange(c.groups, dtype=torch.int32, device="cuda"),
                                                          torch.tensor(self.sizes, device="cuda"))
        self.ks = torch.tensor(self.aligned, dtype=torch.int32, device="cuda")

    def pad(self, m):
        if not self.copied:
            return m
        to = torch.zeros((self.rows, m.shape[1]), dtype=m.dtype, device="cuda")
        to.view(torch.int8)[self.index] = m.view(torch.int8)
        return to

    def m_grouped(self, function, a, b, out):
        """The call of a product whose groups are rows of a and of the result, and what copies that to out."""
        d = torch.full((self.rows, out.shape[1]), float("nan"), dtype=out.dtype, device="cuda") if self.copied else out
        return (lambda: function(a, b, d, self.layout),
                (lambda _: out.copy_(d[self.index])) if self.copied else None)


def deepgemm_contender(c):
    """The call that a user of DeepGEMM would make for this row; None for bf16 weight gradients, which it only adds."""
    bf16, f32, e4m3, g, n, k = torch.bfloat16, torch.float32, torch.float8_e4m3fn, c.groups, c.n, c.k
    within, across = (k, n) if c.op == 0 else (n, k)
    if c.op == 2:
        if not c.f32:
            return None
        dw = tensor(c.out, (g, n, k), f32)
    else:
        out = tensor(c.out, (c.rows, across), bf16)
    if c.op == 2 and c.fp8:  # operands are padded: lines along the tokens, from which each group becomes a matrix
        ends = tensor(c.ends, (g,), torch.int32).tolist()
        ks = [e - s for s, e in zip([0] + ends[:-1], ends)]
        sizes = torch.tensor(ks, dtype=torch.int32, device="cuda")

        def operand(codes, scales, lines):
            m = tensor(codes, (lines, c.padded), e4m3)
            groups = torch.cat([m[:, e - s:e].reshape(-1) for s, e in zip(ks, ends)])
            blocks = tensor(scales, ((c.padded + 127) // 128, (lines + 3) // 4 * 4), f32)
            return groups, blocks[:ends[-1] // 128, :lines].t()
        a, b = operand(c.a, c.a_scale, n), operand(c.b, c.b_scale, k)
        return lambda: deep_gemm.k_grouped_fp8_gemm_nt_contiguous(a, b, dw, ks, sizes, c=dw), None
    p = Padded(c)
    if c.op == 2:
        dy, x = p.pad(tensor(c.dy, (c.rows, n), bf16)), p.pad(tensor(c.x, (c.rows, k), bf16))
        return lambda: deep_gemm.k_grouped_bf16_gemm_tn_contiguous(dy, x, dw, p.aligned, p.ks, c=dw), None
    if c.fp8:
        a, blocks = p.pad(tensor(c.a, (c.rows, within), e4m3)), (within + 127) // 128
        # a group's scales are a matrix of blocks by padded rows
        parts = tensor(c.a_scale, (blocks * p.rows,), f32).split([blocks * rows for rows in p.aligned])
        sa = torch.cat([s.view(blocks, -1) for s in parts if len(s)], 1).t()
        b = tensor(c.b, (g, across, within), e4m3)
        sb = tensor(c.b_scale, (g, (across + 127) // 128, (blocks + 3) // 4 * 4), f32)[:, :, :blocks].contiguous()
        return p.m_grouped(deep_gemm.m_grouped_fp8_gemm_nt_contiguous, (a, sa), (b, sb), out)
    a, w = p.pad(tensor(c.x if c.op == 0 else c.dy, (c.rows, within), bf16)), tensor(c.w, (g, n, k), bf16)
    function = deep_gemm.m_grouped_bf16_gemm_nt_contiguous if c.op == 0 else \
        deep_gemm.m_grouped_bf16_gemm_nn_contiguous
    return p.m_grouped(function, a, w, out)


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
            if c.peer and deep_gemm is None:
                return 1
            if c.first:
                torch.cuda.set_stream(torch.cuda.ExternalStream(c.stream))
                describe = deepgemm_contender if c.peer else scaled_contender if c.fp8 else contender
                state.pop((c.peer, c.fp8), None)  # frees its copies before others are made
                state[c.peer, c.fp8] = describe(c)
            if state[c.peer, c.fp8] is None:
                return 1
            run, collect = state[c.peer, c.fp8]
            result = run()
            if c.check and collect is not None:
                collect(result)
            return 0
        except Exception as e:  # left out of this row
            print(f"peers.py: {'deepgemm' if c.peer else 'torch'}: {e}", file=sys.stderr)
            return 1

    torch.cuda.init()
    library = ctypes.CDLL(sys.argv[1])
    callback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(Call))(call)
    watch = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p)(watcher())
    version = torch.__version__ + (f"; DeepGEMM {deep_gemm.__version__}" if deep_gemm else "")
    args = [b"gpu_bench"] + [a.encode() for a in sys.argv[2:] if a != "--kernels"]
    argv = (ctypes.c_char_p * (len(args) + 1))(*args, None)
    return library.gmm_bench(len(args), argv, callback, version.encode(),
                             watch if "--kernels" in sys.argv else None)


if __name__ == "__main__":
    with torch.no_grad():
        sys.exit(main())
