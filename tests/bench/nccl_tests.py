#!/usr/bin/env python3
"""Prints results of nccl-tests beside those of gtp_bench for the collectives alone.

usage: nccl_tests.py RUN.json [FOLDER]     the programs are in FOLDER, or in PATH; what is not there is left out
"""
import json
import os
import shutil
import subprocess
import sys

# program of nccl-tests, column of RUN.json
PROGRAMS = (("all_gather", "gather"), ("reduce_scatter", "scatter"), ("alltoall", "exchange"))


def measure(program, ranks, low, high):
    """{bytes: ms} out of place; a line has size, count, type, redop, root, then time in us, algbw, busbw, wrong."""
    command = [program, "-b", str(low), "-e", str(high), "-f", "2", "-g", str(ranks), "-c", "0"]
    out = subprocess.run(command, check=True, stdout=subprocess.PIPE, universal_newlines=True).stdout
    times = {}
    for words in (line.split() for line in out.splitlines()):
        if len(words) >= 8 and words[0].isdigit():
            times[int(words[0])] = float(words[5]) * 1e-3
    return times


def main():
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    folder = sys.argv[2] if len(sys.argv) == 3 else ""
    found = [(name, shutil.which(name + "_perf", path=folder or None), column) for name, column in PROGRAMS]
    if folder and not any(program for _, program, _ in found):
        sys.exit(f"nccl_tests.py: {folder} holds none of nccl-tests' programs")
    with open(sys.argv[1], encoding="utf-8") as file:
        run = json.load(file)
    ours = [r for r in run["rows"] if "alone" in r]
    sizes = sorted({r["mib"] << 20 for r in ours})
    share = (run["ranks"] - 1) / run["ranks"]
    for name, program, column in found:
        if not program or not sizes:
            continue
        theirs = measure(program, run["ranks"], sizes[0], sizes[-1])
        print(f"\n{os.path.basename(program)}, ms (bus GB/s); beside it, what gtp_bench measured: plain is NCCL called "
              "by itself")
        for size in sizes:
            cells = [("nccl-tests", theirs.get(size, 0))]
            cells += [(r["alone"], r[column]) for r in ours if r["mib"] << 20 == size]
            print(f"{size >> 20:6} MiB" + "".join(
                f"   {who} {ms:.3f} ({size * share / ms * 1e-6:.0f})" for who, ms in cells if ms > 0))


if __name__ == "__main__":
    main()
