# gmm. `make help` lists the targets. Settings go on the command line or into Makefile.config.

MAKEFLAGS += --no-builtin-rules
.SUFFIXES:
.DELETE_ON_ERROR:

-include Makefile.config

ifeq ($(origin CC),default)
CC := gcc
endif
ifeq ($(origin CXX),default)
CXX := g++
endif
NVCC ?=
CUDA_HOME ?=
GPU ?=
NCCL_HOME ?=
# NVLink multicast stays off wherever our programs call NCCL
export NCCL_NVLS_ENABLE ?= 0
NCCL_TESTS ?=
JOBS ?= $(shell n=`getconf _NPROCESSORS_ONLN` && [ "$$n" -lt 4 ] && echo $$n || echo 4)
CONFIG ?= release
PREFIX ?= /usr/local
DESTDIR ?=
ARGS ?=
V ?=
WERROR ?=
SRC ?=
CFLAGS ?=
CXXFLAGS ?=
LDFLAGS ?=

OPT_release := -O3 -g
OPT_debug := -O0 -g
OPT_sanitize := -O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer
ifeq ($(OPT_$(CONFIG)),)
$(error CONFIG=$(CONFIG): must be debug, release or sanitize)
endif

# One folder per configuration; the release one is build/ itself.
B := build$(if $(filter-out release,$(CONFIG)),/$(CONFIG))
P := build/probe
MAKE_PROGRAM := $(MAKE)
Q := $(if $(V),,@)

WARN := -Wall -Wextra -pedantic $(if $(WERROR),-Werror)
# SRC=1 builds with headers that name the part of src/ each line comes from.
SRC_DIR := $(if $(SRC),build/src,.)
ifneq ($(SRC),)
$(shell mkdir -p $(SRC_DIR) && SRC_LINES=1 sh tests/tools/headers.sh $(SRC_DIR))
endif
INCLUDES := -I$(SRC_DIR) -I. -Itests -Iexamples/common
ALL_CFLAGS = -std=c11 $(OPT_$(CONFIG)) $(WARN) $(INCLUDES) $(CFLAGS)
ALL_CXXFLAGS = -std=c++17 $(OPT_$(CONFIG)) $(WARN) $(INCLUDES) $(CXXFLAGS)
ALL_LDFLAGS = $(if $(filter sanitize,$(CONFIG)),-fsanitize=address$(comma)undefined) $(LDFLAGS)
comma := ,

HEADERS := $(wildcard gmm*.h gmm*.cuh)
TEST_SRC := $(wildcard tests/*.c)
COMMON_SRC := $(wildcard examples/common/*.c)
EXAMPLE_SRC := $(wildcard examples/*.c)
APP_SRC := $(wildcard examples/apps/*.c)
EXAMPLE_CXX := $(wildcard examples/*.cpp)
TOOL_SRC := $(wildcard tests/tools/*.c)
C_SRC := $(TEST_SRC) $(COMMON_SRC) $(EXAMPLE_SRC) $(APP_SRC) $(TOOL_SRC) tests/bench/cpu_gemm.c

EMPTY := $(addprefix $(B)/empty/,gmm_quant.h gmm.h gmm_gtp.h gmm_kernels.cuh)

TEST_OBJ := $(TEST_SRC:%.c=$(B)/obj/%.o)
COMMON_OBJ := $(COMMON_SRC:%.c=$(B)/obj/%.o)
EXAMPLES := $(EXAMPLE_SRC:%.c=$(B)/%)
EXAMPLES_CXX := $(EXAMPLE_CXX:%.cpp=$(B)/%)

.PHONY: all run test test-files test-programs test-train examples bench bench-gtp recipes probes gpu-report sanitize \
        check headers tags checksums pairs sass-diff check-sources fuzz help install clean FORCE

##
## Targets
##   all                    the library object, tests, examples and programs (default)
all: $(B)/gmm.o $(B)/gmm_tests $(B)/train_moe $(B)/convert_checkpoint $(B)/gtp_planner $(B)/loss_curves $(EXAMPLES) \
     $(EXAMPLES_CXX)

# OpenMP threads that spin while they wait keep those they wait for from a core. Beside a busy program training took more
# than ten times as long with them; alone it takes a third less time.
run recipes test-train: export OMP_WAIT_POLICY ?= passive

##   run                    train a mixture-of-experts language model on this text; ARGS="--help" lists its flags
run: $(B)/train_moe
	$(Q)$(B)/train_moe $(ARGS)

##   test                   build and run the tests; ARGS="--list", "--filter NAME" and others go to build/gmm_tests
test: $(B)/gmm_tests
	$(Q)sh tests/tools/headers.sh --check $(B)/assembled
	$(Q)$(B)/gmm_tests --jobs $(JOBS) $(ARGS)

##   test-files             the programs' files beside Python's safetensors, with numpy (a folder with both: PYTHONPATH=)
test-files: $(B)/train_moe $(B)/convert_checkpoint $(B)/fault.so
	$(Q)python3 tests/checkpoint_files.py --build $(B) $(ARGS)

##   test-programs          train_moe stopped by signals and started from anywhere; messages and pictures of the programs
test-programs: $(B)/train_moe $(B)/gtp_planner $(B)/loss_curves
	$(Q)python3 tests/programs.py --build $(B) $(ARGS)

##   test-train             each step of train_moe on its engine, and from the same state on the CPU engine; with a GPU
##                          within bounds, else to the bit, with operands apart from the host's; ARGS="--engine mma"
test-train: $(B)/train_moe
	$(Q)status=0; for o in $(RECIPES:%="--recipe %") "--bias --interleave 8 --weights pointers" \
	"--delay-wgrad --save-policy nothing"; do echo "== $$o"; $(B)/train_moe --compare --quiet --steps 3 --aux 0.1 \
	--dropout 0.2 --eval-tokens 1024 $$o $(ARGS) || status=1; done; exit $$status

##   examples               build and run the small examples
examples: $(EXAMPLES) $(EXAMPLES_CXX)
	$(Q)set -e; for e in $^; do test -x $$e || continue; echo "== $$e"; $$e; done

##   bench                  CPU GFLOP/s beside OpenBLAS where that is installed; then, with a GPU, TFLOP/s beside cuBLAS
##                          and torch, and plots of them where there is matplotlib; ARGS="--csv", "--json" (GPU:
##                          "--json=FILE", "--rows=dsv3/512,/zipf512/", "--ms=200"; "--help" tells more)
bench: $(B)/cpu_gemm $(B)/gpu_bench.run $(P)/matplotlib
	$(Q)$(B)/cpu_gemm $(filter --csv $(CPU_ARGS),$(ARGS))
	$(Q)if test -s $(B)/gpu_bench.run; then echo; rm -f $(BENCH_JSON); \
	sh $(B)/gpu_bench.run --json=$(BENCH_JSON) $(filter-out $(CPU_ARGS),$(ARGS)) || exit 1; \
	if test -s $(P)/matplotlib && grep -q flops $(BENCH_JSON) 2>/dev/null; \
	then python3 tests/bench/plot.py $(BENCH_JSON) $(B); fi; fi
CPU_ARGS := --json --size=% --rounds=% --threads=%
BENCH_JSON := $(or $(patsubst --json=%,%,$(filter --json=%,$(ARGS))),$(B)/gpu_bench.json)

##   probes                 what this GPU's memory, launches and tensor cores do, beside what was predicted of an H200;
##                          on Hopper, what a gated epilogue in the products' kernel would give
probes: $(B)/probes $(B)/gated
	$(Q)test -s $< || { echo 'probes: no GPU'; exit 1; }
	$(Q)$<
	$(Q)test ! -s $(B)/gated || $(B)/gated
##   recipes                trains with every recipe and draws their held-out losses (build/recipes.svg); ARGS go to train_moe
RECIPES := bf16 fp8-delayed fp8-current fp8-block mxfp8 nvfp4
recipes: $(B)/train_moe $(B)/loss_curves
	$(Q)for r in $(RECIPES); do $(B)/train_moe --recipe $$r --sample 0 --svg "" $(ARGS) > $(B)/recipe.$$r.log || exit 1; done
	$(Q)$(B)/loss_curves $(B)/recipes.svg $(foreach r,$(RECIPES),$(r)=$(B)/recipe.$(r).log)

##   bench-gtp              gathers and reductions of GTP alone and beside GEMMs, on the GPUs of this host, over NCCL and
##                          peer copies, and a timeline of a step; ARGS="--shapes=dsv3 --ways=nccl,peers" and others;
##                          beside nccl-tests' programs in PATH, or in the folder NCCL_TESTS=
bench-gtp: $(B)/gtp_bench $(P)/matplotlib
	$(Q)test -s $< || { echo 'bench-gtp: no GPU, or no NCCL'; exit 1; }
	$(Q)$< --json=$(B)/gtp_bench.json $(ARGS)
	$(Q)if test -s $(P)/matplotlib; then python3 tests/bench/plot.py $(B)/gtp_bench.json $(B); fi
	$(Q)if test -n "$(NCCL_TESTS)" || command -v all_gather_perf > /dev/null; then \
	python3 tests/bench/nccl_tests.py $(B)/gtp_bench.json "$(NCCL_TESTS)"; fi

##   gpu-report             the tests and the GPU benchmark on this GPU, written to tests/results/<GPU>.txt
gpu-report: $(B)/gmm_tests $(B)/gpu_bench.run
	$(Q)B=$(B) P=$(P) CC="$(CC)" sh tests/tools/gpu_report.sh $(REPORT_ARGS) $(ARGS)
REPORT_ARGS := --ms=50 --rows=/64/,/512/,/zipf512/,dense,sm_limit,permute,act,pad

##   sanitize               GPU operations under memcheck, racecheck, initcheck and synccheck of compute-sanitizer;
##                          ARGS="memcheck" names the tools
sanitize: $(B)/gmm_tests
	$(Q)test -s $(P)/gpu || { echo 'sanitize: no GPU'; exit 1; }
	$(Q)B=$(B) sh tests/sanitize.sh $(ARGS)

##   headers                assemble the four headers from their parts in src/ (src/README.md)
headers:
	$(Q)sh tests/tools/headers.sh .

##   tags                   index of the parts, tests and examples for editors; a kernel's name leads to its instance
tags:
	$(Q)ctags --version 2> /dev/null | grep -q Universal || { echo 'tags: universal-ctags is not installed'; exit 1; }
	$(Q)ctags $(TAGS_FLAGS) -R src tests examples
# The names of kernels that are expanded from bodies stand in definitions of macros and in tables of pointers.
TAGS_FLAGS := --langmap=C:+.h.cuh.cu -I __launch_bounds__+ --kinddef-C='k,kernel,GPU kernels' \
	--regex-C='/^\#define GMM__[A-Z_]*KERNEL_NAME (gmm_[a-z0-9_]+)/\1/k/' \
	--regex-C='/^\#define GMM__ROW \((gmm_[a-z0-9_]+)/\1/k/' \
	--regex-C='/^\#define GMM__ROW \(gmm_[a-z0-9_]+, (gmm_[a-z0-9_]+)/\1/k/' \
	--regex-C='/^    \(const void \*\)(gmm_[a-z0-9_]+),?$$/\1/k/'

##   check                  header and build checks, then the tests under ASan and UBSan
check: all $(B)/checksums $(P)/nvcc $(P)/cublaslt $(EMPTY) compile_commands.json
	$(Q)CC="$(CC)" CXX="$(CXX)" CUDA_COMPILER="$$(cat $(P)/nvcc $(P)/nvcc.flags $(P)/cublaslt | tr '\n' ' ')" MAKE_PROGRAM="$(MAKE_PROGRAM)" B="$(B)" \
	sh tests/headers/check.sh
	$(Q)$(MAKE) --no-print-directory CONFIG=sanitize WERROR=1 ARGS= test

##   checksums              hashes of what every operation writes, in build/checksums.txt; BASE=FILE: beside an older one's
checksums: $(B)/checksums
	$(Q)s=0; $< $(if $(BASE),--base $(BASE)) $(ARGS) > $<.new || s=$$?; mv $<.new $<.txt; exit $$s
##   pairs                  BASE=COMMIT beside this tree on one GPU, alternating, in one process; SEED=N draws 20 of the rows
pairs: $(P)/openmp $(P)/cuda.cflags $(P)/cuda.link $(P)/cublaslt
	$(Q)B=$(B) P=$(P) CC="$(CC)" NVCC_FLAGS="$(NVCC_FLAGS)" BASE="$(BASE)" SEED="$(SEED)" sh tests/bench/pairs.sh $(ARGS)
##   sass-diff              machine code of each kernel beside BASE=COMMIT's; ARCH="sm_90a sm_80", NAMES=FILE of `old new`
sass-diff: $(P)/nvcc
	$(Q)python3 -B tests/tools/sass_diff.py --base "$(BASE)" --arch "$(or $(ARCH),sm_90a)" --names "$(NAMES)" \
	--nvcc "$$(cat $(P)/nvcc)" --flags "$$(cat $(P)/nvcc.flags)" --unit $(or $(UNIT),examples/vendoring/gmm.cu) $(ARGS)
##   check-sources          lengths, parameters, words and inline PTX of the sources against tests/tools/limits.txt
check-sources:
	$(Q)python3 -B tests/tools/check_sources.py $(ARGS)

##   fuzz                   libFuzzer on the header reader and on checkpoint plans, with clang; ARGS="-max_total_time=600"
fuzz: $(B)/fuzz_header $(B)/fuzz_plan
	$(Q)set -e; for f in header plan; do mkdir -p $(B)/corpus_$$f; \
	$(B)/fuzz_$$f -max_total_time=60 -print_final_stats=1 $(ARGS) $(B)/corpus_$$f tests/fuzz/$$f; done

##   install                headers and gmm.pc, below $(DESTDIR)$(PREFIX)
install:
	mkdir -p $(DESTDIR)$(PREFIX)/include $(DESTDIR)$(PREFIX)/lib/pkgconfig
	cp $(HEADERS) $(DESTDIR)$(PREFIX)/include/
	sed 's|@PREFIX@|$(PREFIX)|' examples/vendoring/gmm.pc.in > $(DESTDIR)$(PREFIX)/lib/pkgconfig/gmm.pc

##   compile_commands.json  what each file is compiled with, for editors
##   clean                  remove everything that was built
clean:
	$(Q)rm -rf build compile_commands.json tags

##   help                   this text
help:
	@sed -n 's/^## \{0,1\}//p' Makefile

##
## Settings (here: value and default)
##   CONFIG=release         debug and sanitize build into build/debug and build/sanitize
##   V=1                    show commands        WERROR=1  warnings are errors
##   SRC=1                  messages and debuggers name the parts in src/ instead of lines of the headers
##   CC=gcc CXX=g++         compilers            CFLAGS=, CXXFLAGS=, LDFLAGS= are added to ours
##   NVCC=, CUDA_HOME=      CUDA compiler; empty: the one in PATH or in /usr/local/cuda
##   NCCL_HOME=             folder with include/nccl.h and lib/libnccl.so; empty: where the compiler looks
##   JOBS=                  processes of the tests, each with 4 GiB of GPU memory; empty: as many as processors, to 4
##   GPU=                   sm_90a, sm_80, ...: build the CUDA engines for it; none: CPU only; empty: what is here
##   PREFIX=/usr/local      where to install     DESTDIR=  staging folder
##   What the machine has is tried once and kept in build/probe; `make clean` forgets it.

# ---- What this machine has, found by trying it. Each probe leaves compiler flags, or an empty file.

TOOLS := CC=$(CC) CXX=$(CXX) NVCC=$(NVCC) CUDA_HOME=$(CUDA_HOME) GPU=$(GPU) NCCL_HOME=$(NCCL_HOME)
FLAGS := $(CC) $(ALL_CFLAGS) | $(CXX) $(ALL_CXXFLAGS) | $(ALL_LDFLAGS)

# A file that changes with its text only, so that other settings rebuild what they concern.
ifneq ($(file <$(P)/tools),$(TOOLS))
$(P)/tools: FORCE
endif
$(P)/tools: Makefile
	@mkdir -p $(@D) && printf '%s\n' '$(TOOLS)' > $@
ifneq ($(file <$(B)/flags),$(FLAGS))
$(B)/flags: FORCE
endif
$(B)/flags:
	@mkdir -p $(@D) && printf '%s\n' '$(FLAGS)' > $@

PROBES := openmp openmp++ c++ pthread pthread.cflags cjson cjson.cflags openblas openblas.cflags nvcc cudaheaders gpu \
	cuda.cflags cublaslt nccl cuda.link cublas torch matplotlib none
$(PROBES:%=$(P)/%): $(P)/tools tests/tools/probe.sh
	@CC="$(CC)" CXX="$(CXX)" NVCC="$(NVCC)" CUDA_HOME="$(CUDA_HOME)" GPU="$(GPU)" NCCL_HOME="$(NCCL_HOME)" \
	sh tests/tools/probe.sh $(@F) $@
$(P)/pthread.cflags: $(P)/pthread
$(P)/cjson.cflags: $(P)/cjson
$(P)/openblas.cflags: $(P)/openblas
$(P)/cudaheaders $(P)/gpu $(P)/cublaslt: $(P)/nvcc
$(P)/cuda.cflags $(P)/nccl $(P)/torch $(P)/matplotlib: $(P)/gpu
$(P)/cuda.link: $(P)/gpu $(P)/cublaslt $(P)/nccl
$(P)/cublas: $(P)/cuda.link
$(P)/nvcc.flags: $(P)/nvcc
	@:
$(P)/nccl.cflags: $(P)/nccl
	@:

# The sanitized build holds the CPU engine alone.
CUDA_CFLAGS := $(if $(filter sanitize,$(CONFIG)),$(P)/none,$(P)/cuda.cflags)
NCCL_CFLAGS := $(if $(filter sanitize,$(CONFIG)),$(P)/none,$(P)/nccl.cflags)
CUDA_LINK := $(if $(filter sanitize,$(CONFIG)),$(P)/none,$(P)/cuda.link)
RESPONSES := $(P)/openmp $(P)/pthread $(P)/pthread.cflags $(P)/cjson.cflags $(P)/openblas.cflags $(P)/cudaheaders \
	$(CUDA_CFLAGS) $(NCCL_CFLAGS)
C_RESPONSES := $(RESPONSES:%=@%)

# ---- Rules

say = @printf '  %-5s  %s\n' $(1) $(2)

# The library: with the CUDA engines where there is a GPU, and cuBLASLt where the toolkit has it.
NVCC_FLAGS := -std=c++17 -O3 -lineinfo -Xcompiler=-Wall,-Wextra,-fPIC
NVCC_COMPILE := P=$(P) NVCC_FLAGS="$(NVCC_FLAGS)" sh tests/tools/nvcc.sh
$(B)/gmm.o: examples/vendoring/gmm.c examples/vendoring/gmm.cu $(B)/flags $(RESPONSES) $(CUDA_LINK)
	@if test -s $(CUDA_LINK); then echo "  NVCC   $(word 2,$^) for $$(cat $(P)/gpu)"; else echo '  CC     $<'; fi
	$(Q)mkdir -p $(@D)
	$(Q)if test -s $(CUDA_LINK); then $(NVCC_COMPILE) $@ $(word 2,$^) -I$(SRC_DIR) -I. -MMD -MP -MF $(@:.o=.d); \
	else $(CC) $(ALL_CFLAGS) $(C_RESPONSES) -MMD -MP -c -o $@ $<; fi

$(B)/obj/%.o: %.c $(B)/flags $(RESPONSES)
	$(call say,CC,$<)
	$(Q)mkdir -p $(@D)
	$(Q)$(CC) $(ALL_CFLAGS) $(C_RESPONSES) -MMD -MP -c -o $@ $<

# System calls that fail, kill or stop a program under test, for the tests of files.
$(B)/fault.so: tests/fault/fault.c $(B)/flags
	$(call say,CC,$<)
	$(Q)mkdir -p $(@D)
	$(Q)$(CC) -std=c11 -O1 $(WARN) -fPIC -shared -o $@ $<

LINK_C = $(Q)mkdir -p $(@D) && $(CC) $(ALL_LDFLAGS) -o $@ $(filter %.o,$^) @$(P)/openmp @$(P)/pthread @$(CUDA_LINK)
$(B)/gmm_tests: $(TEST_OBJ) $(B)/obj/examples/common/safetensors.o $(B)/obj/examples/common/files.o $(B)/gmm.o $(P)/cjson
	$(call say,LINK,$@)
	$(LINK_C) @$(P)/cjson -lm
$(B)/train_moe $(B)/convert_checkpoint $(B)/gtp_planner $(B)/loss_curves: $(B)/%: $(B)/obj/examples/apps/%.o $(COMMON_OBJ) $(B)/gmm.o $(P)/cjson
	$(call say,LINK,$@)
	$(LINK_C) @$(P)/cjson -lm
$(B)/cpu_gemm: $(B)/obj/tests/bench/cpu_gemm.o $(B)/gmm.o $(P)/openblas
	$(call say,LINK,$@)
	$(LINK_C) @$(P)/openblas -lm
$(B)/checksums: $(TOOL_SRC:%.c=$(B)/obj/%.o) $(B)/obj/tests/device.o $(B)/gmm.o
	$(call say,LINK,$@)
	$(LINK_C) -lm
# Programs for GPUs, or empty files where the machine lacks what they need. gpu_bench.run is the command that runs the
# benchmark: a program, or with torch a library that peers.py loads.
GPU_PROGRAM = $(Q)B=$(B) P=$(P) CC="$(CC)" LDFLAGS="$(LDFLAGS)" NVCC_FLAGS="$(NVCC_FLAGS)" sh tests/bench/build.sh $(@F) $@
$(B)/gpu_bench.run: tests/bench/gpu_bench.cu tests/bench/peers.py $(B)/gmm.o $(P)/cublas $(P)/torch
	$(GPU_PROGRAM)
$(B)/probes: tests/bench/probes.cu $(CUDA_LINK)
	$(GPU_PROGRAM)
$(B)/gtp_bench: tests/bench/gtp_bench.cu $(B)/gmm.o $(P)/nccl
	$(GPU_PROGRAM)
# gated has a kernel that the library does not have: its body from the header itself, all other kernels empty.
$(B)/gated: tests/bench/gated.cu tests/bench/gated_kernel.cu tests/bench/gated.h $(EMPTY) $(B)/gmm.o $(P)/gpu
	$(GPU_PROGRAM)
$(B)/empty/%.h: %.h
	@mkdir -p $(@D) && cp $< $@
$(B)/empty/gmm_kernels.cuh: gmm_kernels.cuh tests/bench/empty.awk
	@mkdir -p $(@D) && awk -f tests/bench/empty.awk $< > $@
$(EXAMPLES): $(B)/%: $(B)/obj/%.o $(B)/gmm.o
	$(call say,LINK,$@)
	$(LINK_C) -lm

# A C++ example holds the implementation itself. Without a C++ compiler the target is a file that does not run.
$(EXAMPLES_CXX): $(B)/%: %.cpp $(B)/flags $(P)/c++ $(P)/openmp++
	$(Q)mkdir -p $(@D)
	@if test -s $(P)/c++; then printf '  %-5s  %s\n' CXX $<; else echo '  skip   $<: no C++ compiler'; : > $@; fi
	$(Q)if test -s $(P)/c++; then \
	$(CXX) $(ALL_CXXFLAGS) @$(P)/openmp++ -MMD -MP -MF $@.d $(ALL_LDFLAGS) -o $@ $< -lm; fi

FUZZ_FLAGS := -std=c11 -O1 -g $(WARN) -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all $(INCLUDES)
$(B)/fuzz_%: $(HEADERS) tests/fuzz/fuzz.c tests/fuzz/target.h examples/common/safetensors.c examples/vendoring/gmm.c $(P)/cjson
	$(call say,FUZZ,$@)
	$(Q)mkdir -p $(@D)
	$(Q)clang $(FUZZ_FLAGS) @$(P)/cjson.cflags -DFUZZ=fuzz_$* -o $@ $(filter %.c,$^) @$(P)/cjson -lm

# The flags of our own rules; responses are written out.
compile_commands.json: Makefile $(B)/flags $(RESPONSES) $(P)/openmp++
	@C='$(CC) $(ALL_CFLAGS)'" $$(cat $(RESPONSES) | tr '\n' ' ')" CXX='$(CXX) $(ALL_CXXFLAGS)'" $$(cat $(P)/openmp++)" \
	sh tests/tools/compile_commands.sh examples/vendoring/gmm.c $(C_SRC) $(EXAMPLE_CXX) > $@
	$(call say,JSON,$@)

-include $(wildcard $(B)/*.d $(B)/obj/*/*.d $(B)/obj/*/*/*.d $(B)/examples/*.d)
