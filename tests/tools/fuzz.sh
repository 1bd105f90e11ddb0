#!/bin/sh
# fuzz.sh PROGRAM... ARGS...: each of build/fuzz_NAME for a minute, from what build/corpus_NAME has found before and
# from the inputs kept in tests/fuzz/NAME; ARGS go to libFuzzer.
set -e
P=${P:-build/probe} programs=
while [ $# -gt 0 ]; do
    case $1 in
    */fuzz_*) programs="$programs $1" ;;
    *) break ;;
    esac
    shift
done
for program in $programs; do
    name=${program##*/fuzz_} corpus=${program%/*}/corpus_${program##*/fuzz_}
    if [ "$name" = header ] && [ ! -s "$P/cjson" ]; then
        echo 'fuzz: header: not run: without cJSON every header is refused' >&2
        continue
    fi
    echo "fuzz: $name"
    mkdir -p "$corpus"
    "$program" -max_total_time=60 -print_final_stats=1 "$@" "$corpus" "tests/fuzz/$name"
done
