#!/bin/sh
# Builds two versions of the library as plug-ins and measures them in one process: see pairs.c. `make pairs` runs it
# with BASE (a commit, or a folder that holds its files), B, P, CC, NVCC_FLAGS and SEED set; the arguments go to pairs.
# With --cpu among them both versions hold the CPU engine alone, and no GPU is needed.
export B="${B:-build}" P="${P:-build/probe}" CC="${CC:-gcc}"
die() { echo "pairs: $*"; exit 1; }
cpu=
for a in "$@"; do [ "$a" != --cpu ] || cpu=1; done
[ -n "$BASE" ] || die "BASE=<commit> or a folder is needed"
[ -n "$cpu" ] || [ -s "$P/gpu" ] || die "no GPU here"

if [ -d "$BASE" ]; then tree=$BASE name=$(basename "$BASE")
else
    commit=$(git rev-parse --verify -q "$BASE^{commit}") || die "BASE=$BASE is neither a commit nor a folder"
    name=$(echo "$commit" | cut -c1-12)
    tree=$B/base-$name
    if [ ! -e "$tree/examples/vendoring/gmm.cu" ]; then
        mkdir -p "$tree" && git archive "$commit" | tar -x -C "$tree" || exit 1
    fi
fi
W=$B/pairs${cpu:+-cpu}
mkdir -p "$W" || exit 1

# library TREE OBJECT: the whole implementation, as one object that a shared one can hold
library() {
    unit=$1/examples/vendoring/gmm
    if [ -n "$cpu" ]; then
        sh tests/tools/parts.sh "$2.new" "$unit.c" $CC -std=c11 -O2 -fPIC $(cat "$P/openmp") -I"$1"
    else
        sh tests/tools/parts.sh "$2.new" "$unit.cu" sh tests/tools/nvcc.sh -I"$1"
    fi && mv "$2.new" "$2"
}
# plugin TREE LIBRARY-OBJECT SHARED: the rows of this tree, compiled against the headers of that one, whose fields may
# still have their former names. A version without a cache of weights and GMM_SAVE_QUANTIZED casts in each step
plugin() {
    former=
    grep -qw weight_cache "$1/gmm.h" || former=-DCASE_FORMER_MLP
    grep -qw gmm__transpose_format "$1/gmm.h" || former="$former -DCASE_FORMER_TRANSPOSITION"
    grep -qw x_index "$1/gmm.h" || former="$former -DCASE_FORMER_INDEX"
    grep -qw gmm_moe_fwd "$1/gmm.h" || former="$former -DCASE_FORMER_LAYER"
    grep -qw src_index "$1/gmm.h" || former="$former -DCASE_FORMER_CAST_INDEX"
    grep -qw bias_scale "$1/gmm.h" || former="$former -Dbias_scale=row_scale -Dd_bias_scale=d_row_scale"
    for f in cases cases_ops; do
        $CC -std=c11 -O2 -fPIC $former -I"$1" -Itests/tools -c -o "${3%.so}.$f.o" tests/tools/$f.c || return 1
    done
    $CC -shared -Wl,-Bsymbolic -Wl,--exclude-libs,ALL -o "$3" "${3%.so}.cases.o" "${3%.so}.cases_ops.o" "$2" \
        @"$P/openmp" $([ -n "$cpu" ] || cat "$P/cuda.link") -lm
}
# Objects are kept by what they are made from.
key() {
    {
        echo "$cpu $NVCC_FLAGS $CC $PARTS"
        cat "$P/gpu" "$P/nvcc" "$P/cublaslt" "$P/pthread.cflags" "$P/nccl.cflags" "$1"/gmm*.h "$1"/gmm*.cuh
    } | sha256sum | cut -c1-16
}

base=$W/gmm-$(key "$tree").o new=$W/gmm-$(key .).o
pids=
for pair in "$tree $base" ". $new"; do
    set_tree=${pair% *} set_object=${pair##* }
    [ -e "$set_object" ] && continue
    [ "$set_object" = "$base" ] && [ -n "$pids" ] && continue # the same version twice
    library "$set_tree" "$set_object" &
    pids="$pids $!"
done
for pid in $pids; do wait "$pid" || die "a version does not compile"; done
plugin "$tree" "$base" "$W/base.so" && plugin . "$new" "$W/new.so" || die "a plug-in does not link"
cp "$W/base.so" "$W/base_copy.so"
if [ -n "$cpu" ]; then
    $CC -std=c11 -O2 -I. -Itests -Itests/tools -o "$W/pairs" tests/bench/pairs.c tests/tools/case_ids.c -ldl -lm
else
    $CC -std=c11 -O2 $(cat "$P/cuda.cflags") -I. -Itests -Itests/tools -o "$W/pairs" tests/bench/pairs.c \
        tests/tools/case_ids.c tests/device.c $(cat "$P/cuda.link") -ldl -lm
fi || die "the driver does not build"
echo "pairs: $name beside this tree"
exec "$W/pairs" "$W/base.so" "$W/base_copy.so" "$W/new.so" --seed "${SEED:-1}" --out "$B/pairs.txt" "$@"
