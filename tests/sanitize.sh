#!/bin/sh
# GPU operations under each tool of compute-sanitizer, on the cases of small_cases.txt: `make sanitize`.
# Arguments: the tools, all four if none. JOBS processes share the cases, LIMIT seconds each; B: the build folder.
# One line per process: ok, FAIL (the log's last lines follow), or limit; the logs, with the seconds of each case, are
# kept in $B/sanitize.
B=${B:-build} JOBS=${JOBS:-$(nproc)} LIMIT=${LIMIT:-120}
command -v compute-sanitizer > /dev/null || PATH=$PATH:/usr/local/cuda/bin
command -v compute-sanitizer > /dev/null || { echo 'sanitize: no compute-sanitizer'; exit 1; }
[ $# -gt 0 ] || set -- initcheck racecheck memcheck synccheck
# The tools instrument every kernel that is loaded, and cases launch few; a GPU has too few queues for 32 per process.
export CUDA_MODULE_LOADING=LAZY CUDA_DEVICE_MAX_CONNECTIONS=8

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
$(grep -v '^#' tests/small_cases.txt | awk "NR % $each == $number % $each")
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
