/* test_context.c - contexts: creation, allocator, log, versions, last error, struct_size */
#include "linear_case.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ------------------------------------------------------------------------------------------- Allocator, memory --- */

typedef struct hooks {
    long allocated, released;
    int fail;
    void *last;
} hooks;

static void *hook_alloc(void *user, size_t bytes) {
    hooks *h = (hooks *)user;
    if (h->fail) return NULL;
    h->allocated++;
    h->last = malloc(bytes);
    return h->last;
}
static void hook_release(void *user, void *memory) {
    hooks *h = (hooks *)user;
    h->released++;
    free(memory);
}

static void allocator(int arg) {
    static const int64_t sizes[] = {3, 0, 5};
    hooks h = {0, 0, 0, NULL};
    gmm_config config = T.config;
    gmm_context *ctx = NULL;
    gmm_error error = GMM_ZERO;
    long made;
    (void)arg;
    config.allocator.user = &h;
    config.allocator.alloc = hook_alloc;
    config.allocator.release = hook_release;
    T_CHECK(gmm_create(&ctx, &config, &error) == GMM_OK, "%s", error.text);
    made = h.allocated;
    T_CHECK(made >= 1 && h.released == 0, "%ld allocations, %ld releases", made, h.released);
    for (int i = 0; i < 12; i++) {
        const lin_spec s = {.op = (gmm_op)(GMM_OP_LINEAR_FWD + i % 4), .groups = 3, .K = 20, .N = 30, .sizes = sizes};
        lin_run r;
        gmm_status status;
        lin_build(&r, &s);
        status = t_linear(ctx, s.op, &r.d);
        r.d.in_features = 0; /* a refused call allocates nothing either */
        if (status == GMM_OK && t_linear(ctx, s.op, &r.d) != GMM_E_ARG) status = GMM_E_ARG;
        if (status != GMM_OK || h.allocated != made || h.released != 0) {
            gmm_destroy(ctx);
            T_FAIL("status %d, %ld allocations during operations", (int)status, h.allocated - made);
        }
    }
    gmm_destroy(ctx);
    T_CHECK(h.released == h.allocated, "%ld allocations, %ld releases", h.allocated, h.released);
    /* the allocator fails */
    h.fail = 1;
    h.allocated = h.released = 0;
    ctx = (gmm_context *)&h;
    T_CHECK(gmm_create(&ctx, &config, &error) == GMM_E_MEMORY && ctx == NULL, "%s", error.text);
    T_CHECK(strstr(error.text, "gmm_create") && strpbrk(error.text, "0123456789"), "\"%s\"", error.text);
    T_CHECK(h.released == h.allocated, "a failed creation keeps %ld blocks", h.allocated - h.released);
}

static void half_allocator(int arg) {
    hooks h = {0, 0, 0, NULL};
    gmm_config config = T.config;
    gmm_context *ctx = (gmm_context *)&h;
    gmm_error error = GMM_ZERO;
    config.allocator.user = &h;
    config.allocator.alloc = arg ? hook_alloc : NULL;
    config.allocator.release = arg ? NULL : hook_release;
    T_CHECK(gmm_create(&ctx, &config, &error) == GMM_E_ARG && !ctx, "%s", error.text);
    T_CHECK(strstr(error.text, "allocator") && h.allocated == 0, "\"%s\"", error.text);
}

/* --------------------------------------------------------------------------------------------------------- Log --- */

typedef struct lines {
    int count[4];
    char last[600];
    int too_high;
    gmm_log_level level;
} lines;

static void write_line(void *user, gmm_log_level level, const char *message) {
    lines *l = (lines *)user;
    l->count[(int)level & 3]++;
    if (level > l->level || level == GMM_LOG_NONE) l->too_high++;
    (void)snprintf(l->last, sizeof l->last, "%s", message);
}

static void log_hook(int arg) {
    static const int64_t sizes[] = {3, 0, 5};
    const lin_spec s = {.op = GMM_OP_LINEAR_WGRAD, .groups = 3, .K = 20, .N = 30, .sizes = sizes};
    lines l;
    lin_run r;
    gmm_config config = T.config;
    gmm_context *ctx;
    memset(&l, 0, sizeof l);
    l.level = config.log.level = (gmm_log_level)arg;
    config.log.user = &l;
    config.log.write = write_line;
    ctx = t_context(&config);
    T_CHECK((l.count[GMM_LOG_INFO] > 0) == (arg >= GMM_LOG_INFO), "%d lines on creation", l.count[GMM_LOG_INFO]);
    lin_build(&r, &s);
    l.last[0] = 0;
    T_OK_TEXT(t_linear(ctx, s.op, &r.d), gmm_last_error(ctx));
    T_CHECK((l.count[GMM_LOG_TRACE] > 0) == (arg >= GMM_LOG_TRACE), "%d lines per operation", l.count[GMM_LOG_TRACE]);
    if (arg >= GMM_LOG_TRACE)
        T_CHECK(strstr(l.last, "gmm_linear_wgrad: served by ") &&
                    (T.engine == GMM_ENGINE_AUTO || strstr(l.last, gmm_engine_name(T.engine))), "\"%s\"", l.last);
    T_CHECK(l.too_high == 0, "%d messages above the level", l.too_high);
    lin_check(&r);
}

/* The warnings about what a build lacks on a machine, for every combination of build and machine. */
static void build_warnings(int arg) {
    gmm_build b;
    (void)arg;
    for (int facts = 0; facts < 512; facts++) {
        const int gpu = facts & 1, hopper = facts >> 1 & 1, many = facts >> 2 & 1;
        const char *want[3];
        int32_t count = 0;
        memset(&b, 0, sizeof b);
        b.struct_size = facts >> 3 & 1 ? (uint32_t)sizeof b : 0;
        b.space = gpu ? GMM_SPACE_CUDA : GMM_SPACE_CPU;
        b.capability = hopper ? 90 : 80;
        b.processors = many ? 5 : 4;
        b.sm90a = facts >> 4 & 1;
        b.tensor_maps = facts >> 5 & 1;
        b.optimised = facts >> 6 & 1;
        b.openmp = facts >> 7 & 1;
        b.threads = facts >> 8 & 1;
        if (gpu && hopper && !b.sm90a) want[count++] = "compile for sm_90a";
        else if (gpu && hopper && !b.tensor_maps) want[count++] = "needs a driver";
        if (!b.optimised) want[count++] = "-O3";
        if (!gpu && !b.openmp && many && b.threads != 1) want[count++] = "-fopenmp";
        for (int32_t i = 0; i < count; i++) {
            const char *text = gmm_build_warning(&b, i);
            T_CHECK(text && strstr(text, want[i]), "facts %d: text %d is \"%s\" and lacks \"%s\"", facts, (int)i,
                    text ? text : "NULL", want[i]);
        }
        T_CHECK(!gmm_build_warning(&b, count) && !gmm_build_warning(&b, count + 1) && !gmm_build_warning(&b, -1),
                "facts %d: more than %d texts", facts, (int)count);
    }
    {
        gmm_context *ctx = NULL;
        gmm_config config = GMM_ZERO;
        config.threads = 1;
        T_CHECK(gmm_create(&ctx, &config, NULL) == GMM_OK, "no context");
        memset(&b, 0xFF, sizeof b);
        b.struct_size = (uint32_t)offsetof(gmm_build, capability);
        T_CHECK(gmm_build_of(ctx, &b) == GMM_OK && b.space == GMM_SPACE_CPU && b.threads == 1 && b.capability == -1,
                "space %d, %d threads, capability %d", (int)b.space, b.threads, b.capability);
        b.struct_size = (uint32_t)sizeof b + 4u;
        T_CHECK(gmm_build_of(ctx, &b) == GMM_E_VERSION && gmm_build_of(ctx, NULL) == GMM_E_NULL &&
                    gmm_build_of(NULL, &b) == GMM_E_NULL, "%s", gmm_last_error(ctx));
        b.struct_size = 4;
        T_CHECK(gmm_build_of(ctx, &b) == GMM_E_ARG && strstr(gmm_last_error(ctx), "struct_size 4 is too small"), "%s",
                gmm_last_error(ctx));
        gmm_destroy(ctx);
    }
    memset(&b, 0, sizeof b);
    T_CHECK(gmm_build_warning(&b, 0) && !gmm_build_warning(NULL, 0), "zeroed, and NULL");
    b.struct_size = (uint32_t)sizeof b + 4u;
    T_CHECK(!gmm_build_warning(&b, 0), "a struct_size of a later version");
}

/* ------------------------------------------------------------------------------------------- Creation's errors --- */

static void refused(const gmm_config *config, gmm_status want, const char *needle, const char *number) {
    gmm_error error = GMM_ZERO;
    gmm_context *ctx = (gmm_context *)&error;
    const gmm_status got = gmm_create(&ctx, config, &error);
    if (got == GMM_OK) gmm_destroy(ctx);
    T_CHECK(got == want && error.status == want, "%s: %s (%s) instead of %s", needle, gmm_status_name(got), error.text,
            gmm_status_name(want));
    T_CHECK(ctx == NULL, "%s: a failed creation leaves a pointer", needle);
    T_CHECK(strstr(error.text, "gmm_create") && strstr(error.text, needle) && strstr(error.text, number),
            "\"%s\" lacks \"%s\" or \"%s\"", error.text, needle, number);
    ctx = (gmm_context *)&error;
    T_CHECK(gmm_create(&ctx, config, NULL) == want && !ctx, "%s: without gmm_error", needle);
}
#define refused(...) T_CALL(refused, __VA_ARGS__)

static void create_errors(int arg) {
    gmm_config c;
    gmm_error error = GMM_ZERO;
    gmm_context *ctx = (gmm_context *)&error;
    char number[32];
    (void)arg;
    memset(&c, 0, sizeof c);
#define T_BAD(field, value, want, needle, text) \
    do { gmm_config bad = c; bad.field = value; refused(&bad, want, needle, text); } while (0)
    T_BAD(space, (gmm_space)7, GMM_E_ARG, "space", "7");
    T_BAD(device, 3, GMM_E_ARG, "device", "3");
    T_BAD(threads, -2, GMM_E_ARG, "threads", "-2");
    T_BAD(cpu_level, 9, GMM_E_ARG, "cpu_level", "9");
    T_BAD(cpu_level, -1, GMM_E_ARG, "cpu_level", "-1");
    T_BAD(engine, (gmm_engine)40, GMM_E_ARG, "engine", "40");
    T_BAD(engine, (gmm_engine)-1, GMM_E_ARG, "engine", "-1");
    T_BAD(log.level, (gmm_log_level)5, GMM_E_ARG, "level", "5");
    T_BAD(require_engine, (gmm_engine)40, GMM_E_ARG, "require_engine", "40");
    T_BAD(require_engine, (gmm_engine)-1, GMM_E_ARG, "require_engine", "-1");
    T_BAD(verify, 2, GMM_E_ARG, "verify", "2");
    (void)snprintf(number, sizeof number, "%u", (unsigned)sizeof c + 8u);
    T_BAD(struct_size, (uint32_t)sizeof c + 8u, GMM_E_VERSION, "struct_size", number);
#undef T_BAD
    T_CHECK(gmm_create(NULL, &c, &error) == GMM_E_NULL && strstr(error.text, "out"), "\"%s\"", error.text);
    /* a header of another version */
    T_CHECK(gmm__create(&ctx, NULL, (uint32_t)GMM_VERSION_NUMBER + 100u, &error) == GMM_E_VERSION && !ctx, "version");
    (void)snprintf(number, sizeof number, "%u", (unsigned)GMM_VERSION_NUMBER + 100u);
    T_CHECK(strstr(error.text, number), "\"%s\" lacks %s", error.text, number);
    T_CHECK(gmm_version_number() == (uint32_t)GMM_VERSION_NUMBER, "gmm_version_number");
}

/* gmm_config.require_engine: the context has that engine, or creation fails with the reason. */
static void required_engine(int arg) {
    static const int64_t sizes[] = {64};
    const lin_spec s = {.op = GMM_OP_LINEAR_FWD, .in = GMM_BF16, .out = GMM_BF16, .groups = 1, .K = 64, .N = 64,
                        .sizes = sizes};
    const gmm_engine engine = (gmm_engine)arg;
    gmm_config c = T.config;
    gmm_context *ctx = (gmm_context *)&c;
    gmm_error error = GMM_ZERO;
    gmm_info info = GMM_ZERO;
    gmm_status got;
    lin_run r;
    c.engine = GMM_ENGINE_AUTO;
    c.require_engine = engine;
    if ((engine == GMM_ENGINE_CPU) == T.gpu) {
        refused(&c, GMM_E_UNSUPPORTED, "config.require_engine", gmm_engine_name(engine));
        return;
    }
    lin_build(&r, &s);
    r.options.engine = engine;
    r.d.options = &r.options;
    got = gmm_create(&ctx, &c, &error);
    if (got == GMM_OK) { /* the engine serves the call, or exists and needs splits on the host */
        T_CHECK(gmm_linear_query(ctx, s.op, &r.d, &info) == GMM_OK ||
                (engine == GMM_ENGINE_CUBLASLT && strstr(gmm_last_error(ctx), "groups.on_host")), "\"%s\"",
                gmm_last_error(ctx));
        gmm_destroy(ctx);
    } else {
        T_CHECK(gmm_linear_query(T.ctx, s.op, &r.d, &info) != GMM_OK, "%s serves a call", gmm_engine_name(engine));
        refused(&c, strstr(error.text, "not in this build") ? GMM_E_BUILD : GMM_E_DEVICE, "config.require_engine",
                gmm_engine_name(engine));
    }
    c.struct_size = (uint32_t)offsetof(gmm_config, require_engine); /* an older version requires none */
    (void)t_context(&c);
}

/* Without a GPU in the build or machine the error says so; with one, an ordinal that is too large is refused. */
static void no_gpu(int arg) {
    gmm_config c;
    gmm_error error = GMM_ZERO;
    gmm_context *ctx = (gmm_context *)&error;
    gmm_status got;
    (void)arg;
    memset(&c, 0, sizeof c);
    c.space = GMM_SPACE_CUDA;
    c.device = 9999;
    got = gmm_create(&ctx, &c, &error);
    T_CHECK(got == GMM_E_BUILD || got == GMM_E_DEVICE, "%s: %s", gmm_status_name(got), error.text);
    T_CHECK(!ctx && strstr(error.text, "gmm_create") && strstr(error.text, "9999"), "\"%s\"", error.text);
    memset(&c, 0, sizeof c);
    for (int engine = GMM_ENGINE_MMA; engine <= GMM_ENGINE_CUBLASLT; engine++) { /* GPU engines in a CPU context */
        c.engine = (gmm_engine)engine;
        got = gmm_create(&ctx, &c, &error);
        if (got == GMM_OK) gmm_destroy(ctx);
        T_CHECK(got == GMM_E_BUILD || got == GMM_E_DEVICE || got == GMM_E_UNSUPPORTED, "%s", gmm_status_name(got));
        T_CHECK(strstr(error.text, gmm_engine_name(c.engine)), "\"%s\"", error.text);
    }
}

static void defaults(int arg) {
    gmm_context *ctx = NULL;
    gmm_config c;
    (void)arg;
    T_CHECK(gmm_create(&ctx, NULL, NULL) == GMM_OK && ctx, "NULL configuration");
    T_CHECK(!strcmp(gmm_last_error(ctx), ""), "an error before any: \"%s\"", gmm_last_error(ctx));
    gmm_destroy(ctx);
    gmm_destroy(NULL);
    T_CHECK(!strcmp(gmm_last_error(NULL), ""), "gmm_last_error(NULL)");
    memset(&c, 0xA5, sizeof c); /* fields behind struct_size are not read */
    memset(&c, 0, offsetof(gmm_config, threads));
    c.struct_size = (uint32_t)offsetof(gmm_config, threads);
    T_CHECK(gmm_create(&ctx, &c, NULL) == GMM_OK, "configuration of an older version");
    gmm_destroy(ctx);
}

/* ---------------------------------------------------------------------------------------------------- Messages --- */

/* gmm_last_error keeps the text of the last failure through successful calls. */
static void last_error(int arg) {
    static const int64_t sizes[] = {3, 0, 5};
    const lin_spec s = {.op = GMM_OP_LINEAR_FWD, .groups = 3, .K = 20, .N = 30, .sizes = sizes};
    gmm_context *ctx = t_context(&T.config), *other = t_context(&T.config);
    const char *text;
    char copy[600];
    lin_run r;
    (void)arg;
    lin_build(&r, &s);
    r.d.in_features = -77;
    T_CHECK(t_linear(ctx, s.op, &r.d) == GMM_E_ARG, "in_features -77");
    text = gmm_last_error(ctx);
    T_CHECK(strstr(text, "-77") && strlen(text) < sizeof copy, "\"%s\"", text);
    (void)snprintf(copy, sizeof copy, "%s", text);
    r.d.in_features = 20;
    T_OK_TEXT(t_linear(ctx, s.op, &r.d), gmm_last_error(ctx));
    T_CHECK(!strcmp(gmm_last_error(ctx), copy), "a success changed the text to \"%s\"", gmm_last_error(ctx));
    T_CHECK(!strcmp(gmm_last_error(other), ""), "another context has it: \"%s\"", gmm_last_error(other));
    r.d.out_features = -78;
    T_CHECK(t_linear(ctx, s.op, &r.d) == GMM_E_ARG, "out_features -78");
    T_CHECK(strstr(gmm_last_error(ctx), "-78") && !strstr(gmm_last_error(ctx), "-77"), "\"%s\"", gmm_last_error(ctx));
    r.d.out_features = 30;
    lin_check(&r);
}

/* Descriptors of an older version: fields beyond struct_size read as 0. */
static void older_descriptors(int arg) {
    static const int64_t sizes[] = {3, 0, 5};
    lin_spec s = {.op = arg ? GMM_OP_LINEAR_WGRAD : GMM_OP_LINEAR_FWD, .groups = 3, .K = 20, .N = 30, .sizes = sizes,
                  .fill = T_INTS};
    gmm_info info, before;
    lin_run r;
    lin_build(&r, &s);
    /* defaults: device split, no row_align, no hint, tail kept */
    r.groups.struct_size = (uint32_t)offsetof(gmm_groups, on_host);
    r.groups.on_host = 77;
    r.groups.row_align = -5;
    r.groups.tail = (gmm_tail)99;
    r.groups.fault = (uint32_t *)1;
    r.options.struct_size = (uint32_t)offsetof(gmm_options, sm_limit);
    r.options.sm_limit = -9;
    r.d.options = &r.options;
    r.x.mat.struct_size = (uint32_t)offsetof(gmm_mat, table);
    r.x.mat.table = (void *const *)1;
    r.x.mat.columnwise = (const gmm_mat *)1;
    r.d.d_bias_scale = (float *)1; /* not read by fwd and wgrad */
    r.d.struct_size = (uint32_t)(arg ? offsetof(gmm_linear, db) : offsetof(gmm_linear, dy));
    r.d.y_add = 1;
    r.grad.struct_size = (uint32_t)offsetof(gmm_grad, beta);
    r.grad.beta = (const float *)1;
    r.grad.frozen = (const uint8_t *)1;
    T_OK(t_linear(T.ctx, s.op, &r.d));
    lin_check(&r);
    memset(&info, 0xA5, sizeof info);
    before = info;
    info.struct_size = before.struct_size = (uint32_t)offsetof(gmm_info, saved_bytes);
    T_OK(gmm_linear_query(T.ctx, s.op, &r.d, &info));
    T_CHECK(info.engine == T.engine || T.engine == GMM_ENGINE_AUTO, "%s", gmm_engine_name(info.engine));
    T_CHECK(info.workspace_bytes != before.workspace_bytes, "query");
    t_same("gmm_info behind struct_size", (char *)&info + info.struct_size, (char *)&before + info.struct_size,
           sizeof info - info.struct_size);
    info.struct_size = 4;
    before = info;
    T_REFUSED(GMM_E_ARG, gmm_linear_query(T.ctx, s.op, &r.d, &info), "info: struct_size 4 is too small", NULL);
    t_same("gmm_info of a refused query", (char *)&info, (char *)&before, sizeof info);
    /* the same call with the current struct_size */
    r.groups.struct_size = (uint32_t)sizeof r.groups;
    r.groups.on_host = r.groups.row_align = 0;
    r.groups.tail = GMM_TAIL_KEEP;
    r.groups.fault = r.fault;
    r.options.struct_size = (uint32_t)sizeof r.options;
    r.options.sm_limit = 0;
    r.x.mat.struct_size = (uint32_t)sizeof r.x.mat;
    r.x.mat.table = NULL;
    r.x.mat.columnwise = NULL;
    r.d.struct_size = (uint32_t)sizeof r.d;
    if (s.op == GMM_OP_LINEAR_WGRAD) r.d.bias_scale = (const float *)1; /* not read by wgrad, as d_bias_scale */
    r.d.y_add = 0;
    r.grad.struct_size = (uint32_t)sizeof r.grad;
    r.grad.beta = NULL;
    r.grad.frozen = NULL;
    t_mat_poison(&r.out);
    T_OK(t_linear(T.ctx, s.op, &r.d));
    lin_check(&r);
}

/* Results of a query: engine, workspace, alignment of K and N; equal with and without addresses. */
static void queries(int arg) {
    static const int64_t sizes[] = {3, 0, 5};
    const lin_spec s = {.op = (gmm_op)(GMM_OP_LINEAR_FWD + arg), .in = GMM_BF16, .out = GMM_BF16, .groups = 3, .K = 21,
                        .N = 33, .sizes = sizes};
    gmm_info full = GMM_ZERO, bare = GMM_ZERO;
    lin_run r;
    lin_build(&r, &s);
    T_OK(gmm_linear_query(T.ctx, s.op, &r.d, &full));
    T_CHECK((full.engine == T.engine || T.engine == GMM_ENGINE_AUTO) && full.in_align == 1 && full.out_align == 1,
            "engine %d, aligns %d %d", (int)full.engine, (int)full.in_align, (int)full.out_align);
    T_CHECK(full.saved_bytes == 0 && full.deferred_bytes == 0 && memchr(full.note, 0, sizeof full.note), "info");
    r.groups.splits = NULL;
    r.groups.fault = NULL;
    r.x.mat.data = r.w.mat.data = r.dy.mat.data = r.out.mat.data = NULL;
    T_OK(gmm_linear_query(T.ctx, s.op, &r.d, &bare));
    T_CHECK(bare.workspace_bytes == full.workspace_bytes && bare.engine == full.engine, "%zu and %zu bytes",
            bare.workspace_bytes, full.workspace_bytes);
}

void tests_context(void) {
    t_add(allocator, 0, "context allocator hooks, none called by operations");
    for (int i = 0; i < 2; i++) t_add(half_allocator, i, "context allocator with one function, %d", i);
    for (int i = 0; i < 4; i++) t_add(log_hook, i, "context log level %d", i);
    t_add_host(build_warnings, 0, "context warnings about builds");
    for (int i = GMM_ENGINE_CPU; i <= GMM_ENGINE_CUBLASLT; i++)
        t_add(required_engine, i, "context required engine %s", gmm_engine_name((gmm_engine)i));
    t_add_host(create_errors, 0, "context errors of gmm_create");
    t_add_host(no_gpu, 0, "context GPU engines that are not there");
    t_add_host(defaults, 0, "context defaults");
    t_add(last_error, 0, "context gmm_last_error");
    for (int i = 0; i < 2; i++) t_add(older_descriptors, i, "context older struct_size, %s", i ? "wgrad" : "fwd");
    for (int i = 0; i < 4; i++) t_add(queries, i, "context query %s", gmm_op_name((gmm_op)(GMM_OP_LINEAR_FWD + i)));
}
