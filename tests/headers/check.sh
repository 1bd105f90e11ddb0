#!/bin/sh
# Checks of the headers, the built library, the build and the documentation. `make check` runs it from the root of the
# repository with CC, CXX, MAKE_PROGRAM, B (the build folder) and P (what the machine has) set. One line per check: ok,
# and how long it took where that is seconds, FAIL with the reason, or skip with what this machine lacks.

CC=${CC:-gcc} CXX=${CXX:-g++} MAKE=${MAKE_PROGRAM:-make} B=${B:-build} P=${P:-build/probe}
nvcc=$(cat $P/nvcc $P/cublaslt | tr '\n' ' ')
W=build/check
. tests/headers/report.sh
STRICT="-Wall -Wextra -pedantic -Werror"
HEADERS="gmm_quant.h gmm.h gmm_gtp.h"
TEXTS="$HEADERS $(ls gmm*.cuh 2> /dev/null)"
UNIT_DIR=examples/vendoring
UNIT=$UNIT_DIR/gmm

MAKE_PROGRAM=$MAKE sh tests/headers/text.sh || failures=$((failures + 1))

# beside NAME FUNCTION: the checks of the function, side by side with those that follow. joined NAME waits for them,
# prints what they printed and counts what failed.
beside() {
    ( lane=.$1 failures=0
      "$2"
      echo $failures > "$W/failed.$1" ) > "$W/printed.$1" 2>&1 &
    eval "beside_$1=$!"
}
joined() {
    eval "wait \$beside_$1"
    cat "$W/printed.$1"
    failures=$((failures + $(cat "$W/failed.$1" 2> /dev/null || echo 1)))
}
macros() { "$@" -E -dM - | awk '{ sub(/\(.*/, "", $2); print $2 }' | sort -u; }

compilers_c=$CC
compilers_cxx=
if printf '#include <vector>\n' | $CXX -x c++ -fsyntax-only - 2> /dev/null; then compilers_cxx=$CXX
else skip "C++17" "no C++ compiler"; fi
if works clang; then compilers_c="$compilers_c clang"; else skip "clang" "not installed"; fi
if works clang++ && printf '#include <vector>\n' | clang++ -x c++ -fsyntax-only - 2> /dev/null; then
    compilers_cxx="$compilers_cxx clang++"
fi
openmp=$(cat $P/openmp 2> /dev/null)

# ---- CUDA, side by side with what needs one core: the longest first

# unit FILE HEADER...: a file that includes the headers in this order; the word "define" stands for GMM_IMPLEMENTATION
unit() {
    file=$1
    shift
    for h in "$@"; do
        if [ "$h" = define ]; then printf '#define GMM_IMPLEMENTATION\n'; else printf '#include "%s"\n' "$h"; fi
    done > "$file"
}

cuda="-Werror all-warnings -Xcompiler=-Wall,-Wextra -I."
# All kernels as users get them: what ptxas says of spills and wgmma depends on every optimisation.
cuda_hopper() {
    $nvcc -std=c++17 $cuda -gencode arch=compute_90a,code=sm_90a -Xptxas -v -c -o "$W/cuda.o" $UNIT.cu \
        > "$W/ptxas" 2>&1 || { grep -v '^ptxas info\|bytes stack frame' "$W/ptxas"; return 1; }
}
# What ptxas said: a kernel for sm_90a that spills, or whose wgmma instructions wait for one another (C75xx)
cuda_spills() { # FILE
    awk '/Compiling entry function/ { name = $7 " " $9; kernels++ }
         /bytes spill stores/ && name ~ /sm_90a/ && !/ 0 bytes spill stores, 0 bytes spill loads/ { print name ": " $0 }
         END { if (!kernels) print "ptxas named no kernel" }' "$1"
    grep -E 'C75[0-9][0-9]' "$1"
}
# Every kernel of the Hopper section multiplies by wgmma.
cuda_hgmma() {
    PATH="$(dirname "$(command -v "$cuobjdump")"):$PATH" $cuobjdump -sass -arch sm_90a "$W/cuda.o" |
        awk '/Function :/ { name = $3 ~ /_sm90/ ? $3 : ""; if (name) lacks[name] = 1; kernels += name != "" }
             name && /HGMMA/ { delete lacks[name] }
             END { if (!kernels) print "no kernel of sm_90a"; for (name in lacks) print name ": no HGMMA" }'
}
# Names of kernels, as profilers show them, that a search of the headers does not find.
cuda_names() {
    awk -F "'" '/Compiling entry function/ && match($2, /^_Z[0-9]+/) {
                    print substr($2, RLENGTH + 1, substr($2, 3, RLENGTH - 2)); n++ }
                END { if (!n) print "ptxas named no kernel" }' "$W/ptxas" | sort -u > "$W/kernels"
    cat $TEXTS | grep -ow 'gmm_[a-z0-9_]*' | sort -u | comm -23 "$W/kernels" -
}
cuda_symbols() {
    nm -g --defined-only "$W/cuda.o" | awk '$2 !~ /[WVu]/ { print $3 }' | grep -v '^gmm_'
    nm -f sysv "$W/cuda.o" | grep -E '\|\.t?(data|bss) *$' | grep -vE '__nv|__cuda|__fat|device_stub' # nvcc's own
}
# What nvcc makes of the headers, in two orders, with kernels that are empty: soon, and the host compiler reads all of
# the rest. Casts in the toolkit's own headers are not ours.
cuda_host() {
    unit "$W/order1.cu" gmm_kernels.cuh gmm_gtp.h define gmm_gtp.h gmm.h gmm_quant.h gmm_kernels.cuh
    unit "$W/order2.cu" define gmm_kernels.cuh gmm_gtp.h
    nccl=
    ! printf '#include <nccl.h>\n' | $nvcc -E -x cu - > /dev/null 2>&1 || nccl=-DGMM_WITH_NCCL
    $nvcc -std=c++17 -I$B/empty -Xcompiler=-Wall,-Wextra,-Wuseless-cast -arch=sm_80 -Xptxas -O0 \
        -DGMM_WITH_CPU_RANKS $nccl -c -o "$W/order.o" "$W/order1.cu" > "$W/casts" 2>&1 || { cat "$W/casts"; return 1; }
    empty grep -E '(^|/)gmm[a-z_]*\.(h|cuh):.*warning' "$W/casts" || return 1
    $nvcc -std=c++17 -I$B/empty $cuda -arch=sm_80 -Xptxas -O0 -c -o "$W/order.o" "$W/order2.cu"
}
# For checks of what compiles and links, which code the compiler generates does not matter.
fast=
! $nvcc --help 2> /dev/null | grep -q Ofast-compile || fast=--Ofast-compile=max
cuda_torch() {
    $nvcc -std=c++20 $fast $cuda -arch=sm_90a -D__CUDA_NO_HALF_OPERATORS__ -D__CUDA_NO_HALF_CONVERSIONS__ -O1 \
        -D__CUDA_NO_BFLOAT16_CONVERSIONS__ -D__CUDA_NO_HALF2_OPERATORS__ -ptx -o "$W/cuda_torch.ptx" $UNIT.cu
}
# cuda_units ARCHITECTURE FLAGS FIRST_FLAGS SECOND_FLAGS: the first holds all kernels. -arch=sm_100a would compile the
# same text for compute_100 once more: no line of ours depends on the features that 100a adds.
cuda_units() {
    gencode="-gencode arch=compute_$1,code=sm_$1"
    easy="-std=c++17 $fast -Xptxas -O0 $gencode $2 -x cu -c tests/headers/units.c"
    $nvcc $easy -DFIRST $3 $cuda -o "$W/$1a.o" & first=$!
    $nvcc $easy $4 $cuda -o "$W/$1b.o"; second=$?
    wait $first && [ $second = 0 ] && $nvcc $gencode $2 -o "$W/$1" "$W/$1a.o" "$W/$1b.o" && "$W/$1"
}
cuda_kernels() {
    check "CUDA: sm_90a, warnings are errors" cuda_hopper
    check "CUDA: no kernel for sm_90a spills, no wgmma is serialized" empty cuda_spills "$W/ptxas"
    cuobjdump=
    for c in cuobjdump "$(dirname "$(command -v ${nvcc%% *})")/cuobjdump"; do works $c && cuobjdump=$c && break; done
    if [ -n "$cuobjdump" ]; then check "CUDA: HGMMA in every kernel for sm_90a" empty cuda_hgmma
    else skip "CUDA: HGMMA in the machine code" "no CUDA toolkit with cuobjdump"; fi
    check "CUDA: the name of every kernel stands in the headers" empty cuda_names
    check "CUDA: gmm_ names alone, no mutable globals but nvcc's" empty cuda_symbols
}
cuda_compilations() {
    check "CUDA: C++20, with the flags of PyTorch extensions" cuda_torch
    check "CUDA: sm_80, warnings are errors, two units with -rdc=true" cuda_units 80 -rdc=true -DGMM_IMPLEMENTATION ""
    check "CUDA: declarations first or last, no useless casts" cuda_host
    check "CUDA: sm_100a, warnings are errors, GMM_STATIC in two units" cuda_units 100a \
        "-DGMM_STATIC -DGMM_IMPLEMENTATION" "" -I$B/empty
}
if [ -n "$nvcc" ]; then
    beside kernels cuda_kernels
    beside compilations cuda_compilations
else
    skip "CUDA compilation" "no CUDA toolkit"
fi

# ---- Declarations

declarations() {
    for h in $HEADERS; do
        printf '#include "%s"\n' "$h" > "$W/decl.c"
        for c in $compilers_c; do
            for std in c99 c11; do $c -std=$std $STRICT -fsyntax-only -I. "$W/decl.c" || return 1; done
        done
        for c in $compilers_cxx; do $c -x c++ -std=c++17 $STRICT -fsyntax-only -I. "$W/decl.c" || return 1; done
    done
}
check "declarations are clean in C99, C11, C++17" declarations

# Warnings that projects turn on, beyond those that the whole of the sources is free of.
EVERYTHING="-Weverything -Wno-padded -Wno-declaration-after-statement -Wno-unsafe-buffer-usage -Wno-c++98-compat
    -Wno-c++98-compat-pedantic -Wno-unknown-warning-option -Werror"
loud_declarations() {
    for h in $HEADERS; do
        printf '#include "%s"\n' "$h" > "$W/decl.c"
        for c in $compilers_c $compilers_cxx; do
            more="-Wconversion -Wsign-conversion -Wcast-qual -Wshadow"
            case $c in clang*) more=$EVERYTHING;; esac
            language="-std=c11"
            case $c in *++*)
                language="-x c++ -std=c++17"
                case $c in clang*) ;; *) more="$more -Wuseless-cast -Wold-style-cast";; esac;;
            esac
            $c $language $STRICT $more -fsyntax-only -I. "$W/decl.c" || return 1
        done
    done
}
check "declarations are clean under -Wconversion, -Wuseless-cast and clang's -Weverything" loud_declarations

# What tests and examples are compiled with, beside the headers without their implementation.
declared() { printf '#include "%s"\n' "$1" | $CC $2 -I. -E -P -x c -; }
declarations_alone() {
    for h in $HEADERS; do
        declared $h "" > "$W/header" && declared $h -I$B/declarations | cmp "$W/header" - || return 1
    done
}
check "the declarations of the build are those of the headers" declarations_alone

# Lines of our own headers after preprocessing, with their include directives.
own_includes() {
    printf '%s#include "gmm_gtp.h"\n' "$1" | $CC $2 -I. -E -dI -x c - |
        awk '/^# [0-9]+ "/ { own = $3 ~ /gmm/ } /^#include/ && own { print $2 }' | sort -u
}
declaration_includes() { empty sh -c "printf '%s\n' \"\$1\" | grep -vxE '<std(def|int)\.h>|\"gmm(_quant)?\.h\"'" - \
    "$(own_includes '')"; }
check "declarations include stddef.h and stdint.h alone" declaration_includes

no_cuda() {
    empty sh -c "printf '#define GMM_IMPLEMENTATION\n#include \"gmm_gtp.h\"\n' | $CC -I. -E -x c - |
        grep -iE '^# .*(cuda|nccl|cublas)'"
}
check "a C unit pulls in no CUDA or NCCL header" no_cuda

leaks_of_declarations() {
    printf '#include <stddef.h>\n#include <stdint.h>\n' | macros $1 > "$W/base"
    printf '#include "gmm_gtp.h"\n' | macros $1 -I. | comm -23 - "$W/base" | grep -vE '^GMM(_[A-Z0-9]|DEF$|__[A-Z0-9])'
}
check "declarations leak no macro" empty leaks_of_declarations "$CC -x c"
[ -z "$compilers_cxx" ] || check "declarations leak no macro in C++" empty leaks_of_declarations "$CXX -x c++"

leaks_of_implementation() {
    own_includes '#define GMM_IMPLEMENTATION
' "$openmp" | grep '<' | sed 's/^/#include /' > "$W/base.h"
    macros $1 $openmp < "$W/base.h" > "$W/base"
    printf '#define GMM_IMPLEMENTATION\n#include "gmm_gtp.h"\n' | macros $1 $openmp -I. | comm -23 - "$W/base" |
        grep -vE '^GMM(_[A-Z0-9]|DEF$|__[A-Z0-9])'
    printf '#define GMM_IMPLEMENTATION\n#include "gmm_gtp.h"\n' | macros $1 $openmp -I. | grep -x 'GMM__X'
}
check "the implementation leaks no macro" empty leaks_of_implementation "$CC -x c"
[ -z "$compilers_cxx" ] || check "the implementation leaks no macro in C++" empty leaks_of_implementation "$CXX -x c++"

# Lines of code after preprocessing, whatever their order.
lines_of() { $CC -std=c11 -I. -Itests/headers -E "$1" | grep -v '^#' | grep . | sort; }
# same_unit REFERENCE HEADER...: compiles in C and C++, and holds what REFERENCE holds
same_unit() {
    reference=$1
    shift
    unit "$W/order.c" hostile.h "$@"
    { lines_of "$W/order.c" | cmp "$reference" - && compiles_once $CC -std=c11 &&
        { [ -z "$compilers_cxx" ] || compiles_once $CXX -x c++ -std=c++17; }; } ||
        { echo "in the order: $*"; return 1; }
}
# compiles_once COMPILER...: whether it takes order.c; many orders are one text after preprocessing, compiled once
compiles_once() {
    text=$("$@" -I. -Itests/headers -E -P "$W/order.c" | sha256sum)
    case $compiled in *"$1 $text"*) return 0 ;; esac
    "$@" $STRICT -fsyntax-only -I. -Itests/headers "$W/order.c" && compiled="$compiled $1 $text"
}
compiled=
# Every order of the headers, twice, with GMM_IMPLEMENTATION at the first, before each of them, after the first time,
# and nowhere. What stands before it are declarations, which the second time completes.
orders() {
    unit "$W/order.c" hostile.h $HEADERS && lines_of "$W/order.c" > "$W/declared" &&
    unit "$W/order.c" hostile.h define $HEADERS && lines_of "$W/order.c" > "$W/implemented" || return 1
    for a in $HEADERS; do for b in $HEADERS; do for c in $HEADERS; do
        [ $a != $b ] && [ $a != $c ] && [ $b != $c ] || continue
        set -- $a $b $c
        same_unit "$W/declared" "$@" "$@" gmm_kernels.cuh &&
        same_unit "$W/implemented" define gmm_kernels.cuh "$@" "$@" &&
        same_unit "$W/implemented" $a define $b $c "$@" gmm_kernels.cuh &&
        same_unit "$W/implemented" $a $b define $c "$@" &&
        same_unit "$W/implemented" "$@" define "$@" || return 1
    done; done; done
    same_unit "$W/implemented" gmm_gtp.h define gmm_gtp.h
    unit "$W/order.c" hostile.h define gmm.h && lines_of "$W/order.c" > "$W/implemented" &&
    same_unit "$W/implemented" gmm.h define gmm.h
}
check "any include order, implemented at any point, after hostile macros" orders

# ---- The tools that compare versions

if works python3; then check "the tools that compare versions" env CC="$CC" B="$B" sh tests/tools/self_test.sh
else skip "the tools that compare versions" "no python3"; fi

# ---- Implementation

check "implementations in 1 to 8 parts, and without quantized formats or f16" \
    env CC="$CC" NVCC="$nvcc" EMPTY="$B/empty" W="$W/split" sh tests/headers/parts.sh

# The library object is this one already if it is for the CPU and warnings were errors.
implementation() {
    if [ ! -s $P/gpu ] && grep -q -- "^$CC -std=c11 -O3 .*-Werror" $B/flags; then cp $B/gmm.o "$W/gmm.o"
    else $CC -std=c11 -O3 $openmp $STRICT -I. -c -o "$W/gmm.o" $UNIT.c; fi &&
    $CC -std=c11 -O0 -fPIC $STRICT -I. -c -o "$W/unit.o" $UNIT.c
}
check "the implementation is clean in C11" implementation
# $W/unit.o is without OpenMP, which counts on more than four processors.
warns() {
    [ "$(getconf _NPROCESSORS_ONLN)" -le 4 ] && serial= || serial=-fopenmp
    $CC -std=c11 $STRICT -I. -o "$W/warns" tests/headers/warns.c "$W/unit.o" -lm && "$W/warns" -O3 $serial &&
    $CC -std=c11 $STRICT -I. -o "$W/warns" tests/headers/warns.c "$W/gmm.o" $openmp -lm &&
    if [ -n "$openmp" ]; then "$W/warns"; else "$W/warns" $serial; fi
}
check "a build without optimisation or OpenMP says so once per context" warns
implementation_clang() {
    m=$openmp
    printf '#include <omp.h>\n' | clang $m -fsyntax-only -x c - 2> /dev/null || m=
    clang -std=c11 -O1 $m $STRICT -I. -c -o "$W/other.o" $UNIT.c
}
! works clang || check "the implementation is clean in C11 with clang" implementation_clang
no_rows() {
    clang -std=c11 -O0 -fsanitize=undefined -fno-sanitize-recover=undefined $STRICT -I. -o "$W/no_rows" \
        tests/headers/no_rows.c -lm && "$W/no_rows"
}
! works clang || check "products of nothing and of codes, a router without counts do no arithmetic on NULL" no_rows
# clang has given nearly all of its warnings before it optimises.
implementation_cxx() {
    for c in $compilers_cxx; do
        case $c in clang*) optimise=-O0 ;; *) optimise=-O1 ;; esac
        $c -x c++ -std=c++17 $optimise $STRICT -I. -c -o "$W/other.o" $UNIT.c || return 1
    done
}
[ -z "$compilers_cxx" ] || check "the implementation is clean in C++17" implementation_cxx
# The C++ wrapper, in a program without exceptions.
wrapper() {
    printf '%s\n' '#include "examples/cpp/gmm.hpp"' 'gmm_status use(gmm::Workspace &, gmm::Linear &);' \
        'gmm_status use(gmm::Workspace &w, gmm::Linear &l) { return l.fwd(w); }' > "$W/wrapper.cpp"
    for c in $compilers_cxx; do
        $c -std=c++17 $STRICT -fno-exceptions -DGMM_NO_EXCEPTIONS -I. -fsyntax-only "$W/wrapper.cpp" || return 1
    done
    mkdir -p "$W/wrapper" && : > "$W/wrapper/cuda_runtime.h"
    for macro in "" -DGMM_HPP_CUDA; do
        $CXX -std=c++17 $STRICT -fno-exceptions -DGMM_NO_EXCEPTIONS $macro -I. -I"$W/wrapper" -o "$W/wrapper/run" \
            tests/headers/wrapper.cpp "$W/unit.o" -lm && "$W/wrapper/run" || return 1
    done
    [ "$(wc -l < examples/cpp/gmm.hpp)" -le 300 ] || { echo "gmm.hpp has more than 300 lines"; return 1; }
}
[ -z "$compilers_cxx" ] || check "the C++ wrapper without exceptions, memory of GPUs, at most 300 lines" wrapper
useless_casts() {
    for flags in "" "$openmp -DGMM_WITH_CPU_RANKS"; do
        $1 -x c++ -std=c++17 $STRICT -Wuseless-cast $flags -fsyntax-only -I. $UNIT.c || return 1
    done
}
! $CXX -Werror -Wuseless-cast -fsyntax-only -x c++ /dev/null 2> /dev/null ||
    check "no cast of the implementation is useless in C++" useless_casts "$CXX"

only_gmm_symbols() {
    nm -g --defined-only "$W/gmm.o" | awk '$2 !~ /[WVu]/ { print $3 }' | grep -v '^gmm_'
    nm -g --defined-only "$W/gmm.o" | grep -q ' gmm_version_number$' || echo "gmm_version_number is not there"
}
check "the object exports gmm_ names alone" empty only_gmm_symbols

foreign() { nm -u "$W/gmm.o" | awk '{ print $2 }' |
    grep -E '^(_?exit|_Exit|abort|f?puts|v?f?printf|putchar|fwrite|perror|getenv|__assert_fail|__v?f?printf_chk)$'; }
check "the object calls no exit, abort, print or getenv" empty foreign
source_calls() { for h in $TEXTS; do
    $CC -fpreprocessed -dD -E -P -x c $h 2> /dev/null |
        grep -nE '(^|[^_a-zA-Z0-9])(exit|abort|printf|puts|fprintf|putchar|getenv|assert|throw)[ ]*\(' | sed "s/^/$h: /"
done; }
check "nor do the headers" empty source_calls

# Sections instead of nm's letters: tables of pointers lie in .data.rel.ro, which is constant.
mutable() {
    size -A "$W/gmm.o" | awk '$1 ~ /^\.t?(data|bss)/ && $1 !~ /^\.data\.rel\.ro/ && $2 > 0 { print $1, $2 }'
    nm "$W/gmm.o" | grep ' C '
}
check "no mutable globals" empty mutable

hidden() {
    $CC -shared -o "$W/hidden.so" "$W/unit.o" -lm || return 1
    empty sh -c "nm -D --defined-only '$W/hidden.so' | grep gmm"
}
check "a shared object exports nothing of it" hidden

exported() {
    $CC -std=c11 -O0 -fPIC -shared -I. '-DGMMDEF=extern __attribute__((visibility("default")))' -o "$W/exported.so" \
        $UNIT.c -lm || return 1
    for f in gmm__create gmm_linear_fwd gmm_layout_of; do
        nm -D --defined-only "$W/exported.so" | grep -q " T $f\$" || { echo "$f is not exported"; return 1; }
    done
}
check "with GMMDEF for it, a shared object exports the functions" exported

versions_apart() {
    mkdir -p "$W/v2" && cp gmm*.h "$W/v2/" || return 1
    sed -i 's/^#define GMM_VERSION_PATCH [0-9]*/#define GMM_VERSION_PATCH 77/' "$W/v2/gmm_quant.h" || return 1
    plugin="$CC -std=c11 -O0 -fPIC -shared tests/headers/plugin.c"
    $plugin -DPLUGIN=plugin_a -I. "$W/unit.o" -o "$W/liba.so" -lm &&
    $plugin -DPLUGIN=plugin_b -I"$W/v2" -DGMM_IMPLEMENTATION -o "$W/libb.so" -lm &&
    $CC -std=c11 -o "$W/plugin" tests/headers/plugin_main.c -L"$W" -la -lb -Wl,-rpath,"$W" || return 1
    this=$(awk '$2 ~ /^GMM_VERSION_(MAJOR|MINOR|PATCH)$/ { v = v * 100 + $3 } END { print v }' gmm_quant.h)
    other=$(awk '$2 ~ /^GMM_VERSION_(MAJOR|MINOR|PATCH)$/ { v = v * 100 + $3 } END { print v }' "$W/v2/gmm_quant.h")
    [ "$this" != "$other" ] && "$W/plugin" "$this" "$other"
}
check "two shared objects with different versions do not mix" versions_apart

# Two units with declarations, beside that of the implementation.
units() { # NAME COMPILER...: of the second unit; the first is C
    name=$1
    shift
    $CC -std=c11 $STRICT -I. -DFIRST -c -o "$W/first.o" tests/headers/units.c &&
    "$@" $STRICT -I. -c -o "$W/$name.o" tests/headers/units.c &&
    $1 -o "$W/$name" "$W/first.o" "$W/$name.o" "$W/unit.o" -lm && "$W/$name"
}
check "two units link" units c "$CC" -std=c11
[ -z "$compilers_cxx" ] || check "a C unit and a C++ unit link" units mixed "$CXX" -x c++ -std=c++17

static_units() {
    for u in a b; do
        define=
        [ $u = b ] || define=-DFIRST
        $CC -std=c11 $STRICT -I. -DGMM_STATIC -DGMM_IMPLEMENTATION $define -c -o "$W/s$u.o" tests/headers/units.c ||
            return 1
        empty sh -c "nm -g --defined-only '$W/s$u.o' | grep ' gmm_'" || return 1
    done
    $CC -o "$W/static" "$W/sa.o" "$W/sb.o" -lm && "$W/static"
}
check "GMM_STATIC in two units links" static_units
static_alone() { ! printf '#define GMM_STATIC\n#include "gmm.h"\n' | $CC -I. -fsyntax-only -x c - 2> "$W/err" &&
    grep -q 'GMM_STATIC needs GMM_IMPLEMENTATION' "$W/err"; }
check "GMM_STATIC without the implementation is a worded error" static_alone

# ---- Oracles

ml_dtypes() {
    $CC -std=c11 $STRICT -I. -o "$W/codes" tests/oracle/codes.c &&
    PYTHONPATH=build/python python3 tests/oracle/ml_dtypes_check.py "$W/codes"
}
if PYTHONPATH=build/python python3 -c 'import ml_dtypes' 2> /dev/null; then
    check "codes of the small formats equal those of ml_dtypes" ml_dtypes
else skip "codes against ml_dtypes" "the Python package is not installed"; fi

# ---- README and guide

# The README's programs, in its words: blocks of C and CUDA become example.c and example.cu, and the lines that compile
# and link them are run, beside the headers in a folder "gmm", with this machine's compilers in place of those named,
# and without -O3, which would take three times as long.
readme_block() { awk -v fence='```'"$1" '$0 == fence { on = 1; next } /^```/ { on = 0 } on' README.md; }
readme_files() {
    rm -rf "$W/readme" && mkdir -p "$W/readme/gmm" && cp $HEADERS "$W/readme/gmm/" &&
        cp "$1" "$W/readme/gmm/gmm_kernels.cuh" && readme_block c > "$W/readme/example.c" &&
        readme_block cuda > "$W/readme/example.cu"
}
readme_c() {
    readme_files gmm_kernels.cuh && readme_block sh | grep '^gcc .*example\.c ' |
        sed "s|^gcc|$CC|; s| -O3 | |; s| -fopenmp|${openmp:+ $openmp}|" > "$W/readme/lines" &&
        [ "$(wc -l < "$W/readme/lines")" = 1 ] &&
        (cd "$W/readme" && sh -ex lines && ./example_cpu) &&
        $CC -std=c11 $STRICT -fsyntax-only -I. "$W/readme/example.c"
}
check "the README's C program compiles and runs" readme_c
# With a GPU the whole of the kernels is compiled for it, and the program runs; without, they are empty.
readme_cuda() {
    toolkit=$(dirname "$(dirname "$(readlink -f "$(command -v ${nvcc%% *})")")")
    if [ -n "$gpu" ]; then readme_files gmm_kernels.cuh; else readme_files $B/empty/gmm_kernels.cuh; fi || return 1
    readme_block sh | grep 'example\.\(cu\|o\)' |
        sed "s|^nvcc|${nvcc%% *}|; s|^gcc|$CC|; s|/usr/local/cuda/lib64|$toolkit/lib64|; s|sm_90a|${gpu:-sm_90a}|
             s| -O3 | |; s| -c | $(cat build/probe/nvcc.flags) -c |" > "$W/readme/lines"
    [ "$(wc -l < "$W/readme/lines")" = 3 ] && (cd "$W/readme" && sh -ex lines) || return 1
    [ -z "$gpu" ] || (cd "$W/readme" && export LD_LIBRARY_PATH="$toolkit/lib64" && ./example_nvcc && ./example_gcc)
}
gpu=
! nvidia-smi -L > /dev/null 2>&1 || gpu=$(cat build/probe/gpu 2> /dev/null)
if [ -z "$nvcc" ]; then skip "the README's GPU program" "no CUDA toolkit"
elif ! grep -q lcublasLt build/probe/cublaslt; then skip "the README's GPU program" "no CUDA toolkit with cuBLASLt"
elif [ -n "$gpu" ]; then check "the README's GPU program compiles, links and runs" readme_cuda
else
    check "the README's GPU program compiles and links, with empty kernels" readme_cuda
    skip "the README's GPU program, run" "no GPU"
fi

check "the guide's programs compile and run, its tables of errors are whole" \
    env CC="$CC" B="$B" P="$P" W="$W" sh tests/headers/guide.sh

# What a profiler sees of an MLP's forward: a range for the call, and one inside for each step.
nvtx_ranges() {
    $CC -std=c11 $STRICT -I. $(cat $P/cudaheaders) -o "$W/nvtx" tests/headers/nvtx.c -lm -ldl &&
        "$W/nvtx" > "$W/ranges" || { cat "$W/ranges"; return 1; }
    printf '%s\n' 'gmm mlp_fwd cpu (G=2 T=4 hidden=4 ffn=4 out=4 swiglu)' \
        '  gmm offsets cpu (G=2 T=4 hidden=4 ffn=4 out=4 swiglu)' '  gmm linear_fwd cpu (G=2 T=4 K=4 N=8 f32)' \
        '  gmm act_fwd cpu (G=2 T=4 ffn=4 swiglu f32)' '  gmm linear_fwd cpu (G=2 T=4 K=4 N=4 f32)' |
        diff - "$W/ranges"
}
if [ -s $P/cudaheaders ]; then check "GMM_WITH_NVTX: ranges of a call and of its steps" nvtx_ranges
else skip "NVTX ranges" "no CUDA toolkit"; fi

# Quick starts of the headers: statements inside a function, with the names they take for granted.
quick_start() {
    for h in $HEADERS; do
        { printf '#define GMM_IMPLEMENTATION\n#include "gmm_gtp.h"\n'
          printf 'int quick_start(const int32_t *counts, void *xs, void *ws, void *ys, void *workspace);\n'
          printf 'int quick_start(const int32_t *counts, void *xs, void *ws, void *ys, void *workspace) {\n'
          printf '(void)counts; (void)xs; (void)ws; (void)ys; (void)workspace;\n'
          awk '/Quick start/ { on = 1 } /CONTENTS/ { exit } on && sub(/^ \*     /, "") && !/#/' $h
          printf 'return 0;\n}\n'; } > "$W/quick.c"
        $CC -std=c11 -Wall -Wextra -Werror -Wno-unused-variable -Wno-unused-but-set-variable -fsyntax-only -I. \
            "$W/quick.c" || return 1
    done
}
check "the headers' quick starts compile" quick_start

# ---- Build

# The sanitized tests are built and run meanwhile.
snapshot() {
    find . \( -path ./.git -o -path ./build/check -o -path ./build/sanitize \) -prune -o -type f \
        -printf '%p %T@ %s\n' | sort
}
dry_run() {
    snapshot > "$W/before"
    for target in clean all help install; do $MAKE -n $target > /dev/null || return 1; done
    snapshot > "$W/after"
    diff "$W/before" "$W/after"
}
check "make -n changes nothing" dry_run
nothing_to_do() { $MAKE -q all || { $MAKE -n all | head -n 5; return 1; }; }
check "a second make does nothing" nothing_to_do

# From a copy without build folder, in parallel, without a C++ compiler: what needs one says so.
from_clean() {
    mkdir -p "$W/copy" && cp -R $TEXTS tests examples Makefile README.md LICENSE CHANGELOG.md "$W/copy/" || return 1
    (cd "$W/copy" && $MAKE -j2 CONFIG=debug CFLAGS=-g0 WERROR=1 CC="$CC" CXX=no-such-compiler all > make.log 2>&1 &&
        grep -q 'skip.*no C++ compiler' make.log) || { tail -n 20 "$W/copy/make.log"; return 1; }
}
check "make -j from clean, without a C++ compiler, at -O0, warnings are errors" from_clean
installs() {
    $MAKE install DESTDIR="$W/root" PREFIX=/usr > /dev/null || return 1
    printf '#include "gmm.h"\nint main(void) { return !gmm_version_number(); }\n' > "$W/use.c"
    for h in $TEXTS; do cmp "$h" "$W/root/usr/include/$h" || return 1; done
    $CC -std=c11 -I"$W/root/usr/include" -o "$W/use" "$W/use.c" "$W/unit.o" -lm && "$W/use" || return 1
    grep -qx 'prefix=/usr' "$W/root/usr/lib/pkgconfig/gmm.pc"
}
check "make install serves a program" installs
# pkg-config's flags compile and link a program with the unit that it vendors.
packaged() {
    sed 's|^prefix=.*|prefix='"$W/root/usr"'|' "$W/root/usr/lib/pkgconfig/gmm.pc" > "$W/gmm.pc" || return 1
    flags=$(PKG_CONFIG_PATH=$W pkg-config --cflags gmm) && libs=$(PKG_CONFIG_PATH=$W pkg-config --libs gmm) &&
        $CC -std=c11 $flags -o "$W/use" "$W/use.c" "$W/unit.o" $libs && "$W/use" &&
        [ "$(PKG_CONFIG_PATH=$W pkg-config --modversion gmm)" = "$(sed -n 's/^Version: //p' $UNIT_DIR/gmm.pc.in)" ]
}
if works pkg-config; then check "pkg-config serves a program" packaged
else skip "pkg-config" "not installed"; fi
# cmake_example NAME DEFINES: the example of this name in the comments of CMakeLists.txt, beside a main.c, outside of
# the tree. What CMake says is in cmake.log.
cmake_example() {
    rm -rf "$W/cmake" && mkdir -p "$W/cmake/gmm/examples" && cp $HEADERS $B/empty/gmm_kernels.cuh "$W/cmake/gmm/" &&
        cp -R examples/vendoring "$W/cmake/gmm/examples/" || return 1
    printf '#include "gmm.h"\nint main(void) { return !gmm_version_number(); }\n' > "$W/cmake/main.c"
    cp "$W/cmake/main.c" "$W/cmake/main.cpp"
    { printf 'cmake_minimum_required(VERSION 3.18)\n'
      awk -v name="$1" '/^# [A-Z]/ { on = $2 ~ "^" name ":?$"; next } !/^#   / { on = 0 } on { sub(/^#   /, ""); print }
          ' $UNIT_DIR/CMakeLists.txt; } > "$W/cmake/CMakeLists.txt"
    grep -q '^add_executable' "$W/cmake/CMakeLists.txt" || { echo "no example of this name"; return 1; }
    shift
    cmake -S "$W/cmake" -B "$W/cmake/build" -DCMAKE_C_COMPILER="$CC" -DCMAKE_BUILD_TYPE=Release \
        -DCMAKE_C_FLAGS_RELEASE=-O0 -DCMAKE_CXX_FLAGS_RELEASE=-O0 -DCMAKE_CUDA_FLAGS_RELEASE=-O0 "$@" \
        > "$W/cmake.log" 2>&1 &&
        cmake --build "$W/cmake/build" >> "$W/cmake.log" 2>&1 && "$W/cmake/build/app" ||
        { cat "$W/cmake.log"; return 1; }
}
# Without OpenMP, and without a build type, it says so.
cmake_warns() { # in the project that cmake_example has left
    cmake -S "$W/cmake" -B "$W/cmake/warns" -DCMAKE_DISABLE_FIND_PACKAGE_OpenMP=ON > "$W/cmake.log" 2>&1 &&
        grep -q 'no OpenMP: the CPU engine' "$W/cmake.log" && grep -q 'compiled with -O3, though' "$W/cmake.log"
}
# Configures the project with these settings, and looks for the words in what CMake says. Settings replace those of the
# call before; what CMake has found out about compilers stays.
cmake_says() { # WORDS SETTING...
    words=$1
    shift
    cmake -S "$W/cmake" -B "$W/cmake/says" "$@" 2>&1 | tr -s '\n ' '  ' > "$W/cmake.log"
    grep -q -- "$words" "$W/cmake.log" || { echo "no \"$words\" with $*"; cat "$W/cmake.log"; return 1; }
}
cmake_parts() {
    rm -rf "$W/cmake/says"
    for n in 0 9 -1 two ""; do cmake_says "gmm: GMM_PARTS=$n must be 1 to 8" -DGMM_PARTS="$n" || return 1; done
}
cmake_find() { # in the folder that make install has filled, and in the one that cmake --install fills
    cmake_example INSTALLED -DCMAKE_PREFIX_PATH="$W/root/usr" || return 1
    rm -rf "$W/cmake_root"
    cmake -S $UNIT_DIR -B "$W/cmake_install" && cmake --install "$W/cmake_install" --prefix "$W/cmake_root" || return 1
    cmake_example INSTALLED -DCMAKE_PREFIX_PATH="$W/cmake_root" || return 1
    sed 's/find_package(gmm 0.1 /find_package(gmm 0.2 /' "$W/cmake/CMakeLists.txt" > "$W/cmake/new" &&
        mv "$W/cmake/new" "$W/cmake/CMakeLists.txt"
    ! cmake -S "$W/cmake" -B "$W/cmake/other" -DCMAKE_PREFIX_PATH="$W/cmake_root" > /dev/null 2>&1 ||
        { echo "version 0.2 was found"; return 1; }
}
cmake_gpu() {
    cmake_example GPU -DCMAKE_CUDA_COMPILER="$(command -v ${nvcc%% *})" || return 1
    sed 's/ARCHITECTURES 90a/ARCHITECTURES 80 90/' "$W/cmake/CMakeLists.txt" > "$W/cmake/new" &&
        mv "$W/cmake/new" "$W/cmake/CMakeLists.txt"
    cmake -S "$W/cmake" -B "$W/cmake/raised" -DCMAKE_CUDA_COMPILER="$(command -v ${nvcc%% *})" > "$W/cmake.log" 2>&1 &&
        grep -q 'architecture 90 becomes 90a' "$W/cmake.log" &&
        grep -rqE 'compute_90a' "$W/cmake/raised" || { cat "$W/cmake.log"; return 1; }
    sed '/ARCHITECTURES/d' "$W/cmake/CMakeLists.txt" > "$W/cmake/new" && mv "$W/cmake/new" "$W/cmake/CMakeLists.txt"
    set -- -DCMAKE_CUDA_COMPILER="$(command -v ${nvcc%% *})"
    rm -rf "$W/cmake/says"
    for a in 75 "75-real;90a"; do
        cmake_says "gmm::impl does not compile for CMAKE_CUDA_ARCHITECTURES=$a: the kernels need 80" "$@" \
            -DCMAKE_CUDA_ARCHITECTURES="$a" || return 1
    done
    for a in 80 "86-virtual;90a"; do
        cmake_says "Generating done" "$@" -DCMAKE_CUDA_ARCHITECTURES="$a" || return 1
        ! grep "gmm::impl does not compile" "$W/cmake.log" || return 1
    done
}
if works cmake; then
    check "the CMake target of the implementation serves a program" cmake_example CPU
    # QUICK, which .ci/run sets: not what compiles the implementation once more for the wording of CMake
    [ -n "${QUICK:-}" ] || check "the CMake target warns without OpenMP, optimises without a build type" cmake_warns
    check "the CMake target refuses other numbers of units" cmake_parts
    check "the CMake target of the headers serves a program" cmake_example HEADERS
    [ -z "$compilers_cxx" ] || [ -n "${QUICK:-}" ] ||
        check "FetchContent serves a C++ program" cmake_example FETCHCONTENT
    check "find_package serves a program, of its own version" cmake_find
    if [ -z "$nvcc" ] || ! grep -q lcublasLt build/probe/cublaslt; then
        skip "the CMake target with CUDA" "no CUDA toolkit with cuBLASLt"
    else
        check "the CMake target serves a program with CUDA (empty kernels), 90 becomes 90a" cmake_gpu
    fi
else skip "the CMake targets" "cmake is not installed"; fi

# ---- Training on CPU ranks, or operands apart from the host's, is training on one and on these, bit for bit

ranks_train_alike() {
    save=
    ! grep -q lcjson $P/cjson || save=--save
    for n in 1 2 4; do
        for gtp in 0 $n; do
            $B/train_moe --quiet --svg= --steps 3 --batch 256 --micro-batches $n --layers 2 --hidden 48 --ffn 40 \
                --threads 1 --eval-tokens 512 --gtp $gtp ${save:+$save "$W/ranks$gtp"} > "$W/said$gtp" || return 1
        done
        cmp "$W/said0" "$W/said$n" || return 1
        [ -z "$save" ] || cmp "$W/ranks0" "$W/ranks$n" || return 1
    done
}
check "train_moe --gtp computes what it computes without" ranks_train_alike

check "train_moe computes on its engine what it computes on the host's operands" $MAKE test-train ARGS=

# ---- Tests that cannot fail prove nothing

injected() { # in one process, and in one of two
    for jobs in 1 2; do
        if $B/gmm_tests --jobs $jobs --inject-failure --case 'injected failure' > "$W/injected"; then
            echo "gmm_tests --jobs $jobs --inject-failure ends with 0"
            return 1
        fi
        [ "$(tail -n 1 "$W/injected")" = "0 passed, 1 failed, 0 skipped" ] || { tail -n 3 "$W/injected"; return 1; }
    done
}
check "an injected failure fails the tests" injected

# A filter of no case beside one that has some, and without a GPU an engine that is not there.
unused() {
    $B/gmm_tests --filter 'codecs named' --case 'no case has this name' 2>&1 > /dev/null |
        grep -q "no case is called 'no case has this name'" || { echo "a name of no case is accepted"; return 1; }
    [ -z "$gpu" ] || return 0
    for engine in mma wgmma; do
        $B/gmm_tests --engine $engine --filter 'codecs named' --filter 'pad 300 groups' > "$W/unused" 2>&1
        [ $? = 2 ] || { echo "--engine $engine without a GPU does not end with 2"; cat "$W/unused"; return 1; }
    done
}
check "filters of no case, and engines that are not there, fail the tests" unused

# Cases of 40 GiB beside small ones, where the memory is said to be: too little for them, enough for one of them
# alone, enough for some at a time. Alone they come last.
scarce_memory() { # MIB JOBS, and what shall be: the four alone, how many are skipped
    $B/gmm_tests --engine cpu --memory $1 --jobs $2 \
        --filter 'more than 2^31 elements' --filter 'capacity 0' --verbose > "$W/scarce" ||
        { cat "$W/scarce"; return 1; }
    awk -v last="$3" -v skipped="$4" '
        /more than 2\^31 elements/ { big++; apart += /, alone\)/ }
        /^skip .*: needs [0-9]+ bytes of host memory/ { short++ }
        /capacity 0/ && big && last { late = 1 }
        END { exit !(big == 4 && short + 0 == skipped && (last ? apart == 4 && !late : !apart)) }' "$W/scarce" ||
        { echo "--memory $1 --jobs $2"; cat "$W/scarce"; return 1; }
}
scarce() {
    scarce_memory 20480 1 0 4 && scarce_memory 102400 1 0 0 && scarce_memory 102400 2 1 0 &&
        scarce_memory 1048576 2 0 0
}
check "cases that need more memory than there is are skipped, large ones run alone" scarce

if [ -n "$nvcc" ]; then
    joined kernels
    joined compilations
fi
if [ $failures -gt 0 ]; then printf '%d header or build checks failed\n' $failures; exit 1; fi
printf 'all header and build checks passed\n'
