#!/bin/sh
# headers.sh FOLDER: writes the headers that users take into FOLDER, each from the parts that its manifest src/*/PARTS
# lists. With SRC_LINES=1 a #line directive stands in front of each part, so that compilers and debuggers name the part.
# headers.sh --check FOLDER: fails where the headers at the top differ from those written into FOLDER. Tests compile the
# headers: an edited part that has not reached them would pass untested.
set -e
check=
[ "$1" != --check ] || { check=1; shift; }
out=$1
mkdir -p "$out"
for manifest in src/*/PARTS; do
    folder=${manifest%/PARTS}
    for header in gmm.h gmm_quant.h gmm_gtp.h gmm_kernels.cuh; do
        [ "${header%.*}" != "${folder#src/}" ] || break
    done
    awk '!/^#/ && NF { print $1 }' "$manifest" | while read -r part; do
        [ -z "$SRC_LINES" ] || printf '#line 1 "%s/%s"\n' "$folder" "$part"
        cat "$folder/$part"
    done > "$out/$header.new"
    cmp -s "$out/$header.new" "$out/$header" || mv "$out/$header.new" "$out/$header"
    rm -f "$out/$header.new"
    if [ -n "$check" ] && ! cmp -s "$header" "$out/$header"; then
        echo "$header differs from its parts in src/: edit the parts, then make headers"
        exit 1
    fi
done
