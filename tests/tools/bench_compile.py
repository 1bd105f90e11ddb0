#!/usr/bin/env python3
"""Measures what compiling the implementation costs: `make bench-compile`.

    bench_compile.py [--units NAMES] [--base FOLDER] [--nvcc NVCC] [--flags FLAGS] [--cc CC] [--jobs N]

One row per unit: seconds of wall and of all processors (user and system), peak memory of the largest process, bytes of
the objects; of nvcc also the seconds of its phases (front end: preprocessing and cudafe++; cicc: CUDA to PTX; ptxas;
host: the C++ compiler). Units that are split (GMM_PARTS) compile their parts side by side, JOBS at a time. --base also
measures the headers of another folder, in the same run.
"""
import argparse
import csv
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
# name: compiler, architecture, macros, parts; of no parts: what a file includes, of which it takes the median of RUNS
RUNS = 41
UNITS = {
    "an empty file": ("cc", "", [], 0),
    "declarations": ("cc", "", ["gmm.h"], 0),
    "declarations, with GTP": ("cc", "", ["gmm.h", "gmm_gtp.h"], 0),
    "cpu": ("cc", "", [], 1),
    "cpu, no quant": ("cc", "", ["GMM_NO_QUANT"], 1),
    "sm_80": ("nvcc", "80", [], 1),
    "sm_90a": ("nvcc", "90a", [], 1),
    "sm_90a, no quant": ("nvcc", "90a", ["GMM_NO_QUANT"], 1),
    "sm_90a, no f16": ("nvcc", "90a", ["GMM_NO_F16"], 1),
    "sm_90a, no quant, no f16": ("nvcc", "90a", ["GMM_NO_QUANT", "GMM_NO_F16"], 1),
    "sm_90a, 2 parts": ("nvcc", "90a", [], 2),
    "sm_90a, 4 parts": ("nvcc", "90a", [], 4),
    "sm_90a, 8 parts": ("nvcc", "90a", [], 8),
}
PHASES = (("front end", ("gcc (preprocessing", "cudafe++")), ("cicc", ("cicc",)), ("ptxas", ("ptxas",)),
          ("host", ("gcc (compiling", "gcc")))


def command_of(unit, part, headers, folder, options):
    compiler, arch, macros, parts = UNITS[unit]
    define = ["-D" + m for m in macros] if parts else []
    if parts > 1:
        define += ["-DGMM_PARTS=%d" % parts, "-DGMM_PART=%d" % part]
    out = os.path.join(folder, "%d.o" % part)
    if compiler == "cc":
        if parts == 0:
            return [options.cc, "-std=c11", "-O2", "-I", headers, "-c", "-o", out, os.path.join(folder, "empty.c")]
        return [options.cc, "-std=c11", "-O3", "-fopenmp", "-I", headers] + define + \
            ["-c", "-o", out, os.path.join(ROOT, "examples/vendoring/gmm.c")]
    return [options.nvcc] + options.flags.split() + ["-std=c++17", "-O3", "-gencode", "arch=compute_%s,code=sm_%s" %
            (arch, arch), "-I", headers] + define + ["--time", os.path.join(folder, "%d.csv" % part), "-c", "-o", out,
            os.path.join(ROOT, "examples/vendoring/gmm.cu")]


def run(command, costs):
    """Runs a command; appends its seconds of processor time and its peak memory in MiB."""
    process = subprocess.Popen(command)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit("bench-compile: failed: " + " ".join(command))
    costs.append((usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024.0))


def phases_of(folder, parts):
    """Seconds by phase, from the tables that nvcc --time writes."""
    seconds = dict.fromkeys([name for name, _ in PHASES], 0.0)
    for part in range(parts):
        path = os.path.join(folder, "%d.csv" % part)
        for row in csv.reader(open(path)) if os.path.exists(path) else []:
            cells = [c.strip() for c in row]
            if len(cells) < 8 or cells[0] == "source file name":
                continue
            phase, value, scale = cells[1], float(cells[6]), {"ms": 1e-3, "s": 1.0}.get(cells[7], 1e-3)
            for name, begins in PHASES:
                if phase.startswith(begins):
                    seconds[name] += value * scale
                    break
    return seconds


def measure_file(unit, headers, options):
    """The row of a file that only includes headers."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        with open(os.path.join(folder, "empty.c"), "w") as f:
            f.writelines('#include "%s"\n' % name for name in UNITS[unit][2])
        for _ in range(RUNS):
            begin, costs = time.monotonic(), []
            run(command_of(unit, 0, headers, folder, options), costs)
            rows.append((time.monotonic() - begin, *costs[0]))
    medians = [statistics.median(column) for column in zip(*rows)]
    print("%-26s %8.3f %8.3f %8.0f %9.1f" % (unit, *medians, 0), flush=True)


def measure(unit, headers, options):
    parts = UNITS[unit][3]
    if parts == 0:
        return measure_file(unit, headers, options)
    folder = tempfile.mkdtemp()
    costs, waiting, failed = [], list(range(parts)), []

    def worker():
        while waiting and not failed:
            part = waiting.pop(0)
            try:
                run(command_of(unit, part, headers, folder, options), costs)
            except (SystemExit, OSError) as error:
                failed.append(error)

    begin = time.monotonic()
    threads = [threading.Thread(target=worker) for _ in range(min(parts, options.jobs))]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    wall = time.monotonic() - begin
    if failed:
        raise failed[0]
    size = sum(os.path.getsize(os.path.join(folder, "%d.o" % part)) for part in range(parts))
    phases = phases_of(folder, parts)
    shutil.rmtree(folder)
    row = "%-26s %8.2f %8.2f %8.0f %9.1f" % (unit, wall, sum(c for c, _ in costs), max(m for _, m in costs),
                                            size / 2.0**20)
    if UNITS[unit][0] == "nvcc":
        row += "  " + " ".join("%9.1f" % phases[name] for name, _ in PHASES)
    print(row, flush=True)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--units", default="")
    p.add_argument("--base", default="")
    p.add_argument("--nvcc", default="")
    p.add_argument("--flags", default="")
    p.add_argument("--cc", default="gcc")
    p.add_argument("--jobs", type=int, default=os.cpu_count())
    options = p.parse_args()
    names = [n.strip() for n in options.units.split(";")] if options.units else list(UNITS)
    for name in names:
        if name not in UNITS:
            raise SystemExit("bench-compile: no unit %r; there are: %s" % (name, "; ".join(UNITS)))
    print("%-26s %8s %8s %8s %9s  %s" % ("unit", "wall s", "CPU s", "peak MiB", "object MiB",
                                          " ".join("%9s" % name for name, _ in PHASES)))
    for headers in ([options.base] if options.base else []) + [ROOT]:
        if options.base:
            print("headers of", os.path.relpath(headers, ROOT))
        for name in names:
            splits = UNITS[name][3] > 1 or UNITS[name][2]
            if headers != ROOT and splits:
                continue
            if UNITS[name][0] == "nvcc" and not shutil.which(options.nvcc or "nvcc"):
                print("%-26s skipped: no nvcc" % name)
                continue
            options.nvcc = options.nvcc or "nvcc"
            measure(name, headers, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
