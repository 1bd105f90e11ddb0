/* test_soak.c - random cases (t_random) one after another in several threads, each with a context, memory and streams
   of its own. What a step does follows from the seed, the number of its thread and its number in the thread; `--step`
   of the program, with the case's name, repeats it alone. */
#define _GNU_SOURCE /* nanosleep, clock_gettime */
#include "harness.h"
#ifdef HAVE_CUDA
#include "device.h"
#endif

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { MOST_THREADS = 64, MOST_FAILURES = 20, STEPS_OF_A_CONTEXT = 200, STEP_SHIFT = 8 };

/* ------------------------------------------------------------------------------------------------ Random cases --- */

int64_t t_draw_size(int64_t usual, int64_t most) { return t_int(1, t_int(0, 7) ? usual : most); }

int64_t *t_draw_sizes(int64_t groups, int64_t rows) {
    static const int64_t edges[] = {1, 15, 16, 17, 31, 32, 63, 64, 65, 127, 128, 129, 255, 256, 257};
    int64_t *sizes = (int64_t *)t_host((size_t)groups * sizeof *sizes), remaining = rows;
    const int kind = (int)t_int(0, 9);
    for (int64_t i = 0; i < groups; i++) {
        const int64_t g = (i + groups / 2) % groups; /* the last groups are not always the small ones */
        int64_t n = t_int(0, 2 * rows / groups + 1);
        if (kind == 0) n = 0;
        else if (kind == 1) n = i == 0 ? rows : 0;
        else if (kind <= 3) n = t_int(0, 2) ? 0 : n;
        else if (kind <= 5) n = edges[t_int(0, T_COUNT(edges) - 1)];
        sizes[g] = n < remaining ? n : remaining;
        remaining -= sizes[g];
    }
    return sizes;
}

/* --------------------------------------------------------------------------------------------------------- Soak --- */

typedef struct soak {
    const struct t_harness *harness; /* of the thread that started the program */
    const t_state *state;
    double end;
    int64_t steps;
    size_t engines[T_ENGINES];
    int engine_count;
    atomic_llong checks, contexts;
    atomic_int running, no_context, leaks;
} soak;

typedef struct soak_thread {
    soak *all;
    pthread_t thread;
    int index;
    int64_t done;
    double worst;
} soak_thread;

static double now(void) {
    struct timespec t;
    (void)clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Resident memory of the process in MiB; 0: unknown. */
static long resident(void) {
    FILE *f = fopen("/proc/self/statm", "r");
    long pages = 0;
    if (f && fscanf(f, "%*d %ld", &pages) != 1) pages = 0;
    if (f) (void)fclose(f);
    return pages * 4 / 1024;
}

/* Whether the case is one of those that a thread with this engine draws. */
static int drawn(const t_case *c) {
    return c->weight && t_wanted(c->name) && (c->where == T_ANY_ENGINE || (c->where == T_GPU_ENGINE && T.gpu));
}

/* The case of the step, drawn by weight; NULL: there is none. */
static const t_case *case_of_step(void) {
    int64_t weights = 0, at;
    for (size_t i = 0; i < H.count; i++)
        if (drawn(&H.cases[i])) weights += H.cases[i].weight;
    if (!weights) return NULL;
    t_reseed(t_hash(&H.step, sizeof H.step, 11));
    at = t_int(0, weights - 1);
    for (size_t i = 0; i < H.count; i++) {
        if (!drawn(&H.cases[i])) continue;
        if (at < H.cases[i].weight) return &H.cases[i];
        at -= H.cases[i].weight;
    }
    return NULL;
}

/* Destroys the thread's context, which has to return all its memory. */
static void close_context(soak *s) {
    t_close();
    if (H.live) {
        printf("FAIL [%s] a context was destroyed with %ld allocations left, before step %lld\n", H.engine_name,
               H.live, (long long)H.step);
        atomic_fetch_add(&s->leaks, 1);
        H.live = 0;
    }
}

static int open_context(soak *s, int index) {
    const size_t e = s->engines[index % s->engine_count];
    H.engine_name = gmm_engine_name(t_engines[e].name);
    H.column = 1 + (int)e;
    T.threads = s->state->threads ? s->state->threads : 1 + index % 3;
    if (t_open(e)) return 0;
    atomic_fetch_add(&s->contexts, 1);
    return 1;
}

static void *soak_main(void *argument) {
    soak_thread *t = (soak_thread *)argument;
    soak *s = t->all;
    const struct timespec pause = {0, 1000000};
    char command[600];
    int opened = 0;
    H = *s->harness;
    T = *s->state;
    H.splits = NULL;
    H.soak = 1;
    T.rounds = 30;
    (void)snprintf(command, sizeof command, "%s", s->harness->command);
    H.command = command;
    for (int64_t n = 1; (s->steps ? n <= s->steps : now() < s->end) && t_tally->count[T_FAILED] < MOST_FAILURES; n++) {
        const t_case *c;
        if (!opened && !(opened = open_context(s, t->index))) {
            atomic_store(&s->no_context, 1);
            break;
        }
        if (!s->state->threads)
            (void)snprintf(command, sizeof command, "%s --threads %d", s->harness->command, T.threads);
        H.step = n << STEP_SHIFT | t->index;
        c = case_of_step();
        if (!c) {
            (void)nanosleep(&pause, NULL);
            break;
        }
#ifdef HAVE_CUDA
        if (T.gpu) T.stream = device_use_stream((int)(n % DEVICE_STREAMS));
#endif
        t_run(c);
        t->done++;
        atomic_fetch_add(&s->checks, T.checks);
        if (H.worst > t->worst) t->worst = H.worst;
        if (n % STEPS_OF_A_CONTEXT) continue;
        close_context(s);
        opened = 0;
    }
    if (opened) close_context(s);
    t_free_spare();
    t_report_begin();
    atomic_fetch_sub(&s->running, 1);
    return NULL;
}

/* The engines of t_engines that are wanted and here; those of GPUs first. */
static void find_engines(soak *s) {
    for (size_t e = T_ENGINES; e-- > 0;) {
        int here;
        H.engine_name = gmm_engine_name(t_engines[e].name);
        if (!t_engine_wanted(e) || t_open(e)) continue;
        here = t_has(t_engines[e].name);
        t_close();
        if (here) s->engines[s->engine_count++] = e;
    }
}

static void print_minute(const soak *s, double begin) {
    printf("%4.0f s: %ld steps, %ld failed, %lld checks, %lld contexts, %ld MiB resident\n", now() - begin,
           t_tally->count[T_PASSED] + t_tally->count[T_FAILED], (long)t_tally->count[T_FAILED],
           (long long)s->checks, (long long)s->contexts, resident());
    fflush(stdout);
}

int t_soak(double seconds, int64_t steps, int threads) {
    static soak s;
    static soak_thread thread[MOST_THREADS];
    const struct timespec pause = {0, 100000000};
    const double begin = now();
    double said = begin, worst = 0.0;
    int started = 0, status;
    if (threads > MOST_THREADS) threads = MOST_THREADS;
    find_engines(&s);
    if (!s.engine_count) {
        fprintf(stderr, "soak: no engine\n");
        return 2;
    }
    s.harness = &H;
    s.state = &T;
    s.end = begin + seconds;
    s.steps = steps;
    printf("soak: seed %llu, %d threads, %d engines\n", (unsigned long long)H.seed, threads, s.engine_count);
    for (; started < threads; started++) {
        thread[started].all = &s;
        thread[started].index = started;
        atomic_fetch_add(&s.running, 1);
        if (!pthread_create(&thread[started].thread, NULL, soak_main, &thread[started])) continue;
        atomic_fetch_sub(&s.running, 1);
        break;
    }
    while (atomic_load(&s.running) > 0) {
        (void)nanosleep(&pause, NULL);
        if (now() - said < 60.0) continue;
        said = now();
        print_minute(&s, begin);
    }
    for (int i = 0; i < started; i++) {
        (void)pthread_join(thread[i].thread, NULL);
        if (thread[i].worst > worst) worst = thread[i].worst;
    }
    print_minute(&s, begin);
    t_report_table();
    printf("largest error: %.1f%% of its bound\n", 100.0 * worst);
    t_report_totals();
    status = t_tally->count[T_FAILED] || atomic_load(&s.leaks) || started < threads;
    if (!status && (atomic_load(&s.no_context) || !t_tally->count[T_PASSED])) status = 2;
    return status;
}
