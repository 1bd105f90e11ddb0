#!/usr/bin/env python3
"""gpu_bench with torch._grouped_mm as one more contender, in one process and on the same data.

usage: peers.py build/libgmm_bench.so [options of gpu_bench]
"""
import ctypes
import sys

import torch


class Call(ctypes.Structure):
    """bench_call of gpu_bench.cu"""
    _fields_ = [(n, ctypes.c_int32) for n in ("op", "f32", "first", "check", "groups", "reserved")] + \
               [(n, ctypes.c_int64) for n in ("rows", "n", "k")] + \
               [(n, ctypes.c_void_p) for n in ("x", "w", "dy", "out", "ends", "stream")]


class Memory:
    def __init__(self, address, shape, typestr):
        self.__cuda_array_interface__ = {"data": (address, False), "shape": shape, "typestr": typestr, "version": 3}


def tensor(address, shape, dtype):
    """A tensor over memory of the benchmark. The array interface has no bf16, so it travels as int16."""
    typestr = {torch.bfloat16: "<i2", torch.float32: "<f4", torch.int32: "<i4"}[dtype]
    t = torch.as_tensor(Memory(address, shape, typestr), device="cuda")
    assert t.data_ptr() == address
    return t.view(dtype)


def contender(c):
    """What a torch user would call for this row."""
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


def main():
    state = {}

    def call(pointer):
        c = pointer.contents
        try:
            if c.first:
                torch.cuda.set_stream(torch.cuda.ExternalStream(c.stream))
                state["run"], state["out"] = contender(c)
            result = state["run"]()
            if c.check and state["out"] is not None:
                state["out"].copy_(result)
            return 0
        except Exception as e:  # left out of this row
            print(f"peers.py: torch: {e}", file=sys.stderr)
            return 1

    torch.cuda.init()
    library = ctypes.CDLL(sys.argv[1])
    callback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(Call))(call)
    args = [b"gpu_bench"] + [a.encode() for a in sys.argv[2:]]
    argv = (ctypes.c_char_p * (len(args) + 1))(*args, None)
    return library.gmm_bench(len(args), argv, callback, torch.__version__.encode())


if __name__ == "__main__":
    with torch.no_grad():
        sys.exit(main())
