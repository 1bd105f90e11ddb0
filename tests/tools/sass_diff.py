#!/usr/bin/env python3
"""Compares the machine code of two versions of the library, kernel by kernel. No GPU is needed.

    sass_diff.py --base COMMIT|FOLDER [--arch "sm_90a sm_80"] [--unit examples/vendoring/gmm.cu] [--names FILE]
                 [--nvcc NVCC] [--flags FLAGS] [--self-test]

Each side's unit is compiled to a cubin without line information and disassembled; build/sass keeps both by a hash of
the headers, the unit, the architecture and the compiler. Kernels are paired by NAMES (lines `old new`, without
parameters), then by name, then, as renamed, by equal code. Equal means the same instructions with the same encodings
(scheduling included), registers, stack and shared memory; the names of symbols and the order of constant bank 4, which
holds addresses of symbols, do not count. Data of constant and global arrays is not compared. Fails if code differs, or
a kernel of one side has no partner.
"""
import argparse
import glob
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile

CACHE = "build/sass"


def run(command, **more):
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, **more).stdout


def base_tree(base):
    """A folder with the files of a commit."""
    if os.path.isdir(base):
        return base
    found = subprocess.run(["git", "rev-parse", "--verify", "-q", base + "^{commit}"], stdout=subprocess.PIPE,
                           text=True)
    if found.returncode != 0:
        raise SystemExit("sass-diff: BASE=%s is neither a commit nor a folder" % base)
    commit = found.stdout.strip()
    folder = os.path.join(CACHE, "tree-" + commit[:12])
    if not os.path.exists(os.path.join(folder, "complete")):
        os.makedirs(folder, exist_ok=True)
        archive = os.path.join(CACHE, commit[:12] + ".tar")
        run(["git", "archive", "-o", archive, commit])
        with tarfile.open(archive) as tar:
            tar.extractall(folder)
        os.remove(archive)
        open(os.path.join(folder, "complete"), "w").close()
    return folder


def disassembler(nvcc):
    """cuobjdump, which needs nvdisasm beside it or in PATH: the toolkit's, or the one in the triton wheel."""
    homes = [os.path.dirname(shutil.which(nvcc) or nvcc), os.path.join(os.environ.get("CUDA_HOME", ""), "bin"),
             "/usr/local/cuda/bin", os.path.join(CACHE, "bin")]
    for folder in [os.path.dirname(shutil.which("cuobjdump") or "")] + homes:
        path = os.path.join(folder, "cuobjdump")
        if folder and os.access(path, os.X_OK) and (os.access(os.path.join(folder, "nvdisasm"), os.X_OK) or
                                                    shutil.which("nvdisasm")):
            return path
    print("sass-diff: no cuobjdump and nvdisasm here; taking those of the triton wheel", flush=True)
    target = os.path.join(CACHE, "triton")
    run([sys.executable, "-m", "pip", "install", "-q", "--root-user-action=ignore", "--target", target, "--no-deps",
         "triton"])
    os.makedirs(homes[-1], exist_ok=True)
    for name in ("cuobjdump", "nvdisasm"):
        found = glob.glob(os.path.join(target, "**", "bin", name), recursive=True)
        if not found:
            raise SystemExit("sass-diff: the triton wheel holds no " + name)
        shutil.copy(found[0], os.path.join(homes[-1], name))
    shutil.rmtree(target)
    return os.path.join(homes[-1], "cuobjdump")


def command_of(arch, options):
    return [options.nvcc, "-std=c++17", "-O3", "-cubin", "-gencode",
            "arch=compute_%s,code=%s" % (arch[3:], arch)] + options.flags.split()


def cubin_of(tree, unit, arch, options):
    """Where the cubin of a tree is kept: by what it is made from."""
    h = hashlib.sha256(repr(command_of(arch, options)).encode())
    h.update(run([options.nvcc, "--version"]))
    for path in sorted(glob.glob(os.path.join(tree, "gmm*.h")) + glob.glob(os.path.join(tree, "gmm*.cuh"))):
        h.update(os.path.basename(path).encode() + open(path, "rb").read())
    h.update(open(os.path.join(tree, unit), "rb").read())
    return os.path.join(CACHE, h.hexdigest()[:20] + ".cubin")


def compile_start(cubin, tree, unit, arch, options):
    """The running compiler, or None if the cubin is there."""
    if os.path.exists(cubin):
        return None
    return subprocess.Popen(command_of(arch, options) + ["-I", tree, "-o", cubin + ".new", os.path.join(tree, unit)])


def compile_done(cubin, process):
    if process and process.wait() != 0:
        raise SystemExit("sass-diff: the compiler failed")
    if process:
        os.rename(cubin + ".new", cubin)


def sass_of(cubin, dump):
    path = cubin + ".sass"
    if not os.path.exists(path):
        text = run([dump, "-res-usage", cubin], stderr=subprocess.STDOUT) + run([dump, "-sass", cubin])
        with open(path + ".new", "wb") as f:
            f.write(text)
        os.rename(path + ".new", path)
    return open(path, encoding="utf-8").read()


def plain_name(symbol):
    """The identifier inside a mangled name."""
    m = re.match(r"_ZN?L?(\d+)", symbol)
    if not m:
        return symbol
    rest, length = symbol[m.end():], int(m.group(1))
    name = rest[:length]
    if re.match(r"_(GLOBAL__N_|INTERNAL_)", name):  # a unit's own namespace, which opens the nested name
        inner = re.match(r"(\d+)", rest[length:])
        if inner:
            begin = length + inner.end()
            return rest[begin:begin + int(inner.group(1))]
    return name


def normal(line):
    """A line of disassembly without what depends on names."""
    line = re.sub(r"(\d+@(?:lo|hi)|fun@\w+)\(.*?\)+", r"\1(SYMBOL)", line)
    line = re.sub(r"`\([^)]*\)", "`(SYMBOL)", line)
    if "c[0x4][" in line:
        line = re.sub(r"c\[0x4\]\[[^\]]*\]", "c[0x4][SYMBOL]", re.sub(r"/\* 0x[0-9a-f]+ \*/", "", line))
    return line.strip()


def kernels_of(text):
    """{name: normalised code}; names that several functions share keep their mangled form."""
    usage, codes, current = {}, {}, None
    for line in text.splitlines():
        m = re.match(r"\s*Function\s*:?\s+(\S+?):?\s*$", line)
        if m:
            current = m.group(1)
            if re.match(r"\s*Function :", line):
                codes[current] = []
            continue
        if current and re.match(r"\s*REG:", line):
            usage[current] = re.sub(r"CONSTANT\[[234]\]:\d+", "", line).strip()
        elif current in codes and re.match(r"\s*/\*", line):
            codes[current].append(normal(line))
    plain = {}
    for symbol in codes:
        plain.setdefault(plain_name(symbol), []).append(symbol)
    return {name if len(symbols) == 1 else symbol: "\n".join([usage.get(symbol, "")] + codes[symbol])
            for name, symbols in plain.items() for symbol in symbols}


def compare(old, new, names):
    """Pairs two tables of kernels. Returns a dictionary of lists."""
    result = {"equal": [], "renamed": [], "differing": [], "missing": [], "added": []}
    left = dict(new)

    def pair(a, b):
        same = old[a] == left.pop(b)
        result["differing" if not same else "equal" if a == b else "renamed"].append(a if a == b else a + " -> " + b)

    rest = []
    for a in sorted(old):
        b = names.get(a, a)
        if b in left and (a in names or b not in names.values()):
            pair(a, b)
        else:
            rest.append(a)
    by_code = {}
    for b in sorted(left):
        by_code.setdefault(left[b], []).append(b)
    for a in rest:
        twins = by_code.get(old[a], [])
        if twins and a not in names:
            pair(a, twins.pop(0))
        else:
            result["missing"].append(a)
    result["added"] = sorted(left)
    return result


def read_names(path):
    names = {}
    for line in open(path, encoding="utf-8") if path else []:
        cells = line.split()
        if cells and not cells[0].startswith("#"):
            if len(cells) != 2:
                raise SystemExit("sass-diff: %s: a line is `old new`: %s" % (path, line.rstrip()))
            names[cells[0]] = cells[1]
    return names


def report(arch, result):
    for kind in ("renamed", "differing", "missing", "added"):
        for what in result[kind]:
            print("%-10s %s" % (kind, what))
    print("sass-diff %s: %s" % (arch, ", ".join("%d %s" % (len(result[k]), k) for k in result)))
    return bool(result["differing"] or result["missing"] or result["added"] or
                not result["equal"] and not result["renamed"])


SELF_TEST = """Resource usage:
 Common:
  GLOBAL:32 CONSTANT[4]:8
 Function _Z5firstPfi:
  REG:32 STACK:0 SHARED:1152 LOCAL:0 CONSTANT[0]:540 TEXTURE:0
 Function _Z6secondPfi:
  REG:10 STACK:0 SHARED:0 LOCAL:0 CONSTANT[0]:540 TEXTURE:0
\tcode for sm_90a
\t\tFunction : _Z5firstPfi
        /*0000*/  LDC R1, c[0x4][0x8] ;            /* 0x00000a00ff017b82 */
                                                   /* 0x000fe20000000800 */
        /*0010*/  MOV R4, 32@lo((_Z5firstPfi + .L_x_2@srel)) ;   /* 0x0000000000047882 */
\t\tFunction : _Z6secondPfi
        /*0000*/  S2R R7, SR_TID.X ;               /* 0x0000000000077919 */
                                                   /* 0x000e2e0000002100 */
"""


def self_test():
    def outcome(changes, names=()):
        text = SELF_TEST
        for a, b in changes:
            assert a in text, a
            text = text.replace(a, b)
        r = compare(kernels_of(SELF_TEST), kernels_of(text), dict(names))
        return tuple(len(r[k]) for k in ("equal", "renamed", "differing", "missing", "added"))

    assert sorted(kernels_of(SELF_TEST)) == ["first", "second"], kernels_of(SELF_TEST)
    assert plain_name("_ZN23_GLOBAL__N__1234_4_a_cu4nameEi") == "name"
    assert plain_name("_ZL4name9gmm_args") == "name"
    assert outcome([]) == (2, 0, 0, 0, 0)
    assert outcome([("_Z5first", "_Z5other")]) == (1, 1, 0, 0, 0)
    assert outcome([("c[0x4][0x8]", "c[0x4][0x10]"), ("0x00000a00ff017b82", "0x00000a01ff017b82")]) == (2, 0, 0, 0, 0)
    assert outcome([("SR_TID.X", "SR_TID.Y")]) == (1, 0, 1, 0, 0)
    assert outcome([("0x000e2e0000002100", "0x000e2f0000002100")]) == (1, 0, 1, 0, 0), "scheduling"
    assert outcome([("REG:10", "REG:11")]) == (1, 0, 1, 0, 0)
    assert outcome([("_Z5first", "_Z5other"), ("REG:32", "REG:33")]) == (1, 0, 0, 1, 1)
    assert outcome([("_Z5first", "_Z5other"), ("REG:32", "REG:33")], [("first", "other")]) == (1, 0, 1, 0, 0)
    assert outcome([], [("first", "second")]) == (0, 0, 1, 1, 1), "a wrong table of names is found"
    print("sass_diff: self-test passed")


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--base", default="")
    p.add_argument("--arch", default="sm_90a")
    p.add_argument("--unit", default="examples/vendoring/gmm.cu")
    p.add_argument("--names", default="")
    p.add_argument("--nvcc", default="nvcc")
    p.add_argument("--flags", default="")
    p.add_argument("--self-test", action="store_true")
    options = p.parse_args()
    if options.self_test:
        return self_test()
    if not options.base:
        raise SystemExit("sass-diff: BASE=<commit> or a folder is needed")
    if not shutil.which(options.nvcc):
        raise SystemExit("sass-diff: no CUDA compiler")
    os.makedirs(CACHE, exist_ok=True)
    trees, names, failed = [base_tree(options.base), "."], read_names(options.names), False
    dump = disassembler(options.nvcc)
    for arch in options.arch.split():
        jobs = {}
        for tree in trees:  # both at once, or one where they are the same
            cubin = cubin_of(tree, options.unit, arch, options)
            if cubin not in jobs:
                jobs[cubin] = compile_start(cubin, tree, options.unit, arch, options)
        for cubin, process in jobs.items():
            compile_done(cubin, process)
        cubins = [cubin_of(tree, options.unit, arch, options) for tree in trees]
        old, new = (kernels_of(sass_of(cubin, dump)) for cubin in cubins)
        failed |= report(arch, compare(old, new, names))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
