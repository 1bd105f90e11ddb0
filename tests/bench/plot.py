#!/usr/bin/env python3
"""Roofline and skew plots of a run of gpu_bench, timelines of a run of gtp_bench.

usage: plot.py RUN.json [FOLDER]     writes FOLDER/roofline.svg and FOLDER/skew.svg, or FOLDER/timeline.svg
"""
import json
import os
import sys

import matplotlib

matplotlib.use("svg")
matplotlib.rcParams["svg.fonttype"] = "none"  # text as text: a quarter of the bytes
matplotlib.rcParams["svg.hashsalt"] = "gmm"
import matplotlib.pyplot as plt  # noqa: E402

OPS = ("fwd", "dgrad", "wgrad", "wgrad f32+")
PEERS = ("loop1", "loop4", "grouped", "strided", "ltgrouped", "torch", "deepgemm")
COLORS = {"dsv3": "tab:blue", "mixtral": "tab:orange", "qwen3": "tab:green", "gptoss": "tab:red", "odd": "tab:purple",
          "dense": "tab:gray"}


def best(row):
    return max((row[p] for p in PEERS if p in row), default=None)


def roofline(run, rows, path):
    """Roofline: rate over operations per byte, with the bounds by memory bandwidth and by cuBLASLt."""
    read = max((r["read_gbs"] for r in rows if "read_gbs" in r), default=None)
    top = max(r["dense"] for r in rows if "dense" in r)
    figure, panels = plt.subplots(2, 2, figsize=(11, 8), sharex=True, sharey=True)
    for op, panel in zip(OPS, panels.flat):
        xs = []
        for r in (r for r in rows if r["op"] == op):
            x = r["flops"] / r["bytes"]
            xs.append(x)
            marker = "^" if r["zipf"] else "o"
            panel.plot(x, r["gmm"], marker, color=COLORS.get(r["shape"], "black"), markersize=5)
            if best(r):
                panel.plot(x, best(r), marker, color=COLORS.get(r["shape"], "black"), markersize=5, fillstyle="none")
        if xs and read:
            line = [min(xs), top * 1e3 / read, max(max(xs), top * 1e3 / read)]
            panel.plot(line, [min(top, x * read * 1e-3) for x in line], color="black", linewidth=0.8)
        panel.set(xscale="log", yscale="log", title=op)
        panel.grid(True, which="major", linewidth=0.3)
    for panel in panels[:, 0]:
        panel.set_ylabel("TFLOP/s")
    for panel in panels[-1, :]:
        panel.set_xlabel("operations per byte that must move")
    shapes = [s for s in COLORS if any(r["shape"] == s for r in rows)]
    handles = [plt.Line2D([], [], marker="s", linestyle="", color=COLORS[s], label=s) for s in shapes]
    handles += [plt.Line2D([], [], marker=m, linestyle="", color="black", fillstyle=f, label=label)
                for m, f, label in (("o", "full", "gmm, even"), ("^", "full", "gmm, Zipf"), ("o", "none", "best peer"))]
    figure.legend(handles=handles, loc="lower center", ncol=len(handles), frameon=False)
    ceiling = f"{top:.0f} TFLOP/s of dense cuBLASLt" + (f", {read:.0f} GB/s read" if read else "")
    figure.suptitle(f"{run['gpu']}: bf16 grouped linear; lines: {ceiling}")
    figure.tight_layout(rect=(0, 0.04, 1, 1))
    figure.savefig(path)
    plt.close(figure)


def skew(run, rows, path):
    """Rate with Zipf's routing, relative to an even split of the same number of tokens."""
    even = {(r["shape"], r["row"].split("/")[2], r["op"], r["tokens"]): r for r in rows if not r["zipf"]}
    pairs = []
    for r in (r for r in rows if r["zipf"]):
        other = even.get((r["shape"], r["row"].split("/")[2], r["op"], r["tokens"]))
        if other and best(r) and best(other):
            layer = r["row"].split("/")[2][:3]
            pairs.append((f"{r['shape']} {layer} {r['op']} {r['tokens']}", r["gmm"] / other["gmm"],
                          best(r) / best(other), r["gmm"] / best(r)))
    if not pairs:
        return False
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 1.2 + 0.16 * len(pairs)), sharey=True)
    at = range(len(pairs))
    left.plot([p[1] for p in pairs], at, "o", color="tab:blue", label="gmm", markersize=4)
    left.plot([p[2] for p in pairs], at, "o", color="tab:gray", fillstyle="none", label="best peer", markersize=4)
    left.set_yticks(list(at), [p[0] for p in pairs], fontsize=6)
    left.set_xlabel("rate under Zipf / rate evenly split")
    left.legend(frameon=False)
    right.barh(list(at), [p[3] for p in pairs], color="tab:blue", height=0.6)
    right.axvline(1.0, color="black", linewidth=0.8)
    right.set_xlabel("gmm / best peer under Zipf")
    for panel in (left, right):
        panel.grid(True, axis="x", linewidth=0.3)
    left.invert_yaxis()
    figure.suptitle(f"{run['gpu']}: Zipf's routing with every fifth expert empty")
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)
    return True


def timelines(run, rows, path):
    """Timeline of rank 0: GEMMs, gathers, reductions, with a panel for each communicator."""
    titles = list(dict.fromkeys(r["timeline"] for r in rows))
    kinds = (("compute", "tab:blue"), ("gather", "tab:green"), ("reduce", "tab:orange"))
    figure, panels = plt.subplots(len(titles), 1, figsize=(11, 1.6 * len(titles)), sharex=True, squeeze=False)
    for title, panel in zip(titles, panels.flat):
        for at, (kind, color) in enumerate(kinds):
            spans = [(r["begin"], r["end"] - r["begin"]) for r in rows
                     if r["timeline"] == title and r["row"] == kind and r["rank"] == 0]
            panel.broken_barh(spans, (at - 0.4, 0.8), facecolors=color, edgecolors="white", linewidth=0.4)
        panel.set_yticks(range(len(kinds)), [k for k, _ in kinds], fontsize=7)
        panel.set_title(title, fontsize=8)
        panel.grid(True, axis="x", linewidth=0.3)
        panel.invert_yaxis()
    panels[-1, 0].set_xlabel("ms")
    figure.suptitle(f"{run['ranks']} x {run['gpu']}: one step, forward and backward, rank 0", fontsize=9)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def main():
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    folder = sys.argv[2] if len(sys.argv) == 3 else "."
    with open(sys.argv[1], encoding="utf-8") as file:
        run = json.load(file)
    spans = [r for r in run["rows"] if "timeline" in r]
    if spans:
        timelines(run, spans, os.path.join(folder, "timeline.svg"))
        print(f"{folder}: timeline.svg")
        return
    rows = [r for r in run["rows"] if "flops" in r]
    if not rows:
        sys.exit(f"plot.py: {sys.argv[1]} holds no rows of linear operations")
    roofline(run, rows, os.path.join(folder, "roofline.svg"))
    made = "roofline.svg"
    if skew(run, rows, os.path.join(folder, "skew.svg")):
        made += ", skew.svg"
    print(f"{folder}: {made}")


if __name__ == "__main__":
    main()
