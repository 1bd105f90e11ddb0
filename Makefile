# gmm. `make help` lists the targets. Settings go on the command line or into Makefile.config.
.SUFFIXES:
.DELETE_ON_ERROR:
-include Makefile.config
CC := $(if $(filter default undefined,$(origin CC)),gcc,$(CC))
CXX := $(if $(filter default undefined,$(origin CXX)),g++,$(CXX))
PROCESSORS := $(shell getconf _NPROCESSORS_ONLN)
JOBS ?= $(shell echo $$(($(PROCESSORS) < 4 ? $(PROCESSORS) : 4)))
CONFIG ?= release
PREFIX ?= /usr/local
# NVLink multicast stays off wherever our programs call NCCL
export NCCL_NVLS_ENABLE ?= 0
# Without -j one job per processor, and several targets one after another; a make that another one runs takes its jobs.
PARALLEL := $(if $(filter 0,$(MAKELEVEL)$(filter -j%,$(MAKEFLAGS))$(word 2,$(MAKECMDGOALS))),-j$(PROCESSORS))
MAKEFLAGS += --no-builtin-rules $(PARALLEL)
OPT_release := -O3 -g
OPT_debug := -O0 -g
OPT_sanitize := -O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer
OPT_thread := -O1 -g -fsanitize=thread -fno-omit-frame-pointer
OPT_coverage := -O1 -g --coverage -fno-inline
OPT_emulated := -O2 -g
$(if $(OPT_$(CONFIG)),,$(error CONFIG=$(CONFIG): must be debug, release, sanitize, thread, coverage or emulated))
# One folder per configuration; the release one is build/ itself.
B := build$(if $(filter-out release,$(CONFIG)),/$(CONFIG))
P := build/probe
MAKE_PROGRAM := $(MAKE)
Q := $(if $(V),,@)
say = @printf '  %-5s  %s\n' $(1) $(2) && mkdir -p $(@D)
WARN := -Wall -Wextra -pedantic $(if $(WERROR),-Werror)
# SRC=1 builds with headers that name the part of src/ each line comes from.
SRC_DIR := $(if $(SRC),build/src,.)
$(if $(SRC),$(shell SRC_LINES=1 sh tests/tools/headers.sh $(SRC_DIR)))
INCLUDES := -I$(SRC_DIR) -I. -Itests -Iexamples/common
ALL_CFLAGS = -std=c11 $(OPT_$(CONFIG)) $(WARN) $(INCLUDES) $(CFLAGS)
ALL_CXXFLAGS = -std=c++17 $(OPT_$(CONFIG)) $(WARN) $(INCLUDES) $(CXXFLAGS)
ALL_LDFLAGS = $(filter -fsanitize=% --coverage,$(OPT_$(CONFIG))) $(LDFLAGS)
NVCC_FLAGS := -std=c++17 -O3 -lineinfo -Xcompiler=-Wall,-Wextra,-fPIC
HEADERS := $(wildcard gmm*.h gmm*.cuh)
objects = $(patsubst %.c,$(B)/obj/%.o,$(wildcard $(1)))
EXAMPLES := $(patsubst %.c,$(B)/%,$(wildcard examples/*.c))
EXAMPLES_CXX := $(patsubst %.cpp,$(B)/%,$(wildcard examples/*.cpp))
APPS := $(addprefix $(B)/,train_moe convert_checkpoint gtp_planner loss_curves)
C_SRC := $(wildcard tests/*.c examples/*.c examples/*/*.c tests/tools/*.c tests/bench/cpu_gemm.c)
RECIPES := bf16 fp8-delayed fp8-current fp8-block mxfp8 nvfp4
export B P CC CXX NVCC CUDA_HOME GPU NCCL_HOME NCCL_TESTS NVCC_FLAGS LDFLAGS PARTS RECIPES BASE SEED

.PHONY: all run test test-files test-programs test-train examples bench bench-compile bench-gtp bench-shapes recipes ncu \
        probes gpu-report sanitize check docs headers tags checksums pairs sass-diff check-sources fuzz soak coverage help \
        install clean FORCE
##
## Targets
##   all                    the library object, tests, examples and programs (default)
all: $(B)/gmm.o $(B)/gmm_tests $(APPS) $(EXAMPLES) $(EXAMPLES_CXX)
# OpenMP threads that spin while they wait keep those they wait for from a core. Beside a busy program training took
# more than ten times as long with them; alone it takes a third less time.
run recipes test-train soak: export OMP_WAIT_POLICY ?= passive
##   run                    train a mixture-of-experts language model on this text; ARGS="--help" lists its flags
run: $(B)/train_moe
	$(Q)$(B)/train_moe $(ARGS)
##   test                   build and run the tests; ARGS="--list", "--filter NAME" and others go to build/gmm_tests
test: $(B)/gmm_tests
	$(Q)sh tests/tools/headers.sh --check $(B)/assembled && $(B)/gmm_tests --jobs $(JOBS) $(ARGS)
##   test-files             the programs' files beside Python's safetensors and numpy (a folder with both: PYTHONPATH=)
test-files: $(B)/train_moe $(B)/convert_checkpoint $(B)/fault.so
	$(Q)python3 tests/checkpoint_files.py --build $(B) $(ARGS)
##   test-programs          what train_moe learns by every recipe, stopped and resumed; messages, pictures of programs
test-programs: $(B)/train_moe $(B)/gtp_planner $(B)/loss_curves
	$(Q)python3 tests/programs.py --build $(B) $(ARGS)
##   test-train             each step of train_moe on its engine, and from the same state on the CPU engine; on a GPU
##                          within bounds, else to the bit, with operands apart from the host's; ARGS="--engine mma"
test-train: $(B)/train_moe
	$(Q)sh tests/tools/test_train.sh $(ARGS)
##   examples               build and run the small examples
examples: $(EXAMPLES) $(EXAMPLES_CXX)
	$(Q)set -e; for e in $^; do test -x $$e || continue; echo "== $$e"; $$e; done
##   bench                  CPU GFLOP/s beside OpenBLAS; with a GPU TFLOP/s beside cuBLAS and torch, plots, MLP recipes;
##                          ARGS="--csv", "--json" (GPU: "--json=FILE", "--rows=dsv3/512,/zipf512/", "--rows=mlp")
bench: $(B)/cpu_gemm $(B)/gpu_bench.run $(B)/mlp_bench.run $(B)/layer_bench $(P)/matplotlib
	$(Q)sh tests/bench/bench.sh cpu $(ARGS)
##   bench-compile          seconds, memory and bytes of compiling the headers; ARGS='--units "cpu; sm_90a, 8 parts"'
bench-compile: $(P)/nvcc
	$(Q)python3 -B tests/tools/bench_compile.py --nvcc "$$(cat $<)" --flags="$$(cat $<.flags)" --cc "$(CC)" $(ARGS)
##   bench-gtp              gathers and reductions of GTP alone and beside GEMMs, over NCCL and peer copies, beside
##                          nccl-tests in PATH or NCCL_TESTS=; ARGS="--shapes=dsv3 --ways=nccl,peers" and others
bench-gtp: $(B)/gtp_bench $(P)/matplotlib
	$(Q)sh tests/bench/bench.sh gtp $(ARGS)
##   ncu                    Nsight Compute on the kernel K=NAME (see gmm_describe) in gpu_bench; ARGS="--rows=dsv3/512"
ncu: $(B)/gpu_bench.run
	$(Q)K="$(K)" sh tests/tools/ncu.sh $(ARGS)
##   bench-shapes           products of random shapes beside cuBLAS, and those where gmm is slow; ARGS="--seconds=120"
bench-shapes: $(B)/shapes
	$(Q)test -s $< || { echo 'bench-shapes: no GPU, or no cuBLAS'; exit 1; }; $< $(ARGS)
##   probes                 what this GPU's memory, launches and tensor cores do, beside predictions; joined activations
probes: $(B)/probes $(B)/joined
	$(Q)test -s $< || { echo 'probes: no GPU'; exit 1; }; $< && { test ! -s $(B)/joined || { $(B)/joined && $(B)/joined --fp8; }; }
##   recipes                train with every recipe, draw their held-out losses (build/recipes.svg); ARGS: of train_moe
recipes: $(B)/train_moe $(B)/loss_curves
	$(Q)sh tests/tools/recipes.sh $(ARGS)
##   gpu-report             the tests and the GPU benchmark on this GPU, written to tests/results/<GPU>.txt
gpu-report: $(B)/gmm_tests $(B)/gpu_bench.run
	$(Q)sh tests/tools/gpu_report.sh --ms=50 --rows=/64/,/512/,/zipf512/,dense,sm_limit,permute,act,pad $(ARGS)
##   sanitize               GPU operations under all tools of compute-sanitizer; ARGS="memcheck" names some
sanitize: $(B)/gmm_tests
	$(Q)test -s $(P)/gpu || { echo 'sanitize: no GPU'; exit 1; }; sh tests/sanitize.sh $(ARGS)
##   docs                   the headers' contracts as a reference, by Doxygen, in build/docs/html
docs:
	$(Q)sh tests/tools/docs.sh
##   headers                assemble the four headers from their parts in src/ (src/README.md)
headers:
	$(Q)sh tests/tools/headers.sh . && $(DECLARE)
##   tags                   index of the parts, tests and examples for editors; a kernel's name leads to its instance
tags:
	$(Q)sh tests/tools/tags.sh
##   check                  header and build checks, meanwhile the tests under ASan and UBSan
check: all $(B)/checksums $(P)/nvcc $(P)/cublaslt $(B)/empty.made compile_commands.json
	$(Q)mkdir -p $(B)/sanitize; s=0; export MAKEFLAGS='-- $(MAKEOVERRIDES)' MAKE_PROGRAM="$(MAKE_PROGRAM)"; \
	$$MAKE_PROGRAM -j$(PROCESSORS) CONFIG=sanitize WERROR=1 ARGS= test > $(B)/sanitize/log 2>&1 & tests=$$!; \
	sh tests/headers/check.sh || s=1; wait $$tests || s=1; cat $(B)/sanitize/log; exit $$s
##   checksums              hashes of what every operation writes, in build/checksums.txt; BASE=FILE: beside older ones
checksums: $(B)/checksums
	$(Q)s=0; $< $(if $(BASE),--base $(BASE)) $(ARGS) > $<.new || s=$$?; mv $<.new $<.txt; exit $$s
##   pairs                  BASE=COMMIT beside this tree on one GPU, alternating, in one process; SEED=N draws 20 rows
pairs: $(P)/openmp $(P)/pthread.cflags $(P)/cuda.cflags $(P)/cuda.link
	$(Q)sh tests/bench/pairs.sh $(ARGS)
##   sass-diff              machine code of kernels beside BASE=COMMIT's; ARCH="sm_90a sm_80", NAMES=FILE of `old new`
sass-diff: $(P)/nvcc
	$(Q)python3 -B tests/tools/sass_diff.py --base "$(BASE)" --arch "$(or $(ARCH),sm_90a)" --names "$(NAMES)" \
	--nvcc "$$(cat $(P)/nvcc)" --flags="$$(cat $(P)/nvcc.flags)" --unit $(UNIT).cu $(ARGS)
##   check-sources          what needs no compiler: lengths, words, columns, figures and links; seconds before a commit
check-sources:
	$(Q)python3 -B tests/tools/check_sources.py $(ARGS) && sh tests/headers/text.sh
##   fuzz                   libFuzzer on file headers, checkpoint and GTP plans, with clang; ARGS="-max_total_time=600"
fuzz: $(addprefix $(B)/fuzz_,header plan gtp)
	$(Q)sh tests/tools/fuzz.sh $^ $(ARGS)
##   soak                   random operations in 8 threads beside references, MINUTES=10 long; SEED=N draws others;
##                          ARGS="--engine wgmma", "--soak-threads 2"; a failure prints what repeats it alone
soak: $(B)/gmm_tests
	$(Q)$< --arena 1024 --seed $(or $(SEED),1) --soak $$((60 * $(or $(MINUTES),10))) $(ARGS)
##   coverage               lines of the CPU engine and host code that the tests run, by part; build/coverage.txt
coverage:
	$(Q)MAKE="$(MAKE)" sh tests/tools/coverage.sh $(ARGS)
##   install                headers, gmm.pc and the CMake package, below $(DESTDIR)$(PREFIX)
install:
	$(Q)sh tests/tools/install.sh "$(DESTDIR)" "$(PREFIX)"
##   compile_commands.json  what each file is compiled with, for editors
##   clean                  remove everything that was built
clean:
	$(Q)rm -rf build compile_commands.json tags
##   help                   this text
help:
	@sed -n 's/^## \{0,1\}//p' Makefile
##
## Settings (here: value and default)
##   CONFIG=release         debug, sanitize, thread (TSan), coverage, emulated (tests/emulator): in build/debug, ...
##   V=1                    show commands        WERROR=1  warnings are errors
##   SRC=1                  messages and debuggers name the parts in src/ instead of lines of the headers
##   CC=gcc CXX=g++         compilers            CFLAGS=, CXXFLAGS=, LDFLAGS= are added to ours
##   NVCC=, CUDA_HOME=      CUDA compiler; empty: the one in PATH or in /usr/local/cuda
##   NCCL_HOME=             folder with include/nccl.h and lib/libnccl.so; empty: where the compiler looks
##   PARTS=                 units that the library is compiled as; empty: for a GPU one per processor, to 8, else 1
##   JOBS=                  processes of the tests, each with 4 GiB of GPU memory; empty: as many as processors, to 4
##   GPU=                   sm_90a, sm_80, ...: build the CUDA engines for it; none: CPU only; empty: what is here
##   PREFIX=/usr/local      where to install     DESTDIR=  staging folder
##   What the machine has is tried once and kept in build/probe; `make clean` forgets it.

# ---- What this machine has, found by trying it. Each probe leaves compiler flags, or an empty file.

TOOLS := CC=$(CC) CXX=$(CXX) NVCC=$(NVCC) CUDA_HOME=$(CUDA_HOME) GPU=$(GPU) NCCL_HOME=$(NCCL_HOME)
FLAGS := $(CC) $(ALL_CFLAGS) | $(CXX) $(ALL_CXXFLAGS) | $(ALL_LDFLAGS) | $(PARTS)
# Files that change with their texts only, so that other settings rebuild what they concern.
stale = $(if $(subst :$(file <$(1)),,:$(2)),FORCE)
$(P)/tools: $(call stale,$(P)/tools,$(TOOLS))
	@mkdir -p $(@D) && printf '%s\n' '$(TOOLS)' > $@
$(B)/flags: $(call stale,$(B)/flags,$(FLAGS))
	@mkdir -p $(@D) && printf '%s\n' '$(FLAGS)' > $@
# In the order of their dependencies. The last two take seconds, and benchmarks alone ask for them.
PROBES := none.link none.cflags openmp openmp++ c++ pthread pthread.cflags cjson cjson.cflags openblas openblas.cflags \
	nvcc cudaheaders emulated.cflags emulated.link gpu cuda.cflags cublaslt nccl cuda.link cublas
$(P)/found: $(P)/tools tests/tools/probe.sh
	@sh tests/tools/probe.sh $@ $(PROBES)
$(addprefix $(P)/,$(PROBES) nccl.cflags): $(P)/found ;
$(P)/torch $(P)/matplotlib: $(P)/found
	@sh tests/tools/probe.sh $@ $(@F)
# These builds hold the CPU engine alone; the emulated one runs the GPU engines' kernels on the CPU.
CUDA := $(or $(filter $(CONFIG),emulated),$(if $(filter sanitize thread coverage,$(CONFIG)),none,cuda nccl))
# TSan does not know how gcc's OpenMP orders threads.
OPENMP := $(if $(filter thread,$(CONFIG)),none.cflags,openmp)
CUDA_LINK := $(P)/$(firstword $(patsubst %,%.link,$(CUDA)))
RESPONSES := $(addprefix $(P)/,$(OPENMP) pthread $(addsuffix .cflags,pthread cjson openblas $(CUDA)) cudaheaders)

# ---- Rules

# The library: with the CUDA engines where there is a GPU, and cuBLASLt where the toolkit has it.
UNIT := examples/vendoring/gmm
$(B)/gmm.o: $(UNIT).c $(UNIT).cu tests/tools/parts.sh $(B)/flags $(RESPONSES) $(CUDA_LINK)
	$(Q)if test $(CONFIG) = emulated; then sh tests/emulator/build.sh $@; elif test -s $(CUDA_LINK); then \
	sh tests/tools/parts.sh $@ $(UNIT).cu sh tests/tools/nvcc.sh -I$(SRC_DIR) -I.; \
	else sh tests/tools/parts.sh $@ $(UNIT).c $(CC) $(ALL_CFLAGS) $(RESPONSES:%=@%); fi

# Units that define GMM_IMPLEMENTATION read the headers; their copy need not be fast. Others read declarations alone,
# which are written when a make begins and their text has changed: an edit of the implementation leaves these objects.
DECLARE = sh tests/tools/declarations.sh $(B)/declarations $(addprefix $(SRC_DIR)/,gmm_quant.h gmm.h gmm_gtp.h)
$(if $(filter-out help install clean headers,$(or $(MAKECMDGOALS),all)),$(shell $(DECLARE)))
WHOLE := $(call objects,$(shell grep -l '^.define GMM_IMPLEMENTATION' $(C_SRC)))
$(B)/obj/%.o: %.c $(B)/flags $(RESPONSES)
	$(call say,CC,$<)
	$(Q)$(CC) $(if $(filter $@,$(WHOLE)),$(ALL_CFLAGS:-O3=-O1),-I$(B)/declarations $(ALL_CFLAGS)) $(RESPONSES:%=@%) \
	-MMD -MP -c -o $@ $<

# System calls that fail, kill or stop a program under test, for the tests of files.
$(B)/fault.so: tests/fault/fault.c $(B)/flags
	$(call say,CC,$<)
	$(Q)$(CC) -std=c11 -O1 $(WARN) -fPIC -shared -o $@ $<

# The prerequisites say what a program is linked from.
LINKED := $(B)/gmm_tests $(B)/cpu_gemm $(B)/checksums $(APPS) $(EXAMPLES)
WRAP_gmm_tests := -Wl,--wrap=malloc,--wrap=calloc,--wrap=realloc,--wrap=free# tests/test_allocations.c
$(B)/gmm_tests: $(call objects,tests/*.c examples/common/*.c) $(P)/cjson
$(APPS): $(B)/%: $(B)/obj/examples/apps/%.o $(call objects,examples/common/*.c) $(P)/cjson
$(B)/cpu_gemm: $(call objects,tests/bench/cpu_gemm.c) $(P)/openblas
$(B)/checksums: $(call objects,tests/tools/*.c tests/device.c)
$(EXAMPLES): $(B)/%: $(B)/obj/%.o
$(LINKED): $(B)/gmm.o $(P)/$(OPENMP) $(P)/pthread $(CUDA_LINK)
	$(call say,LINK,$@)
	$(Q)$(CC) $(ALL_LDFLAGS) $(WRAP_$(@F)) -o $@ $(filter %.o,$^) $(addprefix @,$(filter $(P)/%,$^)) -lm

# Programs for GPUs, or empty files where the machine lacks what they need. *.run hold the command of a benchmark.
$(addprefix $(B)/,gpu_bench.run mlp_bench.run): $(B)/gmm.o $(P)/cublas $(P)/torch $(wildcard tests/bench/*_bench.cu)
$(B)/probes: tests/bench/probes.cu $(CUDA_LINK)
$(B)/gtp_bench: tests/bench/gtp_bench.cu $(B)/gmm.o $(P)/nccl
$(B)/joined $(B)/layer_bench: $(B)/%: tests/bench/%.cu $(B)/gmm.o $(P)/gpu
$(B)/shapes: tests/bench/shapes.cu $(B)/gmm.o $(P)/cublas
$(addprefix $(B)/,gpu_bench.run mlp_bench.run layer_bench probes gtp_bench joined shapes): tests/bench/build.sh
	$(Q)sh tests/bench/build.sh $(@F) $@
$(B)/empty.made: tests/bench/empty.awk $(HEADERS)
	@mkdir -p $(B)/empty && cp gmm*.h $(B)/empty && awk -f $< gmm_kernels.cuh > $(B)/empty/gmm_kernels.cuh && touch $@

# A C++ example holds an implementation, which need not be fast. Without a C++ compiler the target does not run.
$(EXAMPLES_CXX): $(B)/%: %.cpp $(B)/flags $(P)/c++ $(P)/openmp++
	$(call say,CXX,$<)
	$(Q)if test ! -s $(P)/c++; then echo '  skip   $<: no C++ compiler'; : > $@; else \
	$(CXX) $(ALL_CXXFLAGS:-O3=-O1) @$(P)/openmp++ -MMD -MP -MF $@.d $(ALL_LDFLAGS) -o $@ $< -lm; fi

FUZZ_FLAGS := -std=c11 -O1 -g $(WARN) -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all $(INCLUDES)
$(B)/fuzz_%: tests/fuzz/fuzz.c examples/common/safetensors.c $(UNIT).c $(HEADERS) $(wildcard tests/fuzz/*.h) $(P)/cjson
	$(call say,FUZZ,$@)
	$(Q)clang $(FUZZ_FLAGS) @$(P)/cjson.cflags -DFUZZ=fuzz_$* -o $@ $(filter %.c,$^) @$(P)/cjson -lm

compile_commands.json: Makefile $(B)/flags $(RESPONSES) $(P)/openmp++
	@C='$(CC) $(ALL_CFLAGS)' RESPONSES='$(RESPONSES)' CXX='$(CXX) $(ALL_CXXFLAGS)'" $$(cat $(P)/openmp++)" \
	sh tests/tools/compile_commands.sh $(C_SRC) $(wildcard examples/*.cpp) > $@

-include $(wildcard $(B)/*.d $(B)/obj/*/*.d $(B)/obj/*/*/*.d $(B)/examples/*.d)
