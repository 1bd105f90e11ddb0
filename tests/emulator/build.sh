#!/bin/sh
# build.sh OBJECT: the library for the emulator with the emulator itself, as one object, and OBJECT's list of what it
# depends on. Needs the headers of a CUDA toolkit; P and CXX are set by the Makefile.
set -e
object=$1 stem=${1%.o} here=tests/emulator
echo "  CXX    $here/gmm.cpp"
sh $here/headers.sh "$stem.headers"
flags="-std=c++17 -g -fno-pie -fno-strict-aliasing -Wno-attributes -I$here -I$stem.headers $(cat "$P/cudaheaders")"
flags="$flags -DGMM_NO_CUBLASLT $(cat "$P/pthread.cflags") $CXXFLAGS"
# Two units side by side. Warnings of the implementation are nvcc's to give.
for part in 0 1; do
    $CXX $flags -O1 -w -DGMM_PARTS=2 -DGMM_PART=$part -c -o "$stem.$part.o" $here/gmm.cpp &
    pids="$pids $!"
done
for unit in emulator runtime; do $CXX $flags -O3 -Wall -Wextra -c -o "$stem.$unit.o" $here/$unit.cpp; done
for pid in $pids; do wait "$pid"; done
ld -r -o "$object" "$stem.0.o" "$stem.1.o" "$stem.emulator.o" "$stem.runtime.o"
printf '%s:' "$object" > "$stem.d"
find src $here -type f -printf ' %p' >> "$stem.d"
find src $here -type f -printf '\n%p:' >> "$stem.d" # a part that is removed later is no error
