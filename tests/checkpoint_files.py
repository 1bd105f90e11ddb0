#!/usr/bin/env python3
"""Tests the files of convert_checkpoint and train_moe against the safetensors package: valid, corrupt, interrupted.

    python3 tests/checkpoint_files.py [--build build] [--filter TEXT]

Needs the package safetensors (PyPI). Ends with "N passed, N failed".
"""
import argparse, ctypes, hashlib, json, os, random, resource, shutil, signal, struct, subprocess, sys, tempfile, time
import traceback

import safetensors

SIZES = {"F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "U8": 1, "I64": 8, "F64": 8, "BOOL": 1,
         "F8_E8M0": 1}
NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
         "U8": "uint8", "I64": "int64", "F64": "float64", "BOOL": "bool",
         "F8_E8M0": "float8_e8m0fnu"}
STATES = ["", "optimizer.exp_avg.", "optimizer.exp_avg_sq."]
CASES = []


def case(function):
    CASES.append(function)
    return function


def read(path):
    """{name: (dtype, shape, bytes)} as the package reads a file."""
    with open(path, "rb") as f:
        return {n: (t["dtype"], tuple(t["shape"]), bytes(t["data"])) for n, t in safetensors.deserialize(f.read())}


def metadata(path):
    with safetensors.safe_open(path, "numpy") as f:
        return f.metadata()


def write(path, tensors, metadata=None):
    """By the package; dtypes by the file's names. Versions before 0.8 take dicts instead of TensorSpec."""
    specs, buffers = {}, []
    for name, (dtype, shape, data) in tensors.items():
        if hasattr(safetensors, "TensorSpec"):
            buffers.append(ctypes.create_string_buffer(data, max(len(data), 1)))
            specs[name] = safetensors.TensorSpec(dtype=NAMES[dtype], shape=list(shape), data_len=len(data),
                                                 data_ptr=ctypes.addressof(buffers[-1]))
        else:
            specs[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data": data}
    safetensors.serialize_file(specs, path, metadata)


def write_raw(path, header, data, length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text) if length is None else length) + text + data)


def filled(dtype, shape):
    n = SIZES[dtype]
    for extent in shape:
        n *= extent
    return (dtype, tuple(shape), random.randbytes(n))


def digest(path):
    with open(path, "rb") as f:
        return hashlib.sha256(f.read()).hexdigest()


class Run:
    def __init__(self, build, folder):
        self.build, self.folder = build, folder

    def path(self, name):
        return os.path.join(self.folder, name)

    def start(self, *arguments, fault=None):
        """The program in the background; fault: "CALL:NUMBER:ACTION", see tests/fault/fault.c."""
        environment = dict(os.environ)
        if fault:
            environment.update(LD_PRELOAD=os.path.abspath(os.path.join(self.build, "fault.so")), FAULT=fault)
        return subprocess.Popen([os.path.join(self.build, "convert_checkpoint"), *arguments], env=environment,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def faulty(self, fault, *arguments):
        """Exit status and output of a run with that fault."""
        process = self.start(*arguments, fault=fault)
        out, err = process.communicate()
        return process.returncode, err

    def stopped(self, fault, *arguments):
        """A run that the fault has stopped."""
        process = self.start(*arguments, fault=fault)
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status), "it ended without the fault"
        return process

    def goes_on(self, process):
        process.send_signal(signal.SIGCONT)
        _, err = process.communicate()
        return process.returncode, err

    def convert(self, *arguments, limit=None):
        def child():
            if limit is not None:
                signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        return subprocess.run([os.path.join(self.build, "convert_checkpoint")] + list(arguments), capture_output=True,
                              text=True, errors="replace", preexec_fn=child)

    def ok(self, *arguments):
        r = self.convert(*arguments)
        assert r.returncode == 0, "%s\n%s%s" % (" ".join(arguments), r.stdout, r.stderr)
        return r.stdout

    def refused(self, *arguments, needles=(), out=None, limit=None):
        """The run must fail with a message that contains every needle, and leave no file under the output's name."""
        r = self.convert(*arguments, limit=limit)
        assert r.returncode == 1, "%s ended with %d\n%s%s" % (" ".join(arguments), r.returncode, r.stdout, r.stderr)
        for n in needles:
            assert n in r.stderr, "%r lacks %r" % (r.stderr, n)
        if out:
            assert not os.path.exists(out), out + " is there"
        return r.stderr

    def train(self, name, *arguments):
        path = self.path(name)
        subprocess.run([os.path.join(self.build, "train_moe"), "--steps", "2", "--batch", "64", "--eval-tokens", "64",
                        "--sample", "0", "--svg", "", "--quiet", "--experts", "4", "--ffn", "32", "--hidden", "32",
                        "--engine", "cpu", "--save", path] + list(arguments), check=True, stdout=subprocess.DEVNULL)
        return path

    def resume(self, name, source, *arguments):
        """The file that a resumed run saved; without a name, the message with which it refused."""
        path = self.path(name or "never.safetensors")
        r = subprocess.run([os.path.join(self.build, "train_moe"), "--eval-tokens", "64", "--sample", "0", "--svg", "",
                            "--quiet", "--engine", "cpu", "--resume", source, "--save", path] + list(arguments),
                           capture_output=True, text=True)
        assert (r.returncode == 0) == (name is not None), r.stderr
        return path if name else r.stderr


# ------------------------------------------------------------------------------------------------ Real checkpoints

LAYOUTS = ["indexed", "grouped", "sequential", "legacy", "mixtral", "qwen2-moe", "qwen3-moe", "olmoe", "deepseek-v3",
           "fused", "fused-transposed", "gpt-oss"]


@case
def every_layout_and_back(t):
    """Also tests that the intermediate file has the layout that its name says, as the package reads it."""
    source = t.train("m.safetensors")
    before = read(source)
    assert len(before) > 3 * 2 * 2 * 4
    for layout in LAYOUTS:
        middle, back = t.path("middle.safetensors"), t.path("back.safetensors")
        t.ok("--in", source, "--to", layout, "--out", middle)
        t.ok("--in", middle, "--from", layout, "--to", "indexed", "--out", back, "--experts", "4")
        assert read(back) == before, layout
        if layout == "qwen3-moe":
            m = read(middle)
            for s in STATES:
                fc1 = before[s + "decoder.layers.0.mlp.experts.linear_fc1.weight3"]
                gate = m[s + "model.layers.0.mlp.experts.3.gate_proj.weight"]
                up = m[s + "model.layers.0.mlp.experts.3.up_proj.weight"]
                assert gate[1] == (32, 32) and gate[2] + up[2] == fc1[2]
        if layout == "legacy":
            m = read(middle)
            assert m["decoder.layers.0.mlp.experts.weight1"][1] == (32, 4 * 64)
            assert m["decoder.layers.0.mlp.experts.weight2"][1] == (4 * 32, 32)
            for n in [n for n in m if n.endswith(".weight2")]:  # as files of other writers have it
                m[n] = (m[n][0], (4, 32, 32), m[n][2])
            write(middle, m, metadata(middle))
            t.ok("--in", middle, "--to", "indexed", "--out", back)
            assert read(back) == before
        if layout == "gpt-oss":
            rows = before["decoder.layers.1.mlp.experts.linear_fc1.weight2"][2]
            stack = read(middle)["model.layers.1.mlp.experts.gate_up_proj"]
            assert stack[1] == (4, 32, 64)
            for h in range(32):
                for r in range(64):  # gate rows even, up rows odd
                    i = r // 2 + (r % 2) * 32
                    j = (2 * 32 + h) * 64 + r
                    assert stack[2][4 * j:4 * j + 4] == rows[4 * (i * 32 + h):4 * (i * 32 + h) + 4]
        with safetensors.safe_open(middle, "numpy") as f:
            assert f.metadata()["producer"] == "train_moe 1" and "gmm.layout" in f.metadata()
    subprocess.run([os.path.join(t.build, "train_moe"), "--resume", back, "--steps", "3", "--eval-tokens", "64",
                    "--sample", "0", "--svg", "", "--quiet", "--engine", "cpu"], check=True, stdout=subprocess.DEVNULL)


@case
def shards_save_and_resume(t):
    """Ranks that shard the weights write, each its own rows, the file that they were resumed from, byte by byte; what
    two of them saved in the middle goes on as if they had not stopped."""
    def sharded(name, *arguments):
        path = t.path(name)
        subprocess.run([os.path.join(t.build, "train_moe"), "--eval-tokens", "64", "--sample", "0", "--svg", "",
                        "--quiet", "--save", path] + list(arguments), check=True, stdout=subprocess.DEVNULL)
        return path

    odd = ["--micro-batches", "8", "--ffn", "36", "--hidden", "40"]  # shards with padding
    source = t.train("whole.safetensors", *odd)
    for ranks in "1", "2", "4", "8":
        saved = sharded("sharded.safetensors", "--resume", source, "--gtp", ranks, "--steps", "2")
        assert digest(saved) == digest(source), ranks
    at_once = t.train("at_once.safetensors", *odd, "--steps", "4", "--gtp", "2")
    half = t.train("half.safetensors", *odd, "--steps", "4", "--gtp", "2", "--stop-at", "2")
    assert digest(half) != digest(at_once)
    assert digest(sharded("on.safetensors", "--resume", half, "--gtp", "2", "--steps", "4")) == digest(at_once)


@case
def shards_that_are_not_written(t):
    """Whichever rank a write fails on, the message gives its reason, once, and no file is left."""
    text = t.path("text")
    write(text, {"a": filled("U8", [4000])})
    command = [os.path.join(t.build, "train_moe"), "--steps", "1", "--batch", "64", "--eval-tokens", "64", "--sample",
               "0", "--svg", "", "--experts", "2", "--ffn", "16", "--hidden", "16", "--engine", "cpu", "--data", text,
               "--gtp", "4", "--micro-batches", "4", "--save", t.path("saved")]
    environment = dict(os.environ, LD_PRELOAD=os.path.abspath(os.path.join(t.build, "fault.so")))
    for number in 1, 2, 5, 20, 40, 60:  # 1: a try before training
        environment["FAULT"] = "pwrite:%d:fail" % number
        r = subprocess.run(command, env=environment, capture_output=True, text=True)
        said = "train_moe: saving %s: cannot write: Input/output error\n" % t.path("saved")
        assert r.returncode == 1 and r.stderr == said, (number, r.stderr)
        assert os.listdir(t.folder) == ["text"], os.listdir(t.folder)
    environment["FAULT"] = "fsync:1:fail"
    r = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert r.returncode == 1 and "cannot finish %s: Input/output error" % t.path("saved") in r.stderr, r.stderr
    assert os.listdir(t.folder) == ["text"], os.listdir(t.folder)


@case
def sharded_recipes(t):
    """Ranks that hold and gather quantized experts train the same model as one rank, bit for bit."""
    for recipe, ranks in ("fp8-delayed", "2"), ("fp8-current", "4"), ("fp8-block", "2"), ("mxfp8", "4"), ("nvfp4", "2"):
        same = ["--recipe", recipe, "--micro-batches", ranks, "--threads", "1"]
        if ranks == "4":
            same += ["--save-policy", "nothing", "--interleave", "16"]
        alone = t.train("alone.safetensors", *same)
        assert digest(t.train("ranks.safetensors", *same, "--gtp", ranks)) == digest(alone), recipe
        more = t.train("more.safetensors", "--resume", alone, "--gtp", ranks, "--steps", "2")
        assert digest(more) == digest(alone), recipe


@case
def recipes_resumed(t):
    """A run that stopped and went on saves what one that never stopped saves, to the bit, with every recipe; delayed
    scaling by scales and amax histories of the file."""
    for recipe, *more in (["fp8-delayed"], ["fp8-delayed", "--gtp", "2"], ["fp8-delayed", "--delay-wgrad"],
                          ["fp8-current"], ["fp8-block"], ["mxfp8"], ["nvfp4"]):
        same = ["--recipe", recipe, "--steps", "5", "--micro-batches", "2", "--threads", "1"]
        on = ["--threads", "1"] + more
        at_once = t.train("at_once.safetensors", *same, *more)
        half = t.train("half.safetensors", *same, *more, "--stop-at", "3")
        assert digest(half) != digest(at_once)
        assert digest(t.resume("on.safetensors", half, *on)) == digest(at_once), (recipe, more)
        state = {n: v for n, v in read(half).items() if "._extra_state." in n}
        if recipe != "fp8-delayed":
            assert not state, recipe
            continue
        assert len(state) == 2 * 8
        for layer in "01":
            for linear, forward, backward in ("fc1", 2, 1), ("fc2", 2, 1):
                for way, slots, used in ("fwd", 3, forward), ("bwd", 2, backward):
                    at = "decoder.layers.%s.mlp.experts.linear_%s._extra_state." % (layer, linear)
                    scale, history = state[at + "scale_" + way], state[at + "amax_history_" + way]
                    assert scale[:2] == ("F32", (slots * 4,)) and history[:2] == ("F32", (16, slots * 4))
                    scales = struct.unpack("<%df" % (slots * 4), scale[2])
                    assert all(s != 1 for s in scales[:used * 4]) and all(s == 1 for s in scales[used * 4:])
                    rows = [struct.unpack_from("<%df" % (slots * 4), history[2], 16 * slots * r) for r in range(16)]
                    assert not any(rows[0]) and all(any(row[:used * 4]) for row in rows[13:])
                    assert not any(v for row in rows for v in row[used * 4:]) and not any(map(any, rows[1:13]))
        if more:
            continue
        for key in "scale_fwd", "scale_bwd", "amax_history_fwd", "amax_history_bwd":
            changed = read(half)
            name = "decoder.layers.1.mlp.experts.linear_fc2._extra_state." + key
            dtype, shape, data = changed[name]
            values = struct.unpack("<%df" % (len(data) // 4), data)
            changed[name] = (dtype, shape, struct.pack("<%df" % len(values), *[v * 8 for v in values]))
            write(t.path("changed.safetensors"), changed, metadata(half))
            other = t.resume("other.safetensors", t.path("changed.safetensors"), *on)
            assert digest(other) != digest(at_once), key
            changed[name] = (dtype, (len(values), 1), data)
            write(t.path("changed.safetensors"), changed, metadata(half))
            assert name + " is not an F32 tensor of " in t.resume(None, t.path("changed.safetensors"))
            changed[name + "s"] = changed.pop(name)
            write(t.path("changed.safetensors"), changed, metadata(half))
            assert "lacks the tensor " + name in t.resume(None, t.path("changed.safetensors"))
        t.ok("--in", half, "--to", "mixtral", "--out", t.path("to.safetensors"), "--drop-extra-state")
        assert not any("_extra_state" in n for n in read(t.path("to.safetensors")))


@case
def resumed_from_layouts(t):
    """train_moe continues what convert_checkpoint has grouped or put in blocks of gate and up rows, to the bit and
    on any number of ranks; both programs write the same grouped file."""
    for more in ["--bias"], ["--act", "relu2"], ["--bias", "--act", "gpt-oss", "--ffn", "48"]:
        same = ["--steps", "4", "--micro-batches", "2", "--threads", "1"] + more
        at_once = t.train("at_once.safetensors", *same)
        half = t.train("half.safetensors", *same, "--stop-at", "2")
        for layout, block in ("grouped", "0"), ("indexed", "8"), ("grouped", "16"):
            converted = t.path("converted.safetensors")
            t.ok("--in", half, "--to", layout, "--glu-block", block, "--out", converted)
            if block != "0" and more[1:2] != ["relu2"]:
                assert read(converted) != read(half)
            for ranks in [], ["--gtp", "2"], ["--gtp", "2", "--interleave", "8"]:
                if ranks[2:] and more[1:2] == ["relu2"]:
                    continue
                stay = t.resume("stay.safetensors", converted, "--threads", "1", "--stop-at", "2", *ranks)
                assert digest(stay) == digest(half), (more, layout, block, ranks)
                if not ranks[2:]:
                    on = t.resume("on.safetensors", converted, "--threads", "1", *ranks)
                    assert digest(on) == digest(at_once), (more, layout, block, ranks)
            if (layout, block) == ("grouped", "0"):
                own = t.resume("own.safetensors", half, "--stop-at", "2", "--keys", "grouped")
                assert read(own) == read(converted) and len(read(own)) < len(read(half))
                back = t.path("back.safetensors")
                t.ok("--in", own, "--from", "grouped", "--to", "indexed", "--out", back)
                assert read(back) == read(half)


@case
def biases_and_blocks(t):
    source = t.train("b.safetensors", "--bias")
    before = read(source)
    for layout, block in [("grouped", "8"), ("indexed", "1"), ("sequential", "16"), ("gpt-oss", "0")]:
        middle, back = t.path("middle.safetensors"), t.path("back.safetensors")
        t.ok("--in", source, "--to", layout, "--glu-block", block, "--out", middle)
        if layout != "gpt-oss":
            with safetensors.safe_open(middle, "numpy") as f:
                assert f.metadata()["gmm.glu_block"] == block
            t.refused("--in", middle, "--from", layout, "--in-glu-block", "2", "--out", back + "x", out=back + "x",
                      needles=[block, "2"])
        t.ok("--in", middle, "--from", layout, "--to", "indexed", "--out", back)
        assert read(back) == before, layout
    t.refused("--in", source, "--to", "mixtral", "--out", back + "x", out=back + "x", needles=["bias", "mixtral"])


@case
def ranks_and_back(t):
    source = t.train("r.safetensors", "--bias")
    before = read(source)
    for layout, block, ep, etp, gtp in [("grouped", 0, 2, 2, 1), ("indexed", 4, 4, 1, 1), ("grouped", 8, 1, 2, 3),
                                        ("indexed", 0, 2, 1, 2), ("gpt-oss", 0, 2, 2, 1)]:
        for e in range(ep):
            for x in range(etp):
                for g in range(gtp):
                    t.ok("--in", source, "--to", layout, "--glu-block", str(block), "--ep", "%d/%d" % (e, ep), "--etp",
                         "%d/%d" % (x, etp), "--gtp", "%d/%d" % (g, gtp), "--out",
                         t.path("p-%d-%d-%d.safetensors" % (e, x, g)))
        back = t.path("back.safetensors")
        t.ok("--in", t.path("p-{ep}-{etp}-{gtp}.safetensors"), "--in-ep", str(ep), "--in-etp", str(etp), "--in-gtp",
             str(gtp), "--from", layout, "--to", "indexed", "--out", back)
        assert read(back) == before, (layout, block, ep, etp, gtp)
        if ep * etp * gtp > 1:
            t.refused("--in", t.path("p-0-0-0.safetensors"), "--from", layout, "--out", back + "x", out=back + "x",
                      needles=["p-0-0-0.safetensors", "gmm."])


# ------------------------------------------------------------------------------------------- Written by the package

def f32(x):
    return struct.unpack("<f", struct.pack("<f", x))[0]


def bf16(x):
    u = struct.unpack("<I", struct.pack("<f", x))[0]
    return struct.pack("<H", (u + 0x7FFF + ((u >> 16) & 1)) >> 16)


def e4m3(code):
    e, m = (code >> 3) & 15, code & 7
    v = m / 8 * 2.0 ** -6 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7)
    return -v if code & 128 else v


@case
def fp8_blocks_dequantized(t):
    f, h = 144, 130  # tail blocks
    tensors = {"model.norm.weight": filled("BF16", [h]), "odd \u00e9 \"name\" \\ \n": filled("I64", [3]),
               "flags": filled("BOOL", [5]), "wide": filled("F64", [2, 2]), "model.empty": filled("F16", [0, 4])}
    at = "model.layers.3.mlp.experts.%d.%s_proj.weight"
    for l in range(3):  # dense layers
        tensors["model.layers.%d.mlp.down_proj.weight" % l] = filled("BF16", [2, 2])
    for e in range(2):
        for part, shape in [("gate", (f, h)), ("up", (f, h)), ("down", (h, f))]:
            codes = bytes(random.choice([c for c in range(256) if c & 127 != 127]) for _ in range(f * h))
            scales = [f32(random.random() + 0.01) for _ in range(4)]
            tensors[at % (e, part)] = ("F8_E4M3", shape, codes)
            tensors[at % (e, part) + "_scale_inv"] = ("F32", (2, 2), struct.pack("<4f", *scales))
    source, out, kept = t.path("fp8.safetensors"), t.path("bf16.safetensors"), t.path("kept.safetensors")
    write(source, tensors, {"format": "pt", "gmm.layout": "deepseek-v3"})
    t.ok("--in", source, "--to", "indexed", "--dtype", "bf16", "--out", out)  # --from is recorded
    got = read(out)
    for e in range(2):
        want = b""
        for part in ("gate", "up"):
            codes, scales = tensors[at % (e, part)][2], struct.unpack("<4f", tensors[at % (e, part) + "_scale_inv"][2])
            want += b"".join(bf16(f32(e4m3(codes[r * h + c]) * scales[r // 128 * 2 + c // 128]))
                             for r in range(f) for c in range(h))
        assert got["decoder.layers.3.mlp.experts.linear_fc1.weight%d" % e] == ("BF16", (2 * f, h), want)
    for n in ("model.norm.weight", "odd \u00e9 \"name\" \\ \n", "flags", "wide", "model.empty"):
        assert got[n] == tensors[n], n
    t.ok("--in", source, "--to", "deepseek-v3", "--ep", "1/2", "--out", kept)  # bytes and scales stay
    got = read(kept)
    assert got[at % (1, "down")] == tensors[at % (1, "down")]
    assert got[at % (1, "down") + "_scale_inv"] == tensors[at % (1, "down") + "_scale_inv"]
    assert at % (0, "up") not in got
    del tensors[at % (1, "up") + "_scale_inv"]
    write(source, tensors)
    t.refused("--in", source, "--from", "deepseek-v3", "--dtype", "bf16", "--out", out + "x", out=out + "x",
              needles=["experts.1.up_proj.weight", "scale"])


# Formats of quantized experts: dtype of the codes, bytes of a row of `cols` of them, whether the scale of a matrix or a
# row spans what ETP cuts, and the tensors beside a weight of rows x cols.
FORMATS = {
    "fp8 blocks": ("F8_E4M3", 1, False, lambda r, c: [("_scale_inv", "F32", [-(-r // 128), -(-c // 128)])]),
    "fp8 rows": ("F8_E4M3", 1, True, lambda r, c: [("_scale", "F32", [r, 1])]),
    "fp8 tensor": ("F8_E5M2", 1, True, lambda r, c: [("_scale_inv", "F32", [])]),
    "mxfp8": ("F8_E4M3", 1, False, lambda r, c: [("_scale_inv", "F8_E8M0", [r, c // 32])]),
    "mxfp8 of bytes": ("F8_E4M3", 1, False, lambda r, c: [("_scale", "U8", [r, c // 32])]),
    "mxfp4": ("U8", 2, False, lambda r, c: [("_scale", "U8", [r, c // 32])]),
    "nvfp4": ("U8", 2, True, lambda r, c: [("_scale", "F8_E4M3", [r, c // 16]), ("_tensor_scale", "F32", [])]),
    "nvfp4 and amax": ("U8", 2, True, lambda r, c: [("_scale_inv", "F8_E4M3", [r, c // 16]), ("_amax", "F32", [1])]),
}


def quantized(name, f=128, h=128, experts=4):
    """Indexed tensors of Megatron's names."""
    codes, packed, _, beside = FORMATS[name]
    at, tensors = "decoder.layers.0.mlp.experts.linear_fc%d.weight%s%d", {}
    for e in range(experts):
        for fc, rows, cols in (1, 2 * f, h), (2, h, f):
            tensors[at % (fc, "", e)] = filled(codes, [rows, cols // packed])
            for suffix, dtype, shape in beside(rows, cols):
                tensors[at % (fc, suffix, e)] = filled(dtype, shape)
    tensors["decoder.layers.0.mlp.router.weight"] = filled("BF16", [experts, h])
    return tensors


@case
def quantized_to_stacks_and_back(t):
    """Every format between indexed, stacked and sequential names, and in shards of ranks and back, byte by byte."""
    for name, (_, _, spans, beside) in FORMATS.items():
        before = quantized(name)
        source, middle, back = t.path("q.safetensors"), t.path("middle.safetensors"), t.path("back.safetensors")
        write(source, before)
        t.ok("--in", source, "--in-glu-block", "0", "--to", "grouped", "--out", middle)
        got = read(middle)
        for fc in 1, 2:
            at = "decoder.layers.0.mlp.experts.linear_fc%d.weight" % fc
            for suffix in [""] + [s for s, _, _ in beside(1, 32)]:
                each = [before["%s%s%d" % (at, suffix, e)] for e in range(4)]
                assert got[at + suffix] == (each[0][0], (4,) + each[0][1], b"".join(x[2] for x in each)), (name, suffix)
        assert len(got) == 1 + 2 * (1 + len(beside(1, 32)))
        for layout in "grouped", "sequential":
            t.ok("--in", source, "--in-glu-block", "0", "--to", layout, "--out", middle)
            t.ok("--in", middle, "--from", layout, "--to", "indexed", "--out", back)
            assert read(back) == before, (name, layout)
        for layout, block, ep, etp, gtp in (("grouped", 0, 2, 1, 1), ("indexed", 128, 1, 1, 2), ("grouped", 0, 1, 1, 2),
                                            ("grouped", 64, 2, 2, 1)):
            if name == "fp8 blocks" and (etp > 1 or block == 64):
                t.refused("--in", source, "--in-glu-block", "0", "--to", layout, "--glu-block", str(block), "--etp",
                          "0/%d" % etp, "--out", back + "x", out=back + "x",
                          needles=["linear_fc1.weight0", "row 64", "rows 0 to 127 (128x128)"])
                continue
            for e in range(ep):
                for x in range(etp):
                    for g in range(gtp):
                        t.ok("--in", source, "--in-glu-block", "0", "--to", layout, "--glu-block", str(block), "--ep",
                             "%d/%d" % (e, ep), "--etp", "%d/%d" % (x, etp), "--gtp", "%d/%d" % (g, gtp), "--out",
                             t.path("p-%d-%d-%d.safetensors" % (e, x, g)))
            join = ["--in", t.path("p-{ep}-{etp}-{gtp}.safetensors"), "--in-ep", str(ep), "--in-etp", str(etp),
                    "--in-gtp", str(gtp), "--from", layout, "--to", "indexed"]
            if spans and etp > 1:
                t.refused(*join, "--out", back + "x", out=back + "x", needles=["equal_scales", "ETP rank 1"])
                join.append("--equal-scales")
            t.ok(*join, "--out", back)
            assert read(back) == before, (name, layout, block, ep, etp, gtp)


@case
def quantized_names(t):
    """NVFP4 and FP8 per tensor as Hugging Face's models hold them, joined and taken apart again."""
    for layout, scale in (("qwen3-moe", "_scale"), ("deepseek-v3", "_scale_inv")):
        at, before = "model.layers.0.mlp.experts.%d.%s_proj.weight", {}
        for e in range(2):
            one = random.randbytes(4)
            for part, rows, cols in ("gate", 32, 64), ("up", 32, 64), ("down", 64, 32):
                n = at % (e, part)
                if layout == "qwen3-moe":
                    before[n] = filled("U8", [rows, cols // 2])
                    before[n + scale] = filled("F8_E4M3", [rows, cols // 16])
                    before[n + "_scale_2"] = ("F32", (), one)
                else:
                    before[n] = filled("F8_E4M3", [rows, cols])
                    before[n + scale] = ("F32", (), one)
        source, middle, back = t.path("hf.safetensors"), t.path("m.safetensors"), t.path("back.safetensors")
        write(source, before)
        t.refused("--in", source, "--from", layout, "--to", "grouped", "--out", back + "x", out=back + "x",
                  needles=["equal_scales", "row 32"])
        t.ok("--in", source, "--from", layout, "--to", "grouped", "--out", middle, "--equal-scales")
        got = read(middle)["decoder.layers.0.mlp.experts.linear_fc1.weight"]
        assert got[2] == b"".join(before[at % (e, p)][2] for e in range(2) for p in ("gate", "up"))
        t.ok("--in", middle, "--from", "grouped", "--to", layout, "--out", back)
        assert read(back) == before, layout
    before = quantized("nvfp4 and amax")
    write(source, before)
    t.refused("--in", source, "--in-glu-block", "0", "--to", "qwen3-moe", "--out", back + "x", out=back + "x",
              needles=["qwen3-moe", "amax"])


@case
def quantized_values(t):
    """What --dtype makes of codes and scales, against numpy and ml_dtypes."""
    import ml_dtypes, numpy
    dtypes = {"F32": numpy.float32, "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2,
              "F8_E8M0": ml_dtypes.float8_e8m0fnu}
    for name, (codes, packed, _, beside) in FORMATS.items():
        source, out = t.path("q.safetensors"), t.path("out.safetensors")
        before = quantized(name, 96, 160, 2)
        for n in list(before):  # no codes of NaN or Inf, scales around one
            dtype, shape, data = before[n]
            if "weight_scale" in n and dtype == "F32":
                before[n] = (dtype, shape, numpy.random.rand(len(data) // 4).astype("f4").tobytes())
            elif "weight_scale" in n:
                before[n] = (dtype, shape, bytes(100 + b % 50 for b in data))
            elif dtype.startswith("F8"):
                before[n] = (dtype, shape, bytes(b & 0xBF for b in data))
        write(source, before)
        arguments = ["--in", source, "--in-glu-block", "0", "--to", "indexed", "--dtype", "f32"]
        if name.startswith("nvfp4"):
            t.refused(*arguments, "--out", out + "x", out=out + "x",
                      needles=["linear_fc1.weight0", "keep them quantized"])
            continue
        t.ok(*arguments, "--out", out)
        got = read(out)
        for fc, rows, cols in (1, 192, 160), (2, 160, 96):
            for e in range(2):
                n = "decoder.layers.0.mlp.experts.linear_fc%d.weight" % fc
                bytes_ = numpy.frombuffer(before[n + str(e)][2], "u1")
                if packed == 2:
                    bytes_ = numpy.stack([bytes_ & 15, bytes_ >> 4], -1)
                    values = numpy.array([0, .5, 1, 1.5, 2, 3, 4, 6, 0, -.5, -1, -1.5, -2, -3, -4, -6], "f4")[bytes_]
                else:
                    values = bytes_.view(dtypes[codes]).astype("f4")
                (suffix, kind, shape), = beside(rows, cols)
                raw = numpy.frombuffer(before[n + suffix + str(e)][2], "u1")
                scale = raw.view(dtypes.get(kind, ml_dtypes.float8_e8m0fnu)).astype("f4").reshape(shape or [1, 1])
                by = (128, 128) if name == "fp8 blocks" else (rows // scale.shape[0], cols // scale.shape[1])
                scale = numpy.repeat(numpy.repeat(scale, by[0], 0), by[1], 1)[:rows, :cols]
                want = (values.reshape(rows, cols) * scale).astype("f4")
                have = numpy.frombuffer(got[n + str(e)][2], "f4").reshape(rows, cols)
                assert numpy.array_equal(have, want), (name, fc)


@case
def quantized_faults(t):
    """A scale that is missing or has another dtype, shape or number of experts; nothing is written."""
    at = "decoder.layers.0.mlp.experts.linear_fc2.weight"
    for name, (_, _, _, beside) in FORMATS.items():
        source, out = t.path("q.safetensors"), t.path("never.safetensors")
        suffix, dtype, shape = beside(128, 128)[0]

        def refuse(change, needle):
            tensors = quantized(name)
            change(tensors)
            write(source, tensors)
            t.refused("--in", source, "--in-glu-block", "0", "--to", "grouped", "--out", out, out=out,
                      needles=[needle])
        refuse(lambda m: m.pop(at + suffix + "2"), "linear_fc2.weight")
        refuse(lambda m: [m.pop(at + suffix + str(e)) for e in range(4)], "linear_fc")
        refuse(lambda m: m.update({at + suffix + "0": filled("I64", shape)}), "must be")
        refuse(lambda m: m.update({at + suffix + "3": filled("F16", shape)}), "not f16")
        refuse(lambda m: m.update({at + suffix + "0": filled(dtype, shape + [2])}), "shape")
        refuse(lambda m: m.update({at + suffix + "4": filled(dtype, shape)}), "linear_fc2.weight4")
        refuse(lambda m: m.update({at + suffix: filled(dtype, [4] + shape)}), "another layout")


@case
def shards_in_and_out(t):
    tensors = {"model.layers.%d.block_sparse_moe.experts.%d.%s.weight" % (l, e, w):
               filled("BF16", [6, 4] if w != "w2" else [4, 6]) for l in range(2) for e in range(3)
               for w in ("w1", "w2", "w3")}
    names = sorted(tensors)
    files = {n: "part-%d.safetensors" % (i % 3) for i, n in enumerate(names)}
    for i in range(3):
        part = "part-%d.safetensors" % i
        write(t.path(part), {n: tensors[n] for n in names if files[n] == part})
    index = t.path("model.safetensors.index.json")

    def put(weight_map):
        with open(index, "w") as f:
            json.dump({"metadata": {"total_size": 0}, "weight_map": weight_map}, f)

    put(files)
    t.ok("--in", index, "--from", "mixtral", "--to", "fused-transposed", "--shard-size", "300", "--out",
         t.path("o.safetensors"))
    with open(t.path("o.safetensors.index.json")) as f:
        weight_map = json.load(f)["weight_map"]
    assert len(set(weight_map.values())) > 1
    seen = {}
    for name in set(weight_map.values()):
        seen.update(read(t.path(name)))
    assert sorted(seen) == sorted(weight_map)
    back = t.path("one.safetensors")
    t.ok("--in", t.path("o.safetensors.index.json"), "--from", "fused-transposed", "--to", "mixtral", "--out", back)
    assert read(back) == tensors
    out = t.path("never.safetensors")
    refuse = lambda *needles: t.refused("--in", index, "--from", "mixtral", "--out", out, out=out, needles=needles)
    first = names[0]
    put(dict(files, **{first: "missing.safetensors"}))
    refuse("part-0", first)
    put(dict(files, **{first: "part-1.safetensors"}))
    refuse("part-", first)
    put({n: files[n] for n in names[1:]})
    refuse("part-0", first)
    put(dict(files, **{"ghost": "part-0.safetensors"}))
    refuse("part-0", "ghost")
    put(dict(files, **{first: "../part-0.safetensors"}))
    refuse(first)
    with open(index, "w") as f:
        f.write('{"weight_map":{"a":"part-0.safetensors"},"weight_map":{}}')
    refuse("weight_map")
    with open(index, "wb") as f:
        f.write(b'{"weight_map":{"\xff":"part-0.safetensors"}}')
    refuse("UTF-8")
    with open(index, "w") as f:
        f.write("[" * 100000)
    refuse("JSON")
    write(t.path("part-2.safetensors"), dict({n: tensors[n] for n in names if files[n] == "part-2.safetensors"},
                                             **{first: tensors[first]}))
    put(files)
    refuse("part-2", first)


@case
def sources_of_fewer_members(t):
    """Input that lacks experts or layers is not taken for a smaller model; --experts allows spare router rows."""
    path, out = t.path("lacking.safetensors"), t.path("out.safetensors")
    whole, at = mixtral(3, 4, f=8, h=6, router=True, norm=True), "model.layers.%d.block_sparse_moe.experts.%d.%s.weight"
    arguments = ["--in", path, "--from", "mixtral", "--out", out]

    def lack(*names):
        write(path, {n: v for n, v in whole.items() if n not in names})

    lack(at % (1, 3, "w2"))
    for layout in "indexed", "grouped", "mixtral":
        t.refused(*arguments, "--to", layout, out=out, needles=["lacks", at % (1, 3, "w2")])
    lack(*[at % (l, e, w) for l in range(3) for e in (2, 3) for w in ("w1", "w2", "w3")])
    t.refused(*arguments, "--to", "grouped", out=out, needles=["lacks", "2-3", ".w1.weight", "experts"])
    t.ok(*arguments, "--to", "grouped", "--experts", "2")
    got = read(out)
    assert got["decoder.layers.2.mlp.experts.linear_fc2.weight"][1] == (2, 6, 8)
    assert got["decoder.layers.2.mlp.router.weight"][1] == (4, 6)
    os.remove(out)
    lack(*[n for n in whole if ".1." in n[:15]])
    t.refused(*arguments, "--to", "grouped", out=out, needles=["lacks", "layer", "1"])


@case
def wrapped_keys(t):
    """Keys in a data-parallel wrapper all keep the wrapper's prefix, or all lose it."""
    path, out = t.path("wrapped.safetensors"), t.path("out.safetensors")
    whole = mixtral(2, 2, f=8, h=6, router=True, norm=True)
    for wrapper in "module.", "module.module.", "_orig_mod.module.", "_fsdp_wrapped_module.":
        write(path, {wrapper + n: v for n, v in whole.items()})
        for more, want in (([], wrapper), (["--prefix", wrapper], wrapper), (["--drop-wrappers"], "")):
            t.ok("--in", path, "--from", "mixtral", "--to", "indexed", "--out", out, *more)
            names = [n[len(want):] for n in read(out) if n.startswith(want)]
            assert sorted(names) == sorted([n for n in whole if "norm" in n] +
                                           ["decoder.layers.%d.mlp.%s" % (l, n) for l in range(2)
                                            for n in ["router.weight"] + ["experts.linear_fc%d.weight%d" % (i, e)
                                                                          for i in (1, 2) for e in range(2)]])
    t.refused("--in", path, "--from", "mixtral", "--out", out + "x", "--prefix", "module", out=out + "x",
              needles=["\"module\"", "end with a dot"])


@case
def other_dtypes(t):
    """Tensors of unknown dtypes are copied byte by byte; FP8 ones do not change how experts are sliced."""
    path, out = t.path("odd.safetensors"), t.path("out.safetensors")
    whole = {"decoder.layers.0.mlp.experts.linear_fc1.weight0": filled("BF16", [128, 16]),
             "decoder.layers.0.mlp.experts.linear_fc2.weight0": filled("BF16", [16, 64])}
    odd = {"a": ("F8_E4M3FNUZ", [4, 2], 8), "b": ("F8_E5M2FNUZ", [3], 3), "c": ("F6_E2M3", [4], 3),
           "d": ("X99", [5], 11), "e": ("F8_E4M3", [256, 4], 1024)}
    header, data = {}, b""
    for n, (dtype, shape, bytes_) in whole.items():
        header[n] = {"dtype": dtype, "shape": list(shape), "data_offsets": [len(data), len(data) + len(bytes_)]}
        data += bytes_
    for n, (dtype, shape, length) in odd.items():
        header[n] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + length]}
        data += random.randbytes(length)
    write_raw(path, header, data)
    for rank in range(2):
        t.ok("--in", path, "--from", "megatron", "--to", "indexed", "--in-glu-block", "0", "--gtp", "%d/2" % rank,
             "--out", out)
        with open(out, "rb") as f:
            size = struct.unpack("<Q", f.read(8))[0]
            got, rest = json.loads(f.read(size)), f.read()
        for n in odd:
            assert got[n]["dtype"] == header[n]["dtype"] and got[n]["shape"] == header[n]["shape"], n
            a, b = (v["data_offsets"] for v in (got[n], header[n]))
            assert rest[a[0]:a[1]] == data[b[0]:b[1]], n
        assert got["decoder.layers.0.mlp.experts.linear_fc1.weight0"]["shape"] == [64, 16], rank


# ------------------------------------------------------------------------------------------------- Corrupt files

@case
def recorded_layouts(t):
    """A recorded layout that no scheme has is named; ranks are recorded as numbers, however they were typed; a size
    below one byte is none."""
    source, part, joined = t.path("in.safetensors"), t.path("part-%d"), t.path("joined.safetensors")
    tensors = mixtral(1, 4)
    write(source, tensors, {"gmm.layout": "other"})
    for more in [], ["--from", "mixtral"], ["--inspect"]:
        t.refused("--in", source, "--out", joined, *more, needles=['it records the layout "other", which is unknown'])
    write(source, tensors, {"gmm.layout": "mixtral"})
    t.refused("--in", source, "--from", "indexed", "--out", joined, needles=["layout mixtral, but --from says indexed"])
    for size in "0.4", "0.0004K", "1e-10G", "-1", "5T":
        t.refused("--in", source, "--out", joined, "--shard-size", size, needles=["--shard-size", size], out=joined)
    for rank, typed in enumerate(["00/2", " 1/ 02"]):
        t.ok("--in", source, "--to", "mixtral", "--ep", typed, "--gtp", "0/01", "--out", part % rank)
        assert metadata(part % rank)["gmm.ep"] == "%d/2" % rank and "gmm.gtp" not in metadata(part % rank)
    t.ok("--in", t.path("part-{ep}"), "--in-ep", "2", "--to", "mixtral", "--out", joined)
    assert read(joined) == tensors


@case
def hostile_files(t):
    one = {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}
    two = {"dtype": "U8", "shape": [4], "data_offsets": [4, 8]}
    n = '{"%s":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}'
    path, out = t.path("bad.safetensors"), t.path("never.safetensors")
    cases = [
        ("length of 2^63", {"a": one}, b"0000", 1 << 63, ["header of 9223372036854775808"]),
        ("length past the end", {"a": one}, b"0000", 1 << 20, ["does not fit"]),
        ("truncated", {"a": one, "b": two}, b"0000", None, ["\"b\"", "truncated"]),
        ("longer than it says", {"a": one}, b"000000", None, ["4", "6"]),
        ("overlap", {"a": one, "b": dict(two, data_offsets=[2, 6])}, b"000000", None, ["\"b\"", "overlap"]),
        ("gap", {"a": one, "b": dict(two, data_offsets=[6, 10])}, b"0" * 10, None, ["\"b\"", "gap"]),
        ("past the end", {"a": dict(one, data_offsets=[0, 1 << 40])}, b"0000", None, ["\"a\""]),
        ("reversed", {"a": dict(one, data_offsets=[4, 0])}, b"0000", None, ["\"a\""]),
        ("past 2^53", (n % "a").replace("[4]", "[9007199254740993]").encode(), b"0000", None, ["2^53"]),
        ("product past 2^63", {"a": dict(one, shape=[1 << 40, 1 << 40])}, b"0000", None, ["\"a\""]),
        ("wrong size", {"a": dict(one, dtype="F32")}, b"0000", None, ["\"a\"", "16"]),
        ("negative", {"a": dict(one, shape=[-4])}, b"0000", None, ["character"]),
        ("fraction", {"a": dict(one, shape=[4.5])}, b"0000", None, ["character"]),
        ("duplicate", (n % "a")[:-1].encode() + b"," + (n % "a")[1:].replace("[0,4]", "[4,8]").encode(), b"0" * 8, None,
         ["\"a\"", "twice"]),
        ("duplicate field", {"a": one}, b"0000", None, ["\"a\"", "twice"]),
        ("deep", b'{"a":' + b"[" * 100000 + b"]" * 100000 + b"}", b"", None, ["JSON"]),
        ("deep objects", b'{"a":' * 5000 + b"{}" + b"}" * 5000, b"", None, ["JSON"]),
        ("name of 1 MB", (n % ("x" * (1 << 20))).replace("[4]", "[5]").encode(), b"0000", None, ["\"xxxx", "5"]),
        ("not UTF-8", (n % "a").encode().replace(b'"a"', b'"\xc3("'), b"0000", None, ["UTF-8"]),
        ("a NUL", (n % "a").replace('"a"', '"a\\u0000b"').encode(), b"0000", None, ["NUL"]),
        ("no JSON", b"{\"a\": nonsense}", b"", None, ["character"]),
        ("metadata that is no text", {"__metadata__": {"a": ["b"]}, "a": one}, b"0000", None,
         ["__metadata__", "\"a\""]),
        ("unknown field", {"a": dict(one, extra=1)}, b"0000", None, ["\"a\"", "extra"]),
        ("nine dimensions", {"a": dict(one, shape=[1] * 8 + [4])}, b"0000", None, ["\"a\"", "dimensions"]),
    ]
    for what, header, data, length, needles in cases:
        if what == "duplicate field":
            header = (n % "a").replace('"dtype"', '"dtype":"U8","dtype"').encode()
        write_raw(path, header, data, length)
        before = digest(path)
        try:
            t.refused("--in", path, "--out", out, out=out, needles=["bad.safetensors"] + needles)
        except AssertionError as e:
            raise AssertionError("%s: %s" % (what, e))
        assert digest(path) == before
    for size in (0, 7, 8):
        with open(path, "wb") as f:
            f.write(b"\0" * size)
        t.refused("--in", path, "--out", out, out=out, needles=["bad.safetensors"])
    os.remove(path)
    t.refused("--in", path, "--out", out, out=out, needles=["bad.safetensors", "No such file"])
    os.mkfifo(path)
    t.refused("--in", path, "--out", out, out=out, needles=["bad.safetensors", "regular"])
    os.remove(path)
    write_raw(path, (n % ("layer." * 100000 + "x")).encode(), b"0000")  # long, but right: no expert in it
    t.refused("--in", path, "--out", out, out=out, needles=["bad.safetensors", "no tensor"])


@case
def keys_that_do_not_fit(t):
    base = {"decoder.layers.0.mlp.experts.linear_fc%d.weight%d" % (i, e): filled("BF16", [8, 4] if i == 1 else [4, 4])
            for i in (1, 2) for e in range(3)}
    path, out = t.path("keys.safetensors"), t.path("never.safetensors")

    def refuse(change, *needles, arguments=("--in-glu-block", "0")):
        tensors = dict(base)
        change(tensors)
        write(path, tensors)
        before = digest(path)
        t.refused("--in", path, "--to", "grouped", "--out", out, *arguments, out=out, needles=needles)
        assert digest(path) == before

    fc1 = "decoder.layers.0.mlp.experts.linear_fc1.weight"
    refuse(lambda d: d.pop(fc1 + "1"), fc1 + "1")
    refuse(lambda d: d.update({fc1: filled("BF16", [3, 8, 4])}), fc1)
    refuse(lambda d: d.update({fc1 + "2": filled("BF16", [8, 5])}), fc1 + "2", "[8, 5]")
    refuse(lambda d: d.update({fc1 + "2": filled("F32", [8, 4])}), fc1 + "2", "f32")
    refuse(lambda d: d.update({fc1 + "2": filled("F64", [8, 4])}), fc1 + "2")
    refuse(lambda d: d.update({"a." + k: v for k, v in base.items()} | {"b." + k: v for k, v in base.items()}) or
           [d.pop(k) for k in base], "b.decoder")
    refuse(lambda d: d.update({"module." + fc1 + "0": d[fc1 + "0"]}), fc1 + "0")
    refuse(lambda d: None, "layer 0", arguments=("--glu-block", "2"))
    refuse(lambda d: None, "3", arguments=("--glu-block", "3", "--in-glu-block", "0"))
    refuse(lambda d: d.update({"norm": filled("BF16", [4])}), "norm", arguments=("--extra", "refuse"))
    t.refused("--in", path, "--out", path, needles=["replace the input"])
    for ranks in ("ep", "etp", "gtp"):  # the same file for every rank
        t.refused("--in", path, "--in-" + ranks, "2", "--out", out, out=out, needles=["{%s}" % ranks])


@case
def disk_full_and_short_sources(t):
    tensors = {"decoder.layers.0.mlp.experts.linear_fc%d.weight%d" % (i, e):
               filled("F32", [256, 128] if i == 1 else [128, 128]) for i in (1, 2) for e in range(8)}
    path, out = t.path("full.safetensors"), t.path("never.safetensors")
    write(path, tensors)
    before = digest(path)
    t.refused("--in", path, "--to", "grouped", "--out", out, limit=100000, out=out, needles=["never.safetensors"])
    assert not [f for f in os.listdir(t.folder) if "never" in f and "resume" not in f], os.listdir(t.folder)
    t.refused("--in", path, "--to", "grouped", "--out", t.path("no/folder/o"), needles=["no/folder/o"])
    mount = t.path("disk")
    os.mkdir(mount)
    if os.getuid() == 0 and subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", mount],
                                           capture_output=True).returncode == 0:
        try:
            out = os.path.join(mount, "never.safetensors")
            t.refused("--in", path, "--to", "grouped", "--out", out, out=out, needles=["No space left"])
        finally:
            subprocess.run(["umount", mount], check=True)
    assert digest(path) == before


# ---------------------------------------------------------------------------------------------- Stopped and resumed

@case
def killed_and_resumed(t):
    """Killed at random moments and restarted: the bytes are those of an undisturbed run, the source is unchanged."""
    experts = 24
    tensors = {}
    for e in range(experts):
        tensors["model.layers.0.mlp.experts.%d.gate_proj.weight" % e] = filled("BF16", [1024, 512])
        tensors["model.layers.0.mlp.experts.%d.up_proj.weight" % e] = filled("BF16", [1024, 512])
        tensors["model.layers.0.mlp.experts.%d.down_proj.weight" % e] = filled("BF16", [512, 1024])
    source, good, out = t.path("k.safetensors"), t.path("good.safetensors"), t.path("out.safetensors")
    write(source, tensors)
    before = digest(source)
    arguments = ["--in", source, "--from", "qwen3-moe", "--to", "legacy", "--glu-block", "64", "--cursor-bytes",
                 "1000000"]
    t.ok(*arguments, "--out", good)
    want, killed, resumed = digest(good), 0, 0

    def noted(path):
        try:
            with open(path + ".resume") as f:
                return int(f.read().split()[-1])
        except (OSError, IndexError, ValueError):
            return -1

    def kill_after(path, moves):
        """Whether the program was killed after it had recorded so many moves."""
        process = subprocess.Popen([os.path.join(t.build, "convert_checkpoint"), *arguments, "--out", path],
                                   stdout=subprocess.DEVNULL)
        while process.poll() is None and noted(path) < moves:
            pass
        time.sleep(0.01 * random.random())
        process.send_signal(signal.SIGKILL)
        return process.wait() != 0

    for i in range(6):
        for at in sorted(random.randrange(50) for _ in range(2)):
            if kill_after(out, at):
                killed += 1
                assert not os.path.exists(out)
        text = t.ok(*arguments, "--out", out)
        resumed += "going on after move" in text
        assert digest(out) == want
        assert not [f for f in os.listdir(t.folder) if f.endswith((".partial", ".resume"))]
        os.remove(out)
    assert digest(source) == before
    assert killed >= 6 and resumed >= 3, "killed %d times, resumed %d times: shows nothing" % (killed, resumed)
    assert kill_after(out + "2", 20)
    os.utime(source)  # another source: the earlier run does not count
    assert "going on" not in t.ok(*arguments, "--out", out + "2")
    assert digest(out + "2") == want


@case
def memory_and_dry_run(t):
    """A sparse 40 GB file: planned, and one rank of it written, in the scratch plus 16 MiB of memory; row 63."""
    path, out = t.path("sparse.safetensors"), t.path("rank.safetensors")
    header, at = {}, 0
    for l in range(26):
        for e in range(256):
            for part, shape in (("gate", [512, 1920]), ("up", [512, 1920]), ("down", [1920, 512])):
                header["model.layers.%d.mlp.experts.%d.%s_proj.weight" % (l, e, part)] = {
                    "dtype": "BF16", "shape": shape, "data_offsets": [at, at + 1920 * 512 * 2]}
                at += 1920 * 512 * 2
    text = json.dumps(header).encode()
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        f.truncate(8 + len(text) + at)
    out_text = t.ok("--in", path, "--from", "qwen3-moe", "--to", "grouped", "--dry-run", "--inspect")
    assert "39.26 GB" in out_text and "verified" in out_text
    command = [os.path.join(t.build, "convert_checkpoint"), "--in", path, "--from", "qwen3-moe", "--to", "grouped",
               "--glu-block", "32", "--ep", "3/256", "--out", out, "--quiet"]
    process = subprocess.Popen(command)
    peak = 0
    while process.poll() is None:
        try:
            with open("/proc/%d/status" % process.pid) as f:
                peak = max([peak] + [int(l.split()[1]) for l in f if l.startswith("RssAnon")])
        except OSError:
            pass
        time.sleep(0.002)
    assert process.returncode == 0 and 0 < peak < (64 + 16) * 1024, "%d KiB" % peak
    assert os.path.getsize(out) > 26 * 3 * 1920 * 512 * 2


# ------------------------------------------------------------------------------------- Files of other runs, and faults

def mixtral(layers, experts, f=6, h=4, router=False, norm=False):
    """A model: its experts, its router, and a tensor that belongs to no expert."""
    tensors = {}
    for l in range(layers):
        at = "model.layers.%d.block_sparse_moe." % l
        for e in range(experts):
            for w in ("w1", "w2", "w3"):
                tensors[at + "experts.%d.%s.weight" % (e, w)] = filled("BF16", [f, h] if w != "w2" else [h, f])
        if router:
            tensors[at + "gate.weight"] = filled("BF16", [experts, h])
        if norm:
            tensors["model.layers.%d.norm.weight" % l] = filled("BF16", [h])
    return tensors


def listing(folder, name):
    return sorted(f for f in os.listdir(folder) if f.startswith(name))


@case
def older_output_is_no_result(t):
    """The input is replaced, the run killed, and its temporary file removed: the older output does not pass for the
    result of the new input."""
    source, out, good = t.path("in.safetensors"), t.path("out.safetensors"), t.path("good.safetensors")
    arguments = ["--in", source, "--from", "mixtral", "--to", "fused", "--cursor-bytes", "1"]
    write(source, mixtral(2, 4))
    t.ok(*arguments, "--out", out)
    older = digest(out)
    for number in range(1, 40):
        write(t.path("new.safetensors"), mixtral(2, 4))
        os.replace(t.path("new.safetensors"), source)
        t.ok(*arguments, "--out", good)
        status, _ = t.faulty("fsync:%d:kill" % number, *arguments, "--out", out)
        if status == 0:
            break
        if os.path.exists(out + ".partial"):
            os.remove(out + ".partial")
        t.ok(*arguments, "--out", out)
        assert digest(out) == digest(good) != older, number
        older = digest(out)
    assert number > 8


@case
def last_write_that_fails(t):
    """Wherever bringing bytes to the disk fails, the run is an error, and the same command then makes the output anew;
    an older one does not pass for it. Where it was the last time, no file of the run is left."""
    source, out, good = t.path("in.safetensors"), t.path("out.safetensors"), t.path("good.safetensors")
    arguments = ["--in", source, "--from", "mixtral", "--to", "fused"]
    last = None
    for number in range(1, 40):
        write(source, mixtral(1, 4))
        t.ok(*arguments, "--out", out)
        older = digest(out)
        write(source, mixtral(1, 4))
        t.ok(*arguments, "--out", good)
        status, said = t.faulty("fsync:%d:fail" % number, *arguments, "--out", out)
        if status == 0:
            break
        assert status == 1 and "Input/output error" in said, (number, status, said)
        left = listing(t.folder, "out.")
        if digest(out) == older and "cannot finish" in said and left == ["out.safetensors"]:
            last = number
        t.ok(*arguments, "--out", out)
        assert digest(out) == digest(good) and listing(t.folder, "out.") == ["out.safetensors"], number
    assert number > 5 and last, "no fault was the last write's"


@case
def input_changes_while_it_is_read(t):
    source, out = t.path("in.safetensors"), t.path("out.safetensors")
    write(source, mixtral(1, 4))
    for change in ("time", "shorter", "replaced"):
        process = t.stopped("pwrite:5:stop", "--in", source, "--from", "mixtral", "--out", out)
        if change == "time":
            os.utime(source)
        elif change == "shorter":
            os.truncate(source, os.path.getsize(source) - 8)
        else:  # by another file: the one that was opened stays what it was
            write(t.path("new.safetensors"), mixtral(1, 4))
            os.replace(t.path("new.safetensors"), source)
        status, said = t.goes_on(process)
        if change == "replaced":
            assert status == 0, said
            continue
        assert status == 1 and ("changed while it was read" in said or "became shorter" in said), (change, status, said)
        assert not os.path.exists(out)
        if change == "time":
            assert not listing(t.folder, "out.")
        else:
            write(source, mixtral(1, 4))
            t.ok("--in", source, "--from", "mixtral", "--out", out)
            os.remove(out)


@case
def two_runs_with_one_output(t):
    """The second is refused and touches nothing; the first ends as if alone. A lock that nobody holds is taken over. A
    temporary file that another program put in the place of the run's own is not moved."""
    source, out, good = t.path("in.safetensors"), t.path("out.safetensors"), t.path("good.safetensors")
    write(source, mixtral(2, 4))
    one = ["--in", source, "--from", "mixtral", "--to", "fused"]
    other = ["--in", source, "--from", "mixtral", "--to", "qwen3-moe", "--dtype", "f32"]
    t.ok(*one, "--out", good)
    first = t.stopped("pwrite:6:stop", *one, "--out", out)
    try:
        before = listing(t.folder, "out.")
        t.refused(*other, "--out", out, out=out, needles=["locked", "process %d" % first.pid])
        t.refused(*other, "--out", out, "--restart", out=out, needles=["locked"])
        assert listing(t.folder, "out.") == before
    finally:
        status, said = t.goes_on(first)
    assert status == 0 and digest(out) == digest(good), said
    assert listing(t.folder, "out.") == ["out.safetensors"]
    os.remove(out)
    first = t.stopped("pwrite:6:stop", *one, "--out", out)
    first.kill()
    first.wait()
    assert os.path.exists(out + ".lock")
    t.ok(*other, "--out", out)
    assert listing(t.folder, "out.") == ["out.safetensors"]
    os.remove(out)
    for replaced in (0, 1):
        first = t.stopped("pwrite:6:stop", *one, "--out", out)
        os.remove(out + ".partial")
        if replaced:
            with open(out + ".partial", "wb") as f:
                f.write(b"another program's")
        status, said = t.goes_on(first)
        assert status == 1 and "removed or replaced" in said and not os.path.exists(out), said
    with open(out + ".partial", "rb") as f:
        assert f.read() == b"another program's"
    os.remove(out + ".partial")
    with open(out + ".lock", "w") as f:
        f.write("no lock file")
    t.refused(*one, "--out", out, out=out, needles=["out.safetensors.lock", "not empty"])
    assert os.path.getsize(out + ".lock") == 12


@case
def outputs_never_replace_inputs(t):
    """Every path that a run may write or remove is refused as its input, also through links, and stays unchanged."""
    tensors = mixtral(1, 4)
    names = sorted(tensors)

    def sharded(index, parts):
        files = {n: parts[i % len(parts)] for i, n in enumerate(names)}
        for part in parts:
            write(t.path(part), {n: tensors[n] for n in names if files[n] == part})
        with open(t.path(index), "w") as f:
            json.dump({"weight_map": files}, f)

    def refuse(source, out, *arguments, keep=()):
        before = {f: os.path.islink(t.path(f)) or digest(t.path(f)) for f in os.listdir(t.folder)
                  if not os.path.isdir(t.path(f))}
        for more in ((), ("--dry-run",), ("--restart",)):
            t.refused("--in", t.path(source), "--from", "mixtral", "--to", "fused", "--out", t.path(out), *arguments,
                      *more, needles=["replace the input"])
        assert before == {f: os.path.islink(t.path(f)) or digest(t.path(f)) for f in os.listdir(t.folder)
                          if not os.path.isdir(t.path(f))}

    sharded("model.safetensors.index.json", ["a.safetensors", "b.safetensors"])
    refuse("model.safetensors.index.json", "model.safetensors", "--shard-size", "1K")
    refuse("model.safetensors.index.json", "b.safetensors")
    for name in ("y.safetensors", "y.safetensors.partial", "y.safetensors.resume", "y.safetensors.resume.tmp",
                 "y.safetensors.lock"):
        write(t.path(name), tensors)
        refuse(name, "y.safetensors")
        os.link(t.path(name), t.path("hard"))
        os.symlink("hard", t.path("soft"))
        refuse("hard", "y.safetensors")
        refuse("soft", "y.safetensors")
        os.remove(t.path("soft"))
        os.remove(t.path("hard"))
        os.remove(t.path(name))
    write(t.path("z-00002-of-00002.safetensors"), tensors)
    refuse("z-00002-of-00002.safetensors", "z.safetensors", "--shard-size", "400")  # a file for each of two tensors
    two = mixtral(2, 4)
    write(t.path("there.safetensors"), {n: v for n, v in two.items() if "layers.0" in n})
    with open(t.path("old.index.json"), "w") as f:
        json.dump({"weight_map": {n: "there.safetensors" if "layers.0" in n else "gone.safetensors" for n in two}}, f)
    refuse("old.index.json", "gone.safetensors", "--partial")
    os.mkdir(t.path("folder"))
    os.symlink("folder", t.path("link"))
    write(t.path("folder/x.safetensors.partial"), tensors)
    refuse("folder/x.safetensors.partial", "link/x.safetensors")


@case
def outputs_that_are_folders(t):
    """A folder in the place of a file or an index is refused before anything is converted, in a dry run too."""
    source = t.path("in.safetensors")
    write(source, mixtral(1, 4))
    shards = ["--shard-size", "300"]
    for folder, arguments in ("out", []), ("out.index.json", shards), ("out-00002-of-00002.safetensors", shards):
        os.mkdir(t.path(folder))
        for more in [], ["--dry-run"]:
            t.refused("--in", source, "--from", "mixtral", "--to", "fused", "--out", t.path("out"), *arguments, *more,
                      needles=[t.path(folder) + " is a folder"])
            assert listing(t.folder, "out") == [folder], os.listdir(t.folder)
        os.rmdir(t.path(folder))
    trained = subprocess.run([os.path.join(t.build, "train_moe"), "--save", t.folder, "--steps", "1", "--svg", ""],
                             capture_output=True, text=True)
    assert trained.returncode == 1 and trained.stderr.endswith(t.folder + " is a folder\n"), trained.stderr


@case
def killed_while_shards_are_put_in_place(t):
    """An older sharded output is there. At every rename and removal: an index that is there names files of one output
    only, and the same command then ends the run."""
    source, out = t.path("in.safetensors"), t.path("out.safetensors")
    arguments = ["--in", source, "--from", "mixtral", "--to", "qwen3-moe", "--shard-size", "300"]

    def merged():
        """The tensors of the index's files; None without an index."""
        if not os.path.exists(out + ".index.json"):
            return None
        with open(out + ".index.json") as f:
            files = json.load(f)["weight_map"]
        parts = {f: read(t.path(f)) for f in set(files.values())}
        return {n: parts[f][n] for n, f in files.items()}

    for call in ("rename", "unlink"):
        for number in range(1, 40):
            write(source, mixtral(2, 3))
            t.ok(*arguments, "--out", out)
            older = merged()
            write(source, mixtral(2, 3))
            t.ok(*arguments, "--out", t.path("good.safetensors"))
            status, _ = t.faulty("%s:%d:kill" % (call, number), *arguments, "--out", out)
            there = merged()
            t.ok(*arguments, "--out", out)
            newer = merged()
            assert there in (None, older, newer), "a mix after %s %d" % (call, number)
            assert older != newer
            for f in listing(t.folder, "good-"):
                assert digest(t.path(f)) == digest(t.path(f.replace("good", "out"))), (call, number, f)
            assert not [f for f in os.listdir(t.folder) if f.endswith((".partial", ".resume", ".lock"))]
            if status == 0:
                break
        assert number > (6 if call == "rename" else 3), (call, number)


# ---------------------------------------------------------------------------------------------- Incomplete sources

@case
def incomplete_sources(t):
    source, out = t.path("in.safetensors"), t.path("out.safetensors")
    at = "model.layers.%d.block_sparse_moe.%s"

    def lacks(tensors, *needles, partial=(), arguments=()):
        """Refused with these words; with --partial the complete layers are converted."""
        write(source, tensors)
        said = t.refused("--in", source, "--from", "mixtral", "--out", out, *arguments, out=out,
                         needles=("lacks:", "--partial") + needles)
        if not partial:
            t.refused("--in", source, "--from", "mixtral", "--out", out, "--partial", out=out, needles=["no tensor"])
            return said
        text = t.ok("--in", source, "--from", "mixtral", "--to", "mixtral", "--out", out, "--partial", *arguments)
        for n in needles:
            assert n in text, (n, text)
        got = read(out)
        os.remove(out)
        assert got == {n: v for n, v in tensors.items() if "experts" not in n and "gate" not in n or
                       int(n.split(".")[2]) in partial}, (sorted(got), partial)
        return said

    whole = mixtral(4, 4, router=True)
    whole["model.norm.weight"] = filled("BF16", [4])
    write(source, whole)
    t.ok("--in", source, "--from", "mixtral", "--to", "mixtral", "--out", out)
    assert read(out) == whole
    os.remove(out)
    without = lambda *gone: {n: v for n, v in whole.items() if not any(n.startswith(g) for g in gone)}
    lacks(without(at % (1, "experts.2.w3.weight")), "layer 1: " + at % (1, "experts.2.w3.weight"), partial=(0, 2, 3))
    said = lacks(without(at % (1, "experts.2.w3.weight"), at % (2, "experts.3."), at % (3, "experts.0."),
                         at % (3, "experts.1.")),
                 at % (1, "experts.2.w3.weight"), at % (2, "experts.3.w1.weight"), at % (2, "experts.3.w2.weight"),
                 at % (3, "experts.N.w1.weight, N = 0-1: 2 of 4 experts"), partial=(0,))
    assert "layer 0" not in said
    lacks(without(*[at % (l, "experts.3.") for l in range(4)]), at % (0, "experts.3.w1.weight"), partial=())
    lacks(without("model.layers.1.", "model.layers.2."), "layers 1 to 2: no tensor at all", partial=(0, 3))
    lacks(without(*[at % (2, "experts.%d.w2" % e) for e in range(4)]), at % (2, "experts.N.w2.weight, N = 0-3"),
          partial=(0, 1, 3))
    lacks(without(*[at % (2, "experts.%d.w3" % e) for e in range(4)]), at % (2, "experts.N.w3.weight, N = 0-3"),
          partial=(0, 1, 3))
    lacks(without(at % (2, "gate")), "layer 2: " + at % (2, "gate.weight"), partial=(0, 1, 3))
    lacks(without(at % (2, "experts")), at % (2, "experts.N.w1.weight, N = 0-3"), partial=(0, 1, 3))
    states = dict(whole, **{"optimizer.exp_avg." + n: v for n, v in without(at % (3, "experts.1.w1")).items()
                            if "experts" in n})
    write(source, states)
    t.refused("--in", source, "--from", "mixtral", "--out", out, out=out,
              needles=["optimizer.exp_avg." + at % (3, "experts.1.w1.weight")])
    # ranks of expert parallelism that count their own experts, one of them without its last
    write(source, whole)
    for e in range(2):
        t.ok("--in", source, "--from", "mixtral", "--to", "indexed", "--ep", "%d/2" % e, "--out",
             t.path("ep-%d.safetensors" % e))
    back = ["--in", t.path("ep-{ep}.safetensors"), "--in-ep", "2", "--from", "indexed", "--to", "mixtral",
            "--in-glu-block", "0"]
    t.ok(*back, "--out", out)
    assert read(out) == whole
    os.remove(out)
    broken = read(t.path("ep-1.safetensors"))
    meta = metadata(t.path("ep-1.safetensors"))
    gone = "decoder.layers.3.mlp.experts.linear_fc2.weight1"
    write(t.path("ep-1.safetensors"), {n: v for n, v in broken.items() if n != gone}, meta)
    t.refused(*back, "--out", out, out=out, needles=["layer 3 of ep rank 1: " + gone])
    os.remove(t.path("ep-1.safetensors"))
    t.refused(*back, "--out", out, out=out, needles=["lacks:", "ep-1.safetensors"])


@case
def missing_shards(t):
    tensors = mixtral(3, 2, router=True)
    names = sorted(tensors)
    files = {n: "part-%d.safetensors" % int(n.split(".")[2]) for n in names}
    for part in sorted(set(files.values())):
        write(t.path(part), {n: tensors[n] for n in names if files[n] == part})
    index, out = t.path("in.safetensors.index.json"), t.path("out.safetensors")
    with open(index, "w") as f:
        json.dump({"weight_map": files}, f)
    arguments = ["--in", index, "--from", "mixtral", "--to", "mixtral", "--out", out]
    t.ok(*arguments)
    assert read(out) == tensors
    os.remove(out)
    os.remove(t.path("part-1.safetensors"))
    t.refused(*arguments, out=out, needles=["file " + t.path("part-1.safetensors"), "layer 1", "--partial"])
    assert "part-1.safetensors" in t.ok(*arguments, "--partial")
    assert read(out) == {n: v for n, v in tensors.items() if files[n] != "part-1.safetensors"}
    os.remove(out)
    os.remove(t.path("part-2.safetensors"))
    t.refused(*arguments, out=out, needles=["file " + t.path("part-1.safetensors"),
                                            "file " + t.path("part-2.safetensors")])
    os.remove(t.path("part-0.safetensors"))
    t.refused(*arguments, "--partial", out=out, needles=["none of the 3 files"])


@case
def passed_through_and_plan_table(t):
    source, out = t.path("in.safetensors"), t.path("out.safetensors")
    tensors = mixtral(3, 4, router=True)
    for l in range(3):
        for n in ("q_proj", "k_proj"):
            tensors["model.layers.%d.self_attn.%s.weight" % (l, n)] = filled("BF16", [4, 4])
    tensors["odd.name12"] = filled("I64", [2])
    write(source, tensors)
    arguments = ["--in", source, "--from", "mixtral", "--to", "indexed", "--dtype", "f32"]
    for more in (["--dry-run"], ["--out", out]):
        lines = [l.split() for l in t.ok(*arguments, *more).splitlines()]
        assert ["3", "model.layers.N.self_attn.q_proj.weight"] in lines
        assert ["3", "model.layers.N.self_attn.k_proj.weight"] in lines
        assert ["1", "odd.nameN"] in lines
        assert any("unrenamed:" in l and "7" in l for l in lines)
    lines = [l.split() for l in t.ok(*arguments, "--dry-run").splitlines()]
    moe, to = "model.layers.N.block_sparse_moe.experts.N.", "decoder.layers.N.mlp.experts."
    size = 3 * 4 * 6 * 4 * 4
    assert [moe + "w1.weight", to + "linear_fc1.weightN", "12", "convert", "BF16", "to", "F32", "1.15", "KB"] in lines
    assert [moe + "w3.weight", to + "linear_fc1.weightN", "12", "convert", "BF16", "to", "F32", "1.15", "KB"] in lines
    assert [moe + "w2.weight", to + "linear_fc2.weightN", "12", "convert", "BF16", "to", "F32", "1.15", "KB"] in lines
    assert ["model.layers.N.block_sparse_moe.gate.weight", "decoder.layers.N.mlp.router.weight", "3", "copy", "BF16",
            "96", "B"] in lines
    assert ["odd.nameN", "odd.nameN", "1", "copy", "I64", "16", "B"] in lines
    assert size == 1152 and not os.path.exists(out + ".lock")


@case
def inspects_without_from(t):
    """The layout is found from the keys; if several fit, all are named."""
    source, middle = t.path("in.safetensors"), t.path("middle.safetensors")
    write(source, mixtral(2, 4, f=8, router=True))
    seen = set()
    for layout in LAYOUTS:
        t.ok("--in", source, "--from", "mixtral", "--to", layout, "--out", middle)
        bare = t.path("bare.safetensors")
        write(bare, read(middle))  # no metadata
        # two-dimensional stacks do not tell the number of experts
        said = t.ok("--in", bare, "--inspect", *(["--experts", "4"] if layout == "legacy" else []))
        read_as = [l for l in said.splitlines() if l.startswith("read as ")]
        assert len(read_as) == 1, said
        name = {"indexed": "megatron", "grouped": "megatron", "olmoe": "qwen3-moe"}.get(layout, layout)
        assert name in read_as[0].split(";")[0], (layout, said)
        assert said.count("fc1") == 2 and said.count("fc2") == 2 and "gated" in said, said
        seen.add(read_as[0].split()[2])
        os.remove(middle)
    assert len(seen) > 6, seen
    write(source, {"a.0.weight": filled("F32", [2]), "a.1.weight": filled("F32", [2])})
    said = t.ok("--in", source, "--inspect")
    assert [["2", "a.N.weight"]] == [l.split() for l in said.splitlines() if "a.N" in l], said
    write(source, mixtral(1, 2))
    t.refused("--in", source, "--out", middle, out=middle, needles=["its keys fit --from mixtral"])
    broken = mixtral(2, 2)
    broken.pop("model.layers.0.block_sparse_moe.experts.1.w1.weight")
    write(source, broken)
    said = t.ok("--in", source, "--inspect")
    assert "layer 0: model.layers.0.block_sparse_moe.experts.1.w1.weight" in said and "layer 1" in said


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default="build")
    parser.add_argument("--filter", default="")
    parser.add_argument("--seed", type=int, default=1)
    o = parser.parse_args()
    failed = passed = 0
    os.makedirs(o.build, exist_ok=True)
    for function in CASES:
        if o.filter not in function.__name__:
            continue
        random.seed(o.seed)
        folder = tempfile.mkdtemp(prefix="checkpoint-", dir=o.build)
        try:
            function(Run(o.build, folder))
            passed += 1
            print("ok   " + function.__name__, flush=True)
        except Exception:
            failed += 1
            print("FAIL " + function.__name__ + "\n" + traceback.format_exc(), flush=True)
        finally:
            shutil.rmtree(folder)
    print("%d passed, %d failed" % (passed, failed))
    return failed > 0 or passed == 0


if __name__ == "__main__":
    sys.exit(main())
