/* process_ranks.c - ranks that are processes: their segment of shared memory, how a case starts and ends them, and a
   communicator over the segment; see process_ranks.h */
#define _GNU_SOURCE /* robust mutexes, memfd_create, fork, prctl */
#include "process_ranks.h"

#ifdef GMM_WITH_CPU_RANKS
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#ifdef __linux__
#include <sys/prctl.h>
#endif

enum { CHUNK = 64 << 10, HEADER = 64 };

/* A rank's part of the segment. */
typedef struct seat {
    pthread_mutex_t alive;     /* robust; the rank holds it as long as it lives */
    atomic_int joined, ended;  /* joined: it has taken `alive`; ended: a peer has found it unheld */
    atomic_int gave_up;
    char why[128];             /* written before gave_up */
    _Atomic uint64_t step;     /* barriers that the rank has reached */
    char call[HEADER];         /* the collective that it is in, compared by all ranks */
    process_report report;
    _Alignas(16) unsigned char bytes[CHUNK]; /* what it sends */
} seat;

struct process_segment {
    int size;
    _Alignas(16) unsigned char job[PROCESS_JOB_BYTES];
    seat seat[PROCESS_RANKS];
    _Alignas(16) unsigned char result[];
};

static double now(void) {
    struct timespec t;
    (void)clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void pause_briefly(void) {
    const struct timespec t = {0, 50000};
    (void)nanosleep(&t, NULL);
}

/* --------------------------------------------------------------------------------------------------- The case --- */

static process_segment *mapped; /* of the last call of processes_run */
static size_t mapped_bytes;

static process_segment *segment_open(size_t bytes, int *fd) {
    process_segment *s = NULL;
    *fd = memfd_create("gmm_tests", MFD_CLOEXEC);
    if (*fd < 0) return NULL;
    if (!ftruncate(*fd, (off_t)bytes))
        s = (process_segment *)mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, *fd, 0);
    if (s && s != MAP_FAILED) return s;
    (void)close(*fd);
    return NULL;
}

static pid_t start(const char *program, int fd, int rank) {
    char argument[64];
    char *const words[] = {(char *)(uintptr_t)"gmm_tests", (char *)(uintptr_t)"--rank", argument, NULL};
    const pid_t parent = getpid();
    pid_t pid;
    snprintf(argument, sizeof argument, "%d:%d:%s", fd, rank, program);
    fflush(stdout);
    pid = fork();
    if (pid) return pid;
    /* A rank does not outlive the case that started it. It starts faster without the setting for ranks that are
       threads (t_ready_for_ranks). */
    (void)unsetenv("CUDA_MODULE_LOADING");
    if (fcntl(fd, F_SETFD, 0)) _exit(126);
#ifdef __linux__
    (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
#endif
    if (getppid() != parent) _exit(126);
    (void)execv("/proc/self/exe", words);
    _exit(127);
}

process_segment *processes_run(const char *program, const void *job, size_t job_bytes, size_t result_bytes, int size,
                               double seconds) {
    const double begin = now();
    pthread_mutexattr_t attributes;
    pid_t pid[PROCESS_RANKS];
    int stopped[PROCESS_RANKS] = {0}, fd = -1, left = 0, halted = 0, status;
    if (mapped) (void)munmap(mapped, mapped_bytes);
    mapped_bytes = sizeof *mapped + result_bytes;
    mapped = segment_open(mapped_bytes, &fd);
    if (!mapped) T_FAIL("no shared memory: %s", strerror(errno));
    T_CHECK(job_bytes <= PROCESS_JOB_BYTES && size <= PROCESS_RANKS, "%zu bytes, %d ranks", job_bytes, size);
    mapped->size = size;
    memcpy(mapped->job, job, job_bytes);
    (void)pthread_mutexattr_init(&attributes);
    (void)pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
    (void)pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
    for (int i = 0; i < size; i++) (void)pthread_mutex_init(&mapped->seat[i].alive, &attributes);
    for (int i = 0; i < size; i++) {
        pid[i] = start(program, fd, i);
        left += pid[i] > 0;
    }
    (void)close(fd);
    while (left > 0) {
        const int late = halted == left || now() - begin > seconds; /* a stopped rank ends after all others */
        for (int i = 0; i < size; i++) {
            if (pid[i] <= 0) continue;
            if (waitpid(pid[i], &status, WNOHANG | WUNTRACED | WCONTINUED) != pid[i]) {
                if (late) (void)kill(pid[i], SIGKILL);
                continue;
            }
            halted -= stopped[i];
            stopped[i] = WIFSTOPPED(status);
            halted += stopped[i];
            if (!WIFEXITED(status) && !WIFSIGNALED(status)) continue;
            mapped->seat[i].report.done = WIFEXITED(status) && !WEXITSTATUS(status);
            pid[i] = 0;
            left--;
        }
        pause_briefly();
    }
    return mapped;
}
const process_report *processes_report(const process_segment *s, int rank) { return &s->seat[rank].report; }
unsigned char *processes_result(process_segment *s) { return s->result; }

/* ------------------------------------------------------------------------------------------------------ A rank --- */

int process_join(process_rank *r, const char *argument, int timeout_ms) {
    int fd, rank;
    process_segment *s;
    struct stat file;
    memset(r, 0, sizeof *r);
    if (sscanf(argument, "%d:%d:", &fd, &rank) != 2 || rank < 0 || rank >= PROCESS_RANKS || fstat(fd, &file)) return 0;
    s = (process_segment *)mmap(NULL, (size_t)file.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    (void)close(fd);
    if (s == MAP_FAILED) return 0;
    r->segment = s;
    r->rank = rank;
    r->size = s->size;
    r->timeout_ms = timeout_ms;
    r->job = s->job;
    r->report = &s->seat[rank].report;
    r->result = s->result;
    if (pthread_mutex_lock(&s->seat[rank].alive)) return 0;
    atomic_store(&s->seat[rank].joined, 1);
    return 1;
}

/* Whether the process of a rank that has joined has ended: nobody holds its mutex. */
static int has_ended(seat *s) {
    int e;
    if (!atomic_load(&s->joined) || atomic_load(&s->ended)) return atomic_load(&s->ended);
    e = pthread_mutex_trylock(&s->alive);
    if (e == EBUSY) return 0;
    if (!e || e == EOWNERDEAD) (void)pthread_mutex_unlock(&s->alive);
    atomic_store(&s->ended, 1);
    return 1;
}

static gmm_status fail(process_rank *r, const char *text, int peer) {
    if (r->error.text[0]) return GMM_E_COMM;
    r->error.status = GMM_E_COMM;
    snprintf(r->error.text, sizeof r->error.text, "%s%s%srank %d of %d %s", r->what ? "'" : "", r->what ? r->what : "",
             r->what ? "': " : "", peer, r->size, text);
    return GMM_E_COMM;
}

/* Waits until all ranks have called it as often as this one. */
static gmm_status meet(process_rank *r) {
    const double begin = now();
    seat *const all = r->segment->seat;
    if (r->error.text[0]) return GMM_E_COMM;
    atomic_store(&all[r->rank].step, ++r->step);
    for (int i = 0; i < r->size; i++)
        while (atomic_load(&all[i].step) < r->step) {
            const int ended = has_ended(&all[i]);
            if (atomic_load(&all[i].step) >= r->step) break; /* it came here before it ended */
            if (atomic_load(&all[i].gave_up)) {
                char text[160];
                snprintf(text, sizeof text, "has given up: %s", all[i].why);
                return fail(r, text, i);
            }
            if (ended) return fail(r, "has ended: its process is gone", i);
            if (now() - begin > 1e-3 * r->timeout_ms) return fail(r, "has not joined in time", i);
            pause_briefly();
        }
    return GMM_OK;
}

gmm_status process_exchange(void *rank, const void *mine, void *all, size_t bytes) {
    process_rank *r = (process_rank *)rank;
    gmm_status s;
    if (bytes > CHUNK) return fail(r, "exchanges more bytes than a seat has", r->rank);
    memcpy(r->segment->seat[r->rank].bytes, mine, bytes);
    s = meet(r);
    for (int i = 0; i < r->size && !s; i++) memcpy((char *)all + (size_t)i * bytes, r->segment->seat[i].bytes, bytes);
    return s ? s : meet(r); /* the seats may be written again */
}

/* ------------------------------------------------------------------------------------------- The communicator --- */

/* Begins a collective: all ranks compare what they call. */
static gmm_status begin_call(process_rank *r, const char *call, size_t bytes) {
    const seat *all = r->segment->seat;
    gmm_status s;
    if (r->error.text[0]) return GMM_E_COMM;
    memset(r->segment->seat[r->rank].call, 0, HEADER);
    snprintf(r->segment->seat[r->rank].call, HEADER, "%s %zu %.30s", call, bytes, r->what ? r->what : "");
    r->calls++;
    s = meet(r);
    for (int i = 0; i < r->size && !s; i++)
        if (memcmp(all[i].call, all[r->rank].call, HEADER)) {
            char text[2 * HEADER + 40];
            snprintf(text, sizeof text, "calls '%s', this one '%s'", all[i].call, all[r->rank].call);
            s = fail(r, text, i);
        }
    if (!s && r->calls == r->fatal_call) {
        memset(r->segment->seat[r->rank].bytes, 0xFF, CHUNK / 2);
        (void)raise(SIGKILL);
    }
    return s;
}

/* Makes part `part` of every rank's send buffer, of `bytes` bytes, visible to all, a chunk after the other, and calls
   `take` for each chunk of `n` bytes at `at`. */
typedef void taker(process_rank *r, int part, size_t at, size_t n, void *to);
static gmm_status show(process_rank *r, const char *send, int part, size_t bytes, taker *take, void *to) {
    gmm_status s = GMM_OK;
    for (size_t at = 0; at < bytes && !s; at += CHUNK) {
        const size_t n = bytes - at < CHUNK ? bytes - at : CHUNK;
        memcpy(r->segment->seat[r->rank].bytes, send + at, n);
        s = meet(r);
        if (!s) take(r, part, at, n, to);
        if (!s) s = meet(r);
    }
    return s;
}

typedef struct received { char *recv; size_t bytes; gmm_dtype dtype; } received;
static void take_all(process_rank *r, int part, size_t at, size_t n, void *to) {
    const received *d = (const received *)to;
    (void)part;
    for (int i = 0; i < r->size; i++) memcpy(d->recv + (size_t)i * d->bytes + at, r->segment->seat[i].bytes, n);
}
static void take_own(process_rank *r, int part, size_t at, size_t n, void *to) {
    const received *d = (const received *)to;
    for (int i = 0; i < r->size && part == r->rank; i++)
        memcpy(d->recv + (size_t)i * d->bytes + at, r->segment->seat[i].bytes, n);
}
static void take_sum(process_rank *r, int part, size_t at, size_t n, void *to) {
    const received *d = (const received *)to;
    const size_t size = (size_t)gmm_dtype_bits(d->dtype) / 8;
    for (size_t k = 0; k < n / size && part == r->rank; k++) {
        float sum = gmm_load(d->dtype, r->segment->seat[0].bytes, (int64_t)k);
        for (int i = 1; i < r->size; i++) sum += gmm_load(d->dtype, r->segment->seat[i].bytes, (int64_t)k);
        gmm_store(d->dtype, d->recv + at, (int64_t)k, sum);
    }
}
static void take_most(process_rank *r, int part, size_t at, size_t n, void *to) {
    float *values = (float *)(void *)(((const received *)to)->recv + at);
    (void)part;
    for (size_t k = 0; k < n / sizeof *values; k++)
        for (int i = 0; i < r->size; i++) {
            const float x = ((const float *)(const void *)r->segment->seat[i].bytes)[k];
            if (i == 0 || x > values[k] || x != x) values[k] = x;
        }
}

static gmm_status all_gather(void *self, const void *send, void *recv, size_t bytes, gmm_stream stream) {
    process_rank *r = (process_rank *)self;
    received d = {(char *)recv, bytes, GMM_NONE};
    const gmm_status s = begin_call(r, "all_gather", bytes);
    (void)stream;
    return s ? s : show(r, (const char *)send, 0, bytes, take_all, &d);
}
static gmm_status reduce_scatter(void *self, const void *send, void *recv, size_t count, gmm_dtype dtype,
                                 gmm_stream stream) {
    process_rank *r = (process_rank *)self;
    const size_t bytes = count * (size_t)gmm_dtype_bits(dtype) / 8;
    received d = {(char *)recv, bytes, dtype};
    gmm_status s = begin_call(r, "reduce_scatter", bytes);
    (void)stream;
    for (int i = 0; i < r->size && !s; i++) s = show(r, (const char *)send + (size_t)i * bytes, i, bytes, take_sum, &d);
    return s;
}
static gmm_status all_to_all(void *self, const void *send, void *recv, size_t bytes, gmm_stream stream) {
    process_rank *r = (process_rank *)self;
    received d = {(char *)recv, bytes, GMM_NONE};
    gmm_status s = begin_call(r, "all_to_all", bytes);
    (void)stream;
    for (int i = 0; i < r->size && !s; i++) s = show(r, (const char *)send + (size_t)i * bytes, i, bytes, take_own, &d);
    return s;
}
static gmm_status all_reduce_max(void *self, float *values, size_t count, gmm_stream stream) {
    process_rank *r = (process_rank *)self;
    received d = {(char *)values, count * sizeof *values, GMM_F32};
    const gmm_status s = begin_call(r, "all_reduce_max", d.bytes);
    (void)stream;
    return s ? s : show(r, (const char *)values, 0, d.bytes, take_most, &d);
}
static gmm_status group_begin(void *self, const char *what) {
    process_rank *r = (process_rank *)self;
    r->what = what;
    return r->error.text[0] ? GMM_E_COMM : GMM_OK;
}
static gmm_status group_end(void *self) {
    process_rank *r = (process_rank *)self;
    r->what = NULL;
    return r->error.text[0] ? GMM_E_COMM : GMM_OK;
}
static gmm_status poll_ranks(void *self, gmm_error *error) {
    process_rank *r = (process_rank *)self;
    for (int i = 0; i < r->size && !r->error.text[0]; i++)
        if (i != r->rank && has_ended(&r->segment->seat[i])) (void)fail(r, "has ended: its process is gone", i);
    if (error) *error = r->error;
    return r->error.text[0] ? GMM_E_COMM : GMM_OK;
}
static void give_up(void *self, const char *why) {
    process_rank *r = (process_rank *)self;
    seat *own = &r->segment->seat[r->rank];
    if (atomic_load(&own->gave_up)) return;
    snprintf(own->why, sizeof own->why, "%.120s", why);
    atomic_store(&own->gave_up, 1);
    (void)fail(r, "has given up", r->rank);
}

void process_comm(process_rank *r, gmm_comm *out) {
    memset(out, 0, sizeof *out);
    out->rank = r->rank;
    out->size = r->size;
    out->self = r;
    out->group_begin = group_begin;
    out->group_end = group_end;
    out->all_gather = all_gather;
    out->reduce_scatter = reduce_scatter;
    out->all_to_all = all_to_all;
    out->all_reduce_max = all_reduce_max;
    out->poll = poll_ranks;
    out->give_up = give_up;
}
#endif
