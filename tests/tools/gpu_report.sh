#!/bin/sh
# gpu_report.sh ARGS...: the tests and the GPU benchmark (with ARGS) on this GPU, written to tests/results/<GPU>.txt.
B=${B:-build} P=${P:-build/probe} CC=${CC:-gcc}
[ -s "$B/gpu_bench.run" ] || { echo 'gpu-report: no GPU, or no cuBLAS'; exit 1; }
mkdir -p tests/results
name=$(nvidia-smi --query-gpu=name --format=csv,noheader | head -n 1)
file=tests/results/$(echo "$name" | tr 'A-Z ' 'a-z-').txt
status=0
sh "$B/gpu_bench.run" --json="$B/gpu-report.json" "$@" > "$B/gpu-report.bench" || status=1
"$B/gmm_tests" --jobs 16 --rounds 10000 > "$B/gpu-report.tests" || status=1
{
    echo "# gmm on one $name: make gpu-report"
    echo
    echo 'Headers (SHA-256)'
    sha256sum gmm*.h gmm*.cuh
    echo
    echo 'Versions'
    $(cat "$P/nvcc") --version | tail -n 2 | head -n 1
    $CC --version | head -n 1
    echo "built for $(cat "$P/gpu")"
    nvidia-smi --query-gpu=name,driver_version,clocks.max.sm,clocks.max.memory,power.limit --format=csv
    echo
    echo 'Tests'
    grep -E '^ *FAIL|not tested' "$B/gpu-report.tests"
    tail -n 1 "$B/gpu-report.tests"
    echo
    echo 'Benchmark'
    cat "$B/gpu-report.bench"
} > "$file"
cat "$file"
exit $status
