#!/bin/sh
# Tests of the tools in this folder and of tests/bench/pairs.c: each finds the difference that it is there to find. From
# the root of the repository, with CC and B (the build folder, with its checksums program if that was built).
CC=${CC:-gcc} B=${B:-build} W=build/self_test
rm -rf $W && mkdir -p $W || exit 1
die() { echo "self_test: $*"; exit 1; }

python3 -B tests/tools/check_sources.py --self-test || die "check_sources"
python3 -B tests/tools/sass_diff.py --self-test || die "sass_diff"
$CC -std=c11 -O1 -Wall -Wextra -pedantic -Werror -Itests/tools -o $W/pairs tests/bench/pairs.c tests/tools/case_ids.c \
    -ldl -lm && $W/pairs --self-test > $W/log || { cat $W/log; die "pairs"; }
if BASE=HEAD P=$W sh tests/bench/pairs.sh > $W/log; then die "pairs runs without a GPU"; fi
grep -q 'no GPU here' $W/log || die "pairs: $(cat $W/log)"
if $W/pairs --unknown 2> /dev/null; then die "pairs takes an unknown argument"; fi

# ncu.sh with an ncu that writes down its arguments, and a report unless the kernel is called none
mkdir -p $W/bin && cat > $W/bin/ncu << 'END'
#!/bin/sh
echo "$*" >> "$NCU_LOG"
case "$*" in *regex:none*) ;; *--export*) : > "$NCU_REPORT" ;; *--import*) echo details ;; esac
END
chmod +x $W/bin/ncu
ncu() { env PATH="$PWD/$W/bin:$PATH" B=$W P=$W K="$1" NCU_LOG=$W/ncu_args NCU_REPORT=$W/ncu.ncu-rep \
    sh tests/tools/ncu.sh --rows=dsv3/512 > $W/log; }
if ncu gmm_gemm; then die "ncu runs without a GPU"; fi
grep -q 'no GPU' $W/log || die "ncu: $(cat $W/log)"
cp $W/bin/ncu $W/gpu_bench && cp $W/bin/ncu $W/gpu_bench.run && echo nvcc > $W/nvcc
if ncu ''; then die "ncu runs without K"; fi
if ncu none; then die "ncu without a kernel passes"; fi
ncu gmm_gemm && [ "$(cat $W/log)" = details ] || die "ncu: $(cat $W/log)"
grep -q "^--kernel-name regex:gmm_gemm .*--export $W/ncu $W/gpu_bench --ms=1 --rows=dsv3/512$" $W/ncu_args ||
    die "ncu: $(cat $W/ncu_args)"

if [ -x "$B/checksums" ]; then
    sums="$B/checksums --filter small.offsets"
    $sums > $W/sums 2> $W/log || die "checksums: $(cat $W/log)"
    $sums --base $W/sums > /dev/null 2>&1 || die "checksums differ from run to run"
    sed '2s/ .*/ 0123456789abcdef/' $W/sums > $W/changed
    if $sums --base $W/changed > /dev/null 2> $W/log; then die "checksums: a changed hash passes"; fi
    grep -q '^differs ' $W/log || die "checksums: $(cat $W/log)"
    { cat $W/sums; echo "small.offsets.gone.cpu 0123456789abcdef"; } > $W/changed
    if $sums --base $W/changed > /dev/null 2> $W/log; then die "checksums: a missing row passes"; fi
    grep -q '^missing  *small.offsets.gone.cpu' $W/log || die "checksums: $(cat $W/log)"
    sed 1d $W/sums > $W/changed
    $sums --base $W/changed > /dev/null 2> $W/log || die "checksums: a new row fails"
    grep -q '^new ' $W/log || die "checksums: $(cat $W/log)"
    { cat $W/sums; echo "small.offsets.gone.elsewhere 0123456789abcdef"; } > $W/changed
    $sums --base $W/changed > /dev/null 2> $W/log || die "checksums: a row of an engine that is not here fails"
    $sums --vector-level 1 --threads 1 --base $W/sums > /dev/null 2>&1 || die "checksums depend on threads"
    if $B/checksums --filter none.such --base $W/sums > /dev/null 2>&1; then die "checksums: no row passes"; fi
fi
echo "self_test: passed"
