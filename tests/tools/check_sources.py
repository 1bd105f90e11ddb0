#!/usr/bin/env python3
"""Counts what the sources are to have less of, and fails where a count is above its limit.

    check_sources.py [--worst N] [--lower] [--self-test] [--words FILE] [--limits FILE] [FILE...]

Counted, over the files given, or the parts below src/, or else the headers at the top:
    lines per part; lines and parameters per function; inline PTX (asm) outside PTX_PARTS; the words of words.txt,
    in identifiers, comments and strings, outside of the contexts that words.txt excepts.
limits.txt holds one limit per count. --lower rewrites it with the counts that are below theirs; it raises none.
"""
import bisect
import os
import re
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
PART_LINES, FUNCTION_LINES, PARAMETERS = 700, 120, 8
PTX_PARTS = ("common/ptx.cuh", "common/ptx_wgmma.cuh", "common/body_wgmma.cuh", "gmm_quant/ptx.h")
KEYWORDS = {"if", "for", "while", "switch", "return", "sizeof", "defined", "asm", "volatile"}
ATTRIBUTES = re.compile(r"__launch_bounds__|__attribute__|GMM__\w*BOUNDS$")


def blank(text, comments_too=True):
    """The text with comments and the insides of literals blanked; line breaks stay."""
    pattern = r"/\*.*?\*/|//[^\n]*|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'"

    def wipe(match):
        s = match.group()
        if s[0] == "/" and not comments_too:
            return s
        inner = re.sub(r"[^\n]", " ", s)
        return inner if s[0] == "/" else s[0] + inner[1:-1] + s[0]

    return re.sub(pattern, wipe, text, flags=re.S)


def without_directives(code):
    """Preprocessor lines blanked, with their continuations."""
    return re.sub(r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*", lambda m: re.sub(r"[^\n]", " ", m.group()), code, flags=re.M)


def matching(code, close):
    """Position of the parenthesis that the one at `close` closes, or -1."""
    depth = 0
    for i in range(close, -1, -1):
        depth += (code[i] == ")") - (code[i] == "(")
        if depth == 0:
            return i
    return -1


def count_parameters(text):
    text = text.strip()
    if text in ("", "void"):
        return 0
    depth = commas = 0
    for c in text:
        depth += (c in "([{<") - (c in ")]}>")
        commas += c == "," and depth == 0
    return commas + 1


def head_of(code, begin, brace):
    """(name, parameters) of the function whose body opens at `brace`, or None: the text between `begin` and `brace` is
    what stands behind the last declaration."""
    head = code[begin:brace].rstrip()
    outside, inner = "", head
    while inner != outside:  # an initializer has a '=' outside of parentheses
        outside, inner = inner, re.sub(r"\([^()]*\)", "", inner)
    if not head.endswith(")") or "=" in outside:
        return None
    open_ = matching(head, len(head) - 1)
    before = head[:open_].rstrip() if open_ > 0 else ""
    if before.endswith(")"):  # a name that a macro makes: GMM__NAME(stem)(parameters)
        macro = matching(before, len(before) - 1)
        word = re.search(r"(\w+)\s*$", before[:macro])
        if word and ATTRIBUTES.search(word.group(1)):
            return None
        name = re.sub(r"\s+", "", before[macro + 1:-1]).split(",")[0]
    else:
        word = re.search(r"(\w+)$", before)
        name = word.group(1) if word else ""
    if not name or name in KEYWORDS:
        return None
    return name, count_parameters(head[open_ + 1:-1])


def functions(text):
    """[(name, first line, lines, parameters)]. A brace at the start of a line closes what is open, so that branches of
    #if which open a block twice do not derail the count."""
    code = without_directives(blank(text))
    code = re.sub(r'extern\s+"\s*"\s*\{', lambda m: re.sub(r"[^\n]", " ", m.group()), code)
    starts = [0] + [m.end() for m in re.finditer("\n", code)]
    found, depth, begin, open_at, head = [], 0, 0, 0, None
    for m in re.finditer(r"[{};]", code):
        c, i = m.group(), m.start()
        if c == "{":
            if depth == 0:
                head, open_at = head_of(code, begin, i), i
                first = begin + len(code[begin:i]) - len(code[begin:i].lstrip())
            depth += 1
        elif c == "}":
            depth = 0 if i == 0 or code[i - 1] == "\n" else max(0, depth - 1)
            if depth == 0:
                if head:
                    a, b = bisect.bisect_right(starts, first), bisect.bisect_right(starts, i)
                    found.append((head[0], a, b - a + 1, head[1]))
                head, begin = None, i + 1
        elif depth == 0:
            begin = i + 1
    return found


def words_of(path):
    """[[name, expression, the field's word, only files that contain this, [contexts that do not count]]]"""
    rows = []
    for line in open(path, encoding="utf-8"):
        if not line.strip() or line.startswith("#"):
            continue
        cells = line.rstrip("\n").split("\t")
        if len(cells) < 2 or (not cells[0] and not rows):
            raise SystemExit("%s: a row is expression, tab, word; an exception tab, expression, tab, what it is: %s"
                             % (path, line.rstrip()))
        if not cells[0]:
            rows[-1][4].append(re.compile(cells[1]))
            continue
        rows.append([cells[0], re.compile(r"(?<![A-Za-z])(?:%s)(?![A-Za-z])" % cells[0]), cells[1],
                     cells[2] if len(cells) > 2 else "", []])
    return rows


def count_word(text, expression, exceptions, used):
    """How often the expression matches outside of every match of an exception; `used` receives the exceptions that a
    match of the expression lies in."""
    spans = [(m.start(), m.end(), e) for e in exceptions for m in e.finditer(text)]
    n = 0
    for m in expression.finditer(text):
        inside = [e for a, b, e in spans if a <= m.start() and m.end() <= b]
        used.update(inside)
        n += not inside
    return n


def measure(files, words):
    counts, lists = {}, {"part": [], "lines": [], "parameters": [], "asm": [], "word": [], "exception": []}
    per_word, used = {w[0]: [0, w[2], {}] for w in words}, set()
    for path in files:
        text = open(path, encoding="utf-8").read()
        code = blank(text)
        lines = text.count("\n")
        lists["part"].append((lines, path))
        for name, first, length, parameters in functions(text):
            where = "%s:%d %s" % (path, first, name)
            lists["lines"].append((length, where))
            lists["parameters"].append((parameters, where))
        asm = len(re.findall(r"\basm\b|\b__asm__\b|\b__asm\b", code))
        if asm and not path.endswith(PTX_PARTS):
            lists["asm"].append((asm, path))
        for name, expression, _, only, exceptions in words:
            if only in path:
                n = count_word(text, expression, exceptions, used)
                per_word[name][0] += n
                if n:
                    per_word[name][2][path] = n
    lists["word"] = [(n, "%s -> %s   (%s)" % (name, word, ", ".join("%s %d" % x for x in sorted(where.items()))))
                     for name, (n, word, where) in per_word.items() if n]
    lists["exception"] = [(0, "%s: %s" % (w[0], e.pattern)) for w in words for e in w[4] if e not in used]
    for key in lists:
        lists[key].sort(key=lambda x: (-x[0], x[1]))
    counts["longest part, lines"] = max([n for n, _ in lists["part"]], default=0)
    counts["parts over %d lines" % PART_LINES] = sum(n > PART_LINES for n, _ in lists["part"])
    counts["longest function, lines"] = max([n for n, _ in lists["lines"]], default=0)
    counts["functions over %d lines" % FUNCTION_LINES] = sum(n > FUNCTION_LINES for n, _ in lists["lines"])
    counts["most parameters"] = max([n for n, _ in lists["parameters"]], default=0)
    counts["functions over %d parameters" % PARAMETERS] = sum(n > PARAMETERS for n, _ in lists["parameters"])
    counts["inline PTX outside its parts"] = sum(n for n, _ in lists["asm"])
    for name in per_word:
        counts["word " + name] = per_word[name][0]
    return counts, lists


def read_limits(path):
    limits = {}
    if os.path.exists(path):
        for line in open(path, encoding="utf-8"):
            if line.strip() and not line.startswith("#"):
                number, name = line.rstrip("\n").split(None, 1)
                limits[name] = int(number)
    return limits


def write_limits(path, counts, limits):
    with open(path, "w", encoding="utf-8") as f:
        f.write("# Limits of check_sources.py. None is ever raised; --lower writes the counts that have fallen.\n")
        for name, n in counts.items():
            f.write("%6d  %s\n" % (min(n, limits.get(name, n)), name))


def sources():
    found = []
    for folder, _, names in os.walk("src"):
        found += [os.path.join(folder, n) for n in names if n.endswith((".h", ".cuh", ".c", ".cu"))]
    return sorted(found) or sorted(n for n in os.listdir(".") if n.startswith("gmm") and n.endswith((".h", ".cuh")))


def report(lists, worst, out):
    titles = (("part", "lines, part"), ("lines", "lines, function"), ("parameters", "parameters, function"),
              ("asm", "inline PTX, part"), ("word", "times, word -> the field's word"),
              ("exception", "times, exceptions of words.txt that nothing needs"))
    for key, title in titles:
        out.write("%s\n" % title)
        for n, what in lists[key][:worst]:
            out.write("%8d  %s\n" % (n, what))


SELF_TEST = """/* told: not a function { */
#define M(a) { \\
    told_in_macro(a); }
struct s { int a; };
static int table[] = { 1, 2 };
#ifdef __cplusplus
extern "C" {
#endif
GMM__HD int one(int a, int (*f)(int, int), const char *s) { return s[0] == '{' ? a : f(a, "}"[0]); }
GMM__KERNEL __launch_bounds__(32, M(1) == 4 ? 1 : 2)
GMM__CAT(gmm_two_, GMM__TAG)(const __grid_constant__ gmm_args args) {
    asm volatile("told.to;");
#ifdef A
    if (a) {
#else
    if (b) {
#endif
        x = y ;
    }
}
GMMDEF void three(void) {
}
int declared(int a, int b);
static void nine(int a, int b, int c, int d, int e, int f, int g, int h, int i) {

}
"""


def self_test():
    """The counts of a text whose counts are known, and that each kind of limit fails when it is broken."""
    import tempfile
    want = [("one", 9, 1, 3), ("gmm_two_", 10, 11, 1), ("three", 21, 2, 0), ("nine", 24, 3, 9)]
    got = functions(SELF_TEST)
    assert got == want, got
    with tempfile.TemporaryDirectory() as folder:
        part, table, limits = (os.path.join(folder, n) for n in ("gmm_x.h", "words.txt", "limits.txt"))
        open(part, "w").write(SELF_TEST)
        open(table, "w").write("# comment\ntold\ttile_full\n\tnobody\\s+is told\tEnglish\n\tnever\tneedless\n"
                               "whole vectors?\tvectorised path\tkernels\n")
        words = words_of(table)
        lists = measure([part], words)[1]
        assert [n for n, _ in lists["word"]] == [3], lists["word"]
        needless = [what for _, what in lists["exception"]]
        assert needless == ["told: never", "told: nobody\\s+is told"], needless
        for text, n in (("nobody\n is told", 0), ("nobody is told, told", 1), ("is told", 1), ("told nobody", 1)):
            assert count_word(text, words[0][1], words[0][4], set()) == n, text
        run = ["--words", table, "--limits", limits, part]
        assert main(["--lower"] + run, open(os.devnull, "w")) == 0
        assert main(run, open(os.devnull, "w")) == 0
        for name, more in (("longest function", "void f(void) {\n%s}\n" % ("\n" * 30)),
                           ("asm", "void f(void) { asm(\"\"); }\n"), ("word", "/* it was told */\n"),
                           ("parameters", "void f(%s) {}\n" % ", ".join(["int"] * 9))):
            open(part, "w").write(SELF_TEST + more)
            text = open(limits).read()  # a longer part is not what is looked for here
            open(limits, "w").write(re.sub(r"\d+  longest part", "9999  longest part", text))
            assert main(run, open(os.devnull, "w")) == 1, name
            open(limits, "w").write(text)
        assert main(run, open(os.devnull, "w")) == 1, "longest part"
    print("check_sources: self-test passed")


def main(arguments, out=sys.stdout):
    words, limits = os.path.join(HERE, "words.txt"), os.path.join(HERE, "limits.txt")
    worst, lower, files = 10, False, []
    i = 0
    while i < len(arguments):
        a = arguments[i]
        if a == "--self-test":
            return self_test()
        if a == "--lower":
            lower = True
        elif a in ("--worst", "--words", "--limits") and i + 1 < len(arguments):
            i += 1
            if a == "--worst":
                worst = int(arguments[i])
            elif a == "--words":
                words = arguments[i]
            else:
                limits = arguments[i]
        elif a.startswith("-"):
            raise SystemExit("check_sources: unknown argument %s" % a)
        else:
            files.append(a)
        i += 1
    counts, lists = measure(files or sources(), words_of(words))
    old = read_limits(limits)
    if lower:
        write_limits(limits, counts, old)
        old = read_limits(limits)
    report(lists, worst, out)
    above = ["%s: %d, limit %d" % (name, n, old.get(name, 0)) for name, n in counts.items() if n > old.get(name, 0)]
    below = [name for name, n in counts.items() if n < old.get(name, 0)]
    out.write("totals\n")
    for name, n in counts.items():
        if not name.startswith("word "):
            out.write("%8d  of %d: %s\n" % (n, old.get(name, 0), name))
    out.write("%8d  words of words.txt\n" % sum(n for name, n in counts.items() if name.startswith("word ")))
    if below:
        out.write("check_sources: %d counts are below their limits (--lower records them)\n" % len(below))
    for text in above:
        out.write("check_sources: above its limit: %s\n" % text)
    return 1 if above else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
