#!/usr/bin/env python3
"""Compares Doxygen's XML with the headers that it was made from.

    docs.py XML_FOLDER HEADER...

Every public function of the headers must be there with the whole comment above or behind it, every struct and enum
with the comment above it, and every field and value with the comment behind it. Letters and digits are compared.
"""
import os
import re
import sys
import xml.etree.ElementTree as xml

PROBLEMS = []


def letters(text):
    return re.sub(r"[^A-Za-z0-9]", "", text)


def described(element):
    parts = (element.find(tag) for tag in ("briefdescription", "detaileddescription", "inbodydescription"))
    return letters("".join("".join(p.itertext()) for p in parts if p is not None))


def read_xml(folder):
    """What Doxygen says of functions and types by name, and of fields and values by (type, name)."""
    says = {}
    for name in os.listdir(folder):
        if not re.match(r"(struct|union|gmm|group)\w*\.xml$", name):
            continue
        compound = xml.parse(os.path.join(folder, name)).getroot().find("compounddef")
        of = compound.findtext("compoundname")
        if compound.get("kind") in ("struct", "union"):
            says[of] = described(compound)
        for member in compound.iter("memberdef"):
            key = (of, member.findtext("name")) if member.get("kind") == "variable" else member.findtext("name")
            says[key] = described(member)
            for value in member.iter("enumvalue"):
                says[value.findtext("name")] = described(value)
    return says


def statements(header):
    """Statements of the declarations with the comment above and behind each: (line, comment, text, comment)."""
    above, lines, number = "", open(header).read().split("\n"), 0
    while number < len(lines):
        line, number = lines[number], number + 1
        if re.search(r"\d+ Implementation --- \*/", line):
            return
        if re.match(r" *(/\*|\Z)", line):
            above = ""
            while line.strip() and "*/" not in line:
                above += line + " "
                line, number = lines[number], number + 1
            above = (above + line).strip()[2:-2] if line.strip() else ""
            continue
        start, text = number, line
        if re.match(r"GMMDEF", line):
            while ";" not in text:
                text, number = text + " " + lines[number], number + 1
        while text.count("/*") > text.count("*/"):
            text, number = text + " " + lines[number], number + 1
        behind = " ".join(re.findall(r"/\*(.*?)\*/", text, re.S))
        yield start, above, re.sub(r"/\*.*?\*/", "", text, flags=re.S).strip(), behind
        if re.search(r"[;{]\s*$", text) and not re.match(r"GMMDEF|GMM__HD|static", line):
            above = ""


def check(header, says):
    """Counts the comments of a header that Doxygen has."""
    of, count = None, 0

    def has(line, key, comment):
        nonlocal count
        want = letters(comment)
        if want and want not in says.get(key, ""):
            name = key if isinstance(key, str) else ".".join(key)
            PROBLEMS.append("%s:%d: %s: the reference lacks its comment" % (header, line, name))
        count += bool(want)

    for line, above, text, behind in statements(header):
        function = re.match(r"(?:GMMDEF|GMM__HD|static inline) [^(]*?\b(gmm_[a-z0-9]\w*)\(", text)
        if function and function.group(1) not in says:
            PROBLEMS.append("%s:%d: %s is not in the reference" % (header, line, function.group(1)))
        elif function:
            has(line, function.group(1), above if not behind or "{" in text else behind)
        kind = re.match(r"typedef (struct|enum) (\w+) \{", text)
        if kind:
            of = kind.group(2) if kind.group(1) == "struct" else None
            has(line, kind.group(2), above)
        elif text.startswith("}"):
            of = None
        elif behind and of and re.match(r"\w.*;$", text):
            names = re.findall(r"[*( ](\w+)(?:\[\w+\])*(?=[,;])", re.sub(r"\)\(.*", ";", text))
            for name in names:
                has(line, (of, name), behind)
        elif behind and re.match(r"(GMM_\w+)( = [^,]*)?,?$", text):
            has(line, re.match(r"\w+", text).group(), behind)
    return count


def main():
    says = read_xml(sys.argv[1])
    counts = ["%d of %s" % (check(header, says), header) for header in sys.argv[2:]]
    print("\n".join(PROBLEMS[:20]) if PROBLEMS else "comments in the reference: " + ", ".join(counts))
    sys.exit(bool(PROBLEMS))


main()
