#!/bin/sh
# guide.sh [emulated]: checks the guide, docs/guide. The C blocks of a page are one program: it compiles without
# warnings, as C++17 too where there is a compiler of it, runs, and prints the page's blocks of text. A program for a
# GPU is compiled where there are CUDA's headers, and runs on a GPU, or with `emulated` on the CPU. Lines of shell
# blocks run beside the headers in a folder gmm and the program as main.c, without -O3; on kernels without bodies where
# there is no GPU.
# CC, CXX, B and P as for check.sh, which calls this.

CC=${CC:-gcc} CXX=${CXX:-g++} B=${B:-build} P=${P:-build/probe}
W=${W:-build/check}/guide
strict="-std=c11 -Wall -Wextra -pedantic -Werror"
nvcc=$(cat $P/nvcc)
rm -rf "$W" && mkdir -p "$W" || exit 1
W=$(cd "$W" && pwd)
failures=0

fail() { printf '%s\n' "$1"; failures=$((failures + 1)); }
block() { awk -v fence='```'"$1" '$0 == fence { on = 1; next } /^```/ { on = 0 } on' "$2"; }
runs() { # PAGE PROGRAM
    "$2" > "$W/out" 2>&1 || { fail "$1: its program fails:"; tail -n 5 "$W/out"; return; }
    block text "$1" | diff - "$W/out" || fail "$1: its program prints something else"
}
compile() { # PAGE FLAGS...
    page=$1
    shift
    $CC $strict -I. "$@" -lm > "$W/log" 2>&1 && return
    fail "$page: its program does not compile:"
    head -n 20 "$W/log"
    return 1
}
in_cxx() { # PAGE PROGRAM
    printf '#include <vector>\n' | $CXX -x c++ -fsyntax-only - 2> /dev/null || return
    [ "$for_gpu" = 0 ] || [ -s $P/cudaheaders ] || return
    $CXX -x c++ -std=c++17 -Wall -Wextra -pedantic -Werror -I. $(cat $P/cudaheaders) -fsyntax-only "$2" \
        > "$W/log" 2>&1 && return
    fail "$1: its program is not C++17:"
    head -n 20 "$W/log"
}
# The program of a page, as the tests are compiled.
program() {
    program=$W/$2
    block c "$1" > "$program.c"
    [ -s "$program.c" ] || return
    for_gpu=$(grep -c cuda_runtime "$program.c")
    [ -n "$emulated" ] || in_cxx "$1" "$program.c"
    if [ -n "$emulated" ]; then
        [ "$for_gpu" = 0 ] || { compile "$1" $(cat $P/cudaheaders) -o "$program" "$program.c" build/emulated/gmm.o \
            $(cat $P/emulated.link) && runs "$1" "$program"; }
    elif [ "$for_gpu" = 0 ] || [ -s $P/gpu ]; then
        compile "$1" $(cat $P/pthread.cflags $P/cuda.cflags) -o "$program" "$program.c" \
            $B/gmm.o $(cat $P/openmp $P/pthread $P/cuda.link) && runs "$1" "$program"
    elif [ -s $P/cudaheaders ]; then compile "$1" $(cat $P/cudaheaders) -c -o "$program.o" "$program.c"
    fi
}
# The lines of a page's shell blocks, and the programs main_* that they build. Those that need nvcc are left out with
# QUICK, which .ci/run sets, since the README's are like them, and where there is no nvcc with cuBLASLt.
shell() {
    rm -rf "$W/shell" && mkdir -p "$W/shell/gmm" || exit 1
    block sh "$1" > "$W/shell/lines"
    [ -s "$W/shell/lines" ] || return
    cp gmm*.h examples/vendoring/gmm.c* "$W/shell/gmm/" && cp "$W/$2.c" "$W/shell/main.c" || exit 1
    cp "$([ -s $P/gpu ] || echo $B/empty/)gmm_kernels.cuh" "$W/shell/gmm/" || exit 1
    toolkit=
    if [ -z "${QUICK:-}" ] && [ -n "$nvcc" ] && grep -q lcublasLt $P/cublaslt; then
        toolkit=$(dirname "$(dirname "$(readlink -f "$(command -v "$nvcc")")")")
    else sed -i '/_gpu/d' "$W/shell/lines"; fi
    sed -i "s|^nvcc|$nvcc $(cat $P/nvcc.flags)|; s|^gcc|$CC|; s|/usr/local/cuda/lib64|$toolkit/lib64|; s| -O3 | |
        s|sm_90a|$(grep . $P/gpu || echo sm_90a)|" "$W/shell/lines"
    (cd "$W/shell" && sh -ex lines) > "$W/log" 2>&1 || { fail "$1: a shell line fails:"; tail -n 5 "$W/log"; }
    for main in "$W"/shell/main_*; do LD_LIBRARY_PATH=$toolkit/lib64 runs "$1" "$main"; done
}
# Every status, fault bit and reason of the headers.
names() {
    for name in $(awk '/Implementation ---/ { exit } /^    X\(GMM_(OK|E_|CKPT_[A-Z_]+, [0-9]+, [a-z_]+, GMM_)/ {
            sub(/^    X\(/, ""); sub(/,.*/, ""); print } /^    GMM_FAULT_/ { print $1 }' gmm_quant.h) \
        $(awk '/^#define GMM_CKPT_REASON_LIST/ { on = 1; next } !/\\$/ { if (on) print; on = 0 } on' gmm.h |
            sed 's/^ *X(//; s/,.*//'); do
        grep -q "^| \`$name\` |" docs/guide/troubleshooting.md || fail "docs/guide/troubleshooting.md: no row for $name"
        echo "$name" >> "$W/names"
    done
    [ "$(grep -c . "$W/names")" -ge 44 ] || fail "the headers have too few statuses, fault bits and reasons"
}

emulated=${1-}
[ "$(ls docs/guide/*.md | wc -l)" -le 11 ] || fail "docs/guide: more than eleven pages"
for page in docs/guide/*.md; do
    name=$(basename "$page" .md)
    [ "$(grep -c '^!\[.*\](.*\.svg)$' "$page")" = 1 ] || fail "$page: has not one drawing"
    program "$page" "$name"
    [ -n "$emulated" ] || shell "$page" "$name"
done
names
exit $((failures > 0))
