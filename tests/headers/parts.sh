#!/bin/sh
# Implementations that are split over units (GMM_PARTS) and builds that leave something out (GMM_NO_QUANT, GMM_NO_F16):
# they compile without warnings, link, and refuse in words what they lack. `make check` runs it from the root of the
# repository with CC, and with NVCC where there is a CUDA compiler; W is its folder.
CC=${CC:-gcc} W=${W:-build/parts} UNIT=examples/vendoring/gmm
FLAGS="-std=c11 -O0 -Wall -Wextra -pedantic -Werror -I."
rm -rf "$W" && mkdir -p "$W" || exit 1
die() { echo "parts: $*"; exit 1; }

# Links all parts with a program that calls every header, and runs it. Parts that are one text after preprocessing, as
# most of four parts and more are, are compiled once.
cpu_parts() {
    n=$1 k=0 objects=
    while [ $k -lt "$n" ]; do
        part="$FLAGS -DGMM_PARTS=$n -DGMM_PART=$k -DGMM_WITH_CPU_RANKS"
        $CC $part -E -o "$W/part.i" $UNIT.c || return 1
        object=$W/$(sha256sum < "$W/part.i" | cut -c 1-16).o
        [ -e "$object" ] || $CC $part -c -o "$object" $UNIT.c || return 1
        objects="$objects $object"
        k=$((k + 1))
    done
    $CC $FLAGS -o "$W/run$n" tests/headers/parts.c $objects -lm -lpthread && "$W/run$n"
}
for n in 1 2 3 4 5 6 7 8; do
    cpu_parts $n > "$W/$n.log" 2>&1 || { cat "$W/$n.log"; die "the CPU unit in $n parts"; }
done

# A build without quantized formats refuses them, and still multiplies bf16.
$CC $FLAGS -DGMM_NO_QUANT -DGMM_NO_F16 -DWITHOUT_QUANT -o "$W/without" tests/headers/parts.c $UNIT.c -lm &&
    "$W/without" ||
    die "the CPU unit with GMM_NO_QUANT"

# refused FLAGS TEXT: the preprocessor stops with this text
refused() {
    if $CC $FLAGS $1 -E -o "$W/refused.i" $UNIT.c 2> "$W/log"; then die "$1 compiles"; fi
    grep -q "$2" "$W/log" || die "$1: $(head -n 1 "$W/log")"
}
refused "-DGMM_PARTS=2" "define both, or none"
refused "-DGMM_PART=0" "define both, or none"
refused "-DGMM_PARTS=2 -DGMM_PART=2" "0 to GMM_PARTS - 1"
refused "-DGMM_PARTS=9 -DGMM_PART=0" "must be 1 to 8"
refused "-DGMM_PARTS=2 -DGMM_PART=0 -DGMM_STATIC" "GMM_STATIC needs the whole implementation"

# The CUDA unit in two parts, with kernels that are empty: every kernel is defined once. With QUICK, which .ci/run sets,
# the eight parts of the CMake target show it: what links as one unit and as eight links as any number between.
cuda="$NVCC -std=c++17 -O0 -gencode arch=compute_90a,code=sm_90a -Xcompiler=-Wall,-Wextra,-fPIC -I$EMPTY"
if [ -n "$NVCC" ] && [ -n "$EMPTY" ] && { [ -z "${QUICK:-}" ] || ! cmake --version > /dev/null 2>&1 ||
    ! grep -q lcublasLt build/probe/cublaslt; }; then
    $cuda -DGMM_PARTS=2 -DGMM_PART=0 -c -o "$W/cuda0.o" $UNIT.cu & first=$!
    $cuda -DGMM_PARTS=2 -DGMM_PART=1 -c -o "$W/cuda1.o" $UNIT.cu || die "CUDA part 1 of 2"
    wait $first || die "CUDA part 0 of 2"
    $NVCC -shared -Xlinker=-z,defs -o "$W/cuda.so" "$W/cuda0.o" "$W/cuda1.o" -lcublasLt || die "CUDA parts do not link"
fi
if [ -n "$NVCC" ] && [ -n "$EMPTY" ]; then
    $cuda -DGMM_NO_QUANT -DGMM_NO_F16 -c -o "$W/cuda_without.o" $UNIT.cu > "$W/log" 2>&1 && [ ! -s "$W/log" ] ||
        { cat "$W/log"; die "the CUDA unit with GMM_NO_QUANT and GMM_NO_F16"; }
fi
echo "parts: passed"
