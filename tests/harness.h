/* harness.h - what the parts of the test harness share: test_main.c (options, cases, processes), test_memory.c (guarded
   memory, calls, matrices) and test_report.c (comparisons, failures, progress, the table at the end). Tests include
   test.h alone. */
#ifndef GMM_TESTS_HARNESS_H
#define GMM_TESTS_HARNESS_H

#include "test.h"

#include <setjmp.h>
#include <stdatomic.h>

/* Families of cases: the rows of the table at the end. */
enum {
#define X(name) T_FAMILY_##name,
    T_FILES(X)
#undef X
    T_FAMILY_INJECTED, /* the case of --inject-failure */
    T_FAMILIES
};

/* Columns of the table: cases without a context, then one for each row of t_engines. */
enum { T_ENGINES = 3, T_HOST_COLUMN = 0, T_COLUMNS = 1 + T_ENGINES };
extern const struct t_engine { gmm_engine name, engine; gmm_space space; } t_engines[T_ENGINES];

typedef enum t_outcome { T_PASSED, T_FAILED, T_SKIPPED, T_OUTCOMES } t_outcome;

typedef struct t_case {
    void (*run)(int arg);
    int arg, where, family, weight; /* weight: of t_random; 0: the case is none of these */
    size_t bytes; /* bytes given to t_needs */
    char name[160];
} t_case;
enum { T_ANY_ENGINE, T_HOST_ONLY, T_GPU_ENGINE, T_GPU_ONCE, T_GPU_ALONE };

/* A call that the running case is in, see T_CALL. */
enum { T_DEPTH = 16 };
typedef struct t_call { const char *what, *file; int line; } t_call;

extern _Thread_local struct t_harness {
    t_case *cases;
    size_t count, capacity;
    jmp_buf leave;
    uint64_t seed, random;
    double worst; /* largest error of the running case, as a fraction of its bound */
    long allocations, live; /* before the running call; not yet released by contexts of this thread */
    size_t memory;        /* size of the memory of the engine, where cases may exceed it; 0: host memory, not limited */
    size_t needs, sparse; /* the running case: its t_needs, and the bytes that t_sparse has handed out */
    int times, jobs, last; /* last: this process runs the cases that must run alone */
    int column, family;    /* of the running case; of the cases that are added */
    long place, mine; /* index of the next case in the common order; index of the next one that this process runs */
    long total;       /* cases of all processes */
    int64_t step;     /* of a random case: makes its data, beside seed and name */
    int soak;         /* 1: this thread runs random cases one after another (test_soak.c) */
    void (*undo)(void);  /* of the running case: its t_finally; NULL: none */
    const char *command; /* what runs a case alone, up to the options of the case */
    /* What a failure of the running case tells. */
    const char *running, *engine_name;
    char message[1024], about[256];
    t_call calls[T_DEPTH];
    int depth;         /* calls that the case is in, also those that `calls` has no place for */
    t_call before;     /* the last T_OK or T_REFUSED */
    int64_t *splits;   /* [groups] given to t_splits; NULL: none */
    int64_t groups;
    gmm_op op;         /* of the last t_linear; 0: none */
    gmm_linear linear;
    gmm_groups linear_groups;
    gmm_dtype linear_dtypes[3]; /* of its first and second operand and its result; GMM_NONE: unknown */
} H;

/* Memory that the processes of --jobs share. */
extern struct t_tally {
    atomic_long taken, count[T_OUTCOMES];
    atomic_long cell[T_FAMILIES][T_COLUMNS][T_OUTCOMES];
    atomic_long begun[T_COLUMNS]; /* cases that were run, also those that crashed */
    atomic_long alone; /* id of the process whose case needs most of the GPU memory; 0: none */
    atomic_long told;  /* seconds since the epoch at which progress was last told where stderr is no terminal */
} *t_tally;

/* test_main.c */
uint64_t t_hash(const void *data, size_t bytes, uint64_t h);
/* Runs a case on T.ctx, counts and reports it. */
void t_run(const t_case *c);
/* Opens the context of engine e of t_engines; 2, and a message, where there is none. */
int t_open(size_t e);
void t_close(void);
/* Whether the engine is available in T.ctx. If not, gmm_last_error has the reason. */
int t_has(gmm_engine engine);
/* Whether the command line selects this case, or engine e. */
int t_wanted(const char *name);
int t_engine_wanted(size_t e);

/* test_soak.c */
/* Runs random cases for so many seconds, or so many steps of each thread if `steps` is not 0. Returns the status of the
   program. */
int t_soak(double seconds, int64_t steps, int threads);

/* test_memory.c */
/* What a buffer of the case holds, as far as it was declared: `count` matrices of rows x cols elements of `element`
   bytes. `at`: element i is element at[i] of such matrices; NULL: they are all there, in order. */
typedef struct t_shape {
    int64_t count, rows, cols, element;
    const int64_t *at;
} t_shape;
/* The shape of the live buffer that holds `address`, and the byte in it; NULL where none was declared. */
const t_shape *t_shape_at(const void *address, size_t *byte);
/* Whether all of these bytes are host memory that a live buffer of this case holds. */
int t_readable(const void *address, size_t bytes);
void t_free_all(void);
void t_free_spare(void);
void *t_counted_alloc(void *user, size_t bytes);
void t_counted_release(void *user, void *memory);

/* test_report.c */
/* Forgets what was noted for the case before. */
void t_report_begin(void);
void t_report_failure(const t_case *c);
void t_report_crash(const char *why);
void t_report_skip(const t_case *c);
void t_count(int family, t_outcome outcome);
/* Tells which case runs, on a terminal; elsewhere a line every ten seconds. Clear removes the line. */
void t_progress(const t_case *c);
void t_progress_clear(void);
/* The table of families and engines, and the line of totals. */
void t_report_table(void);
void t_report_totals(void);

#endif
