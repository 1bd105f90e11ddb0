#!/bin/sh
# GPU operations in bf16, f16 and f32 under each tool of compute-sanitizer, on small cases: `make sanitize`.
# Arguments: the tools, all four if none. JOBS processes share the cases, LIMIT seconds each; B: the build folder.
# One line per process: ok, FAIL (the log's last lines follow), or limit; the logs, with the seconds of each case, are
# kept in $B/sanitize.
B=${B:-build} JOBS=${JOBS:-$(nproc)} LIMIT=${LIMIT:-120}
command -v compute-sanitizer > /dev/null || PATH=$PATH:/usr/local/cuda/bin
command -v compute-sanitizer > /dev/null || { echo 'sanitize: no compute-sanitizer'; exit 1; }
[ $# -gt 0 ] || set -- initcheck racecheck memcheck synccheck

# Parts of test names, by what the cases call.
cases() { cat << 'END'
row16 fwd bf16
row16 wgrad f32
row08 fwd f16
row08 dgrad bf16
row08 dgrad f32
row08 wgrad f16
row08 bgrad bf16
row39 act swiglu bf16 17x64
row39 act swiglu f32 13x100
row39 act swiglu bf16 21x1160
row39 act split forms
row42 mlp inference
row46 mlp equals three calls bf16
row49 mlp delayed wgrad f32
route ties E7
route bwd parts
permute map bf16 bf16 T33
permute fwd bf16 bf16 T33
permute fwd bf16 bf16 T50 H1032
permute any row_of bf16 bf16 T9
permute bwd bf16 bf16 T33
permute unpermute fwd bf16 bf16 T33
permute unpermute fwd bf16 bf16 T50 H1032
permute unpermute bwd bf16 bf16 T33
permute unpermute bwd bf16 bf16 T50 H1032
row17 permute wild maps
pad 300 groups
pad then unpad, split form 0
glu interleave bf16
glu interleave packed and tables 0
small accumulate order
small accumulate beta 0
small convert f32 to bf16
small convert f16 to f16
gmm_offsets sum one over
runtime
wgmma empty groups, splits, tails linear_fwd bf16
wgmma empty groups, splits, tails linear_dgrad f16
wgmma empty groups, splits, tails linear_wgrad bf16
wgmma alpha, beta, frozen groups linear_wgrad f16
wgmma bias bf16
row53 graph of linear operations, other splits bf16
row53 row54 graph of a whole layer, other routings bf16
END
}

# Runs part $2 of `each` of the cases under tool $1.
part() {
    tool=$1 number=$2 log=$B/sanitize/$1.$2
    set --
    while read -r name; do set -- "$@" --filter "$name"; done << END
$(cases | awk "NR % $each == $number % $each")
END
    begin=$(date +%s)
    timeout "$LIMIT" compute-sanitizer --tool "$tool" --error-exitcode 9 \
        "$B/gmm_tests" --engine mma --arena 512 --threads 1 --rounds 20 --times "$@" > "$log.log" 2>&1
    status=$?
    if [ $status = 0 ] && grep -q '^[1-9][0-9]* passed, 0 failed' "$log.log"; then word=ok
    elif [ $status = 124 ]; then word=limit
    else word=FAIL; fi
    printf '%-5s  %-9s  %3d s  %d cases\n' $word "$tool" $(($(date +%s) - begin)) \
        "$(grep -c '^ *[0-9.]* s \[' "$log.log")"
    [ $word = ok ] || tail -n 8 "$log.log" | sed 's/^/        /'
}
each=$((JOBS / $#))
[ $each -gt 0 ] || each=1
rm -rf "$B/sanitize" && mkdir -p "$B/sanitize" || exit 1
for tool in "$@"; do
    number=0
    while [ $number -lt $each ]; do
        part "$tool" $number > "$B/sanitize/$tool.$number.line" 2>&1 &
        number=$((number + 1))
    done
done
wait
cat "$B"/sanitize/*.line
count() { grep -c "^$1 " "$B"/sanitize/*.line | awk -F: '{ n += $NF } END { print n }'; }
echo "$(count ok) processes clean, $(count FAIL) failed, $(count limit) over the limit of $LIMIT s"
[ "$(count ok)" = $((each * $#)) ]
