#!/usr/bin/env python3
"""Draws a picture of a file of tests/results.

    results_svg.py products|layers RESULTS.txt > PICTURE.svg

products: TFLOP/s of 16-bit products of gmm and its peers, by model and tokens per expert: forward of FC1, and its
    weight gradient in bf16. Read from the table whose head begins with "shape    split    op".
layers: expert MLPs beside torch, from the table of mlp_peers.py, and whole layers, from that of layer_bench.
The file names the GPU ("# NVIDIA H200, ...") and the commits ("benchmarks of COMMIT", "MLP benchmarks of COMMIT",
"layer_bench --ms=200 at COMMIT").
"""
import re
import sys

LEFT, TOP, HIGH, GAP = 52, 72, 150, 62


class Panel:
    """Bars in blocks, one block per name, of groups, one group per label: [(name, [(label, values)])]. A name may have
    two lines."""

    def __init__(self, title, bars, width, step, most, blocks):
        self.title, self.bars, self.width, self.step, self.most, self.blocks = title, bars, width, step, most, blocks

    def draw(self, out, top):
        bar = self.width
        group = len(self.bars) * bar + 6

        def y(value):
            return top + HIGH - HIGH * value / self.most

        out.append(f'<text x="{LEFT}" y="{top - 8}" font-weight="bold">{self.title}</text>')
        wide = LEFT + sum(len(groups) * group + 14 for _, groups in self.blocks)
        for tick in range(int(self.most / self.step) + 1):
            value = tick * self.step
            out.append(f'<path d="M{LEFT} {y(value):.1f}H{wide - 14}" stroke="#ddd"/>')
            out.append(f'<text x="{LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{value:g}</text>')
        x = LEFT
        for name, groups in self.blocks:
            for i, line in enumerate(name.split("\n")):
                out.append(f'<text x="{x + len(groups) * group / 2:.1f}" y="{top + HIGH + 30 + 13 * i}" '
                           f'text-anchor="middle">{line}</text>')
            for i, (label, values) in enumerate(groups):
                at = x + i * group
                out.append(f'<text x="{at + (group - 6) / 2:.1f}" y="{top + HIGH + 14}" text-anchor="middle" '
                           f'fill="#555">{label}</text>')
                for b, value in enumerate(values):
                    out.append(f'<rect x="{at + b * bar}" y="{y(value):.1f}" width="{bar - 1}" '
                               f'height="{top + HIGH - y(value):.1f}" fill="{self.bars[b][1]}"/>')
            x += len(groups) * group + 14
        return wide


def picture(title, panels, note):
    """The panels below each other. Bars of the same name have the same color in all of them."""
    body, legend = [], {}
    wide = max(panel.draw(body, TOP + i * (HIGH + GAP)) for i, panel in enumerate(panels))
    high = TOP + len(panels) * (HIGH + GAP) + 2 + 13 * ("\n" in panels[-1].blocks[0][0])
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide}" height="{high}" font-family="sans-serif" '
           'font-size="11">', f'<rect width="{wide}" height="{high}" fill="white"/>',
           f'<text x="{LEFT}" y="20" font-size="13">{title}</text>']
    for panel in panels:
        legend.update(panel.bars)
    x = LEFT
    for name, color in legend.items():
        out.append(f'<rect x="{x}" y="31" width="10" height="10" fill="{color}"/>')
        out.append(f'<text x="{x + 14}" y="40">{name}</text>')
        x += 36 + 6 * len(name)
    out += body
    out.append(f'<text x="{LEFT}" y="{high - 8}" fill="#555">{note}</text>')
    return "\n".join(out + ["</svg>"])


def found(pattern, text, path, what):
    match = re.search(pattern, text, flags=re.M)
    if not match:
        sys.exit(f"{path}: has no {what}")
    return match


def rows_after(head, text, least):
    """The words of the lines behind the head, up to the first line that has fewer of them."""
    for line in text[head.end() + 1:].split("\n"):
        words = line.split()
        if len(words) < least:
            return
        yield words


MODELS = (("dsv3", "DeepSeek-V3"), ("mixtral", "Mixtral 8x7B"), ("qwen3", "Qwen3-30B-A3B"), ("gptoss", "gpt-oss-20b"))
BLUE, SKY, TEAL, ORANGE, GRAY = "#1f77b4", "#7fb8e0", "#2a9d8f", "#ff7f0e", "#b0b0b0"


def products(path, text, gpu):
    commit = found(r"(?<!MLP )benchmarks of ([0-9a-f]{7,40})\b", text, path, "commit of the benchmarks").group(1)
    splits = (("64", "64"), ("300", "300"), ("512", "512"), ("1024", "1k"), ("4096", "4k"), ("zipf512", "Zipf"))
    bars = (("gmm", BLUE), ("torch._grouped_mm", ORANGE), ("best of four cuBLAS methods", GRAY))
    head = found(r"^shape +split +op +out +gmm +dense +loop1 +loop4 +grouped +strided +torch .*$", text, path,
                 "table of products")
    table = {}
    for f in rows_after(head, text, 12):
        if f[3] == "bf16":
            numbers = [0.0 if v == "-" else float(v) for v in f[4:11]]  # gmm dense loop1 loop4 grouped strided torch
            table[f[0], f[1], f[2]] = (numbers[0], numbers[6], max(numbers[2:6]))
    panels = [Panel(title, bars, 9, 200, 800,
                    [(name, [(label, table[shape, split, op]) for split, label in splits]) for shape, name in MODELS])
              for op, title in (("fc1f", "Forward of FC1"), ("fc1w", "Weight gradient of FC1, stored in bf16"))]
    return picture(f"TFLOP/s, bf16 grouped products, one {gpu}, gmm at commit {commit}", panels,
                   "Tokens per expert; Zipf: 512 on average, shared out as 1/rank, every fifth expert empty.")


def mlps(path, text):
    """Speed over torch of forward and backward."""
    commit = found(r"MLP benchmarks of ([0-9a-f]{7,40})\b", text, path, "commit of the table of MLPs").group(1)
    bars = (("gmm, bf16", BLUE), ("gmm, FP8 in blocks", TEAL), ("gmm, FP8 per tensor", SKY))
    head = found(r"^row +bf16 +delayed +current +block .* torch$", text, path, "table of MLPs")
    end = found(r"^Speed against gmm's bf16", text, path, "means of MLPs")
    table, row = {}, None
    for f in (line.split() for line in text[head.end() + 1:end.start()].split("\n")):
        if f[1:2] == ["f+b"]:
            row = f[0]
        elif row and f[:1] == ["torch"]:  # bf16; weights in a cache: delayed, current, block
            table[row] = (float(f[1]), float(f[4]), float(f[3]))
    names, blocks = dict(MODELS, odd="odd shape"), []
    for row in table:
        shape, rows, split = row.split("/")
        if split == "even":
            blocks.append((f"{names[shape]}, {rows}", [(s, table[f"{shape}/{rows}/{s}"]) for s in ("even", "zipf")]))
    return Panel(f"Expert MLP, forward and backward, rows: time of torch over time of gmm, commit {commit}", bars, 14,
                 0.5, 2.5, blocks)


def layers(path, text, gpu):
    bars = (("gmm, bf16", BLUE), ("gmm, FP8 in blocks", TEAL), ("separate calls of gmm, bf16", GRAY))
    at = found(r"layer_bench --ms=200 at ([0-9a-f]{7,40})\b", text, path, "table of layers").group(1)
    table = {}
    for recipe, head in (("bf16", r"^tokens x hidden, experts +fwd .*$"), ("fp8", r"^with --recipe=fp8-block.*$")):
        for line in text[found(head, text, path, "layers").end() + 1:].split("\n"):
            f = re.match(r"(\d+ x \d+), (\d+) of ffn (\d+, top \d+) +(.*)$", line)
            if not f:
                break
            table[recipe, f"{f[1]}\n{f[2]} of {f[3]}"] = [float(v) for v in f[4].split()[:5]]
    blocks = []
    for recipe, shape in table:
        if recipe == "bf16":
            plain, fp8 = table[recipe, shape], table["fp8", shape]  # forward, of separate calls, ratio; backward, ...
            blocks.append((shape, [(label, (plain[i], fp8[i], plain[i + 1])) for label, i in (("fwd", 0), ("bwd", 3))]))
    title = f"Layer, TFLOP/s: tokens x hidden, experts of ffn, experts per token, commit {at}"
    layer = Panel(title, bars, 14, 200, 1000, blocks)
    return picture(f"Expert MLPs and layers, one {gpu}", [mlps(path, text), layer],
                   "torch: torch._grouped_mm and element-wise operations in bf16. Weight gradients: added into fp32.")


def main():
    kinds = {"products": products, "layers": layers}
    if len(sys.argv) != 3 or sys.argv[1] not in kinds:
        sys.exit(__doc__)
    path = sys.argv[2]
    text = open(path, encoding="utf-8").read()
    gpu = found(r"^# (NVIDIA [^,\n]+),", text, path, "GPU").group(1)
    print(kinds[sys.argv[1]](path, text, gpu))


main()
