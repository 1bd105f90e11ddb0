#!/bin/sh
# Checks that read the repository's text and compile nothing, in seconds: `make check-sources` runs them from the root
# of the repository, and tests/headers/check.sh before all of its own. One line per check, as there.

MAKE=${MAKE_PROGRAM:-make}
W=build/text
HEADERS="gmm_quant.h gmm.h gmm_gtp.h"
TEXTS="$HEADERS gmm_kernels.cuh"
. tests/headers/report.sh

parts() {
    mkdir -p "$W/parts" && sh tests/tools/headers.sh "$W/parts" || return 1
    for h in $TEXTS; do
        cmp "$W/parts/$h" $h || { echo "edit the parts in src/, then run make headers"; return 1; }
    done
}
check "the headers equal their parts" parts

within_limits() {
    python3 -B tests/tools/check_sources.py > "$W/sources" || { grep 'above its limit' "$W/sources"; return 1; }
}
if works python3; then check "sources are within tests/tools/limits.txt" within_limits
else skip "limits of the sources" "no python3"; fi

long_macros() { for h in $TEXTS; do
    awk '/^[ \t]*#[ \t]*define/ { n = 1; lines = 0; at = FNR; table = $2 ~ /_LIST/ }
        n { lines++ }
        n && !/\\$/ { if (lines > 8 && !table) print FILENAME ":" at ": a macro of " lines " lines"; n = 0 }' $h
done; }
check "no macro longer than eight lines but the tables" empty long_macros

contracts() { for h in $HEADERS; do awk -f tests/headers/contracts.awk $h || return 1; done; }
check "every function has a contract" contracts

layout() {
    find gmm*.h gmm*.cuh tests examples docs .ci README.md CHANGELOG.md -type f 2> /dev/null |
        grep -vE '\.(txt|json|bin|svg)$|/(build|__pycache__|\.pytest_cache|gmm_torch\.egg-info)/' | while read -r f; do
            awk '{ if (length($0) > 120 && $0 !~ /^\|/) print FILENAME ":" FNR ": " length($0) " columns"
                   if ($0 ~ /[ \t]$/) print FILENAME ":" FNR ": blanks at the end"
                   if (index($0, "\t")) print FILENAME ":" FNR ": a tab" }' "$f"
        done
}
check "lines of at most 120 columns, no tabs, no blanks at the end" empty layout

short_examples() { wc -l examples/*.c examples/*.cpp | awk '$1 >= 100 && $2 != "total" { print $2, $1, "lines" }'; }
check "examples are shorter than 100 lines" empty short_examples

version() {
    v=$(sed -n 's/^#define GMM_VERSION_STRING "\(.*\)"/\1/p' gmm_quant.h)
    n=$(awk '$2 ~ /^GMM_VERSION_(MAJOR|MINOR|PATCH)$/ { v = v s $3; s = "." } END { print v }' gmm_quant.h)
    [ -n "$v" ] && [ "$v" = "$n" ] || echo "gmm_quant.h: string $v, numbers $n"
    for h in $TEXTS; do
        head -n 1 $h | grep -q "^/\* $h - v$v - " || echo "$h: line 1 does not say v$v"
        head -n 2 $h | tail -n 1 | grep -q 'SPDX-License-Identifier: MIT' || echo "$h: line 2 has no licence"
    done
    [ "$(sed -n 's/^## \[\([0-9.]*\)\].*/\1/p' CHANGELOG.md | head -n 1)" = "$v" ] || echo "CHANGELOG.md: top is not $v"
    grep -qx "Version: $v" examples/vendoring/gmm.pc.in || echo "gmm.pc.in: not $v"
    grep -q "^project(gmm VERSION $v " examples/vendoring/CMakeLists.txt || echo "CMakeLists.txt: not $v"
}
check "the version agrees everywhere" empty version

# Tables of numbers beside the results files, and the README's pictures.
pictures() {
    for f in tests/results/*.txt; do
        printf '%s\n' "products $f ${f%.txt}.svg" "layers $f ${f%.txt}-layers.svg"
    done | while read -r kind f svg; do
        [ ! -e "$svg" ] || python3 -B tests/tools/results_svg.py "$kind" "$f" | cmp - "$svg" ||
            echo "python3 tests/tools/results_svg.py $kind $f > $svg"
    done
}
if works python3; then
    check "the figures of the README and of the guide stand in tests/results" python3 -B tests/headers/readme_figures.py
    check "the README's pictures are drawn from tests/results" empty pictures
else skip "the README's figures" "no python3"; fi
readme_links() {
    for f in README.md examples/README.md docs/guide/*.md; do
        grep -o '](\([^)#: ]*\)' $f | sed 's/^](//' | sort -u | while read -r l; do
            [ -e "$(dirname $f)/$l" ] || echo "$f: no file $l"
        done
    done
}
check "links of the README and of the guide lead to files" empty readme_links
readme_length() {
    lines=$(wc -l < README.md)
    [ "$lines" -le 200 ] || { echo "README.md: $lines lines, more than 200"; return 1; }
}
check "the README has at most 200 lines" readme_length

help_lists_targets() {
    for t in $(sed -n '/^\.PHONY:/,/[^\]$/p' Makefile | tr -d '\\' | sed 's/^\.PHONY://; s/FORCE//') \
        compile_commands.json; do
        $MAKE help | grep -q "^  $t  *[a-zA-Z]" || { echo "make help does not list $t"; return 1; }
    done
}
check "make help lists every target" help_lists_targets

[ $failures = 0 ]
