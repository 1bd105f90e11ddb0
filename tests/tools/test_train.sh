#!/bin/sh
# test_train.sh ARGS...: steps of train_moe compared with the CPU engine's, for each of $RECIPES and for other options.
# Called by the Makefile with B and RECIPES set.
status=0
compare() {
    echo "== $*"
    "$B/train_moe" --compare --quiet --steps 3 --aux 0.1 --dropout 0.2 --eval-tokens 1024 "$@" || status=1
}
for recipe in $RECIPES; do compare --recipe "$recipe" "$@"; done
compare --bias --interleave 8 --weights pointers "$@"
compare --delay-wgrad --save-policy nothing "$@"
exit $status
