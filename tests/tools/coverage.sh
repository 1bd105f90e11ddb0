#!/bin/sh
# coverage.sh ARGS...: builds the CPU engine, host code and tests with gcov, runs the tests with ARGS, and writes the
# lines that ran, by part of src/, to build/coverage.txt and, where none lacks, tests/results/coverage.txt.
set -e
MAKE=${MAKE:-make} JOBS=${JOBS:-$(getconf _NPROCESSORS_ONLN)} B=build/coverage
$MAKE --no-print-directory CONFIG=coverage GPU=none SRC=1 $B/gmm_tests
find $B -name '*.gcda' -exec rm {} +
status=0
$B/gmm_tests --jobs "$JOBS" --threads 2 "$@" || status=$?
python3 -B tests/tools/coverage.py $B > build/coverage.txt
cat build/coverage.txt
exit $status
