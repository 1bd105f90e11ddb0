#!/bin/sh
# test.sh: the cases of tests/small_cases.txt and the guide's programs for GPUs on the emulator, built by
# `make CONFIG=emulated build/emulated/gmm_tests`.
for engine in mma wgmma; do
    set --
    while read -r word name; do
        [ "$word" != $engine ] || set -- "$@" --filter "$name"
    done < tests/small_cases.txt
    build/emulated/gmm_tests --engine $engine --arena 512 --threads 1 --rounds 4 --jobs "${JOBS:-2}" "$@" || exit 1
done
# what plans choose by prices
GMM_EMULATOR_PROCESSORS=132 build/emulated/gmm_tests --engine wgmma --threads 1 --filter 'joined by plan' \
    --filter 'rows gathered in the product' --filter 'tiles of FP8 products' || exit 1
sh tests/headers/guide.sh emulated
