#!/bin/sh
# coverage.sh ARGS...: builds the CPU engine, host code and tests with gcov, runs the tests with ARGS, and writes the
# lines that ran, by part of src/, to build/coverage.txt. Without ARGS it fails where coverage.py says too few ran.
set -e
MAKE=${MAKE:-make} JOBS=${JOBS:-$(getconf _NPROCESSORS_ONLN)} B=build/coverage
$MAKE --no-print-directory CONFIG=coverage GPU=none SRC=1 $B/gmm_tests
find $B -name '*.gcda' -exec rm {} +
status=0 few=0
OMP_WAIT_POLICY=passive $B/gmm_tests --jobs "$JOBS" --threads 2 "$@" || status=$?
python3 -B tests/tools/coverage.py $B --missed > build/coverage.txt || few=$?
cat build/coverage.txt
[ $# -gt 0 ] || [ $few -eq 0 ] || { echo 'coverage: too few lines of the CPU engine or of host code' >&2; status=1; }
exit $status
