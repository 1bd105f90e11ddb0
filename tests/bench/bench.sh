#!/bin/sh
# bench.sh cpu ARGS...: the CPU benchmark, the GPU one with plots where $B/gpu_bench.run holds a command, that of the
# expert MLP where $B/mlp_bench.run does, and that of the layer where $B/layer_bench is a program.
# bench.sh gtp ARGS...: the benchmark of GTP, with plots, and beside nccl-tests in PATH or $NCCL_TESTS.
# Called by the Makefile with B, P and NCCL_TESTS set.
which=$1
shift
plot() { if [ -s "$P/matplotlib" ]; then python3 tests/bench/plot.py "$1" "$B"; fi; }

if [ "$which" = gtp ]; then
    [ -s "$B/gtp_bench" ] || { echo 'bench-gtp: no GPU, or no NCCL'; exit 1; }
    "$B/gtp_bench" --json="$B/gtp_bench.json" "$@" || exit 1
    plot "$B/gtp_bench.json" || exit 1
    if [ -n "$NCCL_TESTS" ] || command -v all_gather_perf > /dev/null; then
        exec python3 tests/bench/nccl_tests.py "$B/gtp_bench.json" "$NCCL_TESTS"
    fi
    exit 0
fi

# The programs take different flags; all take --csv, and those for GPUs --rows, --ms, --engine and --kernels.
json=$B/gpu_bench.json mlp_json=$B/mlp_bench.json cpu= gpu= mlp= only_mlp= layer= only_layer= layer_peers=
for a in "$@"; do
    case $a in
    --csv) cpu="$cpu $a" gpu="$gpu $a" mlp="$mlp $a" layer="$layer $a" layer_peers="$layer_peers $a" ;;
    --ms=*) gpu="$gpu $a" mlp="$mlp $a" layer="$layer $a" ;;
    --recipe=* | --save-rows) layer="$layer $a" ;;
    --rows=layer | --rows=layer/*)
        only_layer=yes
        if [ "$a" != --rows=layer ]; then
            layer="$layer --rows=${a#--rows=layer/}" layer_peers="$layer_peers --rows=${a#--rows=layer/}"
        fi ;;
    --json | --size=* | --rounds=* | --threads=*) cpu="$cpu $a" ;;
    --json=*) json=${a#--json=} mlp_json=${a#--json=}.mlp ;;
    --kernels=names) gpu="$gpu --kernels" mlp="$mlp $a" ;;
    --rows=mlp | --rows=mlp/* | --recipes=* | --list) mlp="$mlp $a" only_mlp=yes ;;
    *) gpu="$gpu $a" mlp="$mlp $a" ;;
    esac
done
if [ -n "$only_layer" ]; then
    [ -s "$B/layer_bench" ] || { echo 'bench: no GPU'; exit 1; }
    "$B/layer_bench" $layer || exit 1
    python3 -c 'import gmm_torch' 2> /dev/null || exit 0
    exec python3 tests/bench/layer_peers.py $layer_peers
fi
if [ -z "$only_mlp" ]; then
    "$B/cpu_gemm" $cpu || exit 1
    if [ -s "$B/gpu_bench.run" ]; then
        echo
        rm -f "$json"
        sh "$B/gpu_bench.run" --json="$json" $gpu || exit 1
        if grep -q flops "$json" 2> /dev/null; then plot "$json"; fi
    fi
    echo
elif [ ! -s "$B/mlp_bench.run" ]; then echo 'bench: no GPU'; exit 1
fi
[ -s "$B/mlp_bench.run" ] || exit 0
rm -f "$mlp_json"
sh "$B/mlp_bench.run" --json="$mlp_json" $mlp || exit 1
[ -s "$B/layer_bench" ] && [ -z "$only_mlp" ] || exit 0
echo
"$B/layer_bench" $layer
