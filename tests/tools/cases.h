/* cases.h - one operation of the library, built from a text id. checksums.c and tests/bench/pairs.c share it: the ids
 * are the cases, and no identifier of the library is part of an id, so that a rename leaves every id as it is.
 *
 * An id is a list of words and numbers between dots: family, operation, then in any order
 *     a dtype or format    f32 f16 bf16, or a quantized format (cases.c, FORMATS); f16 and f32 beside a quantized
 *                          format name the dtype of its source, which otherwise is bf16
 *     sizes                g groups, t rows of all groups, k in features or columns, n out features or ffn, past rows
 *                          behind the last group, top experts per token (in linear operations and casts: rows are
 *                          gathered, and the entries of the index divided by it), align, block, count, tile
 *                          (gmm_options.tile)
 *     a split              even, skew (falling sizes, every fifth group empty), odd (uneven odd sizes), one (all rows
 *                          in group 0), none (no rows)
 *     an engine            auto cpu mma wgmma cublaslt
 *     flags                cases.c, FLAGS
 * as in linear.fwd.bf16.g5.k264.n392.t300.skew.wgmma.
 *
 * The functions below are what a plug-in of pairs exports; nothing else crosses its border, so that two versions of the
 * library with different structures stand in one process. */
#ifndef GMM_TOOLS_CASES_H
#define GMM_TOOLS_CASES_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The memory space of the context. `alloc` returns 256-byte aligned memory that lives until the case is closed, or
   NULL. `put`, `copy` and `set` complete before work that is enqueued on the stream later. */
typedef struct case_memory {
    void *(*alloc)(size_t bytes);
    void (*put)(void *to, const void *host, size_t bytes);
    void (*copy)(void *to, const void *from, size_t bytes);
    void (*set)(void *to, int byte, size_t bytes);
} case_memory;

typedef struct case_setup {
    const case_memory *memory;
    void *stream;        /* a cudaStream_t; NULL for the CPU */
    int32_t gpu;         /* 1: a CUDA context on device 0 */
    int32_t threads;     /* CPU engine; 0 = default */
    int32_t vector_level;/* CPU engine; 0 = best */
} case_setup;

enum { CASE_OK = 0, CASE_DECLINED = 1, CASE_FAILED = 2 };

typedef struct case_output { const char *name; const void *data; size_t bytes; } case_output;
typedef struct case_run case_run;

/* Makes the context that later cases use. The text of the last failure is case_error(). */
int case_begin(const case_setup *setup);
void case_end(void);
const char *case_error(void);

/* Allocates and fills the operands of a case; outputs are poisoned. CASE_DECLINED: the engine does not serve it. */
int case_open(const char *id, case_run **out);
/* Enqueues the operation; may be repeated, and captured. */
int case_launch(case_run *run);
/* What the operation writes. */
int case_outputs(const case_run *run, const case_output **outputs);
void case_close(case_run *run);

#ifdef __cplusplus
}
#endif
#endif
