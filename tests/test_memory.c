/* test_memory.c - guarded memory of the test harness, what is checked around each call, matrices */
#define _GNU_SOURCE /* mmap's MAP_ANONYMOUS and MAP_NORESERVE, sysconf */
#include "harness.h"
#ifdef HAVE_CUDA
#include "device.h"
#endif

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

/* ----------------------------------------------------------------------------------------------------- Memory --- */

typedef struct t_block {
    unsigned char *map, *user; /* map: page of PROT_NONE, pages, page of PROT_NONE */
    size_t map_bytes, bytes, front, back;
    int readonly, sparse, host, device;
    uint64_t hash;
    t_shape shape;    /* element 0: the elements do not lie densely, or were not declared */
    gmm_dtype dtype;  /* of a matrix; GMM_NONE: another buffer */
} t_block;

typedef struct t_blocks {
    t_block *item;
    size_t count, capacity;
} t_blocks;
/* Of the thread that runs the case. */
static _Thread_local t_blocks blocks;
static _Thread_local gmm_context *contexts[64];
static _Thread_local size_t context_count;
static _Thread_local int workspace_turn;
/* Mapping of the last workspace, for the next one. */
static _Thread_local struct { unsigned char *map; size_t bytes; } spare;

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
    while (t_tally->alone != (long)getpid() &&
           !atomic_compare_exchange_strong(&t_tally->alone, &none, (long)getpid())) {
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

const t_shape *t_shape_at(const void *address, size_t *byte) {
    const t_block *b = t_find(address);
    if (!b || !b->shape.element) return NULL;
    *byte = (size_t)((const unsigned char *)address - b->user);
    return &b->shape;
}

int t_readable(const void *address, size_t bytes) {
    const t_block *b = address ? t_find(address) : NULL;
    return b && !b->device && (const unsigned char *)address + bytes <= b->user + b->bytes;
}

void t_matrix(const void *values, int64_t count, int64_t rows, int64_t cols, int64_t element) {
    t_block *b = t_find(values);
    if (b && b->user == values) b->shape = (t_shape){count, rows, cols, element, NULL};
}

void t_picked(const void *values, const int64_t *at, const void *from) {
    t_block *b = t_find(values);
    const t_block *whole = t_find(from);
    if (!b || b->user != values || !whole || !whole->shape.element) return;
    b->shape = whole->shape;
    b->shape.element = (int64_t)sizeof(double);
    b->shape.at = at;
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

/* What a block is, for messages. */
static const char *t_describe(const t_block *b) {
    static _Thread_local char text[128];
    if (b->dtype == GMM_NONE) (void)snprintf(text, sizeof text, "a buffer of %zu bytes", b->bytes);
    else
        (void)snprintf(text, sizeof text, "a buffer of %zu bytes (%lld matrices of %lld x %lld %s)", b->bytes,
                       (long long)b->shape.count, (long long)b->shape.rows, (long long)b->shape.cols,
                       gmm_dtype_name(b->dtype));
    return text;
}

void t_check_guards_at(const char *file, int line) {
    t_fetch();
    for (size_t i = 0; i < blocks.count; i++) {
        const t_block *b = &blocks.item[i];
        const unsigned char *seen;
        if (b->sparse || b->host) continue;
        seen = t_host_bytes(b);
        for (size_t k = 0; k < b->front; k++)
            if (seen[-1 - (ptrdiff_t)k] != T_CANARY)
                t_fail(file, line, "byte %zu before %s was written: %02x", k + 1, t_describe(b),
                       seen[-1 - (ptrdiff_t)k]);
        for (size_t k = 0; k < b->back; k++)
            if (seen[b->bytes + k] != T_CANARY)
                t_fail(file, line, "byte %zu past the end of %s was written: %02x", k + 1, t_describe(b),
                       seen[b->bytes + k]);
        if (b->device && b->readonly && t_hash(seen, b->bytes, 1) != b->hash)
            t_fail(file, line, "an input was written: %s", t_describe(b));
    }
}

void t_done(void *workspace) {
    t_block *b = workspace ? &blocks.item[blocks.count - 1] : NULL;
    if (!b || b->user != workspace) return;
    t_check_guards_at(H.before.file ? H.before.file : "t_done", H.before.line);
    if (b->device) {
        blocks.count--;
        return;
    }
    if (spare.map) (void)munmap(spare.map, spare.bytes);
    spare.map = b->map;
    spare.bytes = b->map_bytes;
    blocks.count--;
}

void t_free_all(void) {
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

/* Frees what is kept from case to case. */
void t_free_spare(void) {
    free(blocks.item);
    if (spare.map) (void)munmap(spare.map, spare.bytes);
}

/* ------------------------------------------------------------------------------------------------------ Calls --- */

void t_before(int hash, const char *call, const char *file, int line) {
    H.allocations = T.allocations;
    H.before = (t_call){call, file, line};
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
void t_waited_at(const char *file, int line) { t_wait_at("waiting for the stream", file, line); }

void t_ok(gmm_status got, const char *text, const char *call, const char *file, int line) {
    T.checks++;
    if (got != GMM_OK) t_fail(file, line, "%s gave %s: %s", call, gmm_status_name(got), text);
    t_wait_at(call, file, line);
    if (T.allocations != H.allocations)
        t_fail(file, line, "%s allocated %ld times", call, T.allocations - H.allocations);
    t_check_guards_at(file, line);
}

void t_refused(gmm_status want, gmm_status got, const char *text, const char *call, const char *file, int line,
               const char *const *needles) {
    T.checks++;
    if (got != want)
        t_fail(file, line, "%s gave %s (%s) instead of %s", call, gmm_status_name(got), text, gmm_status_name(want));
    for (; *needles; needles++)
        if (!strstr(text, *needles))
            t_fail(file, line, "%s: the message \"%s\" lacks \"%s\"", call, text, *needles);
    t_fetch();
    for (size_t i = 0; i < blocks.count; i++) {
        const t_block *b = &blocks.item[i];
        if (!b->sparse && !b->host && b->hash != t_hash(t_host_bytes(b), b->bytes, 1))
            t_fail(file, line, "%s failed, but wrote to %s", call, t_describe(b));
    }
    t_check_guards_at(file, line);
}

void *t_counted_alloc(void *user, size_t bytes) {
    (void)user;
    T.allocations++;
    H.live++;
    return malloc(bytes);
}
void t_counted_release(void *user, void *memory) {
    (void)user;
    H.live -= memory != NULL;
    free(memory);
}

gmm_context *t_context_at(const char *file, int line, const gmm_config *config) {
    gmm_context *ctx = NULL;
    gmm_error error = GMM_ZERO;
    const gmm_status status = gmm_create(&ctx, config, &error);
    T.checks++;
    if (status != GMM_OK) t_fail(file, line, "gmm_create gave %s: %s", gmm_status_name(status), error.text);
    if (context_count == sizeof contexts / sizeof contexts[0]) t_fail(file, line, "too many contexts in one case");
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

/* Notes what the block made last holds. */
static void t_declare(const t_mat *m, int64_t count, t_fill fill) {
    t_block *b = &blocks.item[blocks.count - 1];
    b->readonly = fill != T_POISON;
    b->dtype = m->dtype;
    b->shape.count = count;
    b->shape.rows = m->rows;
    b->shape.cols = m->cols;
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
    if (T.align_rows) m.ld = (m.ld * size + 15) / 16 * 16 / size;
    m.stride = rows * m.ld + gap;
    m.v = (double *)t_host((size_t)total * sizeof *m.v);
    m.table = (void **)t_host((size_t)count * sizeof *m.table);
    for (int64_t i = 0; i < total; i++)
        m.v[i] = fill == T_INTS ? (double)t_int(-4, 4) : fill == T_REALS ? ref_round(dtype, t_real()) : (double)NAN;
    if (form == T_PACKED) {
        const size_t bytes = (size_t)(((count - 1) * m.stride + t_span(&m)) * size);
        m.data = T.align_rows ? t_alloc_aligned(bytes, 16) : t_alloc(bytes);
        for (int64_t g = 0; g < count; g++) m.table[g] = (char *)m.data + g * m.stride * size;
        t_declare(&m, count, fill);
    } else { /* allocated in random order, so that addresses are in random order */
        for (int64_t i = 0; i < count; i++) {
            int64_t g = t_int(0, count - 1);
            while (m.table[g]) g = (g + 1) % count;
            m.table[g] = t_alloc_aligned((size_t)(t_span(&m) * size), t_alignment(t_span(&m) * size, form));
            t_declare(&m, 1, fill);
        }
    }
    if (fill != T_POISON) t_mat_put(&m); /* the inputs become read-only there */
    if (form == T_PACKED) m.mat = gmm_mat_packed(dtype, m.data);
    else if (form == T_TABLE) {
        void *const *table = (void *const *)t_in(m.table, (size_t)count * sizeof *m.table);
        m.mat = gmm_mat_table(dtype, table, 0);
    } else m.mat = gmm_mat_table(dtype, (void *const *)m.table, GMM_MAT_TABLE_ON_HOST);
    m.mat.ld = m.ld == cols ? 0 : m.ld;
    m.mat.group_stride = form == T_PACKED && gap ? m.stride : 0;
    return m;
}

void t_mat_poison(const t_mat *m) {
    const size_t span = (size_t)(t_span(m) * ref_bytes(m->dtype));
    for (int64_t g = 0; g < m->count; g++) t_poison(m->table[g], 0xFF, span);
}

int64_t t_step(int64_t total, int64_t most, int64_t cols) {
    int64_t step = total > most ? total / most + 1 : 1;
    for (;; step++) {
        int64_t a = step, b = cols;
        while (b) {
            const int64_t rest = a % b;
            a = b, b = rest;
        }
        if (a == 1) return step;
    }
}

t_mat t_mat_in(gmm_dtype dtype, int64_t count, int64_t rows, int64_t cols, t_fill fill) {
    return t_mat_make(dtype, count, rows, cols, 0, 0, T_PACKED, fill);
}
t_mat t_mat_out(gmm_dtype dtype, int64_t count, int64_t rows, int64_t cols) {
    return t_mat_make(dtype, count, rows, cols, 0, 0, T_PACKED, T_POISON);
}

/* The bytes between rows and matrices are those that the harness wrote. */
static void t_check_gap(const t_call *from, const unsigned char *at, int64_t bytes, int64_t g, int64_t r) {
    for (int64_t i = 0; i < bytes; i++)
        if (at[i] != 0xFF)
            t_fail(from->file, from->line, "%s: byte %lld after row %lld of matrix %lld is %02x instead of ff",
                   from->what, (long long)i, (long long)r, (long long)g, at[i]);
}

void *t_mat_bits_at(const char *file, int line, const t_mat *m) {
    const t_call from = {"gap between rows", file, line};
    const int64_t size = ref_bytes(m->dtype), span = t_span(m) * size;
    unsigned char *bits = (unsigned char *)t_host((size_t)(m->count * m->rows * m->cols * size));
    unsigned char *image;
    if (m->form == T_PACKED) { /* downloaded at once, with the gaps between matrices */
        image = (unsigned char *)t_get(m->data, (size_t)((m->count - 1) * m->stride * size + span));
        for (int64_t g = 0; g + 1 < m->count; g++)
            t_check_gap(&from, image + g * m->stride * size + span, m->stride * size - span, g, m->rows - 1);
    } else {
        image = (unsigned char *)t_host((size_t)(m->count * span));
        for (int64_t g = 0; g < m->count; g++) t_download(image + g * span, m->table[g], (size_t)span);
    }
    for (int64_t g = 0; g < m->count; g++) {
        const unsigned char *row = image + g * (m->form == T_PACKED ? m->stride * size : span);
        for (int64_t r = 0; r < m->rows; r++) {
            memcpy(bits + (g * m->rows + r) * m->cols * size, row + r * m->ld * size, (size_t)(m->cols * size));
            if (r + 1 < m->rows)
                t_check_gap(&from, row + (r * m->ld + m->cols) * size, (m->ld - m->cols) * size, g, r);
        }
    }
    t_matrix(bits, m->count, m->rows, m->cols, size);
    return bits;
}

double *t_mat_get_at(const char *file, int line, const t_mat *m) {
    const int64_t total = m->count * m->rows * m->cols;
    const void *bits = t_mat_bits_at(file, line, m);
    double *v = (double *)t_host((size_t)total * sizeof *v);
    for (int64_t i = 0; i < total; i++) v[i] = ref_load(m->dtype, bits, i);
    t_matrix(v, m->count, m->rows, m->cols, (int64_t)sizeof *v);
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

/* ------------------------------------------------------------------------------------------------ Shared calls --- */

/* Notes a call that was found valid for t_report_failure; descriptors of an older version are shorter, and left out. */
static void t_note_linear(gmm_op op, const gmm_linear *d) {
    const gmm_mat *first, *second, *result;
    if (d->struct_size % sizeof *d || d->groups->struct_size % sizeof *d->groups) return;
    first = op == GMM_OP_LINEAR_FWD ? d->x : d->dy;
    second = op == GMM_OP_LINEAR_FWD || op == GMM_OP_LINEAR_DGRAD ? d->w : d->x;
    result = op == GMM_OP_LINEAR_FWD ? d->y : op == GMM_OP_LINEAR_DGRAD ? d->dx
           : op == GMM_OP_LINEAR_WGRAD ? d->dw->mat : d->db ? d->db->mat : NULL;
    H.op = op;
    H.linear = *d;
    H.linear_groups = *d->groups;
    H.linear_dtypes[0] = first ? first->dtype : GMM_NONE;
    H.linear_dtypes[1] = second ? second->dtype : GMM_NONE;
    H.linear_dtypes[2] = result ? result->dtype : GMM_NONE;
}

t_linear_function *const t_linear_functions[4] = {gmm_linear_fwd, gmm_linear_dgrad, gmm_linear_wgrad,
                                                  gmm_linear_bgrad};

gmm_status t_linear(gmm_context *ctx, gmm_op op, const gmm_linear *linear) {
    gmm_info info = GMM_ZERO;
    gmm_status s = gmm_linear_query(ctx, op, linear, &info);
    void *workspace;
    H.op = (gmm_op)0;
    if (s != GMM_OK) return s;
    t_note_linear(op, linear);
    workspace = t_workspace(info.workspace_bytes);
    s = t_linear_functions[op - GMM_OP_LINEAR_FWD](ctx, linear, workspace, info.workspace_bytes, T.stream);
    t_done(workspace);
    return s;
}
