/* train_moe.c - trains a byte-level language model with mixture-of-experts layers, every product computed by gmm.
 * SPDX-License-Identifier: MIT
 *
 * The embeddings of the last k bytes, side by side, enter a linear layer (one group). Then come blocks
 *     h += unpermute(experts(permute(norm(h))))       with top-k routing of norm(h)
 * and norm, output layer, softmax. Weights are fp32 masters with a copy in the compute dtype; gradients accumulate in
 * fp32 main_grad over micro-batches; AdamW with gradient clipping, warm-up and cosine decay.
 *
 * With --recipe the experts' products are quantized: the weights once a step, into a cache that all its micro-batches
 * read, and x and FC2's input in forward, which saves them as backward multiplies them.
 *
 * With --gtp N the weights of experts and linear layers, their gradients and moments are sharded over N ranks, a thread
 * each, on as many GPUs (by peer copies) or on the CPU; with --processes a process each, which share GPUs where there
 * are fewer. The hooks of the experts' MLP acquire a weight right before the product that reads it, and reduce a
 * gradient as soon as it is complete. Every rank takes its share of the micro-batches; with as many of these as ranks,
 * the result is that of one rank to the bit.
 *
 * Ctrl-C or SIGTERM ends training behind the step under way: it is saved, and the command that continues is printed.
 *
 *     train_moe --help
 *
 * CONTENTS
 *     1  Options        4  Ranks                 7  Layers on gmm                10  Checkpoints
 *     2  Text           5  Parameters, AdamW     8  The model                    11  Reports
 *     3  Memory         6  Layers on the host    9  Evaluation, sample, bigram   12  main
 */
#ifndef _POSIX_C_SOURCE
#define _POSIX_C_SOURCE 200809L
#endif
#ifndef _DEFAULT_SOURCE
#define _DEFAULT_SOURCE 1 /* MAP_ANONYMOUS */
#endif
#ifdef HAVE_CUDA
#include <cuda_runtime.h>
#endif
#include <dirent.h>
#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>
#ifdef _OPENMP
#include <omp.h>
#define PARALLEL_FOR _Pragma("omp parallel for schedule(static)")
#else
#define PARALLEL_FOR
#endif

#ifdef GMM_WITH_CPU_RANKS
#include <pthread.h>
#include <sys/mman.h>
#endif

#include "gmm.h"
#include "gmm_gtp.h"
#include "../common/files.h"
#include "../common/options.h"
#include "../common/processes.h"
#include "../common/program.h"
#include "../common/progress.h"
#include "../common/resume.h"
#include "../common/safetensors.h"
#include "../common/svg.h"

enum { BYTES = 256 }; /* the vocabulary */

/* -------------------------------------------------------------------------------------------------- 1 Options --- */

static struct settings {
    int64_t context, embed, hidden, ffn, layers, experts, topk, interleave, normalize, bias;
    int64_t seed, steps, batch, micro_batches, stop_at, save_every, eval_tokens, sample, threads;
    int64_t delay_wgrad, weight_cache, preact_e4m3, report_every, gtp, processes, compare, quiet, help;
    const char *act, *score, *dtype, *recipe, *backward, *engine, *weights, *save_policy;
    const char *data, *save, *resume, *keys, *svg;
    double aux, lr, dropout;
} opt;

#define RECIPE_CHOICES "bf16|fp8-delayed|fp8-current|fp8-block|mxfp8|nvfp4"
#define ACT_CHOICE(kind, value, text, gate, gated, alpha, betas) #text "|"
/* An MLP has an activation: all of the list but "none", which opens it. */
#define ACT_CHOICES &(GMM_ACT_LIST(ACT_CHOICE) "gpt-oss|kimi-situ|nemotron")[sizeof "none|" - 1]

/* The third column: options that are recorded in checkpoints, and what a resumed run makes of them (resume.h). Those
   that the first checkpoints had not are optional. */
enum { FIXED = RESUME_FIXED, FREE = RESUME_FREE, OPTIONAL = RESUME_OPTIONAL };
static option options[] = {
    {"data", OPTION_TEXT, 0, &opt.data, "", 0, 0, "", "text to learn; default: the sources of gmm's repository", 0},
    {"seed", OPTION_INTEGER, FIXED, &opt.seed, "1", 0, 4e15, "", "of the initial weights and the batches", 0},
    {"steps", OPTION_INTEGER, FREE, &opt.steps, "700", 1, 1e9, "",
     "optimizer steps; the learning rate decays over them", 0},
    {"stop-at", OPTION_INTEGER, 0, &opt.stop_at, "0", 0, 1e9, "", "stop after this step; 0 = at the last", 0},
    {"batch", OPTION_INTEGER, FIXED, &opt.batch, "1024", 1, 1e7, "", "tokens of a step", 0},
    {"micro-batches", OPTION_INTEGER, FREE, &opt.micro_batches, "2", 1, 1e6, "",
     "parts of a batch; gradients add up", 0},
    {"context", OPTION_INTEGER, FIXED, &opt.context, "16", 1, 4096, "", "bytes that a prediction sees", 0},
    {"embed", OPTION_INTEGER, FIXED, &opt.embed, "24", 1, 4096, "", "values of a byte's embedding", 0},
    {"hidden", OPTION_INTEGER, FIXED, &opt.hidden, "128", 1, 65536, "", "width of the residual stream", 0},
    {"ffn", OPTION_INTEGER, FIXED, &opt.ffn, "192", 1, 65536, "", "width inside an expert", 0},
    {"layers", OPTION_INTEGER, FIXED, &opt.layers, "2", 0, 1000, "", "mixture-of-experts blocks", 0},
    {"experts", OPTION_INTEGER, FIXED, &opt.experts, "8", 1, 4096, "", "experts of a block", 0},
    {"topk", OPTION_INTEGER, FIXED, &opt.topk, "2", 1, 4096, "", "experts of a token", 0},
    {"act", OPTION_CHOICE, FIXED, &opt.act, "swiglu", 0, 0, ACT_CHOICES, "activation; the last three name models", 0},
    {"bias", OPTION_SWITCH, FIXED, &opt.bias, "0", 0, 1, "", "experts have biases", 0},
    {"score", OPTION_CHOICE, FIXED, &opt.score, "softmax", 0, 0, "softmax|sigmoid", "router's score", 0},
    {"normalize", OPTION_INTEGER, FIXED, &opt.normalize, "1", 0, 1, "", "1: a token's probabilities add up to one", 0},
    {"aux", OPTION_REAL, FIXED, &opt.aux, "0.01", 0, 1e6, "", "coefficient of the load-balancing loss", 0},
    {"lr", OPTION_REAL, FIXED, &opt.lr, "0.003", 0, 10, "", "peak learning rate", 0},
    {"dropout", OPTION_REAL, FIXED | OPTIONAL, &opt.dropout, "0", 0, 0.9, "",
     "share of the seen bytes that training hides, in steps of 1/256", 0},
    {"dtype", OPTION_CHOICE, FIXED, &opt.dtype, "bf16", 0, 0, "bf16|f16|f32", "weights and activations in products", 0},
    {"recipe", OPTION_CHOICE, FREE | OPTIONAL, &opt.recipe, "bf16", 0, 0, RECIPE_CHOICES,
     "the experts' products; bf16: as --dtype says", 0},
    {"backward", OPTION_CHOICE, FREE | OPTIONAL, &opt.backward, "recipe", 0, 0, "recipe|high-precision|dequantized",
     "what the experts' backward multiplies", 0},
    {"preact-e4m3", OPTION_SWITCH, FREE | OPTIONAL, &opt.preact_e4m3, "0", 0, 1, "",
     "FC1's output is saved as E4M3", 0},
    {"engine", OPTION_CHOICE, 0, &opt.engine, "auto", 0, 0, "auto|cpu|mma|wgmma|cublaslt", "gmm's engine", 0},
    {"threads", OPTION_INTEGER, 0, &opt.threads, "0", 0, 4096, "", "CPU threads; 0 = all", 0},
    {"weights", OPTION_CHOICE, 0, &opt.weights, "packed", 0, 0, "packed|pointers", "experts in one block, or one each",
     0},
    {"interleave", OPTION_INTEGER, 0, &opt.interleave, "0", 0, 65536, "", "gate and up rows in blocks; 0 = halves",
     0},
    {"save-policy", OPTION_CHOICE, 0, &opt.save_policy, "auto", 0, 0, "auto|preact|act|nothing|quantized",
     "for backward; auto: quantized as by --recipe, else preact", 0},
    {"weight-cache", OPTION_INTEGER, 0, &opt.weight_cache, "1", 0, 1, "", "1: --recipe casts weights once a step", 0},
    {"delay-wgrad", OPTION_SWITCH, 0, &opt.delay_wgrad, "0", 0, 1, "", "queue the experts' weight gradients", 0},
    {"gtp", OPTION_INTEGER, 0, &opt.gtp, "0", 0, 64, "", "shard weights over so many GPUs, or CPU ranks; 0 = none", 0},
    {"processes", OPTION_SWITCH, 0, &opt.processes, "0", 0, 1, "", "--gtp on GPUs: processes, which may share them", 0},
    {"save", OPTION_TEXT, 0, &opt.save, "", 0, 0, "", "checkpoint (safetensors) of the end, or of a stop", 0},
    {"save-every", OPTION_INTEGER, 0, &opt.save_every, "0", 0, 1e9, "", "and after every so many steps", 0},
    {"resume", OPTION_TEXT, 0, &opt.resume, "", 0, 0, "", "continue from a checkpoint", 0},
    {"keys", OPTION_CHOICE, 0, &opt.keys, "indexed", 0, 0, "indexed|grouped",
     "saved experts: a tensor each, or one of all; --resume reads both", 0},
    {"report-every", OPTION_INTEGER, 0, &opt.report_every, "0", 0, 1e9, "", "steps; 0 = a twentieth of all", 0},
    {"svg", OPTION_TEXT, 0, &opt.svg, "build/train_moe.svg", 0, 0, "", "chart of losses and load; empty = none", 0},
    {"eval-tokens", OPTION_INTEGER, 0, &opt.eval_tokens, "131072", 0, 4e15, "", "held-out bytes at the end; 0 = all",
     0},
    {"sample", OPTION_INTEGER, 0, &opt.sample, "320", 0, 1e6, "", "bytes of the sample at the end", 0},
    {"compare", OPTION_SWITCH, 0, &opt.compare, "0", 0, 1, "", "each step beside the CPU engine, checked; no more", 0},
    {"quiet", OPTION_SWITCH, 0, &opt.quiet, "0", 0, 1, "", "print the last line only", 0},
    {"help", OPTION_SWITCH, 0, &opt.help, "0", 0, 1, "", "this text", 0},
};
enum { OPTIONS = sizeof options / sizeof options[0] };

static option *option_of(const void *value) {
    for (int i = 0; i < OPTIONS; i++)
        if (options[i].value == value) return &options[i];
    return NULL;
}

/* Defaults on a GPU that differ from those on the CPU. */
static const struct gpu_default { const void *value; const char *text; } gpu_defaults[] = {
    {&opt.context, "32"}, {&opt.embed, "32"},   {&opt.hidden, "256"}, {&opt.ffn, "256"},
    {&opt.layers, "3"},   {&opt.experts, "16"}, {&opt.batch, "8192"}, {&opt.dropout, "0.2"},
};
enum { GPU_DEFAULTS = sizeof gpu_defaults / sizeof gpu_defaults[0] };

static void take_gpu_defaults(void) {
    option_error error;
    for (int i = 0; i < GPU_DEFAULTS; i++) {
        const option *o = option_of(gpu_defaults[i].value);
        if (!o->given && !option_set(o, gpu_defaults[i].text, "--", &error)) die("%s", error.text);
    }
}

/* Checkpoint of a training run that is stopped without --save. */
static const char stopped_file[] = "build/train_moe.safetensors";

static void print_help(void) {
    printf("usage: train_moe [options]\nTrains a byte-level mixture-of-experts language model; every matrix product is "
           "gmm's.\nThe last tenth of the text is held out. Options (a star: --resume takes it from the checkpoint;"
           "\na plus: too, unless the command line states it):\n\n");
    options_print(options, OPTIONS);
    printf("\nOn a GPU the defaults are larger:");
    for (int i = 0; i < GPU_DEFAULTS; i++)
        printf("%s--%s %s", i % 6 ? " " : "\n  ", option_of(gpu_defaults[i].value)->name, gpu_defaults[i].text);
    printf("\n\nThe last line reads: held-out X nats/byte, bigram Y nats/byte. Y is an add-one-smoothed bigram model\n"
           "of the same training text on the same held-out bytes.\n\n"
           "Ctrl-C and SIGTERM end training behind the step under way. It is saved as --save says, else as\n"
           "%s, the command that continues is printed, and the program ends with 128 plus\n"
           "the signal's number. The same signal again ends it at once.\n\n"
           "--compare takes each step twice from one state, the second time on the CPU engine, whose operands are\n"
           "the host's, and ends with 1 where losses or gradients differ by more than rounding. With --engine cpu the\n"
           "first time has operands of its own, as on a GPU, and they may not differ at all.\n", stopped_file);
}

static gmm_dtype dtype_of(const char *name) {
    return !strcmp(name, "f32") ? GMM_F32 : !strcmp(name, "f16") ? GMM_F16 : GMM_BF16;
}

static size_t dtype_bytes(gmm_dtype dtype) { return dtype == GMM_F32 ? 4 : 2; }

static gmm_act act_of(const char *name) {
    gmm_act act = GMM_ZERO;
    if (!strcmp(name, "gpt-oss")) return gmm_act_of(GMM_ACT_PRESET_GPT_OSS);
    if (!strcmp(name, "kimi-situ")) return gmm_act_of(GMM_ACT_PRESET_KIMI_SITU);
    if (!strcmp(name, "nemotron")) return gmm_act_of(GMM_ACT_PRESET_NEMOTRON);
#define ACT_ROW(kind_, value, text, gate, gated, alpha, betas) \
    if (!strcmp(name, #text)) act.kind = kind_;
    GMM_ACT_LIST(ACT_ROW)
#undef ACT_ROW
    return act;
}

static gmm_recipe_kind recipe_of(const char *name) {
    static const char *const names[] = {"bf16", "fp8-delayed", "fp8-current", "fp8-block", "mxfp8", "nvfp4"};
    int kind = 0;
    while (strcmp(name, names[kind])) kind++; /* options.c has checked it */
    return (gmm_recipe_kind)kind;
}

static gmm_backward_override backward_of(const char *name) {
    return !strcmp(name, "high-precision") ? GMM_BACKWARD_HIGH_PRECISION
         : !strcmp(name, "dequantized") ? GMM_BACKWARD_DEQUANTIZED : GMM_BACKWARD_BY_RECIPE;
}

static gmm_engine engine_of(const char *name) {
#define ENGINE_ROW(engine, value, text) \
    if (!strcmp(name, #text)) return engine;
    GMM_ENGINE_LIST(ENGINE_ROW)
#undef ENGINE_ROW
    return GMM_ENGINE_AUTO;
}

/* ----------------------------------------------------------------------------------------------------- 2 Text --- */

typedef struct text {
    unsigned char *bytes;
    int64_t size, capacity;
    int64_t train; /* bytes of the training text; the rest is held out */
    int64_t files;
    char from[4096]; /* the file, or the folder of the files */
} text;

typedef struct paths { char **items; size_t count, capacity; } paths;

static int is_source(const char *name) {
    static const char *const endings[] = {".h", ".cuh", ".c", ".cu", ".py", ".md"};
    const char *dot = strrchr(name, '.');
    if (!strcmp(name, "Makefile")) return 1;
    for (size_t i = 0; dot && i < sizeof endings / sizeof endings[0]; i++)
        if (!strcmp(dot, endings[i])) return 1;
    return 0;
}

/* Adds the source files in root/folder and, with `below`, in its folders; names are relative to root. Hidden entries
   and folders named build, whose files depend on what was built, are left out. */
static void find_sources(const char *root, const char *folder, int below, paths *list) {
    char path[4096];
    DIR *open;
    struct dirent *entry;
    snprintf(path, sizeof path, "%s/%s", root, folder);
    open = opendir(path);
    if (!open) return;
    while ((entry = readdir(open)) != NULL) {
        size_t capacity = strlen(folder) + strlen(entry->d_name) + 2;
        struct stat about;
        char *name;
        if (entry->d_name[0] == '.') continue;
        name = (char *)get(capacity);
        snprintf(name, capacity, "%s%s%s", folder, *folder ? "/" : "", entry->d_name);
        if (snprintf(path, sizeof path, "%s/%s", root, name) >= (int)sizeof path) die("%s: the path is too long", root);
        if (lstat(path, &about)) { /* it was removed meanwhile */
            free(name);
            continue;
        }
        if (S_ISDIR(about.st_mode)) {
            if (below && strcmp(entry->d_name, "build")) find_sources(root, name, 1, list);
        } else if (S_ISREG(about.st_mode) && is_source(entry->d_name)) {
            if (list->count == list->capacity) {
                list->capacity = list->capacity * 2 + 64;
                list->items = (char **)realloc(list->items, list->capacity * sizeof *list->items);
                if (!list->items) die("out of memory");
            }
            list->items[list->count++] = name;
            continue;
        }
        free(name);
    }
    closedir(open);
}

/* Shortens `folder` to the nearest folder that is gmm's repository: itself or one above it. 0 = there is none. */
static int find_repository(char folder[4096]) {
    static const char *const marks[] = {"gmm.h", "gmm_gtp.h", "Makefile", "examples/apps/train_moe.c"};
    enum { MARKS = sizeof marks / sizeof marks[0] };
    while (*folder) {
        char path[4200];
        struct stat about;
        char *slash;
        int found = 0;
        for (int i = 0; i < MARKS; i++) {
            snprintf(path, sizeof path, "%s/%s", folder, marks[i]);
            found += stat(path, &about) == 0 && S_ISREG(about.st_mode);
        }
        if (found == MARKS) return 1;
        slash = strrchr(folder, '/');
        if (!slash) return 0;
        *slash = 0;
    }
    return 0;
}

/* The folder of the repository's text: above this program, or above the working directory. */
static void repository(const char *program, char folder[4096]) {
    const ssize_t n = readlink("/proc/self/exe", folder, 4095);
    char *real = n < 0 && strchr(program, '/') ? realpath(program, NULL) : NULL;
    folder[n < 0 ? 0 : n] = 0;
    if (real) snprintf(folder, 4096, "%s", real);
    free(real);
    if (find_repository(folder)) return;
    if (getcwd(folder, 4096) && find_repository(folder)) return;
    die("no text to learn: --data FILE names one. Without it train_moe learns the sources of gmm's repository, but no "
        "folder above the program or the working directory holds gmm.h, gmm_gtp.h, Makefile and "
        "examples/apps/train_moe.c");
}

static void append_file(text *t, const char *path) {
    FILE *in = fopen(path, "rb");
    size_t n;
    if (!in) die("cannot open %s: %s", path, strerror(errno));
    do {
        if (t->capacity - t->size < 65536) {
            t->capacity = t->capacity * 2 + (1 << 20);
            t->bytes = (unsigned char *)realloc(t->bytes, (size_t)t->capacity);
            if (!t->bytes) die("out of memory");
        }
        n = fread(t->bytes + t->size, 1, 65536, in);
        t->size += (int64_t)n;
    } while (n > 0);
    if (ferror(in)) die("cannot read %s: %s", path, strerror(errno));
    fclose(in);
    t->files++;
}

static int compare_paths(const void *a, const void *b) {
    return strcmp(*(char *const *)a, *(char *const *)b);
}

static text read_text(const char *program) {
    static const struct { const char *folder; int below; } parts[] = {{"", 0}, {"examples", 1}, {"tests", 1}};
    text t;
    memset(&t, 0, sizeof t);
    if (*opt.data) {
        append_file(&t, opt.data);
        snprintf(t.from, sizeof t.from, "%s", opt.data);
    } else {
        paths list = {NULL, 0, 0};
        repository(program, t.from);
        for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++)
            find_sources(t.from, parts[i].folder, parts[i].below, &list);
        if (list.count) qsort(list.items, list.count, sizeof *list.items, compare_paths);
        for (size_t i = 0; i < list.count; i++) {
            char path[8200];
            snprintf(path, sizeof path, "%s/%s", t.from, list.items[i]);
            append_file(&t, path);
            free(list.items[i]);
        }
        free(list.items);
    }
    t.train = t.size - t.size / 10;
    return t;
}

static uint64_t hash_text(const text *t) {
    return hash_bytes(HASH_BEGIN, t->bytes, (size_t)t->size);
}

/* --------------------------------------------------------------------------------------------------- 3 Memory --- */

/* The memory space of gmm's operands. Host code reads and writes them only through the host side of a buffer. */
typedef struct memory {
    gmm_space space;
    int on_host; /* 1: host code may use the addresses as they are */
    void *(*alloc)(size_t bytes); /* 256-byte aligned; NULL if there is none */
    void *(*alloc_host)(size_t bytes); /* the host side of an operand, zeroed; NULL if there is none */
    void (*release)(void *address);
    void (*upload)(void *to, const void *from, size_t bytes);
    void (*download)(void *to, const void *from, size_t bytes);
    void (*zero)(void *address, size_t bytes);
} memory;

static void *cpu_alloc(size_t bytes) { return aligned_alloc(256, (bytes + 255) / 256 * 256); }
static void cpu_copy(void *to, const void *from, size_t bytes) { memcpy(to, from, bytes); }
static void cpu_zero(void *address, size_t bytes) { memset(address, 0, bytes); }
static const memory cpu_memory = {GMM_SPACE_CPU, 1, cpu_alloc, get, free, cpu_copy, cpu_copy, cpu_zero};
/* CPU memory with separate host sides, as on a GPU. */
static const memory cpu_memory_apart = {GMM_SPACE_CPU, 0, cpu_alloc, get, free, cpu_copy, cpu_copy, cpu_zero};

#ifdef HAVE_CUDA
static void cuda_check(cudaError_t e) {
    if (e != cudaSuccess) die("CUDA: %s", cudaGetErrorString(e));
}
static void *cuda_alloc(size_t bytes) {
    void *p = NULL;
    return cudaMalloc(&p, bytes) == cudaSuccess ? p : NULL;
}
static void *cuda_alloc_host(size_t bytes) { /* page-locked memory, for copies at full PCIe bandwidth */
    void *p = NULL;
    if (cudaMallocHost(&p, bytes) != cudaSuccess) return NULL;
    return memset(p, 0, bytes);
}
static void cuda_release(void *address) { cuda_check(cudaFree(address)); }
static _Thread_local gmm_gtp *polled_gtp; /* runtime object whose collectives are polled while the rank waits */
/* Waits for the enqueued work by polling: a blocking CUDA call would keep other threads from enqueuing the work that it
   waits for. If a rank is gone, the program ends; the last poll tells whether the collectives succeeded. */
static void cuda_wait(void) {
    const struct timespec pause = {0, 20000};
    cudaError_t e = cudaErrorNotReady;
    while (polled_gtp && e == cudaErrorNotReady) {
        gmm_status s;
        e = cudaStreamQuery(NULL);
        s = gmm_gtp_poll(polled_gtp);
        if (s) die("%s: %s", gmm_status_name(s), gmm_gtp_last_error(polled_gtp));
        if (e == cudaErrorNotReady) (void)nanosleep(&pause, NULL);
    }
    if (polled_gtp) cuda_check(e);
}
static void cuda_upload(void *to, const void *from, size_t bytes) {
    cuda_wait();
    cuda_check(cudaMemcpy(to, from, bytes, cudaMemcpyHostToDevice));
}
static void cuda_download(void *to, const void *from, size_t bytes) {
    cuda_wait();
    cuda_check(cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToHost));
}
static void cuda_zero(void *address, size_t bytes) { cuda_check(cudaMemset(address, 0, bytes)); }
static const memory cuda_memory = {GMM_SPACE_CUDA, 0, cuda_alloc, cuda_alloc_host, cuda_release, cuda_upload,
                                   cuda_download, cuda_zero};
#endif

/* The memory of an engine's operands; `auto` takes a GPU if this build and this machine have one. */
static memory memory_of(gmm_engine engine) {
    memory m = cpu_memory;
#ifdef HAVE_CUDA
    int devices = 0;
    if (engine == GMM_ENGINE_AUTO && (cudaGetDeviceCount(&devices) != cudaSuccess || !devices)) return m;
    if (engine != GMM_ENGINE_CPU) m = cuda_memory;
#endif
    /* so that creating the context reports why there is none */
    if (engine != GMM_ENGINE_AUTO && engine != GMM_ENGINE_CPU) m.space = GMM_SPACE_CUDA;
    return m;
}

static int gpu_count(void) {
    int devices = 0;
#ifdef HAVE_CUDA
    if (cudaGetDeviceCount(&devices) != cudaSuccess) devices = 0;
#endif
    return devices;
}

/* An operand: `at` is what gmm gets, `host` what host code uses; on the CPU both are the same address. */
typedef struct buffer { void *at, *host; size_t bytes; } buffer;

typedef enum sides { AT_ONLY, BOTH } sides;

static buffer buffer_make(const memory *mem, size_t bytes, sides wanted) {
    buffer b;
    b.bytes = bytes ? bytes : 256;
    b.at = mem->alloc(b.bytes);
    if (!b.at) die("out of memory (%zu bytes)", b.bytes);
    mem->zero(b.at, b.bytes);
    b.host = mem->on_host ? b.at : wanted == BOTH ? mem->alloc_host(b.bytes) : NULL;
    if (!b.host && wanted == BOTH) die("out of page-locked memory (%zu bytes)", b.bytes);
    return b;
}

static void buffer_push(const memory *mem, const buffer *b) {
    if (!mem->on_host) mem->upload(b->at, b->host, b->bytes);
}

static void buffer_pull(const memory *mem, const buffer *b) {
    if (!mem->on_host) mem->download(b->host, b->at, b->bytes);
}

static float *floats(const buffer *b) { return (float *)b->host; }

/* ----------------------------------------------------------------------------------------------------- 4 Ranks --- */

/* Barrier and exchange buffer of ranks that are processes, in shared memory. */
typedef struct rendezvous rendezvous;

/* After so long a rank gives the others up: they share the processors, and one may evaluate or save for long. */
enum { RANK_TIMEOUT_MS = 600000 };

/* State that all ranks share. */
typedef struct rank_group {
    gmm_ranks *ranks;
    rendezvous *rendezvous;        /* NULL = ranks are threads */
    int size, gpus;          /* gpus: rank i computes on GPU i % gpus, and gathers and reduces by peer copies; 0: CPU */
    gmm_comm gather[64], reduce[64], control[64]; /* [rank]; control: for the program's own exchanges on the host */
} rank_group;

#ifdef GMM_WITH_CPU_RANKS
enum { RENDEZVOUS_BYTES = 1 << 20 };
struct rendezvous {
    pthread_barrier_t barrier;
    char bytes[64][RENDEZVOUS_BYTES];
};
static void rendezvous_gather(rendezvous *r, int size, int rank, const char *from, char *out, size_t bytes) {
    for (size_t at = 0; at < bytes; at += RENDEZVOUS_BYTES) {
        const size_t n = bytes - at < RENDEZVOUS_BYTES ? bytes - at : RENDEZVOUS_BYTES;
        memcpy(r->bytes[rank], from + at, n);
        (void)pthread_barrier_wait(&r->barrier);
        for (int i = 0; i < size; i++) memcpy(out + (size_t)i * bytes + at, r->bytes[i], n);
        (void)pthread_barrier_wait(&r->barrier);
    }
}

/* Forks a process per rank and returns the rank in each; the calling process ends when all have. */
static int rendezvous_begin(int size, rendezvous **out) {
    pthread_barrierattr_t a;
    int rank, code = 1;
    rendezvous *r = (rendezvous *)mmap(NULL, sizeof *r, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (r == MAP_FAILED || pthread_barrierattr_init(&a) || pthread_barrierattr_setpshared(&a, PTHREAD_PROCESS_SHARED) ||
        pthread_barrier_init(&r->barrier, &a, (unsigned)size))
        die("--processes: no shared memory");
    *out = r;
    fflush(stdout);
    rank = processes_begin(size, &code);
    if (rank == -2) die("--processes: %s", strerror(errno));
    if (rank < 0) exit(code);
    return rank;
}
#else
static void rendezvous_gather(rendezvous *r, int size, int rank, const char *from, char *out, size_t bytes) {
    (void)r, (void)size, (void)rank, (void)from, (void)out, (void)bytes;
}
#endif

static rank_group rank_group_make(int size, int gpus, rendezvous *own_rendezvous) {
    gmm_ranks_config config = GMM_ZERO;
    gmm_error error = GMM_ZERO;
    int32_t all[64];
    rank_group group;
    memset(&group, 0, sizeof group);
    group.size = size;
    group.gpus = gpus;
    for (int i = 0; i < size; i++) all[i] = i;
    config.ranks = size;
    config.timeout_ms = RANK_TIMEOUT_MS;
    if (own_rendezvous) {
        group.rendezvous = own_rendezvous;
        return group;
    }
    if (gmm_ranks_create(&config, &group.ranks, &error)) die("--gtp: %s", error.text);
    if (gmm_ranks_comms(group.ranks, all, size, group.control) ||
        (!gpus && gmm_ranks_comms(group.ranks, all, size, group.gather)) ||
        (!gpus && gmm_ranks_comms(group.ranks, all, size, group.reduce)))
        die("--gtp: no memory for communicators");
    return group;
}

/* All-gather on the host: out [size][bytes]. */
static void rank_group_gather(const rank_group *group, int rank, const void *from, void *out, size_t bytes) {
    const gmm_comm *c = &group->control[rank];
    if (group->rendezvous)
        rendezvous_gather(group->rendezvous, group->size, rank, (const char *)from, (char *)out, bytes);
    else if (c->all_gather(c->self, from, out, bytes, NULL))
        die("rank %d: %s", rank, gmm_ranks_error(group->ranks, rank));
}
/* Sums over ranks, in rank order. */
static void rank_group_sum_floats(const rank_group *group, int rank, float *x, int64_t n) {
    float *all = (float *)get((size_t)(n * group->size) * sizeof *all);
    rank_group_gather(group, rank, x, all, (size_t)n * sizeof *x);
    for (int64_t i = 0; i < n; i++) {
        x[i] = all[i];
        for (int r = 1; r < group->size; r++) x[i] += all[r * n + i];
    }
    free(all);
}
static void rank_group_sum(const rank_group *group, int rank, double *x, int64_t n) {
    double *all = (double *)get((size_t)(n * group->size) * sizeof *all);
    rank_group_gather(group, rank, x, all, (size_t)n * sizeof *x);
    for (int64_t i = 0; i < n; i++) {
        x[i] = all[i];
        for (int r = 1; r < group->size; r++) x[i] += all[r * n + i];
    }
    free(all);
}

/* ----------------------------------------------------------------------------------------- 5 Parameters, AdamW --- */

/* splitmix64: its whole state is one integer, which checkpoints keep. */
static uint64_t random_next(uint64_t *state) {
    uint64_t z = *state += 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

static double random_unit(uint64_t *state) { return (double)(random_next(state) >> 11) * 0x1p-53; }

/* A parameter: `count` matrices of rows x cols, one per expert, or one. Masters, moments and checkpoints hold FC1's
   gate rows before its up rows; interleaving is applied only to the copies that gmm computes with. */
typedef struct param {
    char name[96];
    int count, indexed;      /* indexed: the matrices' names end with their index */
    int packed;              /* the matrices are in one allocation */
    int decay, sharded;
    int interleaved;         /* the copies that gmm computes with are other buffers than *_halves, with other rows */
    int opens;               /* this is the rank's first micro-batch of a step */
    int gated;               /* FC1's weight or bias with gate rows before up rows */
    int by_host; /* the host accumulates the gradient in host memory; otherwise gmm does, in its own memory */
    int64_t rows, cols;
    int64_t row0, held;      /* rows of each matrix that this rank holds, with padding; all rows unless sharded */
    int64_t block;           /* sharded FC1: interleave block of its gate and up rows; 0 = gate rows first */
    int32_t bundle, *ids;    /* sharded: its ids in the GTP runtime */
    int acquired;            /* the views that are held, a bit for each pass */
    gmm_mat columnwise;      /* weights_announce: w.columnwise */
    int64_t columnwise_ld;
    const gmm_format *format;/* format of a shard that is held quantized; NULL = not quantized */
    const float *scale;      /* delayed scaling: [count] quantization scales, and where amaxes are recorded */
    float *amax;
    gmm_dtype dtype;         /* of weight; grad is fp32 */
    float *master, *first, *second;
    buffer *weight, *grad;                 /* [count], in gmm's layout */
    buffer *weight_halves, *grad_halves;   /* the same buffers unless interleaved */
    gmm_mat w, g, w_halves, g_halves;
    gmm_grad dw;
} param;

struct model;
typedef struct layer {
    struct model *model;
    gmm_grad_hooks hooks;        /* sharded weights: gathered before they are read, gradients reduced when complete */
    param *norm, *router, *w1, *b1, *w2, *b2;
    float *h, *inverse_rms;      /* input of the block, and 1 / rms of its rows */
    buffer normed, logits, indices, probs, counts, aux, row_of, slot_of, sizes, rows, row_probs, y, out, saved;
    buffer drows, deferred;
    int backward;                /* hooks: the call under way is a backward */
    buffer scale, history, random; /* recipe: [GMM_SLOTS][experts], [length] of the same, two states */
    buffer weight_cache;           /* recipe: quantized weights, for all micro-batches of a step */
} layer;

typedef struct model {
    memory mem;
    gmm_context *ctx;
    gmm_engine engine;        /* engine that serves the experts; without layers, the output layer */
    char place[160];          /* gmm's description of the device */
    buffer workspace;
    gmm_dtype dtype;
    gmm_mlp_config mlp;
    gmm_recipe recipe;        /* kind NONE: products without quantization */
    int64_t tokens;           /* capacity: of a micro-batch */
    param **params;
    int param_count, param_capacity;
    param *embedding, *input_w, *input_b, *final_norm, *head_w, *head_b;
    layer *layers;
    buffer one_group, dloss; /* split of linears without experts; gradient of the auxiliary loss */
    buffer weights_cached;   /* word: 0 = the step's first micro-batch, whose forward fills the weight caches */
    buffer rows;             /* experts' input, of one block after another, where backward reads a quantized copy */
    buffer x0, h0, dx0, normed, logits, dlogits;
    buffer dh, dh_low, dn, dexpert, drow_probs, dprobs, drouter;
    float *h, *inverse_rms;   /* after the last block */
    double *losses;
    double grad_norm;         /* of the last step's mean gradient, before clipping */
    unsigned char *hide;      /* [tokens][context] 1: the byte is hidden from the micro-batch (dropout) */
    gmm_wgrad_entry *entries;
    gmm_wgrad_queue queue;
    int64_t step;
    uint64_t random;
    const rank_group *rank_group;         /* NULL = one rank, nothing sharded */
    int rank, ranks;
    gmm_context *gtp_ctx;     /* CPU ranks: context of the runtime's sums, which run on any rank's thread */
    gmm_comm peers[2];        /* GPUs: for gathers and reductions */
    gmm_gtp *gtp;
} model;

/* The first `tokens` rows of a buffer of m->tokens rows. */
static buffer rows_of(const model *m, const buffer *b, int64_t tokens) {
    buffer rows = *b;
    rows.bytes = b->bytes / (size_t)m->tokens * (size_t)tokens;
    return rows;
}
static void rows_push(const model *m, const buffer *b, int64_t tokens) {
    buffer rows = rows_of(m, b, tokens);
    buffer_push(&m->mem, &rows);
}
static void rows_pull(const model *m, const buffer *b, int64_t tokens) {
    buffer rows = rows_of(m, b, tokens);
    buffer_pull(&m->mem, &rows);
}

static void check(const model *m, gmm_status status) {
    if (status) die("%s: %s", gmm_status_name(status), gmm_last_error(m->ctx));
}

/* For ranks that are threads with a GPU each: a barrier after which no GPU has work. Allocating and freeing device
   memory waits for every GPU of the process, one of which might wait for a rank that waits for this one. */
static void pause_ranks(const model *m) {
#ifdef HAVE_CUDA
    char mine = 0, all[64];
    if (!m->rank_group || !m->rank_group->gpus || m->rank_group->rendezvous) return;
    cuda_check(cudaDeviceSynchronize());
    rank_group_gather(m->rank_group, m->rank, &mine, all, 1);
#else
    (void)m;
#endif
}

/* Grows the workspace if a call needs more; on all ranks at once, since they compute the same shapes. */
static void need_workspace(model *m, size_t bytes) {
    if (bytes <= m->workspace.bytes) return;
    pause_ranks(m);
    m->mem.release(m->workspace.at);
    m->workspace = buffer_make(&m->mem, bytes, AT_ONLY);
    pause_ranks(m);
}

/* Asks what a call needs, and makes it: `query` and `run` are gmm's functions of the operation `op`. */
#define RUN(m, query, op, run, call) do { \
    gmm_info info_ = GMM_ZERO; \
    check(m, query((m)->ctx, op, call, &info_)); \
    need_workspace(m, info_.workspace_bytes); \
    check(m, run((m)->ctx, call, (m)->workspace.at, (m)->workspace.bytes, NULL)); \
} while (0)

/* [count] buffers: parts of one allocation, or each one of its own. */
static buffer *parts_make(const memory *mem, int count, size_t bytes, int packed) {
    buffer *parts = (buffer *)get((size_t)count * sizeof *parts), whole;
    if (packed) {
        whole = buffer_make(mem, bytes * (size_t)count, BOTH);
        for (int i = 0; i < count; i++) {
            parts[i].at = (char *)whole.at + (size_t)i * bytes;
            parts[i].host = (char *)whole.host + (size_t)i * bytes;
            parts[i].bytes = bytes;
        }
    } else {
        for (int i = 0; i < count; i++) parts[i] = buffer_make(mem, bytes, BOTH);
    }
    return parts;
}

/* Copies between device and host sides of [count] buffers: one allocation at once, or each alone. */
static void parts_copy(const memory *mem, const buffer *parts, int count, int packed,
                       void (*copy)(const memory *, const buffer *)) {
    buffer whole = parts[0];
    whole.bytes *= (size_t)count;
    if (packed) copy(mem, &whole);
    for (int i = 0; i < count && !packed; i++) copy(mem, &parts[i]);
}

static gmm_mat parts_mat(const buffer *parts, int count, gmm_dtype dtype, int packed) {
    void **table;
    if (packed) return gmm_mat_packed(dtype, parts[0].at);
    table = (void **)get((size_t)count * sizeof *table);
    for (int i = 0; i < count; i++) table[i] = parts[i].at;
    return gmm_mat_table(dtype, table, GMM_MAT_TABLE_ON_HOST);
}

static gmm_shard shard_of(const model *m, const param *p) {
    gmm_shard s = GMM_ZERO;
    s.dtype = p->dtype;
    s.rows = p->rows;
    s.cols = p->cols;
    s.gtp_size = m->ranks;
    s.gtp_rank = m->rank;
    if (p->format) s.unit = gmm_gtp_unit(p->format->scaling);
    return s;
}

/* Of `rows` rows, gate rows before up rows, the place of row `row` where blocks of both alternate; block 0: they do
   not, and there may be a single row. */
static int64_t blocked_row(int64_t rows, int64_t block, int64_t row) {
    const int64_t half = rows / 2, in = block ? row % half : 0;
    return block ? in / block * 2 * block + row / half * block + in % block : row;
}
/* Row of a shard's matrix that holds row `row` of the whole matrix, which has FC1's gate rows first; and the
   inverse. */
static int64_t held_row(const param *p, int64_t row) { return blocked_row(p->rows, p->block, row); }
static int64_t logical_row(const param *p, int64_t row) {
    const int64_t in = p->block ? row % (2 * p->block) : 0;
    return p->block ? in / p->block * (p->rows / 2) + row / (2 * p->block) * p->block + in % p->block : row;
}

/* Adds a parameter with uniform random values of the given mean and standard deviation; GTP shards large matrices.
   Shards are drawn as parts of the whole matrix, so that values do not depend on the number of ranks. Shards of experts
   are held and gathered as the recipe quantizes weights. */
enum { ON_HOST, REPLICATED, SHARDED, EXPERTS_FC1, EXPERTS_FC2 };
static param *param_add(model *m, const char *name, int count, int indexed, int64_t rows, int64_t cols,
                        gmm_dtype dtype, double mean, double deviation, int kind) {
    param *p = (param *)get(sizeof *p);
    size_t n;
    const int packed = !indexed || !strcmp(opt.weights, "packed");
    if (m->param_count == m->param_capacity) {
        m->param_capacity = 2 * m->param_capacity + 64;
        m->params = (param **)realloc(m->params, (size_t)m->param_capacity * sizeof *m->params);
        if (!m->params) die("out of memory");
    }
    m->params[m->param_count++] = p;
    snprintf(p->name, sizeof p->name, "%s", name);
    p->count = count;
    p->indexed = indexed;
    p->packed = packed;
    p->rows = rows;
    p->cols = cols;
    p->dtype = dtype;
    p->decay = rows > 1;
    p->held = rows;
    p->by_host = kind == ON_HOST;
    p->sharded = kind >= SHARDED && m->rank_group;
    if (p->sharded && kind >= EXPERTS_FC1 && m->recipe.weight.dtype) p->format = &m->recipe.weight;
    if (p->sharded && kind == EXPERTS_FC1) p->block = m->mlp.act.interleave;
    if (p->sharded) {
        const gmm_shard shard = shard_of(m, p);
        gmm_shard_plan plan = GMM_ZERO;
        gmm_error error;
        if (gmm_gtp_plan(&shard, &plan, &error)) die("%s", error.text);
        p->row0 = plan.row0;
        p->held = plan.shard_rows;
    }
    n = (size_t)(p->held * cols);
    p->master = (float *)get((size_t)count * n * sizeof(float));
    p->first = (float *)get((size_t)count * n * sizeof(float));
    p->second = (float *)get((size_t)count * n * sizeof(float));
    if (deviation > 0 || mean != 0)
        for (int64_t i = 0; i < count * rows; i++)
            for (int64_t j = 0; j < cols; j++) {
                const int64_t row = held_row(p, i % rows) - p->row0;
                const float drawn = (float)(mean + deviation * 1.7320508 * (2 * random_unit(&m->random) - 1));
                if (row >= 0 && row < p->held) p->master[(i / rows * p->held + row) * cols + j] = drawn;
            }
    p->weight = p->weight_halves = parts_make(&m->mem, count, n * dtype_bytes(dtype), packed);
    p->grad = p->grad_halves = parts_make(&m->mem, count, n * sizeof(float), packed);
    p->w = p->w_halves = parts_mat(p->weight, count, dtype, packed);
    p->g = p->g_halves = parts_mat(p->grad, count, GMM_F32, packed);
    p->dw.main_grad = 1;
    p->dw.mat = &p->g;
    return p;
}

/* Adds a second set of buffers to FC1's weight or bias, in the order of the masters. */
static void param_interleave(model *m, param *p) {
    size_t n = (size_t)(p->rows * p->cols);
    if (m->mlp.act.interleave == 0 || p->sharded) return;
    p->interleaved = 1;
    p->weight_halves = parts_make(&m->mem, p->count, n * dtype_bytes(p->dtype), p->packed);
    p->grad_halves = parts_make(&m->mem, p->count, n * sizeof(float), p->packed);
    p->w_halves = parts_mat(p->weight_halves, p->count, p->dtype, p->packed);
    p->g_halves = parts_mat(p->grad_halves, p->count, GMM_F32, p->packed);
}

static void glu_move(model *m, const param *p, int inverse, gmm_mat src, gmm_mat dst) {
    gmm_glu glu = GMM_ZERO;
    int vector = p->rows == 1; /* a bias: its elements are interleaved like rows */
    glu.axis = GMM_GLU_ROWS;
    glu.inverse = inverse;
    glu.block = m->mlp.act.interleave;
    glu.ffn = m->mlp.ffn;
    glu.count = p->count;
    glu.cols = vector ? 1 : p->cols;
    src.group_stride = dst.group_stride = src.table ? 0 : p->rows * p->cols;
    src.ld = dst.ld = glu.cols;
    glu.src = &src;
    glu.dst = &dst;
    RUN(m, gmm_glu_query, GMM_OP_GLU_INTERLEAVE, gmm_glu_interleave, &glu);
}

static void store_row(gmm_dtype dtype, void *to, const float *from, int64_t n) {
    if (dtype == GMM_F32) memcpy(to, from, (size_t)n * sizeof(float));
    else if (dtype == GMM_BF16)
        for (int64_t i = 0; i < n; i++) ((uint16_t *)to)[i] = gmm_f32_to_bf16(from[i]);
    else
        for (int64_t i = 0; i < n; i++) ((uint16_t *)to)[i] = gmm_f32_to_f16(from[i]);
}

enum { CHUNK = 8192 }; /* values per work item: a fixed size, so that sums do not depend on the thread count */

/* Checks the status of a call of the GTP runtime. */
static void check_gtp(const model *m, gmm_status status) {
    if (status) die("rank %d: %s: %s", m->rank, gmm_status_name(status), gmm_gtp_last_error(m->gtp));
}

/* Makes a parameter's weights readable until the release; sharded ones are gathered first. */
static void weights_acquire(const model *m, param *p, gmm_gtp_pass pass) {
    gmm_gtp_view view = GMM_ZERO;
    if (!p->sharded || p->acquired >> pass & 1) return;
    check_gtp(m, gmm_gtp_acquire(m->gtp, p->bundle, pass, NULL, &view));
    p->acquired |= 1 << pass;
    p->w = view.mat;
}
/* Releases the views of all passes. */
static void weights_release(const model *m, param *p) {
    for (int pass = 0; pass < GMM_GTP_PASSES; pass++)
        if (p->acquired >> pass & 1) check_gtp(m, gmm_gtp_release(m->gtp, p->bundle, (gmm_gtp_pass)pass, NULL));
    p->acquired = 0;
}
/* Whether a backward that runs FC1 again needs a view of its own for it, since backward reads another quantized
   copy. */
static int reads_recompute_view(const param *p) { return p->format && !strcmp(opt.save_policy, "nothing"); }

/* The dtype and format of experts' weights that are gathered when a product needs them (weights_needed). */
static void weights_announce(param *p) {
    if (!p->sharded) return;
    p->w = gmm_mat_packed(p->dtype, NULL);
    if (!p->format) return;
    p->w = gmm_mat_quantized(p->format, GMM_ROWWISE, NULL, NULL, NULL);
    p->columnwise = gmm_mat_quantized(p->format, GMM_COLUMNWISE, NULL, NULL, NULL);
    p->columnwise.ld = p->columnwise_ld;
    p->w.columnwise = &p->columnwise;
}
/* Provides the buffer of dw, which is then stored and reduced. */
static void gradient_begin(model *m, param *p) {
    gmm_gtp_view view = GMM_ZERO;
    if (!p->sharded) return;
    check_gtp(m, gmm_gtp_wgrad(m->gtp, p->bundle, NULL, &view));
    p->g = view.mat;
    p->dw.overwrite = 1;
}
static void gradient_end(model *m, const param *p) {
    gmm_gtp_gradient gradient = GMM_ZERO;
    if (!p->sharded) return;
    gradient.scale = 1;
    gradient.add = p->opens ? GMM_GTP_SET : GMM_GTP_ADD;
    check_gtp(m, gmm_gtp_submit(m->gtp, p->bundle, &gradient, NULL));
}

/* gmm_mlp calls it before a product of a block reads a weight. The other weight's product has been enqueued; it is
   released, unless backward reads the same view twice, since it runs FC1 again. */
static gmm_status weights_needed(void *user, gmm_param which, gmm_op op, gmm_stream stream) {
    const layer *l = (const layer *)user;
    const int again = l->backward && op == GMM_OP_LINEAR_FWD;
    param *p = which == GMM_PARAM_W1 ? l->w1 : l->w2;
    (void)stream;
    if (which == GMM_PARAM_W1) weights_release(l->model, l->w2);
    else if (!(l->w1->acquired >> GMM_GTP_BACKWARD & 1)) weights_release(l->model, l->w1);
    weights_acquire(l->model, p, !l->backward ? GMM_GTP_FORWARD
                                 : again && reads_recompute_view(p) ? GMM_GTP_RECOMPUTE : GMM_GTP_BACKWARD);
    return GMM_OK;
}
/* gmm_mlp calls it when the gradient of a parameter is complete: the reduction runs beside what is enqueued next. */
static void gradient_ready(void *user, gmm_param which, gmm_stream stream) {
    const layer *l = (const layer *)user;
    (void)stream;
    if (which == GMM_PARAM_W1) gradient_end(l->model, l->w1);
    if (which == GMM_PARAM_W2) gradient_end(l->model, l->w2);
}

/* Rounds the masters to the weights that gmm computes with. */
static void params_publish(model *m) {
    for (int i = 0; i < m->param_count; i++) {
        param *p = m->params[i];
        int64_t n = p->held * p->cols, chunks = (n + CHUNK - 1) / CHUNK;
        PARALLEL_FOR
        for (int64_t c = 0; c < chunks * p->count; c++) {
            int64_t from = c % chunks * CHUNK;
            char *to = (char *)p->weight_halves[c / chunks].host + (size_t)from * dtype_bytes(p->dtype);
            store_row(p->dtype, to, p->master + c / chunks * n + from, n - from < CHUNK ? n - from : CHUNK);
        }
        parts_copy(&m->mem, p->weight_halves, p->count, p->packed, buffer_push);
        if (p->interleaved) glu_move(m, p, 0, p->w_halves, p->w);
        if (p->sharded && !p->format) check_gtp(m, gmm_gtp_publish(m->gtp, p->ids, p->count, NULL));
    }
}
/* Quantizes shards that are held quantized; runs after the update of delayed scales. */
static void shards_publish(model *m) {
    for (int i = 0; i < m->param_count; i++) {
        const param *p = m->params[i];
        gmm_gtp_quantization q = GMM_ZERO;
        const void **from;
        if (!p->format) continue;
        from = (const void **)get((size_t)p->count * sizeof *from);
        for (int e = 0; e < p->count; e++) from[e] = p->weight[e].at;
        q.dtype = p->dtype;
        q.from = from;
        q.scale = p->scale;
        q.amax = p->amax;
        check_gtp(m, gmm_gtp_quantize(m->gtp, p->ids, p->count, &q, NULL));
        free(from);
    }
}

static double sum_of_squares(const float *x, int64_t n) {
    double total = 0;
    for (int64_t at = 0; at < n; at += 16) {
        float part = 0;
        for (int64_t i = at; i < n && i < at + 16; i++) part += x[i] * x[i];
        total += part;
    }
    return total;
}

typedef struct adam { float rate, beta1, beta2, correct1, correct2, epsilon, decay, scale; } adam;

static void adam_chunk(adam a, int64_t n, const float *grad, float *master, float *first, float *second) {
    for (int64_t i = 0; i < n; i++) {
        float g = grad[i] * a.scale;
        first[i] += (1 - a.beta1) * (g - first[i]);
        second[i] += (1 - a.beta2) * (g * g - second[i]);
        master[i] -= a.rate * (first[i] * a.correct1 / (sqrtf(second[i] * a.correct2) + a.epsilon)
                               + a.decay * master[i]);
    }
}

/* Linear warm-up over a fiftieth of the steps, then half a cosine down to a twentieth of the peak. */
static double learning_rate(int64_t step) {
    int64_t warm = opt.steps / 50 > 10 ? opt.steps / 50 : 10;
    double at;
    if (step < warm) return opt.lr * (double)(step + 1) / (double)warm;
    at = opt.steps > warm ? (double)(step - warm) / (double)(opt.steps - warm) : 1;
    return opt.lr * (0.05 + 0.95 * 0.5 * (1 + cos(3.14159265358979 * (at > 1 ? 1 : at))));
}

/* Sum of squares of a parameter's gradient: over its rows, in row order, on whichever rank they are held. */
static double gradient_squares(const model *m, const param *p) {
    const int64_t rows = p->count * p->held;
    const int ranks = p->sharded ? m->ranks : 1;
    double *own = (double *)get((size_t)rows * sizeof *own), sum = 0, *all = own;
    PARALLEL_FOR
    for (int64_t i = 0; i < rows; i++)
        own[i] = sum_of_squares(floats(&p->grad_halves[i / p->held]) + i % p->held * p->cols, p->cols);
    if (p->sharded) {
        all = (double *)get((size_t)(rows * ranks) * sizeof *all);
        rank_group_gather(m->rank_group, m->rank, own, all, (size_t)rows * sizeof *own);
        free(own);
    }
    for (int e = 0; e < p->count; e++)
        for (int64_t row = 0; row < p->rows; row++) {
            const int64_t at = held_row(p, row);
            sum += all[at / p->held * rows + e * p->held + at % p->held];
        }
    free(all);
    return sum;
}

/* One AdamW step on gradients that are sums over the batch; the norm of their mean is clipped to 1. */
static void params_update(model *m) {
    const double beta1 = 0.9, beta2 = 0.98;
    double squares = 0, norm, t = (double)(m->step + 1);
    adam a;
    if (m->gtp) check_gtp(m, gmm_gtp_fence(m->gtp, GMM_GTP_ALL, NULL));
    for (int i = 0; i < m->param_count; i++) {
        param *p = m->params[i];
        if (p->interleaved) glu_move(m, p, 1, p->g, p->g_halves);
        if (!p->by_host) parts_copy(&m->mem, p->grad_halves, p->count, p->packed, buffer_pull);
        for (int e = 0; m->rank_group && !p->sharded && e < p->count; e++)
            rank_group_sum_floats(m->rank_group, m->rank, floats(&p->grad_halves[e]), p->rows * p->cols);
        squares += gradient_squares(m, p);
    }
    norm = m->grad_norm = sqrt(squares) / (double)opt.batch;
    a.rate = (float)learning_rate(m->step);
    a.beta1 = (float)beta1;
    a.beta2 = (float)beta2;
    a.correct1 = (float)(1 / (1 - pow(beta1, t)));
    a.correct2 = (float)(1 / (1 - pow(beta2, t)));
    a.epsilon = 1e-8f;
    a.scale = (float)((norm > 1 ? 1 / norm : 1) / (double)opt.batch);
    for (int i = 0; i < m->param_count; i++) {
        param *p = m->params[i];
        int64_t n = p->held * p->cols, chunks = (n + CHUNK - 1) / CHUNK, all = chunks * p->count;
        a.decay = p->decay ? 0.1f : 0.0f;
        PARALLEL_FOR
        for (int64_t c = 0; c < all; c++) {
            int64_t from = c % chunks * CHUNK, at = c / chunks * n + from;
            adam_chunk(a, n - from < CHUNK ? n - from : CHUNK, floats(&p->grad_halves[c / chunks]) + from,
                       p->master + at, p->first + at, p->second + at);
        }
    }
    params_publish(m);
    m->step++;
}

/* ---------------------------------------------------------------------------------------- 6 Layers on the host --- */

/* Draws the bytes that are hidden from a micro-batch. */
static void draw_dropout(model *m) {
    const unsigned limit = (unsigned)(opt.dropout * 256);
    uint64_t random = 0;
    for (int64_t i = 0; limit && i < m->tokens * opt.context; i++, random >>= 8) {
        if (i % 8 == 0) random = random_next(&m->random);
        m->hide[i] = (random & 255) < limit;
    }
}

/* Row t: the embeddings of the `context` bytes before positions[t], zeros where one is hidden. */
static void embed_forward(const model *m, const unsigned char *bytes, const int64_t *positions, int64_t tokens,
                          int train) {
    size_t row = (size_t)opt.embed * dtype_bytes(m->dtype);
    const char *table = (const char *)m->embedding->weight[0].host;
    char *x = (char *)m->x0.host;
    PARALLEL_FOR
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t j = 0; j < opt.context; j++) {
            char *to = x + (size_t)(t * opt.context + j) * row;
            if (train && m->hide[t * opt.context + j]) memset(to, 0, row);
            else memcpy(to, table + bytes[positions[t] - opt.context + j] * row, row);
        }
}

static void embed_backward(const model *m, const unsigned char *bytes, const int64_t *positions, int64_t tokens) {
    const int64_t n = BYTES * opt.embed;
    float *grad = floats(&m->embedding->grad[0]), *own = (float *)get((size_t)n * sizeof *own);
    PARALLEL_FOR
    /* threads share the vocabulary, so that each byte's sum has the order of the tokens */
    for (int share = 0; share < 32; share++)
        for (int64_t t = 0; t < tokens; t++)
            for (int64_t j = 0; j < opt.context; j++) {
                int byte = bytes[positions[t] - opt.context + j];
                const float *dx = floats(&m->dx0) + (t * opt.context + j) * opt.embed;
                float *g = own + byte * opt.embed;
                if (byte % 32 != share || m->hide[t * opt.context + j]) continue;
                for (int64_t i = 0; i < opt.embed; i++) g[i] += dx[i];
            }
    for (int64_t i = 0; i < n; i++) grad[i] += own[i]; /* one addition per micro-batch, as in gmm */
    free(own);
}

/* y = x / rms(x) * gain, in the compute dtype. */
static void norm_forward(const model *m, const float *x, const param *gain, float *inverse, const buffer *y,
                         int64_t tokens) {
    int64_t width = opt.hidden;
    PARALLEL_FOR
    for (int64_t t = 0; t < tokens; t++) {
        const float *row = x + t * width;
        float part[256];
        float inv = inverse[t] = (float)(1 / sqrt(sum_of_squares(row, width) / (double)width + 1e-6));
        for (int64_t at = 0; at < width; at += 256) {
            int64_t n = width - at < 256 ? width - at : 256;
            for (int64_t i = 0; i < n; i++) part[i] = row[at + i] * inv * gain->master[at + i];
            store_row(m->dtype, (char *)y->host + (size_t)(t * width + at) * dtype_bytes(m->dtype), part, n);
        }
    }
}

/* Stores or adds dx; adds the gain's gradient. */
static void norm_backward(const float *x, const param *gain, const float *inverse, const float *dy, float *dx, int add,
                          int64_t tokens) {
    int64_t width = opt.hidden;
    float *dgain = floats(&gain->grad[0]);
    PARALLEL_FOR
    for (int64_t t = 0; t < tokens; t++) {
        float inv = inverse[t], dot = 0;
        for (int64_t i = 0; i < width; i++) dot += dy[t * width + i] * gain->master[i] * x[t * width + i];
        dot *= inv * inv / (float)width;
        for (int64_t i = 0; i < width; i++) {
            float d = inv * (dy[t * width + i] * gain->master[i] - dot * x[t * width + i]);
            dx[t * width + i] = add ? dx[t * width + i] + d : d;
        }
    }
    PARALLEL_FOR
    for (int64_t from = 0; from < width; from += 32) {
        float own[32] = {0};
        for (int64_t t = 0; t < tokens; t++)
            for (int64_t i = from; i < width && i < from + 32; i++)
                own[i - from] += dy[t * width + i] * x[t * width + i] * inverse[t];
        for (int64_t i = from; i < width && i < from + 32; i++) dgain[i] += own[i - from];
    }
}

static void residual_add(const float *x, const float *y, float *out, int64_t n) {
    PARALLEL_FOR
    for (int64_t c = 0; c < n; c += CHUNK)
        for (int64_t i = c; i < n && i < c + CHUNK; i++) out[i] = x[i] + y[i];
}

/* Losses of all rows of logits in nats, and with `train` the gradient of their sum. */
static void cross_entropy(const model *m, const unsigned char *bytes, const int64_t *positions, int64_t tokens,
                          int train) {
    PARALLEL_FOR
    for (int64_t t = 0; t < tokens; t++) {
        const float *z = floats(&m->logits) + t * BYTES;
        int target = bytes[positions[t]];
        float top = z[0], sum = 0, grad[BYTES];
        for (int i = 1; i < BYTES; i++) top = z[i] > top ? z[i] : top;
        for (int i = 0; i < BYTES; i++) grad[i] = gmm_exp(z[i] - top);
        for (int i = 0; i < BYTES; i++) sum += grad[i];
        m->losses[t] = log((double)sum) + (double)top - (double)z[target];
        if (!train) continue;
        for (int i = 0; i < BYTES; i++) grad[i] /= sum;
        grad[target] -= 1;
        store_row(m->dtype, (char *)m->dlogits.host + (size_t)(t * BYTES) * dtype_bytes(m->dtype), grad, BYTES);
    }
}

/* --------------------------------------------------------------------------------------------- 7 Layers on gmm --- */

static gmm_mat mat(gmm_dtype dtype, const buffer *b) { return gmm_mat_packed(dtype, b->at); }

/* The single group of a linear without experts: all tokens. */
static gmm_groups whole_batch(model *m, int64_t tokens) {
    gmm_groups groups = GMM_ZERO;
    if (*(int32_t *)m->one_group.host != (int32_t)tokens) {
        *(int32_t *)m->one_group.host = (int32_t)tokens;
        buffer_push(&m->mem, &m->one_group);
    }
    groups.count = 1;
    groups.capacity = tokens;
    groups.splits = m->one_group.at;
    groups.dtype = GMM_I32;
    return groups;
}

/* What all calls of a linear layer have in common. */
static gmm_linear linear_of(const gmm_groups *groups, const param *w, const gmm_mat *x) {
    gmm_linear linear = GMM_ZERO;
    linear.groups = groups;
    linear.in_features = w->cols;
    linear.out_features = w->rows;
    linear.x = x;
    linear.w = &w->w;
    return linear;
}

/* y (fp32) = w x + b */
static void linear_forward(model *m, param *w, const param *b, const buffer *x, const buffer *y, int64_t tokens) {
    gmm_groups groups = whole_batch(m, tokens);
    gmm_mat mx = mat(m->dtype, x), my = mat(GMM_F32, y);
    gmm_linear linear = linear_of(&groups, w, &mx);
    linear.bias = b ? &b->w : NULL;
    linear.y = &my;
    weights_acquire(m, w, GMM_GTP_FORWARD);
    RUN(m, gmm_linear_query, GMM_OP_LINEAR_FWD, gmm_linear_fwd, &linear);
    weights_release(m, w);
}

/* The engine that serves linear_forward. */
static gmm_engine linear_engine(model *m, const param *w) {
    gmm_groups groups = whole_batch(m, m->tokens);
    gmm_mat x = gmm_mat_packed(m->dtype, NULL), y = gmm_mat_packed(GMM_F32, NULL);
    gmm_linear linear = linear_of(&groups, w, &x);
    gmm_info info = GMM_ZERO;
    linear.y = &y;
    check(m, gmm_linear_query(m->ctx, GMM_OP_LINEAR_FWD, &linear, &info));
    return info.engine;
}

/* dx (fp32, stored or added), dw and db from dy */
static void linear_backward(model *m, param *w, const param *b, const buffer *x, const buffer *dy,
                            const buffer *dx, int add, int64_t tokens) {
    gmm_groups groups = whole_batch(m, tokens);
    gmm_mat mx = mat(m->dtype, x), mdy = mat(m->dtype, dy), mdx = mat(GMM_F32, dx);
    gmm_linear linear = linear_of(&groups, w, &mx);
    linear.dy = &mdy;
    linear.dx = &mdx;
    linear.dw = &w->dw;
    linear.db = b ? &b->dw : NULL;
    linear.y_add = add;
    weights_acquire(m, w, GMM_GTP_BACKWARD);
    RUN(m, gmm_linear_query, GMM_OP_LINEAR_DGRAD, gmm_linear_dgrad, &linear);
    weights_release(m, w);
    gradient_begin(m, w);
    RUN(m, gmm_linear_query, GMM_OP_LINEAR_WGRAD, gmm_linear_wgrad, &linear);
    gradient_end(m, w);
    if (b) RUN(m, gmm_linear_query, GMM_OP_LINEAR_BGRAD, gmm_linear_bgrad, &linear);
}

static int saves_copies(const model *m) {
    return m->mlp.save == GMM_SAVE_QUANTIZED || m->mlp.save == GMM_SAVE_QUANTIZED_E4M3;
}

/* The descriptors of one block's calls, and the operands they point to. */
typedef struct moe_call {
    gmm_mat logits, dlogits, normed, rows, y, out, dout, drows, dexpert, dn;
    gmm_groups groups;
    gmm_route route;
    gmm_permute permute;
    gmm_mlp mlp;
    gmm_mlp_quant quant;
} moe_call;

static void moe_describe(model *m, layer *l, moe_call *c, int64_t tokens, int train) {
    int64_t capacity = tokens * opt.topk;
    memset(c, 0, sizeof *c);
    c->logits = mat(GMM_F32, &l->logits);
    c->dlogits = mat(m->dtype, &m->drouter);
    c->normed = mat(m->dtype, &l->normed);
    c->rows = mat(m->dtype, &l->rows);
    c->y = mat(m->dtype, &l->y);
    c->out = mat(GMM_F32, &l->out);
    c->dout = mat(GMM_F32, &m->dh);
    c->drows = mat(m->dtype, &l->drows);
    c->dexpert = mat(m->dtype, &m->dexpert);
    c->dn = mat(GMM_F32, &m->dn);

    c->route.experts = (int32_t)opt.experts;
    c->route.tokens = tokens;
    c->route.topk = (int32_t)opt.topk;
    c->route.score = !strcmp(opt.score, "sigmoid") ? GMM_SCORE_SIGMOID : GMM_SCORE_SOFTMAX;
    c->route.normalize = (int32_t)opt.normalize;
    c->route.logits = &c->logits;
    c->route.indices = (int32_t *)l->indices.at;
    c->route.probs = (float *)l->probs.at;
    c->route.counts = (int32_t *)l->counts.at;
    c->route.aux_coeff = (float)opt.aux;
    c->route.aux_loss = (float *)l->aux.at;
    c->route.dprobs = (const float *)m->dprobs.at;
    c->route.dloss = (const float *)m->dloss.at;
    c->route.dlogits = &c->dlogits;

    c->permute.experts = (int32_t)opt.experts;
    c->permute.tokens = tokens;
    c->permute.capacity = capacity;
    c->permute.hidden = opt.hidden;
    c->permute.topk = (int32_t)opt.topk;
    c->permute.indices = (const int32_t *)l->indices.at;
    c->permute.row_of = (int32_t *)l->row_of.at;
    c->permute.slot_of = (int32_t *)l->slot_of.at;
    c->permute.sizes = (int32_t *)l->sizes.at;

    c->groups.count = (int32_t)opt.experts;
    c->groups.capacity = capacity;
    c->groups.splits = l->sizes.at;
    c->groups.dtype = GMM_I32;

    c->mlp.config = &m->mlp;
    c->mlp.groups = &c->groups;
    c->mlp.x = &c->rows;
    weights_announce(l->w1);
    weights_announce(l->w2);
    if (m->rank_group) c->mlp.hooks = &l->hooks;
    c->mlp.w1 = &l->w1->w;
    c->mlp.w2 = &l->w2->w;
    c->mlp.b1 = l->b1 ? &l->b1->w : NULL;
    c->mlp.b2 = l->b2 ? &l->b2->w : NULL;
    c->mlp.prob = (const float *)l->row_probs.at;
    c->mlp.y = &c->y;
    if (m->recipe.kind != GMM_RECIPE_NONE) {
        c->mlp.quant = &c->quant;
        c->quant.recipe = &m->recipe;
        c->quant.random = (const uint64_t *)l->random.at;
        c->quant.scale = (const float *)l->scale.at;
        c->quant.amax = train ? (float *)l->history.at : NULL; /* its first row receives the amaxes */
        c->quant.backward_override = backward_of(opt.backward);
    }
    if (!train) return;
    if (l->weight_cache.at) {
        c->quant.weight_cache = l->weight_cache.at;
        c->quant.weight_cache_bytes = l->weight_cache.bytes;
        c->quant.weight_skip = (const int32_t *)m->weights_cached.at;
    }
    c->mlp.saved = l->saved.at;
    c->mlp.saved_bytes = l->saved.bytes;
    c->mlp.dy = &c->drows;
    c->mlp.dx = &c->dexpert;
    c->mlp.dw1 = &l->w1->dw;
    c->mlp.dw2 = &l->w2->dw;
    c->mlp.db1 = l->b1 ? &l->b1->dw : NULL;
    c->mlp.db2 = l->b2 ? &l->b2->dw : NULL;
    c->mlp.dprob = (float *)m->drow_probs.at;
    if (!opt.delay_wgrad) return;
    c->mlp.deferred = l->deferred.at;
    c->mlp.deferred_bytes = l->deferred.bytes;
    c->mlp.queue = &m->queue;
}

enum { SCALE_HISTORY = 16 }; /* length of the amax history of delayed scaling, in steps */

/* out = h + unpermute(experts(permute(norm(h)))) */
static void moe_forward(model *m, layer *l, float *out, int64_t tokens, int train) {
    gmm_permute permute;
    moe_call c;
    norm_forward(m, l->h, l->norm, l->inverse_rms, &l->normed, tokens);
    rows_push(m, &l->normed, tokens);
    linear_forward(m, l->router, NULL, &l->normed, &l->logits, tokens);
    moe_describe(m, l, &c, tokens, train);

    RUN(m, gmm_topk_query, GMM_OP_TOPK_FWD, gmm_topk_fwd, &c.route);

    permute = c.permute;
    RUN(m, gmm_permute_query, GMM_OP_PERMUTE_MAP, gmm_permute_map, &permute);
    permute.x = &c.normed;
    permute.rows = &c.rows;
    permute.probs = (const float *)l->probs.at;
    permute.row_probs = (float *)l->row_probs.at;
    RUN(m, gmm_permute_query, GMM_OP_PERMUTE_FWD, gmm_permute_fwd, &permute);

    l->backward = 0;
    RUN(m, gmm_mlp_query, GMM_OP_MLP_FWD, gmm_mlp_fwd, &c.mlp);
    weights_release(m, l->w2);

    permute = c.permute; /* the experts have applied the probabilities */
    permute.rows = &c.y;
    permute.out = &c.out;
    RUN(m, gmm_permute_query, GMM_OP_UNPERMUTE_FWD, gmm_unpermute_fwd, &permute);
    rows_pull(m, &l->out, tokens);
    residual_add(l->h, floats(&l->out), out, tokens * opt.hidden);
}

/* New random words for stochastic rounding in a micro-batch: one state for each of a block's two gradients. */
static void moe_draw(model *m) {
    for (int i = (int)opt.layers - 1; i >= 0 && m->recipe.grad.stochastic; i--) {
        uint64_t *state = (uint64_t *)m->layers[i].random.host;
        state[0] = state[2] = (uint64_t)opt.seed;
        state[1] = random_next(&m->random);
        state[3] = state[1] + 1;
        buffer_push(&m->mem, &m->layers[i].random);
    }
}

/* Reduces amaxes over all ranks; the model's only domain is 0. */
static gmm_status moe_reduce(void *user, float *amax, int32_t slots, gmm_stream stream) {
    const model *m = (const model *)user;
    return gmm_gtp_amax(m->gtp, 0, amax, slots, stream);
}

/* Updates delayed scales from this step's amaxes: of forward's four operands, then of the gradients. */
static void moe_scales(model *m, layer *l) {
    const int32_t experts = (int32_t)opt.experts, forward = GMM_SLOT_DY * experts;
    gmm_scale_update u = GMM_ZERO;
    if (!m->recipe.input.delayed) return;
    u.history_length = SCALE_HISTORY;
    u.margin = m->recipe.margin;
    u.stride = (int64_t)GMM_SLOTS * experts;
    u.user = m;
    u.reduce = m->rank_group ? moe_reduce : NULL;
    u.history = (float *)l->history.at;
    u.scale = (float *)l->scale.at;
    u.slots = forward;
    u.dtype = m->recipe.input.dtype;
    check(m, gmm_update_scales(m->ctx, &u, NULL));
    u.history += forward;
    u.scale += forward;
    u.slots = (GMM_SLOTS - GMM_SLOT_DY) * experts;
    u.dtype = m->recipe.grad.dtype;
    check(m, gmm_update_scales(m->ctx, &u, NULL));
}

/* Replaces the gradient dh of the block's output by that of its input. */
static void moe_backward(model *m, layer *l, int64_t tokens) {
    gmm_permute permute;
    moe_call c;
    moe_describe(m, l, &c, tokens, 1);
    if (saves_copies(m)) c.mlp.x = NULL; /* m->rows holds another block's */
    rows_push(m, &m->dh, tokens);
    permute = c.permute;
    permute.dout = &c.dout;
    permute.drows = &c.drows;
    RUN(m, gmm_permute_query, GMM_OP_UNPERMUTE_BWD, gmm_unpermute_bwd, &permute);

    l->backward = 1;
    gradient_begin(m, l->w2);
    gradient_begin(m, l->w1);
    RUN(m, gmm_mlp_query, GMM_OP_MLP_BWD, gmm_mlp_bwd, &c.mlp);
    weights_release(m, l->w1);

    permute = c.permute;
    permute.drows = &c.dexpert;
    permute.drow_probs = (const float *)m->drow_probs.at;
    permute.dx = &c.dn;
    permute.dprobs = (float *)m->dprobs.at;
    RUN(m, gmm_permute_query, GMM_OP_PERMUTE_BWD, gmm_permute_bwd, &permute);

    RUN(m, gmm_topk_query, GMM_OP_TOPK_BWD, gmm_topk_bwd, &c.route);
    linear_backward(m, l->router, NULL, &l->normed, &m->drouter, &m->dn, 1, tokens);
    rows_pull(m, &m->dn, tokens);
    norm_backward(l->h, l->norm, l->inverse_rms, floats(&m->dn), floats(&m->dh), 1, tokens);
}

/* The queued weight gradients of all blocks. */
static void moe_delayed(model *m) {
    while (m->queue.count > 0) {
        gmm_info info = GMM_ZERO;
        moe_call c;
        moe_describe(m, &m->layers[0], &c, m->tokens, 1);
        check(m, gmm_mlp_query(m->ctx, GMM_OP_MLP_WGRAD, &c.mlp, &info));
        need_workspace(m, info.workspace_bytes);
        check(m, gmm_mlp_wgrad(m->ctx, &m->queue, m->workspace.at, m->workspace.bytes, NULL));
    }
}

/* ------------------------------------------------------------------------------------------------- 8 The model --- */

static void layer_make(model *m, layer *l, int index) {
    int experts = (int)opt.experts, gated = gmm_act_gated(m->mlp.act.kind);
    int64_t tokens = m->tokens, rows = tokens * opt.topk, hidden = opt.hidden, ffn = opt.ffn;
    size_t low = dtype_bytes(m->dtype);
    gmm_info info = GMM_ZERO;
    moe_call call;
    char name[96];
#define NAMED(suffix) (snprintf(name, sizeof name, "decoder.layers.%d.%s", index, suffix), name)
    l->model = m;
    l->hooks.user = l;
    l->hooks.ready = gradient_ready;
    l->hooks.need = weights_needed;
    l->norm = param_add(m, NAMED("pre_mlp_layernorm.weight"), 1, 0, 1, hidden, GMM_F32, 1, 0, ON_HOST);
    l->router = param_add(m, NAMED("mlp.router.weight"), 1, 0, experts, hidden, m->dtype, 0, 0.5 / sqrt(hidden),
                          REPLICATED);
    l->w1 = param_add(m, NAMED("mlp.experts.linear_fc1.weight"), experts, 1, ffn * (1 + gated), hidden, m->dtype, 0,
                      1 / sqrt(hidden), EXPERTS_FC1);
    l->w2 = param_add(m, NAMED("mlp.experts.linear_fc2.weight"), experts, 1, hidden, ffn, m->dtype, 0,
                      1 / sqrt(2.0 * ffn * opt.layers), EXPERTS_FC2);
    l->w1->gated = gated;
    if (opt.bias) {
        l->b1 = param_add(m, NAMED("mlp.experts.linear_fc1.bias"), experts, 1, 1, ffn * (1 + gated), GMM_F32, 0, 0,
                          REPLICATED);
        l->b2 = param_add(m, NAMED("mlp.experts.linear_fc2.bias"), experts, 1, 1, hidden, GMM_F32, 0, 0, REPLICATED);
        l->b1->gated = gated;
        param_interleave(m, l->b1);
    }
#undef NAMED
    param_interleave(m, l->w1);

    l->h = (float *)get((size_t)(tokens * hidden) * sizeof(float));
    l->inverse_rms = (float *)get((size_t)tokens * sizeof(float));
    l->normed = buffer_make(&m->mem, (size_t)(tokens * hidden) * low, BOTH);
    l->logits = buffer_make(&m->mem, (size_t)(tokens * experts) * sizeof(float), AT_ONLY);
    l->indices = buffer_make(&m->mem, (size_t)rows * sizeof(int32_t), AT_ONLY);
    l->probs = buffer_make(&m->mem, (size_t)rows * sizeof(float), AT_ONLY);
    l->counts = buffer_make(&m->mem, (size_t)experts * sizeof(int32_t), BOTH);
    l->aux = buffer_make(&m->mem, sizeof(float), BOTH);
    l->row_of = buffer_make(&m->mem, (size_t)rows * sizeof(int32_t), AT_ONLY);
    l->slot_of = buffer_make(&m->mem, (size_t)rows * sizeof(int32_t), AT_ONLY);
    l->sizes = buffer_make(&m->mem, (size_t)experts * sizeof(int32_t), AT_ONLY);
    l->rows = m->rows.at ? m->rows : buffer_make(&m->mem, (size_t)(rows * hidden) * low, AT_ONLY);
    if (saves_copies(m)) m->rows = l->rows;
    l->row_probs = buffer_make(&m->mem, (size_t)rows * sizeof(float), AT_ONLY);
    l->y = buffer_make(&m->mem, (size_t)(rows * hidden) * low, AT_ONLY);
    l->out = buffer_make(&m->mem, (size_t)(tokens * hidden) * sizeof(float), BOTH);
    l->drows = buffer_make(&m->mem, (size_t)(rows * hidden) * low, AT_ONLY);
    if (m->recipe.kind != GMM_RECIPE_NONE) {
        const size_t slots = (size_t)GMM_SLOTS * (size_t)experts;
        l->scale = buffer_make(&m->mem, slots * sizeof(float), BOTH);
        for (size_t i = 0; i < slots; i++) floats(&l->scale)[i] = 1;
        buffer_push(&m->mem, &l->scale);
        l->history = buffer_make(&m->mem, SCALE_HISTORY * slots * sizeof(float), BOTH);
        l->random = buffer_make(&m->mem, 4 * sizeof(uint64_t), BOTH);
        for (int k = 0; k < 2 && m->recipe.weight.delayed; k++) {
            param *w = k ? l->w2 : l->w1;
            w->scale = (const float *)l->scale.at + (k ? GMM_SLOT_W2 : GMM_SLOT_W1) * experts;
            w->amax = (float *)l->history.at + (k ? GMM_SLOT_W2 : GMM_SLOT_W1) * experts;
        }
    }
    moe_describe(m, l, &call, tokens, 1);
    check(m, gmm_topk_query(m->ctx, GMM_OP_TOPK_FWD, &call.route, &info)); /* reports invalid combinations early */
    check(m, gmm_mlp_query(m->ctx, GMM_OP_MLP_FWD, &call.mlp, &info));
    l->saved = buffer_make(&m->mem, info.saved_bytes, AT_ONLY);
    if (opt.weight_cache && info.weight_cache_bytes && !m->rank_group) /* GTP gathers weights that are quantized */
        l->weight_cache = buffer_make(&m->mem, info.weight_cache_bytes, AT_ONLY);
    check(m, gmm_mlp_query(m->ctx, GMM_OP_MLP_BWD, &call.mlp, &info));
    l->deferred = buffer_make(&m->mem, info.deferred_bytes, AT_ONLY);
    m->engine = info.engine;
}

/* What forward saves: with `auto` the copies that backward multiplies, if these are quantized. */
static gmm_save save_of(const gmm_recipe *recipe) {
    static const struct { const char *name; gmm_save save, e4m3; } policies[] = {
        {"preact", GMM_SAVE_PREACT, GMM_SAVE_PREACT_E4M3},
        {"quantized", GMM_SAVE_QUANTIZED, GMM_SAVE_QUANTIZED_E4M3},
        {"act", GMM_SAVE_PREACT_AND_ACT, GMM_SAVE_MAX},
        {"nothing", GMM_SAVE_NOTHING, GMM_SAVE_MAX},
    };
    const int quantized = recipe->input.dtype != GMM_NONE && backward_of(opt.backward) != GMM_BACKWARD_HIGH_PRECISION;
    const char *name = strcmp(opt.save_policy, "auto") ? opt.save_policy : quantized ? "quantized" : "preact";
    int i = 0;
    while (strcmp(name, policies[i].name)) i++; /* options.c has checked it */
    if (opt.preact_e4m3 && policies[i].e4m3 == GMM_SAVE_MAX)
        die("--preact-e4m3 needs --save-policy preact or quantized, not %s", name);
    return opt.preact_e4m3 ? policies[i].e4m3 : policies[i].save;
}

static void configure_mlp(model *m) {
    gmm_mlp_config *c = &m->mlp;
    gmm_error error;
    c->hidden = opt.hidden;
    c->ffn = opt.ffn;
    c->act = act_of(opt.act);
    if (option_of(&opt.interleave)->given) c->act.interleave = (int32_t)opt.interleave; /* otherwise the preset's */
    c->bias1 = c->bias2 = c->prob_on_bias2 = (int32_t)opt.bias;
    c->prob = 1;
    c->topk = (int32_t)opt.topk;
    c->delay_wgrad = (int32_t)opt.delay_wgrad;
    c->recipe = recipe_of(opt.recipe);
    m->recipe = gmm_recipe_of(c->recipe);
    c->save = save_of(&m->recipe);
    c->overwrite_saved = 1; /* each backward reads what one forward saved */
    if (gmm_mlp_validate(c, &error)) die("the expert MLP cannot be configured so: %s", error.text);
}

static void write_log(void *user, gmm_log_level level, const char *message) {
    model *m = (model *)user;
    if (level == GMM_LOG_WARN) fprintf(stderr, "gmm: %s\n", message);
    else snprintf(m->place, sizeof m->place, "%s", message);
}

/* All-gather on the host, with which GPUs exchange addresses of their memory. */
static gmm_status exchange(void *user, const void *mine, void *all, size_t bytes) {
    const model *m = (const model *)user;
    rank_group_gather(m->rank_group, m->rank, mine, all, bytes);
    return GMM_OK;
}
static void peers_open(model *m) {
    gmm_peers_config config = GMM_ZERO;
    gmm_error error;
    config.rank = m->rank;
    config.size = m->ranks;
    config.ctx = m->ctx;
    config.processes = m->rank_group->rendezvous != NULL;
    config.exchange = exchange;
    config.user = m;
    for (int i = 0; i < 2; i++)
        if (gmm_peers_open(&config, &m->peers[i], &error)) die("--gtp: %s", error.text);
}

/* Memory that peers write to. Other processes open 2 MiB or more (gmm_peers_config). */
static buffer window_make(const model *m, size_t bytes) {
    const size_t least = m->rank_group->rendezvous ? 2 << 20 : 0;
    return buffer_make(&m->mem, bytes < least ? least : bytes, AT_ONLY);
}

/* Declares the sharded parameters to the GTP runtime: one bundle each, in chains in the order of the model. */
static void model_shard(model *m) {
    gmm_config plain = GMM_ZERO;
    gmm_gtp_config config = GMM_ZERO;
    gmm_gtp_domain domain = GMM_ZERO;
    gmm_gtp_need need = GMM_ZERO;
    gmm_runtime runtime = GMM_ZERO;
    gmm_error error;
    buffer gather, reduce;
    int32_t id, bundles[GMM_GTP_PASSES][4096], count[GMM_GTP_PASSES] = {0}, chain[GMM_GTP_PASSES];
    size_t bytes = 0;
    plain.threads = 1;
    if (m->rank_group->gpus) peers_open(m);
    else if (gmm_create(&m->gtp_ctx, &plain, &error)) die("--gtp: %s", error.text);
    if (m->rank_group->gpus ? gmm_runtime_of(m->ctx, &runtime)
                            : gmm_ranks_runtime(m->rank_group->ranks, m->rank, &runtime))
        die("--gtp: no runtime");
    if (runtime.stream_create(runtime.self, 0, &domain.gather_stream) ||
        runtime.stream_create(runtime.self, 0, &domain.reduce_stream))
        die("--gtp: %s", gmm_ranks_error(m->rank_group->ranks, m->rank));
    for (int i = 0; i < m->param_count; i++) {
        config.bundles += m->params[i]->sharded;
        config.weights += m->params[i]->sharded ? m->params[i]->count : 0;
    }
    config.chains = GMM_GTP_PASSES;
    config.timeout_ms = RANK_TIMEOUT_MS;
    config.ctx = m->rank_group->gpus ? m->ctx : m->gtp_ctx;
    config.runtime = &runtime;
    if (gmm_gtp_query(&config, &bytes, &error) || gmm_gtp_init(get(bytes), bytes, &config, &m->gtp, &error))
        die("--gtp: %s", error.text);
    domain.gather = m->rank_group->gpus ? &m->peers[0] : &m->rank_group->gather[m->rank];
    domain.reduce = m->rank_group->gpus ? &m->peers[1] : &m->rank_group->reduce[m->rank];
    domain.wgrad_slots = opt.delay_wgrad ? 2 * (int32_t)opt.layers + 2 : 2;
    check_gtp(m, gmm_gtp_add_domain(m->gtp, &domain, &id));
    for (int i = 0; i < m->param_count; i++) {
        param *p = m->params[i];
        gmm_shard shard = shard_of(m, p);
        gmm_shard_plan plan = GMM_ZERO;
        float *amax;
        if (!p->sharded) continue;
        if (p->format) {
            shard.dtype = p->format->dtype;
            shard.scaling = p->format->scaling;
        }
        if (gmm_gtp_plan(&shard, &plan, &error)) die("%s", error.text);
        if (p->format) { /* a transposed copy of padded rows */
            gmm_layout layout = GMM_ZERO;
            if (gmm_layout_of(shard.dtype, shard.scaling, p->format->order, GMM_COLUMNWISE, plan.padded_rows,
                              plan.local_cols, &layout, &error)) die("%s", error.text);
            p->columnwise_ld = layout.transposed ? layout.data_cols : 0;
        }
        amax = p->format ? (float *)buffer_make(&m->mem, (size_t)p->count * sizeof *amax, AT_ONLY).at : NULL;
        p->ids = (int32_t *)get((size_t)p->count * sizeof *p->ids);
        for (int e = 0; e < p->count; e++) {
            gmm_gtp_weight w = GMM_ZERO;
            for (int way = GMM_ROWWISE; p->format && way <= GMM_COLUMNWISE; way++) {
                if (plan.shard_data_bytes[way])
                    w.data[way] = buffer_make(&m->mem, (size_t)plan.shard_data_bytes[way], AT_ONLY).at;
                if (plan.shard_scale_bytes[way])
                    w.scale[way] = buffer_make(&m->mem, (size_t)plan.shard_scale_bytes[way], AT_ONLY).at;
            }
            w.amax = p->format ? amax + e : NULL;
            w.format = p->format;
            w.expert = e;
            w.name = p->name;
            w.shard = &shard;
            if (!p->format) w.data[GMM_ROWWISE] = p->weight[e].at;
            w.main_grad = p->grad[e].at;
            w.main_grad_dtype = GMM_F32;
            check_gtp(m, gmm_gtp_add_weight(m->gtp, &w, &p->ids[e]));
        }
        check_gtp(m, gmm_gtp_add_bundle(m->gtp, id, p->ids, p->count, p->name, &p->bundle));
        bundles[GMM_GTP_FORWARD][count[GMM_GTP_FORWARD]++] = p->bundle;
    }
    count[GMM_GTP_BACKWARD] = count[GMM_GTP_FORWARD];
    for (int i = 0; i < count[0]; i++) bundles[GMM_GTP_BACKWARD][i] = bundles[GMM_GTP_FORWARD][count[0] - 1 - i];
    for (int i = (int)opt.layers - 1; i >= 0; i--)
        if (reads_recompute_view(m->layers[i].w1))
            bundles[GMM_GTP_RECOMPUTE][count[GMM_GTP_RECOMPUTE]++] = m->layers[i].w1->bundle;
    for (int pass = GMM_GTP_FORWARD; pass <= GMM_GTP_RECOMPUTE; pass++) {
        gmm_gtp_chain c = GMM_ZERO;
        if (!count[pass]) continue;
        c.pass = (gmm_gtp_pass)pass;
        c.bundles = bundles[pass];
        c.count = count[pass];
        c.prefetch = pass == GMM_GTP_RECOMPUTE ? 1 : 2; /* prefetches both weights of the next block, or its FC1, */
        c.held = pass == GMM_GTP_RECOMPUTE ? 1 : 2;     /* while those of this block are read */
        check_gtp(m, gmm_gtp_add_chain(m->gtp, &c, &chain[pass]));
    }
    check_gtp(m, gmm_gtp_seal(m->gtp));
    check_gtp(m, gmm_gtp_follow(m->gtp, chain[GMM_GTP_FORWARD], chain[GMM_GTP_BACKWARD]));
    check_gtp(m, gmm_gtp_memory_need(m->gtp, id, &need));
    gather = window_make(m, need.gather_bytes);
    reduce = window_make(m, need.reduce_bytes);
    check_gtp(m, gmm_gtp_bind(m->gtp, id, gather.at, gather.bytes, reduce.at, reduce.bytes));
#ifdef HAVE_CUDA
    if (m->rank_group->gpus) polled_gtp = m->gtp;
#endif
}

static void model_make(model *m, const rank_group *group, int rank, gmm_engine engine, memory mem) {
    int64_t tokens, hidden = opt.hidden, inputs = opt.context * opt.embed;
    gmm_config config = GMM_ZERO;
    gmm_error error;
    size_t low;
    if (opt.topk > opt.experts) die("--topk %d exceeds --experts %d", (int)opt.topk, (int)opt.experts);
    memset(m, 0, sizeof *m);
    m->rank_group = group;
    m->rank = rank;
    m->ranks = group ? group->size : 1;
    m->mem = mem;
    m->dtype = dtype_of(opt.dtype);
    m->random = (uint64_t)opt.seed;
    m->tokens = tokens = opt.batch / opt.micro_batches;
    low = dtype_bytes(m->dtype);
    configure_mlp(m);
#ifdef _OPENMP
    if (opt.threads) omp_set_num_threads((int)opt.threads);
#endif
    config.engine = engine;
    config.space = m->mem.space;
    config.device = group && group->gpus ? rank % group->gpus : 0;
    config.threads = (int32_t)opt.threads;
    config.log.user = m;
    config.log.level = GMM_LOG_INFO;
    config.log.write = write_log;
    if (gmm_create(&m->ctx, &config, &error)) die("--engine %s: %s", gmm_engine_name(engine), error.text);
    m->workspace = buffer_make(&m->mem, 256, AT_ONLY);
    m->entries = (gmm_wgrad_entry *)get((size_t)(opt.layers + 1) * sizeof *m->entries);
    m->queue = gmm_wgrad_queue_over(m->entries, (int32_t)opt.layers + 1);

    m->embedding = param_add(m, "embedding.word_embeddings.weight", 1, 0, BYTES, opt.embed, m->dtype, 0, 0.5,
                             ON_HOST);
    m->embedding->decay = 0;
    m->input_w = param_add(m, "input_layer.weight", 1, 0, hidden, inputs, m->dtype, 0, 1 / sqrt(0.25 * inputs),
                           SHARDED);
    m->input_b = param_add(m, "input_layer.bias", 1, 0, 1, hidden, GMM_F32, 0, 0, REPLICATED);

    m->one_group = buffer_make(&m->mem, sizeof(int32_t), BOTH);
    m->weights_cached = buffer_make(&m->mem, sizeof(int32_t), BOTH);
    m->dloss = buffer_make(&m->mem, 2 * sizeof(float), BOTH);
    /* gradients are sums over tokens, the auxiliary loss is a mean */
    floats(&m->dloss)[0] = floats(&m->dloss)[1] = (float)tokens;
    buffer_push(&m->mem, &m->dloss);
    m->x0 = buffer_make(&m->mem, (size_t)(tokens * inputs) * low, BOTH);
    m->dx0 = buffer_make(&m->mem, (size_t)(tokens * inputs) * sizeof(float), BOTH);
    m->h0 = buffer_make(&m->mem, (size_t)(tokens * hidden) * sizeof(float), BOTH);
    m->normed = buffer_make(&m->mem, (size_t)(tokens * hidden) * low, BOTH);
    m->logits = buffer_make(&m->mem, (size_t)(tokens * BYTES) * sizeof(float), BOTH);
    m->dlogits = buffer_make(&m->mem, (size_t)(tokens * BYTES) * low, BOTH);
    m->dh = buffer_make(&m->mem, (size_t)(tokens * hidden) * sizeof(float), BOTH);
    m->dh_low = buffer_make(&m->mem, (size_t)(tokens * hidden) * low, BOTH);
    m->dn = buffer_make(&m->mem, (size_t)(tokens * hidden) * sizeof(float), BOTH);
    m->dexpert = buffer_make(&m->mem, (size_t)(tokens * opt.topk * hidden) * low, AT_ONLY);
    m->drow_probs = buffer_make(&m->mem, (size_t)(tokens * opt.topk) * sizeof(float), AT_ONLY);
    m->dprobs = buffer_make(&m->mem, (size_t)(tokens * opt.topk) * sizeof(float), AT_ONLY);
    m->drouter = buffer_make(&m->mem, (size_t)(tokens * opt.experts) * low, AT_ONLY);
    m->h = (float *)get((size_t)(tokens * hidden) * sizeof(float));
    m->inverse_rms = (float *)get((size_t)tokens * sizeof(float));
    m->losses = (double *)get((size_t)tokens * sizeof(double));
    m->hide = (unsigned char *)get((size_t)(tokens * opt.context));

    m->layers = (layer *)get((size_t)(opt.layers + 1) * sizeof *m->layers);
    for (int i = 0; i < opt.layers; i++) layer_make(m, &m->layers[i], i);
    m->final_norm = param_add(m, "decoder.final_layernorm.weight", 1, 0, 1, hidden, GMM_F32, 1, 0, ON_HOST);
    m->head_w = param_add(m, "output_layer.weight", 1, 0, BYTES, hidden, m->dtype, 0, 0.5 / sqrt(hidden), SHARDED);
    m->head_b = param_add(m, "output_layer.bias", 1, 0, 1, BYTES, GMM_F32, 0, 0, REPLICATED);
    if (!opt.layers) m->engine = linear_engine(m, m->head_w);
    if (m->rank_group) model_shard(m);
    params_publish(m);
    shards_publish(m);
}

/* Predicts the bytes at `positions` from those before; logits end up in m->logits.host. */
static void forward(model *m, const unsigned char *bytes, const int64_t *positions, int64_t tokens, int train) {
    float *first = opt.layers ? m->layers[0].h : m->h;
    embed_forward(m, bytes, positions, tokens, train);
    rows_push(m, &m->x0, tokens);
    linear_forward(m, m->input_w, m->input_b, &m->x0, &m->h0, tokens);
    rows_pull(m, &m->h0, tokens);
    memcpy(first, m->h0.host, (size_t)(tokens * opt.hidden) * sizeof(float));
    for (int i = 0; i < opt.layers; i++)
        moe_forward(m, &m->layers[i], i + 1 < opt.layers ? m->layers[i + 1].h : m->h, tokens, train);
    norm_forward(m, m->h, m->final_norm, m->inverse_rms, &m->normed, tokens);
    rows_push(m, &m->normed, tokens);
    linear_forward(m, m->head_w, m->head_b, &m->normed, &m->logits, tokens);
    rows_pull(m, &m->logits, tokens);
}

/* Adds the gradients of a forward with train = 1 whose cross entropy has been taken. */
static void backward(model *m, const unsigned char *bytes, const int64_t *positions, int64_t tokens) {
    rows_push(m, &m->dlogits, tokens);
    linear_backward(m, m->head_w, m->head_b, &m->normed, &m->dlogits, &m->dn, 0, tokens);
    rows_pull(m, &m->dn, tokens);
    norm_backward(m->h, m->final_norm, m->inverse_rms, floats(&m->dn), floats(&m->dh), 0, tokens);
    for (int i = (int)opt.layers - 1; i >= 0; i--) moe_backward(m, &m->layers[i], tokens);
    PARALLEL_FOR
    for (int64_t t = 0; t < tokens; t++)
        store_row(m->dtype, (char *)m->dh_low.host + (size_t)(t * opt.hidden) * dtype_bytes(m->dtype),
                  floats(&m->dh) + t * opt.hidden, opt.hidden);
    rows_push(m, &m->dh_low, tokens);
    linear_backward(m, m->input_w, m->input_b, &m->x0, &m->dh_low, &m->dx0, 0, tokens);
    rows_pull(m, &m->dx0, tokens);
    embed_backward(m, bytes, positions, tokens);
    if (opt.delay_wgrad && opt.layers) moe_delayed(m);
}

/* gmm overwrites main_grad in the first micro-batch of a step, whose weights are in no cache; what the host accumulates
   is cleared. */
static void begin_gradients(model *m, int first) {
    *(int32_t *)m->weights_cached.host = !first;
    buffer_push(&m->mem, &m->weights_cached);
    for (int i = 0; i < m->param_count; i++) {
        param *p = m->params[i];
        p->dw.overwrite = p->opens = first;
        if (first && p->by_host) memset(p->grad[0].host, 0, p->grad[0].bytes);
    }
}

static double sum_losses(const model *m, int64_t tokens) {
    double sum = 0;
    for (int64_t t = 0; t < tokens; t++) sum += m->losses[t];
    return sum;
}

/* Sums between two reports. */
typedef struct tally {
    double loss, aux, grad_norm;
    double *load; /* [layers][experts] tokens */
    int64_t steps;
    int stop; /* a rank got a stop request: all ranks stop after this step */
} tally;

/* One optimizer step on a batch drawn from the training text. */
static void train_step(model *m, const text *t, int64_t *positions, tally *now) {
    double loss = 0, aux = 0, *load = (double *)get((size_t)(opt.layers * opt.experts + 1) * sizeof *load);
    for (int64_t part = 0; part < opt.micro_batches; part++) {
        for (int64_t i = 0; i < m->tokens; i++)
            positions[i] = opt.context + (int64_t)(random_next(&m->random) % (uint64_t)(t->train - opt.context));
        draw_dropout(m);
        moe_draw(m);
        if (part % m->ranks != m->rank) continue; /* belongs to another rank */
        begin_gradients(m, part == m->rank);
        forward(m, t->bytes, positions, m->tokens, 1);
        cross_entropy(m, t->bytes, positions, m->tokens, 1);
        loss += sum_losses(m, m->tokens);
        backward(m, t->bytes, positions, m->tokens);
        for (int i = 0; i < opt.layers; i++) {
            buffer_pull(&m->mem, &m->layers[i].counts);
            buffer_pull(&m->mem, &m->layers[i].aux);
            aux += *floats(&m->layers[i].aux);
            for (int e = 0; e < opt.experts; e++)
                load[i * opt.experts + e] += ((const int32_t *)m->layers[i].counts.host)[e];
        }
    }
    params_update(m);
    now->stop = stop_signal != 0;
    if (m->rank_group) {
        double sums[3] = {loss, aux, now->stop};
        rank_group_sum(m->rank_group, m->rank, sums, 3);
        rank_group_sum(m->rank_group, m->rank, load, opt.layers * opt.experts);
        loss = sums[0];
        aux = sums[1];
        now->stop = sums[2] > 0;
    }
    for (int64_t i = 0; i < opt.layers * opt.experts; i++) now->load[i] += load[i];
    free(load);
    for (int i = 0; i < opt.layers; i++) moe_scales(m, &m->layers[i]);
    shards_publish(m);
    now->loss += loss / (double)opt.batch;
    now->grad_norm += m->grad_norm;
    now->aux += opt.layers ? aux / (double)(opt.layers * opt.micro_batches) : 0;
    now->steps++;
    if (!(loss == loss)) die("the loss is not a number at step %lld: try a smaller --lr", (long long)m->step);
}

/* -------------------------------------------------------------------------------- 9 Evaluation, sample, bigram --- */

/* Position i of n evenly spaced positions in the held-out text. */
static int64_t held_out_position(const text *t, int64_t i, int64_t n) {
    int64_t held = t->size - t->train;
    return t->train + i * (held / n) + i * (held % n) / n;
}

static double evaluate(model *m, const text *t, int64_t n) {
    int64_t *positions = (int64_t *)get((size_t)m->tokens * sizeof *positions);
    double sum = 0;
    for (int64_t from = 0; from < n; from += m->tokens * m->ranks) { /* all ranks run the same number of batches */
        int64_t mine = from + m->rank * m->tokens, at = mine < n ? mine : 0;
        int64_t tokens = n - at < m->tokens ? n - at : m->tokens;
        for (int64_t i = 0; i < tokens; i++) positions[i] = held_out_position(t, at + i, n);
        forward(m, t->bytes, positions, tokens, 0);
        cross_entropy(m, t->bytes, positions, tokens, 0);
        if (mine < n) sum += sum_losses(m, tokens);
    }
    free(positions);
    if (m->rank_group) rank_group_sum(m->rank_group, m->rank, &sum, 1);
    return sum / (double)n;
}

/* Held-out loss of p(b | a) = (count(a b) + 1) / (count(a) + 256), counted on the training text. */
static double bigram(const text *t, int64_t n) {
    int64_t *pairs = (int64_t *)get(BYTES * BYTES * sizeof *pairs), *singles = (int64_t *)get(BYTES * sizeof *singles);
    double sum = 0;
    for (int64_t i = 1; i < t->train; i++) {
        pairs[t->bytes[i - 1] * BYTES + t->bytes[i]]++;
        singles[t->bytes[i - 1]]++;
    }
    for (int64_t i = 0; i < n; i++) {
        int64_t at = held_out_position(t, i, n);
        int before = t->bytes[at - 1];
        sum -= log(((double)pairs[before * BYTES + t->bytes[at]] + 1) / ((double)singles[before] + BYTES));
    }
    free(pairs);
    free(singles);
    return sum / (double)n;
}

/* Continues the last empty line of the training text (its end, where there is none), at a temperature of 0.8. */
static void print_sample(model *m, const text *t) {
    unsigned char *bytes = (unsigned char *)get((size_t)(opt.context + opt.sample + 1));
    uint64_t random = (uint64_t)opt.seed ^ 0x5A5A5A5A;
    int64_t from = t->train;
    while (from > opt.context && from > 1 && (t->bytes[from - 1] != '\n' || t->bytes[from - 2] != '\n')) from--;
    if (from <= opt.context) from = t->train;
    memcpy(bytes, t->bytes + from - opt.context, (size_t)opt.context);
    if (m->rank == 0) printf("\nsample:\n"); /* all ranks compute it */
    for (int64_t i = 0; i < opt.sample; i++) {
        int64_t position = opt.context + i;
        const float *z;
        double weights[BYTES], sum = 0, point;
        int pick = 0;
        forward(m, bytes, &position, 1, 0);
        z = floats(&m->logits);
        for (int b = 0; b < BYTES; b++) sum += weights[b] = exp((double)z[b] / 0.8);
        point = random_unit(&random) * sum;
        while (pick < BYTES - 1 && (point -= weights[pick]) >= 0) pick++;
        bytes[position] = (unsigned char)pick;
        if (m->rank == 0) putchar(pick == '\n' || pick == '\t' || (pick >= 32 && pick < 127) ? pick : '?');
    }
    if (m->rank == 0) printf("\n\n");
    free(bytes);
}

/* ---------------------------------------------------------------------------------------------- 10 Checkpoints --- */

/* Masters under Megatron-like names ("decoder.layers.0.mlp.experts.linear_fc1.weight3" is expert 3; with --keys grouped
   "weight" holds all experts), all fp32, with AdamW's moments as optimizer.exp_avg.NAME and optimizer.exp_avg_sq.NAME;
   the state of delayed scaling; step, random state, the options that make the model, and the text's size and hash as
   metadata. Nothing depends on the number of ranks or, but for the state of delayed scaling, on the recipe. */
enum { SETS = 3, NAME_CAPACITY = 160 };

static const char *const set_names[SETS] = {"", "optimizer.exp_avg.", "optimizer.exp_avg_sq."};

static float *set_values(const param *p, int set) { return set == 0 ? p->master : set == 1 ? p->first : p->second; }

static stored_param stored_of(const param *p, int set) {
    const stored_param s = {set_names[set], p->name, p->count, p->indexed, p->rows, p->cols};
    return s;
}

static int grouped_keys(void) { return !strcmp(opt.keys, "grouped"); }

/* Matrices, each of one tensor or of a part of one. */
static int64_t matrix_count(const model *m) {
    int64_t n = 0;
    for (int i = 0; i < m->param_count; i++) n += m->params[i]->count;
    return n * SETS;
}

/* State of delayed scaling, named and shaped per linear as Transformer Engine's _extra_state: scales [slots E] and amax
   histories [length, slots E], forward of input, weight and output, backward of the gradients of output and input. The
   last slot of each is never quantized here: it holds ones and zeros. */
static const struct delayed_row { const char *linear, *way; int slot, used, slots; } delayed_rows[] = {
    {"linear_fc1", "fwd", GMM_SLOT_X, 2, 3}, {"linear_fc1", "bwd", GMM_SLOT_DZ, 1, 2},
    {"linear_fc2", "fwd", GMM_SLOT_H, 2, 3}, {"linear_fc2", "bwd", GMM_SLOT_DY, 1, 2}
};
/* tensors per layer */
enum { DELAYED_ROWS = sizeof delayed_rows / sizeof delayed_rows[0], DELAYED = 2 * DELAYED_ROWS };

static int64_t delayed_count(const model *m) { return m->recipe.input.delayed ? opt.layers * DELAYED : 0; }

/* Tensor i of all layers: even i are scales, odd i are histories. */
static void delayed_tensor(st_tensor *t, char *name, int64_t i) {
    const struct delayed_row *r = &delayed_rows[i % DELAYED / 2];
    const int64_t length = i & 1 ? SCALE_HISTORY : 1;
    memset(t, 0, sizeof *t);
    snprintf(name, NAME_CAPACITY, "decoder.layers.%d.mlp.experts.%s._extra_state.%s_%s", (int)(i / DELAYED), r->linear,
             i & 1 ? "amax_history" : "scale", r->way);
    t->name = name;
    strcpy(t->dtype, "F32");
    if (i & 1) t->shape[t->rank++] = length;
    t->shape[t->rank++] = r->slots * opt.experts;
    t->bytes = length * r->slots * opt.experts * (int64_t)sizeof(float);
}

/* Copies such a tensor from or (load) to the layer's host side. The first row of a history holds the amaxes since the
   last update: between steps these are of weights only, and loading a checkpoint computes them again. */
static void delayed_move(const model *m, int64_t i, float *values, int load) {
    const struct delayed_row *r = &delayed_rows[i % DELAYED / 2];
    const layer *l = &m->layers[i / DELAYED];
    for (int64_t h = 0; h < (i & 1 ? SCALE_HISTORY : 1); h++)
        for (int64_t k = 0; k < r->slots * opt.experts; k++, values++) {
            const int used = k < r->used * opt.experts, kept = used && (!(i & 1) || h > 0);
            float *ours = floats(i & 1 ? &l->history : &l->scale) + (h * GMM_SLOTS + r->slot) * opt.experts + k;
            if (!load) *values = kept ? *ours : i & 1 ? 0.0f : 1.0f;
            else if (used) *ours = kept ? *values : 0.0f;
        }
}

typedef struct metadata_builder {
    st_pair pairs[OPTIONS + 8];
    char keys[OPTIONS + 8][48], values[OPTIONS + 8][48];
    int count;
} metadata_builder;

static void add_pair(metadata_builder *notes, const char *key, const char *format, ...) {
    va_list list;
    int i = notes->count++;
    snprintf(notes->keys[i], sizeof notes->keys[i], "%s", key);
    va_start(list, format);
    vsnprintf(notes->values[i], sizeof notes->values[i], format, list);
    va_end(list);
    notes->pairs[i].key = notes->keys[i];
    notes->pairs[i].value = notes->values[i];
}

/* Destinations of a plan's targets, in a file that is written (writer, begin, of) or in memory. */
typedef struct places {
    st_writer *writer;
    int64_t *begin;     /* of each target in the file that is written or read */
    const param **of;
    char **memory;
    st_error error;
} places;

static int place_in_memory(void *user, int64_t target, int64_t offset, const void *from, int64_t bytes) {
    const places *to = (const places *)user;
    memcpy(to->memory[target] + offset, from, (size_t)bytes);
    return 0;
}

/* The file has FC1's gate rows before its up rows, however shards hold them. */
static int place_in_file(void *user, int64_t target, int64_t offset, const void *from, int64_t bytes) {
    places *to = (places *)user;
    const param *p = to->of[target];
    const int64_t row = p->cols * (int64_t)sizeof(float);
    for (int64_t done = 0, n; done < bytes; done += n) {
        const int64_t in = (offset + done) % row;
        const int64_t at = p->block ? logical_row(p, (offset + done) / row) * row + in : offset + done;
        n = p->block && row - in < bytes - done ? row - in : bytes - done;
        if (!st_write(to->writer, to->begin[target] + at, (const char *)from + done, n, &to->error)) return 1;
    }
    return 0;
}

/* A checkpoint that training continues from; stays open, since options point into it. */
typedef struct checkpoint {
    st_file file;
    const char *path;
    int64_t glu_block;  /* of FC1's gate and up rows; 0 = gate rows first */
    int delayed;        /* made with delayed scaling, whose state it holds */
    resume_notes notes;
} checkpoint;

/* A matrix of the file, with FC1's gate rows first (`to`), or with its rows in the order of shards. */
static void read_matrix(const param *p, const checkpoint *c, const unsigned char *from, float *to, int as_held) {
    const int64_t rows = p->rows > 1 ? p->rows : p->cols, cols = p->rows > 1 ? p->cols : 1; /* a bias has one row */
    for (int64_t i = 0; i < rows; i++) {
        const int64_t at = blocked_row(rows, p->gated ? c->glu_block : 0, i) * cols * (int64_t)sizeof(float);
        memcpy(to + (as_held ? held_row(p, i) : i) * cols, from + at, (size_t)cols * sizeof(float));
    }
}

/* Copies this rank's shards of all sharded matrices to the destinations (`file` NULL), or out of a file, where whole
   ones begin at to->begin. 0 = failed, with to->error. */
static int move_shards(const model *m, const checkpoint *file, places *to) {
    enum { SCRATCH = 1 << 20 };
    const int64_t capacity = matrix_count(m);
    gmm_gtp_item *items = (gmm_gtp_item *)get((size_t)capacity * sizeof *items);
    gmm_gtp_stored *stored = (gmm_gtp_stored *)get((size_t)capacity * sizeof *stored);
    gmm_shard *shards = (gmm_shard *)get((size_t)m->param_count * 2 * sizeof *shards);
    char (*names)[NAME_CAPACITY] = (char (*)[NAME_CAPACITY])get((size_t)capacity * sizeof *names);
    void **owned = (void **)get((size_t)capacity * sizeof *owned);
    gmm_ckpt_part part = GMM_ZERO;
    gmm_ckpt_table *table;
    gmm_ckpt_plan *plan = NULL;
    gmm_ckpt_run run = GMM_ZERO;
    gmm_ckpt_report report = GMM_ZERO;
    gmm_error *error = &report.error;
    gmm_status status;
    int64_t n = 0, cursor = 0;
    status = gmm_ckpt_table_create(&table, NULL, error);
    if (status) die("%s", error->text);
    for (int set = 0; set < SETS; set++)
        for (int i = 0; i < m->param_count; i++) {
            const param *p = m->params[i];
            gmm_shard *own = &shards[2 * i], *whole = own + 1;
            if (!p->sharded) continue;
            *own = shard_of(m, p);
            own->dtype = GMM_F32; /* of masters and moments */
            *whole = *own;
            whole->gtp_size = whole->gtp_rank = 0;
            for (int e = 0; e < p->count; e++, n++) {
                gmm_ckpt_tensor t = GMM_ZERO;
                const void *values = set_values(p, set) + e * p->held * p->cols;
                const stored_param stored_as = stored_of(p, set);
                st_tensor named;
                stored_tensor(&stored_as, 0, e, &named, names[n], sizeof names[n]);
                if (file) values = file->file.data + to->begin[n];
                if (file && (p->block || (p->gated && file->glu_block))) { /* other rows than the file's */
                    owned[n] = get((size_t)(p->rows * p->cols) * sizeof(float));
                    read_matrix(p, file, (const unsigned char *)values, (float *)owned[n], 1);
                    values = owned[n];
                }
                t.name = names[n];
                t.dtype = GMM_F32;
                t.rank = 2;
                t.shape[0] = file ? p->rows : p->held;
                t.shape[1] = p->cols;
                t.bytes = t.shape[0] * t.shape[1] * (int64_t)sizeof(float);
                if (!status) status = gmm_ckpt_table_add_storage(table, values, t.bytes, &t.storage, error);
                if (!status) status = gmm_ckpt_table_add(table, &t, &report);
                stored[n].shard = file ? whole : own;
                stored[n].data = (int32_t)n;
                stored[n].scale = -1;
                items[n].name = names[n];
                items[n].shard = own;
                items[n].stored = &stored[n];
                items[n].stored_count = 1;
            }
        }
    part.table = table;
    if (!status) status = (file ? gmm_gtp_import : gmm_gtp_export)(&plan, &part, 1, items, n, NULL, &report);
    run.io.user = to;
    run.io.write = file ? place_in_memory : place_in_file;
    run.scratch = get(SCRATCH);
    run.scratch_bytes = SCRATCH;
    if (!status) status = gmm_ckpt_apply(plan, &run, &cursor, error);
    if (status && !*to->error.text) snprintf(to->error.text, sizeof to->error.text, "%s", error->text);
    gmm_ckpt_plan_destroy(plan);
    for (int64_t i = 0; i < n; i++)
        free(owned[i]);
    gmm_ckpt_table_destroy(table);
    free(owned);
    free(run.scratch);
    free(names);
    free(shards);
    free(stored);
    free(items);
    return status == GMM_OK;
}

/* The checkpoint's metadata. */
static void describe_run(metadata_builder *notes, const model *m, const text *t) {
    notes->count = 0;
    add_pair(notes, "format", "pt");
    add_pair(notes, "producer", "train_moe 1");
    add_pair(notes, "gmm.layout", "megatron");
    add_pair(notes, "gmm.glu_block", "0"); /* gate rows before up rows */
    add_pair(notes, "step", "%lld", (long long)m->step);
    add_pair(notes, "random", "%016llx", (unsigned long long)m->random);
    add_pair(notes, "text.bytes", "%lld", (long long)t->size);
    add_pair(notes, "text.hash", "%016llx", (unsigned long long)hash_text(t));
    for (int i = 0; i < OPTIONS; i++) {
        char key[48], value[48];
        if (!options[i].mark) continue;
        snprintf(key, sizeof key, "config.%s", options[i].name);
        option_text(&options[i], value, sizeof value);
        add_pair(notes, key, "%s", value);
    }
}

/* Whether no rank has an error; else all get the first one's. */
static int ranks_succeeded(const model *m, st_error *error) {
    st_error *all;
    if (!m->rank_group) return !*error->text;
    all = (st_error *)get((size_t)m->ranks * sizeof *all);
    rank_group_gather(m->rank_group, m->rank, error, all, sizeof *all);
    *error = all[0];
    for (int r = 1; r < m->ranks && !*error->text; r++) *error = all[r];
    free(all);
    return !*error->text;
}

/* Rank 0 creates the file, the others open it. 0 = it was not created; who cannot open it has an error. */
static int open_writer(const model *m, st_writer *writer, const char *path, st_tensor *tensors, int64_t count,
                       const metadata_builder *notes, st_error *error) {
    st_handle own, *all;
    memset(&own, 0, sizeof own);
    if (m->rank == 0 && st_create(writer, path, tensors, count, notes->pairs, notes->count, error) && m->rank_group &&
        !st_handle_of(writer, &own, error))
        st_abandon(writer);
    if (!ranks_succeeded(m, error)) return 0;
    if (!m->rank_group) return 1;
    all = (st_handle *)get((size_t)m->ranks * sizeof *all);
    rank_group_gather(m->rank_group, m->rank, &own, all, sizeof own);
    if (m->rank > 0) (void)st_join(writer, &all[0], error);
    free(all);
    return 1;
}

/* Writes a rank's part: its shards and, of rank 0, what every rank has. Tensors of delayed scaling stand last. */
static void write_part(const model *m, st_writer *writer, const st_tensor *delayed, st_error *error) {
    const size_t matrices = (size_t)matrix_count(m);
    places to = {writer, NULL, NULL, NULL, {""}};
    int64_t at = 0, sharded = 0;
    int ok = 1;
    to.begin = (int64_t *)get(matrices * sizeof *to.begin);
    to.of = (const param **)get(matrices * sizeof *to.of);
    for (int set = 0; set < SETS; set++)
        for (int i = 0; i < m->param_count; i++) {
            const param *p = m->params[i];
            const int64_t bytes = p->rows * p->cols * (int64_t)sizeof(float);
            for (int e = 0; e < p->count; e++, at += bytes) {
                if (p->sharded) {
                    to.of[sharded] = p;
                    to.begin[sharded++] = at;
                } else if (m->rank == 0)
                    ok = ok && st_write(writer, at, set_values(p, set) + e * p->rows * p->cols, bytes, error);
            }
        }
    for (int64_t i = 0; m->rank == 0 && ok && i < delayed_count(m); i++) {
        const int64_t bytes = delayed[i].bytes;
        float *values = (float *)get((size_t)bytes);
        if (i % DELAYED == 0) {
            buffer_pull(&m->mem, &m->layers[i / DELAYED].scale);
            buffer_pull(&m->mem, &m->layers[i / DELAYED].history);
        }
        delayed_move(m, i, values, 0);
        ok = st_write(writer, at, values, bytes, error);
        at += bytes;
        free(values);
    }
    if (ok && m->rank_group && !move_shards(m, NULL, &to)) *error = to.error;
    free(to.begin);
    free(to.of);
}

/* All ranks write the same file, each its part. */
static void save_checkpoint(const model *m, const text *t, const char *path) {
    const int64_t capacity = matrix_count(m) + delayed_count(m);
    st_tensor *tensors = (st_tensor *)get((size_t)capacity * sizeof *tensors);
    char (*names)[NAME_CAPACITY] = (char (*)[NAME_CAPACITY])get((size_t)capacity * sizeof *names);
    metadata_builder notes;
    st_writer writer;
    st_error error = {""};
    int64_t n = 0;
    int ok;
    describe_run(&notes, m, t);
    for (int set = 0; set < SETS; set++)
        for (int i = 0; i < m->param_count; i++) { /* the matrices of a parameter are consecutive, however named */
            const stored_param stored = stored_of(m->params[i], set);
            for (int k = 0; k < stored_tensors(&stored, grouped_keys()); k++, n++)
                stored_tensor(&stored, grouped_keys(), k, &tensors[n], names[n], sizeof names[n]);
        }
    for (int64_t i = 0; i < delayed_count(m); i++) delayed_tensor(&tensors[n + i], names[n + i], i);
    ok = open_writer(m, &writer, path, tensors, n + delayed_count(m), &notes, &error);
    if (ok) {
        if (!*error.text) write_part(m, &writer, tensors + n, &error);
        if (m->rank > 0) st_suspend(&writer);
        ok = ranks_succeeded(m, &error); /* all have written */
        if (m->rank == 0 && ok) (void)st_commit(&writer, &error);
        else if (m->rank == 0) st_abandon(&writer);
        ok = ok && ranks_succeeded(m, &error); /* no rank continues before the file is in place */
    }
    while (!ok && m->rank > 0) (void)pause(); /* rank 0 ends the program, with one message for all */
    if (!ok) die("saving %s: %s", path, error.text);
    free(names);
    free(tensors);
}

/* Reports before training that a checkpoint cannot be written there. */
static void try_saving(const char *path) {
    st_writer writer;
    st_error error;
    if (!st_create(&writer, path, NULL, 0, NULL, 0, &error)) die("saving %s: %s", path, error.text);
    st_abandon(&writer);
}

/* Opens a checkpoint and takes the model's options from it, before the model is made. */
static void open_checkpoint(checkpoint *c, const char *path) {
    const option *recipe = option_of(&opt.recipe);
    const char *made_by;
    st_error error;
    int delays;
    memset(c, 0, sizeof *c);
    c->path = path;
    if (!st_open(&c->file, path, &error)) die("%s: %s", path, error.text);
    if (!resume_layout(&c->file, path, "train_moe 1", &c->glu_block, &error) ||
        !resume_options(options, OPTIONS, &c->file, path, &c->notes, &error))
        die("%s", error.text);
    if (c->glu_block && gmm_act_gated(act_of(opt.act).kind) && opt.ffn % c->glu_block)
        die("%s: gmm.glu_block %lld does not divide config.ffn %lld", path, (long long)c->glu_block,
            (long long)opt.ffn);
    made_by = st_metadata(&c->file, "config.recipe");
    c->delayed = opt.layers && !strcmp(made_by ? made_by : recipe->initial, "fp8-delayed");
    delays = opt.layers && !strcmp(opt.recipe, "fp8-delayed");
    if (delays && !c->delayed)
        resume_note(&c->notes, "delayed scaling starts as in a new run, with scales of 1 and empty amax histories\n");
    if (c->delayed && !delays)
        resume_note(&c->notes, "the scales and amax histories of delayed scaling are not carried over\n");
}

/* Without --micro-batches there is one for each rank if the number of ranks does not divide the default or, with notes,
   the checkpoint's number. */
static void fit_micro_batches(resume_notes *notes) {
    const long long was = (long long)opt.micro_batches;
    if (!opt.gtp || opt.micro_batches % opt.gtp == 0 || option_of(&opt.micro_batches)->given) return;
    opt.micro_batches = opt.gtp;
    if (!notes) return;
    if (opt.batch % opt.gtp)
        die("--gtp %lld: the checkpoint's --micro-batches %lld is no multiple of it, and its --batch %lld is not "
            "divisible by it", (long long)opt.gtp, was, (long long)opt.batch);
    resume_note(notes, "micro-batches: %lld in the checkpoint, %lld from here on, one for each rank\n", was,
                (long long)opt.gtp);
}

static uint64_t metadata_number(const st_file *file, const char *path, const char *key, int base) {
    const char *text = st_metadata(file, key);
    char *end = NULL;
    uint64_t value;
    errno = 0;
    value = text ? strtoull(text, &end, base) : 0;
    if (!text || errno || end == text || *end || *text == '-') die("%s: the checkpoint has no valid \"%s\"", path, key);
    return value;
}

/* Masters and moments, stored with a tensor for each expert or with one for all. */
static void load_matrices(model *m, const checkpoint *c, char *used) {
    const size_t matrices = (size_t)matrix_count(m);
    places to = {NULL, NULL, NULL, NULL, {""}};
    int64_t sharded = 0, begin;
    to.memory = (char **)get(matrices * sizeof *to.memory);
    to.begin = (int64_t *)get(matrices * sizeof *to.begin);
    for (int set = 0; set < SETS; set++)
        for (int i = 0; i < m->param_count; i++)
            for (int e = 0; e < m->params[i]->count; e++) {
                const param *p = m->params[i];
                const stored_param stored = stored_of(p, set);
                float *values = set_values(p, set) + e * p->held * p->cols;
                if (!stored_find(&c->file, c->path, &stored, e, used, &begin, &to.error)) die("%s", to.error.text);
                if (p->sharded) {
                    to.begin[sharded] = begin;
                    to.memory[sharded++] = (char *)values;
                } else {
                    read_matrix(p, c, c->file.data + begin, values, 0);
                }
            }
    if (m->rank_group && !move_shards(m, c, &to)) die("%s: %s", c->path, to.error.text);
    free(to.memory);
    free(to.begin);
}

/* The state of delayed scaling; a run without it leaves what the file holds of it. */
static void load_delayed(model *m, const checkpoint *c, char *used) {
    char name[NAME_CAPACITY];
    for (int64_t i = 0; c->delayed && i < opt.layers * DELAYED; i++) {
        const layer *l = &m->layers[i / DELAYED];
        const st_tensor *found;
        st_tensor t;
        float *values;
        delayed_tensor(&t, name, i);
        found = st_find(&c->file, name);
        if (found) used[found - c->file.tensors] = 1;
        if (!m->recipe.input.delayed) continue;
        if (!found) die("%s: the checkpoint lacks the tensor %s", c->path, name);
        if (strcmp(found->dtype, t.dtype) || found->rank != t.rank ||
            memcmp(found->shape, t.shape, (size_t)t.rank * sizeof t.shape[0]))
            die("%s: %s is not an F32 tensor of %lld x %lld", c->path, name, t.rank > 1 ? (long long)t.shape[0] : 1LL,
                (long long)t.shape[t.rank - 1]);
        values = (float *)get((size_t)t.bytes);
        memcpy(values, c->file.data + found->begin, (size_t)t.bytes);
        delayed_move(m, i, values, 1);
        free(values);
        if (i % DELAYED != DELAYED - 1) continue;
        buffer_push(&m->mem, &l->scale);
        buffer_push(&m->mem, &l->history);
    }
}

static void load_checkpoint(model *m, const text *t, const checkpoint *c) {
    const st_file *file = &c->file;
    char *used = (char *)get((size_t)file->count);
    st_error error;
    if (metadata_number(file, c->path, "text.bytes", 10) != (uint64_t)t->size ||
        metadata_number(file, c->path, "text.hash", 16) != hash_text(t))
        die("%s: the checkpoint was trained on another text (of %s bytes, this one has %lld)", c->path,
            st_metadata(file, "text.bytes"), (long long)t->size);
    load_matrices(m, c, used);
    load_delayed(m, c, used);
    if (!stored_all_used(file, c->path, used, &error)) die("%s", error.text);
    free(used);
    m->step = (int64_t)metadata_number(file, c->path, "step", 10);
    m->random = metadata_number(file, c->path, "random", 16);
    if (m->step < 0 || m->step > opt.steps)
        die("%s: the checkpoint is at step %lld of %lld", c->path, (long long)m->step, (long long)opt.steps);
    params_publish(m);
    shards_publish(m);
}

/* -------------------------------------------------------------------------------------------------- 11 Reports --- */

typedef struct history {
    double *step, *train, *held_out;
    int count, capacity;
} history;

static void history_add(history *h, double step, double train, double held_out) {
    if (h->count == h->capacity) {
        h->capacity = h->capacity * 2 + 64;
        h->step = (double *)realloc(h->step, (size_t)h->capacity * sizeof(double));
        h->train = (double *)realloc(h->train, (size_t)h->capacity * sizeof(double));
        h->held_out = (double *)realloc(h->held_out, (size_t)h->capacity * sizeof(double));
        if (!h->step || !h->train || !h->held_out) die("out of memory");
    }
    h->step[h->count] = step;
    h->train[h->count] = train;
    h->held_out[h->count++] = held_out;
}

static double layer_load(const double *load, int layer) {
    double sum = 0;
    for (int e = 0; e < opt.experts; e++) sum += load[layer * opt.experts + e];
    return sum;
}

/* Smallest and largest fraction of a layer's tokens that an expert gets. */
static void load_range(const double *load, double *low, double *high) {
    *low = 1;
    *high = 0;
    for (int i = 0; i < opt.layers; i++) {
        const double sum = layer_load(load, i);
        for (int e = 0; e < opt.experts && sum > 0; e++) {
            double share = load[i * opt.experts + e] / sum;
            *low = share < *low ? share : *low;
            *high = share > *high ? share : *high;
        }
    }
}

/* One bar per expert: its fraction of tokens relative to an even split (half height); layers are separated. */
static void load_bars(const double *load, char *to, size_t size) {
    static const char *const bars[] = {"\u2581", "\u2582", "\u2583", "\u2584", "\u2585", "\u2586", "\u2587", "\u2588"};
    size_t used = 0;
    *to = 0;
    for (int i = 0; i < opt.layers; i++) {
        const double sum = layer_load(load, i);
        for (int e = 0; e < opt.experts && used + 8 < size; e++) {
            int height = sum > 0 ? (int)(load[i * opt.experts + e] / sum * (double)opt.experts * 4) : 0;
            used += (size_t)snprintf(to + used, size - used, "%s", bars[height > 7 ? 7 : height]);
        }
        if (i + 1 < opt.layers && used + 8 < size) used += (size_t)snprintf(to + used, size - used, " ");
    }
}

static void print_load(const double *load) {
    for (int i = 0; i < opt.layers; i++) {
        const double sum = layer_load(load, i);
        printf("layer %d, load per expert in %%:", i);
        for (int e = 0; e < opt.experts; e++)
            printf(" %.1f", sum > 0 ? 100 * load[i * opt.experts + e] / sum : 0.0);
        printf("\n");
    }
}

static void write_svg(const history *h, const double *load, double bigram_loss, const char *path) {
    svg_box losses = {0, 0, 760, 400}, bars = {0, 400, 760, 280};
    double ends[2], level[2];
    svg_series series[3] = {{"training", "#4477aa", 0, 0, NULL, NULL}, {"held-out", "#ee6677", 0, 0, NULL, NULL},
                            {"bigram, held-out", "#777777", 1, 0, NULL, NULL}};
    double *shares = (double *)get((size_t)(opt.layers * opt.experts + 1) * sizeof *shares);
    FILE *out;
    make_folder_of(path);
    out = fopen(path, "w");
    if (!out) die("cannot write %s: %s", path, strerror(errno));
    series[0].x = series[1].x = h->step;
    series[0].y = h->train;
    series[1].y = h->held_out;
    series[0].count = series[1].count = h->count;
    if (h->count) {
        ends[0] = h->step[0];
        ends[1] = h->step[h->count - 1];
        level[0] = level[1] = bigram_loss;
        series[2].x = ends;
        series[2].y = level;
        series[2].count = 2;
    }
    for (int i = 0; i < opt.layers; i++) {
        const double sum = layer_load(load, i);
        for (int e = 0; e < opt.experts; e++)
            shares[i * opt.experts + e] = sum > 0 ? load[i * opt.experts + e] / sum : 0;
    }
    svg_begin(out, 760, opt.layers ? 680 : 400);
    svg_lines(out, losses, "Loss", "step", "nats per byte", series, 3);
    if (opt.layers)
        svg_bars(out, bars, "Load per expert", "layer", "share of tokens", shares, (int)opt.layers, (int)opt.experts,
                 1 / (double)opt.experts);
    svg_end(out);
    if (fclose(out)) die("cannot write %s: %s", path, strerror(errno));
    free(shares);
}

static void describe(const model *m, const text *t) {
    double all = 0, active = 0;
    for (int i = 0; i < m->param_count; i++) {
        double n = (double)(m->params[i]->rows * m->params[i]->cols);
        all += n * m->params[i]->count;
        active += n * (double)(m->params[i]->indexed ? opt.topk : 1);
    }
    printf("text: %lld bytes (%lld %s %s), the last %lld held out\n", (long long)t->size, (long long)t->files,
           t->files == 1 ? "file," : "files of", t->from, (long long)(t->size - t->train));
    printf("model: %.0f parameters, %.0f per token; %lld layers of %lld experts, top %lld, %s, %s\n", all, active,
           (long long)opt.layers, (long long)opt.experts, (long long)opt.topk, opt.act, opt.dtype);
    printf("engine: %s; %s\n", gmm_engine_name(m->engine), m->place);
    if (m->rank_group) {
        gmm_gtp_need need = GMM_ZERO;
        (void)gmm_gtp_memory_need(m->gtp, 0, &need);
        printf("gtp: %d ranks on %s; %.0f kB of gather buffers and %.0f kB of gradient buffers each\n", m->ranks,
               m->rank_group->gpus ? "GPUs" : "the CPU",
               1e-3 * (double)need.gather_bytes, 1e-3 * (double)need.reduce_bytes);
    }
    if (opt.layers && m->recipe.kind != GMM_RECIPE_NONE)
        printf("experts: %s; a block saves %.0f kB for backward, and caches %.0f kB of quantized weights\n", opt.recipe,
               1e-3 * (double)m->layers[0].saved.bytes, 1e-3 * (double)m->layers[0].weight_cache.bytes);
    printf("training: %lld steps of %lld tokens in %lld micro-batches\n", (long long)opt.steps, (long long)opt.batch,
           (long long)opt.micro_batches);
}

/* ----------------------------------------------------------------------------------------------------- 12 main --- */

/* Returns 1 if training was stopped before its last step, else 0. */
static int train(model *m, const text *t, history *h, double *load_all) {
    int64_t last = opt.stop_at && opt.stop_at < opt.steps ? opt.stop_at : opt.steps;
    int64_t every = opt.report_every ? opt.report_every : opt.steps / 20;
    int64_t loads = opt.layers * opt.experts, held = t->size - t->train, subset = held < 4096 ? held : 4096;
    int64_t *positions = (int64_t *)get((size_t)m->tokens * sizeof *positions);
    const int quiet = opt.quiet || m->rank > 0;
    progress bar = progress_begin(stdout, m->step, last, quiet);
    double since = progress_seconds(), held_out = 0, spent = 0;
    char status[512], bars[256];
    tally now = {0, 0, 0, NULL, 0, 0};
    now.load = (double *)get((size_t)(loads + 1) * sizeof(double));
    every = every ? every : 1;
    while (m->step < last) {
        double low, high, speed;
        int report;
        train_step(m, t, positions, &now);
        if (now.stop && m->step < last) break;
        report = m->step % every == 0 || m->step == last;
        speed = (double)(now.steps * opt.batch) / (progress_seconds() - since);
        load_range(now.load, &low, &high);
        if (bar.terminal) {
            char known[16] = "-";
            if (h->count) snprintf(known, sizeof known, "%.3f", held_out);
            load_bars(now.load, bars, sizeof bars);
            snprintf(status, sizeof status, "step %lld train %.3f held-out %s %.0f tok/s load %s %.0f-%.0f%%"
                     " aux %.4f", (long long)m->step, now.loss / (double)now.steps, known, speed, bars, 100 * low,
                     100 * high, now.aux / (double)now.steps);
            progress_update(&bar, m->step, status);
        }
        if (report) {
            double began = progress_seconds();
            held_out = evaluate(m, t, subset);
            history_add(h, (double)m->step, now.loss / (double)now.steps, held_out);
            if (!quiet && !bar.terminal) {
                printf("step %6lld/%lld  train %.4f  held-out %.4f  aux %.4f  gradient %.4f  tokens/s %.0f  "
                       "load %.1f-%.1f%%\n", (long long)m->step, (long long)opt.steps,
                       now.loss / (double)now.steps, held_out, now.aux / (double)now.steps,
                       now.grad_norm / (double)now.steps, speed, 100 * low, 100 * high);
                fflush(stdout);
            }
            for (int64_t i = 0; i < loads; i++) {
                load_all[i] += now.load[i];
                now.load[i] = 0;
            }
            now.loss = now.aux = now.grad_norm = 0;
            now.steps = 0;
            spent += progress_seconds() - began;
            since = progress_seconds();
        }
        if (*opt.save && opt.save_every && m->step % opt.save_every == 0 && m->step < last)
            save_checkpoint(m, t, opt.save);
    }
    progress_clear(&bar);
    if (!quiet) printf("trained in %.1f s, of which %.1f s evaluation\n", progress_seconds() - bar.began, spent);
    free(now.load);
    free(positions);
    return m->step < last;
}

/* Prints a word as a shell reads it. */
static void print_quoted(const char *word) {
    static const char plain_ones[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_./+-";
    const int plain = *word && !word[strspn(word, plain_ones)];
    if (!plain) putchar('\'');
    for (const char *at = word; *at; at++)
        if (*at == '\'') fputs("'\\''", stdout);
        else putchar(*at);
    if (!plain) putchar('\'');
}

/* Prints the command that continues from a checkpoint, without the options that the checkpoint records. */
static void print_command(const char *program, const char *path) {
    print_quoted(program);
    printf(" --resume ");
    print_quoted(path);
    for (int i = 0; i < OPTIONS; i++) {
        const option *o = &options[i];
        const int text = o->kind == OPTION_TEXT || o->kind == OPTION_CHOICE;
        char number[64];
        if (!o->given || o->mark || o->value == &opt.resume) continue;
        if (!text) option_text(o, number, sizeof number);
        if (o->kind == OPTION_SWITCH && !strcmp(number, "0")) continue;
        printf(" --%s", o->name);
        if (o->kind == OPTION_SWITCH) continue;
        putchar(' ');
        print_quoted(text ? *(const char *const *)o->value : number);
    }
    printf("\n");
}

/* Saves a stopped run, and prints the command that continues it. */
static void save_stopped(model *m, const text *t, const char *program) {
    const char *path = *opt.save ? opt.save : stopped_file, *lacks = st_missing();
    if (!lacks && m->rank == 0) make_folder_of(path);
    if (!lacks) save_checkpoint(m, t, path);
    if (m->rank > 0) return;
    printf("stopped after step %lld of %lld; ", (long long)m->step, (long long)opt.steps);
    if (lacks) {
        printf("nothing was saved: %s\n", lacks);
        return;
    }
    printf("saved %s, continue with\n", path);
    print_command(program, path);
}

/* Distance of the gradients of m's last step from the reference: the largest norm of a parameter's difference, relative
   to its norm in the reference. */
static double gradient_distance(const model *m, const model *reference, const param **worst) {
    double most = -1;
    for (int i = 0; i < m->param_count; i++) {
        const param *p = m->params[i], *r = reference->params[i];
        double square = 0, all = 0, share;
        for (int e = 0; e < p->count; e++)
            for (int64_t k = 0; k < p->rows * p->cols; k++) {
                const double g = floats(&p->grad_halves[e])[k], wanted = floats(&r->grad_halves[e])[k];
                square += (g - wanted) * (g - wanted);
                all += wanted * wanted;
            }
        share = square == 0 ? 0 : sqrt(square / all);
        if (share <= most) continue;
        most = share;
        *worst = p;
        if (share != share) break; /* NaN counts as the largest distance */
    }
    return most;
}

/* Trains beside the CPU engine, every step from the reference's state, so that what rounding does to one step does not
   grow over many. Ends the program where the two are further apart than the bounds. These admit what happens if every
   weight changes at random by 1%: a token with two nearly equal second experts takes the other one, which moves a
   router's gradient by 0.2 of its norm, in NVFP4 by 0.4, and losses by 0.0005. A contribution left out moves a gradient
   by 0.6 to 1 of its norm. */
static void compare(const text *t) {
    model *m = (model *)get(sizeof *m), *reference = (model *)get(sizeof *reference);
    const gmm_engine engine = engine_of(opt.engine);
    const memory mem = memory_of(engine);
    const int on_cpu = mem.space == GMM_SPACE_CPU;
    const double bound = on_cpu ? 0 : !strcmp(opt.recipe, "nvfp4") ? 0.5 : 0.25, loss_bound = on_cpu ? 0 : 0.002;
    const int64_t held = t->size - t->train, n = opt.eval_tokens && opt.eval_tokens < held ? opt.eval_tokens : held;
    int64_t *positions;
    const size_t loads = (size_t)(opt.layers * opt.experts + 1);
    model_make(m, NULL, 0, engine, on_cpu ? cpu_memory_apart : mem);
    model_make(reference, NULL, 0, GMM_ENGINE_CPU, cpu_memory);
    positions = (int64_t *)get((size_t)m->tokens * sizeof *positions);
    if (!opt.quiet) describe(m, t);
    while (m->step < opt.steps) {
        tally ours = {0, 0, 0, NULL, 0, 0}, theirs = {0, 0, 0, NULL, 0, 0};
        const param *worst = NULL;
        double gradients, trained, held_out, held_ours, held_reference;
        ours.load = (double *)get(loads * sizeof *ours.load);
        theirs.load = (double *)get(loads * sizeof *theirs.load);
        train_step(m, t, positions, &ours);
        train_step(reference, t, positions, &theirs);
        gradients = gradient_distance(m, reference, &worst);
        for (int i = 0; i < m->param_count; i++)
            for (int set = 0; set < SETS; set++) {
                const param *p = m->params[i];
                memcpy(set_values(p, set), set_values(reference->params[i], set),
                       (size_t)(p->count * p->rows * p->cols) * sizeof(float));
            }
        params_publish(m);
        held_ours = evaluate(m, t, n);
        held_reference = evaluate(reference, t, n);
        trained = fabs(ours.loss / theirs.loss - 1);
        held_out = fabs(held_ours / held_reference - 1);
        printf("step %lld/%lld  train %.5f, CPU %.5f  held-out %.5f, CPU %.5f  gradients %.5f apart (%s)\n",
               (long long)m->step, (long long)opt.steps, ours.loss, theirs.loss, held_ours, held_reference, gradients,
               worst->name);
        if (!(gradients <= bound && trained <= loss_bound && held_out <= loss_bound))
            die("--compare: gradients are %.3g apart, losses %.3g and %.3g; the bounds are %g and %g", gradients,
                trained, held_out, bound, loss_bound);
        free(ours.load);
        free(theirs.load);
    }
    printf("every step: gradients within %g of the CPU engine's, losses within %g\n", bound, loss_bound);
    gmm_destroy(m->ctx);
    gmm_destroy(reference->ctx);
}

/* Arguments of a rank's thread or process. */
typedef struct job {
    const text *text;
    const rank_group *rank_group; /* NULL = one rank, nothing sharded */
    const checkpoint *resumed; /* NULL = trained from the start */
    const char *program; /* argv[0] */
    int rank;
    int stopped;         /* out: training was stopped before its end */
} job;

static void *work(void *argument) {
    job *j = (job *)argument;
    const text *t = j->text;
    model *m = (model *)get(sizeof *m);
    history h = {NULL, NULL, NULL, 0, 0};
    int64_t n = t->size - t->train;
    double held_out, bigram_loss, *load = (double *)get((size_t)(opt.layers * opt.experts + 1) * sizeof *load);
    const int quiet = opt.quiet || j->rank > 0;
    const gmm_engine engine = engine_of(opt.engine);
#ifdef HAVE_CUDA
    if (j->rank_group && j->rank_group->gpus) cuda_check(cudaSetDevice(j->rank % j->rank_group->gpus));
#endif
    model_make(m, j->rank_group, j->rank, engine,
               j->rank_group && !j->rank_group->gpus ? cpu_memory : memory_of(engine));
    if (j->resumed) load_checkpoint(m, t, j->resumed);
    if (*opt.save && j->rank == 0) try_saving(opt.save);
    if (!quiet) describe(m, t);
    if (!quiet && j->resumed)
        printf("resumed %s after step %lld of %lld\n%s", opt.resume, (long long)m->step, (long long)opt.steps,
               j->resumed->notes.text);
    j->stopped = train(m, t, &h, load);
    if (j->stopped) save_stopped(m, t, j->program);
    else if (*opt.save) save_checkpoint(m, t, opt.save);
    /* Nothing is left to save, so signals end the program again; one that was stopped ends by itself. */
    if (j->rank == 0 && !j->stopped) stop_catch(0, 0);

    if (opt.eval_tokens && opt.eval_tokens < n) n = opt.eval_tokens;
    held_out = j->stopped ? 0 : evaluate(m, t, n);
    if (!quiet && !j->stopped) print_load(load);
    if (!opt.quiet && !j->stopped && opt.sample) print_sample(m, t);
    if (j->rank == 0 && !j->stopped) {
        bigram_loss = bigram(t, n);
        if (m->rank_group && !quiet) {
            gmm_gtp_statistics s = GMM_ZERO;
            check_gtp(m, gmm_gtp_statistics_of(m->gtp, &s));
            printf("gtp: %.1f%% of %lld acquires found their weights gathered ahead, %.1f%% still there; each rank "
                   "received %.1f MB of weights, %.1f MB of gradients\n",
                   100 * (double)s.prefetched / (double)s.acquires, (long long)s.acquires,
                   100 * (double)s.resident / (double)s.acquires, 1e-6 * (double)s.gathered_bytes,
                   1e-6 * (double)s.reduced_bytes);
        }
        if (*opt.svg) {
            write_svg(&h, load, bigram_loss, opt.svg);
            if (!quiet) printf("losses and expert load: %s\n", opt.svg);
        }
        printf("held-out %.4f nats/byte, bigram %.4f nats/byte\n", held_out, bigram_loss);
    }
#ifdef HAVE_CUDA
    polled_gtp = NULL;
#endif
    if (m->gtp) check_gtp(m, gmm_gtp_fini(m->gtp));
    for (int i = 0; i < 2; i++) gmm_peers_close(&m->peers[i]);
    gmm_destroy(m->gtp_ctx);
    gmm_destroy(m->ctx);
    return NULL;
}

/* CPU threads of a rank: one if ranks compute on the CPU, otherwise its share of the processors, for AdamW. */
static int threads_of_rank(void) {
    int threads = 1;
#ifdef _OPENMP
    if (engine_of(opt.engine) != GMM_ENGINE_CPU) threads = omp_get_num_procs() / (int)opt.gtp;
#endif
    return threads > 1 ? threads : 1;
}

/* Runs one thread per rank, or rank `first.rank` in a process of its own. Returns whether training was stopped. */
static int run_ranks(job first, rendezvous *own_rendezvous) {
#ifdef GMM_WITH_CPU_RANKS
    const int gpus = memory_of(engine_of(opt.engine)).space == GMM_SPACE_CUDA ? gpu_count() : 0;
    rank_group together = rank_group_make((int)opt.gtp, gpus, own_rendezvous);
    pthread_t threads[64];
    job jobs[64];
    first.rank_group = &together;
    if (own_rendezvous) {
        (void)work(&first);
        return first.stopped;
    }
    for (int i = 0; i < together.size; i++) {
        jobs[i] = first;
        jobs[i].rank = i;
        if (pthread_create(&threads[i], NULL, work, &jobs[i])) die("--gtp: no thread for rank %d", i);
    }
    for (int i = 0; i < together.size; i++) (void)pthread_join(threads[i], NULL);
    gmm_ranks_destroy(together.ranks);
    return jobs[0].stopped;
#else
    (void)first, (void)own_rendezvous;
    die("--gtp: this build has no CPU ranks (GMM_WITH_CPU_RANKS)");
    return 0;
#endif
}

/* Checks that a step divides into micro-batches, and these into ranks; nothing else has to divide. */
static void check_batch(void) {
    const long long batch = (long long)opt.batch, parts = (long long)opt.micro_batches, ranks = (long long)opt.gtp;
    const long long more = (batch / parts + 1) * parts;
    if (ranks && parts % ranks)
        die("--micro-batches %lld is no multiple of --gtp %lld, whose ranks share them", parts, ranks);
    if (batch % parts == 0) return;
    if (ranks && parts == ranks && !option_of(&opt.micro_batches)->given)
        die("--gtp %lld: --batch %lld is not divisible by %lld, a micro-batch for each rank: try --batch %lld. Layers, "
            "experts, hidden and ffn need not be divisible", ranks, batch, parts, more);
    die("--batch %lld is not divisible by --micro-batches %lld: try --batch %lld", batch, parts, more);
}

/* Refuses values without effect. Those of a checkpoint have been accepted before. */
static void check_effects(void) {
    if (opt.save_every && !*opt.save) die("--save-every says when --save FILE is written: not without --save");
    if (opt.processes && !opt.gtp) die("--processes is for the ranks of --gtp: not without --gtp");
    if (option_of(&opt.dropout)->given && opt.dropout > 0 && opt.dropout < 1.0 / 256)
        die("--dropout %g hides nothing: it is rounded down to a multiple of 1/256 (%g)", opt.dropout, 1.0 / 256);
}

int main(int argc, char **argv) {
    checkpoint resumed;
    option_error error;
    text t;
    rendezvous *own_rendezvous = NULL;
    job whole;
    int rank = 0;
    program_name = "train_moe";
    if (!options_parse(options, OPTIONS, argc, argv, &error)) die("%s", error.text);
    if (opt.help) {
        print_help();
        return 0;
    }
    check_effects();
    if (!opt.compare) stop_catch(1, SA_RESTART);
#ifdef GMM_WITH_CPU_RANKS
    if (opt.gtp && opt.processes) rank = rendezvous_begin((int)opt.gtp, &own_rendezvous);
#endif
    /* Threads with a GPU each: lazy loading of a kernel at its first launch may wait for other GPUs, as allocations do;
       see pause_ranks. */
    if (opt.gtp && !opt.processes) (void)setenv("CUDA_MODULE_LOADING", "EAGER", 0);
    if (opt.gtp) {
        const int gpus = gpu_count();
        const int threads_fit = gpus >= opt.gtp;
        if (opt.processes && !gpus) die("--processes is for ranks on GPUs, and there is none");
        if (engine_of(opt.engine) == GMM_ENGINE_AUTO && !threads_fit && !opt.processes) opt.engine = "cpu";
        if (opt.processes && engine_of(opt.engine) == GMM_ENGINE_CPU)
            die("--processes is for ranks on GPUs: not with --engine cpu, whose ranks are threads");
        if (engine_of(opt.engine) != GMM_ENGINE_CPU && !threads_fit && !opt.processes)
            die("--gtp %lld with --engine %s needs as many GPUs, there are %d%s", (long long)opt.gtp, opt.engine, gpus,
                gpus ? ": several ranks use one with --processes" : "");
        if (!opt.threads) opt.threads = threads_of_rank(); /* of each rank */
    }
    if (!opt.compare && memory_of(engine_of(opt.engine)).space == GMM_SPACE_CUDA) take_gpu_defaults();
    if ((*opt.save || *opt.resume) && st_missing()) die("%s", st_missing());
    if (*opt.resume) open_checkpoint(&resumed, opt.resume);
    fit_micro_batches(*opt.resume ? &resumed.notes : NULL);
    check_batch();
    if (option_of(&opt.backward)->given && !strcmp(opt.recipe, "bf16") && strcmp(opt.backward, "recipe"))
        die("--backward %s is for the quantized experts of a --recipe: not with bf16", opt.backward);
    if (opt.gtp && strcmp(opt.recipe, "bf16") && strcmp(opt.backward, "recipe"))
        die("--gtp gathers for backward what its recipe multiplies: not with --backward %s", opt.backward);
    if (opt.compare && (opt.gtp || *opt.save || *opt.resume))
        die("--compare trains one rank from the start and saves nothing: not with --gtp, --save, --resume");
    t = read_text(argv[0]);
    if (t.train <= opt.context || t.size - t.train < 1)
        die("the text of %lld bytes is too short for a context of %lld", (long long)t.size, (long long)opt.context);
    memset(&whole, 0, sizeof whole);
    whole.text = &t;
    whole.resumed = *opt.resume ? &resumed : NULL;
    whole.program = argv[0];
    whole.rank = rank;
    if (opt.compare) compare(&t);
    else if (opt.gtp) whole.stopped = run_ranks(whole, own_rendezvous);
    else (void)work(&whole);
    if (*opt.resume) st_close(&resumed.file);
    free(t.bytes);
    return whole.stopped ? stop_code() : 0;
}
