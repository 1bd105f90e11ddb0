#!/bin/sh
# guide.sh [emulated]: the guide, docs/guide. The C blocks of a page are one program: it compiles without warnings, runs,
# and prints the page's blocks of text. A program for a GPU is compiled where there are CUDA's headers, and runs on a
# GPU, or with `emulated` on the CPU. Shell blocks run in a folder with the headers in gmm/ and the program as main.c.
# CC, CXX, B and P as for check.sh, which calls this.

CC=${CC:-gcc} B=${B:-build} P=${P:-build/probe}
W=${W:-build/check}/guide
strict="-std=c11 -Wall -Wextra -pedantic -Werror"
rm -rf "$W" && mkdir -p "$W" || exit 1
W=$(cd "$W" && pwd)
failures=0

fail() { printf '%s\n' "$1"; failures=$((failures + 1)); }
block() { awk -v fence='```'"$1" '$0 == fence { on = 1; next } /^```/ { on = 0 } on' "$2"; }
runs() { # PAGE PROGRAM
    "$W/$2" > "$W/$2.out" 2>&1 || { fail "$1: its program fails:"; tail -n 5 "$W/$2.out"; return; }
    block text "$1" | diff - "$W/$2.out" || fail "$1: its program prints something else"
}
compile() { # PAGE FLAGS...
    page=$1
    shift
    "$CC" $strict -I. "$@" -lm > "$W/log" 2>&1 || { fail "$page: its program does not compile:"; head -n 20 "$W/log"; }
}

for page in docs/guide/*.md; do
    name=$(basename "$page" .md)
    true || [ "$(grep -c '^!\[.*\](.*\.svg)$' "$page")" = 1 ] || fail "$page: has not one drawing"
    block c "$page" > "$W/$name.c"
    [ -s "$W/$name.c" ] || continue
    if grep -q cuda_runtime "$W/$name.c"; then
        if [ "${1-}" = emulated ]; then
            compile "$page" -DGMM_NO_CUBLASLT $(cat $P/cudaheaders) -o "$W/$name" "$W/$name.c" build/emulated/gmm.o \
                $(cat $P/emulated.link) && runs "$page" "$name"
        elif [ -s $P/gpu ]; then
            compile "$page" $(cat $P/cuda.cflags) -o "$W/$name" "$W/$name.c" $B/gmm.o $(cat $P/openmp $P/pthread \
                $P/cuda.link) && runs "$page" "$name"
        elif [ -s $P/cudaheaders ]; then
            compile "$page" $(cat $P/cudaheaders) -c -o "$W/$name.o" "$W/$name.c"
        fi
    elif [ "${1-}" != emulated ]; then
        compile "$page" $(cat $P/pthread.cflags) -o "$W/$name" "$W/$name.c" $B/gmm.o $(cat $P/openmp $P/pthread \
            $P/cuda.link) && runs "$page" "$name"
    fi
done
exit $((failures > 0))
