/* ------------------------------------------------------------------------------- 15 Implementation: checkpoints --- */

#if defined(GMM_IMPLEMENTATION) && !defined(GMM__CKPT_IMPLEMENTATION_DONE) && GMM__HOLDS(1)
#define GMM__CKPT_IMPLEMENTATION_DONE

#ifdef __cplusplus
extern "C" {
#endif

/* ....................................................................................... 15.1 Memory, reports ... */

static void *gmm__ck_malloc(void *user, size_t bytes) { (void)user; return GMM_MALLOC(bytes); }
static void gmm__ck_free(void *user, void *memory) { (void)user; GMM_FREE(memory); }

static gmm_allocator gmm__ck_allocator(const gmm_allocator *caller) {
    gmm_allocator a;
    a.user = NULL;
    a.alloc = gmm__ck_malloc;
    a.release = gmm__ck_free;
    return caller && caller->alloc ? *caller : a;
}

/* A block of an arena, whose memory is all released together. */
typedef struct gmm__ck_arena_block {
    struct gmm__ck_arena_block *next;
    size_t used, capacity, align;
} gmm__ck_arena_block;

typedef struct gmm__ck_arena {
    gmm_allocator allocator;
    gmm__ck_arena_block *top;
} gmm__ck_arena;

enum { GMM__CK_BLOCK_BYTES = 1 << 16 };

/* Allocates zeroed memory for `count` elements; NULL without memory. */
static void *gmm__ck_alloc(gmm__ck_arena *arena, int64_t count, size_t size) {
    gmm__ck_arena_block *b = arena->top;
    int64_t bytes_needed = 0;
    size_t bytes, capacity;
    char *memory;
    if (!gmm__mul(count, (int64_t)size, &bytes_needed) || bytes_needed > INT64_MAX / 2 ||
        (uint64_t)bytes_needed > SIZE_MAX / 2)
        return NULL;
    bytes = ((size_t)bytes_needed + 15) / 16 * 16;
    if (!b || bytes > b->capacity - b->used) {
        capacity = bytes > GMM__CK_BLOCK_BYTES / 4 ? bytes : (size_t)GMM__CK_BLOCK_BYTES;
        b = (gmm__ck_arena_block *)arena->allocator.alloc(arena->allocator.user, sizeof *b + capacity);
        if (!b) return NULL;
        b->used = 0;
        b->capacity = capacity;
        if (arena->top && capacity == bytes) { /* a block of its own; the block with free bytes stays on top */
            b->next = arena->top->next;
            arena->top->next = b;
        } else {
            b->next = arena->top;
            arena->top = b;
        }
    }
    memory = (char *)(b + 1) + b->used;
    b->used += bytes;
    return memset(memory, 0, bytes);
}

static void gmm__ck_arena_release(gmm__ck_arena *arena) {
    while (arena->top) {
        gmm__ck_arena_block *next = arena->top->next;
        arena->allocator.release(arena->allocator.user, arena->top);
        arena->top = next;
    }
}

/* Reserves capacity for one more element; the old array stays in the arena. Returns 0 without memory. */
static int gmm__ck_reserve(gmm__ck_arena *arena, void **array, int64_t count, int64_t *capacity, size_t size) {
    void *grown;
    if (count < *capacity) return 1;
    grown = gmm__ck_alloc(arena, *capacity ? *capacity * 2 : 64, size);
    if (!grown) return 0;
    if (count) memcpy(grown, *array, (size_t)count * size);
    *array = grown;
    *capacity = *capacity ? *capacity * 2 : 64;
    return 1;
}

static char *gmm__ck_copy_text(gmm__ck_arena *arena, const char *text, size_t length) {
    char *copy = (char *)gmm__ck_alloc(arena, (int64_t)length + 1, 1);
    if (copy) memcpy(copy, text, length);
    return copy;
}

GMMDEF const char *gmm_ckpt_reason_name(gmm_ckpt_reason reason) {
    switch (reason) {
#define GMM__X(name, value, text, status) case name: return #text;
        GMM_CKPT_REASON_LIST(GMM__X)
#undef GMM__X
    default: return "?";
    }
}

static gmm_status gmm__ck_status(gmm_ckpt_reason reason) {
    switch (reason) {
#define GMM__X(name, value, text, status) case name: return status;
        GMM_CKPT_REASON_LIST(GMM__X)
#undef GMM__X
    default: return GMM_E_ARG;
    }
}

/* Copies as many whole UTF-8 characters as fit. */
static void gmm__ck_truncate(char *dst, size_t capacity, const char *src) {
    size_t n = strlen(src);
    if (n >= capacity) {
        n = capacity - 1;
        while (n && ((unsigned char)src[n] & 0xC0u) == 0x80u) n--;
    }
    memcpy(dst, src, n);
    dst[n] = 0;
}

static gmm_status gmm__ck_vfail(gmm_ckpt_report *report, gmm_ckpt_reason reason, const char *key, const char *fn,
                                const char *format, va_list list) {
    const gmm_status status = gmm__ck_status(reason);
    if (report) {
        char what[400], shown[252];
        (void)vsnprintf(what, sizeof what, format, list);
        gmm__ck_truncate(shown, key && strlen(key) >= 100 ? 97 : 101, key ? key : "");
        report->reason = reason;
        gmm__ck_truncate(report->key, sizeof report->key, key ? key : "");
        (void)gmm__fail(&report->error, status, "%s: %s%s%s%s%s", fn, key ? "\"" : "", shown,
                        key && strlen(key) >= 100 ? "..." : "", key ? "\": " : "", what);
    }
    return status;
}

static gmm_status gmm__ck_fail(gmm_ckpt_report *report, gmm_ckpt_reason reason, const char *key, const char *fn,
                               const char *format, ...) {
    va_list list;
    gmm_status status;
    va_start(list, format);
    status = gmm__ck_vfail(report, reason, key, fn, format, list);
    va_end(list);
    return status;
}

static void gmm__ck_reset_report(gmm_ckpt_report *report) {
    if (report) memset(report, 0, sizeof *report);
}

