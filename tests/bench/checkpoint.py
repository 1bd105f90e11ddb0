#!/usr/bin/env python3
"""Time and memory of convert_checkpoint on large files, printed beside the disk's own copy.

    python3 tests/bench/checkpoint.py [--program build/convert_checkpoint] [--folder build/bench] [--gigabytes 2]
                                      [--runs 3]

plan    a sparse file of 40 GB and 20 000 tensors: inspected, planned, verified; and one rank of it written
linear  planning alone at 1 000, 10 000 and 100 000 tensors
apply   a file of real bytes, laid out anew, beside a cold `cp --reflink=never` with sync, alternating
Resident memory is the highest that was seen, mapped pages included, and the anonymous part of it.
"""
import argparse, json, os, struct, subprocess, sys, threading, time


def header_file(path, tensors, fill=None):
    """tensors: (name, dtype, shape). The data section is a hole, or `fill` bytes over and over."""
    size = {"F32": 4, "BF16": 2, "U8": 1}
    at, header = 0, {}
    for name, dtype, shape in tensors:
        n = size[dtype]
        for extent in shape:
            n *= extent
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + n]}
        at += n
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        if fill is None:
            f.truncate(8 + len(text) + at)
        else:
            left = at
            while left:
                f.write(fill[: min(left, len(fill))])
                left -= min(left, len(fill))
        f.flush()
        os.fsync(f.fileno())
    return at


def model(layers, experts, ffn, hidden, norms=0):
    out = []
    for l in range(layers):
        for e in range(experts):
            at = "model.layers.%d.mlp.experts.%d." % (l, e)
            out += [(at + "gate_proj.weight", "BF16", [ffn, hidden]), (at + "up_proj.weight", "BF16", [ffn, hidden]),
                    (at + "down_proj.weight", "BF16", [hidden, ffn])]
    return out + [("model.layers.%d.norm%d.weight" % (i % layers, i), "BF16", [hidden]) for i in range(norms)]


def run(command):
    """Seconds, highest resident and highest sampled anonymous memory in MiB."""
    anonymous, resident = [0], [0]
    began = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    done = threading.Event()

    def sample():
        while not done.is_set():
            try:
                for line in open("/proc/%d/status" % process.pid):
                    for name, peak in (("RssAnon:", anonymous), ("VmHWM:", resident)):
                        if line.startswith(name):
                            peak[0] = max(peak[0], int(line.split()[1]))
            except OSError:
                pass
            time.sleep(0.002)

    thread = threading.Thread(target=sample)
    thread.start()
    _, status = os.waitpid(process.pid, 0)
    seconds = time.monotonic() - began
    done.set()
    thread.join()
    process.returncode = status
    if status:
        sys.exit("failed: " + " ".join(command))
    return seconds, resident[0] / 1024, anonymous[0] / 1024


def cold(*paths):
    subprocess.run(["sync"])
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", default="build/convert_checkpoint")
    parser.add_argument("--folder", default="build/bench")
    parser.add_argument("--gigabytes", type=float, default=2)
    parser.add_argument("--runs", type=int, default=3)
    o = parser.parse_args()
    os.makedirs(o.folder, exist_ok=True)
    source, target, copy = (os.path.join(o.folder, n) for n in ("in.safetensors", "out.safetensors", "copy"))
    convert = [o.program, "--in", source, "--quiet"]
    qwen = ["--from", "qwen3-moe", "--to", "grouped"]
    try:
        tensors = model(26, 256, 512, 1920, 32)
        size = header_file(source, tensors)
        print("plan: %d tensors, %.1f GB, sparse" % (len(tensors), size / 1e9))
        for _ in range(o.runs):
            print("  inspect, plan, verify  %.2f s, resident %.0f MiB, anonymous %.0f MiB" %
                  run(convert + qwen + ["--inspect", "--dry-run"]))
        print("  one of 128 EP ranks    %.2f s, resident %.0f MiB, anonymous %.0f MiB" %
              run(convert + qwen + ["--ep", "5/128", "--glu-block", "32", "--out", target]))
        os.remove(target)
        for n in (1000, 10000, 100000):
            tensors = model(n // 300, 100, 2, 2)
            header_file(source, tensors)
            best = min(run(convert + qwen + ["--dry-run"])[0] for _ in range(o.runs))
            print("linear: %6d tensors  %.3f s, %.2f us a tensor" % (len(tensors), best, best / len(tensors) * 1e6))

        layers = max(1, round(o.gigabytes * 1e9 / (16 * 3 * 1408 * 2048 * 2)))
        size = header_file(source, model(layers, 16, 1408, 2048), os.urandom(1 << 24))
        print("apply: %.2f GB" % (size / 1e9))
        yardstick = "cp --reflink=never %s %s && sync %s" % (source, copy, copy)
        cases = [("cp --reflink=never; sync", ["sh", "-c", yardstick]),
                 ("gate and up joined", convert + qwen + ["--restart", "--out", target]),
                 ("interleaved by 32", convert + qwen + ["--restart", "--glu-block", "32", "--out", target]),
                 ("transposed", convert + ["--from", "qwen3-moe", "--to", "fused-transposed", "--restart", "--out",
                                           target])]
        times = {}
        for _ in range(o.runs):
            for name, command in cases:
                for path in (target, copy):
                    if os.path.exists(path):
                        os.remove(path)
                cold(source)
                seconds, resident, anonymous = run(command)
                times.setdefault(name, []).append(seconds)
                share = 100 * times[cases[0][0]][-1] / seconds
                print("  %-26s %6.2f s  %5.0f MB/s  %3.0f%% of cp  resident %.0f MiB, anonymous %.0f MiB" %
                      (name, seconds, size / seconds / 1e6, share, resident, anonymous))
        for name, all_times in times.items():
            share = 100 * min(times[cases[0][0]]) / min(all_times)
            print("  best %-21s %6.2f s  %3.0f%%" % (name, min(all_times), share))
    finally:
        for path in (source, target, copy):
            for p in (path, path + ".partial", path + ".resume"):
                if os.path.exists(p):
                    os.remove(p)


if __name__ == "__main__":
    main()
