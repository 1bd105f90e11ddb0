#!/bin/sh
# headers.sh FOLDER: the headers for the emulator, in FOLDER: assembled from src/, but for the parts with inline PTX,
# which this folder replaces. Kernels take their parameters by reference; dynamic shared memory comes from a function.
set -e
out=$1 here=tests/emulator
mkdir -p "$out"
for manifest in src/*/PARTS; do
    folder=${manifest%/PARTS}
    header=${folder#src/}.h
    [ "$header" != gmm_kernels.h ] || header=gmm_kernels.cuh
    awk '!/^#/ && NF { print $1 }' "$manifest" | while read -r part; do
        from=$folder/$part
        [ ! -f "$here/${part##*/}" ] || from=$here/${part##*/}
        printf '#line 1 "%s"\n' "$from"
        cat "$from"
    done | sed -E -e 's/const __grid_constant__ ([A-Za-z_0-9]+) /const \1 \&/' \
        -e 's/extern __shared__ (__align__\([0-9]+\) )?([a-z_0-9]+) ([a-z_]+)\[\];/\2 *const \3 = (\2 *)DYNAMIC;/' \
        -e 's/\)DYNAMIC;/)emulated_dynamic_shared();/' > "$out/$header"
done
