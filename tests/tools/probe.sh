#!/bin/sh
# probe.sh FILE NAME...: tries once what this machine has, and leaves beside FILE, which becomes older than they are, a
# file for each name with the flags or the command that use it, or nothing. A name follows those that it depends on. The
# Makefile calls it with CC, CXX, NVCC, CUDA_HOME, GPU and NCCL_HOME set. Lines on the terminal say what was found.
probes=${1%/*}
: > "$1"
shift
have() { [ -s "$probes/$1" ]; }
get() { cat "$probes/$1"; }
say() { if [ -s "$file" ]; then echo "  probe  $1: ${2:-yes}"; else echo "  probe  $1: no"; fi; }
# compiles TEXT COMPILER FLAGS...: whether the compiler takes and links the program
compiles() {
    text=$1
    shift
    printf '%b' "$text" | "$@" -o "$file.try" > /dev/null 2>&1
    result=$?
    rm -f "$file.try"
    return $result
}
# The toolkit that nvcc belongs to.
toolkit() { dirname "$(dirname "$(readlink -f "$(command -v "$(get nvcc)")")")"; }

for name in "$@"; do
    file=$probes/$name
    : > "$file"
    case $name in
    openmp) # C threads
        compiles '#include <omp.h>\nint main(void) { return omp_get_max_threads() < 1; }\n' \
            $CC -x c - -Werror -fopenmp && echo -fopenmp > "$file"
        say OpenMP ;;
    openmp++)
        compiles '#include <omp.h>\nint main() { return omp_get_max_threads() < 1; }\n' \
            $CXX -x c++ - -Werror -fopenmp && echo -fopenmp > "$file"
        say 'C++ compiler with OpenMP' ;;
    c++)
        compiles '#include <vector>\nint main() { return 0; }\n' $CXX -x c++ - -Werror -std=c++17 && echo yes > "$file"
        say 'C++ compiler' ;;
    pthread)
        compiles '#include <pthread.h>\nint main(void) { return !pthread_self(); }\n' $CC -x c - -Werror -pthread &&
            echo -pthread > "$file"
        say pthread ;;
    cjson)
        compiles '#include <cjson/cJSON.h>\nint main(void) { return !cJSON_Version(); }\n' $CC -x c - -Werror -lcjson &&
            echo -lcjson > "$file"
        say 'cJSON (saving and resuming models)' ;;
    openblas)
        compiles '#include <cblas.h>\nint main(void) { return !openblas_get_config(); }\n' \
            $CC -x c - -Werror -lopenblas && echo -lopenblas > "$file"
        say 'OpenBLAS (peer of the benchmark)' ;;
    pthread.cflags) have pthread && echo -DGMM_WITH_CPU_RANKS > "$file" ;;
    cjson.cflags) have cjson && echo -DHAVE_CJSON > "$file" ;;
    openblas.cflags) have openblas && echo -DHAVE_OPENBLAS > "$file" ;;
    nvcc) # the compiler; in nvcc.flags what builds one unit on several cores
        : > "$file.flags"
        echo '__global__ void probe() {}' > "$file.try.cu"
        for n in "$NVCC" "${CUDA_HOME:+$CUDA_HOME/bin/nvcc}" nvcc /usr/local/cuda/bin/nvcc; do
            if [ -n "$n" ] && "$n" -c -o "$file.try.o" "$file.try.cu" > /dev/null 2>&1; then
                echo "$n" > "$file"
                ! "$n" --split-compile=0 -c -o "$file.try.o" "$file.try.cu" > /dev/null 2>&1 ||
                    echo --split-compile=0 > "$file.flags"
                break
            fi
        done
        rm -f "$file.try.cu" "$file.try.o"
        say 'CUDA compiler' "$(cat "$file")" ;;
    cudaheaders)
        if have nvcc; then
            d=$(toolkit)/include
            compiles '#include <cuda_fp4.h>\n#include <cuda_fp8.h>\nint main(void) { return 0; }\n' \
                $CC -x c - -isystem "$d" && echo "-DHAVE_CUDA_HEADERS -isystem $d" > "$file"
        fi
        say 'CUDA host conversions (oracle of the codecs)' ;;
    emulated.cflags) have cudaheaders && echo '-DHAVE_CUDA -DGMM_NO_CUBLASLT' > "$file" ;;
    emulated.link) have cudaheaders && echo '-no-pie -lstdc++ -lpthread' > "$file" ;;
    gpu) # the GPU as an nvcc architecture: what GPU= names, or what is here
        a=$GPU
        [ -n "$a" ] || a=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2> /dev/null |
            grep -E '^[0-9]+\.[0-9]+$' | sort -V | head -n 1 | tr -d . |
            sed 's/^/sm_/; s/^sm_\(90\|100\|103\)$/sm_\1a/')
        if have nvcc && [ -n "$a" ] && [ "$a" != none ]; then echo "$a" > "$file"; fi
        say GPU "$(cat "$file")" ;;
    cuda.cflags) have gpu && echo "-DHAVE_CUDA -isystem $(toolkit)/include" > "$file" ;;
    cublaslt)
        if have nvcc; then
            echo '#include <cublasLt.h>
int main() { return !cublasLtGetVersion(); }' > "$file.try.cu"
            if "$(get nvcc)" -o "$file.try" "$file.try.cu" -lcublasLt > /dev/null 2>&1; then
                echo -lcublasLt > "$file"
                echo '  probe  cuBLASLt: yes'
            else
                echo -DGMM_NO_CUBLASLT > "$file"
                echo '  probe  cuBLASLt: no'
            fi
            rm -f "$file.try" "$file.try.cu"
        fi ;;
    nccl) # what the linker takes; in nccl.cflags what the compilers do
        : > "$file.cflags"
        if have gpu; then
            include=${NCCL_HOME:+-isystem $NCCL_HOME/include}
            library="${NCCL_HOME:+-L$NCCL_HOME/lib -Wl,-rpath,$NCCL_HOME/lib }-lnccl"
            if compiles '#include <nccl.h>\nint main(void) { int v; return ncclGetVersion(&v); }\n' \
                $CC -x c - -isystem "$(toolkit)/include" $include $library -Wl,--allow-shlib-undefined; then
                echo "$library" > "$file"
                echo "-DHAVE_NCCL $include" > "$file.cflags"
            fi
            say NCCL
        fi ;;
    cuda.link)
        if have gpu; then
            d=$(toolkit)/lib64 l=
            ! grep -q lcublasLt "$probes/cublaslt" || l="-lcublasLt -Wl,-rpath,$d "
            echo "-L$d $l$(get nccl) -lcudart_static -ldl -lrt -lpthread -lstdc++" > "$file"
        fi ;;
    cublas)
        if have cuda.link; then
            d=$(toolkit)/lib64
            f="-L$d -Wl,-rpath,$d -lcublas -lcublasLt"
            compiles 'int cublasCreate_v2(void **); int main(void) { return !cublasCreate_v2; }' $CC -x c - $f &&
                echo "$f" > "$file"
            say 'cuBLAS (peer of the benchmark)'
        fi ;;
    torch)
        if have gpu; then
            ! python3 -c 'import torch; torch._grouped_mm, torch.cuda.init()' > /dev/null 2>&1 || echo yes > "$file"
            say 'torch._grouped_mm (peer of the benchmark)'
        fi ;;
    matplotlib)
        if have gpu; then
            ! python3 -c 'import matplotlib' > /dev/null 2>&1 || echo yes > "$file"
            say 'matplotlib (plots of the benchmark)'
        fi ;;
    none.*) : ;; # flags of a build without it
    *) echo "probe.sh: no probe called $name"; exit 1 ;;
    esac
done
exit 0
