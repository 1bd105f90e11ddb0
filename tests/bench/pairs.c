/* pairs - two versions of the library in one process, alternating, row by row.
       pairs BASE.so BASE_COPY.so NEW.so [--seed N] [--rows WORDS] [--seconds S] [--out FILE] [--list] [--cpu]
             [--self-test]
   Each plug-in holds one version and the functions of tests/tools/cases.h. A row is a case id. All three versions open
   a row at the same addresses, one after another, so that memory placement favours none: the last one initialises the
   operands that all read, which assumes equal layouts of operands. Then batches of launches (captured as a graph) are
   timed by events in rotating order. A round gives the ratio of the base to its copy (A/A, the noise) and of both to
   the new version (A/B; above 1: the new version is faster); a row's ratios are medians over rounds. Rows that fail are
   measured once more. The run passes if no row's A/B is under 0.985 and their mean is at least 0.997 of the mean of
   A/A. --cpu: a few tiny rows on the CPU engine, which tests the program itself. */
#include "case_ids.h"
#include "cases.h"

#ifdef HAVE_CUDA
#include "device.h"
#endif

#include <dlfcn.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { PLUGINS = 3, BASE = 0, COPY = 1, NEW = 2, MAX_ROUNDS = 64, MAX_LAUNCHES = 256, LISTED = 180, DRAWN = 20 };
static const double ROW_LIMIT = 0.985, MEAN_LIMIT = 0.997, BATCH_SECONDS = 0.005;

static void *need(void *p, const char *what) {
    if (p) return p;
    fprintf(stderr, "pairs: %s\n", what);
    exit(1);
}

/* ----------------------------------------------------------------------------------------------------- Plug-ins --- */

typedef struct plugin {
    int (*begin)(const case_setup *);
    void (*end)(void);
    const char *(*error)(void);
    int (*open)(const char *, case_run **);
    int (*launch)(case_run *);
    void (*close)(case_run *);
} plugin;

/* Converts the data pointer of dlsym to a function pointer. */
static void symbol(void *library, const char *name, void *function, size_t size) {
    void *p = need(dlsym(library, name), name);
    memcpy(function, &p, size);
}

static void load(plugin *p, const char *path) {
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        fprintf(stderr, "pairs: %s\n", dlerror());
        exit(1);
    }
    symbol(library, "case_begin", &p->begin, sizeof p->begin);
    symbol(library, "case_end", &p->end, sizeof p->end);
    symbol(library, "case_error", &p->error, sizeof p->error);
    symbol(library, "case_open", &p->open, sizeof p->open);
    symbol(library, "case_launch", &p->launch, sizeof p->launch);
    symbol(library, "case_close", &p->close, sizeof p->close);
}

/* ------------------------------------------------------------------------------------------------------- Memory --- */

static char *arena;
static size_t arena_bytes, arena_used;
static void *host_alloc(size_t bytes) {
    const size_t at = arena_used;
    if (at + bytes > arena_bytes) return NULL;
    arena_used = (at + bytes + 255) / 256 * 256;
    return arena + at;
}
static void host_put(void *to, const void *host, size_t bytes) { memcpy(to, host, bytes); }
static void host_copy(void *to, const void *from, size_t bytes) { memcpy(to, from, bytes); }
static void host_set(void *to, int byte, size_t bytes) { memset(to, byte, bytes); }
static const case_memory HOST_MEMORY = { host_alloc, host_put, host_copy, host_set };
#ifdef HAVE_CUDA
static void *gpu_alloc(size_t bytes) { return device_alloc(bytes, 256, 0); }
static const case_memory GPU_MEMORY = { gpu_alloc, device_put, device_copy, device_set };
#endif

static double now(void) {
    struct timespec t;
    (void)timespec_get(&t, TIME_UTC);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* --------------------------------------------------------------------------------------------------------- Rows --- */

/* Experts, hidden and intermediate size of the models of gpu_bench; `odd` is no model. */
static const struct { char letter; int groups, hidden, ffn; } SHAPES[] = {
    { 'd', 8, 7168, 2048 }, { 'm', 8, 4096, 14336 }, { 'q', 128, 2048, 768 }, { 'g', 32, 2880, 2880 },
    { 'o', 24, 3072, 1408 }
};
/* Operation and format; shapes; linear layer (fc1 1, fc2 2, whole MLP 0); rows per expert; the split. */
typedef struct rule { const char *what, *shapes; int layer; int rows[6]; const char *split; } rule;
static const rule RULES[] = {
    { "linear.fwd.bf16", "dmqg", 1, { 1, 16, 64, 300, 4096 }, "even" },
    { "linear.fwd.bf16", "dmqg", 2, { 128, 512 }, "even" },
    { "linear.fwd.bf16", "dmqg", 1, { 512 }, "skew" },
    { "linear.fwd.bf16", "o", 1, { 512 }, "skew" },
    { "linear.dgrad.bf16", "dmqg", 1, { 16, 4096 }, "even" },
    { "linear.dgrad.bf16", "dmqg", 2, { 512 }, "skew" },
    { "linear.wgrad.bf16.main32", "dmg", 1, { 512, 4096 }, "even" },
    { "linear.wgrad.bf16.main32", "q", 1, { 64, 512 }, "even" },
    { "linear.wgrad.bf16.main32", "dmqg", 2, { 512 }, "skew" },
    { "linear.wgrad.bf16", "dmqg", 1, { 512 }, "skew" },
    { "linear.{fwd,dgrad,wgrad}.f16", "d", 1, { 512 }, "skew" },
    { "linear.bgrad.bf16.store32", "d", 1, { 4096 }, "even" },
    { "linear.fwd.fp8-1x128", "dmqg", 1, { 16, 4096 }, "even" },
    { "linear.fwd.fp8-1x128", "dq", 2, { 300 }, "even" },
    { "linear.fwd.fp8-1x128", "dmqg", 1, { 512 }, "skew" },
    { "linear.fwd.fp8-tensor", "dq", 1, { 16, 4096 }, "even" },
    { "linear.fwd.fp8-tensor.fastaccum", "d", 1, { 4096 }, "even" },
    { "linear.fwd.fp8-row", "d", 1, { 512 }, "skew" },
    { "linear.dgrad.fp8-{1x128,tensor,row}", "d", 1, { 512 }, "skew" },
    { "linear.dgrad.fp8-1x128", "q", 2, { 4096 }, "even" },
    { "linear.wgrad.fp8-1x128.main32", "dmqg", 1, { 4096 }, "even" },
    { "linear.wgrad.fp8-{1x128,tensor}.main32", "dq", 2, { 512 }, "skew" },
    { "linear.wgrad.fp8-row", "d", 1, { 512 }, "even" },
    { "linear.fwd.fp8-1x128-1x128", "d", 1, { 512 }, "even" },
    { "linear.fwd.{mx8,nv4}", "dq", 1, { 16, 512 }, "even" },
    { "linear.fwd.{mx8,nv4}", "d", 1, { 512 }, "skew" },
    { "linear.{dgrad,wgrad}.{mx8,nv4}", "d", 1, { 512 }, "even" },
    { "linear.fwd.wonly-mx4", "g", 1, { 1, 64 }, "even" },
    { "mlp.train.bf16.swiglu.prob.main32", "dmqg", 0, { 512 }, "even" },
    { "mlp.train.bf16.swiglu.prob.main32", "dq", 0, { 512 }, "skew" },
    { "mlp.train.{fp8-delayed,fp8-tensor,fp8-1x128,mx8,nv4}.swiglu.prob.main32", "d", 0, { 512 }, "even" },
    { "mlp.train.{fp8-tensor,fp8-1x128}.swiglu.prob.main32", "q", 0, { 512 }, "skew" },
    { "mlp.train.{fp8-tensor,fp8-1x128}.swiglu.prob.main32.saveq.weightcache", "dmqg", 0, { 512 }, "even" },
    { "mlp.train.{fp8-tensor,fp8-1x128}.swiglu.prob.main32.saveq.weightcache", "dqg", 0, { 512 }, "skew" },
    { "mlp.train.{fp8-delayed,mx8,nv4}.swiglu.prob.main32.saveq.weightcache", "d", 0, { 512 }, "even" },
    { "mlp.fwd.{bf16,fp8-1x128}.swiglu.prob", "d", 0, { 16 }, "even" },
    { "cast.quantize.{fp8-tensor,fp8-row,fp8-1x128,mx8,nv4}.grouped", "d", 1, { 2048 }, "skew" },
    { "cast.quantize.{fp8-1x128,mx8}.grouped.rowwise", "d", 1, { 2048 }, "skew" },
    { "{act.fwd,act.bwd}.bf16.swiglu.prob", "d", 1, { 2048 }, "skew" },
};
/* Ids that need no shape. */
static const char *const WHOLE[] = {
    "cast.quantize.{fp8-1x128,fp8-tensor}.weight.count8.t4096.k7168",
    "cast.transpose.fp8-1x128.weight.count8.t4096.k7168",
    "cast.dequantize.fp8-1x128.weight.count8.t4096.k7168.rowwise",
    "{permute,unpermute}.{fwd,bwd}.bf16.g8.top8.t4096.k7168",
    "permute.map.g128.top8.t32768",
    "route.fwd.f32.g128.top8.t32768", "route.fwd.bf16.g256.top16.t32768",
    "route.fwd.bf16.g128.top8.t40960.aux.normalize", "route.bwd.bf16.g128.top8.t40960.normalize",
    "small.accumulate.bf16.count4.t8192.k7168.to32.add",
};
static const char *const CPU_ROWS[] = {
    "linear.{fwd,dgrad,wgrad}.bf16.g4.k128.n96.t64.skew", "mlp.train.fp8-1x128.swiglu.g4.k128.n128.t64.even.prob.main32"
};

static void expand_rule(case_ids *rows, const rule *r) {
    for (const char *letter = r->shapes; *letter; letter++)
        for (size_t s = 0; s < sizeof SHAPES / sizeof SHAPES[0]; s++)
            for (int i = 0; SHAPES[s].letter == *letter && i < 6 && r->rows[i]; i++) {
                const int H = SHAPES[s].hidden, F = SHAPES[s].ffn;
                const long all = (long)r->rows[i] * SHAPES[s].groups;
                char text[256];
                /* an MLP's and an activation's n is the intermediate size; gated, fc1 has twice as many */
                const int act = r->what[0] == '{';
                snprintf(text, sizeof text, "%s.g%d.k%d.n%d.t%ld.%s", r->what, SHAPES[s].groups, r->layer == 2 ? F : H,
                         r->layer == 2 ? H : r->layer == 0 || act ? F : 2 * F, all < 65536 ? all : 65536, r->split);
                case_ids_expand(rows, text);
            }
}

static uint64_t drawn_bits(uint64_t seed, uint64_t i) {
    uint64_t x = seed * UINT64_C(0x9E3779B97F4A7C15) + (i + 1) * UINT64_C(0xD1B54A32D192ED03);
    x = (x ^ x >> 32) * UINT64_C(0xBF58476D1CE4E5B9);
    return x ^ x >> 29;
}
static int64_t draw(uint64_t seed, uint64_t *i, int64_t low, int64_t high) {
    return low + (int64_t)(drawn_bits(seed, (*i)++) % (uint64_t)(high - low + 1));
}

/* A random row: operation, format, shape and split come from the seed. */
static void draw_row(case_ids *rows, uint64_t seed, uint64_t *i) {
    static const char *const ops[] = { "fwd", "dgrad", "wgrad", "wgrad" };
    static const char *const formats[] = { "bf16", "bf16", "f16", "fp8-tensor", "fp8-row", "fp8-1x128", "mx8", "nv4" };
    static const char *const splits[] = { "even", "skew", "odd" };
    const int64_t op = draw(seed, i, 0, 3), g = draw(seed, i, 1, 64), k = 32 * draw(seed, i, 8, 224);
    const int64_t n = 32 * draw(seed, i, 8, 224);
    const int64_t format = draw(seed, i, 0, 7), split = draw(seed, i, 0, 2);
    int64_t t = (int64_t)((double)g * exp2((double)draw(seed, i, 0, 1200) / 100.0));
    char text[192];
    if (t > 65536) t = 65536;
    snprintf(text, sizeof text, "linear.%s.%s%s.g%lld.k%lld.n%lld.t%lld.%s", ops[op], formats[format],
             op == 3 ? ".main32" : "", (long long)g, (long long)k, (long long)n, (long long)t, splits[split]);
    case_ids_expand(rows, text);
}

typedef struct options {
    const char *path[PLUGINS], *rows, *out;
    uint64_t seed;
    double seconds;
    int list, cpu;
} options;

static case_ids rows_of(const options *o) {
    case_ids rows;
    uint64_t i = 0;
    memset(&rows, 0, sizeof rows);
    if (o->cpu) {
        for (size_t r = 0; r < sizeof CPU_ROWS / sizeof CPU_ROWS[0]; r++) case_ids_expand(&rows, CPU_ROWS[r]);
        return rows;
    }
    for (size_t r = 0; r < sizeof RULES / sizeof RULES[0]; r++) expand_rule(&rows, &RULES[r]);
    for (size_t r = 0; r < sizeof WHOLE / sizeof WHOLE[0]; r++) case_ids_expand(&rows, WHOLE[r]);
    if (rows.count > LISTED) {
        fprintf(stderr, "pairs: %d rows are listed, %d are allowed\n", rows.count, LISTED);
        exit(1);
    }
    while (i < 1000 && rows.count < LISTED + DRAWN && (int)(i / 7) < DRAWN) draw_row(&rows, o->seed, &i);
    return rows;
}

/* ------------------------------------------------------------------------------------------------------ Measure --- */

typedef struct measured { int state; double aa, ab, base, fresh; int rounds; } measured; /* state: CASE_* */

static plugin plugins[PLUGINS];

#ifdef HAVE_CUDA
static int on_gpu;
static void check_device(const char *id, const char *text) {
    if (!text) return;
    fprintf(stderr, "pairs: %s: %s\n", id, text);
    exit(1);
}
#endif

/* Seconds of `launches` launches; from the graph, if there is one. */
static double time_batch(const char *id, const plugin *p, case_run *run, void *graph, int launches) {
#ifdef HAVE_CUDA
    if (on_gpu) {
        double seconds;
        check_device(id, device_clock_start());
        if (graph) check_device(id, device_replay(graph));
        for (int i = 0; i < launches && !graph; i++) (void)p->launch(run);
        check_device(id, device_clock_stop(&seconds));
        return seconds;
    }
#endif
    {
        const double start = now();
        for (int i = 0; i < launches; i++) (void)p->launch(run);
        (void)id;
        (void)graph;
        return now() - start;
    }
}

/* Launches of a batch as a graph; NULL without a GPU. */
static void *capture(const char *id, const plugin *p, case_run *run, int launches) {
    void *graph = NULL;
#ifdef HAVE_CUDA
    if (on_gpu) {
        check_device(id, device_begin_capture());
        for (int i = 0; i < launches; i++) (void)p->launch(run);
        check_device(id, device_end_capture(&graph));
    }
#endif
    (void)id;
    (void)p;
    (void)run;
    (void)launches;
    return graph;
}

static int ascending(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}
static double median(double *v, int n) {
    qsort(v, (size_t)n, sizeof *v, ascending);
    return n % 2 ? v[n / 2] : 0.5 * (v[n / 2 - 1] + v[n / 2]);
}

/* Opens a row in every plug-in and launches it once. */
static int open_row(const char *id, case_run **run) {
    int result = CASE_OK;
    for (int p = 0; p < PLUGINS; p++) {
        int got;
        arena_used = 0;
#ifdef HAVE_CUDA
        if (on_gpu) device_reset();
#endif
        got = plugins[p].open(id, &run[p]);
        if (got == CASE_OK) got = plugins[p].launch(run[p]);
        if (got != CASE_OK && (p == NEW || got == CASE_FAILED))
            fprintf(stderr, "pairs: %s: %s\n", p == NEW ? "new version" : "base", plugins[p].error());
        /* a row that the base declines and the new version serves cannot be compared */
        if (p == NEW && got == CASE_DECLINED && result == CASE_OK) got = CASE_FAILED;
        if (got > result) result = got;
    }
    return result;
}

static void measure(const char *id, double seconds, measured *m) {
    case_run *run[PLUGINS] = { NULL, NULL, NULL };
    void *graph[PLUGINS] = { NULL, NULL, NULL };
    double taken[PLUGINS][MAX_ROUNDS], aa[MAX_ROUNDS], ab[MAX_ROUNDS];
    const double start = now();
    int launches = 1, round = 0;
    memset(m, 0, sizeof *m);
    m->state = open_row(id, run);
    if (m->state == CASE_OK) {
        double once;
        for (int p = 0; p < PLUGINS; p++) (void)time_batch(id, &plugins[p], run[p], NULL, 2);
        once = time_batch(id, &plugins[BASE], run[BASE], NULL, 3) / 3.0;
        if (once < BATCH_SECONDS) launches = (int)(BATCH_SECONDS / (once > 1e-6 ? once : 1e-6));
        if (launches > MAX_LAUNCHES) launches = MAX_LAUNCHES;
        if (launches < 1) launches = 1;
        for (int p = 0; p < PLUGINS; p++) graph[p] = capture(id, &plugins[p], run[p], launches);
        for (int p = 0; p < PLUGINS; p++) (void)time_batch(id, &plugins[p], run[p], graph[p], launches);
        while (round < MAX_ROUNDS && (round < 5 || now() - start < seconds)) {
            for (int i = 0; i < PLUGINS; i++) {
                const int p = round % 2 ? (round + PLUGINS - i) % PLUGINS : (round + i) % PLUGINS;
                taken[p][round] = time_batch(id, &plugins[p], run[p], graph[p], launches) / launches;
            }
            aa[round] = taken[COPY][round] / taken[BASE][round];
            ab[round] = 0.5 * (taken[BASE][round] + taken[COPY][round]) / taken[NEW][round];
            round++;
        }
        m->rounds = round;
        m->aa = median(aa, round);
        m->ab = median(ab, round);
        m->base = median(taken[BASE], round);
        m->fresh = median(taken[NEW], round);
    }
    for (int p = 0; p < PLUGINS; p++) {
#ifdef HAVE_CUDA
        device_graph_free(graph[p]);
#endif
        if (run[p]) plugins[p].close(run[p]);
    }
}

/* ------------------------------------------------------------------------------------------------------- Report --- */

static void print_row(FILE *f, const char *id, const measured *m) {
    if (m->state == CASE_OK)
        fprintf(f, "%.4f  A/A %.4f  base %10.2f us  new %10.2f us  %2d rounds  %s\n", m->ab, m->aa, 1e6 * m->base,
                1e6 * m->fresh, m->rounds, id);
    else fprintf(f, "%s  %s\n", m->state == CASE_DECLINED ? "declined" : "failed  ", id);
}

typedef struct worst { double ab; int row; } worst;
static int by_ratio(const void *a, const void *b) {
    return ascending(&((const worst *)a)->ab, &((const worst *)b)->ab);
}

/* Returns 0 if the run passes. */
static int report(const case_ids *rows, const measured *m, double seconds) {
    double aa = 0.0, ab = 0.0, noise_low = 1.0, noise_high = 1.0;
    int n = 0, under = 0, failed = 0, declined = 0, shown;
    worst *order = (worst *)need(calloc((size_t)rows->count + 1, sizeof *order), "no memory");
    for (int i = 0; i < rows->count; i++) {
        failed += m[i].state == CASE_FAILED;
        declined += m[i].state == CASE_DECLINED;
        if (m[i].state != CASE_OK) continue;
        order[n].ab = m[i].ab;
        order[n++].row = i;
        aa += m[i].aa;
        ab += m[i].ab;
        under += m[i].ab < ROW_LIMIT;
        if (m[i].aa < noise_low) noise_low = m[i].aa;
        if (m[i].aa > noise_high) noise_high = m[i].aa;
    }
    qsort(order, (size_t)n, sizeof *order, by_ratio);
    shown = under > 10 ? under : n < 10 ? n : 10;
    if (shown > 40) shown = 40;
    printf("A/A, the base beside its copy: mean %.4f, rows %.4f to %.4f\n", n ? aa / n : 0.0, noise_low, noise_high);
    printf("A/B, worst rows (time of the base / time of the new version):\n");
    for (int i = 0; i < shown; i++) print_row(stdout, rows->id[order[i].row], &m[order[i].row]);
    printf("pairs: %d rows, %d declined, %d failed; mean %.4f (A/A %.4f), least %.4f, %d under %.3f; %.0f s: ", n,
           declined, failed, n ? ab / n : 0.0, n ? aa / n : 0.0, n ? order[0].ab : 0.0, under, ROW_LIMIT, seconds);
    failed += under > 0 || n == 0 || ab / n < MEAN_LIMIT * (aa / n);
    printf("%s\n", failed ? "FAIL" : "pass");
    free(order);
    return failed != 0;
}

/* Checks the verdict on made-up measurements. */
static int self_test(void) {
    static const struct { measured m[3]; int want; } tests[] = {
        { { { CASE_OK, 1.0, 1.0, 0, 0, 5 }, { CASE_OK, 1.0, 0.99, 0, 0, 5 }, { CASE_DECLINED, 0, 0, 0, 0, 0 } }, 1 },
        { { { CASE_OK, 1.0, 1.0, 0, 0, 5 }, { CASE_OK, 1.0, 0.995, 0, 0, 5 }, { CASE_DECLINED, 0, 0, 0, 0, 0 } }, 0 },
        { { { CASE_OK, 0.99, 0.987, 0, 0, 5 }, { CASE_OK, 0.99, 0.99, 0, 0, 5 }, { CASE_OK, 1.0, 1.0, 0, 0, 5 } }, 0 },
        { { { CASE_OK, 1.0, 1.1, 0, 0, 5 }, { CASE_OK, 1.0, 0.984, 0, 0, 5 }, { CASE_OK, 1.0, 1.0, 0, 0, 5 } }, 1 },
        { { { CASE_OK, 1.0, 1.1, 0, 0, 5 }, { CASE_FAILED, 0, 0, 0, 0, 0 }, { CASE_OK, 1.0, 1.0, 0, 0, 5 } }, 1 },
        { { { CASE_DECLINED, 0, 0, 0, 0, 0 }, { CASE_DECLINED, 0, 0, 0, 0, 0 }, { CASE_DECLINED, 0, 0, 0, 0, 0 } }, 1 },
    };
    static char name[] = "a.row";
    char *ids[3] = { name, name, name };
    case_ids rows;
    double odd[] = { 3.0, 1.0, 2.0 }, even[] = { 4.0, 1.0, 2.0, 3.0 };
    options o;
    int failed = 0;
    rows.id = ids;
    rows.count = rows.capacity = 3;
    for (size_t i = 0; i < sizeof tests / sizeof tests[0]; i++)
        failed += report(&rows, tests[i].m, 1.0) != tests[i].want;
    failed += median(odd, 3) != 2.0 || median(even, 4) != 2.5;
    memset(&o, 0, sizeof o);
    rows = rows_of(&o);
    failed += rows.count < LISTED || rows.count > LISTED + DRAWN;
    case_ids_free(&rows);
    printf("pairs: self-test %s\n", failed ? "FAILED" : "passed");
    return failed != 0;
}

static void begin(const options *o) {
    case_setup setup;
    memset(&setup, 0, sizeof setup);
    if (o->cpu) {
        arena_bytes = (size_t)64 << 20;
        arena = (char *)need(aligned_alloc(256, arena_bytes), "no memory");
        setup.memory = &HOST_MEMORY;
    } else {
#ifdef HAVE_CUDA
        const char *why = "no GPU";
        gmm_stream stream = device_count() > 0 ? device_open((size_t)36 << 30, &why) : NULL;
        (void)need(stream, why);
        setup.memory = &GPU_MEMORY;
        setup.stream = stream;
        setup.gpu = on_gpu = 1;
#else
        (void)need(NULL, "built without CUDA: a GPU is needed");
#endif
    }
    for (int p = 0; p < PLUGINS; p++) {
        load(&plugins[p], o->path[p]);
        if (plugins[p].begin(&setup) != CASE_OK) (void)need(NULL, plugins[p].error());
    }
}

static int run_rows(const options *o, const case_ids *rows) {
    measured *m = (measured *)need(calloc((size_t)rows->count + 1, sizeof *m), "no memory");
    FILE *out = o->out ? (FILE *)need(fopen(o->out, "w"), o->out) : NULL;
    const double start = now(), last = o->seconds * 0.85;
    int result, again = 0;
    for (int i = 0; i < rows->count; i++) {
        const double left = last - (now() - start);
        measure(rows->id[i], left > 0.0 ? left / (rows->count - i) : 0.0, &m[i]);
        if (out) print_row(out, rows->id[i], &m[i]);
        if (out) fflush(out);
    }
    for (int i = 0; i < rows->count; i++) again += m[i].state == CASE_OK && m[i].ab < ROW_LIMIT;
    for (int i = 0; i < rows->count && again > 0; i++)
        if (m[i].state == CASE_OK && m[i].ab < ROW_LIMIT) {
            const double left = o->seconds - (now() - start);
            if (left < 1.0) break;
            measure(rows->id[i], left / again < 4.0 ? left / again : 4.0, &m[i]);
            again--;
            if (out) fprintf(out, "again ");
            if (out) print_row(out, rows->id[i], &m[i]);
        }
    result = report(rows, m, now() - start);
    if (out) fclose(out);
    free(m);
    return result;
}

int main(int argc, char **argv) {
    options o;
    case_ids all, rows;
    int count = 0, result = 0;
    memset(&o, 0, sizeof o);
    memset(&rows, 0, sizeof rows);
    o.seconds = 300.0;
    o.seed = 1;
    for (int i = 1; i < argc; i++) {
        const char *value = i + 1 < argc ? argv[i + 1] : "";
        if (!strcmp(argv[i], "--list")) o.list = 1;
        else if (!strcmp(argv[i], "--cpu")) o.cpu = 1;
        else if (!strcmp(argv[i], "--self-test")) return self_test();
        else if (!strcmp(argv[i], "--seed")) o.seed = strtoull(value, NULL, 10), i++;
        else if (!strcmp(argv[i], "--rows")) o.rows = value, i++;
        else if (!strcmp(argv[i], "--out")) o.out = value, i++;
        else if (!strcmp(argv[i], "--seconds")) o.seconds = atof(value), i++;
        else if (argv[i][0] != '-' && count < PLUGINS) o.path[count++] = argv[i];
        else {
            fprintf(stderr, "pairs: unknown argument %s\n", argv[i]);
            return 2;
        }
    }
    all = rows_of(&o);
    for (int i = 0; i < all.count; i++)
        if (!o.rows || strstr(all.id[i], o.rows)) case_ids_expand(&rows, all.id[i]);
    if (o.list)
        for (int i = 0; i < rows.count; i++) printf("%s\n", rows.id[i]);
    else {
        if (count != PLUGINS) (void)need(NULL, "three plug-ins are needed");
        begin(&o);
        result = run_rows(&o, &rows);
        for (int p = 0; p < PLUGINS; p++) plugins[p].end();
    }
    case_ids_free(&all);
    case_ids_free(&rows);
    free(arena);
    return result;
}
