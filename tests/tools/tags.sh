#!/bin/sh
# tags.sh: an index of parts, tests and examples for editors. The names of kernels that are expanded from bodies stand
# in definitions of macros and in tables of pointers.
ctags --version 2> /dev/null | grep -q Universal || { echo 'tags: universal-ctags is not installed'; exit 1; }
exec ctags --langmap=C:+.h.cuh.cu -I __launch_bounds__+ --kinddef-C='k,kernel,GPU kernels' \
    --regex-C='/^#define GMM__[A-Z_]*KERNEL_NAME (gmm_[a-z0-9_]+)/\1/k/' \
    --regex-C='/^#define GMM__ROW \((gmm_[a-z0-9_]+)/\1/k/' \
    --regex-C='/^#define GMM__ROW \(gmm_[a-z0-9_]+, (gmm_[a-z0-9_]+)/\1/k/' \
    --regex-C='/^    \(const void \*\)(gmm_[a-z0-9_]+),?$/\1/k/' -R src tests examples
