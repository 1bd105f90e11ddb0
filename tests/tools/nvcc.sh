#!/bin/sh
# nvcc.sh FLAGS...: nvcc for this machine's GPU with what the probes in $P found; FLAGS name the unit, -c and -o.
P=${P:-build/probe}
gpu=$(cat "$P/gpu") openmp=$(cat "$P/openmp" 2> /dev/null)
exec $(cat "$P/nvcc" "$P/nvcc.flags") $NVCC_FLAGS -gencode "arch=compute_${gpu#sm_},code=$gpu" \
    ${openmp:+-Xcompiler=$openmp} $(cat "$P/cublaslt" "$P/pthread.cflags" 2> /dev/null) \
    $(sed 's/HAVE_NCCL/GMM_WITH_NCCL/' "$P/nccl.cflags" 2> /dev/null) "$@"
