/* test_groups.c - splits and independence: forms, faults, hints, threads, contexts */
#include "linear_case.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>

static const gmm_op ops[] = {GMM_OP_LINEAR_FWD, GMM_OP_LINEAR_DGRAD, GMM_OP_LINEAR_WGRAD, GMM_OP_LINEAR_BGRAD};
static const char *const op_names[] = {"fwd", "dgrad", "wgrad", "bgrad"};
static const char *const dtype_names[] = {"f32", "f16", "bf16"};

/* ---------------------------------------------------------------------------------------------- Rule of faults --- */

__extension__ typedef __int128 wide;

/* The rule of gmm_groups for faulty splits, as its contract states it, in wider arithmetic. */
static int64_t split_model(int64_t begin, int64_t value, gmm_split_form form, int64_t capacity, int32_t row_align,
                           uint32_t *fault) {
    wide size = value;
    if (form == GMM_SPLIT_OFFSETS) size -= begin;
    if (size < 0) {
        *fault |= form == GMM_SPLIT_OFFSETS ? (uint32_t)GMM_FAULT_MONOTONIC : (uint32_t)GMM_FAULT_NEGATIVE;
        size = 0;
    }
    if (row_align > 0 && size % row_align) *fault |= (uint32_t)GMM_FAULT_ALIGN;
    if (begin + size > capacity) {
        *fault |= (uint32_t)GMM_FAULT_CAPACITY;
        size = capacity - begin;
    }
    return begin + (int64_t)size;
}

static void split_rule(int arg) {
    static const int64_t values[] = {INT64_MIN, INT64_MIN + 1, INT32_MIN, -7, -1, 0, 1, 2, 7, 8, 16, 99, 100, 101,
                                     INT32_MAX, INT64_MAX - 1, INT64_MAX};
    static const int64_t capacities[] = {0, 1, 100, INT32_MAX, INT64_MAX};
    static const int32_t aligns[] = {0, 1, 2, 8, 128};
    (void)arg;
    for (int v = 0; v < T_COUNT(values); v++)
        for (int c = 0; c < T_COUNT(capacities); c++)
            for (int a = 0; a < T_COUNT(aligns); a++)
                for (int form = 0; form < 2; form++)
                    for (int b = 0; b < 4; b++) {
                        const int64_t begin = b == 0 ? 0 : b == 1 ? capacities[c] / 2 : b == 2 ? capacities[c] - 1
                                                                                             : capacities[c];
                        uint32_t want = 0x80u, got = 0x80u; /* bits are OR-ed into the fault word */
                        int64_t end, model;
                        if (begin < 0) continue;
                        model = split_model(begin, values[v], (gmm_split_form)form, capacities[c], aligns[a], &want);
                        end = gmm_split_end(begin, values[v], (gmm_split_form)form, capacities[c], aligns[a], &got);
                        T_CHECK(end == model && got == want,
                                "begin %lld value %lld form %d capacity %lld align %d: %lld %x instead of %lld %x",
                                (long long)begin, (long long)values[v], form, (long long)capacities[c], (int)aligns[a],
                                (long long)end, got, (long long)model, want);
                        T_CHECK(end >= begin && end <= capacities[c], "out of bounds");
                    }
}

/* ------------------------------------------------------------------------------------------------- Equal bits --- */

static void run(lin_run *r, const lin_spec *s, gmm_context *ctx, uint64_t seed) {
    t_reseed(seed);
    lin_build(r, s);
    T_OK_TEXT(t_linear(ctx, s->op, &r->d), gmm_last_error(ctx));
}
#define run(...) T_CALL(run, __VA_ARGS__)

static void same_output(const char *what, const lin_run *a, const lin_run *b) {
    t_same(what, t_mat_bits(&a->out), t_mat_bits(&b->out),
           (size_t)(a->out.count * a->out.rows * a->out.cols * ref_bytes(a->out.dtype)));
}
#define same_output(...) T_CALL(same_output, __VA_ARGS__)

static lin_spec real_spec(int arg, const int64_t *sizes, int32_t groups) {
    lin_spec s = {.op = ops[arg / 3], .in = lin_dtype(arg % 3), .out = lin_dtype(arg % 3), .groups = groups, .K = 270,
                  .N = 75, .sizes = sizes, .fill = T_REALS};
    if (s.op == GMM_OP_LINEAR_BGRAD) {
        s.bias = s.in;
        s.dscale = 1;
    }
    return s;
}

static void split_forms(int arg) {
    static const int64_t sizes[] = {7, 0, 40, 1, 300, 0};
    lin_spec s = real_spec(arg, sizes, 6);
    lin_run first, r;
    s.extra = 9;
    run(&first, &s, T.ctx, 1);
    lin_check(&first);
    for (int form = 0; form < 4; form++)
        for (int host = 0; host < 2; host++) {
            s.split = (lin_split)form;
            s.on_host = host;
            run(&r, &s, T.ctx, 1);
            same_output("another form of the split", &first, &r);
            if (s.dscale)
                t_same("d_bias_scale", t_get(first.d.d_bias_scale, (size_t)first.capacity * 4),
                       t_get(r.d.d_bias_scale, (size_t)r.capacity * 4), (size_t)first.capacity * 4);
        }
}

/* Hints, valid promises (row_align), sm_limit, further options and a larger capacity change no bit. */
static void hints(int arg) {
    static const int64_t sizes[] = {16, 0, 48, 256};
    static const int64_t rows[] = {1, 320, 100000, INT64_MAX};
    lin_spec s = real_spec(arg, sizes, 4);
    lin_run first, r;
    run(&first, &s, T.ctx, 1);
    lin_check(&first);
    for (int i = 0; i < 4; i++) {
        s.hint = rows[i];
        s.row_align = 1 << (i + 1);
        run(&r, &s, T.ctx, 1);
        same_output("rows_hint, row_align", &first, &r);
    }
    s.hint = s.row_align = 0;
    for (int i = 1; i < 60; i += 19) {
        t_reseed(1);
        lin_build(&r, &s);
        r.options.sm_limit = i;
        r.options.allow_tf32 = 0;
        r.d.options = &r.options;
        T_OK(t_linear(T.ctx, s.op, &r.d));
        same_output("sm_limit", &first, &r);
    }
}

static void capacities(int arg) {
    static const int64_t sizes[] = {16, 0, 48, 256};
    lin_spec s = real_spec(arg, sizes, 4);
    lin_run first, r;
    run(&first, &s, T.ctx, 1);
    for (int64_t extra = 1; extra < 700; extra += 233) {
        s.extra = extra;
        t_reseed(1);
        lin_build(&r, &s); /* the second build draws other random numbers, so copy the data */
        for (int64_t i = 0; i < first.live * s.K && r.x.v; i++) r.x.v[i] = first.x.v[i];
        for (int64_t i = 0; i < first.live * s.N && r.dy.v; i++) r.dy.v[i] = first.dy.v[i];
        if (r.x.v) t_mat_put(&r.x);
        if (r.dy.v) t_mat_put(&r.dy);
        if (r.w.v) memcpy(r.w.v, first.w.v, (size_t)(4 * s.K * s.N) * sizeof *r.w.v), t_mat_put(&r.w);
        T_OK(t_linear(T.ctx, s.op, &r.d));
        for (int64_t g = 0; g < 4; g++) {
            size_t bytes;
            const void *want = lin_group_bits(&first, g, &bytes);
            t_same("another capacity", want, lin_group_bits(&r, g, &bytes), bytes);
        }
    }
}

static void threads(int arg) {
    static const int64_t sizes[] = {5, 1500, 0, 33, 2}; /* enough work for three threads in every operation */
    lin_spec s = real_spec(arg, sizes, 5);
    lin_run first, r;
    run(&first, &s, T.ctx, 1);
    for (int n = 1; n <= 3; n++) {
        gmm_config config = T.config;
        config.threads = n;
        run(&r, &s, t_context(&config), 1);
        same_output("another thread count", &first, &r);
    }
}

/* Threads of this process, 0 if unknown. */
static int process_threads(void) {
    FILE *file = fopen("/proc/self/status", "r");
    char line[256];
    int count = 0;
    while (file && fgets(line, sizeof line, file)) (void)sscanf(line, "Threads: %d", &count);
    if (file) (void)fclose(file);
    return count;
}

static size_t workspace_of(gmm_context *ctx, const lin_run *r) {
    gmm_info info = GMM_ZERO;
    T_OK_TEXT(gmm_linear_query(ctx, r->spec.op, &r->d, &info), gmm_last_error(ctx));
    return info.workspace_bytes;
}

/* A small call uses one thread, and workspace for one, whatever the context allows; a large call uses more. Bits are
   equal. */
static void few_threads(int arg) {
    static const int64_t one[] = {1}, some[] = {3, 0, 5}, many[] = {5, 1500, 0, 33, 2};
    const lin_spec specs[] = {
        {.op = ops[arg], .groups = 1, .K = 1, .N = 1, .sizes = one, .fill = T_REALS},
        {.op = ops[arg], .groups = 3, .K = 33, .N = 17, .sizes = some, .fill = T_REALS},
        {.op = ops[arg], .groups = 5, .K = 270, .N = 275, .sizes = many, .fill = T_REALS},
    };
    gmm_config config = T.config;
    gmm_context *alone, *crowd;
    if (T.gpu) t_skip("threads are the CPU engine's");
    config.threads = 1;
    alone = t_context(&config);
    config.threads = 64;
    crowd = t_context(&config);
    for (int i = 0; i < 3; i++) {
        const int before = process_threads();
        lin_run first, r;
        size_t lone, together;
        run(&first, &specs[i], alone, 1);
        run(&r, &specs[i], crowd, 1);
        same_output("64 threads", &first, &r);
        lone = workspace_of(alone, &first);
        together = workspace_of(crowd, &first);
        if (i < 2) {
            T_CHECK(process_threads() == before, "%d threads became %d", before, process_threads());
            T_CHECK(together == lone, "workspace of %zu bytes, for one thread %zu", together, lone);
            T_CHECK(i > 0 || lone < 32768, "workspace of %zu bytes for one product of two numbers", lone);
        } else {
#ifdef _OPENMP
            if (specs[i].op != GMM_OP_LINEAR_BGRAD) T_CHECK(together > lone, "%zu bytes, %zu", together, lone);
            T_CHECK(before == 0 || process_threads() > 1, "no threads were started");
#endif
        }
    }
}

/* The same for the other operations with workspace per thread. */
static void small_workspaces(int arg) {
    gmm_config config = T.config;
    gmm_info info[2][2];
    (void)arg;
    if (T.gpu) t_skip("threads are the CPU engine's");
    memset(info, 0, sizeof info);
    for (int k = 0; k < 2; k++) {
        const gmm_mat logits = gmm_mat_packed(GMM_F32, NULL), src = gmm_mat_packed(GMM_BF16, NULL);
        const gmm_recipe recipe = gmm_recipe_of(GMM_RECIPE_MXFP8);
        const gmm_mat copy = gmm_mat_quantized(&recipe.input, GMM_ROWWISE, NULL, NULL, NULL);
        gmm_route route = GMM_ZERO;
        gmm_quantization quantization = GMM_ZERO;
        gmm_context *ctx;
        config.threads = k ? 64 : 1;
        ctx = t_context(&config);
        route.experts = 8;
        route.tokens = 40;
        route.topk = 2;
        route.logits = &logits;
        T_OK_TEXT(gmm_topk_query(ctx, GMM_OP_TOPK_FWD, &route, &info[k][0]), gmm_last_error(ctx));
        quantization.count = 2;
        quantization.rows = 5;
        quantization.cols = 64;
        quantization.format = &recipe.input;
        quantization.src = &src;
        quantization.rowwise = &copy;
        T_OK_TEXT(gmm_quantize_query(ctx, GMM_OP_QUANTIZE, &quantization, &info[k][1]), gmm_last_error(ctx));
    }
    for (int i = 0; i < 2; i++)
        T_CHECK(info[0][i].workspace_bytes == info[1][i].workspace_bytes, "%zu bytes for one thread, %zu for 64",
                info[0][i].workspace_bytes, info[1][i].workspace_bytes);
}

static void repeats(int arg) {
    static const int64_t sizes[] = {5, 90, 0, 33, 2};
    lin_spec s = real_spec(arg, sizes, 5);
    lin_run first, r;
    run(&first, &s, T.ctx, 1);
    for (int i = 0; i < 10; i++) {
        run(&r, &s, T.ctx, 1);
        same_output("another run", &first, &r);
    }
}

/* Group 2 of one call has the same bits at another index among other groups. */
static void shuffled(int arg) {
    static const int64_t before[] = {31, 0, 37, 5}, after[][4] = {{37, 100, 0, 2}, {1, 1, 1, 37}, {0, 37, 0, 0}};
    static const int64_t place[] = {0, 3, 1};
    lin_spec s = real_spec(arg, before, 4);
    lin_run a, b;
    const int64_t K = s.K, N = s.N;
    size_t bytes;
    s.w = s.grad = T_TABLE;
    run(&a, &s, T.ctx, 1);
    for (int i = 0; i < 3; i++) {
        const int64_t g = place[i];
        s.sizes = after[i];
        s.extra = 40 * i;
        t_reseed((uint64_t)(i + 2));
        lin_build(&b, &s);
        if (b.x.v) {
            memcpy(b.x.v + b.offsets[g] * K, a.x.v + a.offsets[2] * K, (size_t)(37 * K) * sizeof(double));
            t_mat_put(&b.x);
        }
        if (b.dy.v) {
            memcpy(b.dy.v + b.offsets[g] * N, a.dy.v + a.offsets[2] * N, (size_t)(37 * N) * sizeof(double));
            t_mat_put(&b.dy);
        }
        if (b.w.v) {
            memcpy(b.w.v + g * N * K, a.w.v + 2 * N * K, (size_t)(N * K) * sizeof(double));
            t_mat_put(&b.w);
        }
        T_OK(t_linear(T.ctx, s.op, &b.d));
        {
            const void *want = lin_group_bits(&a, 2, &bytes);
            t_same("group among other groups", want, lin_group_bits(&b, g, &bytes), bytes);
        }
    }
}

static void alone_512(int arg) {
    int64_t *sizes = (int64_t *)t_host(512 * sizeof *sizes);
    lin_spec s = real_spec(arg, sizes, 512);
    lin_run r;
    for (int g = 0; g < 512; g++) sizes[g] = t_int(0, 5);
    s.K = 21;
    s.N = 9;
    s.bias = GMM_NONE;
    s.dscale = 0;
    lin_build(&r, &s);
    T_OK(t_linear(T.ctx, s.op, &r.d));
    lin_check(&r);
    lin_alone(&r);
}

/* ------------------------------------------------------------------------------------------------------ Faults --- */

/* Faulty device splits of 5 groups at capacity 30, and the sizes that they are clamped to. */
typedef struct fault_case {
    const char *what;
    lin_split split;
    int64_t value[6], sizes[5];
    int32_t row_align;
    uint32_t fault;
} fault_case;
static const fault_case faults[] = {
    {"no fault", LIN_I32, {5, 0, 9, 16, 0, 0}, {5, 0, 9, 16, 0}, 0, 0},
    {"negative size", LIN_I32, {5, -3, 9, 4, 2, 0}, {5, 0, 9, 4, 2}, 0, GMM_FAULT_NEGATIVE},
    {"most negative int32", LIN_I32, {INT32_MIN, 3, 0, 4, INT32_MIN, 0}, {0, 3, 0, 4, 0}, 0, GMM_FAULT_NEGATIVE},
    {"most negative int64", LIN_I64, {4, INT64_MIN, 3, 4, -1, 0}, {4, 0, 3, 4, 0}, 0, GMM_FAULT_NEGATIVE},
    {"sum one over", LIN_I32, {5, 0, 9, 16, 1, 0}, {5, 0, 9, 16, 0}, 0, GMM_FAULT_CAPACITY},
    {"sum far over", LIN_I32, {5, 100, 9, 16, 1, 0}, {5, 25, 0, 0, 0}, 0, GMM_FAULT_CAPACITY},
    {"sum beyond int32", LIN_I32, {INT32_MAX, INT32_MAX, INT32_MAX, 1, 1, 0}, {30, 0, 0, 0, 0}, 0, GMM_FAULT_CAPACITY},
    {"sum beyond int64", LIN_I64, {1, INT64_MAX, INT64_MAX, 7, INT64_MAX, 0}, {1, 29, 0, 0, 0}, 0, GMM_FAULT_CAPACITY},
    {"negative and over", LIN_I64, {20, -20, 20, 1, 0, 0}, {20, 0, 10, 0, 0}, 0,
     GMM_FAULT_NEGATIVE | GMM_FAULT_CAPACITY},
    {"falling offsets", LIN_OFFSETS32, {0, 5, 3, 9, 9, 12}, {5, 0, 4, 0, 3}, 0, GMM_FAULT_MONOTONIC},
    {"falling 64-bit offsets", LIN_OFFSETS64, {0, 5, INT64_MIN, 9, 4, 30}, {5, 0, 4, 0, 21}, 0, GMM_FAULT_MONOTONIC},
    {"offsets start at 3", LIN_OFFSETS32, {3, 5, 6, 9, 9, 12}, {5, 1, 3, 0, 3}, 0, GMM_FAULT_MONOTONIC},
    {"offsets start below 0", LIN_OFFSETS64, {-2, 5, 6, 9, 9, 12}, {5, 1, 3, 0, 3}, 0, GMM_FAULT_MONOTONIC},
    {"offset one over", LIN_OFFSETS32, {0, 5, 6, 9, 9, 31}, {5, 1, 3, 0, 21}, 0, GMM_FAULT_CAPACITY},
    {"offsets over and back", LIN_OFFSETS64, {0, 5, INT64_MAX, 9, 9, 12}, {5, 25, 0, 0, 0}, 0,
     GMM_FAULT_CAPACITY | GMM_FAULT_MONOTONIC},
    {"promise broken", LIN_I32, {4, 0, 9, 12, 0, 0}, {4, 0, 9, 12, 0}, 4, GMM_FAULT_ALIGN},
    {"promise of 16 broken", LIN_OFFSETS64, {0, 16, 16, 29, 29, 30}, {16, 0, 13, 0, 1}, 16, GMM_FAULT_ALIGN},
    {"promise kept", LIN_I64, {4, 0, 8, 12, 4, 0}, {4, 0, 8, 12, 4}, 4, 0},
};

static const void *faulty_splits(const fault_case *f, int *elements) {
    const int wide = f->split == LIN_I64 || f->split == LIN_OFFSETS64;
    const int n = f->split == LIN_OFFSETS32 || f->split == LIN_OFFSETS64 ? 6 : 5;
    int32_t narrow[6];
    for (int i = 0; i < 6; i++) narrow[i] = (int32_t)f->value[i];
    *elements = n;
    return wide ? t_in(f->value, (size_t)n * 8) : t_in(narrow, (size_t)n * 4);
}

/* Whether a call without a fault word refuses the split. */
static int is_status(const fault_case *f) { return !T.gpu && (f->fault & ~(uint32_t)GMM_FAULT_ALIGN); }

static void fault_bits(int arg) {
    const fault_case *f = &faults[arg / 4];
    lin_spec s = {.op = ops[arg % 4], .groups = 5, .K = 17, .N = 12, .sizes = f->sizes, .split = f->split,
                  .row_align = f->row_align};
    int64_t live = 0;
    for (int g = 0; g < 5; g++) live += f->sizes[g];
    for (int d = 0; d < 3; d++)
        for (int mode = 0; mode < 4; mode++) {
            const uint32_t zero = 0, other = 0x40000000u;
            uint32_t fault;
            int elements;
            lin_run r;
            s.in = s.out = lin_dtype(d);
            s.extra = 30 - live;
            s.tail = mode % 2 ? GMM_TAIL_ZERO : GMM_TAIL_KEEP;
            s.fill = mode / 2 ? T_REALS : T_INTS;
            lin_build(&r, &s);
            r.groups.splits = faulty_splits(f, &elements);
            t_upload(r.fault, &other, sizeof other);
            T_OK(t_linear(T.ctx, s.op, &r.d));
            t_download(&fault, r.fault, sizeof fault);
            T_CHECK(fault == (f->fault | other), "fault bits %x instead of %x", fault, f->fault | other);
            t_upload(r.fault, &zero, sizeof zero);
            lin_check(&r);
            /* without a fault word a CPU context refuses the call; a GPU context cannot see the fault */
            r.groups.fault = NULL;
            if (is_status(f)) T_REFUSED(GMM_E_SPLIT, t_linear(T.ctx, s.op, &r.d), "groups.splits", "T=30", NULL);
            else if (!s.add && !s.main_grad) {
                t_mat_poison(&r.out);
                T_OK(t_linear(T.ctx, s.op, &r.d));
            }
            lin_check(&r);
        }
}

static void offsets_op(int arg) {
    const fault_case *f = &faults[arg];
    const uint32_t zero = 0;
    gmm_groups groups = GMM_ZERO;
    uint32_t *word = (uint32_t *)t_alloc(sizeof *word), fault;
    int64_t *out = (int64_t *)t_alloc(6 * sizeof *out), got[6], at = 0;
    int elements;
    t_upload(word, &zero, sizeof zero);
    groups.count = 5;
    groups.capacity = 30;
    groups.splits = faulty_splits(f, &elements);
    groups.dtype = f->split == LIN_I64 || f->split == LIN_OFFSETS64 ? GMM_I64 : GMM_I32;
    groups.form = elements == 6 ? GMM_SPLIT_OFFSETS : GMM_SPLIT_SIZES;
    groups.row_align = f->row_align;
    groups.fault = word;
    T_OK(gmm_offsets(T.ctx, &groups, out, T.stream));
    t_download(got, out, sizeof got);
    t_download(&fault, word, sizeof fault);
    T_CHECK(fault == f->fault, "fault bits %x instead of %x", fault, f->fault);
    for (int g = 0; g < 6; g++) {
        T_CHECK(got[g] == at, "offset %d is %lld instead of %lld", g, (long long)got[g], (long long)at);
        if (g < 5) at += f->sizes[g];
    }
    if (T.gpu && T.engine != GMM_ENGINE_AUTO) { /* any engine computes them, whatever the context demands of products */
        gmm_config config = T.config;
        gmm_context *other;
        config.engine = GMM_ENGINE_CUBLASLT;
        other = t_context(&config);
        t_poison(out, 0xFF, sizeof got);
        T_OK(gmm_offsets(other, &groups, out, T.stream));
        t_same("offsets of another context", t_get(out, sizeof got), got, sizeof got);
    }
    groups.fault = NULL;
    if (is_status(f)) T_REFUSED(GMM_E_SPLIT, gmm_offsets(T.ctx, &groups, out, T.stream), "groups.splits", NULL);
    else T_OK(gmm_offsets(T.ctx, &groups, out, T.stream));
    if (f->fault == 0) {
        groups.on_host = 1;
        groups.splits = t_get(groups.splits, (size_t)elements * (groups.dtype == GMM_I64 ? 8 : 4));
        t_poison(out, 0xFF, sizeof got);
        T_OK(gmm_offsets(T.ctx, &groups, out, T.stream));
        t_same("offsets from host sizes", t_get(out, sizeof got), got, sizeof got);
    }
}

/* ---------------------------------------------------------------------------------------------------- Contexts --- */

/* One context per thread, all threads at once. */
typedef struct worker {
    gmm_context *ctx;
    gmm_stream stream;
    lin_run r[4];
    void *workspace[4];
    size_t bytes[4];
    gmm_status status;
} worker;

static void *work(void *arg) {
    worker *w = (worker *)arg;
    for (int repeat = 0; repeat < 5; repeat++)
        for (int i = 0; i < 4 && w->status == GMM_OK; i++)
            w->status = t_linear_functions[i](w->ctx, &w->r[i].d, w->workspace[i], w->bytes[i], w->stream);
    return NULL;
}

static void context_per_thread(int arg) {
    enum { WORKERS = 8 };
    static const int64_t sizes[] = {5, 90, 0, 33, 2};
    static worker workers[WORKERS];
    pthread_t thread[WORKERS];
    lin_run want[4];
    int started = 0;
    for (int i = 0; i < 4; i++) {
        const lin_spec s = real_spec(i * 3 + arg, sizes, 5);
        run(&want[i], &s, T.ctx, (uint64_t)i + 1);
    }
    memset(workers, 0, sizeof workers);
    for (int k = 0; k < WORKERS; k++) {
        gmm_config config = T.config;
        config.threads = k % 4 == 3 ? 2 : 1;
        workers[k].ctx = t_context(&config);
        workers[k].stream = T.stream; /* T is the caller's */
        for (int i = 0; i < 4; i++) {
            const lin_spec s = real_spec(i * 3 + arg, sizes, 5);
            gmm_info info = GMM_ZERO;
            t_reseed((uint64_t)i + 1);
            lin_build(&workers[k].r[i], &s);
            T_CHECK(gmm_linear_query(workers[k].ctx, s.op, &workers[k].r[i].d, &info) == GMM_OK, "query");
            workers[k].bytes[i] = info.workspace_bytes;
            workers[k].workspace[i] = t_workspace(info.workspace_bytes);
        }
    }
    for (; started < WORKERS; started++)
        if (pthread_create(&thread[started], NULL, work, &workers[started])) break;
    for (int k = 0; k < started; k++) (void)pthread_join(thread[k], NULL);
    t_wait();
    T_CHECK(started == WORKERS, "only %d threads could be started", started);
    for (int k = 0; k < WORKERS; k++) {
        T_CHECK(workers[k].status == GMM_OK, "thread %d: %s", k, gmm_last_error(workers[k].ctx));
        for (int i = 0; i < 4; i++) same_output("another context at work", &want[i], &workers[k].r[i]);
    }
}

/* Every SIMD level of this processor gives correct results. */
static void cpu_levels(int arg) {
    static const int64_t sizes[] = {13, 0, 30, 1};
    if (T.gpu) t_skip("CPU engine only");
    for (int level = 1; level <= 3; level++) {
        gmm_config config = T.config;
        gmm_context *ctx = NULL;
        gmm_error error = GMM_ZERO;
        gmm_status status;
        config.cpu_level = level;
        status = gmm_create(&ctx, &config, &error);
        if (level > t_cpu_level()) { /* the error text names the level */
            char digit[2] = {(char)('0' + level), 0};
            T_CHECK(status == GMM_E_DEVICE && strstr(error.text, "cpu_level") && strstr(error.text, digit) && !ctx,
                    "\"%s\"", error.text);
            continue;
        }
        gmm_destroy(ctx);
        T_CHECK(status == GMM_OK, "level %d: %s", level, error.text);
        ctx = t_context(&config);
        for (int i = 0; i < 12; i++)
            for (int fill = 0; fill < 2; fill++) {
                lin_spec s = {.op = ops[i / 3], .in = lin_dtype(i % 3), .out = lin_dtype(i % 3), .groups = 4,
                              .K = 300 - 11 * arg, .N = 37 + arg, .sizes = sizes, .fill = fill ? T_INTS : T_REALS};
                lin_run r;
                lin_build(&r, &s);
                T_OK_TEXT(t_linear(ctx, s.op, &r.d), gmm_last_error(ctx));
                lin_check(&r);
            }
    }
}

void tests_groups(void) {
    static const struct { void (*run)(int); const char *name; } same[] = {
        {split_forms, "%s %s int32, int64, offsets, host splits"},
        {hints, "%s %s hints, promises, sm_limit"},
        {repeats, "%s %s ten runs"},
        {threads, "%s %s 1, 2, 3 threads"},
        {capacities, "%s %s other capacities"},
        {shuffled, "%s %s among other groups"},
        {alone_512, "%s %s 512 groups alone"},
    };
    t_add_host(split_rule, 0, "groups gmm_split_end");
    for (int i = 0; i < T_COUNT(same); i++)
        for (int k = 0; k < 12; k++) {
            char name[128];
            (void)snprintf(name, sizeof name, same[i].name, op_names[k / 3], dtype_names[k % 3]);
            t_add(same[i].run, k, "groups %s", name);
        }
    for (int i = 0; i < T_COUNT(faults); i++) {
        for (int k = 0; k < 4; k++) t_add(fault_bits, i * 4 + k, "groups %s %s", op_names[k], faults[i].what);
        t_add(offsets_op, i, "groups gmm_offsets %s", faults[i].what);
    }
    for (int k = 0; k < 4; k++) t_add(few_threads, k, "groups %s small calls take one thread of 64", op_names[k]);
    t_add(small_workspaces, 0, "groups routing and quantization of few rows take workspace for one thread of 64");
    for (int d = 0; d < 3; d++) t_add(context_per_thread, d, "groups %s eight threads, a context each", dtype_names[d]);
    for (int i = 0; i < 3; i++) t_add(cpu_levels, i, "groups vector code levels, shape %d", i);
}
