#!/bin/sh
# docs.sh: the reference of the headers, by Doxygen, in build/docs/html, and a check that it holds what the headers
# say. Warnings of Doxygen are errors.
set -e
doxygen --version > /dev/null 2>&1 || { echo 'docs: doxygen is not installed' >&2; exit 1; }
rm -rf build/docs && mkdir -p build/docs
version=$(sed -n 's/^#define GMM_VERSION_STRING "\(.*\)"/\1/p' gmm_quant.h)
{ cat docs/Doxyfile; printf 'OUTPUT_DIRECTORY = build/docs\nPROJECT_NUMBER = %s\n' "$version"; } | doxygen -
python3 -B tests/tools/docs.py build/docs/xml gmm_quant.h gmm.h gmm_gtp.h
echo 'build/docs/html/index.html'
