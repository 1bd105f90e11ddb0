#!/bin/sh
# parts.sh OBJECT UNIT COMMAND...: the library as one object, by COMMAND with -c, -o and what lists the dependencies.
# Headers that GMM_PARTS divides become $PARTS objects, which are compiled at the same time and combined; if PARTS is
# empty, as many for CUDA as there are processors, to 8, and one for C.
object=$1 unit=$2 stem=${1%.o}
shift 2
mkdir -p "${object%/*}"
case $unit in
*.cu)
    echo "  NVCC   $unit for $(cat "${P:-build/probe}/gpu")"
    [ -n "$PARTS" ] || PARTS=$(getconf _NPROCESSORS_ONLN)
    [ "$PARTS" -le 8 ] || PARTS=8 ;;
*)
    echo "  CC     $unit"
    PARTS=${PARTS:-1} ;;
esac
grep -q GMM_PARTS "${unit%/*}/../../gmm_quant.h" || PARTS=1 # of the version that the unit belongs to
[ "$PARTS" -gt 1 ] || exec "$@" -MMD -MP -MF "$stem.d" -c -o "$object" "$unit"

part=0 parts= pids= failed=
while [ $part -lt "$PARTS" ]; do
    o=$stem.$part.o
    "$@" -DGMM_PARTS="$PARTS" -DGMM_PART=$part -MMD -MP -MT "$object" -MF "${o%.o}.d" -c -o "$o" "$unit" &
    pids="$pids $!" parts="$parts $o" part=$((part + 1))
done
for pid in $pids; do wait "$pid" || failed=1; done
[ -z "$failed" ] && ld -r -o "$object" $parts
