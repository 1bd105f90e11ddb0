#!/bin/sh
# declarations.sh FOLDER HEADER...: writes into FOLDER what units without GMM_IMPLEMENTATION see of each header, which
# is everything up to the end of its include guard. A file is written only when its text changes, so that objects which
# only call the library stay as they are when its implementation is edited. Compilers name the header itself.
set -e
out=$1
shift
mkdir -p "$out"
for header in "$@"; do
    name=${header##*/}
    awk -v name="$name" '
        NR == 1 {
            print "#ifdef GMM_IMPLEMENTATION"
            print "#error \"this folder holds declarations: the unit needs the headers themselves\""
            print "#endif"
            print "#line 1 \"" name "\""
        }
        { print }
        /^#endif.*_INCLUDED/ { ended = 1; exit }
        END { exit !ended }' "$header" > "$out/$name.new" || { echo "$header: no end of its include guard"; exit 1; }
    cmp -s "$out/$name.new" "$out/$name" || mv "$out/$name.new" "$out/$name"
    rm -f "$out/$name.new"
done
