#!/usr/bin/env python3
"""Draws the pictures of the guide: `python3 docs/guide/drawings.py [NAME...]` writes docs/guide/NAME.svg.

Needs drawsvg (`pip install drawsvg`, version 2). A text that is wider than its rectangle is an error. Colours follow
the reader's light or dark scheme.
"""
import os
import sys

import drawsvg

LIGHT = {"ground": "#ffffff", "text": "#1f2328", "line": "#57606a", "grey": "#eaeef2", "greyline": "#8c959f",
         "blue": "#d3e5ff", "blueline": "#2f62b0", "orange": "#ffe4c7", "orangeline": "#a8590c", "green": "#d6f2d8",
         "greenline": "#2a7330"}
DARK = {"ground": "#0d1117", "text": "#e6edf3", "line": "#9aa4af", "grey": "#21262d", "greyline": "#6e7681",
        "blue": "#17345f", "blueline": "#79aef5", "orange": "#57340f", "orangeline": "#f0a45a", "green": "#173f1d",
        "greenline": "#6cc775"}


def style(colors):
    rules = [".ground{fill:%(ground)s}", "text{fill:%(text)s;font-family:sans-serif}",
             ".code{font-family:monospace}", ".bold{font-weight:bold}", ".line{stroke:%(line)s;fill:none}",
             ".head{fill:%(line)s}"]
    rules += [".%s{fill:%%(%s)s;stroke:%%(%sline)s}" % (c, c, c) for c in ("grey", "blue", "orange", "green")]
    return "".join(rules) % colors


class Picture:
    def __init__(self, width, height):
        self.svg = drawsvg.Drawing(width, height)
        self.svg.append_css(style(LIGHT) + "@media (prefers-color-scheme:dark){" + style(DARK) + "}")
        self.svg.append(drawsvg.Rectangle(0, 0, width, height, class_="ground"))

    def text(self, x, y, words, size=14, anchor="start", kind=""):
        self.svg.append(drawsvg.Text(words, size, x, y, text_anchor=anchor, class_=kind or None))

    def rect(self, x, y, width, height, color, words="", size=14, kind=""):
        self.svg.append(drawsvg.Rectangle(x, y, width, height, class_=color))
        lines = words.split("\n") if words else []
        for i, line in enumerate(lines):
            if len(line) * size * (0.61 if kind == "code" else 0.57) > width - 4:
                sys.exit("%r does not fit into %d" % (line, width))
            at = y + height / 2 + (i - (len(lines) - 1) / 2) * size * 1.3 + size * 0.35
            self.text(x + width / 2, at, line, size, "middle", kind)

    def arrow(self, *points):
        path = drawsvg.Path(class_="line", stroke_width=1.5)
        path.M(*points[:2])
        for i in range(2, len(points), 2):
            path.L(*points[i:i + 2])
        self.svg.append(path)
        x0, y0, x, y = points[-4:]
        length = ((x - x0) ** 2 + (y - y0) ** 2) ** 0.5
        dx, dy = (x - x0) / length, (y - y0) / length
        self.svg.append(drawsvg.Lines(x, y, x - 9 * dx - 4 * dy, y - 9 * dy + 4 * dx, x - 9 * dx + 4 * dy,
                                      y - 9 * dy - 4 * dx, close=True, class_="head"))

    def line(self, *points):
        path = drawsvg.Path(class_="line")
        path.M(*points[:2])
        for i in range(2, len(points), 2):
            path.L(*points[i:i + 2])
        self.svg.append(path)


def layer():
    p = Picture(860, 230)
    steps = ("router\ntop-k", "permute", "FC1", "activation", "FC2", "unpermute")
    for i, words in enumerate(steps):
        p.rect(20 + 140 * i, 60, 110, 60, "blue" if words.startswith("FC") else "grey", words)
        if i:
            p.arrow(20 + 140 * i - 29, 90, 20 + 140 * i - 2, 90)
    p.text(20, 30, "A mixture-of-experts layer, and the pages of this guide", 15, kind="bold")
    for x, words in ((180, "rows of experts: groups"), (355, ""), (635, "")):
        p.line(x, 122, x, 140)
        p.text(x, 158, words, 13, "middle")
    p.line(355, 140, 635, 140)
    p.text(495, 158, "the experts: mlp", 13, "middle")
    p.text(495, 178, "formats: recipes.  Gradients: main_grad.  Several GPUs: parallelism.", 13, "middle")
    p.text(20, 212, "Around it: vendoring, CUDA graphs, troubleshooting, benchmarks", 13)
    return p


def groups():
    p = Picture(860, 300)
    colors = ["blue"] * 2 + ["green"] * 3 + ["grey"] * 3
    p.text(20, 30, "x: 8 rows in one buffer, the capacity", 15, kind="bold")
    for r, color in enumerate(colors):
        p.rect(20 + 90 * r, 120, 84, 44, color, "row %d" % r)
    for x, color, words in ((68, "blue", "weight of\nexpert 0"), (338, "orange", "weight of\nexpert 1"),
                            (608, "green", "weight of\nexpert 2")):
        p.rect(x, 50, 120, 44, color, words, 13)
    p.arrow(128, 96, 108, 118)
    p.arrow(606, 90, 360, 118)
    p.text(470, 80, "no rows", 13)
    for x0, x1, words in ((20, 194, "group 0: 2 rows"), (200, 464, "group 2: 3 rows"), (470, 734, "tail: never read")):
        p.line(x0, 172, x0, 180, x1, 180, x1, 172)
        p.text((x0 + x1) / 2, 198, words, 13, "middle")
    p.text(20, 240, "the same split, in device memory:", 13)
    for y, form, values in ((240, "sizes", "2 0 3"), (264, "offsets", "0 2 2 5")):
        p.text(260, y, form, 13)
        p.text(320, y, values, 14, kind="code")
    return p


def mlp():
    p = Picture(860, 300)
    p.text(20, 28, "Forward from left to right, backward from right to left", 15, kind="bold")
    for y, steps in ((50, ("x", "FC1\nw1", "activation", "FC2\nw2", "y")),
                     (200, ("dx", "FC1\ndx, dw1", "activation", "FC2\ndgrad, dw2", "dy"))):
        for i, words in enumerate(steps):
            x = 20 + 172 * i
            p.rect(x, y, 130, 52, ("green", "blue", "grey", "blue", "green")[i], words)
            if i:
                p.arrow(*((x - 40, y + 26, x - 2, y + 26) if y == 50 else (x - 2, y + 26, x - 40, y + 26)))
    p.rect(192, 132, 302, 38, "orange", "saved: FC1's output")
    p.arrow(257, 104, 257, 130)
    p.arrow(429, 172, 429, 198)
    p.arrow(100, 104, 215, 198)
    p.text(20, 158, "x itself, or saved", 13)
    p.text(20, 284, "The workspace is free again after each call. What is saved lives from forward to backward.", 13)
    return p


def main_grad():
    p = Picture(860, 250)
    p.text(20, 30, "The sum of a step's weight gradients, in fp32", 15, kind="bold")
    for i, (words, effect) in enumerate((("micro-batch 0\nx, dy", "overwrite = 1: stores"),
                                         ("micro-batch 1\nx, dy", "main_grad = 1: adds"),
                                         ("micro-batch 2\nx, dy", "main_grad = 1: adds"))):
        x = 20 + 215 * i
        p.rect(x, 55, 150, 52, "blue", words)
        p.arrow(x + 75, 109, x + 75, 166)
        p.text(x + 84, 142, effect, 12)
    p.rect(20, 168, 640, 44, "orange", "main_grad [G][N, K], fp32")
    p.arrow(662, 190, 708, 190)
    p.rect(710, 168, 130, 44, "green", "optimizer")
    p.text(20, 236, "The first micro-batch does not read main_grad. The others read it and write it once.", 13)
    return p


def parallelism():
    p = Picture(860, 330)
    p.text(20, 28, "Weights of two experts, A and B: blue is on rank 0, orange is on rank 1", 15, kind="bold")
    for i, (name, words) in enumerate((("EP", "a rank has whole experts;\ntokens move to them"),
                                       ("ETP", "a rank has a part of each;\noutputs are added up"),
                                       ("GTP", "a rank stores a part of each;\nparts are gathered before use"))):
        x = 20 + 285 * i
        p.text(x, 62, name, 16, kind="bold")
        for e in range(2):
            at = x + 110 * e
            if name == "EP":
                p.rect(at, 75, 90, 90, ("blue", "orange")[e], "AB"[e])
            else:
                p.rect(at, 75, 90, 45, "blue", "AB"[e] + "0")
                p.rect(at, 120, 90, 45, "orange", "AB"[e] + "1")
        p.text(x, 192, words.split("\n")[0], 13)
        p.text(x, 210, words.split("\n")[1], 13)
        p.text(x, 244, "rank 0 multiplies:", 13)
        if name == "EP":
            p.rect(x, 255, 60, 60, "blue", "A")
        elif name == "ETP":
            p.rect(x, 255, 60, 30, "blue", "A0")
            p.rect(x + 75, 255, 60, 30, "blue", "B0")
        else:
            for e in range(2):
                p.rect(x + 75 * e, 255, 60, 30, "blue", "AB"[e] + "0")
                p.rect(x + 75 * e, 285, 60, 30, "orange", "AB"[e] + "1")
            p.text(x + 145, 290, "whole experts,", 12)
            p.text(x + 145, 306, "own tokens", 12)
    return p


def recipes():
    p = Picture(860, 260)
    p.text(20, 28, "A colour is one scale, for 256 columns of four rows", 15, kind="bold")
    for i, (name, width, together) in enumerate((("FP8 delayed, current", 256, 1), ("FP8 block", 128, 0),
                                                 ("MXFP8", 32, 0), ("NVFP4", 16, 0))):
        x = 20 + 212 * i
        p.text(x, 60, name, 14, kind="bold")
        step = 192 * width // 256
        for r in range(4):
            for b in range(256 // width):
                color = "blue" if together else ("blue", "orange", "green")[(b + r) % 3]
                p.rect(x + b * step, 72 + 24 * r, step, 24 if together else 20, color)
    for i, words in enumerate(("1 x all columns", "1 x 128", "1 x 32", "1 x 16")):
        p.text(20 + 212 * i, 190, ("all rows and columns" if i == 0 else words), 13)
    p.text(20, 222, "Weights: FP8 block has one scale for 128 x 128 elements, NVFP4 for 16 x 16.", 13)
    p.text(20, 242, "A smaller block suits its values better, and needs more scales.", 13)
    return p


def cuda_graphs():
    p = Picture(860, 250)
    p.text(20, 28, "The graph holds addresses. The sizes behind an address may change.", 15, kind="bold")
    p.rect(20, 60, 150, 56, "grey", "capture once\ngmm_linear_fwd")
    p.arrow(172, 88, 226, 88)
    p.rect(228, 60, 120, 56, "blue", "CUDA graph")
    for i, sizes in enumerate(("2 2 2", "0 8 0", "0 0 0")):
        x = 410 + 150 * i
        p.arrow(*((350, 88, x - 2, 88) if i == 0 else (x - 30, 88, x - 2, 88)))
        p.rect(x, 60, 118, 56, "green", "replay %d" % (i + 1))
        p.rect(x + 14, 160, 90, 36, "orange", sizes, kind="code")
        p.arrow(x + 59, 158, x + 59, 118)
    p.text(228, 172, "group sizes", 13)
    p.text(228, 190, "in device memory", 13)
    p.text(20, 232, "Nothing is captured again. The host never reads the sizes.", 13)
    return p


def troubleshooting():
    p = Picture(860, 330)
    p.text(20, 28, "Where to look", 15, kind="bold")
    rows = (("the call returns\nan error status", "gmm_last_error(ctx)", "argument, value, rule and shapes"),
            ("the status is fine,\nrows are wrong", "*gmm_groups.fault", "faulty sizes, indices, addresses"),
            ("it is slow", "gmm_describe(...)", "the engine, and why others declined"),
            ("a CUDA error\nappears later", "config.verify = 1", "the call that caused it"))
    for i, (symptom, place, says) in enumerate(rows):
        y = 52 + 68 * i
        p.rect(20, y, 170, 50, "orange", symptom)
        p.arrow(192, y + 25, 258, y + 25)
        p.rect(260, y, 230, 50, "blue", place, kind="code")
        p.arrow(492, y + 25, 548, y + 25)
        p.rect(550, y, 290, 50, "green", says)
    return p


def bench():
    p = Picture(860, 300)
    p.text(20, 28, "TFLOP/s: more is faster", 15, kind="bold")
    cells = (("shape", "dsv3"), ("split", "512"), ("op", "fc1f"), ("out", "bf16"), ("gmm", "647.6"), ("dense", "638.6"),
             ("loop1", "562.5"), ("loop4", "599.7"), ("grouped", "254.2"), ("strided", "642.2"), ("torch", "612.4"),
             ("gmm/best", "1.01"))
    x, at = 20, {}
    for name, value in cells:
        width = 76 if name == "gmm/best" else 66
        color = {"gmm": "blue", "gmm/best": "green", "dense": "grey"}.get(name, "orange" if len(at) > 5 else "grey")
        p.text(x + width / 2, 62, name, 13, "middle")
        p.rect(x, 72, width, 34, color, value, 13, "code")
        at[name] = x + width / 2
        x += width + 3
    notes = (("split", 262, "tokens of each expert"), ("op", 232, "FC1, forward"), ("gmm", 202, "this library"),
             ("dense", 172, "one large product: a ceiling, not a peer"))
    for name, y, words in notes:
        p.line(at[name], 108, at[name], y - 5, at[name] + 8, y - 5)
        p.text(at[name] + 12, y, words, 13)
    p.line(at["loop1"] - 30, 112, at["loop1"] - 30, 118, at["torch"] + 30, 118, at["torch"] + 30, 112)
    p.text((at["loop1"] + at["torch"]) / 2, 136, "peers: cuBLAS in four ways, torch", 13, "middle")
    p.line(at["gmm/best"], 108, at["gmm/best"], 206)
    p.text(840, 222, "gmm over the fastest peer:", 13, "end")
    p.text(840, 240, "above 1 gmm is the fastest", 13, "end")
    return p


def vendoring():
    p = Picture(860, 290)
    p.text(20, 28, "One unit holds the implementation, all others include the declarations", 15, kind="bold")
    p.rect(20, 60, 180, 110, "grey", "gmm_quant.h\ngmm.h\ngmm_gtp.h\ngmm_kernels.cuh", kind="code")
    p.text(20, 192, "the four headers", 13)
    units = ((60, "blue", "gmm.c or gmm.cu", "GMM_IMPLEMENTATION"), (130, "grey", "main.c", "#include"),
             (200, "grey", "more files", "#include"))
    for y, color, name, words in units:
        p.rect(300, y, 220, 52, color, name + "\n" + words, 13, "code")
        p.arrow(202, 115, 298, y + 26)
        p.arrow(522, y + 26, 618, 152)
    p.rect(620, 126, 200, 52, "green", "your program")
    p.text(300, 278, "gmm.c, by a C compiler: the CPU engine.  gmm.cu, by nvcc: all engines.", 13)
    return p


def checkpoints():
    p = Picture(860, 320)
    p.text(20, 28, "One key per expert becomes one tensor of all experts", 15, kind="bold")
    p.text(20, 56, "source: keys of Mixtral", 13)
    p.text(335, 56, "plan: one move per key", 13)
    p.text(560, 56, "targets: keys of Megatron-LM", 13)
    p.text(560, 82, "experts.linear_fc1.weight", 13, kind="code")
    p.text(560, 202, "experts.linear_fc2.weight", 13, kind="code")
    for i in range(6):
        expert, name = i // 3, ("w1", "w2", "w3")[i % 3]
        y = 68 + 36 * i
        color = ("blue", "orange")[expert]
        p.rect(20, y, 230, 30, color, "experts.%d.%s.weight" % (expert, name), 13, "code")
        row = {"w1": 2 * expert, "w3": 2 * expert + 1, "w2": 4 + expert}[name]
        at = 90 + 24 * row if row < 4 else 210 + 24 * (row - 4)
        what = {"w1": "gate", "w3": "up", "w2": "down"}[name]
        p.rect(560, at, 280, 24, color, "expert %d: %s" % (expert, what), 13)
        p.arrow(252, y + 15, 350, y + 15, 460, at + 12, 558, at + 12)
    p.text(20, 306, "The plan is made from names, shapes and dtypes. Only applying it reads data.", 13)
    return p


DRAWINGS = {"README": layer, "groups": groups, "mlp": mlp, "main_grad": main_grad, "parallelism": parallelism,
            "recipes": recipes, "cuda_graphs": cuda_graphs, "troubleshooting": troubleshooting, "bench": bench,
            "vendoring": vendoring, "checkpoints": checkpoints}


def main():
    here = os.path.dirname(os.path.abspath(__file__))
    for name in sys.argv[1:] or DRAWINGS:
        DRAWINGS[name]().svg.save_svg(os.path.join(here, name + ".svg"))


main()
