/* test_main.c - runs the cases of tests/test_*.c; see test.h */
#define _GNU_SOURCE /* mmap's MAP_ANONYMOUS and MAP_NORESERVE, sysconf, fork */
#include "harness.h"
#ifdef HAVE_CUDA
#include "device.h"
#endif

#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

_Thread_local t_state T;

_Thread_local struct t_harness H;
struct t_tally *t_tally;

/* ------------------------------------------------------------------------------------------------------ Cases --- */

static void t_append(void (*run)(int), int arg, int where, const char *name, va_list list) {
    t_case *c;
    if (H.count == H.capacity) {
        H.capacity = H.capacity ? 2 * H.capacity : 256;
        H.cases = (t_case *)realloc(H.cases, H.capacity * sizeof *H.cases);
        if (!H.cases) abort();
    }
    c = &H.cases[H.count++];
    c->run = run;
    c->arg = arg;
    c->where = where;
    c->family = H.family;
    c->bytes = 0;
    c->weight = 0;
    (void)vsnprintf(c->name, sizeof c->name, name, list);
}

void t_add(void (*run)(int), int arg, const char *name, ...) {
    va_list list;
    va_start(list, name);
    t_append(run, arg, T_ANY_ENGINE, name, list);
    va_end(list);
}

void t_add_host(void (*run)(int), int arg, const char *name, ...) {
    va_list list;
    va_start(list, name);
    t_append(run, arg, T_HOST_ONLY, name, list);
    va_end(list);
}

void t_add_gpu(void (*run)(int arg), int arg, const char *name, ...) {
    va_list list;
    va_start(list, name);
    t_append(run, arg, T_GPU_ENGINE, name, list);
    va_end(list);
}

void t_add_gpu_once(void (*run)(int arg), int arg, const char *name, ...) {
    va_list list;
    va_start(list, name);
    t_append(run, arg, T_GPU_ONCE, name, list);
    va_end(list);
}

void t_add_gpu_alone(void (*run)(int arg), int arg, const char *name, ...) {
    va_list list;
    va_start(list, name);
    t_append(run, arg, T_GPU_ALONE, name, list);
    va_end(list);
}

void t_needs(size_t bytes) { H.cases[H.count - 1].bytes = bytes; }
void t_random(int weight) { H.cases[H.count - 1].weight = weight; }

/* ----------------------------------------------------------------------------------------------------- Random --- */

/* splitmix64 */
uint64_t t_rand(void) {
    uint64_t z = (H.random += 0x9E3779B97F4A7C15u);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}
int64_t t_int(int64_t low, int64_t high) { return low + (int64_t)(t_rand() % (uint64_t)(high - low + 1)); }
double t_real(void) { return (double)(t_rand() >> 11) * 0x1p-52 - 1.0; }
void t_reseed(uint64_t seed) { H.random = H.seed ^ (seed * 0xD1342543DE82EF95u); }

uint64_t t_hash(const void *data, size_t bytes, uint64_t h) {
    const unsigned char *p = (const unsigned char *)data;
    for (; bytes >= 8; bytes -= 8, p += 8) {
        uint64_t word;
        memcpy(&word, p, 8);
        h = (h ^ word) * 0x9E3779B97F4A7C15u;
        h ^= h >> 29;
    }
    for (; bytes; bytes--) h = (h ^ *p++) * 0x100000001B3u;
    return h;
}

/* -------------------------------------------------------------------------------------------------------- Main --- */

#define X(name) void tests_##name(void);
T_FILES(X)
#undef X
#ifdef T_PARTIAL
#define X(name) extern void tests_##name(void) __attribute__((weak));
T_FILES(X)
#undef X
#endif

static int t_by_name(const void *a, const void *b) {
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

/* Adds the cases of all files. Names tell cases apart and stand in quotes in a shell; 2 where one cannot. */
static int t_register(void) {
    const char **names;
    int status = 0;
#ifdef T_PARTIAL
#define X(name) H.family = T_FAMILY_##name; if (tests_##name) tests_##name();
#else
#define X(name) H.family = T_FAMILY_##name; tests_##name();
#endif
    T_FILES(X)
#undef X
    names = (const char **)malloc(H.count * sizeof *names + 1);
    if (!names) abort();
    for (size_t i = 0; i < H.count; i++) names[i] = H.cases[i].name;
    qsort(names, H.count, sizeof *names, t_by_name);
    for (size_t i = 0; i < H.count; i++) {
        const int twice = i > 0 && !strcmp(names[i], names[i - 1]);
        if (!twice && !strchr(names[i], '\'') && strlen(names[i]) + 1 < sizeof H.cases[0].name) continue;
        fprintf(stderr, "tests: %s: %s\n", twice ? "two cases of one name" : "a name too long, or with an apostrophe",
                names[i]);
        status = 2;
    }
    free(names);
    return status;
}

/* Ends what t_alone began. */
static void t_together(void) {
    long mine = (long)getpid();
    (void)atomic_compare_exchange_strong(&t_tally->alone, &mine, 0);
}

static struct t_harness *first_harness; /* of the thread that started the program */

#if !defined(__SANITIZE_ADDRESS__)
/* Signal handler: a read or write outside of a buffer, or a write to an input; the process cannot continue. A thread
   that runs no case is one of OpenMP's: it belongs to the case of the first thread, as far as is known. */
static void t_crashed(int signal_number) {
    if (!H.running && first_harness) H = *first_harness;
    t_report_crash(signal_number == SIGSEGV ? "memory outside a buffer was touched, or an input was written"
                                            : "crashed");
    t_tally->count[T_FAILED]++;
    t_together();
    if (H.jobs == 1) t_report_totals();
    _exit(H.jobs == 1);
}
#endif

static void t_injected(int arg) {
    const double got = 1.0 + (double)arg, want = 1.0;
    t_exact("injected", GMM_F32, &got, &want, 1);
}
static const t_case t_injected_case = {t_injected, 1, T_HOST_ONLY, T_FAMILY_INJECTED, 0, 0, "injected failure"};

/* Options of the command line. */
enum { T_FILTERS = 128, T_ROUNDS = 300 };
static struct {
    const char *filters[T_FILTERS], *engine, *rank;
    int exact[T_FILTERS]; /* 1: the filter is a whole name, of --case */
    long cpu_level, arena, memory, soak, soak_steps, soak_threads; /* soak: seconds */
    int filter_count, list, inject;
} O;

/* Free bytes of the engine's memory that the arena does not hold; 0: unknown. */
static size_t t_memory_free(size_t *total) {
    size_t free_bytes = 0;
    *total = 0;
#ifdef HAVE_CUDA
    if (T.gpu) free_bytes = device_memory(total);
#endif
    if (O.memory) free_bytes = *total = (size_t)O.memory << 20;
    return free_bytes;
}

/* Whether a case runs after all others, when the other processes have freed their memory: ranks share the GPU, or it
   needs more than a quarter of all memory, or more than their arenas and CUDA contexts leave. */
static int t_apart(const t_case *c) {
    const size_t context = (size_t)1 << 30, taken = T.gpu ? (size_t)H.jobs * (((size_t)O.arena << 20) + context) : 0;
    if (H.jobs > 1 && c->where == T_GPU_ALONE) return 1;
    if (H.jobs == 1 || !H.memory || !c->bytes) return 0;
    return c->bytes > H.memory / 4 || taken > H.memory - c->bytes;
}

/* Skips a case that needs more memory than there is. */
static void t_fits(const t_case *c) {
    size_t total;
    const size_t free_bytes = t_memory_free(&total);
    if (total && (H.jobs == 1 || H.last) && c->bytes > free_bytes)
        t_skip("needs %zu bytes of %s memory; %zu of %zu are free", c->bytes, T.gpu ? "GPU" : "host", free_bytes,
               total);
}

void t_finally(void (*undo)(void)) { H.undo = undo; }
static void t_undo(void) {
    void (*const undo)(void) = H.undo;
    H.undo = NULL;
    if (undo) undo();
}

int t_cpu_level(void) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f")) return 3;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return 2;
#endif
    return 1;
}

void t_run(const t_case *c) {
    gmm_context *const ctx = T.ctx; /* the case may use one of t_context instead */
    struct timespec start, end;
    double seconds;
    int left;
    t_report_begin();
    t_tally->begun[H.column]++;
    H.running = c->name;
    H.needs = c->bytes;
    H.sparse = 0;
    t_reseed(t_hash(c->name, strlen(c->name), 7 + (uint64_t)H.step));
    if (!H.soak) t_progress(c);
    (void)timespec_get(&start, TIME_UTC);
    T.checks = T.align_rows = 0;
    left = setjmp(H.leave);
    if (left == 0) {
        t_fits(c);
        c->run(c->arg);
        t_check_guards_at("at the end of the case", 0);
        if (T.checks == 0) t_fail("at the end of the case", 0, "the case made no check");
        t_count(c->family, T_PASSED);
    }
    t_undo();
    if (left == 2) t_report_skip(c);
    else if (left) t_report_failure(c);
    t_free_all();
    T.ctx = ctx;
    t_together();
    (void)timespec_get(&end, TIME_UTC);
    seconds = (double)(end.tv_sec - start.tv_sec) + 1e-9 * (double)(end.tv_nsec - start.tv_nsec);
    if (T.verbose && left == 0) {
        printf("ok   [%s] %s (%.3f s", H.engine_name, c->name, seconds);
        if (H.worst > 0.0) printf(", %.1f%% of the bound", 100.0 * H.worst);
        if (H.last) printf(", alone");
        printf(")\n");
    } else if (H.times) printf("%8.3f s [%s] %s, step %lld\n", seconds, H.engine_name, c->name, (long long)H.step);
    fflush(stdout);
}

/* Contexts that the cases run on, one row per engine. An engine that implements some operations only is tested under
   AUTO, so that other engines serve the calls that it declines. */
const struct t_engine t_engines[T_ENGINES] = {
    {GMM_ENGINE_CPU, GMM_ENGINE_CPU, GMM_SPACE_CPU},
    {GMM_ENGINE_MMA, GMM_ENGINE_MMA, GMM_SPACE_CUDA},
    {GMM_ENGINE_WGMMA, GMM_ENGINE_AUTO, GMM_SPACE_CUDA},
};

/* By a query for a product that every engine serves. */
int t_has(gmm_engine engine) {
    gmm_groups groups = GMM_ZERO;
    gmm_options options = GMM_ZERO;
    gmm_linear d = GMM_ZERO;
    gmm_info info = GMM_ZERO;
    const gmm_mat mat = gmm_mat_packed(GMM_BF16, NULL);
    groups.count = 1;
    groups.capacity = 64;
    groups.dtype = GMM_I32;
    options.engine = engine;
    d.groups = &groups;
    d.options = &options;
    d.in_features = d.out_features = 64;
    d.x = d.w = d.y = &mat;
    return gmm_linear_query(T.ctx, GMM_OP_LINEAR_FWD, &d, &info) == GMM_OK;
}

/* Whether this build and this machine have GPUs. */
static int t_gpus(void) {
#ifdef HAVE_CUDA
    return device_count();
#else
    return 0;
#endif
}

/* Why CUDA does not count this machine's GPUs; NULL: it does, or this build has no CUDA engines. */
static const char *t_gpus_uncounted(void) {
#ifdef HAVE_CUDA
    return device_uncounted();
#else
    return NULL;
#endif
}

static const char t_usage[] =
    "usage: tests [--list] [--filter SUBSTRING]... [--case NAME]... [--seed N] [--engine NAME] [--threads N]\n"
    "             [--cpu-level N] [--arena MIB] [--memory MIB] [--jobs N] [--verbose] [--times] [--rounds N]\n"
    "             [--inject-failure] [--step N] [--soak SECONDS | --soak-steps N] [--soak-threads N]\n"
    "Runs the cases whose names hold SUBSTRING or are NAME, or one of several, on every engine present or on the one\n"
    "named, and ends with a table of passed, failed and skipped cases by test file and engine. A SUBSTRING or NAME of\n"
    "no case, and an engine named that runs none of its cases, are errors: the status is 2.\n"
    "--jobs: N processes share them, and the processors. --times: prints the seconds of each. --rounds: replays of a\n"
    "graph, 300 by default, of a whole layer's a tenth. --arena: MiB of GPU memory for a process's buffers, 4096 by\n"
    "default. --memory: MiB that the engines' memory is taken to have; by default what the GPU has.\n"
    "--soak: random cases for so long, in 8 threads with contexts of their own. A failure prints its --step.\n";

static long t_number(const char *flag, const char *text) {
    char *end = NULL;
    const long n = text ? strtol(text, &end, 0) : 0;
    if (!text || end == text || *end || n < 0) {
        fprintf(stderr, "tests: %s wants a number, not \"%s\"\n%s", flag, text ? text : "", t_usage);
        exit(2);
    }
    return n;
}

/* Whether filter i selects this case. */
static int t_selects(int i, const char *name) {
    return O.exact[i] ? !strcmp(name, O.filters[i]) : strstr(name, O.filters[i]) != NULL;
}
int t_wanted(const char *name) {
    for (int i = 0; i < O.filter_count; i++)
        if (t_selects(i, name)) return 1;
    return O.filter_count == 0;
}

/* Runs the next case in the order if it is assigned to this process. */
static void t_turn(const t_case *c) {
    if (H.place++ != H.mine) return;
    t_run(c);
    H.mine = atomic_fetch_add(&t_tally->taken, 1);
}

static int t_engine_named(size_t e) { return !O.engine || !strcmp(O.engine, gmm_engine_name(t_engines[e].name)); }
static int t_cpu_alone(void) { return O.engine && !strcmp(O.engine, gmm_engine_name(GMM_ENGINE_CPU)); }
/* Whether engine e is wanted, and can be there. */
int t_engine_wanted(size_t e) { return t_engine_named(e) && (t_engines[e].space == GMM_SPACE_CPU || t_gpus()); }

/* Whether a case runs on an engine; `later`: another GPU engine has run the cases that run on one alone. */
static int t_runs_on(const t_case *c, int gpu, int later) {
    const int once = c->where == T_GPU_ONCE || c->where == T_GPU_ALONE;
    return t_wanted(c->name) &&
           (c->where == T_ANY_ENGINE || (gpu && (c->where == T_GPU_ENGINE || (once && !later))));
}

static long t_cases_on(int gpu, int later) {
    long n = 0;
    for (size_t i = 0; i < H.count; i++) n += t_runs_on(&H.cases[i], gpu, later);
    return n;
}

/* The number of cases of all processes, as far as it is known before there are contexts. */
static long t_cases_wanted(void) {
    long n = O.inject;
    int later = 0;
    for (size_t i = 0; i < H.count; i++) n += H.cases[i].where == T_HOST_ONLY && t_wanted(H.cases[i].name);
    for (size_t e = 0; e < T_ENGINES; e++) {
        const int gpu = t_engines[e].space != GMM_SPACE_CPU;
        if (!t_engine_wanted(e)) continue;
        n += t_cases_on(gpu, later);
        later |= gpu;
    }
    return n;
}

/* Says which filters select no case that the other options allow, on whatever machine; 2 where there is one. */
static int t_unmatched(void) {
    const int cpu = t_cpu_alone(), soak = O.soak || O.soak_steps;
    int status = 0;
    for (int i = 0; i < O.filter_count; i++) {
        int found = O.inject && t_selects(i, t_injected_case.name);
        for (size_t k = 0; k < H.count && !found; k++) {
            const t_case *c = &H.cases[k];
            found = t_selects(i, c->name) && (!soak || c->weight) &&
                    (!cpu || c->where == T_ANY_ENGINE || c->where == T_HOST_ONLY);
        }
        if (found) continue;
        fprintf(stderr, "tests: no %scase%s%s %s '%s'\n", soak ? "random " : "", cpu ? " for engine " : "",
                cpu ? O.engine : "", O.exact[i] ? "is called" : "has a name with", O.filters[i]);
        status = 2;
    }
    return status;
}

/* 2, and a message, where the engine that the command line names has run none of the cases chosen for it. */
static int t_engine_idle(void) {
    for (size_t e = 0; e < T_ENGINES && O.engine; e++) {
        const long n = t_cases_on(t_engines[e].space != GMM_SPACE_CPU, 0);
        if (!t_engine_named(e) || !n || t_tally->begun[1 + e]) continue;
        fprintf(stderr, "tests: engine %s has run none of the %ld cases chosen for it\n", O.engine, n);
        return 2;
    }
    return 0;
}

int t_open(size_t e) {
    gmm_error error = GMM_ZERO;
    memset(&T.config, 0, sizeof T.config);
    T.config.space = t_engines[e].space;
    T.config.engine = T.engine = t_engines[e].engine;
    T.config.threads = T.threads;
    T.config.cpu_level = (int32_t)O.cpu_level;
    T.config.allocator.alloc = t_counted_alloc;
    T.config.allocator.release = t_counted_release;
    T.gpu = t_engines[e].space != GMM_SPACE_CPU;
#ifdef HAVE_CUDA
    if (T.gpu) {
        const char *why;
        T.stream = device_open((size_t)O.arena << 20, &why);
        if (!T.stream) {
            fprintf(stderr, "tests: no GPU memory for %s: %s\n", H.engine_name, why);
            return 2;
        }
    }
#endif
    if (gmm_create(&T.ctx, &T.config, &error) != GMM_OK) {
        fprintf(stderr, "tests: no %s context: %s\n", H.engine_name, error.text);
        return 2;
    }
    (void)t_memory_free(&H.memory);
    return 0;
}

void t_close(void) {
    gmm_destroy(T.ctx);
    T.ctx = NULL;
#ifdef HAVE_CUDA
    if (T.gpu) device_close();
    T.stream = NULL;
#endif
    T.gpu = 0;
}

static void t_catch_crashes(void) {
#if !defined(__SANITIZE_ADDRESS__)
    static const int signals[] = {SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGABRT};
    for (int i = 0; i < T_COUNT(signals); i++) (void)signal(signals[i], t_crashed);
#endif
}

/* Runs this process's share of the selected cases on all engines; the last process runs those that must run alone.
   Returns 0, or 2 where an engine has no context. */
static int t_process(int first) {
    int later = 0;
    t_catch_crashes();
    H.mine = atomic_fetch_add(&t_tally->taken, 1);
    H.total = t_cases_wanted();
    H.engine_name = "host";
    H.column = T_HOST_COLUMN;
    if (O.inject && !H.last) t_turn(&t_injected_case);
    for (size_t i = 0; i < H.count && !H.last; i++)
        if (H.cases[i].where == T_HOST_ONLY && t_wanted(H.cases[i].name)) t_turn(&H.cases[i]);
    for (size_t e = 0; e < T_ENGINES; e++) {
        const int gpu = t_engines[e].space != GMM_SPACE_CPU;
        H.engine_name = gmm_engine_name(t_engines[e].name);
        H.column = 1 + (int)e;
        if (!t_engine_wanted(e)) {
            const char *why = t_engine_named(e) ? t_gpus_uncounted() : NULL;
            if (why) {
                fprintf(stderr, "tests: engine %s not tested, CUDA does not count the GPUs: %s\n", H.engine_name, why);
                return 2;
            }
            if (first && t_engine_named(e))
                printf("no GPU, or no CUDA engines in this build: engine %s not tested\n", H.engine_name);
            continue;
        }
        if (t_open(e)) return 2;
        if (t_has(t_engines[e].name)) {
            for (size_t i = 0; i < H.count; i++)
                if (t_runs_on(&H.cases[i], gpu, later) && t_apart(&H.cases[i]) == H.last) t_turn(&H.cases[i]);
        } else {
            H.total -= t_cases_on(gpu, later);
            if (first) printf("engine %s not tested: %s\n", H.engine_name, gmm_last_error(T.ctx));
        }
        later |= gpu;
        t_close();
    }
    t_free_spare();
    fflush(stdout);
    return 0;
}

/* Ranks that are threads need a hardware queue for each of their streams, and no launch may wait for a GPU while a
   kernel is loaded (gmm_peers_config). CUDA reads both when it starts. */
static void t_ready_for_ranks(void) {
    (void)setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
    (void)setenv("CUDA_MODULE_LOADING", "EAGER", 0);
}

static struct { const char *name; int (*run)(const char *argument); } t_rank_programs[4];
void t_add_rank_program(const char *name, int (*program)(const char *argument)) {
    int i = 0;
    while (t_rank_programs[i].run) i++;
    t_rank_programs[i].name = name;
    t_rank_programs[i].run = program;
}
static int t_run_rank_program(const char *argument) {
    const char *colon = strrchr(argument, ':');
    for (int i = 0; colon && t_rank_programs[i].run; i++)
        if (!strcmp(t_rank_programs[i].name, colon + 1)) return t_rank_programs[i].run(argument);
    return 2;
}

/* Forks `count` processes and waits for them. */
static int t_forked(int count) {
    int status, worst = 0;
    fflush(stdout);
    for (int i = 0; i < count; i++) {
        const pid_t pid = fork();
        if (pid < 0) abort();
        if (pid == 0) {
            status = t_process(i == 0 && !H.last);
            free(H.cases);
            exit(status);
        }
    }
    while (wait(&status) > 0)
        if (status) {
            t_tally->alone = 0;
            printf("FAIL a process of the tests ended with status %d\n", WIFEXITED(status) ? WEXITSTATUS(status) : -1);
            t_tally->count[T_FAILED]++;
            worst = 1;
        }
    return worst;
}

/* Starts the processes of --jobs, before CUDA and OpenMP are initialised, which a fork does not inherit; then one more
   for the cases that must run alone. */
static int t_processes(void) {
    int alone = 0, worst = t_forked(H.jobs);
    for (size_t i = 0; i < H.count; i++)
        alone |= (H.cases[i].bytes > 0 || H.cases[i].where == T_GPU_ALONE) && t_wanted(H.cases[i].name);
    if (!alone) return worst;
    t_ready_for_ranks();
    H.last = 1;
    t_tally->taken = 0;
    return t_forked(1) | worst;
}

/* Reads the command line; -1: the program goes on, else its exit status. */
static int t_options(int argc, char **argv) {
    int known = 0;
    for (int i = 1; i < argc; i++) {
        const char *flag = argv[i], *value = i + 1 < argc ? argv[i + 1] : NULL;
        if (!strcmp(flag, "--list")) O.list = 1;
        else if (!strcmp(flag, "--verbose")) T.verbose = 1;
        else if (!strcmp(flag, "--times")) H.times = 1;
        else if (!strcmp(flag, "--rounds")) T.rounds = (int)t_number(flag, value), i++;
        else if (!strcmp(flag, "--inject-failure")) O.inject = 1;
        else if ((!strcmp(flag, "--filter") || !strcmp(flag, "--case")) && value && O.filter_count < T_FILTERS) {
            O.exact[O.filter_count] = !strcmp(flag, "--case");
            O.filters[O.filter_count++] = argv[++i];
        } else if (!strcmp(flag, "--engine") && value) O.engine = argv[++i];
        else if (!strcmp(flag, "--jobs")) H.jobs = (int)t_number(flag, value), i++;
        else if (!strcmp(flag, "--seed")) H.seed = (uint64_t)t_number(flag, value), i++;
        else if (!strcmp(flag, "--arena")) O.arena = t_number(flag, value), i++;
        else if (!strcmp(flag, "--memory")) O.memory = t_number(flag, value), i++;
        else if (!strcmp(flag, "--rank") && value) O.rank = argv[++i]; /* for cases alone: process_ranks.h */
        else if (!strcmp(flag, "--step")) H.step = (int64_t)t_number(flag, value), i++;
        else if (!strcmp(flag, "--soak")) O.soak = t_number(flag, value), i++;
        else if (!strcmp(flag, "--soak-steps")) O.soak_steps = t_number(flag, value), i++;
        else if (!strcmp(flag, "--soak-threads")) O.soak_threads = t_number(flag, value), i++;
        else if (!strcmp(flag, "--threads")) T.threads = (int)t_number(flag, value), i++;
        else if (!strcmp(flag, "--cpu-level")) O.cpu_level = t_number(flag, value), i++;
        else {
            const int help = !strcmp(flag, "--help");
            if (!help) fprintf(stderr, "tests: unknown or unfinished option %s\n", flag);
            fputs(t_usage, help ? stdout : stderr);
            return help ? 0 : 2;
        }
    }
    for (size_t e = 0; e < T_ENGINES; e++)
        known |= !O.engine || !strcmp(O.engine, gmm_engine_name(t_engines[e].name));
    if (!known) fprintf(stderr, "tests: engine %s is not in this build\n", O.engine);
    return known ? -1 : 2;
}

/* What repeats a case alone: the program, the seed, and those options that change what a case does. */
static const char *t_command(const char *program) {
    static char text[512];
    size_t n = (size_t)snprintf(text, sizeof text, "%s --seed %llu", program, (unsigned long long)H.seed);
    if (T.threads && n < sizeof text) n += (size_t)snprintf(text + n, sizeof text - n, " --threads %d", T.threads);
    if (O.cpu_level && n < sizeof text)
        n += (size_t)snprintf(text + n, sizeof text - n, " --cpu-level %ld", O.cpu_level);
    if (T.rounds != T_ROUNDS && n < sizeof text) (void)snprintf(text + n, sizeof text - n, " --rounds %d", T.rounds);
    return text;
}

int main(int argc, char **argv) {
    const long processors = sysconf(_SC_NPROCESSORS_ONLN);
    int status, idle;
    T.rounds = T_ROUNDS;
    H.jobs = 1;
    O.arena = 4096;
    status = t_options(argc, argv);
    if (status >= 0) return status;
    if (H.jobs < 1) H.jobs = 1;
    if (H.jobs > 1 && !T.threads) T.threads = processors > H.jobs ? (int)(processors / H.jobs) : 1;
    H.command = t_command(argv[0]);
    if (H.jobs == 1) t_ready_for_ranks();
    status = t_register();
    if (!status) status = t_unmatched();
    if (O.list)
        for (size_t i = 0; i < H.count; i++)
            if (t_wanted(H.cases[i].name)) printf("%s\n", H.cases[i].name);
    if (O.rank && !status) status = t_run_rank_program(O.rank);
    if (status || O.list || O.rank) {
        free(H.cases);
        return status;
    }
    t_tally = (struct t_tally *)mmap(NULL, sizeof *t_tally, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (t_tally == MAP_FAILED) abort();
    t_tally->told = (long)time(NULL);
    first_harness = &H;
    if (O.soak || O.soak_steps) {
        const char *why = t_cpu_alone() ? NULL : t_gpus_uncounted();
        t_catch_crashes();
        if (why) fprintf(stderr, "tests: CUDA does not count the GPUs: %s\n", why);
        status = why ? 2 : t_soak((double)O.soak, (int64_t)O.soak_steps, O.soak_threads ? (int)O.soak_threads : 8);
        free(H.cases);
        return status;
    }
    status = H.jobs > 1 ? t_processes() : t_process(1);
    idle = t_engine_idle();
    t_report_begin();
    free(H.cases);
    t_progress_clear();
    if (status == 2) return 2;
    if (t_tally->count[T_PASSED] + t_tally->count[T_FAILED] + t_tally->count[T_SKIPPED] == 0) {
        fprintf(stderr, "tests: no case%s%s%s%s\n", O.filter_count ? " matches " : "",
                O.filter_count ? O.filters[0] : "", O.engine ? " on engine " : "", O.engine ? O.engine : "");
        return 2;
    }
    t_report_table();
    t_report_totals();
    return t_tally->count[T_FAILED] ? 1 : idle;
}
