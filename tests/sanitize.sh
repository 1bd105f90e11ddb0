#!/bin/sh
# GPU operations under each tool of compute-sanitizer, on small cases: `make sanitize`.
# Arguments: the tools, all four if none. JOBS processes share the cases, LIMIT seconds each; B: the build folder.
# One line per process: ok, FAIL (the log's last lines follow), or limit; the logs, with the seconds of each case, are
# kept in $B/sanitize.
B=${B:-build} JOBS=${JOBS:-$(nproc)} LIMIT=${LIMIT:-120}
command -v compute-sanitizer > /dev/null || PATH=$PATH:/usr/local/cuda/bin
command -v compute-sanitizer > /dev/null || { echo 'sanitize: no compute-sanitizer'; exit 1; }
[ $# -gt 0 ] || set -- initcheck racecheck memcheck synccheck

# Engines and parts of test names, by what the cases call. What starts with wgmma names that engine itself.
cases() { cat << 'END'
mma groups fwd bf16 int32
mma groups wgrad f32 int32
mma linear fwd f16 empty groups
mma linear dgrad bf16 empty groups
mma linear dgrad f32 empty groups
mma linear wgrad f16 empty groups
mma linear bgrad bf16 empty groups
mma act swiglu bf16 17x64
mma act swiglu f32 13x100
mma act swiglu bf16 21x1160
mma act split forms
mma mlp inference
mma mlp equals three calls bf16
mma mlp delayed wgrad f32
mma route ties E7
mma route bwd parts
mma permute map bf16 bf16 T33
mma permute fwd bf16 bf16 T33
mma permute fwd bf16 bf16 T50 H1032
mma permute any row_of bf16 bf16 T9
mma permute bwd bf16 bf16 T33
mma permute unpermute fwd bf16 bf16 T33
mma permute unpermute fwd bf16 bf16 T50 H1032
mma permute unpermute bwd bf16 bf16 T33
mma permute unpermute bwd bf16 bf16 T50 H1032
mma permute wild maps
mma pad 300 groups
mma pad then unpad, split form 0
mma glu interleave bf16
mma glu interleave packed and tables 0
mma small accumulate order
mma small accumulate beta 0
mma small convert f32 to bf16
mma small convert f16 to f16
mma gmm_offsets sum one over
mma runtime copy
mma runtime events
mma runtime stream
mma runtime allocates
mma runtime capture, external
mma wgmma empty groups, splits, tails linear_fwd bf16
mma wgmma empty groups, splits, tails linear_dgrad f16
mma wgmma empty groups, splits, tails linear_wgrad bf16
mma wgmma alpha, beta, frozen groups linear_wgrad f16
mma wgmma bias bf16
mma graph of linear operations, other splits bf16
mma graph of a whole layer, other routings bf16
mma quantize apart tensor delayed e4m3
mma quantize apart row e4m3
mma quantize apart 1x128 e4m3 pow2
mma quantize apart mxfp8 e4m3
mma quantize apart mxfp8 square
mma quantize apart nvfp4 swizzled
mma quantize apart nvfp4 stochastic hadamard
mma quantize apart nvfp4 row amax
mma quantize apart nvfp4 four over six
mma quantize matrices 128x128 e4m3 pow2
mma quantize matrices nvfp4 square
mma dequantize nvfp4 hadamard
mma dequantize 1x128 e4m3 pow2
mma quantize replayed, tensor current e4m3
mma scale update, margin 1
mma qlinear tails mxfp8
mma qlinear tails nvfp4 row amax, 4 over 6
mma qlinear tails fp8 block
mma qlinear tails mxfp4 weights
mma gtp on GPUs: one, with graphs and without
wgmma qlinear tails fp8 delayed
wgmma qlinear tails fp8 row
wgmma qlinear tails fp8 block
wgmma qlinear tails mxfp8
wgmma qlinear tails nvfp4
wgmma qlinear faulty splits fp8 current
END
}

# Runs part $2 of `each` of the cases under tool $1.
part() {
    tool=$1 number=$2 log=$B/sanitize/$1.$2 status=0 runs=0
    begin=$(date +%s)
    for engine in mma wgmma; do
        set --
        while read -r word name; do
            case "$tool $name" in "racecheck gtp"*) continue ;; esac # racecheck is so slow that a rank times out
            [ "$word" != $engine ] || set -- "$@" --filter "$name"
        done << END
$(cases | awk "NR % $each == $number % $each")
END
        [ $# -gt 0 ] || continue
        runs=$((runs + 1))
        timeout "$LIMIT" compute-sanitizer --tool "$tool" --error-exitcode 9 \
            "$B/gmm_tests" --engine $engine --arena 512 --threads 1 --rounds 20 --times "$@" >> "$log.log" 2>&1 ||
            status=$?
    done
    if [ $status = 0 ] && [ "$(grep -c '^[1-9][0-9]* passed, 0 failed' "$log.log")" = $runs ]; then word=ok
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
