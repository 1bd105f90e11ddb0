#!/usr/bin/env python3
"""Tests what train_moe learns, and that it may be stopped and started from any folder; messages and charts.

    python3 tests/programs.py [--build build] [--filter TEXT]

Python's standard library is enough. Ends with "N passed, N failed, N skipped".
"""
import argparse, fcntl, hashlib, json, os, pty, re, shlex, shutil, signal, statistics, struct, subprocess, sys
import tempfile, termios, time, traceback
import xml.etree.ElementTree as xml

SMALL = ["--batch", "64", "--eval-tokens", "64", "--sample", "0", "--experts", "4", "--ffn", "32", "--hidden", "32",
         "--engine", "cpu", "--threads", "1"]
REPOSITORY = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(REPOSITORY, "tests", "tools"))
import training_curves
RECIPES = "bf16", "fp8-delayed", "fp8-current", "fp8-block", "mxfp8", "nvfp4"
CASES = []


class Skip(Exception):
    pass


def case(function):
    CASES.append(function)
    return function


def digest(path):
    with open(path, "rb") as f:
        return hashlib.sha256(f.read()).hexdigest()


def tensors_digest(path):
    """Of a safetensors file's tensors, without its header."""
    with open(path, "rb") as f:
        f.seek(int.from_bytes(f.read(8), "little"), os.SEEK_CUR)
        return hashlib.sha256(f.read()).hexdigest()


def read_file(path):
    """Header and data section of a safetensors file."""
    with open(path, "rb") as f:
        header = json.loads(f.read(int.from_bytes(f.read(8), "little")))
        return header, f.read()


def write_file(path, header, data):
    text = json.dumps(header).encode()
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text + data)


def tensors(path, expert_names=True):
    """{name: (shape, bytes)}; without expert_names, grouped experts under the names of indexed ones."""
    header, data = read_file(path)
    found = {}
    for name, t in header.items():
        if name == "__metadata__":
            continue
        shape, values = t["shape"], data[slice(*t["data_offsets"])]
        if expert_names or not re.search(r"experts\.linear_fc[12]\.(weight|bias)$", name):
            found[name] = tuple(shape), values
            continue
        for e in range(shape[0]):
            size = len(values) // shape[0]
            found[name + str(e)] = tuple(shape[1:]), values[e * size:(e + 1) * size]
    return found


class Run:
    def __init__(self, build, folder):
        self.build, self.folder = os.path.abspath(build), os.path.abspath(folder)

    def path(self, name):
        return os.path.join(self.folder, name)

    def start(self, name, *arguments, cwd=None):
        """In a process group of its own, as a shell starts it."""
        return subprocess.Popen([os.path.join(self.build, name)] + list(arguments), cwd=cwd or self.folder, text=True,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)

    def end(self, process, code=0):
        out, err = process.communicate(timeout=300)
        assert process.returncode == code, "ended with %d\n%s%s" % (process.returncode, out, err)
        return out if code in (0, 130, 143) else err

    def run(self, name, *arguments, code=0, cwd=None):
        return self.end(self.start(name, *arguments, cwd=cwd), code)

    def write_text(self, size=None):
        with open(self.path("text"), "wb") as f:
            f.write(training_curves.text()[:size])

    def run_all(self, name, commands, at_once=2):
        """What each of the commands prints, some of them beside each other."""
        running, printed = [], []
        for i in range(len(commands) + at_once):
            if i >= at_once and i - at_once < len(commands):
                printed.append(self.end(running[i - at_once]))
            if i < len(commands):
                running.append(self.start(name, *commands[i]))
        return printed

    def can_save(self):
        process = self.start("train_moe", *SMALL, "--steps", "1", "--svg", "", "--quiet", "--save", self.path("can"))
        out, err = process.communicate(timeout=300)
        if process.returncode and "cjson" in err.lower():
            raise Skip(err.strip())
        assert process.returncode == 0, err

    def stopped(self, number, *arguments):
        """A long run that gets the signal once its first steps are made: how many it made, and what continues it."""
        process = self.start("train_moe", *SMALL, "--steps", "4000", "--svg", "", "--save-every", "1", *arguments)
        saved = self.path(arguments[arguments.index("--save") + 1])
        for _ in range(3000):
            if os.path.exists(saved):
                break
            time.sleep(0.02)
        os.kill(process.pid, number)
        out = self.end(process, 128 + number)
        found = re.search(r"^stopped after step (\d+) of 4000; saved (\S+), continue with\n(.*)\n", out, re.M)
        assert found, out
        assert "held-out" not in out.splitlines()[-1], out  # it is not evaluated
        return int(found[1]), found[3]


@case
def stopped_and_continued(t):
    """SIGINT and SIGTERM, one rank, and two with grouped keys: the step is finished and saved; a run continued by the
    printed command saves the bits of a run that was never stopped."""
    t.can_save()
    two = ["--gtp", "2", "--keys", "grouped"]
    for number, ranks in (signal.SIGINT, []), (signal.SIGTERM, []), (signal.SIGTERM, two):
        saved = t.path("stopped.safetensors")
        if os.path.exists(saved):
            os.remove(saved)
        step, command = t.stopped(number, "--save", "stopped.safetensors", *ranks)
        assert 0 < step < 4000
        assert not [n for n in os.listdir(t.folder) if "partial" in n]
        more = shlex.split(command)
        assert more[1:3] == ["--resume", "stopped.safetensors"], command
        last = str(step + 3)
        out = t.run("train_moe", *more[1:], "--save-every", "0", "--stop-at", last)
        assert "resumed stopped.safetensors after step %d of 4000" % step in out, out
        t.run("train_moe", *SMALL, "--steps", "4000", "--svg", "", "--stop-at", last, "--save", "whole.safetensors",
              *ranks)
        assert digest(saved) == digest(t.path("whole.safetensors")), (number, ranks, step)


@case
def command_for_the_shell(t):
    """The printed command is the run's to a shell, whatever program, files and values are called."""
    t.can_save()
    folder, saved, picture = t.path("it's $HOME"), "a 'b' \"c\" `d`", "'" + "x" * 5000
    os.mkdir(folder)
    shutil.copy(os.path.join(t.build, "train_moe"), folder)
    t.write_text(1000)
    arguments = ["--svg", picture, "--save-every", "1", "--data", "text", "--save", saved]
    process = Run(folder, t.folder).start("train_moe", *SMALL, "--steps", "1000000", *arguments)
    while not os.path.exists(t.path(saved)):
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGTERM)
    command = t.end(process, 143).splitlines()[-1]
    assert shlex.split(command) == [
        os.path.join(folder, "train_moe"), "--resume", saved, "--data", "text", "--engine", "cpu", "--threads", "1",
        "--save", saved, "--save-every", "1", "--svg", picture, "--eval-tokens", "64", "--sample", "0"], command
    command += " --svg '' --stop-at 1"
    again = subprocess.run(["sh", "-c", command], cwd=t.folder, capture_output=True, text=True)
    assert again.returncode == 0 and "resumed %s after step " % saved in again.stdout, again.stderr


@case
def saving_fails(t):
    """Where no file can be made any more, the message gives the reason, once for all ranks."""
    t.can_save()
    for ranks in [], *[["--gtp", "4", "--micro-batches", "4"]] * 5:
        os.mkdir(t.path("to"))
        process = t.start("train_moe", *SMALL, "--steps", "1000000", "--svg", "", "--save-every", "1", "--save",
                          "to/a", *ranks)
        while not os.path.exists(t.path("to/a")):
            time.sleep(0.01)
        os.rename(t.path("to"), t.path("away"))
        err = t.end(process, 1)
        # what fails first depends on the moment: a rank may have made, opened or written the file already
        assert re.fullmatch(r"train_moe: saving to/a: cannot [^\n]+\n", err), err
        shutil.rmtree(t.path("away"))


@case
def processes_without_sigchld(t):
    """Processes that fail, as all do with --engine cpu, end the program where the caller ignores SIGCHLD, too."""
    for ignored in 0, 1:
        process = subprocess.Popen([os.path.join(t.build, "train_moe"), *SMALL, "--gtp", "2", "--processes"],
                                   stderr=subprocess.PIPE, text=True,
                                   preexec_fn=lambda: ignored and signal.signal(signal.SIGCHLD, signal.SIG_IGN))
        try:
            _, err = process.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        assert process.returncode == 1 and "--processes is for ranks on GPUs" in err, err


@case
def stopped_without_a_name(t):
    """Without --save, the stopped run is saved beside where its picture would be."""
    t.can_save()
    process = t.start("train_moe", *SMALL, "--steps", "4000000")
    time.sleep(2)
    os.kill(process.pid, signal.SIGINT)
    out = t.end(process, 130)
    assert "saved build/train_moe.safetensors" in out, out
    assert os.path.getsize(t.path("build/train_moe.safetensors")) > 100000


@case
def second_signal_ends_at_once(t):
    """A second signal ends the program during a long step, and the saved file stays complete."""
    process = t.start("train_moe", *SMALL, "--steps", "4000", "--batch", "262144", "--svg", "", "--quiet")
    time.sleep(1)
    os.kill(process.pid, signal.SIGINT)
    time.sleep(0.2)
    os.kill(process.pid, signal.SIGINT)
    began = time.time()
    process.communicate(timeout=300)
    assert process.returncode == -signal.SIGINT, process.returncode
    assert time.time() - began < 5


@case
def text_from_anywhere(t):
    """Without --data the text is the repository's, whatever the working directory is and holds."""
    with open(t.path("decoy.py"), "w") as f:
        f.write("# not to be learned\n" * 100000)
    few = SMALL + ["--steps", "1", "--svg", ""]
    lines = [t.run("train_moe", *few, cwd=c).splitlines()[0] for c in (REPOSITORY, t.folder, "/")]
    assert len(set(lines)) == 1 and " files of %s)" % REPOSITORY in lines[0], lines
    size = int(re.match(r"text: (\d+) bytes", lines[0])[1])
    assert 500000 < size < 20000000, size
    outside = tempfile.mkdtemp(prefix="elsewhere-")  # neither the program nor the folder is in the repository
    try:
        shutil.copy(os.path.join(t.build, "train_moe"), outside)
        shutil.copy(t.path("decoy.py"), outside)
        alone = Run(outside, outside)
        for word in "no text to learn", "--data FILE", "gmm.h", "examples/apps/train_moe.c":
            assert word in alone.run("train_moe", *few, code=1), word
        assert lines[0] == alone.run("train_moe", *few, cwd=os.path.join(REPOSITORY, "tests")).splitlines()[0]
        out = alone.run("train_moe", *few, "--data", "decoy.py")
        assert out.startswith("text: 2000000 bytes (1 file, decoy.py)"), out
    finally:
        shutil.rmtree(outside)


@case
def text_without_builds(t):
    """The repository's text has no file of a folder that is hidden or named build, and no broken link."""
    with tempfile.TemporaryDirectory(prefix="elsewhere-") as root:
        sources = ["gmm.h", "gmm_gtp.h", "Makefile", "examples/apps/train_moe.c", "examples/a.py", "tests/a/a.md"]
        for name in sources + ["examples/build/lib/b.py", "tests/a/build/b.c", "tests/.a/b.c"]:
            os.makedirs(os.path.dirname(os.path.join(root, name)), exist_ok=True)
            with open(os.path.join(root, name), "w") as f:
                f.write("b" * 1000)
        os.symlink("nothing", os.path.join(root, "tests/a/c.py"))
        os.mkdir(os.path.join(root, "bin"))
        shutil.copy(os.path.join(t.build, "train_moe"), os.path.join(root, "bin"))
        out = Run(os.path.join(root, "bin"), root).run("train_moe", *SMALL, "--steps", "1", "--svg", "")
        assert out.startswith("text: 6000 bytes (6 files of %s)" % os.path.realpath(root)), out


@case
def many_layers(t):
    """As many layers as --layers takes, with biases, are trained."""
    few = ["--context", "1", "--embed", "1", "--hidden", "1", "--ffn", "1", "--experts", "1", "--topk", "1", "--batch",
           "2", "--steps", "1", "--eval-tokens", "1", "--sample", "0", "--svg", "", "--engine", "cpu", "--threads", "1"]
    t.write_text(100)
    assert " 1000 layers of 1 experts" in t.run("train_moe", *few, "--data", "text", "--layers", "1000", "--bias")


@case
def batches_that_do_not_divide(t):
    """Messages name the numbers that do not divide, and values that would."""
    few = ["--steps", "1", "--sample", "0", "--svg", "", "--eval-tokens", "64", "--engine", "cpu"]
    for arguments, words in [
        (["--gtp", "3"], ["--gtp 3: --batch 1024 is not divisible by 3", "try --batch 1026", "Layers, experts"]),
        (["--gtp", "3", "--micro-batches", "4"], ["--micro-batches 4 is no multiple of --gtp 3"]),
        (["--gtp", "3", "--micro-batches", "6"], ["--batch 1024 is not divisible by --micro-batches 6", "1026"]),
        (["--micro-batches", "3"], ["--batch 1024 is not divisible by --micro-batches 3", "try --batch 1026"]),
    ]:
        err = t.run("train_moe", *few, *arguments, code=1)
        for word in words:
            assert word in err, (word, err)
    t.run("train_moe", *SMALL, "--steps", "1", "--svg", "", "--gtp", "3", "--batch", "66")


@case
def recipes_learn(t):
    """Every recipe learns nearly what bf16 learns in 300 steps, and that needs the experts.

    The text is such that a recipe whose experts do not learn fails: with experts that stay as they were drawn, bf16
    ends at 1.8 times the loss, and a model without experts at 2.5 times.
    """
    t.write_text()
    same = training_curves.MODEL + ["--data", "text", "--steps", "300", "--batch", "128", "--report-every", "100"]
    runs = [same + ["--recipe", r] for r in RECIPES] + [same + ["--layers", "0"]]
    losses = [float(re.search(r"^held-out (\S+) nats", out, re.M)[1]) for out in t.run_all("train_moe", runs)]
    start = training_curves.curve(t.run("train_moe", *same, "--steps", "1"))[0][1]
    bf16, bare = losses[0], losses[-1]
    assert bf16 < start / 5, (bf16, start)
    assert bare > 2 * bf16, (bare, bf16)
    for recipe, loss in zip(RECIPES, losses):
        assert loss < 1.5 * bf16, (recipe, loss, bf16)


@case
def training_follows_its_record(t):
    """50 steps give the losses and gradients of tests/data/training_curves.txt.

    The run in fp32 has the values of its seed up to rounding: fused multiplications, other vectors and -ffast-math move
    them by 1e-4 of their value at most. 0.9 times the gradient of a parameter moves them by 6e-4 (FC1's bias) or more,
    of a weight by 0.015 or more. And losses stay within three standard deviations of the mean of the recorded seeds.
    """
    t.write_text()
    curves, seed = training_curves.read(), training_curves.SEEDS[0]
    out = t.run("train_moe", "--data", "text", "--seed", str(seed), *training_curves.RUN)
    steps = training_curves.curve(out)
    assert len(steps) == len(curves[0]) == 50 and len(curves) == 5, (len(steps), len(curves))
    for i, (row, recorded) in enumerate(zip(steps, curves[0]), 1):
        for k, name in enumerate(training_curves.COLUMNS):
            assert abs(row[k] - recorded[k]) <= 5e-4 * recorded[k], (i, name, row[k], recorded[k])
            others = [c[i - 1][k] for c in curves]
            apart, spread = abs(row[k] - statistics.mean(others)), statistics.stdev(others)
            assert name == "gradient" or apart <= 3 * spread, (i, name, row[k], others)


@case
def policies_train_alike(t):
    """What forward saves, the cache of weights, delayed weight gradients and ranks leave every bit of training."""
    t.can_save()
    t.write_text(1000)
    few = training_curves.MODEL + ["--data", "text", "--steps", "4", "--batch", "64", "--micro-batches", "4",
                                   "--report-every", "4", "--quiet"]

    def trained(recipe, variants):
        runs = [few + ["--recipe", recipe, "--save", "%d.safetensors" % i] + v for i, v in enumerate(variants)]
        t.run_all("train_moe", runs)
        return [tensors_digest(t.path("%d.safetensors" % i)) for i in range(len(variants))]

    for recipe in RECIPES:
        saves = ["auto", "preact", "act", "nothing"] + ["quantized"] * (recipe != "bf16")
        same = [[], ["--weight-cache", "0"], ["--gtp", "4"]] + [["--save-policy", s] for s in saves[1:]]
        same += [["--gtp", "4", "--save-policy", "nothing"] + delay for delay in ([], ["--delay-wgrad"])]
        same = trained(recipe, same + [["--delay-wgrad", "--save-policy", s] for s in saves])
        assert len(set(same)) == 1, (recipe, same)
        # Neither cache nor save policy changes another backward's bits. E4M3 and other backwards do.
        plain = ["--weight-cache", "0", "--save-policy", "preact"]
        exact, rows = ["--backward", "high-precision"], ["--backward", "dequantized"]
        others = [] if recipe == "bf16" else [exact, plain + exact, rows, plain + rows]
        found = trained(recipe, [["--preact-e4m3"]] + others)
        assert found[1:2] == found[2:3] and found[3:4] == found[4:5], (recipe, found)
        assert len({same[0], *found}) == (2 if recipe == "bf16" else 4), (recipe, found)


@case
def interleaved_ranks_train_alike(t):
    """Ranks that shard interleaved rows of FC1 leave every bit of training, in every recipe."""
    ranks_train_alike(t, [], [["--gtp", "4", "--micro-batches", "4"]])


@case
def gpu_ranks_train_alike(t):
    """The same on GPUs: processes, which share one GPU where there is one, and on two GPUs threads too."""
    def works(*ranks):
        process = t.start("train_moe", *SMALL[:-4], "--engine", "mma", "--steps", "1", "--svg", "", *ranks)
        process.communicate(timeout=300)
        return process.returncode == 0

    if not works():
        raise Skip("no GPU")
    two = ["--gtp", "2", "--micro-batches", "2"]
    threads = [two] if works(*two) else []
    ranks_train_alike(t, ["--engine", "mma"], [two + ["--processes"]] + threads)


def ranks_train_alike(t, engine, variants):
    """Each of the variants saves what one rank saves with as many micro-batches."""
    t.can_save()
    t.write_text(1000)
    model = list(training_curves.MODEL)
    at = model.index("--engine")
    model[at:at + 2] = engine or model[at:at + 2]
    few = model + ["--data", "text", "--steps", "3", "--batch", "64", "--report-every", "4", "--quiet"]
    for recipe in RECIPES:
        for rows in [], ["--interleave", "8"]:
            for n, ranks in enumerate(variants):
                whole = ["--micro-batches", ranks[ranks.index("--micro-batches") + 1]]
                same = few + ["--recipe", recipe] + rows
                t.run("train_moe", *same, *whole, "--save", "whole%d" % n)
                t.run("train_moe", *same, *ranks, "--save", "ranks%d" % n)
                found = [tensors_digest(t.path(name % n)) for name in ("whole%d", "ranks%d")]
                assert found[0] == found[1], (recipe, rows, ranks)


@case
def policies_refused(t):
    """Messages say why a combination of policies is none."""
    for arguments, words in [
        (["--save-policy", "quantized"], ["save: 3 keeps quantized operands and needs a recipe"]),
        (["--recipe", "fp8-block", "--save-policy", "quantized", "--backward", "high-precision"], ["config.save"]),
        (["--recipe", "fp8-block", "--save-policy", "nothing", "--preact-e4m3"], ["--preact-e4m3", "nothing"]),
        (["--recipe", "fp8-block", "--backward", "dequantized", "--gtp", "2"], ["--gtp", "--backward dequantized"]),
        (["--gtp", "2", "--processes"], ["--processes is for ranks on GPUs"]),
        (["--processes"], ["--processes", "not without --gtp"]),
        (["--save-every", "2"], ["--save-every", "not without --save"]),
        (["--backward", "dequantized"], ["--backward dequantized", "not with bf16"]),
        (["--dropout", "0.003"], ["--dropout 0.003 hides nothing", "multiple of 1/256"]),
    ]:
        err = t.run("train_moe", *SMALL, "--steps", "1", "--svg", "", *arguments, code=1)
        for word in words:
            assert word in err, (word, err)


@case
def choices_are_single(t):
    """Several items of a list of choices, a part of one and an empty text are no choice."""
    for program, name, choices in [("train_moe", "recipe", "bf16|fp8-delayed"), ("train_moe", "act", "qgelu|silu"),
                                   ("gtp_planner", "format", "bf16|fp8")]:
        first = choices.split("|")[0]
        for text in choices, choices + "|", "|" + first, first + "|", first[:-1], "":
            err = t.run(program, "--svg", "", "--" + name, text, code=1)
            assert err.startswith("%s: --%s takes " % (program, name)) and 'not "%s"' % text in err, (text, err)


# ---- Runs that continue in another layout

TINY = training_curves.MODEL + ["--data", "text", "--steps", "8", "--batch", "64", "--micro-batches", "4", "--bias"]
ON = ["--data", "text", "--engine", "cpu", "--threads", "1", "--svg", "", "--sample", "0", "--eval-tokens", "1024"]
SAVED = re.compile(r"^(?:optimizer\.exp_avg(?:_sq)?\.)?decoder\.layers\.\d\.mlp\.experts\.linear_fc[12]\.(weight|bias)")


@case
def layouts_keep_every_bit(t):
    """Masters, moments and scales pass through any number of ranks and both kinds of keys as they are; training then
    continues to the bit where sums have the same order: on one rank, or on as many as there are micro-batches."""
    t.can_save()
    t.write_text(1000)
    for recipe in "bf16", "fp8-delayed", "mxfp8":
        same = TINY + ["--recipe", recipe]
        t.run_all("train_moe", [same + ["--save", "whole"], same + ["--save", "begun", "--stop-at", "4"]])
        steps = [["--gtp", "2"], ["--gtp", "4", "--keys", "grouped"], ["--keys", "grouped"], ["--gtp", "2"],
                 ["--gtp", "4"], []]
        before, last = tensors(t.path("begun")), "begun"
        for name, (_, values) in before.items():  # mean of gradients, or of their squares
            if name.startswith("optimizer."):
                least = min(struct.unpack("<%df" % (len(values) // 4), values))
                assert least >= 0 if ".exp_avg_sq." in name else least < 0, (recipe, name, least)
        for i, layout in enumerate(steps):
            t.run("train_moe", *ON, "--resume", last, "--stop-at", "4", "--save", "moved%d" % i, *layout)
            last = "moved%d" % i
            assert tensors(t.path(last), False) == before, (recipe, i)
            grouped = {n: s for n, (s, _) in tensors(t.path(last)).items() if SAVED.fullmatch(n)}
            assert len(grouped) == (24 if "--keys" in layout else 0), (recipe, i, grouped)
            for name, shape in grouped.items():
                wanted = {"linear_fc1.weight": (4, 64, 32), "linear_fc1.bias": (4, 64),
                          "linear_fc2.weight": (4, 32, 32), "linear_fc2.bias": (4, 32)}
                assert shape == wanted[name.split("experts.")[1]], (name, shape)
        assert digest(t.path(last)) == digest(t.path("begun")), recipe
        for i, layout in enumerate([["--gtp", "4", "--keys", "grouped", "--stop-at", "6"], []]):
            t.run("train_moe", *ON, "--resume", last, "--save", "on%d" % i, *layout)
            last = "on%d" % i
        assert digest(t.path(last)) == digest(t.path("whole")), recipe


@case
def recipes_change_midway(t):
    """Masters and moments carry over to another recipe and back as they are. Quantized weights and scales are made
    anew, alike on one rank and on four; delayed scaling starts as in a new run, and a line says so."""
    t.can_save()
    t.write_text(1000)
    t.run("train_moe", *TINY, "--save", "bf16", "--stop-at", "4")
    before, results = tensors(t.path("bf16")), set()
    news = "delayed scaling starts as in a new run, with scales of 1 and empty amax histories\n"
    left = "the scales and amax histories of delayed scaling are not carried over\n"
    for recipe in RECIPES[1:]:
        delayed = recipe == "fp8-delayed"
        out = t.run("train_moe", *ON, "--resume", "bf16", "--recipe", recipe, "--stop-at", "4", "--save", recipe)
        assert "recipe: bf16 in the checkpoint, %s from here on\n" % recipe in out, out
        assert out.count(news) == delayed and left not in out, out
        found = tensors(t.path(recipe))
        state = {n: found.pop(n)[1] for n in list(found) if "_extra_state" in n}
        assert found == before and read_file(t.path(recipe))[0]["__metadata__"]["config.recipe"] == recipe
        assert len(state) == 16 * delayed
        for name, values in state.items():
            floats = set(struct.unpack("<%df" % (len(values) // 4), values))
            assert floats == {1.0 if ".scale_" in name else 0.0}, (name, floats)
        runs = [["--resume", source, "--recipe", recipe, "--stop-at", "6", "--save", "%s-%d" % (recipe, i)] + ranks
                for i, (source, ranks) in enumerate([("bf16", []), ("bf16", ["--gtp", "4"]), (recipe, [])])]
        t.run_all("train_moe", [ON + r for r in runs])
        went = {digest(t.path("%s-%d" % (recipe, i))) for i in range(3)}
        assert len(went) == 1, recipe
        results |= went
        out = t.run("train_moe", *ON, "--resume", recipe, "--recipe", "bf16", "--stop-at", "4", "--save", "back")
        assert "recipe: %s in the checkpoint, bf16 from here on\n" % recipe in out, out
        assert out.count(left) == delayed and news not in out, out
        assert digest(t.path("back")) == digest(t.path("bf16")), recipe
        out = t.run("train_moe", *ON, "--resume", recipe + "-0", "--quiet", "--recipe", "bf16")
        assert len(out.splitlines()) == 1, out
    assert len(results) == 5
    out = t.run("train_moe", *ON, "--resume", "bf16", "--recipe", "fp8-block", "--backward", "dequantized")
    assert "backward: recipe in the checkpoint, dequantized from here on\n" in out, out


@case
def micro_batches_follow_ranks(t):
    """A run resumed on ranks whose number does not divide the checkpoint's micro-batches has one for each."""
    t.can_save()
    t.write_text(1000)
    t.run("train_moe", *TINY, "--save", "begun", "--stop-at", "4")
    out = t.run("train_moe", *ON, "--resume", "begun", "--gtp", "8", "--save", "eight")
    assert "micro-batches: 4 in the checkpoint, 8 from here on, one for each rank\n" in out, out
    t.run("train_moe", *ON, "--resume", "begun", "--micro-batches", "8", "--save", "same")
    assert digest(t.path("eight")) == digest(t.path("same"))
    err = t.run("train_moe", *ON, "--resume", "begun", "--gtp", "3", code=1)
    for word in "--gtp 3", "--micro-batches 4", "--batch 64":
        assert word in err, err


# Two changes of a run of 60 steps, after the 20th and the 40th.
CHANGES = [
    ("1, 2, 1 ranks", ["--gtp", "2"], []),
    ("1, 4, 1 ranks", ["--gtp", "4"], []),
    ("1, 2, 4 ranks", ["--gtp", "2"], ["--gtp", "4"]),
    ("grouped and back", ["--keys", "grouped"], []),
] + [("bf16, %s, bf16" % r, ["--recipe", r], ["--recipe", "bf16"]) for r in RECIPES[1:]] + [
    ("4 ranks nvfp4, 2 mxfp8", ["--gtp", "4", "--keys", "grouped", "--recipe", "nvfp4"],
     ["--gtp", "2", "--recipe", "mxfp8"])]


@case
def continued_within_spread(t):
    """A run that continues in another layout or recipe has the held-out loss of one that never stopped, within three
    times the standard deviation of the recorded seeds at each step; within 0.01 where only the order of sums and names
    differ (moments that are lost move it by 0.05)."""
    t.can_save()
    t.write_text()
    first = training_curves.SEEDS[0]
    same = training_curves.CONTINUED + ["--data", "text", "--seed", str(first)]
    recorded = training_curves.read("continued_curves.txt")
    assert len(recorded) == 5 and len(recorded[0]) == 12
    spread = [statistics.stdev(c[i][1] for c in recorded) for i in range(12)]
    whole = [row[1] for row in training_curves.curve(t.run("train_moe", *same))]
    for loss, others, s in zip(whole, zip(*recorded), spread):
        assert abs(loss - statistics.mean(row[1] for row in others)) <= 3 * s, (loss, others)
    t.run("train_moe", *same, "--stop-at", "20", "--save", "begun")
    on = ON + ["--report-every", "5"]
    middle = t.run_all("train_moe", [on + ["--resume", "begun", "--stop-at", "40", "--save", "middle%d" % i] + c[1]
                                     for i, c in enumerate(CHANGES)])
    end = t.run_all("train_moe", [on + ["--resume", "middle%d" % i] + c[2] for i, c in enumerate(CHANGES)])
    print("     held-out loss at step%s" % "".join("%9d" % s for s in range(25, 61, 5)))
    print("     %-23s%s" % ("never stopped", "".join("%9.4f" % v for v in whole[4:])))
    print("     %-23s%s" % ("3 x spread of 5 seeds", "".join("%9.4f" % (3 * s) for s in spread[4:])))
    failed = []
    for (name, *changes), *logs in zip(CHANGES, middle, end):
        apart = [row[1] - w for row, w in zip(sum(map(training_curves.curve, logs), []), whole[4:])]
        assert len(apart) == 8, (name, logs)
        print("     %-23s%s" % (name, "".join("%+9.4f" % a for a in apart)))
        failed += [(name, a, s) for a, s in zip(apart, spread[4:])
                   if not abs(a) <= (3 * s if "--recipe" in changes[0] else min(3 * s, 0.01))]
    assert not failed, failed


@case
def foreign_checkpoints_refused(t):
    """What does not fit is refused in one sentence, on one rank and on several, before anything is written."""
    t.can_save()
    t.write_text(1000)
    t.run_all("train_moe", [TINY + ["--stop-at", "4", "--save", "indexed"],
                            TINY + ["--stop-at", "4", "--save", "grouped", "--keys", "grouped"]])
    fc1 = "decoder.layers.1.mlp.experts.linear_fc1.weight"

    def refuse(words, source="indexed", arguments=(), rename=(), tensor=None, value=None, **metadata):
        header, data = read_file(t.path(source))
        for key, text in metadata.items():
            key = key.replace("__", "-").replace("_", ".", 1) if "config" in key else key.replace("gmm_", "gmm.")
            header["__metadata__"][key] = text
            if text is None:
                del header["__metadata__"][key]
        for old, new in rename:
            header = {n.replace(old, new): v for n, v in header.items()}
        if tensor:
            header[tensor].update(value)
        write_file(t.path("bad"), header, data)
        files = sorted(os.listdir(t.folder))
        for ranks in [], ["--gtp", "2"]:
            err = t.run("train_moe", *ON, "--resume", "bad", "--save", "new", *ranks, *arguments, code=1)
            assert err.startswith("train_moe: ") and err.count("\n") == 1, err
            for word in words:
                assert word in err, (word, err)
            assert sorted(os.listdir(t.folder)) == files, os.listdir(t.folder)

    refuse([fc1, "has 3 experts, the checkpoint's configuration 4"], rename=[(fc1 + "3", fc1 + "x")])
    refuse([fc1, "has 2 experts, the checkpoint's configuration 4"], "grouped", tensor=fc1,
           value={"shape": [2, 128, 32]})
    refuse(["router.weight is F32 [4, 32], the checkpoint's configuration makes it F32 [8, 32]"], config_experts="8")
    refuse([fc1 + "2 is F32 [32, 64], the checkpoint's configuration makes it F32 [64, 32]"], tensor=fc1 + "2",
           value={"shape": [32, 64]})
    refuse([fc1 + " is F32 [4, 32, 64], the"], "grouped", tensor=fc1, value={"shape": [4, 32, 64]})
    refuse([fc1 + "2 is I32 [64, 32]", "makes it F32 [64, 32]"], tensor=fc1 + "2", value={"dtype": "I32"})
    refuse(["lacks the tensor optimizer.exp_avg_sq." + fc1], rename=[("optimizer.exp_avg_sq." + fc1, "other")])
    refuse(["lacks the tensor output_layer.bias"], rename=[("output_layer.bias", "other")])
    refuse(["does not make 54 of its tensors, as ", "decoder.layers.1."], config_layers="1")
    refuse(["layout mixtral", "--from mixtral --to indexed"], gmm_layout="mixtral")
    refuse(['layout "heap" of its experts is unknown'], gmm_layout="heap")
    refuse(["part 0/2 of the weights by gmm.ep"], gmm_ep="0/2")
    refuse(['no valid gmm.glu_block: "x"'], gmm_glu_block="x")
    refuse(["gmm.glu_block 5 does not divide config.ffn 32"], gmm_glu_block="5")
    refuse(["lacks config.hidden"], config_hidden=None)
    refuse(["config.recipe takes bf16|", 'not "fp7"'], config_recipe="fp7")
    refuse(["config.recipe takes bf16|", 'not "bf16|fp8-delayed"'], config_recipe="bf16|fp8-delayed")
    refuse(["at step 9 of 8"], step="9")
    refuse(['producer is "other"'], producer="other")
    refuse(["--experts 8 contradicts the checkpoint bad, which has 4"], arguments=["--experts", "8"])
    refuse(["--dtype f32 contradicts the checkpoint bad, which has bf16"], arguments=["--dtype", "f32"])
    refuse(["trained on another text"], arguments=["--data", "indexed"])


@case
def older_checkpoints_resume(t):
    """Options that the first checkpoints had not may be missing: their default is what these were made with."""
    t.can_save()
    t.write_text(1000)
    t.run_all("train_moe", [TINY + ["--save", "whole"], TINY + ["--stop-at", "4", "--save", "begun"]])
    younger = ["dropout 0", "recipe bf16", "backward recipe", "preact-e4m3 0"]
    for some in [younger[i:i + 1] for i in range(4)] + [younger]:
        header, data = read_file(t.path("begun"))
        for option in some:
            del header["__metadata__"]["config." + option.split()[0]]
        write_file(t.path("older"), header, data)
        out = t.run("train_moe", *ON, "--resume", "older", "--save", "on")
        for option in younger:
            assert ("%s: not in the checkpoint, so %s\n" % tuple(option.split()) in out) == (option in some), out
        assert digest(t.path("on")) == digest(t.path("whole")), some


def legends(path):
    """Of each chart with curves: the frame's right edge, and (left, right, text) of its legend."""
    root = xml.parse(path).getroot()
    space = "{http://www.w3.org/2000/svg}"
    frames, found = [], []
    for e in root:
        if e.tag == space + "rect" and e.get("fill") == "none":
            frames.append((float(e.get("x")), float(e.get("y")), float(e.get("width")), float(e.get("height"))))
        if e.tag == space + "text" and e.get("text-anchor", "start") == "start" and not e.get("font-size") and \
                not e.get("transform"):
            width = float(e.get("textLength") or 7 * len(e.text))  # else as wide as a sans-serif of 12 may be
            found.append((frames[-1], float(e.get("x")), float(e.get("x")) + width, float(e.get("y")), e.text))
    return float(root.get("width")), found


@case
def legends_inside(t):
    """Legends lie inside the frame, with short names and long ones."""
    t.run("train_moe", *SMALL, "--steps", "3", "--svg", t.path("train.svg"))
    t.run("gtp_planner", "--gpus", "8", "--svg", t.path("plan.svg"))
    with open(t.path("log"), "w") as f:
        f.write("step 1/2  train 3.0  held-out 3.1  aux 1\nstep 2/2  train 2.0  held-out 2.1  aux 1\n")
    t.run("loss_curves", t.path("curves.svg"), "short=" + t.path("log"), "x" * 50 + "=" + t.path("log"))
    for name, count in ("train.svg", 3), ("plan.svg", 8), ("curves.svg", 2):
        width, found = legends(t.path(name))
        assert len(found) == count, (name, found)
        for (x, y, w, h), left, right, base, text in found:
            assert x < left and right < x + w <= width and y < base - 10 and base < y + h, (name, text, left, right)


@case
def loss_curves_of_logs(t):
    """Long logs are drawn whole; what cannot be drawn is refused in words."""
    with open(t.path("log"), "w") as f:
        f.writelines("step %d/9000  train 3.0  held-out %f  aux 1\n" % (i, 1 / i) for i in range(1, 9001))
    assert t.run("loss_curves", "all.svg", "all=log", "again=log") == "all 0.000\nagain 0.000\n"
    with open(t.path("all.svg")) as f:
        points = [len(p.split()) for p in re.findall(r'points="([^"]*)"', f.read())]
    assert points == [9000, 9000], points
    with open(t.path("other"), "w") as f:
        f.write("nothing\n")
    for arguments, words in [(["a=gone"], "gone: No such file or directory"), (["a=other"], "other: holds no held-out"),
                             (["a<b=log"], "a<b: "), (["a&b=log"], "a&b: "), (["a>b=log"], "a>b: "),
                             (["log"], "log: is not NAME=LOG"), (["a=" + t.folder], "Is a directory")]:
        err = t.run("loss_curves", "bad.svg", *arguments, code=1)
        assert words in err and not os.path.exists(t.path("bad.svg")), (arguments, err)


@case
def status_line_fits(t):
    """The status line stays on one line of the terminal, and the time left in bounds, however long it is."""
    t.write_text(1000)
    for columns in 60, 120:
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        command = [os.path.join(t.build, "train_moe"), *SMALL, "--data", t.path("text"), "--batch", "4096", "--svg", "",
                   "--steps", "1000000000"]
        process = subprocess.Popen(command, stdout=theirs, stderr=subprocess.DEVNULL)
        os.close(theirs)
        out = b""
        while out.count(b"\r\x1b[K") < 4:
            out += os.read(ours, 65536)
        process.kill()
        process.wait()
        os.close(ours)
        lines = out.decode(errors="replace").split("\r\x1b[K")[1:3]
        for line in lines:
            assert re.match(r"\[\.{20}\]   0% 999:00:00 left  step \d+ ", line), line
            assert columns - 3 <= len(line) < columns, (columns, len(line), line)


@case
def planner_makes_its_folder(t):
    """The picture's default folder is made where the planner is started elsewhere."""
    assert "\npicture: build/gtp_planner.svg\n" in t.run("gtp_planner", "--gpus", "2")
    assert legends(t.path("build/gtp_planner.svg"))[1]


@case
def planner_fails_last(t):
    """What failed is the last line, behind the tables, where both streams are one."""
    r = subprocess.run([os.path.join(t.build, "gtp_planner"), "--gpus", "2", "--svg", t.folder], text=True,
                       stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    last = r.stdout.splitlines()[-1]
    assert r.returncode == 1 and last == "gtp_planner: cannot write %s: Is a directory" % t.folder, r.stdout


@case
def planner_explains(t):
    """Every column has its meaning below the table; the term "moments" is explained."""
    out = t.run("gtp_planner", "--gpus", "4", "--svg", "")
    for column in ("weights", "gradient", "moments", "gathered", "wgrad", "received", "saved", "other", "layer", "kept",
                   "recompute", "reduced", "GTP", "EP", "EP more", "gathers", "reduce", "step"):
        assert re.search(r"^ *%s  \w" % column, out, re.M), column
    for word in "first and second moment", "running means of the gradient", "fp32 copy", "hidden:", "exposed:":
        assert word in out, word


def table(out, title):
    """The rows of a table of gtp_planner: {first column: {name of a column: value}}. Columns end below their names."""
    names, *lines = out[out.index(title):].splitlines()[1:]
    rows = {}
    for line in lines:
        words = list(re.finditer(r"\S+", line))
        if len(words) < 2 or not re.match(r"[\d.-]+$", words[1][0]):
            return rows
        ends = [0] + [w.end() for w in words]
        rows[words[0][0]] = {names[a:b].strip(): w[0] for a, b, w in zip(ends, ends[1:], words)}
    return rows


def near(got, want, digits=3):
    return abs(float(got) - want) <= 0.51 * 10**-digits


@case
def planner_counts(t):
    """Bytes by formulas that are written here once more: activations, gathers, reductions, all-to-alls."""
    hidden, ffn, experts, layers, rows, topk, ep = 4096, 1024, 8, 10, 65536, 4, 16
    shape = {"hidden": hidden, "ffn": ffn, "experts": experts, "layers": layers, "tokens": rows, "topk": topk, "ep": ep}
    shape = ["--%s=%d" % pair for pair in shape.items()] + ["--gpus", "16", "--svg", ""]
    out = t.run("gtp_planner", *shape)
    saved, preact, act, x = table(out, "Activations"), 4 * ffn, 2 * ffn, 2 * hidden
    per_row = {"preact": preact + x, "act": preact + act + x, "nothing": x, "preact-e4m3": preact / 2 + x}
    for name, size in per_row.items():
        layer = rows * (size + 12)
        kept, again = float(saved[name]["kept"]), float(saved[name]["recompute"])
        assert near(saved[name]["layer"], 1e-9 * layer), (name, saved[name])
        assert kept >= 1e-9 * (layers * layer + 4 * rows * x), (name, kept)
        assert abs(kept - again - 1e-9 * ((layers - 1) * layer - layers * rows * x / topk)) < 2e-3, (name, kept, again)
    assert saved["quantized"]["layer"] == "-", saved
    quantized = table(t.run("gtp_planner", *shape, "--format", "fp8"), "Activations")["quantized"]["layer"]
    copies = 1e-9 * (hidden + ffn)  # of a row; one scale a tensor; each expert's rows are padded to at most 128 more
    least = rows * copies + 1e-9 * rows * (preact + 12)
    assert least - 1e-3 < float(quantized) < least + experts * 128 * copies + 1e-3, (quantized, least)

    layer = 3 * hidden * ffn * experts * 2  # of weights in bf16
    for g, row in table(out, "What a GPU receives").items():
        others = (int(g) - 1) / int(g)
        # backward finds the last layer's FC1 and FC2 in the slots that forward has left
        gathered, reduced = 1e-9 * (2 * layers - 1) * layer * others, 1e-9 * layers * layer * others
        exchanged = [1e-9 * layers * 4 * rows * x * (n - 1) / n for n in (ep, ep * int(g))]
        assert near(row["gathered"], gathered) and near(row["reduced"], reduced), (g, row, gathered, reduced)
        assert near(row["GTP"], gathered + reduced) and near(row["EP"], exchanged[0]), (g, row)
        assert near(row["EP more"], exchanged[1] - exchanged[0]), (g, row)
    for g, row in table(out, "Memory of a GPU").items():
        parts = "weights", "gradient", "moments", "gathered", "wgrad", "received", "saved", "other"
        assert abs(sum(float(row[p]) for p in parts) - float(row["total"])) < 0.005, (g, row)
        assert near(row["saved"], float(saved["preact"]["kept"])), (g, row)
        assert near(row["weights"], 1e-9 * layers * layer / int(g)), (g, row)


@case
def planner_together(t):
    """Bundles that are gathered together share a latency, and need slots of their own."""
    gathered = []
    for together, calls in (1, 20 + 19), (2, 10 + 9), (4, 5 + 4):  # backward finds the last ones in their slots
        out = t.run("gtp_planner", "--layers=10", "--gpus=2", "--prefetch=0", "--latency=1000", "--link=100",
                    "--together=%d" % together, "--svg=")
        received = float(table(out, "What a GPU receives")["2"]["gathered"])
        step, memory = table(out, "A micro-batch in ms")["2"], table(out, "Memory of a GPU")["2"]
        assert abs(float(step["gathers"]) - calls - received / 100 * 1e3) < 0.02, (together, step, received)
        gathered.append(float(memory["gathered"]))
    fc1, fc2 = (1e-9 * 8 * 2 * 7168 * n for n in (4096, 2048))  # of one bundle; slots are counted for both shapes
    assert all(abs(g - n * (fc1 + fc2)) < 0.01 for g, n in zip(gathered, (1, 1, 2))), (gathered, fc1, fc2)


@case
def planner_judges(t):
    """The verdict says whether it fits; what it says of a change is what a run with that change says."""
    shape = ["--gpus", "16", "--svg", "", "--capacity"]
    totals = {g: float(row["total"]) for g, row in table(t.run("gtp_planner", *shape, "1"), "Memory of a GPU").items()}
    least = min(totals.values())
    for capacity in least - 1, least + 1, max(totals.values()) + 1:
        out = t.run("gtp_planner", *shape, str(capacity))
        fits = {g for g, row in table(out, "Memory of a GPU").items() if row["fits"] == "yes"}
        assert fits == {g for g, total in totals.items() if total <= capacity}, (capacity, fits)
        assert ("It fits." in out) == bool(fits) and ("It does not fit" in out) == (not fits), out
        if fits:
            steps = {float(row["step"]): g for g, row in table(out, "A micro-batch in ms").items() if g in fits}
            assert re.search(r"that fit: %s GPU" % steps[min(steps)], out), (steps, out)
    out = t.run("gtp_planner", *shape, "60")
    alone = out[out.index("Verdict"):].split("None alone")[0]
    found = re.findall(r"^    --([\w-]+)=(\S+): (\S+) GB with (\d+) GPUs?, (fits|does not fit) \(", alone, re.M)
    assert len(found) == 6 and {f[4] for f in found} == {"fits", "does not fit"}, alone
    for name, value, total, g, verdict in found:
        flag = ["--recompute"] if name == "recompute" else ["--" + name, value]
        now = t.run("gtp_planner", *shape, "60", *flag)
        row = table(now, "Memory of a GPU")[g]
        assert near(total, float(row["total"]), 1) and (row["fits"] == "yes") == (verdict == "fits"), (name, row, total)
        assert ("It fits." in now) == (verdict == "fits"), now
    assert "None alone suffices" in t.run("gtp_planner", *shape, "30")
    assert "All of this is too little" in t.run("gtp_planner", *shape, "21")
    assert "no quantized copies" in t.run("gtp_planner", *shape, "141", "--save-policy", "quantized", code=1)


@case
def planner_is_quick(t):
    """Plans for up to 16,384 GPUs are there in less than ten seconds."""
    began = time.time()
    out = t.run("gtp_planner", "--gpus", "16384", "--svg", t.path("plan.svg"))
    assert time.time() - began < 10 and "\n 16384 " in out


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default="build")
    parser.add_argument("--filter", default="")
    o = parser.parse_args()
    count = {"ok": 0, "FAIL": 0, "skip": 0}
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    for function in CASES:
        if o.filter not in function.__name__:
            continue
        folder, what, why = tempfile.mkdtemp(prefix="programs-", dir=o.build), "ok", ""
        try:
            function(Run(o.build, folder))
        except Skip as s:
            what, why = "skip", ": %s" % s
        except Exception:
            what, why = "FAIL", "\n" + traceback.format_exc()
        finally:
            shutil.rmtree(folder)
        count[what] += 1
        print("%-4s %s%s" % (what, function.__name__, why), flush=True)
    print("%d passed, %d failed, %d skipped" % (count["ok"], count["FAIL"], count["skip"]))
    return count["FAIL"] > 0 or count["ok"] == 0


if __name__ == "__main__":
    sys.exit(main())
