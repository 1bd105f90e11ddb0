/* test_gtp_quant.c - quantize-then-gather on CPU ranks: gathered weights equal, bit for bit, those that one rank
   quantizes from the whole matrix. */
#include "gtp_world.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST = 8, LAYERS = 4, EXPERTS = 2, WEIGHTS = LAYERS * EXPERTS, VERSIONS = 4 };

/* ----------------------------------------------------------------------------------------------------- Formats --- */

typedef struct format { const char *name; gmm_format f; int64_t rows, cols; } format;
#define F(dtype_, scaling_, ...) {.dtype = GMM_##dtype_, .scaling = GMM_SCALING_##scaling_, __VA_ARGS__}
static const format formats[] = {
    {"bf16", F(NONE, NONE, .pow2 = 0), 40, 24}, {"bf16 padded", F(NONE, NONE, .pow2 = 0), 33, 7},
    {"fp8", F(E4M3, TENSOR, .pow2 = 0), 128, 64}, {"fp8 padded", F(E4M3, TENSOR, .pow2 = 0), 100, 48},
    {"fp8 e5m2", F(E5M2, TENSOR, .pow2 = 1), 72, 80}, {"fp8 delayed", F(E4M3, TENSOR, .delayed = 1), 96, 32},
    {"128x128", F(E4M3, 128X128, .pow2 = 1), 1024, 48}, {"128x128 padded", F(E4M3, 128X128, .pow2 = 1), 300, 272},
    {"128x128 one block", F(E4M3, 128X128, .pow2 = 0), 128, 144}, {"1x128", F(E4M3, 1X128, .pow2 = 1), 1024, 48},
    {"1x128 padded", F(E4M3, 1X128, .pow2 = 0), 304, 144}, {"mxfp8", F(E4M3, MX32, .pow2 = 0), 256, 64},
    {"mxfp8 padded", F(E4M3, MX32, .pow2 = 0), 136, 96}, {"mxfp8 K 128", F(E5M2, MX32, .pow2 = 0), 96, 128},
    {"mxfp8 K 192", F(E4M3, MX32, .square = 1), 160, 192}, {"mxfp4", F(E2M1, MX32, .pow2 = 0), 96, 64},
    {"nvfp4", F(E2M1, NV16, .square = 1), 256, 64}, {"nvfp4 padded", F(E2M1, NV16, .pow2 = 0), 80, 96},
    {"nvfp4 K 128", F(E2M1, NV16, .square = 1), 96, 128},
    {"nvfp4 odd blocks", F(E2M1, NV16, .four_over_six = 1, .e4m3_256 = 1), 208, 192}};
enum { FORMATS = T_COUNT(formats) };
#undef F

/* The argument of a case: a row of a table or a recipe; how many ranks, or another count; a variant. */
static int case_arg(int row, int count, int variant) { return row + 64 * count + 1024 * variant; }
static int row_of(int arg) { return arg % 64; }
static int count_of(int arg) { return arg / 64 % 16; }
static int variant_of(int arg) { return arg / 1024; }

static int is_turned(const format *f) {
    return f->f.scaling == GMM_SCALING_TENSOR || f->f.scaling == GMM_SCALING_128X128;
}
static gmm_dtype stored(const format *f) { return f->f.dtype ? f->f.dtype : GMM_BF16; }

/* Master weights. The last rows are up to a hundred times as large as the first ones, so that shards differ in their
   amax, and a rank that scales by its own one is found; some blocks are all zeros. */
static float value(const format *f, int version, int weight, int64_t row, int64_t col) {
    const uint64_t h = mix((uint64_t)(row * 8192 + col) * 64 + (uint64_t)(weight * VERSIONS + version) + 1);
    if (mix((uint64_t)(row / 32 * 999 + col / 64 + 7 * version)) % 11 == 0) return 0;
    return (float)((double)(h >> 11) * 0x1p-52 - 1.0) * (row >= f->rows * 7 / 8 ? 100.0f : row < 16 ? 1.0f : 3.0f);
}

/* The result of quantizing the whole matrix on one rank: codes, scales and amax of both directions. */
typedef struct copies { void *data[2], *scale[2]; float amax, largest; gmm_layout l[2]; } copies;

static gmm_context *plain_context(void) {
    static gmm_context *made;
    gmm_config config = GMM_ZERO;
    config.threads = 1;
    if (!made && gmm_create(&made, &config, NULL) != GMM_OK) abort();
    return made;
}

static float delayed_scale(int weight) { return (float)(1 + weight % 3) * 1.5f; }

static copies whole(const format *f, gmm_dtype source, int version, int weight, float amax_of_others) {
    gmm_context *ctx = plain_context();
    const size_t n = (size_t)(f->rows * f->cols);
    copies c;
    gmm_quantization q = GMM_ZERO;
    gmm_mat src, to[2];
    gmm_info info = GMM_ZERO;
    const float scale = delayed_scale(weight);
    float amax[2] = {0, 0};
    void *rows = t_host(n * 4);
    memset(&c, 0, sizeof c);
    for (size_t i = 0; i < n; i++)
        gmm_store(source, rows, (int64_t)i, value(f, version, weight, (int64_t)i / f->cols, (int64_t)i % f->cols));
    src = gmm_mat_packed(source, rows);
    if (f->f.dtype == GMM_NONE) {
        gmm_conversion d = GMM_ZERO;
        c.l[0].data_bytes = (int64_t)n * 2;
        c.data[0] = t_host(n * 2);
        to[0] = gmm_mat_packed(GMM_BF16, c.data[0]);
        d.rows = f->rows;
        d.cols = f->cols;
        d.src = &src;
        d.dst = &to[0];
        T_OK_TEXT(gmm_convert(ctx, &d, NULL, 0, NULL), gmm_last_error(ctx));
        return c;
    }
    for (int d = 0; d < 2; d++) {
        T_OK_TEXT(gmm_layout_of(f->f.dtype, f->f.scaling, GMM_SCALES_COMPACT, (gmm_direction)d, f->rows, f->cols,
                                &c.l[d], NULL), "");
        c.data[d] = t_host((size_t)c.l[d].data_bytes);
        c.scale[d] = t_host((size_t)c.l[d].scale_bytes);
        to[d] = gmm_mat_quantized(&f->f, (gmm_direction)d, c.data[d], c.scale[d], &amax[d]);
    }
    q.count = 1;
    q.rows = f->rows;
    q.cols = f->cols;
    q.format = &f->f;
    q.src = &src;
    q.rowwise = &to[0];
    q.columnwise = &to[1];
    q.scale = f->f.delayed ? &scale : NULL;
    T_OK_TEXT(gmm_quantize_query(ctx, GMM_OP_QUANTIZE, &q, &info), gmm_last_error(ctx));
    T_OK_TEXT(gmm_quantize(ctx, &q, t_workspace(info.workspace_bytes), info.workspace_bytes, NULL),
              gmm_last_error(ctx));
    c.largest = amax[0];
    if (amax_of_others > amax[0]) { /* the amax of the tensor's part on other TP ranks */
        amax[0] = amax[1] = amax_of_others;
        q.phase = GMM_QUANT_CAST;
        T_OK_TEXT(gmm_quantize(ctx, &q, t_workspace(info.workspace_bytes), info.workspace_bytes, NULL),
                  gmm_last_error(ctx));
    }
    c.amax = amax[0];
    return c;
}

static unsigned code_at(gmm_dtype dtype, const void *data, int64_t i) {
    const uint8_t *p = (const uint8_t *)data;
    if (dtype == GMM_E2M1) return p[i / 2] >> (i % 2 * 4) & 15u;
    return dtype == GMM_BF16 ? p[2 * i] | (unsigned)p[2 * i + 1] << 8 : p[i];
}

/* Compares matrix e of a view with the one-rank result; the first difference goes into `text`. */
static int differs(const format *f, const gmm_gtp_view *v, gmm_gtp_pass pass, int e, const copies *want, char *text,
                   size_t room) {
    const int d = pass == GMM_GTP_BACKWARD && f->f.dtype != GMM_NONE;
    const gmm_mat *m = d ? v->mat.columnwise : &v->mat;
    const int64_t bits = gmm_dtype_bits(stored(f)), lines = d ? f->cols : f->rows, along = d ? f->rows : f->cols;
    const int apart = d && f->f.scaling == GMM_SCALING_MX32;
    const int64_t ld = m->ld ? m->ld : apart ? f->cols : along, width = gmm_block_along(f->f.scaling);
    const char *data = m->table ? (const char *)m->table[e]
                                : (const char *)m->data + (int64_t)e * m->group_stride * bits / 8;
    const char *scale = m->scale_table ? (const char *)m->scale_table[e]
                        : m->scale     ? (const char *)m->scale + e * want->l[d].scale_bytes
                                       : NULL;
    for (int64_t l = 0; l < lines; l++) {
        for (int64_t a = 0; a < along; a++) {
            const int64_t here = apart ? a * ld + l : l * ld + a, there = apart ? a * f->cols + l : l * along + a;
            if (code_at(stored(f), data, here) == code_at(stored(f), want->data[d], there)) continue;
            snprintf(text, room, "%s, matrix %d, line %lld, element %lld: code 0x%x, not 0x%x", d ? "columnwise"
                     : "rowwise", e, (long long)l, (long long)a, code_at(stored(f), data, here),
                     code_at(stored(f), want->data[d], there));
            return 1;
        }
        for (int64_t j = 0; f->f.dtype && j < (width ? (along + width - 1) / width : 1); j++) {
            const int64_t size = want->l[d].scale_dtype == GMM_F32 ? 4 : 1;
            const int64_t i = size * gmm_scale_index(f->f.scaling, GMM_SCALES_COMPACT, (gmm_direction)d, lines, along,
                                                     l, j);
            if (!memcmp(scale + i, (const char *)want->scale[d] + i, (size_t)size)) continue;
            snprintf(text, room, "%s, matrix %d, scale %lld of line %lld", d ? "columnwise" : "rowwise", e,
                     (long long)j, (long long)l);
            return 1;
        }
    }
    if (f->f.scaling != GMM_SCALING_NV16 || m->amax[e] == want->amax) return 0;
    snprintf(text, room, "amax %g, not %g", m->amax[e], want->amax);
    return 1;
}

/* ------------------------------------------------------------------------------------------------- Traced ranks --- */

typedef struct rank {
    gmm_runtime rt;
    gtp_trace trace;
    gmm_stream stream[TRACE_STREAMS]; /* compute, gather, reduce, other compute */
    gmm_gtp *gtp;
    gmm_shard_plan plan[WEIGHTS];
    void *master[WEIGHTS];
    float *amaxes, *scales;     /* of delayed scaling */
    int32_t weight[WEIGHTS], bundle[LAYERS], chain[3];
    gmm_gtp_need need;
    gmm_gtp_view view[LAYERS][3];
} rank;

typedef struct training {
    const format *f;
    int g, layers, prefetch, together, steps, drop_wait;
    unsigned recompute, captured;
    int other_stream;           /* backward reads on another stream */
    gmm_dtype source;
    uint64_t seed;
    int64_t wrong;
    char text[200];
    copies *want;               /* [VERSIONS][weights] */
} training;

static struct world {
    gmm_ranks *ranks;
    int n;
    rank r[MOST];
    gmm_context *ctx[MOST];
    gmm_comm comm[3][MOST], plain[3][MOST];
} W;

static const gmm_comm *collective(void *self, gmm_stream s) {
    for (int k = 0;; k++)
        for (int i = 0; i < W.n; i++)
            if (W.plain[k][i].self == self) {
                gtp_trace_operation(&W.r[i].trace, s);
                return &W.plain[k][i];
            }
}
static gmm_status traced_gather(void *self, const void *send, void *recv, size_t bytes, gmm_stream s) {
    return collective(self, s)->all_gather(self, send, recv, bytes, s);
}
static gmm_status traced_max(void *self, float *values, size_t count, gmm_stream s) {
    return collective(self, s)->all_reduce_max(self, values, count, s);
}

/* Creates n ranks, after destroying those of the previous case (whose objects were freed with its memory if it failed).
   Communicators: all ranks, pairs of neighbours, ranks that are congruent modulo 2. */
static void open_world(int n, uint64_t seed) {
    static const int32_t all[MOST] = {0, 1, 2, 3, 4, 5, 6, 7};
    gmm_ranks_config c = GMM_ZERO;
    gmm_error e = GMM_ZERO;
    gmm_context *kept[MOST];
    gmm_ranks_destroy(W.ranks);
    gtp_free_memory();
    memcpy(kept, W.ctx, sizeof kept); /* creating a context takes longer than a case */
    memset(&W, 0, sizeof W);
    memcpy(W.ctx, kept, sizeof kept);
    c.ranks = n;
    c.seed = seed;
    c.check_races = 1;
    c.timeout_ms = 500;
    T_OK_TEXT(gmm_ranks_create(&c, &W.ranks, &e), e.text);
    T_OK_TEXT(gmm_ranks_comms(W.ranks, all, n, W.comm[0]), "");
    for (int i = 0; i + 1 < n; i += 2) T_OK_TEXT(gmm_ranks_comms(W.ranks, all + i, 2, W.comm[1] + i), "");
    for (int i = 0; n == 4 && i < 2; i++) {
        const int32_t members[2] = {i, i + 2};
        gmm_comm two[2];
        T_OK_TEXT(gmm_ranks_comms(W.ranks, members, 2, two), "");
        W.comm[2][i] = two[0];
        W.comm[2][i + 2] = two[1];
    }
    memcpy(W.plain, W.comm, sizeof W.plain);
    for (int k = 0; k < 3; k++)
        for (int i = 0; i < n; i++) {
            W.comm[k][i].all_gather = traced_gather;
            W.comm[k][i].all_reduce_max = traced_max;
        }
    for (int i = 0; i < n; i++) {
        rank *r = &W.r[i];
        gmm_config config = GMM_ZERO;
        config.threads = 1;
        if (!W.ctx[i] && gmm_create(&W.ctx[i], &config, NULL)) abort();
        W.n = i + 1;
        T_OK_TEXT(gmm_ranks_runtime(W.ranks, i, &r->trace.inner), "");
        r->rt = gtp_traced(&r->trace);
        for (int k = 0; k < TRACE_STREAMS; k++) {
            T_OK_TEXT(r->rt.stream_create(r->rt.self, 0, &r->stream[k]), "");
            r->trace.stream[k] = r->stream[k];
        }
    }
}
static void finish(void) {
    const char *race = "";
    T_CHECK(gmm_ranks_run(W.ranks) == GMM_OK, "%s", gmm_ranks_error(W.ranks, 0));
    T_CHECK(gmm_ranks_races(W.ranks, &race) == 0, "%s", race);
    gtp_check_memory();
}
static void end_objects(void) {
    for (int i = 0; i < W.n; i++) {
        T_CHECK(gmm_gtp_fini(W.r[i].gtp) == GMM_OK, "fini");
        W.r[i].gtp = NULL;
    }
    gtp_check_memory();
}
static void close_world(void) {
    finish();
    end_objects();
    open_world(1, 0);
}
#define GTP_OK(r, call) T_OK_TEXT(call, (r)->gtp ? gmm_gtp_last_error((r)->gtp) : "")
#define GTP_REFUSED(r, want, call, ...) T_REFUSED_TEXT(want, call, gmm_gtp_last_error((r)->gtp), __VA_ARGS__)

static gmm_gtp *make(int i, int graphs) {
    gmm_gtp_config c = GMM_ZERO;
    gmm_error e = GMM_ZERO;
    size_t bytes = 0;
    c.domains = 2;
    c.weights = WEIGHTS;
    c.bundles = WEIGHTS;
    c.chains = 3;
    c.graphs = graphs;
    c.ctx = W.ctx[i];
    c.runtime = &W.r[i].rt;
    T_OK_TEXT(gmm_gtp_query(&c, &bytes, &e), e.text);
    T_OK_TEXT(gmm_gtp_init(gtp_memory(bytes, 0xFF), bytes, &c, &W.r[i].gtp, &e), e.text);
    return W.r[i].gtp;
}

static gmm_shard shard_of(const format *f, int g, int i) {
    gmm_shard s = GMM_ZERO;
    s.dtype = stored(f);
    s.scaling = f->f.scaling;
    s.rows = f->rows;
    s.cols = f->cols;
    s.gtp_size = g;
    s.gtp_rank = i;
    return s;
}
/* The description of a weight over poisoned memory. */
static gmm_gtp_weight weight_of(const format *f, const gmm_shard *s, int expert, float *amax, gmm_shard_plan *p) {
    gmm_gtp_weight w = GMM_ZERO;
    memset(p, 0, sizeof *p);
    T_OK_TEXT(gmm_gtp_plan(s, p, NULL), "");
    w.expert = expert;
    w.name = expert ? "second" : "first";
    w.shard = s;
    w.amax = f->f.scaling == GMM_SCALING_NV16 ? amax : NULL;
    w.format = f->f.dtype ? &f->f : NULL;
    for (int d = 0; d < 2; d++) {
        if (p->shard_data_bytes[d]) w.data[d] = gtp_memory((size_t)p->shard_data_bytes[d], 0xFF);
        if (p->shard_scale_bytes[d]) w.scale[d] = gtp_memory((size_t)p->shard_scale_bytes[d], 0xFF);
    }
    return w;
}
static void bind(rank *r) {
    void *gather, *reduce;
    GTP_OK(r, gmm_gtp_seal(r->gtp));
    GTP_OK(r, gmm_gtp_memory_need(r->gtp, 0, &r->need));
    gather = r->need.gather_bytes ? gtp_memory(r->need.gather_bytes, 0xFF) : NULL;
    reduce = r->need.reduce_bytes ? gtp_memory(r->need.reduce_bytes, 0xFF) : NULL;
    GTP_OK(r, gmm_gtp_bind(r->gtp, 0, gather, r->need.gather_bytes, reduce, r->need.reduce_bytes));
}

static void declare(const training *c, int i) {
    rank *r = &W.r[i];
    gmm_gtp_domain d = GMM_ZERO;
    float *amax = (float *)gtp_memory((size_t)(c->layers * EXPERTS) * sizeof *amax, 0);
    int32_t id, order[3][LAYERS];
    make(i, 2);
    d.gather = c->g > 1 ? &W.comm[0][i] : NULL;
    d.gather_stream = r->stream[1];
    GTP_OK(r, gmm_gtp_add_domain(r->gtp, &d, &id));
    r->amaxes = (float *)gtp_memory((size_t)(c->layers * EXPERTS) * sizeof(float), 0);
    r->scales = (float *)t_host(WEIGHTS * sizeof(float));
    for (int w = 0; w < c->layers * EXPERTS; w++) {
        const gmm_shard s = shard_of(c->f, c->g, i);
        const gmm_gtp_weight desc = weight_of(c->f, &s, w % EXPERTS, amax + w, &r->plan[w]);
        r->scales[w] = delayed_scale(w);
        r->master[w] = gtp_memory((size_t)(r->plan[w].shard_rows * c->f->cols) * 4, 0);
        GTP_OK(r, gmm_gtp_add_weight(r->gtp, &desc, &r->weight[w]));
    }
    for (int l = 0; l < c->layers; l++)
        GTP_OK(r, gmm_gtp_add_bundle(r->gtp, id, &r->weight[l * EXPERTS], EXPERTS, "layer", &r->bundle[l]));
    for (int l = 0, n = 0; l < c->layers; l++) {
        order[0][l] = r->bundle[l];
        order[1][l] = r->bundle[c->layers - 1 - l];
        if (c->recompute >> (c->layers - 1 - l) & 1) order[2][n++] = order[1][l];
    }
    for (int pass = 0; pass < 3; pass++) {
        gmm_gtp_chain chain = GMM_ZERO;
        chain.pass = (gmm_gtp_pass)pass;
        chain.bundles = order[pass];
        chain.count = c->layers;
        chain.prefetch = c->prefetch;
        chain.together = c->together;
        chain.captured = (int32_t)c->captured;
        if (pass == GMM_GTP_RECOMPUTE)
            for (int l = chain.count = 0; l < c->layers; l++) chain.count += (int32_t)(c->recompute >> l & 1);
        r->chain[pass] = -1;
        if (chain.count) GTP_OK(r, gmm_gtp_add_chain(r->gtp, &chain, &r->chain[pass]));
    }
    bind(r);
    GTP_OK(r, gmm_gtp_follow(r->gtp, r->chain[0], r->chain[1]));
}

/* --- work on the streams --- */

typedef struct view_check {
    training *c;
    int rank, layer, version;
    gmm_gtp_pass pass;
    gmm_gtp_view v;
    gmm_mat columnwise;
} view_check;
static gmm_status view_check_run(const void *argument, gmm_stream stream) {
    view_check a = *(const view_check *)argument;
    char text[160] = "";
    (void)stream;
    if (a.v.mat.columnwise) a.v.mat.columnwise = &a.columnwise; /* the descriptor as of the acquire */
    for (int e = 0; e < EXPERTS; e++)
        if (differs(a.c->f, &a.v, a.pass, e, &a.c->want[a.version * a.c->layers * EXPERTS + a.layer * EXPERTS + e],
                    text, sizeof text) && a.c->wrong++ == 0)
            snprintf(a.c->text, sizeof a.c->text, "rank %d layer %d version %d: %s", a.rank, a.layer, a.version, text);
    return GMM_OK;
}
static int range(gmm_range *r, const void *data, size_t bytes, int writes) {
    memset(r, 0, sizeof *r);
    r->data = data;
    r->bytes = bytes;
    r->writes = writes;
    return 1;
}
static void enqueue_view_check(training *c, int i, int layer, gmm_gtp_pass pass, int version, gmm_stream stream) {
    rank *r = &W.r[i];
    const int d = pass == GMM_GTP_BACKWARD && c->f->f.dtype != GMM_NONE;
    const gmm_mat *m = d ? r->view[layer][pass].mat.columnwise : &r->view[layer][pass].mat;
    const copies *want = c->want;
    gmm_range ranges[3 * EXPERTS];
    gmm_work w = GMM_ZERO;
    view_check a;
    int n = 0;
    memset(&a, 0, sizeof a);
    a.c = c;
    a.rank = i;
    a.layer = layer;
    a.version = version;
    a.pass = pass;
    a.v = r->view[layer][pass];
    if (d) a.columnwise = *m;
    for (int e = 0; e < EXPERTS; e++) {
        const char *data = m->table ? (const char *)m->table[e] : (const char *)m->data +
                           e * m->group_stride * gmm_dtype_bits(stored(c->f)) / 8;
        const char *scale = m->scale_table ? (const char *)m->scale_table[e]
                            : m->scale     ? (const char *)m->scale + e * want->l[d].scale_bytes
                                           : NULL;
        n += range(&ranges[n], data, (size_t)want->l[d].data_bytes, 0);
        if (c->f->f.dtype) n += range(&ranges[n], scale, (size_t)want->l[d].scale_bytes, 0);
        if (c->f->f.scaling == GMM_SCALING_NV16) n += range(&ranges[n], m->amax + e, sizeof(float), 0);
    }
    w.name = "read weights";
    w.function = view_check_run;
    w.argument = &a;
    w.argument_bytes = sizeof a;
    w.ranges = ranges;
    w.range_count = n;
    T_OK_TEXT(r->rt.run(r->rt.self, &w, stream), "");
}

typedef struct train { training *c; int rank, version; } train;
static gmm_status train_run(const void *argument, gmm_stream stream) {
    const train *a = (const train *)argument;
    rank *r = &W.r[a->rank];
    (void)stream;
    for (int w = 0; w < a->c->layers * EXPERTS; w++)
        for (int64_t i = 0; i < r->plan[w].valid_rows * a->c->f->cols; i++)
            gmm_store(a->c->source, r->master[w], i,
                      value(a->c->f, a->version, w, r->plan[w].row0 + i / a->c->f->cols, i % a->c->f->cols));
    return GMM_OK;
}
static gmm_status history_run(const void *argument, gmm_stream stream) {
    (void)argument, (void)stream;
    return GMM_OK;
}
/* Writes new master weights and quantizes this rank's shards from them. */
static void update(training *c, int i, int version) {
    rank *r = &W.r[i];
    gmm_range ranges[WEIGHTS];
    gmm_gtp_quantization q = GMM_ZERO;
    gmm_work w = GMM_ZERO;
    train a;
    a.c = c;
    a.rank = i;
    a.version = version;
    for (int k = 0; k < c->layers * EXPERTS; k++)
        (void)range(&ranges[k], r->master[k], (size_t)(r->plan[k].shard_rows * c->f->cols) *
                    (size_t)gmm_dtype_bits(c->source) / 8, 1);
    w.name = "optimizer";
    w.function = train_run;
    w.argument = &a;
    w.argument_bytes = sizeof a;
    w.ranges = ranges;
    w.range_count = c->layers * EXPERTS;
    T_OK_TEXT(r->rt.run(r->rt.self, &w, r->stream[0]), "");
    q.dtype = c->source;
    q.from = (const void *const *)r->master;
    q.scale = c->f->f.delayed ? r->scales : NULL;
    q.amax = c->f->f.delayed ? r->amaxes : NULL;
    GTP_OK(r, gmm_gtp_quantize(r->gtp, r->weight, c->layers * EXPERTS, &q, r->stream[0]));
    if (!q.amax) return;
    (void)range(ranges, q.amax, sizeof(float) * (size_t)(c->layers * EXPERTS), 0); /* the amax history receives them */
    w.name = "history";
    w.function = history_run;
    w.range_count = 1;
    T_OK_TEXT(r->rt.run(r->rt.self, &w, r->stream[0]), "");
}

static void read_all(training *c, int layer, gmm_gtp_pass pass, int version) {
    for (int i = 0; i < c->g; i++) {
        rank *r = &W.r[i];
        const gmm_stream stream = r->stream[pass && c->other_stream ? 3 : 0];
        memset(&r->view[layer][pass], 0, sizeof r->view[layer][pass]);
        GTP_OK(r, gmm_gtp_acquire(r->gtp, r->bundle[layer], pass, stream, &r->view[layer][pass]));
        enqueue_view_check(c, i, layer, pass, version, stream);
        GTP_OK(r, gmm_gtp_release(r->gtp, r->bundle[layer], pass, stream));
    }
}

static training training_of(const format *f, int g, int layers) {
    training c;
    memset(&c, 0, sizeof c);
    c.f = f;
    c.g = g;
    c.layers = layers;
    c.steps = 2;
    c.source = GMM_F32;
    return c;
}
static void expect(training *c) {
    c->want = (copies *)t_host((size_t)(VERSIONS * c->layers * EXPERTS) * sizeof *c->want);
    for (int v = 0; v < c->steps; v++)
        for (int w = 0; w < c->layers * EXPERTS; w++)
            c->want[v * c->layers * EXPERTS + w] = whole(c->f, c->source, v, w, 0);
}
#define expect(...) T_CALL(expect, __VA_ARGS__)

/* Steps of forward, recompute and backward, each after new weights, with and without a left-out wait. */
static void run_training(training *c) {
    c->wrong = 0;
    open_world(c->g, c->seed);
    W.r[0].trace.drop = c->drop_wait;
    for (int i = 0; i < c->g; i++) declare(c, i);
    for (int s = 0; s < c->steps; s++) {
        for (int i = 0; i < c->g; i++) update(c, i, s);
        for (int l = 0; l < c->layers; l++) read_all(c, l, GMM_GTP_FORWARD, s);
        for (int i = 0; c->other_stream && i < c->g; i++) { /* the caller orders its own two streams */
            const gmm_runtime *rt = &W.r[i].rt, *inner = &W.r[i].trace.inner;
            gmm_event e;
            T_OK_TEXT(rt->event_create(rt->self, &e), "");
            T_OK_TEXT(rt->event_record(rt->self, e, W.r[i].stream[0], 0), "");
            T_OK_TEXT(inner->stream_wait(inner->self, W.r[i].stream[3], e, 0), ""); /* never left out */
            T_OK_TEXT(rt->event_destroy(rt->self, e), "");
        }
        for (int l = c->layers - 1; l >= 0; l--) {
            if (c->recompute >> l & 1) read_all(c, l, GMM_GTP_RECOMPUTE, s);
            read_all(c, l, GMM_GTP_BACKWARD, s);
        }
    }
    W.r[0].trace.drop = 0;
}
#define run_training(...) T_CALL(run_training, __VA_ARGS__)

/* g = 1, 2, 4, 8 and every format. */
static void arrives(int arg) {
    const format *f = &formats[row_of(arg)];
    const int g = count_of(arg);
    gmm_gtp_statistics stats = GMM_ZERO;
    for (int seed = 0; seed < 2; seed++) {
        training c = training_of(f, g, 2);
        c.steps = 3;
        c.recompute = 1;
        c.source = seed ? GMM_BF16 : GMM_F32;
        c.seed = seed ? t_rand() | 1 : 0;
        c.prefetch = seed;
        expect(&c);
        run_training(&c);
        finish();
        T_CHECK(c.wrong == 0, "%lld differ; %s", (long long)c.wrong, c.text);
        for (int i = 0; i < g; i++) {
            const gmm_gtp_view *v = &W.r[i].view[1][GMM_GTP_FORWARD];
            GTP_OK(&W.r[i], gmm_gtp_statistics_of(W.r[i].gtp, &stats));
            T_CHECK(stats.acquires == stats.prefetched + stats.resident + stats.exposed, "acquires");
            T_CHECK(g > 1 || (stats.gathered_bytes == 0 && stats.gathers == stats.transposed), "one rank gathers");
            T_CHECK(v->version == c.steps, "version %lld", (long long)v->version);
            T_CHECK(v->rows == f->rows && v->cols == f->cols && v->count == EXPERTS, "shape");
            for (int w = 0; f->f.delayed && w < 4; w++) {
                float most = 0;
                for (int s = 0; s < c.steps; s++)
                    most = fmaxf(most, c.want[s * 4 + w].largest);
                T_CHECK(W.r[i].amaxes[w] == most, "amax %g, not %g", W.r[i].amaxes[w], most);
            }
        }
        close_world();
    }
}

/* A second acquire of a resident view gathers nothing. */
static void again(int arg) {
    const format *f = &formats[row_of(arg)];
    training c = training_of(f, 2, 1);
    gmm_gtp_statistics before = GMM_ZERO, after = GMM_ZERO;
    c.steps = 1;
    expect(&c);
    run_training(&c);
    GTP_OK(&W.r[0], gmm_gtp_statistics_of(W.r[0].gtp, &before));
    for (int k = 0; k < 3; k++) {
        read_all(&c, 0, GMM_GTP_BACKWARD, 0);
        read_all(&c, 0, GMM_GTP_FORWARD, 0);
    }
    GTP_OK(&W.r[0], gmm_gtp_statistics_of(W.r[0].gtp, &after));
    finish();
    T_CHECK(c.wrong == 0, "%s", c.text);
    T_CHECK(after.gathers == before.gathers && after.resident == before.resident + 6, "nothing is gathered again");
    T_CHECK(before.transposed == is_turned(f), "the backward copy is made of the forward one, %lld",
            (long long)before.transposed);
    close_world();
}

/* Ranks run in schedules drawn at random. */
static void schedules(int arg) {
    const format *f = &formats[row_of(arg)];
    training c = training_of(f, count_of(arg), 3);
    expect(&c);
    for (int k = 0; k < 24; k++) {
        c.prefetch = k % 3;
        c.recompute = k % 4 == 3 ? 5 : 0;
        c.other_stream = k % 5 == 4;
        c.seed = t_rand() | 1;
        run_training(&c);
        finish();
        T_CHECK(c.wrong == 0, "seed %llu: %s", (unsigned long long)c.seed, c.text);
        close_world();
    }
}

/* The bundles of two or three layers are gathered by one call, also those that use the stage. */
static void gathered_together(int arg) {
    const format *f = &formats[row_of(arg)];
    training c = training_of(f, count_of(arg), LAYERS);
    gmm_gtp_statistics stats = GMM_ZERO;
    c.steps = 2;
    expect(&c);
    for (int k = 0; k < 8; k++) {
        c.together = 2 + k % 2;
        c.prefetch = k % 3;
        c.recompute = k % 4 == 3 ? 13 : 0;
        c.seed = k ? t_rand() | 1 : 0;
        run_training(&c);
        finish();
        GTP_OK(&W.r[0], gmm_gtp_statistics_of(W.r[0].gtp, &stats));
        T_CHECK(c.wrong == 0, "together %d, seed %llu: %s", c.together, (unsigned long long)c.seed, c.text);
        T_CHECK(stats.prefetches > 0, "no bundle was gathered with another");
        close_world();
    }
}

/* Every wait that is not implied by others is left out in turn. */
static void mutation(int arg) {
    training c = training_of(&formats[row_of(arg)], 2, 3);
    unsigned char implied[TRACE_WAITS];
    int waits, silent = 0, needed = 0;
    c.prefetch = 1;
    c.seed = 1;
    expect(&c);
    run_training(&c);
    finish();
    waits = (int)W.r[0].trace.waits;
    memcpy(implied, W.r[0].trace.implied, sizeof implied);
    T_CHECK(waits < TRACE_WAITS, "%d waits", waits);
    end_objects();
    for (c.drop_wait = 1; c.drop_wait <= waits; c.drop_wait++) {
        int64_t fired = 0;
        for (c.seed = 1; c.seed <= 3; c.seed++) {
            run_training(&c);
            (void)gmm_ranks_run(W.ranks);
            fired += gmm_ranks_races(W.ranks, NULL) > 0;
            end_objects();
        }
        T_CHECK(!implied[c.drop_wait] || fired == 0, "implied wait %d of %d fires", c.drop_wait, waits);
        needed += !implied[c.drop_wait];
        if (!implied[c.drop_wait] && fired != 3 && T.verbose) printf("wait %d: %d of 3\n", c.drop_wait, (int)fired);
        silent += !implied[c.drop_wait] && fired != 3;
    }
    if (T.verbose) printf("%s: %d waits, %d needed, %d of them silent\n", c.f->name, waits, needed, silent);
    T_CHECK(needed > waits / 3 && silent == 0, "%d of %d needed waits are silent", silent, needed);
    open_world(1, 0);
}

/* ------------------------------------------------------------------------------------------ Views in operations --- */

/* Two weights of different formats on g ranks, or whole on one rank. */
typedef struct pair { const format *f[2]; gmm_gtp_view view[2][2]; } pair; /* [weight][pass] */

/* Two bundles of EXPERTS weights each, one per format, gathered in both passes; weight w is number w * EXPERTS + e. */
static void gather_pair(const format *const *f, int g, uint64_t seed, pair *out) {
    open_world(g, seed);
    for (int i = 0; i < g; i++) {
        rank *r = &W.r[i];
        gmm_gtp_domain d = GMM_ZERO;
        gmm_gtp_quantization q = GMM_ZERO;
        float *amax = (float *)gtp_memory(2 * EXPERTS * sizeof *amax, 0);
        int32_t id;
        make(i, 0);
        d.gather = g > 1 ? &W.comm[0][i] : NULL;
        d.gather_stream = r->stream[1];
        GTP_OK(r, gmm_gtp_add_domain(r->gtp, &d, &id));
        for (int w = 0; w < 2 * EXPERTS; w++) {
            const format *x = f[w / EXPERTS];
            const gmm_shard s = shard_of(x, g, i);
            const gmm_gtp_weight desc = weight_of(x, &s, w % EXPERTS, amax + w, &r->plan[w]);
            float *rows = (float *)t_host((size_t)(r->plan[w].shard_rows * x->cols) * 4);
            for (int64_t k = 0; k < r->plan[w].valid_rows * x->cols; k++)
                rows[k] = value(x, 0, w, r->plan[w].row0 + k / x->cols, k % x->cols);
            r->master[w] = rows;
            GTP_OK(r, gmm_gtp_add_weight(r->gtp, &desc, &r->weight[w]));
        }
        for (int b = 0; b < 2; b++)
            GTP_OK(r, gmm_gtp_add_bundle(r->gtp, id, &r->weight[b * EXPERTS], EXPERTS, "pair", &r->bundle[b]));
        for (int pass = 0; pass < 2; pass++) { /* both views are held at a time */
            gmm_gtp_chain chain = GMM_ZERO;
            chain.pass = (gmm_gtp_pass)pass;
            chain.bundles = r->bundle;
            chain.count = chain.held = 2;
            GTP_OK(r, gmm_gtp_add_chain(r->gtp, &chain, &r->chain[pass]));
        }
        bind(r);
        q.dtype = GMM_F32;
        q.from = (const void *const *)r->master;
        GTP_OK(r, gmm_gtp_quantize(r->gtp, r->weight, 2 * EXPERTS, &q, r->stream[0]));
    }
    for (int b = 0; b < 2; b++)
        for (int pass = 0; pass < 2; pass++)
            for (int i = 0; i < g; i++) {
                gmm_gtp_view v = GMM_ZERO;
                GTP_OK(&W.r[i], gmm_gtp_acquire(W.r[i].gtp, W.r[i].bundle[b], (gmm_gtp_pass)pass, W.r[i].stream[0],
                                                &v));
                if (i == g - 1) out->view[b][pass] = v;
            }
    finish();
}
static void release_pair(int g) {
    for (int b = 0; b < 2; b++)
        for (int pass = 0; pass < 2; pass++)
            for (int i = 0; i < g; i++)
                GTP_OK(&W.r[i], gmm_gtp_release(W.r[i].gtp, W.r[i].bundle[b], (gmm_gtp_pass)pass, W.r[i].stream[0]));
    close_world();
}

enum { TOKENS = 37 };
static const int32_t sizes[EXPERTS] = {20, 15};

static gmm_groups groups_of(void) {
    gmm_groups g = GMM_ZERO;
    g.count = EXPERTS;
    g.capacity = TOKENS;
    g.splits = sizes;
    g.dtype = GMM_I32;
    g.on_host = 1;
    g.tail = GMM_TAIL_ZERO;
    return g;
}
static gmm_mat tokens(int64_t cols) {
    float *x = (float *)t_host(TOKENS * (size_t)cols * 4);
    uint16_t *y = (uint16_t *)t_host(TOKENS * (size_t)cols * 2);
    for (int64_t i = 0; i < TOKENS * cols; i++) y[i] = gmm_f32_to_bf16(x[i] = (float)t_real());
    return gmm_mat_packed(GMM_BF16, y);
}
/* Rowwise quantized activations, in a format that may be multiplied with weights of format f. */
static gmm_mat copy_of(const format *f, const gmm_mat *src, int64_t cols) {
    gmm_context *ctx = plain_context();
    const gmm_groups groups = groups_of();
    gmm_format to = f->f;
    gmm_quantization q = GMM_ZERO;
    gmm_layout l = GMM_ZERO;
    gmm_info info = GMM_ZERO;
    gmm_mat m;
    if (f->f.dtype == GMM_NONE || f->f.dtype == GMM_E2M1 || f->f.scaling == GMM_SCALING_MX32) return *src;
    to.delayed = 0;
    if (to.scaling == GMM_SCALING_128X128) to.scaling = GMM_SCALING_1X128;
    T_OK_TEXT(gmm_layout_of_groups(to.dtype, to.scaling, to.order, GMM_ROWWISE, EXPERTS, TOKENS, cols, &l, NULL), "");
    m = gmm_mat_quantized(&to, GMM_ROWWISE, t_host((size_t)l.data_bytes), t_host((size_t)l.scale_bytes), NULL);
    q.cols = cols;
    q.groups = &groups;
    q.format = &to;
    q.src = src;
    q.rowwise = &m;
    T_OK_TEXT(gmm_quantize_query(ctx, GMM_OP_QUANTIZE, &q, &info), gmm_last_error(ctx));
    T_OK_TEXT(gmm_quantize(ctx, &q, t_workspace(info.workspace_bytes), info.workspace_bytes, NULL),
              gmm_last_error(ctx));
    return m;
}
static uint16_t *product(gmm_op op, const format *f, const gmm_mat *w, const gmm_mat *x) {
    gmm_context *ctx = plain_context();
    const gmm_groups groups = groups_of();
    const int fwd = op == GMM_OP_LINEAR_FWD;
    uint16_t *y = (uint16_t *)t_host(TOKENS * (size_t)(f->rows + f->cols) * 2);
    gmm_mat to = gmm_mat_packed(GMM_BF16, y);
    gmm_linear l = GMM_ZERO;
    gmm_info info = GMM_ZERO;
    l.in_features = f->cols;
    l.out_features = f->rows;
    l.groups = &groups;
    l.w = w;
    if (fwd) l.x = x, l.y = &to;
    else l.dy = x, l.dx = &to;
    T_OK_TEXT(gmm_linear_query(ctx, op, &l, &info), gmm_last_error(ctx));
    T_OK_TEXT((fwd ? gmm_linear_fwd : gmm_linear_dgrad)(ctx, &l, t_workspace(info.workspace_bytes),
                                                        info.workspace_bytes, NULL), gmm_last_error(ctx));
    return y;
}

/* The weights as one rank quantizes them from rows of dtype `source`, as an operand in table form. */
static gmm_mat whole_mat(const format *f, gmm_dtype source, int first, gmm_mat *columnwise) {
    void **table = (void **)t_host(4 * EXPERTS * sizeof *table);
    float *amax = (float *)t_host(EXPERTS * sizeof *amax);
    gmm_mat m[2];
    for (int e = 0; e < EXPERTS; e++) {
        const copies c = whole(f, source, 0, first + e, 0);
        for (int d = 0; d < 2; d++) {
            table[2 * d * EXPERTS + e] = c.data[d];
            table[(2 * d + 1) * EXPERTS + e] = c.scale[d];
        }
        amax[e] = c.amax;
    }
    for (int d = 0; d < 2; d++) {
        m[d] = gmm_mat_quantized(&f->f, (gmm_direction)d, NULL, NULL, amax);
        if (!f->f.dtype) m[d] = gmm_mat_packed(GMM_BF16, NULL);
        m[d].table = table + 2 * d * EXPERTS;
        m[d].scale_table = f->f.dtype ? table + (2 * d + 1) * EXPERTS : NULL;
        m[d].flags |= (uint32_t)GMM_MAT_TABLE_ON_HOST;
    }
    *columnwise = m[1];
    m[0].columnwise = f->f.dtype ? columnwise : NULL;
    return m[0];
}

/* Linear operations on acquired views, and a view of the wrong pass. */
static void linear(int arg) {
    const format *f[2] = {&formats[row_of(arg)], &formats[row_of(arg)]};
    const int g = count_of(arg);
    gmm_mat columnwise, x = tokens(f[0]->cols), dy = tokens(f[0]->rows);
    const gmm_mat w = whole_mat(f[0], GMM_F32, 0, &columnwise), qx = copy_of(f[0], &x, f[0]->cols);
    const gmm_mat qdy = copy_of(f[0], &dy, f[0]->rows);
    const size_t bytes[2] = {TOKENS * (size_t)f[0]->rows * 2, TOKENS * (size_t)f[0]->cols * 2};
    const uint16_t *y = product(GMM_OP_LINEAR_FWD, f[0], &w, &qx), *dx = product(GMM_OP_LINEAR_DGRAD, f[0], &w, &qdy);
    pair p;
    gather_pair(f, g, t_rand() | 1, &p);
    t_same("y", product(GMM_OP_LINEAR_FWD, f[0], &p.view[0][0].mat, &qx), y, bytes[0]);
    t_same("dx", product(GMM_OP_LINEAR_DGRAD, f[0], &p.view[0][1].mat, &qdy), dx, bytes[1]);
    if (f[0]->f.dtype) {
        gmm_context *ctx = plain_context();
        const gmm_groups groups = groups_of();
        gmm_mat to = gmm_mat_packed(GMM_BF16, (void *)(uintptr_t)y);
        gmm_linear l = GMM_ZERO;
        l.in_features = f[0]->cols;
        l.out_features = f[0]->rows;
        l.groups = &groups;
        l.w = &p.view[0][1].mat;
        l.x = &qx;
        l.y = &to;
        T_REFUSED_TEXT(GMM_E_NULL, gmm_linear_fwd(ctx, &l, NULL, 0, NULL), gmm_last_error(ctx), "linear.w lacks ",
                       NULL);
        l.w = &p.view[0][0].mat;
        l.dy = &qdy;
        l.dx = &to;
        T_REFUSED_TEXT(GMM_E_NULL, gmm_linear_dgrad(ctx, &l, NULL, 0, NULL), gmm_last_error(ctx), "w.columnwise", NULL);
    }
    release_pair(g);
}

/* 16-bit shards that are gathered and then quantized: products with them are those with weights that one rank quantizes
   from its 16-bit matrix. */
static void quantized_afterwards(int arg) {
    const format *f = &formats[row_of(arg)], rounded = {"bf16", {.dtype = GMM_NONE}, f->rows, f->cols};
    const format *both[2] = {&rounded, &rounded};
    const int g = count_of(arg);
    gmm_context *ctx = plain_context();
    gmm_mat columnwise, x = tokens(f->cols), dy = tokens(f->rows), to[2];
    const gmm_mat w = whole_mat(f, GMM_BF16, 0, &columnwise), qx = copy_of(f, &x, f->cols);
    const gmm_mat qdy = copy_of(f, &dy, f->rows);
    const uint16_t *y = product(GMM_OP_LINEAR_FWD, f, &w, &qx), *dx = product(GMM_OP_LINEAR_DGRAD, f, &w, &qdy);
    void **table = (void **)t_host(4 * EXPERTS * sizeof *table);
    float *amax = (float *)t_host(2 * EXPERTS * sizeof *amax);
    gmm_quantization q = GMM_ZERO;
    gmm_info info = GMM_ZERO;
    pair p;
    for (int d = 0; d < 2; d++) {
        gmm_layout l = GMM_ZERO;
        T_OK_TEXT(gmm_layout_of(f->f.dtype, f->f.scaling, GMM_SCALES_COMPACT, (gmm_direction)d, f->rows, f->cols, &l,
                                NULL), "");
        to[d] = gmm_mat_quantized(&f->f, (gmm_direction)d, NULL, NULL, amax + d * EXPERTS);
        for (int e = 0; e < EXPERTS; e++) {
            table[2 * d * EXPERTS + e] = t_host((size_t)l.data_bytes);
            table[(2 * d + 1) * EXPERTS + e] = t_host((size_t)l.scale_bytes);
        }
        to[d].table = table + 2 * d * EXPERTS;
        to[d].scale_table = table + (2 * d + 1) * EXPERTS;
        to[d].flags |= (uint32_t)GMM_MAT_TABLE_ON_HOST;
    }
    gather_pair(both, g, t_rand() | 1, &p);
    q.count = EXPERTS;
    q.rows = f->rows;
    q.cols = f->cols;
    q.format = &f->f;
    q.src = &p.view[0][0].mat;
    q.rowwise = &to[0];
    q.columnwise = &to[1];
    T_OK_TEXT(gmm_quantize_query(ctx, GMM_OP_QUANTIZE, &q, &info), gmm_last_error(ctx));
    T_OK_TEXT(gmm_quantize(ctx, &q, t_workspace(info.workspace_bytes), info.workspace_bytes, NULL),
              gmm_last_error(ctx));
    to[0].columnwise = &to[1];
    t_same("y", product(GMM_OP_LINEAR_FWD, f, &to[0], &qx), y, TOKENS * (size_t)f->rows * 2);
    t_same("dx", product(GMM_OP_LINEAR_DGRAD, f, &to[0], &qdy), dx, TOKENS * (size_t)f->cols * 2);
    release_pair(g);
}

/* One forward and backward of an MLP; all outputs in one buffer. */
static uint16_t *mlp_run(gmm_recipe_kind kind, int64_t hidden, int64_t ffn, gmm_save save, const gmm_mat *fwd1,
                         const gmm_mat *fwd2, const gmm_mat *bwd1, const gmm_mat *bwd2, const gmm_mat *x,
                         const gmm_mat *dy, size_t *bytes) {
    gmm_context *ctx = plain_context();
    const gmm_groups groups = groups_of();
    const gmm_recipe recipe = gmm_recipe_of(kind);
    const uint64_t random[4] = {1, 2, 3, 4};
    const size_t n = TOKENS * (size_t)hidden, n1 = (size_t)(EXPERTS * 2 * ffn * hidden), n2 = n1 / 2;
    uint16_t *out = (uint16_t *)t_host((2 * n + n1 + n2) * 2);
    gmm_mat y = gmm_mat_packed(GMM_BF16, out), dx = gmm_mat_packed(GMM_BF16, out + n);
    gmm_mat dw1 = gmm_mat_packed(GMM_BF16, out + 2 * n), dw2 = gmm_mat_packed(GMM_BF16, out + 2 * n + n1);
    gmm_grad g1 = GMM_ZERO, g2 = GMM_ZERO;
    gmm_mlp_config c = GMM_ZERO;
    gmm_mlp_quant q = GMM_ZERO;
    gmm_mlp m = GMM_ZERO;
    gmm_info info = GMM_ZERO;
    c.hidden = hidden;
    c.ffn = ffn;
    c.act.kind = GMM_ACT_SWIGLU;
    c.save = save;
    c.recipe = kind;
    q.recipe = &recipe;
    q.random = random;
    m.config = &c;
    m.groups = &groups;
    m.quant = &q;
    m.x = x;
    m.w1 = fwd1;
    m.w2 = fwd2;
    m.y = &y;
    T_OK_TEXT(gmm_mlp_query(ctx, GMM_OP_MLP_FWD, &m, &info), gmm_last_error(ctx));
    m.saved_bytes = info.saved_bytes;
    m.saved = info.saved_bytes ? t_workspace(info.saved_bytes) : NULL;
    T_OK_TEXT(gmm_mlp_fwd(ctx, &m, t_workspace(info.workspace_bytes), info.workspace_bytes, NULL),
              gmm_last_error(ctx));
    g1.mat = &dw1;
    g2.mat = &dw2;
    m.y = NULL;
    m.w1 = bwd1;
    m.w2 = bwd2;
    m.dy = dy;
    m.dx = &dx;
    m.dw1 = &g1;
    m.dw2 = &g2;
    T_OK_TEXT(gmm_mlp_query(ctx, GMM_OP_MLP_BWD, &m, &info), gmm_last_error(ctx));
    T_OK_TEXT(gmm_mlp_bwd(ctx, &m, t_workspace(info.workspace_bytes), info.workspace_bytes, NULL),
              gmm_last_error(ctx));
    *bytes = (2 * n + n1 + n2) * 2;
    return out;
}
/* An MLP with acquired views as weights gives the bits of an MLP with the weights themselves: views of quantized
   shards, or of 16-bit ones that the MLP quantizes. */
static void mlp(int arg) {
    const gmm_recipe_kind kind = (gmm_recipe_kind)row_of(arg);
    const int g = count_of(arg), rounded = variant_of(arg);
    const gmm_recipe recipe = gmm_recipe_of(kind);
    const gmm_format none = {.dtype = GMM_NONE}, shards = rounded ? none : recipe.weight;
    const int64_t hidden = 96, ffn = 64;
    const format f1 = {"fc1", shards, 2 * ffn, hidden}, f2 = {"fc2", shards, hidden, ffn};
    const format *f[2] = {&f1, &f2};
    const gmm_mat x = tokens(hidden), dy = tokens(hidden);
    gmm_mat w[2], both;
    uint16_t *want, *rows[2];
    size_t bytes = 0, again = 0;
    pair p;
    for (int k = 0; k < 2; k++) {
        const int64_t n = f[k]->rows * f[k]->cols;
        rows[k] = (uint16_t *)t_host((size_t)(EXPERTS * n) * 2);
        for (int64_t i = 0; i < EXPERTS * n; i++)
            rows[k][i] = gmm_f32_to_bf16(value(f[k], 0, (int)(k * EXPERTS + i / n), i % n / f[k]->cols,
                                               i % f[k]->cols));
        w[k] = gmm_mat_packed(GMM_BF16, rows[k]);
    }
    want = mlp_run(kind, hidden, ffn, GMM_SAVE_PREACT, &w[0], &w[1], &w[0], &w[1], &x, &dy, &bytes);
    gather_pair(f, g, t_rand() | 1, &p);
    {   /* its shards are quantized from fp32 rows: those of the MLP above */
        gmm_gtp_quantization q = GMM_ZERO;
        for (int i = 0; i < g; i++) {
            rank *r = &W.r[i];
            for (int k = 0; k < 2 * EXPERTS; k++) {
                const int64_t first = r->plan[k].row0 * f[k / EXPERTS]->cols, n = r->plan[k].valid_rows *
                                      f[k / EXPERTS]->cols, size = f[k / EXPERTS]->rows * f[k / EXPERTS]->cols;
                memset(r->master[k], 0, (size_t)(r->plan[k].shard_rows * f[k / EXPERTS]->cols) * 4);
                if (n) memcpy(r->master[k], rows[k / EXPERTS] + k % EXPERTS * size + first, (size_t)n * 2);
            }
            for (int b = 0; b < 2; b++)
                for (int pass = 0; pass < 2; pass++)
                    GTP_OK(r, gmm_gtp_release(r->gtp, r->bundle[b], (gmm_gtp_pass)pass, r->stream[0]));
            q.dtype = GMM_BF16;
            q.from = (const void *const *)r->master;
            GTP_OK(r, gmm_gtp_quantize(r->gtp, r->weight, 2 * EXPERTS, &q, r->stream[0]));
        }
        for (int b = 0; b < 2; b++)
            for (int pass = 0; pass < 2; pass++)
                for (int i = 0; i < g; i++) {
                    memset(&p.view[b][pass], 0, sizeof p.view[b][pass]);
                    GTP_OK(&W.r[i], gmm_gtp_acquire(W.r[i].gtp, W.r[i].bundle[b], (gmm_gtp_pass)pass,
                                                    W.r[i].stream[0], &p.view[b][pass]));
                }
        finish();
    }
    t_same("an MLP", mlp_run(kind, hidden, ffn, GMM_SAVE_PREACT, &p.view[0][0].mat, &p.view[1][0].mat,
                             &p.view[0][1].mat, &p.view[1][1].mat, &x, &dy, &again), want, bytes);
    both = p.view[0][0].mat; /* FC1: both copies of its weights */
    both.columnwise = p.view[0][1].mat.columnwise;
    t_same("an MLP that keeps nothing", mlp_run(kind, hidden, ffn, GMM_SAVE_NOTHING, &p.view[0][0].mat,
                                                &p.view[1][0].mat, &both, &p.view[1][1].mat, &x, &dy, &again), want,
           bytes);
    release_pair(g);
}

/* ------------------------------------------------------------------------------------------------ Amax, memory --- */

/* Halves of a tensor-parallel weight, each over two ranks; the amax is that of all four. */
static void shared_amax(int arg) {
    const format *f = &formats[row_of(arg)];
    copies want[2];
    char text[160] = "";
    want[0] = whole(f, GMM_F32, 0, 0, 0);
    want[1] = whole(f, GMM_F32, 0, 1, 0);
    {
        const float most = fmaxf(want[0].amax, want[1].amax);
        T_CHECK(want[0].amax != want[1].amax, "the halves differ");
        want[0] = whole(f, GMM_F32, 0, 0, most);
        want[1] = whole(f, GMM_F32, 0, 1, most);
    }
    open_world(4, t_rand() | 1);
    for (int i = 0; i < 4; i++) { /* ranks 0 and 1 share the first half; i and i + 2 are tensor-parallel */
        rank *r = &W.r[i];
        gmm_gtp_domain d = GMM_ZERO;
        const gmm_shard s = shard_of(f, 2, i % 2);
        gmm_gtp_weight w = weight_of(f, &s, 0, (float *)gtp_memory(4, 0), &r->plan[0]);
        int32_t id;
        if (f->f.scaling == GMM_SCALING_TENSOR) w.amax = (float *)gtp_memory(4, 0);
        r->amaxes = w.amax;
        make(i, 0);
        d.gather = &W.comm[1][i];
        d.gather_stream = r->stream[1];
        GTP_OK(r, gmm_gtp_add_domain(r->gtp, &d, &id));
        r->master[0] = t_host((size_t)(r->plan[0].shard_rows * f->cols) * 4);
        for (int64_t k = 0; k < r->plan[0].valid_rows * f->cols; k++)
            ((float *)r->master[0])[k] = value(f, 0, i / 2, r->plan[0].row0 + k / f->cols, k % f->cols);
        GTP_OK(r, gmm_gtp_add_weight(r->gtp, &w, &r->weight[0]));
        GTP_OK(r, gmm_gtp_add_bundle(r->gtp, id, r->weight, 1, "half", &r->bundle[0]));
        bind(r);
    }
    for (int i = 0; i < 4; i++) {
        gmm_gtp_quantization q = GMM_ZERO;
        q.dtype = GMM_F32;
        q.from = (const void *const *)W.r[i].master;
        q.also = &W.comm[2][i];
        GTP_OK(&W.r[i], gmm_gtp_quantize(W.r[i].gtp, W.r[i].weight, 1, &q, W.r[i].stream[0]));
    }
    for (int pass = 0; pass < 2; pass++)
        for (int i = 0; i < 4; i++)
            GTP_OK(&W.r[i], gmm_gtp_acquire(W.r[i].gtp, 0, (gmm_gtp_pass)pass, W.r[i].stream[0],
                                            &W.r[i].view[0][pass]));
    finish();
    for (int pass = 0; pass < 2; pass++)
        for (int i = 0; i < 4; i++) {
            T_CHECK(!differs(f, &W.r[i].view[0][pass], (gmm_gtp_pass)pass, 0, &want[i / 2], text, sizeof text),
                    "rank %d: %s", i, text);
            T_CHECK(W.r[i].amaxes[0] == want[0].amax, "amax %g", W.r[i].amaxes[0]);
            if (f->f.scaling == GMM_SCALING_TENSOR) {
                const gmm_mat *m = &W.r[i].view[0][pass].mat;
                T_CHECK(!m->amax && (!m->columnwise || !m->columnwise->amax), "a view has no amax of TENSOR");
            }
        }
    close_world();
}

/* The memory that gmm_gtp_seal requires equals the forecast, and acquired views lie in it. */
static void memory(int arg) {
    static const struct kind { gmm_dtype dtype; gmm_scaling scaling; } kinds[] = {
        {GMM_BF16, GMM_SCALING_NONE}, {GMM_E4M3, GMM_SCALING_TENSOR}, {GMM_E4M3, GMM_SCALING_128X128},
        {GMM_E4M3, GMM_SCALING_1X128}, {GMM_E4M3, GMM_SCALING_MX32}, {GMM_E2M1, GMM_SCALING_NV16}};
    const struct kind k = kinds[row_of(arg)];
    const int g = count_of(arg), nv = k.scaling == GMM_SCALING_NV16, tensor = k.scaling == GMM_SCALING_TENSOR;
    const format f = {"", {.dtype = k.dtype, .scaling = k.scaling}, 2048, 8192};
    for (int prefetch = 0; prefetch < 3; prefetch++) {
        training c = training_of(&f, g, 3);
        gmm_gtp_memory m = GMM_ZERO;
        gmm_gtp_use use = GMM_ZERO;
        const gmm_shard s = shard_of(&f, g, 0);
        const int64_t slots = g > 1 ? 2 * (prefetch + 1) : prefetch + 1;
        int64_t spare = 0; /* tensors' scales and amaxes, each padded to 256 bytes */
        rank *r = &W.r[0];
        int32_t id, order[2][3];
        open_world(g, 0);
        make(0, 0);
        {
            gmm_gtp_domain d = GMM_ZERO;
            d.gather = g > 1 ? &W.comm[0][0] : NULL;
            GTP_OK(r, gmm_gtp_add_domain(r->gtp, &d, &id));
        }
        for (int w = 0; w < c.layers * EXPERTS; w++) { /* addresses that are not dereferenced */
            gmm_gtp_weight desc = GMM_ZERO;
            desc.expert = w % EXPERTS;
            desc.shard = &s;
            for (int d = 0; d < 2; d++) desc.data[d] = desc.scale[d] = &c;
            GTP_OK(r, gmm_gtp_add_weight(r->gtp, &desc, &r->weight[w]));
        }
        for (int l = 0; l < 3; l++) {
            GTP_OK(r, gmm_gtp_add_bundle(r->gtp, id, &r->weight[l * EXPERTS], EXPERTS, "b", &r->bundle[l]));
            order[0][l] = order[1][2 - l] = r->bundle[l];
        }
        for (int pass = 0; pass < 2; pass++) {
            gmm_gtp_chain chain = GMM_ZERO;
            chain.pass = (gmm_gtp_pass)pass;
            chain.bundles = order[pass];
            chain.count = 3;
            chain.prefetch = prefetch;
            GTP_OK(r, gmm_gtp_add_chain(r->gtp, &chain, &r->chain[pass]));
        }
        GTP_OK(r, gmm_gtp_seal(r->gtp));
        GTP_OK(r, gmm_gtp_memory_need(r->gtp, 0, &r->need));
        use.bundle = EXPERTS;
        use.shard = &s;
        use.layers = 3;
        use.gather_slots = prefetch + 1;
        T_OK_TEXT(gmm_gtp_memory_add(&use, &m, NULL), "");
        if (tensor) spare = slots * (256 - EXPERTS * 4);
        if (nv && g > 1) spare = slots * 256;
        T_CHECK((int64_t)r->need.gather_bytes == m.gather + m.stage + spare, "%lld bytes needed, %lld and %lld "
                "foreseen, %lld spare", (long long)r->need.gather_bytes, (long long)m.gather, (long long)m.stage,
                (long long)spare);
        r->gtp = NULL; /* not bound, so gmm_gtp_fini is not needed */
        close_world();
    }
}

/* The forecast counts the gathers of each pass, with a latency of one second per gather and infinite bandwidth. */
static void forecast(int arg) {
    enum { N = 5, SLOTS = 2 };
    static const struct { gmm_dtype dtype; gmm_scaling scaling; int gathers, wrapped, turned; } kinds[] = {
        {GMM_BF16, GMM_SCALING_NONE, 2 * N - SLOTS, 2 * N - 2 * SLOTS, 0},
        {GMM_E4M3, GMM_SCALING_TENSOR, 2 * N - SLOTS, 2 * N - SLOTS, 1},
        {GMM_E4M3, GMM_SCALING_128X128, 2 * N - SLOTS, 2 * N - SLOTS, 1},
        {GMM_E4M3, GMM_SCALING_1X128, 2 * N, 2 * N, 0}, {GMM_E4M3, GMM_SCALING_MX32, 2 * N, 2 * N, 0},
        {GMM_E2M1, GMM_SCALING_NV16, 2 * N, 2 * N, 0}};
    const format f = {"", {.dtype = kinds[arg].dtype, .scaling = kinds[arg].scaling}, 1024, 512};
    const gmm_shard s = shard_of(&f, 4, 0);
    for (int wrap = 0; wrap < 2; wrap++)
        for (int slow = 0; slow < 2; slow++) {
            gmm_gtp_forecast x = GMM_ZERO;
            gmm_gtp_stage stages[N];
            gmm_error e = GMM_ZERO;
            memset(stages, 0, sizeof stages);
            for (int i = 0; i < N; i++) {
                stages[i].shard = &s;
                stages[i].tokens = 1;
                stages[i].bundle = 3;
            }
            x.stages = N;
            x.gemm_rate = x.link_rate = 1e30;
            x.latency = slow ? 0 : 1;
            x.memory_rate = slow ? 3 * 1024 * 512 : 0; /* then a transpose takes two seconds */
            x.prefetch = SLOTS - 1;
            x.wrap = wrap;
            T_OK_TEXT(gmm_gtp_foresee(&x, stages, &e), e.text);
            if (!slow)
                T_CHECK(fabs(x.gather - (wrap ? kinds[arg].wrapped : kinds[arg].gathers)) < 1e-6, "%g gathers",
                        x.gather);
            else
                T_CHECK(fabs(x.exposed_gather - 2.0 * N * kinds[arg].turned) < 1e-6, "transposes take %g",
                        x.exposed_gather);
        }
}

/* Ranks receive the bytes that the forecast says, codes and scales, in every format. */
static void bytes_foreseen(int arg) {
    const format *f = &formats[row_of(arg)];
    const int g = count_of(arg);
    for (int prefetch = 0; prefetch < 3; prefetch++) {
        training c = training_of(f, g, 3);
        const gmm_shard s = shard_of(f, g, 0);
        gmm_gtp_statistics before = GMM_ZERO, after = GMM_ZERO;
        gmm_gtp_forecast x = GMM_ZERO;
        gmm_gtp_stage stages[3];
        gmm_error e = GMM_ZERO;
        c.prefetch = prefetch;
        expect(&c);
        run_training(&c);
        finish();
        memset(stages, 0, sizeof stages);
        for (int i = 0; i < c.layers; i++) {
            stages[i].shard = &s;
            stages[i].bundle = EXPERTS;
        }
        x.stages = c.layers;
        x.gemm_rate = x.link_rate = 1;
        x.prefetch = prefetch;
        T_OK_TEXT(gmm_gtp_foresee(&x, stages, &e), e.text);
        T_CHECK(x.gathered_bytes > 0, "nothing is sent");
        for (int i = 0; i < g; i++) {
            gmm_gtp_statistics stats = GMM_ZERO;
            GTP_OK(&W.r[i], gmm_gtp_statistics_of(W.r[i].gtp, &stats));
            T_CHECK(stats.gathered_bytes == c.steps * x.gathered_bytes, "rank %d, prefetch %d: %lld, foreseen %lld", i,
                    prefetch, (long long)stats.gathered_bytes, (long long)(c.steps * x.gathered_bytes));
            GTP_OK(&W.r[i], gmm_gtp_follow(W.r[i].gtp, W.r[i].chain[1], W.r[i].chain[0]));
        }
        for (int n = 0; n < 2; n++) { /* micro-batches with the same weights: slots of one bundle keep its copy */
            GTP_OK(&W.r[0], gmm_gtp_statistics_of(W.r[0].gtp, &before));
            for (int l = 0; l < c.layers; l++) read_all(&c, l, GMM_GTP_FORWARD, c.steps - 1);
            for (int l = c.layers - 1; l >= 0; l--) read_all(&c, l, GMM_GTP_BACKWARD, c.steps - 1);
        }
        x.wrap = 1;
        T_OK_TEXT(gmm_gtp_foresee(&x, stages, &e), e.text);
        GTP_OK(&W.r[0], gmm_gtp_statistics_of(W.r[0].gtp, &after));
        T_CHECK(after.gathered_bytes - before.gathered_bytes == x.gathered_bytes, "prefetch %d: %lld, foreseen %lld",
                prefetch, (long long)(after.gathered_bytes - before.gathered_bytes), (long long)x.gathered_bytes);
        close_world();
    }
}

/* ------------------------------------------------------------------------------------------------------- Graphs --- */

/* Forward and backward in one graph, replayed after new shards each time; addresses stay. */
static void graph(int arg) {
    const format *f = &formats[row_of(arg)];
    const int graphs = count_of(arg); /* 2: forward and backward in separate graphs */
    training c = training_of(f, 2, 2);
    gmm_ranks_graph *made[2][2];
    const void *at[2] = {NULL, NULL};
    int32_t id[2][2];
    c.captured = 1;
    c.prefetch = 1;
    c.together = variant_of(arg);
    c.steps = 3;
    c.seed = t_rand() | 1;
    expect(&c);
    open_world(2, c.seed);
    for (int i = 0; i < 2; i++) declare(&c, i);
    /* the graph is captured with the first version; view checks are enqueued after each replay, on the contents of
       its slots */
    for (int i = 0; i < 2; i++) update(&c, i, 0);
    for (int i = 0; i < 2; i++) {
        rank *r = &W.r[i];
        for (int pass = 0; pass < 2; pass++) {
            const int n = graphs == 2 ? pass : 0;
            if (graphs == 2 || pass == 0) {
                T_OK_TEXT(gmm_ranks_capture_begin(W.ranks, i, r->stream[0]), gmm_ranks_error(W.ranks, i));
                GTP_OK(r, gmm_gtp_capture_begin(r->gtp, r->stream[0], &id[i][n]));
                GTP_REFUSED(r, GMM_E_CAPTURE, gmm_gtp_quantize(r->gtp, r->weight, 1, NULL, r->stream[0]), "captured",
                            NULL);
            }
            for (int k = 0; k < 2; k++) {
                const int l = pass ? 1 - k : k;
                memset(&r->view[l][pass], 0, sizeof r->view[l][pass]);
                GTP_OK(r, gmm_gtp_acquire(r->gtp, r->bundle[l], (gmm_gtp_pass)pass, r->stream[0], &r->view[l][pass]));
                GTP_OK(r, gmm_gtp_release(r->gtp, r->bundle[l], (gmm_gtp_pass)pass, r->stream[0]));
            }
            if (graphs == 1 && pass == 0) continue;
            GTP_OK(r, gmm_gtp_capture_end(r->gtp, r->stream[0]));
            T_OK_TEXT(gmm_ranks_capture_end(W.ranks, i, r->stream[0], &made[i][n]), gmm_ranks_error(W.ranks, i));
        }
        GTP_REFUSED(r, GMM_E_NULL, gmm_gtp_quantize(r->gtp, r->weight, 1, NULL, r->stream[0]), "quantization", NULL);
    }
    for (int v = 0; v < c.steps; v++) {
        for (int i = 0; i < 2; i++) {
            rank *r = &W.r[i];
            const gmm_mat *m = f->f.dtype ? r->view[0][1].mat.columnwise : &r->view[0][1].mat;
            if (v) update(&c, i, v);
            for (int n = 0; n < graphs; n++) {
                GTP_OK(r, gmm_gtp_pre_replay(r->gtp, id[i][n], r->stream[0]));
                T_OK_TEXT(gmm_ranks_launch(made[i][n], r->stream[0]), gmm_ranks_error(W.ranks, i));
                GTP_OK(r, gmm_gtp_post_replay(r->gtp, id[i][n], r->stream[0]));
            }
            /* all slots still hold the data that the graph gathered: two per direction */
            for (int pass = 0; pass < 2; pass++)
                for (int l = 0; l < 2; l++) enqueue_view_check(&c, i, l, (gmm_gtp_pass)pass, v, r->stream[0]);
            T_CHECK(!at[i] || at[i] == (m->table ? m->table[0] : m->data), "an address moved");
            at[i] = m->table ? m->table[0] : m->data;
        }
    }
    finish();
    T_CHECK(c.wrong == 0, "%s", c.text);
    for (int i = 0; i < 2; i++)
        for (int n = 0; n < graphs; n++) gmm_ranks_graph_destroy(made[i][n]);
    close_world();
}

/* ------------------------------------------------------------------------------------------------------- Errors --- */

static void errors(int arg) {
    const format *f = &formats[16]; /* nvfp4 */
    const gmm_shard s = shard_of(f, 1, 0);
    gmm_gtp_domain d = GMM_ZERO;
    gmm_gtp_quantization q = GMM_ZERO;
    gmm_format other = f->f;
    gmm_shard_plan p;
    float *amax = (float *)t_host(16);
    void *rows[2] = {t_host((size_t)(f->rows * f->cols) * 4), NULL};
    gmm_gtp_weight w;
    int32_t id[4], domain, bundle, twice[2];
    rank *r = &W.r[0];
    (void)arg;
    open_world(1, 0);
    w = weight_of(f, &s, 0, amax, &p);
    make(0, 0);
    GTP_OK(r, gmm_gtp_add_domain(r->gtp, &d, &domain));
    w.format = &other;
    other.dtype = GMM_E4M3;
    other.scaling = GMM_SCALING_MX32;
    other.square = 0;
    GTP_REFUSED(r, GMM_E_DTYPE, gmm_gtp_add_weight(r->gtp, &w, &id[0]), "format is e4m3", "'first'", NULL);
    other = f->f;
    other.square = 0;
    other.stochastic = 1;
    GTP_REFUSED(r, GMM_E_CONFIG, gmm_gtp_add_weight(r->gtp, &w, &id[0]), "stochastic 1", NULL);
    other.stochastic = 0;
    other.order = GMM_SCALES_SWIZZLED;
    GTP_REFUSED(r, GMM_E_CONFIG, gmm_gtp_add_weight(r->gtp, &w, &id[0]), "order 1", NULL);
    other.order = GMM_SCALES_COMPACT;
    other.eps = -1;
    GTP_REFUSED(r, GMM_E_CONFIG, gmm_gtp_add_weight(r->gtp, &w, &id[0]), "eps", NULL);
    other = f->f;
    w.amax = NULL;
    GTP_REFUSED(r, GMM_E_NULL, gmm_gtp_add_weight(r->gtp, &w, &id[0]), "amax is NULL", NULL);
    w.amax = amax;
    GTP_OK(r, gmm_gtp_add_weight(r->gtp, &w, &id[0]));
    w.expert = 1;
    w.amax = amax + 2;
    GTP_OK(r, gmm_gtp_add_weight(r->gtp, &w, &id[1]));
    GTP_REFUSED(r, GMM_E_CONFIG, gmm_gtp_add_bundle(r->gtp, domain, id, 2, "b", &bundle), "amax of 'first'",
                "1 values behind", NULL);
    w.amax = amax + 1;
    other.four_over_six = other.e4m3_256 = 1;
    GTP_OK(r, gmm_gtp_add_weight(r->gtp, &w, &id[3]));
    twice[0] = id[0];
    twice[1] = id[3];
    GTP_REFUSED(r, GMM_E_CONFIG, gmm_gtp_add_bundle(r->gtp, domain, twice, 2, "b", &bundle), "has e4m3_256 1",
                "'first' has 0", NULL);
    w.expert = 0;
    w.format = NULL;
    w.name = "third";
    GTP_OK(r, gmm_gtp_add_weight(r->gtp, &w, &id[2]));
    for (int i = 0; i < 3; i++) { /* the second one alone as well */
        if (i != 1) GTP_OK(r, gmm_gtp_add_bundle(r->gtp, domain, &id[i], 1, "b", &bundle));
    }
    q.dtype = GMM_F32;
    q.from = (const void *const *)rows;
    GTP_REFUSED(r, GMM_E_STATE, gmm_gtp_quantize(r->gtp, id, 1, &q, r->stream[0]), "seal", NULL);
    r->gtp = NULL;
    make(0, 0); /* valid again */
    GTP_OK(r, gmm_gtp_add_domain(r->gtp, &d, &domain));
    w = weight_of(f, &s, 0, amax, &p);
    for (int i = 0; i < 2; i++) {
        w.format = i ? NULL : &f->f;
        w.name = i ? "third" : "first";
        GTP_OK(r, gmm_gtp_add_weight(r->gtp, &w, &id[i]));
        GTP_OK(r, gmm_gtp_add_bundle(r->gtp, domain, &id[i], 1, "b", &bundle));
    }
    bind(r);
    twice[0] = twice[1] = id[0];
    GTP_REFUSED(r, GMM_E_NULL, gmm_gtp_quantize(r->gtp, NULL, 1, &q, r->stream[0]), "weights", NULL);
    GTP_REFUSED(r, GMM_E_NULL, gmm_gtp_quantize(r->gtp, id, 2, &q, r->stream[0]), "from[1]", "'third'", NULL);
    rows[1] = rows[0];
    GTP_REFUSED(r, GMM_E_CONFIG, gmm_gtp_quantize(r->gtp, id, 2, &q, r->stream[0]), "'third'", "without a format",
                NULL);
    GTP_REFUSED(r, GMM_E_ARG, gmm_gtp_quantize(r->gtp, twice, 2, &q, r->stream[0]), "'first'", "twice", NULL);
    q.dtype = GMM_E4M3;
    GTP_REFUSED(r, GMM_E_DTYPE, gmm_gtp_quantize(r->gtp, id, 1, &q, r->stream[0]), "e4m3", NULL);
    q.dtype = GMM_F32;
    q.from = NULL;
    GTP_REFUSED(r, GMM_E_NULL, gmm_gtp_quantize(r->gtp, id, 1, &q, r->stream[0]), "from is NULL", NULL);
    q.from = (const void *const *)rows;
    rows[0] = (char *)rows[0] + 1;
    GTP_REFUSED(r, GMM_E_ALIGN, gmm_gtp_quantize(r->gtp, id, 1, &q, r->stream[0]), "from[0]", NULL);
    rows[0] = (char *)rows[0] - 1;
    q.struct_size = 4096;
    GTP_REFUSED(r, GMM_E_VERSION, gmm_gtp_quantize(r->gtp, id, 1, &q, r->stream[0]), "4096", NULL);
    q.struct_size = 0;
    for (int i = 0; i < 3; i++) {
        static const char *const lacks[] = {"also->group_begin", "also->group_end", "also->all_reduce_max"};
        gmm_comm also = W.comm[0][0];
        if (i == 0) also.group_begin = NULL;
        if (i == 1) also.group_end = NULL;
        if (i == 2) also.all_reduce_max = NULL;
        q.also = &also;
        GTP_REFUSED(r, GMM_E_NULL, gmm_gtp_quantize(r->gtp, id, 1, &q, r->stream[0]), lacks[i], NULL);
    }
    {
        gmm_comm also = W.comm[0][0];
        also.struct_size = (uint32_t)offsetof(gmm_comm, window_add); /* an older one */
        q.also = &also;
        GTP_OK(r, gmm_gtp_quantize(r->gtp, id, 1, &q, r->stream[0]));
        also.struct_size = (uint32_t)offsetof(gmm_comm, all_reduce_max);
        GTP_REFUSED(r, GMM_E_NULL, gmm_gtp_quantize(r->gtp, id, 1, &q, r->stream[0]), "also->all_reduce_max", NULL);
        also.struct_size = sizeof also + 4;
        GTP_REFUSED(r, GMM_E_VERSION, gmm_gtp_quantize(r->gtp, id, 1, &q, r->stream[0]), "also->struct_size", NULL);
    }
    q.also = NULL;
    GTP_OK(r, gmm_gtp_quantize(r->gtp, id, 1, &q, r->stream[0]));
    T_CHECK(gmm_gtp_quantize(NULL, id, 1, &q, NULL) == GMM_E_NULL, "no object");
    close_world();
}

/* ---------------------------------------------------------------------------------------------------- Transpose --- */

/* gmm transposes a rowwise copy into the columnwise copy that quantization gives; any extents, ld and form,
   every engine. */
static void transposes(int arg) {
    const int block = arg & 1, table = arg >> 1 & 1;
    gmm_format f = GMM_ZERO;
    f.dtype = arg & 4 ? GMM_E5M2 : GMM_E4M3;
    f.scaling = block ? GMM_SCALING_128X128 : GMM_SCALING_TENSOR;
    f.pow2 = arg >> 3 & 1;
    for (int k = 0; k < 6; k++) {
        const int count = k == 3 ? 1 : 3; /* a single matrix needs no workspace */
        const int64_t rows = k < 2 ? 256 : t_int(1, 300), cols = k == 0 ? 384 : t_int(1, 300);
        const int64_t spare = k % 3 == 1 ? t_int(1, 40) : k % 3 == 2 ? 4 * t_int(0, 9) : 0;
        t_mat src = t_mat_in(GMM_F32, count, rows, cols, T_REALS);
        gmm_quantization q = GMM_ZERO;
        gmm_transposition d = GMM_ZERO;
        gmm_info info = GMM_ZERO;
        gmm_layout l[2];
        gmm_mat m[2], to;
        char *made, *want, *scales[2];
        void *at[6];
        const int64_t ld = rows + spare;
        for (int way = 0; way < 2; way++) {
            T_OK_TEXT(gmm_layout_of(f.dtype, f.scaling, GMM_SCALES_COMPACT, (gmm_direction)way, rows, cols, &l[way],
                                    NULL), "");
            m[way] = gmm_mat_quantized(&f, (gmm_direction)way, t_alloc((size_t)(count * l[way].data_bytes)),
                                       t_alloc((size_t)(count * l[way].scale_bytes)), NULL);
        }
        q.count = d.count = count;
        q.rows = d.rows = rows;
        q.cols = d.cols = cols;
        q.format = &f;
        q.src = &src.mat;
        q.rowwise = &m[0];
        q.columnwise = &m[1];
        T_OK(gmm_quantize_query(T.ctx, GMM_OP_QUANTIZE, &q, &info));
        T_OK(gmm_quantize(T.ctx, &q, t_workspace(info.workspace_bytes), info.workspace_bytes, T.stream));
        to = gmm_mat_quantized(&f, GMM_COLUMNWISE, t_alloc((size_t)(count * cols * ld)),
                               t_alloc((size_t)(count * l[1].scale_bytes)), NULL);
        made = (char *)to.data;
        scales[0] = (char *)to.scale;
        to.ld = ld;
        d.src = &m[0];
        d.dst = &to;
        if (table) {
            for (int e = 0; e < count; e++) {
                at[e] = made + (int64_t)(count - 1 - e) * cols * ld;
                at[3 + e] = scales[0] + (int64_t)(count - 1 - e) * l[1].scale_bytes;
            }
            to.data = to.scale = NULL;
            to.table = at;
            to.scale_table = at + 3;
            to.flags = (uint32_t)GMM_MAT_TABLE_ON_HOST;
        }
        T_OK(gmm_transpose_query(T.ctx, &d, &info));
        T_CHECK(count > 1 || info.workspace_bytes == 0, "workspace for one matrix");
        T_OK(gmm_transpose(T.ctx, &d, t_workspace(info.workspace_bytes), info.workspace_bytes, T.stream));
        want = (char *)t_get(m[1].data, (size_t)(count * l[1].data_bytes));
        scales[1] = (char *)t_get(m[1].scale, (size_t)(count * l[1].scale_bytes));
        made = (char *)t_get(made, (size_t)(count * cols * ld));
        scales[0] = (char *)t_get(scales[0], (size_t)(count * l[1].scale_bytes));
        for (int e = 0; e < count; e++) {
            const int64_t place = table ? count - 1 - e : e;
            for (int64_t c = 0; c < cols; c++) {
                t_same("a line", made + (place * cols + c) * ld, want + (e * cols + c) * rows, (size_t)rows);
                for (int64_t i = rows; i < ld; i++)
                    T_CHECK((unsigned char)made[(place * cols + c) * ld + i] == 0xFF, "padding is written");
            }
            t_same("scales", scales[0] + place * l[1].scale_bytes, scales[1] + e * l[1].scale_bytes,
                   (size_t)l[1].scale_bytes);
        }
    }
}
static void transpose_errors(int arg) {
    char *memory = (char *)t_alloc(1 << 16);
    gmm_transposition d = GMM_ZERO;
    gmm_info info = GMM_ZERO;
    gmm_format f = GMM_ZERO;
    gmm_mat src, dst;
    (void)arg;
    f.dtype = GMM_E4M3;
    f.scaling = GMM_SCALING_128X128;
    src = gmm_mat_quantized(&f, GMM_ROWWISE, memory, memory + 4096, NULL);
    dst = gmm_mat_quantized(&f, GMM_COLUMNWISE, memory + 8192, memory + 16384, NULL);
    d.count = 1;
    d.rows = d.cols = 32;
    d.src = &src;
    d.dst = &dst;
    T_OK(gmm_transpose_query(T.ctx, &d, &info));
    d.dst = NULL;
    T_REFUSED(GMM_E_NULL, gmm_transpose(T.ctx, &d, NULL, 0, T.stream), "gmm_transpose", "dst", NULL);
    d.dst = &dst;
    d.rows = 0;
    T_REFUSED(GMM_E_ARG, gmm_transpose(T.ctx, &d, NULL, 0, T.stream), "rows", NULL);
    d.rows = 32;
    d.count = 0;
    T_REFUSED(GMM_E_ARG, gmm_transpose(T.ctx, &d, NULL, 0, T.stream), "count", NULL);
    d.count = 1;
    src.scaling = dst.scaling = GMM_SCALING_MX32;
    T_REFUSED(GMM_E_DTYPE, gmm_transpose(T.ctx, &d, NULL, 0, T.stream), "src", "mx32", NULL);
    src.scaling = GMM_SCALING_TENSOR;
    dst.scaling = GMM_SCALING_128X128;
    T_REFUSED(GMM_E_DTYPE, gmm_transpose(T.ctx, &d, NULL, 0, T.stream), "dst", "128x128", NULL);
    dst.scaling = GMM_SCALING_TENSOR;
    dst.dtype = GMM_E5M2;
    T_REFUSED(GMM_E_DTYPE, gmm_transpose(T.ctx, &d, NULL, 0, T.stream), "dst", "e5m2", NULL);
    dst.dtype = GMM_E4M3;
    dst.ld = 31;
    T_REFUSED(GMM_E_STRIDE, gmm_transpose(T.ctx, &d, NULL, 0, T.stream), "dst", "ld 31", NULL);
    dst.ld = 0;
    dst.scale = NULL;
    T_REFUSED(GMM_E_NULL, gmm_transpose(T.ctx, &d, NULL, 0, T.stream), "dst", "scale", NULL);
}

void tests_gtp_quant(void) {
    static const char *const kinds[] = {"bf16", "fp8", "128x128", "1x128", "mxfp8", "nvfp4"};
    static const int few[] = {0, 2, 5, 8, 10, 11, 16}; /* one format of each kind */
    for (int i = 0; i < FORMATS; i++)
        for (int g = 1; g <= 8; g *= 2)
            t_add_host(arrives, case_arg(i, g, 0), "gtp quant then gather %s, g %d", formats[i].name, g);
    for (int i = 0; i < FORMATS; i++)
        t_add_host(again, case_arg(i, 2, 0), "gtp quant gather again %s", formats[i].name);
    for (int i = 0; i < FORMATS; i++)
        t_add_host(schedules, case_arg(i, 2, 0), "gtp quant schedules %s", formats[i].name);
    for (int i = 0; i < FORMATS; i++)
        t_add_host(gathered_together, case_arg(i, 2 + i % 3, 0), "gtp quant gathered together %s, g %d",
                   formats[i].name, 2 + i % 3);
    for (int i = 0; i < T_COUNT(few); i++)
        t_add_host(mutation, case_arg(few[i], 2, 0), "gtp quant a wait left out %s", formats[few[i]].name);
    for (int i = 0; i < FORMATS; i++) {
        const int align = gmm_feature_align(formats[i].f.scaling);
        for (int g = 1; g <= 8 && formats[i].rows % align == 0 && formats[i].cols % align == 0 &&
                        !formats[i].f.delayed; g *= 2)
            t_add_host(linear, case_arg(i, g, 0), "gtp quant linear on views %s, g %d", formats[i].name, g);
        for (int g = 2; g <= 4 && formats[i].rows % align == 0 && formats[i].cols % align == 0 &&
                        formats[i].f.dtype && !formats[i].f.delayed; g *= 2)
            t_add_host(quantized_afterwards, case_arg(i, g, 0), "gtp quant linear on bf16 views cast to %s, g %d",
                       formats[i].name, g);
    }
    for (int k = GMM_RECIPE_FP8_CURRENT; k <= GMM_RECIPE_NVFP4; k++)
        for (int g = 1; g <= 4; g *= 2)
            for (int rounded = 0; rounded < 2; rounded++)
                t_add_host(mlp, case_arg(k, g, rounded), "gtp quant mlp on %sviews %s, g %d",
                           rounded ? "bf16 " : "", ref_recipe_name((gmm_recipe_kind)k), g);
    t_add_host(shared_amax, case_arg(2, 2, 0), "gtp quant amax over tensor-parallel ranks, fp8");
    t_add_host(shared_amax, case_arg(16, 2, 0), "gtp quant amax over tensor-parallel ranks, nvfp4");
    for (int i = 0; i < T_COUNT(kinds); i++)
        t_add_host(forecast, i, "gtp quant forecast of gathers and transposes %s", kinds[i]);
    for (int i = 0; i < FORMATS; i++)
        for (int g = 2; g <= 8; g *= 2)
            t_add_host(bytes_foreseen, case_arg(i, g, 0), "gtp quant bytes as foreseen %s, g %d", formats[i].name, g);
    for (int i = 0; i < T_COUNT(kinds); i++)
        for (int g = 1; g <= 4; g *= 4)
            t_add_host(memory, case_arg(i, g, 0), "gtp quant memory as foreseen %s, g %d", kinds[i], g);
    for (int i = 0; i < T_COUNT(few); i++)
        for (int n = 1; n <= 2 && few[i] != 5; n++)
            for (int together = 0; together <= 2; together += 2)
                t_add_host(graph, case_arg(few[i], n, together), "gtp quant %d graphs%s %s", n,
                           together ? ", gathered together" : "", formats[few[i]].name);
    t_add_host(errors, 0, "gtp quant errors");
    for (int i = 0; i < 16; i++)
        t_add(transposes, i, "gtp quant transpose %s %s%s%s", i & 4 ? "e5m2" : "e4m3", i & 1 ? "128x128" : "tensor",
              i & 2 ? " table" : "", i & 8 ? " pow2" : "");
    t_add(transpose_errors, 0, "gtp quant transpose errors");
}
