"""coverage.py FOLDER [--missed]: lines of the library and of examples/common that a build with CONFIG=coverage SRC=1
has run, by part, as a table on stdout; with --missed also the numbers of those that it has not. Lines come from gcov,
which reads the counters beside each object; headers were assembled with the names of their parts. The status is 1
where the CPU engine or host code is below LEAST."""
import collections
import glob
import gzip
import json
import os
import subprocess
import sys

LEAST = 90.0  # per cent
GROUPS = [
    ("CPU engine", ("src/gmm/cpu/",)),
    ("host code", ("src/gmm/core/", "src/gmm/checkpoint/", "src/gmm/api/", "src/gmm_quant/", "src/gmm_gtp/")),
    ("examples/common", ("examples/common/",)),
]


def counters(folder):
    """{file: {line: count}} of all objects, each line's counts added up."""
    found = collections.defaultdict(lambda: collections.defaultdict(int))
    objects = [os.path.join(folder, "gmm.gcda")] + sorted(glob.glob(os.path.join(folder, "obj/examples/common/*.gcda")))
    for data in objects:
        text = subprocess.run(["gcov", "--json-format", "--stdout", data], check=True, capture_output=True).stdout
        if text[:2] == b"\x1f\x8b":
            text = gzip.decompress(text)
        for part in text.decode().splitlines():
            for file in json.loads(part)["files"]:
                name = os.path.relpath(os.path.normpath(file["file"]))
                for line in file["lines"]:
                    found[name][line["line_number"]] += line["count"]
    return found


def ranges(numbers):
    """Line numbers as text: 3-5 9."""
    text, first, last = [], None, None
    for n in sorted(numbers) + [None]:
        if first is not None and n == last + 1:
            last = n
            continue
        if first is not None:
            text.append(str(first) if first == last else f"{first}-{last}")
        first = last = n
    return " ".join(text)


def main():
    found = counters(sys.argv[1])
    missed = "--missed" in sys.argv
    rows, totals = [], []
    for title, folders in GROUPS:
        run = all_lines = 0
        for name in sorted(found):
            if not name.startswith(folders):
                continue
            lines = found[name]
            hit = sum(1 for count in lines.values() if count)
            run, all_lines = run + hit, all_lines + len(lines)
            rows.append((name, hit, len(lines), [n for n, count in lines.items() if not count]))
        totals.append((title, run, all_lines))
    print("Lines that the tests run on the CPU (make coverage): run, all, per cent")
    print()
    for title, run, all_lines in totals:
        print(f"{title:<44}{run:>7}{all_lines:>7}{100 * run / max(all_lines, 1):>8.1f}")
    print()
    for name, hit, count, lacking in rows:
        print(f"{name:<44}{hit:>7}{count:>7}{100 * hit / count:>8.1f}")
        if missed and lacking:
            print("    " + ranges(lacking))
    return any(100 * run < LEAST * count for title, run, count in totals[:2])


if __name__ == "__main__":
    sys.exit(main())
