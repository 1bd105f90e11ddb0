/* test_report.c - comparisons, what a failure prints, progress, the table at the end */
#define _GNU_SOURCE /* isatty */
#include "harness.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

/* --------------------------------------------------------------------------------------------- Notes of a case --- */

void t_report_begin(void) {
    H.message[0] = H.about[0] = 0;
    H.depth = 0;
    H.worst = 0.0;
    H.op = (gmm_op)0;
    memset(&H.before, 0, sizeof H.before);
    free(H.splits);
    H.splits = NULL;
    H.groups = 0;
}

void t_about(const char *format, ...) {
    va_list list;
    va_start(list, format);
    (void)vsnprintf(H.about, sizeof H.about, format, list);
    va_end(list);
}

void t_splits(const int64_t *sizes, int64_t groups) {
    free(H.splits);
    H.groups = groups;
    H.splits = (int64_t *)malloc((size_t)groups * sizeof *sizes + 1);
    if (!H.splits) abort();
    if (groups) memcpy(H.splits, sizes, (size_t)groups * sizeof *sizes);
}

void t_enter(const char *what, const char *file, int line) {
    if (H.depth < T_DEPTH) H.calls[H.depth] = (t_call){what, file, line};
    H.depth++;
}
void t_leave(void) { H.depth--; }

/* -------------------------------------------------------------------------------------------------- Comparisons --- */

/* Writes the place of element i of `values`, "[group][row][column]" as far as it is known. The rows of one matrix are
   those of the groups of t_splits, one group after another, and then rows of the tail. */
static const char *t_place(const void *values, int64_t i, size_t size) {
    static _Thread_local char text[160];
    size_t byte = 0;
    const t_shape *s = t_shape_at(values, &byte);
    const int64_t at = s && s->element ? (int64_t)((byte + (size_t)i * size) / (size_t)s->element) : i;
    const int64_t index = s && s->at ? s->at[at] : at;
    int64_t g, row, col;
    if (!s || !s->cols || !s->rows) {
        (void)snprintf(text, sizeof text, "[%lld]", (long long)i);
        return text;
    }
    col = index % s->cols;
    row = index / s->cols % s->rows;
    g = index / s->cols / s->rows;
    if (s->count == 1 && H.splits) {
        for (g = 0; g < H.groups && row >= H.splits[g]; g++) row -= H.splits[g];
        if (g == H.groups) {
            (void)snprintf(text, sizeof text, "[tail][%lld][%lld] (row and column; element %lld)", (long long)row,
                           (long long)col, (long long)index);
            return text;
        }
    } else if (s->count == 1) {
        (void)snprintf(text, sizeof text, "[%lld][%lld] (row, column; element %lld)", (long long)row, (long long)col,
                       (long long)index);
        return text;
    }
    (void)snprintf(text, sizeof text, "[%lld][%lld][%lld] (group, row, column; element %lld)", (long long)g,
                   (long long)row, (long long)col, (long long)index);
    return text;
}

static int t_equal(double got, double want) { return got == want || (isnan(got) && isnan(want)); }

void t_exact_at(const char *file, int line, const char *what, gmm_dtype dtype, const double *got, const double *want,
                int64_t n) {
    int64_t first = n, wrong = 0;
    for (int64_t i = n; i-- > 0;)
        if (!t_equal(got[i], ref_round(dtype, want[i]))) first = i, wrong++;
    T.checks += n > 0;
    if (wrong)
        t_fail(file, line, "%s%s is %.9g instead of %.9g, to be equal as %s; %lld of %lld are wrong", what,
               t_place(got, first, sizeof *got), got[first], ref_round(dtype, want[first]), gmm_dtype_name(dtype),
               (long long)wrong, (long long)n);
}

void t_near_at(const char *file, int line, const char *what, const double *got, const double *want,
               const double *bound, int64_t n) {
    int64_t first = n, wrong = 0;
    for (int64_t i = n; i-- > 0;) {
        const double error = fabs(got[i] - want[i]);
        if (t_equal(got[i], want[i])) continue;
        if (!isfinite(want[i]) || !(error <= bound[i])) first = i, wrong++;
        else if (error / bound[i] > H.worst) H.worst = error / bound[i];
    }
    T.checks += n > 0;
    if (wrong && !isfinite(want[first]))
        t_fail(file, line, "%s%s is %.9g instead of %.9g; %lld of %lld are wrong", what,
               t_place(got, first, sizeof *got), got[first], want[first], (long long)wrong, (long long)n);
    if (wrong)
        t_fail(file, line, "%s%s is %.9g instead of %.9g: %.3g times the bound %.3g; %lld of %lld are wrong", what,
               t_place(got, first, sizeof *got), got[first], want[first],
               fabs(got[first] - want[first]) / bound[first], bound[first], (long long)wrong, (long long)n);
}

void t_same_at(const char *file, int line, const char *what, const void *a, const void *b, size_t bytes) {
    const unsigned char *p = (const unsigned char *)a, *q = (const unsigned char *)b;
    size_t byte, first = bytes, wrong = 0;
    const void *shaped = t_shape_at(a, &byte) ? a : b;
    T.checks++;
    if (!bytes || !memcmp(p, q, bytes)) return;
    for (size_t i = bytes; i-- > 0;)
        if (p[i] != q[i]) first = i, wrong++;
    t_fail(file, line, "%s%s: byte %zu is %02x in one and %02x in the other; %zu of %zu bytes differ", what,
           t_shape_at(shaped, &byte) ? t_place(shaped, (int64_t)first, 1) : "", first, p[first], q[first], wrong,
           bytes);
}

void t_bytes_at(const char *file, int line, const char *what, const void *a, int byte, size_t bytes) {
    const unsigned char *p = (const unsigned char *)a;
    size_t offset, first = bytes, wrong = 0;
    T.checks++;
    for (size_t i = bytes; i-- > 0;)
        if (p[i] != byte) first = i, wrong++;
    if (wrong)
        t_fail(file, line, "%s%s: byte %zu is %02x instead of %02x; %zu of %zu bytes are wrong", what,
               t_shape_at(a, &offset) ? t_place(a, (int64_t)first, 1) : "", first, p[first], byte, wrong, bytes);
}

/* ----------------------------------------------------------------------------------------------------- Failures --- */

/* The message of a failure, or of a skip, that ends the case. */
void t_fail(const char *file, int line, const char *format, ...) {
    char text[896];
    va_list list;
    va_start(list, format);
    (void)vsnprintf(text, sizeof text, format, list);
    va_end(list);
    if (line) (void)snprintf(H.message, sizeof H.message, "%s:%d: %s", file, line, text);
    else (void)snprintf(H.message, sizeof H.message, "%s: %s", file, text);
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

/* Lines that are printed at once, so that those of other processes do not come between them. */
typedef struct t_text { size_t length; char at[8192]; } t_text;

static void t_say(t_text *t, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void t_say(t_text *t, const char *format, ...) {
    va_list list;
    int n;
    va_start(list, format);
    n = vsnprintf(t->at + t->length, sizeof t->at - t->length, format, list);
    va_end(list);
    if (n > 0) t->length += (size_t)n < sizeof t->at - t->length ? (size_t)n : sizeof t->at - t->length - 1;
}

static void t_print(const t_text *t) {
    t_progress_clear();
    fwrite(t->at, 1, t->length, stdout);
    fflush(stdout);
}

static void t_say_sizes(t_text *t, const int64_t *sizes, int64_t groups) {
    enum { SHOWN = 24 };
    t_say(t, "     group sizes:");
    for (int64_t g = 0; g < groups && g < SHOWN; g++) t_say(t, " %lld", (long long)sizes[g]);
    t_say(t, groups > SHOWN ? " ... (%lld groups)\n" : "\n", (long long)groups);
}

/* The last call of t_linear; its group sizes where the host can read them. */
static void t_say_linear(t_text *t) {
    const gmm_groups *g = &H.linear_groups;
    const int wide = g->dtype == GMM_I64, offsets = g->form == GMM_SPLIT_OFFSETS;
    t_say(t, "     last t_linear: %s of %s and %s into %s, %d groups, K %lld, N %lld, capacity %lld\n",
          gmm_op_name(H.op), gmm_dtype_name(H.linear_dtypes[0]), gmm_dtype_name(H.linear_dtypes[1]),
          gmm_dtype_name(H.linear_dtypes[2]), (int)g->count, (long long)H.linear.in_features,
          (long long)H.linear.out_features, (long long)g->capacity);
    if (H.splits || g->count < 1 || (!wide && g->dtype != GMM_I32)) return;
    if (t_readable(g->splits, (size_t)(g->count + offsets) * (wide ? 8 : 4))) {
        int64_t *sizes = (int64_t *)calloc((size_t)g->count, sizeof *sizes);
        if (!sizes) abort();
        for (int64_t i = 0; i < g->count; i++) {
            int64_t v[2] = {0, 0};
            for (int k = 0; k <= offsets; k++)
                v[k] = wide ? ((const int64_t *)g->splits)[i + k] : ((const int32_t *)g->splits)[i + k];
            sizes[i] = offsets ? v[1] - v[0] : v[0];
        }
        t_say_sizes(t, sizes, g->count);
        free(sizes);
    }
}

/* What the running case has noted, and the command that repeats it alone. */
static void t_say_notes(t_text *t) {
    for (int i = H.depth < T_DEPTH ? H.depth : T_DEPTH; i-- > 0;)
        t_say(t, "     in %s, called at %s:%d\n", H.calls[i].what, H.calls[i].file, H.calls[i].line);
    if (H.about[0]) t_say(t, "     about: %s\n", H.about);
    if (H.op) t_say_linear(t);
    if (H.splits) t_say_sizes(t, H.splits, H.groups);
    t_say(t, "     seed %llu; this case alone: %s%s%s --case '%s'", (unsigned long long)H.seed, H.command,
          H.column == T_HOST_COLUMN ? "" : " --engine ", H.column == T_HOST_COLUMN ? "" : H.engine_name, H.running);
    if (H.step) t_say(t, " --step %lld", (long long)H.step);
    t_say(t, "\n");
}

void t_report_failure(const t_case *c) {
    t_text t = {0, ""};
    t_count(c->family, T_FAILED);
    t_say(&t, "FAIL [%s] %s: %s\n", H.engine_name, c->name, H.message);
    t_say_notes(&t);
    t_print(&t);
}

void t_report_crash(const char *why) {
    t_text t = {0, ""};
    t_say(&t, "FAIL [%s] %s: %s", H.engine_name, H.running, why);
    if (H.before.file) t_say(&t, ", in or after %s:%d: %s", H.before.file, H.before.line, H.before.what);
    t_say(&t, "\n");
    t_say_notes(&t);
    t_print(&t);
}

void t_report_skip(const t_case *c) {
    t_text t = {0, ""};
    t_count(c->family, T_SKIPPED);
    t_say(&t, "skip [%s] %s: %s\n", H.engine_name, c->name, H.message);
    t_print(&t);
}

/* ----------------------------------------------------------------------------------------------------- Progress --- */

void t_count(int family, t_outcome outcome) {
    t_tally->count[outcome]++;
    t_tally->cell[family][H.column][outcome]++;
}

static int t_terminal(void) { return isatty(STDERR_FILENO) && !T.verbose && !H.times; }

void t_progress_clear(void) {
    if (t_terminal()) fputs("\r\033[K", stderr);
}

void t_progress(const t_case *c) {
    enum { WIDTH = 79, PAUSE = 10 };
    const long failed = t_tally->count[T_FAILED], now = (long)time(NULL);
    const long done = failed + t_tally->count[T_PASSED] + t_tally->count[T_SKIPPED];
    char line[320];
    long told = t_tally->told;
    (void)snprintf(line, sizeof line, "%ld of %ld, %ld failed: [%s] %s", done, H.total, failed, H.engine_name, c->name);
    if (t_terminal()) fprintf(stderr, "\r%.*s\033[K", WIDTH, line);
    else if (!T.verbose && !H.times && now >= told + PAUSE &&
             atomic_compare_exchange_strong(&t_tally->told, &told, now))
        fprintf(stderr, "%s\n", line);
    fflush(stderr);
}

/* -------------------------------------------------------------------------------------------------------- Table --- */

static const char *const t_family_names[T_FAMILIES] = {
#define X(name) [T_FAMILY_##name] = #name,
    T_FILES(X)
#undef X
    [T_FAMILY_INJECTED] = "injected",
};

static long t_cases_of(int family, int column) {
    long n = 0;
    for (int o = 0; o < T_OUTCOMES; o++) n += t_tally->cell[family][column][o];
    return n;
}

void t_report_table(void) {
    int shown[T_COLUMNS] = {0};
    for (int f = 0; f < T_FAMILIES; f++)
        for (int k = 0; k < T_COLUMNS; k++) shown[k] |= t_cases_of(f, k) > 0;
    printf("%-21s", "passed/failed/skipped");
    for (int k = 0; k < T_COLUMNS; k++)
        if (shown[k]) printf(" %13s", k == T_HOST_COLUMN ? "host" : gmm_engine_name(t_engines[k - 1].name));
    printf("\n");
    for (int f = 0; f < T_FAMILIES; f++) {
        long n = 0;
        for (int k = 0; k < T_COLUMNS; k++) n += t_cases_of(f, k);
        if (!n) continue;
        printf("%-21s", t_family_names[f]);
        for (int k = 0; k < T_COLUMNS; k++) {
            char cell[64] = "-";
            const atomic_long *c = t_tally->cell[f][k];
            if (t_cases_of(f, k))
                (void)snprintf(cell, sizeof cell, "%ld/%ld/%ld", (long)c[T_PASSED], (long)c[T_FAILED],
                               (long)c[T_SKIPPED]);
            if (shown[k]) printf(" %13s", cell);
        }
        printf("\n");
    }
}

void t_report_totals(void) {
    printf("%ld passed, %ld failed, %ld skipped\n", (long)t_tally->count[T_PASSED], (long)t_tally->count[T_FAILED],
           (long)t_tally->count[T_SKIPPED]);
    fflush(stdout);
}
