#!/bin/sh
# recipes.sh ARGS...: trains with each of $RECIPES and draws their held-out losses. Called by the Makefile with B and
# RECIPES set; ARGS go to train_moe.
curves=
for recipe in $RECIPES; do
    log=$B/recipe.$recipe.log
    "$B/train_moe" --recipe "$recipe" --sample 0 --svg "" "$@" > "$log" || exit 1
    curves="$curves $recipe=$log"
done
exec "$B/loss_curves" "$B/recipes.svg" $curves
