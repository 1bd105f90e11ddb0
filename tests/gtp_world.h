/* gtp_world.h - what the tests of GTP have in common: a hash, a clock, memory between canaries, and a runtime table
   that records the order of streams. Link with test_gtp_world.c. */
#ifndef GMM_TESTS_GTP_WORLD_H
#define GMM_TESTS_GTP_WORLD_H

#include "test.h"

#include "gmm_gtp.h"

static inline int64_t up(int64_t a, int64_t b) { return (a + b - 1) / b * b; }

static inline uint64_t mix(uint64_t x) {
    x = (x ^ (x >> 31)) * 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 29)) * 0xBF58476D1CE4E5B9u;
    return x ^ (x >> 32);
}

/* Seconds on a clock that is never set back. */
double gtp_seconds(void);

/* ----------------------------------------------------------------------------------------------------- Memory --- */

/* Memory aligned to 256, with every byte set to `byte`: for cases that make thousands of buffers, where T_OK would take
   long to check all, and for runtime objects, where a refused call leaves its message. gtp_check_memory checks 256
   canary bytes behind each buffer and 248 before it. The memory lives until gtp_free_memory, also where a case fails,
   so that the next one can destroy the objects. */
void *gtp_memory(size_t bytes, int byte);
#define gtp_check_memory(...) T_CALL(gtp_check_memory, __VA_ARGS__)
void (gtp_check_memory)(void);
void gtp_free_memory(void);

/* A block like those, which the test frees itself; gtp_block_free returns 1 if its canaries are as they were. */
void *gtp_block(size_t bytes, int byte);
int gtp_block_free(void *block);

/* ---------------------------------------------------------------------------------------------- Traced streams --- */

enum { TRACE_STREAMS = 4, TRACE_EVENTS = 512, TRACE_WAITS = 2048, TRACE_BATCH = 16 };

/* Vector clocks of the streams of one rank, kept apart from the library: clock[s][t] is the number of operations of
   stream t that stream s is ordered after. A wait is implied if the entries that it advances are advanced as far by
   what the stream was ordered after before, or by other waits between which nothing else is enqueued on the stream. */
typedef struct gtp_trace {
    gmm_runtime inner;                 /* what the traced table calls; the caller sets it, the streams and `drop` */
    gmm_stream stream[TRACE_STREAMS];  /* any other one counts as the last of them */
    int64_t drop;                      /* number of the wait that is left out, from 1; 0: none */
    int64_t waits;
    unsigned char implied[TRACE_WAITS]; /* by the number of the wait */
    /* private */
    int clock[TRACE_STREAMS][TRACE_STREAMS], events;
    struct { gmm_event event; int of[TRACE_STREAMS]; } event[TRACE_EVENTS];
    struct { /* waits of a stream since its last operation or record, and its clock before them */
        int count, before[TRACE_STREAMS];
        struct { int64_t wait; int of[TRACE_STREAMS]; } wait[TRACE_BATCH];
    } batch[TRACE_STREAMS];
} gtp_trace;

/* The table over t->inner. The rank's collectives are operations too, which the caller reports. */
gmm_runtime gtp_traced(gtp_trace *t);
void gtp_trace_operation(gtp_trace *t, gmm_stream stream);

#endif
