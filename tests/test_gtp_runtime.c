/* test_gtp_runtime.c - gathered formats, gradient scales, domains, graphs, failures and errors of the GTP runtime */
#include "gtp_world.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST = 8, BUNDLES = 8 };

typedef struct rank {
    int index;
    gmm_context *ctx;
    gmm_runtime rt;
    gmm_stream compute, side[4];
    gmm_gtp *gtp;
    int32_t domain[2], bundle[BUNDLES], weight[BUNDLES];
    void *gather[2], *reduce[2];
    gmm_gtp_need need[2];
    void *user;
} rank;

static struct world {
    gmm_ranks *ranks;
    int n, timeout_ms;
    rank r[MOST];
    gmm_comm comm[3][MOST]; /* [..][rank]: two of all ranks, one of groups of two */
} W;

/* Creates n ranks, after destroying those of the previous case, however it ended. */
static void open_world(int n, uint64_t seed, int timeout_ms) {
    static const int32_t all[MOST] = {0, 1, 2, 3, 4, 5, 6, 7};
    gmm_ranks_config c = GMM_ZERO;
    gmm_error e = GMM_ZERO;
    for (int i = 0; i < W.n; i++) {
        (void)gmm_gtp_fini(W.r[i].gtp);
        gmm_destroy(W.r[i].ctx);
    }
    gmm_ranks_destroy(W.ranks);
    gtp_free_memory();
    memset(&W, 0, sizeof W);
    W.timeout_ms = timeout_ms;
    c.ranks = n;
    c.seed = seed;
    c.check_races = 1;
    c.timeout_ms = timeout_ms;
    T_OK_TEXT(gmm_ranks_create(&c, &W.ranks, &e), e.text);
    for (int k = 0; k < 2; k++) T_OK_TEXT(gmm_ranks_comms(W.ranks, all, n, W.comm[k]), "");
    for (int i = 0; i + 1 < n; i += 2) T_OK_TEXT(gmm_ranks_comms(W.ranks, all + i, 2, W.comm[2] + i), "");
    for (int i = 0; i < n; i++) {
        rank *r = &W.r[i];
        gmm_config config = GMM_ZERO;
        config.threads = 1;
        r->index = i;
        if (gmm_create(&r->ctx, &config, NULL)) abort();
        W.n = i + 1;
        T_OK_TEXT(gmm_ranks_runtime(W.ranks, i, &r->rt), "");
        T_OK_TEXT(r->rt.stream_create(r->rt.self, 0, &r->compute), "");
        for (int k = 0; k < 4; k++) T_OK_TEXT(r->rt.stream_create(r->rt.self, 0, &r->side[k]), "");
    }
}
static void close_world(void) {
    for (int i = 0; i < W.n; i++) T_CHECK(gmm_gtp_fini(W.r[i].gtp) == GMM_OK, "fini");
    for (int i = 0; i < W.n; i++) W.r[i].gtp = NULL;
    gtp_check_memory();
    open_world(1, 0, 0);
}

#define GTP_OK(r, call) T_OK_TEXT(call, (r)->gtp ? gmm_gtp_last_error((r)->gtp) : "")
#define GTP_REFUSED(r, want, call, ...) T_REFUSED_TEXT(want, call, gmm_gtp_last_error((r)->gtp), __VA_ARGS__)

static gmm_gtp_config config_of(const rank *r) {
    gmm_gtp_config c = GMM_ZERO;
    c.domains = 2;
    c.weights = 32;
    c.bundles = BUNDLES;
    c.chains = 4;
    c.graphs = 4;
    c.timeout_ms = W.timeout_ms;
    c.ctx = r->ctx;
    c.runtime = &r->rt;
    return c;
}
static void begin(rank *r, const gmm_gtp_config *config) {
    gmm_error e = GMM_ZERO;
    size_t bytes = 0;
    void *memory;
    T_OK_TEXT(gmm_gtp_query(config, &bytes, &e), e.text);
    memory = gtp_memory(bytes, 0xFF);
    T_OK_TEXT(gmm_gtp_init(memory, bytes, config, &r->gtp, &e), e.text);
}
static gmm_gtp_domain domain_of(rank *r, int first_comm, int second_comm) {
    gmm_gtp_domain d = GMM_ZERO;
    d.gather = first_comm >= 0 ? &W.comm[first_comm][r->index] : NULL;
    d.reduce = second_comm >= 0 ? &W.comm[second_comm][r->index] : NULL;
    d.gather_stream = r->side[0];
    d.reduce_stream = r->side[first_comm == second_comm || second_comm < 0 ? 0 : 1]; /* one communicator, one stream */
    return d;
}
static void bind(rank *r, int domains) {
    GTP_OK(r, gmm_gtp_seal(r->gtp));
    for (int i = 0; i < domains; i++) {
        gmm_gtp_need *n = &r->need[i];
        GTP_OK(r, gmm_gtp_memory_need(r->gtp, i, n));
        r->gather[i] = n->gather_bytes ? gtp_memory(n->gather_bytes, 0xFF) : NULL;
        r->reduce[i] = n->reduce_bytes ? gtp_memory(n->reduce_bytes, 0xFF) : NULL;
        GTP_OK(r, gmm_gtp_bind(r->gtp, i, r->gather[i], n->gather_bytes, r->reduce[i], n->reduce_bytes));
    }
}
static void finish(void) {
    const char *race = "";
    T_CHECK(gmm_ranks_run(W.ranks) == GMM_OK, "%s", gmm_ranks_error(W.ranks, 0));
    T_CHECK(gmm_ranks_races(W.ranks, &race) == 0, "%s", race);
    gtp_check_memory();
}
#define finish(...) T_CALL(finish, __VA_ARGS__)

/* ----------------------------------------------------------------------------------------------------- Formats --- */

typedef struct format { gmm_dtype dtype; gmm_scaling scaling; int64_t rows, cols; } format;

static const format formats[] = {
    {GMM_BF16, GMM_SCALING_NONE, 40, 7}, {GMM_F16, GMM_SCALING_NONE, 64, 3}, {GMM_F32, GMM_SCALING_NONE, 33, 5},
    {GMM_E4M3, GMM_SCALING_TENSOR, 48, 24}, {GMM_E5M2, GMM_SCALING_TENSOR, 100, 16},
    {GMM_E4M3, GMM_SCALING_128X128, 512, 128}, {GMM_E4M3, GMM_SCALING_128X128, 300, 256},
    {GMM_E4M3, GMM_SCALING_1X128, 512, 128}, {GMM_E4M3, GMM_SCALING_1X128, 300, 640},
    {GMM_E4M3, GMM_SCALING_MX32, 128, 64}, {GMM_E4M3, GMM_SCALING_MX32, 136, 96}, {GMM_E5M2, GMM_SCALING_MX32, 64, 128},
    {GMM_E4M3, GMM_SCALING_MX32, 100, 192}, {GMM_E2M1, GMM_SCALING_MX32, 96, 64},
    {GMM_E2M1, GMM_SCALING_NV16, 64, 64}, {GMM_E2M1, GMM_SCALING_NV16, 80, 96}, {GMM_E2M1, GMM_SCALING_NV16, 48, 128},
    {GMM_E2M1, GMM_SCALING_NV16, 208, 192}};

/* The argument of a case: a row of formats and how many ranks; or a number below 4 and another one. Worlds draw their
   schedules from it. */
static int format_arg(int row, int ranks) { return row + 64 * ranks; }
static const format *format_of(int arg) { return &formats[arg % 64]; }
static int ranks_of(int arg) { return arg / 64; }
static int two_args(int first, int second) { return first + 4 * second; }
static int first_of(int arg) { return arg % 4; }
static int second_of(int arg) { return arg / 4; }

/* Storage of rows [row0, row0 + rows) of a quantized matrix, written element by element: `data`, then scales. */
static size_t render_data(const format *f, int columnwise, int64_t row0, int64_t rows, unsigned salt,
                          unsigned char *to) {
    const int bits = gmm_dtype_bits(f->dtype);
    const int transposed = columnwise && f->scaling != GMM_SCALING_NONE && f->scaling != GMM_SCALING_MX32;
    const size_t bytes = (size_t)(rows * f->cols * bits / 8);
    memset(to, 0, bytes);
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < f->cols; j++) {
            const int64_t at = transposed ? j * rows + i : i * f->cols + j;
            const uint64_t code = mix((uint64_t)((row0 + i) * 4096 + j) * 4 + (uint64_t)columnwise + salt * 977u);
            if (bits == 4) to[at / 2] = (unsigned char)(to[at / 2] | (code & 15) << (at % 2 * 4));
            else memcpy(to + at * bits / 8, &code, (size_t)bits / 8);
        }
    return bytes;
}
static size_t render_scale(const format *f, int columnwise, int64_t row0, int64_t rows, unsigned salt,
                           unsigned char *to) {
    int64_t per_row = 1, per_col = 1, h, w; /* matrix rows and columns that share a scale */
    int by_rows = 1; /* scale rows follow matrix rows */
    const int64_t size = f->scaling == GMM_SCALING_1X128 || f->scaling == GMM_SCALING_128X128 ? 4 : 1;
    switch (f->scaling) {
    case GMM_SCALING_1X128: by_rows = columnwise; *(columnwise ? &per_row : &per_col) = 128; break;
    case GMM_SCALING_128X128: per_row = per_col = 128; break;
    case GMM_SCALING_MX32: *(columnwise ? &per_row : &per_col) = 32; break;
    case GMM_SCALING_NV16: by_rows = !columnwise; *(columnwise ? &per_row : &per_col) = 16; break;
    default: return 0;
    }
    h = up(rows, per_row) / per_row;
    w = up(f->cols, per_col) / per_col;
    {
        const int64_t a = by_rows ? h : w, b = by_rows ? w : h; /* extents in storage, then padded */
        int64_t pa = a, pb = up(b, 4);
        if (f->scaling == GMM_SCALING_MX32) {
            pa = columnwise ? up(a, 4) : up(a, 128);
            pb = columnwise ? up(b, 128) : up(b, 4);
        } else if (f->scaling == GMM_SCALING_NV16) pa = up(a, 128);
        memset(to, 0, (size_t)(pa * pb * size));
        for (int64_t i = 0; i < a; i++)
            for (int64_t j = 0; j < b; j++) {
                const int64_t row = (by_rows ? i : j) + row0 / per_row, col = by_rows ? j : i;
                const uint64_t code = mix((uint64_t)(row * 4096 + col) * 4 + 2 + (uint64_t)columnwise + salt * 131u);
                memcpy(to + (i * pb + j) * size, &code, (size_t)size);
            }
        return (size_t)(pa * pb * size);
    }
}

/* The columnwise copy of a rowwise one, of logical rows: elements with zeros up to `padded`, or scales. */
static size_t render_turned(const format *f, int scales, int64_t padded, unsigned salt, unsigned char *to) {
    unsigned char *from = (unsigned char *)t_host((size_t)(up(f->rows, 128) * up(f->cols, 128)));
    const int64_t lines = scales ? up(f->cols, 128) / 128 : f->cols, size = scales ? 4 : 1;
    const int64_t along = scales ? up(f->rows, 128) / 128 : f->rows;
    const int64_t pitch = scales ? up(along, 4) : padded, ld = scales ? up(lines, 4) : f->cols;
    if (scales) (void)render_scale(f, 0, 0, f->rows, salt, from);
    else (void)render_data(f, 0, 0, f->rows, salt, from);
    memset(to, 0, (size_t)(lines * pitch * size));
    for (int64_t l = 0; l < lines; l++)
        for (int64_t i = 0; i < along; i++)
            memcpy(to + (l * pitch + i) * size, from + (i * ld + l) * size, (size_t)size);
    return (size_t)(lines * pitch * size);
}

static gmm_shard shard_of(const format *f, int g, int rank) {
    gmm_shard s = GMM_ZERO;
    s.dtype = f->dtype;
    s.scaling = f->scaling;
    s.rows = f->rows;
    s.cols = f->cols;
    s.gtp_size = g;
    s.gtp_rank = rank;
    return s;
}
static void render_shards(const format *f, int g, int rank, unsigned salt, gmm_gtp_weight *w) {
    const gmm_shard s = shard_of(f, g, rank);
    gmm_shard_plan p = GMM_ZERO;
    T_OK_TEXT(gmm_gtp_plan(&s, &p, NULL), "");
    for (unsigned e = 0; e < 2; e++)
        for (int c = 0; c < 2; c++) {
            if (w[e].data[c])
                T_CHECK(render_data(f, c, p.row0, p.shard_rows, e + salt, (unsigned char *)w[e].data[c]) ==
                        (size_t)p.shard_data_bytes[c], "data bytes");
            if (w[e].scale[c] && f->scaling != GMM_SCALING_TENSOR)
                T_CHECK(render_scale(f, c, p.row0, p.shard_rows, e + salt, (unsigned char *)w[e].scale[c]) ==
                        (size_t)p.shard_scale_bytes[c], "scale bytes");
        }
}

/* Two weights of a format over g ranks: the gathered views are the whole matrix in its layout, whatever the buffers
   held before, for repeated acquires, in alternating directions, and after new shards were published. */
static void transport(int arg) {
    const format *f = format_of(arg);
    const int g = ranks_of(arg);
    open_world(g, (uint64_t)arg, 500);
    for (int i = 0; i < g; i++) {
        rank *r = &W.r[i];
        const gmm_gtp_config config = config_of(r);
        const gmm_gtp_domain d = domain_of(r, g > 1 ? 0 : -1, g > 1 ? 1 : -1);
        gmm_gtp_weight w[2];
        gmm_shard s;
        gmm_shard_plan p = GMM_ZERO;
        int32_t ids[2];
        begin(r, &config);
        GTP_OK(r, gmm_gtp_add_domain(r->gtp, &d, &r->domain[0]));
        s = shard_of(f, g, i);
        T_OK_TEXT(gmm_gtp_plan(&s, &p, NULL), "");
        memset(w, 0, sizeof w);
        r->user = t_host(2 * sizeof *w);
        for (int e = 0; e < 2; e++) {
            w[e].expert = e;
            w[e].shard = &s;
            w[e].name = e ? "second" : "first";
            for (int c = 0; c < 2; c++) {
                if (p.shard_data_bytes[c]) w[e].data[c] = t_host((size_t)p.shard_data_bytes[c]);
                if (p.shard_scale_bytes[c]) w[e].scale[c] = t_host((size_t)p.shard_scale_bytes[c]);
            }
        }
        render_shards(f, g, i, 0, w);
        for (int e = 0; e < 2; e++) GTP_OK(r, gmm_gtp_add_weight(r->gtp, &w[e], &ids[e]));
        memcpy(r->user, w, sizeof w);
        GTP_OK(r, gmm_gtp_add_bundle(r->gtp, r->domain[0], ids, 2, "bundle", &r->bundle[0]));
        bind(r, 1);
    }
    for (int round = 0; round < 6; round++) {
        const gmm_gtp_pass pass = round % 2 ? GMM_GTP_BACKWARD : GMM_GTP_FORWARD;
        const int tensor = f->scaling == GMM_SCALING_TENSOR;
        const int kind = pass == GMM_GTP_BACKWARD && f->scaling != GMM_SCALING_NONE;
        const int turned = kind && (tensor || f->scaling == GMM_SCALING_128X128);
        /* scales whose row pitch depends on the number of rows have the pitch of the logical rows */
        const int pitched = f->scaling == (kind ? GMM_SCALING_NV16 : GMM_SCALING_1X128);
        gmm_gtp_view v[MOST];
        const unsigned salt = round >= 4 ? 7 : 0;
        memset(v, 0, sizeof v);
        for (int i = 0; i < g && round == 4; i++)
            GTP_OK(&W.r[i], gmm_gtp_fence(W.r[i].gtp, GMM_GTP_ALL, W.r[i].compute));
        if (round == 4) { /* new shards, in both directions */
            const int32_t ids[2] = {0, 1};
            finish();
            for (int i = 0; i < g; i++) {
                render_shards(f, g, i, 7, (gmm_gtp_weight *)W.r[i].user);
                GTP_OK(&W.r[i], gmm_gtp_publish(W.r[i].gtp, ids, 2, W.r[i].compute));
            }
        }
        for (int i = 0; i < g; i++) GTP_OK(&W.r[i], gmm_gtp_acquire(W.r[i].gtp, 0, pass, W.r[i].compute, &v[i]));
        finish();
        for (int i = 0; i < g; i++) {
            const int64_t unit = gmm_gtp_unit(f->scaling), padded = g > 1 ? up(f->rows, unit * g) : f->rows;
            for (int e = 0; e < 2; e++) {
                unsigned char *want = (unsigned char *)t_host((size_t)(up(padded, 128) * up(f->cols, 128) * 4));
                const unsigned code = (unsigned)e + salt;
                size_t bytes = turned ? render_turned(f, 0, padded, code, want) : render_data(f, kind, 0, padded, code,
                                                                                              want);
                const gmm_mat *m = kind ? v[i].mat.columnwise : &v[i].mat;
                const int64_t bits = gmm_dtype_bits(f->dtype);
                const unsigned char *data = m->table ? (unsigned char *)m->table[e]
                                                     : (unsigned char *)m->data + e * m->group_stride * bits / 8;
                const unsigned char *scale = m->scale_table ? (unsigned char *)m->scale_table[e] : NULL;
                t_same("elements", data, want, bytes);
                bytes = turned && !tensor ? render_turned(f, 1, 0, code, want)
                                          : render_scale(f, kind, 0, pitched ? f->rows : padded, code, want);
                if (tensor) memcpy(want, ((gmm_gtp_weight *)W.r[i].user)[e].scale[0], bytes = 4);
                if (!m->scale_table && m->scale) scale = (unsigned char *)m->scale + (size_t)e * bytes;
                if (bytes) t_same("scales", scale, want, bytes);
            }
            T_CHECK(!kind || (!v[i].mat.data && !v[i].mat.table), "a forward with it is refused");
            T_CHECK(v[i].rows == f->rows && v[i].cols == f->cols && v[i].count == 2, "shape");
            T_CHECK(v[i].version == (round >= 4), "version %lld", (long long)v[i].version);
            GTP_OK(&W.r[i], gmm_gtp_release(W.r[i].gtp, 0, pass, W.r[i].compute));
        }
    }
    close_world();
}

/* ------------------------------------------------------------------------------------- Scales, domains, amax --- */

typedef struct fill_argument { float *to; const float *from; size_t count; } fill_argument;
static gmm_status fill_run(const void *argument, gmm_stream stream) {
    const fill_argument *a = (const fill_argument *)argument;
    (void)stream;
    memcpy(a->to, a->from, a->count * sizeof(float));
    return GMM_OK;
}
static void give_floats(rank *r, void *to, const float *from, size_t count) {
    gmm_work w = GMM_ZERO;
    gmm_range range = GMM_ZERO;
    fill_argument a;
    a.to = (float *)to;
    a.from = from;
    a.count = count;
    range.data = to;
    range.bytes = count * sizeof(float);
    range.writes = 1;
    w.name = "gradient";
    w.function = fill_run;
    w.argument = &a;
    w.argument_bytes = sizeof a;
    w.ranges = &range;
    w.range_count = 1;
    T_OK_TEXT(r->rt.run(r->rt.self, &w, r->compute), "");
}

/* One weight of 12 x 5 in fp32 in each of the domains; main_grad starts as 0xFF bytes. */
static void declare(rank *r, int domains, const gmm_gtp_domain *d, float **main_grad, gmm_shard_plan *plans) {
    const gmm_gtp_config config = config_of(r);
    memset(plans, 0, (size_t)domains * sizeof *plans);
    begin(r, &config);
    for (int k = 0; k < domains; k++) {
        gmm_shard s = GMM_ZERO;
        gmm_gtp_weight w = GMM_ZERO;
        int32_t id;
        GTP_OK(r, gmm_gtp_add_domain(r->gtp, &d[k], &r->domain[k]));
        s.dtype = GMM_F32;
        s.rows = 12;
        s.cols = 5;
        s.gtp_size = d[k].gather ? d[k].gather->size : 1;
        s.gtp_rank = d[k].gather ? d[k].gather->rank : 0;
        s.unit = 2;
        T_OK_TEXT(gmm_gtp_plan(&s, &plans[k], NULL), "");
        w.name = k ? "expert" : "dense";
        w.shard = &s;
        w.data[0] = gtp_memory((size_t)plans[k].shard_data_bytes[0], 0);
        w.main_grad = main_grad[k] = (float *)gtp_memory((size_t)plans[k].shard_data_bytes[0], 0xFF);
        w.main_grad_dtype = GMM_F32;
        GTP_OK(r, gmm_gtp_add_weight(r->gtp, &w, &id));
        GTP_OK(r, gmm_gtp_add_bundle(r->gtp, r->domain[k], &id, 1, w.name, &r->bundle[k]));
    }
    bind(r, domains);
}

/* A dense weight over four ranks, and an expert over two of them, whose two copies' gradients the caller adds. With a
   scale of 1/4 both results are the mean over data-parallel ranks, since the caller gives the scales and nothing
   derives them from the number of ranks of a domain. 1 gives the sum, 1/3 is no power of two, 0 gives zeros. */
static void scales(int arg) {
    static const float factor[] = {0.25f, 1.0f, 1.0f / 3, 0.0f};
    float *main_grad[MOST][2], *gradient[MOST];
    gmm_shard_plan plan[MOST][2];
    const int g = arg == 2 ? 3 : 4, domains = arg == 2 ? 1 : 2;
    open_world(g, 3 + (uint64_t)arg, 500);
    for (int i = 0; i < g; i++) {
        rank *r = &W.r[i];
        gmm_gtp_domain d[2];
        d[0] = domain_of(r, 0, 1);
        d[1] = domain_of(r, 2, 2);
        d[1].gather_stream = r->side[2];
        d[1].reduce_stream = r->side[2];
        declare(r, domains, d, main_grad[i], plan[i]);
        gradient[i] = (float *)t_host(60 * sizeof(float));
        for (int k = 0; k < 60; k++) gradient[i][k] = arg == 2 ? (float)t_real() : (float)t_int(-8, 8);
    }
    for (int i = 0; i < g; i++)
        for (int k = 0; k < domains; k++) {
            rank *r = &W.r[i];
            gmm_gtp_view v = GMM_ZERO;
            gmm_gtp_gradient in = GMM_ZERO;
            GTP_OK(r, gmm_gtp_wgrad(r->gtp, r->bundle[k], r->compute, &v));
            T_CHECK(v.mat.dtype == GMM_F32 && v.rows == 12 && v.cols == 5, "the buffer");
            give_floats(r, v.mat.data, gradient[i], 60);
            in.scale = factor[arg];
            in.add = GMM_GTP_SET;
            GTP_OK(r, gmm_gtp_submit(r->gtp, r->bundle[k], &in, r->compute));
        }
    finish();
    for (int k = 0; k < domains; k++)
        for (int64_t e = 0; e < 60; e++) {
            double want = 0, got = 0;
            for (int i = 0; i < g; i++) {
                const int64_t at = e - plan[i][k].row0 * 5;
                want += (double)gradient[i][e];
                if (at >= 0 && at < plan[i][k].valid_rows * 5) got += (double)main_grad[i][k][at];
            }
            want *= (double)factor[arg];
            T_CHECK(fabs(got - want) <= (arg == 2 ? 1e-6 : 0), "domain %d element %lld: %g, not %g", k, (long long)e,
                    got, want);
        }
    close_world();
}

static void amax(int arg) {
    static float values[2][3] = {{1, 5, 0}, {100, 2, 0}};
    float *main_grad[2][2];
    gmm_shard_plan plan[2][2];
    (void)arg;
    open_world(2, 9, 500);
    for (int i = 0; i < 2; i++) {
        const gmm_gtp_domain d = domain_of(&W.r[i], 0, 1);
        values[i][0] = i ? 100 : 1;
        values[i][1] = i ? 2 : 5;
        declare(&W.r[i], 1, &d, main_grad[i], plan[i]);
        GTP_OK(&W.r[i], gmm_gtp_amax(W.r[i].gtp, 0, values[i], 3, W.r[i].compute));
    }
    finish();
    for (int i = 0; i < 2; i++)
        T_CHECK(values[i][0] == 100 && values[i][1] == 5 && values[i][2] == 0, "rank %d", i);
    GTP_REFUSED(&W.r[0], GMM_E_ARG, gmm_gtp_amax(W.r[0].gtp, 3, values[0], 3, NULL), "gmm_gtp_amax", "domain 3", NULL);
    GTP_REFUSED(&W.r[0], GMM_E_ALIGN, gmm_gtp_amax(W.r[0].gtp, 0, (float *)(void *)((char *)values[0] + 2), 1, NULL),
                "gmm_gtp_amax", "values", NULL);
    close_world();
}

/* ------------------------------------------------------------------------------------------------------ Graphs --- */

enum { LAYERS = 4, SIDE = 12, ELEMENTS = SIDE * 4 };

/* A model of four sharded layers and an unsharded one; the values that are read and added depend on a counter in
   memory. */
typedef struct model {
    float *shard[LAYERS + 1], *main_grad[LAYERS + 1];
    gmm_shard_plan plan[LAYERS + 1];
    int64_t *counter;           /* of micro-batches */
    double *seen;               /* [2]: weighted sums of all values read from views */
    int64_t asked, reported;
    int32_t forward, backward;  /* chains */
} model;
typedef struct step_argument { rank *r; gmm_mat mat; int layer, backward; } step_argument;

static gmm_status look_run(const void *argument, gmm_stream stream) {
    const step_argument *a = (const step_argument *)argument;
    const model *m = (const model *)a->r->user;
    const float *w = (const float *)(const void *)(a->mat.table ? (char *)a->mat.table[0] : (char *)a->mat.data);
    (void)stream;
    for (int i = 0; i < ELEMENTS; i++) m->seen[a->backward] += (double)(w[i] * (float)(i % 7 + a->layer + 1));
    return GMM_OK;
}
static gmm_status grad_run(const void *argument, gmm_stream stream) {
    const step_argument *a = (const step_argument *)argument;
    const model *m = (const model *)a->r->user;
    float *g = (float *)a->mat.data;
    (void)stream;
    for (int i = 0; i < ELEMENTS; i++)
        g[i] = (float)((int)(mix((uint64_t)(i * 64 + a->layer * 8 + a->r->index) + (uint64_t)*m->counter * 4096) % 5) -
                       2);
    return GMM_OK;
}
static gmm_status count_run(const void *argument, gmm_stream stream) {
    (void)stream;
    ++*((const model *)((const step_argument *)argument)->r->user)->counter;
    return GMM_OK;
}
static gmm_status update_run(const void *argument, gmm_stream stream) {
    const model *m = (const model *)((const step_argument *)argument)->r->user;
    (void)stream;
    for (int l = 0; l <= LAYERS; l++)
        for (int64_t i = 0; i < m->plan[l].valid_rows * 4; i++) m->shard[l][i] += m->main_grad[l][i];
    return GMM_OK;
}

static void give(rank *r, gmm_status (*function)(const void *, gmm_stream), int layer, int backward, const gmm_mat *mat,
                 int writes) {
    model *m = (model *)r->user;
    gmm_range ranges[2 * LAYERS + 3];
    gmm_work w = GMM_ZERO;
    step_argument a;
    int n = 0;
    memset(&a, 0, sizeof a);
    memset(ranges, 0, sizeof ranges);
    a.r = r;
    a.layer = layer;
    a.backward = backward;
    if (mat) {
        a.mat = *mat;
        ranges[n].data = mat->table ? mat->table[0] : mat->data;
        ranges[n].bytes = ELEMENTS * sizeof(float);
        ranges[n++].writes = writes;
    }
    for (int l = 0; l <= LAYERS && function == update_run; l++) {
        ranges[n].data = m->shard[l];
        ranges[n].bytes = (size_t)(m->plan[l].shard_rows * 16);
        ranges[n++].writes = 1;
        ranges[n].data = m->main_grad[l];
        ranges[n++].bytes = (size_t)(m->plan[l].shard_rows * 16);
    }
    ranges[n].data = m->counter;
    ranges[n].bytes = sizeof *m->counter;
    ranges[n++].writes = function == count_run;
    w.name = "model";
    w.function = function;
    w.argument = &a;
    w.argument_bytes = sizeof a;
    w.ranges = ranges;
    w.range_count = n;
    T_OK_TEXT(r->rt.run(r->rt.self, &w, r->compute), "");
}

static void need(void *user, gmm_gtp *gtp, const int32_t *weights, int32_t count) {
    (void)gtp;
    (void)weights;
    ((model *)((rank *)user)->user)->asked += count;
}
static void ready(void *user, gmm_gtp *gtp, const int32_t *weights, int32_t count, gmm_stream stream) {
    (void)gtp;
    (void)weights;
    (void)stream;
    ((model *)((rank *)user)->user)->reported += count;
}

/* A communicator that counts its calls and records the streams that it uses. */
typedef struct counting {
    gmm_comm inner;
    int64_t groups, gathers, scatters, turns; /* turns: gathers whose size differs from the previous one */
    size_t last;
    char flag; /* written by each call, as peer copies write flags */
} counting;
static gmm_status flagged(char *flag, gmm_stream stream);
static gmm_status n_begin(void *s, const char *what) {
    ((counting *)s)->groups++;
    return ((counting *)s)->inner.group_begin(((counting *)s)->inner.self, what);
}
static gmm_status n_end(void *s) { return ((counting *)s)->inner.group_end(((counting *)s)->inner.self); }
static gmm_status n_gather(void *s, const void *a, void *b, size_t n, gmm_stream t) {
    ((counting *)s)->gathers++;
    ((counting *)s)->turns += n != ((counting *)s)->last;
    ((counting *)s)->last = n;
    if (flagged(&((counting *)s)->flag, t)) return GMM_E_MEMORY;
    return ((counting *)s)->inner.all_gather(((counting *)s)->inner.self, a, b, n, t);
}
static gmm_status n_scatter(void *s, const void *a, void *b, size_t n, gmm_dtype d, gmm_stream t) {
    ((counting *)s)->scatters++;
    if (flagged(&((counting *)s)->flag, t)) return GMM_E_MEMORY;
    return ((counting *)s)->inner.reduce_scatter(((counting *)s)->inner.self, a, b, n, d, t);
}
static gmm_status n_exchange(void *s, const void *a, void *b, size_t n, gmm_stream t) {
    T_CHECK(0, "an exchange is not asked for");
    return ((counting *)s)->inner.all_to_all(((counting *)s)->inner.self, a, b, n, t);
}
static gmm_status n_max(void *s, float *a, size_t n, gmm_stream t) {
    T_CHECK(0, "a maximum is not asked for");
    return ((counting *)s)->inner.all_reduce_max(((counting *)s)->inner.self, a, n, t);
}
static gmm_status n_poll(void *s, gmm_error *e) {
    return ((counting *)s)->inner.poll(((counting *)s)->inner.self, e);
}
static void n_give_up(void *s, const char *why) { ((counting *)s)->inner.give_up(((counting *)s)->inner.self, why); }
static gmm_comm counting_of(counting *c, const gmm_comm *inner) {
    gmm_comm out = *inner;
    memset(c, 0, sizeof *c);
    c->inner = *inner;
    out.self = c;
    out.group_begin = n_begin;
    out.group_end = n_end;
    out.all_gather = n_gather;
    out.reduce_scatter = n_scatter;
    out.all_to_all = n_exchange;
    out.all_reduce_max = n_max;
    out.poll = n_poll;
    out.give_up = n_give_up;
    return out;
}

/* Leaves out one of rank 0's stream waits, counted from 1 (-1 = none). With `probes`, a record after work or after a
   wait writes a memory slot of its own, and whoever waits for that record reads the slot before its stream's next work
   or record: the race checker then shows whether other waits imply the one that was left out. */
enum { PROBES = 8192 };
static struct dropped {
    gmm_runtime beneath;
    int64_t waits, drop;
    int probes, slots, events;
    int alone; /* 1: gathers and reductions have one communicator */
    gmm_event event[256], awaited[64];
    /* newest: last slot of each stream, -1 = none; busy: the stream has work since then */
    int slot[256], pending, newest[8], busy[8];
    gmm_stream waiter[64], stream[8];
    counting comm[2];
    char memory[PROBES];
} dropped;
static gmm_status probe_run(const void *argument, gmm_stream stream) {
    (void)argument;
    (void)stream;
    return GMM_OK;
}
static int number_of(gmm_stream stream) {
    int i = 0;
    while (i < 8 && dropped.stream[i] && dropped.stream[i] != stream) i++;
    if (i == 8) abort();
    if (!dropped.stream[i]) dropped.newest[i] = -1;
    dropped.stream[i] = stream;
    return i;
}
static void worked(gmm_stream stream) {
    if (dropped.probes) dropped.busy[number_of(stream)] = 1;
}
/* A call of a communicator writes the communicator's flag, so that the race checker finds calls that nothing orders. */
static gmm_status flagged(char *flag, gmm_stream stream) {
    gmm_range range = GMM_ZERO;
    gmm_work w = GMM_ZERO;
    if (!dropped.drop) return GMM_OK;
    worked(stream);
    range.data = flag;
    range.bytes = 1;
    range.writes = 1;
    w.name = "flag";
    w.function = probe_run;
    w.ranges = &range;
    w.range_count = 1;
    return dropped.beneath.run(dropped.beneath.self, &w, stream);
}
static gmm_status probe(void *self, gmm_event event, gmm_stream stream, int writes) {
    const int at = number_of(stream);
    gmm_range range = GMM_ZERO;
    gmm_work w = GMM_ZERO;
    int i = 0;
    while (i < dropped.events && dropped.event[i] != event) i++;
    if (i == dropped.events && !writes) return GMM_OK; /* never recorded */
    if (i == T_COUNT(dropped.event) || dropped.slots == PROBES) abort();
    if (i == dropped.events) dropped.event[dropped.events++] = event;
    if (writes) {
        const int fresh = dropped.busy[at];
        if (fresh) dropped.newest[at] = dropped.slots++;
        dropped.busy[at] = 0;
        dropped.slot[i] = dropped.newest[at];
        if (!fresh) return GMM_OK;
    }
    if (dropped.slot[i] < 0) return GMM_OK;
    range.data = &dropped.memory[dropped.slot[i]];
    range.bytes = 1;
    range.writes = writes;
    w.name = "probe";
    w.function = probe_run;
    w.ranges = &range;
    w.range_count = 1;
    return dropped.beneath.run(self, &w, stream);
}
static gmm_status read_slots(void *self, gmm_stream stream) {
    gmm_status s = GMM_OK;
    int left = 0;
    for (int i = 0; i < dropped.pending; i++)
        if (dropped.waiter[i] != stream) {
            dropped.waiter[left] = dropped.waiter[i];
            dropped.awaited[left++] = dropped.awaited[i];
        } else if (!s) s = probe(self, dropped.awaited[i], stream, 0);
    dropped.pending = left;
    return s;
}
static gmm_status d_wait(void *self, gmm_stream stream, gmm_event event, uint32_t flags) {
    if (dropped.probes) {
        if (dropped.pending == T_COUNT(dropped.waiter)) abort();
        dropped.waiter[dropped.pending] = stream;
        dropped.awaited[dropped.pending++] = event;
        worked(stream);
    }
    return ++dropped.waits == dropped.drop ? GMM_OK : dropped.beneath.stream_wait(self, stream, event, flags);
}
static gmm_status d_record(void *self, gmm_event event, gmm_stream stream, uint32_t flags) {
    gmm_status s = read_slots(self, stream);
    if (!s && dropped.probes) s = probe(self, event, stream, 1);
    return s ? s : dropped.beneath.event_record(self, event, stream, flags);
}
static gmm_status d_run(void *self, const gmm_work *work, gmm_stream stream) {
    const gmm_status s = read_slots(self, stream);
    worked(stream);
    return s ? s : dropped.beneath.run(self, work, stream);
}

static void model_make(rank *r, int captured, int prefetch, gmm_gtp_reduction reduction) {
    model *m = (model *)t_host(sizeof *m);
    gmm_gtp_config config = config_of(r);
    gmm_gtp_domain d = domain_of(r, 0, !dropped.alone), one = domain_of(r, -1, -1);
    gmm_gtp_chain c = GMM_ZERO;
    gmm_comm comm[2];
    int32_t list[LAYERS + 1];
    r->user = m;
    if (r->index == 0 && dropped.drop) {
        dropped.beneath = r->rt;
        r->rt.stream_wait = d_wait;
        r->rt.event_record = d_record;
        r->rt.run = d_run;
    }
    m->counter = (int64_t *)t_host(sizeof(int64_t));
    m->seen = (double *)t_host(2 * sizeof(double));
    config.hooks.user = r;
    config.hooks.need = need;
    config.hooks.ready = ready;
    if (r->index == 0 && dropped.drop) {
        comm[0] = counting_of(&dropped.comm[0], d.gather);
        comm[1] = counting_of(&dropped.comm[1], d.reduce);
        d.gather = &comm[0];
        d.reduce = &comm[!dropped.alone];
    }
    d.reduction = reduction;
    begin(r, &config);
    one.reduce_stream = r->side[3];
    GTP_OK(r, gmm_gtp_add_domain(r->gtp, &d, &r->domain[0]));
    GTP_OK(r, gmm_gtp_add_domain(r->gtp, &one, &r->domain[1]));
    for (int l = 0; l <= LAYERS; l++) {
        gmm_shard s = GMM_ZERO;
        gmm_gtp_weight w = GMM_ZERO;
        s.dtype = GMM_F32;
        s.rows = SIDE;
        s.cols = 4;
        s.gtp_size = l < LAYERS ? W.n : 1;
        s.gtp_rank = l < LAYERS ? r->index : 0;
        s.unit = 4;
        T_OK_TEXT(gmm_gtp_plan(&s, &m->plan[l], NULL), "");
        m->shard[l] = (float *)gtp_memory((size_t)(m->plan[l].shard_rows * 16), 0);
        m->main_grad[l] = (float *)gtp_memory((size_t)(m->plan[l].shard_rows * 16), 0);
        for (int64_t i = 0; i < m->plan[l].valid_rows * 4; i++)
            m->shard[l][i] = (float)((int)(mix((uint64_t)(m->plan[l].row0 * 4 + i) * 8 + (uint64_t)l) % 9) - 4);
        w.name = "layer";
        w.shard = &s;
        w.data[0] = m->shard[l];
        w.main_grad = m->main_grad[l];
        w.main_grad_dtype = GMM_F32;
        GTP_OK(r, gmm_gtp_add_weight(r->gtp, &w, &r->weight[l]));
        GTP_OK(r, gmm_gtp_add_bundle(r->gtp, r->domain[l == LAYERS], &r->weight[l], 1, "layer", &r->bundle[l]));
    }
    c.bundles = list;
    c.count = LAYERS + 1;
    c.prefetch = prefetch;
    c.captured = captured;
    for (int l = 0; l <= LAYERS; l++) list[l] = r->bundle[l];
    GTP_OK(r, gmm_gtp_add_chain(r->gtp, &c, &m->forward));
    c.pass = GMM_GTP_BACKWARD;
    for (int l = 0; l <= LAYERS; l++) list[l] = r->bundle[LAYERS - l];
    GTP_OK(r, gmm_gtp_add_chain(r->gtp, &c, &m->backward));
    bind(r, 2);
    GTP_OK(r, gmm_gtp_follow(r->gtp, m->forward, m->backward));
}

static void run_forward(rank *r) {
    for (int l = 0; l <= LAYERS; l++) {
        gmm_gtp_view v = GMM_ZERO;
        GTP_OK(r, gmm_gtp_acquire(r->gtp, r->bundle[l], GMM_GTP_FORWARD, r->compute, &v));
        give(r, look_run, l, 0, &v.mat, 0);
        GTP_OK(r, gmm_gtp_release(r->gtp, r->bundle[l], GMM_GTP_FORWARD, r->compute));
    }
}
#define run_forward(...) T_CALL(run_forward, __VA_ARGS__)
static void run_backward(rank *r) {
    for (int l = LAYERS; l >= 0; l--) {
        gmm_gtp_view v = GMM_ZERO, w = GMM_ZERO;
        gmm_gtp_gradient g = GMM_ZERO;
        GTP_OK(r, gmm_gtp_acquire(r->gtp, r->bundle[l], GMM_GTP_BACKWARD, r->compute, &v));
        give(r, look_run, l, 1, &v.mat, 0);
        GTP_OK(r, gmm_gtp_release(r->gtp, r->bundle[l], GMM_GTP_BACKWARD, r->compute));
        GTP_OK(r, gmm_gtp_wgrad(r->gtp, r->bundle[l], r->compute, &w));
        give(r, grad_run, l, 1, &w.mat, 1);
        g.scale = 1;
        GTP_OK(r, gmm_gtp_submit(r->gtp, r->bundle[l], &g, r->compute));
    }
}
#define run_backward(...) T_CALL(run_backward, __VA_ARGS__)

/* Three steps of three micro-batches: eagerly; in one graph; in a forward and a backward graph, where one hands a
   prefetched gather to the other; or forward in a graph and backward eagerly. Values read, added and reported are
   equal. */
static void graphs(int arg) {
    const int mode = first_of(arg), g = second_of(arg);
    double seen[2][MOST][2];
    float *sums[2][MOST];
    for (int run = 0; run < 2; run++) {
        gmm_ranks_graph *graph[MOST][2];
        const int captured = run == 1 && mode > 0;
        open_world(g, 77 + (uint64_t)arg, 500);
        memset(graph, 0, sizeof graph);
        for (int i = 0; i < g; i++) {
            rank *r = &W.r[i];
            model *m;
            model_make(r, captured, 1, GMM_GTP_REDUCE_AUTO);
            m = (model *)r->user;
            if (!captured) continue;
            GTP_OK(r, gmm_gtp_dry_run(r->gtp, 1)); /* a dry run leaves main_grad unchanged */
            run_forward(r);
            run_backward(r);
            GTP_OK(r, gmm_gtp_dry_run(r->gtp, 0));
            T_CHECK(m->asked == 0 && m->reported == 0, "a dry run calls nobody back");
            GTP_OK(r, gmm_gtp_fence(r->gtp, GMM_GTP_ALL, r->compute));
        }
        finish();
        for (int i = 0; i < g && captured; i++) {
            rank *r = &W.r[i];
            model *m = (model *)r->user;
            for (int l = 0; l <= LAYERS; l++)
                for (int64_t k = 0; k < m->plan[l].shard_rows * 4; k++) T_CHECK(m->main_grad[l][k] == 0, "main_grad");
            m->seen[0] = m->seen[1] = 0;
            for (int part = 0; part < (mode == 1 ? 1 : 2); part++) {
                int32_t id = -1;
                T_OK_TEXT(gmm_ranks_capture_begin(W.ranks, i, r->compute), gmm_ranks_error(W.ranks, i));
                GTP_OK(r, gmm_gtp_capture_begin(r->gtp, r->compute, &id));
                T_CHECK(id == part, "graph %d", (int)id);
                GTP_REFUSED(r, GMM_E_CAPTURE, gmm_gtp_publish(r->gtp, r->weight, 1, r->compute), "gmm_gtp_publish",
                            NULL);
                if (part == 0) run_forward(r);
                if (part == 1 || mode == 1) run_backward(r);
                GTP_OK(r, gmm_gtp_capture_end(r->gtp, r->compute));
                T_OK_TEXT(gmm_ranks_capture_end(W.ranks, i, r->compute, &graph[i][part]), gmm_ranks_error(W.ranks, i));
            }
            T_CHECK(m->asked == 0 && m->reported == 0, "a capture calls nobody back");
        }
        for (int step = 0; step < 3; step++) {
            for (int micro = 0; micro < 3; micro++)
                for (int i = 0; i < g; i++) {
                    rank *r = &W.r[i];
                    give(r, count_run, 0, 0, NULL, 1);
                    /* mode 3: forward in the graph and eagerly */
                    for (int turn = 0; turn < (mode == 3 ? 4 : 2); turn++) {
                        const int part = turn % 2 && turn < 3;
                        if (!captured || (mode == 3 && turn % 2)) {
                            if (part == 0) run_forward(r);
                            else run_backward(r);
                        } else if (graph[i][part]) {
                            GTP_OK(r, gmm_gtp_pre_replay(r->gtp, part, r->compute));
                            T_OK_TEXT(gmm_ranks_launch(graph[i][part], r->compute), gmm_ranks_error(W.ranks, i));
                            GTP_OK(r, gmm_gtp_post_replay(r->gtp, part, r->compute));
                        }
                    }
                }
            for (int i = 0; i < g; i++) {
                rank *r = &W.r[i];
                GTP_OK(r, gmm_gtp_fence(r->gtp, GMM_GTP_ALL, r->compute));
                give(r, update_run, 0, 0, NULL, 1);
                GTP_OK(r, gmm_gtp_publish(r->gtp, r->weight, LAYERS + 1, r->compute));
            }
        }
        finish();
        for (int i = 0; i < g; i++) {
            model *m = (model *)W.r[i].user;
            seen[run][i][0] = m->seen[0];
            seen[run][i][1] = m->seen[1];
            sums[run][i] = (float *)t_host(ELEMENTS * (LAYERS + 1) * sizeof(float));
            for (int l = 0; l <= LAYERS; l++)
                memcpy(sums[run][i] + l * ELEMENTS, m->main_grad[l], (size_t)(m->plan[l].valid_rows * 16));
            T_CHECK(m->asked == (mode == 3 ? 27 : 9) * (LAYERS + 1) && m->reported == 9 * (LAYERS + 1),
                    "asked %lld, reported %lld", (long long)m->asked, (long long)m->reported);
            for (int part = 0; part < 2; part++) gmm_ranks_graph_destroy(graph[i][part]);
        }
        close_world();
    }
    for (int i = 0; i < g; i++) {
        T_CHECK(seen[0][i][0] == seen[1][i][0] && seen[0][i][1] == seen[1][i][1] && seen[0][i][0] != 0,
                "rank %d read something else: %g %g, %g %g", i, seen[0][i][0], seen[1][i][0], seen[0][i][1],
                seen[1][i][1]);
        t_same("main_grad", sums[0][i], sums[1][i], ELEMENTS * (LAYERS + 1) * sizeof(float));
    }
}

/* Replays and calls outside of graphs alternate without a fence, and have a receive buffer and communicators in common:
   (0) exchanges, (1) sums of the communicator, (2) gathers in graphs, and sums of the same communicator outside. */
static void unfenced(int arg) {
    const gmm_gtp_reduction reduction = arg ? GMM_GTP_REDUCE_SCATTER : GMM_GTP_REDUCE_EXCHANGE;
    gmm_ranks_graph *graph[2];
    dropped.alone = arg == 2;
    dropped.drop = arg ? -1 : 0; /* calls of rank 0's communicators write flags */
    dropped.probes = 0;
    for (uint64_t seed = 1; seed <= 4; seed++) {
        open_world(2, seed, 500);
        for (int i = 0; i < 2; i++) {
            rank *r = &W.r[i];
            int32_t id = -1;
            gmm_gtp_gradient zero = GMM_ZERO;
            zero.zero = 1;
            model_make(r, 1, 1, reduction);
            run_forward(r);
            run_backward(r); /* a warm-up */
            T_OK_TEXT(gmm_ranks_capture_begin(W.ranks, i, r->compute), "");
            GTP_OK(r, gmm_gtp_capture_begin(r->gtp, r->compute, &id));
            run_forward(r);
            if (arg < 2) run_backward(r);
            GTP_OK(r, gmm_gtp_capture_end(r->gtp, r->compute));
            T_OK_TEXT(gmm_ranks_capture_end(W.ranks, i, r->compute, &graph[i]), gmm_ranks_error(W.ranks, i));
            for (int turn = 0; turn < 4; turn++) {
                const gmm_stream stream = turn < 2 ? r->compute : r->side[2];
                GTP_OK(r, gmm_gtp_pre_replay(r->gtp, id, stream));
                T_OK_TEXT(gmm_ranks_launch(graph[i], stream), gmm_ranks_error(W.ranks, i));
                GTP_OK(r, gmm_gtp_post_replay(r->gtp, id, stream));
                if (turn == 0 && arg < 2) run_backward(r);
                if (arg == 2) GTP_OK(r, gmm_gtp_submit(r->gtp, r->bundle[turn], &zero, r->side[3]));
            }
        }
        finish();
        for (int i = 0; i < 2; i++) gmm_ranks_graph_destroy(graph[i]);
        close_world();
    }
    dropped.alone = dropped.drop = 0;
}

static void capture_rules(int arg) {
    rank *r;
    int32_t id = -1;
    gmm_gtp_view v = GMM_ZERO;
    gmm_gtp_gradient g = GMM_ZERO;
    gmm_ranks_graph *graph = NULL;
    (void)arg;
    open_world(2, 0, 200);
    for (int i = 0; i < 2; i++) model_make(&W.r[i], 1, 1, GMM_GTP_REDUCE_AUTO);
    r = &W.r[0];
    GTP_REFUSED(r, GMM_E_CAPTURE, gmm_gtp_capture_begin(r->gtp, r->compute, &id), "not capturing", NULL);
    T_OK_TEXT(gmm_ranks_capture_begin(W.ranks, 0, r->compute), "");
    GTP_OK(r, gmm_gtp_capture_begin(r->gtp, r->compute, &id));
    GTP_REFUSED(r, GMM_E_STATE, gmm_gtp_capture_begin(r->gtp, r->compute, &id), "graph 0", NULL);
    GTP_REFUSED(r, GMM_E_CAPTURE, gmm_gtp_dry_run(r->gtp, 1), "gmm_gtp_dry_run", NULL);
    GTP_REFUSED(r, GMM_E_CAPTURE, gmm_gtp_poll(r->gtp), "gmm_gtp_poll", NULL);
    for (int l = 0; l < 2; l++) /* two open gradients in two slots */
        GTP_OK(r, gmm_gtp_wgrad(r->gtp, r->bundle[l], r->compute, &v));
    GTP_REFUSED(r, GMM_E_STATE, gmm_gtp_wgrad(r->gtp, r->bundle[2], r->compute, &v), "wgrad_slots", "'layer'", NULL);
    g.zero = 1;
    GTP_REFUSED(r, GMM_E_STATE, gmm_gtp_submit(r->gtp, r->bundle[2], &g, r->compute), "in use", "'layer'", NULL);
    g.zero = 0;
    GTP_OK(r, gmm_gtp_wgrad_part(r->gtp, r->bundle[0], 0, 1, &v));
    GTP_REFUSED(r, GMM_E_STATE, gmm_gtp_capture_end(r->gtp, r->compute), "gmm_gtp_capture_end", "not submitted", NULL);
    for (int l = 0; l < 2; l++) GTP_OK(r, gmm_gtp_submit(r->gtp, r->bundle[l], &g, r->compute));
    GTP_OK(r, gmm_gtp_prefetch(r->gtp, r->bundle[0], GMM_GTP_FORWARD));
    GTP_OK(r, gmm_gtp_follow(r->gtp, ((model *)r->user)->forward, -1));
    GTP_OK(r, gmm_gtp_acquire(r->gtp, r->bundle[0], GMM_GTP_FORWARD, r->compute, &v));
    GTP_OK(r, gmm_gtp_view_part(r->gtp, r->bundle[0], GMM_GTP_FORWARD, 0, 1, &v));
    GTP_REFUSED(r, GMM_E_STATE, gmm_gtp_capture_end(r->gtp, r->compute), "gmm_gtp_capture_end", "'layer' is held",
                NULL);
    GTP_OK(r, gmm_gtp_release(r->gtp, r->bundle[0], GMM_GTP_FORWARD, r->compute));
    GTP_OK(r, gmm_gtp_capture_end(r->gtp, r->compute));
    T_OK_TEXT(gmm_ranks_capture_end(W.ranks, 0, r->compute, &graph), gmm_ranks_error(W.ranks, 0));
    gmm_ranks_graph_destroy(graph);

    for (int i = 0; i < 2; i++) { /* a dry run does not end within a pass, whose view then remains the caller's */
        r = &W.r[i];
        GTP_OK(r, gmm_gtp_dry_run(r->gtp, 1));
        GTP_OK(r, gmm_gtp_acquire(r->gtp, r->bundle[0], GMM_GTP_FORWARD, r->compute, &v));
        GTP_REFUSED(r, GMM_E_STATE, gmm_gtp_dry_run(r->gtp, 0), "gmm_gtp_dry_run", "'layer' is held", NULL);
        give(r, look_run, 0, 0, &v.mat, 0);
        GTP_OK(r, gmm_gtp_release(r->gtp, r->bundle[0], GMM_GTP_FORWARD, r->compute));
        GTP_OK(r, gmm_gtp_publish(r->gtp, r->weight, 1, r->side[3]));
        GTP_OK(r, gmm_gtp_acquire(r->gtp, r->bundle[0], GMM_GTP_FORWARD, r->side[3], &v));
        GTP_OK(r, gmm_gtp_release(r->gtp, r->bundle[0], GMM_GTP_FORWARD, r->side[3]));
        GTP_OK(r, gmm_gtp_wgrad(r->gtp, r->bundle[0], r->compute, &v));
        GTP_REFUSED(r, GMM_E_STATE, gmm_gtp_dry_run(r->gtp, 0), "gmm_gtp_dry_run", "not submitted", NULL);
        GTP_OK(r, gmm_gtp_submit(r->gtp, r->bundle[0], &g, r->compute));
        GTP_OK(r, gmm_gtp_dry_run(r->gtp, 0));
        GTP_OK(r, gmm_gtp_wgrad(r->gtp, r->bundle[0], r->compute, &v)); /* outside of graphs */
        T_OK_TEXT(gmm_ranks_capture_begin(W.ranks, i, r->compute), "");
        GTP_REFUSED(r, GMM_E_STATE, gmm_gtp_capture_begin(r->gtp, r->compute, &id), "not submitted", NULL);
        T_OK_TEXT(gmm_ranks_capture_end(W.ranks, i, r->compute, &graph), gmm_ranks_error(W.ranks, i));
        gmm_ranks_graph_destroy(graph);
    }
    GTP_REFUSED(&W.r[0], GMM_E_STATE, gmm_gtp_pre_replay(W.r[0].gtp, 0, W.r[0].compute), "not submitted", NULL);
    finish();
    close_world();

    open_world(2, 0, 200); /* a bundle of an eager chain may not be used in a graph */
    for (int i = 0; i < 2; i++) model_make(&W.r[i], 0, 1, GMM_GTP_REDUCE_AUTO);
    r = &W.r[0];
    T_OK_TEXT(gmm_ranks_capture_begin(W.ranks, 0, r->compute), "");
    GTP_OK(r, gmm_gtp_capture_begin(r->gtp, r->compute, &id));
    memset(&v, 0, sizeof v);
    GTP_REFUSED(r, GMM_E_CAPTURE, gmm_gtp_acquire(r->gtp, r->bundle[0], GMM_GTP_FORWARD, r->compute, &v), "'layer'",
                NULL);
    GTP_OK(r, gmm_gtp_capture_end(r->gtp, r->compute));
    T_OK_TEXT(gmm_ranks_capture_end(W.ranks, 0, r->compute, &graph), gmm_ranks_error(W.ranks, 0));
    gmm_ranks_graph_destroy(graph);
    close_world();

    open_world(2, 0, 200); /* a refused replay keeps the prefetched gathers */
    for (int i = 0; i < 2; i++) model_make(&W.r[i], 1, 1, GMM_GTP_REDUCE_AUTO);
    r = &W.r[0];
    T_OK_TEXT(gmm_ranks_capture_begin(W.ranks, 0, r->compute), "");
    GTP_OK(r, gmm_gtp_capture_begin(r->gtp, r->compute, &id));
    GTP_OK(r, gmm_gtp_capture_end(r->gtp, r->compute));
    T_OK_TEXT(gmm_ranks_capture_end(W.ranks, 0, r->compute, &graph), gmm_ranks_error(W.ranks, 0));
    gmm_ranks_graph_destroy(graph);
    for (int l = 0; l < 3; l++)
        for (int i = 0; i < 2; i++) {
            r = &W.r[i];
            memset(&v, 0, sizeof v);
            GTP_OK(r, gmm_gtp_acquire(r->gtp, r->bundle[l], GMM_GTP_FORWARD, r->compute, &v));
            if (l == 1 && i == 0)
                GTP_REFUSED(r, GMM_E_STATE, gmm_gtp_pre_replay(r->gtp, id, r->compute), "'layer' is held", NULL);
            GTP_OK(r, gmm_gtp_release(r->gtp, r->bundle[l], GMM_GTP_FORWARD, r->compute));
        }
    {
        gmm_gtp_statistics n = GMM_ZERO;
        T_OK_TEXT(gmm_gtp_statistics_of(W.r[0].gtp, &n), "");
        T_CHECK(n.exposed == 1 && n.prefetched == 2, "%lld exposed, %lld prefetched", (long long)n.exposed,
                (long long)n.prefetched);
    }
    finish();
    close_world();
}

/* ----------------------------------------------------------------------------------------- Failures and errors --- */

/* Without a thread that waits, gmm_gtp_poll finds the collective that hangs, a gather or (1) an amax reduction;
   afterwards no queued work runs. */
static void poll(int arg) {
    const char *const what = arg ? "all_reduce_max" : "all_gather", *const name = arg ? "'amax'" : "'dense'";
    float value = 1;
    float *main_grad[2][2];
    gmm_shard_plan plan[2][2];
    gmm_gtp_view v = GMM_ZERO;
    gmm_status s = GMM_OK;
    double began, spent;
    char text[512];
    rank *r;
    open_world(2, 4, 300);
    for (int i = 0; i < 2; i++) {
        const gmm_gtp_domain d = domain_of(&W.r[i], 0, 1);
        declare(&W.r[i], 1, &d, main_grad[i], plan[i]);
    }
    r = &W.r[0];
    GTP_OK(r, gmm_gtp_poll(r->gtp));
    if (arg) GTP_OK(r, gmm_gtp_amax(r->gtp, 0, &value, 1, r->compute));
    GTP_OK(r, gmm_gtp_acquire(r->gtp, 0, GMM_GTP_FORWARD, r->compute, &v));
    (void)gmm_ranks_run(W.ranks);
    began = gtp_seconds();
    do s = gmm_gtp_poll(r->gtp);
    while (s == GMM_OK && gtp_seconds() - began < 20);
    spent = gtp_seconds() - began;
    /* the limit counts from the first poll that finds the collective begun; the clocks differ by microseconds */
    T_CHECK(s == GMM_E_COMM && spent > 0.2999 && spent < 10, "%s after %g s with a limit of 0.3", gmm_status_name(s),
            spent);
    T_CHECK(strstr(gmm_gtp_last_error(r->gtp), what) && strstr(gmm_gtp_last_error(r->gtp), name) &&
            strstr(gmm_gtp_last_error(r->gtp), "rank 1 of 2"), "%s", gmm_gtp_last_error(r->gtp));
    snprintf(text, sizeof text, "%s", gmm_gtp_last_error(r->gtp));
    T_CHECK(gmm_gtp_release(r->gtp, 0, GMM_GTP_FORWARD, r->compute) == GMM_E_COMM, "broken for good");
    T_CHECK(!strcmp(text, gmm_gtp_last_error(r->gtp)), "nothing is tried any more: %s", gmm_gtp_last_error(r->gtp));
    memset(&v, 0, sizeof v);
    r = &W.r[1]; /* the late rank gets the error too, and its data is not copied */
    T_CHECK(gmm_gtp_acquire(r->gtp, 0, GMM_GTP_FORWARD, r->compute, &v) == GMM_E_COMM, "the late rank");
    (void)gmm_ranks_run(W.ranks);
    for (int i = 0; i < 2; i++) t_bytes("gathered", W.r[i].gather[0], 0xFF, W.r[i].need[0].gather_bytes);
    gtp_check_memory();
    open_world(1, 0, 0);
}

static gmm_gtp_weight weight_of(const gmm_shard *s, int32_t expert, const char *name) {
    gmm_gtp_weight w = GMM_ZERO;
    gmm_shard_plan p = GMM_ZERO;
    T_OK_TEXT(gmm_gtp_plan(s, &p, NULL), "");
    w.shard = s;
    w.expert = expert;
    w.name = name;
    w.data[0] = gtp_memory((size_t)p.shard_data_bytes[0], 0);
    w.main_grad = gtp_memory((size_t)(p.shard_rows * p.local_cols * 4), 0);
    w.main_grad_dtype = GMM_F32;
    return w;
}

/* An object with one weight, which is the only one of its bundle and domain, and with memory. */
static void one_weight(rank *r, const gmm_gtp_config *config, const gmm_gtp_domain *d, const gmm_shard *s,
                       const gmm_format *format) {
    gmm_gtp_weight w;
    begin(r, config);
    GTP_OK(r, gmm_gtp_add_domain(r->gtp, d, &r->domain[0]));
    w = weight_of(s, 0, "weight");
    if (format) w.scale[0] = gtp_memory(sizeof(float), 0);
    w.format = format;
    GTP_OK(r, gmm_gtp_add_weight(r->gtp, &w, &r->weight[0]));
    GTP_OK(r, gmm_gtp_add_bundle(r->gtp, r->domain[0], r->weight, 1, "weight", &r->bundle[0]));
    bind(r, 1);
}

/* The caller's hook publishes a bundle that backward holds: the forward is refused, and the view remains. */
static void need_publishes(void *user, gmm_gtp *gtp, const int32_t *weights, int32_t count) {
    rank *r = (rank *)user;
    T_OK_TEXT(gmm_gtp_publish(gtp, weights, count, r->compute), gmm_gtp_last_error(gtp));
}
static void published_while_held(int arg) {
    (void)arg;
    open_world(2, 5, 500);
    for (int i = 0; i < 2; i++) {
        rank *r = &W.r[i];
        gmm_gtp_config config = config_of(r);
        const gmm_gtp_domain d = domain_of(r, 0, 1);
        gmm_gtp_view v = GMM_ZERO, again = GMM_ZERO;
        gmm_gtp_statistics n = GMM_ZERO;
        const gmm_shard s = {.dtype = GMM_F32, .rows = 12, .cols = 5, .gtp_size = 2, .gtp_rank = i, .unit = 2};
        config.hooks.user = r;
        config.hooks.need = need_publishes;
        one_weight(r, &config, &d, &s, NULL);
        GTP_OK(r, gmm_gtp_acquire(r->gtp, 0, GMM_GTP_BACKWARD, r->compute, &v));
        GTP_REFUSED(r, GMM_E_STATE, gmm_gtp_acquire(r->gtp, 0, GMM_GTP_FORWARD, r->compute, &again), "'weight'",
                    "while another pass holds it", NULL);
        GTP_OK(r, gmm_gtp_release(r->gtp, 0, GMM_GTP_BACKWARD, r->compute));
        GTP_OK(r, gmm_gtp_acquire(r->gtp, 0, GMM_GTP_FORWARD, r->compute, &again));
        T_CHECK(v.version == 0 && again.version == 1, "versions %lld and %lld", (long long)v.version,
                (long long)again.version);
        GTP_OK(r, gmm_gtp_release(r->gtp, 0, GMM_GTP_FORWARD, r->compute));
        GTP_OK(r, gmm_gtp_statistics_of(r->gtp, &n));
        T_CHECK(n.gathers == 2, "%lld gathers", (long long)n.gathers);
    }
    finish();
    close_world();
}

/* A publication that fails in a hook is the failure of the call that has called the hook, which enqueues nothing. */
static int records_fail;
static gmm_runtime whole_runtime;
static gmm_status failing_record(void *self, gmm_event event, gmm_stream stream, uint32_t flags) {
    return records_fail ? GMM_E_CUDA : whole_runtime.event_record(self, event, stream, flags);
}
static void publish_fails(void *user, gmm_gtp *gtp, const int32_t *weights, int32_t count) {
    rank *r = (rank *)user;
    records_fail = 1;
    T_CHECK(gmm_gtp_publish(gtp, weights, count, r->compute) == GMM_E_CUDA, "%s", gmm_gtp_last_error(gtp));
    records_fail = 0;
}
static void publish_fails_behind(void *user, gmm_gtp *gtp, const int32_t *weights, int32_t count, gmm_stream stream) {
    (void)stream;
    publish_fails(user, gtp, weights, count);
}
static void failed_hooks(int arg) {
    (void)arg;
    for (int k = 0; k < 3; k++) { /* need, by acquire and by prefetch; ready */
        rank *r;
        gmm_gtp_config config;
        gmm_gtp_domain d;
        gmm_gtp_view v = GMM_ZERO;
        gmm_gtp_gradient g = GMM_ZERO;
        gmm_gtp_statistics n = GMM_ZERO;
        const gmm_shard s = {.dtype = GMM_F32, .rows = 12, .cols = 5, .gtp_size = k == 1 ? 2 : 1, .unit = 2};
        gmm_status got;
        open_world(k == 1 ? 2 : 1, 5, 500);
        r = &W.r[0];
        whole_runtime = r->rt;
        r->rt.event_record = failing_record;
        config = config_of(r);
        config.hooks.user = r;
        if (k < 2) config.hooks.need = publish_fails;
        else config.hooks.ready = publish_fails_behind;
        d = k == 1 ? domain_of(r, 0, 1) : domain_of(r, -1, -1);
        one_weight(r, &config, &d, &s, NULL);
        g.zero = 1;
        got = k == 0   ? gmm_gtp_acquire(r->gtp, 0, GMM_GTP_FORWARD, r->compute, &v)
              : k == 1 ? gmm_gtp_prefetch(r->gtp, 0, GMM_GTP_FORWARD)
                       : gmm_gtp_submit(r->gtp, 0, &g, r->compute);
        T_CHECK(got == GMM_E_CUDA, "case %d: %s", k, gmm_status_name(got));
        T_CHECK(!v.mat.data && strstr(gmm_gtp_last_error(r->gtp), "gmm_gtp_publish"), "%s", gmm_gtp_last_error(r->gtp));
        T_CHECK(gmm_gtp_fence(r->gtp, GMM_GTP_ALL, r->compute) == GMM_E_CUDA, "the object goes on");
        T_OK_TEXT(gmm_gtp_statistics_of(r->gtp, &n), "");
        T_CHECK(n.gathers == 0 && n.acquires == 0, "%lld gathers", (long long)n.gathers);
        r->rt = whole_runtime;
        (void)gmm_ranks_run(W.ranks);
        close_world();
    }
}

/* The message of a replay that does not end says which graph it is. */
static int replay_polled; /* queries since the replay: its end, its begin, then its end alone */
static gmm_status query_of_hang(void *self, gmm_event event, int32_t *done) {
    const gmm_status s = whole_runtime.event_query(self, event, done);
    if (replay_polled) *done = replay_polled++ == 2;
    return s;
}
static void replay_hangs(int arg) {
    gmm_ranks_graph *graph;
    gmm_status s = GMM_OK;
    rank *r;
    int32_t id;
    (void)arg;
    replay_polled = 0;
    open_world(1, 0, 50);
    r = &W.r[0];
    whole_runtime = r->rt;
    r->rt.event_query = query_of_hang;
    model_make(r, 1, 1, GMM_GTP_REDUCE_AUTO);
    for (int k = 0; k < 2; k++) {
        T_OK_TEXT(gmm_ranks_capture_begin(W.ranks, 0, r->compute), "");
        GTP_OK(r, gmm_gtp_capture_begin(r->gtp, r->compute, &id));
        GTP_OK(r, gmm_gtp_capture_end(r->gtp, r->compute));
        T_OK_TEXT(gmm_ranks_capture_end(W.ranks, 0, r->compute, &graph), gmm_ranks_error(W.ranks, 0));
        gmm_ranks_graph_destroy(graph);
    }
    GTP_OK(r, gmm_gtp_pre_replay(r->gtp, id, r->compute));
    GTP_OK(r, gmm_gtp_post_replay(r->gtp, id, r->compute));
    replay_polled = 1;
    for (const double began = gtp_seconds(); s == GMM_OK && gtp_seconds() - began < 20;) s = gmm_gtp_poll(r->gtp);
    T_CHECK(s == GMM_E_COMM && strstr(gmm_gtp_last_error(r->gtp), "'graph 1'"), "%s", gmm_gtp_last_error(r->gtp));
    T_CHECK(gmm_gtp_poll(r->gtp) == GMM_E_COMM, "the failure is forgotten");
    r->rt = whole_runtime;
    (void)gmm_ranks_run(W.ranks);
    close_world();
}

/* Calls that all ranks make alike, and none that a rank may make alone, change the hash of calls. */
static void hashed_calls(int arg) {
    gmm_gtp_statistics n = GMM_ZERO;
    gmm_ranks_graph *graph;
    uint64_t seen[8];
    rank *r;
    int32_t id;
    (void)arg;
    open_world(1, 0, 200);
    r = &W.r[0];
    model_make(r, 1, 1, GMM_GTP_REDUCE_AUTO);
    for (int k = 0; k < 8; k++) {
        const model *m = (const model *)r->user;
        if (k == 1) GTP_OK(r, gmm_gtp_publish(r->gtp, r->weight, 1, r->compute));
        if (k == 2) GTP_OK(r, gmm_gtp_publish(r->gtp, r->weight, 1, r->compute));
        if (k == 3) GTP_OK(r, gmm_gtp_follow(r->gtp, m->backward, m->forward));
        if (k == 4) GTP_OK(r, gmm_gtp_follow(r->gtp, m->backward, -1));
        if (k == 5) {
            T_OK_TEXT(gmm_ranks_capture_begin(W.ranks, 0, r->compute), "");
            GTP_OK(r, gmm_gtp_capture_begin(r->gtp, r->compute, &id));
        }
        if (k == 6) {
            GTP_OK(r, gmm_gtp_capture_end(r->gtp, r->compute));
            T_OK_TEXT(gmm_ranks_capture_end(W.ranks, 0, r->compute, &graph), gmm_ranks_error(W.ranks, 0));
            gmm_ranks_graph_destroy(graph);
        }
        if (k == 7) GTP_OK(r, gmm_gtp_pre_replay(r->gtp, id, r->compute));
        GTP_OK(r, gmm_gtp_statistics_of(r->gtp, &n));
        seen[k] = n.calls;
        for (int i = 0; i < k; i++) T_CHECK(seen[i] != seen[k], "call %d is not in the hash", k);
    }
    GTP_OK(r, gmm_gtp_fence(r->gtp, GMM_GTP_ALL, r->compute));
    GTP_OK(r, gmm_gtp_poll(r->gtp));
    GTP_OK(r, gmm_gtp_statistics_of(r->gtp, &n));
    T_CHECK(seen[7] == n.calls, "fence and poll may be called by one rank");
    finish();
    close_world();
}

/* gmm_gtp_poll monitors the collectives of domains alone: a further communicator of gmm_gtp_quantize that hangs is the
   caller's to monitor. */
static void further_ranks(int arg) {
    static const float one[48 * 16] = {1}; /* more than a shard has, padding included */
    float amax = 1;
    double began;
    (void)arg;
    open_world(2, 4, 200);
    for (int i = 0; i < 2; i++) {
        rank *r = &W.r[i];
        const gmm_gtp_config config = config_of(r);
        const gmm_gtp_domain d = domain_of(r, 0, 1);
        const void *from = one;
        gmm_gtp_quantization q = GMM_ZERO;
        const gmm_format format = {.dtype = GMM_E4M3, .scaling = GMM_SCALING_TENSOR};
        const gmm_shard s = {.dtype = GMM_E4M3, .scaling = GMM_SCALING_TENSOR, .rows = 48, .cols = 16, .gtp_size = 2,
                             .gtp_rank = i};
        one_weight(r, &config, &d, &s, &format);
        q.dtype = GMM_F32;
        q.from = &from;
        q.also = i ? NULL : &W.comm[2][0];
        GTP_OK(r, gmm_gtp_quantize(r->gtp, r->weight, 1, &q, r->compute));
    }
    (void)gmm_ranks_run(W.ranks);
    began = gtp_seconds();
    while (gtp_seconds() - began < 0.5) GTP_OK(&W.r[0], gmm_gtp_poll(W.r[0].gtp));
    T_OK_TEXT(W.comm[2][1].group_begin(W.comm[2][1].self, "amax"), "");
    T_OK_TEXT(W.comm[2][1].all_reduce_max(W.comm[2][1].self, &amax, 1, W.r[1].side[3]), "");
    T_OK_TEXT(W.comm[2][1].group_end(W.comm[2][1].self), "");
    finish();
    close_world();
}

/* A failure of further ranks is in the message, and gives their communicator up. */
static int further_given_up;
static gmm_status further_begins(void *self, const char *what) { return (void)self, (void)what, GMM_OK; }
static gmm_status further_ends(void *self) { return (void)self, GMM_OK; }
static gmm_status further_fails(void *self, float *values, size_t count, gmm_stream stream) {
    return (void)self, (void)values, (void)count, (void)stream, GMM_E_COMM;
}
static gmm_status further_poll(void *self, gmm_error *error) {
    (void)self;
    if (error) snprintf(error->text, sizeof error->text, "the further rank 3 is gone");
    return GMM_E_COMM;
}
static void further_gives_up(void *self, const char *why) {
    (void)self;
    further_given_up += strstr(why, "gmm_gtp_quantize") != NULL;
}
static void further_ranks_fail(int arg) {
    static const float one[48 * 16] = {1};
    const void *from = one;
    rank *r;
    gmm_gtp_config config;
    gmm_gtp_domain d;
    gmm_gtp_quantization q = GMM_ZERO;
    const gmm_format format = {.dtype = GMM_E4M3, .scaling = GMM_SCALING_TENSOR};
    const gmm_shard s = {.dtype = GMM_E4M3, .scaling = GMM_SCALING_TENSOR, .rows = 48, .cols = 16, .gtp_size = 1};
    gmm_comm also = GMM_ZERO;
    (void)arg;
    open_world(1, 4, 200);
    r = &W.r[0];
    config = config_of(r);
    d = domain_of(r, -1, -1);
    one_weight(r, &config, &d, &s, &format);
    also.group_begin = further_begins;
    also.group_end = further_ends;
    also.all_reduce_max = further_fails;
    also.poll = further_poll;
    also.give_up = further_gives_up;
    q.dtype = GMM_F32;
    q.from = &from;
    q.also = &also;
    further_given_up = 0;
    T_CHECK(gmm_gtp_quantize(r->gtp, r->weight, 1, &q, r->compute) == GMM_E_COMM, "no failure");
    T_CHECK(strstr(gmm_gtp_last_error(r->gtp), "further rank 3"), "%s", gmm_gtp_last_error(r->gtp));
    T_CHECK(further_given_up == 1, "given up %d times", further_given_up);
    (void)gmm_ranks_run(W.ranks);
    close_world();
}

/* Memory and configuration of gmm_gtp_init that are refused. */
static void bad_memory(const rank *r, gmm_gtp_config config, size_t bytes) {
    gmm_error e = GMM_ZERO;
    char *memory = (char *)gtp_memory(bytes, 0);
    gmm_gtp *gtp;
    T_REFUSED_TEXT(GMM_E_ALIGN, gmm_gtp_init(memory + 8, bytes, &config, &gtp, &e), e.text, "gmm_gtp_init", NULL);
    T_REFUSED_TEXT(GMM_E_WORKSPACE, gmm_gtp_init(memory, bytes - 1, &config, &gtp, &e), e.text, "gmm_gtp_query",
                   NULL);
    config.ctx = NULL;
    T_REFUSED_TEXT(GMM_E_NULL, gmm_gtp_init(memory, bytes, &config, &gtp, &e), e.text, "ctx", NULL);
    {
        gmm_runtime rt = r->rt;
        rt.fill2d = NULL;
        config = config_of(r);
        config.runtime = &rt;
        T_REFUSED_TEXT(GMM_E_NULL, gmm_gtp_init(memory, bytes, &config, &gtp, &e), e.text, "config->runtime lacks",
                       NULL);
    }
    {
        gmm_runtime rt = r->rt;
        rt.space = GMM_SPACE_CUDA;
        config.runtime = &rt;
        T_REFUSED_TEXT(GMM_E_CONFIG, gmm_gtp_init(memory, bytes, &config, &gtp, &e), e.text, "is for GPU memory",
                       "ctx for CPU", NULL);
    }
    config = config_of(r);
    config.bundles = -1;
    T_REFUSED_TEXT(GMM_E_ARG, gmm_gtp_query(&config, &bytes, &e), e.text, "-1 bundles", NULL);
}
/* Domains that are refused; *domain becomes the only one. */
static void bad_domains(rank *r, int32_t *domain) {
    gmm_gtp_domain d;
    gmm_comm comm;
    d = domain_of(r, 0, 2);
    d.wire = GMM_F16;
    GTP_REFUSED(r, GMM_E_DTYPE, gmm_gtp_add_domain(r->gtp, &d, domain), "wire is f16", NULL);
    d.wire = GMM_F32;
    comm = *d.gather;
    d.gather = &comm;
    comm.processors = -1;
    GTP_REFUSED(r, GMM_E_ARG, gmm_gtp_add_domain(r->gtp, &d, domain), "gather.processors -1 must be >= 0", NULL);
    comm.processors = 0;
    comm.all_to_all = NULL;
    GTP_REFUSED(r, GMM_E_NULL, gmm_gtp_add_domain(r->gtp, &d, domain), "domain->gather lacks a function", NULL);
    d.gather = NULL;
    GTP_REFUSED(r, GMM_E_NULL, gmm_gtp_add_domain(r->gtp, &d, domain), "gather is NULL", NULL);
    for (int k = -1; k < 1; k++) {
        d = domain_of(r, 0, k);
        d.reduce_stream = r->side[1];
        GTP_REFUSED(r, GMM_E_CONFIG, gmm_gtp_add_domain(r->gtp, &d, domain), "several streams", NULL);
    }
    d = domain_of(r, 0, 1);
    GTP_OK(r, gmm_gtp_add_domain(r->gtp, &d, domain));
    GTP_REFUSED(r, GMM_E_WORKSPACE, gmm_gtp_add_domain(r->gtp, &d, domain), "config->domains is 1", NULL);
}
/* Weights that are refused. */
static void bad_weights(rank *r, const gmm_shard *shard) {
    const gmm_shard s = *shard;
    gmm_gtp_weight w;
    int32_t id[1];
    w = weight_of(&s, 0, "expert 0");
    w.data[0] = NULL;
    GTP_REFUSED(r, GMM_E_NULL, gmm_gtp_add_weight(r->gtp, &w, &id[0]), "'expert 0'", "data[0]", NULL);
    w = weight_of(&s, 0, "odd data");
    w.data[0] = (char *)w.data[0] + 1;
    GTP_REFUSED(r, GMM_E_ALIGN, gmm_gtp_add_weight(r->gtp, &w, &id[0]), "'odd data'", "data[0]", NULL);
    w = weight_of(&s, 0, "odd sum");
    w.main_grad = (char *)w.main_grad + 2;
    GTP_REFUSED(r, GMM_E_ALIGN, gmm_gtp_add_weight(r->gtp, &w, &id[0]), "'odd sum'", "main_grad", NULL);
}
/* Bundles that are refused. id[0] to id[2] become weights of experts that fit together, and stay in no bundle. */
static void bad_bundles(rank *r, gmm_shard s, int32_t domain, int32_t id[6]) {
    gmm_gtp_weight w;
    int32_t bundle, list[2];
    for (int i = 0; i < 3; i++) {
        static const char *const names[] = {"expert 0", "expert 1", "expert 2"};
        w = weight_of(&s, i, names[i]);
        GTP_OK(r, gmm_gtp_add_weight(r->gtp, &w, &id[i]));
    }
    w = weight_of(&s, 1, "second 1");
    GTP_OK(r, gmm_gtp_add_weight(r->gtp, &w, &id[3]));
    s.gtp_size = 4;
    w = weight_of(&s, 0, "of four");
    GTP_OK(r, gmm_gtp_add_weight(r->gtp, &w, &id[4]));
    s.gtp_size = 2;
    s.dtype = GMM_F16;
    w = weight_of(&s, 0, "in f16");
    GTP_OK(r, gmm_gtp_add_weight(r->gtp, &w, &id[5]));
    list[0] = id[0];
    list[1] = id[2];
    GTP_REFUSED(r, GMM_E_ARG, gmm_gtp_add_bundle(r->gtp, domain, list, 2, "fc1", &bundle), "gap", "'expert 2'", NULL);
    list[0] = id[1];
    list[1] = id[3];
    GTP_REFUSED(r, GMM_E_ARG, gmm_gtp_add_bundle(r->gtp, domain, list, 2, "fc1", &bundle), "both", "'second 1'", NULL);
    list[0] = id[4];
    GTP_REFUSED(r, GMM_E_CONFIG, gmm_gtp_add_bundle(r->gtp, domain, list, 1, "fc1", &bundle), "shard 0 of 4", NULL);
    list[0] = id[1];
    list[1] = id[5];
    GTP_REFUSED(r, GMM_E_DTYPE, gmm_gtp_add_bundle(r->gtp, domain, list, 2, "fc1", &bundle), "'in f16'", NULL);
    list[0] = 99;
    GTP_REFUSED(r, GMM_E_ARG, gmm_gtp_add_bundle(r->gtp, domain, list, 1, "fc1", &bundle), "99", NULL);
    s.dtype = GMM_E2M1; /* weights with a common amax must exist */
    s.scaling = GMM_SCALING_NV16;
    s.cols = 32;
    w = weight_of(&s, 0, "in nv16");
    w.data[1] = w.scale[0] = w.scale[1] = w.data[0];
    w.amax = (float *)w.main_grad;
    GTP_OK(r, gmm_gtp_add_weight(r->gtp, &w, &id[5]));
    list[0] = id[5];
    list[1] = 1 << 24;
    GTP_REFUSED(r, GMM_E_ARG, gmm_gtp_add_bundle(r->gtp, domain, list, 2, "fc1", &bundle), "weights[1] is 16777216",
                NULL);
    s.dtype = GMM_E4M3; /* weights of a bundle must have transposed copies of one ld: here 64 and 96 padded rows */
    s.scaling = GMM_SCALING_TENSOR;
    for (int i = 0; i < 2; i++) {
        s.unit = i ? 48 : 16;
        w = weight_of(&s, i, i ? "in units of 48" : "in units of 16");
        w.scale[0] = w.main_grad;
        GTP_OK(r, gmm_gtp_add_weight(r->gtp, &w, &list[i]));
    }
    GTP_REFUSED(r, GMM_E_CONFIG, gmm_gtp_add_bundle(r->gtp, domain, list, 2, "fc1", &bundle), "'in units of 48'",
                "96 rows", "64", NULL);
}
/* Chains of the bundle that are refused, and one that is not. */
static void bad_chains(rank *r, const int32_t *bundle) {
    gmm_gtp_chain c = GMM_ZERO;
    int32_t id[1];
    c.bundles = bundle;
    c.count = 1;
    c.prefetch = 4;
    GTP_REFUSED(r, GMM_E_ARG, gmm_gtp_add_chain(r->gtp, &c, id), "prefetch 4", NULL);
    c.prefetch = 1;
    for (c.together = -1; c.together < 10; c.together += 10)
        GTP_REFUSED(r, GMM_E_ARG, gmm_gtp_add_chain(r->gtp, &c, id), c.together < 0 ? "together -1" : "together 9",
                    NULL);
    c.together = 8;
    c.reserved = 1;
    GTP_REFUSED(r, GMM_E_ARG, gmm_gtp_add_chain(r->gtp, &c, id), "reserved 1", NULL);
    c.reserved = 0;
    GTP_OK(r, gmm_gtp_add_chain(r->gtp, &c, id));
    GTP_REFUSED(r, GMM_E_CONFIG, gmm_gtp_add_chain(r->gtp, &c, id), "already", NULL);
    c.pass = GMM_GTP_BACKWARD;
    c.captured = 1;
    GTP_REFUSED(r, GMM_E_CONFIG, gmm_gtp_add_chain(r->gtp, &c, id), "not captured", NULL);
}
static void declarations(int arg) {
    rank *r;
    gmm_gtp_config config;
    gmm_shard s = GMM_ZERO;
    gmm_gtp_need n = GMM_ZERO;
    gmm_gtp_view v = GMM_ZERO;
    gmm_error e = GMM_ZERO;
    int32_t id[6], domain, bundle, list[3];
    size_t bytes = 0;
    (void)arg;
    open_world(2, 0, 100);
    r = &W.r[0];
    config = config_of(r);
    T_OK_TEXT(gmm_gtp_query(&config, &bytes, &e), e.text);
    bad_memory(r, config, bytes);
    config.domains = 1;
    begin(r, &config);
    bad_domains(r, &domain);
    s.dtype = GMM_BF16;
    s.rows = 64;
    s.cols = 8;
    s.gtp_size = 2;
    bad_weights(r, &s);
    bad_bundles(r, s, domain, id);
    list[0] = id[2];
    list[1] = id[0];
    list[2] = id[1];
    GTP_OK(r, gmm_gtp_add_bundle(r->gtp, domain, list, 3, "fc1", &bundle));
    GTP_REFUSED(r, GMM_E_ARG, gmm_gtp_add_bundle(r->gtp, domain, list, 3, "fc2", &bundle), "bundle 'fc1' already",
                NULL);
    bad_chains(r, &bundle);
    GTP_REFUSED(r, GMM_E_CONFIG, gmm_gtp_seal(r->gtp), "in no bundle", "'second 1'", NULL);
    GTP_REFUSED(r, GMM_E_STATE, gmm_gtp_memory_need(r->gtp, 0, &n), "seal", NULL);
    GTP_REFUSED(r, GMM_E_STATE, gmm_gtp_acquire(r->gtp, bundle, GMM_GTP_FORWARD, NULL, &v), "bind", NULL);
    r->gtp = NULL;
    close_world();
}

static void states(int arg) { /* refused calls leave the state as it was */
    float *main_grad[2][2];
    gmm_shard_plan plan[2][2];
    (void)arg;
    open_world(2, 6, 500);
    for (int i = 0; i < 2; i++) {
        const gmm_gtp_domain d = domain_of(&W.r[i], 0, 1);
        declare(&W.r[i], 1, &d, main_grad[i], plan[i]);
    }
    for (int i = 0; i < 2; i++) {
        rank *r = &W.r[i];
        gmm_gtp_view v = GMM_ZERO, part = GMM_ZERO;
        gmm_gtp_gradient g = GMM_ZERO;
        gmm_mat from = GMM_ZERO;
        float *values = (float *)t_host(60 * sizeof(float));
        g.scale = 1;
        g.add = GMM_GTP_SET;
        for (int k = 0; k < 60; k++) values[k] = (float)k;
        GTP_REFUSED(r, GMM_E_STATE, gmm_gtp_release(r->gtp, 0, GMM_GTP_FORWARD, r->compute), "not acquired", NULL);
        GTP_REFUSED(r, GMM_E_ARG, gmm_gtp_acquire(r->gtp, 1, GMM_GTP_FORWARD, r->compute, &v), "bundle 1", NULL);
        GTP_REFUSED(r, GMM_E_ARG, gmm_gtp_acquire(r->gtp, 0, (gmm_gtp_pass)7, r->compute, &v), "pass is 7", NULL);
        GTP_REFUSED(r, GMM_E_STATE, gmm_gtp_acquire(r->gtp, 0, GMM_GTP_RECOMPUTE, r->compute, &v), "recompute", NULL);
        GTP_REFUSED(r, GMM_E_NULL, gmm_gtp_acquire(r->gtp, 0, GMM_GTP_FORWARD, r->compute, NULL), "view", NULL);
        GTP_REFUSED(r, GMM_E_STATE, gmm_gtp_view_part(r->gtp, 0, GMM_GTP_FORWARD, 0, 1, &part), "not acquired", NULL);
        GTP_OK(r, gmm_gtp_acquire(r->gtp, 0, GMM_GTP_FORWARD, r->compute, &v));
        GTP_OK(r, gmm_gtp_view_part(r->gtp, 0, GMM_GTP_FORWARD, 0, 1, &part));
        T_CHECK(part.mat.data == v.mat.data && part.count == 1 && part.rows == 12, "the part of all matrices");
        GTP_REFUSED(r, GMM_E_ARG, gmm_gtp_view_part(r->gtp, 0, GMM_GTP_FORWARD, 0, 2, &part), "0 to 1: it has 1", NULL);
        GTP_REFUSED(r, GMM_E_ARG, gmm_gtp_view_part(r->gtp, 0, GMM_GTP_FORWARD, 1, 1, &part), "1 to 1", NULL);
        GTP_REFUSED(r, GMM_E_NULL, gmm_gtp_view_part(r->gtp, 0, GMM_GTP_FORWARD, 0, 1, NULL), "part", NULL);
        GTP_REFUSED(r, GMM_E_STATE, gmm_gtp_acquire(r->gtp, 0, GMM_GTP_FORWARD, r->compute, &v), "acquired already",
                    NULL);
        /* another pass that needs the same slot */
        GTP_OK(r, gmm_gtp_acquire(r->gtp, 0, GMM_GTP_BACKWARD, r->compute, &v));
        GTP_OK(r, gmm_gtp_release(r->gtp, 0, GMM_GTP_FORWARD, r->compute));
        GTP_REFUSED(r, GMM_E_STATE, gmm_gtp_release(r->gtp, 0, GMM_GTP_FORWARD, r->compute), "not acquired", NULL);
        GTP_OK(r, gmm_gtp_release(r->gtp, 0, GMM_GTP_BACKWARD, r->compute));
        GTP_REFUSED(r, GMM_E_STATE, gmm_gtp_submit(r->gtp, 0, &g, r->compute), "no buffer", NULL);
        GTP_REFUSED(r, GMM_E_STATE, gmm_gtp_wgrad_part(r->gtp, 0, 0, 1, &part), "gmm_gtp_wgrad first", NULL);
        GTP_OK(r, gmm_gtp_wgrad(r->gtp, 0, r->compute, &v));
        GTP_OK(r, gmm_gtp_wgrad_part(r->gtp, 0, 0, 1, &part));
        T_CHECK(part.mat.data == v.mat.data && part.mat.dtype == GMM_F32, "the part of all gradients");
        GTP_REFUSED(r, GMM_E_ARG, gmm_gtp_wgrad_part(r->gtp, 0, -1, 1, &part), "-1 to -1", NULL);
        GTP_REFUSED(r, GMM_E_STATE, gmm_gtp_wgrad(r->gtp, 0, r->compute, &v), "submit it first", NULL);
        g.zero = 1;
        GTP_REFUSED(r, GMM_E_STATE, gmm_gtp_submit(r->gtp, 0, &g, r->compute), "in use by 'dense'", NULL);
        g.zero = 2;
        GTP_REFUSED(r, GMM_E_ARG, gmm_gtp_submit(r->gtp, 0, &g, r->compute), "zero 2", NULL);
        g.zero = 0;
        g.add = (gmm_gtp_add)5;
        GTP_REFUSED(r, GMM_E_ARG, gmm_gtp_submit(r->gtp, 0, &g, r->compute), "add 5", NULL);
        g.add = GMM_GTP_SET;
        give_floats(r, v.mat.data, values, 60);
        GTP_OK(r, gmm_gtp_submit(r->gtp, 0, &g, r->compute));
        from = gmm_mat_packed(GMM_E4M3, values);
        g.from = &from;
        GTP_REFUSED(r, GMM_E_DTYPE, gmm_gtp_submit(r->gtp, 0, &g, r->compute), "e4m3", NULL);
        from = gmm_mat_packed(GMM_F32, values);
        from.ld = 4;
        GTP_REFUSED(r, GMM_E_STRIDE, gmm_gtp_submit(r->gtp, 0, &g, r->compute), "ld 4", NULL);
        from = gmm_mat_packed(GMM_F32, (char *)values + 2);
        GTP_REFUSED(r, GMM_E_ALIGN, gmm_gtp_submit(r->gtp, 0, &g, r->compute), "not aligned", NULL);
        from = gmm_mat_packed(GMM_F32, NULL);
        GTP_REFUSED(r, GMM_E_NULL, gmm_gtp_submit(r->gtp, 0, &g, r->compute), "neither", NULL);
        GTP_REFUSED(r, GMM_E_ARG, gmm_gtp_fence(r->gtp, 8, r->compute), "0x8", NULL);
        GTP_REFUSED(r, GMM_E_ARG, gmm_gtp_follow(r->gtp, 0, 0), "gmm_gtp_follow", NULL);
        GTP_REFUSED(r, GMM_E_STATE, gmm_gtp_dry_run(r->gtp, 0), "not under way", NULL);
        GTP_OK(r, gmm_gtp_fence(r->gtp, GMM_GTP_ALL, r->compute));
    }
    finish();
    for (int i = 0; i < 2; i++)
        for (int64_t k = 0; k < plan[i][0].valid_rows * 5; k++)
            T_CHECK(main_grad[i][0][k] == 2 * (float)(plan[i][0].row0 * 5 + k), "rank %d element %lld", i,
                    (long long)k);
    close_world();
}

/* Gradients of the caller whose extents overflow are refused, and the object remains usable. */
static void huge_strides(int arg) {
    float *values = (float *)t_host(240 * sizeof(float));
    void *table[2];
    gmm_gtp_domain d;
    gmm_gtp_config config;
    gmm_gtp_gradient g = GMM_ZERO;
    gmm_shard s = GMM_ZERO;
    int32_t ids[2];
    rank *r;
    (void)arg;
    open_world(1, 0, 100);
    r = &W.r[0];
    config = config_of(r);
    d = domain_of(r, -1, -1);
    s.dtype = GMM_F32;
    s.rows = 12;
    s.cols = 5;
    begin(r, &config);
    GTP_OK(r, gmm_gtp_add_domain(r->gtp, &d, &r->domain[0]));
    for (int e = 0; e < 2; e++) {
        const gmm_gtp_weight w = weight_of(&s, e, "expert");
        GTP_OK(r, gmm_gtp_add_weight(r->gtp, &w, &ids[e]));
        table[e] = values;
    }
    GTP_OK(r, gmm_gtp_add_bundle(r->gtp, r->domain[0], ids, 2, "experts", &r->bundle[0]));
    bind(r, 1);
    for (int k = 0; k < 8; k++) {
        gmm_mat from = k % 2 ? gmm_mat_table(GMM_F32, table, (uint32_t)GMM_MAT_TABLE_ON_HOST)
                             : gmm_mat_packed(GMM_F32, values);
        g.from = &from;
        from.ld = k < 2 ? INT64_MAX / 12 + 1 : k < 4 ? INT64_MAX / 96 + 1 : 0;
        if (k == 4) from.group_stride = INT64_MAX / 2 + 1;
        if (k == 6) from.group_stride = INT64_MAX / 16 + 1;
        if (k == 5 || k == 7) GTP_OK(r, gmm_gtp_submit(r->gtp, 0, &g, r->compute));
        else GTP_REFUSED(r, GMM_E_OVERFLOW, gmm_gtp_submit(r->gtp, 0, &g, r->compute), "'experts'", "12 rows", NULL);
        from.scaling = GMM_SCALING_TENSOR;
        GTP_REFUSED(r, GMM_E_DTYPE, gmm_gtp_submit(r->gtp, 0, &g, r->compute), "from is f32, scaling tensor", NULL);
    }
    finish();
    close_world();
}

/* Buffers whose bytes do not fit 64 bits: of one bundle, and of bundles that a chain holds together. */
static void huge_buffers(int arg) {
    float value = 0;
    gmm_gtp_weight w = GMM_ZERO;
    gmm_shard s = GMM_ZERO;
    s.dtype = GMM_BF16;
    s.rows = (int64_t)1 << 40;
    s.cols = 1 << 18;
    s.gtp_size = 2;
    w.shard = &s;
    w.data[0] = &value; /* never read */
    open_world(2, 0, 100);
    {
        rank *r = &W.r[0];
        const gmm_gtp_domain d = domain_of(r, 0, 1);
        gmm_gtp_config config = config_of(r);
        int32_t ids[32];
        config.weights = config.bundles = 32;
        begin(r, &config);
        GTP_OK(r, gmm_gtp_add_domain(r->gtp, &d, &r->domain[0]));
        for (w.expert = 0; w.expert < 32; w.expert++) {
            gmm_gtp_weight one = w;
            if (arg) one.expert = 0;
            GTP_OK(r, gmm_gtp_add_weight(r->gtp, &one, &ids[w.expert]));
            if (arg) GTP_OK(r, gmm_gtp_add_bundle(r->gtp, r->domain[0], &ids[w.expert], 1, "b", &r->bundle[0]));
        }
        if (!arg) GTP_OK(r, gmm_gtp_add_bundle(r->gtp, r->domain[0], ids, 32, "b", &r->bundle[0]));
        else {
            gmm_gtp_chain chain = GMM_ZERO;
            int32_t list[32], id;
            for (int i = 0; i < 32; i++) list[i] = i;
            chain.bundles = list;
            chain.count = chain.held = 32;
            GTP_OK(r, gmm_gtp_add_chain(r->gtp, &chain, &id));
        }
        GTP_REFUSED(r, GMM_E_OVERFLOW, gmm_gtp_seal(r->gtp), "32 weights", "64 bits", NULL);
        r->gtp = NULL;
    }
    close_world();
}

static gmm_status never_run(const void *argument, gmm_stream stream) {
    (void)argument, (void)stream;
    return GMM_E_STATE;
}
/* Errors of the CPU ranks' runtime functions are returned by that call only: the rank continues. */
static void table_errors(int arg) {
    unsigned char a[16] = { 0 }, b[16] = { 0 };
    const gmm_runtime *rt;
    const gmm_comm *c;
    gmm_work work = GMM_ZERO;
    gmm_range range = GMM_ZERO;
    gmm_event event;
    int32_t flag = 0;
    (void)arg;
    open_world(1, 0, 100);
    rt = &W.r[0].rt;
    c = &W.comm[0][0];
#define RANK_REFUSED(want, call, ...) T_REFUSED_TEXT(want, call, gmm_ranks_error(W.ranks, 0), __VA_ARGS__, NULL)
    T_OK_TEXT(rt->event_create(rt->self, &event), "");
    RANK_REFUSED(GMM_E_NULL, rt->stream_create(rt->self, 0, NULL), "stream_create", "out");
    RANK_REFUSED(GMM_E_NULL, rt->event_create(rt->self, NULL), "event_create", "out");
    RANK_REFUSED(GMM_E_NULL, rt->event_record(rt->self, NULL, NULL, 0), "event_record", "event");
    RANK_REFUSED(GMM_E_ARG, rt->event_record(rt->self, event, NULL, 6), "event_record", "flags 0x6");
    RANK_REFUSED(GMM_E_NULL, rt->stream_wait(rt->self, NULL, NULL, 0), "stream_wait", "event");
    RANK_REFUSED(GMM_E_ARG, rt->stream_wait(rt->self, NULL, event, 2), "stream_wait", "flags 0x2");
    RANK_REFUSED(GMM_E_NULL, rt->event_query(rt->self, NULL, &flag), "event_query", "event");
    RANK_REFUSED(GMM_E_NULL, rt->event_query(rt->self, event, NULL), "event_query", "done");
    RANK_REFUSED(GMM_E_NULL, rt->event_sync(rt->self, NULL), "event_sync", "event");
    RANK_REFUSED(GMM_E_NULL, rt->is_capturing(rt->self, NULL, NULL), "is_capturing", "capturing");
    RANK_REFUSED(GMM_E_NULL, rt->run(rt->self, NULL, NULL), "run", "work");
    RANK_REFUSED(GMM_E_NULL, rt->run(rt->self, &work, NULL), "run", "work->function");
    RANK_REFUSED(GMM_E_NULL, rt->copy(rt->self, NULL, b, 4, NULL), "copy", "dst");
    RANK_REFUSED(GMM_E_NULL, rt->copy(rt->self, a, NULL, 4, NULL), "copy", "src");
    RANK_REFUSED(GMM_E_ARG, rt->copy2d(rt->self, a, 8, b, 7, 8, 2, NULL), "copy", "pitches 8 and 7");
    RANK_REFUSED(GMM_E_OVERFLOW, rt->copy2d(rt->self, a, 8, b, SIZE_MAX / 2, 8, 3, NULL), "copy", "3 rows");
    RANK_REFUSED(GMM_E_OVERFLOW, rt->fill2d(rt->self, a, SIZE_MAX / 2, 0, 8, 3, NULL), "fill", "3 rows");
    work.function = never_run;
    work.ranges = &range;
    work.range_count = -1;
    RANK_REFUSED(GMM_E_ARG, rt->run(rt->self, &work, W.r[0].compute), "run", "range_count is -1");
    work.range_count = 0;
    work.argument_bytes = 8;
    RANK_REFUSED(GMM_E_NULL, rt->run(rt->self, &work, W.r[0].compute), "run", "argument");
    RANK_REFUSED(GMM_E_ARG, c->all_gather(c->self, NULL, b, 4, NULL), "all_gather of 4 bytes", "not be NULL");
    RANK_REFUSED(GMM_E_ARG, c->all_reduce_max(c->self, NULL, 1, NULL), "all_reduce_max of 4 bytes");
    T_OK_TEXT(c->all_gather(c->self, NULL, NULL, 0, NULL), "");
    RANK_REFUSED(GMM_E_NULL, rt->fill(rt->self, NULL, 0, 4, NULL), "fill", "dst");
    RANK_REFUSED(GMM_E_ARG, rt->fill(rt->self, a, 256, 4, NULL), "fill", "value 256");
    for (int k = GMM_E4M3; k <= GMM_E2M1; k++)
        RANK_REFUSED(GMM_E_DTYPE, c->reduce_scatter(c->self, a, b, 4, (gmm_dtype)k, NULL), "reduce_scatter",
                     gmm_dtype_name((gmm_dtype)k));
    RANK_REFUSED(GMM_E_ARG, rt->fill2d(rt->self, a, 7, 0, 8, 2, NULL), "fill", "pitches 7");
#undef RANK_REFUSED
    {
        const char *text = gmm_ranks_error(W.ranks, 0);
        T_CHECK(rt->fill(rt->self, NULL, 0, 4, NULL) == GMM_E_NULL && strstr(text, "pitches 7"),
                "what was told changed: %s", text);
    }
    T_OK_TEXT(rt->copy(rt->self, NULL, NULL, 0, NULL), "");
    T_OK_TEXT(rt->fill(rt->self, a, 3, 16, NULL), "");
    t_bytes("filled", a, 3, 16);
    T_OK_TEXT(rt->event_destroy(rt->self, event), "");
    gtp_check_memory();
    open_world(1, 0, 0);
}

/* A refused graph launch changes nothing: neither the records of events nor the numbers of collectives. A capture that
   cannot begin leaves no capture active. */
static void refused_captures(int arg) {
    float values[2] = { 1, 2 };
    gmm_ranks_graph *graph[2], *empty;
    gmm_event event[2];
    gmm_stream more;
    (void)arg;
    open_world(2, 0, 200);
    for (int i = 0; i < 2; i++) {
        rank *r = &W.r[i];
        const gmm_comm *c = &W.comm[0][i];
        T_OK_TEXT(r->rt.event_create(r->rt.self, &event[i]), "");
        T_OK_TEXT(gmm_ranks_capture_begin(W.ranks, i, r->compute), "");
        T_OK_TEXT(c->all_reduce_max(c->self, &values[i], 1, r->compute), "");
        T_OK_TEXT(r->rt.event_record(r->rt.self, event[i], r->compute, GMM_EVENT_EXTERNAL), "");
        T_CHECK(gmm_ranks_capture_end(W.ranks, i, r->compute, NULL) == GMM_E_NULL, "no place for the graph");
        T_OK_TEXT(gmm_ranks_capture_end(W.ranks, i, r->compute, &graph[i]), gmm_ranks_error(W.ranks, i));
    }
    T_OK_TEXT(gmm_ranks_capture_begin(W.ranks, 0, W.r[0].side[0]), "");
    T_CHECK(gmm_ranks_launch(graph[0], W.r[0].side[0]) == GMM_E_CAPTURE, "a launch in a capture");
    T_OK_TEXT(gmm_ranks_capture_end(W.ranks, 0, W.r[0].side[0], &empty), gmm_ranks_error(W.ranks, 0));
    gmm_ranks_graph_destroy(empty);
    /* an event without a record */
    T_OK_TEXT(W.r[0].rt.event_sync(W.r[0].rt.self, event[0]), gmm_ranks_error(W.ranks, 0));
    for (int i = 0; i < 2; i++)
        T_OK_TEXT(gmm_ranks_launch(graph[i], W.r[i].compute), gmm_ranks_error(W.ranks, i));
    finish();
    T_CHECK(values[0] == 2 && values[1] == 2, "%g and %g", (double)values[0], (double)values[1]);
    while (W.r[0].rt.stream_create(W.r[0].rt.self, 0, &more) == GMM_OK) { }
    for (int i = 0; i < 2; i++)
        T_CHECK(gmm_ranks_capture_begin(W.ranks, 0, W.r[0].compute) == GMM_E_MEMORY, "too many streams: %s",
                gmm_ranks_error(W.ranks, 0));
    for (int i = 0; i < 2; i++) {
        gmm_ranks_graph_destroy(graph[i]);
        T_OK_TEXT(W.r[i].rt.event_destroy(W.r[i].rt.self, event[i]), "");
    }
    gtp_check_memory();
    open_world(1, 0, 0);
}

/* An event_record that fails for lack of memory leaves the event without a record, so that waits for it return at once.
   A collective that fails so is not counted: the next one gets its number. */
static int spare = -1; /* number of allocations that still succeed; -1 = all */
static void *spare_alloc(void *user, size_t bytes) {
    (void)user;
    if (spare == 0) return NULL;
    spare -= spare > 0;
    return malloc(bytes);
}
static void spare_release(void *user, void *memory) {
    (void)user;
    free(memory);
}
static void failed_records(int arg) {
    gmm_ranks_config c = GMM_ZERO;
    gmm_ranks *ranks = NULL;
    gmm_runtime rt = GMM_ZERO;
    gmm_stream stream;
    gmm_event event;
    gmm_comm comm;
    gmm_status s = GMM_E_MEMORY;
    const int32_t first = 0;
    float value = 1;
    int refused = 0;
    (void)arg;
    c.ranks = 1;
    c.seed = 1;
    c.timeout_ms = 200;
    c.allocator.alloc = spare_alloc;
    c.allocator.release = spare_release;
    spare = -1;
    T_OK_TEXT(gmm_ranks_create(&c, &ranks, NULL), "");
    T_OK_TEXT(gmm_ranks_runtime(ranks, 0, &rt), "");
    T_OK_TEXT(rt.stream_create(rt.self, 0, &stream), "");
    T_OK_TEXT(rt.event_create(rt.self, &event), "");
    for (int n = 0; s == GMM_E_MEMORY; n++, refused++) {
        spare = n;
        s = rt.event_record(rt.self, event, stream, 0);
        spare = -1;
        if (s == GMM_E_MEMORY) T_OK_TEXT(rt.event_sync(rt.self, event), gmm_ranks_error(ranks, 0));
    }
    T_CHECK(s == GMM_OK && refused > 1, "%s after %d refusals", gmm_status_name(s), refused);
    T_OK_TEXT(rt.event_sync(rt.self, event), gmm_ranks_error(ranks, 0));
    T_OK_TEXT(gmm_ranks_comms(ranks, &first, 1, &comm), "");
    T_OK_TEXT(rt.stream_create(rt.self, 0, &stream), "");
    for (s = GMM_E_MEMORY, refused = 0; s == GMM_E_MEMORY; refused++) {
        spare = refused;
        s = comm.all_reduce_max(comm.self, &value, 1, stream);
        spare = -1;
    }
    T_CHECK(s == GMM_OK && refused > 2, "%s after %d refusals", gmm_status_name(s), refused);
    T_OK_TEXT(rt.stream_sync(rt.self, stream), gmm_ranks_error(ranks, 0));
    T_OK_TEXT(rt.event_destroy(rt.self, event), "");
    gmm_ranks_destroy(ranks);
}

/* Memory that gmm_gtp_bind refuses, for domain 0 of two. */
static void bad_bindings(const rank *r, const gmm_gtp_need *n) {
    char *const gather = (char *)gtp_memory(n->gather_bytes, 0), *const reduce = (char *)gtp_memory(n->reduce_bytes, 0);
    const size_t gathered = n->gather_bytes, reduced = n->reduce_bytes;
    GTP_REFUSED(r, GMM_E_ARG, gmm_gtp_bind(r->gtp, 2, gather, gathered, reduce, reduced), "domain 2", "one of 2", NULL);
    GTP_REFUSED(r, GMM_E_ARG, gmm_gtp_bind(r->gtp, -1, gather, gathered, reduce, reduced), "domain -1", NULL);
    GTP_REFUSED(r, GMM_E_WORKSPACE, gmm_gtp_bind(r->gtp, 0, gather, gathered - 1, reduce, reduced), "domain 0",
                "gmm_gtp_memory_need asks for", NULL);
    GTP_REFUSED(r, GMM_E_WORKSPACE, gmm_gtp_bind(r->gtp, 0, gather, gathered, reduce, reduced - 1), "domain 0",
                "gmm_gtp_memory_need asks for", NULL);
    GTP_REFUSED(r, GMM_E_NULL, gmm_gtp_bind(r->gtp, 0, NULL, gathered, reduce, reduced), "gather is NULL", NULL);
    GTP_REFUSED(r, GMM_E_NULL, gmm_gtp_bind(r->gtp, 0, gather, gathered, NULL, reduced), "reduce is NULL", NULL);
    GTP_REFUSED(r, GMM_E_ALIGN, gmm_gtp_bind(r->gtp, 0, gather + 8, gathered, reduce, reduced), "256 bytes", NULL);
    GTP_REFUSED(r, GMM_E_ALIGN, gmm_gtp_bind(r->gtp, 0, gather, gathered, reduce + 8, reduced), "256 bytes", NULL);
    GTP_REFUSED(r, GMM_E_ARG, gmm_gtp_bind(r->gtp, 0, gather, gathered, gather, reduced), "gather at",
                "overlaps reduce", NULL);
}

/* Windows of an object whose bind failed are removed again. */
static struct windows { int added, removed; } windows;
static gmm_status window_add(void *self, void *base, size_t bytes, void **window) {
    (void)self, (void)bytes;
    windows.added++;
    *window = base;
    return GMM_OK;
}
static gmm_status window_remove(void *self, void *window) {
    (void)self, (void)window;
    windows.removed++;
    return GMM_OK;
}
static void half_bound(int arg) {
    rank *r;
    gmm_gtp_config config;
    gmm_shard s = GMM_ZERO;
    gmm_gtp_need n = GMM_ZERO;
    int32_t id;
    (void)arg;
    open_world(2, 0, 100);
    r = &W.r[0];
    config = config_of(r);
    begin(r, &config);
    s.dtype = GMM_F32;
    s.rows = 32;
    s.cols = 4;
    s.gtp_size = 2;
    memset(&windows, 0, sizeof windows);
    for (int k = 0; k < 2; k++) {
        gmm_gtp_domain d = domain_of(r, 0, 0);
        gmm_comm comm = W.comm[0][0];
        gmm_gtp_weight w = weight_of(&s, 0, "weight");
        comm.window_add = window_add;
        comm.window_remove = window_remove;
        d.gather = d.reduce = &comm;
        GTP_OK(r, gmm_gtp_add_domain(r->gtp, &d, &r->domain[k]));
        GTP_OK(r, gmm_gtp_add_weight(r->gtp, &w, &id));
        GTP_OK(r, gmm_gtp_add_bundle(r->gtp, r->domain[k], &id, 1, "bundle", &r->bundle[k]));
    }
    GTP_OK(r, gmm_gtp_seal(r->gtp));
    GTP_OK(r, gmm_gtp_memory_need(r->gtp, 0, &n));
    bad_bindings(r, &n);
    T_CHECK(windows.added == 0, "%d windows of refused memory", windows.added);
    GTP_OK(r, gmm_gtp_bind(r->gtp, 0, gtp_memory(n.gather_bytes, 0), n.gather_bytes, gtp_memory(n.reduce_bytes, 0),
                           n.reduce_bytes));
    T_CHECK(windows.added == 2, "%d windows", windows.added);
    GTP_REFUSED(r, GMM_E_ARG, gmm_gtp_bind(r->gtp, 0, NULL, 0, NULL, 0), "domain 0", "not bound yet", NULL);
    GTP_OK(r, gmm_gtp_fini(r->gtp));
    GTP_OK(r, gmm_gtp_fini(r->gtp));
    T_CHECK(windows.removed == 2, "%d windows removed", windows.removed);
    GTP_REFUSED(r, GMM_E_STATE, gmm_gtp_bind(r->gtp, 1, NULL, 0, NULL, 0), "gmm_gtp_fini", NULL);
    r->gtp = NULL;
    close_world();
}

/* The error text distinguishes a rank in another collective from one that is late. */
static void out_of_step(int arg) {
    float *main_grad[2][2];
    gmm_shard_plan plan[2][2];
    (void)arg;
    open_world(2, 0, 500);
    for (int i = 0; i < 2; i++) {
        const gmm_gtp_domain d = domain_of(&W.r[i], 0, -1); /* one communicator for gathers and reductions */
        declare(&W.r[i], 1, &d, main_grad[i], plan[i]);
    }
    {
        gmm_gtp_view v = GMM_ZERO;
        gmm_gtp_gradient g = GMM_ZERO;
        gmm_status s;
        g.zero = 1;
        GTP_OK(&W.r[0], gmm_gtp_acquire(W.r[0].gtp, 0, GMM_GTP_FORWARD, W.r[0].compute, &v));
        s = gmm_gtp_submit(W.r[1].gtp, 0, &g, W.r[1].compute);
        T_CHECK(s == GMM_E_COMM || gmm_ranks_run(W.ranks) == GMM_E_COMM, "%s", gmm_status_name(s));
        T_CHECK(strstr(gmm_ranks_error(W.ranks, 0), "all_gather") &&
                strstr(gmm_ranks_error(W.ranks, 0), "reduce_scatter"), "%s", gmm_ranks_error(W.ranks, 0));
    }
    gtp_check_memory();
    open_world(1, 0, 0);
}

/* Two bundles of equal size that one rank gathers (or reduces, by either algorithm) in swapped order: both ranks get an
   error that names the bundles, and nothing is gathered. */
static void swapped_bundles(int arg) {
    static const char *const names[2] = {"up projection", "down projection"};
    const char *collective = arg == 0 ? "all_gather" : arg == 1 ? "reduce_scatter" : "all_to_all";
    gmm_gtp_view v[2][2];
    memset(v, 0, sizeof v);
    open_world(2, 0, 500);
    for (int i = 0; i < 2; i++) {
        rank *r = &W.r[i];
        const gmm_gtp_config config = config_of(r);
        gmm_gtp_domain d = domain_of(r, 0, 1);
        gmm_shard s = GMM_ZERO;
        gmm_shard_plan p = GMM_ZERO;
        d.reduction = arg == 2 ? GMM_GTP_REDUCE_EXCHANGE : GMM_GTP_REDUCE_SCATTER;
        begin(r, &config);
        GTP_OK(r, gmm_gtp_add_domain(r->gtp, &d, &r->domain[0]));
        s.dtype = GMM_F32;
        s.rows = 12;
        s.cols = 5;
        s.gtp_size = 2;
        s.gtp_rank = i;
        s.unit = 2;
        T_OK_TEXT(gmm_gtp_plan(&s, &p, NULL), "");
        for (int k = 0; k < 2; k++) {
            gmm_gtp_weight w = GMM_ZERO;
            int32_t id;
            w.name = names[k];
            w.shard = &s;
            w.data[0] = gtp_memory((size_t)p.shard_data_bytes[0], 0);
            w.main_grad = gtp_memory((size_t)p.shard_data_bytes[0], 0);
            w.main_grad_dtype = GMM_F32;
            GTP_OK(r, gmm_gtp_add_weight(r->gtp, &w, &id));
            GTP_OK(r, gmm_gtp_add_bundle(r->gtp, r->domain[0], &id, 1, names[k], &r->bundle[k]));
        }
        bind(r, 1);
    }
    {
        gmm_status s[2] = {GMM_OK, GMM_OK};
        gmm_gtp_gradient zeros = GMM_ZERO;
        unsigned char *before = (unsigned char *)t_host(W.r[0].need[0].gather_bytes + 1);
        zeros.zero = 1;
        memcpy(before, W.r[0].gather[0], W.r[0].need[0].gather_bytes);
        for (int k = 0; k < 2; k++) /* rank 1 takes the second bundle first */
            for (int i = 0; i < 2 && !s[i]; i++)
                s[i] = arg == 0 ? gmm_gtp_acquire(W.r[i].gtp, W.r[i].bundle[k ^ i], GMM_GTP_FORWARD, W.r[i].compute,
                                                  &v[i][k])
                                : gmm_gtp_submit(W.r[i].gtp, W.r[i].bundle[k ^ i], &zeros, W.r[i].compute);
        T_CHECK(gmm_ranks_run(W.ranks) == GMM_E_COMM || s[0] == GMM_E_COMM || s[1] == GMM_E_COMM, "swapped: accepted");
        for (int i = 0; i < 2; i++) {
            const char *text;
            T_CHECK(gmm_gtp_poll(W.r[i].gtp) == GMM_E_COMM, "rank %d is not told", i);
            text = gmm_gtp_last_error(W.r[i].gtp);
            T_CHECK(strstr(text, "rank 0 waits for 'up projection'") && strstr(text, "rank 1 for 'down projection'") &&
                    strstr(text, collective), "rank %d: %s", i, text);
        }
        if (arg == 0) t_same("gathered", W.r[0].gather[0], before, W.r[0].need[0].gather_bytes);
    }
    gtp_check_memory();
    open_world(1, 0, 0);
}

/* ----------------------------------------------------------------------------------------- Views in operations --- */

enum { MLP_RANKS = 2, MLP_EXPERTS = 3, MLP_HIDDEN = 24, MLP_FFN = 20, MLP_TOKENS = 17 };
static const int64_t mlp_rows[2] = {2 * MLP_FFN, MLP_HIDDEN}, mlp_cols[2] = {MLP_HIDDEN, MLP_FFN}; /* FC1, FC2 */

/* What a rank multiplies and computes: [way]: with whole weights, with views; [k]: FC1, FC2. */
typedef struct mlp_rank {
    uint16_t *x, *dy, *y[2], *dx[2]; /* y: of the MLP, then of the linear layer */
    float *dw[2], *main_grad[2][MLP_EXPERTS];
    gmm_shard_plan plan[2];
    gmm_gtp_view view[2], wgrad[2];
} mlp_rank;

/* Draws the rank's tokens, and declares its shards of the weights. */
static void mlp_rank_begin(mlp_rank *m, rank *r, int g, uint16_t *const whole[2]) {
    const gmm_gtp_config config = config_of(r);
    gmm_gtp_domain d = domain_of(r, g > 1 ? 0 : -1, g > 1 ? 1 : -1);
    memset(m, 0, sizeof *m);
    m->x = (uint16_t *)t_host(MLP_TOKENS * MLP_HIDDEN * 2);
    m->dy = (uint16_t *)t_host(MLP_TOKENS * MLP_HIDDEN * 2);
    for (int i = 0; i < MLP_TOKENS * MLP_HIDDEN; i++) {
        m->x[i] = gmm_f32_to_bf16((float)t_real());
        m->dy[i] = gmm_f32_to_bf16((float)t_real());
    }
    begin(r, &config);
    GTP_OK(r, gmm_gtp_add_domain(r->gtp, &d, &r->domain[0]));
    for (int k = 0; k < 2; k++) {
        gmm_shard s = GMM_ZERO;
        int32_t ids[MLP_EXPERTS];
        s.dtype = GMM_BF16;
        s.rows = mlp_rows[k];
        s.cols = mlp_cols[k];
        s.gtp_size = g;
        s.gtp_rank = r->index;
        for (int e = 0; e < MLP_EXPERTS; e++) {
            gmm_gtp_weight w = weight_of(&s, e, "expert");
            T_OK_TEXT(gmm_gtp_plan(&s, &m->plan[k], NULL), "");
            memcpy(w.data[0], whole[k] + (e * mlp_rows[k] + m->plan[k].row0) * mlp_cols[k],
                   (size_t)(m->plan[k].valid_rows * mlp_cols[k]) * 2);
            m->main_grad[k][e] = (float *)w.main_grad;
            GTP_OK(r, gmm_gtp_add_weight(r->gtp, &w, &ids[e]));
        }
        GTP_OK(r, gmm_gtp_add_bundle(r->gtp, r->domain[0], ids, MLP_EXPERTS, k ? "fc2" : "fc1", &r->bundle[k]));
    }
    bind(r, 1);
}

/* Acquires the rank's views, and gives them back with their gradients. */
static void mlp_rank_acquire(mlp_rank *m, rank *r) {
    for (int k = 0; k < 2; k++) {
        GTP_OK(r, gmm_gtp_acquire(r->gtp, r->bundle[k], GMM_GTP_FORWARD, r->compute, &m->view[k]));
        GTP_OK(r, gmm_gtp_wgrad(r->gtp, r->bundle[k], r->compute, &m->wgrad[k]));
    }
}
static void mlp_rank_submit(rank *r) {
    for (int k = 0; k < 2; k++) {
        gmm_gtp_gradient in = GMM_ZERO;
        in.scale = 1;
        in.add = GMM_GTP_SET;
        GTP_OK(r, gmm_gtp_release(r->gtp, r->bundle[k], GMM_GTP_FORWARD, r->compute));
        GTP_OK(r, gmm_gtp_submit(r->gtp, r->bundle[k], &in, r->compute));
    }
}

/* Forward and backward of the MLP, then FC1 alone as a linear layer. */
static void mlp_rank_compute(mlp_rank *m, gmm_context *ctx, int way, uint16_t *const whole[2]) {
    int32_t sizes[MLP_EXPERTS] = {9, 0, 8};
    gmm_mlp_config config = GMM_ZERO;
    gmm_groups groups = GMM_ZERO;
    gmm_mat x = gmm_mat_packed(GMM_BF16, m->x), dy = gmm_mat_packed(GMM_BF16, m->dy), y, dx, w[2], dw[2];
    gmm_mlp mlp = GMM_ZERO;
    gmm_grad d[2] = {GMM_ZERO, GMM_ZERO};
    gmm_linear lin = GMM_ZERO;
    gmm_info info = GMM_ZERO;
    void *work;
    config.hidden = MLP_HIDDEN;
    config.ffn = MLP_FFN;
    config.act.kind = GMM_ACT_SWIGLU;
    m->y[way] = (uint16_t *)t_host(MLP_TOKENS * (MLP_HIDDEN + 2 * MLP_FFN) * 2);
    m->dx[way] = (uint16_t *)t_host(MLP_TOKENS * MLP_HIDDEN * 2);
    y = gmm_mat_packed(GMM_BF16, m->y[way]);
    dx = gmm_mat_packed(GMM_BF16, m->dx[way]);
    for (int k = 0; k < 2; k++) {
        if (!way) m->dw[k] = (float *)t_host((size_t)(MLP_EXPERTS * mlp_rows[k] * mlp_cols[k]) * sizeof(float));
        w[k] = way ? m->view[k].mat : gmm_mat_packed(GMM_BF16, whole[k]);
        dw[k] = way ? m->wgrad[k].mat : gmm_mat_packed(GMM_F32, m->dw[k]);
        d[k].mat = &dw[k];
    }
    groups.count = MLP_EXPERTS;
    groups.capacity = MLP_TOKENS;
    groups.splits = sizes;
    groups.dtype = GMM_I32;
    mlp.config = &config;
    mlp.groups = &groups;
    mlp.x = &x;
    mlp.w1 = &w[0];
    mlp.w2 = &w[1];
    mlp.y = &y;
    mlp.dy = &dy;
    mlp.dx = &dx;
    mlp.dw1 = &d[0];
    mlp.dw2 = &d[1];
    T_OK_TEXT(gmm_mlp_query(ctx, GMM_OP_MLP_FWD, &mlp, &info), gmm_last_error(ctx));
    mlp.saved = gtp_memory(info.saved_bytes, 0);
    mlp.saved_bytes = info.saved_bytes;
    work = gtp_memory(info.workspace_bytes, 0);
    T_OK_TEXT(gmm_mlp_fwd(ctx, &mlp, work, info.workspace_bytes, NULL), gmm_last_error(ctx));
    T_OK_TEXT(gmm_mlp_query(ctx, GMM_OP_MLP_BWD, &mlp, &info), gmm_last_error(ctx));
    work = gtp_memory(info.workspace_bytes, 0);
    T_OK_TEXT(gmm_mlp_bwd(ctx, &mlp, work, info.workspace_bytes, NULL), gmm_last_error(ctx));
    y = gmm_mat_packed(GMM_BF16, m->y[way] + MLP_TOKENS * MLP_HIDDEN);
    lin.groups = &groups;
    lin.in_features = MLP_HIDDEN;
    lin.out_features = 2 * MLP_FFN;
    lin.x = &x;
    lin.w = &w[0];
    lin.y = &y;
    T_OK_TEXT(gmm_linear_query(ctx, GMM_OP_LINEAR_FWD, &lin, &info), gmm_last_error(ctx));
    work = gtp_memory(info.workspace_bytes, 0);
    T_OK_TEXT(gmm_linear_fwd(ctx, &lin, work, info.workspace_bytes, NULL), gmm_last_error(ctx));
}

/* Compares a rank's results of the two ways, and its part of main_grad with the sum over the ranks. */
static void mlp_rank_compare(const mlp_rank *m, const mlp_rank *first, const mlp_rank *last) {
    t_same("y", m->y[0], m->y[1], MLP_TOKENS * (MLP_HIDDEN + 2 * MLP_FFN) * 2);
    t_same("dx", m->dx[0], m->dx[1], MLP_TOKENS * MLP_HIDDEN * 2);
    for (int k = 0; k < 2; k++)
        for (int e = 0; e < MLP_EXPERTS; e++)
            for (int64_t n = 0; n < m->plan[k].valid_rows * mlp_cols[k]; n++) {
                const int64_t at = (e * mlp_rows[k] + m->plan[k].row0) * mlp_cols[k] + n;
                const float want = first == last ? first->dw[k][at] : first->dw[k][at] + last->dw[k][at];
                T_CHECK(m->main_grad[k][e][n] == want, "fc%d expert %d: %g, not %g", k + 1, e,
                        (double)m->main_grad[k][e][n], (double)want);
            }
}

/* A linear layer and an expert MLP read acquired views, packed and in tables, and write gradient
   views: the same bits as with whole weights; main_grad is the sum of the gradients of each rank alone. */
static void operations(int arg) {
    const int g = arg;
    uint16_t *whole[2];
    mlp_rank m[MLP_RANKS];
    for (int k = 0; k < 2; k++) {
        const int64_t elements = MLP_EXPERTS * mlp_rows[k] * mlp_cols[k];
        whole[k] = (uint16_t *)t_host((size_t)elements * 2);
        for (int64_t i = 0; i < elements; i++) whole[k][i] = gmm_f32_to_bf16((float)t_real());
    }
    open_world(g, 0, 2000);
    for (int i = 0; i < g; i++) mlp_rank_begin(&m[i], &W.r[i], g, whole);
    for (int way = 0; way < 2; way++) { /* with whole weights, with views */
        /* all ranks enqueue the gather before one of them waits for it */
        for (int i = 0; i < g && way; i++) mlp_rank_acquire(&m[i], &W.r[i]);
        finish();
        for (int i = 0; i < g; i++) mlp_rank_compute(&m[i], W.r[i].ctx, way, whole);
        for (int i = 0; i < g && way; i++) mlp_rank_submit(&W.r[i]);
    }
    finish();
    for (int i = 0; i < g; i++) mlp_rank_compare(&m[i], &m[0], &m[g - 1]);
    close_world();
}

/* ---------------------------------------------------------------------------------- Weights gathered by hooks --- */

/* Expert MLPs whose weights are acquired in gmm_grad_hooks.need and released behind the product, and whose gradients
   are submitted in `ready`. A CPU context multiplies at once; what the products read and write of views is enqueued on
   the compute stream as work of its own, which compares a view with the whole weight, or stores a gradient. */
enum { HOOK_LAYERS = 2, HOOK_EXPERTS = 2, HOOK_HIDDEN = 24, HOOK_FFN = 20, HOOK_TOKENS = 11 };
static const int64_t hook_rows[2] = {2 * HOOK_FFN, HOOK_HIDDEN}, hook_cols[2] = {HOOK_HIDDEN, HOOK_FFN};

typedef struct hook_layer {
    rank *r;
    int32_t bundle[2], ids[2][HOOK_EXPERTS];
    float *whole[2], *dw[2], *main_grad[2][HOOK_EXPERTS];
    gmm_shard_plan plan[2];
    gmm_mat w[2];
    int held[2], backward, opens, premature; /* held: 1 + pass of the view; premature: release before the product */
    int64_t wrong;                           /* elements of views that differed */
} hook_layer;
typedef struct hook_work { hook_layer *l; float *view[HOOK_EXPERTS]; int which, writes; } hook_work;

static gmm_status hook_run(const void *argument, gmm_stream stream) {
    const hook_work *a = (const hook_work *)argument;
    const int64_t n = hook_rows[a->which] * hook_cols[a->which];
    (void)stream;
    for (int e = 0; e < HOOK_EXPERTS; e++) {
        if (a->writes) memcpy(a->view[e], a->l->dw[a->which] + e * n, (size_t)n * sizeof(float));
        else
            for (int64_t i = 0; i < n; i++) a->l->wrong += a->view[e][i] != a->l->whole[a->which][e * n + i];
    }
    return GMM_OK;
}
static gmm_status hook_enqueue(hook_layer *l, int which, int writes, const gmm_mat *view) {
    gmm_range ranges[HOOK_EXPERTS + 1];
    gmm_work w = GMM_ZERO;
    hook_work a;
    memset(&a, 0, sizeof a);
    memset(ranges, 0, sizeof ranges);
    a.l = l;
    a.which = which;
    a.writes = writes;
    for (int e = 0; e < HOOK_EXPERTS; e++) {
        a.view[e] = view->table ? (float *)view->table[e] : (float *)view->data + e * view->group_stride;
        ranges[e].data = a.view[e];
        ranges[e].bytes = (size_t)(hook_rows[which] * hook_cols[which]) * sizeof(float);
        ranges[e].writes = writes;
    }
    ranges[HOOK_EXPERTS].data = &l->wrong;
    ranges[HOOK_EXPERTS].bytes = sizeof l->wrong;
    ranges[HOOK_EXPERTS].writes = !writes;
    w.name = "product";
    w.function = hook_run;
    w.argument = &a;
    w.argument_bytes = sizeof a;
    w.ranges = ranges;
    w.range_count = HOOK_EXPERTS + 1;
    return l->r->rt.run(l->r->rt.self, &w, l->r->compute);
}
static gmm_status hook_release(hook_layer *l, int which) {
    const int held = l->held[which];
    l->held[which] = 0;
    if (!held) return GMM_OK;
    return gmm_gtp_release(l->r->gtp, l->bundle[which], (gmm_gtp_pass)(held - 1), l->r->compute);
}
static gmm_status hook_need(void *user, gmm_param param, gmm_op op, gmm_stream stream) {
    hook_layer *l = (hook_layer *)user;
    const int which = param == GMM_PARAM_W2;
    const gmm_gtp_pass pass = l->backward ? GMM_GTP_BACKWARD : GMM_GTP_FORWARD;
    gmm_gtp_view v = GMM_ZERO;
    gmm_status s = hook_release(l, !which);
    (void)stream;
    if ((op == GMM_OP_LINEAR_DGRAD) != l->backward) return GMM_E_ARG;
    if (!s) s = gmm_gtp_acquire(l->r->gtp, l->bundle[which], pass, l->r->compute, &v);
    l->held[which] = 1 + (int)pass;
    if (!s && l->premature) s = hook_release(l, which);
    if (!s) s = hook_enqueue(l, which, 0, &v.mat);
    l->w[which].data = l->whole[which];
    return s;
}
static void hook_ready(void *user, gmm_param param, gmm_stream stream) {
    hook_layer *l = (hook_layer *)user;
    const int which = param == GMM_PARAM_W2;
    gmm_gtp_gradient in = GMM_ZERO;
    gmm_gtp_view v = GMM_ZERO;
    gmm_status s = gmm_gtp_wgrad(l->r->gtp, l->bundle[which], l->r->compute, &v);
    (void)stream;
    if (!s) s = hook_enqueue(l, which, 1, &v.mat);
    in.scale = 1;
    in.add = l->opens ? GMM_GTP_SET : GMM_GTP_ADD;
    if (!s) s = gmm_gtp_submit(l->r->gtp, l->bundle[which], &in, l->r->compute);
    l->wrong += s != GMM_OK;
}

static void hook_declare(rank *r, hook_layer *layers, float *const (*whole)[2], int premature) {
    const gmm_gtp_config config = config_of(r);
    gmm_gtp_domain d = domain_of(r, 0, 1);
    int32_t list[2][2 * HOOK_LAYERS], chain[2];
    begin(r, &config);
    GTP_OK(r, gmm_gtp_add_domain(r->gtp, &d, &r->domain[0]));
    for (int k = 0; k < 2 * HOOK_LAYERS; k++) {
        hook_layer *l = &layers[k / 2];
        const int which = k % 2;
        gmm_shard s = GMM_ZERO;
        l->r = r;
        l->premature = premature;
        l->whole[which] = whole[k / 2][which];
        l->dw[which] = (float *)t_host((size_t)(HOOK_EXPERTS * hook_rows[which] * hook_cols[which]) * sizeof(float));
        s.dtype = GMM_F32;
        s.rows = hook_rows[which];
        s.cols = hook_cols[which];
        s.gtp_size = W.n;
        s.gtp_rank = r->index;
        T_OK_TEXT(gmm_gtp_plan(&s, &l->plan[which], NULL), "");
        for (int e = 0; e < HOOK_EXPERTS; e++) {
            gmm_gtp_weight w = weight_of(&s, e, "expert");
            memcpy(w.data[0], l->whole[which] + (e * s.rows + l->plan[which].row0) * s.cols,
                   (size_t)(l->plan[which].valid_rows * s.cols) * sizeof(float));
            l->main_grad[which][e] = (float *)w.main_grad;
            GTP_OK(r, gmm_gtp_add_weight(r->gtp, &w, &l->ids[which][e]));
        }
        GTP_OK(r, gmm_gtp_add_bundle(r->gtp, r->domain[0], l->ids[which], HOOK_EXPERTS, which ? "fc2" : "fc1",
                                     &l->bundle[which]));
        list[0][k] = list[1][2 * HOOK_LAYERS - 1 - k] = l->bundle[which];
    }
    for (int pass = 0; pass < 2; pass++) {
        gmm_gtp_chain c = GMM_ZERO;
        c.pass = pass ? GMM_GTP_BACKWARD : GMM_GTP_FORWARD;
        c.bundles = list[pass];
        c.count = 2 * HOOK_LAYERS;
        c.prefetch = 1;
        GTP_OK(r, gmm_gtp_add_chain(r->gtp, &c, &chain[pass]));
    }
    bind(r, 1);
    GTP_OK(r, gmm_gtp_follow(r->gtp, chain[0], chain[1]));
}

/* Forward and backward of a layer. `with` hooks: their weights are known in `need`. */
static void hook_mlp(hook_layer *l, gmm_op op, int with, const float *x, const float *dy, float *out, void *saved) {
    const int32_t sizes[HOOK_EXPERTS] = {4, 7};
    gmm_context *ctx = l->r->ctx;
    const gmm_mat mx = gmm_mat_packed(GMM_F32, x), mdy = gmm_mat_packed(GMM_F32, dy);
    const gmm_mat mo = gmm_mat_packed(GMM_F32, out);
    gmm_mat g[2];
    gmm_grad d[2] = {GMM_ZERO, GMM_ZERO};
    gmm_mlp_config mc = GMM_ZERO;
    gmm_grad_hooks hooks = GMM_ZERO;
    gmm_groups groups = GMM_ZERO;
    gmm_info info = GMM_ZERO;
    gmm_mlp mlp = GMM_ZERO;
    void *work;
    mc.hidden = HOOK_HIDDEN;
    mc.ffn = HOOK_FFN;
    mc.act.kind = GMM_ACT_SWIGLU;
    groups.count = HOOK_EXPERTS;
    groups.capacity = HOOK_TOKENS;
    groups.splits = sizes;
    groups.dtype = GMM_I32;
    hooks.user = l;
    hooks.need = hook_need;
    hooks.ready = hook_ready;
    for (int k = 0; k < 2; k++) {
        l->w[k] = gmm_mat_packed(GMM_F32, with ? NULL : l->whole[k]);
        g[k] = gmm_mat_packed(GMM_F32, l->dw[k]);
        d[k].mat = &g[k];
    }
    mlp.config = &mc;
    mlp.groups = &groups;
    mlp.hooks = with ? &hooks : NULL;
    mlp.x = &mx;
    mlp.w1 = &l->w[0];
    mlp.w2 = &l->w[1];
    mlp.y = mlp.dx = &mo;
    mlp.dy = &mdy;
    mlp.dw1 = &d[0];
    mlp.dw2 = &d[1];
    T_OK_TEXT(gmm_mlp_query(ctx, op, &mlp, &info), gmm_last_error(ctx));
    work = gtp_memory(info.workspace_bytes, 0xFF);
    mlp.saved = saved;
    mlp.saved_bytes = info.saved_bytes;
    l->backward = op == GMM_OP_MLP_BWD;
    if (l->backward) T_OK_TEXT(gmm_mlp_bwd(ctx, &mlp, work, info.workspace_bytes, NULL), gmm_last_error(ctx));
    else T_OK_TEXT(gmm_mlp_fwd(ctx, &mlp, work, info.workspace_bytes, NULL), gmm_last_error(ctx));
    for (int k = 0; k < 2 && with; k++) GTP_OK(l->r, hook_release(l, k));
}
#define hook_mlp(...) T_CALL(hook_mlp, __VA_ARGS__)

static float *hook_values(int64_t n) {
    float *v = (float *)t_host((size_t)n * sizeof(float));
    for (int64_t i = 0; i < n; i++) v[i] = (float)t_real();
    return v;
}

/* Under random schedules no access races, every product reads the weight that it needs, and gradients are those of
   MLPs without hooks, summed over ranks. With `premature`, a release before the product, the race checker reports
   it. */
static void hooked_mlp(int premature) {
    enum { MICRO = 3, RANKS = 2, OUT = HOOK_TOKENS * HOOK_HIDDEN };
    const size_t saved_bytes = HOOK_TOKENS * 2 * HOOK_FFN * sizeof(float);
    float *whole[HOOK_LAYERS][2], *x[RANKS], *dy[RANKS], *want[RANKS][HOOK_LAYERS][2], *dw[RANKS][HOOK_LAYERS][2];
    for (int k = 0; k < 2 * HOOK_LAYERS; k++)
        whole[k / 2][k % 2] = hook_values(HOOK_EXPERTS * hook_rows[k % 2] * hook_cols[k % 2]);
    for (int i = 0; i < RANKS; i++) {
        x[i] = hook_values(OUT);
        dy[i] = hook_values(OUT);
    }
    for (int seed = 0; seed < (premature ? 1 : 12); seed++) {
        hook_layer layers[RANKS][HOOK_LAYERS];
        const char *race = "";
        memset(layers, 0, sizeof layers);
        open_world(RANKS, seed ? t_rand() | 1 : 0, 2000);
        for (int i = 0; i < RANKS; i++) hook_declare(&W.r[i], layers[i], (float *const (*)[2])whole, premature);
        for (int step = -1; step < MICRO; step++) /* -1: without hooks */
            for (int i = 0; i < RANKS; i++) {
                void *saved[HOOK_LAYERS];
                for (int l = 0; l < HOOK_LAYERS && step >= 0; l++)
                    for (int k = 0; k < 2; k++)
                        GTP_OK(&W.r[i], gmm_gtp_publish(W.r[i].gtp, layers[i][l].ids[k], HOOK_EXPERTS, NULL));
                for (int pass = 0; pass < 2; pass++)
                    for (int n = 0; n < HOOK_LAYERS; n++) {
                        const int l = pass ? HOOK_LAYERS - 1 - n : n, first = step < 0;
                        float *out = (float *)t_host(OUT * sizeof(float));
                        if (!pass) saved[l] = gtp_memory(saved_bytes, 0xFF);
                        layers[i][l].opens = step == 0;
                        hook_mlp(&layers[i][l], pass ? GMM_OP_MLP_BWD : GMM_OP_MLP_FWD, !first, x[i], dy[i], out,
                                 saved[l]);
                        if (first) want[i][l][pass] = out;
                        else t_same(pass ? "dx" : "y", out, want[i][l][pass], OUT * sizeof(float));
                        for (int k = 0; k < 2 && pass && first; k++) {
                            const size_t bytes = (size_t)(HOOK_EXPERTS * hook_rows[k] * hook_cols[k]) * sizeof(float);
                            dw[i][l][k] = (float *)memcpy(t_host(bytes), layers[i][l].dw[k], bytes);
                        }
                    }
            }
        if (premature) {
            (void)gmm_ranks_run(W.ranks);
            T_CHECK(gmm_ranks_races(W.ranks, &race) > 0, "no race was found");
            break;
        }
        finish();
        for (int j = 0; j < RANKS * HOOK_LAYERS * 2; j++) {
            const int i = j / (2 * HOOK_LAYERS), l = j / 2 % HOOK_LAYERS, k = j % 2;
            T_CHECK(layers[i][l].wrong == 0, "rank %d layer %d: %lld wrong", i, l, (long long)layers[i][l].wrong);
            for (int64_t n = 0; n < HOOK_EXPERTS * layers[i][l].plan[k].valid_rows * hook_cols[k]; n++) {
                const int64_t part = layers[i][l].plan[k].valid_rows * hook_cols[k], e = n / part;
                const int64_t at = (e * hook_rows[k] + layers[i][l].plan[k].row0) * hook_cols[k] + n % part;
                const float sum = dw[0][l][k][at] + dw[1][l][k][at];
                float total = sum;
                for (int step = 1; step < MICRO; step++) total += sum;
                T_CHECK(layers[i][l].main_grad[k][e][n % part] == total, "rank %d layer %d fc%d: %g, not %g", i, l,
                        k + 1, (double)layers[i][l].main_grad[k][e][n % part], (double)total);
            }
        }
    }
    close_world();
}

/* ------------------------------------------------------------------------------- Defects and rows on their own --- */

enum { VIEW_HIDDEN = 24, VIEW_FFN = 20, VIEW_TOKENS = 11 };
/* dx of an expert MLP, and behind it that of its first weight alone. w: by weight and pass. */
static uint16_t *dx_of_views(gmm_context *ctx, int experts, const int32_t *sizes, const gmm_mat *w[2][2],
                             const uint16_t *x, const uint16_t *dy) {
    gmm_groups groups = GMM_ZERO;
    gmm_mat mx = gmm_mat_packed(GMM_BF16, x), mdy = gmm_mat_packed(GMM_BF16, dy), my, mdx;
    gmm_mlp_config mc = GMM_ZERO;
    gmm_mlp mlp = GMM_ZERO;
    gmm_linear lin = GMM_ZERO;
    gmm_info info = GMM_ZERO;
    uint16_t *y = (uint16_t *)t_host(VIEW_TOKENS * VIEW_HIDDEN * 2);
    void *saved;
    uint16_t *const dx = (uint16_t *)t_host(2 * VIEW_TOKENS * VIEW_HIDDEN * 2);
    my = gmm_mat_packed(GMM_BF16, y);
    mdx = gmm_mat_packed(GMM_BF16, dx);
    groups.count = experts;
    groups.capacity = VIEW_TOKENS;
    groups.splits = sizes;
    groups.dtype = GMM_I32;
    mc.hidden = VIEW_HIDDEN;
    mc.ffn = VIEW_FFN;
    mc.act.kind = GMM_ACT_SWIGLU;
    mlp.config = &mc;
    mlp.groups = &groups;
    mlp.x = &mx;
    mlp.w1 = w[0][0];
    mlp.w2 = w[1][0];
    mlp.y = &my;
    mlp.dy = &mdy;
    mlp.dx = &mdx;
    T_OK_TEXT(gmm_mlp_query(ctx, GMM_OP_MLP_FWD, &mlp, &info), gmm_last_error(ctx));
    mlp.saved = saved = gtp_memory(info.saved_bytes, 0);
    mlp.saved_bytes = info.saved_bytes;
    T_OK_TEXT(gmm_mlp_fwd(ctx, &mlp, gtp_memory(info.workspace_bytes, 0), info.workspace_bytes, NULL),
              gmm_last_error(ctx));
    mlp.w1 = w[0][1];
    mlp.w2 = w[1][1];
    T_OK_TEXT(gmm_mlp_query(ctx, GMM_OP_MLP_BWD, &mlp, &info), gmm_last_error(ctx));
    T_OK_TEXT(gmm_mlp_bwd(ctx, &mlp, gtp_memory(info.workspace_bytes, 0), info.workspace_bytes, NULL),
              gmm_last_error(ctx));
    mdx.data = dx + VIEW_TOKENS * VIEW_HIDDEN;
    lin.groups = &groups;
    lin.in_features = VIEW_HIDDEN;
    lin.out_features = 2 * VIEW_FFN;
    lin.dy = &mdy;
    lin.w = w[0][1];
    lin.dx = &mdx;
    T_OK_TEXT(gmm_linear_query(ctx, GMM_OP_LINEAR_DGRAD, &lin, &info), gmm_last_error(ctx));
    T_OK_TEXT(gmm_linear_dgrad(ctx, &lin, gtp_memory(info.workspace_bytes, 0), info.workspace_bytes, NULL),
              gmm_last_error(ctx));
    return dx;
}

/* Products read acquired views and never the shards. After the acquire, the shards are overwritten with NaN, and
   they end at an unreadable page: dgrad of a linear layer and of an expert MLP, packed and single, has the bits of
   whole weights. */
static void acquired_only(int arg) {
    enum { G = 2 };
    const int experts = arg;
    const int64_t rows[2] = {2 * VIEW_FFN, VIEW_HIDDEN}, cols[2] = {VIEW_HIDDEN, VIEW_FFN};
    uint16_t *whole[2], *x, *dy, *dx[2][G];
    void *shard[G][2][3];
    size_t bytes[2] = {0, 0};
    int32_t sizes[3] = {VIEW_TOKENS, 0, 0};
    gmm_gtp_view v[G][2][2];
    if (experts == 3) {
        sizes[0] = 6;
        sizes[2] = 5;
    }
    for (int k = 0; k < 2; k++) {
        whole[k] = (uint16_t *)t_host((size_t)(experts * rows[k] * cols[k]) * 2);
        for (int64_t i = 0; i < experts * rows[k] * cols[k]; i++) whole[k][i] = gmm_f32_to_bf16((float)t_real());
    }
    x = (uint16_t *)t_host(VIEW_TOKENS * VIEW_HIDDEN * 2);
    dy = (uint16_t *)t_host(VIEW_TOKENS * 2 * VIEW_FFN * 2);
    for (int i = 0; i < VIEW_TOKENS * VIEW_HIDDEN; i++) x[i] = gmm_f32_to_bf16((float)t_real());
    for (int i = 0; i < VIEW_TOKENS * 2 * VIEW_FFN; i++) dy[i] = gmm_f32_to_bf16((float)t_real());
    open_world(G, 11, 2000);
    for (int i = 0; i < G; i++) {
        rank *r = &W.r[i];
        const gmm_gtp_config config = config_of(r);
        const gmm_gtp_domain d = domain_of(r, 0, 1);
        begin(r, &config);
        GTP_OK(r, gmm_gtp_add_domain(r->gtp, &d, &r->domain[0]));
        for (int k = 0; k < 2; k++) {
            gmm_shard s = GMM_ZERO;
            gmm_shard_plan p = GMM_ZERO;
            int32_t ids[3];
            s.dtype = GMM_BF16;
            s.rows = rows[k];
            s.cols = cols[k];
            s.gtp_size = G;
            s.gtp_rank = i;
            T_OK_TEXT(gmm_gtp_plan(&s, &p, NULL), "");
            bytes[k] = (size_t)p.shard_data_bytes[0];
            for (int e = 0; e < experts; e++) {
                gmm_gtp_weight w = GMM_ZERO;
                w.expert = e;
                w.shard = &s;
                w.data[0] = shard[i][k][e] = t_alloc(bytes[k]);
                memset(w.data[0], 0, bytes[k]);
                memcpy(w.data[0], whole[k] + (e * rows[k] + p.row0) * cols[k], (size_t)(p.valid_rows * cols[k]) * 2);
                GTP_OK(r, gmm_gtp_add_weight(r->gtp, &w, &ids[e]));
            }
            GTP_OK(r, gmm_gtp_add_bundle(r->gtp, r->domain[0], ids, experts, k ? "fc2" : "fc1", &r->bundle[k]));
        }
        bind(r, 1);
    }
    memset(v, 0, sizeof v);
    for (int i = 0; i < G; i++)
        for (int k = 0; k < 2; k++)
            for (int pass = 0; pass < 2; pass++)
                GTP_OK(&W.r[i], gmm_gtp_acquire(W.r[i].gtp, W.r[i].bundle[k], (gmm_gtp_pass)pass, W.r[i].compute,
                                                &v[i][k][pass]));
    finish();
    for (int i = 0; i < G; i++)
        for (int k = 0; k < 2; k++) {
            for (int e = 0; e < experts; e++) memset(shard[i][k][e], 0xFF, bytes[k]);
            for (int pass = 0; pass < 2; pass++) {
                const char *at = (const char *)v[i][k][pass].mat.data, *from = (const char *)W.r[i].gather[0];
                T_CHECK(at >= from && at < from + W.r[i].need[0].gather_bytes, "a view outside of the gathered");
            }
        }
    for (int way = 0; way < 2; way++)
        for (int i = 0; i < G; i++) {
            const gmm_mat packed[2] = {gmm_mat_packed(GMM_BF16, whole[0]), gmm_mat_packed(GMM_BF16, whole[1])};
            const gmm_mat *w[2][2];
            for (int k = 0; k < 2; k++)
                for (int pass = 0; pass < 2; pass++) w[k][pass] = way ? &v[i][k][pass].mat : &packed[k];
            dx[way][i] = dx_of_views(W.r[i].ctx, experts, sizes, w, x, dy);
        }
    for (int i = 0; i < G; i++) t_same("dx", dx[0][i], dx[1][i], 2 * VIEW_TOKENS * VIEW_HIDDEN * 2);
    for (int i = 0; i < G; i++)
        for (int k = 0; k < 2; k++)
            for (int pass = 0; pass < 2; pass++)
                GTP_OK(&W.r[i], gmm_gtp_release(W.r[i].gtp, W.r[i].bundle[k], (gmm_gtp_pass)pass, W.r[i].compute));
    close_world();
}

/* All scratch holds 12345 before every gradient; with a weight used three times, a rank without tokens and padding
   rows, main_grad is exactly the sum of the gradients that were written. */
static void poisoned(int arg) {
    float *main_grad[MOST][2], *gradient[MOST], want[60];
    gmm_shard_plan plan[MOST][2];
    const int g = 4;
    open_world(g, 21 + (uint64_t)arg, 500);
    for (int i = 0; i < g; i++) {
        gmm_gtp_domain d = domain_of(&W.r[i], 0, 1);
        d.reduction = arg ? GMM_GTP_REDUCE_EXCHANGE : GMM_GTP_REDUCE_SCATTER;
        declare(&W.r[i], 1, &d, main_grad[i], plan[i]);
        gradient[i] = (float *)t_host(60 * sizeof(float));
    }
    memset(want, 0, sizeof want);
    for (int step = 0; step < 6; step++) {
        for (int i = 0; i < g; i++) {
            float *scratch = (float *)W.r[i].reduce[0];
            for (size_t k = 0; k < W.r[i].need[0].reduce_bytes / sizeof(float); k++) scratch[k] = 12345;
            for (int k = 0; k < 60; k++) gradient[i][k] = (float)t_int(-8, 8);
        }
        for (int i = 0; i < g; i++) {
            rank *r = &W.r[i];
            gmm_gtp_gradient in = GMM_ZERO;
            gmm_gtp_view v = GMM_ZERO;
            in.scale = 1;
            in.add = step % 3 ? GMM_GTP_ADD : GMM_GTP_SET;
            in.zero = i == step % g;
            if (!in.zero) {
                GTP_OK(r, gmm_gtp_wgrad(r->gtp, 0, r->compute, &v));
                give_floats(r, v.mat.data, gradient[i], 60);
            }
            GTP_OK(r, gmm_gtp_submit(r->gtp, 0, &in, r->compute));
        }
        finish();
        for (int k = 0; k < 60; k++) {
            want[k] = step % 3 ? want[k] : 0;
            for (int i = 0; i < g; i++) want[k] += i == step % g ? 0 : gradient[i][k];
        }
        for (int i = 0; i < g; i++)
            for (int64_t k = 0; k < plan[i][0].shard_rows * 5; k++) {
                const int64_t at = plan[i][0].row0 * 5 + k;
                T_CHECK(main_grad[i][0][k] == (at < 60 ? want[at] : 0), "step %d rank %d element %lld: %g", step, i,
                        (long long)k, (double)main_grad[i][0][k]);
            }
    }
    close_world();
}

/* Weights of one shape in two domains, and in an eager and a captured chain of one domain, share no buffer. */
static void no_sharing(int arg) {
    gmm_gtp_view v[2][2];
    memset(v, 0, sizeof v);
    open_world(2, 31, 500);
    for (int i = 0; i < 2; i++) {
        rank *r = &W.r[i];
        const gmm_gtp_config config = config_of(r);
        gmm_gtp_domain d[2];
        begin(r, &config);
        d[0] = domain_of(r, 0, 0);
        d[1] = domain_of(r, 1, 1);
        d[1].gather_stream = d[1].reduce_stream = r->side[2];
        GTP_OK(r, gmm_gtp_add_domain(r->gtp, &d[0], &r->domain[0]));
        if (!arg) {
            d[1].reduce = &W.comm[0][i]; /* that of the other domain, on another stream */
            GTP_REFUSED(r, GMM_E_CONFIG, gmm_gtp_add_domain(r->gtp, &d[1], &r->domain[1]), "several streams", NULL);
            d[1].reduce = NULL;
            d[1].reduce_stream = NULL; /* those of the gathers */
            GTP_OK(r, gmm_gtp_add_domain(r->gtp, &d[1], &r->domain[1]));
        }
        for (int k = 0; k < 2; k++) {
            gmm_shard s = GMM_ZERO;
            gmm_gtp_weight w;
            gmm_gtp_chain c = GMM_ZERO;
            int32_t id;
            s.dtype = GMM_F32;
            s.rows = 12;
            s.cols = 5;
            s.gtp_size = 2;
            s.gtp_rank = i;
            s.unit = 2;
            w = weight_of(&s, 0, k ? "second" : "first");
            for (int n = 0; n < 30; n++) ((float *)w.data[0])[n] = (float)(100 * k + 30 * i + n);
            GTP_OK(r, gmm_gtp_add_weight(r->gtp, &w, &id));
            GTP_OK(r, gmm_gtp_add_bundle(r->gtp, r->domain[arg ? 0 : k], &id, 1, w.name, &r->bundle[k]));
            c.bundles = &r->bundle[k];
            c.count = 1;
            c.captured = arg && k;
            GTP_OK(r, gmm_gtp_add_chain(r->gtp, &c, &id));
            c.pass = GMM_GTP_BACKWARD;
            c.bundles = r->bundle;
            c.count = c.together = 2;
            if (k && !arg)
                GTP_REFUSED(r, GMM_E_CONFIG, gmm_gtp_add_chain(r->gtp, &c, &id), "'first' and 'second'", "domains 0 "
                            "and 1", NULL);
        }
        bind(r, arg ? 1 : 2);
        T_CHECK(W.r[i].need[0].gather_slots + W.r[i].need[1].gather_slots == 2, "one slot each");
    }
    for (int round = 0; round < 8; round++) {
        for (int k = 0; k < 2; k++)
            for (int i = 0; i < 2; i++)
                GTP_OK(&W.r[i], gmm_gtp_acquire(W.r[i].gtp, W.r[i].bundle[k], GMM_GTP_FORWARD, W.r[i].compute,
                                                &v[k][i]));
        finish();
        for (int k = 0; k < 2; k++)
            for (int i = 0; i < 2; i++) {
                const int32_t ids[2] = {0, 1};
                for (int n = 0; n < 60; n++)
                    T_CHECK(((float *)v[k][i].mat.data)[n] == (float)(100 * k + n), "bundle %d element %d", k, n);
                GTP_OK(&W.r[i], gmm_gtp_release(W.r[i].gtp, W.r[i].bundle[k], GMM_GTP_FORWARD, W.r[i].compute));
                if (k) GTP_OK(&W.r[i], gmm_gtp_publish(W.r[i].gtp, ids, 2, W.r[i].compute));
            }
        T_CHECK(v[0][0].mat.data != v[1][0].mat.data, "one buffer");
    }
    close_world();
}

/* A counter-based random value: a function of seed, logical row and column. */
static float drawn(uint64_t seed, int64_t row, int64_t col) {
    return (float)(mix(seed + (uint64_t)row * 4096 + (uint64_t)col) % 100003) / 100003.0f;
}

/* Shards initialised by logical row gather to the weight that one rank initialises, and all rows differ;
   shards initialised with a seed of gmm_gtp_seed per rank have no row in common either. */
static void drawn_shards(int arg) {
    enum { ROWS = 72, COLS = 6 };
    static const int64_t sections[2] = {40, 32};
    const int g = arg;
    gmm_gtp_view v[MOST];
    float *shard[MOST];
    gmm_shard_plan plan[MOST];
    open_world(g, 41, 500);
    memset(v, 0, sizeof v);
    memset(plan, 0, sizeof plan);
    for (int i = 0; i < g; i++) {
        rank *r = &W.r[i];
        const gmm_gtp_config config = config_of(r);
        const gmm_gtp_domain d = domain_of(r, g > 1 ? 0 : -1, -1);
        gmm_shard s = GMM_ZERO;
        gmm_gtp_weight w;
        gmm_extent x[2];
        int32_t id, count = 0;
        begin(r, &config);
        GTP_OK(r, gmm_gtp_add_domain(r->gtp, &d, &r->domain[0]));
        s.dtype = GMM_F32;
        s.rows = ROWS;
        s.cols = COLS;
        s.section_rows = sections;
        s.sections = 2;
        s.gtp_size = g;
        s.gtp_rank = i;
        T_OK_TEXT(gmm_gtp_plan(&s, &plan[i], NULL), "");
        T_OK_TEXT(gmm_gtp_extents(&s, x, 2, &count, NULL), "");
        w = weight_of(&s, 0, "drawn");
        shard[i] = (float *)w.data[0];
        for (int n = 0; n < count; n++)
            for (int64_t row = 0; row < x[n].end - x[n].begin; row++)
                for (int64_t c = 0; c < COLS; c++)
                    shard[i][(x[n].shard_row + row) * COLS + c] = drawn(5, x[n].logical_row + row, c);
        GTP_OK(r, gmm_gtp_add_weight(r->gtp, &w, &id));
        GTP_OK(r, gmm_gtp_add_bundle(r->gtp, r->domain[0], &id, 1, "drawn", &r->bundle[0]));
        bind(r, 1);
    }
    for (int way = 0; way < 2; way++) {
        for (int i = 0; i < g && way; i++) { /* each rank with its own seed and local row numbers */
            const int32_t id = 0;
            for (int64_t k = 0; k < plan[i].valid_rows * COLS; k++)
                shard[i][k] = drawn(mix(gmm_gtp_seed(5, GMM_GRID_DENSE, (uint32_t)i)), k / COLS, k % COLS);
            GTP_OK(&W.r[i], gmm_gtp_publish(W.r[i].gtp, &id, 1, W.r[i].compute));
        }
        for (int i = 0; i < g; i++)
            GTP_OK(&W.r[i], gmm_gtp_acquire(W.r[i].gtp, 0, GMM_GTP_FORWARD, W.r[i].compute, &v[i]));
        finish();
        for (int i = 0; i < g; i++) {
            const float *w = (const float *)v[i].mat.data;
            for (int64_t a = 0; a < ROWS; a++) {
                for (int64_t c = 0; c < COLS && !way; c++)
                    T_CHECK(w[a * COLS + c] == drawn(5, a, c), "rank %d row %lld is not that of one rank", i,
                            (long long)a);
                for (int64_t b = 0; b < a; b++)
                    T_CHECK(memcmp(w + a * COLS, w + b * COLS, COLS * sizeof *w), "rows %lld and %lld are alike",
                            (long long)b, (long long)a);
            }
            GTP_OK(&W.r[i], gmm_gtp_release(W.r[i].gtp, 0, GMM_GTP_FORWARD, W.r[i].compute));
        }
        for (int i = 0; i < g; i++) GTP_OK(&W.r[i], gmm_gtp_fence(W.r[i].gtp, GMM_GTP_ALL, W.r[i].compute));
        finish();
    }
    close_world();
}

/* All experts of a bundle are one collective group per direction, at distinct offsets of one packed operand. */
static void many_experts(int n) {
    static counting count[2];
    float **main_grad = (float **)t_host(2 * 64 * sizeof *main_grad);
    gmm_gtp_view v[2], w[2];
    gmm_shard_plan p = GMM_ZERO;
    open_world(2, 51, 500);
    memset(v, 0, sizeof v);
    memset(w, 0, sizeof w);
    for (int i = 0; i < 2; i++) {
        rank *r = &W.r[i];
        gmm_gtp_config config = config_of(r);
        gmm_gtp_domain d = domain_of(r, 0, 0);
        const gmm_comm comm = counting_of(&count[i], &W.comm[0][i]);
        gmm_shard s = GMM_ZERO;
        int32_t ids[64];
        config.weights = 64;
        d.gather = d.reduce = &comm;
        begin(r, &config);
        GTP_OK(r, gmm_gtp_add_domain(r->gtp, &d, &r->domain[0]));
        s.dtype = GMM_F32;
        s.rows = 6;
        s.cols = 3;
        s.unit = 2;
        s.gtp_size = 2;
        s.gtp_rank = i;
        for (int e = n - 1; e >= 0; e--) {
            gmm_gtp_weight x = weight_of(&s, e, "expert");
            T_OK_TEXT(gmm_gtp_plan(&s, &p, NULL), "");
            for (int64_t k = 0; k < p.valid_rows * 3; k++)
                ((float *)x.data[0])[k] = (float)(e * 100 + p.row0 * 3 + k);
            main_grad[i * 64 + e] = (float *)x.main_grad;
            GTP_OK(r, gmm_gtp_add_weight(r->gtp, &x, &ids[e]));
        }
        GTP_OK(r, gmm_gtp_add_bundle(r->gtp, r->domain[0], ids, n, "experts", &r->bundle[0]));
        bind(r, 1);
    }
    for (int i = 0; i < 2; i++) {
        GTP_OK(&W.r[i], gmm_gtp_acquire(W.r[i].gtp, 0, GMM_GTP_FORWARD, W.r[i].compute, &v[i]));
        GTP_OK(&W.r[i], gmm_gtp_wgrad(W.r[i].gtp, 0, W.r[i].compute, &w[i]));
        T_CHECK(count[i].groups == 1 && count[i].gathers == n, "%lld groups, %lld gathers", (long long)count[i].groups,
                (long long)count[i].gathers);
    }
    finish();
    for (int i = 0; i < 2; i++) {
        gmm_gtp_gradient in = GMM_ZERO;
        T_CHECK(v[i].count == n && v[i].mat.data && w[i].mat.data, "packed");
        for (int e = 0; e < n; e++)
            for (int k = 0; k < 18; k++) {
                T_CHECK(((float *)v[i].mat.data)[e * v[i].mat.group_stride + k] == (float)(e * 100 + k), "expert %d",
                        e);
                ((float *)w[i].mat.data)[e * w[i].mat.group_stride + k] = (float)(e * 10 + k + i);
            }
        in.scale = 1;
        GTP_OK(&W.r[i], gmm_gtp_release(W.r[i].gtp, 0, GMM_GTP_FORWARD, W.r[i].compute));
        GTP_OK(&W.r[i], gmm_gtp_submit(W.r[i].gtp, 0, &in, W.r[i].compute));
        T_CHECK(count[i].groups == 2 && count[i].scatters == n, "%lld groups, %lld reductions",
                (long long)count[i].groups, (long long)count[i].scatters);
        if (n > 1) {
            gmm_mat from = gmm_mat_packed(GMM_F32, main_grad[i * 64]);
            from.group_stride = 17;
            in.from = &from;
            GTP_REFUSED(&W.r[i], GMM_E_STRIDE, gmm_gtp_submit(W.r[i].gtp, 0, &in, W.r[i].compute), "group_stride 17",
                        NULL);
        }
    }
    finish();
    for (int i = 0; i < 2; i++)
        for (int e = 0; e < n; e++)
            for (int64_t k = 0; k < (i ? 2 : 4) * 3; k++)
                T_CHECK(main_grad[i * 64 + e][k] == (float)(2 * (e * 10 + (i * 12 + k)) + 1), "expert %d: %g", e,
                        (double)main_grad[i * 64 + e][k]);
    close_world();
}

/* After gmm_gtp_bind nothing is allocated: no context memory, no stream, no event. */
static struct made { long allocations, events, streams; } made;
static void *made_alloc(void *user, size_t bytes) {
    (void)user;
    made.allocations++;
    return malloc(bytes);
}
static void made_release(void *user, void *memory) {
    (void)user;
    free(memory);
}
static gmm_runtime beneath[MOST];
static gmm_status made_event(void *self, gmm_event *out) {
    made.events++;
    return beneath[0].event_create(self, out);
}
static gmm_status made_stream(void *self, int32_t priority, gmm_stream *out) {
    made.streams++;
    return beneath[0].stream_create(self, priority, out);
}
static void no_allocations(int arg) {
    gmm_ranks_graph *graph[2] = {NULL, NULL};
    struct made before;
    memset(&made, 0, sizeof made);
    open_world(2, 61, 500);
    for (int i = 0; i < 2; i++) {
        rank *r = &W.r[i];
        gmm_config config = GMM_ZERO;
        gmm_destroy(r->ctx);
        config.threads = 1;
        config.allocator.alloc = made_alloc;
        config.allocator.release = made_release;
        T_OK_TEXT(gmm_create(&r->ctx, &config, NULL), "");
        beneath[0] = r->rt;
        r->rt.event_create = made_event;
        r->rt.stream_create = made_stream;
        model_make(r, arg, 1, GMM_GTP_REDUCE_AUTO);
    }
    T_CHECK(made.allocations > 0 && made.events > 0, "nothing is counted");
    before = made;
    for (int step = 0; step < 3; step++)
        for (int i = 0; i < 2; i++) {
            rank *r = &W.r[i];
            int32_t id;
            if (arg && step == 0) {
                GTP_OK(r, gmm_gtp_dry_run(r->gtp, 1));
                run_forward(r);
                run_backward(r);
                GTP_OK(r, gmm_gtp_dry_run(r->gtp, 0));
                T_OK_TEXT(gmm_ranks_capture_begin(W.ranks, i, r->compute), gmm_ranks_error(W.ranks, i));
                GTP_OK(r, gmm_gtp_capture_begin(r->gtp, r->compute, &id));
            }
            if (!arg || step == 0) {
                run_forward(r);
                run_backward(r);
            }
            if (arg && step == 0) {
                GTP_OK(r, gmm_gtp_capture_end(r->gtp, r->compute));
                T_OK_TEXT(gmm_ranks_capture_end(W.ranks, i, r->compute, &graph[i]), gmm_ranks_error(W.ranks, i));
            }
            if (arg) {
                GTP_OK(r, gmm_gtp_pre_replay(r->gtp, 0, r->compute));
                T_OK_TEXT(gmm_ranks_launch(graph[i], r->compute), gmm_ranks_error(W.ranks, i));
                GTP_OK(r, gmm_gtp_post_replay(r->gtp, 0, r->compute));
            }
            GTP_OK(r, gmm_gtp_fence(r->gtp, GMM_GTP_ALL, r->compute));
            GTP_OK(r, gmm_gtp_publish(r->gtp, r->weight, LAYERS + 1, r->compute));
            GTP_OK(r, gmm_gtp_poll(r->gtp));
        }
    finish();
    T_CHECK(!memcmp(&made, &before, sizeof made), "%ld allocations, %ld events, %ld streams after bind",
            made.allocations - before.allocations, made.events - before.events, made.streams - before.streams);
    for (int i = 0; i < 2; i++) gmm_ranks_graph_destroy(graph[i]);
    close_world();
}

/* Views keep their addresses in every pass: eagerly, in a capture, in a second capture, and after a hundred
   replays, which read the values of the eager run. */
static void stable_addresses(int arg) {
    const void *first[2][2][LAYERS + 1];
    gmm_ranks_graph *graph[2][2];
    (void)arg;
    memset(first, 0, sizeof first);
    memset(graph, 0, sizeof graph);
    open_world(2, 71, 500);
    for (int i = 0; i < 2; i++) model_make(&W.r[i], 1, 1, GMM_GTP_REDUCE_AUTO);
    for (int round = 0; round < 4; round++) { /* 0 and 3: eager; 1 and 2: captured */
        for (int i = 0; i < 2; i++) {
            rank *r = &W.r[i];
            int32_t id = -1;
            const int captured = round == 1 || round == 2;
            if (captured) {
                T_OK_TEXT(gmm_ranks_capture_begin(W.ranks, i, r->compute), gmm_ranks_error(W.ranks, i));
                GTP_OK(r, gmm_gtp_capture_begin(r->gtp, r->compute, &id));
                T_CHECK(id == round - 1, "graph %d", (int)id);
            }
            for (int pass = 0; pass < 2; pass++)
                for (int l = 0; l <= LAYERS; l++) {
                    const int layer = pass ? LAYERS - l : l;
                    gmm_gtp_view v = GMM_ZERO;
                    const void *at;
                    GTP_OK(r, gmm_gtp_acquire(r->gtp, r->bundle[layer], (gmm_gtp_pass)pass, r->compute, &v));
                    give(r, look_run, layer, pass, &v.mat, 0);
                    GTP_OK(r, gmm_gtp_release(r->gtp, r->bundle[layer], (gmm_gtp_pass)pass, r->compute));
                    at = v.mat.table ? v.mat.table[0] : v.mat.data;
                    if (!first[i][pass][layer]) first[i][pass][layer] = at;
                    T_CHECK(first[i][pass][layer] == at, "round %d layer %d moved", round, layer);
                }
            if (captured) {
                GTP_OK(r, gmm_gtp_capture_end(r->gtp, r->compute));
                T_OK_TEXT(gmm_ranks_capture_end(W.ranks, i, r->compute, &graph[i][round - 1]),
                          gmm_ranks_error(W.ranks, i));
            }
        }
        finish();
        if (round == 2)
            for (int n = 0; n < 100; n++)
                for (int i = 0; i < 2; i++) {
                    rank *r = &W.r[i];
                    GTP_OK(r, gmm_gtp_pre_replay(r->gtp, n & 1, r->compute));
                    T_OK_TEXT(gmm_ranks_launch(graph[i][n & 1], r->compute), gmm_ranks_error(W.ranks, i));
                    GTP_OK(r, gmm_gtp_post_replay(r->gtp, n & 1, r->compute));
                }
        finish();
        for (int i = 0; i < 2; i++) { /* sums of all values read, one per eager round and replay */
            const model *m = (const model *)W.r[i].user;
            static double once[2];
            const double times = round < 2 ? 1 : round == 2 ? 101 : 102;
            if (round == 0) once[i] = m->seen[0];
            T_CHECK(m->seen[0] == times * once[i] && once[i] != 0, "round %d: %g, not %g times %g", round, m->seen[0],
                    times, once[i]);
        }
    }
    for (int i = 0; i < 2; i++)
        for (int n = 0; n < 2; n++) gmm_ranks_graph_destroy(graph[i][n]);
    close_world();
}

/* Every stream wait of rank 0 in captures and around replays is left out in turn: the race checker, the capture or the
   values read show it. One eager prefetch before has no acquire; a graph hands its prefetched gather to the next. */
static gmm_status graph_forward(rank *r) {
    gmm_status s = GMM_OK;
    for (int l = 0; l <= LAYERS && !s; l++) {
        gmm_gtp_view v = GMM_ZERO;
        s = gmm_gtp_acquire(r->gtp, r->bundle[l], GMM_GTP_FORWARD, r->compute, &v);
        if (!s) give(r, look_run, l, 0, &v.mat, 0);
        if (!s) s = gmm_gtp_release(r->gtp, r->bundle[l], GMM_GTP_FORWARD, r->compute);
    }
    return s;
}
static gmm_status graph_backward(rank *r) {
    gmm_status s = GMM_OK;
    for (int l = LAYERS; l >= 0 && !s; l--) {
        gmm_gtp_view v = GMM_ZERO, w = GMM_ZERO;
        gmm_gtp_gradient g = GMM_ZERO;
        s = gmm_gtp_acquire(r->gtp, r->bundle[l], GMM_GTP_BACKWARD, r->compute, &v);
        if (!s) give(r, look_run, l, 1, &v.mat, 0);
        if (!s) s = gmm_gtp_release(r->gtp, r->bundle[l], GMM_GTP_BACKWARD, r->compute);
        if (!s) s = gmm_gtp_wgrad(r->gtp, r->bundle[l], r->compute, &w);
        if (!s) give(r, grad_run, l, 1, &w.mat, 1);
        g.scale = 1;
        if (!s) s = gmm_gtp_submit(r->gtp, r->bundle[l], &g, r->compute);
    }
    return s;
}
/* Two steps of two micro-batches in graphs; mode 1: one graph, 2: two, 3: forward in one, backward eager. Returns the
   sum of the values that both ranks have read, or NAN if an error was reported. */
static double graph_steps(int mode, int prefetch, uint64_t seed) {
    gmm_ranks_graph *graph[2][2];
    gmm_status s = GMM_OK;
    double seen = 0;
    memset(graph, 0, sizeof graph);
    open_world(2, seed, 300);
    for (int i = 0; i < 2; i++) model_make(&W.r[i], 1, prefetch, GMM_GTP_REDUCE_AUTO);
    finish();
    dropped.waits = dropped.events = dropped.slots = dropped.pending = 0;
    memset(dropped.stream, 0, sizeof dropped.stream);
    memset(dropped.busy, 0, sizeof dropped.busy);
    for (int i = 0; i < 2 && !s; i++) {
        rank *r = &W.r[i];
        for (int part = 0; part < (mode == 2 ? 2 : 1) && !s; part++) {
            int32_t id = -1;
            if (!part) s = gmm_gtp_prefetch(r->gtp, r->bundle[2], GMM_GTP_FORWARD);
            if (!s) s = gmm_ranks_capture_begin(W.ranks, i, r->compute);
            if (!s) s = gmm_gtp_capture_begin(r->gtp, r->compute, &id);
            if (!s && part == 0) s = graph_forward(r);
            if (!s && (part == 1 || mode == 1)) s = graph_backward(r);
            if (!s) s = gmm_gtp_capture_end(r->gtp, r->compute);
            if (!s && i == 0) s = read_slots(r->rt.self, r->compute);
            if (!s) s = gmm_ranks_capture_end(W.ranks, i, r->compute, &graph[i][part]);
        }
    }
    for (int step = 0; step < 4 && !s; step++)
        for (int i = 0; i < 2 && !s; i++) {
            rank *r = &W.r[i];
            for (int part = 0; part < (mode == 1 ? 1 : 2) && !s; part++) {
                if (part == 1 && mode == 3) {
                    s = graph_backward(r);
                    continue;
                }
                s = gmm_gtp_pre_replay(r->gtp, part, r->compute);
                if (!s) s = gmm_ranks_launch(graph[i][part], r->compute);
                if (!s) s = gmm_gtp_post_replay(r->gtp, part, r->compute);
            }
            if (step % 2 == 0 || s) continue;
            {
                const gmm_stream compute = r->compute;
                r->compute = r->side[2]; /* the optimizer has a stream of its own */
                s = gmm_gtp_fence(r->gtp, GMM_GTP_ALL, r->compute);
                if (!s) give(r, update_run, 0, 0, NULL, 1);
                if (!s) s = gmm_gtp_publish(r->gtp, r->weight, LAYERS + 1, r->compute);
                r->compute = compute;
            }
        }
    if (!s) s = gmm_ranks_run(W.ranks);
    if (gmm_ranks_races(W.ranks, NULL) > 0 || s) seen = NAN;
    for (int i = 0; i < 2; i++) {
        const model *m = (const model *)W.r[i].user;
        seen += m->seen[0] + 3 * m->seen[1];
    }
    if (s) {
        for (int i = 0; i < 2; i++) W.comm[0][i].give_up(W.comm[0][i].self, "the case is over");
        for (int i = 0; i < 2; i++) W.comm[1][i].give_up(W.comm[1][i].self, "the case is over");
    }
    for (int i = 0; i < 2; i++)
        for (int part = 0; part < 2; part++) gmm_ranks_graph_destroy(graph[i][part]);
    return seen;
}
static void graph_mutation(int arg) {
    const int mode = first_of(arg), prefetch = second_of(arg);
    double whole;
    int64_t waits, needed = 0;
    dropped.drop = -1;
    dropped.probes = 0;
    whole = graph_steps(mode, prefetch, 1);
    waits = dropped.waits;
    T_CHECK(whole == whole && waits > 20, "%lld waits", (long long)waits);
    for (dropped.drop = 1; dropped.drop <= waits; dropped.drop++) {
        int noticed[2] = {0, 0};
        for (dropped.probes = 0; dropped.probes < 2; dropped.probes++)
            for (uint64_t seed = 1; seed <= 3; seed++)
                noticed[dropped.probes] += graph_steps(mode, prefetch, seed) != whole;
        needed += noticed[1] > 0;
        T_CHECK(noticed[0] == (noticed[1] ? 3 : 0), "wait %lld of %lld: %d of 3 schedules show it, %d with probes",
                (long long)dropped.drop, (long long)waits, noticed[0], noticed[1]);
    }
    T_CHECK(needed > waits / 3, "%lld of %lld waits are needed", (long long)needed, (long long)waits);
    if (T.verbose) printf("%lld waits, %lld of them needed\n", (long long)waits, (long long)needed);
    dropped.drop = dropped.probes = 0;
    gtp_check_memory();
    open_world(1, 0, 0);
}

/* Experts of a bundle are published from two streams, and the gather waits for both. A synchronous submit orders the
   caller's stream after the sum; the amax reduction is ordered with the work that writes and reads the amaxes. */
static void ordered_callers(int arg) {
    float *main_grad[2][2];
    static const float values[60] = {1};
    gmm_shard_plan plan[2][2];
    open_world(2, 81 + (uint64_t)arg, 500);
    for (int i = 0; i < 2; i++) {
        rank *r = &W.r[i];
        gmm_gtp_domain d = domain_of(r, 0, 1);
        gmm_gtp_gradient in = GMM_ZERO;
        gmm_gtp_view v = GMM_ZERO;
        float *amax = (float *)gtp_memory(60 * sizeof *amax, 0);
        d.synchronous = 1;
        if (arg == 0) {
            const gmm_gtp_config config = config_of(r);
            gmm_shard s = GMM_ZERO;
            int32_t ids[2];
            void *data[2];
            begin(r, &config);
            GTP_OK(r, gmm_gtp_add_domain(r->gtp, &d, &r->domain[0]));
            s.dtype = GMM_F32;
            s.rows = 24;
            s.cols = 5;
            s.gtp_size = 2;
            s.gtp_rank = i;
            s.unit = 2;
            for (int e = 0; e < 2; e++) {
                const gmm_gtp_weight w = weight_of(&s, e, "expert");
                data[e] = w.data[0];
                GTP_OK(r, gmm_gtp_add_weight(r->gtp, &w, &ids[e]));
            }
            GTP_OK(r, gmm_gtp_add_bundle(r->gtp, 0, ids, 2, "experts", &r->bundle[0]));
            bind(r, 1);
            for (int e = 0; e < 2; e++) {
                const gmm_stream own = r->compute;
                r->compute = e ? r->side[3] : own;
                give_floats(r, data[e], values, 60);
                GTP_OK(r, gmm_gtp_publish(r->gtp, &ids[e], 1, r->compute));
                r->compute = own;
            }
            GTP_OK(r, gmm_gtp_acquire(r->gtp, 0, GMM_GTP_FORWARD, r->compute, &v));
            GTP_OK(r, gmm_gtp_release(r->gtp, 0, GMM_GTP_FORWARD, r->compute));
            continue;
        }
        declare(r, 1, &d, main_grad[i], plan[i]);
        if (arg == 1) {
            GTP_OK(r, gmm_gtp_wgrad(r->gtp, 0, r->compute, &v));
            give_floats(r, v.mat.data, values, 60);
            in.scale = 1;
            in.add = GMM_GTP_SET;
            GTP_OK(r, gmm_gtp_submit(r->gtp, 0, &in, r->compute));
            /* deliberately without a fence */
            give_floats(r, main_grad[i][0], values, (size_t)(plan[i][0].shard_rows * 5));
        } else {
            give_floats(r, amax, values, 60);
            GTP_OK(r, gmm_gtp_amax(r->gtp, 0, amax, 60, r->compute));
            give_floats(r, amax, values, 60);
        }
    }
    finish();
    close_world();
}

/* The communicator receives all codes of a quantized bundle, then all scales, so that it can send adjacent buffers
   together. */
static void codes_then_scales(int arg) {
    static counting count[2];
    (void)arg;
    open_world(2, 52, 500);
    for (int i = 0; i < 2; i++) {
        rank *r = &W.r[i];
        const gmm_gtp_config config = config_of(r);
        gmm_gtp_domain d = domain_of(r, 0, 0);
        const gmm_comm comm = counting_of(&count[i], &W.comm[0][i]);
        gmm_gtp_view v = GMM_ZERO;
        gmm_shard s = GMM_ZERO;
        gmm_shard_plan p = GMM_ZERO;
        int32_t ids[4];
        d.gather = d.reduce = &comm;
        begin(r, &config);
        GTP_OK(r, gmm_gtp_add_domain(r->gtp, &d, &r->domain[0]));
        s.dtype = GMM_E4M3;
        s.scaling = GMM_SCALING_128X128;
        s.rows = 256;
        s.cols = 128;
        s.gtp_size = 2;
        s.gtp_rank = i;
        T_OK_TEXT(gmm_gtp_plan(&s, &p, NULL), "");
        for (int e = 0; e < 4; e++) {
            gmm_gtp_weight w = GMM_ZERO;
            w.shard = &s;
            w.expert = e;
            w.data[0] = gtp_memory((size_t)p.shard_data_bytes[0], 0);
            w.scale[0] = gtp_memory((size_t)p.shard_scale_bytes[0], 0);
            GTP_OK(r, gmm_gtp_add_weight(r->gtp, &w, &ids[e]));
        }
        GTP_OK(r, gmm_gtp_add_bundle(r->gtp, r->domain[0], ids, 4, "experts", &r->bundle[0]));
        bind(r, 1);
        GTP_OK(r, gmm_gtp_acquire(r->gtp, 0, GMM_GTP_FORWARD, r->compute, &v));
        GTP_OK(r, gmm_gtp_release(r->gtp, 0, GMM_GTP_FORWARD, r->compute));
        T_CHECK(count[i].gathers == 8 && count[i].turns == 2, "%lld gathers, the size changes %lld times",
                (long long)count[i].gathers, (long long)count[i].turns);
    }
    finish();
    close_world();
}

/* A forward chain that is its own successor: every gather but the first is prefetched. It needs as many slots as the
   prefetch window, and one more where the number of layers leaves a remainder. If the chain is closed after the seal
   (arg < 0), when slots are fixed, a head that shares the tail's slot is gathered at its acquire. */
enum { ROUNDS = 5 };
static void circles(int arg) {
    const int late = arg < 0, ahead = first_of(abs(arg)), layers = second_of(abs(arg)), window = ahead + 1;
    const int slots = layers <= window ? layers : late ? window : window + layers % window;
    const int shared = late && layers > window && layers % window;
    open_world(2, 91 + (uint64_t)abs(arg), 500);
    for (int i = 0; i < 2; i++) {
        rank *r = &W.r[i];
        const gmm_gtp_config config = config_of(r);
        const gmm_gtp_domain d = domain_of(r, 0, 1);
        gmm_gtp_chain c = GMM_ZERO;
        gmm_shard s = GMM_ZERO;
        int32_t chain;
        begin(r, &config);
        GTP_OK(r, gmm_gtp_add_domain(r->gtp, &d, &r->domain[0]));
        s.dtype = GMM_F32;
        s.rows = 8;
        s.cols = 4;
        s.gtp_size = 2;
        s.gtp_rank = i;
        s.unit = 2;
        for (int l = 0; l < layers; l++) {
            const gmm_gtp_weight w = weight_of(&s, 0, "layer");
            GTP_OK(r, gmm_gtp_add_weight(r->gtp, &w, &r->weight[l]));
            GTP_OK(r, gmm_gtp_add_bundle(r->gtp, 0, &r->weight[l], 1, w.name, &r->bundle[l]));
        }
        c.bundles = r->bundle;
        c.count = layers;
        c.prefetch = ahead;
        GTP_OK(r, gmm_gtp_add_chain(r->gtp, &c, &chain));
        if (!late) GTP_OK(r, gmm_gtp_follow(r->gtp, chain, chain));
        bind(r, 1);
        if (late) GTP_OK(r, gmm_gtp_follow(r->gtp, chain, chain));
        T_CHECK(r->need[0].gather_slots == slots, "%d slots, not %d", (int)r->need[0].gather_slots, slots);
    }
    for (int round = 0; round < ROUNDS; round++)
        for (int l = 0; l < layers; l++)
            for (int i = 0; i < 2; i++) {
                rank *r = &W.r[i];
                gmm_gtp_view v = GMM_ZERO;
                GTP_OK(r, gmm_gtp_acquire(r->gtp, r->bundle[l], GMM_GTP_FORWARD, r->compute, &v));
                GTP_OK(r, gmm_gtp_release(r->gtp, r->bundle[l], GMM_GTP_FORWARD, r->compute));
            }
    for (int i = 0; i < 2; i++) {
        gmm_gtp_statistics got = GMM_ZERO;
        GTP_OK(&W.r[i], gmm_gtp_statistics_of(W.r[i].gtp, &got));
        T_CHECK(got.exposed == (shared ? ROUNDS : 1) && got.busy == (shared ? ROUNDS : 0),
                "%lld of %lld gathers exposed, %lld prefetches left out", (long long)got.exposed,
                (long long)got.gathers, (long long)got.busy);
    }
    finish();
    close_world();
}

/* A prefetch is outdated by a publication alone, not by an acquire of another bundle that takes its slot. */
static void outdated(int published) {
    open_world(2, 17, 500);
    for (int i = 0; i < 2; i++) {
        rank *r = &W.r[i];
        const gmm_gtp_config config = config_of(r);
        const gmm_gtp_domain d = domain_of(r, 0, 1);
        const gmm_shard s = {.dtype = GMM_F32, .rows = 8, .cols = 4, .gtp_size = 2, .gtp_rank = i, .unit = 2};
        gmm_gtp_chain c = GMM_ZERO;
        int32_t chain;
        begin(r, &config);
        GTP_OK(r, gmm_gtp_add_domain(r->gtp, &d, &r->domain[0]));
        for (int l = 0; l < 3; l++) {
            const gmm_gtp_weight w = weight_of(&s, 0, "layer");
            GTP_OK(r, gmm_gtp_add_weight(r->gtp, &w, &r->weight[l]));
            GTP_OK(r, gmm_gtp_add_bundle(r->gtp, 0, &r->weight[l], 1, w.name, &r->bundle[l]));
        }
        c.bundles = r->bundle;
        c.count = 3;
        c.prefetch = 1;
        GTP_OK(r, gmm_gtp_add_chain(r->gtp, &c, &chain));
        bind(r, 1);
        T_CHECK(r->need[0].gather_slots == 2, "%d slots", (int)r->need[0].gather_slots);
    }
    for (int step = 0; step < 4; step++) /* 0 and 2 have one slot */
        for (int i = 0; i < 2; i++) {
            rank *r = &W.r[i];
            gmm_gtp_view v = GMM_ZERO;
            if (step == 1) GTP_OK(r, gmm_gtp_prefetch(r->gtp, r->bundle[2], GMM_GTP_FORWARD));
            if (step == 2 && published) GTP_OK(r, gmm_gtp_publish(r->gtp, &r->weight[2], 1, r->compute));
            if (step % 3) continue;
            GTP_OK(r, gmm_gtp_acquire(r->gtp, r->bundle[0], GMM_GTP_FORWARD, r->compute, &v));
            GTP_OK(r, gmm_gtp_release(r->gtp, r->bundle[0], GMM_GTP_FORWARD, r->compute));
        }
    for (int i = 0; i < 2; i++) {
        gmm_gtp_statistics got = GMM_ZERO;
        GTP_OK(&W.r[i], gmm_gtp_statistics_of(W.r[i].gtp, &got));
        T_CHECK(got.exposed == 2 && got.outdated == published, "%lld exposed, %lld outdated", (long long)got.exposed,
                (long long)got.outdated);
    }
    finish();
    close_world();
}

void tests_gtp_runtime(void) {
    static const int sizes[] = {1, 2, 4};
    static const char *const modes[] = {"none", "one graph", "two graphs", "a graph, then none"};
    for (int i = 0; i < (int)T_COUNT(formats); i++)
        for (int k = 0; k < 3; k++)
            t_add_host(transport, format_arg(i, sizes[k]), "gtp runtime gather %s %s %lld x %lld g=%d",
                       gmm_dtype_name(formats[i].dtype), gmm_scaling_name(formats[i].scaling),
                       (long long)formats[i].rows, (long long)formats[i].cols, sizes[k]);
    for (int i = 0; i < 4; i++) t_add_host(scales, i, "gtp runtime scale %d", i);
    t_add_host(outdated, 0, "gtp runtime prefetch whose slot another bundle takes");
    t_add_host(outdated, 1, "gtp runtime prefetch that a publication outdates");
    t_add_host(amax, 0, "gtp runtime amax of all shards");
    t_add_host(ordered_callers, 0, "gtp runtime shards published from two streams");
    t_add_host(ordered_callers, 1, "gtp runtime a synchronous submit needs no fence");
    t_add_host(ordered_callers, 2, "gtp runtime amax in the order of a stream");
    for (int k = 0; k < 3; k++)
        for (int i = 1; i < 4; i++)
            t_add_host(graphs, two_args(i, sizes[k]), "gtp runtime replays of %s g=%d", modes[i], sizes[k]);
    for (int i = 1; i < 4; i++)
        for (int k = 1; k < 4; k += 2)
            t_add_host(graph_mutation, two_args(i, k), "gtp runtime each wait of graphs left out, %s, depth %d",
                       modes[i], k);
    for (int i = 0; i < 3; i++)
        t_add_host(unfenced, i, "gtp runtime replays without a fence, %s", i == 0 ? "exchanges" : i == 1 ? "sums"
                   : "one communicator");
    t_add_host(capture_rules, 0, "gtp runtime capture rules");
    for (int i = 0; i < 2; i++) t_add_host(poll, i, "gtp runtime poll finds what hangs%s", i ? ", an amax" : "");
    t_add_host(published_while_held, 0, "gtp runtime a hook publishes what backward holds");
    t_add_host(failed_hooks, 0, "gtp runtime a publication fails in a hook");
    t_add_host(replay_hangs, 0, "gtp runtime a replay that does not end");
    t_add_host(hashed_calls, 0, "gtp runtime calls in the hash");
    t_add_host(further_ranks, 0, "gtp runtime further ranks of amaxes hang");
    t_add_host(further_ranks_fail, 0, "gtp runtime further ranks of amaxes fail");
    t_add_host(huge_strides, 0, "gtp runtime gradients with huge strides");
    for (int i = 0; i < 2; i++) t_add_host(huge_buffers, i, "gtp runtime huge buffers%s", i ? ", held together" : "");
    t_add_host(declarations, 0, "gtp runtime declarations");
    t_add_host(states, 0, "gtp runtime states");
    t_add_host(table_errors, 0, "gtp runtime errors");
    t_add_host(refused_captures, 0, "gtp runtime launches and captures that are refused");
    t_add_host(failed_records, 0, "gtp runtime records without memory");
    t_add_host(half_bound, 0, "gtp runtime an object that was half bound");
    t_add_host(out_of_step, 0, "gtp runtime ranks out of step");
    for (int i = 0; i < 3; i++)
        t_add_host(swapped_bundles, i, "gtp runtime two bundles of one size swapped on one rank, %s",
                   i == 0 ? "gathers" : i == 1 ? "reductions" : "exchanges");
    for (int i = 1; i <= 2; i++) t_add_host(operations, i, "gtp runtime views in operations g=%d", i);
    t_add_host(hooked_mlp, 0, "gtp runtime weights gathered by hooks of an MLP");
    t_add_host(hooked_mlp, 1, "gtp runtime weights released before the product");
    for (int i = 1; i <= 3; i += 2)
        t_add_host(acquired_only, i, "gtp runtime products read acquired views, %d experts", i);
    for (int i = 0; i < 2; i++) t_add_host(poisoned, i, "gtp runtime scratch of 12345%s", i ? ", exchanged" : "");
    t_add_host(codes_then_scales, 0, "gtp runtime codes of a bundle, then scales");
    for (int l = 1; l <= BUNDLES; l++)
        for (int k = 1; k < 4; k++)
            t_add_host(circles, two_args(k, l), "gtp runtime a chain of %d follows itself, prefetch %d", l, k);
    for (int l = 2; l <= BUNDLES; l++)
        t_add_host(circles, -two_args(1, l), "gtp runtime a chain of %d, closed late", l);
    for (int i = 0; i < 2; i++) t_add_host(no_sharing, i, "gtp runtime no buffer in two %s", i ? "chains" : "domains");
    for (int i = 1; i <= 8; i *= 2) t_add_host(drawn_shards, i, "gtp runtime shards drawn by logical rows, g=%d", i);
    for (int i = 1; i <= 64; i *= i == 2 ? 4 : i == 8 ? 8 : 2)
        t_add_host(many_experts, i, "gtp runtime bundle of %d experts", i);
    for (int i = 0; i < 2; i++) t_add_host(no_allocations, i, "gtp runtime no allocation%s", i ? ", captured" : "");
    t_add_host(stable_addresses, 0, "gtp runtime addresses in captures and replays");
}
