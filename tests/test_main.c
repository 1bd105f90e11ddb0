/* test_main.c - runs the cases of tests/test_*.c; see test.h */
#define _GNU_SOURCE /* mmap's MAP_ANONYMOUS and MAP_NORESERVE, sysconf, fork */
#include "test.h"
#ifdef HAVE_CUDA
#include "device.h"
#endif

#include <math.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

t_state T;

typedef struct t_case {
    void (*run)(int arg);
    int arg, where;
    size_t bytes; /* bytes given to t_needs */
    char name[160];
} t_case;
enum { T_ANY_ENGINE, T_HOST_ONLY, T_GPU_ENGINE, T_GPU_ONCE };

static struct {
    t_case *cases;
    size_t count, capacity;
    jmp_buf leave;
    char message[1024];
    const char *running, *engine_name;
    uint64_t seed, random;
    double worst; /* largest error of the running case, as a fraction of its bound */
    long allocations;
    size_t memory;        /* size of the memory of the engine, where cases may exceed it; 0: host memory, not limited */
    size_t needs, sparse; /* the running case: its t_needs, and the bytes that t_sparse has handed out */
    int times, jobs, last; /* last: this process runs the cases that must run alone */
    long place, mine; /* index of the next case in the common order; index of the next one that this process runs */
} H;

/* Memory that the processes of --jobs share. */
static struct t_tally {
    atomic_long taken, passed, failed, skipped;
    atomic_long alone; /* id of the process whose case needs most of the GPU memory; 0: none */
} *tally;

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
    c->bytes = 0;
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

void t_needs(size_t bytes) { H.cases[H.count - 1].bytes = bytes; }

void t_fail(const char *file, int line, const char *format, ...) {
    char text[768];
    va_list list;
    va_start(list, format);
    (void)vsnprintf(text, sizeof text, format, list);
    va_end(list);
    (void)snprintf(H.message, sizeof H.message, "%s:%d: %s", file, line, text);
    longjmp(H.leave, 1);
}

void t_failed(const char *file, int line, const char *condition, const char *format, ...) {
    char text[512];
    va_list list;
    va_start(list, format);
    (void)vsnprintf(text, sizeof text, format, list);
    va_end(list);
    t_fail(file, line, "not %s:%s", condition, text);
}

void t_skip(const char *format, ...) {
    va_list list;
    va_start(list, format);
    (void)vsnprintf(H.message, sizeof H.message, format, list);
    va_end(list);
    longjmp(H.leave, 2);
}

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

static uint64_t t_hash(const void *data, size_t bytes, uint64_t h) {
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

/* ----------------------------------------------------------------------------------------------------- Memory --- */

typedef struct t_block {
    unsigned char *map, *user; /* map: page of PROT_NONE, pages, page of PROT_NONE */
    size_t map_bytes, bytes, front, back;
    int readonly, sparse, host, device;
    uint64_t hash;
} t_block;

typedef struct t_blocks {
    t_block *item;
    size_t count, capacity;
} t_blocks;
static t_blocks blocks;
static gmm_context *contexts[64];
static size_t context_count;
static int workspace_turn;
static struct { unsigned char *map; size_t bytes; } spare; /* mapping of the last workspace, for the next one */

#define T_CANARY 0xC3
#define T_FRONT 256 /* canary bytes watched before a buffer */

static t_block *t_block_new(void) {
    if (blocks.count == blocks.capacity) {
        blocks.capacity = blocks.capacity ? 2 * blocks.capacity : 1024;
        blocks.item = (t_block *)realloc(blocks.item, blocks.capacity * sizeof *blocks.item);
        if (!blocks.item) abort();
    }
    memset(&blocks.item[blocks.count], 0, sizeof *blocks.item);
    return &blocks.item[blocks.count++];
}

/* Host memory of a CPU context: ends at an unreadable page as closely as the alignment allows. */
static void *t_guarded_host(size_t bytes, size_t alignment, int sparse, int fill) {
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    const size_t room = (bytes + alignment - 1) / alignment * alignment;
    const size_t pages = (room + page - 1) / page * page;
    t_block *b = t_block_new();
    if (!sparse && spare.map && spare.bytes == pages + 2 * page) {
        b->map = spare.map;
        spare.map = NULL;
    } else {
        void *map = mmap(NULL, pages + 2 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (map == MAP_FAILED || (pages && mprotect((char *)map + page, pages, PROT_READ | PROT_WRITE))) {
            if (map != MAP_FAILED) (void)munmap(map, pages + 2 * page);
            blocks.count--;
            T_FAIL("no memory for %zu bytes", bytes);
        }
        b->map = (unsigned char *)map;
    }
    b->map_bytes = pages + 2 * page;
    b->user = b->map + page + pages - room;
    b->bytes = bytes;
    b->front = pages - room < T_FRONT ? pages - room : T_FRONT;
    b->back = room - bytes;
    b->sparse = sparse;
    if (!sparse) {
        memset(b->user - b->front, T_CANARY, b->front);
        memset(b->user, fill, bytes);
        memset(b->user + bytes, T_CANARY, b->back);
    }
    return b->user;
}

#ifdef HAVE_CUDA
/* Waits until no case of another process holds GPU memory beyond its arena; holds for the rest of this case. */
static void t_alone(void) {
    const struct timespec pause = {0, 10000000};
    long none = 0;
    while (tally->alone != (long)getpid() && !atomic_compare_exchange_strong(&tally->alone, &none, (long)getpid())) {
        none = 0;
        (void)nanosleep(&pause, NULL);
    }
}

/* GPU memory: canaries on both sides, aligned as asked and no further. */
static void *t_guarded_device(size_t bytes, size_t alignment, int sparse, int fill) {
    const size_t shift = sparse || alignment >= 256 ? 0 : alignment;
    t_block *b = t_block_new();
    char *at;
    if (sparse) t_alone();
    at = (char *)device_alloc(sparse ? bytes : bytes + 3 * T_FRONT, 256, sparse);
    if (!at) {
        blocks.count--;
        T_FAIL("no GPU memory for %zu bytes", bytes);
    }
    b->device = 1;
    b->sparse = sparse;
    b->bytes = bytes;
    b->user = (unsigned char *)at + (sparse ? 0 : T_FRONT + shift);
    if (sparse) device_set(at, 0, bytes);
    else {
        b->front = b->back = T_FRONT;
        device_set(at, T_CANARY, bytes + 3 * T_FRONT);
        device_set(b->user, fill, bytes);
    }
    return b->user;
}
#endif

static void *t_guarded(size_t bytes, size_t alignment, int sparse, int fill) {
#ifdef HAVE_CUDA
    if (T.gpu) return t_guarded_device(bytes, alignment, sparse, fill);
#endif
    return t_guarded_host(bytes, alignment, sparse, fill);
}

/* Host address of a block's bytes; on a GPU, t_fetch has to copy them first. */
static void t_fetch(void) {
#ifdef HAVE_CUDA
    if (T.gpu) device_fetch();
#endif
}
static const unsigned char *t_host_bytes(const t_block *b) {
#ifdef HAVE_CUDA
    if (b->device) return device_host_bytes(b->user);
#endif
    return b->user;
}

static t_block *t_find(const void *user) {
    for (size_t i = blocks.count; i-- > 0;) {
        t_block *b = &blocks.item[i];
        if ((const unsigned char *)user >= b->user && (const unsigned char *)user <= b->user + b->bytes &&
            ((const unsigned char *)user < b->user + b->bytes || b->bytes == 0))
            return b;
    }
    return NULL;
}

/* Inputs are read-only: by page protection on the host, by their hash on a GPU. */
static void t_protect(const t_block *b, int protection) {
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    if (!b->device && b->map_bytes > 2 * page && mprotect(b->map + page, b->map_bytes - 2 * page, protection)) abort();
}
/* Makes `b` an input; `whole` holds its bytes if the host has them, else NULL. */
static void t_freeze(t_block *b, const void *whole) {
    b->readonly = 1;
    t_protect(b, PROT_READ);
    if (b->device) {
        void *copy = whole ? NULL : malloc(b->bytes + 1);
        if (!whole && !copy) abort();
        if (copy) t_download(copy, b->user, b->bytes);
        b->hash = t_hash(whole ? whole : copy, b->bytes, 1);
        free(copy);
    }
}

void *t_host(size_t bytes) {
    t_block *b = t_block_new();
    b->host = 1;
    b->user = (unsigned char *)calloc(bytes ? bytes : 1, 1);
    if (!b->user) abort();
    b->bytes = bytes;
    return b->user;
}

void *t_alloc_aligned(size_t bytes, size_t alignment) { return t_guarded(bytes, alignment, 0, 0xFF); }
void *t_sparse(size_t bytes) {
    H.sparse += bytes;
    T_CHECK(H.sparse <= H.needs, "t_sparse gives %zu bytes, t_needs says %zu", H.sparse, H.needs);
    return t_guarded(bytes, 64, 1, 0);
}

void *t_alloc(size_t bytes) {
    size_t alignment = 1;
    while (alignment < 64 && bytes % (2 * alignment) == 0) alignment *= 2;
    return t_guarded(bytes, alignment, 0, 0xFF);
}

void *t_workspace(size_t bytes) {
    return t_guarded(bytes, 256, 0, workspace_turn++ & 1 ? 0xA5 : 0xFF);
}

void *t_in(const void *host, size_t bytes) {
    void *p = t_alloc(bytes);
    t_upload(p, host, bytes);
    t_freeze(&blocks.item[blocks.count - 1], host);
    return p;
}

void t_upload(void *device, const void *host, size_t bytes) {
    t_block *b = t_find(device);
    if (b && b->readonly) t_protect(b, PROT_READ | PROT_WRITE);
#ifdef HAVE_CUDA
    if (T.gpu) device_put(device, host, bytes);
    else
#endif
        if (bytes) memcpy(device, host, bytes);
    if (b && b->readonly) t_freeze(b, device == b->user && bytes == b->bytes ? host : NULL);
}
void t_download(void *host, const void *device, size_t bytes) {
#ifdef HAVE_CUDA
    if (T.gpu) device_get(host, device, bytes);
    else
#endif
        if (bytes) memcpy(host, device, bytes);
}
void t_poison(void *device, int byte, size_t bytes) {
#ifdef HAVE_CUDA
    if (T.gpu) device_set(device, byte, bytes);
    else
#endif
        if (bytes) memset(device, byte, bytes);
}
void *t_get(const void *device, size_t bytes) {
    void *host = t_host(bytes);
    t_download(host, device, bytes);
    return host;
}

void t_check_guards(void) {
    t_fetch();
    for (size_t i = 0; i < blocks.count; i++) {
        const t_block *b = &blocks.item[i];
        const unsigned char *seen;
        if (b->sparse || b->host) continue;
        seen = t_host_bytes(b);
        for (size_t k = 0; k < b->front; k++)
            if (seen[-1 - (ptrdiff_t)k] != T_CANARY)
                T_FAIL("a byte %zu before a buffer of %zu bytes was written", k + 1, b->bytes);
        for (size_t k = 0; k < b->back; k++)
            if (seen[b->bytes + k] != T_CANARY)
                T_FAIL("a byte %zu past a buffer of %zu bytes was written", k + 1, b->bytes);
        if (b->device && b->readonly && t_hash(seen, b->bytes, 1) != b->hash)
            T_FAIL("an input of %zu bytes was written", b->bytes);
    }
}

void t_done(void *workspace) {
    t_block *b = workspace ? &blocks.item[blocks.count - 1] : NULL;
    if (!b || b->user != workspace) return;
    t_check_guards();
    if (b->device) {
        blocks.count--;
        return;
    }
    if (spare.map) (void)munmap(spare.map, spare.bytes);
    spare.map = b->map;
    spare.bytes = b->map_bytes;
    blocks.count--;
}

static void t_free_all(void) {
    for (size_t i = 0; i < context_count; i++) gmm_destroy(contexts[i]);
    context_count = 0;
    for (size_t i = 0; i < blocks.count; i++) {
        if (blocks.item[i].host) free(blocks.item[i].user);
        else if (!blocks.item[i].device) (void)munmap(blocks.item[i].map, blocks.item[i].map_bytes);
    }
    blocks.count = 0;
    workspace_turn = 0;
#ifdef HAVE_CUDA
    if (T.gpu) device_reset();
#endif
}

/* ------------------------------------------------------------------------------------------------------ Calls --- */

void t_before(int hash) {
    H.allocations = T.allocations;
    if (!hash) return;
    t_fetch();
    for (size_t i = 0; i < blocks.count; i++) {
        t_block *b = &blocks.item[i];
        if (!b->sparse && !b->host) b->hash = t_hash(t_host_bytes(b), b->bytes, 1);
    }
}

static void t_wait_at(const char *what, const char *file, int line) {
#ifdef HAVE_CUDA
    const char *why = T.gpu ? device_wait() : NULL;
    if (why) t_fail(file, line, "%s: %s", what, why);
#endif
    (void)what;
    (void)file;
    (void)line;
}
void t_wait(void) { t_wait_at("waiting for the stream", __FILE__, __LINE__); }

void t_ok(gmm_status got, const char *text, const char *call, const char *file, int line) {
    T.checks++;
    if (got != GMM_OK) t_fail(file, line, "%s gave %s: %s", call, gmm_status_name(got), text);
    t_wait_at(call, file, line);
    if (T.allocations != H.allocations)
        t_fail(file, line, "%s allocated %ld times", call, T.allocations - H.allocations);
    t_check_guards();
}

void t_refused(gmm_status want, gmm_status got, const char *text, const char *call, const char *file, int line,
               const char *const *needles) {
    T.checks++;
    if (got != want)
        t_fail(file, line, "%s gave %s (%s) instead of %s", call, gmm_status_name(got), text, gmm_status_name(want));
    for (; *needles; needles++)
        if (!strstr(text, *needles)) t_fail(file, line, "%s: \"%s\" lacks \"%s\"", call, text, *needles);
    t_fetch();
    for (size_t i = 0; i < blocks.count; i++) {
        const t_block *b = &blocks.item[i];
        if (!b->sparse && !b->host && b->hash != t_hash(t_host_bytes(b), b->bytes, 1))
            t_fail(file, line, "%s failed, but wrote to a buffer of %zu bytes", call, b->bytes);
    }
    t_check_guards();
}

static void *t_counted_alloc(void *user, size_t bytes) {
    (void)user;
    T.allocations++;
    return malloc(bytes);
}
static void t_counted_release(void *user, void *memory) {
    (void)user;
    free(memory);
}

gmm_context *t_context(const gmm_config *config) {
    gmm_context *ctx = NULL;
    gmm_error error = GMM_ZERO;
    const gmm_status status = gmm_create(&ctx, config, &error);
    T_CHECK(status == GMM_OK, "gmm_create: %s", error.text);
    T_CHECK(context_count < sizeof contexts / sizeof contexts[0], "too many contexts in one case");
    contexts[context_count++] = ctx;
    return ctx;
}

/* --------------------------------------------------------------------------------------------------- Matrices --- */

static int64_t t_span(const t_mat *m) { return m->rows ? (m->rows - 1) * m->ld + m->cols : 0; }

void t_mat_put(t_mat *m) {
    const int64_t size = ref_bytes(m->dtype), whole = m->form == T_PACKED ? m->count : 1;
    const int64_t elements = whole > 0 ? (whole - 1) * m->stride + t_span(m) : 0;
    unsigned char *image = (unsigned char *)malloc((size_t)(elements * size) + 1);
    if (!image) abort();
    for (int64_t g = 0; g < m->count; g++) { /* packed matrices are uploaded at once, so that gaps are written too */
        const int64_t first = whole > 1 ? g * m->stride : 0;
        if (first == 0) memset(image, 0xFF, (size_t)(elements * size));
        for (int64_t r = 0; r < m->rows; r++)
            for (int64_t c = 0; c < m->cols; c++)
                ref_store(m->dtype, image, first + r * m->ld + c, m->v[(g * m->rows + r) * m->cols + c]);
        if (m->form != T_PACKED) t_upload(m->table[g], image, (size_t)(elements * size));
        else if (g + 1 == m->count) t_upload(m->data, image, (size_t)(elements * size));
    }
    free(image);
}

/* Alignment of a buffer: the largest power of two that divides its size; at least 16 bytes for table entries on a
   GPU. */
static size_t t_alignment(int64_t bytes, t_form form) {
    size_t alignment = T.gpu && form == T_TABLE ? 16 : 1;
    while (alignment < 64 && (size_t)bytes % (2 * alignment) == 0) alignment *= 2;
    return alignment;
}

t_mat t_mat_make(gmm_dtype dtype, int64_t count, int64_t rows, int64_t cols, int64_t pad, int64_t gap, t_form form,
                 t_fill fill) {
    const int64_t size = ref_bytes(dtype), total = count * rows * cols;
    t_mat m = GMM_ZERO;
    m.dtype = dtype;
    m.form = form;
    m.count = count;
    m.rows = rows;
    m.cols = cols;
    m.ld = cols + pad;
    m.stride = rows * m.ld + gap;
    m.v = (double *)t_host((size_t)total * sizeof *m.v);
    m.table = (void **)t_host((size_t)count * sizeof *m.table);
    for (int64_t i = 0; i < total; i++)
        m.v[i] = fill == T_INTS ? (double)t_int(-4, 4) : fill == T_REALS ? ref_round(dtype, t_real()) : (double)NAN;
    if (form == T_PACKED) {
        m.data = t_alloc((size_t)(((count - 1) * m.stride + t_span(&m)) * size));
        for (int64_t g = 0; g < count; g++) m.table[g] = (char *)m.data + g * m.stride * size;
        if (fill != T_POISON) blocks.item[blocks.count - 1].readonly = 1;
    } else { /* allocated in random order, so that addresses are in random order */
        for (int64_t i = 0; i < count; i++) {
            int64_t g = t_int(0, count - 1);
            while (m.table[g]) g = (g + 1) % count;
            m.table[g] = t_alloc_aligned((size_t)(t_span(&m) * size), t_alignment(t_span(&m) * size, form));
            if (fill != T_POISON) blocks.item[blocks.count - 1].readonly = 1;
        }
    }
    if (fill != T_POISON) t_mat_put(&m); /* the inputs become read-only there */
    if (form == T_PACKED) m.mat = gmm_mat_packed(dtype, m.data);
    else if (form == T_TABLE) {
        void *const *table = (void *const *)t_in(m.table, (size_t)count * sizeof *m.table);
        m.mat = gmm_mat_table(dtype, table, 0);
    } else m.mat = gmm_mat_table(dtype, (void *const *)m.table, GMM_MAT_TABLE_ON_HOST);
    m.mat.ld = pad ? m.ld : 0;
    m.mat.group_stride = form == T_PACKED && gap ? m.stride : 0;
    return m;
}

t_mat t_mat_in(gmm_dtype dtype, int64_t count, int64_t rows, int64_t cols, t_fill fill) {
    return t_mat_make(dtype, count, rows, cols, 0, 0, T_PACKED, fill);
}
t_mat t_mat_out(gmm_dtype dtype, int64_t count, int64_t rows, int64_t cols) {
    return t_mat_make(dtype, count, rows, cols, 0, 0, T_PACKED, T_POISON);
}

static void t_check_gap(const unsigned char *at, int64_t bytes, int64_t g, int64_t r) {
    for (int64_t i = 0; i < bytes; i++)
        if (at[i] != 0xFF)
            T_FAIL("gap behind row %lld of matrix %lld: byte %lld is %02x instead of ff", (long long)r, (long long)g,
                   (long long)i, at[i]);
}

void *t_mat_bits(const t_mat *m) {
    const int64_t size = ref_bytes(m->dtype), span = t_span(m) * size;
    unsigned char *bits = (unsigned char *)t_host((size_t)(m->count * m->rows * m->cols * size));
    unsigned char *image;
    if (m->form == T_PACKED) { /* downloaded at once, with the gaps between matrices */
        image = (unsigned char *)t_get(m->data, (size_t)((m->count - 1) * m->stride * size + span));
        for (int64_t g = 0; g + 1 < m->count; g++)
            t_check_gap(image + g * m->stride * size + span, m->stride * size - span, g, m->rows - 1);
    } else {
        image = (unsigned char *)t_host((size_t)(m->count * span));
        for (int64_t g = 0; g < m->count; g++) t_download(image + g * span, m->table[g], (size_t)span);
    }
    for (int64_t g = 0; g < m->count; g++) {
        const unsigned char *from = image + g * (m->form == T_PACKED ? m->stride * size : span);
        for (int64_t r = 0; r < m->rows; r++) {
            memcpy(bits + (g * m->rows + r) * m->cols * size, from + r * m->ld * size, (size_t)(m->cols * size));
            if (r + 1 < m->rows)
                t_check_gap(from + (r * m->ld + m->cols) * size, (m->ld - m->cols) * size, g, r);
        }
    }
    return bits;
}

double *t_mat_get(const t_mat *m) {
    const int64_t total = m->count * m->rows * m->cols;
    const void *bits = t_mat_bits(m);
    double *v = (double *)t_host((size_t)total * sizeof *v);
    for (int64_t i = 0; i < total; i++) v[i] = ref_load(m->dtype, bits, i);
    return v;
}

float *t_floats_in(const double *v, int64_t n) {
    float *f = (float *)t_host((size_t)n * sizeof *f);
    for (int64_t i = 0; i < n; i++) f[i] = (float)v[i];
    return (float *)t_in(f, (size_t)n * sizeof *f);
}
float *t_floats_out(int64_t n) { return (float *)t_alloc((size_t)n * sizeof(float)); }
double *t_floats_get(const float *device, int64_t n) {
    const float *f = (const float *)t_get(device, (size_t)n * sizeof *f);
    double *v = (double *)t_host((size_t)n * sizeof *v);
    for (int64_t i = 0; i < n; i++) v[i] = (double)f[i];
    return v;
}

/* ---------------------------------------------------------------------------------------------------- Compare --- */

void t_exact(const char *what, gmm_dtype dtype, const double *got, const double *want, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        const double w = ref_round(dtype, want[i]);
        if (!(got[i] == w || (isnan(got[i]) && isnan(w))))
            T_FAIL("%s[%lld] is %.9g instead of %.9g", what, (long long)i, got[i], w);
    }
}

void t_near(const char *what, const double *got, const double *want, const double *bound, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        const double error = fabs(got[i] - want[i]);
        if (got[i] == want[i] || (isnan(got[i]) && isnan(want[i]))) continue;
        if (!(error <= bound[i]))
            T_FAIL("%s[%lld] is %.9g instead of %.9g: %.3g times the bound %.3g", what, (long long)i, got[i], want[i],
                   error / bound[i], bound[i]);
        if (error / bound[i] > H.worst) H.worst = error / bound[i];
    }
}

void t_same(const char *what, const void *a, const void *b, size_t bytes) {
    const unsigned char *p = (const unsigned char *)a, *q = (const unsigned char *)b;
    for (size_t i = 0; bytes && memcmp(p, q, bytes) && i < bytes; i++)
        if (p[i] != q[i]) T_FAIL("%s: byte %zu of %zu differs: %02x and %02x", what, i, bytes, p[i], q[i]);
}

void t_bytes(const char *what, const void *a, int byte, size_t bytes) {
    const unsigned char *p = (const unsigned char *)a;
    for (size_t i = 0; i < bytes; i++)
        if (p[i] != byte) T_FAIL("%s: byte %zu of %zu is %02x instead of %02x", what, i, bytes, p[i], byte);
}

/* ------------------------------------------------------------------------------------------------ Shared calls --- */

gmm_status t_linear(gmm_context *ctx, gmm_op op, const gmm_linear *linear) {
    gmm_info info = GMM_ZERO;
    gmm_status (*const run[])(gmm_context *, const gmm_linear *, void *, size_t, gmm_stream) = {
        gmm_linear_fwd, gmm_linear_dgrad, gmm_linear_wgrad, gmm_linear_bgrad};
    gmm_status s = gmm_linear_query(ctx, op, linear, &info);
    void *workspace;
    if (s != GMM_OK) return s;
    workspace = t_workspace(info.workspace_bytes);
    s = run[op - GMM_OP_LINEAR_FWD](ctx, linear, workspace, info.workspace_bytes, T.stream);
    t_done(workspace);
    return s;
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

static void t_register(void) {
#ifdef T_PARTIAL
#define X(name) if (tests_##name) tests_##name();
#else
#define X(name) tests_##name();
#endif
    T_FILES(X)
#undef X
}

/* Ends what t_alone began. */
static void t_together(void) {
    long mine = (long)getpid();
    (void)atomic_compare_exchange_strong(&tally->alone, &mine, 0);
}

static void t_total(void) {
    printf("%ld passed, %ld failed, %ld skipped\n", tally->passed, tally->failed, tally->skipped);
    fflush(stdout);
}

#if !defined(__SANITIZE_ADDRESS__)
/* Signal handler: a read or write outside of a buffer, or a write to an input; the process cannot continue. */
static void t_crashed(int signal_number) {
    printf("FAIL [%s] %s: %s, after: %s\n", H.engine_name, H.running,
           signal_number == SIGSEGV ? "memory outside a buffer was touched, or an input was written" : "crashed",
           H.message[0] ? H.message : "no failed check");
    tally->failed++;
    t_together();
    if (H.jobs == 1) t_total();
    fflush(stdout);
    _exit(H.jobs == 1);
}
#endif

static void t_injected(int arg) {
    const double got = 1.0 + (double)arg, want = 1.0;
    t_exact("injected", GMM_F32, &got, &want, 1);
}

/* Options of the command line. */
enum { T_FILTERS = 64 };
static struct {
    const char *filters[T_FILTERS], *engine;
    long cpu_level, arena, memory;
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

/* Whether a case runs after all others, when the other processes have freed their memory: it needs more than a quarter
   of all memory, or more than their arenas and CUDA contexts leave. */
static int t_apart(const t_case *c) {
    const size_t context = (size_t)1 << 30, taken = T.gpu ? (size_t)H.jobs * (((size_t)O.arena << 20) + context) : 0;
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

static void t_run(const t_case *c) {
    struct timespec start, end;
    double seconds;
    int left;
    H.running = c->name;
    H.needs = c->bytes;
    H.sparse = 0;
    H.message[0] = 0;
    H.worst = 0.0;
    t_reseed(t_hash(c->name, strlen(c->name), 7));
    (void)timespec_get(&start, TIME_UTC);
    T.checks = 0;
    left = setjmp(H.leave);
    if (left == 0) {
        t_fits(c);
        c->run(c->arg);
        t_check_guards();
        if (T.checks == 0) T_FAIL("the case made no check");
        tally->passed++;
    } else if (left == 2) {
        tally->skipped++;
        printf("skip [%s] %s: %s\n", H.engine_name, c->name, H.message);
    } else {
        tally->failed++;
        printf("FAIL [%s] %s: %s\n", H.engine_name, c->name, H.message);
    }
    t_free_all();
    t_together();
    (void)timespec_get(&end, TIME_UTC);
    seconds = (double)(end.tv_sec - start.tv_sec) + 1e-9 * (double)(end.tv_nsec - start.tv_nsec);
    if (T.verbose && left == 0) {
        printf("ok   [%s] %s (%.3f s", H.engine_name, c->name, seconds);
        if (H.worst > 0.0) printf(", %.1f%% of the bound", 100.0 * H.worst);
        if (H.last) printf(", alone");
        printf(")\n");
    } else if (H.times) printf("%8.3f s [%s] %s\n", seconds, H.engine_name, c->name);
    fflush(stdout);
}

/* Contexts that the cases run on, one row per engine. An engine that implements some operations only is tested under
   AUTO, so that other engines serve the calls that it declines. */
static const struct { gmm_engine name, engine; gmm_space space; } t_engines[] = {
    {GMM_ENGINE_CPU, GMM_ENGINE_CPU, GMM_SPACE_CPU},
    {GMM_ENGINE_MMA, GMM_ENGINE_MMA, GMM_SPACE_CUDA},
    {GMM_ENGINE_WGMMA, GMM_ENGINE_AUTO, GMM_SPACE_CUDA},
};

/* Whether the engine is available in T.ctx, by a query for a product that every engine serves. If not, gmm_last_error
   has the reason. */
static int t_has(gmm_engine engine) {
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

static const char t_usage[] =
    "usage: tests [--list] [--filter SUBSTRING]... [--seed N] [--engine NAME] [--threads N] [--cpu-level N]\n"
    "             [--arena MIB] [--memory MIB] [--jobs N] [--verbose] [--times] [--rounds N] [--inject-failure]\n"
    "Runs the cases whose names hold SUBSTRING, or one of several, on every engine present or on the one named.\n"
    "--jobs: N processes share them, and the processors. --times: prints the seconds of each. --rounds: replays of a\n"
    "graph, 300 by default, of a whole layer's a tenth. --arena: MiB of GPU memory for a process's buffers, 4096 by\n"
    "default. --memory: MiB that the engines' memory is taken to have; by default what the GPU has.\n";

static long t_number(const char *flag, const char *text) {
    char *end = NULL;
    const long n = text ? strtol(text, &end, 0) : 0;
    if (!text || end == text || *end || n < 0) {
        fprintf(stderr, "tests: %s wants a number, not \"%s\"\n%s", flag, text ? text : "", t_usage);
        exit(2);
    }
    return n;
}

static int t_wanted(const char *name) {
    for (int i = 0; i < O.filter_count; i++)
        if (strstr(name, O.filters[i])) return 1;
    return O.filter_count == 0;
}

/* Runs the next case in the order if it is assigned to this process. */
static void t_turn(const t_case *c) {
    if (H.place++ != H.mine) return;
    t_run(c);
    H.mine = atomic_fetch_add(&tally->taken, 1);
}

/* Runs this process's share of the selected cases on all engines; the last process runs those that must run alone.
   Returns 0, or 2 where an engine has no context. */
static int t_process(int first) {
    static const t_case injected = {t_injected, 1, T_HOST_ONLY, 0, "injected failure"};
    int gpu = 0;
#if !defined(__SANITIZE_ADDRESS__)
    signal(SIGSEGV, t_crashed);
    signal(SIGBUS, t_crashed);
    signal(SIGILL, t_crashed);
    signal(SIGFPE, t_crashed);
    signal(SIGABRT, t_crashed);
#endif
    H.mine = atomic_fetch_add(&tally->taken, 1);
    H.engine_name = "host";
    if (O.inject && !H.last) t_turn(&injected);
    for (size_t i = 0; i < H.count && !H.last; i++)
        if (H.cases[i].where == T_HOST_ONLY && t_wanted(H.cases[i].name)) t_turn(&H.cases[i]);
    for (size_t e = 0; e < sizeof t_engines / sizeof t_engines[0]; e++) {
        gmm_error error = GMM_ZERO;
        H.engine_name = gmm_engine_name(t_engines[e].name);
        if (O.engine && strcmp(O.engine, H.engine_name)) continue;
        memset(&T.config, 0, sizeof T.config);
        T.config.space = t_engines[e].space;
        T.config.engine = T.engine = t_engines[e].engine;
        T.config.threads = T.threads;
        T.config.cpu_level = (int32_t)O.cpu_level;
        T.config.allocator.alloc = t_counted_alloc;
        T.config.allocator.release = t_counted_release;
        T.gpu = t_engines[e].space != GMM_SPACE_CPU;
        if (T.gpu && !t_gpus()) {
            if (first) printf("no GPU, or no CUDA engines in this build: engine %s not tested\n", H.engine_name);
            T.gpu = 0;
            continue;
        }
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
        if (t_has(t_engines[e].name)) {
            for (size_t i = 0; i < H.count; i++) {
                const int where = H.cases[i].where;
                if (t_wanted(H.cases[i].name) && t_apart(&H.cases[i]) == H.last &&
                    (where == T_ANY_ENGINE || (T.gpu && (where == T_GPU_ENGINE || (where == T_GPU_ONCE && !gpu)))))
                    t_turn(&H.cases[i]);
            }
        } else if (first) printf("engine %s not tested: %s\n", H.engine_name, gmm_last_error(T.ctx));
        gpu |= T.gpu;
        gmm_destroy(T.ctx);
        T.ctx = NULL;
#ifdef HAVE_CUDA
        if (T.gpu) device_close();
        T.stream = NULL;
#endif
        T.gpu = 0;
    }
    free(blocks.item);
    if (spare.map) (void)munmap(spare.map, spare.bytes);
    fflush(stdout);
    return 0;
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
            tally->alone = 0;
            printf("FAIL a process of the tests ended with status %d\n", WIFEXITED(status) ? WEXITSTATUS(status) : -1);
            tally->failed++;
            worst = 1;
        }
    return worst;
}

/* Starts the processes of --jobs, before CUDA and OpenMP are initialised, which a fork does not inherit; then one more
   for the cases that must run alone. */
static int t_processes(void) {
    int large = 0, worst = t_forked(H.jobs);
    for (size_t i = 0; i < H.count; i++) large |= H.cases[i].bytes > 0 && t_wanted(H.cases[i].name);
    if (!large) return worst;
    H.last = 1;
    tally->taken = 0;
    return t_forked(1) | worst;
}

int main(int argc, char **argv) {
    const long processors = sysconf(_SC_NPROCESSORS_ONLN);
    int known = 0, status;
    T.rounds = 300;
    H.jobs = 1;
    O.arena = 4096;
    for (int i = 1; i < argc; i++) {
        const char *flag = argv[i], *value = i + 1 < argc ? argv[i + 1] : NULL;
        if (!strcmp(flag, "--list")) O.list = 1;
        else if (!strcmp(flag, "--verbose")) T.verbose = 1;
        else if (!strcmp(flag, "--times")) H.times = 1;
        else if (!strcmp(flag, "--rounds")) T.rounds = (int)t_number(flag, value), i++;
        else if (!strcmp(flag, "--inject-failure")) O.inject = 1;
        else if (!strcmp(flag, "--filter") && value && O.filter_count < T_FILTERS)
            O.filters[O.filter_count++] = argv[++i];
        else if (!strcmp(flag, "--engine") && value) O.engine = argv[++i];
        else if (!strcmp(flag, "--jobs")) H.jobs = (int)t_number(flag, value), i++;
        else if (!strcmp(flag, "--seed")) H.seed = (uint64_t)t_number(flag, value), i++;
        else if (!strcmp(flag, "--arena")) O.arena = t_number(flag, value), i++;
        else if (!strcmp(flag, "--memory")) O.memory = t_number(flag, value), i++;
        else if (!strcmp(flag, "--threads")) T.threads = (int)t_number(flag, value), i++;
        else if (!strcmp(flag, "--cpu-level")) O.cpu_level = t_number(flag, value), i++;
        else {
            const int help = !strcmp(flag, "--help");
            if (!help) fprintf(stderr, "tests: unknown or unfinished option %s\n", flag);
            fputs(t_usage, help ? stdout : stderr);
            return help ? 0 : 2;
        }
    }
    if (H.jobs < 1) H.jobs = 1;
    if (H.jobs > 1 && !T.threads) T.threads = processors > H.jobs ? (int)(processors / H.jobs) : 1;
    t_register();
    if (O.list) {
        for (size_t i = 0; i < H.count; i++)
            if (t_wanted(H.cases[i].name)) printf("%s\n", H.cases[i].name);
        free(H.cases);
        return 0;
    }
    for (size_t e = 0; O.engine && e < sizeof t_engines / sizeof t_engines[0]; e++)
        known |= !strcmp(O.engine, gmm_engine_name(t_engines[e].name));
    if (O.engine && !known) {
        fprintf(stderr, "tests: engine %s is not in this build\n", O.engine);
        free(H.cases);
        return 2;
    }
    tally = (struct t_tally *)mmap(NULL, sizeof *tally, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (tally == MAP_FAILED) abort();
    status = H.jobs > 1 ? t_processes() : t_process(1);
    free(H.cases);
    if (status == 2) return 2;
    if (tally->passed + tally->failed + tally->skipped == 0) {
        fprintf(stderr, "tests: no case%s%s%s%s\n", O.filter_count ? " matches " : "",
                O.filter_count ? O.filters[0] : "", O.engine ? " on engine " : "", O.engine ? O.engine : "");
        return 2;
    }
    t_total();
    return tally->failed ? 1 : 0;
}
