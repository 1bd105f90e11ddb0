/* test.h - the harness of the gmm tests
 *
 * HOW TO ADD A FILE
 *     1. tests/test_NAME.c includes "test.h" (which includes gmm.h's declarations), and exports one function that adds
 *        its cases. The name of a case begins with the subject of its file; no two cases have the same name:
 *
 *            static void relu(int arg) { ... T_OK(gmm_act_fwd(T.ctx, ...)); ... }
 *            void tests_NAME(void) {
 *                t_add(relu, 0, "act relu");                    // once per engine, on T.ctx with T.stream
 *                t_add_host(table, 0, "mlp wgrad_decide");      // once; pure functions, no context
 *            }
 *
 *     2. Add X(NAME) to T_FILES below. That is all: the Makefile takes every tests/test_*.c and tests/reference.c.
 *        With -DT_PARTIAL a program may be linked from a few files only; the missing ones are then left out.
 *
 * A case fails at its first failed check, which leaves the case by longjmp: keep all memory in the harness's functions
 * (they free it), and make no checks inside threads of your own. A failure prints file and line of the check, the calls
 * of helpers it is in (T_CALL), what the case has noted (t_about, t_splits), and the command that runs the case alone.
 *
 * "Device" memory is the memory space of T.ctx. Test code never touches it directly: it allocates with t_alloc, t_in,
 * t_mat_in, t_mat_out, and reads with t_get, t_mat_get. With a CPU context all of it is host memory, where each buffer
 * ends at an unreadable page, has canaries wherever alignment leaves room, and is read-only if it was made by t_in or
 * t_mat_in. T_OK and T_REFUSED check the canaries of all live buffers after the call.
 */
#ifndef GMM_TESTS_TEST_H
#define GMM_TESTS_TEST_H

#include "gmm.h"

#include "reference.h"

#define T_FILES(X) \
    X(codecs) X(layout) X(context) X(linear) X(groups) X(errors) X(act) X(mlp) X(route) X(router) X(permute) X(pad) \
    X(select) X(gtp) X(graph) X(gtp_order) X(gtp_runtime) X(gtp_quant) X(gtp_checkpoint) X(gtp_gpu) X(gtp_processes) \
    X(small) X(runtime) X(cublaslt) X(wgmma) X(checkpoint) X(checkpoint_files) X(quant) X(quantize) X(qlinear) \
    X(mlp_quant) X(mlp_hooks) X(mlp_fused) X(mlp_reference) X(contracts) X(edges) X(scheduler) X(describe) X(verify) \
    X(allocations) X(moe)

/* ------------------------------------------------------------------------------------------------------ Cases --- */

/* What the running case sees. */
typedef struct t_state {
    gmm_context *ctx;    /* of the engine under test, with counted allocator; NULL in host cases */
    gmm_stream stream;   /* NULL for the CPU */
    gmm_engine engine;   /* of T.ctx; AUTO: the best that serves a call */
    gmm_config config;   /* that made ctx: copy and change it for more contexts (t_context) */
    int gpu;             /* 1: device memory is not host memory */
    int threads;         /* --threads, 0 = default */
    int verbose;
    int rounds;          /* --rounds: replays of a graph; of a whole layer's a tenth */
    long checks;         /* that the running case has made; a case that makes none fails */
    int align_rows;      /* the case sets it to 1: t_mat_make puts rows at multiples of 16 bytes, as TMA takes them */
    long allocations;    /* calls of the counted allocator so far; T_OK requires that operations make none */
} t_state;
extern _Thread_local t_state T; /* of this thread: `make soak` runs cases in several */

/* Adds a case that runs for every engine, once without a context (_host), for every GPU engine (_gpu), or once on a GPU
   (_gpu_once, for cases that demand engines themselves; _gpu_alone, for ranks that share it: after all other cases).
   `arg` is passed to it; the rest is its name. */
void t_add(void (*run)(int arg), int arg, const char *name, ...) __attribute__((format(printf, 3, 4)));
void t_add_host(void (*run)(int arg), int arg, const char *name, ...) __attribute__((format(printf, 3, 4)));
void t_add_gpu(void (*run)(int arg), int arg, const char *name, ...) __attribute__((format(printf, 3, 4)));
void t_add_gpu_once(void (*run)(int arg), int arg, const char *name, ...) __attribute__((format(printf, 3, 4)));
void t_add_gpu_alone(void (*run)(int arg), int arg, const char *name, ...) __attribute__((format(printf, 3, 4)));

/* What the program does instead of running cases when a case has started it with --rank FD:RANK:NAME
   (process_ranks.h); returns the status of the program. */
void t_add_rank_program(const char *name, int (*program)(const char *argument));

/* Calls `undo` when the running case ends, however it does, before anything is reported or freed: for what no function
   of the harness restores, such as hooks and files. One of each case; it makes no checks. */
void t_finally(void (*undo)(void));

/* The highest gmm_config.cpu_level that this processor has, as the compiler's __builtin_cpu_supports says. */
int t_cpu_level(void);

/* Declares how many bytes of t_sparse the case added last needs. A case that needs more than the free GPU memory is
   skipped; one that needs more than a quarter of it runs after all other cases. */
void t_needs(size_t bytes);

/* Declares that the case added last draws all that it does at random, so that `make soak` repeats it with new steps, as
   often as its weight says beside those of other cases. `make test` runs it once, with step 0. */
void t_random(int weight);

/* Ends the case as failed, or as skipped (only for what this machine lacks). */
_Noreturn void t_fail(const char *file, int line, const char *format, ...) __attribute__((format(printf, 3, 4)));
_Noreturn void t_failed(const char *file, int line, const char *condition, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
_Noreturn void t_skip(const char *format, ...) __attribute__((format(printf, 1, 2)));

#define T_FAIL(...) t_fail(__FILE__, __LINE__, __VA_ARGS__)
#define T_CHECK(condition, ...) \
    do { T.checks++; if (!(condition)) t_failed(__FILE__, __LINE__, #condition, " " __VA_ARGS__); } while (0)

/* A call on T.ctx that must succeed, write only to its outputs, and allocate nothing. On a GPU, the macro waits for the
   stream. */
#define T_OK(call) T_OK_TEXT(call, T.ctx ? gmm_last_error(T.ctx) : "")
/* The same with another error text: that of another context's gmm_last_error, or gmm_error.text. */
#define T_OK_TEXT(call, text) \
    do { \
        gmm_status t_status_; \
        t_before(0, #call, __FILE__, __LINE__); \
        t_status_ = (call); \
        t_ok(t_status_, (text), #call, __FILE__, __LINE__); \
    } while (0)

/* A call on T.ctx that must return `want`, write to no live buffer, and leave a message that holds every needle
   (strings; close with NULL): the function, the argument, the value. */
#define T_REFUSED(want, call, ...) T_REFUSED_TEXT(want, call, gmm_last_error(T.ctx), __VA_ARGS__)
#define T_REFUSED_TEXT(want, call, text, ...) \
    do { \
        gmm_status t_status_; \
        t_before(1, #call, __FILE__, __LINE__); \
        t_status_ = (call); \
        t_refused((want), t_status_, (text), #call, __FILE__, __LINE__, (const char *[]){__VA_ARGS__}); \
    } while (0)

void t_before(int hash, const char *call, const char *file, int line); /* for the macros only */
void t_ok(gmm_status got, const char *text, const char *call, const char *file, int line);
void t_refused(gmm_status want, gmm_status got, const char *text, const char *call, const char *file, int line,
               const char *const *needles);
#define t_check_guards() t_check_guards_at(__FILE__, __LINE__)
void t_check_guards_at(const char *file, int line);
/* Waits for work that was enqueued outside of T_OK; the case fails if the device reports an error. */
#define t_wait() t_waited_at(__FILE__, __LINE__)
void t_waited_at(const char *file, int line);

/* ------------------------------------------------------------------------------------------- Notes for failures --- */

/* What the case is about: dtype, shape, settings. The last note is printed if the case fails. */
void t_about(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* The group sizes of what the case computes next. They are printed, and rows of an activation are named by them. */
void t_splits(const int64_t *sizes, int64_t groups);

/* Calls a function that checks something and returns nothing, so that a failure in it names the line of the call. A
   helper `void check(const run *r, int all)` gets it everywhere by a macro after its definition:
       #define check(...) T_CALL(check, __VA_ARGS__) */
#define T_CALL(function, ...) (t_enter(#function, __FILE__, __LINE__), (function)(__VA_ARGS__), t_leave())
void t_enter(const char *what, const char *file, int line);
void t_leave(void);

/* ----------------------------------------------------------------------------------------------------- Random --- */

/* Seeded per case from --seed and the name, so that --filter changes no data. */
uint64_t t_rand(void);
int64_t t_int(int64_t low, int64_t high); /* both included */
double t_real(void);                      /* uniform in [-1, 1) */
void t_reseed(uint64_t seed);             /* to make the same data twice */
/* For random cases: sizes of groups whose sum is at most `rows`. Some or all are empty, all rows are in one, or they
   are next to multiples of the rows of a tile. */
int64_t *t_draw_sizes(int64_t groups, int64_t rows);
/* Mostly one of 1 to `usual`, at times one up to `most`. */
int64_t t_draw_size(int64_t usual, int64_t most);

/* ----------------------------------------------------------------------------------------------------- Memory --- */

/* All of it is freed after the case. */
void *t_host(size_t bytes);                            /* host scratch, zeroed */
void *t_alloc(size_t bytes);                           /* device memory, every byte 0xFF (NaN in any float) */
void *t_alloc_aligned(size_t bytes, size_t alignment); /* else only aligned as far as bytes is divisible */
void *t_workspace(size_t bytes); /* exactly this size, aligned to 256; filled with 0xFF and 0xA5 alternately */
void t_done(void *workspace);                          /* checks canaries; frees it if no buffer was made after it */
void *t_in(const void *host, size_t bytes);            /* device copy that the library must not write */
void t_upload(void *device, const void *host, size_t bytes);
void t_download(void *host, const void *device, size_t bytes);
void t_poison(void *device, int byte, size_t bytes);
void *t_get(const void *device, size_t bytes);         /* host copy */
void *t_sparse(size_t bytes);                          /* huge device memory, zero, backed only where touched:
                                                          see t_needs */

/* A context like T.ctx with other settings; destroyed after the case, until which T.ctx may be set to it. */
#define t_context(config) t_context_at(__FILE__, __LINE__, config)
gmm_context *t_context_at(const char *file, int line, const gmm_config *config);

/* --------------------------------------------------------------------------------------------------- Matrices --- */

typedef enum t_fill {
    T_INTS,     /* integers in [-4, 4]: sums of products are exact in fp32 */
    T_REALS,    /* uniform in [-1, 1), rounded to the dtype */
    T_POISON    /* outputs: all bits set */
} t_fill;

typedef enum t_form { T_PACKED, T_TABLE, T_TABLE_HOST } t_form;

/* `count` matrices of rows x cols (activations: count 1). Each row is followed by `pad` unused elements, each matrix by
   `gap` more. Unused elements are NaN in inputs and poison in outputs, and t_mat_get checks that they are unchanged.
   The buffer ends with the last used element. In the table forms every matrix has its own buffer, allocated in random
   order. */
typedef struct t_mat {
    gmm_mat mat;        /* for the library: &m.mat */
    gmm_dtype dtype;
    t_form form;
    int64_t count, rows, cols, ld, stride;
    double *v;          /* [count][rows][cols] dense values as uploaded (inputs; NaN for poison) */
    void *data;         /* packed */
    void **table;       /* host array of device addresses, also for packed */
} t_mat;

t_mat t_mat_make(gmm_dtype dtype, int64_t count, int64_t rows, int64_t cols, int64_t pad, int64_t gap, t_form form,
                 t_fill fill);
t_mat t_mat_in(gmm_dtype dtype, int64_t count, int64_t rows, int64_t cols, t_fill fill);  /* dense, packed */
t_mat t_mat_out(gmm_dtype dtype, int64_t count, int64_t rows, int64_t cols);              /* dense, packed, poison */
/* Rewrites the device contents from m->v (also of an input). */
void t_mat_put(t_mat *m);
/* Poisons an output again, before a second call writes it: what the first one left there would look right. */
void t_mat_poison(const t_mat *m);
/* Dense bits of the device contents, [count][rows][cols] elements; fails if an unused element changed. */
#define t_mat_bits(m) t_mat_bits_at(__FILE__, __LINE__, m)
void *t_mat_bits_at(const char *file, int line, const t_mat *m);
/* The same decoded. */
#define t_mat_get(m) t_mat_get_at(__FILE__, __LINE__, m)
double *t_mat_get_at(const char *file, int line, const t_mat *m);

/* A comparison that fails names the first wrong element by group, row and column where it knows them: in what
   t_mat_bits and t_mat_get return, and in memory of t_host that these functions describe. t_matrix: `values` holds
   `count` matrices of rows x cols elements of `element` bytes. t_picked: the doubles values[i] are the elements at[i]
   of the matrices in `from`; `at` lives as long as the case. */
void t_matrix(const void *values, int64_t count, int64_t rows, int64_t cols, int64_t element);
void t_picked(const void *values, const int64_t *at, const void *from);

/* fp32 vectors: device copies of doubles rounded to fp32, and back. */
float *t_floats_in(const double *v, int64_t n);
float *t_floats_out(int64_t n); /* poison */
double *t_floats_get(const float *device, int64_t n);

/* ---------------------------------------------------------------------------------------------------- Compare --- */

/* got equals want rounded once to dtype; NaN equals NaN, -0 equals 0.
       t_exact(what, dtype, got, want, n) */
#define t_exact(...) t_exact_at(__FILE__, __LINE__, __VA_ARGS__)
void t_exact_at(const char *file, int line, const char *what, gmm_dtype dtype, const double *got, const double *want,
                int64_t n);
/* |got - want| <= bound[i]; --verbose prints the largest error as a fraction of its bound. Where want is NaN or
   infinite, got equals it.
       t_near(what, got, want, bound, n) */
#define t_near(...) t_near_at(__FILE__, __LINE__, __VA_ARGS__)
void t_near_at(const char *file, int line, const char *what, const double *got, const double *want,
               const double *bound, int64_t n);
/* Bytes equal.
       t_same(what, a, b, bytes) */
#define t_same(...) t_same_at(__FILE__, __LINE__, __VA_ARGS__)
void t_same_at(const char *file, int line, const char *what, const void *a, const void *b, size_t bytes);
/* Every byte has this value.
       t_bytes(what, a, byte, bytes) */
#define t_bytes(...) t_bytes_at(__FILE__, __LINE__, __VA_ARGS__)
void t_bytes_at(const char *file, int line, const char *what, const void *a, int byte, size_t bytes);

/* ------------------------------------------------------------------------------------------------ Shared calls --- */

/* The functions of the linear operations, at op - GMM_OP_LINEAR_FWD. */
typedef gmm_status t_linear_function(gmm_context *, const gmm_linear *, void *, size_t, gmm_stream);
extern t_linear_function *const t_linear_functions[4];
/* A linear operation with a poisoned workspace of exactly the queried size. */
gmm_status t_linear(gmm_context *ctx, gmm_op op, const gmm_linear *linear);

/* The step from one compared element to the next where a reference is too slow for all `total`: about `most` are met,
   and, since the step has no divisor in common with `cols`, the elements of every column among them. */
int64_t t_step(int64_t total, int64_t most, int64_t cols);

#define T_COUNT(array) ((int64_t)(sizeof(array) / sizeof((array)[0])))

#endif
