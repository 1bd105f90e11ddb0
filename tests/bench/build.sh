#!/bin/sh
# build.sh PROGRAM FILE: links a program for GPUs from tests/bench and the library object, or leaves FILE empty where
# the machine lacks what it needs. Called by the Makefile with B, P, CC, LDFLAGS and NVCC_FLAGS exported.
program=$1 file=$2
say() { echo "  NVCC   tests/bench/$1"; }
compile() { sh tests/tools/nvcc.sh -I. -c -o "$@"; } # OBJECT SOURCE
mkdir -p "$(dirname "$file")"
: > "$file"
case $program in
gpu_bench.run)
    [ -s "$P/cublas" ] || exit 0
    say gpu_bench.cu
    compile "$B/gpu_bench.o" tests/bench/gpu_bench.cu || exit 1
    set -- "$B/gpu_bench.o" "$B/gmm.o" "@$P/openmp" "@$P/cublas" "@$P/cuda.link" -lm
    $CC $LDFLAGS -o "$B/gpu_bench" "$@" || exit 1
    echo "$B/gpu_bench \"\$@\"" > "$file"
    [ -s "$P/torch" ] || exit 0
    $CC -shared $LDFLAGS -o "$B/libgmm_bench.so" "$@" || exit 1
    echo "python3 tests/bench/peers.py $B/libgmm_bench.so \"\$@\"" > "$file" ;;
mlp_bench.run)
    [ -s "$P/cuda.link" ] || exit 0
    say mlp_bench.cu
    compile "$B/mlp_bench.o" tests/bench/mlp_bench.cu || exit 1
    set -- "$B/mlp_bench.o" "$B/gmm.o" "@$P/openmp" "@$P/cuda.link" -lm
    $CC $LDFLAGS -o "$B/mlp_bench" "$@" || exit 1
    echo "$B/mlp_bench \"\$@\"" > "$file"
    [ -s "$P/torch" ] || exit 0
    $CC -shared $LDFLAGS -o "$B/libgmm_mlp_bench.so" "$@" || exit 1
    echo "python3 tests/bench/mlp_peers.py $B/libgmm_mlp_bench.so \"\$@\"" > "$file" ;;
probes)
    [ -s "$P/cuda.link" ] || exit 0
    say probes.cu
    compile "$file.o" tests/bench/probes.cu || exit 1
    $CC $LDFLAGS -o "$file" "$file.o" "@$P/cuda.link" -lm ;;
layer_bench)
    [ -s "$P/cuda.link" ] || exit 0
    say layer_bench.cu
    compile "$file.o" tests/bench/layer_bench.cu || exit 1
    $CC $LDFLAGS -o "$file" "$file.o" "$B/gmm.o" "@$P/openmp" "@$P/cuda.link" -lm ;;
gtp_bench)
    [ -s "$P/nccl" ] || exit 0
    say gtp_bench.cu
    compile "$file.o" tests/bench/gtp_bench.cu || exit 1
    $CC $LDFLAGS -o "$file" "$file.o" "$B/gmm.o" "@$P/openmp" "@$P/cuda.link" -lm ;;
shapes)
    [ -s "$P/cublas" ] || exit 0
    say shapes.cu
    compile "$file.o" tests/bench/shapes.cu || exit 1
    $CC $LDFLAGS -o "$file" "$file.o" "$B/gmm.o" "@$P/openmp" "@$P/cublas" "@$P/cuda.link" -lm ;;
joined)
    grep -q sm_90a "$P/gpu" || exit 0
    say joined.cu
    compile "$file.o" tests/bench/joined.cu || exit 1
    $CC $LDFLAGS -o "$file" "$file.o" "$B/gmm.o" "@$P/openmp" "@$P/cuda.link" -lm ;;
*) echo "build.sh: no program called $program"; exit 1 ;;
esac
