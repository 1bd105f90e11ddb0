#!/bin/sh
# declarations.sh FOLDER HEADER...: writes into FOLDER what units without GMM_IMPLEMENTATION see of each header, which
# is everything up to the end of its include guard. A file is written only when its text changes, so that objects which
# only call the library stay as they are when its implementation is edited. Compilers name the header itself. Units read
# a header as it is where this cannot tell its end.
out=$1
shift
mkdir -p "$out"
for header in "$@"; do
    name=${header##*/}
    new=$out/$name.$$
    awk -v name="$name" '
        NR == 1 {
            print "#ifdef GMM_IMPLEMENTATION"
            print "#error \"this folder holds declarations: the unit needs the headers themselves\""
            print "#endif"
            print "#line 1 \"" name "\""
        }
        { print }
        /^#endif.*_INCLUDED/ { ended = 1; exit }
        END { exit !ended }' "$header" > "$new" || {
        echo "$header: no end of its include guard" >&2
        rm -f "$new" "$out/$name"
        exit 1
    }
    if cmp -s "$new" "$out/$name"; then rm -f "$new"; else mv "$new" "$out/$name"; fi
done
