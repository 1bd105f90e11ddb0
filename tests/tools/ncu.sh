#!/bin/sh
# ncu.sh ARGS...: one launch of a kernel whose name contains K under Nsight Compute, in gpu_bench with ARGS. It writes
# build/ncu.ncu-rep and its details, build/ncu.txt. K is part of a name that gmm_describe gives. The clock varies; the
# first SKIP launches (default 10) are left out. Called by the Makefile with B, P and K set.
B=${B:-build} P=${P:-build/probe}
die() { echo "ncu: $*"; exit 1; }
[ -n "$K" ] || die 'K=NAME is needed, such as K=gmm_gemm_fwd_bf16 ARGS="--rows=dsv3/512/fc1f/bf16"'
[ -x "$B/gpu_bench" ] && [ -s "$B/gpu_bench.run" ] || die 'no GPU, or no cuBLAS'
ncu=$(command -v ncu || command -v "$(dirname "$(cat "$P/nvcc")")/ncu") || die 'ncu of Nsight Compute is not in PATH'
rm -f "$B/ncu.ncu-rep" "$B/ncu.txt"
"$ncu" --kernel-name "regex:$K" --launch-skip "${SKIP:-10}" --launch-count 1 --set full --clock-control none \
    --force-overwrite --export "$B/ncu" "$B/gpu_bench" --ms=1 "$@" > "$B/ncu.log" 2>&1 ||
    { tail -n 5 "$B/ncu.log"; die "the run failed: $B/ncu.log"; }
[ -e "$B/ncu.ncu-rep" ] || die "no kernel's name contains $K, or it has no more than ${SKIP:-10} launches: $B/ncu.log"
"$ncu" --import "$B/ncu.ncu-rep" --page details > "$B/ncu.txt" || die "no report: $B/ncu.txt"
cat "$B/ncu.txt"
