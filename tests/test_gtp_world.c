/* test_gtp_world.c - what the tests of GTP have in common; see gtp_world.h */
#ifndef _POSIX_C_SOURCE
#define _POSIX_C_SOURCE 200809L /* clock_gettime */
#endif
#include "gtp_world.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

double gtp_seconds(void) {
    struct timespec t;
    (void)clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* ----------------------------------------------------------------------------------------------------- Memory --- */

enum { CANARY = 0xC3, GUARD = 256 };

/* A block begins with its size, then come canaries, its bytes, and canaries. */
void *gtp_block(size_t bytes, int byte) {
    unsigned char *p = (unsigned char *)aligned_alloc(GUARD, (bytes + 3 * GUARD - 1) / GUARD * GUARD);
    if (!p) abort();
    memset(p, CANARY, GUARD);
    memcpy(p, &bytes, sizeof bytes);
    memset(p + GUARD, byte, bytes);
    memset(p + GUARD + bytes, CANARY, GUARD);
    return p + GUARD;
}

static int intact(const void *block) {
    const unsigned char *p = (const unsigned char *)block;
    size_t bytes;
    int good = 1;
    memcpy(&bytes, p - GUARD, sizeof bytes);
    for (size_t i = sizeof bytes; i < GUARD; i++) good &= p[(ptrdiff_t)i - GUARD] == CANARY;
    for (size_t i = 0; i < GUARD; i++) good &= p[bytes + i] == CANARY;
    return good;
}

/* NULL is allowed. */
int gtp_block_free(void *block) {
    const int good = !block || intact(block);
    if (block) free((unsigned char *)block - GUARD);
    return good;
}

static void **blocks;
static size_t block_count, block_capacity;

void *gtp_memory(size_t bytes, int byte) {
    if (block_count == block_capacity) {
        block_capacity = 2 * block_capacity + 64;
        blocks = (void **)realloc(blocks, block_capacity * sizeof *blocks);
        if (!blocks) abort();
    }
    return blocks[block_count++] = gtp_block(bytes, byte);
}

void (gtp_check_memory)(void) {
    for (size_t i = 0; i < block_count; i++) {
        size_t bytes;
        memcpy(&bytes, (const unsigned char *)blocks[i] - GUARD, sizeof bytes);
        T_CHECK(intact(blocks[i]), "memory beside a buffer of %zu bytes was written", bytes);
    }
}

void gtp_free_memory(void) {
    while (block_count > 0) (void)gtp_block_free(blocks[--block_count]);
}

/* ---------------------------------------------------------------------------------------------- Traced streams --- */

static int stream_index(const gtp_trace *t, gmm_stream stream) {
    int i = 0;
    while (i < TRACE_STREAMS - 1 && t->stream[i] != stream) i++;
    return i;
}

static int *clock_of(gtp_trace *t, gmm_event event) {
    int i = 0;
    while (i < t->events && t->event[i].event != event) i++;
    if (i == TRACE_EVENTS) abort();
    if (i == t->events) t->event[t->events++].event = event;
    return t->event[i].of;
}

void gtp_trace_operation(gtp_trace *t, gmm_stream stream) {
    const int i = stream_index(t, stream);
    t->clock[i][i]++;
    t->batch[i].count = 0;
}

/* Adds wait number t->waits of a stream for an event, and finds those of the batch that the others imply. */
static void add_to_batch(gtp_trace *t, int stream, const int *of) {
    const int *before = t->batch[stream].before;
    int count;
    if (t->batch[stream].count == TRACE_BATCH) abort();
    if (!t->batch[stream].count) memcpy(t->batch[stream].before, t->clock[stream], sizeof t->clock[stream]);
    count = ++t->batch[stream].count;
    t->batch[stream].wait[count - 1].wait = t->waits;
    memcpy(t->batch[stream].wait[count - 1].of, of, sizeof t->clock[stream]);
    for (int j = 0; j < count; j++) {
        int needed = 0;
        for (int i = 0; i < TRACE_STREAMS; i++) {
            int others = before[i];
            for (int k = 0; k < count; k++)
                if (k != j && t->batch[stream].wait[k].of[i] > others) others = t->batch[stream].wait[k].of[i];
            needed |= t->batch[stream].wait[j].of[i] > others;
        }
        t->implied[t->batch[stream].wait[j].wait] = !needed;
    }
}

static gmm_status traced_wait(void *self, gmm_stream stream, gmm_event event, uint32_t flags) {
    gtp_trace *t = (gtp_trace *)self;
    const int *of = clock_of(t, event), s = stream_index(t, stream);
    if (++t->waits == t->drop) return GMM_OK;
    if (t->waits < TRACE_WAITS) add_to_batch(t, s, of);
    for (int i = 0; i < TRACE_STREAMS; i++) t->clock[s][i] = of[i] > t->clock[s][i] ? of[i] : t->clock[s][i];
    return t->inner.stream_wait(t->inner.self, stream, event, flags);
}

static gmm_status traced_record(void *self, gmm_event event, gmm_stream stream, uint32_t flags) {
    gtp_trace *t = (gtp_trace *)self;
    const int i = stream_index(t, stream);
    memcpy(clock_of(t, event), t->clock[i], sizeof t->clock[i]);
    t->batch[i].count = 0;
    return t->inner.event_record(t->inner.self, event, stream, flags);
}

static gmm_status traced_run(void *self, const gmm_work *work, gmm_stream stream) {
    const gmm_runtime *inner = &((const gtp_trace *)self)->inner;
    gtp_trace_operation((gtp_trace *)self, stream);
    return inner->run(inner->self, work, stream);
}
static gmm_status traced_copy(void *self, void *to, const void *from, size_t bytes, gmm_stream stream) {
    const gmm_runtime *inner = &((const gtp_trace *)self)->inner;
    gtp_trace_operation((gtp_trace *)self, stream);
    return inner->copy(inner->self, to, from, bytes, stream);
}
static gmm_status traced_copy2d(void *self, void *to, size_t to_pitch, const void *from, size_t from_pitch,
                                size_t width, size_t height, gmm_stream stream) {
    const gmm_runtime *inner = &((const gtp_trace *)self)->inner;
    gtp_trace_operation((gtp_trace *)self, stream);
    return inner->copy2d(inner->self, to, to_pitch, from, from_pitch, width, height, stream);
}
static gmm_status traced_fill(void *self, void *to, int32_t value, size_t bytes, gmm_stream stream) {
    const gmm_runtime *inner = &((const gtp_trace *)self)->inner;
    gtp_trace_operation((gtp_trace *)self, stream);
    return inner->fill(inner->self, to, value, bytes, stream);
}
static gmm_status traced_fill2d(void *self, void *to, size_t pitch, int32_t value, size_t width, size_t height,
                                gmm_stream stream) {
    const gmm_runtime *inner = &((const gtp_trace *)self)->inner;
    gtp_trace_operation((gtp_trace *)self, stream);
    return inner->fill2d(inner->self, to, pitch, value, width, height, stream);
}

/* The other functions of the table call the inner one alone. */
static gmm_status stream_create(void *self, int32_t priority, gmm_stream *out) {
    return ((gtp_trace *)self)->inner.stream_create(((gtp_trace *)self)->inner.self, priority, out);
}
static gmm_status stream_destroy(void *self, gmm_stream stream) {
    return ((gtp_trace *)self)->inner.stream_destroy(((gtp_trace *)self)->inner.self, stream);
}
static gmm_status stream_sync(void *self, gmm_stream stream) {
    return ((gtp_trace *)self)->inner.stream_sync(((gtp_trace *)self)->inner.self, stream);
}
static gmm_status event_create(void *self, gmm_event *out) {
    return ((gtp_trace *)self)->inner.event_create(((gtp_trace *)self)->inner.self, out);
}
static gmm_status event_destroy(void *self, gmm_event event) {
    return ((gtp_trace *)self)->inner.event_destroy(((gtp_trace *)self)->inner.self, event);
}
static gmm_status event_query(void *self, gmm_event event, int32_t *done) {
    return ((gtp_trace *)self)->inner.event_query(((gtp_trace *)self)->inner.self, event, done);
}
static gmm_status event_sync(void *self, gmm_event event) {
    return ((gtp_trace *)self)->inner.event_sync(((gtp_trace *)self)->inner.self, event);
}
static gmm_status is_capturing(void *self, gmm_stream stream, int32_t *out) {
    return ((gtp_trace *)self)->inner.is_capturing(((gtp_trace *)self)->inner.self, stream, out);
}

gmm_runtime gtp_traced(gtp_trace *t) {
    gmm_runtime r = GMM_ZERO;
    r.space = t->inner.space;
    r.self = t;
    r.stream_create = stream_create;
    r.stream_destroy = stream_destroy;
    r.stream_wait = traced_wait;
    r.stream_sync = stream_sync;
    r.event_create = event_create;
    r.event_destroy = event_destroy;
    r.event_record = traced_record;
    r.event_query = event_query;
    r.event_sync = event_sync;
    r.copy = traced_copy;
    r.copy2d = traced_copy2d;
    r.fill = traced_fill;
    r.fill2d = traced_fill2d;
    r.is_capturing = is_capturing;
    r.run = traced_run;
    return r;
}
