#!/usr/bin/env python3
"""Draws the 16-bit products of a file of tests/results: TFLOP/s of gmm and its peers, by model and tokens per expert.

    results_svg.py RESULTS.txt > PICTURE.svg

Read from the file: the table whose head begins with "shape    split    op", the GPU ("# NVIDIA H200, ...") and the
commit ("benchmarks of COMMIT"). Of the table: forward of FC1, and its weight gradient in bf16.
"""
import re
import sys

SHAPES = (("dsv3", "DeepSeek-V3"), ("mixtral", "Mixtral 8x7B"), ("qwen3", "Qwen3-30B-A3B"), ("gptoss", "gpt-oss-20b"))
SPLITS = (("64", "64"), ("300", "300"), ("512", "512"), ("1024", "1k"), ("4096", "4k"), ("zipf512", "Zipf"))
PANELS = (("fc1f", "Forward of FC1"), ("fc1w", "Weight gradient of FC1, stored in bf16"))
BARS = (("gmm", "#1f77b4"), ("torch._grouped_mm", "#ff7f0e"), ("best of four cuBLAS methods", "#b0b0b0"))
LEFT, TOP, HIGH, GAP, BAR, MOST = 52, 72, 150, 62, 9, 800


def read(path):
    """(GPU, commit, {(shape, split, op): (gmm, torch, best of cuBLAS)}) of the first run of the benchmark."""
    text = open(path, encoding="utf-8").read()
    commit = re.search(r"benchmarks of ([0-9a-f]{7,40})\b", text)
    gpu = re.search(r"^# (NVIDIA [^,\n]+),", text, flags=re.M)
    head = re.search(r"^shape +split +op +out +gmm +dense +loop1 +loop4 +grouped +strided +torch .*$", text, flags=re.M)
    if not commit or not gpu or not head:
        sys.exit(f"{path}: names no GPU, no commit, or has no table of products")
    rows = {}
    for line in text[head.end() + 1:].split("\n"):
        f = line.split()
        if len(f) < 12:
            break
        if f[3] == "bf16":
            numbers = [0.0 if v == "-" else float(v) for v in f[4:11]]  # gmm dense loop1 loop4 grouped strided torch
            rows[f[0], f[1], f[2]] = (numbers[0], numbers[6], max(numbers[2:6]))
    return gpu.group(1), commit.group(1), rows


def panel(out, rows, op, title, top):
    def y(value):
        return top + HIGH - HIGH * value / MOST

    out.append(f'<text x="{LEFT}" y="{top - 8}" font-weight="bold">{title}</text>')
    group = len(BARS) * BAR + 6
    block = len(SPLITS) * group + 14
    for value in range(0, MOST + 1, 200):
        out.append(f'<path d="M{LEFT} {y(value):.1f}H{LEFT + len(SHAPES) * block - 14}" stroke="#ddd"/>')
        out.append(f'<text x="{LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{value}</text>')
    for s, (shape, name) in enumerate(SHAPES):
        x = LEFT + s * block
        out.append(f'<text x="{x + (block - 14) / 2:.1f}" y="{top + HIGH + 30}" text-anchor="middle">{name}</text>')
        for i, (split, label) in enumerate(SPLITS):
            at = x + i * group
            out.append(f'<text x="{at + 3 * BAR / 2:.1f}" y="{top + HIGH + 14}" text-anchor="middle" '
                       f'fill="#555">{label}</text>')
            for b, value in enumerate(rows[shape, split, op]):
                out.append(f'<rect x="{at + b * BAR}" y="{y(value):.1f}" width="{BAR - 1}" '
                           f'height="{top + HIGH - y(value):.1f}" fill="{BARS[b][1]}"/>')
    return LEFT + len(SHAPES) * block


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    gpu, commit, rows = read(sys.argv[1])
    body = []
    for i, (op, title) in enumerate(PANELS):
        wide = panel(body, rows, op, title, TOP + i * (HIGH + GAP))
    high = TOP + len(PANELS) * (HIGH + GAP) + 2
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide}" height="{high}" font-family="sans-serif" '
           'font-size="11">', f'<rect width="{wide}" height="{high}" fill="white"/>',
           f'<text x="{LEFT}" y="20" font-size="13">TFLOP/s, bf16 grouped products, one {gpu}, gmm at commit {commit}'
           '</text>']
    x = LEFT
    for name, color in BARS:
        out.append(f'<rect x="{x}" y="31" width="10" height="10" fill="{color}"/>')
        out.append(f'<text x="{x + 14}" y="40">{name}</text>')
        x += 36 + 6 * len(name)
    out += body
    out.append(f'<text x="{LEFT}" y="{high - 8}" fill="#555">Tokens per expert; Zipf: 512 on average, shared out '
               'as 1/rank, every fifth expert empty.</text>')
    print("\n".join(out + ["</svg>"]))


main()
