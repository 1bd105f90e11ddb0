#!/usr/bin/env python3
"""Writes what train_moe learns of a fixed text on the CPU engine, for five seeds: tests/data/training_curves.txt, and
tests/data/continued_curves.txt, the runs beside which tests/programs.py sets runs that change layout midway.

    python3 tests/tools/training_curves.py [--build build] [NAME.txt...]

tests/programs.py compares runs with these files. Write them again when a change is meant to alter what is computed.
"""
import argparse, hashlib, os, re, subprocess, tempfile

SEEDS = range(1, 6)
COLUMNS = "train", "held-out", "gradient"
# A step of 256 bytes takes milliseconds. Every kind of gradient of the model contributes: biases, router, both blocks.
MODEL = ["--context", "2", "--embed", "16", "--hidden", "32", "--ffn", "32", "--layers", "2", "--experts", "4",
         "--lr", "0.01", "--engine", "cpu", "--threads", "1", "--svg", "", "--sample", "0", "--eval-tokens", "1024"]
RUN = MODEL + ["--steps", "50", "--batch", "256", "--bias", "--dtype", "f32", "--report-every", "1"]
CONTINUED = MODEL + ["--steps", "60", "--batch", "128", "--micro-batches", "4", "--bias", "--report-every", "5"]
DATA = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "data")
FILES = {"training_curves.txt": RUN, "continued_curves.txt": CONTINUED}


def text():
    """20,000 letters of 22: each is a random function of the two before it, one in 20 is drawn anew.

    A model without experts, which is linear up to its norm, cannot compute such a function.
    """
    state, letters = 1, 22

    def draw(n):
        nonlocal state
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        return (state >> 33) % n

    table = [[draw(letters) for _ in range(letters)] for _ in range(letters)]
    drawn = [0, 1]
    while len(drawn) < 20000:
        drawn.append(draw(letters) if draw(20) == 0 else table[drawn[-1]][drawn[-2]])
    return bytes(ord("a") + d for d in drawn)


def curve(log):
    """[step][column] of a log of train_moe."""
    found = re.findall(r"^step +\d+/\d+" + "".join(r" .*?\b%s (\S+)" % c for c in COLUMNS), log, re.M)
    return [[float(value) for value in row] for row in found]


def read(name="training_curves.txt"):
    """The recorded curves: [seed][step][column]."""
    with open(os.path.join(DATA, name)) as f:
        rows = [[float(v) for v in line.split()[1:]] for line in f if not line.startswith("#")]
    n = len(COLUMNS)
    return [[row[n * k:n * k + n] for row in rows] for k in range(len(SEEDS))]


def record(build, name):
    curves, run = [], FILES[name]
    with tempfile.NamedTemporaryFile() as data:
        data.write(text())
        data.flush()
        for seed in SEEDS:
            command = [os.path.join(build, "train_moe"), "--data", data.name, "--seed", str(seed)] + run
            curves.append(curve(subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE).stdout))
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], text=True, stdout=subprocess.PIPE,
                            cwd=DATA).stdout.strip()
    every = int(run[run.index("--report-every") + 1])
    with open(os.path.join(DATA, name), "w") as out:
        out.write("# Loss of training, held-out loss and norm of the gradient after each step of train_moe.\n"
                  if every == 1 else
                  "# Every %d steps of train_moe: mean loss of training, held-out loss, mean norm of the gradient.\n"
                  % every)
        out.write("# Made by python3 tests/tools/training_curves.py at commit %s, seeds %d to %d:\n"
                  % (commit, SEEDS[0], SEEDS[-1]))
        out.write("# train_moe --data TEXT --seed SEED %s\n" % " ".join(a or "''" for a in run))
        out.write("# TEXT: text() in that script, sha256 %s\n" % hashlib.sha256(text()).hexdigest())
        out.write("# step, then for each seed: %s\n" % ", ".join(COLUMNS))
        for i, rows in enumerate(zip(*curves), 1):
            out.write("%2d %s\n" % (i * every, "  ".join(" ".join("%.4f" % v for v in row) for row in rows)))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default="build")
    parser.add_argument("names", nargs="*", default=list(FILES))
    o = parser.parse_args()
    for name in o.names:
        record(o.build, name)


if __name__ == "__main__":
    main()
