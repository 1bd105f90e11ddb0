"""Holds our codes against the PyPI package ml_dtypes: python3 ml_dtypes_check.py PROGRAM (built from codes.c).

ml_dtypes rounds to nearest even and does not saturate, so the saturating encoders are compared on clamped inputs and
the others on all of them. Its E8M0 rounds to nearest, ours up: those are compared where the input is a power of two.
"""
import subprocess
import sys

import ml_dtypes
import numpy as np


def same(what, got, want, where):
    bad = np.flatnonzero((got != want) & where)
    if bad.size:
        i = int(bad[0])
        sys.exit(f"{what}: {bad.size} differ, the first at {i}: {got[i]:#x} instead of {want[i]:#x}")
    return int(np.count_nonzero(where))


def main():
    raw = subprocess.run([sys.argv[1]], check=True, capture_output=True).stdout
    bits = np.arange(65536, dtype=np.uint16)
    inputs = [bits.view(ml_dtypes.bfloat16).astype(np.float32), bits.view(np.float16).astype(np.float32)]
    codes = np.frombuffer(raw[: 12 * 65536], np.uint8).reshape(2, 65536, 6)
    values = np.frombuffer(raw[12 * 65536 :], np.float32).reshape(4, 256)
    count = 0
    np.seterr(all="ignore")
    for x, code in zip(inputs, codes):
        number = ~np.isnan(x)
        for k, (dtype, largest) in enumerate(
            [(ml_dtypes.float8_e4m3fn, 448.0), (ml_dtypes.float8_e5m2, 57344.0), (ml_dtypes.float4_e2m1fn, 6.0)]
        ):
            clamped = np.clip(x, -largest, largest).astype(dtype).view(np.uint8)
            count += same(dtype.__name__, code[:, k], clamped, number)
        for k, dtype in enumerate([ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2]):
            want = x.astype(dtype).view(np.uint8)
            count += same(dtype.__name__ + " unsaturated", code[:, 3 + k], want, number)
            if not np.all(code[~number, 3 + k] == 0x7F):
                sys.exit(f"{dtype.__name__}: a NaN is not 7f")
        mantissa, exponent = np.frexp(np.abs(x))
        power = number & (mantissa == 0.5) & (exponent - 1 >= -127)
        want = np.abs(x).astype(ml_dtypes.float8_e8m0fnu).view(np.uint8)
        count += same("float8_e8m0fnu", code[:, 5], want, power)
    every = np.arange(256, dtype=np.uint8)
    for k, dtype in enumerate(
        [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float4_e2m1fn, ml_dtypes.float8_e8m0fnu]
    ):
        want = (every & 15 if k == 2 else every).view(dtype).astype(np.float32)
        nan = np.isnan(want)
        if not np.array_equal(np.isnan(values[k]), nan):
            sys.exit(f"{dtype.__name__}: other codes are NaN")
        count += same(dtype.__name__ + " values", values[k].view(np.uint32), want.view(np.uint32), ~nan)
    print(f"{count} codes and values equal those of ml_dtypes {ml_dtypes.__version__}")


main()
