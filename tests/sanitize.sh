#!/bin/sh
# Every GPU operation under each tool of compute-sanitizer, on small cases: `make sanitize`.
# Arguments: the tools, all four if none. JOBS runs at a time, LIMIT seconds each, B the build folder.
# One line per run: ok, FAIL (the log's last lines follow), or limit; the log is kept in $B/sanitize.
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
row39 act split forms
row42 mlp inference
row46 mlp equals three calls bf16
row49 mlp delayed wgrad f32
route ties
route bwd parts
permute map bf16
permute fwd bf16
permute any row_of bf16
permute bwd bf16
permute unpermute fwd bf16
permute unpermute bwd bf16
row17 permute wild maps
pad 300 groups
pad then unpad
glu interleave bf16
glu interleave packed
small accumulate order
small accumulate beta 0
small convert f32 to bf16
small convert f16 to f16
gmm_offsets sum one over
runtime
cublaslt empty groups
wgmma empty groups, splits, tails linear_fwd bf16
wgmma empty groups, splits, tails linear_dgrad f16
wgmma empty groups, splits, tails linear_wgrad bf16
wgmma alpha, beta, frozen groups linear_wgrad f16
wgmma bias bf16
row53 graph of linear operations, other splits bf16
row53 row54 graph of a whole layer, other routings bf16
END
}

# one "tool" "part of a name"
one() {
    log=$B/sanitize/$1-$(printf %s "$2" | tr -cs 'a-z0-9' '-').log
    begin=$(date +%s)
    timeout "$LIMIT" compute-sanitizer --tool "$1" --error-exitcode 9 "$B/gmm_tests" --engine mma --filter "$2" \
        > "$log" 2>&1
    status=$?
    if [ $status = 0 ] && grep -q '^[1-9][0-9]* passed, 0 failed' "$log"; then word=ok
    elif [ $status = 124 ]; then word=limit
    else word=FAIL; fi
    printf '%-5s  %-9s  %4d s  %s\n' $word "$1" $(($(date +%s) - begin)) "$2"
    [ $word != FAIL ] || tail -n 8 "$log" | sed 's/^/        /'
}
if [ "$1" = --one ]; then
    one "$2" "$3"
    exit
fi
rm -rf "$B/sanitize" && mkdir -p "$B/sanitize" || exit 1
export B LIMIT
for tool in "$@"; do cases | while read -r name; do printf '%s\0%s\0' "$tool" "$name"; done; done |
    xargs -0 -n 2 -P "$JOBS" sh "$0" --one | tee "$B/sanitize/table"
count() { grep -c "^$1 " "$B/sanitize/table"; }
echo "$(count ok) clean, $(count FAIL) failed, $(count limit) over the limit of $LIMIT s"
[ "$(count ok)" -gt 0 ] && [ "$(grep -cv '^ok ' "$B/sanitize/table")" = 0 ]
