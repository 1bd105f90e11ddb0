/* test_runtime.c - the runtime table: streams, events, copies, fills, captures. */
#include "test.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifdef HAVE_CUDA
#include "device.h"
#endif

static gmm_runtime runtime(void) {
    gmm_runtime rt = GMM_ZERO;
    T_OK(gmm_runtime_of(T.ctx, &rt));
    T_CHECK(rt.self && rt.space == T.config.space && rt.struct_size == 0, "filled for this context");
    return rt;
}

/* A call of the table that must succeed; unlike T_OK, it may allocate. */
#define OK(call) \
    do { \
        const gmm_status s_ = (call); \
        T_CHECK(s_ == GMM_OK, "%s: %s", gmm_status_name(s_), gmm_last_error(T.ctx)); \
    } while (0)

static unsigned char *random_bytes(size_t n) {
    unsigned char *host = (unsigned char *)t_host(n + 1);
    for (size_t i = 0; i < n; i++) host[i] = (unsigned char)t_rand();
    return host;
}

/* 1-D: from the host, within the memory space, back to the host; no byte beside them changes. */
static void copies(int arg) {
    static const size_t sizes[] = { 0, 1, 3, 16, 255, 4096, 100001 };
    const gmm_runtime rt = runtime();
    (void)arg;
    for (int i = 0; i < (int)T_COUNT(sizes); i++) {
        const size_t n = sizes[i];
        unsigned char *host = random_bytes(n), *back = (unsigned char *)t_host(n + 1);
        void *a = t_alloc(n), *b = t_alloc(n);
        T_OK(rt.copy(rt.self, a, host, n, T.stream));
        T_OK(rt.copy(rt.self, b, a, n, T.stream));
        T_OK(rt.copy(rt.self, back, b, n, T.stream));
        OK(rt.stream_sync(rt.self, T.stream));
        t_same("copy", host, back, n);
        T_OK(rt.fill(rt.self, b, 0xA7, n, T.stream));
        t_bytes("fill", t_get(b, n), 0xA7, n);
    }
    T_OK(rt.copy(rt.self, NULL, NULL, 0, T.stream));
    T_OK(rt.fill(rt.self, NULL, 3, 0, T.stream));
}

/* 2-D: gaps between rows stay as they are; nothing past the last row is touched. */
static void rows(int arg) {
    static const size_t shape[][4] = { /* width, height, dst pitch, src pitch */
        { 1, 1, 1, 1 }, { 5, 3, 5, 5 }, { 7, 4, 9, 12 }, { 64, 10, 64, 80 }, { 64, 10, 96, 64 }, { 0, 4, 3, 3 },
        { 8, 0, 8, 8 }, { 1000, 33, 1024, 1001 }, { 12, 1, 12, 500 } };
    const gmm_runtime rt = runtime();
    (void)arg;
    for (int i = 0; i < (int)T_COUNT(shape); i++) {
        const size_t w = shape[i][0], h = shape[i][1], to = shape[i][2], from = shape[i][3];
        const size_t to_n = w && h ? (h - 1) * to + w : 0, from_n = w && h ? (h - 1) * from + w : 0;
        unsigned char *host = random_bytes(from_n), *got;
        const void *src = t_in(host, from_n);
        void *dst = t_alloc(to_n);
        T_OK(rt.copy2d(rt.self, dst, to, src, from, w, h, T.stream));
        got = (unsigned char *)t_get(dst, to_n);
        for (size_t r = 0; r < h; r++) {
            t_same("copy2d", got + r * to, host + r * from, w);
            if (w && r + 1 < h) t_bytes("gap", got + r * to + w, 0xFF, to - w);
        }
        T_OK(rt.fill2d(rt.self, dst, to, 0x31, w, h, T.stream));
        got = (unsigned char *)t_get(dst, to_n);
        for (size_t r = 0; r < h; r++) {
            t_bytes("fill2d", got + r * to, 0x31, w);
            if (w && r + 1 < h) t_bytes("gap", got + r * to + w, 0xFF, to - w);
        }
    }
}

/* Two streams that hand one buffer back and forth by events; every value must arrive in its row. */
static void ordering(int arg) {
    enum { N = 3 << 19, ROUNDS = 24, KEPT = 64 };
    const gmm_runtime rt = runtime();
    unsigned char *shared = (unsigned char *)t_alloc(N), *kept = (unsigned char *)t_alloc(ROUNDS * KEPT), *got;
    gmm_stream a, b;
    gmm_event full, empty;
    int32_t done = -1;
    (void)arg;
    t_wait();
    OK(rt.stream_create(rt.self, 0, &a));
    OK(rt.stream_create(rt.self, -100, &b));
    OK(rt.event_create(rt.self, &full));
    OK(rt.event_create(rt.self, &empty));
    OK(rt.event_query(rt.self, full, &done));
    T_CHECK(done == 1, "an event without a record is reached");
    OK(rt.stream_wait(rt.self, a, empty, 0)); /* an event without a record: no wait */
    for (int i = 0; i < ROUNDS; i++) {
        OK(rt.stream_wait(rt.self, a, empty, 0));
        OK(rt.fill(rt.self, shared, 200, N, a));
        OK(rt.fill(rt.self, shared, i, N, a));
        /* outside of a capture the flag has no effect */
        OK(rt.event_record(rt.self, full, a, i % 2 ? (uint32_t)GMM_EVENT_EXTERNAL : 0));
        OK(rt.stream_wait(rt.self, b, full, i % 2 ? (uint32_t)GMM_EVENT_EXTERNAL : 0));
        OK(rt.copy2d(rt.self, kept + i * KEPT, 1, shared, N / KEPT, 1, KEPT, b)); /* samples of the whole buffer */
        OK(rt.event_record(rt.self, empty, b, 0));
    }
    OK(rt.event_sync(rt.self, empty));
    OK(rt.event_query(rt.self, empty, &done));
    T_CHECK(done == 1, "reached after event_sync");
    OK(rt.stream_sync(rt.self, a));
    OK(rt.stream_sync(rt.self, b));
    got = (unsigned char *)t_get(kept, ROUNDS * KEPT);
    for (int i = 0; i < ROUNDS; i++) t_bytes("round", got + i * KEPT, i, KEPT);
    OK(rt.event_destroy(rt.self, full));
    OK(rt.event_destroy(rt.self, empty));
    OK(rt.event_destroy(rt.self, NULL));
    OK(rt.stream_destroy(rt.self, a));
    OK(rt.stream_destroy(rt.self, b));
    OK(rt.stream_destroy(rt.self, NULL));
}

/* A stream of the table takes operations: convert, then a copy of its result. */
static void operations(int arg) {
    const gmm_runtime rt = runtime();
    const t_mat x = t_mat_in(GMM_BF16, 1, 40, 50, T_REALS), y = t_mat_out(GMM_F32, 1, 40, 50);
    double *host = (double *)t_host(sizeof(float) * 2000);
    gmm_conversion d = GMM_ZERO;
    gmm_stream stream;
    (void)arg;
    d.rows = 40;
    d.cols = 50;
    d.src = &x.mat;
    d.dst = &y.mat;
    t_wait();
    OK(rt.stream_create(rt.self, 0, &stream));
    OK(gmm_convert(T.ctx, &d, NULL, 0, stream));
    OK(rt.copy(rt.self, host, y.data, sizeof(float) * 2000, stream));
    OK(rt.stream_sync(rt.self, stream));
    for (int64_t i = 0; i < 2000; i++)
        T_CHECK(ref_load(GMM_F32, host, i) == x.v[i], "element %lld", (long long)i);
    OK(rt.stream_destroy(rt.self, stream));
}

/* Only create allocates, from the context's allocator, and a failing one is reported. */
static void *no_memory(void *user, size_t bytes) {
    return --*(int *)user >= 0 ? malloc(bytes) : NULL;
}
static void release(void *user, void *memory) {
    (void)user;
    free(memory);
}
static void allocations(int arg) {
    const gmm_runtime rt = runtime();
    const long before = T.allocations;
    gmm_event event = NULL;
    (void)arg;
    OK(rt.event_create(rt.self, &event));
    T_CHECK(event != NULL && (T.gpu || T.allocations == before + 1), "%ld allocations", T.allocations - before);
    T_OK(rt.event_record(rt.self, event, T.stream, 0));
    T_OK(rt.stream_wait(rt.self, T.stream, event, 0));
    T_OK(rt.event_sync(rt.self, event));
    OK(rt.event_destroy(rt.self, event));
    if (!T.gpu) {
        int left = 1; /* an allocation for the context itself */
        gmm_config config = T.config;
        gmm_context *ctx;
        gmm_runtime poor = GMM_ZERO;
        gmm_error error = GMM_ZERO;
        gmm_status s;
        config.allocator.user = &left;
        config.allocator.alloc = no_memory;
        config.allocator.release = release;
        s = gmm_create(&ctx, &config, &error);
        T_CHECK(s == GMM_OK, "%s", error.text);
        s = gmm_runtime_of(ctx, &poor);
        if (s == GMM_OK) s = poor.event_create(poor.self, &event);
        {
            const int named = strstr(gmm_last_error(ctx), "event_create") != NULL;
            gmm_destroy(ctx);
            T_CHECK(s == GMM_E_MEMORY && event == NULL && named, "%s", gmm_status_name(s));
        }
    }
}

static void errors(int arg) {
    gmm_runtime rt = runtime(), other = GMM_ZERO, part;
    unsigned char *a = (unsigned char *)t_alloc(64), *b = (unsigned char *)t_alloc(64);
    gmm_event event;
    int32_t flag = 0;
    (void)arg;
    T_REFUSED(GMM_E_NULL, gmm_runtime_of(T.ctx, NULL), "gmm_runtime_of", "out", NULL);
    T_CHECK(gmm_runtime_of(NULL, &rt) == GMM_E_NULL, "no context");
    other.struct_size = sizeof other + 8;
    T_REFUSED(GMM_E_VERSION, gmm_runtime_of(T.ctx, &other), "gmm_runtime_of", "struct_size", NULL);
    other.struct_size = 7;
    T_REFUSED(GMM_E_ARG, gmm_runtime_of(T.ctx, &other), "gmm_runtime_of", "struct_size 7 is too small", NULL);
    memset(&part, 0xEE, sizeof part); /* an older caller's table ends after `self` */
    part.struct_size = (uint32_t)(offsetof(gmm_runtime, self) + sizeof part.self);
    T_OK(gmm_runtime_of(T.ctx, &part));
    T_CHECK(part.self == rt.self, "self");
    t_bytes("behind", (const char *)&part + part.struct_size, 0xEE, sizeof part - part.struct_size);

    T_CHECK(rt.copy(NULL, a, b, 4, T.stream) == GMM_E_NULL, "no context");
    T_REFUSED(GMM_E_NULL, rt.stream_create(rt.self, 0, NULL), "stream_create", "out", NULL);
    T_REFUSED(GMM_E_NULL, rt.event_create(rt.self, NULL), "event_create", "out", NULL);
    T_REFUSED(GMM_E_NULL, rt.event_record(rt.self, NULL, T.stream, 0), "event_record", "event", NULL);
    T_REFUSED(GMM_E_NULL, rt.stream_wait(rt.self, T.stream, NULL, 0), "stream_wait", "event", NULL);
    T_REFUSED(GMM_E_NULL, rt.event_sync(rt.self, NULL), "event_sync", "event", NULL);
    T_REFUSED(GMM_E_NULL, rt.event_query(rt.self, NULL, &flag), "event_query", "event", NULL);
    T_REFUSED(GMM_E_NULL, rt.is_capturing(rt.self, T.stream, NULL), "is_capturing", "capturing", NULL);
    T_REFUSED(GMM_E_NULL, rt.copy(rt.self, NULL, b, 4, T.stream), "copy", "dst", NULL);
    T_REFUSED(GMM_E_NULL, rt.copy(rt.self, a, NULL, 4, T.stream), "copy", "src", NULL);
    T_REFUSED(GMM_E_NULL, rt.fill(rt.self, NULL, 0, 4, T.stream), "fill", "dst", NULL);
    T_REFUSED(GMM_E_ARG, rt.fill(rt.self, a, 256, 4, T.stream), "fill", "value 256", NULL);
    T_REFUSED(GMM_E_ARG, rt.fill2d(rt.self, a, 8, -1, 8, 2, T.stream), "fill2d", "value -1", NULL);
    T_REFUSED(GMM_E_ARG, rt.fill2d(rt.self, a, 7, 0, 8, 2, T.stream), "fill2d", "pitch of dst", "7", NULL);
    T_REFUSED(GMM_E_ARG, rt.copy2d(rt.self, a, 8, b, 7, 8, 2, T.stream), "copy2d", "pitch of src", "7", NULL);
    T_REFUSED(GMM_E_OVERFLOW, rt.copy2d(rt.self, a, SIZE_MAX / 2, b, 8, 8, 3, T.stream), "copy2d", "dst", NULL);
    {
        gmm_work work = GMM_ZERO;
        T_REFUSED(GMM_E_NULL, rt.run(rt.self, &work, T.stream), "run", "function is NULL", NULL);
        work.struct_size = (uint32_t)sizeof work + 8u;
        T_REFUSED(GMM_E_VERSION, rt.run(rt.self, &work, T.stream), "run", "struct_size", NULL);
        work.struct_size = 4;
        T_REFUSED(GMM_E_ARG, rt.run(rt.self, &work, T.stream), "run", "struct_size 4 is too small", NULL);
    }
    OK(rt.event_create(rt.self, &event));
    T_REFUSED(GMM_E_ARG, rt.event_record(rt.self, event, T.stream, 6), "event_record", "flags 0x6", NULL);
    T_REFUSED(GMM_E_ARG, rt.stream_wait(rt.self, T.stream, event, 2), "stream_wait", "flags 0x2", NULL);
    OK(rt.is_capturing(rt.self, T.stream, &flag));
    T_CHECK(flag == 0, "no capture");
    if (!T.gpu) {
        gmm_stream wrong = (gmm_stream)(void *)a;
        T_REFUSED(GMM_E_ARG, rt.fill(rt.self, a, 0, 4, wrong), "fill", "stream", NULL);
        T_REFUSED(GMM_E_ARG, rt.stream_sync(rt.self, wrong), "stream_sync", "stream", NULL);
        other.struct_size = 0;
        OK(gmm_runtime_of(t_context(&T.config), &other));
        T_CHECK(other.event_record(other.self, event, NULL, 0) == GMM_E_ARG, "an event of another context");
    }
    OK(rt.event_destroy(rt.self, event));
}

#ifdef HAVE_CUDA
static void went(const char *what, const char *why) { T_CHECK(!why, "%s: %s", what, why); }
#define went(...) T_CALL(went, __VA_ARGS__)

/* A graph of copies, fills and external events: each replay waits for work of another stream, and signals that stream.
   The host cannot wait for a capturing stream, and trying to leaves the capture valid. */
static void capture(int arg) {
    enum { N = 3 << 19 };
    const gmm_runtime rt = runtime();
    unsigned char *in = (unsigned char *)t_alloc(N), *out = (unsigned char *)t_alloc(N), *last;
    gmm_stream other;
    gmm_event ready, done;
    gmm_status status[7];
    int32_t inside = 0, outside = 1;
    char text[256];
    void *graph = NULL;
    (void)arg;
    last = (unsigned char *)t_alloc(N);
    t_wait();
    OK(rt.stream_create(rt.self, 0, &other));
    OK(rt.event_create(rt.self, &ready));
    OK(rt.event_create(rt.self, &done));
    went("begin", device_begin_capture());
    status[0] = rt.is_capturing(rt.self, T.stream, &inside);
    status[1] = rt.is_capturing(rt.self, other, &outside);
    status[2] = rt.stream_sync(rt.self, T.stream);
    (void)snprintf(text, sizeof text, "%s", gmm_last_error(T.ctx));
    status[3] = rt.stream_wait(rt.self, T.stream, ready, GMM_EVENT_EXTERNAL);
    status[4] = rt.copy(rt.self, out, in, N, T.stream);
    status[5] = rt.fill2d(rt.self, out, 2, 0x55, 1, N / 2, T.stream);
    status[6] = rt.event_record(rt.self, done, T.stream, GMM_EVENT_EXTERNAL);
    went("end", device_end_capture(&graph));
    T_CHECK(inside == 1 && outside == 0, "capturing: %d, %d", (int)inside, (int)outside);
    T_CHECK(status[2] == GMM_E_CAPTURE && strstr(text, "stream_sync"), "%s", text);
    for (int i = 0; i < 7; i++)
        T_CHECK(i == 2 || status[i] == GMM_OK, "call %d: %s: %s", i, gmm_status_name(status[i]),
                gmm_last_error(T.ctx));
    for (int i = 1; i < 6; i++) {
        unsigned char *got;
        OK(rt.fill(rt.self, in, 0xEE, N, other));
        OK(rt.fill(rt.self, in, i, N, other));
        OK(rt.event_record(rt.self, ready, other, 0));
        went("replay", device_replay(graph));
        t_wait();
        OK(rt.stream_wait(rt.self, other, done, 0));
        OK(rt.copy(rt.self, last, out, N, other));
        OK(rt.stream_sync(rt.self, other));
        got = (unsigned char *)t_get(last, N);
        for (int k = 0; k < N; k++)
            if (got[k] != (k % 2 ? i : 0x55)) T_FAIL("replay %d: byte %d is %02x", i, k, got[k]);
    }
    device_graph_free(graph);
    OK(rt.event_destroy(rt.self, ready));
    OK(rt.event_destroy(rt.self, done));
    OK(rt.stream_destroy(rt.self, other));
}
#endif

void tests_runtime(void) {
    t_add(copies, 0, "runtime copy and fill");
    t_add(rows, 0, "runtime copy2d and fill2d");
    t_add(ordering, 0, "runtime events order two streams");
    t_add(operations, 0, "runtime stream takes operations");
    t_add(allocations, 0, "runtime allocates in create alone");
    t_add(errors, 0, "runtime errors");
#ifdef HAVE_CUDA
    t_add_gpu(capture, 0, "runtime capture, external events");
#endif
}
