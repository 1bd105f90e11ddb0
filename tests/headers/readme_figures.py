#!/usr/bin/env python3
"""Compares figures of README.md and docs/guide with tests/results. Prints what differs, and fails if something does.

In the sections of SECTIONS, each of which names one file of tests/results:
    the GPU and the versions of its first sentence, and its commit, are those of the file's benchmarks ("benchmarks of
    COMMIT"; where the file has "MLP benchmarks of COMMIT", of these in a section about MLPs);
    the figures of each row of a table (cells that are a number, or the name of a row such as dsv3/192/fc2d/bf16) stand,
    in this order, in one line of the file, each as a word.
In the whole of each page, a commit named beside a GPU of tests/results, in one sentence, is named in that GPU's file.
"""
import glob
import re
import sys


def in_order(line, words):
    """Whether the words stand in the line in this order, each with neither digit nor letter beside it."""
    at = 0
    for word in words:
        match = re.compile(r"(?<![\w.])" + re.escape(word) + r"(?![\w./]*\w)").search(line, at)
        if not match:
            return False
        at = match.end()
    return True


# Sections, and how many rows with figures each has at least.
GUIDE = "docs/guide/"
SECTIONS = {("README.md", "Numbers"): 6, ("README.md", "The expert MLP"): 6, (GUIDE + "recipes.md", "Speed"): 6,
            (GUIDE + "recipes.md", "Memory"): 3, (GUIDE + "parallelism.md", "What GTP costs"): 4,
            (GUIDE + "bench.md", "A row of products"): 3, (GUIDE + "bench.md", "A row of an expert MLP"): 1}


def section_faults(title, numbers, least_rows):
    wrong = []
    files = set(re.findall(r"tests/results/[\w.-]+\.txt", numbers))
    if len(files) != 1:
        return [f"the section {title} names {len(files)} files of tests/results, not one"]
    path = files.pop()
    text = open(path, encoding="utf-8").read()
    lines = text.split("\n")

    head = numbers.split("|")[0]
    commit = "MLP" in title and re.search(r"MLP benchmarks of ([0-9a-f]{7,40})\b", text)
    commit = commit or re.search(r"(?<!MLP )benchmarks of ([0-9a-f]{7,40})\b", text)
    if not commit:
        wrong.append(f'{path}: no "benchmarks of COMMIT"')
    elif re.findall(r"`([0-9a-f]{7,40})`", numbers) != [commit.group(1)]:
        wrong.append(f"{title}: names other commits than {path}'s one of the benchmarks, {commit.group(1)}")
    setting = re.search(r"^# (NVIDIA [^,\n]+),.*$", text, flags=re.M)
    for words in re.findall(r"NVIDIA \w+|CUDA [\d.]*\d|cuBLAS [\d.]*\d|torch [\d.]*\d", head):
        if not setting or words not in setting.group(0):
            wrong.append(f'{title}: "{words}" is not in the head of the benchmarks in {path}')

    rows = 0
    for row in re.findall(r"^\|(.*)\|$", numbers, flags=re.M):
        figures = [c.strip() for c in row.split("|")[1:] if re.fullmatch(r"\s*([\d.]+%?|\w+(/\w+)+)\s*", c)]
        if not figures:
            continue
        rows += 1
        if not any(in_order(line, figures) for line in lines):
            wrong.append(f"{title}: no line of {path} has {' '.join(figures)}: |{row}|")
    if rows < least_rows:
        wrong.append(f"{title}: {rows} rows with figures, which are too few to be all")
    return wrong


def main():
    wrong = []
    pages = ["README.md"] + glob.glob(GUIDE + "*.md")
    text_of = {page: open(page, encoding="utf-8").read() for page in pages}
    for (page, title), least_rows in SECTIONS.items():
        section = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", text_of[page], flags=re.M | re.S)
        if not section:
            sys.exit(f"{page} has no section {title}")
        wrong += [f"{page}: {fault}" for fault in section_faults(title, section.group(1), least_rows)]

    for file in glob.glob("tests/results/*.txt"):
        name = re.search(r"([a-z]+\d+)\.txt$", file)
        text = open(file, encoding="utf-8").read()
        for page, part in ((p, part) for p in pages for part in re.split(r"\n\s*\n|\.\)?\s", text_of[p])):
            if name and re.search(name.group(1), part, flags=re.I):
                wrong += [f"{file} does not name commit {c}, which {page} names for it"
                          for c in re.findall(r"`([0-9a-f]{7,40})`", part) if c not in text]
    for line in wrong:
        print(line)
    sys.exit(bool(wrong))


main()
