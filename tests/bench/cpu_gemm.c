/* cpu_gemm - GFLOP/s of gmm_linear_fwd on the CPU beside OpenBLAS sgemm, on one problem y[S][S] = x[S][S] w[S][S]^T.
   Contenders alternate within every round, so that clock changes affect all of them. The result of a contender is the
   median of its rounds. Sampled elements of every result are compared with fp64. What the numbers mean: README.md. */
#include "gmm.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#ifdef HAVE_OPENBLAS
#include <cblas.h>
#endif

typedef struct contender {
    const char *name;
    int threads;
    gmm_dtype dtype;  /* GMM_NONE: OpenBLAS */
    gmm_context *ctx;
    void *workspace;
    size_t bytes;
    double *seconds;
    double gflops, best, p95, error;
} contender;

static int size = 1024, rounds = 20;
static float *x32, *w32, *y;
static uint16_t *x16, *w16;

static void die(const char *what) {
    fprintf(stderr, "cpu_gemm: %s\n", what);
    exit(1);
}

static void *aligned_buffer(size_t bytes) {
    void *p = aligned_alloc(256, (bytes + 511) / 256 * 256);
    if (!p) die("out of memory");
    return p;
}

static double now(void) {
    struct timespec t;
    timespec_get(&t, TIME_UTC);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static int ascending(const void *a, const void *b) {
    const double p = *(const double *)a, q = *(const double *)b;
    return (p > q) - (p < q);
}

/* One field of /proc/cpuinfo, of the first processor. */
static void cpuinfo(const char *field, char *out, size_t out_bytes) {
    char line[512];
    FILE *f = fopen("/proc/cpuinfo", "r");
    snprintf(out, out_bytes, "unknown");
    if (!f) return;
    while (fgets(line, sizeof line, f)) {
        char *value = strchr(line, ':');
        if (strncmp(line, field, strlen(field)) || !value) continue;
        value[strcspn(value, "\n")] = 0;
        snprintf(out, out_bytes, "%.*s", (int)out_bytes - 1, value + 2);
        break;
    }
    fclose(f);
}

/* Runs a contender once; query: only prepares it. */
static void linear(contender *c, int query) {
    const int32_t rows = size;
    gmm_groups groups = GMM_ZERO;
    gmm_linear call = GMM_ZERO;
    gmm_info info = GMM_ZERO;
    gmm_mat mx = gmm_mat_packed(c->dtype, c->dtype == GMM_F32 ? (void *)x32 : (void *)x16);
    gmm_mat mw = gmm_mat_packed(c->dtype, c->dtype == GMM_F32 ? (void *)w32 : (void *)w16);
    gmm_mat my = gmm_mat_packed(GMM_F32, y);
    groups.count = 1;
    groups.capacity = size;
    groups.splits = &rows;
    groups.dtype = GMM_I32;
    call.groups = &groups;
    call.in_features = call.out_features = size;
    call.x = &mx;
    call.w = &mw;
    call.y = &my;
    if (query) {
        gmm_config config = GMM_ZERO;
        gmm_error error;
        config.threads = c->threads;
        if (gmm_create(&c->ctx, &config, &error) != GMM_OK) die(error.text);
        if (gmm_linear_query(c->ctx, GMM_OP_LINEAR_FWD, &call, &info) != GMM_OK) die(gmm_last_error(c->ctx));
        c->bytes = info.workspace_bytes;
        c->workspace = aligned_buffer(c->bytes);
    } else if (gmm_linear_fwd(c->ctx, &call, c->workspace, c->bytes, NULL) != GMM_OK) {
        die(gmm_last_error(c->ctx));
    }
}

static void blas(const contender *c) {
#ifdef HAVE_OPENBLAS
    openblas_set_num_threads(c->threads);
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, size, size, size, 1.0f, x32, size, w32, size, 0.0f, y, size);
#else
    (void)c;
#endif
}

static void once(contender *c) {
    if (c->dtype == GMM_NONE) blas(c);
    else linear(c, 0);
}

/* Largest |y - fp64| over sampled elements, divided by sum |x w|. */
static double sampled_error(const contender *c) {
    double worst = 0.0;
    int s, k;
    for (s = 0; s < 256; s++) {
        const size_t r = (size_t)(s * 7919) % (size_t)size, n = (size_t)(s * 104729) % (size_t)size;
        double sum = 0.0, scale = 0.0;
        for (k = 0; k < size; k++) {
            const size_t i = r * (size_t)size + (size_t)k, j = n * (size_t)size + (size_t)k;
            const double p = c->dtype == GMM_BF16 ? (double)gmm_bf16_to_f32(x16[i]) * (double)gmm_bf16_to_f32(w16[j])
                                                  : (double)x32[i] * (double)w32[j];
            sum += p;
            scale += fabs(p);
        }
        sum = fabs(sum - (double)y[r * (size_t)size + n]) / scale;
        if (!(sum <= worst)) worst = sum;
    }
    return worst;
}

static void measure(contender *c, int count) {
    int i, r;
    for (i = 0; i < count; i++) {
        memset(y, 0xFF, sizeof *y * (size_t)size * (size_t)size);
        once(&c[i]); /* warm-up */
        c[i].error = sampled_error(&c[i]);
        if (!(c[i].error < 1e-5)) die("a result is wrong");
    }
    for (r = 0; r < rounds; r++)
        for (i = 0; i < count; i++) {
            const double start = now();
            once(&c[i]);
            c[i].seconds[r] = now() - start;
        }
    for (i = 0; i < count; i++) {
        const double flops = 2e-9 * size * size * size;
        double *s = c[i].seconds;
        qsort(s, (size_t)rounds, sizeof *s, ascending);
        c[i].gflops = flops / (0.5 * (s[(rounds - 1) / 2] + s[rounds / 2]));
        c[i].best = flops / s[0];
        c[i].p95 = flops / s[(rounds * 95 + 99) / 100 - 1];
    }
}

/* Rate divided by OpenBLAS's with the same number of threads; 0 if there is none. */
static double share(const contender *c, const contender *all, int count) {
    int i;
    for (i = 0; i < count; i++)
        if (all[i].dtype == GMM_NONE && all[i].threads == c->threads) return c->gflops / all[i].gflops;
    return 0.0;
}

int main(int argc, char **argv) {
    static contender all[6];
    const char *form = "table";
    char cpu[128], before[32], after[32];
    int i, count = 0, threads = 2;
    uint32_t seed = 1;
    for (i = 1; i < argc; i++) {
        if (!strcmp(argv[i], "--csv")) form = "csv";
        else if (!strcmp(argv[i], "--json")) form = "json";
        else if (!strncmp(argv[i], "--size=", 7)) size = atoi(argv[i] + 7);
        else if (!strncmp(argv[i], "--rounds=", 9)) rounds = atoi(argv[i] + 9);
        else if (!strncmp(argv[i], "--threads=", 10)) threads = atoi(argv[i] + 10);
        else {
            printf("usage: cpu_gemm [--csv | --json] [--size=1024] [--rounds=20] [--threads=2]\n");
            return strcmp(argv[i], "--help") != 0;
        }
    }
    if (size < 1 || size > 16384 || rounds < 1 || rounds > 100000 || threads < 1 || threads > 4096)
        die("--size must be 1 to 16384, --rounds 1 to 100000, --threads 1 to 4096");
    {
        const size_t n = (size_t)size * (size_t)size;
        size_t e;
        x32 = (float *)aligned_buffer(n * 4), w32 = (float *)aligned_buffer(n * 4), y = (float *)aligned_buffer(n * 4);
        x16 = (uint16_t *)aligned_buffer(n * 2), w16 = (uint16_t *)aligned_buffer(n * 2);
        for (e = 0; e < n; e++) {
            seed = seed * 1664525u + 1013904223u;
            x32[e] = (float)(seed >> 8) / 8388608.0f - 1.0f;
            seed = seed * 1664525u + 1013904223u;
            w32[e] = (float)(seed >> 8) / 8388608.0f - 1.0f;
            x16[e] = gmm_f32_to_bf16(x32[e]);
            w16[e] = gmm_f32_to_bf16(w32[e]);
        }
    }
    for (i = 1; i <= threads; i += threads > 1 ? threads - 1 : 1) { /* 1, then `threads` */
        contender c = GMM_ZERO;
        c.threads = i;
        c.name = "gmm f32", c.dtype = GMM_F32, all[count++] = c;
        c.name = "gmm bf16", c.dtype = GMM_BF16, all[count++] = c;
#ifdef HAVE_OPENBLAS
        c.name = "OpenBLAS sgemm", c.dtype = GMM_NONE, all[count++] = c;
#endif
    }
    for (i = 0; i < count; i++) {
        all[i].seconds = (double *)aligned_buffer(sizeof(double) * (size_t)rounds);
        if (all[i].dtype != GMM_NONE) linear(&all[i], 1);
    }
    cpuinfo("model name", cpu, sizeof cpu);
    cpuinfo("cpu MHz", before, sizeof before);
    measure(all, count);
    cpuinfo("cpu MHz", after, sizeof after);

    if (!strcmp(form, "json")) {
        printf("{\"cpu\": \"%s\", \"size\": %d, \"rounds\": %d, \"results\": [\n", cpu, size, rounds);
    } else if (!strcmp(form, "csv")) {
        printf("contender,threads,size,median_gflops,best_gflops,p95_gflops,vs_openblas,error\n");
    } else {
        printf("# %s; clock %s MHz before, %s MHz after; gmm %s\n", cpu, before, after, GMM_VERSION_STRING);
        printf("# y = x w^T, %d x %d x %d; median of %d rounds, contenders alternating%s\n", size, size, size, rounds,
               share(all, all, count) > 0.0 ? "" : "; OpenBLAS not found");
        printf("%-16s %7s %9s %9s %9s %12s %9s\n", "GFLOP/s", "threads", "median", "best", "p95", "vs OpenBLAS",
               "error");
    }
    for (i = 0; i < count; i++) {
        const contender *c = &all[i];
        const double ratio = share(c, all, count);
        if (!strcmp(form, "json")) {
            printf("  {\"contender\": \"%s\", \"threads\": %d, \"median_gflops\": %.2f, \"best_gflops\": %.2f, "
                   "\"p95_gflops\": %.2f, \"vs_openblas\": ", c->name, c->threads, c->gflops, c->best, c->p95);
            if (ratio > 0.0) printf("%.3f", ratio);
            else printf("null");
            printf(", \"error\": %.2e}%s\n", c->error, i + 1 < count ? "," : "");
        } else if (!strcmp(form, "csv")) {
            printf("%s,%d,%d,%.2f,%.2f,%.2f,", c->name, c->threads, size, c->gflops, c->best, c->p95);
            if (ratio > 0.0) printf("%.3f", ratio);
            printf(",%.2e\n", c->error);
        } else {
            printf("%-16s %7d %9.1f %9.1f %9.1f ", c->name, c->threads, c->gflops, c->best, c->p95);
            if (ratio > 0.0) printf("%11.0f%%", 100.0 * ratio);
            else printf("%12s", "-");
            printf(" %9.1e\n", c->error);
        }
    }
    if (!strcmp(form, "json")) printf("]}\n");
    for (i = 0; i < count; i++) {
        gmm_destroy(all[i].ctx);
        free(all[i].workspace);
        free(all[i].seconds);
    }
    free(x32), free(w32), free(y), free(x16), free(w16);
    return 0;
}
