#!/bin/sh
# Writes the headers that users take into the folder $1, each from the parts that its manifest src/*/PARTS lists.
# With LINES=1 a #line directive stands in front of each part, so that compilers and debuggers name the part.
set -e
out=$1
for manifest in src/*/PARTS; do
    folder=${manifest%/PARTS}
    for header in gmm.h gmm_quant.h gmm_gtp.h gmm_kernels.cuh; do
        [ "${header%.*}" != "${folder#src/}" ] || break
    done
    awk '!/^#/ && NF { print $1 }' "$manifest" | while read -r part; do
        [ -z "$LINES" ] || printf '#line 1 "%s/%s"\n' "$folder" "$part"
        cat "$folder/$part"
    done > "$out/$header.new"
    cmp -s "$out/$header.new" "$out/$header" || mv "$out/$header.new" "$out/$header"
    rm -f "$out/$header.new"
done
