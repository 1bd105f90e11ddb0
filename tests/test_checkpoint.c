/* test_checkpoint.c - names, normalizers, plans and their geometry */
#include "test.h"

#include "gmm_gtp.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---------------------------------------------------------------------------------------------------- Helpers --- */

#define MUST(condition) T_CHECK(condition, "%s", "")

static gmm_ckpt_table *table_new(void) {
    gmm_ckpt_table *t = NULL;
    gmm_error error;
    T_OK_TEXT(gmm_ckpt_table_create(&t, NULL, &error), error.text);
    return t;
}

/* A dense tensor descriptor without data; `shape` ends with a negative extent. */
static gmm_ckpt_tensor shaped(const char *name, gmm_dtype dtype, const int64_t *shape) {
    gmm_ckpt_tensor t = GMM_ZERO;
    t.name = name;
    t.dtype = dtype;
    t.bytes = gmm_dtype_bits(dtype);
    for (; *shape >= 0; shape++) {
        t.shape[t.rank++] = *shape;
        t.bytes *= *shape;
    }
    t.bytes /= 8;
    return t;
}
#define SHAPE(...) ((const int64_t[]){__VA_ARGS__, -1})
#define SCALAR ((const int64_t[]){-1})

/* Adds a tensor with a read-only buffer of its own that holds these bytes (NULL: random bytes). */
static void add(gmm_ckpt_table *t, const char *name, gmm_dtype dtype, const int64_t *shape, const void *data) {
    gmm_ckpt_tensor x = shaped(name, dtype, shape);
    gmm_ckpt_report report;
    gmm_error error;
    unsigned char *bytes = (unsigned char *)t_host((size_t)x.bytes + 1);
    if (data) memcpy(bytes, data, (size_t)x.bytes);
    else for (int64_t i = 0; i < x.bytes; i++) bytes[i] = (unsigned char)t_rand();
    T_OK_TEXT(gmm_ckpt_table_add_storage(t, t_in(bytes, (size_t)x.bytes), x.bytes, &x.storage, &error), error.text);
    T_OK_TEXT(gmm_ckpt_table_add(t, &x, &report), report.error.text);
}

static const gmm_ckpt_tensor *get(const gmm_ckpt_table *t, const char *name) {
    const int64_t i = gmm_ckpt_table_find(t, name);
    if (i < 0) T_FAIL("%s is not there", name);
    return &gmm_ckpt_table_tensors(t, NULL)[i];
}

static int64_t count(const gmm_ckpt_table *t) {
    int64_t n;
    (void)gmm_ckpt_table_tensors(t, &n);
    return n;
}

/* Address of a source tensor's bytes, which add() has copied. */
static const unsigned char *source_bytes(const gmm_ckpt_table *t, const char *name) {
    gmm_ckpt_source source = GMM_ZERO;
    gmm_ckpt_target target = GMM_ZERO;
    gmm_ckpt_part part = GMM_ZERO;
    gmm_ckpt_plan *plan;
    gmm_ckpt_report report;
    gmm_ckpt_run run = GMM_ZERO;
    gmm_ckpt_cost cost = GMM_ZERO;
    int64_t cursor = 0;
    part.table = t;
    source.parts = &part;
    source.part_count = 1;
    source.scheme = gmm_ckpt_scheme_of("module");
    source.extra = GMM_CKPT_EXTRA_KEEP;
    T_OK_TEXT(gmm_ckpt_plan_create(&plan, &source, &target, NULL, 0, NULL, &report), report.error.text);
    T_OK_TEXT(gmm_ckpt_cost_of(plan, &cost, &report.error), report.error.text);
    run.memory = t_host((size_t)cost.target_bytes + 1);
    T_OK_TEXT(gmm_ckpt_apply(plan, &run, &cursor, &report.error), report.error.text);
    {
        const int64_t at = get(gmm_ckpt_plan_targets(plan), name)->offset;
        gmm_ckpt_plan_destroy(plan);
        return (const unsigned char *)run.memory + at;
    }
}

/* A plan, its targets, and what gmm_ckpt_apply has written for them. */
typedef struct plan_run {
    gmm_ckpt_plan *plan;
    const gmm_ckpt_table *targets;
    unsigned char *memory;   /* storage 0 of the targets */
    unsigned char *written;  /* per byte: the number of writes by io.write */
    const gmm_ckpt_part *parts;
    const unsigned char *const *const *storages; /* [parts][storages], for tables without storage addresses */
    long reads, writes, done;
    int64_t bytes_read;
    long fail_at;            /* number of the I/O call that fails, from 1; 0 = none */
    const char *failed;      /* the tensor of that call */
} plan_run;

static int io_read(void *user, int32_t part, int32_t storage, int64_t offset, void *to, int64_t bytes) {
    plan_run *m = (plan_run *)user;
    if (m->fail_at && ++m->reads + m->writes == m->fail_at) {
        int64_t n, i = 0;
        const gmm_ckpt_tensor *t = gmm_ckpt_table_tensors(m->parts[part].table, &n);
        while (i + 1 < n && t[i].storage != storage) i++;
        m->failed = t[i].name;
        return 7;
    }
    m->reads += !m->fail_at;
    m->bytes_read += bytes;
    memcpy(to, m->storages[part][storage] + offset, (size_t)bytes);
    return 0;
}

static int io_write(void *user, int64_t target, int64_t offset, const void *from, int64_t bytes) {
    plan_run *m = (plan_run *)user;
    const int64_t at = gmm_ckpt_table_tensors(m->targets, NULL)[target].offset + offset;
    if (m->fail_at && m->reads + ++m->writes == m->fail_at) {
        m->failed = gmm_ckpt_table_tensors(m->targets, NULL)[target].name;
        return 8;
    }
    m->writes += !m->fail_at;
    memcpy(m->memory + at, from, (size_t)bytes);
    for (int64_t i = 0; i < bytes; i++) m->written[at + i]++;
    return 0;
}

static void io_done(void *user, int64_t target) {
    (void)target;
    ((plan_run *)user)->done++;
}

static void alloc_targets(plan_run *m) {
    gmm_ckpt_cost cost = GMM_ZERO;
    gmm_error error;
    T_OK_TEXT(gmm_ckpt_cost_of(m->plan, &cost, &error), error.text);
    m->targets = gmm_ckpt_plan_targets(m->plan);
    m->memory = (unsigned char *)t_alloc((size_t)cost.target_bytes);
    m->written = (unsigned char *)t_host((size_t)cost.target_bytes + 1);
}

/* Verifies and applies the plan: into run.memory if `scratch` is 0, else by the I/O callbacks with `scratch` bytes of
   scratch (-1: the minimum that the plan needs). Every target byte must be written exactly once. */
static void apply(plan_run *m, int64_t scratch) {
    gmm_ckpt_run run = GMM_ZERO;
    gmm_ckpt_cost cost = GMM_ZERO;
    gmm_error error;
    int64_t cursor = 0;
    T_OK_TEXT(gmm_ckpt_verify(m->plan, NULL, 0, &error), error.text);
    T_OK_TEXT(gmm_ckpt_cost_of(m->plan, &cost, &error), error.text);
    alloc_targets(m);
    run.io.user = m;
    run.io.read = io_read;
    run.io.write = io_write;
    run.io.done = io_done;
    if (scratch == 0) run.memory = m->memory;
    run.scratch_bytes = (size_t)(scratch > cost.scratch_min ? scratch : cost.scratch_min);
    run.scratch = t_alloc_aligned(run.scratch_bytes, 1);
    T_OK_TEXT(gmm_ckpt_apply(m->plan, &run, &cursor, &error), error.text);
    if (scratch)
        for (int64_t i = 0; i < count(m->targets); i++) {
            const gmm_ckpt_tensor *t = &gmm_ckpt_table_tensors(m->targets, NULL)[i];
            for (int64_t k = 0; k < t->bytes; k++)
                T_CHECK(m->written[t->offset + k] == 1, "byte %lld of %s was written %d times", (long long)k, t->name,
                        m->written[t->offset + k]);
        }
}
#define apply(...) T_CALL(apply, __VA_ARGS__)

/* -------------------------------------------------------------------------------------------------- Normalizers --- */

static gmm_ckpt_linear linear_of(const char *path, int64_t experts, int64_t out, int64_t in, int grouped, int bias) {
    gmm_ckpt_linear l = GMM_ZERO;
    l.slot = GMM_CKPT_FC1;
    l.path = path;
    l.experts = experts;
    l.out = out;
    l.in = in;
    l.bias = bias;
    l.grouped_weight = l.grouped_bias = grouped;
    return l;
}

static plan_run normalize(const gmm_ckpt_table *t, const char *prefix, const gmm_ckpt_linear *l, int64_t n,
                          gmm_ckpt_parity parity) {
    plan_run m;
    gmm_ckpt_report report;
    memset(&m, 0, sizeof m);
    if (prefix) T_OK_TEXT(gmm_ckpt_normalize_hook(&m.plan, t, prefix, l, parity, NULL, &report), report.error.text);
    else T_OK_TEXT(gmm_ckpt_normalize_map(&m.plan, t, l, n, parity, NULL, &report), report.error.text);
    m.targets = gmm_ckpt_plan_targets(m.plan);
    return m;
}

/* The normalizer must refuse with a reason, name a key, and leave no plan. */
static void refused(const gmm_ckpt_table *t, const char *prefix, const gmm_ckpt_linear *l, gmm_ckpt_reason reason,
                    const char *key) {
    gmm_ckpt_plan *plan = (gmm_ckpt_plan *)&plan;
    gmm_ckpt_report report;
    gmm_status s = prefix ? gmm_ckpt_normalize_hook(&plan, t, prefix, l, GMM_CKPT_SAFE, NULL, &report)
                          : gmm_ckpt_normalize_map(&plan, t, l, 1, GMM_CKPT_SAFE, NULL, &report);
    T_CHECK(s != GMM_OK && report.reason == reason && !plan, "%s (%s) instead of %s: %s",
            gmm_ckpt_reason_name(report.reason), gmm_status_name(s), gmm_ckpt_reason_name(reason), report.error.text);
    T_CHECK(strstr(report.key, key), "the key is \"%s\", not \"%s\"", report.key, key);
    T_CHECK(strstr(report.error.text, key), "\"%s\" lacks \"%s\"", report.error.text, key);
}

/* Bytes of a target of a plan that has only views and copies. A view's bytes are those of its source tensor. */
static const unsigned char *target_bytes(plan_run *m, const char *name) {
    const gmm_ckpt_table *targets = m->targets;
    const int64_t i = gmm_ckpt_table_find(targets, name);
    int64_t n, v;
    const gmm_ckpt_move *moves = gmm_ckpt_plan_moves(m->plan, &n);
    if (i < 0) T_FAIL("%s is not there", name);
    if (!m->memory) {
        gmm_ckpt_run run = GMM_ZERO;
        int64_t cursor = 0;
        gmm_error error;
        T_OK_TEXT(gmm_ckpt_verify(m->plan, NULL, 0, &error), error.text);
        alloc_targets(m);
        run.memory = m->memory;
        T_OK_TEXT(gmm_ckpt_apply(m->plan, &run, &cursor, &error), error.text);
    }
    for (v = 0; v < n; v++)
        if (moves[v].dst == i && moves[v].kind == GMM_CKPT_VIEW) {
            const gmm_ckpt_tensor *s = &gmm_ckpt_table_tensors(m->parts[0].table, NULL)[moves[v].src];
            return source_bytes(m->parts[0].table, s->name) + moves[v].src_at * gmm_dtype_bits(s->dtype) / 8;
        }
    return m->memory + gmm_ckpt_table_tensors(targets, NULL)[i].offset;
}

/* Checks the shape of a target and its bytes: those of the named source tensors one after another or, with part >= 0,
   slice number `part` of one source tensor. */
static void expect_tensor(plan_run *m, const char *name, const int64_t *shape, const char *first, int64_t part, ...) {
    const gmm_ckpt_tensor want = shaped(name, GMM_BF16, shape), *got = get(m->targets, name);
    const unsigned char *bytes = target_bytes(m, name);
    int64_t at = 0;
    va_list list;
    T_CHECK(got->rank == want.rank, "%s has rank %d", name, got->rank);
    for (int d = 0; d < want.rank; d++) T_CHECK(got->shape[d] == want.shape[d], "%s: extent %d", name, d);
    va_start(list, part);
    for (const char *from = first; from; from = va_arg(list, const char *)) {
        const int64_t n = part < 0 ? get(m->parts[0].table, from)->bytes : want.bytes;
        t_same(name, bytes + at, source_bytes(m->parts[0].table, from) + (part < 0 ? 0 : part * want.bytes), (size_t)n);
        at += n;
    }
    va_end(list);
    T_CHECK(at == want.bytes, "%s has %lld bytes", name, (long long)at);
}
#define expect_tensor(...) T_CALL(expect_tensor, __VA_ARGS__)
#define EXPECT_TENSOR(m, name, shape, ...) expect_tensor(m, name, shape, __VA_ARGS__, (const char *)NULL)

/* One weight or bias per expert becomes a stack, and a stack one per expert, under either parity. */
static void hook(int number) {
    gmm_ckpt_table *t = table_new();
    gmm_ckpt_part part = GMM_ZERO;
    gmm_ckpt_linear l = linear_of(NULL, 3, 3, 0, 1, 0);
    part.table = t;
    for (int parity = 0; parity < 2; parity++) {
        plan_run m;
        gmm_ckpt_table_destroy(t);
        part.table = t = table_new();
        switch (number) {
        case 1:
            for (int i = 0; i < 3; i++) add(t, (const char *[]){"layer.weight0", "layer.weight1", "layer.weight2"}[i],
                                            GMM_BF16, SHAPE(3), NULL);
            m = normalize(t, "layer.", &l, 1, (gmm_ckpt_parity)parity);
            m.parts = &part;
            MUST(count(m.targets) == 1);
            EXPECT_TENSOR(&m, "layer.weight", SHAPE(3, 3), "layer.weight0", -1, "layer.weight1", "layer.weight2");
            break;
        case 2:
            l = linear_of(NULL, 2, 2, 4, 1, 1);
            add(t, "layer.weight0", GMM_BF16, SHAPE(2, 4), NULL);
            add(t, "layer.bias1", GMM_BF16, SHAPE(2), NULL);
            add(t, "layer.weight1", GMM_BF16, SHAPE(2, 4), NULL);
            add(t, "layer.bias0", GMM_BF16, SHAPE(2), NULL);
            m = normalize(t, "layer.", &l, 1, (gmm_ckpt_parity)parity);
            m.parts = &part;
            MUST(count(m.targets) == 2);
            EXPECT_TENSOR(&m, "layer.weight", SHAPE(2, 2, 4), "layer.weight0", -1, "layer.weight1");
            EXPECT_TENSOR(&m, "layer.bias", SHAPE(2, 2), "layer.bias0", -1, "layer.bias1");
            break;
        case 3:
            l.grouped_weight = 0;
            add(t, "layer.weight", GMM_BF16, SHAPE(3, 3), NULL);
            m = normalize(t, "layer.", &l, 1, (gmm_ckpt_parity)parity);
            m.parts = &part;
            MUST(count(m.targets) == 3);
            EXPECT_TENSOR(&m, "layer.weight0", SHAPE(3), "layer.weight", 0);
            EXPECT_TENSOR(&m, "layer.weight1", SHAPE(3), "layer.weight", 1);
            EXPECT_TENSOR(&m, "layer.weight2", SHAPE(3), "layer.weight", 2);
            break;
        case 4:
            l = linear_of(NULL, 2, 4, 0, 0, 1);
            add(t, "layer.weight", GMM_BF16, SHAPE(2, 4), NULL);
            add(t, "layer.bias", GMM_BF16, parity ? SHAPE(2, 2) : SHAPE(2, 4), NULL); /* safe: a bias has out rows */
            m = normalize(t, "layer.", &l, 1, (gmm_ckpt_parity)parity);
            m.parts = &part;
            MUST(count(m.targets) == 4);
            EXPECT_TENSOR(&m, "layer.weight1", SHAPE(4), "layer.weight", 1);
            EXPECT_TENSOR(&m, "layer.bias0", parity ? SHAPE(2) : SHAPE(4), "layer.bias", 0);
            EXPECT_TENSOR(&m, "layer.bias1", parity ? SHAPE(2) : SHAPE(4), "layer.bias", 1);
            break;
        default: /* 5 */
            l = linear_of(NULL, 2, 4, 0, 1, 0);
            for (int i = 0; i < 4; i++)
                add(t, (const char *[]){"layer.weight0", "layer.weight1", "layer.bias0", "layer.bias1"}[i], GMM_BF16,
                    SHAPE(4), NULL);
            m = normalize(t, "layer.", &l, 1, (gmm_ckpt_parity)parity);
            m.parts = &part;
            MUST(count(m.targets) == 3);
            EXPECT_TENSOR(&m, "layer.weight", SHAPE(2, 4), "layer.weight0", -1, "layer.weight1");
            EXPECT_TENSOR(&m, "layer.bias0", SHAPE(4), "layer.bias0", -1);
            EXPECT_TENSOR(&m, "layer.bias1", SHAPE(4), "layer.bias1", -1);
            break;
        }
        gmm_ckpt_plan_destroy(m.plan);
    }
    gmm_ckpt_table_destroy(t);
}

/* Keys that fit neither layout: GMM_CKPT_SAFE refuses them, GMM_CKPT_UPSTREAM copies them. */
static const struct {
    const char *name;
    int32_t experts, out, grouped, stacked; /* stacked: the first key is that of a stack */
    const char *keys[2];
    gmm_ckpt_reason reason;
    const char *named;
} neither[] = {
    {"a missing expert", 3, 3, 1, 0, {"layer.weight0", "layer.weight2"}, GMM_CKPT_MISSING_INDEX, "layer.weight1"},
    {"both layouts", 2, 4, 0, 1, {"layer.weight", "layer.weight0"}, GMM_CKPT_BOTH_LAYOUTS, "layer.weight"},
    {"both layouts, stacked", 2, 4, 1, 1, {"layer.weight", "layer.weight0"}, GMM_CKPT_BOTH_LAYOUTS, "layer.weight"},
};
static void hook_of_neither(int i) {
    const gmm_ckpt_linear l = linear_of(NULL, neither[i].experts, neither[i].out, 0, neither[i].grouped, 0);
    const char *const *const k = neither[i].keys;
    gmm_ckpt_table *t = table_new();
    gmm_ckpt_part part = GMM_ZERO;
    plan_run m;
    part.table = t;
    add(t, k[0], GMM_BF16, neither[i].stacked ? SHAPE(2, 4) : SHAPE(neither[i].out), NULL);
    add(t, k[1], GMM_BF16, SHAPE(neither[i].out), NULL);
    refused(t, "layer.", &l, neither[i].reason, neither[i].named);
    m = normalize(t, "layer.", &l, 1, GMM_CKPT_UPSTREAM);
    m.parts = &part;
    MUST(count(m.targets) == 2);
    EXPECT_TENSOR(&m, k[0], neither[i].stacked ? SHAPE(2, 4) : SHAPE(neither[i].out), k[0], -1);
    EXPECT_TENSOR(&m, k[1], SHAPE(neither[i].out), k[1], -1);
    gmm_ckpt_plan_destroy(m.plan);
    gmm_ckpt_table_destroy(t);
}

/* What was stacked is split again into the same bytes. */
static void hook_and_back(int parity) {
    gmm_ckpt_table *t = table_new(), *stacked = table_new();
    gmm_ckpt_part part = GMM_ZERO, back = GMM_ZERO;
    gmm_ckpt_linear l = linear_of(NULL, 2, 3, 5, 1, 0);
    plan_run first, m;
    part.table = t;
    add(t, "layer.weight0", GMM_BF16, SHAPE(3, 5), NULL);
    add(t, "layer.weight1", GMM_BF16, SHAPE(3, 5), NULL);
    first = normalize(t, "layer.", &l, 1, (gmm_ckpt_parity)parity);
    first.parts = &part;
    add(stacked, "layer.weight", GMM_BF16, SHAPE(2, 3, 5), target_bytes(&first, "layer.weight"));
    back.table = stacked;
    l.grouped_weight = 0;
    m = normalize(stacked, "layer.", &l, 1, (gmm_ckpt_parity)parity);
    m.parts = &back;
    MUST(count(m.targets) == 2);
    t_same("weight0", target_bytes(&m, "layer.weight0"), source_bytes(t, "layer.weight0"), 30);
    t_same("weight1", target_bytes(&m, "layer.weight1"), source_bytes(t, "layer.weight1"), 30);
    gmm_ckpt_plan_destroy(first.plan);
    gmm_ckpt_plan_destroy(m.plan);
    gmm_ckpt_table_destroy(stacked);
    gmm_ckpt_table_destroy(t);
}

#define FC1 "experts.linear_fc1"

/* A table of bf16 tensors with these names: vectors of 4 elements; "name:2" is a matrix of 2 x 4. */
static gmm_ckpt_table *keys(const char *const *names) {
    gmm_ckpt_table *t = table_new();
    for (; *names; names++) {
        char name[200];
        const char *colon = strchr(*names, ':');
        snprintf(name, sizeof name, "%.*s", (int)(colon ? colon - *names : (long)strlen(*names)), *names);
        add(t, name, GMM_BF16, colon ? SHAPE(atoi(colon + 1), 4) : SHAPE(4), NULL);
    }
    return t;
}
#define KEYS(...) keys((const char *const[]){__VA_ARGS__, NULL})

/* Cases of gmm_ckpt_normalize_map: source keys, the keys that GMM_CKPT_UPSTREAM leaves (NULL ends the list), and the
   reason that GMM_CKPT_SAFE refuses with, or FINE and the keys that it leaves. */
static const struct map_case {
    const char *name;
    const char *path;
    int experts, grouped, bias;
    const char *in[6], *upstream[6];
    gmm_ckpt_reason safe;
    const char *safe_key, *safe_out[6];
} map_cases[] = {
    {"indexed to grouped", FC1, 3, 1, 0, {FC1 ".weight0", FC1 ".weight1", FC1 ".weight2"},
     {FC1 ".weight"}, GMM_CKPT_FINE, "",
     {FC1 ".weight"}},
    {"grouped to indexed", FC1, 3, 0, 0, {FC1 ".weight:3"},
     {FC1 ".weight0", FC1 ".weight1", FC1 ".weight2"}, GMM_CKPT_FINE, "",
     {FC1 ".weight0", FC1 ".weight1", FC1 ".weight2"}},
    {"weights and biases to grouped", FC1, 2, 1, 1, {FC1 ".weight0", FC1 ".weight1", FC1 ".bias0", FC1 ".bias1"},
     {FC1 ".weight", FC1 ".bias"},
     GMM_CKPT_FINE, "", {FC1 ".weight", FC1 ".bias"}},
    {"weights alone to grouped", FC1, 2, 1, 0, {FC1 ".weight0", FC1 ".weight1", FC1 ".bias0", FC1 ".bias1"},
     {FC1 ".weight", FC1 ".bias0", FC1 ".bias1"}, GMM_CKPT_FINE, "", {FC1 ".weight", FC1 ".bias0", FC1 ".bias1"}},
    {"path wrapped, keys not", "module." FC1, 2, 1, 0, {FC1 ".weight0", FC1 ".weight1"},
     {FC1 ".weight"}, GMM_CKPT_FINE, "",
     {FC1 ".weight"}},
    {"grouped beside indexed", FC1, 2, 1, 0, {FC1 ".weight:2", FC1 ".weight0", FC1 ".weight1"},
     {FC1 ".weight", FC1 ".weight0", FC1 ".weight1"}, GMM_CKPT_BOTH_LAYOUTS, FC1 ".weight", {NULL}},
    {"an index is missing", FC1, 3, 1, 0, {FC1 ".weight0", FC1 ".weight2"},
     {FC1 ".weight0", FC1 ".weight2"}, GMM_CKPT_MISSING_INDEX,
     FC1 ".weight1", {NULL}},
    {"two modules, one in part", FC1, 2, 1, 0, {"a." FC1 ".weight0", "b." FC1 ".weight0", "a." FC1 ".weight1"},
     {"a." FC1 ".weight0", "b." FC1 ".weight0", "a." FC1 ".weight1"}, GMM_CKPT_AMBIGUOUS, "b." FC1, {NULL}},
    {"experts in two modules", FC1, 2, 1, 0, {"a." FC1 ".weight0", "b." FC1 ".weight1"},
     {"a." FC1 ".weight"}, GMM_CKPT_AMBIGUOUS, "b." FC1,
     {NULL}},
    {"three modules", FC1, 2, 0, 0, {"a." FC1 ".weight0", "b." FC1 ".weight0", "a." FC1 ".weight1", "b." FC1 ".weight1",
     "c." FC1 ".weight:2"}, {"a." FC1 ".weight0", "b." FC1 ".weight0", "a." FC1 ".weight1", "b." FC1 ".weight1",
     "c." FC1 ".weight0", "c." FC1 ".weight1"}, GMM_CKPT_AMBIGUOUS, "b." FC1, {NULL}},
    {"a module whose name ends alike", FC1, 2, 1, 0, {"x.not_" FC1 ".weight0", "x.not_" FC1 ".weight1"},
     {"x.not_" FC1 ".weight"},
     GMM_CKPT_MISSING_INDEX, FC1 ".weight", {NULL}},
    {"a module whose number ends alike", "1.fc", 2, 1, 0, {"11.fc.weight0", "11.fc.weight1"},
     {"11.fc.weight"}, GMM_CKPT_MISSING_INDEX, "1.fc.weight",
     {NULL}},
    {"no path", "", 2, 0, 0, {"final_layernorm.weight:2"}, {"final_layernorm.weight0", "final_layernorm.weight1"},
     GMM_CKPT_ARGUMENT, "", {NULL}},
    {"another module beside it", FC1, 2, 1, 0, {FC1 ".weight0", "teacher." FC1 ".weight:2", FC1 ".weight1"},
     {FC1 ".weight0", "teacher." FC1 ".weight", FC1 ".weight1"}, GMM_CKPT_FINE, "",
     {FC1 ".weight", "teacher." FC1 ".weight"}},
    {"wrapped keys, indexed to grouped", FC1, 2, 1, 0, {"module." FC1 ".weight0", "module." FC1 ".weight1"},
     {"module." FC1 ".weight"}, GMM_CKPT_FINE,
     "", {"module." FC1 ".weight"}},
    {"wrapped key stays grouped", FC1, 2, 1, 0, {"module." FC1 ".weight:2"},
     {"module." FC1 ".weight"}, GMM_CKPT_FINE, "",
     {"module." FC1 ".weight"}},
    {"wrapped key, grouped to indexed", FC1, 2, 0, 0, {"module." FC1 ".weight:2"},
     {"module." FC1 ".weight0", "module." FC1 ".weight1"},
     GMM_CKPT_FINE, "", {"module." FC1 ".weight0", "module." FC1 ".weight1"}},
    {"keys wrapped twice", FC1, 2, 1, 0, {"module.module." FC1 ".weight0", "module.module." FC1 ".weight1"},
     {"module.module." FC1 ".weight"}, GMM_CKPT_FINE, "", {"module.module." FC1 ".weight"}},
    {"a wrapper inside of keys", FC1, 2, 1, 0,
     {"experts.module.linear_fc1.weight0", "experts.module.linear_fc1.weight1"},
     {"experts.module.linear_fc1.weight0", "experts.module.linear_fc1.weight1"}, GMM_CKPT_FINE, "",
     {"experts.module.linear_fc1.weight"}},
    {"a wrapper at the front", "a._orig_mod." FC1, 2, 1, 0,
     {"_orig_mod.a." FC1 ".weight0", "_orig_mod.a." FC1 ".weight1"},
     {"_orig_mod.a." FC1 ".weight0", "_orig_mod.a." FC1 ".weight1"}, GMM_CKPT_FINE, "",
     {"_orig_mod.a." FC1 ".weight"}},
    {"a wrapper of one key alone", "a._orig_mod." FC1, 2, 1, 0, {"a." FC1 ".weight0", "_orig_mod.a." FC1 ".weight1"},
     {"a." FC1 ".weight0", "_orig_mod.a." FC1 ".weight1"}, GMM_CKPT_AMBIGUOUS, "_orig_mod.a." FC1, {NULL}},
    {"an index too many", FC1, 2, 1, 0, {FC1 ".weight0", FC1 ".weight1", FC1 ".weight2"},
     {FC1 ".weight", FC1 ".weight2"},
     GMM_CKPT_EXTRA_INDEX, FC1 ".weight2", {NULL}},
    {"keys like those of weights", FC1, 2, 1, 0,
     {FC1 ".weight0", FC1 ".weight1", FC1 ".weight01", FC1 ".weight_scale", FC1 ".bias_extra"},
     {FC1 ".weight", FC1 ".weight01", FC1 ".weight_scale", FC1 ".bias_extra"}, GMM_CKPT_FINE, "",
     {FC1 ".weight", FC1 ".weight01", FC1 ".weight_scale", FC1 ".bias_extra"}},
    {"one expert to grouped", FC1, 1, 1, 0, {FC1 ".weight0"}, {FC1 ".weight"}, GMM_CKPT_FINE, "", {FC1 ".weight"}},
    {"one expert to indexed", FC1, 1, 0, 0, {FC1 ".weight:1"}, {FC1 ".weight0"}, GMM_CKPT_FINE, "", {FC1 ".weight0"}},
};

static void same_keys(const gmm_ckpt_table *t, const char *const *want) {
    int64_t n = 0;
    for (; n < 6 && want[n]; n++) T_CHECK(gmm_ckpt_table_find(t, want[n]) >= 0, "%s is not there", want[n]);
    T_CHECK(count(t) == n, "%lld keys instead of %lld", (long long)count(t), (long long)n);
}
#define same_keys(...) T_CALL(same_keys, __VA_ARGS__)

static void map(int index) {
    const struct map_case *c = &map_cases[index];
    gmm_ckpt_table *t = keys(c->in);
    gmm_ckpt_linear l = linear_of(c->path, c->experts, 4, 0, c->grouped, c->bias);
    plan_run m = normalize(t, NULL, &l, 1, GMM_CKPT_UPSTREAM);
    gmm_error error;
    same_keys(m.targets, c->upstream);
    T_OK_TEXT(gmm_ckpt_verify(m.plan, NULL, 0, &error), error.text);
    gmm_ckpt_plan_destroy(m.plan);
    if (c->safe) {
        refused(t, NULL, &l, c->safe, c->safe_key);
    } else {
        m = normalize(t, NULL, &l, 1, GMM_CKPT_SAFE);
        same_keys(m.targets, c->safe_out);
        T_OK_TEXT(gmm_ckpt_verify(m.plan, NULL, 0, &error), error.text);
        gmm_ckpt_plan_destroy(m.plan);
    }
    gmm_ckpt_table_destroy(t);
}

/* Bytes that stacking and splitting by the map give; a module that no linear names stays as it is. */
static void map_bytes(int parity) {
    gmm_ckpt_table *t = KEYS(FC1 ".weight0", FC1 ".weight1", "plain.weight0", "plain.weight1");
    gmm_ckpt_linear l = linear_of(FC1, 2, 4, 0, 1, 0);
    gmm_ckpt_part part = GMM_ZERO;
    plan_run m = normalize(t, NULL, &l, 1, (gmm_ckpt_parity)parity);
    part.table = t;
    m.parts = &part;
    MUST(count(m.targets) == 3);
    EXPECT_TENSOR(&m, FC1 ".weight", SHAPE(2, 4), FC1 ".weight0", -1, FC1 ".weight1");
    EXPECT_TENSOR(&m, "plain.weight0", SHAPE(4), "plain.weight0", -1);
    EXPECT_TENSOR(&m, "plain.weight1", SHAPE(4), "plain.weight1", -1);
    gmm_ckpt_plan_destroy(m.plan);
    gmm_ckpt_table_destroy(t);
}

static void splitter(int arg) {
    static const struct { int rank; int64_t shape[2]; int members, experts; gmm_ckpt_reason reason; int64_t first,
                         second;
    } cases[] = {
        {2, {3, 4}, 0, 3, GMM_CKPT_FINE, 4, 0},  {2, {6, 3}, 0, 3, GMM_CKPT_FINE, 2, 3},
        {1, {3, 0}, 0, 3, GMM_CKPT_FINE, 0, 0},  {2, {4, 2}, 0, 3, GMM_CKPT_NOT_DIVISIBLE, 0, 0},
        {0, {0, 0}, 0, 2, GMM_CKPT_NOT_DIVISIBLE, 0, 0}, {2, {3, 4}, 2, 3, GMM_CKPT_GROUP_COUNT, 0, 0},
        {2, {3, 4}, 3, 3, GMM_CKPT_FINE, 4, 0},  {1, {6, 0}, 0, 3, GMM_CKPT_FINE, 2, 0}};
    (void)arg;
    for (int64_t i = 0; i < T_COUNT(cases); i++) {
        int64_t shape[3] = {cases[i].shape[0], cases[i].shape[1], -1};
        gmm_ckpt_tensor t, parts[3];
        gmm_ckpt_report report;
        gmm_status s;
        shape[cases[i].rank] = -1;
        t = shaped("w", GMM_BF16, shape);
        t.offset = 10;
        s = gmm_ckpt_split(&t, cases[i].members, cases[i].experts, parts, &report);
        T_CHECK(report.reason == cases[i].reason && (s == GMM_OK) == (cases[i].reason == GMM_CKPT_FINE),
                "case %lld: %s", (long long)i, report.error.text);
        if (s) continue;
        for (int e = 0; e < cases[i].experts; e++) {
            MUST(parts[e].bytes == t.bytes / 3 && parts[e].offset == 10 + e * t.bytes / 3);
            MUST(parts[e].rank == (cases[i].first != 0) + (cases[i].second != 0));
            MUST(!cases[i].first || parts[e].shape[0] == cases[i].first);
            MUST(!cases[i].second || parts[e].shape[1] == cases[i].second);
        }
    }
}

/* Extents below 0, and bytes that do not fit behind the offset, are refused. */
static void splitter_ranges(int arg) {
    gmm_ckpt_tensor t = shaped("w", GMM_F32, SHAPE(4)), parts[4];
    gmm_ckpt_report report;
    (void)arg;
    t.offset = INT64_MAX - 2;
    T_REFUSED_TEXT(GMM_E_ARG, gmm_ckpt_split(&t, 0, 4, parts, &report), report.error.text, "\"w\"", "out of range",
                   NULL);
    t.offset = 0;
    t.shape[0] = -8;
    t.bytes = -32;
    T_REFUSED_TEXT(GMM_E_ARG, gmm_ckpt_split(&t, 0, 4, parts, &report), report.error.text, "-32 bytes", NULL);
}

/* A key with an empty segment is not one of the module's. */
static void empty_segment(int arg) {
    gmm_ckpt_table *t = KEYS("a..weight0", "a.weight1");
    gmm_ckpt_linear l = linear_of("", 2, 4, 0, 1, 0);
    plan_run m;
    (void)arg;
    refused(t, "a.", &l, GMM_CKPT_MISSING_INDEX, "a.weight");
    gmm_ckpt_table_destroy(t);
    t = KEYS("a..weight0", "a.weight0", "a.weight1");
    m = normalize(t, "a.", &l, 1, GMM_CKPT_SAFE);
    gmm_ckpt_plan_destroy(m.plan);
    gmm_ckpt_table_destroy(t);
}

/* Weight and bias have separate grouped flags; normalizing twice changes nothing; indices sort as numbers; a bias
   [E] has out = 1. */
static void flags(int arg) {
    char name[64];
    gmm_ckpt_table *t = table_new(), *again = table_new();
    gmm_ckpt_part part = GMM_ZERO;
    gmm_ckpt_linear l = linear_of("fc", 12, 1, 3, 1, 1);
    plan_run m;
    (void)arg;
    part.table = t;
    l.grouped_bias = 0;
    for (int e = 11; e >= 0; e--) {
        const uint16_t v[3] = {(uint16_t)e, (uint16_t)(100 + e), (uint16_t)(200 + e)};
        snprintf(name, sizeof name, "fc.weight%d", e);
        add(t, name, GMM_BF16, SHAPE(1, 3), v);
    }
    {
        uint16_t bias[12];
        for (int e = 0; e < 12; e++) bias[e] = (uint16_t)(7 * e);
        add(t, "fc.bias", GMM_BF16, SHAPE(12), bias);
    }
    m = normalize(t, NULL, &l, 1, GMM_CKPT_SAFE);
    m.parts = &part;
    MUST(count(m.targets) == 13 && get(m.targets, "fc.weight")->rank == 3);
    for (int e = 0; e < 12; e++) {
        const uint16_t v[3] = {(uint16_t)e, (uint16_t)(100 + e), (uint16_t)(200 + e)}, b = (uint16_t)(7 * e);
        t_same("fc.weight", target_bytes(&m, "fc.weight") + e * 6, v, 6);
        snprintf(name, sizeof name, "fc.bias%d", e);
        MUST(get(m.targets, name)->rank == 1 && get(m.targets, name)->shape[0] == 1);
        t_same(name, target_bytes(&m, name), &b, 2);
        add(again, name, GMM_BF16, SHAPE(1), &b);
    }
    add(again, "fc.weight", GMM_BF16, SHAPE(12, 1, 3), target_bytes(&m, "fc.weight"));
    gmm_ckpt_plan_destroy(m.plan);
    for (int parity = 0; parity < 2; parity++) {
        int64_t n;
        m = normalize(again, NULL, &l, 1, (gmm_ckpt_parity)parity);
        MUST(count(m.targets) == 13);
        MUST(gmm_ckpt_plan_moves(m.plan, &n)->kind == GMM_CKPT_VIEW && n == 13);
        for (int64_t i = 0; i < n; i++) MUST(gmm_ckpt_plan_moves(m.plan, NULL)[i].kind == GMM_CKPT_VIEW);
        gmm_ckpt_plan_destroy(m.plan);
    }
    gmm_ckpt_table_destroy(t);
    gmm_ckpt_table_destroy(again);
}

/* -------------------------------------------------------------------------------------------------------- Plans --- */

typedef struct call {
    gmm_ckpt_source source;
    gmm_ckpt_target target;
    gmm_ckpt_part part[16];
} call;

static void call_begin(call *c, const gmm_ckpt_table *t, const char *from, const char *to) {
    memset(c, 0, sizeof *c);
    c->part[0].table = t;
    c->source.parts = c->part;
    c->source.part_count = 1;
    c->source.scheme = gmm_ckpt_scheme_of(from);
    c->target.scheme = gmm_ckpt_scheme_of(to);
    MUST(c->source.scheme && c->target.scheme);
}

static plan_run plan_ok(const call *c, const gmm_ckpt_linear *l, int64_t n) {
    plan_run m;
    gmm_ckpt_report report;
    memset(&m, 0, sizeof m);
    T_OK_TEXT(gmm_ckpt_plan_create(&m.plan, &c->source, &c->target, l, n, NULL, &report), report.error.text);
    m.targets = gmm_ckpt_plan_targets(m.plan);
    m.parts = c->source.parts;
    MUST(report.reason == GMM_CKPT_FINE);
    return m;
}

static void plan_refused(const call *c, const gmm_ckpt_linear *l, int64_t n, gmm_ckpt_reason reason, const char *key) {
    gmm_ckpt_plan *plan = (gmm_ckpt_plan *)&plan;
    gmm_ckpt_report report;
    gmm_status s = gmm_ckpt_plan_create(&plan, &c->source, &c->target, l, n, NULL, &report);
    T_CHECK(s != GMM_OK && !plan && report.reason == reason && report.error.status == s, "%s instead of %s: %s",
            gmm_ckpt_reason_name(report.reason), gmm_ckpt_reason_name(reason), report.error.text);
    T_CHECK(strstr(report.error.text, key), "\"%s\" lacks \"%s\"", report.error.text, key);
}
#define plan_refused(...) T_CALL(plan_refused, __VA_ARGS__)

/* Codes that are stored in x out have no scales by rows of out x in: they are not dequantized. */
static void transposed_codes(int arg) {
    gmm_ckpt_table *t = table_new();
    gmm_ckpt_linear l = linear_of(NULL, 1, 4, 4, 0, 0);
    call c;
    (void)arg;
    add(t, "model.layers.0.mlp.experts.down_proj", GMM_E4M3, SHAPE(1, 4, 4), NULL);
    add(t, "model.layers.0.mlp.experts.down_proj_scales", GMM_F32, SHAPE(1, 4, 1), NULL);
    l.slot = GMM_CKPT_FC2;
    call_begin(&c, t, "gpt-oss", "gpt-oss");
    c.target.dtype = GMM_F32;
    plan_refused(&c, &l, 1, GMM_CKPT_SHAPE, "keep them quantized");
    gmm_ckpt_table_destroy(t);
}

/* A cut whose stored rows do not fit 63 bits with the columns and experts. */
static void far_cut(int arg) {
    const gmm_ckpt_cut cut = {0, 4, (int64_t)1 << 61};
    gmm_ckpt_table *t = table_new();
    gmm_ckpt_linear l = linear_of(NULL, 8, 4, 4, 0, 0);
    call c;
    (void)arg;
    add(t, "decoder.layers.0.mlp.experts.weight1", GMM_F32, SHAPE(4, 32), NULL);
    call_begin(&c, t, "legacy", "legacy");
    c.target.cuts = &cut;
    plan_refused(&c, &l, 1, GMM_CKPT_OVERFLOW, "stored_rows");
    gmm_ckpt_table_destroy(t);
}

static void packed(int arg) { /* a packed [E out, in] key serves a grouped target without a copy */
    gmm_ckpt_table *t = table_new();
    gmm_ckpt_linear l = linear_of("fc", 3, 2, 4, 1, 0);
    call c;
    plan_run m;
    int64_t n;
    (void)arg;
    add(t, "fc.weight", GMM_BF16, SHAPE(6, 4), NULL);
    call_begin(&c, t, "module", "module");
    c.target.views = 1;
    m = plan_ok(&c, &l, 1);
    EXPECT_TENSOR(&m, "fc.weight", SHAPE(3, 2, 4), "fc.weight", -1);
    MUST(gmm_ckpt_plan_moves(m.plan, &n)->kind == GMM_CKPT_VIEW && n == 1);
    gmm_ckpt_plan_destroy(m.plan);
    gmm_ckpt_table_destroy(t);
}

static void ranks(int declared) {
    gmm_ckpt_table *t = KEYS("fc.weight0", "fc.weight1", "fc.weight2", "fc.weight3");
    gmm_ckpt_linear l = linear_of("fc", 4, 4, 0, 0, 0);
    gmm_ckpt_scheme global = *gmm_ckpt_scheme_of("module");
    call c;
    plan_run m;
    call_begin(&c, t, "module", "module");
    if (declared == 4) {
        c.target.rank.ep_rank = 1;
        c.target.rank.ep_size = 2;
        m = plan_ok(&c, &l, 1);
        MUST(count(m.targets) == 2);
        EXPECT_TENSOR(&m, "fc.weight0", SHAPE(4), "fc.weight2", -1);
        EXPECT_TENSOR(&m, "fc.weight1", SHAPE(4), "fc.weight3", -1);
        gmm_ckpt_plan_destroy(m.plan);
        global.global_index = 1; /* the same with global expert indices in names on both sides */
        c.source.scheme = c.target.scheme = &global;
        m = plan_ok(&c, &l, 1);
        EXPECT_TENSOR(&m, "fc.weight2", SHAPE(4), "fc.weight2", -1);
        EXPECT_TENSOR(&m, "fc.weight3", SHAPE(4), "fc.weight3", -1);
        gmm_ckpt_plan_destroy(m.plan);
    } else {
        l.experts = declared;
        plan_refused(&c, &l, 1, GMM_CKPT_EXTRA_INDEX, "fc.weight2");
    }
    gmm_ckpt_table_destroy(t);
    if (declared == 2) { /* upstream splits four experts into two of rank 3 */
        t = table_new();
        add(t, "fc.weight", GMM_BF16, SHAPE(4, 2, 3), NULL);
        l = linear_of("fc", 2, 2, 3, 0, 0);
        call_begin(&c, t, "module", "module");
        plan_refused(&c, &l, 1, GMM_CKPT_SHAPE, "fc.weight");
        gmm_ckpt_table_destroy(t);
    }
}

static void both_layouts(int arg) {
    gmm_ckpt_table *t = KEYS("fc.weight0", "fc.weight1", "fc.weight:2");
    gmm_ckpt_linear l = linear_of("fc", 2, 4, 0, 1, 0);
    call c;
    plan_run m;
    (void)arg;
    call_begin(&c, t, "module", "module");
    plan_refused(&c, &l, 1, GMM_CKPT_BOTH_LAYOUTS, "fc.weight");
    c.source.prefer_target = 1;
    m = plan_ok(&c, &l, 1);
    MUST(count(m.targets) == 1);
    EXPECT_TENSOR(&m, "fc.weight", SHAPE(2, 4), "fc.weight", -1);
    gmm_ckpt_plan_destroy(m.plan);
    l.grouped_weight = 0;
    m = plan_ok(&c, &l, 1);
    MUST(count(m.targets) == 2);
    EXPECT_TENSOR(&m, "fc.weight1", SHAPE(4), "fc.weight1", -1);
    gmm_ckpt_plan_destroy(m.plan);
    gmm_ckpt_table_destroy(t);
}

static void split_failure(int arg) { /* a split that is refused leaves the table unchanged */
    gmm_ckpt_table *t = table_new();
    gmm_ckpt_linear l = linear_of("fc", 3, 4, 0, 0, 0);
    gmm_ckpt_plan *plan;
    gmm_ckpt_report report;
    gmm_ckpt_tensor before;
    (void)arg;
    add(t, "fc.weight", GMM_BF16, SHAPE(4, 2), NULL);
    before = *get(t, "fc.weight");
    refused(t, "fc.", &l, GMM_CKPT_SHAPE, "fc.weight");
    MUST(gmm_ckpt_normalize_hook(&plan, t, "fc.", &l, GMM_CKPT_UPSTREAM, NULL, &report) == GMM_E_CONFIG && !plan);
    MUST(report.reason == GMM_CKPT_NOT_DIVISIBLE && !strcmp(report.key, "fc.weight"));
    MUST(count(t) == 1);
    t_same("the tensor", &before, get(t, "fc.weight"), sizeof before);
    gmm_ckpt_table_destroy(t);
}

static void mixed_dtypes(int arg) {
    static const float v[4] = {1.0f, -2.5f, 3.0f, 0.1f};
    gmm_ckpt_table *t = table_new();
    gmm_ckpt_linear l = linear_of("fc", 2, 4, 0, 1, 0);
    uint16_t want[8];
    call c;
    plan_run m;
    (void)arg;
    for (int i = 0; i < 4; i++) want[i] = want[4 + i] = gmm_f32_to_bf16(v[i]);
    add(t, "fc.weight0", GMM_F32, SHAPE(4), v);
    add(t, "fc.weight1", GMM_BF16, SHAPE(4), want);
    call_begin(&c, t, "module", "module");
    plan_refused(&c, &l, 1, GMM_CKPT_DTYPE, "fc.weight1");
    c.target.dtype = GMM_BF16;
    m = plan_ok(&c, &l, 1);
    apply(&m, 0);
    t_same("fc.weight", m.memory, want, sizeof want);
    gmm_ckpt_plan_destroy(m.plan);
    gmm_ckpt_table_destroy(t);
}

/* ----------------------------------------------------------------------------------------------------- Geometry --- */

/* The element order of a stored tensor: entry i is the code of its logical element. It is written without the library's
   arithmetic: rows are appended one by one in the order of the layout. */
typedef struct logical { int64_t experts, halves, f, k; } logical;

static uint32_t code(const logical *x, int64_t e, int64_t h, int64_t f, int64_t k) {
    return (uint32_t)(((e * x->halves + h) * x->f + f) * x->k + k + 1);
}

/* Codes of one expert's matrix. half: 0 both, 1 gate, 2 up. block: rows per interleaved block, 0 = gate rows before up
   rows. Rows [f0, f0 + fn) of each half, columns [k0, k0 + kn). */
static int64_t matrix(const logical *x, int64_t e, int half, int64_t block, int64_t f0, int64_t fn, int64_t k0,
                      int64_t kn, int transposed, int64_t row0, int64_t rows, uint32_t *out) {
    int64_t (*list)[2] = (int64_t (*)[2])t_host((size_t)(fn * 2) * sizeof *list), n = 0, at = 0;
    if (half || x->halves == 1) {
        for (int64_t f = f0; f < f0 + fn; f++, n++) {
            list[n][0] = half == 2;
            list[n][1] = f;
        }
    } else {
        if (!block) block = fn;
        for (int64_t j = f0; j < f0 + fn; j += block)
            for (int64_t h = 0; h < 2; h++)
                for (int64_t f = j; f < j + block; f++, n++) {
                    list[n][0] = h;
                    list[n][1] = f;
                }
    }
    if (rows < 0) rows = n;
    for (int64_t a = 0; a < (transposed ? kn : rows); a++)
        for (int64_t b = 0; b < (transposed ? rows : kn); b++, at++) {
            const int64_t r = row0 + (transposed ? b : a), k = k0 + (transposed ? a : b);
            out[at] = r < n ? code(x, e, list[r][0], list[r][1], k) : 0;
        }
    return at;
}

/* One storage layout of FC1 or FC2 of layer 0. */
typedef struct layout {
    const char *scheme, *name[3]; /* one name for both halves, or gate and up; printf formats of the expert index */
    /* wide: experts side by side in one matrix (2: below one another). glu: the interleave block is a parameter */
    int stacked, transposed, split, wide, glu;
    int64_t block;
} layout;

#define ML "decoder.layers.0.mlp.experts."
#define HL "model.layers.0."
static const layout layouts[2][9] = {
    {{"megatron", {ML "linear_fc1.weight%d"}, 0, 0, 0, 0, 1, 0},
     {"megatron", {ML "linear_fc1.weight"}, 1, 0, 0, 0, 1, 0},
     {"sequential", {ML "local_experts.%d.linear_fc1.weight"}, 0, 0, 0, 0, 1, 0},
     {"legacy", {ML "weight1"}, 1, 1, 0, 1, 1, 0},
     {"mixtral", {HL "block_sparse_moe.experts.%d.w1.weight", HL "block_sparse_moe.experts.%d.w3.weight"}, 0, 0, 1, 0,
      0,
      0},
     {"qwen3-moe", {HL "mlp.experts.%d.gate_proj.weight", HL "mlp.experts.%d.up_proj.weight"}, 0, 0, 1, 0, 0, 0},
     {"fused", {HL "mlp.experts.gate_up_proj"}, 1, 0, 0, 0, 0, 0},
     {"fused-transposed", {HL "mlp.experts.gate_up_proj"}, 1, 1, 0, 0, 0, 0},
     {"gpt-oss", {HL "mlp.experts.gate_up_proj"}, 1, 1, 0, 0, 0, 1}},
    {{"megatron", {ML "linear_fc2.weight%d"}, 0, 0, 0, 0, 0, 0},
     {"megatron", {ML "linear_fc2.weight"}, 1, 0, 0, 0, 0, 0},
     {"sequential", {ML "local_experts.%d.linear_fc2.weight"}, 0, 0, 0, 0, 0, 0},
     {"legacy", {ML "weight2"}, 1, 1, 0, 2, 0, 0},
     {"mixtral", {HL "block_sparse_moe.experts.%d.w2.weight"}, 0, 0, 0, 0, 0, 0},
     {"qwen3-moe", {HL "mlp.experts.%d.down_proj.weight"}, 0, 0, 0, 0, 0, 0},
     {"fused", {HL "mlp.experts.down_proj"}, 1, 0, 0, 0, 0, 0},
     {"fused-transposed", {HL "mlp.experts.down_proj"}, 1, 1, 0, 0, 0, 0},
     {"gpt-oss", {HL "mlp.experts.down_proj"}, 1, 1, 0, 0, 0, 0}}};

/* part of a layer that an (EP, ETP) rank stores, and of its rows those of a GTP shard (rows < 0: all) */
typedef struct rank_slice { int64_t ep, eps, etp, etps; int64_t row0, rows, stored; } rank_slice;

/* Calls `each` with the name, shape and element codes of every tensor that a rank stores. */
static void tensors(const layout *y, int fc2, const logical *x, const rank_slice *w, int64_t block,
                    void (*each)(void *user, const char *name, const int64_t *shape, const uint32_t *codes, int64_t n),
                    void *user) {
    const int64_t held = x->experts / w->eps, fn = fc2 ? x->f : x->f / w->etps, kn = fc2 ? x->k / w->etps : x->k;
    const int64_t f0 = fc2 ? 0 : w->etp * fn, k0 = fc2 ? w->etp * kn : 0;
    const int global = strncmp(y->scheme, "m", 1) ? strcmp(y->scheme, "sequential") && strcmp(y->scheme, "legacy")
                                                  : !strcmp(y->scheme, "mixtral");
    for (int half = 0; half < (y->split ? 2 : 1); half++) {
        const int64_t all = fn * (y->split ? 1 : x->halves), rows = w->rows < 0 ? all : w->stored, size = rows * kn;
        uint32_t *codes = (uint32_t *)t_host((size_t)(held * size + 1) * sizeof *codes);
        for (int64_t e = 0; e < held; e++) {
            uint32_t *to = codes + (y->stacked ? e * size : 0);
            char name[128];
            int64_t m0, m1;
            (void)matrix(x, w->ep * held + e, y->split ? half + 1 : 0, y->glu ? block : y->block, f0, fn, k0, kn,
                         y->transposed, w->rows < 0 ? 0 : w->row0, rows, to);
            for (int64_t i = 0; w->rows >= 0 && !y->transposed && i < size; i++)
                if (i / kn >= w->rows) to[i] = 0;
            m0 = y->transposed ? kn : rows;
            m1 = y->transposed ? rows : kn;
            if (y->stacked) continue;
            snprintf(name, sizeof name, y->name[half], (int)(global ? w->ep * held + e : e));
            each(user, name, SHAPE(m0, m1), codes, size);
        }
        if (y->stacked) {
            const int64_t m0 = y->transposed ? kn : rows, m1 = y->transposed ? rows : kn;
            if (y->wide == 2) each(user, y->name[0], SHAPE(held * m0, m1), codes, held * size);
            else if (y->wide) each(user, y->name[0], SHAPE(m0, held * m1), codes, held * size);
            else each(user, y->name[0], SHAPE(held, m0, m1), codes, held * size);
        }
    }
}

typedef struct table_filler {
    gmm_ckpt_table *t;
    const unsigned char **bytes;
    int n, io;
    gmm_dtype dtype;
} table_filler;

static void fill(void *user, const char *name, const int64_t *shape, const uint32_t *codes, int64_t n) {
    table_filler *f = (table_filler *)user;
    gmm_ckpt_tensor x = shaped(name, f->dtype, shape);
    gmm_ckpt_report report;
    gmm_error error;
    unsigned char *bytes = (unsigned char *)t_host((size_t)x.bytes);
    const void *fixed;
    for (int64_t i = 0; i < n; i++) {
        if (f->dtype == GMM_F32) memcpy(bytes + 4 * i, &codes[i], 4);
        else memcpy(bytes + 2 * i, &codes[i], 2);
    }
    fixed = t_in(bytes, (size_t)x.bytes);
    f->bytes[f->n++] = (const unsigned char *)fixed;
    T_OK_TEXT(gmm_ckpt_table_add_storage(f->t, f->io ? NULL : fixed, x.bytes, &x.storage, &error), error.text);
    T_OK_TEXT(gmm_ckpt_table_add(f->t, &x, &report), report.error.text);
}

typedef struct target_checker { plan_run *m; int n; gmm_dtype dtype; const char *from, *to; } target_checker;

static void check(void *user, const char *name, const int64_t *shape, const uint32_t *codes, int64_t n) {
    target_checker *c = (target_checker *)user;
    const gmm_ckpt_tensor *t = get(c->m->targets, name), want = shaped(name, c->dtype, shape);
    T_CHECK(t->dtype == c->dtype && t->rank == want.rank, "%s: rank %d", name, t->rank);
    for (int d = 0; d < t->rank; d++)
        T_CHECK(t->shape[d] == want.shape[d], "%s: extent %d is %lld, not %lld", name, d, (long long)t->shape[d],
                (long long)want.shape[d]);
    for (int64_t i = 0; i < n; i++) {
        uint32_t got = 0;
        if (c->dtype == GMM_F32) memcpy(&got, c->m->memory + t->offset + 4 * i, 4);
        else memcpy(&got, c->m->memory + t->offset + 2 * i, 2);
        if (got != (c->dtype == GMM_F32 ? codes[i] : codes[i] & 0xFFFFu))
            T_FAIL("%s to %s: element %lld of %s is %u, not %u", c->from, c->to, (long long)i, name, got, codes[i]);
    }
    c->n++;
}

enum { RANKS = 16 };

/* Converts FC1 or FC2 from all ranks of one process grid to one rank of another, through memory and through I/O
   callbacks. */
static void convert(int fc2, int from, int to, logical x, rank_slice src, rank_slice dst, int64_t src_block,
                    int64_t dst_block, int64_t scratch) {
    const layout *a = &layouts[fc2][from], *b = &layouts[fc2][to];
    const int64_t parts = src.eps * src.etps;
    const unsigned char **bytes[RANKS];
    gmm_ckpt_linear l = GMM_ZERO;
    gmm_ckpt_cut cut = GMM_ZERO;
    table_filler f;
    target_checker check_all;
    call c;
    plan_run m;
    if (fc2) x.halves = 1;
    call_begin(&c, NULL, a->scheme, b->scheme);
    c.source.part_count = (int32_t)parts;
    for (int64_t p = 0; p < parts; p++) {
        src.ep = p / src.etps;
        src.etp = p % src.etps;
        f.t = table_new();
        f.n = 0;
        f.io = scratch != 0;
        f.dtype = GMM_F32;
        f.bytes = bytes[p] = (const unsigned char **)t_host((size_t)(2 * x.experts) * sizeof *bytes[p]);
        tensors(a, fc2, &x, &src, src_block, fill, &f);
        c.part[p].table = f.t;
        c.part[p].rank.ep_rank = (int32_t)src.ep;
        c.part[p].rank.ep_size = (int32_t)src.eps;
        c.part[p].rank.etp_rank = (int32_t)src.etp;
        c.part[p].rank.etp_size = (int32_t)src.etps;
    }
    l.slot = fc2 ? GMM_CKPT_FC2 : GMM_CKPT_FC1;
    l.gated = x.halves == 2;
    l.experts = x.experts;
    l.out = x.f * x.halves;
    l.in = x.k;
    l.grouped_weight = b->stacked;
    c.source.stated.known = a->glu;
    c.source.stated.block = (int32_t)src_block;
    c.target.glu_block = b->glu ? (int32_t)dst_block : 0;
    c.target.rank.ep_rank = (int32_t)dst.ep;
    c.target.rank.ep_size = (int32_t)dst.eps;
    c.target.rank.etp_rank = (int32_t)dst.etp;
    c.target.rank.etp_size = (int32_t)dst.etps;
    if (dst.rows >= 0) {
        cut.row0 = dst.row0;
        cut.rows = dst.rows;
        cut.stored_rows = dst.stored;
        c.target.cuts = &cut;
    }
    m = plan_ok(&c, &l, 1);
    m.storages = (const unsigned char *const *const *)bytes;
    apply(&m, scratch);
    check_all.m = &m;
    check_all.n = 0;
    check_all.dtype = GMM_F32;
    check_all.from = a->scheme;
    check_all.to = b->scheme;
    tensors(b, fc2, &x, &dst, dst_block, check, &check_all);
    T_CHECK(check_all.n == count(m.targets), "%d tensors, not %lld", check_all.n, (long long)count(m.targets));
    gmm_ckpt_plan_destroy(m.plan);
    for (int64_t p = 0; p < parts; p++) gmm_ckpt_table_destroy((gmm_ckpt_table *)(uintptr_t)c.part[p].table);
}

static const rank_slice whole = {0, 1, 0, 1, 0, -1, 0};

static rank_slice slice_of(int64_t ep, int64_t eps, int64_t etp, int64_t etps) {
    rank_slice w = whole;
    w.ep = ep;
    w.eps = eps;
    w.etp = etp;
    w.etps = etps;
    return w;
}

/* values 1 to 8 in interleave blocks of 2, weight and bias, and back */
static void interleave_values(int arg) {
    static const float halves[8] = {1, 2, 3, 4, 5, 6, 7, 8}, blocks[8] = {1, 2, 5, 6, 3, 4, 7, 8};
    const float *in = arg ? blocks : halves, *want = arg ? halves : blocks;
    gmm_ckpt_table *t = table_new();
    gmm_ckpt_linear l = linear_of("fc", 1, 8, 1, 0, 1);
    call c;
    plan_run m;
    l.gated = 1;
    add(t, "fc.weight0", GMM_F32, SHAPE(8, 1), in);
    add(t, "fc.bias0", GMM_F32, SHAPE(8), in);
    call_begin(&c, t, "module", "module");
    c.source.stated.known = 1;
    c.source.stated.block = arg ? 2 : 0;
    c.target.glu_block = arg ? 0 : 2;
    m = plan_ok(&c, &l, 1);
    apply(&m, 0);
    t_same("weight", m.memory + get(m.targets, "fc.weight0")->offset, want, sizeof halves);
    t_same("bias", m.memory + get(m.targets, "fc.bias0")->offset, want, sizeof halves);
    gmm_ckpt_plan_destroy(m.plan);
    gmm_ckpt_table_destroy(t);
}

static int64_t divisor(int64_t n) {
    int64_t d = t_int(1, n);
    while (n % d) d--;
    return d;
}

static void interleave_random(int arg) { /* random interleave blocks into one another, 1 and F included */
    (void)arg;
    for (int i = 0; i < 60; i++) {
        logical x = {t_int(1, 3), 2, t_int(1, 24), t_int(1, 5)};
        int64_t a = i % 5 ? divisor(x.f) : 1, b = i % 7 ? divisor(x.f) : x.f;
        if (i == 0) { /* neither divides the other */
            x.f = 24;
            a = 4;
            b = 6;
        }
        if (i == 1) {
            x.f = 60;
            a = 4;
            b = 6;
        }
        convert(0, (int)t_int(0, 3), (int)t_int(0, 3), x, whole, whole, a, i % 3 ? b : 0, i & 1 ? t_int(64, 400) : 0);
    }
    convert(0, 0, 1, (logical){2, 2, 64, 3}, whole, whole, 32, 1, 0);
}

static void every_pair(int fc2) { /* every pair of layouts, small odd extents */
    for (int from = 0; from < 9; from++)
        for (int to = 0; to < 9; to++) {
            const logical x = {3, 2, 6, 5};
            const int64_t b = layouts[0][to].glu ? t_int(0, 3) : 0, a = layouts[0][from].glu ? t_int(0, 3) : 0;
            for (int way = 0; way < 3; way++)
                convert(fc2, from, to, x, whole, whole, a, b, way == 0 ? 0 : way == 1 ? -1 : 200);
        }
}

static void large_matrices(int arg) { /* transposes and rows larger than a tile, with a small scratch */
    (void)arg;
    for (int way = 0; way < 3; way++) {
        const int64_t scratch = way == 0 ? 0 : way == 1 ? 3000 : 40000;
        convert(0, 1, 7, (logical){2, 2, 70, 101}, whole, whole, 0, 0, scratch);
        convert(0, 8, 0, (logical){1, 2, 66, 67}, whole, whole, 0, 33, scratch);
        convert(1, 3, 4, (logical){2, 1, 97, 65}, whole, slice_of(1, 2, 0, 5), 0, 0, scratch);
        convert(1, 5, 7, (logical){1, 1, 64, 129}, slice_of(0, 1, 0, 3), whole, 0, 0, scratch);
    }
}

static void every_rank(int fc2) { /* random EP and ETP grids into one another, one target rank at a time */
    for (int i = 0; i < 120; i++) {
        static const int64_t sizes[4] = {1, 2, 4, 1};
        const int64_t eps = sizes[t_int(0, 3)], etps = sizes[t_int(0, 3)], eps2 = sizes[t_int(0, 3)];
        const int64_t etps2 = sizes[t_int(0, 3)], unit = fc2 ? 1 : divisor(6), unit2 = fc2 ? 1 : divisor(6);
        const logical x = {4, 2, fc2 ? 5 : 24, fc2 ? 8 : 3};
        rank_slice dst = slice_of(t_int(0, eps2 - 1), eps2, t_int(0, etps2 - 1), etps2);
        convert(fc2, (int)t_int(0, 8), (int)t_int(0, 8), x, slice_of(0, eps, 0, etps), dst, i % 4 ? unit : 0,
                i % 5 ? unit2 : 0, i & 1 ? t_int(64, 600) : 0);
    }
}

static void etp_merge(int arg) { /* merges and splits of interleaved rows and of halves over ETP ranks */
    (void)arg;
    convert(0, 0, 0, (logical){2, 2, 8, 3}, slice_of(0, 1, 0, 2), whole, 2, 2, 0);
    convert(0, 1, 1, (logical){2, 2, 8, 3}, slice_of(0, 1, 0, 2), whole, 0, 2, -1);
    for (int r = 0; r < 4; r++) convert(0, 1, 0, (logical){2, 2, 16, 3}, whole, slice_of(0, 1, r, 4), 4, 2, 0);
}

/* GTP shards: every first row and row count, with and without padding, interleaved or in halves */
static void gtp_cuts(int arg) {
    (void)arg;
    for (int64_t row0 = 0; row0 <= 12; row0++)
        for (int64_t rows = 0; row0 + rows <= 12; rows += 1 + row0 % 2) {
            rank_slice dst = slice_of(0, 1, 0, 2);
            dst.row0 = row0;
            dst.rows = rows;
            dst.stored = rows + (row0 + rows == 12 ? 3 : 0);
            if (!dst.stored) continue;
            convert(0, 0, (int)t_int(0, 1), (logical){2, 2, 12, 2}, whole, dst, t_int(0, 1) * 3, t_int(0, 1) * 2,
                    row0 & 1 ? -1 : 0);
        }
}

static void not_divisible(int arg) {
    gmm_ckpt_table *t = table_new();
    gmm_ckpt_linear l = linear_of("fc", 2, 12, 4, 0, 0);
    call c;
    (void)arg;
    l.gated = 1;
    add(t, "fc.weight", GMM_BF16, SHAPE(2, 12, 4), NULL);
    call_begin(&c, t, "module", "module");
    c.source.stated.known = 1;
    c.target.glu_block = 4; /* 6 gate rows */
    plan_refused(&c, &l, 1, GMM_CKPT_NOT_DIVISIBLE, "4");
    c.target.glu_block = -1;
    plan_refused(&c, &l, 1, GMM_CKPT_NOT_DIVISIBLE, "-1");
    c.target.glu_block = 0;
    c.source.stated.block = -2;
    plan_refused(&c, &l, 1, GMM_CKPT_NOT_DIVISIBLE, "-2");
    c.source.stated.block = 4;
    plan_refused(&c, &l, 1, GMM_CKPT_NOT_DIVISIBLE, "4");
    c.source.stated.block = 0;
    c.target.glu_block = 2; /* 3 gate rows a rank */
    c.target.rank.etp_size = 2;
    plan_refused(&c, &l, 1, GMM_CKPT_NOT_DIVISIBLE, "2");
    c.target.glu_block = 0;
    c.target.rank.etp_size = 4;
    plan_refused(&c, &l, 1, GMM_CKPT_NOT_DIVISIBLE, "ETP 4");
    c.target.rank.etp_size = 1;
    c.target.rank.ep_size = 4;
    plan_refused(&c, &l, 1, GMM_CKPT_NOT_DIVISIBLE, "EP 4");
    gmm_ckpt_table_destroy(t);
}

static void glu_stated(int contradicts) {
    gmm_ckpt_table *t = table_new();
    gmm_ckpt_linear l = linear_of(NULL, 2, 12, 4, 0, 0);
    call c;
    plan_run m;
    l.gated = 1;
    add(t, ML "linear_fc1.weight", GMM_BF16, SHAPE(2, 12, 4), NULL);
    call_begin(&c, t, "megatron", "megatron");
    if (!contradicts) {
        c.target.glu_block = 2;
        plan_refused(&c, &l, 1, GMM_CKPT_GLU_UNKNOWN, "layer 0");
        c.target.glu_block = 0;
        c.target.rank.etp_size = 2; /* a row slice needs the GLU layout, which is unknown here */
        plan_refused(&c, &l, 1, GMM_CKPT_GLU_UNKNOWN, "layer 0");
        c.target.rank.etp_size = 1;
        c.target.scheme = gmm_ckpt_scheme_of("mixtral"); /* so do separate gate and up tensors */
        plan_refused(&c, &l, 1, GMM_CKPT_GLU_UNKNOWN, "layer 0");
        c.target.scheme = gmm_ckpt_scheme_of("fused"); /* and a scheme that defines it, though no row would move */
        plan_refused(&c, &l, 1, GMM_CKPT_GLU_UNKNOWN, "order in the target's scheme");
        c.source.stated.known = 1;
        m = plan_ok(&c, &l, 1);
        gmm_ckpt_plan_destroy(m.plan);
        c.source.stated.known = 0;
        c.target.scheme = c.source.scheme;
        m = plan_ok(&c, &l, 1); /* rows that are not moved need no layout */
        gmm_ckpt_plan_destroy(m.plan);
    } else {
        c.source.recorded.known = c.source.stated.known = 1;
        c.source.recorded.block = 32;
        plan_refused(&c, &l, 1, GMM_CKPT_GLU_CONFLICT, "32");
        c.source.stated.known = 0;
        c.target.scheme = gmm_ckpt_scheme_of("gpt-oss");
        c.target.glu_block = 2; /* gpt-oss has 1 */
        plan_refused(&c, &l, 1, GMM_CKPT_GLU_CONFLICT, "2");
    }
    gmm_ckpt_table_destroy(t);
}

/* [E, 2F, H] and [E, H, 2F] with 2F = H: shapes are equal, only the scheme tells which it is */
static void same_extent(int arg) {
    const logical x = {2, 2, 3, 6};
    (void)arg;
    convert(0, 6, 1, x, whole, whole, 0, 0, 0);
    convert(0, 7, 1, x, whole, whole, 0, 0, 0);
    convert(0, 7, 6, x, whole, whole, 0, 0, -1);
}

static void mixtral_ep(int arg) { /* every rank of EP 4 */
    (void)arg;
    for (int fc2 = 0; fc2 < 2; fc2++)
        for (int r = 0; r < 4; r++) convert(fc2, 4, 1, (logical){8, 2, 14, 5}, whole, slice_of(r, 4, 0, 1), 0, 0,
                                            r & 1 ? -1 : 0);
}

static void qwen_indexed(int arg) {
    (void)arg;
    for (int fc2 = 0; fc2 < 2; fc2++) convert(fc2, 5, 0, (logical){5, 2, 7, 9}, whole, whole, 0, fc2 ? 0 : 7, 0);
}

/* Gate and up rows alternate, in weights and biases; MXFP4 is tested below */
static void gpt_oss_bias(int arg) {
    float w[2 * 3 * 8], bias[16], want[16];
    gmm_ckpt_table *t = table_new();
    gmm_ckpt_linear l = linear_of(NULL, 2, 8, 3, 1, 1);
    call c;
    plan_run m;
    (void)arg;
    l.gated = 1;
    for (int e = 0; e < 2; e++)
        for (int r = 0; r < 8; r++) {
            bias[e * 8 + r] = (float)(100 * e + r); /* r even: gate r / 2, odd: up r / 2 */
            want[e * 8 + r % 2 * 4 + r / 2] = bias[e * 8 + r];
            for (int k = 0; k < 3; k++) w[(e * 3 + k) * 8 + r] = (float)(1000 * e + 10 * r + k);
        }
    add(t, HL "mlp.experts.gate_up_proj", GMM_F32, SHAPE(2, 3, 8), w);
    add(t, HL "mlp.experts.gate_up_proj_bias", GMM_F32, SHAPE(2, 8), bias);
    call_begin(&c, t, "gpt-oss", "megatron");
    m = plan_ok(&c, &l, 1);
    apply(&m, 0);
    t_same("bias", m.memory + get(m.targets, ML "linear_fc1.bias")->offset, want, sizeof want);
    for (int e = 0; e < 2; e++)
        for (int r = 0; r < 8; r++)
            for (int k = 0; k < 3; k++) {
                const float *got = (const float *)(void *)(m.memory + get(m.targets, ML "linear_fc1.weight")->offset);
                MUST(got[(e * 8 + r) * 3 + k] == (float)(1000 * e + 10 * (r % 4 * 2 + r / 4) + k));
            }
    gmm_ckpt_plan_destroy(m.plan);
    gmm_ckpt_table_destroy(t);
}

/* Decodes an FP8 code by the definition of the format, in double. */
static double fp8_value(int code, int mantissa_bits, int bias) {
    const int m = code & ((1 << mantissa_bits) - 1), e = (code & 127) >> mantissa_bits;
    double v = e ? 1.0 + (double)m / (1 << mantissa_bits) : (double)m / (1 << mantissa_bits) * 2;
    for (int i = e; i < bias; i++) v /= 2;
    for (int i = bias; i < e; i++) v *= 2;
    return code & 128 ? -v : v;
}

static void fp8_blocks(int arg) { /* gate and up with partial 128 x 128 blocks, dequantized into one FC1 */
    enum { F = 200, K = 300, FB = 2, KB = 3 };
    unsigned char *w[2];
    float scale[2][FB * KB];
    gmm_ckpt_table *t = table_new();
    gmm_ckpt_linear l = linear_of(NULL, 2, 2 * F, K, 1, 0);
    const gmm_dtype dtype = arg % 2 ? GMM_E5M2 : GMM_E4M3;
    const char *const half[2] = {"gate", "up"};
    char name[100];
    const unsigned char *bytes[8];
    const unsigned char *const *all[1];
    int stored = 0;
    call c;
    plan_run m;
    l.gated = 1;
    for (int h = 0; h < 2; h++) w[h] = (unsigned char *)t_host(2 * F * K);
    for (int h = 0; h < 2; h++)
        for (int i = 0; i < 2 * F * K; i++) {
            int v = (int)(t_rand() & 255);
            if ((v & 0x7C) == 0x7C) v &= 0x3F; /* neither Inf nor NaN in E4M3 and E5M2 */
            w[h][i] = (unsigned char)v;
        }
    for (int h = 0; h < 2; h++)
        for (int i = 0; i < FB * KB; i++) scale[h][i] = (float)(0.001 * (i + 1) * (h + 1));
    for (int e = 0; e < 2; e++)
        for (int h = 0; h < 2; h++)
            for (int s = 0; s < 2; s++) {
                gmm_ckpt_tensor x = s ? shaped(name, GMM_F32, SHAPE(FB, KB)) : shaped(name, dtype, SHAPE(F, K));
                gmm_error error;
                gmm_ckpt_report report;
                snprintf(name, sizeof name, HL "mlp.experts.%d.%s_proj.weight%s", e, half[h], s ? "_scale_inv" : "");
                x.name = name;
                bytes[stored++] = s ? (const unsigned char *)scale[h] : w[h] + e * F * K;
                T_OK_TEXT(gmm_ckpt_table_add_storage(t, arg < 2 ? bytes[stored - 1] : NULL, x.bytes, &x.storage,
                                                     &error),
                          error.text);
                T_OK_TEXT(gmm_ckpt_table_add(t, &x, &report), report.error.text);
            }
    all[0] = bytes;
    call_begin(&c, t, "deepseek-v3", "megatron");
    c.target.dtype = GMM_BF16;
    c.target.glu_block = 40;
    m = plan_ok(&c, &l, 1);
    m.storages = all;
    apply(&m, arg < 2 ? 0 : arg < 4 ? -1 : 5000);
    for (int e = 0; e < 2; e++)
        for (int r = 0; r < 2 * F; r++)
            for (int k = 0; k < K; k++) {
                const int h = r / 40 % 2, f = r / 80 * 40 + r % 40;
                const double v = fp8_value(w[h][(e * F + f) * K + k], dtype == GMM_E5M2 ? 2 : 3,
                                           dtype == GMM_E5M2 ? 15 : 7);
                const uint16_t want = gmm_f32_to_bf16((float)v * scale[h][f / 128 * KB + k / 128]);
                uint16_t got;
                memcpy(&got, m.memory + ((int64_t)(e * 2 * F + r) * K + k) * 2, 2);
                T_CHECK(got == want || (!(got & 0x7FFF) && !(want & 0x7FFF)), "expert %d row %d column %d: %04x, not "
                        "%04x",
                        e, r, k, got, want);
            }
    gmm_ckpt_plan_destroy(m.plan);
    gmm_ckpt_table_destroy(t);
}

/* Two experts stacked in one matrix: with 64 rows each, a scale block of 128 rows would span both, which is refused. */
static void fp8_stacked(int arg) {
    enum { K = 128, MOST = 128 };
    static unsigned char w[2 * MOST * K];
    static const float scale[2] = { 2.0f, 8.0f };
    (void)arg;
    memset(w, 0x38, sizeof w); /* ones */
    for (int64_t rows = 64; rows <= MOST; rows += 64)
        for (int rank = 2; rank <= 3; rank++) {
            gmm_ckpt_table *t = table_new();
            gmm_ckpt_linear l = linear_of("fc", 2, rows, K, 0, 0);
            call c;
            plan_run m;
            if (rank == 2) add(t, "fc.weight", GMM_E4M3, SHAPE(2 * rows, K), w);
            else add(t, "fc.weight", GMM_E4M3, SHAPE(2, rows, K), w);
            add(t, "fc.weight_scale_inv", GMM_F32, SHAPE(2, 1), scale);
            call_begin(&c, t, gmm_ckpt_scheme_at(0)->name, gmm_ckpt_scheme_at(0)->name);
            c.target.dtype = GMM_F32;
            if (rank == 2 && rows == 64) {
                plan_refused(&c, &l, 1, GMM_CKPT_SHAPE, "fc.weight");
            } else {
                m = plan_ok(&c, &l, 1);
                apply(&m, 0);
                for (int e = 0; e < 2; e++) {
                    char name[32];
                    float value;
                    snprintf(name, sizeof name, "fc.weight%d", e);
                    memcpy(&value, m.memory + get(m.targets, name)->offset, sizeof value);
                    T_CHECK(value == scale[e], "expert %d: %g", e, (double)value);
                }
                gmm_ckpt_plan_destroy(m.plan);
            }
            gmm_ckpt_table_destroy(t);
        }
}

/* One stacked scale tensor with one weight tensor per expert, and the reverse: copied as they are, but not
   dequantized. */
static void fp8_mixed_forms(int arg) {
    enum { R = 128, K = 128 };
    static unsigned char w[2 * R * K];
    static const float scale[2] = { 2.0f, 8.0f };
    gmm_ckpt_table *t = table_new();
    gmm_ckpt_linear l = linear_of("fc", 2, R, K, 0, 0);
    call c;
    plan_run m;
    memset(w, 0x38, sizeof w);
    for (int e = 0; e < 2; e++) {
        char name[40];
        snprintf(name, sizeof name, arg ? "fc.weight%d" : "fc.weight_scale_inv%d", e);
        if (arg) add(t, name, GMM_E4M3, SHAPE(R, K), w + e * R * K);
        else add(t, name, GMM_F32, SHAPE(1, 1), scale + e);
    }
    if (arg) add(t, "fc.weight_scale_inv", GMM_F32, SHAPE(2, 1, 1), scale);
    else add(t, "fc.weight", GMM_E4M3, SHAPE(2, R, K), w);
    call_begin(&c, t, "module", "module");
    c.target.dtype = GMM_F32;
    plan_refused(&c, &l, 1, GMM_CKPT_SHAPE, "fc.weight_scale_inv");
    c.target.dtype = GMM_NONE;
    l.grouped_weight = 1;
    m = plan_ok(&c, &l, 1);
    apply(&m, 0);
    t_same("scales", m.memory + get(m.targets, "fc.weight_scale_inv")->offset, scale, sizeof scale);
    gmm_ckpt_plan_destroy(m.plan);
    gmm_ckpt_table_destroy(t);
}

/* Scales beside a 16-bit weight are extra keys (refused, kept or dropped); scales of a quantized weight are used. */
static void fp8_plain(int arg) {
    enum { F = 128, K = 128 };
    static unsigned char w[2][2 * F * K];
    static const float scale[2] = { 2.0f, 4.0f };
    const gmm_dtype second = arg ? GMM_E4M3 : GMM_BF16; /* dtype of expert 1; expert 0 is bf16 */
    gmm_ckpt_table *t = table_new();
    gmm_ckpt_linear l = linear_of(NULL, 2, F, K, 1, 0);
    gmm_ckpt_report report = GMM_ZERO;
    call c;
    plan_run m;
    l.slot = GMM_CKPT_FC2;
    for (int e = 0; e < 2; e++) {
        char name[80];
        snprintf(name, sizeof name, HL "mlp.experts.%d.down_proj.weight", e);
        add(t, name, e ? second : GMM_BF16, SHAPE(F, K), w[e]);
        snprintf(name, sizeof name, HL "mlp.experts.%d.down_proj.weight_scale_inv", e);
        add(t, name, GMM_F32, SHAPE(1, 1), &scale[e]);
    }
    call_begin(&c, t, "deepseek-v3", "deepseek-v3");
    c.target.dtype = GMM_BF16;
    plan_refused(&c, &l, 1, GMM_CKPT_EXTRA_KEY, "experts.0.down_proj.weight_scale_inv");
    for (int keep = 0; keep < 2; keep++) {
        c.source.extra = keep ? GMM_CKPT_EXTRA_KEEP : GMM_CKPT_EXTRA_DROP;
        T_OK_TEXT(gmm_ckpt_plan_create(&m.plan, &c.source, &c.target, &l, 1, NULL, &report), report.error.text);
        T_CHECK(report.matched == 2 + arg && report.kept == (keep ? 2 - arg : 0) &&
                report.dropped == (keep ? 0 : 2 - arg), "%lld matched, %lld kept, %lld dropped",
                (long long)report.matched, (long long)report.kept, (long long)report.dropped);
        gmm_ckpt_plan_destroy(m.plan);
    }
    gmm_ckpt_table_destroy(t);
}

/* scales are joined, sliced by ETP and stacked as their weights are; otherwise an error */
static void fp8_kept(int arg) {
    enum { F = 256, K = 384 };
    gmm_ckpt_table *t = table_new();
    gmm_ckpt_linear l = linear_of(NULL, 1, 2 * F, K, 1, 0);
    unsigned char *w = (unsigned char *)t_host(2 * F * K);
    float scale[12], want[6];
    call c;
    plan_run m;
    (void)arg;
    l.gated = 1;
    for (int i = 0; i < 2 * F * K; i++) w[i] = (unsigned char)t_rand();
    for (int i = 0; i < 12; i++) scale[i] = (float)i;
    add(t, HL "mlp.experts.0.gate_proj.weight", GMM_E4M3, SHAPE(F, K), w);
    add(t, HL "mlp.experts.0.gate_proj.weight_scale_inv", GMM_F32, SHAPE(2, 3), scale);
    add(t, HL "mlp.experts.0.up_proj.weight", GMM_E4M3, SHAPE(F, K), w + F * K);
    call_begin(&c, t, "deepseek-v3", "megatron");
    c.target.dtype = GMM_BF16;
    plan_refused(&c, &l, 1, GMM_CKPT_SCALE_MISSING, "up_proj.weight");
    c.target.dtype = GMM_NONE;
    plan_refused(&c, &l, 1, GMM_CKPT_SCALE_MISSING, "proj.weight");
    add(t, HL "mlp.experts.0.up_proj.weight_scale_inv", GMM_F32, SHAPE(2, 3), scale + 6);
    c.target.rank.etp_rank = 1;
    c.target.rank.etp_size = 2;
    m = plan_ok(&c, &l, 1);
    apply(&m, 0);
    for (int h = 0; h < 2; h++) {
        t_same("weight", m.memory + get(m.targets, ML "linear_fc1.weight")->offset + h * 128 * K,
               w + h * F * K + 128 * K, 128 * K);
        memcpy(want + 3 * h, scale + 6 * h + 3, 12);
    }
    t_same("scales", m.memory + get(m.targets, ML "linear_fc1.weight_scale_inv")->offset, want, sizeof want);
    gmm_ckpt_plan_destroy(m.plan);
    c.target.rank.etp_rank = 0;
    c.target.rank.etp_size = 4; /* 64 rows: half a block */
    plan_refused(&c, &l, 1, GMM_CKPT_NOT_DIVISIBLE, "128");
    c.target.rank.etp_size = 1;
    c.target.glu_block = 32;
    plan_refused(&c, &l, 1, GMM_CKPT_NOT_DIVISIBLE, "128");
    gmm_ckpt_table_destroy(t);
}

static void few_moves(int arg) { /* a stacked tensor is one move that loops over the experts */
    gmm_ckpt_table *t = table_new();
    gmm_ckpt_linear l = linear_of("fc", 6, 8, 3, 1, 0);
    int64_t n;
    call c;
    plan_run m;
    (void)arg;
    l.gated = 1;
    add(t, "fc.weight", GMM_BF16, SHAPE(6, 8, 3), NULL);
    call_begin(&c, t, "module", "module");
    c.source.stated.known = 1;
    m = plan_ok(&c, &l, 1);
    (void)gmm_ckpt_plan_moves(m.plan, &n);
    T_CHECK(n == 1, "%lld moves of a plain copy", (long long)n);
    gmm_ckpt_plan_destroy(m.plan);
    c.target.glu_block = 2;
    c.target.rank.etp_size = 2;
    m = plan_ok(&c, &l, 1);
    (void)gmm_ckpt_plan_moves(m.plan, &n);
    T_CHECK(n == 1, "%lld moves of a slice", (long long)n);
    apply(&m, 0);
    gmm_ckpt_plan_destroy(m.plan);
    gmm_ckpt_table_destroy(t);
}

static void mxfp4(int arg) { /* gpt-oss MXFP4 blocks and scales: dequantized exactly, or kept and sliced */
    enum { E = 2, F = 3, K = 64 };
    static const double fp4[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
    unsigned char blocks[E * 2 * F * K / 2], scales[E * 2 * F * 2];
    const unsigned char *bytes[2] = {blocks, scales};
    const unsigned char *const *all[1] = {bytes};
    gmm_ckpt_table *t = table_new();
    gmm_ckpt_linear l = linear_of(NULL, E, 2 * F, K, 1, 0);
    gmm_ckpt_tensor x;
    gmm_error error;
    gmm_ckpt_report report;
    call c;
    plan_run m;
    l.gated = 1;
    for (size_t i = 0; i < sizeof blocks; i++) blocks[i] = (unsigned char)t_rand();
    for (size_t i = 0; i < sizeof scales; i++) scales[i] = (unsigned char)t_int(100, 150);
    for (int s = 0; s < 2; s++) {
        x = s ? shaped(HL "mlp.experts.gate_up_proj_scales", GMM_U8, SHAPE(E, 2 * F, K / 32))
              : shaped(HL "mlp.experts.gate_up_proj_blocks", GMM_U8, SHAPE(E, 2 * F, K / 32, 16));
        T_OK_TEXT(gmm_ckpt_table_add_storage(t, arg ? NULL : bytes[s], x.bytes, &x.storage, &error), error.text);
        T_OK_TEXT(gmm_ckpt_table_add(t, &x, &report), report.error.text);
    }
    call_begin(&c, t, "gpt-oss", "megatron");
    plan_refused(&c, &l, 1, GMM_CKPT_EXTRA_KEY, "megatron"); /* megatron has no names for MXFP4 blocks */
    c.target.dtype = GMM_F32;
    m = plan_ok(&c, &l, 1);
    m.storages = all;
    apply(&m, arg == 0 ? 0 : arg == 1 ? -1 : 700);
    for (int e = 0; e < E; e++)
        for (int r = 0; r < 2 * F; r++)
            for (int k = 0; k < K; k++) {
                const int from = (e * 2 * F + r % F * 2 + r / F), byte = blocks[(from * K + k) / 2];
                const int nibble = k % 2 ? byte >> 4 : byte & 15;
                double want = nibble & 8 ? -fp4[nibble & 7] : fp4[nibble & 7];
                float got;
                for (int s = 127; s < scales[from * 2 + k / 32]; s++) want *= 2;
                for (int s = scales[from * 2 + k / 32]; s < 127; s++) want /= 2;
                memcpy(&got, m.memory + ((int64_t)(e * 2 * F + r) * K + k) * 4, 4);
                T_CHECK((double)got == want, "expert %d row %d column %d: %g, not %g", e, r, k, (double)got, want);
            }
    gmm_ckpt_plan_destroy(m.plan);
    c.target.dtype = GMM_NONE;
    c.target.scheme = c.source.scheme;
    c.target.rank.ep_rank = 1;
    c.target.rank.ep_size = 2;
    c.target.rank.etp_rank = 1;
    c.target.rank.etp_size = 3;
    m = plan_ok(&c, &l, 1);
    m.storages = all;
    apply(&m, arg ? 64 : 0);
    MUST(get(m.targets, HL "mlp.experts.gate_up_proj_blocks")->rank == 4 && count(m.targets) == 2);
    t_same("blocks", m.memory + get(m.targets, HL "mlp.experts.gate_up_proj_blocks")->offset,
           blocks + (2 * F + 2) * K / 2, 2 * K / 2);
    t_same("scales", m.memory + get(m.targets, HL "mlp.experts.gate_up_proj_scales")->offset, scales + (2 * F + 2) * 2,
           4);
    gmm_ckpt_plan_destroy(m.plan);
    gmm_ckpt_table_destroy(t);
}

static void sequential_round(int arg) { /* sequential, indexed, grouped into one another */
    (void)arg;
    for (int fc2 = 0; fc2 < 2; fc2++)
        for (int a = 0; a < 3; a++)
            for (int b = 0; b < 3; b++) convert(fc2, a, b, (logical){4, 2, 3, 7}, whole, whole, 0, 0, 0);
}

/* -------------------------------------------------------------------------------------------------------- Rules --- */

static void stored_keys(int singleton) {
    gmm_ckpt_stored s = GMM_ZERO;
    gmm_ckpt_place p;
    gmm_error error;
    char key[128];
    s.prefix = "decoder.layers.mlp.";
    s.slot = GMM_CKPT_FC1;
    s.experts_local = 8;
    s.index = 5;
    s.ep_rank = 3;
    s.ep_size = 4;
    s.etp_rank = 1;
    s.etp_size = 2;
    s.gated = 1;
    s.half = GMM_CKPT_GATE;
    s.singleton = singleton;
    T_OK_TEXT(gmm_ckpt_stored_key(&s, key, sizeof key, &p, &error), error.text);
    MUST(p.expert == 29 && p.experts == 32 && p.axis == 0);
    s.struct_size = 7;
    T_REFUSED_TEXT(GMM_E_ARG, gmm_ckpt_stored_key(&s, key, sizeof key, &p, &error), error.text, "stored: struct_size 7",
                   NULL);
    s.struct_size = 0;
    if (!singleton) {
        T_CHECK(!strcmp(key, "decoder.layers.mlp.experts.experts.linear_fc1.weight"), "%s", key);
        MUST(p.fragment == 1 && p.fragments == 4);
        s.half = GMM_CKPT_UP;
        T_OK_TEXT(gmm_ckpt_stored_key(&s, key, sizeof key, &p, &error), error.text);
        MUST(p.fragment == 3 && p.fragments == 4);
        s.slot = GMM_CKPT_FC2;
        s.half = GMM_CKPT_BOTH;
        T_OK_TEXT(gmm_ckpt_stored_key(&s, key, sizeof key, &p, &error), error.text);
        MUST(p.axis == 1 && p.fragment == 1 && p.fragments == 2);
        s.kind = GMM_CKPT_BIAS;
        T_OK_TEXT(gmm_ckpt_stored_key(&s, key, sizeof key, &p, &error), error.text);
        MUST(p.axis == -1 && !strcmp(key, "decoder.layers.mlp.experts.experts.linear_fc2.bias"));
        s.kind = GMM_CKPT_WEIGHT;
        s.singleton = 1;
        T_OK_TEXT(gmm_ckpt_stored_key(&s, key, sizeof key, &p, &error), error.text);
        T_CHECK(!strcmp(key, "decoder.layers.mlp.experts.experts.29.linear_fc2.weight"), "%s", key);
        T_REFUSED_TEXT(GMM_E_WORKSPACE, gmm_ckpt_stored_key(&s, key, 20, &p, &error), error.text, "key_bytes", NULL);
        s.index = 8;
        T_REFUSED_TEXT(GMM_E_ARG, gmm_ckpt_stored_key(&s, key, sizeof key, &p, &error), error.text, "expert 8 of 8",
                       NULL);
    } else {
        T_CHECK(!strcmp(key, "decoder.layers.mlp.experts.experts.29.linear_fc1.weight_w"), "%s", key);
        MUST(p.fragment == 1 && p.fragments == 2);
        s.half = GMM_CKPT_UP;
        T_OK_TEXT(gmm_ckpt_stored_key(&s, key, sizeof key, &p, &error), error.text);
        T_CHECK(!strcmp(key, "decoder.layers.mlp.experts.experts.29.linear_fc1.weight_v"), "%s", key);
        s.half = GMM_CKPT_BOTH;
        T_REFUSED_TEXT(GMM_E_ARG, gmm_ckpt_stored_key(&s, key, sizeof key, &p, &error), error.text, "half 0", NULL);
    }
}

static void states(int arg) { /* optimizer moments are converted as their weight is */
    static const char *const prefixes[] = {"", "optimizer.exp_avg.", "optimizer.exp_avg_sq."};
    static const char *const renamed[] = {"", "exp_avg/", "exp_avg_sq/"};
    gmm_ckpt_table *t = table_new();
    gmm_ckpt_linear l = linear_of("fc", 2, 8, 3, 1, 1);
    const gmm_ckpt_move *moves;
    const gmm_ckpt_move *first[2] = {NULL, NULL};
    int64_t n;
    call c;
    plan_run m;
    (void)arg;
    l.gated = 1;
    for (int s = 0; s < 3; s++)
        for (int e = 0; e < 2; e++) {
            char name[80];
            snprintf(name, sizeof name, "%sfc.weight%d", prefixes[s], e);
            add(t, name, s ? GMM_F32 : GMM_BF16, SHAPE(8, 3), NULL);
            snprintf(name, sizeof name, "%sfc.bias%d", prefixes[s], e);
            add(t, name, s ? GMM_F32 : GMM_BF16, SHAPE(8), NULL);
        }
    call_begin(&c, t, "module", "module");
    c.source.states = prefixes;
    c.source.state_count = 3;
    c.source.stated.known = 1;
    c.target.states = renamed;
    c.target.state_count = 3;
    c.target.glu_block = 2;
    m = plan_ok(&c, &l, 1);
    MUST(count(m.targets) == 6);
    moves = gmm_ckpt_plan_moves(m.plan, &n);
    MUST(n == 12);
    for (int s = 0; s < 3; s++) {
        char name[80];
        for (int kind = 0; kind < 2; kind++) {
            int64_t at_target, i, found = 0;
            snprintf(name, sizeof name, "%sfc.%s", renamed[s], kind ? "bias" : "weight");
            at_target = gmm_ckpt_table_find(m.targets, name);
            MUST(at_target >= 0 && get(m.targets, name)->dtype == (s ? GMM_F32 : GMM_BF16));
            for (i = 0; i < n; i++) {
                if (moves[i].dst != at_target || moves[i].dst_at) continue;
                found++;
                if (s == 0) first[kind] = &moves[i];
                MUST(moves[i].src_at == first[kind]->src_at && moves[i].loops == first[kind]->loops);
                t_same("steps", moves[i].count, first[kind]->count, sizeof moves[i].count);
                t_same("steps", moves[i].src_step, first[kind]->src_step, sizeof moves[i].src_step);
                t_same("steps", moves[i].dst_step, first[kind]->dst_step, sizeof moves[i].dst_step);
            }
            MUST(found == 1);
        }
    }
    apply(&m, 0);
    gmm_ckpt_plan_destroy(m.plan);
    gmm_ckpt_table_destroy(t);
    t = KEYS("fc.weight0", "up.weight0", "optimizer.exp_avg.fc.weight0"); /* optimizer state of one linear only */
    {
        gmm_ckpt_linear two[2];
        two[0] = linear_of("fc", 1, 4, 0, 1, 0);
        two[1] = linear_of("up", 1, 4, 0, 1, 0);
        call_begin(&c, t, "module", "module");
        c.source.states = prefixes;
        c.source.state_count = 3;
        plan_refused(&c, two, 2, GMM_CKPT_MISSING_INDEX, "optimizer.exp_avg.up.weight");
    }
    gmm_ckpt_table_destroy(t);
    t = KEYS("fc.weight0", "fc.weight1", "optimizer.exp_avg.fc.weight0"); /* optimizer state of one expert only */
    l = linear_of("fc", 2, 4, 0, 1, 0);
    call_begin(&c, t, "module", "module");
    c.source.states = prefixes;
    c.source.state_count = 3;
    plan_refused(&c, &l, 1, GMM_CKPT_MISSING_INDEX, "optimizer.exp_avg.fc.weight1");
    gmm_ckpt_table_destroy(t);
}

/* The model is the state "" wherever it stands: it alone is converted, and may not be absent. */
static void states_in_any_order(int arg) {
    static const char *const orders[2][2] = {{"", "optimizer.exp_avg."}, {"optimizer.exp_avg.", ""}};
    static const char *const renamed[2][2] = {{"", "moment."}, {"moment.", ""}};
    (void)arg;
    for (int order = 0; order < 2; order++)
        for (int held = 1; held < 8; held++) { /* 1: the model's key, 2: the moment's; 4: the moment alone is stated */
            const gmm_ckpt_linear l = linear_of("fc", 1, 4, 4, 0, 0);
            gmm_ckpt_table *t = table_new();
            call c;
            plan_run m;
            if (held & 1) add(t, "fc.weight0", GMM_F32, SHAPE(4, 4), NULL);
            if (held & 2) add(t, "optimizer.exp_avg.fc.weight0", GMM_F32, SHAPE(4, 4), NULL);
            call_begin(&c, t, "module", "module");
            c.source.extra = GMM_CKPT_EXTRA_DROP;
            c.source.states = held & 4 ? &orders[0][1] : orders[order];
            c.target.states = held & 4 ? &renamed[0][1] : renamed[order];
            c.source.state_count = c.target.state_count = held & 4 ? 1 : 2;
            c.target.dtype = GMM_BF16;
            if (!(held & (held & 4 ? 2 : 1))) {
                plan_refused(&c, &l, 1, GMM_CKPT_MISSING_INDEX,
                             held & 4 ? "lacks optimizer.exp_avg.fc.weight0" : "lacks fc.weight0");
            } else {
                m = plan_ok(&c, &l, 1);
                apply(&m, 0);
                MUST(count(m.targets) == (held == 3 ? 2 : 1));
                if (!(held & 4)) MUST(get(m.targets, "fc.weight0")->dtype == GMM_BF16);
                if (held & 2) MUST(get(m.targets, "moment.fc.weight0")->dtype == GMM_F32);
                gmm_ckpt_plan_destroy(m.plan);
            }
            gmm_ckpt_table_destroy(t);
        }
}

static void shard_members(int arg) {
    static const struct { int64_t numel[3]; int members; int64_t start, length, want[3][3]; int ok; } cases[] = {
        {{3, 5, 2}, 3, 2, 6, {{0, 2, 1}, {1, 0, 5}, {-1, -1, 0}}, 1},
        {{3, 5, 2}, 3, -1, 0, {{-1, -1, 0}, {-1, -1, 0}, {-1, -1, 0}}, 1},
        {{3, 3, 0}, 2, 3, 3, {{-1, -1, 0}, {0, 0, 3}}, 1},
        {{3, 0, 3}, 3, 0, 6, {{0, 0, 3}, {-1, -1, 0}, {3, 0, 3}}, 1},
        {{3, 5, 2}, 3, 4, 0, {{-1, -1, 0}, {-1, -1, 0}, {-1, -1, 0}}, 1},
        {{3, 5, 2}, 3, 5, 6, {{0}}, 0},
        {{3, 5, 2}, 3, 11, 0, {{0}}, 0},
        {{3, 5, 2}, 3, -1, 4, {{0}}, 0},
        {{3, -5, 2}, 3, 0, 1, {{0}}, 0},
        {{INT64_MAX, 5, 2}, 3, 0, 1, {{0}}, 0}};
    (void)arg;
    for (int64_t i = 0; i < T_COUNT(cases); i++) {
        gmm_ckpt_interval out[3];
        gmm_error error;
        gmm_status s;
        memset(out, 0x55, sizeof out);
        s = gmm_ckpt_shard_members(cases[i].numel, cases[i].members, cases[i].start, cases[i].length, out, &error);
        T_CHECK((s == GMM_OK) == cases[i].ok, "case %lld: %s", (long long)i, gmm_status_name(s));
        for (int k = 0; s == GMM_OK && k < cases[i].members; k++)
            T_CHECK(out[k].shard_at == cases[i].want[k][0] && out[k].member_at == cases[i].want[k][1] &&
                    out[k].length == cases[i].want[k][2], "case %lld, member %d", (long long)i, k);
        if (s) T_CHECK(out[0].length == 0x5555555555555555, "written in spite of an error");
    }
}

static void views(int arg) { /* views: nothing is read or written, target addresses alias source addresses */
    gmm_ckpt_table *t = table_new();
    gmm_ckpt_linear l = linear_of("fc", 2, 3, 4, 0, 0);
    uint16_t data[48];
    gmm_ckpt_tensor x = shaped("fc.weight", GMM_BF16, SHAPE(2, 3, 4));
    gmm_ckpt_report report;
    gmm_ckpt_cost cost = GMM_ZERO;
    gmm_ckpt_run run = GMM_ZERO;
    gmm_error error;
    int64_t n, cursor = 0;
    const gmm_ckpt_move *moves;
    call c;
    plan_run m;
    (void)arg;
    T_OK_TEXT(gmm_ckpt_table_add_storage(t, data, sizeof data, &x.storage, &error), error.text);
    x.offset = 8;
    T_OK_TEXT(gmm_ckpt_table_add(t, &x, &report), report.error.text);
    call_begin(&c, t, "module", "module");
    c.target.views = 1;
    m = plan_ok(&c, &l, 1);
    T_OK_TEXT(gmm_ckpt_cost_of(m.plan, &cost, &error), error.text);
    MUST(cost.bytes_read == 0 && cost.bytes_written == 0 && cost.moves[GMM_CKPT_VIEW] == 2);
    moves = gmm_ckpt_plan_moves(m.plan, &n);
    for (int e = 0; e < 2; e++) {
        MUST(n == 2 && moves[e].dst == e && moves[e].src_at == 12 * e && moves[e].count[0] == 12);
        MUST((const char *)data + x.offset + moves[e].src_at * 2 == (const char *)&data[4 + 12 * e]);
    }
    run.struct_size = cost.struct_size = 4;
    T_REFUSED_TEXT(GMM_E_ARG, gmm_ckpt_apply(m.plan, &run, &cursor, &error), error.text, "run: struct_size 4", NULL);
    T_REFUSED_TEXT(GMM_E_ARG, gmm_ckpt_cost_of(m.plan, &cost, &error), error.text, "cost: struct_size 4", NULL);
    run.struct_size = cost.struct_size = 0;
    T_OK_TEXT(gmm_ckpt_apply(m.plan, &run, &cursor, &error), error.text); /* no memory, no callbacks needed */
    MUST(cursor == 2);
    gmm_ckpt_plan_destroy(m.plan);
    gmm_ckpt_table_destroy(t);

    t = table_new(); /* adjacent tensors of one storage are a stack without copies; others are copied */
    T_OK_TEXT(gmm_ckpt_table_add_storage(t, data, sizeof data, &x.storage, &error), error.text);
    for (int e = 0; e < 2; e++) {
        x = shaped(e ? "fc.weight1" : "fc.weight0", GMM_BF16, SHAPE(3, 4));
        x.offset = e * 24;
        T_OK_TEXT(gmm_ckpt_table_add(t, &x, &report), report.error.text);
    }
    l.grouped_weight = 1;
    c.part[0].table = t;
    m = plan_ok(&c, &l, 1);
    moves = gmm_ckpt_plan_moves(m.plan, &n);
    MUST(n == 1 && moves->kind == GMM_CKPT_VIEW && moves->src == 0 && moves->count[0] == 24);
    T_OK_TEXT(gmm_ckpt_verify(m.plan, NULL, 0, &error), error.text);
    gmm_ckpt_plan_destroy(m.plan);
    gmm_ckpt_table_destroy(t);
    t = table_new();
    T_OK_TEXT(gmm_ckpt_table_add_storage(t, data, sizeof data, &x.storage, &error), error.text);
    for (int e = 0; e < 2; e++) {
        x.name = e ? "fc.weight1" : "fc.weight0";
        x.offset = e ? 0 : 24;
        T_OK_TEXT(gmm_ckpt_table_add(t, &x, &report), report.error.text);
    }
    c.part[0].table = t;
    m = plan_ok(&c, &l, 1);
    moves = gmm_ckpt_plan_moves(m.plan, &n);
    MUST(n == 2 && moves[0].kind == GMM_CKPT_COPY && moves[1].kind == GMM_CKPT_COPY);
    run.memory = data; /* the target may not be the source's memory */
    cursor = 0;
    T_REFUSED_TEXT(GMM_E_ARG, gmm_ckpt_apply(m.plan, &run, &cursor, &error), error.text, "overlaps", NULL);
    gmm_ckpt_plan_destroy(m.plan);
    gmm_ckpt_table_destroy(t);
}

static void extra_state(int arg) {
    gmm_ckpt_table *t = KEYS("fc.weight0", "fc.weight1", "fc._extra_state", "fc._extra_state1", "fc._extra_states",
                             "norm.weight", "fc._extra_state.scale_fwd", "fc._extra_state1.amax_history_bwd",
                             "fc._extra_state01.x", "fc.my_extra_state.x");
    gmm_ckpt_linear l = linear_of("fc", 2, 4, 0, 1, 0);
    gmm_ckpt_report report;
    call c;
    plan_run m;
    (void)arg;
    add(t, "pickled", GMM_U8, SHAPE(0), NULL);
    call_begin(&c, t, "module", "module");
    plan_refused(&c, &l, 1, GMM_CKPT_EXTRA_KEY, "fc._extra_state");
    c.source.extra = GMM_CKPT_EXTRA_KEEP;
    m = plan_ok(&c, &l, 1);
    MUST(count(m.targets) == 10);
    EXPECT_TENSOR(&m, "fc._extra_state", SHAPE(4), "fc._extra_state", -1);
    gmm_ckpt_plan_destroy(m.plan);
    c.source.drop_extra_state = 1;
    m = plan_ok(&c, &l, 1);
    MUST(count(m.targets) == 6 && gmm_ckpt_table_find(m.targets, "fc._extra_state1") < 0 &&
            gmm_ckpt_table_find(m.targets, "fc._extra_state.scale_fwd") < 0 &&
            gmm_ckpt_table_find(m.targets, "fc._extra_state1.amax_history_bwd") < 0 &&
            gmm_ckpt_table_find(m.targets, "fc._extra_states") >= 0);
    gmm_ckpt_plan_destroy(m.plan);
    c.source.extra = GMM_CKPT_EXTRA_DROP;
    T_OK_TEXT(gmm_ckpt_plan_create(&m.plan, &c.source, &c.target, &l, 1, NULL, &report), report.error.text);
    MUST(report.matched == 2 && report.dropped == 9 && report.kept == 0);
    MUST(count(gmm_ckpt_plan_targets(m.plan)) == 1);
    gmm_ckpt_plan_destroy(m.plan);
    gmm_ckpt_table_destroy(t);
}

/* --------------------------------------------------------------------------------------- Verify, resume, faults --- */

/* A conversion with every kind of move: splits, stacks, a transpose, kept tensors. */
typedef struct fixture { gmm_ckpt_table *t; call c; gmm_ckpt_linear l[2]; const unsigned char *bytes[64];
                       const unsigned char *const *all[1]; int64_t linears; gmm_ckpt_cut cut; } fixture;

static void fixture_add_of(fixture *s, const char *name, gmm_dtype dtype, const int64_t *shape) {
    gmm_ckpt_tensor x = shaped(name, dtype, shape);
    gmm_error error;
    gmm_ckpt_report report;
    unsigned char *bytes = (unsigned char *)t_host((size_t)x.bytes);
    for (int64_t i = 0; i < x.bytes; i++) bytes[i] = (unsigned char)t_rand();
    T_OK_TEXT(gmm_ckpt_table_add_storage(s->t, NULL, x.bytes, &x.storage, &error), error.text);
    s->bytes[x.storage] = bytes;
    T_OK_TEXT(gmm_ckpt_table_add(s->t, &x, &report), report.error.text);
}
static void fixture_add(fixture *s, const char *name, const int64_t *shape) {
    fixture_add_of(s, name, GMM_F32, shape);
}

static void fixture_begin(fixture *s) {
    char name[80];
    memset(s, 0, sizeof *s);
    s->t = table_new();
    for (int e = 0; e < 3; e++) {
        snprintf(name, sizeof name, HL "mlp.experts.%d.gate_proj.weight", e);
        fixture_add(s, name, SHAPE(8, 5));
        snprintf(name, sizeof name, HL "mlp.experts.%d.up_proj.weight", e);
        fixture_add(s, name, SHAPE(8, 5));
        snprintf(name, sizeof name, HL "mlp.experts.%d.down_proj.weight", e);
        fixture_add(s, name, SHAPE(5, 8));
    }
    fixture_add(s, "model.norm.weight", SHAPE(7));
    fixture_add(s, HL "mlp.gate.weight", SHAPE(3, 5));
    call_begin(&s->c, s->t, "qwen3-moe", "legacy");
    s->c.source.extra = GMM_CKPT_EXTRA_KEEP;
    s->c.target.glu_block = 2;
    s->l[0] = linear_of(NULL, 3, 16, 5, 1, 0);
    s->l[0].gated = 1;
    s->l[1] = linear_of(NULL, 3, 5, 8, 1, 0);
    s->l[1].slot = GMM_CKPT_FC2;
    s->linears = 2;
    s->all[0] = s->bytes;
}

/* Weights that are dequantized, biases that are converted, padding that is zero, and a kept tensor. */
static void fixture_begin_floats(fixture *s) {
    memset(s, 0, sizeof *s);
    s->t = table_new();
    for (int e = 0; e < 2; e++) {
        fixture_add_of(s, e ? "fc.weight1" : "fc.weight0", GMM_E4M3, SHAPE(4, 8));
        fixture_add_of(s, e ? "fc.weight_scale_inv1" : "fc.weight_scale_inv0", GMM_F32, SHAPE(1, 1));
        fixture_add_of(s, e ? "fc.bias1" : "fc.bias0", GMM_BF16, SHAPE(4));
    }
    fixture_add(s, "weightless", SHAPE(3));
    call_begin(&s->c, s->t, "module", "module");
    s->c.source.extra = GMM_CKPT_EXTRA_KEEP;
    s->c.target.dtype = GMM_F16;
    s->c.target.bias_dtype = GMM_F32;
    s->c.target.cuts = &s->cut;
    s->cut.row0 = s->cut.rows = 2;
    s->cut.stored_rows = 3;
    s->l[0] = linear_of("fc", 2, 4, 8, 1, 1);
    s->linears = 1;
    s->all[0] = s->bytes;
}

static void verify_finds(int arg) { /* gmm_ckpt_verify rejects every change to a plan's moves */
    fixture s;
    plan_run m;
    int64_t n, tried = 0;
    gmm_ckpt_move *moves;
    gmm_error error;
    (void)arg;
    fixture_begin(&s);
    m = plan_ok(&s.c, s.l, 2);
    T_OK_TEXT(gmm_ckpt_verify(m.plan, NULL, 0, &error), error.text);
    T_REFUSED_TEXT(GMM_E_ARG, gmm_ckpt_verify(m.plan, gmm_ckpt_plan_moves(m.plan, NULL), -1, &error), error.text,
                   "count -1 must be >= 0", NULL);
    (void)gmm_ckpt_plan_moves(m.plan, &n);
    moves = (gmm_ckpt_move *)t_host((size_t)(n + 1) * sizeof *moves);
    for (int64_t i = 0; i < n; i++)
        for (int what = 0; what < 14; what++, tried++) {
            int64_t count_now = n;
            memcpy(moves, gmm_ckpt_plan_moves(m.plan, NULL), (size_t)n * sizeof *moves);
            switch (what) {
            case 0: moves[i].dst_at++; break;
            case 1: moves[i].dst_at--; break;
            case 2: moves[i].count[0]--; break;
            case 3: moves[i].count[moves[i].loops - 1]++; break;
            case 4: moves[i].src_at += 1 << 20; break;
            case 5: moves[i].src = 1000; break;
            case 6: moves[i].dst = -1; break;
            case 7: moves[i].loops = 9; break;
            case 8: moves[i].dst_step[moves[i].loops - 1] = 0; break;
            case 9: moves[i] = moves[--count_now]; break; /* a move is missing */
            case 10: moves[count_now++] = moves[i]; break; /* a move is there twice */
            case 11: moves[i].src_step[0] = INT64_MAX / 2; moves[i].count[0] = 4; break;
            case 12: moves[i].part = 1; break;
            default: moves[i].kind = GMM_CKPT_DEQUANT; break;
            }
            if (what == 8 && moves[i].count[moves[i].loops - 1] == 1) continue;
            T_CHECK(gmm_ckpt_verify(m.plan, moves, count_now, &error) == GMM_E_STATE, "move %lld, change %d passed",
                    (long long)i, what);
        }
    for (int trial = 0; trial < 4000; trial++) { /* and agrees with a count of the writes to every element */
        unsigned char hit[64] = {0};
        gmm_ckpt_move two[2];
        int64_t wanted = 0, bad = 0;
        memset(two, 0, sizeof two);
        for (int k = 0; k < 2; k++) {
            int64_t inner = 1;
            two[k].kind = GMM_CKPT_ZERO;
            two[k].src = two[k].scale = -1;
            two[k].dst = (int32_t)gmm_ckpt_table_find(m.targets, HL "mlp.gate.weight"); /* 15 elements */
            two[k].loops = (int32_t)t_int(1, 3);
            for (int l = two[k].loops - 1; l >= 0; l--) {
                two[k].count[l] = t_int(1, 3);
                two[k].dst_step[l] = inner + t_int(0, 2);
                inner += (two[k].count[l] - 1) * two[k].dst_step[l];
            }
            two[k].dst_at = t_int(0, 6);
            for (int64_t i = 0; i < 27; i++) {
                int64_t left = i, at_element = two[k].dst_at, outside = 0;
                for (int l = two[k].loops - 1; l >= 0; l--) {
                    at_element += left % two[k].count[l] * two[k].dst_step[l];
                    left /= two[k].count[l];
                }
                outside = left;
                if (!outside && at_element < 64) hit[at_element]++;
                if (!outside && at_element >= 64) bad = 1;
            }
        }
        for (int i = 0; i < 64; i++) {
            if (hit[i] > 1 || (hit[i] && i >= 15)) bad = 1;
            wanted += i < 15 && hit[i] == 1;
        }
        memcpy(moves, gmm_ckpt_plan_moves(m.plan, NULL), (size_t)n * sizeof *moves);
        {
            int64_t kept = 0;
            gmm_status status;
            for (int64_t i = 0; i < n; i++)
                if (moves[i].dst != two[0].dst) moves[kept++] = moves[i];
            moves[kept++] = two[0];
            moves[kept++] = two[1];
            status = gmm_ckpt_verify(m.plan, moves, kept, &error);
            T_CHECK((status == GMM_OK) == (!bad && wanted == 15), "trial %d: %s, counted %lld%s", trial,
                    status ? error.text : "passed", (long long)wanted, bad ? ", overlapping" : "");
        }
    }
    MUST(tried > 100);
    gmm_ckpt_plan_destroy(m.plan);
    gmm_ckpt_table_destroy(s.t);
}

/* Stopped after any move, or applied in ranges in any order, the bytes are equal */
static void resume(int ranges) {
    fixture s;
    plan_run whole_run, m;
    gmm_ckpt_run run = GMM_ZERO;
    gmm_error error;
    char scratch[512];
    int64_t n, cursor;
    fixture_begin(&s);
    whole_run = plan_ok(&s.c, s.l, 2);
    whole_run.storages = s.all;
    apply(&whole_run, -1);
    MUST(whole_run.done == count(whole_run.targets));
    (void)gmm_ckpt_plan_moves(whole_run.plan, &n);
    m = whole_run;
    run.io.user = &m;
    run.io.read = io_read;
    run.io.write = io_write;
    run.scratch = scratch;
    run.scratch_bytes = sizeof scratch;
    for (int64_t k = 1; k < n; k++) {
        alloc_targets(&m);
        m.done = 0;
        if (!ranges) {
            cursor = 0;
            run.end = k;
            T_OK_TEXT(gmm_ckpt_apply(m.plan, &run, &cursor, &error), error.text);
            MUST(cursor == k);
            cursor -= k % 2; /* repeats the previous move, which must change nothing */
            run.end = 0;
            T_OK_TEXT(gmm_ckpt_apply(m.plan, &run, &cursor, &error), error.text);
            MUST(cursor == n);
        } else {
            for (int64_t i = 0; i < n; i++) {
                cursor = i % 2 ? i - 1 : i + 1 < n ? i + 1 : i; /* neighbouring moves exchanged */
                run.end = cursor + 1;
                T_OK_TEXT(gmm_ckpt_apply(m.plan, &run, &cursor, &error), error.text);
            }
            run.end = 0;
        }
        for (int64_t t = 0; t < count(m.targets); t++) {
            const gmm_ckpt_tensor *x = &gmm_ckpt_table_tensors(m.targets, NULL)[t];
            t_same(x->name, m.memory + x->offset, whole_run.memory + x->offset, (size_t)x->bytes);
        }
    }
    gmm_ckpt_plan_destroy(whole_run.plan);
    gmm_ckpt_table_destroy(s.t);
}

/* each callback call fails once: the message names the key, and the cursor allows to continue */
static void io_faults(int arg) {
    fixture s;
    plan_run good, m;
    gmm_ckpt_run run = GMM_ZERO;
    gmm_ckpt_cost cost = GMM_ZERO;
    gmm_error error;
    char scratch[512], quoted[100];
    long fail_at = 1, reads = 0, writes = 0;
    (arg ? fixture_begin_floats : fixture_begin)(&s);
    good = plan_ok(&s.c, s.l, s.linears);
    good.storages = s.all;
    apply(&good, -1);
    T_OK_TEXT(gmm_ckpt_cost_of(good.plan, &cost, &error), error.text);
    for (int k = GMM_CKPT_COPY; k <= GMM_CKPT_ZERO && arg; k++) T_CHECK(cost.moves[k] > 0, "no move of kind %d", k);
    run.io.read = io_read;
    run.io.write = io_write;
    run.scratch = scratch;
    run.scratch_bytes = sizeof scratch;
    for (;; fail_at++) {
        int64_t cursor = 0;
        gmm_status status;
        m = good;
        m.reads = m.writes = 0;
        m.fail_at = fail_at;
        alloc_targets(&m);
        run.io.user = &m;
        status = gmm_ckpt_apply(m.plan, &run, &cursor, &error);
        if (status == GMM_OK) break;
        reads += strstr(error.text, "io.read gave 7") != NULL;
        writes += strstr(error.text, "io.write gave 8") != NULL;
        snprintf(quoted, sizeof quoted, "\"%s\"", m.failed);
        T_CHECK(status == GMM_E_IO && error.status == GMM_E_IO && reads + writes == fail_at &&
                strstr(error.text, quoted), "%s: %s", gmm_status_name(status), error.text);
        m.fail_at = 0;
        T_OK_TEXT(gmm_ckpt_apply(m.plan, &run, &cursor, &error), error.text);
        for (int64_t t = 0; t < count(m.targets); t++) {
            const gmm_ckpt_tensor *x = &gmm_ckpt_table_tensors(m.targets, NULL)[t];
            t_same(x->name, m.memory + x->offset, good.memory + x->offset, (size_t)x->bytes);
        }
    }
    T_CHECK(reads > (arg ? 5 : 10) && writes > (arg ? 5 : 10), "%ld reads, %ld writes", reads, writes);
    gmm_ckpt_plan_destroy(good.plan);
    gmm_ckpt_table_destroy(s.t);
}

static struct { long left, live, calls; } heap;
static void *heap_alloc(void *user, size_t bytes) {
    (void)user;
    heap.calls++;
    if (heap.left == 0) return NULL;
    if (heap.left > 0) heap.left--;
    heap.live++;
    return malloc(bytes);
}
static void heap_release(void *user, void *memory) {
    (void)user;
    heap.live--;
    free(memory);
}

/* Builds, plans and verifies with the counted allocator, up to the first failure. Everything is freed. *reasoned: the
   last call has filled the report's reason. */
static gmm_status memory_run(const fixture *s, int what, gmm_ckpt_report *report, int *reasoned) {
    gmm_allocator a;
    gmm_ckpt_table *t = NULL;
    gmm_ckpt_plan *plan = NULL;
    gmm_ckpt_linear *found = NULL;
    gmm_ckpt_source source = s->c.source;
    gmm_ckpt_part part = GMM_ZERO;
    gmm_status status;
    int64_t n = 0;
    a.user = NULL;
    a.alloc = heap_alloc;
    a.release = heap_release;
    *reasoned = 0;
    status = gmm_ckpt_table_create(&t, &a, &report->error);
    for (int64_t i = 0; !status && i < count(s->t); i++) {
        gmm_ckpt_tensor x = gmm_ckpt_table_tensors(s->t, NULL)[i];
        const int64_t before = count(t);
        status = gmm_ckpt_table_add_storage(t, NULL, x.bytes, &x.storage, &report->error);
        *reasoned = !status;
        if (!status) status = gmm_ckpt_table_add(t, &x, report);
        if (status) MUST(count(t) == before);
    }
    part.table = t;
    source.parts = &part;
    if (!status && what == 0) status = gmm_ckpt_plan_create(&plan, &source, &s->c.target, s->l, 2, &a, report);
    if (!status && what == 1) status = gmm_ckpt_scan(&source, 0, &found, &n, &a, report);
    if (!status && what == 2) {
        gmm_ckpt_linear l = linear_of("experts.linear_fc1", 2, 4, 0, 1, 0);
        status = gmm_ckpt_normalize_map(&plan, t, &l, 1, GMM_CKPT_UPSTREAM, &a, report);
    }
    if (!status && plan) *reasoned = 0, status = gmm_ckpt_verify(plan, NULL, 0, &report->error);
    if (status) T_CHECK(!plan || what != 1, "a plan in spite of an error");
    gmm_ckpt_plan_destroy(plan);
    gmm_ckpt_linears_release(found, &a);
    gmm_ckpt_table_destroy(t);
    return status;
}

static void no_memory(int what) {
    fixture s;
    long fail = 0, reasons = 0;
    fixture_begin(&s);
    for (int i = 0; i < 400; i++) { /* enough keys for several blocks */
        char name[300];
        memset(name, 'x', sizeof name);
        snprintf(name + 200, 100, ".%d", i);
        if (i >= 40) break;
        fixture_add(&s, name, SHAPE(2));
    }
    for (;; fail++) {
        gmm_ckpt_report report;
        gmm_status status;
        int reasoned;
        heap.left = fail;
        heap.live = 0;
        status = memory_run(&s, what, &report, &reasoned);
        T_CHECK(heap.live == 0, "%ld blocks leak after allocation %ld failed", heap.live, fail);
        if (status == GMM_OK) break;
        T_CHECK(status == GMM_E_MEMORY, "%s after allocation %ld failed: %s", gmm_status_name(status), fail,
                report.error.text);
        T_CHECK(!reasoned || report.reason == GMM_CKPT_NO_MEMORY, "%s after allocation %ld failed",
                gmm_ckpt_reason_name(report.reason), fail);
        reasons += reasoned;
    }
    T_CHECK(fail > 2 && reasons > 1, "%ld allocations, %ld of them with a reason", fail, reasons);
    gmm_ckpt_table_destroy(s.t);
}

static void table_rules(int arg) { /* what tables refuse, without a change to the table */
    gmm_ckpt_table *t = table_new();
    gmm_ckpt_tensor x = shaped("a\xC3\xA9\".\\w", GMM_BF16, SHAPE(2, 3)), bad;
    gmm_ckpt_report report;
    gmm_error error;
    int32_t storage;
    (void)arg;
    T_OK_TEXT(gmm_ckpt_table_add_storage(t, NULL, 100, &x.storage, &error), error.text);
    T_OK_TEXT(gmm_ckpt_table_add(t, &x, &report), report.error.text);
    MUST(gmm_ckpt_table_find(t, "a\xC3\xA9\".\\w") == 0 && gmm_ckpt_table_find(t, "a") < 0);
    T_REFUSED_TEXT(GMM_E_KEY, gmm_ckpt_table_add(t, &x, &report), report.error.text, "taken", NULL);
    MUST(report.reason == GMM_CKPT_DUPLICATE_KEY && !strcmp(report.key, x.name));
    x.name = "b";
#define REFUSE(status, change, ...) \
    bad = x; change; T_REFUSED_TEXT(status, gmm_ckpt_table_add(t, &bad, &report), report.error.text, __VA_ARGS__, NULL)
    REFUSE(GMM_E_ARG, bad.rank = 9, "rank 9", "b");
    REFUSE(GMM_E_ARG, bad.rank = -1, "rank -1");
    REFUSE(GMM_E_ARG, bad.shape[0] = -1, "extent 0");
    REFUSE(GMM_E_ARG, bad.bytes = 11, "11", "12");
    REFUSE(GMM_E_ARG, bad.storage = 1, "storage 1");
    REFUSE(GMM_E_ARG, bad.offset = 89, "89");
    REFUSE(GMM_E_ARG, bad.offset = INT64_MAX, "leave");
    REFUSE(GMM_E_ARG, bad.offset = -1, "-1");
    REFUSE(GMM_E_ARG, bad.name = NULL, "name");
    REFUSE(GMM_E_DTYPE, bad.dtype = (gmm_dtype)77, "77");
    REFUSE(GMM_E_OVERFLOW, bad.shape[0] = bad.shape[1] = INT64_MAX / 2, "63-bit");
    REFUSE(GMM_E_OVERFLOW, bad.shape[0] = (int64_t)1 << 60, "63-bit");
#undef REFUSE
    MUST(count(t) == 1);
    T_REFUSED_TEXT(GMM_E_NULL, gmm_ckpt_table_add(t, NULL, &report), report.error.text, "tensor", NULL);
    T_REFUSED_TEXT(GMM_E_ARG, gmm_ckpt_table_add_storage(t, NULL, -1, &storage, &error), error.text, "-1", NULL);
    gmm_ckpt_table_destroy(t);
    gmm_ckpt_table_destroy(NULL);
}

/* Extents and loops whose products do not fit 63 bits, and tensors of fp64, which no linear is. */
static void far_extents(int arg) {
    gmm_ckpt_tensor x = GMM_ZERO, y;
    gmm_ckpt_table *t;
    gmm_ckpt_part part = GMM_ZERO;
    gmm_ckpt_source source = GMM_ZERO;
    gmm_ckpt_move m = GMM_ZERO;
    gmm_ckpt_linear *linears = NULL, l = linear_of("fc", 1, 4, 4, 0, 0);
    gmm_ckpt_plan *plan = NULL;
    gmm_ckpt_report report;
    gmm_error error;
    int64_t count = 0;
    int32_t storage;
    (void)arg;
    MUST(gmm_ckpt_table_create(&t, NULL, &error) == GMM_OK);
    MUST(gmm_ckpt_table_add_storage(t, NULL, 1000, &storage, &error) == GMM_OK);
    x.name = "step";
    x.dtype = GMM_F64;
    x.rank = 1;
    x.shape[0] = 2;
    x.bytes = 16;
    T_OK_TEXT(gmm_ckpt_table_add(t, &x, &report), report.error.text);
    part.table = t;
    m.kind = GMM_CKPT_COPY;
    m.scale = -1;
    m.loops = 2;
    m.count[0] = 2;
    m.count[1] = ((int64_t)1 << 61) + 1; /* merged without a check, 2 elements of 8 bytes */
    m.src_step[0] = m.src_step[1] = m.dst_step[0] = m.dst_step[1] = 8;
    y = x;
    y.name = "copy";
    T_REFUSED_TEXT(GMM_E_STATE, gmm_ckpt_plan_of_moves(&plan, &part, 1, &y, 1, &m, 1, 1, NULL, &report),
                   report.error.text, "moves[0]", NULL);
    x.name = "model.layers.0.mlp.experts.0.gate_proj.weight";
    x.dtype = GMM_BF16;
    x.rank = 2;
    x.shape[0] = (int64_t)1 << 62;
    x.shape[1] = x.bytes = 0;
    T_OK_TEXT(gmm_ckpt_table_add(t, &x, &report), report.error.text);
    source.part_count = 1;
    source.parts = &part;
    source.scheme = gmm_ckpt_scheme_of("qwen3-moe");
    source.skip_missing = 1;
    T_REFUSED_TEXT(GMM_E_OVERFLOW, gmm_ckpt_scan(&source, 0, &linears, &count, NULL, &report), report.error.text,
                   "4611686018427387904 times 2", NULL);
    T_REFUSED_TEXT(GMM_E_ARG, gmm_ckpt_normalize_map(&plan, t, &l, -1, GMM_CKPT_UPSTREAM, NULL, &report),
                   report.error.text, "count -1", NULL);
    T_REFUSED_TEXT(GMM_E_ARG, gmm_ckpt_normalize_map(&plan, t, &l, 1, (gmm_ckpt_parity)7, NULL, &report),
                   report.error.text, "parity 7", NULL);
    gmm_ckpt_table_destroy(t);
}

static void arguments(int arg) { /* descriptors out of range */
    static const char *const none[1] = {NULL};
    gmm_ckpt_table *t = KEYS("fc.weight0", "fc.weight1");
    gmm_ckpt_linear l = linear_of("fc", 2, 4, 0, 1, 0), two[2];
    gmm_ckpt_plan *plan;
    gmm_ckpt_report report;
    call c;
    (void)arg;
#define BEGIN() call_begin(&c, t, "module", "module")
#define REFUSE(reason, change, key) \
    BEGIN(); l = linear_of("fc", 2, 4, 0, 1, 0); change; plan_refused(&c, &l, 1, reason, key)
    REFUSE(GMM_CKPT_ARGUMENT, l.experts = -1, "-1 experts");
    REFUSE(GMM_CKPT_ARGUMENT, l.out = 0, "x 0");
    REFUSE(GMM_CKPT_ARGUMENT, l.slot = (gmm_ckpt_slot)9, "slot is 9");
    REFUSE(GMM_CKPT_ARGUMENT, (l.gated = 1, l.out = 3), "gated");
    REFUSE(GMM_CKPT_OVERFLOW, (l.out = INT64_MAX / 4, l.in = 8), "63 bits");
    REFUSE(GMM_CKPT_ARGUMENT, c.target.rank.ep_rank = 1, "EP 1/1");
    REFUSE(GMM_CKPT_ARGUMENT, c.part[0].rank.etp_rank = -1, "ETP -1");
    REFUSE(GMM_CKPT_ARGUMENT, c.source.scheme = NULL, "scheme");
    REFUSE(GMM_CKPT_ARGUMENT, c.source.part_count = 0, "0 parts");
    REFUSE(GMM_CKPT_ARGUMENT, c.source.extra = (gmm_ckpt_extra)5, "5");
    REFUSE(GMM_CKPT_ARGUMENT, c.target.state_count = 2, "state_count");
    REFUSE(GMM_CKPT_ARGUMENT, (c.source.wrappers = none, c.source.wrapper_count = 1), "source.wrappers[0] is NULL");
    REFUSE(GMM_CKPT_ARGUMENT, (c.source.states = none, c.source.state_count = 1), "source.states[0] is NULL");
    REFUSE(GMM_CKPT_ARGUMENT, (c.target.states = none, c.target.state_count = 1), "target.states[0] is NULL");
    REFUSE(GMM_CKPT_ARGUMENT, l.spare = -1, "spare is -1");
    REFUSE(GMM_CKPT_ARGUMENT, c.target.reserved = 7, "reserved 7");
    REFUSE(GMM_CKPT_ARGUMENT, c.target.views = -3, "views -3");
    REFUSE(GMM_CKPT_ARGUMENT, c.source.skip_missing = 9, "skip_missing 9");
    REFUSE(GMM_CKPT_ARGUMENT, c.source.part_count = 2; c.part[1] = c.part[0], "same rank");
    REFUSE(GMM_CKPT_DTYPE, c.target.dtype = GMM_E4M3, "target.dtype is e4m3");
    REFUSE(GMM_CKPT_DTYPE, c.target.bias_dtype = GMM_E4M3, "target.bias_dtype is e4m3");
    REFUSE(GMM_CKPT_DTYPE, c.target.bias_dtype = (gmm_dtype)-1, "target.bias_dtype is ?");
    REFUSE(GMM_CKPT_ARGUMENT, l.path = "", "empty");
    REFUSE(GMM_CKPT_ARGUMENT, c.source.struct_size = 100000, "struct_size");
    REFUSE(GMM_CKPT_ARGUMENT, c.source.struct_size = 4, "source: struct_size 4");
    REFUSE(GMM_CKPT_MISSING_INDEX, l.path = "other", "other.weight");
    REFUSE(GMM_CKPT_MISSING_INDEX, l.bias = 1, "fc.bias");
    REFUSE(GMM_CKPT_SHAPE, l.out = 5, "[4]");
    BEGIN();
    two[0] = two[1] = l = linear_of("fc", 2, 4, 0, 1, 0);
    plan_refused(&c, two, 2, GMM_CKPT_ARGUMENT, "twice");
    l.path = "other";
    c.source.skip_missing = 1;
    c.source.extra = GMM_CKPT_EXTRA_KEEP;
    {
        plan_run m = plan_ok(&c, &l, 1);
        MUST(count(m.targets) == 2);
        gmm_ckpt_plan_destroy(m.plan);
    }
    MUST(gmm_ckpt_plan_create(NULL, &c.source, &c.target, &l, 1, NULL, &report) == GMM_E_NULL);
    MUST(gmm_ckpt_plan_create(&plan, NULL, &c.target, &l, 1, NULL, NULL) == GMM_E_NULL && !plan);
#undef BEGIN
#undef REFUSE
    gmm_ckpt_table_destroy(t);
    t = KEYS("module.fc.weight0", "fc.weight0", "fc.weight1"); /* two names of one tensor */
    l = linear_of("fc", 2, 4, 0, 1, 0);
    refused(t, NULL, &l, GMM_CKPT_AMBIGUOUS, "fc.weight0");
    gmm_ckpt_table_destroy(t);
}

/* ------------------------------------------------------------------------------------ Dtypes, tags, own schemes --- */

/* target.dtype and target.bias_dtype convert weights and biases, each rounded once; kept tensors stay as they are. */
static void target_dtypes(int exchanged) {
    enum { E = 2, N = 4, K = 3 };
    static const gmm_dtype dtypes[4] = {GMM_NONE, GMM_F32, GMM_F16, GMM_BF16};
    const gmm_dtype from[2] = {exchanged ? GMM_BF16 : GMM_F32, exchanged ? GMM_F32 : GMM_BF16};
    gmm_ckpt_table *t = table_new();
    const gmm_ckpt_linear l = linear_of("fc", E, N, K, 1, 1);
    double value[2][E * N * K];
    for (int e = 0; e < E; e++)
        for (int b = 0; b < 2; b++) {
            const int n = b ? N : N * K;
            unsigned char bytes[N * K * 4];
            char name[24];
            for (int i = 0; i < n; i++) {
                value[b][e * n + i] = ref_round(from[b], 3.0 * t_real());
                ref_store(from[b], bytes, i, value[b][e * n + i]);
            }
            snprintf(name, sizeof name, "fc.%s%d", b ? "bias" : "weight", e);
            add(t, name, from[b], b ? SHAPE(N) : SHAPE(N, K), bytes);
        }
    add(t, "norm", GMM_F32, SHAPE(5), NULL);
    for (int k = 0; k < 16; k++) {
        const gmm_dtype asked[2] = {dtypes[k / 4], dtypes[k % 4]};
        gmm_ckpt_cost cost = GMM_ZERO;
        gmm_error error;
        call c;
        plan_run m;
        int64_t moves, converted = 0;
        t_about("weights %s, biases %s", gmm_dtype_name(asked[0]), gmm_dtype_name(asked[1]));
        call_begin(&c, t, "module", "module");
        c.source.extra = GMM_CKPT_EXTRA_KEEP;
        c.target.dtype = asked[0];
        c.target.bias_dtype = asked[1];
        m = plan_ok(&c, &l, 1);
        apply(&m, 0);
        (void)gmm_ckpt_plan_moves(m.plan, &moves);
        for (int b = 0; b < 2; b++) {
            const gmm_ckpt_tensor *x = get(m.targets, b ? "fc.bias" : "fc.weight");
            const gmm_dtype to = asked[b] == GMM_NONE ? from[b] : asked[b];
            double got[E * N * K];
            T_CHECK(x->dtype == to, "%s is %s", x->name, gmm_dtype_name(x->dtype));
            for (int i = 0; i < E * N * (b ? 1 : K); i++) got[i] = ref_load(to, m.memory + x->offset, i);
            t_exact(x->name, to, got, value[b], E * N * (b ? 1 : K));
            for (int64_t i = 0; i < moves; i++) {
                const gmm_ckpt_move *move = &gmm_ckpt_plan_moves(m.plan, NULL)[i];
                if (move->dst != gmm_ckpt_table_find(m.targets, x->name)) continue;
                T_CHECK(move->kind == (to == from[b] ? GMM_CKPT_COPY : GMM_CKPT_CONVERT), "kind %d", (int)move->kind);
                converted += to != from[b];
            }
        }
        MUST(get(m.targets, "norm")->dtype == GMM_F32);
        t_same("norm", m.memory + get(m.targets, "norm")->offset, source_bytes(t, "norm"), 20);
        T_OK_TEXT(gmm_ckpt_cost_of(m.plan, &cost, &error), error.text);
        T_CHECK(cost.moves[GMM_CKPT_CONVERT] == converted, "%lld converted", (long long)cost.moves[GMM_CKPT_CONVERT]);
        gmm_ckpt_plan_destroy(m.plan);
    }
    gmm_ckpt_table_destroy(t);
}

/* A caller's own moves convert between floats alone. */
static void own_moves(int arg) {
    static const float values[5] = {1.0f, -2.00390625f, 3e38f, 0x1p-140f, -0.0f};
    gmm_ckpt_table *t = table_new();
    gmm_ckpt_tensor target = shaped("converted", GMM_BF16, SHAPE(5));
    gmm_ckpt_move move = GMM_ZERO;
    gmm_ckpt_part part = GMM_ZERO;
    gmm_ckpt_report report;
    plan_run m;
    double want[5], got[5];
    (void)arg;
    memset(&m, 0, sizeof m);
    add(t, "codes", GMM_U8, SHAPE(5), NULL);
    add(t, "floats", GMM_F32, SHAPE(5), values);
    part.table = t;
    move.kind = GMM_CKPT_CONVERT;
    move.scale = 1000000; /* which a move without scales does not read */
    move.loops = 1;
    move.count[0] = 5;
    move.src_step[0] = move.dst_step[0] = 1;
    T_REFUSED_TEXT(GMM_E_STATE, gmm_ckpt_plan_of_moves(&m.plan, &part, 1, &target, 1, &move, 1, 0, NULL, &report),
                   report.error.text, "moves[0]", "it converts what is no float", NULL);
    MUST(report.reason == GMM_CKPT_ARGUMENT && !m.plan);
    move.src = 1;
    T_OK_TEXT(gmm_ckpt_plan_of_moves(&m.plan, &part, 1, &target, 1, &move, 1, 0, NULL, &report), report.error.text);
    m.parts = &part;
    apply(&m, 0);
    for (int i = 0; i < 5; i++) {
        want[i] = (double)values[i];
        got[i] = ref_load(GMM_BF16, m.memory, i);
    }
    t_exact("converted", GMM_BF16, got, want, 5);
    gmm_ckpt_plan_destroy(m.plan);
    gmm_ckpt_table_destroy(t);
}

/* The caller's tag of a tensor that is kept arrives at its target, by plans and by normalizers. */
static void tags(int arg) {
    static const char *const names[4] = {"norm", "fc.weight0", "fc.weight1", "other"};
    gmm_ckpt_table *t = table_new();
    const gmm_ckpt_linear l = linear_of("fc", 2, 4, 3, 1, 0);
    gmm_ckpt_report report;
    gmm_error error;
    call c;
    (void)arg;
    for (int i = 0; i < 4; i++) {
        gmm_ckpt_tensor x = shaped(names[i], GMM_F32, SHAPE(4, 3));
        x.tag = i == 0 ? INT64_MIN + 7 : 1000 + i;
        T_OK_TEXT(gmm_ckpt_table_add_storage(t, NULL, x.bytes, &x.storage, &error), error.text);
        T_OK_TEXT(gmm_ckpt_table_add(t, &x, &report), report.error.text);
        MUST(get(t, names[i])->tag == x.tag);
    }
    call_begin(&c, t, "module", "module");
    c.source.extra = GMM_CKPT_EXTRA_KEEP;
    for (int k = 0; k < 4; k++) {
        plan_run m = k == 0 ? plan_ok(&c, &l, 1) : normalize(t, k == 3 ? "fc." : NULL, &l, 1, (gmm_ckpt_parity)(k % 2));
        MUST(count(m.targets) == 3);
        T_CHECK(get(m.targets, "norm")->tag == INT64_MIN + 7 && get(m.targets, "other")->tag == 1003, "%lld, %lld",
                (long long)get(m.targets, "norm")->tag, (long long)get(m.targets, "other")->tag);
        gmm_ckpt_plan_destroy(m.plan);
    }
    gmm_ckpt_table_destroy(t);
}

/* Values beside the scales, by the kinds that a caller's own scheme gives to their names: exchanged kinds exchange the
   targets. */
static void own_scheme(int arg) {
    static const float values[2][2] = {{1.5f, 2.5f}, {100.0f, 200.0f}};
    (void)arg;
    for (int exchanged = 0; exchanged < 2; exchanged++) {
        const gmm_ckpt_row rows[4] = {
            {"{p}.w{e}", GMM_CKPT_SLOT_ANY, GMM_CKPT_WEIGHT, GMM_CKPT_BOTH, GMM_CKPT_EACH, 0, GMM_SCALING_128X128},
            {"{p}.s{e}", GMM_CKPT_SLOT_ANY, GMM_CKPT_SCALE, GMM_CKPT_BOTH, GMM_CKPT_EACH, 0, GMM_SCALING_128X128},
            {"{p}.t{e}", GMM_CKPT_SLOT_ANY, exchanged ? GMM_CKPT_AMAX : GMM_CKPT_TENSOR_SCALE, GMM_CKPT_BOTH,
             GMM_CKPT_EACH, 0, GMM_SCALING_128X128},
            {"{p}.a{e}", GMM_CKPT_SLOT_ANY, exchanged ? GMM_CKPT_TENSOR_SCALE : GMM_CKPT_AMAX, GMM_CKPT_BOTH,
             GMM_CKPT_EACH, 0, GMM_SCALING_128X128}};
        const gmm_ckpt_scheme scheme = {"own", rows, 4, 0, 0, 0};
        gmm_ckpt_table *t = table_new();
        const gmm_ckpt_linear l = linear_of("fc", 2, 4, 32, 1, 0);
        call c;
        plan_run m;
        for (int e = 0; e < 2; e++) {
            add(t, e ? "fc.w1" : "fc.w0", GMM_E2M1, SHAPE(4, 32), NULL);
            add(t, e ? "fc.s1" : "fc.s0", GMM_E4M3, SHAPE(4, 2), NULL);
            add(t, e ? "fc.t1" : "fc.t0", GMM_F32, SHAPE(1), &values[0][e]);
            add(t, e ? "fc.a1" : "fc.a0", GMM_F32, SHAPE(1), &values[1][e]);
        }
        call_begin(&c, t, "module", "module");
        c.source.scheme = &scheme;
        m = plan_ok(&c, &l, 1);
        apply(&m, 0);
        MUST(count(m.targets) == 4);
        t_same("codes", m.memory + get(m.targets, "fc.weight")->offset + 64, source_bytes(t, "fc.w1"), 64);
        t_same("tensor scales", m.memory + get(m.targets, "fc.weight_tensor_scale")->offset, values[exchanged], 8);
        t_same("amaxes", m.memory + get(m.targets, "fc.weight_amax")->offset, values[!exchanged], 8);
        gmm_ckpt_plan_destroy(m.plan);
        gmm_ckpt_table_destroy(t);
    }
}

/* Rows of a caller's scheme that are out of range, and patterns that are none, are refused with the value. */
static void own_scheme_refused(int arg) {
    static const char *const patterns[] = {NULL, "a.{", "a.{e", "a.{L}.{x}", "a.{p}.w", "{p}w", "{", "a.{ee}"};
    static const struct { const char *field; int slot, kind, half, form, transposed; } fields[] = {
        {"slot is 7", 7, 0, 0, 0, 0}, {"slot is -1", -1, 0, 0, 0, 0}, {"kind is 5", 0, 5, 0, 0, 0},
        {"kind is -2", 0, -2, 0, 0, 0}, {"half is 3", 0, 0, 3, 0, 0}, {"half is -1", 0, 0, -1, 0, 0},
        {"form is 4", 0, 0, 0, 4, 0}, {"transposed is 2", 0, 0, 0, 0, 2}};
    const gmm_ckpt_row good = {"{p}.w{e}", GMM_CKPT_SLOT_ANY, GMM_CKPT_WEIGHT, GMM_CKPT_BOTH, GMM_CKPT_EACH, 0,
                               GMM_SCALING_NONE};
    gmm_ckpt_table *t = table_new();
    const gmm_ckpt_linear l = linear_of("fc", 1, 4, 4, 0, 0);
    (void)arg;
    add(t, "fc.w0", GMM_F32, SHAPE(4, 4), NULL);
    for (int i = 0; i < T_COUNT(patterns) + T_COUNT(fields) + 5; i++)
        for (int target = 0; target < 2; target++) {
            const int f = i - T_COUNT(patterns), n = f - T_COUNT(fields);
            gmm_ckpt_row rows[2] = {good, good};
            gmm_ckpt_scheme own = {"own", rows, 2, 0, 0, 0};
            const gmm_ckpt_scheme fine = {"fine", &good, 1, 0, 0, 0};
            gmm_ckpt_linear *found = NULL;
            gmm_ckpt_report report;
            int64_t count;
            call c;
            plan_run m;
            if (f < 0) {
                rows[1].pattern = patterns[i];
            } else if (n < 0) {
                rows[1].slot = (gmm_ckpt_slot)fields[f].slot;
                rows[1].kind = (gmm_ckpt_kind)fields[f].kind;
                rows[1].half = (gmm_ckpt_half)fields[f].half;
                rows[1].form = (gmm_ckpt_form)fields[f].form;
                rows[1].transposed = fields[f].transposed;
            } else {
                own.count = n == 0 ? -1 : 1;
                if (n == 1) own.rows = NULL;
                if (n == 2) own.name = NULL;
                if (n == 3) own.glu_block = -1;
            }
            call_begin(&c, t, "module", "module");
            c.source.scheme = target ? &fine : &own;
            c.target.scheme = target ? &own : &fine;
            if (n == 4) { /* nothing is wrong */
                m = plan_ok(&c, &l, 1);
                gmm_ckpt_plan_destroy(m.plan);
                continue;
            }
            plan_refused(&c, &l, 1, GMM_CKPT_ARGUMENT,
                         f < 0 ? "rows[1].pattern is " : n < 0 ? fields[f].field : "NULL");
            plan_refused(&c, &l, 1, GMM_CKPT_ARGUMENT, target ? "target.scheme: " : "source.scheme: ");
            if (!target) T_REFUSED_TEXT(GMM_E_ARG, gmm_ckpt_scan(&c.source, 0, &found, &count, NULL, &report),
                                        report.error.text, "source.scheme: ", NULL);
        }
    gmm_ckpt_table_destroy(t);
}

/* Two targets of one name: of a caller's, of shards, and of a plan whose kept tensor has the name of a weight. */
static void same_names(int arg) {
    const gmm_ckpt_tensor twice[2] = {shaped("fc.weight", GMM_BF16, SHAPE(4)), shaped("fc.weight", GMM_BF16, SHAPE(4))};
    gmm_ckpt_table *t = table_new();
    gmm_ckpt_linear l = linear_of(NULL, 1, 4, 2, 1, 0);
    gmm_ckpt_plan *plan = NULL;
    gmm_ckpt_part part = GMM_ZERO;
    gmm_ckpt_report report;
    gmm_shard whole = GMM_ZERO;
    gmm_gtp_stored stored = GMM_ZERO;
    gmm_gtp_item items[2] = GMM_ZERO;
    call c;
    (void)arg;
    add(t, HL "mlp.experts.0.down_proj.weight", GMM_BF16, SHAPE(4, 2), NULL);
    add(t, ML "linear_fc2.weight", GMM_BF16, SHAPE(4, 2), NULL);
    part.table = t;
    T_REFUSED_TEXT(GMM_E_KEY, gmm_ckpt_plan_of_moves(&plan, &part, 1, twice, 2, NULL, 0, 1, NULL, &report),
                   report.error.text, "gmm_ckpt_plan_of_moves", "fc.weight", NULL);
    T_CHECK(report.reason == GMM_CKPT_DUPLICATE_KEY && !strcmp(report.key, "fc.weight") && !plan, "%s of \"%s\"",
            gmm_ckpt_reason_name(report.reason), report.key);
    whole.dtype = GMM_BF16;
    whole.rows = 4;
    whole.cols = 2;
    whole.unit = 1;
    stored.shard = &whole;
    stored.scale = -1;
    items[0].name = items[1].name = "w";
    items[0].shard = items[1].shard = &whole;
    items[0].stored = items[1].stored = &stored;
    items[0].stored_count = items[1].stored_count = 1;
    T_REFUSED_TEXT(GMM_E_KEY, gmm_gtp_export(&plan, &part, 1, items, 2, NULL, &report), report.error.text,
                   "\"w\"", NULL);
    T_CHECK(report.reason == GMM_CKPT_DUPLICATE_KEY && !strcmp(report.key, "w") && !plan, "%s of \"%s\"",
            gmm_ckpt_reason_name(report.reason), report.key);
    call_begin(&c, t, "qwen3-moe", "megatron");
    c.source.extra = GMM_CKPT_EXTRA_KEEP;
    l.slot = GMM_CKPT_FC2;
    plan_refused(&c, &l, 1, GMM_CKPT_DUPLICATE_KEY, ML "linear_fc2.weight");
    gmm_ckpt_table_destroy(t);
}

static void scan(int arg) { /* extents from names and shapes */
    static const char *const want[] = {"megatron", "qwen3-moe", "legacy", "fused-transposed", "gpt-oss"};
    (void)arg;
    for (int i = 0; i < T_COUNT(want); i++) {
        const int y = (int[]){0, 5, 3, 7, 8}[i];
        const logical x = {4, 2, 6, 5}, x2 = {4, 1, 5, 6};
        table_filler f;
        gmm_ckpt_source source = GMM_ZERO;
        gmm_ckpt_part part[2] = {GMM_ZERO, GMM_ZERO};
        gmm_ckpt_linear *l;
        gmm_ckpt_report report;
        int64_t n;
        for (int p = 0; p < 2; p++) {
            f.t = table_new();
            f.n = f.io = 0;
            f.dtype = GMM_F32;
            f.bytes = (const unsigned char **)t_host(64 * sizeof *f.bytes);
            rank_slice w = slice_of(p, 2, 0, 1);
            tensors(&layouts[0][y], 0, &x, &w, 0, fill, &f);
            tensors(&layouts[1][y], 1, &x2, &w, 0, fill, &f);
            part[p].table = f.t;
            part[p].rank.ep_rank = p;
            part[p].rank.ep_size = 2;
        }
        source.parts = part;
        source.part_count = 2;
        source.scheme = gmm_ckpt_scheme_of(want[i]);
        if (i == 2) {
            T_REFUSED_TEXT(GMM_E_ARG, gmm_ckpt_scan(&source, 0, &l, &n, NULL, &report), report.error.text, "number",
                           NULL);
            MUST(!l && n == 0);
        }
        T_OK_TEXT(gmm_ckpt_scan(&source, i == 2 ? 4 : 0, &l, &n, NULL, &report), report.error.text);
        T_CHECK(n == 2 && l[0].slot == GMM_CKPT_FC1 && l[1].slot == GMM_CKPT_FC2, "%s", want[i]);
        T_CHECK(l[0].experts == 4 && l[0].out == 12 && l[0].in == 5 && l[0].gated == 1 && !l[0].bias,
                "%s: %lld %lld %lld",
                want[i], (long long)l[0].experts, (long long)l[0].out, (long long)l[0].in);
        T_CHECK(l[1].experts == 4 && l[1].out == 5 && l[1].in == 6 && !l[1].gated, "%s", want[i]);
        gmm_ckpt_linears_release(l, NULL);
        for (int p = 0; p < 2; p++) gmm_ckpt_table_destroy((gmm_ckpt_table *)(uintptr_t)part[p].table);
    }
}

/* Layers of another prefix are extra: a scan neither reports nor misses them. */
static void scan_prefix(int arg) {
    static const char *const fronts[] = {"", "draft."};
    (void)arg;
    for (int stated = 0; stated < 2; stated++)
        for (int other = 0; other < 9; other++) { /* the layer of the other prefix */
            gmm_ckpt_table *t = table_new();
            gmm_ckpt_report report;
            gmm_ckpt_linear *l;
            gmm_ckpt_plan *plan;
            int64_t n;
            call c;
            for (int first = 0; first < 2; first++)
                for (int layer = 0; layer < 2; layer++)
                    for (int k = 0; k < 4; k++) {
                        static const char *const keys[] = {"gate", "experts.0.gate_proj", "experts.0.up_proj",
                                                           "experts.0.down_proj"};
                        const int draft = first == other % 2; /* each of the prefixes comes first */
                        char name[100];
                        if (draft && layer) continue;
                        snprintf(name, sizeof name, "%smodel.layers.%d.mlp.%s.weight", fronts[draft],
                                 draft ? other : layer, keys[k]);
                        add(t, name, GMM_F32, k == 3 ? SHAPE(8, 4) : SHAPE(k ? 4 : 1, 8), NULL);
                    }
            call_begin(&c, t, "qwen3-moe", "qwen3-moe");
            c.source.prefix = stated ? "" : NULL;
            c.source.extra = GMM_CKPT_EXTRA_KEEP;
            T_OK_TEXT(gmm_ckpt_scan(&c.source, 0, &l, &n, NULL, &report), report.error.text);
            MUST(n == 6 && l[5].layer == 1 && report.missing == 0);
            T_OK_TEXT(gmm_ckpt_plan_create(&plan, &c.source, &c.target, l, n, NULL, &report), report.error.text);
            MUST(report.matched == 8 && report.kept == 4);
            gmm_ckpt_plan_destroy(plan);
            gmm_ckpt_linears_release(l, NULL);
            gmm_ckpt_table_destroy(t);
        }
}

/* Experts that EP does not divide are refused for that, in the source as in the target, by plans and scans. */
static void experts_of_ranks(int arg) {
    gmm_ckpt_table *t = table_new();
    gmm_ckpt_report report;
    gmm_ckpt_linear *l, five = linear_of("a", 5, 4, 4, 0, 0);
    int64_t n;
    call c;
    (void)arg;
    for (int e = 0; e < 5; e++) {
        char name[80];
        snprintf(name, sizeof name, "a.weight%d", e);
        add(t, name, GMM_F32, SHAPE(4, 4), NULL);
        snprintf(name, sizeof name, ML "linear_fc1.weight%d", e);
        add(t, name, GMM_F32, SHAPE(4, 4), NULL);
    }
    call_begin(&c, t, "module", "module");
    c.source.extra = GMM_CKPT_EXTRA_DROP;
    c.target.rank.ep_size = 2;
    plan_refused(&c, &five, 1, GMM_CKPT_NOT_DIVISIBLE, "experts 5 is no multiple of the target's EP 2");
    c.target.rank.ep_size = 1;
    for (int ep = 2; ep < 9; ep += 2) {
        c.source.scheme = gmm_ckpt_scheme_of("module");
        c.part[0].rank.ep_size = ep;
        plan_refused(&c, &five, 1, GMM_CKPT_NOT_DIVISIBLE, "experts 5 is no multiple of the source's EP");
        c.source.scheme = gmm_ckpt_scheme_of("megatron");
        T_REFUSED_TEXT(GMM_E_CONFIG, gmm_ckpt_scan(&c.source, 5, &l, &n, NULL, &report), report.error.text,
                       "linear_fc1", "experts 5 is no multiple of EP", NULL);
        MUST(report.reason == GMM_CKPT_NOT_DIVISIBLE);
    }
    gmm_ckpt_table_destroy(t);
}

/* Rows are added up over GTP ranks in every form: with an extent of experts, below one another, transposed, and in
   blocks of gpt-oss. The extents are those that a plan takes. */
static void scan_gtp(int arg) {
    static const struct { const char *scheme, *names[2]; int64_t shape[2][5]; gmm_dtype dtype; } ways[] = {
        {"megatron", {ML "linear_fc1.weight0", ML "linear_fc2.weight0"}, {{256, 64, -1}, {32, 256, -1}}, GMM_F32},
        {"megatron", {ML "linear_fc1.weight", ML "linear_fc2.weight"}, {{4, 256, 64, -1}, {4, 32, 256, -1}}, GMM_F32},
        {"megatron", {ML "linear_fc1.weight", ML "linear_fc2.weight"}, {{4 * 256, 64, -1}, {4 * 32, 256, -1}}, GMM_F32},
        {"legacy", {ML "weight1", ML "weight2"}, {{64, 4 * 256, -1}, {4 * 256, 32, -1}}, GMM_F32},
        {"fused-transposed", {HL "mlp.experts.gate_up_proj", HL "mlp.experts.down_proj"},
         {{4, 64, 256, -1}, {4, 256, 32, -1}}, GMM_F32},
        {"gpt-oss", {HL "mlp.experts.gate_up_proj_blocks", HL "mlp.experts.down_proj_blocks"},
         {{4, 256, 2, 16, -1}, {4, 32, 8, 16, -1}}, GMM_U8}};
    (void)arg;
    for (int i = 0; i < T_COUNT(ways); i++) {
        gmm_ckpt_report report;
        gmm_ckpt_linear *l;
        int64_t n;
        call c;
        plan_run m;
        call_begin(&c, NULL, ways[i].scheme, ways[i].scheme);
        c.source.part_count = 2;
        c.source.stated.known = ways[i].scheme[0] == 'm' || ways[i].scheme[0] == 'l';
        for (int p = 0; p < 2; p++) {
            gmm_ckpt_table *t = table_new();
            for (int k = 0; k < 2; k++) add(t, ways[i].names[k], ways[i].dtype, ways[i].shape[k], NULL);
            if (ways[i].dtype == GMM_U8) {
                add(t, HL "mlp.experts.gate_up_proj_scales", GMM_U8, SHAPE(4, 256, 2), NULL);
                add(t, HL "mlp.experts.down_proj_scales", GMM_U8, SHAPE(4, 32, 8), NULL);
            }
            c.part[p].table = t;
            c.part[p].rank.gtp_rank = p;
            c.part[p].rank.gtp_size = 2;
        }
        T_OK_TEXT(gmm_ckpt_scan(&c.source, i == 2 || i == 3 ? 4 : 0, &l, &n, NULL, &report), report.error.text);
        T_CHECK(n == 2 && l[0].experts == (i ? 4 : 1) && l[0].out == 512 && l[0].in == 64 && l[0].gated,
                "%d: fc1 %lld x %lld", i, (long long)l[0].out, (long long)l[0].in);
        T_CHECK(l[1].out == 64 && l[1].in == 256, "%d: fc2 %lld x %lld", i, (long long)l[1].out, (long long)l[1].in);
        m = plan_ok(&c, l, n);
        gmm_ckpt_plan_destroy(m.plan);
        gmm_ckpt_linears_release(l, NULL);
        for (int p = 0; p < 2; p++) gmm_ckpt_table_destroy((gmm_ckpt_table *)(uintptr_t)c.part[p].table);
    }
}

/* Rows of two GTP ranks that gmm_gtp_plan pads to twice the rows of FC1 are not taken for gate and up. */
static void scan_gtp_padding(int arg) {
    (void)arg;
    for (int stored = 16; stored <= 256; stored *= 2) {
        gmm_shard shard = GMM_ZERO;
        gmm_shard_plan plan = GMM_ZERO;
        gmm_ckpt_report report;
        gmm_ckpt_linear *l;
        int64_t n;
        call c;
        call_begin(&c, NULL, "megatron", "megatron");
        c.source.part_count = 2;
        for (int p = 0; p < 2; p++) {
            gmm_ckpt_table *t = table_new();
            add(t, ML "linear_fc1.weight0", GMM_F32, SHAPE(stored, 32), NULL);
            add(t, ML "linear_fc2.weight0", GMM_F32, SHAPE(16, stored), NULL);
            c.part[p].table = t;
            c.part[p].rank.gtp_rank = p;
            c.part[p].rank.gtp_size = 2;
        }
        if (stored == 16) { /* the ranks of such an FC1 */
            shard.dtype = GMM_F32;
            shard.rows = 16;
            shard.cols = 32;
            shard.gtp_size = 2;
            T_OK_TEXT(gmm_gtp_plan(&shard, &plan, &report.error), report.error.text);
            MUST(plan.shard_rows == 16 && plan.pad == 16);
        }
        if (stored <= 128) {
            T_REFUSED_TEXT(GMM_E_CONFIG, gmm_ckpt_scan(&c.source, 0, &l, &n, NULL, &report), report.error.text,
                           "linear_fc1.weight0", "padding", NULL);
            MUST(report.reason == GMM_CKPT_GLU_UNKNOWN && !l && !n);
        }
        for (int known = stored <= 128; known < 3; known++) { /* nothing but extents, a statement, a record */
            c.source.stated.known = known == 1;
            c.source.recorded.known = known == 2;
            T_OK_TEXT(gmm_ckpt_scan(&c.source, 0, &l, &n, NULL, &report), report.error.text);
            MUST(n == 2 && l[0].gated && l[0].out == 2 * stored);
            gmm_ckpt_linears_release(l, NULL);
        }
        for (int p = 0; p < 2; p++) gmm_ckpt_table_destroy((gmm_ckpt_table *)(uintptr_t)c.part[p].table);
    }
}

static void gtp_sources(int arg) { /* GTP shards of all ranks, with and without padding, are joined */
    const logical x = {2, 2, 5, 3};
    (void)arg;
    for (int padded = 0; padded < 2; padded++)
        for (int y = 0; y < 9; y++) {
            const int64_t stored[3] = {4, 4, padded ? 4 : 2}, valid[3] = {4, 4, 2};
            call c;
            plan_run m;
            target_checker k;
            gmm_ckpt_linear l = linear_of(NULL, 2, 10, 3, 1, 0);
            if (layouts[0][y].split) continue;
            l.gated = 1;
            call_begin(&c, NULL, layouts[0][y].scheme, "megatron");
            c.source.part_count = 3;
            for (int r = 0; r < 3; r++) {
                table_filler f;
                rank_slice w = slice_of(0, 1, 0, 1);
                w.row0 = 4 * r;
                w.rows = valid[r];
                w.stored = stored[r];
                f.t = table_new();
                f.n = f.io = 0;
                f.dtype = GMM_F32;
                f.bytes = (const unsigned char **)t_host(64 * sizeof *f.bytes);
                tensors(&layouts[0][y], 0, &x, &w, 0, fill, &f);
                c.part[r].table = f.t;
                c.part[r].rank.gtp_rank = r;
                c.part[r].rank.gtp_size = 3;
            }
            c.source.stated.known = layouts[0][y].glu;
            c.target.glu_block = 1;
            m = plan_ok(&c, &l, 1);
            apply(&m, 0);
            k.m = &m;
            k.n = 0;
            k.dtype = GMM_F32;
            k.from = layouts[0][y].scheme;
            k.to = "gtp";
            tensors(&layouts[0][1], 0, &x, &whole, 1, check, &k);
            gmm_ckpt_plan_destroy(m.plan);
            c.source.part_count = 2;
            plan_refused(&c, &l, 1, GMM_CKPT_SHAPE, "rows");
            for (int r = 0; r < 3; r++) gmm_ckpt_table_destroy((gmm_ckpt_table *)(uintptr_t)c.part[r].table);
        }
}

static void shared_and_router(int arg) { /* shared experts and the router are part of the plan */
    static const char *const names[] = {
        ML "linear_fc1.weight0", ML "linear_fc2.weight0", "decoder.layers.0.mlp.router.weight",
        "decoder.layers.0.mlp.router.expert_bias", "decoder.layers.0.mlp.shared_experts.linear_fc1.weight",
        "decoder.layers.0.mlp.shared_experts.linear_fc2.weight", "model.layers.1.mlp.gate_proj.weight"};
    gmm_ckpt_table *t = table_new();
    gmm_ckpt_source source = GMM_ZERO;
    gmm_ckpt_report report;
    gmm_ckpt_linear *found;
    int64_t n;
    call c;
    plan_run m;
    (void)arg;
    add(t, HL "mlp.experts.0.gate_proj.weight", GMM_BF16, SHAPE(2, 3), NULL);
    add(t, HL "mlp.experts.0.up_proj.weight", GMM_BF16, SHAPE(2, 3), NULL);
    add(t, HL "mlp.experts.0.down_proj.weight", GMM_BF16, SHAPE(3, 2), NULL);
    add(t, HL "mlp.gate.weight", GMM_BF16, SHAPE(1, 3), NULL);
    add(t, HL "mlp.gate.e_score_correction_bias", GMM_F32, SHAPE(1), NULL);
    add(t, HL "mlp.shared_experts.gate_proj.weight", GMM_BF16, SHAPE(4, 3), NULL);
    add(t, HL "mlp.shared_experts.up_proj.weight", GMM_BF16, SHAPE(4, 3), NULL);
    add(t, HL "mlp.shared_experts.down_proj.weight", GMM_BF16, SHAPE(3, 4), NULL);
    add(t, "model.layers.1.mlp.gate_proj.weight", GMM_BF16, SHAPE(4, 3), NULL); /* a dense layer */
    call_begin(&c, t, "deepseek-v3", "megatron");
    c.source.extra = GMM_CKPT_EXTRA_KEEP;
    source = c.source;
    T_OK_TEXT(gmm_ckpt_scan(&source, 0, &found, &n, NULL, &report), report.error.text);
    MUST(n == 6);
    m = plan_ok(&c, found, n);
    apply(&m, 0);
    for (int i = 0; i < T_COUNT(names); i++)
        T_CHECK(gmm_ckpt_table_find(m.targets, names[i]) >= 0, "%s is not there", names[i]);
    MUST(count(m.targets) == T_COUNT(names));
    {
        const unsigned char *fc1 = m.memory + get(m.targets,
                                                  "decoder.layers.0.mlp.shared_experts.linear_fc1.weight")->offset;
        t_same("shared gate", fc1, source_bytes(t, HL "mlp.shared_experts.gate_proj.weight"), 24);
        t_same("shared up", fc1 + 24, source_bytes(t, HL "mlp.shared_experts.up_proj.weight"), 24);
    }
    c.target.scheme = gmm_ckpt_scheme_of("mixtral"); /* the mixtral scheme has no names for shared experts */
    plan_refused(&c, found, n, GMM_CKPT_EXTRA_KEY, "mixtral");
    gmm_ckpt_plan_destroy(m.plan);
    gmm_ckpt_linears_release(found, NULL);
    gmm_ckpt_table_destroy(t);
}

/* -------------------------------------------------------------------------------------------- Quantized formats --- */

/* A format as files hold it: dtypes, the block (0 = the whole extent), the dimensions of the scales of one matrix,
   GTP's unit of rows, which values stand beside the scales (1: tensor scale, 2: amax), and the name of the scales. */
typedef struct qformat {
    const char *name;
    gmm_scaling scaling;
    gmm_dtype codes, scales;
    int rows, cols, dims, unit, beside;
    const char *suffix;
} qformat;
static const qformat qformats[] = {
    {"128x128", GMM_SCALING_128X128, GMM_E4M3, GMM_F32, 128, 128, 2, 128, 0, "_scale_inv"},
    {"MXFP8", GMM_SCALING_MX32, GMM_E4M3, GMM_E8M0, 1, 32, 2, 32, 0, "_scale_inv"},
    {"MXFP8 of e5m2 and bytes", GMM_SCALING_MX32, GMM_E5M2, GMM_U8, 1, 32, 2, 32, 0, "_scale"},
    {"MXFP4", GMM_SCALING_MX32, GMM_U8, GMM_E8M0, 1, 32, 2, 32, 0, "_scale"},
    {"NVFP4", GMM_SCALING_NV16, GMM_U8, GMM_E4M3, 1, 16, 2, 16, 3, "_scale"},
    {"NVFP4 of e2m1 and an amax", GMM_SCALING_NV16, GMM_E2M1, GMM_E4M3, 1, 16, 2, 16, 2, "_scale_inv"},
    {"per-row FP8", GMM_SCALING_ROW, GMM_E4M3, GMM_F32, 1, 0, 2, 1, 0, "_scale_inv"},
    {"per-row FP8, bf16 vectors", GMM_SCALING_ROW, GMM_E5M2, GMM_BF16, 1, 0, 1, 1, 0, "_scale"},
    {"per-tensor FP8 and an amax", GMM_SCALING_TENSOR, GMM_E4M3, GMM_F32, 0, 0, 0, 1, 2, "_scale_inv"},
    {"per-tensor FP8 of one element", GMM_SCALING_TENSOR, GMM_E5M2, GMM_F32, 0, 0, 1, 1, 0, "_scale"}};
static const char *const beside_names[2] = {"_tensor_scale", "_amax"};

/* The whole weight: a code in each byte, and the bytes of the scale of each block. A gated weight has its up rows
   behind its gate rows. */
typedef struct qweight {
    const qformat *f;
    int experts, halves, rows, cols; /* rows of one half */
    unsigned char *codes, *scales, *beside[2];
} qweight;

/* How a side stores it: one tensor per expert, a stack, or experts one below another; ranks; the block of gate rows. */
typedef struct qside { int form, ep, etp, gtp, glu; } qside;

/* What one rank stores: logical rows, in order, and columns. */
typedef struct qshard { int experts, expert0, n, cols, col0; int row[1024]; } qshard;

static int scale_bytes_of(const qformat *f) { return gmm_dtype_bits(f->scales) / 8; }
static int packed_of(const qformat *f) { return f->codes == GMM_U8 || f->codes == GMM_E2M1; }
static int blocks_of(int extent, int block) { return block ? (extent + block - 1) / block : 1; }

static const unsigned char *scale_of(const qweight *w, int e, int r, int c) {
    const int cols = blocks_of(w->cols, w->f->cols), rows = blocks_of(w->halves * w->rows, w->f->rows);
    const int i = w->f->rows ? r / w->f->rows : 0, j = w->f->cols ? c / w->f->cols : 0;
    return w->scales + ((int64_t)(e * rows + i) * cols + j) * scale_bytes_of(w->f);
}

static qweight qweight_of(const qformat *f, int experts, int halves, int rows, int cols) {
    qweight w = {f, experts, halves, rows, cols, NULL, NULL, {NULL, NULL}};
    const int64_t n = (int64_t)experts * halves * rows * cols;
    const int64_t s = (int64_t)experts * blocks_of(halves * rows, f->rows) * blocks_of(cols, f->cols);
    w.codes = (unsigned char *)t_host((size_t)n);
    w.scales = (unsigned char *)t_host((size_t)s * 4);
    for (int64_t i = 0; i < n; i++) w.codes[i] = (unsigned char)(t_rand() & (packed_of(f) ? 15 : 255));
    for (int64_t i = 0; i < s * 4; i++) w.scales[i] = (unsigned char)t_rand();
    for (int b = 0; b < 2; b++) {
        w.beside[b] = (unsigned char *)t_host((size_t)experts * 4);
        for (int i = 0; i < experts * 4; i++) w.beside[b][i] = (unsigned char)t_rand();
    }
    return w;
}

/* Rows and columns of a rank: an FC2 is cut by ETP along its columns. */
static qshard qshard_of(const qweight *w, const qside *side, int fc2, int ep, int etp, int gtp) {
    qshard s;
    const int f = fc2 ? w->rows : w->rows / side->etp, first = fc2 ? 0 : etp * f, block = side->glu ? side->glu : f;
    int all[1024], n = 0, per;
    memset(&s, 0, sizeof s);
    s.experts = w->experts / side->ep;
    s.expert0 = ep * s.experts;
    s.cols = fc2 ? w->cols / side->etp : w->cols;
    s.col0 = fc2 ? etp * s.cols : 0;
    for (int b = 0; b < f; b += block)
        for (int h = 0; h < w->halves; h++)
            for (int i = b; i < b + block; i++) all[n++] = h * w->rows + first + i;
    per = (n + side->gtp * w->f->unit - 1) / (side->gtp * w->f->unit) * w->f->unit;
    for (int i = gtp * per; i < n && i < (gtp + 1) * per; i++) s.row[s.n++] = all[i];
    return s;
}

static const int64_t *shape_of(int64_t *d, int form, int experts, int rows, int cols, int dims) {
    const int64_t *shape = d;
    if (form == 1 || (form == 2 && !dims)) *d++ = experts;
    if (dims) *d++ = (int64_t)rows * (form == 2 ? experts : 1);
    if (dims == 2) *d++ = cols;
    *d = -1;
    return shape;
}

/* Adds the tensors "fc.weight..." of one rank to a table, without those whose name begins with `without`. */
static void qweight_add(gmm_ckpt_table *t, const qweight *w, int form, const qshard *s, const char *without) {
    const qformat *f = w->f;
    const int together = form ? s->experts : 1, unit = scale_bytes_of(f), sr = blocks_of(s->n, f->rows);
    const int sc = blocks_of(s->cols, f->cols), half_bytes = packed_of(f);
    for (int e = 0; e < s->experts; e += together) {
        unsigned char *codes = (unsigned char *)t_host((size_t)together * s->n * s->cols + 1), *to = codes;
        unsigned char *scales = (unsigned char *)t_host((size_t)together * sr * sc * unit + 1), *scale_to = scales;
        char number[16] = "", name[60];
        int64_t d[5];
        if (!form) snprintf(number, sizeof number, "%d", e);
        for (int m = e; m < e + together; m++) {
            const int expert = s->expert0 + m, all = w->halves * w->rows;
            for (int i = 0; i < s->n; i++)
                for (int j = 0; j < s->cols; j++) {
                    const unsigned char code = w->codes[((int64_t)expert * all + s->row[i]) * w->cols + s->col0 + j];
                    if (!half_bytes) *to++ = code;
                    else if (j % 2) *to++ |= (unsigned char)(code << 4);
                    else *to = code;
                }
            for (int i = 0; i < sr; i++)
                for (int j = 0; j < sc; j++, scale_to += unit)
                    memcpy(scale_to, scale_of(w, expert, s->row[i * f->rows], s->col0 + j * f->cols), (size_t)unit);
        }
        snprintf(name, sizeof name, "fc.weight%s", number);
        add(t, name, f->codes, shape_of(d, form, s->experts, s->n, f->codes == GMM_U8 ? s->cols / 2 : s->cols, 2),
            codes);
        snprintf(name, sizeof name, "fc.weight%s%s", f->suffix, number);
        if (!without || strncmp(name, without, strlen(without)))
            add(t, name, f->scales, shape_of(d, form, s->experts, sr, sc, f->dims), scales);
        for (int b = 0; b < 2; b++) {
            snprintf(name, sizeof name, "fc.weight%s%s", beside_names[b], number);
            if (f->beside >> b & 1 && (!without || strncmp(name, without, strlen(without))))
                add(t, name, GMM_F32, shape_of(d, form, s->experts, 1, 1, 1), w->beside[b] + (s->expert0 + e) * 4);
        }
    }
}

/* Checks that a rank's tensors hold the code and the scale of every element of its rows and columns. */
static void qweight_check(plan_run *m, const qweight *w, int grouped, const qshard *s, const char *what) {
    const qformat *f = w->f;
    const int unit = scale_bytes_of(f), sr = blocks_of(s->n, f->rows), sc = blocks_of(s->cols, f->cols);
    int64_t d[5];
    for (int e = 0; e < s->experts; e++) {
        const int at = grouped ? e : 0, expert = s->expert0 + e;
        char number[16] = "", name[4][60];
        const gmm_ckpt_tensor *codes, *scales;
        const unsigned char *c, *q;
        if (!grouped) snprintf(number, sizeof number, "%d", e);
        snprintf(name[0], sizeof name[0], "fc.weight%s", number);
        snprintf(name[1], sizeof name[1], "fc.weight%s%s", f->suffix, number);
        codes = get(m->targets, name[0]);
        scales = get(m->targets, name[1]);
        T_CHECK(codes->dtype == f->codes && scales->dtype == f->scales, "%s, %s: %s and %s", f->name, what,
                gmm_dtype_name(codes->dtype), gmm_dtype_name(scales->dtype));
        for (int k = 0; k < 2; k++) {
            const gmm_ckpt_tensor *got = k ? scales : codes;
            const int64_t *want = k ? shape_of(d, grouped, s->experts, sr, sc, f->dims)
                                    : shape_of(d, grouped, s->experts, s->n,
                                               f->codes == GMM_U8 ? s->cols / 2 : s->cols, 2);
            const gmm_ckpt_tensor like = shaped("", got->dtype, want);
            T_CHECK(got->rank == like.rank && !memcmp(got->shape, like.shape, sizeof got->shape[0] * (size_t)like.rank),
                    "%s, %s: %s has rank %d, extent %lld", f->name, what, got->name, got->rank,
                    (long long)got->shape[0]);
        }
        c = m->memory + codes->offset;
        q = m->memory + scales->offset + (int64_t)at * sr * sc * unit;
        for (int i = 0; i < s->n; i++)
            for (int j = 0; j < s->cols; j++) {
                const int64_t x = ((int64_t)at * s->n + i) * s->cols + j;
                const int code = !packed_of(f) ? c[x] : j % 2 ? c[x / 2] >> 4 : c[x / 2] & 15;
                const int want = w->codes[((int64_t)expert * w->halves * w->rows + s->row[i]) * w->cols + s->col0 + j];
                const unsigned char *scale = q + ((int64_t)(f->rows ? i / f->rows : 0) * sc +
                                                  (f->cols ? j / f->cols : 0)) * unit;
                T_CHECK(code == want, "%s, %s: code of expert %d, row %d, column %d: %d, not %d", f->name, what, expert,
                        i, j, code, want);
                T_CHECK(!memcmp(scale, scale_of(w, expert, s->row[i], s->col0 + j), (size_t)unit),
                        "%s, %s: scale of expert %d, row %d, column %d", f->name, what, expert, i, j);
            }
        for (int b = 0; b < 2; b++) {
            snprintf(name[2 + b], sizeof name[2 + b], "fc.weight%s%s", beside_names[b], number);
            if (f->beside >> b & 1)
                t_same(name[2 + b], m->memory + get(m->targets, name[2 + b])->offset + at * 4,
                       w->beside[b] + expert * 4, 4);
        }
    }
    T_CHECK(count(m->targets) == (grouped ? 1 : s->experts) * (2 + (f->beside & 1) + (f->beside >> 1)),
            "%s, %s: %lld targets", f->name, what, (long long)count(m->targets));
}
#define qweight_check(...) T_CALL(qweight_check, __VA_ARGS__)

static qweight qweight_small(int format, int fc2) {
    const int n = qformats[format].rows == 128 || qformats[format].dims == 1 ? 256 : 64;
    return qweight_of(&qformats[format], 2, fc2 ? 1 : 2, n, n);
}

/* Whether a target needs equal scales: ETP cuts a block of the source inside the target's part, or cuts the value of a
   matrix. */
static int needs_equal(const qformat *f, const qside *from, const qside *to, int fc2, int etp) {
    const int cut = f->scaling == GMM_SCALING_TENSOR || f->beside || (f->scaling == GMM_SCALING_ROW && fc2);
    return cut && etp * from->etp / to->etp != ((etp + 1) * from->etp + to->etp - 1) / to->etp - 1;
}

/* A format between every form, grid of ranks and block of gate rows, whole and in shards of GTP. */
static void quantized(int arg) {
    const int format = arg / 2, fc2 = arg % 2, glu = fc2 ? 0 : qformats[format].rows == 128 ? 128 : 16;
    const qside sides[] = {{0, 1, 1, 1, 0}, {0, 2, 1, 1, 0}, {0, 1, 2, 1, 0}, {0, 2, 2, 1, glu}, {0, 1, 1, 2, 0},
                           {0, 1, 1, 1, glu}, {0, 1, 2, 2, glu}};
    const qweight w = qweight_small(format, fc2);
    for (int a = 0; a < T_COUNT(sides); a++)
        for (int b = 0; b < T_COUNT(sides); b++) {
            qside from = sides[a], to = sides[b];
            gmm_ckpt_linear l = linear_of("fc", w.experts, w.halves * w.rows, w.cols, (a + b) % 2, 0);
            call c;
            char what[100];
            const int parts = from.ep * from.etp * from.gtp;
            from.form = (a + b / 2) % (w.f->scaling == GMM_SCALING_TENSOR ? 2 : 3); /* [E] has one scale per expert */
            l.slot = fc2 ? GMM_CKPT_FC2 : GMM_CKPT_FC1;
            l.gated = !fc2;
            call_begin(&c, NULL, "module", "module");
            c.source.part_count = parts;
            for (int p = 0; p < parts; p++) {
                const int gtp = p % from.gtp, etp = p / from.gtp % from.etp, ep = p / from.gtp / from.etp;
                const qshard s = qshard_of(&w, &from, fc2, ep, etp, gtp);
                gmm_ckpt_table *t = table_new();
                qweight_add(t, &w, from.form, &s, NULL);
                c.part[p].table = t;
                c.part[p].rank.ep_rank = ep;
                c.part[p].rank.etp_rank = etp;
                c.part[p].rank.gtp_rank = gtp;
                c.part[p].rank.ep_size = from.ep;
                c.part[p].rank.etp_size = from.etp;
                c.part[p].rank.gtp_size = from.gtp;
            }
            c.source.stated.known = 1;
            c.source.stated.block = from.glu;
            c.target.glu_block = to.glu;
            for (int p = 0; p < to.ep * to.etp * to.gtp; p++) {
                const int gtp = p % to.gtp, etp = p / to.gtp % to.etp, ep = p / to.gtp / to.etp;
                const qshard s = qshard_of(&w, &to, fc2, ep, etp, gtp);
                gmm_ckpt_cut cut = GMM_ZERO;
                qformat alone;
                qweight want;
                plan_run m;
                c.target.rank.ep_rank = ep;
                c.target.rank.etp_rank = etp;
                c.target.rank.ep_size = to.ep;
                c.target.rank.etp_size = to.etp;
                cut.row0 = gtp * (w.halves * w.rows / (fc2 ? 1 : to.etp) / 2);
                cut.rows = cut.stored_rows = s.n;
                c.target.cuts = to.gtp > 1 ? &cut : NULL;
                c.source.equal_scales = 0;
                alone = *w.f;
                want = w;
                want.f = &alone;
                if (needs_equal(w.f, &from, &to, fc2, etp)) {
                    plan_refused(&c, &l, 1, GMM_CKPT_NOT_DIVISIBLE, "equal_scales");
                    c.source.equal_scales = 1;
                    if (w.f->scaling == GMM_SCALING_TENSOR) alone.beside = 0; /* amaxes are not joined */
                }
                snprintf(what, sizeof what, "%d/%d/%d/%d to %d/%d/%d/%d, rank %d, form %d", from.ep, from.etp, from.gtp,
                         from.glu, to.ep, to.etp, to.gtp, to.glu, p, from.form);
                m = plan_ok(&c, &l, 1);
                apply(&m, (a + b) % 3 ? 0 : -1);
                qweight_check(&m, &want, l.grouped_weight, &s, what);
                gmm_ckpt_plan_destroy(m.plan);
            }
            for (int p = 0; p < parts; p++) gmm_ckpt_table_destroy((gmm_ckpt_table *)(uintptr_t)c.part[p].table);
        }
}

/* ETP ranks whose scales of one row or matrix differ: a target within one rank's part takes that rank's. */
static void quantized_own_scales(int format) {
    for (int fc2 = 0; fc2 < 2; fc2++)
        for (int to = 2; to <= 4; to += 2)
            for (int rank = 0; rank < to; rank++) {
                const qside sides[2] = {{0, 1, 2, 1, 0}, {0, 1, to, 1, 0}};
                const qweight w[2] = {qweight_of(&qformats[format], 2, 1, 256, 256),
                                      qweight_of(&qformats[format], 2, 1, 256, 256)};
                const int part = rank * 2 / to;
                const qshard want = qshard_of(&w[part], &sides[1], fc2, 0, rank, 0);
                gmm_ckpt_linear l = linear_of("fc", 2, 256, 256, 1, 0);
                call c;
                plan_run m;
                l.slot = fc2 ? GMM_CKPT_FC2 : GMM_CKPT_FC1;
                call_begin(&c, NULL, "module", "module");
                c.source.part_count = 2;
                for (int p = 0; p < 2; p++) {
                    const qshard s = qshard_of(&w[p], &sides[0], fc2, 0, p, 0);
                    gmm_ckpt_table *t = table_new();
                    qweight_add(t, &w[p], 1, &s, NULL);
                    c.part[p].table = t;
                    c.part[p].rank.etp_rank = p;
                    c.part[p].rank.etp_size = 2;
                }
                c.target.rank.etp_rank = rank;
                c.target.rank.etp_size = to;
                m = plan_ok(&c, &l, 1);
                apply(&m, 0);
                qweight_check(&m, &w[part], 1, &want, "its own scales");
                gmm_ckpt_plan_destroy(m.plan);
                for (int p = 0; p < 2; p++) gmm_ckpt_table_destroy((gmm_ckpt_table *)(uintptr_t)c.part[p].table);
            }
}

/* Amaxes differ though scales are equal: those of TENSOR scales are dropped where ETP ranks or gate and up are joined,
   and where codes are dequantized. Those of NV16 are read. */
static void quantized_amaxes(int arg) {
    static const struct { int nv16, halves, to, dequantize, amaxes, dropped; } ways[] = {
        {0, 0, 1, 0, 0, 2}, {0, 0, 2, 0, 1, 0}, {0, 0, 2, 1, 0, 2}, {0, 1, 1, 0, 0, 2}, {0, 1, 1, 1, 0, 2},
        {1, 0, 1, 0, 1, 0}, {1, 0, 2, 0, 1, 0}, {1, 1, 1, 0, 1, 0}};
    static const float amaxes[2] = {3, 7}, ones[2] = {1, 1};
    gmm_ckpt_row rows[6];
    const gmm_ckpt_scheme scheme = {"own", rows, 6, 1, 0, 0};
    (void)arg;
    for (int i = 0; i < 6; i++) { /* gate and up apart */
        static const char *const names[] = {"{p}.g.weight{e}", "{p}.u.weight{e}", "{p}.g.scale{e}", "{p}.u.scale{e}",
                                            "{p}.g.amax{e}", "{p}.u.amax{e}"};
        rows[i] = (gmm_ckpt_row){names[i], GMM_CKPT_SLOT_ANY, (gmm_ckpt_kind)(i < 2 ? 0 : i < 4 ? 2 : 4),
                                 i % 2 ? GMM_CKPT_UP : GMM_CKPT_GATE, GMM_CKPT_EACH, 0, GMM_SCALING_128X128};
    }
    for (int i = 0; i < T_COUNT(ways); i++) {
        const int halves = ways[i].halves, nv16 = ways[i].nv16;
        gmm_ckpt_linear l = linear_of("fc", 1, 256, 256, 0, 0);
        gmm_ckpt_table *t[2] = {table_new(), table_new()};
        gmm_ckpt_report report;
        call c;
        plan_run m;
        memset(&m, 0, sizeof m);
        call_begin(&c, NULL, "module", "module");
        for (int p = 0; p < 2; p++) { /* halves of columns on two ETP ranks, or gate and up rows */
            const int n = nv16 ? 16 : 1, cols = halves ? 256 : 128;
            char name[3][40];
            snprintf(name[0], sizeof name[0], "fc.%sweight0", !halves ? "" : p ? "u." : "g.");
            snprintf(name[1], sizeof name[1], "fc.%s0", !halves ? "weight_scale" : p ? "u.scale" : "g.scale");
            snprintf(name[2], sizeof name[2], "fc.%s0", !halves ? "weight_amax" : p ? "u.amax" : "g.amax");
            add(t[halves ? 0 : p], name[0], nv16 ? GMM_E2M1 : GMM_E4M3, SHAPE(halves ? 128 : 256, cols), NULL);
            if (nv16) add(t[halves ? 0 : p], name[1], GMM_E4M3, SHAPE(halves ? 128 : 256, cols / n), NULL);
            else add(t[halves ? 0 : p], name[1], GMM_F32, SCALAR, ones);
            add(t[halves ? 0 : p], name[2], GMM_F32, SHAPE(1), &amaxes[p]);
            c.part[p].table = t[p];
            if (halves) continue;
            c.part[p].rank.etp_rank = p;
            c.part[p].rank.etp_size = 2;
        }
        if (halves) c.source.scheme = &scheme;
        c.source.part_count = halves ? 1 : 2;
        c.source.equal_scales = 1;
        c.target.rank.etp_size = ways[i].to;
        c.target.dtype = ways[i].dequantize ? GMM_F32 : GMM_NONE;
        l.slot = halves ? GMM_CKPT_FC1 : GMM_CKPT_FC2;
        l.gated = halves;
        T_OK_TEXT(gmm_ckpt_plan_create(&m.plan, &c.source, &c.target, &l, 1, NULL, &report), report.error.text);
        m.targets = gmm_ckpt_plan_targets(m.plan);
        m.parts = c.part;
        T_CHECK((gmm_ckpt_table_find(m.targets, "fc.weight_amax0") >= 0) == ways[i].amaxes, "%d: amax", i);
        T_CHECK(report.dropped == ways[i].dropped && report.matched == 6 - report.dropped, "%d: %lld dropped", i,
                (long long)report.dropped);
        apply(&m, 0);
        if (ways[i].amaxes) t_same("amax", m.memory + get(m.targets, "fc.weight_amax0")->offset, amaxes, 4);
        gmm_ckpt_plan_destroy(m.plan);
        for (int p = 0; p < 2; p++) gmm_ckpt_table_destroy(t[p]);
    }
}

/* Both normalizers, in both modes and directions; weights below one another split too. */
static void quantized_normalizers(int format) {
    const qweight w = qweight_small(format, 1);
    const qside whole_side = {0, 1, 1, 1, 0};
    const qshard s = qshard_of(&w, &whole_side, 1, 0, 0, 0);
    for (int form = 0; form < 3; form++)
        for (int grouped = 0; grouped < 2; grouped++)
            for (int parity = 0; parity < 2; parity++)
                for (int map = 0; map < 2; map++) {
                    gmm_ckpt_linear l = linear_of("fc", w.experts, w.rows, w.cols, grouped, 0);
                    const gmm_ckpt_move *moves;
                    gmm_ckpt_table *t;
                    int64_t n;
                    plan_run m;
                    if (form == 2 && (grouped || w.f->scaling == GMM_SCALING_TENSOR)) continue; /* see `quantized` */
                    t = table_new();
                    qweight_add(t, &w, form, &s, NULL);
                    m = normalize(t, map ? NULL : "fc.", &l, 1, (gmm_ckpt_parity)parity);
                    apply(&m, 0);
                    moves = gmm_ckpt_plan_moves(m.plan, &n);
                    for (int64_t i = 0; i < n; i++) { /* the check reads views like copies */
                        const gmm_ckpt_tensor *to = &gmm_ckpt_table_tensors(m.targets, NULL)[moves[i].dst];
                        const gmm_ckpt_tensor *from = &gmm_ckpt_table_tensors(t, NULL)[moves[i].src];
                        const int64_t unit = gmm_dtype_bits(from->dtype) < 8 ? 1 : gmm_dtype_bits(from->dtype) / 8;
                        if (moves[i].kind == GMM_CKPT_VIEW)
                            memcpy(m.memory + to->offset, source_bytes(t, from->name) + moves[i].src_at * unit,
                                   (size_t)to->bytes);
                    }
                    qweight_check(&m, &w, grouped, &s, parity ? "upstream" : "safe");
                    gmm_ckpt_plan_destroy(m.plan);
                    gmm_ckpt_table_destroy(t);
                }
}

/* Faults of scales, each refused by both modes before anything is planned. `parities` 1: by SAFE alone. */
static void quantized_refused(int format) {
    enum { MISSING_ALL, MISSING_ONE, DTYPE, ONE_DTYPE, LAST_EXTENT, FIRST_EXTENT, EXPERTS, EXTRA, TWO_NAMES, BOTH,
           BESIDE_ALL, BESIDE_ONE, BESIDE_SHAPE, BESIDE_DTYPE, FAULTS };
    const qweight w = qweight_small(format, 1);
    const qformat *f = w.f;
    const qside whole_side = {0, 1, 1, 1, 0};
    const qshard s = qshard_of(&w, &whole_side, 1, 0, 0, 0);
    const int sr = blocks_of(w.rows, f->rows), sc = blocks_of(w.cols, f->cols);
    for (int fault = 0; fault < FAULTS; fault++)
        for (int form = 0; form < 2; form++)
            for (int parity = 0; parity < 2; parity++) {
                gmm_ckpt_table *t = table_new();
                gmm_ckpt_linear l = linear_of("fc", w.experts, w.rows, w.cols, !form, 0);
                gmm_ckpt_report report;
                gmm_ckpt_plan *plan = (gmm_ckpt_plan *)&plan;
                gmm_ckpt_reason reason = GMM_CKPT_SHAPE, other = GMM_CKPT_FINE;
                char all[40], name[60], without[60];
                const char *key = name, *beside = f->beside & 1 ? beside_names[0] : beside_names[1];
                int64_t d[5];
                gmm_status status;
                const int of_beside = fault >= BESIDE_ALL && fault <= BESIDE_DTYPE;
                /* of several kinds beside the scales, all are left out where none may be there */
                snprintf(all, sizeof all, "fc.weight%s", of_beside ? beside : f->suffix);
                snprintf(name, sizeof name, "%s%s", all, form ? "" : "1");
                strcpy(without, fault == MISSING_ALL || fault == BESIDE_ALL || form ? all : name);
                if ((of_beside && !f->beside) || ((fault == MISSING_ONE || fault == BESIDE_ONE || fault == ONE_DTYPE ||
                                                   fault == EXTRA) && form) ||
                    (fault == BESIDE_ALL && (f->scaling != GMM_SCALING_NV16 || f->beside == 3)) ||
                    (fault == LAST_EXTENT && f->dims < 2) || (fault == FIRST_EXTENT && !f->dims && !form) ||
                    (fault == EXPERTS && !form) ||
                    (parity && (fault == EXTRA || (f->codes == GMM_U8 && !f->beside && fault == MISSING_ALL)))) {
                    gmm_ckpt_table_destroy(t);
                    continue;
                }
                if (fault == EXTRA || fault == TWO_NAMES || fault == BOTH) without[0] = 1;
                qweight_add(t, &w, form, &s, without);
                switch (fault) {
                case MISSING_ALL: reason = GMM_CKPT_SCALE_MISSING; key = "fc.weight"; break;
                case MISSING_ONE: case BESIDE_ONE: reason = GMM_CKPT_SCALE_MISSING; key = "fc.weight"; break;
                case BESIDE_ALL: reason = GMM_CKPT_SCALE_MISSING; key = "tensor scale or amax"; break;
                case DTYPE: case BESIDE_DTYPE:
                    reason = GMM_CKPT_DTYPE;
                    add(t, name, GMM_F16, of_beside ? shape_of(d, form, 2, 1, 1, 1)
                                                    : shape_of(d, form, 2, sr, sc, f->dims), NULL);
                    if (!form && !of_beside) { /* the first is read first */
                        gmm_ckpt_table_destroy(t);
                        t = table_new();
                        qweight_add(t, &w, form, &s, all);
                        for (int e = 0; e < 2; e++) {
                            snprintf(name, sizeof name, "%s%d", all, e);
                            add(t, name, GMM_F16, shape_of(d, form, 2, sr, sc, f->dims), NULL);
                        }
                        snprintf(name, sizeof name, "%s0", all);
                    }
                    break;
                case ONE_DTYPE:
                    reason = GMM_CKPT_DTYPE;
                    add(t, name, f->scales == GMM_F32 ? GMM_BF16 : GMM_F32, shape_of(d, 0, 2, sr, sc, f->dims), NULL);
                    break;
                case LAST_EXTENT: add(t, name, f->scales, shape_of(d, form, 2, sr, sc + 1, 2), NULL); break;
                case FIRST_EXTENT: add(t, name, f->scales, shape_of(d, form, 2, sr + 1, sc, f->dims ? f->dims : 1),
                                       NULL); break;
                case EXPERTS:
                    add(t, name, f->scales, shape_of(d, form, 3, sr, sc, f->dims), NULL);
                    other = GMM_CKPT_NOT_DIVISIBLE;
                    break;
                case EXTRA:
                    reason = GMM_CKPT_EXTRA_INDEX;
                    snprintf(name, sizeof name, "%s2", all);
                    add(t, name, f->scales, shape_of(d, 0, 2, sr, sc, f->dims), NULL);
                    break;
                case TWO_NAMES:
                    reason = GMM_CKPT_BOTH_LAYOUTS;
                    key = "fc.weight_scale";
                    for (int e = 0; e < (form ? 1 : 2); e++) {
                        snprintf(name, sizeof name, "fc.weight%s%.*s", strcmp(f->suffix, "_scale") ? "_scale"
                                                                                                   : "_scale_inv",
                                 !form, e ? "1" : "0");
                        add(t, name, f->scales, shape_of(d, form, 2, sr, sc, f->dims), NULL);
                    }
                    break;
                case BOTH:
                    reason = GMM_CKPT_BOTH_LAYOUTS;
                    key = all;
                    snprintf(name, sizeof name, "%s%s", all, form ? "0" : "");
                    add(t, name, f->scales, shape_of(d, !form, 2, sr, sc, f->dims), NULL);
                    break;
                default: add(t, name, GMM_F32, shape_of(d, form, 2, 2, 1, 1), NULL); break; /* BESIDE_SHAPE */
                }
                status = gmm_ckpt_normalize_map(&plan, t, &l, 1, (gmm_ckpt_parity)parity, NULL, &report);
                T_CHECK(status && !plan && (report.reason == reason || report.reason == other),
                        "%s, fault %d, form %d, parity %d: %s, not %s: %s", f->name, fault, form, parity,
                        gmm_ckpt_reason_name(report.reason), gmm_ckpt_reason_name(reason), report.error.text);
                T_CHECK(strstr(report.error.text, key), "%s, fault %d: \"%s\" lacks \"%s\"", f->name, fault,
                        report.error.text, key);
                gmm_ckpt_table_destroy(t);
            }
}

/* Boundaries inside a block are refused with the key, the block and where the boundary lies. */
static void quantized_cuts(int arg) {
    static const struct {
        int format, fc2, rows, cols, etp, glu, row0, gtp; /* row0: of a GTP shard of 16 rows; gtp: in the source */
        const char *needle[3];
    } cases[] = {
        {0, 0, 192, 128, 2, 0, -1, 0, {"ETP rank 0 of 2, row 96,", "rows 0 to 127 (128x128)", "fc.weight"}},
        {0, 1, 128, 192, 2, 0, -1, 0, {"column 96,", "columns 0 to 127 (128x128)", "fc.weight"}},
        {0, 0, 128, 128, 1, 64, -1, 0, {"block of gate rows, row 64,", "rows 0 to 127 (128x128)", "fc.weight"}},
        {0, 0, 192, 128, 1, 96, -1, 0, {"row 96", "rows 0 to 127 (128x128)", "fc.weight"}},
        {0, 1, 256, 128, 1, 0, 130, 0, {"row0, row 130,", "rows 128 to 255", "unit of 128x128 is 128 rows"}},
        {1, 1, 64, 96, 2, 0, -1, 0, {"column 48,", "columns 32 to 63 (mx32)", "fc.weight"}},
        {1, 1, 64, 96, 1, 0, 16, 0, {"row0, row 16,", "rows 0 to 31 (mx32)", "unit of mx32 is 32 rows"}},
        {1, 1, 96, 96, 1, 0, -1, 48, {"GTP rank 1, row 48,", "rows 32 to 63 (mx32)", "unit of mx32 is 32 rows"}},
        {4, 1, 64, 48, 2, 0, -1, 0, {"column 24,", "columns 16 to 31 (nv16)", "fc.weight"}},
        {4, 1, 64, 48, 1, 0, 24, 0, {"row0, row 24,", "rows 16 to 31 (nv16)", "unit of nv16 is 16 rows"}},
        {5, 1, 80, 32, 1, 0, -1, 40, {"GTP rank 1, row 40,", "rows 32 to 47 (nv16)", "unit of nv16 is 16 rows"}}};
    (void)arg;
    for (int i = 0; i < T_COUNT(qformats); i++)
        T_CHECK(qformats[i].rows != 1 || !qformats[i].cols || qformats[i].unit == gmm_gtp_unit(qformats[i].scaling),
                "%s: GTP's unit is %lld", qformats[i].name, (long long)gmm_gtp_unit(qformats[i].scaling));
    MUST(gmm_gtp_unit(GMM_SCALING_128X128) == qformats[0].unit);
    for (int i = 0; i < T_COUNT(cases); i++) {
        const int fc2 = cases[i].fc2, gtp = cases[i].gtp ? 2 : 1;
        const qweight w = qweight_of(&qformats[cases[i].format], 1, fc2 ? 1 : 2, cases[i].rows, cases[i].cols);
        const qside side = {0, 1, 1, 1, 0};
        gmm_ckpt_linear l = linear_of("fc", 1, w.halves * w.rows, w.cols, 1, 0);
        gmm_ckpt_cut cut = GMM_ZERO;
        call c;
        call_begin(&c, NULL, "module", "module");
        c.source.part_count = gtp;
        for (int p = 0; p < gtp; p++) {
            qshard s = qshard_of(&w, &side, fc2, 0, 0, 0);
            gmm_ckpt_table *t = table_new();
            if (gtp > 1) {
                s.n = cases[i].gtp;
                for (int r = 0; r < s.n; r++) s.row[r] = p * s.n + r;
            }
            qweight_add(t, &w, 0, &s, NULL);
            c.part[p].table = t;
            c.part[p].rank.gtp_rank = p;
            c.part[p].rank.gtp_size = gtp;
        }
        l.slot = fc2 ? GMM_CKPT_FC2 : GMM_CKPT_FC1;
        l.gated = !fc2;
        c.source.stated.known = 1;
        c.target.glu_block = cases[i].glu;
        c.target.rank.etp_size = cases[i].etp;
        cut.row0 = cases[i].row0;
        cut.rows = cut.stored_rows = 16;
        if (cases[i].row0 >= 0) c.target.cuts = &cut;
        for (int n = 0; n < 3; n++) plan_refused(&c, &l, 1, GMM_CKPT_NOT_DIVISIBLE, cases[i].needle[n]);
        for (int p = 0; p < gtp; p++) gmm_ckpt_table_destroy((gmm_ckpt_table *)(uintptr_t)c.part[p].table);
    }
}

/* The last GTP shard of a matrix may end inside a block, as target and as source; padding rows are zeros. */
static void quantized_tail(int format) {
    const qformat *f = &qformats[format];
    const qside whole_side = {0, 1, 1, 1, 0}, cut_side = {0, 1, 1, 2, 0};
    const qweight w = qweight_of(f, 2, 1, 200, 130);
    const qshard all = qshard_of(&w, &whole_side, 1, 0, 0, 0);
    gmm_ckpt_table *t = table_new();
    gmm_ckpt_linear l = linear_of("fc", 2, 200, 130, 1, 0);
    gmm_ckpt_cut cut = GMM_ZERO;
    call c;
    plan_run m;
    l.slot = GMM_CKPT_FC2;
    qweight_add(t, &w, 0, &all, NULL);
    call_begin(&c, t, "module", "module");
    c.target.cuts = &cut;
    for (int padded = 0; padded < 2; padded++)
        for (int g = 0; g < 2; g++) {
            const qshard s = qshard_of(&w, &cut_side, 1, 0, 0, g);
            cut.row0 = s.row[0];
            cut.rows = s.n;
            cut.stored_rows = padded ? 128 : s.n;
            MUST(s.n == (g ? 72 : 128) || f->rows != 128);
            m = plan_ok(&c, &l, 1);
            apply(&m, 0);
            if (!padded) {
                qweight_check(&m, &w, 1, &s, "a tail");
            } else {
                const gmm_ckpt_tensor *codes = get(m.targets, "fc.weight");
                const int64_t row = codes->bytes / 2 / 128;
                MUST(codes->shape[1] == 128 && codes->bytes == 2 * 128 * row);
                for (int64_t i = s.n * row; i < 128 * row; i++) MUST(m.memory[codes->offset + i] == 0);
            }
            gmm_ckpt_plan_destroy(m.plan);
        }
    c.target.cuts = NULL;
    c.source.part_count = 2;
    for (int g = 0; g < 2; g++) {
        const qshard s = qshard_of(&w, &cut_side, 1, 0, 0, g);
        gmm_ckpt_table *part = table_new();
        qweight_add(part, &w, g ? 0 : 1, &s, NULL);
        c.part[g].table = part;
        c.part[g].rank.gtp_rank = g;
        c.part[g].rank.gtp_size = 2;
    }
    plan_refused(&c, &l, 1, GMM_CKPT_BOTH_LAYOUTS, "fc.weight"); /* ranks differ in form */
    for (int g = 0; g < 2; g++) {
        const qshard s = qshard_of(&w, &cut_side, 1, 0, 0, g);
        gmm_ckpt_table *part = table_new();
        qweight_add(part, &w, 1, &s, NULL);
        gmm_ckpt_table_destroy((gmm_ckpt_table *)(uintptr_t)c.part[g].table);
        c.part[g].table = part;
    }
    m = plan_ok(&c, &l, 1);
    apply(&m, 0);
    qweight_check(&m, &w, 1, &all, "shards with a tail");
    gmm_ckpt_plan_destroy(m.plan);
    for (int g = 0; g < 2; g++) gmm_ckpt_table_destroy((gmm_ckpt_table *)(uintptr_t)c.part[g].table);
    gmm_ckpt_table_destroy(t);
}

/* An FC1 whose gate rows end inside a block of 128 rows stays as it is where no row moves. */
static void quantized_gate_end(int arg) {
    const qweight w = qweight_of(&qformats[0], 2, 1, 192, 130); /* 96 gate and 96 up rows, quantized together */
    const qside side = {0, 1, 1, 1, 0};
    const qshard s = qshard_of(&w, &side, 0, 0, 0, 0);
    gmm_ckpt_table *t = table_new();
    gmm_ckpt_linear l = linear_of("fc", 2, 192, 130, 1, 0);
    call c;
    plan_run m;
    (void)arg;
    l.gated = 1;
    qweight_add(t, &w, 0, &s, NULL);
    call_begin(&c, t, "module", "module");
    m = plan_ok(&c, &l, 1);
    apply(&m, 0);
    qweight_check(&m, &w, 1, &s, "gate and up in their place");
    gmm_ckpt_plan_destroy(m.plan);
    gmm_ckpt_table_destroy(t);
}

/* Names of Hugging Face's models: gate and up apart, weight_scale and weight_scale_2; joined in Megatron's names and
   taken apart again. One value of gate and one of up become one where the caller states that they are equal. */
static void quantized_names(int arg) {
    enum { F = 32, K = 64, E = 2 };
    static const char *const schemes[] = {"mixtral", "qwen2-moe", "qwen3-moe", "deepseek-v3"};
    static const char *const parts[2][3] = {{"block_sparse_moe.experts.%d.w1", "block_sparse_moe.experts.%d.w3",
                                             "block_sparse_moe.experts.%d.w2"},
                                            {"mlp.experts.%d.gate_proj", "mlp.experts.%d.up_proj",
                                             "mlp.experts.%d.down_proj"}};
    const char *const *stems = parts[arg > 0];
    gmm_ckpt_table *t = table_new(), *middle = table_new();
    gmm_ckpt_linear *found;
    gmm_ckpt_report report;
    int64_t n;
    call c;
    plan_run m, back;
    for (int e = 0; e < E; e++) {
        static const float value[E] = {0.25f, 3.0f};
        for (int p = 0; p < 3; p++) {
            const int64_t rows = p == 2 ? K : F, cols = p == 2 ? F : K;
            char stem[80], name[120];
            snprintf(stem, sizeof stem, stems[p], e);
            snprintf(name, sizeof name, HL "%s.weight", stem);
            add(t, name, GMM_U8, SHAPE(rows, cols / 2), NULL);
            snprintf(name, sizeof name, HL "%s.weight_scale", stem);
            add(t, name, GMM_E4M3, SHAPE(rows, cols / 16), NULL);
            snprintf(name, sizeof name, HL "%s.weight_scale_2", stem);
            add(t, name, GMM_F32, SCALAR, &value[e]);
        }
    }
    call_begin(&c, t, schemes[arg], "megatron");
    T_OK_TEXT(gmm_ckpt_scan(&c.source, 0, &found, &n, NULL, &report), report.error.text);
    MUST(n == 2 && found[0].scaling == GMM_SCALING_NV16 && found[0].in == K && found[0].out == 2 * F &&
         found[0].experts == E && found[1].in == F && found[0].gated);
    found[0].grouped_weight = found[1].grouped_weight = 1;
    plan_refused(&c, found, n, GMM_CKPT_NOT_DIVISIBLE, "equal_scales");
    c.source.equal_scales = 1;
    m = plan_ok(&c, found, n);
    apply(&m, 0);
    MUST(count(m.targets) == 6);
    for (int e = 0; e < E; e++) {
        const unsigned char *codes = m.memory + get(m.targets, ML "linear_fc1.weight")->offset + e * 2 * F * K / 2;
        const unsigned char *scales = m.memory + get(m.targets, ML "linear_fc1.weight_scale")->offset +
                                      e * 2 * F * K / 16;
        const unsigned char *value = m.memory + get(m.targets, ML "linear_fc1.weight_tensor_scale")->offset + e * 4;
        for (int p = 0; p < 2; p++) {
            char stem[80], name[120];
            snprintf(stem, sizeof stem, stems[p], e);
            snprintf(name, sizeof name, HL "%s.weight", stem);
            t_same(name, codes + p * F * K / 2, source_bytes(t, name), F * K / 2);
            snprintf(name, sizeof name, HL "%s.weight_scale", stem);
            t_same(name, scales + p * F * K / 16, source_bytes(t, name), F * K / 16);
            snprintf(name, sizeof name, HL "%s.weight_scale_2", stem);
            t_same(name, value, source_bytes(t, name), 4);
        }
    }
    for (int64_t i = 0; i < count(m.targets); i++) { /* and back: the names and shapes of the source */
        const gmm_ckpt_tensor *x = &gmm_ckpt_table_tensors(m.targets, NULL)[i];
        int64_t shape[GMM_CKPT_RANK + 1];
        memcpy(shape, x->shape, sizeof x->shape);
        shape[x->rank] = -1;
        add(middle, x->name, x->dtype, shape, m.memory + x->offset);
    }
    call_begin(&c, middle, "megatron", schemes[arg]);
    c.source.stated.known = 1;
    back = plan_ok(&c, found, n);
    apply(&back, 0);
    MUST(count(back.targets) == count(t));
    for (int64_t i = 0; i < count(t); i++) {
        const gmm_ckpt_tensor *x = &gmm_ckpt_table_tensors(t, NULL)[i], *y = get(back.targets, x->name);
        MUST(x->rank == y->rank && x->bytes == y->bytes && x->dtype == y->dtype);
        t_same(x->name, back.memory + y->offset, source_bytes(t, x->name), (size_t)x->bytes);
    }
    gmm_ckpt_plan_destroy(m.plan);
    gmm_ckpt_plan_destroy(back.plan);
    gmm_ckpt_linears_release(found, NULL);
    gmm_ckpt_table_destroy(t);
    gmm_ckpt_table_destroy(middle);
}

/* Scales that a format does not have are extra; formats that cannot be read as 16 bits say so. */
static void quantized_beside(int arg) {
    const qside side = {0, 1, 1, 1, 0};
    (void)arg;
    for (int format = 0; format < T_COUNT(qformats); format++) {
        const qweight w = qweight_small(format, 1);
        const qshard s = qshard_of(&w, &side, 1, 0, 0, 0);
        gmm_ckpt_table *t = table_new();
        gmm_ckpt_linear l = linear_of("fc", 2, w.rows, w.cols, 1, 0);
        gmm_ckpt_report report;
        call c;
        plan_run m;
        l.slot = GMM_CKPT_FC2;
        qweight_add(t, &w, 0, &s, NULL);
        call_begin(&c, t, "module", "module");
        if (w.f->scaling == GMM_SCALING_NV16) {
            c.target.dtype = GMM_BF16;
            plan_refused(&c, &l, 1, GMM_CKPT_DTYPE, "keep them quantized");
            c.target.dtype = GMM_NONE;
        } else {
            for (int e = 0; e < 2; e++) add(t, e ? "fc.weight_tensor_scale1" : "fc.weight_tensor_scale0", GMM_F32,
                                            SHAPE(1), NULL);
            plan_refused(&c, &l, 1, GMM_CKPT_EXTRA_KEY, "fc.weight_tensor_scale0");
            c.source.extra = GMM_CKPT_EXTRA_KEEP;
            T_OK_TEXT(gmm_ckpt_plan_create(&m.plan, &c.source, &c.target, &l, 1, NULL, &report), report.error.text);
            MUST(report.kept == 2);
            gmm_ckpt_plan_destroy(m.plan);
        }
        gmm_ckpt_table_destroy(t);
    }
}

/* Vectors are dequantized where their scales are those of the moves: one block of 128 rows, or all. */
static void quantized_vectors(int arg) {
    enum { R = 200 };
    static const struct { gmm_dtype dtype; int64_t scales; gmm_scaling scaling; int works; } ways[] = {
        {GMM_F32, 2, GMM_SCALING_128X128, 1}, {GMM_F32, R, GMM_SCALING_ROW, 0}, {GMM_F32, 1, GMM_SCALING_TENSOR, 1},
        {GMM_E8M0, R, GMM_SCALING_MX32, 0}};
    (void)arg;
    for (int i = 0; i < T_COUNT(ways); i++)
        for (int experts = 1; experts < 3; experts++) /* two are stacked */
            for (int keep = 0; keep < 2; keep++) {
                const int64_t bytes = gmm_dtype_bits(ways[i].dtype) / 8 * ways[i].scales, n = ways[i].scales;
                gmm_ckpt_linear l = linear_of("fc", experts, R, 0, experts > 1, 0);
                gmm_ckpt_table *t = table_new();
                unsigned char codes[2 * R], *scales = (unsigned char *)t_host((size_t)(2 * bytes));
                call c;
                plan_run m;
                memset(codes, 0x38, sizeof codes); /* 1 */
                memset(scales, 127, (size_t)(2 * bytes));
                for (int64_t k = 0; ways[i].dtype == GMM_F32 && k < 2 * n; k++) {
                    const float value = (float)(k + 1);
                    memcpy(scales + 4 * k, &value, 4);
                }
                if (experts == 1) add(t, "fc.weight0", GMM_E4M3, SHAPE(R), codes);
                else add(t, "fc.weight", GMM_E4M3, SHAPE(2, R), codes);
                if (experts == 1) add(t, "fc.weight_scale0", ways[i].dtype, SHAPE(n), scales);
                else add(t, "fc.weight_scale", ways[i].dtype, SHAPE(2, n), scales);
                call_begin(&c, t, "module", "module");
                c.target.dtype = keep ? GMM_NONE : GMM_F32;
                if (keep || (ways[i].works && experts == 1)) {
                    m = plan_ok(&c, &l, 1);
                    apply(&m, 0);
                    for (int r = 0; !keep && r < R; r++) {
                        float got;
                        memcpy(&got, m.memory + get(m.targets, "fc.weight0")->offset + 4 * r, 4);
                        T_CHECK(got == (float)(n == 2 ? r / 128 + 1 : 1), "%s: row %d is %g",
                                gmm_scaling_name(ways[i].scaling), r, (double)got);
                    }
                    gmm_ckpt_plan_destroy(m.plan);
                } else {
                    plan_refused(&c, &l, 1, GMM_CKPT_SHAPE, gmm_scaling_name(ways[i].scaling));
                }
                gmm_ckpt_table_destroy(t);
            }
}

/* The value of a 4-bit code, and of a byte of exponent. */
static double code4_value(int code) {
    static const double values[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
    return code & 8 ? -values[code & 7] : values[code & 7];
}

/* Codes times their scales, rounded once, against double arithmetic; rows and columns of several blocks with tails. */
static void quantized_values(int arg) {
    enum { R = 70, K = 70, E = 2 };
    const int format = arg / 3, way = arg % 3;
    const qformat *f = &qformats[format];
    const qside side = {0, 1, 1, 1, 0};
    qweight w = qweight_of(f, E, 1, R, K);
    const int unit = scale_bytes_of(f), sn = E * blocks_of(R, f->rows) * blocks_of(K, f->cols);
    for (int form = 0; form < 2; form++) {
        const qshard s = qshard_of(&w, &side, 1, 0, 0, 0);
        gmm_ckpt_table *memory = table_new(), *t = memory;
        const unsigned char *bytes[8];
        const unsigned char *const *all[1] = {bytes};
        gmm_ckpt_linear l = linear_of("fc", E, R, K, 1, 0);
        call c;
        plan_run m;
        for (int i = 0; i < E * R * K; i++)
            if (!packed_of(f) && (w.codes[i] & 0x7C) == 0x7C) w.codes[i] &= 0x3F; /* neither Inf nor NaN */
        for (int i = 0; i < sn; i++) {
            const float value = (float)(t_int(1, 4000) * 0.001);
            const uint16_t half = gmm_f32_to_bf16(value);
            if (unit == 1) w.scales[i] = (unsigned char)t_int(110, 140);
            else if (unit == 2) memcpy(w.scales + i * 2, &half, 2);
            else memcpy(w.scales + i * 4, &value, 4);
        }
        qweight_add(memory, &w, form, &s, NULL);
        if (way) { /* behind callbacks */
            t = table_new();
            for (int64_t i = 0; i < count(memory); i++) {
                gmm_ckpt_tensor x = gmm_ckpt_table_tensors(memory, NULL)[i];
                gmm_ckpt_report report;
                MUST(i < 8);
                bytes[i] = source_bytes(memory, x.name);
                x.offset = 0;
                T_OK_TEXT(gmm_ckpt_table_add_storage(t, NULL, x.bytes, &x.storage, &report.error), report.error.text);
                T_OK_TEXT(gmm_ckpt_table_add(t, &x, &report), report.error.text);
            }
        }
        l.slot = GMM_CKPT_FC2;
        call_begin(&c, t, "module", "module");
        c.target.dtype = GMM_F32;
        m = plan_ok(&c, &l, 1);
        m.storages = all;
        apply(&m, way == 0 ? 0 : way == 1 ? -1 : 3000);
        for (int e = 0; e < E; e++)
            for (int r = 0; r < R; r++)
                for (int k = 0; k < K; k++) {
                    const int code = w.codes[(e * R + r) * K + k];
                    const unsigned char *scale = scale_of(&w, e, r, k);
                    const int wide = f->codes == GMM_E5M2;
                    double want = packed_of(f) ? code4_value(code) : fp8_value(code, wide ? 2 : 3, wide ? 15 : 7);
                    float got, factor = 0;
                    uint16_t half;
                    memcpy(&got, m.memory + get(m.targets, "fc.weight")->offset + ((e * R + r) * K + k) * 4, 4);
                    memcpy(&half, scale, 2);
                    if (unit == 4) memcpy(&factor, scale, 4);
                    if (unit == 2) factor = gmm_bf16_to_f32(half);
                    if (unit == 1) factor = 1;
                    want *= factor;
                    for (int x = 127; unit == 1 && x < *scale; x++) want *= 2;
                    for (int x = *scale; unit == 1 && x < 127; x++) want /= 2;
                    T_CHECK(got == (float)want, "%s: expert %d, row %d, column %d: %g, not %g", f->name, e, r, k,
                            (double)got, want);
                }
        gmm_ckpt_plan_destroy(m.plan);
        if (t != memory) gmm_ckpt_table_destroy(t);
        gmm_ckpt_table_destroy(memory);
    }
}

/* ------------------------------------------------------------------------------------------------ Whole sources --- */

/* A source model of two layers: the rows of a scheme that have this expert form and this scaling. */
typedef struct model_kind { const char *scheme; gmm_ckpt_form form; gmm_scaling scaling; int fp8; } model_kind;
static const model_kind model_kinds[] = {
    {"megatron", GMM_CKPT_EACH, GMM_SCALING_128X128, 0}, {"megatron", GMM_CKPT_EACH, GMM_SCALING_128X128, 1},
    {"megatron", GMM_CKPT_STACKED, GMM_SCALING_128X128, 0}, {"sequential", GMM_CKPT_EACH, GMM_SCALING_128X128, 0},
    {"legacy", GMM_CKPT_WIDE, GMM_SCALING_NONE, 0}, {"mixtral", GMM_CKPT_EACH, GMM_SCALING_128X128, 0},
    {"mixtral", GMM_CKPT_EACH, GMM_SCALING_128X128, 1}, {"qwen2-moe", GMM_CKPT_EACH, GMM_SCALING_128X128, 0},
    {"qwen2-moe", GMM_CKPT_EACH, GMM_SCALING_128X128, 1}, {"qwen3-moe", GMM_CKPT_EACH, GMM_SCALING_128X128, 0},
    {"deepseek-v3", GMM_CKPT_EACH, GMM_SCALING_128X128, 0}, {"deepseek-v3", GMM_CKPT_EACH, GMM_SCALING_128X128, 1},
    {"fused", GMM_CKPT_STACKED, GMM_SCALING_NONE, 0}, {"fused-transposed", GMM_CKPT_STACKED, GMM_SCALING_NONE, 0},
    {"gpt-oss", GMM_CKPT_STACKED, GMM_SCALING_NONE, 0}, {"gpt-oss", GMM_CKPT_STACKED, GMM_SCALING_MX32, 0}};

enum { MODEL_TENSORS = 256, MODEL_E = 4, MODEL_F = 32, MODEL_H = 64, MODEL_S = 96 };

typedef struct model_tensor { char name[120]; gmm_dtype dtype; int64_t shape[GMM_CKPT_RANK + 1]; gmm_ckpt_row row;
                              int layer, expert; } model_tensor;
typedef struct model { const model_kind *kind; model_tensor t[MODEL_TENSORS]; int n; } model;

/* Whether the layout has this row of the scheme. Rows of linears that are not experts belong to every layout. */
static int model_has(const model_kind *k, const gmm_ckpt_row *row) {
    const int expert = row->slot == GMM_CKPT_FC1 || row->slot == GMM_CKPT_FC2;
    if (row->kind > GMM_CKPT_SCALE || (row->kind == GMM_CKPT_SCALE && row->scaling == GMM_SCALING_128X128 &&
                                       (!k->fp8 || !strstr(row->pattern, "_scale_inv")))) return 0;
    if (!expert) return 1;
    if (row->kind != GMM_CKPT_BIAS && (row->scaling == GMM_SCALING_MX32) != (k->scaling == GMM_SCALING_MX32)) return 0;
    return (row->form == GMM_CKPT_EACH) == (k->form == GMM_CKPT_EACH);
}

static void model_begin(model *m, const model_kind *k) {
    const gmm_ckpt_scheme *scheme = gmm_ckpt_scheme_of(k->scheme);
    memset(m, 0, sizeof *m);
    m->kind = k;
    for (int l = 0; l < 2; l++)
        for (int r = 0; r < scheme->count; r++) {
            const gmm_ckpt_row *row = &scheme->rows[r];
            const int each = row->form == GMM_CKPT_EACH && strstr(row->pattern, "{e}");
            const int64_t halves = row->half == GMM_CKPT_BOTH ? 2 : 1, e = row->form == GMM_CKPT_EACH ? 1 : MODEL_E;
            if (!model_has(k, row)) continue;
            for (int expert = 0; expert < (each ? MODEL_E : 1); expert++) {
                model_tensor *t = &m->t[m->n++];
                int64_t rows = 0, cols = 0, *d = t->shape;
                char *to = t->name;
                MUST(m->n <= MODEL_TENSORS);
                for (const char *from = row->pattern; *from; from += *from == '{' ? 3 : 1)
                    to += sprintf(to, *from == '{' ? "%d" : "%c", *from != '{' ? *from : from[1] == 'L' ? l : expert);
                t->row = *row;
                t->layer = l;
                t->expert = each ? expert : -1;
                t->dtype = GMM_BF16;
                if (row->slot == GMM_CKPT_FC1) { rows = halves * MODEL_F; cols = MODEL_H; }
                if (row->slot == GMM_CKPT_FC2) { rows = MODEL_H; cols = MODEL_F; }
                if (row->slot == GMM_CKPT_ROUTER) { rows = MODEL_E; cols = MODEL_H; }
                if (row->slot == GMM_CKPT_ROUTER_CORRECTION) rows = MODEL_E;
                if (row->slot == GMM_CKPT_SHARED_FC1) { rows = halves * MODEL_S; cols = MODEL_H; }
                if (row->slot == GMM_CKPT_SHARED_FC2) { rows = MODEL_H; cols = MODEL_S; }
                if (row->slot == GMM_CKPT_SHARED_GATE) { rows = 1; cols = MODEL_H; }
                if (row->kind == GMM_CKPT_BIAS) cols = 0;
                if (k->fp8 && (row->scaling == GMM_SCALING_128X128 || row->slot == GMM_CKPT_SHARED_FC1 ||
                               row->slot == GMM_CKPT_SHARED_FC2))
                    t->dtype = row->kind == GMM_CKPT_SCALE ? GMM_F32 : GMM_E4M3;
                if (row->scaling == GMM_SCALING_MX32) t->dtype = GMM_U8;
                if (row->kind == GMM_CKPT_SCALE && row->scaling == GMM_SCALING_128X128)
                    rows = (rows + 127) / 128, cols = (cols + 127) / 128;
                if (row->scaling == GMM_SCALING_MX32) cols /= 32;
                if (row->form == GMM_CKPT_STACKED) *d++ = e;
                if (row->transposed) { const int64_t swap = rows; rows = cols; cols = swap; }
                *d++ = rows * (row->form == GMM_CKPT_TALL ? e : 1);
                if (cols) *d++ = cols * (row->form == GMM_CKPT_WIDE ? e : 1);
                if (row->scaling == GMM_SCALING_MX32 && row->kind == GMM_CKPT_WEIGHT) *d++ = 16;
                *d = -1;
            }
        }
    for (int l = 0; l < 2; l++) { /* a tensor that belongs to no expert */
        sprintf(m->t[m->n].name, "%slayers.%d.norm.weight", strstr(m->t[0].name, "decoder") ? "decoder." : "model.", l);
        m->t[m->n].shape[0] = MODEL_H;
        m->t[m->n].shape[1] = -1;
        m->t[m->n].layer = l;
        m->t[m->n].expert = -1;
        m->t[m->n].row.slot = GMM_CKPT_SLOT_ANY;
        m->t[m->n++].dtype = GMM_BF16;
    }
}

/* A table of names and shapes without data; tensors without a name are left out. */
static gmm_ckpt_table *model_table(const model *m, const char *front) {
    gmm_ckpt_table *t = table_new();
    for (int i = 0; i < m->n; i++) {
        char name[200];
        gmm_ckpt_tensor x = shaped(name, m->t[i].dtype, m->t[i].shape);
        gmm_ckpt_report report;
        gmm_error error;
        if (!*m->t[i].name) continue;
        snprintf(name, sizeof name, "%s%s", front, m->t[i].name);
        T_OK_TEXT(gmm_ckpt_table_add_storage(t, NULL, x.bytes, &x.storage, &error), error.text);
        T_OK_TEXT(gmm_ckpt_table_add(t, &x, &report), report.error.text);
    }
    return t;
}

typedef struct model_way { int64_t experts; int skip, grouped, drop_wrappers; const char *prefix, *front; } model_way;

/* Scans and plans as convert_checkpoint does. *plan, if wanted, is destroyed by the caller. */
static gmm_status model_plan(const model *m, const model_way *way, gmm_ckpt_plan **plan, gmm_ckpt_report *report) {
    static const char *const wrappers[] = {"module", "_orig_mod"};
    gmm_ckpt_table *t = model_table(m, way->front ? way->front : "");
    gmm_ckpt_linear *l = NULL;
    gmm_ckpt_plan *made_plan = NULL;
    int64_t n = 0;
    gmm_status s;
    call c;
    call_begin(&c, t, m->kind->scheme, "megatron");
    c.source.extra = GMM_CKPT_EXTRA_KEEP;
    c.source.stated.known = !c.source.scheme->glu_known;
    c.source.skip_missing = way->skip;
    c.source.wrappers = wrappers;
    c.source.wrapper_count = 2;
    c.source.prefix = way->prefix;
    c.target.drop_wrappers = way->drop_wrappers;
    if (m->kind->fp8 || m->kind->scaling == GMM_SCALING_MX32) c.target.dtype = GMM_BF16;
    s = gmm_ckpt_scan(&c.source, way->experts ? way->experts : m->kind->form == GMM_CKPT_WIDE ? MODEL_E : 0, &l, &n,
                      NULL, report);
    for (int64_t i = 0; i < n; i++) {
        l[i].grouped_weight = l[i].grouped_bias = way->grouped;
        if (l[i].slot == GMM_CKPT_ROUTER && way->experts) MUST(l[i].spare == l[i].out - way->experts);
        if (l[i].slot <= GMM_CKPT_FC2)
            MUST(l[i].scaling == (m->kind->fp8 ? GMM_SCALING_128X128 : m->kind->scaling == GMM_SCALING_MX32
                                                                           ? GMM_SCALING_MX32 : GMM_SCALING_NONE));
    }
    if (!s) s = gmm_ckpt_plan_create(&made_plan, &c.source, &c.target, l, n, NULL, report);
    if (!s) T_OK_TEXT(gmm_ckpt_verify(made_plan, NULL, 0, &report->error), report->error.text);
    gmm_ckpt_linears_release(l, NULL);
    if (plan && !s) {
        *plan = made_plan; /* the targets alone are looked at */
    } else {
        gmm_ckpt_plan_destroy(made_plan);
    }
    gmm_ckpt_table_destroy(t);
    return s;
}

static void model_refused(const model *m, const model_way *way, const char *what, const char *name) {
    gmm_ckpt_report report;
    const gmm_status s = model_plan(m, way, NULL, &report);
    T_CHECK(s != GMM_OK, "%s (%s): %s passed", m->kind->scheme, m->kind->fp8 ? "fp8" : "16 bits", what);
    T_CHECK(strstr(report.error.text, name) || strstr(report.key, name), "%s: %s: \"%s\" (key %s) lacks \"%s\"",
            m->kind->scheme, what, report.error.text, report.key, name);
}
#define model_refused(...) T_CALL(model_refused, __VA_ARGS__)

static void model_missing(int kind) { /* removing any tensor of an expert is an error that names it */
    static model m;
    const model_way way = {0};
    gmm_ckpt_report report;
    model_begin(&m, &model_kinds[kind]);
    T_OK_TEXT(model_plan(&m, &way, NULL, &report), report.error.text);
    MUST(report.missing == 0);
    for (int i = 0; i < m.n - 2; i++) {
        char name[120], shown[120];
        strcpy(name, m.t[i].name);
        strcpy(shown, name);
        if (m.t[i].row.kind == GMM_CKPT_SCALE && strstr(shown, "_scale")) *strstr(shown, "_scale") = 0;
        m.t[i].name[0] = 0;
        model_refused(&m, &way, name, shown);
        strcpy(m.t[i].name, name);
    }
}

static void model_experts(int kind) { /* experts or layers that some or all tensors lack */
    static model m, whole_model;
    const model_way way = {0};
    model_way stated = {0};
    gmm_ckpt_report report;
    const int each = model_kinds[kind].form == GMM_CKPT_EACH;
    model_begin(&whole_model, &model_kinds[kind]);
    for (int which = 1; which <= 3; which++) { /* FC1, FC2, both */
        m = whole_model;
        for (int i = 0; i < m.n; i++) {
            const gmm_ckpt_row *row = &m.t[i].row;
            const int mine = (row->slot == GMM_CKPT_FC1 && which & 1) || (row->slot == GMM_CKPT_FC2 && which & 2);
            if (!mine || m.t[i].layer != 1) continue;
            if (m.t[i].expert == MODEL_E - 1) m.t[i].name[0] = 0;
            if (row->form == GMM_CKPT_STACKED) m.t[i].shape[0]--;
            if (row->form == GMM_CKPT_TALL) m.t[i].shape[0] = m.t[i].shape[0] / MODEL_E * (MODEL_E - 1);
            if (row->form == GMM_CKPT_WIDE) m.t[i].shape[1] = m.t[i].shape[1] / MODEL_E * (MODEL_E - 1);
        }
        if (model_kinds[kind].form != GMM_CKPT_WIDE || which < 3) /* the shape does not tell the number of experts */
            model_refused(&m, &way, which == 1 ? "fc1's last expert" : which == 2 ? "fc2's last expert" : "an expert",
                          each ? "3" : "layers.1.");
        if (each && which == 3) { /* the router has one row per expert of the other tensors */
            T_OK_TEXT(model_plan(&m, &(model_way){.skip = 1}, NULL, &report), report.error.text);
            MUST(report.missing > 0);
        }
    }
    for (int by = -1; by <= 2; by += 3) { /* routers with fewer rows, or spare ones */
        m = whole_model;
        for (int i = 0; i < m.n; i++)
            if (m.t[i].row.slot == GMM_CKPT_ROUTER || m.t[i].row.slot == GMM_CKPT_ROUTER_CORRECTION)
                m.t[i].shape[0] += by;
        stated.experts = MODEL_E;
        if (by < 0) model_refused(&m, &way, "rows of a router", "router");
        else if (model_kinds[kind].form != GMM_CKPT_WIDE) model_refused(&m, &way, "spare rows", "state");
        if (by > 0) T_OK_TEXT(model_plan(&m, &stated, NULL, &report), report.error.text);
        else MUST(model_plan(&m, &stated, NULL, &report) != GMM_OK);
    }
    for (int slot = 0; slot < 2; slot++) { /* feature counts that differ from the other linear's: rows, then columns */
        for (int side = 0; side < 2; side++) {
            m = whole_model;
            for (int i = 0; i < m.n; i++) {
                const gmm_ckpt_row *row = &m.t[i].row;
                const int front = row->form == GMM_CKPT_STACKED, rows = side == 0;
                if ((int)row->slot != slot || row->kind == GMM_CKPT_SCALE || (row->kind == GMM_CKPT_BIAS && !rows))
                    continue;
                if (row->kind == GMM_CKPT_BIAS) m.t[i].shape[front] *= 3;
                else m.t[i].shape[front + (rows == (row->transposed != 0))] *= 3;
            }
            model_refused(&m, &way, side ? "other columns" : "other rows", "layers.0.");
        }
    }
    m = whole_model;
    for (int i = 0; i < m.n; i++) {
        char *at = strstr(m.t[i].name, "layers.1.");
        if (at) at[7] = '6';
    }
    model_refused(&m, &way, "a gap of layers", "layers.{1-5}");
    MUST(model_plan(&m, &(model_way){.skip = 1}, NULL, &report) == GMM_OK);
    if (!each) return;
    m = whole_model;
    for (int i = 0; i < m.n; i++)
        if (m.t[i].expert == 1 || m.t[i].expert == 3) m.t[i].name[0] = 0;
    model_refused(&m, &way, "two experts of two layers", "{1,3}");
    model_refused(&m, &way, "two experts of two layers", "layers.{0-1}.");
}

static void model_partial(int kind) { /* missing tensors are skipped and counted; stacked tensors must be complete */
    static model m;
    model_way way = {0};
    gmm_ckpt_report report;
    gmm_ckpt_plan *plan = NULL;
    const char *fc2 = ML "linear_fc2.weight3";
    int64_t before, gone = 0;
    model_begin(&m, &model_kinds[kind]);
    T_OK_TEXT(model_plan(&m, &way, &plan, &report), report.error.text);
    before = count(gmm_ckpt_plan_targets(plan));
    gmm_ckpt_plan_destroy(plan);
    for (int i = 0; i < m.n; i++)
        if (m.t[i].row.slot == GMM_CKPT_FC2 && m.t[i].layer == 0 && m.t[i].expert == 3) {
            gone += m.t[i].row.kind != GMM_CKPT_SCALE;
            m.t[i].name[0] = 0;
        }
    model_refused(&m, &way, "fc2's last expert", "3");
    way.skip = 1;
    T_OK_TEXT(model_plan(&m, &way, &plan, &report), report.error.text);
    MUST(gone && report.missing == gone);
    T_CHECK(gmm_ckpt_table_find(gmm_ckpt_plan_targets(plan), fc2) < 0, "%s is there", fc2);
    MUST(gmm_ckpt_table_find(gmm_ckpt_plan_targets(plan), ML "linear_fc1.weight3") >= 0);
    T_CHECK(count(gmm_ckpt_plan_targets(plan)) == before - report.missing, "%lld targets, %lld missing of %lld",
            (long long)count(gmm_ckpt_plan_targets(plan)), (long long)report.missing, (long long)before);
    gmm_ckpt_plan_destroy(plan);
    way.grouped = 1;
    model_refused(&m, &way, "a stack without its last expert", "3");
}

static void model_wrapped(int kind) { /* wrapper prefixes are removed from all names or from none */
    static const struct { const char *front, *prefix, *want; int drop; } ways[] = {
        {"module.", NULL, "module.", 0}, {"module.", "module.", "module.", 0}, {"module.", "", "module.", 0},
        {"module.", NULL, "", 1}, {"module.module.", "module.", "module.module.", 0},
        {"_orig_mod.module.lm.", NULL, "_orig_mod.module.lm.", 0}, {"module.lm.", "lm.", "module.lm.", 0},
        {"module.lm.", "module.lm.", "module.lm.", 0}, {"module.lm.", NULL, "lm.", 1},
        {"lm.module.", NULL, "lm.module.", 0}, {"module.", "module.", "", 1}};
    static model m;
    gmm_ckpt_report report;
    model_begin(&m, &model_kinds[kind]);
    for (int i = 0; i < T_COUNT(ways); i++) {
        const model_way way = {.front = ways[i].front, .prefix = ways[i].prefix, .drop_wrappers = ways[i].drop};
        const size_t length = strlen(ways[i].want);
        gmm_ckpt_plan *plan = NULL;
        const gmm_ckpt_tensor *t;
        int64_t n;
        T_OK_TEXT(model_plan(&m, &way, &plan, &report), report.error.text);
        MUST(report.kept == 2);
        t = gmm_ckpt_table_tensors(gmm_ckpt_plan_targets(plan), &n);
        for (int64_t k = 0; k < n; k++)
            T_CHECK(!strncmp(t[k].name, ways[i].want, length) && (!strncmp(t[k].name + length, "decoder.", 8) ||
                    !strncmp(t[k].name + length, "model.", 6)), "%s, prefix %s: %s", ways[i].front,
                    ways[i].prefix ? ways[i].prefix : "found", t[k].name);
        gmm_ckpt_plan_destroy(plan);
    }
    MUST(model_plan(&m, &(model_way){.front = "module.", .prefix = "_orig_mod."}, NULL, &report) == GMM_OK &&
         report.matched == 0);
    MUST(model_plan(&m, &(model_way){.front = "module.", .prefix = "module"}, NULL, &report) == GMM_E_ARG);
    MUST(strstr(report.error.text, "end with a dot"));
}

/* an inner wrapper segment stays if the segments before it stay, also in optimizer state */
static void inner_wrappers(int arg) {
    static const char *const wrappers[] = {"module"}, *const states_of[] = {"", "optimizer.exp_avg."};
    gmm_ckpt_table *t = table_new();
    gmm_ckpt_linear l = linear_of(NULL, 2, 4, 3, 0, 0);
    call c;
    plan_run m;
    (void)arg;
    l.layer = 7;
    for (int e = 0; e < 2; e++)
        for (int s = 0; s < 2; s++) {
            char name[120];
            snprintf(name, sizeof name, "%sdecoder.layers.7.module.mlp.experts.local_experts.%d.linear_fc1.weight",
                     s ? "optimizer.exp_avg.module." : "", e);
            add(t, name, GMM_F32, SHAPE(4, 3), NULL);
        }
    call_begin(&c, t, "sequential", "megatron");
    c.source.wrappers = wrappers;
    c.source.wrapper_count = 1;
    c.source.states = states_of;
    c.source.state_count = 2;
    m = plan_ok(&c, &l, 1);
    (void)get(m.targets, "decoder.layers.7.module.mlp.experts.linear_fc1.weight1");
    (void)get(m.targets, "optimizer.exp_avg.module.decoder.layers.7.module.mlp.experts.linear_fc1.weight0");
    gmm_ckpt_plan_destroy(m.plan);
    c.target.drop_wrappers = 1;
    m = plan_ok(&c, &l, 1);
    (void)get(m.targets, "optimizer.exp_avg.decoder.layers.7.mlp.experts.linear_fc1.weight0");
    gmm_ckpt_plan_destroy(m.plan);
    c.target.drop_wrappers = 0;
    /* the prefix changes from "model" to "decoder", so an inner wrapper cannot be kept */
    c.target.scheme = gmm_ckpt_scheme_of("fused");
    m = plan_ok(&c, &l, 1);
    (void)get(m.targets, "model.layers.7.mlp.experts.gate_up_proj");
    (void)get(m.targets, "optimizer.exp_avg.module.model.layers.7.mlp.experts.gate_up_proj");
    gmm_ckpt_plan_destroy(m.plan);
    add(t, "module.decoder.layers.8.mlp.experts.local_experts.0.linear_fc1.weight", GMM_F32, SHAPE(4, 3), NULL);
    add(t, "decoder.layers.8.mlp.experts.local_experts.1.linear_fc1.weight", GMM_F32, SHAPE(4, 3), NULL);
    c.source.state_count = 1;
    c.source.extra = GMM_CKPT_EXTRA_KEEP;
    l.layer = 8;
    plan_refused(&c, &l, 1, GMM_CKPT_AMBIGUOUS, "drop_wrappers");
    c.target.drop_wrappers = 1;
    m = plan_ok(&c, &l, 1);
    gmm_ckpt_plan_destroy(m.plan);
    gmm_ckpt_table_destroy(t);
}

/* Extra tensors of one name: two of one part, the same one of several parts, and those of experts, which differ between
   ranks. Every tensor of the source is counted. */
static void extra_names(int arg) {
    static const char *const wrappers[] = {"module"};
    static const struct { const char *scheme, *name; int reason; } ways[] = {
        {"megatron", "embedding.weight", 0},
        {"megatron", ML "linear_fc1.input_amax0", GMM_CKPT_AMBIGUOUS},
        {"megatron", ML "linear_fc1._extra_state", GMM_CKPT_AMBIGUOUS},
        {"megatron", ML "linear_fc1.bias0", GMM_CKPT_AMBIGUOUS},
        {"megatron", "decoder.layers.0.mlp.router.note", 0},
        {"sequential", ML "local_experts.1.linear_fc2.note", GMM_CKPT_AMBIGUOUS},
        {"mixtral", HL "block_sparse_moe.experts.1.w1.note", 0},
        {"fused", HL "mlp.experts.note", GMM_CKPT_AMBIGUOUS},
        {"module", "fc.note", GMM_CKPT_AMBIGUOUS},
        {"module", "other.note", 0}};
    static const int32_t sizes[] = {1, 2};
    gmm_ckpt_report report;
    gmm_ckpt_table *t;
    call c;
    plan_run m;
    (void)arg;
    for (int shape = 2; shape < 4; shape++) {
        t = table_new();
        add(t, "module.lm_head.weight", GMM_F32, SHAPE(2), NULL);
        add(t, "lm_head.weight", GMM_F32, SHAPE(shape), NULL);
        call_begin(&c, t, "module", "module");
        c.source.wrappers = wrappers;
        c.source.wrapper_count = 1;
        c.source.extra = GMM_CKPT_EXTRA_KEEP;
        m = plan_ok(&c, NULL, 0);
        MUST(count(m.targets) == 2);
        gmm_ckpt_plan_destroy(m.plan);
        c.target.drop_wrappers = 1;
        plan_refused(&c, NULL, 0, GMM_CKPT_DUPLICATE_KEY, "another tensor, \"lm_head.weight\"");
        gmm_ckpt_table_destroy(t);
    }
    for (int i = 0; i < T_COUNT(ways); i++)
        for (int axis = 0; axis < 3; axis++) { /* the ranks of two parts differ in EP, ETP or GTP */
            const gmm_ckpt_linear l = linear_of("fc", 2, 4, 4, 1, 0);
            gmm_ckpt_plan *plan;
            call_begin(&c, NULL, ways[i].scheme, ways[i].scheme);
            c.source.extra = GMM_CKPT_EXTRA_KEEP;
            c.source.skip_missing = 1;
            c.source.part_count = 2;
            for (int p = 0; p < 2; p++) {
                gmm_ckpt_rank *r = &c.part[p].rank;
                c.part[p].table = t = table_new();
                add(t, ways[i].name, GMM_F32, SHAPE(3), NULL);
                r->ep_size = sizes[axis == 0];
                r->etp_size = sizes[axis == 1];
                r->gtp_size = sizes[axis == 2];
                *(axis == 0 ? &r->ep_rank : axis == 1 ? &r->etp_rank : &r->gtp_rank) = p;
            }
            if (ways[i].reason && axis < 2) {
                plan_refused(&c, &l, 1, (gmm_ckpt_reason)ways[i].reason, ways[i].name);
            } else {
                T_OK_TEXT(gmm_ckpt_plan_create(&plan, &c.source, &c.target, &l, 1, NULL, &report), report.error.text);
                T_CHECK(report.kept == 1 && report.merged == 1 && !report.matched && !report.dropped, "%s",
                        ways[i].name);
                gmm_ckpt_plan_destroy(plan);
            }
            for (int p = 0; p < 2; p++) gmm_ckpt_table_destroy((gmm_ckpt_table *)(uintptr_t)c.part[p].table);
        }
}

static void legacy_shapes(int arg) { /* shapes as Megatron declares them; [E, F, H] is read as well */
    enum { E = 3, F = 4, H = 5 };
    float w[E * F * H];
    gmm_ckpt_table *t = table_new();
    gmm_ckpt_linear l = linear_of(NULL, E, H, F, 0, 0);
    call c;
    plan_run m;
    l.slot = GMM_CKPT_FC2;
    for (int i = 0; i < E * F * H; i++) w[i] = (float)i; /* [expert][in][out] */
    if (arg) add(t, ML "weight2", GMM_F32, SHAPE(E, F, H), w);
    else add(t, ML "weight2", GMM_F32, SHAPE(E * F, H), w);
    call_begin(&c, t, "legacy", "legacy");
    m = plan_ok(&c, &l, 1);
    apply(&m, 0);
    MUST(get(m.targets, ML "weight2")->rank == 2 && get(m.targets, ML "weight2")->shape[0] == E * F &&
         get(m.targets, ML "weight2")->shape[1] == H);
    t_same("weight2", m.memory, w, sizeof w);
    gmm_ckpt_plan_destroy(m.plan);
    c.target.scheme = gmm_ckpt_scheme_of("megatron");
    m = plan_ok(&c, &l, 1);
    apply(&m, -1 * arg);
    for (int e = 0; e < E; e++) {
        float got[H * F];
        char name[80];
        snprintf(name, sizeof name, ML "linear_fc2.weight%d", e);
        memcpy(got, m.memory + get(m.targets, name)->offset, sizeof got);
        for (int h = 0; h < H; h++)
            for (int f = 0; f < F; f++) MUST(got[h * F + f] == (float)((e * F + f) * H + h));
    }
    gmm_ckpt_plan_destroy(m.plan);
    gmm_ckpt_table_destroy(t);
}

static void upstream_chains(int arg) { /* upstream applies modules in turn, each to the keys that earlier ones left */
    static const struct { const char *path[2]; int grouped[2]; const char *in[6], *out[6]; } cases[] = {
        {{"a.fc", "fc"}, {1, 1}, {"a.fc.weight0", "a.fc.weight1", "fc.weight0", "fc.weight1"},
         {"a.fc.weight", "fc.weight0", "fc.weight1"}}, /* "a.fc.weight" ends with "fc.weight" too */
        {{"fc", "a.fc"}, {1, 1}, {"a.fc.weight0", "a.fc.weight1"}, {"a.fc.weight"}},
        {{"a.fc", "fc"}, {0, 0}, {"a.fc.weight:2", "fc.weight:2"}, {"a.fc.weight0", "a.fc.weight1", "fc.weight"}},
        {{"a.fc", "fc"}, {0, 1}, {"a.fc.weight:2"}, {"a.fc.weight"}},
        {{"fc", "a.fc"}, {1, 0}, {"a.fc.weight0", "a.fc.weight1"}, {"a.fc.weight0", "a.fc.weight1"}}};
    (void)arg;
    for (int64_t i = 0; i < T_COUNT(cases); i++) {
        gmm_ckpt_table *t = keys(cases[i].in);
        gmm_ckpt_part part = GMM_ZERO;
        gmm_ckpt_linear l[2];
        plan_run m;
        part.table = t;
        for (int k = 0; k < 2; k++) l[k] = linear_of(cases[i].path[k], 2, 4, 0, cases[i].grouped[k], 0);
        m = normalize(t, NULL, l, 2, GMM_CKPT_UPSTREAM);
        m.parts = &part;
        same_keys(m.targets, cases[i].out);
        if (i == 0) EXPECT_TENSOR(&m, "a.fc.weight", SHAPE(2, 4), "a.fc.weight0", -1, "a.fc.weight1");
        if (i == 3) t_same("folded again", target_bytes(&m, "a.fc.weight"), source_bytes(t, "a.fc.weight"), 16);
        if (i == 4) EXPECT_TENSOR(&m, "a.fc.weight1", SHAPE(4), "a.fc.weight1", -1);
        gmm_ckpt_plan_destroy(m.plan);
        gmm_ckpt_table_destroy(t);
    }
}

static void true_reasons(int arg) { /* following the advice of an error message succeeds */
    gmm_ckpt_table *t = KEYS("layer.weight0", "layer.weight1", "a.fc.weight0", "b.fc.weight0");
    gmm_ckpt_linear l = linear_of("", 2, 4, 0, 1, 0), fc = linear_of("fc", 1, 4, 0, 1, 0);
    gmm_ckpt_cut cut = GMM_ZERO;
    gmm_ckpt_report report;
    gmm_ckpt_plan *plan;
    call c;
    (void)arg;
    refused(t, "layer", &l, GMM_CKPT_ARGUMENT, "");
    MUST(gmm_ckpt_normalize_hook(&plan, t, "layer", &l, GMM_CKPT_SAFE, NULL, &report) == GMM_E_ARG);
    MUST(strstr(report.error.text, "\"layer\"") && strstr(report.error.text, "end with a dot"));
    MUST(gmm_ckpt_normalize_map(&plan, t, &fc, 1, GMM_CKPT_SAFE, NULL, &report) == GMM_E_KEY);
    MUST(report.reason == GMM_CKPT_AMBIGUOUS && !strstr(report.error.text, "state the prefix") &&
         strstr(report.error.text, "longer paths"));
    MUST(gmm_ckpt_normalize_map(&plan, t, &l, 1, GMM_CKPT_SAFE, NULL, &report) == GMM_E_ARG);
    MUST(!strstr(report.error.text, "state the prefix"));
    call_begin(&c, t, "module", "module");
    c.source.extra = GMM_CKPT_EXTRA_KEEP;
    c.target.cuts = &cut;
    l = linear_of("layer", 2, 4, 0, 1, 0);
    cut.row0 = -1;
    plan_refused(&c, &l, 1, GMM_CKPT_ARGUMENT, "row0 -1");
    cut.row0 = 3;
    cut.rows = cut.stored_rows = 2;
    plan_refused(&c, &l, 1, GMM_CKPT_ARGUMENT, "the 4 rows");
    cut.row0 = 0;
    cut.stored_rows = 1;
    plan_refused(&c, &l, 1, GMM_CKPT_ARGUMENT, "stored_rows 1");
    gmm_ckpt_table_destroy(t);
}

/* Weights of FP8, FP4 and their scales. */
static void tests_of_formats(void) {
    for (int i = 0; i < 6; i++)
        t_add_host(fp8_blocks, i, "checkpoint %s blocks with tails, %s", i % 2 ? "e5m2" : "e4m3",
                   i < 2 ? "memory" : i < 4 ? "least scratch" : "callbacks");
    t_add_host(fp8_stacked, 0, "checkpoint blocks of experts one below another");
    for (int i = 0; i < 2; i++) t_add_host(fp8_mixed_forms, i, "checkpoint blocks %s", i ? "of each, scales of all"
                                                                                     : "of all, scales of each");
    for (int i = 0; i < 2; i++)
        t_add_host(fp8_plain, i, "checkpoint scales beside 16 bits%s", i ? ", of one expert" : "");
    t_add_host(fp8_kept, 0, "checkpoint scales missing; scales move with their weight");
    for (int i = 0; i < 2 * T_COUNT(qformats); i++)
        t_add_host(quantized, i, "checkpoint %s, %s: forms, ranks, blocks", qformats[i / 2].name,
                   i % 2 ? "fc2" : "fc1");
    for (int i = 0; i < T_COUNT(qformats); i++) {
        if (qformats[i].rows != 128) t_add_host(quantized_own_scales, i, "checkpoint %s: scales of each ETP rank",
                                                qformats[i].name);
        t_add_host(quantized_tail, i, "checkpoint %s: last GTP shard", qformats[i].name);
        t_add_host(quantized_normalizers, i, "checkpoint %s: normalizers", qformats[i].name);
        t_add_host(quantized_refused, i, "checkpoint %s: scales that do not fit", qformats[i].name);
        for (int way = 0; way < 3; way++)
            if (qformats[i].scaling != GMM_SCALING_NV16)
                t_add_host(quantized_values, 3 * i + way, "checkpoint %s: values, %s", qformats[i].name,
                           way == 0 ? "memory" : way == 1 ? "least scratch" : "callbacks");
    }
    t_add_host(quantized_cuts, 0, "checkpoint blocks that a boundary cuts");
    t_add_host(quantized_gate_end, 0, "checkpoint gate rows that end inside a block");
    for (int i = 0; i < 4; i++) t_add_host(quantized_names, i, "checkpoint NVFP4 of names %d", i);
    t_add_host(quantized_beside, 0, "checkpoint scales that a format lacks");
    t_add_host(quantized_amaxes, 0, "checkpoint amaxes that are not joined");
    t_add_host(quantized_vectors, 0, "checkpoint vectors of codes");
}

void tests_checkpoint(void) {
    for (int k = 0; k < T_COUNT(model_kinds); k++) {
        const char *form = model_kinds[k].form == GMM_CKPT_EACH ? "each" : "stacked";
        const char *bits = model_kinds[k].fp8 ? ", fp8" : model_kinds[k].scaling == GMM_SCALING_MX32 ? ", blocks" : "";
        t_add_host(model_missing, k, "checkpoint source without one tensor: %s, %s%s", model_kinds[k].scheme, form,
                   bits);
        t_add_host(model_experts, k, "checkpoint source without experts, rows, features: %s, %s%s",
                   model_kinds[k].scheme,
                   form, bits);
        if (model_kinds[k].form == GMM_CKPT_EACH)
            t_add_host(model_partial, k, "checkpoint partial source: %s%s", model_kinds[k].scheme, bits);
        t_add_host(model_wrapped, k, "checkpoint wrapped keys: %s, %s%s", model_kinds[k].scheme, form, bits);
    }
    t_add_host(inner_wrappers, 0, "checkpoint wrappers inside of keys");
    t_add_host(extra_names, 0, "checkpoint extra tensors of one name");
    t_add_host(legacy_shapes, 0, "checkpoint legacy weight2 is [E F, H]");
    t_add_host(legacy_shapes, 1, "checkpoint legacy weight2 [E, F, H] is read");
    t_add_host(upstream_chains, 0, "checkpoint upstream modules meet keys of one another");
    t_add_host(true_reasons, 0, "checkpoint reasons that are true");
    for (int i = 1; i <= 5; i++) t_add_host(hook, i, "checkpoint load hook %d", i);
    for (int i = 0; i < T_COUNT(neither); i++)
        t_add_host(hook_of_neither, i, "checkpoint load hook, %s", neither[i].name);
    t_add_host(hook_and_back, GMM_CKPT_SAFE, "checkpoint load hook, stacked and split again");
    t_add_host(hook_and_back, GMM_CKPT_UPSTREAM, "checkpoint load hook, stacked and split again, upstream");
    for (int i = 0; i < T_COUNT(map_cases); i++)
        t_add_host(map, i, "checkpoint map %s", map_cases[i].name);
    t_add_host(map_bytes, 0, "checkpoint map leaves other modules alone, bytes, safe");
    t_add_host(map_bytes, 1, "checkpoint map leaves other modules alone, bytes, upstream");
    t_add_host(splitter, 0, "checkpoint splitter");
    t_add_host(splitter_ranges, 0, "checkpoint splitter out of range");
    t_add_host(empty_segment, 0, "checkpoint keys with an empty segment");
    t_add_host(transposed_codes, 0, "checkpoint codes stored in x out are not dequantized");
    t_add_host(far_cut, 0, "checkpoint cut that does not fit 63 bits");
    t_add_host(flags, 0, "checkpoint flags, again, order, bias [E]");
    t_add_host(packed, 0, "checkpoint packed key for a grouped target");
    t_add_host(ranks, 4, "checkpoint EP rank 1 of global experts");
    t_add_host(ranks, 2, "checkpoint more experts than declared");
    t_add_host(both_layouts, 0, "checkpoint both layouts");
    t_add_host(split_failure, 0, "checkpoint a failed split changes nothing");
    t_add_host(mixed_dtypes, 0, "checkpoint mixed dtypes");
    t_add_host(interleave_values, 0, "checkpoint halves to blocks of 2, weight and bias");
    t_add_host(interleave_values, 1, "checkpoint blocks of 2 to halves, weight and bias");
    t_add_host(interleave_random, 0, "checkpoint blocks of every kind into one another");
    t_add_host(not_divisible, 0, "checkpoint not divisible");
    t_add_host(etp_merge, 0, "checkpoint ETP 2 to 1 of interleaved rows");
    t_add_host(glu_stated, 0, "checkpoint unknown gate and up layout");
    t_add_host(glu_stated, 1, "checkpoint contradicting gate and up layout");
    t_add_host(mixtral_ep, 0, "checkpoint mixtral to grouped, EP 4");
    t_add_host(qwen_indexed, 0, "checkpoint qwen3-moe to indexed");
    tests_of_formats();
    t_add_host(same_extent, 0, "checkpoint 2F = H");
    t_add_host(gpt_oss_bias, 0, "checkpoint gpt-oss rows and biases");
    for (int i = 0; i < 3; i++)
        t_add_host(mxfp4, i, "checkpoint gpt-oss MXFP4, %s",
                   i == 0 ? "memory" : i == 1 ? "least scratch" : "callbacks");
    t_add_host(sequential_round, 0, "checkpoint sequential, indexed, grouped");
    t_add_host(stored_keys, 0, "checkpoint stored keys");
    t_add_host(stored_keys, 1, "checkpoint singleton halves");
    t_add_host(states, 0, "checkpoint optimizer state moves alike");
    t_add_host(states_in_any_order, 0, "checkpoint states in any order");
    t_add_host(shard_members, 0, "checkpoint shard to members");
    t_add_host(views, 0, "checkpoint views alias");
    t_add_host(resume, 0, "checkpoint stop and resume after any move");
    t_add_host(resume, 1, "checkpoint ranges in another order");
    t_add_host(table_rules, 0, "checkpoint tables refuse");
    for (int what = 0; what < 3; what++)
        t_add_host(no_memory, what, "checkpoint every allocation fails: %s",
                   what == 0 ? "plan" : what == 1 ? "scan" : "map");
    t_add_host(extra_state, 0, "checkpoint extra state");
    t_add_host(every_pair, 0, "checkpoint fc1: every layout into every other");
    t_add_host(every_pair, 1, "checkpoint fc2: every layout into every other");
    t_add_host(every_rank, 0, "checkpoint fc1: EP and ETP grids into one another");
    t_add_host(every_rank, 1, "checkpoint fc2: EP and ETP grids into one another");
    t_add_host(large_matrices, 0, "checkpoint matrices of several tiles");
    t_add_host(few_moves, 0, "checkpoint stacks move at once");
    t_add_host(gtp_cuts, 0, "checkpoint GTP cuts of every kind");
    t_add_host(gtp_sources, 0, "checkpoint GTP shards come together");
    t_add_host(verify_finds, 0, "checkpoint verify finds what is wrong");
    t_add_host(io_faults, 0, "checkpoint every callback fails");
    t_add_host(io_faults, 1, "checkpoint every callback fails, other dtypes and padding");
    t_add_host(target_dtypes, 0, "checkpoint dtypes of weights and biases");
    t_add_host(target_dtypes, 1, "checkpoint dtypes of weights and biases, exchanged");
    t_add_host(own_moves, 0, "checkpoint moves of the caller");
    t_add_host(tags, 0, "checkpoint tags of kept tensors");
    t_add_host(own_scheme, 0, "checkpoint tensor scales and amaxes of an own scheme");
    t_add_host(own_scheme_refused, 0, "checkpoint own schemes out of range");
    t_add_host(same_names, 0, "checkpoint two tensors of one name");
    t_add_host(arguments, 0, "checkpoint arguments out of range");
    t_add_host(far_extents, 0, "checkpoint extents and loops that do not fit 63 bits");
    t_add_host(scan, 0, "checkpoint scan");
    t_add_host(scan_prefix, 0, "checkpoint scan beside another prefix");
    t_add_host(experts_of_ranks, 0, "checkpoint experts that EP does not divide");
    t_add_host(scan_gtp, 0, "checkpoint scan of GTP shards");
    t_add_host(scan_gtp_padding, 0, "checkpoint scan of GTP shards with padding");
    t_add_host(shared_and_router, 0, "checkpoint shared experts and router");
}
